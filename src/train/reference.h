#pragma once
#include "../base/base.h"
#include "../context/params.h"
#include "../run/inputs.h"
#include "../files/lists.h"
#include "../files/safetensors.h"
#include "trainer.h"
#include "evaluate.h"

/* -------------------------------------------------------------------------------------------- the reference
   Direct preference optimization compares the model with the reference: the model as it was before training.
   Training needs only one number of the reference for each pair of answers, so no second model stays in
   memory. The numbers are in the source (tt_source.reference), and in a file of the run's folder. */

static const char *const tt__reference_tensors[] = {"reference", "tinytrain.reference"};

/* The header of the file: hashes of the pairs, of the model and of the numbers. */
typedef struct tt__reference_header { uint64_t pairs, model, numbers; } tt__reference_header;

static void tt__reference_info(tt_tensor_info info[2], int64_t pairs)
{
    memset(info, 0, 2 * sizeof *info);
    for (int k = 0; k < 2; k++) info[k].name = tt__reference_tensors[k], info[k].ndim = 1;
    info[0].dtype = "F32";
    info[0].dims[0] = pairs;
    info[1].dtype = "I64";
    info[1].dims[0] = (int64_t)(sizeof(tt__reference_header) / 8);
}

static tt_status tt__reference_write(tt_context *ctx, const tt_source *s, const char *path,
                                     const tt__reference_header *h)
{
    tt_tensor_info info[2];
    tt__reference_info(info, s->pairs);
    tt_safetensors_writer *w = tt_safetensors_begin(ctx, path, info, 2, NULL);
    if (!w) return ctx->status;
    tt_status status = tt_safetensors_write(w, s->reference, sizeof *s->reference * (size_t)s->pairs);
    if (status == TT_OK) status = tt_safetensors_write(w, h, sizeof *h);
    const tt_status ended = tt_safetensors_end(w);
    return status == TT_OK ? ended : status;
}

/* Fails because a file has no reference. */
static tt_status tt__reference_broken(tt_context *ctx, const char *path, const char *why)
{
    return tt__fail(ctx, TT_ERR_FORMAT, "'%s': %s: remove the file, and the reference is computed again from "
                    "the model that the run starts with", path, why);
}

/* Fails because a file has the reference of something else. */
static tt_status tt__reference_refuse(tt_context *ctx, const char *path, const char *why)
{
    return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': %s: continue with the data, the length and the model with "
                    "which the run began, or remove the file, and the reference is computed again from the "
                    "model that the run starts with", path, why);
}

/* Reads the reference from an open file. h: the hashes that the file must have. */
static tt_status tt__reference_take(tt_context *ctx, const tt_safetensors *file, const tt_source *s,
                                    const char *path, const tt__reference_header *h)
{
    tt__reference_header found;
    tt_tensor_info wanted[2];
    tt__reference_info(wanted, s->pairs);
    for (int k = 0; k < 2; k++) {
        const int at = tt_safetensors_find(file, wanted[k].name);
        const tt_tensor_info *info = at >= 0 ? tt_safetensors_info(file, at) : NULL;
        const bool fits = info && strcmp(info->dtype, wanted[k].dtype) == 0 && info->ndim == 1;
        if (!fits || (k && info->dims[0] != wanted[k].dims[0]))
            return tt__reference_broken(ctx, path, "the file holds no reference of this library");
        if (info->dims[0] != wanted[k].dims[0])
            return tt__reference_refuse(ctx, path, "the reference has another number of pairs than the data");
    }
    int at = tt_safetensors_find(file, wanted[1].name);
    tt_status status = tt_safetensors_read(file, at, 0, sizeof found, &found);
    if (status != TT_OK) return status;
    if (found.pairs != h->pairs)
        return tt__reference_refuse(ctx, path, "the reference is that of other pairs, or of pairs that were "
                                    "cut to another length");
    if (found.model != h->model)
        return tt__reference_refuse(ctx, path, "the reference is that of another model");
    const size_t bytes = sizeof *s->reference * (size_t)s->pairs;
    at = tt_safetensors_find(file, wanted[0].name);
    status = tt_safetensors_read(file, at, 0, bytes, s->reference);
    if (status == TT_OK && tt__hash_on(TT__HASH_BEGIN, s->reference, bytes) != found.numbers) {
        for (int64_t k = 0; k < s->pairs; k++) s->reference[k] = NAN;
        return tt__reference_broken(ctx, path, "the reference is damaged");
    }
    return status;
}

/* Keeps the results of the data ranks' micro-batches. rows: memory for max_seqs numbers; index: (data ranks,
   max_seqs) the pairs of the micro-batches; pairs: (data ranks) their numbers. */
static tt_status tt__reference_keep(tt_trainer *r, const tt_source *s, int ranks, const int *pairs,
                                    const int64_t *index, float *rows)
{
    const size_t max = (size_t)r->options.max_seqs;
    tt_status status = tt_run(r->eval, NULL);
    for (int rank = 0; rank < ranks && status == TT_OK; rank++) {
        status = tt_get_rank(r->eval, rank, r->output, rows, (size_t)pairs[rank]);
        for (int k = 0; k < pairs[rank] && status == TT_OK; k++) {
            const int64_t at = index[(size_t)rank * max + (size_t)k];
            if (!isfinite(rows[k]))
                return tt__fail(r->ctx, TT_ERR_NUMERIC, "the reference of pair %lld is not finite: check the "
                                "model's weights", (long long)at);
            s->reference[at] = rows[k];
        }
    }
    return status;
}

/* Computes the reference of all pairs in epoch 0 of a source. */
static tt_status tt__reference_fill(tt_trainer *r, const tt_source *s, float *rows, int64_t *index)
{
    const size_t max = (size_t)r->options.max_seqs;
    int ranks = 0, pairs[TT__RANKS]; /* data ranks that have a micro-batch, and their pairs */
    int64_t step = 0;
    bool more = true;
    tt_batch b;
    tt_status status = tt__from_source(r->ctx, s, 0, 0, NULL, NULL);
    while (status == TT_OK && more) {
        status = tt__from_source(r->ctx, s, 0, step, &b, &more);
        if (status == TT_OK && more) {
            for (int k = 0; k < b.seqs && status == TT_OK; k++)
                if (!b.index || b.index[k] < 0 || b.index[k] >= s->pairs || b.index[k] != b.index[k - k % 2])
                    status = tt__fail(r->ctx, TT_ERR_ARGUMENT, "the reference needs the index of each pair "
                                      "in tt_batch.index, 0 to %lld, for both of its sequences",
                                      (long long)s->pairs - 1);
            if (status == TT_OK) status = tt__set_batch(r, r->eval, ranks, &b, true);
            if (status != TT_OK) break;
            pairs[ranks] = b.seqs / 2;
            for (int k = 0; k < pairs[ranks]; k++) index[(size_t)ranks * max + (size_t)k] = b.index[2 * k];
            ranks++;
            step += b.last_of_step;
        }
        if (status != TT_OK || !ranks || (more && ranks < r->data)) continue;
        status = tt__reference_keep(r, s, ranks, pairs, index, rows);
        ranks = 0;
    }
    if (ranks) tt__forget_inputs(r->eval);
    for (int64_t k = 0; k < s->pairs && status == TT_OK; k++)
        if (isnan(s->reference[k]))
            status = tt__fail(r->ctx, TT_ERR_ARGUMENT, "the source gives no pair with the index %lld in "
                              "epoch 0: give all tt_source.pairs", (long long)k);
    return status;
}

static tt_status tt__reference_compute(tt_trainer *r, const tt_source *s)
{
    tt_context *ctx = r->ctx;
    const double began = tt__seconds();
    const size_t max = (size_t)r->options.max_seqs;
    if (ctx->net)
        return tt__fail(ctx, TT_ERR_UNSUPPORTED, "the reference of pairs of answers is computed by one "
                        "process, but this run has %d: begin the run with one process, stop it, and resume "
                        "it with several", tt_processes(ctx));
    float *rows = (float *)tt__alloc(ctx, sizeof *rows * max);
    int64_t *index = (int64_t *)tt__alloc(ctx, sizeof *index * (size_t)r->data * max);
    tt_status status = rows && index ? tt__reference_fill(r, s, rows, index) : TT_ERR_MEMORY;
    tt__free(ctx, rows);
    tt__free(ctx, index);
    if (status == TT_OK)
        tt__log(ctx, TT_LOG_INFO, "reference", "computed the log-probabilities of %lld pairs of answers in "
                "%.1f s", (long long)s->pairs, tt__seconds() - began);
    return status;
}

static bool tt__reference_known(const tt_source *s)
{
    int64_t known = 0;
    while (known < s->pairs && !isnan(s->reference[known])) known++;
    return known == s->pairs;
}

tt_status tt_trainer_reference(tt_trainer *r, const tt_source *s, const char *folder, const char *name)
{
    char path[TT__PATH] = "";
    tt_context *ctx = r->ctx;
    tt__reference_header h = {0, 0, 0};
    bool there = false;
    tt_status status = tt__source_fits(r, s, "of pairs");
    if (status == TT_OK) status = tt__none_staged(r);
    if (status == TT_OK && (!s->reference || !r->output.id || r->output_width != 1))
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "tt_trainer_reference needs a source of pairs of answers and "
                          "a model that is trained on them: make it with tt_lm_preference_model");
    if (status != TT_OK) return status;
    if (tt__reference_known(s)) return TT_OK;
    h.pairs = s->hash ? s->hash(s->self) : 0;
    status = tt__model_hash(r, &h.model);
    if (status == TT_OK && folder) status = tt__path_join(ctx, path, folder, name);
    if (status == TT_OK && folder) status = tt__folder_has(ctx, folder, name, &there);
    if (status == TT_OK && there) {
        tt_safetensors *file = tt_safetensors_open(ctx, path);
        status = file ? tt__reference_take(ctx, file, s, path, &h) : ctx->status;
        tt_safetensors_close(file);
        if (status == TT_OK) r->reference = h.model;
        return status;
    }
    if (status == TT_OK) status = tt__reference_compute(r, s);
    if (status == TT_OK) r->reference = h.model;
    if (status != TT_OK || !folder) return status;
    h.numbers = tt__hash_on(TT__HASH_BEGIN, s->reference, sizeof *s->reference * (size_t)s->pairs);
    return tt__reference_write(ctx, s, path, &h);
}
