/* Tests that train small models: threads, precisions, micro-batches, a residual stream. */
#pragma once

/* ------------------------------------------------------------------------------------------ a small model */

enum { MODEL_TOKENS = 640, MODEL_SEQS = 16, MODEL_WIDTH = 24, MODEL_VOCAB = 40, MODEL_CLASSES = 4 };

typedef struct model {
    tt_context *ctx;
    tt_tape *t;
    tt_value ids, start, labels, loss;
} model;

typedef struct batch {
    int seqs, rows;
    int32_t ids[MODEL_TOKENS], start[MODEL_SEQS + 1], labels[MODEL_SEQS];
} batch;

static tt_param *model_param(tt_context *ctx, const char *part, int layer, int rows, int cols,
                             tt_init_kind kind)
{
    char name[64];
    int64_t dims[2] = {rows, cols};
    tt_init init = {kind, 0.2f};
    snprintf(name, sizeof name, "layer.%d.%s", layer, part);
    return tt_param_new(ctx, name, rows > 1 ? 2 : 1, rows > 1 ? dims : &dims[1], init);
}

/* Builds the model: embedding, two attention layers, the mean of each sequence, classes. */
static void model_open(model *m, int threads, float p)
{
    tt_context_options o = tt_context_options_default();
    tt_attention_options a = tt_attention_options_default(3);
    const int D = MODEL_WIDTH;
    o.threads = threads;
    o.seed = 11;
    o.logger.log = test__no_log;
    a.dropout = p;
    a.max_length = MODEL_TOKENS / MODEL_SEQS;
    tt_context *ctx = m->ctx = tt_open(&o);
    tt_tape *t = m->t = tt_tape_new(ctx);
    int64_t tokens = tt_axis(t, "tokens", MODEL_TOKENS), seqs = tt_axis(t, "seqs", MODEL_SEQS);
    m->ids = tt_input(t, "ids", TT_I32, tokens, 1);
    m->start = tt_seq_start(t, "seq_start", seqs);
    m->labels = tt_input(t, "labels", TT_I32, seqs, 1);
    tt_value x = tt_embedding(t, m->ids, model_param(ctx, "embedding", 0, MODEL_VOCAB, D, TT_INIT_NORMAL));
    for (int l = 0; l < 2; l++) {
        tt_value h = tt_layernorm(t, x, model_param(ctx, "norm1.weight", l, 1, D, TT_INIT_ONES),
                                  model_param(ctx, "norm1.bias", l, 1, D, TT_INIT_ZEROS), 1e-5f);
        tt_value qkv = tt_linear(t, h, model_param(ctx, "qkv.weight", l, 3 * D, D, TT_INIT_NORMAL),
                                 model_param(ctx, "qkv.bias", l, 1, 3 * D, TT_INIT_ZEROS));
        h = tt_attention(t, tt_slice(t, qkv, 0, D), tt_slice(t, qkv, D, D), tt_slice(t, qkv, 2 * D, D),
                         m->start, &a);
        h = tt_linear(t, h, model_param(ctx, "out.weight", l, D, D, TT_INIT_NORMAL),
                      model_param(ctx, "out.bias", l, 1, D, TT_INIT_ZEROS));
        x = tt_add(t, x, tt_dropout(t, h, p));
        h = tt_layernorm(t, x, model_param(ctx, "norm2.weight", l, 1, D, TT_INIT_ONES),
                         model_param(ctx, "norm2.bias", l, 1, D, TT_INIT_ZEROS), 1e-5f);
        h = tt_gelu(t, tt_linear(t, h, model_param(ctx, "up.weight", l, 2 * D, D, TT_INIT_NORMAL),
                                 model_param(ctx, "up.bias", l, 1, 2 * D, TT_INIT_ZEROS)));
        h = tt_linear(t, h, model_param(ctx, "down.weight", l, D, 2 * D, TT_INIT_NORMAL),
                      model_param(ctx, "down.bias", l, 1, D, TT_INIT_ZEROS));
        x = tt_add(t, x, tt_dropout(t, h, p));
    }
    x = tt_linear(t, tt_mean_pool(t, x, m->start),
                  model_param(ctx, "classes", 0, MODEL_CLASSES, D, TT_INIT_NORMAL), NULL);
    m->loss = tt_cross_entropy(t, x, m->labels, NULL);
}

static void model_close(model *m)
{
    tt_tape_free(m->t);
    tt_close(m->ctx);
}

/* Returns random sequences of different lengths; half of the tokens depend on the sequence's class. */
static batch make_batch(int seqs, int longest, uint64_t seed)
{
    batch b;
    memset(&b, 0, sizeof b);
    seed = seed * 7919 + 12345;
    for (int k = 0; k < 8; k++) test_random(&seed);
    b.seqs = seqs;
    for (int s = 0; s < seqs; s++) {
        int length = 1 + (int)(test_random(&seed) % (uint32_t)longest);
        b.labels[s] = (int32_t)(test_random(&seed) % MODEL_CLASSES);
        for (int k = 0; k < length; k++) {
            bool leans = test_random(&seed) % 10 < 5;
            b.ids[b.rows++] = (int32_t)(leans ? (uint32_t)b.labels[s] * 10 + test_random(&seed) % 10
                                              : test_random(&seed) % MODEL_VOCAB);
        }
        b.start[s + 1] = b.rows;
    }
    return b;
}

static bool model_set(const model *m, tt_program *p, const batch *b)
{
    return tt_set(p, m->ids, b->ids, b->rows) == TT_OK &&
           tt_set(p, m->start, b->start, b->seqs + 1) == TT_OK &&
           tt_set(p, m->labels, b->labels, b->seqs) == TT_OK;
}

/* Returns a copy of all parameters, one after another, which the caller frees; *size: number of elements. */
static float *all_params(tt_context *ctx, size_t *size)
{
    float *values = NULL;
    *size = 0;
    for (int k = 0; k < ctx->n_params; k++) {
        size_t n = (size_t)tt_param_size(ctx->params[k]);
        values = (float *)realloc(values, sizeof(float) * (*size + n));
        CHECK(tt_param_get(ctx->params[k], values + *size) == TT_OK);
        *size += n;
    }
    return values;
}

static bool same_params(const float *a, const float *b, size_t n)
{
    return memcmp(a, b, sizeof(float) * n) == 0;
}

TEST(same_bits_for_any_number_of_threads)
{
    static const int threads[] = {1, 2, 3, 5};
    for (int precision = 0; precision < PRECISIONS; precision++) {
        float *first = NULL;
        tt_stats first_stats;
        memset(&first_stats, 0, sizeof first_stats);
        for (int k = 0; k < 4; k++) {
            model m;
            tt_stats stats;
            size_t n;
            tt_compile_options o = tt_compile_options_default();
            compile_in(&o, "portable", &precisions[precision]);
            o.loss_scale.init = 256;
            o.optimizer.clip_norm = 0.5f;
            memset(&stats, 0, sizeof stats);
            model_open(&m, threads[k], 0.1f);
            tt_program *p = tt_compile(m.t, m.loss, &o);
            for (int step = 0; step < 4 && CHECK(p != NULL); step++) {
                batch b = make_batch(MODEL_SEQS - step, MODEL_TOKENS / MODEL_SEQS, (uint64_t)step);
                CHECK(model_set(&m, p, &b) && tt_step(p, 0.01f, &stats) == TT_OK);
            }
            float *now = all_params(m.ctx, &n);
            if (!first) { first = now; first_stats = stats; }
            else {
                snprintf(where, sizeof where, "%s, %d threads", precisions[precision].name, threads[k]);
                report(same_params(first, now, n), "the parameters have other bits than with one thread");
                report(stats.loss == first_stats.loss && stats.grad_norm == first_stats.grad_norm,
                       "loss or gradient norm differ from one thread's");
                free(now);
            }
            tt_program_free(p);
            model_close(&m);
        }
        free(first);
    }
}

/* ---------------------------------------------------------------------------------------------- precision */

/* Trains 60 steps and returns the mean loss of the last 20. first: losses of the first 10 steps; skipped:
   number of skipped steps. */
static double train_model(int precision, double first[10], int64_t *skipped)
{
    model m;
    tt_stats stats;
    double last = 0;
    tt_compile_options o = tt_compile_options_default();
    compile_in(&o, "portable", &precisions[precision]);
    o.loss_scale.init = 1024;
    model_open(&m, 2, 0);
    tt_program *p = tt_compile(m.t, m.loss, &o);
    for (int step = 0; step < 60 && CHECK(p != NULL); step++) {
        batch b = make_batch(MODEL_SEQS, 30, (uint64_t)step % 20);
        CHECK(model_set(&m, p, &b) && tt_step(p, 3e-3f, &stats) == TT_OK);
        if (step >= 40) last += stats.loss / 20;
        if (step < 10) first[step] = stats.loss;
        *skipped = stats.skipped;
    }
    tt_program_free(p);
    model_close(&m);
    return last;
}

/* The mean loss of the last 20 of 60 steps is within 0.05 of the loss of 32-true, which is far below the loss
   of guessing. The losses of the first ten steps, about 1.5, differ by the rounding of two layers: 2^-8 or
   2^-11 in each of 16 ops. */
TEST(precisions_train_alike)
{
    double first[10], others[10];
    int64_t skipped;
    double loss = train_model(0, first, &skipped);
    CHECK(loss < 0.6 && skipped == 0);
    for (int k = 1; k < PRECISIONS; k++) {
        CHECK_NEAR(train_model(k, others, &skipped), loss, 0.05);
        CHECK(skipped == 0); /* skipped steps would shift all later losses */
        for (int step = 0; step < 10; step++)
            CHECK_NEAR(others[step], first[step], 16 * precisions[k].rounding * 1.5);
    }
}

/* On the CPU, mixed precision makes no 16-bit copies of weights, also in the backward, because products round
   weights while reading. CUDA makes copies. */
TEST(mixed_precision_without_copies)
{
    static const char *const device[] = {"cpu", "cuda"};
    for (int d = 0; d < 2; d++)
        for (int train = 0; train < 2; train++) {
            model m;
            tt_compile_options o = tt_compile_options_default();
            int casts = 0, narrow = 0;
            o.precision = "bf16-mixed";
            o.device = device[d];
            o.train = train;
            model_open(&m, 1, 0.1f);
            tt_program *p = tt_compile(m.t, m.loss, &o);
            for (int k = 0; CHECK(p != NULL) && k < p->built.t->n_code; k++) {
                casts += p->built.t->code[k].op == TT__OP_CAST;
                narrow += p->built.t->code[k].attr.narrow == TT_BF16;
            }
            report(d == 0 ? casts == 0 && narrow > 0 : casts > 0 && narrow == 0,
                   "%s: %d copies, %d products that round", device[d], casts, narrow);
            tt_program_free(p);
            model_close(&m);
        }
}

/* Trains a deep pre-norm stack for one micro-batch. Each layer adds only small numbers to the residual
   stream. Writes the result of the last norm and the gradient of the first weight. */
enum { DEEP_LAYERS = 24, DEEP_ROWS = 40, DEEP_WIDTH = 32 };

static void deep_stack(const char *precision, const char *residual, float *result, float *gradient_of)
{
    const int D = DEEP_WIDTH;
    static float x[DEEP_ROWS * DEEP_WIDTH], y[DEEP_ROWS * DEEP_WIDTH];
    tt_context_options co = tt_context_options_default();
    tt_compile_options o = tt_compile_options_default();
    char name[64];
    uint64_t s = 17;
    co.threads = 1;
    tt_context *ctx = tt_open(&co);
    tt_tape *t = tt_tape_new(ctx);
    tt_value in = tt_input(t, "x", TT_F32, DEEP_ROWS, D), target = tt_input(t, "y", TT_F32, DEEP_ROWS, D);
    tt_param *first = model_param(ctx, "first", 0, D, D, TT_INIT_NORMAL);
    const int64_t down[2] = {DEEP_WIDTH, 2 * DEEP_WIDTH};
    const tt_init small = {TT_INIT_NORMAL, 0.02f};
    tt_value h = tt_linear(t, in, first, NULL);
    for (int l = 0; l < DEEP_LAYERS; l++) {
        tt_value b = tt_layernorm(t, h, model_param(ctx, "norm.weight", l, 1, D, TT_INIT_ONES),
                                  model_param(ctx, "norm.bias", l, 1, D, TT_INIT_ZEROS), 1e-5f);
        b = tt_gelu(t, tt_linear(t, b, model_param(ctx, "up", l, 2 * D, D, TT_INIT_NORMAL), NULL));
        snprintf(name, sizeof name, "layer.%d.down", l);
        h = tt_add(t, h,
                   tt_linear(t, b, tt_param_new(ctx, name, 2, down, small),
                             model_param(ctx, "down.bias", l, 1, D, TT_INIT_ZEROS)));
    }
    h = tt_layernorm(t, h, model_param(ctx, "norm.weight", DEEP_LAYERS, 1, D, TT_INIT_ONES),
                     model_param(ctx, "norm.bias", DEEP_LAYERS, 1, D, TT_INIT_ZEROS), 1e-5f);
    tt_output(t, h);
    o.precision = precision;
    o.residual = residual;
    o.accumulate = true;
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, h, target, tt__handle(t, 0)), &o);
    for (int k = 0; k < DEEP_ROWS * D; k++) {
        x[k] = (float)test_random(&s) * 0x1p-31f - 1;
        y[k] = (float)test_random(&s) * 0x1p-31f - 1;
    }
    CHECK(p && tt_set(p, in, x, DEEP_ROWS) == TT_OK && tt_set(p, target, y, DEEP_ROWS) == TT_OK &&
          tt_micro_step(p, NULL) == TT_OK);
    CHECK(tt_get(p, h, result, DEEP_ROWS * DEEP_WIDTH) == TT_OK &&
          tt_get_gradient(p, first, gradient_of) == TT_OK);
    tt_program_free(p);
    tt_tape_free(t);
    tt_close(ctx);
}

static double relative_error(const float *x, const float *reference, int n)
{
    double error = 0, size = 0;
    for (int k = 0; k < n; k++) {
        error += (x[k] - reference[k]) * (x[k] - reference[k]);
        size += reference[k] * reference[k];
    }
    return sqrt(error / size);
}

/* Additions do not round a residual stream in f32, so results and gradients are nearer to 32-true than with a
   16-bit stream. */
TEST(residual_stream_in_f32)
{
    enum { N = DEEP_ROWS * DEEP_WIDTH, M = DEEP_WIDTH * DEEP_WIDTH };
    static const char *const names[] = {"bf16-mixed", "16-mixed"};
    static float exact[N], exact_gradient[M], got[N], got_gradient[M];
    deep_stack("32-true", NULL, exact, exact_gradient);
    for (int k = 0; k < 2; k++) {
        double error[3], gradient_error[3];
        for (int r = 0; r < 3; r++) {
            deep_stack(names[k], r == 0 ? "16-bit" : r == 1 ? "f32" : NULL, got, got_gradient);
            error[r] = relative_error(got, exact, N);
            gradient_error[r] = relative_error(got_gradient, exact_gradient, M);
        }
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  %s, 24 layers: results differ by %.2e (16-bit), %.2e (f32); gradients by %.2e, %.2e\n",
                   names[k], error[0], error[1], gradient_error[0], gradient_error[1]);
        CHECK(error[1] > 0 && error[1] < 0.5 * error[0] && gradient_error[1] < 0.5 * gradient_error[0]);
        /* By default the residual stream is 16-bit with bf16, and f32 with f16. */
        CHECK(error[2] == error[k] && gradient_error[2] == gradient_error[k]);
    }
}

/* ------------------------------------------------------------------------------------------- accumulation */

static batch part_of(const batch *b, int from, int n)
{
    batch part;
    memset(&part, 0, sizeof part);
    part.seqs = n;
    part.rows = b->start[from + n] - b->start[from];
    memcpy(part.ids, b->ids + b->start[from], sizeof *b->ids * (size_t)part.rows);
    memcpy(part.labels, b->labels + from, sizeof *b->labels * (size_t)n);
    for (int s = 0; s <= n; s++) part.start[s] = b->start[from + s] - b->start[from];
    return part;
}

/* Makes two steps. Each has micro-batches of parts[0], parts[1] ... sequences (16 in all, then a 0), or is a
   tt_step if `parts` is NULL. Returns the parameters; *gradient gets the gradient of the first step. */
static float *accumulated(const int *parts, int ignored, tt_optimizer_kind kind, float **gradient,
                          size_t *size, tt_stats *stats)
{
    model m;
    tt_compile_options o = tt_compile_options_default();
    batch all = make_batch(MODEL_SEQS, 30, 3);
    o.accumulate = parts != NULL;
    o.optimizer.kind = kind;
    o.optimizer.clip_norm = 0.1f;
    o.optimizer.eps = 1e-3f; /* a smaller eps would turn rounding of a gradient near 0 into a step */
    for (int s = 0; s < MODEL_SEQS; s++)
        if ((ignored & 1 && s < 4) || (ignored & 2 && s % 3 == 0)) all.labels[s] = -100;
    model_open(&m, 2, 0);
    tt_program *p = tt_compile(m.t, m.loss, &o);
    CHECK(p != NULL);
    for (int step = 0; step < 2 && p; step++) {
        for (int k = 0, from = 0; parts && parts[k]; from += parts[k++]) {
            batch part = part_of(&all, from, parts[k]);
            CHECK(model_set(&m, p, &part) && tt_micro_step(p, stats) == TT_OK);
        }
        if (parts && step == 0) {
            *size = 0;
            for (int k = 0; k < m.ctx->n_params; k++) *size += (size_t)tt_param_size(m.ctx->params[k]);
            *gradient = (float *)malloc(sizeof(float) * *size);
            for (int k = 0, at = 0; k < m.ctx->n_params; at += (int)tt_param_size(m.ctx->params[k++]))
                CHECK(tt_get_gradient(p, m.ctx->params[k], *gradient + at) == TT_OK);
        }
        if (parts) CHECK(tt_update(p, 0.05f, stats) == TT_OK);
        else CHECK(model_set(&m, p, &all) && tt_step(p, 0.05f, stats) == TT_OK);
    }
    float *params = all_params(m.ctx, size);
    tt_program_free(p);
    model_close(&m);
    return params;
}

static double largest(const float *x, size_t n)
{
    double max = 0;
    for (size_t k = 0; k < n; k++) if (fabs(x[k]) > max) max = fabs(x[k]);
    return max;
}

static double distance(const float *a, const float *b, size_t n)
{
    double max = 0;
    for (size_t k = 0; k < n; k++)
        if (!(fabs(a[k] - b[k]) <= max) && !isnan(max)) max = fabs(a[k] - b[k]);
    return max;
}

/* A batch of 16 sequences gives the results of micro-batches of any sizes, with any number of targets in each
   of them, up to the rounding of sums: 1e-6. */
TEST(micro_batches_equal_a_batch)
{
    static const int whole[] = {16, 0}, fours[] = {4, 4, 4, 4, 0}, uneven[] = {1, 7, 3, 5, 0};
    for (int ignored = 0; ignored < 4; ignored++)
        for (int kind = 0; kind < 2; kind++) {
            float *g1 = NULL, *g2 = NULL, *g3 = NULL;
            size_t n;
            tt_stats s0, s1, s2, s3;
            tt_optimizer_kind optimizer = kind ? TT_ADAMW : TT_SGD;
            float *p0 = accumulated(NULL, ignored, optimizer, &g1, &n, &s0);
            float *p1 = accumulated(whole, ignored, optimizer, &g1, &n, &s1);
            float *p2 = accumulated(fours, ignored, optimizer, &g2, &n, &s2);
            float *p3 = accumulated(uneven, ignored, optimizer, &g3, &n, &s3);
            double scale_g = largest(g1, n), scale_p = largest(p1, n);
            CHECK(distance(g1, g2, n) <= 1e-6 * scale_g);
            CHECK(distance(g1, g3, n) <= 1e-6 * scale_g);
            CHECK(distance(p0, p1, n) <= 1e-6 * scale_p);
            CHECK(distance(p1, p2, n) <= 1e-6 * scale_p);
            CHECK(distance(p1, p3, n) <= 1e-6 * scale_p);
            CHECK(s1.targets == s0.targets && s1.targets == s2.targets && s1.targets == s3.targets &&
                  s1.targets == (ignored == 0 ? 16
                                 : ignored == 1 ? 12
                                 : ignored == 2 ? 10
                                 : 8));
#ifndef TINYTRAIN_CBLAS /* the tolerance is about two units in the last place of a loss of 4 */
            CHECK_NEAR(s1.loss, s0.loss, 1e-6);
            CHECK_NEAR(s1.loss, s2.loss, 1e-6);
            CHECK_NEAR(s1.loss, s3.loss, 1e-6);
#endif
            CHECK_NEAR(s1.grad_norm, s2.grad_norm, 1e-5 * s1.grad_norm);
            CHECK_NEAR(s1.grad_norm, s0.grad_norm, 1e-5 * s1.grad_norm);
            CHECK(s1.correct == s2.correct && s1.correct == s3.correct && s1.correct == s0.correct &&
                  s1.step == 2);
            free(p0); free(p1); free(p2); free(p3); free(g1); free(g2); free(g3);
        }
#ifdef TINYTRAIN_CBLAS
    SKIP("the same but for the losses, which are not compared: a CBLAS rounds in its own ways");
#endif
}

#ifdef TINYTRAIN_CUDA
/* Parameters that no file fills are initialised on the device, in their dtype, without a copy. The emulator
   gives the CPU's bits; a GPU's numbers differ by the errors of its logarithm and sine. */
TEST(parameters_begin_on_the_device)
{
    enum { LARGE = 33 * 1031 };
    static const char *const precision[] = {"32-true", "bf16-true", "16-true"};
    /* tolerance relative to the number: one or two units in the last place */
    static const double near[] = {0x1p-22, 0x1p-7, 0x1p-10};
    float *expected = (float *)malloc(sizeof(float) * LARGE), *got = (float *)malloc(sizeof(float) * LARGE);
    setenv("TINYTRAIN_WGMMA", "0", 1); /* a new device would test wgmma by a launch, which this test must
                                          not count */
    for (int how = 0; how < TT__COUNT(precision); how++)
        for (int kind = 0; kind <= TT_INIT_UNIFORM; kind++)
            for (int large = 0; large < 2; large++) {
                test_allocator a;
                tt_context_options co = test_options(&a);
#ifdef TT_EMULATE
                emu_configure(1, (size_t)64 << 20, 1, (uint64_t)kind);
#endif
                co.seed = 3;
                tt_context *ctx = tt_open(&co);
                tt_tape *t = tt_tape_new(ctx);
                int64_t dims[2] = {large ? 33 : 1, large ? 1031 : 7}, n = dims[0] * dims[1];
                tt_init init = {(tt_init_kind)kind, 0.3f};
                tt_dtype dtype = how == 0 ? TT_F32 : how == 1 ? TT_BF16 : TT_F16;
                tt_param *w = tt_param_new(ctx, "w", 2, dims, init);
                tt_value out = tt_linear(t, tt_input(t, "x", TT_F32, 1, dims[1]), w, NULL);
                tt_compile_options o = tt_compile_options_default();
                int wrong = 0;
                o.device = "cuda";
                o.train = false;
                o.precision = precision[how];
                CHECK(tt_param_get(w, expected) == TT_OK); /* numbers by the initialiser on the CPU */
                tt_program *p = tt_compile(t, out, &o);
                if (CHECK(p != NULL)) {
#ifdef TT_EMULATE
                    emu_reset_counts();
#endif
                    CHECK(tt_allocate(p) == TT_OK && tt__param_placement(w)->dtype == dtype);
#ifdef TT_EMULATE
                    CHECK(emu_get_counts().copies == 0 && emu_get_counts().launches == 1);
#endif
                    CHECK(tt_param_get(w, got) == TT_OK);
                    for (int64_t k = 0; k < n; k++) {
                        uint16_t h[2];
                        if (dtype != TT_F32) {
                            tt__convert(h, dtype, &expected[k], TT_F32, 1);
                            tt__convert(&expected[k], TT_F32, h, dtype, 1);
                        }
#ifdef TT_EMULATE
                        wrong += memcmp(&got[k], &expected[k], sizeof(float)) != 0;
#endif
                        wrong += !(fabs((double)got[k] - expected[k]) <=
                                   near[how] * fabs((double)expected[k]));
                    }
                    CHECK(wrong == 0);
                    /* The memory ends right after the last element, so that the emulator reports a write
                       beyond the memory. */
                    const tt__backend *b = w->owner->kind->backend;
                    tt__device *d = w->owner->group->device[0];
                    void *exact = b->allocate(d, (size_t)n * tt_dtype_bytes(dtype));
                    CHECK(exact && b->init(d, exact, dtype, 0, n, init, 1) == TT_OK && b->wait(d) == TT_OK);
                    b->release(d, exact);
                }
                tt_program_free(p);
                tt_tape_free(t);
                TEST_CLOSE(ctx, &a);
            }
    unsetenv("TINYTRAIN_WGMMA");
    free(expected);
    free(got);
}
#else
TEST(parameters_begin_on_the_device) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif
