#pragma once
#include "../base/base.h"
#include "threads.h"

/* ----------------------------------------------------------------------------------------- device groups */

/* A device group: the ranks that run a program together, each with its own device, all of one kind. This process has
   the ranks [first, first + local), each with a thread. It cannot access the memory of the other ranks. */
typedef struct tt__device_group {
    tt_context *ctx;
    const tt__device_kind *kind;
    int ranks, index[TT__RANKS];   /* number of ranks; for each rank: number of its device */
    int first, local;
    int moved;                     /* index[] exceeds the numbers in the name by this number */
    char name[96];                 /* as in "cuda:0,2" or "cpu*2 in 4 processes"; cut if too long */
    tt__device *device[TT__RANKS]; /* NULL until opened, and for ranks of other processes */
    tt__device *host[TT__RANKS];   /* CPU device for updates in the host's memory; NULL until needed */
    tt__pool *threads;             /* a thread for each rank; NULL until opened, or for a single rank */
    tt__rank_group *rank_group;              /* barriers and counters of these threads */
    /* Each rank's staging memory on the host: TT__STAGE bytes, or twice that with several processes. NULL if
       the devices use the host's memory and there is only this process. */
    void *stage[TT__RANKS];
    void *event[TT__RANKS];        /* by which streams of other devices wait; NULL until used */
    bool no_peer[TT__RANKS][TT__RANKS]; /* [a][b]: kernels of rank a cannot load from the memory of rank b */
    bool tried;                    /* `no_peer` has been found out */
    struct tt__device_group *next;
} tt__device_group;

static bool tt__is_local(const tt__device_group *c, int rank)
{
    return rank >= c->first && rank < c->first + c->local;
}

/* Returns the number of the process that has a rank. */
static int tt__process_of(const tt__device_group *c, int rank) { return rank / c->local; }

/* Bytes of staging memory: max number of bytes that a rank copies to the host's memory at once, if ranks
   cannot load from each other's memory. */
#ifndef TT__STAGE /* tests make it smaller */
#define TT__STAGE ((size_t)4 << 20)
#endif
/* Max number of batches of messages in flight between processes. Each batch has an equal part of the
   TT__STAGE bytes of staging memory. */
enum { TT__NET_FLIGHTS = 8 };

/* Max bytes of a message. With MPI's header, it stays below the size from which MPI first asks the receiver
   (Open MPI over TCP: 65536 bytes). The receiver's answer would queue behind the data that the receiver is
   sending, so that the two directions of a link would run in turn, not at once. */
#ifndef TT__NET_MESSAGE /* tests make it smaller */
#define TT__NET_MESSAGE ((size_t)61440)
#endif
/* Max number of requests (one per message) to send `bytes` bytes to, and receive as many from, all
   processes. */
#define TT__NET_REQUESTS(bytes) (2 * (TT__RANKS + (bytes) / TT__NET_MESSAGE))

/* Writes the name of a device: "cuda" for the first of a kind, "cuda:1" for the second, and so on. */
static const char *tt__device_name(const tt__device_kind *kind, int index, char to[32])
{
    if (index) snprintf(to, 32, "%s:%d", kind->name, index);
    else snprintf(to, 32, "%s", kind->name);
    return to;
}

/* Returns `status`, which a function of a rank's device has returned. If it is an error, sets the context's
   error to the device's message. */
static tt_status tt__device_status(tt_context *ctx, const tt__device_group *c, int rank, tt_status status)
{
    if (status == TT_OK || c->kind->host) return status; /* the CPU device has called tt__fail */
    char name[32];
    return tt__fail(ctx, status, "device '%s': %s", tt__device_name(c->kind, c->index[rank], name),
                    c->kind->backend->error(c->device[rank]));
}
