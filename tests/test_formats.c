/* JSON, safetensors, tokenizer, datasets, loader: tests of the section >>formats. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"
#include "readers.h"

/* --------------------------------------------------------------------------------------------------- JSON */

static bool parses(tt_context *ctx, const char *text, size_t n)
{
    tt__json j;
    char *exact = (char *)malloc(n ? n : 1); /* without a byte behind it, for the address sanitizer */
    memcpy(exact, text, n);
    bool ok = tt__json_parse(&j, ctx, "text", 0, exact, n) == TT_OK;
    tt__json_free(&j);
    free(exact);
    return ok;
}

TEST(json_values)
{
    static const char text[] = "\xEF\xBB\xBF {\"a\": [1, -2.5e3, true, false, null, \"x\"], \"b\" : "
                               "{\"c\":{}} , \"\":[] ,\r\n\t\"big\":9223372036854775807,"
                               "\"small\":-9223372036854775808,\"over\":9223372036854775808,\"e\":1E2,\"z\":-"
                               "0,\"pi\":3.141592653589793,\"tiny\":4.9e-324}";
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt__json j;
    REQUIRE(tt__json_parse(&j, ctx, "text", 0, text, sizeof text - 1) == TT_OK);
    int array = tt__json_get(&j, 0, "a");
    CHECK(j.nodes[0].count == 10);
    REQUIRE(array > 0);
    CHECK(j.nodes[array].kind == TT__JSON_ARRAY && j.nodes[array].count == 6);
    CHECK(j.nodes[array + 1].exact && j.nodes[array + 1].integer == 1);
    CHECK(!j.nodes[array + 2].exact && j.nodes[array + 2].number == -2500);
    CHECK(j.nodes[array + 3].kind == TT__JSON_TRUE && j.nodes[array + 4].kind == TT__JSON_FALSE &&
          j.nodes[array + 5].kind == TT__JSON_NULL);
    CHECK(strcmp(tt__json_text(&j, array + 6), "x") == 0);
    CHECK(tt__json_get(&j, tt__json_get(&j, 0, "b"), "c") > 0);
    CHECK(tt__json_get(&j, 0, "") > 0 && tt__json_get(&j, 0, "c") == -1 &&
          tt__json_get(&j, array, "a") == -1);
    int64_t v = 7;
    CHECK(tt__json_read_int(&j, 0, "big", true, INT64_MIN, INT64_MAX, &v) == TT_OK && v == INT64_MAX);
    CHECK(tt__json_read_int(&j, 0, "small", true, INT64_MIN, INT64_MAX, &v) == TT_OK && v == INT64_MIN);
    CHECK(tt__json_read_int(&j, 0, "over", true, INT64_MIN, INT64_MAX, &v) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "\"over\" is a number; expected an integer from");
    CHECK(tt__json_read_int(&j, 0, "z", true, 0, 9, &v) == TT_OK && v == 0);
    CHECK(tt__json_read_int(&j, 0, "big", true, 0, 9, &v) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "is 9223372036854775807; expected an integer from 0 to 9");
    v = 7;
    CHECK(tt__json_read_int(&j, 0, "none", false, 0, 9, &v) == TT_OK && v == 7);
    CHECK(tt__json_read_int(&j, 0, "none", true, 0, 9, &v) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "has no \"none\"");
    float x = 0;
    const char *string = NULL;
    bool flag = false;
    CHECK(j.nodes[tt__json_get(&j, 0, "e")].number == 100);
    CHECK(j.nodes[tt__json_get(&j, 0, "pi")].number == 3.141592653589793);
    CHECK(tt__json_read_float(&j, 0, "pi", 0, 4, &x) == TT_OK && x == 3.141592653589793f);
    CHECK(tt__json_read_float(&j, 0, "none", 0, 4, &x) == TT_OK && x == 3.141592653589793f);
    CHECK(tt__json_read_float(&j, 0, "pi", 0, 3, &x) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT,
                "\"pi\" is 3.14159; expected a number that a float holds, of at least 0 and below 3");
    CHECK(j.nodes[tt__json_get(&j, 0, "tiny")].number == 4.9e-324);
    CHECK(tt__json_read_float(&j, 0, "a", 0, 4, &x) == TT_ERR_FORMAT);
    CHECK(tt__json_read_string(&j, 0, "e", true, &string) == TT_ERR_FORMAT &&
          tt__json_read_bool(&j, 0, "e", &flag) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "expected true or false");
    tt__json_free(&j);
    TEST_CLOSE(ctx, &a);
}

TEST(json_strings)
{
    static const struct { const char *json, *text; size_t bytes; } good[] = {
        {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\/\b\f\n\r\t", 8},
        {"\"\\u0041\\u00e9\\u20AC\"", "A\xC3\xA9\xE2\x82\xAC", 6},
        {"\"\\ud83d\\ude00\"", "\xF0\x9F\x98\x80", 4},
        {"\"\xF0\x9F\x98\x80\x7F\"", "\xF0\x9F\x98\x80\x7F", 5}, {"\"\\u0000\"", "\0", 1}, {"\"\"", "", 0},};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int i = 0; i < TEST_COUNT(good); i++) {
        tt__json j;
        if (CHECK(tt__json_parse(&j, ctx, "text", 0, good[i].json, strlen(good[i].json)) == TT_OK)) {
            CHECK((size_t)j.nodes[0].count == good[i].bytes &&
                  memcmp(j.pool + j.nodes[0].integer, good[i].text, good[i].bytes) == 0);
            CHECK((tt__json_text(&j, 0) == NULL) == (memchr(good[i].text, 0, good[i].bytes) != NULL));
        }
        tt__json_free(&j);
    }
    TEST_CLOSE(ctx, &a);
}

TEST(json_errors)
{
    static const struct { const char *json, *error; } bad[] = {
        {"", "byte 0: not valid JSON: expected a value, found the end"}, {"  ", "byte 2"}, {"[1,]", "byte 3"},
        {"[1 2]", "byte 3: not valid JSON: expected ',' or ']', found '2'"},
        {"{\"a\":1,}", "expected a key in double quotes, found '}'"}, {"{a:1}", "found 'a'"},
        {"{\"a\" 1}", "expected ':'"}, {"{\"a\":1", "found the end"},
        {"[1]x", "byte 3: not valid JSON: expected the end"}, {"01", "leading zero"},
        {"-", "expected a digit"}, {"-a", "expected a digit"}, {"1.", "after the decimal"},
        {".5", "found '.'"},
        {"1e", "in the exponent"}, {"1e+", "in the exponent"}, {"+1", "found '+'"}, {"NaN", "found 'N'"},
        {"Infinity", "found 'I'"}, {"nul", "expected a value"}, {"tru", "expected a value"},
        {"True", "found 'T'"}, {"1e999", "too large"}, {"-1e999", "too large"}, {"'a'", "found '''"},
        {"\"a", "byte 0: not valid JSON: the string that starts here"}, {"\"\\x\"", "a backslash"},
        {"\"\\", "a backslash"}, {"\"\\u12g4\"", "four hexadecimal digits, found 'g'"},
        {"\"\\u12", "four hexadecimal"}, {"\"\\ud800\"", "without the second"},
        {"\"\\ud800\\u0041\"", "no surrogate pair"}, {"\"\\udc00\"", "without the first"},
        {"\"\x01\"", "control character 0x01"}, {"\"\n\"", "control character"},
        {"\"\xFF\"", "byte 1: not valid JSON: byte 0xff is not valid UTF-8"}, {"\"\xC0\x80\"", "UTF-8"},
        {"\"\xED\xA0\x80\"", "UTF-8"}, {"\"\xE2\x82\"", "UTF-8"}, {"\"\xF4\x90\x80\x80\"", "UTF-8"},
        {"{\"a\":1,\"b\":2,\"a\":3}", "byte 17: not valid JSON: the key \"a\" is there twice"},
        {"{\"a\":1,\"\\u0061\":3}", "twice"}, {"{\"\":1,\"\":3}", "twice"}, {"/**/1", "found '/'"},
        {"\x0B" "1", "byte 0x0b"},
        {"]", "found ']'"}, {"[}", "found '}'"}, {"{]", "found ']'"},};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char deep[300], number[1000];
    for (int i = 0; i < TEST_COUNT(bad); i++) {
        CHECK(!parses(ctx, bad[i].json, strlen(bad[i].json)));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, bad[i].error);
    }
    memset(deep, '[', 64);
    memset(deep + 64, ']', 64);
    CHECK(parses(ctx, deep, 128));
    memset(deep, '[', 65);
    memset(deep + 65, ']', 65);
    CHECK(!parses(ctx, deep, 130));
    CHECK_ERROR(ctx, TT_ERR_FORMAT,
                "byte 64: not valid JSON: arrays and objects within each other more than 64 deep");
    memset(number, '1', sizeof number);
    CHECK(!parses(ctx, number, sizeof number));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "a number of 1000 characters");
    CHECK(parses(ctx, number, 308));
    TEST_CLOSE(ctx, &a);
}

/* Lookups and duplicates in an object of 50,000 keys; fails to end if they were quadratic. */
TEST(json_many_keys)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt__json j;
    size_t capacity = 2000000, n = 0;
    char *text = (char *)malloc(capacity), key[32];
    for (int i = 0; i < 50000; i++)
        n += (size_t)snprintf(text + n, capacity - n, "%s\"k%d\":%d", i ? "," : "{", i * 7919 % 50000,
                              i * 7919 % 50000);
    text[n] = '}';
    if (CHECK(tt__json_parse(&j, ctx, "text", 0, text, n + 1) == TT_OK))
        for (int i = 0; i < 50000; i++) {
            snprintf(key, sizeof key, "k%d", i);
            int node = tt__json_get(&j, 0, key);
            CHECK(node > 0 && j.nodes[node].integer == i);
        }
    tt__json_free(&j);
    n += (size_t)snprintf(text + n, capacity - n, ",\"k777\":0}");
    CHECK(!parses(ctx, text, n));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "\"k777\" is there twice");
    free(text);
    TEST_CLOSE(ctx, &a);
}

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
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tensor 'w' has 60 bytes, not 0 from 61 on");
    CHECK(tt_safetensors_read(s, 0, 60, 0, NULL) == TT_OK &&
          tt_safetensors_read(s, 7, 0, 0, none) == TT_ERR_ARGUMENT);
    CHECK(tt_safetensors_find(s, "x") == -1 && tt_safetensors_find(s, "__metadata__") == -1);
    CHECK(!tt_safetensors_info(s, -1) && !tt_safetensors_info(s, 7));
    CHECK(strcmp(tt_safetensors_metadata(s, "note"), "a\tb \"c\"") == 0 &&
          strcmp(tt_safetensors_metadata(s, "format"), "pt") == 0 && !tt_safetensors_metadata(s, "x"));
    tt_safetensors_close(s);

    /* the same bytes once more; no tensors at all */
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
    PUT(uint8_t, 0, 255, 3); /* an odd start, so that the others lie unaligned */
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
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "tensor 'f64' holds 1e+300 at element 2");
    CHECK(tt_safetensors_read_f32(s, 2, 0, 2, f) == TT_OK && f[0] == 1.25f && f[1] == 0 && signbit(f[1]));
    CHECK(tt_safetensors_read_f32(s, 2, 1, 1, f) == TT_OK && signbit(f[0]));
    CHECK(tt_safetensors_read_f32(s, 3, 0, 2, f) == TT_OK && f[0] == 1 && isinf(f[1]) && f[1] < 0);
    CHECK(tt_safetensors_read_f32(s, 4, 0, 2, f) == TT_OK && f[0] == 1 && f[1] == 0x1p-24f);
    CHECK(tt_safetensors_read_i32(s, 0, 0, 3, v) == TT_OK && v[0] == 0 && v[1] == 255 && v[2] == 3);
    CHECK(tt_safetensors_read_i32(s, 5, 0, 2, v) == TT_OK && v[0] == -5 && v[1] == INT32_MAX);
    CHECK(tt_safetensors_read_i32(s, 5, 4, 1, v) == TT_OK && v[0] == INT32_MIN);
    CHECK(tt_safetensors_read_i32(s, 5, 2, 1, v) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "'i64' holds 2147483648 at element 2");
    CHECK(tt_safetensors_read_i32(s, 5, 3, 1, v) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "holds -9223372036854775808");
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
        {"{" T_("a", "F32", "[2]", 0, 8) "}", 9, "1 bytes behind the last tensor"},
        {"{" T_("a", "F32", "[2]", 0, 8) "}", 7,
         "tensor 'a' lies in bytes [0, 8) of the data, of which the file has 7"},
        {"{" T_("a", "F32", "[2]", 0, 4) "}", 4, "has 4 bytes of data; its dtype F32 and shape need 8"},
        {"{" T_("a", "F32", "[2]", 0, 8) "," T_("b", "F32", "[2]", 4, 12) "}", 12,
         "tensor 'b' starts at byte 4 of the data, within 'a', which ends at 8"},
        {"{" T_("a", "F32", "[2]", 0, 8) "," T_("b", "F32", "[2]", 0, 8) "}", 8,
         "starts at byte 0 of the data, within"},
        {"{" T_("a", "F32", "[2]", 0, 8) "," T_("b", "F32", "[2]", 12, 20) "}", 20,
         "tensor 'b' starts at byte 12 of the data and leaves a hole from 8"},
        {"{" T_("a", "F32", "[1]", 4, 8) "}", 8, "leaves a hole from 0"},
        {"{" T_("a", "F32", "[2]", 0, 8) "," T_("e", "F32", "[0]", 4, 4) "}", 8,
         "tensor 'e' starts at byte 4"},
        {"{" T_("a", "F32", "[2]", 0, 8) "," T_("a", "F32", "[2]", 8, 16) "}", 16,
         "the key \"a\" is there twice"},
        {"{" T_("a", "F31", "[2]", 0, 8) "}", 8, "tensor 'a' has the dtype F31"},
        {"{" T_("a", "f32", "[2]", 0, 8) "}", 8, "has the dtype f32"},
        {"{" T_("a", "F32", "[-2]", 0, 8) "}", 8, "has a dimension that is no integer >= 0"},
        {"{" T_("a", "F32", "[2.0]", 0, 8) "}", 8, "has a dimension"},
        {"{" T_("a", "F32", "[\"2\"]", 0, 8) "}", 8, "has a dimension"},
        {"{" T_("a", "F32", "[[2]]", 0, 8) "}", 8, "has a dimension"},
        {"{" T_("a", "F32", "2", 0, 8) "}", 8, "has a number as \"shape\""},
        {"{" T_("a", "F32", "[1,1,1,1,1,1,1,1,2]", 0, 8) "}", 8, "has 9 dimensions; at most 8"},
        {"{" T_("a", "F32", "[4611686018427387904]", 0, 0) "}", 0, "too many to count"},
        {"{" T_("a", "F32", "[4294967296,4294967296]", 0, 0) "}", 0, "too many to count"},
        {"{" T_("a", "F32", "[4294967296,4294967296,0]", 0, 0) "}", 0, "too many to count"},
        {"{" T_("a", "F32", "[9223372036854775808]", 0, 0) "}", 0, "has a dimension"},
        {"{" T_("a", "F4", "[3]", 0, 2) "}", 2, "no whole number"},
        {"{" T_("a", "F32", "[2]", 8, 0) "}", 8, "lies in bytes [8, 0)"},
        {"{" T_("a", "F32", "[2]", -8, 0) "}", 8, "lies in bytes [-8, 0)"},
        {"{" T_("a", "F32", "[0]", 9223372036854775807, 9223372036854775807) "}", 8, "lies in bytes"},
        {"{" T_("a", "F32", "[2]", 0, 8.0) "}", 8, "no array of two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4,8]}}", 8, "no array of two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "no array of two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[[0,8],8]}}", 8,
         "no array of two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":{}}}", 8, "no array of two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "tensor 'a' has no \"data_offsets\""},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "has no \"shape\""},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "has no \"dtype\""},
        {"{\"a\":{\"dtype\":3,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "has the dtype a number"},
        {"{\"a\":[1]}", 0, "byte 13: tensor 'a' "},
        {"{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1,
         "has a NUL in its name"},
        {"{\"__metadata__\":3}", 0, "\"__metadata__\" is a number; expected an object of strings"},
        {"{\"__metadata__\":{\"k\":3}}", 0, "\"k\" is a number; expected a string"},
        {" {}", 0, "does not start with '{'"}, {"[]", 0, "does not start with '{'"},
        {"{}x", 0, "byte 10: not valid JSON: expected the end"}, {"{", 0, "does not start with '{'"},
        {"", 0, "does not start with '{'"},
        {"{}", 1, "1 bytes behind the last tensor"},
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
        {100000001, "a header of 100000001 bytes; the format allows 100000000"},
        {INT64_MAX, "the format allows"}, {99999999, "in a file of"}, {0, "does not start with"},
        {1, "does not start"}, {1000, "truncated"}};
    for (int i = 0; i < TEST_COUNT(lengths); i++) {
        CHECK(tt_safetensors_open(ctx, write_header(path, "{}", data, 0, lengths[i].length)) == NULL);
        CHECK_ERROR(ctx, TT_ERR_FORMAT, lengths[i].error);
    }
    CHECK(tt_safetensors_open(ctx, test_write(path, "", 0)) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "has 0 bytes");
    CHECK(tt_safetensors_open(ctx, "/nonexistent/x.safetensors") == NULL);
    CHECK_ERROR(ctx, TT_ERR_FILE, "cannot open '/nonexistent/x.safetensors'");

    /* keys and offsets in any order, empty tensors anywhere between, spaces behind, unknown keys: all
       legal */
    write_header(path,
                 "{" T_("z", "F32", "[1]", 4, 8) "," T_("e", "F32", "[5,0]", 4, 4) ","
                 T_("a", "F4", "[8]", 0, 4) ",\"__metadata__\":{}}   ", data, 8, -1);
    tt_safetensors *s = tt_safetensors_open(ctx, path);
    REQUIRE(s);
    CHECK(tt_safetensors_count(s) == 3 && tt_safetensors_find(s, "a") == 2 &&
          tt_safetensors_find(s, "e") == 1);
    CHECK(s->begin[0] - s->begin[2] == 4);
    tt_safetensors_close(s);
    s = tt_safetensors_open(ctx, write_header(path, "{}", data, 0, -1)); /* no tensor at all */
    REQUIRE(s);
    CHECK(tt_safetensors_count(s) == 0 && tt_safetensors_find(s, "a") == -1);
    CHECK(!tt_safetensors_metadata(s, "format"));
    tt_safetensors_close(s);
    TEST_CLOSE(ctx, &a);
}

TEST(safetensors_null_metadata) /* as safetensors reads it: there is none */
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

TEST(safetensors_truncated) /* at every byte, and with every byte too many */
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

TEST(safetensors_cut_off_while_read) /* by another program: an error of that read, which says where */
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
        snprintf(said, sizeof said, "cut', byte %lld: the file was cut off while it was read",
                 (long long)cuts[k]);
        CHECK_ERROR(ctx, TT_ERR_FILE, said);
        if (left >= 100000) /* what is there can be read */
            CHECK(tt_safetensors_read_f32(s, 0, 24990, 10, to) == TT_OK && to[9] == 24999);
    }
    write_header(path, header, data, 400000, -1); /* the same file, whole again */
    CHECK(tt_safetensors_read_f32(s, 0, 0, N, to) == TT_OK && to[N - 1] == N - 1);
    tt_safetensors_close(s);
    free(integers);
    free(to);
    free(data);
    TEST_CLOSE(ctx, &a);
}

TEST(a_pipe_is_refused) /* at once, although nobody writes to it; a reader that waits for one is killed */
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
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "ended 7 bytes too early: tensor 'b' (2 of 2) lacks 7 of its bytes");
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
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tensor 'x' needs 0 to 8 dimensions");
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

/* Every file operation fails once: an error, the old file whole, no temporary file left. */
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

TEST(safetensors_many) /* 20,000 tensors, in reverse order of their places */
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

/* ---------------------------------------------------------------------------------------------- tokenizer */

static size_t unescape(const char *from, size_t n, char *to)
{
    size_t used = 0;
    for (size_t i = 0; i < n; i++) {
        if (from[i] != '\\') { to[used++] = from[i]; continue; }
        char c = from[++i], hex[9] = {0};
        if (c == 'u' || c == 'U') {
            int digits = c == 'u' ? 4 : 8;
            memcpy(hex, from + i + 1, (size_t)digits);
            used += (size_t)tt__utf8_put((uint32_t)strtoul(hex, NULL, 16), to + used);
            i += (size_t)digits;
        } else to[used++] = c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c;
    }
    return used;
}

static void golden(const char *vocab, const char *cases, bool lowercase)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    size_t n;
    tt_tokenizer *k = tt_tokenizer_open(ctx, vocab, lowercase);
    char *file = test_read(cases, &n);
    REQUIRE(k && file);
    int lines = 0;
    for (char *line = file; *line; lines++) {
        char *end = strchr(line, '\n'), *tab = (char *)memchr(line, '\t', (size_t)(end - line)), message[300];
        int32_t want[1000], got[1000];
        int wanted = 0;
        char *text = (char *)malloc((size_t)(tab - line) + 1);
        size_t bytes = unescape(line, (size_t)(tab - line), text);
        for (char *p = tab; p < end; wanted++) want[wanted] = (int32_t)strtol(p, &p, 10);
        long calls = a.calls;
        /* Every length that cuts. */
        for (int max = 1000; max >= 2; max = max == 1000 ? wanted + 1 : max - 1) {
            int have = tt_tokenize(k, text, bytes, got, max), expected = max < wanted ? max : wanted;
            bool same = have == expected && got[have - 1] == want[wanted - 1] &&
                        memcmp(got, want, (size_t)(expected - 1) * 4) == 0;
            snprintf(message, sizeof message, "%.150s, line %d, max_tokens %d: %.80s", cases, lines + 1, max,
                     line);
            test__check(same, __FILE__, __LINE__, message);
        }
        CHECK(a.calls == calls);
        free(text);
        line = end + 1;
    }
    CHECK(lines > 150);
    free(file);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* A field of a line up to a tab or the line's end; *at: behind that. */
static char *field(const char **at, const char *end, size_t *bytes)
{
    const char *begin = *at, *stop = begin;
    while (stop < end && *stop != '\t') stop++;
    char *text = (char *)malloc((size_t)(stop - begin) + 1);
    *bytes = unescape(begin, (size_t)(stop - begin), text);
    *at = stop < end ? stop + 1 : end;
    return text;
}

/* The text of ids that come `each` at a time is that of all; at most `most` are kept to be decoded again. */
static bool stream_is_text(const tt_tokenizer *k, const int32_t *ids, int64_t n, int64_t each, bool skip,
                           int most)
{
    const int64_t bytes = tt_tokenizer_decode(k, ids, n, skip, NULL, 0);
    char *all = (char *)malloc((size_t)bytes + 1), *made = (char *)malloc((size_t)bytes + 1);
    tt_decode_stream *s = tt_decode_stream_new(k, skip);
    size_t at = 0, more = 0;
    bool same = s && tt_tokenizer_decode(k, ids, n, skip, all, (size_t)bytes + 1) == bytes;
    for (int64_t i = 0; i < n + each && same; i += each) {
        const int64_t now = i + each < n ? each : n - i;
        const char *text = i < n ? tt_decode_stream_put(s, ids + i, now, &more)
                         : tt_decode_stream_end(s, &more);
        same = text && at + more <= (size_t)bytes && (s->n <= most || s->runs); /* which are waited for */
        if (same) memcpy(made + at, text, more);
        at += more;
        if (i >= n) break;
    }
    same = same && (int64_t)at == bytes && memcmp(all, made, at) == 0;
    tt_decode_stream_free(s);
    free(all);
    free(made);
    return same;
}

/* golden/make_bpe.py's: of each text the ids, with those around it, and the texts of these with and without
   special tokens. */
static void golden_bpe(const char *folder)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char path[1100], message[400];
    snprintf(path, sizeof path, "%s/cases.tsv", folder);
    size_t n;
    tt_tokenizer *k = tt_tokenizer_load(ctx, folder);
    char *file = test_read(path, &n);
    if (!k) printf("%s\n", tt_error(ctx));
    REQUIRE(k && file);
    int lines = 0;
    for (const char *line = file; *line; lines++) {
        const char *end = strchr(line, '\n'), *at = line;
        int32_t want[4000], got[4000];
        int64_t wanted = 0;
        size_t bytes, numbers, decoded[2];
        char *text = field(&at, end, &bytes), *list = field(&at, end, &numbers), *back[2];
        for (int skip = 0; skip < 2; skip++) back[skip] = field(&at, end, &decoded[skip]);
        list[numbers] = 0;
        for (char *p = list; *p && wanted < 4000; wanted++) want[wanted] = (int32_t)strtol(p, &p, 10);
        const int64_t have = tt_tokenizer_encode(k, text, bytes, true, got, 4000);
        bool same = have == wanted && memcmp(got, want, (size_t)wanted * 4) == 0;
        snprintf(message, sizeof message, "%.150s, line %d: %.80s", path, lines + 1, line);
        test__check(same, __FILE__, __LINE__, message);
        for (int skip = 0; skip < 2; skip++) {
            char *to = (char *)malloc(decoded[skip] + 2);
            const int64_t m = tt_tokenizer_decode(k, want, wanted, skip, to, decoded[skip] + 2);
            same = m == (int64_t)decoded[skip] && memcmp(to, back[skip], decoded[skip]) == 0 && !to[m];
            snprintf(message, sizeof message, "%.150s, line %d, decoded: %.80s", path, lines + 1, line);
            test__check(same, __FILE__, __LINE__, message);
            same = stream_is_text(k, want, wanted, 1, skip, 4000) &&
                   stream_is_text(k, want, wanted, 3, skip, 4000);
            snprintf(message, sizeof message, "%.150s, line %d, as ids come: %.80s", path, lines + 1, line);
            test__check(same, __FILE__, __LINE__, message);
            free(to);
            free(back[skip]);
        }
        const int cut = tt_tokenize(k, text, bytes, got, 5); /* which may have no room for those around it */
        CHECK(cut >= 0 && cut <= 5 && (cut < 5 || wanted >= 5));
        free(text);
        free(list);
        line = end + 1;
    }
    CHECK(lines > 400);
    free(file);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

TEST(tokenizer_golden_bpe)
{
    static const char *const kinds[] = {"albert", "big_bird", "cl100k", "falcon", "gpt2", "llama2", "llama3",
                                        "metaspace", "mistral", "neox", "qwen2", "roberta", "starcoder", "t5",
                                        "unknown", "front_precompiled", "front_nfc", "front_strip",
                                        "front_replace", "wordpiece", "wordpiece_lower", "wordpiece_cased"};
    char folder[1000];
    for (int k = 0; k < TEST_COUNT(kinds); k++) {
        snprintf(folder, sizeof folder, "%s/%s", TEST_GOLDEN("bpe"), kinds[k]);
        golden_bpe(folder);
    }
}

/* Text of random ids, as untrained models give them, with characters in pieces and bytes that are none: as
   they come it is the text of all, and what is decoded again for each does not grow with their number. */
TEST(text_of_ids_that_come)
{
    static const char *const kinds[] = {"gpt2", "llama3", "qwen2", "llama2", "mistral", "metaspace", "t5",
                                        "big_bird", "unknown"};
    enum { N = 3000 };
    static int32_t ids[N];
    uint64_t random = 5;
    for (int kind = 0; kind < TEST_COUNT(kinds); kind++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        char folder[1000];
        snprintf(folder, sizeof folder, "%s/%s", TEST_GOLDEN("bpe"), kinds[kind]);
        tt_tokenizer *k = tt_tokenizer_load(ctx, folder);
        REQUIRE(k != NULL);
        const int size = tt_tokenizer_size(k), e2 = tt_tokenizer_find(k, "\xc3\xa2"); /* byte E2 */
        const int space = kind % 3 ? 4 : 0;
        for (int round = 0; round < 4; round++) { /* any ids; bytes; one byte that begins a character; few */
            for (int i = 0; i < N; i++) {
                const int any = (int)(test_random(&random) % (uint64_t)(size + 2)) - 1;
                ids[i] = round == 0 ? any : round == 1 ? any % 300 : round == 2 ? (e2 < 0 ? any : e2)
                       : space + any % 5;
            }
            for (int skip = 0; skip < 2; skip++) {
                if (!CHECK(stream_is_text(k, ids, N, 1, skip, 64)))
                    fprintf(stderr, "%s, round %d, skip %d\n", kinds[kind], round, skip);
                CHECK(stream_is_text(k, ids, N / 4, 7, skip, 70));
            }
        }
        tt_decode_stream *s = tt_decode_stream_new(k, true); /* memory that ends */
        bool done = false;
        for (long at = 1; !done && s; at++) {
            size_t bytes;
            a.fail_at = a.calls + at;
            done = tt_decode_stream_put(s, ids, 20, &bytes) && tt_decode_stream_end(s, &bytes);
            done = done && a.calls < a.fail_at;
            a.fail_at = 0;
        }
        tt_decode_stream_free(s);
        tt_tokenizer_free(k);
        TEST_CLOSE(ctx, &a);
    }
}

/* A tokenizer.json cut off, or with bytes that are others: it loads, and then takes any text, or says why
   not. The same where an allocation fails. */
TEST(tokenizer_bpe_damaged)
{
    static const char *const kinds[] = {"gpt2", "llama2", "mistral", "llama3", "big_bird", "t5", "albert",
                                        "front_nfc", "wordpiece"};
    static const char text[] = "It's  12345 \xc3\xa9t\xc3\xa9 <s>\n\n\xff <|endoftext|> \xe2\x96\x81x";
    uint64_t random = 1;
    int loaded = 0, refused = 0;
    for (int kind = 0; kind < TEST_COUNT(kinds); kind++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        char path[1200], folder[1100], to[400];
        int32_t ids[200];
        size_t n;
        snprintf(path, sizeof path, "%s/%s/tokenizer.json", TEST_GOLDEN("bpe"), kinds[kind]);
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), kinds[kind]));
        char *file = test_read(path, &n);
        REQUIRE(file && mkdir(folder, 0700) == 0);
        snprintf(path, sizeof path, "%s/tokenizer.json", folder);
        for (int k = 0; k < 400 / test_every(3); k++) {
            char *bytes = (char *)malloc(n);
            memcpy(bytes, file, n);
            const size_t size = k % 4 ? n : test_random(&random) % n;
            for (int j = 0; j < 1 + k % 3 && k % 4; j++)
                bytes[test_random(&random) % n] = "0{}[]\",:-x\x80\\"[test_random(&random) % 12];
            FILE *f = fopen(path, "wb");
            CHECK(f && fwrite(bytes, 1, size, f) == size && fclose(f) == 0);
            free(bytes);
            tt_tokenizer *t = tt_tokenizer_load(ctx, folder);
            loaded += t != NULL;
            refused += !t;
            if (!t) CHECK(tt_error_code(ctx) != TT_OK && *tt_error(ctx));
            const int64_t have = t ? tt_tokenizer_encode(t, text, sizeof text - 1, true, ids, 200) : 0;
            CHECK(have >= 0 && have <= 200);
            if (t) CHECK(tt_tokenizer_decode(t, ids, have, false, to, sizeof to) >= 0);
            tt_tokenizer_free(t);
        }
        FILE *f = fopen(path, "wb");
        CHECK(f && fwrite(file, 1, n, f) == n && fclose(f) == 0);
        free(file);
        bool done = false;
        for (long at = 1; !done; at += 1 + at / 8) {
            a.fail_at = a.calls + at;
            tt_tokenizer *t = tt_tokenizer_load(ctx, folder);
            const int64_t have = t ? tt_tokenizer_encode(t, text, sizeof text - 1, true, ids, 200) : -1;
            done = a.calls < a.fail_at;
            a.fail_at = 0;
            CHECK(done ? have > 0 : t ? have == -1 || have > 0 : tt_error_code(ctx) == TT_ERR_MEMORY);
            tt_tokenizer_free(t);
        }
        TEST_CLOSE(ctx, &a);
    }
    CHECK(loaded > 0 && refused > 0);
}

/* What a tokenizer was loaded from is saved as it was, and nothing else of its folder. */
TEST(tokenizer_files_are_kept)
{
    static const struct { const char *name, *text; } files[] = {
        {"tokenizer.json", "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]}}\n"},
        {"tokenizer_config.json", " {\"bos_token\": \"a\"}"}, {"special_tokens_map.json", "{}\n"},
        {"chat_template.jinja", "{% for m in messages %}{{ m }}{% endfor %}"}, {"notes.txt", "x"}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char from[600], to[600];
    snprintf(from, sizeof from, "%s", test_folder());
    snprintf(to, sizeof to, "%s", test_folder());
    for (int k = 0; k < TEST_COUNT(files); k++)
        test_write(test_path(from, files[k].name), files[k].text, strlen(files[k].text));
    tt_tokenizer *t = tt_tokenizer_load(ctx, from);
    if (CHECK(t != NULL)) CHECK(tt_tokenizer_save(t, to) == TT_OK);
    for (int k = 0; k < TEST_COUNT(files); k++) {
        size_t n;
        char *saved = test_read(test_path(to, files[k].name), &n);
        CHECK(k == 4 ? !saved : saved && n == strlen(files[k].text) && memcmp(saved, files[k].text, n) == 0);
        free(saved);
    }
    tt_tokenizer_free(t);
    TEST_CLOSE(ctx, &a);
}

/* Folders whose tokenizer_config.json names a class that AutoTokenizer of transformers 5 makes anew: its ids
   (golden/compare_bpe.py). */
TEST(tokenizer_classes_of_transformers)
{
#define LLAMA "\"tokenizer_class\":\"LlamaTokenizer\""
    static const struct { const char *kind, *config, *type, *text; int n; int32_t ids[8]; } rows[] = {
        {"llama2", LLAMA, "llama", " a", 2, {1, 335}}, {"llama2", LLAMA, "llama", "a", 2, {1, 335}},
        {"llama2", LLAMA, "llama", "</s>cd", 4, {1, 2, 291, 292}},
        {"llama2", LLAMA ",\"legacy\":true", "llama", "</s>cd", 4, {1, 2, 360, 292}},
        {"llama2", LLAMA ",\"legacy\":false", "llama", "\xE2\x96\x81" "a", 2, {1, 335}},
        {"llama2", LLAMA ",\"legacy\":null,\"add_prefix_space\":null", "llama", " a", 2, {1, 335}},
        {"llama2", LLAMA ",\"add_prefix_space\":false", "llama", "a  b", 4, {1, 289, 316, 350}},
        {"llama2", "\"tokenizer_class\":\"LlamaTokenizerFast\"", "llama", " a", 2, {1, 335}},
        {"llama2", LLAMA, "mistral", " a", 3, {1, 316, 335}}, /* the file's */
        {"llama2", "\"legacy\":false", "llama", " a", 3, {1, 316, 335}},
        {"llama2", "\"tokenizer_class\":\"PreTrainedTokenizerFast\"", "llama", " a", 3, {1, 316, 335}},
        {"gpt2", "\"add_prefix_space\":true", "gpt2", "</s>cd", 6, {424, 15, 83, 30, 67, 68}},
        {"gpt2", "\"add_prefix_space\":false", "gpt2", "a", 1, {65}},
        {"gpt2", "\"add_prefix_space\":true", "falcon", "a", 1, {65}},
        {"gpt2", "\"add_prefix_space\":true,\"tokenizer_class\":\"PreTrainedTokenizerFast\"", "gpt2", "a", 1,
         {65}},
        {"qwen2", "\"add_prefix_space\":true,\"tokenizer_class\":\"Qwen2Tokenizer\"", "x", "a", 1, {280}},
        {"roberta", "\"add_prefix_space\":true", "roberta", "a", 3, {0, 275, 2}},
        {"roberta", "\"add_prefix_space\":false", "roberta", "a", 3, {0, 69, 2}},
        {"roberta", "\"tokenizer_class\":\"RobertaTokenizer\"", "roberta", "a", 3, {0, 275, 2}}};
#undef LLAMA
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        char path[1100], folder[600], json[300];
        int32_t ids[20];
        size_t n;
        snprintf(folder, sizeof folder, "%s", test_folder());
        snprintf(path, sizeof path, "%s/%s/tokenizer.json", TEST_GOLDEN("bpe"), rows[k].kind);
        char *file = test_read(path, &n);
        REQUIRE(file);
        test_write(test_path(folder, "tokenizer.json"), file, n);
        free(file);
        snprintf(json, sizeof json, "{%s}", rows[k].config);
        test_write(test_path(folder, "tokenizer_config.json"), json, strlen(json));
        snprintf(json, sizeof json, "{\"model_type\":\"%s\"}", rows[k].type);
        test_write(test_path(folder, "config.json"), json, strlen(json));
        tt_tokenizer *t = tt_tokenizer_load(ctx, folder);
        REQUIRE(t);
        const int64_t count = tt_tokenizer_encode(t, rows[k].text, strlen(rows[k].text), true, ids, 20);
        CHECK(count == rows[k].n && memcmp(ids, rows[k].ids, sizeof *ids * (size_t)rows[k].n) == 0);
        tt_tokenizer_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Each normalizer reads what the one before has written, also where some between leave the text in place. */
TEST(tokenizer_normalizers_in_turn)
{
    static const char json[] =
        "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":["
        "{\"type\":\"Replace\",\"pattern\":{\"String\":\"x\"},\"content\":\"yy\"},"
        "{\"type\":\"Strip\",\"strip_left\":true,\"strip_right\":true},"
        "{\"type\":\"Replace\",\"pattern\":{\"String\":\"y\"},\"content\":\"zz\"},{\"type\":\"NFC\"},"
        "{\"type\":\"NFD\"},{\"type\":\"Lowercase\"},{\"type\":\"StripAccents\"},{\"type\":\"NFKD\"}]},"
        "\"model\":{\"type\":\"Unigram\",\"unk_id\":0,"
        "\"vocab\":[[\"<unk>\",0],[\"z\",-1],[\"e\",-1],[\"s\",-1],[\"i\",-1]]}}";
    static const struct { const char *text; int n; int32_t ids[8]; } rows[] = {
        {" x\xc3\x89 ", 5, {1, 1, 1, 1, 2}},            /* x, E with an acute */
        {"\xcc\x81 e\xcc\x81\xcc\xa3", 2, {0, 2}},      /* a mark alone, a space, marks behind a letter */
        {"\xe2\x93\x94\xef\xbc\xb3\xc4\xb0", 3, {2, 3, 4}}, /* e in a circle, a wide S, I with a dot */
        {"\xcc\x81", 0, {0}}, /* a mark alone */ {"\xff", 1, {0}}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[1000];
    int32_t ids[20];
    snprintf(folder, sizeof folder, "%s", test_folder());
    test_write(test_path(folder, "tokenizer.json"), json, sizeof json - 1);
    tt_tokenizer *k = tt_tokenizer_load(ctx, folder);
    if (!k) CHECK_ERROR(ctx, TT_OK, "a tokenizer");
    for (int i = 0; i < TEST_COUNT(rows) && k; i++) {
        CHECK(tt_tokenizer_encode(k, rows[i].text, strlen(rows[i].text), true, ids, 20) == rows[i].n);
        CHECK(memcmp(ids, rows[i].ids, (size_t)rows[i].n * sizeof *ids) == 0);
    }
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* Files of Unigram that are refused, and folders without a tokenizer. */
TEST(tokenizer_unigram_refused)
{
#define MODEL(unk, vocab) "\"model\":{\"type\":\"Unigram\",\"unk_id\":" unk ",\"vocab\":[" vocab "]}}"
#define WITH(key, value) "{\"" key "\":" value "," MODEL("0", "[\"a\",-1]")
    static const struct { const char *json, *error; } rows[] = {
        {"{" MODEL("null", "[\"a\",-1]"), "has no \"unk_id\", which is needed"},
        {"{" MODEL("1", "[\"a\",-1]"), "\"unk_id\" is 1, and the vocabulary has 1 tokens"},
        {"{" MODEL("0", ""), "has no vocabulary: expected an array of tokens and their scores"},
        {"{" MODEL("0", "[\"a\",-1],[\"b\"]"), "token 1 of the vocabulary is an array; expected at most"},
        {"{" MODEL("0", "[\"a\",\"b\"]"), "token 0 of the vocabulary is an array"},
        {"{" MODEL("0", "[\"a\",1e309]"), "a number too large for a double"},
        {WITH("normalizer", "{\"type\":\"NFKC\"}"), "the normalizer NFKC is not supported; expected"},
        {WITH("normalizer", "{\"type\":\"Precompiled\"}"), "has no \"precompiled_charsmap\""},
        {WITH("normalizer", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"A?\"}"), "not in base 64"},
        {WITH("normalizer", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"CAAAAAAAAAA=\"}"),
         "not a trie with its size before it"},
        {WITH("normalizer", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"BAAAAAAAAAD/\"}"),
         "of texts that are not UTF-8"},
        {WITH("normalizer", "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"x+\"},\"content\":\"\"}"),
         "the pattern of a Replace, x+ is not supported"},
        {WITH("pre_tokenizer", "{\"type\":\"ByteLevel\"}"), "the pre_tokenizer ByteLevel is not supported"},
        {WITH("pre_tokenizer", "{\"type\":\"Sequence\",\"pretokenizers\":["
              "{\"type\":\"Metaspace\",\"replacement\":\"_\"},{\"type\":\"Digits\"},"
              "{\"type\":\"Metaspace\",\"replacement\":\"_\"}]}"),
         "the pre_tokenizer Metaspace behind Metaspace is not supported; expected one of them"},
    };
#undef WITH
#undef MODEL
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *folder = test_folder();
    char file[1200];
    snprintf(file, sizeof file, "%s", test_path(folder, "tokenizer.json"));
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_write(file, rows[k].json, strlen(rows[k].json));
        CHECK(tt_tokenizer_load(ctx, folder) == NULL);
        CHECK(strstr(tt_error(ctx), rows[k].error) != NULL);
        if (!strstr(tt_error(ctx), rows[k].error)) printf("%s\n", tt_error(ctx));
    }
    CHECK(remove(file) == 0 && tt_tokenizer_load(ctx, folder) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FILE, "has no tokenizer: copy the tokenizer.json of the model there");
    test_write(test_path(folder, "tokenizer.model"), "x", 1);
    CHECK(tt_tokenizer_load(ctx, folder) == NULL);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "has a tokenizer as tokenizer.model only, which is not read");
    TEST_CLOSE(ctx, &a);
}

TEST(tokenizer_golden_uncased)
{
    golden(TEST_GOLDEN("vocab_uncased.txt"), TEST_GOLDEN("tokens_uncased.tsv"), true);
}
TEST(tokenizer_golden_cased)
{
    golden(TEST_GOLDEN("vocab_cased.txt"), TEST_GOLDEN("tokens_cased.tsv"), false);
}

/* The vocabulary of point_vocabulary() in golden/make_tokens.py: its ids tell the characters of words.
   Empty lines stand for code points that can be no token. */
static const char *point_vocabulary(void)
{
    const char *path = test_path(test_folder(), "vocab.txt");
    char *text = (char *)malloc(3000000);
    size_t n = (size_t)sprintf(text, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n");
    for (uint32_t c = 0; c < 0x20000; c++)
        for (int continues = 0; continues < 2; continues++) {
            bool token = c && c != '\n' && !(c >= 0xD800 && c <= 0xDFFF);
            if (token && continues) { memcpy(text + n, "##", 2); n += 2; }
            if (token) n += (size_t)tt__utf8_put(c, text + n);
            text[n++] = '\n';
        }
    test_write(path, text, n);
    free(text);
    return path;
}

/* The classes of `tokenizers` are of several versions of Unicode, and it sorts the marks of uncased text. */
TEST(tokenizer_nasty_strings)
{
    const char *vocab = point_vocabulary();
    golden(vocab, TEST_GOLDEN("points_uncased.tsv"), true);
    golden(vocab, TEST_GOLDEN("points_cased.tsv"), false);
}

/* A vocab.txt as tokenizer.json, as transformers 5 saves it; of an older version, which says less. */
static void write_as_json(const char *folder, const char *vocab, bool lowercase, bool older)
{
    size_t n;
    char *file = test_read(vocab, &n), *json = (char *)malloc(4 * n + 4000);
    size_t to = (size_t)sprintf(json, "{\"added_tokens\":[");
    static const char *const special[] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
    for (int k = 0; k < 5; k++)
        to += (size_t)sprintf(json + to, "%s{\"id\":%d,\"content\":\"%s\",\"special\":true}", k ? "," : "", k,
                              special[k]);
    to += (size_t)sprintf(json + to,
        "],\"normalizer\":{\"type\":\"BertNormalizer\",\"lowercase\":%s,\"clean_text\":true,"
        "\"handle_chinese_chars\":true,\"strip_accents\":null},"
        "\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"},"
        "\"post_processor\":{\"type\":\"BertProcessing\",\"cls\":[\"[CLS]\",2],\"sep\":[\"[SEP]\",3]},"
        "\"decoder\":{\"type\":\"WordPiece\",\"prefix\":\"##\"},"
        "\"model\":{%s\"max_input_chars_per_word\":100,\"vocab\":{", lowercase ? "true" : "false",
        older ? "" : "\"type\":\"WordPiece\",\"unk_token\":\"[UNK]\",\"continuing_subword_prefix\":\"##\",");
    int id = 0;
    for (char *line = file; *line; id++) {
        char *end = strchr(line, '\n');
        to += (size_t)sprintf(json + to, "%s\"", id ? "," : "");
        for (; line < end; line++) {
            if (*line == '"' || *line == '\\') json[to++] = '\\';
            json[to++] = *line;
        }
        to += (size_t)sprintf(json + to, "\":%d", id);
        line = end + 1;
    }
    to += (size_t)sprintf(json + to, "}}}");
    test_write(test_path(folder, "tokenizer.json"), json, to);
    free(file);
    free(json);
}

/* A tokenizer.json without vocab.txt gives the ids of that vocab.txt, has its special tokens,
    and is saved. */
TEST(wordpiece_of_a_tokenizer_json)
{
    char folder[600], saved[600], case_path[600];
    snprintf(folder, sizeof folder, "%s", test_folder());
    snprintf(saved, sizeof saved, "%s", test_folder());
    for (int kind = 0; kind < 4; kind++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        char vocab[600];
        size_t n;
        const bool lowercase = kind % 2;
        snprintf(vocab, sizeof vocab, "%s/vocab_%scased.txt", TEST_GOLDEN(""), lowercase ? "un" : "");
        snprintf(case_path, sizeof case_path, "%s/tokens_%scased.tsv", TEST_GOLDEN(""), lowercase ? "un" :
            "");
        write_as_json(folder, vocab, lowercase, kind > 1);
        tt_tokenizer *k = tt_tokenizer_load(ctx, folder), *other = tt_tokenizer_open(ctx, vocab, lowercase);
        char *file = test_read(case_path, &n);
        if (!k) printf("%s\n", tt_error(ctx));
        REQUIRE(k && other && file);
        int lines = 0;
        for (const char *line = file; *line; lines++) {
            const char *at = line, *end = strchr(line, '\n');
            int32_t ids[2000], want[2000];
            size_t bytes;
            char *text = field(&at, end, &bytes);
            const int count = tt_tokenize(other, text, bytes, want, 2000);
            CHECK(tt_tokenize(k, text, bytes, ids, 2000) == count);
            CHECK(memcmp(ids, want, (size_t)count * sizeof *ids) == 0);
            free(text);
            line = end + 1;
        }
        CHECK(lines > 150);
        free(file);
        for (int role = 0; role < TT_TOKEN_COUNT; role++)
            CHECK(tt_tokenizer_special(k, (tt_special_token)role) ==
                  tt_tokenizer_special(other, (tt_special_token)role));
        CHECK(tt_tokenizer_size(k) == tt_tokenizer_size(other) && tt_tokenizer_save(k, saved) == TT_OK);
        tt_tokenizer *again = tt_tokenizer_load(ctx, saved);
        CHECK(again && tt_tokenizer_size(again) == tt_tokenizer_size(k));
        tt_tokenizer_free(again);
        tt_tokenizer_free(other);
        tt_tokenizer_free(k);
        TEST_CLOSE(ctx, &a);
    }
#define MODEL(rest) "\"model\":{\"type\":\"WordPiece\"," rest "}}"
    static const struct { const char *json, *error; } bad[] = {
        {"{" MODEL("\"unk_token\":\"<unk>\",\"vocab\":{\"a\":0}"),
         "the vocabulary has no '<unk>', the \"unk_token\""},
        {"{" MODEL("\"max_input_chars_per_word\":-1,\"vocab\":{\"[UNK]\":0}"),
         "\"max_input_chars_per_word\""},
        {"{\"pre_tokenizer\":{\"type\":\"ByteLevel\"}," MODEL("\"vocab\":{\"[UNK]\":0}"),
         "the pre_tokenizer ByteLevel is not supported; expected none that maps bytes"},
        {"{\"model\":{\"type\":\"WordLevel\",\"vocab\":{\"[UNK]\":0}}}",
         "the model WordLevel is not supported; expected BPE, Unigram or WordPiece"}};
#undef MODEL
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < TEST_COUNT(bad); k++) {
        test_write(test_path(folder, "tokenizer.json"), bad[k].json, strlen(bad[k].json));
        CHECK(!tt_tokenizer_load(ctx, folder));
        CHECK(strstr(tt_error(ctx), bad[k].error) != NULL);
    }
    TEST_CLOSE(ctx, &a);
}

TEST(tokenizer_code_points) /* all 1,112,064; golden/compare_tokens.py tells which ones of a block differ */
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *vocab = point_vocabulary();
    tt_tokenizer *kinds[] = {tt_tokenizer_open(ctx, vocab, false), tt_tokenizer_open(ctx, vocab, true)};
    size_t n;
    char *file = test_read(TEST_GOLDEN("code_points.tsv"), &n), *next = file, message[80];
    REQUIRE(file && kinds[0] && kinds[1]);
    for (uint32_t first = 0; first < 0x110000; first += 0x1000) {
        CHECK(strtoul(next, &next, 16) == first);
        for (int kind = 0; kind < 2; kind++) {
            uint32_t sum = 2166136261u;
            for (uint32_t c = first; c < first + 0x1000; c++) {
                char text[6] = "a";
                int32_t ids[16];
                size_t end = 1 + (size_t)tt__utf8_put(c, text + 1);
                if (c >= 0xD800 && c <= 0xDFFF) continue;
                text[end++] = 'b';
                int count = tt_tokenize(kinds[kind], text, end, ids, 16);
                for (int i = 0; i < 4 * count; i++)
                    sum = (sum ^ ((uint32_t)ids[i / 4] >> i % 4 * 8 & 255)) * 16777619u;
            }
            snprintf(message, sizeof message, "%s text, U+%04X to U+%04X", kind ? "uncased" : "cased", first,
                     first + 0xFFF);
            test__check(strtoul(next, &next, 10) == sum, __FILE__, __LINE__, message);
        }
    }
    free(file);
    tt_tokenizer_free(kinds[0]);
    tt_tokenizer_free(kinds[1]);
    TEST_CLOSE(ctx, &a);
}

/* White space at the end of a line is dropped, as `tokenizers` does it; saving changes nothing more. */
TEST(tokenizer_vocabulary_line_ends)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *folder = test_folder(), *path = test_path(folder, "vocab.txt");
    static const char *const ends[] = {"\n", "\r\n", "\r\r\n", " \t\v\f\r\r\n",
                                       "\xC2\x85\xC2\xA0\xE1\x9A\x80\xE2\x80\xA8\xE3\x80\x80\n"};
    static const char *const tokens[] = {"[UNK]", "[CLS]", "[SEP]", "a", " b", "", "c\rd", "##", "##a",
                                         "\xC3\xA0", "\xE2\x80\x8B"};
    static const char want[] = "[UNK]\n[CLS]\n[SEP]\na\n b\n\nc\rd\n##\n##a\n\xC3\xA0\n\xE2\x80\x8B\n";
    for (int i = 0; i < TEST_COUNT(ends); i++) {
        char text[400];
        size_t n = 0;
        for (int t = 0; t < TEST_COUNT(tokens); t++)
            n += (size_t)snprintf(text + n, sizeof text - n, "%s%s", tokens[t], ends[i]);
        test_write(path, text, n);
        for (int round = 0; round < 3; round++) {
            tt_tokenizer *k = tt_tokenizer_load(ctx, folder);
            REQUIRE(k);
            CHECK(tt_tokenizer_size(k) == TEST_COUNT(tokens));
            for (int t = 0; t < TEST_COUNT(tokens); t++)
                CHECK(strcmp(tt_tokenizer_token(k, t), tokens[t]) == 0);
            CHECK(tt_tokenizer_save(k, folder) == TT_OK);
            tt_tokenizer_free(k);
            char *saved = test_read(path, &n);
            CHECK(n == sizeof want - 1 && memcmp(saved, want, n) == 0);
            free(saved);
        }
    }
    TEST_CLOSE(ctx, &a);
}

TEST(tokenizer_special_tokens) /* those of the vocabulary; what it lacks is text */
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static const char vocab[] = "[UNK]\n[CLS]\n[SEP]\na\nb\n##b\n[\n]\nmask\n[PAD]";
    static const char text[] = "a[SEP]b[[PAD]]ab [MASK][UNK";
    static const int32_t want[] = {1, 3, 2, 4, 6, 9, 7, 3, 5, 6, 8, 7, 6, 0, 2};
    const char *path = test_write(test_path(test_folder(), "vocab.txt"), vocab, sizeof vocab - 1);
    tt_tokenizer *k = tt_tokenizer_open(ctx, path, true);
    int32_t ids[16];
    REQUIRE(k);
    CHECK(tt_tokenize(k, text, sizeof text - 1, ids, 16) == TEST_COUNT(want));
    CHECK(memcmp(ids, want, sizeof want) == 0);
    CHECK(tt_tokenize(k, "[SEP]", 4, ids, 16) == 4 && ids[1] == 6 && ids[2] == 0); /* without "]" */
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

TEST(tokenizer_vocabulary)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *path = test_path(test_folder(), "vocab.txt");
    static const char vocab[] = "[PAD]\r\n[UNK]\r\n[CLS]\n[SEP]\na\n##a\nb\na\n\n##\n#\n##b";
    tt_tokenizer *k = tt_tokenizer_open(ctx, test_write(path, vocab, sizeof vocab - 1), true);
    int32_t ids[16];
    REQUIRE(k);
    CHECK(tt_tokenizer_size(k) == 12);
    CHECK(tt_tokenizer_find(k, "a") == 7 && tt_tokenizer_find(k, "##a") == 5 &&
          tt_tokenizer_find(k, "[PAD]") == 0 && tt_tokenizer_find(k, "c") == -1);
    CHECK(tt_tokenizer_find(k, "##") == 9 && tt_tokenizer_find(k, "#") == 10 &&
          tt_tokenizer_find(k, "") == 8 && tt_tokenizer_find(k, "##b") == 11);
    CHECK(strcmp(tt_tokenizer_token(k, 5), "##a") == 0 && strcmp(tt_tokenizer_token(k, 0), "[PAD]") == 0 &&
          strcmp(tt_tokenizer_token(k, 4), "a") == 0);
    CHECK(strcmp(tt_tokenizer_token(k, 9), "##") == 0 && strcmp(tt_tokenizer_token(k, 11), "##b") == 0 &&
          !tt_tokenizer_token(k, 12) && !tt_tokenizer_token(k, -1));
    CHECK(tt_tokenize(k, "Aab ba## x", 10, ids, 16) == 10 && ids[0] == 2 && ids[1] == 7 && ids[2] == 5 &&
          ids[3] == 11 && ids[4] == 6 && ids[5] == 5 && ids[6] == 10 && ids[7] == 10 && ids[8] == 1 &&
          ids[9] == 3);
    /* Invalid UTF-8 is dropped. */
    CHECK(tt_tokenize(k,
                      "a\xFF"
                      "b \xE2\x82 b\xED\xA0\x80 \xF0\x9F\x98",
                      14, ids, 16) == 5 &&
          ids[1] == 7 && ids[2] == 11 && ids[3] == 6);
    CHECK(tt_tokenize(k, "a\0b", 3, ids, 16) == 4 && ids[1] == 7 && ids[2] == 11); /* so is NUL */
    CHECK(tt_tokenize(k, NULL, 0, ids, 2) == 2 && ids[0] == 2 && ids[1] == 3);
    CHECK(tt_tokenize(k, "a", 1, ids, 1) == 0);
    /* Cut only after the whole word is known to be [UNK]. */
    CHECK(tt_tokenize(k, "aaaac", 5, ids, 4) == 3 && ids[1] == 1);
    tt_tokenizer_free(k);
    tt_tokenizer_free(NULL);

    static const struct { const char *vocab; size_t n; const char *error; } bad[] = {
        {"", 0, "has no [UNK] among its 0 tokens"}, {"[CLS]\n[SEP]\n", 12, "has no [UNK]"},
        {"[UNK]\n[SEP]\n", 12, "has no [CLS]"}, {"[UNK]\n[CLS]\n", 12, "has no [SEP]"},
        {"[UNK]\n[CLS]\n[SEP]\n\xFF\n", 20, "line 4: the token is not UTF-8"},
        {"[UNK]\n[CLS]\n[SEP]\na\0b\n", 22, "line 4"}};
    for (int i = 0; i < TEST_COUNT(bad); i++) {
        CHECK(!tt_tokenizer_open(ctx, test_write(path, bad[i].vocab, bad[i].n), true));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, bad[i].error);
    }
    CHECK(!tt_tokenizer_open(ctx, "/nonexistent/vocab.txt", true));
    CHECK_ERROR(ctx, TT_ERR_FILE, "/nonexistent/vocab.txt");
    TEST_CLOSE(ctx, &a);
}

/* Ids of more than 16 bits, in the loader's cache too; the slots of the hash table. */
TEST(tokenizer_large_vocabulary)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    size_t capacity = 1000000, n = 0;
    char *vocab = (char *)malloc(capacity), word[32];
    int32_t ids[8];
    n += (size_t)snprintf(vocab, capacity, "[UNK]\n[CLS]\n[SEP]\n");
    for (int i = 0; i < 70000; i++) n += (size_t)snprintf(vocab + n, capacity - n, "w%dx\n", i);
    tt_tokenizer *k = tt_tokenizer_open(ctx, test_write(test_path(test_folder(), "vocab.txt"), vocab, n),
                                        true);
    free(vocab);
    REQUIRE(k);
    for (int i = 0; i < 70000; i++) {
        snprintf(word, sizeof word, "W%dx", i);
        CHECK(tt_tokenize(k, word, strlen(word), ids, 8) == 3 && ids[1] == i + 3);
        snprintf(word, sizeof word, "w%dx", i);
        CHECK(tt_tokenizer_find(k, word) == i + 3);
    }
    const char *path = test_write(test_path(test_folder(), "a.tsv"), "text\tlabel\nw69999x w1x\t0\n", 25);
    tt_dataset *d = tt_dataset_table(ctx, path, NULL, NULL, 0, NULL);
    tt_loader *l = d ? tt_loader_new(ctx, d, k, NULL) : NULL;
    tt_batch b;
    REQUIRE(l);
    CHECK(tt_loader_next(l, &b) && b.rows == 4 && b.ids[1] == 70002 && b.ids[2] == 4 && b.last_of_step &&
          !tt_loader_next(l, &b));
    tt_loader_free(l);
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

TEST(tokenizer_folder)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *folder = test_folder();
    char vocab[600], config[600];
    int32_t ids[8];
    snprintf(vocab, sizeof vocab, "%.500s/vocab.txt", folder);
    snprintf(config, sizeof config, "%.500s/tokenizer_config.json", folder);
    CHECK(!tt_tokenizer_load(ctx, folder));
    CHECK_ERROR(ctx, TT_ERR_FILE, "vocab.txt");
    CHECK(!tt_tokenizer_load(ctx, "/nonexistent"));
    CHECK_ERROR(ctx, TT_ERR_FILE, "cannot list the folder '/nonexistent'");
    test_write(vocab, "[UNK]\n[CLS]\n[SEP]\na\nA\n", 22);
    static const struct { const char *json; int id; const char *error; } cases[] = {
        {NULL, 3, NULL}, {"{\"do_lower_case\": false}", 4, NULL},
        {"{\"do_lower_case\": true, \"strip_accents\": null}", 3, NULL}, {"{}", 3, NULL},
        {"{\"do_lower_case\": 1}", 0, "\"do_lower_case\" is a number"},
        {"[]", 0, "is an array; expected a JSON object"}, {"{", 0, "not valid JSON"},
        {"{\"strip_accents\": false}", 0, "\"strip_accents\" is not as do_lower_case"},
        {"{\"tokenize_chinese_chars\": false}", 0, "\"tokenize_chinese_chars\" is false"},
        {"{\"split_special_tokens\": true}", 0, "\"split_special_tokens\" is true"},
        {"{\"split_special_tokens\": false}", 3, NULL},
        {"{\"do_basic_tokenize\": false}", 0, "\"do_basic_tokenize\" is false"},
        {"{\"do_lower_case\": false, \"strip_accents\": false, \"tokenize_chinese_chars\": true, "
         "\"model_max_length\": 512}", 4, NULL}};
    for (int i = 0; i < TEST_COUNT(cases); i++) {
        if (cases[i].json) test_write(config, cases[i].json, strlen(cases[i].json));
        tt_tokenizer *k = tt_tokenizer_load(ctx, folder);
        CHECK((k == NULL) == (cases[i].error != NULL));
        if (k) CHECK(tt_tokenize(k, "A", 1, ids, 8) == 3 && ids[1] == cases[i].id);
        else CHECK(strstr(tt_error(ctx), cases[i].error ? cases[i].error : "?"));
        tt_tokenizer_free(k);
    }
    TEST_CLOSE(ctx, &a);
}

/* ----------------------------------------------------------------------------------------------- datasets */

static tt_dataset *table(tt_context *ctx, const char *name, const char *text, size_t n, const char *split,
                         const char *const *classes, int n_classes)
{
    static char folder[600];
    if (!folder[0]) snprintf(folder, sizeof folder, "%s", test_folder());
    const char *path = test_write(test_path(folder, name), text, n);
    return tt_dataset_table(ctx, path, split, classes, n_classes, NULL);
}

static bool row_is(const tt_dataset *d, int64_t i, const char *text, int label)
{
    size_t n;
    const char *have = tt_dataset_text(d, i, &n);
    return have && n == strlen(text) && memcmp(have, text, n + 1) == 0 && tt_dataset_label(d, i) == label;
}

TEST(dataset_table)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static const char csv[] = "\xEF\xBB\xBFlabel,other,text,split\r\n\"pos\",1,\"a, "
                              "\"\"b\"\"\nc\",train\r\n\r\nneg,2,,test\r\nneg,\"3\",plain \"quoted\" "
                              "text,train\n\"\xC3\xA9\",4,\"\",train";
    tt_dataset *d = table(ctx, "a.csv", csv, sizeof csv - 1, NULL, NULL, 0);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 4 && tt_dataset_classes(d) == 3);
    CHECK(strcmp(tt_dataset_class_name(d, 0), "neg") == 0 &&
          strcmp(tt_dataset_class_name(d, 1), "pos") == 0 &&
          strcmp(tt_dataset_class_name(d, 2), "\xC3\xA9") == 0);
    CHECK(row_is(d, 0, "a, \"b\"\nc", 1) && row_is(d, 1, "", 0) && row_is(d, 2, "plain \"quoted\" text", 0) &&
          row_is(d, 3, "", 2));
    CHECK(!tt_dataset_text(d, 4, NULL) && !tt_dataset_text(d, -1, NULL) && tt_dataset_label(d, 4) == -1 &&
          !tt_dataset_class_name(d, 3));
    tt_dataset_free(d);
    static const char *const classes[] = {"pos", "neg", "\xC3\xA9", "unused"}, *const twice[] = {"a", "b",
                                                                                                 "a"};
    d = table(ctx, "a.csv", csv, sizeof csv - 1, "train", classes, 4);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 3 && tt_dataset_classes(d) == 4 && row_is(d, 0, "a, \"b\"\nc", 0) &&
          row_is(d, 1, "plain \"quoted\" text", 1) && row_is(d, 2, "", 2));
    tt_dataset_free(d);
    static const char tsv[] = "text\tlabel\na, b\t1\n\"tab\there\"\t0\n";
    d = table(ctx, "a.tsv", tsv, sizeof tsv - 1, NULL, NULL, 0);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 2 && row_is(d, 0, "a, b", 1) && row_is(d, 1, "tab\there", 0));
    tt_dataset_free(d);
    CHECK(!table(ctx, "a.tsv", tsv, sizeof tsv - 1, "extra", NULL, 0));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "no column 'split', so its rows are \"train\" or \"test\", not "
                "'extra'");
    tt_dataset_free(NULL);

    static const struct { const char *text; size_t n; const char *split, *error; } bad[] = {
        {"", 0, NULL, "is empty"}, {"\n\n", 0, NULL, "is empty"},
        {"text\tlabel\n", 0, NULL, "a header and no rows"}, {"text\tlabel", 0, NULL, "no rows"},
        {"text\tlable\na\tb\n", 0, NULL,
         "line 1: the header's 2 columns, separated by tabs, have none named 'label'"},
        {"text,label\na,b\n", 0, NULL, "have none named 'text'"},
        {"text\tlabel\ttext\na\tb\tc\n", 0, NULL, "two columns are named 'text'"},
        {"text\tlabel\na\tb\na\n", 0, NULL, "line 3: 1 columns; the header has 2"},
        {"text\tlabel\na\tb\tc\n", 0, NULL, "line 2: 3 columns"},
        {"text\tlabel\n\"a\n\nb\"\tx\n\"c\nd\te\n", 0, NULL,
         "line 5: the quoted field that starts here is not closed"},
        {"text\tlabel\n\"a\nb\"x\tc\n", 0, NULL, "line 3: text behind a closing quote"},
        {"text\tlabel\n\n\na\t\n", 0, NULL, "line 4: the label is empty"},
        {"text\tlabel\na\tb\n", 0, "train", "cannot be divided into"},
        {"text\tlabel\tsplit\na\tb\ttest\n", 0, "train", "no row whose split is 'train'"},
        {"text\tlabel\na\tb\0c\n", 17, NULL, "line 2: the label holds a NUL"},
        {"text\tlabel\na\t", 0, NULL, "the label is empty"},
        {"text\tlabel\na\tx\nb\tcaf\xE9 noir\n", 0, NULL, "line 3, byte 20: 0xe9 begins no character of "
         "UTF-8: convert a text in Latin-1, as by iconv -f LATIN1"},
        {"text\tlabel\n\xED\xA0\x80\tx\n", 0, NULL, "line 2, byte 11: 0xed begins no character"}};
    for (int i = 0; i < TEST_COUNT(bad); i++) {
        CHECK(!table(ctx, "bad.tsv", bad[i].text, bad[i].n ? bad[i].n : strlen(bad[i].text), bad[i].split,
                     NULL, 0));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, bad[i].error);
    }
    CHECK(!table(ctx, "a.csv", csv, sizeof csv - 1, "train", classes, 2));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "line 7: the label '\xC3\xA9' is none of the 2 classes given");
    CHECK(!table(ctx, "a.csv", csv, sizeof csv - 1, NULL, twice, 3));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the class 'a' is given twice");
    static const char *const latin1[] = {"neg", "caf\xE9"};
    CHECK(!table(ctx, "a.csv", csv, sizeof csv - 1, NULL, latin1, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the name of class 1 of 2, 'caf', breaks off at byte 0xe9, which is "
                "not UTF-8");
    CHECK(!table(ctx, "a.csv", csv, sizeof csv - 1, NULL, NULL, 2) &&
          !table(ctx, "a.csv", csv, sizeof csv - 1, NULL, classes, 0));
    CHECK(!tt_dataset_table(ctx, "/nonexistent.csv", NULL, NULL, 0, NULL));
    CHECK_ERROR(ctx, TT_ERR_FILE, "/nonexistent.csv");
    TEST_CLOSE(ctx, &a);
}

/* Text files that are not UTF-8 are refused before anything is read of them. */
TEST(texts_of_other_encodings_are_refused)
{
    static const struct { const char *text; size_t bytes; const char *error; } rows[] = {
        {"\xFF\xFEt\0e\0", 6, "begins with the byte order mark of UTF-16, and texts are read as UTF-8: "
         "convert it, as by iconv -f UTF-16 -t UTF-8"},
        {"\xFE\xFF\0t\0e", 6, "the byte order mark of UTF-16"},
        {"\xFF\xFE\0\0t\0\0\0", 8, "the byte order mark of UTF-32"},
        {"\0\0\xFE\xFF\0\0\0t", 8, "iconv -f UTF-32 -t UTF-8"},
        {"t\0e\0x\0t\0", 8, "4 of the first 8 bytes are control characters, so that this is no text in "
         "UTF-8: convert a text in UTF-16, as by iconv -f UTF-16LE"},
        {"\0t\0e\0x\0t", 8, "iconv -f UTF-16BE"},
        /* Cyrillic: no NUL before the first space */
        {"?\4@\4\70\4\62\4\65\4B\4 \0<\4\70\4@\4", 20, "10 of the first 20 bytes are control characters, so "
         "that this is no text in UTF-8: convert a text in UTF-16, as by iconv -f UTF-16LE"},
        {"\4?\4@\4\70\4\62\4\65\4B\0 \4<\4\70\4@", 20, "iconv -f UTF-16BE"},
        {"text\n\ncaf\xE9!", 11, "line 3, byte 9: 0xe9 begins no character of UTF-8: convert a text in "
         "Latin-1"},
        {"\xEF\xBB\xBF\xEF", 4, "line 1, byte 3: 0xef begins no"}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600];
    size_t begin = 9;
    snprintf(folder, sizeof folder, "%s", test_folder());
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        const char *path = test_write(test_path(folder, "a.txt"), rows[k].text, rows[k].bytes);
        CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, NULL));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, rows[k].error);
        CHECK(!tt_token_stream_read(ctx, path, NULL)); /* also for a model of bytes, and in a folder */
        CHECK_ERROR(ctx, TT_ERR_FORMAT, rows[k].error);
        CHECK(!tt_token_stream_read(ctx, folder, NULL));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, "/a.txt'");
        CHECK(tt_text_begin(ctx, "x", rows[k].text, rows[k].bytes, &begin) == TT_ERR_FORMAT);
        CHECK_ERROR(ctx, TT_ERR_FORMAT, rows[k].error);
    }
    CHECK(tt_text_begin(ctx, "x", "\xEF\xBB\xBFx", 4, &begin) == TT_OK && begin == 3);
    CHECK(tt_text_begin(ctx, "x", "\xEF\xBB", 0, &begin) == TT_OK && begin == 0);
    CHECK(tt_text_begin(ctx, "x", "abcde\0f\xC3\xA9", 9, &begin) == TT_OK && begin == 0);
    TEST_CLOSE(ctx, &a);
}

/* Lines that end by CR; columns that something else separates; quotes that are characters like others. */
TEST(tables_of_other_programs)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static const char mac[] = "text,label\r\"a\rb\",x\rc,y\r", mixed[] = "text,label\na\rb,x\n";
    tt_dataset *d = table(ctx, "mac.csv", mac, sizeof mac - 1, NULL, NULL, 0);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 2 && row_is(d, 0, "a\nb", 0) && row_is(d, 1, "c", 1));
    tt_dataset_free(d);
    d = table(ctx, "mixed.csv", mixed, sizeof mixed - 1, NULL, NULL, 0);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 1 && row_is(d, 0, "a\rb", 0));
    tt_dataset_free(d);
    static const struct { const char *name, *text, *error; } bad[] = {
        {"a.csv", "text;label\na;b\n", "have none named 'text', but 'text;label'; if columns are separated "
         "by the character ';', say so (delimiter; --delimiter)"},
        {"a.tsv", "text,label\na,b\n", "but 'text,label'; if columns are separated by commas, say so"},
        {"b.csv", "\"text\";\"label\"\na;b\n", "line 1: text behind a closing quote; if columns are "
         "separated by the character ';', say so"},
        {"b.tsv", "text\tlabel\n\"Good\" is the word\tpos\n", "line 2: text behind a closing quote; a quote "
         "within a quoted field is written twice; if quotes are characters like others, say so (unquoted; "
         "--quote none)"},
        {"c.tsv", "text\tlabel\n\"Good\tpos\n", "is not closed before the end of the file; if quotes are "
         "characters like others, say so (unquoted"}};
    for (int k = 0; k < TEST_COUNT(bad); k++) {
        CHECK(!table(ctx, bad[k].name, bad[k].text, strlen(bad[k].text), NULL, NULL, 0));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, bad[k].error);
    }
    static const char glue[] = "text\tlabel\n\"Good\" is the word\tpos\n\"open\t\"neg\"\n";
    tt_table_options o = tt_table_options_default();
    CHECK(!o.unquoted);
    o.unquoted = true;
    const char *path = test_write(test_path(test_folder(), "g.tsv"), glue, sizeof glue - 1);
    d = tt_dataset_table(ctx, path, NULL, NULL, 0, &o);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 2 && row_is(d, 0, "\"Good\" is the word", 1) && row_is(d, 1, "\"open", 0));
    CHECK(strcmp(tt_dataset_class_name(d, 0), "\"neg\"") == 0);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

/* They are numbered by value where all are numbers, else in byte order. */
TEST(labels_that_are_numbers)
{
    static const struct { const char *rows, *names; } of[] = {
        {"a\t10\nb\t-1\nc\t2\nd\t0\ne\t1\nf\t10\n", "-1 0 1 2 10 "},
        {"a\t1.5\nb\t-10\nc\t+2\nd\t1.25\ne\t10.\nf\t10.\n", "-10 1.25 1.5 +2 10. "},
        {"a\t01\nb\t1\nc\t0\nd\t-0\n", "-0 0 01 1 "}, /* of one value: by their bytes */
        {"a\t10\nb\t9\nc\tx\n", "10 9 x "},
        {"a\t10\nb\t9\nc\t9a\n", "10 9 9a "},
        {"a\t10\nb\t9\nc\t-\n", "- 10 9 "},
        {"a\t10\nb\t9\nc\t1e1\n", "10 1e1 9 "},
        {"a\t10\nb\t9\nc\t.5\n", ".5 10 9 "}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < TEST_COUNT(of); k++) {
        char text[200], names[100] = "";
        int64_t counts[5], all = 0;
        snprintf(text, sizeof text, "text\tlabel\n%s", of[k].rows);
        tt_dataset *d = table(ctx, "numbers.tsv", text, strlen(text), NULL, NULL, 0);
        REQUIRE(d);
        for (int c = 0; c < tt_dataset_classes(d); c++)
            strcat(strcat(names, tt_dataset_class_name(d, c)), " ");
        if (strcmp(names, of[k].names) != 0) { printf("%s\n", names); CHECK(!"in this order"); }
        for (int i = 0; i < tt_dataset_count(d); i++) { /* each text has its own label still */
            const char letter[] = {'\n', *tt_dataset_text(d, i, NULL), '\t', 0};
            const char *row = strstr(text, letter) + 3;
            const char *name = tt_dataset_class_name(d, tt_dataset_label(d, i));
            CHECK(strncmp(row, name, strlen(name)) == 0 && row[strlen(name)] == '\n');
        }
        tt_dataset_counts(d, counts);
        for (int c = 0; c < tt_dataset_classes(d); c++) all += counts[c];
        CHECK(all == tt_dataset_count(d) && counts[4 % tt_dataset_classes(d)] == (k < 2 ? 2 : 1));
        tt_dataset_free(d);
    }
    TEST_CLOSE(ctx, &a);
}

/* The rows of a table for validation are those whose split says so, under any of four names; none are passed
   over in silence. */
TEST(table_with_validation_rows)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static const char *const wanted[] = {"validation", "valid", "val", "dev"};
    static const char *const classes[] = {"x", "y"};
    static const char whole[] =
        "text,label,split\na,x,train\nb,y,validation\nc,y,train\nd,x,test\ne,x,dev\nf,y,val\ng,x,valid\n";
    static const char none[] = "text,label,split\na,x,train\nb,y,test\n";
    static const char plain[] = "text,label\na,x\nb,y\nc,x\n";
    static const char other[] = "text,label,split\na,x,train\nb,y,unsupervised\nc,x,Train\n";
    for (int k = 0; k < TEST_COUNT(wanted); k++) {
        tt_dataset *d = table(ctx, "w.csv", whole, sizeof whole - 1, wanted[k], classes, 2);
        REQUIRE(d);
        CHECK(tt_dataset_count(d) == 4 && tt_dataset_classes(d) == 2);
        CHECK(row_is(d, 0, "b", 1) && row_is(d, 1, "e", 0) && row_is(d, 2, "f", 1) && row_is(d, 3, "g", 0));
        tt_dataset_free(d);
        for (int without = 0; without < 2; without++) { /* none: an empty dataset, which no loader takes */
            const char *text = without ? plain : none;
            d = table(ctx, "n.csv", text, strlen(text), wanted[k], k ? NULL : classes, k ? 0 : 2);
            REQUIRE(d);
            CHECK(tt_dataset_count(d) == 0 && !tt_dataset_text(d, 0, NULL) && tt_dataset_label(d, 0) == -1);
            tt_tokenizer *tokens = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
            CHECK(tokens && !tt_loader_new(ctx, d, tokens, NULL));
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the dataset is empty");
            CHECK(!tt_dataset_split(d, 1));
            tt_tokenizer_free(tokens);
            tt_dataset_free(d);
        }
    }
    static const char train_only[] = "text,label,split\na,x,train\n";
    tt_dataset *tests = table(ctx, "t.csv", train_only, sizeof train_only - 1, "test", NULL, 0);
    CHECK(tests && tt_dataset_count(tests) == 0);
    tt_dataset_free(tests);
    for (int part = 0; part < 3; part++) {
        static const char *const splits[] = {"train", "test", "dev"};
        CHECK(!table(ctx, "o.csv", other, sizeof other - 1, splits[part], NULL, 0));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, "line 3: the split is 'unsupervised'; expected train, validation (or "
                    "valid, val, dev) or test");
    }
    /* by a name of its own */
    tt_dataset *d = table(ctx, "o.csv", other, sizeof other - 1, "unsupervised", NULL, 0);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 1 && row_is(d, 0, "b", 0));
    tt_dataset_free(d);
    CHECK(!table(ctx, "o.csv", other, sizeof other - 1, "unsuper", NULL, 0));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "no row whose split is 'unsuper'");
    TEST_CLOSE(ctx, &a);
}

TEST(table_options)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static const char text[] = "id;review;text;stars;part\n1;\"so; so\";no;3;train\n2;good, cheap;no;5;dev\n";
    const char *path = test_write(test_path(test_folder(), "a.csv"), text, sizeof text - 1);
    tt_table_options o = tt_table_options_default();
    CHECK(strcmp(o.text_column, "text") == 0 && strcmp(o.label_column, "label") == 0);
    CHECK(strcmp(o.split_column, "split") == 0 && !o.delimiter);
    o.text_column = "review", o.label_column = "stars", o.split_column = "part", o.delimiter = ';';
    tt_dataset *d = tt_dataset_table(ctx, path, NULL, NULL, 0, &o);
    tt_dataset *e = tt_dataset_table(ctx, path, "val", NULL, 0, &o);
    REQUIRE(d && e);
    CHECK(tt_dataset_count(d) == 2 && row_is(d, 0, "so; so", 0) && row_is(d, 1, "good, cheap", 1));
    CHECK(strcmp(tt_dataset_class_name(d, 1), "5") == 0);
    CHECK(tt_dataset_count(e) == 1 && row_is(e, 0, "good, cheap", 0));
    tt_dataset_free(d);
    tt_dataset_free(e);
    o.label_column = "rating";
    CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, &o));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "the header's 5 columns, separated by the character ';', have none named "
                "'rating', but 'id', 'review', 'text', 'stars', 'part'");
    o.delimiter = 0;
    CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, &o));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "the header's 1 columns, separated by commas, have none named 'review', "
                "but 'id;review;text;stars;part'");
    for (const char *bad = "\"\n\r\xE2"; *bad; bad++) {
        o.delimiter = *bad;
        CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, &o));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "table options: the delimiter has the code");
    }
    o = tt_table_options_default();
    o.label_column = "text";
    CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, &o));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "'text', 'text' and 'split'; expected three names");
    o.label_column = NULL;
    CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, &o));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "'text', 'NULL' and 'split'");
    TEST_CLOSE(ctx, &a);
}

/* Without a split column, "train" and "test" share the rows out: each row is in one of them, a tenth of each
   class in "test". */
TEST(table_without_split_is_divided)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char csv[4096] = "text,label\n", row[32];
    int seen[60] = {0}, tests[2] = {0, 0};
    for (int i = 0; i < 60; i++) {
        snprintf(row, sizeof row, "text %d,%s\n", i, i % 3 ? "a" : "b");
        strcat(csv, row);
    }
    for (int part = 0; part < 2; part++)
        for (int again = 0; again < 2; again++) {
            tt_dataset *d = table(ctx, "whole.csv", csv, strlen(csv), part ? "test" : "train", NULL, 0);
            REQUIRE(d);
            CHECK(tt_dataset_count(d) == (part ? 6 : 54) && tt_dataset_classes(d) == 2);
            for (int64_t i = 0; i < tt_dataset_count(d); i++) {
                int k = atoi(tt_dataset_text(d, i, NULL) + 5), label = tt_dataset_label(d, i);
                CHECK(label == (k % 3 == 0));
                seen[k] += part ? 100 : 1;
                tests[label] += part;
            }
            tt_dataset_free(d);
        }
    for (int i = 0; i < 60; i++) CHECK(seen[i] == 2 || seen[i] == 200);
    CHECK(tests[0] == 8 && tests[1] == 4);
    TEST_CLOSE(ctx, &a);
}

static void make_imdb(char folder[600])
{
    char path[800], text[64];
    snprintf(folder, 600, "%.500s", test_folder());
    for (int s = 0; s < 2; s++) {
        snprintf(path, sizeof path, "%s/%s", folder, s ? "test" : "train");
        mkdir(path, 0777);
        for (int c = 0; c < 2; c++) {
            snprintf(path, sizeof path, "%s/%s/%s", folder, s ? "test" : "train", c ? "pos" : "neg");
            mkdir(path, 0777);
            for (int i = 0; i < 12; i++) {
                snprintf(path, sizeof path, "%s/%s/%s/%d_%d.txt", folder, s ? "test" : "train",
                         c ? "pos" : "neg", i, c ? 7 + i % 4 : 1 + i % 4);
                snprintf(text, sizeof text, "%s %s %d", s ? "test" : "train", c ? "good" : "bad", i);
                test_write(path, text, strlen(text));
            }
        }
    }
    snprintf(path, sizeof path, "%s/train/neg/.DS_Store", folder);
    test_write(path, "x", 1);
}

TEST(dataset_imdb)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600], path[800], why[DATASET_WHY] = "";
    make_imdb(folder);
    tt_dataset *d = imdb_open(ctx, folder, "train", 0, why);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 24 && tt_dataset_classes(d) == 2);
    CHECK(strcmp(tt_dataset_class_name(d, 0), "neg") == 0 && strcmp(tt_dataset_class_name(d, 1), "pos") == 0);
    /* 0_, 10_, 11_, 1_ */
    CHECK(row_is(d, 0, "train bad 0", 0) && row_is(d, 1, "train bad 10", 0) &&
          row_is(d, 3, "train bad 1", 0) && row_is(d, 12, "train good 0", 1));
    tt_dataset_free(d);
    d = imdb_open(ctx, folder, "test", 8, why);
    tt_dataset *e = imdb_open(ctx, folder, "test", 8, why);
    REQUIRE(d && e);
    CHECK(tt_dataset_count(d) == 8);
    for (int i = 0; i < 8; i++) {
        CHECK(tt_dataset_label(d, i) == i / 4 &&
              strncmp(tt_dataset_text(d, i, NULL), i < 4 ? "test bad" : "test good", 8) == 0);
        CHECK(strcmp(tt_dataset_text(d, i, NULL), tt_dataset_text(e, i, NULL)) == 0);
        CHECK(i == 0 || strcmp(tt_dataset_text(d, i, NULL), tt_dataset_text(d, i - 1, NULL)) != 0);
    }
    tt_dataset_free(e);
    int differ = 0;
    for (uint64_t seed = 2; seed < 6; seed++) { /* the choice depends on the seed */
        test_allocator b;
        tt_context_options o = test_options(&b);
        o.seed = seed;
        tt_context *other = tt_open(&o);
        e = imdb_open(other, folder, "test", 8, why);
        for (int i = 0; e && i < 8; i++)
            differ += strcmp(tt_dataset_text(d, i, NULL), tt_dataset_text(e, i, NULL)) != 0;
        tt_dataset_free(e);
        TEST_CLOSE(other, &b);
    }
    CHECK(differ > 0);
    tt_dataset_free(d);
    CHECK_WHY(!imdb_open(ctx, folder, "train", 7, why), "use an even number");
    CHECK(!imdb_open(ctx, folder, "train", -2, why));
    CHECK_WHY(!imdb_open(ctx, folder, "train", 26, why), "it holds 12: use a limit of at most 24");
    CHECK_WHY(!imdb_open(ctx, folder, "unsup", 0, why), "no split 'unsup'");
    CHECK_WHY(!imdb_open(ctx, "/nonexistent", "train", 0, why),
              "cannot list the folder '/nonexistent/train/neg'");
    snprintf(path, sizeof path, "%s/train/pos/12_3.txt", folder);
    test_write(path, "x", 1);
    CHECK_WHY(!imdb_open(ctx, folder, "train", 0, why),
              "train/pos/12_3.txt' is not named NUMBER_RATING.txt with a rating from 7 to 10");
    remove(path);
    snprintf(path, sizeof path, "%s/train/pos/100_10.txt", folder);
    char *large = (char *)calloc(1, (1 << 20) + 1);
    CHECK_WHY(!imdb_open(ctx, test_write(path, large, (1 << 20) + 1) ? folder : "", "train", 0, why),
              "100_10.txt' has 1048577 bytes");
    free(large);
    remove(path);
    for (int i = 0; i < 12; i++) {
        snprintf(path, sizeof path, "%s/test/neg/%d_%d.txt", folder, i, 1 + i % 4);
        remove(path);
    }
    CHECK_WHY(!imdb_open(ctx, folder, "test", 0, why), "test/neg' holds no NUMBER_RATING.txt");
    TEST_CLOSE(ctx, &a);
}

/* Each call of the C library and each allocation fails once: a sentence that names the file and says why. */
TEST(imdb_faults)
{
    static const struct { char kind; const char *says; } faults[] = {
        {'m', "out of memory"}, {'o', "cannot open '"}, {'z', "cannot open '"}, {'r', "cannot read '"},
        {'c', "was cut off at byte 0 while it was read"}, {'l', "cannot list the folder '"},
        {'n', "cannot list the folder '"}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600], why[DATASET_WHY];
    make_imdb(folder);
    size_t before = tt_allocated_bytes(ctx);
    for (int k = 0; k < TEST_COUNT(faults); k++) {
        bool done = false;
        for (long at = 1; !done && at < 200; at++) {
            memset(why, 0, sizeof why);
            reader_faults.fail = faults[k].kind, reader_faults.at = at, reader_faults.calls = 0;
            tt_dataset *d = imdb_open(ctx, folder, "train", 8, why);
            done = reader_faults.calls < at;
            reader_faults.fail = 0;
            CHECK(done == (d != NULL));
            if (!d) CHECK(strstr(why, faults[k].says) && (faults[k].kind == 'm' || strstr(why, folder)));
            if (!d && !strchr("mc", faults[k].kind)) CHECK(strstr(why, strerror(EIO)));
            tt_dataset_free(d);
            CHECK(tt_allocated_bytes(ctx) == before);
        }
        CHECK(done);
    }
    for (long n = 1, done = 0; !done; n++) { /* the library's own allocations */
        a.failed = false;
        a.fail_at = a.calls + n;
        tt_dataset *d = imdb_open(ctx, folder, "test", 8, why);
        CHECK((d != NULL) == !a.failed);
        if (!d) CHECK_WHY(tt_error_code(ctx) == TT_ERR_MEMORY, "memory");
        done = d != NULL;
        tt_dataset_free(d);
        CHECK(tt_allocated_bytes(ctx) == before && n < 100);
    }
    char path[800];
    /* In the place of a review, what is no file. */
    snprintf(path, sizeof path, "%s/train/pos/3_10.txt", folder);
    CHECK(remove(path) == 0 && mkdir(path, 0777) == 0);
    CHECK_WHY(!imdb_open(ctx, folder, "train", 0, why), "pos/3_10.txt' is no regular file");
    TEST_CLOSE(ctx, &a);
}

TEST(imdb_encodings)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600], path[800], why[DATASET_WHY];
    make_imdb(folder);
    snprintf(path, sizeof path, "%s/train/neg/0_1.txt", folder);
    test_write(path, "\xEF\xBB\xBFgood", 7);
    tt_dataset *d = imdb_open(ctx, folder, "train", 0, why);
    REQUIRE(d);
    CHECK(row_is(d, 0, "good", 0));
    tt_dataset_free(d);
    test_write(path, "caf\xE9", 4);
    CHECK_WHY(!imdb_open(ctx, folder, "train", 0, why),
              "train/neg/0_1.txt', line 1, byte 3: 0xe9 begins no character of UTF-8");
    TEST_CLOSE(ctx, &a);
}

TEST(dataset_texts)
{
    static const char *const names[] = {"no", "yes"}, *const wrong[] = {"no", "\xff"};
    tt_text texts[] = {{"a\0b", 3, 1}, {NULL, 0, 0}, {"longer", 4, 1}, {"d", 1, 0}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    size_t bytes;
    tt_dataset *d = tt_dataset_texts(ctx, texts, 4, names, 2);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 4 && tt_dataset_classes(d) == 2);
    CHECK(memcmp(tt_dataset_text(d, 0, &bytes), "a\0b", 4) == 0 && bytes == 3 && tt_dataset_label(d, 0) == 1);
    CHECK(strcmp(tt_dataset_text(d, 1, &bytes), "") == 0 && bytes == 0);
    CHECK(row_is(d, 2, "long", 1) && row_is(d, 3, "d", 0));
    CHECK(strcmp(tt_dataset_class_name(d, 1), "yes") == 0);
    tt_dataset *part = tt_dataset_split(d, 2); /* one of each class */
    REQUIRE(part);
    CHECK(tt_dataset_label(part, 0) != tt_dataset_label(part, 1) && tt_dataset_count(d) == 2);
    tt_dataset_free(part);
    tt_dataset_free(d);
    CHECK(!tt_dataset_texts(ctx, texts, 0, names, 2) &&
          !tt_dataset_texts(ctx, texts, (int64_t)INT_MAX + 1, names, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: 2147483648 texts of 2 classes");
    CHECK(!tt_dataset_texts(ctx, NULL, 4, NULL, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "4 texts (NULL) of 2 classes (NULL)");
    CHECK(!tt_dataset_texts(ctx, texts, 4, names, 1));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "text 0 has label 1; labels go from 0 to 0");
    CHECK(!tt_dataset_texts(ctx, texts, 4, wrong, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "breaks off at byte 0xff");
    texts[1].bytes = 1;
    CHECK(!tt_dataset_texts(ctx, texts, 4, names, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: text 1 is NULL");
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------------------- loader */

static tt_dataset *words(tt_context *ctx, int n) /* text i has i * 37 % 29 words, from none on */
{
    size_t capacity = (size_t)n * 100 + 100, used = 0;
    char *text = (char *)malloc(capacity);
    used += (size_t)snprintf(text, capacity, "text\tlabel\n");
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < i * 37 % 29; k++)
            used += (size_t)snprintf(text + used, capacity - used, "%c ", 'a' + (i + k) % 26);
        used += (size_t)snprintf(text + used, capacity - used, "\tc%d\n", i % 3);
    }
    tt_dataset *d = table(ctx, "words.tsv", text, used, NULL, NULL, 0);
    free(text);
    return d;
}

typedef struct epoch_log { int micro, steps, seqs; int64_t *index; int *step_of; int *micro_of; } epoch_log;

static void log_free(epoch_log *log) { free(log->index); free(log->step_of); free(log->micro_of); }

/* Reads to the end of the epoch and checks every batch by itself. */
static epoch_log read_epoch(tt_loader *l, const tt_dataset *d, const tt_tokenizer *k,
                            const tt_loader_options *o, int64_t epoch, int64_t step)
{
    epoch_log log = {0, 0, 0, NULL, NULL, NULL};
    tt_batch b;
    size_t n = (size_t)tt_dataset_count(d);
    int32_t want[600];
    log.index = (int64_t *)calloc(n, sizeof *log.index);
    log.step_of = (int *)calloc(n, sizeof *log.step_of);
    log.micro_of = (int *)calloc(n, sizeof *log.micro_of);
    CHECK(tt_loader_seek(l, epoch, step) == TT_OK);
    while (tt_loader_next(l, &b)) {
        CHECK(b.seqs >= 1 && b.seqs <= tt_loader_max_seqs(l) && b.rows <= tt_loader_max_tokens(l) &&
              b.seq_start[0] == 0 && b.seq_start[b.seqs] == b.rows);
        for (int i = 0; i < b.seqs; i++) {
            size_t bytes;
            const char *text = tt_dataset_text(d, b.index[i], &bytes);
            int length = tt_tokenize(k, text, bytes, want, o->max_length), from = b.seq_start[i];
            /* complete, without padding */
            CHECK(b.seq_start[i + 1] - from == length && memcmp(b.ids + from, want, (size_t)length * 4) == 0);
            for (int p = 0; p < length; p++) CHECK(b.positions[from + p] == p && b.types[from + p] == 0);
            CHECK(b.labels[i] == tt_dataset_label(d, b.index[i]));
            if (!CHECK((size_t)log.seqs < n)) return log;
            log.index[log.seqs] = b.index[i];
            log.step_of[log.seqs] = log.steps;
            log.micro_of[log.seqs++] = log.micro;
        }
        log.micro++;
        log.steps += b.last_of_step;
    }
    CHECK(tt_loader_status(l) == TT_OK && !tt_loader_next(l, &b));
    return log;
}

TEST(loader_batches)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    enum { N = 103 };
    tt_dataset *d = words(ctx, N);
    REQUIRE(k && d);
    /* batch, accumulate, max_length, max_tokens, window, drop_last */
    static const int configurations[][6] = {
        {16, 1, 512, 0, 50, 0}, {16, 4, 12, 0, 3, 0}, {16, 3, 20, 25, 2, 1}, {1, 1, 30, 0, 7, 0},
        {7, 7, 9, 0, 0, 1}, {200, 1, 64, 0, 50, 0}, {5, 1, 10, 10, 1, 0}, {103, 2, 40, 100, 4, 1},
        {8, 1, 2, 0, 2, 0}};
    for (int c = 0; c < TEST_COUNT(configurations); c++) {
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            tt_loader_options o = tt_loader_options_default();
            epoch_log first = {0, 0, 0, NULL, NULL, NULL};
            o.batch = configurations[c][0];
            o.accumulate = configurations[c][1];
            o.max_length = configurations[c][2];
            o.max_tokens = configurations[c][3];
            o.window = configurations[c][4];
            o.drop_last = configurations[c][5] != 0;
            o.shuffle = shuffle != 0;
            for (int threads = 0; threads < 5; threads++) {
                o.threads = threads;
                tt_loader *l = tt_loader_new(ctx, d, k, &o);
                REQUIRE(l);
                int expected = o.drop_last ? N / o.batch : (N + o.batch - 1) / o.batch,
                    used = o.drop_last ? N / o.batch * o.batch : N, seen[N] = {0};
                CHECK(tt_loader_steps(l) == expected);
                epoch_log e = read_epoch(l, d, k, &o, 0, 0);
                CHECK(e.steps == expected && e.seqs == used);
                for (int i = 0; i < e.seqs; i++) {
                    CHECK(!seen[e.index[i]]++);
                    CHECK(e.step_of[i] == i / o.batch); /* all steps whole, but for the last */
                    if (!shuffle) CHECK(e.index[i] == i);
                    /* Longest first. */
                    if (i && shuffle && o.window > 1 && e.step_of[i] == e.step_of[i - 1]) {
                        size_t n0, n1;
                        const char *t0 = tt_dataset_text(d, e.index[i - 1], &n0),
                                   *t1 = tt_dataset_text(d, e.index[i], &n1);
                        int32_t ids[600];
                        int l0 = tt_tokenize(k, t0, n0, ids, o.max_length),
                            l1 = tt_tokenize(k, t1, n1, ids, o.max_length);
                        CHECK(l0 >= l1);
                    }
                }
                if (threads == 0) { first = e; }
                else { /* the same for any number of threads */
                    CHECK(first.seqs == e.seqs && first.micro == e.micro &&
                          memcmp(first.index, e.index, (size_t)e.seqs * sizeof *e.index) == 0 &&
                          memcmp(first.micro_of, e.micro_of, (size_t)e.seqs * sizeof(int)) == 0);
                    log_free(&e);
                }
                epoch_log second = read_epoch(l, d, k, &o, 1, 0), again = read_epoch(l, d, k, &o, 0, 0);
                CHECK(again.micro == first.micro &&
                      memcmp(first.index, again.index, (size_t)first.seqs * sizeof *first.index) == 0);
                if (shuffle && o.batch < 100)
                    CHECK(memcmp(first.index, second.index, (size_t)first.seqs * sizeof *first.index) != 0);
                log_free(&again);
                for (int step = expected; step >= 0; step -= 2) { /* seek equals reading */
                    epoch_log rest = read_epoch(l, d, k, &o, 1, step);
                    int skip = step * o.batch < second.seqs ? step * o.batch : second.seqs;
                    CHECK(rest.seqs == second.seqs - skip && rest.steps == expected - step);
                    const size_t bytes = (size_t)rest.seqs * sizeof *rest.index;
                    CHECK(memcmp(rest.index, second.index + skip, bytes) == 0);
                    log_free(&rest);
                }
                log_free(&second);
                CHECK(tt_loader_waited(l) >= 0);
                tt_loader_free(l);
            }
            log_free(&first);
        }
    }
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* A table that lists class after class, of texts that are cut to the same length: steps that hold one class
   only are as rare as by chance. With halves and 16 texts a step, chance gives 2^-15 a step. */
TEST(loader_mixes_texts_of_the_same_length)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    enum { N = 640, BATCH = 16 };
    static char text[N * 64];
    size_t used = (size_t)snprintf(text, sizeof text, "text\tlabel\n");
    for (int i = 0; i < N; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "a b c d e f %c %c\t%s\n", 'a' + i % 26,
                                 'a' + i / 26 % 26, i < N / 2 ? "first" : "second");
    tt_dataset *d = table(ctx, "by_class.tsv", text, used, NULL, NULL, 0);
    tt_loader_options o = tt_loader_options_default();
    o.batch = BATCH;
    o.max_length = 6;
    REQUIRE(k && d);
    tt_loader *l = tt_loader_new(ctx, d, k, &o);
    REQUIRE(l);
    for (int epoch = 0; epoch < 3; epoch++) {
        epoch_log e = read_epoch(l, d, k, &o, epoch, 0);
        int of_second[N / BATCH] = {0};
        CHECK(e.seqs == N && e.steps == N / BATCH);
        for (int i = 0; i < e.seqs; i++) of_second[e.step_of[i]] += e.index[i] >= N / 2;
        for (int step = 0; step < N / BATCH; step++) CHECK(of_second[step] > 0 && of_second[step] < BATCH);
        log_free(&e);
    }
    tt_loader_free(l);
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* greedy: each is full, in sequences or tokens, or ends its step; length buckets; seeds */
TEST(loader_micro_batches)
{
    test_allocator a, b;
    tt_context *ctx = test_open(&a);
    tt_context_options other = test_options(&b);
    other.seed = 2;
    tt_context *ctx2 = tt_open(&other);
    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    tt_dataset *d = words(ctx, 200);
    tt_loader_options o = tt_loader_options_default();
    tt_batch x, y;
    REQUIRE(k && d);
    o.batch = 20; o.accumulate = 3; o.max_length = 31; o.max_tokens = 100; o.window = 4;
    tt_loader *l = tt_loader_new(ctx, d, k, &o), *m = tt_loader_new(ctx2, d, k, &o);
    REQUIRE(l && m);
    CHECK(tt_loader_max_seqs(l) == 7 && tt_loader_max_tokens(l) == 100);
    int differ = 0, more = 1, full_tokens = 0, longer = 0, longest = 0, first = 1, steps = 0;
    while (more) {
        bool got = tt_loader_next(l, &x), got2 = tt_loader_next(m, &y);
        if (got && got2 && x.seqs && y.seqs) differ += x.index[0] != y.index[0];
        /* The next is no longer than the last. */
        if (got && !x.last_of_step && x.seqs < 7) {
            full_tokens++;
            CHECK(x.rows + (x.seq_start[x.seqs] - x.seq_start[x.seqs - 1]) > 100);
        }
        /* Within a window, steps are not in order of length. */
        if (got && first && ++steps % 4 != 1) longer += x.seq_start[1] > longest;
        if (got && first) longest = x.seq_start[1];
        first = got && x.last_of_step;
        more = got;
    }
    CHECK(differ > 5 && full_tokens > 3 && longer > 0);
    tt_loader_free(l);
    tt_loader_free(m);

    static const struct {
        int batch, accumulate, length, tokens, window, threads;
        const char *error;
    } bad[] = {{0, 1, 9, 0, 1, 1, "batch = 0"},
               {4, 0, 9, 0, 1, 1, "accumulate = 0"},
               {4, 5, 9, 0, 1, 1, "1 <= accumulate <= batch"},
               {4, 1, 1, 0, 1, 1, "max_length = 1"},
               {4, 1, 9, 8, 1, 1, "max_tokens = 8"},
               {4, 1, 9, -1, 1, 1, "max_tokens = -1"},
               {4, 1, 9, 0, -1, 1, "window = -1"},
               {4, 1, 9, 0, 1, -1, "threads = -1"},
               {4, 1, 9, 0, 1, 65, "threads = 65"},
               {1 << 30, 1, 512, 0, 1, 1, "set max_tokens"}};
    for (int i = 0; i < TEST_COUNT(bad); i++) {
        o.batch = bad[i].batch;
        o.accumulate = bad[i].accumulate;
        o.max_length = bad[i].length;
        o.max_tokens = bad[i].tokens;
        o.window = bad[i].window;
        o.threads = bad[i].threads;
        CHECK(!tt_loader_new(ctx, d, k, &o));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, bad[i].error);
    }
    o = tt_loader_options_default();
    o.batch = 201;
    o.drop_last = true;
    CHECK(!tt_loader_new(ctx, d, k, &o));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "200 texts make no whole step");
    l = tt_loader_new(ctx, d, k, NULL);
    REQUIRE(l);
    CHECK(tt_loader_seek(l, 0, 14) == TT_ERR_ARGUMENT && tt_loader_seek(l, -1, 0) == TT_ERR_ARGUMENT &&
          tt_loader_seek(l, 0, -1) == TT_ERR_ARGUMENT && tt_loader_seek(l, 0, 13) == TT_OK);
    CHECK(!tt_loader_next(l, &x) && tt_loader_status(l) == TT_OK);
    tt_loader_free(l);
    for (int i = 0; i < 30; i++) { /* freed while its threads work */
        o = tt_loader_options_default();
        o.threads = 1 + i % 4;
        l = tt_loader_new(ctx, d, k, &o);
        REQUIRE(l);
        if (i % 3) CHECK(tt_loader_seek(l, i, i % 13) == TT_OK);
        if (i % 2) CHECK(tt_loader_next(l, &x));
        tt_loader_free(l);
    }
    tt_loader_free(NULL);
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx2, &b);
    TEST_CLOSE(ctx, &a);
}

/* A step is dealt out to the groups of the tree of sums: the same micro-batches for any number of data ranks,
   none lost, as many for each group as there are sequences, of like numbers of tokens. */
TEST(loader_deals_out_to_groups)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    enum { N = 213 };
    tt_dataset *d = words(ctx, N);
    static const struct { int batch, accumulate, tokens, groups; bool shuffle; } c[] = {
        {16, 1, 0, 2, true}, {16, 1, 0, 4, true}, {16, 1, 0, 4, false}, {16, 2, 0, 4, true},
        {16, 2, 0, 8, true}, {17, 3, 0, 3, true}, {32, 1, 0, 8, true}, {32, 3, 0, 8, true},
        {24, 1, 60, 4, true}, {24, 2, 40, 4, false}, {300, 5, 0, 4, true}, {300, 1, 100, 8, true},
        {8, 1, 30, 8, true}};
    REQUIRE(k && d);
    for (int i = 0; i < TEST_COUNT(c); i++) {
        epoch_log first = {0, 0, 0, NULL, NULL, NULL}, plain = first;
        tt_loader_options o = tt_loader_options_default();
        o.batch = c[i].batch, o.accumulate = c[i].accumulate, o.max_tokens = c[i].tokens;
        o.max_length = 30, o.shuffle = c[i].shuffle, o.window = 4;
        tt_loader *l = tt_loader_new(ctx, d, k, &o);
        REQUIRE(l);
        plain = read_epoch(l, d, k, &o, 1, 0);
        tt_loader_free(l);
        const int groups = o.parallel.groups = c[i].groups;
        const int seqs = (o.batch + o.accumulate * groups - 1) / (o.accumulate * groups);
        for (int data = 0; data <= groups; data++) { /* 0: on one rank */
            if (data && groups % data) continue;
            o.parallel.data = data;
            l = tt_loader_new(ctx, d, k, &o);
            REQUIRE(l);
            CHECK(tt_loader_max_seqs(l) <= seqs && (c[i].tokens || tt_loader_max_seqs(l) == seqs));
            epoch_log e = read_epoch(l, d, k, &o, 1, 0);
            if (!data) first = e;
            const size_t micros = (size_t)e.seqs * sizeof(int);
            CHECK(e.seqs == N && e.micro == first.micro && memcmp(e.micro_of, first.micro_of, micros) == 0 &&
                  memcmp(e.index, first.index, N * sizeof *e.index) == 0);
            epoch_log rest = read_epoch(l, d, k, &o, 1, e.steps / 2);
            const int skip = e.steps / 2 * o.batch;
            CHECK(rest.seqs == N - skip &&
                  memcmp(rest.index, e.index + skip, (size_t)rest.seqs * sizeof *e.index) == 0);
            log_free(&rest);
            int most = 0, more = 0;
            double largest = 0, all = 0; /* of the tokens that ranks wait for, if each has a micro-batch */
            for (int at = 0; at < N;) {
                bool in[N] = {false};
                int n = 0, parts = 0, tokens[N] = {0}, peak = 0;
                for (; at + n < N && e.step_of[at + n] == e.step_of[at]; n++) in[e.index[at + n]] = true;
                for (int q = at; q < at + n; q++) {
                    const int m = e.micro_of[q] - e.micro_of[at];
                    size_t bytes;
                    int32_t ids[30];
                    const char *text = tt_dataset_text(d, e.index[q], &bytes);
                    CHECK(in[plain.index[q]] && plain.step_of[q] == e.step_of[q]); /* a step has the same */
                    tokens[m] += tt_tokenize(k, text, bytes, ids, 30);
                    peak = tokens[m] > peak ? tokens[m] : peak;
                    parts = m + 1;
                }
                const int whole = groups * ((n + groups * seqs - 1) / (groups * seqs));
                CHECK(parts == n || (parts % groups == 0 && parts >= whole));
                if (!c[i].tokens) CHECK(parts == (whole < n ? whole : n));
                for (int m = 0; m < parts && parts < n; m++) all += tokens[m];
                if (parts < n) largest += (double)peak * parts;
                most = parts > most ? parts : most;
                more += parts > (data ? data : 1);
                at += n;
            }
            CHECK(tt_loader_accumulates(l) || !more);
            if (!c[i].tokens) CHECK(tt_loader_accumulates(l) == (more > 0));
            if (all > 0 && c[i].shuffle) CHECK(largest <= 1.12 * all);
            tt_loader_free(l);
            if (data) log_free(&e);
        }
        log_free(&first);
        log_free(&plain);
    }
    static const struct { int batch, accumulate, groups, data; const char *error; } bad[] = {
        {16, 1, -1, 0, "parallel.groups = -1"}, {16, 1, 4, 3, "parallel.groups = 4 and parallel.data = 3"},
        {16, 1, 0, -2, "parallel.data = -2"}, {16, 3, 8, 8, "accumulate = 3 for each of 8 groups: set batch "
        "to 24 at least"}, {4, 1, 0, 8, "batch = 4 has fewer sequences than micro-batches"}};
    for (int i = 0; i < TEST_COUNT(bad); i++) {
        tt_loader_options o = tt_loader_options_default();
        o.batch = bad[i].batch, o.accumulate = bad[i].accumulate;
        o.parallel.groups = bad[i].groups, o.parallel.data = bad[i].data;
        CHECK(!tt_loader_new(ctx, d, k, &o));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, bad[i].error);
    }
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* What a trainer must have room for is what the texts need, not what max_length would allow. */
TEST(loader_capacity_is_that_of_the_texts)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    enum { N = 300 };
    tt_dataset *d = words(ctx, N);
    static const struct { int batch, accumulate, length, tokens; bool shuffle; } c[] = {
        {16, 1, 512, 0, true}, {16, 1, 512, 0, false}, {16, 4, 512, 0, true}, {16, 1, 20, 0, true},
        {500, 1, 512, 0, true}, {16, 1, 512, 600, true}, {16, 1, 512, 512, true}, {16, 1, 20, 100, true},
        {1, 1, 512, 0, true}, {16, 1, 30, 480, true}};
    REQUIRE(k && d);
    for (int i = 0; i < TEST_COUNT(c); i++) {
        int32_t ids[600];
        int length[N], longest = 0, cut = 0, micro = 0, step = 0, parts = 0, most = 0;
        tt_loader_options o = tt_loader_options_default();
        tt_batch b;
        o.batch = c[i].batch, o.accumulate = c[i].accumulate, o.max_length = c[i].length;
        o.max_tokens = c[i].tokens, o.shuffle = c[i].shuffle;
        tt_loader *l = tt_loader_new(ctx, d, k, &o);
        REQUIRE(l);
        for (int t = 0; t < N; t++) {
            size_t n;
            const char *text = tt_dataset_text(d, t, &n);
            int whole = tt_tokenize(k, text, n, ids, 600);
            longest = whole > longest ? whole : longest;
            cut += whole > c[i].length;
            length[t] = whole < c[i].length ? whole : c[i].length;
            for (int s = t; s && length[s] > length[s - 1]; s--) { /* longest first */
                int other = length[s];
                length[s] = length[s - 1];
                length[s - 1] = other;
            }
        }
        int seqs = (c[i].batch + c[i].accumulate - 1) / c[i].accumulate;
        for (int t = 0; t < N && t < c[i].batch; t++) {
            step += length[t];
            micro += t < seqs ? length[t] : 0;
        }
        CHECK(tt_loader_longest(l) == longest && longest == 30);
        CHECK(tt_loader_cut(l) == cut && (cut > 0) == (c[i].length < 30));
        CHECK(tt_loader_max_tokens(l) == (c[i].tokens && c[i].tokens < micro ? c[i].tokens : micro));
        CHECK(tt_loader_accumulates(l) == (c[i].accumulate > 1 || step > tt_loader_max_tokens(l)));
        for (int epoch = 0; epoch < 20; epoch++) {
            CHECK(tt_loader_seek(l, epoch, 0) == TT_OK);
            while (tt_loader_next(l, &b)) {
                CHECK(b.rows <= tt_loader_max_tokens(l) && b.seqs <= tt_loader_max_seqs(l));
                most = b.rows > most ? b.rows : most;
                parts += !b.last_of_step;
            }
        }
        /* it is not far from what is used */
        if (c[i].shuffle && !c[i].tokens) CHECK(most > tt_loader_max_tokens(l) * 9 / 10);
        if (!tt_loader_accumulates(l)) CHECK(parts == 0);
        tt_loader_free(l);
    }
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* --------------------------------------------------------------------------------- failures of allocation */

static bool use_everything(tt_context *ctx, const char *folder, const char *csv, const char *safetensors)
{
    static const char *const classes[] = {"c0", "c1", "c2"}, *const metadata[] = {"step", "3", NULL};
    tt_tensor_info t = tensor("a", "F32", 1, 1, 0);
    tt_safetensors_writer *w = tt_safetensors_begin(ctx, safetensors, &t, 1, metadata);
    bool ok = w && tt_safetensors_write(w, "1234", 4) == TT_OK;
    if (w) ok = tt_safetensors_end(w) == TT_OK && ok;
    tt_safetensors *s = ok ? tt_safetensors_open(ctx, safetensors) : NULL;
    tt_tokenizer *k = s ? tt_tokenizer_load(ctx, folder) : NULL;
    static const tt_text texts[] = {{"x", 1, 0}, {"y", 1, 1}, {"z", 1, 2}};
    tt_dataset *i = k ? tt_dataset_texts(ctx, texts, 3, classes, 3) : NULL;
    tt_dataset *c = i ? tt_dataset_table(ctx, csv, NULL, classes, 3, NULL) : NULL;
    tt_dataset *d = c ? tt_dataset_table(ctx, csv, NULL, NULL, 0, NULL) : NULL;
    tt_loader_options o = tt_loader_options_default();
    o.threads = 2;
    tt_loader *l = d ? tt_loader_new(ctx, d, k, &o) : NULL;
    tt_batch b;
    int steps = 0;
    while (l && tt_loader_next(l, &b)) steps += b.last_of_step;
    ok = l && steps == tt_loader_steps(l) && tt_loader_status(l) == TT_OK;
    tt_loader_free(l);
    tt_dataset_free(d);
    tt_dataset_free(c);
    tt_dataset_free(i);
    tt_tokenizer_free(k);
    tt_safetensors_close(s);
    return ok;
}

TEST(allocation_failures) /* each allocation fails once: an error that says so, nothing leaked, no crash */
{
    char folder[600], path[800], csv[800], safetensors[800];
    make_imdb(folder);
    snprintf(path, sizeof path, "%s/vocab.txt", folder);
    test_write(path, "[UNK]\n[CLS]\n[SEP]\na\nb\nc\nd\ne\nf\ng\nh\ni\nj\nk\nl\nm\nn\n", 46);
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    test_write(path, "{\"do_lower_case\": true, \"a\": [1, 2, {\"x\": \"y\"}]}", 48);
    snprintf(safetensors, sizeof safetensors, "%s/a.safetensors", folder);
    snprintf(csv, sizeof csv, "%s/a.tsv", folder);
    FILE *f = fopen(csv, "w");
    REQUIRE(f);
    fprintf(f, "text\tlabel\n");
    for (int i = 0; i < 100; i++) fprintf(f, "a b c d e\tc%d\n", i % 3);
    fclose(f);
    bool done = false;
    long n = 1;
    for (; !done && n < 1000; n++) {
        test_allocator a;
        tt_context_options o = test_options(&a);
        tt_context *ctx = tt_open(&o);
        REQUIRE(ctx);
        a.fail_at = a.calls + n;
        size_t before = tt_allocated_bytes(ctx); /* the context's own */
        bool ok = use_everything(ctx, folder, csv, safetensors);
        CHECK(ok == !a.failed);
        if (!ok) CHECK_ERROR(ctx, TT_ERR_MEMORY, "memory");
        CHECK(tt_allocated_bytes(ctx) == before);
        done = ok;
        TEST_CLOSE(ctx, &a);
    }
    CHECK(done && n > 40);
}

/* --------------------------------------------------------------------------------------------------- fuzz */

/* Files in memory. */
typedef struct memory_file { const char *bytes; size_t n; } memory_file;
static void *memory_open(void *user, const char *path, char mode)
{
    (void)path;
    return mode == 'r' ? user : NULL;
}
static int64_t memory_size(void *user, void *file) { (void)user; return (int64_t)((memory_file *)file)->n; }
static bool memory_read(void *user, void *file, uint64_t at, void *to, size_t n)
{
    (void)user;
    CHECK(at <= ((memory_file *)file)->n && n <= ((memory_file *)file)->n - at); /* never beyond its end */
    memcpy(to, ((memory_file *)file)->bytes + at, n);
    return true;
}
static bool memory_close(void *user, void *file) { (void)user; (void)file; return true; }

static size_t mutate(uint64_t *seed, char *bytes, size_t n, size_t capacity)
{
    static const char interesting[] = "\"{}[]:,\\0123456789-+.eE \t\n\rtfnu\0\x80\xC3\xED\xFF";
    for (uint32_t rounds = 1 + test_random(seed) % 6; rounds; rounds--) {
        size_t at = n ? test_random(seed) % n : 0, from = n ? test_random(seed) % n : 0,
               length = test_random(seed) % 12;
        switch (test_random(seed) % 6) {
        case 0: if (n) bytes[at] = (char)test_random(seed); break;
        case 1: if (n) bytes[at] = interesting[test_random(seed) % (sizeof interesting - 1)]; break;
        case 2: if (n) bytes[at] = (char)(bytes[at] ^ 1 << test_random(seed) % 8); break;
        case 3: n = test_random(seed) % 8 ? n : at; break;
        case 4: if (at + length <= n && from + length <= n) memmove(bytes + at, bytes + from, length); break;
        default:
            if (n + length <= capacity && at + length <= n) {
                memmove(bytes + at + length, bytes + at, n - at);
                n += length;
            } else if (at + length <= n) {
                memmove(bytes + at, bytes + at + length, n - at - length);
                n -= length;
            }
        }
    }
    return n;
}

TEST(fuzz)
{
    static const char json[] = "{\"a\":[1,-2.5e3,true,false,null,\"x\\u00e9\\ud83d\\ude00\"],"
                               "\"b\":{\"c\":{\"dtype\":\"F32\"}},\"d\":[[],{}]}";
    static const char header[] = "{\"__metadata__\":{\"k\":\"v\"}," T_("a", "F32", "[2]", 0, 8) ","
                                 T_("b", "I8", "[3,1]", 8, 11) "," T_("c", "BF16", "[]", 11, 13) "}  ";
    static const char csv[] =
        "text\tlabel\tsplit\n\"a\t\"\"b\"\"\n\"\tpos\ttrain\r\nplain\tneg\ttest\n\n\"x\"\t\"pos\"\ttrain\n";
    static const char text[] = "Caf\xC3\xA9 \xE4\xB8\xAD\xE5\x9B\xBD don't \xF0\x9F\x98\x80 \xED\x95\x9C "
                               "naIve\xCC\x81 [SEP] 100%\xE2\x80\x94wordlessness";
    test_allocator a;
    memory_file file;
    tt_context_options o = test_options(&a);
    tt_context *files = tt_open(&o);
    tt_tokenizer *k = tt_tokenizer_open(files, TEST_GOLDEN("vocab_uncased.txt"), true);
    o.files.open = memory_open;
    o.files.size = memory_size;
    o.files.read = memory_read;
    o.files.close = memory_close;
    o.files.user = &file;
    tt_context *ctx = tt_open(&o);
    uint64_t seed = 20240229, length = sizeof header - 1;
    char whole[1024], bytes[2048];
    int good[4] = {0};
    REQUIRE(k && ctx);
    size_t before = tt_allocated_bytes(ctx);
    memcpy(whole, &length, 8);
    memcpy(whole + 8, header, sizeof header - 1);
    memset(whole + 8 + length, 1, 13);
    for (int i = 0; i < 20000; i++) {
        int kind = i % 4;
        const char *from = kind == 0 ? json : kind == 1 ? whole : kind == 2 ? csv : text;
        size_t n = kind == 0 ? sizeof json - 1
                   : kind == 1 ? 8 + (size_t)length + 13
                   : kind == 2 ? sizeof csv - 1
                   : sizeof text - 1;
        memcpy(bytes, from, n);
        n = mutate(&seed, bytes, n, sizeof bytes);
        char *exact = (char *)malloc(n ? n : 1);
        memcpy(exact, bytes, n);
        file.bytes = exact;
        file.n = n;
        if (kind == 0) {
            good[0] += parses(ctx, exact, n);
        } else if (kind == 1) {
            tt_safetensors *s = tt_safetensors_open(ctx, "fuzz");
            /* All that it says is there can be read. */
            for (int t = 0; s && t < tt_safetensors_count(s); t++) {
                free(test_tensor(s, t));
                CHECK(tt_safetensors_find(s, tt_safetensors_info(s, t)->name) == t);
            }
            good[1] += s != NULL;
            if (!s) CHECK(tt_error_code(ctx) == TT_ERR_FORMAT);
            tt_safetensors_close(s);
        } else if (kind == 2) {
            tt_dataset *d = tt_dataset_table(ctx, "fuzz", i % 8 == 2 ? "train" : NULL, NULL, 0, NULL);
            for (int64_t r = 0; d && r < tt_dataset_count(d); r++) {
                size_t size;
                const char *row = tt_dataset_text(d, r, &size);
                CHECK(row[size] == 0 && tt_dataset_label(d, r) >= 0 &&
                      tt_dataset_label(d, r) < tt_dataset_classes(d));
            }
            good[2] += d != NULL;
            if (!d) CHECK(tt_error_code(ctx) == TT_ERR_FORMAT);
            tt_dataset_free(d);
        } else {
            int max = 2 + (int)(test_random(&seed) % 40);
            int32_t *ids = (int32_t *)malloc((size_t)max * 4);
            int count = tt_tokenize(k, exact, n, ids, max);
            CHECK(count >= 2 && count <= max && ids[0] == tt_tokenizer_find(k, "[CLS]") &&
                  ids[count - 1] == tt_tokenizer_find(k, "[SEP]"));
            for (int p = 0; p < count; p++) CHECK(ids[p] >= 0 && ids[p] < tt_tokenizer_size(k));
            good[3]++;
            free(ids);
        }
        free(exact);
    }
    /* The mutations are not so strong that all is refused at once. */
    for (int i = 0; i < 4; i++) CHECK(good[i] > 20);
    CHECK(tt_allocated_bytes(ctx) == before);
    tt_close(ctx);
    tt_tokenizer_free(k);
    TEST_CLOSE(files, &a);
}

static const test_case tests[] = {
    TEST_CASE(json_values), TEST_CASE(json_strings), TEST_CASE(json_errors), TEST_CASE(json_many_keys),
    TEST_CASE(safetensors_round_trip), TEST_CASE(safetensors_numbers), TEST_CASE(safetensors_hostile),
    TEST_CASE(safetensors_truncated), TEST_CASE(safetensors_cut_off_while_read), TEST_CASE(a_pipe_is_refused),
    TEST_CASE(safetensors_writer_errors), TEST_CASE(safetensors_write_faults), TEST_CASE(safetensors_many),
    TEST_CASE(tokenizer_golden_bpe), TEST_CASE(text_of_ids_that_come), TEST_CASE(tokenizer_bpe_damaged),
    TEST_CASE(tokenizer_files_are_kept), TEST_CASE(tokenizer_classes_of_transformers),
    TEST_CASE(tokenizer_normalizers_in_turn),
    TEST_CASE(tokenizer_unigram_refused), TEST_CASE(wordpiece_of_a_tokenizer_json),
    TEST_CASE(tokenizer_golden_uncased), TEST_CASE(tokenizer_golden_cased),
    TEST_CASE(tokenizer_nasty_strings), TEST_CASE(tokenizer_code_points), TEST_CASE(tokenizer_special_tokens),
    TEST_CASE(tokenizer_vocabulary_line_ends), TEST_CASE(tokenizer_vocabulary),
    TEST_CASE(tokenizer_large_vocabulary), TEST_CASE(tokenizer_folder), TEST_CASE(dataset_table),
    TEST_CASE(texts_of_other_encodings_are_refused), TEST_CASE(tables_of_other_programs),
    TEST_CASE(imdb_encodings), TEST_CASE(safetensors_null_metadata),
    TEST_CASE(labels_that_are_numbers),
    TEST_CASE(table_with_validation_rows), TEST_CASE(table_options),
    TEST_CASE(table_without_split_is_divided), TEST_CASE(dataset_imdb), TEST_CASE(imdb_faults),
    TEST_CASE(dataset_texts), TEST_CASE(loader_batches), TEST_CASE(loader_mixes_texts_of_the_same_length),
    TEST_CASE(loader_micro_batches),
    TEST_CASE(loader_deals_out_to_groups),
    TEST_CASE(loader_capacity_is_that_of_the_texts), TEST_CASE(allocation_failures), TEST_CASE(fuzz),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
