#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/cpu_launch.h"
#include "../ranks/processes.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../context/devices.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "ranks.h"
#include "inputs.h"
#include "launch.h"
#include "tune.h"

/* --------------------------------------------------------------------------------------------------- results
   Runs a segment on all ranks, collects its results, and reports numbers that are not finite. */

/* Runs a segment on all ranks. sends: also starts to copy the results to the host, which reads them later. */
static tt_status tt__run_segment(tt_program *p, tt__segment segment, bool sends)
{
    tt__segment_job job = {p, segment, sends};
    const tt__device_group *c = p->settings.group;
    const bool micro = segment == TT__EACH_MICRO;
    tt_status status = tt__check_whole(p->ctx, p->arena);
    if (p->ctx->net) p->ctx->net->ranks = c->local;
    if (status == TT_OK && micro) status = tt__on_ranks(p->ctx, p->settings.group, tt__check_inputs, p);
    if (status == TT_OK) status = tt__zero_states(p);
    if (micro) status = tt__agree_flops(p, status);
    for (tt_program *q = p->arena->programs; q && status == TT_OK; q = q->next)
        if (q != p || micro) status = tt__read_unread(q); /* reads the results before q's memory changes */
    if (status == TT_OK) status = tt__tune_products(p);
    if (micro || p->arena->results_of != p) p->arena->results_of = NULL;
    if (status != TT_OK) return status;
    tt__overwrite_segment(p, segment);
    const bool custom = p->settings.options.optimizer.kind == TT_OPTIMIZER_CUSTOM; /* the optimizer's function
                                                                                      may fail */
    const bool may_tear = p->built.t->early || (segment == TT__EACH_STEP && (c->ranks > 1 || custom));
    for (int s = 0; s < p->stages; s++) p->stage[s]->arena->partly_updated = may_tear;
    status = tt__run_on_ranks(p, tt__run_rank, &job);
    tt__tell_graphs(p);
    if (status != TT_OK) return status;
    for (int s = 0; s < p->stages; s++) p->stage[s]->arena->partly_updated = false;
    if (micro) p->arena->results_of = p;
    return TT_OK;
}

/* Waits until a rank's device has done all its work, and reads the results of a step from the rank's
   memory. */
static tt_status tt__read_rank(tt_program *p, int rank)
{
    const tt_tape *t = p->built.t;
    tt__rank *r = &p->rank[rank];
    tt_status status = TT_OK;
    const tt__arena *a = p->arena;
    const tt__device_group *c = a->group;
    if (!t->results) return tt__device_status(p->ctx, c, rank, a->kind->backend->wait(c->device[rank]));
    const tt__memory from = {a, rank, t->values[t->results].space, TT_U8,
                              tt__resolve(p, rank, t->results).data};
    /* With pinned memory such as `bounce`, this copy does not stop other devices. */
    void *to = from.space == TT__DEVICE && !a->kind->host ? (void *)a->bounce[rank] : &r->results;
    status = tt__read_memory(&from, to, TT_U8, sizeof r->results);
    if (status == TT_OK && to != &r->results) memcpy(&r->results, to, sizeof r->results);
    if (!t->scale) r->results.scale = p->head->results.scale;
    return status;
}

/* The results of a data rank, as processes exchange them. */
typedef struct tt__found { tt__totals totals; double flops; } tt__found;
typedef char tt__found_fits_a_note[sizeof(tt__found) * TT__RANKS <= TT__NOTE ? 1 : -1];

/* Exchanges the results of a run between processes, and sets p->rank[].results of the first rank of each data
   rank. */
static tt_status tt__exchange_results(tt_program *p)
{
    const tt__device_group *c = p->settings.group;
    const int data = p->arena->data;
    tt_program *last = tt__last_stage(p);
    tt__found found[TT__RANKS]; /* for each data rank; all 0 for a data rank of another process */
    tt_status status = TT_OK;
    memset(found, 0, sizeof found);
    for (int r = c->first; r < c->first + c->local && status == TT_OK; r++) {
        const int d = tt__data_rank(p, r);
        if (d >= p->present) continue;
        if (r == tt__first_of(last, d)) status = tt__read_rank(last, r);
        if (r == tt__first_of(last, d)) found[d].totals = p->rank[r].results.totals;
        found[d].flops += p->rank[r].flops;
    }
    status = tt__agree(p->ctx, "collecting the results of a run", status, found,
                       sizeof *found * (size_t)data);
    for (int d = 0; d < p->present && status == TT_OK; d++) {
        const int first = tt__first_of(last, d);
        for (int r = 0; r < c->ranks; r++) if (tt__data_rank(p, r) == d) p->rank[r].flops = 0;
        for (int k = 0; k < c->ranks / c->local; k++) {
            const tt__found *x = (const tt__found *)tt__noted(p->ctx, k, found) + d;
            if (k == tt__process_of(c, first)) p->rank[first].results.totals = x->totals;
            p->rank[first].flops += x->flops;
        }
    }
    return status;
}

/* Reads the results of an update from a rank, which may belong to another process. All processes must call
   this function. */
static tt_status tt__read_first(tt_program *p, int rank)
{
    const tt__device_group *c = p->settings.group;
    const int own = tt__is_here(p, rank) ? rank : c->first;
    tt__results *results = &p->rank[rank].results;
    /* A process that does not have `rank` reads one of its own ranks, only to wait for the rank's device. */
    tt_status status = tt__read_rank(tt__stage_of(p, own), own);
    if (status != TT_OK) return tt__net_fail(p->ctx, status);
    const int process = tt__process_of(c, rank);
    return tt__net_fetch(p->ctx, process, -1, "collecting the results of a step", results, sizeof *results);
}

static void tt__add_totals(tt__totals *to, const tt__totals *x)
{
    to->loss += x->loss;
    to->targets += x->targets;
    to->correct += x->correct;
    to->margin += x->margin;
}

/* Reads the results of all ranks. In training, each rank has the results of all ranks after the update.
   Otherwise, adds up the results of the data ranks that had a micro-batch. */
static tt_status tt__read_results(tt_program *p)
{
    const bool trains = p->settings.options.train, net = p->settings.group->local < p->settings.group->ranks;
    tt_program *q = tt__last_stage(p);
    if (!trains && net) {
        tt_status found = tt__exchange_results(p);
        memset(&p->results.totals, 0, sizeof p->results.totals);
        for (int d = 0; d < p->present && found == TT_OK; d++)
            tt__add_totals(&p->results.totals, &p->rank[tt__first_of(q, d)].results.totals);
        return found;
    }
    tt_status status = net ? tt__read_first(p, tt__first_of(q, 0)) : tt__read_rank(q, tt__first_of(q, 0));
    p->results = q->rank[tt__first_of(q, 0)].results;
    for (int d = 1; d < p->present && !trains && status == TT_OK; d++) {
        status = tt__read_rank(q, tt__first_of(q, d));
        tt__add_totals(&p->results.totals, &q->rank[tt__first_of(q, d)].results.totals);
    }
    return status;
}

/* Reads the totals of losses of the step's micro-batches so far. If the tree of sums is summed later
   (tape->counted is not 0), adds up its leaves. Sets *bad to the first data rank whose loss is not finite; 0:
   none or unknown. */
static tt_status tt__read_counts(tt_program *head, int *bad)
{
    tt_program *p = tt__last_stage(head);
    const tt_tape *t = p->built.t;
    const tt__tape_value *x = &t->values[t->counted];
    const tt__device_group *c = p->settings.group;
    const int data = p->arena->data, leaves = tt__slots(p) * data;
    tt__totals all = {0, 0, 0, 0}, some[TT__RANKS]; /* all: totals of all leaves; some: totals of each leaf
                                                       in this process */
    tt_status status = t->counted ? TT_OK : tt__read_results(head);
    *bad = 0;
    if (!t->counted) return status;
    memset(some, 0, sizeof some);
    for (int k = 0; k < leaves && status == TT_OK; k++) {
        const int rank = tt__first_of(p, k % data);
        if (!tt__is_here(p, rank) || k % data >= head->in_slot[k / data]) continue;
        char *from = tt__storage_memory(p, rank, x) + (size_t)(k / data) * tt__slot_bytes(x);
        const tt__memory totals = {p->arena, rank, x->space, TT_U8, from};
        status = tt__read_memory(&totals, &some[k], TT_U8, sizeof *some);
    }
    status = tt__agree(p->ctx, "collecting the counts of losses", status, some,
                       sizeof *some * (size_t)leaves);
    for (int k = 0; k < leaves && status == TT_OK; k++) { /* in the same order for any number of ranks */
        const int d = k % data;
        const int process = tt__process_of(c, tt__first_of(p, d));
        const tt__totals *own = (const tt__totals *)tt__noted(p->ctx, process, some) + k;
        if (d >= head->in_slot[k / data]) continue;
        if (isfinite(all.loss) && !isfinite(own->loss)) *bad = d;
        tt__add_totals(&all, own);
    }
    head->results.totals = all;
    return status;
}

static void tt__give_stats(const tt_program *p, tt_stats *stats, double norm)
{
    if (!stats) return;
    stats->loss = p->results.totals.targets > 0 ? p->results.totals.loss / p->results.totals.targets : 0;
    stats->targets = p->results.totals.targets;
    stats->correct = p->results.totals.correct;
    stats->margin = p->results.totals.margin;
    stats->grad_norm = norm;
    stats->flops = p->flops;
    stats->step = p->run.step;
    stats->loss_scale = p->results.scale.scale;
    stats->skipped = (int64_t)p->results.scale.skipped;
}

static void tt__begin_step(tt_program *p)
{
    memset(&p->results.totals, 0, sizeof p->results.totals);
    memset(&p->results.clipped, 0, sizeof p->results.clipped);
    p->flops = 0;
    p->round = 0;
    memset(p->in_slot, 0, sizeof p->in_slot);
    p->norm_known = p->micro_failed = false;
    p->kept.rounds = 0;
    p->outcome = TT__UPDATED;
}

/* Returns the largest magnitude in value v on a rank; infinity if a number is not finite. Returns 0 if the
   read fails, because the device's error is reported elsewhere. */
static float tt__largest_of(tt_program *p, int rank, int32_t v)
{
    const tt__mat m = tt__resolve(p, rank, v);
    tt__memory from = {p->arena, rank, p->built.t->values[v].space, m.dtype, NULL};
    float x[256], largest = 0;
    for (int64_t r = 0; r < m.rows; r++)
        for (int64_t c = 0, n; c < m.cols; c += n) {
            n = tt__min(TT__COUNT(x), m.cols - c);
            from.data = (char *)tt__at(&m, r) + (size_t)c * tt_dtype_bytes(m.dtype);
            if (tt__read_memory(&from, x, TT_F32, (size_t)n) != TT_OK) return 0;
            for (int64_t k = 0; k < n; k++) {
                if (!isfinite(x[k])) return INFINITY;
                largest = fmaxf(largest, fabsf(x[k]));
            }
        }
    return largest;
}

/* Finds a parameter, on this process's ranks, that explains why results are not finite: a parameter with a
   number that is not finite or, without one, the parameter with the largest number above 1e10. Writes its
   name and the reason to `to`. If no parameter explains the results, returns false and writes "". */
static bool tt__bad_parameter(tt_program *p, char *to, size_t capacity)
{
    const float huge = 1e10f;
    const char *name = NULL;
    float largest = huge;
    for (int s = 0; s < p->stages && isfinite(largest); s++) {
        tt_program *q = p->stage[s];
        for (int32_t v = 1; v < q->built.t->n_values && isfinite(largest); v++) {
            const tt__tape_value *x = &q->built.t->values[v];
            for (int r = tt__near_rank(q->arena); r < tt__near_end(q->arena); r++) {
                const float max = x->storage == TT__PARAMETER && x->base == v ? tt__largest_of(q, r, v) : 0;
                if (!(max > largest)) continue;
                largest = max;
                name = x->name;
            }
        }
    }
    to[0] = 0;
    if (name && isfinite(largest))
        snprintf(to, capacity, "parameter '%.200s' has values as large as %g", name, (double)largest);
    else if (name) snprintf(to, capacity, "parameter '%.200s' has a value that is not finite", name);
    return name != NULL;
}

/* Fails if the loss is not finite, and names a parameter that may be the cause. micro: number of the
   micro-batch in the step; -1: unknown. */
static tt_status tt__check_loss(tt_program *p, int64_t micro)
{
    char which[64] = "", cause[300];
    if (isfinite(p->results.totals.loss)) return TT_OK;
    const bool bad = tt__bad_parameter(p, cause, sizeof cause);
    if (micro >= 0) snprintf(which, sizeof which, ", micro-batch %lld", (long long)micro);
    p->outcome = TT__NOT_FINITE;
    return tt__fail(p->ctx, TT_ERR_NUMERIC, "step %lld%s: the loss '%s' is not finite; nothing was updated: "
                    "%s", (long long)p->run.step, which, p->built.t->values[p->built.root].name,
                    bad ? cause : "check the inputs, or lower the learning rate");
}

/* Prepares the next round: chooses loss_norm if the step accumulates and has none yet, and notes how many
   leaves of the round's slot have contents. */
static void tt__begin_micro(tt_program *p)
{
    const tt_program *last = tt__last_stage(p);
    const tt_tape *t = last->built.t;
    const tt__now now = tt__now_of(p);
    /* undoing the division by loss_norm, a power of two near the number of targets, is exact */
    if (t->accumulate && !p->norm_known) {
        int exponent = 0, first = tt__first_of(last, 0);
        for (int k = 0; k < t->n_code; k++)
            if (tt__is(&t->code[k], TT__LOSS))
                frexp((double)tt__actual_rows(last, &now, first, t->code[k].in[0]), &exponent);
        p->run.loss_norm = ldexp(1.0, exponent);
        p->norm_known = true;
    }
    int *in_slot = &p->in_slot[tt__slot(p, p->round)];
    *in_slot = p->present > *in_slot ? p->present : *in_slot;
}
