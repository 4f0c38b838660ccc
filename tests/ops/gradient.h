/* Tests that compare the gradients of all cases with finite differences of the plain loops. */
#pragma once

/* --------------------------------------------------------------------------------------- test 2: gradient */

typedef struct expected { /* gradients of a net's parameters, one after another, for micro-batches 0 and 1 */
    double *grad[2], *direction;
    int size;
} expected;

/* Expected gradients, which are computed once for all instruction sets and 16-bit precisions. */
static expected known[CASE_COUNT][SIZES][MODES][2];
static bool ran[TT__OP_COUNT];

/* Returns the loss after a change of parameter k. Evaluates only the nodes that depend on k. */
TEST_PLAIN static double loss_at(int loss, int k)
{
    for (int i = 1; i <= g->n; i++) {
        node *n = &g->nodes[i];
        n->stale = i == k || (n->eval && (g->nodes[n->in[0]].stale || g->nodes[n->in[1]].stale ||
                                          g->nodes[n->in[2]].stale));
        if (n->stale && n->eval) n->eval(n);
    }
    return g->nodes[loss].v[0];
}

/* Tells whether only the derivative along one random direction is compared, which takes two evaluations
   instead of thousands. */
static bool by_direction(const node *n) { return g->size->only || n->rows * n->cols > 400; }

static void difference(expected *e, int loss)
{
    int size = 0;
    for (int k = 1; k <= g->n; k++) if (g->nodes[k].param) size += g->nodes[k].rows * g->nodes[k].cols;
    e->size = size;
    e->direction = (double *)calloc((size_t)size, sizeof(double));
    for (int k = 0; k < size; k++) e->direction[k] = uniform();
    evaluate();
    g->differencing = true;
    for (int micro = 0; micro < (g->has_random ? 2 : 1); micro++) {
        double *grad = e->grad[micro] = (double *)calloc((size_t)size, sizeof(double)),
               *direction = e->direction;
        g->micro = (uint64_t)micro;
        evaluate();
        for (int k = 1; k <= g->n; k++) {
            node *n = &g->nodes[k];
            int count = n->param ? n->rows * n->cols : 0;
            bool along = by_direction(n);
            const double h = along ? 2e-5 : 2e-6;
            double l[2];
            for (int x = 0; x < count && !along; x++) {
                double old = n->v[x];
                for (int side = 0; side < 2; side++) {
                    n->v[x] = old + (side ? h : -h);
                    l[side] = loss_at(loss, k);
                }
                n->v[x] = old;
                if (x == count - 1) loss_at(loss, k);
                grad[x] = (l[1] - l[0]) / (2 * h);
            }
            for (int side = 0; side < 2 && along && count; side++) {
                double *old = (double *)malloc(sizeof(double) * (size_t)count);
                memcpy(old, n->v, sizeof(double) * (size_t)count);
                for (int x = 0; x < count; x++) n->v[x] += (side ? h : -h) * direction[x];
                l[side] = loss_at(loss, k);
                memcpy(n->v, old, sizeof(double) * (size_t)count);
                free(old);
                loss_at(loss, k);
            }
            if (along && count) grad[0] = (l[1] - l[0]) / (2 * h);
            grad += count;
            direction += count;
        }
    }
    g->micro = 0;
    g->differencing = false;
}

/* Compares a parameter's gradient with the mean gradient of micro-batches 0..micros-1. The parameter's first
   element is element `at` of all parameters of the net. */
TEST_PLAIN static void check_gradient(const expected *e, const node *n, int at, const float *got, int micros,
                           const precision_case *precision, const char *what)
{
    int count = n->rows * n->cols;
    bool along = by_direction(n);
    double *mean = (double *)malloc(sizeof(double) * (size_t)count), max = 0, most_of_all = 0;
    double relative = precision->rounding > 0 ? precision->rounding * g->nodes[g->n].depth : GRADIENT_F32;
    float dot = 0;
    for (int k = 0; k < count; k++) {
        mean[k] = e->grad[1] && micros == 2 ? (e->grad[0][at + k] + e->grad[1][at + k]) / 2
                                            : e->grad[0][at + k];
        if (fabs(mean[k]) > max) max = fabs(mean[k]);
    }
    for (int k = 0; k < e->size; k++)
        if (fabs(e->grad[0][k]) > most_of_all) most_of_all = fabs(e->grad[0][k]);
    if (along) {
        double sum = 0, size = 0;
        for (int k = 0; k < count; k++) {
            sum += got[k] * e->direction[at + k];
            size += fabs(got[k] * e->direction[at + k]);
        }
        dot = (float)sum;
        max = size / sqrt((double)count) + fabs(sum);
        if (max > most_of_all) most_of_all = max;
    }
    all_near(what, along ? &dot : got, mean, along ? 1 : count,
             relative * (max + (precision->rounding > 0 ? 0.5 : 0.1) * most_of_all + g->upstream) + 1e-9);
    free(mean);
}

static void note_ops(const tt_program *p)
{
    for (int k = 0; k < p->built.t->n_code; k++) ran[p->built.t->code[k].op] = true;
}

/* Runs `micros` micro-batches of the same inputs and checks the gradients of all trainable parameters after
   each micro-batch. */
static void check_accumulated(tt_program *p, const expected *e, int micros, const precision_case *precision,
                              const char *what)
{
    char name[96];
    for (int micro = 0; micro < micros; micro++) {
        if (!report(set_inputs(p) && tt_micro_step(p, NULL) == TT_OK, "%s: %s", what, tt_error(g->ctx)))
            return;
        for (int k = 1, at = 0; k <= g->n; k++) {
            node *n = &g->nodes[k];
            if (!n->param) continue;
            if (!tt_param_frozen(n->param)) {
                float *got = (float *)malloc(sizeof(float) * (size_t)(n->rows * n->cols));
                snprintf(name, sizeof name, "%s, gradient of %s after %d micro-batches", what,
                         tt_param_name(n->param), micro + 1);
                if (report(tt_get_gradient(p, n->param, got) == TT_OK, "%s: %s", name, tt_error(g->ctx)))
                    check_gradient(e, n, at, got, micro + 1, precision, name);
                free(got);
            }
            at += n->rows * n->cols;
        }
    }
}

/* Checks the gradients by one tt_step of plain SGD with a large learning rate: each parameter must change by
   the gradient times the rate. */
static void check_stepped(tt_program *p, const expected *e, const precision_case *precision)
{
    const float lr = 1024;
    char name[96];
    if (!report(set_inputs(p) && tt_step(p, lr, NULL) == TT_OK, "tt_step: %s", tt_error(g->ctx))) return;
    for (int k = 1, at = 0; k <= g->n; k++) {
        node *n = &g->nodes[k];
        if (!n->param) continue;
        int count = n->rows * n->cols;
        float *got = (float *)malloc(sizeof(float) * (size_t)count);
        snprintf(name, sizeof name, "tt_step, gradient of %s", tt_param_name(n->param));
        tt_param_get(n->param, got);
        for (int x = 0; x < count; x++) got[x] = (float)((n->v[x] - got[x]) / lr);
        check_gradient(e, n, at, got, 1, precision, name);
        for (int x = 0; x < count; x++) got[x] = (float)n->v[x];
        tt_param_set(n->param, got);
        free(got);
        at += count;
    }
}

static void gradient_case(int c, int s, const char *isa, const precision_case *precision, int mode)
{
    net n;
    tt_compile_options o = tt_compile_options_default();
    bool half = precision->half != TT_F32, large = sizes[s].only != NULL;
    const bool all = !takes_turns(isa), may_step = precision->mixed || !half;
    const bool steps = may_step && (all || (c + s) % 2), sums = all || !steps;
    expected *e = &known[c][s][mode][half];
    net_open(&n, &cases[c], &sizes[s], isa, mode, mode == AS_GATHERED, half);
    snprintf(where, sizeof where, "%s, size %s, %s, %s%s%s", cases[c].name, sizes[s].name, isa,
             precision->name, precision->halved ? " with the other residual" : "", g->axes ? ", axes" : "");
    int loss = loss_of(cases[c].build(), mode == AS_GATHERED);
    g->train = true;
    evaluate();
    bool wanted = fits(&cases[c], precision);
    compile_in(&o, isa, precision);
    o.loss_scale.init = 65536;
    /* Halves the loss scale so that the sums of the backward do not overflow. */
    while (o.loss_scale.init > 1 && o.loss_scale.init * g->upstream > 256) o.loss_scale.init /= 2;
    o.accumulate = true;
    tt_program *p = wanted ? tt_compile(g->tape, g->nodes[loss].t, &o) : NULL, *q = NULL;
    if (wanted && report(p != NULL, "%s", tt_error(g->ctx))) {
        if (!e->grad[0]) difference(e, loss);
        p->poison = true;
        note_ops(p);
        if (sums) check_accumulated(p, e, large ? 1 : 2, precision, "all");
        else tt_program_free(p), p = NULL; /* frees the parameters for the next program */
        if (steps) { /* `steps` is false with stochastic rounding, which would hide the gradient */
            o.accumulate = false;
            o.optimizer.kind = TT_SGD;
            o.optimizer.weight_decay = 0;
            q = tt_compile(g->tape, g->nodes[loss].t, &o);
            if (report(q != NULL, "%s", tt_error(g->ctx))) {
                q->poison = true;
                note_ops(q);
                check_stepped(q, e, precision);
            }
            tt_program_free(q);
        }
        o.accumulate = true;
        const bool alone = g->params > 1 && !large && !half && all; /* trains one parameter at a time */
        for (int k = 1; k <= g->n && alone; k++) {
            if (!g->nodes[k].param) continue;
            tt_param_freeze(g->ctx, "*", true);
            tt_param_freeze(g->ctx, tt_param_name(g->nodes[k].param), false);
            q = tt_compile(g->tape, g->nodes[loss].t, &o);
            if (report(q != NULL, "only %s: %s", tt_param_name(g->nodes[k].param), tt_error(g->ctx))) {
                q->poison = true;
                check_accumulated(q, e, 1, precision, "alone");
            }
            tt_program_free(q);
        }
    }
    tt_program_free(p);
    net_close();
}

static void gradient(const char *isa)
{
    if (!has_isa(isa))
        SKIP(is_cuda(isa) ? "this build is without TINYTRAIN_CUDA" : "this CPU does not have it");
    ask_for_a_case();
    for (int c = 0; c < CASE_COUNT; c++)
        for (int s = 0; s < SIZES; s++) {
            if (!fits_case(&sizes[s], &cases[c], isa) || !test_takes(c + s)) continue;
            for (int k = 0; k < PRECISIONS; k++)
                for (int mode = AS_PARAM; mode <= AS_GATHERED; mode++) {
                    const precision_case *p = &precisions[k];
                    if (leaves_to_others(isa, c + s + k, 2)) continue;
                    if (sizes[s].only && k > 0 && !(sizes[s].half && p->mixed && !p->halved)) continue;
                    const bool both = k == 0 && TEST_SWEEP == 1 && !is_cuda(isa);
                    /* On CUDA the turn depends on `c` alone, because left_out already divides the cases by
                       `c + s + k`. */
                    const int turn = is_cuda(isa) ? c : c + s;
                    bool wanted = sizes[s].only ? mode == AS_GATHERED : both || turn % 2 == mode - AS_PARAM;
                    if (p->halved) wanted = (c + s) % 4 == mode;
                    if (left_out(isa, &sizes[s], c + s + k)) wanted = false;
                    if (wanted && (!is_bf16(isa) || p->half == TT_BF16)) gradient_case(c, s, isa, p, mode);
                }
        }
}

TEST(gradient_portable) { gradient("portable"); }
TEST(gradient_avx2) { gradient("avx2"); }
TEST(gradient_avx512) { gradient("avx512"); }
TEST(gradient_avx512_dot) { gradient("avx512_dot"); }
TEST(gradient_avx512_tiles) { gradient("avx512_tiles"); }
TEST(gradient_neon) { gradient("neon"); }
TEST(gradient_neon_dot) { gradient("neon_dot"); }
TEST(gradient_cuda) /* without warpgroups, which attention_by_warpgroups tests */
{
    setenv("TINYTRAIN_WGMMA", "0", 1);
    gradient("cuda");
    unsetenv("TINYTRAIN_WGMMA");
}

/* Returns whether device "cuda" opens; otherwise writes the reason to `message`. */
static bool opens_cuda(char *message, size_t capacity)
{
    tt_context_options co = tt_context_options_default();
    tt_compile_options o = tt_compile_options_default();
    co.threads = 1;
    co.logger.log = test__no_log;
    tt_context *ctx = open_isa(co, "cuda");
    tt_tape *t = ctx ? tt_tape_new(ctx) : NULL;
    const tt_value x = tt_input(t, "x", TT_F32, 1, 4), y = tt_gelu(t, x);
    tt_output(t, y);
    o.train = false;
    o.device = "cuda";
    tt_program *p = t ? tt_compile(t, y, &o) : NULL;
    const bool has = p && tt_allocate(p) == TT_OK;
    snprintf(message, capacity, "%.190s", has ? "" : tt_error(ctx));
    tt_program_free(p);
    tt_tape_free(t);
    tt_close(ctx);
    return has;
}
