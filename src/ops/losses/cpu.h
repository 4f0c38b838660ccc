#pragma once
#include "../../base/base.h"
#include "../scratch.h"
#include "../cpu_launch.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "../../cpu/rows.h"
#include "../cpu_rows.h"
#include "../linear/cpu.h"

/* ---------------------------------------------------------------------------------------------------- losses
   A loss has four counts: the sum of the rows' weighted losses, the sum of their weights, the sum of the
   weights of rows whose prediction is right, and the total of tt_loss_total, or 0. */

TT__INLINE float TT__K(row_weight)(const tt__launch *l, int operand, int64_t r)
{
    float scratch[TT__LANES]; /* one float is enough, but gcc cannot prove that */
    return l->in[operand].data ? *TT__K(row_in)(&l->in[operand], r, scratch, 0) : 1.0f;
}

/* Returns the weights of classes, which are f32 as all inputs are, or NULL if the operand has weights of
   rows. */
TT__INLINE const float *TT__K(class_weights)(const tt__launch *l, int operand)
{
    return l->instr->attr.by_class ? (const float *)l->in[operand].data : NULL;
}

/* Returns the logarithm of the sum of exp(x[c]) over a row x of n numbers. Sets *max to the largest number of
   the row and *sum_x to the sum of the row. */
TT__INLINE float TT__K(log_sum_exp)(const float *x, int64_t n, float *max, float *sum_x)
{
    tt__vf top = TT__K(splat)(-INFINITY), s = TT__K(zero)(), sx = s;
    int64_t c = 0;
    for (; c + TT__LANES <= n; c += TT__LANES) top = TT__K(max)(TT__K(load)(x + c), top);
    float m = TT__K(max_lane)(top);
    for (; c < n; c++) m = x[c] > m ? x[c] : m;
    for (c = 0; c + TT__LANES <= n; c += TT__LANES) {
        tt__vf v = TT__K(load)(x + c);
        s += TT__K(exp)(v - m);
        sx += v;
    }
    float sum = TT__K(sum)(s);
    *sum_x = TT__K(sum)(sx);
    for (; c < n; c++) { sum += tt__expf(x[c] - m); *sum_x += x[c]; }
    *max = m;
    return m + tt__lnf(sum);
}

TT__ROWS_FN(cross_entropy_rows)
{
    const tt__attr *attr = &l->instr->attr;
    const int32_t *targets = (const int32_t *)l->in[1].data;
    float *row_loss = (float *)l->workspace, *row_right = row_loss + l->in[0].rows;
    int64_t n = l->in[0].cols;
    const float *weights = TT__K(class_weights)(l, 2);
    for (int64_t r = from; r < to; r++) {
        const float *x = TT__K(row_in)(&l->in[0], r, scratch, 1);
        float m, sum_x;
        const float lse = TT__K(log_sum_exp)(x, n, &m, &sum_x);
        *(float *)tt__at(&l->out[1], r) = lse;
        if (targets[r] == attr->ignore_index) { row_loss[r] = row_right[r] = 0; continue; }
        const float smoothed = attr->smoothing > 0 ? attr->smoothing * (sum_x / (float)n) : 0;
        row_loss[r] = lse - (1 - attr->smoothing) * x[targets[r]] - smoothed;
        if (weights) { /* with weights of classes, row_loss is already weighted */
            float all = 0;
            for (int64_t c = 0; c < n && attr->smoothing > 0; c++) all += weights[c] * (lse - x[c]);
            row_loss[r] = (1 - attr->smoothing) * weights[targets[r]] * (lse - x[targets[r]]) +
                          attr->smoothing / (float)n * all;
        }
        /* The prediction is the first of the largest logits, as in argmax. */
        bool right = x[targets[r]] == m;
        for (int64_t c = 0; c < targets[r] && right; c++) right = x[c] != m;
        row_right[r] = right;
    }
}

TT__INLINE void TT__K(sum_losses)(const tt__launch *l, const int32_t *targets)
{
    const float *row_loss = (const float *)l->workspace, *row_right = row_loss + l->in[0].rows;
    const float *weights = targets ? TT__K(class_weights)(l, 2) : NULL;
    double loss = 0, total = 0, right = 0;
    for (int64_t r = 0; r < l->in[0].rows; r++) {
        if (targets && targets[r] == l->instr->attr.ignore_index) continue;
        double w = weights ? weights[targets[r]] : TT__K(row_weight)(l, 2, r);
        loss += weights ? row_loss[r] : w * row_loss[r];
        total += w;
        right += w * row_right[r];
    }
    float *counts = (float *)l->out[2].data;
    counts[0] = (float)loss; counts[1] = (float)total; counts[2] = (float)right;
    counts[3] = l->in[TT__LOSS_TOTAL].data ? *(const float *)l->in[TT__LOSS_TOTAL].data : 0;
    *(float *)l->out[0].data = (float)(loss / (l->instr->attr.by_total ? counts[3] : total));
}

TT__FN tt_status TT__K(run_CROSS_ENTROPY)(const tt__launch *l)
{
    tt__for_rows(l, &l->in[0], tt__align_up((size_t)l->in[0].rows * 8), TT__K(cross_entropy_rows));
    TT__K(sum_losses)(l, (const int32_t *)l->in[1].data);
    return TT_OK;
}

/* Computes the loss of each row of logits. */
TT__FN tt_status TT__K(run_TOKEN_LOSSES)(const tt__launch *l)
{
    tt__launch loss = *l;
    loss.in[2].data = NULL;
    tt__for_rows(&loss, &l->in[0], tt__align_up((size_t)l->in[0].rows * 8), TT__K(cross_entropy_rows));
    memcpy(l->out[0].data, l->workspace, (size_t)l->in[0].rows * 4);
    return TT_OK;
}

/* Returns the factor of all rows' gradients: the gradient of the loss, divided by loss_norm of the step's
   settings; 1 if operand 0 is absent, because rows then have gradients of their own. Without the settings,
   the divisor is the total of tt_loss_total or, if the loss has no total, the sum of the targets'
   weights. */
TT__INLINE float TT__K(loss_factor)(const tt__launch *l, const tt__mat *counts)
{
    const int divisor = l->instr->attr.by_total ? 3 : 1;
    if (!l->in[0].data) return 1;
    double norm = TT__RUN_OF(l) ? TT__RUN_OF(l)->loss_norm : ((const float *)counts->data)[divisor];
    return norm > 0 ? (float)(*(const float *)l->in[0].data / norm) : 0.0f;
}

TT__ROW_FN(row_CROSS_ENTROPY_BACKWARD)
{
    const float smoothing = l->instr->attr.smoothing, lse = *(const float *)tt__at(&l->in[4], r);
    const float *weights = TT__K(class_weights)(l, 3);
    const int32_t target = ((const int32_t *)l->in[2].data)[r];
    if (target == l->instr->attr.ignore_index) { memset(y, 0, (size_t)n * 4); return; }
    if (weights) {
        const float factor = TT__K(loss_factor)(l, &l->in[5]), each = smoothing / (float)n;
        float all = (1 - smoothing) * weights[target]; /* sum over the classes of weight times share in the
                                                          smoothed target */
        for (int64_t c = 0; c < n && smoothing > 0; c++) all += each * weights[c];
        for (int64_t c = 0; c < n; c += TT__LANES) {
            tt__vf p = TT__K(exp)(TT__K(load_n)(x[0] + c, n - c) - lse);
            TT__K(store_n)(y + c, (p * all - each * TT__K(load_n)(weights + c, n - c)) * factor, n - c);
        }
        y[target] -= (1 - smoothing) * weights[target] * factor;
        return;
    }
    const float w = TT__K(loss_factor)(l, &l->in[5]) * TT__K(row_weight)(l, 3, r);
    for (int64_t c = 0; c < n; c += TT__LANES) {
        tt__vf p = TT__K(exp)(TT__K(load_n)(x[0] + c, n - c) - lse);
        TT__K(store_n)(y + c, (p - smoothing / (float)n) * w, n - c);
    }
    y[target] -= (1 - smoothing) * w;
}

TT__RUN_MAP(CROSS_ENTROPY_BACKWARD, 1, 1)

TT__FN tt_status TT__K(run_TOKEN_LOSSES_BACKWARD)(const tt__launch *l)
{
    return TT__K(run_CROSS_ENTROPY_BACKWARD)(l);
}

/* Computes the forward and backward of a linear layer and its cross-entropy, one chunk of rows after another
   (see tt__fuse_CROSS_ENTROPY), with the kernels of these two ops. The gradients of the logits have the dtype
   of x and replace the logits in memory. The workspace then begins with the loss of each row. */
TT__FN void TT__K(linear_losses)(const tt__launch *l)
{
    const tt__mat *x = &l->in[0], *weights = &l->in[2], *w = &l->in[3], *dx = &l->out[1];
    const int64_t rows = x->rows, classes = w->rows,
                  chunk = tt__ceil_div(rows, tt__ceil_div(rows, TT__LOSS_CHUNK));
    float *row_loss = (float *)l->workspace, *row_right = row_loss + rows,
          *lse = row_loss + tt__align_up((size_t)rows * 8) / 4;
    float *logits = lse + tt__align_up((size_t)chunk * 4) / 4; /* tt__loss_bytes is the sum of these parts */
    tt__launch forward = *l, loss = *l, back = *l, part = *l;
    forward.workspace = tt__workspace_at(l, tt__loss_bytes(rows, classes));
    loss.workspace = back.workspace = part.workspace = forward.workspace;
    forward.in[1] = *w;
    forward.in[2] = l->in[4];
    forward.in[3].data = forward.out[1].data = part.in[2].data = NULL;
    forward.add[0] = back.add[0] = false;
    for (int64_t r = 0, n; r < rows; r += n) {
        n = tt__min(chunk, rows - r);
        tt__mat z = {logits, TT_F32, n, classes, classes}, dz = z, xs = tt__rows_of(x, r, n),
                lses = {lse, TT_F32, n, 1, 1};
        dz.dtype = x->dtype;
        dz.ld = classes * (int64_t)(sizeof(float) / tt_dtype_bytes(x->dtype));
        forward.in[0] = xs;
        forward.out[0] = z;
        TT__K(run_LINEAR)(&forward);
        loss.in[0] = z;
        loss.in[1] = tt__rows_of(&l->in[1], r, n);
        loss.out[1] = lses;
        tt__for_rows(&loss, &z, tt__align_up((size_t)n * 8), TT__K(cross_entropy_rows));
        memcpy(row_loss + r, loss.workspace, (size_t)n * 4);
        memcpy(row_right + r, (const float *)loss.workspace + n, (size_t)n * 4);
        if (!dx->data && !l->out[3].data && !l->out[4].data) continue;
        back.in[0] = l->in[5];
        back.in[1] = z;
        back.in[2] = loss.in[1];
        back.in[3] = weights->data ? tt__rows_of(weights, r, n) : *weights;
        back.in[4] = lses;
        back.in[5] = l->out[2];
        back.out[0] = dz;
        TT__K(run_CROSS_ENTROPY_BACKWARD)(&back);
        part.in[0] = dz;
        if (dx->data) {
            part.in[1] = *w;
            part.out[0] = tt__rows_of(dx, r, n);
            part.add[0] = l->add[1];
            TT__K(run_LINEAR_DX)(&part);
        }
        part.in[1] = xs;
        part.out[0] = l->out[3];
        part.out[1] = l->out[4];
        part.add[0] = l->add[3] || r > 0;
        part.add[1] = l->add[4] || r > 0;
        TT__K(run_LINEAR_DW)(&part);
    }
}

TT__FN tt_status TT__K(run_LINEAR_CROSS_ENTROPY)(const tt__launch *l)
{
    const int32_t *targets = (const int32_t *)l->in[1].data;
    double total = 0;
    for (int64_t r = 0; r < l->in[0].rows; r++)
        if (targets[r] != l->instr->attr.ignore_index) total += TT__K(row_weight)(l, 2, r);
    ((float *)l->out[2].data)[1] = (float)total;
    TT__K(linear_losses)(l);
    TT__K(sum_losses)(l, targets);
    return TT_OK;
}

TT__FN tt_status TT__K(run_LINEAR_TOKEN_LOSSES)(const tt__launch *l)
{
    TT__K(linear_losses)(l);
    if (l->out[0].data) memcpy(l->out[0].data, l->workspace, (size_t)l->in[0].rows * 4);
    return TT_OK;
}

TT__ROWS_FN(soft_cross_entropy_rows)
{
    float *row_loss = (float *)l->workspace, *row_right = row_loss + l->in[0].rows;
    const int64_t n = l->in[0].cols;
    for (int64_t r = from; r < to; r++) {
        const float *x = TT__K(row_in)(&l->in[0], r, scratch, 1);
        const float *p = TT__K(row_in)(&l->in[1], r, scratch, 2);
        float *stats = (float *)tt__at(&l->out[1], r);
        tt__vf loss = TT__K(zero)(), mass = loss;
        float m, sum_x;
        const float lse = TT__K(log_sum_exp)(x, n, &m, &sum_x);
        for (int64_t c = 0; c < n; c += TT__LANES) {
            const tt__vf share = TT__K(load_n)(p + c, n - c);
            loss = TT__K(fma)(share, lse - TT__K(load_n)(x + c, n - c), loss);
            mass += share;
        }
        stats[0] = lse;
        stats[1] = TT__K(sum)(mass);
        row_loss[r] = TT__K(sum)(loss);
        row_right[r] = 0;
    }
}

TT__FN tt_status TT__K(run_SOFT_CROSS_ENTROPY)(const tt__launch *l)
{
    tt__for_rows(l, &l->in[0], tt__align_up((size_t)l->in[0].rows * 8), TT__K(soft_cross_entropy_rows));
    TT__K(sum_losses)(l, NULL);
    return TT_OK;
}

TT__ROW_FN(row_SOFT_CROSS_ENTROPY_BACKWARD)
{
    const float *stats = (const float *)tt__at(&l->in[4], r);
    const float w = TT__K(loss_factor)(l, &l->in[5]) * TT__K(row_weight)(l, 3, r);
    for (int64_t c = 0; c < n; c += TT__LANES) {
        const tt__vf p = TT__K(exp)(TT__K(load_n)(x[0] + c, n - c) - stats[0]);
        TT__K(store_n)(y + c, (p * stats[1] - TT__K(load_n)(x[1] + c, n - c)) * w, n - c);
    }
}

TT__RUN_MAP(SOFT_CROSS_ENTROPY_BACKWARD, 1, 2)

TT__ROWS_FN(squared_error_rows)
{
    float *row_loss = (float *)l->workspace, *row_right = row_loss + l->in[0].rows;
    int64_t n = l->in[0].cols;
    for (int64_t r = from; r < to; r++) {
        const float *x = TT__K(row_in)(&l->in[0], r, scratch, 1);
        const float *y = TT__K(row_in)(&l->in[1], r, scratch, 2);
        tt__vf s = TT__K(zero)();
        for (int64_t c = 0; c < n; c += TT__LANES) {
            tt__vf d = TT__K(load_n)(x + c, n - c) - TT__K(load_n)(y + c, n - c);
            s = TT__K(fma)(d, d, s);
        }
        row_loss[r] = TT__K(sum)(s) / (float)n;
        row_right[r] = 0;
    }
}

TT__FN tt_status TT__K(run_MEAN_SQUARED_ERROR)(const tt__launch *l)
{
    tt__for_rows(l, &l->in[0], tt__align_up((size_t)l->in[0].rows * 8), TT__K(squared_error_rows));
    TT__K(sum_losses)(l, NULL);
    return TT_OK;
}

TT__ROW_FN(row_MEAN_SQUARED_ERROR_BACKWARD)
{
    const float w = 2 * TT__K(loss_factor)(l, &l->in[4]) * TT__K(row_weight)(l, 3, r) / (float)n;
    TT__K(axpby)(y, w, x[0], -w, x[1], n);
}

TT__RUN_MAP(MEAN_SQUARED_ERROR_BACKWARD, 1, 2)

/* Computes the loss of each row, and whether all predictions of the row are right. The loss is the mean over
   the columns of `p * target * log(1 + e^-x) + (1 - target) * log(1 + e^x)`. p: the positive weights, which
   are f32, as are all inputs. */
TT__ROWS_FN(sigmoid_cross_entropy_rows)
{
    float *row_loss = (float *)l->workspace, *row_right = row_loss + l->in[0].rows;
    const float *p = (const float *)l->in[3].data;
    const int64_t n = l->in[0].cols;
    for (int64_t r = from; r < to; r++) {
        const float *x = TT__K(row_in)(&l->in[0], r, scratch, 1);
        const float *target = TT__K(row_in)(&l->in[1], r, scratch, 2);
        double sum = 0;
        bool right = true;
        for (int64_t c = 0; c < n; c++) {
            const float tail = (float)tt__ln1p(tt__exp(-fabsf(x[c]))), above = x[c] > 0 ? x[c] : 0;
            sum += (p ? p[c] : 1) * target[c] * (above - x[c] + tail) + (1 - target[c]) * (above + tail);
            right = right && (x[c] > 0) == (target[c] > 0.5f);
        }
        row_loss[r] = (float)(sum / (double)n);
        row_right[r] = right;
    }
}

TT__FN tt_status TT__K(run_SIGMOID_CROSS_ENTROPY)(const tt__launch *l)
{
    const size_t kept = tt__align_up((size_t)l->in[0].rows * 8);
    tt__for_rows(l, &l->in[0], kept, TT__K(sigmoid_cross_entropy_rows));
    TT__K(sum_losses)(l, NULL);
    return TT_OK;
}

TT__ROW_FN(row_SIGMOID_CROSS_ENTROPY_BACKWARD)
{
    const float w = TT__K(loss_factor)(l, &l->in[5]) * TT__K(row_weight)(l, 3, r) / (float)n;
    const float *positive = (const float *)l->in[4].data;
    for (int64_t c = 0; c < n; c += TT__LANES) {
        const tt__vf v = TT__K(load_n)(x[0] + c, n - c), target = TT__K(load_n)(x[1] + c, n - c);
        const tt__vf p = positive ? TT__K(load_n)(positive + c, n - c) : TT__K(splat)(1.0f);
        const tt__vf above = TT__K(act_SIGMOID)(v), below = TT__K(act_SIGMOID)(-v);
        TT__K(store_n)(y + c, ((1.0f - target) * above - p * target * below) * w, n - c);
    }
}

TT__RUN_MAP(SIGMOID_CROSS_ENTROPY_BACKWARD, 1, 2)
