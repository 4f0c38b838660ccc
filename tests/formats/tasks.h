/* Pairs of texts, several labels, scores and tags: in tables, lines of JSON, datasets and loaders. */
#pragma once

/* ------------------------------------------------------------------------------------------------- tasks */

/* Ids and token types of pairs, whole and cut, equal those of the package `tokenizers` 0.23.3. */
TEST(pairs_of_texts)
{
    static const char fox[] = "the fox there";
    static const struct {
        const char *kind, *text, *pair;
        int max, n;
        int32_t ids[12], types[12];
    } rows[] = {
        {"wordpiece_lower", fox, "it", 0, 8, {2, 171, 329, 152, 228, 3, 217, 3}, {0, 0, 0, 0, 0, 0, 1, 1}},
        {"wordpiece_lower", fox, "it", 7, 7, {2, 171, 329, 152, 3, 217, 3}, {0, 0, 0, 0, 0, 1, 1}},
        {"wordpiece_lower", "it", fox, 8, 8, {2, 217, 3, 171, 329, 152, 228, 3}, {0, 0, 0, 1, 1, 1, 1, 1}},
        {"roberta", fox, "it", 0, 11, {0, 289, 300, 83, 92, 370, 2, 2, 303, 88, 2}, {0}},
        {"roberta", fox, "it", 7, 7, {0, 289, 300, 2, 2, 303, 2}, {0}},
        {"roberta", "it", fox, 8, 8, {0, 303, 88, 2, 2, 289, 300, 2}, {0}},
        {"t5", fox, "it", 0, 9, {400, 273, 263, 289, 332, 1, 468, 260, 1}, {0}},
        {"t5", fox, "it", 7, 7, {400, 273, 263, 1, 468, 260, 1}, {0}},
        {"t5", "it", fox, 8, 8, {468, 260, 1, 400, 273, 263, 289, 1}, {0}},
        {"llama2", fox, "it", 0, 6, {1, 343, 619, 411, 1, 607}, {0, 0, 0, 0, 1, 1}},
        {"qwen2", fox, "it", 0, 7, {381, 295, 78, 87, 348, 72, 83}, {0, 0, 0, 0, 0, 1, 1}},
        {"qwen2", "it", fox, 8, 7, {72, 83, 381, 295, 78, 87, 348}, {0, 0, 1, 1, 1, 1, 1}}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        char folder[100];
        int32_t ids[12], types[12];
        snprintf(folder, sizeof folder, "bpe/%s", rows[k].kind);
        tt_tokenizer *t = tt_tokenizer_load(ctx, TEST_GOLDEN(folder));
        REQUIRE(t && tt_tokenizer_pairs(t));
        tt_encoding e = {.text = rows[k].text, .bytes = strlen(rows[k].text), .pair = rows[k].pair,
                         .pair_bytes = strlen(rows[k].pair), .special = true, .max_tokens = rows[k].max,
                         .room = 12, .ids = ids, .types = types};
        CHECK(tt_tokenizer_encode(t, &e) == rows[k].n);
        CHECK(memcmp(ids, rows[k].ids, sizeof *ids * (size_t)rows[k].n) == 0);
        CHECK(memcmp(types, rows[k].types, sizeof *types * (size_t)rows[k].n) == 0);
        for (int room = 0; room < rows[k].n; room++) { /* with less room only the first ids are written */
            memset(ids, -1, sizeof ids);
            memset(types, -1, sizeof types);
            e.room = room;
            CHECK(tt_tokenizer_encode(t, &e) == rows[k].n && ids[room] == -1 && types[room] == -1);
            CHECK(memcmp(ids, rows[k].ids, sizeof *ids * (size_t)room) == 0 &&
                  memcmp(types, rows[k].types, sizeof *types * (size_t)room) == 0);
        }
        e.ids = e.types = NULL, e.room = 12;
        CHECK(tt_tokenizer_encode(t, &e) == rows[k].n);
        e.max_tokens = 1;
        CHECK(tt_tokenizer_encode(t, &e) == (strcmp(rows[k].kind, "qwen2") == 0));
        tt_tokenizer_free(t);
    }
    TEST_CLOSE(ctx, &a);
}

/* Each token has the span of bytes that the package `tokenizers` 0.23.3 gives, after its spans of characters
   are converted to bytes. The tokenizers compose, decompose, drop and replace characters, have tokens for
   single bytes, and put a space before a text. */
TEST(spans_of_tokens)
{
    static const char text[] = "E\xCC\x81t\xC3\xA9  \xEF\xAC\x81 \xC4\xB0x \xE4\xB8\xAD\xED\x95\x9C \xC2\xBD";
    static const struct { const char *kind; int n; const char *spans; } rows[] = {
        {"wordpiece", 11, "0-0 0-1 3-4 4-6 8-11 12-14 14-15 16-19 19-22 23-25 0-0"},
        {"wordpiece_cased", 11, "0-0 0-1 3-4 4-6 8-11 12-14 14-15 16-19 19-22 23-25 0-0"},
        {"roberta", 19, "0-0 0-0 0-1 1-3 3-4 4-6 7-7 8-11 8-11 8-11 12-14 12-14 14-15 16-16 16-19 19-22 "
         "23-25 23-25 0-0"},
        {"gpt2", 18, "0-1 1-3 3-4 4-6 6-7 7-8 8-11 8-11 8-11 11-12 12-14 12-14 14-15 15-16 16-19 19-22 22-25 "
         "23-25"},
        {"llama2", 21, "0-0 0-1 1-3 3-4 4-6 6-7 7-8 8-11 8-11 8-11 11-12 12-14 12-14 14-15 15-19 19-22 19-22 "
         "19-22 22-23 23-25 23-25"},
        {"albert", 14, "0-0 0-1 0-1 3-6 8-11 8-11 12-14 14-15 16-19 19-22 23-25 23-25 23-25 0-0"},
        {"t5", 15, "0-1 0-1 3-4 4-6 7-8 8-11 8-11 12-14 14-15 16-19 19-22 23-25 23-25 23-25 0-0"},
        {"qwen2", 18, "0-1 0-1 3-4 4-6 6-7 7-8 8-11 8-11 8-11 11-12 12-14 14-15 15-16 16-19 19-22 22-23 "
         "23-25 23-25"},
        {"front_replace", 27, "0-1 0-1 0-1 0-1 0-1 3-4 4-6 4-6 6-7 7-8 8-11 8-11 8-11 11-12 12-14 12-14 "
         "14-15 15-16 16-19 16-19 16-19 19-22 19-22 19-22 22-23 23-25 23-25"}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        char folder[100], found[400];
        int32_t ids[64], plain[64];
        tt_span spans[64], pair[64];
        size_t used = 0;
        snprintf(folder, sizeof folder, "bpe/%s", rows[k].kind);
        tt_tokenizer *t = tt_tokenizer_load(ctx, TEST_GOLDEN(folder));
        REQUIRE(t);
        tt_encoding e = {.text = text, .bytes = sizeof text - 1, .special = true, .room = 64, .ids = ids,
                         .spans = spans};
        CHECK(tt_tokenizer_encode(t, &e) == rows[k].n);
        for (int i = 0; i < rows[k].n; i++)
            used += (size_t)snprintf(found + used, sizeof found - used, "%s%d-%d", i ? " " : "",
                                     (int)spans[i].begin, (int)spans[i].end);
        if (!CHECK(strcmp(found, rows[k].spans) == 0)) printf("%s: %s\n", rows[k].kind, found);
        CHECK(encode(t, text, sizeof text - 1, true, plain, 64) == rows[k].n &&
              memcmp(ids, plain, sizeof *ids * (size_t)rows[k].n) == 0);
        /* The spans of a pair's second text count from the begin of the second text. Arrays that the caller
           does not want may be NULL. */
        const int64_t one = (e.special = false, tt_tokenizer_encode(t, &e));
        e.pair = text, e.pair_bytes = e.bytes, e.ids = NULL, e.spans = pair;
        CHECK(tt_tokenizer_encode(t, &e) == (one <= 32 ? 2 * one : 0));
        for (int i = 0; i < 2 * one; i++)
            CHECK(pair[i].begin == spans[i % one].begin && pair[i].end == spans[i % one].end);
        tt_tokenizer_free(t);
    }
    TEST_CLOSE(ctx, &a);
}

/* Spans of mutated texts with invalid bytes are in order, lie within the text, and cut no character. */
TEST(spans_of_any_bytes)
{
    static const char *const kinds[] = {"wordpiece", "roberta", "llama2", "albert", "t5", "unknown",
                                        "front_nfc"};
    enum { MAX = 80 };
    test_allocator a;
    tt_context *ctx = test_open(&a);
    uint64_t seed = 7;
    for (int k = 0; k < TEST_COUNT(kinds); k++) {
        char folder[100];
        snprintf(folder, sizeof folder, "bpe/%s", kinds[k]);
        tt_tokenizer *t = tt_tokenizer_load(ctx, TEST_GOLDEN(folder));
        REQUIRE(t);
        for (int round = 0; round < 2000; round++) {
            static const char *const pieces[] = {" ", "  ", "the", "\xCC\x81", "\xEF\xAC\x81", "\xFF",
                                                 "\xE4\xB8", "\x80", "<mask>", "\n", "\xC2\xA0", "E",
                                                 "\xED\x95\x9C", "it's"};
            size_t n = 0;
            char text[MAX];
            int32_t ids[4 * MAX], plain[4 * MAX];
            tt_span spans[4 * MAX];
            for (int piece = 0; piece < 1 + round % 9; piece++) {
                const char *from = pieces[test_random(&seed) % TEST_COUNT(pieces)];
                memcpy(text + n, from, strlen(from));
                n += strlen(from);
            }
            char *exact = (char *)malloc(n);
            memcpy(exact, text, n);
            const tt_encoding e = {.text = exact, .bytes = n, .room = 4 * MAX, .ids = ids, .spans = spans};
            const int64_t count = tt_tokenizer_encode(t, &e);
            CHECK(count == encode(t, text, n, false, plain, 4 * MAX) &&
                  memcmp(ids, plain, sizeof *ids * (size_t)count) == 0);
            for (int64_t i = 0; i < count; i++) {
                CHECK(spans[i].begin <= spans[i].end && spans[i].end <= n);
                if (i && strcmp(kinds[k], "roberta") != 0) CHECK(spans[i - 1].begin <= spans[i].begin);
            }
            free(exact);
        }
        tt_tokenizer_free(t);
    }
    TEST_CLOSE(ctx, &a);
}

/* A template for pairs must have the first text before the second. With any other template, the library
   refuses pairs. */
TEST(templates_without_pairs)
{
    static const char model[] = "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"c\":2},"
                                "\"merges\":[]},\"post_processor\":%s}";
    static const char a[] = "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}";
    static const char b[] = "{\"Sequence\":{\"id\":\"B\",\"type_id\":1}}";
    static const char c[] = "{\"SpecialToken\":{\"id\":\"c\",\"type_id\":2}}";
    static const struct { const char *first, *second, *third; int pairs; } rows[] = {
        {a, b, c, 3}, {a, c, b, 3}, {c, a, b, 3}, {b, a, c, 0}, {a, a, b, 0}, {a, c, c, 0}, {b, b, a, 0}};
    test_allocator allocator;
    tt_context *ctx = test_open(&allocator);
    char folder[600], text[1000], post[800];
    snprintf(folder, sizeof folder, "%s", test_folder());
    for (int k = 0; k < 2 * TEST_COUNT(rows); k++) {
        const int at = k / 2, twice = k % 2;
        int32_t ids[8], types[8];
        int n = snprintf(post, sizeof post, "{\"type\":\"TemplateProcessing\",\"single\":[%s],"
                         "\"pair\":[%s,%s,%s],\"special_tokens\":{\"c\":{\"ids\":[2]}}}", a, rows[at].first,
                         rows[at].second, rows[at].third);
        char *all = (char *)malloc(2 * (size_t)n + 60);
        static const char two[] = "{\"type\":\"Sequence\",\"processors\":[%s,%s]}";
        snprintf(all, 2 * (size_t)n + 60, twice ? two : "%s", post, post);
        snprintf(text, sizeof text, model, "%s");
        char *file = (char *)malloc(strlen(all) + sizeof text);
        const size_t bytes = (size_t)sprintf(file, text, all);
        test_write(test_path(folder, "tokenizer.json"), file, bytes);
        tt_tokenizer *t = tt_tokenizer_load(ctx, folder);
        REQUIRE(t);
        const bool pairs = rows[at].pairs && !twice;
        CHECK(tt_tokenizer_pairs(t) == pairs);
        const tt_encoding e = {.text = "a", .bytes = 1, .pair = "b", .pair_bytes = 1, .special = true,
                               .room = 8, .ids = ids, .types = types};
        CHECK(tt_tokenizer_encode(t, &e) == (pairs ? 3 : -1));
        const char *const pieces[] = {rows[at].first, rows[at].second, rows[at].third};
        for (int i = 0; i < 3 && pairs; i++) {
            const int piece = pieces[i] == a ? 0 : pieces[i] == b ? 1 : 2;
            CHECK(ids[i] == piece && types[i] == piece);
        }
        if (!pairs) { /* a loader refuses pairs, too */
            static const char *const names[] = {"x"};
            const tt_text pair = {.text = "a", .bytes = 1, .pair = "b", .pair_bytes = 1};
            tt_dataset *d = tt_dataset_texts(ctx, TT_TASK_CLASS, &pair, 1, names, 1);
            CHECK(d && !tt_loader_new(ctx, d, t, NULL));
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "post_processor does not say how to join the texts");
            tt_dataset_free(d);
        }
        tt_tokenizer_free(t);
        free(all), free(file);
    }
    TEST_CLOSE(ctx, &allocator);
}

typedef struct task_file { const char *name, *text; tt_task task; char between; } task_file;

static tt_dataset *task_table(tt_context *ctx, const task_file *f, const char *split,
                              const char *const *classes, int n_classes)
{
    tt_table_options o = tt_table_options_default();
    o.task = f->task;
    if (f->between) o.label_delimiter = f->between;
    const char *path = test_write(test_path(test_folder(), f->name), f->text, strlen(f->text));
    return tt_dataset_table(ctx, path, split, classes, n_classes, &o);
}

/* Prints a dataset: its classes, and then each text, its pair, and its labels. */
static const char *shown(const tt_dataset *d)
{
    static char to[2000];
    size_t n = 0, bytes;
    to[0] = 0;
    for (int c = 0; c < tt_dataset_classes(d); c++)
        n += (size_t)snprintf(to + n, sizeof to - n, "%s%s", c ? " " : "", tt_dataset_class_name(d, c));
    for (int i = 0; i < tt_dataset_count(d); i++) {
        int words;
        n += (size_t)snprintf(to + n, sizeof to - n, " / %s", tt_dataset_text(d, i, &bytes));
        CHECK(strlen(tt_dataset_text(d, i, NULL)) == bytes);
        if (tt_dataset_pair(d, i, &bytes))
            n += (size_t)snprintf(to + n, sizeof to - n, " + %.*s", (int)bytes, tt_dataset_pair(d, i, NULL));
        const float *values = tt_dataset_values(d, i);
        const tt_word *word = tt_dataset_words(d, i, &words);
        const bool tags = tt_dataset_task(d) == TT_TASK_TAGS;
        CHECK((word != NULL) == tags && (words > 0) == tags);
        CHECK((tt_dataset_label(d, i) >= 0) == (tt_dataset_task(d) == TT_TASK_CLASS));
        if (tt_dataset_label(d, i) >= 0)
            n += (size_t)snprintf(to + n, sizeof to - n, " = %d", tt_dataset_label(d, i));
        for (int c = 0; values && c < tt_dataset_classes(d); c++)
            n += (size_t)snprintf(to + n, sizeof to - n, "%s%g", c ? " " : " = ", values[c]);
        for (int w = 0; w < words; w++)
            n += (size_t)snprintf(to + n, sizeof to - n, "%s%d-%d:%d", w ? " " : " = ", (int)word[w].begin,
                                  (int)word[w].end, word[w].tag);
    }
    return to;
}

#define ROW(members) "{" members "}\n"
#define TEXT(text, label) ROW("\"text\":\"" text "\",\"label\":" label)

TEST(tables_of_tasks)
{
    static const struct { task_file file; const char *expected; } rows[] = {
        {{"a.jsonl", ROW("\"text\": \"a\\u00e9\\nb\", \"label\": \"x\"") "\n"
          ROW("\"label\":\"y\",\"text\":\"\"")
          "{\"text\": \"c\", \"n\": [1, {\"a\": 2}], \"label\": \"x\"}", TT_TASK_CLASS, 0},
         "x y / a\xC3\xA9\nb = 0 /  = 1 / c = 0"},
        {{"a.json", ROW("\"text\": \"a\", \"label\": 10") ROW("\"text\": \"b\", \"label\": 9")
          ROW("\"text\": \"c\", \"label\": -1.5"), TT_TASK_CLASS, 0}, "-1.5 9 10 / a = 2 / b = 1 / c = 0"},
        {{"p.jsonl", ROW("\"text\":\"a\",\"text_pair\":\"b c\",\"label\":1") TEXT("d", "0")
          ROW("\"text\":\"e\",\"text_pair\":null,\"label\":0"), TT_TASK_CLASS, 0},
         "0 1 / a + b c = 1 / d = 0 / e = 0"},
        {{"p.csv", "text_pair,label,text\n\"b, \"\"c\",x,a\n,y,d\n", TT_TASK_CLASS, 0},
         "x y / a + b, \"c = 0 / d +  = 1"},
        {{"l.csv", "text,label\na,\"x, y\"\nb,\nc,y\nd,\" z ,x\"\n", TT_TASK_LABELS, 0},
         "x y z / a = 1 1 0 / b = 0 0 0 / c = 0 1 0 / d = 1 0 1"},
        {{"l.tsv", "text\tlabel\na\t10|9\nb\t2|10|2\n", TT_TASK_LABELS, '|'},
         "2 9 10 / a = 0 1 1 / b = 1 0 1"},
        {{"l.jsonl", TEXT("a", "[\"y\",\"x\"]") TEXT("b", "[]")
          TEXT("c", "[\"y\"]"), TT_TASK_LABELS, 0}, "x y / a = 1 1 / b = 0 0 / c = 0 1"},
        {{"n.jsonl", TEXT("a", "[0,1,1]") TEXT("b", "[1.0,false,true]"),
          TT_TASK_LABELS, 0}, "LABEL_0 LABEL_1 LABEL_2 / a = 0 1 1 / b = 1 0 1"},
        {{"s.csv", "text,label\na,2.5\nb,-1e-1\nc,.5\n", TT_TASK_SCORES, 0},
         "LABEL_0 / a = 2.5 / b = -0.1 / c = 0.5"},
        {{"s.tsv", "text\ttext_pair\tlabel\na\tb\t1; +2\nc\td\t3;4.\n", TT_TASK_SCORES, ';'},
         "LABEL_0 LABEL_1 / a + b = 1 2 / c + d = 3 4"},
        {{"s.jsonl", TEXT("a", "[0.25,3]") TEXT("b", "[-2,1e3]"),
          TT_TASK_SCORES, 0}, "LABEL_0 LABEL_1 / a = 0.25 3 / b = -2 1000"},
        {{"t.jsonl", ROW("\"tokens\":[\"EU\",\"rejects\",\"a b\"],\"tags\":[\"B-ORG\",\"O\",\"O\"]")
          ROW("\"tags\":[\"O\"],\"tokens\":[\"\\u00e9\"]"), TT_TASK_TAGS, 0},
         "B-ORG O / EU rejects a b = 0-2:0 3-10:1 11-14:1 / \xC3\xA9 = 0-2:1"},
        {{"u.jsonl", ROW("\"tokens\":[\"a\",\"b\",\"c\"],\"tags\":[10,-100,9]"), TT_TASK_TAGS, 0},
         "9 10 / a b c = 0-1:1 2-3:-1 4-5:0"},
        {{"t.conll", "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VBZ O\r\n \n\n\xC3\xA9t\xC3\xA9\tx \tO \n",
          TT_TASK_TAGS, 0}, "B-ORG O / EU rejects = 0-2:0 3-10:1 / \xC3\xA9t\xC3\xA9 = 0-5:1"},
        {{"t.txt", "a X\nb Y\n\nc X", TT_TASK_TAGS, 0}, "X Y / a b = 0-1:0 2-3:1 / c = 0-1:0"},
        {{"c.conll", "# newdoc\n# text = a b\na X\nb Y\n-DOCSTART- O\n# id 7\tdomain=en\nc X\n# Y\n\n# X\n"
          "#d Y\n", TT_TASK_TAGS, 0}, "X Y / a b = 0-1:0 2-3:1 / c # = 0-1:0 2-3:1 / # #d = 0-1:0 2-4:1"}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        tt_dataset *d = task_table(ctx, &rows[k].file, NULL, NULL, 0);
        if (!CHECK(d != NULL)) { printf("%s: %s\n", rows[k].file.name, tt_error(ctx)); continue; }
        if (!CHECK(strcmp(shown(d), rows[k].expected) == 0)) printf("%s: %s\n", rows[k].file.name, shown(d));
        CHECK(tt_dataset_task(d) == rows[k].file.task);
        tt_dataset_free(d);
    }
    /* Files are read with the caller's classes and with splits. */
    static const char *const names[] = {"z", "y", "x"};
    static const task_file split = {"s.jsonl", TEXT("a", "[\"y\"],\"split\":\"train\"")
                                    TEXT("b", "[\"x\",\"z\"],\"split\":\"dev\""),
                                    TT_TASK_LABELS, 0};
    tt_dataset *d = task_table(ctx, &split, "validation", names, 3);
    CHECK(d && strcmp(shown(d), "z y x / b = 1 0 1") == 0);
    tt_dataset_free(d);
    CHECK((d = task_table(ctx, &split, "test", names, 3)) != NULL && tt_dataset_count(d) == 0);
    tt_dataset_free(d);
    static const task_file scores = {"s.csv", "text,label\na,\"1,2,3\"\n", TT_TASK_SCORES, 0};
    CHECK((d = task_table(ctx, &scores, NULL, names, 3)) != NULL);
    CHECK(d && strcmp(shown(d), "z y x / a = 1 2 3") == 0);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

TEST(tables_of_tasks_refused)
{
    static const struct { task_file file; const char *error; } rows[] = {
        {{"a.jsonl", TEXT("a", "\"x\"") "{\"text\": 1,", TT_TASK_CLASS, 0},
         "a.jsonl', line 2, byte 36: not valid JSON: expected a key in double quotes, found the end"},
        {{"a.jsonl", "[{\"text\":\"a\",\"label\":\"x\"}]", TT_TASK_CLASS, 0},
         "line 1: the line is an array; expected an object with the columns as members: write an object on "
         "each line, as jq -c '.[]' does"},
        {{"a.jsonl", "\n\n", TT_TASK_CLASS, 0}, "a.jsonl' has no rows"},
        {{"a.jsonl", ROW("\"txt\":\"a\",\"label\":\"x\""), TT_TASK_CLASS, 0},
         "line 1: the object has no \"text\", but \"txt\", \"label\"; expected a string: set the "},
        {{"a.jsonl", ROW(""), TT_TASK_CLASS, 0}, "has no \"text\", but no members"},
        {{"a.jsonl", TEXT("a", "\"x\"") ROW("\"text\":[],\"label\":\"x\""), TT_TASK_CLASS, 0},
         "line 2: \"text\" is an array; expected a string"},
        {{"a.jsonl", TEXT("a", "null"), TT_TASK_CLASS, 0},
         "\"label\" is null; expected a string without U+0000, or a number"},
        {{"a.jsonl", TEXT("a", "\"\""), TT_TASK_CLASS, 0}, "line 1: the label is empty"},
        {{"a.jsonl", ROW("\"text\":\"a\",\"text_pair\":2,\"label\":\"x\""), TT_TASK_CLASS, 0},
         "\"text_pair\" is a number; expected a string"},
        {{"a.jsonl", TEXT("a", "\"x\""), TT_TASK_LABELS, 0},
         "\"label\" is a string; expected a list of labels"},
        {{"a.jsonl", TEXT("a", "[2,27]"), TT_TASK_LABELS, 0},
         "the label contains the number 2; expected 0 or 1 for each class, or the names of labels in quotes"},
        {{"a.jsonl", TEXT("a", "[0,1]") TEXT("a", "[0]"), TT_TASK_LABELS, 0},
         "line 2: the label has 1 number; expected 2, as many as the rows before have"},
        {{"a.jsonl", TEXT("a", "[0,1]") TEXT("a", "[]"), TT_TASK_LABELS, 0},
         "line 2: the label has 0 numbers; expected 2"},
        {{"a.jsonl", TEXT("a", "[\"x\"]") TEXT("a", "[0]"), TT_TASK_LABELS, 0},
         "line 2: the label has 1 numbers, but other labels of this file are names"},
        {{"a.jsonl", TEXT("a", "[0,\"x\"]"), TT_TASK_LABELS, 0},
         "other labels of this file are names"},
        {{"a.jsonl", TEXT("a", "[]"), TT_TASK_LABELS, 0},
         "a.jsonl': no row has a label: add labels"},
        {{"a.csv", "text,label\na,\"x,,y\"\n", TT_TASK_LABELS, 0}, "line 2: a label is empty"},
        {{"a.jsonl", TEXT("a", "\"1\""), TT_TASK_SCORES, 0},
         "\"label\" is a string; expected a score (a number that a float holds)"},
        {{"a.jsonl", TEXT("a", "1e39"), TT_TASK_SCORES, 0}, "a number that a float holds"},
        {{"a.jsonl", TEXT("a", "[]"), TT_TASK_SCORES, 0}, "the label is an empty list"},
        {{"a.csv", "text,label\na,1\nb,nan\n", TT_TASK_SCORES, 0},
         "line 3: the score 'nan' is not a number that a float holds, such as 2.5"},
        {{"a.csv", "text,label\na,1e\n", TT_TASK_SCORES, 0}, "the score '1e' is not"},
        {{"a.csv", "text,label\na,-\n", TT_TASK_SCORES, 0}, "the score '-' is not"},
        {{"a.csv", "text,label\na,1e99\n", TT_TASK_SCORES, 0}, "the score '1e99' is not"},
        {{"a.csv", "text,label\na,1\nb,\"1,2\"\n", TT_TASK_SCORES, 0},
         "line 3: the label has 2 numbers; expected 1"},
        {{"a.csv", "text,label\na,\n", TT_TASK_SCORES, 0}, "line 2: a label is empty"},
        {{"a.jsonl", ROW("\"text\":\"a\",\"tags\":[]"), TT_TASK_TAGS, 0},
         "has no \"tokens\", but \"text\", \"tags\""},
        {{"a.jsonl", ROW("\"tokens\":\"a\",\"tags\":[]"), TT_TASK_TAGS, 0},
         "\"tokens\" is a string; expected a list"},
        {{"a.jsonl", ROW("\"tokens\":[\"a\"],\"tags\":[]"), TT_TASK_TAGS, 0},
         "line 1: the row has 1 words, but 0 tags"},
        {{"a.jsonl", ROW("\"tokens\":[\"\"],\"tags\":[1]"), TT_TASK_TAGS, 0}, "a word is empty"},
        {{"a.jsonl", ROW("\"tokens\":[\"a\"],\"tags\":[\"\"]"), TT_TASK_TAGS, 0},
         "line 1: a tag is empty: write one, or -100 if the word has none"},
        {{"a.jsonl", ROW("\"tokens\":[\"a\"],\"tags\":[[]]"), TT_TASK_TAGS, 0},
         "\"tags\" is an array; expected a string"},
        {{"a.jsonl", ROW("\"tokens\":[\"a\"],\"tags\":[-100]"), TT_TASK_TAGS, 0}, "no word has a tag"},
        {{"a.conll", "a X\nb\n", TT_TASK_TAGS, 0},
         "line 2: 'b' is one column; expected a word, columns that are not read, and a tag"},
        {{"a.conll", "a X\n b Y\n", TT_TASK_TAGS, 0}, "line 2: ' b Y' is no word at the line's start"},
        {{"a.conll", "\n\n", TT_TASK_TAGS, 0}, "a.conll' has no rows"}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        CHECK(!task_table(ctx, &rows[k].file, NULL, NULL, 0));
        if (!CHECK_ERROR(ctx, TT_ERR_FORMAT, rows[k].error)) printf("row %d\n", k);
    }
    static const char *const names[] = {"x", "y"};
    static const task_file two = {"a.jsonl", TEXT("a", "[0,1,1]"), TT_TASK_LABELS, 0};
    CHECK(!task_table(ctx, &two, NULL, names, 2));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "the label has 3 numbers; expected 2, as many as classes are given");
    static const task_file other = {"a.conll", "a x\nb z\n", TT_TASK_TAGS, 0};
    CHECK(!task_table(ctx, &other, NULL, names, 2));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "line 2: the tag 'z' is not one of the 2 given classes");
    static const task_file some = {"a.jsonl", TEXT("a", "1,\"split\":\"train\"")
                                   TEXT("a", "1"), TT_TASK_CLASS, 0};
    CHECK(!task_table(ctx, &some, "train", NULL, 0));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "line 2: the row has no \"split\", unlike line 1");
    static const task_file wrong = {"a.csv", "text,label\na,x\n", (tt_task)9, 0};
    CHECK(!task_table(ctx, &wrong, NULL, NULL, 0));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "task is 9; expected one of tt_task, 0 to 5");
    TEST_CLOSE(ctx, &a);
}

/* Tables of pairs and triplets for TT_TASK_EMBED are read and divided. Wrong tables are refused. */
TEST(tables_of_pairs_and_triplets)
{
    static const struct { task_file file; const char *error; } rows[] = {
        {{"e.csv", "text_pair,label,text\nb,x,a\nd,y,c\n", TT_TASK_EMBED, 0}, NULL},
        {{"e.tsv", "text\ttext_pair\tnegative\na\tb\tn\nc\td\t\n", TT_TASK_EMBED, 0}, NULL},
        {{"e.jsonl", "{\"text_pair\":\"b\",\"text\":\"a\",\"negative\":\"n\"}\n"
          "{\"text\":\"c\",\"text_pair\":\"d\",\"negative\":\"\"}", TT_TASK_EMBED, 0}, NULL},
        {{"e.csv", "text,label\na,x\n", TT_TASK_EMBED, 0},
         "none of the header's 2 columns, separated by commas, is named 'text_pair'; they are 'text', "
         "'label'"},
        {{"e.csv", "", TT_TASK_EMBED, 0}, "is empty; expected a header with the columns text and text_pair"},
        {{"e.jsonl", "{\"text\":\"a\"}", TT_TASK_EMBED, 0}, "the object has no \"text_pair\", but \"text\""},
        {{"e.jsonl", "{\"text\":\"a\",\"text_pair\":\"b\",\"negative\":1}", TT_TASK_EMBED, 0},
         "\"negative\" is a number; expected a string"},
        {{"e.jsonl", "{\"text\":\"a\",\"text_pair\":\"b\"}\n"
          "{\"text\":\"a\",\"text_pair\":\"b\",\"negative\":\"n\"}", TT_TASK_EMBED, 0},
         "line 2: the row has a \"negative\", unlike the rows before: write it in all rows or in none"},
        {{"e.csv", "text,text_pair,score\na,b,1\na,b,x\n", TT_TASK_EMBED, 0},
         "line 3: the score 'x' is not a number that a float holds, such as 2.5; if this column has no "
         "scores, set label_column (--label-column) to another name"},
        {{"e.csv", "text,text_pair,score\na,b,1\na,b,\n", TT_TASK_EMBED, 0},
         "line 3: the row has no \"score\", unlike the rows before: write it in all rows or in none"},
        {{"e.csv", "text,text_pair,score\na,b,\na,b,1\n", TT_TASK_EMBED, 0},
         "line 3: the row has a \"score\", unlike the rows before"},
        {{"e.jsonl", "{\"text\":\"a\",\"text_pair\":\"b\",\"score\":\"1\"}", TT_TASK_EMBED, 0},
         "\"score\" is a string; expected a score"},
        {{"e.jsonl", "{\"text\":\"a\",\"text_pair\":\"b\",\"score\":1e39}", TT_TASK_EMBED, 0},
         "\"score\" is a number; expected a score"},
        {{"e.jsonl", "{\"text\":\"a\",\"text_pair\":\"b\",\"score\":1}\n"
          "{\"text\":\"a\",\"text_pair\":\"b\"}", TT_TASK_EMBED, 0},
         "line 2: the row has no \"score\", unlike the rows before"}};
    static const task_file scored[] = {
        {"e.csv", "score,text,text_pair,split\n,x,y,train\n4.5,a,b,test\n-1,c,d,test\n", TT_TASK_EMBED, 0},
        {"e.jsonl", "{\"text\":\"x\",\"text_pair\":\"y\",\"score\":null,\"split\":\"train\"}\n"
         "{\"text\":\"a\",\"text_pair\":\"b\",\"score\":4.5,\"split\":\"test\"}\n"
         "{\"text\":\"c\",\"text_pair\":\"d\",\"score\":-1,\"split\":\"test\"}\n", TT_TASK_EMBED, 0}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < 2 * TEST_COUNT(scored); k++) { /* rows for training have no scores */
        const bool test = k % 2;
        tt_dataset *d = task_table(ctx, &scored[k / 2], test ? "test" : "train", NULL, 0);
        if (!CHECK(d && tt_dataset_count(d) == 1 + test)) continue;
        const float *last = tt_dataset_values(d, tt_dataset_count(d) - 1);
        CHECK(test ? *tt_dataset_values(d, 0) == 4.5f && *last == -1 : !last);
        tt_dataset *part = test ? tt_dataset_split(d, 1) : NULL;
        CHECK(!test || (part && *tt_dataset_values(part, 0) + *tt_dataset_values(d, 0) == 3.5f));
        tt_dataset_free(part);
        tt_dataset_free(d);
    }
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        tt_dataset *d = task_table(ctx, &rows[k].file, NULL, NULL, 0);
        if (rows[k].error) {
            CHECK(!d);
            if (!CHECK_ERROR(ctx, TT_ERR_FORMAT, rows[k].error)) printf("row %d\n", k);
            continue;
        }
        if (!CHECK(d != NULL)) { printf("%s: %s\n", rows[k].file.name, tt_error(ctx)); continue; }
        size_t bytes = 9;
        const char *negative = tt_dataset_negative(d, 1, &bytes);
        CHECK(tt_dataset_count(d) == 2 && tt_dataset_classes(d) == 0 && tt_dataset_label(d, 0) == -1);
        CHECK(strcmp(tt_dataset_text(d, 1, NULL), "c") == 0 && strcmp(tt_dataset_pair(d, 1, NULL), "d") == 0);
        CHECK(k ? negative && !*negative && !bytes : !negative && !bytes);
        CHECK(!tt_dataset_negative(d, 2, &bytes) && !bytes);
        tt_dataset *part = tt_dataset_split(d, 1);
        CHECK(part && tt_dataset_count(part) == 1 && tt_dataset_pair(part, 0, NULL));
        tt_dataset_free(part);
        tt_dataset_free(d);
    }
    static const char *const names[] = {"x", "y"};
    CHECK(!task_table(ctx, &rows[0].file, NULL, names, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "2 classes are given, but TT_TASK_EMBED has no classes");
    tt_text texts[2];
    memset(texts, 0, sizeof texts);
    texts[0].text = texts[0].pair = texts[1].text = texts[1].pair = "a";
    texts[0].bytes = texts[0].pair_bytes = texts[1].bytes = texts[1].pair_bytes = 1;
    texts[1].negative = "";
    CHECK(!tt_dataset_texts(ctx, TT_TASK_EMBED, texts, 2, NULL, 0));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "text 1 has no negative before it");
    static const float values[] = {1, NAN};
    texts[1].negative = NULL;
    texts[0].values = values;
    CHECK(!tt_dataset_texts(ctx, TT_TASK_EMBED, texts, 2, NULL, 0));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "pair 1 has no score, unlike pair 0: give all pairs a score, or none");
    texts[1].values = values + 1;
    CHECK(!tt_dataset_texts(ctx, TT_TASK_EMBED, texts, 2, NULL, 0));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the score of pair 1 is nan; expected a finite number");
    texts[1].pair = NULL;
    CHECK(!tt_dataset_texts(ctx, TT_TASK_EMBED, texts, 2, NULL, 0));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "text 1 has no pair, but TT_TASK_EMBED needs a pair for every text");
    CHECK(!tt_dataset_texts(ctx, TT_TASK_EMBED, texts, 1, names, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "of 2 classes, task 4; expected at least one text");
    TEST_CLOSE(ctx, &a);
}

/* Datasets are made from the caller's values and words, and are divided. The library counts the texts of each
   class and computes the weights of the classes. */
TEST(datasets_of_tasks)
{
    static const char *const names[] = {"p", "q", "r"};
    static const float values[4][3] = {{1, 0, 0}, {1, 1, 0}, {0, 0, 0}, {1, 0.5f, 0}};
    static const tt_word words[4][2] = {{{0, 1, 0}, {2, 3, 1}}, {{0, 3, 1}}, {{1, 2, -1}, {2, 3, 1}},
                                        {{0, 1, 1}}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_text texts[4];
    for (int task = TT_TASK_LABELS; task <= TT_TASK_TAGS; task++) {
        const bool tags = task == TT_TASK_TAGS;
        memset(texts, 0, sizeof texts);
        for (int i = 0; i < 4; i++) {
            texts[i].text = "a b", texts[i].bytes = 3;
            if (!tags && i % 2) texts[i].pair = "pair", texts[i].pair_bytes = 2;
            texts[i].values = values[i];
            texts[i].words = words[i], texts[i].n_words = i % 2 ? 1 : 2;
        }
        tt_dataset *d = tt_dataset_texts(ctx, (tt_task)task, texts, 4, names, 3);
        REQUIRE(d);
        tt_dataset *part = tt_dataset_split(d, 1);
        REQUIRE(part && tt_dataset_count(part) == 1 && tt_dataset_task(part) == (tt_task)task);
        char one[200];
        snprintf(one, sizeof one, "%s", shown(part) + strlen("p q r"));
        CHECK(strcmp(one, tags ? " / a b = 0-1:0 2-3:1" : " / a b = 1 0 0") == 0 ||
              strcmp(one, tags ? " / a b = 0-3:1" : " / a b + pa = 1 1 0") == 0 ||
              strcmp(one, tags ? " / a b = 1-2:-1 2-3:1" : " / a b = 0 0 0") == 0 ||
              strcmp(one, tags ? " / a b = 0-1:1" : " / a b + pa = 1 0.5 0") == 0);
        CHECK(!strstr(shown(d), one)); /* the other three stay, and no text is in both parts */
        CHECK(tt_dataset_count(d) == 3);
        tt_dataset_free(part);
        tt_dataset_free(d);
        REQUIRE((d = tt_dataset_texts(ctx, (tt_task)task, texts, 4, names, 3)) != NULL);
        static const int64_t counts[][3] = {{3, 2, 0}, {4, 4, 4}, {1, 4, 0}};
        static const double weights[][3] = {{1. / 3, 1, 1}, {1, 1, 1}, {5. / 3, 5. / 12, 0}};
        int64_t count[3];
        float weight[3];
        tt_dataset_counts(d, count);
        CHECK(tt_dataset_weights(d, weight) == TT_OK);
        for (int c = 0; c < 3; c++)
            CHECK(count[c] == counts[task - 1][c] && fabs(weight[c] - weights[task - 1][c]) < 1e-6);
        tt_dataset_free(d);
    }
    static const float bad[][3] = {{0, 2, 0}, {0, -1, 0}, {0, NAN, 0}};
    static const tt_word wrong[][2] = {{{0, 2, 0}, {1, 3, 0}}, {{1, 1, 0}}, {{0, 4, 0}}, {{0, 1, 3}},
                                       {{0, 1, -2}}};
    for (int k = 0; k < 3; k++) {
        texts[2].values = bad[k];
        CHECK(!tt_dataset_texts(ctx, TT_TASK_LABELS, texts, 4, names, 3));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "value 1 of text 2 is ");
    }
    CHECK(!tt_dataset_texts(ctx, TT_TASK_SCORES, texts, 4, names, 3)); /* a value is NaN */
    texts[2].values = NULL;
    CHECK(!tt_dataset_texts(ctx, TT_TASK_SCORES, texts, 4, names, 3));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the values of text 2 are NULL; expected 3");
    for (int k = 0; k < TEST_COUNT(wrong); k++) {
        texts[1].words = wrong[k], texts[1].n_words = k ? 1 : 2;
        CHECK(!tt_dataset_texts(ctx, TT_TASK_TAGS, texts, 4, names, 3));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, k ? "word 0 of text 1 begins at" : "word 1 of text 1 begins at");
    }
    texts[1].words = NULL;
    CHECK(!tt_dataset_texts(ctx, TT_TASK_TAGS, texts, 4, names, 3));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the list of words of text 1 is NULL");
    texts[1].n_words = 0, texts[1].pair = "x";
    CHECK(!tt_dataset_texts(ctx, TT_TASK_TAGS, texts, 4, names, 3));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "text 1 has a second text");
    TEST_CLOSE(ctx, &a);
}

/* A loader of pairs with labels or scores: each sequence has the ids, types and values of its text. */
TEST(loader_of_tasks)
{
    enum { N = 37, CLASSES = 5 };
    static const char *const names[CLASSES] = {"a", "b", "c", "d", "e"};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    REQUIRE(k);
    char text[N][60], pair[N][60];
    float values[N][CLASSES];
    tt_text texts[N];
    memset(texts, 0, sizeof texts);
    for (int i = 0; i < N; i++) {
        text[i][0] = pair[i][0] = 0;
        for (int w = 0; w < i * 7 % 13; w++) strcat(text[i], w % 2 ? "the " : "of ");
        for (int w = 0; w < i * 5 % 11; w++) strcat(pair[i], w % 3 ? "and " : "is ");
        for (int c = 0; c < CLASSES; c++) values[i][c] = (float)((i >> c) & 1);
        texts[i].text = text[i], texts[i].bytes = strlen(text[i]), texts[i].values = values[i];
        if (i % 4) texts[i].pair = pair[i], texts[i].pair_bytes = strlen(pair[i]);
    }
    uint64_t hashes[3] = {0, 0, 0};
    for (int round = 0; round < 8; round++) {
        tt_loader_options o = tt_loader_options_default();
        o.batch = 8, o.accumulate = 1 + round % 3, o.max_length = round % 2 ? 9 : 30, o.window = 2;
        const tt_task task = round < 4 ? TT_TASK_LABELS : TT_TASK_SCORES;
        tt_dataset *d = tt_dataset_texts(ctx, task, texts, N, names, CLASSES);
        tt_loader *l = d ? tt_loader_new(ctx, d, k, &o) : NULL;
        REQUIRE(l);
        int seen[N] = {0}, cut = 0, longest = 0, types = 0;
        for (tt_batch b; tt_loader_next(l, &b);) {
            CHECK(b.values == CLASSES && !b.tags && b.label_values);
            for (int s = 0; s < b.seqs; s++) {
                int32_t ids[100], type[100];
                const int64_t i = b.index[s];
                const int from = b.seq_start[s], length = b.seq_start[s + 1] - from;
                tt_encoding e = {.text = text[i], .bytes = strlen(text[i]), .pair = texts[i].pair,
                                 .pair_bytes = texts[i].pair_bytes, .special = true,
                                 .max_tokens = o.max_length, .room = 100, .ids = ids, .types = type};
                CHECK(tt_tokenizer_encode(k, &e) == length && !seen[i]++);
                CHECK(memcmp(b.ids + from, ids, (size_t)length * 4) == 0 &&
                      memcmp(b.types + from, type, (size_t)length * 4) == 0);
                CHECK(memcmp(b.label_values + s * CLASSES, values[i], sizeof values[i]) == 0);
                CHECK(b.labels[s] == -1);
                for (int r = 0; r < length; r++) types += type[r];
                e.max_tokens = 0;
                const int whole = (int)tt_tokenizer_encode(k, &e);
                cut += whole > length;
                longest = whole > longest ? whole : longest;
            }
        }
        for (int i = 0; i < N; i++) CHECK(seen[i] == 1);
        CHECK(tt_loader_cut(l) == cut && tt_loader_longest(l) == longest && types > 50);
        const tt_source *source = tt_loader_source(l);
        if (round == 4) { /* other values or types change the hash */
            hashes[0] = source->hash(source->self);
            values[3][2]++;
            texts[5].pair = NULL;
        } else if (round == 6) {
            CHECK(source->hash(source->self) != hashes[0]);
        }
        char lines[600];
        source->describe(source->self, lines, sizeof lines);
        CHECK(strstr(lines, "\npairs 1\n") && strstr(lines, round < 4 ? "\ntask 1\n" : "\ntask 2\n"));
        tt_loader_free(l);
        tt_dataset_free(d);
    }
    tt_loader_options o = tt_loader_options_default();
    o.max_length = 2;
    tt_dataset *d = tt_dataset_texts(ctx, TT_TASK_SCORES, texts, N, names, CLASSES);
    CHECK(d && !tt_loader_new(ctx, d, k, &o));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "max_length is 2, but must be at least 3 for pairs of texts");
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* A loader of tags: the first token of each word has the tag, as in the token classification of transformers.
   In `rows`, the package `tokenizers` (is_pretokenized) has split the words into tokens. The first token of
   each word has the word's number, and all other tokens have -100. */
TEST(loader_of_tags)
{
    static const char *const words[] = {"EU", "quick's", "jumps", "1984,", "brown-fox",
                                        "\xE4\xB8\xAD\xE6\x96\x87\xE4\xB9\x9F", "over", "(they'd)",
                                        "\xC3\xA9t\xC3\xA9"};
    static const struct { const char *kind; int n, tags[64]; } rows[] = {
        {"wordpiece_lower", 27, {-100, 0, -100, 1, -100, -100, -100, 2, 3, -100, -100, 4, -100, -100, -100,
         -100, 5, 6, 7, -100, -100, -100, -100, 8, -100, -100, -100}},
        {"roberta", 46, {-100, 0, -100, -100, 1, -100, -100, -100, -100, 2, -100, -100, -100, -100, 3, -100,
         -100, -100, -100, 4, -100, -100, -100, -100, -100, -100, -100, 5, -100, -100, -100, -100, -100, 6,
         -100, 7, -100, -100, -100, -100, -100, 8, -100, -100, -100, -100}},
        {"albert", 39, {-100, 0, -100, -100, 1, -100, -100, -100, 2, -100, -100, -100, -100, 3, -100, -100,
         -100, 4, -100, -100, -100, -100, -100, -100, -100, 5, -100, -100, 6, 7, -100, -100, -100, -100, -100,
         8, -100, -100, -100}},
        {"big_bird", 42, {-100, 0, -100, -100, 1, -100, -100, -100, -100, 2, -100, -100, -100, -100, 3, -100,
         -100, -100, 4, -100, -100, -100, -100, -100, -100, -100, -100, 5, -100, -100, 6, 7, -100, -100, -100,
         -100, -100, 8, -100, -100, -100, -100}}};
    enum { WORDS = TEST_COUNT(words), N = 6 };
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const char *names[WORDS];
    char text[100] = "";
    tt_word word[N][WORDS];
    tt_text texts[N];
    memset(texts, 0, sizeof texts);
    for (int w = 0; w < WORDS; w++) {
        names[w] = words[w];
        strcat(text, w ? " " : "");
        word[0][w].begin = strlen(text);
        strcat(text, words[w]);
        word[0][w].end = strlen(text), word[0][w].tag = w;
    }
    for (int i = 0; i < N; i++) { /* text i has the words from number i on */
        memcpy(word[i], word[0], sizeof word[i]);
        for (int w = i; w < WORDS; w++) {
            word[i][w].begin -= word[0][i].begin, word[i][w].end -= word[0][i].begin;
            if (i == 3 && w == 4) word[i][w].tag = -1; /* a word without a tag */
        }
        texts[i].text = text + word[0][i].begin, texts[i].bytes = strlen(texts[i].text);
        texts[i].words = word[i] + i, texts[i].n_words = WORDS - i;
    }
    tt_dataset *d = tt_dataset_texts(ctx, TT_TASK_TAGS, texts, N, names, WORDS);
    REQUIRE(d);
    for (int k = 0; k < 2 * TEST_COUNT(rows); k++) {
        char folder[100], lines[600];
        tt_loader_options o = tt_loader_options_default();
        snprintf(folder, sizeof folder, "bpe/%s", rows[k / 2].kind);
        tt_tokenizer *t = tt_tokenizer_load(ctx, TEST_GOLDEN(folder));
        o.batch = 4, o.max_length = k % 2 ? 11 : 100;
        tt_loader *l = t ? tt_loader_new(ctx, d, t, &o) : NULL;
        REQUIRE(l);
        int seen = 0;
        for (tt_batch b; tt_loader_next(l, &b);)
            for (int s = 0; s < b.seqs; s++, seen++) {
                const int from = b.seq_start[s], n = b.seq_start[s + 1] - from, i = (int)b.index[s];
                int next = i;
                CHECK(b.tags && !b.label_values && b.tags[from] == -100 && b.tags[from + n - 1] == -100);
                if (i == 0)
                    for (int r = 0; r < n - 1; r++) CHECK(b.tags[from + r] == rows[k / 2].tags[r]);
                if (i == 0 && o.max_length == 100) CHECK(n == rows[k / 2].n);
                for (int r = 0; r < n; r++) { /* each word has its tag once, in order */
                    if (b.tags[from + r] == -100) continue;
                    next += i == 3 && next == 4;
                    CHECK(b.tags[from + r] == next++);
                }
                CHECK(o.max_length < 100 || next == WORDS);
            }
        CHECK(seen == N);
        const tt_source *source = tt_loader_source(l);
        source->describe(source->self, lines, sizeof lines);
        CHECK(strstr(lines, "\ntask 3\n"));
        const uint64_t hash = source->hash(source->self);
        tt_loader_free(l);
        d->examples[2].words[0].tag = 0; /* another tag changes the hash */
        REQUIRE((l = tt_loader_new(ctx, d, t, &o)) != NULL);
        CHECK(tt_loader_source(l)->hash(l) != hash);
        d->examples[2].words[0].tag = 2;
        tt_loader_free(l);
        tt_tokenizer_free(t);
    }
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}
