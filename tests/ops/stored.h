/* Tests of matrices that are stored in few bits (tt_param_store): formats, products, plans and errors. */
#pragma once

enum { STORED_ROWS = 160, STORED_COLS = 128, STORED_SIZE = STORED_ROWS * STORED_COLS };
static const char *const stored_formats[] = {"int8", "nf4", "int4"};

/* Computes the matrix x of tests/golden/make_few_bits.py. */
static void stored_matrix(float *x)
{
    uint32_t u = 1;
    for (int k = 0; k < STORED_SIZE; k++) {
        int total = -766;
        for (int t = 0; t < 3; t++) total += (int)((u = u * 1664525u + 1013904223u) >> 23);
        x[k] = (float)total / (float)(1 << (8 + k / STORED_COLS % 5));
    }
}

/* Returns a tensor of the golden file; the caller frees it. */
static void *stored_golden(tt_safetensors *file, const char *name, size_t bytes)
{
    void *data = malloc(bytes);
    const int k = tt_safetensors_find(file, name);
    CHECK(k >= 0 && tt_safetensors_info(file, k)->bytes == bytes);
    CHECK(tt_safetensors_read(file, k, 0, bytes, data) == TT_OK);
    return data;
}

/* Compares n floats; the bits may differ by `units` units in the last place. */
static int floats_apart(const float *a, const float *b, int n, int units)
{
    int apart = 0;
    for (int k = 0; k < n; k++)
        apart += abs((int)(int32_t)(tt__bits(a[k]) - tt__bits(b[k]))) > units;
    return apart;
}

static void encode_stored(tt_dtype form, const float *x, uint8_t *to)
{
    float absmax[STORED_SIZE / TT__NF4_BLOCK];
    const tt__coding c = {form, STORED_ROWS, STORED_COLS, to, absmax};
    memset(to, 0, tt__matrix_bytes(form, STORED_ROWS, STORED_COLS));
    for (int r = 0; r < STORED_ROWS; r++) CHECK(tt__encode_row(&c, r, x + r * STORED_COLS));
    tt__encode_end(&c);
}

/* Codes and scales equal those of bitsandbytes and of llama.cpp's gguf; scales of NF4 may differ by 1 unit,
   because their mean is summed in another order. Codes of bitsandbytes widen to the same bits. */
TEST(formats_of_stored_weights)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_safetensors *file = tt_safetensors_open(ctx, "tests/golden/few_bits.safetensors");
    static float x[STORED_SIZE], wide[STORED_SIZE];
    static uint8_t coded[STORED_SIZE * 2];
    CHECK(file != NULL);
    if (!file) return;
    stored_matrix(x);
    const int blocks = STORED_SIZE / TT__NF4_BLOCK, nested = 2, half = STORED_SIZE / 2;

    tt__coded_parts p = tt__coded_parts_of(TT__INT8, STORED_ROWS, STORED_COLS);
    encode_stored(TT__INT8, x, coded);
    uint8_t *bytes = (uint8_t *)stored_golden(file, "int8", STORED_SIZE);
    float *floats = (float *)stored_golden(file, "int8.scales", STORED_ROWS * sizeof(float));
    CHECK(memcmp(bytes, coded, STORED_SIZE) == 0);
    CHECK(memcmp(floats, coded + p.scales, STORED_ROWS * sizeof(float)) == 0);
    tt__codes c = tt__codes_at(coded, TT__INT8, STORED_ROWS, STORED_COLS);
    tt__widen_codes(wide, &c, 0, STORED_SIZE);
    for (int k = 0; k < STORED_SIZE; k++) {
        const double exact = (int8_t)bytes[k] * (double)floats[k / STORED_COLS] / 127;
        if (!(fabs(wide[k] - exact) <= 2e-7 * fabs(exact))) CHECK(false);
        if (!(fabs(wide[k] - x[k]) <= floats[k / STORED_COLS] / 253)) CHECK(false);
    }
    free(bytes);
    free(floats);

    p = tt__coded_parts_of(TT__NF4, STORED_ROWS, STORED_COLS);
    encode_stored(TT__NF4, x, coded);
    bytes = (uint8_t *)stored_golden(file, "nf4", (size_t)half);
    uint8_t *scales = (uint8_t *)stored_golden(file, "nf4.scales", (size_t)blocks);
    floats = (float *)stored_golden(file, "nf4.nested", nested * sizeof(float));
    float *offset = (float *)stored_golden(file, "nf4.offset", sizeof(float));
    float *map = (float *)stored_golden(file, "nf4.map", 256 * sizeof(float));
    float *numbers = (float *)stored_golden(file, "nf4.numbers", 16 * sizeof(float));
    float *expected = (float *)stored_golden(file, "nf4.wide", STORED_SIZE * sizeof(float));
    CHECK(memcmp(bytes, coded, (size_t)half) == 0);
    for (int k = 0; k < blocks; k++) CHECK(abs(scales[k] - coded[p.scales + k]) <= 1);
    CHECK(floats_apart(floats, (const float *)(const void *)(coded + p.nested), nested, 4) == 0);
    CHECK(floats_apart(offset, (const float *)(const void *)(coded + p.offset), 1, 1) == 0);
    CHECK(memcmp(map, coded + p.map, 256 * sizeof(float)) == 0);
    CHECK(memcmp(numbers, tt__nf4_numbers, sizeof tt__nf4_numbers) == 0);
    memcpy(coded, bytes, (size_t)half);
    memcpy(coded + p.scales, scales, (size_t)blocks);
    memcpy(coded + p.nested, floats, nested * sizeof(float));
    memcpy(coded + p.offset, offset, sizeof(float));
    c = tt__codes_at(coded, TT__NF4, STORED_ROWS, STORED_COLS);
    tt__widen_codes(wide, &c, 0, STORED_SIZE);
    CHECK(memcmp(wide, expected, sizeof wide) == 0);
    free(bytes);
    free(scales);
    free(floats);
    free(offset);
    free(map);
    free(numbers);
    free(expected);

    p = tt__coded_parts_of(TT__INT4, STORED_ROWS, STORED_COLS);
    encode_stored(TT__INT4, x, coded);
    bytes = (uint8_t *)stored_golden(file, "q4_0", STORED_SIZE / TT__INT4_GROUP * 18);
    expected = (float *)stored_golden(file, "q4_0.wide", STORED_SIZE * sizeof(float));
    for (int b = 0; b < STORED_SIZE / TT__INT4_GROUP; b++) {
        CHECK(memcmp(bytes + b * 18, coded + p.scales + b * 2, 2) == 0);
        for (int k = 0; k < TT__INT4_GROUP; k++) { /* q4_0 has elements k and k + 16 in a byte */
            const int at = b * TT__INT4_GROUP + k, theirs = bytes[b * 18 + 2 + k % 16] >> (k / 16 * 4) & 15;
            if (theirs != (coded[at / 2] >> (at % 2 ? 0 : 4) & 15)) CHECK(false);
        }
    }
    c = tt__codes_at(coded, TT__INT4, STORED_ROWS, STORED_COLS);
    tt__widen_codes(wide, &c, 0, STORED_SIZE);
    CHECK(memcmp(wide, expected, sizeof wide) == 0);
    free(bytes);
    free(expected);
    tt_safetensors_close(file);
    TEST_CLOSE(ctx, &a);
}

/* Whether n numbers are equal, bit for bit. A CBLAS, which computes products with f32 weights only, rounds in
   its own ways. */
static bool stored_equal(const float *a, const float *b, size_t n)
{
#ifdef TINYTRAIN_CBLAS
    float most = 0;
    bool equal = true;
    for (size_t k = 0; k < n; k++) most = fmaxf(most, fabsf(b[k]));
    for (size_t k = 0; k < n; k++)
        if (!(fabsf(a[k] - b[k]) <= 1e-5f * most)) equal = false;
    return equal;
#else
    return memcmp(a, b, n * sizeof(float)) == 0;
#endif
}

/* Records y = x w^T and its gradient to x, runs them with w in `format` and with f32 weights that have the
   widened numbers, and compares the results. */
static void compare_stored(const char *isa, const char *format, int rows, int out, int cols,
                           const char *device, const char *offload)
{
    tt_context_options co = tt_context_options_default();
    co.threads = 2;
    co.logger.log = test__no_log;
    tt_context *ctx = open_isa(co, isa);
    const tt_value none = {0, 0};
    const size_t n = (size_t)(out * cols), of_x = (size_t)(rows * cols), of_y = (size_t)(rows * out);
    float *w = (float *)malloc(n * 4), *x = (float *)malloc(of_x * 4), *back[2], *y[2];
    uint64_t random = (uint64_t)(rows + out);
    for (size_t k = 0; k < of_x; k++) x[k] = (float)test_random(&random) / 2147483648.0f - 1;
    for (size_t k = 0; k < n; k++) w[k] = (float)test_random(&random) / 2147483648.0f - 1;
    for (int wide = 0; wide < 2; wide++) {
        const int64_t dims[2] = {out, cols}, of_x_dims[2] = {rows, cols};
        const tt_init zeros = {TT_INIT_ZEROS, 0};
        char name[2][8];
        snprintf(name[0], sizeof name[0], "w%d", wide);
        snprintf(name[1], sizeof name[1], "x%d", wide);
        tt_param *p = tt_param_new(ctx, name[0], 2, dims, zeros);
        tt_param *px = tt_param_new(ctx, name[1], 2, of_x_dims, zeros);
        tt_param_freeze(ctx, name[0], true);
        CHECK(wide || tt_param_store(p, format) == TT_OK);
        CHECK(tt_param_set(p, w) == TT_OK && tt_param_set(px, x) == TT_OK);
        tt_tape *t = tt_tape_new(ctx);
        tt_value v = tt_linear(t, tt_param_value(t, px), p, NULL);
        tt_value target = tt_input(t, "t", TT_F32, rows, out);
        tt_output(t, v);
        tt_compile_options o = tt_compile_options_default();
        o.accumulate = true;
        o.device = device;
        o.offload = offload;
        tt_program *q = tt_compile(t, tt_mean_squared_error(t, v, target, none), &o);
        if (!q) fprintf(stderr, "%s\n", tt_error(ctx));
        CHECK(q != NULL);
        if (!q) return;
        y[wide] = (float *)calloc(of_y, 4);
        back[wide] = (float *)calloc(of_x, 4);
        CHECK(tt_set(q, target, y[wide], rows) == TT_OK && tt_micro_step(q, NULL) == TT_OK);
        CHECK(tt_get(q, v, y[wide], of_y) == TT_OK && tt_get_gradient(q, px, back[wide]) == TT_OK);
        if (!wide) CHECK(tt_param_get(p, w) == TT_OK);
        tt_program_free(q);
        tt_tape_free(t);
    }
    snprintf(where, sizeof where, "%s, %s, %d rows of %d to %d", format, isa, rows, cols, out);
    report(stored_equal(y[0], y[1], of_y), "the results differ");
    report(stored_equal(back[0], back[1], of_x), "the gradients differ");
    for (int k = 0; k < 2; k++) { free(y[k]); free(back[k]); }
    free(w);
    free(x);
    tt_close(ctx);
}

/* A product with a stored weight has the bits of the product with the widened weight, forward and backward,
   with few and many rows, and with the weight in the host's memory. */
TEST(stored_products_equal_widened)
{
    static const char *const isas[] = {"portable", "avx2", "avx512", "neon"};
    static const int shapes[][3] = {{1, 130, 1472}, {3, 100, 192}, {24, 65, 320}, {25, 50, 64},
                                    {70, 130, 1664}, {30, 97, 1152}};
    for (int i = 0; i < 4; i++)
        for (int f = 0; f < 3; f++)
            for (int s = 0; s < TEST_COUNT(shapes); s++)
                if (has_isa(isas[i])) compare_stored(isas[i], stored_formats[f], shapes[s][0], shapes[s][1],
                                                     shapes[s][2], "cpu", NULL);
    compare_stored("portable", "int8", 5, 7, 37, "cpu", NULL);
    compare_stored("portable", "nf4", 5, 300, 256, "cpu", "parameters");
}

/* tt_param_store and tt_compile refuse what a stored matrix cannot be. */
TEST(stored_weights_refused)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const int64_t dims[2] = {8, 96};
    const tt_value none = {0, 0};
    const tt_init ones = {TT_INIT_ONES, 0};
    tt_param *w = tt_param_new(ctx, "w", 2, dims, ones), *b = tt_param_new(ctx, "b", 1, dims, ones);
    CHECK(tt_param_store(w, "nf4") == TT_ERR_SHAPE);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "'w' has rows of 96 numbers, but nf4 needs a multiple of 64");
    CHECK(tt_param_store(w, "fp4") == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "'fp4' is unknown: use int8, nf4 or int4");
    CHECK(tt_param_store(b, "int8") == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "'b' is a vector");
    tt_tape *t = tt_tape_new(ctx), *late = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, 3, 96), target = tt_input(t, "t", TT_F32, 3, 8);
    tt_compile_options o = tt_compile_options_default();
    tt_value z = tt_linear(late, tt_input(late, "x", TT_F32, 3, 96), w, NULL);
    CHECK(tt_param_store(w, "int4") == TT_OK);
    o.train = false;
    CHECK(tt_compile(late, z, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "read parameter 'w' before tt_param_store");
    tt_value loss = tt_mean_squared_error(t, tt_linear(t, x, w, NULL), target, none);
    o.train = true;
    CHECK(tt_compile(t, loss, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "'w' is stored as int4, so it cannot be trained");
    tt_tape *bad = tt_tape_new(ctx);
    tt_embedding(bad, tt_input(bad, "i", TT_I32, 3, 1), w);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "'w' int4 (8, 96), expected a float dtype");
    tt_tape *product = tt_tape_new(ctx);
    tt_matmul(product, tt_input(product, "x", TT_F32, 3, 96), tt_param_value(product, w), NULL);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "'w' int4 (8, 96), expected a float dtype");
    tt_param_freeze(ctx, "w", true);
    o.train = false;
    tt_program *p = tt_compile(t, loss, &o);
    CHECK(p && tt_param_store(w, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "a program has the parameter 'w' already");
    float values[8 * 96] = {0};
    CHECK(tt_allocate(p) == TT_OK);
    values[100] = INFINITY;
    CHECK(tt_param_set(w, values) == TT_ERR_NUMERIC);
    CHECK_ERROR(ctx, TT_ERR_NUMERIC, "'w': row 1 has a number that is not finite");
    tt_program_free(p);
    tt_tape_free(t);
    tt_tape_free(late);
    tt_tape_free(bad);
    tt_tape_free(product);
    TEST_CLOSE(ctx, &a);
}

/* A plan counts a stored matrix to the byte: the parameters of a program are the sum of all storages. */
TEST(stored_weights_are_counted)
{
    for (int f = 0; f < 3; f++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        const int64_t dims[2] = {512, 1024};
        const tt_init some = {TT_INIT_UNIFORM, 0.5f};
        tt_param *w = tt_param_new(ctx, "w", 2, dims, some);
        tt_param_freeze(ctx, "w", true);
        CHECK(tt_param_store(w, stored_formats[f]) == TT_OK);
        tt_tape *t = tt_tape_new(ctx);
        tt_value y = tt_linear(t, tt_input(t, "x", TT_F32, 2, 1024), w, NULL);
        tt_compile_options o = tt_compile_options_default();
        o.train = false;
        tt_program *p = tt_compile(t, y, &o);
        tt_plan plan = tt_program_plan(p);
        const size_t before = ctx->allocated, n = 512 * 1024;
        const size_t bytes = f == 0 ? n + 512 * 4 : f == 1 ? n / 2 + n / 64 + 32 * 4 + 4 + 1024
            : n / 2 + n / 16;
        CHECK(plan.at_peak[TT_MEM_PARAMETERS] == tt__align_up(bytes));
        CHECK(tt_allocate(p) == TT_OK);
        CHECK(ctx->allocated - before < plan.bytes + 4096);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}
