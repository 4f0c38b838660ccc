/* Tests of src/models/: language models compared with transformers (tests/golden/lm) in logits, loss,
   gradients, training and generation; loading and saving of their folders. TINYTRAIN_TEST_VERBOSE=1 prints
   the measured differences. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

static const char *const names[] = {
    "gpt2", "llama", "llama_biases", "mistral", "qwen2", "neox", "neox_sequential", "falcon", "falcon_groups",
    "falcon_sequential", "falcon_alibi", "falcon_alibi_heads", "neox_odd", "llama_original", "qwen3",
    "qwen3_biases", "gemma3", "gemma3_biases"};

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

static const char *isa; /* instruction set of the contexts of golden_open; NULL: the best */

static bool golden_open(golden *g, const char *name, int threads)
{
    char path[600];
    memset(g, 0, sizeof *g);
    tt_context_options o = test_options(&g->a);
    o.logger.log = test__no_log;
    o.threads = threads;
    o.isa = isa;
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

/* Returns n numbers of the tensor prefix + name in golden.safetensors. The caller frees them. */
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
    if (batch < 0) snprintf(name, sizeof name, "%s", what);
    else snprintf(name, sizeof name, "batch%d.%s", batch, what);
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

/* The ranks that golden_options asks for. NULL and 0 stand for one rank. */
static struct { const char *device; int tensor, pipeline, zero; } ranks;

static tt_train_options golden_options(const char *precision)
{
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.schedule.lr = LR;
    o.compile.precision = precision;
    o.max_seqs = SEQS;
    o.max_tokens = TOKENS;
    if (!ranks.device) return o;
    o.compile.device = ranks.device;
    o.compile.parallel.tensor = ranks.tensor;
    o.compile.parallel.pipeline = ranks.pipeline;
    o.compile.parallel.zero = ranks.zero;
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

/* Makes the comparison ignore the biases of keys, where keys have no rotary positions. These biases do not
   change a softmax, so the biases' gradient is only rounding, from which Adam makes steps of up to lr. The
   biases of keys are the second third of the tensor `name`. */
static void forget_key_biases(const golden *g, const char *name, float *x, const float *as, double max)
{
    const tt_lm_config *c = &g->m.config;
    const int n = c->heads * c->head_size;
    if (!tt__match("*attn.c_attn.bias", name) && !tt__match("*query_key_value.bias", name)) return;
    for (int k = n; k < 2 * n; k++) {
        if (!tt__match("*c_attn*", name) && !c->alibi && k % c->head_size < (c->rotary.size + 1) / 2 * 2)
            continue;
        CHECK_NEAR(x[k], as[k], max);
        x[k] = as[k];
    }
}

/* Largest differences from the reference. `logits` and `losses` are absolute, `norms` is relative.
   `gradient`: L2 difference of a tensor's gradient, relative to the gradient. `step5`: L2 difference of a
   parameter after five steps, relative to the parameter's change. */
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
        b.last_of_step = !g->r->options.compile.accumulate || step > 0;
        CHECK(tt_train_batch(g->r, &b, &stats, &updated) == TT_OK && updated == b.last_of_step);
        for (int k = 0; k < params && !b.last_of_step; k++) {
            const tt_param *p = g->ctx->params[k];
            const int64_t size = tt_param_size(p);
            float *gradient = (float *)malloc(sizeof(float) * (size_t)size);
            x = reference(g, "grad.", tt_param_name(p), size);
            CHECK(tt_get_gradient(g->r->train, p, gradient) == TT_OK);
            const bool bf16 = g->r->options.compile.precision[0] == 'b';
            forget_key_biases(g, tt_param_name(p), gradient, x, bf16 ? 1e-3 : 1e-6);
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
        const int64_t size = tt_param_size(p);
        d->step5 = worse(d->step5, distance(now, x, size) / distance(start[k], x, size));
        free(x);
        free(now);
        free(start[k]);
    }
    free(start);
}

static void compare(const char *name, const char *precision, const char *recompute,
                    const differences *max)
{
    for (int accumulate = 0; accumulate < (ranks.pipeline > 1 ? 1 : 2); accumulate++) {
        golden g;
        differences d;
        tt_train_options o = golden_options(precision);
        o.compile.accumulate = accumulate;
        o.compile.recompute = recompute;
        memset(&d, 0, sizeof d);
        if (!golden_open(&g, name, 1) || !golden_trainer(&g, &o)) return;
        int tensors = 0;
        for (int k = 0; k < tt_safetensors_count(g.file); k++)
            tensors += strncmp(tt_safetensors_info(g.file, k)->name, "grad.", 5) == 0;
        CHECK(tensors == g.ctx->n_params); /* every parameter is compared */
        compare_steps(&g, &d);
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  %-18s %-9s %-10s%s logits %.1e, losses %.1e, norms %.1e, gradients %.1e, step 5 %.1e\n",
                   name, tt_isa(g.ctx), precision, accumulate ? " +" : "  ", d.logits, d.losses, d.norms,
                   d.gradient, d.step5);
        CHECK_NEAR(d.logits, 0, max->logits);
        CHECK_NEAR(d.losses, 0, max->losses);
        CHECK_NEAR(d.norms, 0, max->norms);
        CHECK_NEAR(d.gradient, 0, max->gradient);
        CHECK_NEAR(d.step5, 0, max->step5);
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


/* Two tensor ranks, which divide heads and layers, and two stages give the golden results. No model has code
   of its own for ranks. */
TEST(golden_lm_on_ranks)
{
    for (int k = 0; k < 2 * TEST_COUNT(names); k++) {
        ranks.device = "cpu*2";
        ranks.tensor = k % 2 ? 1 : 2;
        ranks.pipeline = k % 2 ? 2 : 1;
        ranks.zero = 1;
        compare(names[k / 2], "32-true", "cheap", &fp32);
    }
    ranks.device = NULL;
}

/* Gemma's factor of the embeddings has the dtype of the weights, as in transformers. Two tensor ranks each
   normalise half of the heads. */
TEST(factors_and_norms_of_gemma)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true"};
    for (int k = 0; k < 4; k++) {
        golden g;
        int scales = 0, norms = 0;
        if (k == 3) ranks.device = "cpu*2", ranks.tensor = 2, ranks.pipeline = 1;
        const tt_train_options o = golden_options(precisions[k % 3]);
        ranks.device = NULL;
        if (!golden_open(&g, "gemma3", 1) || !golden_trainer(&g, &o)) return;
        const tt_tape *t = g.r->train->built.t;
        for (int i = 0; i < t->n_code; i++) {
            const tt__instr *c = &t->code[i];
            if (c->attr.as_weights && !c->backward) { /* sqrt(24) is 4.898979, and 4.90625 in bf16 */
                CHECK_NEAR(c->attr.scale, k == 2 ? 4.90625 : 4.8989795, 1e-6);
                scales++;
            }
            if (c->op == TT__OP_RMSNORM && c->attr.heads && !c->recomputed) norms += c->attr.heads;
        }
        /* A layer normalises 4 heads of queries and 2 of keys; with two tensor ranks a rank has half. */
        CHECK(scales == 1 && norms == (k == 3 ? 3 : 6) * g.m.config.layers);
        golden_close(&g);
    }
}

/* bf16 keeps 8 bits of the mantissa, so each rounded product has an error of up to 2^-9. */
TEST(golden_lm_bf16)
{
    /* Norms of queries and keys amplify rounding: in PyTorch's autocast, gradients of qwen3 differ by 0.099
       from those in float64, and gradients of llama by 0.028. */
    static const differences bf16 = {0.1, 0.01, 0.02, 0.05, 1.5}, normed = {0.1, 0.01, 0.02, 0.1, 1.5};
    for (int k = 0; k < TEST_COUNT(names); k++) {
        const bool norms = strncmp(names[k], "qwen3", 5) == 0 || strncmp(names[k], "gemma3", 6) == 0;
        compare(names[k], "bf16-mixed", "cheap", norms ? &normed : &bf16);
    }
}

/* ------------------------------------------------------------------------------------ folders, in and out */

/* Checks that the files of two folders hold equal tensors, byte for byte. Returns the number of files of the
   second folder. */
static int same_tensors(const char *from, const char *to)
{
    test_allocator a;
    tt__checkpoint x, y;
    tt_context *ctx = test_open(&a);
    memset(&x, 0, sizeof x);
    memset(&y, 0, sizeof y);
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
    tt__checkpoint_close(ctx, &x);
    tt__checkpoint_close(ctx, &y);
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

static void refused(const char *folder, tt_status status, const char *part, const char *part_too)
{
    test_allocator a;
    tt_lm m;
    tt_context *ctx = test_open(&a);
    memset(&m, 0xA5, sizeof m);
    if (!CHECK(tt_lm_load(ctx, &m, folder) == status)) fprintf(stderr, "expected: %s\n", part);
    CHECK_ERROR(ctx, status, part);
    CHECK_ERROR(ctx, status, part_too);
    CHECK(m.ctx == NULL && m.layer == NULL && ctx->n_params == 0);
    tt_lm_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* Replaces the first `from` in the file by `to`. */
static void replace(const char *path, const char *from, const char *to)
{
    size_t n;
    char *text = test_read(path, &n), *at = text ? strstr(text, from) : NULL;
    if (CHECK(at != NULL)) {
        char *edited = (char *)malloc(n + strlen(to) + 1);
        const size_t before = (size_t)(at - text);
        memcpy(edited, text, before);
        const size_t room = n + strlen(to) + 1 - before;
        const int added = snprintf(edited + before, room, "%s%s", to, at + strlen(from));
        test_write(path, edited, before + (size_t)added);
        free(edited);
    }
    free(text);
}

/* Saves a model in one file, in many files, in one file again, and into its own folder. Tensors keep their
   bytes, config.json keeps its members, and no old file remains that would be read instead of a new file. */
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
        load_and_save(same, same, 9000); /* each file is read while the new files are written */
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

/* The tokens that end an answer come from generation_config.json, or else from config.json. A save keeps
   generation_config.json unchanged. */
TEST(what_ends_an_answer)
{
    char from[600], folder[600], again[600], config[700], generation[700];
    golden_path(from, "llama", "");
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "one"));
    snprintf(again, sizeof again, "%s", test_path(test_folder(), "two"));
    load_and_save(from, folder, 0);
    CHECK(!has(folder, "generation_config.json"));
    snprintf(config, sizeof config, "%s/config.json", folder);
    snprintf(generation, sizeof generation, "%s/generation_config.json", folder);
    replace(config, "\"eos_token_id\": null", "\"eos_token_id\": [3, 5]");
    static const struct { const char *text; int n; int32_t id[3]; const char *error; } rows[] = {
        {NULL, 2, {3, 5}, NULL}, {"{}", 0, {0}, NULL}, {"{\"eos_token_id\": null}", 0, {0}, NULL},
        {"{\"top_k\": 7,\n \"eos_token_id\": 2}\n", 1, {2}, NULL},
        {"{\"eos_token_id\": [1, -1, 4, 99999, 2]}", 3, {1, 4, 2}, NULL},
        {"{\"eos_token_id\": []}", 0, {0}, NULL},
        {"{\"eos_token_id\": \"2\"}", 0, {0}, "\"eos_token_id\" must be an id, a list of ids"},
        {"{\"eos_token_id\": [[2]]}", 0, {0}, "\"eos_token_id\" must be an id, a list of ids"},
        {"{\"eos_token_id\": 1.5}", 0, {0}, "\"eos_token_id\" must be an id, a list of ids"},
        {"[]", 0, {0}, "is an array; expected a JSON object"}, {"{", 0, {0}, "not valid JSON"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a;
        tt_lm m;
        size_t n, length = rows[k].text ? strlen(rows[k].text) : 0;
        if (rows[k].text) test_write(generation, rows[k].text, length);
        if (rows[k].error) {
            refused(folder, TT_ERR_FORMAT, rows[k].error, "generation_config.json'");
            continue;
        }
        tt_context *ctx = test_open(&a);
        CHECK(tt_lm_load(ctx, &m, folder) == TT_OK && m.n_stop == rows[k].n);
        for (int i = 0; i < m.n_stop; i++) CHECK(m.stop[i] == rows[k].id[i]);
        CHECK(tt_lm_save(&m, again) == TT_OK && has(again, "generation_config.json") == !!rows[k].text);
        char *saved = test_read(test_path(again, "generation_config.json"), &n);
        CHECK(!rows[k].text || (saved && n == length && memcmp(saved, rows[k].text, n) == 0));
        free(saved);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    remove(generation);
    replace(config, "\"eos_token_id\": [3, 5]", "\"eos_token_id\": {}");
    refused(folder, TT_ERR_FORMAT, "\"eos_token_id\" must be an id, a list of ids", "config.json'");
}

/* A trained model that is saved in its dtype and loaded again has the same logits, bit for bit. */
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
        CHECK(tt_lm_load(h.ctx, &h.m, folder) == TT_ERR_ARGUMENT); /* parameters of these names exist */
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

static int files_like(const char *folder, const char *pattern)
{
    int n = 0;
    DIR *d = opendir(folder);
    for (struct dirent *e = d ? readdir(d) : NULL; e; e = readdir(d)) n += tt__match(pattern, e->d_name);
    if (d) closedir(d);
    return n;
}

/* A save with fewer files removes the files of an older save. If a save with equally many files was cut off,
   so that files of the older model remain, loading fails. */
TEST(saves_over_older_ones)
{
    char from[600], folder[600], other[600], name[64];
    size_t n;
    test_allocator a;
    tt_lm m;
    golden_path(from, "llama", "");
    snprintf(folder, sizeof folder, "%s", test_folder());
    snprintf(other, sizeof other, "%s", test_folder());
    load_and_save(from, folder, 4000);
    const int many = files_like(folder, "model-*.safetensors");
    load_and_save(from, folder, 8000);
    const int few = files_like(folder, "model-*.safetensors");
    CHECK(few >= 2 && few < many && same_tensors(from, folder) == few);
    tt_context *ctx = test_open(&a);
    CHECK(tt_lm_load(ctx, &m, from) == TT_OK);
    tt_param *p = tt_param_find(ctx, "model.norm.weight");
    float *values = test_values(p);
    values[0] += 1;
    CHECK(tt_param_set(p, values) == TT_OK);
    free(values);
    m.shard_bytes = 8000;
    CHECK(tt_lm_save(&m, other) == TT_OK && files_like(other, "model-*.safetensors") == few);
    tt_lm_free(&m);
    TEST_CLOSE(ctx, &a);
    for (int k = 1; k <= few; k++) { /* k: number of new files that were in place when the save was cut off */
        snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", k, few);
        char *bytes = test_read(test_path(other, name), &n);
        if (CHECK(bytes != NULL)) test_write(test_path(folder, name), bytes, n);
        free(bytes);
        ctx = test_open(&a);
        CHECK(tt_lm_load(ctx, &m, folder) == (k < few ? TT_ERR_FORMAT : TT_OK));
        if (k < few)
            CHECK_ERROR(ctx, TT_ERR_FORMAT,
                        "belong to different models, probably because a save over an older");
        else tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    load_and_save(from, folder, 0);
    CHECK(files_like(folder, "model*") == 1 && same_tensors(from, folder) == 1);
}

TEST(models_are_not_saved_beside_an_adapter)
{
    char from[600];
    test_allocator a;
    tt_lm m;
    tt_context *ctx = test_open(&a);
    char *folder = test_folder();
    golden_path(from, "llama", "");
    CHECK(tt_lm_load(ctx, &m, from) == TT_OK && tt_lm_lora(&m, NULL) == TT_OK);
    CHECK(tt_lm_lora_save(&m, folder) == TT_OK && tt_lm_lora_merge(&m) == TT_OK);
    CHECK(tt_lm_save(&m, folder) == TT_ERR_ARGUMENT && files_like(folder, "model*") == 0);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "holds an adapter (adapter_config.json), which transformers would add");
    CHECK(files_like(folder, "config.json") == 0);
    tt_lm_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* config.json holds rope_parameters for transformers 5. For older versions config.json also holds rope_theta
   (the base), rotary_pct (the share of rotated columns) and rope_scaling. */
TEST(rotary_bases_are_saved_in_both_spellings)
{
    static const struct { const char *name, *members[3]; } rows[] = {
        {"mistral", {"\n  \"rope_theta\": 10000", "\n  \"rope_parameters\": {", NULL}},
        {"llama", {"\n  \"rope_theta\": ", "\n  \"rope_scaling\": {\"rope_type\": \"llama3\"",
                   "\n  \"rope_parameters\": {"}},
        {"neox", {"\n  \"rotary_emb_base\": ", "\n  \"rotary_pct\": ", "\n  \"rope_parameters\": {"}}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        char from[600], folder[600];
        size_t n;
        golden_path(from, rows[k].name, "");
        snprintf(folder, sizeof folder, "%s", test_folder());
        load_and_save(from, folder, 0);
        char *text = test_read(test_path(folder, "config.json"), &n);
        for (int i = 0; i < 3 && text && rows[k].members[i]; i++) {
            const char *at = strstr(text, rows[k].members[i]);
            if (!CHECK(at && !strstr(at + 1, rows[k].members[i])))
                fprintf(stderr, "%s: %s\n", rows[k].name, text);
        }
        free(text);
    }
}

TEST(weights_of_pytorch_are_named)
{
    char from[600];
    size_t n;
    test_allocator a;
    tt_lm m;
    tt_context *ctx = test_open(&a);
    char *folder = test_folder();
    golden_path(from, "llama", "");
    char *text = test_read(test_path(from, "config.json"), &n);
    if (CHECK(text != NULL)) test_write(test_path(folder, "config.json"), text, n);
    free(text);
    CHECK(tt_lm_load(ctx, &m, folder) == TT_ERR_FILE);
    CHECK_ERROR(ctx, TT_ERR_FILE, "cannot open '");
    test_write(test_path(folder, "pytorch_model.bin"), "PK", 2);
    CHECK(tt_lm_load(ctx, &m, folder) == TT_ERR_FILE);
    CHECK_ERROR(ctx, TT_ERR_FILE, "has pytorch_model.bin and no model.safetensors; this Python line");
    TEST_CLOSE(ctx, &a);
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
        const bool missing = edits[k].status == TT_ERR_FILE;
        refused(folder, edits[k].status, edits[k].error, missing ? "cannot open" : "index");
    }
    for (size_t k = 0; k < n; k += n / 5) { /* truncated */
        test_write(index, good, k);
        refused(folder, TT_ERR_FORMAT, "model.safetensors.index.json'", "");
    }
    test_write(index, good, n);

    /* One file is truncated, or belongs to another model. */
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
    load_and_save(folder, folder, 0); /* the original files are valid */
    CHECK(same_tensors(from, folder) == 1);
    free(good);

    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    remove(path);
    refused(folder, TT_ERR_FILE, "cannot open '", "model.safetensors");
}

/* A value of a config that is not supported is refused by name. Configs of older versions can be read. */
TEST(configs)
{
    static const struct { const char *name, *from, *to; tt_status status; const char *error; } rows[] = {
        {"gpt2", "\"gpt2\"", "\"opt\"", TT_ERR_UNSUPPORTED,
         "model_type is 'opt'; this loader reads gpt2, llama"},
        {"gpt2", "\"scale_attn_weights\": true", "\"scale_attn_weights\": false", TT_ERR_UNSUPPORTED,
         "scale_attn_weights is false; only true is supported"},
        {"gpt2", "\"n_head\": 3", "\"n_head\": 5", TT_ERR_ARGUMENT,
         "hidden_size is 24, but must be a multiple of heads, 5"},
        {"gpt2", "\"vocab_size\": 37", "\"vocab_size\": 38", TT_ERR_SHAPE,
         "'transformer.wte.weight' has shape (37, 24), expected (38, 24)"},
        {"gpt2", "\"n_inner\": 28", "\"n_inner\": 29", TT_ERR_SHAPE,
         "'transformer.h.0.mlp.c_fc.weight' has shape (24, 28), expected (24, 29)"},
        {"gpt2", "\"n_inner\": 28", "\"n_inner\": null", TT_ERR_SHAPE, "expected (24, 96)"},
        {"gpt2", "\"n_layer\": 2", "\"n_layer\": 3", TT_ERR_FORMAT, "config.json says 3"},
        {"gpt2", "gelu_new", "mish", TT_ERR_ARGUMENT, "activation 'mish' is unknown"},
        {"llama", "\"rope_type\": \"llama3\"", "\"rope_type\": \"dynamic\"", TT_ERR_UNSUPPORTED,
         "rope_type is 'dynamic'; only default, linear, llama3 and yarn are supported"},
        {"llama", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", TT_ERR_ARGUMENT,
         "heads is 4, but must be a multiple of key_heads, 3"},
        {"llama", "\"head_dim\": 6", "\"head_dim\": 7", TT_ERR_ARGUMENT, "rotary.size is 7, but"},
        {"llama", "\"rope_type\"", "\"partial_rotary_factor\": 0.5, \"rope_type\"", TT_ERR_UNSUPPORTED,
         "rotary positions would turn a share of 0.5 of the 6 columns of a head; only gpt_neox may have a "
         "share other than 1"},
        {"qwen2", "\"rope_parameters\"", "\"partial_rotary_factor\": 0.5, \"rope_parameters\"",
         TT_ERR_UNSUPPORTED, "rotary positions would turn a share of 0.5 of the 4 columns of a head"},
        {"neox", "\"partial_rotary_factor\": 0.25", "\"partial_rotary_factor\": 0.1", TT_ERR_UNSUPPORTED,
         "rotary positions would turn a share of 0.1 of the 8 columns of a head; at least one column must "
         "turn"},
        {"neox_odd", "\"rope_type\": \"default\"", "\"rope_type\": \"yarn\", \"factor\": 2", TT_ERR_ARGUMENT,
         "rotary.size is 5, but must be even with yarn"},
        {"llama_original", "\"original_max_position_embeddings\": 8",
         "\"original_max_position_embeddings\": \"8\"", TT_ERR_FORMAT,
         "\"original_max_position_embeddings\" is a string"},
        {"llama", "\"factor\": 4.0", "\"factor\": 0.5", TT_ERR_FORMAT, "\"factor\" is 0.5; expected"},
        {"llama", "\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": \"1e-06\"", TT_ERR_FORMAT,
         "\"rms_norm_eps\""},
        {"llama", "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true", TT_ERR_UNSUPPORTED,
         "'lm_head.weight' differs from 'model.embed_tokens.weight', although config.json ties them"},
        {"llama", "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": 1", TT_ERR_FORMAT,
         "\"tie_word_embeddings\""},
        {"llama", "\"mlp_bias\": false", "\"mlp_bias\": true", TT_ERR_FORMAT,
         "has no tensor 'model.layers.0.mlp.gate_proj.bias'"},
        {"qwen2", "\"original_max_position_embeddings\"", "\"truncate\": false, \"x\"", TT_ERR_UNSUPPORTED,
         "which is not supported for qwen2: use another model"},
        {"qwen2", "\"full_attention\",\n    \"sliding_attention\"",
         "\"sliding_attention\", \"full_attention\"", TT_ERR_UNSUPPORTED,
         "layer_types: layer 1 has full attention after a layer with sliding attention"},
        {"qwen2", "\"sliding_attention\"", "\"chunked_attention\"", TT_ERR_FORMAT,
         "\"layer_types\" is chunked_attention; expected full_attention or sliding_attention"},
        {"qwen2", "\"sliding_window\": 5", "\"sliding_window\": -5", TT_ERR_FORMAT,
         "\"sliding_window\" is -5"},
        {"neox", "\"use_parallel_residual\": true", "\"use_parallel_residual\": \"yes\"", TT_ERR_FORMAT,
         "\"use_parallel_residual\" is a string"},
        {"falcon_groups", "\"num_kv_heads\": 2", "\"num_kv_heads\": 4", TT_ERR_ARGUMENT, "key_heads, 4"},
        {"falcon_groups", "\"parallel_attn\": true", "\"parallel_attn\": false", TT_ERR_UNSUPPORTED,
         "parallel_attn is false; only true"},
        {"qwen3", "\"head_dim\": 6", "\"head_dim\": 8", TT_ERR_SHAPE,
         "'model.layers.0.self_attn.q_proj.weight' has shape (24, 20), expected (32, 20)"},
        {"qwen3", "\"head_dim\": 6", "\"x\": 6", TT_ERR_SHAPE, "expected (512, 20)"},
        {"gemma3", "\"full_attention\",\n    \"sliding",
         "\"full_attention\",\n    \"full_attention\", \"sliding", TT_ERR_UNSUPPORTED,
         "layer_types: layer 2 breaks the pattern of the layers before, in which every 2nd"},
        {"gemma3", "\"sliding_attention\",\n", "\"chunked_attention\",", TT_ERR_FORMAT,
         "\"layer_types\" is chunked_attention; expected full_attention or sliding_attention"},
        {"gemma3", "\"attn_logit_softcapping\": null", "\"attn_logit_softcapping\": 50.0",
         TT_ERR_UNSUPPORTED, "attn_logit_softcapping is set; only null is supported"},
        {"gemma3", "\"final_logit_softcapping\": null", "\"final_logit_softcapping\": 30.0",
         TT_ERR_UNSUPPORTED, "final_logit_softcapping is set; only null is supported"},
        {"gemma3", "\"use_bidirectional_attention\": false", "\"use_bidirectional_attention\": true",
         TT_ERR_UNSUPPORTED, "use_bidirectional_attention is true; only false is supported"},
        {"gemma3", "\"rope_type\": \"default\"", "\"rope_type\": \"linear\"", TT_ERR_UNSUPPORTED,
         "rope_type of sliding_attention is 'linear'; only default is supported"},
        {"gemma3", "\"sliding_attention\": {", "\"sliding_attention\": 3, \"x\": {", TT_ERR_FORMAT,
         "\"sliding_attention\" is"},
        {"gemma3", "\"full_attention\": {", "\"full_attention\": [], \"x\": {", TT_ERR_FORMAT,
         "\"full_attention\" is"},
        {"gemma3", "\"gemma3_text\"", "\"gemma3\"", TT_ERR_UNSUPPORTED,
         "model_type is 'gemma3'; this loader"},
    };
    static const struct { const char *name, *from, *to; } older[] = { /* older configs of these models */
        {"neox", "\"rope_parameters\": {",
         "\"rotary_emb_base\": 10000, \"rotary_pct\": 0.25, \"unknown\": {"},
        {"mistral", "\"rope_parameters\": {", "\"rope_theta\": 10000.0, \"unknown\": {"},
        {"falcon", "\"num_hidden_layers\"", "\"n_layer\""},
        {"falcon", "\"num_attention_heads\"", "\"n_head\""},
        {"llama", "\"rope_parameters\": {", "\"rope_theta\": 500.0, \"rope_scaling\": {"},
        {"qwen2", "\"layer_types\"", "\"layer_kinds\""},
        /* no effect: layer_types says which layers have a window */
        {"qwen2", "\"max_window_layers\": 1", "\"max_window_layers\": 28"},
        /* Shares of rotated columns, in members that transformers ignores for the model. */
        {"mistral", "\"rope_parameters\": {",
         "\"partial_rotary_factor\": 0.5, \"rope_parameters\": {\"partial_rotary_factor\": 0.5, "},
        {"falcon", "\"rope_parameters\": {",
         "\"rotary_pct\": 0.5, \"rope_parameters\": {\"partial_rotary_factor\": 0.5, "},
        {"falcon_alibi", "\"rope_parameters\": {",
         "\"rope_parameters\": {\"type\": \"linear\", \"partial_rotary_factor\": 0.5, "},
        {"neox", "\"rope_parameters\": {",
         "\"rope_theta\": 7, \"rotary_pct\": 0.5, \"partial_rotary_factor\": 1, \"rope_parameters\": {"},
        {"neox", "\"rope_parameters\": {",
         "\"rope_parameters\": {\"rope_theta\": 7}, \"rope_scaling\": {"},
        {"llama", "\"rope_parameters\": {", "\"rope_scaling\": {}, \"rope_parameters\": {"},
        {"llama", "\"head_dim\": 6", "\"made_by\": [1, {\"x\": 2.5}], \"head_dim\": 6"},
        {"llama", "\"head_dim\": 6", "\"original_max_position_embeddings\": 16, \"head_dim\": 6"},
        {"llama", "\"head_dim\": 6", "\"original_max_position_embeddings\": null, \"head_dim\": 6"},
        {"llama_biases", "\"head_dim\"", "\"original_max_position_embeddings\": 7, \"head_dim\""},
        {"llama_original", "\"original_max_position_embeddings\": 32", "\"original\": 32"},
        {"gemma3", "\"layer_types\"", "\"layer_kinds\""},
        /* no effect: layer_types decides */
        {"gemma3", "\"sliding_window_pattern\": 2", "\"sliding_window_pattern\": 5"},
        {"gemma3", "\"rope_parameters\": {",
         "\"rope_theta\": 500, \"rope_local_base_freq\": 20.0, "
         "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 4}, \"unknown\": {"},
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
        CHECK(memcmp(&x.config, &y.config, sizeof x.config) == 0);
        tt_lm_free(&x);
        tt_lm_free(&y);
        TEST_CLOSE(one, &a);
        TEST_CLOSE(two, &b);
    }
}

/* Copies a golden model into a new folder. Writes the paths of the folder and of its config.json. */
static void copy_golden(const char *name, char folder[600], char config[700])
{
    char from[600];
    size_t n;
    golden_path(from, name, "");
    snprintf(folder, 600, "%s", test_folder());
    snprintf(config, 700, "%s/config.json", folder);
    load_and_save(from, folder, 0);
    char *text = test_read(test_path(from, "config.json"), &n);
    if (CHECK(text != NULL)) test_write(config, text, n);
    free(text);
}

/* A saved config keeps its members for windows and positions as long as the model keeps their values.
   Otherwise the members change so that they load as the model's values. */
TEST(shapes_are_kept)
{
    static const char *const said[] = {
        "\"use_sliding_window\": false", "\"sliding_window\": 32768", "\"max_window_layers\": 28",
        "\"layer_types\": [\"full_attention\", \"full_attention\"]", "\"rope_theta\": 1000000.0",
        "\"original_max_position_embeddings\": 8"};
    char folder[600], config[700];
    copy_golden("qwen2", folder, config);
    replace(config, "\"sliding_attention\"", "\"full_attention\"");
    replace(config, "\"sliding_window\": 5", "\"sliding_window\": 32768");
    replace(config, "\"max_window_layers\": 1", "\"max_window_layers\": 28");
    replace(config, "\"use_sliding_window\": true", "\"use_sliding_window\": false");
    replace(config, "\"rope_theta\": 100.0", "\"rope_theta\": 1000000.0");
    for (int k = 0; k < 3; k++) { /* k 0: no window, which stays; 1: sets a window; 2: removes the window */
        test_allocator a;
        tt_lm m, again;
        tt_context *ctx = test_open(&a), *other;
        CHECK(tt_lm_load(ctx, &m, folder) == TT_OK && m.config.window == (k == 2 ? 6 : 0));
        m.config.window = k == 1 ? 6 : 0;
        m.config.window_from = k == 1;
        CHECK(tt_lm_save(&m, folder) == TT_OK);
        size_t n;
        char *text = test_read(config, &n);
        for (int i = 0; i < TEST_COUNT(said) && text; i++)
            if (!CHECK((k == 0 || i > 4) == (strstr(text, said[i]) != NULL) || (k && (i == 0 || i == 4))))
                fprintf(stderr, "%d: %s in %s\n", k, said[i], text);
        free(text);
        test_allocator b;
        other = test_open(&b);
        CHECK(tt_lm_load(other, &again, folder) == TT_OK);
        CHECK(again.config.window == m.config.window && again.config.window_from == m.config.window_from);
        const tt_rotary_options *p = &again.config.rotary, *q = &m.config.rotary;
        CHECK(p->size == q->size && p->base == q->base && p->scaling == q->scaling &&
              p->factor == q->factor && p->original == q->original);
        tt_lm_free(&again);
        TEST_CLOSE(other, &b);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    /* The share of columns in the saved text gives the original number of columns. */
    for (int head = 2; head <= 300; head++)
        for (int size = 1; size <= head; size++) {
            tt_lm_config c = tt_lm_config_default("gpt_neox");
            char share[32];
            c.head_size = head;
            c.rotary.size = size;
            if (!CHECK((int)(head * strtod(tt__lm_share(&c, share), NULL)) == size)) return;
        }
}

/* Pattern and bases of Gemma load again as they were saved, whether the model was new, loaded or changed. */
TEST(patterns_are_kept)
{
    char folder[600], config[700];
    copy_golden("gemma3", folder, config);
    /* k 0: the loaded model; 1: another pattern; 2: no layer without window; 3: other bases; 4: new model */
    for (int k = 0; k < 5; k++) {
        test_allocator a, b;
        tt_lm m, again;
        tt_context *ctx = test_open(&a), *other = test_open(&b);
        if (k < 4) {
            CHECK(tt_lm_load(ctx, &m, folder) == TT_OK);
            CHECK(m.config.full_every == (k < 2 ? 2 : k == 2 ? 3 : 0) && m.config.query_scalar == 9);
        } else {
            tt_lm_config c = tt_lm_config_sized("gemma3_text", 4, 24, 2);
            c.vocab_size = 30;
            c.max_positions = 16;
            c.window = 7;
            CHECK(tt_lm_new(ctx, &m, &c) == TT_OK && m.config.query_scalar == 12);
        }
        if (k == 1 || k == 2) m.config.full_every = k == 1 ? 3 : 0;
        if (k == 3) m.config.window_base = 30, m.config.rotary.base = 700;
        CHECK(tt_lm_save(&m, folder) == TT_OK);
        CHECK(tt_lm_load(other, &again, folder) == TT_OK);
        const tt_lm_config *p = &m.config, *q = &again.config;
        CHECK(p->full_every == q->full_every && p->window == q->window && p->query_scalar == q->query_scalar);
        CHECK(!(p->window_base < q->window_base || p->window_base > q->window_base));
        CHECK(!(p->rotary.base < q->rotary.base || p->rotary.base > q->rotary.base));
        CHECK(p->rotary.scaling == q->rotary.scaling && p->head_size == q->head_size);
        tt_lm_free(&m);
        tt_lm_free(&again);
        TEST_CLOSE(ctx, &a);
        TEST_CLOSE(other, &b);
    }
    test_allocator a;
    tt_lm m;
    tt_context *ctx = test_open(&a);
    tt_lm_config c = tt_lm_config_sized("llama", 2, 24, 2);
    c.full_every = 2;
    c.window_base = -1;
    CHECK(tt_lm_new(ctx, &m, &c) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "full_every is 2, but must be 0 in a model of kind llama");
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "window_base is -1, but must be a finite number of at least 0");
    TEST_CLOSE(ctx, &a);
}

/* If rope_parameters have changed, the saved config.json lacks original_max_position_embeddings, which
   transformers would prefer. A saved config.json lacks a quantization_config that is not bitsandbytes'. */
TEST(members_that_are_not_saved_again)
{
    for (int k = 0; k < 3; k++) {
        char folder[600], config[700];
        test_allocator a;
        test_log log;
        tt_lm m;
        copy_golden("llama_original", folder, config);
        if (k == 2)
            replace(config, "\"head_dim\"",
                    "\"quantization_config\": {\"quant_method\": \"gptq\"}, \"head_dim\"");
        tt_context *ctx = test_open_logged(&a, &log);
        CHECK(tt_lm_load(ctx, &m, folder) == TT_OK && m.config.rotary.original == 8);
        CHECK(log.warnings == (k == 2) && (k < 2 || strstr(log.text, "\"quantization_config\" is ignored")));
        if (k == 1) m.config.rotary.original = 24;
        CHECK(tt_lm_save(&m, folder) == TT_OK);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
        size_t n;
        char *text = test_read(config, &n);
        CHECK(text && (strstr(text, "\"original_max_position_embeddings\": 8") != NULL) == (k != 1));
        CHECK(text && !strstr(text, "quantization_config"));
        free(text);
        ctx = test_open(&a);
        CHECK(tt_lm_load(ctx, &m, folder) == TT_OK && m.config.rotary.original == (k == 1 ? 24 : 8));
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* For chosen sizes, a config gets three numbers by the rule of its kind: key heads, width of the MLP, and
   columns of a head that rotate. */
TEST(sized_models)
{
    static const struct { const char *kind; int heads, key_heads, intermediate, turning; } rows[] = {
        {"gpt2", 4, 4, 256, 0}, {"llama", 4, 4, 170, 0}, {"mistral", 4, 1, 170, 0}, {"mistral", 2, 2, 170, 0},
        {"qwen2", 8, 8, 170, 0}, {"qwen3", 4, 4, 170, 0}, {"gemma3_text", 4, 2, 170, 0},
        {"gpt_neox", 4, 4, 256, 4}, {"falcon", 4, 4, 256, 0}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        const tt_lm_config c = tt_lm_config_sized(rows[k].kind, 3, 64, rows[k].heads);
        CHECK(strcmp(c.kind, rows[k].kind) == 0 && c.layers == 3 && c.hidden_size == 64);
        CHECK(c.heads == rows[k].heads && c.key_heads == rows[k].key_heads);
        CHECK(c.intermediate_size == rows[k].intermediate && c.rotary.size == rows[k].turning);
        CHECK(c.tied && !c.window && !(c.dropout > 0) && c.vocab_size > 0);
    }
    CHECK(tt_lm_config_sized("bloom", 2, 64, 4).vocab_size == 0);
}

/* New models of every kind equal the models of transformers. Impossible sizes are refused. */
TEST(new_models)
{
    static const char *const kinds[] = {"gpt2", "llama", "mistral", "qwen2", "gpt_neox", "falcon", "qwen3",
                                        "gemma3_text"};
    for (int k = 0; k < TEST_COUNT(kinds); k++) {
        test_allocator a;
        tt_lm m;
        tt_context *ctx = test_open(&a);
        tt_lm_config c = tt_lm_config_default(kinds[k]);
        c.vocab_size = 30;
        c.hidden_size = 32;
        c.layers = 2;
        c.heads = 4;
        if (c.key_heads > 2) c.key_heads = 2;
        c.intermediate_size = 40;
        c.max_positions = 16;
        c.rotary.size = 0;
        CHECK(c.end_token == -1);
        if (k % 2) c.end_token = 29;
        CHECK(tt_lm_new(ctx, &m, &c) == TT_OK);
        CHECK(m.config.key_heads == (c.key_heads ? c.key_heads : 4));
        /* If config.json lacks a token id, transformers takes the kind's: GPT-2's 50256, LLaMA's 1 and 2. */
        const char *folder = test_folder();
        size_t bytes;
        CHECK(tt_lm_save(&m, folder) == TT_OK);
        char *saved = test_read(test_path(folder, "config.json"), &bytes);
        CHECK(saved && strstr(saved, "\"bos_token_id\": null,") && strstr(saved, "\"pad_token_id\": null,") &&
              strstr(saved, k % 2 ? "\"eos_token_id\": 29," : "\"eos_token_id\": null,"));
        free(saved);
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
        CHECK_NEAR(stats.loss, log(30), 0.2); /* all tokens are about equally likely */
        tt_trainer_free(r);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    test_allocator a;
    tt_lm m;
    tt_context *ctx = test_open(&a);
    tt_lm_config c = tt_lm_config_default("bloom");
    CHECK(tt_lm_new(ctx, &m, &c) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "kind 'bloom' is unknown: use gpt2, llama");
    c = tt_lm_config_default("llama");
    c.key_heads = 5;
    CHECK(tt_lm_new(ctx, &m, &c) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "heads is 32, but must be a multiple of key_heads, 5");
    c.key_heads = 4;
    c.rotary.size = 32;
    CHECK(tt_lm_new(ctx, &m, &c) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "rotary.size is 32, but must be 0 or 128, all columns of a head, in a model of kind llama");
    c.rotary.size = 0;
    for (int end = -2; end <= c.vocab_size; end += c.vocab_size + 2) {
        c.end_token = end;
        CHECK(tt_lm_new(ctx, &m, &c) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "expected a token below 32000, or -1 for none");
    }
    c.end_token = -1;
    c.layers = 0;
    CHECK(tt_lm_new(ctx, &m, &c) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "layers");
    TEST_CLOSE(ctx, &a);
}

/* Loads, trains and saves while allocation number fail_at fails. */
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

/* --------------------------------------------------------------------------------------------- generation */

static tt_generator *generator(golden *g, int max_seqs, int context, int max_tokens, const char *precision)
{
    tt_generator_options o = tt_generator_options_default();
    o.max_seqs = max_seqs;
    o.context = context;
    o.max_tokens = max_tokens;
    o.compile.precision = precision;
    tt_generator *made = tt_generator_new(&g->m, &o);
    if (!made) CHECK_ERROR(g->ctx, TT_OK, "a generator");
    return made;
}

/* The likeliest tokens equal those of transformers, whichever sequences run together. */
TEST(greedy_tokens)
{
    static const int sizes[][3] = {{1, 17, 16}, {1, 13, 1}, {3, 15, 3}, {2, 19, 4}};
    for (int k = 0; k < TEST_COUNT(names) * TEST_COUNT(sizes); k++) {
        golden g;
        isa = k / TEST_COUNT(names) == 1 ? "portable" : NULL;
        int32_t prompt[32], expected[32], ids[96], start[4] = {0}, out[3 * 8];
        int count[3];
        const int *size = sizes[k / TEST_COUNT(names)];
        if (!golden_open(&g, names[k % TEST_COUNT(names)], 1)) return;
        const int n = golden_ints(&g, -1, "greedy.prompt", prompt, 32);
        CHECK(n == 5 && golden_ints(&g, -1, "greedy.ids", expected, 32) == 8);
        tt_sampling s = tt_sampling_default();
        s.temperature = 0;
        s.max_new = 8;
        for (int q = 0; q < 3; q++) { /* the second prompt is shorter than the others */
            const int length = q == 1 ? 3 : n;
            memcpy(ids + start[q], prompt, sizeof *ids * (size_t)length);
            start[q + 1] = start[q] + length;
        }
        tt_generator *made = generator(&g, size[0], size[1], size[2], NULL);
        if (!made) return;
        for (int round = 0; round < 2; round++) { /* old contents of the caches do not matter */
            CHECK(tt_generate(made, ids, start, 3, &s, out, count) == TT_OK);
            for (int q = 0; q < 3; q++) CHECK(count[q] == 8);
            CHECK(memcmp(out, expected, sizeof *out * 8) == 0);
            CHECK(memcmp(out + 16, expected, sizeof *out * 8) == 0);
        }
        tt_generator_free(made);
        golden_close(&g);
        isa = NULL;
    }
}

/* Runs one sequence with more rows than bf16 can count exactly: at once, and a few tokens at a time. */
TEST(alibi_of_a_long_sequence)
{
    enum { LONG = 300, LAST = 8 };
    golden g;
    int32_t ids[LONG], positions[LONG], start[2] = {0, LONG};
    static float logits[LONG * VOCAB];
    tt_train_options o = golden_options("32-true");
    tt_batch b;
    o.max_seqs = 1;
    o.max_tokens = LONG;
    o.compile.train = false;
    if (!golden_open(&g, "falcon_alibi_heads", 1) || !golden_trainer(&g, &o)) return;
    const int vocab = g.m.config.vocab_size, n = golden_ints(&g, -1, "long.ids", ids, LONG);
    for (int k = 0; k < LONG; k++) positions[k] = k;
    memset(&b, 0, sizeof b);
    b.seqs = 1;
    b.rows = n;
    b.ids = ids;
    b.positions = positions;
    b.seq_start = start;
    b.last_of_step = true;
    CHECK(n == LONG && tt_forward(g.r, &b, logits, TEST_COUNT(logits)) == TT_OK);
    float *x = reference(&g, "", "long.logits", LAST * vocab);
    for (int k = 0; k < LAST * vocab; k++) CHECK_NEAR(logits[(LONG - LAST) * vocab + k], x[k], 1e-5);

    int best = 0; /* likeliest token after all tokens but the last */
    for (int v = 1; v < vocab; v++)
        if (x[(LAST - 2) * vocab + v] > x[(LAST - 2) * vocab + best]) best = v;
    tt_sampling s = tt_sampling_default();
    s.temperature = 0;
    s.max_new = 1;
    start[1] = LONG - 1;
    tt_generator *made = generator(&g, 1, LONG, 64, NULL);
    int32_t next = -1;
    int count = 0;
    CHECK(made && tt_generate(made, ids, start, 1, &s, &next, &count) == TT_OK && next == best);
    tt_generator_free(made);
    free(x);
    golden_close(&g);
}

/* A prompt that runs in several parts gives the logits that the whole sequence gives. */
TEST(cached_scores)
{
    for (int k = 0; k < 2 * TEST_COUNT(names); k++) {
        golden g;
        batch_data data;
        const char *precision = k % 2 ? "bf16-true" : "32-true";
        static float whole[TOKENS * VOCAB];
        if (!golden_open(&g, names[k / 2], 1)) return;
        tt_train_options o = golden_options(precision);
        o.compile.train = false;
        if (!golden_trainer(&g, &o)) return;
        tt_batch b = golden_batch(&g, 0, &data);
        const int vocab = g.m.config.vocab_size, n = data.seq_start[1];
        CHECK(tt_forward(g.r, &b, whole, TEST_COUNT(whole)) == TT_OK);
        double max = 0, difference = 0;
        for (int pieces = 1; pieces < 4; pieces++) {
            tt_generator_options go = tt_generator_options_default();
            go.compile.precision = precision;
            go.context = n + 1;
            go.max_tokens = pieces == 1 ? n : pieces;
            go.compile.share = tt_trainer_program(g.r);
            tt_generator *made = tt_generator_new(&g.m, &go);
            CHECK(made == NULL); /* too late: the arena is allocated */
            CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "allocated");
            tt_generator_free(made);
        }
        tt_trainer_free(g.r);
        g.r = NULL;
        for (int pieces = 1; pieces < 4; pieces++) {
            tt_generator *made = generator(&g, 1, n + 1, pieces == 1 ? n : pieces, precision);
            if (!made) return;
            int32_t out;
            int count;
            const int32_t start[2] = {0, n};
            tt_sampling s = tt_sampling_default();
            s.max_new = 1;
            s.temperature = 0;
            CHECK(tt_generate(made, data.ids, start, 1, &s, &out, &count) == TT_OK && count == 1);
            const float *x = whole + (size_t)(n - 1) * (size_t)vocab;
            for (int v = 0; v < vocab; v++) {
                max = worse(max, fabs(x[v]));
                difference = worse(difference, fabs(x[v] - made->scores[v]));
            }
            tt_generator_free(made);
        }
        CHECK_NEAR(difference, 0, k % 2 ? 0.05 * max : 2e-6 * max);
        golden_close(&g);
    }
}

/* ----------------------------------------------------------------------------------------------- sampling */

enum { WORDS = 7, DRAWS = 20000 };

/* Computes the share with which each word is drawn. */
static void shares_of(const float scores[WORDS], const tt_sampling *s, double share[WORDS])
{
    float x[WORDS];
    int32_t order[WORDS];
    memset(share, 0, sizeof *share * WORDS);
    for (int k = 0; k < DRAWS; k++) {
        memcpy(x, scores, sizeof x);
        const int32_t v = tt__draw_token(x, WORDS, s, tt__token_number(s->seed, k % 100, k), order);
        if (CHECK(v >= 0 && v < WORDS)) share[v] += 1.0 / DRAWS;
    }
}

/* Each setting draws each word as often as plain loops say, within 5 standard deviations. */
TEST(sampled_shares)
{
    static const float scores[WORDS] = {0.5f, 2, -1, 2, 0, 1.2f, -30};
    static const struct { float temperature, top_p; int top_k; } settings[] = {
        {1, 1, 0}, {0.5f, 1, 0}, {3, 1, 0}, {1, 1, 3}, {1, 1, 1}, {1, 1, 7}, {1, 1, 90}, {1, 0.5f, 0},
        {2, 0.9f, 0}, {1, 0.01f, 0}, {1, 0.999999f, 0}, {1, 0.7f, 4}, {0.7f, 0.95f, 5}, {0, 1, 0}};
    for (int k = 0; k < TEST_COUNT(settings); k++) {
        tt_sampling s = tt_sampling_default();
        s.temperature = settings[k].temperature;
        s.top_p = settings[k].top_p;
        s.top_k = settings[k].top_k;
        s.seed = (uint64_t)k + 3;
        const float divisor = s.temperature > 0 ? s.temperature : 1;
        int order[WORDS], n = 0;
        double p[WORDS] = {0}, sum = 0, held = 0, share[WORDS];
        for (int v = 0; v < WORDS; v++) { /* insertion sort */
            int at = n++;
            for (; at && scores[order[at - 1]] < scores[v]; at--) order[at] = order[at - 1];
            order[at] = v;
        }
        if (s.top_k && s.top_k < n) n = s.top_k;
        if (s.temperature == 0) n = 1;
        for (int i = 0; i < n; i++) sum += exp(scores[order[i]] / divisor);
        int kept = 0;
        while (kept < n && (held < s.top_p * sum || !kept))
            held += exp(scores[order[kept++]] / divisor);
        for (int i = 0; i < kept; i++) p[order[i]] = exp(scores[order[i]] / divisor) / held;
        shares_of(scores, &s, share);
        for (int v = 0; v < WORDS; v++) {
            CHECK_NEAR(share[v], p[v], 5 * sqrt(p[v] * (1 - p[v]) / DRAWS) + 1e-12);
            if (p[v] == 0) CHECK(share[v] == 0);
        }
    }
}

/* Among many equal scores, each filter keeps the first scores, and exactly the right number. */
TEST(sampled_from_equals)
{
    enum { MANY = 1000 };
    static float x[MANY];
    static int32_t order[MANY];
    static const struct { float top_p; int top_k, kept; } settings[] = {
        {1, 0, MANY}, {0.25f, 0, 250}, {1, 100, 100}, {0.5f, 100, 50}};
    for (int k = 0; k < TEST_COUNT(settings); k++) {
        tt_sampling s = tt_sampling_default();
        s.top_p = settings[k].top_p;
        s.top_k = settings[k].top_k;
        static char drawn[MANY];
        int different = 0;
        memset(drawn, 0, sizeof drawn);
        for (int n = 0; n < 20 * MANY; n++) {
            for (int v = 0; v < MANY; v++) x[v] = -7;
            const int32_t v = tt__draw_token(x, MANY, &s, tt__token_number(9, 1, n), order);
            if (!CHECK(v >= 0 && v < settings[k].kept)) break;
            different += !drawn[v];
            drawn[v] = 1;
        }
        CHECK(different > settings[k].kept - 5);
    }
}

typedef struct last_message { int32_t id[3][64]; int n[3], max; } last_message;

static bool hear(void *user, int seq, int32_t id)
{
    last_message *h = (last_message *)user;
    h->id[seq][h->n[seq]++] = id;
    return h->n[seq] < h->max;
}

TEST(sampled_texts)
{
    golden g;
    if (!golden_open(&g, "llama", 2)) return;
    tt_generator *made = generator(&g, 2, 40, 7, NULL), *alone = generator(&g, 1, 40, 1, NULL);
    static const int32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 7, 40}, start[] = {0, 9, 10, 11};
    int32_t a[3][20], b[3][20];
    int n[3], m[3];
    last_message h;
    memset(&h, 0, sizeof h);
    h.max = 60;
    tt_sampling s = tt_sampling_default();
    s.max_new = 20;
    s.seed = 5;
    s.token = hear;
    s.user = &h;
    CHECK(tt_generate(made, ids, start, 3, &s, a[0], n) == TT_OK);
    for (int q = 0; q < 3; q++) { /* the callback gets each token */
        CHECK(n[q] == 20 && h.n[q] == 20 && memcmp(h.id[q], a[q], sizeof a[q]) == 0);
        for (int k = 0; k < n[q]; k++) CHECK(a[q][k] >= 0 && a[q][k] < 41);
    }
    s.token = NULL;
    /* each sequence, generated alone, gets the tokens that it got among the others */
    CHECK(tt_generate(alone, ids, start, 3, &s, b[0], m) == TT_OK);
    CHECK(memcmp(a, b, sizeof a) == 0);
    s.seed = 6;
    CHECK(tt_generate(made, ids, start, 3, &s, b[0], m) == TT_OK && memcmp(a, b, sizeof a) != 0);
    s.seed = 5;

    h.max = 4; /* the callback ends each sequence after 4 tokens */
    memset(h.n, 0, sizeof h.n);
    s.token = hear;
    CHECK(tt_generate(made, ids, start, 3, &s, b[0], m) == TT_OK);
    for (int q = 0; q < 3; q++) CHECK(m[q] == 4 && memcmp(a[q], b[q], 4 * sizeof **a) == 0);
    s.token = NULL;

    int32_t stop[2] = {-1, a[1][6]}; /* this token ends sequence 1 where it first occurs */
    s.stop = stop;
    s.n_stop = 2;
    CHECK(tt_generate(made, ids, start, 3, &s, b[0], m) == TT_OK);
    for (int q = 0; q < 3; q++) {
        int at = 0;
        while (at < 19 && a[q][at] != stop[1]) at++;
        CHECK(m[q] == at + 1 && memcmp(a[q], b[q], sizeof **a * (size_t)m[q]) == 0);
    }
    s.n_stop = 0;

    s.temperature = 0; /* the penalty below forbids earlier tokens, so no token repeats */
    s.repetition_penalty = 1e30f;
    CHECK(tt_generate(made, ids, start, 3, &s, a[0], n) == TT_OK);
    for (int q = 0; q < 3; q++) {
        bool seen[41] = {false};
        for (int32_t r = start[q]; r < start[q + 1]; r++) seen[ids[r]] = true;
        for (int k = 0; k < 20; k++) {
            CHECK(!seen[a[q][k]]);
            seen[a[q][k]] = true;
        }
    }
    tt_generator_free(made);
    tt_generator_free(alone);
    made = generator(&g, 1, 12, 5, NULL); /* the end of the context ends a sequence */
    CHECK(tt_generate(made, ids, start, 3, &s, a[0], n) == TT_OK && n[0] == 3 && n[1] == 11 && n[2] == 11);
    tt_generator_free(made);
    golden_close(&g);
}

typedef struct reported { char text[64]; size_t bytes, max; } reported;

static bool tell_text(void *user, const char *text, size_t bytes)
{
    reported *x = (reported *)user;
    memcpy(x->text + x->bytes, text, bytes);
    x->bytes += bytes;
    return x->bytes < x->max;
}

/* Without a tokenizer, the bytes of a text are its tokens: tt_generate_text continues a text as tt_generate
   continues its bytes. tests/check_examples.py checks generation with tokenizers. */
TEST(continued_texts)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_lm_config c = tt_lm_config_sized("llama", 1, 16, 2);
    c.vocab_size = 257;
    c.max_positions = 20;
    tt_lm m;
    REQUIRE(tt_lm_new(ctx, &m, &c) == TT_OK);
    tt_generator_options o = tt_generator_options_default();
    tt_generator *g = tt_generator_new(&m, &o);
    REQUIRE(g != NULL);
    const int32_t ids[] = {'a', 'n', 'd'}, start[] = {0, 3}, end[] = {256}, empty[] = {0, 1};
    int32_t out[20];
    int n, count = -1;
    tt_sampling s = tt_sampling_default();
    s.max_new = 20;
    s.stop = end;
    s.n_stop = 1;
    /* run k = 0: a text; 1: the beginning of a document; 2: a text whose answer the callback ends */
    for (int k = 0; k < 3; k++) {
        reported x = {"", 0, k == 2 ? 2 : 64};
        CHECK(tt_generate(g, k == 1 ? end : ids, k == 1 ? empty : start, 1, &s, out, &n) == TT_OK);
        CHECK(tt_generate_text(g, NULL, k == 1 ? "" : "and", &s, tell_text, &x, &count) == TT_OK);
        CHECK(count == (k == 2 ? 2 : n) && n > 2 && x.bytes == (size_t)count - (out[count - 1] == 256));
        for (size_t b = 0; b < x.bytes; b++) CHECK((uint8_t)x.text[b] == out[b]);
        s.seed++;
    }
    reported x = {"", 0, 64};
    CHECK(tt_generate_text(g, NULL, "as long as the model", NULL, tell_text, &x, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "the text has 20 tokens, but must have fewer than the generator's context of 20");
    s.max_new = 0;
    CHECK(tt_generate_text(g, NULL, "and", &s, tell_text, &x, NULL) == TT_ERR_ARGUMENT && x.bytes == 0);
    s.max_new = 2;
    a.fail_at = a.calls + 1;
    CHECK(tt_generate_text(g, NULL, "and", &s, tell_text, &x, NULL) == TT_ERR_MEMORY && x.bytes == 0);
    a.fail_at = 0;
    tt_generator_free(g);
    tt_lm_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* A trainer and a generator share an arena: the generator uses the trained parameters. */
TEST(samples_while_training)
{
    golden g;
    batch_data data;
    if (!golden_open(&g, "gpt2", 1)) return;
    const tt_train_options o = golden_options("32-true");
    if (!golden_trainer(&g, &o)) return;
    tt_generator_options go = tt_generator_options_default();
    go.compile.share = tt_trainer_program(g.r);
    go.context = 16;
    go.max_tokens = 8;
    tt_generator *made = tt_generator_new(&g.m, &go);
    if (!made) { CHECK_ERROR(g.ctx, TT_OK, "a generator"); return; }
    static const int32_t start[2] = {0, 3};
    int32_t before[8], after[8];
    int n;
    tt_sampling s = tt_sampling_default();
    s.temperature = 0;
    s.max_new = 8;
    tt_batch b = golden_batch(&g, 0, &data);
    const int32_t *prompt = data.ids;
    CHECK(tt_generate(made, prompt, start, 1, &s, before, &n) == TT_OK && n == 8);
    for (int step = 0; step < 60; step++) CHECK(tt_train_batch(g.r, &b, NULL, NULL) == TT_OK);
    CHECK(tt_generate(made, prompt, start, 1, &s, after, &n) == TT_OK && n == 8);
    CHECK(memcmp(before, after, sizeof after) != 0);
    char folder[600];
    snprintf(folder, sizeof folder, "%s", test_folder());
    CHECK(tt_lm_save(&g.m, folder) == TT_OK);
    tt_generator_free(made);
    golden_close(&g);
    memset(&g, 0, sizeof g);
    g.ctx = test_open(&g.a);
    CHECK(tt_lm_load(g.ctx, &g.m, folder) == TT_OK);
    made = generator(&g, 1, 16, 8, NULL);
    CHECK(tt_generate(made, prompt, start, 1, &s, before, &n) == TT_OK);
    CHECK(memcmp(before, after, sizeof after) == 0);
    tt_generator_free(made);
    golden_close(&g);
}

/* A trainer of several ranks samples the tokens that a trainer of one rank samples. The last layer
   has the most work in a training, but little work in a generator, which computes few of the layer's rows. So
   a generator that did not share the trainer's parameters would be cut into other stages. */
static bool sample_while_training(int32_t out[2][2][6], const tt_lm_config *c, const char *device,
                                  const tt_parallel *parallel, const char *offload)
{
    enum { ROWS = 24 };
    static const int32_t seq_start[3] = {0, 10, ROWS}, start[3] = {0, 3, 7};
    int32_t ids[ROWS], positions[ROWS], targets[ROWS];
    tt_array array;
    tt_batch b;
    golden g;
    memset(&g, 0, sizeof g);
    memset(&array, 0, sizeof array);
    memset(&b, 0, sizeof b);
    for (int k = 0; k < ROWS; k++) {
        ids[k] = (37 * k + 11) % c->vocab_size;
        targets[k] = 7 * ids[k] % c->vocab_size;
        positions[k] = k < seq_start[1] ? k : k - seq_start[1];
    }
    array.input = "targets";
    array.data = targets;
    array.rows = b.rows = ROWS;
    b.arrays = &array;
    b.n_arrays = 1;
    b.seqs = 2;
    b.ids = ids;
    b.positions = positions;
    b.seq_start = seq_start;
    b.last_of_step = true;
    g.ctx = test_open(&g.a);
    CHECK(tt_lm_new(g.ctx, &g.m, c) == TT_OK);
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.schedule.lr = 1e-3f;
    o.max_seqs = 2;
    o.max_tokens = ROWS;
    o.compile.accumulate = true;
    o.compile.device = device;
    o.compile.offload = offload;
    o.compile.parallel = *parallel;
    if (!golden_trainer(&g, &o)) return false;
    tt_generator_options go = tt_generator_options_default();
    go.compile.share = tt_trainer_program(g.r);
    go.context = 16;
    go.max_tokens = 12;
    go.max_seqs = 2;
    tt_generator *made = tt_generator_new(&g.m, &go);
    if (!made) { CHECK_ERROR(g.ctx, TT_OK, "a generator"); return false; }
    CHECK(tt_program_plan(tt_generator_program(made)).ranks == tt_program_plan(go.compile.share).ranks);
    tt_sampling s = tt_sampling_default();
    s.max_new = 6;
    for (int round = 0; round < 2; round++) {
        int n[2];
        CHECK(tt_generate(made, ids, start, 2, &s, out[round][0], n) == TT_OK && n[0] == 6 && n[1] == 6);
        for (int step = 0; step < 3 && !round; step++)
            CHECK(tt_train_batch(g.r, &b, NULL, NULL) == TT_OK);
    }
    tt_generator_free(made);
    golden_close(&g);
    return true;
}

TEST(samples_while_ranks_train)
{
    static const struct { const char *device; int tensor, pipeline, zero; bool server; } kinds[] = {
        {"cpu*2", 1, 1, 0, false}, {"cpu*2", 1, 1, 1, false}, {"cpu*2", 1, 1, 2, false},
        {"cpu*4", 1, 1, 3, false}, {"cpu*2", 1, 1, 0, true}, {"cpu*2", 2, 1, 1, false},
        {"cpu*4", 2, 1, 3, false}, {"cpu*2", 1, 2, 1, false}, {"cpu*3", 1, 3, 1, false},
        {"cpu*4", 2, 2, 1, false}};
    tt_lm_config c = tt_lm_config_default("gpt2");
    c.layers = 3;
    const int size = TEST_SWEEP > 1 ? 1 : 4;
    c.vocab_size = 3000 * size;
    c.hidden_size = 64 * size; /* enough weights in a layer for tensor ranks to divide */
    c.heads = c.key_heads = 4;
    c.head_size = 16 * size;
    c.intermediate_size = 512 * size;
    c.embedding_dropout = c.dropout = c.attention_dropout = 0;
    tt_parallel parallel = tt_parallel_default();
    int32_t expected[2][2][6], out[2][2][6];
    if (!sample_while_training(expected, &c, "cpu", &parallel, NULL)) return;
    CHECK(memcmp(expected[0], expected[1], sizeof expected[0]) != 0);
    for (int k = 0; k < TEST_COUNT(kinds); k++) {
        if (k % test_every(3) && k != 4) continue;
        parallel.tensor = kinds[k].tensor;
        parallel.pipeline = kinds[k].pipeline;
        parallel.zero = kinds[k].zero;
        parallel.server = kinds[k].server;
        const char *offload = k == 3 ? "parameters" : NULL;
        if (!sample_while_training(out, &c, kinds[k].device, &parallel, offload)) return;
        CHECK(memcmp(expected, out, sizeof out) == 0);
    }
}

TEST(generation_errors)
{
    golden g;
    if (!golden_open(&g, "gpt2", 1)) return;
    static const struct { int seqs, context, tokens; const char *error; } sizes[] = {
        {0, 9, 9, "max_seqs is 0"}, {1, 1, 9, "the context is 1 tokens"},
        {1, 20, 9, "the context is 20 tokens, but must be at most 19, the model's positions"},
        {5, 9, 4, "max_tokens is 4, but must be at least max_seqs, 5"},
        {200000000, 19, 300000000, "2^31 tokens or more"}};
    for (int k = 0; k < TEST_COUNT(sizes); k++) {
        tt_generator_options o = tt_generator_options_default();
        o.max_seqs = sizes[k].seqs;
        o.context = sizes[k].context;
        o.max_tokens = sizes[k].tokens;
        CHECK(tt_generator_new(&g.m, &o) == NULL);
        CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, sizes[k].error);
    }
    tt_generator_options o = tt_generator_options_default();
    o.compile.train = true;
    CHECK(tt_generator_new(&g.m, &o) == NULL);
    CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "compile.train is true");
    o.compile.train = false;
    o.compile.memory_budget = 1000;
    CHECK(tt_generator_new(&g.m, &o) == NULL);
    CHECK_ERROR(g.ctx, TT_ERR_BUDGET, "");
    o.compile.memory_budget = 0;
    o.compile.device = "cpu*2";
    CHECK(tt_generator_new(&g.m, &o) == NULL);
    CHECK_ERROR(g.ctx, TT_ERR_UNSUPPORTED, "runs on one rank, but its device option has 2");
    tt_generator *made = generator(&g, 2, 19, 8, NULL);
    if (!made) return;
    int32_t ids[20] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, start[3] = {0, 4, 6}, out[20];
    int n[2];
    tt_sampling s = tt_sampling_default();
    s.max_new = 4;
    static const struct { int field; float value; const char *error; } samplings[] = {
        {0, 0, "max_new is 0"}, {1, -1, "temperature is -1, but must be"}, {1, NAN, "temperature is nan"},
        {2, -3, "top_k is -3"}, {3, 0, "top_p is 0, but must be in (0, 1]"}, {3, 1.5f, "top_p is 1.5"},
        {3, NAN, "top_p is nan"}, {4, 0, "repetition_penalty is 0, but must be finite and above 0"},
        {5, 2, "n_stop is 2, but must be the number of tokens in `stop`"}};
    for (int k = 0; k < TEST_COUNT(samplings); k++) {
        tt_sampling bad = s;
        const float x = samplings[k].value;
        switch (samplings[k].field) {
        case 0: bad.max_new = (int)x; break;
        case 1: bad.temperature = x; break;
        case 2: bad.top_k = (int)x; break;
        case 3: bad.top_p = x; break;
        case 4: bad.repetition_penalty = x; break;
        default: bad.n_stop = (int)x; break;
        }
        CHECK(tt_generate(made, ids, start, 2, &bad, out, n) == TT_ERR_ARGUMENT);
        CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, samplings[k].error);
    }
    ids[5] = 37;
    CHECK(tt_generate(made, ids, start, 2, &s, out, n) == TT_ERR_ARGUMENT);
    CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "prompt 1, token 1: the id is 37, but must be 0 to 36");
    ids[5] = 5;
    start[2] = 4;
    CHECK(tt_generate(made, ids, start, 2, &s, out, n) == TT_ERR_ARGUMENT);
    CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "prompt 1 has 0 tokens");
    start[1] = start[2] = 19;
    CHECK(tt_generate(made, ids, start, 1, &s, out, n) == TT_ERR_ARGUMENT);
    CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "prompt 0 has 19 tokens, but must have at least 1 and fewer than");
    CHECK(tt_generate(made, ids, start, 0, &s, out, n) == TT_OK); /* 0 sequences: nothing to do */

    /* An error names the parameter that is not finite, and the caches forget the rows that the
       parameter made NaN. */
    start[1] = 4;
    start[2] = 6;
    const int64_t size = tt_param_size(g.m.layer[0].down_b);
    float *values = test_values(g.m.layer[0].down_b), kept = values[0];
    int32_t fine[8], again[8];
    CHECK(tt_generate(made, ids, start, 2, &s, fine, n) == TT_OK);
    values[0] = NAN;
    CHECK(tt_param_set(g.m.layer[0].down_b, values) == TT_OK && size > 0);
    CHECK(tt_generate(made, ids, start, 2, &s, out, n) == TT_ERR_NUMERIC);
    CHECK_ERROR(g.ctx, TT_ERR_NUMERIC, "sequence 0: after token 4 the score of token 0 is not finite");
    values[0] = kept;
    CHECK(tt_param_set(g.m.layer[0].down_b, values) == TT_OK);
    CHECK(tt_generate(made, ids, start, 2, &s, again, n) == TT_OK);
    CHECK(memcmp(fine, again, sizeof fine) == 0);
    free(values);
    tt_generator_free(made);

    /* An op that stores rows in a cache cannot be trained. */
    tt_tape *t = tt_tape_new(g.ctx);
    tt_value x = tt_input(t, "ids", TT_I32, 4, 1), at = tt_input(t, "at", TT_I32, 4, 1);
    tt_value cache = tt_cache(t, "cache", 9, tt_param_size(g.m.norm_w));
    tt_value stored = tt_store_rows(t, cache, tt_embedding(t, x, g.m.word), at);
    tt_value y = tt_input(t, "y", TT_F32, 4, tt_param_size(g.m.norm_w));
    const tt_value none = {0};
    tt_value loss = tt_mean_squared_error(t, tt_gather_rows(t, stored, at), y, none);
    CHECK(tt_compile(t, loss, NULL) == NULL);
    CHECK_ERROR(g.ctx, TT_ERR_UNSUPPORTED, "op 'store_rows' has no backward, but its result 'cache' needs a "
                "gradient: use other ops, or freeze the parameters before it");
    tt_store_rows(t, y, y, at);
    CHECK(tt_tape_status(t) == TT_ERR_ARGUMENT);
    CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "store_rows: 'y' is not a cache");
    tt_tape_free(t);
    golden_close(&g);
}

/* ----------------------------------------------------------------------------------------------- adapters */

static const char *const adapted[] = {"gpt2", "llama", "neox", "falcon_groups"};

static void lora_path(char path[700], const char *name, const char *file)
{
    char folder[600];
    golden_path(folder, name, "lora");
    snprintf(path, 700, "%s%s%s", folder, *file ? "/" : "", file);
}

/* Logits and gradients of adapters equal peft's. Frozen weights have no gradient and do not change. */
TEST(golden_lora)
{
    for (int k = 0; k < TEST_COUNT(adapted); k++) {
        golden g;
        batch_data data;
        char path[700];
        static float logits[TOKENS * VOCAB];
        if (!golden_open(&g, adapted[k], 1)) return;
        lora_path(path, adapted[k], "");
        const int base = g.ctx->n_params;
        CHECK(tt_lm_lora_load(&g.m, path) == TT_OK && g.ctx->n_params == base + 2 * g.m.n_lora);
        tt_train_options o = golden_options("32-true");
        o.compile.accumulate = true;
        if (!golden_trainer(&g, &o)) return;
        lora_path(path, adapted[k], "golden.safetensors");
        tt_safetensors_close(g.file);
        golden whole = g;
        char first[600];
        golden_path(first, adapted[k], "golden.safetensors");
        whole.file = tt_safetensors_open(g.ctx, first);
        tt_batch b = golden_batch(&whole, 0, &data);
        tt_safetensors_close(whole.file);
        g.file = tt_safetensors_open(g.ctx, path);
        CHECK(tt_safetensors_count(g.file) == 1 + 2 * g.m.n_lora);
        const int64_t n = (int64_t)b.rows * g.m.config.vocab_size;
        CHECK(tt_forward(g.r, &b, logits, TEST_COUNT(logits)) == TT_OK);
        float *x = reference(&g, "", "logits", n);
        double max = 0;
        for (int64_t i = 0; i < n; i++) max = worse(max, fabs(logits[i] - x[i]));
        CHECK_NEAR(max, 0, 1e-5);
        free(x);

        float *before = test_values(g.ctx->params[0]);
        b.last_of_step = false;
        CHECK(tt_train_batch(g.r, &b, NULL, NULL) == TT_OK);
        double gradient = 0;
        for (int i = 0; i < 2 * g.m.n_lora; i++) {
            const tt_lora *l = &g.m.lora[i / 2];
            const tt_param *p = i % 2 ? l->b : l->a;
            const int64_t size = tt_param_size(p);
            float *d = (float *)malloc(2 * sizeof *d * (size_t)size), *rows = d + size;
            char name[256];
            tt__packing order;
            for (int m = 0; tt__lm_module(&g.m, m, name, &order) != l->weight;) m++;
            CHECK(tt_get_gradient(g.r->train, p, d) == TT_OK);
            if (i % 2) tt__lora_rows(&order, g.m.lora_options.rank, d, rows, false);
            snprintf(name, sizeof name, "grad.base_model.model.%s", tt_param_name(p));
            x = reference(&g, "", name, size);
            CHECK(distance(x, NULL, size) > 0);
            gradient = worse(gradient, distance(i % 2 ? rows : d, x, size) / distance(x, NULL, size));
            free(x);
            free(d);
        }
        CHECK_NEAR(gradient, 0, 1e-5);
        CHECK(tt_update(g.r->train, LR, NULL) == TT_OK);
        float *after = test_values(g.ctx->params[0]);
        CHECK(memcmp(before, after, sizeof *after * (size_t)tt_param_size(g.ctx->params[0])) == 0);
        free(before);
        free(after);
        CHECK(tt_program_plan(g.r->train).at_peak[TT_MEM_OPTIMIZER] <
              tt_program_plan(g.r->train).at_peak[TT_MEM_PARAMETERS]);
        golden_close(&g);
    }
}

/* Loads and saves a folder of peft, and every tensor keeps its bytes. Merging keeps the logits. */
TEST(adapters_go_round)
{
    for (int k = 0; k < TEST_COUNT(adapted); k++) {
        golden g;
        batch_data data;
        char path[700], folder[600];
        static float x[TOKENS * VOCAB], y[TOKENS * VOCAB];
        if (!golden_open(&g, adapted[k], 1)) return;
        tt_batch b = golden_batch(&g, 0, &data);
        lora_path(path, adapted[k], "");
        CHECK(tt_lm_lora_load(&g.m, path) == TT_OK);
        CHECK(tt_lm_lora_load(&g.m, path) == TT_ERR_ARGUMENT);
        CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "the model already has adapters: add adapters only once");
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "adapter"));
        CHECK(tt_lm_lora_save(&g.m, folder) == TT_OK);
        char base[600], said[700];
        size_t length;
        /* peft's file names no base model, so the saved file names the folder of the loaded model */
        golden_path(base, adapted[k], "");
        snprintf(said, sizeof said, "\"base_model_name_or_path\": \"%s\",", base);
        char *saved = test_read(test_path(folder, "adapter_config.json"), &length);
        CHECK(saved && strstr(saved, said) != NULL);
        free(saved);
        snprintf(said, sizeof said, "%s/adapter_config.json", folder);
        replace(said, base, "say \\\"base\\\"");
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_safetensors *one = tt_safetensors_open(ctx, test_path(path, "adapter_model.safetensors"));
        tt_safetensors *two = tt_safetensors_open(ctx, test_path(folder, "adapter_model.safetensors"));
        if (!CHECK(one && two) || !CHECK(tt_safetensors_count(one) == tt_safetensors_count(two))) return;
        for (int i = 0; i < tt_safetensors_count(one); i++) {
            const tt_tensor_info *info = tt_safetensors_info(one, i);
            const int j = tt_safetensors_find(two, info->name);
            if (!CHECK(j >= 0)) continue;
            char *p = test_tensor(one, i), *q = test_tensor(two, j);
            CHECK(memcmp(info->dims, tt_safetensors_info(two, j)->dims, 2 * sizeof *info->dims) == 0);
            CHECK(p && q && memcmp(p, q, (size_t)info->bytes) == 0);
            free(p);
            free(q);
        }
        tt_safetensors_close(one);
        tt_safetensors_close(two);
        TEST_CLOSE(ctx, &a);

        golden named; /* peft's name for the base model is kept */
        if (!golden_open(&named, adapted[k], 1)) return;
        CHECK(tt_lm_lora_load(&named.m, folder) == TT_OK && strcmp(named.m.base, "say \"base\"") == 0);
        golden_close(&named);

        const tt_train_options o = golden_options("32-true");
        if (!golden_trainer(&g, &o)) return;
        CHECK(tt_train_batch(g.r, &b, NULL, NULL) == TT_OK); /* trained values are saved, too */
        CHECK(tt_forward(g.r, &b, x, TEST_COUNT(x)) == TT_OK && tt_lm_lora_save(&g.m, folder) == TT_OK);
        const size_t n = (size_t)(b.rows * g.m.config.vocab_size);
        for (int merged = 0; merged < 2; merged++) {
            golden h;
            double max = 0;
            if (!golden_open(&h, adapted[k], 1)) return;
            CHECK(tt_lm_lora_load(&h.m, folder) == TT_OK);
            CHECK(h.m.base && strcmp(h.m.base, base) == 0);
            char whole[600];
            snprintf(whole, sizeof whole, "%s", test_folder());
            if (merged) {
                CHECK(tt_lm_lora_merge(&h.m) == TT_OK && tt_lm_save(&h.m, whole) == TT_OK);
                golden_close(&h);
                memset(&h, 0, sizeof h);
                h.ctx = test_open(&h.a);
                CHECK(tt_lm_load(h.ctx, &h.m, whole) == TT_OK && !h.m.n_lora);
            }
            if (!golden_trainer(&h, &o)) return;
            CHECK(tt_forward(h.r, &b, y, TEST_COUNT(y)) == TT_OK);
            for (size_t i = 0; i < n; i++) max = worse(max, fabs(x[i] - y[i]));
            CHECK_NEAR(max, 0, merged ? 1e-5 : 0);
            golden_close(&h);
        }
        CHECK(tt_lm_lora_merge(&g.m) == TT_OK && tt_forward(g.r, &b, y, TEST_COUNT(y)) == TT_OK);
        double max = 0; /* a program compiled before the merge still gives these logits */
        for (size_t i = 0; i < n; i++) max = worse(max, fabs(x[i] - y[i]));
        CHECK_NEAR(max, 0, 1e-5);
        golden_close(&g);
    }
}

/* A new adapter changes nothing at first; then only the adapter is trained. */
TEST(new_adapters)
{
    for (int k = 0; k < TEST_COUNT(names); k++) {
        golden g;
        batch_data data;
        static float x[TOKENS * VOCAB], y[TOKENS * VOCAB];
        const tt_train_options o = golden_options(k % 2 ? "bf16-true" : "32-true");
        for (int with = 0; with < 2; with++) {
            if (!golden_open(&g, names[k], 1)) return;
            tt_lora_options lora = tt_lora_options_default();
            lora.dropout = 0.3f;
            if (with) CHECK(tt_lm_lora(&g.m, k % 3 ? NULL : &lora) == TT_OK);
            if (with) CHECK(g.m.n_lora == g.m.config.layers * (g.m.layer->q_w ? 2 : 1));
            tt_batch b = golden_batch(&g, 0, &data);
            if (!golden_trainer(&g, &o)) return;
            CHECK(tt_forward(g.r, &b, with ? y : x, TEST_COUNT(x)) == TT_OK);
            if (with) CHECK(memcmp(x, y, sizeof *x * (size_t)(b.rows * g.m.config.vocab_size)) == 0);
            tt_stats first = {0}, last = {0};
            for (int step = 0; step < 30; step++)
                CHECK(tt_train_batch(g.r, &b, step ? &last : &first, NULL) == TT_OK);
            CHECK(last.loss < first.loss);
            golden_close(&g);
        }
    }
}

TEST(adapters_that_are_refused)
{
    golden g;
    char path[700], folder[600], config[700];
    if (!golden_open(&g, "llama", 1)) return;
    CHECK(tt_lm_lora_save(&g.m, "nowhere") == TT_ERR_ARGUMENT);
    CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "the model has no adapters");
    static const struct { const char *targets; int rank; float alpha, dropout; const char *error; } rows[] = {
        {"c_attn", 8, 8, 0, "no module that can have an adapter has a name that matches 'c_attn'; the first "
         "such module is 'model.layers.0.self_attn.q_proj'"},
        {"", 8, 8, 0, "no module that can have an adapter has a name that matches ''"},
        {"q_proj,v_porj", 8, 8, 0, "no module that can have an adapter has a name that matches 'v_porj'"},
        {"q_proj,lm_head", 8, 8, 0, "no module that can have an adapter has a name that matches 'lm_head'"},
        {NULL, 0, 8, 0, "rank is 0, but must be above 0"},
        {NULL, 8, NAN, 0, "alpha is nan, but must be"},
        {NULL, 8, 8, 1, "dropout is 1, but must be in [0, 1)"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        const tt_lora_options o = {rows[k].targets, rows[k].rank, rows[k].alpha, rows[k].dropout};
        CHECK(tt_lm_lora(&g.m, &o) == TT_ERR_ARGUMENT);
        CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, rows[k].error);
        CHECK(g.m.n_lora == 0 && !g.m.lora && !g.m.word->frozen);
    }
    const tt_lora_options some = {"layers.1.*_proj,,", 1, 1, 0};
    CHECK(tt_lm_lora(&g.m, &some) == TT_OK && g.m.n_lora == 7 && g.m.word->frozen);
    golden_close(&g);

    snprintf(folder, sizeof folder, "%s", test_folder());
    snprintf(config, sizeof config, "%s/adapter_config.json", folder);
    static const struct { const char *from, *to; tt_status status; const char *error; } edits[] = {
        {"\"LORA\"", "\"IA3\"", TT_ERR_UNSUPPORTED, "peft_type is 'IA3'; only LORA is supported"},
        {"\"bias\": \"none\"", "\"bias\": \"all\"", TT_ERR_UNSUPPORTED, "bias is 'all'"},
        {"\"use_dora\": false", "\"use_dora\": true", TT_ERR_UNSUPPORTED, "use_dora is true"},
        {"\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa\"", TT_ERR_UNSUPPORTED,
         "init_lora_weights is 'pissa'"},
        {"\"rank_pattern\": {}", "\"rank_pattern\": {\"q_proj\": 2}", TT_ERR_UNSUPPORTED,
         "rank_pattern is set, but not"},
        {"\"r\": 4", "\"r\": 0", TT_ERR_FORMAT, "\"r\" is 0"},
        {"\"r\": 4", "\"r\": 3", TT_ERR_SHAPE, "another shape than (3, 20), which the model and r"},
        {"{", "", TT_ERR_FORMAT, "not valid JSON"}};
    for (int k = 0; k < TEST_COUNT(edits) + 2; k++) {
        const bool edit = k < TEST_COUNT(edits);
        for (int i = 0; i < 2; i++) {
            size_t n;
            lora_path(path, k > TEST_COUNT(edits) ? "falcon_groups" : "llama", "");
            const char *name = i ? "adapter_config.json" : "adapter_model.safetensors";
            char *bytes = test_read(test_path(path, name), &n);
            if (CHECK(bytes != NULL)) test_write(test_path(folder, name), bytes, edit || i ? n : n - 3);
            free(bytes);
        }
        if (edit) replace(config, edits[k].from, edits[k].to);
        if (!golden_open(&g, "llama", 1)) return;
        const tt_status status = edit ? edits[k].status : TT_ERR_FORMAT;
        CHECK(tt_lm_lora_load(&g.m, folder) == status);
        CHECK_ERROR(g.ctx, status, edit ? edits[k].error : "adapter_model.safetensors'");
        CHECK(g.m.n_lora == 0 && !g.m.lora && !g.m.word->frozen);
        golden_close(&g);
    }
}

/* If the last weight cannot take the sum with its adapter, merging changes nothing. */
TEST(refused_merges_change_nothing)
{
    static const char *const errors[] = {"is stored in int8, which would round the sum",
                                         "is rounded, which would round the sum",
                                         "has low-rank factors, which cannot hold the sum"};
    for (int k = 0; k < TEST_COUNT(errors); k++) {
        golden g;
        if (!golden_open(&g, "llama", 1)) return;
        CHECK(tt_lm_lora(&g.m, NULL) == TT_OK);
        tt_lora *first = &g.m.lora[0];
        tt_param *last = g.m.lora[g.m.n_lora - 1].weight;
        if (k == 0) CHECK(tt_param_store(last, "int8") == TT_OK);
        if (k == 1) CHECK(tt_param_round(g.ctx, tt_param_name(last), TT_ROUND_BINARY) == 1);
        if (k == 2) CHECK(tt_param_low_rank(last, 2, 0) == TT_OK && tt_param_rank(last) == 2);
        float *b = test_values(first->b), *w = test_values(first->weight);
        const size_t of_b = sizeof *b * (size_t)first->b->size;
        const size_t of_w = sizeof *w * (size_t)first->weight->size;
        for (int64_t i = 0; i < first->b->size; i++) b[i] = (float)(1 + i);
        CHECK(tt_param_set(first->b, b) == TT_OK && tt_lm_lora_merge(&g.m) == TT_ERR_UNSUPPORTED);
        CHECK_ERROR(g.ctx, TT_ERR_UNSUPPORTED, errors[k]);
        float *b_now = test_values(first->b), *w_now = test_values(first->weight);
        CHECK(memcmp(b, b_now, of_b) == 0 && memcmp(w, w_now, of_w) == 0);
        free(b), free(w), free(b_now), free(w_now);
        golden_close(&g);
    }
}

/* Adapters freeze the factors of low-rank weights with the weights. Adapters are not rounded, are not stored
   in few bits, and get no factors. */
TEST(adapters_beside_factors)
{
    golden g;
    if (!golden_open(&g, "llama", 1)) return;
    tt_param *up = g.m.layer[0].up_w;
    CHECK(tt_param_low_rank(up, 2, 0) == TT_OK && tt_lm_lora(&g.m, NULL) == TT_OK);
    CHECK(up->frozen && up->low_a->frozen && up->low_b->frozen);
    tt_param *a = g.m.lora[0].a, *b = g.m.lora[0].b;
    CHECK(!a->frozen && !b->frozen && tt_param_round(g.ctx, "*", TT_ROUND_TERNARY) > 0);
    CHECK(tt_param_rounding(g.m.lora[0].weight) == TT_ROUND_TERNARY);
    CHECK(!tt_param_rounding(a) && !tt_param_rounding(b) && !tt_param_rounding(up->low_a));
    CHECK(tt_param_store(a, "int8") == TT_ERR_ARGUMENT);
    CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "is a factor of another weight");
    CHECK(tt_param_low_rank(b, 1, 0) == TT_ERR_ARGUMENT);
    CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "is a factor of another weight");
    golden_close(&g);
}

static const test_case tests[] = {
    TEST_CASE(golden_lm), TEST_CASE(golden_lm_recomputed), TEST_CASE(golden_lm_on_ranks),
    TEST_CASE(factors_and_norms_of_gemma), TEST_CASE(golden_lm_bf16),
    TEST_CASE(folders_go_round), TEST_CASE(what_ends_an_answer),
    TEST_CASE(trained_models_are_saved), TEST_CASE(broken_folders),
    TEST_CASE(saves_over_older_ones), TEST_CASE(models_are_not_saved_beside_an_adapter),
    TEST_CASE(rotary_bases_are_saved_in_both_spellings), TEST_CASE(weights_of_pytorch_are_named),
    TEST_CASE(configs), TEST_CASE(shapes_are_kept), TEST_CASE(patterns_are_kept),
    TEST_CASE(members_that_are_not_saved_again),
    TEST_CASE(sized_models), TEST_CASE(new_models), TEST_CASE(allocation_failures),
    TEST_CASE(greedy_tokens), TEST_CASE(alibi_of_a_long_sequence),
    TEST_CASE(cached_scores), TEST_CASE(sampled_shares), TEST_CASE(sampled_from_equals),
    TEST_CASE(sampled_texts), TEST_CASE(continued_texts), TEST_CASE(samples_while_training),
    TEST_CASE(samples_while_ranks_train), TEST_CASE(generation_errors),
    TEST_CASE(golden_lora), TEST_CASE(adapters_go_round), TEST_CASE(new_adapters),
    TEST_CASE(adapters_that_are_refused),
    TEST_CASE(refused_merges_change_nothing), TEST_CASE(adapters_beside_factors),
};

int main(int argc, char **argv)
{
    tt__limit_tensor_least = 1; /* tensor ranks divide these small layers, too */
    return test_main(argc, argv, tests, TEST_COUNT(tests));
}
