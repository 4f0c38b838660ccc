/* Tests of updates (stochastic rounding, shards), and of weights that are narrowed while they are read. */
#pragma once

/* Rounds x to bf16, upwards with a probability equal to the dropped fraction; r holds 16 random bits. */
static uint16_t bf16_stochastic(float x, uint32_t r)
{
    uint32_t u = tt__bits(x);
    if ((u & 0x7f800000u) == 0x7f800000u) return tt__to_bf16(x);
    return (uint16_t)((u + (r & 0xffff)) >> 16);
}

/* Rounds x to f16 with a probability as in bf16_stochastic. Numbers from 65504 on are rounded to nearest. */
static uint16_t f16_stochastic(float x, uint32_t r)
{
    uint32_t u = tt__bits(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffffu;
    if (magnitude >= 0x477fe000u) return tt__to_f16(x); /* 0x477fe000: the bits of 65504 */
    if (magnitude >= 0x38800000u) return (uint16_t)(sign | ((magnitude - 0x38000000u + (r & 0x1fff)) >> 13));
    float units = tt__float(magnitude) * 0x1p24f; /* exact, in units of the subnormals */
    return (uint16_t)(sign | ((uint32_t)units +
                              ((units - (float)(uint32_t)units) * 65536 + (float)(r & 0xffff) >= 65536)));
}

/* Every step moves 16-bit parameters of 1.5 by 1/64 of the unit in the last place, u = 2^-7 or 2^-10.
   Rounding to nearest would keep the parameters unchanged. Stochastic rounding moves the mean like exact
   arithmetic, up to 5 standard deviations of u / sqrt(4096). */
TEST(stochastic_rounding_is_unbiased)
{
    enum { N = 4096 };
    static float values[N], targets[N];
    for (int k = 0; k < 4; k++) {
        const int steps = k % 2 ? 64 : 32;
        const bool f16 = k >= 2;
        const double u = f16 ? 0x1p-10 : 0x1p-7, lr = 32 * u;
        test_allocator a;
        tt_context *ctx = test_open(&a);
        int64_t dims[2] = {64, 64};
        tt_init zeros = {TT_INIT_ZEROS, 0};
        tt_param *w = tt_param_new(ctx, "w", 2, dims, zeros);
        tt_tape *t = tt_tape_new(ctx);
        tt_value y = tt_input(t, "y", TT_F32, 64, 64),
                 loss = tt_mean_squared_error(t, tt_param_value(t, w), y, tt__handle(t, 0));
        tt_compile_options o = tt_compile_options_default();
        double exact = 1.5, mean = 0;
        o.precision = f16 ? "16-true" : "bf16-true";
        o.optimizer.kind = TT_SGD;
        o.optimizer.weight_decay = 0;
        for (int e = 0; e < N; e++) { values[e] = 1.5f; targets[e] = 0.5f; }
        tt_param_set(w, values);
        tt_program *p = tt_compile(t, loss, &o);
        if (CHECK(p != NULL)) {
            for (int s = 0; s < steps; s++) {
                CHECK(tt_set(p, y, targets, 64) == TT_OK && tt_step(p, (float)lr, NULL) == TT_OK);
                exact -= lr * 2 * (exact - 0.5) / N;
            }
            tt_param_get(w, values);
            for (int e = 0; e < N; e++) mean += values[e] / N;
            CHECK_NEAR(mean, exact, 5 * u / 64);
            CHECK(1.5 - mean > 0.4 * u);
            float before[N];
            memcpy(before, values, sizeof before);
            CHECK(tt_set(p, y, targets, 64) == TT_OK && tt_step(p, 0, NULL) == TT_OK);
            tt_param_get(w, values);
            CHECK(same_params(before, values, N)); /* numbers that 16 bits hold exactly are not rounded */
        }
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

#ifdef TINYTRAIN_CUDA
/* Runs an instruction with operands in the host's memory on a GPU. workspace_after: NULL, or where to copy
   the workspace afterwards. */
static void *workspace_after;
static bool run_on_cuda(const tt__launch *host, size_t workspace)
{
    const tt__backend *b = &tt__cuda_backend;
    char error[256] = "";
    enum { WORKSPACE = TT__MAX_IN + TT__MAX_OUT, RESIDENT, MEMORIES };
    void *memory[MEMORIES] = {0};
    tt__launch l = *host;
    tt__device *d = l.device = b->open(tt__cpu_of(host)->ctx, 0, 1, error, sizeof error);
    bool ok = report(d != NULL, "%s", error);
    if (ok && workspace)
        ok = (l.workspace = memory[WORKSPACE] = b->allocate(d, workspace)) &&
             (l.resident = memory[RESIDENT] = b->allocate(d, TT__CUDA_RESIDENT));
    for (int to = 0; to < 2; to++) {
        for (int k = 0; k < TT__MAX_IN + TT__MAX_OUT && ok; k++) {
            tt__mat *m = k < TT__MAX_IN ? &l.in[k] : &l.out[k - TT__MAX_IN];
            const tt__mat *h = k < TT__MAX_IN ? &host->in[k] : &host->out[k - TT__MAX_IN];
            /* An fp8 matrix is stored by rows or by columns, so the larger number bounds its lines. */
            const int64_t lines = tt__is_fp8(h->dtype) ? tt__max(h->rows, h->cols) : h->rows;
            size_t bytes = (size_t)(lines * h->ld) * tt_dtype_bytes(h->dtype);
            if (!h->data) continue;
            if (to) ok = b->read(d, h->data, m->data, bytes) == TT_OK;
            else
                ok = (m->data = memory[k] = b->allocate(d, bytes)) != NULL &&
                     b->copy(d, TT__COMPUTE_STREAM, m->data, h->data, bytes) == TT_OK && b->wait(d) == TT_OK;
        }
        if (ok && !to) ok = b->launch(&l, 1) == TT_OK;
    }
    if (ok && workspace_after) ok = b->read(d, workspace_after, l.workspace, workspace) == TT_OK;
    if (d) report(ok, "%s", b->error(d));
    for (int k = 0; k < MEMORIES; k++) if (memory[k]) b->release(d, memory[k]);
    b->close(d);
    return ok;
}
#else
static bool run_on_cuda(const tt__launch *host, size_t workspace)
{
    (void)host;
    (void)workspace;
    return false;
}
#endif

/* Each instruction set rounds like bf16_stochastic and f16_stochastic, with the documented random numbers:
   16-bit halves of the words of Philox counter {element / 8} under the key of step, tensor and instruction.
   A step of SGD with a rate of 1 turns parameters of 0 into the rounded negative gradient. The gradient has
   numbers of every size, numbers near the limits of both dtypes, infinities and NaN. The last chunk is no
   whole number of vectors. */
TEST(stochastic_rounding_of_each_isa)
{
    enum { N = 2 * TT__CHUNK + 1237 };
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon", "cuda"};
    static const uint32_t edges[] = {0,          0x80000000, 1,          0x7fffff,   0x800000,
                                     0x33000000, 0x33800001, 0x387fffff, 0x38800000, 0x477fdfff,
                                     0x477fe000, 0x477fefff, 0x477ff000, 0xc7800000, 0x7f7f0000,
                                     0x7f7fffff, 0x7f800000, 0xff800000, 0x7f800001, 0xffc12345};
    static float g[N];
    static uint16_t h[N];
    uint64_t s = 23;
    for (int e = 0; e < N; e++)
        g[e] = tt__float(e % 3 == 0 ? edges[e / 3 % TT__COUNT(edges)]
                         : e % 3 == 1 ? test_random(&s)
                         : (test_random(&s) & 0x8fffffff) + 0x32000000);
    for (int k = 0; k < TT__COUNT(isa); k++) {
        if (!has_isa(isa[k])) continue;
        for (int threads = 1; threads <= (is_cuda(isa[k]) ? 1 : 2); threads++) {
            for (int f16 = 0; f16 < 2; f16++) {
                test_allocator a;
                tt_context_options co = test_options(&a);
                co.threads = threads;
                tt_context *ctx = open_isa(co, isa[k]);
                tt__instr i = tt__new_instr(TT__OP_SGD);
                float clip[2] = {1, 1};
                tt__step_settings run;
                tt__launch l;
                int wrong = 0;
                memset(&run, 0, sizeof run);
                memset(&l, 0, sizeof l);
                memset(h, 0, sizeof h);
                run.seed = 5;
                run.step = 3;
                run.lr = 1;
                i.random = 7;
                l.device = (tt__device *)(void *)&ctx->cpu;
                l.instr = &i;
                l.in[TT__RUN_IN].data = &run;
                l.in[TT__RUN_IN].dtype = TT_U8;
                l.in[TT__RUN_IN].rows = 1;
                l.in[TT__RUN_IN].cols = l.in[TT__RUN_IN].ld = sizeof run;
                l.in[0].data = g;
                l.in[0].dtype = TT_F32;
                l.in[0].rows = 1;
                l.in[0].cols = l.in[0].ld = N;
                l.in[1].data = clip;
                l.in[1].rows = 1;
                l.in[1].cols = l.in[1].ld = 2;
                l.out[0].data = h;
                l.out[0].dtype = f16 ? TT_F16 : TT_BF16;
                l.out[0].rows = 1;
                l.out[0].cols = l.out[0].ld = N;
                l.workspace = calloc((size_t)threads * TT__ROW_BUFFERS, tt__row_bytes(TT__CHUNK));
                CHECK(is_cuda(isa[k]) ? run_on_cuda(&l, 0) : ctx->cpu.isa->run[TT__OP_SGD](&l) == TT_OK);
                uint64_t key = tt__stream_key(run.seed, TT__RANDOM_ROUNDING, 3, 7);
                for (int e = 0; e < N; e++) {
                    uint32_t counter[4] = {(uint32_t)e / 8, 0, 0, 0}, u[4];
                    tt__philox_rounds(TT__DRAW_ROUNDS, counter, key, u);
                    uint32_t bits = u[e % 8 / 2] >> (e % 2 * 16);
                    float x = 0.0f - (g[e] + 0.0f);
                    uint16_t expected = f16 ? f16_stochastic(x, bits) : bf16_stochastic(x, bits);
                    if (x != x)
                        wrong += f16 ? tt__from_f16(h[e]) == tt__from_f16(h[e])
                                     : tt__from_bf16(h[e]) == tt__from_bf16(h[e]);
                    else wrong += h[e] != expected;
                }
                snprintf(where, sizeof where, "%s, %s, %d threads", isa[k], f16 ? "f16" : "bf16", threads);
                report(wrong == 0, "%d of %d numbers are rounded wrongly", wrong, N);
                free(l.workspace);
                TEST_CLOSE(ctx, &a);
            }
        }
    }
}

/* Three ranks each update a shard of a parameter with stochastic rounding. The bits equal those of an update
   of the whole parameter. */
TEST(pieces_are_updated_as_the_whole)
{
    enum { N = 5 * TT__CHUNK + 1237, RANKS = 3, OUTPUTS = 3 };
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon", "cuda"};
    static const int op[] = {TT__OP_ADAM, TT__OP_SGD};
    static const tt_dtype dtype[] = {TT_BF16, TT_F16, TT_F32};
    static float made[2][1 + OUTPUTS][N]; /* [whole, shards][gradient, parameter and state] */
    for (int c = 0; c < TT__COUNT(isa) * TT__COUNT(op) * TT__COUNT(dtype); c++) {
        const char *on = isa[c / (TT__COUNT(op) * TT__COUNT(dtype))];
        const tt_dtype type = dtype[c % TT__COUNT(dtype)];
        const size_t item = tt_dtype_bytes(type);
        test_allocator a;
        uint64_t s = (uint64_t)c;
        if (!has_isa(on)) continue;
        tt_context_options co = test_options(&a);
        tt_context *ctx = open_isa(co, on);
        tt__instr i = tt__new_instr(op[c / TT__COUNT(dtype) % TT__COUNT(op)]);
        const int outputs = i.op == TT__OP_ADAM ? 3 : 2;
        float clip[2] = {1, 1};
        tt__step_settings run;
        tt__launch l;
        bool ok = true;
        memset(&run, 0, sizeof run);
        memset(&l, 0, sizeof l);
        run.seed = 5;
        run.lr = 0.1f;
        i.random = 7;
        i.attr.beta1 = 0.9f;
        i.attr.beta2 = 0.99f;
        i.attr.eps = 1e-8f;
        l.device = (tt__device *)(void *)&ctx->cpu;
        l.instr = &i;
        const tt__mat of_run = {&run, TT_U8, 1, sizeof run, sizeof run}, of_clip = {clip, TT_F32, 1, 2, 2};
        l.in[TT__RUN_IN] = of_run;
        l.in[1] = of_clip;
        for (int m = 0; m <= outputs; m++)
            for (int e = 0; e < N; e++) {
                float x = (m == 3 ? 0 : -0.5f) + (float)test_random(&s) * 0x1p-32f;
                tt__convert((char *)made[0][m] + (size_t)e * item, type, &x, TT_F32, 1);
            }
        memcpy(made[1], made[0], sizeof made[0]);
        l.workspace = calloc(TT__ROW_BUFFERS, tt__row_bytes(TT__CHUNK));
        for (int r = -1; r < RANKS && ok; r++) { /* r -1: the whole parameter */
            const int64_t n = tt__shard(N, TT__CHUNK, false, r < 0 ? 0 : r, r < 0 ? 1 : RANKS, &l.first);
            for (int m = 0; m <= outputs; m++) {
                const tt__mat of = {(char *)made[r >= 0][m] + (size_t)l.first * item, type, 1, n, n};
                if (m) l.out[m - 1] = of;
                else l.in[0] = of;
            }
            ok = CHECK(is_cuda(on) ? run_on_cuda(&l, 0) : ctx->cpu.isa->run[i.op](&l) == TT_OK);
        }
        snprintf(where, sizeof where, "%s, %s, %s", on, tt__ops[i.op].name, tt_dtype_name(type));
        report(memcmp(made[1], made[0], sizeof made[0]) == 0, "pieces have other bits than the whole");
        free(l.workspace);
        TEST_CLOSE(ctx, &a);
    }
}

/* Reads bitsandbytes' signed and unsigned map from tests/golden/maps8.txt. */
static bool read_maps(float map[2][256])
{
    FILE *f = fopen("tests/golden/maps8.txt", "r");
    bool ok = f != NULL;
    for (int k = 0; k < 512 && ok; k++) ok = fscanf(f, "%f", &map[k / 256][k % 256]) == 1;
    if (f) fclose(f);
    return CHECK(ok);
}

/* The numbers differ from bitsandbytes' by at most 2 units in the last place: see tt__map8_magnitude. */
TEST(maps_of_8_bits_are_those_of_bitsandbytes)
{
    static float map[2][256];
    static tt__map8 ours;
    REQUIRE(read_maps(map));
    for (int k = 0; k < 2; k++) {
        tt__make_map8(&ours, k == 0);
        for (int c = 0; c < 256; c++) {
            const double unit = map[k][c] != 0 ? ldexp(1, ilogb(map[k][c]) - 23) : 0;
            CHECK_NEAR(ours.number[c], map[k][c], 2 * unit);
        }
        CHECK(ours.number[ours.zero] == 0 && !signbit(ours.number[ours.zero]) && ours.number[255] == 1);
    }
}

enum { SMALL_N = 2 * TT__CHUNK + 1237, SMALL_BLOCKS = (SMALL_N + TT__STATE_BLOCK - 1) / TT__STATE_BLOCK };
typedef struct small_states { /* a parameter with states of 8 bits */
    float g[SMALL_N], p[SMALL_N];
    uint8_t code[2][SMALL_N];
    float scale[2][SMALL_BLOCKS];
} small_states;

/* Updates elements of the parameter on an instruction set: those of shard r of three or, if r is -1, all. */
static bool update_small(tt_context *ctx, const char *isa, tt__instr *i, small_states *x, int step, int r)
{
    float clip[2] = {1, 0.5f};
    tt__step_settings run;
    tt__launch l;
    memset(&run, 0, sizeof run);
    memset(&l, 0, sizeof l);
    run.step = step;
    run.lr = 0.1f;
    l.device = (tt__device *)(void *)&ctx->cpu;
    l.instr = i;
    const int64_t n = tt__shard(SMALL_N, TT__CHUNK, false, r < 0 ? 0 : r, r < 0 ? 1 : 3, &l.first);
    const int64_t blocks = tt__ceil_div(n, TT__STATE_BLOCK), block = l.first / TT__STATE_BLOCK;
    const tt__mat of_run = {&run, TT_U8, 1, sizeof run, sizeof run}, of_clip = {clip, TT_F32, 1, 2, 2},
                  g = {x->g + l.first, TT_F32, 1, n, n}, p = {x->p + l.first, TT_F32, 1, n, n};
    l.in[TT__RUN_IN] = of_run;
    l.in[0] = g;
    l.in[1] = of_clip;
    l.out[0] = p;
    for (int k = 0; k < (i->op == TT__OP_ADAM ? 2 : 1); k++) {
        const tt__mat code = {x->code[k] + l.first, TT_U8, 1, n, n},
                      scale = {x->scale[k] + block, TT_F32, 1, blocks, blocks};
        l.out[1 + k] = code;
        l.out[1 + TT__STATES + k] = scale;
    }
    l.workspace = calloc(1, tt__maps8_bytes() + tt__buffer_bytes(ctx->cpu.pool->threads, TT__CHUNK));
    const bool ok = is_cuda(isa) ? run_on_cuda(&l, 0) : ctx->cpu.isa->run[i->op](&l) == TT_OK;
    free(l.workspace);
    return ok;
}

/* Checks that state k after an update has, for each block, the largest magnitude of the exact states as its
   scale, and for each number the nearest number of the map. */
static void check_small_state(const small_states *x, int k, const double *exact, const float map[256])
{
    int wrong = 0, wrong_scales = 0;
    for (int b = 0; b < SMALL_BLOCKS; b++) {
        const int end = (b + 1) * TT__STATE_BLOCK < SMALL_N ? (b + 1) * TT__STATE_BLOCK : SMALL_N;
        const float scale = x->scale[k][b];
        double most = 0;
        for (int e = b * TT__STATE_BLOCK; e < end; e++) most = fmax(most, fabs(exact[e]));
        wrong_scales += !(fabs(scale - most) <= 2e-6 * most);
        for (int e = b * TT__STATE_BLOCK; e < end; e++) {
            double best = INFINITY;
            for (int c = k && exact[e] > 0; c < 256; c++) best = fmin(best, fabs(map[c] * most - exact[e]));
            const double stored = (double)map[x->code[k][e]] * scale;
            const double rounding = 2e-6 * (fabs(exact[e]) + fabs(stored)) + (k ? 0 : 2e-7 * most);
            wrong += !(fabs(stored - exact[e]) <= best + rounding);
            wrong += k && exact[e] > 0 && !x->code[k][e];
        }
    }
    report(!wrong && !wrong_scales, "state %d: %d numbers and %d scales are wrong", k, wrong, wrong_scales);
}

/* Updates with states of 8 bits are compared, step by step, with a loop in double precision that reads and
   writes the states by bitsandbytes' maps. Any number of threads, and shards, give equal bits. The gradients
   of each block have a size of their own, and some are 0. */
TEST(states_of_8_bits_of_each_isa)
{
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon", "cuda"};
    static const int op[] = {TT__OP_ADAM, TT__OP_SGD, TT__OP_LION};
    static float map[2][256];
    static small_states x, before, shards;
    static double m[SMALL_N], v[SMALL_N];
    REQUIRE(read_maps(map));
    for (int c = 0; c < TT__COUNT(isa) * TT__COUNT(op); c++) {
        const char *on = isa[c / TT__COUNT(op)];
        test_allocator a;
        uint64_t s = 77;
        if (!has_isa(on)) continue;
        tt_context_options co = test_options(&a);
        co.threads = 2;
        tt_context *ctx = open_isa(co, on);
        tt__instr i = tt__new_instr(op[c % TT__COUNT(op)]);
        const double b1 = i.attr.beta1 = 0.9f, b2 = i.attr.beta2 = 0.99f, eps = i.attr.eps = 1e-6f;
        const double lr = 0.1f, decay = i.attr.weight_decay = 0.01f;
        i.attr.decoupled = true;
        memset(&x, 0, sizeof x);
        for (int e = 0; e < SMALL_N; e++) x.p[e] = (float)test_random(&s) * 0x1p-32f;
        shards = x;
        for (int step = 0; step < 3; step++) {
            double error = 0;
            for (int e = 0; e < SMALL_N; e++)
                x.g[e] = e % 7 == step ? 0 : ldexpf((float)test_random(&s) * 0x1p-31f - 1,
                                                    -(e / TT__STATE_BLOCK) % 30 - (e % 11 == 3 ? 12 : 0));
            memcpy(shards.g, x.g, sizeof x.g);
            before = x;
            snprintf(where, sizeof where, "%s, %s, step %d", on, tt__ops[i.op].name, step);
            if (!CHECK(update_small(ctx, on, &i, &x, step, -1))) break;
            for (int r = 0; r < 3; r++) CHECK(update_small(ctx, on, &i, &shards, step, r));
            report(memcmp(&x, &shards, sizeof x) == 0, "shards have other bits than the whole");
            for (int e = 0; e < SMALL_N; e++) {
                const double g = 0.5 * x.g[e], p = before.p[e];
                double after = p;
                m[e] = (double)map[0][before.code[0][e]] * before.scale[0][e / TT__STATE_BLOCK];
                v[e] = (double)map[1][before.code[1][e]] * before.scale[1][e / TT__STATE_BLOCK];
                if (i.op == TT__OP_SGD) {
                    m[e] = b1 * m[e] + g + decay * p;
                    after -= lr * m[e];
                } else if (i.op == TT__OP_LION) {
                    const double blend = b1 * m[e] + (1 - b1) * g;
                    after = p * (1 - lr * decay) - lr * ((blend > 0) - (blend < 0));
                    m[e] = b2 * m[e] + (1 - b2) * g;
                } else {
                    m[e] = b1 * m[e] + (1 - b1) * g;
                    v[e] = b2 * v[e] + (1 - b2) * g * g;
                    after = p * (1 - lr * decay) - lr * (m[e] / (1 - pow(b1, step + 1))) /
                            (sqrt(v[e] / (1 - pow(b2, step + 1))) + eps);
                }
                const double wrong = fabs(x.p[e] - after) / (1 + fabs(after));
                if (!(wrong <= error)) error = wrong;
            }
            report(error <= 1e-5, "parameters differ by %g", error);
            check_small_state(&x, 0, m, map[0]);
            if (i.op == TT__OP_ADAM) check_small_state(&x, 1, v, map[1]);
        }
        TEST_CLOSE(ctx, &a);
    }
}

/* A weight that is rounded while it is read gives the bits of a rounded copy, in products of few rows,
   products of short sums, and packed products, with partial tiles. */
TEST(weights_narrowed_while_read)
{
    enum { MAX = 600 * 130 };
    static const char *const isa[] = {"portable",     "avx2", "avx512",  "avx512_dot",
                                      "avx512_tiles", "neon", "neon_dot"};
    /* columns: rows, out, width */
    static const int shape[][3] = {{1, 1, 1}, {3, 40, 130}, {20, 130, 70}, {31, 7, 600}, {100, 130, 33}};
    static float w[MAX], got[2][MAX];
    static uint16_t x[MAX], copy[MAX];
    for (int k = 0; k < TT__COUNT(isa); k++) {
        if (!has_isa(isa[k])) continue;
        for (int f16 = 0; f16 < (is_bf16(isa[k]) ? 1 : 2); f16++)
            for (int s = 0; s < 2 * TT__COUNT(shape); s++) {
                /* odd s: the product is the gradient of x */
                const int *z = shape[s / 2], rows = z[0], from = s % 2 ? z[1] : z[2],
                          to = s % 2 ? z[2] : z[1];
                const tt_dtype half = f16 ? TT_F16 : TT_BF16;
                uint64_t random = (uint64_t)s + 99;
                test_allocator a;
                tt_context_options co = test_options(&a);
                co.threads = 2;
                tt_context *ctx = open_isa(co, isa[k]);
                for (int e = 0; e < MAX; e++) w[e] = (float)test_random(&random) * 0x1p-31f - 1;
                for (int e = 0; e < MAX; e++) tt__convert(&copy[e], half, &w[e], TT_F32, 1);
                for (int e = 0; e < MAX; e++) {
                    float y = (float)test_random(&random) * 0x1p-31f - 1;
                    tt__convert(&x[e], half, &y, TT_F32, 1);
                }
                memset(got, 0, sizeof got);
                for (int narrow = 0; narrow < 2; narrow++) {
                    tt__instr i = tt__new_instr(s % 2 ? TT__OP_LINEAR_DX : TT__OP_LINEAR);
                    tt__launch l;
                    memset(&l, 0, sizeof l);
                    i.attr.narrow = narrow ? half : TT_F32;
                    l.device = (tt__device *)(void *)&ctx->cpu;
                    l.instr = &i;
                    tt__mat in = {x, half, rows, from, from}, weight = {copy, half, z[1], z[2], z[2]},
                            out = {got[narrow], TT_F32, rows, to, to};
                    if (narrow) { weight.data = w; weight.dtype = TT_F32; }
                    l.in[0] = in;
                    l.in[1] = weight;
                    l.out[0] = out;
                    size_t bytes = tt__gemm_workspace(rows, to, from);
                    l.workspace = tt__alloc(ctx, bytes);
                    CHECK(l.workspace && ctx->cpu.isa->run[i.op](&l) == TT_OK);
                    tt__free(ctx, l.workspace);
                }
                snprintf(where, sizeof where, "%s, %s, %d x %d, %s of width %d", isa[k], tt_dtype_name(half),
                         z[1], z[2], s % 2 ? "gradients" : "rows", from);
                report(memcmp(got[0], got[1], sizeof got[0]) == 0, "bits differ");
                report(rows * to == 1 || got[0][0] != got[0][1], "nothing is computed");
                TEST_CLOSE(ctx, &a);
            }
    }
}
