/* Tests that compare the results of all cases with the plain loops. */
#pragma once

/* ----------------------------------------------------------------------------------------- building a net */

/* Tells whether `isa`, a name of an instruction set, ends in _dot or _tiles, a way to compute bf16
   products. */
static bool is_bf16(const char *isa) { return strchr(isa, '_') != NULL; }

/* Tells whether `isa` is device "cuda" instead of an instruction set of the CPU. */
static bool is_cuda(const char *isa) { return strcmp(isa, "cuda") == 0; }

static tt_context *open_isa(tt_context_options o, const char *isa)
{
    char name[32];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(isa, "_"), isa);
    o.isa = is_cuda(isa) ? NULL : name;
    o.bf16 = is_bf16(isa) ? strchr(isa, '_') + 1 : "convert";
    tt_context *ctx = tt_open(&o);
    if (ctx) ctx->options.isa = ctx->options.bf16 = NULL;
    return ctx;
}

static bool has_isa(const char *isa)
{
#ifndef TINYTRAIN_CUDA
    if (is_cuda(isa)) return false;
#endif
    tt_context_options o = tt_context_options_default();
    o.threads = 1;
    o.logger.log = test__no_log;
    tt_context *ctx = open_isa(o, isa);
    tt_close(ctx);
    return ctx != NULL;
}

static void net_open(net *to, const op_case *c, const size_set *size, const char *isa, int mode, bool axes,
                     bool round)
{
    static const char *const names[KINDS] = {"", "rows", "seqs", "picked"};
    tt_context_options o = tt_context_options_default();
    memset(to, 0, sizeof *to);
    g = to;
    o.threads = 2;
    o.seed = 7;
    o.verify = true;
    o.logger.log = test__no_log;
    g->seed = o.seed;
#ifdef TT_EMULATE /* a new device for each case, with another order of the work that CUDA does not order */
    static uint64_t seed;
    if (is_cuda(isa)) emu_configure(1, (size_t)64 << 20, 1, ++seed);
#endif
    g->ctx = open_isa(o, isa);
    g->tape = tt_tape_new(g->ctx);
    g->size = size;
    g->mode = mode;
    g->axes = axes;
    g->gain = 1;
    g->round = round;
    g->d = size->heads * size->head_size;
    for (int s = 0; s < 8; s++) {
        g->count[ROWS] += size->length[s];
        g->count[SEQS] += size->length[s] > 0;
    }
    g->count[CONSTANT] = 1;
    g->count[PICKED] = size->picked;
    for (int k = 1; k < KINDS && axes; k++) g->axis[k] = tt_axis(g->tape, names[k], g->count[k] + 3);
    g->random = tt__hash(c->name) ^ tt__hash(size->name) ^ (uint64_t)mode;
}

static bool report(bool ok, const char *format, ...);

static void net_close(void)
{
    for (int k = 1; k <= g->n; k++) { free(g->nodes[k].v); free(g->nodes[k].index); free(g->nodes[k].bytes); }
    tt_tape_free(g->tape);
    tt_close(g->ctx);
#ifdef TT_EMULATE
    char left[256] = "";
    if (emu_live_objects(left, sizeof left)) report(false, "left on the device: %s", left);
#endif
}

TEST_PLAIN static void evaluate(void)
{
    for (int k = 1; k <= g->n; k++) {
        if (!g->nodes[k].eval) continue;
        g->nodes[k].magnitude = 0;
        g->nodes[k].eval(&g->nodes[k]);
    }
}

/* Makes the loss of a case: its result, or the squared error of its result, directly or through a linear
   layer to one column. All gradients have the factor `result - target`. Targets are far from the results, so
   that the relative rounding error of this factor is small. */
static int loss_of(int result, bool projected)
{
    node *n = &g->nodes[result];
    double max = 0;
    /* A row's gradient is a difference of two numbers up to 1 / rows, and may be 0. */
    if (n->loss) {
        g->upstream = g->gain / g->nodes[n->in[0]].rows;
        return result;
    }
    if (projected) n = &g->nodes[result = linear(result, W(1, n->cols), 0)];
    evaluate();
    int target = input(n->kind, n->rows, n->cols, 1);
    for (int k = 0; k < n->rows * n->cols; k++) if (fabs(n->v[k]) > max) max = fabs(n->v[k]);
    for (int k = 0; k < n->rows * n->cols; k++)
        g->nodes[target].v[k] = (float)((max + 1) * (g->nodes[target].v[k] + (k % 2 ? 3 : -3)));
    g->upstream = 8 * g->gain * (max + 1) / (n->rows * n->cols);
    return squared_error(result, target, false);
}

static bool set_inputs(tt_program *p)
{
    bool ok = true;
    for (int k = 1; k <= g->n && ok; k++) {
        node *n = &g->nodes[k];
        if (!n->input) continue;
        float *values = (float *)malloc(sizeof(float) * (size_t)(n->rows * n->cols));
        for (int e = 0; e < n->rows * n->cols && !n->index; e++) values[e] = (float)n->v[e];
        const void *data = n->index ? (const void *)n->index
                           : n->bytes ? (const void *)n->bytes
                           : (const void *)values;
        ok = tt_set(p, n->t, data, n->rows) == TT_OK;
        free(values);
    }
    return ok;
}

static char where[256]; /* names the test in messages */

static bool report(bool ok, const char *format, ...)
{
    char message[768], text[400];
    va_list args;
    if (ok) return test__check(true, __FILE__, __LINE__, "");
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(message, sizeof message, "%s: %s", where, text);
    if (getenv("TT_TEST_ALL")) fprintf(stderr, "  %s\n", message);
    return test__check(false, "test_ops.c", 0, message);
}

TEST_PLAIN static bool all_near(const char *what, const float *got, const double *expected, int n,
                                double tolerance)
{
    int worst = 0;
    for (int k = 0; k < n; k++) {
        double error = fabs(got[k] - expected[k]);
        if (!(error <= fabs(got[worst] - expected[worst]))) worst = k;
        if (!(error <= tolerance) && error != error) break;
    }
    return report(fabs(got[worst] - expected[worst]) <= tolerance,
                  "%s: element %d of %d is %.9g, expected %.9g; they differ by %.3g, tolerance %.3g", what,
                  worst, n, (double)got[worst], expected[worst], fabs(got[worst] - expected[worst]),
                  tolerance);
}

static bool check_result(tt_program *p, int at, const precision_case *precision)
{
    node *n = &g->nodes[at];
    float *got = (float *)malloc(sizeof(float) * (size_t)(n->rows * n->cols));
    bool ok = tt_get(p, n->t, got, (size_t)(n->rows * n->cols)) == TT_OK;
    report(ok, "tt_get: %s", tt_error(g->ctx));
    if (ok)
        ok = all_near("result", got, n->v, n->rows * n->cols,
                      (precision->rounding > 0 ? precision->rounding : FORWARD_F32) * (1 + n->depth) *
                          n->magnitude);
    free(got);
    return ok;
}

static const char *tuned; /* tt_compile_options.tune of all programs */

static void compile_in(tt_compile_options *o, const char *isa, const precision_case *precision)
{
    o->tune = tuned;
    o->device = is_cuda(isa) ? "cuda" : "cpu";
    o->precision = precision->name;
    o->residual = precision->residual;
}

/* Tells whether f16, which holds at most 65504, can hold the case's numbers. Only one case may exceed f16. */
static bool fits(const op_case *c, const precision_case *precision)
{
    double max = 0;
    for (int k = 1; k <= g->n; k++) /* skips losses, which are f32 */
        for (int e = 0; e < g->nodes[k].rows * g->nodes[k].cols && !g->nodes[k].loss; e++)
            if (fabs(g->nodes[k].v[e]) > max) max = fabs(g->nodes[k].v[e]);
    bool ok = precision->half != TT_F16 || max < 32768;
    report(ok || strcmp(c->name, "gelu_tanh_very_far") == 0, "values of %g are more than f16 can hold", max);
    return ok;
}

/* Tells whether TT_TEST_CASE, a pattern like 'linear*', is absent or matches the case. */
static bool asked_for(const op_case *c)
{
    return !getenv("TT_TEST_CASE") || tt__match(getenv("TT_TEST_CASE"), c->name);
}

/* Fails if TT_TEST_CASE matches no case: the tests would pass without a check. */
static void ask_for_a_case(void)
{
    bool found = false;
    for (int c = 0; c < CASE_COUNT; c++) found |= asked_for(&cases[c]);
    snprintf(where, sizeof where, "TT_TEST_CASE");
    report(found, "no case is called '%s'", found ? "" : getenv("TT_TEST_CASE"));
}

/* Tells whether this build of the emulator leaves a combination out. The emulator is slow: each of three
   builds takes a part of all combinations, and the fastest build takes the largest part. Combinations of
   sizes "whole_*" are left out in build asan alone. With TT_TEST_CASE but not TT_TEST_SHARE, no build leaves
   a combination out. */
static bool left_out(const char *isa, const size_set *size, int combination)
{
#ifdef TT_EMULATE
    const int part = combination % 16;
    if (tt__match("whole_*", size->name) && strcmp(emu_build(), "asan") != 0) return false;
    if (!is_cuda(isa) || (getenv("TT_TEST_CASE") && !getenv("TT_TEST_SHARE"))) return false;
    return strcmp(emu_build(), "plain") == 0 ? part > 5
           : strcmp(emu_build(), "asan") == 0 ? part != 6
           : part != 7;
#else
    (void)isa; (void)size; (void)combination;
    return false;
#endif
}

/* Tells whether a test with TEST_SWEEP leaves the combination to another instruction set. portable, avx2,
   avx512 and neon share the text of their loops and divide the combinations; slow combinations run `times`
   less often. Instruction sets with bf16 products have only bf16 combinations. */
static bool leaves_to_others(const char *isa, int combination, int times)
{
    const int every = is_bf16(isa) ? (TEST_SWEEP + 2) / 3 : times * TEST_SWEEP;
    return TEST_SWEEP > 1 && !is_cuda(isa) && (combination + (int)strlen(isa) / 2) % every != 0;
}

/* Tells whether each gradient case makes only one of its kinds of runs. Slow builds of the emulator make one
   kind; the fast build makes all kinds. */
static bool takes_turns(const char *isa)
{
#ifdef TT_EMULATE
    if (getenv("TT_TEST_CASE") && !getenv("TT_TEST_SHARE")) return false;
    return is_cuda(isa) && strcmp(emu_build(), "plain") != 0;
#else
    (void)isa;
    return false;
#endif
}

/* Tells whether the case runs at the size. Thousands of rows of attention would take the emulator minutes. */
static bool fits_case(const size_set *size, const op_case *c, const char *isa)
{
    int rows = 0;
    for (int k = 0; k < TEST_COUNT(size->length); k++) rows += size->length[k];
#ifdef TT_EMULATE
    if (is_cuda(isa) && rows > 2200) return false;
#endif
    (void)isa;
    return asked_for(c) && rows > 0 && (!size->only || tt__match(size->only, c->name));
}

/* -------------------------------------------------------------------------------------- test 1: reference */

static void reference_case(const op_case *c, const size_set *size, const char *isa,
                           const precision_case *precision, int mode, bool axes)
{
    net n;
    tt_compile_options o = tt_compile_options_default();
    bool train = mode != AS_INPUT;
    net_open(&n, c, size, isa, mode, axes, precision->half != TT_F32);
    snprintf(where, sizeof where, "%s, size %s, %s, %s%s, %s%s", c->name, size->name, isa, precision->name,
             precision->halved ? " with the other residual" : "", train ? "training" : "inference",
             axes ? ", axes" : "");
    int result = c->build(), loss = train ? loss_of(result, false) : result;
    bool used = false;
    for (int k = 0; k < g->tape->n_code; k++) used |= g->tape->code[k].op == c->op;
    const bool broadcasts = c->op == TT__OP_ADD_ROW || c->op == TT__OP_MUL_BROADCAST;
    used |= broadcasts && g->count[ROWS] == 1 && !axes; /* for equal shapes, records ADD or MUL */
    used |= c->op == TT__OP_MUL_BROADCAST && (g->d == 1 || g->size->out == 1);
    report(used, "the case does not record the op that it is for");
    o.train = o.accumulate = g->train = train;
    compile_in(&o, isa, precision);
    tt_output(g->tape, g->nodes[result].t);
    evaluate();
    bool wanted = fits(c, precision);
    tt_program *p = wanted ? tt_compile(g->tape, g->nodes[loss].t, &o) : NULL;
    if (wanted && report(p != NULL, "%s", tt_error(g->ctx))) {
        p->poison = true;
        bool ok = set_inputs(p) && (train ? tt_micro_step(p, NULL) : tt_run(p, NULL)) == TT_OK;
        if (report(ok, "%s", tt_error(g->ctx))) check_result(p, result, precision);
    }
    tt_program_free(p);
    net_close();
}

static void reference(const char *isa)
{
    if (!has_isa(isa))
        SKIP(is_cuda(isa) ? "this build is without TINYTRAIN_CUDA" : "this CPU does not have it");
    ask_for_a_case();
    for (int c = 0; c < CASE_COUNT; c++)
        for (int s = 0; s < SIZES; s++) {
            if (!fits_case(&sizes[s], &cases[c], isa) || !test_takes(c + s)) continue;
            for (int k = 0; k < PRECISIONS; k++) {
                const precision_case *p = &precisions[k];
                if (left_out(isa, &sizes[s], c + s + k) || (is_bf16(isa) && p->half != TT_BF16) ||
                    (p->halved && (sizes[s].only || (c + s) % 2)) || leaves_to_others(isa, c + s + k, 1))
                    continue;
                /* A size has three kinds of runs; with TEST_SWEEP, or on the emulator of CUDA, each case
                   takes one kind. */
                const bool without_axes = (p->mixed && !p->halved) || k == 0;
                const bool all = TEST_SWEEP == 1 && !is_cuda(isa);
                int turn = (c + s + k + (int)strlen(isa)) % 3;
                if (turn == 1 && !without_axes) turn = 2;
                if (sizes[s].only) {
                    if (p->mixed || k == 0) reference_case(&cases[c], &sizes[s], isa, p, AS_INPUT, true);
                    continue;
                }
                if (all || turn == 0) reference_case(&cases[c], &sizes[s], isa, p, AS_INPUT, true);
                if ((all || turn == 1) && without_axes)
                    reference_case(&cases[c], &sizes[s], isa, p, AS_INPUT, false);
                if (all || turn == 2) reference_case(&cases[c], &sizes[s], isa, p, AS_GATHERED, true);
            }
        }
#ifdef TT_EMULATE
    CHECK(emu_get_counts().uneven_gemms == 0);
#endif
}

TEST(reference_portable) { reference("portable"); }
TEST(reference_avx2) { reference("avx2"); }
TEST(reference_avx512) { reference("avx512"); }
TEST(reference_avx512_dot) { reference("avx512_dot"); }
TEST(reference_avx512_tiles) { reference("avx512_tiles"); }
TEST(reference_neon) { reference("neon"); }
TEST(reference_neon_dot) { reference("neon_dot"); }
TEST(reference_cuda) /* without warpgroups, which attention_by_warpgroups tests */
{
    setenv("TINYTRAIN_WGMMA", "0", 1);
    reference("cuda");
    unsetenv("TINYTRAIN_WGMMA");
}
