#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../passes/step.h"
#include "../passes/update.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../context/devices.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "ranks.h"
#include "memory.h"
#include "inputs.h"
#include "tune.h"
#include "results.h"
#include "pipeline.h"

/* ----------------------------------------------------------------------------------------------------- steps
   Defines tt_step and its parts, reads the results of a step, at once or later, and reads gradients. */

/* Sets *stats to the results of one data rank in the last run of a program that does not train. */
static void tt__rank_stats(const tt_program *head, int data_rank, tt_stats *stats)
{
    const tt_program *p = tt__last_stage(head);
    const tt__totals *own = &p->rank[tt__first_of(p, data_rank)].results.totals;
    tt__give_stats(head, stats, 0);
    stats->loss = own->targets > 0 ? own->loss / own->targets : 0;
    stats->targets = own->targets;
    stats->correct = own->correct;
    stats->margin = own->margin;
    stats->flops = 0;
    for (int s = 0; s < head->stages; s++) {
        p = head->stage[s];
        for (int k = 0; k < p->arena->tensor; k++)
            stats->flops += p->rank[tt__first_of(p, data_rank) + k].flops;
    }
}

static tt_status tt__check_lr(tt_program *p, float lr)
{
    if (p->in_hook)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "before_update runs within a step: it cannot begin or end a "
                        "step");
    if (lr >= 0 && isfinite(lr)) return TT_OK;
    return tt__fail(p->ctx, TT_ERR_ARGUMENT,
                    "the learning rate is %g, but must be a finite number of at least 0", lr);
}

/* Fails because the norm of the gradients is not finite, and names a gradient that is the cause. */
static tt_status tt__norm_failed(tt_program *head)
{
    const int first = head->settings.group->first;
    tt_program *p = tt__stage_of(head, first);
    const tt_tape *t = p->built.t;
    const char *lowest = p->settings.scales ? " at the lowest loss scale" : "";
    const long long step = (long long)head->run.step;
    char *at = (char *)tt__resolve(p, first, t->squares).data;
    int n, parted;
    int32_t *list = tt__trained(t, &n, &parted), bad = 0;
    float square = 0;
    bool finite = true;
    char cause[300];
    tt_status status = list ? TT_OK : TT_ERR_MEMORY;
    for (int k = 0; k < n && !bad && status == TT_OK; k++) {
        const tt__memory x = {p->arena, first, TT__DEVICE, TT_F32, at + (size_t)k * 4};
        status = tt__read_memory(&x, &square, TT_F32, 1);
        if (status == TT_OK && !isfinite(square)) bad = list[k];
    }
    tt__free(p->ctx, list);
    if (status != TT_OK) return status;
    head->outcome = t->early && bad ? TT__HALF_UPDATED : TT__NOT_FINITE;
    if (t->early && bad) /* the memory of gradients is in use for other values */
        return tt__fail(p->ctx, TT_ERR_NUMERIC, "step %lld: the gradient of '%s' is not finite, or the sum "
                        "of its squares overflows; this parameter was not updated, but with update "
                        "'backward' others may have been: load the last state", step,
                        p->ctx->params[t->values[bad].param]->name);
    for (int s = 0; s < head->stages && bad; s++) {
        tt_program *q = head->stage[s];
        const int end = tt__is_trained(q->built.t, bad) ? tt__near_end(q->arena) : 0;
        for (int r = tt__near_rank(q->arena); r < end; r++)
            finite = finite && isfinite(tt__largest_of(q, r, q->built.t->values[bad].grad));
    }
    const bool found = tt__bad_parameter(head, cause, sizeof cause);
    if (!found) snprintf(cause, sizeof cause, "check the inputs, or lower the learning rate");
    if (bad)
        return tt__fail(p->ctx, TT_ERR_NUMERIC, "step %lld: the %sgradient of '%s' %s%s; nothing was "
                        "updated: %s", step, finite ? "sum of squares of the " : "",
                        p->ctx->params[t->values[bad].param]->name, finite ? "overflows" : "is not finite",
                        lowest, cause);
    return tt__fail(p->ctx, TT_ERR_NUMERIC, "step %lld: the global gradient norm overflows%s; nothing was "
                    "updated: %s", step, lowest, cause);
}

/* Fails if the results of a step are not finite; otherwise counts the step. one: the step had one
   micro-batch. skipped: tt__scale_state.skipped before the step. */
static tt_status tt__judge_step(tt_program *p, bool one, double skipped)
{
    p->outcome = TT__NO_TARGET;
    p->kept.targets = p->results.totals.targets;
    if (!(p->results.totals.targets > 0))
        return tt__fail(p->ctx, TT_ERR_NUMERIC, "step %lld: no target counts (all are ignored or have weight "
                        "0), so nothing was updated: check the labels", (long long)p->run.step);
    p->outcome = TT__UPDATED;
    tt_status status = tt__check_loss(p, one ? 0 : -1);
    if (status != TT_OK) return status;
    const bool finite = isfinite(p->results.clipped.norm), lowered = p->results.scale.skipped != skipped;
    if (!finite && !lowered) return tt__norm_failed(p); /* lowered: loss scaling skips the step */
    if (finite) p->run.step++;
    tt__give_stats(p, &p->done, finite ? p->results.clipped.norm : 0);
    p->reads++;
    return TT_OK;
}

/* Reads and judges the results of the last step, if they are unread. Leaves the state of the current step as
   it is. */
static tt_status tt__read_unread(tt_program *p)
{
    const int rank = tt__first_of(p, 0);
    const tt__device_group *c = p->settings.group;
    tt__rank *r = &p->rank[rank];
    const tt__results now = p->results;
    const double flops = p->flops;
    if (!p->unread.any) return TT_OK;
    p->unread.any = false;
    p->run.step--; /* tt__judge_step counts the step again if its results are good */
    tt_status status = c->kind->backend->after(c->device[rank], TT__HOST_STREAM, r->has_found);
    status = tt__device_status(p->ctx, c, rank, status);
    if (status != TT_OK) return status;
    r->results = *r->found;
    r->results.scale = now.scale;
    p->results = r->results;
    p->flops = p->unread.flops;
    status = tt__judge_step(p, p->unread.one, now.scale.skipped);
    p->results = now;
    p->flops = flops;
    return status;
}

/* Counts a step whose results the host reads later. one: the step had one micro-batch. */
static void tt__leave_unread(tt_program *p, bool one)
{
    p->unread.any = true;
    p->unread.one = one;
    p->unread.flops = p->flops;
    p->run.step++;
}

/* Counts a failed step, which has updated nothing, as a skipped step. */
static void tt__skip_step(tt_program *p)
{
    p->results.scale.skipped++;
    p->done.skipped = (int64_t)p->results.scale.skipped;
    p->scale_set = false;
}

tt_status tt_wait(tt_program *p, tt_stats *stats)
{
    const bool any = p->unread.any;
    const tt__device_group *c = p->settings.group;
    const int rank = tt__first_of(p, 0);
    tt_status status = tt__read_unread(p);
    if (any && status == TT_OK) /* waits for the updates, which follow the results */
        status = tt__device_status(p->ctx, c, rank, c->kind->backend->wait(c->device[rank]));
    if (stats) *stats = p->done;
    return status;
}

/* Calls the caller's function tt_compile_options.before_update, if it is set. */
static tt_status tt__call_before_update(tt_program *p)
{
    const tt_compile_options *o = &p->settings.options;
    if (!o->before_update) return TT_OK;
    p->ctx->error[0] = 0;
    p->in_hook = true;
    const tt_status status = o->before_update(o->user, p, p->run.step);
    p->in_hook = false;
    if (status == TT_OK || p->ctx->error[0]) return status;
    return tt__fail(p->ctx, status, "before_update failed in step %lld: nothing was updated",
                    (long long)p->run.step);
}

/* Ends a step: runs the kept micro-batches of a pipeline, or sums an unfinished lap; then updates the
   parameters. The update changes nothing if a loss or gradient is not finite. If `stats` is NULL, the host
   may read the results later. */
static tt_status tt__finish_step(tt_program *p, float lr, tt_stats *stats)
{
    const double skipped = p->results.scale.skipped;
    const bool one = p->round == 1 && p->arena->data == 1;
    const bool later = !stats && tt__reads_later(p) && p->rank[tt__first_of(p, 0)].found;
    p->run.lr = lr;
    tt_status status = TT_OK;
    if (p->stages > 1) status = tt__run_pipeline(p);
    else if (p->round % tt__slots(p)) status = tt__run_lap(p);
    if (status == TT_OK) status = tt__call_before_update(p);
    p->kept.rounds = p->round;
    p->kept.scale = p->results.scale.scale;
    if (status == TT_OK) status = tt__run_segment(p, TT__EACH_STEP, later);
    if (status != TT_OK) return status;
    if (later) return tt__leave_unread(p, one), TT_OK;
    status = tt__read_results(p);
    if (status == TT_OK) status = tt__judge_step(p, one, skipped);
    if (status == TT_OK && stats) *stats = p->done;
    return status;
}

tt_status tt_step(tt_program *p, float lr, tt_stats *stats)
{
    if (!p->settings.options.train)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "this program was compiled with train = false: use tt_run");
    tt_status status = tt__check_lr(p, lr);
    if (status != TT_OK) return status;
    tt__begin_step(p);
    p->run.lr = lr; /* for update "backward", in which tt__micro updates */
    status = tt__micro(p, false);
    if (status == TT_OK) status = tt__end_round(p);
    if (status == TT_OK) status = tt__finish_step(p, lr, stats);
    p->round = 0;
    return status;
}

tt_status tt_micro_step(tt_program *p, tt_stats *stats)
{
    if (!p->settings.options.train || !p->settings.options.accumulate)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT,
                        "tt_micro_step needs a program compiled with train = true and accumulate = true");
    if (p->round == 0) tt__begin_step(p);
    if (p->micro_failed)
        return tt__fail(p->ctx, TT_ERR_NUMERIC, "an earlier micro-batch of this step failed: call tt_update, "
                        "which ends the step without an update");
    tt_status status = tt__micro(p, stats != NULL);
    if (status == TT_OK) status = tt__end_round(p);
    if (status != TT_OK && p->round > 0) p->micro_failed = true; /* gradients may have parts of this
                                                                    micro-batch */
    if (status != TT_OK) return status;
    tt__give_stats(p, stats, 0);
    return TT_OK;
}

tt_status tt_update(tt_program *p, float lr, tt_stats *stats)
{
    if (!p->settings.options.train || !p->settings.options.accumulate)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT,
                        "tt_update needs a program compiled with train = true and accumulate = true");
    if (p->round == 0)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT,
                        "tt_update: no micro-batch was run in this step: call tt_micro_step first");
    tt_status status = tt__check_lr(p, lr);
    if (status != TT_OK) return status;
    if (!p->micro_failed) status = tt__finish_step(p, lr, stats);
    else
        status = tt__fail(p->ctx, TT_ERR_NUMERIC, "step %lld: a micro-batch failed, so nothing was updated: "
                          "see its error", (long long)p->run.step);
    p->round = 0;
    return status;
}

enum { TT__LEAF_CHUNK = 256 };

/* Adds the n numbers of b to those of a, and rounds each sum to `dtype`. */
static void tt__add_rounded(tt_dtype dtype, float *a, const float *b, int64_t n)
{
    uint16_t half[TT__LEAF_CHUNK];
    for (int64_t k = 0; k < n; k++) a[k] += b[k];
    if (dtype == TT_F32) return;
    tt__convert(half, dtype, a, TT_F32, (size_t)n);
    tt__convert(a, TT_F32, half, dtype, (size_t)n);
}

/* Reads elements [at, at + n) of slot number `slot` of gradient v on a rank, and converts them to float. */
static tt_status tt__read_slot(tt_program *p, int rank, int32_t v, int slot, int64_t at, float *to, int64_t n)
{
    const tt__tape_value *x = &p->built.t->values[v];
    char *from = tt__storage_memory(p, rank, x);
    if (from) from += (size_t)slot * tt__slot_bytes(x) + (size_t)at * tt_dtype_bytes(x->shape.dtype);
    const tt__memory memory = {p->arena, rank, x->space, x->shape.dtype, from};
    return tt__fetch_memory(&memory, to, TT_F32, (size_t)n);
}

/* The storages with a parameter's gradient in the middle of a step. If ranks sum gradients at the end of a
   step, `leaves` has the slots of each data rank. If ranks sum gradients in each micro-batch, `total` has the
   sum over ranks of the finished laps and, if ranks have several slots, `leaves` has the slots of the current
   lap. Both storages have the same layout. */
typedef struct tt__so_far {
    int32_t leaves, total; /* numbers of the storages; 0: none */
    int slots;             /* number of slots that have contents */
    tt__part part;         /* the shard of `leaves` and `total` that a rank has */
} tt__so_far;

/* Adds up a gradient over the step so far, in the order of the tree of sums, and writes the sum to `to`. */
static tt_status tt__sum_so_far(tt_program *p, const tt__so_far *g, const tt__stored *stored, float *to)
{
    const int data = p->built.t->sums_micros ? 1 : p->arena->data;
    const tt_dtype dtype = p->built.t->values[g->leaves ? g->leaves : g->total].shape.dtype;
    const int64_t size = stored->rows * stored->cols;
    const size_t bytes = sizeof(float[TT__LEAF_CHUNK]) * (size_t)(g->slots * data + 1);
    float (*leaf)[TT__LEAF_CHUNK] = (float (*)[TT__LEAF_CHUNK])tt__alloc(p->ctx, bytes);
    tt_status status = leaf ? TT_OK : TT_ERR_MEMORY;
    for (int64_t e = 0, n; e < size && status == TT_OK; e += n) {
        int rank, many = 0;
        const int64_t at = tt__stored_at(stored, e, &rank, &n);
        n = tt__min(n, TT__LEAF_CHUNK);
        for (int l = 0; l < g->slots * data && status == TT_OK; l++) {
            const int slot = l / data, of = tt__first_of(p, l % data) + rank;
            if (data > 1 && l % data >= p->in_slot[slot]) continue;
            status = tt__read_slot(p, of, g->leaves, slot, at, leaf[many++], n);
        }
        for (int s = 1; s < many; s *= 2)
            for (int l = 0; l + s < many; l += 2 * s) tt__add_rounded(dtype, leaf[l], leaf[l + s], n);
        if (g->total && status == TT_OK) status = tt__read_slot(p, rank, g->total, 0, at, leaf[many++], n);
        if (g->total && many > 1) tt__add_rounded(dtype, leaf[0], leaf[many - 1], n);
        if (status == TT_OK) memcpy(to + e, leaf[0], sizeof(float) * (size_t)n);
    }
    tt__free(p->ctx, leaf);
    return status;
}

/* Finds the storages with a parameter's gradient over the step so far. Returns false if there are none. */
static bool tt__find_gradient(const tt_program *p, const tt_param *param, tt__so_far *g)
{
    const tt_tape *t = p->built.t;
    const int slots = tt__slots(p);
    bool found = false;
    memset(g, 0, sizeof *g);
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__tape_value *x = &t->values[v];
        const bool gradient = x->storage == TT__GRADIENT && x->base == v && x->persistent;
        if (!gradient || x->param != param->index || param->ctx != p->ctx) continue;
        g->part = x->part;
        found = true;
        if (t->sums_micros && x->slots <= 1) g->total = p->round >= slots ? v : 0;
        else g->leaves = v;
    }
    if (g->leaves) g->slots = t->sums_micros ? (int)(p->round % slots) : (int)tt__min(p->round, slots);
    return found;
}

/* Finds a parameter's gradient and the factor that turns the stored numbers into the gradient of the mean
   loss. Fails if there is no gradient now. caller: name of the public function, for the error. */
static tt_status tt__gradient_now(tt_program *p, const tt_param *param, const char *caller, tt__so_far *g,
                                  double *factor)
{
    const tt_compile_options *o = &p->settings.options;
    const bool within = p->round > 0 && (o->accumulate || p->in_hook);
    int bad;
    if (p->stages > 1)
        return tt__fail(p->ctx, TT_ERR_UNSUPPORTED, "%s: a pipeline runs the micro-batches of a "
                        "step and its update together and keeps no gradients: compile with pipeline = 1",
                        caller);
    if (!o->train || (!within && !(tt__keeps_gradients(o) && p->kept.rounds)))
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "%s: gradients exist only between tt_micro_step "
                        "and tt_update of a program compiled with accumulate, or after a step of one "
                        "compiled with keep_gradients", caller);
    if (!within && p->arena->data * tt__slots(p) > 1)
        return tt__fail(p->ctx, TT_ERR_UNSUPPORTED, "%s: a step sums the gradients of %d data ranks and %d "
                        "groups in place: read them in before_update", caller, p->arena->data,
                        o->parallel.groups);
    tt_status status = within ? tt__read_counts(p, &bad) : tt__read_unread(p);
    const double targets = within ? p->results.totals.targets : p->kept.targets;
    if (status != TT_OK && (within || status != TT_ERR_NUMERIC)) return status;
    if (!(targets > 0))
        return tt__fail(p->ctx, TT_ERR_NUMERIC, "%s: no target counted so far (all are ignored "
                        "or have weight 0), so there is no mean gradient: check the labels", caller);
    const int64_t round = p->round;
    if (!within) p->round = p->kept.rounds;
    const bool found = tt__find_gradient(p, param, g);
    p->round = round;
    const bool by_count = p->built.t->accumulate && !p->built.t->by_totals;
    *factor = (by_count ? p->run.loss_norm / targets : 1) /
              (within ? p->results.scale.scale : p->kept.scale);
    if (found) return TT_OK;
    return tt__fail(p->ctx, TT_ERR_ARGUMENT, "%s: parameter '%s' has no gradient in this "
                    "program: it is frozen or not used", caller, param->name);
}

tt_status tt_get_gradient(tt_program *p, const tt_param *param, float *to)
{
    tt__so_far g;
    double factor;
    tt_status status = tt__gradient_now(p, param, "tt_get_gradient", &g, &factor);
    if (status != TT_OK) return status;
    const tt__stored stored = tt__stored_of(param, &g.part, p->arena);
    status = tt__sum_so_far(p, &g, &stored, to);
    for (int64_t k = 0; k < param->size && status == TT_OK; k++) to[k] = (float)(to[k] * factor);
    return status;
}

tt_status tt_set_gradient(tt_program *p, const tt_param *param, const float *from)
{
    tt__so_far g;
    double factor;
    float piece[TT__LEAF_CHUNK];
    tt_status status = tt__gradient_now(p, param, "tt_set_gradient", &g, &factor);
    if (status != TT_OK) return status;
    if (!p->round || p->arena->data * tt__slots(p) > 1)
        return tt__fail(p->ctx, TT_ERR_UNSUPPORTED, p->round ? "tt_set_gradient: the step sums the gradients "
                        "of %d data ranks and %d groups only in its update: use one of each"
                        : "tt_set_gradient: the step has ended: call it in before_update", p->arena->data,
                        p->settings.options.parallel.groups);
    const int32_t v = g.leaves ? g.leaves : g.total;
    const tt__tape_value *x = &p->built.t->values[v];
    const tt__stored stored = tt__stored_of(param, &g.part, p->arena);
    for (int r = tt__near_rank(p->arena); r < tt__near_end(p->arena); r++) {
        int64_t first, count = tt__stored_shard(&stored, r, &first);
        for (int64_t at = 0, n; at < count && status == TT_OK; at += n) {
            const int64_t e = tt__stored_element(&stored, r, at, &n);
            char *to = tt__storage_memory(p, r, x) + (size_t)at * tt_dtype_bytes(x->shape.dtype);
            const tt__memory memory = {p->arena, r, x->space, x->shape.dtype, to};
            n = tt__min(n, TT__LEAF_CHUNK);
            for (int64_t k = 0; k < n; k++) piece[k] = (float)(from[e + k] / factor);
            status = tt__write_memory(&memory, piece, TT_F32, (size_t)n);
        }
    }
    return status;
}
