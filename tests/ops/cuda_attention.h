/* Tests of attention's backward on CUDA: sums of columns, warpgroups. */
#pragma once

#ifdef TINYTRAIN_CUDA
/* ---- sums of columns that attention's backward leaves */

typedef struct attention_sums_case {
    const char *name;
    int head, heads, key_heads, rows, seqs, listed, window, block;
    bool causal, alibi, add, wgmma;
} attention_sums_case;

/* Checks the sums of columns that launch `l` stores for its result number `o`: they equal the sums of the
   numbers stored in that result, plus `old` if `old` has data. */
static void check_column_sums(const tt__launch *l, int o, const tt__mat *old)
{
    const tt__mat *y = &l->out[o], *sums = &l->out[3 + o];
    int wrong = 0;
    for (int64_t c = 0; c < y->cols; c++) {
        const size_t at = (size_t)c * tt_dtype_bytes(sums->dtype);
        float x, got;
        double sum = 0, size = 0;
        for (int64_t r = 0; r < y->rows; r++) {
            tt__convert(&x, TT_F32, (char *)y->data + (r * y->ld + c) * 2, y->dtype, 1);
            sum += x;
            size += fabs((double)x);
        }
        if (old->data) {
            tt__convert(&x, TT_F32, (char *)old->data + at, old->dtype, 1);
            sum += x;
        }
        tt__convert(&got, TT_F32, (char *)sums->data + at, sums->dtype, 1);
        const double unit = sums->dtype == TT_F32 ? 0x1p-24 : sums->dtype == TT_F16 ? 0x1p-11 : 0x1p-8;
        wrong += !(fabs(got - sum) <= 1.001 * unit * fabs(sum) + 0x1p-19 * size + (unit > 0x1p-12) * 0x1p-25);
    }
    report(wrong == 0, "%d of %d sums of result %d are wrong", wrong, (int)y->cols, o);
}

/* Runs the backward on CUDA and checks its sums of columns. The CPU computes the forward. */
static void attention_sums_on_cuda(tt__launch *l, const attention_sums_case *c, tt_dtype dtype,
                                   tt_dtype of_sums, uint64_t *s)
{
    const int queries = c->listed ? c->listed : c->rows, width = c->head * c->heads,
              key_width = c->head * c->key_heads;
    int32_t *starts = (int32_t *)calloc((size_t)c->seqs + 1 + (size_t)c->listed, sizeof *starts);
    int32_t *numbers = starts + c->seqs + 1;
    tt__mat old[3];
    tt__instr i = tt__new_instr(TT__OP_ATTENTION);
    for (int k = 0; k <= c->seqs; k++) /* sequences of different lengths, some empty */
        starts[k] = k < c->seqs ? (int32_t)((int64_t)k * c->rows / c->seqs - (k % 2 && c->rows > 2 * c->seqs))
                                : c->rows;
    for (int k = 0; k < c->listed; k++) numbers[k] = (int32_t)(test_random(s) % (uint32_t)c->rows);
    i.attr.heads = c->heads;
    i.attr.key_heads = c->key_heads;
    i.attr.scale = 0.2f;
    i.attr.causal = c->causal;
    i.attr.window = c->window;
    i.attr.alibi = c->alibi ? 0.5f : 0;
    i.attr.alibi_heads = c->alibi ? c->heads : 0;
    i.attr.block = c->block;
    i.attr.listed = c->block ? 1 : 0;
    i.attr.list_rows = c->block ? c->rows / c->block : 0;
    i.attr.dropout = c->head % 3 ? 0.2f : 0;
    l->instr = &i;
    i.workspace = (size_t)1 << 20;
    l->in[0] = some(dtype, queries, width, -1, 1, s);
    for (int k = 1; k < 3; k++) l->in[k] = some(dtype, c->rows, key_width, -1, 1, s);
    l->in[3] = some_indices(starts, c->seqs + 1);
    if (c->listed) l->in[4] = some_indices(numbers, c->listed);
    l->out[0] = some(dtype, queries, width, 0, 0, s);
    l->out[1] = some(TT_F32, queries, c->heads, 0, 0, s);
    report(run_on_cpu(l), "attention on the CPU");
    i.op = TT__OP_ATTENTION_BACKWARD;
    for (int k = 4; k >= 0; k--) l->in[k == 4 ? 7 : k + 1] = l->in[k];
    l->in[0] = some(dtype, queries, width, -1, 1, s);
    l->in[5] = l->out[0];
    l->in[6] = l->out[1];
    for (int k = 0; k < 3; k++) {
        const int columns = k ? key_width : width;
        l->out[k] = some(dtype, k ? c->rows : queries, columns, -(float)c->add, (float)c->add, s);
        l->add[k] = c->add;
        l->out[3 + k] = some(of_sums, 1, columns, -1, 1, s);
        l->add[3 + k] = k != 1;
        old[k] = some(of_sums, 1, columns, 0, 0, s);
        memcpy(old[k].data, l->out[3 + k].data, (size_t)columns * tt_dtype_bytes(of_sums));
    }
    snprintf(where, sizeof where, "%s, %s, sums in %s", c->name, tt_dtype_name(dtype),
             tt_dtype_name(of_sums));
    if (report(run_on_cuda(l, (size_t)1 << 20), "fails"))
        for (int k = 0; k < 3; k++) {
            const tt__mat none = {NULL, TT_F32, 0, 0, 0};
            check_column_sums(l, k, l->add[3 + k] ? &old[k] : &none);
        }
    for (int k = 0; k < 3; k++) free(old[k].data);
    memset(l->add, 0, sizeof l->add);
    free_operands(l);
    free(starts);
}

/* Each kernel of attention's backward leaves the sums of columns of each gradient. Covers queries or keys
   that fill no tile, empty sequences, few queries, heads that share keys, more partial sums than the
   workspace can hold, and gradients to which the kernels add. */
TEST(cuda_column_sums_of_attention)
{
    static const attention_sums_case cases_of[] = {
        {"heads of 32 in one pass", 32, 2, 2, 80, 2, 0, 0, 0, false, false, false, false},
        {"heads of 24 in one pass of 8 warps", 24, 3, 1, 200, 3, 0, 0, 0, true, false, false, false},
        {"heads of 64 in one pass", 64, 2, 1, 141, 1, 0, 0, 0, false, false, false, false},
        {"listed queries in one pass", 64, 2, 2, 190, 4, 7, 0, 0, false, false, false, false},
        {"heads of 24", 24, 2, 2, 280, 3, 0, 0, 0, true, false, false, false},
        {"heads of 64", 64, 2, 1, 290, 2, 0, 0, 0, false, false, false, false},
        {"listed queries", 64, 1, 1, 280, 5, 70, 0, 0, true, false, false, false},
        {"a window", 64, 2, 2, 280, 2, 0, 20, 0, true, false, false, false},
        {"ALiBi", 40, 2, 1, 270, 2, 0, 0, 0, false, true, false, false},
        {"heads of 80", 80, 2, 2, 100, 3, 0, 0, 0, true, false, false, false},
        {"heads of 96", 96, 2, 1, 100, 2, 0, 0, 0, false, false, false, false},
        {"heads of 128", 128, 2, 1, 150, 2, 0, 0, 0, true, false, false, false},
        {"blocks", 64, 1, 1, 320, 1, 0, 0, 64, false, false, false, false},
        {"more sequences than there is room for", 64, 2, 2, 600, 600, 0, 0, 0, false, false, false, false},
        {"gradients that are added to", 64, 2, 2, 270, 2, 0, 0, 0, false, false, true, false},
        {"heads without vectors", 20, 2, 2, 70, 2, 0, 0, 0, false, false, false, false},
        {"by warpgroups, a head of keys each", 64, 2, 2, 200, 3, 0, 0, 0, false, false, false, true},
        {"by warpgroups", 64, 2, 1, 290, 3, 0, 0, 0, false, false, false, true},
        {"by warpgroups, heads of 40", 40, 2, 2, 270, 2, 0, 0, 0, true, false, false, true},
        {"by warpgroups, listed queries", 64, 2, 2, 290, 4, 7, 0, 0, true, false, false, true},
    };
    test_allocator a;
    uint64_t s = 7;
    tt__step_settings run;
    tt__launch l;
    tt_context *ctx = open_for_launches(&a, &run, &l);
    for (int c = 0; c < TT__COUNT(cases_of); c++)
        for (int f16 = 0; f16 < 2; f16++) {
            const attention_sums_case *of = &cases_of[c];
            const tt_dtype dtype = f16 ? TT_F16 : TT_BF16;
#ifdef TT_EMULATE
            if (of->wgmma) emu_set_capability(0, 9, 0);
#endif
            if (!of->wgmma) setenv("TINYTRAIN_WGMMA", "0", 1);
            attention_sums_on_cuda(&l, of, dtype, (c + f16) % 2 ? TT_F32 : dtype, &s);
            unsetenv("TINYTRAIN_WGMMA");
        }
    TEST_CLOSE(ctx, &a);
}

/* ---- attention's backward by warpgroups, in one pass */

typedef struct wide_case {
    const char *name;
    int head, heads, key_heads, first_head, starts[5];
    bool causal, drops;
} wide_case;

/* Compares the backward on CUDA with the CPU's. On CUDA the second sequence is NaN in each operand; the other
   sequences must not become NaN. */
static void wide_backward_on_cuda(tt__launch *l, const wide_case *c, tt_dtype dtype, uint64_t *s)
{
    enum { OUTS = 3, SEQS = 4 };
    const int rows = c->starts[SEQS], width = c->head * c->heads, key_width = c->head * c->key_heads;
    const int first = c->starts[1], ends = c->starts[2];
    tt__instr i = tt__new_instr(TT__OP_ATTENTION);
    i.attr.heads = c->heads;
    i.attr.key_heads = c->key_heads;
    i.attr.scale = 0.2f;
    i.attr.causal = c->causal;
    i.attr.dropout = c->drops ? 0.3f : 0;
    for (int k = 0; k < SEQS; k++)
        i.attr.max_length = (int)tt__max(i.attr.max_length, c->starts[k + 1] - c->starts[k]);
    i.random = 7;
    l->instr = &i;
    l->first_col = c->first_head * c->head;
    l->in[0] = some(dtype, rows, width, -1, 1, s);
    for (int k = 1; k < 3; k++) l->in[k] = some(dtype, rows, key_width, -1, 1, s);
    l->in[3] = some_indices(c->starts, SEQS + 1);
    l->out[0] = some(dtype, rows, width, 0, 0, s);
    l->out[1] = some(TT_F32, rows, c->heads, 0, 0, s);
    snprintf(where, sizeof where, "%s, %s", c->name, tt_dtype_name(dtype));
    report(run_on_cpu(l), "attention on the CPU");
    i.op = TT__OP_ATTENTION_BACKWARD;
    for (int k = 3; k >= 0; k--) l->in[k + 1] = l->in[k];
    l->in[0] = some(dtype, rows, width, -1, 1, s);
    for (int k = 0; k < 2; k++) l->in[5 + k] = l->out[k];
    memset(l->out, 0, sizeof l->out);
    tt__launch cpu = *l;
    for (int k = 0; k < OUTS; k++) {
        l->out[k] = some(dtype, rows, k ? key_width : width, 0, 0, s);
        cpu.out[k] = some(dtype, rows, k ? key_width : width, 0, 0, s);
    }
    i.workspace = (size_t)16 << 20; /* the size that run_on_cpu provides */
    report(run_on_cpu(&cpu), "the backward on the CPU");
    for (int k = 0; k < 6; k++)
        if (k != 4)
            memset((char *)l->in[k].data + first * l->in[k].ld * 2, 0xff,
                   (size_t)((ends - first) * l->in[k].cols * 2));
    const size_t parts = (size_t)tt__cuda_attention_parts(&i.attr, &l->in[1]);
    i.workspace = parts + tt__align_to((size_t)(rows * c->heads) * 4, TT__CUDA_ALIGN) + SEQS * c->heads * 4;
    report(run_on_cuda(l, i.workspace), "fails");
    for (int k = 0; k < OUTS; k++)
        for (int q = 0; q < SEQS; q++) {
            const int64_t at = c->starts[q] * l->out[k].cols, n = c->starts[q + 1] * l->out[k].cols - at;
            if (q == 1 || n == 0) continue;
            const double apart = most_apart((char *)cpu.out[k].data + 2 * at, (char *)l->out[k].data + 2 * at,
                                            dtype, n);
            report(apart <= (dtype == TT_F16 ? 0x1p-10 : 0x1p-7), "result %d of sequence %d is another by %g",
                   k, q, apart);
        }
    for (int k = 0; k < OUTS; k++) free(cpu.out[k].data);
    l->first_col = 0;
    free_operands(l);
}

/* Covers sequences of one block and of several blocks. The longest sequences have more blocks than the kernel
   has slots for, so the kernel passes over them again and adds to the sums of earlier passes. */
TEST(cuda_backward_by_warpgroups)
{
    static const wide_case cases_of[] = {
        {"one block", 64, 2, 2, 0, {0, 197, 260, 265, 290}, false, false},
        {"one block, causal", 64, 4, 2, 2, {0, 129, 192, 199, 449}, true, true},
        {"one block of a head of 40", 40, 2, 1, 0, {0, 64, 70, 75, 326}, false, true},
        {"blocks", 64, 2, 2, 2, {0, 300, 340, 345, 853}, false, true},
        {"blocks, causal", 64, 2, 1, 0, {0, 261, 290, 310, 1000}, true, false},
        {"two passes", 64, 1, 1, 0, {0, 30, 60, 65, 1190}, false, false},
        {"two passes, causal", 48, 1, 1, 0, {0, 300, 301, 310, 1400}, true, true},
        {"three passes", 64, 1, 1, 0, {0, 30, 60, 65, 1465}, false, true},
        /* In the two cases below the kernel visits blocks in another order. */
        {"columns of blocks", 64, 2, 1, 2, {0, 300, 600, 900, 1200}, true, true},
        {"columns of blocks and a rest", 40, 1, 1, 0, {0, 300, 560, 850, 1500}, true, true},
    };
    test_allocator a;
    uint64_t s = 3;
    tt__step_settings run;
    tt__launch l;
    tt_context *ctx = open_for_launches(&a, &run, &l);
    run.step = 3;
#ifdef TT_EMULATE
    emu_set_capability(0, 9, 0);
#endif
    for (int c = 0; c < TT__COUNT(cases_of); c++)
        wide_backward_on_cuda(&l, &cases_of[c], c % 2 ? TT_F16 : TT_BF16, &s);
    TEST_CLOSE(ctx, &a);
}
#else
TEST(cuda_column_sums_of_attention) { SKIP("this build is without TINYTRAIN_CUDA"); }

TEST(cuda_backward_by_warpgroups) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif
