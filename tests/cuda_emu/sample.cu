// sample.cu - small versions of the kernels and host code of tinytrain_cuda.cu: a sample for the emulator to
// run and for mutate.py to mutate. Also builds with nvcc, to run on a GPU: nvcc -gencode
// arch=compute_90a,code=sm_90a tests/cuda_emu/sample.cu (not in this folder, where nvcc would find the
// emulator's cuda_runtime.h instead of its own)
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cublas_v2.h>
#include <cublasLt.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#define TT__PORTABILITY_ONLY
#include "../../tinytrain_cuda.cu"

typedef __nv_bfloat16 bf16;
static __device__ __forceinline__ uint32_t pack2(float low, float high)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    uint32_t r;
    memcpy(&r, &v, sizeof r);
    return r;
}
static __device__ __forceinline__ float2 unpack2(uint32_t v)
{
    __nv_bfloat162 r;
    memcpy(&r, &v, sizeof r);
    return __bfloat1622float2(r);
}

// =========================================================================================== rows
// out = a + b, eight numbers a thread; n8 = n/8
__global__ void residual(bf16 *out, const bf16 *a, const bf16 *b, int n8)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n8) return;
    uint4 x = __ldg((const uint4 *)a + i), y = __ldg((const uint4 *)b + i), z;
    const uint32_t *xs = &x.x, *ys = &y.x;
    uint32_t *zs = &z.x;
    TT__UNROLL for (int k = 0; k < 4; k++) {
        float2 p = unpack2(xs[k]), q = unpack2(ys[k]);
        zs[k] = pack2(p.x + q.x, p.y + q.y);
    }
    ((uint4 *)out)[i] = z;
}

// Returns the sum over the block, with the same bits in every thread.
template <int THREADS> __device__ float block_sum(float v)
{
    TT__SHARED(float, part, [THREADS / 32]);
    for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    __syncthreads(); // threads may still read the part sums of an earlier call
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < THREADS / 32; i++) sum += part[i];
    return sum;
}

// Normalises rows of n numbers: `out = (x - mean) / std * w`. A second sum over a row gives the variance.
template <int THREADS> __global__ void __launch_bounds__(THREADS)
layernorm(float *__restrict__ out, const float *__restrict__ x, const float *__restrict__ w, int n)
{
    const float *row = x + (size_t)blockIdx.x * n;
    float sum = 0, squares = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) sum += row[i];
    float mean = block_sum<THREADS>(sum) / (float)n;
    for (int i = threadIdx.x; i < n; i += THREADS) squares += (row[i] - mean) * (row[i] - mean);
    float scale = rsqrtf(block_sum<THREADS>(squares) / (float)n + 1e-5f);
    for (int i = threadIdx.x; i < n; i += THREADS)
        out[(size_t)blockIdx.x * n + i] = (row[i] - mean) * scale * w[i];
}

__global__ void add(float *a, const float *b, int n)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) a[i] += b[i];
}

// writes integers, so that sums are exact in any order
__global__ void fill(float *a, int n, int rank, int round)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        a[i] = (float)((i * 7 + rank * 13 + round * 5) % 101);
}

// =========================================================================================== matrix product
// c (M, N) = a (M, K) b (N, K)^T, K a multiple of 32. 4 warps (2 x 2) compute a tile of 64 x 64 in steps of
// 32, double-buffered. Rows have 80 bytes, so that eight rows are in different banks.
enum { GEMM_PITCH = 40, GEMM_SHARED = 2 * 2 * 64 * GEMM_PITCH * 2 };
__global__ void __launch_bounds__(128) gemm(float *c, const bf16 *a, const bf16 *b, int M, int N, int K)
{
    TT__DYN_SHARED(bf16, tiles); // two buffers, each with 64 rows of a and then 64 rows of b
    int t = threadIdx.x, lane = t & 31, warp = t >> 5, warp_m = warp >> 1, warp_n = warp & 1,
        m0 = blockIdx.y * 64, n0 = blockIdx.x * 64;
    float sum[2][4][4] = {};
    auto load = [&](int stage, int k0) { // fills rows beyond the end with zeros
        bf16 *to_a = tiles + stage * 2 * 64 * GEMM_PITCH, *to_b = to_a + 64 * GEMM_PITCH;
        for (int i = t; i < 256; i += 128) {
            int r = i >> 2, k = (i & 3) * 8;
            tt__cp_async_16(to_a + r * GEMM_PITCH + k, a + (size_t)(m0 + r < M ? m0 + r : 0) * K + k0 + k,
                            m0 + r < M ? 16 : 0);
            tt__cp_async_16(to_b + r * GEMM_PITCH + k, b + (size_t)(n0 + r < N ? n0 + r : 0) * K + k0 + k,
                            n0 + r < N ? 16 : 0);
        }
        tt__cp_async_commit();
    };
    int steps = K / 32;
    load(0, 0);
    for (int step = 0; step < steps; step++) {
        if (step + 1 < steps) load((step + 1) & 1, (step + 1) * 32);
        if (step + 1 < steps) tt__cp_async_wait<1>();
        else tt__cp_async_wait<0>();
        __syncthreads();
        const bf16 *tile_a = tiles + (step & 1) * 2 * 64 * GEMM_PITCH, *tile_b = tile_a + 64 * GEMM_PITCH;
        TT__UNROLL for (int k = 0; k < 32; k += 16) {
            uint32_t fa[2][4], fb[2][4];
            for (int i = 0; i < 2; i++)
                tt__ldmatrix_x4(fa[i], tile_a + (warp_m * 32 + i * 16 + (lane & 15)) * GEMM_PITCH + k +
                                           (lane >> 4) * 8);
            for (int j = 0; j < 2; j++) {
                tt__ldmatrix_x4(fb[j],
                                tile_b + (warp_n * 32 + j * 16 + (lane & 7) + (lane >> 4) * 8) * GEMM_PITCH +
                                    k + (lane >> 3 & 1) * 8);
            }
            for (int i = 0; i < 2; i++) {
                for (int j = 0; j < 4; j++) {
                    uint32_t column[2] = {fb[j >> 1][(j & 1) * 2], fb[j >> 1][(j & 1) * 2 + 1]};
                    tt__mma_16816<bf16>(sum[i][j], fa[i], column);
                }
            }
        }
        __syncthreads(); // so that the next load may overwrite this stage
    }
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 4; j++) {
            for (int q = 0; q < 4; q++) {
                int row = m0 + warp_m * 32 + i * 16 + (lane >> 2) + (q >> 1) * 8,
                    column = n0 + warp_n * 32 + j * 8 + (lane & 3) * 2 + (q & 1);
                if (row < M && column < N) c[(size_t)row * N + column] = sum[i][j][q];
            }
        }
    }
}

// =========================================================================================== attention
// Causal, head width 64, q, k, v and o: (heads, T, 64), T a multiple of 64. A block takes 64 queries of one
// head, a warp takes 16 queries (Dao, "FlashAttention-2", algorithm 1). lse (heads, T): log of the sum of
// exponentials of each row.
enum { HEAD_PITCH = 72, ATTENTION_SHARED = 3 * 64 * HEAD_PITCH * 2 };
__global__ void __launch_bounds__(128)
    attention(bf16 *o, float *lse, const bf16 *q, const bf16 *k, const bf16 *v, int T, float scale)
{
    TT__DYN_SHARED(bf16, tile_q);
    bf16 *tile_k = tile_q + 64 * HEAD_PITCH, *tile_v = tile_k + 64 * HEAD_PITCH;
    int t = threadIdx.x, lane = t & 31, warp = t >> 5, q0 = blockIdx.x * 64;
    size_t head = (size_t)blockIdx.y * T * 64;
    auto load = [&](bf16 *to, const bf16 *from) {
        for (int i = t; i < 512; i += 128)
            tt__cp_async_16(to + (i >> 3) * HEAD_PITCH + (i & 7) * 8, from + (i >> 3) * 64 + (i & 7) * 8);
    };
    float out[8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    load(tile_q, q + head + (size_t)q0 * 64);
    for (int k0 = 0; k0 <= q0; k0 += 64) {
        __syncthreads(); // all threads are done with the previous tile
        load(tile_k, k + head + (size_t)k0 * 64);
        load(tile_v, v + head + (size_t)k0 * 64);
        tt__cp_async_commit();
        tt__cp_async_wait<0>();
        __syncthreads();
        float s[8][4] = {}; // 16 queries x 64 keys
        for (int kk = 0; kk < 4; kk++) {
            uint32_t fa[4], fb[4];
            tt__ldmatrix_x4(fa, tile_q + (warp * 16 + (lane & 15)) * HEAD_PITCH + kk * 16 + (lane >> 4) * 8);
            for (int j = 0; j < 4; j++) {
                tt__ldmatrix_x4(fb, tile_k + (j * 16 + (lane & 7) + (lane >> 4) * 8) * HEAD_PITCH + kk * 16 +
                                        (lane >> 3 & 1) * 8);
                uint32_t b0[2] = {fb[0], fb[1]}, b1[2] = {fb[2], fb[3]};
                tt__mma_16816<bf16>(s[2 * j], fa, b0);
                tt__mma_16816<bf16>(s[2 * j + 1], fa, b1);
            }
        }
        for (int h = 0; h < 2; h++) { // the thread has rows `lane / 4` and `lane / 4 + 8` of the warp's rows
            int row = q0 + warp * 16 + (lane >> 2) + h * 8;
            float m = largest[h], z = 0;
            for (int j = 0; j < 8; j++) {
                for (int e = 0; e < 2; e++) {
                    float &x = s[j][h * 2 + e];
                    x = k0 + j * 8 + (lane & 3) * 2 + e <= row ? x * scale : -INFINITY;
                    m = fmaxf(m, x);
                }
            }
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
            float correction = __expf(largest[h] - m);
            largest[h] = m;
            for (int j = 0; j < 8; j++) {
                for (int e = 0; e < 2; e++) {
                    float &x = s[j][h * 2 + e];
                    x = __expf(x - m);
                    z += x;
                    out[j][h * 2 + e] *= correction;
                }
            }
            sum[h] = sum[h] * correction + z;
        }
        // Results of mma have the layout of its operand A, so the probabilities stay in registers.
        for (int kk = 0; kk < 4; kk++) {
            uint32_t fa[4] = {pack2(s[2 * kk][0], s[2 * kk][1]), pack2(s[2 * kk][2], s[2 * kk][3]),
                              pack2(s[2 * kk + 1][0], s[2 * kk + 1][1]),
                              pack2(s[2 * kk + 1][2], s[2 * kk + 1][3])};
            uint32_t fb[4];
            for (int j = 0; j < 4; j++) {
                tt__ldmatrix_x4_trans(fb, tile_v + (kk * 16 + (lane & 15)) * HEAD_PITCH + j * 16 +
                                              (lane >> 4) * 8);
                uint32_t b0[2] = {fb[0], fb[1]}, b1[2] = {fb[2], fb[3]};
                tt__mma_16816<bf16>(out[2 * j], fa, b0);
                tt__mma_16816<bf16>(out[2 * j + 1], fa, b1);
            }
        }
    }
    for (int h = 0; h < 2; h++) {
        float z = sum[h];
        z += __shfl_xor_sync(0xffffffffu, z, 1);
        z += __shfl_xor_sync(0xffffffffu, z, 2);
        int row = q0 + warp * 16 + (lane >> 2) + h * 8;
        uint32_t *to = (uint32_t *)(o + head + (size_t)row * 64);
        for (int j = 0; j < 8; j++) to[j * 4 + (lane & 3)] = pack2(out[j][h * 2] / z, out[j][h * 2 + 1] / z);
        if ((lane & 3) == 0) lse[(size_t)blockIdx.y * T + row] = largest[h] + logf(z);
    }
}

// =========================================================================================== ring all-reduce
// Replaces data[r] by the sum over all ranks. Every device has a copy and a compute stream. The all-reduce
// starts after the work on the compute streams, and the compute streams wait until the all-reduce ends.
#define TRY(x) do { if ((err = (x)) != cudaSuccess) goto fail; } while (0)
enum { MAX_RANKS = 8 };
struct ring {
    int ranks;
    size_t chunk; // how many numbers a chunk has; a rank has ranks * chunk numbers
    float *data[MAX_RANKS], *received[MAX_RANKS];
    cudaStream_t copy[MAX_RANKS], compute[MAX_RANKS];
    cudaEvent_t ready[MAX_RANKS], sent[MAX_RANKS][MAX_RANKS], added[MAX_RANKS][MAX_RANKS],
        gathered[MAX_RANKS][MAX_RANKS];
};

inline void ring_free(ring *R)
{
    // waits before any memory is freed, because a peer may still write to it
    for (int r = 0; r < R->ranks; r++) {
        cudaSetDevice(r);
        if (R->copy[r]) cudaStreamSynchronize(R->copy[r]);
        if (R->compute[r]) cudaStreamSynchronize(R->compute[r]);
    }
    for (int r = 0; r < R->ranks; r++) {
        cudaSetDevice(r);
        if (R->copy[r]) cudaStreamDestroy(R->copy[r]);
        if (R->compute[r]) cudaStreamDestroy(R->compute[r]);
        if (R->ready[r]) cudaEventDestroy(R->ready[r]);
        for (int s = 0; s < R->ranks; s++) {
            if (R->sent[r][s]) cudaEventDestroy(R->sent[r][s]);
            if (R->added[r][s]) cudaEventDestroy(R->added[r][s]);
            if (R->gathered[r][s]) cudaEventDestroy(R->gathered[r][s]);
        }
        cudaFree(R->data[r]);
        cudaFree(R->received[r]);
    }
    memset(R, 0, sizeof *R);
}

inline cudaError_t ring_init(ring *R, int ranks, size_t n)
{
    cudaError_t err;
    memset(R, 0, sizeof *R);
    R->ranks = ranks;
    R->chunk = (n + (size_t)ranks - 1) / (size_t)ranks;
    for (int r = 0; r < ranks; r++) {
        TRY(cudaSetDevice(r));
        TRY(cudaMalloc(&R->data[r], R->chunk * (size_t)ranks * sizeof(float)));
        TRY(cudaMalloc(&R->received[r], 2 * R->chunk * sizeof(float)));
        TRY(cudaStreamCreateWithFlags(&R->copy[r], cudaStreamNonBlocking));
        TRY(cudaStreamCreateWithFlags(&R->compute[r], cudaStreamNonBlocking));
        TRY(cudaEventCreateWithFlags(&R->ready[r], cudaEventDisableTiming));
        for (int s = 0; s < ranks; s++) {
            TRY(cudaEventCreateWithFlags(&R->sent[r][s], cudaEventDisableTiming));
            TRY(cudaEventCreateWithFlags(&R->added[r][s], cudaEventDisableTiming));
            TRY(cudaEventCreateWithFlags(&R->gathered[r][s], cudaEventDisableTiming));
        }
    }
    return cudaSuccess;
fail:
    ring_free(R);
    return err;
}

inline cudaError_t ring_all_reduce(ring *R)
{
    const int n = R->ranks;
    const size_t c = R->chunk;
    cudaError_t err = cudaSuccess;
    if (n == 1) return cudaSuccess;
    for (int r = 0; r < n; r++) {
        TRY(cudaSetDevice(r));
        TRY(cudaEventRecord(R->ready[r], R->compute[r]));
    }
    for (int s = 0; s < n - 1; s++) { // reduce-scatter: rank r sends chunk `r - s` to rank `r + 1` (modulo n)
        for (int r = 0; r < n; r++) {
            int q = (r + 1) % n, k = (r - s + n) % n;
            TRY(cudaSetDevice(r));
            // Waits until the chunk that is sent is final.
            TRY(cudaStreamWaitEvent(R->copy[r], s == 0 ? R->ready[r] : R->added[r][s - 1], 0));
            TRY(cudaStreamWaitEvent(R->copy[r], s < 2 ? R->ready[q] : R->added[q][s - 2],
                                    0)); // waits until the receiver's buffer is free
            TRY(cudaMemcpyPeerAsync(R->received[q] + (s & 1) * c, q, R->data[r] + k * c, r, c * sizeof(float),
                                    R->copy[r]));
            TRY(cudaEventRecord(R->sent[r][s], R->copy[r]));
        }
        for (int r = 0; r < n; r++) {
            int q = (r + 1) % n, k = (r - s + n) % n;
            TRY(cudaSetDevice(q));
            TRY(cudaStreamWaitEvent(R->compute[q], R->sent[r][s], 0));
            TRY(TT__LAUNCH(add, 2, 64, 0, R->compute[q], R->data[q] + k * c, R->received[q] + (s & 1) * c,
                           (int)c));
            TRY(cudaEventRecord(R->added[q][s], R->compute[q]));
        }
    }
    for (int s = 0; s < n - 1; s++) { // all-gather: rank r sends chunk `r + 1 - s` to rank `r + 1` (modulo n)
        for (int r = 0; r < n; r++) {
            int q = (r + 1) % n, k = (r + 1 - s + n) % n;
            TRY(cudaSetDevice(r));
            TRY(cudaStreamWaitEvent(R->copy[r],
                                    s == 0 ? R->added[r][n - 2] : R->gathered[(r + n - 1) % n][s - 1], 0));
            TRY(cudaMemcpyPeerAsync(R->data[q] + k * c, q, R->data[r] + k * c, r, c * sizeof(float),
                                    R->copy[r]));
            TRY(cudaEventRecord(R->gathered[r][s], R->copy[r]));
        }
    }
    // A compute stream continues when all chunks have arrived at its device and peers no longer read from
    // that device.
    for (int r = 0; r < n; r++) {
        TRY(cudaSetDevice(r));
        TRY(cudaStreamWaitEvent(R->compute[r], R->gathered[(r + n - 1) % n][n - 2], 0));
        TRY(cudaStreamWaitEvent(R->compute[r], R->gathered[r][n - 2], 0));
    }
fail:
    return err;
}

// =========================================================================================== tests
#include "emu_test.h"

inline float random_number()
{
    static uint64_t state = 88172645463325252ull;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (float)((int)(state % 2001) - 1000) / 1000.0f;
}
template <class T> struct buffer { // an array on the host and on the current device
    T *device = nullptr;
    std::vector<T> host;
    explicit buffer(size_t n) : host(n) { OK(cudaMalloc(&device, n * sizeof(T))); }
    ~buffer() { OK(cudaFree(device)); }
    void up() { OK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice)); }
    void down() { OK(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost)); }
};
inline void randomise(buffer<bf16> &b, float scale = 1)
{
    for (auto &v : b.host) v = __float2bfloat16(scale * random_number());
    b.up();
}

#ifdef TT_EMULATE
#define FOR_SEEDS(n, devices, peers) \
    for (uint64_t seed = 0; seed < (n); emu_leaks(), seed++) \
        if (emu_configure(devices, (size_t)8 << 20, peers, seed), true)
inline void emu_leaks()
{
    char what[200];
    CHECK(emu_live_objects(what, sizeof what) == 0);
}
#else
#define FOR_SEEDS(n, devices, peers) for (uint64_t seed = 0; seed < 1; seed++)
#endif

#ifndef SAMPLE_WITHOUT_TESTS
TEST(residual_adds)
{
    FOR_SEEDS(5, 1, 1) {
        const int n = 200 * 8;
        buffer<bf16> a(n), b(n), out(n);
        randomise(a);
        randomise(b);
        OK(TT__LAUNCH(residual, (n / 8 + 63) / 64, 64, 0, 0, out.device, a.device, b.device, n / 8));
        out.down();
        for (int i = 0; i < n; i++) {
            float sum = __bfloat162float(a.host[i]) + __bfloat162float(b.host[i]);
            CHECK(__bfloat162float(out.host[i]) == __bfloat162float(__float2bfloat16(sum)));
        }
    }
}

TEST(layernorm_of_odd_rows)
{
    FOR_SEEDS(5, 1, 1) {
        const int rows = 5, n = 77;
        buffer<float> x(rows * n), w(n), y(rows * n);
        for (auto &v : x.host) v = random_number();
        for (auto &v : w.host) v = random_number();
        x.up();
        w.up();
        OK(TT__LAUNCH(layernorm<128>, rows, 128, 0, 0, y.device, x.device, w.device, n));
        y.down();
        for (int r = 0; r < rows; r++) {
            double mean = 0, variance = 0;
            for (int i = 0; i < n; i++) mean += (double)x.host[r * n + i] / n;
            for (int i = 0; i < n; i++)
                variance += (x.host[r * n + i] - mean) * (x.host[r * n + i] - mean) / n;
            for (int i = 0; i < n; i++)
                CHECK_NEAR(y.host[r * n + i], (x.host[r * n + i] - mean) / sqrt(variance + 1e-5) * w.host[i],
                           1e-5);
        }
    }
}

TEST(gemm_of_whole_and_cut_tiles)
{
    FOR_SEEDS(6, 1, 1) {
        const int M = seed % 2 ? 64 : 100, N = seed % 2 ? 64 : 72, K = seed % 2 ? 64 : 96;
        buffer<bf16> a((size_t)(M * K)), b((size_t)(N * K));
        buffer<float> c((size_t)(M * N));
        randomise(a);
        randomise(b);
        OK(TT__LAUNCH(gemm, dim3((N + 63) / 64, (M + 63) / 64), 128, GEMM_SHARED, 0, c.device, a.device,
                      b.device, M, N, K));
        c.down();
        for (int i = 0; i < M; i++) {
            for (int j = 0; j < N; j++) {
                double sum = 0;
                for (int k = 0; k < K; k++)
                    sum += (double)__bfloat162float(a.host[i * K + k]) * __bfloat162float(b.host[j * K + k]);
                CHECK_NEAR(c.host[i * N + j], sum, 1e-4);
            }
        }
    }
}

TEST(attention_is_softmax_of_scores)
{
    FOR_SEEDS(5, 1, 1) {
        const int heads = 2, T = 128;
        const size_t n = heads * T * 64;
        buffer<bf16> q(n), k(n), v(n), o(n);
        buffer<float> lse(heads * T);
        randomise(q, 2);
        randomise(k, 2);
        randomise(v, 2);
        OK(cudaFuncSetAttribute(attention, cudaFuncAttributeMaxDynamicSharedMemorySize, ATTENTION_SHARED));
        OK(TT__LAUNCH(attention, dim3(T / 64, heads), 128, ATTENTION_SHARED, 0, o.device, lse.device,
                      q.device, k.device, v.device, T, 0.125f));
        o.down();
        lse.down();
        for (int row = 0; row < heads * T; row++) {
            const size_t head = (size_t)(row / T) * T * 64;
            std::vector<double> s((size_t)(row % T) + 1);
            double largest = -INFINITY, sum = 0;
            for (size_t j = 0; j < s.size(); j++) {
                for (int d = 0; d < 64; d++)
                    s[j] += 0.125 * __bfloat162float(q.host[(size_t)row * 64 + d]) *
                            __bfloat162float(k.host[head + j * 64 + d]);
                largest = fmax(largest, s[j]);
            }
            for (double x : s) sum += exp(x - largest);
            for (int d = 0; d < 64; d++) {
                double expected = 0;
                for (size_t j = 0; j < s.size(); j++)
                    expected += exp(s[j] - largest) / sum * __bfloat162float(v.host[head + j * 64 + d]);
                CHECK_NEAR(__bfloat162float(o.host[(size_t)row * 64 + d]), expected, 2e-2);
            }
            CHECK_NEAR(lse.host[row], largest + log(sum), 1e-3);
        }
    }
}

// Runs several all-reduces, which overlap as far as the events allow.
inline cudaError_t ring_rounds(int ranks, size_t n, int rounds, bool *wrong)
{
    ring R;
    float *total[MAX_RANKS] = {};
    std::vector<float> h(n);
    cudaError_t err = ring_init(&R, ranks, n);
    *wrong = false;
    if (err) return err;
    for (int r = 0; r < ranks; r++) {
        TRY(cudaSetDevice(r));
        TRY(cudaMalloc(&total[r], n * sizeof(float)));
        TRY(cudaMemsetAsync(total[r], 0, n * sizeof(float), R.compute[r]));
    }
    for (int round = 0; round < rounds; round++) {
        for (int r = 0; r < ranks; r++) {
            TRY(cudaSetDevice(r));
            TRY(TT__LAUNCH(fill, 2, 64, 0, R.compute[r], R.data[r], (int)R.chunk * ranks, r, round));
        }
        TRY(ring_all_reduce(&R));
        for (int r = 0; r < ranks; r++) {
            TRY(cudaSetDevice(r));
            TRY(TT__LAUNCH(add, 2, 64, 0, R.compute[r], total[r], R.data[r], (int)n));
        }
    }
    for (int r = 0; r < ranks; r++) {
        TRY(cudaSetDevice(r));
        TRY(cudaMemcpyAsync(h.data(), total[r], n * sizeof(float), cudaMemcpyDeviceToHost, R.compute[r]));
        TRY(cudaStreamSynchronize(R.compute[r]));
        for (int i = 0; i < (int)n; i++) {
            float expected = 0;
            for (int k = 0; k < rounds * ranks; k++)
                expected += (float)((i * 7 + k % ranks * 13 + k / ranks * 5) % 101);
            *wrong = *wrong || h[(size_t)i] != expected;
        }
    }
fail:
    for (int r = 0; r < ranks; r++) {
        cudaSetDevice(r);
        cudaDeviceSynchronize();
    }
    for (int r = 0; r < ranks; r++) cudaFree(total[r]);
    ring_free(&R);
    return err;
}

TEST(ring_all_reduce_sums)
{
    FOR_SEEDS(10, 4, seed % 2) {
        int devices = 0;
        OK(cudaGetDeviceCount(&devices));
        for (int ranks = 1; ranks <= devices && ranks <= 4; ranks++) {
            bool wrong;
            OK(ring_rounds(ranks, 1003, 3, &wrong));
            CHECK(!wrong);
        }
    }
}

TEST(ring_survives_every_failing_call)
{
#ifdef TT_EMULATE
    bool wrong;
    long call = 1;
    for (cudaError_t err = cudaErrorUnknown; err != cudaSuccess && call < 2000; call++) {
        char left[200];
        emu_configure(3, (size_t)1 << 20, 1, (uint64_t)call);
        emu_inject_fault(call, cudaErrorUnknown, 1);
        err = ring_rounds(3, 50, 2, &wrong);
        if (call > emu_api_calls()) break; // the faulty call was never reached: all calls have been tried
        err = cudaErrorUnknown;
        CHECK_EQUAL(emu_live_objects(left, sizeof left), 0);
    }
    CHECK(call > 100);
#else
    SKIP("only the emulator injects faults");
#endif
}

static const test_case tests[] = {
    TEST_CASE(residual_adds), TEST_CASE(layernorm_of_odd_rows), TEST_CASE(gemm_of_whole_and_cut_tiles),
    TEST_CASE(attention_is_softmax_of_scores), TEST_CASE(ring_all_reduce_sums),
    TEST_CASE(ring_survives_every_failing_call),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
#endif
