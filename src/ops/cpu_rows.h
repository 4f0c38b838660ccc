#pragma once
#include "../base/base.h"
#include "scratch.h"
#include "cpu_launch.h"
#include "../cpu/variants.h"
#include "../cpu/kernels.h"
#include "../cpu/vectors.h"
#include "../cpu/rows.h"

/* ----------------------------------------------------------------------------------------------- row kernels
   All kernels except matrix products and attention work on rows of floats. A row of another dtype is widened
   when it is read and rounded when it is written, so these kernels know no other dtype. */

/* Returns row k, of `cols` floats, of a thread's scratch. */
TT__INLINE float *TT__K(scratch_row)(float *scratch, int64_t cols, int k)
{
    return scratch + (size_t)k * (tt__row_bytes(cols) / 4);
}

/* Returns row r of m as floats: in place if m is f32, else widened into row k of scratch. */
TT__INLINE const float *TT__K(row_in)(const tt__mat *m, int64_t r, float *scratch, int k)
{
    float *row = TT__K(scratch_row)(scratch, m->cols, k);
    if (m->dtype == TT_F32) return (const float *)tt__at(m, r);
    TT__K(row_widen)(row, tt__at(m, r), m->dtype, m->cols);
    return row;
}

/* Returns where to compute row r of m: in m itself, or in `row` if the result must be rounded or added. */
TT__INLINE float *TT__K(row_begin)(const tt__mat *m, bool add, int64_t r, float *row)
{
    return m->dtype == TT_F32 && !add ? (float *)tt__at(m, r) : row;
}

/* Writes (or, if `add`, adds) the floats of `row` to row r of m, unless they were computed in m itself. Uses
   row k of scratch. */
TT__INLINE void TT__K(row_end)(const tt__mat *m, bool add, int64_t r, const float *row, float *scratch, int k)
{
    float *spare = TT__K(scratch_row)(scratch, m->cols, k);
    float *to = m->dtype == TT_F32 ? (float *)tt__at(m, r) : spare;
    if (row == to) return;
    if (add) TT__K(axpby)(to, 1, row, 1, TT__K(row_in)(m, r, spare, 0), m->cols);
    else if (m->dtype == TT_F32) memcpy(to, row, (size_t)m->cols * 4);
    if (m->dtype != TT_F32) TT__K(row_narrow)(tt__at(m, r), add ? spare : row, m->dtype, m->cols);
}

/* Computes sum += row r of m; uses row k of scratch. */
TT__INLINE void TT__K(row_add)(float *sum, const tt__mat *m, int64_t r, float *scratch, int k)
{
    TT__K(axpby)(sum, 1, sum, 1, TT__K(row_in)(m, r, scratch, k), m->cols);
}

/* Returns the sum of a * b over n numbers. */
TT__INLINE float TT__K(dot_row)(const float *a, const float *b, int64_t n)
{
    tt__vf s = TT__K(zero)();
    for (int64_t c = 0; c < n; c += TT__LANES)
        s = TT__K(fma)(TT__K(load_n)(a + c, n - c), TT__K(load_n)(b + c, n - c), s);
    return TT__K(sum)(s);
}

/* A function that computes y, which is row r of out[0] and has n columns. x[k] is row r of operand k, or NULL
   if the operand is absent; more: data of the op. */
typedef void (*TT__K(row_fn))(const tt__launch *l, int64_t r, const float *const *x, float *y, int64_t n,
                              const void *more);
#define TT__UNUSED __attribute__((unused))
#define TT__ROW_FN(name) \
    TT__FN void TT__K(name)(TT__UNUSED const tt__launch *l, TT__UNUSED int64_t r, const float *const *x, \
                            float *y, int64_t n, TT__UNUSED const void *more)
/* Defines a function that computes rows [from, to) of an op, with TT__ROW_BUFFERS rows of scratch. */
#define TT__ROWS_FN(name) \
    TT__FN void TT__K(name)(const tt__launch *l, int64_t from, int64_t to, TT__UNUSED float *scratch)

/* Computes rows [from, to) of out[0]. fn computes each row from the same row of `count` operands, at most 3:
   in[first], in[first + 1] and so on. All have as many columns as out[0] (tt__same_widths), or their widened
   rows would overlap. */
TT__INLINE void TT__K(map_rows)(const tt__launch *l, int64_t from, int64_t to, float *scratch,
                                const int first, const int count, TT__K(row_fn) fn, const void *more)
{
    const int64_t n = l->in[first].cols;
    for (int64_t r = from; r < to; r++) {
        const float *x[3] = {NULL, NULL, NULL};
        float *y = TT__K(row_begin)(&l->out[0], l->add[0], r, scratch);
        TT__EACH(k, count) {
            const tt__mat *in = &l->in[first + k];
            if (in->data) x[k] = TT__K(row_in)(in, r, scratch, 1 + k);
        }
        fn(l, r, x, y, n, more);
        TT__K(row_end)(&l->out[0], l->add[0], r, y, scratch, 1 + count);
    }
}

/* Macros that define the kernels of ops that compute rows of out[0]. TT__RUN_ROWS: the statement computes
   rows [from, to). TT__RUN_MAP: the function row_OP computes one row (see map_rows). TT__RUN_MAP_OF: the
   statement computes one row. */
#define TT__RUN_ROWS(OP, statement) \
    TT__ROWS_FN(rows_##OP) { statement; } \
    TT__FN tt_status TT__K(run_##OP)(const tt__launch *l) \
    { \
        return tt__for_rows(l, &l->out[0], 0, TT__K(rows_##OP)); \
    }
#define TT__RUN_MAP(OP, first, count) \
    TT__ROWS_FN(rows_##OP) \
    { \
        TT__K(map_rows)(l, from, to, scratch, first, count, TT__K(row_##OP), NULL); \
    } \
    TT__FN tt_status TT__K(run_##OP)(const tt__launch *l) \
    { \
        const tt_status status = tt__same_widths(l, first, count); \
        return status == TT_OK ? tt__for_rows(l, &l->out[0], 0, TT__K(rows_##OP)) : status; \
    }
#define TT__RUN_MAP_OF(OP, first, count, statement) \
    TT__ROW_FN(row_##OP) { statement; } \
    TT__RUN_MAP(OP, first, count)
