/* Tests of language models whose weights have few bits: bitsandbytes' folders (tests/golden/quantised) in and
   out, adapters on a base in few bits, generation. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

enum { TOKENS = 21, VOCAB = 48, STEPS = 6 };

/* kept: whether the quantised weights keep their codes. */
static const struct { const char *name, *stored; bool kept; } golden[] = {
    {"llama_nf4", "nf4", true}, {"llama_int8", "int8", true}, {"llama_fp4", NULL, false},
    {"llama_single", NULL, false}, {"gpt2_nf4", "nf4", true}, {"gpt2_int8", "int8", true},
    {"neox_nf4", "nf4", true}, {"neox_mixed", "nf4", false}, {"neox_int8", "int8", true}};
static const char *const formats[] = {"int8", "nf4", "int4"};

static const char *golden_path(const char *name, const char *file)
{
    char part[200];
    snprintf(part, sizeof part, "quantised/%s%s%s", name, *file ? "/" : "", file);
    return TEST_GOLDEN(part);
}

/* Computes the logits of TOKENS tokens. */
static void logits_of(tt_lm *m, const int32_t *ids, float *logits)
{
    tt_tape *t = tt_tape_new(m->ctx);
    tt_compile_options o = tt_compile_options_default();
    tt_inputs in;
    int32_t positions[TOKENS];
    const int32_t start[2] = {0, TOKENS};
    memset(&in, 0, sizeof in);
    o.train = false;
    for (int k = 0; k < TOKENS; k++) positions[k] = k;
    in.ids = tt_input(t, "ids", TT_I32, TOKENS, 1);
    in.positions = tt_input(t, "positions", TT_I32, TOKENS, 1);
    in.seq_start = tt_seq_start(t, "seq_start", 1);
    const tt_value root = tt_lm_logits(m, t, &in);
    tt_program *p = tt_compile(t, root, &o);
    if (!p) CHECK_ERROR(m->ctx, TT_OK, "the logits");
    if (p) {
        CHECK(tt_set(p, in.ids, ids, TOKENS) == TT_OK && tt_set(p, in.positions, positions, TOKENS) == TT_OK);
        CHECK(tt_set(p, in.seq_start, start, 2) == TT_OK && tt_run(p, NULL) == TT_OK);
        CHECK(tt_get(p, root, logits, (int64_t)TOKENS * m->config.vocab_size) == TT_OK);
    }
    tt_program_free(p);
    tt_tape_free(t);
}

/* Reads all numbers of a tensor of a golden file. Returns their count. */
static int64_t golden_numbers(tt_context *ctx, const char *name, const char *tensor, float *to, int64_t room)
{
    tt_safetensors *s = tt_safetensors_open(ctx, golden_path(name, "golden.safetensors"));
    const int k = s ? tt_safetensors_find(s, tensor) : -1;
    const int64_t n = k < 0 ? 0 : (int64_t)tt_safetensors_info(s, k)->bytes / 4;
    if (k >= 0 && n <= room && strcmp(tensor, "ids") == 0)
        CHECK(tt_safetensors_read_i32(s, k, 0, n, (int32_t *)(void *)to) == TT_OK);
    else if (CHECK(k >= 0 && n <= room)) CHECK(tt_safetensors_read_f32(s, k, 0, n, to) == TT_OK);
    tt_safetensors_close(s);
    return n;
}

/* The logits of models that bitsandbytes quantised and transformers saved equal those of their widened
   weights, and the widened weights equal bitsandbytes'. */
TEST(golden_quantised)
{
    for (int k = 0; k < TEST_COUNT(golden); k++) {
        test_allocator a;
        test_log log;
        tt_lm m;
        static float logits[TOKENS * VOCAB], want[TOKENS * VOCAB], widened[8192];
        int32_t ids[TOKENS];
        tt_context *ctx = test_open_logged(&a, &log);
        if (tt_lm_load(ctx, &m, golden_path(golden[k].name, "")) != TT_OK) {
            CHECK_ERROR(ctx, TT_OK, golden[k].name);
            return;
        }
        CHECK(golden[k].stored ? m.stored && strcmp(m.stored, golden[k].stored) == 0 : !m.stored);
        CHECK((m.stored_bytes > 0) == (m.stored != NULL));
        CHECK((log.warnings == 0) == golden[k].kept);
        CHECK(golden[k].kept || strstr(log.text, "become floats"));
        CHECK(golden_numbers(ctx, golden[k].name, "ids", (float *)(void *)ids, TOKENS) == TOKENS);
        const int64_t n = golden_numbers(ctx, golden[k].name, "logits", want, TOKENS * VOCAB);
        const int64_t some = golden_numbers(ctx, golden[k].name, "widened", widened, 8192);
        const tt_lm_layer *l = m.layer;
        const tt_param *p = l->qkv_w ? l->qkv_w : l->down_w;
        for (int with = 0; with < 2; with++) { /* from the file, and from a program's memory */
            float *values = test_values(p);
            CHECK((tt_param_size(p) + 28) / 29 == some);
            for (int64_t i = 0; i < some; i++) {
                const double error = fabs(values[29 * i] - widened[i]);
                if (!CHECK(error <= 2e-7 * fabs(widened[i]))) break;
            }
            free(values);
            if (!with) logits_of(&m, ids, logits);
        }
        for (int64_t i = 0; i < n; i++)
            if (!CHECK(fabs(logits[i] - want[i]) <= 2e-5)) break;
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* Checks that each tensor of a folder's one file is in another folder, with equal bytes. JSON texts, and
   floats with NULL `same`, are not compared. Returns the number of tensors. */
static int same_tensors(const char *one, const char *other)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_safetensors *s = tt_safetensors_open(ctx, test_path(one, "model.safetensors"));
    tt_safetensors *t = tt_safetensors_open(ctx, test_path(other, "model.safetensors"));
    const int n = s ? tt_safetensors_count(s) : 0;
    CHECK(s && t && n == tt_safetensors_count(t));
    for (int k = 0; s && t && k < n; k++) {
        const tt_tensor_info *x = tt_safetensors_info(s, k);
        const int at = tt_safetensors_find(t, x->name);
        if (!CHECK(at >= 0)) { fprintf(stderr, "no tensor '%s'\n", x->name); continue; }
        const tt_tensor_info *y = tt_safetensors_info(t, at);
        CHECK(strcmp(x->dtype, y->dtype) == 0);
        if (strstr(x->name, "quant_state")) continue;
        char *p = test_tensor(s, k), *q = test_tensor(t, at);
        CHECK(x->ndim == y->ndim && memcmp(x->dims, y->dims, sizeof *x->dims * (size_t)x->ndim) == 0);
        CHECK(p && q && x->bytes == y->bytes && memcmp(p, q, x->bytes) == 0);
        free(p);
        free(q);
    }
    tt_safetensors_close(s);
    tt_safetensors_close(t);
    TEST_CLOSE(ctx, &a);
    return n;
}

/* A folder of transformers is loaded and saved, and all tensors keep their bytes, also in several files and
   after a program has had the parameters. */
TEST(quantised_folders_go_round)
{
    for (int k = 0; k < 2 * TEST_COUNT(golden); k++) {
        const char *name = golden[k / 2].name;
        test_allocator a;
        tt_lm m, again;
        char once[600], parts[600];
        size_t n;
        static float x[TOKENS * VOCAB], y[TOKENS * VOCAB];
        int32_t ids[TOKENS] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
        if (!golden[k / 2].kept) continue;
        snprintf(once, sizeof once, "%s", test_path(test_folder(), "once"));
        snprintf(parts, sizeof parts, "%s", test_path(test_folder(), "parts"));
        tt_context *ctx = test_open(&a);
        CHECK(tt_lm_load(ctx, &m, golden_path(name, "")) == TT_OK);
        if (k % 2) logits_of(&m, ids, x);
        CHECK(tt_lm_save(&m, once) == TT_OK);
        m.shard_bytes = 9000;
        CHECK(tt_lm_save(&m, parts) == TT_OK);
        if (!(k % 2)) logits_of(&m, ids, x);
        const size_t count = (size_t)(TOKENS * m.config.vocab_size);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
        CHECK(same_tensors(golden_path(name, ""), once) > 20);
        char *config = test_read(test_path(once, "config.json"), &n);
        CHECK(config && strstr(config, "\"quant_method\": \"bitsandbytes\""));
        free(config);
        for (int part = 0; part < 2; part++) {
            ctx = test_open(&a);
            CHECK(tt_lm_load(ctx, &again, part ? parts : once) == TT_OK && again.stored);
            logits_of(&again, ids, y);
            CHECK(memcmp(x, y, sizeof *x * count) == 0);
            tt_lm_free(&again);
            TEST_CLOSE(ctx, &a);
        }
    }
}

static tt_status new_model(tt_context *ctx, tt_lm *m, const char *kind, int width)
{
    tt_lm_config c = tt_lm_config_sized(kind, 2, width, 4);
    c.vocab_size = VOCAB;
    c.max_positions = 64;
    c.intermediate_size = 2 * width;
    c.tied = false;
    c.initializer_range = 0.2f;
    return tt_lm_new(ctx, m, &c);
}

/* Replaces the weights of the linear layers by the values that a format rounds them to. */
static void round_weights(tt_lm *m, const char *format)
{
    char name[256];
    tt__packing order;
    tt_param *p;
    for (int k = 0; (p = tt__lm_module(m, k, name, &order)) != NULL; k++) {
        const int64_t rows = p->dims[0], cols = p->dims[1];
        int64_t block;
        const tt_dtype form = tt__form_of(format, &block);
        if (cols % block) continue;
        float *x = test_values(p), *scales = (float *)calloc((size_t)p->size, sizeof *scales);
        uint8_t *to = (uint8_t *)calloc(1, (size_t)tt__matrix_bytes(form, rows, cols));
        const tt__coding c = {form, rows, cols, to, scales};
        for (int64_t r = 0; r < rows; r++) CHECK(tt__encode_row(&c, r, x + r * cols));
        tt__encode_end(&c);
        const tt__codes codes = tt__codes_at(to, form, rows, cols);
        tt__widen_codes(x, &codes, 0, p->size);
        CHECK(tt_param_set(p, x) == TT_OK);
        free(x), free(to), free(scales);
    }
}

/* A model in few bits has the logits of the model of its rounded weights, bit for bit, and its adapters train
   like those on that model. Saved as a folder, it is the same model again: also int4, which is saved as
   floats. */
TEST(models_in_few_bits)
{
    static const char *const kinds[] = {"llama", "gpt2", "gpt_neox", "falcon"};
    for (int k = 0; k < TEST_COUNT(formats) * TEST_COUNT(kinds); k++) {
        const char *format = formats[k / TEST_COUNT(kinds)], *kind = kinds[k % TEST_COUNT(kinds)];
        static float x[4][TOKENS * VOCAB];
        int32_t ids[TOKENS];
        char folder[600];
        for (int i = 0; i < TOKENS; i++) ids[i] = i * 7 % VOCAB;
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "saved"));
        for (int part = 0; part < 4; part++) {
            test_allocator a;
            test_log log;
            tt_lm m;
            tt_context *ctx = test_open_logged(&a, &log);
            CHECK((part < 3 ? new_model(ctx, &m, kind, 64) : tt_lm_load(ctx, &m, folder)) == TT_OK);
            if (part == 1) round_weights(&m, format);
            if (part == 0 || part == 2)
                CHECK(tt_lm_store(&m, format) == TT_OK && strcmp(m.stored, format) == 0);
            if (part == 0) CHECK(log.infos == 1 && log.warnings == 0 && strstr(log.text, "are stored in "));
            if (part == 2) CHECK(tt_lm_save(&m, folder) == TT_OK); /* no program has had the parameters */
            logits_of(&m, ids, x[part]);
            tt_lm_free(&m);
            TEST_CLOSE(ctx, &a);
            if (!CHECK(memcmp(x[0], x[part], sizeof *x) == 0))
                fprintf(stderr, "%s, %s, part %d\n", kind, format, part);
        }
    }
}

/* Trains adapters for `steps` steps. Returns the loss of the last. */
static double train(tt_trainer *r, int from, int steps)
{
    tt_stats stats = {0};
    for (int step = from; step < from + steps; step++) {
        int32_t ids[TOKENS], positions[TOKENS], targets[TOKENS];
        const int32_t start[] = {0, 8, TOKENS};
        for (int i = 0; i < TOKENS; i++) {
            ids[i] = (i * 5 + step) % VOCAB;
            targets[i] = (i * 5 + step + 5) % VOCAB;
            positions[i] = i - (i < 8 ? 0 : 8);
        }
        const tt_array array = {"targets", targets, TOKENS};
        tt_batch b;
        memset(&b, 0, sizeof b);
        b.seqs = 2;
        b.rows = TOKENS;
        b.ids = ids;
        b.positions = positions;
        b.seq_start = start;
        b.arrays = &array;
        b.n_arrays = 1;
        b.last_of_step = true;
        CHECK(tt_train_batch(r, &b, &stats, NULL) == TT_OK);
    }
    return stats.loss;
}

static tt_trainer *adapters_of(tt_context *ctx, tt_lm *m, tt_model *model, const char *precision,
                               const char *recompute)
{
    tt_lora_options lora = tt_lora_options_default();
    tt_train_options o = tt_train_options_default();
    lora.targets = "*";
    lora.rank = 3;
    lora.dropout = 0.1f;
    if (!m->n_lora) CHECK(tt_lm_lora(m, &lora) == TT_OK);
    o.schedule.kind = TT_CONSTANT;
    o.schedule.lr = 1e-2f;
    o.compile.precision = precision;
    o.compile.recompute = recompute;
    o.max_seqs = 2;
    o.max_tokens = TOKENS;
    *model = tt_lm_model(m);
    tt_trainer *r = tt_trainer_new(ctx, model, &o);
    if (!r) CHECK_ERROR(ctx, TT_OK, "a trainer");
    return r;
}

/* Adapters on a base in few bits train as on the base's rounded weights, bit for bit; a run that is resumed
   continues with the same bits; the step takes the planned bytes. The adapters' folder fits both bases. A
   state of a base in another format is refused. */
TEST(adapters_on_few_bits)
{
    for (int k = 0; k < 2 * TEST_COUNT(formats); k++) {
        const char *format = formats[k / 2], *precision = k % 2 ? "bf16-mixed" : "32-true";
        char state[600], folder[600];
        double loss[4] = {0};
        snprintf(state, sizeof state, "%s", test_path(test_folder(), "half.safetensors"));
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "adapter"));
        for (int part = 0; part < 4; part++) { /* stored; rounded; resumed; resumed on another base */
            test_allocator a;
            tt_lm m;
            tt_model model;
            tt_progress progress;
            memset(&progress, 0, sizeof progress);
            tt_context *ctx = test_open(&a);
            CHECK(new_model(ctx, &m, "llama", 64) == TT_OK);
            if (part == 1) round_weights(&m, format);
            else CHECK(tt_lm_store(&m, part == 3 ? formats[(k / 2 + 1) % 3] : format) == TT_OK);
            tt_trainer *r = adapters_of(ctx, &m, &model, precision, k % 2 ? "blocks" : "cheap");
            if (!r) return;
            if (part < 2) loss[part] = train(r, 0, STEPS / 2);
            if (part == 0) CHECK(tt_trainer_save(r, state, &progress) == TT_OK);
            if (part == 2) CHECK(tt_trainer_load(r, state, &progress) == TT_OK);
            if (part == 3) {
                CHECK(tt_trainer_load(r, state, &progress) == TT_ERR_ARGUMENT);
                CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "has other values: resume with the model that the run");
            } else {
                loss[part] = train(r, STEPS / 2, STEPS / 2);
                const tt_program *p = tt_trainer_program(r);
                const tt__block *block = (const tt__block *)(const void *)p->arena->memory[0] - 1;
                CHECK(block->bytes - sizeof *block == tt_program_plan(p).bytes);
            }
            if (part == 0) CHECK(tt_lm_lora_save(&m, folder) == TT_OK);
            if (part == 0) {
                CHECK(tt_lm_lora_merge(&m) == TT_ERR_UNSUPPORTED);
                CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "which would round the sum");
            }
            tt_trainer_free(r);
            tt_lm_free(&m);
            TEST_CLOSE(ctx, &a);
        }
        /* bf16 products round float weights, and coded weights are widened and rounded in another place */
        CHECK(k % 2 ? fabs(loss[1] - loss[0]) <= 2e-2 : loss[1] == loss[0]);
        CHECK(loss[2] == loss[0] && loss[0] > 0 && isfinite(loss[0]));
        test_allocator a;
        tt_lm m;
        tt_context *ctx = test_open(&a);
        CHECK(new_model(ctx, &m, "llama", 64) == TT_OK && tt_lm_lora_load(&m, folder) == TT_OK);
        CHECK(m.n_lora == 14 && tt_lm_lora_merge(&m) == TT_OK);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* A generator on weights in few bits gives the tokens of the rounded weights. */
TEST(generation_in_few_bits)
{
    for (int k = 0; k < TEST_COUNT(formats); k++) {
        int32_t out[2][24];
        for (int part = 0; part < 2; part++) {
            test_allocator a;
            tt_lm m;
            tt_context *ctx = test_open(&a);
            CHECK(new_model(ctx, &m, "llama", 64) == TT_OK);
            if (part) round_weights(&m, formats[k]);
            else CHECK(tt_lm_store(&m, formats[k]) == TT_OK);
            tt_generator *g = tt_generator_new(&m, NULL);
            tt_sampling s = tt_sampling_default();
            const int32_t ids[] = {3, 1, 4, 1, 5}, start[] = {0, 5};
            int count = 0;
            s.max_new = 24;
            s.seed = 5;
            if (CHECK(g != NULL)) CHECK(tt_generate(g, ids, start, 1, &s, out[part], &count) == TT_OK);
            CHECK(count == 24);
            tt_generator_free(g);
            tt_lm_free(&m);
            TEST_CLOSE(ctx, &a);
        }
        CHECK(memcmp(out[0], out[1], sizeof *out) == 0);
    }
}

/* Weights whose rows do not fit a format stay floats, with a warning, and the saved config.json names them.
   Another format replaces a folder's own. */
TEST(what_is_stored)
{
    test_allocator a;
    test_log log;
    tt_lm m;
    size_t n;
    char folder[600];
    tt_context *ctx = test_open_logged(&a, &log);
    CHECK(new_model(ctx, &m, "llama", 48) == TT_OK);
    CHECK(tt_lm_store(&m, "nf4") == TT_OK && !m.stored && log.warnings == 1); /* 48 and 96 */
    CHECK(strstr(log.text, "14 of 14 weights of linear layers stay floats"));
    CHECK(tt_lm_store(&m, "int4") == TT_OK && strcmp(m.stored, "int4") == 0);
    CHECK(log.warnings == 2 && strstr(log.text, "12 of 14 weights"));
    CHECK(tt_lm_store(&m, "int8") == TT_OK && strcmp(m.stored, "int8") == 0 && log.warnings == 2);
    CHECK(tt_lm_store(&m, NULL) == TT_OK && !m.stored && m.layer->q_w->form == TT_F32);
    CHECK(tt_lm_store(&m, "int5") == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the format 'int5' is unknown");
    m.config.intermediate_size = 96;
    tt_lm_free(&m);
    TEST_CLOSE(ctx, &a);

    ctx = test_open_logged(&a, &log);
    tt_lm_config c = tt_lm_config_sized("llama", 1, 64, 4);
    c.vocab_size = VOCAB;
    c.intermediate_size = 96;
    CHECK(tt_lm_new(ctx, &m, &c) == TT_OK && tt_lm_store(&m, "nf4") == TT_OK);
    CHECK(log.warnings == 1 && strstr(log.text, "1 of 7 weights of linear layers stay floats"));
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "mixed"));
    CHECK(tt_lm_save(&m, folder) == TT_OK);
    char *config = test_read(test_path(folder, "config.json"), &n);
    CHECK(config && strstr(config, "\"llm_int8_skip_modules\": [\"lm_head\", \"embed_out\", "
                           "\"model.embed_tokens\", \"model.layers.0.mlp.down_proj\"]"));
    free(config);
    tt_lm_free(&m);
    TEST_CLOSE(ctx, &a);

    ctx = test_open_logged(&a, &log);
    CHECK(tt_lm_load(ctx, &m, folder) == TT_OK && strcmp(m.stored, "nf4") == 0);
    float *before = test_values(m.layer->q_w);
    CHECK(tt_lm_store(&m, NULL) == TT_OK && !m.stored);
    float *after = test_values(m.layer->q_w);
    CHECK(memcmp(before, after, sizeof *after * (size_t)tt_param_size(m.layer->q_w)) == 0);
    CHECK(tt_lm_store(&m, "int8") == TT_OK && strcmp(m.stored, "int8") == 0);
    tt_model model = tt_lm_model(&m);
    tt_train_options o = tt_train_options_default();
    o.max_seqs = 2;
    o.max_tokens = TOKENS;
    o.schedule.kind = TT_CONSTANT;
    tt_param_freeze(ctx, "*q_proj*", false);
    CHECK(tt_trainer_new(ctx, &model, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "is stored as int8, so it cannot be trained");
    free(before), free(after);
    tt_lm_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* Writes a copy of a folder with one edit: tensor `name` is left out if `as` is NULL, or gets the dtype `as`;
   or a text of its JSON is replaced. If `from` and `to` are "", its first four bytes become 0. */
typedef struct edit { const char *name, *as, *from, *to; tt_status status; const char *error; } edit;

static void write_edited(const char *original, const char *folder, const edit *e)
{
    test_allocator a;
    size_t n;
    enum { MOST = 200 };
    tt_context *ctx = test_open(&a);
    char path[700], *config = test_read(test_path(original, "config.json"), &n);
    if (CHECK(config != NULL)) test_write(test_path(folder, "config.json"), config, n);
    free(config);
    tt_safetensors *s = tt_safetensors_open(ctx, test_path(original, "model.safetensors"));
    static tt_tensor_info info[MOST];
    static int from[MOST];
    int count = 0;
    for (int k = 0; s && k < tt_safetensors_count(s) && CHECK(count < MOST); k++) {
        tt_tensor_info x = *tt_safetensors_info(s, k);
        if (strcmp(x.name, e->name) == 0 && !e->from && !e->as) continue;
        if (strcmp(x.name, e->name) == 0 && e->as) x.dtype = e->as;
        info[count] = x;
        from[count++] = k;
    }
    snprintf(path, sizeof path, "%s", test_path(folder, "model.safetensors"));
    tt_safetensors_writer *w = tt_safetensors_begin(ctx, path, info, count, NULL);
    for (int k = 0; w && k < count; k++) {
        char *bytes = test_tensor(s, from[k]);
        if (e->from && strcmp(info[k].name, e->name) == 0) {
            const size_t length = strlen(e->from);
            char *at = NULL;
            for (size_t i = 0; i + length <= info[k].bytes && !at; i++)
                if (memcmp(bytes + i, e->from, length) == 0) at = bytes + i;
            if (CHECK(at && strlen(e->from) <= strlen(e->to))) memcpy(at, e->to, strlen(e->to));
            if (!length && !*e->to) memset(bytes, 0, 4);
        }
        CHECK(tt_safetensors_write(w, bytes, info[k].bytes) == TT_OK);
        free(bytes);
    }
    CHECK(w && tt_safetensors_end(w) == TT_OK);
    tt_safetensors_close(s);
    TEST_CLOSE(ctx, &a);
}

/* Damaged folders are refused with the tensor's name. */
TEST(broken_quantised_folders)
{
#define Q "model.layers.1.self_attn.q_proj."
#define STATE Q "weight.quant_state.bitsandbytes__nf4"
#define NOT_FINITE "\1\1\xc0\x7f"
    static const edit nf4[] = {
        {STATE, NULL, NULL, NULL, TT_ERR_FORMAT, "but the file lacks '" STATE "', which says"},
        {Q "weight.absmax", NULL, NULL, NULL, TT_ERR_FORMAT, "needs the tensor '" Q "weight.absmax'"},
        {Q "weight.nested_quant_map", NULL, NULL, NULL, TT_ERR_FORMAT, "needs the tensor '" Q "weight.nest"},
        {Q "weight.quant_map", NULL, NULL, NULL, TT_ERR_FORMAT, "needs the tensor '" Q "weight.quant_map'"},
        {Q "weight.quant_map", "I32", NULL, NULL, TT_ERR_FORMAT, "has 16 elements of I32, but"},
        {Q "weight.absmax", "I8", NULL, NULL, TT_ERR_FORMAT, "elements of I8, but"},
        {STATE, NULL, "\"shape\": [64, 64]", "\"shape\": [64, 63]", TT_ERR_FORMAT,
         "describes a matrix (64, 63) of nf4; expected (64, 64) of nf4"},
        {STATE, NULL, "\"blocksize\": 64", "\"blocksize\": 32", TT_ERR_FORMAT, "elements of U8, but"},
        {STATE, NULL, "\"blocksize\": 64", "\"blocksize\": -4", TT_ERR_FORMAT, "\"blocksize\" is -4"},
        {STATE, NULL, "\"quant_type\": \"nf4\"", "\"quant_type\": \"fp4\"", TT_ERR_FORMAT, "of fp4; expec"},
        {STATE, NULL, "\"nested_blocksize\": 256", "\"nested_blocksize\":   0", TT_ERR_FORMAT,
         "\"nested_blocksize\" is 0"},
        {Q "weight.nested_absmax", NULL, "", NOT_FINITE, TT_ERR_FORMAT,
         "element 0 of tensor '" Q "weight.nested_absmax' is "},
        {Q "weight.nested_quant_map", NULL, "", NOT_FINITE, TT_ERR_FORMAT,
         "element 0 of tensor '" Q "weight.nested_quant_map' is "},
        {Q "weight.quant_map", NULL, "", NOT_FINITE, TT_ERR_FORMAT,
         "element 0 of tensor '" Q "weight.quant_map' is not finite"},
        {STATE, NULL, "{", "[", TT_ERR_FORMAT, "not valid JSON"},
        {STATE, NULL, "\"nested_offset\"", "\"nested_offsat\"", TT_ERR_FORMAT, "has no \"nested_offset\""},
        {"model.norm.weight", "I32", NULL, NULL, TT_ERR_FORMAT, "has dtype I32, but parameters must be"}};
    static const edit int8[] = {
        {Q "SCB", NULL, NULL, NULL, TT_ERR_FORMAT, "needs the tensor '" Q "SCB'"},
        {Q "SCB", NULL, "", NOT_FINITE, TT_ERR_FORMAT, "element 0 of tensor '" Q "SCB' is "},
        {Q "SCB", "I32", NULL, NULL, TT_ERR_FORMAT, "has 64 elements of I32, but"},
        {Q "weight_format", NULL, "", "\2", TT_ERR_UNSUPPORTED, "is 2; only 0, the order of rows"},
        {Q "weight", "U8", NULL, NULL, TT_ERR_FORMAT, "has dtype U8, but the file lacks"}};
    for (int k = 0; k < TEST_COUNT(nf4) + TEST_COUNT(int8); k++) {
        const edit *e = k < TEST_COUNT(nf4) ? &nf4[k] : &int8[k - TEST_COUNT(nf4)];
        test_allocator a;
        tt_lm m;
        char folder[600];
        char original[600];
        snprintf(folder, sizeof folder, "%s", test_folder());
        snprintf(original, sizeof original, "%s",
                 golden_path(k < TEST_COUNT(nf4) ? "llama_nf4" : "llama_int8", ""));
        write_edited(original, folder, e);
        tt_context *ctx = test_open(&a);
        if (!CHECK(tt_lm_load(ctx, &m, folder) == e->status))
            fprintf(stderr, "%s: %s\n", e->name, tt_error(ctx));
        CHECK_ERROR(ctx, e->status, e->error);
        TEST_CLOSE(ctx, &a);
    }
}

/* Damaged folders of packed weights are refused when they are loaded. */
TEST(broken_packed_folders)
{
    static const edit edits[] = {
        {Q "weight_scale", "I32", NULL, NULL, TT_ERR_FORMAT, "tensor '" Q "weight_scale' has dtype I32, but"},
        {Q "weight_scale", NULL, "", NOT_FINITE, TT_ERR_FORMAT, "tensor '" Q "weight_scale' is "},
        {Q "weight_scale", NULL, "", "", TT_OK, ""}};
    for (int k = 0; k < 3 * TEST_COUNT(edits); k++) {
        edit e = edits[k / 3];
        const tt_rounding kind = (tt_rounding)(TT_ROUND_NONE + 1 + k % 3);
        test_allocator a;
        tt_lm m;
        char original[600], folder[600];
        snprintf(original, sizeof original, "%s", test_path(test_folder(), "original"));
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "edited"));
        tt_context *ctx = test_open(&a);
        CHECK(new_model(ctx, &m, "llama", 64) == TT_OK && tt_param_round(ctx, "*layers*", kind) == 14);
        CHECK(tt_lm_save(&m, original) == TT_OK && tt_lm_save(&m, folder) == TT_OK);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
        write_edited(original, folder, &e);
        ctx = test_open(&a);
        if (e.status == TT_OK && kind == TT_ROUND_TERNARY) { /* ternary numbers are divided by the scale */
            e.status = TT_ERR_FORMAT;
            e.error = "element 0 of tensor '" Q "weight_scale' is 0, which makes values of '" Q "weight' inf";
        }
        if (!CHECK(tt_lm_load(ctx, &m, folder) == e.status))
            fprintf(stderr, "edit %d, rounding %d: %s\n", k / 3, (int)kind, tt_error(ctx));
        if (e.status != TT_OK) CHECK_ERROR(ctx, e.status, e.error);
        if (e.status == TT_OK) tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* Returns how often a text is in a folder's config.json. */
static int times_in_config(const char *folder, const char *text)
{
    size_t n;
    int times = 0;
    char *config = test_read(test_path(folder, "config.json"), &n);
    for (const char *at = config; at && (at = strstr(at, text)) != NULL; at++) times++;
    free(config);
    return times;
}

static const char *dtype_in(const char *folder, const char *name)
{
    static char dtype[8];
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_safetensors *s = tt_safetensors_open(ctx, test_path(folder, "model.safetensors"));
    const int k = s ? tt_safetensors_find(s, name) : -1;
    snprintf(dtype, sizeof dtype, "%s", k < 0 ? "none" : tt_safetensors_info(s, k)->dtype);
    tt_safetensors_close(s);
    TEST_CLOSE(ctx, &a);
    return dtype;
}

/* A model with several formats: the first of the layers is that of the folder, and other coded weights, such
   as the head, are saved as floats; rounded weights stay packed, without another "quantization_config". */
TEST(several_formats_in_a_folder)
{
    for (int k = 0; k < 2; k++) { /* 1: after a program */
        test_allocator a;
        test_log log;
        tt_lm m;
        char folder[600];
        static float x[TOKENS * VOCAB], y[TOKENS * VOCAB];
        int32_t ids[TOKENS] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "several"));
        tt_context *ctx = test_open_logged(&a, &log);
        CHECK(new_model(ctx, &m, "llama", 64) == TT_OK && tt_lm_store(&m, "nf4") == TT_OK);
        CHECK(tt_param_store(m.head, "int8") == TT_OK && tt_param_store(m.layer[0].v_w, "int8") == TT_OK);
        CHECK(tt_param_store(m.layer[1].q_w, NULL) == TT_OK);
        CHECK(tt_param_round(ctx, m.layer[1].q_w->name, TT_ROUND_TERNARY) == 1);
        if (k) logits_of(&m, ids, x);
        CHECK(tt_lm_save(&m, folder) == TT_OK);
        if (!k) logits_of(&m, ids, x);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
        CHECK(times_in_config(folder, "quantization_config") == 1);
        CHECK(times_in_config(folder, "\"bnb_4bit_quant_type\": \"nf4\"") == 1);
        CHECK(times_in_config(folder, "[\"lm_head\", \"embed_out\", \"model.embed_tokens\", "
                              "\"model.layers.0.self_attn.v_proj\", "
                              "\"model.layers.1.self_attn.q_proj\"]") == 1);
        CHECK(strcmp(dtype_in(folder, "lm_head.weight"), "F32") == 0);
        CHECK(strcmp(dtype_in(folder, "model.layers.0.self_attn.v_proj.weight"), "F32") == 0);
        CHECK(strcmp(dtype_in(folder, "model.layers.0.self_attn.k_proj.weight"), "U8") == 0);
        CHECK(strcmp(dtype_in(folder, Q "weight_scale"), "F32") == 0);
        ctx = test_open_logged(&a, &log);
        CHECK(tt_lm_load(ctx, &m, folder) == TT_OK && log.warnings == 0 && m.layer[0].k_w->form == TT__NF4);
        logits_of(&m, ids, y);
        for (int i = 0; i < TOKENS * VOCAB; i++)
            if (!CHECK(fabs(x[i] - y[i]) <= 1e-5 * fmax(1, fabs(x[i])))) break;
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* Rounded weights that products read are packed, and config.json names the others. */
TEST(which_rounded_weights_are_packed)
{
    for (int tied = 0; tied < 2; tied++) {
        test_allocator a;
        tt_lm m;
        char folder[600];
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), tied ? "tied" : "untied"));
        tt_context *ctx = test_open(&a);
        tt_lm_config c = tt_lm_config_sized("llama", 1, 64, 4);
        c.vocab_size = VOCAB;
        c.intermediate_size = 96;
        c.tied = tied != 0;
        CHECK(tt_lm_new(ctx, &m, &c) == TT_OK && tt_param_round(ctx, "*", TT_ROUND_TERNARY) > 7);
        CHECK(tt_lm_save(&m, folder) == TT_OK);
        CHECK(strcmp(dtype_in(folder, "model.embed_tokens.weight"), "F32") == 0);
        CHECK(strcmp(dtype_in(folder, "lm_head.weight"), tied ? "none" : "U8") == 0);
        CHECK(times_in_config(folder, tied ? "\"modules_to_not_convert\": [\"lm_head\", \"embed_out\", "
                              "\"model.embed_tokens\"]}" : "\"modules_to_not_convert\": [\"embed_out\", "
                              "\"model.embed_tokens\"]}") == 1);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* Each allocation of loading, storing, filling and saving fails once. */
TEST(quantised_allocation_failures)
{
    static const char *const names[] = {"gpt2_nf4", "neox_int8", "neox_mixed"};
    for (int k = 0; k < TEST_COUNT(names); k++) {
        char folder[600];
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "saved"));
        bool done = false;
        for (long at = 1; !done && at < 100000; at += 1 + at / 12) {
            test_allocator a;
            tt_lm m;
            tt_context *ctx = test_open(&a);
            memset(&m, 0, sizeof m);
            a.fail_at = a.calls + at;
            tt_status status = tt_lm_load(ctx, &m, golden_path(names[k], ""));
            if (status == TT_OK) {
                float *values = (float *)malloc(sizeof *values * (size_t)m.layer->qkv_w->size);
                status = tt_param_get(m.layer->qkv_w, values);
                free(values);
                if (status == TT_OK) status = tt_lm_save(&m, folder);
            }
            done = status == TT_OK;
            CHECK(done || status == TT_ERR_MEMORY);
            a.fail_at = 0;
            if (m.ctx) tt_lm_free(&m);
            TEST_CLOSE(ctx, &a);
        }
        CHECK(done);
    }
}

/* A model in few bits keeps its codes while another model of its context is pruned, however often. Its
   weights become floats again with the values of its codes. */
TEST(codes_stay_when_another_model_is_pruned)
{
    for (int k = 0; k < TEST_COUNT(formats); k++) {
        test_allocator a;
        tt_lm m, other;
        static float before[TOKENS * VOCAB], after[TOKENS * VOCAB];
        int32_t ids[TOKENS];
        for (int i = 0; i < TOKENS; i++) ids[i] = i * 7 % VOCAB;
        tt_context *ctx = test_open(&a);
        CHECK(new_model(ctx, &m, "llama", 64) == TT_OK && tt_param_prefix(ctx, "other.") == TT_OK);
        CHECK(new_model(ctx, &other, "llama", 64) == TT_OK && tt_lm_store(&m, formats[k]) == TT_OK);
        logits_of(&m, ids, before);
        for (int step = 0; step < 4; step++) {
            tt_prune_options o = tt_prune_options_default();
            o.neurons = 60 - step;
            CHECK(tt_lm_prune(&other, NULL, &o) == TT_OK);
            if (step % 2) logits_of(&m, ids, after);
            CHECK(step % 2 == 0 || memcmp(before, after, sizeof after) == 0);
        }
        float *values = test_values(m.layer->down_w);
        CHECK(tt_param_low_rank(other.layer->q_w, 3, 0) == TT_OK && tt_lm_store(&m, NULL) == TT_OK);
        float *floats = test_values(m.layer->down_w);
        CHECK(memcmp(values, floats, sizeof *values * (size_t)tt_param_size(m.layer->down_w)) == 0);
        free(values), free(floats);
        tt_lm_free(&m);
        tt_lm_free(&other);
        TEST_CLOSE(ctx, &a);
    }
}

/* A number that cannot be coded, in the last row, leaves the parameter's old values. */
TEST(refused_numbers_change_nothing)
{
    for (int k = 0; k < TEST_COUNT(formats); k++) {
        test_allocator a;
        tt_lm m;
        static float logits[TOKENS * VOCAB];
        int32_t ids[TOKENS] = {1, 2, 3};
        tt_context *ctx = test_open(&a);
        CHECK(new_model(ctx, &m, "llama", 64) == TT_OK && tt_lm_store(&m, formats[k]) == TT_OK);
        logits_of(&m, ids, logits);
        tt_param *p = m.layer->up_w;
        const size_t n = (size_t)tt_param_size(p);
        float *before = test_values(p), *now = (float *)malloc(sizeof *now * n);
        for (size_t i = 0; i < n; i++) now[i] = 2 * before[i] + 1;
        now[n - 1] = NAN;
        CHECK(tt_param_set(p, now) == TT_ERR_NUMERIC);
        CHECK_ERROR(ctx, TT_ERR_NUMERIC, "has a number that is not finite");
        float *after = test_values(p);
        CHECK(memcmp(before, after, sizeof *after * n) == 0);
        now[n - 1] = 3;
        CHECK(tt_param_set(p, now) == TT_OK && tt_param_get(p, after) == TT_OK);
        CHECK(memcmp(before, after, sizeof *after * n) != 0);
        free(before), free(now), free(after);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* tt_lm_store freezes what it stores; floats can be trained again, but not below adapters. After an error
   nothing has changed. */
TEST(storing_freezes)
{
    test_allocator a;
    tt_lm m;
    tt_context *ctx = test_open(&a);
    CHECK(new_model(ctx, &m, "llama", 64) == TT_OK);
    tt_param *first = m.layer[0].q_w, *last = m.layer[1].down_w;
    CHECK(tt_param_round(ctx, tt_param_name(last), TT_ROUND_INT8) == 1);
    CHECK(tt_lm_store(&m, "int8") == TT_ERR_ARGUMENT && !m.stored);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "is rounded (tt_param_round), which training changes");
    CHECK(first->form == TT_F32 && !tt_param_frozen(first) && !tt_param_frozen(m.layer[1].up_w));
    CHECK(tt_param_round(ctx, "*", TT_ROUND_NONE) > 0 && tt_lm_store(&m, "int8") == TT_OK);
    CHECK(tt_param_frozen(first) && tt_param_frozen(last) && !tt_param_frozen(m.word));
    CHECK(tt_lm_store(&m, NULL) == TT_OK && !tt_param_frozen(first) && !tt_param_frozen(last));
    CHECK(tt_lm_store(&m, "nf4") == TT_OK && tt_lm_lora(&m, NULL) == TT_OK);
    CHECK(tt_lm_store(&m, NULL) == TT_OK && tt_param_frozen(first) && tt_param_frozen(last));
    CHECK(!tt_param_frozen(m.lora[0].a));
    tt_lm_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* Makes the trainer of adapters on the most exact base, floats, int8 or nf4, whose plan fits a budget, and
   sets *chosen to the base's number. Returns NULL if none fits. budget 0: the base is number *chosen. */
static tt_trainer *fitting(tt_lm *m, const tt_model *model, size_t budget, int *chosen)
{
    static const char *const bases[] = {NULL, "int8", "nf4"};
    tt_train_options o = tt_train_options_default();
    o.max_seqs = 2;
    o.max_tokens = TOKENS;
    o.schedule.kind = TT_CONSTANT;
    o.schedule.lr = 1e-2f;
    o.compile.memory_budget = budget;
    tt_trainer *r = NULL;
    for (int k = budget ? 0 : *chosen; k < 3 && !r; k++) {
        CHECK(tt_lm_store(m, bases[k]) == TT_OK);
        r = tt_trainer_new(m->ctx, model, &o);
        CHECK(r || tt_error_code(m->ctx) == TT_ERR_BUDGET);
        *chosen = k;
    }
    return r;
}

/* The base that a budget allows, which is planned without memory for the weights: after a plan that was freed
   before it ran, the weights can have another format. */
TEST(the_base_of_a_budget)
{
    size_t bytes[3], least = 0;
    for (int k = 0; k < 8; k++) { /* 0 to 2: the bases' own plans; then budgets of these plans, and less */
        test_allocator a;
        tt_lm m;
        tt_context *ctx = test_open(&a);
        CHECK(new_model(ctx, &m, "llama", 64) == TT_OK && tt_lm_lora(&m, NULL) == TT_OK);
        const tt_model model = tt_lm_model(&m);
        const int own = (k - 3) / 2 + (k - 3) % 2;
        int chosen = k < 3 ? k : -1;
        const size_t budget = k < 3 ? 0 : k == 7 ? least : bytes[(k - 3) / 2] - (size_t)((k - 3) % 2);
        tt_trainer *r = fitting(&m, &model, budget, &chosen);
        CHECK(k == 7 || r);
        if (r) {
            const size_t plan = tt_program_plan(tt_trainer_program(r)).bytes;
            if (k < 3) bytes[k] = plan;
            CHECK(chosen == (k < 3 ? k : own) && plan == bytes[chosen] && (k < 3 || plan <= budget));
            CHECK(tt_lm_store(&m, "int4") == TT_ERR_ARGUMENT);
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "a program has the parameter");
            if (k == 5) { /* another format after a plan that was never allocated */
                tt_trainer_free(r);
                CHECK(tt_lm_store(&m, "int8") == TT_OK && strcmp(m.stored, "int8") == 0);
                CHECK(tt_lm_store(&m, "nf4") == TT_OK && (r = fitting(&m, &model, budget, &chosen)) != NULL);
            }
            CHECK(train(r, 0, 2) > 0);
            tt_trainer_free(r);
            CHECK(tt_lm_store(&m, "int4") == TT_ERR_ARGUMENT); /* the weights have memory */
        }
        if (k == 2) least = bytes[2] / 4;
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(bytes[0] > bytes[1] && bytes[1] > bytes[2]);
}

static const test_case tests[] = {
    TEST_CASE(golden_quantised), TEST_CASE(quantised_folders_go_round), TEST_CASE(models_in_few_bits),
    TEST_CASE(adapters_on_few_bits), TEST_CASE(generation_in_few_bits), TEST_CASE(what_is_stored),
    TEST_CASE(broken_quantised_folders), TEST_CASE(quantised_allocation_failures),
    TEST_CASE(broken_packed_folders), TEST_CASE(several_formats_in_a_folder),
    TEST_CASE(which_rounded_weights_are_packed),
    TEST_CASE(codes_stay_when_another_model_is_pruned), TEST_CASE(refused_numbers_change_nothing),
    TEST_CASE(storing_freezes), TEST_CASE(the_base_of_a_budget),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
