// tinytrain_cuda.cu - tinytrain's backend for NVIDIA GPUs.
//
//     nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -c tinytrain_cuda.cu
//     cc -O2 -DTINYTRAIN_CUDA program.c tinytrain_cuda.o -lcudart -lcublas -lcublasLt -lstdc++ -lm -lpthread
//
// Compile a program with device = "cuda" and it runs here: the same tape, passes and plan as on the CPU, other kernels.
//
// Sections: portability, device, numbers, rows, losses, optimizers, attention, matmuls, table.
//
// Rules that all kernels keep. Sums are f32 at least and in a fixed order, with no atomics on floats: the same bits in every run. All that
// changes from step to step (seed, step, learning rate, loss scale) is read from the program's slot on the device and never an argument, so
// that a captured step can be replayed. Nobody waits for another block. Where the CPU backend draws random numbers, these are the same.
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cublasLt.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TINYTRAIN_BACKEND
#include "tinytrain.h"

// ================================================================================================== portability
// The only place with inline assembly, and the only one that knows of the emulator (tests/cuda_emu), whose header defines TT_EMULATE and
// has functions of the same names. Fragments and their layouts: PTX ISA, "Warp-level matrix instructions". g = lane/4, t = lane%4.
#ifndef TT_EMULATE
#define TT_UNROLL _Pragma("unroll")
// A shared array: TT_SHARED(float, tile, [32][33]); a shared scalar: TT_SHARED(int, count, );
#define TT_SHARED(T, name, dims) __shared__ __align__(128) T name dims
// The launch's dynamic shared memory, aligned to 128 bytes.
#define TT_DYN_SHARED(T, name) extern __shared__ __align__(128) unsigned char tt_dyn_smem[]; T *name = (T *)tt_dyn_smem
// TT_LAUNCH(kernel, grid, block, shared bytes, stream, arguments...), a cudaError_t. A template goes in parentheses: (kernel<64, 2>).
#define TT_LAUNCH(kernel, grid, block, shared, stream, ...) (kernel<<<(grid), (block), (shared), (stream)>>>(__VA_ARGS__), cudaGetLastError())

__device__ __forceinline__ uint32_t tt_shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// d (16 x 8) += a (16 x 16, row-major) b (16 x 8, column-major); T is __nv_bfloat16 or __half, two to a register, the lower column or row
// in the lower half. a: rows g, g+8, g, g+8 of columns 2t, 2t, 2t+8, 2t+8; b: rows 2t, 2t+8 of column g; d: (g, 2t), (g, 2t+1), (g+8, ...).
template <class T> __device__ void tt_mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <> __device__ __forceinline__ void tt_mma_16816<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> __device__ __forceinline__ void tt_mma_16816<__half>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d (16 x 8) += a (16 x 8) b (8 x 8) in TF32, of numbers that tt_tf32 rounded. a: rows g, g+8, g, g+8 of columns t, t, t+4, t+4; b: rows t, t+4.
__device__ __forceinline__ void tt_mma_1688_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ uint32_t tt_tf32(float x)
{
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float tt_exp2(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// 8 x 8 matrices of 16-bit numbers from shared memory: lane 8j+i names row i (16 bytes) of matrix j. A thread gets columns 2t and 2t+1 of
// row g of each; with _trans of its transpose.
__device__ __forceinline__ void tt_ldmatrix_x1(uint32_t &r, const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(tt_shared_address(row)) : "memory");
}
__device__ __forceinline__ void tt_ldmatrix_x2(uint32_t (&r)[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(tt_shared_address(row)) : "memory");
}
__device__ __forceinline__ void tt_ldmatrix_x4(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(tt_shared_address(row)) : "memory");
}
__device__ __forceinline__ void tt_ldmatrix_x1_trans(uint32_t &r, const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(tt_shared_address(row)) : "memory");
}
__device__ __forceinline__ void tt_ldmatrix_x2_trans(uint32_t (&r)[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(tt_shared_address(row)) : "memory");
}
__device__ __forceinline__ void tt_ldmatrix_x4_trans(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(tt_shared_address(row)) : "memory");
}
// Copies device memory to shared memory in the background; the bytes from `bytes` on become zero. Done after the commit and the wait that leaves
// at most N later groups under way, for the thread's own copies: a barrier comes between that wait and the use by other threads.
__device__ __forceinline__ void tt_cp_async_4(void *to, const void *from, int bytes = 4)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(tt_shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tt_cp_async_8(void *to, const void *from, int bytes = 8)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(tt_shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tt_cp_async_16(void *to, const void *from, int bytes = 16)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(tt_shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tt_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void tt_cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#endif

// ================================================================================================== device
// Memory, copies, and what a program keeps on the device.

struct tt__device {
    int index;
    cudaStream_t stream;    // all work, in order
    cublasLtHandle_t lt;
    cudaDeviceProp properties;
    char error[512];
};

static tt_status tt_fail(tt__device *d, tt_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(d->error, sizeof d->error, format, args);
    va_end(args);
    return status;
}

// TT_OK, or TT_ERR_DEVICE with what was being done.
static tt_status tt_check(tt__device *d, cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return TT_OK;
    cudaGetLastError(); // the next call starts without it
    return tt_fail(d, e == cudaErrorMemoryAllocation ? TT_ERR_MEMORY : TT_ERR_DEVICE, "%s: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
}

static void cuda_close(tt__device *d)
{
    if (!d) return;
    cudaSetDevice(d->index);
    if (d->stream) cudaStreamSynchronize(d->stream);
    if (d->lt) cublasLtDestroy(d->lt);
    if (d->stream) cudaStreamDestroy(d->stream);
    free(d);
}

static tt__device *cuda_open(tt_context *ctx, int index, char *error, size_t capacity)
{
    int devices = 0;
    (void)ctx;
    cudaError_t e = cudaGetDeviceCount(&devices);
    if (e != cudaSuccess || index >= devices) {
        cudaGetLastError();
        snprintf(error, capacity, "number %d asked for, %d found%s%s", index, devices, e == cudaSuccess ? "" : ": ", e == cudaSuccess ? "" : cudaGetErrorString(e));
        return NULL;
    }
    tt__device *d = (tt__device *)calloc(1, sizeof *d);
    if (!d) { snprintf(error, capacity, "out of memory"); return NULL; }
    d->index = index;
    tt_status status = tt_check(d, cudaSetDevice(index), "cudaSetDevice");
    if (status == TT_OK) status = tt_check(d, cudaGetDeviceProperties(&d->properties, index), "cudaGetDeviceProperties");
    if (status == TT_OK && d->properties.major < 8)
        status = tt_fail(d, TT_ERR_DEVICE, "%s has compute capability %d.%d, and at least 8.0 is needed", d->properties.name, d->properties.major, d->properties.minor);
    if (status == TT_OK) status = tt_check(d, cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking), "cudaStreamCreate");
    if (status == TT_OK && cublasLtCreate(&d->lt) != CUBLAS_STATUS_SUCCESS) status = tt_fail(d, TT_ERR_DEVICE, "cublasLtCreate failed");
    if (status == TT_OK) return d;
    snprintf(error, capacity, "%s", d->error);
    cuda_close(d);
    return NULL;
}

static const char *cuda_error(tt__device *d) { return d->error; }

static void *cuda_allocate(tt__device *d, size_t bytes)
{
    void *memory = NULL;
    size_t unused = 0, total = 0;
    cudaSetDevice(d->index);
    if (cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
    cudaGetLastError();
    cudaMemGetInfo(&unused, &total);
    tt_fail(d, TT_ERR_MEMORY, "%zu bytes wanted, %zu of its %zu are free", bytes, unused, total);
    return NULL;
}

static void cuda_release(tt__device *d, void *memory)
{
    cudaSetDevice(d->index);
    cudaStreamSynchronize(d->stream);
    cudaFree(memory);
}

static void *cuda_allocate_host(tt__device *d, size_t bytes)
{
    void *host = NULL;
    cudaSetDevice(d->index);
    if (tt_check(d, cudaMallocHost(&host, bytes), "cudaMallocHost") != TT_OK) return NULL;
    return host;
}

static void cuda_release_host(tt__device *d, void *host)
{
    cudaSetDevice(d->index);
    cudaStreamSynchronize(d->stream);
    cudaFreeHost(host);
}

static tt_status cuda_write(tt__device *d, void *memory, const void *from, size_t bytes)
{
    cudaSetDevice(d->index);
    return tt_check(d, cudaMemcpyAsync(memory, from, bytes, cudaMemcpyHostToDevice, d->stream), "copy to the device");
}

static tt_status cuda_fill(tt__device *d, void *memory, int byte, size_t bytes)
{
    cudaSetDevice(d->index);
    return bytes ? tt_check(d, cudaMemsetAsync(memory, byte, bytes, d->stream), "fill") : TT_OK;
}

static tt_status cuda_wait(tt__device *d)
{
    cudaSetDevice(d->index);
    return tt_check(d, cudaStreamSynchronize(d->stream), "wait");
}

static tt_status cuda_read(tt__device *d, void *to, const void *memory, size_t bytes)
{
    cudaSetDevice(d->index);
    tt_status status = tt_check(d, cudaMemcpyAsync(to, memory, bytes, cudaMemcpyDeviceToHost, d->stream), "copy from the device");
    return status == TT_OK ? cuda_wait(d) : status;
}

__global__ void set_run(tt__slot *slot, tt__run run)
{
    if (threadIdx.x == 0) slot->run = run;
}

static tt_status cuda_begin(tt__device *d, tt__slot *slot, const tt__run *run)
{
    cudaSetDevice(d->index);
    return tt_check(d, TT_LAUNCH(set_run, 1, 32, 0, d->stream, slot, *run), "begin");
}

__global__ void add_counts(tt__slot *slot, const float *counts, bool first)
{
    tt__results *r = &slot->results;
    if (threadIdx.x) return;
    r->loss = (first ? 0 : r->loss) + counts[0];
    r->targets = (first ? 0 : r->targets) + counts[1];
    r->correct = (first ? 0 : r->correct) + counts[2];
    if (first) r->norm = r->factor = 0;
}

static tt_status cuda_collect(tt__device *d, tt__slot *slot, const float *counts, bool first)
{
    cudaSetDevice(d->index);
    return tt_check(d, TT_LAUNCH(add_counts, 1, 32, 0, d->stream, slot, counts, first), "collect");
}

static tt_status cuda_results(tt__device *d, const tt__slot *slot, tt__results *to) { return cuda_read(d, to, &slot->results, sizeof *to); }

// ================================================================================================== numbers
// Conversions, random numbers, sums over warps and blocks.

typedef __nv_bfloat16 bf16;
typedef __half f16;

__device__ __forceinline__ float tt_float(float x) { return x; }
__device__ __forceinline__ float tt_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float tt_float(f16 x) { return __half2float(x); }
template <class T> __device__ __forceinline__ T tt_round(float x); // to nearest, ties to even
template <> __device__ __forceinline__ float tt_round<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 tt_round<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ f16 tt_round<f16>(float x) { return __float2half_rn(x); }

// Runs CODE with T the C++ type of a dtype of floats.
#define TT_WITH_TYPE(dtype, T, ...)                                         \
    do {                                                                    \
        if ((dtype) == TT_BF16) { typedef bf16 T; __VA_ARGS__; }            \
        else if ((dtype) == TT_F16) { typedef f16 T; __VA_ARGS__; }         \
        else { typedef float T; __VA_ARGS__; }                              \
    } while (0)

// Element i of an array of any dtype of floats, for arrays that are small or read rarely.
__device__ __forceinline__ float tt_load_any(const void *p, tt_dtype dtype, int64_t i)
{
    if (dtype == TT_F32) return ((const float *)p)[i];
    return dtype == TT_BF16 ? tt_float(((const bf16 *)p)[i]) : tt_float(((const f16 *)p)[i]);
}
__device__ __forceinline__ void tt_store_any(void *p, tt_dtype dtype, int64_t i, float x)
{
    if (dtype == TT_F32) ((float *)p)[i] = x;
    else if (dtype == TT_BF16) ((bf16 *)p)[i] = tt_round<bf16>(x);
    else ((f16 *)p)[i] = tt_round<f16>(x);
}

// Eight 16-bit floats in 16 bytes, the first in the lowest bits.
__device__ __forceinline__ void tt_widen_8(float (&v)[8], const uint4 &u, tt_dtype dtype)
{
    const uint32_t w[4] = {u.x, u.y, u.z, u.w};
    TT_UNROLL for (int k = 0; k < 4; k++) {
        if (dtype == TT_BF16) {
            v[2 * k] = __uint_as_float(w[k] << 16);
            v[2 * k + 1] = __uint_as_float(w[k] & 0xffff0000u);
        } else {
            v[2 * k] = __half2float(__ushort_as_half((unsigned short)w[k]));
            v[2 * k + 1] = __half2float(__ushort_as_half((unsigned short)(w[k] >> 16)));
        }
    }
}
__device__ __forceinline__ uint4 tt_narrow_8(const float (&v)[8], tt_dtype dtype)
{
    uint32_t w[4];
    TT_UNROLL for (int k = 0; k < 4; k++) {
        if (dtype == TT_BF16) {
            const __nv_bfloat162 p = __floats2bfloat162_rn(v[2 * k], v[2 * k + 1]);
            w[k] = __bfloat16_as_ushort(p.x) | (uint32_t)__bfloat16_as_ushort(p.y) << 16;
        } else {
            const __half2 p = __floats2half2_rn(v[2 * k], v[2 * k + 1]);
            w[k] = __half_as_ushort(p.x) | (uint32_t)__half_as_ushort(p.y) << 16;
        }
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// Activations and their derivatives by s, which is the input, or for RELU and TANH the output.
__device__ __forceinline__ float tt_act(int kind, float x)
{
    switch (kind) {
    case TT__ACT_GELU: return x * 0.5f * (1.0f + erff(x * 0.70710678118654752f));
    case TT__ACT_GELU_TANH: return x * 0.5f * (1.0f + tanhf(0.7978845608028654f * x * (1.0f + 0.044715f * x * x)));
    case TT__ACT_RELU: return x < 0 ? 0 : x; // NaN stays NaN
    case TT__ACT_TANH: return tanhf(x);
    case TT__ACT_SILU: return x / (1.0f + expf(-x));
    default: return x;
    }
}
__device__ __forceinline__ float tt_act_derivative(int kind, float s)
{
    switch (kind) {
    case TT__ACT_GELU: return 0.5f * (1.0f + erff(s * 0.70710678118654752f)) + s * 0.3989422804014327f * expf(s * s * -0.5f);
    case TT__ACT_GELU_TANH: {
        s = s < -100.0f ? -100.0f : s > 100.0f ? 100.0f : s; // no infinity times 0; NaN stays NaN
        const float t = tanhf(0.7978845608028654f * s * (1.0f + 0.044715f * s * s));
        return 0.5f * (1.0f + t) + 0.5f * s * (1.0f - t * t) * 0.7978845608028654f * (1.0f + 0.134145f * s * s);
    }
    case TT__ACT_RELU: return s > 0 ? 1.0f : 0.0f;
    case TT__ACT_TANH: return 1.0f - s * s;
    case TT__ACT_SILU: {
        const float p = 1.0f / (1.0f + expf(-s));
        return p * (1.0f + s * (1.0f - p));
    }
    default: return 1.0f;
    }
}

// Philox4x32-10, as in tinytrain.h.
__device__ __forceinline__ void tt_philox(const uint32_t (&counter)[4], uint64_t key, uint32_t (&out)[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    TT_UNROLL for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b; c3 = (uint32_t)a; c0 = n0; c2 = n2;
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    out[0] = c0; out[1] = c1; out[2] = c2; out[3] = c3;
}

// The key of a stream of random numbers, as tt__stream_key makes it.
__device__ __forceinline__ uint64_t tt_stream_key(uint64_t seed, uint32_t tag, uint64_t a, uint64_t b)
{
    const uint32_t counter[4] = {(uint32_t)a, (uint32_t)(a >> 32) ^ (tag * 0x9E3779B9u), (uint32_t)b, (uint32_t)(b >> 32)};
    uint32_t out[4];
    tt_philox(counter, seed, out);
    return (uint64_t)out[1] << 32 | out[0];
}

// The sum over a warp, in every lane, in a fixed order.
__device__ __forceinline__ float tt_warp_sum(float v)
{
    TT_UNROLL for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}
__device__ __forceinline__ float tt_warp_max(float v)
{
    TT_UNROLL for (int m = 16; m; m >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, m));
    return v;
}

// The sum over a block of THREADS, in every thread, in a fixed order. All threads call it.
template <int THREADS> __device__ __forceinline__ float tt_block_sum(float v)
{
    TT_SHARED(float, part, [THREADS / 32]);
    v = tt_warp_sum(v);
    __syncthreads(); // an earlier call may still be read
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
    TT_UNROLL for (int i = 0; i < THREADS / 32; i++) sum += part[i];
    return sum;
}

static inline unsigned tt_blocks(int64_t n, int64_t per_block) { return (unsigned)((n + per_block - 1) / per_block); }

// ================================================================================================== rows
// Ops that work row by row or element by element.

#define TT_ROW_THREADS 256
// Bytes of a launch's resident scratch.
#define TT_RESIDENT (((size_t)32 << 20) - 4096)

static size_t tt_type_bytes(tt_dtype dtype) { return dtype == TT_F32 ? 4 : 2; }

// Elements [c, c + 8) of row r, of which the first n count; the others become 0. vector: the row begins at a multiple of 16 bytes, and c is a
// multiple of 8.
__device__ __forceinline__ void tt_load_8(float (&v)[8], const tt__mat &m, int64_t r, int64_t c, int n, bool vector)
{
    const int64_t at = r * m.ld + c;
    if (!vector || n < 8) {
        TT_UNROLL for (int j = 0; j < 8; j++) v[j] = j < n ? tt_load_any(m.data, m.dtype, at + j) : 0;
    } else if (m.dtype == TT_F32) {
        const float4 *p = (const float4 *)((const float *)m.data + at), a = p[0], b = p[1];
        v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
    } else {
        const uint4 u = *(const uint4 *)((const uint16_t *)m.data + at);
        tt_widen_8(v, u, m.dtype);
    }
}

__device__ __forceinline__ void tt_store_8(const tt__mat &m, int64_t r, int64_t c, int n, bool vector, const float (&v)[8])
{
    const int64_t at = r * m.ld + c;
    if (!vector || n < 8) {
        TT_UNROLL for (int j = 0; j < 8; j++) if (j < n) tt_store_any(m.data, m.dtype, at + j, v[j]);
    } else if (m.dtype == TT_F32) {
        float4 *p = (float4 *)((float *)m.data + at);
        p[0] = make_float4(v[0], v[1], v[2], v[3]);
        p[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        *(uint4 *)((uint16_t *)m.data + at) = tt_narrow_8(v, m.dtype);
    }
}

// Whether rows of m begin at multiples of 16 bytes.
static bool tt_vectors(const tt__mat *m)
{
    return ((uintptr_t)m->data | (m->rows > 1 ? (size_t)m->ld * tt_type_bytes(m->dtype) : 0)) % 16 == 0;
}

// An op whose elements come from up to two others, in groups of 8 columns. OP is a struct with begin(), which all threads of a block call, and
// get(): the results v of the group of n columns that begins at column c of row r, or false where nothing is to be written.
struct tt_groups { tt__mat a, b, y; bool add, vector; int64_t per_row, first, all; };

template <class OP> __global__ void __launch_bounds__(TT_ROW_THREADS) each_group(tt_groups g, OP op)
{
    op.begin();
    for (int64_t k = (int64_t)blockIdx.x * TT_ROW_THREADS + threadIdx.x; k < g.all; k += (int64_t)gridDim.x * TT_ROW_THREADS) {
        const int64_t row = g.all == g.per_row ? 0 : (uint32_t)k / (uint32_t)g.per_row, c = (k - row * g.per_row) * 8, r = g.first + row;
        const int n = (int)min(g.y.cols - c, (int64_t)8);
        float v[8], old[8];
        if (!op.get(g, r, c, n, v)) continue;
        if (g.add) {
            tt_load_8(old, g.y, r, c, n, g.vector);
            TT_UNROLL for (int j = 0; j < 8; j++) v[j] += old[j];
        }
        tt_store_8(g.y, r, c, n, g.vector, v);
    }
}

// by_row: the op asks for its row or column, so matrices without gaps are not taken as one row. Operands whose data is NULL are left alone.
template <class OP> static cudaError_t run_groups(tt__device *d, tt__mat a, tt__mat b, tt__mat y, bool add, bool by_row, OP op)
{
    tt_groups g = {a, b, y, add, true, 1, 0, 0};
    tt__mat *const all[3] = {&g.a, &g.b, &g.y};
    for (int k = 0; k < 3; k++) {
        g.vector = g.vector && tt_vectors(all[k]);
        by_row = by_row || (all[k]->data && all[k]->rows > 1 && all[k]->ld != all[k]->cols);
    }
    for (int k = 0; k < 3 && !by_row; k++) {
        all[k]->ld = all[k]->cols *= all[k]->rows;
        all[k]->rows = 1;
    }
    if (!by_row) g.vector = ((uintptr_t)a.data | (uintptr_t)b.data | (uintptr_t)y.data) % 16 == 0;
    g.per_row = (g.y.cols + 7) / 8;
    cudaError_t e = cudaSuccess;
    const int64_t rows = max((int64_t)1, INT32_MAX / g.per_row); // so many at once, for division in 32 bits
    for (; g.first < g.y.rows && e == cudaSuccess; g.first += rows) {
        g.all = min(rows, g.y.rows - g.first) * g.per_row;
        const int64_t blocks = min((g.all + TT_ROW_THREADS - 1) / TT_ROW_THREADS, (int64_t)2112); // twice as many as run at a time on 132 processors
        e = TT_LAUNCH((each_group<OP>), (unsigned)blocks, TT_ROW_THREADS, 0, d->stream, g, op);
    }
    return e;
}

static const tt__mat tt_no_operand = {NULL, TT_F32, 0, 0, 0};

// y = s x. Bytes: x and y once.
struct op_scale {
    float s;
    __device__ void begin() {}
    __device__ bool get(const tt_groups &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        tt_load_8(v, g.a, r, c, n, g.vector);
        TT_UNROLL for (int j = 0; j < 8; j++) v[j] *= s;
        return true;
    }
};

static cudaError_t run_scale(tt__device *d, const tt__launch *l)
{
    const op_scale op = {l->instr->op == TT__OP_SCALE ? l->instr->attr.scale : 1.0f}; // CAST: 1
    return run_groups(d, l->in[0], tt_no_operand, l->out[0], l->add[0], false, op);
}

// y = a + b. Bytes: a, b and y once.
struct op_add {
    __device__ void begin() {}
    __device__ bool get(const tt_groups &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        float b[8];
        tt_load_8(v, g.a, r, c, n, g.vector);
        tt_load_8(b, g.b, r, c, n, g.vector);
        TT_UNROLL for (int j = 0; j < 8; j++) v[j] += b[j];
        return true;
    }
};

static cudaError_t run_add(tt__device *d, const tt__launch *l) { return run_groups(d, l->in[0], l->in[1], l->out[0], l->add[0], false, op_add()); }

// y = a constant, times the run's loss scale if `run` is not NULL. Bytes: y once.
struct op_fill {
    float x;
    const tt__run *run;
    __device__ void begin() { if (run) x *= (float)run->loss_scale; }
    __device__ bool get(const tt_groups &, int64_t, int64_t, int, float (&v)[8]) const
    {
        TT_UNROLL for (int j = 0; j < 8; j++) v[j] = x;
        return true;
    }
};

static cudaError_t run_fill(tt__device *d, const tt__launch *l)
{
    const op_fill op = {l->instr->attr.scale, l->instr->attr.loss_scale ? &l->slot->run : NULL};
    return l->add[0] ? cudaSuccess : run_groups(d, tt_no_operand, tt_no_operand, l->out[0], false, false, op);
}

// ================================================================================================== losses

// ================================================================================================== optimizers

// ================================================================================================== attention

// ================================================================================================== matmuls

// ================================================================================================== table

typedef cudaError_t (*tt_run_fn)(tt__device *d, const tt__launch *l);

static tt_run_fn kernels_of(int op) // NULL: there are none
{
    switch (op) {
    case TT__OP_SCALE: case TT__OP_CAST: return run_scale;
    case TT__OP_ADD: return run_add;
    case TT__OP_FILL: return run_fill;
    default: return NULL;
    }
}

static const char *cuda_refuses(const tt__launch *l)
{
    if (!kernels_of(l->instr->op)) return "the CUDA backend has no kernel for it";
    return NULL;
}

static tt_status cuda_launch(tt__device *d, const tt__launch *l)
{
    cudaError_t e = cudaSetDevice(d->index);
    d->error[0] = 0;
    if (e == cudaSuccess) e = kernels_of(l->instr->op)(d, l);
    if (e != cudaSuccess && d->error[0]) return TT_ERR_DEVICE; // the op has said more
    return tt_check(d, e, "launch");
}

extern "C" const tt__backend tt__cuda_backend = {
    cuda_open, cuda_close, cuda_error, cuda_allocate, cuda_release, cuda_allocate_host, cuda_release_host, cuda_write, cuda_fill,
    cuda_read, cuda_wait, cuda_begin, cuda_launch, cuda_collect, cuda_results, cuda_refuses,
};
