#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/device.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../../cuda/kernels.cuh"

namespace {

// ================================================================================================= rounding
// Rounds weights to few bits, as src/ops/casts/cpu.h does.

// Measures the rows of w, a block a row: the largest magnitude or, if not `largest`, the sum of the
// magnitudes.
__global__ void __launch_bounds__(256) measure_rows(double *measure, tt__mat w, bool largest)
{
    tt__begin_kernel();
    TT__SHARED(float, tops, [256]);
    for (int64_t r = blockIdx.x; r < w.rows; r += gridDim.x) {
        double sum = 0;
        float top = 0;
        for (int64_t c = threadIdx.x; c < w.cols; c += 256) {
            const float a = fabsf(element(w, r, c));
            sum += a;
            top = fmaxf(top, a);
        }
        __syncthreads(); // waits, because threads may still read the tops of the row before
        tops[threadIdx.x] = top;
        sum = block_sum<256>(sum);
        __syncthreads();
        if (threadIdx.x) continue;
        for (int k = 1; k < 256; k++) top = fmaxf(top, tops[k]);
        measure[r] = largest ? top + (sum - sum) : sum; // NaN unless all numbers are finite
    }
}

// Writes the mean of the measures of all rows to measure[rows].
__global__ void __launch_bounds__(256) mean_measure(double *measure, int64_t rows)
{
    tt__begin_kernel();
    double sum = 0;
    for (int64_t r = threadIdx.x; r < rows; r += 256) sum += measure[r];
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) measure[rows] = sum / (double)rows;
}

// Returns the steps of a row of n columns, as the CPU's tt__few_bits_of does: `x` the step, `y` its inverse.
__device__ __forceinline__ float2 steps_of(tt_rounding kind, double measure, int64_t n)
{
    const float step = (float)(kind == TT_ROUND_INT8 ? measure / 127 : measure / (double)n);
    const float many = step < 1e-5f ? 1e5f : 1 / step; // of ternary weights
    if (kind == TT_ROUND_TERNARY) return make_float2(1 / many, many);
    return make_float2(step, step > 1e-30f ? 1 / step : 0);
}

struct op_round {
    static constexpr int KIND = RARE;
    const double *measure;
    tt_rounding kind;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        const float2 s = steps_of(kind, measure[kind == TT_ROUND_TERNARY ? g.a.rows : r], g.a.cols);
        const float most = kind == TT_ROUND_INT8 ? 127 : 1;
        load_group(v, g.a, r, c, n, g.vector);
        TT__UNROLL for (int j = 0; j < 8; j++)
            v[j] = kind == TT_ROUND_BINARY ? (v[j] < 0 ? -s.x : s.x)
                                           : rintf(fminf(fmaxf(v[j] * s.y, -most), most)) * s.x;
        return true;
    }
};

cudaError_t run_round(const tt__launch *l)
{
    tt__device *d = l->device;
    double *measure = (double *)l->workspace;
    const op_round op = {measure, (tt_rounding)l->instr->attr.rounding};
    cudaError_t e = TT__LAUNCH(measure_rows, grid_for(l->in[0].rows, 1, 4096), 256, 0, d->stream, measure,
                               l->in[0], op.kind == TT_ROUND_INT8);
    if (e == cudaSuccess && op.kind == TT_ROUND_TERNARY)
        e = TT__LAUNCH(mean_measure, 1, 256, 0, d->stream, measure, l->in[0].rows);
    return e == cudaSuccess ? run_groups(d, l->in[0], no_operand, l->out[0], l->add[0], true, op) : e;
}
TT__RUN_BY(ROUND, run_round)

} // namespace
