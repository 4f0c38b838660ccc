/* Tests of lifetimes and places of values. */
#pragma once

/* Returns the box of the value `name`: its place and its first and last instruction. Returns NULL without
   storage. */
static const tt__box *box_named(const tt_tape *t, const tt__box *box, int n, const char *name)
{
    for (int k = 0; k < n; k++)
        if (box[k].value && strcmp(t->values[box[k].value].name, name) == 0) return &box[k];
    return NULL;
}

TEST(lifetimes_and_places_of_each_space)
{
    offload o;
    tt__box *box;
    int n, at;
    size_t height[TT__SPACES], bound[TT__SPACES];
    REQUIRE(offloaded(&o));
    tt_tape *t = o.d.t;
    REQUIRE(tt__lifetimes(t, o.y, &box, &n) == TT_OK);
    const tt__box *h = box_named(t, box, n, "h"), *a = box_named(t, box, n, "a"),
                  *b = box_named(t, box, n, "b");
    REQUIRE(h && a && b);
    CHECK(h->space == TT__DEVICE && h->first == 0 && h->last == WAIT_OUT);
    CHECK(a->space == TT__HOST && a->first == COPY_OUT && a->last == WAIT_IN);
    CHECK(b->space == TT__DEVICE && b->first == COPY_IN);
    for (int space = 0; space < TT__SPACES; space++) {
        REQUIRE(tt__place(o.d.ctx, box, n, t->n_code, (tt__space)space,
                          &height[space], &bound[space], &at) == TT_OK);
        CHECK(height[space] == bound[space]);
    }
    for (int space = 0; space < TT__SPACES; space++)
        CHECK(tt__verify_places(t, box, n, (tt__space)space, height[space]) == TT_OK);
    /* two places of (40, 4) floats: one for x, later u and u2, and one for h or b */
    CHECK(height[TT__HOST] == 640 && height[TT__DEVICE] == 2 * 640);

    box[a - box].place = 64;
    CHECK(tt__verify_places(t, box, n, TT__DEVICE, height[TT__DEVICE]) == TT_OK);
    CHECK(tt__verify_places(t, box, n, TT__HOST, height[TT__HOST]) == TT_ERR_INTERNAL);
    tt__free(o.d.ctx, box);
    tt_tape_free(t);
    TEST_CLOSE(o.d.ctx, &o.d.a);
}

/* The program computes `gelu(x) + gelu(gelu(x))`. The plan counts the copy's memory as the host's. */
TEST(values_in_the_hosts_memory)
{
    offload o;
    float x[160], y[160];
    tt_compile_options c = tt_compile_options_default();
    REQUIRE(offloaded(&o));
    c.train = false;
    tt_program *p = tt_compile(o.d.t, tt__handle(o.d.t, o.y), &c);
    REQUIRE(p != NULL);
    CHECK(tt_program_plan(p).host_bytes == 640 && tt_program_plan(p).instructions == SUM + 1);
    for (int k = 0; k < 160; k++) x[k] = (float)k / 40 - 2;
    CHECK(tt_set(p, o.d.x, x, 40) == TT_OK && tt_run(p, NULL) == TT_OK &&
          tt_get(p, tt__handle(o.d.t, o.y), y, 160) == TT_OK);
    for (int k = 0; k < 160; k++) {
        double g = 0.5 * x[k] * (1 + erf(x[k] / sqrt(2))), gg = 0.5 * g * (1 + erf(g / sqrt(2)));
        CHECK_NEAR(y[k], g + gg, 1e-6);
    }
    tt_program_free(p);
    tt_tape_free(o.d.t);
    TEST_CLOSE(o.d.ctx, &o.d.a);
}

/* Copies complete when they start or, if ctx->late is set, at the instruction that waits for them: the bits
   are equal. With ctx->late each missing wait is noticed. */
TEST(work_of_other_streams_ends_at_its_wait)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static float expected[STREAM_RUNS][STREAM_NUMBERS], got[STREAM_RUNS][STREAM_NUMBERS];
    ctx->options.verify = true;
    /* without: number of the missing wait; -1: none; -2: none, and copies are not late */
    for (int without = -2; without < 2 * STREAM_BLOCKS; without++) {
        streams s;
        ctx->late = without > -2;
        REQUIRE(streams_compile(&s, ctx, "cpu"));
        s.p->poison = true;
        if (without >= 0) REQUIRE(streams_drop(&s, without));
        CHECK(streams_run(&s, without == -2 ? expected : got) == TT_OK);
        for (int k = 0; k < STREAM_NUMBERS; k++) CHECK(isfinite(expected[0][k]));
        if (without > -2) CHECK((memcmp(got, expected, sizeof got) == 0) == (without == -1));
        streams_free(&s);
    }
    CHECK(memcmp(expected[0], expected[1], sizeof expected[0]) != 0);
    TEST_CLOSE(ctx, &a);
}

/* Sums of squares run together, and so do updates. The operands of the last instruction and all results are
   alive from the first instruction to the last. An update without the step's settings is refused. */
TEST(instructions_that_run_together)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, 6, 4), target = tt_input(t, "target", TT_F32, 6, 4), h = x;
    char text[8192];
    ctx->options.verify = true;
    for (int k = 0; k < 3; k++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", k);
        h = tt_gelu(t, tt_linear(t, h, matrix(ctx, name, 4, 4), NULL));
    }
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, h, target, tt__handle(t, 0)), NULL);
    REQUIRE(p != NULL);
    const tt_tape *code = p->built.t;
    int groups = 0, end = 0, update = -1;
    for (int k = 0; k < code->n_code; k++) {
        if (!code->code[k].with_next || (k && code->code[k - 1].with_next)) continue;
        for (end = k; code->code[end].with_next; end++) {}
        CHECK(end == k + 2);
        groups++;
        update = end;
        for (int b = 0; b < p->built.n_boxes; b++) {
            const tt__box *box = &p->built.box[b];
            bool meets = box->value && box->first <= end && box->last >= k;
            if (meets) CHECK(box->first <= k && box->last >= end);
        }
    }
    CHECK(groups == 2 && p->built.together == 3);
    tt_program_text(p, text, sizeof text);
    const char *line = strstr(text, "sum_squares"), *dots = line ? strstr(line, "...\n") : NULL;
    CHECK(dots && dots < strchr(line, '\n'));
    p->built.t->code[update].in[TT__RUN_IN] = 0;
    CHECK(tt__verify(p->built.t, "test") == TT_ERR_INTERNAL);
    CHECK_ERROR(ctx, TT_ERR_INTERNAL, "has no operand with the step's settings: 'step settings'");
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* ---------------------------------------------------------------------------------------------- placement */

/* Returns the smallest height of any placement. Tries every order of the storages; each storage in turn gets
   the lowest place that fits. One of the orders reaches the smallest height: in the order of the places of a
   best placement, each storage gets its place in the best placement or a lower place. */
static size_t best_height(tt__box *box, int *order, int n, int fixed, size_t best, tt__taken *taken)
{
    if (fixed == n) {
        size_t height = tt__place_in_order(box, order, n, false, best, taken);
        return height < best ? height : best;
    }
    for (int k = fixed; k < n; k++) {
        int swap = order[fixed]; order[fixed] = order[k]; order[k] = swap;
        best = best_height(box, order, n, fixed + 1, best, taken);
        swap = order[fixed]; order[fixed] = order[k]; order[k] = swap;
    }
    return best;
}

TEST(placement_against_brute_force)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    uint64_t s = 99;
    double sum = 0, worst = 1;
    int optimal = 0, cases = 400;
    ctx->options.verify = true;
    for (int c = 0; c < cases; c++) {
        tt__box box[7];
        tt__taken taken;
        int order[7], n = 1 + pick(&s, 7), length = 2 + pick(&s, 8), at, bound_at = 0;
        size_t height, bound, max = 0;
        for (int k = 0; k < n; k++) {
            int first = pick(&s, length), last = first + pick(&s, length - first);
            box[k] = box_of(first, last, (size_t)(1 + pick(&s, 6)) * 64, 12345);
            box[k].merged = order[k] = k;
        }
        for (int i = 0; i < length; i++) {
            size_t live = 0;
            for (int k = 0; k < n; k++) if (box[k].first <= i && i <= box[k].last) live += box[k].bytes;
            if (live > max) { max = live; bound_at = i; }
        }
        REQUIRE(tt__place(ctx, box, n, length, TT__DEVICE, &height, &bound, &at) == TT_OK);
        CHECK(bound == max && at == bound_at);
        CHECK(height >= bound);
        CHECK(tt__verify_places(t, box, n, TT__DEVICE, height) == TT_OK);
        REQUIRE(tt__taken_open(ctx, &taken, length));
        size_t best = best_height(box, order, n, 0, SIZE_MAX, &taken);
        tt__taken_close(&taken);
        CHECK(best >= bound && height >= best);
        sum += (double)height / (double)best;
        if ((double)height / (double)best > worst) worst = (double)height / (double)best;
        optimal += height == best;
    }
    if (getenv("TINYTRAIN_TEST_VERBOSE"))
        printf("  placement: %d of %d optimal, mean %.4f, worst %.4f of the optimum\n", optimal, cases,
               sum / cases, worst);
    CHECK(optimal >= cases * 9 / 10);
    CHECK(sum / cases <= 1.01);
    CHECK(worst <= 1.35);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* Random storages at random places are refused exactly if two storages overlap while both are alive. */
TEST(verified_places_against_all_pairs)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    uint64_t s = 7;
    int refused = 0, cases = 2000;
    ctx->options.verify = true;
    for (int c = 0; c < cases; c++) {
        tt__box box[12];
        int n = 2 + pick(&s, 11), length = 1 + pick(&s, 40);
        bool overlap = false;
        for (int k = 0; k < n; k++) {
            int first = pick(&s, length), last = first + pick(&s, length - first);
            box[k] = box_of(first, last, (size_t)(1 + pick(&s, 3)) * 64, (size_t)pick(&s, 60) * 64);
            box[k].merged = k > 0 && pick(&s, 8) == 0 ? 0 : k;
            for (int j = 0; j < k; j++) {
                const tt__box *x = &box[k], *y = &box[j];
                bool together = x->first <= y->last && y->first <= x->last && x->merged == k &&
                                y->merged == j;
                overlap |= together && x->place < y->place + y->bytes && y->place < x->place + x->bytes;
            }
        }
        refused += overlap;
        CHECK(tt__verify_places(t, box, n, TT__DEVICE, 64 * 64) == (overlap ? TT_ERR_INTERNAL : TT_OK));
    }
    CHECK(refused > cases / 4 && refused < cases * 3 / 4);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

TEST(placement_of_merged_and_empty)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt__box box[4];
    size_t height, bound;
    int at;
    CHECK(tt__place(ctx, box, 0, 0, TT__DEVICE, &height, &bound, &at) == TT_OK && height == 0 && bound == 0);
    box[0] = box_of(0, 5, 128, 7); /* box 1 takes over box 0's storage, and box 2 box 1's */
    box[1] = box_of(2, 4, 128, 7);
    box[2] = box_of(4, 5, 128, 7);
    box[3] = box_of(1, 3, 64, 7);
    for (int k = 0; k < 4; k++) box[k].merged = k;
    box[1].merged = 0;
    box[2].merged = 1;
    CHECK(tt__place(ctx, box, 4, 6, TT__DEVICE, &height, &bound, &at) == TT_OK && height == 192 &&
          bound == 192 && at == 1);
    CHECK(box[1].place == box[0].place && box[2].place == box[0].place && box[3].place % 64 == 0);
    TEST_CLOSE(ctx, &a);
}

TEST(numbers_in_names)
{
    static const char *const names[][2] = {
        {"layer.3.norm1.weight", "layer.*.norm1.weight"}, {"d(layer.23.up)", "d(layer.*.up)"}, {"12", "*"},
        {"1x", "1x"}, {"x1", "x1"}, {"h.0_7-8", "h.*_*-*"}, {"", ""}, {"conv2d.10", "conv2d.*"},
        {"a12b.3c4.5", "a12b.3c4.*"}};
    char text[32];
    for (int k = 0; k < TEST_COUNT(names); k++) {
        tt__without_numbers(names[k][0], text, sizeof text);
        test__check(strcmp(text, names[k][1]) == 0, __FILE__, __LINE__, text);
        for (size_t capacity = 1; capacity < sizeof text; capacity++) {
            tt__without_numbers(names[k][0], text, capacity);
            CHECK(strlen(text) < capacity && strncmp(text, names[k][1], strlen(text)) == 0);
        }
    }
}

TEST(allocation_failures) /* allocations of plans that share an arena, and of reports */
{
    static const net_options with_all = {true, true};
    bool failed = true;
    for (long at = 1; failed; at++) {
        test_allocator a;
        net n;
        tt_context *ctx = test_open(&a);
        tt_compile_options c = tt_compile_options_default();
        REQUIRE(random_net(ctx, 0, with_all, &n));
        a.fail_at = a.calls + at;
        c.device = "cuda";
        tt_program *p = tt_compile(n.t, n.loss, &c);
        c.train = false;
        c.share = p;
        tt_program *eval = p ? tt_compile(n.t, n.loss, &c) : NULL;
        failed = a.failed;
        if (failed) CHECK(!eval && tt_error_code(ctx) == TT_ERR_MEMORY);
        tt_program_free(p);
        tt_program_free(eval);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
}

/* ----------------------------------------------------------------------------------------------- in place */

TEST(elementwise_chains_work_in_place)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    size_t buffer = 640 * 48 * 4, workspace = 0;
    c.train = false;
    for (int kind = 0; kind < 3; kind++) { /* 0: a chain; 1: a chain that begins at an output; 2: branches */
        tt_tape *t = tt_tape_new(ctx);
        tt_value x = tt_input(t, "x", TT_F32, 640, 48), h = x;
        if (kind == 1) tt_output(t, x);
        for (int k = 0; k < 6; k++) {
            tt_value left = tt_scale(t, tt_silu(t, tt_gelu(t, tt_tanh(t, tt_relu(t, h)))), 0.5f);
            h = kind == 2 ? tt_add(t, left, tt_relu(t, tt_scale(t, h, 2))) : left;
            h = tt_layernorm(t, h, vector(ctx, "w", 48, TT_INIT_ONES), NULL, 1e-5f);
        }
        tt_program *p = tt_compile(t, h, &c);
        REQUIRE(p != NULL);
        for (int k = 0; k < p->built.t->n_code; k++)
            if (p->built.t->code[k].workspace > workspace) workspace = p->built.t->code[k].workspace;
        tt_plan plan = tt_program_plan(p);
        CHECK(plan.bytes - plan.persistent_bytes == buffer * (kind ? 2 : 1) + workspace);
        CHECK(plan.lower_bound_bytes == plan.bytes);
        tt_program_free(p);
        tt_tape_free(t);
    }
    TEST_CLOSE(ctx, &a);
}

/* An op does not work in place on a value that is needed otherwise: as the op's second operand (`x + x`), by
   a view, by a later op or as an output. */
TEST(in_place_spares_what_is_needed)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    tt_tape *t = tt_tape_new(ctx);
    float numbers[8], got[8];
    c.train = false;
    tt_value x = tt_input(t, "x", TT_F32, 2, 4);
    tt_value a1 = tt_scale(t, x, 2), view = tt_slice(t, a1, 1, 2), b = tt_scale(t, a1, 3),
             kept = tt_scale(t, b, 5), d = tt_add(t, kept, kept);
    tt_value e = tt_add(t, tt_add(t, d, d), x), small = tt_scale(t, view, 7);
    tt_output(t, kept);
    tt_output(t, small);
    tt_output(t, x);
    tt_program *p = tt_compile(t, e, &c);
    REQUIRE(p != NULL);
    poison(p);
    for (int k = 0; k < 8; k++) numbers[k] = (float)(k + 1);
    REQUIRE(tt_set(p, x, numbers, 2) == TT_OK);
    REQUIRE(tt_run(p, NULL) == TT_OK);
    CHECK(tt_get(p, e, got, 8) == TT_OK && got[0] == 30 * 4 + 1 && got[7] == 8 * 121);
    CHECK(tt_get(p, kept, got, 8) == TT_OK && got[0] == 30 && got[7] == 240);
    CHECK(tt_get(p, small, got, 4) == TT_OK && got[0] == 28 && got[1] == 42 && got[2] == 84 && got[3] == 98);
    CHECK(tt_get(p, x, got, 8) == TT_OK && memcmp(got, numbers, sizeof got) == 0);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* -------------------------------------------------------------------------------------------------- arena */

/* Records n scaled copies of x (rows, cols), all of them outputs. */
static tt_tape *copies(tt_context *ctx, int64_t rows, int64_t cols, int n, tt_value *root)
{
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, rows, cols);
    for (int k = 0; k < n; k++) {
        *root = tt_scale(t, x, 2);
        tt_name(t, *root, "copy.%d", k);
        tt_output(t, *root);
    }
    return t;
}

/* Sizes whose products or sums exceed 64 bits are refused by name, and never wrap into a plan that a budget
   permits. */
TEST(sizes_beyond_64_bits)
{
    static const int64_t inputs[][2] = {
        {(int64_t)1 << 31, (int64_t)1 << 31}, {INT64_MAX, INT64_MAX}, {INT64_MAX, 1}, {1, INT64_MAX},
        {(int64_t)1 << 32, (int64_t)1 << 32}, {(int64_t)1 << 58, 1}, {1, (int64_t)1 << 47},
        {(int64_t)1 << 24, (int64_t)1 << 23}};
    static const int64_t params[][4] = {
        {65536, 65536, 65536, 65536}, {1 << 15, 1 << 15, 1 << 14, 1 << 14},
        {1 << 12, 1 << 12, 1 << 12, 1 << 11}, {INT64_MAX, 2, 2, 2}, {2, INT64_MAX, INT64_MAX, 2},
        {1, 1, 1, INT64_MAX}};
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options o = tt_compile_options_default();
    tt_value root = {0};
    o.train = false;
    o.memory_budget = 1 << 30;
    for (int k = 0; k < TEST_COUNT(inputs); k++) {
        tt_tape *t = tt_tape_new(ctx);
        CHECK(tt_input(t, "wide", TT_F32, inputs[k][0], inputs[k][1]).id == 0);
        CHECK(tt_tape_status(t) == TT_ERR_SHAPE);
        CHECK_ERROR(ctx, TT_ERR_SHAPE, "'wide': ");
        CHECK_ERROR(ctx, TT_ERR_SHAPE, "are 2^47 elements or more, which is too many");
        tt_tape_free(t);
    }
    for (int k = 0; k < TEST_COUNT(params); k++) {
        CHECK(!tt_param_new(ctx, "wide", 4, params[k], zeros));
        CHECK_ERROR(ctx, TT_ERR_SHAPE, "parameter 'wide': dimension ");
    }
    tt_tape *t = tt_tape_new(ctx);
    CHECK(tt_seq_start(t, "starts", INT64_MAX).id == 0);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "sequence starts 'starts': seqs is 9223372036854775807");
    tt_tape_free(t);

    /* Products: operands of 2^32 rows and 2^32 columns have 2^64 elements, whose bytes would wrap to 0. */
    tt_param *w = matrix(ctx, "w", (int64_t)1 << 32, 1), *table = matrix(ctx, "table", 2, (int64_t)1 << 32);
    for (int k = 0; k < 3; k++) {
        t = tt_tape_new(ctx);
        tt_value ids = tt_input(t, "ids", TT_I32, (int64_t)1 << 32, 1);
        if (k == 0) root = tt_linear(t, tt_input(t, "x", TT_F32, (int64_t)1 << 32, 1), w, NULL);
        if (k == 1) root = tt_embedding(t, ids, table);
        if (k == 2) root = tt_gather_rows(t, tt_param_value(t, table), ids);
        CHECK(root.id == 0 && tt_tape_status(t) == TT_ERR_SHAPE && !tt_compile(t, root, &o));
        CHECK_ERROR(ctx, TT_ERR_SHAPE,
                    k == 0 ? "'linear.0': 4294967296 rows of width 4294967296"
                           : k == 1 ? "'embedding.0'" : "'gather_rows.0'");
        tt_tape_free(t);
    }
    t = tt_tape_new(ctx);
    tt_attention_options heads = tt_attention_options_default(1);
    tt_value q = tt_input(t, "q", TT_F32, 2, 65537);
    CHECK(tt_attention(t, q, q, q, tt_seq_start(t, "starts", 1), &heads).id == 0);
    CHECK_ERROR(ctx, TT_ERR_SHAPE,
                "attention: heads have 65537 columns, but at most 65536 are supported: use more heads");
    tt_tape_free(t);

    /* Sums: 64 tensors of 2^48 bytes make a plan that no budget permits; the sum of 2^14 tensors of almost
       2^49 bytes overflows. */
    static const char *const devices[] = {"cpu", "cuda"};
    for (int k = 0; k < TEST_COUNT(devices); k++) {
        o.device = devices[k];
        o.memory_budget = 1 << 30;
        t = copies(ctx, (int64_t)1 << 23, (int64_t)1 << 23, 64, &root);
        CHECK(!tt_compile(t, root, &o));
        CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs ");
        o.memory_budget = 0;
        tt_program *p = tt_compile(t, root, &o);
        REQUIRE(p != NULL);
        size_t bytes = tt_program_plan(p).bytes;
        CHECK(bytes >= 64 * ((size_t)1 << 48) && bytes < 66 * ((size_t)1 << 48));
        tt_program_free(p);
        tt_tape_free(t);
        t = copies(ctx, (int64_t)1 << 23, ((int64_t)1 << 24) - 1, 1 << 14, &root);
        CHECK(!tt_compile(t, root, &o));
        CHECK_ERROR(ctx, TT_ERR_SHAPE, "the tensors of the program need 2^62 bytes or more, which is too "
                    "many: make them smaller, first of all 'x' f32 (8388608, 16777215)");
        tt_tape_free(t);
    }
    TEST_CLOSE(ctx, &a);
}

TEST(arena_is_the_plan)
{
    for (int k = 0; k < 2 * PRECISIONS; k++) {
        static const net_options with_all = {true, true};
        test_allocator a;
        net n;
        tt_stats stats;
        tt_context *ctx = test_open(&a);
        tt_compile_options c = options_of(&precisions[k % PRECISIONS]);
        c.accumulate = k >= 3;
        if (k < 3) c.update = "backward";
        REQUIRE(random_net(ctx, (uint64_t)(k / 2), with_all, &n));
        tt_program *p = tt_compile(n.t, n.loss, &c);
        REQUIRE(p != NULL);
        tt_plan plan = tt_program_plan(p);
        size_t before = tt_allocated_bytes(ctx);
        long blocks = a.live;
        REQUIRE(tt_allocate(p) == TT_OK);
        CHECK(plan.host_bytes > 0 && plan.host_bytes <= 256); /* settings and results of a step */
        CHECK(a.live == blocks + 2);
        CHECK(tt_allocated_bytes(ctx) - before == plan.bytes + plan.host_bytes);
        long calls = a.calls;
        for (int step = 0; step < 3; step++) {
            CHECK(set_inputs(&n, p, (uint64_t)step) == TT_OK);
            if (c.accumulate)
                CHECK(tt_micro_step(p, &stats) == TT_OK && tt_update(p, 0.01f, &stats) == TT_OK);
            else CHECK(tt_step(p, 0.01f, &stats) == TT_OK);
        }
        CHECK(a.calls == calls); /* a step allocates nothing */
        tt_program_free(p);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
}
