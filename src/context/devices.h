#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/rules.h"
#include "../ranks/threads.h"
#include "../ranks/processes.h"
#include "../ranks/groups.h"
#include "memory.h"
#include "cpu.h"

/* ----------------------------------------------------------------------------------- ranks and their devices
   Kinds of devices, the devices that a name such as "cuda:0,2" denotes, and access to device memory. A device
   group has a device for each rank of a program. */

static const tt__device_kind tt__device_kinds[TT__KINDS] = {
    {"cpu", &tt__cpu_backend, TT__ALIGN, 0, true, tt__cpu_workspace},
#ifdef TINYTRAIN_CUDA
    {"cuda", &tt__cuda_backend, TT__CUDA_ALIGN, TT__CUDA_RESIDENT, false, tt__cuda_workspace},
#else
    {"cuda", NULL, TT__CUDA_ALIGN, TT__CUDA_RESIDENT, false, tt__cuda_workspace},
#endif
};

/* Finds which devices of a device group can access each other's memory, and warns if some cannot. */
static void tt__device_group_try(tt_context *ctx, tt__device_group *c)
{
    char first[704] = "";
    int pairs = 0;
    for (int a = c->first; a < c->first + c->local && !c->tried; a++)
        for (int b = c->first; b < c->first + c->local; b++) {
            double rate;
            const char *why = a == b ? NULL : c->kind->backend->peer(c->device[a], c->device[b], &rate);
            c->no_peer[a][b] = why != NULL;
            if (why && !pairs++) snprintf(first, sizeof first, "%s", why);
        }
    c->tried = true;
    if (pairs > 1)
        tt__log(ctx, TT_LOG_WARNING, "peers", "%s; this is so for %d pairs of devices of '%s'", first, pairs,
                c->name);
    else if (pairs) tt__log(ctx, TT_LOG_WARNING, "peers", "%s", first);
}

/* Opens the devices of a device group that are not open yet, and starts the group's threads. */
static tt_status tt__device_group_open(tt_context *ctx, tt__device_group *c)
{
    char why[512] = "no reason given", name[32];
    for (int r = c->first; r < c->first + c->local; r++) {
        if (c->device[r]) continue;
        c->device[r] = c->kind->backend->open(ctx, c->index[r], c->local, why, sizeof why);
        /* the call that opens a CPU device has set the error (no memory or threads) */
        if (!c->device[r] && c->kind->host) return ctx->status;
        if (!c->device[r])
            return tt__fail(ctx, TT_ERR_DEVICE, "device '%s' cannot be opened: %s%s",
                            tt__device_name(c->kind, c->index[r], name), why,
                            c->moved ? "; each process of a host takes the next device, unless the option "
                            "names one, such as cuda:0" : "");
    }
    if (c->ranks == 1) return TT_OK;
    const size_t stage = ctx->net ? 2 * TT__STAGE : TT__STAGE; /* with several processes: one half to send,
                                                                  one half to receive */
    for (int r = c->first; r < c->first + c->local && (ctx->net || c->kind->backend->stage); r++) {
        if (!c->stage[r]) c->stage[r] = c->kind->backend->allocate_host(c->device[r], stage);
        if (!c->stage[r]) return tt__device_status(ctx, c, r, TT_ERR_MEMORY);
    }
    if (c->kind->backend->peer) tt__device_group_try(ctx, c);
    if (ctx->net) ctx->net->ranks = c->local;
    if (!c->rank_group) c->rank_group = tt__rank_group_new(ctx, c->local, ctx->options.timeout);
    if (c->rank_group && !c->threads) c->threads = tt__pool_new(ctx, c->local);
    return c->threads ? TT_OK : ctx->status;
}

/* Opens a CPU device for each rank of the device group, for updates in the host's memory. */
static tt_status tt__device_group_open_host(tt_context *ctx, tt__device_group *c)
{
    char why[512];
    for (int r = c->first; r < c->first + c->local; r++) {
        if (c->host[r] || c->kind->host) continue;
        c->host[r] = tt__cpu_open(ctx, 0, c->local, why, sizeof why);
        if (!c->host[r]) return ctx->status;
    }
    return TT_OK;
}

static void tt__device_group_free(tt_context *ctx, tt__device_group *c)
{
    tt__pool_free(ctx, c->threads);
    tt__rank_group_free(c->rank_group);
    for (int r = 0; r < c->ranks; r++) {
        if (c->stage[r]) c->kind->backend->release_host(c->device[r], c->stage[r]);
        if (c->event[r]) c->kind->backend->release_event(c->device[r], c->event[r]);
    }
    for (int r = 0; r < c->ranks; r++) if (c->device[r]) c->kind->backend->close(c->device[r]);
    for (int r = 0; r < c->ranks; r++) if (c->host[r]) tt__cpu_close(c->host[r]);
    tt__free(ctx, c);
}

/* A function that runs on all ranks of a device group at once. */
typedef struct tt__device_group_job {
    tt__device_group *group;
    tt_status (*run)(void *arg, int rank);
    void *arg;
    tt_status status;
    int failed;         /* 1 + the number of the rank that failed first; 0: none failed */
    bool named;         /* the context's error message is that of the failed rank */
} tt__device_group_job;

static void tt__device_group_task(void *arg, int64_t task, int thread)
{
    tt__device_group_job *job = (tt__device_group_job *)arg;
    tt__rank_group *w = job->group->rank_group;
    (void)thread;
    const int rank = job->group->first + (int)task;
    const tt_status status = job->run(job->arg, rank);
    if (status == TT_OK) return;
    pthread_mutex_lock(&w->ctx->mutex);
    const bool named = w->ctx->rank_failed && pthread_equal(w->ctx->failed, pthread_self());
    if (!job->failed || (named && !job->named)) { /* a rank that has no error message of its own failed only
                                                     because of another rank, so a named error replaces its
                                                     error */
        job->status = status;
        job->failed = rank + 1;
        job->named = named;
    }
    pthread_mutex_unlock(&w->ctx->mutex);
    tt__rank_group_fail(w);
}

/* Calls run(arg, rank) for all ranks of this process at once, each on its own thread, and returns when all
   have ended. An error on one rank ends the others; the error's sentence names that rank. */
static tt_status tt__on_ranks(tt_context *ctx, tt__device_group *c, tt_status (*run)(void *arg, int rank),
                              void *arg)
{
    char error[sizeof ctx->error], name[32];
    tt__device_group_job job = {c, run, arg, TT_OK, 0, false};
    if (c->ranks == 1) return run(arg, 0);
    tt__rank_group_reset(c->rank_group);
    ctx->ranks_run = true;
    ctx->rank_failed = false;
    tt__run_tasks(c->threads, c->local, tt__device_group_task, &job);
    ctx->ranks_run = false;
    if (!job.failed) return TT_OK;
    if (ctx->net && tt__net_has_failed(ctx->net)) return tt__net_status(ctx);
    memcpy(error, ctx->error, sizeof error);
    if (c->kind->host) return tt__fail(ctx, job.status, "rank %d of %s: %s", job.failed - 1, c->name, error);
    return tt__fail(ctx, job.status, "rank %d (%s): %s", job.failed - 1,
                    tt__device_name(c->kind, c->index[job.failed - 1], name), error);
}

/* A place in the memory of a rank, and the dtype of the numbers there. data: the address; NULL if the rank
   belongs to another process. */
typedef struct tt__memory {
    const tt__arena *arena;
    int rank;
    tt__space space;
    tt_dtype dtype;
    void *data;
} tt__memory;

/* Reads the first n numbers at *x, converts them to dtype `to_type` and writes them to `to`. */
static tt_status tt__read_memory(const tt__memory *x, void *to, tt_dtype to_type, size_t n)
{
    const tt__arena *a = x->arena;
    const tt__backend *b = a->kind->backend;
    tt__device *d = a->group->device[x->rank];
    const size_t item = tt_dtype_bytes(x->dtype), to_item = tt_dtype_bytes(to_type), max = TT__PIECE / 2;
    float shard[TT__PIECE / 4];
    const bool of_host = a->kind->host || x->space == TT__HOST;
    tt_status status = a->kind->host || !of_host ? TT_OK : b->wait(d);
    if (of_host && status == TT_OK) tt__convert(to, to_type, x->data, x->dtype, n);
    else if (x->dtype == to_type && !of_host) status = b->read(d, to, x->data, n * item);
    else
        for (size_t done = 0, m; done < n && !of_host && status == TT_OK; done += m) {
            m = n - done < max ? n - done : max;
            status = b->read(d, shard, (const char *)x->data + done * item, m * item);
            if (status == TT_OK) tt__convert((char *)to + done * to_item, to_type, shard, x->dtype, m);
        }
    return tt__device_status(a->group->ctx, a->group, x->rank, status);
}

/* Reads the first n numbers at *x, converts them to dtype `to_type` and writes them to `to`. If the ranks
   belong to several processes, all must call this function: the process that has rank x->rank reads, and all
   get the numbers. */
static tt_status tt__fetch_memory(const tt__memory *x, void *to, tt_dtype to_type, size_t n)
{
    const tt__device_group *c = x->arena->group;
    tt_status status = tt__is_local(c, x->rank) ? tt__read_memory(x, to, to_type, n) : TT_OK;
    if (c->local == c->ranks) return status;
    if (status != TT_OK) return tt__net_fail(c->ctx, status);
    return tt__net_fetch(c->ctx, tt__process_of(c, x->rank), -1, "reading from another rank", to,
                         n * tt_dtype_bytes(to_type));
}

/* Sends bytes, which the process of a rank has read, to process 0. */
static tt_status tt__net_to_first(const tt__device_group *c, int rank, void *data, size_t bytes)
{
    if (c->local == c->ranks) return TT_OK;
    return tt__net_fetch(c->ctx, tt__process_of(c, rank), 0, "reading from another rank", data, bytes);
}

/* Converts n numbers from dtype `from_type` to the dtype of *x and writes them to *x. */
static tt_status tt__write_memory(const tt__memory *x, const void *from, tt_dtype from_type, size_t n)
{
    const tt__arena *a = x->arena;
    const tt__backend *b = a->kind->backend;
    tt__device *d = a->group->device[x->rank];
    const size_t item = tt_dtype_bytes(x->dtype);
    const bool of_host = a->kind->host || x->space == TT__HOST;
    tt_status status = a->kind->host || !of_host ? TT_OK : b->wait(d);
    if (of_host && status == TT_OK) tt__convert(x->data, x->dtype, from, from_type, n);
    for (size_t done = of_host ? n : 0, m; done < n && status == TT_OK; done += m) {
        m = n - done < TT__PIECE ? n - done : TT__PIECE;
        void *bounce = a->bounce[x->rank];
        tt__convert(bounce, x->dtype, (const char *)from + done * tt_dtype_bytes(from_type), from_type, m);
        status = b->copy(d, TT__COMPUTE_STREAM, (char *)x->data + done * item, bounce, m * item);
        if (status == TT_OK) status = b->wait(d);
    }
    return tt__device_status(a->group->ctx, a->group, x->rank, status);
}

/* Returns `option`. If `option` is NULL or empty, returns the value of the environment variable `variable`;
   NULL if the variable is not set or empty. */
static const char *tt__option(const char *option, const char *variable)
{
    if (!option || !*option) option = getenv(variable);
    return option && *option ? option : NULL;
}

/* Parses the list of device numbers that follows the name of a kind of device: "" (device 0), ":2", ":0,2" or
   "*4" (devices 0 to 3). Returns the number of devices; 0 if the list is invalid. */
static int tt__device_numbers(const char *list, int index[TT__RANKS])
{
    const char *digits = "0123456789";
    char *end = NULL;
    int n = 0;
    if (!*list) return index[n++] = 0, n;
    if (*list == '*') {
        const long many = strspn(list + 1, digits) ? strtol(list + 1, &end, 10) : 0;
        if (many > TT__RANKS || !end || *end) return 0;
        for (; n < many; n++) index[n] = n;
        return n;
    }
    for (; *list == (n ? ',' : ':'); list = end) {
        const bool given = strspn(list + 1, digits) > 0;
        const long number = given ? strtol(list + 1, &end, 10) : (long)TT__DEVICES;
        if (number >= TT__DEVICES || n == TT__RANKS) return 0;
        index[n++] = (int)number;
    }
    return *list ? 0 : n;
}

/* Sets a device group's name to the shortest name of its devices, such as "cuda", "cuda:1", "cuda*4" or
   "cuda:0,2". */
static void tt__device_group_name(tt__device_group *c)
{
    tt__text_buffer text = {c->name, sizeof c->name, 0};
    bool rising = c->local > 1;
    for (int r = 0; r < c->local; r++) rising = rising && c->index[r] - c->moved == r;
    tt__print(&text, "%s", c->kind->name);
    if (rising) tt__print(&text, "*%d", c->local);
    for (int r = 0; r < c->local && !rising && (c->local > 1 || c->index[0] > c->moved); r++)
        tt__print(&text, "%c%d", r ? ',' : ':', c->index[r] - c->moved);
    if (c->ranks > c->local) tt__print(&text, " in %d processes", c->ranks / c->local);
}

/* Returns how many processes on this host have a smaller number than this process. */
static int tt__processes_before(const tt__net *n)
{
    int before = 0;
    for (int p = 0; n && p < n->me; p++) before += strcmp(n->host[p], n->host[n->me]) == 0;
    return before;
}

/* Returns the device group in which each process has `local` devices. index: the numbers of this process's
   devices. moved: the number of devices that earlier processes of this host take; index[] already counts from
   there. Makes the group if it does not exist; the devices of a new group are not open. Returns NULL after
   tt__fail. */
static tt__device_group *tt__device_group_of(tt_context *ctx, const tt__device_kind *kind, const int *index,
                             int local, int moved)
{
    const size_t bytes = sizeof *index * (size_t)local;
    const int processes = ctx->net ? ctx->net->processes : 1;
    for (tt__device_group *c = ctx->device_groups; c; c = c->next)
        if (c->kind == kind && c->local == local && c->moved == moved && memcmp(c->index, index, bytes) == 0)
            return c;
    if (processes * local > TT__RANKS) {
        tt__fail(ctx, TT_ERR_ARGUMENT, "%d processes of %d ranks each are more than the %d ranks that are "
                 "possible: start fewer processes", processes, local, (int)TT__RANKS);
        return NULL;
    }
    tt__device_group *c = (tt__device_group *)tt__calloc(ctx, sizeof *c);
    if (!c) return NULL;
    c->ctx = ctx;
    c->kind = kind;
    c->ranks = processes * local;
    c->local = local;
    c->first = ctx->net ? ctx->net->me * local : 0;
    c->moved = moved;
    for (int r = 0; r < c->ranks; r++) c->index[r] = index[r % local];
    tt__device_group_name(c);
    c->next = ctx->device_groups;
    return ctx->device_groups = c;
}

/* Returns the device group of the devices that a name denotes: "cuda" and "cuda:0" are the first device of
   the kind, "cuda*2" and "cuda:0,1" the first two. Without a name, uses TINYTRAIN_DEVICE or "cpu". Returns
   NULL after tt__fail if the name is invalid. */
static tt__device_group *tt__find_devices(tt_context *ctx, const char *name)
{
    char known[128];
    int index[TT__RANKS];
    tt__text_buffer text = {known, sizeof known, 0};
    name = tt__option(name, "TINYTRAIN_DEVICE");
    if (!name) name = "cpu";
    for (int k = 0; k < TT__KINDS; k++) {
        const tt__device_kind *kind = &tt__device_kinds[k];
        const size_t length = strlen(kind->name);
        tt__print(&text, "%s%s", k ? " or " : "", kind->name);
        if (strncmp(name, kind->name, length) != 0 || (name[length] && !strchr(":*", name[length]))) continue;
        const int ranks = tt__device_numbers(name + length, index);
        if (!ranks)
            tt__fail(ctx, TT_ERR_ARGUMENT, "{device '%s'}: expected nothing after '%s', or ':' and numbers "
                     "from 0 to %d separated by commas, or '*' and a number of at most %d", name, kind->name,
                     TT__DEVICES - 1, TT__RANKS);
        else if (kind->host && name[length] == ':' && (ranks > 1 || index[0]))
            tt__fail(ctx, TT_ERR_ARGUMENT, "{device '%s'} does not exist: the CPU is one device, %s; %s*2 "
                     "is two ranks that share its threads", name, kind->name, kind->name);
        else {
            const bool in_turn = !kind->host && name[length] != ':'; /* no device numbers given: each process
                                                                        of a host takes the next devices */
            const int moved = in_turn ? ranks * tt__processes_before(ctx->net) : 0;
            for (int r = 0; r < ranks; r++) index[r] += moved;
            return tt__device_group_of(ctx, kind, index, ranks, moved);
        }
        return NULL;
    }
    tt__fail(ctx, TT_ERR_UNSUPPORTED, "{device '%s'} is unknown: use %s", name, known);
    return NULL;
}

tt_status tt_device_text(tt_context *ctx, const char *name, char *to, size_t capacity)
{
    tt__device_group *c = tt__find_devices(ctx, name);
    if (capacity) *to = 0;
    if (!c) return ctx->status;
    if (!c->kind->backend)
        return tt__fail(ctx, TT_ERR_UNSUPPORTED, "this build has no code for {device '%s'}: define "
                        "TINYTRAIN_CUDA and link tinytrain_cuda.cu, as `make cuda` does", c->kind->name);
    if (capacity) c->kind->backend->describe(ctx, c->index[0], to, capacity);
    return tt__device_group_open(ctx, c);
}

int tt_process(const tt_context *ctx) { return ctx->net ? ctx->net->me : 0; }
int tt_processes(const tt_context *ctx) { return ctx->net ? ctx->net->processes : 1; }
