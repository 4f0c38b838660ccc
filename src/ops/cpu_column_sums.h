#pragma once
#include "../base/base.h"
#include "scratch.h"
#include "cpu_launch.h"
#include "../cpu/kernels.h"
#include "../cpu/rows.h"
#include "cpu_rows.h"

/* ---- column sums: the workspace holds a partial sum for each TT__SUM_ROWS rows; the partial sums are added
   in order */

TT__INLINE float *TT__K(partial_sum)(const tt__launch *l, int64_t k, int64_t cols)
{
    return tt__workspace_at(l, (size_t)k * tt__row_bytes(cols));
}

/* Sums `count` partial sums, beginning with number `first`, and writes the sum to `to` or, if `add`, adds
   the sum to `to`. `scratch` has two rows of to->cols floats. */
TT__FN void TT__K(finish_column_sums)(const tt__launch *l, const tt__mat *to, bool add, int64_t first,
                                      int64_t count, float *scratch)
{
    int64_t n = to->cols;
    memset(scratch, 0, (size_t)n * 4);
    for (int64_t k = 0; k < count; k++)
        TT__K(axpby)(scratch, 1, scratch, 1, TT__K(partial_sum)(l, first + k, n), n);
    TT__K(row_end)(to, add, 0, scratch, scratch, 1);
}

TT__ROWS_FN(column_sum_rows)
{
    int64_t n = l->in[0].cols;
    float *sum = TT__K(partial_sum)(l, from / TT__SUM_ROWS, n);
    memset(sum, 0, (size_t)n * 4);
    for (int64_t r = from; r < to; r++) TT__K(row_add)(sum, &l->in[0], r, scratch, 0);
}

/* Writes the column sums of in[0] to `to` or, if `add`, adds them to `to`. */
TT__INLINE void TT__K(column_sums)(const tt__launch *l, const tt__mat *to, bool add)
{
    const int64_t parts = tt__ceil_div(l->in[0].rows, TT__SUM_ROWS);
    const size_t used = (size_t)parts * tt__row_bytes(l->in[0].cols);
    tt__for_chunks(l, l->in[0].rows, l->in[0].cols, TT__SUM_ROWS, used, TT__K(column_sum_rows));
    TT__K(finish_column_sums)(l, to, add, 0, parts, tt__workspace_at(l, used));
}

TT__FN tt_status TT__K(run_SUM_ROWS)(const tt__launch *l)
{
    TT__K(column_sums)(l, &l->out[0], l->add[0]);
    return TT_OK;
}
