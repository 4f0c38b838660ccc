/* Tests of single ops: exact numbers, numbers far from zero, rounded numbers, rotary embeddings and dropout.
   Also tests of inputs that a program does not need, and of tt_device_text. */
#pragma once

/* Every op with a backward has a case, and the gradient tests have run every op. */
TEST(every_op_has_a_case)
{
    for (int op = 0; op < TT__OP_COUNT; op++) {
        const tt__instr i = tt__new_instr(op);
        const tt__gradient *how = &tt__rules_of(&i)->backward;
        const bool of_caller = op == TT__OP_CUSTOM; /* test_program.c tests CUSTOM */
        /* test_tensor.c tests collectives */
        bool found = (!how->emit && !how->reads) || op >= TT__OP_ALL_REDUCE;
        found = found || of_caller;
        for (int c = 0; c < CASE_COUNT; c++) found |= cases[c].op == op;
        snprintf(where, sizeof where, "op '%s'", tt__ops[op].name);
        report(found, "has a backward, but no line in CASES");
    }
    if (!ran[TT__OP_FILL] || getenv("TEST_PART")) return; /* not all gradient tests ran in this process */
    for (int op = 0; op < TT__OP_COUNT; op++) {
        snprintf(where, sizeof where, "op '%s'", tt__ops[op].name);
        bool streams = tt__ops[op].flags & TT__ANY_SPACE; /* test_planner.c tests these ops */
        bool of_ranks = op >= TT__OP_ALL_REDUCE;          /* test_ranks.c tests these ops */
        bool caches = op == TT__OP_STORE_ROWS;            /* has no backward; test_lm.c tests it */
        bool fp8 = op == TT__OP_QUANTIZE || op == TT__OP_FP8_HISTORY; /* the test training_in_fp8 runs
                                                                         these ops */
        const bool of_caller = op == TT__OP_CUSTOM || op == TT__OP_CUSTOM_BACKWARD ||
                               /* test_program.c tests these ops */
                               op == TT__OP_CUSTOM_UPDATE || op == TT__OP_EMA;
        const bool update = op == TT__OP_LION || op == TT__OP_MUON_MOMENTUM || op == TT__OP_UNIT ||
                            op == TT__OP_MUON || op == TT__OP_ADAFACTOR ||
                            op == TT__OP_MOVEMENT || op == TT__OP_PRUNE; /* test_optim.c tests these ops */
        report(ran[op] || of_caller || streams || of_ranks || caches || fp8 || update,
               "was in no program of the gradient tests");
    }
}

/* Far from 0 an activation is x, 0, 1 or -1, and its derivative is 1 or 0. The rounding error of a difference
   of about `1 - 1` must not be multiplied by a large x. */
TEST(activations_far_from_zero)
{
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon"};
    static float x[8] = {-1e4f, 1e4f, -200, 200, -90, 90, -1e10f, 1e10f};
    for (int k = 0; k < 4; k++)
        for (int act = TT__ACT_NONE + 1; act < TT__ACT_COUNT && has_isa(isa[k]); act++) {
            test_allocator a;
            tt_context_options co = test_options(&a);
            tt_context *ctx = open_isa(co, isa[k]);
            int64_t dims[2] = {1, 8};
            tt_init zeros = {TT_INIT_ZEROS, 0};
            tt_compile_options o = tt_compile_options_default();
            tt_param *w = tt_param_new(ctx, "w", 2, dims, zeros);
            tt_tape *t = tt_tape_new(ctx);
            tt_value y = tt__activation(t, tt_param_value(t, w), act),
                     target = tt_input(t, "target", TT_F32, 1, 8);
            tt_value loss = tt_mean_squared_error(t, y, target, tt__handle(t, 0));
            float far[8], got[8], gradient_of[8];
            tt_output(t, y);
            tt_param_set(w, x);
            o.accumulate = true;
            tt_program *p = tt_compile(t, loss, &o);
            for (int c = 0; c < 8; c++) far[c] = -4e12f; /* the incoming gradient is 1e12 */
            if (CHECK(p && tt_set(p, target, far, 1) == TT_OK && tt_micro_step(p, NULL) == TT_OK &&
                      tt_get(p, y, got, 8) == TT_OK && tt_get_gradient(p, w, gradient_of) == TT_OK))
                for (int c = 0; c < 8; c++) {
                    const bool flat = act == TT__ACT_TANH || act == TT__ACT_SIGMOID;
                    const double below = act == TT__ACT_TANH ? -1 : 0;
                    const double limit = x[c] < 0 ? below : flat ? 1 : x[c];
                    snprintf(where, sizeof where, "%s(%g), %s", tt__act_name(act), (double)x[c], isa[k]);
                    report(fabs(got[c] - limit) <= 1e-12 * fabs((double)x[c]), "is %.9g, expected %.9g",
                           (double)got[c], limit);
                    report(fabs(gradient_of[c] / 1e12 - (flat ? 0 : limit > 0)) <= 0.003,
                           "has the derivative %.9g", gradient_of[c] / 1e12);
                }
            tt_program_free(p);
            tt_tape_free(t);
            TEST_CLOSE(ctx, &a);
        }
}

/* A product `a b^T` may have more columns than b has rows. The columns beyond b's rows get no share of a
   softmax and no class of a cross-entropy, in every precision. f16 cannot hold the number that fills these
   columns in other dtypes. */
TEST(matmul_ignores_columns_beyond)
{
    static const char *const isa[] = {"portable", "avx2", "avx512", "cuda"};
    enum { ROOM = 11, ROWS_ = 3, D = 5 };
    static const int32_t targets[ROWS_] = {2, 0, 1};
    for (int k = 0; k < TEST_COUNT(isa) * PRECISIONS; k++) {
        const precision_case *precision = &precisions[k % PRECISIONS];
        if (!has_isa(isa[k / PRECISIONS])) continue;
        test_allocator a;
        tt_context_options co = test_options(&a);
        tt_context *ctx = open_isa(co, isa[k / PRECISIONS]);
        const int64_t dims[2] = {D, D};
        const tt_init normal = {TT_INIT_NORMAL, 1};
        tt_param *w = tt_param_new(ctx, "w", 2, dims, normal);
        tt_tape *t = tt_tape_new(ctx);
        const int64_t rows = tt_axis(t, "rows", ROOM);
        tt_value x = tt_input(t, "x", TT_F32, rows, D), y = tt_input(t, "y", TT_I32, rows, 1);
        tt_value h = tt_linear(t, x, w, NULL), scores = tt_matmul(t, h, h, NULL);
        tt_value shares = tt_softmax(t, scores);
        tt_value loss = tt_cross_entropy(t, tt_matmul(t, h, h, NULL), y, NULL);
        float in[ROWS_ * D], share[ROWS_ * ROOM], score[ROWS_ * ROOM], gradient_of[D * D];
        tt_stats stats;
        tt_compile_options o = tt_compile_options_default();
        uint64_t random = 3;
        tt_output(t, scores);
        tt_output(t, shares);
        compile_in(&o, isa[k / PRECISIONS], precision);
        o.accumulate = true;
        o.loss_scale.init = 1;
        snprintf(where, sizeof where, "%s, %s", isa[k / PRECISIONS], precision->name);
        for (int e = 0; e < ROWS_ * D; e++)
            in[e] = (float)((double)test_random(&random) / 2147483648.0 - 1);
        tt_program *p = tt_compile(t, loss, &o);
        bool ok = p && tt_set(p, x, in, ROWS_) == TT_OK && tt_set(p, y, targets, ROWS_) == TT_OK &&
                  tt_micro_step(p, &stats) == TT_OK && tt_get_gradient(p, w, gradient_of) == TT_OK &&
                  tt_get(p, shares, share, ROWS_ * ROOM) == TT_OK &&
                  tt_get(p, scores, score, ROWS_ * ROOM) == TT_OK;
        double mean = 0;
        report(ok, "%s", tt_error(ctx));
        for (int r = 0; r < ROWS_ && ok; r++) {
            double sum = 0, exps = 0;
            for (int c = 0; c < ROOM; c++) {
                sum += share[r * ROOM + c];
                exps += c < ROWS_ ? exp(score[r * ROOM + c]) : 0;
                report(c < ROWS_ ? share[r * ROOM + c] > 0 : share[r * ROOM + c] == 0,
                       "column %d of row %d has the share %g", c, r, (double)share[r * ROOM + c]);
                report(isfinite(score[r * ROOM + c]), "column %d of row %d is not finite", c, r);
            }
            report(fabs(sum - 1) <= 0.02, "the shares of row %d sum to %g", r, sum);
            mean += (log(exps) - score[r * ROOM + targets[r]]) / ROWS_;
        }
        report(fabs(stats.loss - mean) <= 0.05 * fabs(mean) + 0.02, "the loss is %g, expected %g",
               (double)stats.loss, mean);
        for (int e = 0; e < D * D && ok; e++)
            report(isfinite(gradient_of[e]), "gradient %d is %g", e, (double)gradient_of[e]);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* ------------------------------------------------------------------------------------------------- rotary */

/* Each scaling has the frequencies and magnitudes of ROPE_INIT_FUNCTIONS of transformers 5.23. One row (1, 0)
   is rotated by position 1, another by position 100003, where an angle computed in fp32 may have a large
   error. */
TEST(rotary_scaling)
{
    static const struct {
        const char *name; tt_rotary_scaling scaling; int size, original;
        float base, factor, low, high; double magnitude, frequency[8];
    } rows[] = {
        {"plain", TT_ROTARY_PLAIN, 4, 0, 100, 0.5f, -1, -1, 1, {1, 0.1}},
        {"linear", TT_ROTARY_LINEAR, 8, 8192, 10000, 4, 0, 0, 1, {0.25, 0.025, 0.0024999999, 0.00025000001}},
        {"llama3", TT_ROTARY_LLAMA3, 16, 8192, 500000, 8, 0, 0, 1,
         {1, 0.19392276, 0.037606031, 0.0072926651, 0.00052484602, 3.4281024e-05, 6.6478697e-06,
          1.2891732e-06}},
        {"yarn", TT_ROTARY_YARN, 16, 4096, 10000, 16, 0, 0, 1.2772588722239782,
         {1, 0.31622776, 0.1, 0.024211189, 0.0053125001, 0.00093880121, 6.2500003e-05, 1.9764237e-05}},
        {"yarn of other turns", TT_ROTARY_YARN, 12, 32768, 1000000, 4, 2, 24, 1.138629436111989,
         {1, 0.099999994, 0.0099999988, 0.00062500004, 2.4999992e-05, 2.5000008e-06}},
    };
    const int far = 100003; /* position of the second row; also the angle of pair 0, whose frequency is 1 */
    for (size_t k = 0; k < TT__COUNT(rows); k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_rotary_options o = tt_rotary_options_default(1);
        tt_compile_options c = tt_compile_options_default();
        const int size = rows[k].size, pairs = size / 2;
        float in[2 * 16] = {0}, out[2 * 16] = {0};
        int32_t position[2] = {1, far};
        o.scaling = rows[k].scaling;
        o.base = rows[k].base;
        o.factor = rows[k].factor;
        o.original = rows[k].original;
        o.low = rows[k].low;
        o.high = rows[k].high;
        for (int j = 0; j < pairs; j++) in[j] = in[size + j] = 1;
        tt_value x = tt_input(t, "x", TT_F32, 2, size), at = tt_input(t, "at", TT_I32, 2, 1);
        tt_value y = tt_rotary(t, x, at, &o);
        tt_output(t, y);
        c.train = false;
        c.device = "cpu";
        tt_program *p = tt_compile(t, y, &c);
        CHECK(p && tt_set(p, x, in, 2) == TT_OK && tt_set(p, at, position, 2) == TT_OK &&
              tt_run(p, NULL) == TT_OK && tt_get(p, y, out, 2 * size) == TT_OK);
        for (int j = 0; j < pairs; j++) {
            const double cosine = out[j], sine = out[pairs + j], expected = rows[k].frequency[j];
            snprintf(where, sizeof where, "%s, pair %d", rows[k].name, j);
            report(fabs(atan2(sine, cosine) - expected) <= 1e-6 * expected, "turns by %.9g, expected %.9g",
                   atan2(sine, cosine), expected);
            report(fabs(hypot(sine, cosine) - rows[k].magnitude) <= 1e-6, "is multiplied by %.9g, not %.9g",
                   hypot(sine, cosine), rows[k].magnitude);
        }
        if (rows[k].frequency[0] == 1) {
            CHECK_NEAR(out[size], rows[k].magnitude * cos(far), 1e-6);
            CHECK_NEAR(out[size + pairs], rows[k].magnitude * sin(far), 1e-6);
        }
        position[1] = 1 << 24;
        CHECK(p && tt_set(p, x, in, 2) == TT_OK && tt_set(p, at, position, 2) == TT_OK &&
              tt_run(p, NULL) == TT_ERR_ARGUMENT && strstr(tt_error(ctx), "'at' has 16777216 in row 1"));
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* ------------------------------------------------------------------------------------------------ dropout */

/* Masks follow the documented generator in every step and micro-batch. They are equal in a second run, and
   differ between steps and micro-batches. */
TEST(dropout_masks)
{
    static const size_set size = {"masks", 3, 37, 1, 1, 1, {150, 50}, NULL, false};
    const uint32_t zero[4] = {0, 0, 0, 0};
    uint32_t u[4];
    double first[4] = {0, 0, 0, 0};
    philox(10, zero, 0, u); /* the published test vectors of Random123 */
    CHECK(u[0] == 0x6627e8d5u && u[1] == 0xe169c58du && u[2] == 0xbc57ac4cu && u[3] == 0x9b00dbd8u);
    philox(7, zero, 0, u);
    CHECK(u[0] == 0x5f6fb709u && u[1] == 0x0d893f64u && u[2] == 0x4f121f81u && u[3] == 0x4f730a48u);
    for (int accumulate = 0; accumulate < 2; accumulate++)
        for (int again = 0; again < 2; again++) {
            net n;
            tt_compile_options o = tt_compile_options_default();
            op_case c = {"masks", TT__OP_DROPOUT, NULL};
            o.accumulate = accumulate;
            net_open(&n, &c, &size, "portable", AS_PARAM, false, false);
            int x = V(ROWS, g->d), y = dropout(x, 0.1f), z = dropout(y, 0.25f), count = 200 * g->d,
                loss = loss_of(z, false);
            float *got = (float *)malloc(sizeof(float) * (size_t)count);
            tt_output(g->tape, g->nodes[y].t);
            tt_output(g->tape, g->nodes[z].t);
            g->train = true;
            tt_program *p = tt_compile(g->tape, g->nodes[loss].t, &o);
            for (int k = 0; k < 4 && CHECK(p != NULL); k++) {
                long kept_elements = 0;
                snprintf(where, sizeof where, "dropout, run %d, %s", k,
                         accumulate ? "micro-batches" : "steps");
                g->step = accumulate ? 0 : (uint64_t)k;
                g->micro = accumulate ? (uint64_t)k : 0;
                evaluate();
                CHECK(set_inputs(p) && (accumulate ? tt_micro_step(p, NULL) : tt_step(p, 0, NULL)) == TT_OK);
                check_result(p, y, &precisions[0]);
                check_result(p, z, &precisions[0]);
                double sum = 0;
                tt_get(p, g->nodes[z].t, got, (size_t)count);
                for (int e = 0; e < count; e++) { sum += got[e] * (1 + e % 7); kept_elements += got[e] != 0; }
                if (again) report(first[k] == sum, "another run gives another mask");
                first[k] = sum;
                for (int j = 0; j < k; j++) report(first[j] != sum, "two runs have the same mask");
                double p_kept = 0.9 * 0.75;
                CHECK_NEAR((double)kept_elements / count, p_kept,
                           4 * sqrt(p_kept * (1 - p_kept) / count) + 2.0 / 65536);
            }
            free(got);
            tt_program_free(p);
            net_close();
        }
}

/* Checks all bits of products whose sums are exact in fp32 in any order. The shapes have partial panels,
   tiles and blocks in each direction, and sums so long that a second and a third block continue them. */
TEST(products_exact)
{
    enum { MAX = 1100 * 1100 };
    static const char *const isa[] = {"portable",     "avx2", "avx512",  "avx512_dot",
                                      "avx512_tiles", "neon", "neon_dot"};
    static const int op[] = {TT__OP_LINEAR, TT__OP_LINEAR_DX, TT__OP_LINEAR_DW},
                     shape[][3] = {{1100, 40, 200},  {40, 1100, 200}, {1100, 20, 800}, {25, 1100, 800},
                                   {1100, 1100, 20}, {33, 29, 1700},  {161, 97, 129},  {64, 96, 64}};
    static const char *const names[] = {"forward", "dx", "dw"};
    static float x[2][MAX], got[MAX], expected[MAX];
    static uint16_t half[2][MAX];
    uint64_t random = 5;
    for (int k = 0; k < 2; k++)
        for (int e = 0; e < MAX; e++) {
            x[k][e] = (float)((int)(test_random(&random) % 17) - 8) / 8;
            tt__convert(&half[k][e], TT_BF16, &x[k][e], TT_F32, 1);
        }
    for (int c = 0; c < TT__COUNT(op) * TT__COUNT(shape); c++) {
        /* an (m, n) result; each element sums k products */
        const int which = c % TT__COUNT(op), *z = shape[c / TT__COUNT(op)], m = z[0], n = z[1], k = z[2];
        const int a_row = which == 2 ? 1 : k, a_col = which == 2 ? m : 1, b_row = which == 0 ? 1 : n,
                  b_col = which == 0 ? k : 1;
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j++) {
                double sum = 0;
                for (int e = 0; e < k; e++)
                    sum += (double)x[0][i * a_row + e * a_col] * (double)x[1][e * b_row + j * b_col];
                expected[i * n + j] = (float)sum;
            }
        for (int s = 0; s < TT__COUNT(isa); s++)
            for (int f32 = is_bf16(isa[s]); has_isa(isa[s]) && f32 < 2; f32++) {
                test_allocator a;
                tt_context_options co = test_options(&a);
                co.threads = 2;
                tt_context *ctx = open_isa(co, isa[s]);
                tt__instr i = tt__new_instr(op[which]);
                tt__launch l;
                size_t bytes = tt__gemm_workspace(m, n, k);
                bool wide = f32 && !is_bf16(isa[s]);
                memset(&l, 0, sizeof l);
                memset(got, 0xff, sizeof got);
                i.attr.narrow = TT_F32;
                l.device = (tt__device *)(void *)&ctx->cpu;
                l.instr = &i;
                tt__mat left = {wide ? (void *)x[0] : (void *)half[0], wide ? TT_F32 : TT_BF16,
                                which == 2 ? k : m, which == 2 ? m : k, which == 2 ? m : k};
                tt__mat right = {wide ? (void *)x[1] : (void *)half[1], wide ? TT_F32 : TT_BF16,
                                 which == 0 ? n : k, which == 0 ? k : n, which == 0 ? k : n};
                tt__mat to = {got, TT_F32, m, n, n};
                l.in[0] = left;
                l.in[1] = right;
                l.out[0] = to;
                l.workspace = tt__alloc(ctx, bytes);
                memset(l.workspace, 0xff, bytes);
                CHECK(ctx->cpu.isa->run[i.op](&l) == TT_OK);
                tt__free(ctx, l.workspace);
                snprintf(where, sizeof where, "%s, %s, %s, %d x %d x %d", isa[s], wide ? "f32" : "bf16",
                         names[which], m, n, k);
                report(memcmp(got, expected, sizeof *got * (size_t)(m * n)) == 0,
                       "other bits than those of exact sums");
                TEST_CLOSE(ctx, &a);
            }
    }
}

/* With tt_swiglu, fewer activations are in memory at the peak than with separate ops: at least one value of
   shape (rows, hidden) is missing, `silu(gate)` or its gradient. */
TEST(swiglu_keeps_less)
{
    enum { ROWS_ = 256, WIDTH = 16, HIDDEN = 512 };
    for (int half = 0; half < 2; half++) {
        size_t bytes[2];
        for (int fused = 0; fused < 2; fused++) {
            test_allocator a;
            tt_context *ctx = test_open(&a);
            tt_tape *t = tt_tape_new(ctx);
            tt_param *w[3];
            tt_compile_options c = tt_compile_options_default();
            const tt_init init = {TT_INIT_NORMAL, 0.1f};
            if (half) c.precision = "bf16-mixed";
            for (int k = 0; k < 3; k++) {
                static const char *const names[] = {"gate", "up", "down"};
                const int64_t dims[] = {k < 2 ? HIDDEN : WIDTH, k < 2 ? WIDTH : HIDDEN};
                w[k] = tt_param_new(ctx, names[k], 2, dims, init);
            }
            const tt_value x = tt_input(t, "x", TT_F32, ROWS_, WIDTH);
            const tt_value y = tt_input(t, "y", TT_F32, ROWS_, WIDTH);
            const tt_value gate = tt_linear(t, x, w[0], NULL), up = tt_linear(t, x, w[1], NULL);
            const tt_value h = fused ? tt_swiglu(t, gate, up) : tt_mul(t, tt_silu(t, gate), up);
            tt_program *p = tt_compile(t, tt_mean_squared_error(t, tt_linear(t, h, w[2], NULL), y,
                                                                tt__handle(t, 0)), &c);
            REQUIRE(p != NULL);
            bytes[fused] = tt_program_plan(p).at_peak[TT_MEM_ACTIVATIONS];
            tt_program_free(p);
            tt_tape_free(t);
            TEST_CLOSE(ctx, &a);
        }
        CHECK(bytes[0] - bytes[1] >= (size_t)ROWS_ * HIDDEN * (half ? 2 : 4));
    }
}

/* Each instruction set widens and narrows every f16 number, and f32 numbers below, at and above the middle
   between neighbours, as the scalar functions do. The scalar functions are checked against ldexp and
   round-to-nearest-even. */
TEST(f16_conversions)
{
    enum { PATTERNS = 65536, COLS = 64, ROWS = 4 * PATTERNS / COLS };
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon"};
    uint16_t *half = (uint16_t *)calloc(4 * PATTERNS, sizeof(uint16_t));
    float *wide = (float *)calloc(4 * PATTERNS, sizeof(float)),
          *zero = (float *)calloc(4 * PATTERNS, sizeof(float)),
          *got = (float *)calloc(4 * PATTERNS, sizeof(float));
    for (int k = 0; k < PATTERNS; k++) {
        int exponent = k >> 10 & 31, fraction = k & 1023;
        double x = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24),
               above = exponent ? ldexp(1025 + fraction, exponent - 25) : ldexp(fraction + 1, -24);
        float sign = k >> 15 ? -1.0f : 1.0f, f = tt__from_f16((uint16_t)k);
        if (exponent == 31) CHECK(fraction ? f != f : f == sign * INFINITY);
        else CHECK(f == sign * (float)x && tt__to_f16(f) == k);
        /* the number itself, and about a third, a half and two thirds of the way to the next: all are f32 */
        for (int part = 0; part < 4; part++) {
            double between = x + (above - x) * (part == 3 ? 0.6875 : part * 0.3125);
            if (part == 2) between = (x + above) / 2;
            float y = exponent == 31 ? f : sign * (float)between;
            uint16_t expected = part < 2 || (part == 2 && k % 2 == 0) ? (uint16_t)k : (uint16_t)(k + 1);
            if (exponent < 31) CHECK(tt__to_f16(y) == expected);
            wide[4 * k + part] = y;
            half[4 * k + part] = (uint16_t)k;
        }
    }
    for (int k = 0; k < 4; k++) {
        if (!has_isa(isa[k])) continue;
        test_allocator a;
        tt_context *ctx = open_isa(test_options(&a), isa[k]);
        tt_tape *t = tt_tape_new(ctx);
        tt_compile_options o = tt_compile_options_default();
        int wrong = 0;
        tt_value h = tt_input(t, "half", TT_F16, ROWS, COLS), w = tt_input(t, "wide", TT_F32, ROWS, COLS),
                 z = tt_input(t, "zero", TT_F32, ROWS, COLS);
        /* The result of tt_add has the dtype of the first operand. */
        tt_value zh = tt_input(t, "zero half", TT_F16, ROWS, COLS), widened = tt_add(t, z, h),
                 narrowed = tt_add(t, zh, w);
        tt_output(t, narrowed);
        o.train = false;
        tt_program *p = tt_compile(t, widened, &o);
        for (int part = 0; part < 2 && CHECK(p != NULL); part++) {
            CHECK(tt_set(p, h, half, ROWS) == TT_OK && tt_set(p, w, wide, ROWS) == TT_OK &&
                  tt_set(p, z, zero, ROWS) == TT_OK && tt_set(p, zh, zero, ROWS) == TT_OK);
            CHECK(tt_run(p, NULL) == TT_OK &&
                  tt_get(p, part ? narrowed : widened, got, 4 * PATTERNS) == TT_OK);
            for (int e = 0; e < 4 * PATTERNS; e++) {
                float expected = part ? tt__from_f16(tt__to_f16(wide[e])) : tt__from_f16(half[e]);
                wrong += expected != expected ? got[e] == got[e] : got[e] != expected;
            }
        }
        snprintf(where, sizeof where, "f16, %s", isa[k]);
        report(wrong == 0, "%d of %d numbers are converted wrongly", wrong, 8 * PATTERNS);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
    /* Stochastic rounding gives one of the two neighbours. Its probability of the upper neighbour is
       proportional to the distance from the lower neighbour. */
    for (int k = 0; k < 2 * PATTERNS; k++) {
        float x = wide[2 * k];
        uint32_t ups = 0, draws = 64;
        int pattern = k / 2;
        if ((pattern & 0x7fff) > 0x7bfe) continue;
        /* f16 drops 13 bits of x, so the lower 13 random bits decide. In `r * 1024` these 13 bits have 8
           values, each equally often. */
        for (uint32_t r = 0; r < draws; r++) {
            uint16_t y = f16_stochastic(x, r * 1024);
            CHECK(y == pattern || y == pattern + 1);
            ups += y != pattern;
        }
        CHECK(ups == (k % 2 ? draws / 2 : 0));
    }
    free(half);
    free(wide);
    free(zero);
    free(got);
}

/* Inputs that the program does not need may be set. Unneeded inputs must not disturb the needed inputs. */
TEST(unused_inputs)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int64_t dims[2] = {2, 3};
    tt_init ones = {TT_INIT_ONES, 0};
    tt_param *w = tt_param_new(ctx, "w", 2, dims, ones);
    tt_tape *t = tt_tape_new(ctx);
    int64_t rows = tt_axis(t, "rows", 5);
    tt_value x = tt_input(t, "x", TT_F32, rows, 3), y = tt_input(t, "y", TT_I32, rows, 1),
             unused = tt_input(t, "unused", TT_F32, 1000, 64);
    tt_value logits = tt_linear(t, x, w, NULL);
    tt_cross_entropy(t, logits, y, NULL);
    tt_compile_options o = tt_compile_options_default();
    float in[6] = {1, 2, 3, 4, 5, 6}, out[4], *big = (float *)calloc(64000, sizeof(float));
    int32_t labels[2] = {1, 0};
    o.train = false;
    tt_program *p = tt_compile(t, logits, &o);
    if (CHECK(p != NULL)) {
        CHECK(tt_set(p, x, in, 2) == TT_OK && tt_set(p, y, labels, 2) == TT_OK &&
              tt_set(p, unused, big, 1000) == TT_OK);
        CHECK(tt_run(p, NULL) == TT_OK && tt_get(p, logits, out, 4) == TT_OK);
        CHECK(out[0] == 6 && out[1] == 6 && out[2] == 15 && out[3] == 15);
    }
    free(big);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* Checks tt_device_text about GPUs, and on the emulator also the reasons why no GPU is usable. */
TEST(device_described_cuda)
{
#ifdef TINYTRAIN_CUDA
    test_allocator a;
    char text[8192];
#ifdef TT_EMULATE
    emu_configure(3, (size_t)64 << 20, 1, 1);
#endif
    tt_context *ctx = test_open(&a);
    REQUIRE(ctx != NULL);
    tt_status status = tt_device_text(ctx, "cuda", text, sizeof text);
    if (!CHECK(status == TT_OK)) printf("%s%s\n", text, tt_error(ctx));
    CHECK(strstr(text, "driver: for CUDA up to ") && strstr(text, "cuBLASLt ") &&
          strstr(text, "\ndevice 0: ") && strstr(text, "\nused: device 0"));
    CHECK(tt_device_text(ctx, "cuda", text, 10) == TT_OK && strlen(text) == 9);
    TEST_CLOSE(ctx, &a);
#ifdef TT_EMULATE
    static const struct { int error; const char *part; } reasons[] = {
        {35, "the driver is for CUDA 13.0, which is too old for this build with CUDA 13.0"},
        {35, "there is no NVIDIA driver: install one for CUDA "},
        {209, "emulated device has compute capability 9.0, but the kernels were built for 9.0: build them "
         "with CUDA_ARCHS=90"},
        {2, "cudaStreamCreate: out of memory (cudaErrorMemoryAllocation)"}};
    for (int peers = 0; peers < 2; peers++) {
        emu_configure(2, (size_t)64 << 20, peers, 1);
        ctx = test_open(&a);
        CHECK(tt_device_text(ctx, "cuda", text, sizeof text) == TT_OK &&
              strstr(text, "\ndevice 1: emulated device, compute capability 9.0, 0.1 GB"));
        CHECK(strstr(text, peers ? "\npeers:   0   1\n     0   - yes\n     1 yes   -\n"
                                 : "\npeers:   0   1\n     0   -  no\n     1  no   -\n"));
        TEST_CLOSE(ctx, &a);
    }
    for (int r = 0; r < TEST_COUNT(reasons); r++) {
        bool said = false;
        /* The nth call of CUDA fails, alone or with all later calls. */
        for (long nth = 1, calls = 2; nth < calls; nth++) {
            for (int all = 0; all < 2; all++) {
                emu_configure(1, (size_t)64 << 20, 1, 1);
                ctx = test_open(&a);
                emu_inject_fault(nth, reasons[r].error, all ? 1000 : 1);
                status = tt_device_text(ctx, "cuda", text, sizeof text);
                CHECK(status == TT_OK || strstr(tt_error(ctx), "device 'cuda' cannot be opened: "));
                said = said || (status == TT_ERR_DEVICE && strstr(tt_error(ctx), reasons[r].part));
                calls = emu_api_calls() > calls ? emu_api_calls() : calls;
                emu_inject_fault(0, 0, 0);
                TEST_CLOSE(ctx, &a);
                CHECK(emu_live_objects(text, sizeof text) == 0);
            }
        }
        test__check(said, __FILE__, __LINE__, reasons[r].part);
    }
    emu_configure(0, 0, 0, 1);
    ctx = test_open(&a);
    CHECK(tt_device_text(ctx, "cuda", text, sizeof text) == TT_ERR_DEVICE && !strstr(text, "used: "));
    CHECK_ERROR(ctx, TT_ERR_DEVICE, "the driver finds no GPU");
    TEST_CLOSE(ctx, &a);
#endif
#else
    SKIP("this build is without TINYTRAIN_CUDA");
#endif
}
