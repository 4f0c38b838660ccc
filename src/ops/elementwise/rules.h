#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../../tape/record.h"
#include "../../tape/edit.h"
#include "../record.h"
#include "../shapes.h"
#include "../layouts.h"
#include "../gradients.h"
#include "../scratch.h"
#include "../linear/rules.h"

/* --------------------------------------------------------------------------------------------- activation */

static tt_value tt__activation(tt_tape *t, tt_value x, int act)
{
    tt__instr i = tt__new_instr(TT__OP_ACTIVATION);
    i.attr.act = act;
    return tt__record(t, i, "v", x);
}

#define TT__RECORDER(ACT, function, by_result) \
    tt_value function(tt_tape *t, tt_value x) { return tt__activation(t, x, TT__ACT_##ACT); }
TT__ACTS(TT__RECORDER)
#undef TT__RECORDER

static void tt__backward_ACTIVATION(tt__builder *b, const tt__instr *f, int32_t g)
{
    const char *reads = tt__act_by_result(f->attr.act) ? "gA" : "g0";
    tt__emit_gradient(b, f, g, TT__OP_ACTIVATION_BACKWARD, reads, "0");
}

/* Returns the number of the instruction that computes v as its out[0] and can be merged with the reader of
   v. Returns -1 if v has several readers, or if v is not the out[0] of an instruction. */
static int tt__sole_producer(const tt_tape *t, int32_t v, int32_t root)
{
    int at = tt__only_use(t, v, root) ? tt__producer(t, v) : -1;
    return at >= 0 && t->code[at].out[0] == v ? at : -1;
}

/* Merges activation k with the product that computes its operand. The merged instruction's out[1] is the
   product before the activation, which GELU and SiLU save; pruning drops out[1] if nothing reads it. */
static void tt__fuse_ACTIVATION(tt_tape *t, int k, int32_t root)
{
    int at = tt__sole_producer(t, t->code[k].in[0], root);
    if (at < 0) return;
    tt__instr merged = t->code[at];
    if (!tt__is(&merged, TT__ACTIVATES) || merged.attr.act || merged.in[tt__residual(&merged)]) return;
    merged.attr.act = t->code[k].attr.act;
    merged.out[1] = merged.out[0];
    tt__merge(t, at, k, merged);
}

static const tt__rules tt__rules_ACTIVATION = {tt__shape_elementwise, tt__layout_alike,
    {tt__backward_ACTIVATION}, NULL, NULL, NULL, tt__fuse_ACTIVATION};

/* Merges instruction k, the backward of an activation, with the product that computes its operand dy, so that
   dy itself is never stored. */
static void tt__fuse_ACTIVATION_BACKWARD(tt_tape *t, int k, int32_t root)
{
    int at = tt__sole_producer(t, t->code[k].in[0], root);
    if (at < 0 || t->code[at].op != TT__OP_LINEAR_DX || t->code[at].in[2] || !tt__may_wait(t, at, k)) return;
    tt__instr merged = t->code[at];
    merged.attr.act = t->code[k].attr.act;
    merged.in[2] = t->code[k].in[1];
    tt__merge(t, at, k, merged);
}

static const tt__rules tt__rules_ACTIVATION_BACKWARD = {tt__shape_of_two, tt__layout_alike, {NULL}, NULL,
    NULL, NULL, NULL, tt__fuse_ACTIVATION_BACKWARD};

/* ---------------------------------------------------------------------------------------------------- add */

tt_value tt_add(tt_tape *t, tt_value a, tt_value b)
{
    const bool both = tt_value_rows(t, a) && tt_value_rows(t, b) == 1; /* without a or b, tt__record fails */
    const bool row = both && !t->values[b.id].shape.axis &&
                     !tt__same_rows(&t->values[a.id].shape, &t->values[b.id].shape);
    return tt__record(t, tt__new_instr(row ? TT__OP_ADD_ROW : TT__OP_ADD), "vv", a, b);
}

static void tt__backward_ADD(tt__builder *b, const tt__instr *f, int32_t g)
{
    const tt__tape_value *v = b->t->values;
    tt_dtype dtype = v[g].shape.dtype;
    int take = v[f->in[0]].shape.dtype != dtype && v[f->in[1]].shape.dtype == dtype;
    tt__grad_pass(b, g, f->in[1 - take], false); /* must come first, because after the next call g may be the
                                                    gradient of in[take] */
    tt__grad_pass(b, g, f->in[take], true);
}

/* Merges addition k with the instruction that computes one operand of the addition. The merged instruction
   then adds the other operand to its result. */
static void tt__fuse_ADD(tt_tape *t, int k, int32_t root)
{
    for (int side = 0; side < 2; side++) {
        int at = tt__sole_producer(t, t->code[k].in[side], root);
        int slot = at >= 0 ? tt__residual(&t->code[at]) : 0;
        if (!slot || t->code[at].in[slot] || t->code[at].attr.act) continue;
        tt__instr merged = t->code[at];
        merged.in[slot] = t->code[k].in[1 - side];
        tt__merge(t, at, k, merged);
        return;
    }
}

static const tt__rules tt__rules_ADD = {tt__shape_of_two, tt__layout_alike, {tt__backward_ADD}, NULL, NULL,
    NULL, tt__fuse_ADD};

static bool tt__shape_ADD_ROW(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    return tt__shape_elementwise(t, i, out) && tt__float_in(t, i, 1) && tt__fixed_in(t, i, 1, 1, out->cols);
}

static bool tt__layout_ADD_ROW(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    (void)t;
    out[0] = in[0];
    return in[0] <= TT__ROWS && tt__laid_out(i, in, 1, TT__WHOLE);
}

static void tt__backward_ADD_ROW(tt__builder *b, const tt__instr *f, int32_t g)
{
    if (tt__wants(b->t, f->in[1])) tt__emit_gradient(b, f, g, TT__OP_SUM_ROWS, "g", "1");
    tt__grad_pass(b, g, f->in[0], true);
}

static const tt__rules tt__rules_ADD_ROW = {tt__shape_ADD_ROW, tt__layout_ADD_ROW, {tt__backward_ADD_ROW}};

static bool tt__shape_SUM_ROWS(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT_F32, 1, tt__in(t, i, 0)->cols);
    return tt__float_in(t, i, 0);
}

static bool tt__layout_SUM_ROWS(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    (void)t; (void)i;
    out[0] = in[0] == TT__ROWS ? TT__PARTIAL : TT__WHOLE;
    return in[0] <= TT__ROWS;
}

static size_t tt__cpu_SUM_ROWS(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__shape *dy = tt__in(t, i, 0);
    return tt__sum_rows_bytes(threads, dy->rows, dy->cols);
}

static const tt__rules tt__rules_SUM_ROWS = {tt__shape_SUM_ROWS, tt__layout_SUM_ROWS, {NULL},
    tt__cpu_SUM_ROWS, NULL, NULL, NULL, tt__fuse_column_sums};

/* ---------------------------------------------------------------------------------------------------- mul */

/* Returns whether b has another shape than a and can be broadcast over a, as a row, a column or one
   number. */
static bool tt__broadcasts(const tt__shape *a, const tt__shape *b)
{
    const bool same_rows = tt__same_rows(a, b), one_row = b->rows == 1 && !b->axis;
    return (same_rows || one_row) && (b->cols == a->cols || b->cols == 1) &&
           !(same_rows && b->cols == a->cols);
}

tt_value tt_mul(tt_tape *t, tt_value a, tt_value b)
{
    const bool both = tt_value_rows(t, a) && tt_value_rows(t, b); /* without a or b, tt__record fails */
    const bool spread = both && tt__broadcasts(&t->values[a.id].shape, &t->values[b.id].shape);
    return tt__record(t, tt__new_instr(spread ? TT__OP_MUL_BROADCAST : TT__OP_MUL), "vv", a, b);
}

static void tt__backward_MUL(tt__builder *b, const tt__instr *f, int32_t g)
{
    if (tt__wants(b->t, f->in[0])) tt__emit_gradient(b, f, g, TT__OP_MUL, "g1", "0");
    if (tt__wants(b->t, f->in[1])) tt__emit_gradient(b, f, g, TT__OP_MUL, "g0", "1");
}

static const tt__rules tt__rules_MUL = {tt__shape_of_two, tt__layout_alike, {tt__backward_MUL}};

static bool tt__shape_MUL_BROADCAST(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    return tt__shape_elementwise(t, i, out) && tt__float_in(t, i, 1) &&
           (tt__broadcasts(&out[0], tt__in(t, i, 1)) || tt__bad(t, i, 1, "a row, a column or one number"));
}

static bool tt__layout_MUL_BROADCAST(const tt_tape *t, const tt__instr *i, const tt__split *in,
                                     tt__split *out)
{
    out[0] = in[0];
    return in[0] <= TT__ROWS &&
           tt__laid_out(i, in, 1, tt__same_rows(tt__in(t, i, 0), tt__in(t, i, 1)) ? in[0] : TT__WHOLE);
}

/* Emits the backward. The gradient of b is the sum of g * a over the rows, the columns, or both. */
static void tt__backward_MUL_BROADCAST(tt__builder *b, const tt__instr *f, int32_t g)
{
    tt_tape *t = b->t;
    const tt__shape row = *tt__in(t, f, 1);
    const int op = row.cols == 1 ? TT__OP_ROW_DOTS : TT__OP_MUL;
    const bool by_row = tt__same_rows(tt__in(t, f, 0), &row);
    tt__shape products = t->values[g].shape;
    if (tt__wants(t, f->in[0])) tt__emit_gradient(b, f, g, TT__OP_MUL_BROADCAST, "g1", "0");
    if (!tt__wants(t, f->in[1])) return;
    tt__emit_gradient(b, f, g, op, "g0", by_row ? "1" : "");
    if (by_row || !b->ok) return;
    if (row.cols == 1) tt__set_shape(&products, TT_F32, &products, 1);
    const int32_t sum = tt__new_value(t, &products, TT__TRANSIENT, "d(%.56s.rows)", t->values[f->in[1]].name);
    if (!(b->ok = sum != 0)) return;
    t->values[sum].part = t->values[f->in[0]].part;
    t->code[t->n_code - 1].out[0] = sum;
    tt__emit_gradient(b, f, sum, TT__OP_SUM_ROWS, "g", "1");
}

static const tt__rules tt__rules_MUL_BROADCAST = {tt__shape_MUL_BROADCAST, tt__layout_MUL_BROADCAST,
    {tt__backward_MUL_BROADCAST}};

static bool tt__shape_ROW_DOTS(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    if (!tt__shape_of_two(t, i, out)) return false;
    tt__set_shape(&out[0], TT_F32, tt__in(t, i, 0), 1);
    return true;
}

static const tt__rules tt__rules_ROW_DOTS = {tt__shape_ROW_DOTS, tt__layout_of_whole_rows};

/* ------------------------------------------------------------------------------------------------- swiglu */

tt_value tt_swiglu(tt_tape *t, tt_value gate, tt_value up)
{
    return tt__record(t, tt__new_instr(TT__OP_SWIGLU), "vv", gate, up);
}

static bool tt__shape_SWIGLU_BACKWARD(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *dy = tt__in(t, i, 0);
    out[1] = *dy;
    return tt__shape_of_two(t, i, out) && tt__shape_in(t, i, 2, dy, dy->cols);
}

static const tt__rules tt__rules_SWIGLU = {tt__shape_of_two, tt__layout_alike,
                                           {NULL, "g01", "01", TT__OP_SWIGLU_BACKWARD}};
static const tt__rules tt__rules_SWIGLU_BACKWARD = {tt__shape_SWIGLU_BACKWARD, tt__layout_alike};

/* ------------------------------------------------------------------------------------------------- rotary */

tt_rotary_options tt_rotary_options_default(int heads)
{
    tt_rotary_options o;
    memset(&o, 0, sizeof o);
    o.heads = heads;
    o.base = 10000;
    o.factor = 1;
    o.original = 8192;
    return o;
}

static bool tt__shape_ROTARY(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt_rotary_options *o = &i->attr.rotary;
    const tt__shape *x = tt__in(t, i, 0);
    const int heads = i->attr.heads;
    if (!tt__shape_elementwise(t, i, out) || !tt__numbers_in(t, i, 1, 0)) return false;
    if (!i->in[1])
        return tt__tape_fail(t, TT_ERR_ARGUMENT,
                             "rotary: `positions` is no value: pass the position of each row");
    if (heads < 1 || x->cols % heads)
        return tt__tape_fail(t, TT_ERR_SHAPE,
                             "rotary: the width is %lld, but must be a multiple of heads, %d",
                             (long long)x->cols, heads);
    if (o->size < 1 || 2 * tt__rotary_pairs_of(o) > x->cols / heads || o->size > 2 * TT__MAX_PAIRS)
        return tt__tape_fail(t, TT_ERR_SHAPE, "rotary: size is %d in heads of %lld columns; rounded up to an "
                             "even number, it must be 2 to %d, and at most the columns of a head", o->size,
                             (long long)(x->cols / heads), 2 * TT__MAX_PAIRS);
    const unsigned scaling = (unsigned)o->scaling, pairs = (unsigned)o->pairs;
    if (scaling > TT_ROTARY_YARN || pairs > TT_ROTARY_NEIGHBOURS)
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "rotary: scaling is %u and pairs is %u, but they must be of "
                             "tt_rotary_scaling and tt_rotary_pairs", scaling, pairs);
    if (!(o->base > 1 && o->base <= FLT_MAX && o->factor >= 1 && o->factor <= FLT_MAX))
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "rotary: base is %g and factor is %g, but base must be "
                             "above 1, and factor at least 1", o->base, o->factor);
    if (!(o->original >= 1 && o->low > 0 && o->low < o->high && o->high <= FLT_MAX && o->magnitude > 0 &&
          o->magnitude <= FLT_MAX))
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "rotary: original %d and magnitude %g must be above 0, and "
                             "low %g between 0 and high %g", o->original, o->magnitude, o->low, o->high);
    return true;
}

tt_value tt_rotary(tt_tape *t, tt_value x, tt_value positions, const tt_rotary_options *o)
{
    tt__instr i = tt__new_instr(TT__OP_ROTARY);
    tt_rotary_options *to = &i.attr.rotary;
    *to = *o;
    to->heads = 0; /* attr.heads has the number of heads, which is less for a shard of x */
    if (!to->size && o->heads > 0) to->size = (int)tt__min(tt_value_width(t, x) / o->heads, INT_MAX);
    if (o->scaling == TT_ROTARY_PLAIN) to->factor = 1; /* options that the scaling does not read get fixed
                                                          values */
    if (o->scaling < TT_ROTARY_LLAMA3) to->original = 1;
    if (o->scaling < TT_ROTARY_LLAMA3 || (o->low == 0 && o->high == 0)) {
        to->low = 1;
        to->high = o->scaling == TT_ROTARY_YARN ? 32 : 4;
    }
    if (o->scaling != TT_ROTARY_YARN) to->magnitude = 1;
    else if (o->magnitude == 0) to->magnitude = 0.1f * tt__lnf(o->factor) + 1;
    i.attr.heads = o->heads;
    i.attr.scale = 1;
    return tt__record(t, i, "vv", x, positions);
}

/* Emits the backward: a rotation by the same angles in the opposite direction. */
static void tt__backward_ROTARY(tt__builder *b, const tt__instr *f, int32_t g)
{
    tt__instr back = *f;
    back.attr.scale = -f->attr.scale;
    tt__emit_gradient(b, &back, g, TT__OP_ROTARY, "g1", "0");
}

static size_t tt__rotary_table_bytes(const tt__instr *i)
{
    return tt__align_up((size_t)tt__rotary_pairs_of(&i->attr.rotary) * sizeof(float));
}

static size_t tt__cpu_ROTARY(int threads, const tt_tape *t, const tt__instr *i)
{
    return tt__rotary_table_bytes(i) + tt__widen_bytes(threads, t, i);
}

static tt_status tt__check_ROTARY(const tt__launch *l)
{
    return tt__check_indices(l, 1, 1 << 24, NULL, "positions that a float holds exactly");
}

static const tt__rules tt__rules_ROTARY = {tt__shape_ROTARY, tt__layout_by_columns, {tt__backward_ROTARY},
    tt__cpu_ROTARY, NULL, tt__check_ROTARY};

/* -------------------------------------------------------------------------------------------------- scale */

tt_value tt_scale(tt_tape *t, tt_value x, float s)
{
    tt__instr i = tt__new_instr(TT__OP_SCALE);
    i.attr.scale = s;
    return tt__record(t, i, "v", x);
}

/* Records a scale by s. If weights have 16 bits, s is rounded to the dtype of the weights, as in
   transformers. */
static tt_value tt__scale_as_weights(tt_tape *t, tt_value x, float s)
{
    tt__instr i = tt__new_instr(TT__OP_SCALE);
    i.attr.scale = s;
    i.attr.as_weights = true;
    return tt__record(t, i, "v", x);
}

/* Emits a collective `op` of x with the same `move` as f. */
static tt__instr *tt__emit_move(tt__builder *b, int op, const tt__instr *f, int32_t x)
{
    tt__instr *i = tt__emit(b, op, NULL, &x, 1);
    if (i) i->move = f->move;
    return i;
}

/* Emits the backward of SCALE. A SCALE by 1 that has a `move` marks that the tensor-parallel ranks make
   partial gradients of x (tt__entered). The partial gradients are summed over the ranks before they are added
   to the gradient of x. If the rows of x were gathered only for this SCALE, each rank gets only its own rows
   of the sum. */
static void tt__backward_SCALE(tt__builder *b, const tt__instr *f, int32_t g)
{
    const tt_tape *t = b->t;
    if (f->move.over == TT__ALONE) {
        tt__emit_gradient(b, f, g, TT__OP_SCALE, "g", "0");
        return;
    }
    const int at = tt__producer(t, f->in[0]);
    const bool gathered = at >= 0 && t->code[at].op == TT__OP_ALL_GATHER && tt__uses(t, f->in[0]) == 1;
    tt__emit_move(b, gathered ? TT__OP_REDUCE_SCATTER : TT__OP_ALL_REDUCE, f, g);
    tt__grad_into(b, 0, gathered ? t->code[at].in[0] : f->in[0]);
}

static const tt__rules tt__rules_SCALE = {tt__shape_elementwise, tt__layout_alike, {tt__backward_SCALE}};

/* ------------------------------------------------------------------------------------------------ dropout */

static bool tt__shape_DROPOUT(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    bool fits = i->in[1] ? tt__shape_of_two(t, i, out) : tt__shape_elementwise(t, i, out);
    return fits && tt__rate_in(t, i) && tt__numbers_in(t, i, 2, 0);
}

tt_value tt_dropout(tt_tape *t, tt_value x, float p)
{
    tt__instr i = tt__new_instr(TT__OP_DROPOUT);
    i.attr.dropout = p;
    return tt__record(t, i, "v", x);
}

static void tt__backward_DROPOUT(tt__builder *b, const tt__instr *f, int32_t g)
{
    /* With the random numbers of f, this DROPOUT drops the same elements as f. */
    if (tt__wants(b->t, f->in[0])) tt__emit_gradient(b, f, g, TT__OP_DROPOUT, "g-2", "0");
    tt__grad_pass(b, g, f->in[1], true);
}

static const tt__rules tt__rules_DROPOUT = {tt__shape_DROPOUT, tt__layout_alike, {tt__backward_DROPOUT}};

/* Returns whether a device has one kernel for the two instructions i and `next`, where `next` reads the
   first result of i. One such kernel computes dropout and a norm of the result. The other computes the
   backward of a norm, and dropout of the gradient from this backward. */
static bool tt__has_kernel_of_both(const tt__instr *i, const tt__instr *next)
{
    if (i->op == TT__OP_DROPOUT) return next->op == TT__OP_LAYERNORM || next->op == TT__OP_RMSNORM;
    const bool norm_backward = i->op == TT__OP_LAYERNORM_BACKWARD || i->op == TT__OP_RMSNORM_BACKWARD;
    return norm_backward && next->op == TT__OP_DROPOUT;
}
