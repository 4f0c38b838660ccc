#pragma once
#include "../base/base.h"

/* ------------------------------------------------------------------------------------- several processes
   Processes that a launcher such as `mpirun` has started together run one program. Each process calls the
   same functions with the same arguments and has the same number of ranks. Ranks are numbered through all
   processes. Messages go from one process to another (tt__transport). MPI's own sums are not used, because
   MPI chooses their order. To sum a tensor over ranks, a process first sums the numbers of its own ranks, as
   far as these ranks form subtrees of the tree of sums (tt__collective). Each process is responsible for one
   part of the tensor: it receives the other processes' sums of this part, adds them up, and sends the result
   to all others. For a tensor of n bytes on P processes, a process sends (P - 1) * n / P bytes before the sum
   and the same number after it. This is the minimum, and no message waits for another. Halving and doubling
   would send the same number of bytes, but in log2(P) rounds, each of which waits for the one before.
   Processes make decisions together (tt__agree): each sends the others a note with its status and the facts
   that they need. An error of one process is then an error of all, and all may continue. If a rank fails
   elsewhere, its process tells the others, which may be waiting for that rank; this ends the common work for
   good. The common work also ends if a process closes its context or lets others wait longer than the
   timeout. */

/* Tags of messages: of end messages (tt__end), of notes (tt__note), of fetched data (tt__net_fetch).
   Collectives use tags from TT__DATA_TAG on. */
enum { TT__END_TAG = 1, TT__NOTE_TAG, TT__FETCH_TAG, TT__DATA_TAG = 16 };

/* A message in flight. */
typedef struct tt__request {
    uint64_t handle;        /* the transport's handle of the message */
    int process;            /* the process to which the message goes, or from which it comes */
    bool done, comes;       /* done: the message is sent or received; comes: an instruction of this process
                               receives the message */
} tt__request;

/* A transport: carries messages between processes. Messages with one tag from one process to another arrive
   in order. Functions return NULL, or an error message. Only one thread at a time may call them. */
typedef struct tt__transport {
    const char *(*send)(struct tt__net *n, int to, int tag, const void *data, size_t bytes, tt__request *r);
    const char *(*receive)(struct tt__net *n, int from, int tag, void *data, size_t bytes, tt__request *r);
    const char *(*test)(struct tt__net *n, tt__request *r); /* sets r->done */
    /* Receives a message with tag TT__END_TAG if one has arrived; otherwise sets *from to -1. */
    const char *(*take_end)(struct tt__net *n, int *from, void *data, size_t bytes);
    void (*close)(struct tt__net *n);
} tt__transport;

/* A process's last message to the others: a rank has failed, or the process closes its context. */
typedef struct tt__end {
    int status, failed;
    char why[1000];
} tt__end;

enum { TT__NOTE = 2560 };   /* max bytes of data that a process gives the others in tt__agree */
typedef struct tt__note {
    char where[40];         /* the point of the program where the process is */
    int status, bytes;
    unsigned char data[TT__NOTE + 1000]; /* `bytes` bytes of data, then the text of an error */
} tt__note;

/* The processes that run together, as this process sees them. */
typedef struct tt__net {
    tt_context *ctx;
    const tt__transport *transport;
    int processes, me;
    char host[TT__RANKS][64];
    pthread_mutex_t mutex;  /* guards the transport, and the fields that are "guarded" below */
    int failed;             /* atomic: the common work of the processes has ended */
    tt_status status;
    char why[1100];         /* why the common work has ended */
    tt__end end, ended[TT__RANKS]; /* end: this process's end message; ended: for each process, its end
                                      message, guarded by `mutex` */
    bool has_ended[TT__RANKS];     /* guarded by `mutex`; for each process: `ended` has its end message */
    char last_message[TT__RANKS][128]; /* guarded by `mutex`; for each process: the instruction for which a
                                          message of that process came last */
    int ranks;              /* number of ranks of each process in the last program that ran; 0: none yet */
    tt__note *note;         /* for each process: its note in the last tt__agree */
    bool cuda_aware;        /* MPI can access GPU memory in every process */
    double sent, min;       /* guarded by `mutex`. sent: bytes that collectives have sent so far; min: the
                               minimum that any method must send */
#ifdef TINYTRAIN_MPI
    MPI_Comm talk, data;    /* talk: communicator for notes and end messages; data: communicator for
                               collectives */
    char error[MPI_MAX_ERROR_STRING + 1];
#endif
} tt__net;

/* Writes the name of a process to `to`, such as "process 1 (host b)". */
static const char *tt__process_name(const tt__net *n, int process, char to[96])
{
    snprintf(to, 96, "process %d (%s)", process, n->host[process]);
    return to;
}

/* Ends the common work of the processes. The caller holds n->mutex. */
static void tt__net_stop(tt__net *n, tt_status status, const char *why)
{
    if (n->failed) return;
    n->status = status;
    snprintf(n->why, sizeof n->why, "%s", why);
    __atomic_store_n(&n->failed, 1, __ATOMIC_SEQ_CST);
}

static bool tt__net_has_failed(const tt__net *n) { return __atomic_load_n(&n->failed, __ATOMIC_SEQ_CST); }

static tt_status tt__net_status(tt_context *ctx)
{
    const tt__net *n = ctx->net;
    if (!n || !tt__net_has_failed(n)) return TT_OK;
    return tt__fail(ctx, n->status, "%s", n->why);
}

/* Receives an end message (tt__end) of another process, if one has arrived, and notes that its sender has
   left the common work. The caller holds n->mutex. Returns NULL or the transport's error. */
static const char *tt__net_ends(tt__net *n)
{
    tt__end end;
    int from = -1;
    char name[96], why[1100];
    const char *error = n->transport->take_end(n, &from, &end, sizeof end);
    if (error || from < 0) return error;
    n->ended[from] = end;
    n->has_ended[from] = true;
    snprintf(why, sizeof why, "%s", end.why);
    if (end.failed && strncmp(why, "process ", 8) != 0) /* the text does not name a process yet */
        snprintf(why, sizeof why, "%s: %s", tt__process_name(n, from, name), end.why);
    if (end.failed) tt__net_stop(n, (tt_status)end.status, why);
    return NULL;
}

/* Pauses between two checks for messages, because other processes may need this CPU to send them. waited:
   seconds waited so far. */
static void tt__net_rest(double waited)
{
    const struct timespec pause = {0, 20000};
    if (waited < 2e-3) sched_yield();
    else nanosleep(&pause, NULL);
}

/* Waits until all `count` messages have been sent or received. Returns false for one of four reasons: a
   process has failed; *stop became nonzero (`stop` may be NULL); the transport failed, with its error in *why
   (else NULL); the wait took too long, for process *late (else -1). */
static bool tt__net_wait(tt__net *n, const int *stop, tt__request *r, int count, int *late, const char **why)
{
    const double timeout = n->ctx->options.timeout, grace = fmin(2, timeout);
    double since = tt__seconds(), now = since;
    int left = count;
    *late = -1;
    *why = NULL;
    for (int k = 0; k < count; k++) r[k].done = false;
    while (left > 0) {
        const int before = left;
        /* slow: a process whose message is missing; closed: such a process that has closed its context */
        int slow = -1, closed = -1;
        pthread_mutex_lock(&n->mutex);
        for (int k = 0; k < count && !*why; k++) {
            if (r[k].done) continue;
            *why = n->transport->test(n, &r[k]);
            left -= r[k].done;
            if (!r[k].done && slow < 0) slow = r[k].process;
        }
        if (!*why) *why = tt__net_ends(n);
        for (int k = 0; k < count; k++)
            if (!r[k].done && n->has_ended[r[k].process]) closed = r[k].process;
        pthread_mutex_unlock(&n->mutex);
        if (*why) return false;
        if (!left) break;
        if (tt__net_has_failed(n) || (stop && __atomic_load_n(stop, __ATOMIC_SEQ_CST))) return false;
        now = tt__seconds();
        if (left < before) since = now;
        if (closed >= 0) slow = closed;
        if (now - since > (closed >= 0 ? grace : timeout)) {
            *late = slow;
            return false;
        }
        tt__net_rest(now - since);
    }
    return true;
}

/* Writes the name of a process with its ranks: "rank 1, process 1 (host b)," or, for a process with several
   ranks, "one of the ranks 2 to 3, process 1 (host b),". */
static const char *tt__ranks_name(const tt__net *n, int process, char to[160])
{
    char name[96];
    const int first = process * n->ranks;
    tt__process_name(n, process, name);
    if (!n->ranks) snprintf(to, 160, "%s", name);
    else if (n->ranks == 1) snprintf(to, 160, "rank %d, %s,", first, name);
    else snprintf(to, 160, "one of the ranks %d to %d, %s,", first, first + n->ranks - 1, name);
    return to;
}

/* Fails with the reason why tt__net_wait returned false. `where` names the work that waited. */
static tt_status tt__net_waited(tt__net *n, const char *where, int late, const char *why)
{
    char name[160], last_message[128];
    tt_context *ctx = n->ctx;
    if (why)
        return tt__fail(ctx, TT_ERR_DEVICE, "%s: MPI failed (%s): see what the other processes printed, and "
                        "check the network", where, why);
    if (late < 0) return tt__net_status(ctx);
    tt__ranks_name(n, late, name);
    pthread_mutex_lock(&n->mutex);
    const bool closed = n->has_ended[late];
    const tt__end end = n->ended[late];
    memcpy(last_message, n->last_message[late], sizeof last_message);
    pthread_mutex_unlock(&n->mutex);
    if (closed)
        return tt__fail(ctx, TT_ERR_DEVICE, "%s: %s has closed its context%s%s", where, name, end.why[0]
                        ? ", after: " : ", so no other can go on: see what it printed", end.why);
    return tt__fail(ctx, TT_ERR_DEVICE, "%s: %s has not arrived within %g s%s%s: if that process is only "
                    "slow, set a longer timeout", where, name, ctx->options.timeout,
                    last_message[0] ? "; its last message came in " : "", last_message);
}

/* Tells all other processes that this process ends its part of the common work (tt__end). Waits for at most
   `seconds`. Returns false if the message did not reach all processes. */
static bool tt__net_send_end(tt__net *n, double seconds)
{
    tt__request r[TT__RANKS];
    const double begin = tt__seconds();
    int count = 0, left = 1;
    pthread_mutex_lock(&n->mutex);
    for (int p = 0; p < n->processes; p++) {
        if (p == n->me) continue;
        r[count].done = false;
        if (!n->transport->send(n, p, TT__END_TAG, &n->end, sizeof n->end, &r[count])) count++;
    }
    pthread_mutex_unlock(&n->mutex);
    while (left && tt__seconds() - begin < seconds) {
        left = 0;
        pthread_mutex_lock(&n->mutex);
        for (int k = 0; k < count; k++) {
            /* If `test` fails, the other process cannot be reached: do not wait for the message. */
            if (!r[k].done && n->transport->test(n, &r[k])) r[k].done = true;
            left += !r[k].done;
        }
        pthread_mutex_unlock(&n->mutex);
        tt__net_rest(tt__seconds() - begin);
    }
    return !left;
}

/* Ends the common work of all processes because this process has an error, and puts this process's name
   before the context's error message. */
static tt_status tt__net_fail(tt_context *ctx, tt_status status)
{
    tt__net *n = ctx->net;
    char name[96], why[sizeof ctx->error];
    if (!n || status == TT_OK) return status;
    if (tt__net_has_failed(n)) return tt__net_status(ctx);
    if (strncmp(ctx->error, "process ", 8) == 0) snprintf(why, sizeof why, "%s", ctx->error);
    else snprintf(why, sizeof why, "%s: %.900s", tt__process_name(n, n->me, name), ctx->error);
    pthread_mutex_lock(&n->mutex);
    n->end.status = (int)status;
    n->end.failed = 1;
    snprintf(n->end.why, sizeof n->end.why, "%.999s", why);
    tt__net_stop(n, status, why);
    pthread_mutex_unlock(&n->mutex);
    tt__net_send_end(n, fmin(2, ctx->options.timeout)); /* does not wait for messages of collectives */
    return tt__net_status(ctx);
}

/* Makes all processes decide alike: waits until each process has called this function, and exchanges their
   statuses and their data. `brought`: `bytes` bytes of data of this process; tt__noted then returns the data
   of each process. If some processes bring an error as `status`, all processes return the first error by
   process number. `where` names the decision in error messages. */
static tt_status tt__agree(tt_context *ctx, const char *where, tt_status status, const void *brought,
                           size_t bytes)
{
    tt__net *n = ctx->net;
    tt__request r[2 * TT__RANKS];
    char name[96], text[sizeof ctx->error];
    const char *why = NULL;
    int count = 0, late = -1;
    if (!n) return status;
    if (tt__net_has_failed(n)) return tt__net_status(ctx);
    tt__note *own = &n->note[n->me];
    memset(own, 0, sizeof *own);
    snprintf(own->where, sizeof own->where, "%s", where);
    own->status = (int)status;
    own->bytes = (int)bytes;
    const int length = snprintf((char *)own->data + bytes, 1000, "%.999s", status != TT_OK ? ctx->error : "");
    const size_t size = offsetof(tt__note, data) + bytes + (size_t)length + 1;
    if (bytes) memcpy(own->data, brought, bytes);
    pthread_mutex_lock(&n->mutex);
    for (int p = 0; p < n->processes && !why; p++) {
        if (p == n->me) continue;
        why = n->transport->receive(n, p, TT__NOTE_TAG, &n->note[p], sizeof n->note[p], &r[count]);
        if (!why) why = n->transport->send(n, p, TT__NOTE_TAG, own, size, &r[count + 1]);
        count += 2;
    }
    pthread_mutex_unlock(&n->mutex);
    if (why || !tt__net_wait(n, NULL, r, count, &late, &why))
        return tt__net_fail(ctx, tt__net_waited(n, where, late, why));
    const tt__note *failed = NULL, *elsewhere = NULL;
    for (int p = n->processes - 1; p >= 0; p--) {
        const tt__note *x = &n->note[p];
        if (x->status != TT_OK) failed = x;
        if (strcmp(x->where, where) != 0 || x->bytes != (int)bytes) elsewhere = x;
    }
    if (failed) {
        tt__process_name(n, (int)(failed - n->note), name);
        snprintf(text, sizeof text, "%s", (const char *)failed->data + failed->bytes);
        const bool named = strncmp(text, "process ", 8) == 0; /* an earlier tt__agree has named the process */
        status = tt__fail(ctx, (tt_status)failed->status, "%s%s%.900s", named ? "" : name, named ? "" : ": ",
                          text);
    } else if (elsewhere) {
        tt__process_name(n, (int)(elsewhere - n->note), name);
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "%s is at %s, but process %d is at %s: all processes must "
                          "call the same functions in the same order", name, elsewhere->where, n->me, where);
    }
    return elsewhere ? tt__net_fail(ctx, status) : status;
}

/* Returns the data that a process brought to the last tt__agree; `own` in a run of one process. */
static const void *tt__noted(const tt_context *ctx, int process, const void *own)
{
    return ctx->net ? (const void *)ctx->net->note[process].data : own;
}

/* Sends `data` of process `owner` to process `taker`, or to all processes if `taker` is -1. All processes
   must call this function. */
static tt_status tt__net_fetch(tt_context *ctx, int owner, int taker, const char *where, void *data,
                               size_t bytes)
{
    tt__net *n = ctx->net;
    tt__request r[TT__RANKS];
    const char *why = NULL;
    int count = 0, late = -1;
    if (owner == taker || (taker >= 0 && n->me != taker && n->me != owner)) return TT_OK;
    if (tt__net_has_failed(n)) return tt__net_status(ctx);
    pthread_mutex_lock(&n->mutex);
    if (n->me != owner) why = n->transport->receive(n, owner, TT__FETCH_TAG, data, bytes, &r[count++]);
    for (int p = 0; p < n->processes && n->me == owner && !why; p++)
        if (p != owner && (taker < 0 || p == taker))
            why = n->transport->send(n, p, TT__FETCH_TAG, data, bytes, &r[count++]);
    pthread_mutex_unlock(&n->mutex);
    if (!why && tt__net_wait(n, NULL, r, count, &late, &why)) return TT_OK;
    return tt__net_fail(ctx, tt__net_waited(n, where, late, why));
}

/* Ends the common work of the processes. Each process calls this function when it closes its context. */
static void tt__net_close(tt_context *ctx)
{
    tt__net *n = ctx->net;
    char name[96];
    if (!n) return;
    bool all = !tt__net_has_failed(n);
    if (all) {
        const double begin = tt__seconds();
        int late = 0; /* number of the first process that is missing */
        n->end.status = (int)ctx->status;
        if (ctx->status != TT_OK) snprintf(n->end.why, sizeof n->end.why, "%.999s", ctx->error);
        all = tt__net_send_end(n, ctx->options.timeout);
        do {
            pthread_mutex_lock(&n->mutex);
            const bool failed = tt__net_ends(n) != NULL;
            for (late = 0; late < n->processes && (late == n->me || n->has_ended[late]);) late++;
            pthread_mutex_unlock(&n->mutex);
            if (failed) all = false;
            if (late < n->processes) tt__net_rest(tt__seconds() - begin);
        } while (all && late < n->processes && tt__seconds() - begin < ctx->options.timeout);
        if (late < n->processes) {
            all = false;
            tt__log(ctx, TT_LOG_ERROR, "close", "tt_close: %s has not arrived within %g s",
                    tt__process_name(n, late, name), tt__seconds() - begin);
        }
    }
    if (all) n->transport->close(n); /* otherwise `close` would wait for a process that is gone */
    ctx->net = NULL;
    pthread_mutex_destroy(&n->mutex);
    tt__free(ctx, n->note);
    tt__free(ctx, n);
}

/* Returns the environment variable by which a launcher shows that it has started several processes; NULL:
   there is none. */
static const char *tt__launched_by(void)
{
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE",
                                        "MPI_LOCALNRANKS"};
    for (int k = 0; k < TT__COUNT(sizes); k++) {
        const char *size = getenv(sizes[k]);
        if (size && strtol(size, NULL, 10) > 1) return sizes[k];
    }
    const char *rank = getenv("PMIX_RANK"), *tasks = getenv("SLURM_NTASKS");
    const bool several = (rank && strtol(rank, NULL, 10) > 0) || (tasks && strtol(tasks, NULL, 10) > 1);
    return rank && several ? "PMIX_RANK" : NULL;
}

/* Returns whether each process shall train alone, although a launcher has started several processes
   (TINYTRAIN_ALONE). */
static bool tt__trains_alone(void)
{
    const char *alone = getenv("TINYTRAIN_ALONE");
    return alone && *alone && strcmp(alone, "0") != 0;
}
