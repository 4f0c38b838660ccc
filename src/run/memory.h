#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/linear/rules.h"
#include "../plan/place.h"
#include "../ops/cpu_launch.h"
#include "../ranks/processes.h"
#include "../ranks/groups.h"
#include "../ranks/collectives.h"
#include "../context/memory.h"
#include "../context/cpu.h"
#include "../context/devices.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "ranks.h"

/* ------------------------------------------------------------------------------------------ managed memory
   An arena that is larger than its device's free memory moves to and from the device in blocks. A step uses
   most of the arena once, in order. So the blocks used longest ago are needed next, and a cache of all blocks
   would be useless. Therefore some blocks are kept on the device, and the other blocks share the remaining
   bytes, `room`. Instructions are divided into windows whose blocks need at most a quarter of `room`, so that
   there is room for the window that runs and for the next two, which are prefetched. */

/* Returns the bytes of storage x in its program's arena, and sets *first to the offset of its first byte; 0
   if the arena does not have x. */
static size_t tt__arena_extent(const tt_program *p, const tt__tape_value *x, size_t *first)
{
    if (x->space != TT__DEVICE) return 0;
    if (x->storage == TT__PARAMETER && p->ctx->params[x->param]->owner != p->arena) return 0;
    if (x->storage != TT__PARAMETER && x->place == TT__NO_PLACE) return 0;
    *first = (size_t)(tt__storage_memory(p, 0, x) - p->arena->memory[0]);
    return tt__storage_bytes(x);
}

/* Returns the value of operand j of an instruction; j counts inputs first, then results. 0: no value. */
static int32_t tt__operand(const tt__instr *i, int j)
{
    return j < TT__MAX_IN ? i->in[j] : i->out[j - TT__MAX_IN];
}

/* Adds the blocks with bytes [first, first + bytes) of an arena to the current window of instructions.
   before: value of g->stamps when the window began. Returns the bytes of those blocks that are new to the
   window, without kept blocks. */
static size_t tt__stamp_bytes(tt__paging *g, size_t first, size_t bytes, uint64_t before)
{
    size_t added = 0;
    for (size_t b = first / TT__BLOCK; bytes && b <= (first + bytes - 1) / TT__BLOCK; b++) {
        if (g->kept[b] || g->stamp[b] > before) continue;
        g->stamp[b] = g->stamps;
        added += TT__BLOCK;
    }
    return added;
}

/* Adds the blocks that instruction i uses to the current window of instructions. before: value of
   tt__paging.stamps when the window began. Returns the bytes of the blocks that are new to the window,
   without kept blocks. */
static size_t tt__stamp_instr(const tt_program *p, const tt__instr *i, uint64_t before)
{
    tt__paging *g = p->arena->paging;
    const tt_tape *t = p->built.t;
    size_t first = p->arena->persistent + i->workspace_place;
    g->stamps++;
    size_t added = tt__stamp_bytes(g, first, i->on_host ? 0 : i->workspace, before);
    for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
        const int32_t id = tt__operand(i, j);
        const size_t bytes = id ? tt__arena_extent(p, &t->values[t->values[id].base], &first) : 0;
        if (bytes) added += tt__stamp_bytes(g, first, bytes, before);
    }
    return added;
}

/* The windows of instructions into which a segment is divided. */
typedef struct tt__windows {
    int next, end;      /* instructions [next, end) are not yet in a window */
    int until[TT__WINDOWS]; /* for each of the last windows: the end of its instructions */
    int made, entered;  /* made: number of windows so far; entered: number of windows that have begun */
} tt__windows;

/* Prefetches the blocks of a window of instructions, except blocks that are still on the device. The window's
   blocks have stamps (tt__paging.stamp) in (before, last]. A block is still on the device if the windows
   since its last use have used at most `room` bytes. Sets *any to true if any block is prefetched. */
static tt_status tt__bring_blocks(tt_program *p, uint64_t before, uint64_t last, uint64_t clock, bool *any)
{
    tt__arena *a = p->arena;
    tt__paging *g = a->paging;
    tt_status status = TT_OK;
    size_t run = 0; /* number of blocks, directly before b, to prefetch */
    for (size_t b = 0; b <= g->blocks && status == TT_OK; b++) {
        const bool needed = b < g->blocks && g->stamp[b] > before && g->stamp[b] <= last;
        const bool absent = needed && (!g->used[b] || g->clock - g->used[b] > g->room);
        if (needed) g->used[b] = clock;
        if (absent) { run++; continue; }
        if (!run) continue;
        const size_t first = (b - run) * TT__BLOCK, end = tt__arena_size(a, 0);
        const size_t bytes = b * TT__BLOCK < end ? run * TT__BLOCK : end - first;
        status = a->kind->backend->prefetch(a->group->device[0], TT__IN_STREAM, a->memory[0] + first, bytes);
        g->prefetched += bytes;
        *any = true;
        run = 0;
    }
    return status;
}

/* Finds the end of the next window of instructions: the window takes instructions until their blocks need
   more than the window's share of `room`. Instructions that run together stay in one window, unless they
   alone need more. Returns tt__paging.stamps at the end of the window. */
static uint64_t tt__end_window(tt_program *p, tt__windows *w)
{
    tt__paging *g = p->arena->paging;
    tt__instr *code = p->built.t->code;
    const uint64_t before = g->stamps;
    const size_t max = g->room / (TT__WINDOWS + 1);
    const int first = w->next;
    int group = first; /* first instruction of the group that k runs together with */
    size_t bytes = 0, of_group = 0; /* bytes: size of the blocks that the window needs; of_group: size of the
                                       blocks that the group needs */
    for (int k = first; k < w->end; k++) {
        if (k > first && !code[k - 1].with_next) {
            group = k;
            of_group = 0;
        }
        const size_t added = tt__stamp_instr(p, &code[k], before);
        /* A group on another stream is never divided. */
        const bool may_end = group > first || code[k].stream == TT__COMPUTE_STREAM;
        if (bytes && bytes + added > max && may_end) {
            w->next = group > first ? group : k;
            if (group == first && k > first) code[k - 1].with_next = false;
            g->clock += bytes - (group > first ? of_group : 0);
            return before + (uint64_t)(w->next - first);
        }
        bytes += added;
        of_group += added;
    }
    w->next = w->end;
    g->clock += bytes;
    return g->stamps;
}

/* Makes the next window of instructions, if the segment has any left, and prefetches its blocks. */
static tt_status tt__bring_window(tt_program *p, tt__windows *w)
{
    tt__arena *a = p->arena;
    tt__paging *g = a->paging;
    const uint64_t before = g->stamps, began = g->clock;
    const int slot = w->made % TT__WINDOWS;
    if (w->next >= w->end) return TT_OK;
    const uint64_t last = tt__end_window(p, w);
    g->brought[slot] = false;
    tt_status status = tt__bring_blocks(p, before, last, began, &g->brought[slot]);
    if (status == TT_OK && g->brought[slot])
        status = a->kind->backend->mark(a->group->device[0], TT__IN_STREAM, &g->there[slot]);
    w->until[slot] = w->next;
    w->made++;
    return status;
}

/* Prepares the launch of instruction k. If a window of instructions begins at k, makes k wait for its blocks,
   and begins to prefetch the window two ahead once all work before k is done. */
static tt_status tt__enter_window(tt_program *p, tt__windows *w, int k)
{
    tt__arena *a = p->arena;
    tt__paging *g = a->paging;
    const tt__backend *b = a->kind->backend;
    tt__device *d = a->group->device[0];
    tt_status status = TT_OK;
    if (!g || (w->entered && k < w->until[(w->entered - 1) % TT__WINDOWS])) return TT_OK;
    while (!w->entered && w->made < TT__WINDOWS - 1 && w->next < w->end && status == TT_OK)
        status = tt__bring_window(p, w); /* makes the first windows of instructions of the segment */
    if (status == TT_OK) status = b->mark(d, TT__COMPUTE_STREAM, &g->began);
    if (status == TT_OK) status = b->after(d, TT__IN_STREAM, g->began);
    if (status == TT_OK) status = tt__bring_window(p, w);
    const int slot = w->entered++ % TT__WINDOWS;
    if (status == TT_OK && g->brought[slot]) status = b->after(d, TT__COMPUTE_STREAM, g->there[slot]);
    return tt__device_status(p->ctx, a->group, 0, status);
}

/* Keeps the blocks with bytes [first, first + bytes) on the device, unless all kept blocks would then have
   more than `max` bytes. *kept: bytes of the kept blocks so far. */
static void tt__keep_bytes(tt__paging *g, size_t first, size_t bytes, size_t max, size_t *kept)
{
    const size_t from = first / TT__BLOCK, end = bytes ? (first + bytes - 1) / TT__BLOCK + 1 : from;
    size_t added = 0;
    for (size_t b = from; b < end; b++) added += g->kept[b] ? 0 : TT__BLOCK;
    if (*kept + added > max) return;
    for (size_t b = from; b < end; b++) g->kept[b] = true;
    *kept += added;
}

/* Chooses the blocks that always stay on the device: first those of the resident workspace, then those of
   persistent storages in the order in which programs use them, beginning with the oldest program. Returns the
   bytes of the chosen blocks. */
static size_t tt__choose_kept(const tt__arena *a, size_t available)
{
    int programs = 0;
    size_t kept = 0, first;
    for (const tt_program *p = a->programs; p; p = p->next) programs++;
    tt__keep_bytes(a->paging, 0, a->kind->resident, available, &kept);
    const size_t max = kept + (available - kept) / 2;
    for (int n = programs; n-- > 0;) {
        const tt_program *p = a->programs;
        for (int k = 0; k < n; k++) p = p->next;
        const tt_tape *t = p->built.t;
        for (int k = 0; k < t->n_code; k++)
            for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
                const int32_t id = tt__operand(&t->code[k], j);
                const tt__tape_value *x = &t->values[t->values[id].base];
                const size_t bytes = id && x->persistent ? tt__arena_extent(p, x, &first) : 0;
                if (bytes) tt__keep_bytes(a->paging, first, bytes, max, &kept);
            }
    }
    return kept;
}

/* Decides which blocks of an arena in managed memory stay on the device, and tells the device. available:
   free bytes of the device. */
static tt_status tt__plan_paging(tt_context *ctx, tt__arena *a, size_t available)
{
    const tt__backend *b = a->kind->backend;
    tt__device *d = a->group->device[0];
    const size_t size = tt__arena_size(a, 0), blocks = (size + TT__BLOCK - 1) / TT__BLOCK;
    if (size <= available) return tt__device_status(ctx, a->group, 0, b->keep(d, a->memory[0], size));
    tt__paging *g = a->paging = (tt__paging *)tt__calloc(ctx, sizeof *g);
    if (!g) return TT_ERR_MEMORY;
    g->used = (uint64_t *)tt__calloc(ctx, blocks * sizeof *g->used);
    g->stamp = (uint64_t *)tt__calloc(ctx, blocks * sizeof *g->stamp);
    g->kept = (bool *)tt__calloc(ctx, blocks * sizeof *g->kept);
    if (!g->used || !g->stamp || !g->kept) return TT_ERR_MEMORY;
    g->blocks = blocks;
    g->clock = 1;
    g->room = available - tt__choose_kept(a, available);
    tt_status status = TT_OK;
    for (size_t from = 0, end; from < blocks && status == TT_OK; from = end + 1) {
        for (end = from; end < blocks && g->kept[end]; end++) {}
        const size_t first = from * TT__BLOCK, last = end * TT__BLOCK < size ? end * TT__BLOCK : size;
        if (end > from) status = b->keep(d, a->memory[0] + first, last - first);
    }
    return tt__device_status(ctx, a->group, 0, status);
}

/* Allocates an arena's memory on the device of one rank. */
static tt_status tt__allocate_device(tt_context *ctx, tt__arena *a, int rank)
{
    const tt__backend *b = a->kind->backend;
    tt__device *d = a->group->device[rank];
    const size_t size = tt__arena_size(a, rank), bytes = size ? size : 1;
    size_t available = 0;
    void *memory = NULL;
    if (a->memory_kind == TT__OWN_MEMORY) {
        a->memory[rank] = (char *)b->allocate(d, bytes);
        return a->memory[rank] ? TT_OK : tt__device_status(ctx, a->group, rank, TT_ERR_MEMORY);
    }
    const bool beyond = a->memory_kind == TT__OVERSUBSCRIBED;
    tt_status status = b->allocate_managed(d, bytes, beyond, &memory, &available);
    a->memory[rank] = (char *)memory;
    if (status != TT_OK) return tt__device_status(ctx, a->group, rank, status);
    return tt__plan_paging(ctx, a, available);
}

/* Allocates an arena's memory on one rank and fills the rank's shards of parameters. shard: a buffer of
   TT__BOUNCE bytes. */
static tt_status tt__allocate_memory(tt_context *ctx, tt__arena *a, int rank, float *shard)
{
    const tt__backend *b = a->kind->backend;
    tt__device *d = a->group->device[rank];
    tt_status status = tt__allocate_device(ctx, a, rank);
    if (status != TT_OK) return status;
    if (!a->kind->host) a->bounce[rank] = (char *)b->allocate_host(d, TT__BOUNCE);
    status = a->bounce[rank] || a->kind->host ? TT_OK : TT_ERR_MEMORY;
    if (status == TT_OK && a->on_host) a->host[rank] = tt__host_allocate(ctx, a->group, rank, a->on_host);
    if (a->on_host && !a->host[rank]) status = TT_ERR_MEMORY;
    if (status == TT_OK && a->kind->resident) status = b->fill(d, a->memory[rank], 0, a->kind->resident);
    status = tt__device_status(ctx, a->group, rank, status);
    for (int k = 0; k < ctx->n_params && status == TT_OK; k++)
        if (ctx->params[k]->owner == a || ctx->params[k]->second_owner == a)
            status = tt__param_fill(ctx->params[k], rank, shard);
    return status;
}

/* Allocates an arena's memory on all ranks of this process and fills the parameters. */
static tt_status tt__allocate_arena(tt_context *ctx, tt__arena *a)
{
    tt_status status = tt__device_group_open(ctx, a->group);
    if (status != TT_OK) return status;
    float *shard = (float *)tt__alloc(ctx, TT__BOUNCE);
    if (!shard) return TT_ERR_MEMORY;
    for (int r = tt__near_rank(a); r < tt__near_end(a) && status == TT_OK; r++)
        status = tt__allocate_memory(ctx, a, r, shard);
    tt__free(ctx, shard);
    a->allocated = status == TT_OK;
    for (int k = 0; k < ctx->n_params && status == TT_OK; k++) {
        tt_param *p = ctx->params[k];
        const tt__arena *other = p->owner == a ? p->second_owner : p->second_owner == a ? p->owner : NULL;
        if (p->owner != a && p->second_owner != a) continue;
        /* Another arena without memory still needs the parameter's source, because the process of the other
           arena may be unable to read this arena. */
        p->keeps_source = other && !other->allocated;
        if (!p->keeps_source) tt__param_drop_source(p);
    }
    if (status != TT_OK) tt__arena_empty(ctx, a);
    return status;
}

/* Returns whether the host writes value v to a device, through a staging buffer. */
static bool tt__is_staged(const tt_program *p, int32_t v)
{
    const tt__tape_value *x = &p->built.t->values[v];
    const bool input = x->storage == TT__INPUT && !x->persistent; /* a persistent input is the second value of
                                                                     another input (tt__pass_arrivals) */
    if (p->settings.kind->host || (!input && x->storage != TT__STEP)) return false;
    return x->base == v && x->place != TT__NO_PLACE && x->space == TT__DEVICE;
}

/* Returns the bytes of a storage that belong to one micro-batch. */
static size_t tt__micro_bytes(const tt__tape_value *x)
{
    return tt__storage_bytes(x) / (size_t)tt__max(1, x->copies);
}

/* Returns the bytes of the host's memory through which instruction i sends a value to a stage in another
   process, or receives it. A sender needs room for all micro-batches in flight. Returns 0 for any other
   instruction, and on the CPU. */
static size_t tt__message_bytes(const tt_program *p, const tt__instr *i)
{
    const tt__device_group *c = p->settings.group;
    const tt__mat x = tt__at_capacity(p->built.t, i->out[0] ? i->out[0] : i->in[0]);
    const int rank = tt__first_rank(p->arena);
    int way;
    if (p->settings.kind->host || i->move.over != TT__OVER_STAGES || !tt__is_pair(i)) return 0;
    if (tt__process_of(c, rank) == tt__process_of(c, tt__neighbour(p, rank, i, &way))) return 0;
    const size_t bytes = tt__align_up((size_t)tt__elements(&x) * tt_dtype_bytes(x.dtype));
    return i->out[0] ? bytes : bytes * (size_t)p->settings.in_flight;
}

/* Returns whether the host may read the results of a step during the next step. With loss scaling the host
   may not, because the next step needs the new scale. */
static bool tt__reads_later(const tt_program *p)
{
    const tt__settings *s = &p->settings;
    const bool whole = s->options.parallel.pipeline <= 1 && s->group->local == s->group->ranks;
    return !s->kind->host && s->options.train && !s->scales && whole && !p->ctx->profiles;
}

/* Returns the bytes of a rank's staging buffers. Each value that the host writes has two buffers, so that the
   host fills one while the device copies the other. Results that are read later have one buffer. A pipeline
   stage also has buffers for messages. */
static size_t tt__staging_bytes(const tt_program *p)
{
    size_t bytes = 0;
    for (int32_t v = 1; v < p->built.t->n_values; v++)
        if (tt__is_staged(p, v)) bytes += 2 * tt__micro_bytes(&p->built.t->values[v]);
    if (tt__reads_later(p)) bytes += tt__align_up(sizeof(tt__results));
    for (int k = 0; k < p->built.t->n_code; k++) bytes += tt__message_bytes(p, &p->built.t->code[k]);
    return bytes;
}

/* Allocates a rank's memory on the host (values, staging buffers) and the events of a pipeline stage. */
static tt_status tt__allocate_rank(tt_program *p, int rank)
{
    const tt_tape *t = p->built.t;
    const size_t on_host = tt__host_size(p, rank), bytes = tt__staging_bytes(p);
    const tt__backend *b = p->settings.kind->backend;
    tt__device *d = p->settings.group->device[rank];
    tt__rank *r = &p->rank[rank];
    for (int k = 0; k < 2 * p->settings.in_flight && !p->settings.kind->host; k++) {
        tt_status status = b->mark(d, TT__COMPUTE_STREAM, &r->passed[k / 2].sent[k % 2]);
        if (status == TT_OK) status = b->mark(d, TT__COMPUTE_STREAM, &r->passed[k / 2].taken[k % 2]);
        if (status != TT_OK) return status;
    }
    if (on_host && !r->host && !(r->host = tt__host_allocate(p->ctx, p->settings.group, rank, on_host)))
        return TT_ERR_MEMORY;
    if (bytes && !(r->staging = (char *)b->allocate_host(d, bytes))) return TT_ERR_MEMORY;
    char *at = r->staging;
    for (int32_t v = 1; v < t->n_values; v++)
        for (int k = 0; k < 2 && tt__is_staged(p, v); k++, at += tt__micro_bytes(&t->values[v]))
            r->staged[v].buffer[k] = at;
    if (tt__reads_later(p)) {
        r->found = (tt__results *)(void *)at;
        at += tt__align_up(sizeof *r->found);
    }
    for (int k = 0, way; k < t->n_code; k++) {
        const size_t message = tt__message_bytes(p, &t->code[k]);
        if (!message) continue;
        tt__neighbour(p, rank, &t->code[k], &way);
        *(t->code[k].out[0] ? &r->receives[way] : &r->sends[way]) = at;
        at += message;
    }
    return TT_OK;
}

/* Fails if the devices of two neighbouring stages of a pipeline cannot load from each other's memory. */
static tt_status tt__check_neighbours(const tt_program *p)
{
    const tt__device_group *c = p->settings.group;
    const int each = tt__stage_ranks(p->arena);
    char a[32], b[32];
    for (int r = c->first; r + each < c->first + c->local; r++)
        if (c->no_peer[r][r + each] || c->no_peer[r + each][r])
            return tt__fail(p->ctx, TT_ERR_UNSUPPORTED, "{parallel.pipeline %d} needs devices that load from "
                            "each other's memory, but '%s' and '%s' do not: use data or tensor ranks",
                            p->arena->stages, tt__device_name(c->kind, c->index[r], a),
                            tt__device_name(c->kind, c->index[r + each], b));
    return TT_OK;
}

/* Fails if this machine has too little memory available for `processes` processes that need `bytes` bytes
   each; otherwise the system might kill a process later. Does not check memory of a caller's allocator. what:
   what needs the memory; advice: what the message advises. */
static tt_status tt__machine_has(tt_context *ctx, double bytes, int processes, const char *what,
                                 const char *advice)
{
#if defined(TT__KNOWS_ROOM)
    if (ctx->options.allocator.allocate != tt__default_allocate || bytes < 1 << 20) return TT_OK;
    const char *check = getenv("TINYTRAIN_MEMORY_CHECK");
    const tt__room room = tt__memory_room("");
    if (bytes * processes <= room.bytes || (check && strcmp(check, "0") == 0)) return TT_OK;
    return tt__fail(ctx, TT_ERR_MEMORY, "%s needs %.1f MB of this machine's memory%s, but only %.1f MB are "
                    "available (%s %.1f MB): %s (TINYTRAIN_MEMORY_CHECK=0 in the environment: try it all the "
                    "same)", what, 1e-6 * bytes * processes, processes > 1 ? " for all its processes" : "",
                    1e-6 * room.bytes, room.of, 1e-6 * room.limit, advice);
#else
    (void)ctx, (void)bytes, (void)processes, (void)what, (void)advice;
    return TT_OK;
#endif
}

/* Fails if the program needs more memory than this machine has available, together with the other processes
   on the machine. */
static tt_status tt__memory_suffices(const tt_program *p)
{
#if defined(TT__KNOWS_ROOM)
    tt_context *ctx = p->ctx;
    double bytes = 0;
    int processes = 1;
    for (int s = 0; s < p->stages; s++) {
        const tt_program *q = p->stage[s];
        for (int r = tt__near_rank(q->arena); r < tt__near_end(q->arena); r++) {
            const size_t own = q->settings.kind->host ? tt__arena_size(q->arena, r) : 0;
            bytes += (double)own + (double)q->arena->on_host + (double)tt__host_size(q, r) +
                     (double)tt__staging_bytes(q);
        }
    }
    for (int k = 0; k < tt_processes(ctx); k++)
        processes += k != tt_process(ctx) && strcmp(ctx->net->host[k], ctx->net->host[tt_process(ctx)]) == 0;
    return tt__machine_has(ctx, bytes, processes, "the plan", "use smaller micro-batches, {recompute}, or "
                           "{precision bf16-true}");
#else
    (void)p;
    return TT_OK;
#endif
}

tt_status tt_allocate(tt_program *p)
{
    if (p->ready) return TT_OK;
    if (!p->settings.kind->backend)
        return tt__fail(p->ctx, TT_ERR_UNSUPPORTED, "this build plans programs for device '%s', but cannot "
                        "run them: define TINYTRAIN_CUDA and link tinytrain_cuda.cu, as `make cuda` does, or "
                        "compile for \"cpu\"", p->settings.kind->name);
    const tt__device_group *c = p->settings.group;
    tt_status status = tt__params_ready(p);
    if (!p->arena->allocated && p->head == p) { /* all processes check before any allocates */
        if (status == TT_OK) status = tt__memory_suffices(p);
        status = tt__agree(p->ctx, "allocating the memory of a plan", status, NULL, 0);
    }
    if (status == TT_OK && !p->arena->allocated) status = tt__allocate_arena(p->ctx, p->arena);
    if (status == TT_OK && p->built.t->on_host)
        status = tt__device_group_open_host(p->ctx, p->settings.group);
    if (status == TT_OK && p->stages > 1) status = tt__check_neighbours(p);
    for (int r = tt__near_rank(p->arena); r < tt__near_end(p->arena) && status == TT_OK; r++)
        status = tt__device_status(p->ctx, c, r, tt__allocate_rank(p, r));
    for (int s = 1; s < p->stages && status == TT_OK; s++) status = tt_allocate(p->stage[s]);
    status = tt__agree(p->ctx, "tt_allocate", status, NULL, 0);
    p->ready = status == TT_OK;
    return status;
}
