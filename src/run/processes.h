#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/record.h"
#include "../ops/linear/rules.h"
#include "../ops/attention/rules.h"
#include "../ranks/threads.h"
#include "../ranks/groups.h"
#include "../ranks/collectives.h"
#include "../ranks/net.h"
#include "../compile/program.h"
#include "ranks.h"
#include "inputs.h"
#include "collectives.h"

/* ------------------------------------------------------------------------------------------------- processes
   Counts the bytes that a plan sends between processes, and launches collectives. */

/* Returns the bytes that the ranks of this process send to other processes in a step with one full
   micro-batch on each data rank. Sets *min to the minimum that any method must send. */
static double tt__net_plan(const tt_program *head, double *min)
{
    const tt__device_group *group = head->settings.group;
    double bytes = *min = 0, some;
    for (int rank = group->first; rank < group->first + group->local && group->local < group->ranks; rank++) {
        const tt_program *p = tt__stage_of(head, rank);
        for (int k = 0; k < p->built.t->n_code; k++) {
            const tt__instr *i = &p->built.t->code[k];
            if (!tt__is_collective(i) || i->move.over == TT__OVER_SLOTS || i->slot > 1) continue;
            tt__collective c = tt__collective_on(p, rank, &i->move);
            const int pair = tt__is_pair(i) ? c.all.first + c.all.stride * i->move.to : rank;
            const bool alone = tt__is_pair(i) ? tt__is_local(group, pair) : c.processes == 1;
            tt__launch l;
            memset(&l, 0, sizeof l);
            l.instr = i;
            l.in[0] = tt__at_capacity(p->built.t, i->in[0]);
            l.out[0] = tt__at_capacity(p->built.t, i->out[0]);
            if (i->in[0]) l.in[0].data = &l; /* any address: NULL would mean that the operand is absent */
            l.members = l.present = c.all.count;
            l.me = c.me;
            c.l = &l;
            const int phases = tt__rules_of(i)->phases;
            const bool from_first = (phases & TT__OF_FIRST) && (phases & TT__SPREAD_PHASE);
            for (int phase = TT__REDUCE_PHASE; phase <= TT__SPREAD_PHASE && !alone; phase++) {
                if (!(phases & phase) || (from_first && phase == TT__REDUCE_PHASE)) continue;
                l.phase = phase;
                bytes += tt__net_sends(&c, &some);
                *min += some;
            }
        }
    }
    return bytes;
}

/* Launches n collectives of one op on a rank. met: their members have just passed a barrier. */
static tt_status tt__launch_collective(tt_program *p, int rank, tt__launch *l, int n, bool met)
{
    const tt__instr *i = l->instr;
    const tt__move *move = &i->move;
    tt__collective c = tt__collective_on(p, rank, move);
    const bool pair = tt__is_pair(i);
    bool net = c.processes > 1;
    c.l = l;
    c.n = n;
    if (pair && c.me != (i->out[0] ? move->to : move->from)) return TT_OK;
    if (pair) {
        const tt__members two = {c.all.first + c.all.stride * move->from,
                                 c.all.stride * (move->to - move->from), 2};
        net = !tt__is_here(p, two.first) || !tt__is_here(p, two.first + two.stride);
        c.local = two;
        c.no_peer = !net && tt__has_no_peer(c.group, two);
        c.processes = 1;
    }
    const bool staged = !c.group->kind->host && (net || c.no_peer);
    tt_status status = staged ? tt__after_staged(p, rank, i) : TT_OK;
    if (status != TT_OK) return status;
    return pair && net ? tt__net_pair(&c) : tt__run_collective(&c, met);
}

/* Sets the fields of *l to launch instruction i on a rank; *l has the fields of tt__launch_on. peers: memory
   for the operands and results of other ranks. */
static void tt__set_launch(tt_program *p, int rank, const tt__instr *i, tt__launch *l, tt__mat *peers)
{
    const tt__tape_value *y = &p->built.t->values[i->out[0]];
    l->instr = i;
    l->lists = tt__lists_of(p->built.t, i);
    for (int j = 0; j < TT__MAX_IN; j++) if (i->in[j]) l->in[j] = tt__resolve(p, rank, i->in[j]);
    for (int j = 0; j < TT__MAX_OUT; j++) {
        if (!i->out[j]) continue;
        l->out[j] = tt__resolve(p, rank, i->out[j]);
        l->add[j] = (i->add >> j & 1) || ((i->add_later >> j & 1) && p->rank[rank].now.later);
    }
    l->workspace = p->arena->memory[rank] + p->arena->persistent + i->workspace_place;
    if (i->on_host) {
        l->workspace = p->rank[rank].host + p->built.host_persistent + i->workspace_place;
        l->in[TT__RUN_IN].data = &p->head->run; /* the field `micro` is not set, but no update reads it */
        if (!p->settings.kind->host) l->device = p->settings.group->host[rank];
    }
    if (p->arena->tensor > 1) tt__set_tensor_rank(p, rank, l);
    if (y->part.unit)
        tt__shard(y->part.of, y->part.unit, y->part.root, tt__data_rank(p, rank), p->arena->data, &l->first);
    if (tt__is(i, TT__RMW) && y->part.split != TT__WHOLE) {
        const int64_t elements = y->part.unit ? y->part.of : y->shape.rows * y->shape.cols;
        l->first += rank % p->arena->tensor * ((elements + 7) / 8 * 8);
    }
    if (i->move.over) tt__set_members(p, rank, l, peers);
}
