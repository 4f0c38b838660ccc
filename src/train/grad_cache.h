#pragma once
#include "../base/base.h"
#include "../tape/record.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "../compile/compile.h"
#include "../files/lists.h"

/* ------------------------------------------------------------------------------------------ gradient caching
   Trains embeddings with the negatives of a whole step, which has several micro-batches (Gao et al., "Scaling
   deep contrastive learning batch size under memory limited setup", 2021). First the program `embed` computes
   the embeddings of all micro-batches, with dropout. The embeddings become the parameter of the program
   `loss`, which computes the contrastive loss and the gradients of the embeddings. Then the training program
   repeats each micro-batch's forward with the same dropout, and begins its backward with the gradients of the
   embeddings. All programs share one arena. */

/* Names of two inputs of the training program, (seqs, width). TT__CACHED_MINUS: the embeddings with opposite
   signs. TT__CACHED_TARGET: the numbers from which the gradient of the embeddings follows
   (tt__surrogate_loss). */
#define TT__CACHED_MINUS "embeddings.minus"
#define TT__CACHED_TARGET "embeddings.target"

typedef struct tt__grad_cache {
    tt_context *ctx;
    tt_program *embed, *loss;
    tt_param *rows;               /* (max_seqs, width): the embeddings of a step */
    tt_value anchors, candidates, positives; /* inputs of `loss` */
    int64_t width;
    int max_seqs;                 /* max number of sequences of a step; also its max number of
                                     micro-batches */
    int micros, seqs;             /* micros: number of micro-batches that wait for the end of the step, in an
                                     evaluation 0; seqs: number of their sequences */
    int embedded;                 /* in an evaluation, number of sequences whose embeddings are known */
    int n_anchors, n_candidates;
    tt_batch *batch;              /* (max_seqs) copies of the micro-batches; `memory` has their data */
    void **memory;
    float *embeddings, *gradient; /* (max_seqs, width) */
    int32_t *anchor, *candidate, *positive; /* (max_seqs) the numbers of rows that the inputs of `loss` get */
} tt__grad_cache;

/* Records the loss of the training program. minus: the embeddings with opposite signs, so that their sum with
   the embeddings is 0. The mean squared error of 0 and `target` has the gradient
   `-2 * target / elements`, where `elements` is the number of all numbers of a step's embeddings. So the
   target for a gradient is `-gradient * elements / 2`. */
static tt_value tt__surrogate_loss(tt_tape *t, tt_value embeddings)
{
    const int64_t rows = tt_value_axis(t, embeddings), width = tt_value_width(t, embeddings);
    const tt_value none = {0, 0};
    tt_value minus = tt_input(t, TT__CACHED_MINUS, TT_F32, rows, width);
    tt_value target = tt_input(t, TT__CACHED_TARGET, TT_F32, rows, width);
    return tt_mean_squared_error(t, tt_add(t, embeddings, minus), target, none);
}

static void tt__grad_cache_forget(tt__grad_cache *g) /* drops the micro-batches that wait */
{
    for (int k = 0; k < g->micros; k++) tt__free(g->ctx, g->memory[k]);
    g->micros = g->seqs = g->embedded = g->n_anchors = g->n_candidates = 0;
}

static void tt__grad_cache_free(tt__grad_cache *g)
{
    if (!g) return;
    tt_program_free(g->loss);
    tt_program_free(g->embed);
    tt__grad_cache_forget(g);
    void *const owned[] = {g->batch, g->memory, g->embeddings, g->gradient, g->anchor, g->candidate,
                           g->positive, g};
    tt__free_all(g->ctx, owned, TT__COUNT(owned));
}

/* Returns the parameter that holds the embeddings of a step: one for all trainers of a context with equal
   sizes. */
static tt_param *tt__grad_cache_rows(tt_context *ctx, int64_t rows, int64_t width)
{
    const int64_t shape[2] = {rows, width};
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    char name[96];
    snprintf(name, sizeof name, "tinytrain.embeddings.%lldx%lld", (long long)rows, (long long)width);
    for (int k = 0; k < ctx->n_params; k++)
        if (strcmp(ctx->params[k]->name, name) == 0) return ctx->params[k];
    return tt_param_new(ctx, name, 2, shape, zeros);
}

/* Compiles the program that computes the loss of a step's embeddings and their gradients. */
static tt_status tt__grad_cache_loss(tt__grad_cache *g, const tt_train_options *o, const tt_program *train,
                                     tt__attempt *attempt)
{
    tt_train_options of_step = *o;
    tt_compile_options c = o->compile;
    tt_input_info inputs[8];
    of_step.max_seqs = g->max_seqs;
    if (!(g->rows = tt__grad_cache_rows(g->ctx, g->max_seqs, g->width))) return g->ctx->status;
    tt_tape *t = tt_tape_new(g->ctx);
    if (!t) return TT_ERR_MEMORY;
    const tt_value loss = tt_contrastive_loss(t, tt_param_value(t, g->rows), &of_step);
    c.optimizer = tt_compile_options_default().optimizer;
    c.optimizer.kind = TT_SGD;
    c.accumulate = true;
    c.keep_gradients = false;
    c.before_update = NULL;
    c.recompute = c.offload = c.update = NULL;
    c.share = (tt_program *)(uintptr_t)train;
    g->loss = tt__try_compile(t, loss, &c, attempt);
    const int n = g->loss ? tt_program_inputs(g->loss, inputs, TT__COUNT(inputs)) : 0;
    for (int k = 0; k < n; k++) {
        if (strcmp(inputs[k].name, "anchors") == 0) g->anchors = inputs[k].value;
        if (strcmp(inputs[k].name, "candidates") == 0) g->candidates = inputs[k].value;
        if (strcmp(inputs[k].name, "positives") == 0) g->positives = inputs[k].value;
    }
    tt_tape_free(t);
    return g->loss ? TT_OK : g->ctx->status;
}

/* Compiles the programs `embed` and `loss`. train: the training program, compiled from tape t. embeddings:
   the model's output on the tape. */
static tt_status tt__grad_cache_new(tt_context *ctx, tt_tape *t, tt_value embeddings,
                                    const tt_train_options *o, const tt_program *train, tt__attempt *attempt,
                                    tt__grad_cache **made)
{
    tt_compile_options c = o->compile;
    tt__attempt with_dropout = *attempt;
    tt__grad_cache *g = *made = (tt__grad_cache *)tt__calloc(ctx, sizeof *g);
    if (!g) return TT_ERR_MEMORY;
    g->ctx = ctx;
    g->width = tt_value_width(t, embeddings);
    g->max_seqs = o->step_seqs;
    c.train = false;
    c.share = (tt_program *)(uintptr_t)train;
    with_dropout.dropout = true;
    g->embed = tt__try_compile(t, embeddings, &c, &with_dropout);
    tt_status status = g->embed ? tt__grad_cache_loss(g, o, train, attempt) : ctx->status;
    const size_t seqs = (size_t)g->max_seqs, numbers = seqs * (size_t)g->width * sizeof(float);
    if (status != TT_OK) return status;
    g->batch = (tt_batch *)tt__calloc(ctx, seqs * sizeof *g->batch);
    g->memory = (void **)tt__calloc(ctx, seqs * sizeof *g->memory);
    g->embeddings = (float *)tt__alloc(ctx, numbers);
    g->gradient = (float *)tt__alloc(ctx, numbers);
    g->anchor = (int32_t *)tt__alloc(ctx, seqs * sizeof *g->anchor);
    g->candidate = (int32_t *)tt__alloc(ctx, seqs * sizeof *g->candidate);
    g->positive = (int32_t *)tt__alloc(ctx, seqs * sizeof *g->positive);
    return g->batch && g->memory && g->embeddings && g->gradient && g->anchor && g->candidate && g->positive
               ? TT_OK : TT_ERR_MEMORY;
}

/* Returns the array `name` of a batch; NULL: none. */
static const tt_array *tt__array_of(const tt_batch *b, const char *name)
{
    for (int k = 0; k < b->n_arrays; k++) if (strcmp(b->arrays[k].input, name) == 0) return &b->arrays[k];
    return NULL;
}

/* Appends to `to`, which has *n numbers, the row numbers in array `name` of the next micro-batch. Adds
   `first` to each: the array counts rows within the micro-batch, and `to` counts rows within the step. */
static tt_status tt__grad_cache_index(tt__grad_cache *g, const tt_batch *b, const char *name, int first,
                                      int32_t *to, int *n)
{
    const tt_array *a = tt__array_of(b, name);
    if (!a || !a->data || a->rows < 1 || a->rows > g->max_seqs - *n)
        return tt__fail(g->ctx, TT_ERR_ARGUMENT, "step_seqs: the batch has %lld rows of \"%s\"; expected 1 "
                        "to %d: give batches of pairs or triplets, and set step_seqs to the sequences of the "
                        "largest step", a ? (long long)a->rows : 0, name, g->max_seqs - *n);
    for (int64_t k = 0; k < a->rows; k++) to[*n + k] = ((const int32_t *)a->data)[k] + first;
    *n += (int)a->rows;
    return TT_OK;
}

/* Adds the sequences of a micro-batch to those of its step, and their numbers to the inputs of `loss`. */
static tt_status tt__grad_cache_count(tt__grad_cache *g, const tt_batch *b)
{
    if (b->seqs > g->max_seqs - g->seqs)
        return tt__fail(g->ctx, TT_ERR_SHAPE, "the step has more than step_seqs = %d sequences: set "
                        "step_seqs to the sequences of the largest step", g->max_seqs);
    int n_positives = g->n_anchors;
    const int candidates = g->n_candidates;
    tt_status status = tt__grad_cache_index(g, b, "positives", candidates, g->positive, &n_positives);
    if (status == TT_OK) status = tt__grad_cache_index(g, b, "anchors", g->seqs, g->anchor, &g->n_anchors);
    if (status == TT_OK)
        status = tt__grad_cache_index(g, b, "candidates", g->seqs, g->candidate, &g->n_candidates);
    if (status == TT_OK && n_positives != g->n_anchors)
        status = tt__fail(g->ctx, TT_ERR_ARGUMENT, "step_seqs: the batch has %d positives for %d anchors: "
                          "give one for each", n_positives, g->n_anchors);
    g->seqs += b->seqs;
    return status;
}

/* Copies a micro-batch, so that it can wait for the end of its step. */
static tt_status tt__grad_cache_add(tt__grad_cache *g, const tt_batch *b)
{
    const size_t rows = sizeof(int32_t) * (size_t)b->rows, seqs = sizeof(int32_t) * (size_t)b->seqs;
    tt_status status = tt__grad_cache_count(g, b);
    if (status != TT_OK) return status;
    tt_batch *to = &g->batch[g->micros];
    const struct { const void *from; const int32_t **to; size_t bytes; } fields[] = {
        {b->ids, &to->ids, rows}, {b->positions, &to->positions, rows}, {b->types, &to->types, rows},
        {b->seq_start, &to->seq_start, seqs + sizeof(int32_t)}};
    size_t bytes = 0;
    memset(to, 0, sizeof *to);
    to->seqs = b->seqs;
    to->rows = b->rows;
    for (int k = 0; k < TT__COUNT(fields); k++) bytes += fields[k].from ? fields[k].bytes : 0;
    char *memory = (char *)tt__alloc(g->ctx, bytes);
    if (!memory) return TT_ERR_MEMORY;
    g->memory[g->micros++] = memory;
    for (int k = 0; k < TT__COUNT(fields); k++) {
        if (!fields[k].from) continue;
        memcpy(memory, fields[k].from, fields[k].bytes);
        *fields[k].to = (const int32_t *)(const void *)memory;
        memory += fields[k].bytes;
    }
    return TT_OK;
}

/* Computes the loss of the step's embeddings, and the targets from which the backward's gradients follow.
   Afterwards `embeddings` has opposite signs, and `gradient` has the targets. stats: gets the statistics of
   the step's loss. */
static tt_status tt__grad_cache_differentiate(tt__grad_cache *g, tt_stats *stats)
{
    const size_t used = (size_t)g->seqs * (size_t)g->width, all = (size_t)g->max_seqs * (size_t)g->width;
    memset(g->embeddings + used, 0, sizeof *g->embeddings * (all - used));
    tt_status status = tt_param_set(g->rows, g->embeddings);
    if (status == TT_OK) status = tt_set_rank(g->loss, 0, g->anchors, g->anchor, g->n_anchors);
    if (status == TT_OK) status = tt_set_rank(g->loss, 0, g->candidates, g->candidate, g->n_candidates);
    if (status == TT_OK) status = tt_set_rank(g->loss, 0, g->positives, g->positive, g->n_anchors);
    if (status == TT_OK) status = tt_micro_step(g->loss, stats);
    if (status == TT_OK) status = tt_get_gradient(g->loss, g->rows, g->gradient);
    const double factor = -0.5 * (double)used;
    for (size_t k = 0; k < used; k++) g->gradient[k] = (float)(g->gradient[k] * factor);
    for (size_t k = 0; k < used; k++) g->embeddings[k] = -g->embeddings[k];
    return status;
}
