#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/device.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../../cuda/kernels.cuh"

namespace {

// ================================================================================================== pruning
// Chooses the weights of smallest magnitude or of lowest movement, and sets them to 0, as
// src/ops/optimizers/cpu_prune.h does.

enum { PRUNE_THREADS = 1024, PRUNE_BINS = 2048 };

// Adds to the movements of the n weights p, which have the gradient g, as the CPU's movement_rows does.
__global__ void __launch_bounds__(256) add_movement(const void *g, tt_dtype dtype, const void *p,
                                                    tt_dtype p_dtype, float *movement, int64_t n,
                                                    const float *clip)
{
    tt__begin_kernel();
    if (!isfinite(clip[0])) return;
    const int64_t threads = (int64_t)gridDim.x * 256;
    for (int64_t j = blockIdx.x * (int64_t)256 + threadIdx.x; j < n; j += threads)
        movement[j] -= load_any(g, dtype, j) * clip[1] * load_any(p, p_dtype, j);
}

cudaError_t run_movement(const tt__launch *l)
{
    const tt__mat *g = &l->in[0], *p = &l->in[2];
    const int64_t n = g->rows * g->cols;
    return TT__LAUNCH(add_movement, grid_for(n, 256, 4096), 256, 0, l->device->stream, g->data, g->dtype,
                      p->data, p->dtype, (float *)l->out[0].data, n, (const float *)l->in[1].data);
}
TT__RUN_BY(MOVEMENT, run_movement)

// A matrix to prune, with its mask. done: number of weights that are pruned already. movement: NULL if
// magnitudes decide.
struct pruned_matrix {
    const void *p;
    const float *movement;
    long long *done;
    unsigned *mask;
    int64_t n;
    tt_dtype dtype;
    tt__pruning schedule;
};

// Returns the number of weights to prune, as the CPU's tt__pruned_at does.
__device__ __forceinline__ int64_t pruned_at(const tt__pruning &s, int64_t step, int64_t n)
{
    if (step < s.begin) return 0;
    const int64_t at = step - (step - s.begin) % s.every;
    const double left = step >= s.end ? 0 : (double)(s.end - at) / (double)(s.end - s.begin);
    const double cube = __dmul_rn(__dmul_rn(left, left), left); // not contracted, for the CPU's bits
    return (int64_t)__dadd_rn(__dmul_rn(__dmul_rn((double)s.share, __dadd_rn(1, -cube)), (double)n), 0.5);
}

// Returns a number above 0 that grows with the movement of weight j or, without movements, with the weight's
// magnitude. Returns 0 if the weight is pruned already, and the largest number beyond the last weight.
__device__ __forceinline__ unsigned prune_key(const pruned_matrix &m, int64_t j)
{
    if (j >= m.n) return 0xffffffffu;
    if (m.mask[j / 32] >> (j % 32) & 1) return 0;
    if (m.movement) {
        const unsigned bits = __float_as_uint(m.movement[j]);
        return bits >> 31 ? 0u - bits : bits | 0x80000000u;
    }
    return (__float_as_uint(load_any(m.p, m.dtype, j)) & 0x7fffffff) + 1;
}

// Chooses weights anew if their number differs from that of the schedule. A block finds the key of the last
// weight by counting: 11 bits of the keys, then the next 11, then the last 10. Each warp then marks the
// weights of its part of the matrix; of equal keys, it takes those that the warps before leave over.
__global__ void __launch_bounds__(PRUNE_THREADS, 1)
    choose_pruned(const __grid_constant__ pruned_matrix m, const float *clip, const tt__step_settings *run)
{
    tt__begin_kernel();
    TT__SHARED(unsigned long long, count, [PRUNE_BINS]);
    TT__SHARED(long long, found, [2]); // the key so far, and how many weights with this key are pruned
    const int64_t k = pruned_at(m.schedule, run->step, m.n);
    const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (!isfinite(clip[0]) || *m.done == k) return;
    unsigned key = 0;
    int64_t left = k;
    for (int shift = 21; shift >= -1; shift -= 11) {
        const int from = shift < 0 ? 0 : shift, bits = shift < 0 ? 10 : 11;
        for (int b = thread; b < PRUNE_BINS; b += PRUNE_THREADS) count[b] = 0;
        __syncthreads();
        for (int64_t j = thread; j < m.n; j += PRUNE_THREADS) {
            const unsigned own = prune_key(m, j);
            if (shift == 21 || own >> (from + bits) == key >> (from + bits))
                atomicAdd(&count[own >> from & ((1u << bits) - 1)], 1ull);
        }
        __syncthreads();
        if (thread == 0) {
            int bin = 0;
            while (bin < (1 << bits) - 1 && (int64_t)count[bin] < left) left -= (int64_t)count[bin++];
            found[0] = key | (unsigned)bin << from;
            found[1] = left;
        }
        __syncthreads();
        key = (unsigned)found[0];
        left = found[1];
    }
    const int64_t words = (m.n + 31) / 32, each = (words + 31) / 32;
    const int64_t first = warp * each, end = min(words, first + each);
    unsigned long long equal = 0;
    for (int64_t w = first; w < end; w++)
        equal += (unsigned)__popc(__ballot_sync(0xffffffffu, prune_key(m, w * 32 + lane) == key));
    __syncthreads();
    if (lane == 0) count[warp] = equal;
    __syncthreads();
    for (int other = 0; other < warp; other++) left -= (int64_t)count[other];
    for (int64_t w = first; w < end; w++) {
        const unsigned own = prune_key(m, w * 32 + lane);
        const unsigned same = __ballot_sync(0xffffffffu, own == key);
        const int before = __popc(same & ((1u << lane) - 1));
        const unsigned pruned = __ballot_sync(0xffffffffu, own < key || (own == key && before < left));
        __syncwarp();
        if (lane == 0) m.mask[w] = pruned;
        __syncwarp();
        left -= __popc(same);
    }
    if (thread == 0) *m.done = k;
}

// Sets the pruned weights to 0.
__global__ void __launch_bounds__(256) zero_pruned(void *p, tt_dtype dtype, const unsigned *mask, int64_t n,
                                                   const float *clip)
{
    tt__begin_kernel();
    if (!isfinite(clip[0])) return;
    const int64_t threads = (int64_t)gridDim.x * 256;
    for (int64_t j = blockIdx.x * (int64_t)256 + threadIdx.x; j < n; j += threads)
        if (mask[j / 32] >> (j % 32) & 1) store_any(p, dtype, j, 0);
}

cudaError_t run_prune(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *p = &l->out[1];
    char *head = (char *)l->out[0].data;
    const float *clip = (const float *)l->in[0].data;
    pruned_matrix m;
    memset(&m, 0, sizeof m);
    m.p = p->data;
    m.movement = (const float *)l->in[1].data;
    m.done = (long long *)head;
    m.mask = (unsigned *)(head + TT__MASK_HEAD);
    m.n = p->rows * p->cols;
    m.dtype = p->dtype;
    m.schedule = l->instr->attr.pruning;
    const cudaError_t e = TT__LAUNCH(choose_pruned, 1, PRUNE_THREADS, 0, d->stream, m, clip, TT__RUN_OF(l));
    if (e != cudaSuccess) return e;
    return TT__LAUNCH(zero_pruned, grid_for(m.n, 256, 4096), 256, 0, d->stream, p->data, p->dtype,
                      (const unsigned *)m.mask, m.n, clip);
}
TT__RUN_BY(PRUNE, run_prune)

} // namespace
