#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../plan/place.h"
#include "../ranks/groups.h"

/* ===========================================================================================================
   CONTEXT                                                                                        src/context/
   Devices, contexts, parameters, and the arenas that hold memory. Uses all above.
   ======================================================================================================== */

/* ------------------------------------------------------------------------------------------------- memory */

/* Where an arena has a parameter. */
typedef struct tt__home {
    size_t offset;      /* of its persistent region; TT__NO_PLACE: it has none */
    tt_dtype dtype;
    tt__space space;    /* in the host's memory, an offset there */
    tt__part part;      /* of the parameter, that lies there */
} tt__home;

/* What tt_compile_options.memory names. */
typedef enum tt__memory_kind {
    TT__OWN_MEMORY, TT__MANAGED, TT__OVERSUBSCRIBED, TT__MEMORY_KINDS
} tt__memory_kind;
static const char *const tt__memory_names[TT__MEMORY_KINDS] = {"device", "managed", "managed-oversubscribed"};

/* Managed memory comes to the device in blocks of so many bytes, as CUDA's driver has them. */
#ifndef TT__BLOCK /* tests make it smaller */
#define TT__BLOCK ((size_t)2 << 20)
#endif
enum { TT__WINDOWS = 3 }; /* the one that runs, and those that are on their way */

/* Of an arena in managed memory that is larger than what its device has free: what is where, by the plan. */
typedef struct tt__paging {
    size_t room;        /* bytes on the device for blocks that are not kept there */
    size_t blocks;      /* from the arena's first byte on */
    uint64_t *used;     /* of each block: `clock` when the last window that uses it began; 0: none has */
    uint64_t *stamp;    /* ... the number, of all so far, of the instruction that brought it to a window */
    bool *kept;
    uint64_t clock;     /* one more than the bytes that windows have used, but for those of kept blocks */
    uint64_t stamps;    /* instructions so far */
    uint64_t prefetched; /* bytes so far */
    void *began, *there[TT__WINDOWS]; /* events: a window begins; its blocks are there */
    bool brought[TT__WINDOWS]; /* ... of those for which there were blocks to bring */
} tt__paging;

/* Memory of a program and those that share it, the same on each rank: persistent bytes, then the transient
   bytes of the largest; behind these, on the ranks of data rank 0 alone, `of_first` bytes. Of parameters that
   are not to be on the device, on_host bytes in the host's memory. */
typedef struct tt__arena {
    int references;     /* programs, and parameters whose values it holds */
    struct tt_program *programs; /* a list */
    const tt__device_kind *kind;
    tt__crew *crew;
    int data, tensor;   /* ranks along these axes */
    int stage, stages;  /* of a pipeline; the first stage's are 0, and 1 without one */
    bool allocated;
    tt__memory_kind memory_kind;
    tt__paging *paging; /* NULL: all of the memory is on the device */
    char *memory[TT__RANKS]; /* NULL until allocated */
    char *bounce[TT__RANKS]; /* TT__BOUNCE bytes of the host's, on the way to a device's memory; else NULL */
    size_t persistent, transient, of_first; /* persistent: first the kind's resident workspace */
    char *host[TT__RANKS];
    size_t on_host;
    size_t budget;      /* the least memory_budget of its programs; 0: none */
    tt__home *home;     /* by the index of the parameter */
    int n_homes;
    bool torn;          /* an update has failed half-way: ranks may have other parameters than others */
    bool tuned;         /* products of its programs were timed, or must not be timed */
    bool learnt;        /* a state has set how products are made, so that they must not be timed */
    const void *results_of; /* the program whose last run's outputs are in the transient part; NULL: none's */
} tt__arena;

/* Memory of the host that a device copies from and to. NULL: there is none; the device says why. */
static char *tt__host_allocate(tt_context *ctx, const tt__crew *c, int rank, size_t bytes)
{
    if (c->kind->host) return (char *)tt__alloc(ctx, bytes);
    return (char *)c->kind->backend->allocate_host(c->device[rank], bytes);
}

static void tt__host_release(tt_context *ctx, const tt__crew *c, int rank, char *memory)
{
    if (c->kind->host) tt__free(ctx, memory);
    else if (memory) c->kind->backend->release_host(c->device[rank], memory);
}

/* The ranks that have an arena: [tt__first_rank, tt__end_rank). */
static int tt__stage_ranks(const tt__arena *a) { return a->data * a->tensor; }
static int tt__first_rank(const tt__arena *a) { return a->stage * tt__stage_ranks(a); }
static int tt__end_rank(const tt__arena *a) { return tt__first_rank(a) + tt__stage_ranks(a); }

/* Those of this process: [tt__near_rank, tt__near_end). */
static int tt__near_rank(const tt__arena *a) { return (int)tt__max(tt__first_rank(a), a->crew->first); }
static int tt__near_end(const tt__arena *a)
{
    return (int)tt__min(tt__end_rank(a), a->crew->first + a->crew->local);
}

static void tt__paging_free(tt_context *ctx, tt__arena *a)
{
    tt__paging *g = a->paging;
    const tt__backend *b = a->kind->backend;
    if (!g) return;
    for (int k = 0; k < TT__WINDOWS; k++) if (g->there[k]) b->release_event(a->crew->device[0], g->there[k]);
    if (g->began) b->release_event(a->crew->device[0], g->began);
    tt__free(ctx, g->used);
    tt__free(ctx, g->stamp);
    tt__free(ctx, g->kept);
    tt__free(ctx, g);
    a->paging = NULL;
}

/* Gives the memory of all ranks back. */
static void tt__arena_empty(tt_context *ctx, tt__arena *a)
{
    tt__paging_free(ctx, a);
    for (int r = tt__near_rank(a); r < tt__near_end(a); r++) {
        if (a->memory[r]) a->kind->backend->release(a->crew->device[r], a->memory[r]);
        if (a->bounce[r]) a->kind->backend->release_host(a->crew->device[r], a->bounce[r]);
        tt__host_release(ctx, a->crew, r, a->host[r]);
        a->memory[r] = a->bounce[r] = a->host[r] = NULL;
    }
}

static void tt__arena_release(tt_context *ctx, tt__arena *a)
{
    if (!a || --a->references > 0) return;
    tt__arena_empty(ctx, a);
    tt__free(ctx, a->home);
    tt__free(ctx, a);
}

/* Bytes of a rank's memory. */
static size_t tt__arena_size(const tt__arena *a, int rank)
{
    return a->persistent + a->transient + (rank - tt__first_rank(a) < a->tensor ? a->of_first : 0);
}

/* The home that an arena has for a parameter, NULL if there is none. */
static const tt__home *tt__home_in(const tt__arena *a, int param)
{
    return a && param < a->n_homes && a->home[param].offset != TT__NO_PLACE ? &a->home[param] : NULL;
}

/* Room for a home of each parameter. */
static tt_status tt__homes_grow(tt_context *ctx, tt__arena *a)
{
    if (ctx->n_params <= a->n_homes) return TT_OK;
    tt__home *home = (tt__home *)tt__realloc(ctx, a->home, sizeof *home * (size_t)ctx->n_params);
    if (!home) return TT_ERR_MEMORY;
    for (int k = a->n_homes; k < ctx->n_params; k++) home[k].offset = TT__NO_PLACE;
    a->home = home;
    a->n_homes = ctx->n_params;
    return TT_OK;
}

/* The arena in which a program of arena `a` finds a parameter: the holder, or, where no program of the kind
   can run and so none may hold it, a itself. NULL: there is none yet. Of a pipeline of so many stages, each
   stage has its own. */
static tt__arena *tt__home_arena(const tt__device_kind *kind, tt__arena *a, const tt_param *p, int stage,
                                 int stages)
{
    if (!kind->backend) return tt__home_in(a, p->index) ? a : NULL;
    if (!p->holder || p->holder->stages != stages || p->holder->stage == stage) return p->holder;
    return p->again && p->again->stage == stage ? p->again : NULL;
}
