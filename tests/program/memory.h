/* Tests of budgets, of shared arenas, and of inputs and outputs that other programs overwrite. */
#pragma once

/* ------------------------------------------------------------------------------------------------- budget */

/* Logits of a large vocabulary are never stored whole, unless another instruction reads the logits. Results
   do not change. */
TEST(logits_of_a_large_vocabulary)
{
    enum { MAX = 600, D = 8, V = 8192 };
    static const int rows[] = {MAX, 257, 256, 5};
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true"};
    static float x[MAX * D], grads[2][4][V * D];
    static int32_t y[MAX];
    static char text[32768];
    test_allocator a;
    uint64_t state = 5;
    for (int k = 0; k < MAX * D; k++) x[k] = test_uniform(&state);
    for (int k = 0; k < MAX; k++) y[k] = k % 7 == 3 ? -100 : (int32_t)(test_random(&state) % V);
    for (int k = 0; k < 9; k++) {
        if (k % test_every(2)) continue;
        bool train = k % 3 < 2, accumulate = k % 3 == 1;
        const char *precision = precisions[k / 3];
        tt_context *ctx = test_open(&a);
        tt_param *w[4] = {param2(ctx, "a", D, D, init_of(TT_INIT_NORMAL, 1)),
                          param1(ctx, "a.bias", D, init_of(TT_INIT_NORMAL, 1)),
                          param2(ctx, "w", V, D, init_of(TT_INIT_NORMAL, 0.5f)),
                          param1(ctx, "w.bias", V, init_of(TT_INIT_NORMAL, 0.5f))};
        size_t peak[2];
        tt_stats stats[2][4];
        for (int whole = 0; whole < 2; whole++) {
            tt_compile_options o = tt_compile_options_default();
            tt_tape *t = tt_tape_new(ctx);
            int64_t axis = tt_axis(t, "rows", MAX);
            tt_value in = tt_input(t, "x", TT_F32, axis, D), labels = tt_input(t, "y", TT_I32, axis, 1);
            tt_value logits = tt_linear(t, tt_gelu(t, tt_linear(t, in, w[0], w[1])), w[2], w[3]),
                     loss = tt_cross_entropy(t, logits, labels, NULL);
            if (whole) tt_output(t, logits);
            o.train = train;
            o.accumulate = accumulate;
            o.precision = precision;
            tt_program *p = tt_compile(t, loss, &o);
            REQUIRE(p != NULL);
            tt_plan plan = tt_program_plan(p);
            peak[whole] = plan.bytes - plan.persistent_bytes;
            tt_program_text(p, text, sizeof text);
            /* bf16-true trains with whole logits, because bf16 gradients are not summed chunk by chunk */
            CHECK(count_lines(text, "linear_cross_entropy", "") == (!whole && (!train || k / 3 < 2)));
            /* The first layer has one product fewer in training, because x needs no gradient. */
            CHECK(plan.flops == 2.0 * MAX * D * (D * (train ? 2 : 1) + V * (train ? 3.0 : 1.0)));
            for (int r = 0; r < TEST_COUNT(rows); r++) {
                CHECK(tt_set(p, in, x, rows[r]) == TT_OK && tt_set(p, labels, y, rows[r]) == TT_OK);
                CHECK((accumulate ? tt_micro_step(p, NULL)
                       : train ? tt_step(p, 0, &stats[whole][r])
                       : tt_run(p, &stats[whole][r])) == TT_OK);
                if (accumulate && r == 0)
                    for (int j = 0; j < 4; j++) CHECK(tt_get_gradient(p, w[j], grads[whole][j]) == TT_OK);
                if (accumulate) CHECK(tt_update(p, 0, &stats[whole][r]) == TT_OK);
            }
            tt_program_free(p);
            tt_tape_free(t);
        }
        double rounding = strcmp(precision, "32-true") == 0 ? 2e-6 : 0x1p-7;
        for (int r = 0; r < TEST_COUNT(rows); r++) {
            CHECK_NEAR(stats[0][r].loss, stats[1][r].loss, 1e-6 * stats[1][r].loss);
            CHECK(stats[0][r].targets == stats[1][r].targets && stats[0][r].correct == stats[1][r].correct);
            if (train)
                CHECK_NEAR(stats[0][r].grad_norm, stats[1][r].grad_norm, rounding * stats[1][r].grad_norm);
        }
        for (int j = 0; j < 4 && accumulate; j++) {
            int64_t n = tt_param_size(w[j]);
            double max = 0;
            for (int64_t i = 0; i < n; i++) max = fabs(grads[1][j][i]) > max ? fabs(grads[1][j][i]) : max;
            CHECK(max > 0);
            for (int64_t i = 0; i < n; i++) CHECK_NEAR(grads[0][j][i], grads[1][j][i], rounding * max);
        }
        if (k / 3 < 2) CHECK(peak[0] < MAX * V * 4 && peak[1] > MAX * V * 4);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(memory_budget)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};
    for (int k = 0; k < 10; k++) {
        test_allocator a;
        model m;
        tt_context *ctx = test_open(&a);
        tt_compile_options c = tt_compile_options_default();
        REQUIRE(model_params(ctx) && model_record(ctx, &m));
        c.precision = precisions[k % 5];
        c.train = k < 5;
        c.memory_budget = 100;
        size_t before = tt_allocated_bytes(ctx);
        CHECK(!tt_compile(m.t, m.loss, &c));
        CHECK_ERROR(ctx, TT_ERR_BUDGET, "memory_budget is 100");
        CHECK(tt_allocated_bytes(ctx) == before);
        const char *number = strstr(tt_error(ctx), "the plan needs ");
        REQUIRE(number != NULL);
        size_t smallest = (size_t)strtoull(number + strlen("the plan needs "), NULL, 10);
        c.memory_budget = smallest - 1;
        CHECK(!tt_compile(m.t, m.loss, &c));
        c.memory_budget = smallest;
        tt_program *p = tt_compile(m.t, m.loss, &c);
        REQUIRE(p != NULL);
        CHECK(tt_program_plan(p).bytes == smallest);
        before = tt_allocated_bytes(ctx);
        CHECK(tt_allocate(p) == TT_OK && tt_allocated_bytes(ctx) - before <= smallest + 2 * TT__ALIGN);
        tt_program_free(p);
        tt_tape_free(m.t);
        TEST_CLOSE(ctx, &a);
    }
}

/* --------------------------------------------------------------------------- programs that share an arena */

/* Copies a program's inputs to `to`, one after another. Returns the number of bytes. */
static size_t input_bytes(const tt_program *p, unsigned char *to)
{
    size_t n = 0;
    for (int32_t v = 1; v < p->built.t->n_values; v++) {
        const tt__tape_value *x = &p->built.t->values[v];
        if (x->storage != TT__INPUT || x->base != v || x->place == TT__NO_PLACE) continue;
        tt__mat m = tt__resolve(p, 0, v);
        const size_t bytes = (size_t)(m.rows * m.cols) * tt_dtype_bytes(m.dtype);
        memcpy(to + n, m.data, bytes);
        n += bytes;
    }
    return n;
}

/* A program refuses inputs that another program of the arena has overwritten, and accepts other inputs. */
TEST(inputs_overwritten_by_another_program)
{
    enum { MAX = 4096 };
    test_allocator a;
    model m;
    tt_stats stats;
    unsigned char was[MAX], is[MAX];
    int refused = 0, kept = 0;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    tt_value small_input = tt_input(m.t, "small", TT_F32, 1, 2), small = tt_scale(m.t, small_input, 2);
    tt_program *train = model_compile(&m, true, "32-true", true);
    REQUIRE(train != NULL);
    c.share = train;
    c.train = false;
    tt_program *eval = tt_compile(m.t, m.loss, &c), *tiny = tt_compile(m.t, small, &c);
    REQUIRE(eval && tiny && tt_allocate(eval) == TT_OK);
    float two[2] = {1, 2};
    for (int k = 0; k < 8; k++) { /* the bits of k: events between setting inputs and the run */
        const bool other = k & 1, runs = k & 2, little = k & 4;
        REQUIRE(model_set(&m, train, 2 * k) == TT_OK);
        const size_t n = input_bytes(train, was);
        REQUIRE(n <= MAX);
        if (other && little) CHECK(tt_set(tiny, small_input, two, 1) == TT_OK);
        if (other && !little) CHECK(model_set(&m, eval, 2 * k + 1) == TT_OK);
        if (other && runs) CHECK(tt_run(little ? tiny : eval, &stats) == TT_OK);
        const bool same = input_bytes(train, is) == n && memcmp(was, is, n) == 0;
        const tt_status status = tt_micro_step(train, &stats);
        if (!same)
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "or another program of the same arena");
        CHECK(same || (status == TT_ERR_ARGUMENT && strstr(tt_error(ctx), "input '")));
        if (!other) CHECK(same && status == TT_OK);
        if (status == TT_OK) kept++;
        else refused++;
        if (status == TT_OK) CHECK(tt_update(train, 0.01f, &stats) == TT_OK);
    }
    CHECK(refused > 0 && kept > 0);

    /* An update overwrites the inputs of an evaluation, too. */
    CHECK(model_set(&m, train, 0) == TT_OK && tt_micro_step(train, NULL) == TT_OK &&
          model_set(&m, eval, 1) == TT_OK);
    const size_t n = input_bytes(eval, was);
    CHECK(tt_update(train, 0.01f, NULL) == TT_OK);
    const bool same = input_bytes(eval, is) == n && memcmp(was, is, n) == 0;
    const tt_status status = tt_run(eval, &stats);
    CHECK(same || status == TT_ERR_ARGUMENT);
    CHECK(model_set(&m, eval, 1) == TT_OK && tt_run(eval, &stats) == TT_OK); /* inputs set again are usable */
    tt_program_free(eval);
    CHECK(model_set(&m, train, 1) == TT_OK && tt_set(tiny, small_input, two, 1) == TT_OK);
    tt_program_free(train);
    CHECK(tt_run(tiny, &stats) == TT_OK);
    tt_program_free(tiny);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* Returns the loss of a second micro-batch whose inputs were set before or after the update; NAN if the
   micro-batch was refused. */
static double loss_after_update(bool before, int hidden, int rows)
{
    test_allocator a;
    tt_stats stats = {0};
    static float xs[4096 * 4], ys[4096 * 4];
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, rows, 4), y = tt_input(t, "y", TT_F32, rows, 4);
    tt_value h = tt_linear(t, x, param2(ctx, "up", hidden, 4, init_of(TT_INIT_NORMAL, 0.1f)), NULL);
    h = tt_linear(t, tt_gelu(t, h), param2(ctx, "down", 4, hidden, init_of(TT_INIT_NORMAL, 0.1f)), NULL);
    tt_compile_options o = tt_compile_options_default();
    o.accumulate = true;
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, h, y, tt__handle(t, 0)), &o);
    for (int k = 0; k < rows * 4; k++) xs[k] = sinf((float)k), ys[k] = cosf((float)k);
    for (int micro = 0; micro < 2 && p; micro++) {
        const bool set = !micro || !before;
        if (set) CHECK(tt_set(p, x, xs, rows) == TT_OK && tt_set(p, y, ys, rows) == TT_OK);
        const tt_status status = tt_micro_step(p, &stats);
        if (status != TT_OK) stats.loss = NAN;
        if (status != TT_OK) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "set, but then an update");
        if (!micro && before) CHECK(tt_set(p, x, xs, rows) == TT_OK && tt_set(p, y, ys, rows) == TT_OK);
        if (!micro) CHECK(tt_update(p, 1e-3f, NULL) == TT_OK);
    }
    CHECK(p != NULL);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return stats.loss;
}

/* An update may overwrite inputs that were set before the update. A run then refuses the inputs and never
   trains on them. */
TEST(inputs_overwritten_by_an_update)
{
    int kept = 0, refused = 0;
    for (int hidden = 1; hidden <= 64; hidden *= 8)
        for (int rows = 1; rows <= 4096; rows *= 8) {
            const double after = loss_after_update(false, hidden, rows);
            const double loss = loss_after_update(true, hidden, rows);
            CHECK(isfinite(after) && (isnan(loss) || loss == after));
            kept += !isnan(loss);
            refused += isnan(loss) != 0;
        }
    CHECK(kept > 0 && refused > 0);
}

/* An output that another program's update has overwritten cannot be read. */
TEST(outputs_overwritten_by_another_programs_update)
{
    enum { MANY = 4096, IN = 2, OUT = 3 };
    test_allocator a;
    static float xs[MANY * IN], ys[4 * OUT], was[MANY * OUT], is[MANY * OUT];
    int kept = 0, refused = 0;
    for (int rows = 1; rows <= MANY; rows *= 4) {
        tt_context *ctx = test_open(&a);
        tt_compile_options o = tt_compile_options_default();
        tt_param *w = param2(ctx, "w", OUT, IN, init_of(TT_INIT_NORMAL, 1));
        tt_tape *t = tt_tape_new(ctx), *u = tt_tape_new(ctx);
        tt_value x = tt_input(t, "x", TT_F32, 4, IN), y = tt_input(t, "y", TT_F32, 4, OUT);
        tt_value loss = tt_mean_squared_error(t, tt_linear(t, x, w, NULL), y, tt__handle(t, 0));
        tt_value many = tt_input(u, "many", TT_F32, rows, IN), out = tt_linear(u, many, w, NULL);
        o.accumulate = true;
        tt_program *p = tt_compile(t, loss, &o);
        REQUIRE(p != NULL);
        o.accumulate = o.train = false;
        o.share = p;
        tt_program *q = tt_compile(u, out, &o);
        REQUIRE(q != NULL);
        for (int k = 0; k < MANY * IN; k++) xs[k] = sinf((float)k);
        CHECK(tt_set(p, x, xs, 4) == TT_OK && tt_set(p, y, ys, 4) == TT_OK);
        CHECK(tt_micro_step(p, NULL) == TT_OK);
        CHECK(tt_set(q, many, xs, rows) == TT_OK && tt_run(q, NULL) == TT_OK);
        CHECK(tt_get(q, out, was, MANY * OUT) == TT_OK && tt_update(p, 0, NULL) == TT_OK);
        const tt_status status = tt_get(q, out, is, MANY * OUT);
        if (status != TT_OK) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "has no contents");
        else CHECK(memcmp(was, is, sizeof(float) * (size_t)rows * OUT) == 0);
        kept += status == TT_OK;
        refused += status != TT_OK;
        tt_program_free(p);
        tt_program_free(q);
        tt_tape_free(t);
        tt_tape_free(u);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(refused > 0 && kept == 0); /* refused even where the update left the output intact */
}

/* After tt_compile has returned, the library reads nothing of the caller's options. */
TEST(options_are_the_callers_again)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options o = tt_compile_options_default();
    tt_value x = tt_input(t, "x", TT_F32, 4, 2);
    tt_value h = tt_linear(t, x, param2(ctx, "w", 3, 2, init_of(TT_INIT_NORMAL, 1)), NULL);
    char *precision = strdup("32-true"), *device = strdup("cpu"), *recompute = strdup("cheap");
    char *update = strdup("backward");
    o.train = false;
    tt_program *first = tt_compile(t, h, &o);
    o.precision = precision;
    o.device = device;
    o.recompute = recompute;
    o.update = update;
    tt_program *second = tt_compile(t, h, &o);
    REQUIRE(first && second && precision && device && recompute && update);
    memset(precision, '?', strlen(precision));
    free(precision);
    free(device);
    free(recompute);
    free(update);
    tt_program_free(first); /* the parameter's place is free again, as no memory was allocated for it */
    o = tt_compile_options_default();
    o.train = false;
    o.precision = "bf16-true";
    tt_program *third = tt_compile(t, h, &o);
    REQUIRE(third != NULL);
    CHECK(tt_allocate(third) == TT_OK && tt_allocate(second) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "precision '32-true' needs parameter 'w' as f32");
    tt_program_free(second);
    tt_program_free(third);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* A program that does not fit into an allocated arena is refused with any budget. A program that fits joins
   the arena. */
TEST(sharing_an_allocated_arena)
{
    test_allocator a;
    model m;
    tt_stats stats;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    c.train = false;
    tt_program *eval = tt_compile(m.t, m.loss, &c);
    REQUIRE(eval && tt_allocate(eval) == TT_OK);
    const size_t held = tt_allocated_bytes(ctx), bytes = tt_program_plan(eval).bytes;
    c.share = eval;
    for (int train = 0; train < 2; train++)
        for (int budget = 0; budget < 2; budget++) {
            c.train = train;
            c.memory_budget = budget ? bytes : 0;
            tt_program *p = tt_compile(m.t, m.loss, &c);
            CHECK((p != NULL) == !train);
            if (train) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the arena of `share` is already allocated");
            if (train)
                CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "compile it before tt_allocate and the first tt_set");
            if (p) CHECK(p->arena == eval->arena && tt_program_plan(p).bytes == bytes);
            if (p) CHECK(model_set(&m, p, 1) == TT_OK && tt_run(p, &stats) == TT_OK);
            if (p) CHECK(tt_program_plan(eval).bytes == bytes && a.live_bytes >= held);
            tt_program_free(p);
            CHECK(tt_allocated_bytes(ctx) == held);
        }
    tt_program_free(eval);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* A program that would make a shared arena larger than another program's budget is refused. */
TEST(budget_of_a_shared_arena)
{
    test_allocator a;
    model m;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    c.train = false;
    tt_program *eval = tt_compile(m.t, m.loss, &c);
    REQUIRE(eval != NULL);
    c.memory_budget = tt_program_plan(eval).bytes;
    tt_program_free(eval);
    eval = tt_compile(m.t, m.loss, &c);
    REQUIRE(eval != NULL);
    const size_t before = tt_allocated_bytes(ctx);
    c.train = true;
    c.share = eval;
    for (int k = 0; k < 2; k++) {
        c.memory_budget = k ? (size_t)1 << 40 : 0;
        CHECK(!tt_compile(m.t, m.loss, &c));
        CHECK_ERROR(ctx, TT_ERR_BUDGET, "for a program that this one shares an arena with");
        CHECK(tt_allocated_bytes(ctx) == before && tt_program_plan(eval).bytes == eval->arena->budget);
    }
    tt_program_free(eval);
    c.share = NULL;
    c.memory_budget = 0;
    tt_program *train = tt_compile(m.t, m.loss, &c);
    REQUIRE(train != NULL);
    c.memory_budget = tt_program_plan(train).bytes;
    tt_program_free(train);
    train = tt_compile(m.t, m.loss, &c);
    c.train = false;
    c.share = train;
    c.memory_budget = 0;
    eval = tt_compile(m.t, m.loss, &c); /* the evaluation needs no more bytes than the training program */
    CHECK(train && eval && eval->arena == train->arena);
    tt_program_free(train);
    tt_program_free(eval);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* Parameters count only in the plan of the program whose arena holds them. */
TEST(plans_count_what_their_arena_holds)
{
    test_allocator a;
    model m;
    tt_context *ctx = test_open(&a);
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    tt_program *owner = model_compile(&m, true, "32-true", false),
               *other = model_compile(&m, false, "32-true", false);
    REQUIRE(owner && other && owner->arena != other->arena);
    const tt_plan plans[2] = {tt_program_plan(owner), tt_program_plan(other)};
    for (int k = 0; k < 2; k++) {
        size_t live = 0;
        for (int c = 0; c < TT_MEM_CATEGORIES; c++) live += plans[k].at_peak[c];
        CHECK(live == plans[k].lower_bound_bytes && (plans[k].at_peak[TT_MEM_PARAMETERS] > 0) == (k == 0));
    }
    const size_t before = tt_allocated_bytes(ctx);
    CHECK(tt_allocate(owner) == TT_OK && tt_allocate(other) == TT_OK);
    CHECK(tt_allocated_bytes(ctx) - before ==
          plans[0].bytes + plans[0].host_bytes + plans[1].bytes + plans[1].host_bytes);
    tt_program_free(owner);
    tt_program_free(other);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* Parameters move to another arena, and get another dtype there. Then a program that was compiled for the
   parameters' old dtype cannot be allocated. */
TEST(parameters_held_as_another_dtype)
{
    test_allocator a;
    model m;
    tt_context *ctx = test_open(&a);
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    tt_program *first = model_compile(&m, true, "bf16-true", false),
               *second = model_compile(&m, false, "bf16-true", false);
    REQUIRE(first && second);
    tt_program_free(first); /* this program was never allocated */
    first = model_compile(&m, true, "32-true", false);
    REQUIRE(first && tt_allocate(first) == TT_OK);
    CHECK(tt_allocate(second) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "precision 'bf16-true' needs parameter 'embed.weight' as bf16, but an earlier program holds "
                "it as f32");
    tt_program_free(first);
    tt_program_free(second);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}
