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

// Eight neighbours, elements [i, i + 8) of p, of which `left` are there; i is a multiple of 8 and `wide` says that p is one of 16 bytes.
__device__ __forceinline__ void tt_load8(float (&x)[8], const void *p, tt_dtype dtype, int64_t i, int64_t left, bool wide, float absent = 0)
{
    if (!wide || left < 8) {
        TT_UNROLL for (int k = 0; k < 8; k++) x[k] = k < left ? tt_load_any(p, dtype, i + k) : absent;
    } else if (dtype == TT_F32) {
        const float4 a = ((const float4 *)p)[i / 4], b = ((const float4 *)p)[i / 4 + 1];
        x[0] = a.x; x[1] = a.y; x[2] = a.z; x[3] = a.w; x[4] = b.x; x[5] = b.y; x[6] = b.z; x[7] = b.w;
    } else {
        const uint4 q = ((const uint4 *)p)[i / 8];
        const uint32_t words[4] = {q.x, q.y, q.z, q.w};
        TT_UNROLL for (int k = 0; k < 8; k++) {
            const unsigned short h = (unsigned short)(words[k / 2] >> (k % 2 * 16));
            x[k] = dtype == TT_BF16 ? tt_float(__ushort_as_bfloat16(h)) : tt_float(__ushort_as_half(h));
        }
    }
}

// The same for the bits of 16-bit numbers.
__device__ __forceinline__ void tt_store8_bits(void *p, int64_t i, int64_t left, bool wide, const uint32_t (&h)[8])
{
    if (!wide || left < 8) {
        TT_UNROLL for (int k = 0; k < 8; k++) if (k < left) ((uint16_t *)p)[i + k] = (uint16_t)h[k];
    } else {
        ((uint4 *)p)[i / 8] = make_uint4(h[0] | h[1] << 16, h[2] | h[3] << 16, h[4] | h[5] << 16, h[6] | h[7] << 16);
    }
}

__device__ __forceinline__ void tt_store8(void *p, tt_dtype dtype, int64_t i, int64_t left, bool wide, const float (&x)[8])
{
    uint32_t h[8];
    if (dtype == TT_F32) {
        if (wide && left >= 8) {
            ((float4 *)p)[i / 4] = make_float4(x[0], x[1], x[2], x[3]);
            ((float4 *)p)[i / 4 + 1] = make_float4(x[4], x[5], x[6], x[7]);
        } else {
            TT_UNROLL for (int k = 0; k < 8; k++) if (k < left) ((float *)p)[i + k] = x[k];
        }
        return;
    }
    TT_UNROLL for (int k = 0; k < 8; k++) h[k] = dtype == TT_BF16 ? __bfloat16_as_ushort(tt_round<bf16>(x[k])) : __half_as_ushort(tt_round<f16>(x[k]));
    tt_store8_bits(p, i, left, wide, h);
}

__device__ __forceinline__ void *tt_row(const tt__mat &m, int64_t r) { return (char *)m.data + r * m.ld * (m.dtype == TT_F32 ? 4 : 2); }

// Whether every row of m begins at a multiple of 16 bytes.
static inline bool tt_wide(const tt__mat *m) { return (uintptr_t)m->data % 16 == 0 && (m->rows < 2 || m->ld * (m->dtype == TT_F32 ? 4 : 2) % 16 == 0); }

__device__ __forceinline__ float tt_exp(float x) { return tt_exp2(x * 1.4426950408889634f); }

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

static inline int64_t tt_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline unsigned tt_blocks(int64_t n, int64_t per_block) { return (unsigned)((n + per_block - 1) / per_block); }

// ================================================================================================== rows
// Ops that work row by row or element by element.

// ================================================================================================== losses
// counts: sum of weighted losses, sum of weights, sum of the weights of rows that were predicted right, 0.

enum { TT_LOSS_BLOCKS = 1024 }; // at most; each leaves one partial sum in the resident workspace

struct tt_loss_sums { double loss, weight, right; };

// The sum over a block of THREADS, in every thread, in a fixed order. All threads call it.
template <int THREADS> __device__ __forceinline__ double tt_block_sum(double v)
{
    TT_SHARED(double, part, [THREADS / 32]);
    TT_UNROLL for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    __syncthreads(); // an earlier call may still be read
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    double sum = 0;
    TT_UNROLL for (int i = 0; i < THREADS / 32; i++) sum += part[i];
    return sum;
}

__device__ __forceinline__ float tt_row_weight(const tt__mat &weights, int64_t r)
{
    return weights.data ? tt_load_any(weights.data, weights.dtype, r * weights.ld) : 1.0f;
}

// What a row's gradient is multiplied by: upstream gradient / number of targets.
__device__ __forceinline__ float tt_loss_factor(const tt__run *run, const float *dloss, const float *counts)
{
    double norm = run->accumulate ? run->loss_norm : counts[1];
    return norm > 0 ? (float)(*dloss / norm) : 0.0f;
}

template <int THREADS> __device__ __forceinline__ void tt_store_counts(tt_loss_sums sums, float *counts, float *loss)
{
    sums.loss = tt_block_sum<THREADS>(sums.loss);
    sums.weight = tt_block_sum<THREADS>(sums.weight);
    sums.right = tt_block_sum<THREADS>(sums.right);
    if (threadIdx.x) return;
    counts[0] = (float)sums.loss; counts[1] = (float)sums.weight; counts[2] = (float)sums.right; counts[3] = 0;
    *loss = (float)(sums.loss / sums.weight);
}

template <int THREADS> __device__ __forceinline__ void tt_store_partial(tt_loss_sums sums, tt_loss_sums *partial)
{
    sums.loss = tt_block_sum<THREADS>(sums.loss);
    sums.weight = tt_block_sum<THREADS>(sums.weight);
    sums.right = tt_block_sum<THREADS>(sums.right);
    if (threadIdx.x == 0) partial[blockIdx.x] = sums;
}

__global__ void __launch_bounds__(256) loss_counts(const tt_loss_sums *partial, int n, float *counts, float *loss)
{
    tt_loss_sums sums = {0, 0, 0};
    for (int k = (int)threadIdx.x; k < n; k += 256) {
        sums.loss += partial[k].loss;
        sums.weight += partial[k].weight;
        sums.right += partial[k].right;
    }
    tt_store_counts<256>(sums, counts, loss);
}

// What a row's logits say; the same in every thread that works on it.
struct tt_row_loss { float lse, loss; bool right; };

// Of a row of n logits, by a warp or by a block of THREADS; target -1: only lse is wanted. The sum of exponentials is kept relative to the
// greatest logit so far (Milakov, Gimelshein: "Online normalizer calculation for softmax", 2018), so that one pass is enough. `cache`, in
// shared memory and a multiple of 8 long, gets the logits; each thread reads what it wrote itself.
template <int THREADS> __device__ __forceinline__ tt_row_loss tt_row_cross_entropy(const void *x, tt_dtype dtype, int64_t n, bool wide, int64_t target,
                                                                                   float smoothing, float *cache)
{
    const int thread = (int)threadIdx.x % THREADS;
    const float own = target >= 0 ? tt_load_any(x, dtype, target) : 0;
    float m = -INFINITY, s = 0, sx = 0;
    bool right = own == own; // the first of those that are greatest, as argmax
    for (int64_t c = 8 * thread; c < n; c += 8 * THREADS) {
        float v[8], top, some = 0;
        tt_load8(v, x, dtype, c, n - c, wide, -INFINITY);
        if (cache) tt_store8(cache, TT_F32, c, 8, true, v);
        top = fmaxf(fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])), fmaxf(fmaxf(v[4], v[5]), fmaxf(v[6], v[7])));
        const float to = fmaxf(m, top), base = to == -INFINITY ? 0 : to;
        TT_UNROLL for (int k = 0; k < 8; k++) some += tt_exp(v[k] - base);
        s = s * tt_exp(m - base) + some;
        m = to;
        if (smoothing > 0) TT_UNROLL for (int k = 0; k < 8; k++) sx += c + k < n ? v[k] : 0;
        if (target >= c + 8) right &= !(top >= own);
        else if (target < c) right &= !(top > own);
        else TT_UNROLL for (int k = 0; k < 8; k++) right &= c + k < target ? !(v[k] >= own) : !(v[k] > own);
    }
    float warp_top = tt_warp_max(m), base = warp_top == -INFINITY ? 0 : warp_top;
    s = tt_warp_sum(s * tt_exp(m - base));
    sx = tt_warp_sum(sx);
    right = __all_sync(0xffffffffu, right);
    m = warp_top;
    if (THREADS > 32) {
        TT_SHARED(float4, part, [(THREADS + 31) / 32]);
        __syncthreads(); // those of the last row may still be read
        if (thread % 32 == 0) part[thread / 32] = make_float4(m, s, sx, right ? 1.0f : 0.0f);
        __syncthreads();
        for (int k = 0; k < THREADS / 32; k++) m = fmaxf(m, part[k].x);
        base = m == -INFINITY ? 0 : m;
        s = sx = 0;
        right = true;
        for (int k = 0; k < THREADS / 32; k++) {
            s += part[k].y * tt_exp(part[k].x - base);
            sx += part[k].z;
            right &= part[k].w != 0;
        }
    }
    const float log_s = logf(s);
    return {m + log_s, m - own + log_s + (smoothing > 0 ? smoothing * (own - sx / (float)n) : 0), right};
}

// Rows of logits x (rows, n), each read once, by groups of GROUP threads: a warp for few classes, a block for many.
template <int GROUP> __global__ void __launch_bounds__(256) cross_entropy(tt__mat x, const int32_t *targets, tt__mat weights, tt__mat lse, int ignore, float smoothing,
                                                                          bool wide, tt_loss_sums *partial)
{
    const int64_t groups = 256 / GROUP;
    tt_loss_sums sums = {0, 0, 0};
    for (int64_t r = blockIdx.x * groups + threadIdx.x / GROUP; r < x.rows; r += gridDim.x * groups) {
        const int32_t target = targets[r];
        const tt_row_loss row = tt_row_cross_entropy<GROUP>(tt_row(x, r), x.dtype, x.cols, wide, target == ignore ? -1 : target, smoothing, NULL);
        if (threadIdx.x % GROUP) continue;
        ((float *)lse.data)[r * lse.ld] = row.lse;
        if (target == ignore) continue;
        const double w = tt_row_weight(weights, r);
        sums.loss += w * row.loss;
        sums.weight += w;
        sums.right += row.right ? w : 0;
    }
    tt_store_partial<256>(sums, partial);
}

static cudaError_t run_CROSS_ENTROPY(tt__device *d, const tt__launch *l)
{
    const tt__mat *x = &l->in[0];
    const tt__attr *a = &l->instr->attr;
    const bool many = x->cols > 2048;
    const unsigned blocks = (unsigned)tt_min(tt_blocks(x->rows, many ? 1 : 8), TT_LOSS_BLOCKS);
    tt_loss_sums *partial = (tt_loss_sums *)l->resident;
    const int32_t *targets = (const int32_t *)l->in[1].data;
    cudaError_t e = many ? TT_LAUNCH((cross_entropy<256>), blocks, 256, 0, d->stream, *x, targets, l->in[2], l->out[1], a->ignore_index, a->smoothing, tt_wide(x), partial)
                         : TT_LAUNCH((cross_entropy<32>), blocks, 256, 0, d->stream, *x, targets, l->in[2], l->out[1], a->ignore_index, a->smoothing, tt_wide(x), partial);
    if (e != cudaSuccess) return e;
    return TT_LAUNCH(loss_counts, 1, 256, 0, d->stream, partial, (int)blocks, (float *)l->out[2].data, (float *)l->out[0].data);
}

// Gradient of eight logits from column c on: (softmax - target) w, where the target has 1 - smoothing more than the smoothing / n of all.
__device__ __forceinline__ void tt_cross_entropy_gradient(float (&x)[8], int64_t c, int64_t n, int64_t target, float lse, float smoothing, float w)
{
    TT_UNROLL for (int k = 0; k < 8; k++) {
        x[k] = (tt_exp(x[k] - lse) - smoothing / (float)n) * w;
        if (c + k == target) x[k] -= (1 - smoothing) * w;
    }
}

// dx (rows, n) [+]= ...: x and dx cross memory once. A thread does eight elements of a row at a time.
__global__ void __launch_bounds__(256) cross_entropy_backward(const float *dloss, tt__mat x, const int32_t *targets, tt__mat weights, tt__mat lse, const float *counts,
                                                              tt__mat dx, bool add, int ignore, float smoothing, bool wide, const tt__run *run)
{
    const int64_t n = x.cols, per_row = (n + 7) / 8, all = x.rows * per_row;
    const float factor = tt_loss_factor(run, dloss, counts);
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < all; i += gridDim.x * (int64_t)256) {
        const int64_t r = i / per_row, c = (i - r * per_row) * 8;
        const int32_t target = targets[r];
        float v[8] = {0}, old[8];
        if (target != ignore) {
            tt_load8(v, tt_row(x, r), x.dtype, c, n - c, wide);
            tt_cross_entropy_gradient(v, c, n, target, ((const float *)lse.data)[r * lse.ld], smoothing, factor * tt_row_weight(weights, r));
        }
        if (add) {
            tt_load8(old, tt_row(dx, r), dx.dtype, c, n - c, wide);
            TT_UNROLL for (int k = 0; k < 8; k++) v[k] += old[k];
        }
        tt_store8(tt_row(dx, r), dx.dtype, c, n - c, wide, v);
    }
}

enum { TT_ELEMENT_BLOCKS = 4096 }; // of kernels that go through elements: enough to fill any GPU a few times

static cudaError_t run_CROSS_ENTROPY_BACKWARD(tt__device *d, const tt__launch *l)
{
    const tt__mat *x = &l->in[1], *dx = &l->out[0];
    const tt__attr *a = &l->instr->attr;
    const unsigned blocks = (unsigned)tt_min(tt_blocks(x->rows * ((x->cols + 7) / 8), 256), TT_ELEMENT_BLOCKS);
    return TT_LAUNCH(cross_entropy_backward, blocks, 256, 0, d->stream, (const float *)l->in[0].data, *x, (const int32_t *)l->in[2].data, l->in[3], l->in[4],
                     (const float *)l->in[5].data, *dx, l->add[0], a->ignore_index, a->smoothing, tt_wide(x) && tt_wide(dx), &l->slot->run);
}

// Sum over x, y (rows, n) of w (x - y)^2 / n; x and y cross memory once.
__global__ void __launch_bounds__(256) squared_error(tt__mat x, tt__mat y, tt__mat weights, bool wide, tt_loss_sums *partial)
{
    const int64_t n = x.cols, per_row = (n + 7) / 8, all = x.rows * per_row;
    tt_loss_sums sums = {0, 0, 0};
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < all; i += gridDim.x * (int64_t)256) {
        const int64_t r = i / per_row, c = (i - r * per_row) * 8;
        const double w = tt_row_weight(weights, r);
        float a[8], b[8], s = 0;
        tt_load8(a, tt_row(x, r), x.dtype, c, n - c, wide);
        tt_load8(b, tt_row(y, r), y.dtype, c, n - c, wide);
        TT_UNROLL for (int k = 0; k < 8; k++) s += (a[k] - b[k]) * (a[k] - b[k]);
        sums.loss += w * s;
        if (c == 0) sums.weight += w;
    }
    sums.loss /= (double)n;
    tt_store_partial<256>(sums, partial);
}

static cudaError_t run_MEAN_SQUARED_ERROR(tt__device *d, const tt__launch *l)
{
    const tt__mat *x = &l->in[0], *y = &l->in[1];
    const unsigned blocks = (unsigned)tt_min(tt_blocks(x->rows * ((x->cols + 7) / 8), 256), TT_LOSS_BLOCKS);
    tt_loss_sums *partial = (tt_loss_sums *)l->resident;
    cudaError_t e = TT_LAUNCH(squared_error, blocks, 256, 0, d->stream, *x, *y, l->in[2], tt_wide(x) && tt_wide(y), partial);
    if (e != cudaSuccess) return e;
    return TT_LAUNCH(loss_counts, 1, 256, 0, d->stream, partial, (int)blocks, (float *)l->out[2].data, (float *)l->out[0].data);
}

// dx [+]= 2 w (x - y) / n; x, y and dx cross memory once.
__global__ void __launch_bounds__(256) squared_error_backward(const float *dloss, tt__mat x, tt__mat y, tt__mat weights, const float *counts, tt__mat dx, bool add,
                                                              bool wide, const tt__run *run)
{
    const int64_t n = x.cols, per_row = (n + 7) / 8, all = x.rows * per_row;
    const float factor = tt_loss_factor(run, dloss, counts);
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < all; i += gridDim.x * (int64_t)256) {
        const int64_t r = i / per_row, c = (i - r * per_row) * 8;
        const float w = 2 * factor * tt_row_weight(weights, r) / (float)n;
        float a[8], b[8], old[8] = {0};
        tt_load8(a, tt_row(x, r), x.dtype, c, n - c, wide);
        tt_load8(b, tt_row(y, r), y.dtype, c, n - c, wide);
        if (add) tt_load8(old, tt_row(dx, r), dx.dtype, c, n - c, wide);
        TT_UNROLL for (int k = 0; k < 8; k++) a[k] = (a[k] - b[k]) * w + old[k];
        tt_store8(tt_row(dx, r), dx.dtype, c, n - c, wide, a);
    }
}

static cudaError_t run_MEAN_SQUARED_ERROR_BACKWARD(tt__device *d, const tt__launch *l)
{
    const tt__mat *x = &l->in[1], *y = &l->in[2], *dx = &l->out[0];
    const unsigned blocks = (unsigned)tt_min(tt_blocks(x->rows * ((x->cols + 7) / 8), 256), TT_ELEMENT_BLOCKS);
    return TT_LAUNCH(squared_error_backward, blocks, 256, 0, d->stream, (const float *)l->in[0].data, *x, *y, l->in[3], (const float *)l->in[4].data, *dx, l->add[0],
                     tt_wide(x) && tt_wide(y) && tt_wide(dx), &l->slot->run);
}

// ================================================================================================== optimizers

// ================================================================================================== attention

// ================================================================================================== matmuls

// ================================================================================================== table

typedef cudaError_t (*tt_run_fn)(tt__device *d, const tt__launch *l);

static tt_run_fn kernels_of(int op) // NULL: there are none
{
    switch (op) {
    case TT__OP_CROSS_ENTROPY: return run_CROSS_ENTROPY;
    case TT__OP_MEAN_SQUARED_ERROR: return run_MEAN_SQUARED_ERROR;
    case TT__OP_CROSS_ENTROPY_BACKWARD: return run_CROSS_ENTROPY_BACKWARD;
    case TT__OP_MEAN_SQUARED_ERROR_BACKWARD: return run_MEAN_SQUARED_ERROR_BACKWARD;
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
