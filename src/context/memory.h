#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/record.h"
#include "../plan/place.h"
#include "../ops/cpu_launch.h"
#include "../ops/collectives/cpu_shared.h"
#include "../ranks/threads.h"
#include "../ranks/processes.h"

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

/* -------------------------------------------------------------------------------------------- collectives
   Members of a process follow one another, and are equally many in each. `grain` of them, a power of two, are
   a whole part of the tree of sums, a node: their sum is one of the numbers that messages carry. Where the
   members of a process are a power of two, they are one node, and no byte is sent that need not be. */

/* Collectives of one op that a rank runs together, and the ranks that take part. */
typedef struct tt__collective {
    tt__crew *crew;
    tt__launch *l;          /* n of them */
    int n;
    tt__members all, near;  /* members; those of this process, or the two of a pair */
    int rank, me, low;      /* this rank, and which member it is; the first member of this process */
    int processes, own;     /* that have members; which of these this one is */
    int grain, nodes;       /* nodes of a process */
    int leader, tag;        /* the rank that sends and receives for this process, and with what */
    bool apart;             /* kernels of some of `near` cannot load from the memory of others */
    bool direct;            /* messages begin and end where ranks have the data, not in the host's memory */
} tt__collective;

static bool tt__is_collective(const tt__instr *i) { return tt__rules_of(i)->phases != 0; }

/* Is a collective between two of its members? */
static bool tt__is_pair(const tt__instr *i)
{
    return i->move.from != i->move.to && i->move.over != TT__OVER_TIED;
}

/* Can a member not load from another's memory? */
static bool tt__is_apart(const tt__crew *c, tt__members m)
{
    for (int a = 0; a < m.count; a++)
        for (int b = 0; b < m.count; b++)
            if (c->apart[m.first + a * m.stride][m.first + b * m.stride]) return true;
    return false;
}

static tt__collective tt__collective_of(tt__crew *crew, int rank, tt__members all, int me, tt__over over)
{
    static const int tags[] = {0, 0, 1, 0, 2, 3}; /* by tt__over */
    tt__collective c;
    int local = 0;
    memset(&c, 0, sizeof c);
    for (int k = 0; k < all.count; k++) local += tt__is_local(crew, all.first + k * all.stride);
    c.crew = crew;
    c.rank = rank;
    c.me = me;
    c.low = me / local * local;
    c.processes = all.count / local;
    c.own = me / local;
    c.leader = all.first + c.low * all.stride;
    c.all = c.near = all;
    c.near.first = c.leader;
    c.near.count = local;
    c.grain = local & -local;
    c.nodes = local / c.grain;
    c.tag = TT__DATA_TAG + tags[over] * (int)TT__RANKS + all.first;
    c.apart = tt__is_apart(crew, c.near);
    c.direct = crew->kind->host || (crew->ctx->net && crew->ctx->net->cuda_aware && !c.apart);
    return c;
}

/* Waits until all that the members have begun before on a stream is done, as far as that of this rank's
   device goes. */
static tt_status tt__sync(tt__crew *c, int rank, tt__members members, int stream)
{
    const tt__backend *b = c->kind->backend;
    tt__device *d = c->device[rank];
    tt_status status = TT_OK;
    if (c->kind->host) return tt__meet(c->world, rank, members) ? TT_OK : TT_ERR_DEVICE;
    status = tt__device_status(c->ctx, c, rank, b->mark(d, stream, &c->event[rank]));
    if (status != TT_OK) return status;
    if (!tt__meet(c->world, rank, members)) return TT_ERR_DEVICE;
    for (int k = 0; k < members.count && status == TT_OK; k++) {
        const int other = members.first + k * members.stride;
        if (other != rank) status = b->after(d, stream, c->event[other]);
    }
    if (status != TT_OK) return tt__device_status(c->ctx, c, rank, status);
    return tt__meet(c->world, rank, members) ? TT_OK : TT_ERR_DEVICE; /* events may be marked again */
}

static tt_status tt__meet_near(const tt__collective *c)
{
    return tt__sync(c->crew, c->rank, c->near, c->l->instr->stream);
}

/* Waits until a stream of the rank's device has done all that it was given: messages, and updates in the
   host's memory, are of what it left. */
static tt_status tt__await_stream(tt__crew *c, int rank, int stream)
{
    const tt__backend *b = c->kind->backend;
    if (c->kind->host) return TT_OK;
    tt_status status = b->mark(c->device[rank], stream, &c->event[rank]);
    if (status == TT_OK) status = b->after(c->device[rank], TT__HOST_STREAM, c->event[rank]);
    return tt__device_status(c->ctx, c, rank, status);
}

/* Runs a phase of n collectives on a rank. */
static tt_status tt__launch_phase(const tt__collective *c, tt__launch *l, int n)
{
    tt_status status = c->crew->kind->backend->launch(l, n);
    status = tt__device_status(c->crew->ctx, c->crew, c->rank, status);
    return status == TT_OK ? tt__meet_near(c) : status;
}

/* The same of one, where some members cannot load from others' memory: piece by piece of what goes through
   the host's. */
static tt_status tt__launch_staged(const tt__collective *c, tt__launch *l)
{
    tt__crew *crew = c->crew;
    void *staged[TT__RANKS];
    bool more = true;
    tt_status status = TT_OK;
    for (int k = 0; k < l->members; k++) {
        const int other = c->all.first + k * c->all.stride;
        staged[k] = other == c->rank || crew->apart[c->rank][other] ? crew->stage[other] : NULL;
    }
    l->staged = staged;
    l->most = (int64_t)(TT__STAGE / (size_t)l->members / tt_dtype_bytes(l->in[0].dtype)) & ~(int64_t)15;
    for (l->from = 0; more && status == TT_OK; l->from += l->most) {
        status = tt__device_status(crew->ctx, crew, c->rank, crew->kind->backend->stage(l, &more));
        if (status == TT_OK) status = tt__meet_near(c);
        if (status == TT_OK) status = tt__launch_phase(c, l, 1);
    }
    l->staged = NULL;
    return status;
}

/* ---- messages */

/* What goes from one rank to another one has a tag of its own. */
static int tt__pair_tag(int from, int to) { return TT__DATA_TAG + (4 + from) * (int)TT__RANKS + to; }

/* Messages of an instruction on their way. */
typedef struct tt__mail {
    const tt__crew *crew;
    const tt_tape *tape;
    const tt__instr *i;
    int tag, count;
    tt__request *r;         /* of each message */
} tt__mail;

static tt__mail tt__mail_of(const tt__collective *c, tt__request *r)
{
    const tt__mail m = {c->crew, c->l->tape, c->l->instr, c->tag, 0, r};
    return m;
}

/* "reduce 'd(w)'" */
static void tt__net_where(const tt__mail *m, char to[128])
{
    const tt__value *x = &m->tape->values[m->i->in[0] ? m->i->in[0] : m->i->out[0]];
    snprintf(to, 128, "%s '%.96s'", tt__instr_name(m->i), x->name);
}

/* Fails because messages of a collective have not come, or others have failed. */
static tt_status tt__net_late(const tt__mail *m, int late, const char *why)
{
    char where[128];
    tt__net *net = m->crew->ctx->net;
    const bool own = late < 0 && !why && !tt__net_has_failed(net); /* a rank of this process */
    if (own) return TT_ERR_DEVICE;
    tt__net_where(m, where);
    return tt__net_waited(net, where, late, why);
}

/* Waits for all messages, of which there are no more then. */
static tt_status tt__net_all_there(tt__mail *m)
{
    tt__net *net = m->crew->ctx->net;
    tt__world *w = m->crew->world;
    const tt__request *r = m->r;
    const char *why;
    char at[128];
    int late;
    const int n = m->count;
    m->count = 0;
    if (!n) return TT_OK;
    __atomic_add_fetch(&w->outside, 1, __ATOMIC_SEQ_CST);
    const bool come = tt__net_wait(net, &w->failed, m->r, n, &late, &why);
    __atomic_sub_fetch(&w->outside, 1, __ATOMIC_SEQ_CST);
    tt__net_where(m, at);
    pthread_mutex_lock(&net->mutex);
    for (int k = 0; k < n; k++) if (r[k].comes && r[k].done) memcpy(net->heard[r[k].process], at, sizeof at);
    pthread_mutex_unlock(&net->mutex);
    return come ? TT_OK : tt__net_late(m, late, why);
}

/* Waits for the first n; the others are still on their way then. */
static tt_status tt__net_first_there(tt__mail *m, int n)
{
    tt__mail first = *m;
    first.count = n;
    tt_status status = tt__net_all_there(&first);
    m->count -= n;
    memmove(m->r, m->r + n, (size_t)m->count * sizeof *m->r);
    return status;
}

/* Sends or receives in messages of `most` bytes, each a request. */
static tt_status tt__net_post(tt__mail *m, int process, void *data, size_t bytes, size_t most, bool comes)
{
    tt__net *n = m->crew->ctx->net;
    const char *why = NULL;
    pthread_mutex_lock(&n->mutex);
    for (size_t at = 0, some; at < bytes && !why; at += some) {
        tt__request *r = &m->r[m->count++];
        some = bytes - at < most ? bytes - at : most;
        why = comes ? n->wire->receive(n, process, m->tag, (char *)data + at, some, r)
                    : n->wire->send(n, process, m->tag, (char *)data + at, some, r);
        r->comes = comes;
        if (!comes) n->sent += (double)some;
    }
    pthread_mutex_unlock(&n->mutex);
    return why ? tt__net_late(m, -1, why) : TT_OK;
}

/* In short messages; see TT__NET_REQUESTS. */
static tt_status tt__net_send(tt__mail *m, int process, void *data, size_t bytes)
{
    return tt__net_post(m, process, data, bytes, TT__NET_MESSAGE, false);
}

static tt_status tt__net_receive(tt__mail *m, int process, void *data, size_t bytes)
{
    return tt__net_post(m, process, data, bytes, TT__NET_MESSAGE, true);
}

/* Counts bytes that a process must send at least. */
static void tt__net_must_send(tt__net *n, double bytes)
{
    pthread_mutex_lock(&n->mutex);
    n->least += bytes;
    pthread_mutex_unlock(&n->mutex);
}

/* ---- collectives of several processes */

/* The process that is number k of those with members. */
static int tt__net_process(const tt__collective *c, int k)
{
    return tt__process_of(c->crew, c->all.first + k * c->near.count * c->all.stride);
}

/* How many members of such a process have something to reduce, and how many nodes these are. */
static int tt__net_present(const tt__collective *c, int k, int present)
{
    return (int)tt__max(0, tt__min(c->near.count, present - k * c->near.count));
}

static int tt__net_nodes(const tt__collective *c, int k, int present)
{
    return (tt__net_present(c, k, present) + c->grain - 1) / c->grain;
}

/* Elements [from, from + most) of each member's piece, in collective k of those that run together. */
typedef struct tt__net_job { int k; int64_t from, most; } tt__net_job;
enum { TT__NET_JOBS = 128 };

/* What a member's piece is a piece of: of what is summed, or gathered. */
static const tt__mat *tt__net_whole(const tt__launch *l)
{
    return l->phase == TT__REDUCE_PHASE ? &l->in[0] : &l->out[0];
}

static bool tt__net_is(const tt__launch *l, int flag) { return (tt__rules_of(l->instr)->phases & flag) != 0; }

/* The elements of a member that a job is about, from *first on. */
static int64_t tt__net_piece(const tt__launch *l, const tt__net_job *job, int member, int64_t *first)
{
    const bool to_first = tt__net_is(l, TT__OF_FIRST); /* which has no unit */
    int64_t n = member ? 0 : tt__elements(&l->in[0]);
    *first = 0;
    if (!to_first) n = tt__piece_of(l, tt__net_whole(l), l->instr->move.root, member, first);
    *first += job->from;
    return tt__max(0, tt__min(job->most, n - job->from));
}

static int64_t tt__net_longest(const tt__launch *l)
{
    const tt__net_job all = {0, 0, INT64_MAX};
    int64_t longest = 0, first;
    for (int k = 0; k < l->members; k++) longest = tt__max(longest, tt__net_piece(l, &all, k, &first));
    return longest;
}

static size_t tt__net_size(const tt__launch *l, int64_t n)
{
    return tt__align_up((size_t)n * tt_dtype_bytes(l->in[0].dtype));
}

/* Runs another op in place of a collective, on its stream. */
static tt_status tt__net_launch(const tt__crew *c, int rank, tt__launch *l, int op)
{
    tt__instr other = *l->instr;
    other.op = op;
    l->instr = &other;
    return tt__device_status(c->ctx, c, rank, c->kind->backend->launch(l, 1));
}

/* Sums n elements of some leaves to y, or adds the sum to it. Kernels of devices load from the host's memory
   of all ranks, and write to it. */
static tt_status tt__net_sum(const tt__collective *c, const tt__launch *l, const tt__mat *leaves, int count,
                             char *y, int64_t n, bool add)
{
    const tt__mat to = {y, l->in[0].dtype, 1, n, n};
    tt__launch s = *l;
    s.in[0] = s.out[0] = to;
    s.peer_in = leaves;
    s.members = s.present = count;
    s.me = 0;
    s.add[0] = add;
    return tt__net_launch(c->crew, c->rank, &s, TT__OP_SUM_SLOTS);
}

/* Copies between memories of a rank's device and the host, on the stream of a collective. */
static tt_status tt__net_copy(const tt__crew *c, int rank, const tt__launch *l, void *to, const void *from,
                              int64_t bytes)
{
    const tt__mat x = {(void *)(uintptr_t)from, TT_U8, 1, bytes, bytes}, y = {to, TT_U8, 1, bytes, bytes};
    tt__launch s = *l;
    s.in[0] = x;
    s.out[0] = y;
    return bytes && to != from ? tt__net_launch(c, rank, &s, TT__OP_COPY) : TT_OK;
}

/* The bytes that a process must send at least in a phase of a collective. */
static double tt__net_least(const tt__collective *c, const tt__launch *l)
{
    const tt__mat *x = tt__net_whole(l);
    const bool of_first = l->instr->move.root || tt__net_is(l, TT__OF_FIRST);
    const bool sends = (l->phase == TT__REDUCE_PHASE) == (c->own > 0);
    const double bytes = (double)tt__elements(x) * (double)tt_dtype_bytes(x->dtype);
    if (!of_first) return bytes * (c->processes - 1) / c->processes;
    return sends ? bytes * (l->phase == TT__REDUCE_PHASE ? 1 : c->processes - 1) : 0;
}

/* What tt__net_reduce, tt__net_gather, tt__net_broadcast and tt__net_pair will send for the process of a rank
   in a phase, and *least. Of one that does not lead the members: 0. */
static double tt__net_sends(const tt__collective *c, double *least)
{
    const tt__net_job all = {0, 0, INT64_MAX};
    const tt__launch *l = c->l;
    const double item = (double)tt_dtype_bytes(l->in[0].data ? l->in[0].dtype : l->out[0].dtype);
    double bytes = 0;
    int64_t first;
    *least = 0;
    if (tt__is_pair(l->instr)) {
        if (l->phase == TT__SPREAD_PHASE && c->me == l->instr->move.from)
            *least = bytes = item * (double)tt__elements(&l->in[0]);
        return bytes;
    }
    if (c->me != c->low) return 0;
    *least = tt__net_least(c, l);
    if (l->phase == TT__SPREAD_PHASE && tt__net_is(l, TT__OF_FIRST))
        return c->own + 1 < c->processes ? item * (double)tt__elements(&l->in[0]) : 0;
    for (int m = 0; m < c->all.count; m++) {
        const int q = m / c->near.count, own = c->low + m % c->near.count;
        if (q == c->own) continue;
        if (l->phase == TT__SPREAD_PHASE) bytes += item * (double)tt__net_piece(l, &all, own, &first);
        else
            bytes += (double)tt__net_nodes(c, c->own, l->present) *
                     (double)tt__net_size(l, tt__net_piece(l, &all, m, &first));
    }
    return bytes;
}

/* How many batches are on their way at a time: fewer of more bytes where each is for many processes. */
static int tt__net_flights(const tt__collective *c)
{
    return c->processes > TT__NET_FLIGHTS ? TT__NET_FLIGHTS / 2 : TT__NET_FLIGHTS;
}

/* The bytes of each in the memory that they are sent from. */
static size_t tt__net_part(const tt__collective *c)
{
    return TT__STAGE / (size_t)tt__net_flights(c) & ~(size_t)(TT__ALIGN - 1);
}

/* As many jobs as there is room for, from elements `from` of collective *k on, where the next begin. */
static int tt__net_jobs(const tt__collective *c, int *k, int64_t *from, tt__net_job *job)
{
    const size_t parts = (size_t)c->all.count * (size_t)c->nodes;
    size_t room = tt__net_part(c) / parts & ~(size_t)(TT__ALIGN - 1); /* of each */
    int count = 0;
    while (*k < c->n && count < TT__NET_JOBS && room) {
        const tt__launch *l = &c->l[*k];
        const int64_t item = (int64_t)tt_dtype_bytes(l->in[0].dtype), left = tt__net_longest(l) - *from;
        const tt__net_job next = {*k, *from, tt__min(left, (int64_t)room / item)};
        if (left > 0) job[count++] = next;
        if (left > 0) room -= tt__net_size(l, next.most);
        *from += next.most;
        if (next.most == left || left <= 0) {
            *from = 0;
            ++*k;
        }
    }
    return count;
}

/* A batch of messages on its way, for some jobs: what each process sends each other begins at `to`, in what
   is sent, and what comes from it at `from`. In both, jobs follow one another, of each the pieces, of each
   the nodes. */
typedef struct tt__net_batch {
    tt__net_job job[TT__NET_JOBS];
    int jobs;
    size_t begin; /* of both, in the memory for what is sent, and in that for what comes */
    size_t to[TT__RANKS + 1], from[TT__RANKS + 1];
    tt__request r[TT__NET_REQUESTS(2 * TT__STAGE / TT__NET_FLIGHTS)];
    tt__mail mail;
} tt__net_batch;

static void tt__net_place(const tt__collective *c, tt__net_batch *b)
{
    int64_t first;
    b->to[0] = b->from[0] = 0;
    for (int q = 0; q < c->processes; q++) {
        size_t to = 0, from = 0;
        for (int j = 0; j < b->jobs; j++) {
            const tt__launch *x = &c->l[b->job[j].k];
            for (int k = 0; k < c->near.count; k++) {
                const int64_t there = tt__net_piece(x, &b->job[j], q * c->near.count + k, &first);
                const int64_t here = tt__net_piece(x, &b->job[j], c->low + k, &first);
                to += (size_t)tt__net_nodes(c, c->own, x->present) * tt__net_size(x, there);
                from += (size_t)tt__net_nodes(c, q, x->present) * tt__net_size(x, here);
            }
        }
        b->to[q + 1] = b->to[q] + to;
        b->from[q + 1] = b->from[q] + (q == c->own ? 0 : from); /* its own stay in what is sent */
    }
}

/* Where kernels of a process cannot load from each other's memory: copies what a rank has of all pieces, one
   behind the other, to the second half of its memory of the host. */
static tt_status tt__net_lay_out(const tt__collective *c, const tt__net_batch *b)
{
    char *to = (char *)c->crew->stage[c->rank] + TT__STAGE + b->begin;
    tt_status status = TT_OK;
    for (int at = 0; at < c->processes * b->jobs; at++) {
        const int q = at / b->jobs, j = at % b->jobs;
        const tt__launch *x = &c->l[b->job[j].k];
        for (int k = q * c->near.count; k < (q + 1) * c->near.count && status == TT_OK; k++) {
            int64_t first, n = tt__net_piece(x, &b->job[j], k, &first);
            const int64_t bytes = c->me < x->present ? n * (int64_t)tt_dtype_bytes(x->in[0].dtype) : 0;
            status = tt__net_copy(c->crew, c->rank, x, to, tt__element(&x->in[0], first), bytes);
            to += tt__net_size(x, n);
        }
    }
    return status;
}

/* Sums the nodes of this process, for all members' pieces, into what is sent. Its ranks take turns. `apart`:
   they have laid out their operands. */
static tt_status tt__net_pack(const tt__collective *c, const tt__net_batch *b, char *to)
{
    tt__mat leaf[TT__RANKS];
    tt_status status = TT_OK;
    size_t laid = TT__STAGE + b->begin;
    int turn = 0;
    for (int j, at = 0; at < c->processes * b->jobs; at++) {
        const int q = at / b->jobs;
        j = at % b->jobs;
        const tt__launch *x = &c->l[b->job[j].k];
        const int present = tt__net_present(c, c->own, x->present);
        for (int k = q * c->near.count; k < (q + 1) * c->near.count; k++) {
            int64_t first, n = tt__net_piece(x, &b->job[j], k, &first);
            for (int node = 0; node * c->grain < present && status == TT_OK; node++) {
                const int begin = node * c->grain, end = (int)tt__min(present, begin + c->grain);
                for (int m = begin; m < end; m++) {
                    const int other = c->near.first + m * c->near.stride;
                    leaf[m - begin] = x->peer_in[c->low + m];
                    leaf[m - begin].data = tt__element(&leaf[m - begin], first);
                    if (c->apart) leaf[m - begin].data = (char *)c->crew->stage[other] + laid;
                }
                const bool mine = turn++ % c->near.count == c->me - c->low;
                if (mine && n) status = tt__net_sum(c, x, leaf, end - begin, to, n, false);
                to += tt__net_size(x, n);
            }
            laid += tt__net_size(x, n);
        }
    }
    return status;
}

/* Sums the nodes of all processes to this rank's piece. */
static tt_status tt__net_unpack(const tt__collective *c, const tt__net_batch *b, const char *sent,
                                const char *received)
{
    const char *at[TT__RANKS]; /* the next node of each process */
    tt__mat leaf[TT__RANKS];
    tt_status status = TT_OK;
    for (int q = 0; q < c->processes; q++) at[q] = q == c->own ? sent + b->to[q] : received + b->from[q];
    for (int j = 0; j < b->jobs; j++) {
        const tt__launch *x = &c->l[b->job[j].k];
        for (int k = 0; k < c->near.count && status == TT_OK; k++) {
            int64_t first, n = tt__net_piece(x, &b->job[j], c->low + k, &first);
            int leaves = 0;
            for (int q = 0; q < c->processes; q++)
                for (int node = 0; node < tt__net_nodes(c, q, x->present); node++) {
                    leaf[leaves].dtype = x->in[0].dtype;
                    leaf[leaves++].data = (void *)(uintptr_t)at[q];
                    at[q] += tt__net_size(x, n);
                }
            if (tt__net_is(x, TT__PIECES_OUT)) first = b->job[j].from;
            if (c->low + k == c->me && n)
                status = tt__net_sum(c, x, leaf, leaves, tt__element(&x->out[0], first), n, x->add[0]);
        }
    }
    return status;
}

/* Waits for a batch, and sums it. */
static tt_status tt__net_land(const tt__collective *c, tt__net_batch *b)
{
    const char *stage = (const char *)c->crew->stage[c->leader] + b->begin;
    if (!b->jobs) return TT_OK;
    tt_status status = tt__net_all_there(&b->mail);
    if (status == TT_OK) status = tt__meet_near(c);
    if (status == TT_OK) status = tt__net_unpack(c, b, stage, stage + TT__STAGE);
    if (status == TT_OK) status = tt__meet_near(c);
    b->jobs = 0;
    return status;
}

/* Each member's piece of n sums. While a batch is summed, and where one direction of a link is ahead of the
   other, other batches are on their way. */
static tt_status tt__net_reduce(const tt__collective *c)
{
    const tt__instr *i = c->l->instr;
    char *stage = (char *)c->crew->stage[c->leader];
    const int flights = tt__net_flights(c);
    tt__net_batch flight[TT__NET_FLIGHTS];
    tt_status status = TT_OK;
    int64_t from = 0;
    int turn = 0;
    for (int k = 0; k < flights; k++) flight[k].jobs = 0;
    for (int k = 0; k < c->n && status == TT_OK; turn++) {
        tt__net_batch *b = &flight[turn % flights];
        b->jobs = tt__net_jobs(c, &k, &from, b->job);
        b->begin = (size_t)(turn % flights) * tt__net_part(c);
        b->mail = tt__mail_of(c, b->r);
        if (!b->jobs && k < c->n)
            return tt__fail(c->crew->ctx, TT_ERR_INTERNAL, "%s: no room for messages", tt__instr_name(i));
        tt__net_place(c, b);
        if (c->apart) status = tt__net_lay_out(c, b);
        if (c->apart && status == TT_OK) status = tt__meet_near(c);
        if (status == TT_OK) status = tt__net_pack(c, b, stage + b->begin);
        if (status == TT_OK) status = tt__meet_near(c);
        if (status == TT_OK && c->rank == c->leader) status = tt__await_stream(c->crew, c->rank, i->stream);
        for (int q = 0; q < c->processes && status == TT_OK && c->rank == c->leader; q++) {
            const int process = tt__net_process(c, q);
            if (q == c->own) continue;
            status = tt__net_receive(&b->mail, process, stage + TT__STAGE + b->begin + b->from[q],
                                     b->from[q + 1] - b->from[q]);
            if (status == TT_OK)
                status = tt__net_send(&b->mail, process, stage + b->begin + b->to[q],
                                      b->to[q + 1] - b->to[q]);
        }
        if (status == TT_OK) status = tt__net_land(c, &flight[(turn + 1) % flights]);
    }
    for (int k = 0; k < flights && status == TT_OK; k++)
        status = tt__net_land(c, &flight[(turn + k) % flights]);
    return status;
}

/* Where the bytes of member m's piece begin that a job is about: in the host's memory of the leader, of which
   each piece has `room`, or where ranks have them: the pieces of other processes in the leader's result. */
static char *tt__net_begin(const tt__collective *c, const tt__net_job *job, int m, size_t room)
{
    const tt__launch *l = &c->l[job->k];
    const bool gathers = tt__net_is(l, TT__PIECES_IN);
    int64_t first;
    if (!c->direct) return (char *)c->crew->stage[c->leader] + (size_t)m * room;
    tt__net_piece(l, job, m, &first);
    if (m / c->near.count != c->own) return (char *)tt__element(&l->out[0], first);
    return (char *)tt__element(gathers ? &l->peer_in[m] : &l->peer_out[m], gathers ? job->from : first);
}

/* Copies this rank's piece, or (come) all pieces that it does not have, to or from the host's memory, and
   waits for the other ranks, which do so too. */
static tt_status tt__net_stage(const tt__collective *c, const tt__net_job *job, size_t room, bool come)
{
    const tt__launch *l = &c->l[job->k];
    const bool gathers = tt__net_is(l, TT__PIECES_IN);
    const tt__mat *x = gathers && !come ? &l->in[0] : &l->out[0];
    tt_status status = TT_OK;
    for (int m = come ? 0 : c->me; m < (come ? c->all.count : c->me + 1) && status == TT_OK; m++) {
        int64_t first, bytes = (int64_t)tt_dtype_bytes(l->out[0].dtype) * tt__net_piece(l, job, m, &first);
        char *staged = tt__net_begin(c, job, m, room);
        char *own = (char *)tt__element(x, gathers && !come ? job->from : first);
        if (come && m == c->me && !gathers) continue;
        status = tt__net_copy(c->crew, c->rank, l, come ? own : staged, come ? staged : own, bytes);
    }
    return status == TT_OK ? tt__meet_near(c) : status;
}

/* Exchanges pieces with other processes, between the leaders, in messages of a bounded number at a time. */
static tt_status tt__net_gather(const tt__collective *c)
{
    enum { REQUESTS = 4 * TT__RANKS };
    const size_t room = 2 * TT__STAGE / (size_t)c->all.count & ~(size_t)(TT__ALIGN - 1); /* of each piece */
    const size_t most = c->direct ? TT__NET_MESSAGE : room;
    const bool leads = c->rank == c->leader, waits = leads && !c->direct;
    tt__request r[REQUESTS + TT__NET_REQUESTS(2 * TT__STAGE)];
    tt__mail mail = tt__mail_of(c, r);
    const int stream = c->l->instr->stream;
    tt_status status = leads && c->direct ? tt__await_stream(c->crew, c->rank, stream) : TT_OK;
    for (int k = 0; k < c->n; k++) {
        const tt__launch *l = &c->l[k];
        const int64_t item = (int64_t)tt_dtype_bytes(l->out[0].dtype), longest = tt__net_longest(l);
        tt__net_job job = {k, 0, (int64_t)most / item};
        for (; job.from < longest && status == TT_OK; job.from += job.most) {
            if (!c->direct) status = tt__net_stage(c, &job, room, false);
            if (waits && status == TT_OK) status = tt__await_stream(c->crew, c->rank, stream);
            for (int m = 0; m < c->all.count && status == TT_OK && leads; m++) {
                const int own = c->low + m % c->near.count, process = tt__net_process(c, m / c->near.count);
                int64_t first, come = item * tt__net_piece(l, &job, m, &first);
                const int64_t go = item * tt__net_piece(l, &job, own, &first);
                if (m / c->near.count == c->own) continue;
                status = tt__net_receive(&mail, process, tt__net_begin(c, &job, m, room), (size_t)come);
                if (status == TT_OK)
                    status = tt__net_send(&mail, process, tt__net_begin(c, &job, own, room), (size_t)go);
            }
            if (status == TT_OK && c->direct && mail.count > REQUESTS - 2 * TT__RANKS)
                status = tt__net_first_there(&mail, mail.count / 2);
            if (status != TT_OK || c->direct) continue;
            status = tt__net_all_there(&mail);
            if (status == TT_OK) status = tt__meet_near(c);
            if (status == TT_OK) status = tt__net_stage(c, &job, room, true);
        }
    }
    return status == TT_OK ? tt__net_all_there(&mail) : status;
}

/* What member 0 has goes from process to process. */
static tt_status tt__net_broadcast(const tt__collective *c)
{
    const bool leads = c->rank == c->leader, waits = leads && !c->direct, last = c->own + 1 == c->processes;
    const size_t most = c->direct ? TT__NET_MESSAGE : TT__STAGE;
    const int stream = c->l->instr->stream;
    tt__request r[2][TT__NET_REQUESTS(TT__STAGE)];
    tt__mail in = tt__mail_of(c, r[0]), out = tt__mail_of(c, r[1]);
    tt_status status = leads && c->direct ? tt__await_stream(c->crew, c->rank, stream) : TT_OK;
    for (int k = 0; k < c->n; k++) {
        const tt__launch *l = &c->l[k];
        const int64_t bytes = tt__elements(&l->in[0]) * (int64_t)tt_dtype_bytes(l->in[0].dtype);
        char *own = (char *)(c->own || c->me ? l->out[0].data : l->in[0].data);
        for (int64_t at = 0, m; at < bytes && status == TT_OK; at += m) {
            m = tt__min(bytes - at, (int64_t)most);
            char *data = c->direct ? own + at : (char *)c->crew->stage[c->leader];
            if (c->me == 0) status = tt__net_copy(c->crew, c->rank, l, data, (char *)l->in[0].data + at, m);
            if (status == TT_OK && waits) status = tt__await_stream(c->crew, c->rank, stream);
            if (status == TT_OK && leads && c->own)
                status = tt__net_receive(&in, tt__net_process(c, c->own - 1), data, (size_t)m);
            if (status == TT_OK) status = tt__net_all_there(&in);
            if (status == TT_OK && leads && !last)
                status = tt__net_send(&out, tt__net_process(c, c->own + 1), data, (size_t)m);
            if (status == TT_OK && (!c->direct || out.count >= TT__RANKS)) status = tt__net_all_there(&out);
            if (c->direct) continue;
            if (status == TT_OK) status = tt__meet_near(c);
            if (status == TT_OK && (c->me || l->out[0].data != l->in[0].data))
                status = tt__net_copy(c->crew, c->rank, l, (char *)l->out[0].data + at, data, m);
            if (status == TT_OK) status = tt__meet_near(c);
        }
    }
    return status == TT_OK ? tt__net_all_there(&out) : status;
}

/* Copies what the leader has got, and what others of this process have, on this rank. */
static tt_status tt__net_spread(const tt__collective *c)
{
    const bool all = tt__net_is(c->l, TT__OF_FIRST);
    for (int k = 0; k < c->n; k++) {
        tt__launch *l = &c->l[k];
        tt__mat *in = (tt__mat *)(uintptr_t)l->peer_in, *out = (tt__mat *)(uintptr_t)l->peer_out; /* own */
        const tt__mat *at = all && !c->own ? &in[c->low] : &out[c->low];
        for (int m = 0; m < c->all.count; m++) {
            int64_t first;
            if (m / c->near.count == c->own && !all) continue;
            tt__piece_of(l, &l->out[0], l->instr->move.root, m, &first);
            if (m != c->low) out[m].data = at->data;
            if (!all) in[m].data = tt__element(at, first);
        }
        if (all) out[c->low].data = at->data;
    }
    return tt__launch_phase(c, c->l, c->n);
}

/* From one member to another one, of another process. */
static tt_status tt__net_pair(const tt__collective *c)
{
    const tt__instr *i = c->l->instr;
    const tt__move *move = &i->move;
    const int from = c->all.first + move->from * c->all.stride, to = c->all.first + move->to * c->all.stride;
    const bool receives = c->me == move->to;
    const bool direct = c->crew->kind->host || c->crew->ctx->net->cuda_aware;
    const size_t most = direct ? TT__NET_MESSAGE : TT__STAGE;
    const int process = tt__process_of(c->crew, receives ? from : to);
    tt__request r[TT__NET_REQUESTS(TT__STAGE)];
    tt__mail mail = tt__mail_of(c, r);
    tt_status status = direct ? tt__await_stream(c->crew, c->rank, i->stream) : TT_OK;
    mail.tag = tt__pair_tag(from, to);
    for (int k = 0; k < c->n; k++) {
        const tt__launch *l = &c->l[k];
        const tt__mat *x = receives ? &l->out[0] : &l->in[0];
        const int64_t bytes = tt__elements(x) * (int64_t)tt_dtype_bytes(x->dtype);
        if (!receives) tt__net_must_send(c->crew->ctx->net, (double)bytes);
        for (int64_t at = 0, m; at < bytes && status == TT_OK; at += m) {
            m = tt__min(bytes - at, (int64_t)most);
            char *own = (char *)x->data + at, *data = direct ? own : (char *)c->crew->stage[c->rank];
            if (!receives) status = tt__net_copy(c->crew, c->rank, l, data, own, m);
            if (status == TT_OK && !direct) status = tt__await_stream(c->crew, c->rank, i->stream);
            if (status == TT_OK)
                status = tt__net_post(&mail, process, data, (size_t)m, TT__NET_MESSAGE, receives);
            if (status == TT_OK && (!direct || mail.count >= TT__RANKS)) status = tt__net_all_there(&mail);
            if (status == TT_OK && receives) status = tt__net_copy(c->crew, c->rank, l, own, data, m);
        }
    }
    return status == TT_OK ? tt__net_all_there(&mail) : status;
}

/* A phase of collectives with members in several processes. */
static tt_status tt__net_phase(const tt__collective *c)
{
    tt_status status = TT_OK;
    for (int k = 0; k < c->n && c->rank == c->leader; k++)
        tt__net_must_send(c->crew->ctx->net, tt__net_least(c, &c->l[k]));
    if (c->l->phase == TT__REDUCE_PHASE) return tt__net_reduce(c);
    status = tt__net_is(c->l, TT__OF_FIRST) ? tt__net_broadcast(c) : tt__net_gather(c);
    if (status == TT_OK && c->direct) status = tt__meet_near(c);
    return status == TT_OK && c->direct ? tt__net_spread(c) : status;
}

/* Runs the collectives: in each phase all members, which wait for each other before and after. met: they have
   waited right before. */
static tt_status tt__run_collective(const tt__collective *c, bool met)
{
    const int phases = tt__rules_of(c->l->instr)->phases;
    const bool net = c->processes > 1, from_first = (phases & TT__OF_FIRST) && (phases & TT__SPREAD_PHASE);
    tt_status status = met ? TT_OK : tt__meet_near(c);
    for (int phase = TT__REDUCE_PHASE; phase <= TT__SPREAD_PHASE && status == TT_OK; phase++) {
        if (!(phases & phase) || (net && from_first && phase == TT__REDUCE_PHASE)) continue;
        for (int k = 0; k < c->n; k++) c->l[k].phase = phase;
        if (net) status = tt__net_phase(c);
        else if (!c->apart) status = tt__launch_phase(c, c->l, c->n);
        for (int k = 0; k < c->n && c->apart && !net && status == TT_OK; k++)
            status = tt__launch_staged(c, &c->l[k]);
    }
    return status;
}

/* ===========================================================================================================
   CONTEXT                                                                                           >>context
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
