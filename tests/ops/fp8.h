/* Tests of fp8: quantizing, products, training. */
#pragma once

/* Rounds x to fp8 by the definition of fp8. E4M3 has 3 bits of mantissa, exponents from -6 on, and numbers up
   to 448. E5M2 has 2 bits of mantissa, exponents from -14 on, and numbers up to 57344. */
static double to_fp8(double x, bool e5m2)
{
    int e;
    if (x == 0) return 0;
    frexp(x, &e);
    double unit = ldexp(1, (e - 1 < (e5m2 ? -14 : -6) ? (e5m2 ? -14 : -6) : e - 1) - (e5m2 ? 2 : 3)),
           max = e5m2 ? 57344 : 448, y = nearbyint(x / unit) * unit;
    return y > max ? max : y < -max ? -max : y;
}

/* Returns the number that an fp8 byte encodes, or NaN. */
static double from_fp8(uint8_t q, bool e5m2)
{
    const int bits = e5m2 ? 2 : 3, e = (q & 0x7f) >> bits, mantissa = q & ((1 << bits) - 1);
    const double sign = q & 0x80 ? -1 : 1, one = 1 << bits;
    if (e5m2 ? e == 31 : (q & 0x7f) == 0x7f) return NAN;
    return sign * ldexp((e ? one + mantissa : mantissa) / one, (e ? e : 1) - (e5m2 ? 15 : 7));
}

enum { FP8_ROWS = 144, FP8_COLS = 144, FP8_TENSORS = 3 };
typedef struct fp8_result {
    uint8_t q[FP8_ROWS * FP8_COLS], across[FP8_ROWS * FP8_COLS];
    float unscale, largest[FP8_TENSORS];
} fp8_result;

/* Runs QUANTIZE on x (rows, cols). history: the largest known number of each tensor, where x is tensor 1. If
   `history` is NULL, the scale comes from x alone. */
static bool quantize_on(bool cuda, const tt__mat *x, bool e5m2, bool plain, bool turned, const float *history,
                        fp8_result *to)
{
    test_allocator a;
    tt_context_options co = test_options(&a);
    tt__instr i = tt__new_instr(TT__OP_QUANTIZE);
    tt__launch l;
    float rows[FP8_TENSORS * (1 + TT__FP8_STEPS)] = {0};
#ifdef TT_EMULATE
    if (cuda) emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
    tt_context *ctx = tt_open(&co);
    const tt_dtype dtype = e5m2 ? TT__E5M2 : TT__E4M3;
    const tt__mat q = {to->q, dtype, x->rows, x->cols, tt__ceil_div(x->cols, 16) * 16};
    const tt__mat across = {to->across, dtype, x->rows, x->cols, tt__ceil_div(x->rows, 16) * 16};
    const tt__mat unscale = {&to->unscale, TT_F32, 1, 1, 1};
    const tt__mat known = {&rows[1 + TT__FP8_STEPS], TT_F32, 1, 1 + TT__FP8_STEPS, 1 + TT__FP8_STEPS};
    const tt__mat largest = {&to->largest[1], TT_F32, 1, 1, 1};
    memset(&l, 0, sizeof l);
    l.device = (tt__device *)(void *)&ctx->cpu;
    l.instr = &i;
    l.in[0] = *x;
    if (plain) l.out[0] = q;
    if (turned) l.out[1] = across;
    l.out[2] = unscale;
    for (int k = 0; k < FP8_TENSORS && history; k++) rows[k * (1 + TT__FP8_STEPS)] = history[k];
    if (history) {
        l.in[1] = known;
        l.out[3] = largest;
        l.add[3] = true;
    }
    const bool ok = cuda ? run_on_cuda(&l, TT__CUDA_ALIGN) : ctx->cpu.isa->run[i.op](&l) == TT_OK;
    TEST_CLOSE(ctx, &a);
    return ok;
}

/* On the CPU, QUANTIZE follows the definition of fp8, and CUDA gives the same bits. Covers odd sizes, one
   row, one column, one or both copies, scales from the tensor or from a history that is too large or too
   small, zeros, infinity and NaN. */
TEST(quantize)
{
    static const int sizes[][2] = {{1, 1}, {1, 70}, {70, 1}, {16, 16}, {33, 80}, {129, 65}, {5, 144}};
    static const char *const values[] = {"numbers", "zeros", "an infinity", "NaN", "tiny numbers"};
    /* Largest number in the history: none, 0, below and above the tensor's largest. */
    static const float known[] = {-1, 0, 0.5f, 300};
    static fp8_result got[2];
    static float wide[FP8_ROWS * FP8_COLS];
    static uint16_t half[FP8_ROWS * FP8_COLS];
    for (int c = 0; c < TT__COUNT(sizes) * TT__COUNT(values) * TT__COUNT(known) * 2; c++) {
        const int *size = sizes[c % TT__COUNT(sizes)], how = c / TT__COUNT(sizes) % TT__COUNT(values);
        const float history = known[c / (TT__COUNT(sizes) * TT__COUNT(values)) % TT__COUNT(known)];
        const bool e5m2 = c >= TT__COUNT(sizes) * TT__COUNT(values) * TT__COUNT(known);
        /* copies 0: both copies; 1: `across` alone; 2: `q` alone */
        const int rows = size[0], cols = size[1], count = rows * cols, copies = c % 3;
        const tt_dtype dtype = c % 5 == 0 ? TT_F32 : c % 2 ? TT_BF16 : TT_F16;
        const float histories[FP8_TENSORS] = {1e9f, history, 1e-9f};
        const double max = e5m2 ? 57344 : 448;
        uint64_t random = (uint64_t)c + 1;
        double largest = 0, scale = 1;
        int wrong = 0;
        for (int e = 0; e < count; e++) {
            float x = how == 1 ? 0 : (how == 4 ? 1e-5f : 3.0f) * ((float)test_random(&random) * 0x1p-31f - 1);
            if (how == 2 && e == count / 2) x = -INFINITY;
            if (how == 3 && e == count / 2) x = NAN;
            if (dtype != TT_F32) {
                tt__convert(&half[e], dtype, &x, TT_F32, 1);
                tt__convert(&x, TT_F32, &half[e], dtype, 1);
            }
            wide[e] = x;
            if (isnan(x) || fabs(x) > largest) largest = fabs(x);
        }
        const tt__mat x = {dtype == TT_F32 ? (void *)wide : (void *)half, dtype, rows, cols, cols};
        const bool with = history >= 0, delayed = history > 0;
        memset(got, 0x55, sizeof got);
        for (int k = 0; k < 2; k++) {
            for (int j = 0; j < FP8_TENSORS; j++) got[k].largest[j] = 0.25f;
            CHECK(k == 0 || has_isa("cuda") ? quantize_on(k == 1, &x, e5m2, copies != 1, copies != 2,
                                                     with ? histories : NULL, &got[k]) : true);
        }
        snprintf(where, sizeof where, "%d x %d %s of %s, %s, known %g", rows, cols, tt_dtype_name(dtype),
                 values[how], e5m2 ? "E5M2" : "E4M3", history);
        double by = delayed ? history : largest;
        if (!isfinite(by)) scale = NAN;
        else if (by == 0) scale = 0x1p100;
        else {
            while (by * scale * 2 <= max) scale *= 2;
            while (by * scale > max) scale /= 2;
        }
        if (delayed) scale /= 1 << TT__FP8_MARGIN;
        report(isnan(scale) ? isnan(got[0].unscale) : got[0].unscale == (float)(1 / scale),
               "1/scale is %g, not %g", got[0].unscale, 1 / scale);
        const int q_ld = (int)tt__ceil_div(cols, 16) * 16, across_ld = (int)tt__ceil_div(rows, 16) * 16;
        for (int r = 0; r < across_ld; r++)
            for (int k = 0; k < q_ld; k++) {
                const bool there = r < rows && k < cols;
                const double v = there ? wide[r * cols + k] : 0;
                const double is = !isfinite(v * scale) ? NAN : to_fp8(v * scale, e5m2);
                for (int m = 0; m < 2; m++) {
                    if (m ? k >= cols || copies == 2 : r >= rows || copies == 1) continue;
                    const uint8_t q = m ? got[0].across[k * across_ld + r] : got[0].q[r * q_ld + k];
                    const double number = from_fp8(q, e5m2);
                    wrong += isnan(is) ? !isnan(number) : number != is;
                }
            }
        report(wrong == 0, "%d numbers are not those of fp8", wrong);
        if (with)
            report(isnan(largest) ? isnan(got[0].largest[1])
                                  : got[0].largest[1] == (float)(largest > 0.25 ? largest : 0.25),
                   "the largest is %g, not %g", got[0].largest[1], largest);
        report(got[0].largest[0] == 0.25f && got[0].largest[2] == 0.25f, "another tensor's largest");
        if (has_isa("cuda")) {
            /* NaNs of the CPU and of CUDA may have different bits. */
            const bool nan = isnan(got[0].unscale) || isnan(got[0].largest[1]);
            bool same = nan ? isnan(got[1].unscale) == isnan(got[0].unscale)
                            : memcmp(&got[0].unscale, &got[1].unscale, sizeof(float)) == 0;
            same = same && (nan || memcmp(got[0].largest, got[1].largest, sizeof got[0].largest) == 0);
            for (int k = 0; k < FP8_ROWS * FP8_COLS && same; k++)
                same = ((got[0].q[k] ^ got[1].q[k]) & 0x7f) == 0 &&
                       ((got[0].across[k] ^ got[1].across[k]) & 0x7f) == 0 &&
                       (got[0].q[k] == got[1].q[k] || (got[0].q[k] & 0x7f) == 0x7f);
            report(same, "CUDA's bits are others");
        }
    }
}

/* A spike enters the scale one step later and leaves it after TT__FP8_STEPS steps. The history leaves out
   infinity and NaN. Each tensor has a separate history. */
TEST(history_of_fp8_scales)
{
    enum { TENSORS = 300, STEPS = 40, COLS = 1 + TT__FP8_STEPS };
    static float history[2][TENSORS * COLS];
    for (int cuda = 0; cuda <= has_isa("cuda"); cuda++) {
        int wrong = 0;
        memset(history[cuda], 0, sizeof history[cuda]);
        for (int step = 0; step < STEPS; step++) {
            test_allocator a;
            tt_context_options co = test_options(&a);
            tt__instr i = tt__new_instr(TT__OP_FP8_HISTORY);
            float largest[TENSORS];
            tt__launch l;
#ifdef TT_EMULATE
            if (cuda) emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
            tt_context *ctx = tt_open(&co);
            for (int k = 0; k < TENSORS; k++) largest[k] = (float)(1 + k);
            largest[7] = step == 3 ? 1000.0f : 1;       /* a spike */
            largest[8] = step == 3 ? INFINITY : step == 4 ? NAN : 2;
            largest[9] = step == 0 ? 5.0f : 0;          /* zero after the first step */
            memset(&l, 0, sizeof l);
            l.device = (tt__device *)(void *)&ctx->cpu;
            l.instr = &i;
            const tt__mat of_step = {largest, TT_F32, 1, TENSORS, TENSORS};
            const tt__mat all = {history[cuda], TT_F32, TENSORS, COLS, COLS};
            l.out[0] = all;
            l.out[1] = of_step;
            CHECK(cuda ? run_on_cuda(&l, 0) : ctx->cpu.isa->run[i.op](&l) == TT_OK);
            for (int k = 0; k < TENSORS; k++) {
                const bool spike = step >= 3 && step < 3 + TT__FP8_STEPS, begun = step < TT__FP8_STEPS;
                const float known = k == 7 ? (spike ? 1000.0f : 1) : k == 8 ? 2 : k == 9 ? (begun ? 5.0f : 0)
                                                                             : (float)(1 + k);
                wrong += history[cuda][k * COLS] != known || largest[k] != 0;
            }
            TEST_CLOSE(ctx, &a);
        }
        report(wrong == 0, "%d entries of %s are wrong", wrong, cuda ? "CUDA" : "the CPU");
    }
    const bool same = memcmp(history[0], history[1], sizeof history[0]) == 0;
    report(!has_isa("cuda") || same, "CUDA's bits are others");
}

#ifdef TINYTRAIN_CUDA
/* Rounds v[n] to fp8 after scaling by the largest power of two that keeps all numbers in range. Returns
   1 / scale. */
static double round_to_fp8(double *v, int n, bool e5m2)
{
    double max = 0, scale = 1;
    for (int k = 0; k < n; k++) if (fabs(v[k]) > max) max = fabs(v[k]);
    if (max == 0) return 1;
    while (max * scale * 2 <= (e5m2 ? 57344 : 448)) scale *= 2;
    while (max * scale > (e5m2 ? 57344 : 448)) scale /= 2;
    for (int k = 0; k < n; k++) v[k] = to_fp8(v[k] * scale, e5m2);
    return 1 / scale;
}

/* Returns the exponent of x, but at least `min`, the exponent of fp8's subnormal numbers. */
static int exponent_from(double x, int min)
{
    int e;
    frexp(x, &e);
    return e - 1 > min ? e - 1 : min;
}

/* Returns a bound of the error of a sum of products `a[i] b[i]` of fp8 numbers on a tensor core of Hopper. An
   instruction adds 32 products to the sum so far. The instruction aligns these 33 numbers to the largest
   exponent (a product's exponent is the sum of its factors' exponents), keeps 13 bits after the binary point,
   and keeps as many of the new sum (DeepSeek-V3, arXiv 2412.19437, section 3.3.2; Xie et al., MMA-Sim, arXiv
   2511.10909: FP8 of Hopper's WGMMA). So each number that is not a multiple of the last kept bit loses less
   than that bit. cuBLASLt may move the sum to an f32 register after any instruction and restart at 0
   (CUBLASLT_MATMUL_DESC_FAST_ACCUM). So the sum so far may be that of the last instruction alone, of the last
   two instructions, and so on. */
static double fp8_sum_error(const double *a, const double *b, int n, bool a_e5m2)
{
    enum { AT_ONCE = 32, BITS = 13, MAX_RUNS = 8 };
    /* exact sums of the runs of instructions; each run begins at another instruction */
    double runs[MAX_RUNS] = {0}, reach = 0, error = 0;
    for (int from = 0; from < n; from += AT_ONCE) {
        const int end = from + AT_ONCE < n ? from + AT_ONCE : n;
        int exponent = reach > 0 ? exponent_from(reach, -126) : -126, lose = reach > 0;
        double sum = 0;
        for (int k = from; k < end; k++) {
            const int e = exponent_from(a[k], a_e5m2 ? -14 : -6) + exponent_from(b[k], -6);
            if (a[k] != 0 && b[k] != 0 && e > exponent) exponent = e;
            sum += a[k] * b[k];
        }
        for (int k = from; k < end; k++) lose += fmod(a[k] * b[k], ldexp(1, exponent - BITS)) != 0;
        error += lose * ldexp(1, exponent - BITS);
        reach = 0;
        for (int r = 0; r <= from / AT_ONCE; r++) {
            runs[r] += sum;
            if (fabs(runs[r]) > reach) reach = fabs(runs[r]);
        }
        reach += error;
        if (reach > 0) error += ldexp(1, exponent_from(reach, -126) - BITS);
    }
    return error;
}

static bool is_hopper(tt_context *ctx)
{
    char text[4096];
    return tt_device_text(ctx, "cuda", text, sizeof text) == TT_OK &&
           strstr(text, ", compute capability 9.0, ");
}

/* Tests the forward, the gradient of x and the gradient of w of a linear layer (rows, IN) -> (rows, OUT).
   Each of the three is a product of operands of shapes (m, k) and (n, k), with a result of shape (m, n). */
TEST(matmul_in_fp8)
{
    enum { FEW = 33, MANY = 141, WIDE = 80, ANY = 70, MAX = MANY * WIDE };
    static fp8_result factor[2];
    static const char *const names[] = {"linear", "linear_dx", "linear_dw"};
    static uint16_t operand[2][MAX];
    static double exact[2][MAX], low[2][MAX];
    static float got[MAX], bias[WIDE];
    for (int c = 0; c < 3 * 2 * 6; c++) { /* c counts products, dtypes and values */
        /* values: 0 plain, 1 tiny gradients, 2 all of A zero, 3 one of A infinite; 4: plain, but without
           cuBLASLt, which refuses lines that do not begin at multiples of 16 bytes; 5: plain, with more than
           128 rows, where several numbers of rows share one algorithm of cuBLASLt */
        const int which = c % 3, values = c / 6 < 4 ? c / 6 : 0;
        const bool refused = c / 6 == 4;
        const int count = c / 6 == 5 ? MANY : FEW;
        const tt_dtype half = c / 3 % 2 ? TT_F16 : TT_BF16;
        const int op[] = {TT__OP_LINEAR, TT__OP_LINEAR_DX, TT__OP_LINEAR_DW}, out = which == 1 ? ANY : WIDE,
                  in = which ? WIDE : ANY;
        const int rows[2] = {count, which == 2 ? count : out}, cols[2] = {which ? out : in, in};
        const int m = which == 2 ? out : count, n = which == 0 ? out : in,
                  k = which == 0 ? in
                      : which == 1 ? out
                      : count;
        uint64_t s = (uint64_t)c + 1;
        double unscale = 1, loosest = 0;
        int wrong = 0, same = 0, coarse = 0;
        for (int o = 0; o < 2; o++) {
            float size = o ? 0.02f
                         : values == 1 && which ? (half == TT_F16 ? 1e-3f : 1e-9f)
                         : values == 2 ? 0.0f
                         : 3.0f;
            for (int e = 0; e < rows[o] * cols[o]; e++) {
                float x = size * ((float)test_random(&s) * 0x1p-31f - 1);
                if (values == 3 && o == 0 && e == 5) x = INFINITY;
                tt__convert(&operand[o][e], half, &x, TT_F32, 1);
                tt__convert(&x, TT_F32, &operand[o][e], half, 1);
                exact[o][e] = low[o][e] = x;
            }
            unscale *= round_to_fp8(low[o], rows[o] * cols[o], which && o == 0);
        }
        for (int e = 0; e < WIDE; e++) bias[e] = (float)(test_random(&s) % 16) / 8; /* exact in bf16 */
        test_allocator a;
        tt_context_options co = test_options(&a);
        tt_context *ctx = tt_open(&co);
        tt__instr i = tt__new_instr(op[which]);
        tt__launch l;
        memset(&l, 0, sizeof l);
        memset(got, 0, sizeof got);
        l.device = (tt__device *)(void *)&ctx->cpu;
        l.instr = &i;
        tt__mat x = {operand[0], half, rows[0], cols[0], cols[0]},
                y = {operand[1], half, rows[1], cols[1], cols[1]};
        tt__mat b = {bias, TT_F32, 1, n, n}, to = {got, TT_F32, m, n, n};
        const tt__mat *factors[2] = {&x, &y};
        for (int o = 0; o < 2; o++) {
            const bool turned = which == 2 || (which == 1 && o == 1);
            const tt__mat *f = factors[o];
            uint8_t *lines = turned ? factor[o].across : factor[o].q;
            const int64_t ld = tt__ceil_div(turned ? f->rows : f->cols, 16) * 16;
            const int64_t apart = refused ? ld + 8 : ld;
            const tt_dtype dtype = which && o == 0 ? TT__E5M2 : TT__E4M3;
            const tt__mat q = {lines, dtype, f->rows, f->cols, apart};
            const tt__mat of_scale = {&factor[o].unscale, TT_F32, 1, 1, 1};
            CHECK(quantize_on(true, f, which && o == 0, !turned, turned, NULL, &factor[o]));
            for (int64_t r = turned ? f->cols : f->rows; r-- > 0 && refused;)
                memmove(lines + r * apart, lines + r * ld, (size_t)ld);
            l.in[o] = q;
            l.in[TT__UNSCALE_IN + o] = of_scale;
        }
#ifdef TT_EMULATE
        emu_configure(1, (size_t)64 << 20, 1, (uint64_t)c);
#endif
        if (which == 0) l.in[2] = b;
        l.out[0] = to;
        CHECK(run_on_cuda(&l, TT__CUDA_ALIGN));
#ifdef TT_EMULATE
        CHECK(emu_get_counts().fp8 == !refused);
#endif
        snprintf(where, sizeof where, "%s, %s, values %d", names[which], tt_dtype_name(half), c / 6);
        for (int r = 0; r < m; r++)
            for (int j = 0; j < n; j++) {
                double sum = 0, terms = 0, other = 0, from_a[MANY], from_b[MANY];
                for (int e = 0; e < k; e++) {
                    int at = which == 2 ? e * cols[0] + r : r * cols[0] + e,
                        bt = which == 0 ? j * cols[1] + e : e * cols[1] + j;
                    from_a[e] = low[0][at];
                    from_b[e] = low[1][bt];
                    sum += from_a[e] * from_b[e] * unscale;
                    terms += fabs(from_a[e] * from_b[e] * unscale);
                    other += exact[0][at] * exact[1][bt];
                }
                const double of_cores = refused || values == 3 ? 0
                    : fp8_sum_error(from_a, from_b, k, which != 0) * unscale;
                if (which == 0) { sum += bias[j]; other += bias[j]; }
                const double error = fabs(got[r * n + j] - sum), of_f32 = 1e-6 * terms + 1e-7 * fabs(sum);
                wrong += values == 3 ? isfinite(got[r * n + j]) : !(error <= of_cores + of_f32);
                coarse += error > of_f32;
                same += fabs(got[r * n + j] - other) <= 1e-6 * terms;
                if (terms > 0 && of_cores / terms > loosest) loosest = of_cores / terms;
            }
        report(wrong == 0, "%d of %d numbers are not those of fp8", wrong, m * n);
        report(loosest < 0x1p-9, "the error that is allowed is %.3g of the sum of all |a b|", loosest);
        report(refused || values > 1 || coarse > 0 || !is_hopper(ctx), "a tensor core is not so exact");
        report(values > 1 || same < m * n / 10, "%d of %d numbers are those of 16 bits", same, m * n);
        TEST_CLOSE(ctx, &a);
    }
}
#else
TEST(matmul_in_fp8) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif

/* A model trains as in bf16 if fp8 supports the widths of only some products. If fp8 is unavailable,
   tt_compile says so. */
TEST(training_in_fp8)
{
    static const struct { const char *device, *precision, *error; } refused[] = {
        {"cpu", "bf16-mixed", "matmul 'fp8' needs device 'cuda', but the device is 'cpu'"},
        {"cuda", "32-true", "matmul 'fp8' rounds 16-bit operands, of which precision '32-true' has none"},
    };
    tt_compile_options o = tt_compile_options_default();
    model m;
    o.matmul = "fp8";
    model_open(&m, 1, 0);
    for (int k = 0; k < TT__COUNT(refused); k++) {
        o.device = refused[k].device;
        o.precision = refused[k].precision;
        CHECK(tt_compile(m.t, m.loss, &o) == NULL);
        CHECK_ERROR(m.ctx, TT_ERR_UNSUPPORTED, refused[k].error);
    }
    model_close(&m);
#ifdef TINYTRAIN_CUDA
    enum { STEPS = 8 };
    double loss[2][STEPS];
    for (int fp8 = 0; fp8 < 2; fp8++) {
#ifdef TT_EMULATE
        emu_configure(1, (size_t)64 << 20, 1, 7);
#endif
        model_open(&m, 1, 0.1f);
        o.device = "cuda";
        o.precision = "bf16-mixed";
        o.matmul = fp8 ? "fp8" : "fp32";
        tt_program *p = tt_compile(m.t, m.loss, &o);
        for (int step = 0; CHECK(p != NULL) && step < STEPS; step++) {
            tt_stats stats;
            batch b = make_batch(6, 12, 3);
            CHECK(model_set(&m, p, &b) && tt_step(p, 0.003f, &stats) == TT_OK);
            loss[fp8][step] = stats.loss;
        }
        tt_program_free(p);
        model_close(&m);
#ifdef TT_EMULATE
        /* Each of two layers has one fp8 product in the forward ("up") and two in the backward ("down": x and
           w). One step runs the products, and one captures them. */
        CHECK(emu_get_counts().fp8 == (fp8 ? 12 : 0));
#endif
    }
    int same = 0;
    for (int step = 0; step < STEPS; step++) {
        CHECK_NEAR(loss[1][step], loss[0][step], 0.05);
        same += loss[1][step] == loss[0][step];
    }
    CHECK(same == 0 && loss[1][STEPS - 1] < 0.5 * loss[1][0]);
#endif
}
