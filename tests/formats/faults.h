/* Tests of allocations that fail, and of mutated files. */
#pragma once

/* --------------------------------------------------------------------------------- failures of allocation */

/* Reads a folder's files of text pairs, which have labels or scores, and of sentences, which have tags. Makes
   batches of each file. */
static bool use_tasks(tt_context *ctx, const char *folder, const tt_tokenizer *k)
{
    static const struct { const char *name; tt_task task; } files[] = {
        {"pairs.jsonl", TT_TASK_LABELS}, {"scores.csv", TT_TASK_SCORES}, {"tags.jsonl", TT_TASK_TAGS},
        {"tags.conll", TT_TASK_TAGS}};
    bool ok = true;
    for (int i = 0; i < TEST_COUNT(files) && ok; i++) {
        tt_table_options o = tt_table_options_default();
        o.task = files[i].task;
        char path[800];
        snprintf(path, sizeof path, "%s/%s", folder, files[i].name);
        tt_dataset *d = tt_dataset_table(ctx, path, NULL, NULL, 0, &o);
        tt_dataset *part = d ? tt_dataset_split(d, 1) : NULL;
        float weights[8];
        ok = part && tt_dataset_weights(d, weights) == TT_OK;
        tt_loader *l = ok ? tt_loader_new(ctx, d, k, NULL) : NULL;
        tt_batch b;
        ok = l && tt_loader_next(l, &b) && (b.tags || b.label_values);
        tt_loader_free(l);
        tt_dataset_free(part);
        tt_dataset_free(d);
    }
    return ok;
}

static bool use_everything(tt_context *ctx, const char *folder, const char *csv, const char *safetensors)
{
    static const char *const classes[] = {"c0", "c1", "c2"}, *const metadata[] = {"step", "3", NULL};
    tt_tensor_info t = tensor("a", "F32", 1, 1, 0);
    tt_safetensors_writer *w = tt_safetensors_begin(ctx, safetensors, &t, 1, metadata);
    bool ok = w && tt_safetensors_write(w, "1234", 4) == TT_OK;
    if (w) ok = tt_safetensors_end(w) == TT_OK && ok;
    tt_safetensors *s = ok ? tt_safetensors_open(ctx, safetensors) : NULL;
    tt_tokenizer *k = s ? tt_tokenizer_load(ctx, folder) : NULL;
    static const tt_text texts[] = {{.text = "x", .bytes = 1}, {.text = "y", .bytes = 1, .label = 1},
                                    {.text = "z", .bytes = 1, .label = 2}};
    tt_dataset *i = k ? tt_dataset_texts(ctx, TT_TASK_CLASS, texts, 3, classes, 3) : NULL;
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
    ok = ok && use_tasks(ctx, folder, k);
    tt_dataset_free(d);
    tt_dataset_free(c);
    tt_dataset_free(i);
    tt_tokenizer_free(k);
    tt_safetensors_close(s);
    return ok;
}

/* Each allocation fails once: an error says so, and nothing leaks or crashes. */
TEST(allocation_failures)
{
    char folder[600], path[800], csv[800], safetensors[800];
    make_imdb(folder);
    snprintf(path, sizeof path, "%s/vocab.txt", folder);
    test_write(path, "[UNK]\n[CLS]\n[SEP]\na\nb\nc\nd\ne\nf\ng\nh\ni\nj\nk\nl\nm\nn\n", 46);
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    test_write(path, "{\"do_lower_case\": true, \"a\": [1, 2, {\"x\": \"y\"}]}", 48);
    static const char pairs[] = "{\"text\":\"a\",\"text_pair\":\"b c\",\"label\":[\"x\"]}\n"
                                "{\"text\":\"d\",\"label\":[\"y\",\"x\"]}\n{\"text\":\"d\",\"label\":[]}\n";
    static const char tags[] =
        "{\"tokens\":[\"a\",\"b\"],\"tags\":[0,1]}\n{\"tokens\":[\"a\"],\"tags\":[1]}\n";
    static const char scores[] = "text,label\na,\"1,2\"\nb,\"3,4\"\nc,\"5,6\"\n";
    static const char conll[] = "a X\nb Y\n\nc X\n";
    test_write(test_path(folder, "pairs.jsonl"), pairs, sizeof pairs - 1);
    test_write(test_path(folder, "scores.csv"), scores, sizeof scores - 1);
    test_write(test_path(folder, "tags.jsonl"), tags, sizeof tags - 1);
    test_write(test_path(folder, "tags.conll"), conll, sizeof conll - 1);
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
        size_t before = tt_allocated_bytes(ctx); /* bytes of the context alone */
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

/* A file in memory, which the context opens in place of a file on disk. */
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
    CHECK(at <= ((memory_file *)file)->n && n <= ((memory_file *)file)->n - at); /* no read beyond the end */
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
            /* All tensors that the header announces can be read. */
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
    /* Some mutated files can still be read. */
    for (int i = 0; i < 4; i++) CHECK(good[i] > 20);
    CHECK(tt_allocated_bytes(ctx) == before);
    tt_close(ctx);
    tt_tokenizer_free(k);
    TEST_CLOSE(files, &a);
}
