/* Heads and embeddings of BERT and its kin, and decoders that classify texts, compared with transformers and
   sentence-transformers (tests/golden/heads). TINYTRAIN_TEST_VERBOSE=1 prints the measured differences. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

/* The folders of heads that make_heads.py writes. */
static const struct head_row { const char *name; tt_task task; int outputs; } heads[] = {
    {"distilbert_tags", TT_TASK_TAGS, 5},    {"bert_tags", TT_TASK_TAGS, 5},
    {"roberta_tags", TT_TASK_TAGS, 5},       {"xlm_roberta_tags", TT_TASK_TAGS, 5},
    {"camembert_tags", TT_TASK_TAGS, 5},     {"albert_tags", TT_TASK_TAGS, 5},
    {"big_bird_tags", TT_TASK_TAGS, 5},      {"bert_labels", TT_TASK_LABELS, 4},
    {"roberta_labels", TT_TASK_LABELS, 3},   {"distilbert_scores", TT_TASK_SCORES, 1},
    {"albert_scores", TT_TASK_SCORES, 3},    {"gpt2_classes", TT_TASK_CLASS, 3},
    {"llama_scores", TT_TASK_SCORES, 1},     {"qwen3_labels", TT_TASK_LABELS, 3},
    {"gemma3_classes", TT_TASK_CLASS, 4},    {"modern_tags", TT_TASK_TAGS, 5},
    {"modern_classes", TT_TASK_CLASS, 4},    {"modern_biases_scores", TT_TASK_SCORES, 2},
    {"distilbert_masked_lm", TT_TASK_MASKED_LM, 0}, {"bert_masked_lm", TT_TASK_MASKED_LM, 0},
    {"roberta_masked_lm", TT_TASK_MASKED_LM, 0}, {"xlm_roberta_masked_lm", TT_TASK_MASKED_LM, 0},
    {"camembert_masked_lm", TT_TASK_MASKED_LM, 0}, {"albert_masked_lm", TT_TASK_MASKED_LM, 0},
    {"big_bird_masked_lm", TT_TASK_MASKED_LM, 0}, {"modern_masked_lm", TT_TASK_MASKED_LM, 0},
    {"modern_biases_masked_lm", TT_TASK_MASKED_LM, 0}};

typedef struct golden {
    test_allocator a;
    test_log log;
    tt_context *ctx;
    tt_safetensors *file;
    tt_bert m;
    tt_lm lm; /* the model, if lm.ctx is not NULL */
    char folder[1024];
} golden;

enum { ROWS = 128, SEQS = 8, WIDTH = 37 }; /* WIDTH: most outputs, the size of the vocabulary */
typedef struct batch_data {
    int32_t ids[ROWS], positions[ROWS], types[ROWS], seq_start[SEQS + 1], tags[ROWS];
    int32_t labels[SEQS];
    float values[SEQS * WIDTH];
    int32_t masked[ROWS], targets[ROWS];
    tt_array arrays[2];
} batch_data;

/* Returns a folder of tests/golden/heads. The path is valid for the next seven calls, as test_path's. */
static const char *folder_of(const char *name) { return test_path(TEST_GOLDEN("heads"), name); }

/* Reads a tensor of golden.safetensors. Returns the number of its elements; -1: the file has no such
   tensor. */
static int64_t read_golden(const golden *g, const char *name, void *to, size_t capacity)
{
    const int k = tt_safetensors_find(g->file, name);
    if (k < 0) return -1;
    const size_t bytes = tt_safetensors_info(g->file, k)->bytes;
    if (!CHECK(bytes <= capacity && tt_safetensors_read(g->file, k, 0, bytes, to) == TT_OK)) exit(2);
    return (int64_t)(bytes / 4);
}

static bool decodes(const char *name)
{
    static const char *const kinds[] = {"gpt2_*", "llama_*", "qwen3_*", "gemma3_*"};
    for (int k = 0; k < TEST_COUNT(kinds); k++) if (tt__match(kinds[k], name)) return true;
    return false;
}

static tt_status load(golden *g, const char *folder, bool decoder, const tt_head *head)
{
    memset(&g->lm, 0, sizeof g->lm);
    memset(&g->m, 0, sizeof g->m);
    return decoder ? tt_lm_load_head(g->ctx, &g->lm, folder, head)
                   : tt_bert_load_head(g->ctx, &g->m, folder, head);
}

static tt_status save(const golden *g, const char *folder)
{
    return g->lm.ctx ? tt_lm_save(&g->lm, folder) : tt_bert_save(&g->m, folder);
}

static tt_model model_of(const golden *g) { return g->lm.ctx ? tt_lm_model(&g->lm) : tt_bert_model(&g->m); }

/* Checks that the model has the head of a row, and that no part of the head is new. */
static void check_head(const golden *g, const struct head_row *row)
{
    const tt_model model = model_of(g);
    CHECK(!g->log.warnings && !(g->lm.ctx ? g->lm.new_head : g->m.new_head));
    CHECK(model.task == row->task && model.classes == row->outputs);
}

static bool golden_open(golden *g, const char *name, const tt_head *head)
{
    g->ctx = test_open_logged(&g->a, &g->log);
    memset(&g->log, 0, sizeof g->log); /* drops the warning about how the program was built */
    snprintf(g->folder, sizeof g->folder, "%s", folder_of(name));
    if (!CHECK(load(g, g->folder, decodes(name), head) == TT_OK)) {
        fprintf(stderr, "%s\n", tt_error(g->ctx));
        return false;
    }
    g->file = tt_safetensors_open(g->ctx, test_path(g->folder, "golden.safetensors"));
    return CHECK(g->file != NULL);
}

static void golden_close(golden *g)
{
    tt_safetensors_close(g->file);
    tt_bert_free(&g->m);
    tt_lm_free(&g->lm);
    TEST_CLOSE(g->ctx, &g->a);
}

static tt_batch golden_batch(const golden *g, int k, batch_data *d)
{
    char name[64];
    tt_batch b;
    memset(&b, 0, sizeof b);
    snprintf(name, sizeof name, "batch%d.input_ids", k);
    b.rows = (int)read_golden(g, name, d->ids, sizeof d->ids);
    snprintf(name, sizeof name, "batch%d.token_type_ids", k);
    read_golden(g, name, d->types, sizeof d->types);
    snprintf(name, sizeof name, "batch%d.seq_start", k);
    b.seqs = (int)read_golden(g, name, d->seq_start, sizeof d->seq_start) - 1;
    for (int s = 0; s < b.seqs; s++)
        for (int32_t r = d->seq_start[s]; r < d->seq_start[s + 1]; r++) d->positions[r] = r - d->seq_start[s];
    snprintf(name, sizeof name, "batch%d.tags", k);
    if (read_golden(g, name, d->tags, sizeof d->tags) > 0) b.tags = d->tags;
    snprintf(name, sizeof name, "batch%d.label_values", k);
    if (read_golden(g, name, d->values, sizeof d->values) > 0) {
        b.label_values = d->values;
        b.values = model_of(g).classes;
    }
    snprintf(name, sizeof name, "batch%d.labels", k);
    if (read_golden(g, name, d->labels, sizeof d->labels) > 0) b.labels = d->labels;
    snprintf(name, sizeof name, "batch%d.masked", k);
    const int64_t masked = read_golden(g, name, d->masked, sizeof d->masked);
    snprintf(name, sizeof name, "batch%d.targets", k);
    if (read_golden(g, name, d->targets, sizeof d->targets) > 0) {
        const tt_array arrays[] = {{"masked", d->masked, masked}, {"targets", d->targets, masked}};
        memcpy(d->arrays, arrays, sizeof arrays);
        b.arrays = d->arrays;
        b.n_arrays = 2;
    }
    b.ids = d->ids;
    b.positions = d->positions;
    b.types = d->types;
    b.seq_start = d->seq_start;
    b.last_of_step = true;
    return b;
}

static tt_train_options golden_options(const char *precision) /* options as in make_heads.py */
{
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.schedule.lr = 1e-3f;
    o.compile.precision = precision;
    o.max_seqs = SEQS;
    o.max_tokens = ROWS;
    return o;
}

static tt_trainer *trainer_of(golden *g, const tt_train_options *o)
{
    tt_model model = model_of(g);
    tt_trainer *r = tt_trainer_new(g->ctx, &model, o);
    if (!CHECK(r != NULL)) fprintf(stderr, "%s\n", tt_error(g->ctx));
    return r;
}

/* Returns the larger of two errors; NaN is the largest. */
static double worse(double a, double b) { return b <= a || a != a ? a : b; }

static double difference(const float *a, const float *b, int64_t n)
{
    double max = 0;
    for (int64_t k = 0; k < n; k++) max = worse(max, fabs((double)a[k] - b[k]));
    return max;
}

/* Saves the model, and checks that the saved folder has the golden folder's tensors and the golden folder's
   class name ("architectures" in config.json), and that loading gives the same model. */
static void check_saved(golden *g, const struct head_row *row)
{
    char text[64];
    golden again;
    size_t n;
    const char *folder = test_folder();
    CHECK(save(g, folder) == TT_OK);
    again.ctx = test_open_logged(&again.a, &again.log);
    memset(&again.log, 0, sizeof again.log);
    CHECK(load(&again, folder, g->lm.ctx != NULL, NULL) == TT_OK);
    check_head(&again, row);
    tt_safetensors *file = tt_safetensors_open(again.ctx, test_path(folder, "model.safetensors"));
    tt_safetensors *first = tt_safetensors_open(again.ctx, test_path(g->folder, "model.safetensors"));
    REQUIRE(file && first);
    CHECK(tt_safetensors_count(file) == tt_safetensors_count(first));
    for (int k = 0; k < tt_safetensors_count(first); k++) {
        const tt_tensor_info *x = tt_safetensors_info(first, k);
        const int j = tt_safetensors_find(file, x->name);
        if (!CHECK(j >= 0)) fprintf(stderr, "%s: no '%s'\n", row->name, x->name);
        else CHECK(tt_safetensors_info(file, j)->ndim == x->ndim &&
                   memcmp(tt_safetensors_info(file, j)->dims, x->dims,
                          sizeof *x->dims * (size_t)x->ndim) == 0);
    }
    for (int k = 0; k < g->ctx->n_params; k++) {
        const tt_param *p = g->ctx->params[k];
        float *old = test_values(p), *now = test_values(again.ctx->params[k]);
        CHECK(memcmp(old, now, sizeof *old * (size_t)tt_param_size(p)) == 0);
        free(old);
        free(now);
    }
    char *mine = test_read(test_path(folder, "config.json"), &n);
    char *theirs = test_read(test_path(g->folder, "config.json"), &n);
    char *class_name = theirs ? strstr(theirs, "\"architectures\": [") : NULL;
    REQUIRE(mine && class_name && sscanf(class_name, "\"architectures\": [ \"%60[A-Za-z0-9]\"", text) == 1);
    strcat(text, "\"");
    CHECK(strstr(mine, text) != NULL);
    free(mine);
    free(theirs);
    tt_safetensors_close(file);
    tt_safetensors_close(first);
    tt_bert_free(&again.m);
    tt_lm_free(&again.lm);
    TEST_CLOSE(again.ctx, &again.a);
}

/* Logits, the losses of 20 steps of AdamW, and saved folders equal those of transformers. */
TEST(heads_as_in_transformers)
{
    for (int k = 0; k < TEST_COUNT(heads); k++) {
        golden g;
        batch_data d;
        float losses[20], mine[ROWS * WIDTH], logits[ROWS * WIDTH];
        double max = 0;
        tt_stats stats;
        if (!golden_open(&g, heads[k].name, NULL)) return;
        check_head(&g, &heads[k]);
        const bool tags = heads[k].task == TT_TASK_TAGS, masked = heads[k].task == TT_TASK_MASKED_LM;
        tt_train_options o = golden_options("32-true");
        tt_batch b = golden_batch(&g, 0, &d);
        const int64_t n = read_golden(&g, "logits", logits, sizeof logits);
        CHECK(n == (masked ? 3 * WIDTH : (int64_t)(tags ? b.rows : b.seqs) * heads[k].outputs));
        o.compile.train = !masked; /* no logits of masked tokens exist as a whole in training */
        o.max_masked = masked ? 3 : 0;
        b.n_arrays = masked; /* predictions need no targets */
        tt_trainer *r = trainer_of(&g, &o);
        CHECK(tt_forward(r, &b, mine, TEST_COUNT(mine)) == TT_OK);
        if (masked) {
            tt_trainer_free(r);
            o.compile.train = true;
            o.max_masked = 0;
            r = trainer_of(&g, &o);
            CHECK(tt_forward(r, &b, mine, TEST_COUNT(mine)) == TT_ERR_ARGUMENT);
            CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "the model has no output");
        }
        const double error = difference(mine, logits, n);
        CHECK_NEAR(error, 0, 3e-6);
        CHECK(read_golden(&g, "losses", losses, sizeof losses) == 20);
        for (int step = 0; step < 20; step++) {
            b = golden_batch(&g, step, &d);
            CHECK(tt_train_batch(r, &b, &stats, NULL) == TT_OK);
            max = worse(max, fabs(stats.loss - losses[step]));
            int counted = tags ? 0 : b.seqs;
            for (int j = 0; j < b.rows && tags; j++) counted += d.tags[j] >= 0;
            if (masked) counted = (int)b.arrays[0].rows;
            CHECK(stats.targets == counted);
        }
        CHECK_NEAR(max, 0, 1e-5);
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  %-18s logits within %.1e, losses of 20 steps within %.1e\n", heads[k].name, error,
                   max);
        check_saved(&g, &heads[k]);
        tt_trainer_free(r);
        golden_close(&g);
    }
}

/* In other precisions the losses of 20 steps are near those of the reference. */
TEST(heads_in_other_precisions)
{
    static const char *const precisions[] = {"bf16-mixed", "16-mixed", "bf16-true"};
    for (int k = 0; k < TEST_COUNT(heads) * TEST_COUNT(precisions); k++) {
        golden g;
        batch_data d;
        float losses[20];
        double max = 0;
        tt_stats stats;
        if (!golden_open(&g, heads[k / 3].name, NULL)) return;
        tt_train_options o = golden_options(precisions[k % 3]);
        o.compile.loss_scale.init = 1024; /* small enough that no step is skipped */
        tt_trainer *r = trainer_of(&g, &o);
        read_golden(&g, "losses", losses, sizeof losses);
        for (int step = 0; step < 20; step++) {
            tt_batch b = golden_batch(&g, step, &d);
            CHECK(tt_train_batch(r, &b, &stats, NULL) == TT_OK);
            max = worse(max, fabs(stats.loss - losses[step]) / losses[step]);
        }
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  %-18s %-10s losses within %.1e\n", heads[k / 3].name, precisions[k % 3], max);
        CHECK_NEAR(max, 0, 0.1);
        tt_trainer_free(r);
        golden_close(&g);
    }
}

/* Computes the losses of 8 steps of two micro-batches each. Returns false if a step failed. */
static bool losses_of(const char *name, const tt_train_options *o, double losses[8])
{
    golden g;
    batch_data d;
    tt_stats stats;
    bool updated = true;
    if (!golden_open(&g, name, NULL)) return false;
    tt_trainer *r = trainer_of(&g, o);
    for (int k = 0; k < 16 && r && updated; k++) {
        tt_batch b = golden_batch(&g, k, &d);
        b.last_of_step = k % 2 == 1;
        if (!CHECK(tt_train_batch(r, &b, &stats, &updated) == TT_OK))
            fprintf(stderr, "%s\n", tt_error(g.ctx));
        CHECK(updated == b.last_of_step);
        updated = updated || k % 2 == 0;
        losses[k / 2] = stats.loss;
    }
    tt_trainer_free(r);
    golden_close(&g);
    return r != NULL;
}

/* Data ranks, shards, stages, recompute and offload change no loss of any head, except for rounding: ALBERT's
   stages share parameters, so gradients are summed in another order than on one rank. */
TEST(heads_on_several_ranks)
{
    for (int k = 0; k < TEST_COUNT(heads); k++) {
        double one[8] = {0}, other[8] = {0};
        for (int way = 0; way < 6; way++) {
            tt_train_options o = golden_options("32-true");
            const bool data = way == 1 || way == 2; /* two data ranks share the micro-batches */
            o.compile.accumulate = !data;
            o.compile.device = data || way == 3 ? "cpu*2" : "cpu";
            o.compile.parallel.groups = 2;
            if (way == 2) o.compile.parallel.zero = 3;
            if (way == 3) o.compile.parallel.pipeline = 2;
            if (way == 4) o.compile.recompute = "blocks";
            if (way == 5) o.compile.offload = "activations";
            if (!losses_of(heads[k].name, &o, way ? other : one)) return;
            for (int step = 0; step < 8 && way; step++)
                if (!CHECK_NEAR(other[step], one[step], 1e-6 * one[step]))
                    fprintf(stderr, "%s, way %d, step %d\n", heads[k].name, way, step);
        }
    }
}

/* Predictions are, by task, the softmax of the logits, the sigmoid of the logits, or the logits. Predictions
   need no targets. */
TEST(predictions_of_tasks)
{
    for (int k = 0; k < TEST_COUNT(heads); k++) {
        golden g;
        batch_data d;
        float logits[ROWS * WIDTH], mine[ROWS * WIDTH];
        if (!golden_open(&g, heads[k].name, NULL)) return;
        tt_train_options o = golden_options("32-true");
        o.compile.train = false;
        tt_trainer *r = trainer_of(&g, &o);
        tt_batch b = golden_batch(&g, 0, &d);
        b.tags = NULL;
        b.label_values = NULL;
        const int classes = heads[k].outputs;
        const int64_t n = read_golden(&g, "logits", logits, sizeof logits);
        if (heads[k].task == TT_TASK_MASKED_LM) {
            CHECK(tt_predict(r, &b, mine) == TT_ERR_ARGUMENT);
            CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "use tt_forward for other models");
            tt_trainer_free(r);
            golden_close(&g);
            continue;
        }
        CHECK(tt_predict(r, &b, mine) == TT_OK);
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            const double x = logits[j];
            for (int c = 0; c < classes; c++) sum += exp(logits[j / classes * classes + c]);
            const bool shares = heads[k].task == TT_TASK_TAGS || heads[k].task == TT_TASK_CLASS;
            CHECK_NEAR(mine[j], shares                            ? exp(x) / sum
                                : heads[k].task == TT_TASK_LABELS ? 1 / (1 + exp(-x))
                                                                  : x, 3e-6);
        }
        CHECK(tt_confusion(r, NULL, NULL, NULL) == TT_ERR_ARGUMENT);
        if (heads[k].task != TT_TASK_CLASS)
            CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "tt_confusion needs a model that predicts the class of each");
        if (heads[k].task == TT_TASK_TAGS) {
            CHECK(tt_predict_text(r, NULL, "a", NULL, mine) == TT_ERR_ARGUMENT);
            CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "predicts a tag of each token");
        }
        tt_trainer_free(r);
        golden_close(&g);
    }
}

/* A number that is not finite is reported with its sequence or token. */
TEST(predictions_that_are_not_finite)
{
    static const char *const names[] = {"bert_tags", "bert_labels", "albert_scores"};
    for (int k = 0; k < TEST_COUNT(names); k++) {
        golden g;
        batch_data d;
        float mine[ROWS * WIDTH], bias[WIDTH] = {0};
        if (!golden_open(&g, names[k], NULL)) return;
        tt_train_options o = golden_options("32-true");
        o.compile.train = false;
        bias[1] = INFINITY;
        CHECK(tt_param_set(g.m.classifier_b, bias) == TT_OK);
        tt_trainer *r = trainer_of(&g, &o);
        tt_batch b = golden_batch(&g, 0, &d);
        CHECK(tt_predict(r, &b, mine) == TT_ERR_NUMERIC);
        CHECK_ERROR(g.ctx, TT_ERR_NUMERIC, k ? "the prediction for sequence 0 is not finite"
                                             : "the prediction for token 0 is not finite");
        tt_trainer_free(r);
        golden_close(&g);
    }
}

/* The body of a folder loads for any task. The classifier is new if the folder has none, if the folder's
   classifier is for tokens instead of sequences, or if the number of outputs differs. */
TEST(folders_for_other_tasks)
{
    static const struct {
        const char *name;
        tt_head head;
        int outputs;         /* expected number of outputs */
        const char *warning; /* NULL: the classifier is that of the folder */
    } rows[] = {
        {"bert_labels", {TT_TASK_SCORES, 0}, 4, NULL},
        {"bert_labels", {TT_TASK_CLASS, 4}, 4, NULL},
        {"bert_labels", {TT_TASK_CLASS, 3}, 3, "has 4 classes, but 3 are requested: 'classifier.weight', "},
        {"bert_labels", {TT_TASK_TAGS, 0}, 4,
         "has a classifier for another task: 'classifier.weight', 'classifier.bias' start with new"},
        {"bert_tags", {TT_TASK_CLASS, 5}, 5, "has no 'bert.pooler.dense.weight', 'bert.pooler.dense.bias'"},
        {"roberta_labels", {TT_TASK_TAGS, 3}, 3, "has no 'classifier.weight', 'classifier.bias'"},
        {"roberta_tags", {TT_TASK_LABELS, 5}, 5, "has no 'classifier.dense.weight', 'classifier.dense.bias', "
         "'classifier.out_proj.weight'"},
        {"albert_scores", {TT_TASK_EMBED, 0}, 0, NULL},
        {"embed_mean", {TT_TASK_TAGS, 7}, 7, "has no 'classifier.weight'"},
        {"embed_cls", {TT_TASK_CLASS, 2}, 2, "has no 'classifier.dense.weight'"},
        {"roberta_labels", {TT_TASK_EMBED, 0}, 0, NULL}, /* the new pooler is not used */
        {"roberta_masked_lm", {TT_TASK_EMBED, 0}, 0, NULL},
        {"bert_masked_lm", {TT_TASK_CLASS, 2}, 2, "has no 'bert.pooler.dense.weight'"},
        {"big_bird_tags", {TT_TASK_MASKED_LM, 0}, 0, "has no 'cls.predictions.transform.dense.weight'"},
        {"distilbert_scores", {TT_TASK_MASKED_LM, 0}, 0, "has no 'vocab_transform.weight'"},
    };
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a;
        test_log log;
        tt_bert m;
        tt_context *ctx = test_open_logged(&a, &log);
        CHECK(tt_bert_load_head(ctx, &m, folder_of(rows[k].name), &rows[k].head) == TT_OK);
        CHECK(m.config.task == rows[k].head.task && m.config.classes == rows[k].outputs);
        CHECK(m.new_head == (rows[k].warning != NULL));
        CHECK(!m.classifier_w == (rows[k].outputs == 0));
        if (rows[k].warning && !CHECK(strstr(log.text, rows[k].warning) != NULL))
            printf("%s: %s\n", rows[k].name, log.text);
        CHECK(rows[k].outputs == 0 || tt_param_size(m.classifier_b) == rows[k].outputs);
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* Copies a golden folder's model.safetensors and config.json to a new folder. In the copy of config.json,
   `to` replaces `from`. */
static const char *edited(const char *name, const char *from, const char *to)
{
    static char folder[1024];
    char path[1100];
    size_t n;
    snprintf(folder, sizeof folder, "%s", test_folder());
    snprintf(path, sizeof path, "%s/model.safetensors", folder_of(name));
    char *model = test_read(path, &n);
    if (!model) exit(2);
    test_write(test_path(folder, "model.safetensors"), model, n);
    snprintf(path, sizeof path, "%s/config.json", folder_of(name));
    char *config = test_read(path, &n), *at = config ? strstr(config, from) : NULL;
    if (!at) exit(2);
    char *text = (char *)calloc(n + strlen(to) + 1, 1);
    snprintf(text, n + strlen(to) + 1, "%.*s%s%.*s", (int)(at - config), config, to,
             (int)(n - (size_t)(at - config) - strlen(from)), at + strlen(from));
    test_write(test_path(folder, "config.json"), text, strlen(text));
    free(model);
    free(config);
    free(text);
    return folder;
}

TEST(heads_that_folders_name)
{
    for (int k = 0; k < TEST_COUNT(heads); k++) {
        test_allocator a;
        tt_head head;
        long calls = 0;
        if (decodes(heads[k].name)) continue;
        for (long n = 0; n <= calls; n++) {
            tt_context *ctx = test_open(&a);
            const long before = a.calls;
            a.fail_at = n ? before + n : 0;
            const tt_status status = tt_bert_read_head(ctx, folder_of(heads[k].name), &head);
            const bool masked = heads[k].task == TT_TASK_MASKED_LM; /* the folder has no classifier */
            CHECK(status == (n ? TT_ERR_MEMORY : TT_OK) &&
                  (n || head.task == (masked ? TT_TASK_CLASS : heads[k].task)) &&
                  head.outputs == (n ? 0 : heads[k].outputs));
            if (!n) calls = a.calls - before;
            TEST_CLOSE(ctx, &a);
        }
        CHECK(calls > 0);
    }
    test_allocator a;
    tt_head head = {TT_TASK_TAGS, 3};
    tt_context *ctx = test_open(&a);
    CHECK(tt_bert_read_head(ctx, "/nowhere", &head) == TT_ERR_FILE && head.outputs == 0);
    CHECK(tt_bert_read_head(ctx, folder_of("embed_mean"), &head) == TT_OK && head.outputs == 0 &&
          head.task == TT_TASK_CLASS);
    TEST_CLOSE(ctx, &a);
}

TEST(tasks_of_a_config)
{
    static const struct { const char *name, *from, *to; tt_task task; const char *error; } rows[] = {
        {"bert_labels", "\"multi_label_classification\"", "\"single_label_classification\"", TT_TASK_CLASS,
         NULL},
        {"bert_labels", "\"multi_label_classification\"", "null", TT_TASK_CLASS, NULL},
        {"bert_labels", "\"multi_label_classification\"", "\"ranking\"", TT_TASK_CLASS,
         "problem_type is 'ranking'; only 'single_label_classification', 'multi_label_classification' and "
         "'regression' are supported"},
        /* a model of 1 output gives scores */
        {"distilbert_scores", "\"regression\"", "null", TT_TASK_SCORES, NULL},
        /* a model of 3 outputs gives classes */
        {"albert_scores", "\"regression\"", "null", TT_TASK_CLASS, NULL},
        {"bert_labels", "\"architectures\"", "\"others\"", TT_TASK_LABELS, NULL},
        {"bert_tags", "\"architectures\": [", "\"architectures\": [],\"others\": [", TT_TASK_CLASS, NULL},
        {"bert_masked_lm", "\"architectures\": [", "\"architectures\": [],\"others\": [", TT_TASK_CLASS,
         NULL},
        {"bert_masked_lm", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false", TT_TASK_CLASS,
         "tie_word_embeddings is false, but a model of TT_TASK_MASKED_LM uses the word embedding as the "
         "weight"},
        {"modern_masked_lm", "\"decoder_bias\": true", "\"decoder_bias\": false", TT_TASK_CLASS,
         "decoder_bias is false, but the logits of a model of TT_TASK_MASKED_LM have a bias"},
    };
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a;
        test_log log;
        tt_bert m;
        tt_context *ctx = test_open_logged(&a, &log);
        const tt_status status = tt_bert_load(ctx, &m, edited(rows[k].name, rows[k].from, rows[k].to), 0);
        CHECK(status == (rows[k].error ? TT_ERR_UNSUPPORTED : TT_OK));
        if (rows[k].error) CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, rows[k].error);
        else CHECK(m.config.task == rows[k].task);
        tt_head head;
        const tt_status read = tt_bert_read_head(ctx, edited(rows[k].name, rows[k].from, rows[k].to), &head);
        /* Whether the edited config.json still says that the folder has a classifier. */
        const bool named = strstr(rows[k].to, "architectures") == NULL;
        if (strstr(rows[k].name, "masked_lm")) /* a folder without a classifier */
            CHECK(read == TT_OK && !head.task && !head.outputs);
        else
            CHECK(read == status && (status != TT_OK || head.task == rows[k].task) &&
                  head.outputs == (status == TT_OK && named ? m.config.classes : 0));
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

/* With labels, class_weights multiply the loss terms of the labels that apply (PyTorch's pos_weight). With
   tags, class_weights multiply the losses of tags. label_smoothing and class_weights of scores are
   refused. */
TEST(weights_and_smoothing_of_tasks)
{
    static const float weights[4] = {0.5f, 2, 3, 1.25f};
    golden g;
    batch_data d;
    float logits[ROWS * WIDTH];
    double sum = 0;
    tt_stats stats;
    if (!golden_open(&g, "bert_labels", NULL)) return;
    tt_train_options o = golden_options("32-true");
    o.class_weights = weights;
    tt_trainer *r = trainer_of(&g, &o);
    tt_batch b = golden_batch(&g, 0, &d);
    const int64_t n = read_golden(&g, "logits", logits, sizeof logits);
    for (int64_t k = 0; k < n; k++) {
        const double p = 1 / (1 + exp(-(double)logits[k])), y = d.values[k];
        sum -= weights[k % 4] * y * log(p) + (1 - y) * log(1 - p);
    }
    CHECK(tt_train_batch(r, &b, &stats, NULL) == TT_OK);
    CHECK_NEAR(stats.loss, sum / (double)n, 1e-6);
    tt_trainer_free(r);
    o.class_weights = NULL;
    o.label_smoothing = 0.1f;
    tt_model model = tt_bert_model(&g.m);
    CHECK(tt_trainer_new(g.ctx, &model, &o) == NULL);
    CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "label_smoothing is 0.1, but the task has no classes to smooth");
    golden_close(&g);

    o.label_smoothing = 0;
    if (!golden_open(&g, "bert_tags", NULL)) return;
    static const float of_tags[8] = {0.5f, 2, 3, 1.25f, 0.75f, 1, 4, 0};
    const int classes = g.m.config.classes;
    o.class_weights = of_tags;
    r = trainer_of(&g, &o);
    b = golden_batch(&g, 0, &d);
    const int64_t rows = read_golden(&g, "logits", logits, sizeof logits) / classes;
    double all = 0;
    sum = 0;
    for (int64_t k = 0; k < rows; k++) {
        const float *x = logits + k * classes;
        double total = 0;
        if (b.tags[k] < 0) continue;
        for (int c = 0; c < classes; c++) total += exp((double)x[c]);
        sum += of_tags[b.tags[k]] * (log(total) - x[b.tags[k]]);
        all += of_tags[b.tags[k]];
    }
    CHECK(classes <= 8 && tt_train_batch(r, &b, &stats, NULL) == TT_OK);
    CHECK_NEAR(stats.loss, sum / all, 1e-6);
    tt_trainer_free(r);
    golden_close(&g);

    if (!golden_open(&g, "albert_scores", NULL)) return;
    o.class_weights = weights;
    model = tt_bert_model(&g.m);
    CHECK(tt_trainer_new(g.ctx, &model, &o) == NULL);
    CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "class_weights are set, but the model has no input");
    golden_close(&g);
}

/* ----------------------------------------------------------------------------------------- tasks of files */

static const char pairs[] = "text\ttext_pair\tlabel\n"
                            "good film\tbad film\tfirst\nbad film\tgood film\tsecond\n"
                            "good book\tbad book\tfirst\nbad book\tgood film\tsecond\n";
static const char labels[] = "{\"text\": \"good film\", \"label\": [\"praise\"]}\n"
                             "{\"text\": \"good book\", \"label\": [\"praise\", \"book\"]}\n"
                             "{\"text\": \"bad film\", \"label\": []}\n"
                             "{\"text\": \"bad book\", \"label\": [\"book\"]}\n";
static const char scores[] = "{\"text\": \"good film\", \"label\": [1, -1]}\n"
                             "{\"text\": \"bad film\", \"label\": [-1.5, -1]}\n"
                             "{\"text\": \"good book\", \"label\": [1, 0.5]}\n";

static const char tags[] = "good O\nfilm THING\n\nthe O\nbook THING\nwas O\nbad O\n\nfilm THING\n";

/* A tokenizer of the words in the files above. */
static tt_tokenizer *words_tokenizer(tt_context *ctx)
{
    static const char vocab[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ngood\nbad\nfilm\nbook\nthe\nwas\n";
    const char *folder = test_folder();
    test_write(test_path(folder, "vocab.txt"), vocab, strlen(vocab));
    return tt_tokenizer_load(ctx, folder);
}

/* Trains a small model of a kind, a tt_bert_kind or DECODER, on a file, and returns its loss afterwards.
   *accuracy: the share of targets that the model predicts right. */
enum { DECODER = -1 };
static double trained_on(int kind, tt_task task, const char *file, const char *text, double *accuracy)
{
    test_allocator a;
    tt_bert m;
    tt_lm lm;
    tt_stats stats;
    tt_bert_config c = tt_bert_config_default((tt_bert_kind)(kind == DECODER ? TT_BERT : kind));
    tt_table_options table = tt_table_options_default();
    tt_loader_options how = tt_loader_options_default();
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = words_tokenizer(ctx);
    table.task = task;
    const char *path = test_write(test_path(test_folder(), file), text, strlen(text));
    tt_dataset *d = tt_dataset_table(ctx, path, NULL, NULL, 0, &table);
    if (!d || !k) fprintf(stderr, "%s\n", tt_error(ctx));
    if (!CHECK(d && k)) return 1;
    const bool decoder = kind == DECODER;
    if (decoder) {
        tt_lm_config l = tt_lm_config_sized("llama", 2, 24, 3);
        l.task = task;
        l.vocab_size = 11;
        l.max_positions = 24;
        l.classes = tt_dataset_classes(d);
        l.initializer_range = 0.2f;
        CHECK(tt_lm_new(ctx, &lm, &l) == TT_OK && tt_lm_name_classes(&lm, d) == TT_OK);
    } else {
        c.task = task;
        c.vocab_size = 11;
        c.embedding_size = 10;
        c.hidden_size = 24;
        c.layers = 2;
        c.heads = 3;
        c.intermediate_size = 40;
        c.max_positions = 24;
        c.classes = tt_dataset_classes(d);
        c.initializer_range = 0.2f;
        c.dropout = c.attention_dropout = c.classifier_dropout = 0;
        CHECK(tt_bert_new(ctx, &m, &c) == TT_OK && tt_bert_name_classes(&m, d) == TT_OK);
    }
    CHECK(strcmp((decoder ? lm.class_names : m.class_names)[0], tt_dataset_class_name(d, 0)) == 0);
    how.batch = 4;
    tt_loader *l = tt_loader_new(ctx, d, k, &how);
    tt_train_options o = golden_options("32-true");
    o.schedule.lr = 5e-3f;
    tt_model model = decoder ? tt_lm_model(&lm) : tt_bert_model(&m);
    tt_trainer *r = tt_trainer_new(ctx, &model, &o);
    if (!CHECK(l && r)) fprintf(stderr, "%s\n", tt_error(ctx));
    for (int epoch = 0; epoch < 60 && r; epoch++) {
        tt_batch b;
        CHECK(tt_loader_seek(l, epoch, 0) == TT_OK);
        while (tt_loader_next(l, &b)) CHECK(tt_train_batch(r, &b, &stats, NULL) == TT_OK);
    }
    if (!CHECK(tt_evaluate(r, tt_loader_source(l), &stats) == TT_OK)) fprintf(stderr, "%s\n", tt_error(ctx));
    *accuracy = stats.correct / stats.targets;
    if (task == TT_TASK_CLASS) { /* the class tells which text of the pair is good */
        float p[2];
        CHECK(tt_predict_text(r, k, "good film", "bad film", p) == TT_OK && p[0] > 0.9f);
        CHECK(tt_predict_text(r, k, "bad film", "good film", p) == TT_OK && p[1] > 0.9f);
    }
    tt_trainer_free(r);
    tt_loader_free(l);
    if (decoder) tt_lm_free(&lm);
    else tt_bert_free(&m);
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
    return stats.loss;
}

/* Each task learns the few examples of its file. */
TEST(tasks_of_files)
{
    static const struct { tt_task task; const char *file, *text; } rows[] = {
        {TT_TASK_CLASS, "pairs.tsv", pairs}, {TT_TASK_LABELS, "labels.jsonl", labels},
        {TT_TASK_SCORES, "scores.jsonl", scores}, {TT_TASK_TAGS, "tags.conll", tags}};
    static const int kinds[] = {TT_BERT, TT_DISTILBERT, TT_ALBERT, DECODER};
    enum { KINDS = TEST_COUNT(kinds) };
    for (int k = 0; k < TEST_COUNT(rows) * KINDS; k++) {
        double accuracy = 0;
        const tt_task task = rows[k / KINDS].task;
        const char *file = rows[k / KINDS].file;
        if (kinds[k % KINDS] == DECODER && task == TT_TASK_TAGS) continue; /* refused */
        /* DistilBERT has no token types, but [SEP] and the positions tell the texts of a pair apart. */
        const double loss = trained_on(kinds[k % KINDS], task, file, rows[k / KINDS].text, &accuracy);
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  %s, kind %d: loss %.4f, accuracy %.2f\n", file, kinds[k % KINDS], loss, accuracy);
        CHECK(loss < 0.2 && (task == TT_TASK_SCORES || accuracy == 1));
    }
}

/* A language model's folder becomes a classifier with a new last layer. Tags are refused as its task. The
   classifier generates no text and has no adapters. Its folder may be loaded for another task. */
TEST(decoders_become_classifiers)
{
    static const char *const names[] = {"gpt2", "qwen2", "gemma3"}; /* with tied embeddings */
    const tt_head head = {TT_TASK_LABELS, 3}, tags = {TT_TASK_TAGS, 3};
    for (int k = 0; k < TEST_COUNT(names); k++) {
        test_allocator a;
        test_log log;
        tt_lm m;
        char from[1024];
        tt_context *ctx = test_open_logged(&a, &log);
        memset(&log, 0, sizeof log);
        snprintf(from, sizeof from, "%s", test_path(TEST_GOLDEN("lm"), names[k]));
        CHECK(tt_lm_load_head(ctx, &m, from, &tags) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "task is 3, but must be TT_TASK_CLASS, TT_TASK_LABELS or");
        CHECK(tt_lm_load_head(ctx, &m, from, &head) == TT_OK && m.new_head && m.score && !m.head);
        CHECK(log.warnings == 1 && strstr(log.text, "has no 'score.weight': these start with new values"));
        CHECK(tt_lm_model(&m).classes == 3 && tt_lm_model(&m).task == TT_TASK_LABELS);
        CHECK(tt_generator_new(&m, NULL) == NULL);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the model is a classifier, which predicts no tokens");
        CHECK(tt_lm_lora(&m, NULL) == TT_ERR_UNSUPPORTED);
        CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "the model is a classifier, which cannot have adapters");
        const char *folder = test_folder();
        CHECK(tt_lm_save(&m, folder) == TT_OK);
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
        static const tt_head one = {TT_TASK_CLASS, 0};
        for (int way = 0; way < 3; way++) { /* 0: the saved model; 1: for another task; 2: the original */
            ctx = test_open(&a);
            CHECK(tt_lm_load_head(ctx, &m, way == 2 ? from : folder, way == 1 ? &one : NULL) == TT_OK);
            CHECK(m.config.classes == (way == 2 ? 0 : 3) && !m.new_head);
            CHECK(m.config.task == (way ? TT_TASK_CLASS : TT_TASK_LABELS) && !m.score == (way == 2));
            if (way == 2) CHECK(tt_lm_name_classes(&m, NULL) == TT_ERR_ARGUMENT);
            if (way == 2)
                CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the model predicts tokens and has no classes: load its");
            tt_lm_free(&m);
            TEST_CLOSE(ctx, &a);
        }
    }
}

/* ModernBERT's config.json in older forms gives the same model. Values that are not supported are refused. */
TEST(configs_of_modern_bert)
{
    static const struct { const char *from, *to, *error; } rows[] = { /* error NULL: loads as before */
        {"\"layer_types\"", "\"layer_kinds\"", NULL},
        {"\"rope_parameters\": {", "\"global_rope_theta\": 160000, \"unknown\": {", NULL},
        {"\"classifier_pooling\": \"cls\"", "\"classifier_pooling\": \"max\"",
         "classifier_pooling is 'max'; only cls and mean are supported"},
        {"\"classifier_activation\": \"gelu\"", "\"classifier_activation\": \"silu\"",
         "classifier_activation is 'silu' and hidden_activation 'gelu', but only equal ones"},
        {"\"rope_type\": \"default\"", "\"rope_type\": \"yarn\"",
         "rope_type of full_attention is 'yarn'; only default"},
        {"\"layer_types\": [", "\"layer_types\": [\"sliding_attention\", ",
         "layer_types: layer 0 breaks the pattern of full attention in layer 0"},
        {"\"full_attention\",\n", "\"full_attention\", \"full_attention\",",
         "layer_types: layer 2 breaks the pattern"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a, b;
        tt_bert m, plain;
        size_t n, bytes;
        char folder[1024];
        snprintf(folder, sizeof folder, "%s", test_folder());
        char *text = test_read(test_path(folder_of("modern_classes"), "config.json"), &n);
        char *file = test_read(test_path(folder_of("modern_classes"), "model.safetensors"), &bytes);
        char *at = text ? strstr(text, rows[k].from) : NULL;
        REQUIRE(at && file);
        char *edited = (char *)malloc(n + strlen(rows[k].to) + 1);
        const int length = sprintf(edited, "%.*s%s%s", (int)(at - text), text, rows[k].to,
                                   at + strlen(rows[k].from));
        test_write(test_path(folder, "config.json"), edited, (size_t)length);
        test_write(test_path(folder, "model.safetensors"), file, bytes);
        tt_context *ctx = test_open(&a), *other = test_open(&b);
        CHECK(tt_bert_load(ctx, &plain, folder_of("modern_classes"), 0) == TT_OK);
        CHECK(plain.config.full_every == 2 && plain.config.local_attention == 4);
        if (!CHECK(tt_bert_load(other, &m, folder, 0) == (rows[k].error ? TT_ERR_UNSUPPORTED : TT_OK)))
            fprintf(stderr, "%s: %s\n", rows[k].to, tt_error(other));
        if (rows[k].error) CHECK_ERROR(other, TT_ERR_UNSUPPORTED, rows[k].error);
        else {
            tt_bert_config p = plain.config, q = m.config;
            p.activation = q.activation = NULL;
            CHECK(memcmp(&p, &q, sizeof p) == 0);
            size_t saved;
            CHECK(p.cls_token == 1 && p.sep_token == 2 && tt_bert_save(&m, folder) == TT_OK);
            char *config = test_read(test_path(folder, "config.json"), &saved);
            CHECK(config && strstr(config, "\"bos_token_id\": 1,") &&
                  strstr(config, "\"cls_token_id\": 1,") &&
                  strstr(config, "\"eos_token_id\": 2,") && strstr(config, "\"sep_token_id\": 2"));
            free(config);
        }
        free(edited);
        free(text);
        free(file);
        tt_bert_free(&m);
        tt_bert_free(&plain);
        TEST_CLOSE(ctx, &a);
        TEST_CLOSE(other, &b);
    }
}

/* A model refuses the classes of a dataset with another task. */
TEST(datasets_of_another_task)
{
    test_allocator a;
    tt_bert m;
    tt_table_options table = tt_table_options_default();
    tt_context *ctx = test_open(&a);
    table.task = TT_TASK_LABELS;
    tt_dataset *d = tt_dataset_table(ctx, test_write(test_path(test_folder(), "l.jsonl"), labels,
                                                     strlen(labels)), NULL, NULL, 0, &table);
    CHECK(d && tt_bert_load(ctx, &m, folder_of("bert_tags"), 0) == TT_OK);
    CHECK(tt_bert_name_classes(&m, d) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the dataset's task is TT_TASK_LABELS, but the model's is "
                "TT_TASK_TAGS");
    tt_bert_free(&m);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

/* --------------------------------------------------------------------------------------------- embeddings */

/* The hidden states of every layer and the embeddings equal those of transformers and
   sentence-transformers. */
TEST(embeddings_as_in_sentence_transformers)
{
    static const char *const names[] = {"embed_mean", "embed_cls"};
    for (int k = 0; k < TEST_COUNT(names); k++) {
        golden g;
        batch_data d;
        enum { LAYERS = 2, HIDDEN = 12 };
        static float states[(LAYERS + 1) * ROWS * HIDDEN], mine[ROWS * HIDDEN], embeddings[SEQS * HIDDEN];
        tt_value hidden[LAYERS + 1];
        double max = 0;
        if (!golden_open(&g, names[k], NULL)) return;
        CHECK(!g.log.warnings && !g.m.classifier_w && g.m.config.task == TT_TASK_EMBED);
        CHECK(g.m.config.pooling == (k ? TT_POOL_CLS : TT_POOL_MEAN) && g.m.config.normalize == !k);
        REQUIRE(g.m.config.layers == LAYERS && g.m.config.hidden_size == HIDDEN);
        tt_train_options o = golden_options("32-true");
        o.compile.train = false;
        tt_batch b = golden_batch(&g, 0, &d);
        const int64_t n = read_golden(&g, "embeddings", embeddings, sizeof embeddings);
        CHECK(n == b.seqs * HIDDEN);
        CHECK(read_golden(&g, "hidden", states, sizeof states) == 3 * b.rows * HIDDEN);
        tt_trainer *r = trainer_of(&g, &o);
        CHECK(tt_predict(r, &b, mine) == TT_OK);
        const double error = difference(mine, embeddings, n);
        CHECK_NEAR(error, 0, 3e-6);
        tt_trainer_free(r);

        tt_tape *t = tt_tape_new(g.ctx);
        const tt_inputs in = tt_text_inputs(t, &o);
        tt_value last = tt_bert_hidden(&g.m, t, &in, hidden);
        CHECK(last.id == hidden[LAYERS].id);
        for (int layer = 0; layer <= LAYERS; layer++) tt_output(t, hidden[layer]);
        tt_program *p = tt_compile(t, last, &o.compile);
        REQUIRE(p != NULL);
        CHECK(tt_set(p, in.ids, d.ids, b.rows) == TT_OK &&
              tt_set(p, in.positions, d.positions, b.rows) == TT_OK &&
              tt_set(p, in.types, d.types, b.rows) == TT_OK &&
              tt_set(p, in.seq_start, d.seq_start, b.seqs + 1) == TT_OK && tt_run(p, NULL) == TT_OK);
        for (int layer = 0; layer <= LAYERS; layer++) {
            CHECK(tt_get(p, hidden[layer], mine, TEST_COUNT(mine)) == TT_OK);
            max = worse(max, difference(mine, states + (size_t)layer * (size_t)b.rows * HIDDEN,
                                          (int64_t)b.rows * HIDDEN));
        }
        CHECK_NEAR(max, 0, 3e-6);
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  %s: embeddings within %.1e, hidden states within %.1e\n", names[k], error, max);
        tt_program_free(p);
        tt_tape_free(t);
        golden_close(&g);
    }
}

/* A saved folder has the files of sentence-transformers and loads as the same model. */
TEST(embedders_are_saved)
{
    for (int k = 0; k < 4; k++) {
        golden g;
        test_allocator a;
        tt_bert again;
        size_t n;
        char folder[1024];
        snprintf(folder, sizeof folder, "%s", test_folder());
        if (!golden_open(&g, "embed_mean", NULL)) return;
        g.m.config.pooling = k & 1 ? TT_POOL_CLS : TT_POOL_MEAN;
        g.m.config.normalize = (k & 2) != 0;
        g.m.config.max_length = 3 * k;
        CHECK(tt_bert_model(&g.m).max_length == (k ? 3 * k : 13));
        CHECK(tt_bert_save(&g.m, folder) == TT_OK);
        tt_context *ctx = test_open(&a);
        CHECK(tt_bert_load(ctx, &again, folder, 0) == TT_OK && again.config.task == TT_TASK_EMBED);
        CHECK(again.config.pooling == g.m.config.pooling && again.config.normalize == g.m.config.normalize);
        CHECK(again.config.max_length == (k ? 3 * k : 13) && again.config.classes == 0);
        char *config = test_read(test_path(folder, "config.json"), &n);
        CHECK(config && strstr(config, "\"BertModel\"") && !strstr(config, "id2label") &&
              !strstr(config, "problem_type"));
        free(config);
        tt_safetensors *file = tt_safetensors_open(g.ctx, test_path(folder, "model.safetensors"));
        REQUIRE(file != NULL);
        CHECK(tt_safetensors_find(file, "encoder.layer.1.output.dense.weight") >= 0 &&
              tt_safetensors_find(file, "pooler.dense.weight") >= 0);
        tt_safetensors_close(file);
        tt_bert_free(&again);
        TEST_CLOSE(ctx, &a);
        golden_close(&g);
    }
}

/* A classifier that is saved into a folder of sentence-transformers is loaded as a classifier. */
TEST(classifier_in_a_folder_of_an_embedder)
{
    golden g;
    test_allocator a;
    tt_bert m;
    char folder[1024];
    const tt_head head = {TT_TASK_LABELS, 3};
    snprintf(folder, sizeof folder, "%s", test_folder());
    if (!golden_open(&g, "embed_mean", NULL)) return;
    CHECK(tt_bert_save(&g.m, folder) == TT_OK);
    golden_close(&g);
    for (int k = 0; k < 2; k++) {
        tt_context *ctx = test_open(&a);
        CHECK(tt_bert_load_head(ctx, &m, folder, k ? NULL : &head) == TT_OK);
        CHECK(m.config.task == TT_TASK_LABELS && m.config.classes == 3 && m.new_head == !k);
        CHECK(k || tt_bert_save(&m, folder) == TT_OK);
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(embedders_without_logits)
{
    golden g;
    test_allocator a;
    tt_bert m;
    if (!golden_open(&g, "embed_mean", NULL)) return;
    tt_train_options o = golden_options("32-true");
    tt_tape *t = tt_tape_new(g.ctx);
    const tt_inputs in = tt_text_inputs(t, &o);
    tt_bert_logits(&g.m, t, &in);
    CHECK(tt_tape_status(t) == TT_ERR_ARGUMENT);
    CHECK_ERROR(g.ctx, TT_ERR_ARGUMENT, "so it has no classifier: record tt_bert_embed");
    tt_tape_free(t);
    tt_bert_config c = g.m.config;
    c.classes = 3; /* ignored: an embedder has no classifier */
    golden_close(&g);
    tt_context *ctx = test_open(&a);
    CHECK(tt_bert_new(ctx, &m, &c) == TT_OK && m.config.classes == 0 && !m.classifier_w);
    tt_bert_free(&m);
    c.task = (tt_task)9;
    c.pooling = (tt_pooling)7;
    c.max_length = -1;
    CHECK(tt_bert_new(ctx, &m, &c) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "task is 9, but must be one of tt_task; pooling is 7, but must "
                "be one of tt_pooling; max_length is -1, but must be at least 0");
    TEST_CLOSE(ctx, &a);
}

/* Old and new files of sentence-transformers are read, some modules are refused. In a row, a NULL content
   says that the folder lacks the file; a NULL `error` says that loading succeeds. */
TEST(files_of_sentence_transformers)
{
    static const char list[] = "[{\"type\": \"sentence_transformers.models.Transformer\", \"path\": \"\"}, "
                               "{\"type\": \"sentence_transformers.models.Pooling\", \"path\": \"1_P\"}]";
    static const struct { const char *modules, *pooling, *length; const char *error; } rows[] = {
        {list, "{\"pooling_mode_cls_token\": true, \"pooling_mode_mean_tokens\": false}",
         "{\"max_seq_length\": 7}", NULL},
        {list, "{\"pooling_mode\": \"cls\"}", "{\"max_seq_length\": null}", NULL},
        {list, "{\"pooling_mode\": \"cls\"}", NULL, NULL},
        {list, "{\"pooling_mode\": \"cls\"}", "{\"model_max_length\": 5}", NULL},
        {list, "{\"pooling_mode\": \"cls\"}", "{\"model_max_length\": 1000000000000000019884624838656}",
         NULL},
        {list, "{\"pooling_mode\": \"cls\"}", "{\"model_max_length\": 0}", "\"model_max_length\""},
        {list, "{\"pooling_mode\": \"max\"}", NULL, "the pooling is 'max', but only 'mean' and 'cls' are"},
        {list, "{\"pooling_mode\": \"any\"}", NULL, "the pooling is 'any', but only 'mean' and 'cls'"},
        {list, "{}", NULL, "the pooling is 'none', but only 'mean' and 'cls'"},
        {list, "{\"pooling_mode_cls_token\": true, \"pooling_mode_mean_tokens\": true}", NULL,
         "has the poolings 'mean' and 'cls'"},
        {list, NULL, NULL, "1_P/config.json'"},
        {list, "{\"pooling_mode\": \"cls\"}", "{\"max_seq_length\": 0}", "max_seq_length"},
        {"{}", "", NULL, "modules.json' is not a JSON array of modules"},
        {"[3]", "", NULL, "modules.json'"},
        {"[{\"path\": \"\"}]", "", NULL, "\"type\""},
        {"[{\"type\": \"a.Transformer\", \"path\": \"0_T\"}]", "", NULL,
         "the encoder is in the folder '0_T'"},
        {"[{\"type\": \"a.b.Dense\", \"path\": \"2_Dense\"}]", "", NULL,
         "the module is 'a.b.Dense', but only Transformer, Pooling, Dropout and Normalize are"},
        {"[{\"type\": \"a.Pooling\", \"path\": \"/etc\"}]", "{\"pooling_mode\": \"cls\"}", NULL,
         "the module's path is '/etc', but must be that of a folder in '"},
        {"[{\"type\": \"a.Pooling\", \"path\": \"../1_P\"}]", "{\"pooling_mode\": \"cls\"}", NULL,
         "the module's path is '../1_P', but must be that of a folder in '"},
        {"[{\"type\": \"a.Pooling\", \"path\": \"1_P/../../x\"}]", "{\"pooling_mode\": \"cls\"}", NULL,
         "the module's path is '1_P/../../x', but must be that of a folder in '"},
        {"[{\"type\": \"a.Pooling\", \"path\": \"C:1_P\"}]", "{\"pooling_mode\": \"cls\"}", NULL,
         "the module's path is 'C:1_P', but must be that of a folder in '"},
        {"[{\"type\": \"a.Pooling\", \"path\": \"..\\\\1_P\"}]", "{\"pooling_mode\": \"cls\"}", NULL,
         "the module's path is '..\\1_P', but must be that of a folder in '"},
    };
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a;
        test_log log;
        tt_bert m;
        char folder[1024];
        tt_context *ctx = test_open_logged(&a, &log);
        snprintf(folder, sizeof folder, "%s", edited("embed_mean", "\"bert\"", "\"bert\""));
        CHECK(mkdir(test_path(folder, "1_P"), 0700) == 0);
        test_write(test_path(folder, "modules.json"), rows[k].modules, strlen(rows[k].modules));
        if (rows[k].pooling)
            test_write(test_path(folder, "1_P/config.json"), rows[k].pooling, strlen(rows[k].pooling));
        /* Newer folders have the length in tokenizer_config.json, which counts if the other file has none. */
        const bool newer = rows[k].length && strstr(rows[k].length, "model_max_length");
        const char *older = newer ? "{\"do_lower_case\": false}" : rows[k].length;
        const char *length = newer ? rows[k].length : "{\"model_max_length\": 9}";
        if (older) test_write(test_path(folder, "sentence_bert_config.json"), older, strlen(older));
        if (newer || k == 0) test_write(test_path(folder, "tokenizer_config.json"), length, strlen(length));
        const tt_status status = tt_bert_load(ctx, &m, folder, 0);
        if (rows[k].error) {
            CHECK(status != TT_OK);
            CHECK_ERROR(ctx, status, rows[k].error);
        } else {
            CHECK(status == TT_OK && m.config.task == TT_TASK_EMBED && m.config.pooling == TT_POOL_CLS);
            CHECK(!m.config.normalize && m.config.max_length == (k == 0 ? 7 : k == 3 ? 5 : 0));
        }
        tt_bert_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

static const test_case tests[] = {
    TEST_CASE(heads_as_in_transformers), TEST_CASE(heads_in_other_precisions),
    TEST_CASE(heads_on_several_ranks),
    TEST_CASE(predictions_of_tasks), TEST_CASE(predictions_that_are_not_finite),
    TEST_CASE(folders_for_other_tasks), TEST_CASE(tasks_of_a_config), TEST_CASE(heads_that_folders_name),
    TEST_CASE(weights_and_smoothing_of_tasks), TEST_CASE(tasks_of_files),
    TEST_CASE(decoders_become_classifiers), TEST_CASE(configs_of_modern_bert),
    TEST_CASE(datasets_of_another_task),
    TEST_CASE(embeddings_as_in_sentence_transformers),
    TEST_CASE(embedders_are_saved), TEST_CASE(embedders_without_logits),
    TEST_CASE(files_of_sentence_transformers), TEST_CASE(classifier_in_a_folder_of_an_embedder),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
