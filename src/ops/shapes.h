#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"

/* -------------------------------------------------------------------------------------------- shape rules */

static const tt__shape *tt__in(const tt_tape *t, const tt__instr *i, int k)
{
    return &t->values[i->in[k]].shape;
}

static bool tt__same_rows(const tt__shape *a, const tt__shape *b)
{
    return a->rows == b->rows && a->axis == b->axis && a->extra == b->extra;
}

TT_PRINTF(4, 5)
static bool tt__bad(tt_tape *t, const tt__instr *i, int k, const char *format, ...)
{
    char what[256], expected[256];
    va_list args;
    va_start(args, format);
    vsnprintf(expected, sizeof expected, format, args);
    va_end(args);
    return tt__tape_fail(t, TT_ERR_SHAPE, "%s: operand %d is %s, expected %s", tt__instr_name(i), k,
                         tt__describe(t, i->in[k], what, sizeof what), expected);
}

static bool tt__float_in(tt_tape *t, const tt__instr *i, int k)
{
    return tt__is_float(tt__in(t, i, k)->dtype) || tt__bad(t, i, k, "a float dtype (f32, bf16, f16)");
}

/* Fails unless operand k has floats, the rows of `like`, and `cols` columns. */
static bool tt__shape_in(tt_tape *t, const tt__instr *i, int k, const tt__shape *like, int64_t cols)
{
    const tt__shape *s = tt__in(t, i, k);
    if (!tt__float_in(t, i, k)) return false;
    if (tt__same_rows(s, like) && s->cols == cols) return true;
    const char *axis = like->axis ? t->axes[like->axis].name : "";
    return tt__bad(t, i, k, "(%s%s%lld, %lld)", axis, *axis ? "<=" : "", (long long)like->rows,
                   (long long)cols);
}

/* Fails unless operand k is absent or is a matrix of floats with `cols` columns and `rows` rows, where the
   number of rows is fixed (not an axis). */
static bool tt__fixed_in(tt_tape *t, const tt__instr *i, int k, int64_t rows, int64_t cols)
{
    const tt__shape like = {TT_F32, rows, cols, 0, 0};
    return !i->in[k] || tt__shape_in(t, i, k, &like, cols);
}

/* Fails unless operand k has dtype i32 and one column. */
static bool tt__index_in(tt_tape *t, const tt__instr *i, int k)
{
    const tt__shape *s = tt__in(t, i, k);
    if (s->dtype != TT_I32 || s->cols != 1) return tt__bad(t, i, k, "i32 of width 1");
    bool alone = t->values[i->in[k]].ld == 1;
    return alone || tt__bad(t, i, k, "an input of its own, not a column of a wider one");
}

/* Fails if operand k is present and does not have one integer for each row of operand `of`. */
static bool tt__numbers_in(tt_tape *t, const tt__instr *i, int k, int of)
{
    if (!i->in[k]) return true;
    if (!tt__index_in(t, i, k)) return false;
    bool same = tt__same_rows(tt__in(t, i, k), tt__in(t, i, of));
    return same || tt__bad(t, i, k, "one number for each row of operand %d", of);
}

/* Fails if operand k is present and cannot be the weights of a loss's targets: it must have the rows of
   `rows` and `cols` columns, and be an input, because weights get no gradient. */
static bool tt__weights_in(tt_tape *t, const tt__instr *i, int k, const tt__shape *rows, int64_t cols)
{
    if (!i->in[k]) return true;
    if (!tt__shape_in(t, i, k, rows, cols)) return false;
    bool input = t->values[t->values[i->in[k]].base].storage == TT__INPUT;
    return input || tt__bad(t, i, k, "an input: weights take no gradient");
}

static bool tt__rate_in(tt_tape *t, const tt__instr *i)
{
    const float p = i->attr.dropout; /* p, rounded to a multiple of 2^-16, must be below 1 */
    if (p >= 0 && p < 65535.0f / 65536) return true;
    return tt__tape_fail(t, TT_ERR_ARGUMENT,
                         "%s: dropout is %g, but must be at least 0 and below 65535/65536", tt__instr_name(i),
                         p);
}

static void tt__set_shape(tt__shape *to, tt_dtype dtype, const tt__shape *rows_of, int64_t cols)
{
    *to = *rows_of;
    to->dtype = dtype;
    to->cols = cols;
}

static void tt__set_fixed(tt__shape *to, tt_dtype dtype, int64_t rows, int64_t cols)
{
    const tt__shape shape = {dtype, rows, cols, 0, 0};
    *to = shape;
}

/* The shape rule of an op whose result has the shape and dtype of operand 0. Any dtype is allowed. */
static bool tt__shape_alike(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = *tt__in(t, i, 0);
    return true;
}

static bool tt__shape_elementwise(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    return tt__shape_alike(t, i, out) && tt__float_in(t, i, 0);
}

static void tt__set_loss(tt__shape *out)
{
    tt__set_fixed(&out[0], TT_F32, 1, 1);
    tt__set_fixed(&out[TT__LOSS_COUNTS], TT_F32, 1, 4);
}

/* The shape rule of an elementwise op with two operands of the same shape. */
static bool tt__shape_of_two(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    return tt__shape_elementwise(t, i, out) && tt__shape_in(t, i, 1, tt__in(t, i, 0), tt__in(t, i, 0)->cols);
}
