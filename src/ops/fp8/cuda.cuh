#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../../cuda/kernels.cuh"

namespace {

// ==================================================================================================== fp8

// A tensor x that is rounded to fp8. The scale is computed from *known, the largest magnitude in the history,
// or, if known is NULL or *known is 0, from the largest magnitude of x.
struct fp8_tensor {
    tt__mat x;
    unsigned char *q, *across; // the results, row by row and transposed; NULL: not wanted
    int64_t q_ld, across_ld;
    const float *known;
    unsigned *largest; // bits of the largest magnitude of x; with a history, the largest of the step so far
    float *unscale;
    bool wide, e5m2;
};

// Returns the largest `peak` of a block's 256 threads. Each `peak` is the bits of a magnitude; as bits, a
// NaN is larger than infinity.
__device__ __forceinline__ unsigned fp8_largest_of_block(unsigned peak)
{
    TT__SHARED(unsigned, part, [8]);
    TT__UNROLL for (int m = 16; m; m >>= 1) peak = max(peak, __shfl_xor_sync(0xffffffffu, peak, m));
    __syncthreads(); // waits, because threads may still read `part` of an earlier call
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = peak;
    __syncthreads();
    TT__UNROLL for (int k = 0; k < 8; k++) peak = max(peak, part[k]);
    return peak;
}

__device__ __forceinline__ unsigned fp8_larger(unsigned peak, const float (&v)[8])
{
    TT__UNROLL for (int k = 0; k < 8; k++) peak = max(peak, __float_as_uint(v[k]) & 0x7fffffffu);
    return peak;
}

// Returns the bits of the largest magnitude in a part of t.x. In units of 256 groups of eight elements, the
// part consists of the units `block`, `block + step`, `block + 2 * step` and so on.
__device__ __forceinline__ unsigned fp8_largest_of(const fp8_tensor &t, int64_t block, int64_t step)
{
    const int64_t groups = (t.x.cols + 7) / 8;
    unsigned peak = 0;
    for (int64_t g = block * 256 + threadIdx.x; g < t.x.rows * groups; g += step * 256) {
        const int64_t r = g / groups, c = g % groups * 8;
        float v[8];
        load8(v, row_at(t.x, r), t.x.dtype, c, t.x.cols - c, t.wide);
        peak = fp8_larger(peak, v);
    }
    return fp8_largest_of_block(peak);
}

__global__ void __launch_bounds__(256) fp8_largest(fp8_tensor t)
{
    tt__begin_kernel();
    const unsigned peak = fp8_largest_of(t, blockIdx.x, gridDim.x);
    if (threadIdx.x == 0) atomicMax(t.largest, peak); // any order gives the same result
}

// Returns the factor by which a tensor is multiplied before it is rounded to fp8, as tt__fp8_scale does.
// largest: the bits of the tensor's largest magnitude.
__device__ __forceinline__ float fp8_scale(unsigned largest, bool e5m2)
{
    const float peak = __uint_as_float(largest);
    if (largest >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
    if (peak < 0x1p-100f) return 0x1p100f;
    return __uint_as_float(__float_as_uint(TT__FP8_MOST(e5m2) / peak) & 0x7f800000u);
}

// Rounds eight numbers to fp8 and returns them as eight bytes.
template <bool E5M2> __device__ __forceinline__ uint2 fp8_of(const float (&v)[8])
{
    uint32_t two[4];
    TT__UNROLL for (int p = 0; p < 4; p++)
        two[p] = __nv_cvt_float2_to_fp8x2(make_float2(v[2 * p], v[2 * p + 1]), __NV_SATFINITE,
                                          E5M2 ? __NV_E5M2 : __NV_E4M3);
    return make_uint2(__byte_perm(two[0], two[1], 0x5410), __byte_perm(two[2], two[3], 0x5410));
}

// Transposes a 4 x 4 matrix of bytes, whose rows are a, b, c and d.
__device__ __forceinline__ void transpose_bytes(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d)
{
    const uint32_t ab = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    const uint32_t cd = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab, cd, 0x5410); b = __byte_perm(ab, cd, 0x7632);
    c = __byte_perm(ab_high, cd_high, 0x5410); d = __byte_perm(ab_high, cd_high, 0x7632);
}

// Replaces infinities in two 16-bit numbers by NaN.
template <int X> __device__ __forceinline__ uint32_t without_infinities(uint32_t two)
{
    const uint32_t infinity = X == TT_BF16 ? 0x7f80 : 0x7c00;
    return two | ((two & 0x7fff) == infinity) | (uint32_t)((two >> 16 & 0x7fff) == infinity) << 16;
}

// Rounds x and its transpose to fp8 in one sweep over x, by tiles of 128 rows and 64 columns. A thread has
// eight columns of four rows: it writes eight bytes of each row, and four bytes of each column through shared
// memory, where the 16-byte parts of a column are permuted against bank conflicts. While the history has no
// magnitude, as in the first step, each block first reads all of x. X: the dtype of x, BF16 or F16, if the
// rows of x are whole vectors of eight elements; otherwise ANY.
template <int X, bool E5M2> __global__ void __launch_bounds__(256, 4) fp8_quantize(fp8_tensor t)
{
    tt__begin_kernel();
    if (X != ANY) {
        t.x.dtype = (tt_dtype)X;
        t.wide = true;
    }
    enum { ROWS = 128, COLS = 64, PIECES = ROWS / 16 };
    TT__SHARED(uint4, turned, [COLS][PIECES]);
    const tt__mat &x = t.x;
    const int64_t rows = (x.rows + 15) / 16 * 16, cols = (x.cols + 15) / 16 * 16;
    const unsigned across = (unsigned)((cols + COLS - 1) / COLS);
    const unsigned tiles = (unsigned)((rows + ROWS - 1) / ROWS) * across;
    const int part = (int)threadIdx.x % 8, four = (int)threadIdx.x / 8;
    float scale;
    unsigned peak = 0; // bits of the largest magnitude: of a float if X is ANY, else of a 16-bit number
    if (t.known && *t.known > 0)
        scale = fp8_scale(__float_as_uint(*t.known), E5M2) / (1 << TT__FP8_MARGIN);
    else scale = fp8_scale(t.known ? fp8_largest_of(t, 0, 1) : *t.largest, E5M2);
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t r0 = (int64_t)(tile / across) * ROWS + 4 * four, c0 = tile % across * COLS;
        const int64_t c = c0 + 8 * part;
        const int left = (int)min((int64_t)4, x.rows - r0); // how many of the four rows exist
        const char *from = (const char *)row_at(x, r0);
        unsigned char *to = t.q + r0 * t.q_ld + c;
        uint2 q[4]; // eight bytes of each of four rows
        if (X != ANY) {
            uint4 raw[4];
            uint32_t top = 0;
            TT__UNROLL for (int k = 0; k < 4; k++) {
                raw[k] = make_uint4(0, 0, 0, 0);
                if (k < left && c < x.cols) raw[k] = ((const uint4 *)(from + k * x.ld * 2))[c / 8];
            }
            TT__UNROLL for (int k = 0; k < 4; k++) {
                top = __vmaxu2(top, __vmaxu2(raw[k].x & 0x7fff7fff, raw[k].y & 0x7fff7fff));
                top = __vmaxu2(top, __vmaxu2(raw[k].z & 0x7fff7fff, raw[k].w & 0x7fff7fff));
            }
            top = max(top & 0xffff, top >> 16);
            peak = max(peak, top);
            if (top >= (X == TT_BF16 ? 0x7f80 : 0x7c00)) { // infinities must become NaN, not saturate
                TT__UNROLL for (int k = 0; k < 4; k++)
                    raw[k] = make_uint4(without_infinities<X>(raw[k].x), without_infinities<X>(raw[k].y),
                                        without_infinities<X>(raw[k].z), without_infinities<X>(raw[k].w));
            }
            TT__UNROLL for (int k = 0; k < 4; k++) {
                float v[8];
                if (X == TT_BF16) widen8<bf16>(v, raw[k]);
                else widen8<f16>(v, raw[k]);
                TT__UNROLL for (int j = 0; j < 8; j++) v[j] = fmaf(v[j], scale, 0.0f); // -0 becomes 0
                q[k] = fp8_of<E5M2>(v);
            }
        } else {
            TT__UNROLL for (int k = 0; k < 4; k++) {
                float v[8] = {};
                if (k < left && c < x.cols) load8(v, row_at(x, r0 + k), x.dtype, c, x.cols - c, t.wide);
                peak = fp8_larger(peak, v);
                // v - v is NaN for an infinity, which thus becomes NaN instead of the largest number.
                TT__UNROLL for (int j = 0; j < 8; j++) v[j] = fmaf(v[j], scale, v[j] - v[j]);
                q[k] = fp8_of<E5M2>(v);
            }
        }
        TT__UNROLL for (int k = 0; k < 4; k++)
            if (t.q && k < left && c < cols) *(uint2 *)(to + k * t.q_ld) = q[k];
        if (!t.across) continue;
        transpose_bytes(q[0].x, q[1].x, q[2].x, q[3].x);
        transpose_bytes(q[0].y, q[1].y, q[2].y, q[3].y);
        __syncthreads(); // waits, because threads may still read the previous tile
        TT__UNROLL for (int k = 0; k < 8; k++) // stores column k of the four rows
            ((uint32_t *)turned[8 * part + k])[four ^ 4 * part] = k < 4 ? q[k].x : q[k - 4].y;
        __syncthreads();
        TT__UNROLL for (int k = 0; k < COLS * PIECES; k += 256) {
            const int column = (k + (int)threadIdx.x) / PIECES, piece = (int)threadIdx.x % PIECES;
            const int64_t r = r0 - 4 * four + 16 * piece;
            if (c0 + column < x.cols && r < rows)
                *(uint4 *)&t.across[(c0 + column) * t.across_ld + r] = turned[column][piece ^ column / 8];
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *t.unscale = 1 / scale;
    if (!t.known) return;
    peak = fp8_largest_of_block(peak);
    if (X == TT_BF16) peak <<= 16;
    else if (X == TT_F16) peak = __float_as_uint(__half2float(__ushort_as_half((unsigned short)peak)));
    if (threadIdx.x == 0) atomicMax(t.largest, peak);
}

cudaError_t run_quantize(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[0], *q = &l->out[0], *across = &l->out[1];
    fp8_tensor t = {*x, (unsigned char *)q->data, (unsigned char *)across->data, q->ld, across->ld,
                    (const float *)l->in[1].data, (unsigned *)l->out[3].data, (float *)l->out[2].data,
                    is_wide(x), q->dtype == TT__E5M2 || across->dtype == TT__E5M2};
    const int64_t tiles = (x->rows + 127) / 128 * ((x->cols + 63) / 64);
    const int64_t groups = x->rows * ((x->cols + 7) / 8);
    cudaError_t e = cudaSuccess;
    if (!t.known) {
        t.largest = (unsigned *)l->workspace;
        e = cudaMemsetAsync(t.largest, 0, sizeof *t.largest, d->stream);
        if (e == cudaSuccess)
            e = TT__LAUNCH(fp8_largest, grid_for(groups, 2048, 512), 256, 0, d->stream, t);
    }
    if (e != cudaSuccess) return e;
    const bool vectors = t.wide && x->cols % 8 == 0;
    const bool bf16s = vectors && x->dtype == TT_BF16, f16s = vectors && x->dtype == TT_F16;
    const auto quantize = t.e5m2 ? (bf16s ? fp8_quantize<TT_BF16, true>
                                    : f16s ? fp8_quantize<TT_F16, true> : fp8_quantize<ANY, true>)
        : bf16s ? fp8_quantize<TT_BF16, false>
        : f16s ? fp8_quantize<TT_F16, false> : fp8_quantize<ANY, false>;
    return TT__LAUNCH(quantize, grid_for(tiles, 1, 528), 256, 0, d->stream, t);
}
TT__RUN_BY(QUANTIZE, run_quantize)

// Moves the largest magnitudes of the step into the history, as the CPU does. A thread works on one tensor.
__global__ void __launch_bounds__(256) fp8_history(float *history, int64_t ld, float *largest, int64_t n)
{
    tt__begin_kernel();
    const int64_t k = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (k >= n) return;
    float *row = history + k * ld, peak = largest[k];
    largest[k] = 0;
    if (!(peak <= 3.4028235e38f)) return;
    float newer = peak;
    for (int j = 1; j <= TT__FP8_STEPS; j++) {
        const float older = row[j];
        row[j] = newer;
        peak = fmaxf(peak, newer);
        newer = older;
    }
    row[0] = peak;
}

cudaError_t run_fp8_history(const tt__launch *l)
{
    const tt__mat *history = &l->out[0];
    return TT__LAUNCH(fp8_history, blocks_for(history->rows, 256), 256, 0, l->device->stream,
                      (float *)history->data, history->ld, (float *)l->out[1].data, history->rows);
}
TT__RUN_BY(FP8_HISTORY, run_fp8_history)

} // namespace
