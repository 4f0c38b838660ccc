/* Tests of training in fp8. */
#pragma once

#ifdef TT_EMULATE
/* A program in fp8 is refused only if the device of the program is too old. For an absent device the program
   is planned. */
TEST(fp8_asks_its_own_device)
{
    static const struct { int devices, old; const char *device; bool refused; } cases[] = {
        {2, 0, "cuda:0", true}, {2, 0, "cuda:1", false}, {2, 1, "cuda:0", false}, {2, 1, "cuda:1", true},
        {2, 0, "cuda:2", false}, {0, -1, "cuda:0", false}, {0, -1, "cuda:1", false}};
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        test_allocator a;
        const int64_t dims[2] = {16, 16};
        const tt_init init = {TT_INIT_NORMAL, 1};
        char expected[64];
        emu_configure(cases[k].devices, (size_t)64 << 20, 1, 1);
        if (cases[k].old >= 0) emu_set_capability(cases[k].old, 8, 0);
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_value x = tt_input(t, "x", TT_F32, 16, 16);
        tt_compile_options o = tt_compile_options_default();
        o.device = cases[k].device;
        o.precision = "bf16-mixed";
        o.matmul = "fp8";
        o.train = false;
        tt_param *w = tt_param_new(ctx, "w", 2, dims, init);
        tt_value h = tt_gelu(t, tt_linear(t, x, w, NULL));
        tt_program *p = tt_compile(t, tt_scale(t, tt_linear(t, h, w, NULL), 2), &o);
        CHECK((p == NULL) == cases[k].refused);
        snprintf(expected, sizeof expected, "device '%s' cannot run linear, ",
                 k < 2 ? "cuda" : cases[k].device);
        if (!p) {
            CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, expected);
            CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED,
                        ": matmul 'fp8' needs a GPU of compute capability 8.9 or more");
        }
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}
#endif

/* ---- fp8: a net of two blocks, whose Q, K and V read one value, trained in steps of four micro-batches */

enum { FP8_WIDTH = 32, FP8_HIDDEN = 64, FP8_ROWS = 40, FP8_STEPS = 6, FP8_MICROS = 4, FP8_SIZE = 2 * (4 *
       FP8_WIDTH * FP8_WIDTH + 2 * FP8_WIDTH * FP8_HIDDEN + FP8_HIDDEN + 2 * FP8_WIDTH) };
typedef struct fp8_run {
    const char *device, *matmul, *recompute, *offload;
    int zero, pipeline, saved; /* saved: number of steps after which another process continues the run; 0:
                                  none */
    /* Results */
    double loss[FP8_STEPS];
    float w[FP8_SIZE];
    int quantized, fp8, plain; /* per micro-batch: quantized: QUANTIZE instructions; fp8: products in fp8;
                                  plain: other products */
    int64_t skipped;
} fp8_run;

static bool fp8_overflows; /* programs use 16-mixed, with a loss scale that is too large at first */

static tt_param *fp8_param(tt_context *ctx, int block, const char *name, int rows, int cols,
                           tt_init_kind kind)
{
    const tt_init init = {kind, 0.2f};
    const int64_t dims[] = {rows, cols};
    char full[64];
    snprintf(full, sizeof full, "block.%d.%s", block, name);
    return tt_param_new(ctx, full, rows > 1 ? 2 : 1, rows > 1 ? dims : dims + 1, init);
}

/* Returns the device names to use. On a GPU, ranks with separate devices become ranks that share the GPU. */
static const char *ranks_here(const char *device)
{
#ifndef TT_EMULATE
    if (strcmp(device, "cuda*2") == 0) return "cuda:0,0";
    if (strcmp(device, "cuda*4") == 0) return "cuda:0,0,0,0";
#endif
    return device;
}

/* Runs steps [from, to). Loads the state file first if from > 0, and writes the file if to < FP8_STEPS. */
static bool fp8_train(fp8_run *run, int from, int to)
{
    static const char path[] = "fp8_state.safetensors";
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options o = tt_compile_options_default();
    const int D = FP8_WIDTH;
    const int64_t rows = tt_axis(t, "rows", FP8_ROWS);
    const tt_value x = tt_input(t, "x", TT_F32, rows, D), target = tt_input(t, "target", TT_F32, rows, D);
    tt_value h = tt_linear(t, x, fp8_param(ctx, 0, "in", D, D, TT_INIT_NORMAL), NULL);
    /* The backward reads the gradient of h in fp8, adds to the gradient, and reads the sum in fp8, too. */
    h = tt_add(t, tt_linear(t, h, fp8_param(ctx, 0, "mix", D, D, TT_INIT_NORMAL), NULL), h);
    for (int b = 0; b < 2; b++) {
        const tt_value n = tt_layernorm(t, h, fp8_param(ctx, b, "norm", 1, D, TT_INIT_ONES),
                                        fp8_param(ctx, b, "norm_bias", 1, D, TT_INIT_ZEROS), 1e-5f);
        const tt_value q = tt_linear(t, n, fp8_param(ctx, b, "q", D, D, TT_INIT_NORMAL), NULL);
        const tt_value k = tt_linear(t, n, fp8_param(ctx, b, "k", D, D, TT_INIT_NORMAL), NULL);
        const tt_value v = tt_linear(t, n, fp8_param(ctx, b, "v", D, D, TT_INIT_NORMAL), NULL);
        const tt_value all = tt_add(t, tt_mul(t, q, k), v);
        const tt_value up = tt_gelu(t, tt_linear(t, all, fp8_param(ctx, b, "up", FP8_HIDDEN, D,
                                                                   TT_INIT_NORMAL),
                                                 fp8_param(ctx, b, "up_bias", 1, FP8_HIDDEN,
                                                           TT_INIT_ZEROS)));
        h = tt_add(t, h, tt_linear(t, up, fp8_param(ctx, b, "down", D, FP8_HIDDEN, TT_INIT_NORMAL), NULL));
        tt_block_end(t, h);
    }
    const tt_value loss = tt_mean_squared_error(t, h, target, tt__handle(t, 0));
    o.device = ranks_here(run->device);
    o.precision = fp8_overflows ? "16-mixed" : "bf16-mixed";
    o.loss_scale.init = 0x1p21f;
    o.matmul = run->matmul ? run->matmul : "fp8";
    o.recompute = run->recompute;
    o.offload = run->offload;
    o.accumulate = true;
    o.optimizer.clip_norm = 1;
    o.parallel.groups = 2;
    o.parallel.zero = run->zero;
    o.parallel.reduce_micros = run->pipeline == 0;
    o.parallel.pipeline = run->pipeline;
    tt_program *p = tt_compile(t, loss, &o);
    tt_status status = p ? TT_OK : tt_error_code(ctx);
    if (p && from) status = tt_program_load(p, path);
    for (int m = from * FP8_MICROS; m < to * FP8_MICROS && status == TT_OK; m++) {
        const int data = p->arena->data, n = 1 + m * 7 % FP8_ROWS;
        float xs[FP8_ROWS * FP8_WIDTH], ys[FP8_ROWS * FP8_WIDTH];
        for (int e = 0; e < n * D; e++) xs[e] = (float)((e * 37 + m * 11) % 101) / 50 - 1;
        for (int e = 0; e < n * D; e++) ys[e] = xs[e / D * D + (e + 1) % D] * (m % 2 ? 4.0f : 1);
        tt_stats stats;
        status = tt_set_rank(p, m % data, x, xs, n);
        if (status == TT_OK) status = tt_set_rank(p, m % data, target, ys, n);
        if (status == TT_OK && m % data == data - 1) status = tt_micro_step(p, NULL);
        if (m % FP8_MICROS != FP8_MICROS - 1) continue;
        if (status == TT_OK) status = tt_update(p, 0.01f, &stats);
        run->loss[m / FP8_MICROS] = status == TT_OK ? stats.loss : 0;
        run->skipped = status == TT_OK ? stats.skipped : -1;
    }
    if (status == TT_OK && to < FP8_STEPS) status = tt_program_save(p, path);
    run->quantized = run->fp8 = run->plain = 0;
    for (int k = 0; p && k < p->built.t->n_code; k++) {
        const tt__instr *i = &p->built.t->code[k];
        run->quantized += i->op == TT__OP_QUANTIZE;
        if (tt__is(i, TT__PRODUCT)) *(tt__reads_fp8(p->built.t, i) ? &run->fp8 : &run->plain) += 1;
    }
    float *w = run->w;
    for (int k = 0; k < ctx->n_params && status == TT_OK; k++) {
        status = tt_param_get(ctx->params[k], w);
        w += tt_param_size(ctx->params[k]);
    }
    CHECK(status != TT_OK || w == run->w + FP8_SIZE);
    const bool ok = test__check(status == TT_OK, "test_cuda.c", __LINE__, tt_error(ctx));
    tt_program_free(p);
    tt_tape_free(t);
    if (to == FP8_STEPS && run->saved) remove(path);
    TEST_CLOSE(ctx, &a);
    return ok;
}

/* An operand is rounded once for all products that read it, also in the backward. Training converges as in
   bf16. Recompute, offload, several ranks and a restart keep all bits, because they keep the scales. */
TEST(training_in_fp8_keeps_its_bits)
{
    static fp8_run exact = {"cuda", "fp32", NULL, NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0};
    static fp8_run first = {"cuda", NULL, NULL, NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0};
    /* `staged` has one stage. The run `staged` is the reference for pipelines, because a pipeline sums
       micro-batches in another order than a program without a pipeline. */
    static fp8_run staged = {"cuda", NULL, NULL, NULL, 0, 1, 0, {0}, {0}, 0, 0, 0, 0};
    static const fp8_run others[] = {
        {"cuda", NULL, "blocks", NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda", NULL, "cheap", NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda", NULL, "none", NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda", NULL, NULL, "activations", 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda", NULL, NULL, "optimizer,gradients,parameters", 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda*2", NULL, NULL, NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda*2", NULL, "blocks", NULL, 1, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda*2", NULL, NULL, NULL, 3, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda", NULL, NULL, NULL, 0, 0, 1, {0}, {0}, 0, 0, 0, 0},
        {"cuda*2", NULL, "blocks", NULL, 3, 0, 4, {0}, {0}, 0, 0, 0, 0},
        {"cuda*2", NULL, NULL, NULL, 0, 2, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda*4", NULL, "blocks", NULL, 0, 2, 3, {0}, {0}, 0, 0, 0, 0}};
    for (int k = 0; k < 3; k++) {
        start(1, (size_t)64 << 20, 5);
        REQUIRE(fp8_train(k == 0 ? &exact : k == 1 ? &first : &staged, 0, FP8_STEPS));
    }
    CHECK(exact.quantized == 0 && exact.fp8 == 0);
    /* Each of two blocks has 15 products, for which 20 operands are rounded. In the forward: 5 weights and 3
       other operands, because Q, K and V share one operand. In the backward: 7 of these operands again,
       because one is still kept in fp8; and 5 gradients, each once for two products. The two linear layers
       before the blocks, "in" and "mix", round 7 operands. Among the 7 is the gradient that both layers read:
       it is rounded twice, because mix's part is added to it before "in" reads it. */
    CHECK(first.plain == 0 && first.fp8 == exact.plain && first.quantized == 2 * 20 + 7);
    /* A number of E4M3 has a relative error of up to 2^-4, a product of two up to 13%. A loss, computed from
       a sum of many products, has a smaller error, and the mean over the steps is within 2^-4. With 12 seeds
       on the emulator, where small changes of a start lead to other roundings, the worst step was 10.7% off
       and the worst mean 4.6%. */
    double mean = 0;
    for (int k = 0; k < FP8_STEPS; k++) {
        const double ratio = first.loss[k] / exact.loss[k];
        CHECK_NEAR(ratio, 1, (1 + 0x1p-4) * (1 + 0x1p-4) - 1);
        CHECK(first.loss[k] != exact.loss[k]);
        mean += ratio / FP8_STEPS;
    }
    CHECK_NEAR(mean, 1, 0x1p-4);
    CHECK(first.loss[FP8_STEPS - 1] < 0.2 * first.loss[0]);
    for (int k = 0; k < TEST_COUNT(others); k++) {
        static fp8_run run;
        run = others[k];
        const fp8_run *like = run.pipeline ? &staged : &first;
        start(4, (size_t)64 << 20, (uint64_t)(6 + k));
        char what[256];
        snprintf(what, sizeof what, "bits of %s, recompute %s, offload %s, zero %d, %d stages, saved after "
                 "step %d", run.device, run.recompute ? run.recompute : "default",
                 run.offload ? run.offload : "none", run.zero, run.pipeline, run.saved);
        bool ok = !run.saved || fp8_train(&run, 0, run.saved);
        if (run.saved) start(4, (size_t)64 << 20, (uint64_t)(60 + k));
        ok = ok && fp8_train(&run, run.saved, FP8_STEPS);
        const bool same = memcmp(run.loss, like->loss, sizeof run.loss) == 0;
        test__check(ok && same && memcmp(run.w, like->w, sizeof run.w) == 0, __FILE__, __LINE__, what);
    }
}

/* A number that overflows f16 becomes NaN in fp8, so that loss scaling skips the step. The history leaves the
   NaN out, and later steps train. */
TEST(overflows_in_fp8_are_skipped)
{
    static fp8_run run[2] = {{"cuda", NULL, "none", NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
                             {"cuda", NULL, "blocks", NULL, 0, 0, 2, {0}, {0}, 0, 0, 0, 0}};
    fp8_overflows = true;
    for (int k = 0; k < 2; k++) {
        bool ok = true;
        for (int part = run[k].saved ? 0 : 1; part < 2 && ok; part++) {
            start(1, (size_t)64 << 20, (uint64_t)(k + 3));
            ok = fp8_train(&run[k], part ? run[k].saved : 0, part ? FP8_STEPS : run[k].saved);
        }
        CHECK(ok && run[k].skipped > 0 && run[k].skipped < FP8_STEPS - 1);
        CHECK(run[k].loss[FP8_STEPS - 1] < 0.8 * run[k].loss[0]);
        for (int e = 0; e < FP8_SIZE; e++) if (!isfinite(run[k].w[e])) CHECK(isfinite(run[k].w[e]));
    }
    CHECK(memcmp(run[0].loss, run[1].loss, sizeof run[0].loss) == 0);
    CHECK(memcmp(run[0].w, run[1].w, sizeof run[0].w) == 0);
    fp8_overflows = false;
}

#ifndef TT_EMULATE
TEST(fp8_asks_its_own_device) { NEEDS_EMULATOR; }
#endif
