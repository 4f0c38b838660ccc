/* Ops and optimizers of the caller. */
#pragma once

/* The argument of an op that computes `a / (1 + |a|) * b` of inputs a and b. If there is a third input, of
   integers, each row of the result is multiplied by the row's integer. The struct counts the calls of each
   function, and says which call of the forward fails. */
typedef struct signer { int forwards, backwards, fails_at; bool wants[2]; } signer;

static tt_status sign_forward(void *user, const tt_custom_array *in, int n, const tt_custom_array *out)
{
    signer *x = (signer *)user;
    const float *a = (const float *)in[0].data, *b = (const float *)in[1].data;
    float *y = (float *)out->data;
    CHECK(in[0].dtype == TT_F32 && in[0].rows == out->rows && in[0].width == out->width && n >= 2);
    for (int64_t k = 0; k < out->rows * out->width; k++) {
        const int32_t *c = n > 2 ? (const int32_t *)in[2].data : NULL;
        y[k] = a[k] / (1 + fabsf(a[k])) * b[k] * (float)(c ? c[k / out->width] : 1);
    }
    return ++x->forwards == x->fails_at ? TT_ERR_NUMERIC : TT_OK;
}

static tt_status sign_backward(void *user, const tt_custom_array *in, int n, const tt_custom_array *out,
                               const tt_custom_array *dout, const tt_custom_array *din)
{
    signer *x = (signer *)user;
    const float *a = (const float *)in[0].data, *b = (const float *)in[1].data,
        *dy = (const float *)dout->data;
    float *da = (float *)din[0].data, *db = (float *)din[1].data;
    x->backwards++;
    x->wants[0] = da != NULL;
    x->wants[1] = db != NULL;
    CHECK(n < 3 || (in[2].dtype == TT_I32 && !din[2].data));
    for (int64_t k = 0; k < out->rows * out->width; k++) {
        const int32_t *c = n > 2 ? (const int32_t *)in[2].data : NULL;
        const float times = dy[k] * (float)(c ? c[k / out->width] : 1), below = 1 + fabsf(a[k]);
        if (da) da[k] = times * b[k] / below / below;
        if (db) db[k] = times * a[k] / below;
    }
    return TT_OK;
}

enum { SIGN_ROWS = 11, SIGN_WIDTH = 7 };

/* A program whose loss is `mean((custom(a, b) - y)^2)`. The comment of signed_open says what a and b are. */
typedef struct signed_net {
    test_allocator a;
    tt_context *ctx;
    tt_tape *t;
    tt_param *w, *b;
    tt_value x, y, c, out, loss;
    tt_program *p;
    signer user;
    tt_custom_op op;
} signed_net;

/* Opens a program with an op of the caller. For kind 0 the op reads two slices of one product, for kind 1 one
   value twice, for kind 2 a product, a parameter and integers, for kind 3 values that other ops read, too. */
static bool signed_open(signed_net *n, int kind, const tt_compile_options *o)
{
    memset(n, 0, sizeof *n);
    n->ctx = test_open(&n->a);
    n->op.name = "softsign";
    n->op.forward = sign_forward;
    n->op.backward = sign_backward;
    n->op.user = &n->user;
    n->w = param2(n->ctx, "w", 2 * SIGN_WIDTH, 3, init_of(TT_INIT_NORMAL, 0.7f));
    n->b = param2(n->ctx, "b", SIGN_ROWS, SIGN_WIDTH, init_of(TT_INIT_NORMAL, 0.7f));
    tt_tape *t = n->t = tt_tape_new(n->ctx);
    const int64_t rows = kind == 2 ? SIGN_ROWS : tt_axis(t, "rows", SIGN_ROWS);
    n->x = tt_input(t, "x", TT_F32, rows, 3);
    n->y = tt_input(t, "y", TT_F32, rows, SIGN_WIDTH);
    n->c = tt_input(t, "c", TT_I32, rows, 1);
    const tt_value both = tt_linear(t, n->x, n->w, NULL);
    tt_value in[3] = {tt_slice(t, both, 0, SIGN_WIDTH), tt_slice(t, both, SIGN_WIDTH, SIGN_WIDTH), n->c};
    if (kind == 1) in[1] = in[0];
    if (kind == 2) in[1] = tt_param_value(t, n->b);
    n->out = tt_custom(t, &n->op, in, kind == 2 ? 3 : 2, tt_value_axis(t, in[0]), SIGN_WIDTH);
    if (kind == 3) {
        n->out = tt_mul(t, tt_gelu(t, n->out), tt_add(t, in[0], in[1]));
        tt_block_end(t, n->out);
        in[0] = n->out;
        n->out = tt_custom(t, &n->op, in, 2, tt_value_axis(t, in[0]), SIGN_WIDTH);
        tt_block_end(t, n->out);
    }
    n->loss = tt_mean_squared_error(t, n->out, n->y, tt__handle(t, 0));
    CHECK(tt_tape_status(t) == TT_OK);
    return (n->p = tt_compile(t, n->loss, o)) != NULL;
}

static void signed_close(signed_net *n)
{
    tt_program_free(n->p);
    tt_tape_free(n->t);
    TEST_CLOSE(n->ctx, &n->a);
}

static void signed_set(const signed_net *n, tt_program *p, int64_t rows)
{
    float x[3 * SIGN_ROWS], y[SIGN_ROWS * SIGN_WIDTH];
    int32_t c[SIGN_ROWS];
    uint64_t s = 3;
    for (int k = 0; k < 3 * SIGN_ROWS; k++) x[k] = test_uniform(&s);
    for (int k = 0; k < SIGN_ROWS * SIGN_WIDTH; k++) y[k] = test_uniform(&s);
    for (int k = 0; k < SIGN_ROWS; k++) c[k] = k % 4 - 1;
    CHECK(tt_set(p, n->x, x, rows) == TT_OK && tt_set(p, n->y, y, rows) == TT_OK);
    CHECK(tt_set(p, n->c, c, rows) == TT_OK);
}

/* Computes the loss of a signed_net in float64. */
static double signed_loss(int kind, const double *w, const double *b, int rows)
{
    double x[3 * SIGN_ROWS], loss = 0;
    uint64_t s = 3;
    for (int k = 0; k < 3 * SIGN_ROWS; k++) x[k] = test_uniform(&s);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < SIGN_WIDTH; c++) {
            double y = 0, in[2] = {0, 0};
            uint64_t of_y = s;
            for (int k = 0; k <= r * SIGN_WIDTH + c; k++) y = test_uniform(&of_y);
            for (int k = 0; k < 3; k++) {
                in[0] += x[3 * r + k] * w[3 * c + k];
                in[1] += x[3 * r + k] * w[3 * (SIGN_WIDTH + c) + k];
            }
            if (kind == 1) in[1] = in[0];
            if (kind == 2) in[1] = b[r * SIGN_WIDTH + c];
            double out = in[0] / (1 + fabs(in[0])) * in[1] * (kind == 2 ? r % 4 - 1 : 1);
            if (kind == 3) {
                out = out / 2 * (1 + erf(out / sqrt(2.0))) * (in[0] + in[1]);
                out = out / (1 + fabs(out)) * in[1];
            }
            loss += (out - y) * (out - y);
        }
    return loss / (rows * SIGN_WIDTH);
}

/* The loss equals the loss in float64, and the gradients equal finite differences in float64. The op's inputs
   are slices, one value twice, parameters, or values that other ops read as well. Covers recompute, offload
   and bf16. */
TEST(ops_of_the_caller)
{
    static const struct { const char *precision, *recompute, *offload; double tolerance; } ways[] = {
        {"32-true", "none", NULL, 3e-6}, {"32-true", "blocks", NULL, 3e-6},
        {"32-true", "none", "activations,parameters", 3e-6}, {"bf16-mixed", "none", NULL, 2e-2}};
    enum { OF_W = 6 * SIGN_WIDTH, OF_B = SIGN_ROWS * SIGN_WIDTH };
    for (int kind = 0; kind < 4; kind++) {
        float exact[OF_W];
        for (int way = 0; way < TEST_COUNT(ways); way++) {
            static double w[OF_W], b[OF_B];
            float values[OF_B], gradient[2][OF_B];
            const int rows = kind == 2 ? SIGN_ROWS : SIGN_ROWS - 4;
            signed_net n;
            tt_stats stats;
            tt_compile_options o = tt_compile_options_default();
            o.precision = ways[way].precision;
            o.recompute = ways[way].recompute;
            o.offload = ways[way].offload;
            o.keep_gradients = true;
            if (!CHECK(signed_open(&n, kind, &o))) { printf("%s\n", tt_error(n.ctx)); return; }
            CHECK(tt_param_get(n.w, values) == TT_OK);
            for (int k = 0; k < OF_W; k++) w[k] = values[k];
            CHECK(tt_param_get(n.b, values) == TT_OK);
            for (int k = 0; k < OF_B; k++) b[k] = values[k];
            signed_set(&n, n.p, rows);
            CHECK(tt_step(n.p, 0, &stats) == TT_OK);
            CHECK_NEAR(stats.loss, signed_loss(kind, w, b, rows), ways[way].tolerance * stats.loss);
            CHECK(n.user.backwards == (kind == 3 ? 2 : 1) && n.user.wants[0] && n.user.wants[1]);
            CHECK(n.user.forwards == (kind == 3 ? 2 + (way == 1) : 1));
            CHECK(tt_get_gradient(n.p, n.w, gradient[0]) == TT_OK);
            if (kind == 2) CHECK(tt_get_gradient(n.p, n.b, gradient[1]) == TT_OK);
            for (int k = 0; k < OF_W + (kind == 2) * OF_B; k++) {
                double *at = k < OF_W ? &w[k] : &b[k - OF_W], was = *at, h = 1e-5;
                *at = was + h;
                const double above = signed_loss(kind, w, b, rows);
                *at = was - h;
                const double slope = (above - signed_loss(kind, w, b, rows)) / (2 * h);
                *at = was;
                CHECK_NEAR(k < OF_W ? gradient[0][k] : gradient[1][k - OF_W], slope, ways[way].tolerance);
            }
            if (way == 0) memcpy(exact, gradient[0], sizeof exact);
            if (way && way < 3) CHECK(memcmp(exact, gradient[0], sizeof exact) == 0);
            signed_close(&n);
        }
    }
}

TEST(ops_of_the_caller_refuse)
{
    signed_net n;
    tt_stats stats;
    tt_compile_options o = tt_compile_options_default();
    REQUIRE(signed_open(&n, 0, &o));
    n.user.fails_at = 1;
    signed_set(&n, n.p, 5);
    CHECK(tt_step(n.p, 0.1f, &stats) == TT_ERR_NUMERIC && tt_program_steps(n.p) == 0);
    CHECK_ERROR(n.ctx, TT_ERR_NUMERIC, "the function `forward` of op 'softsign' failed (TT_ERR_NUMERIC)");
    signed_set(&n, n.p, 5);
    CHECK(tt_step(n.p, 0.1f, &stats) == TT_OK && stats.step == 1);
    o.device = "cuda";
    CHECK(!tt_compile(n.t, n.loss, &o));
    CHECK_ERROR(n.ctx, TT_ERR_UNSUPPORTED, "device 'cuda' cannot run 'softsign.");
    CHECK_ERROR(n.ctx, TT_ERR_UNSUPPORTED, "the functions of tt_custom run on device 'cpu' alone");
    o.device = "cpu";
    n.op.backward = NULL;
    CHECK(!tt_compile(n.t, n.loss, &o));
    CHECK_ERROR(n.ctx, TT_ERR_UNSUPPORTED, "op 'softsign' has no function `backward`, and 'softsign.");
    o.train = false;
    tt_program *eval = tt_compile(n.t, n.loss, &o);
    CHECK(eval != NULL);
    tt_program_free(eval);
    const struct { int inputs; int64_t rows, width; const char *error; } rows[] = {
        {0, 5, 5, "op 'softsign' has 0 inputs, expected 1 to 6"}, {7, 5, 5, "has 7 inputs"},
        {1, 0, 5, "has an output of 0 rows of width 5"}, {1, 5, -1, "has an output of 5 rows of width -1"},
        {3, 5, 5, "softsign"}};
    for (int k = 0; k < 2; k++) {
        tt_tape *t = tt_tape_new(n.ctx);
        const tt_value x = tt_input(t, "x", TT_F32, 5, 5);
        tt_custom(t, k ? NULL : &n.op, k ? &x : NULL, 1, 5, 5);
        CHECK(!tt_compile(t, x, NULL));
        CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, k ? "tt_custom: op is NULL" : "tt_custom: inputs is NULL");
        tt_tape_free(t);
    }
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        tt_tape *t = tt_tape_new(n.ctx);
        tt_value in[8];
        for (int j = 0; j < 8; j++) in[j] = tt_input(t, "x", TT_F32, 5, 5);
        if (k == 4) in[1] = tt__handle(t, 0);
        tt_custom(t, &n.op, in, rows[k].inputs, rows[k].rows, rows[k].width);
        CHECK(tt_tape_status(t) != TT_OK);
        CHECK(!tt_compile(t, in[0], NULL));
        if (k < 4) CHECK(strstr(tt_error(n.ctx), rows[k].error) != NULL);
        tt_tape_free(t);
    }
    signed_close(&n);
}

/* AdamW as an optimizer of the caller, in double precision. */
typedef struct own_adam { double beta1, beta2, eps; const char *fails_for; } own_adam;

static tt_status own_update(void *user, const tt_custom_update *u)
{
    own_adam *o = (own_adam *)user;
    const double t = (double)u->step + 1;
    if (o->fails_for && strcmp(o->fails_for, u->name) == 0) return TT_ERR_FILE;
    for (int64_t k = 0; k < u->n; k++) {
        const double g = u->gradient[k], m = o->beta1 * u->state[0][k] + (1 - o->beta1) * g,
                     v = o->beta2 * u->state[1][k] + (1 - o->beta2) * g * g;
        u->state[0][k] = (float)m;
        u->state[1][k] = (float)v;
        u->parameter[k] = (float)(u->parameter[k] * (1 - (double)u->lr * u->weight_decay) - u->lr *
                                  (m / (1 - pow(o->beta1, t))) / (sqrt(v / (1 - pow(o->beta2, t))) + o->eps));
    }
    return TT_OK;
}

/* An AdamW that the caller's function computes trains like the library's AdamW, with clipping, decay and
   rules for learning rates, wherever the optimizer state is stored. The optimizer state is saved and
   loaded. */
TEST(an_optimizer_of_the_caller)
{
    static const struct { const char *device, *precision, *offload, *update; int zero; } rows[] = {
        {"cpu", "32-true", NULL, "end", 1}, {"cpu", "bf16-mixed", NULL, "backward", 1},
        {"cpu", "32-true", "optimizer,parameters", "end", 1}, {"cpu", "32-true", NULL, "host", 1},
        {"cpu*2", "32-true", NULL, "end", 1}, {"cpu*2", "16-mixed", "optimizer", "end", 3}};
    static const tt_lr_rule rules[] = {{"head.*", 0.5f}, {NULL, 0}};
    static averaged x[3];
    own_adam own = {0.9, 0.99, 1e-4, NULL};
    const tt_custom_optimizer custom = {own_update, &own, 2};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        const char *path = test_path(test_folder(), "own.safetensors");
        tt_compile_options o = tt_compile_options_default();
        o.device = rows[k].device;
        o.precision = rows[k].precision;
        o.offload = rows[k].offload;
        o.update = rows[k].update;
        o.parallel.zero = rows[k].zero;
        o.loss_scale.init = 64;
        o.optimizer.lr_rules = rules;
        o.optimizer.weight_decay = 0.1f;
        o.optimizer.clip_norm = strcmp(rows[k].update, "backward") == 0 ? 0 : 0.3f;
        o.optimizer.beta2 = 0.99f;
        o.optimizer.eps = 1e-4f;
        for (int kind = 0; kind < 3; kind++) {
            if (kind) o.optimizer.kind = TT_OPTIMIZER_CUSTOM;
            o.optimizer.custom = &custom;
            if (!averaged_open(&x[kind], &o)) { printf("%s\n", tt_error(x[kind].ctx)); return; }
            for (int step = 0; step < EMA_STEPS && kind < 2; step++) averaged_step(&x[kind], step, 0);
        }
        double wrong = 0;
        for (int p = 0; p < EMA_PARAMS; p++)
            for (int i = 0; i < EMA_MAX; i++) wrong = fmax(wrong, fabs(x[0].now[p][i] - x[1].now[p][i]));
        CHECK(wrong <= (k == 1 || k == 5 ? 1e-3 : 2e-6));
        const tt_plan plan = tt_program_plan(x[0].p), same = tt_program_plan(x[1].p);
        CHECK(plan.at_peak[TT_MEM_OPTIMIZER] == same.at_peak[TT_MEM_OPTIMIZER]);
        CHECK(tt_program_save(x[1].p, path) == TT_OK && tt_program_load(x[2].p, path) == TT_OK);
        for (int kind = 1; kind < 3; kind++) averaged_step(&x[kind], EMA_STEPS, 0);
        CHECK(memcmp(x[1].now, x[2].now, sizeof x[1].now) == 0);
        own.fails_for = "head.weight";
        const int32_t ids[4] = {1, 2, 3, 4}, starts[2] = {0, 4}, label[1] = {1};
        for (int rank = 0; rank < x[1].p->arena->data; rank++)
            CHECK(tt_set_rank(x[1].p, rank, x[1].m.ids, ids, 4) == TT_OK &&
                  tt_set_rank(x[1].p, rank, x[1].m.starts, starts, 2) == TT_OK &&
                  tt_set_rank(x[1].p, rank, x[1].m.labels, label, 1) == TT_OK);
        CHECK(tt_step(x[1].p, 0.1f, NULL) == TT_ERR_FILE);
        CHECK_ERROR(x[1].ctx, TT_ERR_FILE, "`update` of the optimizer failed for parameter 'head.weight'");
        own.fails_for = NULL;
        CHECK(tt_program_save(x[1].p, path) == TT_ERR_DEVICE && tt_program_load(x[1].p, path) == TT_OK);
        for (int kind = 0; kind < 3; kind++) averaged_close(&x[kind]);
    }
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options o = tt_compile_options_default();
    o.optimizer.kind = TT_OPTIMIZER_CUSTOM;
    CHECK(tt_check_options(ctx, &o) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "kind TT_OPTIMIZER_CUSTOM needs `custom` with a function `update`");
    const tt_custom_optimizer many = {own_update, &own, 3};
    o.optimizer.custom = &many;
    CHECK(tt_check_options(ctx, &o) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "custom.states 3 is not in 0 to 2");
    o.optimizer.custom = &custom;
    o.device = "cuda";
    o.precision = "bf16-true";
    CHECK(tt_check_options(ctx, &o) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED,
                "TT_OPTIMIZER_CUSTOM runs on device 'cpu' only, but the device is 'cuda'; "
                "the optimizer TT_OPTIMIZER_CUSTOM needs fp32 weights, but precision 'bf16-true'");
    TEST_CLOSE(ctx, &a);
}
