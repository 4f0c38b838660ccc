/* Tests of src/data/: token streams and their windows. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

enum { MAX = 4096 };

/* Encodes one text without cutting it, as tt_tokenizer_encode does. */
static int64_t encode(const tt_tokenizer *k, const char *text, size_t bytes, bool special, int32_t *ids,
                      int64_t room)
{
    const tt_encoding e = {.text = text, .bytes = bytes, .special = special, .room = room, .ids = ids};
    return tt_tokenizer_encode(k, &e);
}

static tt_token_stream *of_text(tt_context *ctx, const char *text, const char *separator)
{
    tt_stream_options o = tt_stream_options_default();
    o.separator = separator;
    return tt_token_stream_text(ctx, text, strlen(text), &o);
}

/* Checks that the stream has the tokens `expected`, where '|' ends a document. */
static void are_bytes(const tt_token_stream *s, const char *expected)
{
    int32_t ids[MAX];
    const int64_t n = (int64_t)strlen(expected);
    if (!CHECK(s != NULL) || !CHECK(tt_token_stream_count(s) == n)) return;
    CHECK(tt_token_stream_get(s, 0, n, ids) == TT_OK);
    for (int k = 0; k < n; k++) CHECK(ids[k] == (expected[k] == '|' ? 256 : (uint8_t)expected[k]));
}

TEST(texts)
{
    static const struct { const char *text, *separator, *expected; int bytes; } rows[] = {
        {"abc", NULL, "abc|", 3},
        {"a\n\nb\n", NULL, "a\n\nb\n|", 5},
        {"a\n\nb\n", "", "a\n|b\n|", 4},
        {"\n\n\r\na\r\n\r\n\n \nb\n\n\n", "", "a\r\n| \nb\n|", 7},
        {"one\n<end>\ntwo\n<end>\n", "<end>", "one\n|two\n|", 8},
        {"one\n<end> \ntwo<end>", "<end>", "one\n<end> \ntwo<end>|", 19},
        {"<end>\n<end>\n\t \n<end>\nx", "<end>", "x|", 1},
        {"\xff\xc3\xa4", NULL, "\xff\xc3\xa4|", 3},
    };
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        tt_token_stream *s = of_text(ctx, rows[k].text, rows[k].separator);
        are_bytes(s, rows[k].expected);
        CHECK(s && tt_token_stream_bytes(s) == rows[k].bytes && tt_token_stream_vocab(s) == 257);
        tt_token_stream_free(s);
    }
    static const char *const none[] = {"", " \n\t\r\n", "\n"};
    for (int k = 0; k < TEST_COUNT(none); k++) {
        CHECK(of_text(ctx, none[k], "") == NULL);
        CHECK_ERROR(ctx, TT_ERR_FORMAT, "token stream of 'a text': the stream has fewer than 2 tokens, which "
                    "is too few to train on");
    }
    TEST_CLOSE(ctx, &a);
}

TEST(ids_of_larger_models_are_refused)
{
    test_allocator a;
    char folder[600];
    tt_context *ctx = test_open(&a);
    snprintf(folder, sizeof folder, "%s", TEST_GOLDEN("bpe/gpt2"));
    tt_tokenizer *t = tt_tokenizer_load(ctx, folder);
    if (!CHECK(t != NULL)) return;
    const int32_t id = tt_tokenizer_find(t, "o");
    tt_stream_options o = tt_stream_options_default();
    o.tokenizer = t;
    o.end = 0;
    o.vocab = id;
    CHECK(tt_token_stream_text(ctx, "o", 1, &o) == NULL);
    char expected[80];
    snprintf(expected, sizeof expected, "'a text' has the token %d ('o'), but the model has only %d tokens",
             id,
             id);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, expected);
    o.vocab = id + 1;
    tt_token_stream *s = tt_token_stream_text(ctx, "o", 1, &o);
    CHECK(s && tt_token_stream_count(s) == 2 && tt_token_stream_vocab(s) == id + 1);
    tt_token_stream_free(s);
    tt_tokenizer_free(t);

    o = tt_stream_options_default();
    o.vocab = 'o';
    o.end = 0;
    CHECK(tt_token_stream_text(ctx, "o", 1, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "'a text' has the token 111, but the model has only 111 tokens");
    o.end = -1;
    CHECK(tt_token_stream_text(ctx, "o", 1, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "end is 256, but must be below the vocabulary's size, 111");
    TEST_CLOSE(ctx, &a);
}

TEST(texts_with_a_tokenizer)
{
    static const char *const kinds[] = {"gpt2", "llama3", "llama2"};
    static const char *const documents[] = {"Hello  world, it's 1234!\n",
                                            "\xE2\x82\xAC \xC3\xA4\xC3\xB6 caf\xC3\xA9\n", "x\n"};
    for (int k = 0; k < TEST_COUNT(kinds); k++) {
        test_allocator a;
        char folder[600], all[600] = "";
        int32_t expected[MAX], ids[MAX];
        int64_t n = 0, bytes = 0;
        tt_context *ctx = test_open(&a);
        snprintf(folder, sizeof folder, "%s/%s", TEST_GOLDEN("bpe"), kinds[k]);
        tt_tokenizer *t = tt_tokenizer_load(ctx, folder);
        if (!CHECK(t != NULL)) return;
        tt_stream_options o = tt_stream_options_default();
        o.tokenizer = t;
        o.separator = "---";
        o.end = tt_tokenizer_special(t, TT_TOKEN_EOS) < 0 ? 1 : -1;
        const int end = o.end < 0 ? tt_tokenizer_special(t, TT_TOKEN_EOS) : o.end;
        for (int d = 0; d < TEST_COUNT(documents); d++) {
            n += encode(t, documents[d], strlen(documents[d]), true, expected + n, MAX - n);
            expected[n++] = end;
            strcat(all, documents[d]);
            strcat(all, d < 2 ? "---\n" : "");
            bytes += (int64_t)strlen(documents[d]);
        }
        tt_token_stream *s = tt_token_stream_text(ctx, all, strlen(all), &o);
        CHECK(s && tt_token_stream_count(s) == n && tt_token_stream_vocab(s) == tt_tokenizer_size(t));
        CHECK(tt_token_stream_get(s, 0, n, ids) == TT_OK);
        CHECK(memcmp(ids, expected, sizeof *ids * (size_t)n) == 0);
        CHECK(tt_token_stream_bytes(s) == bytes);
        tt_token_stream_free(s);
        o.bare = true;
        /* LLaMA's tokenizers put a token before each document. */
        s = tt_token_stream_text(ctx, all, strlen(all), &o);
        CHECK(s && tt_token_stream_count(s) == n - (k ? TEST_COUNT(documents) : 0));
        CHECK(s && tt_token_stream_bytes(s) == bytes);
        tt_token_stream_free(s);
        o.end = tt_tokenizer_size(t);
        CHECK(tt_token_stream_text(ctx, all, strlen(all), &o) == NULL);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "but must be below the vocabulary's size");
        tt_tokenizer_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* A document that spells out its begin or end token, such as <s> of LLaMA 2, gets the token once. */
TEST(spelled_out_ends)
{
    static const struct { const char *kind, *text; int64_t begun, ended; const char *plain; } rows[] = {
        {"llama2", "<s>ab</s>\n", 1, 1, "ab"}, {"llama2", "<s>ab", 1, 0, "ab"},
        {"llama2", "ab</s>", 0, 1, "ab"},
        {"llama2", "a<s>b</s>c", 0, 0, NULL}, {"llama2", "ab </s", 0, 0, NULL},
        {"llama3", "<|begin_of_text|>ab<|end_of_text|> \r\n", 1, 1, "ab"},
        {"gpt2", "<|endoftext|>ab<|endoftext|>\n", 0, 1, "<|endoftext|>ab"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a;
        test_log log;
        int32_t ids[100], expected[100];
        char folder[600], said[100];
        tt_context *ctx = test_open_logged(&a, &log);
        snprintf(folder, sizeof folder, "%s/%s", TEST_GOLDEN("bpe"), rows[k].kind);
        tt_tokenizer *t = tt_tokenizer_load(ctx, folder);
        REQUIRE(t);
        tt_stream_options o = tt_stream_options_default();
        o.tokenizer = t;
        o.end = tt_tokenizer_find(t, k == 5 ? "<|end_of_text|>" : k == 6 ? "<|endoftext|>" : "</s>");
        o.separator = "---";
        const char *text = rows[k].plain ? rows[k].plain : rows[k].text;
        int64_t n = encode(t, text, strlen(text), true, expected, 100);
        /* A begin token that the text spells out is one token, after which "ab" may have other ids. */
        if (rows[k].begun) {
            const size_t bytes = (size_t)(strstr(rows[k].text, "ab") + 2 - rows[k].text);
            n = encode(t, rows[k].text, bytes, false, expected, 100);
        }
        expected[n++] = o.end;
        tt_token_stream *s = tt_token_stream_text(ctx, rows[k].text, strlen(rows[k].text), &o);
        CHECK(s && tt_token_stream_count(s) == n && tt_token_stream_get(s, 0, n, ids) == TT_OK);
        CHECK(memcmp(ids, expected, sizeof *ids * (size_t)n) == 0);
        CHECK(log.warnings == (int)(rows[k].begun + rows[k].ended));
        snprintf(said, sizeof said, "1 document spells out '%s'", tt_tokenizer_token(t, o.end));
        CHECK((strstr(log.text, said) != NULL) == (rows[k].ended > 0));
        tt_token_stream_free(s);
        tt_tokenizer_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* config.json of a folder without tokenizer_config.json names a token of ordinary texts as the end. */
TEST(ordinary_tokens_as_ends)
{
    test_allocator a;
    test_log log;
    tt_context *ctx = test_open_logged(&a, &log);
    char folder[600], json[100];
    size_t n;
    snprintf(folder, sizeof folder, "%s", test_folder());
    /* kind 0: the tokenizer has an end token; 1: the tokenizer lacks an end token. */
    for (int kind = 0; kind < 2; kind++) {
        const char *end = kind ? "</s>" : "<|endoftext|>";
        char *file = test_read(kind ? TEST_GOLDEN("bpe/llama2/tokenizer.json")
                                    : TEST_GOLDEN("bpe/gpt2/tokenizer.json"), &n);
        REQUIRE(file);
        test_write(test_path(folder, "tokenizer.json"), file, n);
        free(file);
        remove(test_path(folder, "config.json"));
        tt_tokenizer *t = tt_tokenizer_load(ctx, folder);
        REQUIRE(t);
        const int letter = tt_tokenizer_find(t, "a"), own = tt_tokenizer_find(t, end);
        tt_tokenizer_free(t);
        for (int ordinary = 0; ordinary < 2; ordinary++) {
            log.warnings = 0;
            log.text[0] = 0;
            snprintf(json, sizeof json, "{\"eos_token_id\": %d}", ordinary ? letter : own);
            test_write(test_path(folder, "config.json"), json, strlen(json));
            t = tt_tokenizer_load(ctx, folder);
            REQUIRE(t);
            CHECK(tt_tokenizer_special(t, TT_TOKEN_EOS) == (ordinary && kind ? letter : own));
            CHECK(log.warnings == ordinary);
            CHECK(!ordinary || strstr(log.text, "'a', which also occurs in ordinary texts: "));
            const char *said = kind ? "set \"eos_token\"" : "documents end with '<|endoftext|>'";
            CHECK(!ordinary || strstr(log.text, said));
            tt_tokenizer_free(t);
        }
    }
    TEST_CLOSE(ctx, &a);
}

/* A stream's number of bytes is that of its text. A text for a tokenizer must be UTF-8, because the tokenizer
   would replace an invalid byte by the three bytes of U+FFFD. */
TEST(invalid_texts_of_a_tokenizer_are_refused)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *t = tt_tokenizer_load(ctx, TEST_GOLDEN("bpe/gpt2"));
    REQUIRE(t);
    tt_stream_options o = tt_stream_options_default();
    o.tokenizer = t;
    CHECK(tt_token_stream_text(ctx, "a\ncaf\xE9", 6, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "'a text', line 2, byte 5: the byte 0xe9 is not valid UTF-8");
    tt_token_stream *s = tt_token_stream_text(ctx, "\xEF\xBB\xBF" "caf\xC3\xA9", 8, &o);
    CHECK(s && tt_token_stream_bytes(s) == 5);
    tt_token_stream_free(s);
    tt_tokenizer_free(t);
    TEST_CLOSE(ctx, &a);
}

TEST(files_and_folders)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600];
    snprintf(folder, sizeof folder, "%s", test_folder());
    CHECK(tt_token_stream_read(ctx, folder, NULL) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FILE, "has no file *.txt");
    test_write(test_path(folder, "b.txt"), "bb", 2);
    test_write(test_path(folder, "c.text"), "no", 2);
    test_write(test_path(folder, "a.txt"), "a\n\na", 4);
    tt_stream_options o = tt_stream_options_default();
    tt_token_stream *s = tt_token_stream_read(ctx, folder, &o);
    are_bytes(s, "a\n\na|bb|");
    tt_token_stream_free(s);
    o.separator = "";
    s = tt_token_stream_read(ctx, folder, &o);
    are_bytes(s, "a\n|a|bb|");
    char path[700];
    snprintf(path, sizeof path, "%s/ids.bin", folder);
    CHECK(tt_token_stream_write(s, path) == TT_OK);
    tt_token_stream *part = tt_token_stream_split(s, 3);
    are_bytes(s, "a\n|a|");
    are_bytes(part, "bb|");
    CHECK(tt_token_stream_bytes(part) == 2 && tt_token_stream_bytes(s) == 3);
    CHECK(tt_token_stream_split(s, 4) == NULL);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "cannot split off 4 of 5 tokens");
    tt_token_stream_free(s); /* the remaining stream keeps its ids */
    are_bytes(part, "bb|");
    tt_token_stream_free(part);
    s = tt_token_stream_read(ctx, test_path(folder, "b.txt"), NULL);
    are_bytes(s, "bb|");
    tt_token_stream_free(s);
    CHECK(tt_token_stream_read(ctx, test_path(folder, "none.txt"), NULL) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FILE, "none.txt': No such file or directory");

    s = tt_token_stream_open(ctx, path, 2, 257, 256); /* this stream reads from its file */
    are_bytes(s, "a\n|a|bb|");
    CHECK(tt_token_stream_bytes(s) == 0);
    part = tt_token_stream_split(s, 2);
    are_bytes(s, "a\n|a|b");
    are_bytes(part, "b|");
    tt_token_stream_free(part);
    CHECK(tt_token_stream_write(s, path) == TT_OK); /* although the stream still reads from this file */
    tt_token_stream_free(s);
    s = tt_token_stream_open(ctx, path, 2, 257, 256);
    are_bytes(s, "a\n|a|b");
    tt_token_stream_free(s);
    s = tt_token_stream_open(ctx, path, 2, 256, -1);
    int32_t ids[6];
    CHECK(s && tt_token_stream_get(s, 0, 6, ids) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "ids.bin', token 2: the id is 256, but must be below vocab, 256");
    CHECK(tt_token_stream_get(s, 4, 3, ids) == TT_ERR_ARGUMENT);
    tt_token_stream_free(s);
    static const struct { int width, vocab, end; const char *error; } bad[] = {
        {3, 9, -1, "ids have 3 bytes"}, {2, 0, -1, "expected 2 or 4 bytes"}, {2, 9, 9, "end 9"},
        {2, 9, -2, "end -2"}};
    for (int k = 0; k < TEST_COUNT(bad); k++) {
        CHECK(tt_token_stream_open(ctx, path, bad[k].width, bad[k].vocab, bad[k].end) == NULL);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, bad[k].error);
    }
    test_write(path, "12345", 5);
    CHECK(tt_token_stream_open(ctx, path, 2, 9, -1) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "ids.bin': 5 bytes are not a multiple of the 2 bytes of an id: the file "
                "may be cut off, or its ids have another size");
    test_write(path, "12", 2);
    CHECK(tt_token_stream_open(ctx, path, 2, 9, -1) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "too few to train on");

    test_write(path, "\xEF\xBB\xBFx\xC3\xA9", 6); /* a byte order mark is not part of the text */
    s = tt_token_stream_read(ctx, path, NULL);
    are_bytes(s, "x\xC3\xA9|");
    tt_token_stream_free(s);

    int64_t eights[32]; /* ids of 8 bytes */
    for (int k = 0; k < 32; k++) eights[k] = 40 + k;
    for (int vocab = 1000; vocab < 100000; vocab += 90000) {
        test_write(path, eights, sizeof eights);
        CHECK(tt_token_stream_open(ctx, path, 0, vocab, -1) == NULL);
        CHECK_ERROR(ctx, TT_ERR_FORMAT, "ids.bin' seems to have ids of 8 bytes (int64)");
        s = tt_token_stream_open(ctx, path, 4, vocab, -1); /* allowed if the caller gives the size */
        CHECK(s && tt_token_stream_count(s) == 64);
        tt_token_stream_free(s);
    }

    /* Zeros in every second 16-bit half, or a vocabulary above 65,536, mean 4-byte ids; else 2-byte ids. */
    static const uint16_t narrow[6] = {1, 2, 3, 0, 5, 6}, zeros[4] = {0, 0, 0, 0}, five[3] = {7, 0, 9};
    static const uint32_t wide[3] = {1, 0, 4};
    const struct { const void *data; size_t bytes; int vocab, count; } files[] = {
        {narrow, sizeof narrow, 10, 6}, {zeros, sizeof zeros, 10, 4}, {five, sizeof five, 10, 3},
        {wide, sizeof wide, 10, 3}, {narrow, sizeof narrow, 70000, 3}};
    for (int k = 0; k < TEST_COUNT(files); k++) {
        test_write(path, files[k].data, files[k].bytes);
        s = tt_token_stream_open(ctx, path, 0, files[k].vocab, -1);
        CHECK(s && tt_token_stream_count(s) == files[k].count);
        tt_token_stream_free(s);
    }

    int32_t header[260] = {20240520, 1, 4}; /* llm.c's format */
    uint16_t tail[4] = {7, 8, 9, 1};
    const uint32_t words[2] = {70000, 128255};
    char bytes[1024 + sizeof tail];
    memcpy(bytes, header, 1024);
    memcpy(bytes + 1024, tail, sizeof tail);
    test_write(path, bytes, sizeof bytes);
    s = tt_token_stream_open(ctx, path, 0, 10, -1);
    CHECK(s && tt_token_stream_count(s) == 4 && tt_token_stream_get(s, 1, 3, ids) == TT_OK && ids[0] == 8 &&
          ids[2] == 1);
    tt_token_stream_free(s);
    test_write(path, bytes, sizeof bytes - 2);
    CHECK(tt_token_stream_open(ctx, path, 2, 10, -1) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FORMAT,
                "its header says that there are 4 ids, but the file has 3: it may be cut off");
    test_write(path, bytes, sizeof bytes);
    CHECK(tt_token_stream_open(ctx, path, 4, 10, -1) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FORMAT,
                "its header says that ids have 2 bytes, not 4: name the right number of bytes");
    header[0] = 20240801;
    header[1] = 7;
    header[2] = 2;
    memcpy(bytes, header, 12);
    memcpy(bytes + 1024, words, sizeof words);
    test_write(path, bytes, sizeof bytes);
    s = tt_token_stream_open(ctx, path, 4, 128256, -1);
    CHECK(s && tt_token_stream_count(s) == 2 && tt_token_stream_get(s, 0, 2, ids) == TT_OK);
    CHECK(ids[0] == 70000 && ids[1] == 128255);
    tt_token_stream_free(s);
    s = tt_token_stream_open(ctx, path, 4, 128255, -1);
    for (int across = 0; across < 2; across++) { /* a loader refuses the id before any training */
        tt_token_loader_options lo = tt_token_loader_options_default();
        lo.across = across;
        CHECK(s && tt_token_loader_new(ctx, s, &lo) == NULL);
        CHECK_ERROR(ctx, TT_ERR_FORMAT, "token 1: the id is 128255, but must be below vocab, 128255");
    }
    tt_token_stream_free(s);
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------------------ windows */

/* Makes a stream of numbers from 1 on; about every seventh is 0 and ends a document. */
static tt_token_stream *numbers(tt_context *ctx, const char *folder, int n)
{
    uint32_t ids[MAX];
    uint64_t state = 7;
    for (int k = 0; k < n; k++) ids[k] = test_random(&state) % 7 == 0 ? 0 : (uint32_t)k + 1;
    const char *path = test_path(folder, "numbers.bin");
    test_write(path, ids, sizeof *ids * (size_t)n);
    return tt_token_stream_open(ctx, path, 4, MAX, 0);
}

typedef struct layout { int count, batch, accumulate, length, groups; bool across, shuffle; } layout;

/* Compares an epoch with the stream. order: the beginnings of the epoch's windows. Returns the number of
   micro-batches. */
static int epoch_of(const tt_source *source, const layout *w, const int32_t *ids, int64_t epoch,
                    int32_t *order)
{
    tt_token_loader *l = (tt_token_loader *)source->self;
    bool more = true;
    static int targeted[MAX];
    int micros = 0, windows = 0, in_step = 0, rows_of_step[64];
    int64_t steps = 0;
    memset(targeted, 0, sizeof targeted);
    CHECK(source->seek(l, epoch, 0) == TT_OK);
    for (tt_batch b;;) {
        memset(&b, 0, sizeof b);
        CHECK(source->next(l, &b, &more) == TT_OK);
        if (!more) break;
        const int32_t *targets = (const int32_t *)b.arrays[0].data;
        CHECK(b.n_arrays == 1 && strcmp(b.arrays[0].input, "targets") == 0 && b.arrays[0].rows == b.rows);
        CHECK(b.rows >= 1 && b.rows <= source->max_tokens && b.seqs >= 1 && b.seqs <= source->max_seqs);
        CHECK(b.seq_start[0] == 0 && b.seq_start[b.seqs] == b.rows);
        int s = 0, in_window = 0, of_window = 0;
        for (int r = 0, at = 0; r < b.rows; r++, at++, in_window++) {
            if (r == b.seq_start[s + 1]) s++;
            const bool begins = r == b.seq_start[s];
            /* A window begins at the end of the previous window. */
            if (in_window == of_window) {
                /* Finds the window by its ids, which are unique except 0, among windows not yet seen. */
                int first = -1;
                for (int k = 0; k < w->count - 1 && first < 0; k += w->length) {
                    bool same = !targeted[k + 1];
                    for (int j = 0; j < w->length && r + j < b.rows && k + j < w->count - 1 && same; j++)
                        same = ids[k + j] == b.ids[r + j] &&
                               (targets[r + j] == ids[k + j + 1] || targets[r + j] == -100);
                    if (same) first = k;
                }
                if (!CHECK(first >= 0 && begins)) return 0;
                at = first;
                in_window = 0;
                of_window = (int)tt__min(w->length, w->count - 1 - first);
                order[windows++] = first;
            }
            CHECK(b.ids[r] == ids[at]);
            CHECK(begins ? b.positions[r] == 0 : b.positions[r] == b.positions[r - 1] + 1);
            const bool ends = !w->across && ids[at] == 0;
            CHECK(targets[r] == (ends ? -100 : ids[at + 1]));
            if (r + 1 < b.rows) CHECK((b.seq_start[s + 1] == r + 1) == (ends || in_window + 1 == of_window));
            targeted[at + 1]++;
        }
        rows_of_step[in_step++] = b.rows;
        micros++;
        if (!b.last_of_step) continue;
        CHECK(in_step % w->groups == 0 || steps + 1 == source->steps);
        /* Sizes of the micro-batches of a step differ by at most one window. */
        for (int k = 0; k < in_step && steps + 1 < source->steps; k++)
            CHECK(abs(rows_of_step[k] - rows_of_step[0]) <= w->length);
        in_step = 0;
        steps++;
    }
    CHECK(in_step == 0 && steps == source->steps);
    for (int k = 1; k < w->count; k++) CHECK(targeted[k] == 1);
    return micros;
}

TEST(windows)
{
    static const layout layouts[] = {
        {200, 4, 1, 16, 1, false, true}, {201, 4, 1, 16, 1, true, true}, {193, 3, 3, 16, 1, false, true},
        {300, 8, 2, 7, 4, false, true},  {17, 16, 1, 16, 1, false, true}, {18, 1, 1, 16, 1, true, false},
        {90, 5, 1, 1, 1, false, true},   {90, 6, 2, 1, 3, true, true},   {50, 2, 1, 100, 1, false, false}};
    for (int k = 0; k < TEST_COUNT(layouts); k++) {
        const layout *w = &layouts[k];
        test_allocator a;
        int32_t ids[MAX], order[3][MAX];
        tt_context *ctx = test_open(&a);
        char folder[600];
        snprintf(folder, sizeof folder, "%s", test_folder());
        tt_token_stream *s = numbers(ctx, folder, w->count);
        CHECK(tt_token_stream_get(s, 0, w->count, ids) == TT_OK);
        tt_token_loader_options o = tt_token_loader_options_default();
        o.batch = w->batch;
        o.accumulate = w->accumulate;
        o.length = w->length;
        o.across = w->across;
        o.shuffle = w->shuffle;
        o.parallel.groups = w->groups;
        o.parallel.data = 1;
        tt_token_loader *l = tt_token_loader_new(ctx, s, &o);
        const tt_source *source = tt_token_loader_source(l);
        if (!CHECK(source != NULL)) return;
        const int windows = (w->count - 1 + w->length - 1) / w->length;
        CHECK(source->steps == (windows + w->batch - 1) / w->batch);
        for (int epoch = 0; epoch < 3; epoch++) {
            const int micros = epoch_of(source, w, ids, epoch / 2, order[epoch]);
            CHECK(micros > source->steps ? source->accumulates : true);
        }
        CHECK(memcmp(order[0], order[1], sizeof **order * (size_t)windows) == 0);
        const bool same = memcmp(order[0], order[2], sizeof **order * (size_t)windows) == 0;
        CHECK(same == (!w->shuffle || windows == 1) || windows < 4);
        for (int i = 0; i < windows && !w->shuffle; i++) CHECK(order[0][i] == i * w->length);

        /* After a seek to a step, the loader gives the same windows as after reading up to that step. */
        for (int64_t step = 0; step < source->steps; step += 1 + source->steps / 3) {
            tt_batch x, y;
            bool more = true;
            static int32_t copy[MAX];
            memset(&x, 0, sizeof x);
            memset(&y, 0, sizeof y);
            CHECK(source->seek(l, 4, 0) == TT_OK);
            for (int64_t n = 0; n <= step; n += x.last_of_step) {
                if (n == step) break;
                CHECK(source->next(l, &x, &more) == TT_OK && more);
            }
            CHECK(source->next(l, &x, &more) == TT_OK && more);
            memcpy(copy, x.ids, sizeof *copy * (size_t)x.rows);
            CHECK(source->seek(l, 1, 0) == TT_OK && source->seek(l, 4, step) == TT_OK);
            CHECK(source->next(l, &y, &more) == TT_OK && more && y.rows == x.rows);
            CHECK(memcmp(copy, y.ids, sizeof *copy * (size_t)x.rows) == 0);
        }
        CHECK(source->seek(l, 0, source->steps + 1) == TT_ERR_ARGUMENT);
        CHECK(source->hash(l) == source->hash(l) && source->hash(l) != 0);
        tt_token_loader_free(l);
        tt_token_stream_free(s);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(windows_of_bad_options)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_token_stream *s = of_text(ctx, "some text", NULL);
    static const struct { int batch, accumulate, length, groups, data; const char *error; } rows[] = {
        {0, 1, 4, 0, 1, "batch = 0 and accumulate = 1"}, {4, 5, 4, 0, 1, "expected 1 <= accumulate <= batch"},
        {4, 1, 0, 0, 1, "length is 0"}, {4, 1, 4, 3, 2, "parallel.groups = 3 and parallel.data = 2"},
        {4, 2, 4, 4, 1, "batch = 4 has fewer sequences than micro-batches, accumulate = 2 for each of 4 "
         "groups"},
        {2000000000, 1, 1000, 0, 1, "a micro-batch must have less than 2^29 tokens"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        tt_token_loader_options o = tt_token_loader_options_default();
        o.batch = rows[k].batch;
        o.accumulate = rows[k].accumulate;
        o.length = rows[k].length;
        o.parallel.groups = rows[k].groups;
        o.parallel.data = rows[k].data;
        CHECK(tt_token_loader_new(ctx, s, &o) == NULL);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, rows[k].error);
    }
    CHECK(tt_token_loader_source(NULL) == NULL);
    tt_token_stream_free(s);
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------------------- faults */

/* Reads, writes and opens a stream, and takes windows. Returns the status of the first failure. */
static tt_status all_of_it(tt_context *ctx, const char *folder)
{
    char path[700];
    bool more = true;
    tt_batch b;
    tt_stream_options o = tt_stream_options_default();
    o.separator = "";
    tt_token_stream *s = tt_token_stream_read(ctx, folder, &o), *again = NULL, *part = NULL;
    tt_token_loader *l = NULL;
    snprintf(path, sizeof path, "%s/ids.bin", folder);
    tt_status status = s ? tt_token_stream_write(s, path) : tt_error_code(ctx);
    if (status == TT_OK && !(again = tt_token_stream_open(ctx, path, 2, 257, 256)))
        status = tt_error_code(ctx);
    if (status == TT_OK && !(part = tt_token_stream_split(again, 3))) status = tt_error_code(ctx);
    tt_token_loader_options lo = tt_token_loader_options_default();
    lo.length = 4;
    if (status == TT_OK && !(l = tt_token_loader_new(ctx, again, &lo))) status = tt_error_code(ctx);
    memset(&b, 0, sizeof b);
    if (status == TT_OK) status = tt__window_next(l, &b, &more);
    tt_token_loader_free(l);
    tt_token_stream_free(part);
    tt_token_stream_free(again);
    tt_token_stream_free(s);
    return status;
}

TEST(faults)
{
    char folder[600];
    snprintf(folder, sizeof folder, "%s", test_folder());
    test_write(test_path(folder, "a.txt"), "some\n\ntext", 10);
    test_write(test_path(folder, "b.txt"), "more\n", 5);
    for (long fail_at = 0, calls = 1; fail_at <= calls; fail_at++) { /* each allocation fails once */
        test_allocator a;
        tt_context *ctx = test_open(&a);
        const long before = a.calls;
        a.fail_at = fail_at ? before + fail_at : 0;
        const tt_status status = all_of_it(ctx, folder);
        CHECK(fail_at ? status == TT_ERR_MEMORY : status == TT_OK);
        if (!fail_at) calls = a.calls - before;
        CHECK(calls > 8);
        a.fail_at = 0;
        TEST_CLOSE(ctx, &a);
    }
    static const char ops[] = "orzwscn";
    for (const char *op = ops; *op; op++) { /* each access to a file fails once */
        int failed = 0;
        for (long at = 1;; at++) {
            test_allocator a;
            test_files f;
            tt_context_options o = test_options(&a);
            o.files = test_failing_files(&f, *op, at);
            tt_context *ctx = tt_open(&o);
            f.calls = 0;
            const tt_status status = all_of_it(ctx, folder);
            const bool reached = f.calls >= at;
            if (reached && *op != 'c') { /* a failed close of a file that was read is no error */
                CHECK(status == TT_ERR_FILE);
                CHECK_ERROR(ctx, TT_ERR_FILE, "injected");
                failed++;
            }
            TEST_CLOSE(ctx, &a);
            if (!reached) break;
        }
        CHECK(failed || *op == 'c');
    }
}

static const test_case tests[] = {TEST_CASE(texts), TEST_CASE(ids_of_larger_models_are_refused),
    TEST_CASE(texts_with_a_tokenizer),
    TEST_CASE(files_and_folders), TEST_CASE(spelled_out_ends), TEST_CASE(ordinary_tokens_as_ends),
        TEST_CASE(invalid_texts_of_a_tokenizer_are_refused), TEST_CASE(windows),
        TEST_CASE(windows_of_bad_options), TEST_CASE(faults)};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
