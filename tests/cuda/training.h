/* Tests that compare training on CUDA with the CPU, and tests of single kernels. */
#pragma once

/* Indices are checked before a kernel reads them, also if the kernel reads through a view of an input. */
TEST(indices_behind_a_view_are_checked)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int64_t dims[2] = {5, 8};
    tt_init zeros = {TT_INIT_ZEROS, 0};
    tt_param *table = tt_param_new(ctx, "table", 2, dims, zeros);
    tt_tape *t = tt_tape_new(ctx);
    tt_value first = tt_input(t, "first", TT_I32, 6, 1), pairs = tt_input(t, "pairs", TT_I32, 3, 2);
    tt_value rows = tt_embedding(t, tt_reshape(t, pairs, 6, 1), table), target = {0};
    tt_value loss = tt_mean_squared_error(t, rows, tt_embedding(t, first, table), target);
    tt_compile_options o = tt_compile_options_default();
    o.train = false;
    o.device = "cuda";
    tt_program *p = tt_compile(t, loss, &o);
    static const int32_t good[6] = {4, 0, 1, 2, 3, 4}, bad[6] = {0, 1, 5, 0, 0, 0};
    if (CHECK(p != NULL)) {
        CHECK(tt_set(p, first, good, 6) == TT_OK && tt_set(p, pairs, good, 3) == TT_OK &&
              tt_run(p, NULL) == TT_OK);
        CHECK(tt_set(p, first, good, 6) == TT_OK && tt_set(p, pairs, bad, 3) == TT_OK);
        CHECK(tt_run(p, NULL) == TT_ERR_ARGUMENT);
        CHECK(strstr(tt_error(ctx), "'pairs' has 5 in row 2, but must have 0 to 4") != NULL);
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* The gradient of a bias is right, even if the emulator's workspace is too small for partial sums of all
   outputs. The weight is frozen, so that no product computes the bias's gradient. */
TEST(bias_of_very_many_columns)
{
    enum { OUTPUTS = 140000, ROWS = 8 };
    float *b[2], *zeros = (float *)calloc((size_t)ROWS * OUTPUTS, sizeof(float));
    double worst = 0;
#ifdef TT_EMULATE
    emu_configure(1, (size_t)256 << 20, 1, 4);
    CHECK(OUTPUTS * sizeof(float) > TT__CUDA_RESIDENT);
#endif
    for (int on = 0; on < 2; on++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        const int64_t dims[2] = {OUTPUTS, 1}, outputs = OUTPUTS;
        const tt_init normal = {TT_INIT_NORMAL, 1};
        tt_param *w = tt_param_new(ctx, "w", 2, dims, normal);
        tt_param *bias = tt_param_new(ctx, "b", 1, &outputs, normal);
        CHECK(tt_param_freeze(ctx, "w", true) == 1);
        tt_tape *t = tt_tape_new(ctx);
        tt_value x = tt_input(t, "x", TT_F32, ROWS, 1), none = {0};
        tt_value y = tt_linear(t, x, w, bias), target = tt_input(t, "target", TT_F32, ROWS, OUTPUTS);
        tt_compile_options o = tt_compile_options_default();
        o.device = on ? "cuda" : "cpu";
        o.optimizer.kind = TT_SGD;
        tt_program *p = tt_compile(t, tt_mean_squared_error(t, y, target, none), &o);
        float data[ROWS];
        for (int k = 0; k < ROWS; k++) data[k] = (float)(k % 7) - 2;
        b[on] = (float *)calloc(OUTPUTS, sizeof(float));
        REQUIRE(p && b[on] && zeros);
        CHECK(tt_set(p, x, data, ROWS) == TT_OK && tt_set(p, target, zeros, ROWS) == TT_OK &&
              tt_step(p, OUTPUTS / 2.0f, NULL) == TT_OK);
        CHECK(tt_param_get(bias, b[on]) == TT_OK);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
    for (int k = 0; k < OUTPUTS; k++) {
        const double error = fabs((double)b[0][k] - b[1][k]);
        if (!(error <= worst) && !isnan(worst)) worst = error;
    }
    CHECK_NEAR(worst, 0, 2e-5);
    for (int on = 0; on < 2; on++) free(b[on]);
    free(zeros);
}

/* Measured costs of a GPU are valid; an absent device is an error. */
TEST(costs_of_a_gpu)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_costs costs;
    CHECK(tt_measure_costs(ctx, "cuda", &costs) == TT_OK);
    CHECK(tt__check_costs(ctx, &costs) == TT_OK);
    CHECK(tt_measure_costs(ctx, "cuda:15", &costs) == TT_ERR_DEVICE);
    CHECK_ERROR(ctx, TT_ERR_DEVICE, "device 'cuda:15'");
    TEST_CLOSE(ctx, &a);
}

static tt_value record_rows(void *user, tt_tape *t, int64_t n)
{
    const tt_value none = {0}, x = tt_input(t, "x", TT_F32, n, 1024);
    (void)user;
    return tt_mean_squared_error(t, tt_gelu(t, x), x, none);
}

TEST(largest_batch_of_what_is_free)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options o = tt_compile_options_default();
    o.train = false;
    o.device = "cuda";
    tt__device_group *c = tt__find_devices(ctx, o.device);
    size_t available = 0;
    REQUIRE(c && tt__device_group_open(ctx, c) == TT_OK);
    CHECK(c->kind->backend->available(c->device[0], &available) == TT_OK);
    const int64_t n = tt_largest_batch(ctx, record_rows, NULL, &o, (int64_t)1 << 30);
    CHECK(n > 1 && n < (int64_t)1 << 30);
    size_t bytes[2];
    for (int k = 0; k < 2; k++) {
        tt_tape *t = tt_tape_new(ctx);
        tt_program *p = tt_compile(t, record_rows(NULL, t, n + k), &o);
        REQUIRE(p != NULL);
        bytes[k] = tt_program_plan(p).bytes;
        tt_program_free(p);
        tt_tape_free(t);
    }
    /* tt_largest_batch uses only a part of the available memory, because other processes may begin to use
       some. */
    CHECK(bytes[0] < available && 2 * bytes[1] > available);
    o.device = "cuda:15";
    CHECK(tt_largest_batch(ctx, record_rows, NULL, &o, 4) == 0);
    CHECK_ERROR(ctx, TT_ERR_DEVICE, "device 'cuda:15'");
    TEST_CLOSE(ctx, &a);
}

TEST(sizes_that_kernels_refuse)
{
    enum { LAYERNORM, RMSNORM, EMBEDDING, GATHER, SET, SET_LONG, CASES };
    static const char *const names[CASES] = {"layernorm_backward", "rmsnorm_backward", "embedding_backward",
                                             "gather_rows_backward", "set_rows_backward", "set_rows"};
    for (int k = 0; k < 2 * CASES; k++) {
        const int kind = k / 2;
        const bool wide = kind != SET_LONG;
        const int64_t max = wide ? 1 << 20 : 1 << 27, n = max + k % 2;
        const int64_t rows = wide ? 4 : n, cols = wide ? n : 1, dims[2] = {cols, 1}, table[2] = {3, cols};
        const tt_init ones = {TT_INIT_ONES, 0};
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_param *w = tt_param_new(ctx, "w", 2, dims, ones);
        tt_value x = tt_linear(t, tt_input(t, "x", TT_F32, rows, 1), w, NULL);
        tt_value index = tt_input(t, "index", TT_I32, 2, 1), y = {0}, none = {0};
        tt_param *row = tt_param_new(ctx, "row", 1, &cols, ones);
        if (kind == EMBEDDING || kind == GATHER)
            y = tt_embedding(t, tt_input(t, "ids", TT_I32, rows, 1),
                             tt_param_new(ctx, "table", 2, table, ones));
        if (kind == LAYERNORM) y = tt_layernorm(t, x, row, NULL, 1e-5f);
        else if (kind == RMSNORM) y = tt_rmsnorm(t, x, row, 1e-5f);
        else if (kind == GATHER) y = tt_gather_rows(t, y, index);
        else if (kind != EMBEDDING) y = tt_set_rows(t, x, index, row);
        tt_value target = tt_input(t, "target", TT_F32, kind == GATHER ? 2 : rows, cols);
        tt_compile_options o = tt_compile_options_default();
        char expected[128];
        o.device = "cuda";
        tt_program *p = tt_compile(t, tt_mean_squared_error(t, y, target, none), &o);
        snprintf(expected, sizeof expected, "device 'cuda' cannot run %s, ", names[kind]);
        if (!CHECK((p == NULL) == k % 2)) printf("%s %s\n", names[kind], tt_error(ctx));
        if (!p) {
            CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, expected);
            CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, wide ? "kernel for it takes at most 2^20 columns"
                                                      : "kernel for it takes at most 2^27 rows");
        }
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Compares GELU and its derivative in f32 with double precision. A step of SGD subtracts the gradient from
   the parameter, so the difference is the derivative; the target makes the gradient of each result 1. */
TEST(gelu_is_as_exact_as_said)
{
    enum { N = 4096 };
    const int64_t dims[2] = {1, N};
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    static float from[N], after[N], result[N], target[N];
    test_allocator a;
#ifdef TT_EMULATE
    emu_configure(1, (size_t)16 << 20, 1, 4);
#endif
    for (int k = 0; k < N; k++) from[k] = (float)(k - N / 2) / 128;
    for (int slope = 0; slope < 2; slope++) {
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_param *p = tt_param_new(ctx, "x", 2, dims, zeros);
        tt_compile_options o = tt_compile_options_default();
        const tt_value none = {0}, to = tt_input(t, "target", TT_F32, 1, N);
        const tt_value x = slope ? tt_param_value(t, p) : tt_input(t, "in", TT_F32, 1, N), y = tt_gelu(t, x);
        o.device = "cuda";
        o.optimizer.kind = TT_SGD;
        o.optimizer.weight_decay = 0;
        o.train = slope;
        tt_program *run = tt_compile(t, slope ? tt_mean_squared_error(t, y, to, none) : y, &o);
        if (!run) printf("%s\n", tt_error(ctx));
        REQUIRE(run != NULL);
        if (!slope) {
            CHECK(tt_set(run, x, from, 1) == TT_OK && tt_run(run, NULL) == TT_OK &&
                  tt_get(run, y, result, N) == TT_OK);
        } else {
            for (int k = 0; k < N; k++) target[k] = result[k] - N / 2;
            CHECK(tt_param_set(p, from) == TT_OK && tt_set(run, to, target, 1) == TT_OK &&
                  tt_step(run, 1, NULL) == TT_OK && tt_param_get(p, after) == TT_OK);
        }
        double worst = 0;
        for (int k = 0; k < N; k++) {
            const double v = from[k], share = 0.5 * erfc(-v / sqrt(2));
            const double density = exp(-v * v / 2) * 0.3989422804014327;
            const double exact = slope ? share + v * density : v * share;
            const double got = slope ? v - after[k] : result[k];
            /* The slope's error may be larger: f32 rounds the target, and the parameter after the step. */
            const double error = fabs(got - exact) - (slope ? 1.3e-7 + 6e-8 * fabs(v) : 0);
            const double max = fabs(v) > 4 ? 1e-7 * fabs(v) : 3e-7;
            if (!(error / max <= worst)) worst = error / max;
        }
        CHECK(worst <= 1);
        if (!(worst <= 1) || getenv("TINYTRAIN_TEST_VERBOSE")) printf("  %.3f of the error\n", worst);
        tt_program_free(run);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(trains_distilbert_as_the_cpu_does) { compare_with_cpu(false, 0.1f, true); }
TEST(trains_vit_as_the_cpu_does) { compare_with_cpu(true, 0, false); }

/* Training on CUDA, with updates in the host's memory and any other tensors offloaded, agrees with the
   CPU's. */
TEST(trains_with_updates_in_the_hosts_memory)
{
    update = "host";
    compare_with_cpu(false, 0.1f, true);
    offload = "gradients,parameters";
    compare_with_cpu(true, 0, false);
    offload = update = NULL;
}

#ifdef TT_EMULATE
/* The description names the requested device, if the device exists. */
TEST(the_device_that_is_described)
{
    test_allocator a;
    char text[8192];
    emu_configure(2, (size_t)64 << 20, 1, 1);
    emu_set_capability(1, 8, 6);
    tt_context *ctx = test_open(&a);
    CHECK(tt_device_text(ctx, "cuda", text, sizeof text) == TT_OK && strstr(text, "\nused: device 0"));
    CHECK(tt_device_text(ctx, "cuda:1", text, sizeof text) == TT_OK && strstr(text, "\nused: device 1"));
    CHECK(strstr(text, "\ndevice 0: emulated device, compute capability 9.0,") &&
          strstr(text, "\ndevice 1: emulated device, compute capability 8.6,"));
    CHECK(tt_device_text(ctx, "cuda:2", text, sizeof text) == TT_ERR_DEVICE && !strstr(text, "used:"));
    TEST_CLOSE(ctx, &a);
}
#else
TEST(the_device_that_is_described) { NEEDS_EMULATOR; }
#endif
