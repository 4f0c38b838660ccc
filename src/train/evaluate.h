#pragma once
#include "../base/base.h"
#include "../ranks/processes.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "../compile/compile.h"
#include "../run/ranks.h"
#include "../run/inputs.h"
#include "../run/results.h"
#include "../run/step.h"
#include "trainer.h"

/* ------------------------------------------------------------------------------------------------ evaluation
   Evaluates a model, counts a confusion matrix, and predicts. All data ranks take part. */

/* Runs the batches of the first `batches` data ranks. Adds their results to *stats in the order of the
   batches, so that the sums do not depend on the number of ranks. */
static tt_status tt__evaluate_round(tt_trainer *r, int batches, tt_stats *stats)
{
    tt_stats s;
    tt_status status = tt_run(r->eval, NULL);
    if (status != TT_OK) return status;
    for (int rank = 0; rank < batches; rank++) {
        tt__rank_stats(r->eval, rank, &s);
        const double targets = stats->targets + s.targets;
        if (targets > 0) stats->loss = (stats->loss * stats->targets + s.loss * s.targets) / targets;
        stats->targets = targets;
        stats->correct += s.correct;
        stats->flops += s.flops;
    }
    stats->step = tt_trainer_steps(r);
    return TT_OK;
}

tt_status tt_evaluate_batch(tt_trainer *r, const tt_batch *b, tt_stats *stats)
{
    tt_status status = tt__none_staged(r);
    if (status == TT_OK) status = tt__set_batch(r, r->eval, 0, b, false);
    return status == TT_OK ? tt__evaluate_round(r, 1, stats) : status;
}

/* Fails if a source's micro-batches may be larger than the trainer allows. Called before the first
   micro-batch, because a large micro-batch may come late. what: the purpose of the source, for messages. */
static tt_status tt__source_fits(const tt_trainer *r, const tt_source *s, const char *what)
{
    const tt_train_options *o = &r->options;
    if (!s || !s->seek || !s->next || s->steps < 1)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "the source %s %s", what, !s ? "is NULL" :
                        s->seek && s->next ? "has tt_source.steps < 1: count the steps of an epoch" :
                        "needs the functions `seek` and `next`");
    bool tokens_fit = r->model.same_length || s->max_tokens <= o->max_tokens;
    if (tokens_fit && s->max_seqs <= o->max_seqs) return TT_OK;
    return tt__fail(r->ctx, TT_ERR_SHAPE, "micro-batches %s have up to %d sequences and %d tokens, but the "
                    "trainer has max_seqs = %d and max_tokens = %d: make the trainer for the largest of its "
                    "sources (tt_train_options_make_room)", what, s->max_seqs, s->max_tokens, o->max_seqs,
                    o->max_tokens);
}

/* Prints the facts about a source that must be equal in all processes, one per line: the settings of its
   batches, its number of steps, and hashes of its classes and examples. Each line ends with `what`, the
   purpose of the source. Prints nothing if s is NULL. */
static void tt__source_lines(const tt_source *s, const char *what, tt__text_buffer *text)
{
    char own[TT__NOTE / 4] = "";
    uint64_t classes = TT__HASH_BEGIN;
    if (!s || !s->next) return;
    if (s->describe) s->describe(s->self, own, sizeof own);
    own[sizeof own - 1] = 0;
    for (const char *line = own; *line; line += strcspn(line, "\n"), line += *line == '\n')
        tt__print(text, "%.*s %s\n", (int)strcspn(line, "\n"), line, what);
    for (int c = 0; c < s->classes; c++)
        classes = tt__hash_on(classes, s->class_names[c], strlen(s->class_names[c]) + 1);
    tt__print(text, "%lld steps %s\n%d classes with hash %016llx %s\nexamples with hash %016llx %s\n",
              (long long)s->steps, what, s->classes, (unsigned long long)classes, what,
              (unsigned long long)(s->hash ? s->hash(s->self) : 0), what);
}

/* Returns `status`, the result of a user's callback `what`. If the callback failed without an error message,
   sets a message. The caller clears the message before the callback. */
static tt_status tt__returned(tt_context *ctx, tt_status status, const char *what, int64_t epoch,
                              int64_t step)
{
    if (status == TT_OK || ctx->error[0]) return status;
    return tt__fail(ctx, status, "epoch %lld, step %lld: %s failed (%s)", (long long)epoch + 1,
                    (long long)step + 1, what, tt_status_name(status));
}

/* Sets *b to the source's next micro-batch, which belongs to step `step`, or *more to false if no micro-batch
   is left. If b is NULL, moves the source to step `step` instead. */
static tt_status tt__from_source(tt_context *ctx, const tt_source *s, int64_t epoch, int64_t step,
                                 tt_batch *b, bool *more)
{
    if (b) memset(b, 0, sizeof *b);
    ctx->error[0] = 0;
    tt_status status = b ? s->next(s->self, b, more) : s->seek(s->self, epoch, step);
    status = tt__returned(ctx, status, "the source", epoch, step);
    if (status != TT_OK) return tt__net_fail(ctx, status); /* other processes may have gone on */
    if (!b || !*more || step < s->steps) return status;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "epoch %lld: the source gives a step %lld, but tt_source.steps is "
                    "%lld: count the steps of an epoch", (long long)epoch + 1, (long long)step + 1,
                    (long long)s->steps);
}

/* Tells a source which data ranks belong to this process and need batches. */
static void tt__deal(const tt_trainer *r, const tt_source *s, bool by_step)
{
    const tt_program *p = r->eval;
    int first = 0, end = r->data;
    if (!s->deal || !r->ctx->net) return;
    while (first < end && !tt__has_data_rank(p, first)) first++;
    while (end > first && !tt__has_data_rank(p, end - 1)) end--;
    s->deal(s->self, r->data, first, end, by_step);
}

/* Returns the number of items (tokens, images, ...) of a batch: rows or, if it has no rows, sequences. */
static int tt__items(const tt_batch *b) { return b->rows ? b->rows : b->seqs; }

/* A confusion matrix, and the labels of the data ranks' current batches. */
typedef struct tt__confusion_run {
    int64_t *counts;          /* the matrix, (classes, classes) */
    float *logits;            /* logits of a batch, (max_seqs, classes) */
    int32_t *labels;          /* labels of the batches, (data ranks, max_seqs) */
    int seqs[TT__RANKS];      /* number of labels of each data rank */
} tt__confusion_run;

/* Keeps for tt__confusion_count the labels of a batch that will run on a data rank. */
static tt_status tt__confusion_set(tt_trainer *r, tt__confusion_run *c, int rank, const tt_batch *b)
{
    const int32_t *labels = b->labels;
    int64_t n = b->seqs;
    for (int k = 0; k < b->n_arrays; k++)
        if (strcmp(b->arrays[k].input, "labels") == 0)
            labels = (const int32_t *)b->arrays[k].data, n = b->arrays[k].rows;
    if (!labels || n > r->options.max_seqs)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "tt_confusion: the batch has %s",
                        labels ? "more labels than the trainer's max_seqs" : "no labels");
    memcpy(c->labels + (size_t)rank * (size_t)r->options.max_seqs, labels, sizeof *labels * (size_t)n);
    c->seqs[rank] = (int)n;
    return TT_OK;
}

/* Adds the predictions for the batches of a run to the confusion matrix. */
static tt_status tt__confusion_count(tt_trainer *r, tt__confusion_run *c, int batches)
{
    const int classes = r->model.classes;
    tt_status status = TT_OK;
    for (int rank = 0; rank < batches && status == TT_OK; rank++) {
        const size_t room = (size_t)c->seqs[rank] * (size_t)classes;
        status = tt_get_rank(r->eval, rank, r->output, c->logits, room);
        for (int s = 0; s < c->seqs[rank] && status == TT_OK; s++) {
            const float *x = c->logits + (size_t)s * (size_t)classes;
            const int32_t label = c->labels[(size_t)rank * (size_t)r->options.max_seqs + (size_t)s];
            int best = 0;
            for (int k = 1; k < classes; k++) if (x[k] > x[best]) best = k;
            if (label >= 0 && label < classes) c->counts[(int64_t)label * classes + best]++;
        }
    }
    return status;
}

/* Evaluates epoch 0 of the source; stops early if *stop is not 0. Adds to *items the items that were read.
   stop and c may be NULL. */
static tt_status tt__evaluate_source(tt_trainer *r, const tt_source *source, const volatile int *stop,
                              tt_stats *stats, double *items, tt__confusion_run *c)
{
    tt_batch b;
    bool more = true;
    int64_t step = 0;
    int set = 0; /* number of data ranks that have a batch for this round */
    memset(stats, 0, sizeof *stats);
    tt_status status = tt__none_staged(r);
    tt__deal(r, source, false);
    if (status == TT_OK) status = tt__from_source(r->ctx, source, 0, 0, NULL, NULL);
    while (status == TT_OK && more && !(stop && *stop)) {
        status = tt__from_source(r->ctx, source, 0, step, &b, &more);
        if (status == TT_OK && more) {
            if (c) status = tt__confusion_set(r, c, set, &b);
            if (status == TT_OK) status = tt__set_batch(r, r->eval, set++, &b, false);
            *items += tt__items(&b);
            step += b.last_of_step;
        }
        if (status != TT_OK || !set || (more && set < r->data)) continue;
        status = tt__evaluate_round(r, set, stats);
        if (c && status == TT_OK) status = tt__confusion_count(r, c, set);
        set = 0;
    }
    if (set) tt__forget_inputs(r->eval); /* the round was stopped or failed */
    if (status != TT_OK || (stop && *stop) || stats->targets > 0) return status;
    return tt__fail(r->ctx, TT_ERR_ARGUMENT, "the source to evaluate gives no target that counts (all are "
                    "ignored or have weight 0): check the labels");
}

static tt_status tt__evaluate_all(tt_trainer *r, const tt_source *source, tt_stats *stats,
                                  tt__confusion_run *c)
{
    double items = 0;
    memset(stats, 0, sizeof *stats);
    tt_status status = tt__source_fits(r, source, "to evaluate");
    char lines[TT__NOTE] = {0};
    tt__text_buffer text = {lines, sizeof lines, 0};
    if (r->ctx->net && status == TT_OK) tt__source_lines(source, "to evaluate", &text);
    status = tt__agree_lines(r->ctx, "tt_evaluate", status, lines);
    return status == TT_OK ? tt__evaluate_source(r, source, NULL, stats, &items, c) : status;
}

tt_status tt_evaluate(tt_trainer *r, const tt_source *source, tt_stats *stats)
{
    return tt__evaluate_all(r, source, stats, NULL);
}

tt_status tt_confusion(tt_trainer *r, const tt_source *source, tt_stats *stats, int64_t *counts)
{
    const size_t classes = (size_t)r->model.classes, seqs = (size_t)r->options.max_seqs;
    tt_stats own;
    tt__confusion_run c;
    if (!classes || r->model.task != TT_TASK_CLASS)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "tt_confusion needs a model that predicts the class of each "
                        "sequence, but the trainer's model does not");
    memset(&c, 0, sizeof c);
    c.counts = counts;
    for (size_t k = 0; k < classes * classes; k++) counts[k] = 0;
    c.logits = (float *)tt__alloc(r->ctx, sizeof *c.logits * seqs * classes);
    if (c.logits) c.labels = (int32_t *)tt__alloc(r->ctx, sizeof *c.labels * seqs * (size_t)r->data);
    tt_status status = c.labels ? tt__evaluate_all(r, source, stats ? stats : &own, &c) : TT_ERR_MEMORY;
    tt__free(r->ctx, c.labels);
    tt__free(r->ctx, c.logits);
    return status;
}

tt_status tt_forward(tt_trainer *r, const tt_batch *b, float *to, size_t capacity)
{
    if (!r->output.id)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT,
                        "the model has no output: its function `record` must set one");
    tt_status status = tt__none_staged(r);
    if (status == TT_OK) status = tt__set_batch(r, r->eval, 0, b, true);
    if (status == TT_OK) status = tt_run(r->eval, NULL);
    return status == TT_OK ? tt_get_rank(r->eval, 0, r->output, to, capacity) : status;
}

/* Replaces n logits by the predictions of a task. Returns false if one of them is not finite. */
static bool tt__predictions(tt_task task, int n, float *x)
{
    float max = x[0];
    double sum = 0;
    if (task != TT_TASK_CLASS && task != TT_TASK_TAGS) {
        for (int c = 0; c < n; c++) sum += x[c];
        for (int c = 0; c < n && task == TT_TASK_LABELS; c++) x[c] = (float)(1 / (1 + exp(-(double)x[c])));
        return isfinite(sum);
    }
    for (int c = 1; c < n; c++) max = x[c] > max ? x[c] : max;
    for (int c = 0; c < n; c++) sum += x[c] = expf(x[c] - max);
    for (int c = 0; c < n; c++) x[c] = (float)(x[c] / sum);
    return isfinite(sum);
}

tt_status tt_predict(tt_trainer *r, const tt_batch *b, float *predictions)
{
    const int n = r->model.task == TT_TASK_EMBED ? (int)r->output_width : r->model.classes;
    const bool tags = r->model.task == TT_TASK_TAGS;
    if (!n)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT,
                        "tt_predict needs a model with classes: use tt_forward for other models");
    const int rows = tags ? b->rows : b->seqs;
    tt_status status = tt_forward(r, b, predictions, (size_t)rows * (size_t)n);
    for (int k = 0; k < rows && status == TT_OK; k++) {
        if (tt__predictions(r->model.task, n, predictions + (size_t)k * (size_t)n)) continue;
        char cause[300];
        const bool bad = tt__bad_parameter(r->eval, cause, sizeof cause);
        status = tt__fail(r->ctx, TT_ERR_NUMERIC, "the prediction for %s %d is not finite%s%s",
                          tags ? "token" : "sequence", k, bad ? ": " : "", cause);
    }
    return status;
}

tt_status tt_predict_text(tt_trainer *r, const tt_tokenizer *k, const char *text, const char *pair,
                          float *predictions)
{
    if (r->model.task == TT_TASK_TAGS)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "tt_predict_text: the model predicts a tag of each token: "
                        "call tt_predict with a batch, whose `rows` gives the size of the result");
    int max = (int)tt__min(r->model.max_length, r->options.max_tokens);
    int32_t *ids = (int32_t *)tt__calloc(r->ctx, sizeof *ids * 3 * (size_t)max), start[2] = {0, 0};
    tt_encoding e;
    tt_batch b;
    memset(&e, 0, sizeof e);
    memset(&b, 0, sizeof b);
    if (!ids) return TT_ERR_MEMORY;
    e.text = text;
    e.bytes = strlen(text);
    e.pair = pair;
    e.pair_bytes = pair ? strlen(pair) : 0;
    e.special = true;
    e.max_tokens = max;
    e.room = max;
    e.ids = ids;
    e.types = ids + 2 * max;
    const int64_t n = tt_tokenizer_encode(k, &e);
    if (n < 0) {
        tt__free(r->ctx, ids);
        if (!pair || tt_tokenizer_pairs(k)) return TT_ERR_MEMORY;
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "tt_predict_text: the tokenizer has no template for pairs "
                        "of texts (\"post_processor\" of tokenizer.json): pass one text, or use the "
                        "tokenizer of a model for pairs");
    }
    b.seqs = 1;
    b.rows = start[1] = (int32_t)n;
    for (int32_t row = 0; row < b.rows; row++) ids[max + row] = row;
    b.ids = ids;
    b.positions = ids + max;
    b.types = e.types;
    b.seq_start = start;
    tt_status status = tt_predict(r, &b, predictions);
    tt__free(r->ctx, ids);
    return status;
}
