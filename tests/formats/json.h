/* Tests of JSON. */
#pragma once

/* --------------------------------------------------------------------------------------------------- JSON */

static bool parses(tt_context *ctx, const char *text, size_t n)
{
    tt__json j;
    char *exact = (char *)malloc(n ? n : 1); /* has no byte after the text, for AddressSanitizer */
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
        {"[1]x", "byte 3: not valid JSON: expected the end"}, {"01", "superfluous zero"},
        {"-", "expected a digit"}, {"-a", "expected a digit"}, {"1.", "after the decimal"},
        {".5", "found '.'"},
        {"1e", "in the exponent"}, {"1e+", "in the exponent"}, {"+1", "found '+'"}, {"NaN", "found 'N'"},
        {"Infinity", "found 'I'"}, {"nul", "expected a value"}, {"tru", "expected a value"},
        {"True", "found 'T'"}, {"1e999", "too large"}, {"-1e999", "too large"}, {"'a'", "found '''"},
        {"\"a", "byte 0: not valid JSON: the string that starts here"}, {"\"\\x\"", "a backslash"},
        {"\"\\", "a backslash"}, {"\"\\u12g4\"", "four hexadecimal digits, found 'g'"},
        {"\"\\u12", "four hexadecimal"}, {"\"\\ud800\"", "without the second"},
        {"\"\\ud800\\u0041\"", "is not a valid surrogate pair"}, {"\"\\udc00\"", "without the first"},
        {"\"\x01\"", "control character 0x01"}, {"\"\n\"", "control character"},
        {"\"\xFF\"", "byte 1: not valid JSON: byte 0xff is not valid UTF-8"}, {"\"\xC0\x80\"", "UTF-8"},
        {"\"\xED\xA0\x80\"", "UTF-8"}, {"\"\xE2\x82\"", "UTF-8"}, {"\"\xF4\x90\x80\x80\"", "UTF-8"},
        {"{\"a\":1,\"b\":2,\"a\":3}", "byte 17: not valid JSON: the key \"a\" is twice"},
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
                "byte 64: not valid JSON: arrays and objects are nested more than 64 deep");
    memset(number, '1', sizeof number);
    CHECK(!parses(ctx, number, sizeof number));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "a number has 1000 characters");
    CHECK(parses(ctx, number, 308));
    TEST_CLOSE(ctx, &a);
}

/* Looks up keys and a duplicate in an object of 50,000 keys. If a lookup read all keys, the test would take
   much too long. */
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
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "\"k777\" is twice");
    free(text);
    TEST_CLOSE(ctx, &a);
}
