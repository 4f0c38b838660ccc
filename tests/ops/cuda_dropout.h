/* Tests of dropout on CUDA: bits of dropout that attention's backward keeps for the gradients of keys and
   values; dropout and a norm in one launch. */
#pragma once

#ifdef TINYTRAIN_CUDA
/* ---- bits of dropout that attention's backward keeps when it computes dq, for dk and dv */

typedef struct kept_case {
    const char *name;
    int head, heads, key_heads, first_head, starts[6];
    bool causal, wgmma, listed; /* listed: every second row is a query */
} kept_case;

/* Returns how many bits in the workspace, after the sums of `dout * out`, differ from Philox's. */
static int wrong_bits(const kept_case *c, const tt__instr *i, const tt__step_settings *run,
                      const unsigned char *bits)
{
    const uint64_t key = dropout_key(run->seed, (uint64_t)run->step, (uint64_t)run->micro, i->random);
    const int across = (i->attr.max_length + 63) / 64;
    int wrong = 0;
    for (int s = 0; s < 5; s++)
        for (int h = 0; h < c->heads; h++)
            for (int q = 0; q < c->starts[s + 1] - c->starts[s]; q++)
                for (int k = 0; k < (c->causal ? q + 1 : c->starts[s + 1] - c->starts[s]); k++) {
                    const int before = c->starts[s] / 64 + s, row = q / 64;
                    const int pair = c->causal ? before * (across + 1) / 2 + row * (row + 1) / 2
                                               : (before + row) * across;
                    const size_t at = ((size_t)(pair + k / 64) * (size_t)c->heads + (size_t)h) * 512 +
                                      (size_t)(k % 64 / 16 * 64 + q % 64) * 2 + (size_t)(k % 16 / 8);
                    const double factor =
                        kept_weight(key, (uint32_t)(c->starts[s] + q), (uint32_t)k,
                                    (uint32_t)(c->first_head + h), (double)i->attr.dropout);
                    wrong += (bits[at] >> k % 8 & 1) != (factor > 0);
                }
    return wrong;
}

/* Returns the largest difference between the n 16-bit numbers of `a` and of `b`, divided by the largest
   number of `a`. */
static double most_apart(const void *a, const void *b, tt_dtype dtype, int64_t n)
{
    double apart = 0, max = 0;
    for (int64_t k = 0; k < n; k++) {
        float x, y;
        tt__convert(&x, TT_F32, (const char *)a + 2 * k, dtype, 1);
        tt__convert(&y, TT_F32, (const char *)b + 2 * k, dtype, 1);
        const double d = fabs((double)x - (double)y);
        if (!(d < INFINITY)) return INFINITY;
        if (d > apart) apart = d;
        if (fabs((double)x) > max) max = fabs((double)x);
    }
    return apart / max;
}

/* Checks that dq, dk and dv are bit for bit the same whether or not the workspace has room for dropout's mask
   of bits, also if only dq is wanted. If only dk and dv are wanted, another kernel sums `dout * out`, and the
   results agree up to a 16-bit rounding. The backward leaves a mask of the size that tt__cuda_attention_bits
   returns. If heads do not have 64 columns, rows of `out` begin at no multiple of 16 bytes. */
static void dropout_kept_on_cuda(tt__launch *l, const kept_case *c, tt_dtype dtype,
                                 const tt__step_settings *run,
                                 uint64_t *s)
{
    enum { OUTS = 3 };
    const int rows = c->starts[5], width = c->head * c->heads, key_width = c->head * c->key_heads;
    const int queries = c->listed ? rows / 2 : rows;
    tt__instr i = tt__new_instr(TT__OP_ATTENTION);
    int32_t *numbers = (int32_t *)calloc((size_t)rows, sizeof *numbers);
    void *without[OUTS];
    for (int k = 0; k < queries; k++) numbers[k] = 2 * k;
    i.attr.heads = c->heads;
    i.attr.key_heads = c->key_heads;
    i.attr.scale = 0.2f;
    i.attr.causal = c->causal;
    i.attr.dropout = 0.3f;
    for (int k = 0; k < 5; k++)
        i.attr.max_length = (int)tt__max(i.attr.max_length, c->starts[k + 1] - c->starts[k]);
    i.random = 7;
    l->instr = &i;
    l->first_col = c->first_head * c->head;
    l->in[0] = some(dtype, queries, width, -1, 1, s);
    for (int k = 1; k < 3; k++) l->in[k] = some(dtype, rows, key_width, -1, 1, s);
    l->in[3] = some_indices(c->starts, 6);
    if (c->listed) l->in[4] = some_indices(numbers, queries);
    l->out[0] = some(dtype, queries, width + (c->head != 64) * 4, 0, 0, s);
    l->out[0].cols = width;
    l->out[1] = some(TT_F32, queries, c->heads, 0, 0, s);
    snprintf(where, sizeof where, "%s, %s", c->name, tt_dtype_name(dtype));
    report(run_on_cpu(l), "attention on the CPU");
    i.op = TT__OP_ATTENTION_BACKWARD;
    for (int k = 4; k >= 0; k--) l->in[k == 4 ? 7 : k + 1] = l->in[k];
    l->in[0] = some(dtype, queries, width, -1, 1, s);
    for (int k = 0; k < 2; k++) l->in[5 + k] = l->out[k];
    for (int k = 0; k < OUTS; k++)
        l->out[k] = some(dtype, k ? rows : queries, k ? key_width : width, 0, 0, s);
    const size_t order = c->listed ? tt__align_to((size_t)(6 + 2 * queries) * 4, TT__CUDA_ALIGN) : 0;
    const size_t deltas = order + tt__align_to((size_t)queries * (size_t)c->heads * 4, TT__CUDA_ALIGN);
    const size_t bits = (size_t)tt__cuda_attention_bits(&i.attr, &l->in[1], 5), room = deltas + bits;
    unsigned char *after = (unsigned char *)calloc(1, room);
    report(bits > 0 && bits <= (size_t)(queries * width) * 2, "%zu bytes of bits", bits);
    i.attr.dropout = 0; /* with a rate of 0 no kernel leaves bits */
    report(tt__cuda_attention_bits(&i.attr, &l->in[1], 5) == 0, "bits of a rate that drops none");
    i.attr.dropout = 0.3f;
    i.workspace = room - 1; /* one byte too few for the bits: the workspace holds only the sums */
    report(run_on_cuda(l, deltas), "fails without room");
    i.workspace = room;
    for (int k = 0; k < OUTS; k++) without[k] = l->out[k].data;
    for (int wanted = 0; wanted < 3; wanted++) { /* 0: wants dq, dk and dv; 1: dq alone; 2: dk and dv */
        for (int k = 0; k < OUTS; k++)
            l->out[k] = some(dtype, k ? rows : queries, k ? key_width : width, 0, 0, s);
        for (int k = 0; k < OUTS; k++) {
            if (wanted == 0 || (wanted == 1) == (k == 0)) continue;
            free(l->out[k].data);
            memset(&l->out[k], 0, sizeof l->out[k]);
        }
        workspace_after = wanted ? NULL : after;
        report(run_on_cuda(l, room), "fails");
        workspace_after = NULL;
        for (int k = 0; k < OUTS; k++) {
            const int64_t n = k ? (int64_t)rows * key_width : (int64_t)queries * width;
            const double apart = l->out[k].data ? most_apart(without[k], l->out[k].data, dtype, n) : 0;
            const double unit = dtype == TT_F16 ? 0x1p-10 : 0x1p-7;
            report(apart <= (wanted == 2 ? unit : 0), "result %d is another by %g, wanted %d", k, apart,
                   wanted);
            free(l->out[k].data);
        }
    }
    const int wrong = c->listed ? 0 : wrong_bits(c, &i, run, after + deltas);
    report(wrong == 0, "%d bits are wrong", wrong);
    for (int k = 0; k < OUTS; k++) {
        free(without[k]);
        memset(&l->out[k], 0, sizeof l->out[k]);
    }
    free(after);
    free(numbers);
    l->first_col = 0;
    free_operands(l);
}

/* Covers sequences of any length, empty sequences, sequences of one tile, heads that share keys, ranks with
   some of the heads, and queries that an index lists, for which each kernel draws its own bits. */
TEST(cuda_dropout_kept_for_keys)
{
    static const kept_case cases_of[] = {
        {"heads of 64", 64, 2, 2, 0, {0, 300, 301, 301, 429, 520}, false, false, false},
        {"heads of 64, causal", 64, 4, 2, 0, {0, 33, 353, 353, 417, 510}, true, false, false},
        {"heads of 24, causal", 24, 2, 1, 2, {0, 1, 290, 290, 301, 333}, true, false, false},
        {"listed queries", 64, 2, 2, 0, {0, 30, 330, 680, 680, 700}, true, false, true},
        {"heads of 40 of one sequence, causal", 40, 2, 2, 2, {0, 0, 0, 0, 0, 270}, true, false, false},
        {"by warpgroups", 64, 2, 1, 0, {0, 300, 301, 301, 429, 520}, false, true, false},
        {"by warpgroups, listed queries", 64, 2, 1, 0, {0, 30, 330, 680, 680, 700}, true, true, true},
        {"by warpgroups, causal", 64, 4, 2, 4, {0, 33, 353, 353, 417, 510}, true, true, false},
        {"by warpgroups, heads of 40", 40, 3, 3, 0, {0, 0, 64, 345, 345, 400}, true, true, false},
    };
    test_allocator a;
    uint64_t s = 3;
    tt__step_settings run;
    tt__launch l;
    tt_context *ctx = open_for_launches(&a, &run, &l);
    run.step = 3;
    for (int c = 0; c < TT__COUNT(cases_of); c++) {
#ifdef TT_EMULATE
        if (cases_of[c].wgmma) emu_set_capability(0, 9, 0);
#endif
        if (!cases_of[c].wgmma) setenv("TINYTRAIN_WGMMA", "0", 1);
        for (int f16 = 0; f16 < 2; f16++)
            dropout_kept_on_cuda(&l, &cases_of[c], f16 ? TT_F16 : TT_BF16, &run, &s);
        unsetenv("TINYTRAIN_WGMMA");
    }
    TEST_CLOSE(ctx, &a);
}

/* Indices of the matrices of one test. The matrices of rows are stored one after another, and each field is
   the index of a matrix. `shift` is the number of rows by which the second op's result begins later. The
   forward runs dropout and then a norm of dropout's result. The backward runs a norm's backward and then
   dropout of the dx of that norm. One call for both ops must leave the same bits in memory as two calls. */
typedef struct norm_places {
    const char *what;
    int from, residual, h, y; /* forward: `h` is dropout's result, `y` is the norm's result */
    int dy, dx, masked;       /* matrices of the backward, which reads h, too */
    int shift;
} norm_places;

static void dropout_with_norm_on_cuda(tt__device *d, unsigned char *memory, size_t room, void *resident,
                                      const norm_places *at, bool forward, bool centred, tt_dtype x,
                                      tt_dtype of_w, int cols, uint64_t *s)
{
    enum { ROWS_ = 37, MATRICES = 6, SMALL = 7 };
    const tt__backend *b = &tt__cuda_backend;
    const size_t rows_bytes = ((size_t)(ROWS_ + 1) * (size_t)cols * 4 + 255) / 256 * 256;
    const size_t small_bytes = ((size_t)cols * 4 + 1023) / 256 * 256, all = MATRICES * rows_bytes +
                               SMALL * small_bytes;
    unsigned char *before = (unsigned char *)calloc(all, 1), *after[2];
    tt__step_settings run;
    tt__instr drop = tt__new_instr(TT__OP_DROPOUT), norm = tt__new_instr(TT__OP_LAYERNORM);
    memset(&run, 0, sizeof run);
    run.seed = 5;
    run.step = 3;
    snprintf(where, sizeof where, "%s, %s, %s/%s, %d columns", at->what, forward ? "forward" : "backward",
             tt_dtype_name(x), tt_dtype_name(of_w), cols);
    for (int k = 0; k < MATRICES + SMALL; k++) {
        const bool rows = k < MATRICES, f32 = k >= MATRICES + 2;
        const size_t place = rows ? (size_t)k * rows_bytes
                                  : MATRICES * rows_bytes + (size_t)(k - MATRICES) * small_bytes;
        const tt__mat m = some(rows ? x : f32 ? TT_F32 : of_w, rows ? ROWS_ + 1 : 1, cols,
                               f32 ? 0.1f : -2, 2, s);
        memcpy(before + place, m.data, (size_t)(m.rows * m.cols) * tt_dtype_bytes(m.dtype));
        free(m.data);
    }
    memcpy(before + all - small_bytes, &run, sizeof run);
    drop.attr.dropout = 0.3f;
    drop.random = 4;
    norm.attr.eps = 1e-5f;
    norm.op = forward ? centred ? TT__OP_LAYERNORM : TT__OP_RMSNORM
        : centred ? TT__OP_LAYERNORM_BACKWARD : TT__OP_RMSNORM_BACKWARD;
    for (int together = 0; together < 2; together++) {
        tt__launch l[2], *dropout = &l[!forward], *of_norm = &l[forward];
        memset(l, 0, sizeof l);
        after[together] = (unsigned char *)calloc(all, 1);
        dropout->instr = &drop;
        of_norm->instr = &norm;
        l[0].device = l[1].device = d;
        l[0].resident = l[1].resident = resident;
#define ROWS_AT(place) (tt__mat){memory + (size_t)(place) * rows_bytes, x, ROWS_, cols, cols}
#define SMALL_AT(place, type, n) \
    (tt__mat){memory + MATRICES * rows_bytes + (place) * small_bytes, type, 1, n, n}
        const tt__mat stats = {memory + MATRICES * rows_bytes + 5 * small_bytes, TT_F32, ROWS_,
                               centred ? 2 : 1, centred ? 2 : 1};
        dropout->in[TT__RUN_IN] = SMALL_AT(6, TT_U8, (int64_t)sizeof run);
        if (forward) {
            dropout->in[0] = ROWS_AT(at->from);
            if (at->residual >= 0) dropout->in[1] = ROWS_AT(at->residual);
            dropout->out[0] = of_norm->in[0] = ROWS_AT(at->h);
            of_norm->in[1] = SMALL_AT(0, of_w, cols);
            if (centred) of_norm->in[2] = SMALL_AT(1, of_w, cols);
            of_norm->out[0] = ROWS_AT(at->y);
            of_norm->out[1] = stats;
        } else {
            of_norm->in[0] = ROWS_AT(at->dy);
            of_norm->in[1] = ROWS_AT(at->h);
            of_norm->in[2] = SMALL_AT(0, of_w, cols);
            of_norm->in[3] = stats;
            of_norm->out[0] = dropout->in[0] = ROWS_AT(at->dx);
            of_norm->add[0] = at->dx != at->dy;
            of_norm->out[1] = SMALL_AT(2, TT_F32, cols);
            if (centred) of_norm->out[2] = SMALL_AT(3, TT_F32, cols);
            dropout->out[0] = ROWS_AT(at->masked);
            dropout->out[1] = SMALL_AT(4, TT_F32, cols);
            dropout->add[1] = true;
        }
        l[1].out[0].data = (char *)l[1].out[0].data + (size_t)(at->shift * cols) * tt_dtype_bytes(x);
        bool ok = all <= room && b->copy(d, TT__COMPUTE_STREAM, memory, before, all) == TT_OK &&
                  b->wait(d) == TT_OK;
        if (ok && together) ok = b->launch(l, 2) == TT_OK;
        else if (ok) ok = b->launch(&l[0], 1) == TT_OK && b->launch(&l[1], 1) == TT_OK;
        if (ok) ok = b->read(d, after[together], memory, all) == TT_OK;
        report(ok, "fails: %s", b->error(d));
#undef ROWS_AT
#undef SMALL_AT
    }
    report(memcmp(before, after[0], all) != 0, "nothing is written");
    report(memcmp(after[0], after[1], all) == 0, "one launch does not leave what two leave");
    for (int k = 0; k < 2; k++) free(after[k]);
    free(before);
}

TEST(cuda_dropout_with_norms)
{
    enum { ROOM = 2 << 20 };
    static const norm_places places[] = {
        {"apart", 0, 1, 2, 3, 3, 4, 5, 0},
        {"without a residual", 0, -1, 2, 3, 3, 4, 5, 0},
        {"in place", 0, 1, 0, 1, 3, 3, 2, 0},
        {"in the place of what dropout reads", 0, 1, 2, 0, 3, 4, 3, 0},
        {"a row behind what dropout reads", 0, 1, 2, 0, 3, 4, 3, 1},
        {"in the place of dx", 0, 1, 1, 1, 3, 4, 4, 0},
    };
    static const tt_dtype norm[][2] = {
        {TT_F32, TT_F32}, {TT_BF16, TT_F32}, {TT_BF16, TT_BF16}, {TT_F16, TT_F32}};
    static const int width[] = {40, 384, 1024, 1504, 77};
    const tt__backend *b = &tt__cuda_backend;
    char error[256] = "";
    test_allocator a;
    uint64_t s = 9;
#ifdef TT_EMULATE
    emu_configure(1, (size_t)16 << 20, 1, 1);
#endif
    const tt_context_options co = test_options(&a);
    tt_context *ctx = tt_open(&co);
    tt__device *d = b->open(ctx, 0, 1, error, sizeof error);
    unsigned char *memory = d ? (unsigned char *)b->allocate(d, ROOM) : NULL;
    void *resident = d ? b->allocate(d, TT__CUDA_RESIDENT) : NULL;
    if (!report(memory && resident, "no memory: %s", d ? b->error(d) : error)) return;
    for (int p = 0; p < TT__COUNT(places); p++)
        for (int t = 0; t < TT__COUNT(norm); t++)
            for (int w = 0; w < TT__COUNT(width); w++)
                for (int forward = 0; forward < 2; forward++)
                    dropout_with_norm_on_cuda(d, memory, ROOM, resident, &places[p], forward,
                                              (p + t + w) % 3 != 0, norm[t][0], norm[t][1], width[w], &s);
    b->release(d, memory);
    b->release(d, resident);
    b->close(d);
    TEST_CLOSE(ctx, &a);
}

/* Trains three blocks with dropout for two steps. Norms follow the dropout's sum (as in BERT) or precede the
   layer whose result is dropped (as in GPT-2). Writes the parameters and returns the number of launches that
   run dropout together with a norm. apart: every instruction has its own launch, and dead storage is
   overwritten. */
enum { NORMED_D = 24, NORMED_BLOCKS = 3, NORMED_PARAMS = 4 * NORMED_BLOCKS };
static int blocks_with_dropout(const char *precision, bool behind, bool apart, float *to)
{
    enum { ROWS = 37, D = NORMED_D };
    static const char *const names[] = {"w", "b", "norm", "shift"};
    const tt_init init[] = {
        {TT_INIT_NORMAL, 0.4f}, {TT_INIT_NORMAL, 0.4f}, {TT_INIT_ONES, 0}, {TT_INIT_ZEROS, 0}};
    const int64_t dims[] = {D, D};
    const tt_value none = {0};
    test_allocator a;
    tt_param *params[NORMED_PARAMS];
    float x[ROWS * D], y[ROWS * D];
    uint64_t s = 3;
    int found = 0;
#ifdef TT_EMULATE
    emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
    tt_context *ctx = open_isa(test_options(&a), "cuda");
    ctx->options.verify = true;
    tt_tape *t = tt_tape_new(ctx);
    const tt_value in = tt_input(t, "x", TT_F32, ROWS, D), target = tt_input(t, "y", TT_F32, ROWS, D);
    tt_value h = in;
    for (int k = 0; k < ROWS * D; k++) x[k] = (float)test_random(&s) * 0x1p-31f - 1;
    for (int k = 0; k < ROWS * D; k++) y[k] = (float)test_random(&s) * 0x1p-31f - 1;
    for (int k = 0; k < NORMED_PARAMS; k++) {
        char name[16];
        snprintf(name, sizeof name, "%s%d", names[k % 4], k / 4);
        params[k] = tt_param_new(ctx, name, k % 4 ? 1 : 2, dims, init[k % 4]);
    }
    for (int k = 0; k < NORMED_BLOCKS; k++) {
        tt_param **w = params + 4 * k;
        tt_value of = h;
        if (!behind) of = k == 1 ? tt_rmsnorm(t, h, w[2], 1e-5f) : tt_layernorm(t, h, w[2], w[3], 1e-5f);
        h = tt_add(t, h, tt_dropout(t, tt_linear(t, of, w[0], w[1]), 0.3f));
        if (behind) h = k == 1 ? tt_rmsnorm(t, h, w[2], 1e-5f) : tt_layernorm(t, h, w[2], w[3], 1e-5f);
    }
    tt_compile_options o = tt_compile_options_default();
    o.device = "cuda";
    o.precision = precision;
    o.loss_scale.init = 16;
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, h, target, none), &o);
    if (!CHECK(p != NULL)) printf("%s\n", tt_error(ctx));
    if (p) p->poison = apart;
    for (int k = 0; p && k < p->built.t->n_code; k++) found += tt__leads_to_next(p, k);
    for (int step = 0; step < 2 && p; step++)
        CHECK(tt_set(p, in, x, ROWS) == TT_OK && tt_set(p, target, y, ROWS) == TT_OK &&
              tt_step(p, 0.1f, NULL) == TT_OK);
    memset(to, 0, sizeof *to * NORMED_PARAMS * D * D);
    for (int k = 0; k < NORMED_PARAMS && p; k++) CHECK(tt_param_get(params[k], to + k * D * D) == TT_OK);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return found;
}

/* Programs launch dropout and a norm together, with the same bits as in two launches. */
TEST(cuda_programs_with_dropout_and_norms)
{
    static const char *const precision[] = {"32-true", "bf16-mixed", "bf16-true"};
    static float of[2][NORMED_PARAMS * NORMED_D * NORMED_D];
    for (int c = 0; c < 2 * TT__COUNT(precision); c++) {
        snprintf(where, sizeof where, "%s, norms %s", precision[c / 2], c % 2 ? "behind" : "in front");
        const int together = blocks_with_dropout(precision[c / 2], c % 2, false, of[0]);
        const int apart = blocks_with_dropout(precision[c / 2], c % 2, true, of[1]);
        /* Expects one launch for each pair, forward and backward. If norms come first, no norm follows the
           last dropout, and no dropout precedes the first norm. */
        const int expected = c % 2 ? 2 * NORMED_BLOCKS : 2 * (NORMED_BLOCKS - 1);
        report(together == expected && apart == 0, "%d launches are of both, not %d", together, expected);
        report(memcmp(of[0], of[1], sizeof of[0]) == 0, "parameters differ");
    }
}
#else
TEST(cuda_dropout_kept_for_keys) { SKIP("this build is without TINYTRAIN_CUDA"); }
TEST(cuda_dropout_with_norms) { SKIP("this build is without TINYTRAIN_CUDA"); }

TEST(cuda_programs_with_dropout_and_norms) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif
