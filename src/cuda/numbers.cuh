#pragma once
#include "../backend/backend.h"
#include "system.cuh"
#include "portability.cuh"
#include "device.cuh"

namespace {

// ================================================================================================== numbers
// Conversions, random numbers, sums over warps and blocks.

typedef __nv_bfloat16 bf16;
typedef __half f16;

__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
template <class T> __device__ __forceinline__ T round_to(float x); // to nearest, ties to even
template <> __device__ __forceinline__ bf16 round_to<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ f16 round_to<f16>(float x) { return __float2half_rn(x); }

// This file knows three dtypes of floats and takes every dtype that is neither f32 nor bf16 for f16.
static_assert(TT__FLOATS == 3, "a new float dtype needs a case in TT__WITH_HALF, pack_as, round_16, "
              "lt_type and all other code that has TT_BF16");

// TT__WITH_HALF runs code in which T is the C++ type of `dtype`, a dtype of 16-bit floats. TT__WITH_TYPE also
// takes f32.
#define TT__WITH_HALF(dtype, T, ...)                                         \
    do {                                                                    \
        if ((dtype) == TT_BF16) { typedef bf16 T; __VA_ARGS__; }            \
        else { typedef f16 T; __VA_ARGS__; }                                \
    } while (0)
#define TT__WITH_TYPE(dtype, T, ...)                                         \
    do {                                                                    \
        if ((dtype) == TT_F32) { typedef float T; __VA_ARGS__; }            \
        else TT__WITH_HALF(dtype, T, __VA_ARGS__);                          \
    } while (0)

// Returns element i of an array of any float dtype. Use load_any, which branches on the dtype, for arrays
// that are small or rarely read.
__device__ __forceinline__ float load_any(const void *p, tt_dtype dtype, int64_t i)
{
    if (dtype == TT_F32) return ((const float *)p)[i];
    TT__WITH_HALF(dtype, T, return to_float(((const T *)p)[i]));
}
__device__ __forceinline__ void store_any(void *p, tt_dtype dtype, int64_t i, float x)
{
    if (dtype == TT_F32) ((float *)p)[i] = x;
    else TT__WITH_HALF(dtype, T, ((T *)p)[i] = round_to<T>(x));
}

// Converts the eight 16-bit floats in q to f32; the first is in the lowest bits.
template <class T> __device__ __forceinline__ void widen8(float (&x)[8], const uint4 &q);
template <> __device__ __forceinline__ void widen8<bf16>(float (&x)[8], const uint4 &q)
{
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
    TT__UNROLL for (int k = 0; k < 8; k++)
        x[k] = __uint_as_float(k % 2 ? words[k / 2] & 0xffff0000u : words[k / 2] << 16);
}
// For f32, q holds only four numbers; the other four become 0.
template <> __device__ __forceinline__ void widen8<float>(float (&x)[8], const uint4 &q)
{
    x[0] = __uint_as_float(q.x); x[1] = __uint_as_float(q.y); x[2] = __uint_as_float(q.z);
    x[3] = __uint_as_float(q.w);
    x[4] = x[5] = x[6] = x[7] = 0;
}
template <> __device__ __forceinline__ void widen8<f16>(float (&x)[8], const uint4 &q)
{
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
    TT__UNROLL for (int k = 0; k < 8; k++)
        x[k] = to_float(__ushort_as_half((unsigned short)(words[k / 2] >> (k % 2 * 16))));
}

// Rounds two numbers to 16 bits, to nearest, and returns both, `low` in the lower bits.
template <class T> __device__ __forceinline__ uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<bf16>(float low, float high)
{
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    uint32_t bits; // both numbers at once, because joining two halves takes instructions
    memcpy(&bits, &v, sizeof bits);
    return bits;
}
template <> __device__ __forceinline__ uint32_t pack<f16>(float low, float high)
{
    const __half2 v = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}
__device__ __forceinline__ uint32_t pack_as(tt_dtype dtype, float low, float high)
{
    return dtype == TT_BF16 ? pack<bf16>(low, high) : pack<f16>(low, high);
}

// Loads elements [i, i + 8) of p, of which the first `left` exist; the elements that do not exist become
// `absent`. i is a multiple of 8. wide: whether the address p is a multiple of 16 bytes.
__device__ __forceinline__ void load8(float (&x)[8], const void *p, tt_dtype dtype, int64_t i, int64_t left,
                                      bool wide, float absent = 0)
{
    if (!wide || left < 8) {
        TT__UNROLL for (int k = 0; k < 8; k++) x[k] = k < left ? load_any(p, dtype, i + k) : absent;
    } else if (dtype == TT_F32) {
        const float4 a = ((const float4 *)p)[i / 4], b = ((const float4 *)p)[i / 4 + 1];
        x[0] = a.x; x[1] = a.y; x[2] = a.z; x[3] = a.w; x[4] = b.x; x[5] = b.y; x[6] = b.z; x[7] = b.w;
    } else {
        const uint4 q = ((const uint4 *)p)[i / 8];
        TT__WITH_HALF(dtype, T, widen8<T>(x, q));
    }
}

// Stores eight 16-bit numbers, whose bits are h, to elements [i, i + 8) of p, of which the first `left`
// exist. i is a multiple of 8. wide: whether the address p is a multiple of 16 bytes.
__device__ __forceinline__ void store8_bits(void *p, int64_t i, int64_t left, bool wide,
                                            const uint32_t (&h)[8])
{
    if (!wide || left < 8) {
        TT__UNROLL for (int k = 0; k < 8; k++) if (k < left) ((uint16_t *)p)[i + k] = (uint16_t)h[k];
    } else {
        ((uint4 *)p)[i / 8] = make_uint4(h[0] | h[1] << 16, h[2] | h[3] << 16, h[4] | h[5] << 16,
                                         h[6] | h[7] << 16);
    }
}

__device__ __forceinline__ void store8(void *p, tt_dtype dtype, int64_t i, int64_t left, bool wide,
                                       const float (&x)[8])
{
    if (!wide || left < 8) {
        TT__UNROLL for (int k = 0; k < 8; k++) if (k < left) store_any(p, dtype, i + k, x[k]);
    } else if (dtype == TT_F32) {
        ((float4 *)p)[i / 4] = make_float4(x[0], x[1], x[2], x[3]);
        ((float4 *)p)[i / 4 + 1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
        ((uint4 *)p)[i / 8] = make_uint4(pack_as(dtype, x[0], x[1]), pack_as(dtype, x[2], x[3]),
                                         pack_as(dtype, x[4], x[5]), pack_as(dtype, x[6], x[7]));
    }
}

__device__ __forceinline__ void *row_at(const tt__mat &m, int64_t r)
{
    return (char *)m.data + r * m.ld * (m.dtype == TT_F32 ? 4 : 2);
}

// Returns whether every row of m begins at a multiple of 16 bytes.
inline bool is_wide(const tt__mat *m)
{
    return (uintptr_t)m->data % 16 == 0 && (m->rows < 2 || m->ld * (m->dtype == TT_F32 ? 4 : 2) % 16 == 0);
}

__device__ __forceinline__ float fast_exp(float x) { return tt__exp2(x * 1.4426950408889634f); }

// The normal distribution at x. e is the density, exp(-x^2 / 2) / sqrt(2 pi), and f * e is the probability of
// numbers below -|x|. f is a polynomial of t = 1 / (1 + 0.34 |x|), fitted for this file so that the largest
// relative error is least (1.3e-7 for |x| up to 6; 1.7e-4 at 14, where the probability is 1e-44). GELU and
// its derivative both use f and e; their errors are at most 3e-7 for |x| up to 4, and 1e-7 |x| beyond.
struct normal_tail { float f, e, reach; }; // reach: |x|, at most 14, so that reach * e is 0 where e is 0

__device__ __forceinline__ normal_tail tail_of(float x)
{
    const float a = fabsf(x), t = tt__reciprocal(fmaf(0.34f, a, 1.0f));
    float f = 0.11643818f;
    f = fmaf(f, t, -0.520366013f);
    f = fmaf(f, t, 0.693371952f);
    f = fmaf(f, t, -0.106047913f);
    f = fmaf(f, t, 0.40716967f);
    f = fmaf(f, t, 0.321383715f);
    f = fmaf(f, t, 0.341364413f);
    // -1.3257 is the logarithm of 1 / sqrt(2 pi) to base 2.
    return {f * t, tt__exp2(fmaf(-0.72134752f * x, x, -1.32574809f)), fminf(a, 14.0f)};
}

// Returns 1 / (1 + exp(-x)).
__device__ __forceinline__ float sigmoid(float x)
{
    return tt__reciprocal(1 + tt__exp2(-1.4426950408889634f * x));
}

// Returns 0.5 (1 + tanh u) = 1 / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3). square: x^2.
__device__ __forceinline__ float share_by_tanh(float x, float square)
{
    return tt__reciprocal(1 + tt__exp2(x * fmaf(-0.102943240f, square, -2.30220820f)));
}

// The value and the slope of each activation of TT__ACTS. A slope is computed from the saved value: the
// result of the activation if the table says by_result, else the operand. If exp or tanh is rounded to 0
// or 1, its slope is 0. That slope is not multiplied by x, because 0 times an infinite x would be NaN.
__device__ __forceinline__ float act_GELU(float x)
{
    const normal_tail n = tail_of(x);
    return fmaxf(x, 0.0f) - n.reach * (n.f * n.e); // NaN where x is NaN, because n.f is then NaN
}
__device__ __forceinline__ float slope_GELU(float x)
{
    const normal_tail n = tail_of(x);
    const float below = (n.f - n.reach) * n.e; // the derivative at -|x|
    return x < 0 ? below : 1 - below;
}

__device__ __forceinline__ float act_GELU_TANH(float x) { return x * share_by_tanh(x, x * x); }
__device__ __forceinline__ float slope_GELU_TANH(float x)
{
    const float square = x * x, s = share_by_tanh(x, square), ds = fmaf(-s, s, s);
    const float du = x * fmaf(0.214064449f, square, 1.59576912f); // x times the slope of 2u (share_by_tanh)
    return ds > 0 ? fmaf(ds, du, s) : s;
}

__device__ __forceinline__ float act_RELU(float x) { return x < 0 ? 0.0f : x; } // NaN stays NaN
__device__ __forceinline__ float slope_RELU(float y) { return y > 0 ? 1.0f : 0.0f; }

__device__ __forceinline__ float act_TANH(float x) { return tanhf(x); }
__device__ __forceinline__ float slope_TANH(float y) { return 1 - y * y; }

__device__ __forceinline__ float act_SILU(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float slope_SILU(float x)
{
    float s = sigmoid(x), ds = s * (1 - s);
    return ds > 0 ? s + x * ds : s;
}

__device__ __forceinline__ float act_SIGMOID(float x) { return sigmoid(x); }
__device__ __forceinline__ float slope_SIGMOID(float y) { return y * (1 - y); }

// Returns activation `act` of x. activation_slope returns the slope from the saved value. Without an
// activation the value is x and the slope is 1.
__device__ __forceinline__ float activate(int act, float x)
{
#define TT__ACTIVATE(ACT, function, by_result) case TT__ACT_##ACT: return act_##ACT(x);
    switch (act) { TT__ACTS(TT__ACTIVATE) }
#undef TT__ACTIVATE
    return x;
}
__device__ __forceinline__ float activation_slope(int act, float saved)
{
#define TT__SLOPE(ACT, function, by_result) case TT__ACT_##ACT: return slope_##ACT(saved);
    switch (act) { TT__ACTS(TT__SLOPE) }
#undef TT__SLOPE
    return 1;
}

// Computes one round of Philox4x32 on the counter c, with the round's key.
__device__ __forceinline__ void philox_round(uint32_t (&c)[4], uint32_t k0, uint32_t k1)
{
    uint32_t a_low, a_high, b_low, b_high;
    tt__multiply(c[0], 0xD2511F53u, a_low, a_high);
    tt__multiply(c[2], 0xCD9E8D57u, b_low, b_high);
    c[0] = b_high ^ c[1] ^ k0;
    c[2] = a_high ^ c[3] ^ k1;
    c[1] = b_low;
    c[3] = a_low;
}

// Computes Philox4x32 of a counter, as tt__philox_rounds in tinytrain.h does.
template <int ROUNDS = 10>
__device__ __forceinline__ void philox(const uint32_t (&counter)[4], uint64_t key, uint32_t (&out)[4])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    TT__UNROLL for (int k = 0; k < 4; k++) out[k] = counter[k];
    TT__UNROLL for (int round = 0; round < ROUNDS; round++) {
        philox_round(out, k0, k1);
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
}

// An expanded key for random numbers: the keys of all rounds of Philox. A uint4 holds the keys of two rounds.
// Kernels that use few keys keep the expanded keys in shared memory.
typedef uint4 philox_keys[(TT__DRAW_ROUNDS + 1) / 2];
__device__ __forceinline__ void expand_key(uint64_t key, philox_keys &to)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int pair = 0; 2 * pair < TT__DRAW_ROUNDS; pair++) {
        to[pair] = make_uint4(k0, k1, k0 + 0x9E3779B9u, k1 + 0xBB67AE85u);
        k0 += 2 * 0x9E3779B9u; k1 += 2 * 0xBB67AE85u;
    }
}

// Returns the key of a stream of random numbers, as tt__stream_key does.
__device__ __forceinline__ uint64_t stream_key(uint64_t seed, uint32_t tag, uint64_t a, uint64_t b)
{
    const uint32_t counter[4] = {(uint32_t)a, (uint32_t)(a >> 32) ^ (tag * 0x9E3779B9u), (uint32_t)b,
                                 (uint32_t)(b >> 32)};
    uint32_t out[4];
    philox(counter, seed, out);
    return (uint64_t)out[1] << 32 | out[0];
}

// Returns to every lane of a warp the sum of the lanes' v. The sum is added in a fixed order.
template <class V> __device__ __forceinline__ V warp_sum(V v)
{
    TT__UNROLL for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}
__device__ __forceinline__ float warp_max(float v)
{
    TT__UNROLL for (int m = 16; m; m >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, m));
    return v;
}

// Returns to every thread of a block the sum of the threads' v. The sum is added in a fixed order. THREADS:
// number of threads of the block, which must all call this function.
template <int THREADS, class V> __device__ __forceinline__ V block_sum(V v)
{
    TT__SHARED(V, part, [THREADS / 32]);
    v = warp_sum(v);
    __syncthreads(); // threads may still read `part` of an earlier call
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    V sum = 0;
    TT__UNROLL for (int i = 0; i < THREADS / 32; i++) sum += part[i];
    return sum;
}

inline unsigned blocks_for(int64_t n, int64_t per_block)
{
    return (unsigned)((n + per_block - 1) / per_block);
}
inline unsigned grid_for(int64_t n, int64_t per_block, int64_t largest)
{
    return n > 0 ? (unsigned)min((n + per_block - 1) / per_block, largest) : 1;
}

// Writes n initial values of a parameter from element `first` on. Elements [4 * i, 4 * i + 4) come from
// Philox block i, by the CPU's formulas (tt__init_values, tt__normal4).
__global__ void __launch_bounds__(256) init_values(void *memory, tt_dtype dtype, int64_t first, int64_t n,
                                                   tt_init init, uint64_t key)
{
    tt__begin_kernel();
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; 4 * i < n; i += gridDim.x * (int64_t)256) {
        const uint64_t block = (uint64_t)(first / 4 + i);
        const uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), 0, 0};
        uint32_t u[4];
        float x[4];
        philox(counter, key, u);
        TT__UNROLL for (int k = 0; k < 4; k++) x[k] = ((float)(u[k] >> 8) + 0.5f) * 0x1p-24f; // in (0, 1)
        if (init.kind == TT_INIT_NORMAL) {
            TT__UNROLL for (int k = 0; k < 4; k += 2) { // Box, Muller 1958
                const double radius = sqrt(-2.0 * log((double)x[k]));
                const double angle = 6.283185307179586 * (double)x[k + 1];
                x[k] = (float)(radius * cos(angle)) * init.scale;
                x[k + 1] = (float)(radius * sin(angle)) * init.scale;
            }
        } else {
            TT__UNROLL for (int k = 0; k < 4; k++)
                x[k] = init.kind == TT_INIT_UNIFORM ? (2 * x[k] - 1) * init.scale : init.kind == TT_INIT_ONES
                    ? 1.0f : 0.0f;
        }
        TT__UNROLL for (int k = 0; k < 4; k++) if (4 * i + k < n) store_any(memory, dtype, 4 * i + k, x[k]);
    }
}

tt_status cuda_init(tt__device *d, void *memory, tt_dtype dtype, int64_t first, int64_t n, tt_init init,
                    uint64_t key)
{
    if (!use(d)) return TT_ERR_DEVICE;
    return check(d, TT__LAUNCH(init_values, grid_for(n, 1024, 4096), 256, 0, d->stream, memory, dtype, first,
                               n, init, key), "initial values");
}

} // namespace
