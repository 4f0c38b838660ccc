/* Fuzzes folders of models: config.json, preprocessor_config.json or modules.json, and the list of tensors.
   A model that loads can be planned, and is unchanged when it is saved and loaded again.

   Input: one byte each for the model, for the number of classes asked for, and for the size of images asked
   for; then, with "%%" lines between them, config.json, a second file (empty: no such file), and a line
   for each tensor: its name, dtype and dimensions. From these lines a valid model.safetensors is made,
   since the target `safetensors` tests the format. The second file is preprocessor_config.json for
   images, and modules.json for texts; 1_Pooling/config.json has the pooling of the first token. */
#include "fuzz.h"

enum { MAX_BYTES = 1 << 20, MAX_TENSORS = 256 };

static size_t dtype_bytes(const char *dtype)
{
    static const struct {
        const char *name;
        size_t bytes;
    } all[] = {{"F32", 4}, {"BF16", 2}, {"F16", 2}, {"F64", 8}, {"I64", 8}, {"I32", 4}, {"U8", 1}};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++)
        if (strcmp(all[k].name, dtype) == 0) return all[k].bytes;
    return 0;
}

static void append_text(fuzz_file *f, const char *text) { fuzz_append(f, text, strlen(text)); }

/* Adds a tensor's entry to the header, and its size to *data. Skips lines that describe no tensor. */
static void append_tensor(fuzz_file *f, const char *line, size_t n, size_t *data)
{
    char copy[256], *word[10], *rest = copy, text[96];
    int words = 0;
    if (n >= sizeof copy) return;
    memcpy(copy, line, n);
    copy[n] = 0;
    for (char *c = copy; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ' || (unsigned char)*c > '~') *c = '_';
    for (char *w = strtok_r(copy, " ", &rest); w && words < 10; w = strtok_r(NULL, " ", &rest))
        word[words++] = w;
    if (words < 2 || !dtype_bytes(word[1])) return;
    size_t bytes = dtype_bytes(word[1]);
    for (int k = 2; k < words; k++) {
        unsigned long dim = strtoul(word[k], NULL, 10);
        if (dim > MAX_BYTES || (bytes *= dim) > MAX_BYTES) return;
    }
    if (bytes > MAX_BYTES - *data) return;
    append_text(f, f->n > 9 ? ",\"" : "\"");
    append_text(f, word[0]);
    append_text(f, "\":{\"dtype\":\"");
    append_text(f, word[1]);
    append_text(f, "\",\"shape\":[");
    for (int k = 2; k < words; k++) {
        snprintf(text, sizeof text, k > 2 ? ",%lu" : "%lu", strtoul(word[k], NULL, 10));
        append_text(f, text);
    }
    snprintf(text, sizeof text, "],\"data_offsets\":[%zu,%zu]}", *data, *data + bytes);
    append_text(f, text);
    *data += bytes;
}

static void write_tensors(const char *path, fuzz_input lines)
{
    static uint8_t numbers[MAX_BYTES]; /* finite and not 0 in all float dtypes */
    fuzz_file *f = fuzz_create(path);
    uint64_t header = 0;
    size_t data = 0;
    int tensors = 0;
    if (!numbers[0]) memset(numbers, 0x3C, sizeof numbers);
    fuzz_append(f, &header, sizeof header);
    append_text(f, "{");
    while (lines.left && tensors++ < MAX_TENSORS) {
        const uint8_t *end = (const uint8_t *)memchr(lines.at, '\n', lines.left);
        size_t n = end ? (size_t)(end - lines.at) : lines.left;
        append_tensor(f, (const char *)lines.at, n, &data);
        lines.at += n + (end != NULL);
        lines.left -= n + (end != NULL);
    }
    append_text(f, "}");
    header = f->n - 8;
    memcpy(f->bytes, &header, sizeof header);
    fuzz_append(f, numbers, data);
}

typedef struct any_model {
    bool images;
    tt_bert bert;
    tt_vit vit;
} any_model;

static bool load(tt_context *ctx, any_model *m, const char *folder, int image_size, int classes)
{
    return (m->images ? tt_vit_load(ctx, &m->vit, folder, image_size, classes)
                      : tt_bert_load(ctx, &m->bert, folder, classes)) == TT_OK;
}

static bool save(const any_model *m, const char *folder)
{
    return (m->images ? tt_vit_save(&m->vit, folder) : tt_bert_save(&m->bert, folder)) == TT_OK;
}

static void free_model(any_model *m)
{
    if (m->images)
        tt_vit_free(&m->vit);
    else
        tt_bert_free(&m->bert);
}

static void plan(tt_context *ctx, const any_model *m)
{
    tt_model model = m->images ? tt_vit_classifier(&m->vit) : tt_bert_model(&m->bert);
    tt_train_options o = tt_train_options_default();
    o.compile.train = false;
    o.max_seqs = 1;
    o.max_tokens = 4;
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (FUZZ_MUST(ctx, t != NULL)) FUZZ_CHECK(tt_program_plan(tt_trainer_program(t)).bytes > 0);
    tt_trainer_free(t);
}

/* Loads the model saved in folder "a", in a new context, since parameters belong to their context. */
static void check_saved(any_model *m)
{
    tt_context *ctx = fuzz_open();
    if (FUZZ_MUST(ctx, load(ctx, m, "a", 0, 0))) {
        plan(ctx, m);
        if (FUZZ_MUST(ctx, save(m, "b"))) {
            FUZZ_CHECK(fuzz_same_files("a/config.json", "b/config.json") &&
                       fuzz_same_files("a/model.safetensors", "b/model.safetensors"));
            FUZZ_CHECK(!m->images ||
                       fuzz_same_files("a/preprocessor_config.json", "b/preprocessor_config.json"));
            FUZZ_CHECK(m->images || m->bert.config.task != TT_TASK_EMBED ||
                       (fuzz_same_files("a/modules.json", "b/modules.json") &&
                        fuzz_same_files("a/1_Pooling/config.json", "b/1_Pooling/config.json")));
        }
        free_model(m);
    }
    fuzz_close(ctx);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    fuzz_input in = {bytes, n};
    any_model first, again;
    memset(&first, 0, sizeof first);
    first.images = fuzz_byte(&in) % 2 != 0;
    again = first;
    int classes = fuzz_byte(&in) % 8, image_size = fuzz_byte(&in);
    fuzz_input config = fuzz_part(&in), second = fuzz_part(&in);
    static const char pooling[] = "{\"pooling_mode\": \"cls\"}";
    fuzz_remove_all();
    if (config.left) fuzz_write("m/config.json", config.at, config.left);
    if (second.left)
        fuzz_write(first.images ? "m/preprocessor_config.json" : "m/modules.json", second.at, second.left);
    if (!first.images) fuzz_write("m/1_Pooling/config.json", (const uint8_t *)pooling, strlen(pooling));
    write_tensors("m/model.safetensors", in);

    tt_context *ctx = fuzz_open();
    if (fuzz_ok(ctx, load(ctx, &first, "m", image_size, classes))) {
        if (FUZZ_MUST(ctx, save(&first, "a"))) check_saved(&again);
        free_model(&first);
    }
    fuzz_close(ctx);
    return 0;
}
