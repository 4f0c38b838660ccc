#pragma once
#include "../base/base.h"

/* ===========================================================================================================
   RANKS                                                                                            src/ranks/
   The ranks of a process, one thread each, with their barriers and their common failure; processes and their
   messages; device groups; collectives. Uses all sections above.

   The tree of sums. A step sums gradients and the counts of losses over its micro-batches. These sums have
   the same bits for any number of data ranks. tt_parallel.groups is the number of leaves of a sum;
   micro-batch m of a step belongs to leaf m % groups. Leaves are summed in pairs, (0 + 1) + (2 + 3) and so
   on, and each sum is rounded to the dtype of the values; leaves without a micro-batch are left out. Data
   rank r of n data ranks runs the micro-batches r, r + n, r + 2 * n and so on. So this rank has the leaves r,
   r + n and so on, each in a slot of its storage. The leaves in slot k of all ranks form a subtree, which a
   collective sums; TT__OP_SUM_SLOTS then sums the slots.

   Sums of a step (tt_parallel.zero 0 and 1): the matrix product that computes a gradient adds it to its leaf
   in place, and the tree is summed once, at the end of the step. Sums of micro-batches (tt_parallel.zero 2
   and 3, and tt_parallel.reduce_micros): a leaf is one micro-batch, the tree is summed after each lap of
   `groups` micro-batches, and the sums of laps are added one after another.
   ======================================================================================================== */

/* The ranks of a process that run a program together, one thread each, with their barriers and their common
   failure. */
typedef struct tt__rank_group {
    tt_context *ctx;
    int ranks;
    double timeout;          /* seconds */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int sleepers;            /* number of threads that sleep until `wake` is signalled */
    int spins;               /* number of times that a waiting rank checks a count before it sleeps */
    int failed;              /* atomic: a rank has failed, so no rank waits any longer */
    int outside;             /* atomic: number of ranks that wait for messages of other processes; until it is
                                0, no waiting rank times out */
    const char *op[TT__RANKS], *on[TT__RANKS]; /* atomic; for each rank: op: the name of its current op; on:
                                                  the name of the op's value, or NULL */
    uint64_t met[TT__RANKS][TT__RANKS]; /* atomic; [a][b]: number of barriers with b that rank a reached */
    /* Atomic counts of a pipeline's transfers, for each rank. sent: values sent to the next stage ([0]),
       gradients sent to the previous stage ([1]). taken: values received from the previous stage ([0]),
       gradients received from the next stage ([1]). */
    uint64_t sent[TT__RANKS][2], taken[TT__RANKS][2];
} tt__rank_group;

/* The members of a collective or a barrier: `count` ranks, which are first, first + stride, first + 2 *
   stride and so on. */
typedef struct tt__members { int first, stride, count; } tt__members;

static tt__rank_group *tt__rank_group_new(tt_context *ctx, int ranks, double timeout)
{
    tt__rank_group *w = (tt__rank_group *)tt__calloc(ctx, sizeof *w);
    if (!w) return NULL;
    w->ctx = ctx;
    w->ranks = ranks;
    w->timeout = timeout;
    w->spins = ranks <= tt__usable_cpus() ? TT__SPINS : 0; /* with fewer CPUs than ranks, spinning would take
                                                              CPUs from other ranks */
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->wake, NULL);
    return w;
}

static void tt__rank_group_free(tt__rank_group *w)
{
    if (!w) return;
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->mutex);
    tt__free(w->ctx, w);
}

static void tt__rank_group_wake(tt__rank_group *w)
{
    pthread_mutex_lock(&w->mutex);
    if (w->sleepers) pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&w->mutex);
}

/* Ends the waiting of all ranks, after the calling rank has called tt__fail. */
static void tt__rank_group_fail(tt__rank_group *w)
{
    __atomic_store_n(&w->failed, 1, __ATOMIC_SEQ_CST);
    tt__rank_group_wake(w);
}

/* Resets all barriers and counts, which may be unequal after a failure. No rank may be running. */
static void tt__rank_group_reset(tt__rank_group *w)
{
    memset(w->met, 0, sizeof w->met);
    memset(w->sent, 0, sizeof w->sent);
    memset(w->taken, 0, sizeof w->taken);
    memset(w->op, 0, sizeof w->op);
    memset(w->on, 0, sizeof w->on);
    w->failed = 0;
}

/* Notes the op and the value on which a rank works, for the error of another rank that waits too long for
   this rank. */
static void tt__rank_group_note(tt__rank_group *w, int rank, const char *op, const char *on)
{
    __atomic_store_n(&w->op[rank], op, __ATOMIC_RELAXED);
    __atomic_store_n(&w->on[rank], on, __ATOMIC_RELAXED);
}

static bool tt__has_come(const uint64_t *count, uint64_t times)
{
    return __atomic_load_n(count, __ATOMIC_SEQ_CST) >= times;
}

/* Waits until another thread signals `wake`, or for `seconds`. Callers pass few seconds, because the clock
   may be set during the wait. */
static void tt__doze(pthread_cond_t *wake, pthread_mutex_t *mutex, double seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    const double second = (double)until.tv_nsec * 1e-9 + seconds;
    until.tv_sec += (time_t)second;
    until.tv_nsec = (long)((second - floor(second)) * 1e9);
    pthread_cond_timedwait(wake, mutex, &until);
}

/* Sleeps until *count is at least `times` or a rank has failed. Returns false after the timeout. The timeout
   starts anew while any rank waits for other processes. */
static bool tt__await(tt__rank_group *w, const uint64_t *count, uint64_t times)
{
    double begin = tt__seconds();
    bool done = false;
    pthread_mutex_lock(&w->mutex);
    __atomic_add_fetch(&w->sleepers, 1, __ATOMIC_SEQ_CST);
    for (double left = w->timeout; !done && left > 0; left = begin + w->timeout - tt__seconds()) {
        done = tt__has_come(count, times) || __atomic_load_n(&w->failed, __ATOMIC_SEQ_CST);
        if (!done) tt__doze(&w->wake, &w->mutex, fmin(left, 1));
        if (__atomic_load_n(&w->outside, __ATOMIC_SEQ_CST)) begin = tt__seconds();
    }
    done = tt__has_come(count, times) || __atomic_load_n(&w->failed, __ATOMIC_SEQ_CST);
    __atomic_sub_fetch(&w->sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&w->mutex);
    return done;
}

/* Makes rank `me` wait until *count, a count of rank `rank`, is at least `times`. Returns false after the
   timeout, or if a rank has failed. */
static bool tt__wait_for(tt__rank_group *w, int me, int rank, const uint64_t *count, uint64_t times)
{
    for (int i = 0; i < w->spins && !tt__has_come(count, times); i++) tt__pause();
    const bool late = !tt__has_come(count, times) && !tt__await(w, count, times);
    if (late && !__atomic_exchange_n(&w->failed, 1, __ATOMIC_SEQ_CST)) { /* this rank is the first to fail */
        char where[2][128] = {"", ""};
        for (int k = 0; k < 2; k++) {
            const char *op = __atomic_load_n(&w->op[k ? rank : me], __ATOMIC_RELAXED);
            const char *on = __atomic_load_n(&w->on[k ? rank : me], __ATOMIC_RELAXED);
            if (!op || !on) continue;
            snprintf(where[k], sizeof where[k], "%s%s '%.96s'", k ? "; that rank is at " : " at ", op, on);
        }
        tt__fail(w->ctx, TT_ERR_DEVICE, "rank %d has waited %g s for rank %d, which has not arrived%s%s: if "
                 "that rank is only slow, set a longer timeout", me, w->timeout, rank, where[0], where[1]);
        tt__rank_group_wake(w);
    }
    return !__atomic_load_n(&w->failed, __ATOMIC_SEQ_CST);
}

/* Adds one to a count of this rank, and wakes ranks that wait for the count. */
static void tt__count_on(tt__rank_group *w, uint64_t *count)
{
    __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&w->sleepers, __ATOMIC_SEQ_CST)) tt__rank_group_wake(w);
}

/* Makes rank `me` wait at a barrier until all members have reached it. Then all members see the memory that
   any member has written before. Returns false after the timeout, or if a rank has failed. */
static bool tt__barrier(tt__rank_group *w, int me, tt__members members)
{
    bool come = true;
    for (int k = 0; k < members.count; k++)
        __atomic_add_fetch(&w->met[me][members.first + k * members.stride], 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&w->sleepers, __ATOMIC_SEQ_CST)) tt__rank_group_wake(w);
    for (int k = 0; k < members.count && come; k++) {
        const int rank = members.first + k * members.stride;
        come = tt__wait_for(w, me, rank, &w->met[rank][me], w->met[me][rank]);
    }
    return come;
}
