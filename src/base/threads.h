#pragma once
#include "../api/standard.h"
#include "../api/context.h"
#include "system.h"
#include "on_posix.h"
#include "on_windows.h"
#include "context.h"
#include "memory.h"

/* ------------------------------------------------------------------------------------------------ threads */

/* The floating-point mode (rounding, subnormals, traps) of a thread. The library computes in the default
   mode, so that results don't depend on the caller's mode. tt__float_default sets the default and returns the
   mode that tt__float_restore is to restore. */
#if defined(__x86_64__)
typedef uint32_t tt__float_mode; /* register MXCSR; bits 0 to 5 are flags */
static tt__float_mode tt__float_default(void)
{
    tt__float_mode before = __builtin_ia32_stmxcsr();
    if ((before & ~63u) != 0x1f80) __builtin_ia32_ldmxcsr(0x1f80);
    return before;
}
static void tt__float_restore(tt__float_mode mode)
{
    if ((mode & ~63u) != 0x1f80) __builtin_ia32_ldmxcsr(mode);
}
#elif defined(__aarch64__)
typedef uint64_t tt__float_mode; /* register FPCR */
static tt__float_mode tt__float_default(void)
{
    tt__float_mode before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    if (before) __asm__ volatile("msr fpcr, %0" : : "r"((tt__float_mode)0) : "memory");
    return before;
}
static void tt__float_restore(tt__float_mode mode)
{
    if (mode) __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}
#else
typedef fenv_t tt__float_mode;
static tt__float_mode tt__float_default(void)
{
    tt__float_mode before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    return before;
}
static void tt__float_restore(tt__float_mode mode) { fesetenv(&mode); }
#endif

/* A function that does one task. tt__run_tasks runs the function once for each task of a call, on all threads
   of the pool, the caller included. In each call a thread begins with its own slice of the tasks, whose data
   may still be in the thread's cache; then the thread helps with the slices of other threads. Results must
   depend on the task only, not on the thread or the number of threads. Idle workers sleep. */
typedef void (*tt__task_function)(void *arg, int64_t task, int thread);

typedef struct tt__worker {
    tt__pool *pool;
    int thread;
    int64_t next, end; /* the tasks left in this thread's slice: [next, end); `next` is atomic */
    char apart[40];    /* padding, so that no two slices share a cache line */
} tt__worker;

struct tt__pool {
    int threads, started;
    pthread_t handles[256];
    tt__worker workers[256]; /* workers[0] is the calling thread */
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    tt__task_function run;
    void *arg;
    uint64_t generation;     /* atomic; grows by 1 with each call that has work */
    int active;              /* atomic; number of workers that have not finished the current call */
    bool stop;
};

static double tt__seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void tt__pool_work(tt__pool *pool, int thread)
{
    for (int k = 0; k < pool->threads; k++) {
        tt__worker *slice = &pool->workers[(thread + k) % pool->threads];
        for (int64_t task; (task = __atomic_fetch_add(&slice->next, 1, __ATOMIC_RELAXED)) < slice->end;)
            pool->run(pool->arg, task, thread);
    }
}

/* Iterations of a loop that waits before the thread sleeps: about 20 us, longer than the gap between ops,
   shorter than a time slice. */
#define TT__SPINS 2000

/* Slows down a loop that waits for another thread. */
static void tt__pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void *tt__pool_main(void *arg)
{
    const int thread = ((tt__worker *)arg)->thread;
    tt__pool *pool = ((tt__worker *)arg)->pool;
    uint64_t seen = 0;
    tt__float_default();
    for (;;) {
        for (int i = 0; i < TT__SPINS && __atomic_load_n(&pool->generation, __ATOMIC_ACQUIRE) == seen; i++)
            tt__pause();
        pthread_mutex_lock(&pool->mutex);
        while (pool->generation == seen && !pool->stop) pthread_cond_wait(&pool->wake, &pool->mutex);
        seen = pool->generation;
        bool stop = pool->stop;
        pthread_mutex_unlock(&pool->mutex);
        if (stop) return NULL;
        tt__pool_work(pool, thread);
        if (__atomic_sub_fetch(&pool->active, 1, __ATOMIC_ACQ_REL) == 0) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

static void tt__run_tasks(tt__pool *pool, int64_t count, tt__task_function run, void *arg)
{
    if (count <= 0) return;
    tt__float_mode mode = tt__float_default();
    if (count == 1 || pool->threads == 1) {
        for (int64_t i = 0; i < count; i++) run(arg, i, 0);
        tt__float_restore(mode);
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    pool->run = run;
    pool->arg = arg;
    for (int t = 0; t < pool->threads; t++) {
        pool->workers[t].next = count * t / pool->threads;
        pool->workers[t].end = count * (t + 1) / pool->threads;
    }
    pool->active = pool->threads - 1;
    __atomic_add_fetch(&pool->generation, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    tt__pool_work(pool, 0);
    tt__float_restore(mode);
    for (int i = 0; i < TT__SPINS && __atomic_load_n(&pool->active, __ATOMIC_ACQUIRE); i++) tt__pause();
    pthread_mutex_lock(&pool->mutex);
    while (__atomic_load_n(&pool->active, __ATOMIC_ACQUIRE)) pthread_cond_wait(&pool->done, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

static void tt__pool_free(tt_context *ctx, tt__pool *pool)
{
    if (!pool) return;
    pthread_mutex_lock(&pool->mutex);
    pool->stop = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->started; i++) pthread_join(pool->handles[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    tt__free(ctx, pool);
}

static tt__pool *tt__pool_new(tt_context *ctx, int threads)
{
    tt__pool *pool = (tt__pool *)tt__calloc(ctx, sizeof *pool);
    if (!pool) return NULL;
    pool->threads = threads;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    while (pool->started < threads - 1) {
        tt__worker *worker = &pool->workers[pool->started + 1];
        worker->pool = pool;
        worker->thread = pool->started + 1;
        if (!tt__thread_start(&pool->handles[pool->started], tt__pool_main, worker)) {
            tt__fail(ctx, TT_ERR_MEMORY, "cannot start thread %d of %d: set `threads` lower, or raise the "
                     "system's limit of threads", pool->started + 2, threads);
            tt__pool_free(ctx, pool);
            return NULL;
        }
        pool->started++;
    }
    return pool;
}
