#pragma once
#include "../base/base.h"
#include "threads.h"

/* ----------------------------------------------------------------------------------------- device groups */

/* The ranks that programs run on together, each with a device of one kind. This process has `local` of them,
   from number `first` on, each with a thread. It cannot see the memory of the others. */
typedef struct tt__crew {
    tt_context *ctx;
    const tt__device_kind *kind;
    int ranks, index[TT__RANKS];   /* by rank: its device's number among those of the kind */
    int first, local;
    int moved;                     /* how much index[] exceeds the numbers in the name */
    char name[96];                 /* "cuda:0,2", "cpu*2 in 4 processes"; cut if too long */
    tt__device *device[TT__RANKS]; /* NULL until opened, and for ranks of other processes */
    tt__device *host[TT__RANKS];   /* the CPU beside a device of another kind; NULL until updates need it */
    tt__pool *threads;             /* threads of the ranks, if several, once open */
    tt__world *world;              /* barriers and counts of these threads */
    /* Staging memory on the host: TT__STAGE bytes, or twice as many with several processes. NULL where all
       memory is the host's and of this process. */
    void *stage[TT__RANKS];
    void *event[TT__RANKS];        /* for waits between devices' streams; NULL until used */
    bool apart[TT__RANKS][TT__RANKS]; /* [a][b]: kernels of rank a cannot load from the memory of rank b */
    bool tried;                    /* `apart` is known */
    struct tt__crew *next;
} tt__crew;

static bool tt__is_local(const tt__crew *c, int rank)
{
    return rank >= c->first && rank < c->first + c->local;
}

/* Returns the process of a rank. */
static int tt__process_of(const tt__crew *c, int rank) { return rank / c->local; }

/* Bytes that ranks copy to the host's memory at once, if they cannot load from each other's memory. */
#ifndef TT__STAGE /* tests make it smaller */
#define TT__STAGE ((size_t)4 << 20)
#endif
/* Max batches of messages in flight between processes. Each batch has its part of the TT__STAGE bytes. */
enum { TT__NET_FLIGHTS = 8 };

/* Bytes of a message, with room for MPI's header. MPI asks the receiver before it sends a longer message
   (Open MPI over TCP: above 65536 bytes), and the answer queues behind what the receiver sends. The two
   directions of a link would then take turns. */
#ifndef TT__NET_MESSAGE /* tests make it smaller */
#define TT__NET_MESSAGE ((size_t)61440)
#endif
/* Max number of requests for `bytes` bytes to and from all processes. */
#define TT__NET_REQUESTS(bytes) (2 * (TT__RANKS + (bytes) / TT__NET_MESSAGE))

/* Writes the name of a device: "cuda" for the first of a kind, "cuda:1" for the second, and so on. */
static const char *tt__device_name(const tt__device_kind *kind, int index, char to[32])
{
    if (index) snprintf(to, 32, "%s:%d", kind->name, index);
    else snprintf(to, 32, "%s", kind->name);
    return to;
}

/* Returns the status that a function of a device returned. If that is an error, sets the device's message. */
static tt_status tt__device_status(tt_context *ctx, const tt__crew *c, int rank, tt_status status)
{
    if (status == TT_OK || c->kind->host) return status; /* the CPU's functions have called tt__fail */
    char name[32];
    return tt__fail(ctx, status, "device '%s': %s", tt__device_name(c->kind, c->index[rank], name),
                    c->kind->backend->error(c->device[rank]));
}
