/* Tests of safetensors: numbers, hostile files, faults while reading and writing. */
#pragma once

/* -------------------------------------------------------------------------------------------- safetensors */

static const char *write_header(const char *path, const char *header, const void *data, size_t data_bytes,
                                int64_t claimed)
{
    uint64_t length = claimed >= 0 ? (uint64_t)claimed : strlen(header);
    size_t n = strlen(header);
    char *file = (char *)malloc(8 + n + data_bytes + 1);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, n);
    if (data_bytes) memcpy(file + 8 + n, data, data_bytes);
    test_write(path, file, 8 + n + data_bytes);
    free(file);
    return path;
}

static tt_tensor_info tensor(const char *name, const char *dtype, int ndim, int64_t d0, int64_t d1)
{
    tt_tensor_info t;
    memset(&t, 0, sizeof t);
    t.name = name;
    t.dtype = dtype;
    t.ndim = ndim;
    t.dims[0] = d0;
    t.dims[1] = d1;
    return t;
}

TEST(safetensors_round_trip)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *path = test_path(test_folder(), "a.safetensors");
    tt_tensor_info t[] = {
        tensor("w", "F32", 2, 3, 5),      tensor("a \"quoted\"\n\\ \xC3\xA9 name", "BF16", 1, 3, 0),
        tensor("none", "F32", 2, 0, 4),   tensor("scalar", "I64", 0, 0, 0),
        tensor("odd", "U8", 1, 70001, 0), tensor("h", "F16", 1, 2, 0),
        tensor("d", "F64", 1, 2, 0)};
    const char *metadata[] = {"format", "pt", "note", "a\tb \"c\"", NULL};
    static unsigned char data[70200];
    uint64_t seed = 5;
    size_t total = 60 + 6 + 0 + 8 + 70001 + 4 + 16, at = 0;
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)test_random(&seed);
    tt_safetensors_writer *w = tt_safetensors_begin(ctx, path, t, TEST_COUNT(t), metadata);
    REQUIRE(w);
    CHECK(access(path, F_OK) != 0);
    for (size_t piece = 1; at < total; at += piece, piece = piece * 3 + 1) {
        if (piece > total - at) piece = total - at;
        CHECK(tt_safetensors_write(w, data + at, piece) == TT_OK);
    }
    CHECK(tt_safetensors_write(w, NULL, 0) == TT_OK);
    CHECK(tt_safetensors_end(w) == TT_OK);
    tt_safetensors *s = tt_safetensors_open(ctx, path);
    REQUIRE(s);
    CHECK(tt_safetensors_count(s) == TEST_COUNT(t));
    at = 0;
    for (int i = 0; i < TEST_COUNT(t); i++) {
        const tt_tensor_info *info = tt_safetensors_info(s, i);
        CHECK(strcmp(info->name, t[i].name) == 0 && strcmp(info->dtype, t[i].dtype) == 0 &&
              info->ndim == t[i].ndim);
        CHECK(memcmp(info->dims, t[i].dims, sizeof info->dims[0] * (size_t)info->ndim) == 0);
        CHECK(tt_safetensors_find(s, t[i].name) == i);
        char *bytes = test_tensor(s, i);
        CHECK(memcmp(bytes, data + at, info->bytes) == 0);
        CHECK(info->bytes < 4 ||
              (tt_safetensors_read(s, i, 2, 2, bytes) == TT_OK && memcmp(bytes, data + at + 2, 2) == 0));
        free(bytes);
        at += info->bytes;
    }
    CHECK(at == total);
    CHECK(s->data % 8 == 0 && s->begin[0] == 0);
    char none[8];
    CHECK(tt_safetensors_read(s, 0, 59, 2, none) == TT_ERR_ARGUMENT &&
          tt_safetensors_read(s, 0, 61, 0, none) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tensor 'w' has 60 bytes, but the call asks for 0 from 61 on");
    CHECK(tt_safetensors_read(s, 0, 60, 0, NULL) == TT_OK &&
          tt_safetensors_read(s, 7, 0, 0, none) == TT_ERR_ARGUMENT);
    CHECK(tt_safetensors_find(s, "x") == -1 && tt_safetensors_find(s, "__metadata__") == -1);
    CHECK(!tt_safetensors_info(s, -1) && !tt_safetensors_info(s, 7));
    CHECK(strcmp(tt_safetensors_metadata(s, "note"), "a\tb \"c\"") == 0 &&
          strcmp(tt_safetensors_metadata(s, "format"), "pt") == 0 && !tt_safetensors_metadata(s, "x"));
    tt_safetensors_close(s);

    /* A second writer makes a file of the same bytes. The file after that has no tensors. */
    size_t n, m;
    char *first = test_read(path, &n);
    w = tt_safetensors_begin(ctx, path, t, TEST_COUNT(t), metadata);
    REQUIRE(w);
    CHECK(tt_safetensors_write(w, data, total) == TT_OK && tt_safetensors_end(w) == TT_OK);
    char *second = test_read(path, &m);
    CHECK(n == m && memcmp(first, second, n) == 0);
    free(first);
    free(second);
    w = tt_safetensors_begin(ctx, path, NULL, 0, NULL);
    REQUIRE(w);
    CHECK(tt_safetensors_end(w) == TT_OK);
    s = tt_safetensors_open(ctx, path);
    REQUIRE(s);
    CHECK(tt_safetensors_count(s) == 0 && tt_safetensors_find(s, "w") == -1 &&
          !tt_safetensors_metadata(s, "format"));
    tt_safetensors_close(s);
    tt_safetensors_close(NULL);
    TEST_CLOSE(ctx, &a);
}

TEST(safetensors_numbers)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *path = test_path(test_folder(), "a.safetensors");
    struct { uint8_t bytes[200]; } data;
    size_t n = 0;
#define PUT(type, ...) \
    do { \
        type v_[] = {__VA_ARGS__}; \
        memcpy(data.bytes + n, v_, sizeof v_); \
        n += sizeof v_; \
    } while (0)
    PUT(uint8_t, 0, 255, 3); /* an odd size, so that later tensors are unaligned */
    PUT(double, 1.5, -2.25, 1e300, HUGE_VAL);
    PUT(float, 1.25f, -0.0f);
    PUT(uint16_t, 0x3F80, 0xFF80);
    PUT(uint16_t, 0x3C00, 0x0001);
    PUT(int64_t, -5, INT32_MAX, (int64_t)INT32_MAX + 1, INT64_MIN, INT32_MIN);
    PUT(int32_t, INT32_MIN, INT32_MAX);
    PUT(int16_t, -32768, 32767);
    PUT(int8_t, -128, 127);
    PUT(uint8_t, 0, 2);
    PUT(uint32_t, 7, 0x80000000u);
    PUT(uint8_t, 1);
#undef PUT
    tt_tensor_info t[] = {tensor("u8", "U8", 1, 3, 0),   tensor("f64", "F64", 1, 4, 0),
                          tensor("f32", "F32", 1, 2, 0), tensor("bf16", "BF16", 2, 2, 1),
                          tensor("f16", "F16", 1, 2, 0), tensor("i64", "I64", 1, 5, 0),
                          tensor("i32", "I32", 1, 2, 0), tensor("i16", "I16", 1, 2, 0),
                          tensor("i8", "I8", 1, 2, 0),   tensor("bool", "BOOL", 1, 2, 0),
                          tensor("u32", "U32", 1, 2, 0), tensor("f8", "F8_E4M3", 1, 1, 0)};
    tt_safetensors_writer *w = tt_safetensors_begin(ctx, path, t, TEST_COUNT(t), NULL);
    REQUIRE(w);
    CHECK(tt_safetensors_write(w, data.bytes, n) == TT_OK && tt_safetensors_end(w) == TT_OK);
    tt_safetensors *s = tt_safetensors_open(ctx, path);
    REQUIRE(s);
    float f[5];
    int32_t v[5];
    CHECK(tt_safetensors_read_f32(s, 1, 0, 2, f) == TT_OK && f[0] == 1.5f && f[1] == -2.25f);
    CHECK(tt_safetensors_read_f32(s, 1, 3, 1, f) == TT_OK && isinf(f[0]));
    CHECK(tt_safetensors_read_f32(s, 1, 0, 4, f) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "tensor 'f64' has 1e+300 at element 2");
    CHECK(tt_safetensors_read_f32(s, 2, 0, 2, f) == TT_OK && f[0] == 1.25f && f[1] == 0 && signbit(f[1]));
    CHECK(tt_safetensors_read_f32(s, 2, 1, 1, f) == TT_OK && signbit(f[0]));
    CHECK(tt_safetensors_read_f32(s, 3, 0, 2, f) == TT_OK && f[0] == 1 && isinf(f[1]) && f[1] < 0);
    CHECK(tt_safetensors_read_f32(s, 4, 0, 2, f) == TT_OK && f[0] == 1 && f[1] == 0x1p-24f);
    CHECK(tt_safetensors_read_i32(s, 0, 0, 3, v) == TT_OK && v[0] == 0 && v[1] == 255 && v[2] == 3);
    CHECK(tt_safetensors_read_i32(s, 5, 0, 2, v) == TT_OK && v[0] == -5 && v[1] == INT32_MAX);
    CHECK(tt_safetensors_read_i32(s, 5, 4, 1, v) == TT_OK && v[0] == INT32_MIN);
    CHECK(tt_safetensors_read_i32(s, 5, 2, 1, v) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "'i64' has 2147483648 at element 2");
    CHECK(tt_safetensors_read_i32(s, 5, 3, 1, v) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "has -9223372036854775808");
    CHECK(tt_safetensors_read_i32(s, 6, 0, 2, v) == TT_OK && v[0] == INT32_MIN && v[1] == INT32_MAX);
    CHECK(tt_safetensors_read_i32(s, 7, 0, 2, v) == TT_OK && v[0] == -32768 && v[1] == 32767);
    CHECK(tt_safetensors_read_i32(s, 8, 0, 2, v) == TT_OK && v[0] == -128 && v[1] == 127);
    CHECK(tt_safetensors_read_i32(s, 9, 0, 2, v) == TT_OK && v[0] == 0 && v[1] == 1);
    CHECK(tt_safetensors_read_i32(s, 10, 0, 1, v) == TT_OK && v[0] == 7 &&
          tt_safetensors_read_i32(s, 10, 1, 1, v) == TT_ERR_FORMAT);
    CHECK(tt_safetensors_read_i32(s, 2, 0, 1, v) == TT_ERR_UNSUPPORTED &&
          tt_safetensors_read_f32(s, 0, 0, 1, f) == TT_ERR_UNSUPPORTED);
    CHECK(tt_safetensors_read_f32(s, 11, 0, 1, f) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "tensor 'f8' is F8_E4M3");
    CHECK(tt_safetensors_read_f32(s, 2, 0, 0, f) == TT_OK && tt_safetensors_read_f32(s, 2, 2, 0, f) == TT_OK);
    CHECK(tt_safetensors_read_f32(s, 2, 1, 2, f) == TT_ERR_ARGUMENT &&
          tt_safetensors_read_f32(s, 2, -1, 1, f) == TT_ERR_ARGUMENT);
    CHECK(tt_safetensors_read_f32(s, 2, 0, -1, f) == TT_ERR_ARGUMENT &&
          tt_safetensors_read_f32(s, 2, INT64_MAX, INT64_MAX, f) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tensor 'f32' has 2 elements");
    CHECK(tt_safetensors_read_f32(s, 99, 0, 1, f) == TT_ERR_ARGUMENT);
    tt_safetensors_close(s);
    TEST_CLOSE(ctx, &a);
}

#define T_(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

TEST(safetensors_hostile)
{
    static const struct { const char *header; int data; const char *error; } bad[] = {
        {"{" T_("a", "F32", "[2]", 0, 8) "}", 9, "1 bytes after the last tensor"},
        {"{" T_("a", "F32", "[2]", 0, 8) "}", 7,
         "tensor 'a' is in bytes [0, 8) of the data, but the file has only 7"},
        {"{" T_("a", "F32", "[2]", 0, 4) "}", 4, "has 4 bytes of data, but its dtype F32 and shape need 8"},
        {"{" T_("a", "F32", "[2]", 0, 8) "," T_("b", "F32", "[2]", 4, 12) "}", 12,
         "tensor 'b' starts at byte 4 of the data, but overlaps 'a', which ends at 8"},
        {"{" T_("a", "F32", "[2]", 0, 8) "," T_("b", "F32", "[2]", 0, 8) "}", 8,
         "starts at byte 0 of the data, but overlaps"},
        {"{" T_("a", "F32", "[2]", 0, 8) "," T_("b", "F32", "[2]", 12, 20) "}", 20,
         "tensor 'b' starts at byte 12 of the data, but must start at 8, where the tensor before it ends"},
        {"{" T_("a", "F32", "[1]", 4, 8) "}", 8, "but must start at 0"},
        {"{" T_("a", "F32", "[2]", 0, 8) "," T_("e", "F32", "[0]", 4, 4) "}", 8,
         "tensor 'e' starts at byte 4"},
        {"{" T_("a", "F32", "[2]", 0, 8) "," T_("a", "F32", "[2]", 8, 16) "}", 16,
         "the key \"a\" is twice"},
        {"{" T_("a", "F31", "[2]", 0, 8) "}", 8, "tensor 'a' has the dtype F31"},
        {"{" T_("a", "f32", "[2]", 0, 8) "}", 8, "has the dtype f32"},
        {"{" T_("a", "F32", "[-2]", 0, 8) "}", 8, "has a dimension that is not an integer >= 0"},
        {"{" T_("a", "F32", "[2.0]", 0, 8) "}", 8, "has a dimension"},
        {"{" T_("a", "F32", "[\"2\"]", 0, 8) "}", 8, "has a dimension"},
        {"{" T_("a", "F32", "[[2]]", 0, 8) "}", 8, "has a dimension"},
        {"{" T_("a", "F32", "2", 0, 8) "}", 8, "has a number as \"shape\""},
        {"{" T_("a", "F32", "[1,1,1,1,1,1,1,1,2]", 0, 8) "}", 8, "has 9 dimensions, but at most 8"},
        {"{" T_("a", "F32", "[4611686018427387904]", 0, 0) "}", 0, "whose size overflows"},
        {"{" T_("a", "F32", "[4294967296,4294967296]", 0, 0) "}", 0, "whose size overflows"},
        {"{" T_("a", "F32", "[4294967296,4294967296,0]", 0, 0) "}", 0, "whose size overflows"},
        {"{" T_("a", "F32", "[9223372036854775808]", 0, 0) "}", 0, "has a dimension"},
        {"{" T_("a", "F4", "[3]", 0, 2) "}", 2, "not a whole number"},
        {"{" T_("a", "F32", "[2]", 8, 0) "}", 8, "is in bytes [8, 0)"},
        {"{" T_("a", "F32", "[2]", -8, 0) "}", 8, "is in bytes [-8, 0)"},
        {"{" T_("a", "F32", "[0]", 9223372036854775807, 9223372036854775807) "}", 8, "is in bytes"},
        {"{" T_("a", "F32", "[2]", 0, 8.0) "}", 8, "not an array of two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4,8]}}", 8,
         "not an array of two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "not an array of two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[[0,8],8]}}", 8,
         "not an array of two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":{}}}", 8, "not an array of two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "tensor 'a' has no \"data_offsets\""},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "has no \"shape\""},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "has no \"dtype\""},
        {"{\"a\":{\"dtype\":3,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "has the dtype a number"},
        {"{\"a\":[1]}", 0, "byte 13: tensor 'a' "},
        {"{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1,
         "has a NUL byte in its name"},
        {"{\"__metadata__\":3}", 0, "\"__metadata__\" is a number; expected an object of strings"},
        {"{\"__metadata__\":{\"k\":3}}", 0, "\"k\" is a number; expected a string"},
        {" {}", 0, "does not start with '{'"}, {"[]", 0, "does not start with '{'"},
        {"{}x", 0, "byte 10: not valid JSON: expected the end"}, {"{", 0, "does not start with '{'"},
        {"", 0, "does not start with '{'"},
        {"{}", 1, "1 bytes after the last tensor"},
        {"{\"a\":", 0, "byte 13: not valid JSON"},};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *path = test_path(test_folder(), "bad.safetensors"), data[32] = {0};
    for (int i = 0; i < TEST_COUNT(bad); i++) {
        write_header(path, bad[i].header, data, (size_t)bad[i].data, -1);
        CHECK(tt_safetensors_open(ctx, path) == NULL);
        CHECK_ERROR(ctx, TT_ERR_FORMAT, bad[i].error);
        CHECK_ERROR(ctx, TT_ERR_FORMAT, "bad.safetensors");
    }
    static const struct { int64_t length; const char *error; } lengths[] = {
        {100000001, "the header has 100000001 bytes, but the format allows 100000000"},
        {INT64_MAX, "the format allows"}, {99999999, "but the file has only"}, {0, "does not start with"},
        {1, "does not start"}, {1000, "truncated"}};
    for (int i = 0; i < TEST_COUNT(lengths); i++) {
        CHECK(tt_safetensors_open(ctx, write_header(path, "{}", data, 0, lengths[i].length)) == NULL);
        CHECK_ERROR(ctx, TT_ERR_FORMAT, lengths[i].error);
    }
    CHECK(tt_safetensors_open(ctx, test_write(path, "", 0)) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "has 0 bytes");
    CHECK(tt_safetensors_open(ctx, "/nonexistent/x.safetensors") == NULL);
    CHECK_ERROR(ctx, TT_ERR_FILE, "cannot open '/nonexistent/x.safetensors'");

    /* Keys and offsets may be in any order. Empty tensors between other tensors, trailing spaces and unknown
       keys are allowed. */
    write_header(path,
                 "{" T_("z", "F32", "[1]", 4, 8) "," T_("e", "F32", "[5,0]", 4, 4) ","
                 T_("a", "F4", "[8]", 0, 4) ",\"__metadata__\":{}}   ", data, 8, -1);
    tt_safetensors *s = tt_safetensors_open(ctx, path);
    REQUIRE(s);
    CHECK(tt_safetensors_count(s) == 3 && tt_safetensors_find(s, "a") == 2 &&
          tt_safetensors_find(s, "e") == 1);
    CHECK(s->begin[0] - s->begin[2] == 4);
    tt_safetensors_close(s);
    s = tt_safetensors_open(ctx, write_header(path, "{}", data, 0, -1)); /* the file has no tensor */
    REQUIRE(s);
    CHECK(tt_safetensors_count(s) == 0 && tt_safetensors_find(s, "a") == -1);
    CHECK(!tt_safetensors_metadata(s, "format"));
    tt_safetensors_close(s);
    TEST_CLOSE(ctx, &a);
}

TEST(safetensors_null_metadata) /* null means no metadata, as in the library safetensors */
{
    static const char header[] = "{\"__metadata__\":null," T_("a", "U8", "[2]", 0, 2) "}";
    char file[200] = {0};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    file[0] = (char)(sizeof header - 1);
    memcpy(file + 8, header, sizeof header - 1);
    const char *path = test_write(test_path(test_folder(), "a.safetensors"), file, 8 + sizeof header - 1 + 2);
    tt_safetensors *s = tt_safetensors_open(ctx, path);
    REQUIRE(s);
    CHECK(tt_safetensors_count(s) == 1 && tt_safetensors_find(s, "a") == 0);
    CHECK(!tt_safetensors_metadata(s, "format") && tt_safetensors_find(s, "__metadata__") == -1);
    tt_safetensors_close(s);
    TEST_CLOSE(ctx, &a);
}

TEST(safetensors_truncated) /* a file that is cut off after any of its bytes does not open */
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *folder = test_folder(), *path = test_path(folder, "whole"), *cut = test_path(folder, "cut");
    size_t n;
    write_header(path, "{" T_("a", "F32", "[2]", 0, 8) "," T_("b", "I8", "[3]", 8, 11) "}", "0123456789a", 11,
                 -1);
    char *bytes = test_read(path, &n);
    for (size_t i = 0; i <= n; i++) {
        tt_safetensors *s = tt_safetensors_open(ctx, test_write(cut, bytes, i));
        CHECK((s != NULL) == (i == n));
        tt_safetensors_close(s);
    }
    free(bytes);
    TEST_CLOSE(ctx, &a);
}

/* Another program cuts the file off: the read fails, and the error says where. */
TEST(safetensors_cut_off_while_read)
{
    enum { N = 50000 };
    static const char header[] = "{" T_("w", "F32", "[50000]", 0, 200000) ","
                                 T_("h", "BF16", "[50000]", 200000, 300000) ","
                                 T_("i", "I16", "[50000]", 300000, 400000) "}";
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char path[700], said[64];
    char *data = (char *)calloc(1, 400000);
    float *to = (float *)malloc(N * sizeof *to);
    int32_t *integers = (int32_t *)malloc(N * sizeof *integers);
    for (int i = 0; i < N; i++) { float x = (float)i; memcpy(data + 4 * i, &x, 4); }
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "cut"));
    write_header(path, header, data, 400000, -1);
    int64_t begin = 8 + (int64_t)strlen(header),
            cuts[] = {begin + 399999, begin + 200001, begin + 100000, begin, 3, 0};
    tt_safetensors *s = tt_safetensors_open(ctx, path);
    REQUIRE(s);
    CHECK(tt_safetensors_read_f32(s, 0, 0, N, to) == TT_OK && to[N - 1] == N - 1);
    for (int k = 0; k < TEST_COUNT(cuts); k++) {
        REQUIRE(truncate(path, (off_t)cuts[k]) == 0);
        int64_t left = cuts[k] - begin;
        tt_status status[] = {tt_safetensors_read_f32(s, 0, 0, N, to),
                              tt_safetensors_read_f32(s, 1, 0, N, to),
                              tt_safetensors_read_i32(s, 2, 0, N, integers)};
        CHECK((status[0] == TT_OK) == (left >= 200000) && (status[1] == TT_OK) == (left >= 300000));
        CHECK(status[2] == TT_ERR_FILE);
        snprintf(said, sizeof said, "cut', byte %lld: the file ends here, but", (long long)cuts[k]);
        CHECK_ERROR(ctx, TT_ERR_FILE, said);
        if (left >= 100000) /* the remaining bytes can be read */
            CHECK(tt_safetensors_read_f32(s, 0, 24990, 10, to) == TT_OK && to[9] == 24999);
    }
    write_header(path, header, data, 400000, -1); /* writes the whole file again */
    CHECK(tt_safetensors_read_f32(s, 0, 0, N, to) == TT_OK && to[N - 1] == N - 1);
    tt_safetensors_close(s);
    free(integers);
    free(to);
    free(data);
    TEST_CLOSE(ctx, &a);
}

#ifndef _WIN32
/* A pipe without a writer is refused at once; the alarm ends a test that waits for a writer. */
TEST(a_pipe_is_refused)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *pipe_path = test_path(test_folder(), "pipe");
    REQUIRE(mkfifo(pipe_path, 0600) == 0);
    alarm(20);
    CHECK(!tt_safetensors_open(ctx, pipe_path));
    CHECK_ERROR(ctx, TT_ERR_FILE, "pipe': it is a pipe or a device");
    CHECK(!tt_tokenizer_open(ctx, pipe_path, true));
    CHECK_ERROR(ctx, TT_ERR_FILE, "pipe': it is a pipe or a device");
    CHECK(!tt_tokenizer_open(ctx, "/dev/null", true));
    CHECK_ERROR(ctx, TT_ERR_FILE, "'/dev/null': it is a pipe or a device");
    alarm(0);
    TEST_CLOSE(ctx, &a);
}
#else
TEST(a_pipe_is_refused) { SKIP("Windows has no pipes with paths"); }
#endif

TEST(safetensors_writer_errors)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *path = test_path(test_folder(), "a.safetensors"), *tmp;
    tt_tensor_info t[] = {tensor("a", "F32", 1, 2, 0), tensor("b", "F32", 1, 2, 0)};
    tt_safetensors_writer *w;
    char data[64] = {0};
    size_t n;
    test_write(path, "old", 3);

    w = tt_safetensors_begin(ctx, path, t, 2, NULL);
    REQUIRE(w);
    CHECK(tt_safetensors_write(w, data, 9) == TT_OK && tt_safetensors_end(w) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "is 7 bytes short, because tensor 'b' (2 of 2) lacks 7 of its bytes");
    w = tt_safetensors_begin(ctx, path, t, 2, NULL);
    REQUIRE(w);
    CHECK(tt_safetensors_write(w, data, 17) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "1 bytes more than the 16");
    CHECK(tt_safetensors_write(w, data, 16) == TT_ERR_ARGUMENT && tt_safetensors_end(w) == TT_ERR_ARGUMENT);
    char *old = test_read(path, &n);
    CHECK(n == 3 && memcmp(old, "old", 3) == 0);
    free(old);
    tmp = test_path(path, "");
    CHECK(tmp != NULL);

    tt_tensor_info bad[2] = {t[0], t[0]};
    CHECK(!tt_safetensors_begin(ctx, path, bad, 2, NULL));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "two tensors are named 'a'");
    bad[1] = tensor("x", "F33", 1, 1, 0);
    CHECK(!tt_safetensors_begin(ctx, path, bad, 2, NULL));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tensor 'x' has the dtype 'F33'");
    bad[1] = tensor("x", "F32", 1, -1, 0);
    CHECK(!tt_safetensors_begin(ctx, path, bad, 2, NULL));
    bad[1] = tensor("x", "F32", 2, INT64_MAX, INT64_MAX);
    CHECK(!tt_safetensors_begin(ctx, path, bad, 2, NULL));
    bad[1] = tensor("x", "F32", 9, 1, 1);
    CHECK(!tt_safetensors_begin(ctx, path, bad, 2, NULL));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "expected 0 to 8 dimensions");
    bad[1] = tensor("__metadata__", "F32", 1, 1, 0);
    CHECK(!tt_safetensors_begin(ctx, path, bad, 2, NULL));
    bad[1] = tensor("\xFF", "F32", 1, 1, 0);
    CHECK(!tt_safetensors_begin(ctx, path, bad, 2, NULL));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tensor 1 of 2 has no usable name");
    static const char *const odd[] = {"k", NULL}, *const twice[] = {"k", "1", "k", "2", NULL};
    CHECK(!tt_safetensors_begin(ctx, path, t, 2, odd) && !tt_safetensors_begin(ctx, path, t, 2, twice));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "\"k\" is given twice");
    CHECK(!tt_safetensors_begin(ctx, "/nonexistent/x", t, 2, NULL));
    CHECK_ERROR(ctx, TT_ERR_FILE, "/nonexistent/x");
    TEST_CLOSE(ctx, &a);
}

/* Each file operation fails once: there is an error, the old file is whole, and no temporary file is left. */
TEST(safetensors_write_faults)
{
    tt_tensor_info t = tensor("a", "U8", 1, 40000, 0);
    static const char ops[] = "owscn";
    static char data[40000];
    for (const char *op = ops; *op; op++) {
        for (long at = 1; at < 10; at++) {
            test_allocator a;
            test_files f;
            tt_context_options o = test_options(&a);
            const char *folder = test_folder(), *path = test_path(folder, "a.safetensors");
            size_t n;
            o.files = test_failing_files(&f, *op, at);
            test_write(path, "old", 3);
            tt_context *ctx = tt_open(&o);
            tt_safetensors_writer *w = tt_safetensors_begin(ctx, path, &t, 1, NULL);
            tt_status status = w ? tt_safetensors_write(w, data, sizeof data / 2) : TT_ERR_FILE;
            if (status == TT_OK) status = tt_safetensors_write(w, data, sizeof data / 2);
            if (w) status = tt_safetensors_end(w);
            bool failed = f.calls >= at;
            char *now = test_read(path, &n);
            CHECK(failed == (status != TT_OK));
            if (failed) {
                CHECK_ERROR(ctx, TT_ERR_FILE, "injected");
                CHECK(n == 3 && memcmp(now, "old", 3) == 0);
            } else CHECK(n > 40000);
            free(now);
            CHECK(access(test_path(folder, "a.safetensors.tmp"), F_OK) != 0);
            TEST_CLOSE(ctx, &a);
            if (!failed) break;
        }
    }
}

TEST(safetensors_many) /* 20,000 tensors, in reverse order of their offsets */
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *path = test_path(test_folder(), "many.safetensors");
    enum { N = 20000 };
    size_t capacity = N * 90, n = 0;
    char *header = (char *)malloc(capacity), *data = (char *)calloc(N, 1), name[32];
    for (int i = 0; i < N; i++)
        n += (size_t)snprintf(header + n, capacity - n,
                              "%s\"t%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                              i ? "," : "{", i, N - 1 - i, N - i);
    snprintf(header + n, capacity - n, "}");
    tt_safetensors *s = tt_safetensors_open(ctx, write_header(path, header, data, N, -1));
    free(header);
    free(data);
    REQUIRE(s);
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "t%d", i);
        CHECK(tt_safetensors_find(s, name) == i);
    }
    tt_safetensors_close(s);
    TEST_CLOSE(ctx, &a);
}
