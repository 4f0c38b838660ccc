#pragma once
#include "../../base/base.h"
#include "rules.h"
#include "../cpu_launch.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "../cpu_rows.h"

/* -------------------------------------------------------------------------------------------------- rounding
   Rounds weights to few bits. The first pass measures each row: the largest magnitude for int8, else the sum
   of the magnitudes. The second pass rounds. */

TT__ROWS_FN(measure_rows)
{
    const bool largest = l->instr->attr.rounding == TT_ROUND_INT8;
    const int64_t n = l->in[0].cols;
    double *measure = (double *)(void *)tt__workspace_at(l, 0);
    for (int64_t r = from; r < to; r++) {
        const float *x = TT__K(row_in)(&l->in[0], r, scratch, 0);
        double sum = 0;
        tt__vf top = TT__K(zero)();
        for (int64_t first = 0; first < n; first += TT__ROUND_PART) {
            const int64_t end = tt__min(n, first + TT__ROUND_PART);
            tt__vf part = TT__K(zero)();
            for (int64_t c = first; c < end; c += TT__LANES) {
                const tt__vf a = (tt__vf)((tt__vi)TT__K(load_n)(x + c, end - c) & 0x7fffffff);
                part += a;
                top = TT__K(max)(top, a);
            }
            sum += (double)TT__K(sum)(part);
        }
        /* sum - sum is NaN if the row has a number that is not finite, which the maximum may leave out */
        measure[r] = largest ? (double)TT__K(max_lane)(top) + (sum - sum) : sum;
    }
}

/* Computes a row of y: x rounded to multiples of `step`, at most `most` steps from 0. many: 1 / step. */
TT__INLINE void TT__K(few_bits_row)(float *y, const float *x, float many, float step, float most, int64_t n)
{
    const tt__vf magic = TT__K(splat)(12582912.0f); /* 1.5 * 2^23: adding `magic` rounds to an integer */
    const tt__vf high = TT__K(splat)(most), low = TT__K(splat)(-most);
    for (int64_t c = 0; c < n; c += TT__LANES) {
        const tt__vf q = TT__K(min)(TT__K(max)(TT__K(load_n)(x + c, n - c) * many, low), high);
        TT__K(store_n)(y + c, (q + magic - magic) * step, n - c);
    }
}

/* Computes a row of y: `step` with the signs of x; 0 counts as positive. */
TT__INLINE void TT__K(sign_row)(float *y, const float *x, float step, int64_t n)
{
    const tt__vi minus = (tt__vi)TT__K(splat)(-0.0f);
    for (int64_t c = 0; c < n; c += TT__LANES) {
        const tt__vi below = (tt__vi)(TT__K(load_n)(x + c, n - c) < 0.0f);
        TT__K(store_n)(y + c, (tt__vf)((tt__vi)TT__K(splat)(step) ^ (below & minus)), n - c);
    }
}

TT__ROWS_FN(few_bits_rows)
{
    const tt_rounding kind = (tt_rounding)l->instr->attr.rounding;
    const int64_t n = l->in[0].cols;
    const double *measure = (const double *)(const void *)tt__workspace_at(l, 0);
    for (int64_t r = from; r < to; r++) {
        const float *x = TT__K(row_in)(&l->in[0], r, scratch, 1);
        float *y = TT__K(row_begin)(&l->out[0], l->add[0], r, scratch);
        const tt__few_bits s = tt__few_bits_of(kind, measure[kind == TT_ROUND_TERNARY ? 0 : r], n);
        if (kind == TT_ROUND_BINARY) TT__K(sign_row)(y, x, s.step, n);
        else TT__K(few_bits_row)(y, x, s.many, s.step, kind == TT_ROUND_INT8 ? 127 : 1, n);
        TT__K(row_end)(&l->out[0], l->add[0], r, y, scratch, 2);
    }
}

TT__FN tt_status TT__K(run_ROUND)(const tt__launch *l)
{
    const size_t bytes = tt__align_up((size_t)l->in[0].rows * 8);
    double *measure = (double *)l->workspace, sum = 0;
    tt_status status = tt__for_rows(l, &l->in[0], bytes, TT__K(measure_rows));
    if (l->instr->attr.rounding == TT_ROUND_TERNARY) { /* the mean over the rows, in their order */
        for (int64_t r = 0; r < l->in[0].rows; r++) sum += measure[r];
        measure[0] = sum / (double)l->in[0].rows;
    }
    if (status == TT_OK) status = tt__for_rows(l, &l->in[0], bytes, TT__K(few_bits_rows));
    return status;
}
