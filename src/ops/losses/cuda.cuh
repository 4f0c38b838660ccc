#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../../cuda/kernels.cuh"
#include "../elementwise/cuda.cuh"

namespace {

// ================================================================================================== losses
// A loss has four counts: the sum of the rows' weighted losses, the sum of their weights, the sum of the
// weights of rows whose prediction is right, and the total of tt_loss_total, or 0.

// Max number of thread blocks of a loss; each block writes one partial sum to the resident workspace. Tests
// make the number smaller.
#ifndef TT__LOSS_BLOCKS
#define TT__LOSS_BLOCKS 1024
#endif

__device__ __forceinline__ float row_weight(const tt__mat &weights, int64_t r)
{
    return weights.data ? load_any(weights.data, weights.dtype, r * weights.ld) : 1.0f;
}

// Returns the number, among a loss's counts, by which the loss is divided: the total of tt_loss_total, or the
// sum of the targets' weights. k: the operand with the counts; NULL if it is absent.
const float *divisor_of(const tt__launch *l, int k)
{
    const float *counts = (const float *)l->in[k].data;
    return counts ? counts + (l->instr->attr.by_total ? 3 : 1) : NULL;
}

// Returns the factor of all rows' gradients: the gradient of the loss, divided by loss_norm or, without the
// step's settings, by *divisor. If dloss is NULL, the factor is 1, because rows have gradients of their own.
__device__ __forceinline__ float loss_factor(const tt__step_settings *run, const float *dloss,
                                             const float *divisor)
{
    if (!dloss) return 1.0f;
    double norm = run ? run->loss_norm : *divisor;
    return norm > 0 ? (float)(*dloss / norm) : 0.0f;
}

// Adds up a block's sums, and stores the counts and the loss. total: the fourth count; NULL: 0. by_total: the
// total is that of tt_loss_total, by which the loss is divided.
template <int THREADS>
__device__ __forceinline__ void store_counts(loss_sums sums, const float *total, bool by_total, float *counts,
                                             float *loss)
{
    sums.loss = block_sum<THREADS>(sums.loss);
    sums.weight = block_sum<THREADS>(sums.weight);
    sums.right = block_sum<THREADS>(sums.right);
    if (threadIdx.x) return;
    counts[0] = (float)sums.loss; counts[1] = (float)sums.weight; counts[2] = (float)sums.right;
    counts[3] = total ? *total : 0;
    *loss = (float)(sums.loss / (by_total ? *total : sums.weight));
}

template <int THREADS> __device__ __forceinline__ void store_partial(loss_sums sums, loss_sums *partial)
{
    sums.loss = block_sum<THREADS>(sums.loss);
    sums.weight = block_sum<THREADS>(sums.weight);
    sums.right = block_sum<THREADS>(sums.right);
    if (threadIdx.x == 0) partial[blockIdx.x] = sums;
}

__global__ void __launch_bounds__(256) loss_counts(const loss_sums *partial, int n, const float *total,
                                                   bool by_total, float *counts, float *loss)
{
    tt__begin_kernel();
    loss_sums sums = {0, 0, 0};
    for (int k = (int)threadIdx.x; k < n; k += 256) {
        sums.loss += partial[k].loss;
        sums.weight += partial[k].weight;
        sums.right += partial[k].right;
    }
    store_counts<256>(sums, total, by_total, counts, loss);
}

// Computes the counts of a loss from the partial counts of `blocks` blocks.
cudaError_t run_loss_counts(const tt__launch *l, int blocks)
{
    return TT__LAUNCH(loss_counts, 1, 256, 0, l->device->stream, resident_of(l)->losses, blocks,
                      (const float *)l->in[TT__LOSS_TOTAL].data, l->instr->attr.by_total,
                      (float *)l->out[2].data, (float *)l->out[0].data);
}

// The result of a row of logits: log-sum-exp, loss, and whether the prediction is right. Every thread that
// works on the row has the same result.
struct row_result { float lse, loss; bool right; };

// Merges the sums of a warp's lanes over their parts of a row. m: the largest logit; s: the sum of the
// exponentials of logits - m; sx: the sum of the logits; right: whether the target is the first of the
// largest logits so far.
__device__ __forceinline__ void merge_rows(float &m, float &s, float &sx, bool &right)
{
    const float top = warp_max(m);
    s = warp_sum(s * fast_exp(m - (top == -INFINITY ? 0 : top)));
    sx = warp_sum(sx);
    right = __all_sync(0xffffffffu, right);
    m = top;
}

// Running sums of a thread over its part of a row of n logits. m is the largest logit so far, and s is the
// sum of the exponentials of logits - m (Milakov, Gimelshein: "Online normalizer calculation for softmax",
// 2018), so that one sweep is enough. sx is the sum of the logits. `right` tells whether `own`, the target's
// logit, is the first of the largest logits, as in argmax.
struct logit_sums {
    float m, s, sx, own;
    bool right;

    __device__ __forceinline__ void begin(float logit_of_target)
    {
        m = -INFINITY; s = sx = 0;
        own = logit_of_target;
        right = own == own;
    }
    // Adds the logits v of columns [c, c + N). Logits of columns from n on must be -INFINITY.
    template <int N, class INDEX>
    __device__ __forceinline__ void add(const float (&v)[N], INDEX c, INDEX n, INDEX target, bool smooth)
    {
        float top = v[0], some = 0;
        TT__UNROLL for (int k = 1; k < N; k++) top = fmaxf(top, v[k]);
        const float to = fmaxf(m, top), base = to == -INFINITY ? 0 : to;
        TT__UNROLL for (int k = 0; k < N; k++) some += fast_exp(v[k] - base);
        s = s * fast_exp(m - base) + some;
        m = to;
        if (smooth) TT__UNROLL for (int k = 0; k < N; k++) sx += c + k < n ? v[k] : 0;
        if (target >= c + N) right &= !(top >= own);
        else if (target < c) right &= !(top > own);
        else TT__UNROLL for (int k = 0; k < N; k++) right &= c + k < target ? !(v[k] >= own) : !(v[k] > own);
    }
    // Merges the sums of the row's THREADS threads, a warp or a block, and returns the result in each thread.
    template <int THREADS> __device__ __forceinline__ row_result finish(int64_t n, float smoothing)
    {
        const int thread = (int)threadIdx.x % THREADS;
        merge_rows(m, s, sx, right);
        if (THREADS > 32) {
            TT__SHARED(float4, part, [(THREADS + 31) / 32]);
            __syncthreads(); // waits, because threads may still read `part` of the previous row
            if (thread % 32 == 0) part[thread / 32] = make_float4(m, s, sx, right ? 1.0f : 0.0f);
            __syncthreads();
            const bool there = thread % 32 < THREADS / 32;
            const float4 of = there ? part[thread % 32] : make_float4(-INFINITY, 0, 0, 1);
            m = of.x; s = of.y; sx = of.z; right = of.w != 0;
            merge_rows(m, s, sx, right);
        }
        const float log_s = logf(s);
        return {m + log_s, m - own + log_s + (smoothing > 0 ? smoothing * (own - sx / (float)n) : 0), right};
    }
};

// Returns the result of a row of n logits, computed by THREADS threads, a warp or a block. With target -1,
// only lse is valid.
template <int THREADS>
__device__ __forceinline__ row_result row_cross_entropy(const void *x, tt_dtype dtype, int64_t n, bool wide,
                                                        int64_t target, float smoothing)
{
    logit_sums sums;
    sums.begin(target >= 0 ? load_any(x, dtype, target) : 0);
    for (int64_t c = 8 * ((int)threadIdx.x % THREADS); c < n; c += 8 * THREADS) {
        float v[8];
        load8(v, x, dtype, c, n - c, wide, -INFINITY);
        sums.add<8, int64_t>(v, c, n, target, smoothing > 0);
    }
    return sums.finish<THREADS>(n, smoothing);
}

// Returns the sum over classes of weight * (lse - logit) for a row of n logits, computed by THREADS threads,
// a warp or a block of 256.
template <int THREADS>
__device__ __forceinline__ float row_of_classes(const void *x, tt_dtype dtype, int64_t n, bool wide,
                                                const float *class_weights, float lse)
{
    float sum = 0;
    for (int64_t c = 8 * ((int)threadIdx.x % THREADS); c < n; c += 8 * THREADS) {
        float v[8];
        load8(v, x, dtype, c, n - c, wide);
        TT__UNROLL for (int k = 0; k < 8; k++) sum += c + k < n ? class_weights[c + k] * (lse - v[k]) : 0;
    }
    return THREADS == 32 ? warp_sum(sum) : (float)block_sum<256>(sum);
}

// Computes the log-sum-exps and the partial counts of logits x (rows, n). GROUP threads work on a row: a warp
// if there are few classes, a block if there are many. Reads each row once, or twice with weights of classes
// and smoothing.
template <int GROUP>
__global__ void __launch_bounds__(256) cross_entropy(tt__mat x, const int32_t *targets, tt__mat weights,
                                                     const float *class_weights, tt__mat lse, int ignore,
                                                     float smoothing, bool wide, loss_sums *partial)
{
    tt__begin_kernel();
    const int64_t groups = 256 / GROUP;
    loss_sums sums = {0, 0, 0};
    for (int64_t r = blockIdx.x * groups + threadIdx.x / GROUP; r < x.rows; r += gridDim.x * groups) {
        const int32_t target = targets[r];
        const row_result row = row_cross_entropy<GROUP>(row_at(x, r), x.dtype, x.cols, wide,
                                                        target == ignore ? -1 : target,
                                                        class_weights ? 0 : smoothing);
        float smoothed = 0;
        if (class_weights && smoothing > 0)
            smoothed = smoothing / (float)x.cols *
                       row_of_classes<GROUP>(row_at(x, r), x.dtype, x.cols, wide, class_weights, row.lse);
        if (threadIdx.x % GROUP) continue;
        ((float *)lse.data)[r * lse.ld] = row.lse;
        if (target == ignore) continue;
        const double w = class_weights ? class_weights[target] : row_weight(weights, r);
        sums.loss += class_weights ? (1 - smoothing) * w * row.loss + smoothed : w * row.loss;
        sums.weight += w;
        sums.right += row.right ? w : 0;
    }
    store_partial<256>(sums, partial);
}

// Returns the weights of classes, which are operand k and f32 as all inputs are, or NULL if the operand has
// weights of rows.
const float *class_weights_of(const tt__launch *l, int k)
{
    return l->instr->attr.by_class ? (const float *)l->in[k].data : NULL;
}

cudaError_t run_cross_entropy(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[0];
    const tt__attr *a = &l->instr->attr;
    const bool many = x->cols > 2048;
    const unsigned blocks = grid_for(x->rows, many ? 1 : 8, TT__LOSS_BLOCKS);
    loss_sums *partial = resident_of(l)->losses;
    const int32_t *targets = (const int32_t *)l->in[1].data;
    const float *classes = class_weights_of(l, 2);
    cudaError_t e = many ? TT__LAUNCH((cross_entropy<256>), blocks, 256, 0, d->stream, *x, targets, l->in[2],
                                      classes, l->out[1], a->ignore_index, a->smoothing, is_wide(x), partial)
                         : TT__LAUNCH((cross_entropy<32>), blocks, 256, 0, d->stream, *x, targets, l->in[2],
                                      classes, l->out[1], a->ignore_index, a->smoothing, is_wide(x), partial);
    if (e != cudaSuccess) return e;
    return run_loss_counts(l, (int)blocks);
}
TT__RUN_BY(CROSS_ENTROPY, run_cross_entropy)

// Turns N logits, beginning with column c, into their gradients: (softmax - t) * w, where t is smoothing / n
// for all classes, plus 1 - smoothing for class `target`.
template <int N, class INDEX>
__device__ __forceinline__ void cross_entropy_gradient(float (&x)[N], INDEX c, int64_t n, int32_t target,
                                                       float lse, float smoothing, float w)
{
    TT__UNROLL for (int k = 0; k < N; k++) {
        x[k] = (fast_exp(x[k] - lse) - smoothing / (float)n) * w;
        if (c + k == target) x[k] -= (1 - smoothing) * w;
    }
}

// Turns 8 logits, beginning with column c, into their gradients for a loss in which classes have weights.
// The share of each class in a smoothed target is multiplied by the weight of this class. weights: the
// weights of the classes; sum: the sum of these weights.
__device__ __forceinline__ void cross_entropy_gradient_of_classes(float (&x)[8], int64_t c, int64_t n,
                                                                  int32_t target, float lse, float smoothing,
                                                                  const float *weights, float sum,
                                                                  float factor)
{
    const float each = smoothing / (float)n, own = (1 - smoothing) * weights[target];
    TT__UNROLL for (int k = 0; k < 8; k++) {
        const float of_class = c + k < n ? each * weights[c + k] : 0;
        x[k] = (fast_exp(x[k] - lse) * (own + each * sum) - of_class) * factor;
        if (c + k == target) x[k] -= own * factor;
    }
}

// Computes the gradients of logits x (rows, n), and writes them to dx or, if `add`, adds them to dx. Reads x
// and writes dx once. A thread works on eight elements of a row at a time.
__global__ void __launch_bounds__(256) cross_entropy_backward(const float *dloss, tt__mat x,
                                                              const int32_t *targets, tt__mat weights,
                                                              const float *class_weights, tt__mat lse,
                                                              const float *divisor, tt__mat dx, bool add,
                                                              int ignore, float smoothing, bool wide,
                                                              const tt__step_settings *run)
{
    tt__begin_kernel();
    const int64_t n = x.cols, per_row = (n + 7) / 8, all = x.rows * per_row;
    const float factor = loss_factor(run, dloss, divisor);
    double sum = 0; // the sum of the weights of all classes
    if (class_weights && smoothing > 0) {
        for (int64_t c = threadIdx.x; c < n; c += 256) sum += class_weights[c];
        sum = block_sum<256>(sum);
    }
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < all; i += gridDim.x * (int64_t)256) {
        const int64_t r = i / per_row, c = (i - r * per_row) * 8;
        const int32_t target = targets[r];
        float v[8] = {0}, old[8];
        if (target != ignore) {
            const float row_lse = ((const float *)lse.data)[r * lse.ld];
            load8(v, row_at(x, r), x.dtype, c, n - c, wide);
            if (class_weights)
                cross_entropy_gradient_of_classes(v, c, n, target, row_lse, smoothing, class_weights,
                                                  (float)sum, factor);
            else
                cross_entropy_gradient(v, c, n, target, row_lse, smoothing, factor * row_weight(weights, r));
        }
        if (add) {
            load8(old, row_at(dx, r), dx.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) v[k] += old[k];
        }
        store8(row_at(dx, r), dx.dtype, c, n - c, wide, v);
    }
}

enum { TT__ELEMENT_BLOCKS = 4096 }; // max blocks of elementwise kernels: enough to fill any GPU a few times

cudaError_t run_cross_entropy_backward(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[1], *dx = &l->out[0];
    const tt__attr *a = &l->instr->attr;
    const unsigned blocks = grid_for(x->rows * ((x->cols + 7) / 8), 256, TT__ELEMENT_BLOCKS);
    return TT__LAUNCH(cross_entropy_backward, blocks, 256, 0, d->stream, (const float *)l->in[0].data, *x,
                      (const int32_t *)l->in[2].data, l->in[3], class_weights_of(l, 3), l->in[4],
                      divisor_of(l, 5), *dx, l->add[0], a->ignore_index, a->smoothing,
                      is_wide(x) && is_wide(dx), TT__RUN_OF(l));
}
TT__RUN_BY(CROSS_ENTROPY_BACKWARD, run_cross_entropy_backward)
TT__RUN_BY(TOKEN_LOSSES_BACKWARD, run_cross_entropy_backward)

// Computes the loss and the log-sum-exp of each row of logits x (rows, n). A block works on a row, because n
// is a vocabulary. Reads each row once.
__global__ void __launch_bounds__(256) token_losses(tt__mat x, const int32_t *targets, tt__mat loss,
                                                    tt__mat lse, int ignore, bool wide)
{
    tt__begin_kernel();
    for (int64_t r = blockIdx.x; r < x.rows; r += gridDim.x) {
        const int32_t target = targets[r];
        const row_result row = row_cross_entropy<256>(row_at(x, r), x.dtype, x.cols, wide,
                                                      target == ignore ? -1 : target, 0);
        if (threadIdx.x) continue;
        ((float *)lse.data)[r * lse.ld] = row.lse;
        ((float *)loss.data)[r * loss.ld] = target == ignore ? 0 : row.loss;
    }
}

cudaError_t run_token_losses(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[0];
    const unsigned blocks = grid_for(x->rows, 1, TT__ELEMENT_BLOCKS);
    return TT__LAUNCH(token_losses, blocks, 256, 0, d->stream, *x, (const int32_t *)l->in[1].data,
                      l->out[0], l->out[1], l->instr->attr.ignore_index, is_wide(x));
}
TT__RUN_BY(TOKEN_LOSSES, run_token_losses)

// Computes the statistics (lse, sum of p) of each row and the partial counts, for logits x and probabilities
// p of all classes. GROUP threads work on a row, as in cross_entropy. Reads the logits twice and p once.
template <int GROUP>
__global__ void __launch_bounds__(256) soft_cross_entropy(tt__mat x, tt__mat p, tt__mat weights,
                                                          tt__mat stats, bool wide, loss_sums *partial)
{
    tt__begin_kernel();
    const int64_t groups = 256 / GROUP, n = x.cols;
    loss_sums sums = {0, 0, 0};
    for (int64_t r = blockIdx.x * groups + threadIdx.x / GROUP; r < x.rows; r += gridDim.x * groups) {
        const float lse = row_cross_entropy<GROUP>(row_at(x, r), x.dtype, n, wide, -1, 0).lse;
        float loss = 0, mass = 0;
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            float v[8], share[8];
            load8(v, row_at(x, r), x.dtype, c, n - c, wide);
            load8(share, row_at(p, r), p.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) loss += share[k] * (lse - v[k]);
            TT__UNROLL for (int k = 0; k < 8; k++) mass += share[k];
        }
        loss = GROUP == 32 ? warp_sum(loss) : block_sum<256>(loss);
        mass = GROUP == 32 ? warp_sum(mass) : block_sum<256>(mass);
        if (threadIdx.x % GROUP) continue;
        ((float *)stats.data)[r * stats.ld] = lse;
        ((float *)stats.data)[r * stats.ld + 1] = mass;
        const double w = row_weight(weights, r);
        sums.loss += w * loss;
        sums.weight += w;
    }
    store_partial<256>(sums, partial);
}

cudaError_t run_soft_cross_entropy(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[0], *p = &l->in[1];
    const bool many = x->cols > 2048, wide = is_wide(x) && is_wide(p);
    const unsigned blocks = grid_for(x->rows, many ? 1 : 8, TT__LOSS_BLOCKS);
    loss_sums *partial = resident_of(l)->losses;
    cudaError_t e = many ? TT__LAUNCH((soft_cross_entropy<256>), blocks, 256, 0, d->stream, *x, *p, l->in[2],
                                      l->out[1], wide, partial)
                         : TT__LAUNCH((soft_cross_entropy<32>), blocks, 256, 0, d->stream, *x, *p, l->in[2],
                                      l->out[1], wide, partial);
    if (e != cudaSuccess) return e;
    return run_loss_counts(l, (int)blocks);
}
TT__RUN_BY(SOFT_CROSS_ENTROPY, run_soft_cross_entropy)

// Computes w * (softmax(x) * (sum of p) - p), and writes it to dx or, if `add`, adds it to dx. Reads x and p
// and writes dx once.
__global__ void __launch_bounds__(256) soft_cross_entropy_backward(const float *dloss, tt__mat x, tt__mat p,
                                                                   tt__mat weights, tt__mat stats,
                                                                   const float *divisor, tt__mat dx, bool add,
                                                                   bool wide, const tt__step_settings *run)
{
    tt__begin_kernel();
    const int64_t n = x.cols, per_row = (n + 7) / 8, all = x.rows * per_row;
    const float factor = loss_factor(run, dloss, divisor);
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < all; i += gridDim.x * (int64_t)256) {
        const int64_t r = i / per_row, c = (i - r * per_row) * 8;
        const float w = factor * row_weight(weights, r), *s = (const float *)stats.data + r * stats.ld;
        float a[8], b[8], old[8] = {0};
        load8(a, row_at(x, r), x.dtype, c, n - c, wide);
        load8(b, row_at(p, r), p.dtype, c, n - c, wide);
        if (add) load8(old, row_at(dx, r), dx.dtype, c, n - c, wide);
        TT__UNROLL for (int k = 0; k < 8; k++) a[k] = (fast_exp(a[k] - s[0]) * s[1] - b[k]) * w + old[k];
        store8(row_at(dx, r), dx.dtype, c, n - c, wide, a);
    }
}

cudaError_t run_soft_cross_entropy_backward(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[1], *p = &l->in[2], *dx = &l->out[0];
    const unsigned blocks = grid_for(x->rows * ((x->cols + 7) / 8), 256, TT__ELEMENT_BLOCKS);
    return TT__LAUNCH(soft_cross_entropy_backward, blocks, 256, 0, d->stream, (const float *)l->in[0].data,
                      *x, *p, l->in[3], l->in[4], divisor_of(l, 5), *dx, l->add[0],
                      is_wide(x) && is_wide(p) && is_wide(dx), TT__RUN_OF(l));
}
TT__RUN_BY(SOFT_CROSS_ENTROPY_BACKWARD, run_soft_cross_entropy_backward)

// Computes the partial sums of the mean squared error of x and y (rows, n). The loss of a row with weight w
// is w times the mean of (x - y)^2 over the row. Reads x and y once.
__global__ void __launch_bounds__(256) squared_error(tt__mat x, tt__mat y, tt__mat weights, bool wide,
                                                     loss_sums *partial)
{
    tt__begin_kernel();
    const int64_t n = x.cols, per_row = (n + 7) / 8, all = x.rows * per_row;
    loss_sums sums = {0, 0, 0};
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < all; i += gridDim.x * (int64_t)256) {
        const int64_t r = i / per_row, c = (i - r * per_row) * 8;
        const double w = row_weight(weights, r);
        float a[8], b[8], s = 0;
        load8(a, row_at(x, r), x.dtype, c, n - c, wide);
        load8(b, row_at(y, r), y.dtype, c, n - c, wide);
        TT__UNROLL for (int k = 0; k < 8; k++) s += (a[k] - b[k]) * (a[k] - b[k]);
        sums.loss += w * s;
        if (c == 0) sums.weight += w;
    }
    sums.loss /= (double)n;
    store_partial<256>(sums, partial);
}

cudaError_t run_mean_squared_error(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[0], *y = &l->in[1];
    const unsigned blocks = grid_for(x->rows * ((x->cols + 7) / 8), 256, TT__LOSS_BLOCKS);
    loss_sums *partial = resident_of(l)->losses;
    cudaError_t e = TT__LAUNCH(squared_error, blocks, 256, 0, d->stream, *x, *y, l->in[2],
                               is_wide(x) && is_wide(y), partial);
    if (e != cudaSuccess) return e;
    return run_loss_counts(l, (int)blocks);
}
TT__RUN_BY(MEAN_SQUARED_ERROR, run_mean_squared_error)

// Computes 2 * w * (x - y) / n, and writes it to dx or, if `add`, adds it to dx. Reads x and y and writes dx
// once.
__global__ void __launch_bounds__(256) squared_error_backward(const float *dloss, tt__mat x, tt__mat y,
                                                              tt__mat weights, const float *divisor,
                                                              tt__mat dx, bool add, bool wide,
                                                              const tt__step_settings *run)
{
    tt__begin_kernel();
    const int64_t n = x.cols, per_row = (n + 7) / 8, all = x.rows * per_row;
    const float factor = loss_factor(run, dloss, divisor);
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < all; i += gridDim.x * (int64_t)256) {
        const int64_t r = i / per_row, c = (i - r * per_row) * 8;
        const float w = 2 * factor * row_weight(weights, r) / (float)n;
        float a[8], b[8], old[8] = {0};
        load8(a, row_at(x, r), x.dtype, c, n - c, wide);
        load8(b, row_at(y, r), y.dtype, c, n - c, wide);
        if (add) load8(old, row_at(dx, r), dx.dtype, c, n - c, wide);
        TT__UNROLL for (int k = 0; k < 8; k++) a[k] = (a[k] - b[k]) * w + old[k];
        store8(row_at(dx, r), dx.dtype, c, n - c, wide, a);
    }
}

cudaError_t run_mean_squared_error_backward(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[1], *y = &l->in[2], *dx = &l->out[0];
    const unsigned blocks = grid_for(x->rows * ((x->cols + 7) / 8), 256, TT__ELEMENT_BLOCKS);
    return TT__LAUNCH(squared_error_backward, blocks, 256, 0, d->stream, (const float *)l->in[0].data, *x, *y,
                      l->in[3], divisor_of(l, 4), *dx, l->add[0], is_wide(x) && is_wide(y) &&
                      is_wide(dx), TT__RUN_OF(l));
}
TT__RUN_BY(MEAN_SQUARED_ERROR_BACKWARD, run_mean_squared_error_backward)

// Computes the partial counts of the cross-entropy of sigmoids, for logits x, targets y and positive weights
// p (NULL: all 1). A warp works on a row. The loss of an element is
// `p * y * log(1 + e^-x) + (1 - y) * log(1 + e^x)`; the loss of a row is the mean over the row's elements.
// Reads x and y once.
__global__ void __launch_bounds__(256) sigmoid_cross_entropy(tt__mat x, tt__mat y, tt__mat weights,
                                                             const float *p, bool wide, loss_sums *partial)
{
    tt__begin_kernel();
    const int64_t n = x.cols;
    loss_sums sums = {0, 0, 0};
    for (int64_t r = blockIdx.x * (int64_t)8 + threadIdx.x / 32; r < x.rows; r += gridDim.x * (int64_t)8) {
        float loss = 0;
        bool right = true;
        for (int64_t c = 8 * (threadIdx.x % 32); c < n; c += 8 * 32) {
            float v[8], target[8];
            load8(v, row_at(x, r), x.dtype, c, n - c, wide);
            load8(target, row_at(y, r), y.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) {
                if (c + k >= n) continue;
                const float tail = log1pf(fast_exp(-fabsf(v[k]))), above = v[k] > 0 ? v[k] : 0;
                loss += (p ? p[c + k] : 1.0f) * target[k] * (above - v[k] + tail) +
                        (1 - target[k]) * (above + tail);
                right &= (v[k] > 0) == (target[k] > 0.5f);
            }
        }
        loss = warp_sum(loss) / (float)n;
        right = __all_sync(0xffffffffu, right);
        if (threadIdx.x % 32) continue;
        const double w = row_weight(weights, r);
        sums.loss += w * loss;
        sums.weight += w;
        sums.right += right ? w : 0;
    }
    store_partial<256>(sums, partial);
}

cudaError_t run_sigmoid_cross_entropy(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[0], *y = &l->in[1];
    const unsigned blocks = grid_for(x->rows, 8, TT__LOSS_BLOCKS);
    loss_sums *partial = resident_of(l)->losses;
    const cudaError_t e = TT__LAUNCH(sigmoid_cross_entropy, blocks, 256, 0, d->stream, *x, *y, l->in[2],
                                     (const float *)l->in[3].data, is_wide(x) && is_wide(y), partial);
    if (e != cudaSuccess) return e;
    return run_loss_counts(l, (int)blocks);
}
TT__RUN_BY(SIGMOID_CROSS_ENTROPY, run_sigmoid_cross_entropy)

// Computes w / n * ((1 - y) * sigmoid(x) - p * y * sigmoid(-x)), and writes it to dx or, if `add`, adds it
// to dx. Reads x and y and writes dx once.
__global__ void __launch_bounds__(256)
    sigmoid_cross_entropy_backward(const float *dloss, tt__mat x, tt__mat y, tt__mat weights, const float *p,
                                   const float *divisor, tt__mat dx, bool add, bool wide,
                                       const tt__step_settings *run)
{
    tt__begin_kernel();
    const int64_t n = x.cols, per_row = (n + 7) / 8, all = x.rows * per_row;
    const float factor = loss_factor(run, dloss, divisor) / (float)n;
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < all; i += gridDim.x * (int64_t)256) {
        const int64_t r = i / per_row, c = (i - r * per_row) * 8;
        const float w = factor * row_weight(weights, r);
        float v[8], target[8], old[8] = {0};
        load8(v, row_at(x, r), x.dtype, c, n - c, wide);
        load8(target, row_at(y, r), y.dtype, c, n - c, wide);
        if (add) load8(old, row_at(dx, r), dx.dtype, c, n - c, wide);
        TT__UNROLL for (int k = 0; k < 8; k++) {
            const float positive = (p && c + k < n ? p[c + k] : 1.0f) * target[k];
            v[k] = ((1 - target[k]) * sigmoid(v[k]) - positive * sigmoid(-v[k])) * w + old[k];
        }
        store8(row_at(dx, r), dx.dtype, c, n - c, wide, v);
    }
}

cudaError_t run_sigmoid_cross_entropy_backward(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[1], *y = &l->in[2], *dx = &l->out[0];
    const unsigned blocks = grid_for(x->rows * ((x->cols + 7) / 8), 256, TT__ELEMENT_BLOCKS);
    return TT__LAUNCH(sigmoid_cross_entropy_backward, blocks, 256, 0, d->stream,
                      (const float *)l->in[0].data, *x, *y, l->in[3], (const float *)l->in[4].data,
                      divisor_of(l, 5), *dx, l->add[0],
                      is_wide(x) && is_wide(y) && is_wide(dx), TT__RUN_OF(l));
}
TT__RUN_BY(SIGMOID_CROSS_ENTROPY_BACKWARD, run_sigmoid_cross_entropy_backward)

// Computes the counts of a loss from row_loss, each row's loss and hit (1: the prediction is right). If
// row_loss is NULL, sums only the weights. Reads up to 16 bytes a row.
__global__ void __launch_bounds__(1024) linear_loss_counts(const float2 *row_loss, int64_t rows,
                                                           const int32_t *targets, tt__mat weights,
                                                           int ignore, float *counts, float *loss)
{
    tt__begin_kernel();
    loss_sums sums = {0, 0, 0};
    for (int64_t r = threadIdx.x; r < rows; r += 1024) {
        if (targets[r] == ignore) continue;
        const double w = row_weight(weights, r);
        const float2 row = row_loss ? row_loss[r] : make_float2(0, 0);
        sums.loss += w * row.x;
        sums.weight += w;
        sums.right += w * row.y;
    }
    store_counts<1024>(sums, NULL, false, counts, loss);
}

// Computes the loss and the hit (1: the prediction is right) of each row of a chunk's logits z (rows, n),
// which are f32 in rows of whole 32 bytes. Unless dz.data is NULL, also writes the gradients dz over the rows
// of z, in the dtype of dz, with zeros to the end of a row of z. A block works on one row and reads it twice.
__global__ void __launch_bounds__(1024) linear_cross_entropy(tt__mat z, tt__mat dz, const int32_t *targets,
                                                             tt__mat weights, const float *dloss,
                                                             const float *divisor, float2 *row_loss,
                                                             int ignore, float smoothing,
                                                             const tt__step_settings *run)
{
    tt__begin_kernel();
    const int64_t r = blockIdx.x, n = z.cols;
    const int32_t target = targets[r];
    const float *x = (const float *)row_at(z, r);
    const row_result row = row_cross_entropy<1024>(x, TT_F32, n, true, target == ignore ? -1 : target,
                                                   smoothing);
    if (threadIdx.x == 0)
        row_loss[r] = target == ignore ? make_float2(0, 0) : make_float2(row.loss, row.right ? 1.0f : 0.0f);
    if (!dz.data) return;
    const float w = loss_factor(run, dloss, divisor) * row_weight(weights, r);
    for (int64_t c0 = 0; c0 < n; c0 += 8 * 1024) {
        const int64_t c = c0 + 8 * threadIdx.x;
        float v[8] = {0};
        if (c < n && target != ignore) {
            load8(v, x, TT_F32, c, n - c, true);
            cross_entropy_gradient(v, c, n, target, row.lse, smoothing, w);
            TT__UNROLL for (int k = 0; k < 8; k++) if (c + k >= n) v[k] = 0;
        }
        __syncthreads(); // 16-bit gradients are written over logits that other threads read in this round
        if (c < n) store8(row_at(dz, r), dz.dtype, c, 8, true, v);
    }
}

// Computes what linear_cross_entropy computes with gradients, for rows that fit into shared memory. As many
// blocks run as the device holds, and each works on one row after another. A thread copies its own columns,
// four of every 4,096, to shared memory. Once the thread has written the gradients of a row, it fetches its
// columns of the block's next row. A row has ROW_PARTS parts; a thread sums the first part while the other
// parts are in flight. Reads and writes `n * (4 + bytes of an element of dz)` bytes a row.
enum { ROW_PARTS = 4 };
__global__ void __launch_bounds__(1024, 1)
    linear_cross_entropy_resident(tt__mat z, tt__mat dz, const int32_t *targets, tt__mat weights,
                                  const float *dloss, const float *divisor, float2 *row_loss, int ignore,
                                  float smoothing, const tt__step_settings *run)
{
    tt__begin_kernel();
    TT__DYN_SHARED(float, logits);
    const int n = (int)z.cols, end = (n + 7) / 8 * 8, first = 4 * (int)threadIdx.x;
    const int each = (n + ROW_PARTS * 4096 - 1) / (ROW_PARTS * 4096) * 4096; // number of columns of a part
    const float factor = loss_factor(run, dloss, divisor);
    int64_t r = blockIdx.x;
    int32_t target = targets[r];
    float own = target == ignore ? 0 : ((const float *)row_at(z, r))[target];
    for (int part = 0; part < ROW_PARTS; part++) {
        for (int c = part * each + first; c < min(end, (part + 1) * each); c += 4096)
            tt__cp_async_16(logits + c, (const float *)row_at(z, r) + c);
        tt__cp_async_commit();
    }
    while (r < z.rows) {
        const int64_t next = r + gridDim.x;
        const float *x = next < z.rows ? (const float *)row_at(z, next) : NULL;
        logit_sums sums;
        const int32_t of_next = x ? targets[next] : ignore; // the sums below hide the time of this load
        const float w = factor * row_weight(weights, r);
        sums.begin(own);
        const auto add = [&](int part) { // adds the thread's columns of a part
            for (int c = part * each + first; c < min(n, (part + 1) * each); c += 4096) {
                const float4 q = *(const float4 *)(logits + c);
                float v[4] = {q.x, q.y, q.z, q.w};
                TT__UNROLL for (int k = 1; k < 4; k++) if (c + k >= n) v[k] = -INFINITY;
                sums.add(v, c, n, target == ignore ? -1 : target, smoothing > 0);
            }
        };
        tt__cp_async_wait<3>();
        add(0);
        tt__cp_async_wait<2>();
        add(1);
        tt__cp_async_wait<1>();
        add(2);
        tt__cp_async_wait<0>();
        add(3);
        const row_result row = sums.finish<1024>(n, smoothing);
        own = of_next == ignore ? 0 : x[of_next];
        if (threadIdx.x == 0)
            row_loss[r] = target == ignore ? make_float2(0, 0)
                                           : make_float2(row.loss, row.right ? 1.0f : 0.0f);
        for (int part = 0; part < ROW_PARTS; part++) {
            for (int c = part * each + first; c < min(end, (part + 1) * each); c += 4096) {
                const float4 q = *(const float4 *)(logits + c);
                float v[4] = {q.x, q.y, q.z, q.w};
                cross_entropy_gradient(v, c, n, target, row.lse, smoothing, w);
                TT__UNROLL for (int k = 0; k < 4; k++) if (c + k >= n || target == ignore) v[k] = 0;
                void *to = row_at(dz, r);
                const unsigned place = (unsigned)c / 4;
                if (dz.dtype == TT_F32) {
                    ((float4 *)to)[place] = make_float4(v[0], v[1], v[2], v[3]);
                } else {
                    ((uint2 *)to)[place] = make_uint2(pack_as(dz.dtype, v[0], v[1]),
                                                      pack_as(dz.dtype, v[2], v[3]));
                }
                // must come after the store above, whose numbers were computed from the logits in this place
                if (x) tt__cp_async_16(logits + c, x + c);
            }
            tt__cp_async_commit();
        }
        r = next;
        target = of_next;
    }
}

cudaError_t linear(const tt__launch *l, const tt__mat *x, const tt__mat *w, const tt__mat *b,
                   const tt__mat *y);
cudaError_t linear_dx(const tt__launch *l, const tt__mat *dy, const tt__mat *w, const tt__mat *dx, bool add);
cudaError_t linear_dw(const tt__launch *l, const tt__mat *dy, const tt__mat *x,
                      const tt__mat *dw, const tt__mat *db, bool add_w, bool add_b);

tt__mat rows_of(const tt__mat *m, int64_t first, int64_t n)
{
    tt__mat part = *m;
    if (m->data) part.data = (char *)m->data + (size_t)(first * m->ld) * tt_dtype_bytes(m->dtype);
    part.rows = n;
    return part;
}

// Max bytes of a row's logits in shared memory: no limit beside that of the device, except in tests.
#ifndef TT__LOSS_CACHE
#define TT__LOSS_CACHE ((size_t)1 << 20)
#endif

// Returns the matrix to which the chunks of rows add their contributions to gradient m: m itself or, if m
// has 16 bits and there are several chunks (`many`), an f32 matrix at *at in the workspace. At the end the
// f32 matrix is rounded to m.
tt__mat loss_sums_of(const tt__mat *m, bool many, char **at)
{
    tt__mat sums = *m;
    if (!m->data || m->dtype == TT_F32 || !many) return sums;
    sums.data = *at;
    sums.dtype = TT_F32;
    sums.ld = m->cols;
    *at += tt__align_to((size_t)(m->rows * m->cols) * sizeof(float), TT__CUDA_ALIGN);
    return sums;
}

// The tail: the classes after the last multiple of 64, if the number of classes is not a multiple of 8.
// cuBLASLt has only slow kernels for a product with such a size (1.68 ms instead of 0.26 ms for 2,048 x
// 50,257 x 768 on an H200). The tail therefore has its own products, which read copies of the weight's rows
// and the bias's elements, padded with zeros to a multiple of 8. Padding w itself would need room after w
// wherever w is stored: as the parameter, as shards, gathered, offloaded and cast.
struct class_tail {
    int64_t first, count; // the first class, and the number of classes; 0: there is no tail
    // Shapes: w and dw (rows, in), b and db (1, rows), where rows is `count`, padded to a multiple of 8. dw
    // and db are f32.
    tt__mat w, b, dw, db;
};

// Copies x to the upper left of `to`, and fills the rest of `to` with zeros. A thread copies eight columns.
__global__ void __launch_bounds__(256) copy_padded(tt__mat x, tt__mat to)
{
    tt__begin_kernel();
    const int64_t per_row = (to.cols + 7) / 8, i = blockIdx.x * (int64_t)256 + threadIdx.x;
    const int64_t r = i / per_row, c = i % per_row * 8;
    float v[8];
    if (r >= to.rows) return;
    TT__UNROLL for (int k = 0; k < 8; k++) v[k] = r < x.rows && c + k < x.cols ? element(x, r, c + k) : 0.0f;
    store8(row_at(to, r), to.dtype, c, to.cols - c, to.ld % 8 == 0, v);
}

cudaError_t run_copy_padded(tt__device *d, const tt__mat &x, const tt__mat &to)
{
    return TT__LAUNCH(copy_padded, blocks_for(to.rows * ((to.cols + 7) / 8), 256), 256, 0, d->stream, x, to);
}

cudaError_t make_class_tail(tt__device *d, const tt__mat *w, const tt__mat *b, bool gradients, char **at,
                            class_tail *tail)
{
    memset(tail, 0, sizeof *tail);
    tail->first = w->rows;
    if (w->rows % 8 == 0) return cudaSuccess;
    const int64_t rows = (w->rows % 64 + 7) / 8 * 8;
    tail->first = w->rows / 64 * 64;
    tail->count = w->rows % 64;
    const auto place = [&](tt__mat *m, tt_dtype dtype, int64_t m_rows, int64_t cols) {
        *m = {*at, dtype, m_rows, cols, cols};
        *at += tt__align_to((size_t)(m_rows * cols) * tt_dtype_bytes(dtype), TT__CUDA_ALIGN);
    };
    place(&tail->w, w->dtype, rows, w->cols);
    if (b->data) place(&tail->b, b->dtype, 1, rows);
    if (gradients) place(&tail->dw, TT_F32, rows, w->cols);
    if (gradients && b->data) place(&tail->db, TT_F32, 1, rows);
    cudaError_t e = run_copy_padded(d, rows_of(w, tail->first, tail->count), tail->w);
    if (e == cudaSuccess && b->data)
        e = run_copy_padded(d, columns_of(b, tail->first, tail->count), tail->b);
    return e;
}

// The three products of a chunk of rows of the loss: logits, dx and dw. The rows of the logits z and of their
// gradients dz have room for the zeros after the tail; z is f32.
struct loss_products {
    const tt__launch *l;
    tt__mat w, b; // w: the rows of the classes before the tail; b: the whole bias
    class_tail tail;

    cudaError_t logits(const tt__mat *x, const tt__mat *z) const
    {
        const tt__mat whole = columns_of(z, 0, tail.first), rest = columns_of(z, tail.first, tail.w.rows);
        const cudaError_t e = linear(l, x, &w, &b, &whole);
        return e == cudaSuccess && tail.count ? linear(l, x, &tail.w, &tail.b, &rest) : e;
    }
    cudaError_t dx(const tt__mat *dz, const tt__mat *dx, bool add) const
    {
        const tt__mat whole = columns_of(dz, 0, tail.first), rest = columns_of(dz, tail.first, tail.w.rows);
        cudaError_t e = cudaSuccess;
        if (tail.first) e = linear_dx(l, &whole, &w, dx, add);
        if (e == cudaSuccess && tail.count) e = linear_dx(l, &rest, &tail.w, dx, add || tail.first > 0);
        return e;
    }
    // Adds a chunk's contributions to dw and db; the gradients of the tail are summed in tail.dw and tail.db.
    // first: whether the chunk is the first.
    cudaError_t dw(const tt__mat *dz, const tt__mat *x, const tt__mat *dw, const tt__mat *db, bool add_w,
                   bool add_b, bool first) const
    {
        const tt__mat whole = columns_of(dz, 0, tail.first), rest = columns_of(dz, tail.first, tail.w.rows);
        const tt__mat of_w = rows_of(dw, 0, tail.first), of_b = columns_of(db, 0, tail.first);
        const tt__mat rest_w = dw->data ? tail.dw : no_operand, rest_b = db->data ? tail.db : no_operand;
        cudaError_t e = cudaSuccess;
        if (tail.first) e = linear_dw(l, &whole, x, &of_w, &of_b, add_w, add_b);
        if (e == cudaSuccess && tail.count) e = linear_dw(l, &rest, x, &rest_w, &rest_b, !first, !first);
        return e;
    }
    // Writes or adds the gradients of the tail to dw and db, after the last chunk.
    cudaError_t finish(const tt__mat *dw, const tt__mat *db, bool add_w, bool add_b) const
    {
        if (!tail.count) return cudaSuccess;
        const tt__mat of_w = rows_of(dw, tail.first, tail.count);
        const tt__mat of_b = columns_of(db, tail.first, tail.count);
        const tt__mat from_w = rows_of(&tail.dw, 0, tail.count), from_b = columns_of(&tail.db, 0, tail.count);
        cudaError_t e = cudaSuccess;
        if (dw->data) e = run_groups(l->device, from_w, no_operand, of_w, add_w, false, op_scale{1.0f});
        if (e == cudaSuccess && db->data)
            e = run_groups(l->device, from_b, no_operand, of_b, add_b, false, op_scale{1.0f});
        return e;
    }
};

// Computes, for a chunk's logits z, each row's loss and whether the row's prediction is right, and the
// gradients dz.
cudaError_t run_loss_rows(const tt__launch *l, const tt__mat *z, const tt__mat *dz, const int32_t *targets,
                          tt__mat weights, float2 *row_loss)
{
    tt__device *d = l->device;
    const tt__attr *a = &l->instr->attr;
    const float *dloss = (const float *)l->in[5].data, *counts = (const float *)l->out[2].data;
    const float *divisor = counts ? counts + 1 : NULL;
    const size_t cache = (size_t)tt__align_to((size_t)z->cols, 8) * sizeof(float), spare = 2048;
    if (!dz->data || cache + spare > d->properties.sharedMemPerBlockOptin || cache > TT__LOSS_CACHE)
        return TT__LAUNCH(linear_cross_entropy, (unsigned)z->rows, 1024, 0, d->stream, *z, *dz, targets,
                          weights, dloss, divisor, row_loss, a->ignore_index, a->smoothing, TT__RUN_OF(l));
    int resident = 1;
    cudaError_t e = cudaFuncSetAttribute(linear_cross_entropy_resident,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         (int)(d->properties.sharedMemPerBlockOptin - spare));
    if (e == cudaSuccess)
        e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, linear_cross_entropy_resident, 1024,
                                                          cache);
    if (e != cudaSuccess) return e;
    const unsigned blocks = grid_for(z->rows, 1, d->properties.multiProcessorCount * max(resident, 1));
    return TT__LAUNCH(linear_cross_entropy_resident, blocks, 1024, cache, d->stream, *z, *dz, targets,
                      weights, dloss, divisor, row_loss, a->ignore_index, a->smoothing, TT__RUN_OF(l));
}

// Returns the bytes at the end of the workspace for products whose operands must be copied (padded_matmul).
int64_t loss_products_bytes(const tt__launch *l)
{
    const tt__mat *x = &l->in[0], *w = &l->in[3];
    const int64_t ld = (w->rows + 7) / 8 * 8;
    const tt__mat z = {NULL, TT_F32, x->rows, ld, ld};
    return max(tt__cuda_padded_bytes(x, w, &z, &z),
               max(tt__cuda_padded_bytes(x, w, &z, x), tt__cuda_padded_bytes(x, w, &z, w)));
}

// Computes loss[r], the first of the two numbers of each row of row_loss.
__global__ void __launch_bounds__(256) losses_of_rows(const float2 *row_loss, int64_t rows, tt__mat loss)
{
    tt__begin_kernel();
    const int64_t r = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (r < rows) ((float *)loss.data)[r * loss.ld] = row_loss[r].x;
}

// Computes a linear layer, its cross-entropy and their gradients, one chunk of rows after another, as the CPU
// does. tt__cuda_LINEAR_CROSS_ENTROPY describes the layout of the workspace. LINEAR_TOKEN_LOSSES has no
// counts: its result is each row's loss, or its rows have gradients of their own.
cudaError_t run_linear_cross_entropy(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[0], *weights = &l->in[2], *w = &l->in[3], *b = &l->in[4], *dx = &l->out[1],
        *dw = &l->out[3], *db = &l->out[4];
    const tt__attr *a = &l->instr->attr;
    const int32_t *targets = (const int32_t *)l->in[1].data;
    const int64_t rows = x->rows, classes = w->rows, ld = (classes + 7) / 8 * 8;
    const int64_t row_bytes = ld * (int64_t)sizeof(float);
    const size_t kept = tt__align_to((size_t)rows * sizeof(float2), TT__CUDA_ALIGN);
    char *at = (char *)l->workspace + kept;
    char *const end = (char *)l->workspace + l->instr->workspace - loss_products_bytes(l);
    loss_products products = {l, *w, *b, {}};
    cudaError_t e = make_class_tail(d, w, b, dw->data || db->data, &at, &products.tail);
    products.w.rows = products.tail.first;
    const bool many = rows > min((int64_t)TT__CUDA_LOSS_CHUNK, (int64_t)(end - at) / row_bytes);
    const tt__mat to_w = loss_sums_of(dw, many, &at), to_b = loss_sums_of(db, many, &at);
    const bool sums_w = to_w.data != dw->data, sums_b = to_b.data != db->data;
    const bool add_w = l->add[3] && !sums_w, add_b = l->add[4] && !sums_b;
    const int64_t largest = min((int64_t)TT__CUDA_LOSS_CHUNK, (int64_t)(end - at) / row_bytes);
    const int64_t chunks = (rows + largest - 1) / largest;
    float2 *row_loss = (float2 *)l->workspace;
    float *counts = (float *)l->out[2].data, *loss = (float *)l->out[0].data;
    if (e == cudaSuccess && counts)
        e = TT__LAUNCH(linear_loss_counts, 1, 1024, 0, d->stream, (const float2 *)NULL, rows, targets,
                       *weights, a->ignore_index, counts, loss);
    for (int64_t r = 0, n; r < rows && e == cudaSuccess; r += n) {
        n = min((rows + chunks - 1) / chunks, rows - r);
        tt__mat z = {at, TT_F32, n, classes, ld}, dz = z, xs = rows_of(x, r, n), dxs = rows_of(dx, r, n);
        dz.dtype = x->dtype;
        dz.ld = ld * (int64_t)(4 / tt_dtype_bytes(x->dtype));
        if (!dx->data && !dw->data && !db->data) dz.data = NULL;
        e = products.logits(&xs, &z);
        if (e == cudaSuccess)
            e = run_loss_rows(l, &z, &dz, targets + r, rows_of(weights, r, n), row_loss + r);
        if (e == cudaSuccess && dx->data) e = products.dx(&dz, &dxs, l->add[1]);
        if (e == cudaSuccess && dz.data)
            e = products.dw(&dz, &xs, &to_w, &to_b, r > 0 || add_w, r > 0 || add_b, r == 0);
    }
    if (e == cudaSuccess) e = products.finish(&to_w, &to_b, add_w, add_b);
    if (e == cudaSuccess && sums_w)
        e = run_groups(d, to_w, no_operand, *dw, l->add[3], false, op_scale{1.0f});
    if (e == cudaSuccess && sums_b)
        e = run_groups(d, to_b, no_operand, *db, l->add[4], false, op_scale{1.0f});
    if (e == cudaSuccess && counts)
        e = TT__LAUNCH(linear_loss_counts, 1, 1024, 0, d->stream, row_loss, rows, targets, *weights,
                       a->ignore_index, counts, loss);
    if (e == cudaSuccess && !counts && loss)
        e = TT__LAUNCH(losses_of_rows, blocks_for(rows, 256), 256, 0, d->stream, row_loss, rows, l->out[0]);
    return e;
}
TT__RUN_BY(LINEAR_CROSS_ENTROPY, run_linear_cross_entropy)
TT__RUN_BY(LINEAR_TOKEN_LOSSES, run_linear_cross_entropy)

} // namespace
