/* Tests that compare optimizers with float64 loops of the formulas in torch.optim's documentation, and
   schedules with closed forms. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

/* Two parameters of n elements, each pulled to a target by a mean squared error: element i has the gradient
   `2 (p[i] - target[i]) / n`. */
enum { N_BIAS = 37, ROWS = 13, COLS = 331, N_WEIGHT = ROWS * COLS, STEPS = 50 };

typedef struct reference {
    int n, rows; /* rows: of a matrix; 0: the parameter is no matrix */
    bool decays;
    double lr_factor;
    double p[N_WEIGHT], m[N_WEIGHT], v[N_WEIGHT], g[N_WEIGHT];
    bool pruned[N_WEIGHT];
    double movement[N_WEIGHT];
} reference;

/* Prunes after step number t (from 1), by sorting: the smallest magnitudes or, by movement, the lowest
   movements; of equal ones the first. */
static void prune_step(reference *r, const tt_optimizer_options *o, int t)
{
    static int order[N_WEIGHT];
    const int64_t step = t - 1, due = tt__min(step, o->prune_end) - o->prune_begin;
    const double at = step >= o->prune_end ? 1 : (double)(due - due % o->prune_every) /
                                                 (double)(o->prune_end - o->prune_begin);
    const int k = step < o->prune_begin ? 0 : (int)floor(o->prune * (1 - pow(1 - at, 3)) * r->n + 0.5);
    int already = 0, n = 0;
    for (int e = 0; e < r->n; e++) already += r->pruned[e];
    const bool movement = o->prune_by_movement;
    for (int e = 0; e < r->n && k > already; e++) {
        int at_place = n++;
        for (; at_place > 0; at_place--) { /* insertion, stable */
            const int other = order[at_place - 1];
            const double a = r->pruned[e] ? -INFINITY : movement ? r->movement[e] : fabs(r->p[e]);
            const double b = r->pruned[other] ? -INFINITY
                                              : movement ? r->movement[other] : fabs(r->p[other]);
            if (b <= a) break;
            order[at_place] = other;
        }
        order[at_place] = e;
    }
    for (int e = 0; e < k && k > already; e++) r->pruned[order[e]] = true;
    for (int e = 0; e < r->n; e++) if (r->pruned[e]) r->p[e] = 0;
}

/* Takes a step of Muon with r->g, as torch.optim.Muon with adjust_lr_fn "match_rms_adamw" does, in double
   precision. */
static void muon_step(reference *r, const tt_optimizer_options *o, double lr, double factor)
{
    const int rows = r->rows, cols = r->n / rows;
    static double x[N_WEIGHT], next[N_WEIGHT], gram[ROWS * ROWS], sums[ROWS * ROWS];
    /* Element (i, j) of the matrix or, with more rows than columns, of its transpose. */
    const bool tall = rows > cols;
    const int m = tall ? cols : rows, n = tall ? rows : cols;
    double squares = 0;
    for (int k = 0; k < r->n; k++) {
        const double g = r->g[k] * factor;
        r->m[k] += (g - r->m[k]) * (1 - o->momentum);
        const double u = o->nesterov ? g + (r->m[k] - g) * o->momentum : r->m[k];
        x[tall ? k % cols * n + k / cols : k] = u;
        squares += u * u;
    }
    for (int k = 0; k < r->n; k++) x[k] /= fmax(sqrt(squares), 1e-7);
    for (int step = 0; step < 5; step++) {
        memset(gram, 0, sizeof gram);
        for (int i = 0; i < m; i++)
            for (int j = 0; j < m; j++)
                for (int k = 0; k < n; k++) gram[i * m + j] += x[i * n + k] * x[j * n + k];
        for (int i = 0; i < m; i++)
            for (int j = 0; j < m; j++) {
                sums[i * m + j] = -4.7750 * gram[i * m + j];
                for (int k = 0; k < m; k++) sums[i * m + j] += 2.0315 * gram[i * m + k] * gram[k * m + j];
            }
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j++) {
                next[i * n + j] = 3.4445 * x[i * n + j];
                for (int k = 0; k < m; k++) next[i * n + j] += sums[i * m + k] * x[k * n + j];
            }
        memcpy(x, next, sizeof *x * (size_t)r->n);
    }
    const double decay = r->decays ? o->weight_decay : 0, scale = 0.2 * sqrt(fmax(rows, cols));
    for (int k = 0; k < r->n; k++)
        r->p[k] = r->p[k] * (1 - lr * decay) - lr * scale * x[tall ? k % cols * n + k / cols : k];
}

/* Takes step number t (from 1) of Adafactor with r->g, as torch.optim.Adafactor with eps (1e-30, 1e-3) does,
   in double precision. m has the running means of rows, v those of columns. */
static void adafactor_step(reference *r, const tt_optimizer_options *o, double lr, double factor, int t)
{
    const int rows = r->rows ? r->rows : 1, cols = r->n / rows;
    const double weight = pow(t, -0.8), decay = r->decays ? o->weight_decay : 0;
    static double update[N_WEIGHT];
    double mean = 0, updates = 0, params = 0;
    for (int i = 0; i < rows; i++) {
        double sum = 0;
        for (int j = 0; j < cols; j++) sum += r->g[i * cols + j] * r->g[i * cols + j] * factor * factor;
        r->m[i] += (sum / cols - r->m[i]) * weight;
        mean += r->m[i] / rows;
    }
    for (int j = 0; j < cols; j++) {
        double sum = 0;
        for (int i = 0; i < rows; i++) sum += r->g[i * cols + j] * r->g[i * cols + j] * factor * factor;
        r->v[j] += (sum / rows - r->v[j]) * weight;
    }
    for (int k = 0; k < r->n; k++) {
        const double variance = r->rows ? r->m[k / cols] * r->v[k % cols] / fmax(mean, 1e-30) : r->v[k];
        update[k] = r->g[k] * factor / sqrt(fmax(variance, 1e-60));
        updates += update[k] * update[k];
        params += r->p[k] * r->p[k];
    }
    const double step = lr * fmax(1e-3, sqrt(params / r->n)) / fmax(1, sqrt(updates / r->n));
    for (int k = 0; k < r->n; k++) r->p[k] = r->p[k] * (1 - lr * decay) - step * update[k];
}

/* Takes step number t (from 1) with the gradient r->g. The formulas are those of torch.optim.SGD, Adam and
   AdamW in the documentation of PyTorch 2, and of Lion's paper (Chen et al., 2023, algorithm 2). */
static void reference_step(reference *r, const tt_optimizer_options *o, double lr, double factor, int t)
{
    lr *= r->lr_factor;
    double decay = r->decays ? o->weight_decay : 0, b1 = o->beta1, b2 = o->beta2;
    if (o->kind == TT_MUON && r->rows) {
        muon_step(r, o, lr, factor);
        return;
    }
    if (o->kind == TT_ADAFACTOR) {
        adafactor_step(r, o, lr, factor, t);
        return;
    }
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
        if (o->kind == TT_LION) {
            const double blend = b1 * r->m[k] + (1 - b1) * g;
            r->p[k] -= lr * ((blend > 0) - (blend < 0) + decay * r->p[k]);
            r->m[k] = b2 * r->m[k] + (1 - b2) * g;
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

static double lr_factors[2] = {1, 1}; /* factors on the learning rate of layer.0.bias, layer.2.weight */
static bool tall_weight; /* the matrix has COLS rows and ROWS columns */

/* Returns the largest difference between parameters and the float64 loop, relative to the parameters' size,
   over STEPS steps with changing targets and rates. *norm_error: the largest difference of gradient norms. */
static double optimizer_error(const tt_optimizer_options *o, bool decay_bias, bool decay_weight,
                              double *norm_error)
{
    static reference bias, weight;
    static float values[N_WEIGHT], targets[2][N_WEIGHT];
    reference *both[2] = {&bias, &weight};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const int rows = tall_weight ? COLS : ROWS;
    int64_t dims[2][2] = {{N_BIAS, 0}, {rows, N_WEIGHT / rows}};
    tt_init init = {TT_INIT_NORMAL, 1.0f};
    tt_param *p[2] = {tt_param_new(ctx, "layer.0.bias", 1, dims[0], init),
                      tt_param_new(ctx, "layer.2.weight", 2, dims[1], init)};
    tt_tape *t = tt_tape_new(ctx);
    tt_value target[2] = {tt_input(t, "bias target", TT_F32, 1, N_BIAS),
                          tt_input(t, "weight target", TT_F32, rows, N_WEIGHT / rows)},
             loss[2];
    for (int k = 0; k < 2; k++)
        loss[k] = tt_mean_squared_error(t, tt_param_value(t, p[k]), target[k], tt__handle(t, 0));
    tt_compile_options c = tt_compile_options_default();
    c.optimizer = *o;
    tt_program *program = tt_compile(t, tt_add(t, loss[0], loss[1]), &c);
    uint64_t s = 11;
    double error = 0;
    *norm_error = 0;
    memset(&bias, 0, sizeof bias);
    memset(&weight, 0, sizeof weight);
    bias.n = N_BIAS; bias.decays = decay_bias; bias.lr_factor = lr_factors[0];
    weight.rows = rows;
    weight.n = N_WEIGHT; weight.decays = decay_weight; weight.lr_factor = lr_factors[1];
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
                /* In every fifth step the gradient is nearly 0. */
                targets[k][i] = step % 5 ? test_uniform(&s) * 3 : (float)both[k]->p[i];
                both[k]->g[i] = 2 * (both[k]->p[i] - targets[k][i]) / both[k]->n;
                squares += both[k]->g[i] * both[k]->g[i];
            }
            CHECK(tt_set(program, target[k], targets[k], k ? rows : 1) == TT_OK);
        }
        double norm = sqrt(squares);
        if (o->clip_norm > 0 && o->clip_norm / (norm + 1e-6) < 1) factor = o->clip_norm / (norm + 1e-6);
        for (int i = 0; i < weight.n; i++) weight.movement[i] -= weight.g[i] * factor * weight.p[i];
        for (int k = 0; k < 2; k++) reference_step(both[k], o, lr, factor, step);
        if (o->prune > 0) prune_step(&weight, o, step);
        if (!CHECK(tt_step(program, lr, &stats) == TT_OK && stats.step == step)) break;
        double wrong = fabs(stats.grad_norm - norm) / (norm + 0.01);
        if (!(wrong <= *norm_error)) *norm_error = wrong;
        for (int k = 0; k < 2; k++) {
            tt_param_get(p[k], values);
            for (int i = 0; i < both[k]->n; i++) {
                double difference = fabs(values[i] - both[k]->p[i]) / (1 + fabs(both[k]->p[i]));
                if (!(difference <= error) && !isnan(error)) error = difference;
            }
        }
    }
    if (!program) error = INFINITY;
    tt_program_free(program);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return error;
}

static void check_optimizer(const tt_optimizer_options *o, bool decay_bias, bool decay_weight,
                            const char *name, int line)
{
    double norm_error, error = optimizer_error(o, decay_bias, decay_weight, &norm_error);
    char what[160];
    snprintf(what, sizeof what, "%s: parameters differ by %.3g, gradient norms by %.3g", name, error,
             norm_error);
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
    CHECK(o.kind == TT_ADAMW && o.beta1 == 0.9f && o.beta2 == 0.999f && o.eps == 1e-8f &&
          o.weight_decay == 0.01f && !o.no_decay && o.clip_norm == 0);
    /* The usual eps, 1e-8, would let the last bits of float32 decide `m / sqrt(v)` of small gradients. */
    o.eps = 1e-6f;
    CHECK_OPTIMIZER(&o, false, true, "adamw");
    o.weight_decay = 0.5f;
    CHECK_OPTIMIZER(&o, false, true, "adamw, strong decay");
    o.clip_norm = 0.05f;
    CHECK_OPTIMIZER(&o, false, true, "adamw, clipped");
    o.kind = TT_ADAM;
    /* A strong decay would keep elements at zero, where float64 and float32 loops differ. */
    o.weight_decay = 0.01f;
    CHECK_OPTIMIZER(&o, false, true, "adam");
    o.clip_norm = 0;
    o.beta1 = 0.5f;
    o.beta2 = 0.75f;
    CHECK_OPTIMIZER(&o, false, true, "adam, other betas");
    o.beta1 = 0;
    CHECK_OPTIMIZER(&o, false, true, "adam without momentum");
}

TEST(lion)
{
    tt_optimizer_options o = tt_optimizer_options_default();
    o.kind = TT_LION;
    o.beta2 = 0.99f;
    for (int k = 0; k < 3; k++) {
        double norm_error;
        o.weight_decay = k ? 0.5f : 0.01f;
        o.clip_norm = k == 2 ? 0.05f : 0;
        CHECK(optimizer_error(&o, false, true, &norm_error) <= 3e-6);
        /* Steps of Lion do not shrink with the gradient, so gradients near 0 keep the rounding errors of the
           parameters. */
        CHECK(norm_error <= 3e-5);
    }
}

TEST(muon)
{
    tt_optimizer_options o = tt_optimizer_options_default();
    double norm_error;
    o.kind = TT_MUON;
    o.momentum = 0.95f;
    for (int k = 0; k < 4; k++) {
        tall_weight = k % 2;
        o.nesterov = k < 2;
        o.eps = 1e-6f; /* of AdamW, which updates the bias */
        o.clip_norm = k == 3 ? 0.05f : 0;
        const double error = optimizer_error(&o, false, true, &norm_error);
        if (!CHECK(error <= 1e-5 && norm_error <= 1e-5)) printf("muon %d: %g, %g\n", k, error, norm_error);
    }
    tall_weight = false;
}

TEST(adafactor)
{
    tt_optimizer_options o = tt_optimizer_options_default();
    double norm_error;
    o.kind = TT_ADAFACTOR;
    for (int k = 0; k < 4; k++) {
        tall_weight = k % 2;
        o.weight_decay = k < 2 ? 0.01f : 0.5f;
        o.clip_norm = k == 3 ? 0.05f : 0;
        const double error = optimizer_error(&o, false, true, &norm_error);
        const bool ok = CHECK(error <= 1e-5 && norm_error <= 1e-5);
        if (!ok) printf("adafactor %d: %g, %g\n", k, error, norm_error);
    }
    tall_weight = false;
}

TEST(prune)
{
    for (int k = 0; k < 6; k++) {
        tt_optimizer_options o = tt_optimizer_options_default();
        double norm_error;
        o.kind = k % 3 == 0 ? TT_SGD : k % 3 == 1 ? TT_ADAMW : TT_MUON;
        o.momentum = 0.9f;
        o.eps = 1e-6f;
        o.prune = k < 3 ? 0.8f : 0.37f;
        o.prune_begin = k == 4 ? 0 : 3;
        o.prune_end = k == 5 ? 4 : 41;
        o.prune_every = k < 3 ? 4 : 1;
        const double error = optimizer_error(&o, false, true, &norm_error);
        if (!CHECK(error <= 1e-5 && norm_error <= 1e-5)) printf("prune %d: %g, %g\n", k, error, norm_error);
    }
}

TEST(prune_by_movement)
{
    for (int k = 0; k < 8; k++) {
        tt_optimizer_options o = tt_optimizer_options_default();
        double norm_error;
        o.kind = k % 4 == 0 ? TT_SGD : k % 4 == 1 ? TT_ADAMW : k % 4 == 2 ? TT_LION : TT_ADAFACTOR;
        o.momentum = 0.9f;
        o.eps = 1e-6f;
        o.clip_norm = k % 3 ? 0 : 0.05f;
        o.prune = k < 3 ? 0.8f : 0.37f;
        o.prune_begin = k == 4 ? 0 : 3;
        o.prune_end = k == 5 ? 4 : k == 6 ? 20 : 41;
        o.prune_every = k < 3 ? 4 : k == 7 ? 3 : 1;
        o.prune_by_movement = true;
        tall_weight = k % 2;
        const double error = optimizer_error(&o, false, true, &norm_error);
        if (!CHECK(error <= 1e-5 && norm_error <= 3e-5)) printf("prune %d: %g, %g\n", k, error, norm_error);
    }
    tall_weight = false;
}

/* Returns the movements of the weights of a program's only matrix. */
static const float *movements_of(const tt_program *p)
{
    for (int32_t v = 1; v < p->built.t->n_values; v++)
        if (p->built.t->values[v].state == TT__MOVEMENT) return (const float *)tt__resolve(p, 0, v).data;
    return NULL;
}

/* Movements equal a float64 loop, after steps of several micro-batches with clipping in each precision, and
   with updates in the backward. A step that overflows changes no movement. Movements have the same bits for
   any number of threads. */
TEST(movements_of_weights)
{
    enum { R = 7, C = 1213, N = R * C };
    static const char *const precisions[] = {"32-true", "32-true", "32-true", "bf16-mixed", "16-mixed",
                                             "bf16-true", "32-true", "bf16-true"};
    static float values[N], target[N], first[N];
    static double expected[N], size[N], g[N];
    for (int k = 0; k < TEST_COUNT(precisions); k++) {
        const bool early = k >= 6, narrow = k >= 3 && k != 6;
        const int micros = early ? 1 : 3;
        test_allocator a;
        tt_context_options co = test_options(&a);
        co.threads = 1 + k % 3;
        tt_context *ctx = tt_open(&co);
        const int64_t dims[] = {R, C};
        const tt_init init = {TT_INIT_NORMAL, 1};
        tt_param *w = tt_param_new(ctx, "layer.1.weight", 2, dims, init);
        tt_tape *t = tt_tape_new(ctx);
        tt_value y = tt_input(t, "y", TT_F32, R, C);
        tt_value loss = tt_mean_squared_error(t, tt_param_value(t, w), y, tt__handle(t, 0));
        tt_compile_options o = tt_compile_options_default();
        o.optimizer.kind = TT_SGD;
        o.optimizer.clip_norm = early ? 0 : 0.01f;
        o.optimizer.prune = 0.5f;
        o.optimizer.prune_begin = 1;
        o.optimizer.prune_end = 4;
        o.optimizer.prune_every = 1;
        o.optimizer.prune_by_movement = true;
        o.accumulate = !early;
        o.precision = precisions[k];
        o.update = early ? "backward" : "end";
        tt_program *p = tt_compile(t, loss, &o);
        uint64_t random = 5;
        memset(expected, 0, sizeof expected);
        memset(size, 0, sizeof size);
        REQUIRE(p != NULL);
        for (int step = 0; step < 7; step++) {
            const bool overflows = step == 4 && k == 4; /* 16-mixed skips the step */
            tt_stats stats;
            double squares = 0;
            memset(g, 0, sizeof g);
            tt_param_get(w, values);
            for (int m = 0; m < micros; m++) {
                for (int e = 0; e < N; e++) {
                    target[e] = 3 * test_uniform(&random);
                    g[e] += 2 * ((double)values[e] - target[e]) / N / micros;
                }
                CHECK(tt_set(p, y, target, R) == TT_OK);
                if (!early) CHECK(tt_micro_step(p, NULL) == TT_OK);
            }
            for (int e = 0; e < N; e++) target[e] = INFINITY;
            CHECK(!overflows || tt_set_gradient(p, w, target) == TT_OK);
            CHECK((early ? tt_step(p, 20, &stats) : tt_update(p, 20, &stats)) == TT_OK);
            CHECK(stats.skipped == (k == 4 && step >= 4));
            for (int e = 0; e < N; e++) squares += g[e] * g[e];
            const double factor = early ? 1 : fmin(1, 0.01 / (sqrt(squares) + 1e-6));
            for (int e = 0; e < N && !overflows; e++) {
                expected[e] -= factor * g[e] * values[e];
                size[e] += fabs(factor * g[e] * values[e]);
            }
        }
        const float *got = movements_of(p);
        double error = 0;
        for (int e = 0; e < N && got; e++) {
            const double wrong = fabs(got[e] - expected[e]) / (size[e] + 1e-9);
            if (!(wrong <= error)) error = wrong;
        }
        if (!CHECK(got && error <= (narrow ? 2e-2 : 2e-5))) printf("%s: %g\n", precisions[k], error);
        if (k == 0) memcpy(first, got, sizeof first);
        CHECK(k >= 3 || memcmp(first, got, sizeof first) == 0);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* A program saves and loads the mask of pruned weights. With equal magnitudes the first weights are pruned,
   in any dtype and with any number of threads; a weight that is pruned stays 0; and the plan has a bit for
   each weight. */
TEST(pruned_weights_of_equal_magnitude)
{
    enum { R = 5, C = 77, N = R * C };
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-true"};
    for (int k = 0; k < 7; k++) { /* update "backward" is not for 16-true */
        static float values[N], target[N];
        test_allocator a;
        tt_context *ctx = test_open(&a);
        const int64_t dims[] = {R, C};
        const tt_init zeros = {TT_INIT_ZEROS, 0};
        tt_param *w = tt_param_new(ctx, "layer.1.weight", 2, dims, zeros);
        tt_tape *t = tt_tape_new(ctx);
        tt_value y = tt_input(t, "y", TT_F32, R, C);
        tt_value loss = tt_mean_squared_error(t, tt_param_value(t, w), y, tt__handle(t, 0));
        tt_compile_options o = tt_compile_options_default();
        o.optimizer.kind = TT_SGD;
        o.optimizer.weight_decay = 0;
        o.optimizer.prune = 0.5f;
        o.optimizer.prune_end = 2;
        o.optimizer.prune_every = 1;
        o.precision = precisions[k % 4];
        if (k > 3) o.update = "backward";
        for (int e = 0; e < N; e++) values[e] = e % 3 ? -0.5f : 0.25f, target[e] = 8;
        CHECK(tt_param_set(w, values) == TT_OK);
        tt_program *p = tt_compile(t, loss, &o);
        if (CHECK(p != NULL)) {
            for (int step = 0; step < 4; step++)
                CHECK(tt_set(p, y, target, R) == TT_OK && tt_step(p, step < 3 ? 0 : 0.5f, NULL) == TT_OK);
            tt_param_get(w, values);
            int small = 0, pruned = 0, wrong = 0;
            for (int e = 0; e < N; e++) small += e % 3 == 0;
            for (int e = 0, seen = 0; e < N; e++) { /* all of 0.25, then the first of 0.5 */
                const bool expected = e % 3 == 0 || seen++ < (N + 1) / 2 - small;
                pruned += values[e] == 0;
                wrong += (values[e] == 0) != expected;
            }
            CHECK(pruned == (N + 1) / 2 && wrong == 0);
            bool planned = false;
            for (int32_t v = 1; v < p->built.t->n_values; v++)
                planned |= p->built.t->values[v].state == TT__PRUNED &&
                           tt__storage_bytes(&p->built.t->values[v]) >= 8 + N / 8 &&
                           p->built.t->values[v].shape.cols == 8 + (N + 31) / 32 * 4;
            CHECK(planned);
        }
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Programs round weights for products only, and pass gradients straight through. */
TEST(rounded_weights)
{
    enum { R = 6, C = 9 };
    for (int k = 0; k < 3; k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        const int64_t dims[] = {R, C};
        const tt_init init = {TT_INIT_NORMAL, 0.5f};
        tt_param *w = tt_param_new(ctx, "w", 2, dims, init), *b = tt_param_new(ctx, "b", 1, dims, init);
        float x[C], y[R], got[R], bias[R], values[R * C];
        for (int c = 0; c < C; c++) x[c] = (float)(c % 3) - 1;
        CHECK(tt_param_round(ctx, "*", TT_ROUND_TERNARY) == 1 && tt_param_rounding(b) == TT_ROUND_NONE &&
              tt_param_rounding(w) == TT_ROUND_TERNARY && tt_param_round(ctx, "x", TT_ROUND_INT8) == 0);
        tt_tape *t = tt_tape_new(ctx);
        tt_value in = tt_input(t, "x", TT_F32, 1, C), out = tt_linear(t, in, w, b);
        tt_output(t, out);
        tt_compile_options o = tt_compile_options_default();
        o.train = false;
        o.precision = k == 1 ? "bf16-mixed" : "32-true";
        if (k == 2) o.device = "cpu*2", o.parallel.data = 1, o.parallel.tensor = 2;
        tt_program *p = tt_compile(t, out, &o);
        if (k == 2) {
            CHECK_ERROR(ctx, p ? TT_OK : tt_error_code(ctx), "parameter 'w' is rounded (tt_param_round) by");
        } else if (CHECK(p != NULL)) {
            CHECK(tt_set(p, in, x, 1) == TT_OK && tt_run(p, NULL) == TT_OK);
            CHECK(tt_get(p, out, got, R) == TT_OK);
            tt_param_get(w, values);
            tt_param_get(b, bias);
            double mean = 0;
            for (int e = 0; e < R * C; e++) mean += fabs((double)values[e]) / (R * C);
            for (int r = 0; r < R; r++) {
                double sum = bias[r];
                for (int c = 0; c < C; c++)
                    sum += x[c] * mean * fmax(-1, fmin(1, rint(values[r * C + c] / mean)));
                y[r] = (float)sum;
                CHECK_NEAR(got[r], y[r], k ? 0.05 : 1e-5);
            }
        }
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(decay_rules)
{
    static const char *const none[] = {NULL}, *const weights[] = {"*.weight", NULL},
                             *const all[] = {"nothing", "layer.*", NULL}, *const bias[] = {"*.bia?", NULL};
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

TEST(learning_rates_by_name_and_layer)
{
    static const tt_lr_rule first[] = {{"*.bia?", 0.25f}, {"*", 2}, {"layer.*", 9}, {NULL, 0}},
                            none[] = {{"other", 0}, {NULL, 0}}, still[] = {{"*weight", 0}, {NULL, 0}};
    tt_optimizer_options o = tt_optimizer_options_default();
    CHECK(!o.lr_rules && o.layer_decay == 1);
    o.eps = 1e-6f;
    o.weight_decay = 0.3f;
    for (int kind = 0; kind < 2; kind++) {
        o.kind = kind ? TT_SGD : TT_ADAMW;
        o.layer_decay = 1;
        o.lr_rules = first;
        lr_factors[0] = 0.25, lr_factors[1] = 2;
        CHECK_OPTIMIZER(&o, false, true, "the first rule counts");
        o.lr_rules = none;
        lr_factors[0] = lr_factors[1] = 1;
        CHECK_OPTIMIZER(&o, false, true, "no rule matches");
        o.lr_rules = still;
        lr_factors[1] = 0;
        CHECK_OPTIMIZER(&o, false, true, "a factor of 0");
        o.lr_rules = NULL;
        o.layer_decay = 0.5f;
        lr_factors[0] = 0.125, lr_factors[1] = 0.5; /* factors of layers 0 and 2 of three layers */
        CHECK_OPTIMIZER(&o, false, true, "decay from layer to layer");
        o.lr_rules = first;
        lr_factors[0] = 0.25 * 0.125, lr_factors[1] = 2 * 0.5;
        CHECK_OPTIMIZER(&o, false, true, "rules and layers");
    }
    lr_factors[0] = lr_factors[1] = 1;
}

/* A parameter 'p' of n elements that a mean squared error pulls to the input 'target'. */
typedef struct pulled {
    tt_tape *t;
    tt_param *p;
    tt_value target, loss;
} pulled;

static pulled pull(tt_context *ctx, int64_t n, tt_init_kind kind)
{
    tt_init init = {kind, 0};
    pulled x = {tt_tape_new(ctx), tt_param_new(ctx, "p", 1, &n, init), {0}, {0}};
    x.target = tt_input(x.t, "target", TT_F32, 1, n);
    x.loss = tt_mean_squared_error(x.t, tt_param_value(x.t, x.p), x.target, tt__handle(x.t, 0));
    return x;
}

/* The number of a layer is found in the names that each model gives its parameters. A factor of 1 changes no
   bit and no hash of the program. */
TEST(layers_of_names)
{
    static const struct { const char *name; int layer; } rows[] = {
        {"bert.embeddings.word_embeddings.weight", -1}, {"bert.encoder.layer.11.output.dense.bias", 11},
        {"h.3.ln_1.weight", 3}, {"encoder.layers.encoder_layer_7.ln_1.weight", 7}, {"7", 7}, {"w2.b", -1},
        {"encoder.block.0.layer.1.wo", 0}, {"conv_2x.b", -1}, {"layer.12345678.w", -1}, {"a.5", 5}, {"", -1},
        {"2d.x_4", 4}};
    static const char *const names[] = {"wte", "h.0.w", "h.1.w", "ln_f", "1_d"};
    static const double factors[] = {0.125, 0.25, 0.5, 1, 1};
    for (int k = 0; k < TEST_COUNT(rows); k++) CHECK(tt__layer_of(rows[k].name) == rows[k].layer);
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const int64_t one = 1;
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    tt_optimizer_options o = tt_optimizer_options_default();
    o.layer_decay = 0.5f;
    for (int k = 0; k < TEST_COUNT(names); k++) CHECK(tt_param_new(ctx, names[k], 1, &one, zeros) != NULL);
    const tt__layers layers = tt__find_layers(ctx);
    for (int k = 0; k < TEST_COUNT(names); k++)
        CHECK(tt__lr_factor_of(ctx, &o, layers, k) == (float)factors[k]);
    TEST_CLOSE(ctx, &a);

    static const tt_lr_rule unchanged[] = {{"*", 1}, {NULL, 0}}, changed[] = {{"p", 0.5f}, {NULL, 0}};
    uint64_t hash[3];
    float values[3][N_BIAS], targets[N_BIAS] = {1, 2, 3};
    for (int k = 0; k < 3; k++) {
        ctx = test_open(&a);
        pulled x = pull(ctx, N_BIAS, TT_INIT_ONES);
        tt_compile_options c = tt_compile_options_default();
        if (k) c.optimizer.lr_rules = k == 1 ? unchanged : changed;
        tt_program *program = tt_compile(x.t, x.loss, &c);
        REQUIRE(program != NULL);
        hash[k] = tt__program_hash(program);
        CHECK(tt_set(program, x.target, targets, 1) == TT_OK && tt_step(program, 0.01f, NULL) == TT_OK);
        CHECK(tt_param_get(x.p, values[k]) == TT_OK);
        tt_program_free(program);
        tt_tape_free(x.t);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(hash[0] == hash[1] && memcmp(values[0], values[1], sizeof values[0]) == 0);
    CHECK(hash[0] != hash[2] && memcmp(values[0], values[2], sizeof values[0]) != 0);
}

/* The logger gets a warning for each rule whose pattern matches no trained parameter, once for a program. */
TEST(rules_for_no_parameter)
{
    static const tt_lr_rule rules[] = {{"p", 0.5f}, {"q*", 0.5f}, {"*", 2}, {NULL, 0}};
    for (int k = 0; k < 2; k++) {
        test_allocator a;
        test_log log;
        tt_context *ctx = test_open_logged(&a, &log);
        pulled x = pull(ctx, N_BIAS, TT_INIT_ONES);
        tt_compile_options c = tt_compile_options_default();
        c.optimizer.lr_rules = rules;
        c.train = k == 0;
        tt_program *program = tt_compile(x.t, x.loss, &c);
        REQUIRE(program != NULL);
        CHECK(log.warnings == (k == 0));
        if (!k) CHECK(strstr(log.text, "parameter has a name that matches the pattern 'q*' of lr_rules"));
        tt_program_free(program);
        tt_tape_free(x.t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Adam's first step moves every element by lr, whatever the size of its gradient, if the bias is
   corrected. */
TEST(bias_correction)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    pulled x = pull(ctx, 5, TT_INIT_ZEROS);
    tt_compile_options c = tt_compile_options_default();
    float targets[5] = {1e-3f, -1, 100, -1e4f, 3}, got[5];
    tt_program *program = tt_compile(x.t, x.loss, &c);
    REQUIRE(program && tt_set(program, x.target, targets, 1) == TT_OK &&
            tt_step(program, 0.25f, NULL) == TT_OK);
    tt_param_get(x.p, got);
    for (int k = 0; k < 5; k++) CHECK_NEAR(got[k], targets[k] > 0 ? 0.25 : -0.25, 1e-4);
    tt_program_free(program);
    tt_tape_free(x.t);
    TEST_CLOSE(ctx, &a);
}

/* Options that Muon excludes are refused by name before anything is allocated. */
TEST(muon_refuses)
{
    static const struct {
        const char *device, *update;
        int zero, tensor;
        float momentum;
        const char *say;
    } rows[] = {
        {"cpu*2", "end", 0, 2, 0.95f, "which parallel.tensor divides"},
        {"cpu", "host", 1, 1, 0.95f, "the optimizer TT_MUON updates on the device only"},
        {"cpu", "end", 1, 1, 0, "momentum is 0, but Muon needs one above 0 and below 1, usually 0.95"},
        {"cpu*2", "end", 0, 1, 0.95f, NULL},
        {"cpu*2", "end", 2, 1, 0.95f, NULL},
        {"cpu", "backward", 1, 1, 0.95f, NULL}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        pulled x = pull(ctx, 3, TT_INIT_ZEROS);
        tt_compile_options c = tt_compile_options_default();
        c.device = rows[k].device;
        c.update = rows[k].update;
        c.parallel.zero = rows[k].zero;
        c.parallel.tensor = rows[k].tensor;
        c.optimizer.kind = TT_MUON;
        c.optimizer.momentum = rows[k].momentum;
        tt_program *p = tt_compile(x.t, x.loss, &c);
        CHECK((p != NULL) == (rows[k].say == NULL));
        if (rows[k].say) CHECK_ERROR(ctx, p ? TT_OK : tt_error_code(ctx), rows[k].say);
        tt_program_free(p);
        tt_tape_free(x.t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Returns the bits that the compiler chooses for the optimizer state of six layers within a budget; 0: none
   fits. *bytes: bytes of the plan, or those of the smallest plan that the error names. */
static int bits_within(const char *device, const char *recompute, int bits, size_t budget, size_t *bytes)
{
    enum { WIDE = 256, TALL = 1024 };
    const int64_t dims[2] = {WIDE, WIDE};
    const tt_init normal = {TT_INIT_NORMAL, 0.1f};
    static char text[8192];
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, TALL, WIDE);
    const tt_value y = tt_input(t, "y", TT_F32, TALL, WIDE);
    for (int k = 0; k < 6; k++) {
        char name[16];
        snprintf(name, sizeof name, "layer.%d", k);
        x = tt_gelu(t, tt_linear(t, x, tt_param_new(ctx, name, 2, dims, normal), NULL));
        tt_block_end(t, x);
    }
    tt_compile_options c = tt_compile_options_default();
    c.device = device;
    c.recompute = recompute;
    c.optimizer.state_bits = bits;
    c.memory_budget = budget;
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, x, y, tt__handle(t, 0)), &c);
    const int chosen = p ? p->settings.options.optimizer.state_bits : 0;
    if (p) {
        *bytes = tt_program_plan(p).bytes;
        tt_plan_text(p, text, sizeof text);
        char line[64];
        snprintf(line, sizeof line, "optimizer state in %d bits", chosen);
        CHECK((strstr(text, line) != NULL) == (bits == TT_STATE_BITS_BUDGET));
    } else {
        CHECK_ERROR(ctx, budget ? TT_ERR_BUDGET : TT_ERR_ARGUMENT, budget ? "the plan needs" :
                    "state_bits 'budget' chooses what fits memory_budget");
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return chosen;
}

/* The compiler lowers the bits of the optimizer state only where 32 bits do not fit, or where recomputation
   would take longer. */
TEST(state_bits_within_a_budget)
{
    size_t of[3], bytes = 0, smallest = 0;
    for (int k = 0; k < 3; k++) CHECK(bits_within("cpu", "cheap", 32 >> k, 0, &of[k]) == 32 >> k);
    CHECK(of[0] > of[1] && of[1] > of[2]);
    CHECK(bits_within("cpu", "cheap", TT_STATE_BITS_BUDGET, 0, &bytes) == 0);
    for (int k = 0; k < 3; k++) {
        CHECK(bits_within("cpu", "cheap", TT_STATE_BITS_BUDGET, of[k], &bytes) == 32 >> k);
        CHECK(bytes <= of[k]);
    }
    CHECK(bits_within("cpu", "cheap", TT_STATE_BITS_BUDGET, of[2] - 1, &bytes) == 0);
    /* With "budget", recomputation of products takes longer than fewer bits. */
    CHECK(bits_within("cpu", "none", 32, 0, &bytes) == 32);
    CHECK(bits_within("cpu", "budget", TT_STATE_BITS_BUDGET, bytes, &smallest) == 32);
    const size_t less = bytes - (of[0] - of[2]);
    CHECK(bits_within("cpu", "budget", TT_STATE_BITS_BUDGET, less, &smallest) == 8 && smallest <= less);
}

/* In bf16-true, steps far below half a unit in the last place survive on average, and a second run has equal
   bits. */
TEST(stochastic_rounding_moves_bf16_weights)
{
    enum { N = 8192, TINY_STEPS = 16 };
    static float values[2][N], targets[N];
    for (int run = 0; run < 2; run++) {
        test_allocator a;
        tt_context_options co = test_options(&a);
        co.threads = run ? 3 : 1;
        tt_context *ctx = tt_open(&co);
        pulled x = pull(ctx, N, TT_INIT_ONES);
        tt_compile_options c = tt_compile_options_default();
        c.precision = "bf16-true";
        c.optimizer.kind = TT_SGD;
        c.optimizer.weight_decay = 0;
        tt_program *program = tt_compile(x.t, x.loss, &c);
        REQUIRE(program != NULL);
        for (int k = 0; k < N; k++) targets[k] = 1025; /* the gradient is `2 (1 - 1025) / N`: -1/4 */
        for (int step = 0; step < TINY_STEPS; step++)
            REQUIRE(tt_set(program, x.target, targets, 1) == TT_OK &&
                    tt_step(program, 0x1p-9f, NULL) == TT_OK);
        tt_param_get(x.p, values[run]);
        double sum = 0;
        bool on_grid = true;
        for (int k = 0; k < N; k++) {
            sum += values[run][k];
            on_grid &= values[run][k] == tt__from_bf16(tt__to_bf16(values[run][k]));
        }
        CHECK(on_grid);
        /* Rounding to nearest would lose each step, 2^-11: half a unit in the last place of bf16 is 2^-8. */
        CHECK_NEAR(sum / N - 1, TINY_STEPS * 0x1p-11, TINY_STEPS * 0x1p-11 * 0.1);
        tt_program_free(program);
        tt_tape_free(x.t);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(memcmp(values[0], values[1], sizeof values[0]) == 0);
}

/* Four micro-batches and an update give the parameters of one step on all rows, for any weights of targets. A
   tt_step in a program that accumulates gives the same parameters. */
TEST(micro_batches_equal_one_batch)
{
    enum { BATCH = 16, IN = 7, OUT = 3 };
    static float results[3][IN * OUT + OUT];
    double losses[3], norms[3];
    /* run 0: a plain step; 1: tt_step of a program that accumulates; 2: micro-batches of 1, 6, 4 and 5 */
    for (int run = 0; run < 3; run++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        int64_t dims[2] = {OUT, IN}, n = OUT;
        tt_init init = {TT_INIT_NORMAL, 0.5f};
        tt_param *w = tt_param_new(ctx, "w", 2, dims, init), *b = tt_param_new(ctx, "b", 1, &n, init);
        tt_tape *t = tt_tape_new(ctx);
        int64_t rows = tt_axis(t, "rows", BATCH);
        tt_value x = tt_input(t, "x", TT_F32, rows, IN), y = tt_input(t, "y", TT_I32, rows, 1),
                 weights = tt_input(t, "weights", TT_F32, rows, 1);
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
            for (int k = 0; k < BATCH * IN; k++) xs[k] = test_uniform(&s);
            for (int k = 0; k < BATCH; k++) {
                ys[k] = k % 5 == 4 ? -100 : k % OUT;
                ws[k] = 1.25f + test_uniform(&s);
            }
            int count = run == 2 ? 4 : 1;
            for (int part = 0, from = 0; part < count; part++) {
                int size = run == 2 ? parts[part] : BATCH;
                CHECK(tt_set(p, x, xs + from * IN, size) == TT_OK && tt_set(p, y, ys + from, size) == TT_OK &&
                      tt_set(p, weights, ws + from, size) == TT_OK);
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
    pulled x = pull(ctx, 3, TT_INIT_ZEROS);
    tt_compile_options c = tt_compile_options_default();
    c.optimizer.beta1 = 1;
    c.optimizer.beta2 = -0.1f;
    c.optimizer.eps = NAN;
    c.optimizer.weight_decay = -1;
    c.optimizer.clip_norm = -2;
    c.optimizer.layer_decay = 0;
    const tt_lr_rule bad[] = {{"p", 1}, {"*.bias", -1}, {NULL, 0}};
    c.optimizer.lr_rules = bad;
    CHECK(!tt_compile(x.t, x.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "optimizer options: beta1 is 1, but must be in [0, 1); beta2 is -0.1, "
                "but must be in [0, 1); eps ");
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "; weight_decay -1 is negative; clip_norm -2 is negative (0 means no clipping); the scale -1 "
                "of lr_rules pattern '*.bias' is not a finite number >= 0; layer_decay 0 is not in (0, 1]");
    c.optimizer = tt_optimizer_options_default();
    c.optimizer.kind = TT_SGD;
    c.optimizer.nesterov = true;
    c.optimizer.beta1 = 7; /* SGD ignores beta1 */
    CHECK(!tt_compile(x.t, x.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "optimizer options: nesterov needs a momentum above 0");
    CHECK(!strstr(tt_error(ctx), "beta1"));
    c.optimizer.momentum = 1.5f;
    c.optimizer.weight_decay = NAN;
    CHECK(!tt_compile(x.t, x.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "momentum is 1.5, but must be in [0, 1); weight_decay ");
    c.optimizer.kind = (tt_optimizer_kind)9;
    CHECK(!tt_compile(x.t, x.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "kind is 9, but");
    c.optimizer.kind = TT_LION;
    c.optimizer.state_bits = 4;
    CHECK(!tt_compile(x.t, x.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "beta1 is 7, but");
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "; state_bits 4 is not 32, 16, 8 or TT_STATE_BITS_BUDGET");
    c.train = false; /* an evaluation has no optimizer */
    tt_program *p = tt_compile(x.t, x.loss, &c);
    CHECK(p != NULL);
    tt_program_free(p);
    tt_tape_free(x.t);
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------------ loss scaling
   The net computes `y = x W1 W2` for two rows. All elements of x are 1/2, and both weights are the identity.
   The loss is the mean of `(y - target)^2`. If `target` is `y - 4 g`, each element of the gradients of y, of
   `x W1` (which is f16) and of both weights is g. f16 holds at most 65504, so a g of 40 overflows with a
   scale of 2048, but not with 1024. */

enum { WIDE = 4, PAIR = 2 };

typedef struct chain {
    test_allocator a;
    tt_context *ctx;
    tt_tape *t;
    tt_program *p;
    tt_param *w[2];
    tt_value x, target;
    bool accumulate;
} chain;

static bool chain_open(chain *c, const char *precision, bool accumulate, const tt_loss_scale *scale)
{
    int64_t dims[2] = {WIDE, WIDE};
    float identity[WIDE * WIDE] = {0};
    tt_init zeros = {TT_INIT_ZEROS, 0};
    tt_compile_options o = tt_compile_options_default();
    c->ctx = test_open(&c->a);
    c->t = tt_tape_new(c->ctx);
    c->accumulate = accumulate;
    for (int k = 0; k < WIDE; k++) identity[k * WIDE + k] = 1;
    for (int k = 0; k < 2; k++) {
        c->w[k] = tt_param_new(c->ctx, k ? "w2" : "w1", 2, dims, zeros);
        CHECK(tt_param_set(c->w[k], identity) == TT_OK);
    }
    c->x = tt_input(c->t, "x", TT_F32, PAIR, WIDE);
    c->target = tt_input(c->t, "target", TT_F32, PAIR, WIDE);
    tt_value y = tt_linear(c->t, tt_linear(c->t, c->x, c->w[0], NULL), c->w[1], NULL);
    o.precision = precision;
    o.accumulate = accumulate;
    if (scale) o.loss_scale = *scale;
    c->p = tt_compile(c->t, tt_mean_squared_error(c->t, y, c->target, tt__handle(c->t, 0)), &o);
    return CHECK(c->p != NULL);
}

static void chain_close(chain *c)
{
    tt_program_free(c->p);
    tt_tape_free(c->t);
    TEST_CLOSE(c->ctx, &c->a);
}

static tt_status chain_set(chain *c, float g)
{
    float x[PAIR * WIDE], target[PAIR * WIDE];
    for (int k = 0; k < PAIR * WIDE; k++) { x[k] = 0.5f; target[k] = 0.5f - 4 * g; }
    tt_status status = tt_set(c->p, c->x, x, PAIR);
    return status == TT_OK ? tt_set(c->p, c->target, target, PAIR) : status;
}

/* Runs a step with gradients of g. With accumulation, the first of two micro-batches has the gradient 1 and
   the second has `2 g - 1`, so their mean is g. A program that accumulates divides by a power of two, here 4,
   instead of the 2 rows of a micro-batch. So the numbers in the second backward are about g, too. */
static tt_status chain_step(chain *c, float g, tt_stats *stats)
{
    const float lr = 1e-4f;
    if (!c->accumulate) return chain_set(c, g) == TT_OK ? tt_step(c->p, lr, stats) : tt_error_code(c->ctx);
    tt_status status = chain_set(c, 1);
    if (status == TT_OK) status = tt_micro_step(c->p, stats);
    if (status == TT_OK) status = chain_set(c, 2 * g - 1);
    if (status == TT_OK) status = tt_micro_step(c->p, stats);
    return status == TT_OK ? tt_update(c->p, lr, stats) : status;
}

/* Copies parameters and optimizer state. The caller frees the copy. */
static char *chain_state(const chain *c, size_t *bytes)
{
    char *all = NULL;
    *bytes = 0;
    CHECK(tt__zero_states(c->p) == TT_OK);
    for (int32_t v = 1; v < c->p->built.t->n_values; v++) {
        const tt__tape_value *x = &c->p->built.t->values[v];
        if ((x->storage != TT__PARAMETER && x->storage != TT__STATE) || x->base != v) continue;
        size_t n = (size_t)(x->shape.rows * x->shape.cols) * tt_dtype_bytes(x->shape.dtype);
        all = (char *)realloc(all, *bytes + n);
        memcpy(all + *bytes, tt__resolve(c->p, 0, v).data, n);
        *bytes += n;
    }
    return all;
}

static const char *const scaled[] = {"16-mixed", "16-true"};

/* Six scales overflow, from 65536 to 2048; then every third good step doubles the scale, and the next step
   halves it again. */
TEST(loss_scale_falls_and_grows)
{
    for (int k = 0; k < 4; k++) {
        chain c;
        tt_stats stats;
        tt_loss_scale scale = tt_loss_scale_default();
        double expected = 65536;
        int good = 0, skipped = 0, done = 0;
        size_t n;
        CHECK(scale.init == 65536 && scale.growth == 2 && scale.backoff == 0.5f && scale.interval == 2000);
        scale.interval = 3;
        if (!chain_open(&c, scaled[k % 2], k >= 2, &scale)) return;
        CHECK(tt_allocate(c.p) == TT_OK);
        for (int step = 0; step < 15; step++) {
            char *before = chain_state(&c, &n);
            CHECK(chain_step(&c, 40, &stats) == TT_OK);
            char *after = chain_state(&c, &n);
            bool overflow = expected > 1024, same = memcmp(before, after, n) == 0;
            free(before);
            free(after);
            if (overflow) { expected /= 2; good = 0; skipped++; }
            else { done++; if (++good == 3) { expected *= 2; good = 0; } }
            CHECK(same == overflow);
            CHECK(stats.loss_scale == expected && stats.skipped == skipped && stats.step == done);
            if (overflow) CHECK(stats.grad_norm == 0);
            else
                CHECK_NEAR(stats.grad_norm, 40 * sqrt(2.0 * WIDE * WIDE),
                           0.01 * 40 * sqrt(2.0 * WIDE * WIDE)); /* norm of the unscaled gradient */
            CHECK(stats.loss > 10 && isfinite(stats.loss));
        }
        CHECK(skipped == 8 && done == 7);
        /* An overflow restarts the count of good steps that doubles the scale. */
        CHECK(chain_step(&c, 100, &stats) == TT_OK && stats.loss_scale == 512 && stats.skipped == 9);
        for (int step = 0; step < 3; step++)
            CHECK(chain_step(&c, 40, &stats) == TT_OK && stats.loss_scale == (step < 2 ? 512 : 1024));
        chain_close(&c);
    }
}

TEST(loss_scale_grows_where_nothing_overflows)
{
    static const struct { tt_loss_scale scale; float g; double after[5]; } rows[] = {
        {{1024, 2, 0.5f, 2}, 0.01f, {1024, 2048, 2048, 4096, 4096}},
        {{1, 16, 0.25f, 1}, 0.01f, {16, 256, 4096, 65536, 1048576}},
        /* In the next row the scale stays at 256. In the row after that the scale reaches its max of 2^40. In
           the last row it falls after an overflow, grows, and falls again. */
        {{256, 1, 0.5f, 1}, 0.01f, {256, 256, 256, 256, 256}},
        {{0x1p39f, 2, 0.5f, 1}, 0, {0x1p40, 0x1p40, 0x1p40, 0x1p40, 0x1p40}},
        {{4096, 2, 0x1p-4f, 1}, 40, {256, 512, 1024, 2048, 128}}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        chain c;
        tt_stats stats;
        if (!chain_open(&c, "16-mixed", false, &rows[k].scale)) return;
        for (int step = 0; step < 5; step++)
            CHECK(chain_step(&c, rows[k].g, &stats) == TT_OK && stats.loss_scale == rows[k].after[step]);
        chain_close(&c);
    }
}

/* All scales without overflow and underflow train to equal bits, because dividing by a power of two is exact.
   The gradient of tt_get_gradient and the norm equal those of 32-true up to f16's rounding. */
TEST(loss_scale_leaves_true_gradients)
{
    static const float scales[] = {1, 16, 1024};
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        float reference[2][WIDE * WIDE], bits[2][WIDE * WIDE], got[WIDE * WIDE];
        double norm = 0;
        for (int k = -1; k < 3; k++) {
            chain c;
            tt_stats stats;
            tt_loss_scale scale = tt_loss_scale_default();
            if (k >= 0) scale.init = scales[k];
            if (!chain_open(&c, k < 0 ? "32-true" : "16-mixed", accumulate, &scale)) return;
            for (int micro = 0; micro < 2 && accumulate; micro++) {
                CHECK(chain_set(&c, micro ? 7 : 3) == TT_OK && tt_micro_step(c.p, &stats) == TT_OK);
                CHECK(stats.loss_scale == (k < 0 ? 1 : scales[k]));
                for (int w = 0; w < 2; w++) {
                    CHECK(tt_get_gradient(c.p, c.w[w], got) == TT_OK);
                    for (int e = 0; e < WIDE * WIDE; e++)
                        CHECK_NEAR(got[e], micro ? 5 : 3, k < 0 ? 1e-5 : 0x1p-9);
                }
            }
            if (accumulate) CHECK(tt_update(c.p, 0, &stats) == TT_OK);
            for (int step = 0; step < 5; step++) CHECK(chain_step(&c, 3.7f, &stats) == TT_OK);
            if (k < 0) norm = stats.grad_norm;
            CHECK_NEAR(stats.grad_norm, norm, norm * 0x1p-9);
            CHECK(stats.skipped == 0);
            for (int w = 0; w < 2; w++) {
                CHECK(tt_param_get(c.w[w], k <= 0 ? reference[w] : bits[w]) == TT_OK);
                if (k > 0) CHECK(memcmp(reference[w], bits[w], sizeof bits[w]) == 0);
            }
            chain_close(&c);
        }
    }
}

/* If no scale prevents an overflow, the step fails once and the error names the gradient. Nothing changes,
   and training continues with the next batch that does not overflow. */
TEST(loss_scale_has_a_floor)
{
    for (int k = 0; k < 4; k++) {
        chain c;
        tt_stats stats;
        tt_loss_scale scale = tt_loss_scale_default();
        size_t n;
        scale.init = 4;
        if (!chain_open(&c, scaled[k % 2], k >= 2, &scale)) return;
        CHECK(tt_allocate(c.p) == TT_OK);
        char *before = chain_state(&c, &n);
        for (int step = 0; step < 4; step++) {
            tt_status status = chain_step(&c, 1e5f, &stats);
            if (step < 2)
                CHECK(status == TT_OK && stats.loss_scale == (step ? 1 : 2) && stats.skipped == step + 1 &&
                      stats.step == 0);
            else CHECK(status == TT_ERR_NUMERIC);
            if (step >= 2)
                CHECK_ERROR(c.ctx, TT_ERR_NUMERIC,
                            "step 0: the gradient of 'w1' is not finite at the lowest loss scale; nothing "
                            "was updated");
        }
        char *after = chain_state(&c, &n);
        CHECK(memcmp(before, after, n) == 0);
        free(before);
        free(after);
        /* A loss that is not finite is an error with any scale. */
        CHECK(chain_step(&c, NAN, &stats) == TT_ERR_NUMERIC);
        CHECK_ERROR(c.ctx, TT_ERR_NUMERIC, "is not finite; nothing was updated: check the inputs");
        if (c.accumulate) CHECK(tt_update(c.p, 0, &stats) == TT_ERR_NUMERIC);
        CHECK(chain_step(&c, 2, &stats) == TT_OK && stats.loss_scale == 1 && stats.skipped == 2 &&
              stats.step == 1);
        chain_close(&c);
    }
}

/* In 16-true with gradients of 2^-12, whose squares are 0 in f16, Adam's steps still have the size of the
   learning rate. */
TEST(optimizer_state_of_f16_weights)
{
    enum { N = 4096, SMALL_STEPS = 40 };
    static float values[N], targets[N];
    const double lr = 1e-4;
    test_allocator a;
    tt_stats stats;
    tt_context *ctx = test_open(&a);
    pulled x = pull(ctx, N, TT_INIT_ONES);
    tt_compile_options c = tt_compile_options_default();
    double moved = 0;
    int states = 0;
    c.precision = "16-true";
    tt_program *program = tt_compile(x.t, x.loss, &c);
    REQUIRE(program != NULL);
    for (int k = 0; k < N; k++) targets[k] = 0.5f; /* the gradient is `2 (1 - 1/2) / N`: 2^-12 */
    for (int step = 0; step < SMALL_STEPS; step++)
        CHECK(tt_set(program, x.target, targets, 1) == TT_OK && tt_step(program, (float)lr, &stats) == TT_OK);
    CHECK(stats.skipped == 0 && tt__param_placement(x.p)->dtype == TT_F16);
    for (int32_t v = 1; v < program->built.t->n_values; v++) {
        if (program->built.t->values[v].storage != TT__STATE) continue;
        CHECK(program->built.t->values[v].shape.dtype == TT_BF16);
        states++;
    }
    CHECK(states == 2 && tt_param_get(x.p, values) == TT_OK);
    for (int k = 0; k < N; k++) moved += (1 - values[k]) / N;
    CHECK_NEAR(moved, SMALL_STEPS * lr, 0.05 * SMALL_STEPS * lr);
    tt_program_free(program);
    tt_tape_free(x.t);
    TEST_CLOSE(ctx, &a);
}

TEST(precision_options)
{
    static const struct { const char *precision, *residual, *error; tt_status status; } rows[] = {
        {"16-mixed", "f16", "residual 'f16' is unknown: use 16-bit or f32", TT_ERR_UNSUPPORTED},
        {"32-true", "f32", "residual 'f32': precision '32-true' has one dtype for all values: leave residual "
                           "NULL, or use 16-mixed or bf16-mixed", TT_ERR_ARGUMENT},
        {"bf16-true", "16-bit", "residual '16-bit': precision 'bf16-true' has one dtype", TT_ERR_ARGUMENT},
        {"16-true", "f32", "residual 'f32': precision '16-true' has one dtype", TT_ERR_ARGUMENT},
        {"16", NULL, "precision '16' is unknown: use 32-true, bf16-mixed, bf16-true, 16-mixed or 16-true",
         TT_ERR_UNSUPPORTED}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    pulled x = pull(ctx, 3, TT_INIT_ZEROS);
    tt_compile_options c = tt_compile_options_default();
    CHECK(c.residual == NULL && tt_train_options_default().compile.residual == NULL &&
          tt_train_options_default().compile.loss_scale.init == 65536);
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        c.precision = rows[k].precision;
        c.residual = rows[k].residual;
        CHECK(!tt_compile(x.t, x.loss, &c));
        CHECK_ERROR(ctx, rows[k].status, rows[k].error);
    }
    c.residual = NULL;
    c.precision = "16-mixed";
    c.loss_scale.init = 3;
    c.loss_scale.growth = 0.5f;
    c.loss_scale.backoff = 1;
    c.loss_scale.interval = 0;
    CHECK(!tt_compile(x.t, x.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "loss_scale: init is 3, but must be a power of two from 1 to 2^40; "
                "growth is 0.5, but must be a power of two, at least 1; backoff is 1, but must be a power of "
                "two below 1; interval is 0, but must be at least 1");
    static const tt_loss_scale bad[] = {
        {0.5f, 2, 0.5f, 9}, {0x1p41f, 2, 0.5f, 9}, {NAN, 2, 0.5f, 9}, {0, 2, 0.5f, 9}, {-4, 2, 0.5f, 9},
        {4, INFINITY, 0.5f, 9}, {4, 3, 0.5f, 9}, {4, NAN, 0.5f, 9}, {4, 2, 0, 9}, {4, 2, 0.3f, 9},
        {4, 2, -0.5f, 9}, {4, 2, NAN, 9}, {4, 2, 0.5f, -1}};
    for (int k = 0; k < TEST_COUNT(bad); k++) {
        c.loss_scale = bad[k];
        CHECK(!tt_compile(x.t, x.loss, &c) && tt_error_code(ctx) == TT_ERR_ARGUMENT);
    }
    c.precision = "bf16-mixed"; /* neither bf16 nor an evaluation scales losses */
    tt_program *program = tt_compile(x.t, x.loss, &c);
    CHECK(program != NULL);
    tt_program_free(program);
    c.precision = "16-true";
    c.train = false;
    program = tt_compile(x.t, x.loss, &c);
    CHECK(program != NULL);

    const float large[3] = {1, -70000, 3}, infinite[3] = {INFINITY, 65519, NAN}; /* out of f16's range */
    CHECK(tt_param_set(x.p, large) == TT_OK && tt_allocate(program) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "parameter 'p': element 1 is -70000, but f16 holds at most 65504");
    CHECK(tt_param_set(x.p, infinite) == TT_OK && tt_allocate(program) == TT_OK &&
          tt_param_set(x.p, large) == TT_ERR_ARGUMENT);
    float got[3];
    CHECK(tt_param_get(x.p, got) == TT_OK && got[0] == INFINITY && got[1] == 65504 && got[2] != got[2]);
    tt_program_free(program);
    tt_tape_free(x.t);
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------------- gradients */

/* A weight (3, SIDE) and a bias (SIDE), whose sum a mean squared error pulls to a target. */
typedef struct biased {
    test_allocator a;
    tt_context *ctx;
    tt_tape *t;
    tt_param *p[2]; /* p[0]: bias, p[1]: weight */
    tt_value target, loss;
    tt_program *program;
} biased;

enum { SIDE = 53, AREA = 3 * SIDE };

static void biased_open(biased *x, const tt_compile_options *o)
{
    static const char *const names[] = {"layer.bias", "layer.weight"};
    static const int64_t dims[2][2] = {{SIDE, 0}, {3, SIDE}};
    const tt_init init = {TT_INIT_NORMAL, 1};
    memset(x, 0, sizeof *x);
    x->ctx = test_open(&x->a);
    x->t = tt_tape_new(x->ctx);
    for (int k = 0; k < 2; k++) x->p[k] = tt_param_new(x->ctx, names[k], k + 1, dims[k], init);
    x->target = tt_input(x->t, "target", TT_F32, 3, SIDE);
    tt_value sum = tt_add(x->t, tt_param_value(x->t, x->p[1]), tt_param_value(x->t, x->p[0]));
    x->loss = tt_mean_squared_error(x->t, sum, x->target, tt__handle(x->t, 0));
    x->program = tt_compile(x->t, x->loss, o);
}

static void biased_target(int step, float target[AREA])
{
    uint64_t s = 100 + (uint64_t)step;
    for (int i = 0; i < AREA; i++) target[i] = 3 * test_uniform(&s);
}

/* Computes the gradients of the mean loss over n targets, and copies the parameters to p. */
static void biased_gradients(const biased *x, int step, int n, float p[2][AREA], double g[2][AREA])
{
    float target[AREA];
    for (int k = 0; k < 2; k++) CHECK(tt_param_get(x->p[k], p[k]) == TT_OK);
    memset(g, 0, sizeof(double) * 2 * AREA);
    for (int m = 0; m < n; m++) {
        biased_target(step + m, target);
        for (int i = 0; i < AREA; i++) {
            const double d = 2 * ((double)p[1][i] + p[0][i % SIDE] - target[i]) / AREA / n;
            g[1][i] += d;
            g[0][i % SIDE] += d;
        }
    }
}

static tt_status biased_step(biased *x, int step, float lr, tt_stats *stats)
{
    float target[AREA];
    biased_target(step, target);
    CHECK(tt_set(x->program, x->target, target, 3) == TT_OK);
    return tt_step(x->program, lr, stats);
}

static void biased_close(biased *x)
{
    tt_program_free(x->program);
    tt_tape_free(x->t);
    TEST_CLOSE(x->ctx, &x->a);
}

static void check_gradients(const biased *x, double g[2][AREA], double tolerance)
{
    float got[AREA];
    for (int k = 0; k < 2; k++) {
        double wrong = 0;
        if (!CHECK(tt_get_gradient(x->program, x->p[k], got) == TT_OK)) continue;
        for (int i = 0; i < tt_param_size(x->p[k]); i++) {
            const double difference = fabs(got[i] - g[k][i]);
            if (!(difference <= wrong) && !isnan(wrong)) wrong = difference;
        }
        CHECK(wrong <= tolerance);
    }
}

/* Returns whether SGD without momentum has moved the parameters from p by `-lr * g`. */
static bool biased_moved(const biased *x, float p[2][AREA], double g[2][AREA], double lr, double tolerance)
{
    float now[AREA];
    bool all = true;
    for (int k = 0; k < 2; k++) {
        CHECK(tt_param_get(x->p[k], now) == TT_OK);
        for (int i = 0; i < tt_param_size(x->p[k]); i++)
            all = all && fabs(now[i] - (p[k][i] - lr * g[k][i])) <= tolerance;
    }
    return all;
}

/* Gradients can be read after a step until the next step begins, but not after a step whose loss is not
   finite. keep_gradients changes no bit of the training. */
TEST(gradients_are_kept_after_a_step)
{
    static double g[2][AREA];
    static float p[2][AREA], ends[2][AREA];
    tt_stats stats;
    for (int keep = 0; keep < 2; keep++) {
        biased x;
        tt_compile_options o = tt_compile_options_default();
        o.optimizer.clip_norm = 0.1f;
        o.keep_gradients = keep != 0;
        biased_open(&x, &o);
        REQUIRE(x.program != NULL);
        CHECK(tt_get_gradient(x.program, x.p[0], p[0]) == TT_ERR_ARGUMENT);
        CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "or after a step of one compiled with keep_gradients");
        for (int step = 0; step < 3; step++) {
            biased_gradients(&x, step, 1, p, g);
            CHECK(biased_step(&x, step, 0.1f, step ? NULL : &stats) == TT_OK);
            if (keep) check_gradients(&x, g, 1e-7);
            else CHECK(tt_get_gradient(x.program, x.p[0], p[0]) == TT_ERR_ARGUMENT);
        }
        CHECK(tt_param_get(x.p[1], ends[keep]) == TT_OK);
        p[1][0] = NAN;
        CHECK(tt_set(x.program, x.target, p[1], 3) == TT_OK &&
              tt_step(x.program, 0.1f, &stats) == TT_ERR_NUMERIC);
        CHECK(tt_get_gradient(x.program, x.p[0], p[0]) == TT_ERR_ARGUMENT);
        biased_close(&x);
    }
    CHECK(memcmp(ends[0], ends[1], sizeof ends[0]) == 0);
}

/* The argument of `watch`, which compares the gradients with g. If `changes`, `watch` multiplies the weight's
   gradient by 3, sets the bias's to 1/8, and notes both in g. */
typedef struct watcher {
    biased *x;
    double (*g)[AREA], tolerance;
    int64_t calls, fails_at;
    bool changes;
} watcher;

static tt_status watch(void *user, tt_program *p, int64_t step)
{
    watcher *w = (watcher *)user;
    float g[AREA];
    CHECK(p == w->x->program && step == w->calls);
    if (w->calls == w->fails_at) return TT_ERR_FILE;
    w->calls++;
    check_gradients(w->x, w->g, w->tolerance);
    for (int k = 0; k < 2 && w->changes; k++) {
        CHECK(tt_get_gradient(p, w->x->p[k], g) == TT_OK);
        for (int i = 0; i < tt_param_size(w->x->p[k]); i++) {
            g[i] = k ? 3 * g[i] : 0.125f;
            w->g[k][i] = g[i];
        }
        CHECK(tt_set_gradient(p, w->x->p[k], g) == TT_OK);
    }
    if (w->changes) check_gradients(w->x, w->g, w->tolerance);
    CHECK(tt_step(p, 0.1f, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w->x->ctx, TT_ERR_ARGUMENT, "before_update runs within a step");
    return TT_OK;
}

/* The update and the norm use the gradients that before_update writes: SGD's steps equal a float64 loop. */
TEST(before_update_reads_and_changes_gradients)
{
    static double g[2][AREA];
    static float p[2][AREA];
    static const struct { const char *precision, *offload, *update; double tolerance; } rows[] = {
        {"32-true", NULL, "end", 1e-6}, {"32-true", "gradients,optimizer,parameters", "end", 1e-6},
        {"32-true", NULL, "host", 1e-6}, {"bf16-true", NULL, "end", 0.02}, {"16-mixed", NULL, "end", 1e-3}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        biased x;
        watcher w = {&x, g, rows[k].tolerance, 0, -1, true};
        tt_compile_options o = tt_compile_options_default();
        o.precision = rows[k].precision;
        o.offload = rows[k].offload;
        o.update = rows[k].update;
        o.loss_scale.init = 128;
        o.optimizer.kind = TT_SGD;
        o.optimizer.weight_decay = 0;
        o.before_update = watch;
        o.user = &w;
        biased_open(&x, &o);
        REQUIRE(x.program != NULL);
        for (int step = 0; step < 4; step++) {
            double squares = 0;
            tt_stats stats;
            biased_gradients(&x, step, 1, p, g);
            CHECK(biased_step(&x, step, 0.25f, &stats) == TT_OK && w.calls == step + 1);
            CHECK(biased_moved(&x, p, g, 0.25, rows[k].tolerance));
            for (int i = 0; i < AREA; i++) squares += g[1][i] * g[1][i] + (i < SIDE ? g[0][i] * g[0][i] : 0);
            CHECK_NEAR(stats.grad_norm, sqrt(squares), rows[k].tolerance);
        }
        w.fails_at = 4;
        memset(g, 0, sizeof g);
        for (int m = 0; m < 2; m++) CHECK(tt_param_get(x.p[m], p[m]) == TT_OK);
        CHECK(biased_step(&x, 9, 0.25f, NULL) == TT_ERR_FILE);
        CHECK_ERROR(x.ctx, TT_ERR_FILE, "before_update failed in step 4: nothing was updated");
        CHECK(biased_moved(&x, p, g, 0.25, 0));
        w.fails_at = -1;
        biased_gradients(&x, 9, 1, p, g);
        CHECK(biased_step(&x, 9, 0.25f, NULL) == TT_OK && tt_program_steps(x.program) == 5);
        CHECK(tt_set_gradient(x.program, x.p[0], p[0]) == TT_ERR_UNSUPPORTED);
        CHECK_ERROR(x.ctx, TT_ERR_UNSUPPORTED, "the step has ended: call it in before_update");
        biased_close(&x);
    }
}

/* tt_set_gradient also works between the micro-batches and the update. With several ranks and groups
   before_update reads the mean gradient of all ranks and groups. */
TEST(gradients_of_several_micro_batches)
{
    static double g[2][AREA];
    static float p[2][AREA], target[AREA];
    static const struct { const char *device; int groups, zero; } rows[] = {
        {"cpu", 1, 0}, {"cpu", 2, 0}, {"cpu*2", 2, 1}, {"cpu*2", 2, 3}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        biased x;
        watcher w = {&x, g, 1e-6, 0, -1, false};
        tt_compile_options o = tt_compile_options_default();
        o.device = rows[k].device;
        o.parallel.groups = rows[k].groups;
        o.parallel.zero = rows[k].zero;
        o.optimizer.kind = TT_SGD;
        o.optimizer.weight_decay = 0;
        o.accumulate = k < 2;
        o.before_update = watch;
        o.user = &w;
        biased_open(&x, &o);
        REQUIRE(x.program != NULL);
        for (int step = 0; step < 2; step++) {
            tt_status status = TT_OK;
            biased_gradients(&x, step, 2, p, g);
            for (int m = 0; m < 2; m++) {
                biased_target(step + m, target);
                CHECK(tt_set_rank(x.program, k < 2 ? 0 : m, x.target, target, 3) == TT_OK);
                if (k < 2) status = tt_micro_step(x.program, NULL);
            }
            if (k == 0) { /* the new gradients double the step */
                for (int m = 0; m < 2; m++) {
                    CHECK(tt_get_gradient(x.program, x.p[m], target) == TT_OK);
                    for (int i = 0; i < AREA; i++) target[i] *= 2, g[m][i] *= 2;
                    CHECK(tt_set_gradient(x.program, x.p[m], target) == TT_OK);
                }
            }
            if (k == 1) CHECK(tt_set_gradient(x.program, x.p[0], target) == TT_ERR_UNSUPPORTED);
            CHECK(status == TT_OK &&
                  (k < 2 ? tt_update : tt_step)(x.program, 0.25f, NULL) == TT_OK && w.calls == step + 1);
            CHECK(biased_moved(&x, p, g, 0.25, 1e-6));
            if (k == 0) check_gradients(&x, g, 1e-6);
            else CHECK(tt_get_gradient(x.program, x.p[0], target) == TT_ERR_UNSUPPORTED);
        }
        biased_close(&x);
    }
}

TEST(kept_gradients_refuse)
{
    static const struct { const char *device, *update, *error; int pipeline; bool hook; } rows[] = {
        {"cpu", "backward", "does not go with before_update, as the memory of gradients is reused", 1, true},
        {"cpu", "backward", "does not go with keep_gradients", 1, false},
        {"cpu*2", "end", "does not go with before_update", 2, true},
        {"cpu*2", "end", "does not go with keep_gradients", 2, false}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_compile_options o = tt_compile_options_default();
        o.device = rows[k].device;
        o.update = rows[k].update;
        o.parallel.pipeline = rows[k].pipeline;
        if (rows[k].hook) o.before_update = watch;
        else o.keep_gradients = true;
        CHECK(tt_check_options(ctx, &o) != TT_OK && strstr(tt_error(ctx), rows[k].error) != NULL);
        o.train = false;
        CHECK(tt_check_options(ctx, &o) == TT_OK);
        TEST_CLOSE(ctx, &a);
    }
}

/* ---------------------------------------------------------------------------------------------- schedules */

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
                              : k == 0 ? lr
                              : k == 1 ? lr + (low - lr) * done
                              : low + (lr - low) * 0.5 * (1 + cos(acos(-1.0) * done));
            CHECK_NEAR(tt_schedule_lr(&s, steps[j]), expected, 1e-9);
        }
        CHECK(tt_schedule_lr(&s, 10) == 2e-3f && (k == 0 || tt_schedule_lr(&s, 110) == 1e-4f));
    }
    s.kind = TT_LINEAR; /* first without a warm-up, then with a warm-up that never ends */
    s.min_lr = 0;
    s.warmup_steps = 0;
    s.total_steps = 4;
    CHECK(tt_schedule_lr(&s, 0) == 2e-3f && tt_schedule_lr(&s, 4) == 0 && tt_schedule_lr(&s, 5) == 0);
    CHECK_NEAR(tt_schedule_lr(&s, 1), 1.5e-3, 1e-9);
    s.warmup_steps = s.total_steps = 4;
    CHECK_NEAR(tt_schedule_lr(&s, 3), 1.5e-3, 1e-9);
    CHECK(isfinite(tt_schedule_lr(&s, 4)) && tt_schedule_lr(&s, 5) == 0);
}

static float every_third(void *user, int64_t step) { return *(float *)user * (float)(step % 3); }

/* The learning rate is constant until the last decay_steps, and then falls linearly or as 1 minus a square
   root. Or a function gives the rate. */
TEST(schedules_that_stay_and_functions)
{
    static const int64_t steps[] = {0, 3, 9, 10, 11, 79, 80, 81, 95, 109, 110, 111, 5000};
    tt_schedule s;
    memset(&s, 0, sizeof s);
    s.lr = 2e-3f;
    s.min_lr = 1e-4f;
    s.warmup_steps = 10;
    s.total_steps = 110;
    s.decay_steps = 30;
    for (int k = 0; k < 2; k++)
        for (int j = 0; j < TEST_COUNT(steps); j++) {
            const double lr = 2e-3f, low = 1e-4f, step = (double)steps[j];
            double done = (step - 80) / 30;
            done = done < 0 ? 0 : done > 1 ? 1 : done;
            done = k ? sqrt(done) : done;
            const double expected = step < 10 ? lr * step / 10 : low + (lr - low) * (1 - done);
            s.kind = k ? TT_WSD_SQRT : TT_WSD;
            CHECK_NEAR(tt_schedule_lr(&s, steps[j]), expected, 1e-9);
            if (step >= 10 && step <= 80) CHECK(tt_schedule_lr(&s, steps[j]) == 2e-3f);
            if (step >= 110) CHECK(tt_schedule_lr(&s, steps[j]) == 1e-4f);
        }
    float each = 0.25f;
    s.lr_at = every_third;
    s.user = &each;
    CHECK(tt_schedule_lr(&s, 3) == 0 && tt_schedule_lr(&s, 5) == 0.5f);
}

static const test_case tests[] = {
    TEST_CASE(sgd), TEST_CASE(adam), TEST_CASE(lion), TEST_CASE(muon), TEST_CASE(adafactor),
    TEST_CASE(muon_refuses), TEST_CASE(prune), TEST_CASE(prune_by_movement), TEST_CASE(movements_of_weights),
    TEST_CASE(pruned_weights_of_equal_magnitude),
    TEST_CASE(rounded_weights), TEST_CASE(state_bits_within_a_budget),
    TEST_CASE(decay_rules),
    TEST_CASE(learning_rates_by_name_and_layer),
    TEST_CASE(layers_of_names), TEST_CASE(rules_for_no_parameter),
    TEST_CASE(bias_correction),
    TEST_CASE(stochastic_rounding_moves_bf16_weights), TEST_CASE(micro_batches_equal_one_batch),
    TEST_CASE(contradictory_options_are_refused_together), TEST_CASE(loss_scale_falls_and_grows),
    TEST_CASE(loss_scale_grows_where_nothing_overflows), TEST_CASE(loss_scale_leaves_true_gradients),
    TEST_CASE(loss_scale_has_a_floor), TEST_CASE(optimizer_state_of_f16_weights),
    TEST_CASE(precision_options), TEST_CASE(gradients_are_kept_after_a_step),
    TEST_CASE(before_update_reads_and_changes_gradients),
    TEST_CASE(gradients_of_several_micro_batches), TEST_CASE(kept_gradients_refuse),
    TEST_CASE(schedules), TEST_CASE(schedules_that_stay_and_functions),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
