/* Tests of choices within a budget, compared with brute force, and of budgets that are refused. */
#pragma once

/* ------------------------------------------------------------------------------------------------- budget */

/* Bytes, FLOPs of recomputation and seconds of all n choices of a small network. A choice is a configuration
   and a set of items to recompute, which may be empty. */
typedef struct menu { int items, n; size_t *bytes; double *extra, *seconds, flops; } menu;

static void free_menu(menu *m) { free(m->bytes), free(m->extra), free(m->seconds); }

/* Prepares a program and its choices, but does not build the program. */
static bool open_job(const net *n, const tt_compile_options *o, tt_program *p, tt__chooser *c)
{
    memset(p, 0, sizeof *p);
    p->ctx = n->t->ctx;
    static tt__attempt attempt;
    const tt__job job = {p, n->t, n->loss.id, NULL, &attempt, NULL};
    if (tt__parse_settings(p->ctx, o, &p->settings) != TT_OK) return false;
    *c = tt__chooser_of(&job);
    c->budget = o->memory_budget;
    if (tt__chooser_open(c) == TT_OK) return true;
    tt__chooser_close(c);
    return false;
}

/* Builds the program of a choice and adds the program's bytes and costs to m. */
static void add_to_menu(tt__chooser *c, const tt__choice *choice, menu *m)
{
    tt__extent e;
    tt_program *p = c->job.p;
    if (!CHECK(tt__try_build(&c->job, choice, &e) == TT_OK)) return;
    m->bytes[m->n] = e.bytes;
    m->extra[m->n] = tt__flops_of_copies(p->built.t);
    m->seconds[m->n++] = p->built.replay.step.compute + p->built.replay.step.exposed;
}

/* Fills *m with all choices. m->n is 0 if the network has more than `max` items, fewer than 2 items while
   recomputation may change, or more than 4 blocks. */
static void build_menu(const net *n, const tt_compile_options *o, int max, menu *m)
{
    tt_program p;
    tt__chooser c;
    memset(m, 0, sizeof *m);
    if (!open_job(n, o, &p, &c)) return;
    const tt_tape *t = c.front[c.base.zero][c.base.update].t;
    const int zeros = c.zero ? 3 : 1, blocks = c.offload ? c.blocks : 0, outs = c.offload ? 8 : 1;
    static const int halvings[] = {0, TT__ONE_BY_ONE}; /* choices of the size of groups of offloaded
                                                          tensors */
    const bool groups = c.offload || c.base.offload || c.base.update == TT__UPDATE_HOST;
    const int paces = (c.base.ahead + 1) * (groups ? TEST_COUNT(halvings) : 1);
    const size_t room = (size_t)((1 << c.n % 16) + 1) * 72 * 5 * 2;
    for (int k = 0; k < t->n_code; k++) m->flops += tt__flops_at_capacity(t, &t->code[k]);
    m->items = c.n;
    const bool wanted = (c.n >= 2 || !c.recompute) && c.n <= max && blocks <= 4;
    m->bytes = (size_t *)calloc(room, sizeof *m->bytes);
    m->extra = (double *)calloc(room, sizeof *m->extra);
    m->seconds = (double *)calloc(room, sizeof *m->seconds);
    for (int k = 0; k < zeros * outs * (blocks + 1) && wanted; k++)
        for (int sets = 0; sets <= (c.recompute ? 1 << c.n : 0); sets++)
            for (int pace = 0; pace < paces; pace++) {
                tt__choice choice = c.base;
                choice.ahead = pace % (c.base.ahead + 1);
                choice.halved = halvings[pace / (c.base.ahead + 1)];
                /* The menu has only choices without memory for the inputs of the next run, because the
                   library gives up that memory first, which costs no FLOPs. */
                choice.arrivals = false;
                choice.activations = k % (blocks + 1);
                choice.offload = (unsigned)(k / (blocks + 1) % outs) | (choice.activations ? 8u : 0);
                if (c.zero) choice.zero = 1 + k / (blocks + 1) / outs;
                if (!c.offload) choice.offload = c.base.offload, choice.activations = INT_MAX;
                if (c.recompute && sets >> c.n == 0) choice.recompute = TT__RECOMPUTE_CHEAP;
                for (int i = 0; i < c.n; i++) c.drop[c.item[i]] = sets >> i & 1;
                choice.drop = c.drop;
                choice.n_drop = c.front[c.base.zero][c.base.update].forward_values;
                add_to_menu(&c, &choice, m);
            }
    tt__built_free(p.ctx, &p.built);
    tt__chooser_close(&c);
}

/* Returns the smallest cost of the choices that fit a budget. */
static double optimum(const menu *m, const double *cost, size_t budget)
{
    double best = INFINITY;
    for (int k = 0; k < m->n; k++) if (m->bytes[k] <= budget && cost[k] < best) best = cost[k];
    return best;
}

/* Records up to `max` blocks of two linear layers, some with attention, on 2 to 5 times `per` rows. With
   `per` 64, activations take most of the memory. */
static bool random_stack(tt_context *ctx, uint64_t seed, int max, int per, net *n)
{
    uint64_t s = seed * 31 + 7;
    const int blocks = 1 + pick(&s, max);
    const int64_t d = 8 * (1 + pick(&s, 3));
    const tt_attention_options o = tt_attention_options_default(2);
    memset(n, 0, sizeof *n);
    tt_tape *t = n->t = tt_tape_new(ctx);
    const int64_t rows = tt_axis(t, "tokens", per * (2 + pick(&s, 4)));
    n->starts = tt_seq_start(t, "starts", tt_axis(t, "seqs", 2));
    tt_value x = tt_input(t, "x", TT_F32, rows, d);
    for (int k = 0; k < blocks; k++) {
        const int64_t wide = d * (1 + pick(&s, 4));
        const bool attends = blocks < 3 && pick(&s, 2), norm = pick(&s, 2);
        tt_value h = norm ? encoder_norm(t, k, "norm", x, d) : x;
        if (attends) h = tt_attention(t, h, h, encoder_linear(t, k, "v", h, d), n->starts, &o);
        h = encoder_linear(t, k, "up", h, wide);
        h = encoder_linear(t, k, "down", pick(&s, 3) ? tt_gelu(t, h) : tt_tanh(t, h), d);
        x = pick(&s, 4) ? tt_add(t, x, h) : h;
        if (pick(&s, 3)) tt_block_end(t, x);
    }
    n->target = tt_input(t, "target", TT_F32, rows, d);
    n->loss = tt_mean_squared_error(t, encoder_linear(t, blocks, "head", x, d), n->target, n->weights);
    return tt_tape_status(t) == TT_OK;
}

/* Returns costs with slow arithmetic and little bandwidth, so that launches do not dominate. */
static tt_costs slow_costs(void)
{
    tt_costs c = tt_costs_default();
    c.product_16 = c.attention_16 = 4e9;
    c.product_f32 = c.attention_f32 = 2e9;
    c.memory = 1e9;
    c.to_host = c.from_host = 3e8;
    c.between_ranks = 6e8;
    c.launch = 1e-6;
    c.barrier = 2e-6;
    return c;
}

/* Checks that the chosen program fits, and costs at most `margin * whole` more than the best choice. */
static void check_choice(const menu *m, tt_context *ctx, tt_program *p, const tt_compile_options *c,
                         const double *cost, double whole, double margin, double *chosen)
{
    const tt_plan no_plan = {0}, plan = p ? tt_program_plan(p) : no_plan;
    char what[1400];
    const double best = optimum(m, cost, c->memory_budget);
    const double now = cost == m->extra ? plan.extra_flops : plan.compute_seconds + plan.exposed_seconds;
    snprintf(what, sizeof what, "%d items, recompute %s, offload %s, zero %d, budget %zu: cost %g in %zu "
             "bytes, the optimum is %g (%s)", m->items, c->recompute, c->offload ? c->offload : "none",
             c->parallel.zero, c->memory_budget, now / whole, plan.bytes, best / whole,
             p ? "fits" : tt_error(ctx));
    const bool good = p && now <= best + margin * whole && plan.bytes <= c->memory_budget;
    test__check(good, __FILE__, __LINE__, what);
    CHECK(p && p->builds <= 30);
    *chosen = p ? now : INFINITY;
}

TEST(budgets_against_brute_force)
{
    static const net_options with_all = {true, true};
    const int most_programs = 60 / TEST_SWEEP;
    int programs = 0, dropped = 0;
    for (uint64_t seed = 1; programs < most_programs; seed++) {
        test_allocator a;
        net n;
        menu m;
        size_t min = SIZE_MAX, max = 0;
        double before = INFINITY, now;
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        tt_compile_options c = options_of(&precisions[seed % PRECISIONS]);
        c.device = seed % 2 ? "cpu" : "cuda";
        c.accumulate = seed % 5 == 0;
        c.recompute = "budget";
        c.memory_budget = 1;
        const bool made = seed % 4 ? random_stack(ctx, seed, 3, 64, &n) : random_net(ctx, seed, with_all, &n);
        if (made) build_menu(&n, &c, 5, &m);
        else memset(&m, 0, sizeof m);
        for (int k = 0; k < m.n; k++) {
            if (m.bytes[k] < min) min = m.bytes[k];
            if (m.bytes[k] > max) max = m.bytes[k];
        }
        programs += m.n > 0;
        for (int q = -1; q <= 4 && m.n; q++) {
            c.memory_budget = q < 0 ? min - 1 : min + (max - min) / 4 * (size_t)q;
            tt_program *p = tt_compile(n.t, n.loss, &c);
            if (q < 0) {
                CHECK(!p);
                CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs ");
                continue;
            }
            check_choice(&m, ctx, p, &c, m.extra, m.flops, 0.006, &now);
            CHECK(now <= before);
            before = now;
            dropped += now > 0;
            tt_program_free(p);
        }
        free_menu(&m);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(dropped * 60 > 50 * most_programs);
}

/* The library may choose recomputation, offload and sharding. The chosen plan takes at most 1% longer than
   the best plan. */
TEST(seconds_within_a_budget_against_brute_force)
{
    const int most_programs = 60 / (2 * TEST_SWEEP - 1);
    int programs = 0, moved = 0, split = 0, recomputed = 0, refused = 0;
    for (uint64_t seed = 1; programs < most_programs; seed++) {
        test_allocator a;
        net n;
        menu m;
        size_t min = SIZE_MAX, max = 0;
        double now;
        const tt_costs costs = slow_costs();
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        tt_compile_options c = options_of(&precisions[seed % PRECISIONS]);
        const bool ranks = seed % 6 == 0;
        c.device = ranks ? "cuda*2" : seed % 3 ? "cuda" : "cpu";
        if (ranks) c.parallel.zero = TT_ZERO_BUDGET;
        c.accumulate = seed % 5 == 0;
        c.recompute = seed % 4 ? "budget" : "cheap";
        c.offload = ranks && seed % 4 ? NULL : "budget";
        c.memory_budget = 1;
        if (seed % 2) c.costs = &costs;
        const bool made = random_stack(ctx, seed, 2, seed % 3 ? 64 : 4, &n);
        memset(&m, 0, sizeof m);
        if (made) build_menu(&n, &c, 3, &m);
        for (int k = 0; k < m.n; k++) {
            if (m.bytes[k] < min) min = m.bytes[k];
            if (m.bytes[k] > max) max = m.bytes[k];
        }
        programs += m.n > 0;
        for (int q = -1; q <= 4 && m.n; q++) {
            c.memory_budget = q < 0 ? min - 1 : min + (max - min) / 4 * (size_t)q;
            tt_program *p = tt_compile(n.t, n.loss, &c);
            /* Budget -1 is below the menu's minimum. A policy for all blocks, which the menu lacks, may still
               fit. */
            if (q < 0) {
                if (p) CHECK(tt_program_plan(p).bytes <= c.memory_budget && p->builds <= 30);
                else CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs ");
                refused += !p;
                tt_program_free(p);
                continue;
            }
            const double best = optimum(&m, m.seconds, c.memory_budget);
            check_choice(&m, ctx, p, &c, m.seconds, best, 0.01, &now);
            moved += p && p->chosen.offload;
            split += p && p->chosen.zero > 1;
            recomputed += p && tt_program_plan(p).extra_flops > 0;
            tt_program_free(p);
        }
        free_menu(&m);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    const bool all = moved > 50 && split > 3 && recomputed > 20 && refused > 40;
    CHECK(all || TEST_SWEEP > 1);
}

static int by_size(const void *a, const void *b)
{
    const size_t x = *(const size_t *)a, y = *(const size_t *)b;
    return (x > y) - (x < y);
}

/* A choice is found within any budget that some choice fits, whether all sets of recomputed values are
   candidates or only some. */
TEST(budgets_near_the_smallest)
{
    const int most_programs = 24 / TEST_SWEEP;
    int programs = 0, budgets = 0;
    for (uint64_t seed = 1; programs < most_programs; seed++) {
        test_allocator a;
        net n;
        menu m;
        const tt_costs costs = slow_costs();
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        tt_compile_options c = options_of(&precisions[seed % PRECISIONS]);
        const bool ranks = seed % 6 == 0;
        c.device = ranks ? "cuda*2" : seed % 3 ? "cuda" : "cpu";
        if (ranks && seed % 4) c.parallel.zero = TT_ZERO_BUDGET;
        c.accumulate = seed % 5 == 0;
        c.recompute = seed % 7 ? "budget" : "cheap";
        c.offload = seed % 4 == 0 ? "optimizer,gradients" : seed % 4 == 1 ? NULL : "budget";
        c.memory_budget = 1;
        if (seed % 2) c.costs = &costs;
        const bool made = random_stack(ctx, seed, 2, seed % 3 ? 64 : 4, &n);
        memset(&m, 0, sizeof m);
        if (made) build_menu(&n, &c, c.offload ? 3 : 5, &m);
        programs += m.n > 0;
        qsort(m.bytes, (size_t)m.n, sizeof *m.bytes, by_size);
        for (int k = 0, tried = 0; k < m.n && tried < 12; k++) {
            if (k && m.bytes[k] == m.bytes[k - 1]) continue;
            tried++;
            for (int few = 0; few < 2; few++) {
                char what[400];
                tt__limit_estimates = few ? 20000 : 400000;
                c.memory_budget = m.bytes[k];
                tt_program *p = tt_compile(n.t, n.loss, &c);
                snprintf(what, sizeof what, "network %d, %d items, device %s, recompute %s, offload %s, "
                         "budget %zu, %s, size %d of %d: %.200s", (int)seed, m.items, c.device, c.recompute,
                         c.offload ? c.offload : "none", c.memory_budget, few ? "some" : "all", tried, m.n,
                         p ? "" : tt_error(ctx));
                test__check(p && tt_program_plan(p).bytes <= c.memory_budget, __FILE__, __LINE__, what);
                budgets++;
                tt_program_free(p);
            }
        }
        tt__limit_estimates = 400000;
        free_menu(&m);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(budgets > 10 * most_programs);
}

/* Sets the options that a message names, one after another. If `steps`, each value of `offload` is added to
   *list; otherwise the last value stays. */
static void take_options(const char *text, bool steps, char list[128], tt_compile_options *o)
{
    static const char *const policies[] = {"none", "cheap", "attention", "blocks", "budget"};
    static const char *const updates[] = {"end", "backward", "host"};
    char word[64];
    int number;
    if (!steps) o->update = "end";
    for (const char *at = text; *at && strncmp(at, "A micro-batch", 13) != 0; at++) {
        if (sscanf(at, "recompute \"%63[^\"]", word) == 1)
            for (int k = 0; k < 5; k++) if (strcmp(word, policies[k]) == 0) o->recompute = policies[k];
        if (sscanf(at, "update \"%63[^\"]", word) == 1)
            for (int k = 0; k < 3; k++) if (strcmp(word, updates[k]) == 0) o->update = updates[k];
        if (sscanf(at, "zero %d", &number) == 1) o->parallel.zero = number;
        if (sscanf(at, "offload \"%63[^\"]", word) != 1) continue;
        if (!steps || strcmp(list, "none") == 0) list[0] = 0;
        if (!strstr(list, word) && strlen(list) + strlen(word) + 2 <= 128)
            strcat(strcat(list, list[0] ? "," : ""), word);
        o->offload = list;
    }
}

/* Returns the bytes that a program needs from the message that refuses the program, or 0 if options
   contradict each other. */
static size_t needs(const net *n, tt_compile_options c)
{
    /* The first field, `quiet`, keeps advice out of errors. */
    tt__attempt attempt = {true, false, false, false, 0, 0};
    size_t bytes = 0;
    c.memory_budget = 1;
    tt_program *p = tt__try_compile(n->t, n->loss, &c, &attempt);
    CHECK(!p);
    if (tt_error_code(n->t->ctx) != TT_ERR_BUDGET) return 0; /* the options contradict each other */
    CHECK(sscanf(tt_error(n->t->ctx), "the plan needs %zu", &bytes) == 1);
    return bytes;
}

/* An error names some options and the bytes of the smallest possible plan. No combination of these options
   gives a smaller plan. A program with exactly these bytes and options compiles. */
TEST(the_smallest_possible_is_the_smallest)
{
    static const char *const policies[] = {"none", "cheap", "attention", "blocks"};
    static const char *const updates[] = {"end", "backward", "host"};
    static const char *const devices[] = {"cuda", "cpu", "cuda*2"};
    const int most_programs = (7 + TEST_SWEEP) / TEST_SWEEP;
    int named = 0;
    for (int seed = 1; seed <= most_programs; seed++) {
        test_allocator a;
        net n;
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        tt_compile_options c = options_of(&precisions[seed % 3]), smallest;
        size_t min = SIZE_MAX, said = 0;
        char what[1400], list[128];
        c.device = devices[seed % 3];
        c.accumulate = seed % 4 == 0;
        c.optimizer.clip_norm = seed % 5 == 0;
        c.parallel.zero = seed % 3 == 2 ? seed / 3 % 4 : 1;
        c.update = updates[!c.accumulate && !(c.optimizer.clip_norm > 0) ? seed / 2 % 3 : seed % 2 * 2];
        REQUIRE(random_stack(ctx, (uint64_t)seed, 2, seed % 2 ? 64 : 4, &n));
        tt_compile_options all = c;
        const int zeros = seed % 3 == 2 ? 4 : 1;
        for (int k = 0; k < zeros * 4 * 16 * 3; k++) {
            if (zeros > 1) all.parallel.zero = k % 4;
            all.recompute = policies[k / zeros % 4];
            all.offload = tt__out_lists[k / zeros / 4 % 16];
            all.update = updates[k / zeros / 64];
            /* the state is on the host already */
            if (strcmp(all.update, "host") == 0 && k / zeros / 4 % 2) continue;
            const size_t bytes = needs(&n, all);
            if (bytes && bytes < min) min = bytes;
        }
        for (int chooses = 0; chooses < 2; chooses++) {
            if (chooses && seed % 2) c.recompute = "budget";
            if (chooses && seed % 3) c.offload = "budget";
            if (chooses && zeros > 1 && seed % 5) c.parallel.zero = TT_ZERO_BUDGET;
            c.memory_budget = 1;
            CHECK(!tt_compile(n.t, n.loss, &c));
            snprintf(what, sizeof what, "network %d, %s, update %s: %zu; %s", seed, c.device, c.update, min,
                     tt_error(ctx));
            const char *at = strstr(tt_error(ctx), "the smallest possible is ");
            const bool is = at && sscanf(at, "the smallest possible is %zu", &said) == 1;
            test__check(is && said <= min, __FILE__, __LINE__, what);
            if (!is) continue;
            smallest = c;
            const bool steps = strstr(at, "with all of these") != NULL;
            if (chooses && strcmp(c.recompute, "budget") == 0) smallest.recompute = "none";
            if (chooses && c.offload) smallest.offload = NULL;
            strcpy(list, "none");
            take_options(steps ? tt_error(ctx) : strstr(at, " with ") ? at : "", steps, list, &smallest);
            smallest.memory_budget = said;
            tt_program *p = tt_compile(n.t, n.loss, &smallest);
            const bool fits = p && tt_program_plan(p).bytes <= said;
            char why[800];
            snprintf(why, sizeof why, "%.340s; with recompute %s, offload %s, update %s: %.250s", what,
                     smallest.recompute, list, smallest.update, p ? "larger" : tt_error(ctx));
            test__check(fits, __FILE__, __LINE__, why);
            named += steps;
            tt_program_free(p);
        }
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(named > 0);
}

/* Returns the smallest bytes that a refusal names for the options that may change. */
static size_t named_least(const char *message)
{
    size_t bytes = 0;
    const char *at = strstr(message, "at least "), *min = strstr(message, "the smallest possible is ");
    if (at) CHECK(sscanf(at, "at least %zu with ", &bytes) == 1);
    else if (strstr(message, "if more may change")) CHECK(sscanf(message, "the plan needs %zu", &bytes) == 1);
    else CHECK(min && sscanf(min, "the smallest possible is %zu", &bytes) == 1);
    return bytes;
}

/* Only the smallest possible plan decides whether a budget is refused. Every refusal names the bytes of that
   plan. Exactly these bytes are enough, one byte less is refused, and no plan within a larger budget is
   smaller. Bytes named for fixed options are enough with these options. */
TEST(what_is_refused_names_what_fits)
{
    static const shape deep = {"deep", 4, 32, 2, 96, 4, 30, 10, true};
    static const char *const devices[] = {"cuda", "cpu", "cuda*2"}, *const offloads[] = {
        "budget", NULL, "optimizer,gradients,parameters,activations"};
    const int most_programs = 6 / test_every(3);
    int refused = 0, advised = 0, sets = 0;
    tt__limit_estimates = 60000; /* lets small networks try all candidate sets, while larger ones search */
    for (int seed = 0; seed < most_programs; seed++) {
        test_allocator a;
        net n;
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        tt_compile_options c = options_of(&precisions[seed % 4 == 1 ? seed % PRECISIONS : 0]);
        char list[128] = "none", what[1600];
        size_t whole;
        memset(&n, 0, sizeof n);
        if (seed % 3) {
            REQUIRE(random_stack(ctx, (uint64_t)seed + 40, 3, seed % 2 ? 64 : 16, &n));
        } else {
            tt_value logits;
            n.t = tt_tape_new(ctx);
            n.loss = encoder(n.t, &deep, &logits);
            for (int32_t v = 1, sums = 0; v < n.t->n_values; v++)
                if (strncmp(n.t->values[v].name, "add.", 4) == 0 && sums++ % 2 == 0)
                    tt_block_end(n.t, tt__handle(n.t, v));
        }
        c.device = devices[seed / 2 % 3];
        c.recompute = seed % 5 == 4 ? "cheap" : "budget";
        c.offload = seed % 5 == 4 ? "budget" : offloads[seed % 4 % 3];
        c.update = seed % 4 == 3 ? "backward" : "end";
        c.optimizer.clip_norm = 0;
        if (seed / 2 % 3 == 2) c.parallel.zero = seed % 2 ? TT_ZERO_BUDGET : 3;
        c.accumulate = seed % 4 == 2;
        c.memory_budget = (size_t)1 << 40;
        tt_program *p = tt_compile(n.t, n.loss, &c);
        REQUIRE(p != NULL);
        whole = tt_program_plan(p).bytes;
        tt_program_free(p);
        c.memory_budget = 1;
        REQUIRE(!tt_compile(n.t, n.loss, &c) && tt_error_code(ctx) == TT_ERR_BUDGET);
        snprintf(what, sizeof what, "network %d on %s, recompute %s, offload %s, update %s: %.1200s", seed,
                 c.device, c.recompute, c.offload ? c.offload : "none", c.update, tt_error(ctx));
        const size_t min = named_least(tt_error(ctx));
        tt_compile_options other = c;
        char *at = strstr(what, "the smallest possible is ");
        for (int k = 0; k < 6; k++) { /* bytes: one too few, just enough, and more */
            c.memory_budget = k < 3 ? min + (size_t)k - 1 : min + (whole - min) / 64 * (size_t)(k * k);
            p = tt_compile(n.t, n.loss, &c);
            const size_t bytes = p ? tt_program_plan(p).bytes : 0;
            const bool no = !p && tt_error_code(ctx) == TT_ERR_BUDGET && named_least(tt_error(ctx)) == min;
            const bool good = k ? p && bytes >= min && bytes <= c.memory_budget : no;
            char text[2400];
            snprintf(text, sizeof text, "%zu bytes: %zu, %.600s; %.1500s", c.memory_budget, bytes,
                     p ? "" : tt_error(ctx), what);
            test__check(good, __FILE__, __LINE__, text);
            tt_program_free(p);
            refused += !p;
        }
        sets += strstr(what, " (of ") != NULL;
        const bool named = at && strstr(at, " with ") != NULL;
        const bool steps = named && strstr(at, "with all of these") != NULL;
        if (named) CHECK(sscanf(at, "the smallest possible is %zu", &other.memory_budget) == 1);
        if (steps && strcmp(other.recompute, "budget") == 0) other.recompute = "none";
        if (steps && other.offload && strcmp(other.offload, "budget") == 0) other.offload = NULL;
        if (steps && other.offload) snprintf(list, sizeof list, "%s", other.offload);
        if (named) take_options(steps ? what : at, steps, list, &other);
        p = named ? tt_compile(n.t, n.loss, &other) : NULL;
        if (named) test__check(p != NULL, __FILE__, __LINE__, what);
        advised += named && other.memory_budget < min;
        tt_program_free(p);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    tt__limit_estimates = 400000;
    const bool all = refused >= most_programs && advised >= most_programs / 4 && sets >= most_programs / 4;
    CHECK(all || TEST_SWEEP > 1);
}

/* A budget decides how large groups of offloaded tensors are, down to one parameter at a time. Without a
   budget groups stay large. */
TEST(groups_that_fit_a_budget)
{
    const size_t each = WIDE * WIDE * 4;
    for (int k = 0; k < 2; k++) {
        perceptron n;
        tt_compile_options o = tt_compile_options_default();
        size_t bytes[2];
        tt__limit_offload_together = 0; /* groups of one parameter at a time */
        for (int large = 0; large < 2; large++) {
            REQUIRE(perceptron_new(&n));
            o.device = k ? "cpu" : "cuda";
            o.optimizer.clip_norm = 1;
            o.offload = "optimizer,gradients,parameters";
            tt_program *p = tt_compile(n.t, n.loss, &o);
            REQUIRE(p != NULL);
            bytes[large] = tt_program_plan(p).bytes;
            CHECK(p->chosen.halved == 0);
            tt_program_free(p);
            if (!large) perceptron_free(&n);
            tt__limit_offload_together = 32L << 20;
        }
        CHECK(bytes[0] + each <= bytes[1]);
        for (int budget = 0; budget < 3; budget++) {
            static const char *const offloads[] = {"optimizer,gradients,parameters", "budget"};
            for (int chosen = 0; chosen < 2; chosen++) {
                o.offload = offloads[chosen];
                o.memory_budget = budget == 0 ? bytes[0] : budget == 1 ? (bytes[0] + bytes[1]) / 2 : bytes[1];
                tt_program *p = tt_compile(n.t, n.loss, &o);
                CHECK(p && tt_program_plan(p).bytes <= o.memory_budget);
                if (p && !chosen) CHECK((p->chosen.halved > 0) == (budget < 2));
                tt_program_free(p);
            }
        }
        perceptron_free(&n);
        tt__limit_offload_together = 4096;
    }
}

/* A quarter of all candidate sets of recomputed values leads to a cost close to the best of all sets. */
TEST(candidates_against_all_sets)
{
    int programs = 0, compared = 0;
    char what[256];
    for (uint64_t seed = 1; programs < 8; seed++) {
        tt_compile_options o = tt_compile_options_default();
        test_allocator a;
        net n;
        tt_program p[2];
        tt__chooser c[2]; /* chooser 0 tries all sets of recomputed values, chooser 1 some */
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        o.recompute = "budget";
        o.memory_budget = 1;
        REQUIRE(random_stack(ctx, seed, 6, 64, &n));
        REQUIRE(open_job(&n, &o, &p[0], &c[0]) && open_job(&n, &o, &p[1], &c[1]));
        const tt_tape *t = c[0].front[c[0].base.zero][0].t;
        double flops = 0;
        for (int k = 0; k < t->n_code; k++) flops += tt__flops_at_capacity(t, &t->code[k]);
        const int items = c[1].n, sets = 1 << (items < 12 ? items : 0);
        const bool some = items >= 8 && items <= 10;
        for (int k = 0; k < 2 && some; k++) {
            tt__limit_estimates = (k ? 1 : 4) * sets * (t->n_code + 1);
            c[k].left = tt__limit_estimates;
            CHECK(tt__list_candidates(&c[k]) == TT_OK);
            CHECK(k ? c[k].n_list <= sets / 2 : c[k].n_list > sets);
        }
        size_t min = SIZE_MAX;
        for (int k = 0; k < c[0].n_list; k++)
            if (c[0].list[k].bytes < min) min = c[0].list[k].bytes;
        /* The budget is the bytes of set k, which is then the best set. Skips budgets near the minimum. */
        for (int k = 0; k < c[0].n_list; k++) {
            const tt__candidate *x = &c[0].list[k];
            double best = INFINITY;
            if (tt__is_dominated(&c[0], x) || x->bytes < min + min / 16) continue;
            for (int j = 0; j < c[1].n_list; j++)
                if (c[1].list[j].bytes <= x->bytes && c[1].list[j].flops < best) best = c[1].list[j].flops;
            snprintf(what, sizeof what, "network %d, %d items: %.2f%% more FLOPs in %zu bytes, not %.2f%%",
                     (int)seed, items, 100 * best / flops, x->bytes, 100 * x->flops / flops);
            test__check(best / flops <= x->flops / flops + 0.006, __FILE__, __LINE__, what);
            compared++;
        }
        programs += some;
        tt__chooser_close(&c[0]);
        tt__chooser_close(&c[1]);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(compared > 40);
    tt__limit_estimates = 400000;
}

static void say_kilobytes(void *user, size_t bytes, char *to, size_t capacity)
{
    (void)user;
    snprintf(to, capacity, "%zu kB", bytes / 1000);
}

/* A network of 8 layers has more sets of recomputed values than can be tried. */
TEST(budgets_of_a_deep_network)
{
    static const shape deep = {"deep", 8, 64, 4, 256, 8, 50, 10, true};
    test_allocator a;
    tt_context_options co = test_options(&a);
    co.verify = false;
    tt_context *ctx = open_apart(&co);
    tt_tape *t = tt_tape_new(ctx);
    tt_value logits, loss = encoder(t, &deep, &logits);
    tt_compile_options c = tt_compile_options_default();
    tt_plan plan[4];
    char text[512], choice[128];
    const char *const policies[] = {"none", "cheap", "attention", "blocks"};
    tt__limit_estimates = 50000;
    for (int k = 0; k < 4; k++) {
        for (int32_t v = 1, sums = 0; v < t->n_values && k == 0; v++)
            if (strncmp(t->values[v].name, "add.", 4) == 0 && sums++ % 2 == 0)
                tt_block_end(t, tt__handle(t, v));
        c.recompute = policies[k];
        tt_program *p = tt_compile(t, loss, &c);
        REQUIRE(p != NULL);
        CHECK(p->builds == 1);
        plan[k] = tt_program_plan(p);
        tt_program_free(p);
    }
    c.recompute = "budget";
    double before = 0;
    for (int q = 0; q <= 6; q++) { /* budgets from all bytes down to the bytes of "blocks" */
        c.memory_budget = plan[0].bytes - (plan[0].bytes - plan[3].bytes) / 6 * (size_t)q;
        tt_program *p = tt_compile(t, loss, &c);
        REQUIRE(p != NULL);
        const tt_plan now = tt_program_plan(p);
        CHECK(now.bytes <= c.memory_budget && p->builds <= 30 && p->builds >= 1);
        CHECK(now.extra_flops >= before && now.extra_flops <= plan[3].extra_flops);
        CHECK(now.extra_flops > 0 ? c.memory_budget < plan[1].bytes : c.memory_budget >= plan[1].bytes);
        before = now.extra_flops;
        tt_plan_text(p, text, sizeof text);
        snprintf(choice, sizeof choice, "  chosen for memory_budget %.1f MB: recompute %s",
                 (double)c.memory_budget / 1e6, q ? "" : "nothing\n");
        CHECK(strstr(text, choice) && (q == 0 || strstr(text, " linear, ") || now.extra_flops == 0));
        tt_program_free(p);
    }
    CHECK(before > 0);
    c.memory_budget = plan[0].persistent_bytes;
    CHECK(!tt_compile(t, loss, &c));
    snprintf(text, sizeof text, "the plan needs %zu bytes, but memory_budget is %zu: recompute \"cheap\" "
             "needs %zu (+0.0%% FLOPs), then recompute \"", plan[0].bytes, c.memory_budget, plan[1].bytes);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, text);
    static const tt_option_name names[] = {{"memory_budget", "--budget"}, {"recompute", "--again"},
                                           {"offload", "--offload"}, {"update", "--update"},
                                           {"precision", "--precision"},
                                           {"rows", "rows (--batch)"}, {NULL, NULL}};
    const tt_wording flags = {names, say_kilobytes, NULL};
    ctx->options.wording = flags;
    CHECK(!tt_compile(t, loss, &c));
    snprintf(text, sizeof text, "the plan needs %zu kB, but --budget is %zu kB: --again cheap needs "
             "%zu kB (+0.0%% FLOPs), then --again ", plan[0].bytes / 1000, c.memory_budget / 1000,
             plan[1].bytes / 1000);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, text);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, ". A micro-batch of fewer rows (--batch) needs less; "
                "--precision bf16-true ");
    CHECK(!strchr(tt_error(ctx), '"') && !strstr(tt_error(ctx), "bytes"));
    tt__limit_estimates = 400000;
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* For ViT-L/16, within the bytes of fixed options, "budget" chooses a plan that takes no longer than the plan
   of the fixed options. */
TEST(no_fixed_options_beat_a_budget)
{
    static const char *const offloads[] = {"none", "optimizer", "optimizer,parameters",
                                           "optimizer,activations",
                                           "optimizer,gradients,parameters,activations"};
    test_allocator a;
    tt_context_options co = test_options(&a);
    co.verify = false;
    tt__limit_estimates = 1200000; /* the library's default */
    for (int k = 0; k < 2 * TEST_COUNT(offloads); k++) {
        if (TEST_SWEEP > 1 && k != 1) continue; /* thinned sweeps run only k 1, which takes a second */
        tt_context *ctx = open_apart(&co);
        tt_vit m;
        tt_vit_config c = tt_vit_config_default("L/16");
        tt_train_options o = tt_train_options_default();
        double fixed = 0;
        c.image_size = 224;
        c.classes = 10;
        o.schedule.kind = TT_CONSTANT;
        o.compile.optimizer.clip_norm = 0;
        o.compile.device = k % 2 ? "cuda*4" : "cuda";
        o.compile.parallel.zero = k % 2 ? 3 : 1;
        o.max_seqs = 64;
        o.compile.recompute = "blocks";
        o.compile.offload = offloads[k / 2];
        REQUIRE(tt_vit_new(ctx, &m, &c) == TT_OK);
        const tt_model model = tt_vit_classifier(&m);
        for (int chosen = 0; chosen < 3; chosen++) { /* 0: all options are fixed; 1: recomputation is
                                                        chosen; 2: offload and ZeRO are chosen, too */
            if (chosen) o.compile.recompute = "budget";
            if (chosen == 2) o.compile.offload = "budget";
            if (chosen == 2 && k % 2) o.compile.parallel.zero = TT_ZERO_BUDGET;
            tt_trainer *t = tt_trainer_new(ctx, &model, &o);
            REQUIRE(t != NULL);
            const tt_plan plan = tt_program_plan(tt_trainer_program(t));
            const double seconds = plan.compute_seconds + plan.exposed_seconds;
            char text[256];
            snprintf(text, sizeof text, "%s, %s: %zu bytes, %.4g s; chosen: %zu bytes, %.4g s, offload %s",
                     o.compile.device, offloads[k / 2], o.compile.memory_budget, fixed, plan.bytes, seconds,
                      plan.offload);
            const bool good = !chosen || (plan.bytes <= o.compile.memory_budget && seconds <= 1.005 * fixed);
            test__check(good, __FILE__, __LINE__, text);
            if (!chosen) fixed = seconds;
            if (!chosen) o.compile.memory_budget = plan.bytes;
            tt_trainer_free(t);
        }
        tt_vit_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    tt__limit_estimates = 400000;
}

/* For ViT-L/16 a refusal names the smallest plan that the search reaches with larger budgets: exactly the
   bytes named are enough. */
TEST(what_a_large_model_reaches_is_named)
{
    if (TEST_SWEEP > 1) SKIP("it takes a minute there, and smaller programs run the same code");
    test_allocator a;
    tt_context_options co = test_options(&a);
    co.verify = false;
    tt__limit_estimates = 1200000; /* the library's default */
    tt_context *ctx = open_apart(&co);
    tt_vit m;
    tt_vit_config c = tt_vit_config_default("L/16");
    tt_train_options o = tt_train_options_default();
    c.image_size = 224;
    o.schedule.kind = TT_CONSTANT;
    o.compile.device = "cuda";
    o.compile.precision = "bf16-true";
    o.max_seqs = 64;
    o.compile.recompute = "budget";
    o.compile.memory_budget = 1;
    REQUIRE(tt_vit_new(ctx, &m, &c) == TT_OK);
    const tt_model model = tt_vit_classifier(&m);
    REQUIRE(!tt_trainer_new(ctx, &model, &o) && tt_error_code(ctx) == TT_ERR_BUDGET);
    const size_t min = named_least(tt_error(ctx));
    for (int k = 0; k < 4; k++) { /* k 0: a byte less than the error names; 1: the bytes named; 2, 3: more */
        o.compile.memory_budget = k < 2 ? min - 1 + (size_t)k : min + min / 2000 * (size_t)(k - 1);
        tt_trainer *t = tt_trainer_new(ctx, &model, &o);
        const size_t bytes = t ? tt_program_plan(tt_trainer_program(t)).bytes : 0;
        CHECK(k ? t && bytes >= min && bytes <= o.compile.memory_budget
                : !t && tt_error_code(ctx) == TT_ERR_BUDGET && named_least(tt_error(ctx)) == min);
        tt_trainer_free(t);
    }
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
    tt__limit_estimates = 400000;
}

/* Returns the seconds of a step of `micros` micro-batches. */
static double seconds_on(const tt_plan *plan, int micros)
{
    return plan->compute_seconds + plan->exposed_seconds +
           (micros - 1) * (plan->micro_compute_seconds + plan->micro_exposed_seconds);
}

/* Recomputation costs time in each micro-batch; moving an optimizer's state costs time once a step. */
TEST(choices_count_micro_batches)
{
    enum { MANY = 16 };
    test_allocator a;
    tt_context_options co = test_options(&a);
    co.verify = false;
    tt_context *ctx = open_apart(&co);
    tt_plan plan[3]; /* 0: one micro-batch a step; 1: MANY; 2: MANY, without recomputation and offload */
    tt_vit m;
    tt_vit_config c = tt_vit_config_default("S/16");
    tt_train_options o = tt_train_options_default();
    c.classes = 10;
    o.schedule.kind = TT_CONSTANT;
    o.compile.device = "cuda";
    o.max_seqs = 16;
    o.compile.accumulate = true;
    tt__limit_estimates = 1200000; /* the library's default */
    REQUIRE(tt_vit_new(ctx, &m, &c) == TT_OK);
    const tt_model model = tt_vit_classifier(&m);
    for (int k = 2; k >= 0; k--) {
        o.compile.recompute = k < 2 ? "budget" : "none";
        o.compile.offload = k < 2 ? "budget" : "none";
        o.compile.memory_budget = k < 2 ? plan[2].bytes / 2 : 0;
        o.compile.parallel.micros = k ? MANY : 0;
        tt_trainer *t = tt_trainer_new(ctx, &model, &o);
        REQUIRE(t != NULL);
        plan[k] = tt_program_plan(tt_trainer_program(t));
        CHECK(k == 2 || plan[k].bytes <= o.compile.memory_budget);
        CHECK(plan[k].micro_compute_seconds > 0 && plan[k].micro_exposed_seconds >= 0);
        CHECK(plan[k].micro_compute_seconds < plan[k].compute_seconds && plan[k].host_seconds == 0);
        tt_trainer_free(t);
    }
    CHECK(seconds_on(&plan[0], 1) < seconds_on(&plan[1], 1));
    CHECK(seconds_on(&plan[1], MANY) < seconds_on(&plan[0], MANY));
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
    tt__limit_estimates = 400000;
}

/* The tape that estimates a plan shares the lists of block-sparse attention with the tape that is planned. */
TEST(budgets_of_block_sparse_attention)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_bert m;
    tt_bert_config c = tt_bert_config_default(TT_BIG_BIRD);
    tt_train_options o = tt_train_options_default();
    c.vocab_size = 100;
    c.hidden_size = 16;
    c.heads = 2;
    c.intermediate_size = 32;
    c.layers = 2;
    o.schedule.kind = TT_CONSTANT;
    o.compile.device = "cuda";
    o.max_tokens = 4096;
    o.max_seqs = 1;
    o.compile.recompute = "none";
    REQUIRE(tt_bert_new(ctx, &m, &c) == TT_OK);
    const tt_model model = tt_bert_model(&m);
    for (int k = 0; k < 2; k++) {
        tt_trainer *t = tt_trainer_new(ctx, &model, &o);
        REQUIRE(t != NULL);
        const tt_plan plan = tt_program_plan(tt_trainer_program(t));
        CHECK(k == 0 || plan.bytes <= o.compile.memory_budget);
        o.compile.recompute = o.compile.offload = "budget";
        o.compile.memory_budget = plan.bytes - plan.bytes / 100;
        tt_trainer_free(t);
    }
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
}
