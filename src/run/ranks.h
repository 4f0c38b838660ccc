#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ranks/threads.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "../compile/build.h"

/* ===========================================================================================================
   RUN                                                                                                src/run/
   Allocates a program's memory, accepts inputs, runs micro-batches and updates, and returns results. Uses all
   sections above.
   ======================================================================================================== */

/* Returns the number of the first rank of a data rank, in the program's stage. The data rank's other tensor
   ranks have the next numbers. */
static int tt__first_of(const tt_program *p, int data_rank)
{
    return tt__first_rank(p->arena) + data_rank * p->arena->tensor;
}

static int tt__data_rank(const tt_program *p, int rank)
{
    return rank / p->arena->tensor % p->arena->data;
}

/* tt__stage_of returns the program of the stage that runs on a rank. tt__last_stage returns the program of
   the last stage, which computes the loss. */
static tt_program *tt__stage_of(const tt_program *p, int rank)
{
    return p->head->stage[rank / tt__stage_ranks(p->arena)];
}

static tt_program *tt__last_stage(const tt_program *p) { return p->stage[p->stages - 1]; }

/* tt__is_here returns whether a rank is in this process. tt__has_data_rank returns whether any rank of this
   process belongs to the data rank. */
static bool tt__is_here(const tt_program *p, int rank) { return tt__is_local(p->settings.group, rank); }

static bool tt__has_data_rank(const tt_program *p, int data_rank)
{
    const tt__device_group *c = p->settings.group;
    bool has = false;
    for (int s = 0; s < tt__stages(p); s++) {
        const int first = s * tt__stage_ranks(p->arena) + data_rank * p->arena->tensor;
        has = has || (first < c->first + c->local && first + p->arena->tensor > c->first);
    }
    return has;
}

/* Returns the members of a collective over move->over in which `rank` takes part, and sets *me to the member
   number of `rank`. */
static tt__members tt__members_of(const tt_program *p, int rank, const tt__move *move, int *me)
{
    const int tensor = p->arena->tensor, each = tt__stage_ranks(p->arena), place = rank % each;
    const tt__members data = {rank - place + rank % tensor, tensor, p->arena->data};
    const tt__members of_tensor = {rank - rank % tensor, 1, tensor};
    const tt__members stages = {(p->arena->stages - 1) * each + place, -each, p->arena->stages};
    const tt__members tied = {move->from * each + place, (move->to - move->from) * each, 2};
    const tt__members m = move->over == TT__OVER_DATA ? data : move->over == TT__OVER_STAGES ? stages
                        : move->over == TT__OVER_TIED ? tied : of_tensor;
    *me = (rank - m.first) / m.stride;
    return m;
}

/* Returns the rank of another stage with which `rank` exchanges the value of instruction i. Both ranks have
   the same position in their stages. Sets *way to 0 if the value moves towards the last stage, to 1 if
   towards the first. */
static int tt__neighbour(const tt_program *p, int rank, const tt__instr *i, int *way)
{
    int me;
    const tt__members all = tt__members_of(p, rank, &i->move, &me);
    *way = i->move.to > i->move.from;
    return all.first + all.stride * (i->out[0] ? i->move.from : i->move.to);
}

/* tt__slots returns the number of slots of a data rank, one for each of its leaves of the tree of sums
   (ranks/threads.h). tt__slot returns the slot to which a round adds. */
static int tt__slots(const tt_program *p)
{
    return p->settings.options.parallel.groups / p->settings.options.parallel.data;
}

static int tt__slot(const tt_program *p, int64_t round) { return (int)(round % tt__slots(p)); }

/* Returns how many slots have contents when `segment` sums them. The slots that have contents are always the
   first ones. */
static int tt__slots_used(const tt_program *p, int64_t round, tt__segment segment)
{
    const int64_t slots = tt__slots(p);
    return (int)(segment == TT__EACH_LAP ? (round + slots - 1) % slots + 1 : tt__min(round, slots));
}

/* Returns the inputs that a pipeline has kept for a rank's micro-batch of a round. */
static const tt__queued *tt__queued_at(const tt_program *p, int64_t round, int rank)
{
    return &p->head->queued[round * p->arena->data + tt__data_rank(p, rank)];
}

static tt__now tt__now_of(const tt_program *head)
{
    const tt__now now = {head->round, head->present, false, NULL};
    return now;
}

/* Returns the number of rows of each axis in run *now on a rank; in a pipeline, for the micro-batch of round
   now->round. */
static const int64_t *tt__run_rows(const tt_program *p, const tt__now *now, int rank)
{
    if (now->rows) return now->rows;
    if (tt__stages(p) == 1) return p->rank[rank].axis_rows;
    return tt__queued_at(p, now->round, rank)->rows;
}

/* Returns how many rows of an axis a rank has in run *now. Sets *first to the index of the rank's first
   row. */
static int64_t tt__axis_rows(const tt_program *p, const tt__now *now, int rank, int32_t axis, int64_t *first)
{
    const tt__row_axis *a = &p->built.t->axes[axis];
    const int64_t *rows = tt__run_rows(p, now, rank);
    *first = 0;
    if (!a->parts) return rows[axis];
    return tt__shard(rows[a->of], 1, false, rank % p->arena->tensor, a->parts, first);
}

static int64_t tt__actual_rows(const tt_program *p, const tt__now *now, int rank, int32_t id)
{
    const tt__shape *s = &p->built.t->values[id].shape;
    int64_t first;
    return s->axis ? tt__axis_rows(p, now, rank, s->axis, &first) + s->extra : s->rows;
}

/* Fails if a parameter of this program is in another program's arena that does not fit: the arena has no
   memory yet, or stores the parameter on another device, or with another layout or dtype. */
static tt_status tt__params_ready(const tt_program *p)
{
    const tt_tape *t = p->built.t;
    tt_status status = TT_OK;
    for (int32_t v = 1; v < t->n_values && status == TT_OK; v++) {
        if (t->values[v].storage != TT__PARAMETER || t->values[v].base != v) continue;
        const tt_param *param = p->ctx->params[t->values[v].param];
        const tt__arena *a = tt__placement_arena(p->settings.kind, p->arena, param, p->arena->stage,
                                            p->arena->stages);
        if (!a)
            return tt__fail(p->ctx, TT_ERR_ARGUMENT, "the program that was to hold parameter '%s' was freed "
                            "before it was allocated: compile this program again", param->name);
        if (a != p->arena && !a->allocated)
            return tt__fail(p->ctx, TT_ERR_ARGUMENT, "parameter '%s' is in the arena of an earlier program, "
                            "which is not allocated: call tt_allocate for that program first, or compile "
                            "this one with `share`", param->name);
        status = tt__check_placement(p, a, v);
    }
    return status;
}

/* A rank's device memory has three parts: persistent storages, transient storages, and storages of data rank
   0 alone. Returns the offset, in bytes, of the part that has storage x. */
static size_t tt__region(const tt_program *p, const tt__tape_value *x)
{
    if (!x->persistent) return p->arena->persistent;
    return x->part.root ? p->arena->persistent + p->arena->transient : 0;
}

/* tt__host_size returns the bytes of a rank's values in the host's memory. This memory has three parts:
   persistent storages, transient storages, and storages of data rank 0 alone. tt__host_region returns the
   offset, in bytes, of the part that has storage x. */
static size_t tt__host_size(const tt_program *p, int rank)
{
    const tt__built *b = &p->built;
    const bool first = rank - tt__first_rank(p->arena) < p->arena->tensor;
    return b->host_persistent + b->host_transient + (first ? b->host_of_first : 0);
}

static size_t tt__host_region(const tt_program *p, const tt__tape_value *x)
{
    if (!x->persistent) return p->built.host_persistent;
    return x->part.root ? p->built.host_persistent + p->built.host_transient : 0;
}

/* Returns the address of storage x on a rank; NULL if the rank belongs to another process. */
static char *tt__storage_memory(const tt_program *p, int rank, const tt__tape_value *x)
{
    if (!tt__is_here(p, rank)) return NULL;
    if (x->storage == TT__PARAMETER) return tt__param_memory(p->ctx->params[x->param], rank);
    if (x->space == TT__HOST) return p->rank[rank].host + tt__host_region(p, x) + x->place;
    return p->arena->memory[rank] + tt__region(p, x) + x->place;
}

/* Fills optimizer states and accumulated gradients with 0 before their first use. On systems that allocate
   pages on first use, these storages take no physical memory until then. */
static tt_status tt__zero_states(tt_program *p)
{
    const tt__arena *a = p->arena;
    tt_status status = TT_OK;
    for (int s = 1; s < p->stages && status == TT_OK; s++) status = tt__zero_states(p->stage[s]);
    for (int r = tt__near_rank(a); r < tt__near_end(a) && !p->zeroed && status == TT_OK; r++) {
        for (int32_t v = 1; v < p->built.t->n_values && status == TT_OK; v++) {
            const tt__tape_value *x = &p->built.t->values[v];
            const bool elsewhere = x->storage == TT__PARAMETER || x->space == TT__HOST;
            if (!x->persistent || x->base != v || elsewhere || x->storage == TT__INPUT) continue;
            if (x->part.root && tt__data_rank(p, r)) continue;
            char *memory = tt__storage_memory(p, r, x);
            status = a->kind->backend->fill(a->group->device[r], memory, 0, tt__storage_bytes(x));
        }
        if (p->rank[r].host) memset(p->rank[r].host, 0, tt__host_size(p, r));
        status = tt__device_status(p->ctx, a->group, r, status);
    }
    p->zeroed = status == TT_OK;
    return status;
}
