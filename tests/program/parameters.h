/* Tests of parameters: initial values, names, frozen parameters. */
#pragma once

/* --------------------------------------------------------------------------------------------- parameters */

static void moments(const float *x, int64_t n, double *mean, double *deviation, double *max)
{
    double sum = 0, squares = 0;
    *max = 0;
    for (int64_t k = 0; k < n; k++) {
        sum += x[k];
        squares += (double)x[k] * x[k];
        if (fabs(x[k]) > *max) *max = fabs(x[k]);
    }
    *mean = sum / (double)n;
    *deviation = sqrt(squares / (double)n - *mean * *mean);
}

TEST(initial_values)
{
    enum { N = 100003 };
    float *first = (float *)malloc(N * sizeof(float)), *other = (float *)malloc(N * sizeof(float));
    double mean, deviation, max;
    /* Run 0 reads the values before they are allocated, runs 1 to 6 after. Run 2 has 3 threads, run 3 bf16,
       run 4 another seed, run 5 another name, and run 6 f16. */
    for (int run = 0; run < 7; run++) {
        test_allocator a;
        tt_context_options o = test_options(&a);
        tt_compile_options c = tt_compile_options_default();
        o.threads = run == 2 ? 3 : 1;
        o.seed = run == 4 ? 2 : 1;
        tt_context *ctx = tt_open(&o);
        tt_param *normal = param1(ctx, run == 5 ? "other" : "normal", N, init_of(TT_INIT_NORMAL, 0.02f)),
                 *flat = param1(ctx, "uniform", N, init_of(TT_INIT_UNIFORM, 0.5f));
        tt_param *ones = param1(ctx, "ones", 7, init_of(TT_INIT_ONES, 0)),
                 *zeros = param1(ctx, "zeros", 7, init_of(TT_INIT_ZEROS, 0));
        tt_tape *t = tt_tape_new(ctx);
        tt_value sum = tt_add(t, tt_param_value(t, normal), tt_param_value(t, flat)),
                 small = tt_add(t, tt_param_value(t, ones), tt_param_value(t, zeros));
        tt_output(t, small);
        c.train = false;
        c.precision = run == 3 ? "bf16-true" : run == 6 ? "16-true" : "32-true";
        tt_program *p = tt_compile(t, sum, &c);
        REQUIRE(p != NULL);
        if (run > 0)
            CHECK(tt_allocate(p) == TT_OK && normal->owner->allocated &&
                  tt__param_placement(normal)->dtype == (run == 3 ? TT_BF16
                                                    : run == 6 ? TT_F16
                                                    : TT_F32));
        CHECK(tt_param_get(normal, run ? other : first) == TT_OK);
        if (run == 0) {
            moments(first, N, &mean, &deviation, &max);
            CHECK_NEAR(mean, 0, 0.02 * 4 / sqrt((double)N)); /* four standard errors */
            CHECK_NEAR(deviation, 0.02, 0.02 * 4 / sqrt(2.0 * (double)N));
            CHECK(max > 0.02 * 3.5 && max < 0.02 * 6);
        } else if (run < 4) {
            bool same = true;
            for (int k = 0; k < N; k++)
                same &= other[k] == (run == 3 ? tt__from_bf16(tt__to_bf16(first[k])) : first[k]);
            CHECK(same);
        } else {
            int equal = 0;
            for (int k = 0; k < N; k++) equal += other[k] == first[k];
            CHECK(equal < 100);
        }
        CHECK(tt_param_get(flat, other) == TT_OK);
        moments(other, N, &mean, &deviation, &max);
        CHECK_NEAR(mean, 0, 0.5 / sqrt(3.0) * 4 / sqrt((double)N));
        CHECK_NEAR(deviation, 0.5 / sqrt(3.0), 0.002);
        CHECK(max <= 0.5 && max > 0.499);
        CHECK(tt_param_get(ones, other) == TT_OK && other[0] == 1 && other[6] == 1);
        CHECK(tt_param_get(zeros, other) == TT_OK && other[0] == 0 && other[6] == 0);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
    free(first);
    free(other);
}

/* A parameter is refused if only a few of its initial values are too large for f16. Values just below the
   limit are accepted. */
TEST(initial_values_too_large_for_f16)
{
    static const struct { tt_init_kind kind; float scale; bool fits; } cases[] = {
        {TT_INIT_UNIFORM, 65000, true}, {TT_INIT_UNIFORM, 70000, false}, {TT_INIT_NORMAL, 10000, true},
        {TT_INIT_NORMAL, -20000, false}};
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_param *p = param1(ctx, "p", 100003, init_of(cases[k].kind, cases[k].scale));
        tt_tape *t = tt_tape_new(ctx);
        tt_compile_options c = tt_compile_options_default();
        c.train = false;
        c.precision = "16-true";
        tt_program *program = tt_compile(t, tt_scale(t, tt_param_value(t, p), 1), &c);
        REQUIRE(program != NULL);
        CHECK(tt_allocate(program) == (cases[k].fits ? TT_OK : TT_ERR_ARGUMENT));
        if (!cases[k].fits) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "but f16 holds at most 65504");
        tt_program_free(program);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(parameters_are_made_found_set_and_read)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int64_t dims[4] = {2, 3, 4, 5};
    tt_init z = init_of(TT_INIT_ZEROS, 0);
    tt_param *p = tt_param_new(ctx, "conv.weight", 4, dims, z);
    REQUIRE(p != NULL);
    CHECK(tt_param_size(p) == 120 && tt_param_ndim(p) == 4 && tt_param_dims(p)[3] == 5 &&
          strcmp(tt_param_name(p), "conv.weight") == 0);
    CHECK(tt_param_find(ctx, "conv.weight") == p && !tt_param_find(ctx, "conv") && !tt_param_frozen(p));
    CHECK(!tt_param_new(ctx, "conv.weight", 1, dims, z));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "parameter 'conv.weight' exists already");
    CHECK(!tt_param_new(ctx, "", 1, dims, z) && !tt_param_new(ctx, NULL, 1, dims, z));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "has no name");
    CHECK(!tt_param_new(ctx, "x", 0, dims, z));
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "'x' has 0 dimensions, but must have 1 to 4");
    CHECK(!tt_param_new(ctx, "x", 5, dims, z));
    dims[1] = 0;
    CHECK(!tt_param_new(ctx, "x", 2, dims, z));
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "'x': dimension 1 is 0");
    dims[0] = dims[1] = 1000000000;
    CHECK(!tt_param_new(ctx, "x", 2, dims, z));
    CHECK_ERROR(ctx, TT_ERR_SHAPE,
                "'x': dimension 1, 1000000000, makes 2^47 elements or more, which is too many");
    CHECK(!tt_param_find(ctx, "x"));

    size_t before = tt_allocated_bytes(ctx); /* a large parameter is not allocated yet */
    tt_param *w = param2(ctx, "w", 30000, 30000, z);
    CHECK(w && tt_allocated_bytes(ctx) - before < 2000);
    float values[15], got[15];
    tt_param *v = param2(ctx, "v", 3, 5, init_of(TT_INIT_ONES, 0));
    for (int k = 0; k < 15; k++) values[k] = (float)k / 7;
    CHECK(tt_param_get(v, got) == TT_OK && got[14] == 1);
    CHECK(tt_param_set(v, values) == TT_OK && tt_param_get(v, got) == TT_OK &&
          memcmp(values, got, sizeof got) == 0);
    values[0] = 9;
    CHECK(tt_param_set(v, values) == TT_OK && tt_param_get(v, got) == TT_OK && got[0] == 9);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options c = tt_compile_options_default();
    c.train = false;
    tt_value root = tt_scale(t, tt_param_value(t, v), 2);
    tt_program *program = tt_compile(t, root, &c);
    REQUIRE(program && tt_allocate(program) == TT_OK);
    CHECK(tt_param_get(v, got) == TT_OK && memcmp(values, got, sizeof got) == 0);
    CHECK(v->source == NULL); /* the copy of the values is freed */
    values[1] = -3;
    CHECK(tt_param_set(v, values) == TT_OK && tt_param_get(v, got) == TT_OK && got[1] == -3);
    CHECK(tt_run(program, NULL) == TT_OK && tt_get(program, root, got, 15) == TT_OK && got[0] == 18 &&
          got[1] == -6);
    tt_program_free(program); /* the values outlive the program */
    CHECK(tt_param_get(v, got) == TT_OK && got[1] == -3);
    program = tt_compile(t, root, &c);
    CHECK(program && tt_run(program, NULL) == TT_OK && tt_get(program, root, got, 15) == TT_OK &&
          got[0] == 18);
    tt_program_free(program);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* A source that fails once changes no parameter, not even a parameter that was filled before. */
static bool source_fails;

static tt_status failing_read(void *source, int64_t first, int64_t n, float *to)
{
    if (source_fails) return tt__fail((tt_context *)source, TT_ERR_FILE, "the disk is gone");
    for (int64_t k = 0; k < n; k++) to[k] = (float)(first + k);
    return TT_OK;
}

TEST(a_failed_source_can_be_tried_again)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    tt_param *v = param1(ctx, "v", 5, init_of(TT_INIT_ZEROS, 0)),
             *w = param1(ctx, "w", 5, init_of(TT_INIT_ZEROS, 0));
    float values[5] = {1, 2, 3, 4, 5}, got[5];
    tt_param_set(v, values);
    w->read = failing_read;
    w->source = ctx;
    tt_tape *t = tt_tape_new(ctx);
    tt_value sum = tt_add(t, tt_param_value(t, v), tt_param_value(t, w));
    c.train = false;
    tt_program *p = tt_compile(t, sum, &c);
    REQUIRE(p != NULL);
    source_fails = true;
    size_t before = tt_allocated_bytes(ctx);
    CHECK(tt_allocate(p) == TT_ERR_FILE);
    CHECK_ERROR(ctx, TT_ERR_FILE, "the disk is gone");
    CHECK(tt_allocated_bytes(ctx) == before);
    CHECK(tt_param_get(v, got) == TT_OK && memcmp(values, got, sizeof got) == 0);
    source_fails = false;
    CHECK(tt_run(p, NULL) == TT_OK && tt_get(p, sum, got, 5) == TT_OK && got[0] == 1 && got[4] == 9);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* ----------------------------------------------------------------------------------------------- freezing */

/* Returns the number of lines of instruction `op` that contain `name`. */
static int count_lines(const char *text, const char *op, const char *name)
{
    int n = 0;
    char line[1024];
    for (; *text; text += strcspn(text, "\n"), text += *text == '\n') {
        snprintf(line, sizeof line, "%.*s", (int)strcspn(text, "\n"), text);
        size_t length = strlen(op);
        n += strncmp(line + 5, op, length) == 0 && line[5 + length] == ' ' && strstr(line, name) != NULL;
    }
    return n;
}

TEST(frozen_parameters_cost_nothing)
{
    /* The trained parameters are the head, the last layers, all, or the biases and the head's weight. */
    static const char *const lists[][4] = {
        {"head.*", NULL}, {"layer.1.*", "head.*", NULL}, {"*", NULL}, {"*.bias", "head.weigh?", NULL}};
    test_allocator a;
    for (int k = 0; k < TEST_COUNT(lists); k++) {
        model m;
        char text[32768];
        float before[512], after[512];
        tt_context *ctx = test_open(&a);
        /* Parameters may be frozen after recording, because only tt_compile asks which ones are frozen. */
        REQUIRE(model_params(ctx) && model_record(ctx, &m));
        CHECK(tt_param_freeze(ctx, "*", true) == 9);
        int trainable = 0;
        size_t all = 0, trained = 0;
        for (int j = 0; lists[k][j]; j++) CHECK(tt_param_freeze(ctx, lists[k][j], false) > 0);
        for (int j = 0; j < ctx->n_params; j++) {
            size_t bytes = tt__align_up((size_t)ctx->params[j]->size * 4);
            all += bytes;
            if (!tt_param_frozen(ctx->params[j])) { trainable++; trained += bytes; }
        }
        tt_program *p = model_compile(&m, true, "32-true", true);
        REQUIRE(p != NULL);
        tt_param_freeze(ctx, "*", k == 1); /* compiled programs do not change */
        tt_plan plan = tt_program_plan(p);
        /* AdamW's two averages, and one accumulated gradient */
        CHECK(plan.persistent_bytes == all + 3 * trained);
        CHECK(plan.at_peak[TT_MEM_GRADIENTS] == trained && plan.at_peak[TT_MEM_OPTIMIZER] == 2 * trained &&
              plan.at_peak[TT_MEM_PARAMETERS] == all);
        CHECK(tt_program_text(p, text, sizeof text) < sizeof text);
        CHECK(count_lines(text, "adam", "") == trainable &&
              count_lines(text, "sum_squares", "") == trainable);
        CHECK(count_lines(text, "adam", "'head.weight'") == 1 &&
              count_lines(text, "adam", "'embed.weight'") == (k == 2));
        CHECK(count_lines(text, "linear_dw", "") == (k == 0 ? 1 : k == 1 ? 2 : 3));
        CHECK(count_lines(text, "linear_dw", "d(layer.0.weight)") == (k == 2));
        CHECK(count_lines(text, "linear_dx", "") == (k == 0 ? 0 : k == 1 ? 1 : k == 2 ? 3 : 2));
        CHECK(count_lines(text, "attention_backward", "") == (k >= 2) &&
              count_lines(text, "embedding_backward", "") == (k == 2));
        CHECK(count_lines(text, "layernorm_backward", "") == (k >= 2) && count_lines(text, "gelu", "") == 0);
        CHECK(count_lines(text, "layernorm_backward", "d(norm.weight)") == (k == 2));
        CHECK(model_set(&m, p, 1) == TT_OK && tt_micro_step(p, NULL) == TT_OK);
        for (int j = 0; j < ctx->n_params; j++) {
            tt_param *w = ctx->params[j];
            bool frozen = strcmp(w->name, "embed.weight") == 0 ? k != 2
                          : strcmp(w->name, "head.weight") == 0 ? false
                          : strcmp(w->name, "layer.1.weight") == 0 ? k == 0 || k == 3
                          : true;
            if (strcmp(w->name, "embed.weight") && strcmp(w->name, "head.weight") &&
                strcmp(w->name, "layer.1.weight"))
                continue;
            CHECK((tt_get_gradient(p, w, before) == TT_OK) == !frozen);
            if (frozen)
                CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                            "has no gradient in this program: it is frozen or not used");
            tt_param_get(w, before);
            if (strcmp(w->name, "head.weight")) continue;
            CHECK(tt_update(p, 0.01f, NULL) == TT_OK);
            tt_param_get(w, after);
            CHECK(memcmp(before, after, (size_t)w->size * 4) != 0);
        }
        tt_program_free(p);
        tt_tape_free(m.t);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(frozen_parameters_keep_their_bits)
{
    test_allocator a;
    model m;
    float before[256], after[256];
    tt_context *ctx = test_open(&a);
    REQUIRE(model_params(ctx));
    CHECK(tt_param_freeze(ctx, "layer.?.weight", true) == 2 && tt_param_freeze(ctx, "nothing*", true) == 0);
    CHECK(tt_param_frozen(tt_param_find(ctx, "layer.0.weight")) &&
          !tt_param_frozen(tt_param_find(ctx, "layer.0.bias")));
    REQUIRE(model_record(ctx, &m));
    tt_program *p = model_compile(&m, true, "32-true", false);
    REQUIRE(p && tt_allocate(p) == TT_OK);
    for (int j = 0; j < ctx->n_params; j++) {
        tt_param *w = ctx->params[j];
        tt_param_get(w, before);
        CHECK(model_set(&m, p, j) == TT_OK && tt_step(p, 0.01f, NULL) == TT_OK);
        tt_param_get(w, after);
        CHECK((memcmp(before, after, (size_t)w->size * 4) == 0) == tt_param_frozen(w));
    }
    tt_program_free(p);
    tt_param_freeze(ctx, "*", true);
    CHECK(!model_compile(&m, true, "32-true", false));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "nothing to train: the loss depends on no trainable parameter");
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}
