#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/cpu_launch.h"
#include "../ranks/threads.h"
#include "../ranks/processes.h"
#include "../ranks/groups.h"
#include "../ranks/collectives.h"
#include "../ranks/net.h"
#include "../context/cpu.h"
#include "../compile/program.h"
#include "ranks.h"
#include "memory.h"

/* ---- values that pass from one stage of a pipeline to the next */

/* Sends a value to rank `other` of a stage in another process, or receives one. A SEND does not wait for its
   messages; a RECV does. Values in a device's memory go through the host's memory. way: 0 if the value moves
   towards the last stage, 1 if towards the first. */
static tt_status tt__pass_over_net(tt_program *p, int rank, const tt__launch *l, int other, int way)
{
    const bool receives = l->instr->out[0] != 0;
    const tt__mat *x = receives ? &l->out[0] : &l->in[0];
    const size_t bytes = (size_t)tt__elements(x) * tt_dtype_bytes(x->dtype), max = (size_t)1 << 30;
    const int from = receives ? other : rank, to = receives ? rank : other;
    const int process = tt__process_of(p->settings.group, other), tag = tt__pair_tag(from, to);
    const int64_t turn = p->rank[rank].now.round % p->settings.in_flight;
    tt__passed *own = &p->rank[rank].passed[turn];
    tt__request part[TT__PARTS];
    tt__mail mail = {p->settings.group, l->tape, l->instr, tag, 0, receives ? part : own->part[way]};
    const bool host = p->settings.kind->host;
    tt_status status = TT_OK;
    char *data = (char *)x->data;
    if (bytes > max * TT__PARTS)
        return tt__fail(p->ctx, TT_ERR_UNSUPPORTED, "%s: %zu bytes are too many for one transfer between "
                        "processes: use smaller micro-batches", tt__instr_name(l->instr), bytes);
    if (!host && receives) data = p->rank[rank].receives[way];
    if (!host && !receives) {
        const size_t each = tt__message_bytes(p, l->instr) / (size_t)p->settings.in_flight;
        data = p->rank[rank].sends[way] + (size_t)turn * each;
        status = tt__net_copy(mail.group, rank, l, data, x->data, (int64_t)bytes);
    }
    if (status == TT_OK) status = tt__await_stream(p->settings.group, rank, l->instr->stream);
    if (status == TT_OK) status = tt__net_post(&mail, process, data, bytes, max, receives);
    if (!receives) tt__net_must_send(p->ctx->net, (double)bytes);
    if (!receives) own->parts[way] = mail.count;
    if (receives && status == TT_OK) status = tt__net_all_there(&mail);
    if (receives && status == TT_OK)
        status = tt__net_copy(mail.group, rank, l, x->data, data, (int64_t)bytes);
    return status;
}

/* Lets a rank's messages in flight make progress: some MPI libraries transfer data only while they are
   called. */
static void tt__go_on_passing(const tt_program *p, int rank)
{
    tt__net *n = p->ctx->net;
    for (int k = 0; k < 2 * p->settings.in_flight && n; k++) {
        tt__passed *x = &p->rank[rank].passed[k / 2];
        if (!x->parts[k % 2]) continue;
        pthread_mutex_lock(&n->mutex);
        for (int j = 0; j < x->parts[k % 2]; j++) n->transport->test(n, &x->part[k % 2][j]);
        pthread_mutex_unlock(&n->mutex);
    }
}

/* Waits until this rank has sent its messages of micro-batch number `round` to the next stage (way = 0) or to
   the stage before (way = 1). */
static tt_status tt__await_passed(tt_program *p, int rank, int way, int64_t round)
{
    tt__passed *x = &p->rank[rank].passed[round % p->settings.in_flight];
    const tt__instr *i = &p->built.t->code[p->built.send[way] - 1];
    tt__mail mail = {p->settings.group, p->built.t, i, 0, x->parts[way], x->part[way]};
    x->parts[way] = 0;
    return tt__net_all_there(&mail);
}

/* Runs a SEND or RECV between stages. A SEND tells the other stage that its operand is ready, and does not
   wait. A RECV waits for the SEND and copies the SEND's operand. */
static tt_status tt__pass_on(tt_program *p, int rank, tt__launch *l)
{
    const tt__device_group *c = p->settings.group;
    const tt__backend *b = c->kind->backend;
    tt__device *d = c->device[rank];
    const int64_t round = p->rank[rank].now.round;
    int way;
    const int other = tt__neighbour(p, rank, l->instr, &way);
    if (!tt__is_here(p, other)) return tt__pass_over_net(p, rank, l, other, way);
    tt__passed *own = &p->rank[rank].passed[round % p->settings.in_flight];
    const tt__passed *theirs = &p->rank[other].passed[round % tt__stage_of(p, other)->settings.in_flight];
    tt_status status = TT_OK;
    if (!l->instr->out[0]) {
        status = b->mark(d, TT__COMPUTE_STREAM, &own->sent[way]);
        if (status == TT_OK) tt__count_on(c->rank_group, &c->rank_group->sent[rank][way]);
        return tt__device_status(p->ctx, c, rank, status);
    }
    if (!tt__wait_for(c->rank_group, rank, other, &c->rank_group->sent[other][way], (uint64_t)round + 1))
        return TT_ERR_DEVICE;
    l->phase = TT__SPREAD_PHASE;
    status = b->after(d, l->instr->stream, theirs->sent[way]);
    if (status == TT_OK) status = b->launch(l, 1);
    if (status == TT_OK) status = b->mark(d, l->instr->stream, &own->taken[way]);
    if (status == TT_OK) tt__count_on(c->rank_group, &c->rank_group->taken[rank][way]);
    return tt__device_status(p->ctx, c, rank, status);
}

/* Before a segment overwrites a value that another stage receives, waits until that stage has a copy. */
static tt_status tt__await_taken(tt_program *p, int rank, tt__segment segment)
{
    const tt__device_group *c = p->settings.group;
    const tt__backend *b = c->kind->backend;
    const int64_t round = p->rank[rank].now.round;
    tt_status status = TT_OK;
    for (int k = 0; k < 2 && status == TT_OK; k++) {
        if (!p->built.send[k] || p->built.sends_from[k] != segment) continue;
        const tt__instr *i = &p->built.t->code[p->built.send[k] - 1];
        const int32_t copies = p->built.t->values[p->built.t->values[i->in[0]].base].copies;
        int way;
        const int other = tt__neighbour(p, rank, i, &way);
        const int theirs = tt__stage_of(p, other)->settings.in_flight;
        if (!tt__is_here(p, other)) {
            if (round >= copies) status = tt__await_passed(p, rank, way, round - copies);
            continue;
        }
        if (round >= copies && !tt__wait_for(c->rank_group, rank, other, &c->rank_group->taken[other][way],
                                             (uint64_t)(round + 1 - copies)))
            return TT_ERR_DEVICE;
        for (int m = 0; m < theirs && !c->kind->host && status == TT_OK; m++)
            status = b->after(c->device[rank], TT__COMPUTE_STREAM, p->rank[other].passed[m].taken[way]);
    }
    return tt__device_status(p->ctx, c, rank, status);
}

/* Returns whether m is present but has no elements, as a shard may be. */
static bool tt__is_empty(const tt__mat *m) { return m->data && m->rows * m->cols == 0; }

/* Runs an instruction whose operands have no elements. Results that have elements are then sums over no rows:
   they become 0, unless the instruction adds to them. */
static tt_status tt__sum_nothing(tt_program *p, int rank, const tt__launch *l)
{
    tt_status status = TT_OK;
    for (int j = 0; j < TT__MAX_OUT && status == TT_OK; j++) {
        const tt__mat *y = &l->out[j];
        const size_t bytes = (size_t)(y->rows * y->cols) * tt_dtype_bytes(y->dtype);
        if (!y->data || !bytes || l->add[j]) continue;
        status = p->settings.kind->backend->fill(l->device, y->data, 0, bytes);
    }
    return tt__device_status(p->ctx, p->settings.group, rank, status);
}

/* Launches n instructions together. None of the instructions is a collective. The instructions run on the
   device or, if tt__instr.on_host, on the CPU once the device has computed their operands. */
static tt_status tt__launch_alone(tt_program *p, int rank, const tt__launch *l, int n)
{
    const bool on_host = l->instr->on_host;
    tt_status status = on_host ? tt__await_stream(p->settings.group, rank, TT__COMPUTE_STREAM) : TT_OK;
    if (status != TT_OK) return status;
    if (on_host) return tt__cpu_launch(l, n);
    return tt__device_status(p->ctx, p->settings.group, rank, p->settings.kind->backend->launch(l, n));
}
