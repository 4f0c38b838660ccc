/* Language models against transformers (tests/golden/lm): logits, loss, gradients, training; loading and saving
   their folders: tests of >>models. TINYTRAIN_TEST_VERBOSE=1 prints the differences that were measured. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

static const char *const names[] = {
    "gpt2", "llama", "llama_biases", "mistral", "qwen2", "neox", "neox_sequential", "falcon", "falcon_groups",
    "falcon_sequential"};

enum { TOKENS = 96, SEQS = 8, VOCAB = 48, STEPS = 5 };
#define LR 1e-3f

typedef struct golden {
    test_allocator a;
    tt_context *ctx;
    tt_safetensors *file; /* golden.safetensors */
    tt_lm m;
    tt_model model;
    tt_trainer *r;
} golden;

static void golden_path(char path[600], const char *name, const char *file)
{
    char folder[64];
    snprintf(folder, sizeof folder, "lm/%s%s%s", name, *file ? "/" : "", file);
    snprintf(path, 600, "%s", TEST_GOLDEN(folder));
}

static bool golden_open(golden *g, const char *name, int threads)
{
    char path[600];
    memset(g, 0, sizeof *g);
    tt_context_options o = test_options(&g->a);
    o.logger.log = test__no_log;
    o.threads = threads;
    g->ctx = tt_open(&o);
    if (!CHECK(g->ctx != NULL)) return false;
    golden_path(path, name, "");
    if (tt_lm_load(g->ctx, &g->m, path) != TT_OK) {
        CHECK_ERROR(g->ctx, TT_OK, name);
        return false;
    }
    golden_path(path, name, "golden.safetensors");
    g->file = tt_safetensors_open(g->ctx, path);
    return CHECK(g->file != NULL);
}

static void golden_close(golden *g)
{
    tt_trainer_free(g->r);
    tt_safetensors_close(g->file);
    tt_lm_free(&g->m);
    TEST_CLOSE(g->ctx, &g->a);
}

/* To be freed. */
static float *reference(const golden *g, const char *prefix, const char *name, int64_t n)
{
    char full[300];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    const int k = tt_safetensors_find(g->file, full);
    float *x = (float *)calloc((size_t)n, sizeof *x);
    if (!CHECK(k >= 0 && (int64_t)tt_safetensors_info(g->file, k)->bytes == 4 * n))
        fprintf(stderr, "golden.safetensors: '%s' is not usable\n", full);
    else CHECK(tt_safetensors_read_f32(g->file, k, 0, n, x) == TT_OK);
    return x;
}

typedef struct batch_data {
    int32_t ids[TOKENS], positions[TOKENS], targets[TOKENS], seq_start[SEQS + 1];
    tt_array targets_array;
} batch_data;

static int golden_ints(const golden *g, int batch, const char *what, int32_t *to, int room)
{
    char name[64];
    snprintf(name, sizeof name, "batch%d.%s", batch, what);
    const int k = tt_safetensors_find(g->file, name);
    const int n = k < 0 ? -1 : (int)(tt_safetensors_info(g->file, k)->bytes / 4);
    if (!CHECK(n > 0 && n <= room)) return 0;
    CHECK(tt_safetensors_read_i32(g->file, k, 0, n, to) == TT_OK);
    return n;
}

static tt_batch golden_batch(const golden *g, int k, batch_data *d)
{
    tt_batch b;
    memset(&b, 0, sizeof b);
    b.last_of_step = true;
    b.rows = golden_ints(g, k, "ids", d->ids, TOKENS);
    b.seqs = golden_ints(g, k, "seq_start", d->seq_start, SEQS + 1) - 1;
    CHECK(golden_ints(g, k, "targets", d->targets, TOKENS) == b.rows);
    for (int s = 0; s < b.seqs; s++)
        for (int32_t r = d->seq_start[s]; r < d->seq_start[s + 1]; r++) d->positions[r] = r - d->seq_start[s];
    b.ids = d->ids;
    b.positions = d->positions;
    b.seq_start = d->seq_start;
    d->targets_array.input = "targets";
    d->targets_array.data = d->targets;
    d->targets_array.rows = b.rows;
    b.arrays = &d->targets_array;
    b.n_arrays = 1;
    return b;
}

static tt_train_options golden_options(const char *precision)
{
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.schedule.lr = LR;
    o.precision = precision;
    o.max_seqs = SEQS;
    o.max_tokens = TOKENS;
    return o;
}

static bool golden_trainer(golden *g, const tt_train_options *o)
{
    g->model = tt_lm_model(&g->m);
    g->r = tt_trainer_new(g->ctx, &g->model, o);
    if (!g->r) CHECK_ERROR(g->ctx, TT_OK, "a trainer");
    return g->r != NULL;
}

static double distance(const float *a, const float *b, int64_t n)
{
    double sum = 0;
    for (int64_t k = 0; k < n; k++) sum += ((double)a[k] - (b ? b[k] : 0)) * ((double)a[k] - (b ? b[k] : 0));
    return sqrt(sum);
}

static double worse(double a, double b) { return b <= a || a != a ? a : b; } /* NaN is the worst */

/* A bias of keys that no position turns does not change a softmax: its gradient is rounding alone, of which
   Adam makes up to lr a step. Biases of keys are the second third of these. */
static void forget_key_biases(const golden *g, const char *name, float *x, const float *as, double most)
{
    const tt_lm_config *c = &g->m.config;
    const int n = c->heads * c->head_size;
    if (!tt__match("*attn.c_attn.bias", name) && !tt__match("gpt_neox.*query_key_value.bias", name)) return;
    for (int k = n; k < 2 * n; k++) {
        if (tt__match("gpt_neox*", name) && k % c->head_size < c->rotary.size) continue;
        CHECK_NEAR(x[k], as[k], most);
        x[k] = as[k];
    }
}

/* Largest differences: of logits; of losses; norms, relative; of each tensor's gradient, L2, relative; of each
   parameter after five steps, L2, relative to its change. */
typedef struct differences { double logits, losses, norms, gradient, step5; } differences;

static void compare_steps(golden *g, differences *d)
{
    batch_data data;
    tt_stats stats;
    static float logits[TOKENS * VOCAB];
    const int params = g->ctx->n_params;
    float **start = (float **)malloc(sizeof *start * (size_t)params);
    for (int k = 0; k < params; k++) start[k] = test_values(g->ctx->params[k]);

    tt_batch b = golden_batch(g, 0, &data);
    const int64_t n = (int64_t)b.rows * g->m.config.vocab_size;
    CHECK(tt_forward(g->r, &b, logits, TEST_COUNT(logits)) == TT_OK);
    float *x = reference(g, "", "logits", n);
    for (int64_t k = 0; k < n; k++) d->logits = worse(d->logits, fabs(logits[k] - x[k]));
    free(x);

    float *losses = reference(g, "", "losses", STEPS), *norms = reference(g, "", "grad_norms", STEPS);
    for (int step = 0; step < STEPS; step++) {
        bool updated = false;
        b = golden_batch(g, step, &data);
        b.last_of_step = !g->r->options.accumulate || step > 0;
        CHECK(tt_train_batch(g->r, &b, &stats, &updated) == TT_OK && updated == b.last_of_step);
        for (int k = 0; k < params && !b.last_of_step; k++) {
            const tt_param *p = g->ctx->params[k];
            const int64_t size = tt_param_size(p);
            float *gradient = (float *)malloc(sizeof(float) * (size_t)size);
            x = reference(g, "grad.", tt_param_name(p), size);
            CHECK(tt_get_gradient(g->r->train, p, gradient) == TT_OK);
            forget_key_biases(g, tt_param_name(p), gradient, x, g->r->options.precision[0] == 'b' ? 1e-3 : 1e-6);
            const double length = distance(x, NULL, size);
            CHECK(length > 0);
            d->gradient = worse(d->gradient, distance(gradient, x, size) / length);
            free(gradient);
            free(x);
        }
        if (!b.last_of_step) CHECK(tt_update(g->r->train, tt_trainer_lr(g->r), &stats) == TT_OK);
        CHECK(stats.step == step + 1);
        d->losses = worse(d->losses, fabs(stats.loss - losses[step]));
        d->norms = worse(d->norms, fabs(stats.grad_norm - norms[step]) / norms[step]);
    }
    free(losses);
    free(norms);
    for (int k = 0; k < params; k++) {
        const tt_param *p = g->ctx->params[k];
        float *now = test_values(p);
        x = reference(g, "step5.", tt_param_name(p), tt_param_size(p));
        forget_key_biases(g, tt_param_name(p), now, x, 5.1 * LR);
        d->step5 = worse(d->step5, distance(now, x, tt_param_size(p)) / distance(start[k], x, tt_param_size(p)));
        free(x);
        free(now);
        free(start[k]);
    }
    free(start);
}

static void compare(const char *name, const char *precision, const char *recompute,
                    const differences *most)
{
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        golden g;
        differences d;
        tt_train_options o = golden_options(precision);
        o.accumulate = accumulate;
        o.recompute = recompute;
        memset(&d, 0, sizeof d);
        if (!golden_open(&g, name, 1) || !golden_trainer(&g, &o)) return;
        int tensors = 0;
        for (int k = 0; k < tt_safetensors_count(g.file); k++)
            tensors += strncmp(tt_safetensors_info(g.file, k)->name, "grad.", 5) == 0;
        CHECK(tensors == g.ctx->n_params); /* so that every one is compared */
        compare_steps(&g, &d);
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  %-18s %-9s %-10s%s logits %.1e, losses %.1e, norms %.1e, gradients %.1e, step 5 %.1e\n",
                   name, tt_isa(g.ctx), precision, accumulate ? " +" : "  ", d.logits, d.losses, d.norms,
                   d.gradient, d.step5);
        CHECK_NEAR(d.logits, 0, most->logits);
        CHECK_NEAR(d.losses, 0, most->losses);
        CHECK_NEAR(d.norms, 0, most->norms);
        CHECK_NEAR(d.gradient, 0, most->gradient);
        CHECK_NEAR(d.step5, 0, most->step5);
        golden_close(&g);
    }
}

static const differences fp32 = {1e-5, 5e-6, 5e-6, 1e-5, 2e-3};

TEST(golden_lm)
{
    for (int k = 0; k < TEST_COUNT(names); k++) compare(names[k], "32-true", "cheap", &fp32);
}

TEST(golden_lm_recomputed)
{
    compare("gpt2", "32-true", "blocks", &fp32);
    compare("llama", "32-true", "blocks", &fp32);
}


/* bf16 has 8 bits: about 2^-9 for each product that is rounded. */
TEST(golden_lm_bf16)
{
    static const differences bf16 = {0.1, 0.01, 0.02, 0.05, 1.5};
    for (int k = 0; k < TEST_COUNT(names); k++) compare(names[k], "bf16-mixed", "cheap", &bf16);
}

/* -------------------------------------------------------------------------------------- folders, in and out */

/* The same tensors, in their bytes, in the files of two folders; returns how many files the second has. */
static int same_tensors(const char *from, const char *to)
{
    test_allocator a;
    tt__shards x = {NULL, 0}, y = {NULL, 0};
    tt_context *ctx = test_open(&a);
    CHECK(tt__shards_open(ctx, from, &x) == TT_OK && tt__shards_open(ctx, to, &y) == TT_OK);
    int count[2] = {0, 0};
    for (int f = 0; f < y.files; f++) count[1] += tt_safetensors_count(y.file[f]);
    for (int f = 0; f < x.files; f++)
        for (int k = 0; k < tt_safetensors_count(x.file[f]); k++, count[0]++) {
            const tt_tensor_info *info = tt_safetensors_info(x.file[f], k);
            int found = -1, at = 0;
            for (int i = 0; i < y.files && found < 0; i++)
                found = tt_safetensors_find(y.file[at = i], info->name);
            if (!CHECK(found >= 0)) continue;
            const tt_tensor_info *other = tt_safetensors_info(y.file[at], found);
            CHECK(other->ndim == info->ndim && other->bytes == info->bytes &&
                  memcmp(other->dims, info->dims, sizeof *info->dims * (size_t)info->ndim) == 0);
            char *p = test_tensor(x.file[f], k), *q = test_tensor(y.file[at], found);
            CHECK(p && q && memcmp(p, q, (size_t)info->bytes) == 0);
            free(p);
            free(q);
        }
    CHECK(count[0] == count[1] && count[0] > 0);
    const int files = y.files;
    tt__shards_close(ctx, &x);
    tt__shards_close(ctx, &y);
    TEST_CLOSE(ctx, &a);
    return files;
}

static void load_and_save(const char *from, const char *to, size_t shard_bytes)
{
    test_allocator a;
    test_log log;
    tt_lm m;
    tt_context *ctx = test_open_logged(&a, &log);
    CHECK(tt_lm_load(ctx, &m, from) == TT_OK);
    CHECK(log.warnings + log.infos == 0);
    m.shard_bytes = shard_bytes;
    CHECK(tt_lm_save(&m, to) == TT_OK);
    tt_lm_free(&m);
    TEST_CLOSE(ctx, &a);
}

static bool has(const char *folder, const char *name)
{
    size_t n;
    char *bytes = test_read(test_path(folder, name), &n);
    free(bytes);
    return bytes != NULL;
}

/* In one file, in many, in one again, into the same folder: tensors keep their bytes, no file of before stays
   that would be read in place of the new ones, and all that config.json said is said again. */
TEST(folders_go_round)
{
    for (int k = 0; k < TEST_COUNT(names); k++) {
        char from[600], once[600], same[600];
        size_t n, again;
        golden_path(from, names[k], "");
        snprintf(once, sizeof once, "%s", test_path(test_folder(), "once"));
        snprintf(same, sizeof same, "%s", test_folder());
        load_and_save(from, once, (size_t)5000000000u);
        CHECK(same_tensors(from, once) == 1);
        load_and_save(once, same, 4000);
        CHECK(same_tensors(from, same) > 2);
        CHECK(!has(same, "model.safetensors") && has(same, "model.safetensors.index.json"));
        load_and_save(same, same, 9000); /* each file is read while the new ones are written */
        CHECK(same_tensors(from, same) > 1);
        load_and_save(same, same, 0);
        CHECK(same_tensors(from, same) == 1 && has(same, "model.safetensors"));
        CHECK(!has(same, "model.safetensors.index.json"));
        char *one = test_read(test_path(once, "model.safetensors"), &n);
        char *two = test_read(test_path(same, "model.safetensors"), &again);
        CHECK(one && two && n == again && memcmp(one, two, n) == 0);
        free(one);
        free(two);
        one = test_read(test_path(once, "config.json"), &n);
        two = test_read(test_path(same, "config.json"), &again);
        CHECK(one && two && n == again && memcmp(one, two, n) == 0);
        CHECK(one && strstr(one, "\"use_cache\": true") && strstr(one, "\"pad_token_id\": null"));
        free(one);
        free(two);
    }
}

/* A trained model, saved in its dtype, is the one that is loaded: the same logits, to the bit. */
TEST(trained_models_are_saved)
{
    static const char *const precisions[] = {"32-true", "bf16-true"};
    for (int k = 0; k < 2 * TEST_COUNT(names); k++) {
        golden g, h;
        batch_data data;
        static float x[TOKENS * VOCAB], y[TOKENS * VOCAB];
        const tt_train_options o = golden_options(precisions[k % 2]);
        if (!golden_open(&g, names[k / 2], 1) || !golden_trainer(&g, &o)) return;
        tt_batch b = golden_batch(&g, 0, &data);
        for (int step = 0; step < 2; step++) CHECK(tt_train_batch(g.r, &b, NULL, NULL) == TT_OK);
        CHECK(tt_forward(g.r, &b, x, TEST_COUNT(x)) == TT_OK);
        char folder[600];
        snprintf(folder, sizeof folder, "%s", test_folder());
        g.m.shard_bytes = 6000;
        CHECK(tt_lm_save(&g.m, folder) == TT_OK);
        if (!golden_open(&h, names[k / 2], 2)) return;
        tt_lm_free(&h.m);
        CHECK(tt_lm_load(h.ctx, &h.m, folder) == TT_ERR_ARGUMENT); /* its names are taken */
        golden_close(&h);
        memset(&h, 0, sizeof h);
        h.ctx = test_open(&h.a);
        CHECK(tt_lm_load(h.ctx, &h.m, folder) == TT_OK && golden_trainer(&h, &o));
        CHECK(tt_forward(h.r, &b, y, TEST_COUNT(y)) == TT_OK);
        CHECK(memcmp(x, y, sizeof *x * (size_t)(b.rows * g.m.config.vocab_size)) == 0);
        golden_close(&h);
        golden_close(&g);
    }
}

static void refused(const char *folder, tt_status status, const char *part, const char *part_too)
{
    test_allocator a;
    tt_lm m;
    tt_context *ctx = test_open(&a);
    memset(&m, 0xA5, sizeof m);
    CHECK(tt_lm_load(ctx, &m, folder) == status);
    CHECK_ERROR(ctx, status, part);
    CHECK_ERROR(ctx, status, part_too);
    CHECK(m.ctx == NULL && m.layer == NULL && ctx->n_params == 0);
    tt_lm_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* The file with the first `from` in it replaced. */
static void replace(const char *path, const char *from, const char *to)
{
    size_t n;
    char *text = test_read(path, &n), *at = text ? strstr(text, from) : NULL;
    if (CHECK(at != NULL)) {
        char *edited = (char *)malloc(n + strlen(to) + 1);
        const size_t before = (size_t)(at - text);
        memcpy(edited, text, before);
        const int added = snprintf(edited + before, n + strlen(to) + 1 - before, "%s%s", to, at + strlen(from));
        test_write(path, edited, before + (size_t)added);
        free(edited);
    }
    free(text);
}

TEST(broken_folders)
{
    char from[600], folder[600], index[700], path[700];
    size_t n;
    golden_path(from, "llama", "");
    snprintf(folder, sizeof folder, "%s", test_folder());
    snprintf(index, sizeof index, "%s/model.safetensors.index.json", folder);
    load_and_save(from, folder, 4000);
    char *good = test_read(index, &n);
    if (!CHECK(good != NULL)) return;
    static const struct { const char *from, *to; tt_status status; const char *error; } edits[] = {
        {"\"weight_map\"", "\"weight_mop\"", TT_ERR_FORMAT, "has no \"weight_map\""},
        {"model-00001-of", "model-00077-of", TT_ERR_FILE, "model-00077-of"},
        {"model-00001-of", "../model-00001-of", TT_ERR_FORMAT, "expected the name of a file in this folder"},
        {"model-00001-of", "/etc/model", TT_ERR_FORMAT, "expected the name of a file in this folder"},
        {"{", "[", TT_ERR_FORMAT, "not valid JSON"},
    };
    for (int k = 0; k < TEST_COUNT(edits); k++) {
        test_write(index, good, n);
        replace(index, edits[k].from, edits[k].to);
        refused(folder, edits[k].status, edits[k].error, strstr(edits[k].error, "model-") ? "cannot open" : "index");
    }
    for (size_t k = 0; k < n; k += n / 5) { /* truncated */
        test_write(index, good, k);
        refused(folder, TT_ERR_FORMAT, "model.safetensors.index.json'", "");
    }
    test_write(index, good, n);

    /* one of the files, which is truncated or another's */
    const char *name = strstr(good, "model-00002-of-");
    if (!CHECK(name != NULL)) return;
    snprintf(path, sizeof path, "%s/%.*s", folder, (int)(strchr(name, '"') - name), name);
    free(good);
    good = test_read(path, &n);
    if (!CHECK(good != NULL)) return;
    for (size_t k = 0; k < n; k += n / 4) {
        test_write(path, good, k);
        refused(folder, TT_ERR_FORMAT, "model-00002-of-", "");
    }
    size_t m;
    char first[700];
    snprintf(first, sizeof first, "%s", path);
    memcpy(strstr(first, "00002"), "00001", 5);
    char *other = test_read(first, &m);
    if (CHECK(other != NULL)) test_write(path, other, m);
    refused(folder, TT_ERR_FORMAT, "tensor '", "");
    free(other);
    test_write(path, good, n);
    load_and_save(folder, folder, 0); /* it was all in order */
    CHECK(same_tensors(from, folder) == 1);
    free(good);

    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    remove(path);
    refused(folder, TT_ERR_FILE, "cannot open '", "model.safetensors");
}

/* What a config asks for and is not there is refused by name; what older versions write is understood. */
TEST(configs)
{
    static const struct { const char *name, *from, *to; tt_status status; const char *error; } rows[] = {
        {"gpt2", "\"gpt2\"", "\"opt\"", TT_ERR_UNSUPPORTED, "model_type is 'opt'; this loader reads gpt2, llama"},
        {"gpt2", "\"scale_attn_weights\": true", "\"scale_attn_weights\": false", TT_ERR_UNSUPPORTED,
         "scale_attn_weights is false; only true is supported"},
        {"gpt2", "\"n_head\": 3", "\"n_head\": 5", TT_ERR_ARGUMENT, "hidden_size 24 is not a multiple of 5 heads"},
        {"gpt2", "\"vocab_size\": 37", "\"vocab_size\": 38", TT_ERR_SHAPE,
         "'transformer.wte.weight' has shape (37, 24), expected (38, 24)"},
        {"gpt2", "\"n_inner\": 28", "\"n_inner\": 29", TT_ERR_SHAPE,
         "'transformer.h.0.mlp.c_fc.weight' has shape (24, 28), expected (24, 29)"},
        {"gpt2", "\"n_inner\": 28", "\"n_inner\": null", TT_ERR_SHAPE, "expected (24, 96)"},
        {"gpt2", "\"n_layer\": 2", "\"n_layer\": 3", TT_ERR_FORMAT, "calls for 3"},
        {"gpt2", "gelu_new", "mish", TT_ERR_ARGUMENT, "activation 'mish' is unknown"},
        {"llama", "\"rope_type\": \"llama3\"", "\"rope_type\": \"dynamic\"", TT_ERR_UNSUPPORTED,
         "rope_type is 'dynamic'; there are default, linear, llama3, yarn"},
        {"llama", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", TT_ERR_ARGUMENT,
         "4 heads are not a multiple of 3 key heads"},
        {"llama", "\"head_dim\": 6", "\"head_dim\": 7", TT_ERR_ARGUMENT, "rotary positions of 7 columns"},
        {"llama", "\"factor\": 4.0", "\"factor\": 0.5", TT_ERR_FORMAT, "\"factor\" is 0.5; expected"},
        {"llama", "\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": \"1e-06\"", TT_ERR_FORMAT, "\"rms_norm_eps\""},
        {"llama", "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": 1", TT_ERR_FORMAT,
         "\"tie_word_embeddings\""},
        {"llama", "\"mlp_bias\": false", "\"mlp_bias\": true", TT_ERR_FORMAT,
         "has no tensor 'model.layers.0.mlp.gate_proj.bias'"},
        {"qwen2", "\"original_max_position_embeddings\"", "\"truncate\": false, \"x\"", TT_ERR_UNSUPPORTED,
         "truncate of qwen2 is not supported"},
        {"neox", "\"use_parallel_residual\": true", "\"use_parallel_residual\": \"yes\"", TT_ERR_FORMAT,
         "\"use_parallel_residual\" is a string"},
        {"falcon_groups", "\"num_kv_heads\": 2", "\"num_kv_heads\": 4", TT_ERR_ARGUMENT, "4 key heads"},
        {"falcon_groups", "\"parallel_attn\": true", "\"parallel_attn\": false", TT_ERR_UNSUPPORTED,
         "parallel_attn is false; only true"},
    };
    static const struct { const char *name, *from, *to; } older[] = { /* the same model in other words */
        {"neox", "\"rope_parameters\": {", "\"rotary_emb_base\": 10000, \"rotary_pct\": 0.25, \"unknown\": {"},
        {"mistral", "\"rope_parameters\": {", "\"rope_theta\": 10000.0, \"unknown\": {"},
        {"falcon", "\"num_hidden_layers\"", "\"n_layer\""}, {"falcon", "\"num_attention_heads\"", "\"n_head\""},
        {"llama", "\"rope_parameters\": {", "\"rope_theta\": 500.0, \"rope_scaling\": {"},
        {"llama", "\"head_dim\": 6", "\"made_by\": [1, {\"x\": 2.5}], \"head_dim\": 6"},
    };
    char from[600], folder[600], config[700];
    for (int k = 0; k < TEST_COUNT(rows) + TEST_COUNT(older); k++) {
        const bool bad = k < TEST_COUNT(rows);
        const int o = bad ? 0 : k - TEST_COUNT(rows);
        golden_path(from, bad ? rows[k].name : older[o].name, "");
        snprintf(folder, sizeof folder, "%s", test_folder());
        snprintf(config, sizeof config, "%s/config.json", folder);
        for (int i = 0; i < 2; i++) {
            size_t n;
            const char *name = i ? "config.json" : "model.safetensors";
            char *bytes = test_read(test_path(from, name), &n);
            if (CHECK(bytes != NULL)) test_write(test_path(folder, name), bytes, n);
            free(bytes);
        }
        replace(config, bad ? rows[k].from : older[o].from, bad ? rows[k].to : older[o].to);
        if (bad) {
            refused(folder, rows[k].status, rows[k].error, "");
            continue;
        }
        tt_lm x, y;
        test_allocator a, b;
        tt_context *one = test_open(&a), *two = test_open(&b);
        CHECK(tt_lm_load(one, &x, from) == TT_OK);
        if (tt_lm_load(two, &y, folder) != TT_OK) CHECK_ERROR(two, TT_OK, older[o].to);
        tt_lm_config p = x.config, q = y.config;
        p.activation = q.activation = NULL; /* which point into x and y */
        CHECK(memcmp(&p, &q, sizeof p) == 0);
        tt_lm_free(&x);
        tt_lm_free(&y);
        TEST_CLOSE(one, &a);
        TEST_CLOSE(two, &b);
    }
}

/* New models: of every kind, as transformers makes them; sizes that cannot be are refused. */
TEST(new_models)
{
    static const char *const kinds[] = {"gpt2", "llama", "mistral", "qwen2", "gpt_neox", "falcon"};
    for (int k = 0; k < TEST_COUNT(kinds); k++) {
        test_allocator a;
        tt_lm m;
        tt_context *ctx = test_open(&a);
        tt_lm_config c = tt_lm_config_default(kinds[k]);
        c.vocab_size = 30;
        c.hidden_size = 32;
        c.layers = 2;
        c.heads = 4;
        if (c.key_heads > 4) c.key_heads = 4;
        c.intermediate_size = 40;
        c.max_positions = 16;
        c.rotary.size = 0;
        CHECK(tt_lm_new(ctx, &m, &c) == TT_OK);
        tt_model model = tt_lm_model(&m);
        tt_train_options o = golden_options("32-true");
        tt_trainer *r = tt_trainer_new(ctx, &model, &o);
        int32_t ids[5] = {1, 2, 3, 4, 5}, positions[5] = {0, 1, 2, 3, 4}, start[2] = {0, 5};
        int32_t targets[5] = {2, 3, 4, 5, -100};
        tt_array array = {"targets", targets, 5};
        tt_batch b;
        tt_stats stats = {0};
        memset(&b, 0, sizeof b);
        b.seqs = 1;
        b.rows = 5;
        b.ids = ids;
        b.positions = positions;
        b.seq_start = start;
        b.arrays = &array;
        b.n_arrays = 1;
        b.last_of_step = true;
        if (CHECK(r != NULL)) CHECK(tt_train_batch(r, &b, &stats, NULL) == TT_OK);
        CHECK_NEAR(stats.loss, log(30), 0.2); /* no token is likelier than another */
        tt_trainer_free(r);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    test_allocator a;
    tt_lm m;
    tt_context *ctx = test_open(&a);
    tt_lm_config c = tt_lm_config_default("bloom");
    CHECK(tt_lm_new(ctx, &m, &c) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "kind 'bloom' is unknown; there are gpt2, llama");
    c = tt_lm_config_default("llama");
    c.key_heads = 5;
    CHECK(tt_lm_new(ctx, &m, &c) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "32 heads are not a multiple of 5 key heads");
    c.key_heads = 4;
    c.layers = 0;
    CHECK(tt_lm_new(ctx, &m, &c) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "layers");
    TEST_CLOSE(ctx, &a);
}

/* Loading, training and saving, with each allocation in turn failing. */
static long load_train_save(const char *name, long fail_at, const char *folder, bool *ok)
{
    golden g;
    batch_data data;
    char path[600];
    memset(&g, 0, sizeof g);
    g.ctx = test_open(&g.a);
    golden_path(path, name, "golden.safetensors");
    g.file = tt_safetensors_open(g.ctx, path);
    tt_batch b = golden_batch(&g, 0, &data);
    golden_path(path, name, "");
    const long before = g.a.calls;
    g.a.fail_at = fail_at ? before + fail_at : 0;
    tt_status status = tt_lm_load(g.ctx, &g.m, path);
    if (status == TT_OK) {
        const tt_train_options o = golden_options("32-true");
        g.m.shard_bytes = 6000;
        g.model = tt_lm_model(&g.m);
        g.r = tt_trainer_new(g.ctx, &g.model, &o);
        status = g.r ? tt_train_batch(g.r, &b, NULL, NULL) : tt_error_code(g.ctx);
        if (status == TT_OK) status = tt_lm_save(&g.m, folder);
    }
    *ok = status == TT_OK;
    if (!*ok) { CHECK(g.a.failed); CHECK_ERROR(g.ctx, TT_ERR_MEMORY, "out of memory"); }
    const long calls = g.a.calls - before;
    golden_close(&g);
    return calls;
}

TEST(allocation_failures)
{
    bool ok;
    char folder[600];
    snprintf(folder, sizeof folder, "%s", test_folder());
    for (int k = 0; k < 2; k++) {
        const char *name = k ? "falcon_groups" : "gpt2";
        const long calls = load_train_save(name, 0, folder, &ok);
        CHECK(ok && calls > 100);
        for (long n = 1; n <= calls; n++) {
            load_train_save(name, n, folder, &ok);
            CHECK(!ok);
        }
    }
}

static const test_case tests[] = {
    TEST_CASE(golden_lm), TEST_CASE(golden_lm_recomputed), TEST_CASE(golden_lm_bf16),
    TEST_CASE(folders_go_round), TEST_CASE(trained_models_are_saved), TEST_CASE(broken_folders),
    TEST_CASE(configs), TEST_CASE(new_models), TEST_CASE(allocation_failures),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
