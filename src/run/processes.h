#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/record.h"
#include "../ops/linear/rules.h"
#include "../ops/attention/rules.h"
#include "../ops/cpu_launch.h"
#include "../ops/collectives/cpu_shared.h"
#include "../ranks/threads.h"
#include "../ranks/processes.h"
#include "../context/memory.h"
#include "../context/devices.h"
#include "../compile/program.h"
#include "ranks.h"
#include "inputs.h"
#include "collectives.h"

/* ---- collectives of several processes ----

   Members of a process follow one another, and are equally many in each. `grain` of them, a power of two, are
   a whole part of the tree of sums, a node: their sum is one of the numbers that messages carry. Where the
   members of a process are a power of two, they are one node, and no byte is sent that need not be. */
typedef struct tt__net_group {
    tt__members all, near;  /* members; those of this process */
    int me, low;            /* which member this rank is; the first of this process */
    int processes, own;     /* that have members; which of these this one is */
    int grain, nodes;       /* nodes of a process */
    int leader, tag;        /* the rank that sends and receives for this process, and with what */
} tt__net_group;

static tt__net_group tt__net_group_of(const tt_program *p, int rank, const tt__move *move)
{
    static const int tags[] = {0, 0, 1, 0, 2, 3}; /* by tt__over */
    const tt__crew *c = p->settings.crew;
    tt__net_group g;
    int local = 0;
    g.all = tt__members_of(p, rank, move, &g.me);
    for (int k = 0; k < g.all.count; k++) local += tt__is_local(c, g.all.first + k * g.all.stride);
    g.low = g.me / local * local;
    g.processes = g.all.count / local;
    g.own = g.me / local;
    g.leader = g.all.first + g.low * g.all.stride;
    g.near = g.all;
    g.near.first = g.leader;
    g.near.count = local;
    g.grain = local & -local;
    g.nodes = local / g.grain;
    g.tag = TT__DATA_TAG + tags[move->over] * (int)TT__RANKS + g.all.first;
    return g;
}

/* What goes from one rank to another one has a tag of its own. */
static int tt__pair_tag(int from, int to) { return TT__DATA_TAG + (4 + from) * (int)TT__RANKS + to; }

/* The process that is number k of those of a group. */
static int tt__net_process(const tt_program *p, const tt__net_group *g, int k)
{
    return tt__process_of(p->settings.crew, g->all.first + k * g->near.count * g->all.stride);
}

/* How many members of such a process have something to reduce, and how many nodes these are. */
static int tt__net_present(const tt__net_group *g, int k, int present)
{
    return (int)tt__max(0, tt__min(g->near.count, present - k * g->near.count));
}

static int tt__net_nodes(const tt__net_group *g, int k, int present)
{
    return (tt__net_present(g, k, present) + g->grain - 1) / g->grain;
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
static tt_status tt__net_launch(tt_program *p, int rank, tt__launch *l, int op)
{
    tt__instr other = *l->instr;
    other.op = op;
    l->instr = &other;
    return tt__device_status(p->ctx, p->settings.crew, rank, p->settings.kind->backend->launch(l, 1));
}

/* Sums n elements of some leaves to y, or adds the sum to it. Kernels of devices load from the host's memory
   of all ranks, and write to it. */
static tt_status tt__net_sum(tt_program *p, int rank, const tt__launch *l, const tt__mat *leaves, int count,
                             char *y, int64_t n, bool add)
{
    const tt__mat to = {y, l->in[0].dtype, 1, n, n};
    tt__launch s = *l;
    s.in[0] = s.out[0] = to;
    s.peer_in = leaves;
    s.members = s.present = count;
    s.me = 0;
    s.add[0] = add;
    return tt__net_launch(p, rank, &s, TT__OP_SUM_SLOTS);
}

/* Copies between memories of a device and the host, on the stream of a collective. */
static tt_status tt__net_copy(tt_program *p, int rank, const tt__launch *l, void *to, const void *from,
                              int64_t bytes)
{
    const tt__mat x = {(void *)(uintptr_t)from, TT_U8, 1, bytes, bytes}, y = {to, TT_U8, 1, bytes, bytes};
    tt__launch s = *l;
    s.in[0] = x;
    s.out[0] = y;
    return bytes && to != from ? tt__net_launch(p, rank, &s, TT__OP_COPY) : TT_OK;
}

/* Waits until a stream of the rank's device has done all that it was given: messages, and updates in the
   host's memory, are of what it left. */
static tt_status tt__await_stream(tt_program *p, int rank, int stream)
{
    const tt__crew *c = p->settings.crew;
    void **event = &p->rank[rank].event;
    if (c->kind->host) return TT_OK;
    tt_status status = c->kind->backend->mark(c->device[rank], stream, event);
    if (status == TT_OK) status = c->kind->backend->after(c->device[rank], TT__HOST_STREAM, *event);
    return tt__device_status(p->ctx, c, rank, status);
}

/* "reduce 'd(w)'" */
static void tt__net_where(const tt_program *p, const tt__instr *i, char to[128])
{
    const tt__value *x = &p->built.t->values[i->in[0] ? i->in[0] : i->out[0]];
    snprintf(to, 128, "%s '%.96s'", tt__instr_name(i), x->name);
}

/* Fails because messages of a collective have not come, or others have failed. */
static tt_status tt__net_late(tt_program *p, const tt__instr *i, int late, const char *why)
{
    char where[128];
    const bool own = late < 0 && !why && !tt__net_has_failed(p->ctx->net); /* a rank of this process */
    if (own) return TT_ERR_DEVICE;
    tt__net_where(p, i, where);
    return tt__net_waited(p->ctx->net, where, late, why);
}

/* Waits for all of these, of which there are no more then. */
static tt_status tt__net_all_there(tt_program *p, const tt__instr *i, tt__request *r, int *count)
{
    tt__net *net = p->ctx->net;
    tt__world *w = p->settings.crew->world;
    const char *why;
    char at[128];
    int late;
    const int n = *count;
    *count = 0;
    if (!n) return TT_OK;
    __atomic_add_fetch(&w->outside, 1, __ATOMIC_SEQ_CST);
    const bool come = tt__net_wait(net, &w->failed, r, n, &late, &why);
    __atomic_sub_fetch(&w->outside, 1, __ATOMIC_SEQ_CST);
    tt__net_where(p, i, at);
    pthread_mutex_lock(&net->mutex);
    for (int k = 0; k < n; k++) if (r[k].comes && r[k].done) memcpy(net->heard[r[k].process], at, sizeof at);
    pthread_mutex_unlock(&net->mutex);
    return come ? TT_OK : tt__net_late(p, i, late, why);
}

/* The same of the first n; the others are still on their way then. */
static tt_status tt__net_first_there(tt_program *p, const tt__instr *i, tt__request *r, int *count, int n)
{
    const int others = *count - n;
    tt_status status = tt__net_all_there(p, i, r, &n);
    memmove(r, r + *count - others, (size_t)others * sizeof *r);
    *count = others;
    return status;
}

/* Sends or receives in messages of `most` bytes, each a request. */
static tt_status tt__net_post(tt_program *p, const tt__instr *i, int process, int tag, char *data,
                              size_t bytes, size_t most, bool comes, tt__request *r, int *count)
{
    tt__net *n = p->ctx->net;
    const char *why = NULL;
    pthread_mutex_lock(&n->mutex);
    for (size_t at = 0, some; at < bytes && !why; at += some) {
        some = bytes - at < most ? bytes - at : most;
        why = comes ? n->wire->receive(n, process, tag, data + at, some, &r[*count])
                    : n->wire->send(n, process, tag, data + at, some, &r[*count]);
        r[(*count)++].comes = comes;
        if (!comes) n->sent += (double)some;
    }
    pthread_mutex_unlock(&n->mutex);
    return why ? tt__net_late(p, i, -1, why) : TT_OK;
}

/* In short messages; see TT__NET_REQUESTS. */
static tt_status tt__net_send(tt_program *p, const tt__instr *i, int process, int tag, const void *data,
                              size_t bytes, tt__request *r, int *count)
{
    char *from = (char *)(uintptr_t)data;
    return tt__net_post(p, i, process, tag, from, bytes, TT__NET_MESSAGE, false, r, count);
}

static tt_status tt__net_receive(tt_program *p, const tt__instr *i, int process, int tag, void *data,
                                 size_t bytes, tt__request *r, int *count)
{
    return tt__net_post(p, i, process, tag, (char *)data, bytes, TT__NET_MESSAGE, true, r, count);
}

/* Counts bytes that a process must send at least. */
static void tt__net_must_send(tt_program *p, double bytes)
{
    pthread_mutex_lock(&p->ctx->net->mutex);
    p->ctx->net->least += bytes;
    pthread_mutex_unlock(&p->ctx->net->mutex);
}

/* The same of a phase of a collective. */
static double tt__net_least(const tt__launch *l, const tt__net_group *g)
{
    const tt__mat *x = tt__net_whole(l);
    const bool of_first = l->instr->move.root || tt__net_is(l, TT__OF_FIRST);
    const bool sends = (l->phase == TT__REDUCE_PHASE) == (g->own > 0);
    const double bytes = (double)tt__elements(x) * (double)tt_dtype_bytes(x->dtype);
    if (!of_first) return bytes * (g->processes - 1) / g->processes;
    return sends ? bytes * (l->phase == TT__REDUCE_PHASE ? 1 : g->processes - 1) : 0;
}

static void tt__net_count(tt_program *p, const tt__launch *l, int n, const tt__net_group *g)
{
    for (int k = 0; k < n; k++) tt__net_must_send(p, tt__net_least(&l[k], g));
}

/* What tt__net_reduce, tt__net_gather, tt__net_broadcast and tt__net_pair will send for the process of a rank
   in a phase, and *least. Of one that does not lead the group: 0. */
static double tt__net_sends(const tt__launch *l, const tt__net_group *g, double *least)
{
    const tt__net_job all = {0, 0, INT64_MAX};
    const tt__move *move = &l->instr->move;
    const double item = (double)tt_dtype_bytes(l->in[0].data ? l->in[0].dtype : l->out[0].dtype);
    double bytes = 0;
    int64_t first;
    *least = 0;
    if (tt__is_pair(l->instr)) {
        if (l->phase == TT__SPREAD_PHASE && g->me == move->from)
            *least = bytes = item * (double)tt__elements(&l->in[0]);
        return bytes;
    }
    if (g->me != g->low) return 0;
    *least = tt__net_least(l, g);
    if (l->phase == TT__SPREAD_PHASE && tt__net_is(l, TT__OF_FIRST))
        return g->own + 1 < g->processes ? item * (double)tt__elements(&l->in[0]) : 0;
    for (int m = 0; m < g->all.count; m++) {
        const int q = m / g->near.count, own = g->low + m % g->near.count;
        if (q == g->own) continue;
        if (l->phase == TT__SPREAD_PHASE) bytes += item * (double)tt__net_piece(l, &all, own, &first);
        else
            bytes += (double)tt__net_nodes(g, g->own, l->present) *
                     (double)tt__net_size(l, tt__net_piece(l, &all, m, &first));
    }
    return bytes;
}

/* The same of a step of one full micro-batch on each data rank, of all ranks of the process. */
static double tt__net_plan(const tt_program *head, double *least)
{
    const tt__crew *c = head->settings.crew;
    double bytes = *least = 0, some;
    for (int rank = c->first; rank < c->first + c->local && c->local < c->ranks; rank++) {
        tt_program room;
        const tt_program *p = tt__rank_view(head, rank, &room);
        for (int k = 0; k < p->built.t->n_code; k++) {
            const tt__instr *i = &p->built.t->code[k];
            if (!tt__is_collective(i) || i->move.over == TT__OVER_SLOTS || i->slot > 1) continue;
            const tt__net_group g = tt__net_group_of(p, rank, &i->move);
            const int pair = tt__is_pair(i) ? g.all.first + g.all.stride * i->move.to : rank;
            const bool alone = tt__is_pair(i) ? tt__is_local(c, pair) : g.processes == 1;
            tt__launch l;
            memset(&l, 0, sizeof l);
            l.instr = i;
            l.in[0] = tt__at_capacity(p->built.t, i->in[0]);
            l.out[0] = tt__at_capacity(p->built.t, i->out[0]);
            if (i->in[0]) l.in[0].data = &l; /* it is there */
            l.members = l.present = g.all.count;
            l.me = g.me;
            const int phases = tt__rules_of(i)->phases;
            const bool from_first = (phases & TT__OF_FIRST) && (phases & TT__SPREAD_PHASE);
            for (int phase = TT__REDUCE_PHASE; phase <= TT__SPREAD_PHASE && !alone; phase++) {
                if (!(phases & phase) || (from_first && phase == TT__REDUCE_PHASE)) continue;
                l.phase = phase;
                bytes += tt__net_sends(&l, &g, &some);
                *least += some;
            }
        }
    }
    return bytes;
}

/* How many batches are on their way at a time: fewer of more bytes where each is for many processes. */
static int tt__net_flights(const tt__net_group *g)
{
    return g->processes > TT__NET_FLIGHTS ? TT__NET_FLIGHTS / 2 : TT__NET_FLIGHTS;
}

/* The bytes of each in the memory that they are sent from. */
static size_t tt__net_part(const tt__net_group *g)
{
    return TT__STAGE / (size_t)tt__net_flights(g) & ~(size_t)(TT__ALIGN - 1);
}

/* As many jobs as there is room for, from elements `from` of collective *k on, where the next begin. */
static int tt__net_jobs(const tt__launch *l, int n, const tt__net_group *g, int *k, int64_t *from,
                        tt__net_job *job)
{
    const size_t parts = (size_t)g->all.count * (size_t)g->nodes;
    size_t room = tt__net_part(g) / parts & ~(size_t)(TT__ALIGN - 1); /* of each */
    int count = 0;
    while (*k < n && count < TT__NET_JOBS && room) {
        const int64_t item = (int64_t)tt_dtype_bytes(l[*k].in[0].dtype);
        const int64_t left = tt__net_longest(&l[*k]) - *from;
        const tt__net_job next = {*k, *from, tt__min(left, (int64_t)room / item)};
        if (left > 0) job[count++] = next;
        if (left > 0) room -= tt__net_size(&l[*k], next.most);
        *from += next.most;
        if (next.most == left || left <= 0) {
            *from = 0;
            ++*k;
        }
    }
    return count;
}

/* Messages of some jobs: what each process sends each other begins at `to`, in what is sent, and what comes
   from it at `from`. In both, jobs follow one another, of each the pieces, of each the nodes. */
typedef struct tt__net_batch {
    const tt__net_job *job;
    int jobs;
    size_t begin; /* of both, in the memory for what is sent, and in that for what comes */
    size_t to[TT__RANKS + 1], from[TT__RANKS + 1];
} tt__net_batch;

static void tt__net_place(const tt__launch *l, const tt__net_group *g, tt__net_batch *b)
{
    int64_t first;
    b->to[0] = b->from[0] = 0;
    for (int q = 0; q < g->processes; q++) {
        size_t to = 0, from = 0;
        for (int j = 0; j < b->jobs; j++) {
            const tt__launch *x = &l[b->job[j].k];
            for (int k = 0; k < g->near.count; k++) {
                const int64_t there = tt__net_piece(x, &b->job[j], q * g->near.count + k, &first);
                const int64_t here = tt__net_piece(x, &b->job[j], g->low + k, &first);
                to += (size_t)tt__net_nodes(g, g->own, x->present) * tt__net_size(x, there);
                from += (size_t)tt__net_nodes(g, q, x->present) * tt__net_size(x, here);
            }
        }
        b->to[q + 1] = b->to[q] + to;
        b->from[q + 1] = b->from[q] + (q == g->own ? 0 : from); /* its own stay in what is sent */
    }
}

/* Where kernels of a process cannot load from each other's memory: copies what a rank has of all pieces, one
   behind the other, to the second half of its memory of the host. */
static tt_status tt__net_lay_out(tt_program *p, int rank, const tt__launch *l, const tt__net_group *g,
                                 const tt__net_batch *b)
{
    char *to = (char *)p->settings.crew->stage[rank] + TT__STAGE + b->begin;
    tt_status status = TT_OK;
    for (int at = 0; at < g->processes * b->jobs; at++) {
        const int q = at / b->jobs, j = at % b->jobs;
        const tt__launch *x = &l[b->job[j].k];
        for (int k = q * g->near.count; k < (q + 1) * g->near.count && status == TT_OK; k++) {
            int64_t first, n = tt__net_piece(x, &b->job[j], k, &first);
            const int64_t bytes = g->me < x->present ? n * (int64_t)tt_dtype_bytes(x->in[0].dtype) : 0;
            status = tt__net_copy(p, rank, x, to, tt__element(&x->in[0], first), bytes);
            to += tt__net_size(x, n);
        }
    }
    return status;
}

/* Sums the nodes of this process, for all members' pieces, into what is sent. Its ranks take turns. `apart`:
   they have laid out their operands. */
static tt_status tt__net_pack(tt_program *p, int rank, const tt__launch *l, const tt__net_group *g,
                              const tt__net_batch *b, bool apart, char *to)
{
    tt__mat leaf[TT__RANKS];
    tt_status status = TT_OK;
    size_t laid = TT__STAGE + b->begin;
    int turn = 0;
    for (int j, at = 0; at < g->processes * b->jobs; at++) {
        const int q = at / b->jobs;
        j = at % b->jobs;
        const tt__launch *x = &l[b->job[j].k];
        const int present = tt__net_present(g, g->own, x->present);
        for (int k = q * g->near.count; k < (q + 1) * g->near.count; k++) {
            int64_t first, n = tt__net_piece(x, &b->job[j], k, &first);
            for (int node = 0; node * g->grain < present && status == TT_OK; node++) {
                const int begin = node * g->grain, end = (int)tt__min(present, begin + g->grain);
                for (int m = begin; m < end; m++) {
                    const int other = g->near.first + m * g->near.stride;
                    leaf[m - begin] = x->peer_in[g->low + m];
                    leaf[m - begin].data = tt__element(&leaf[m - begin], first);
                    if (apart) leaf[m - begin].data = (char *)p->settings.crew->stage[other] + laid;
                }
                const bool mine = turn++ % g->near.count == g->me - g->low;
                if (mine && n) status = tt__net_sum(p, rank, x, leaf, end - begin, to, n, false);
                to += tt__net_size(x, n);
            }
            laid += tt__net_size(x, n);
        }
    }
    return status;
}

/* Sums the nodes of all processes to this rank's piece. */
static tt_status tt__net_unpack(tt_program *p, int rank, const tt__launch *l, const tt__net_group *g,
                                const tt__net_batch *b, const char *sent, const char *received)
{
    const char *at[TT__RANKS]; /* the next node of each process */
    tt__mat leaf[TT__RANKS];
    tt_status status = TT_OK;
    for (int q = 0; q < g->processes; q++) at[q] = q == g->own ? sent + b->to[q] : received + b->from[q];
    for (int j = 0; j < b->jobs; j++) {
        const tt__launch *x = &l[b->job[j].k];
        for (int k = 0; k < g->near.count && status == TT_OK; k++) {
            int64_t first, n = tt__net_piece(x, &b->job[j], g->low + k, &first);
            int leaves = 0;
            for (int q = 0; q < g->processes; q++)
                for (int node = 0; node < tt__net_nodes(g, q, x->present); node++) {
                    leaf[leaves].dtype = x->in[0].dtype;
                    leaf[leaves++].data = (void *)(uintptr_t)at[q];
                    at[q] += tt__net_size(x, n);
                }
            if (tt__net_is(x, TT__PIECES_OUT)) first = b->job[j].from;
            if (g->low + k == g->me && n)
                status = tt__net_sum(p, rank, x, leaf, leaves, tt__element(&x->out[0], first), n, x->add[0]);
        }
    }
    return status;
}

/* A batch on its way. */
typedef struct tt__net_flight {
    tt__net_job job[TT__NET_JOBS];
    tt__net_batch b;
    tt__request r[TT__NET_REQUESTS(2 * TT__STAGE / TT__NET_FLIGHTS)];
    int count;
} tt__net_flight;

/* Waits for a batch, and sums it. */
static tt_status tt__net_land(tt_program *p, int rank, const tt__launch *l, const tt__net_group *g,
                              tt__net_flight *f)
{
    const char *stage = (const char *)p->settings.crew->stage[g->leader] + f->b.begin;
    const int stream = l->instr->stream;
    if (!f->b.jobs) return TT_OK;
    tt_status status = tt__net_all_there(p, l->instr, f->r, &f->count);
    if (status == TT_OK) status = tt__sync(p, rank, g->near, stream);
    if (status == TT_OK) status = tt__net_unpack(p, rank, l, g, &f->b, stage, stage + TT__STAGE);
    if (status == TT_OK) status = tt__sync(p, rank, g->near, stream);
    f->b.jobs = 0;
    return status;
}

/* Each member's piece of n sums. While a batch is summed, and where one direction of a link is ahead of the
   other, other batches are on their way. */
static tt_status tt__net_reduce(tt_program *p, int rank, tt__launch *l, int n, const tt__net_group *g)
{
    const tt__instr *i = l->instr;
    const bool apart = tt__is_apart(p->settings.crew, g->near);
    char *stage = (char *)p->settings.crew->stage[g->leader];
    const int flights = tt__net_flights(g);
    tt__net_flight flight[TT__NET_FLIGHTS];
    tt_status status = TT_OK;
    int64_t from = 0;
    int turn = 0;
    for (int k = 0; k < flights; k++) flight[k].b.jobs = 0;
    for (int k = 0; k < n && status == TT_OK; turn++) {
        tt__net_flight *f = &flight[turn % flights];
        tt__net_batch *b = &f->b;
        b->job = f->job;
        b->jobs = tt__net_jobs(l, n, g, &k, &from, f->job);
        b->begin = (size_t)(turn % flights) * tt__net_part(g);
        f->count = 0;
        if (!b->jobs && k < n)
            return tt__fail(p->ctx, TT_ERR_INTERNAL, "%s: no room for messages", tt__instr_name(i));
        tt__net_place(l, g, b);
        if (apart) status = tt__net_lay_out(p, rank, l, g, b);
        if (apart && status == TT_OK) status = tt__sync(p, rank, g->near, i->stream);
        if (status == TT_OK) status = tt__net_pack(p, rank, l, g, b, apart, stage + b->begin);
        if (status == TT_OK) status = tt__sync(p, rank, g->near, i->stream);
        if (status == TT_OK && rank == g->leader) status = tt__await_stream(p, rank, i->stream);
        for (int q = 0; q < g->processes && status == TT_OK && rank == g->leader; q++) {
            const int process = tt__net_process(p, g, q);
            if (q == g->own) continue;
            status = tt__net_receive(p, i, process, g->tag, stage + TT__STAGE + b->begin + b->from[q],
                                     b->from[q + 1] - b->from[q], f->r, &f->count);
            if (status == TT_OK)
                status = tt__net_send(p, i, process, g->tag, stage + b->begin + b->to[q],
                                      b->to[q + 1] - b->to[q], f->r, &f->count);
        }
        if (status == TT_OK) status = tt__net_land(p, rank, l, g, &flight[(turn + 1) % flights]);
    }
    for (int k = 0; k < flights && status == TT_OK; k++)
        status = tt__net_land(p, rank, l, g, &flight[(turn + k) % flights]);
    return status;
}

/* The pieces of other processes come into the leader's results, where others of this process find them, in
   messages of a bounded number at a time. */
static tt_status tt__net_gather(tt_program *p, tt__launch *l, int n, const tt__net_group *g)
{
    enum { REQUESTS = 4 * TT__RANKS };
    const tt__instr *i = l->instr;
    const bool gathers = tt__net_is(l, TT__PIECES_IN);
    tt__request r[REQUESTS];
    tt_status status = TT_OK;
    int count = 0;
    for (int k = 0; k < n; k++) {
        const int64_t item = (int64_t)tt_dtype_bytes(l[k].out[0].dtype), longest = tt__net_longest(&l[k]);
        tt__net_job job = {k, 0, (int64_t)TT__NET_MESSAGE / item};
        for (; job.from < longest && status == TT_OK; job.from += job.most) {
            for (int m = 0; m < g->all.count && status == TT_OK; m++) {
                const int q = m / g->near.count, own = g->low + m % g->near.count;
                const int process = tt__net_process(p, g, q);
                int64_t to, from, come = tt__net_piece(&l[k], &job, m, &to);
                const int64_t go = tt__net_piece(&l[k], &job, own, &from);
                const tt__mat *mine = gathers ? &l[k].peer_in[own] : &l[k].peer_out[own];
                if (q == g->own) continue;
                status = tt__net_receive(p, i, process, g->tag, tt__element(&l[k].out[0], to),
                                         (size_t)(come * item), r, &count);
                if (status == TT_OK)
                    status = tt__net_send(p, i, process, g->tag, tt__element(mine, gathers ? job.from : from),
                                          (size_t)(go * item), r, &count);
            }
            if (status == TT_OK && count > REQUESTS - 2 * TT__RANKS)
                status = tt__net_first_there(p, i, r, &count, count / 2);
        }
    }
    return status == TT_OK ? tt__net_all_there(p, i, r, &count) : status;
}

/* What member 0 has goes from process to process. */
static tt_status tt__net_broadcast(tt_program *p, tt__launch *l, int n, const tt__net_group *g)
{
    const tt__instr *i = l->instr;
    const bool last = g->own + 1 == g->processes;
    tt__request in[1], out[TT__RANKS];
    tt_status status = TT_OK;
    int coming = 0, going = 0;
    for (int k = 0; k < n; k++) {
        const tt__mat *x = g->own ? &l[k].out[0] : &l[k].in[0];
        const size_t bytes = (size_t)tt__elements(x) * tt_dtype_bytes(x->dtype);
        for (size_t at = 0, m; at < bytes && status == TT_OK; at += m) {
            m = bytes - at < TT__NET_MESSAGE ? bytes - at : TT__NET_MESSAGE;
            char *data = (char *)x->data + at;
            if (g->own) {
                const int before = tt__net_process(p, g, g->own - 1);
                status = tt__net_receive(p, i, before, g->tag, data, m, in, &coming);
                if (status == TT_OK) status = tt__net_all_there(p, i, in, &coming);
            }
            if (status == TT_OK && !last)
                status = tt__net_send(p, i, tt__net_process(p, g, g->own + 1), g->tag, data, m, out, &going);
            if (status == TT_OK && going == TT__COUNT(out)) status = tt__net_all_there(p, i, out, &going);
        }
    }
    return status == TT_OK ? tt__net_all_there(p, i, out, &going) : status;
}

/* Copies what the leader has got, and what others of this process have, on this rank. */
static tt_status tt__net_spread(tt_program *p, int rank, tt__launch *l, int n, const tt__net_group *g)
{
    const tt__rank *r = &p->rank[rank];
    const size_t peers = 2 * (size_t)tt__max(p->settings.crew->ranks, tt__slots(p));
    const bool all = tt__net_is(l, TT__OF_FIRST);
    for (int k = 0; k < n; k++) {
        tt__mat *in = r->peers + (size_t)k * peers, *out = in + g->all.count;
        const tt__mat *at = all && !g->own ? &in[g->low] : &out[g->low];
        for (int m = 0; m < g->all.count; m++) {
            int64_t first;
            if (m / g->near.count == g->own && !all) continue;
            tt__piece_of(&l[k], &l[k].out[0], l[k].instr->move.root, m, &first);
            if (m != g->low) out[m].data = at->data;
            if (!all) in[m].data = tt__element(at, first);
        }
        if (all) out[g->low].data = at->data;
    }
    return tt__launch_phase(p, rank, l, n, g->near);
}

/* Exchanges pieces where memory is a device's: a rank copies its own to the leader's memory of the host, and
   the others' from there. */
static tt_status tt__net_gather_by_host(tt_program *p, int rank, tt__launch *l, int n, const tt__net_group *g)
{
    const tt__instr *i = l->instr;
    const bool gathers = tt__net_is(l, TT__PIECES_IN);
    const size_t room = 2 * TT__STAGE / (size_t)g->all.count & ~(size_t)(TT__ALIGN - 1); /* of each piece */
    char *stage = (char *)p->settings.crew->stage[g->leader];
    tt__request r[TT__NET_REQUESTS(2 * TT__STAGE)];
    tt_status status = TT_OK;
    for (int k = 0; k < n; k++) {
        const int64_t item = (int64_t)tt_dtype_bytes(l[k].out[0].dtype), longest = tt__net_longest(&l[k]);
        tt__net_job job = {k, 0, (int64_t)room / item};
        for (; job.from < longest && status == TT_OK; job.from += job.most) {
            int64_t first, bytes = item * tt__net_piece(&l[k], &job, g->me, &first);
            const tt__mat *mine = gathers ? &l[k].in[0] : &l[k].out[0];
            status = tt__net_copy(p, rank, &l[k], stage + (size_t)g->me * room,
                                  tt__element(mine, gathers ? job.from : first), bytes);
            if (status == TT_OK) status = tt__sync(p, rank, g->near, i->stream);
            if (status == TT_OK && rank == g->leader) status = tt__await_stream(p, rank, i->stream);
            int count = 0;
            for (int m = 0; m < g->all.count && status == TT_OK && rank == g->leader; m++) {
                const int q = m / g->near.count, own = g->low + m % g->near.count;
                const int process = tt__net_process(p, g, q);
                const int64_t come = tt__net_piece(&l[k], &job, m, &first);
                const int64_t go = tt__net_piece(&l[k], &job, own, &first);
                if (q == g->own) continue;
                status = tt__net_receive(p, i, process, g->tag, stage + (size_t)m * room,
                                         (size_t)(come * item), r, &count);
                if (status == TT_OK)
                    status = tt__net_send(p, i, process, g->tag, stage + (size_t)own * room,
                                          (size_t)(go * item), r, &count);
            }
            if (status == TT_OK) status = tt__net_all_there(p, i, r, &count);
            if (status == TT_OK) status = tt__sync(p, rank, g->near, i->stream);
            for (int m = 0; m < g->all.count && status == TT_OK; m++) {
                bytes = item * tt__net_piece(&l[k], &job, m, &first);
                if (m != g->me || gathers)
                    status = tt__net_copy(p, rank, &l[k], tt__element(&l[k].out[0], first),
                                          stage + (size_t)m * room, bytes);
            }
            if (status == TT_OK) status = tt__sync(p, rank, g->near, i->stream);
        }
    }
    return status;
}

/* What member 0 has goes through the host's memory of the leader of each process. */
static tt_status tt__net_broadcast_by_host(tt_program *p, int rank, tt__launch *l, int n,
                                           const tt__net_group *g)
{
    const tt__instr *i = l->instr;
    const bool leads = rank == g->leader, last = g->own + 1 == g->processes;
    char *stage = (char *)p->settings.crew->stage[g->leader];
    tt__request r[TT__NET_REQUESTS(TT__STAGE)];
    tt_status status = TT_OK;
    for (int k = 0; k < n; k++) {
        const int64_t bytes = tt__elements(&l[k].in[0]) * (int64_t)tt_dtype_bytes(l[k].in[0].dtype);
        for (int64_t at = 0, m; at < bytes && status == TT_OK; at += m) {
            int count = 0;
            m = tt__min(bytes - at, (int64_t)TT__STAGE);
            if (g->me == 0) status = tt__net_copy(p, rank, &l[k], stage, (char *)l[k].in[0].data + at, m);
            if (status == TT_OK && leads) status = tt__await_stream(p, rank, i->stream);
            if (status == TT_OK && leads && g->own) {
                const int before = tt__net_process(p, g, g->own - 1);
                status = tt__net_receive(p, i, before, g->tag, stage, (size_t)m, r, &count);
                if (status == TT_OK) status = tt__net_all_there(p, i, r, &count);
            }
            if (status == TT_OK && leads && !last) {
                const int next = tt__net_process(p, g, g->own + 1);
                status = tt__net_send(p, i, next, g->tag, stage, (size_t)m, r, &count);
                if (status == TT_OK) status = tt__net_all_there(p, i, r, &count);
            }
            if (status == TT_OK) status = tt__sync(p, rank, g->near, i->stream);
            if (status == TT_OK && (g->me || l[k].out[0].data != l[k].in[0].data))
                status = tt__net_copy(p, rank, &l[k], (char *)l[k].out[0].data + at, stage, m);
            if (status == TT_OK) status = tt__sync(p, rank, g->near, i->stream);
        }
    }
    return status;
}

/* From one member to another one, of another process, where memory is a device's. */
static tt_status tt__net_pair_by_host(tt_program *p, int rank, const tt__launch *l, int process, int tag,
                                      bool receives, char *data, int64_t bytes)
{
    const tt__instr *i = l->instr;
    char *stage = (char *)p->settings.crew->stage[rank];
    tt__request r[TT__NET_REQUESTS(TT__STAGE)];
    tt_status status = TT_OK;
    for (int64_t at = 0, m; at < bytes && status == TT_OK; at += m) {
        int count = 0;
        m = tt__min(bytes - at, (int64_t)TT__STAGE);
        if (!receives) status = tt__net_copy(p, rank, l, stage, data + at, m);
        if (status == TT_OK) status = tt__await_stream(p, rank, i->stream);
        if (status == TT_OK && receives)
            status = tt__net_receive(p, i, process, tag, stage, (size_t)m, r, &count);
        else if (status == TT_OK) status = tt__net_send(p, i, process, tag, stage, (size_t)m, r, &count);
        if (status == TT_OK) status = tt__net_all_there(p, i, r, &count);
        if (status == TT_OK && receives) status = tt__net_copy(p, rank, l, data + at, stage, m);
    }
    return status;
}

/* From one member to another one, of another process. */
static tt_status tt__net_pair(tt_program *p, int rank, const tt__launch *l, int n, const tt__net_group *g)
{
    const tt__instr *i = l->instr;
    const tt__move *m = &i->move;
    const int from = g->all.first + m->from * g->all.stride, to = g->all.first + m->to * g->all.stride;
    const int tag = tt__pair_tag(from, to);
    const bool receives = g->me == m->to, direct = p->settings.kind->host || p->ctx->net->cuda_aware;
    const int process = tt__process_of(p->settings.crew, receives ? from : to);
    tt__request r[TT__RANKS];
    tt_status status = direct ? tt__await_stream(p, rank, i->stream) : TT_OK;
    int count = 0;
    for (int k = 0; k < n; k++) {
        const tt__mat *x = receives ? &l[k].out[0] : &l[k].in[0];
        const size_t bytes = (size_t)tt__elements(x) * tt_dtype_bytes(x->dtype);
        if (!receives) tt__net_must_send(p, (double)bytes);
        if (!direct && status == TT_OK)
            status = tt__net_pair_by_host(p, rank, &l[k], process, tag, receives, (char *)x->data,
                                          (int64_t)bytes);
        for (size_t at = 0, some; at < bytes && direct && status == TT_OK; at += some) {
            some = bytes - at < TT__NET_MESSAGE ? bytes - at : TT__NET_MESSAGE;
            char *data = (char *)x->data + at;
            if (receives) status = tt__net_receive(p, i, process, tag, data, some, r, &count);
            else status = tt__net_send(p, i, process, tag, data, some, r, &count);
            if (status == TT_OK && count == TT__COUNT(r)) status = tt__net_all_there(p, i, r, &count);
        }
    }
    return status == TT_OK ? tt__net_all_there(p, i, r, &count) : status;
}

/* As tt__launch_collective, of members in several processes. */
static tt_status tt__launch_over_net(tt_program *p, int rank, tt__launch *l, int n, const tt__net_group *g,
                                     bool met)
{
    const tt__instr *i = l->instr;
    const bool leads = rank == g->leader;
    const int phases = tt__rules_of(i)->phases;
    const bool from_first = (phases & TT__OF_FIRST) && (phases & TT__SPREAD_PHASE);
    const bool host = p->settings.kind->host;
    const bool direct = host || (p->ctx->net->cuda_aware && !tt__is_apart(p->settings.crew, g->near));
    tt_status status = host ? TT_OK : tt__after_staged(p, rank, i);
    if (tt__is_pair(i)) return status == TT_OK ? tt__net_pair(p, rank, l, n, g) : status;
    if (status == TT_OK && !met) status = tt__sync(p, rank, g->near, i->stream);
    for (int phase = TT__REDUCE_PHASE; phase <= TT__SPREAD_PHASE && status == TT_OK; phase++) {
        if (!(phases & phase) || (from_first && phase == TT__REDUCE_PHASE)) continue;
        for (int k = 0; k < n; k++) l[k].phase = phase;
        if (leads) tt__net_count(p, l, n, g);
        if (phase == TT__REDUCE_PHASE) {
            status = tt__net_reduce(p, rank, l, n, g);
            continue;
        }
        if (!direct) {
            status = from_first ? tt__net_broadcast_by_host(p, rank, l, n, g)
                                : tt__net_gather_by_host(p, rank, l, n, g);
            continue;
        }
        if (leads) status = tt__await_stream(p, rank, i->stream);
        if (leads && status == TT_OK)
            status = from_first ? tt__net_broadcast(p, l, n, g) : tt__net_gather(p, l, n, g);
        if (status == TT_OK) status = tt__sync(p, rank, g->near, i->stream);
        if (status == TT_OK) status = tt__net_spread(p, rank, l, n, g);
    }
    return status;
}

/* Runs n collectives of one op: in each phase all members, which wait for each other before and after.
   met: they have waited right before. */
static tt_status tt__launch_collective(tt_program *p, int rank, tt__launch *l, int n, bool met)
{
    const tt__instr *i = l->instr;
    int me;
    tt__members members = tt__members_of(p, rank, &i->move, &me);
    const bool pair = tt__is_pair(i);
    if (pair && me != (i->out[0] ? i->move.to : i->move.from)) return TT_OK;
    const int low = members.first + members.stride * (pair ? (int)tt__min(i->move.from, i->move.to) : 0);
    const int high = members.first + members.stride * (pair ? (int)tt__max(i->move.from, i->move.to)
                                                            : members.count - 1);
    if (!tt__is_here(p, low) || !tt__is_here(p, high)) {
        const tt__net_group g = tt__net_group_of(p, rank, &i->move);
        return tt__launch_over_net(p, rank, l, n, &g, met);
    }
    if (pair) {
        members.first += members.stride * i->move.from;
        members.stride *= i->move.to - i->move.from;
        members.count = 2;
    }
    const bool apart = tt__is_apart(p->settings.crew, members);
    tt_status status = met ? TT_OK : tt__sync(p, rank, members, i->stream);
    for (int phase = TT__REDUCE_PHASE; phase <= TT__SPREAD_PHASE && status == TT_OK; phase++) {
        if (!(tt__rules_of(i)->phases & phase)) continue;
        for (int k = 0; k < n; k++) l[k].phase = phase;
        if (!apart) status = tt__launch_phase(p, rank, l, n, members);
        for (int k = 0; k < n && apart && status == TT_OK; k++)
            status = tt__launch_staged(p, rank, &l[k], members);
    }
    return status;
}

/* Fills in the launch, all 0 so far, of an instruction on a rank; `peers`: room for what it says of other
   ranks. */
static void tt__set_launch(tt_program *p, int rank, const tt__instr *i, tt__launch *l, tt__mat *peers)
{
    const tt__value *y = &p->built.t->values[i->out[0]];
    l->instr = i;
    l->lists = tt__lists_of(p->built.t, i);
    for (int j = 0; j < TT__MAX_IN; j++) if (i->in[j]) l->in[j] = tt__resolve(p, rank, i->in[j]);
    for (int j = 0; j < TT__MAX_OUT; j++) {
        if (!i->out[j]) continue;
        l->out[j] = tt__resolve(p, rank, i->out[j]);
        l->add[j] = (i->add >> j & 1) || ((i->add_later >> j & 1) && p->later);
    }
    l->workspace = p->arena->memory[rank] + p->arena->persistent + i->workspace_place;
    if (i->on_host) {
        l->workspace = p->rank[rank].host + p->built.host_persistent + i->workspace_place;
        l->in[TT__RUN_IN].data = &p->run; /* but for its `micro`, which no update reads */
        if (!p->settings.kind->host) l->device = p->settings.crew->host[rank];
    }
    if (p->arena->tensor > 1) tt__set_tensor_rank(p, rank, l);
    if (y->part.unit)
        tt__piece(y->part.of, y->part.unit, y->part.root, tt__data_rank(p, rank), p->arena->data, &l->first);
    if (tt__is(i, TT__RMW) && y->part.split != TT__WHOLE) {
        const int64_t elements = y->part.unit ? y->part.of : y->shape.rows * y->shape.cols;
        l->first += rank % p->arena->tensor * ((elements + 7) / 8 * 8);
    }
    if (i->move.over) tt__set_members(p, rank, l, peers);
}
