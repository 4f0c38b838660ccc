/* Tests that memory savings change no bits of random networks, and that gradients are right. */
#pragma once

/* Sets every input of the tape, including inputs that the program does not read, to batch number `batch`. */
static tt_status set_inputs(const net *n, tt_program *p, uint64_t batch)
{
    uint64_t s = batch * 77 + 5;
    int32_t starts[NET_SEQS + 1] = {0}, integer[NET_ROWS];
    float numbers[NET_ROWS * 16];
    int seqs = 1 + pick(&s, NET_SEQS);
    for (int k = 0; k < seqs; k++) starts[k + 1] = starts[k] + 1 + pick(&s, NET_ROWS / NET_SEQS);
    int rows = starts[seqs], labels = n->per_sequence ? seqs : rows;
    tt_status status = tt_set(p, n->starts, starts, seqs + 1);
    for (int k = 0; k < rows; k++) integer[k] = pick(&s, rows);
    if (status == TT_OK) status = tt_set(p, n->index, integer, rows);
    for (int k = 0; k < rows; k++) integer[k] = pick(&s, NET_VOCAB);
    if (status == TT_OK) status = tt_set(p, n->ids, integer, rows);
    for (int k = 0; k < rows * n->width; k++) numbers[k] = test_uniform(&s);
    if (status == TT_OK) status = tt_set(p, n->x, numbers, rows);
    for (int k = 0; k < labels; k++) integer[k] = pick(&s, NET_CLASSES);
    if (labels > 1) integer[1] = -100;
    if (status == TT_OK && n->labels.id) status = tt_set(p, n->labels, integer, labels);
    for (int k = 0; k < labels * n->width; k++) numbers[k] = test_uniform(&s) + 1.5f;
    if (status == TT_OK && n->weights.id) status = tt_set(p, n->weights, numbers, labels);
    if (status == TT_OK && n->target.id) status = tt_set(p, n->target, numbers, labels);
    return status;
}

/* Losses, parameters and status after a few steps. */
typedef struct outcome {
    double loss[8];
    int n_losses;
    float *params;
    size_t n;
    tt_status status;
    char error[256];
} outcome;

static bool same_outcome(const outcome *a, const outcome *b)
{
    return a->status == TT_OK && b->status == TT_OK && a->n_losses == b->n_losses &&
           memcmp(a->loss, b->loss, sizeof *a->loss * (size_t)a->n_losses) == 0 && a->n == b->n &&
           memcmp(a->params, b->params, a->n * sizeof(float)) == 0;
}

static void free_outcome(outcome *o) { free(o->params); o->params = NULL; }

static void take_params(tt_context *ctx, outcome *o)
{
    o->n = 0;
    for (int k = 0; k < ctx->n_params; k++) o->n += (size_t)ctx->params[k]->size;
    o->params = (float *)malloc((o->n + 1) * sizeof(float));
    float *to = o->params;
    for (int k = 0; k < ctx->n_params; k++) { tt_param_get(ctx->params[k], to); to += ctx->params[k]->size; }
}

/* Gives each storage its own place, so that nothing is shared or works in place. Must be called before
   anything is allocated. */
static void scatter(tt_program *p)
{
    size_t at = 0;
    for (int k = 0; k < p->built.n_boxes; k++) {
        if (p->built.box[k].space == TT__HOST) continue;
        p->built.box[k].merged = k;
        p->built.box[k].place = at;
        at += p->built.box[k].bytes;
        if (p->built.box[k].value) p->built.t->values[p->built.box[k].value].place = p->built.box[k].place;
        else p->built.t->code[p->built.box[k].first].workspace_place = p->built.box[k].place;
    }
    p->built.transient = p->arena->transient = at;
}

static void poison(tt_program *p) /* overwrites transient memory now, and later each storage that is dead */
{
    p->poison = true;
    char *const *memory = p->arena->memory;
    if (tt_allocate(p) == TT_OK) memset(memory[0] + p->arena->persistent, 0xff, p->arena->transient);
}

typedef enum variant {
    PLAIN, POISONED, SCATTERED, THREADED, PLANNED, EVALUATED, KEEPING, ATTENTION, BLOCKS, BUDGETED,
    OFFLOADING, ON_HOST, EARLY, EARLY_OFFLOADING, VARIANTS
} variant;

static const char *const offloads[] = {"optimizer", "gradients", "parameters", "optimizer,gradients",
                                       "activations", "activations,gradients,parameters,optimizer"};

/* Tells whether updates during the backward are tested for a network: for half of the seeds, without
   accumulation and without a loss scale. */
static bool may_be_early(uint64_t seed, const precision_case *precision, bool accumulate)
{
    return seed % 2 && !accumulate && strncmp(precision->name, "16-", 3) != 0;
}

/* Compiles with the smallest of some budgets that the network fits. */
static tt_program *compile_within(const net *n, uint64_t seed, tt_compile_options c)
{
    tt_program *p = NULL;
    c.recompute = "none";
    tt_program *all = tt_compile(n->t, n->loss, &c);
    if (!all) return NULL;
    const tt_plan plan = tt_program_plan(all);
    tt_program_free(all);
    c.recompute = "budget";
    if (seed % 4 > 1) c.offload = "budget";
    for (size_t part = 5 + seed % 2; part <= 8 && !p; part++) {
        c.memory_budget = plan.persistent_bytes + (plan.bytes - plan.persistent_bytes) / 8 * part;
        p = tt_compile(n->t, n->loss, &c);
        CHECK(p ? tt_program_plan(p).bytes <= c.memory_budget : tt_error_code(n->t->ctx) == TT_ERR_BUDGET);
    }
    return p;
}

static outcome run_net(uint64_t seed, const precision_case *precision, bool accumulate, variant how)
{
    static const net_options with_all = {true, true};
    outcome o;
    test_allocator a;
    net n;
    tt_stats stats;
    tt_context_options co = test_options(&a);
    tt_compile_options c = options_of(precision);
    memset(&o, 0, sizeof o);
    co.threads = how == THREADED ? 3 : 1;
    co.verify = true;
    tt_context *ctx = open_apart(&co);
    c.accumulate = accumulate;
    const bool may = may_be_early(seed, precision, accumulate);
    c.optimizer.clip_norm = may ? 0 : 1;
    if (may) {
        static const tt_optimizer_kind kinds[] = {TT_SGD, TT_SGD, TT_ADAM, TT_ADAMW};
        c.optimizer.kind = kinds[seed / 2 % 4];
        c.optimizer.momentum = seed / 2 % 4 ? 0.9f : 0;
    }
    if (how >= EARLY) c.update = "backward";
    if (how == ON_HOST) c.update = "host";
    tt__limit_update_from = seed % 4 == 1 ? 1 : 200;
    c.recompute = how == KEEPING ? "none"
                  : how == ATTENTION ? "attention"
                  : how == BLOCKS ? "blocks"
                  : "cheap";
    ctx->late = (how == OFFLOADING || how == ON_HOST) && seed % 2; /* late: copies overlap with computation */
    if (how == OFFLOADING && seed % 4) c.recompute = seed % 4 == 1 ? "blocks" : "none";
    if (how >= EARLY && seed % 4 == 1) c.recompute = "blocks";
    const uint64_t list = how == EARLY_OFFLOADING ? seed / 2 : seed + (uint64_t)accumulate;
    if (how == EARLY_OFFLOADING || (how == OFFLOADING && seed % 7) || (how == ON_HOST && seed % 3))
        c.offload = offloads[list % TEST_COUNT(offloads)];
    bool built = random_net(ctx, seed, with_all, &n);
    for (int32_t v = 1; built && (how == BLOCKS || how >= EARLY) && v < n.t->n_values; v++)
        if ((v * 7 + (int32_t)seed) % 9 == 0) tt_block_end(n.t, tt__handle(n.t, v));
    for (int32_t v = 1; built && how == OFFLOADING && v < n.t->n_values; v++) {
        if ((v * 5 + (int32_t)seed) % 9 == 0) tt_offload(n.t, tt__handle(n.t, v));
        if ((v * 7 + (int32_t)seed) % 9 == 0) tt_block_end(n.t, tt__handle(n.t, v));
    }
    for (int32_t v = 1; built && how >= KEEPING && seed % 2 && v < n.t->n_values; v++) {
        const uint64_t marked = (uint64_t)v * 7919 % 101 + seed + (uint64_t)how;
        if (marked % 3 == 0) tt_recompute(n.t, tt__handle(n.t, v));
        else if (marked % 3 == 1) tt_keep(n.t, tt__handle(n.t, v));
    }
    tt_program *planned[2] = {NULL, NULL}; /* programs for another device, planned before and after */
    c.device = "cuda";
    if (built && how == PLANNED) planned[0] = tt_compile(n.t, n.loss, &c);
    c.device = "cpu";
    tt_program *p = built && how == BUDGETED ? compile_within(&n, seed, c) : NULL, *eval = NULL;
    if (built && how != BUDGETED) p = tt_compile(n.t, n.loss, &c);
    if (p && how == EVALUATED) { /* the evaluation shares the arena and runs between steps */
        c.train = false;
        c.share = p;
        eval = tt_compile(n.t, n.loss, &c);
        if (eval) CHECK(eval->arena == p->arena);
    }
    o.status = p && (how != EVALUATED || eval) ? TT_OK : tt_error_code(ctx);
    if (o.status == TT_OK && how == SCATTERED) scatter(p);
    if (o.status == TT_OK && (how == POISONED || how >= EVALUATED)) poison(p);
    for (int step = 0; step < 3 && o.status == TT_OK; step++) {
        if (eval) {
            poison(eval);
            o.status = set_inputs(&n, eval, 100);
            if (o.status == TT_OK) o.status = tt_run(eval, &stats);
            if (o.status == TT_OK && !isfinite(stats.loss)) o.status = TT_ERR_NUMERIC;
        }
        for (int micro = 0; micro < (accumulate ? 2 : 1) && o.status == TT_OK; micro++) {
            o.status = set_inputs(&n, p, (uint64_t)(step * 2 + micro));
            if (o.status == TT_OK)
                o.status = accumulate ? tt_micro_step(p, &stats) : tt_step(p, 0.01f, &stats);
        }
        if (o.status == TT_OK && accumulate) o.status = tt_update(p, 0.01f, &stats);
        o.loss[o.n_losses++] = stats.loss;
        o.loss[o.n_losses++] = stats.grad_norm;
        if (!planned[0]) continue;
        c.device = "cuda";
        tt_program_free(planned[1]);
        planned[1] = tt_compile(n.t, n.loss, &c);
        CHECK(planned[1] && tt_program_plan(planned[1]).bytes == tt_program_plan(planned[0]).bytes);
    }
    snprintf(o.error, sizeof o.error, "%.250s", o.status == TT_OK ? "" : tt_error(ctx));
    take_params(ctx, &o);
    tt_program_free(planned[0]);
    tt_program_free(planned[1]);
    tt_program_free(eval);
    tt_program_free(p);
    tt_tape_free(n.t);
    TEST_CLOSE(ctx, &a);
    return o;
}

TEST(random_networks_replay_bit_for_bit)
{
    static const char *const names[VARIANTS] = {"plain",
                                                "poisoned",
                                                "scattered",
                                                "threaded",
                                                "planned elsewhere",
                                                "evaluated",
                                                "keeping all",
                                                "recomputing attention",
                                                "recomputing blocks",
                                                "within a budget",
                                                "offloading",
                                                "updating on the host",
                                                "updating in the backward",
                                                "updating in the backward, offloading"};
    char what[512];
    for (uint64_t seed = 0; seed <= 30; seed++) {
        for (int precision = 0; precision < PRECISIONS; precision++) {
            /* each precision from 5 on runs half of the networks */
            if (precision >= 5 && (int)seed % 2 == precision % 2) continue;
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                if (((int)seed + precision + 3 * accumulate) % (3 * TEST_SWEEP - 2)) continue;
                const precision_case *in = &precisions[precision];
                outcome plain = run_net(seed, in, accumulate, PLAIN);
                snprintf(what, sizeof what, "network %d, %s, accumulate %d: %s", (int)seed, in->name,
                         accumulate, plain.error);
                if (plain.status == TT_ERR_ARGUMENT && strstr(plain.error, "nothing to train")) {
                    free_outcome(&plain);
                    continue;
                }
                test__check(plain.status == TT_OK && isfinite(plain.loss[0]), __FILE__, __LINE__, what);
                for (int how = POISONED; how < VARIANTS; how++) {
                    if (how >= EARLY && !may_be_early(seed, in, accumulate)) continue;
                    outcome other = run_net(seed, in, accumulate, (variant)how);
                    snprintf(what, sizeof what,
                             "network %d, %s, accumulate %d, %s: other results (first losses %.9g, %.9g) %s",
                             (int)seed, in->name, accumulate, names[how], plain.loss[0], other.loss[0],
                             other.error);
                    test__check(same_outcome(&plain, &other), __FILE__, __LINE__, what);
                    free_outcome(&other);
                }
                free_outcome(&plain);
            }
        }
    }
}

/* Returns the mean loss over two micro-batches, for finite differences: along each parameter's gradient, and
   along a random direction. */
static double mean_loss(const net *n, tt_program *eval)
{
    double loss = 0, targets = 0;
    for (uint64_t batch = 0; batch < 2; batch++) {
        tt_stats stats;
        if (set_inputs(n, eval, batch) != TT_OK || tt_run(eval, &stats) != TT_OK) return NAN;
        loss += stats.loss * stats.targets;
        targets += stats.targets;
    }
    return loss / targets;
}

static double slope(const net *n, tt_program *eval, tt_param *p, const float *at, const float *direction,
                    float *scratch)
{
    double loss[4];
    static const float steps[4] = {-2, -1, 1, 2};
    const float h = 1.0f / 128;
    for (int k = 0; k < 4; k++) {
        for (int64_t i = 0; i < p->size; i++) scratch[i] = at[i] + steps[k] * h * direction[i];
        tt_param_set(p, scratch);
        loss[k] = mean_loss(n, eval);
    }
    tt_param_set(p, at);
    return (8 * (loss[2] - loss[1]) - (loss[3] - loss[0])) / (12 * h);
}

TEST(random_networks_have_true_gradients)
{
    static const net_options smooth = {false, false};
    char what[512];
    for (uint64_t seed = 0; seed <= 80; seed++) {
        test_allocator a;
        net n;
        tt_context *ctx = test_open(&a);
        tt_compile_options c = tt_compile_options_default();
        c.accumulate = true;
        tt_program *p = random_net(ctx, seed, smooth, &n) ? tt_compile(n.t, n.loss, &c) : NULL;
        c.train = false;
        c.share = p;
        tt_program *eval = p ? tt_compile(n.t, n.loss, &c) : NULL;
        CHECK(eval != NULL);
        for (uint64_t batch = 0; batch < 2 && eval; batch++)
            CHECK(set_inputs(&n, p, batch) == TT_OK && tt_micro_step(p, NULL) == TT_OK);
        for (int k = 0; eval && k < ctx->n_params; k++) {
            tt_param *w = ctx->params[k];
            uint64_t s = seed * 31 + (uint64_t)k + 1;
            size_t size = (size_t)w->size;
            float *all = (float *)malloc(size * 4 * sizeof(float)), *g = all, *at = all + size,
                  *direction = at + size, *scratch = direction + size;
            double norm = 0, along = 0, length = 0;
            /* tt_get_gradient fails if the loss does not depend on w. */
            if (tt_get_gradient(p, w, g) != TT_OK) memset(g, 0, size * sizeof(float));
            tt_param_get(w, at);
            for (size_t i = 0; i < size; i++) norm += (double)g[i] * g[i];
            norm = sqrt(norm);
            for (size_t i = 0; i < size; i++) direction[i] = norm > 0 ? (float)(g[i] / norm) : 0;
            double found = slope(&n, eval, w, at, direction, scratch);
            snprintf(what, sizeof what, "network %d: gradient of '%s': slope %.6g along it, norm %.6g",
                     (int)seed, w->name, found, norm);
            test__check(fabs(found - norm) <= 0.01 * norm + 1e-3, __FILE__, __LINE__, what);
            for (size_t i = 0; i < size; i++) {
                direction[i] = test_uniform(&s);
                length += (double)direction[i] * direction[i];
            }
            for (size_t i = 0; i < size; i++) {
                direction[i] /= (float)sqrt(length);
                along += (double)direction[i] * g[i];
            }
            found = slope(&n, eval, w, at, direction, scratch);
            snprintf(what, sizeof what, "network %d: gradient of '%s': slope %.6g across it, expected %.6g",
                     (int)seed, w->name, found, along);
            test__check(fabs(found - along) <= 0.01 * fabs(along) + 0.002 * norm + 1e-3, __FILE__, __LINE__,
                        what);
            free(all);
        }
        tt_program_free(eval);
        tt_program_free(p);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
}
