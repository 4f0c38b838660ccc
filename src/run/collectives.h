#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ranks/threads.h"
#include "../ranks/groups.h"
#include "../ranks/collectives.h"
#include "../compile/program.h"
#include "ranks.h"
#include "inputs.h"

/* ---- collectives ---- */

/* Returns how many members contribute data to collective i. The members that contribute are always the first
   ones. */
static int tt__present(const tt_program *p, int rank, const tt__instr *i, int members)
{
    const tt__now *now = &p->rank[rank].now;
    if (i->move.over == TT__OVER_SLOTS) return tt__slots_used(p, now->round, i->segment);
    if (i->move.over != TT__OVER_DATA) return members;
    return i->segment == TT__EACH_MICRO ? now->present : i->slot ? p->head->in_slot[i->slot - 1] : members;
}

/* Returns the matrix of value v of program q, another stage, on rank `other`. The matrix has the size of
   `own`, this rank's matrix, because ranks at the same position in their stages have the same numbers of
   rows. Returns `own` if v is 0. */
static tt__mat tt__on_stage(const tt_program *q, const tt__now *now, int other, int32_t v, tt__mat own)
{
    const tt__tape_value *x = &q->built.t->values[v], *base = &q->built.t->values[x->base];
    if (!v) return own;
    own.data = tt__storage_memory(q, other, base);
    if (own.data) own.data = (char *)own.data + (size_t)x->offset * tt_dtype_bytes(own.dtype);
    if (x->parted) tt__resolve_part(q, now, other, v, &own);
    return own;
}

/* Finds the operand *in and the result *out that rank `other`, of another stage, has in the collective of
   instruction i. A value that passes between stages has the same number in both tapes. The operand of a sum
   at the end of a step is found by its parameter. */
static void tt__set_stage_member(const tt_program *p, int rank, int other, const tt__instr *i, tt__mat *in,
                                 tt__mat *out)
{
    const tt_program *q = tt__stage_of(p, other);
    const tt_tape *t = q->built.t;
    const tt__now *now = &p->rank[rank].now;
    const tt__mat x = tt__resolve(p, rank, i->in[0] ? i->in[0] : i->out[0]);
    int32_t from = i->in[0] ? 0 : i->out[0], to = from;
    for (int k = tt__segment_first(t, TT__EACH_STEP); k < t->n_code && i->in[0] && i->out[0]; k++) {
        const tt__instr *j = &t->code[k];
        const int32_t param = p->built.t->values[i->in[0]].param;
        if (j->op != i->op || j->move.over != i->move.over || t->values[j->in[0]].param != param) continue;
        from = j->in[0];
        to = j->out[0];
    }
    *in = tt__on_stage(q, now, other, from, x);
    *out = tt__on_stage(q, now, other, to, x);
}

/* Sets the fields of *l that describe the members of a collective: other ranks or, for a sum of slots, the
   slots of the operand. */
static void tt__set_members(tt_program *p, int rank, tt__launch *l, tt__mat *peers)
{
    const tt__instr *i = l->instr;
    const bool slots = i->move.over == TT__OVER_SLOTS;
    tt__members m = {0, 1, tt__slots(p)};
    l->me = 0;
    if (!slots) m = tt__members_of(p, rank, &i->move, &l->me);
    l->members = m.count;
    l->present = tt__present(p, rank, i, m.count);
    l->peer_in = peers;
    l->peer_out = peers + m.count;
    const bool stages = i->move.over == TT__OVER_STAGES || i->move.over == TT__OVER_TIED;
    for (int k = 0; k < m.count; k++) {
        const int other = slots ? rank : m.first + k * m.stride;
        if (stages) {
            tt__set_stage_member(p, rank, other, i, &peers[k], &peers[m.count + k]);
            continue;
        }
        peers[k] = tt__resolve_in(p, &p->rank[rank].now, other, i->in[0]);
        peers[m.count + k] = tt__resolve_in(p, &p->rank[rank].now, other, i->out[0]);
        const tt__tape_value *base = &p->built.t->values[p->built.t->values[i->in[0]].base];
        if (slots) peers[k].data = (char *)l->in[0].data + (size_t)k * tt__slot_bytes(base);
    }
}

/* Makes a collective on the computation stream wait for collectives in flight on other streams, because all
   collectives use the same staging memory on the host. */
static tt_status tt__after_staged(tt_program *p, int rank, const tt__instr *i)
{
    const tt__rank *r = &p->rank[rank];
    const tt__device_group *c = p->settings.group;
    tt_status status = TT_OK;
    for (int k = 0; k < p->built.in_flight && status == TT_OK && !i->stream; k++) {
        if (!r->started[k].at || !tt__is_collective(&p->built.t->code[r->started[k].at - 1])) continue;
        status = c->kind->backend->after(c->device[rank], i->stream, r->started[k].done);
    }
    return tt__device_status(p->ctx, c, rank, status);
}

static tt__collective tt__collective_on(const tt_program *p, int rank, const tt__move *move)
{
    int me;
    const tt__members all = tt__members_of(p, rank, move, &me);
    return tt__collective_of(p->settings.group, rank, all, me, move->over);
}
