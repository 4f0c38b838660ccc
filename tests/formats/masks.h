/* Masked tokens: what a loader chooses and writes for TT_TASK_MASKED_LM. */
#pragma once

enum { MASK_TEXTS = 60, MASK_LENGTH = 90 };

/* An epoch, text by text: ids after and before masking, and which tokens were chosen. */
typedef struct mask_log {
    int32_t ids[MASK_TEXTS][MASK_LENGTH], plain[MASK_TEXTS][MASK_LENGTH];
    char chosen[MASK_TEXTS][MASK_LENGTH];
    int length[MASK_TEXTS], count[MASK_TEXTS];
} mask_log;

/* Makes texts of 0 to 28 words of one token or several, with punctuation and special tokens between them. */
static tt_dataset *mask_texts(tt_context *ctx)
{
    static const char *const pieces[] = {"the ", "fox ", "unbelievable ", "it, ", "[SEP] ", "<mask> ",
                                         "there ", "re-formed ", "\xE4\xB8\xAD ", "it's "};
    static char text[MASK_TEXTS][500];
    tt_text texts[MASK_TEXTS];
    uint64_t seed = 3;
    memset(texts, 0, sizeof texts);
    for (int k = 0; k < MASK_TEXTS; k++) {
        text[k][0] = 0;
        for (int w = 0; w < k * 37 % 29; w++)
            strcat(text[k], pieces[test_random(&seed) % TEST_COUNT(pieces)]);
        texts[k].text = text[k];
        texts[k].bytes = strlen(text[k]);
    }
    return tt_dataset_texts(ctx, TT_TASK_MASKED_LM, texts, MASK_TEXTS, NULL, 0);
}

/* Loads a tokenizer of tests/golden/bpe, with a file beside it that names the special tokens. */
static tt_tokenizer *mask_tokenizer(tt_context *ctx, const char *kind)
{
    const bool bert = strncmp(kind, "wordpiece", 9) == 0, roberta = strcmp(kind, "roberta") == 0;
    char folder[1000], config[200];
    size_t n;
    snprintf(folder, sizeof folder, "bpe/%s", kind);
    char *text = test_read(test_path(TEST_GOLDEN(folder), "tokenizer.json"), &n);
    snprintf(folder, sizeof folder, "%s", test_folder());
    test_write(test_path(folder, "tokenizer.json"), text, n);
    free(text);
    snprintf(config, sizeof config, "{\"mask_token\": \"%s\", \"unk_token\": \"%s\", \"cls_token\": \"%s\", "
             "\"sep_token\": \"%s\"}", roberta ? "<mask>" : "[MASK]", bert ? "[UNK]" : "<unk>",
             roberta ? "<s>" : "[CLS]", roberta ? "</s>" : "[SEP]");
    test_write(test_path(folder, "tokenizer_config.json"), config, strlen(config));
    return tt_tokenizer_load(ctx, folder);
}

/* Reads an epoch, and checks the shapes of its arrays. */
static void mask_read(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k, const tt_loader_options *o,
                      int64_t epoch, mask_log *log)
{
    tt_loader *l = tt_loader_new(ctx, d, k, o);
    tt_batch b;
    int seen = 0;
    memset(log, 0, sizeof *log);
    REQUIRE(l && tt_loader_seek(l, epoch, 0) == TT_OK);
    while (tt_loader_next(l, &b)) {
        REQUIRE(b.n_arrays == 2 && strcmp(b.arrays[0].input, "masked") == 0 &&
                strcmp(b.arrays[1].input, "targets") == 0);
        const int32_t *masked = (const int32_t *)b.arrays[0].data;
        const int32_t *targets = (const int32_t *)b.arrays[1].data;
        const int64_t n = b.arrays[0].rows;
        int64_t next = 0;
        CHECK(n >= 1 && n == b.arrays[1].rows && n <= tt_loader_source(l)->max_masked);
        for (int s = 0; s < b.seqs; s++, seen++) {
            const int64_t text = b.index[s];
            size_t bytes;
            const char *from = tt_dataset_text(d, text, &bytes);
            const int first = b.seq_start[s], length = b.seq_start[s + 1] - first;
            REQUIRE(length <= MASK_LENGTH);
            CHECK(tt_tokenize(k, from, bytes, log->plain[text], o->max_length) == length);
            memcpy(log->ids[text], b.ids + first, sizeof(int32_t) * (size_t)length);
            log->length[text] = length;
            for (; next < n && masked[next] < first + length && targets[next] >= 0; next++) {
                const int place = masked[next] - first;
                REQUIRE(place >= 0);
                CHECK(!next || masked[next] > masked[next - 1]);
                CHECK(targets[next] == log->plain[text][place]);
                log->chosen[text][place] = 1;
                log->count[text]++;
            }
        }
        CHECK(next == n || (n == 1 && targets[0] == -100));
    }
    CHECK(tt_loader_status(l) == TT_OK && seen == MASK_TEXTS);
    tt_loader_free(l);
}

static bool mask_special(const tt_tokenizer *k, int32_t id)
{
    bool special = false;
    for (int role = 0; role < TT_TOKEN_COUNT; role++)
        special = special || id == tt_tokenizer_special(k, (tt_special_token)role);
    return special;
}

/* The loader chooses a share of each text's tokens, but no special tokens. 80% of the chosen tokens are
   masked, 10% become random tokens, and 10% stay. The choice depends on seed, epoch and text alone. */
TEST(loader_masks_tokens)
{
    static mask_log all, other;
    static const char *const kinds[] = {"wordpiece", "roberta", "albert"};
    double chosen = 0, masked = 0, same = 0;
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_dataset *d = mask_texts(ctx);
    REQUIRE(d && tt_dataset_classes(d) == 0 && tt_dataset_label(d, 0) == -1);
    for (int kind = 0; kind < TEST_COUNT(kinds); kind++) {
        tt_tokenizer *k = mask_tokenizer(ctx, kinds[kind]);
        REQUIRE(k && tt_tokenizer_special(k, TT_TOKEN_MASK) >= 0);
        const int32_t mask = tt_tokenizer_special(k, TT_TOKEN_MASK);
        tt_loader_options o = tt_loader_options_default();
        CHECK(o.mask_rate == 0.15f && !o.whole_words);
        o.max_length = MASK_LENGTH;
        o.batch = 7;
        for (int epoch = 0; epoch < 40; epoch++) {
            mask_read(ctx, d, k, &o, epoch, &all);
            for (int t = 0; t < MASK_TEXTS; t++) {
                int tokens = 0;
                for (int i = 0; i < all.length[t]; i++) {
                    const bool special = mask_special(k, all.plain[t][i]);
                    tokens += !special;
                    CHECK(!all.chosen[t][i] || !special);
                    CHECK(all.chosen[t][i] || all.ids[t][i] == all.plain[t][i]);
                    chosen += all.chosen[t][i];
                    masked += all.chosen[t][i] && all.ids[t][i] == mask;
                    same += all.chosen[t][i] && all.ids[t][i] == all.plain[t][i];
                    CHECK(all.ids[t][i] >= 0 && all.ids[t][i] < tt_tokenizer_size(k));
                }
                const int want = (int)floor((double)0.15f * tokens + 0.5);
                CHECK(all.count[t] == (tokens && !want ? 1 : want));
            }
        }
        mask_read(ctx, d, k, &o, 0, &all);
        tt_loader_options p = o;
        p.batch = 3;
        p.shuffle = false;
        p.parallel.groups = 2;
        mask_read(ctx, d, k, &p, 0, &other);
        CHECK(memcmp(&all, &other, sizeof all) == 0);
        mask_read(ctx, d, k, &o, 1, &other);
        CHECK(memcmp(all.chosen, other.chosen, sizeof all.chosen) != 0);
        tt_tokenizer_free(k);
    }
    if (getenv("TINYTRAIN_TEST_VERBOSE"))
        printf("  of %.0f chosen tokens %.4f were masked, %.4f stayed\n", chosen, masked / chosen,
               same / chosen);
    /* The tolerance is four standard deviations, plus 0.1 / 400: a tenth of the chosen tokens become random
       tokens, and a random token is the old token, or the mask token, with a probability below 1 / 400. */
    CHECK_NEAR(masked / chosen, 0.8, 4 * sqrt(0.16 / chosen) + 0.1 / 400);
    CHECK_NEAR(same / chosen, 0.1, 4 * sqrt(0.09 / chosen) + 0.1 / 400);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

/* With whole_words, all tokens of a word are chosen, or none of them. The number of chosen tokens does not
   exceed the number without whole_words. */
TEST(loader_masks_whole_words)
{
    static const struct { const char *kind; const char *begins; } rows[] = {
        {"wordpiece", NULL}, {"roberta", "\xC4\xA0"}, {"albert", "\xE2\x96\x81"}};
    static mask_log all;
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_dataset *d = mask_texts(ctx);
    for (int row = 0; row < TEST_COUNT(rows); row++) {
        int words = 0, several = 0; /* chosen words; chosen words of several tokens */
        tt_tokenizer *k = mask_tokenizer(ctx, rows[row].kind);
        tt_loader_options o = tt_loader_options_default();
        o.max_length = MASK_LENGTH;
        o.whole_words = true;
        o.mask_rate = 0.3f;
        mask_read(ctx, d, k, &o, 2, &all);
        for (int t = 0; t < MASK_TEXTS; t++) {
            int tokens = 0;
            for (int i = 0; i < all.length[t]; i++) {
                const char *token = tt_tokenizer_token(k, all.plain[t][i]), *begins = rows[row].begins;
                const bool special = mask_special(k, all.plain[t][i]);
                const bool follows = i && !mask_special(k, all.plain[t][i - 1]) && !special &&
                                     (begins ? strncmp(token, begins, strlen(begins)) != 0
                                             : strncmp(token, "##", 2) == 0);
                if (follows) CHECK(all.chosen[t][i] == all.chosen[t][i - 1]);
                words += all.chosen[t][i] && !follows;
                several += all.chosen[t][i] && follows && !(i > 1 && all.chosen[t][i - 2]);
                tokens += !special;
            }
            CHECK(all.count[t] <= (tokens == 1 ? 1 : (int)floor((double)0.3f * tokens + 0.5)) || tokens < 4);
        }
        CHECK(words > 20 && several > 5);
        tt_tokenizer_free(k);
    }
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

/* Texts without labels are read from tables, from lines of JSON and from text files. A text file is divided
   into training and test parts as a table is. */
TEST(texts_to_mask_are_read)
{
    static const struct { const char *name, *text; int64_t count; const char *first; } rows[] = {
        {"mask.csv", "id,text\n1,a b\n2,\"c, d\"\n", 2, "a b"},
        {"mask.tsv", "label\ttext\nx\ta\n", 1, "a"},
        {"mask.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\", \"label\": 3}\n", 2, "a"},
        {"mask.txt", "\xEF\xBB\xBFtext, label  \r\n\n \t \n\tb\n\nc", 3, "text, label"},
        {"mask.txt", "\n \n", 0, "has no rows: add rows"},
        {"mask.csv", "id,words\n1,a\n", 0, "is named 'text'"}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_table_options o = tt_table_options_default();
    o.task = TT_TASK_MASKED_LM;
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        const char *path = test_path(test_folder(), rows[k].name);
        test_write(path, rows[k].text, strlen(rows[k].text));
        tt_dataset *d = tt_dataset_table(ctx, path, NULL, NULL, 0, &o);
        CHECK(rows[k].count == (d ? tt_dataset_count(d) : 0));
        if (d) CHECK(strcmp(tt_dataset_text(d, 0, NULL), rows[k].first) == 0 && !tt_dataset_classes(d));
        else CHECK_ERROR(ctx, TT_ERR_FORMAT, rows[k].first);
        tt_dataset_free(d);
    }
    const char *path = test_path(test_folder(), "many.txt");
    test_write(path, "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n", 24);
    for (int part = 0; part < 2; part++) {
        tt_dataset *d = tt_dataset_table(ctx, path, part ? "test" : "train", NULL, 0, &o);
        CHECK(d && tt_dataset_count(d) == (part ? 2 : 9));
        tt_dataset_free(d);
    }
    static const char *const classes[] = {"a"};
    CHECK(!tt_dataset_table(ctx, path, NULL, classes, 1, &o));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "1 classes are given, but TT_TASK_MASKED_LM has no classes");
    TEST_CLOSE(ctx, &a);
}

TEST(masks_that_are_refused)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_dataset *d = mask_texts(ctx);
    tt_tokenizer *k = tt_tokenizer_load(ctx, TEST_GOLDEN("bpe/wordpiece"));
    tt_tokenizer *gpt = tt_tokenizer_load(ctx, TEST_GOLDEN("bpe/gpt2"));
    static const float rates[] = {0, 1, -0.1f, NAN};
    REQUIRE(d && k && gpt);
    for (int i = 0; i < TEST_COUNT(rates); i++) {
        tt_loader_options o = tt_loader_options_default();
        o.mask_rate = rates[i];
        CHECK(!tt_loader_new(ctx, d, k, &o));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "but must be above 0 and below 1");
    }
    CHECK(!tt_loader_new(ctx, d, gpt, NULL));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the tokenizer has no token that masks others");
    tt_tokenizer_free(gpt);
    tt_tokenizer_free(k);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

/* A loader that masks tokens leaks no memory when an allocation fails. */
TEST(masks_without_memory)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_dataset *d = mask_texts(ctx);
    tt_tokenizer *k = tt_tokenizer_load(ctx, TEST_GOLDEN("bpe/wordpiece"));
    const size_t before = tt_allocated_bytes(ctx);
    bool done = false;
    int n = 1;
    for (; !done && n < 100; n++) {
        a.failed = false;
        a.fail_at = a.calls + n;
        tt_loader *l = tt_loader_new(ctx, d, k, NULL);
        done = l != NULL;
        CHECK(done == !a.failed);
        if (!done) CHECK_ERROR(ctx, TT_ERR_MEMORY, "memory");
        tt_loader_free(l);
        CHECK(tt_allocated_bytes(ctx) == before);
    }
    CHECK(done && n > 15);
    a.fail_at = 0;
    tt_tokenizer_free(k);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}
