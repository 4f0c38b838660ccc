#pragma once
#include "../../base/base.h"
#include "../layouts.h"
#include "../cpu_launch.h"
#include "../../cpu/kernels.h"
#include "../../cpu/rows.h"
#include "../cpu_rows.h"
#include "../embedding/cpu.h"

/* ---------------------------------------------------------------- rows: gather, scatter, pooling, patches */

/* Adds row r of dy to row index[r] of dx, for all r. The index may list a row several times, so the rows are
   added one after another, in order. */
TT__FN tt_status TT__K(run_GATHER_ROWS_BACKWARD)(const tt__launch *l)
{
    const int32_t *index = (const int32_t *)l->in[1].data;
    float *scratch = (float *)l->workspace;
    if (!l->add[0]) tt__for_rows(l, &l->out[0], 0, TT__K(zero_rows));
    for (int64_t r = 0; r < l->in[0].rows; r++) {
        const float *dy = TT__K(row_in)(&l->in[0], r, scratch, 0);
        TT__K(row_end)(&l->out[0], true, index[r], dy, scratch, 1);
    }
    return TT_OK;
}

TT__FN tt_status TT__K(run_SET_ROWS)(const tt__launch *l)
{
    const int32_t *index = (const int32_t *)l->in[1].data;
    float *scratch = (float *)l->workspace;
    if (l->in[0].data != l->out[0].data) tt__for_rows(l, &l->out[0], 0, TT__K(copy_rows));
    for (int64_t k = 0; k < l->in[1].rows; k++) {
        const float *row = TT__K(row_in)(&l->in[2], 0, scratch, 0);
        TT__K(row_end)(&l->out[0], false, index[k], row, scratch, 1);
    }
    return TT_OK;
}

TT__ROWS_FN(store_rows)
{
    const int32_t *index = (const int32_t *)l->in[1].data;
    for (int64_t r = from; r < to; r++) {
        const float *x = TT__K(row_in)(&l->in[0], r, scratch, 0);
        TT__K(row_end)(&l->out[0], false, index[r], x, scratch, 1);
    }
}

TT__FN tt_status TT__K(run_STORE_ROWS)(const tt__launch *l)
{
    return tt__for_rows(l, &l->in[0], 0, TT__K(store_rows));
}

TT__ROWS_FN(set_rows_backward_rows)
{
    const uint8_t *set = (const uint8_t *)l->workspace;
    for (int64_t r = from; r < to; r++) {
        if (!set[r] && (l->add[0] || l->in[0].data != l->out[0].data)) TT__K(copy_rows)(l, r, r + 1, scratch);
        if (set[r] && !l->add[0]) TT__K(zero_rows)(l, r, r + 1, scratch);
    }
}

/* Computes the gradients of x and of the row to which the listed rows were set. Marks the listed rows first,
   because the index may list a row twice and its gradient must count once. */
TT__FN tt_status TT__K(run_SET_ROWS_BACKWARD)(const tt__launch *l)
{
    const int32_t *index = (const int32_t *)l->in[1].data;
    int64_t rows = l->in[0].rows, n = l->in[0].cols;
    uint8_t *set = (uint8_t *)l->workspace;
    size_t skip = tt__align_up((size_t)rows);
    float *scratch = tt__workspace_at(l, skip);
    memset(set, 0, (size_t)rows);
    for (int64_t k = 0; k < l->in[1].rows; k++) set[index[k]] = 1;
    if (l->out[1].data) {
        float *sum = TT__K(row_begin)(&l->out[1], l->add[1], 0, scratch);
        memset(sum, 0, (size_t)n * 4);
        for (int64_t r = 0; r < rows; r++) {
            if (!set[r]) continue;
            TT__K(row_add)(sum, &l->in[0], r, scratch, 1);
        }
        TT__K(row_end)(&l->out[1], l->add[1], 0, sum, scratch, 2);
    }
    return l->out[0].data ? tt__for_rows(l, &l->in[0], skip, TT__K(set_rows_backward_rows)) : TT_OK;
}

TT__ROWS_FN(patches_rows)
{
    const tt_patch_options *o = &l->instr->attr.image;
    const int32_t *position = (const int32_t *)l->in[1].data, *start = (const int32_t *)l->in[2].data;
    int64_t seqs = l->in[2].rows - 1, n = l->out[0].cols, s = tt__sequence_of(start, seqs, from);
    for (int64_t r = from; r < to; r++) {
        float *y = TT__K(row_begin)(&l->out[0], l->add[0], r, scratch), *to_y = y;
        while (r >= start[s + 1]) s++;
        int p = position[r] - 1, across = o->width / o->patch;
        if (p < 0) memset(y, 0, (size_t)n * 4);
        for (int c = 0; c < o->channels && p >= 0; c++) {
            const int64_t corner = ((int64_t)p / across * o->width + p % across) * o->patch;
            const uint8_t *from_x = (const uint8_t *)tt__at(&l->in[0], s) + corner * o->channels + c;
            float scale = 1 / (255 * o->std[c]), shift = -o->mean[c] / o->std[c];
            for (int line = 0; line < o->patch; line++, from_x += (int64_t)o->width * o->channels)
                for (int x = 0; x < o->patch; x++) *to_y++ = (float)from_x[x * o->channels] * scale + shift;
        }
        TT__K(row_end)(&l->out[0], l->add[0], r, y, scratch, 1);
    }
}

TT__RUN_ROWS(PATCHES, TT__K(patches_rows)(l, from, to, scratch))

/* Returns the factor of the sum of a sequence of n rows. */
TT__INLINE float TT__K(pool_factor)(const tt__launch *l, int32_t n)
{
    return l->instr->attr.sums ? 1.0f : 1.0f / (float)n;
}

TT__ROWS_FN(mean_pool_rows)
{
    const int32_t *start = (const int32_t *)l->in[1].data;
    int64_t n = l->in[0].cols;
    float *sum = TT__K(scratch_row)(scratch, n, 0);
    for (int64_t s = from; s < to; s++) {
        memset(sum, 0, (size_t)n * 4);
        for (int64_t r = start[s]; r < start[s + 1]; r++) {
            const float *x = TT__K(row_in)(&l->in[0], r, scratch, 1);
            TT__K(axpby)(sum, 1, sum, 1, x, n);
        }
        float *y = TT__K(row_begin)(&l->out[0], l->add[0], s, TT__K(scratch_row)(scratch, n, 2));
        TT__K(axpby)(y, TT__K(pool_factor)(l, start[s + 1] - start[s]), sum, 0, NULL, n);
        TT__K(row_end)(&l->out[0], l->add[0], s, y, scratch, 3);
    }
}

TT__FN tt_status TT__K(run_MEAN_POOL)(const tt__launch *l)
{
    return tt__for_chunks(l, l->out[0].rows, l->out[0].cols, 1, 0, TT__K(mean_pool_rows));
}

TT__ROWS_FN(mean_pool_backward_rows) /* [from, to) counts sequences, not rows */
{
    const int32_t *start = (const int32_t *)l->in[1].data;
    int64_t n = l->in[0].cols;
    for (int64_t s = from; s < to; s++) {
        const float *dy = TT__K(row_in)(&l->in[0], s, scratch, 1);
        for (int64_t r = start[s]; r < start[s + 1]; r++) {
            float *dx = TT__K(row_begin)(&l->out[0], l->add[0], r, scratch);
            TT__K(axpby)(dx, TT__K(pool_factor)(l, start[s + 1] - start[s]), dy, 0, NULL, n);
            TT__K(row_end)(&l->out[0], l->add[0], r, dx, scratch, 2);
        }
    }
}

TT__FN tt_status TT__K(run_MEAN_POOL_BACKWARD)(const tt__launch *l)
{
    return tt__for_chunks(l, l->in[0].rows, l->in[0].cols, 1, 0, TT__K(mean_pool_backward_rows));
}
