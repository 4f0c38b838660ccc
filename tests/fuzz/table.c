/* Fuzzes a table of texts and labels: CSV, TSV, lines of JSON or CoNLL, for each task. Texts and labels are
   in range, and a loader gives each text once. If the labels are classes, the texts and labels are unchanged
   when they are written with quotes and read again.

   Input: a byte of flags; a byte that sets the batch size and the task; the file. */
#include "fuzz.h"

enum { MAX_LENGTH = 16 };

static void append_field(fuzz_file *f, const char *text, size_t n, char end)
{
    fuzz_append(f, "\"", 1);
    for (size_t k = 0; k < n; k++) {
        if (text[k] == '"') fuzz_append(f, "\"", 1);
        fuzz_append(f, text + k, 1);
    }
    fuzz_append(f, "\"", 1);
    fuzz_append(f, &end, 1);
}

static void write_again(tt_context *ctx, const tt_dataset *d)
{
    fuzz_file *f = fuzz_create("again.csv");
    fuzz_append(f, "label,text\r\n", 12);
    for (int64_t i = 0; i < tt_dataset_count(d); i++) {
        size_t n;
        const char *text = tt_dataset_text(d, i, &n),
                   *label = tt_dataset_class_name(d, tt_dataset_label(d, i));
        append_field(f, label, strlen(label), ',');
        append_field(f, text, n, '\n');
    }
    tt_dataset *again = tt_dataset_table(ctx, "again.csv", NULL, NULL, 0, NULL);
    /* The new table has no other columns, so control characters may be a larger share of its bytes: too large
       for a text file. */
    if (!again && strstr(tt_error(ctx), "are control characters")) return;
    if (!FUZZ_MUST(ctx, again != NULL)) return;
    FUZZ_CHECK(tt_dataset_count(again) == tt_dataset_count(d) &&
               tt_dataset_classes(again) <= tt_dataset_classes(d));
    for (int64_t i = 0; i < tt_dataset_count(d); i++) {
        size_t n, m;
        const char *a = tt_dataset_text(d, i, &n), *b = tt_dataset_text(again, i, &m);
        FUZZ_CHECK(n == m && memcmp(a, b, n) == 0);
        FUZZ_CHECK(strcmp(tt_dataset_class_name(d, tt_dataset_label(d, i)),
                          tt_dataset_class_name(again, tt_dataset_label(again, i))) == 0);
    }
    tt_dataset_free(again);
}

static void load_batches(tt_context *ctx, const tt_dataset *d, int batch)
{
    static const char vocab[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\ngood\nbad\nfilm\n##s\na\n,\n\"\n";
    tt_loader_options o = tt_loader_options_default();
    tt_batch b;
    fuzz_write("vocab.txt", vocab, sizeof vocab - 1);
    tt_tokenizer *k = tt_tokenizer_open(ctx, "vocab.txt", true);
    o.batch = 1 + batch % 8;
    o.accumulate = 1 + batch / 8 % o.batch;
    o.max_length = MAX_LENGTH;
    o.shuffle = batch < 128;
    o.window = 2;
    o.threads = 0;
    tt_loader *l = k ? tt_loader_new(ctx, d, k, &o) : NULL;
    int64_t seen = 0, sum = 0, n = tt_dataset_count(d), steps = 0;
    if (FUZZ_MUST(ctx, l != NULL)) {
        bool more;
        while ((more = tt_loader_next(l, &b))) {
            FUZZ_CHECK(b.seqs >= 1 && b.seqs <= tt_loader_max_seqs(l) && b.rows <= tt_loader_max_tokens(l) &&
                       b.seq_start[0] == 0 && b.seq_start[b.seqs] == b.rows);
            for (int i = 0; i < b.seqs; i++) {
                int length = b.seq_start[i + 1] - b.seq_start[i];
                FUZZ_CHECK(length >= 2 && length <= MAX_LENGTH && b.index[i] >= 0 && b.index[i] < n &&
                           b.labels[i] == tt_dataset_label(d, b.index[i]));
                sum += b.index[i];
            }
            for (int i = 0; i < b.rows; i++)
                FUZZ_CHECK(b.ids[i] >= 0 && b.ids[i] < tt_tokenizer_size(k) && b.positions[i] >= 0 &&
                           b.types[i] >= 0 && b.types[i] <= 1);
            const tt_task task = tt_dataset_task(d);
            FUZZ_CHECK((b.tags != NULL) == (task == TT_TASK_TAGS));
            FUZZ_CHECK((b.label_values != NULL) == (task == TT_TASK_LABELS || task == TT_TASK_SCORES));
            for (int i = 0; i < b.rows && b.tags; i++)
                FUZZ_CHECK(b.tags[i] == -100 || (b.tags[i] >= 0 && b.tags[i] < tt_dataset_classes(d)));
            for (int i = 0; i < b.seqs * b.values; i++)
                FUZZ_CHECK(b.label_values[i] == tt_dataset_values(d, b.index[i / b.values])[i % b.values]);
            seen += b.seqs;
            steps += b.last_of_step;
        }
        if (FUZZ_MUST(ctx, tt_loader_status(l) == TT_OK))
            FUZZ_CHECK(seen == n && sum == n * (n - 1) / 2 && steps == tt_loader_steps(l));
    }
    tt_loader_free(l);
    tt_tokenizer_free(k);
}

static void check(tt_context *ctx, tt_dataset *d, int batch, size_t most_bytes, bool gives)
{
    int64_t count = tt_dataset_count(d), some = 1 + batch % count;
    int classes = tt_dataset_classes(d);
    for (int k = 0; k < classes; k++) FUZZ_CHECK(*tt_dataset_class_name(d, k));
    for (int k = 1; k < classes && !gives && !strpbrk(tt_dataset_class_name(d, k), "0123456789"); k++)
        FUZZ_CHECK(strcmp(tt_dataset_class_name(d, k - 1), tt_dataset_class_name(d, k)) < 0);
    for (int64_t i = 0; i < count; i++) {
        size_t length;
        const char *text = tt_dataset_text(d, i, &length);
        FUZZ_CHECK(length <= most_bytes && text[length] == 0);
        if (tt_dataset_task(d) != TT_TASK_CLASS) {
            const float *values = tt_dataset_values(d, i);
            int words;
            size_t end = 0;
            const tt_word *word = tt_dataset_words(d, i, &words);
            for (int c = 0; c < classes && values; c++)
                FUZZ_CHECK(tt_dataset_task(d) == TT_TASK_SCORES ? values[c] - values[c] == 0
                                                                : values[c] == 0 || values[c] == 1);
            for (int w = 0; w < words; end = word[w++].end)
                FUZZ_CHECK(word[w].begin >= end && word[w].end > word[w].begin && word[w].end <= length &&
                           word[w].tag >= -1 && word[w].tag < classes);
            continue;
        }
        FUZZ_CHECK(tt_dataset_label(d, i) >= 0 && tt_dataset_label(d, i) < classes);
        const char *pair = tt_dataset_pair(d, i, &length);
        if (pair) FUZZ_CHECK(length <= most_bytes && pair[length] == 0);
    }
    if (tt_dataset_task(d) == TT_TASK_CLASS) write_again(ctx, d);
    load_batches(ctx, d, batch);
    tt_dataset *part = tt_dataset_split(d, some);
    if (some == count) FUZZ_CHECK(part || *tt_error(ctx));
    else if (FUZZ_MUST(ctx, part != NULL))
        FUZZ_CHECK(tt_dataset_count(part) == some && tt_dataset_count(part) + tt_dataset_count(d) == count);
    tt_dataset_free(part);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    static const char *const splits[] = {NULL, "train", "test", "validation"};
    static const char *const given[] = {"pos", "neg", "1"};
    fuzz_input in = {bytes, n};
    int flags = fuzz_byte(&in), batch = fuzz_byte(&in);
    const char *path = flags & 64 ? "in.jsonl" : flags & 1 ? "in.tsv" : "in.csv";
    const char *split = splits[flags / 2 % 4];
    bool gives = (flags & 8) != 0;
    tt_table_options o = tt_table_options_default();
    if (flags & 16) {
        o.text_column = "review";
        o.label_column = "class";
        o.split_column = "part";
        o.delimiter = ';';
    }
    o.unquoted = (flags & 32) != 0;
    if (flags & 128) o.task = (tt_task)(1 + batch % 3);
    fuzz_remove_all();
    fuzz_write(path, in.at, in.left);

    tt_context *ctx = fuzz_open();
    tt_dataset *d = tt_dataset_table(ctx, path, split, gives ? given : NULL, gives ? 3 : 0, &o);
    if (fuzz_ok(ctx, d != NULL)) {
        if (tt_dataset_count(d)) check(ctx, d, batch, in.left, gives);
        else FUZZ_CHECK(split && strcmp(split, "train") != 0);
        tt_dataset_free(d);
    }
    fuzz_close(ctx);
    return 0;
}
