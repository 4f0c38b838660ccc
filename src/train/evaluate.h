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
#include "../run/state.h"
#include "../run/memory.h"
#include "../files/lists.h"
#include "grad_cache.h"
#include "features.h"
#include "trainer.h"

/* ------------------------------------------------------------------------------------------------ evaluation
   Evaluates a model, counts a confusion matrix, predicts, and computes the features of a source's examples.
   All data ranks take part. */

/* Returns the program that evaluates. */
static tt_program *tt__evaluator(const tt_trainer *r) { return r->by_features ? r->head : r->eval; }

/* Runs the batches of the first `batches` data ranks. Adds their results to *stats in the order of the
   batches, so that the sums do not depend on the number of ranks. */
static tt_status tt__evaluate_round(tt_trainer *r, int batches, tt_stats *stats)
{
    tt_stats s;
    tt_program *p = tt__evaluator(r);
    tt_status status = tt_run(p, NULL);
    if (status != TT_OK) return status;
    for (int rank = 0; rank < batches; rank++) {
        tt__rank_stats(p, rank, &s);
        const double targets = stats->targets + s.targets;
        if (targets > 0) stats->loss = (stats->loss * stats->targets + s.loss * s.targets) / targets;
        stats->targets = targets;
        stats->correct += s.correct;
        stats->margin += s.margin;
        stats->flops += s.flops;
    }
    stats->step = tt_trainer_steps(r);
    return TT_OK;
}

/* Adds the embeddings of a round's batches to those of the step, for a loss with the negatives of a whole
   step (step_seqs). If the round was the step's last, adds the loss of the step to *stats. seqs: (batches)
   numbers of sequences. */
static tt_status tt__evaluate_step(tt_trainer *r, int batches, const int *seqs, bool last, tt_stats *stats)
{
    tt__grad_cache *g = r->cache;
    tt_stats s;
    tt_status status = TT_OK;
    memset(&s, 0, sizeof s);
    for (int rank = 0; rank < batches && status == TT_OK; g->embedded += seqs[rank++]) {
        float *to = g->embeddings + (size_t)g->embedded * (size_t)g->width;
        status = tt_get_rank(r->eval, rank, r->output, to, (size_t)seqs[rank] * (size_t)g->width);
    }
    if (status != TT_OK || !last) return status;
    const int targets = g->n_anchors;
    status = tt__grad_cache_differentiate(g, &s);
    tt__discard_step(g->loss);
    tt__grad_cache_forget(g);
    if (status == TT_ERR_NUMERIC) s.loss = NAN, s.targets = targets, s.correct = 0, status = TT_OK;
    stats->targets += s.targets;
    stats->loss += (s.loss - stats->loss) * s.targets / stats->targets;
    stats->correct += s.correct;
    return status;
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
    if (o->max_masked && s->max_masked > o->max_masked)
        return tt__fail(r->ctx, TT_ERR_SHAPE, "micro-batches %s have up to %d tokens of answers or masked "
                        "tokens, but the trainer has max_masked = %d: make the trainer for the largest of "
                        "its sources (tt_train_options_make_room)", what, s->max_masked, o->max_masked);
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

/* Returns `status`, the result of a user's callback. what: the name of the callback. If the callback failed
   without an error message, sets a message. The caller clears the message before it calls the callback. */
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
    if (status != TT_OK) return tt__net_fail(ctx, status); /* other processes may wait for this process */
    if (!b || !*more || step < s->steps) return status;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "epoch %lld: the source gives a step %lld, but tt_source.steps is "
                    "%lld: count the steps of an epoch", (long long)epoch + 1, (long long)step + 1,
                    (long long)s->steps);
}

/* Tells a source which data ranks belong to this process and need batches: none if the program reads features
   instead. by_step: the source is for training. */
static void tt__deal(const tt_trainer *r, const tt_source *s, bool by_step)
{
    const tt_program *p = r->eval;
    const bool none = r->features && (by_step || r->by_features);
    int first = 0, end = none ? 0 : r->data;
    if (!s->deal || !(r->ctx->net || r->features)) return;
    while (first < end && !tt__has_data_rank(p, first)) first++;
    while (end > first && !tt__has_data_rank(p, end - 1)) end--;
    s->deal(s->self, r->data, first, end, by_step);
}

/* Returns the number of items (tokens, images, ...) of a batch: rows or, if it has no rows, sequences. */
static int tt__items(const tt_batch *b) { return b->rows ? b->rows : b->seqs; }

/* The predictions of an evaluation, while they are collected. The pointers of `p`, the first field, are set
   to the arrays at the end of the collection. */
typedef struct tt__collected {
    tt_predictions p;
    int64_t done;              /* number of rows whose predictions are known; of later rows only the labels
                                  are known */
    int cap_rows, cap_seqs;    /* rows and sequences that the arrays have room for */
    int rows[TT__RANKS];       /* rows of each data rank's current batch */
    int64_t *seq_start;
    int32_t *labels, *predicted;
    float *values, *outputs, *logits; /* logits: (max rows of a batch, classes) */
} tt__collected;

/* Makes room for more rows and sequences. Returns false if memory runs out. */
static bool tt__collect_room(tt__collected *c, int64_t rows, int64_t seqs)
{
    const bool embeds = c->p.task == TT_TASK_EMBED;
    const bool numbers = c->p.task == TT_TASK_LABELS || c->p.task == TT_TASK_SCORES;
    const int64_t max = INT32_MAX / 4, r = c->p.rows + rows, s = c->p.seqs + seqs + 1;
    const size_t width = numbers ? (size_t)c->p.classes : 1;
    if (r > max || s > max) {
        tt__fail(c->p.ctx, TT_ERR_MEMORY, "the validation has %lld rows, but at most %lld "
                 "predictions can be compared: evaluate fewer examples", (long long)r, (long long)max);
        return false;
    }
    if (s > c->cap_seqs || !c->seq_start) {
        void *x = tt__realloc(c->p.ctx, c->seq_start, sizeof *c->seq_start * (size_t)(2 * s));
        if (!x) return false;
        c->seq_start = (int64_t *)x;
        c->cap_seqs = (int)(2 * s);
    }
    if (r <= c->cap_rows) return true;
    void **arrays[3] = {numbers ? (void **)&c->values : (void **)&c->labels,
                        numbers || embeds ? (void **)&c->outputs : (void **)&c->predicted,
                        (void **)&c->values};
    for (int k = 0; k < (embeds ? 3 : 2); k++) {
        const size_t columns = k == 1 && embeds ? (size_t)c->p.classes : width;
        void *x = tt__realloc(c->p.ctx, *arrays[k], sizeof(float) * (size_t)(2 * r) * columns);
        if (!x) return false;
        *arrays[k] = x;
    }
    c->cap_rows = (int)(2 * r);
    return true;
}

/* Keeps the labels of a batch that will run on a data rank. tt__collect_outputs adds the predictions for the
   batch after the run. */
static tt_status tt__collect_labels(tt_trainer *r, tt__collected *c, int rank, const tt_batch *b)
{
    const bool tags = c->p.task == TT_TASK_TAGS;
    const bool by_number = tags || c->p.task == TT_TASK_CLASS || c->p.task == TT_TASK_EMBED;
    const char *input = tags ? "tags" : by_number ? "labels" : "label_values";
    const void *labels = tags ? (const void *)b->tags : by_number ? (const void *)b->labels
                                                                  : (const void *)b->label_values;
    int64_t rows = tags ? b->rows : b->seqs;
    const size_t width = by_number ? 1 : (size_t)c->p.classes;
    for (int k = 0; k < b->n_arrays; k++)
        if (strcmp(b->arrays[k].input, input) == 0) labels = b->arrays[k].data, rows = b->arrays[k].rows;
    const int64_t max = tags ? r->options.max_tokens : r->options.max_seqs;
    if (!labels || (tags && !b->seq_start) || rows > max)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "a metric needs the labels of each batch, but a batch has "
                        "%s%s%s: set them, at most %lld rows%s", rows > max ? "too many " : "no ",
                        labels && rows <= max ? "seq_start" : input, rows > max ? " rows" : "",
                        (long long)max, r->ctx->net ? ", in every process for all data ranks" : "");
    const int64_t seqs = tags ? b->seqs : rows, first = c->p.rows;
    if (!tt__collect_room(c, rows, seqs)) return TT_ERR_MEMORY;
    if (by_number) memcpy(c->labels + first, labels, sizeof *c->labels * (size_t)rows);
    else
        memcpy(c->values + (size_t)first * width, labels, sizeof *c->values * width * (size_t)rows);
    for (int64_t s = 0; s < rows && c->p.task == TT_TASK_EMBED; s++)
        c->values[first + s] = b->label_values ? b->label_values[s] : NAN;
    for (int64_t s = 0; s < seqs; s++)
        c->seq_start[c->p.seqs + s] = first + (tags ? (int64_t)b->seq_start[s] : s);
    c->rows[rank] = (int)rows;
    c->p.rows += rows;
    c->p.seqs += seqs;
    c->seq_start[c->p.seqs] = c->p.rows;
    return TT_OK;
}

/* Adds the predictions for the batches of a run, in the order of the batches. */
static tt_status tt__collect_outputs(tt_trainer *r, tt__collected *c, int batches)
{
    const size_t classes = (size_t)c->p.classes;
    tt_status status = TT_OK;
    for (int rank = 0; rank < batches && status == TT_OK; rank++) {
        const int rows = c->rows[rank];
        float *to = c->predicted ? c->logits : c->outputs + (size_t)c->done * classes;
        status = tt_get_rank(tt__evaluator(r), rank, r->output, to, (size_t)rows * classes);
        for (int s = 0; s < rows && c->predicted && status == TT_OK; s++) {
            const float *x = c->logits + (size_t)s * classes;
            int32_t best = 0;
            for (int k = 1; k < c->p.classes; k++) if (x[k] > x[best]) best = k;
            c->predicted[c->done + s] = best;
        }
        c->done += rows;
    }
    return status;
}

void tt_predictions_free(tt_predictions *p)
{
    tt__collected *c = (tt__collected *)p;
    if (!c) return;
    void *const owned[] = {c->seq_start, c->labels, c->predicted, c->values, c->outputs, c->logits, c};
    tt__free_all(c->p.ctx, owned, TT__COUNT(owned));
}

/* Begins to collect the predictions for a source. Returns NULL on error. */
static tt__collected *tt__collect(tt_trainer *r, const tt_source *source)
{
    const bool by_class = r->model.task == TT_TASK_CLASS || r->model.task == TT_TASK_TAGS;
    const bool embeds = r->model.task == TT_TASK_EMBED;
    if (!r->model.classes && !embeds) {
        tt__fail(r->ctx, TT_ERR_ARGUMENT, "the model predicts no classes, labels, scores, tags or "
                 "embeddings: use tt_forward for other outputs");
        return NULL;
    }
    tt__collected *c = (tt__collected *)tt__calloc(r->ctx, sizeof *c);
    if (!c) return NULL;
    c->p.ctx = r->ctx;
    c->p.task = r->model.task;
    c->p.classes = embeds ? (int)r->output_width : r->model.classes;
    c->p.class_names = source && source->classes >= c->p.classes ? source->class_names : NULL;
    const int max = r->model.task == TT_TASK_TAGS ? r->options.max_tokens : r->options.max_seqs;
    if (by_class) {
        c->logits = (float *)tt__alloc(r->ctx, sizeof *c->logits * (size_t)max * (size_t)c->p.classes);
        if (c->logits) return c;
        tt_predictions_free(&c->p);
        return NULL;
    }
    return c;
}

/* Ends the collection: sets the pointers of c->p to the arrays. */
static void tt__collected_show(tt__collected *c)
{
    c->p.seq_start = c->seq_start;
    c->p.labels = c->labels;
    c->p.predicted = c->predicted;
    c->p.values = c->values;
    c->p.outputs = c->outputs;
}

/* Evaluates epoch 0 of the source; stops early if *stop is not 0. Adds to *items the number of items that
   were read. Collects predictions in *c. stop and c may be NULL. */
static tt_status tt__evaluate_source(tt_trainer *r, const tt_source *source, const volatile int *stop,
                              tt_stats *stats, double *items, tt__collected *c)
{
    tt_batch b;
    bool more = true;
    int64_t step = 0;
    int set = 0, seqs[TT__RANKS]; /* data ranks that have a batch for this round, and their sequences */
    tt__grad_cache *whole = r->cache;
    tt_stats of_round; /* with step_seqs, statistics with negatives of micro-batches, which do not count */
    memset(stats, 0, sizeof *stats);
    memset(&of_round, 0, sizeof of_round);
    tt_status status = tt__none_staged(r);
    if (status == TT_OK && whole && whole->micros)
        status = tt__fail(r->ctx, TT_ERR_ARGUMENT, "{step_seqs}: %d micro-batches wait for the end of their "
                          "step: evaluate and predict between steps", whole->micros);
    tt__deal(r, source, false);
    if (status == TT_OK) status = tt__from_source(r->ctx, source, 0, 0, NULL, NULL);
    while (status == TT_OK && more && !(stop && *stop)) {
        status = tt__from_source(r->ctx, source, 0, step, &b, &more);
        if (status == TT_OK && more) {
            if (c) status = tt__collect_labels(r, c, set, &b);
            if (status == TT_OK && whole) status = tt__grad_cache_count(whole, &b);
            seqs[set] = b.seqs;
            if (status == TT_OK) status = tt__set_batch(r, tt__evaluator(r), set++, &b, false);
            *items += tt__items(&b);
            step += b.last_of_step;
        }
        const bool ends = whole && b.last_of_step;
        if (status != TT_OK || !set || (more && set < r->data && !ends)) continue;
        status = tt__evaluate_round(r, set, whole ? &of_round : stats);
        if (c && status == TT_OK) status = tt__collect_outputs(r, c, set);
        if (whole && status == TT_OK) status = tt__evaluate_step(r, set, seqs, ends || !more, stats);
        set = 0;
    }
    if (whole) tt__grad_cache_forget(whole);
    if (whole) stats->flops = of_round.flops, stats->step = of_round.step;
    if (set) tt__forget_inputs(tt__evaluator(r)); /* the round was stopped or failed */
    const bool no_loss = r->model.task == TT_TASK_EMBED && !r->train; /* the program only embeds */
    if (status != TT_OK || (stop && *stop) || stats->targets > 0 || no_loss) return status;
    return tt__fail(r->ctx, TT_ERR_ARGUMENT, "the source to evaluate gives no target that counts (all are "
                    "ignored or have weight 0): check the labels");
}

static tt_status tt__evaluate_all(tt_trainer *r, const tt_source *source, tt_stats *stats,
                                  tt__collected *c)
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

tt_predictions *tt_predictions_new(tt_trainer *r, const tt_source *source, tt_stats *stats)
{
    tt_stats own;
    tt__collected *c = tt__collect(r, source);
    if (c && tt__evaluate_all(r, source, stats ? stats : &own, c) == TT_OK) {
        tt__collected_show(c);
        return &c->p;
    }
    if (c) tt_predictions_free(&c->p);
    return NULL;
}

/* Gives the examples in epoch 0 of a source their places in a set of features. */
static tt_status tt__place_features(tt_trainer *r, tt__feature_set *set, const tt_source *source)
{
    const int same = r->model.same_length ? r->model.max_length : 0;
    tt_batch b;
    bool more = true;
    int64_t step = 0;
    tt_status status = tt__source_fits(r, source, "whose features are computed once");
    if (status == TT_OK && source->deal) source->deal(source->self, r->data, 0, 0, false);
    if (status == TT_OK) status = tt__from_source(r->ctx, source, 0, 0, NULL, NULL);
    while (status == TT_OK && more) {
        status = tt__from_source(r->ctx, source, 0, step, &b, &more);
        if (status != TT_OK || !more) break;
        status = tt__feature_places(r->features, set, &b, same);
        step += b.last_of_step;
    }
    if (source && source->deal) source->deal(source->self, r->data, 0, r->data, false);
    return status;
}

size_t tt_trainer_feature_bytes(tt_trainer *r, const tt_source *source)
{
    tt__feature_set set;
    memset(&set, 0, sizeof set);
    if (!r->features || tt__place_features(r, &set, source) != TT_OK) set.size = 0;
    const size_t bytes = sizeof *set.data * set.size;
    tt__feature_set_free(r->ctx, &set);
    return bytes;
}

/* Computes the features of the examples that have places in a set. index, tokens: memory for the indices and
   the numbers of tokens of the examples in the running micro-batches, each (data ranks, max_seqs). */
static tt_status tt__fill_features(tt_trainer *r, const tt__feature_set *set, const tt_source *source,
                                   const volatile int *stop, int64_t *index, int32_t *tokens)
{
    const int max = r->options.max_seqs, same = r->model.same_length ? r->model.max_length : 0;
    tt_batch b;
    bool more = true;
    int64_t step = 0;
    int ranks = 0, seqs[TT__RANKS]; /* ranks: number of data ranks that have a micro-batch; seqs: numbers of
                                       their examples */
    tt_status status = tt__none_staged(r);
    if (status == TT_OK) status = tt__from_source(r->ctx, source, 0, 0, NULL, NULL);
    while (status == TT_OK && more && !(stop && *stop)) {
        status = tt__from_source(r->ctx, source, 0, step, &b, &more);
        if (status == TT_OK && more) {
            status = tt__has_index(r->ctx, &b);
            if (status == TT_OK) status = tt__set_batch(r, r->eval, ranks, &b, false);
            for (int s = 0; s < b.seqs && s < max && status == TT_OK; s++) {
                index[ranks * max + s] = b.index[s];
                tokens[ranks * max + s] = tt__tokens_in(&b, s, same);
            }
            seqs[ranks++] = (int)tt__min(b.seqs, max);
            step += b.last_of_step;
        }
        if (status != TT_OK || !ranks || (more && ranks < r->data)) continue;
        status = tt_run(r->eval, NULL);
        for (int k = 0; k < ranks && status == TT_OK; k++)
            status = tt__features_get(r->features, r->eval, k, set, index + k * max, tokens + k * max,
                                      seqs[k]);
        ranks = 0;
    }
    if (ranks) tt__forget_inputs(r->eval); /* the round was stopped or failed */
    return status;
}

/* Computes the features of all examples of a source; ends early if *stop is not 0. */
static tt_status tt__compute_features(tt_trainer *r, tt__feature_set *set, const tt_source *source,
                                      const volatile int *stop)
{
    tt_context *ctx = r->ctx;
    const double began = tt__seconds();
    const size_t most = (size_t)r->data * (size_t)r->options.max_seqs;
    tt_status status = tt__place_features(r, set, source);
    if (status != TT_OK) return status;
    const double bytes = (double)sizeof *set->data * (double)set->size;
    status = tt__machine_has(ctx, bytes, 1, "{features_once}", "clear it, or train on fewer examples");
    if (status != TT_OK) return status;
    set->data = (float *)tt__alloc(ctx, sizeof *set->data * (set->size + 1));
    int64_t *index = (int64_t *)tt__alloc(ctx, sizeof *index * most);
    int32_t *tokens = (int32_t *)tt__alloc(ctx, sizeof *tokens * most);
    status = set->data && index && tokens ? TT_OK : TT_ERR_MEMORY;
    if (status == TT_OK) status = tt__fill_features(r, set, source, stop, index, tokens);
    tt__free(ctx, index);
    tt__free(ctx, tokens);
    if (status == TT_OK && !(stop && *stop))
        tt__log(ctx, TT_LOG_INFO, "features", "computed the features of %lld examples in %.1f s; they take "
                "%.1f MB", (long long)set->examples, tt__seconds() - began, 1e-6 * bytes);
    return status;
}

double tt_metric_value(const tt_metric *m, const tt_stats *s, const tt_predictions *p)
{
    if (m->of) return s ? m->of(s) : NAN;
    return m->of_predictions && p ? m->of_predictions(p) : NAN;
}

tt_status tt_confusion(tt_trainer *r, const tt_source *source, tt_stats *stats, int64_t *counts)
{
    const int64_t classes = r->model.classes;
    if (!classes || r->model.task != TT_TASK_CLASS)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "tt_confusion needs a model that predicts the class of each "
                        "sequence, but the trainer's model does not");
    tt_predictions *p = tt_predictions_new(r, source, stats);
    if (!p) return tt_error_code(r->ctx);
    memset(counts, 0, sizeof *counts * (size_t)(classes * classes));
    for (int64_t k = 0; k < p->rows; k++)
        if (p->labels[k] >= 0 && p->labels[k] < classes) counts[p->labels[k] * classes + p->predicted[k]]++;
    tt_predictions_free(p);
    return TT_OK;
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
static bool tt__to_predictions(tt_task task, int n, float *x)
{
    float max = x[0];
    double sum = 0;
    if (task != TT_TASK_CLASS && task != TT_TASK_TAGS) {
        for (int c = 0; c < n; c++) sum += x[c];
        for (int c = 0; c < n && task == TT_TASK_LABELS; c++)
            x[c] = (float)(1 / (1 + tt__exp(-(double)x[c])));
        return isfinite(sum);
    }
    for (int c = 1; c < n; c++) max = x[c] > max ? x[c] : max;
    for (int c = 0; c < n; c++) sum += x[c] = tt__expf(x[c] - max);
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
        if (tt__to_predictions(r->model.task, n, predictions + (size_t)k * (size_t)n)) continue;
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
