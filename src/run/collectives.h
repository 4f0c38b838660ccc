#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/record.h"
#include "../ranks/threads.h"
#include "../context/memory.h"
#include "../context/devices.h"
#include "../compile/program.h"
#include "ranks.h"
#include "inputs.h"

/* ---- collectives ---- */

static bool tt__is_collective(const tt__instr *i) { return tt__rules_of(i)->phases != 0; }

/* Waits until all that the members have begun before on a stream is done, as far as that of this rank's
   device goes. */
static tt_status tt__sync(tt_program *p, int rank, tt__members members, int stream)
{
    const tt__crew *c = p->settings.crew;
    const tt__backend *b = c->kind->backend;
    tt__device *d = c->device[rank];
    tt_status status = TT_OK;
    if (c->kind->host) return tt__meet(c->world, rank, members) ? TT_OK : TT_ERR_DEVICE;
    status = tt__device_status(p->ctx, c, rank, b->mark(d, stream, &p->rank[rank].event));
    if (status != TT_OK) return status;
    if (!tt__meet(c->world, rank, members)) return TT_ERR_DEVICE;
    for (int k = 0; k < members.count && status == TT_OK; k++) {
        const int other = members.first + k * members.stride;
        if (other != rank) status = b->after(d, stream, p->rank[other].event);
    }
    if (status != TT_OK) return tt__device_status(p->ctx, c, rank, status);
    return tt__meet(c->world, rank, members) ? TT_OK : TT_ERR_DEVICE; /* events may be marked again */
}

/* How many members, from the first on, have something to add. */
static int tt__present(const tt_program *p, const tt__instr *i, int members)
{
    if (i->move.over == TT__OVER_SLOTS) return tt__slots_used(p, i->segment);
    if (i->move.over != TT__OVER_DATA) return members;
    return i->segment == TT__EACH_MICRO ? p->present : i->slot ? p->in_slot[i->slot - 1] : members;
}

/* Where a rank of another stage has what is `own` here and value v there: of its size, as ranks at the same
   place of their stages have the same rows. */
static tt__mat tt__on_stage(const tt_program *q, int other, int32_t v, tt__mat own)
{
    const tt__value *x = &q->built.t->values[v], *base = &q->built.t->values[x->base];
    if (!v) return own;
    own.data = tt__storage_memory(q, other, base);
    if (own.data) own.data = (char *)own.data + (size_t)x->offset * tt_dtype_bytes(own.dtype);
    if (x->parted) tt__resolve_part(q, other, v, &own);
    return own;
}

/* The operand and the result of instruction i's counterpart on a rank of another stage. What goes from one to
   the other has the same number there; what is summed at the step's end is found by its parameter. */
static void tt__set_stage_member(const tt_program *p, int rank, int other, const tt__instr *i, tt__mat *in,
                                 tt__mat *out)
{
    tt_program room;
    const tt_program *q = tt__rank_view(p, other, &room);
    const tt_tape *t = q->built.t;
    const tt__mat x = tt__resolve(p, rank, i->in[0] ? i->in[0] : i->out[0]);
    int32_t from = i->in[0] ? 0 : i->out[0], to = from;
    for (int k = tt__segment_first(t, TT__EACH_STEP); k < t->n_code && i->in[0] && i->out[0]; k++) {
        const tt__instr *j = &t->code[k];
        const int32_t param = p->built.t->values[i->in[0]].param;
        if (j->op != i->op || j->move.over != i->move.over || t->values[j->in[0]].param != param) continue;
        from = j->in[0];
        to = j->out[0];
    }
    *in = tt__on_stage(q, other, from, x);
    *out = tt__on_stage(q, other, to, x);
}

/* Fills in what a launch says of members: other ranks, or the slots of the operand. */
static void tt__set_members(tt_program *p, int rank, tt__launch *l, tt__mat *peers)
{
    const tt__instr *i = l->instr;
    const bool slots = i->move.over == TT__OVER_SLOTS;
    tt__members m = {0, 1, tt__slots(p)};
    l->me = 0;
    if (!slots) m = tt__members_of(p, rank, &i->move, &l->me);
    l->members = m.count;
    l->present = tt__present(p, i, m.count);
    l->peer_in = peers;
    l->peer_out = peers + m.count;
    const bool stages = i->move.over == TT__OVER_STAGES || i->move.over == TT__OVER_TIED;
    for (int k = 0; k < m.count; k++) {
        const int other = slots ? rank : m.first + k * m.stride;
        if (stages) {
            tt__set_stage_member(p, rank, other, i, &peers[k], &peers[m.count + k]);
            continue;
        }
        peers[k] = tt__resolve(p, other, i->in[0]);
        peers[m.count + k] = tt__resolve(p, other, i->out[0]);
        const tt__value *base = &p->built.t->values[p->built.t->values[i->in[0]].base];
        if (slots) peers[k].data = (char *)l->in[0].data + (size_t)k * tt__slot_bytes(base);
    }
}

/* Runs a phase of n collectives on a rank. */
static tt_status tt__launch_phase(tt_program *p, int rank, tt__launch *l, int n, tt__members members)
{
    const tt__crew *c = p->settings.crew;
    tt_status status = tt__device_status(p->ctx, c, rank, c->kind->backend->launch(l, n));
    return status == TT_OK ? tt__sync(p, rank, members, l->instr->stream) : status;
}

/* A collective of computation uses the same memory of the host as those of the other stream. */
static tt_status tt__after_staged(tt_program *p, int rank, const tt__instr *i)
{
    const tt__rank *r = &p->rank[rank];
    const tt__crew *c = p->settings.crew;
    tt_status status = TT_OK;
    for (int k = 0; k < p->built.under_way && status == TT_OK && !i->stream; k++) {
        if (!r->started[k].at || !tt__is_collective(&p->built.t->code[r->started[k].at - 1])) continue;
        status = c->kind->backend->after(c->device[rank], i->stream, r->started[k].done);
    }
    return tt__device_status(p->ctx, c, rank, status);
}

/* The same of one, where some members cannot load from others' memory: piece by piece of what goes through
   the host's. */
static tt_status tt__launch_staged(tt_program *p, int rank, tt__launch *l, tt__members members)
{
    const tt__crew *c = p->settings.crew;
    void *staged[TT__RANKS];
    bool more = true;
    tt_status status = tt__after_staged(p, rank, l->instr);
    const tt__members all = tt__members_of(p, rank, &l->instr->move, &l->me);
    for (int k = 0; k < l->members; k++) {
        const int other = all.first + k * all.stride;
        staged[k] = other == rank || c->apart[rank][other] ? c->stage[other] : NULL;
    }
    l->staged = staged;
    l->most = (int64_t)(TT__STAGE / (size_t)l->members / tt_dtype_bytes(l->in[0].dtype)) & ~(int64_t)15;
    for (l->from = 0; more && status == TT_OK; l->from += l->most) {
        status = tt__device_status(p->ctx, c, rank, c->kind->backend->stage(l, &more));
        if (status == TT_OK) status = tt__sync(p, rank, members, l->instr->stream);
        if (status == TT_OK) status = tt__launch_phase(p, rank, l, 1, members);
    }
    l->staged = NULL;
    return status;
}

/* Can a member not load from another's memory? */
static bool tt__is_apart(const tt__crew *c, tt__members m)
{
    for (int a = 0; a < m.count; a++)
        for (int b = 0; b < m.count; b++)
            if (c->apart[m.first + a * m.stride][m.first + b * m.stride]) return true;
    return false;
}
