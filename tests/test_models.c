/* Tests of src/models/: BERT, DistilBERT, MiniLM and ViT compared with transformers (tests/golden); freezing,
   loading and saving of checkpoints. TINYTRAIN_TEST_VERBOSE=1 prints the measured differences. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

static const char *const models[] = {"distilbert", "bert", "minilm"},
    *const all_models[] = {"distilbert", "bert", "minilm", "vit", "vit/torchvision.safetensors",
                          "roberta", "big_bird", "big_bird_full", "xlm_roberta", "camembert", "albert"};

/* -------------------------------------------------------------------------------------------- golden runs */

typedef struct golden {
    test_allocator a;
    tt_context *ctx;
    tt_safetensors *file;
    tt_bert m;
    tt_vit v;
    bool vit;               /* the model is v instead of m */
    tt_trainer *r;
} golden;

typedef struct batch_data {
    int32_t ids[256], positions[256], types[256], seq_start[16], labels[16];
    uint8_t pixels[8 * 12 * 12 * 3];
} batch_data;

/* Returns the tensor prefix + name of the golden file, with *n elements. The caller frees the tensor. */
static float *golden_tensor(const golden *g, const char *prefix, const char *name, int64_t *n)
{
    char full[256];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    int k = tt_safetensors_find(g->file, full);
    if (!CHECK(k >= 0)) { fprintf(stderr, "golden.safetensors has no '%s'\n", full); exit(2); }
    *n = (int64_t)(tt_safetensors_info(g->file, k)->bytes / 4);
    float *x = (float *)malloc(sizeof(float) * (size_t)*n);
    CHECK(tt_safetensors_read_f32(g->file, k, 0, *n, x) == TT_OK);
    return x;
}

static int golden_ints(const golden *g, int batch, const char *what, int32_t *to, int room)
{
    char name[64];
    snprintf(name, sizeof name, "batch%d.%s", batch, what);
    int k = tt_safetensors_find(g->file, name);
    int n = k < 0 ? -1 : (int)(tt_safetensors_info(g->file, k)->bytes / 4);
    if (!CHECK(n > 0 && n <= room)) {
        fprintf(stderr, "golden.safetensors: '%s' is not usable\n", name);
        exit(2);
    }
    CHECK(tt_safetensors_read_i32(g->file, k, 0, n, to) == TT_OK);
    return n;
}

static tt_batch golden_batch(const golden *g, int k, batch_data *d)
{
    tt_batch b;
    memset(&b, 0, sizeof b);
    b.last_of_step = true;
    b.labels = d->labels;
    if (g->vit) {
        char name[64];
        snprintf(name, sizeof name, "batch%d.pixels", k);
        b.seqs = golden_ints(g, k, "labels", d->labels, TEST_COUNT(d->labels));
        k = tt_safetensors_find(g->file, name);
        CHECK(k >= 0 && tt_safetensors_info(g->file, k)->bytes == (size_t)b.seqs * 12 * 12 * 3 &&
              tt_safetensors_info(g->file, k)->bytes <= sizeof d->pixels);
        CHECK(tt_safetensors_read(g->file, k, 0, (size_t)b.seqs * 12 * 12 * 3, d->pixels) == TT_OK);
        b.pixels = d->pixels;
        b.image_bytes = 12 * 12 * 3;
        return b;
    }
    b.rows = golden_ints(g, k, "input_ids", d->ids, TEST_COUNT(d->ids));
    b.seqs = golden_ints(g, k, "seq_start", d->seq_start, TEST_COUNT(d->seq_start)) - 1;
    golden_ints(g, k, "token_type_ids", d->types, TEST_COUNT(d->types));
    golden_ints(g, k, "labels", d->labels, TEST_COUNT(d->labels));
    for (int s = 0; s < b.seqs; s++)
        for (int32_t r = d->seq_start[s]; r < d->seq_start[s + 1]; r++) d->positions[r] = r - d->seq_start[s];
    b.ids = d->ids;
    b.positions = d->positions;
    b.types = d->types;
    b.seq_start = d->seq_start;
    return b;
}

/* Opens the model of a golden folder, with the classifier from which its training starts, without dropout. */
static bool golden_open(golden *g, const char *name, const char *isa, int threads)
{
    char path[1200];
    tt_context_options o = test_options(&g->a);
    o.isa = isa;
    o.threads = threads;
    o.logger.log = test__no_log;
    g->r = NULL;
    g->vit = strncmp(name, "vit", 3) == 0;
    g->ctx = tt_open(&o);
    if (!CHECK(g->ctx != NULL)) return false;
    memset(&g->m, 0, sizeof g->m);
    memset(&g->v, 0, sizeof g->v);
    if (g->vit ? !CHECK(tt_vit_load(g->ctx, &g->v, TEST_GOLDEN(name), 0, 0) == TT_OK)
               : !CHECK(tt_bert_load(g->ctx, &g->m, TEST_GOLDEN(name), 0) == TT_OK))
        return false;
    g->m.config.dropout = g->m.config.attention_dropout = g->m.config.classifier_dropout = 0;
    g->v.config.dropout = g->v.config.attention_dropout = 0;
    snprintf(path, sizeof path, "%s/golden.safetensors", TEST_GOLDEN(g->vit ? "vit" : name));
    g->file = tt_safetensors_open(g->ctx, path);
    if (!CHECK(g->file != NULL)) return false;
    for (int k = 0; k < 2; k++) { /* sets the classifier, which minilm's checkpoint lacks */
        const char *classifier = k ? "classifier.bias" : "classifier.weight";
        int64_t n;
        if (tt_safetensors_find(g->file, classifier) < 0) continue;
        float *x = golden_tensor(g, "", classifier, &n);
        tt_param *p = k ? g->m.classifier_b : g->m.classifier_w;
        CHECK(n == tt_param_size(p) && tt_param_set(p, x) == TT_OK);
        free(x);
    }
    return true;
}

static void golden_close(golden *g)
{
    tt_trainer_free(g->r);
    tt_safetensors_close(g->file);
    tt_bert_free(&g->m);
    tt_vit_free(&g->v);
    TEST_CLOSE(g->ctx, &g->a);
}

#define GOLDEN_LR 1e-3f

/* returns the options of make_golden.py */
static tt_train_options golden_options(const char *precision, bool accumulate)
{
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.schedule.lr = GOLDEN_LR;
    o.compile.precision = precision;
    o.compile.loss_scale.init = 1024; /* no step is skipped */
    o.max_seqs = 8;
    o.max_tokens = 256;
    o.compile.accumulate = accumulate;
    return o;
}

static bool golden_trainer(golden *g, const char *precision, bool accumulate)
{
    tt_train_options o = golden_options(precision, accumulate);
    tt_model model = g->vit ? tt_vit_classifier(&g->v) : tt_bert_model(&g->m);
    g->r = tt_trainer_new(g->ctx, &model, &o);
    if (!g->r) CHECK_ERROR(g->ctx, TT_OK, "a trainer");
    return g->r != NULL;
}

static bool is_key_bias(const char *name)
{
    return tt__match("*k_lin.bias", name) || tt__match("*key.bias", name);
}

/* Returns whether `name` belongs to BigBird's pooler. transformers does not use the pooler, which has no
   gradient and does not change. */
static bool is_unused(const golden *g, const char *name)
{
    return g->m.config.kind == TT_BIG_BIRD && tt__match("*.pooler.*", name);
}

static double distance(const float *a, const float *b, int64_t n)
{
    double sum = 0;
    for (int64_t k = 0; k < n; k++) sum += ((double)a[k] - (b ? b[k] : 0)) * ((double)a[k] - (b ? b[k] : 0));
    return sqrt(sum);
}

/* Returns the larger of two errors; NaN is the largest. */
static double worse(double a, double b) { return b <= a || a != a ? a : b; }

/* Largest differences from the reference. `logits` and `losses` (batch 0 forward, then five steps) are
   absolute, `norms` is relative. `gradient`: L2 difference of a tensor's gradient, relative to the reference
   gradient. `step5`: L2 difference of a parameter after five steps, relative to the reference's change. The
   biases of keys count apart, in `key_gradient` and `key_step5`: their gradient is only rounding, from which
   Adam makes steps of up to lr. */
typedef struct differences {
    double logits, losses, norms, gradient, key_gradient, step5, key_step5;
} differences;

static void golden_steps(golden *g, bool gradients, differences *d)
{
    int64_t n;
    batch_data data;
    float logits[64], *reference;
    double losses[5], norms[5];
    tt_stats stats;
    tt_batch b = golden_batch(g, 0, &data);
    int params = g->ctx->n_params;
    float **start = (float **)malloc(sizeof *start * (size_t)params);
    for (int k = 0; k < params; k++) start[k] = test_values(g->ctx->params[k]);

    CHECK(tt_predict(g->r, &b, logits) == TT_OK);
    /* Compares the logits from which the probabilities were computed. */
    CHECK(tt_get(g->r->eval, g->r->output, logits, TEST_COUNT(logits)) == TT_OK);
    reference = golden_tensor(g, "", "logits", &n);
    CHECK(n == (int64_t)b.seqs * g->r->model.classes);
    for (int64_t k = 0; k < n; k++) d->logits = worse(d->logits, fabs(logits[k] - reference[k]));
    free(reference);

    for (int step = 0; step < 5; step++) {
        b = golden_batch(g, step, &data);
        if (gradients && step == 0) {
            b.last_of_step = false;
            CHECK(tt_train_batch(g->r, &b, &stats, NULL) == TT_OK);
            for (int k = 0; k < params; k++) {
                const tt_param *p = g->ctx->params[k];
                if (is_unused(g, tt_param_name(p))) continue;
                float *gradient = (float *)malloc(sizeof(float) * (size_t)tt_param_size(p));
                reference = golden_tensor(g, "grad.", tt_param_name(p), &n);
                CHECK(n == tt_param_size(p) && tt_get_gradient(g->r->train, p, gradient) == TT_OK);
                double error = distance(gradient, reference, n), size = distance(reference, NULL, n);
                if (is_key_bias(tt_param_name(p))) {
                    CHECK(size == 0);
                    d->key_gradient = worse(d->key_gradient, error);
                } else {
                    CHECK(size > 0);
                    d->gradient = worse(d->gradient, error / size);
                }
                free(gradient);
                free(reference);
            }
            CHECK(tt_update(g->r->train, tt_trainer_lr(g->r), &stats) == TT_OK);
        } else {
            bool updated = false;
            CHECK(tt_train_batch(g->r, &b, &stats, &updated) == TT_OK && updated);
        }
        CHECK(stats.targets == b.seqs && stats.step == step + 1 && tt_trainer_steps(g->r) == step + 1);
        losses[step] = stats.loss;
        norms[step] = stats.grad_norm;
    }
    reference = golden_tensor(g, "", "losses", &n);
    for (int k = 0; k < 5; k++) d->losses = worse(d->losses, fabs(losses[k] - reference[k]));
    free(reference);
    reference = golden_tensor(g, "", "loss", &n);
    d->losses = worse(d->losses, fabs(losses[0] - reference[0]));
    free(reference);
    reference = golden_tensor(g, "", "grad_norms", &n);
    for (int k = 0; k < 5; k++) d->norms = worse(d->norms, fabs(norms[k] - reference[k]) / reference[k]);
    free(reference);
    for (int k = 0; k < params; k++) {
        const tt_param *p = g->ctx->params[k];
        float *now = test_values(p);
        reference = golden_tensor(g, "step5.", tt_param_name(p), &n);
        if (is_unused(g, tt_param_name(p))) CHECK(distance(now, reference, n) == 0);
        else if (is_key_bias(tt_param_name(p)))
            for (int64_t j = 0; j < n; j++) d->key_step5 = worse(d->key_step5, fabs(now[j] - reference[j]));
        else d->step5 = worse(d->step5, distance(now, reference, n) / distance(start[k], reference, n));
        free(reference);
        free(now);
        free(start[k]);
    }
    free(start);
}

static void compare(const char *name, const char *isa, const char *precision, const differences *max)
{
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        golden g;
        differences d;
        memset(&d, 0, sizeof d);
        if (!golden_open(&g, name, isa, 1) || !golden_trainer(&g, precision, accumulate)) return;
        int tensors = 2 * (g.m.config.kind == TT_BIG_BIRD); /* the pooler has no gradient */
        for (int k = 0; k < tt_safetensors_count(g.file); k++)
            tensors += strncmp(tt_safetensors_info(g.file, k)->name, "grad.", 5) == 0;
        CHECK(tensors == g.ctx->n_params); /* every parameter is compared */
        golden_steps(&g, accumulate, &d);
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  %-27s %-9s %-10s%s logits %.1e, losses %.1e, norms %.1e, gradients %.1e (key biases "
                   "%.1e), step 5 %.1e (%.1e)\n",
                   name, tt_isa(g.ctx), precision, accumulate ? " +" : "  ", d.logits, d.losses, d.norms,
                   d.gradient, d.key_gradient, d.step5, d.key_step5);
        CHECK_NEAR(d.logits, 0, max->logits);
        CHECK_NEAR(d.losses, 0, max->losses);
        CHECK_NEAR(d.norms, 0, max->norms);
        CHECK_NEAR(d.gradient, 0, max->gradient);
        CHECK_NEAR(d.key_gradient, 0, max->key_gradient);
        CHECK_NEAR(d.step5, 0, max->step5);
        CHECK_NEAR(d.key_step5, 0, max->key_step5);
        golden_close(&g);
    }
}

static const differences fp32 = {3e-6, 3e-6, 3e-6, 5e-6, 1e-6, 1e-3, 5.1 * GOLDEN_LR};

TEST(golden_distilbert) { compare("distilbert", NULL, "32-true", &fp32); }
TEST(golden_bert) { compare("bert", NULL, "32-true", &fp32); }
TEST(golden_minilm) { compare("minilm", NULL, "32-true", &fp32); }
TEST(golden_roberta) { compare("roberta", NULL, "32-true", &fp32); }
TEST(golden_big_bird) { compare("big_bird", NULL, "32-true", &fp32); }
TEST(golden_big_bird_full) { compare("big_bird_full", NULL, "32-true", &fp32); }
TEST(golden_xlm_roberta) { compare("xlm_roberta", NULL, "32-true", &fp32); }
TEST(golden_camembert) { compare("camembert", NULL, "32-true", &fp32); }
TEST(golden_albert) { compare("albert", NULL, "32-true", &fp32); }

/* The losses of 20 steps of AdamW equal PyTorch's. */
TEST(golden_of_20_steps)
{
    static const char *const names[] = {"xlm_roberta", "camembert", "albert"};
    for (int k = 0; k < TEST_COUNT(names); k++) {
        golden g;
        batch_data data;
        tt_stats stats;
        int64_t n;
        if (!golden_open(&g, names[k], NULL, 1) || !golden_trainer(&g, "32-true", false)) return;
        float *losses = golden_tensor(&g, "", "losses", &n);
        double max = 0;
        CHECK(n == 20);
        for (int step = 0; step < n; step++) {
            tt_batch b = golden_batch(&g, step, &data);
            CHECK(tt_train_batch(g.r, &b, &stats, NULL) == TT_OK);
            max = worse(max, fabs(stats.loss - losses[step]));
        }
        if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("  %s: losses of 20 steps within %.1e\n", names[k], max);
        CHECK_NEAR(max, 0, 1e-5);
        free(losses);
        golden_close(&g);
    }
}

/* The layers of ALBERT share their parameters, which take memory once. */
TEST(albert_layers_share_parameters)
{
    tt_plan plan[2];
    for (int k = 0; k < 2; k++) {
        test_allocator a;
        tt_bert m;
        tt_bert_config c = tt_bert_config_default(TT_ALBERT);
        tt_context *ctx = test_open(&a);
        tt_train_options o = golden_options("32-true", false);
        c.vocab_size = 40;
        c.embedding_size = 7;
        c.hidden_size = 12;
        c.heads = 3;
        c.intermediate_size = 20;
        c.layers = k ? 9 : 1;
        CHECK(tt_bert_new(ctx, &m, &c) == TT_OK && m.layer[c.layers - 1].up_w == m.layer[0].up_w);
        tt_model model = tt_bert_model(&m);
        tt_trainer *r = tt_trainer_new(ctx, &model, &o);
        if (CHECK(r != NULL)) plan[k] = tt_program_plan(tt_trainer_program(r));
        CHECK(ctx->n_params == 5 + 2 + 16 + 4); /* embeddings, mapping, layer, pooler and classifier */
        tt_trainer_free(r);
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(plan[0].at_peak[TT_MEM_PARAMETERS] == plan[1].at_peak[TT_MEM_PARAMETERS]);
    CHECK(plan[0].persistent_bytes == plan[1].persistent_bytes && plan[0].flops < plan[1].flops);
}

/* A folder with tokenizer.json takes texts and gives probabilities. */
TEST(roberta_of_texts)
{
    golden g;
    float probabilities[8];
    char texts[1024] = "", *text = texts;
    int64_t n, classes;
    if (!golden_open(&g, "roberta", NULL, 1) || !golden_trainer(&g, "32-true", false)) return;
    float *logits = golden_tensor(&g, "", "text_logits", &n);
    const int k = tt_safetensors_find(g.file, "texts");
    tt_tokenizer *tokenizer = tt_tokenizer_load(g.ctx, TEST_GOLDEN("roberta"));
    const size_t bytes = k < 0 ? 0 : tt_safetensors_info(g.file, k)->bytes;
    classes = g.m.config.classes;
    if (!CHECK(tokenizer && bytes && bytes < sizeof texts && classes <= 8)) return;
    CHECK(tt_safetensors_read(g.file, k, 0, bytes, texts) == TT_OK);
    for (int64_t at = 0; at < n; at += classes) {
        double sum = 0;
        char *end = strchr(text, '\n');
        if (end) *end = 0;
        CHECK(tt_predict_text(g.r, tokenizer, text, NULL, probabilities) == TT_OK);
        for (int64_t c = 0; c < classes; c++) sum += exp(logits[at + c]);
        for (int64_t c = 0; c < classes; c++) CHECK_NEAR(probabilities[c], exp(logits[at + c]) / sum, 3e-6);
        text = end ? end + 1 : text + strlen(text);
    }
    CHECK(n == 4 * classes && !*text);
    free(logits);
    tt_tokenizer_free(tokenizer);
    golden_close(&g);
}

/* Loads a checkpoint of several files, which an index names. */
TEST(bert_of_shards)
{
    static const char *const names[][2] = {{"config.json", "config.json"},
                                           {"model.safetensors", "part-1.safetensors"}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_bert m;
    char folder[512], path[1024];
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "shards"));
    CHECK(mkdir(folder, 0700) == 0);
    for (int k = 0; k < 2; k++) {
        char bytes[1 << 12];
        size_t n;
        snprintf(path, sizeof path, "%s/%s", TEST_GOLDEN("roberta"), names[k][0]);
        FILE *from = fopen(path, "rb");
        snprintf(path, sizeof path, "%s/%s", folder, names[k][1]);
        FILE *to = fopen(path, "wb");
        REQUIRE(from && to);
        while ((n = fread(bytes, 1, sizeof bytes, from)) > 0) CHECK(fwrite(bytes, 1, n, to) == n);
        fclose(from);
        CHECK(fclose(to) == 0);
    }
    CHECK(tt_bert_load(ctx, &m, folder, 0) != TT_OK);
    CHECK_ERROR(ctx, tt_error_code(ctx), "model.safetensors'");
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    FILE *index = fopen(path, "w");
    REQUIRE(index != NULL);
    fputs("{\"weight_map\": {\"any\": \"part-1.safetensors\"}}", index);
    CHECK(fclose(index) == 0);
    CHECK(tt_bert_load(ctx, &m, folder, 0) == TT_OK);
    CHECK(m.config.kind == TT_ROBERTA && m.config.layers > 0);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* The random blocks equal those that transformers 5.24 draws with numpy. hash: FNV-1a of rand_attn (heads,
   blocks - 2, random blocks), as BigBirdBlockSparseAttention's functions return it for a sequence of `rows`
   tokens. */
TEST(big_bird_lists)
{
    static const struct { int rows, size, listed, heads; uint32_t seed, hash; } all[] = {
        {4096, 64, 3, 12, 0, 0x581c71bau}, {4096, 64, 3, 12, 11, 0x1e7f2905u},
        {1024, 64, 3, 2, 5, 0x7c9b2fdcu},  {52, 4, 2, 3, 1, 0xb6f6ef06u},
        {3072, 128, 2, 2, 1, 0x235f1f88u}, {2048, 64, 3, 4, 2, 0xd44c92f7u}};
    for (int k = 0; k < TEST_COUNT(all); k++) {
        static int32_t lists[12 * 64 * 3], room[128];
        const int n = all[k].rows / all[k].size;
        uint32_t hash = 2166136261u;
        tt__big_bird_lists(lists, all[k].heads, n, all[k].listed, all[k].size, all[k].seed, room);
        for (int h = 0; h < all[k].heads; h++)
            for (int i = 1; i < n - 1; i++)
                for (int j = 0; j < all[k].listed; j++)
                    hash = (hash ^ (uint32_t)lists[(h * n + i) * all[k].listed + j]) * 16777619u;
        CHECK(hash == all[k].hash);
    }
}

TEST(golden_vit) { compare("vit", NULL, "32-true", &fp32); }
TEST(golden_vit_of_torchvision) { compare("vit/torchvision.safetensors", NULL, "32-true", &fp32); }

TEST(golden_portable)
{
    for (int k = 0; k < TEST_COUNT(all_models); k++) compare(all_models[k], "portable", "32-true", &fp32);
}

TEST(golden_avx2)
{
    if (!tt__choose_isa("avx2")) SKIP("this CPU has no AVX2");
    for (int k = 0; k < TEST_COUNT(all_models); k++) compare(all_models[k], "avx2", "32-true", &fp32);
}

TEST(golden_bf16_mixed)
/* A unit of DistilBERT's ReLU whose input is near zero may flip, which changes a norm by some percent. The
   gradients of ViT's key biases, which are only rounding, are 0.0020 with most kernels and with PyTorch's
   autocast, and 0.0021 with BFMMLA, which rounds sums to odd. */
{
    static const differences max = {0.04, 0.03, 0.1, 0.1, 0.0025, 0.3, 5.1 * GOLDEN_LR};
    for (int k = 0; k < TEST_COUNT(all_models); k++) compare(all_models[k], NULL, "bf16-mixed", &max);
    for (int k = 0; k < TEST_COUNT(all_models); k++) compare(all_models[k], "portable", "bf16-mixed", &max);
}

/* Near 1 a bf16 parameter is a multiple of 1/128, so stochastic rounding moves the parameter further than
   five steps of 1/1000 do. */
TEST(golden_bf16_true)
{
    static const differences max = {0.06, 0.05, 0.1, 0.2, 0.004, 4, 0.02};
    for (int k = 0; k < TEST_COUNT(all_models); k++) compare(all_models[k], NULL, "bf16-true", &max);
    for (int k = 0; k < TEST_COUNT(all_models); k++) compare(all_models[k], "portable", "bf16-true", &max);
}

TEST(golden_16_mixed)
/* f16 keeps three bits of mantissa more than bf16: differences are about an eighth of bf16's. But Adam's
   steps differ as much as in bf16 where a small gradient changes its sign. */
{
    static const differences max = {0.005, 0.004, 0.02, 0.02, 0.0003, 0.3, 5.1 * GOLDEN_LR};
    for (int k = 0; k < TEST_COUNT(all_models); k++) compare(all_models[k], NULL, "16-mixed", &max);
    for (int k = 0; k < TEST_COUNT(all_models); k++) compare(all_models[k], "portable", "16-mixed", &max);
}

/* Near 1 an f16 parameter is a multiple of 1/1024, so a rounding is about as large as a step of 1/1000.
   Weights in f16 change the logits of ViT by 0.0096, in PyTorch, too. */
TEST(golden_16_true)
{
    static const differences max = {0.012, 0.0065, 0.02, 0.03, 0.0005, 0.5, 5.1 * GOLDEN_LR};
    for (int k = 0; k < TEST_COUNT(all_models); k++) compare(all_models[k], NULL, "16-true", &max);
    for (int k = 0; k < TEST_COUNT(all_models); k++) compare(all_models[k], "portable", "16-true", &max);
}

TEST(same_bits_for_any_number_of_threads)
{
    for (int k = 0; k < TEST_COUNT(all_models); k++)
        for (int precision = 0; precision < 5; precision++) {
            static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed",
                                                     "16-true"};
            golden g[2];
            differences d;
            for (int t = 0; t < 2; t++) {
                if (!golden_open(&g[t], all_models[k], NULL, t ? 3 : 1) ||
                    !golden_trainer(&g[t], precisions[precision], false))
                    return;
                memset(&d, 0, sizeof d);
                golden_steps(&g[t], false, &d);
            }
            CHECK(g[0].ctx->n_params == g[1].ctx->n_params);
            for (int p = 0; p < g[0].ctx->n_params; p++) {
                float *a = test_values(g[0].ctx->params[p]), *b = test_values(g[1].ctx->params[p]);
                CHECK(memcmp(a, b, sizeof(float) * (size_t)tt_param_size(g[0].ctx->params[p])) == 0);
                free(a);
                free(b);
            }
            golden_close(&g[0]);
            golden_close(&g[1]);
        }
}

/* Computes the losses of four steps of a small DistilBERT with dropout, and returns the program's
   plan. If `all`, all hidden rows of the last layer are outputs; otherwise only rows of [CLS] are used. */
static tt_plan train_on_first_rows(bool all, const char *precision, const char *recompute, float loss[4])
{
    enum { SEQS = 3, LENGTH = 7, TOKENS = SEQS * LENGTH };
    test_allocator a;
    tt_bert m;
    tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
    int32_t id[TOKENS], position[TOKENS], start[SEQS + 1], label[SEQS];
    tt_compile_options o = tt_compile_options_default();
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_inputs in;
    tt_plan plan;
    memset(&in, 0, sizeof in);
    memset(&plan, 0, sizeof plan);
    c.vocab_size = 50;
    c.hidden_size = 24;
    c.layers = 4;
    c.heads = 3;
    c.intermediate_size = 40;
    c.max_positions = LENGTH;
    c.dropout = c.attention_dropout = 0.3f;
    o.optimizer.kind = TT_SGD;
    o.optimizer.weight_decay = 0;
    o.precision = precision;
    o.recompute = recompute;
    if (!CHECK(tt_bert_new(ctx, &m, &c) == TT_OK)) return plan;
    int64_t rows = tt_axis(t, "tokens", TOKENS), seqs = tt_axis(t, "seqs", SEQS);
    in.ids = tt_input(t, "ids", TT_I32, rows, 1);
    in.positions = tt_input(t, "positions", TT_I32, rows, 1);
    in.seq_start = tt_seq_start(t, "starts", seqs);
    in.first = tt_input(t, "first", TT_I32, seqs, 1);
    tt_value labels = tt_input(t, "labels", TT_I32, seqs, 1), h = tt_bert_encode(&m, t, &in);
    if (all) tt_output(t, h);
    tt_program *p = tt_compile(
        t,
        tt_cross_entropy(t, tt_linear(t, tt_gather_rows(t, h, in.first), m.classifier_w, m.classifier_b),
                         labels, NULL),
        &o);
    for (int r = 0; r < TOKENS; r++) { id[r] = r * 7 % 50; position[r] = r % LENGTH; }
    for (int s = 0; s <= SEQS; s++) start[s] = s * LENGTH;
    for (int s = 0; s < SEQS; s++) label[s] = s % 2;
    for (int step = 0; step < 4; step++) {
        tt_stats stats;
        CHECK(tt_set(p, in.ids, id, TOKENS) == TT_OK && tt_set(p, in.positions, position, TOKENS) == TT_OK &&
              tt_set(p, in.seq_start, start, SEQS + 1) == TT_OK);
        CHECK(tt_set(p, in.first, start, SEQS) == TT_OK && tt_set(p, labels, label, SEQS) == TT_OK &&
              tt_step(p, 0.5f, &stats) == TT_OK);
        loss[step] = (float)stats.loss;
    }
    plan = tt_program_plan(p);
    tt_program_free(p);
    tt_tape_free(t);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
    return plan;
}

/* Without an output of all hidden states, the rows of the last layer that only this output needs are not
   computed, and dropout masks do not change. */
TEST(rows_after_the_last_attention)
{
    float some[4], all[4];
    double fewer = train_on_first_rows(true, "32-true", "none", all).flops -
                   train_on_first_rows(false, "32-true", "none", some).flops;
    /* The FLOPs of 21 - 3 rows: products with q, out, up and down, and attention. */
    CHECK(fewer == 6.0 * (21 - 3) * (2 * 24 * 24 + 2 * 24 * 40) + 12.0 * (21 - 3) * 7 * 24);
    for (int k = 0; k < 4; k++) CHECK_NEAR(some[k], all[k], 1e-5 * all[k]);
    CHECK(all[0] != all[1] && all[3] > 0);
}

/* The last ops gather rows from every layer's result. A pass moves the gather of an op's result before the
   op, so that no whole result waits in memory for its gather. */
TEST(rows_of_every_layer)
{
    size_t bytes[2];
    for (int all = 0; all < 2; all++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_compile_options o = tt_compile_options_default();
        int64_t dims[2] = {32, 32};
        tt_init init = {TT_INIT_NORMAL, 0.1f};
        tt_param *w = tt_param_new(ctx, "w", 2, dims, init);
        tt_value x = tt_input(t, "x", TT_F32, 512, 32), index = tt_input(t, "index", TT_I32, 4, 1), layer[6],
                 sum = {0};
        for (int k = 0; k < 6; k++) {
            x = tt_gelu(t, tt_linear(t, x, w, NULL));
            layer[k] = tt_linear(t, x, w, NULL);
            if (all) tt_output(t, layer[k]);
        }
        for (int k = 0; k < 6; k++) {
            tt_value rows = tt_gather_rows(t, layer[k], index);
            sum = k ? tt_add(t, sum, rows) : rows;
        }
        o.train = false;
        tt_program *p = tt_compile(t, sum, &o);
        CHECK(p != NULL);
        bytes[all] = tt_program_plan(p).bytes;
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
    /* with `all`, six results of 512 rows are alive at once; otherwise three or four values */
    CHECK(bytes[0] < bytes[1] / 2);
}

/* A pass gathers the rows of two inputs before their sum, instead of the rows of the sum. The sum must still
   read fp32 and not 1000.5 rounded to bf16. */
TEST(rows_of_inputs_are_not_rounded)
{
    static const float x[2] = {1000.5f, 1000.5f}, y[2] = {-1000, -1000}, zero = 0;
    static const int32_t first = 0;
    test_allocator a;
    tt_stats stats;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options o = tt_compile_options_default();
    tt_value none = {0}, vx = tt_input(t, "x", TT_F32, 2, 1), vy = tt_input(t, "y", TT_F32, 2, 1),
             index = tt_input(t, "index", TT_I32, 1, 1), target = tt_input(t, "target", TT_F32, 1, 1);
    o.train = false;
    o.precision = "bf16-mixed";
    tt_program *p = tt_compile(
        t, tt_mean_squared_error(t, tt_gather_rows(t, tt_add(t, vx, vy), index), target, none), &o);
    CHECK(p && tt_set(p, vx, x, 2) == TT_OK && tt_set(p, vy, y, 2) == TT_OK &&
          tt_set(p, index, &first, 1) == TT_OK && tt_set(p, target, &zero, 1) == TT_OK);
    CHECK(tt_run(p, &stats) == TT_OK);
    CHECK_NEAR(stats.loss, 0.25, 1e-6);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* Returns the plan of a training step of DistilBERT-base on 16 x 512 tokens. Nothing is allocated. */
static tt_plan plan_of_base(const char *precision, const char *recompute)
{
    test_allocator a;
    tt_bert m;
    tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
    tt_train_options o = tt_train_options_default();
    tt_context *ctx = test_open(&a);
    tt_plan plan;
    memset(&plan, 0, sizeof plan);
    o.compile.precision = precision;
    o.compile.recompute = recompute;
    o.schedule.kind = TT_CONSTANT;
    o.max_seqs = 16;
    o.max_tokens = 16 * 512;
    if (!CHECK(tt_bert_new(ctx, &m, &c) == TT_OK)) return plan;
    tt_model model = tt_bert_model(&m);
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (CHECK(t != NULL)) plan = tt_program_plan(tt_trainer_program(t));
    CHECK(plan.bytes <= 1.02 * (double)plan.lower_bound_bytes);
    tt_trainer_free(t);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
    return plan;
}

/* A recomputed value takes no memory between its uses, and its bits do not change. */
TEST(recompute_policies)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"},
                             *const policies[] = {"none", "cheap", "attention", "blocks"};
    const double rows = 21, d = 24, ff = 40, block = 2 * rows * (4 * d * d + 2 * d * ff) + 4 * rows * 7 * d;
    for (int k = 0; k < TEST_COUNT(precisions); k++) {
        float loss[4][4];
        tt_plan plan[4];
        for (int p = 0; p < 4; p++) {
            plan[p] = train_on_first_rows(true, precisions[k], policies[p], loss[p]);
            CHECK(memcmp(loss[p], loss[0], sizeof loss[0]) == 0);
            CHECK_NEAR(plan[p].flops - plan[p].extra_flops, plan[0].flops, 0);
        }
        CHECK(plan[0].extra_flops == 0 && plan[1].extra_flops == 0);
        /* the attention of four layers is recomputed */
        CHECK_NEAR(plan[2].extra_flops, 4 * 4 * rows * 7 * d, 0);
        CHECK_NEAR(plan[3].extra_flops, 3 * (block - 2 * rows * d * ff),
                   0); /* three blocks are recomputed, without their last product */
        for (int p = 0; p < 4; p++) {
            plan[p] = plan_of_base(precisions[k], policies[p]);
            if (getenv("TINYTRAIN_TEST_VERBOSE"))
                printf("  DistilBERT-base 16 x 512, %s, %s: %.1f MB, %.1f%% more FLOPs\n", precisions[k],
                       policies[p], (double)plan[p].bytes / 1e6,
                       100 * plan[p].extra_flops / (plan[p].flops - plan[p].extra_flops));
            CHECK(p == 0 || plan[p].bytes < plan[p - 1].bytes);
        }
    }
}

/* ----------------------------------------------------------------------------------------------- freezing */

TEST(name_patterns)
{
    static const struct { const char *pattern, *name; bool matches; } all[] = {
        {"*.layer.[0-3].*", "bert.encoder.layer.3.output.dense.bias", true},
        {"*.layer.[0-3].*", "bert.encoder.layer.4.output.dense.bias", false},
        {"*.layer.[0-3].*", "bert.encoder.layer.13.output.dense.bias", false},
        {"*.layer.[01]?.*", "bert.encoder.layer.13.output.dense.bias", true},
        {"[a-c-]x", "-x", true}, {"[a-c-]x", "bx", true}, {"[a-c-]x", "dx", false}, {"[a-c]", "", false},
        {"[qv]_*", "q_proj", true}, {"[qv]_*", "k_proj", false}, {"[]", "a", false}, {"[a", "a", false},
        {"[a", "[a", true}, {"w[0]", "w[0]", true}, {"w[0]", "w0", true}, {"*[0-9]", "layer.12", true},
        {"*[0-9]", "layer.1x", false}, {"*", "", true}, {"a*b?c", "aXbYbZc", true}};
    for (int k = 0; k < TEST_COUNT(all); k++)
        if (!CHECK(tt__match(all[k].pattern, all[k].name) == all[k].matches))
            printf("%s: %s\n", all[k].pattern, all[k].name);
}

/* Freezes parameters and trains three steps. Frozen parameters keep their bits. The other parameters change,
   and their first gradients and the norm equal the reference's. A pattern that begins with '!' unfreezes. */
static void freeze(const char *name, const char *const *patterns, int trainable)
{
    golden g;
    batch_data data;
    tt_stats stats;
    double squares = 0;
    int64_t n;
    if (!golden_open(&g, name, NULL, 1)) return;
    int params = g.ctx->n_params, found = 0;
    for (int k = 0; patterns[k]; k++)
        CHECK(tt_param_freeze(g.ctx, patterns[k] + (*patterns[k] == '!'), *patterns[k] != '!') > 0);
    float **start = (float **)malloc(sizeof *start * (size_t)params);
    for (int k = 0; k < params; k++) {
        start[k] = test_values(g.ctx->params[k]);
        found += !tt_param_frozen(g.ctx->params[k]);
    }
    CHECK(found == trainable);
    if (!golden_trainer(&g, "32-true", true)) return;

    tt_batch b = golden_batch(&g, 0, &data);
    b.last_of_step = false;
    CHECK(tt_train_batch(g.r, &b, &stats, NULL) == TT_OK);
    for (int k = 0; k < params; k++) {
        const tt_param *p = g.ctx->params[k];
        float *gradient = (float *)malloc(sizeof(float) * (size_t)tt_param_size(p));
        tt_status status = tt_get_gradient(g.r->train, p, gradient);
        if (tt_param_frozen(p)) {
            CHECK(status == TT_ERR_ARGUMENT);
            CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "has no gradient in this program: it is frozen or not used");
            CHECK(strstr(tt_error(g.ctx), tt_param_name(p)) != NULL);
        } else {
            float *reference = golden_tensor(&g, "grad.", tt_param_name(p), &n);
            double size = distance(reference, NULL, n);
            CHECK(status == TT_OK);
            CHECK_NEAR(distance(gradient, reference, n), 0, fp32.gradient * size + fp32.key_gradient);
            squares += size * size;
            free(reference);
        }
        free(gradient);
    }
    CHECK(tt_update(g.r->train, tt_trainer_lr(g.r), &stats) == TT_OK);
    CHECK_NEAR(stats.grad_norm, sqrt(squares), 1e-5 * sqrt(squares));
    for (int step = 1; step < 3; step++) {
        b = golden_batch(&g, step, &data);
        CHECK(tt_train_batch(g.r, &b, &stats, NULL) == TT_OK);
    }
    for (int k = 0; k < params; k++) {
        const tt_param *p = g.ctx->params[k];
        float *now = test_values(p);
        bool same = memcmp(now, start[k], sizeof(float) * (size_t)tt_param_size(p)) == 0;
        if (tt_param_frozen(p)) CHECK(same);
        else CHECK(!same);
        free(now);
        free(start[k]);
    }
    free(start);
    golden_close(&g);
}

TEST(freeze_the_body) /* only the head trains, on the body's outputs */
{
    static const char *const distil[] = {"distilbert.*", NULL}, *const bert[] = {"bert.*", NULL};
    freeze("distilbert", distil, 4);
    freeze("bert", bert, 2);
    freeze("minilm", bert, 2);
}

TEST(freeze_all_but_the_last_layer_and_head)
{
    static const char *const distil[] = {"distilbert.*", "!distilbert.transformer.layer.1.*", NULL};
    static const char *const bert[] = {"bert.*", "!bert.encoder.layer.1.*", "!bert.pooler.*", NULL};
    freeze("distilbert", distil, 20);
    freeze("bert", bert, 20);
    freeze("minilm", bert, 20);
}

TEST(freeze_the_head)
{
    static const char *const distil[] = {"pre_classifier.*", "classifier.*", NULL},
                      *const bert[] = {"*", "!bert.e*", NULL};
    freeze("distilbert", distil, 36);
    freeze("bert", bert, 37);
    freeze("minilm", bert, 37);
}

TEST(freeze_embeddings_and_biases)
{
    static const char *const patterns[] = {"*embeddings*", "*.bias", NULL};
    freeze("distilbert", patterns, 18); /* six matrices and two norm weights per layer, two in the head */
    freeze("bert", patterns, 18);
}

TEST(freeze_nothing_and_all)
{
    static const char *const thaw[] = {"*", "!*", NULL};
    freeze("distilbert", thaw, 40);
    freeze("bert", thaw, 41);
    freeze("minilm", thaw, 41);
    for (int k = 0; k < TEST_COUNT(models); k++) {
        golden g;
        if (!golden_open(&g, models[k], NULL, 1)) return;
        tt_model model = tt_bert_model(&g.m);
        tt_train_options o = golden_options("32-true", false);
        CHECK(tt_param_freeze(g.ctx, "*", true) == g.ctx->n_params);
        CHECK(tt_trainer_new(g.ctx, &model, &o) == NULL);
        CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "nothing to train: the loss depends on no trainable parameter");
        CHECK(tt_param_freeze(g.ctx, "no such name", true) == 0);
        golden_close(&g);
    }
}

/* Frozen parameters have no gradient and no optimizer state, and need fewer saved values. */
TEST(frozen_parameters_take_no_memory)
{
    golden g;
    tt_plan all, head;
    if (!golden_open(&g, "bert", NULL, 1) || !golden_trainer(&g, "32-true", true)) return;
    all = tt_program_plan(tt_trainer_program(g.r));
    tt_trainer_free(g.r);
    tt_param_freeze(g.ctx, "bert.*", true);
    if (!golden_trainer(&g, "32-true", true)) return;
    head = tt_program_plan(tt_trainer_program(g.r));
    CHECK(head.at_peak[TT_MEM_PARAMETERS] == all.at_peak[TT_MEM_PARAMETERS]);
    /* Only the head's parameters, (2, 32) and (2), have a gradient and Adam's two averages. Each of these
       tensors takes a multiple of 64 bytes. */
    CHECK(head.persistent_bytes - head.at_peak[TT_MEM_PARAMETERS] == 3 * (256 + 64));
    CHECK(head.bytes - head.persistent_bytes < all.bytes - all.persistent_bytes);
    golden_close(&g);
}

/* ----------------------------------------------------------------------------------- saving and reloading */

static bool same_config(const tt_bert *a, const tt_bert *b)
{
    const tt_bert_config *x = &a->config, *y = &b->config;
    for (int k = 0; k < x->classes && k < y->classes; k++)
        if (!CHECK(strcmp(a->class_names[k], b->class_names[k]) == 0)) return false;
    return CHECK(x->kind == y->kind && x->vocab_size == y->vocab_size &&
                 x->hidden_size == y->hidden_size && x->layers == y->layers) &&
           CHECK(x->heads == y->heads && x->intermediate_size == y->intermediate_size &&
                 x->max_positions == y->max_positions && x->embedding_size == y->embedding_size) &&
           CHECK(x->type_vocab_size == y->type_vocab_size && x->classes == y->classes &&
                 strcmp(x->activation, y->activation) == 0) &&
           CHECK(x->layer_norm_eps == y->layer_norm_eps && x->initializer_range == y->initializer_range) &&
           CHECK(x->dropout == y->dropout && x->attention_dropout == y->attention_dropout &&
                 x->classifier_dropout == y->classifier_dropout) &&
           CHECK(x->pad_token == y->pad_token && x->block_sparse == y->block_sparse &&
                 x->block_size == y->block_size && x->random_blocks == y->random_blocks) &&
           CHECK(x->qkv_bias == y->qkv_bias && x->scale_embeddings == y->scale_embeddings);
}

TEST(save_and_reload)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};
    static const char *const dtypes[] = {"F32", "F32", "BF16", "F32", "F16"}, *const names[] = {"float32",
                                                                                                "float32",
                                                                                                "bfloat16",
                                                                                                "float32",
                                                                                                "float16"};
    static const char *const all[] = {"distilbert", "bert", "minilm", "roberta", "big_bird", "xlm_roberta",
                                      "camembert", "albert"};
    for (int k = 0; k < TEST_COUNT(all) * TEST_COUNT(precisions); k++) {
        golden g;
        differences d;
        test_allocator a;
        tt_bert m;
        char folder[1024], path[1100], dtype[64];
        size_t bytes;
        memset(&d, 0, sizeof d);
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "made by saving"));
        const char *precision = precisions[k / TEST_COUNT(all)];
        if (!golden_open(&g, all[k % TEST_COUNT(all)], NULL, 1) || !golden_trainer(&g, precision, false))
            return;
        golden_steps(&g, false, &d);
        for (int round = 0; round < 2; round++) { /* round 1 saves over the existing file */
            g.m.config.dropout = 0.1f;
            g.m.config.attention_dropout = 0.123456789f;
            g.m.config.classifier_dropout = 1.0f / 3;
            g.m.config.initializer_range = 0.017f;
            /* DistilBERT's epsilon is 1e-12, which its config.json does not hold. */
            if (g.m.config.kind != TT_DISTILBERT) g.m.config.layer_norm_eps = 1.1e-7f;
            snprintf(g.m.class_names[0], sizeof g.m.class_names[0],
                     "n\xC3\xA4"
                     "chster \"Film\"\\\t%d",
                     round);
            snprintf(g.m.class_names[1], sizeof g.m.class_names[1], "\xE5\xA5\xBD");
            CHECK(tt_bert_save(&g.m, folder) == TT_OK);
        }

        test_log log;
        tt_context *ctx = test_open_logged(&a, &log);
        CHECK(tt_bert_load(ctx, &m, folder, 0) == TT_OK);
        CHECK(log.infos + log.warnings == 0); /* no log: each tensor is found and used */
        CHECK(same_config(&g.m, &m));
        CHECK(ctx->n_params == g.ctx->n_params);
        tt_train_options o = golden_options(precisions[k / TEST_COUNT(all)], false);
        tt_model model = tt_bert_model(&m);
        tt_trainer *r = tt_trainer_new(ctx, &model, &o);
        if (CHECK(r != NULL)) CHECK(tt_allocate(r->train) == TT_OK);
        for (int p = 0; p < ctx->n_params; p++) {
            const tt_param *old = g.ctx->params[p], *now = ctx->params[p];
            CHECK(strcmp(tt_param_name(old), tt_param_name(now)) == 0);
            if (is_unused(&g, tt_param_name(old))) continue; /* no program has this parameter */
            const tt_dtype dtype = tt__param_placement(old)->dtype;
            CHECK(dtype == tt__param_placement(now)->dtype);
            CHECK(memcmp(tt__param_memory(old, 0), tt__param_memory(now, 0),
                         (size_t)old->size * tt_dtype_bytes(dtype)) == 0);
        }
        tt_trainer_free(r);

        /* The file has exactly the names of transformers' reference. */
        snprintf(path, sizeof path, "%s/model.safetensors", folder);
        tt_safetensors *file = tt_safetensors_open(ctx, path);
        if (CHECK(file != NULL)) {
            CHECK(tt_safetensors_count(file) == ctx->n_params);
            CHECK(tt_safetensors_metadata(file, "format") &&
                  strcmp(tt_safetensors_metadata(file, "format"), "pt") == 0);
            for (int i = 0; i < tt_safetensors_count(file); i++) {
                char name[256];
                const tt_tensor_info *info = tt_safetensors_info(file, i), *reference;
                snprintf(name, sizeof name, "step5.%s", info->name);
                int j = tt_safetensors_find(g.file, name);
                if (!CHECK(j >= 0)) continue;
                reference = tt_safetensors_info(g.file, j);
                CHECK(info->ndim == reference->ndim &&
                      memcmp(info->dims, reference->dims, sizeof *info->dims * (size_t)info->ndim) == 0);
                if (!is_unused(&g, info->name)) CHECK(strcmp(info->dtype, dtypes[k / TEST_COUNT(all)]) == 0);
            }
        }
        tt_safetensors_close(file);
        snprintf(path, sizeof path, "%s/config.json", folder);
        snprintf(dtype, sizeof dtype, "\"dtype\": \"%s\"", names[k / TEST_COUNT(all)]);
        char *text = test_read(path, &bytes);
        CHECK(text && strstr(text, dtype));
        free(text);
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
        golden_close(&g);
    }
}

/* A save reads the tensors from the checkpoint, also if the save replaces the checkpoint. */
TEST(save_before_anything_is_allocated)
{
    test_allocator a;
    tt_bert m, again;
    size_t n, saved_n;
    char folder[1024];
    snprintf(folder, sizeof folder, "%s", test_folder());
    tt_context *ctx = test_open(&a);
    CHECK(tt_bert_load(ctx, &m, TEST_GOLDEN("bert"), 0) == TT_OK && tt_bert_save(&m, folder) == TT_OK);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
    char *first = test_read(test_path(folder, "model.safetensors"), &n);
    ctx = test_open(&a);
    CHECK(tt_bert_load(ctx, &again, folder, 0) == TT_OK && tt_bert_save(&again, folder) == TT_OK);
    tt_bert_free(&again);
    TEST_CLOSE(ctx, &a);
    char *second = test_read(test_path(folder, "model.safetensors"), &saved_n);
    CHECK(first && second && n == saved_n && memcmp(first, second, n) == 0);
    free(first);
    free(second);
}

TEST(save_fails_and_the_old_files_stay)
{
    static const struct { char op; long at; const char *error; } faults[] = {
        {'o', 1, "cannot create '"}, {'w', 1, "cannot write '"}, {'w', 3, "cannot write '"},
        {'s', 1, "cannot sync '"}, {'c', 1, "cannot close '"}, {'n', 1, "cannot rename '"},
        {'o', 2, "config.json.tmp': injected"}, {'s', 2, "config.json.tmp': injected"},
        {'n', 2, "config.json.tmp': injected"}};
    for (int k = 0; k < TEST_COUNT(faults); k++) {
        test_allocator a;
        test_files f;
        tt_bert m;
        size_t n[4];
        char folder[1024], *bytes[4];
        snprintf(folder, sizeof folder, "%s", test_folder());
        tt_context_options o = test_options(&a);
        o.files = test_failing_files(&f, 0, 0);
        tt_context *ctx = tt_open(&o);
        CHECK(tt_bert_load(ctx, &m, TEST_GOLDEN("distilbert"), 0) == TT_OK &&
              tt_bert_save(&m, folder) == TT_OK);
        for (int i = 0; i < 2; i++)
            bytes[i] = test_read(test_path(folder, i ? "config.json" : "model.safetensors"), &n[i]);
        m.config.dropout = 0.5f; /* a whole save would change both files */
        float *zeros = (float *)calloc((size_t)tt_param_size(m.word), sizeof(float));
        CHECK(tt_param_set(m.word, zeros) == TT_OK);
        free(zeros);
        f.fail = faults[k].op;
        f.at = faults[k].at;
        f.calls = 0;
        CHECK(tt_bert_save(&m, folder) == TT_ERR_FILE);
        CHECK_ERROR(ctx, TT_ERR_FILE, faults[k].error);
        CHECK(strstr(tt_error(ctx), "injected") != NULL);
        f.fail = 0;
        for (int i = 0; i < 2; i++)
            bytes[2 + i] = test_read(test_path(folder, i ? "config.json" : "model.safetensors"), &n[2 + i]);
        CHECK(bytes[1] && bytes[3] && n[1] == n[3] && memcmp(bytes[1], bytes[3], n[1]) == 0);
        bool weights_done = k >= 6; /* weights are written before config.json */
        CHECK(bytes[0] && bytes[2] && n[0] == n[2] &&
              (memcmp(bytes[0], bytes[2], n[0]) == 0) == !weights_done);
        for (int i = 0; i < 4; i++) free(bytes[i]);
        char *left = test_read(test_path(folder, "model.safetensors.tmp"), &n[0]),
             *left_too = test_read(test_path(folder, "config.json.tmp"), &n[0]);
        CHECK(!left && !left_too);
        free(left);
        free(left_too);
        CHECK(tt_bert_save(&m, folder) == TT_OK);
        CHECK(tt_bert_save(&m, test_path(folder, "no/such/folder")) == TT_ERR_FILE);
        CHECK_ERROR(ctx, TT_ERR_FILE, "cannot make folder '");
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* ------------------------------------------------------------------------------ checkpoints made to order */

typedef struct edit {
    const char *strip,
        *put; /* strip: a prefix removed from the names that have it; put: a prefix added to all names */
    bool old_norms;            /* norms are LayerNorm.gamma and .beta                                       */
    const char *drop;          /* pattern of tensors that are left out                                      */
    const char *longer;        /* tensor that gets one more row, of zeros                                   */
    const char *flat;          /* tensor that gets a single dimension                                       */
    const char *retype, *dtype;/* tensors that match `retype` get `dtype`; integers are all 0 */
    const char *extra;         /* an additional tensor, I64 (1, 3)                                          */
} edit;

/* Writes a golden folder's checkpoint with edits, and its config.json with `from` replaced by `to`, into a
   new folder. Returns the folder. */
static const char *edited(const char *model, const edit *e, const char *from, const char *to)
{
    static char folder[1024];
    char path[1200];
    enum { MAX = 64 };
    static char names[MAX][160];
    tt_tensor_info info[MAX];
    char *bytes[MAX];
    int count = 0;
    test_allocator a;
    size_t n;
    tt_context *ctx = test_open(&a);
    snprintf(folder, sizeof folder, "%s", test_folder());
    memset(info, 0, sizeof info);

    snprintf(path, sizeof path, "%s/model.safetensors", TEST_GOLDEN(model));
    tt_safetensors *file = tt_safetensors_open(ctx, path);
    if (!file) { fprintf(stderr, "%s\n", tt_error(ctx)); exit(2); }
    for (int k = 0; k < tt_safetensors_count(file); k++) {
        const tt_tensor_info *old = tt_safetensors_info(file, k);
        if (e->drop && tt__match(e->drop, old->name)) continue;
        bool stripped = e->strip && strncmp(old->name, e->strip, strlen(e->strip)) == 0;
        const char *norm = strstr(old->name, "LayerNorm.");
        const char *plain = old->name + (stripped ? strlen(e->strip) : 0);
        bool renamed = e->old_norms && norm;
        snprintf(names[count], sizeof names[count], "%s%.*s%s", e->put ? e->put : "",
                 renamed ? (int)(norm + 10 - plain) : 120, plain,
                 !renamed ? ""
                 : strcmp(norm + 10, "weight") == 0 ? "gamma"
                 : "beta");
        info[count] = *old;
        info[count].name = names[count];
        size_t elements = old->bytes / 4;
        if (e->longer && strcmp(e->longer, old->name) == 0) {
            elements += elements / (size_t)old->dims[0];
            info[count].dims[0]++;
        }
        if (e->flat && strcmp(e->flat, old->name) == 0) {
            info[count].ndim = 1;
            info[count].dims[0] = (int64_t)elements;
        }
        bytes[count] = (char *)calloc(elements, 8);
        info[count].bytes = elements * 4;
        CHECK(tt_safetensors_read(file, k, 0, old->bytes, bytes[count]) == TT_OK);
        if (e->retype && tt__match(e->retype, old->name)) {
            const float *x = (const float *)(const void *)bytes[count];
            char *y = (char *)calloc(elements, 8);
            size_t one = strcmp(e->dtype, "F64") == 0 || strcmp(e->dtype, "I64") == 0 ? 8
                         : strcmp(e->dtype, "I32") == 0 ? 4
                         : 2;
            for (size_t i = 0; i < elements; i++) {
                double wide = x[i];
                uint16_t half = strcmp(e->dtype, "BF16") == 0 ? tt__to_bf16(x[i]) : tt__to_f16(x[i]);
                if (*e->dtype == 'I') continue;
                if (one == 8) memcpy(y + i * 8, &wide, 8);
                else memcpy(y + i * 2, &half, 2);
            }
            free(bytes[count]);
            bytes[count] = y;
            info[count].dtype = e->dtype;
            info[count].bytes = elements * one;
        }
        count++;
    }
    if (e->extra) {
        snprintf(names[count], sizeof names[count], "%s", e->extra);
        info[count].name = names[count];
        info[count].dtype = "I64";
        info[count].ndim = 2;
        info[count].dims[0] = 1;
        info[count].dims[1] = 3;
        info[count].bytes = 24;
        bytes[count++] = (char *)calloc(3, 8);
    }
    tt_safetensors_writer *w = tt_safetensors_begin(ctx, test_path(folder, "model.safetensors"), info, count,
                                                    NULL);
    CHECK(w != NULL);
    for (int k = 0; k < count; k++) {
        if (w) CHECK(tt_safetensors_write(w, bytes[k], info[k].bytes) == TT_OK);
        free(bytes[k]);
    }
    if (w) CHECK(tt_safetensors_end(w) == TT_OK);
    tt_safetensors_close(file);
    TEST_CLOSE(ctx, &a);

    snprintf(path, sizeof path, "%s/config.json", TEST_GOLDEN(model));
    char *config = test_read(path, &n), *at = from && config ? strstr(config, from) : NULL;
    if (!CHECK(config && (!from || at))) exit(2);
    char *text = (char *)malloc(n + (to ? strlen(to) : 0) + 1);
    size_t before = at ? (size_t)(at - config) : n;
    memcpy(text, config, before);
    text[before] = 0;
    if (at) { strcat(text, to); strcat(text, at + strlen(from)); }
    test_write(test_path(folder, "config.json"), text, strlen(text));
    free(text);
    free(config);
    return folder;
}

static const edit unchanged = {NULL, NULL, false, NULL, NULL, NULL, NULL, NULL, NULL};

/* Loads `folder` and compares each parameter with the golden checkpoint's. tolerance: relative to the largest
   element. */
static void same_parameters(const char *folder, const char *model, double tolerance)
{
    test_allocator a, b;
    tt_bert m, reference;
    test_log log;
    tt_context *ctx = test_open_logged(&a, &log), *other = test_open(&b);
    if (CHECK(tt_bert_load(ctx, &m, folder, 0) == TT_OK) &&
        CHECK(tt_bert_load(other, &reference, TEST_GOLDEN(model), 0) == TT_OK)) {
        /* A load logs one warning if the head is new, else none. */
        CHECK(log.warnings == m.new_head && m.new_head == reference.new_head);
        CHECK(ctx->n_params == other->n_params);
        for (int k = 0; k < ctx->n_params; k++) {
            int64_t n = tt_param_size(ctx->params[k]);
            float *x = test_values(ctx->params[k]), *y = test_values(other->params[k]);
            for (int64_t i = 0; i < n; i++) {
                double max = tolerance * (fabs(y[i]) + 1e-4);
                if (!(fabs(x[i] - y[i]) <= max)) { CHECK_NEAR(x[i], y[i], max); break; }
            }
            free(x);
            free(y);
        }
    }
    tt_bert_free(&m);
    tt_bert_free(&reference);
    TEST_CLOSE(ctx, &a);
    TEST_CLOSE(other, &b);
}

TEST(names_without_prefix_and_old_names)
{
    for (int k = 0; k < TEST_COUNT(models); k++) {
        const char *prefix = k ? "bert." : "distilbert.";
        edit e = unchanged;
        same_parameters(edited(models[k], &e, NULL, NULL), models[k], 0);
        e.strip = prefix;
        same_parameters(edited(models[k], &e, NULL, NULL), models[k], 0);
        e.old_norms = true;
        same_parameters(edited(models[k], &e, NULL, NULL), models[k], 0);
        e.strip = NULL;
        same_parameters(edited(models[k], &e, NULL, NULL), models[k], 0);
        if (k == 2) { /* adds a prefix, which minilm's file lacks */
            e.put = prefix;
            same_parameters(edited(models[k], &e, NULL, NULL), models[k], 0);
        }
    }
}

TEST(other_dtypes)
{
    static const struct { const char *dtype; double tolerance; } rows[] = {
        {"F64", 0}, {"BF16", 1.0 / 256}, {"F16", 1.0 / 2048}};
    for (int k = 0; k < TEST_COUNT(rows); k++)
        for (int m = 0; m < TEST_COUNT(models); m++) {
            edit e = unchanged;
            e.retype = "*";
            e.dtype = rows[k].dtype;
            same_parameters(edited(models[m], &e, NULL, NULL), models[m], rows[k].tolerance);
        }
}

TEST(position_ids_and_other_tensors)
{
    test_allocator a;
    test_log log;
    tt_bert m;
    edit e = unchanged;
    /* Older versions of transformers saved this buffer, which loading ignores without a warning. */
    e.extra = "bert.embeddings.position_ids";
    tt_context *ctx = test_open_logged(&a, &log);
    CHECK(tt_bert_load(ctx, &m, edited("bert", &e, NULL, NULL), 0) == TT_OK && log.warnings == 0);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
    e.extra = "cls.predictions.bias";
    ctx = test_open_logged(&a, &log);
    CHECK(tt_bert_load(ctx, &m, edited("bert", &e, NULL, NULL), 0) == TT_OK && log.warnings == 1);
    CHECK(strstr(log.text,
                 "model.safetensors': 1 tensors are not part of this model and were ignored") != NULL);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
}

TEST(another_number_of_classes)
{
    for (int k = 0; k < TEST_COUNT(models); k++) {
        test_allocator a;
        test_log log;
        tt_bert m;
        tt_context *ctx = test_open_logged(&a, &log);
        CHECK(tt_bert_load(ctx, &m, TEST_GOLDEN(models[k]), 5) == TT_OK);
        CHECK(m.config.classes == 5 && tt_param_dims(m.classifier_w)[0] == 5 &&
              tt_param_size(m.classifier_b) == 5);
        CHECK(strcmp(m.class_names[4], "LABEL_4") == 0);
        if (k < 2) {
            CHECK(log.warnings == 1 && m.new_head);
            CHECK(strstr(log.text, k ? "has 2 classes, but 5 are requested: " : "has 3 classes, but 5 are "
                         "requested: ") &&
                  strstr(log.text, "'classifier.weight', 'classifier.bias' start with new values"));
        } else { /* the file contains no classifier */
            CHECK(log.warnings == 1 && log.infos == 0 && m.new_head);
            CHECK(strstr(log.text,
                         "has no 'classifier.weight', 'classifier.bias': these start with new values"));
        }
        float *w = test_values(m.classifier_w), *b = test_values(m.classifier_b);
        double size = distance(w, NULL, tt_param_size(m.classifier_w)) /
                      sqrt((double)tt_param_size(m.classifier_w));
        /* A new classifier has normally distributed weights: initializer_range is 0.02. */
        CHECK(size > 0.015 && size < 0.025 && distance(b, NULL, 5) == 0);
        free(w);
        free(b);
        /* The body comes from the file. */
        tt_param *word = tt_param_find(ctx, k ? "bert.embeddings.word_embeddings.weight"
                                              : "distilbert.embeddings.word_embeddings.weight");
        CHECK(word && word == m.word && word->read != NULL);
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);

        ctx = test_open_logged(&a, &log);
        CHECK(tt_bert_load(ctx, &m, TEST_GOLDEN(models[k]), k ? 2 : 3) == TT_OK);
        CHECK(log.warnings == (k == 2) && m.new_head == (k == 2));
        tt_bert_free(&m);
        CHECK(tt_bert_load(ctx, &m, TEST_GOLDEN(models[k]), 100001) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "classes is 100001, but at most 100000 are supported");
        CHECK(tt_bert_load(ctx, &m, TEST_GOLDEN(models[k]), -1) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "classes is -1");
        TEST_CLOSE(ctx, &a);
    }
}

/* If any tensor between the hidden states and the logits is missing, one warning names it. BigBird's pooler
   may be missing, because no logits depend on the pooler. */
TEST(heads_that_lack_a_tensor)
{
    static const struct { const char *model, *lacks; bool used; } rows[] = {
        {"bert", "bert.pooler.dense.weight", true}, {"bert", "bert.pooler.dense.bias", true},
        {"bert", "classifier.bias", true}, {"distilbert", "pre_classifier.weight", true},
        {"roberta", "classifier.dense.bias", true}, {"roberta", "classifier.out_proj.weight", true},
        {"big_bird", "classifier.dense.weight", true}, {"big_bird", "bert.pooler.weight", false}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a;
        test_log log;
        tt_bert m;
        char named[128];
        edit e = unchanged;
        tt_context *ctx = test_open_logged(&a, &log);
        e.drop = rows[k].lacks;
        snprintf(named, sizeof named, "has no '%s': these start with new values", rows[k].lacks);
        CHECK(tt_bert_load(ctx, &m, edited(rows[k].model, &e, NULL, NULL), 0) == TT_OK);
        CHECK(log.warnings == 1 && log.infos == 0 && strstr(log.text, named) != NULL);
        CHECK(m.new_head == rows[k].used);
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* Makes a dataset of four texts of three classes. */
static tt_dataset *of_three(tt_context *ctx, const char *const *names)
{
    const tt_text text[] = {{.text = "a", .bytes = 1}, {.text = "b", .bytes = 1, .label = 1},
                            {.text = "c", .bytes = 1, .label = 2}, {.text = "d", .bytes = 1, .label = 2}};
    return tt_dataset_texts(ctx, TT_TASK_CLASS, text, 4, names, 3);
}

TEST(models_keep_the_numbers_of_their_classes)
{
    static const char *const data[] = {"neg", "mixed", "pos"}, *const other[] = {"neg", "mixed", "good"};
    const char *old = "\"0\": \"LABEL_0\",\n    \"1\": \"LABEL_1\",\n    \"2\": \"LABEL_2\"";
    const char *now = "\"0\": \"pos\", \"1\": \"neg\", \"2\": \"mixed\"";
    static const int numbers[] = {1, 2, 0, 0};
    test_allocator a;
    test_log log;
    tt_bert m;
    tt_context *ctx = test_open_logged(&a, &log);
    CHECK(tt_bert_load(ctx, &m, edited("distilbert", &unchanged, old, now), 3) == TT_OK && !m.new_head);
    tt_dataset *d = of_three(ctx, data), *held = tt_dataset_split(d, 1);
    CHECK(tt_bert_name_classes(&m, d) == TT_OK && tt_bert_name_classes(&m, held) == TT_OK);
    CHECK(tt_bert_name_classes(&m, d) == TT_OK); /* a repeated call changes nothing */
    for (int k = 0; k < 4; k++) {
        const tt_dataset *of = k < 3 ? d : held;
        const int label = tt_dataset_label(of, k % 3);
        CHECK(label == numbers[*tt_dataset_text(of, k % 3, NULL) - 'a']);
    }
    for (int c = 0; c < 3; c++)
        CHECK(strcmp(m.class_names[c], tt_dataset_class_name(d, c)) == 0 &&
              strcmp(m.class_names[c], tt_dataset_class_name(held, c)) == 0 &&
              strcmp(m.class_names[c], data[(c + 2) % 3]) == 0);
    CHECK(log.warnings == 0);
    tt_dataset_free(held);
    tt_dataset_free(d);

    /* The data have another set of names, so the model takes the data's names; the classifier keeps its
       weights. */
    d = of_three(ctx, other);
    CHECK(tt_bert_name_classes(&m, d) == TT_OK && strcmp(m.class_names[2], "good") == 0);
    CHECK(tt_dataset_label(d, 0) == 0 && log.warnings == 1 &&
          strstr(log.text, "the model's classes are 'pos', 'neg', 'mixed'; those of the data are 'neg', "
                 "'mixed', 'good': each class") != NULL);
    tt_bert_free(&m);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);

    tt_bert_config c = tt_bert_config_default(TT_BERT); /* a new model has no saved order of classes, so it
                                                           takes the names of the data */
    c.layers = 1, c.hidden_size = 8, c.heads = 2, c.intermediate_size = 8, c.vocab_size = 9, c.classes = 3;
    ctx = test_open_logged(&a, &log);
    d = of_three(ctx, data);
    CHECK(tt_bert_new(ctx, &m, &c) == TT_OK && m.new_head && tt_bert_name_classes(&m, d) == TT_OK);
    CHECK(log.warnings == 0 && strcmp(m.class_names[0], "neg") == 0);
    tt_dataset_free(d);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
}

TEST(class_names_of_a_config)
{
    test_allocator a;
    tt_bert m;
    tt_context *ctx = test_open(&a);
    const char *old = "\"0\": \"LABEL_0\",\n    \"1\": \"LABEL_1\",\n    \"2\": \"LABEL_2\"";
    CHECK(tt_bert_load(ctx, &m,
                       edited("distilbert", &unchanged, old,
                              "\"2\": \"\\u00e9\", \"0\": \"bad\", \"1\": \"so \\\"so\\\"\""),
                       0) == TT_OK);
    CHECK(strcmp(m.class_names[0], "bad") == 0 && strcmp(m.class_names[1], "so \"so\"") == 0 &&
          strcmp(m.class_names[2], "\xC3\xA9") == 0);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
    ctx = test_open(&a); /* a name that is too long is cut between characters */
    char text[400] = "\"0\": \"ab", *folder = test_folder();
    for (int k = 0; k < 40; k++) strcat(text, "\xC3\xA9");
    strcat(text, "\", \"1\": \"b\", \"2\": \"c\"");
    CHECK(tt_bert_load(ctx, &m, edited("distilbert", &unchanged, old, text), 0) == TT_OK);
    CHECK(strlen(m.class_names[0]) == 62 && tt__utf8_invalid(m.class_names[0], 62) == 62);
    CHECK(tt_bert_save(&m, folder) == TT_OK);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
    ctx = test_open(&a);
    CHECK(tt_bert_load(ctx, &m, folder, 0) == TT_OK && strlen(m.class_names[0]) == 62);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
    ctx = test_open(&a);
    CHECK(tt_bert_load(ctx, &m,
                       edited("distilbert", &unchanged, old, "\"0\": \"a\", \"1\": \"b\", \"3\": \"c\""),
                       0) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "has no \"2\", which is required");
    /* transformers reads {} as no classes, and the caller's number counts */
    CHECK(tt_bert_load(ctx, &m, edited("distilbert", &unchanged, old, ""), 3) == TT_OK);
    CHECK(m.config.classes == 3 && strcmp(m.class_names[2], "LABEL_2") == 0 && !m.new_head);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
    ctx = test_open(&a);
    CHECK(tt_bert_load(ctx, &m, edited("distilbert", &unchanged, old, "\"0\": 7"), 0) == TT_ERR_FORMAT);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "\"0\" is a number; expected a string");
    TEST_CLOSE(ctx, &a);
}

/* If two classes have one name, all names are kept, and label2id has each name once, with its last class. */
TEST(classes_of_one_name)
{
    test_allocator a;
    tt_bert m;
    char folder[1024], path[1100];
    size_t n;
    const char *old = "\"0\": \"LABEL_0\",\n    \"1\": \"LABEL_1\",\n    \"2\": \"LABEL_2\"";
    const char *now = "\"0\": \"crane\", \"1\": \"a \\\"heron\\\"\", \"2\": \"crane\"";
    snprintf(folder, sizeof folder, "%s", edited("distilbert", &unchanged, old, now));
    snprintf(path, sizeof path, "%s/config.json", folder);
    for (int round = 0; round < 2; round++) { /* round 0: transformers' file; 1: the saved file */
        tt_context *ctx = test_open(&a);
        REQUIRE(tt_bert_load(ctx, &m, folder, 0) == TT_OK && m.config.classes == 3);
        CHECK(strcmp(m.class_names[0], "crane") == 0 && strcmp(m.class_names[1], "a \"heron\"") == 0);
        CHECK(strcmp(m.class_names[2], "crane") == 0 && tt_bert_save(&m, folder) == TT_OK);
        char *text = test_read(path, &n);
        CHECK(text && strstr(text, "\"label2id\": {\"a \\\"heron\\\"\": 1, \"crane\": 2}"));
        free(text);
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* Values that could not be read back are refused before anything is written. */
TEST(what_no_config_can_hold_is_not_saved)
{
    char folder[1100];
    snprintf(folder, sizeof folder, "%s/new", test_folder());
    for (int k = 0; k < 7; k++) {
        test_allocator a;
        tt_bert m;
        tt_context *ctx = test_open(&a);
        REQUIRE(tt_bert_load(ctx, &m, TEST_GOLDEN("bert"), 0) == TT_OK);
        static const char *const errors[] = {
            "class_names[1] must be a string", "class_names[0] must be a string of at most 63 bytes of UTF-8",
            "dropout ",
            "initializer_range is inf", "layer_norm_eps is inf", "activation '\"' is unknown",
            "initializer_range is -1"};
        if (k == 0) strcpy(m.class_names[1], "caf\xE9");
        if (k == 1) memset(m.class_names[0], 'x', 64);
        if (k == 2) m.config.dropout = NAN;
        if (k == 3) m.config.initializer_range = INFINITY;
        if (k == 4) m.config.layer_norm_eps = INFINITY;
        if (k == 5) m.config.activation = "\"";
        if (k == 6) m.config.initializer_range = -1;
        CHECK(tt_bert_save(&m, folder) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, errors[k]);
        CHECK(access(folder, F_OK) != 0);
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

static void refused(const char *folder, tt_status status, const char *part, const char *part_too)
{
    test_allocator a;
    tt_bert m;
    tt_context *ctx = test_open(&a);
    memset(&m, 0xA5, sizeof m);
    CHECK(tt_bert_load(ctx, &m, folder, 0) == status);
    CHECK_ERROR(ctx, status, part);
    CHECK_ERROR(ctx, status, part_too);
    CHECK(m.ctx == NULL && m.layer == NULL);
    tt_bert_free(&m); /* may be called after a failure, too */
    TEST_CLOSE(ctx, &a);
}

TEST(broken_checkpoints)
{
    const char *folder;
    edit e = unchanged;
    char *bytes, name[1100];
    size_t n;
    e.drop = "*layer.1.ffn.lin1.weight";
    refused(edited("distilbert", &e, NULL, NULL), TT_ERR_FORMAT, "has no tensor "
            "'distilbert.transformer.layer.1.ffn.lin1.weight', which config.json or, without a config.json",
            "model.safetensors'");
    e.drop = "embeddings.word_embeddings.weight";
    refused(edited("minilm", &e, NULL, NULL), TT_ERR_FORMAT,
            "has no tensor 'bert.embeddings.word_embeddings.weight'", "config.json");
    e.drop = "bert.embeddings.LayerNorm.bias";
    refused(edited("bert", &e, NULL, NULL), TT_ERR_FORMAT, "has no tensor 'bert.embeddings.LayerNorm.bias'",
            "config.json");
    e = unchanged;
    e.longer = "bert.encoder.layer.0.output.dense.weight";
    refused(edited("bert", &e, NULL, NULL), TT_ERR_SHAPE,
            "tensor 'bert.encoder.layer.0.output.dense.weight' has shape (33, 44), expected (32, 44)",
            "for parameter '");
    e.longer = "bert.encoder.layer.0.output.dense.bias";
    refused(edited("bert", &e, NULL, NULL), TT_ERR_SHAPE, "has shape (33), expected (32)",
            "model.safetensors'");
    e = unchanged;
    e.flat = "classifier.weight";
    refused(edited("bert", &e, "\"classifier_dropout\"", "\"num_labels\": 64, \"classifier_dropout\""),
            TT_ERR_SHAPE, "'classifier.weight' has shape (64), expected (64, 32)", "for parameter '");
    e = unchanged;
    e.retype = "distilbert.transformer.layer.0.attention.q_lin.weight";
    e.dtype = "I32";
    refused(edited("distilbert", &e, NULL, NULL), TT_ERR_FORMAT,
            "q_lin.weight' has dtype I32, but parameters must be F32, BF16, F16 or F64",
            "model.safetensors'");
    e.retype = "*";
    e.dtype = "I64";
    refused(edited("distilbert", &e, NULL, NULL), TT_ERR_FORMAT, "has dtype I64", "F64");

    /* The checkpoint has other sizes than its config. */
    refused(edited("bert", &unchanged, "\"vocab_size\": 97", "\"vocab_size\": 98"), TT_ERR_SHAPE,
            "word_embeddings.weight' has shape (97, 32), expected (98, 32)", "model.safetensors'");
    refused(edited("bert", &unchanged, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"),
            TT_ERR_FORMAT, "has no tensor 'bert.encoder.layer.2.attention.self.query.weight': it has 2 "
            "layers, but config.json says 3", "model.safetensors'");
    refused(edited("bert", &unchanged, "\"model_type\": \"bert\"", "\"model_type\": \"distilbert\""),
            TT_ERR_FORMAT, "has no \"dim\", which is required", "config.json'");

    folder = edited("bert", &unchanged, NULL, NULL); /* now model.safetensors is truncated or damaged */
    snprintf(name, sizeof name, "%s/model.safetensors", folder);
    bytes = test_read(name, &n);
    for (int k = 0; k < 5; k++) {
        const size_t keep[] = {0, 7, 100, 2000, n - 1};
        test_write(name, bytes, keep[k]);
        refused(folder, TT_ERR_FORMAT, "model.safetensors'", "model.safetensors'");
    }
    bytes[9] = '!';
    test_write(name, bytes, n);
    refused(folder, TT_ERR_FORMAT, "not valid JSON", "model.safetensors'");
    free(bytes);
    remove(name);
    refused(folder, TT_ERR_FILE, "cannot open '", "model.safetensors': No such file or directory");
}

/* The sizes in a config are compared with the file before anything of that size is allocated. */
TEST(configs_that_promise_more_than_the_file_holds)
{
    static const struct { const char *model, *from, *to; tt_status status; const char *error; } rows[] = {
        {"distilbert", "\"n_layers\": 2", "\"n_layers\": 4000", TT_ERR_FORMAT,
         "has no tensor 'distilbert.transformer.layer.2.attention.q_lin.weight': it has 2 layers, but "
         "config.json says 4000"},
        {"bert", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 900000", TT_ERR_FORMAT,
         "has no tensor 'bert.encoder.layer.2.attention.self.query.weight': it has 2 layers, but "
         "config.json says 900000"},
        {"minilm", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 536870911", TT_ERR_ARGUMENT,
         "layers is 536870911, but at most 1000000 are supported"},
        {"distilbert", "\"vocab_size\": 101", "\"vocab_size\": 536870911", TT_ERR_SHAPE,
         "word_embeddings.weight' has shape (101, 36), expected (536870911, 36)"},
        {"bert", "\"hidden_size\": 32", "\"hidden_size\": 536870910", TT_ERR_SHAPE,
         "has shape (97, 32), expected (97, 536870910)"},
        {"bert", "\"type_vocab_size\": 2", "\"type_vocab_size\": 536870911", TT_ERR_SHAPE,
         "expected (536870911, 32)"},
    };
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a;
        tt_bert m;
        tt_context *ctx = test_open(&a);
        CHECK(tt_bert_load(ctx, &m, TEST_GOLDEN(rows[k].model), 0) == TT_OK);
        size_t enough = a.peak_bytes;
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
        ctx = test_open(&a);
        CHECK(tt_bert_load(ctx, &m, edited(rows[k].model, &unchanged, rows[k].from, rows[k].to), 0) ==
              rows[k].status);
        CHECK_ERROR(ctx, rows[k].status, rows[k].error);
        CHECK(a.peak_bytes <= enough && ctx->n_params == 0);
        TEST_CLOSE(ctx, &a);
    }
}

/* Finds each of thousands of parameters by name, also after a failed load has removed its parameters. */
TEST(many_layers)
{
    char folder[1024];
    test_allocator a;
    tt_bert m, twin;
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    const int64_t one = 1;
    tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
    c.vocab_size = c.hidden_size = c.intermediate_size = c.max_positions = 2;
    c.heads = 1;
    c.layers = 1000;
    snprintf(folder, sizeof folder, "%s", test_folder());
    tt_context *ctx = test_open(&a);
    CHECK(!tt_param_find(ctx, "x") && tt_bert_new(ctx, &m, &c) == TT_OK);
    CHECK(tt_bert_save(&m, folder) == TT_OK);
    int params = ctx->n_params;
    for (int k = 0; k < params; k++) CHECK(tt_param_find(ctx, ctx->params[k]->name) == ctx->params[k]);
    CHECK(tt_bert_load(ctx, &twin, folder, 0) == TT_ERR_ARGUMENT && ctx->n_params == params);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "parameter 'distilbert.embeddings.word_embeddings.weight' exists "
                "already");
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);

    ctx = test_open(&a);
    tt_param *before = tt_param_new(ctx, "distilbert.transformer.layer.1000", 1, &one, zeros);
    tt_param *last = tt_param_new(ctx, "distilbert.transformer.layer.999.output_layer_norm.bias", 1, &one,
                                  zeros);
    /* Loading fails at the last parameter of the last layer, whose name is taken, and removes all parameters
       that it made. */
    CHECK(tt_bert_load(ctx, &m, folder, 0) == TT_ERR_ARGUMENT && ctx->n_params == 2);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "parameter 'distilbert.transformer.layer.999.output_layer_norm.bias' "
                "exists already");
    CHECK(tt_param_find(ctx, before->name) == before && tt_param_find(ctx, last->name) == last);
    CHECK(!tt_param_find(ctx, "distilbert.transformer.layer.0.ffn.lin1.weight"));
    TEST_CLOSE(ctx, &a);

    ctx = test_open(&a);
    CHECK(tt_bert_load(ctx, &m, folder, 0) == TT_OK && m.config.layers == 1000 && ctx->n_params == params);
    CHECK(tt_param_find(ctx, "distilbert.transformer.layer.999.output_layer_norm.bias") ==
          m.layer[999].output_norm_b);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* A number that f32 cannot hold is an error when its tensor is read: loading reads the header alone. */
TEST(numbers_that_a_float_cannot_hold)
{
    test_allocator a;
    tt_bert m;
    edit e = unchanged;
    char name[1100], folder[1024];
    size_t n;
    double huge = 1e300;
    e.retype = "classifier.bias";
    e.dtype = "F64";
    snprintf(folder, sizeof folder, "%s", edited("bert", &e, NULL, NULL));
    snprintf(name, sizeof name, "%s/model.safetensors", folder);
    tt_context *ctx = test_open(&a);
    tt_safetensors *file = tt_safetensors_open(ctx, name);
    REQUIRE(file != NULL);
    int k = tt_safetensors_find(file, "classifier.bias");
    char *bytes = test_read(name, &n);
    memcpy(bytes + file->data + file->begin[k] + 8, &huge, 8);
    tt_safetensors_close(file);
    test_write(name, bytes, n);
    free(bytes);
    CHECK(tt_bert_load(ctx, &m, folder, 0) == TT_OK);
    tt_model model = tt_bert_model(&m);
    tt_train_options o = golden_options("32-true", false);
    tt_trainer *r = tt_trainer_new(ctx, &model, &o);
    REQUIRE(r != NULL);
    size_t held = tt_allocated_bytes(ctx);
    CHECK(tt_allocate(r->train) != TT_OK);
    CHECK(strstr(tt_error(ctx), "classifier.bias") != NULL);
    CHECK(tt_allocated_bytes(ctx) <= held);
    tt_trainer_free(r);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* Allocating the parameters fails if the file was cut off, and succeeds with the whole file. */
TEST(checkpoint_cut_off_after_loading)
{
    test_allocator a;
    tt_bert m;
    edit e = unchanged;
    char name[1100], folder[1024];
    size_t n;
    snprintf(folder, sizeof folder, "%s", edited("bert", &e, NULL, NULL));
    snprintf(name, sizeof name, "%s/model.safetensors", folder);
    tt_context *ctx = test_open(&a);
    char *bytes = test_read(name, &n);
    REQUIRE(bytes && tt_bert_load(ctx, &m, folder, 0) == TT_OK);
    tt_model model = tt_bert_model(&m);
    tt_train_options o = golden_options("32-true", false);
    tt_trainer *r = tt_trainer_new(ctx, &model, &o);
    REQUIRE(r != NULL);
    CHECK(truncate(name, (off_t)(n - 1000)) == 0 && tt_allocate(r->train) == TT_ERR_FILE);
    CHECK_ERROR(ctx, TT_ERR_FILE, "model.safetensors', byte ");
    CHECK_ERROR(ctx, TT_ERR_FILE, "the file ends here, but was longer when it was opened: do not change "
                "files that a run reads");
    test_write(name, bytes, n);
    CHECK(tt_allocate(r->train) == TT_OK);
    free(bytes);
    tt_trainer_free(r);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
}

TEST(broken_configs)
{
    static const struct { const char *model, *from, *to; tt_status status; const char *error; } rows[] = {
        {"bert", "\"model_type\": \"bert\"", "\"model_type\": \"electra\"", TT_ERR_UNSUPPORTED,
         "model_type is 'electra'; this loader reads 'bert', 'distilbert', 'roberta', "
         "'big_bird', 'xlm-roberta', 'camembert', 'albert', 'modernbert' (MiniLM is a 'bert'); "
         "tt_lm_load_head makes a classifier of a decoder"},
        {"albert", "\"num_hidden_groups\": 1", "\"num_hidden_groups\": 3", TT_ERR_UNSUPPORTED,
         "num_hidden_groups is 3 and inner_group_num is 1, but only 1 and 1 are supported"},
        {"albert", "\"inner_group_num\": 1", "\"inner_group_num\": 2", TT_ERR_UNSUPPORTED,
         "num_hidden_groups is 1 and inner_group_num is 2"},
        {"albert", "\"embedding_size\": 9", "\"embedding_size\": 0", TT_ERR_ARGUMENT, "embedding_size is 0"},
        {"roberta", "\"pad_token_id\": 1", "\"pad_token_id\": 20", TT_ERR_ARGUMENT,
         "max_positions must be above pad_token + 1, but pad_token is 20 and max_positions is 21"},
        {"big_bird", "\"attention_type\": \"block_sparse\"", "\"attention_type\": \"etc\"",
         TT_ERR_UNSUPPORTED,
         "attention_type is 'etc'; only 'block_sparse' and 'original_full' are supported"},
        {"big_bird", "\"is_decoder\": false", "\"is_decoder\": true", TT_ERR_UNSUPPORTED,
         "is_decoder is true; only encoders are supported"},
        {"big_bird", "\"block_size\": 4", "\"block_size\": 0", TT_ERR_ARGUMENT, "block_size is 0"},
        {"big_bird", "\"num_random_blocks\": 2", "\"num_random_blocks\": 200000", TT_ERR_ARGUMENT,
         "random_blocks is 200000"},
        {"bert", "\"model_type\": \"bert\"", "\"model_typ\": \"bert\"", TT_ERR_FORMAT,
         "has no \"model_type\", which is required"},
        {"bert", "\"model_type\": \"bert\"", "\"model_type\": 3", TT_ERR_FORMAT,
         "\"model_type\" is a number; expected a string"},
        {"bert", "\"model_type\": \"bert\",", "\"model_type\": \"bert\"", TT_ERR_FORMAT,
         "not valid JSON: expected ',' or '}', found '\"'"},
        {"bert", "{", "", TT_ERR_FORMAT, "not valid JSON"},
        {"bert", "\"hidden_size\": 32", "\"hidden_size\": 33", TT_ERR_ARGUMENT,
         "hidden_size is 33, but must be a multiple of heads, 2"},
        {"bert", "\"hidden_size\": 32", "\"hidden_size\": 0", TT_ERR_FORMAT,
         "\"hidden_size\" is 0; expected an integer from 1 to"},
        {"bert", "\"hidden_size\": 32", "\"hidden_size\": \"32\"", TT_ERR_FORMAT,
         "\"hidden_size\" is a string; expected an integer"},
        {"bert", "\"hidden_size\": 32", "\"hidden_size\": 1e9", TT_ERR_FORMAT,
         "\"hidden_size\" is a number; expected an integer"},
        {"bert", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": -2", TT_ERR_FORMAT,
         "\"num_hidden_layers\" is -2; expected"},
        {"bert", "\"hidden_act\": \"gelu\"", "\"hidden_act\": \"mish\"", TT_ERR_ARGUMENT,
         "activation 'mish' is unknown: use gelu, gelu_new, relu or silu"},
        {"bert", "\"hidden_dropout_prob\": 0.0", "\"hidden_dropout_prob\": 1.0", TT_ERR_FORMAT,
         "\"hidden_dropout_prob\" is 1; expected a number that a float holds, of at least 0 and below 1"},
        {"bert", "\"hidden_dropout_prob\": 0.0", "\"hidden_dropout_prob\": 0.99999999999", TT_ERR_FORMAT,
         "\"hidden_dropout_prob\" is 1;"},
        {"bert", "\"attention_probs_dropout_prob\": 0.0", "\"attention_probs_dropout_prob\": -0.1",
         TT_ERR_FORMAT, "\"attention_probs_dropout_prob\" is -0.1; expected"},
        {"bert", "\"initializer_range\": 0.02", "\"initializer_range\": 1e300", TT_ERR_FORMAT,
         "\"initializer_range\" is 1e+300; expected a number that a float holds, of at least 0"},
        {"distilbert", "\"initializer_range\": 0.02", "\"initializer_range\": -1e39", TT_ERR_FORMAT,
         "\"initializer_range\" is -1e+39; expected"},
        {"distilbert", "\"initializer_range\": 0.02", "\"initializer_range\": -0.02", TT_ERR_FORMAT,
         "\"initializer_range\" is -0.02; expected"},
        {"distilbert", "\"initializer_range\": 0.02", "\"initializer_range\": NaN", TT_ERR_FORMAT,
         "not valid JSON: expected a value"},
        {"distilbert", "\"attention_dropout\": 0.0", "\"attention_dropout\": 1e40", TT_ERR_FORMAT,
         "\"attention_dropout\" is 1e+40; expected"},
        {"distilbert", "\"seq_classif_dropout\": 0.0", "\"seq_classif_dropout\": 2", TT_ERR_FORMAT,
         "\"seq_classif_dropout\" is 2; expected"},
        {"bert", "\"layer_norm_eps\": 1e-12", "\"layer_norm_eps\": 1e39", TT_ERR_FORMAT,
         "\"layer_norm_eps\" is 1e+39; expected"},
        {"bert", "\"layer_norm_eps\": 1e-12", "\"layer_norm_eps\": -1", TT_ERR_FORMAT,
         "\"layer_norm_eps\" is -1; expected"},
        {"bert", "\"layer_norm_eps\": 1e-12", "\"layer_norm_eps\": true", TT_ERR_FORMAT,
         "\"layer_norm_eps\" is true; expected a number"},
        {"bert", "\"use_cache\"", "\"position_embedding_type\": \"relative_key\", \"use_cache\"",
         TT_ERR_UNSUPPORTED, "position_embedding_type is 'relative_key'; only 'absolute' is supported"},
        {"bert", "\"use_cache\"", "\"num_labels\": 100001, \"use_cache\"", TT_ERR_FORMAT,
         "\"num_labels\" is 100001; expected an integer from 1 to 100000"},
        {"distilbert", "\"dim\": 36,", "", TT_ERR_FORMAT, "has no \"dim\", which is required"},
        {"distilbert", "\"n_heads\": 3", "\"n_heads\": 5", TT_ERR_ARGUMENT,
         "hidden_size is 36, but must be a multiple of heads, 5"},
        {"distilbert", "\"activation\": \"gelu\"", "\"activation\": \"a long name of no activation\"",
         TT_ERR_ARGUMENT, "' is unknown: use gelu, gelu_new, relu or silu"},};
    for (int k = 0; k < TEST_COUNT(rows); k++)
        refused(edited(rows[k].model, &unchanged, rows[k].from, rows[k].to), rows[k].status, rows[k].error,
                rows[k].status == TT_ERR_ARGUMENT ? " config: " : "config.json'");
    const char *folder = edited("bert", &unchanged, NULL, NULL);
    char path[1100], *text;
    size_t n;
    snprintf(path, sizeof path, "%s/config.json", folder);
    text = test_read(path, &n);
    for (size_t keep = 0; keep < n - 2; keep += 37) { /* cuts config.json off after any number of bytes */
        test_write(path, text, keep);
        refused(folder, TT_ERR_FORMAT, "not valid JSON", "config.json'");
    }
    test_write(path, "[]", 2);
    refused(folder, TT_ERR_FORMAT, "has no \"model_type\"", "config.json'");
    free(text);
    remove(path);
    refused(folder, TT_ERR_FILE, "cannot open '", "config.json': No such file or directory");
    refused("/no such folder", TT_ERR_FILE, "cannot open '/no such folder/config.json'", "No such file");
    char *far_away = (char *)malloc(3000);
    memset(far_away, 'x', 2999);
    far_away[2999] = 0;
    refused(far_away, TT_ERR_ARGUMENT, "the path 'xxxx",
            "and 'config.json' together have more than 1023 bytes: use a shorter path");
    free(far_away);
}

TEST(other_activations_load)
{
    static const char *const names[] = {"gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish"};
    for (int k = 0; k < TEST_COUNT(names); k++) {
        char to[64];
        test_allocator a;
        tt_bert m;
        snprintf(to, sizeof to, "\"hidden_act\": \"%s\"", names[k]);
        tt_context *ctx = test_open(&a);
        CHECK(tt_bert_load(ctx, &m, edited("bert", &unchanged, "\"hidden_act\": \"gelu\"", to), 0) == TT_OK &&
              strcmp(m.config.activation, names[k]) == 0);
        tt_model model = tt_bert_model(&m);
        tt_train_options o = golden_options("32-true", false);
        tt_trainer *r = tt_trainer_new(ctx, &model, &o);
        CHECK(r != NULL);
        tt_trainer_free(r);
        m.config.activation = k ? "sine" : NULL; /* tt_trainer_new refuses this change */
        CHECK(tt_trainer_new(ctx, &model, &o) == NULL);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, k ? "activation 'sine' is unknown: use gelu, gelu_new, relu or silu"
                                            : "activation '(null)' is unknown");
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* ------------------------------------------------------------------------------------------- from scratch */

TEST(new_models)
{
    for (int distil = 0; distil < 2; distil++) {
        test_allocator a;
        tt_bert m, twin;
        tt_bert_config c = tt_bert_config_default(distil ? TT_DISTILBERT : TT_BERT);
        CHECK(c.hidden_size == 768 && c.layers == (distil ? 6 : 12) && c.vocab_size == 30522 &&
              c.classes == 2 && c.pooler == !distil);
        c.vocab_size = 200;
        c.hidden_size = 40;
        c.layers = 2;
        c.heads = 4;
        c.intermediate_size = 60;
        c.max_positions = 30;
        c.classes = 3;
        tt_context *ctx = test_open(&a);
        CHECK(tt_bert_new(ctx, &m, &c) == TT_OK);
        CHECK(ctx->n_params == 32 + (distil ? 8 : 9) && (m.type == NULL) == distil &&
              strcmp(m.class_names[2], "LABEL_2") == 0);
        for (int k = 0; k < ctx->n_params; k++) {
            const tt_param *p = ctx->params[k];
            float *x = test_values(p);
            int64_t n = tt_param_size(p);
            double size = distance(x, NULL, n) / sqrt((double)n);
            bool norm = tt_param_ndim(p) == 1 &&
            (tt__match("*LayerNorm.weight", p->name) || tt__match("*layer_norm.weight", p->name));
            if (tt_param_ndim(p) == 2) CHECK(size > 0.014 && size < 0.026);
            else for (int64_t i = 0; i < n; i++) if (!CHECK(x[i] == (norm ? 1.0f : 0.0f))) break;
            free(x);
        }
        CHECK(tt_bert_new(ctx, &twin, &c) == TT_ERR_ARGUMENT); /* names are unique in a context */
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "embeddings.word_embeddings.weight' exists already");
        CHECK(twin.ctx == NULL && twin.layer == NULL);
        tt_bert_free(&m);
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);

        ctx = test_open(&a);
        c.vocab_size = 0;
        c.hidden_size = 41;
        c.classes = 100070;
        c.dropout = 1.5f;
        c.activation = NULL;
        CHECK(tt_bert_new(ctx, &m, &c) == TT_ERR_ARGUMENT); /* one error lists all mistakes */
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "BERT config: vocab_size is 0, but must be at least 1; classes is "
                    "100070, but at most 100000 are supported; hidden_size is 41, but must be a multiple of "
                    "heads, 4; dropout is 1.5, but must be in [0, 1); activation '(null)' is unknown");
        CHECK(ctx->n_params == 0);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(without_pooler_and_types)
{
    test_allocator a;
    tt_bert m;
    batch_data data;
    float p[8];
    tt_bert_config c = tt_bert_config_default(TT_BERT);
    c.vocab_size = 50;
    c.hidden_size = 16;
    c.layers = 1;
    c.heads = 2;
    c.intermediate_size = 24;
    c.max_positions = 8;
    c.type_vocab_size = 0;
    c.pooler = false;
    tt_context *ctx = test_open(&a);
    CHECK(tt_bert_new(ctx, &m, &c) == TT_OK && !m.type && !m.head_w && ctx->n_params == 16 + 6);
    tt_model model = tt_bert_model(&m);
    tt_train_options o = golden_options("32-true", false);
    tt_trainer *r = tt_trainer_new(ctx, &model, &o);
    REQUIRE(r != NULL);
    tt_batch b;
    memset(&b, 0, sizeof b);
    memset(&data, 0, sizeof data);
    b.seqs = 2;
    b.rows = 5;
    for (int k = 0; k < 5; k++) { data.ids[k] = k + 1; data.positions[k] = k < 3 ? k : k - 3; }
    data.seq_start[1] = 3;
    data.seq_start[2] = 5;
    b.ids = data.ids;
    b.positions = data.positions;
    b.types = data.types;
    b.seq_start = data.seq_start;
    b.labels = data.labels;
    b.last_of_step = true;
    CHECK(tt_train_batch(r, &b, NULL, NULL) == TT_OK && tt_predict(r, &b, p) == TT_OK);
    data.ids[4] = 50; /* 50 is the first id beyond the vocabulary */
    CHECK(tt_train_batch(r, &b, NULL, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "50");
    data.ids[4] = 5;
    data.positions[4] = 8; /* 8 is the first position beyond the table */
    CHECK(tt_predict(r, &b, p) == TT_ERR_ARGUMENT);
    data.positions[4] = 1;
    CHECK(tt_train_batch(r, &b, NULL, NULL) == TT_OK && tt_trainer_steps(r) == 2);
    tt_trainer_free(r);
    tt_bert_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------ allocation failures */

/* Runs everything from loading to a saved model while allocation number fail_at fails. Returns the number of
   allocations. */
static long load_and_train(const char *model_name, long fail_at, const char *folder, bool *ok)
{
    test_allocator a;
    tt_bert m;
    tt_context *ctx = test_open(&a);
    batch_data data;
    float p[32];
    tt_trainer *r = NULL;
    long before = a.calls;
    a.fail_at = fail_at ? before + fail_at : 0;
    tt_status status = tt_bert_load(ctx, &m, TEST_GOLDEN(model_name), 0);
    if (status == TT_OK) {
        tt_model model = tt_bert_model(&m);
        tt_train_options o = golden_options("bf16-mixed", true);
        r = tt_trainer_new(ctx, &model, &o);
        if (!r) status = tt_error_code(ctx);
    }
    if (status == TT_OK) {
        tt_batch b;
        memset(&b, 0, sizeof b);
        memset(&data, 0, sizeof data);
        b.seqs = b.rows = 1;
        data.ids[0] = data.seq_start[1] = 1;
        b.ids = data.ids;
        b.positions = data.positions;
        b.types = data.types;
        b.seq_start = data.seq_start;
        b.labels = data.labels;
        b.last_of_step = true;
        status = tt_train_batch(r, &b, NULL, NULL);
        if (status == TT_OK) status = tt_predict(r, &b, p);
        if (status == TT_OK) status = tt_bert_save(&m, folder);
        if (status != TT_OK) { /* with memory again, training continues */
            CHECK(tt_train_batch(r, &b, NULL, NULL) == TT_OK && tt_bert_save(&m, folder) == TT_OK);
            CHECK(status == TT_ERR_MEMORY);
            tt__fail(ctx, TT_ERR_MEMORY, "out of memory");
        }
    }
    *ok = status == TT_OK;
    if (!*ok) { CHECK(a.failed); CHECK_ERROR(ctx, TT_ERR_MEMORY, "out of memory"); }
    tt_trainer_free(r);
    tt_bert_free(&m);
    long calls = a.calls - before;
    TEST_CLOSE(ctx, &a);
    return calls;
}

TEST(allocation_failures)
{
    char folder[1024];
    snprintf(folder, sizeof folder, "%s", test_folder());
    for (int k = 0; k < TEST_COUNT(models); k++) {
        bool ok;
        long calls = load_and_train(models[k], 0, folder, &ok);
        CHECK(ok && calls > 100);
        for (long n = 1; n <= calls; n++) {
            load_and_train(models[k], n, folder, &ok);
            CHECK(!ok); /* every failed allocation makes a call fail */
        }
    }
}

static const test_case tests[] = {
    TEST_CASE(bert_of_shards), TEST_CASE(golden_roberta), TEST_CASE(golden_big_bird),
    TEST_CASE(golden_big_bird_full), TEST_CASE(golden_xlm_roberta), TEST_CASE(golden_camembert),
    TEST_CASE(golden_albert), TEST_CASE(golden_of_20_steps), TEST_CASE(albert_layers_share_parameters),
    TEST_CASE(big_bird_lists), TEST_CASE(roberta_of_texts),
    TEST_CASE(golden_distilbert), TEST_CASE(golden_bert), TEST_CASE(golden_minilm), TEST_CASE(golden_vit),
    TEST_CASE(golden_vit_of_torchvision), TEST_CASE(golden_portable), TEST_CASE(golden_avx2),
    TEST_CASE(golden_bf16_mixed), TEST_CASE(golden_bf16_true), TEST_CASE(golden_16_mixed),
    TEST_CASE(golden_16_true), TEST_CASE(same_bits_for_any_number_of_threads),
    TEST_CASE(rows_after_the_last_attention), TEST_CASE(rows_of_every_layer),
    TEST_CASE(rows_of_inputs_are_not_rounded), TEST_CASE(recompute_policies), TEST_CASE(freeze_the_body),
    TEST_CASE(name_patterns), TEST_CASE(freeze_all_but_the_last_layer_and_head), TEST_CASE(freeze_the_head),
    TEST_CASE(freeze_embeddings_and_biases), TEST_CASE(freeze_nothing_and_all),
    TEST_CASE(frozen_parameters_take_no_memory), TEST_CASE(save_and_reload),
    TEST_CASE(save_before_anything_is_allocated), TEST_CASE(save_fails_and_the_old_files_stay),
    TEST_CASE(names_without_prefix_and_old_names), TEST_CASE(other_dtypes),
    TEST_CASE(position_ids_and_other_tensors), TEST_CASE(another_number_of_classes),
    TEST_CASE(heads_that_lack_a_tensor), TEST_CASE(models_keep_the_numbers_of_their_classes),
    TEST_CASE(class_names_of_a_config), TEST_CASE(classes_of_one_name),
    TEST_CASE(what_no_config_can_hold_is_not_saved), TEST_CASE(broken_checkpoints),
    TEST_CASE(configs_that_promise_more_than_the_file_holds), TEST_CASE(many_layers),
    TEST_CASE(numbers_that_a_float_cannot_hold), TEST_CASE(checkpoint_cut_off_after_loading),
    TEST_CASE(broken_configs), TEST_CASE(other_activations_load), TEST_CASE(new_models),
    TEST_CASE(without_pooler_and_types), TEST_CASE(allocation_failures),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
