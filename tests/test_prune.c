/* Tests of src/models/prune.h and src/train/importance.h: importance and pruned models compared with
   PyTorch's masks (tests/golden/make_prune.py), files of pruned models; of src/context/low_rank.h:
   decompositions compared with numpy's (tests/golden/make_svd.py); of files of models whose weights have few
   bits. TINYTRAIN_TEST_VERBOSE=1 prints the
   differences that were measured; TINYTRAIN_TEST_PRUNED=DIR keeps pruned models in DIR, for make_prune.py
   --folders DIR. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

enum { ROWS = 256, SEQS = 8, LOGITS = 2048 };

/* A model of tests/golden, and its batches 0 and 1 as a source. */
typedef struct pruned {
    test_allocator a;
    tt_context *ctx;
    tt_safetensors *file; /* the model's golden.safetensors */
    tt_safetensors *expected; /* prune.safetensors */
    const char *name;
    bool vit, lm;
    tt_bert bert;
    tt_vit image;
    tt_lm text;
    tt_source source;
    int at;
    int32_t ids[ROWS], positions[ROWS], types[ROWS], targets[ROWS], start[SEQS + 1], labels[SEQS];
    uint8_t pixels[SEQS * 12 * 12 * 3];
    tt_array array;
} pruned;

static int ints(const pruned *x, int batch, const char *what, int32_t *to, int room)
{
    char name[64];
    snprintf(name, sizeof name, "batch%d.%s", batch, what);
    const int k = tt_safetensors_find(x->file, name);
    const int n = k < 0 ? -1 : (int)(tt_safetensors_info(x->file, k)->bytes / 4);
    if (!CHECK(n > 0 && n <= room)) exit(2);
    CHECK(tt_safetensors_read_i32(x->file, k, 0, n, to) == TT_OK);
    return n;
}

static tt_batch batch_of(pruned *x, int k)
{
    tt_batch b;
    memset(&b, 0, sizeof b);
    b.last_of_step = true;
    if (x->vit) {
        char name[64];
        snprintf(name, sizeof name, "batch%d.pixels", k);
        b.seqs = ints(x, k, "labels", x->labels, SEQS);
        const int at = tt_safetensors_find(x->file, name);
        CHECK(tt_safetensors_read(x->file, at, 0, (size_t)b.seqs * 12 * 12 * 3, x->pixels) == TT_OK);
        b.labels = x->labels;
        b.pixels = x->pixels;
        b.image_bytes = 12 * 12 * 3;
        return b;
    }
    b.rows = ints(x, k, x->lm ? "ids" : "input_ids", x->ids, ROWS);
    b.seqs = ints(x, k, "seq_start", x->start, SEQS + 1) - 1;
    for (int s = 0; s < b.seqs; s++)
        for (int32_t r = x->start[s]; r < x->start[s + 1]; r++) x->positions[r] = r - x->start[s];
    b.ids = x->ids;
    b.positions = x->positions;
    b.seq_start = x->start;
    if (x->lm) {
        ints(x, k, "targets", x->targets, ROWS);
        x->array.input = "targets";
        x->array.data = x->targets;
        x->array.rows = b.rows;
        b.arrays = &x->array;
        b.n_arrays = 1;
        return b;
    }
    ints(x, k, "token_type_ids", x->types, ROWS);
    ints(x, k, "labels", x->labels, SEQS);
    b.types = x->types;
    b.labels = x->labels;
    return b;
}

static tt_status seek(void *self, int64_t epoch, int64_t step)
{
    pruned *x = (pruned *)self;
    (void)epoch;
    x->at = (int)step;
    return TT_OK;
}

static tt_status next(void *self, tt_batch *b, bool *more)
{
    pruned *x = (pruned *)self;
    *more = x->at < 2;
    if (*more) *b = batch_of(x, x->at++);
    return TT_OK;
}

static float *tensor(const tt_safetensors *s, const char *name, const char *what, int64_t *n)
{
    char full[128];
    snprintf(full, sizeof full, "%s%s%s", name, *name ? "." : "", what);
    const int k = tt_safetensors_find(s, full);
    if (!CHECK(k >= 0)) exit(2);
    *n = (int64_t)(tt_safetensors_info(s, k)->bytes / 4);
    float *to = (float *)malloc(sizeof *to * (size_t)*n);
    CHECK(tt_safetensors_read_f32(s, k, 0, *n, to) == TT_OK);
    return to;
}

static bool load_from(pruned *x, const char *folder)
{
    const tt_status status = x->vit ? tt_vit_load(x->ctx, &x->image, folder, 0, 0)
                             : x->lm ? tt_lm_load(x->ctx, &x->text, folder)
                                     : tt_bert_load(x->ctx, &x->bert, folder, 0);
    if (status != TT_OK) CHECK_ERROR(x->ctx, TT_OK, folder);
    return status == TT_OK;
}

static bool open_model(pruned *x, const char *name, const char *folder, int threads)
{
    char path[1200], inner[64];
    memset(x, 0, sizeof *x);
    tt_context_options o = test_options(&x->a);
    o.threads = threads;
    x->ctx = tt_open(&o);
    x->name = name;
    x->vit = strcmp(name, "vit") == 0;
    x->lm = strcmp(name, "llama") == 0 || strcmp(name, "qwen3") == 0 || strcmp(name, "gpt2") == 0;
    snprintf(inner, sizeof inner, "%s%s", x->lm ? "lm/" : "", name);
    snprintf(path, sizeof path, "%s/golden.safetensors", TEST_GOLDEN(inner));
    x->file = tt_safetensors_open(x->ctx, path);
    x->expected = tt_safetensors_open(x->ctx, TEST_GOLDEN("prune.safetensors"));
    x->source.self = x;
    x->source.seek = seek;
    x->source.next = next;
    x->source.steps = 2;
    x->source.max_seqs = SEQS;
    x->source.max_tokens = ROWS;
    if (!CHECK(x->file && x->expected) || !load_from(x, folder ? folder : TEST_GOLDEN(inner))) return false;
    for (int k = 0; k < 2 && !folder && strcmp(name, "minilm") == 0; k++) {
        int64_t n;
        float *values = tensor(x->file, "", k ? "classifier.bias" : "classifier.weight", &n);
        CHECK(tt_param_set(k ? x->bert.classifier_b : x->bert.classifier_w, values) == TT_OK);
        free(values);
    }
    return true;
}

static void close_model(pruned *x)
{
    tt_safetensors_close(x->file);
    tt_safetensors_close(x->expected);
    tt_bert_free(&x->bert);
    tt_vit_free(&x->image);
    tt_lm_free(&x->text);
    TEST_CLOSE(x->ctx, &x->a);
}

static tt_model model_of(pruned *x)
{
    return x->vit ? tt_vit_classifier(&x->image) : x->lm ? tt_lm_model(&x->text) : tt_bert_model(&x->bert);
}

static tt_importance *importance_of(pruned *x)
{
    tt_importance *i = x->vit ? tt_vit_importance(&x->image, &x->source, 2, NULL)
                       : x->lm ? tt_lm_importance(&x->text, &x->source, 2, NULL)
                               : tt_bert_importance(&x->bert, &x->source, 2, NULL);
    if (!i) CHECK_ERROR(x->ctx, TT_OK, x->name);
    return i;
}

static tt_status prune(pruned *x, const tt_importance *i, const tt_prune_options *o)
{
    return x->vit ? tt_vit_prune(&x->image, i, o) : x->lm ? tt_lm_prune(&x->text, i, o)
                                                          : tt_bert_prune(&x->bert, i, o);
}

static tt_status save(pruned *x, const char *folder)
{
    return x->vit ? tt_vit_save(&x->image, folder) : x->lm ? tt_lm_save(&x->text, folder)
                                                           : tt_bert_save(&x->bert, folder);
}

static tt_trainer *trainer_of(pruned *x, bool train)
{
    tt_train_options o = tt_train_options_default();
    const tt_model model = model_of(x);
    o.max_seqs = SEQS;
    o.max_tokens = ROWS;
    o.compile.train = train;
    o.schedule.kind = TT_CONSTANT;
    tt_trainer *t = tt_trainer_new(x->ctx, &model, &o);
    if (!t) CHECK_ERROR(x->ctx, TT_OK, "a trainer");
    return t;
}

/* Computes the logits of batch 0. */
static void logits_of(pruned *x, float *to)
{
    tt_trainer *t = trainer_of(x, false);
    const tt_batch b = batch_of(x, 0);
    memset(to, 0, sizeof *to * LOGITS * 2);
    if (t && !CHECK(tt_forward(t, &b, to, LOGITS * 2) == TT_OK)) fprintf(stderr, "%s\n", tt_error(x->ctx));
    tt_trainer_free(t);
}

/* Options that keep the larger half of heads and neurons. */
static tt_prune_options halves(const pruned *x, const tt_importance *i)
{
    tt_prune_options o = tt_prune_options_default();
    if (strcmp(x->name, "gpt2") != 0) o.heads = i->heads - i->heads / 2;
    o.neurons = i->neurons - i->neurons / 2;
    return o;
}

static double worst(const pruned *x, const char *what, const double *found, int64_t n)
{
    int64_t there;
    double error = 0, largest = 0;
    float *e = tensor(x->expected, x->name, what, &there);
    CHECK(there == n);
    for (int64_t k = 0; k < n && k < there; k++) {
        if (!(fabs(found[k] - e[k]) <= error)) error = fabs(found[k] - e[k]);
        if (e[k] > largest) largest = e[k];
    }
    free(e);
    return error / largest;
}

/* Compares the importance, and the logits of the pruned model, with PyTorch's. Then saves the model and loads
   it again. */
static void compare(const char *name, double max_logits)
{
    pruned x, y;
    static float logits[LOGITS * 2], again[LOGITS * 2];
    int64_t n;
    if (!open_model(&x, name, NULL, 1)) return;
    tt_importance *i = importance_of(&x);
    if (!i) return;
    const double heads = worst(&x, "head", i->head, (int64_t)i->layers * i->heads);
    const double neurons = worst(&x, "neuron", i->neuron, (int64_t)i->layers * i->neurons);
    const double layers = worst(&x, "layer", i->layer, i->layers);
    CHECK_NEAR(heads, 0, 5e-6);
    CHECK_NEAR(neurons, 0, 5e-6);
    CHECK_NEAR(layers, 0, 2e-5);
    const tt_prune_options o = halves(&x, i);
    CHECK(prune(&x, i, &o) == TT_OK);
    tt_importance_free(i);
    logits_of(&x, logits);
    float *expected = tensor(x.expected, name, "logits", &n);
    double error = 0;
    for (int64_t k = 0; k < n; k++)
        if (!(fabs(logits[k] - expected[k]) <= error)) error = fabs(logits[k] - expected[k]);
    free(expected);
    CHECK_NEAR(error, 0, max_logits);
    if (getenv("TINYTRAIN_TEST_VERBOSE"))
        printf("  %-10s heads %.1e, neurons %.1e, layers %.1e, logits %.1e\n", name, heads, neurons,
               layers, error);
    const char *kept = getenv("TINYTRAIN_TEST_PRUNED");
    const char *folder = kept ? test_path(kept, name) : test_folder();
    if (!CHECK(save(&x, folder) == TT_OK)) fprintf(stderr, "%s\n", tt_error(x.ctx));
    if (open_model(&y, name, folder, 1)) {
        logits_of(&y, again);
        CHECK(memcmp(logits, again, sizeof logits) == 0);
        tt_trainer *t = trainer_of(&y, true); /* the loaded model trains */
        const tt_batch b = batch_of(&y, 0);
        bool updated = false;
        CHECK(t && tt_train_batch(t, &b, NULL, &updated) == TT_OK && updated);
        tt_trainer_free(t);
        close_model(&y);
    }
    close_model(&x);
}

TEST(prune_distilbert) { compare("distilbert", 3e-6); }
TEST(prune_bert) { compare("bert", 3e-6); }
TEST(prune_minilm) { compare("minilm", 3e-6); }
TEST(prune_albert) { compare("albert", 3e-6); }
TEST(prune_vit) { compare("vit", 3e-6); }
TEST(prune_llama) { compare("llama", 1e-5); }
TEST(prune_qwen3) { compare("qwen3", 1e-5); }
TEST(prune_neurons_of_gpt2) { compare("gpt2", 1e-5); }

TEST(importance_has_the_same_bits_for_any_number_of_threads)
{
    pruned x, y;
    if (!open_model(&x, "minilm", NULL, 1) || !open_model(&y, "minilm", NULL, 3)) return;
    tt_importance *a = importance_of(&x), *b = importance_of(&y);
    CHECK(a && b && memcmp(a->neuron, b->neuron, sizeof *a->neuron * (size_t)(a->layers * a->neurons)) == 0);
    CHECK(a && b && memcmp(a->head, b->head, sizeof *a->head * (size_t)(a->layers * a->heads)) == 0);
    CHECK(!tt_param_frozen(x.bert.word) && !tt_param_frozen(x.bert.layer[0].down_w));
    tt_importance_free(a);
    tt_importance_free(b);
    close_model(&x);
    close_model(&y);
}

/* Returns the tensor `name` of a saved folder; *rows and *columns receive its shape. */
static float *saved(pruned *x, const char *folder, const char *name, int64_t *rows, int64_t *columns)
{
    int64_t n;
    tt_safetensors *s = tt_safetensors_open(x->ctx, test_path(folder, "model.safetensors"));
    if (!CHECK(s != NULL)) exit(2);
    float *values = tensor(s, "", name, &n);
    const tt_tensor_info *info = tt_safetensors_info(s, tt_safetensors_find(s, name));
    *rows = info->dims[0];
    *columns = info->ndim > 1 ? info->dims[1] : 1;
    tt_safetensors_close(s);
    return values;
}

TEST(files_of_bert_have_zeros_for_heads_that_were_removed)
{
    pruned x;
    int64_t rows, columns;
    size_t size;
    if (!open_model(&x, "bert", NULL, 1)) return;
    tt_prune_options o = tt_prune_options_default();
    o.heads = 1;
    o.neurons = 7;
    CHECK(prune(&x, NULL, &o) == TT_OK);
    CHECK(x.bert.config.heads == 1 && x.bert.config.head_size == 16 && x.bert.config.intermediate_size == 7);
    const tt_bert_layer *l = &x.bert.layer[1];
    CHECK(tt_param_dims(l->q_w)[0] == 16 && tt_param_dims(l->attention_w)[1] == 16);
    CHECK(tt_param_size(l->q_b) == 16);
    CHECK(tt_param_dims(l->up_w)[0] == 7 && tt_param_dims(l->down_w)[1] == 7 && tt_param_size(l->up_b) == 7);
    float own[16 * 32];
    CHECK(tt_param_get(l->attention_w, own) == TT_OK && tt_param_size(l->attention_w) == 16 * 32);
    const char *folder = test_folder();
    CHECK(save(&x, folder) == TT_OK);
    float *w = saved(&x, folder, "bert.encoder.layer.1.attention.output.dense.weight", &rows, &columns);
    CHECK(rows == 32 && columns == 32);
    for (int k = 0; k < 32 * 32; k++) CHECK(w[k] == (k % 32 < 16 ? own[k / 32 * 16 + k % 32] : 0));
    free(w);
    float *b = saved(&x, folder, "bert.encoder.layer.1.attention.self.query.bias", &rows, &columns);
    CHECK(rows == 32 && b[31] == 0 && b[16] == 0 && b[15] != 0);
    free(b);
    char *text = test_read(test_path(folder, "config.json"), &size);
    CHECK(text && strstr(text, "\"num_attention_heads\": 2,") && strstr(text, "\"kept_heads\": 1,") &&
          strstr(text, "\"intermediate_size\": 7,"));
    free(text);
    close_model(&x);
}

TEST(files_of_vit_have_the_size_of_a_head)
{
    pruned x;
    int64_t rows, columns;
    if (!open_model(&x, "vit", NULL, 1)) return;
    tt_prune_options o = tt_prune_options_default();
    o.heads = 2;
    CHECK(prune(&x, NULL, &o) == TT_OK);
    const char *folder = test_folder();
    CHECK(save(&x, folder) == TT_OK);
    free(saved(&x, folder, "vit.encoder.layer.0.attention.attention.query.weight", &rows, &columns));
    CHECK(rows == 24 && columns == 36);
    x.image.torchvision = true;
    CHECK(save(&x, folder) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(x.ctx, TT_ERR_UNSUPPORTED, "heads were removed from this model");
    close_model(&x);
}

TEST(layers_are_chosen_by_importance_or_by_number)
{
    static float logits[2][LOGITS * 2];
    const int other = 1;
    for (int k = 0; k < 2; k++) {
        pruned x;
        tt_importance *i = NULL;
        if (!open_model(&x, "distilbert", NULL, 1)) return;
        tt_prune_options o = tt_prune_options_default();
        o.layers = 1;
        if (k) o.which = &other;
        if (!k && (i = importance_of(&x)) != NULL) i->layer[1] = 2 * i->layer[0];
        CHECK(prune(&x, i, &o) == TT_OK && x.bert.config.layers == 1);
        tt_importance_free(i);
        logits_of(&x, logits[k]);
        CHECK(save(&x, test_folder()) == TT_OK);
        close_model(&x);
    }
    CHECK(memcmp(logits[0], logits[1], sizeof logits[0]) == 0);
}

/* A model whose parameters are in a program's memory gives the same pruned model as a model that was just
   loaded, and its program must be freed first. */
TEST(pruning_after_a_program)
{
    static float logits[2][LOGITS * 2];
    for (int k = 0; k < 2; k++) {
        pruned x;
        if (!open_model(&x, "qwen3", NULL, 1)) return;
        tt_prune_options o = tt_prune_options_default();
        o.heads = 1;
        o.neurons = 5;
        if (k) {
            tt_trainer *t = trainer_of(&x, false);
            const tt_batch b = batch_of(&x, 0);
            CHECK(tt_forward(t, &b, logits[1], LOGITS * 2) == TT_OK);
            CHECK(prune(&x, NULL, &o) == TT_ERR_ARGUMENT);
            CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "a program still uses parameter");
            tt_trainer_free(t);
        }
        CHECK(prune(&x, NULL, &o) == TT_OK);
        logits_of(&x, logits[k]);
        close_model(&x);
    }
    CHECK(memcmp(logits[0], logits[1], sizeof logits[0]) == 0);
}

TEST(pruned_modern_bert)
{
    static float logits[2][LOGITS * 2];
    const int far_apart[] = {0, 2};
    pruned x, y;
    if (!open_model(&x, "bert", NULL, 1)) return;
    tt_bert_free(&x.bert);
    tt_bert_config c = tt_bert_config_default(TT_MODERN_BERT);
    c.vocab_size = 97, c.hidden_size = 24, c.heads = 3, c.layers = 3, c.intermediate_size = 20;
    c.max_positions = 64, c.full_every = 2, c.local_attention = 4, c.pad_token = 0;
    c.qkv_bias = c.mlp_bias = true;
    c.bos_token = c.eos_token = c.cls_token = c.sep_token = 1;
    CHECK(tt_param_prefix(x.ctx, "modern.") == TT_OK && tt_bert_new(x.ctx, &x.bert, &c) == TT_OK);
    tt_importance *i = importance_of(&x);
    tt_prune_options o = tt_prune_options_default();
    o.layers = 2;
    o.which = far_apart;
    CHECK(prune(&x, i, &o) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "layer 2 would become layer 1");
    o.layers = 0;
    o.heads = 2;
    o.neurons = 9;
    CHECK(prune(&x, i, &o) == TT_OK);
    tt_importance_free(i);
    logits_of(&x, logits[0]);
    const char *folder = test_folder();
    CHECK(save(&x, folder) == TT_OK);
    if (open_model(&y, "bert", folder, 1)) {
        CHECK(y.bert.config.heads == 2 && y.bert.config.head_size == 8);
        logits_of(&y, logits[1]);
        close_model(&y);
    }
    CHECK(memcmp(logits[0], logits[1], sizeof logits[0]) == 0);
    close_model(&x);
}

TEST(what_cannot_be_pruned)
{
    pruned x;
    const int twice[] = {1, 1};
    tt_prune_options o = tt_prune_options_default();
    if (!open_model(&x, "gpt2", NULL, 1)) return;
    o.heads = 1;
    CHECK(prune(&x, NULL, &o) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(x.ctx, TT_ERR_UNSUPPORTED, "a model of kind gpt2");
    close_model(&x);
    if (!open_model(&x, "albert", NULL, 1)) return;
    o.layers = 2;
    CHECK(prune(&x, NULL, &o) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "set `which`");
    close_model(&x);
    if (!open_model(&x, "bert", NULL, 1)) return;
    o.heads = 3;
    o.neurons = -1;
    o.which = twice;
    CHECK(prune(&x, NULL, &o) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "heads is 3, but must be 0 (all) to 2; neurons is -1");
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "which[1] is 1");
    tt_importance *i = importance_of(&x);
    o = tt_prune_options_default();
    o.neurons = 8;
    CHECK(i && prune(&x, i, &o) == TT_OK && prune(&x, i, &o) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "the importance is of 2 layers of 2 heads and 44 neurons");
    tt_importance_free(i);
    CHECK(!tt_bert_importance(&x.bert, &x.source, 0, NULL));
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "at least one step");
    close_model(&x);
}

TEST(allocations_of_pruning_fail)
{
    pruned x;
    if (!open_model(&x, "distilbert", NULL, 1)) return;
    tt_prune_options o = tt_prune_options_default();
    o.heads = 1;
    o.neurons = 3;
    o.layers = 1;
    for (int k = 1; k < 1000; k++) {
        x.a.calls = 0;
        x.a.fail_at = k;
        x.a.failed = false;
        const tt_status status = prune(&x, NULL, &o);
        x.a.fail_at = 0;
        if (!x.a.failed) {
            CHECK(status == TT_OK && x.bert.config.layers == 1);
            break;
        }
        CHECK(status == TT_ERR_MEMORY && x.bert.config.layers == 2 && x.bert.config.heads == 3);
        CHECK(tt_param_dims(x.bert.layer[0].q_w)[0] == 36);
    }
    close_model(&x);
}

/* ---------------------------------------------------------------------------------------------- low rank */

static const char *const matrices[] = {"tall", "wide", "square", "graded", "flat", "lacks", "column"};

/* Returns the float64 numbers of a tensor of svd.safetensors, which the caller frees. */
static double *doubles(const tt_safetensors *s, const char *name, const char *what)
{
    char full[64];
    snprintf(full, sizeof full, "%s.%s", name, what);
    const int k = tt_safetensors_find(s, full);
    if (!CHECK(k >= 0 && strcmp(tt_safetensors_info(s, k)->dtype, "F64") == 0)) exit(2);
    const size_t bytes = tt_safetensors_info(s, k)->bytes;
    double *to = (double *)malloc(bytes);
    CHECK(tt_safetensors_read(s, k, 0, bytes, to) == TT_OK);
    return to;
}

static double norm_of(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t k = 0; k < n; k++) sum += x[k] * x[k];
    return sqrt(sum);
}

/* Singular values, and the products of factors, compared with numpy's. */
TEST(low_rank_of_numpy)
{
    for (int m = 0; m < TEST_COUNT(matrices); m++) {
        test_allocator a;
        const char *name = matrices[m];
        char full[64];
        int64_t n;
        tt_context_options options = test_options(&a);
        options.threads = 1 + m % 3;
        tt_context *ctx = tt_open(&options);
        tt_safetensors *s = tt_safetensors_open(ctx, TEST_GOLDEN("svd.safetensors"));
        float *w = tensor(s, name, "w", &n);
        double *sigma = doubles(s, name, "sigma"), *best = doubles(s, name, "best");
        snprintf(full, sizeof full, "%s.w", name);
        const int64_t *dims = tt_safetensors_info(s, tt_safetensors_find(s, full))->dims;
        const int64_t out = dims[0], in = dims[1], side = tt__min(out, in);
        double *x = (double *)malloc(sizeof *x * (size_t)n);
        double *mine = (double *)malloc(sizeof *x * (size_t)side);
        double *v = (double *)malloc(sizeof *v * (size_t)(side * side)), error = 0, turn = 0;
        for (int64_t k = 0; k < n; k++) x[out >= in ? k % in * out + k / in : k] = w[k];
        CHECK(tt__svd(ctx, x, tt__max(out, in), side, mine, v) == TT_OK);
        for (int64_t k = 0; k < side; k++) {
            error = fmax(error, fabs(mine[k] - sigma[k]));
            for (int64_t j = 0; j <= k && strcmp(name, "lacks") != 0; j++)
                turn = fmax(turn, fabs(tt__dot(v + k * side, v + j * side, side) - (j == k)));
        }
        CHECK_NEAR(error / sigma[0], 0, 1e-14);
        CHECK_NEAR(turn, 0, 1e-13);
        tt_param *p = tt_param_new(ctx, "w", 2, dims, (tt_init){TT_INIT_ZEROS, 0});
        CHECK(p && tt_param_set(p, w) == TT_OK && tt_param_low_rank(p, (int)(side + 2) / 3, 0) == TT_OK);
        const bool smaller = (side + 2) / 3 * (out + in) < out * in;
        CHECK(tt_param_rank(p) == (smaller ? (int)(side + 2) / 3 : 0));
        float *product = (float *)malloc(sizeof *product * (size_t)n);
        CHECK(tt_param_get(p, product) == TT_OK);
        error = 0;
        for (int64_t k = 0; k < n; k++)
            error = fmax(error, fabs(product[k] - (smaller ? best[k] : (double)w[k])));
        CHECK_NEAR(error / sigma[0], 0, 3e-7);
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  %-7s product %.1e, vectors %.1e\n", name, error / sigma[0], turn);
        free(w), free(sigma), free(best), free(x), free(mine), free(v), free(product);
        tt_safetensors_close(s);
        TEST_CLOSE(ctx, &a);
    }
}

/* The rank is the smallest whose error is small enough, and at most `rank`. */
TEST(rank_of_an_error)
{
    static const struct { int rank; float error; } asks[] = {
        {0, 0.5f}, {0, 0.2f}, {3, 0.2f}, {9, 0.7f}, {0, 0.05f}};
    for (int k = 0; k < TEST_COUNT(asks); k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        int64_t n, dims[] = {22, 12};
        tt_safetensors *s = tt_safetensors_open(ctx, TEST_GOLDEN("svd.safetensors"));
        float *w = tensor(s, "flat", "w", &n);
        double *sigma = doubles(s, "flat", "sigma");
        tt_param *p = tt_param_new(ctx, "w", 2, dims, (tt_init){TT_INIT_ZEROS, 0});
        CHECK(tt_param_set(p, w) == TT_OK && tt_param_low_rank(p, asks[k].rank, asks[k].error) == TT_OK);
        int rank = 12;
        const double limit = (double)asks[k].error * norm_of(sigma, 12);
        while (rank > 1 && norm_of(sigma + rank - 1, 13 - rank) <= limit) rank--;
        if (asks[k].rank && asks[k].rank < rank) rank = asks[k].rank;
        CHECK(tt_param_rank(p) == (rank * 34 < 22 * 12 ? rank : 0));
        free(w), free(sigma);
        tt_safetensors_close(s);
        TEST_CLOSE(ctx, &a);
    }
}

/* Fills x (n, m), the columns of a matrix (m, n), m >= n, with H diag(sigma) G, where H and G are reflectors:
   the matrix has the singular values sigma (n), in any order. */
static void known_matrix(double *x, int m, int n, const double *sigma)
{
    double *h = (double *)malloc(sizeof *h * (size_t)(m + n)), *g = h + m;
    for (int k = 0; k < m + n; k++) h[k] = sin(1.7 * k + 0.01 * k * k) + 0.1;
    const double of_h = norm_of(h, m), of_g = norm_of(g, n);
    double both = 0;
    for (int k = 0; k < m; k++) h[k] /= of_h;
    for (int k = 0; k < n; k++) g[k] /= of_g;
    for (int k = 0; k < n; k++) both += h[k] * sigma[k] * g[k];
    for (int j = 0; j < n; j++)
        for (int i = 0; i < m; i++)
            x[j * m + i] = (i < n ? sigma[i] * ((i == j) - 2 * g[i] * g[j]) : 0) +
                           2 * h[i] * (2 * both * g[j] - h[j] * sigma[j]);
    free(h);
}

/* The randomised decomposition of matrices with known singular values: 0.5^k, which are found exactly;
   1 / sqrt(k), whose error stays near the smallest; and a matrix of rank 9, which is less than the number of
   vectors. */
TEST(leading_singular_values)
{
    enum { M = 203, N = 151, L = 31 };
    static double x[M * N], sigma[N], mine[L], v[L * N];
    for (int kind = 0; kind < 3; kind++) {
        test_allocator a;
        tt_context_options options = test_options(&a);
        options.threads = 1 + kind;
        tt_context *ctx = tt_open(&options);
        double turn = 0, all = 0, kept = 0, best = 0, error = 0;
        for (int k = 0; k < N; k++)
            sigma[k] = kind == 0 ? pow(0.5, k) : kind == 1 ? 1 / sqrt(k + 1) : k < 9 ? 9 - k : 0;
        known_matrix(x, M, N, sigma);
        CHECK(tt__svd_leading(ctx, x, M, N, L, mine, v) == TT_OK);
        for (int k = 0; k < L; k++) {
            double length = 0;
            for (int i = 0; i < M; i++) {
                double sum = 0;
                for (int j = 0; j < N; j++) sum += x[j * M + i] * v[k * N + j];
                length += sum * sum;
            }
            error = fmax(error, fabs(sqrt(length) - mine[k]));
            for (int j = 0; j <= k && (kind < 2 || k < 9); j++)
                turn = fmax(turn, fabs(tt__dot(v + k * N, v + j * N, N) - (j == k)));
            if (kind != 1) error = fmax(error, fabs(mine[k] - sigma[k]));
            CHECK(mine[k] <= sigma[k] + 1e-13 && (!k || mine[k] <= mine[k - 1]));
        }
        CHECK_NEAR(error, 0, 1e-13);
        CHECK_NEAR(turn, 0, 1e-13);
        for (int k = 0; k < N; k++) all += sigma[k] * sigma[k];
        for (int k = 0; k < L - TT__SVD_MORE; k++) kept += mine[k] * mine[k], best += sigma[k] * sigma[k];
        CHECK(sqrt(fmax(all - kept, 0)) <= 1.005 * sqrt(fmax(all - best, 0)) + 1e-6);
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  %d: error %.6f, smallest %.6f; vectors %.1e\n", kind, sqrt(fmax(all - kept, 0)),
                   sqrt(fmax(all - best, 0)), turn);
        TEST_CLOSE(ctx, &a);
    }
}

/* The factors of a large weight, tall and wide, have the same bits for any number of threads; the measured
   error is that of the product, and decides about the rank. */
TEST(low_rank_of_a_large_weight)
{
    enum { M = 530, N = 515, RANK = 12 };
    double *x = (double *)malloc(sizeof *x * M * N), sigma[N];
    float *w = (float *)malloc(sizeof *w * M * N), *product[2];
    for (int k = 0; k < N; k++) sigma[k] = k < 6 ? 10 - k : 0.1 / (1 + k % 7);
    known_matrix(x, M, N, sigma);
    for (int wide = 0; wide < 2; wide++) {
        const int64_t dims[] = {wide ? N : M, wide ? M : N};
        for (int k = 0; k < 2; k++) {
            test_allocator a;
            tt_context_options options = test_options(&a);
            options.threads = 1 + 2 * k;
            tt_context *ctx = tt_open(&options);
            double rest = 0, best = 0;
            for (int i = 0; i < M * N; i++) {
                const int row = i / M, col = i % M; /* of the columns of x */
                w[wide ? i : col * N + row] = (float)x[i];
            }
            product[k] = (float *)malloc(sizeof *w * M * N);
            tt_param *p = tt_param_new(ctx, "w", 2, dims, (tt_init){TT_INIT_ZEROS, 0});
            CHECK(p && tt_param_set(p, w) == TT_OK && tt_param_low_rank(p, RANK, 0) == TT_OK);
            CHECK(tt_param_rank(p) == RANK && tt_param_get(p, product[k]) == TT_OK);
            for (int i = 0; i < M * N; i++)
                rest += ((double)product[k][i] - w[i]) * ((double)product[k][i] - w[i]);
            for (int i = 0; i < N; i++) best += i < 6 ? 0 : sigma[i] * sigma[i];
            best -= (RANK - 6) * 0.01; /* the first values of 0.1 that the rank has room for */
            CHECK(sqrt(rest) <= 1.02 * sqrt(best));
            tt_param *q = tt_param_new(ctx, "q", 2, dims, (tt_init){TT_INIT_ZEROS, 0});
            CHECK(q && tt_param_set(q, w) == TT_OK && tt_param_low_rank(q, RANK, 0.1f) == TT_OK);
            CHECK(tt_param_rank(q) == 6); /* 0.06 of the norm is outside of 6 values, and 0.27 outside of 5 */
            TEST_CLOSE(ctx, &a);
        }
        CHECK(memcmp(product[0], product[1], sizeof *w * M * N) == 0);
        free(product[0]), free(product[1]);
    }
    free(x), free(w);
}

/* A model whose linear layers have factors has the logits of a model with their products, and trains. */
TEST(low_rank_of_a_model)
{
    static float logits[3][LOGITS * 2];
    static const char *const names[] = {"bert", "vit", "llama"};
    for (int m = 0; m < TEST_COUNT(names); m++) {
        pruned x, y;
        int factors = 0;
        if (!open_model(&x, names[m], NULL, 1 + m)) return;
        for (int k = 0, n = tt_param_count(x.ctx); k < n; k++) {
            tt_param *p = tt_param_at(x.ctx, k);
            if (!tt__match("*layer*.weight", tt_param_name(p)) || tt_param_ndim(p) != 2) continue;
            CHECK(tt_param_low_rank(p, 5, 0) == TT_OK);
            factors += tt_param_rank(p) == 5;
        }
        CHECK(factors >= 12);
        logits_of(&x, logits[0]);
        const char *folder = test_folder();
        CHECK(save(&x, folder) == TT_OK);
        if (open_model(&y, names[m], folder, 1)) {
            logits_of(&y, logits[1]);
            close_model(&y);
        }
        double error = 0;
        for (int k = 0; k < LOGITS * 2; k++) error = fmax(error, fabs(logits[0][k] - logits[1][k]));
        CHECK_NEAR(error, 0, 1e-5);
        tt_trainer *t = trainer_of(&x, true);
        const tt_batch b = batch_of(&x, 0);
        tt_stats stats[2];
        for (int k = 0; k < 2 && t; k++)
            for (int i = 0; i < (k ? 1 : 4); i++) CHECK(tt_train_batch(t, &b, &stats[k], NULL) == TT_OK);
        CHECK(t && stats[1].loss < stats[0].loss + 1 && tt_param_find(x.ctx, "none") == NULL);
        tt_trainer_free(t);
        logits_of(&x, logits[2]);
        CHECK(memcmp(logits[0], logits[2], sizeof logits[0]) != 0); /* the factors were trained */
        CHECK(save(&x, folder) == TT_OK);
        close_model(&x);
    }
}

TEST(low_rank_has_the_same_bits_for_any_number_of_threads)
{
    float found[2][44 * 5];
    for (int k = 0; k < 2; k++) {
        pruned x;
        if (!open_model(&x, "bert", NULL, 1 + 2 * k)) return;
        tt_param *p = x.bert.layer[1].up_w;
        CHECK(tt_param_low_rank(p, 5, 0) == TT_OK && tt_param_size(p->low_b) == 44 * 5);
        CHECK(tt_param_get(p->low_b, found[k]) == TT_OK);
        close_model(&x);
    }
    CHECK(memcmp(found[0], found[1], sizeof found[0]) == 0);
}

TEST(what_has_no_factors)
{
    pruned x;
    float values[97 * 32] = {0};
    if (!open_model(&x, "bert", NULL, 1)) return;
    tt_param *up = x.bert.layer[0].up_w, *down = x.bert.layer[0].down_w;
    CHECK(tt_param_low_rank(x.bert.layer[0].up_b, 2, 0) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "must have two dimensions");
    CHECK(tt_param_low_rank(up, 2, 1) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "error in [0, 1)");
    CHECK(tt_param_low_rank(up, 2, 0) == TT_OK && tt_param_low_rank(up, 2, 0) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "has factors already");
    CHECK(tt_param_set(up, values) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "has low-rank factors: set these");
    tt_prune_options o = tt_prune_options_default();
    o.neurons = 3;
    CHECK(prune(&x, NULL, &o) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "prune the model before it gets them");
    tt_trainer *t = trainer_of(&x, false);
    CHECK(tt_param_low_rank(down, 2, 0) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "a program still uses parameter");
    tt_trainer_free(t);
    values[0] = NAN;
    CHECK(tt_param_set(down, values) == TT_OK && tt_param_low_rank(down, 2, 0) == TT_ERR_NUMERIC);
    CHECK_ERROR(x.ctx, TT_ERR_NUMERIC, "element 0 of parameter");
    CHECK(tt_param_low_rank(x.bert.word, 2, 0) == TT_OK); /* only tt_linear reads factors */
    tt_train_options train = tt_train_options_default();
    const tt_model model = model_of(&x);
    train.max_seqs = SEQS;
    train.max_tokens = ROWS;
    train.compile.train = false;
    CHECK(!tt_trainer_new(x.ctx, &model, &train));
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "has low-rank factors, which only tt_linear reads");
    close_model(&x);
}

TEST(allocations_of_low_rank_fail)
{
    static const int64_t large[] = {515, 520};
    pruned x;
    if (!open_model(&x, "bert", NULL, 1)) return;
    const int params = tt_param_count(x.ctx);
    for (int k = 1; k < 1000; k++) {
        x.a.calls = 0;
        x.a.fail_at = k;
        x.a.failed = false;
        const tt_status status = tt_param_low_rank(x.bert.layer[0].up_w, 2, 0);
        x.a.fail_at = 0;
        if (!x.a.failed) {
            CHECK(status == TT_OK && tt_param_count(x.ctx) == params + 2);
            break;
        }
        CHECK(status == TT_ERR_MEMORY && tt_param_count(x.ctx) == params);
        CHECK(!tt_param_rank(x.bert.layer[0].up_w));
    }
    tt_param *p = tt_param_new(x.ctx, "large", 2, large, (tt_init){TT_INIT_NORMAL, 1});
    for (int k = 1; p && !tt_param_rank(p); k++) {
        x.a.calls = 0;
        x.a.fail_at = k;
        x.a.failed = false;
        const tt_status status = tt_param_low_rank(p, 1, 0);
        x.a.fail_at = 0;
        CHECK(status == (x.a.failed ? TT_ERR_MEMORY : TT_OK) && tt_param_rank(p) == !x.a.failed);
        if (status != TT_OK && status != TT_ERR_MEMORY) break;
    }
    close_model(&x);
}

/* Returns the largest difference of n numbers, relative to the largest magnitude. */
static double apart(const float *x, const float *y, int n)
{
    double most = 0, error = 0;
    for (int k = 0; k < n; k++) {
        most = fmax(most, fabs((double)x[k]));
        if (!(fabs((double)x[k] - y[k]) <= error)) error = fabs((double)x[k] - y[k]);
    }
    return error / most;
}

/* A saved model whose matrices were all rounded has the logits of the model: what programs round is saved
   rounded, and embeddings as they are. A tied head's file has the embedding, so the head is rounded again. */
TEST(rounded_models_go_round)
{
    static const char *const names[] = {"bert", "albert", "vit", "llama", "qwen3", "gpt2"};
    static float logits[2][LOGITS * 2];
    for (int k = 0; k < 3 * TEST_COUNT(names); k++) {
        const char *name = names[k / 3];
        const tt_rounding kind = (tt_rounding)(TT_ROUND_NONE + 1 + k % 3);
        pruned x, y;
        char folder[600];
        snprintf(folder, sizeof folder, "%s", test_folder());
        if (!open_model(&x, name, NULL, 1)) return;
        CHECK(tt_param_round(x.ctx, "*", kind) > 0);
        const bool tied = x.lm && !x.text.head;
        const tt_param *table = x.vit ? x.image.position : x.lm ? x.text.word : x.bert.word;
        float *before = test_values(table);
        logits_of(&x, logits[0]);
        CHECK(save(&x, folder) == TT_OK);
        if (open_model(&y, name, folder, 1)) {
            table = y.vit ? y.image.position : y.lm ? y.text.word : y.bert.word;
            float *after = test_values(table);
            CHECK(memcmp(before, after, sizeof *after * (size_t)tt_param_size(table)) == 0);
            free(after);
            if (tied) CHECK(tt_param_round(y.ctx, y.text.word->name, kind) == 1);
            logits_of(&y, logits[1]);
            const double error = apart(logits[0], logits[1], LOGITS * 2);
            if (!CHECK(error <= 1e-5)) fprintf(stderr, "%s, rounding %d: %g\n", name, (int)kind, error);
        }
        free(before);
        close_model(&y);
        close_model(&x);
    }
}

/* BERT's files have zeros for heads that were removed, and floats where weights are rounded or coded. */
TEST(files_of_fewer_heads_in_few_bits)
{
    static float logits[2][LOGITS * 2];
    for (int k = 0; k < 4; k++) {
        pruned x, y;
        char folder[600];
        snprintf(folder, sizeof folder, "%s", test_folder());
        if (!open_model(&x, "bert", NULL, 1)) return;
        tt_prune_options o = tt_prune_options_default();
        o.heads = 1;
        CHECK(prune(&x, NULL, &o) == TT_OK);
        if (k < 3) CHECK(tt_param_round(x.ctx, "*layer.*", (tt_rounding)(TT_ROUND_NONE + 1 + k)) > 0);
        for (int i = 0; i < x.bert.config.layers && k == 3; i++) {
            tt_bert_layer *l = &x.bert.layer[i];
            CHECK(tt_param_store(l->q_w, "int8") == TT_OK && tt_param_store(l->up_w, "int8") == TT_OK);
            CHECK(tt_param_store(l->attention_w, "int8") == TT_OK);
        }
        logits_of(&x, logits[0]);
        CHECK(save(&x, folder) == TT_OK);
        if (open_model(&y, "bert", folder, 1)) {
            CHECK(tt_param_dims(y.bert.layer[1].q_w)[0] == 16);
            CHECK(k < 3 || y.bert.layer[1].up_w->form == TT__INT8);
            logits_of(&y, logits[1]);
            const double error = apart(logits[0], logits[1], LOGITS * 2);
            if (!CHECK(error <= 1e-5)) fprintf(stderr, "case %d: %g\n", k, error);
        }
        close_model(&y);
        close_model(&x);
    }
}

/* The patches' convolution, a matrix with four dimensions, is saved as the floats of its codes. */
TEST(files_of_a_convolution_in_few_bits)
{
    static float logits[2][LOGITS * 2];
    for (int k = 0; k < 4; k++) { /* k & 1: after a program; k & 2: beside layers in few bits */
        pruned x, y;
        char folder[600];
        snprintf(folder, sizeof folder, "%s", test_folder());
        if (!open_model(&x, "vit", NULL, 1)) return;
        CHECK(tt_param_store(x.image.patch_w, "int8") == TT_OK);
        if (k & 2) CHECK(tt_param_store(x.image.layer[0].up_w, "int8") == TT_OK);
        tt_trainer *t = trainer_of(&x, false);
        const tt_batch b = batch_of(&x, 0);
        memset(logits, 0, sizeof logits);
        if (k & 1) CHECK(t && tt_forward(t, &b, logits[0], LOGITS * 2) == TT_OK);
        CHECK(save(&x, folder) == TT_OK);
        if (!(k & 1)) CHECK(t && tt_forward(t, &b, logits[0], LOGITS * 2) == TT_OK);
        tt_trainer_free(t);
        if (open_model(&y, "vit", folder, 1)) {
            CHECK(y.image.patch_w->form == TT_F32);
            CHECK(y.image.layer[0].up_w->form == (k & 2 ? TT__INT8 : TT_F32));
            logits_of(&y, logits[1]);
            CHECK(apart(logits[0], logits[1], LOGITS * 2) <= 1e-5);
        }
        close_model(&y);
        close_model(&x);
    }
}

/* A number that is not finite is not saved as another number. */
TEST(not_finite_weights_are_not_packed)
{
    pruned x;
    if (!open_model(&x, "bert", NULL, 1)) return;
    tt_param *p = x.bert.layer[1].down_w;
    float *values = test_values(p);
    values[37] = NAN;
    CHECK(tt_param_set(p, values) == TT_OK && tt_param_round(x.ctx, p->name, TT_ROUND_INT8) == 1);
    CHECK(save(&x, test_folder()) == TT_ERR_NUMERIC);
    CHECK_ERROR(x.ctx, TT_ERR_NUMERIC, "element 37 is not finite, so its row cannot be saved rounded");
    free(values);
    close_model(&x);
}

/* Weights in few bits, and weights with factors, are not pruned and have no importance. */
TEST(stored_weights_are_not_pruned)
{
    static const char *const formats[] = {"int8", "nf4"};
    pruned x;
    for (int k = 0; k < 2; k++) {
        if (!open_model(&x, "llama", NULL, 1)) return;
        tt_prune_options o = tt_prune_options_default();
        o.neurons = 7;
        tt_param *down = x.text.layer[0].down_w;
        const int64_t size = tt_param_size(down);
        if (k) { /* a matrix that nf4 fits, in the place of the model's */
            const int64_t dims[] = {tt_param_dims(down)[0], 64};
            x.text.layer[0].down_w = down = tt_param_new(x.ctx, "wide", 2, dims, (tt_init){TT_INIT_ONES, 0});
        }
        CHECK(tt_param_store(down, formats[k]) == TT_OK);
        CHECK(prune(&x, NULL, &o) == TT_ERR_ARGUMENT);
        CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "prune the model before it is stored in few bits");
        CHECK(k || (tt_param_size(down) == size && x.text.config.intermediate_size != 7));
        tt_param_freeze(x.ctx, tt_param_name(down), true);
        CHECK(!tt_lm_importance(&x.text, &x.source, 1, NULL));
        CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "is stored in few bits: measure importance, and prune, before");
        CHECK(tt_param_frozen(down) && !tt_param_frozen(x.text.word));
        close_model(&x);
    }
    if (!open_model(&x, "llama", NULL, 1)) return;
    CHECK(tt_param_low_rank(x.text.layer[1].down_w, 2, 0) == TT_OK);
    CHECK(!tt_lm_importance(&x.text, &x.source, 1, NULL));
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "has low-rank factors: measure importance, and prune, before");
    close_model(&x);
}

/* A tape that was recorded before its parameter changed is refused. */
TEST(tapes_recorded_before_pruning)
{
    for (int k = 0; k < 2; k++) {
        pruned x;
        if (!open_model(&x, "bert", NULL, 1)) return;
        tt_tape *t = tt_tape_new(x.ctx);
        const tt_value y = tt_linear(t, tt_input(t, "x", TT_F32, 3, 32), x.bert.layer[0].up_w, NULL);
        tt_prune_options o = tt_prune_options_default();
        tt_compile_options c = tt_compile_options_default();
        c.train = false;
        o.neurons = 5;
        CHECK((k ? tt_param_low_rank(x.bert.layer[0].up_w, 2, 0) : prune(&x, NULL, &o)) == TT_OK);
        tt_program *p = tt_compile(t, y, &c);
        CHECK(!p);
        CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, k ? "before tt_param_low_rank gave it factors: record a new tape"
                                              : "before pruning changed its shape: record a new tape");
        tt_program_free(p);
        tt_tape_free(t);
        close_model(&x);
    }
}

/* The numbers of layers are not read if there are more of them than layers. */
TEST(too_many_layers_are_not_read)
{
    pruned x;
    const int which[] = {1, 1};
    if (!open_model(&x, "bert", NULL, 1)) return;
    tt_prune_options o = tt_prune_options_default();
    o.layers = 1000000;
    o.which = which;
    CHECK(prune(&x, NULL, &o) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "layers is 1000000, but must be 0 (all) to 2");
    CHECK(!strstr(tt_error(x.ctx), "which["));
    close_model(&x);
}

/* Factors are frozen with their weight, and importance leaves all marks as they were. */
TEST(factors_are_frozen_with_their_weight)
{
    pruned x;
    if (!open_model(&x, "bert", NULL, 1)) return;
    tt_param *up = x.bert.layer[0].up_w;
    CHECK(tt_param_low_rank(up, 2, 0) == TT_OK && !up->low_a->frozen);
    CHECK(tt_param_freeze(x.ctx, tt_param_name(up), true) == 1 && up->low_a->frozen && up->low_b->frozen);
    CHECK(tt_param_freeze(x.ctx, tt_param_name(up), false) == 1 && !up->low_a->frozen && !up->low_b->frozen);
    CHECK(tt_param_freeze(x.ctx, tt_param_name(up->low_b), true) == 1 && up->low_b->frozen);
    tt_importance *i = importance_of(&x);
    CHECK(i && !up->frozen && !up->low_a->frozen && up->low_b->frozen);
    tt_importance_free(i);
    close_model(&x);
}

/* Rounded weights, weights in few bits, and factors get no factors; weights with factors are not rounded. */
TEST(rounded_and_stored_weights_have_no_factors)
{
    pruned x;
    if (!open_model(&x, "bert", NULL, 1)) return;
    tt_param *up = x.bert.layer[0].up_w, *down = x.bert.layer[0].down_w, *q = x.bert.layer[0].q_w;
    CHECK(tt_param_round(x.ctx, tt_param_name(up), TT_ROUND_TERNARY) == 1);
    CHECK(tt_param_low_rank(up, 2, 0) == TT_ERR_ARGUMENT && !tt_param_rank(up));
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "is rounded (tt_param_round), but its factors would not be");
    CHECK(tt_param_store(q, "int8") == TT_OK && tt_param_low_rank(q, 2, 0) == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "is stored in few bits, but factors are floats");
    CHECK(tt_param_low_rank(down, 4, 0) == TT_OK && tt_param_rank(down) == 4);
    CHECK(tt_param_low_rank(down->low_b, 1, 0) == TT_ERR_ARGUMENT && !tt_param_rank(down->low_b));
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "is a factor of another weight");
    CHECK(tt_param_store(down->low_a, "int8") == TT_ERR_ARGUMENT);
    CHECK_ERROR(x.ctx, TT_ERR_ARGUMENT, "is a factor of another weight, which training changes");
    CHECK(tt_param_round(x.ctx, "*", TT_ROUND_BINARY) > 0 && tt_param_rounding(up) == TT_ROUND_BINARY);
    CHECK(!tt_param_rounding(down) && !tt_param_rounding(down->low_a) && !tt_param_rounding(down->low_b));
    CHECK(!tt_param_rounding(q));
    close_model(&x);
}

static const test_case tests[] = {
    TEST_CASE(prune_distilbert),
    TEST_CASE(prune_bert),
    TEST_CASE(prune_minilm),
    TEST_CASE(prune_albert),
    TEST_CASE(prune_vit),
    TEST_CASE(prune_llama),
    TEST_CASE(prune_qwen3),
    TEST_CASE(prune_neurons_of_gpt2),
    TEST_CASE(importance_has_the_same_bits_for_any_number_of_threads),
    TEST_CASE(files_of_bert_have_zeros_for_heads_that_were_removed),
    TEST_CASE(files_of_vit_have_the_size_of_a_head),
    TEST_CASE(layers_are_chosen_by_importance_or_by_number),
    TEST_CASE(pruning_after_a_program),
    TEST_CASE(pruned_modern_bert),
    TEST_CASE(what_cannot_be_pruned),
    TEST_CASE(allocations_of_pruning_fail),
    TEST_CASE(low_rank_of_numpy),
    TEST_CASE(leading_singular_values),
    TEST_CASE(low_rank_of_a_large_weight),
    TEST_CASE(rank_of_an_error),
    TEST_CASE(low_rank_of_a_model),
    TEST_CASE(low_rank_has_the_same_bits_for_any_number_of_threads),
    TEST_CASE(what_has_no_factors),
    TEST_CASE(allocations_of_low_rank_fail),
    TEST_CASE(rounded_models_go_round),
    TEST_CASE(files_of_fewer_heads_in_few_bits),
    TEST_CASE(files_of_a_convolution_in_few_bits),
    TEST_CASE(not_finite_weights_are_not_packed),
    TEST_CASE(stored_weights_are_not_pruned),
    TEST_CASE(tapes_recorded_before_pruning),
    TEST_CASE(too_many_layers_are_not_read),
    TEST_CASE(factors_are_frozen_with_their_weight),
    TEST_CASE(rounded_and_stored_weights_have_no_factors),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
