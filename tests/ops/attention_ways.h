/* Tests of attention's kernels: windows and blocks and their FLOPs, bf16 dot products, tiles, warpgroups,
   gradients of biases. */
#pragma once

/* Runs head sizes of 33 to 64, alternately with both 16-bit dtypes, and head sizes of 97 to 128 with each
   dtype. Queries are whole sequences or rows that an index lists. */
TEST(attention_by_warpgroups)
{
    char why[200];
    if (!has_isa("cuda")) SKIP("this build is without TINYTRAIN_CUDA");
#ifdef TT_EMULATE
    emu_configure(1, (size_t)16 << 20, 1, 1);
    emu_set_capability(0, 9, 0);
#endif
    const bool has = opens_cuda(why, sizeof why);
    for (int c = 0; c < CASE_COUNT && has; c++)
        for (int s = 0; s < SIZES; s++) {
            const char *name = cases[c].name;
            /* Cases with ALiBi or with blocks run other kernels, so this test leaves them out. */
            const bool other = tt__match("*alibi*", name) || tt__match("*blocks*", name);
            const int head_size = sizes[s].head_size;
            const bool wide = (head_size > 32 && head_size <= 64) || (head_size > 96 && head_size <= 128);
            if (cases[c].op != TT__OP_ATTENTION || other || !wide || !asked_for(&cases[c])) continue;
            if (!test_takes(c + s)) continue;
            if (sizes[s].only && !tt__match(sizes[s].only, name) &&
                !tt__match("rows_of_attention_grouped", name))
                continue;
#ifdef TT_EMULATE
            if (strcmp(emu_build(), "plain") != 0 && !tt__match("rows_*", name) && c % 8 != 0) continue;
#endif
            /* Head sizes above 96 run in bf16-mixed and in 16-mixed, smaller head sizes in one of the two. */
            for (int turn = 0; turn < (head_size > 96 ? 2 : 1); turn++) {
                const precision_case *p = &precisions[(c + s + turn) % 2 ? 1 : 3];
                reference_case(&cases[c], &sizes[s], "cuda", p, AS_INPUT, true);
                gradient_case(c, s, "cuda", p, AS_GATHERED);
            }
        }
    if (!has) SKIP(why);
}

/* A window's FLOPs are counted by the rows that each row sees, for whole sequences and for queries that an
   index lists. */
TEST(attention_window_flops)
{
    for (int c = 0; c < 8; c++) {
        static int32_t starts[] = {0, 30, 37, 100};
        const bool causal = c % 2, listed = c / 2 % 2, windowed = c / 4;
        const int window = 9;
        double expected = 0;
        int32_t rows[100];
        tt__mat in[TT__MAX_IN];
        tt__instr i = tt__new_instr(TT__OP_ATTENTION);
        memset(in, 0, sizeof in);
        i.attr.heads = i.attr.key_heads = 2;
        i.attr.causal = causal;
        i.attr.window = windowed ? window : 0;
        for (int k = 0; k < 5; k++) {
            const tt__mat m = {NULL, TT_F32, 100, 6, 6}, start = {starts, TT_I32, 4, 1, 1},
                          list = {listed ? rows : NULL, TT_I32, 100, 1, 1};
            in[k] = k < 3 ? m : k == 3 ? start : list;
        }
        if (listed) i.in[4] = 1;
        for (int s = 0; s < 3; s++)
            for (int row = starts[s]; row < starts[s + 1]; row++) {
                const bool cut = windowed && starts[s + 1] - starts[s] > window;
                rows[row] = row;
                for (int key = starts[s]; key < starts[s + 1]; key++) {
                    const bool seen = !cut || abs(row - key) < window;
                    /* causal attention without a window counts half of all pairs */
                    if (causal && !cut && !listed) expected += 0.5;
                    else expected += seen && (key <= row || !causal);
                }
            }
        snprintf(where, sizeof where, "%scausal, %s, %s", causal ? "" : "not ", listed ? "listed" : "whole",
                 windowed ? "window" : "no window");
        const double got = tt__flops_of_attention(&i, in);
        report(got == 4 * expected * 6, "%g FLOPs, not %g", got, 4 * expected * 6);
    }
}

/* The FLOPs of block-sparse attention count the blocks that are seen; listed blocks count as whole. */
TEST(attention_blocks_flops)
{
    static int32_t starts[] = {0, 30, 37, 100}, lists[2 * 9 * 2];
    for (int c = 0; c < 4; c++) {
        const bool listed = c % 2;
        double expected = 0;
        int32_t rows[100];
        tt__mat in[TT__MAX_IN];
        tt__instr i = tt__new_instr(TT__OP_ATTENTION);
        tt_attention_options o = tt_attention_options_default(2);
        memset(in, 0, sizeof in);
        o.block = i.attr.block = 7;
        o.dense = i.attr.dense = 20;
        o.listed = i.attr.listed = c / 2 ? 2 : 0;
        o.list_rows = i.attr.list_rows = 4;
        o.lists = lists; /* every list names block 0, which is a whole block */
        i.attr.heads = i.attr.key_heads = 2;
        for (int k = 0; k < 5; k++) {
            const tt__mat m = {NULL, TT_F32, 100, 6, 6}, start = {starts, TT_I32, 4, 1, 1},
                          list = {listed ? rows : NULL, TT_I32, 100, 1, 1};
            in[k] = k < 3 ? m : k == 3 ? start : list;
        }
        if (listed) i.in[4] = 1;
        for (int s = 0; s < 3; s++)
            for (int row = starts[s]; row < starts[s + 1]; row++) {
                rows[row] = row;
                for (int key = starts[s]; key < starts[s + 1]; key++)
                    expected += times_seen(&o, 0, row - starts[s], key - starts[s],
                                           starts[s + 1] - starts[s]);
            }
        const double got = tt__flops_of_attention(&i, in);
        report(got == 4 * expected * 6, "%g FLOPs, not %g", got, 4 * expected * 6);
    }
}

/* For sequences of one length, the FLOPs and the seconds of a plan count only the rows inside the window. */
TEST(attention_window_plan)
{
    const double length = 256, window = 32;
    const double seen = length * (length + 1) / 2 - (length - window) * (length - window + 1) / 2;
    double flops[2], seconds[2];
    for (int k = 0; k < 2; k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_costs costs = tt_costs_default();
        tt_attention_options o = tt_attention_options_default(4);
        tt_compile_options c = tt_compile_options_default();
        o.causal = true;
        o.window = k ? 32 : 0;
        costs.memory = 1e30; /* so that only FLOPs take time */
        c.costs = &costs;
        const tt_value x = tt_input(t, "x", TT_F32, 512, 16), y = tt_input(t, "y", TT_F32, 512, 16);
        const tt_value starts = tt_seq_start(t, "starts", 2);
        const int64_t dims[] = {16, 16};
        const tt_init ones = {TT_INIT_ONES, 1};
        const tt_value h = tt_linear(t, x, tt_param_new(ctx, "w", 2, dims, ones), NULL);
        const tt_value out = tt_attention(t, h, h, h, starts, &o);
        tt_program *p = tt_compile(t, tt_mean_squared_error(t, out, y, tt__handle(t, 0)), &c);
        REQUIRE(p != NULL);
        flops[k] = tt_program_plan(p).flops;
        seconds[k] = tt_program_plan(p).compute_seconds;
        if (k == 1) { /* the forward has two products, the backward four, each with 2 FLOPs for a term */
            const double saved = 12 * 2 * 16 * (length * length / 2 - seen);
            CHECK_NEAR(flops[0] - flops[1], saved, 1e-9 * saved);
            CHECK_NEAR(seconds[0] - seconds[1], saved / costs.attention_f32, 1e-6 * seconds[0]);
        }
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Compares attention by dot products or tiles with attention in fp32 on the same bf16 numbers. Covers several
   blocks of keys and queries, and head sizes that fill no tile. */
static void attention_of_bf16(const char *by)
{
    enum { ROWS = 434, WIDTH = 160, MAX = ROWS * WIDTH, LISTED = 40 };
    static const int sizes[] = {64, 32, 80, 20, 160, 1};
    /* index: LISTED queries, in any order */
    static int32_t starts[] = {0, 300, 301, 400, ROWS}, index[LISTED];
    static uint16_t x[4][MAX], grad[2][3][MAX], kept[MAX];
    static float out[2][MAX], lse[2][ROWS * WIDTH];
    uint64_t random = 11;
    for (int k = 0; k < 4; k++)
        for (int e = 0; e < MAX; e++) {
            float y = (float)test_random(&random) * 0x1p-31f - 1;
            tt__convert(&x[k][e], TT_BF16, &y, TT_F32, 1);
        }
    for (int k = 0; k < LISTED; k++) index[k] = (int32_t)(test_random(&random) % ROWS);
    for (int c = 0; c < 16 * TT__COUNT(sizes); c++) {
        const bool causal = c % 2, drop = c / 2 % 2, listed = c / 4 % 2, windowed = c / 8 % 2;
        const int d = sizes[c / 16], heads = tt__max(1, tt__min(3, WIDTH / d)), width = heads * d,
                  queries = listed ? LISTED : ROWS;
        static const char *const names[] = {"out", "dq", "dk", "dv"};
        for (int narrow = 0; narrow < 2; narrow++) {
            test_allocator a;
            tt_context_options co = test_options(&a);
            co.threads = 2;
            tt_context *ctx = open_isa(co, narrow ? by : "avx512");
            tt__step_settings run;
            memset(&run, 0, sizeof run);
            for (int back = 0; back < 2; back++) {
                tt__instr i = tt__new_instr(back ? TT__OP_ATTENTION_BACKWARD : TT__OP_ATTENTION);
                tt__launch l;
                size_t bytes = tt__attention_workspace(ROWS, d, 1, back, 2) +
                               tt__attention_queries_bytes(4, LISTED);
                memset(&l, 0, sizeof l);
                i.attr.heads = i.attr.key_heads = heads;
                i.attr.causal = causal;
                i.attr.window = windowed ? 70 : 0;
                i.attr.alibi = windowed ? 0.1f : 0;
                i.attr.alibi_heads = windowed ? heads : 0;
                i.attr.dropout = drop ? 0.25f : 0;
                i.attr.scale = c % 3 ? 1.5f / sqrtf((float)d) : -0.5f;
                l.device = (tt__device *)(void *)&ctx->cpu;
                l.instr = &i;
                l.in[TT__RUN_IN].data = &run;
                for (int k = 0; k < 3; k++) {
                    tt__mat m = {x[k], TT_BF16, k ? ROWS : queries, width, width};
                    l.in[back + k] = m;
                }
                tt__mat begin = {starts, TT_I32, TT__COUNT(starts), 1, 1},
                        list = {index, TT_I32, LISTED, 1, 1};
                tt__mat o = {back ? (void *)kept : (void *)out[narrow], back ? TT_BF16 : TT_F32, queries,
                             width, width},
                        sums = {lse[narrow], TT_F32, queries, heads, heads};
                l.in[3 + back] = begin;
                if (listed) l.in[back ? 7 : 4] = list;
                if (back) {
                    tt__mat dout = {x[3], TT_BF16, queries, width, width};
                    if (!narrow) tt__convert(kept, TT_BF16, out[0], TT_F32, (size_t)(queries * width));
                    sums.data = lse[0];
                    l.in[0] = dout;
                    l.in[5] = o;
                    l.in[6] = sums;
                    for (int k = 0; k < 3; k++) {
                        tt__mat m = {grad[narrow][k], TT_BF16, k ? ROWS : queries, width, width};
                        l.out[k] = m;
                    }
                } else {
                    l.out[0] = o;
                    l.out[1] = sums;
                }
                l.workspace = tt__alloc(ctx, bytes);
                memset(l.workspace, 0xff, bytes);
                CHECK(ctx->cpu.isa->run[i.op](&l) == TT_OK);
                tt__free(ctx, l.workspace);
            }
            TEST_CLOSE(ctx, &a);
        }
        for (int k = 0; k < 4; k++) {
            double max = 0, off = 0;
            for (int e = 0; e < (k < 2 ? queries : ROWS) * width; e++) {
                double got = k ? tt__from_bf16(grad[1][k - 1][e]) : out[1][e],
                       expected = k ? tt__from_bf16(grad[0][k - 1][e]) : out[0][e];
                double difference = fabs(got - expected);
                if (fabs(expected) > max) max = fabs(expected);
                if (!(difference <= off)) off = difference;
            }
            snprintf(where, sizeof where, "%s, %d heads of %d%s%s%s%s, %s: off by %g of %g", by, heads, d,
                     causal ? ", causal" : "", drop ? ", dropout" : "", listed ? ", listed" : "",
                     windowed ? ", window and alibi" : "", names[k], off, max);
            /* The backward rounds attention weights and their gradients to bf16. */
            report(off <= (k ? 0.02 : 2e-5) * max && max > 0.01, "bf16 and fp32 differ");
        }
    }
}

TEST(attention_by_dot)
{
    if (!has_isa("avx512_dot")) SKIP("this CPU has no AVX-512 with bf16");
    attention_of_bf16("avx512_dot");
}

TEST(attention_by_tiles)
{
    if (!has_isa("avx512_tiles")) SKIP("this CPU has no tiles");
    attention_of_bf16("avx512_tiles");
}

/* Returns how many of the tape's instructions sum columns of attention's gradients. Writes to `got` the
   gradients of the biases of q, k and v after two micro-batches. If `packed`, one layer makes q, k and v. */
enum { BIASED_ROWS = 75, BIASED_HEAD = 24, BIASED_LISTED = 9 };
static int biases_of_attention(const char *isa, const char *precision, bool packed, int key_heads,
                               bool listed, float *got)
{
    enum { ROWS = BIASED_ROWS, HEADS = 2, WIDTH = HEADS * BIASED_HEAD, IN = 17 };
    static const char *const names[] = {"q", "k", "v"};
    const int widths[] = {WIDTH, key_heads * BIASED_HEAD, key_heads * BIASED_HEAD};
    const int all = widths[0] + widths[1] + widths[2], queries = listed ? BIASED_LISTED : ROWS;
    static const int32_t starts[] = {0, 40, 41, ROWS};
    test_allocator a;
    tt_context *ctx = open_isa(test_options(&a), isa);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options c = tt_compile_options_default();
    tt_attention_options o = tt_attention_options_default(HEADS);
    const tt_init init = {TT_INIT_NORMAL, 0.4f};
    tt_param *w[3], *b[3], *last;
    tt_value parts[3];
    float x[ROWS * IN], y[ROWS * WIDTH];
    int32_t rows[BIASED_LISTED];
    uint64_t s = 3;
    int found = 0;
    for (int k = 0; k < ROWS * IN; k++) x[k] = (float)test_random(&s) * 0x1p-31f - 1;
    for (int k = 0; k < ROWS * WIDTH; k++) y[k] = (float)test_random(&s) * 0x1p-31f - 1;
    for (int k = 0; k < BIASED_LISTED; k++) rows[k] = (k * 31 + 5) % ROWS;
    o.causal = !listed;
    const tt_value in = tt_input(t, "x", TT_F32, ROWS, IN), start = tt_input(t, "starts", TT_I32, 4, 1);
    const tt_value at = tt_input(t, "rows", TT_I32, BIASED_LISTED, 1);
    const tt_value target = tt_input(t, "y", TT_F32, queries, WIDTH);
    for (int k = 0; k < 3; k++) {
        const int64_t dims[] = {packed ? all : widths[k], IN};
        if (k == 0 || !packed) {
            w[k] = tt_param_new(ctx, names[k], 2, dims, init);
            b[k] = tt_param_new(ctx, packed ? "b" : k == 0 ? "bq" : k == 1 ? "bk" : "bv", 1, dims, init);
        }
        parts[k] = packed && k ? parts[0] : tt_linear(t, in, w[k], b[k]);
        if (packed && k == 2) {
            parts[1] = tt_slice(t, parts[0], widths[0], widths[1]);
            parts[2] = tt_slice(t, parts[0], widths[0] + widths[1], widths[2]);
            parts[0] = tt_slice(t, parts[0], 0, widths[0]);
        }
    }
    const int64_t dims[] = {WIDTH, WIDTH};
    last = tt_param_new(ctx, "last", 2, dims, init);
    const tt_value q = listed ? tt_gather_rows(t, parts[0], at) : parts[0];
    const tt_value out = listed ? tt_attention_rows(t, q, parts[1], parts[2], start, at, &o)
                                : tt_attention(t, q, parts[1], parts[2], start, &o);
    const tt_value loss = tt_mean_squared_error(t, tt_linear(t, out, last, NULL), target, tt__handle(t, 0));
    c.device = is_cuda(isa) ? "cuda" : "cpu";
    c.precision = precision;
    c.accumulate = true;
    tt_program *p = tt_compile(t, loss, &c);
    if (report(p != NULL, "%s", tt_error(ctx))) {
        for (int k = 0; k < 2; k++)
            CHECK(tt_set(p, in, x, ROWS) == TT_OK && tt_set(p, start, starts, 4) == TT_OK &&
                  (!listed || tt_set(p, at, rows, BIASED_LISTED) == TT_OK) &&
                  tt_set(p, target, y, queries) == TT_OK && tt_micro_step(p, NULL) == TT_OK);
        for (int k = 0, from = 0; k < (packed ? 1 : 3); from += widths[k++])
            CHECK(tt_get_gradient(p, b[k], got + from) == TT_OK);
        for (int k = 0; k < p->built.t->n_code; k++)
            for (int j = 0; j < 3 && p->built.t->code[k].op == TT__OP_ATTENTION_BACKWARD; j++)
                found += tt__column_sums(&p->built.t->code[k], j) != 0;
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return found;
}

TEST(biases_of_attention_cuda)
{
    static const char *const precision[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed"};
    if (!has_isa("cuda")) SKIP("this build is without TINYTRAIN_CUDA");
#ifdef TT_EMULATE
    emu_configure(1, (size_t)16 << 20, 1, 1);
#endif
    for (int c = 0; c < 4 * 8; c++) {
        const bool packed = c / 4 % 2, listed = c / 16;
        const int key_heads = c / 8 % 2 + 1, width = 2 * BIASED_HEAD, keys = key_heads * BIASED_HEAD;
        float got[2][6 * BIASED_HEAD];
        snprintf(where, sizeof where, "%s, %d heads of keys%s%s", precision[c % 4], key_heads,
                 packed ? ", packed" : "", listed ? ", listed queries" : "");
        biases_of_attention("portable", precision[c % 4], packed, key_heads, listed, got[0]);
        const int found = biases_of_attention("cuda", precision[c % 4], packed, key_heads, listed, got[1]);
        /* If queries are listed and the gradient is packed, attention's backward cannot sum the columns of
           q's gradient: later instructions still add numbers to rows of that gradient. */
        const int expected = c % 4 == 0 || (listed && packed) ? 0 : 3;
        report(found == expected, "attention's backward has %d sums of columns, not %d", found, expected);
        for (int k = 0, from = 0; k < 3; from += k++ ? keys : width) {
            double max = 0, off = 0; /* gradients of keys' biases are 0 up to rounding */
            for (int e = 0; e < (k == 1 ? width : k ? keys : width); e++)
                max = fmax(max, fabs((double)got[0][(k == 1 ? 0 : from) + e]));
            for (int e = 0; e < (k ? keys : width); e++)
                off = fmax(off, fabs((double)got[1][from + e] - got[0][from + e]));
            report(off <= 0.05 * max && max > 0, "biases of %c differ by %g of %g", "qkv"[k], off, max);
        }
    }
}
