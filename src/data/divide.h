#pragma once
#include "../base/base.h"
#include "dataset.h"
#include "dealer.h"

/* ---- dividing a dataset */

tt_dataset *tt_dataset_split(tt_dataset *d, int64_t n)
{
    tt_context *ctx = d->ctx;
    if (n < 1 || n >= d->count)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_dataset_split: n is %lld, but must be 1 to %d, because the "
                        "dataset has %d %s and must keep one", (long long)n, d->count - 1, d->count, d->images
                        ? "images" : "texts"), (tt_dataset *)NULL;
    tt_dataset *part = tt__dataset_new(ctx, d->task, d->classes, d->n_classes);
    uint32_t *order = part ? (uint32_t *)tt__alloc(ctx, sizeof *order * (size_t)d->count) : NULL;
    uint64_t key = tt__stream_key(ctx->options.seed, TT__RANDOM_SHUFFLE, TT__SHUFFLE_SPLIT,
                                  (uint64_t)d->count);
    tt_status status = order ? tt__dataset_choose(d, n, key, order) : TT_ERR_MEMORY;
    if (part) part->images = d->images, part->source = d->source;
    for (int k = 0; k < (int)n && status == TT_OK; k++) {
        tt__example *from = &d->examples[order[k]], *to = tt__dataset_add(part, "tt_dataset_split");
        if (to) *to = *from;
        if (!to || tt__dataset_copy(part, to) != TT_OK)
            status = tt__fail(ctx, TT_ERR_MEMORY, "tt_dataset_split: out of memory for %lld examples of %d: "
                              "free memory", (long long)n, d->count);
    }
    if (status == TT_OK) { /* removes the chosen examples; the others keep their order */
        for (int k = 0; k < (int)n; k++) d->examples[order[k]].label = -1;
        int kept = 0;
        for (int i = 0; i < d->count; i++)
            if (d->examples[i].label >= 0) d->examples[kept++] = d->examples[i];
        d->count = kept;
    }
    tt__free(ctx, order);
    return tt__dataset_end(part, status);
}
