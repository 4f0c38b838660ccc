#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../../tape/record.h"
#include "../record.h"
#include "../shapes.h"
#include "../layouts.h"
#include "../scratch.h"

/* ---------------------------------------------------------------------------------------------- layernorm */

/* Returns how many groups of columns a norm's row has, each with a mean of its own: 1, except for rmsnorm. */
static int64_t tt__norm_groups(const tt__instr *i) { return tt__max(1, i->attr.heads); }

/* The shape rule of norms: reads x, w and maybe b; makes y and statistics. A group of columns has as many
   statistics as the op can have parameters: two for layernorm, one for rmsnorm. */
static bool tt__shape_of_norm(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *x = tt__in(t, i, 0);
    const int64_t groups = tt__norm_groups(i), cols = x->cols % groups ? x->cols : x->cols / groups;
    const float eps = i->attr.eps;
    if (!tt__float_in(t, i, 0)) return false;
    if (!tt__fixed_in(t, i, 1, 1, cols) || !tt__fixed_in(t, i, 2, 1, cols)) return false;
    out[0] = *x;
    tt__set_shape(&out[1], TT_F32, x, groups * (tt__ops[i->op].inputs - 1));
    if (!isfinite(i->attr.weight_offset))
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "%s: the offset of the weights is %g, but must be finite",
                             tt__instr_name(i), i->attr.weight_offset);
    return eps >= 0 || tt__tape_fail(t, TT_ERR_ARGUMENT, "%s: eps is %g, but must be at least 0",
                                     tt__instr_name(i), eps);
}

/* Returns the last value of tt__split that the layout of a norm's rows may have. With groups, the columns may
   be divided too, because whole groups may be on different ranks. */
static tt__split tt__norm_split(const tt__instr *i) { return i->attr.heads ? TT__COLS : TT__ROWS; }

static bool tt__layout_of_norm(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    (void)t;
    out[0] = out[1] = in[0];
    return in[0] <= tt__norm_split(i) && tt__laid_out(i, in, 1, TT__WHOLE) &&
           tt__laid_out(i, in, 2, TT__WHOLE);
}

tt_value tt_layernorm(tt_tape *t, tt_value x, tt_param *w, tt_param *b, float eps)
{
    tt__instr i = tt__new_instr(TT__OP_LAYERNORM);
    i.attr.eps = eps;
    return tt__record(t, i, "vpP", x, w, b);
}

static const tt__rules tt__rules_LAYERNORM = {tt__shape_of_norm, tt__layout_of_norm,
    {NULL, "g01B", "012", TT__OP_LAYERNORM_BACKWARD} };

/* The shape rule of the backward of norms: reads dy, x, w and statistics; makes dx, dw and, for layernorm,
   db. Each result may be absent. */
static bool tt__shape_of_norm_backward(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *x = tt__in(t, i, 1);
    const int64_t statistics = tt__ops[i->op].outputs - 2, groups = tt__norm_groups(i);
    out[0] = *x;
    for (int k = 1; k <= statistics; k++) tt__set_fixed(&out[k], TT_F32, 1, x->cols / groups);
    return tt__shape_in(t, i, 0, x, x->cols) && tt__fixed_in(t, i, 2, 1, x->cols / groups) &&
           tt__shape_in(t, i, 3, x, groups * statistics);
}

/* The layout rule of the backward of norms. If rows or groups are sharded, dw and db, sums over rows and
   groups, are partial. */
static bool tt__layout_of_norm_backward(const tt_tape *t, const tt__instr *i, const tt__split *in,
                                        tt__split *out)
{
    (void)t;
    out[0] = in[0];
    out[1] = out[2] = in[0] == TT__WHOLE ? TT__WHOLE : TT__PARTIAL;
    return in[0] <= tt__norm_split(i) && tt__laid_out(i, in, 1, in[0]) && tt__laid_out(i, in, 2, TT__WHOLE) &&
           tt__laid_out(i, in, 3, in[0]);
}

static size_t tt__cpu_LAYERNORM_BACKWARD(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__shape *x = tt__in(t, i, 1);
    const int64_t groups = tt__norm_groups(i);
    return 2 * tt__partial_bytes(x->rows * groups, x->cols / groups) + tt__widen_bytes(threads, t, i);
}

static const tt__rules tt__rules_LAYERNORM_BACKWARD = {tt__shape_of_norm_backward,
    tt__layout_of_norm_backward, {NULL}, tt__cpu_LAYERNORM_BACKWARD};

/* ------------------------------------------------------------------------------------------------ rmsnorm */

tt_value tt_rmsnorm_offset(tt_tape *t, tt_value x, tt_param *w, float offset, float eps)
{
    tt__instr i = tt__new_instr(TT__OP_RMSNORM);
    const int64_t cols = tt_value_width(t, x), groups = w && cols % w->size == 0 ? cols / w->size : 1;
    if (groups > 1 && groups <= INT32_MAX) i.attr.heads = (int)groups;
    i.attr.eps = eps;
    i.attr.weight_offset = offset;
    return tt__record(t, i, "vp", x, w);
}

tt_value tt_rmsnorm(tt_tape *t, tt_value x, tt_param *w, float eps)
{
    return tt_rmsnorm_offset(t, x, w, 0, eps);
}

static const tt__rules tt__rules_RMSNORM = {tt__shape_of_norm, tt__layout_of_norm,
    {NULL, "g01B", "01", TT__OP_RMSNORM_BACKWARD} };
static const tt__rules tt__rules_RMSNORM_BACKWARD = {tt__shape_of_norm_backward, tt__layout_of_norm_backward,
    {NULL}, tt__cpu_LAYERNORM_BACKWARD};

/* -------------------------------------------------------------------------------- softmax and normalize */

tt_value tt_softmax(tt_tape *t, tt_value x)
{
    return tt__record(t, tt__new_instr(TT__OP_SOFTMAX), "v", x);
}

static const tt__rules tt__rules_SOFTMAX = {tt__shape_elementwise, tt__layout_of_whole_rows,
    {NULL, "gA", "0", TT__OP_SOFTMAX_BACKWARD} };
static const tt__rules tt__rules_SOFTMAX_BACKWARD = {tt__shape_of_two, tt__layout_of_whole_rows};

static bool tt__shape_NORMALIZE(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const float eps = i->attr.eps;
    tt__set_shape(&out[1], TT_F32, tt__in(t, i, 0), 1);
    if (!(eps > 0))
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "normalize: eps is %g, but must be above 0", eps);
    return tt__shape_elementwise(t, i, out);
}

tt_value tt_normalize(tt_tape *t, tt_value x, float eps)
{
    tt__instr i = tt__new_instr(TT__OP_NORMALIZE);
    i.attr.eps = eps;
    return tt__record(t, i, "v", x);
}

static bool tt__shape_NORMALIZE_BACKWARD(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    return tt__shape_of_two(t, i, out) && tt__shape_in(t, i, 2, tt__in(t, i, 0), 1);
}

static const tt__rules tt__rules_NORMALIZE = {tt__shape_NORMALIZE, tt__layout_of_whole_rows,
    {NULL, "gAB", "0", TT__OP_NORMALIZE_BACKWARD} };
static const tt__rules tt__rules_NORMALIZE_BACKWARD = {tt__shape_NORMALIZE_BACKWARD,
    tt__layout_of_whole_rows};
