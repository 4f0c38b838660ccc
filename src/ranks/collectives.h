#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/record.h"
#include "threads.h"
#include "processes.h"
#include "groups.h"

/* The members of a collective are the ranks that take part. The members in one process have consecutive
   numbers, and each process has the same number of members. Sums over members follow a binary tree, so that
   their bits do not depend on the processes. `grain` consecutive members, a power of two, form a node: the
   leaves of one subtree. Messages carry the sums of nodes. If the number of a process's members is a power of
   two, they form one node, and the process sends the minimum of bytes. */

/* One or more collectives of the same op that a rank runs together. */
typedef struct tt__collective {
    tt__device_group *group;
    tt__launch *l;          /* array of n launches */
    int n;
    tt__members all, local; /* all: all members; local: the members of this process or, in a pair, both
                               members */
    int rank, me, low;      /* rank: this rank; me: its member number; low: lowest member number in this
                               process */
    int processes, own;     /* processes: number of processes with members; own: number of this process among
                               them */
    int grain, nodes;       /* grain: number of consecutive members that form a node; nodes: number of nodes
                               of a process */
    int leader, tag;        /* leader: the rank that sends and receives for this process; tag: tag of its
                               messages */
    bool no_peer;             /* some ranks in `local` cannot load from one another's memory */
    bool direct;            /* messages begin and end in ranks' memory, not in staging memory on the host */
} tt__collective;

static bool tt__is_collective(const tt__instr *i) { return tt__rules_of(i)->phases != 0; }

/* Returns whether collective i exchanges data only between two of its members. */
static bool tt__is_pair(const tt__instr *i)
{
    return i->move.from != i->move.to && i->move.over != TT__OVER_TIED;
}

/* Returns whether a member's kernels cannot load from the memory of some other member. */
static bool tt__has_no_peer(const tt__device_group *c, tt__members m)
{
    for (int a = 0; a < m.count; a++)
        for (int b = 0; b < m.count; b++)
            if (c->no_peer[m.first + a * m.stride][m.first + b * m.stride]) return true;
    return false;
}

static tt__collective tt__collective_of(tt__device_group *group, int rank, tt__members all, int me,
                                        tt__over over)
{
    static const int tags[] = {0, 0, 1, 0, 2, 3}; /* the messages' tag for each value of tt__over */
    tt__collective c;
    int local = 0;
    memset(&c, 0, sizeof c);
    for (int k = 0; k < all.count; k++) local += tt__is_local(group, all.first + k * all.stride);
    c.group = group;
    c.rank = rank;
    c.me = me;
    c.low = me / local * local;
    c.processes = all.count / local;
    c.own = me / local;
    c.leader = all.first + c.low * all.stride;
    c.all = c.local = all;
    c.local.first = c.leader;
    c.local.count = local;
    c.grain = local & -local;
    c.nodes = local / c.grain;
    c.tag = TT__DATA_TAG + tags[over] * (int)TT__RANKS + all.first;
    c.no_peer = tt__has_no_peer(group, c.local);
    c.direct = group->kind->host || (group->ctx->net && group->ctx->net->cuda_aware && !c.no_peer);
    return c;
}

/* Makes a barrier of streams: `stream` of this rank's device waits for all work that the other members have
   issued on `stream` of their devices. On the CPU, launches are done when they return, so only the ranks'
   threads wait. */
static tt_status tt__sync(tt__device_group *c, int rank, tt__members members, int stream)
{
    const tt__backend *b = c->kind->backend;
    tt__device *d = c->device[rank];
    tt_status status = TT_OK;
    if (c->kind->host) return tt__barrier(c->rank_group, rank, members) ? TT_OK : TT_ERR_DEVICE;
    status = tt__device_status(c->ctx, c, rank, b->mark(d, stream, &c->event[rank]));
    if (status != TT_OK) return status;
    if (!tt__barrier(c->rank_group, rank, members)) return TT_ERR_DEVICE;
    for (int k = 0; k < members.count && status == TT_OK; k++) {
        const int other = members.first + k * members.stride;
        if (other != rank) status = b->after(d, stream, c->event[other]);
    }
    if (status != TT_OK) return tt__device_status(c->ctx, c, rank, status);
    return tt__barrier(c->rank_group, rank, members) ? TT_OK : TT_ERR_DEVICE; /* after this barrier, events
                                                                                 may be used anew */
}

static tt_status tt__barrier_near(const tt__collective *c)
{
    return tt__sync(c->group, c->rank, c->local, c->l->instr->stream);
}

/* Waits until a stream of the rank's device has done all its work, so that messages, or updates in the host's
   memory, can read the results. */
static tt_status tt__await_stream(tt__device_group *c, int rank, int stream)
{
    const tt__backend *b = c->kind->backend;
    if (c->kind->host) return TT_OK;
    tt_status status = b->mark(c->device[rank], stream, &c->event[rank]);
    if (status == TT_OK) status = b->after(c->device[rank], TT__HOST_STREAM, c->event[rank]);
    return tt__device_status(c->ctx, c, rank, status);
}

/* Launches one phase of n collectives on a rank, and then waits at a barrier of the process's members. */
static tt_status tt__launch_phase(const tt__collective *c, tt__launch *l, int n)
{
    tt_status status = c->group->kind->backend->launch(l, n);
    status = tt__device_status(c->group->ctx, c->group, c->rank, status);
    return status == TT_OK ? tt__barrier_near(c) : status;
}

/* Launches one phase of one collective on a rank, if some members cannot load from the memory of some others.
   The members copy their data to the host's memory, in parts, where the other members read them. */
static tt_status tt__launch_staged(const tt__collective *c, tt__launch *l)
{
    tt__device_group *group = c->group;
    void *staged[TT__RANKS];
    bool more = true;
    tt_status status = TT_OK;
    for (int k = 0; k < l->members; k++) {
        const int other = c->all.first + k * c->all.stride;
        staged[k] = other == c->rank || group->no_peer[c->rank][other] ? group->stage[other] : NULL;
    }
    l->staged = staged;
    l->max = (int64_t)(TT__STAGE / (size_t)l->members / tt_dtype_bytes(l->in[0].dtype)) & ~(int64_t)15;
    for (l->from = 0; more && status == TT_OK; l->from += l->max) {
        status = tt__device_status(group->ctx, group, c->rank, group->kind->backend->stage(l, &more));
        if (status == TT_OK) status = tt__barrier_near(c);
        if (status == TT_OK) status = tt__launch_phase(c, l, 1);
    }
    l->staged = NULL;
    return status;
}

/* ---- messages */

/* Returns the tag of messages from one rank to another. */
static int tt__pair_tag(int from, int to) { return TT__DATA_TAG + (4 + from) * (int)TT__RANKS + to; }

/* The messages of one instruction that are in flight. */
typedef struct tt__mail {
    const tt__device_group *group;
    const tt_tape *tape;
    const tt__instr *i;
    int tag, count;
    tt__request *r;         /* requests, one for each of `count` messages */
} tt__mail;

static tt__mail tt__mail_of(const tt__collective *c, tt__request *r)
{
    const tt__mail m = {c->group, c->l->tape, c->l->instr, c->tag, 0, r};
    return m;
}

/* Writes the op and the value of *m to `to` for an error message, such as "reduce 'd(w)'". */
static void tt__net_where(const tt__mail *m, char to[128])
{
    const tt__tape_value *x = &m->tape->values[m->i->in[0] ? m->i->in[0] : m->i->out[0]];
    snprintf(to, 128, "%s '%.96s'", tt__instr_name(m->i), x->name);
}

/* Fails because a message of a collective is late, or because another process or the transport has failed. */
static tt_status tt__net_late(const tt__mail *m, int late, const char *why)
{
    char where[128];
    tt__net *net = m->group->ctx->net;
    const bool own = late < 0 && !why && !tt__net_has_failed(net); /* a rank of this process failed */
    if (own) return TT_ERR_DEVICE;
    tt__net_where(m, where);
    return tt__net_waited(net, where, late, why);
}

/* Waits until all messages of *m have been sent or received. *m is then empty. */
static tt_status tt__net_all_there(tt__mail *m)
{
    tt__net *net = m->group->ctx->net;
    tt__rank_group *w = m->group->rank_group;
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
    for (int k = 0; k < n; k++)
        if (r[k].comes && r[k].done) memcpy(net->last_message[r[k].process], at, sizeof at);
    pthread_mutex_unlock(&net->mutex);
    return come ? TT_OK : tt__net_late(m, late, why);
}

/* Waits until the first n messages of *m have been sent or received. The other messages stay in flight. */
static tt_status tt__net_first_there(tt__mail *m, int n)
{
    tt__mail first = *m;
    first.count = n;
    tt_status status = tt__net_all_there(&first);
    m->count -= n;
    memmove(m->r, m->r + n, (size_t)m->count * sizeof *m->r);
    return status;
}

/* Begins to send `bytes` bytes or, if `comes`, to receive them, in messages of at most `max` bytes. Each
   message has a request in m->r. */
static tt_status tt__net_post(tt__mail *m, int process, void *data, size_t bytes, size_t max, bool comes)
{
    tt__net *n = m->group->ctx->net;
    const char *why = NULL;
    pthread_mutex_lock(&n->mutex);
    for (size_t at = 0, some; at < bytes && !why; at += some) {
        tt__request *r = &m->r[m->count++];
        some = bytes - at < max ? bytes - at : max;
        why = comes ? n->transport->receive(n, process, m->tag, (char *)data + at, some, r)
                    : n->transport->send(n, process, m->tag, (char *)data + at, some, r);
        r->comes = comes;
        if (!comes) n->sent += (double)some;
    }
    pthread_mutex_unlock(&n->mutex);
    return why ? tt__net_late(m, -1, why) : TT_OK;
}

/* Begins to send bytes, as messages of at most TT__NET_MESSAGE bytes. */
static tt_status tt__net_send(tt__mail *m, int process, void *data, size_t bytes)
{
    return tt__net_post(m, process, data, bytes, TT__NET_MESSAGE, false);
}

static tt_status tt__net_receive(tt__mail *m, int process, void *data, size_t bytes)
{
    return tt__net_post(m, process, data, bytes, TT__NET_MESSAGE, true);
}

/* Adds `bytes` to the bytes that this process must send with any method (tt__net.min). */
static void tt__net_must_send(tt__net *n, double bytes)
{
    pthread_mutex_lock(&n->mutex);
    n->min += bytes;
    pthread_mutex_unlock(&n->mutex);
}
