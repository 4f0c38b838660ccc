#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../../tape/record.h"
#include "../record.h"
#include "../shapes.h"
#include "../layouts.h"
#include "../gradients.h"
#include "../scratch.h"
#include "../elementwise/rules.h"

/* ----------------------------------------------------------------------------------- memories and streams */

static const tt__rules tt__rules_COPY = {tt__shape_alike, tt__layout_alike, {NULL}, tt__no_bytes};
/* WAIT has no results, so that its shape rule and its layout rule decide nothing. */
static const tt__rules tt__rules_WAIT = {tt__shape_alike, tt__layout_alike, {NULL}, tt__no_bytes};

/* -------------------------------------------------------------------------------------------- collectives
   A collective (see tt__move) reads the operands of all members, each at the same place in its member's
   memory. Operands and results are contiguous and have the same dtype. A result may have the operand's
   storage or a part of it; a shard may be a view of the whole tensor. Sums are trees (ranks/threads.h) over
   the first `present` members: pairs of members are summed, then pairs of these sums, and so on. Each sum is
   computed in fp32 (in f64 for f64) and rounded to the dtype; `add` adds the last sum to the result. If no
   member is present, nothing is written. */

static bool tt__bad_result(tt_tape *t, const tt__instr *i, const char *expected)
{
    char what[256];
    return tt__tape_fail(t, TT_ERR_SHAPE, "%s: the result is %s, expected %s", tt__instr_name(i),
                         tt__describe(t, i->out[0], what, sizeof what), expected);
}

static bool tt__contiguous(const tt__tape_value *v) { return v->ld == v->shape.cols || v->shape.rows == 1; }

/* Fails unless operand and result are contiguous and have the same dtype. If `sums`, the dtype must be a
   float dtype or f64. */
static bool tt__moved(tt_tape *t, const tt__instr *i, bool sums)
{
    const tt__tape_value *x = &t->values[i->in[0]], *y = &t->values[i->out[0]];
    const bool number = tt__is_float(x->shape.dtype) || x->shape.dtype == TT__F64;
    if (sums && !number) return tt__bad(t, i, 0, "floats");
    if (!tt__contiguous(x)) return tt__bad(t, i, 0, "a contiguous matrix");
    if (!i->out[0]) return true;
    if (!tt__contiguous(y)) return tt__bad_result(t, i, "a contiguous matrix");
    if (y->shape.dtype != x->shape.dtype) return tt__bad_result(t, i, "the dtype of the operand");
    return i->move.reduce == TT__SUM || !(i->add | i->add_later) ||
           tt__bad_result(t, i, "a result that is written, not added to, for a maximum or minimum");
}

static bool tt__in_units(tt_tape *t, const tt__instr *i)
{
    return i->move.unit > 0 || tt__tape_fail(t, TT_ERR_SHAPE, "%s: the unit of its shards is not set",
                                             tt__instr_name(i));
}

/* Returns the shape of the largest shard of a tensor that is divided over the data-parallel ranks. */
static tt__shape tt__shard_shape(const tt_tape *t, tt_dtype dtype, const tt__part *part)
{
    const int64_t units = tt__ceil_div(part->of, part->unit);
    const int64_t max = part->unit * tt__ceil_div(units, t->data);
    const tt__shape shape = {dtype, 1, part->root ? part->of : tt__min(max, part->of), 0, 0};
    return shape;
}

/* Returns whether value `shard` can be a member's shard of value `whole`. A shard over data-parallel ranks is
   a range of elements (tt__part), a shard over tensor-parallel ranks is a range of rows. */
static bool tt__is_shard(const tt_tape *t, const tt__instr *i, int32_t shard, int32_t whole)
{
    const tt__tape_value *p = &t->values[shard], *w = &t->values[whole];
    const int64_t elements = w->shape.rows * w->shape.cols;
    if (i->move.over == TT__OVER_TENSOR)
        return p->shape.cols == w->shape.cols && p->shape.rows <= w->shape.rows &&
               i->move.unit % w->shape.cols == 0;
    if (p->part.unit != i->move.unit || p->part.root != i->move.root || p->part.of != elements) return false;
    const tt__shape shape = tt__shard_shape(t, p->shape.dtype, &p->part);
    return p->shape.rows == 1 && p->shape.cols == shape.cols && !p->shape.axis && !w->shape.axis;
}

static bool tt__shape_of_sum(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    return tt__shape_alike(t, i, out) && tt__moved(t, i, true);
}

static bool tt__shape_ALL_REDUCE(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    return tt__shape_of_sum(t, i, out) && tt__in_units(t, i);
}

static bool tt__shape_REDUCE_SCATTER(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = t->values[i->out[0]].shape;
    if (!tt__moved(t, i, true) || !tt__in_units(t, i)) return false;
    return tt__is_shard(t, i, i->out[0], i->in[0]) || tt__bad_result(t, i, "a shard of the operand");
}

static bool tt__shape_ALL_GATHER(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = t->values[i->out[0]].shape;
    if (!tt__moved(t, i, false) || !tt__in_units(t, i)) return false;
    return tt__is_shard(t, i, i->in[0], i->out[0]) || tt__bad(t, i, 0, "a shard of the result");
}

static bool tt__shape_BROADCAST(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    return tt__shape_alike(t, i, out) && tt__moved(t, i, false) && tt__in_units(t, i);
}

static bool tt__shape_RECV(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__tape_value *y = &t->values[i->out[0]];
    out[0] = y->shape;
    if (!i->in[0]) return tt__contiguous(y) || tt__bad_result(t, i, "a contiguous matrix");
    return tt__shape_alike(t, i, out) && tt__moved(t, i, false);
}

static bool tt__shape_SEND(tt_tape *t, const tt__instr *i, tt__shape *out) /* SEND has no result */
{
    (void)out;
    return tt__moved(t, i, false);
}

/* The layout rule of collectives. Over tensor-parallel ranks a collective changes the layout; over other
   ranks it keeps the layout. */
static bool tt__layout_of_move(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    out[0] = i->in[0] ? in[0] : t->values[i->out[0]].part.split;
    if (i->move.over != TT__OVER_TENSOR) return true;
    out[0] = i->op == TT__OP_REDUCE_SCATTER ? TT__ROWS : TT__WHOLE;
    if (i->op == TT__OP_REDUCE_SCATTER || i->op == TT__OP_ALL_REDUCE) return in[0] == TT__PARTIAL;
    return i->op == TT__OP_ALL_GATHER && in[0] == TT__ROWS;
}

/* Emits the backward of a sum over the tensor-parallel ranks: passes on the gradient of the sum, which each
   rank has whole. */
static void tt__backward_ALL_REDUCE(tt__builder *b, const tt__instr *f, int32_t g)
{
    tt__grad_pass(b, g, f->in[0], true);
}

static void tt__backward_REDUCE_SCATTER(tt__builder *b, const tt__instr *f, int32_t g)
{
    tt__emit_move(b, TT__OP_ALL_GATHER, f, g);
    tt__grad_into(b, 0, f->in[0]);
}

/* Emits the backward of a gather over tensor-parallel ranks: each rank takes its rows of the whole
   gradient. */
static void tt__backward_ALL_GATHER(tt__builder *b, const tt__instr *f, int32_t g)
{
    tt_tape *t = b->t;
    const tt__tape_value x = t->values[f->in[0]];
    const int32_t own = tt__new_view(t, g, &x.shape, 0, x.shape.cols, t->values[g].name);
    if (!(b->ok = own != 0)) return;
    t->values[own].part = x.part;
    tt__grad_pass(b, own, f->in[0], false);
}

/* Returns the number of elements that a member must load if the tensor is divided into n equal shards, one
   for each of n members. In a sum, a member loads its own shard from the n - 1 other members; in a gather, it
   loads the shards of the n - 1 other members. No algorithm moves less (Patarasuk, Yuan: "Bandwidth optimal
   all-reduce algorithms for clusters of workstations", 2009). With a root, this does not hold: member 0 alone
   sums, and each other member loads the whole tensor. */

static double tt__share(int64_t elements, int members)
{
    return (double)elements * (members - 1) / members;
}

static tt__loads tt__loads_REDUCE_SCATTER(const tt__move *m, int64_t elements, int me, int members)
{
    int64_t first, n = tt__shard(elements, m->unit, m->root, me, members, &first);
    const tt__loads loads = {n * (members - 1), tt__share(elements, members)};
    const tt__loads of_root = {loads.done, (double)loads.done};
    return m->root ? of_root : loads;
}

static tt__loads tt__loads_ALL_GATHER(const tt__move *m, int64_t elements, int me, int members)
{
    int64_t first, n = tt__shard(elements, m->unit, m->root, me, members, &first);
    const tt__loads loads = {elements - n, tt__share(elements, members)};
    const tt__loads of_root = {loads.done, (double)loads.done};
    return m->root ? of_root : loads;
}

static tt__loads tt__loads_ALL_REDUCE(const tt__move *m, int64_t elements, int me, int members)
{
    tt__move even = *m;
    even.root = false;
    const tt__loads sums = tt__loads_REDUCE_SCATTER(&even, elements, me, members);
    const tt__loads rest = tt__loads_ALL_GATHER(&even, elements, me, members);
    const tt__loads both = {sums.done + rest.done, sums.min + rest.min};
    return both;
}

static tt__loads tt__loads_BROADCAST(const tt__move *m, int64_t elements, int me, int members)
{
    const tt__loads loads = {me ? elements : 0, me ? (double)elements : 0};
    (void)m;
    (void)members;
    return loads;
}

static tt__loads tt__loads_RECV(const tt__move *m, int64_t elements, int me, int members)
{
    const int64_t n = me == m->to && m->from != m->to ? elements : 0;
    const tt__loads loads = {n, (double)n};
    (void)members;
    return loads;
}

#define TT__COLLECTIVE(OP, shape, backward, phases, loads) \
    static const tt__rules tt__rules_##OP = {shape, tt__layout_of_move, {backward}, tt__no_bytes, NULL, \
                                             NULL, NULL, NULL, NULL, phases, loads}
TT__COLLECTIVE(ALL_REDUCE, tt__shape_ALL_REDUCE, tt__backward_ALL_REDUCE,
               TT__REDUCE_PHASE | TT__SPREAD_PHASE, tt__loads_ALL_REDUCE);
TT__COLLECTIVE(REDUCE_SCATTER, tt__shape_REDUCE_SCATTER, tt__backward_REDUCE_SCATTER,
               TT__REDUCE_PHASE | TT__PIECES_OUT, tt__loads_REDUCE_SCATTER);
TT__COLLECTIVE(ALL_GATHER, tt__shape_ALL_GATHER, tt__backward_ALL_GATHER, TT__SPREAD_PHASE | TT__PIECES_IN,
               tt__loads_ALL_GATHER);
TT__COLLECTIVE(BROADCAST, tt__shape_BROADCAST, NULL, TT__REDUCE_PHASE | TT__SPREAD_PHASE | TT__OF_FIRST,
               tt__loads_BROADCAST);
TT__COLLECTIVE(SEND, tt__shape_SEND, NULL, TT__SPREAD_PHASE, NULL);
TT__COLLECTIVE(RECV, tt__shape_RECV, NULL, TT__SPREAD_PHASE, tt__loads_RECV);
TT__COLLECTIVE(SUM_SLOTS, tt__shape_of_sum, NULL, 0, NULL); /* SUM_SLOTS reads only the rank's own memory */
