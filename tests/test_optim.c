/* Optimizers against float64 loops that follow torch.optim's documented formulas; schedules against closed forms. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

static float uniform(uint64_t *state) { return (float)(test_random(state) >> 8) * 0x1p-23f - 1; } /* [-1, 1) */

/* Two parameters, each pulled to a target by a mean squared error of its own: the gradient of element i is 2 (p_i - target_i) / n. */
enum { N_BIAS = 37, ROWS = 13, COLS = 331, N_WEIGHT = ROWS * COLS, STEPS = 20 };

typedef struct reference { int n; bool decays; double p[N_WEIGHT], m[N_WEIGHT], v[N_WEIGHT], g[N_WEIGHT]; } reference;

/* One step (number t, from 1) on r->g. Formulas: torch.optim.SGD, Adam and AdamW, documentation of PyTorch 2. */
static void reference_step(reference *r, const tt_optimizer_options *o, double lr, double factor, int t)
{
    double decay = r->decays ? o->weight_decay : 0, b1 = o->beta1, b2 = o->beta2;
    for (int k = 0; k < r->n; k++) {
        double g = r->g[k] * factor;
        if (o->kind == TT_SGD) {
            g += decay * r->p[k];
            if (o->momentum != 0) {
                r->m[k] = t == 1 ? g : o->momentum * r->m[k] + g;
                g = o->nesterov ? g + o->momentum * r->m[k] : r->m[k];
            }
            r->p[k] -= lr * g;
            continue;
        }
        if (o->kind == TT_ADAM) g += decay * r->p[k];
        else r->p[k] -= lr * decay * r->p[k];
        r->m[k] = b1 * r->m[k] + (1 - b1) * g;
        r->v[k] = b2 * r->v[k] + (1 - b2) * g * g;
        double m = r->m[k] / (1 - pow(b1, t)), v = r->v[k] / (1 - pow(b2, t));
        r->p[k] -= lr * m / (sqrt(v) + o->eps);
    }
}

/* Largest difference of parameters and of the norm, relative to their size, over STEPS steps with changing targets and rates. */
static double optimizer_error(const tt_optimizer_options *o, bool decay_bias, bool decay_weight, double *norm_error)
{
    static reference bias, weight;
    static float values[N_WEIGHT], targets[2][N_WEIGHT];
    reference *both[2] = {&bias, &weight};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int64_t dims[2][2] = {{N_BIAS, 0}, {ROWS, COLS}};
    tt_init init = {TT_INIT_NORMAL, 1.0f};
    tt_param *p[2] = {tt_param_new(ctx, "layer.bias", 1, dims[0], init), tt_param_new(ctx, "layer.weight", 2, dims[1], init)};
    tt_tape *t = tt_tape_new(ctx);
    tt_value target[2] = {tt_input(t, "bias target", TT_F32, 1, N_BIAS), tt_input(t, "weight target", TT_F32, ROWS, COLS)}, loss[2];
    for (int k = 0; k < 2; k++) loss[k] = tt_mean_squared_error(t, tt_param_value(t, p[k]), target[k], tt__handle(0));
    tt_compile_options c = tt_compile_options_default();
    c.optimizer = *o;
    tt_program *program = tt_compile(t, tt_add(t, loss[0], loss[1]), &c);
    uint64_t s = 11;
    double error = 0;
    *norm_error = 0;
    memset(&bias, 0, sizeof bias);
    memset(&weight, 0, sizeof weight);
    bias.n = N_BIAS; bias.decays = decay_bias;
    weight.n = N_WEIGHT; weight.decays = decay_weight;
    for (int k = 0; k < 2 && program; k++) {
        tt_param_get(p[k], values);
        for (int i = 0; i < both[k]->n; i++) both[k]->p[i] = values[i];
    }
    for (int step = 1; step <= STEPS && program; step++) {
        float lr = 0.01f * (float)(1 + step % 3);
        double squares = 0, factor = 1;
        tt_stats stats;
        for (int k = 0; k < 2; k++) {
            for (int i = 0; i < both[k]->n; i++) {
                targets[k][i] = step % 5 ? uniform(&s) * 3 : (float)both[k]->p[i]; /* every fifth step the gradient nearly vanishes */
                both[k]->g[i] = 2 * (both[k]->p[i] - targets[k][i]) / both[k]->n;
                squares += both[k]->g[i] * both[k]->g[i];
            }
            CHECK(tt_set(program, target[k], targets[k], k ? ROWS : 1) == TT_OK);
        }
        double norm = sqrt(squares);
        if (o->clip_norm > 0 && o->clip_norm / (norm + 1e-6) < 1) factor = o->clip_norm / (norm + 1e-6);
        for (int k = 0; k < 2; k++) reference_step(both[k], o, lr, factor, step);
        if (!CHECK(tt_step(program, lr, &stats) == TT_OK && stats.step == step)) break;
        double wrong = fabs(stats.grad_norm - norm) / (norm + 0.01);
        if (!(wrong <= *norm_error)) *norm_error = wrong;
        for (int k = 0; k < 2; k++) {
            tt_param_get(p[k], values);
            for (int i = 0; i < both[k]->n; i++) {
                double difference = fabs(values[i] - both[k]->p[i]) / (1 + fabs(both[k]->p[i]));
                if (!(difference <= error)) error = difference;
            }
        }
    }
    if (!program) error = INFINITY;
    tt_program_free(program);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return error;
}

static void check_optimizer(const tt_optimizer_options *o, bool decay_bias, bool decay_weight, const char *name, int line)
{
    double norm_error, error = optimizer_error(o, decay_bias, decay_weight, &norm_error);
    char what[160];
    snprintf(what, sizeof what, "%s: parameters differ by %.3g, gradient norms by %.3g", name, error, norm_error);
    test__check(error <= 3e-6 && norm_error <= 1e-5, __FILE__, line, what);
}
#define CHECK_OPTIMIZER(o, bias, weight, name) check_optimizer((o), (bias), (weight), (name), __LINE__)

TEST(sgd)
{
    tt_optimizer_options o = tt_optimizer_options_default();
    o.kind = TT_SGD;
    o.weight_decay = 0;
    CHECK_OPTIMIZER(&o, false, false, "plain");
    o.momentum = 0.9f;
    CHECK_OPTIMIZER(&o, false, false, "momentum");
    o.weight_decay = 0.1f;
    CHECK_OPTIMIZER(&o, false, true, "momentum, decay of matrices");
    o.nesterov = true;
    CHECK_OPTIMIZER(&o, false, true, "nesterov");
    o.clip_norm = 0.05f;
    CHECK_OPTIMIZER(&o, false, true, "clipped");
    o.clip_norm = 1e6f;
    CHECK_OPTIMIZER(&o, false, true, "clip norm that is never reached");
}

TEST(adam)
{
    tt_optimizer_options o = tt_optimizer_options_default();
    CHECK(o.kind == TT_ADAMW && o.beta1 == 0.9f && o.beta2 == 0.999f && o.eps == 1e-8f && o.weight_decay == 0.01f && !o.no_decay && o.clip_norm == 0);
    o.eps = 1e-6f; /* where the gradient vanishes, m / sqrt(v) at 1e-8 is decided by the last bits of float32 */
    CHECK_OPTIMIZER(&o, false, true, "adamw");
    o.weight_decay = 0.5f;
    CHECK_OPTIMIZER(&o, false, true, "adamw, strong decay");
    o.clip_norm = 0.05f;
    CHECK_OPTIMIZER(&o, false, true, "adamw, clipped");
    o.kind = TT_ADAM;
    o.weight_decay = 0.01f; /* a strong one holds elements at zero, where the float64 loop and any float32 one part */
    CHECK_OPTIMIZER(&o, false, true, "adam");
    o.clip_norm = 0;
    o.beta1 = 0.5f;
    o.beta2 = 0.75f;
    CHECK_OPTIMIZER(&o, false, true, "adam, other betas");
    o.beta1 = 0;
    CHECK_OPTIMIZER(&o, false, true, "adam without momentum");
}

TEST(decay_rules)
{
    static const char *const none[] = {NULL}, *const weights[] = {"*.weight", NULL}, *const all[] = {"nothing", "layer.*", NULL}, *const bias[] = {"*.bia?", NULL};
    tt_optimizer_options o = tt_optimizer_options_default();
    o.eps = 1e-6f;
    o.weight_decay = 0.3f;
    CHECK_OPTIMIZER(&o, false, true, "default: one dimension does not decay");
    o.no_decay = none;
    CHECK_OPTIMIZER(&o, true, true, "an empty list decays all");
    o.no_decay = weights;
    CHECK_OPTIMIZER(&o, true, false, "weights do not decay");
    o.no_decay = all;
    CHECK_OPTIMIZER(&o, false, false, "none decays");
    o.kind = TT_SGD;
    o.no_decay = bias;
    CHECK_OPTIMIZER(&o, false, true, "biases do not decay");
}

/* The first step of Adam moves every element by lr, whatever the size of its gradient: only right with bias correction. */
TEST(bias_correction)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int64_t n = 5;
    tt_init zeros = {TT_INIT_ZEROS, 0};
    tt_param *p = tt_param_new(ctx, "p", 1, &n, zeros);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options c = tt_compile_options_default();
    tt_value target = tt_input(t, "target", TT_F32, 1, n);
    float targets[5] = {1e-3f, -1, 100, -1e4f, 3}, got[5];
    tt_program *program = tt_compile(t, tt_mean_squared_error(t, tt_param_value(t, p), target, tt__handle(0)), &c);
    REQUIRE(program && tt_set(program, target, targets, 1) == TT_OK && tt_step(program, 0.25f, NULL) == TT_OK);
    tt_param_get(p, got);
    for (int k = 0; k < 5; k++) CHECK_NEAR(got[k], targets[k] > 0 ? 0.25 : -0.25, 1e-4);
    tt_program_free(program);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* bf16-true: steps far below half a unit in the last place survive on average, and the same run gives the same bits. */
TEST(stochastic_rounding_moves_bf16_weights)
{
    enum { N = 8192, TINY_STEPS = 16 };
    static float values[2][N], targets[N];
    for (int run = 0; run < 2; run++) {
        test_allocator a;
        tt_context_options co = test_options(&a);
        co.threads = run ? 3 : 1;
        tt_context *ctx = tt_open(&co);
        int64_t n = N;
        tt_init ones = {TT_INIT_ONES, 0};
        tt_param *p = tt_param_new(ctx, "p", 1, &n, ones);
        tt_tape *t = tt_tape_new(ctx);
        tt_compile_options c = tt_compile_options_default();
        tt_value target = tt_input(t, "target", TT_F32, 1, N);
        c.precision = "bf16-true";
        c.optimizer.kind = TT_SGD;
        c.optimizer.weight_decay = 0;
        tt_program *program = tt_compile(t, tt_mean_squared_error(t, tt_param_value(t, p), target, tt__handle(0)), &c);
        REQUIRE(program != NULL);
        for (int k = 0; k < N; k++) targets[k] = 1025; /* gradient 2 (1 - 1025) / N = -1/4 */
        for (int step = 0; step < TINY_STEPS; step++) REQUIRE(tt_set(program, target, targets, 1) == TT_OK && tt_step(program, 0x1p-9f, NULL) == TT_OK);
        tt_param_get(p, values[run]);
        double sum = 0;
        bool on_grid = true;
        for (int k = 0; k < N; k++) { sum += values[run][k]; on_grid &= values[run][k] == tt__from_bf16(tt__to_bf16(values[run][k])); }
        CHECK(on_grid);
        CHECK_NEAR(sum / N - 1, TINY_STEPS * 0x1p-11, TINY_STEPS * 0x1p-11 * 0.1); /* half a unit is 2^-8 */
        tt_program_free(program);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(memcmp(values[0], values[1], sizeof values[0]) == 0);
}

/* Four micro-batches with an update at the end are one step on all rows, whatever the weights, and in a program that accumulates. */
TEST(micro_batches_equal_one_batch)
{
    enum { BATCH = 16, IN = 7, OUT = 3 };
    static float results[3][IN * OUT + OUT];
    double losses[3], norms[3];
    for (int run = 0; run < 3; run++) { /* 0: plain step; 1: tt_step of a program that accumulates; 2: micro-batches of 1, 6, 4 and 5 */
        test_allocator a;
        tt_context *ctx = test_open(&a);
        int64_t dims[2] = {OUT, IN}, n = OUT;
        tt_init init = {TT_INIT_NORMAL, 0.5f};
        tt_param *w = tt_param_new(ctx, "w", 2, dims, init), *b = tt_param_new(ctx, "b", 1, &n, init);
        tt_tape *t = tt_tape_new(ctx);
        int64_t rows = tt_axis(t, "rows", BATCH);
        tt_value x = tt_input(t, "x", TT_F32, rows, IN), y = tt_input(t, "y", TT_I32, rows, 1), weights = tt_input(t, "weights", TT_F32, rows, 1);
        tt_cross_entropy_options ce = tt_cross_entropy_options_default();
        tt_compile_options c = tt_compile_options_default();
        float xs[BATCH * IN], ws[BATCH];
        int32_t ys[BATCH];
        uint64_t s = 5;
        tt_stats stats;
        ce.weights = weights;
        c.accumulate = run > 0;
        c.optimizer.clip_norm = 0.1f;
        tt_program *p = tt_compile(t, tt_cross_entropy(t, tt_linear(t, x, w, b), y, &ce), &c);
        REQUIRE(p != NULL);
        for (int step = 0; step < 3; step++) {
            static const int parts[4] = {1, 6, 4, 5};
            for (int k = 0; k < BATCH * IN; k++) xs[k] = uniform(&s);
            for (int k = 0; k < BATCH; k++) { ys[k] = k % 5 == 4 ? -100 : k % OUT; ws[k] = 1.25f + uniform(&s); }
            int count = run == 2 ? 4 : 1;
            for (int part = 0, from = 0; part < count; part++) {
                int size = run == 2 ? parts[part] : BATCH;
                CHECK(tt_set(p, x, xs + from * IN, size) == TT_OK && tt_set(p, y, ys + from, size) == TT_OK && tt_set(p, weights, ws + from, size) == TT_OK);
                CHECK((run == 2 ? tt_micro_step(p, &stats) : tt_step(p, 0.05f, &stats)) == TT_OK);
                from += size;
            }
            if (run == 2) CHECK(tt_update(p, 0.05f, &stats) == TT_OK);
            CHECK(stats.step == step + 1);
        }
        losses[run] = stats.loss;
        norms[run] = stats.grad_norm;
        tt_param_get(w, results[run]);
        tt_param_get(b, results[run] + IN * OUT);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
    for (int run = 1; run < 3; run++) {
        CHECK_NEAR(losses[run], losses[0], 1e-6);
        CHECK_NEAR(norms[run], norms[0], 1e-6);
        for (int k = 0; k < IN * OUT + OUT; k++) CHECK_NEAR(results[run][k], results[0][k], 2e-6);
    }
}

TEST(contradictory_options_are_refused_together)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int64_t n = 3;
    tt_init zeros = {TT_INIT_ZEROS, 0};
    tt_tape *t = tt_tape_new(ctx);
    tt_value target = tt_input(t, "target", TT_F32, 1, n);
    tt_value loss = tt_mean_squared_error(t, tt_param_value(t, tt_param_new(ctx, "p", 1, &n, zeros)), target, tt__handle(0));
    tt_compile_options c = tt_compile_options_default();
    c.optimizer.beta1 = 1;
    c.optimizer.beta2 = -0.1f;
    c.optimizer.eps = NAN;
    c.optimizer.weight_decay = -1;
    c.optimizer.clip_norm = -2;
    CHECK(!tt_compile(t, loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "optimizer options: beta1 1 is not in [0, 1); beta2 -0.1 is not in [0, 1); eps ");
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "; weight_decay -1 is negative; clip_norm -2 is negative (0 means no clipping)");
    c.optimizer = tt_optimizer_options_default();
    c.optimizer.kind = TT_SGD;
    c.optimizer.nesterov = true;
    c.optimizer.beta1 = 7; /* not SGD's business */
    CHECK(!tt_compile(t, loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "optimizer options: nesterov needs a momentum above 0");
    CHECK(!strstr(tt_error(ctx), "beta1"));
    c.optimizer.momentum = 1.5f;
    c.optimizer.weight_decay = NAN;
    CHECK(!tt_compile(t, loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "momentum 1.5 is not in [0, 1); weight_decay ");
    c.optimizer.kind = (tt_optimizer_kind)9;
    CHECK(!tt_compile(t, loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "kind 9 is unknown");
    c.train = false; /* an evaluation has no optimizer */
    tt_program *p = tt_compile(t, loss, &c);
    CHECK(p != NULL);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* -------------------------------------------------------------------------------------------------- schedules */

TEST(schedules)
{
    tt_schedule s;
    memset(&s, 0, sizeof s);
    s.lr = 0.5f;
    s.kind = TT_CONSTANT;
    CHECK(tt_schedule_lr(&s, 0) == 0.5f && tt_schedule_lr(&s, 1000000) == 0.5f);
    static const tt_schedule_kind kinds[] = {TT_CONSTANT, TT_LINEAR, TT_COSINE};
    for (int k = 0; k < 3; k++) {
        static const int64_t steps[] = {0, 1, 5, 9, 10, 11, 30, 60, 85, 109, 110, 111, 5000};
        s.kind = kinds[k];
        s.lr = 2e-3f;
        s.min_lr = 1e-4f;
        s.warmup_steps = 10;
        s.total_steps = 110;
        for (int j = 0; j < TEST_COUNT(steps); j++) {
            double done = ((double)steps[j] - 10) / 100, lr = 2e-3f, low = 1e-4f;
            if (done > 1) done = 1;
            double expected = steps[j] < 10 ? lr * (double)steps[j] / 10
                            : k == 0 ? lr : k == 1 ? lr + (low - lr) * done : low + (lr - low) * 0.5 * (1 + cos(acos(-1.0) * done));
            CHECK_NEAR(tt_schedule_lr(&s, steps[j]), expected, 1e-9);
        }
        CHECK(tt_schedule_lr(&s, 10) == 2e-3f && (k == 0 || tt_schedule_lr(&s, 110) == 1e-4f));
    }
    s.kind = TT_LINEAR; /* no warm-up; a warm-up that never ends */
    s.min_lr = 0;
    s.warmup_steps = 0;
    s.total_steps = 4;
    CHECK(tt_schedule_lr(&s, 0) == 2e-3f && tt_schedule_lr(&s, 4) == 0 && tt_schedule_lr(&s, 5) == 0);
    CHECK_NEAR(tt_schedule_lr(&s, 1), 1.5e-3, 1e-9);
    s.warmup_steps = s.total_steps = 4;
    CHECK_NEAR(tt_schedule_lr(&s, 3), 1.5e-3, 1e-9);
    CHECK(isfinite(tt_schedule_lr(&s, 4)) && tt_schedule_lr(&s, 5) == 0);
}

static const test_case tests[] = {
    TEST_CASE(sgd), TEST_CASE(adam), TEST_CASE(decay_rules), TEST_CASE(bias_correction), TEST_CASE(stochastic_rounding_moves_bf16_weights),
    TEST_CASE(micro_batches_equal_one_batch), TEST_CASE(contradictory_options_are_refused_together), TEST_CASE(schedules),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
