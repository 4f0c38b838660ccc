/* Tests of tokenizers and their files, compared with the results of transformers. */
#pragma once

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

/* Encodes one text without cutting it, as tt_tokenizer_encode does. */
static int64_t encode(const tt_tokenizer *k, const char *text, size_t bytes, bool special, int32_t *ids,
                      int64_t room)
{
    const tt_encoding e = {.text = text, .bytes = bytes, .special = special, .room = room, .ids = ids};
    return tt_tokenizer_encode(k, &e);
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
        /* Tries every length that cuts the text, the longest first. */
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

/* Returns the field that begins at *at and ends at a tab or at the line's end. *at moves past the field. */
static char *field(const char **at, const char *end, size_t *bytes)
{
    const char *begin = *at, *stop = begin;
    while (stop < end && *stop != '\t') stop++;
    char *text = (char *)malloc((size_t)(stop - begin) + 1);
    *bytes = unescape(begin, (size_t)(stop - begin), text);
    *at = stop < end ? stop + 1 : end;
    return text;
}

/* Puts the ids into a tt_decode_stream, `each` at a time. Checks that the texts of all calls add up to the
   text of all ids, and that at most `max` ids are kept to be decoded again. */
static bool stream_is_text(const tt_tokenizer *k, const int32_t *ids, int64_t n, int64_t each, bool skip,
                           int max)
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
        /* In a run of single-byte tokens, however long, all ids are kept until the run ends. */
        same = text && at + more <= (size_t)bytes && (s->n <= max || s->runs);
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

/* Checks the cases of golden/make_bpe.py: for each text its ids with special tokens, and the decoded texts
   with and without special tokens. */
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
        const int64_t have = encode(k, text, bytes, true, got, 4000);
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
        const int cut = tt_tokenize(k, text, bytes, got, 5); /* 5 ids may leave no room for special tokens */
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

/* Gemma's tokenizer.json splits texts at spaces, after a normalizer has replaced all spaces. The splitter
   then changes nothing. Without the normalizer, the library refuses the splitter. */
TEST(split_at_spaces_that_are_gone)
{
    static const char split[] = "{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},"
                                "\"behavior\":\"MergedWithPrevious\",\"invert\":false},";
    static const char text[] = "the quick  brown fox, \xc3\xa9t\xc3\xa9 ";
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[1024], edited[1024];
    int32_t ids[2][64];
    int64_t n[2] = {0};
    size_t bytes;
    snprintf(folder, sizeof folder, "%s/llama2", TEST_GOLDEN("bpe"));
    snprintf(edited, sizeof edited, "%s", test_folder());
    char *json = test_read(test_path(folder, "tokenizer.json"), &bytes);
    char *at = json ? strstr(json, "\"pre_tokenizer\":null,") : NULL;
    REQUIRE(at != NULL);
    for (int k = 0; k < 3; k++) { /* k > 0: adds the splitter; k 2: also takes out the normalizer */
        char *to = (char *)malloc(bytes + sizeof split + 32);
        const int used = sprintf(to, "%.*s\"pre_tokenizer\":%s%s", (int)(at - json), json,
                                 k ? split : "null,", at + strlen("\"pre_tokenizer\":null,"));
        char *normalizer = k == 2 ? strstr(to, "\"normalizer\":") : NULL;
        if (k == 2 && CHECK(normalizer != NULL)) memcpy(normalizer, "\"normalizeX\":", 13);
        test_write(test_path(edited, "tokenizer.json"), to, (size_t)used);
        free(to);
        tt_tokenizer *t = tt_tokenizer_load(ctx, edited);
        if (k == 2) {
            CHECK(t == NULL);
            CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "the pattern of a Split, a String, is not supported");
        } else if (CHECK(t != NULL)) {
            tt_encoding e;
            memset(&e, 0, sizeof e);
            e.text = text;
            e.bytes = strlen(text);
            e.room = 64;
            e.ids = ids[k];
            n[k] = tt_tokenizer_encode(t, &e);
        } else {
            fprintf(stderr, "%s\n", tt_error(ctx));
        }
        tt_tokenizer_free(t);
    }
    CHECK(n[0] > 5 && n[0] == n[1] && memcmp(ids[0], ids[1], sizeof(int32_t) * (size_t)n[0]) == 0);
    free(json);
    TEST_CLOSE(ctx, &a);
}

/* Decodes random ids, as untrained models give them, with split characters and invalid bytes. If ids come one
   at a time, their texts add up to the text of all ids, and the number of ids that each call decodes again
   does not grow. */
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
        const int size = tt_tokenizer_size(k), e2 = tt_tokenizer_find(k, "\xc3\xa2"); /* token of byte E2 */
        const int space = kind % 3 ? 4 : 0;
        for (int round = 0; round < 4; round++) { /* round 0: any ids; 1: ids below 300; 2: the token
                                                     of byte E2 alone; 3: five ids */
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
        tt_decode_stream *s = tt_decode_stream_new(k, true); /* allocation number `at` fails */
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

/* A tokenizer.json that is cut off or has changed bytes either loads and takes any text, or the error says
   why not. A failed allocation is reported. */
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
            const int64_t have = t ? encode(t, text, sizeof text - 1, true, ids, 200) : 0;
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
            const int64_t have = t ? encode(t, text, sizeof text - 1, true, ids, 200) : -1;
            done = a.calls < a.fail_at;
            a.fail_at = 0;
            CHECK(done ? have > 0 : t ? have == -1 || have > 0 : tt_error_code(ctx) == TT_ERR_MEMORY);
            tt_tokenizer_free(t);
        }
        TEST_CLOSE(ctx, &a);
    }
    CHECK(loaded > 0 && refused > 0);
}

/* A save writes the files of the tokenizer unchanged, and no other file of the loaded folder. */
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

/* If tokenizer_config.json names a class, AutoTokenizer of transformers 5 may build that class's tokenizer
   instead of the tokenizer in tokenizer.json. The ids equal AutoTokenizer's (golden/compare_bpe.py). */
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
        {"llama2", LLAMA, "mistral", " a", 3, {1, 316, 335}}, /* keeps the ids of tokenizer.json */
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
        const int64_t count = encode(t, rows[k].text, strlen(rows[k].text), true, ids, 20);
        CHECK(count == rows[k].n && memcmp(ids, rows[k].ids, sizeof *ids * (size_t)rows[k].n) == 0);
        tt_tokenizer_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Each normalizer reads the output of the normalizer before, even if some normalizer changes nothing. */
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
        {"\xcc\x81 e\xcc\x81\xcc\xa3", 2, {0, 2}},      /* a mark alone, a space, marks after a letter */
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
        CHECK(encode(k, rows[i].text, strlen(rows[i].text), true, ids, 20) == rows[i].n);
        CHECK(memcmp(ids, rows[i].ids, (size_t)rows[i].n * sizeof *ids) == 0);
    }
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* Wrong Unigram files are refused, and so are folders without a tokenizer. */
TEST(tokenizer_unigram_refused)
{
#define MODEL(unk, vocab) "\"model\":{\"type\":\"Unigram\",\"unk_id\":" unk ",\"vocab\":[" vocab "]}}"
#define WITH(key, value) "{\"" key "\":" value "," MODEL("0", "[\"a\",-1]")
    static const struct { const char *json, *error; } rows[] = {
        {"{" MODEL("null", "[\"a\",-1]"), "has no \"unk_id\", which is required"},
        {"{" MODEL("1", "[\"a\",-1]"), "\"unk_id\" is 1, but must be below the vocabulary's 1 tokens"},
        {"{" MODEL("0", ""), "has no vocabulary; expected an array of tokens and their scores"},
        {"{" MODEL("0", "[\"a\",-1],[\"b\"]"), "token 1 of the vocabulary is an array; expected at most"},
        {"{" MODEL("0", "[\"a\",\"b\"]"), "token 0 of the vocabulary is an array"},
        {"{" MODEL("0", "[\"a\",1e309]"), "a number is too large for a double"},
        {WITH("normalizer", "{\"type\":\"NFKC\"}"), "the normalizer NFKC is not supported; expected"},
        {WITH("normalizer", "{\"type\":\"Precompiled\"}"), "has no \"precompiled_charsmap\""},
        {WITH("normalizer", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"A?\"}"), "not in base 64"},
        {WITH("normalizer", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"CAAAAAAAAAA=\"}"),
         "not a trie with its size before it"},
        {WITH("normalizer", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"BAAAAAAAAAD/\"}"),
         "a list with texts that are not UTF-8"},
        {WITH("normalizer", "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"x+\"},\"content\":\"\"}"),
         "the pattern of a Replace, x+ is not supported"},
        {WITH("pre_tokenizer", "{\"type\":\"ByteLevel\"}"), "the pre_tokenizer ByteLevel is not supported"},
        {WITH("pre_tokenizer", "{\"type\":\"Sequence\",\"pretokenizers\":["
              "{\"type\":\"Metaspace\",\"replacement\":\"_\"},{\"type\":\"Digits\"},"
              "{\"type\":\"Metaspace\",\"replacement\":\"_\"}]}"),
         "the pre_tokenizer Metaspace after Metaspace is not supported; expected only one Metaspace"},
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
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "has its tokenizer only as tokenizer.model, which is not supported");
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

/* Writes the vocabulary of point_vocabulary() in golden/make_tokens.py, whose ids identify the characters of
   words. Empty lines replace code points that can be no token. Returns the file's path. */
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

/* Compares random strings of all kinds of characters with the library `tokenizers`, which takes its character
   classes from several versions of Unicode, and sorts the combining marks of uncased text. */
TEST(tokenizer_nasty_strings)
{
    const char *vocab = point_vocabulary();
    golden(vocab, TEST_GOLDEN("points_uncased.tsv"), true);
    golden(vocab, TEST_GOLDEN("points_cased.tsv"), false);
}

/* Writes a vocab.txt as the tokenizer.json that transformers 5 saves. If `older`, the file has fewer keys, as
   older versions of transformers save it. */
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

/* A tokenizer.json gives the ids and the special tokens of the vocab.txt from which it is made, and can be
   saved. */
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
         "the \"unk_token\" '<unk>' is not in the vocabulary"},
        {"{" MODEL("\"max_input_chars_per_word\":-1,\"vocab\":{\"[UNK]\":0}"),
         "\"max_input_chars_per_word\""},
        {"{\"pre_tokenizer\":{\"type\":\"ByteLevel\"}," MODEL("\"vocab\":{\"[UNK]\":0}"),
         "the pre_tokenizer ByteLevel is not supported; expected one that does not map bytes"},
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

/* Checks the ids of all 1,112,064 code points, by checksums of 4096 code points. If a checksum is wrong,
   golden/compare_tokens.py prints the code points with wrong ids. */
TEST(tokenizer_code_points)
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

/* White space at the end of a line is dropped, as in the library `tokenizers`; saving changes nothing
   else. */
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

TEST(tokenizer_special_tokens) /* also if the vocabulary lacks some special tokens */
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
    /* the text is cut before "]" */
    CHECK(tt_tokenize(k, "[SEP]", 4, ids, 16) == 4 && ids[1] == 6 && ids[2] == 0);
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
    CHECK(tt_tokenize(k, "a\0b", 3, ids, 16) == 4 && ids[1] == 7 && ids[2] == 11); /* NUL is dropped */
    CHECK(tt_tokenize(k, NULL, 0, ids, 2) == 2 && ids[0] == 2 && ids[1] == 3);
    CHECK(tt_tokenize(k, "a", 1, ids, 1) == 0);
    /* The text is cut only after the whole word is known to be [UNK]. */
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

/* Checks a vocabulary with ids of more than 16 bits: looks up all tokens, and reads a text by a loader, which
   caches ids. */
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
        {"{\"strip_accents\": false}", 0, "\"strip_accents\" differs from do_lower_case"},
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
