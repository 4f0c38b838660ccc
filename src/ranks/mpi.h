#pragma once
#include "../base/base.h"
#include "threads.h"
#include "processes.h"

/* ------------------------------------------------------------------------------------------------------- MPI
   Sends messages between processes through MPI. A build without TINYTRAIN_MPI refuses to run in several
   processes of a launcher. */

#ifdef TINYTRAIN_MPI
/* Stands in for tt_files.remove in all processes except process 0, which alone removes files. */
static bool tt__removes_nothing(void *user, const char *path) { (void)user; (void)path; return true; }

typedef char tt__request_holds_mpi[sizeof(MPI_Request) <= sizeof(uint64_t) ? 1 : -1];

static const char *tt__mpi_error(tt__net *n, int code)
{
    int length = 0;
    if (code == MPI_SUCCESS) return NULL;
    if (n->error[0]) return n->error; /* keeps the first error, which other threads may be reading */
    if (MPI_Error_string(code, n->error, &length) != MPI_SUCCESS) snprintf(n->error, 32, "error %d", code);
    return n->error;
}

static MPI_Comm tt__mpi_channel(const tt__net *n, int tag) { return tag < TT__DATA_TAG ? n->talk : n->data; }

static const char *tt__mpi_send(tt__net *n, int to, int tag, const void *data, size_t bytes, tt__request *r)
{
    MPI_Request q = MPI_REQUEST_NULL; /* stays null after an error */
    const int code = MPI_Isend(data, (int)bytes, MPI_BYTE, to, tag, tt__mpi_channel(n, tag), &q);
    r->process = to;
    r->handle = 0;
    memcpy(&r->handle, &q, sizeof q);
    return tt__mpi_error(n, code);
}

static const char *tt__mpi_receive(tt__net *n, int from, int tag, void *data, size_t bytes, tt__request *r)
{
    MPI_Request q = MPI_REQUEST_NULL; /* stays null after an error */
    const int code = MPI_Irecv(data, (int)bytes, MPI_BYTE, from, tag, tt__mpi_channel(n, tag), &q);
    r->process = from;
    r->handle = 0;
    memcpy(&r->handle, &q, sizeof q);
    return tt__mpi_error(n, code);
}

static const char *tt__mpi_test(tt__net *n, tt__request *r)
{
    MPI_Request q;
    int done = 0;
    memcpy(&q, &r->handle, sizeof q);
    const int code = MPI_Test(&q, &done, MPI_STATUS_IGNORE);
    memcpy(&r->handle, &q, sizeof q);
    r->done = done != 0;
    return tt__mpi_error(n, code);
}

static const char *tt__mpi_take_end(tt__net *n, int *from, void *data, size_t bytes)
{
    MPI_Status status;
    int there = 0;
    int code = MPI_Iprobe(MPI_ANY_SOURCE, TT__END_TAG, n->talk, &there, &status);
    *from = -1;
    if (code != MPI_SUCCESS || !there) return tt__mpi_error(n, code);
    *from = status.MPI_SOURCE;
    code = MPI_Recv(data, (int)bytes, MPI_BYTE, *from, TT__END_TAG, n->talk, MPI_STATUS_IGNORE);
    return tt__mpi_error(n, code);
}

/* The state of MPI in this process, for all contexts. The state is a global variable because MPI is global,
   too: MPI can start only once in a process, contexts open and close, and the function that ends MPI at exit
   gets no argument. MPI_Init_thread waits for all other processes, even forever, and cannot be interrupted.
   Therefore a separate thread starts MPI, and tt__mpi_open waits for that thread until the timeout. The same
   thread ends MPI, as the standard requires. */
typedef enum tt__mpi_state { TT__MPI_NONE, TT__MPI_STARTS, TT__MPI_RUNS, TT__MPI_ENDS } tt__mpi_state;

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t wake;    /* signalled when `state` changes */
    tt__mpi_state state;
    int code, level;        /* results of MPI_Init_thread */
    /* Number of contexts that use MPI. A closed context still counts if other processes may have ended.
       MPI_Finalize would wait for those processes forever, so MPI_Finalize is called only if no context
       counts. */
    int in_use;
    pthread_t thread;
} tt__mpi = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, TT__MPI_NONE, 0, 0, 0, 0};

static void *tt__mpi_thread(void *unused)
{
    int level = MPI_THREAD_SINGLE, has = 0;
    const int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    pthread_mutex_lock(&tt__mpi.mutex);
    tt__mpi.code = code;
    tt__mpi.level = level;
    tt__mpi.state = TT__MPI_RUNS;
    pthread_cond_broadcast(&tt__mpi.wake);
    while (tt__mpi.state != TT__MPI_ENDS) pthread_cond_wait(&tt__mpi.wake, &tt__mpi.mutex);
    pthread_mutex_unlock(&tt__mpi.mutex);
    MPI_Finalized(&has);
    if (!has) MPI_Finalize();
    return unused;
}

static void tt__mpi_finalise(void) /* runs when the process exits */
{
    pthread_mutex_lock(&tt__mpi.mutex);
    const bool ends = tt__mpi.state == TT__MPI_RUNS && tt__mpi.code == MPI_SUCCESS && !tt__mpi.in_use;
    if (ends) tt__mpi.state = TT__MPI_ENDS;
    pthread_cond_broadcast(&tt__mpi.wake);
    pthread_mutex_unlock(&tt__mpi.mutex);
    if (ends) pthread_join(tt__mpi.thread, NULL);
}

static void tt__mpi_close(tt__net *n)
{
    MPI_Comm_free(&n->talk);
    MPI_Comm_free(&n->data);
    pthread_mutex_lock(&tt__mpi.mutex);
    tt__mpi.in_use--;
    pthread_mutex_unlock(&tt__mpi.mutex);
}

static const tt__transport tt__mpi_transport = {tt__mpi_send, tt__mpi_receive, tt__mpi_test, tt__mpi_take_end,
                                      tt__mpi_close};

/* Fails because other processes have not called tt_open in time; MPI does not tell which processes. */
static tt_status tt__mpi_late(tt_context *ctx, const char *what)
{
    static const char *const ranks[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK",
                                        "PMIX_RANK"};
    char host[64] = "";
    const char *rank = NULL;
    for (int k = 0; k < TT__COUNT(ranks) && !rank; k++) rank = getenv(ranks[k]);
    if (gethostname(host, sizeof host - 1) != 0) snprintf(host, sizeof host, "unnamed");
    return tt__fail(ctx, TT_ERR_DEVICE, "process %s (%s) has waited %g s in tt_open for another process, "
                    "which has not arrived there: check that every process calls tt_open and that none has "
                    "ended (%s waits)", rank ? rank : "of unknown number", host, ctx->options.timeout, what);
}

/* Starts MPI, unless another context has begun to, and waits until MPI runs. */
static tt_status tt__mpi_start(tt_context *ctx)
{
    const double begin = tt__seconds();
    bool thread = true;
    pthread_mutex_lock(&tt__mpi.mutex);
    if (tt__mpi.state == TT__MPI_NONE) {
        thread = tt__thread_start(&tt__mpi.thread, tt__mpi_thread, NULL);
        if (thread) tt__mpi.state = TT__MPI_STARTS;
        if (thread) atexit(tt__mpi_finalise);
    }
    while (tt__mpi.state == TT__MPI_STARTS && tt__seconds() - begin < ctx->options.timeout)
        tt__doze(&tt__mpi.wake, &tt__mpi.mutex, 0.1);
    const bool runs = tt__mpi.state == TT__MPI_RUNS;
    const int code = tt__mpi.code;
    pthread_mutex_unlock(&tt__mpi.mutex);
    if (!thread)
        return tt__fail(ctx, TT_ERR_DEVICE,
                        "cannot start the thread that calls MPI_Init: raise the system's limit of threads");
    if (!runs) return tt__mpi_late(ctx, "MPI_Init");
    if (code != MPI_SUCCESS)
        return tt__fail(ctx, TT_ERR_DEVICE, "MPI_Init failed with error %d: start the program with the "
                        "mpirun of the MPI library that it was built with", code);
    return TT_OK;
}

/* Duplicates MPI_COMM_WORLD into *to, once all processes have called this function. */
static tt_status tt__mpi_copy(tt__net *n, MPI_Comm *to)
{
    const double begin = tt__seconds();
    MPI_Request request;
    int done = 0, code = MPI_Comm_idup(MPI_COMM_WORLD, to, &request);
    while (code == MPI_SUCCESS && !done) {
        const double waited = tt__seconds() - begin;
        code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (done || code != MPI_SUCCESS) break;
        if (waited > n->ctx->options.timeout) return tt__mpi_late(n->ctx, "MPI_Comm_idup");
        tt__net_rest(waited);
    }
    if (code != MPI_SUCCESS)
        return tt__fail(n->ctx, TT_ERR_DEVICE, "MPI_Comm_idup failed, because MPI has no communicator left "
                        "for another context: close contexts that are not used");
    MPI_Comm_set_errhandler(*to, MPI_ERRORS_RETURN);
    return TT_OK;
}

/* Returns whether MPI can access the memory of GPUs: TINYTRAIN_MPI_CUDA in the environment or, if that is not
   set, what MPI reports. */
static bool tt__mpi_is_cuda_aware(void)
{
    const char *said = getenv("TINYTRAIN_MPI_CUDA");
    int is = 0;
#if defined(OPEN_MPI) && defined(MPIX_CUDA_AWARE_SUPPORT)
    is = MPIX_Query_cuda_support();
#elif defined(MPIX_GPU_SUPPORT_CUDA) /* MPICH 4 */
    if (MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, &is) != MPI_SUCCESS) is = 0;
#endif
    return said && *said ? strcmp(said, "0") != 0 : is != 0;
}

/* Starts MPI, or uses MPI if the caller has started it. */
static tt_status tt__mpi_open(tt__net *n)
{
    int has = 0, level = MPI_THREAD_SINGLE, processes = 1;
    tt_context *ctx = n->ctx;
    tt_status status = TT_OK;
    MPI_Finalized(&has);
    if (has)
        return tt__fail(ctx, TT_ERR_DEVICE,
                        "MPI has been finalised: close contexts before MPI_Finalize, and open none after it");
    MPI_Initialized(&has);
    pthread_mutex_lock(&tt__mpi.mutex);
    const bool by_caller = has && tt__mpi.state == TT__MPI_NONE;
    pthread_mutex_unlock(&tt__mpi.mutex);
    if (by_caller) MPI_Query_thread(&level);
    else status = tt__mpi_start(ctx);
    if (status != TT_OK) return status;
    pthread_mutex_lock(&tt__mpi.mutex);
    if (!by_caller) level = tt__mpi.level;
    tt__mpi.in_use++;
    pthread_mutex_unlock(&tt__mpi.mutex);
    if (level < MPI_THREAD_SERIALIZED)
        return tt__fail(ctx, TT_ERR_DEVICE, "MPI was initialised for one thread, but several threads of a "
                        "process call MPI in turn: call MPI_Init_thread with MPI_THREAD_SERIALIZED or more");
    MPI_Comm_size(MPI_COMM_WORLD, &processes);
    if (processes > TT__RANKS)
        return tt__fail(ctx, TT_ERR_UNSUPPORTED, "%d processes are too many: start at most %d", processes,
                        (int)TT__RANKS);
    status = tt__mpi_copy(n, &n->talk);
    if (status == TT_OK) status = tt__mpi_copy(n, &n->data);
    if (status != TT_OK) return status;
    MPI_Comm_rank(n->talk, &n->me);
    n->processes = processes;
    n->cuda_aware = tt__mpi_is_cuda_aware();
    n->transport = &tt__mpi_transport;
    return TT_OK;
}

/* Facts that each process sends to the others at the start. All facts except `host` and `cuda_aware` must be
   equal in all processes. */
typedef struct tt__hello {
    char host[64], version[32], isa[16], bf16[16], seed[24];
    int cuda_aware;         /* MPI can access GPU memory here; messages use GPU memory only if MPI can in all
                               processes */
} tt__hello;

static tt_status tt__net_hello(tt_context *ctx, const char *isa, const char *bf16)
{
    static const struct { const char *what; size_t at; } same[] = {
        {"tinytrain.h", offsetof(tt__hello, version)}, {"instruction set", offsetof(tt__hello, isa)},
        {"bf16", offsetof(tt__hello, bf16)}, {"seed", offsetof(tt__hello, seed)}};
    tt__net *n = ctx->net;
    tt__hello own;
    char name[96];
    memset(&own, 0, sizeof own);
    for (int p = 0; p < n->processes; p++) snprintf(n->host[p], sizeof n->host[p], "host unknown");
    if (gethostname(own.host, sizeof own.host - 1) != 0) snprintf(own.host, sizeof own.host, "unnamed");
    snprintf(own.version, sizeof own.version, "%s", TT_VERSION);
    snprintf(own.isa, sizeof own.isa, "%s", isa);
    snprintf(own.bf16, sizeof own.bf16, "%s", bf16);
    snprintf(own.seed, sizeof own.seed, "%llu", (unsigned long long)ctx->options.seed);
    own.cuda_aware = n->cuda_aware;
    tt_status status = tt__agree(ctx, "tt_open", TT_OK, &own, sizeof own);
    const tt__hello *first = (const tt__hello *)tt__noted(ctx, 0, NULL);
    for (int p = 0; p < n->processes && status == TT_OK; p++) {
        const tt__hello *x = (const tt__hello *)tt__noted(ctx, p, NULL);
        snprintf(n->host[p], sizeof n->host[p], "%.63s", x->host);
        n->cuda_aware = n->cuda_aware && x->cuda_aware;
        for (int k = 0; k < TT__COUNT(same) && status == TT_OK; k++) {
            const char *there = (const char *)x + same[k].at, *here = (const char *)first + same[k].at;
            if (strcmp(there, here) == 0) continue;
            status = tt__fail(ctx, TT_ERR_ARGUMENT,
                              "%s has %s %s, and process 0 has %s: all processes must have the same %s",
                              tt__process_name(n, p, name), same[k].what, there, here, same[k].what);
        }
    }
    return status;
}
#endif

/* Finds the processes that a launcher has started together with this one. If there are several, sets ctx->net
   and lets only process 0 write files. */
static tt_status tt__net_open(tt_context *ctx, const char *isa, const char *bf16)
{
    const char *by = tt__trains_alone() ? NULL : tt__launched_by();
#ifndef TINYTRAIN_MPI
    (void)isa; (void)bf16;
    if (!by) return TT_OK;
    return tt__fail(ctx, TT_ERR_UNSUPPORTED, "a launcher has started several processes (%s is %s), but this "
                    "program was built without TINYTRAIN_MPI, so each process would train alone: build it "
                    "with MPI (make MPI=1), or set TINYTRAIN_ALONE=1 if each is to train alone", by,
                    getenv(by));
#else
    int has = 0;
    MPI_Initialized(&has);
    if (!by && (!has || tt__trains_alone())) return TT_OK;
    tt__net *n = (tt__net *)tt__calloc(ctx, sizeof *n);
    if (!n) return TT_ERR_MEMORY;
    pthread_mutex_init(&n->mutex, NULL);
    n->ctx = ctx;
    ctx->net = n;
    tt_status status = tt__mpi_open(n);
    if (status == TT_OK) n->note = (tt__note *)tt__calloc(ctx, sizeof *n->note * (size_t)n->processes);
    if (status == TT_OK && !n->note) status = TT_ERR_MEMORY;
    if (status == TT_OK) status = tt__net_hello(ctx, isa, bf16);
    if (status == TT_OK && n->me > 0) {
        /* Only process 0 writes files. Every process makes folders, because it may read a folder before
           process 0 has made it. */
        ctx->writes_nothing = true;
        ctx->options.files.remove = tt__removes_nothing;
        ctx->options.files.lock = NULL;
        ctx->options.files.space = NULL;
    }
    if (status == TT_OK && n->processes > 1) return TT_OK;
    if (status != TT_OK) n->failed = 1; /* tt__net_close then does not wait */
    tt__net_close(ctx);
    return status;
#endif
}
