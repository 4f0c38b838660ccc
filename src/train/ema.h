#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/optimizers/rules.h"
#include "../ranks/processes.h"
#include "../context/memory.h"
#include "../context/devices.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "../run/inputs.h"
#include "../run/step.h"
#include "trainer.h"

/* ------------------------------------------------------------------------------------------------------ ema
   Exchanges parameters and their moving averages. */

/* Copies the average of a parameter to `to`. If `to` is NULL, copies `from` into the average instead, on all
   ranks of this process that store the average. */
static tt_status tt__move_average(const tt_program *head, const tt__kept *x, float *to, const float *from)
{
    tt_status status = TT_OK;
    for (int stage = 0; stage < head->stages; stage++) {
        const tt_program *p = head->stage[stage];
        const int32_t v = tt__kept_in(head, stage, x);
        const tt__tape_value *y = &p->built.t->values[v];
        if (!v || (to && stage != x->stage)) continue;
        const tt__stored stored = tt__stored_of(p->ctx->params[x->param], &y->part, p->arena);
        for (int64_t e = 0, n; e < stored.rows * stored.cols && status == TT_OK && to; e += n) {
            int rank;
            const int64_t at = tt__stored_at(&stored, e, &rank, &n);
            char *memory = (char *)tt__resolve(p, rank, v).data;
            const tt__memory m = {p->arena, rank, y->space, TT_F32, memory ? memory + at * 4 : NULL};
            status = tt__fetch_memory(&m, to + e, TT_F32, (size_t)n);
        }
        for (int r = tt__near_rank(p->arena); r < tt__near_end(p->arena) && !to; r++) {
            int64_t first, count = tt__stored_shard(&stored, r, &first);
            for (int64_t at = 0, n; at < count && status == TT_OK; at += n) {
                const int64_t e = tt__stored_element(&stored, r, at, &n);
                char *memory = (char *)tt__resolve(p, r, v).data + at * 4;
                const tt__memory m = {p->arena, r, y->space, TT_F32, memory};
                status = tt__write_memory(&m, from + e, TT_F32, (size_t)n);
            }
        }
    }
    return status;
}

/* Exchanges all trained parameters with their averages. After an error within the exchange the program
   refuses to run before a state is loaded. */
static tt_status tt__swap_averages(tt_program *p)
{
    tt_context *ctx = p->ctx;
    int count = 0, frozen;
    size_t max = 0;
    tt__kept *kept = tt__kept_of(p, &count, &frozen);
    if (!kept) count = 0;
    for (int k = 0; k < count; k++) max = (size_t)tt__max((int64_t)max, ctx->params[kept[k].param]->size);
    float *both = kept ? (float *)tt__alloc(ctx, sizeof *both * (2 * max + 1)) : NULL;
    float *average = both ? both + max : NULL;
    tt_status status = both ? TT_OK : TT_ERR_MEMORY;
    for (int k = 0; k < count && status == TT_OK; k++) {
        tt_param *param = ctx->params[kept[k].param];
        if (kept[k].state != TT__EMA) continue;
        status = tt_param_get(param, both);
        if (status == TT_OK) status = tt__move_average(p, &kept[k], average, NULL);
        if (status == TT_OK) status = tt_param_set(param, average);
        if (status == TT_OK) status = tt__move_average(p, &kept[k], NULL, both);
        for (int s = 0; s < p->stages && status != TT_OK; s++) p->stage[s]->arena->partly_updated = true;
    }
    tt__free(ctx, both);
    tt__free(ctx, kept);
    return tt__agree(ctx, "the moving averages", status, NULL, 0);
}

static bool tt__has_ema(const tt_trainer *r)
{
    return r->train && r->train->settings.options.optimizer.ema_decay > 0;
}

tt_status tt_trainer_use_ema(tt_trainer *r, bool use)
{
    if (!tt__has_ema(r))
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "tt_trainer_use_ema: the trainer has no moving averages: "
                        "make it with train and optimizer.ema_decay above 0");
    if (tt__trainer_within_step(r))
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "tt_trainer_use_ema: the micro-batches of a step have not "
                        "been updated yet: call it between steps");
    tt_status status = tt_wait(r->train, NULL);
    if (status != TT_OK || use == r->uses_ema) return status;
    if (tt_trainer_steps(r) > 0) status = tt__swap_averages(r->train);
    if (status == TT_OK) r->uses_ema = use;
    return status;
}
