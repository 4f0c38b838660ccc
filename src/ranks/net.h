#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/record.h"
#include "../ops/cpu_launch.h"
#include "../ops/collectives/cpu_shared.h"
#include "processes.h"
#include "groups.h"
#include "collectives.h"

/* ---- collectives of several processes */

/* Returns the number of the k-th process among those that have members of the collective. */
static int tt__net_process(const tt__collective *c, int k)
{
    return tt__process_of(c->group, c->all.first + k * c->local.count * c->all.stride);
}

/* tt__net_present returns how many members of the k-th process contribute to a reduction. tt__net_nodes
   returns how many nodes (c->grain consecutive members) these members form. present: number of members of all
   processes that contribute. */
static int tt__net_present(const tt__collective *c, int k, int present)
{
    return (int)tt__max(0, tt__min(c->local.count, present - k * c->local.count));
}

static int tt__net_nodes(const tt__collective *c, int k, int present)
{
    return (tt__net_present(c, k, present) + c->grain - 1) / c->grain;
}

/* A part of a collective: elements [from, from + max) of each member's shard. k: number of the collective
   among those that run together. */
typedef struct tt__net_job { int k; int64_t from, max; } tt__net_job;
enum { TT__NET_JOBS = 128 };

/* Returns the tensor that the members' shards make up: in a reduction, the tensor to sum; otherwise the
   gathered tensor. */
static const tt__mat *tt__net_whole(const tt__launch *l)
{
    return l->phase == TT__REDUCE_PHASE ? &l->in[0] : &l->out[0];
}

static bool tt__net_is(const tt__launch *l, int flag) { return (tt__rules_of(l->instr)->phases & flag) != 0; }

/* Returns how many elements of a member's shard belong to a job, which is a part of a collective. Sets *first
   to the index, in the whole tensor, of the first of these elements. */
static int64_t tt__net_shard(const tt__launch *l, const tt__net_job *job, int member, int64_t *first)
{
    const bool to_first = tt__net_is(l, TT__OF_FIRST); /* member 0 has all elements */
    int64_t n = member ? 0 : tt__elements(&l->in[0]);
    *first = 0;
    if (!to_first) n = tt__shard_of(l, tt__net_whole(l), l->instr->move.root, member, first);
    *first += job->from;
    return tt__max(0, tt__min(job->max, n - job->from));
}

static int64_t tt__net_longest(const tt__launch *l)
{
    const tt__net_job all = {0, 0, INT64_MAX};
    int64_t longest = 0, first;
    for (int k = 0; k < l->members; k++) longest = tt__max(longest, tt__net_shard(l, &all, k, &first));
    return longest;
}

static size_t tt__net_size(const tt__launch *l, int64_t n)
{
    return tt__align_up((size_t)n * tt_dtype_bytes(l->in[0].dtype));
}

/* Launches an instruction of op `op` with the operands of collective *l, and on the stream of *l. */
static tt_status tt__net_launch(const tt__device_group *c, int rank, tt__launch *l, int op)
{
    tt__instr other = *l->instr;
    other.op = op;
    l->instr = &other;
    return tt__device_status(c->ctx, c, rank, c->kind->backend->launch(l, 1));
}

/* Sums `count` tensors of n elements each, the leaves, and writes the sum to y or, if `add`, adds it to y.
   The leaves and y may be in the staging memory of any rank. */
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
    return tt__net_launch(c->group, c->rank, &s, TT__OP_SUM_SLOTS);
}

/* Copies bytes between a rank's device and the host, on the collective's stream. */
static tt_status tt__net_copy(const tt__device_group *c, int rank, const tt__launch *l, void *to,
                              const void *from, int64_t bytes)
{
    const tt__mat x = {(void *)(uintptr_t)from, TT_U8, 1, bytes, bytes}, y = {to, TT_U8, 1, bytes, bytes};
    tt__launch s = *l;
    s.in[0] = x;
    s.out[0] = y;
    return bytes && to != from ? tt__net_launch(c, rank, &s, TT__OP_COPY) : TT_OK;
}

/* Returns the minimum number of bytes that a process must send in a phase of a collective, by any method. */
static double tt__net_min(const tt__collective *c, const tt__launch *l)
{
    const tt__mat *x = tt__net_whole(l);
    const bool of_first = l->instr->move.root || tt__net_is(l, TT__OF_FIRST);
    const bool sends = (l->phase == TT__REDUCE_PHASE) == (c->own > 0);
    const double bytes = (double)tt__elements(x) * (double)tt_dtype_bytes(x->dtype);
    if (!of_first) return bytes * (c->processes - 1) / c->processes;
    return sends ? bytes * (l->phase == TT__REDUCE_PHASE ? 1 : c->processes - 1) : 0;
}

/* Returns the number of bytes that the process of a rank sends in a phase: by tt__net_reduce, tt__net_gather,
   tt__net_broadcast or tt__net_pair. Sets *min to the minimum that any method must send. Both numbers are 0
   unless the rank is the leader of its process. */
static double tt__net_sends(const tt__collective *c, double *min)
{
    const tt__net_job all = {0, 0, INT64_MAX};
    const tt__launch *l = c->l;
    const double item = (double)tt_dtype_bytes(l->in[0].data ? l->in[0].dtype : l->out[0].dtype);
    double bytes = 0;
    int64_t first;
    *min = 0;
    if (tt__is_pair(l->instr)) {
        if (l->phase == TT__SPREAD_PHASE && c->me == l->instr->move.from)
            *min = bytes = item * (double)tt__elements(&l->in[0]);
        return bytes;
    }
    if (c->me != c->low) return 0;
    *min = tt__net_min(c, l);
    if (l->phase == TT__SPREAD_PHASE && tt__net_is(l, TT__OF_FIRST))
        return c->own + 1 < c->processes ? item * (double)tt__elements(&l->in[0]) : 0;
    for (int m = 0; m < c->all.count; m++) {
        const int q = m / c->local.count, own = c->low + m % c->local.count;
        if (q == c->own) continue;
        if (l->phase == TT__SPREAD_PHASE) bytes += item * (double)tt__net_shard(l, &all, own, &first);
        else
            bytes += (double)tt__net_nodes(c, c->own, l->present) *
                     (double)tt__net_size(l, tt__net_shard(l, &all, m, &first));
    }
    return bytes;
}

/* Returns how many batches of messages are in flight at a time. With many processes, there are fewer but
   larger batches. */
static int tt__net_flights(const tt__collective *c)
{
    return c->processes > TT__NET_FLIGHTS ? TT__NET_FLIGHTS / 2 : TT__NET_FLIGHTS;
}

/* Returns the bytes of staging memory from which one batch is sent. */
static size_t tt__net_part(const tt__collective *c)
{
    return TT__STAGE / (size_t)tt__net_flights(c) & ~(size_t)(TT__ALIGN - 1);
}

/* Fills a batch of messages with jobs (parts of collectives), from element *from of collective *k on, until
   no more fit. Moves *k and *from to the start of the next batch. Returns the number of jobs. */
static int tt__net_jobs(const tt__collective *c, int *k, int64_t *from, tt__net_job *job)
{
    const size_t parts = (size_t)c->all.count * (size_t)c->nodes;
    size_t room = tt__net_part(c) / parts & ~(size_t)(TT__ALIGN - 1); /* bytes left for each sum in the
                                                                         batch */
    int count = 0;
    while (*k < c->n && count < TT__NET_JOBS && room) {
        const tt__launch *l = &c->l[*k];
        const int64_t item = (int64_t)tt_dtype_bytes(l->in[0].dtype), left = tt__net_longest(l) - *from;
        const tt__net_job next = {*k, *from, tt__min(left, (int64_t)room / item)};
        if (left > 0) job[count++] = next;
        if (left > 0) room -= tt__net_size(l, next.max);
        *from += next.max;
        if (next.max == left || left <= 0) {
            *from = 0;
            ++*k;
        }
    }
    return count;
}

/* A batch of messages in flight, for one or more jobs (parts of collectives). Elements for process q begin at
   byte to[q] of the batch's send memory; elements from process q begin at byte from[q] of its receive memory.
   The elements in either memory are ordered by job, then by shard, then by node (c->grain consecutive
   members, whose sum is sent). */
typedef struct tt__net_batch {
    tt__net_job job[TT__NET_JOBS];
    int jobs;
    size_t begin; /* offset of the batch in the send half and in the receive half of staging memory */
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
            for (int k = 0; k < c->local.count; k++) {
                const int64_t there = tt__net_shard(x, &b->job[j], q * c->local.count + k, &first);
                const int64_t here = tt__net_shard(x, &b->job[j], c->low + k, &first);
                to += (size_t)tt__net_nodes(c, c->own, x->present) * tt__net_size(x, there);
                from += (size_t)tt__net_nodes(c, q, x->present) * tt__net_size(x, here);
            }
        }
        b->to[q + 1] = b->to[q] + to;
        b->from[q + 1] = b->from[q] + (q == c->own ? 0 : from); /* this process's own sums stay in the send
                                                                   memory */
    }
}

/* Copies a rank's elements of all shards, one after another, to the second half of its staging memory. Other
   ranks of the process that cannot load from the rank's memory read the copy. */
static tt_status tt__net_lay_out(const tt__collective *c, const tt__net_batch *b)
{
    char *to = (char *)c->group->stage[c->rank] + TT__STAGE + b->begin;
    tt_status status = TT_OK;
    for (int at = 0; at < c->processes * b->jobs; at++) {
        const int q = at / b->jobs, j = at % b->jobs;
        const tt__launch *x = &c->l[b->job[j].k];
        for (int k = q * c->local.count; k < (q + 1) * c->local.count && status == TT_OK; k++) {
            int64_t first, n = tt__net_shard(x, &b->job[j], k, &first);
            const int64_t bytes = c->me < x->present ? n * (int64_t)tt_dtype_bytes(x->in[0].dtype) : 0;
            status = tt__net_copy(c->group, c->rank, x, to, tt__element(&x->in[0], first), bytes);
            to += tt__net_size(x, n);
        }
    }
    return status;
}

/* Sums each node (c->grain consecutive members) of this process, for the shards of all members, and writes
   the sums to the send memory `to`. The ranks of the process compute these sums in turn. If c->no_peer, the
   ranks read the copies that tt__net_lay_out made. */
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
        for (int k = q * c->local.count; k < (q + 1) * c->local.count; k++) {
            int64_t first, n = tt__net_shard(x, &b->job[j], k, &first);
            for (int node = 0; node * c->grain < present && status == TT_OK; node++) {
                const int begin = node * c->grain, end = (int)tt__min(present, begin + c->grain);
                for (int m = begin; m < end; m++) {
                    const int other = c->local.first + m * c->local.stride;
                    leaf[m - begin] = x->peer_in[c->low + m];
                    leaf[m - begin].data = tt__element(&leaf[m - begin], first);
                    if (c->no_peer) leaf[m - begin].data = (char *)c->group->stage[other] + laid;
                }
                const bool mine = turn++ % c->local.count == c->me - c->low;
                if (mine && n) status = tt__net_sum(c, x, leaf, end - begin, to, n, false);
                to += tt__net_size(x, n);
            }
            laid += tt__net_size(x, n);
        }
    }
    return status;
}

/* Adds up, for this rank's shard, the sums of the nodes (c->grain consecutive members) of all processes. */
static tt_status tt__net_unpack(const tt__collective *c, const tt__net_batch *b, const char *sent,
                                const char *received)
{
    const char *at[TT__RANKS]; /* for each process: address of the next of its sums */
    tt__mat leaf[TT__RANKS];
    tt_status status = TT_OK;
    for (int q = 0; q < c->processes; q++) at[q] = q == c->own ? sent + b->to[q] : received + b->from[q];
    for (int j = 0; j < b->jobs; j++) {
        const tt__launch *x = &c->l[b->job[j].k];
        for (int k = 0; k < c->local.count && status == TT_OK; k++) {
            int64_t first, n = tt__net_shard(x, &b->job[j], c->low + k, &first);
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

/* Waits for the messages of a batch, and then sums this rank's shard. */
static tt_status tt__net_land(const tt__collective *c, tt__net_batch *b)
{
    const char *stage = (const char *)c->group->stage[c->leader] + b->begin;
    if (!b->jobs) return TT_OK;
    tt_status status = tt__net_all_there(&b->mail);
    if (status == TT_OK) status = tt__barrier_near(c);
    if (status == TT_OK) status = tt__net_unpack(c, b, stage, stage + TT__STAGE);
    if (status == TT_OK) status = tt__barrier_near(c);
    b->jobs = 0;
    return status;
}

/* Sums the tensors of c->n collectives over all members; each member gets its shard of the sums. Several
   batches are in flight, so that links stay busy during sums, and neither direction of a link waits for the
   other. */
static tt_status tt__net_reduce(const tt__collective *c)
{
    const tt__instr *i = c->l->instr;
    char *stage = (char *)c->group->stage[c->leader];
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
            return tt__fail(c->group->ctx, TT_ERR_INTERNAL,
                            "%s: its list of messages is full; please report this program",
                            tt__instr_name(i));
        tt__net_place(c, b);
        if (c->no_peer) status = tt__net_lay_out(c, b);
        if (c->no_peer && status == TT_OK) status = tt__barrier_near(c);
        if (status == TT_OK) status = tt__net_pack(c, b, stage + b->begin);
        if (status == TT_OK) status = tt__barrier_near(c);
        if (status == TT_OK && c->rank == c->leader) status = tt__await_stream(c->group, c->rank, i->stream);
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

/* Returns the address where the elements of a job (a part of a collective) in member m's shard begin. If
   c->direct, the address is in the memory of the rank that has the shard or, for a shard of another process,
   in the result of the leader, the rank that sends and receives for this process. Otherwise it is in the
   leader's staging memory, where each shard has `room` bytes. */
static char *tt__net_begin(const tt__collective *c, const tt__net_job *job, int m, size_t room)
{
    const tt__launch *l = &c->l[job->k];
    const bool gathers = tt__net_is(l, TT__PIECES_IN);
    int64_t first;
    if (!c->direct) return (char *)c->group->stage[c->leader] + (size_t)m * room;
    tt__net_shard(l, job, m, &first);
    if (m / c->local.count != c->own) return (char *)tt__element(&l->out[0], first);
    return (char *)tt__element(gathers ? &l->peer_in[m] : &l->peer_out[m], gathers ? job->from : first);
}

/* Copies this rank's shard to the staging memory of the leader (the rank that sends and receives for this
   process) or, if `come`, copies from there the shards that this rank lacks. Then waits at a barrier of the
   process's members. */
static tt_status tt__net_stage(const tt__collective *c, const tt__net_job *job, size_t room, bool come)
{
    const tt__launch *l = &c->l[job->k];
    const bool gathers = tt__net_is(l, TT__PIECES_IN);
    const tt__mat *x = gathers && !come ? &l->in[0] : &l->out[0];
    tt_status status = TT_OK;
    for (int m = come ? 0 : c->me; m < (come ? c->all.count : c->me + 1) && status == TT_OK; m++) {
        int64_t first, bytes = (int64_t)tt_dtype_bytes(l->out[0].dtype) * tt__net_shard(l, job, m, &first);
        char *staged = tt__net_begin(c, job, m, room);
        char *own = (char *)tt__element(x, gathers && !come ? job->from : first);
        if (come && m == c->me && !gathers) continue;
        status = tt__net_copy(c->group, c->rank, l, come ? own : staged, come ? staged : own, bytes);
    }
    return status == TT_OK ? tt__barrier_near(c) : status;
}

/* Exchanges shards with other processes. The leader of each process sends and receives all messages of its
   process, a bounded number at a time. */
static tt_status tt__net_gather(const tt__collective *c)
{
    enum { REQUESTS = 4 * TT__RANKS };
    const size_t room = 2 * TT__STAGE / (size_t)c->all.count & ~(size_t)(TT__ALIGN - 1); /* bytes per shard */
    const size_t max = c->direct ? TT__NET_MESSAGE : room;
    const bool leads = c->rank == c->leader, waits = leads && !c->direct;
    tt__request r[REQUESTS + TT__NET_REQUESTS(2 * TT__STAGE)];
    tt__mail mail = tt__mail_of(c, r);
    const int stream = c->l->instr->stream;
    tt_status status = leads && c->direct ? tt__await_stream(c->group, c->rank, stream) : TT_OK;
    for (int k = 0; k < c->n; k++) {
        const tt__launch *l = &c->l[k];
        const int64_t item = (int64_t)tt_dtype_bytes(l->out[0].dtype), longest = tt__net_longest(l);
        tt__net_job job = {k, 0, (int64_t)max / item};
        for (; job.from < longest && status == TT_OK; job.from += job.max) {
            if (!c->direct) status = tt__net_stage(c, &job, room, false);
            if (waits && status == TT_OK) status = tt__await_stream(c->group, c->rank, stream);
            for (int m = 0; m < c->all.count && status == TT_OK && leads; m++) {
                const int own = c->low + m % c->local.count, process = tt__net_process(c, m / c->local.count);
                int64_t first, come = item * tt__net_shard(l, &job, m, &first);
                const int64_t go = item * tt__net_shard(l, &job, own, &first);
                if (m / c->local.count == c->own) continue;
                status = tt__net_receive(&mail, process, tt__net_begin(c, &job, m, room), (size_t)come);
                if (status == TT_OK)
                    status = tt__net_send(&mail, process, tt__net_begin(c, &job, own, room), (size_t)go);
            }
            if (status == TT_OK && c->direct && mail.count > REQUESTS - 2 * TT__RANKS)
                status = tt__net_first_there(&mail, mail.count / 2);
            if (status != TT_OK || c->direct) continue;
            status = tt__net_all_there(&mail);
            if (status == TT_OK) status = tt__barrier_near(c);
            if (status == TT_OK) status = tt__net_stage(c, &job, room, true);
        }
    }
    return status == TT_OK ? tt__net_all_there(&mail) : status;
}

/* Sends member 0's operand through a chain of processes, each of which passes it on to the next. */
static tt_status tt__net_broadcast(const tt__collective *c)
{
    const bool leads = c->rank == c->leader, waits = leads && !c->direct, last = c->own + 1 == c->processes;
    const size_t max = c->direct ? TT__NET_MESSAGE : TT__STAGE;
    const int stream = c->l->instr->stream;
    tt__request r[2][TT__NET_REQUESTS(TT__STAGE)];
    tt__mail in = tt__mail_of(c, r[0]), out = tt__mail_of(c, r[1]);
    tt_status status = leads && c->direct ? tt__await_stream(c->group, c->rank, stream) : TT_OK;
    for (int k = 0; k < c->n; k++) {
        const tt__launch *l = &c->l[k];
        const int64_t bytes = tt__elements(&l->in[0]) * (int64_t)tt_dtype_bytes(l->in[0].dtype);
        char *own = (char *)(c->own || c->me ? l->out[0].data : l->in[0].data);
        for (int64_t at = 0, m; at < bytes && status == TT_OK; at += m) {
            m = tt__min(bytes - at, (int64_t)max);
            char *data = c->direct ? own + at : (char *)c->group->stage[c->leader];
            if (c->me == 0) status = tt__net_copy(c->group, c->rank, l, data, (char *)l->in[0].data + at, m);
            if (status == TT_OK && waits) status = tt__await_stream(c->group, c->rank, stream);
            if (status == TT_OK && leads && c->own)
                status = tt__net_receive(&in, tt__net_process(c, c->own - 1), data, (size_t)m);
            if (status == TT_OK) status = tt__net_all_there(&in);
            if (status == TT_OK && leads && !last)
                status = tt__net_send(&out, tt__net_process(c, c->own + 1), data, (size_t)m);
            if (status == TT_OK && (!c->direct || out.count >= TT__RANKS)) status = tt__net_all_there(&out);
            if (c->direct) continue;
            if (status == TT_OK) status = tt__barrier_near(c);
            if (status == TT_OK && (c->me || l->out[0].data != l->in[0].data))
                status = tt__net_copy(c->group, c->rank, l, (char *)l->out[0].data + at, data, m);
            if (status == TT_OK) status = tt__barrier_near(c);
        }
    }
    return status == TT_OK ? tt__net_all_there(&out) : status;
}

/* Copies to this rank the shards that the leader of its process has received from other processes, and the
   shards of other ranks of its process. */
static tt_status tt__net_spread(const tt__collective *c)
{
    const bool all = tt__net_is(c->l, TT__OF_FIRST);
    for (int k = 0; k < c->n; k++) {
        tt__launch *l = &c->l[k];
        /* This rank owns the arrays peer_in and peer_out, so it may change them. */
        tt__mat *in = (tt__mat *)(uintptr_t)l->peer_in, *out = (tt__mat *)(uintptr_t)l->peer_out;
        const tt__mat *at = all && !c->own ? &in[c->low] : &out[c->low];
        for (int m = 0; m < c->all.count; m++) {
            int64_t first;
            if (m / c->local.count == c->own && !all) continue;
            tt__shard_of(l, &l->out[0], l->instr->move.root, m, &first);
            if (m != c->low) out[m].data = at->data;
            if (!all) in[m].data = tt__element(at, first);
        }
        if (all) out[c->low].data = at->data;
    }
    return tt__launch_phase(c, c->l, c->n);
}

/* Sends the operands of c->n collectives to the other member of a pair, which is in another process, or
   receives them from there. */
static tt_status tt__net_pair(const tt__collective *c)
{
    const tt__instr *i = c->l->instr;
    const tt__move *move = &i->move;
    const int from = c->all.first + move->from * c->all.stride, to = c->all.first + move->to * c->all.stride;
    const bool receives = c->me == move->to;
    const bool direct = c->group->kind->host || c->group->ctx->net->cuda_aware;
    const size_t max = direct ? TT__NET_MESSAGE : TT__STAGE;
    const int process = tt__process_of(c->group, receives ? from : to);
    tt__request r[TT__NET_REQUESTS(TT__STAGE)];
    tt__mail mail = tt__mail_of(c, r);
    tt_status status = direct ? tt__await_stream(c->group, c->rank, i->stream) : TT_OK;
    mail.tag = tt__pair_tag(from, to);
    for (int k = 0; k < c->n; k++) {
        const tt__launch *l = &c->l[k];
        const tt__mat *x = receives ? &l->out[0] : &l->in[0];
        const int64_t bytes = tt__elements(x) * (int64_t)tt_dtype_bytes(x->dtype);
        if (!receives) tt__net_must_send(c->group->ctx->net, (double)bytes);
        for (int64_t at = 0, m; at < bytes && status == TT_OK; at += m) {
            m = tt__min(bytes - at, (int64_t)max);
            char *own = (char *)x->data + at, *data = direct ? own : (char *)c->group->stage[c->rank];
            if (!receives) status = tt__net_copy(c->group, c->rank, l, data, own, m);
            if (status == TT_OK && !direct) status = tt__await_stream(c->group, c->rank, i->stream);
            if (status == TT_OK)
                status = tt__net_post(&mail, process, data, (size_t)m, TT__NET_MESSAGE, receives);
            if (status == TT_OK && (!direct || mail.count >= TT__RANKS)) status = tt__net_all_there(&mail);
            if (status == TT_OK && receives) status = tt__net_copy(c->group, c->rank, l, own, data, m);
        }
    }
    return status == TT_OK ? tt__net_all_there(&mail) : status;
}

/* Runs one phase of collectives whose members belong to several processes. */
static tt_status tt__net_phase(const tt__collective *c)
{
    tt_status status = TT_OK;
    for (int k = 0; k < c->n && c->rank == c->leader; k++)
        tt__net_must_send(c->group->ctx->net, tt__net_min(c, &c->l[k]));
    if (c->l->phase == TT__REDUCE_PHASE) return tt__net_reduce(c);
    status = tt__net_is(c->l, TT__OF_FIRST) ? tt__net_broadcast(c) : tt__net_gather(c);
    if (status == TT_OK && c->direct) status = tt__barrier_near(c);
    return status == TT_OK && c->direct ? tt__net_spread(c) : status;
}

/* Runs all phases of c->n collectives on a rank. The members of the process wait at a barrier before and
   after each phase. met: the members have just passed a barrier, so they do not wait before the first
   phase. */
static tt_status tt__run_collective(const tt__collective *c, bool met)
{
    const int phases = tt__rules_of(c->l->instr)->phases;
    const bool net = c->processes > 1, from_first = (phases & TT__OF_FIRST) && (phases & TT__SPREAD_PHASE);
    tt_status status = met ? TT_OK : tt__barrier_near(c);
    for (int phase = TT__REDUCE_PHASE; phase <= TT__SPREAD_PHASE && status == TT_OK; phase++) {
        if (!(phases & phase) || (net && from_first && phase == TT__REDUCE_PHASE)) continue;
        for (int k = 0; k < c->n; k++) c->l[k].phase = phase;
        if (net) status = tt__net_phase(c);
        else if (!c->no_peer) status = tt__launch_phase(c, c->l, c->n);
        for (int k = 0; k < c->n && c->no_peer && !net && status == TT_OK; k++)
            status = tt__launch_staged(c, &c->l[k]);
    }
    return status;
}
