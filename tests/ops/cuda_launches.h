/* Tests that compare single launches on CUDA with the CPU's, for each dtype. */
#pragma once

#ifdef TINYTRAIN_CUDA
/* ------------------------------------------------------------- one instruction on the CPU and on a GPU */

/* Returns a matrix of random numbers between `from` and `to`; the caller frees it. */
static tt__mat some(tt_dtype dtype, int64_t rows, int64_t cols, float from, float to, uint64_t *random)
{
    tt__mat m = {calloc((size_t)(rows * cols), tt_dtype_bytes(dtype)), dtype, rows, cols, cols};
    for (int64_t k = 0; k < rows * cols; k++) {
        float x = from + (to - from) * 0.5f * ((float)test_random(random) * 0x1p-31f);
        tt__convert((char *)m.data + (size_t)k * tt_dtype_bytes(dtype), dtype, &x, TT_F32, 1);
    }
    return m;
}

static tt__mat some_indices(const int32_t *index, int n)
{
    tt__mat m = {malloc(sizeof *index * (size_t)n), TT_I32, n, 1, 1};
    memcpy(m.data, index, sizeof *index * (size_t)n);
    return m;
}

static void free_operands(tt__launch *l)
{
    for (int k = 0; k < TT__RUN_IN; k++) free(l->in[k].data);
    for (int k = 0; k < TT__MAX_OUT; k++) free(l->out[k].data);
    memset(l->in, 0, sizeof *l->in * TT__RUN_IN);
    memset(l->out, 0, sizeof l->out);
}

static bool run_on_cpu(tt__launch *l)
{
    const tt_status status = (l->workspace = calloc(1, (size_t)16 << 20)) ? tt__cpu_launch(l, 1)
                                                                          : TT_ERR_MEMORY;
    free(l->workspace);
    l->workspace = NULL;
    return status == TT_OK;
}

/* Checks that the CPU's and CUDA's results differ by at most `units` units in the last place of each result's
   largest number. Does not compare codes of 8 bits. Frees the operands. */
static void same_on_both(tt__launch *l, double units, const char *what)
{
    tt__launch cpu = *l;
    snprintf(where, sizeof where, "%s, %s", what,
             tt_dtype_name(l->in[0].dtype == TT_I32 ? l->in[1].dtype : l->in[0].dtype));
    for (int k = 0; k < TT__MAX_OUT; k++) {
        const size_t bytes = (size_t)(l->out[k].rows * l->out[k].cols) * tt_dtype_bytes(l->out[k].dtype);
        if (l->out[k].data) cpu.out[k].data = memcpy(malloc(bytes), l->out[k].data, bytes);
    }
    const bool ok = report(run_on_cpu(&cpu), "the CPU fails") && run_on_cuda(l, (size_t)1 << 18);
    for (int k = 0; k < TT__MAX_OUT && ok; k++) {
        const tt__mat *m = &l->out[k];
        const int64_t n = m->data && m->dtype != TT_U8 ? m->rows * m->cols : 0;
        const double unit = m->dtype == TT_F32 ? 0x1p-23 : m->dtype == TT_F16 ? 0x1p-10 : 0x1p-7;
        float *got = (float *)malloc(sizeof *got * (size_t)(2 * n + 1)), *expected = got + n;
        double max = 0;
        int64_t wrong = 0;
        if (n) tt__convert(got, TT_F32, m->data, m->dtype, (size_t)n);
        if (n) tt__convert(expected, TT_F32, cpu.out[k].data, m->dtype, (size_t)n);
        for (int64_t e = 0; e < n; e++) if (fabs(expected[e]) > max) max = fabs(expected[e]);
        for (int64_t e = 0; e < n; e++) wrong += !(fabs((double)got[e] - expected[e]) <= units * unit * max);
        report(wrong == 0 && (max > 0 || n == 0), "%lld of %lld numbers of result %d differ",
               (long long)wrong, (long long)n, k);
        free(got);
    }
    for (int k = 0; k < TT__MAX_OUT; k++) if (l->out[k].data) free(cpu.out[k].data);
    free_operands(l);
}

/* Compares attention of two sequences with one head of `size` columns, and its backward. The number of rows
   chooses the kernels of the backward. near: with a window and a bias, for which there are separate kernels.
   far: scores are far below 0, and numbers need only be finite. */
static void attention_on_both(tt__launch *l, tt_dtype dtype, int size, const int32_t *starts,
                              bool near, bool far, uint64_t *s)
{
    const int rows = starts[2];
    const float at = far ? 8 : 0; /* scores around -400: exp(score) is 0, and exp(-score) is infinite */
    const double units = far ? INFINITY : dtype == TT_F16 ? 8 : 4;
    tt__instr i = tt__new_instr(TT__OP_ATTENTION);
    tt__mat kept = some_indices(starts, 3);
    i.attr.heads = i.attr.key_heads = 1;
    i.attr.scale = 0.1f;
    i.attr.causal = dtype == TT_F16;
    i.attr.dropout = near ? 0 : 0.2f;
    if (near) {
        i.attr.window = 3;
        i.attr.alibi = 0.5f;
        i.attr.alibi_heads = 1;
    }
    l->instr = &i;
    l->in[3] = kept;
    for (int k = 0; k < 3; k++) {
        const float middle = k == 0 ? -at : k == 1 ? at : 0;
        l->in[k] = some(dtype, rows, size, middle - 1, middle + 1, s);
    }
    l->out[0] = some(dtype, rows, size, 0, 0, s);
    l->out[1] = some(TT_F32, rows, 1, 0, 0, s);
    report(run_on_cpu(l), "attention on the CPU");
    const tt__launch forward = *l; /* the backward below reads the forward's operands and results */
    memset(l->out, 0, sizeof l->out);
    for (int k = 0; k < 4; k++)
        l->in[k] = k == 3 ? some_indices(starts, 3) : some(dtype, rows, size, -1, 1, s);
    for (int k = 0; k < 3; k++)
        memcpy(l->in[k].data, forward.in[k].data, (size_t)(rows * size) * 2);
    l->out[0] = some(dtype, rows, size, 0, 0, s);
    l->out[1] = some(TT_F32, rows, 1, 0, 0, s);
    same_on_both(l, units, "attention");
    i.op = TT__OP_ATTENTION_BACKWARD;
    l->in[0] = some(dtype, rows, size, -1, 1, s);
    for (int k = 0; k < 4; k++) l->in[1 + k] = forward.in[k];
    for (int k = 0; k < 2; k++) l->in[5 + k] = forward.out[k];
    for (int k = 0; k < 3; k++) l->out[k] = some(dtype, rows, size, 0, 0, s);
    same_on_both(l, 2 * units, "attention_backward");
}

/* Prepares a launch for run_on_cpu and run_on_cuda, with the settings `run`, which have a seed. Returns a
   context whose CPU runs the launch. */
static tt_context *open_for_launches(test_allocator *a, tt__step_settings *run, tt__launch *l)
{
    tt_context_options co = test_options(a);
#ifdef TT_EMULATE
    emu_configure(1, (size_t)96 << 20, 1, 1);
#endif
    tt_context *ctx = tt_open(&co);
    const tt__mat of_run = {run, TT_U8, 1, sizeof *run, sizeof *run};
    memset(run, 0, sizeof *run);
    memset(l, 0, sizeof *l);
    run->seed = 5;
    l->device = (tt__device *)(void *)&ctx->cpu;
    l->in[TT__RUN_IN] = of_run;
    return ctx;
}

/* Runs the kernels whose threads take several rows one after another and load the next rows meanwhile: GELU's
   derivative with column sums, and the gradients of tables. */
TEST(cuda_rows_in_flight)
{
    static const tt_dtype dtype[] = {TT_F32, TT_BF16, TT_F16};
    static const int sizes[][2] = {{611, 264}, {333, 1032}, {173, 3000}, {517, 33}};
    test_allocator a;
    uint64_t s = 1;
    tt__instr i;
    tt__step_settings run;
    tt__launch l;
    tt_context *ctx = open_for_launches(&a, &run, &l);
    l.instr = &i;
    for (int k = 0; k < TT__COUNT(sizes) * TT__COUNT(dtype) * 2; k++) {
        const int *size = sizes[k / 2 / TT__COUNT(dtype)];
        const tt_dtype x = dtype[k / 2 % TT__COUNT(dtype)];
        int32_t ids[611];
        i = tt__new_instr(TT__OP_ACTIVATION_BACKWARD);
        i.attr.act = TT__ACT_GELU;
        for (int j = 0; j < 2; j++) l.in[j] = some(x, size[0], size[1], -1, 1, &s);
        for (int j = 0; j < 2; j++) l.out[j] = some(x, j ? 1 : size[0], size[1], -1, 1, &s);
        l.add[0] = l.add[1] = k % 2;
        same_on_both(&l, 8, "the slope of GELU with column sums");
        l.add[1] = false;
        for (int j = 0; j < size[0]; j++) ids[j] = (int32_t)(test_random(&s) % 70);
        i = tt__new_instr(TT__OP_EMBEDDING_BACKWARD);
        i.workspace = (size_t)1 << 18;
        l.in[0] = some_indices(ids, size[0]);
        l.in[1] = some(x, size[0], size[1], -1, 1, &s);
        l.out[0] = some(TT_F32, 70, size[1], -1, 1, &s);
        same_on_both(&l, 16, "the gradient of a table");
        l.add[0] = false;
    }
    TEST_CLOSE(ctx, &a);
}

/* Runs each kernel that is compiled for a certain dtype or size. Tests of whole programs run only some of
   these kernels, by chance. */
TEST(cuda_kernels_of_each_dtype)
{
    enum { ROWS_ = 5, MORE_ROWS = 37, D = 40 };
    static const tt_dtype dtype[] = {TT_F32, TT_BF16, TT_F16};
    static const tt_dtype pair[][2] = {
        {TT_F32, TT_F32}, {TT_BF16, TT_BF16}, {TT_F16, TT_F16}, {TT_F32, TT_BF16}, {TT_F32, TT_F16}};
    static const tt_dtype norm[][2] = {
        {TT_F32, TT_F32}, {TT_BF16, TT_F32}, {TT_BF16, TT_BF16}, {TT_F16, TT_F32}};
    static const int width[] = {200, 512, 768, 1000, 1504, 3000, 5000}, head[] = {24, 64, 80, 96, 128};
#define NUMBER_OF(OP, kind, formula) TT__OP_##OP,
    static const int of_two[] = {TT__PAIRS(NUMBER_OF, ) TT__OP_DROPOUT};
#undef NUMBER_OF
    static const int32_t index[ROWS_] = {2, 0, 4, 2, 1};
    static const int32_t sequences[][3] = {{0, 67, 80}, {0, 141, 190}, {0, 80, 280}};
    test_allocator a;
    uint64_t s = 1;
    tt__instr i;
    tt__step_settings run;
    tt__launch l;
    tt_context *ctx = open_for_launches(&a, &run, &l);
    run.lr = 0.1f;
    l.instr = &i;
    for (int t = 0; t < TT__COUNT(dtype); t++) {
        for (int act = TT__ACT_NONE + 1; act < TT__ACT_COUNT; act++) {
            i = tt__new_instr(TT__OP_ACTIVATION);
            i.attr.act = act;
            l.in[0] = some(dtype[t], ROWS_, D, -3, 3, &s);
            l.out[0] = some(dtype[t], ROWS_, D, 0, 0, &s);
            same_on_both(&l, 8, "activation");
            i.op = TT__OP_ACTIVATION_BACKWARD;
            for (int sums = 0; sums < 2; sums++) {
                const int rows = sums ? MORE_ROWS : ROWS_;
                l.in[0] = some(dtype[t], rows, D, -3, 3, &s);
                l.in[1] = some(dtype[t], rows, D, -3, 3, &s);
                l.out[0] = some(dtype[t], rows, D, 0, 0, &s);
                if (sums) l.out[1] = some(dtype[t], 1, D, 0, 0, &s);
                same_on_both(&l, 8, "activation_backward");
            }
        }
        for (int op = 0; op < TT__COUNT(of_two); op++)
            for (int sums = 0; sums <= (of_two[op] == TT__OP_DROPOUT); sums++) {
                const int rows = sums ? MORE_ROWS : ROWS_;
                i = tt__new_instr(of_two[op]);
                i.attr.dropout = 0.3f;
                l.in[0] = some(dtype[t], rows, D, -3, 3, &s);
                l.in[1] = some(dtype[t], rows, D, -3, 3, &s);
                l.out[0] = some(dtype[t], rows, D, 0, 0, &s);
                if (sums) l.out[1] = some(dtype[t], 1, D, 0, 0, &s);
                same_on_both(&l, sums || i.op == TT__OP_SWIGLU ? 8 : 1, tt__ops[i.op].name);
            }
    }
    for (int t = 0; t < TT__COUNT(pair); t++) {
        i = tt__new_instr(TT__OP_SCALE);
        i.attr.scale = 0.37f;
        l.in[0] = some(pair[t][0], ROWS_, D, -3, 3, &s);
        l.out[0] = some(pair[t][1], ROWS_, D, 0, 0, &s);
        same_on_both(&l, 1, "scale");
        i = tt__new_instr(TT__OP_EMBEDDING);
        l.in[0] = some_indices(index, ROWS_);
        l.in[1] = some(pair[t][0], ROWS_, D, -3, 3, &s);
        l.out[0] = some(pair[t][1], ROWS_, D, 0, 0, &s);
        same_on_both(&l, 1, "embedding");
    }
    for (int w = 0; w < TT__COUNT(width); w++)
        for (int t = 0; t < (width[w] <= 4096 ? TT__COUNT(norm) : 1); t++) {
            const tt_dtype x = norm[t][0], of_w = norm[t][1];
            i = tt__new_instr(TT__OP_LAYERNORM);
            i.attr.eps = 1e-5f;
            l.in[0] = some(x, ROWS_, width[w], -3, 3, &s);
            l.in[1] = some(of_w, 1, width[w], -1, 1, &s);
            l.in[2] = some(of_w, 1, width[w], -1, 1, &s);
            l.out[0] = some(x, ROWS_, width[w], 0, 0, &s);
            l.out[1] = some(TT_F32, ROWS_, 2, 0, 0, &s);
            same_on_both(&l, 16, "layernorm");
            i.op = TT__OP_LAYERNORM_BACKWARD;
            for (int sums = 0; sums < 2; sums++) { /* with sums, the kernel adds to dx and to the sums */
                const int rows = sums ? MORE_ROWS : ROWS_;
                l.in[0] = some(x, rows, width[w], -3, 3, &s);
                l.in[1] = some(x, rows, width[w], -3, 3, &s);
                l.in[2] = some(of_w, 1, width[w], -1, 1, &s);
                l.in[3] = some(TT_F32, rows, 2, 0.1f, 0.5f, &s);
                l.out[0] = some(x, rows, width[w], -(float)sums, (float)sums, &s);
                l.out[1] = some(of_w, 1, width[w], 0, 0, &s);
                l.out[2] = some(of_w, 1, width[w], 0, 0, &s);
                if (sums) l.out[3] = some(x, 1, width[w], -1, 1, &s);
                l.add[0] = l.add[3] = sums;
                same_on_both(&l, 32, "layernorm_backward");
            }
            l.add[0] = l.add[3] = false;
        }
    for (int t = 0; t < TT__COUNT(norm); t++) {
        i = tt__new_instr(TT__OP_ADAM);
        i.attr.beta1 = 0.9f;
        i.attr.beta2 = 0.99f;
        i.attr.eps = 1e-8f;
        i.attr.weight_decay = 0.01f;
        i.attr.decoupled = true;
        i.attr.scaled = t % 2;
        i.attr.scale = 0.5f;
        l.in[0] = some(norm[t][0], ROWS_, 1000, -1, 1, &s);
        l.in[1] = some(TT_F32, 1, 2, 1, 1, &s);
        for (int k = 0; k < 3; k++) l.out[k] = some(norm[t][1], ROWS_, 1000, k == 2 ? 0.1f : -1, 1, &s);
        same_on_both(&l, 2, "adam");
    }
    for (int t = 0; t < 8; t++) { /* optimizers with fp32 states, and with states of 8 bits that begin as 0 */
        static const int op[] = {TT__OP_LION, TT__OP_ADAM, TT__OP_SGD, TT__OP_MUON_MOMENTUM};
        i = tt__new_instr(op[t % 4]);
        i.attr.nesterov = true;
        i.attr.beta1 = 0.9f;
        i.attr.beta2 = 0.99f;
        i.attr.eps = 1e-8f;
        l.in[0] = some(TT_F32, ROWS_, 1000, -1, 1, &s);
        l.in[1] = some(TT_F32, 1, 2, 1, 1, &s);
        l.out[0] = some(TT_F32, ROWS_, 1000, -1, 1, &s);
        for (int k = 0; k < (t % 4 == 1 ? 2 : 1); k++) {
            l.out[1 + k] = some(TT_F32, ROWS_, 1000, k, 1, &s);
            if (t < 4) continue;
            l.out[3 + k] = some(TT_F32, 1, tt__ceil_div(ROWS_ * 1000, TT__STATE_BLOCK), 0, 0, &s);
            l.out[1 + k].dtype = TT_U8; /* the test states_of_8_bits_of_each_isa compares the states */
        }
        same_on_both(&l, 2, tt__ops[op[t % 4]].name);
    }
    for (int t = 0; t < 2; t++) {
        i = tt__new_instr(t ? TT__OP_UNIT : TT__OP_MUON);
        i.attr.beta2 = 3;
        i.attr.weight_decay = 0.1f;
        l.in[0] = some(TT_F32, ROWS_, 1000, -1, 1, &s);
        l.in[1] = t ? some(TT_F32, 1, 1, 30, 30, &s) : some(TT_F32, 1, 2, 1, 1, &s);
        l.out[0] = some(TT_F32, ROWS_, 1000, -1, 1, &s);
        same_on_both(&l, 2, tt__ops[i.op].name);
    }
    for (int t = 0; t < 4; t++) { /* Adafactor of a matrix and of a row, in two dtypes */
        const int rows = t % 2 ? 1 : ROWS_, cols = t % 2 ? 3001 : 333;
        i = tt__new_instr(TT__OP_ADAFACTOR);
        i.attr.weight_decay = 0.1f;
        l.in[0] = some(norm[t / 2][0], rows, cols, -1, 1, &s);
        l.in[1] = some(TT_F32, 1, 2, 1, 1, &s);
        l.out[0] = some(norm[t / 2][1], rows, cols, -1, 1, &s);
        if (rows > 1) l.out[1] = some(TT_F32, 1, rows, 0.1f, 1, &s);
        l.out[2] = some(TT_F32, 1, cols, 0.1f, 1, &s);
        same_on_both(&l, 4, "adafactor");
    }
    for (int t = 0; t < 4 * TT__COUNT(norm); t++) { /* the dtypes of weights and of their rounded copies */
        const tt_dtype x = norm[t / 4][0], of_w = norm[t / 4][1];
        if (t % 4 < 3) {
            i = tt__new_instr(TT__OP_ROUND);
            i.attr.rounding = TT_ROUND_INT8 + t % 4;
            l.in[0] = some(of_w, ROWS_, 1001, -1, 1, &s);
            l.out[0] = some(x, ROWS_, 1001, 0, 0, &s);
            same_on_both(&l, 2, "round");
            continue;
        }
        const tt__pruning schedule = {0.7f, 1, 0, 1}; /* equal magnitudes are many in 16 bits */
        run.step = 1;
        for (int movement = 0; movement < 2; movement++) {
            i = tt__new_instr(TT__OP_PRUNE);
            i.attr.pruning = schedule;
            l.in[0] = some(TT_F32, 1, 2, 1, 1, &s);
            l.out[1] = some(of_w, ROWS_, 1001, -1, 1, &s);
            l.out[0] = some(TT_F32, 1, tt__mask_bytes(ROWS_ * 1001) / 4, 0, 0, &s);
            l.out[0].dtype = TT_U8;
            l.out[0].cols *= 4;
            l.out[0].ld *= 4;
            if (movement) { /* each second weight is pruned already */
                memset(l.out[0].data, 0x55, (size_t)l.out[0].cols);
                l.in[1] = some(TT_F32, ROWS_, 1001, -1, 1, &s);
            }
            same_on_both(&l, 0, movement ? "prune by movement" : "prune");
        }
        run.step = 0;
    }
    for (int t = 0; t < TT__COUNT(norm); t++) {
        i = tt__new_instr(TT__OP_MOVEMENT);
        l.in[0] = some(norm[t][0], ROWS_, 1000, -1, 1, &s);
        l.in[1] = some(TT_F32, 1, 2, 1, 1, &s);
        l.in[2] = some(norm[t][1], ROWS_, 1000, -1, 1, &s);
        l.out[0] = some(TT_F32, ROWS_, 1000, -1, 1, &s);
        same_on_both(&l, 1, "movement");
    }
    i = tt__new_instr(TT__OP_EMA);
    i.attr.beta1 = 0.9f;
    l.in[0] = some(TT_F32, ROWS_, 1000, -1, 1, &s);
    l.in[1] = some(TT_F32, 1, 2, 1, 1, &s);
    l.out[0] = some(TT_F32, ROWS_, 1000, -1, 1, &s);
    same_on_both(&l, 1, "ema");
    setenv("TINYTRAIN_WGMMA", "0", 1);
    for (int h = 0; h < 2 * TT__COUNT(head); h++)
        for (int n = 0; n < (h % 2 || head[h / 2] > 64 ? 2 : 2 * TT__COUNT(sequences)); n++)
            attention_on_both(&l, dtype[1 + n % 2], head[h / 2], sequences[n / 2], h % 2, false, &s);
    for (int n = 0; n < TT__COUNT(sequences); n++)
        attention_on_both(&l, TT_BF16, 64, sequences[n], false, true, &s);
    unsetenv("TINYTRAIN_WGMMA");
    TEST_CLOSE(ctx, &a);
}
#else
TEST(cuda_rows_in_flight) { SKIP("this build is without TINYTRAIN_CUDA"); }
TEST(cuda_kernels_of_each_dtype) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif
