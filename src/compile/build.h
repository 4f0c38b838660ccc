#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/rules.h"
#include "../passes/precision.h"
#include "../passes/stages.h"
#include "../passes/overlap.h"
#include "../plan/place.h"
#include "../context/memory.h"
#include "../context/params.h"
#include "program.h"
#include "passes.h"
#include "settings.h"

/* ----------------------------------------------------------------------------------------------------- build
   Builds a program: runs the passes on a copy of the tape, then gives each value its place in memory. */

/* Places transient storages and workspaces in memory, and also the persistent storages that are in the host's
   memory, except parameters. */
static tt_status tt__place_transients(tt__built *b)
{
    tt_tape *t = b->t;
    const int n = (int)tt__max(1, t->n_code);
    size_t bound;
    int peak;
    tt_status status = tt__lifetimes(t, b->root, &b->box, &b->n_boxes);
    if (status != TT_OK) return status;
    status = tt__place(t->ctx, b->box, b->n_boxes, n, TT__HOST, &b->host_transient, &bound, &peak);
    if (status == TT_OK)
        status = tt__place(t->ctx, b->box, b->n_boxes, n, TT__DEVICE, &b->transient, &b->bound, &b->peak_at);
    if (status != TT_OK) return status;
    for (int32_t v = 1; v < t->n_values; v++) t->values[v].place = TT__NO_PLACE;
    for (int k = 0; k < b->n_boxes; k++) {
        const tt__box *box = &b->box[k];
        if (box->value) t->values[box->value].place = box->place;
        else t->code[box->first].workspace_place = box->place;
    }
    for (int32_t v = 1; v < t->n_values; v++) {
        tt__tape_value *x = &t->values[v];
        if (!x->persistent || x->base != v || x->space != TT__HOST) continue;
        if (x->storage == TT__PARAMETER) continue; /* tt__place_persistent places parameters */
        size_t *end = x->part.root ? &b->host_of_first : &b->host_persistent;
        x->place = *end;
        *end += tt__arena_bytes(t, x);
    }
    status = tt__verify_places(t, b->box, b->n_boxes, TT__HOST, b->host_transient);
    return status == TT_OK ? tt__verify_places(t, b->box, b->n_boxes, TT__DEVICE, b->transient) : status;
}

/* Sets the fields of the tape that say how ranks share the work, from the options and the choice. */
static void tt__spread_tape(tt_tape *t, const tt__settings *s, const tt__choice *choice)
{
    const tt_parallel *p = &s->options.parallel;
    t->data = p->data;
    t->slots = s->options.accumulate ? p->groups / p->data : 1;
    /* Adafactor's state is too small to be worth dividing, and its update needs whole gradients. */
    const bool whole = s->options.train && s->options.optimizer.kind == TT_ADAFACTOR && choice->zero == 1;
    t->zero = whole ? 0 : choice->zero;
    t->server = p->server;
    t->stages = p->pipeline;
    t->stage = s->stage;
    t->early = s->options.train && choice->update == TT__UPDATE_BACKWARD;
    t->on_host = s->options.train && choice->update == TT__UPDATE_HOST;
    t->sums_micros = choice->zero > 1 || p->reduce_micros || (t->early && p->data > 1);
    t->accumulate = s->options.train && (s->options.accumulate || p->data > 1);
}

/* Returns whether the programs of arena `a` have the data ranks, tensor ranks and stages of settings *s. */
static bool tt__same_ranks(const tt__arena *a, const tt__settings *s)
{
    return a->data == s->options.parallel.data && a->tensor == s->options.parallel.tensor &&
           a->stages == s->options.parallel.pipeline;
}

/* Returns a mask with the bit of arena a's pipeline stage; 0 if `a` is NULL or its pipeline does not have
   `stages` stages. */
static uint64_t tt__stage_bit(const tt__arena *a, int stages)
{
    return a && a->stages == stages ? 1ull << a->stage : 0;
}

/* Notes for each parameter in which layout an arena already stores it, because this tape must use that
   layout. When the first stage of a pipeline is compiled, also notes which stages store the parameter: this
   set must stay the same while the other stages are compiled. */
static void tt__note_held(tt_tape *t, const tt__settings *s)
{
    tt__arena *shared = s->options.share ? s->options.share->arena : NULL;
    for (int32_t v = 1; v < t->n_values; v++) {
        tt__tape_value *x = &t->values[v];
        if (x->storage != TT__PARAMETER || x->base != v) continue;
        tt_param *p = t->ctx->params[x->param];
        if (!t->stage)
            p->stages = tt__stage_bit(p->owner, t->stages) | tt__stage_bit(p->second_owner, t->stages);
        const tt__arena *a = tt__placement_arena(s->kind, shared, t->ctx->params[x->param], t->stage,
                                                 t->stages);
        const tt__placement *placement = tt__placement_in(a, x->param);
        if (placement && a->group == s->group && tt__same_ranks(a, s))
            x->held = 1 + (int)placement->part.split;
    }
}

/* Notes the SEND instructions of a pipeline stage, and for each SEND the segment that first writes its
   operand. first: for each storage, 1 + the first instruction that writes it (tt__first_writers). */
static void tt__note_sends(tt__built *b, const int32_t *first)
{
    const tt_tape *t = b->t;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        if (i->move.over != TT__OVER_STAGES || i->out[0]) continue;
        const int way = i->move.to > i->move.from;
        b->send[way] = k + 1;
        b->sends_from[way] = t->code[first[t->values[i->in[0]].base] - 1].segment;
    }
}

/* Copies a tape into *b and runs the first passes on the copy. After an error, *b is empty. */
static tt_status tt__begin_build(const tt_tape *t, int32_t root, const tt__settings *s,
                                 const tt__choice *choice, tt__built *b)
{
    memset(b, 0, sizeof *b);
    b->root = root;
    b->recorded = tt__hash_on(tt__tape_hash(t), &root, sizeof root);
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__tape_value *x = &t->values[v];
        const int rounding = x->storage == TT__PARAMETER ? (int)t->ctx->params[x->param]->rounding : 0;
        const int32_t both[] = {v, rounding};
        if (rounding) b->recorded = tt__hash_on(b->recorded, both, sizeof both);
    }
    b->t = tt__copy_tape(t);
    if (!b->t) return TT_ERR_MEMORY;
    b->t->alignment = s->kind->alignment;
    b->t->host = s->kind->host;
    tt__spread_tape(b->t, s, choice);
    tt__note_held(b->t, s);
    tt__mark_gradients(b->t);
    if (!s->options.train) b->t->values[root].keep = b->t->values[b->t->values[root].base].keep = true;
    tt_status status = tt__check_forms(b->t, s->options.train);
    if (status == TT_OK) status = tt__first_passes(b, s);
    if (status == TT_OK) return TT_OK;
    tt__built_free(t->ctx, b);
    memset(b, 0, sizeof *b);
    return status;
}

/* Runs the last passes on the tape of *b, and computes all fields of *b except the places of values. */
static tt_status tt__end_build(tt__built *b, const tt__settings *s, const tt__choice *choice)
{
    tt_tape *t = b->t;
    tt_status status = tt__last_passes(b, s, choice);
    if (status == TT_OK && s->options.parallel.pipeline > 1) {
        int32_t *first = tt__first_writers(t);
        if (!first) return TT_ERR_MEMORY;
        tt__hold_micros(t, first, s->in_flight);
        tt__note_sends(b, first);
        tt__free(t->ctx, first);
    }
    for (int32_t v = 1; status == TT_OK && v < t->n_values; v++) {
        tt__tape_value *x = &t->values[v];
        const tt__tape_value *base = &t->values[x->base];
        const bool apart = x->persistent && x->base == v && x->space != TT__HOST;
        x->parted = base->slots > 1 || base->copies > 1 || x->part.unit || tt__is_own_rows(t, v);
        if (apart && x->part.root) b->of_first += tt__arena_bytes(t, x);
    }
    for (int k = 0, n = 1, started = 0; status == TT_OK && k < t->n_code; k++) {
        tt__instr *i = &t->code[k];
        i->workspace = (i->on_host ? tt__cpu_workspace : s->kind->workspace)(s->threads, t, i);
        b->together = (int)tt__max(b->together, n);
        n = i->with_next ? n + 1 : 1;
        started += (i->stream != TT__COMPUTE_STREAM) - tt__is(i, TT__WAITS);
        b->in_flight = (int)tt__max(b->in_flight, started);
    }
    return status == TT_OK ? tt__replay_of(t, &s->costs, &b->replay) : status;
}

/* Builds a program, which belongs to no arena yet: rewrites a copy of the tape and places its transient
   storages. The result depends only on the arguments, on which parameters are frozen, and on how ranks
   already store parameters. After an error, *b is empty. */
static tt_status tt__build(const tt_tape *t, int32_t root, const tt__settings *s, const tt__choice *choice,
                           tt__built *b)
{
    tt_status status = tt__begin_build(t, root, s, choice, b);
    if (status != TT_OK) return status;
    status = tt__end_build(b, s, choice);
    if (status == TT_OK) status = tt__check_total(b->t, s->kind->resident);
    if (status == TT_OK) status = tt__place_transients(b);
    if (status == TT_OK) status = tt__refused(b->t, s->group);
    if (status != TT_OK) {
        tt__built_free(t->ctx, b);
        memset(b, 0, sizeof *b);
    }
    return status;
}

/* Fails if the program cannot use parameter v in the placement and dtype in which arena `a` stores it. */
static tt_status tt__check_placement(const tt_program *p, const tt__arena *a, int32_t v)
{
    const tt__settings *s = &p->settings;
    const tt__tape_value *x = &p->built.t->values[v];
    const char *name = p->ctx->params[x->param]->name;
    const tt__placement *placement = tt__placement_in(a, x->param);
    const tt_dtype dtype = placement->dtype;
    if (a->group != s->group)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "an earlier program has put parameter '%s' on device '%s', "
                        "but this program is for '%s': compile both for one device", name, a->group->name,
                        s->group->name);
    if (!tt__same_ranks(a, s) || placement->part.split != x->part.split ||
        placement->part.unit != x->part.unit)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "an earlier program shards parameter '%s' over the ranks in "
                        "another way than this one: compile both with the same `parallel`", name);
    if (placement->space != x->space)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "an earlier program keeps parameter '%s' in the %s memory, "
                        "and this one elsewhere: compile both with the same `offload`", name,
                        placement->space == TT__HOST ? "host's" : "device's");
    if (dtype == x->shape.dtype) return TT_OK;
    return tt__fail(p->ctx, TT_ERR_ARGUMENT, "precision '%s' needs parameter '%s' as %s, but an earlier "
                    "program holds it as %s: compile both with the same precision",
                    tt__precision_names[s->precision.kind], name, tt_dtype_name(x->shape.dtype),
                    tt_dtype_name(dtype));
}

/* Returns whether x is a persistent storage that an arena holds. */
static bool tt__in_arena(const tt__tape_value *x)
{
    return x->persistent && (x->space == TT__DEVICE || x->storage == TT__PARAMETER);
}

/* Returns whether device and host have one memory, in which offloading saves nothing. */
static bool tt__one_memory(const tt_program *p) { return p->settings.kind->host && !p->ctx->apart; }

/* Returns the bytes of the host's memory for values that options or the caller's marks offload, without
   parameters, which the arena counts. */
static size_t tt__offloaded_bytes(const tt__built *b)
{
    size_t bytes = 0;
    bool any = b->t->on_host;
    for (int32_t v = 1; v < b->t->n_values; v++) {
        const tt__tape_value *x = &b->t->values[v];
        const bool moved = x->base == v && x->space == TT__HOST && x->storage != TT__STEP;
        if (moved && x->persistent && x->storage != TT__PARAMETER) bytes += tt__arena_bytes(b->t, x);
        any = any || moved;
    }
    /* without offload, host_transient holds only settings and results of runs, which do not count */
    return any ? bytes + b->host_transient : 0;
}

/* Sets bytes[TT__DEVICE] and bytes[TT__HOST] to what arena `a` (NULL: a new arena) must add for the program:
   the persistent storages that no arena holds yet. Fails if an arena holds a parameter in a way that the
   program cannot use. */
static tt_status tt__added_bytes(const tt_program *p, tt__arena *a, size_t bytes[TT__SPACES])
{
    const tt_tape *t = p->built.t;
    bytes[TT__DEVICE] = bytes[TT__HOST] = 0;
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__tape_value *x = &t->values[v];
        const tt__arena *placement = NULL;
        if (!tt__in_arena(x) || x->base != v) continue;
        if (x->storage == TT__PARAMETER)
            placement = tt__placement_arena(p->settings.kind, a, p->ctx->params[x->param], t->stage,
                                            t->stages);
        tt_status status = placement ? tt__check_placement(p, placement, v) : TT_OK;
        if (status != TT_OK) return status;
        if (!placement && !x->part.root) bytes[x->space] += tt__arena_bytes(t, x);
    }
    return TT_OK;
}

/* Sizes of an arena once a program has joined it. */
typedef struct tt__extent {
    size_t persistent, transient;
    size_t bytes;           /* persistent and transient bytes, bytes that only data rank 0 has and, if device
                               and host have one memory, offloaded bytes */
    size_t budget;          /* smallest memory_budget of the arena's programs; 0: none has one */
    bool by_them;           /* the budget is that of another program of the arena */
    bool grows;             /* the arena needs more bytes than before */
} tt__extent;

/* Computes the sizes of arena `shared` (NULL: a new arena) once the program has joined it. */
static tt_status tt__extent_of(const tt_program *p, tt__arena *shared, tt__extent *e)
{
    tt__arena none;
    const tt__arena *a = shared ? shared : &none;
    memset(&none, 0, sizeof none);
    const size_t own = p->settings.options.memory_budget, held = a->persistent + a->transient + a->of_first;
    size_t added[TT__SPACES];
    tt_status status = tt__added_bytes(p, shared, added);
    if (status == TT_OK) status = tt__check_total(p->built.t, held);
    if (status != TT_OK) return status;
    e->persistent = (shared ? a->persistent : p->settings.kind->resident) + added[TT__DEVICE];
    e->transient = a->transient > p->built.transient ? a->transient : p->built.transient;
    e->bytes = e->persistent + e->transient + a->of_first + p->built.of_first;
    if (tt__one_memory(p)) {
        e->bytes += a->on_host + added[TT__HOST] + tt__offloaded_bytes(&p->built);
        for (const tt_program *q = a->programs; q; q = q->next) e->bytes += tt__offloaded_bytes(&q->built);
    }
    e->by_them = a->budget && (!own || a->budget < own);
    e->budget = e->by_them ? a->budget : own;
    e->grows = added[TT__DEVICE] || added[TT__HOST] || p->built.of_first || e->transient > a->transient;
    return TT_OK;
}

static bool tt__fits(const tt__extent *e) { return !e->budget || e->bytes <= e->budget; }

/* Computes the sizes of the arena once the program has joined it. Fails if the arena is allocated and would
   grow. */
static tt_status tt__check_extent(const tt_program *p, tt__arena *shared, tt__extent *e)
{
    tt_status status = tt__extent_of(p, shared, e);
    if (status != TT_OK || !shared || !shared->allocated || !e->grows) return status;
    return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_compile: the arena of `share` is already allocated with %zu "
                    "bytes, but this program needs %zu: compile it before tt_allocate and the first tt_set "
                    "of the programs of that arena, or without `share`",
                    shared->persistent + shared->transient + shared->of_first, e->bytes);
}
