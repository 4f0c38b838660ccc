#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../plan/place.h"
#include "../ranks/groups.h"

/* ===========================================================================================================
   CONTEXT                                                                                        src/context/
   Devices, contexts, parameters, and the arenas that own memory. Uses all sections above.
   ======================================================================================================== */

/* ------------------------------------------------------------------------------------------------- memory */

/* The place of a parameter in an arena, and its form there. */
typedef struct tt__placement {
    size_t offset;      /* bytes from the start of the arena's memory in `space`; TT__NO_PLACE: not stored */
    tt_dtype dtype;
    tt__space space;
    tt__part part;      /* the shard of the parameter that a rank stores */
} tt__placement;

/* The values of the option `memory`. tt__memory_names has the words by which users give the values. */
typedef enum tt__memory_kind {
    TT__OWN_MEMORY, TT__MANAGED, TT__OVERSUBSCRIBED, TT__MEMORY_KINDS
} tt__memory_kind;
static const char *const tt__memory_names[TT__MEMORY_KINDS] = {"device", "managed", "managed-oversubscribed"};

/* Bytes of a block of managed memory: the unit in which CUDA's driver moves memory to the device. */
#ifndef TT__BLOCK /* tests set a smaller number */
#define TT__BLOCK ((size_t)2 << 20)
#endif
enum { TT__WINDOWS = 3 }; /* number of windows of instructions that are on the device at a time: one runs, the
                             next ones are prefetched */

/* State of an arena that is in managed memory and is larger than the device's free memory: which blocks of
   the arena should be on the device. A window of instructions is consecutive instructions whose blocks are
   prefetched together. */
typedef struct tt__paging {
    size_t room;        /* bytes on the device for all blocks that are not `kept` there */
    size_t blocks;      /* number of blocks of the arena */
    uint64_t *used;     /* for each block: value of `clock` when the last window of instructions that uses the
                           block began; 0: no window has used the block */
    uint64_t *stamp;    /* for each block: value of `stamps` when an instruction last added the block to a
                           window */
    bool *kept;         /* for each block: it always stays on the device */
    uint64_t clock;     /* 1 + bytes of the blocks, without kept blocks, that all windows so far have used */
    uint64_t stamps;    /* number of instructions added to windows so far */
    uint64_t prefetched; /* bytes prefetched so far */
    void *began, *there[TT__WINDOWS]; /* began: event at the start of the window of instructions that runs;
                                         there: for each window, event after the prefetch of its blocks */
    bool brought[TT__WINDOWS]; /* for each window: it had blocks to prefetch, so `there` has its event */
} tt__paging;

/* The memory that one or more programs share. It has the same layout on each rank: persistent bytes, then the
   transient bytes of the largest program, then `of_first` bytes, which only the ranks of data rank 0 have.
   Offloaded parameters take `on_host` bytes of the host's memory. */
typedef struct tt__arena {
    int references;     /* number of programs of the arena, plus number of parameters that it stores */
    struct tt_program *programs; /* linked list */
    const tt__device_kind *kind;
    tt__device_group *group;
    int data, tensor;   /* data ranks and tensor ranks */
    int stage, stages;  /* number of the pipeline stage; number of stages. 0 and 1 without a pipeline */
    bool allocated;
    tt__memory_kind memory_kind;
    tt__paging *paging; /* NULL: the device has room for the whole arena */
    char *memory[TT__RANKS]; /* NULL until allocated */
    char *bounce[TT__RANKS]; /* TT__BOUNCE bytes of the host's memory for copies to a device; on the CPU
                                NULL */
    size_t persistent, transient, of_first; /* bytes; the persistent bytes begin with the resident workspace,
                                               which the kernels of all instructions share */
    char *host[TT__RANKS];
    size_t on_host;
    size_t budget;      /* smallest memory_budget of the arena's programs, in bytes; 0: no budget */
    tt__placement *placement;     /* entry k belongs to the parameter with tt_param.index k */
    int n_placements;
    bool partly_updated;          /* an update stopped half-way, so parameters may differ between ranks */
    bool tuned;         /* the matrix products of the programs were timed, or must not be timed */
    bool learnt;        /* a loaded state says how to compute matrix products, which are then not timed */
    const void *results_of; /* program whose last outputs are still in the transient bytes; NULL: none */
} tt__arena;

/* Allocates memory of the host that a rank's device can copy from and to. Returns NULL after an error, for
   which the device's backend sets the message. */
static char *tt__host_allocate(tt_context *ctx, const tt__device_group *c, int rank, size_t bytes)
{
    if (c->kind->host) return (char *)tt__alloc(ctx, bytes);
    return (char *)c->kind->backend->allocate_host(c->device[rank], bytes);
}

static void tt__host_release(tt_context *ctx, const tt__device_group *c, int rank, char *memory)
{
    if (c->kind->host) tt__free(ctx, memory);
    else if (memory) c->kind->backend->release_host(c->device[rank], memory);
}

/* An arena belongs to one pipeline stage, whose ranks are [tt__first_rank, tt__end_rank). */
static int tt__stage_ranks(const tt__arena *a) { return a->data * a->tensor; }
static int tt__first_rank(const tt__arena *a) { return a->stage * tt__stage_ranks(a); }
static int tt__end_rank(const tt__arena *a) { return tt__first_rank(a) + tt__stage_ranks(a); }

/* The ranks of an arena that belong to this process are [tt__near_rank, tt__near_end). */
static int tt__near_rank(const tt__arena *a) { return (int)tt__max(tt__first_rank(a), a->group->first); }
static int tt__near_end(const tt__arena *a)
{
    return (int)tt__min(tt__end_rank(a), a->group->first + a->group->local);
}

static void tt__paging_free(tt_context *ctx, tt__arena *a)
{
    tt__paging *g = a->paging;
    const tt__backend *b = a->kind->backend;
    if (!g) return;
    for (int k = 0; k < TT__WINDOWS; k++) if (g->there[k]) b->release_event(a->group->device[0], g->there[k]);
    if (g->began) b->release_event(a->group->device[0], g->began);
    tt__free(ctx, g->used);
    tt__free(ctx, g->stamp);
    tt__free(ctx, g->kept);
    tt__free(ctx, g);
    a->paging = NULL;
}

/* Frees the arena's memory on all ranks of this process. */
static void tt__arena_empty(tt_context *ctx, tt__arena *a)
{
    tt__paging_free(ctx, a);
    for (int r = tt__near_rank(a); r < tt__near_end(a); r++) {
        if (a->memory[r]) a->kind->backend->release(a->group->device[r], a->memory[r]);
        if (a->bounce[r]) a->kind->backend->release_host(a->group->device[r], a->bounce[r]);
        tt__host_release(ctx, a->group, r, a->host[r]);
        a->memory[r] = a->bounce[r] = a->host[r] = NULL;
    }
}

static void tt__arena_release(tt_context *ctx, tt__arena *a)
{
    if (!a || --a->references > 0) return;
    tt__arena_empty(ctx, a);
    tt__free(ctx, a->placement);
    tt__free(ctx, a);
}

/* Returns the bytes of the arena's memory on a rank. */
static size_t tt__arena_size(const tt__arena *a, int rank)
{
    return a->persistent + a->transient + (rank - tt__first_rank(a) < a->tensor ? a->of_first : 0);
}

/* Returns where arena `a` stores the parameter with index `param`; NULL if the arena does not store the
   parameter. */
static const tt__placement *tt__placement_in(const tt__arena *a, int param)
{
    const bool stored = a && param < a->n_placements && a->placement[param].offset != TT__NO_PLACE;
    return stored ? &a->placement[param] : NULL;
}

/* Grows a->placement to one entry for each parameter of the context. */
static tt_status tt__placements_grow(tt_context *ctx, tt__arena *a)
{
    if (ctx->n_params <= a->n_placements) return TT_OK;
    const size_t bytes = sizeof(tt__placement) * (size_t)ctx->n_params;
    tt__placement *placement = (tt__placement *)tt__realloc(ctx, a->placement, bytes);
    if (!placement) return TT_ERR_MEMORY;
    for (int k = a->n_placements; k < ctx->n_params; k++) placement[k].offset = TT__NO_PLACE;
    a->placement = placement;
    a->n_placements = ctx->n_params;
    return TT_OK;
}

/* Returns the arena in which a program of arena `a` finds parameter p: p's `owner` or, in a pipeline of
   `stages` stages, the one of `owner` and `second_owner` that belongs to stage `stage`. Returns NULL if no
   arena stores p for that stage yet. If the device has no backend in this build, parameters have no owner,
   and the result is `a` if `a` stores p. */
static tt__arena *tt__placement_arena(const tt__device_kind *kind, tt__arena *a, const tt_param *p, int stage,
                                 int stages)
{
    if (!kind->backend) return tt__placement_in(a, p->index) ? a : NULL;
    if (!p->owner || p->owner->stages != stages || p->owner->stage == stage) return p->owner;
    return p->second_owner && p->second_owner->stage == stage ? p->second_owner : NULL;
}
