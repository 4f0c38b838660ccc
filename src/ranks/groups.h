#pragma once
#include "../base/base.h"
#include "threads.h"

/* ----------------------------------------------------------------------------------------- device groups */

/* A device group: the ranks that run a program together, each with its own device, all of one kind. This
   process has the ranks [first, first + local), each with a thread; it cannot access the memory of other
   ranks. */
typedef struct tt__device_group {
    tt_context *ctx;
    const tt__device_kind *kind;
    int ranks, index[TT__RANKS];   /* ranks: number of ranks; index: for each rank, the number of its
                                      device */
    int first, local;
    int moved;                     /* number of devices that earlier processes of this host take: index[] has
                                      the numbers of the name plus `moved` */
    char name[96];                 /* such as "cuda:0,2" or "cpu*2 in 4 processes"; cut if too long */
    tt__device *device[TT__RANKS]; /* for each rank, its device; NULL until opened, and for ranks of other
                                      processes */
    tt__device *host[TT__RANKS];   /* for each rank, the CPU device for updates in the host's memory; NULL
                                      until needed */
    tt__pool *threads;             /* a thread for each rank; NULL until opened, or for a single rank */
    tt__rank_group *rank_group;    /* barriers and counters of the ranks' threads */
    /* For each rank, staging memory on the host: TT__STAGE bytes, or twice that with several processes. NULL
       on the CPU in a single process. */
    void *stage[TT__RANKS];
    void *event[TT__RANKS];        /* for each rank: the event for which streams of other devices wait; NULL
                                      until used */
    bool no_peer[TT__RANKS][TT__RANKS]; /* [a][b]: kernels of rank a cannot load from the memory of rank b */
    bool tried;                    /* `no_peer` is known */
    struct tt__device_group *next;
} tt__device_group;

static bool tt__is_local(const tt__device_group *c, int rank)
{
    return rank >= c->first && rank < c->first + c->local;
}

/* Returns the number of the process that has a rank. */
static int tt__process_of(const tt__device_group *c, int rank) { return rank / c->local; }

/* Bytes of staging memory: max bytes that a rank copies to the host at once, for other ranks that cannot load
   from the rank's memory. */
#ifndef TT__STAGE /* tests define a smaller number */
#define TT__STAGE ((size_t)4 << 20)
#endif
/* Max number of batches of messages in flight between processes. The batches divide the TT__STAGE bytes of
   staging memory equally. */
enum { TT__NET_FLIGHTS = 8 };

/* Max bytes of a message. With MPI's header, a message stays below the size from which MPI asks the receiver
   before it sends (Open MPI over TCP: 65536 bytes). The answer would queue behind the data that the receiver
   sends, so the two directions of a link would run in turn, not at once. */
#ifndef TT__NET_MESSAGE /* tests define a smaller number */
#define TT__NET_MESSAGE ((size_t)61440)
#endif
/* Max number of requests, one for each message, to send `bytes` bytes to all processes and receive `bytes`
   bytes from them. */
#define TT__NET_REQUESTS(bytes) (2 * (TT__RANKS + (bytes) / TT__NET_MESSAGE))

/* Writes the name of a device: "cuda" for the first of a kind, "cuda:1" for the second, and so on. */
static const char *tt__device_name(const tt__device_kind *kind, int index, char to[32])
{
    if (index) snprintf(to, 32, "%s:%d", kind->name, index);
    else snprintf(to, 32, "%s", kind->name);
    return to;
}

/* Returns `status`, the result of a function of a rank's device. If `status` is an error, makes the device's
   message the context's error. */
static tt_status tt__device_status(tt_context *ctx, const tt__device_group *c, int rank, tt_status status)
{
    if (status == TT_OK || c->kind->host) return status; /* the CPU device has called tt__fail */
    char name[32];
    return tt__fail(ctx, status, "device '%s': %s", tt__device_name(c->kind, c->index[rank], name),
                    c->kind->backend->error(c->device[rank]));
}
