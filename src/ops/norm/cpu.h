#pragma once
#include "../../base/base.h"
#include "../scratch.h"
#include "../cpu_launch.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "../../cpu/rows.h"
#include "../cpu_rows.h"
#include "../cpu_column_sums.h"

/* ---------------------------------------------------------------------------------------------- layernorm */

/* Sums (x - mean)^2 over n numbers. Returns the sum over whole pairs of vectors, and sets *rest to the sum
   over the numbers after the last whole pair. */
TT__INLINE float TT__K(squares)(const float *x, int64_t n, const float mean, float *rest)
{
    int64_t c = 0;
    tt__vf s0 = TT__K(zero)(), s1 = s0;
    for (; c + 2 * TT__LANES <= n; c += 2 * TT__LANES) {
        tt__vf d0 = TT__K(load)(x + c) - mean, d1 = TT__K(load)(x + c + TT__LANES) - mean;
        s0 = TT__K(fma)(d0, d0, s0);
        s1 = TT__K(fma)(d1, d1, s1);
    }
    for (*rest = 0; c < n; c++) *rest += (x[c] - mean) * (x[c] - mean);
    return TT__K(sum)(s0 + s1);
}

/* Computes y = (x - mean) / sqrt(variance + eps) * (w + offset) + b. more: an array of two pointers, to w (n)
   and to b (n) or NULL. rmsnorm is layernorm with a mean of 0, which is not stored; layernorm has no
   offset. */
TT__ROW_FN(layernorm_row)
{
    const float *const *weights = (const float *const *)more, *w = weights[0], *b = weights[1], *row = x[0];
    const bool centred = l->instr->op == TT__OP_LAYERNORM;
    const float offset = l->instr->attr.weight_offset;
    tt__vf s0 = TT__K(zero)(), s1 = s0;
    int64_t c = 0;
    for (; c + 2 * TT__LANES <= n; c += 2 * TT__LANES) {
        s0 += TT__K(load)(row + c);
        s1 += TT__K(load)(row + c + TT__LANES);
    }
    for (; c < n; c += TT__LANES) s0 += TT__K(load_n)(row + c, tt__min(TT__LANES, n - c));
    float mean = centred ? TT__K(sum)(s0 + s1) / (float)n : 0, rest;
    float squares = TT__K(squares)(row, n, mean, &rest);
    float rstd = 1.0f / sqrtf((squares + rest) / (float)n + l->instr->attr.eps);
    for (c = 0; c < n; c += TT__LANES) {
        tt__vf v = (TT__K(load_n)(row + c, n - c) - mean) * rstd * (TT__K(load_n)(w + c, n - c) + offset);
        if (b) v += TT__K(load_n)(b + c, n - c);
        TT__K(store_n)(y + c, v, n - c);
    }
    if (!l->out[1].data) return;
    float *stats = (float *)tt__at(&l->out[1], r);
    if (centred) *stats++ = mean;
    *stats = rstd;
}

TT__ROWS_FN(layernorm_rows)
{
    const float *weights[2] = {TT__K(row_in)(&l->in[1], 0, scratch, 3), NULL};
    if (l->in[2].data) /* only layernorm can have a bias */
        weights[1] = TT__K(row_in)(&l->in[2], 0, scratch, 4);
    TT__K(map_rows)(l, from, to, scratch, 0, 1, TT__K(layernorm_row), weights);
}

TT__RUN_ROWS(LAYERNORM, TT__K(layernorm_rows)(l, from, to, scratch))

TT__FN tt_status TT__K(run_RMSNORM)(const tt__launch *l)
{
    tt__launch part;
    for (int k = 0; tt__norm_launch(l, 0, k, &part); k++) TT__K(run_LAYERNORM)(&part);
    return TT_OK;
}

/* Computes the gradients. With n = (x - mean) / std and g = dy * w, dx = (g - avg(g) - n * avg(g * n)) / std,
   where avg is the average over a row. Summed over rows, dw = dy * n and db = dy. rmsnorm has no mean and no
   avg(g). */
TT__ROWS_FN(layernorm_backward_rows)
{
    int64_t n = l->in[1].cols, parts = tt__ceil_div(l->in[1].rows, TT__SUM_ROWS), part = from / TT__SUM_ROWS;
    float *dw = TT__K(partial_sum)(l, part, n), *db = TT__K(partial_sum)(l, parts + part, n);
    const float *w = TT__K(row_in)(&l->in[2], 0, scratch, 3);
    const bool centred = l->instr->op == TT__OP_LAYERNORM_BACKWARD;
    const float offset = l->instr->attr.weight_offset;
    memset(dw, 0, (size_t)n * 4);
    memset(db, 0, (size_t)n * 4);
    for (int64_t r = from; r < to; r++) {
        const float *dy = TT__K(row_in)(&l->in[0], r, scratch, 1);
        const float *x = TT__K(row_in)(&l->in[1], r, scratch, 2);
        const float *stats = (const float *)tt__at(&l->in[3], r);
        float mean = centred ? stats[0] : 0, rstd = centred ? stats[1] : stats[0];
        tt__vf sg = TT__K(zero)(), sgn = sg;
        for (int64_t c = 0; c < n; c += TT__LANES) {
            tt__vf d = TT__K(load_n)(dy + c, n - c), g = d * (TT__K(load_n)(w + c, n - c) + offset);
            tt__vf xn = (TT__K(load_n)(x + c, n - c) - mean) * rstd;
            sg += g;
            sgn = TT__K(fma)(g, xn, sgn);
            TT__K(store_n)(dw + c, TT__K(fma)(d, xn, TT__K(load_n)(dw + c, n - c)), n - c);
            TT__K(store_n)(db + c, d + TT__K(load_n)(db + c, n - c), n - c);
        }
        float avg_g = centred ? TT__K(sum)(sg) / (float)n : 0, avg_gn = TT__K(sum)(sgn) / (float)n;
        if (!l->out[0].data) continue;
        float *dx = TT__K(row_begin)(&l->out[0], l->add[0], r, scratch);
        for (int64_t c = 0; c < n; c += TT__LANES) {
            tt__vf g = TT__K(load_n)(dy + c, n - c) * (TT__K(load_n)(w + c, n - c) + offset),
                   xn = (TT__K(load_n)(x + c, n - c) - mean) * rstd;
            TT__K(store_n)(dx + c, (g - avg_g - xn * avg_gn) * rstd, n - c);
        }
        TT__K(row_end)(&l->out[0], l->add[0], r, dx, scratch, 4);
    }
}

TT__FN tt_status TT__K(run_LAYERNORM_BACKWARD)(const tt__launch *l)
{
    int64_t rows = l->in[1].rows, n = l->in[1].cols, parts = tt__ceil_div(rows, TT__SUM_ROWS);
    size_t used = 2 * (size_t)parts * tt__row_bytes(n);
    float *scratch = tt__workspace_at(l, used);
    tt__for_chunks(l, rows, n, TT__SUM_ROWS, used, TT__K(layernorm_backward_rows));
    if (l->out[1].data) TT__K(finish_column_sums)(l, &l->out[1], l->add[1], 0, parts, scratch);
    if (l->out[2].data) TT__K(finish_column_sums)(l, &l->out[2], l->add[2], parts, parts, scratch);
    return TT_OK;
}

TT__FN tt_status TT__K(run_RMSNORM_BACKWARD)(const tt__launch *l)
{
    tt__launch part;
    for (int k = 0; tt__norm_launch(l, 1, k, &part); k++) TT__K(run_LAYERNORM_BACKWARD)(&part);
    return TT_OK;
}

/* -------------------------------------------------------------------------------- softmax and normalize */

TT__ROW_FN(row_SOFTMAX)
{
    int64_t c = 0;
    tt__vf top = TT__K(splat)(-INFINITY), s = TT__K(zero)();
    for (; c + TT__LANES <= n; c += TT__LANES) top = TT__K(max)(TT__K(load)(x[0] + c), top);
    float max = TT__K(max_lane)(top), rest = 0;
    for (; c < n; c++) max = x[0][c] > max ? x[0][c] : max;
    for (c = 0; c < n; c += TT__LANES) {
        const tt__vf e = TT__K(exp)(TT__K(load_n)(x[0] + c, n - c) - max);
        TT__K(store_n)(y + c, e, n - c);
        if (c + TT__LANES <= n) s += e;
    }
    for (c = n / TT__LANES * TT__LANES; c < n; c++) rest += y[c];
    TT__K(axpby)(y, 1.0f / (TT__K(sum)(s) + rest), y, 0, NULL, n);
}

TT__RUN_MAP(SOFTMAX, 0, 1)

TT__RUN_MAP_OF(SOFTMAX_BACKWARD, 0, 2, const float dot = TT__K(dot_row)(x[0], x[1], n);
    for (int64_t c = 0; c < n; c += TT__LANES) {
        const tt__vf dy = TT__K(load_n)(x[0] + c, n - c);
        TT__K(store_n)(y + c, TT__K(load_n)(x[1] + c, n - c) * (dy - dot), n - c);
    })

TT__ROW_FN(row_NORMALIZE)
{
    float rest;
    const float squares = TT__K(squares)(x[0], n, 0, &rest), eps = l->instr->attr.eps;
    const float norm = sqrtf(squares + rest), inverse = 1.0f / (norm < eps ? eps : norm);
    TT__K(axpby)(y, inverse, x[0], 0, NULL, n);
    if (l->out[1].data) *(float *)tt__at(&l->out[1], r) = inverse;
}

TT__RUN_MAP(NORMALIZE, 0, 1)

/* Computes dx = (dy - y * sum(dy * y)) / norm or, where eps has replaced the norm, dx = dy / eps. */
TT__ROW_FN(row_NORMALIZE_BACKWARD)
{
    const float inverse = *(const float *)tt__at(&l->in[2], r);
    const float dot = inverse < 1.0f / l->instr->attr.eps ? TT__K(dot_row)(x[0], x[1], n) : 0;
    TT__K(axpby)(y, inverse, x[0], -inverse * dot, x[1], n);
}

TT__RUN_MAP(NORMALIZE_BACKWARD, 0, 2)
