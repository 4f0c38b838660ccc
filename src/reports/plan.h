#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/record.h"
#include "../passes/offload.h"
#include "../passes/overlap.h"
#include "../plan/place.h"
#include "../ranks/threads.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../context/cpu.h"
#include "../compile/program.h"
#include "../compile/choice.h"
#include "../compile/search.h"
#include "../compile/compile.h"
#include "../run/ranks.h"
#include "../run/memory.h"
#include "../run/processes.h"

/* ------------------------------------------------------------------------------------------------------ plan
   Returns a memory plan as numbers: a tt_plan, and the storages in use at the peak, which is the instruction
   with the most bytes in use. */

const char *tt_category_name(tt_category c)
{
    static const char *const names[] = {"parameters", "gradients", "optimizer", "activations", "workspace",
                                        "inputs"};
    return (unsigned)c < TT_MEM_CATEGORIES ? names[c] : "unknown category";
}

static tt_category tt__category_of(const tt_tape *t, int32_t base)
{
    if (!base) return TT_MEM_WORKSPACE;
    switch (t->values[base].storage) {
    case TT__STEP: return TT_MEM_WORKSPACE;
    case TT__PARAMETER: return TT_MEM_PARAMETERS;
    case TT__GRADIENT: return TT_MEM_GRADIENTS;
    case TT__STATE: return TT_MEM_OPTIMIZER;
    case TT__INPUT: return TT_MEM_INPUTS;
    default: return TT_MEM_ACTIVATIONS;
    }
}

/* tt__storages returns the number of storages that the program's arena may have: the resident workspace
   (number 0), then persistent values, then transient storages. tt__storage_of describes storage k in *to, and
   returns false if the arena does not have storage k. */
static int tt__storages(const tt_program *p) { return p->built.t->n_values + p->built.n_boxes; }

static bool tt__storage_of(const tt_program *p, int k, tt_plan_value *to)
{
    const tt_tape *t = p->built.t;
    memset(to, 0, sizeof *to);
    if (k >= t->n_values) {
        const tt__box *box = &p->built.box[k - t->n_values];
        to->name = box->value ? t->values[box->value].name : tt__instr_name(&t->code[box->first]);
        to->category = tt__category_of(t, box->value);
        to->bytes = box->bytes;
        to->first = box->first;
        to->last = box->last;
        return box->merged == k - t->n_values && box->bytes && box->space == TT__DEVICE;
    }
    const tt__tape_value *x = &t->values[k];
    const bool elsewhere = x->storage == TT__PARAMETER && !tt__placement_in(p->arena, x->param);
    to->name = k ? x->name : "matmul";
    to->category = tt__category_of(t, k);
    to->bytes = k ? tt__arena_bytes(t, x) : p->settings.kind->resident;
    to->last = (int)tt__max(1, t->n_code) - 1;
    return k ? x->persistent && x->base == k && x->space == TT__DEVICE && !elsewhere : to->bytes > 0;
}

/* Describes storage k of the program's arena in *to. Returns false if the arena does not have the storage or
   it is not in use at the peak. */
static bool tt__storage_at_peak(const tt_program *p, int k, tt_plan_value *to)
{
    return tt__storage_of(p, k, to) && to->first <= p->built.peak_at && to->last >= p->built.peak_at;
}

/* Returns the bytes that a rank loads from other ranks in a step with one full micro-batch on each data rank.
   Sets *min to the minimum that any method must load (tt_plan.min_moved_bytes). */
static double tt__moved_by(const tt_program *p, int rank, double *min)
{
    const tt_tape *t = p->built.t;
    double bytes = *min = 0;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        if (!tt__rules_of(i)->loads || i->slot > 1) continue; /* one micro-batch uses only slot 1 */
        const tt__tape_value *x = &t->values[i->in[0]], *y = &t->values[i->out[0]];
        const int64_t elements = tt__max(x->shape.rows * x->shape.cols, y->shape.rows * y->shape.cols);
        const double item = (double)tt_dtype_bytes((i->in[0] ? x : y)->shape.dtype);
        int me;
        const tt__members all = tt__members_of(p, rank, &i->move, &me);
        const tt__loads loads = tt__rules_of(i)->loads(&i->move, elements, me, all.count);
        bytes += item * (double)loads.done;
        const bool squares = y->base == t->squares || x->shape.dtype == TT__F64; /* also true for counts of
                                                                                    losses (F64) */
        if (x->param >= 0 || (i->segment <= TT__EACH_BACKWARD && !squares)) *min += item * loads.min;
    }
    return bytes;
}

/* Adds up the bytes that a rank copies between device and host in a step, in *plan. */
static void tt__count_transfers(const tt_program *p, tt_plan *plan)
{
    const tt_tape *t = p->built.t;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const tt__tape_value *x = &t->values[i->in[0]], *y = &t->values[i->out[0]];
        if (!i->in[0] || !i->out[0] || !tt__is(i, TT__ANY_SPACE) || x->space == y->space) continue;
        const size_t bytes = tt__matrix_bytes(x->shape.dtype, x->shape.rows, x->shape.cols);
        if (!i->later) plan->transfer_bytes += bytes;
        if (i->segment <= TT__EACH_BACKWARD) plan->transfer_micro_bytes += bytes;
    }
}

/* Returns the stage of a pipeline whose ranks need the most bytes. */
static const tt_program *tt__largest_stage(const tt_program *p)
{
    const tt_program *largest = p;
    for (int s = 1; s < p->stages; s++) {
        const tt__arena *a = p->stage[s]->arena, *max = largest->arena;
        if (tt__arena_size(a, tt__first_rank(a)) > tt__arena_size(max, tt__first_rank(max)))
            largest = p->stage[s];
    }
    return largest;
}

/* Returns the bytes of the host's memory in which a pipeline keeps the inputs of one data rank for a step. */
static size_t tt__queued_bytes(const tt_program *p)
{
    const int micros = p->settings.options.accumulate ? p->settings.options.parallel.micros : 1;
    return p->queued_at ? p->queued_at[p->n_recorded] * (size_t)tt__max(1, micros) : 0;
}

/* Returns the memory plan of one stage. */
static tt_plan tt__plan_of(const tt_program *p)
{
    tt_plan plan;
    tt_plan_value v;
    const tt_tape *t = p->built.t;
    const int first = tt__first_rank(p->arena), end = tt__end_rank(p->arena);
    memset(&plan, 0, sizeof plan);
    plan.device = p->settings.kind->name;
    plan.ranks = p->settings.group->ranks;
    plan.data = p->arena->data;
    plan.tensor = p->arena->tensor;
    plan.pipeline = p->arena->stages;
    tt__count_params(p->head, &plan.params, &plan.split_params);
    plan.bytes = tt__arena_size(p->arena, first);
    plan.min_bytes = tt__arena_size(p->arena, end - 1);
    plan.persistent_bytes = plan.bytes - p->arena->transient;
    plan.lower_bound_bytes = plan.persistent_bytes + p->built.bound;
    for (int r = first; r < end && plan.ranks > 1; r++) {
        double min, moved = tt__moved_by(p, r, &min);
        plan.moved_bytes = (size_t)fmax((double)plan.moved_bytes, moved);
        plan.min_moved_bytes = (size_t)fmax((double)plan.min_moved_bytes, min);
    }
    plan.host_bytes = tt__host_size(p, first) + p->arena->on_host + tt__staging_bytes(p);
    plan.host_bytes += tt__queued_bytes(p->head);
    if (!p->settings.kind->host) plan.host_bytes += TT__BOUNCE;
    const tt__device_group *c = p->settings.group;
    if (!p->settings.kind->host && c->ranks > 1) plan.host_bytes += TT__STAGE;
    if (c->local < c->ranks) plan.host_bytes += p->settings.kind->host ? 2 * TT__STAGE : TT__STAGE;
    double min, sent = tt__net_plan(p->head, &min);
    plan.sent_bytes = (size_t)sent;
    plan.min_sent_bytes = (size_t)min;
    tt__count_transfers(p, &plan);
    plan.instructions = t->n_code;
    plan.values = t->n_values - 1;
    const tt__replay *r = &p->built.replay;
    plan.compute_seconds = r->step.compute;
    plan.exposed_seconds = r->step.exposed;
    plan.host_seconds = r->step.on_host;
    plan.micro_compute_seconds = r->micro.compute;
    plan.micro_exposed_seconds = r->micro.exposed;
    for (int k = 0; k < tt__storages(p); k++)
        if (tt__storage_at_peak(p, k, &v)) plan.at_peak[v.category] += v.bytes;
    plan.init_bytes = plan.at_peak[TT_MEM_PARAMETERS] + p->settings.kind->resident;
    plan.init_bytes += TT__BOUNCE;
    plan.peak_instruction = p->built.peak_at;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const char *name = t->values[i->out[0]].name;
        if (k == p->built.peak_at)
            snprintf(plan.peak_name, sizeof plan.peak_name, "%s %.60s", tt__instr_name(i), name);
        plan.flops += tt__flops_at_capacity(t, i);
    }
    plan.extra_flops = tt__flops_of_copies(t);
    plan.recompute = tt__recompute_names[p->chosen.recompute];
    plan.offload = tt__out_lists[p->chosen.offload];
    plan.zero = p->chosen.zero;
    if (p->chosen.offload & TT__OUT_ACTIVATIONS)
        plan.offload_blocks = (int)tt__min(p->chosen.activations, p->built.blocks);
    if (p->built.in_flight) plan.ahead = p->chosen.ahead;
    for (int k = 0; k < t->n_code; k++)
        for (int j = 0; j < TT__MAX_OUT && t->code[k].recomputed; j++) {
            if (!t->code[k].out[j]) continue;
            plan.recomputed++;
            plan.recomputed_bytes += tt__storage_bytes(&t->values[t->code[k].out[j]]);
        }
    return plan;
}

tt_plan tt_stage_plan(const tt_program *p, int stage)
{
    return tt__plan_of(p->stage[stage < 0 || stage >= p->stages ? 0 : stage]);
}

tt_plan tt_program_plan(const tt_program *p)
{
    tt_plan plan = tt__plan_of(tt__largest_stage(p));
    if (p->stages > 1) plan.flops = plan.extra_flops = 0;
    for (int s = 0; s < p->stages && p->stages > 1; s++) {
        const tt_plan of_stage = tt_stage_plan(p, s);
        if (of_stage.bytes < plan.min_bytes) plan.min_bytes = of_stage.bytes;
        plan.flops += of_stage.flops;
        plan.extra_flops += of_stage.extra_flops;
    }
    return plan;
}

/* Returns whether storage a comes before storage b: storage a has more bytes or, with equal bytes, a lower
   number. arg: bytes of each storage. */
static bool tt__larger_storage(const void *arg, uint32_t a, uint32_t b)
{
    const size_t *bytes = (const size_t *)arg;
    return bytes[a] != bytes[b] ? bytes[a] > bytes[b] : a < b;
}

int tt_plan_values(const tt_program *all_stages, tt_plan_value *to, int capacity)
{
    const tt_program *p = tt__largest_stage(all_stages);
    const int values = p->built.t->n_values, storages = tt__storages(p);
    const size_t bytes_each = sizeof(size_t) + sizeof(uint32_t) + sizeof(int32_t);
    size_t *bytes = (size_t *)tt__calloc(p->ctx, bytes_each * (size_t)storages);
    uint32_t *order = (uint32_t *)(bytes + storages);
    int32_t *holds = (int32_t *)(order + storages); /* for each box: the value that it holds at the peak */
    int n = 0;
    for (int k = 0; k < storages && bytes; k++) {
        const tt__box *box = k < values ? NULL : &p->built.box[k - values];
        tt_plan_value v;
        if (box && box->first <= p->built.peak_at) holds[values + box->merged] = box->value;
        if (!tt__storage_at_peak(p, k, &v)) continue;
        order[n++] = (uint32_t)k;
        bytes[k] = v.bytes;
    }
    if (capacity > 0 && bytes) tt__sort_indices(order, (size_t)n, tt__larger_storage, bytes);
    for (int k = 0; k < n && k < capacity; k++) {
        tt__storage_of(p, (int)order[k], &to[k]);
        if (holds[order[k]]) to[k].name = p->built.t->values[holds[order[k]]].name;
    }
    tt__free(p->ctx, bytes);
    return n;
}
