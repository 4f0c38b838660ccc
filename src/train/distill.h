#pragma once
#include "../base/base.h"
#include "../run/inputs.h"
#include "../files/lists.h"
#include "teacher.h"
#include "trainer.h"
#include "evaluate.h"

/* ---------------------------------------------------------------------------------------- teacher's logits
   tt_teacher_new: the logits of a teacher, computed once, before the student trains. */

void tt_teacher_free(tt_teacher *k)
{
    if (!k) return;
    void *const owned[] = {k->logits, k->known, k};
    tt__free_all(k->ctx, owned, TT__COUNT(owned));
}

/* Makes room for the examples of a batch. */
static tt_status tt__teacher_room(tt_teacher *k, const tt_batch *b)
{
    tt_status status = tt__teacher_index(k->ctx, b);
    int64_t examples = k->examples;
    for (int s = 0; s < b->seqs && status == TT_OK; s++) examples = tt__max(examples, b->index[s] + 1);
    if (status != TT_OK) return status;
    if (examples > k->room) {
        const int64_t room = 2 * examples + 256;
        void *logits = tt__realloc(k->ctx, k->logits, sizeof *k->logits * (size_t)(room * k->classes));
        if (logits) k->logits = (float *)logits;
        void *known = logits ? tt__realloc(k->ctx, k->known, (size_t)room) : NULL;
        if (!known) return TT_ERR_MEMORY;
        k->known = (uint8_t *)known;
        k->room = room;
    }
    memset(k->known + k->examples, 0, (size_t)(examples - k->examples));
    k->examples = examples;
    return TT_OK;
}

/* Adds the teacher to the error of a batch that its model cannot read, and returns the error's status. */
static tt_status tt__teacher_cannot(tt_context *ctx, tt_status status)
{
    char why[sizeof ctx->error];
    if (status != TT_ERR_ARGUMENT && status != TT_ERR_SHAPE) return status;
    memcpy(why, ctx->error, sizeof why);
    return tt__fail(ctx, status, "tt_teacher_new: the teacher cannot read a batch of the source (%s): give "
                    "the teacher a source of texts in the tokens of its own tokenizer, cut to its positions",
                    why);
}

/* Computes the logits of all examples of epoch 0 of a source. rows: memory for max_seqs rows of logits;
   index: memory for the indices of the examples in the running micro-batches, (data ranks, max_seqs). */
static tt_status tt__teacher_fill(tt_trainer *r, tt_teacher *k, const tt_source *source, float *rows,
                                  int64_t *index)
{
    const size_t width = (size_t)k->classes, max = (size_t)r->options.max_seqs;
    int ranks = 0, seqs[TT__RANKS]; /* ranks: number of data ranks that have a micro-batch; seqs: numbers of
                                       their examples */
    int64_t step = 0;
    bool more = true;
    tt_batch b;
    tt_status status = tt__from_source(r->ctx, source, 0, 0, NULL, NULL);
    while (status == TT_OK && more) {
        status = tt__from_source(r->ctx, source, 0, step, &b, &more);
        if (status == TT_OK && more) {
            status = tt__teacher_room(k, &b);
            if (status == TT_OK && b.seqs > r->options.max_seqs)
                status = tt__fail(r->ctx, TT_ERR_SHAPE, "tt_teacher_new: a batch has %d examples, but the "
                                  "teacher's trainer has max_seqs = %d: raise max_seqs", b.seqs,
                                  r->options.max_seqs);
            if (status != TT_OK) break;
            status = tt__teacher_cannot(r->ctx, tt__set_batch(r, r->eval, ranks, &b, true));
            if (status != TT_OK) break;
            seqs[ranks] = b.seqs;
            memcpy(index + (size_t)ranks * max, b.index, sizeof *index * (size_t)b.seqs);
            ranks++;
            step += b.last_of_step;
        }
        if (status != TT_OK || !ranks || (more && ranks < r->data)) continue;
        status = tt__teacher_cannot(r->ctx, tt_run(r->eval, NULL));
        for (int rank = 0; rank < ranks && status == TT_OK; rank++) {
            status = tt_get_rank(r->eval, rank, r->output, rows, (size_t)seqs[rank] * width);
            for (int s = 0; s < seqs[rank] && status == TT_OK; s++) {
                const int64_t at = index[(size_t)rank * max + (size_t)s];
                memcpy(k->logits + at * k->classes, rows + (size_t)s * width, sizeof *rows * width);
                k->known[at] = 1;
            }
        }
        ranks = 0;
    }
    if (ranks) tt__forget_inputs(r->eval);
    return status;
}

/* Fails if a trainer's model cannot be a teacher, or if the source does not fit the trainer. */
static tt_status tt__teacher_check(tt_trainer *r, const tt_source *source)
{
    if (!r->model.classes || !tt__can_teach(r->model.task))
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "tt_teacher_new: the model predicts neither a class, labels "
                        "nor scores for each example: use one that does");
    if (r->ctx->net)
        return tt__fail(r->ctx, TT_ERR_UNSUPPORTED, "tt_teacher_new is for one process, but this run has %d: "
                        "use several ranks of one process", tt_processes(r->ctx));
    tt_status status = tt__source_fits(r, source, "of the teacher");
    return status == TT_OK ? tt__none_staged(r) : status;
}

tt_teacher *tt_teacher_new(tt_trainer *r, const tt_source *source)
{
    tt_context *ctx = r->ctx;
    const double began = tt__seconds();
    const size_t max = (size_t)r->options.max_seqs, width = (size_t)r->model.classes;
    if (tt__teacher_check(r, source) != TT_OK) return NULL;
    tt_teacher *k = (tt_teacher *)tt__calloc(ctx, sizeof *k);
    float *rows = (float *)tt__alloc(ctx, sizeof *rows * max * width);
    int64_t *index = (int64_t *)tt__alloc(ctx, sizeof *index * (size_t)r->data * max);
    tt_status status = k && rows && index ? TT_OK : TT_ERR_MEMORY;
    if (k) {
        k->ctx = ctx;
        k->task = r->model.task;
        k->classes = r->model.classes;
    }
    if (status == TT_OK) status = tt__teacher_fill(r, k, source, rows, index);
    if (status == TT_OK && k->examples) status = tt__model_hash(r, &k->model);
    tt__free(ctx, rows);
    tt__free(ctx, index);
    if (status != TT_OK) {
        tt_teacher_free(k);
        return NULL;
    }
    const size_t bytes = sizeof *k->logits * (size_t)(k->examples * k->classes);
    void *less = tt__realloc(ctx, k->logits, bytes + !bytes);
    if (less) k->logits = (float *)less;
    tt__log(ctx, TT_LOG_INFO, "teacher", "computed the teacher's logits of %lld examples in %.1f s; they "
            "take %.1f MB", (long long)k->examples, tt__seconds() - began, 1e-6 * (double)bytes);
    return k;
}
