#pragma once
#include "../base/base.h"
#include "threads.h"

/* ----------------------------------------------------------------------------------------- device groups */

/* The ranks that programs run on together: devices of a kind, and a thread for each that is of this process:
   `local` of them, from `first` on. What the others have, this process does not see. */
typedef struct tt__crew {
    tt_context *ctx;
    const tt__device_kind *kind;
    int ranks, index[TT__RANKS];   /* of each rank's device, its number among those of the kind */
    int first, local;
    int moved;                     /* index[] is so much above the numbers that the name stands for */
    char name[96];                 /* "cuda:0,2", "cpu*2 in 4 processes"; cut where there are many */
    tt__device *device[TT__RANKS]; /* NULL until opened, and of other processes */
    tt__device *host[TT__RANKS];   /* the CPU beside a device of another kind; NULL until updates need it */
    tt__pool *threads;             /* of several ranks, once they are open */
    tt__world *world;              /* ... and how these threads wait for each other */
    /* TT__STAGE bytes of the host's; of several processes, twice as many; NULL where all memory is the host's
       and of this process. */
    void *stage[TT__RANKS];
    void *event[TT__RANKS];        /* with which devices wait for each other's streams; NULL until used */
    bool apart[TT__RANKS][TT__RANKS]; /* [a][b]: kernels of rank a cannot load from the memory of rank b */
    bool tried;                    /* `apart` is known */
    struct tt__crew *next;
} tt__crew;

static bool tt__is_local(const tt__crew *c, int rank)
{
    return rank >= c->first && rank < c->first + c->local;
}

/* The process that a rank is of. */
static int tt__process_of(const tt__crew *c, int rank) { return rank / c->local; }

/* What ranks that cannot load from each other's memory copy to the host's at once. */
#ifndef TT__STAGE /* tests make it smaller */
#define TT__STAGE ((size_t)4 << 20)
#endif
/* Of several processes, each in a part of these bytes: batches of messages on their way at a time. */
enum { TT__NET_FLIGHTS = 8 };

/* Bytes of a message, with room for MPI's header: MPI asks the receiver before it sends a longer one (Open
   MPI over TCP: 65536), and the answer waits behind what the receiver sends. The two directions of a link
   then take turns. */
#ifndef TT__NET_MESSAGE /* tests make it smaller */
#define TT__NET_MESSAGE ((size_t)61440)
#endif
/* Requests for so many bytes at most, from and to all processes. */
#define TT__NET_REQUESTS(bytes) (2 * (TT__RANKS + (bytes) / TT__NET_MESSAGE))

/* "cuda" for the first of a kind, "cuda:1" for the second, and so on. */
static const char *tt__device_name(const tt__device_kind *kind, int index, char to[32])
{
    if (index) snprintf(to, 32, "%s:%d", kind->name, index);
    else snprintf(to, 32, "%s", kind->name);
    return to;
}

/* Passes on what a function of a device returned; with the device's sentence if that is an error. */
static tt_status tt__device_status(tt_context *ctx, const tt__crew *c, int rank, tt_status status)
{
    if (status == TT_OK || c->kind->host) return status; /* the CPU's functions have called tt__fail */
    char name[32];
    return tt__fail(ctx, status, "device '%s': %s", tt__device_name(c->kind, c->index[rank], name),
                    c->kind->backend->error(c->device[rank]));
}
