/* Tests of the seconds and bytes of a plan, of its budget, and of the largest batch within a budget. */
#pragma once

/* Device "cpu" computes in the host's memory, so offload saves nothing. Its budget counts the bytes of the
   context's allocator, and neither advice nor a choice offloads anything. */
TEST(budgets_on_the_hosts_device)
{
    static const char *const offloads[] = {NULL, "optimizer", "optimizer,gradients,parameters", "budget"};
    const int64_t up[2] = {1200, 300}, down[2] = {300, 1200};
    const tt_init normal = {TT_INIT_NORMAL, 0.02f};
    for (int k = 0; k < 2 * TEST_COUNT(offloads); k++) { /* offloads in fp32, then in bf16 as errors advise */
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_compile_options o = tt_compile_options_default();
        tt_tape *t = tt_tape_new(ctx);
        const bool half = k % 2, chosen = k / 2 == 0 || k / 2 == 3;
        const tt_value x = tt_input(t, "x", TT_F32, 700, 300), none = {0};
        tt_value h = tt_linear(t, x, tt_param_new(ctx, "up", 2, up, normal), NULL);
        h = tt_linear(t, tt_gelu(t, h), tt_param_new(ctx, "down", 2, down, normal), NULL);
        const tt_value loss = tt_mean_squared_error(t, h, x, none);
        o.optimizer.clip_norm = 1;
        o.memory_budget = 1 << 20;
        o.offload = offloads[k / 2];
        o.recompute = o.precision = NULL; /* the defaults */
        CHECK(!tt_compile(t, loss, &o));
        CHECK_ERROR(ctx, TT_ERR_BUDGET, "; precision \"bf16-true\" with recompute \"budget\" still needs ");
        o.precision = "32-true";
        o.recompute = "budget";
        CHECK(!tt_compile(t, loss, &o));
        CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs ");
        const char *min = strstr(tt_error(ctx), half ? "\"bf16-true\" still needs "
                                                       : "the smallest possible is ");
        REQUIRE(min != NULL);
        CHECK(!strstr(tt_error(ctx), "update \"host\"") && !strstr(tt_error(ctx), "offload \"act"));
        CHECK(!chosen || !strstr(tt_error(ctx), "offload \"o"));
        if (half) o.precision = "bf16-true";
        o.memory_budget = strtoull(min + (half ? 24 : 25), NULL, 10); /* the number after the words */
        o.memory_budget--;
        CHECK(!tt_compile(t, loss, &o));
        o.memory_budget++;
        tt_program *p = tt_compile(t, loss, &o);
        test__check(p != NULL, __FILE__, __LINE__, tt_error(ctx));
        CHECK(p && strcmp(tt_program_plan(p).offload, chosen ? "none" : offloads[k / 2]) == 0);
        const size_t before = a.live_bytes;
        CHECK(p && tt_allocate(p) == TT_OK);
        CHECK(a.live_bytes - before <= o.memory_budget + 8192);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(a_plan_has_a_budget_too)
{
    test_allocator a;
    net n;
    static const net_options with_all = {true, true};
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    c.device = "cuda";
    REQUIRE(random_net(ctx, 0, with_all, &n));
    tt_program *p = tt_compile(n.t, n.loss, &c);
    REQUIRE(p != NULL);
    c.memory_budget = tt_program_plan(p).bytes;
    tt_program_free(p);
    p = tt_compile(n.t, n.loss, &c);
    CHECK(p != NULL);
    tt_program_free(p);
    c.memory_budget--; /* the library first gives up the memory for the next run's inputs */
    p = tt_compile(n.t, n.loss, &c);
    REQUIRE(p != NULL && tt_program_plan(p).bytes <= c.memory_budget);
    c.memory_budget = tt_program_plan(p).bytes - 1;
    tt_program_free(p);
    CHECK(tt_compile(n.t, n.loss, &c) == NULL);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs ");
    tt_tape_free(n.t);
    TEST_CLOSE(ctx, &a);
}

TEST(seconds_of_a_plan_by_costs)
{
    static const char *const names[] = {
        "product_16", "product_f32", "attention_16", "attention_f32", "rows_16", "rows_f32", "update_16",
        "update_f32", "update_host", "memory", "to_host", "from_host", "between_ranks", "launch", "barrier"};
    enum { COUNT = TEST_COUNT(names), RATES = COUNT - 2 };
    static const net_options with_all = {true, true};
    test_allocator a;
    net n;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    tt_costs costs[3]; /* 0: the default costs; 1: four times slower; 2: wrong costs */
    double rates[COUNT];
    c.device = "cuda";
    c.offload = "gradients";
    c.update = "host";
    REQUIRE(sizeof rates == sizeof costs[0] && random_net(ctx, 0, with_all, &n));
    costs[0] = tt_costs_default();
    memcpy(rates, &costs[0], sizeof rates);
    for (int k = 0; k < COUNT; k++) rates[k] *= k < RATES ? 0.25 : 4;
    memcpy(&costs[1], rates, sizeof rates);
    tt_plan plan[3];
    for (int k = 0; k < 3; k++) {
        c.costs = k ? &costs[k - 1] : NULL;
        tt_program *p = tt_compile(n.t, n.loss, &c);
        REQUIRE(p != NULL);
        plan[k] = tt_program_plan(p);
        tt_program_free(p);
    }
    CHECK(plan[0].compute_seconds > 0 && plan[1].compute_seconds == plan[0].compute_seconds);
    CHECK(plan[1].exposed_seconds == plan[0].exposed_seconds);
    CHECK(plan[2].compute_seconds == 4 * plan[0].compute_seconds);
    CHECK(plan[2].exposed_seconds == 4 * plan[0].exposed_seconds);
    CHECK(plan[0].host_seconds > 0 && plan[0].host_seconds < plan[0].compute_seconds);
    CHECK(plan[2].host_seconds == 4 * plan[0].host_seconds);
    CHECK(plan[0].micro_compute_seconds > 0);
    CHECK(plan[0].micro_compute_seconds + plan[0].host_seconds < plan[0].compute_seconds);
    CHECK(plan[2].micro_compute_seconds == 4 * plan[0].micro_compute_seconds);
    c.costs = &costs[2];
    for (int k = 0; k < COUNT; k++)
        for (int bad = 0; bad < 4; bad++) {
            const double wrong[] = {-1, (double)NAN, (double)INFINITY, 0};
            char text[64];
            if (k >= RATES && bad == 3) continue; /* a fixed time may be 0, but a rate may not */
            memcpy(rates, &costs[0], sizeof rates);
            rates[k] = wrong[bad];
            memcpy(&costs[2], rates, sizeof rates);
            CHECK(tt_compile(n.t, n.loss, &c) == NULL);
            snprintf(text, sizeof text, "costs: %s is %g, but must be a finite number %s", names[k],
                     wrong[bad], k < RATES ? "above 0" : "of seconds");
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, text);
        }
    tt_tape_free(n.t);
    TEST_CLOSE(ctx, &a);
}

/* The parameters of a model of three layers, for tests of batches. recorded: how often the model was
   recorded; fails_at: the number of rows with which recording fails. */
typedef struct batches { tt_param *up[3], *down[3]; int recorded; int64_t fails_at; } batches;

static tt_value record_batch(void *user, tt_tape *t, int64_t n)
{
    batches *b = (batches *)user;
    const tt_value none = {0};
    const int64_t rows = tt_axis(t, "rows", n);
    tt_value x = tt_input(t, "x", TT_F32, n == b->fails_at ? 0 : rows, 16), h = x;
    b->recorded++;
    for (int k = 0; k < 3; k++) {
        h = tt_add(t, h, tt_linear(t, tt_gelu(t, tt_linear(t, h, b->up[k], NULL)), b->down[k], NULL));
        tt_block_end(t, h);
    }
    return tt_mean_squared_error(t, h, x, none);
}

static bool fits_batch(batches *b, tt_context *ctx, const tt_compile_options *o, int64_t n)
{
    tt_tape *t = tt_tape_new(ctx);
    tt_program *p = tt_compile(t, record_batch(b, t, n), o);
    CHECK(p || tt_error_code(ctx) == TT_ERR_BUDGET);
    tt_program_free(p);
    tt_tape_free(t);
    return p != NULL;
}

TEST(largest_batch_against_brute_force)
{
    enum { MAX = 30 };
    static const struct { const char *device, *recompute, *offload; int zero; } more[] = {
        {"cuda", "budget", "budget", 1}, {"cuda", "blocks", "optimizer,activations", 1},
        {"cpu", "cheap", "budget", 1}, {"cuda*2", "cheap", "budget", TT_ZERO_BUDGET}};
    static const char *const recomputes[] = {"none", "blocks", "budget"};
    test_allocator a;
    batches b;
    tt_context *ctx = test_open(&a);
    ctx->apart = true;
    tt_compile_options o = tt_compile_options_default();
    memset(&b, 0, sizeof b);
    for (int k = 0; k < 3; k++) {
        b.up[k] = matrix(ctx, k == 0 ? "up0" : k == 1 ? "up1" : "up2", 40, 16);
        b.down[k] = matrix(ctx, k == 0 ? "down0" : k == 1 ? "down1" : "down2", 16, 40);
    }
    for (int k = 0; k < TEST_COUNT(recomputes) * 2; k++) {
        tt_tape *t = tt_tape_new(ctx);
        o.recompute = k < 4 ? "none" : "blocks";
        o.device = k % 2 ? "cuda" : "cpu";
        o.memory_budget = 0;
        tt_program *p = tt_compile(t, record_batch(&b, t, 1), &o);
        REQUIRE(p != NULL);
        const size_t one = tt_program_plan(p).bytes;
        tt_program_free(p);
        tt_tape_free(t);
        o.recompute = recomputes[k / 2];
        for (int size = 0; size < 5; size++) { /* odd budgets, and one byte less than the smallest plan */
            if ((k + size) % (2 * TEST_SWEEP - 1)) continue;
            o.memory_budget = size ? one + (size_t)size * (size_t)size * 3777 : one - 1;
            int64_t largest = 0;
            for (int64_t n = 1; n <= MAX; n++) if (fits_batch(&b, ctx, &o, n)) largest = n;
            b.recorded = 0;
            const int64_t found = tt_largest_batch(ctx, record_batch, &b, &o, MAX);
            char text[128];
            snprintf(text, sizeof text, "%s on %s, %zu bytes: %d, and by trying all %d; %d plans",
                     o.recompute, o.device, o.memory_budget, (int)found, (int)largest, b.recorded);
            test__check(found == largest && b.recorded <= 16, __FILE__, __LINE__, text);
            if (!largest) CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs");
            if (!largest) CHECK(b.recorded == 1);
        }
        o.memory_budget = one << 16;
        CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 7) == 7);
    }
    for (int k = 0; k < TEST_COUNT(more); k++) { /* choices under a budget fit a larger batch than fixed
                                                    options; one more row is refused */
        int64_t found[2];
        for (int chosen = 0; chosen < 2; chosen++) {
            o.device = more[k].device;
            o.recompute = chosen ? more[k].recompute : "none";
            o.offload = chosen ? more[k].offload : NULL;
            o.parallel.zero = chosen ? more[k].zero : 1;
            o.memory_budget = (k == 2 ? 0 : (size_t)32 << 20) + 200000;
            found[chosen] = tt_largest_batch(ctx, record_batch, &b, &o, 5000);
            CHECK(found[chosen] > 0 && found[chosen] < 5000);
            CHECK(fits_batch(&b, ctx, &o, found[chosen]));
            for (int more_of = 1; more_of <= 3; more_of++)
                CHECK(!fits_batch(&b, ctx, &o, found[chosen] + more_of));
        }
        CHECK(found[1] > found[0]);
    }
    o.parallel.zero = 1;
    o.offload = NULL;
    o.recompute = "none";
    o.memory_budget = 0;
    o.device = "cpu";
    CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 7) == 0);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the largest batch for device 'cpu' depends on memory_budget, which is "
                                      "not set");
    o.device = "tpu";
    CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 7) == 0);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "device 'tpu' is unknown");
    o.device = "cpu";
    o.memory_budget = 1 << 20;
    CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 0) == 0);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "max is 0, but must be at least 1");
    /* errors other than the budget's end the search */
    for (b.fails_at = 1; b.fails_at <= 7; b.fails_at += 6) {
        CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 7) == 0);
        CHECK_ERROR(ctx, TT_ERR_SHAPE, "input 'x' has 0 rows");
    }
    b.fails_at = 0;
    tt_tape *t = tt_tape_new(ctx);
    tt_program *shared = tt_compile(t, record_batch(&b, t, 4), &o);
    o.share = shared;
    CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 7) == 0);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "`share` is set");
    tt_program_free(shared);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}
