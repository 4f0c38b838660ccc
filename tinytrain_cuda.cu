// tinytrain_cuda.cu - tinytrain's backend for NVIDIA GPUs.
//
//     nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -c tinytrain_cuda.cu
//     cc -O2 -DTINYTRAIN_CUDA program.c tinytrain_cuda.o -lcublasLt -lcudart -lstdc++ -lm -lpthread
//
// A program that is compiled with device = "cuda" runs here. Tape, passes and plan are those of the CPU; only
// the kernels differ.
//
// Folders, in this order: cuda/ (portability, devices, numbers, sums and elementwise work on groups of
// columns), then ops/ (kernels of elementwise ops, rows, embedding, losses, norms, optimizers, collectives,
// attention, matrix products and fp8, and the table of kernels).
//
// All kernels obey these rules. Sums are computed in f32 or f64, in a fixed order and without atomics on
// floats, so that every run has the same bits. Kernels read everything that changes from step to step (seed,
// step, learning rate, loss scale) from values on the device, never from arguments, so that a captured step
// can be replayed. No block waits for another block. Random numbers are those of the CPU backend.
/* ==== src/cuda/system.cuh */
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cublasLt.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef TT__PORTABILITY_ONLY // the emulator's tests include only this part of the file
#define TINYTRAIN_BACKEND
#include "tinytrain.h"
#endif

/* ==== src/cuda/portability.cuh */
// =============================================================================================== portability
// All inline assembly is in this file. No other file knows of the emulator (tests/cuda_emu), whose header
// defines TT_EMULATE and functions of the same names. PTX ISA, "Warp-level matrix instructions", describes
// fragments and their layouts; below, g = lane/4 and t = lane%4.
#ifndef TT_EMULATE
#define TT__UNROLL _Pragma("unroll")
#define TT__ROLLED _Pragma("unroll 1") // the loop is never unrolled, so that its code stays short
// Declares a shared array, TT__SHARED(float, tile, [32][33]), or a shared scalar, TT__SHARED(int, count, ).
#define TT__SHARED(T, name, dims) __shared__ __align__(128) T name dims
// Declares `name`, the launch's dynamic shared memory, aligned to 128 bytes.
#define TT__DYN_SHARED(T, name)                                    \
    extern __shared__ __align__(128) unsigned char tt__dyn_smem[]; \
    T *name = (T *)tt__dyn_smem
// Launches a kernel: TT__LAUNCH(kernel, grid, block, shared bytes, stream, arguments...). The result is a
// cudaError_t. A kernel that is a template needs parentheses: (kernel<64, 2>). The stream may be a
// tt__stream.
#define TT__LAUNCH(kernel, grid, block, shared, stream, ...) \
    tt__launch_kernel(kernel, grid, block, shared, tt__stream_of(stream), __VA_ARGS__)

// A stream. chains: a kernel may be brought onto the device while the stream's previous kernel ends, which
// removes the gap between the two (CUDA C++ Programming Guide, "Programmatic Dependent Launch"). Kernels wait
// for the previous kernels in tt__begin_kernel.
struct tt__stream { cudaStream_t it; bool chains; operator cudaStream_t() const { return it; } };
inline tt__stream tt__stream_of(const tt__stream &s) { return s; }
inline tt__stream tt__stream_of(cudaStream_t s) { return {s, false}; }
template <class... P, class... A>
inline cudaError_t tt__launch_kernel(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                                     const tt__stream &s, A &&...arguments)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute chain = {};
    chain.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    chain.val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = shared;
    c.stream = s.it;
    c.attrs = &chain;
    c.numAttrs = s.chains;
    return cudaLaunchKernelEx(&c, kernel, static_cast<A &&>(arguments)...);
}

// Waits until the stream's previous kernels are done, however this kernel was launched, and lets the next
// kernel come onto the device. Each kernel calls this function first.
__device__ __forceinline__ void tt__begin_kernel()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Returns x and hides its value from the compiler. Without this function the compiler would compute values
// that depend on x ahead of a loop that uses them, and the loop has no registers to hold the values.
__device__ __forceinline__ int tt__opaque(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ uint32_t tt__shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

// Computes d (16 x 8) += a (16 x 16, row-major) * b (16 x 8, column-major). T is __nv_bfloat16 or __half. A
// register of a holds two neighbours in a row, and a register of b two neighbours in a column, the first in
// its lower half. With g = lane/4 and t = lane%4, the first or only numbers in a thread's registers have
// these places (row,column). a: (g,2t), (g+8,2t), (g,2t+8), (g+8,2t+8). b: (2t,g), (2t+8,g). d: (g,2t),
// (g,2t+1), (g+8,2t), (g+8,2t+1).
template <class T>
__device__ void tt__mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void tt__mma_16816<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                             const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]),
                     "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void tt__mma_16816<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                      const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]),
                     "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Computes d (16 x 8) += a (16 x 8) * b (8 x 8) in TF32, from numbers that tt__tf32 has rounded. With g =
// lane/4 and t = lane%4, the numbers in a thread's registers have these places (row,column). a: (g,t),
// (g+8,t), (g,t+4), (g+8,t+4). b: (t,g), (t+4,g). d: as in tt__mma_16816.
__device__ __forceinline__ void tt__mma_1688_tf32(float (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]),
                     "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ uint32_t tt__tf32(float x)
{
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float tt__exp2(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// Computes the lower and the upper half of a * b. A 64-bit product in C++ would cost one more addition.
__device__ __forceinline__ void tt__multiply(uint32_t a, uint32_t b, uint32_t &low, uint32_t &high)
{
    asm("{ .reg .u64 p; mul.wide.u32 p, %2, %3; mov.b64 {%0, %1}, p; }"
        : "=r"(low), "=r"(high) : "r"(a), "r"(b));
}
// Makes the compiler forget the value of x, so that it recomputes all that depends on x.
__device__ __forceinline__ void tt__forget(uint32_t &x) { asm volatile("" : "+r"(x)); }
// Returns 1 / x by one instruction, within 1 ulp; subnormal numbers count as 0. tt__root returns the square
// root in the same way.
__device__ __forceinline__ float tt__reciprocal(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float tt__root(float x)
{
    float r;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// Loads 1, 2 or 4 matrices of 8 x 8 16-bit numbers from shared memory. Lane 8j+i passes the address of row i
// (16 bytes) of matrix j. With g = lane/4 and t = lane%4, a thread gets columns 2t and 2t+1 of row g of each
// matrix or, by functions whose name ends in _trans, of the matrix's transpose.
__device__ __forceinline__ void tt__ldmatrix_x1(uint32_t &r, const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r) : "r"(tt__shared_address(row)) : "memory");
}
__device__ __forceinline__ void tt__ldmatrix_x2(uint32_t (&r)[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(tt__shared_address(row)) : "memory");
}
__device__ __forceinline__ void tt__ldmatrix_x4(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(tt__shared_address(row)) : "memory");
}
__device__ __forceinline__ void tt__ldmatrix_x1_trans(uint32_t &r, const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r) : "r"(tt__shared_address(row)) : "memory");
}
__device__ __forceinline__ void tt__ldmatrix_x2_trans(uint32_t (&r)[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(tt__shared_address(row)) : "memory");
}
__device__ __forceinline__ void tt__ldmatrix_x4_trans(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(tt__shared_address(row)) : "memory");
}
// Copies device memory to shared memory asynchronously; the bytes from `bytes` on become zero.
// tt__cp_async_commit ends a group of copies, and tt__cp_async_wait<N> waits until at most the thread's N
// latest groups are in flight. Other threads may read the copies after a barrier that follows the wait.
__device__ __forceinline__ void tt__cp_async_4(void *to, const void *from, int bytes = 4)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 ::"r"(tt__shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tt__cp_async_8(void *to, const void *from, int bytes = 8)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 ::"r"(tt__shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tt__cp_async_16(void *to, const void *from, int bytes = 16)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(tt__shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tt__cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void tt__cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Products by a warpgroup: four successive warps, the first of which has a number that is a multiple of 4.
// The products run asynchronously. Warp i has rows 16 i to 16 i + 15 of d (64 x 64), in tiles of 16 x 8 as in
// tt__mma_16816. Only code for sm_90a has the instructions (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions").
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define TT__HAS_WGMMA true
#define TT__WGMMA(...) asm volatile(__VA_ARGS__)
#else
#define TT__HAS_WGMMA false
#define TT__WGMMA(...) __trap()
#endif
// Upper half of a matrix descriptor: groups of 8 rows are 1,024 bytes apart, with 128-byte swizzling.
#define TT__WGMMA_HIGH 0x40000040
#define TT__WGMMA_ROW(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define TT__WGMMA_SUMS(d, n) TT__WGMMA_ROW(d, n), TT__WGMMA_ROW(d, n + 1), TT__WGMMA_ROW(d, n + 2), \
    TT__WGMMA_ROW(d, n + 3), TT__WGMMA_ROW(d, n + 4), TT__WGMMA_ROW(d, n + 5), TT__WGMMA_ROW(d, n + 6), \
    TT__WGMMA_ROW(d, n + 7)
#define TT__WGMMA_LIST                                                                            \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"       \
    "%24,%25,%26,%27,%28,%29,%30,%31"
#define TT__WGMMA_LIST_128                                                                        \
    TT__WGMMA_LIST ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50," \
    "%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TT__WGMMA_SUMS_64(d) TT__WGMMA_SUMS(d, 0)
#define TT__WGMMA_SUMS_128(d) TT__WGMMA_SUMS(d, 0), TT__WGMMA_SUMS(d, 8)
// Defines tt__wgmma_rows, which computes d = a b^T, or d += a b^T if `add`. a has 64 rows and b has 8 * TILES
// rows, both of 16 columns; tt__wgmma_matrix makes the arguments a and b.
#define TT__WGMMA_ROWS(T, name, TILES, n, list, sums, ra, rb, radd, rhigh)                        \
    template <>                                                                                   \
    __device__ __forceinline__ void tt__wgmma_rows<T>(float (&d)[TILES][4], uint32_t a, uint32_t b, \
                                                      bool add)                                   \
    {                                                                                             \
        TT__WGMMA("{.reg .pred p; .reg .b64 x, y; setp.ne.b32 p, " radd ", 0; mov.b64 x, {" ra ", " \
                  rhigh "}; mov.b64 y, {" rb ", " rhigh "}; wgmma.mma_async.sync.aligned.m64" n      \
                  "k16.f32." name "." name " {" list "}, x, y, p, 1, 1, 0, 0;}"                    \
                  : sums(d) : "r"(a), "r"(b), "r"((int)add), "n"(TT__WGMMA_HIGH) : "memory");      \
    }
#define TT__WGMMA_ROWS_OF(TILES, n, list, sums, ra, rb, radd, rhigh)                              \
    template <class T>                                                                            \
    __device__ void tt__wgmma_rows(float (&d)[TILES][4], uint32_t a, uint32_t b, bool add);       \
    TT__WGMMA_ROWS(__nv_bfloat16, "bf16", TILES, n, list, sums, ra, rb, radd, rhigh)              \
    TT__WGMMA_ROWS(__half, "f16", TILES, n, list, sums, ra, rb, radd, rhigh)
TT__WGMMA_ROWS_OF(8, "n64", TT__WGMMA_LIST, TT__WGMMA_SUMS_64, "%32", "%33", "%34", "%35")
TT__WGMMA_ROWS_OF(16, "n128", TT__WGMMA_LIST_128, TT__WGMMA_SUMS_128, "%64", "%65", "%66", "%67")
// Computes d += a * b. a (64 x 16) is in registers, in each warp as in tt__mma_16816; tt__wgmma_matrix makes
// the argument b (16 x 64).
template <class T>
__device__ void tt__wgmma_add(float (*d)[4], const uint32_t (&a)[4], uint32_t b);
#define TT__WGMMA_ADD(T, name)                                                                    \
    template <>                                                                                   \
    __device__ __forceinline__ void tt__wgmma_add<T>(float (*d)[4], const uint32_t (&a)[4], uint32_t b) \
    {                                                                                             \
        TT__WGMMA("{.reg .b64 y; mov.b64 y, {%36, %37}; wgmma.mma_async.sync.aligned.m64n64k16.f32." \
                  name "." name " {" TT__WGMMA_LIST "}, {%32,%33,%34,%35}, y, 1, 1, 1, 1;}"        \
                  : TT__WGMMA_SUMS(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b),     \
                    "n"(TT__WGMMA_HIGH) : "memory");                                              \
    }
TT__WGMMA_ADD(__nv_bfloat16, "bf16")
TT__WGMMA_ADD(__half, "f16")
// Computes d = a^T b, or d += a^T b if `add`. tt__wgmma_matrix makes the arguments a and b (16 x 64 each).
template <class T>
__device__ void tt__wgmma_across(float (&d)[8][4], uint32_t a, uint32_t b, bool add);
#define TT__WGMMA_ACROSS(T, name)                                                                 \
    template <>                                                                                   \
    __device__ __forceinline__ void tt__wgmma_across<T>(float (&d)[8][4], uint32_t a, uint32_t b, bool add) \
    {                                                                                             \
        TT__WGMMA("{.reg .pred p; .reg .b64 x, y; setp.ne.b32 p, %34, 0; mov.b64 x, {%32, %35}; "  \
                  "mov.b64 y, {%33, %35}; wgmma.mma_async.sync.aligned.m64n64k16.f32."             \
                  name "." name " {" TT__WGMMA_LIST "}, x, y, p, 1, 1, 1, 1;}"                     \
                  : TT__WGMMA_SUMS(d, 0)                                                          \
                  : "r"(a), "r"(b), "r"((int)add), "n"(TT__WGMMA_HIGH) : "memory");               \
    }
TT__WGMMA_ACROSS(__nv_bfloat16, "bf16")
TT__WGMMA_ACROSS(__half, "f16")
// Call tt__wgmma_fence before products whose registers other instructions have written, and tt__wgmma_commit
// after the last product of a group.
__device__ __forceinline__ void tt__wgmma_fence() { TT__WGMMA("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void tt__wgmma_commit()
{
    TT__WGMMA("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the N last committed groups of products are in flight. The sums of the other groups may
// be read after tt__wgmma_done, which must follow.
template <int N> __device__ __forceinline__ void tt__wgmma_wait()
{
    TT__WGMMA("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int TILES> __device__ __forceinline__ void tt__wgmma_done(float (&d)[TILES][4])
{
    TT__UNROLL for (int n = 0; n < TILES; n++) asm volatile("" : TT__WGMMA_ROW(d, n) :: "memory");
}
// Makes the compiler compute the registers a, which products read, before the products and not between them.
// Must be called before tt__wgmma_fence.
template <int N> __device__ __forceinline__ void tt__wgmma_ready(uint32_t (&a)[N][4])
{
    TT__UNROLL for (int k = 0; k < N; k++)
        asm volatile("" : "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3]) :: "memory");
}
// Makes the thread's writes to shared memory visible to products of warpgroups. Must be called between the
// writes and the barrier before the products.
__device__ __forceinline__ void tt__wgmma_publish()
{
    TT__WGMMA("fence.proxy.async.shared::cta;" ::: "memory");
}

// Initialises a barrier in shared memory (PTX ISA, "mbarrier"). One thread calls this function before a
// __syncthreads. A phase of the barrier ends after `count` arrivals; phases 0, 1, 2 ... have the parities
// 0, 1, 0 ...
__device__ __forceinline__ void tt__phases_init(uint64_t *barrier, int count)
{
    TT__WGMMA("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(tt__shared_address(barrier)), "r"(count)
              : "memory");
}
// Arrives at the barrier. The thread's reads and writes so far are done before the phase ends.
__device__ __forceinline__ void tt__phases_arrive(uint64_t *barrier)
{
    TT__WGMMA("{.reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0];}" :: "r"(tt__shared_address(barrier))
              : "memory");
}
// Arrives at the barrier when all copies that the thread has begun by tt__cp_async_... are done.
__device__ __forceinline__ void tt__phases_arrive_with_copies(uint64_t *barrier)
{
    TT__WGMMA("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(tt__shared_address(barrier))
              : "memory");
}
// Waits for the end of the phase with this parity, which is the current phase or the phase before it.
__device__ __forceinline__ void tt__phases_wait(uint64_t *barrier, int parity)
{
    uint32_t done = 1;
    do {
        TT__WGMMA("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                  "selp.u32 %0, 1, 0, p;}"
                  : "+r"(done) : "r"(tt__shared_address(barrier)), "r"(parity) : "memory");
    } while (!done);
}
// Releases registers of a warpgroup until each thread has N; tt__more_registers takes registers until each
// thread has N.
template <int N> __device__ __forceinline__ void tt__fewer_registers()
{
    TT__WGMMA("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void tt__more_registers()
{
    TT__WGMMA("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
// Returns four bytes. Hexadecimal digit k of `selector` chooses byte k of the result, both counted from the
// lowest. A digit s below 8 chooses byte s of the eight bytes of `low` and `high`. A digit s above 7 chooses
// the highest bit of byte `s - 8`, repeated in all 8 bits.
__device__ __forceinline__ uint32_t tt__bytes(uint32_t low, uint32_t high, uint32_t selector)
{
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
    return r;
}
#endif

// Returns the lower half of the matrix descriptor of rows in shared memory that a warpgroup's product reads
// (PTX ISA, "Matrix Descriptor Format", "Canonical Layouts"). A row of 128 bytes has 8 chunks of 16 bytes.
// Chunk `c` of row `r` is stored at the place of chunk `c ^ (r % 8)`. Groups of eight rows follow one
// another, the first at a multiple of 1,024 bytes; the leading dimension is not read. p: row 0 of a group of
// 8, at a multiple of 16 columns. The descriptor for an address n bytes after p is larger by `n / 16`.
__device__ __forceinline__ uint32_t tt__wgmma_matrix(const void *p)
{
    return (tt__shared_address(p) & 0x3ffff) >> 4 | 1 << 16;
}

#ifndef TT__PORTABILITY_ONLY

/* ==== src/cuda/handle.cuh */
// ================================================================================================== device
// The state of an open CUDA device.

namespace { // holds all of tinytrain_cuda.cu except struct tt__device and the table of functions at its end

struct product_choice;
struct tuned_product;
struct product_trial;
struct collected_products;
struct group_arguments;

} // namespace

struct tt__device {
    int index;
    tt__stream stream;      // the compute stream; calls that are not launches use it, too
    cudaStream_t beside[TT__STREAMS]; // the other streams, by number; made at the first use
    cublasLtHandle_t lt;
    cudaDeviceProp properties;
    product_choice *choices; // hash table of TT__PRODUCT_CHOICES entries: cuBLASLt's choice for each product
    int choice_count;
    tuned_product *tuned;    // array of tuned_count products that were timed here or read by cuda_learn
    int tuned_count;
    product_trial *trial;    // trial of the product that is being timed; NULL: no product is being timed
    collected_products *collected; // list to which matmul adds products; NULL: matmul computes products
    group_arguments *arguments; // arguments of tensors that share a launch, see ops/optimizers/cuda.cuh
    bool waits;             // environment TINYTRAIN_CUDA_SYNC=1: wait after each op and record no graphs
    bool wgmma;             // attention uses warpgroups; never with environment TINYTRAIN_WGMMA=0
    bool lost;              // an error has ended all work on the device; `error` no longer changes
    char error[512];
    char peer[704];         // the sentence that cuda_peer returns
};

/* ==== src/cuda/device.cuh */
// ---------------------------------------------------------------------------------------------------- device
// The functions of tt__backend except launches: open and close, memory, copies, events, errors.

namespace {

// --------------------------------------------------------------------------------------- devices and streams

enum { TT__PRODUCT_CHOICES = 4096 };

TT_PRINTF(3, 4)
tt_status fail(tt__device *d, tt_status status, const char *format, ...)
{
    va_list args;
    if (d->lost) return TT_ERR_DEVICE;
    va_start(args, format);
    vsnprintf(d->error, sizeof d->error, format, args);
    va_end(args);
    return status;
}

// Returns whether every later call in this process returns the error e, too (CUDA Runtime API, "Data types
// used by CUDA Runtime": "the process must be terminated and relaunched").
bool ends_all(cudaError_t e)
{
    switch (e) {
    case cudaErrorIllegalAddress: case cudaErrorLaunchTimeout: case cudaErrorAssert:
    case cudaErrorHardwareStackError: case cudaErrorIllegalInstruction: case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace: case cudaErrorInvalidPc: case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable: return true;
    default: return false;
    }
}

// Returns TT_OK if e is cudaSuccess; else fails with TT_ERR_DEVICE or TT_ERR_MEMORY. `what` names the call.
tt_status check(tt__device *d, cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return TT_OK;
    cudaGetLastError(); // clears the error, which the next call would return
    const bool lost = ends_all(e);
    const char *advice = !lost ? "" : d->waits ? "; restart the process, in which CUDA can do nothing more"
        : "; restart the process, in which CUDA can do nothing more; with TINYTRAIN_CUDA_SYNC=1 in the "
          "environment the error names the op that failed";
    tt_status status = fail(d, e == cudaErrorMemoryAllocation ? TT_ERR_MEMORY : TT_ERR_DEVICE,
                            "%s: %s (%s)%s", what, cudaGetErrorString(e), cudaGetErrorName(e), advice);
    d->lost = d->lost || lost;
    return status;
}

// Makes d the thread's current device. Returns false if that fails or if d is lost.
bool use(tt__device *d) { return !d->lost && check(d, cudaSetDevice(d->index), "cudaSetDevice") == TT_OK; }

// Waits for all streams of d, which must be the thread's current device, and returns the first error.
cudaError_t drain(tt__device *d)
{
    cudaError_t first = cudaStreamSynchronize(d->stream);
    for (cudaStream_t stream : d->beside) {
        const cudaError_t e = stream ? cudaStreamSynchronize(stream) : cudaSuccess;
        if (first == cudaSuccess) first = e;
    }
    return first;
}

// Returns stream `number` of the device. The first call for a number makes the stream. Returns NULL if the
// stream cannot be made.
cudaStream_t stream_of(tt__device *d, int number)
{
    if (number == TT__COMPUTE_STREAM) return d->stream;
    cudaStream_t *stream = &d->beside[number];
    if (*stream) return *stream;
    const cudaError_t e = cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
    return check(d, e, "cudaStreamCreate") == TT_OK ? *stream : NULL;
}

void cuda_close(tt__device *d)
{
    if (!d) return;
    cudaSetDevice(d->index);
    if (d->stream) drain(d);
    if (d->lt) cublasLtDestroy(d->lt);
    for (cudaStream_t stream : d->beside) if (stream) cudaStreamDestroy(stream);
    if (d->stream) cudaStreamDestroy(d->stream);
    free(d->choices);
    free(d->tuned);
    free(d->arguments);
    free(d);
}

// Expands to the major and minor number of a CUDA version, which is `1000 * major + 10 * minor`.
#define TT__VERSION_OF(version) (version) / 1000, (version) % 1000 / 10

#ifdef __CUDA_ARCH_LIST__
const int built_archs[] = {__CUDA_ARCH_LIST__}; // nvcc's targets, as 100 * major + 10 * minor
#else
const int built_archs[] = {0};
#endif

// A text of `length` bytes that is being written to `to`. Bytes beyond `capacity` are cut off.
struct text_buffer { char *to; size_t capacity, length; };

TT_PRINTF(2, 3)
void print(text_buffer *text, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = text->length < text->capacity ? vsnprintf(text->to + text->length, text->capacity - text->length,
                                                      format, args) : 0;
    va_end(args);
    if (n > 0) text->length += (size_t)n;
}

void print_archs(text_buffer *text)
{
    for (size_t k = 0; k < sizeof built_archs / sizeof *built_archs; k++)
        print(text, "%s%d.%d", k ? ", " : "", built_archs[k] / 100, built_archs[k] / 10 % 10);
}

// Writes to `to` the reason why no device was found, from the error e of cudaGetDeviceCount.
void explain(cudaError_t e, char *to, size_t capacity)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (e == cudaErrorInsufficientDriver && !driver)
        snprintf(to, capacity, "there is no NVIDIA driver: install one for CUDA %d.%d or later",
                 TT__VERSION_OF(runtime));
    else if (e == cudaErrorInsufficientDriver)
        snprintf(to, capacity,
                 "the driver is for CUDA %d.%d, which is too old for this build with CUDA %d.%d: "
                 "update the driver, or build with an older toolkit",
                 TT__VERSION_OF(driver), TT__VERSION_OF(runtime));
    else if (e == cudaErrorNoDevice)
        snprintf(to, capacity, "the driver finds no GPU%s%s%s", visible ? ": CUDA_VISIBLE_DEVICES, '" : "",
                 visible ? visible : "", visible ? "', selects none" : ": check that nvidia-smi lists one");
    else
        snprintf(to, capacity, "%s (%s)", cudaGetErrorString(e), cudaGetErrorName(e));
}

__global__ void add_counts(const float *counts, double *totals, bool add, bool by_total);

// Fails if there is no machine code of the kernels for the device and its driver cannot make any from PTX.
tt_status check_kernels(tt__device *d)
{
    const int major = d->properties.major, minor = d->properties.minor;
    cudaFuncAttributes attributes;
    char archs[128] = "";
    text_buffer text = {archs, sizeof archs, 0};
    if (major < 8)
        return fail(d, TT_ERR_DEVICE, "%s has compute capability %d.%d, but 8.0 or more is needed: choose "
                    "another GPU with CUDA_VISIBLE_DEVICES", d->properties.name, major, minor);
    cudaError_t e = cudaFuncGetAttributes(&attributes, add_counts);
    if (e != cudaErrorNoKernelImageForDevice && e != cudaErrorInvalidDeviceFunction)
        return check(d, e, "kernels");
    cudaGetLastError();
    print_archs(&text);
    return fail(d, TT_ERR_DEVICE, "%s has compute capability %d.%d, but the kernels were built for %s: build "
                "them with CUDA_ARCHS=%d%d", d->properties.name, major, minor, archs, major, minor);
}

// Returns whether the device may start a kernel before the stream's previous kernels are done, also in graphs
// (since CUDA 12.3). Kernels compiled for older devices, which a driver adapts to newer devices, may not
// start early: they do not wait for the previous kernels.
bool chains_kernels(const tt__device *d)
{
    cudaFuncAttributes attributes;
    int driver = 0, runtime = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || cudaRuntimeGetVersion(&runtime) != cudaSuccess)
        return false;
    if (d->properties.major < 9 || driver < 12030 || runtime < 12030) return false;
    return cudaFuncGetAttributes(&attributes, add_counts) == cudaSuccess && attributes.ptxVersion >= 90;
}

__global__ void find_wgmma(int *to)
{
    tt__begin_kernel();
    *to = TT__HAS_WGMMA;
}

// Sets d->wgmma, which says whether attention runs the kernels of warpgroups (src/ops/attention). The kernels
// need a device that has wgmma, and machine code of this file for that device that contains wgmma.
tt_status choose_wgmma(tt__device *d)
{
    const char *asked = getenv("TINYTRAIN_WGMMA");
    int *there = NULL, found = 0;
    if (d->properties.major != 9 || d->properties.minor != 0 || (asked && !strcmp(asked, "0"))) return TT_OK;
    tt_status status = check(d, cudaMalloc(&there, sizeof found), "cudaMalloc");
    if (there) status = check(d, TT__LAUNCH(find_wgmma, 1, 1, 0, d->stream, there), "find_wgmma");
    if (there && status == TT_OK)
        status = check(d, cudaMemcpyAsync(&found, there, sizeof found, cudaMemcpyDeviceToHost, d->stream),
                       "cudaMemcpyAsync");
    if (status == TT_OK) status = check(d, cudaStreamSynchronize(d->stream), "find_wgmma");
    if (there) cudaFree(there);
    d->wgmma = status == TT_OK && found;
    return status;
}

tt__device *cuda_open(tt_context *ctx, int index, int, char *error, size_t capacity)
{
    int devices = 0;
    (void)ctx;
    cudaError_t e = cudaGetDeviceCount(&devices);
    if (e != cudaSuccess || index >= devices) {
        cudaGetLastError();
        if (e != cudaSuccess) explain(e, error, capacity);
        else
            snprintf(error, capacity, "device number %d was requested, but CUDA finds %d, numbered from 0",
                     index, devices);
        return NULL;
    }
    tt__device *d = (tt__device *)calloc(1, sizeof *d);
    if (!d) { snprintf(error, capacity, "out of memory: free memory"); return NULL; }
    d->index = index;
    tt_status status = check(d, cudaSetDevice(index), "cudaSetDevice");
    if (status == TT_OK)
        status = check(d, cudaGetDeviceProperties(&d->properties, index), "cudaGetDeviceProperties");
    if (status == TT_OK) status = check_kernels(d);
    if (status == TT_OK)
        status = check(d, cudaStreamCreateWithFlags(&d->stream.it, cudaStreamNonBlocking),
                       "cudaStreamCreate");
    if (status == TT_OK && cublasLtCreate(&d->lt) != CUBLAS_STATUS_SUCCESS)
        status = fail(d, TT_ERR_DEVICE, "cublasLtCreate failed: check that the device has free memory");
    const char *waits = getenv("TINYTRAIN_CUDA_SYNC");
    d->waits = waits && *waits && strcmp(waits, "0") != 0;
    if (status == TT_OK) status = choose_wgmma(d);
    d->stream.chains = status == TT_OK && !d->waits && chains_kernels(d);
    if (status == TT_OK) return d;
    snprintf(error, capacity, "%s", d->error);
    cuda_close(d);
    return NULL;
}

// Reads the first line of a file; "" if the file cannot be read.
void first_line(const char *path, char to[128])
{
    FILE *f = fopen(path, "r");
    if (!f || !fgets(to, 128, f)) *to = 0;
    to[strcspn(to, "\n")] = 0;
    if (f) fclose(f);
}

void describe_device(text_buffer *text, int index)
{
    cudaDeviceProp p;
    int clock = 0, memory_clock = 0, bus = 0;
    size_t available = 0, total = 0;
    char path[128], speed[128], width[128];
    cudaError_t e = cudaGetDeviceProperties(&p, index);
    if (e == cudaSuccess) e = cudaSetDevice(index);
    if (e == cudaSuccess) e = cudaMemGetInfo(&available, &total);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, index); // kHz
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&memory_clock, cudaDevAttrMemoryClockRate, index);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&bus, cudaDevAttrGlobalMemoryBusWidth, index);
    if (e != cudaSuccess) {
        cudaGetLastError();
        print(text, "device %d: %s (%s)\n", index, cudaGetErrorString(e), cudaGetErrorName(e));
        return;
    }
    print(text, "device %d: %s, compute capability %d.%d, %.1f GB of memory, of which %.1f GB are free\n",
          index, p.name, p.major, p.minor, 1e-9 * (double)total, 1e-9 * (double)available);
    print(text, "    %d multiprocessors, up to %d MHz; %.0f MiB of L2; memory of %d bits at %d MHz\n",
          p.multiProcessorCount, clock / 1000, p.l2CacheSize / 1048576.0, bus, memory_clock / 1000);
    // Reads the maximum speed of the link: while nothing runs, the current speed is lower.
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%04x:%02x:%02x.0/max_link_speed", p.pciDomainID,
             p.pciBusID, p.pciDeviceID);
    first_line(path, speed);
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%04x:%02x:%02x.0/current_link_width", p.pciDomainID,
             p.pciBusID, p.pciDeviceID);
    first_line(path, width);
    print(text, "    PCI %04x:%02x:%02x, %s%s%s\n", p.pciDomainID, p.pciBusID, p.pciDeviceID,
          *speed ? speed : "link unknown", *width ? ", lanes: " : "", width);
}

void cuda_describe(tt_context *ctx, int index, char *to, size_t capacity)
{
    text_buffer text = {to, capacity, 0};
    int devices = 0, driver = 0, runtime = 0, peer = 0, now = 0;
    char line[128];
    (void)ctx;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    first_line("/proc/driver/nvidia/version", line);
    if (driver)
        print(&text, "driver: for CUDA up to %d.%d%s%s\n", TT__VERSION_OF(driver), *line ? "; " : "", line);
    else print(&text, "driver: none\n");
    print(&text, "CUDA: runtime %d.%d, built with toolkit %d.%d; cuBLASLt %d.%d.%d\n",
          TT__VERSION_OF(runtime), TT__VERSION_OF(CUDART_VERSION), (int)(cublasLtGetVersion() / 10000),
          (int)(cublasLtGetVersion() / 100 % 100), (int)(cublasLtGetVersion() % 100));
    print(&text, "kernels: built for compute capability ");
    print_archs(&text);
    print(&text, "\n");
    if (cudaGetDeviceCount(&devices) != cudaSuccess) cudaGetLastError();
    if (devices) cudaGetDevice(&now);
    for (int k = 0; k < devices; k++) describe_device(&text, k);
    for (int k = -1; k < devices && devices > 1; k++) { // prints which devices can access each other's memory
        print(&text, k < 0 ? "peers:" : "%6d", k);
        for (int j = 0; j < devices; j++) {
            if (k < 0) print(&text, " %3d", j);
            else if (j == k) print(&text, "   -");
            else
                print(&text, " %3s", cudaDeviceCanAccessPeer(&peer, k, j) != cudaSuccess ? "?" : peer ? "yes"
                      : "no");
        }
        print(&text, "\n");
    }
    if (index < devices)
        print(&text, "used: device %d%s\n", index, getenv("CUDA_VISIBLE_DEVICES")
              ? " of CUDA_VISIBLE_DEVICES" : "; CUDA_VISIBLE_DEVICES chooses and orders them");
    if (devices) cudaSetDevice(now);
    cudaGetLastError();
}

const char *cuda_error(tt__device *d) { return d->error; }

void *cuda_allocate(tt__device *d, size_t bytes)
{
    void *memory = NULL;
    size_t unused = 0, total = 0;
    if (!use(d)) return NULL;
    cudaError_t e = cudaMalloc(&memory, bytes);
    if (e == cudaSuccess) return memory;
    check(d, e, "cudaMalloc");
    if (e != cudaErrorMemoryAllocation) return NULL;
    cudaMemGetInfo(&unused, &total);
    fail(d, TT_ERR_MEMORY, "%zu bytes are needed, but only %zu of the device's %zu are free: free memory, or "
         "set {memory_budget}", bytes, unused, total);
    return NULL;
}

void cuda_release(tt__device *d, void *memory)
{
    cudaSetDevice(d->index);
    drain(d);
    cudaFree(memory);
}

// Returns how cudaMemPrefetchAsync names device d: by a structure since CUDA 13, by a number before.
#if CUDART_VERSION >= 13000
cudaMemLocation place_of(const tt__device *d) { return {cudaMemLocationTypeDevice, d->index}; }
#define TT__PREFETCH_FLAGS 0,
#else
int place_of(const tt__device *d) { return d->index; }
#define TT__PREFETCH_FLAGS
#endif

tt_status cuda_available(tt__device *d, size_t *bytes)
{
    size_t total;
    return use(d) ? check(d, cudaMemGetInfo(bytes, &total), "cudaMemGetInfo") : TT_ERR_DEVICE;
}

tt_status cuda_allocate_managed(tt__device *d, size_t bytes, bool beyond, void **memory, size_t *available)
{
    int concurrent = 0;
    size_t total = 0;
    if (!use(d)) return TT_ERR_DEVICE;
    tt_status status = check(d, cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess,
                                                       d->index), "cudaDeviceGetAttribute");
    if (status == TT_OK && !concurrent)
        return fail(d, TT_ERR_UNSUPPORTED, "%s and the host cannot use managed memory at the same time "
                    "(concurrentManagedAccess is 0, as under Windows and WSL): use {memory 'device'}",
                    d->properties.name);
    if (status == TT_OK) status = check(d, cudaMemGetInfo(available, &total), "cudaMemGetInfo");
    if (status == TT_OK && !beyond && bytes > *available)
        return fail(d, TT_ERR_MEMORY, "the arena needs %zu bytes of managed memory, but only %zu of the "
                    "device's %zu are free: offload, recompute or train with smaller micro-batches, or "
                    "choose {memory 'managed-oversubscribed'}, which is slower", bytes, *available, total);
    if (status == TT_OK)
        status = check(d, cudaMallocManaged(memory, bytes, cudaMemAttachGlobal), "cudaMallocManaged");
    return status;
}

tt_status cuda_keep(tt__device *d, void *memory, size_t bytes)
{
    if (!use(d)) return TT_ERR_DEVICE;
    return check(d, cudaMemAdvise(memory, bytes, cudaMemAdviseSetPreferredLocation, place_of(d)),
                 "cudaMemAdvise");
}

tt_status cuda_prefetch(tt__device *d, int stream, void *memory, size_t bytes)
{
    cudaStream_t on = use(d) ? stream_of(d, stream) : NULL;
    if (!on) return TT_ERR_DEVICE;
    return check(d, cudaMemPrefetchAsync(memory, bytes, place_of(d), TT__PREFETCH_FLAGS on),
                 "cudaMemPrefetchAsync");
}

void *cuda_allocate_host(tt__device *d, size_t bytes)
{
    void *host = NULL;
    if (!use(d)) return NULL;
    // With the flag Portable, copies are asynchronous on every device, not only on this one. The flag Mapped
    // lets kernels of every device load from the memory.
    const cudaError_t e = cudaHostAlloc(&host, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    return check(d, e, "cudaHostAlloc") == TT_OK ? host : NULL;
}

void cuda_release_host(tt__device *d, void *host)
{
    cudaSetDevice(d->index);
    drain(d);
    cudaFreeHost(host);
}

// Copies memory on a stream. CUDA tells the direction by the addresses.
tt_status cuda_copy(tt__device *d, int stream, void *to, const void *from, size_t bytes)
{
    cudaStream_t on = use(d) ? stream_of(d, stream) : NULL;
    if (!on) return TT_ERR_DEVICE;
    return check(d, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, on), "copy");
}

tt_status cuda_fill(tt__device *d, void *memory, int byte, size_t bytes)
{
    if (!use(d)) return TT_ERR_DEVICE;
    return bytes ? check(d, cudaMemsetAsync(memory, byte, bytes, d->stream), "fill") : TT_OK;
}

// Waits for all streams of d, even if d is lost, so that nothing is released that another device still uses.
tt_status cuda_wait(tt__device *d)
{
    const bool usable = use(d);
    const cudaError_t e = drain(d);
    return usable ? check(d, e, "wait") : TT_ERR_DEVICE;
}

tt_status cuda_read(tt__device *d, void *to, const void *memory, size_t bytes)
{
    if (!use(d)) return TT_ERR_DEVICE;
    tt_status status = check(d, cudaMemcpyAsync(to, memory, bytes, cudaMemcpyDeviceToHost, d->stream),
                             "copy from the device");
    return status == TT_OK ? check(d, cudaStreamSynchronize(d->stream), "wait") : status;
}

tt_status cuda_mark(tt__device *d, int stream, void **event)
{
    if (!use(d)) return TT_ERR_DEVICE;
    tt_status status = stream_of(d, stream) ? TT_OK : TT_ERR_DEVICE;
    if (status == TT_OK && !*event)
        status = check(d, cudaEventCreateWithFlags((cudaEvent_t *)event, cudaEventDisableTiming),
                       "cudaEventCreate");
    if (status != TT_OK) return status;
    return check(d, cudaEventRecord((cudaEvent_t)*event, stream_of(d, stream)), "cudaEventRecord");
}

tt_status cuda_after(tt__device *d, int stream, void *event)
{
    if (!use(d)) return TT_ERR_DEVICE;
    if (!event) return TT_OK;
    if (stream == TT__HOST_STREAM)
        return check(d, cudaEventSynchronize((cudaEvent_t)event), "cudaEventSynchronize");
    cudaStream_t waits = stream_of(d, stream);
    if (!waits) return TT_ERR_DEVICE;
    return check(d, cudaStreamWaitEvent(waits, (cudaEvent_t)event, 0), "cudaStreamWaitEvent");
}

void cuda_release_event(tt__device *d, void *event)
{
    cudaSetDevice(d->index);
    cudaEventDestroy((cudaEvent_t)event);
}

// Begins to record, as a graph, the work that the streams are given. Streams other than the compute stream
// join the recording when they first wait for the compute stream.
tt_status cuda_capture(tt__device *d)
{
    if (!use(d)) return TT_ERR_DEVICE;
    if (d->waits) return fail(d, TT_ERR_UNSUPPORTED, "TINYTRAIN_CUDA_SYNC is set");
    return check(d, cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal),
                 "begin of a capture");
}

void *cuda_captured(tt__device *d)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t ready = NULL;
    cudaSetDevice(d->index);
    tt_status status = check(d, cudaStreamEndCapture(d->stream, &graph), "end of a capture");
    if (status == TT_OK) status = check(d, cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
    if (graph) cudaGraphDestroy(graph);
    return status == TT_OK ? ready : NULL;
}

tt_status cuda_replay(tt__device *d, void *recording)
{
    if (!use(d)) return TT_ERR_DEVICE;
    return check(d, cudaGraphLaunch((cudaGraphExec_t)recording, d->stream), "cudaGraphLaunch");
}

void cuda_forget(tt__device *d, void *recording)
{
    cudaSetDevice(d->index);
    drain(d);
    cudaGraphExecDestroy((cudaGraphExec_t)recording);
}

} // namespace

/* ==== src/cuda/numbers.cuh */
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

/* ==== src/cuda/groups.cuh */
namespace {

// ================================================================================================== rows
// Building blocks of ops that work row by row or element by element.

#define TT__ROW_THREADS 256
struct loss_sums { double loss, weight, right; };

// The resident workspace that a launch may use. A matrix product uses it in two parts: the first part is for
// cuBLASLt; the second holds the sums for a bias gradient, or a bias that was converted to another dtype.
// Other kernels use the whole workspace.
union resident_workspace {
    static constexpr size_t BYTES = TT__CUDA_RESIDENT, BIAS_BYTES = (BYTES / 32 + 4095) / 4096 * 4096;
    static constexpr size_t LT_BYTES = BYTES - BIAS_BYTES;
    struct { unsigned char lt[LT_BYTES]; float bias[BIAS_BYTES / sizeof(float)]; } product;
    float sums[BYTES / sizeof(float)]; // partial sums of kernels that sum in two steps
    double squares[BYTES / sizeof(double)];
    loss_sums losses[BYTES / sizeof(loss_sums)];
    unsigned words[BYTES / sizeof(unsigned)]; // SET_ROWS: a bit for each row; sorting: counts of digits
};
static_assert(sizeof(resident_workspace) == resident_workspace::BYTES, "there is nothing between the parts");

resident_workspace *resident_of(const tt__launch *l) { return (resident_workspace *)l->resident; }

__device__ __forceinline__ void load_group(float (&v)[8], const tt__mat &m, int64_t r, int64_t c, int n,
                                           bool vector)
{
    load8(v, row_at(m, r), m.dtype, c, n, vector);
}

// ---- sums over rows: f32 sums of parts of the rows, then the sum of the parts

__device__ __forceinline__ float element(const tt__mat &m, int64_t i, int64_t j)
{
    return load_any(m.data, m.dtype, i * m.ld + j);
}

// Arguments of the last step of a sum. `partial` has `parts` rows, `stride` floats apart. The sum of column c
// of the rows becomes `to[c]` or, if `add`, is added to `to[c]`. The structure has no padding, because in
// arrays of structures gcc 12 with -ftrivial-auto-var-init clears wrong bytes instead of the padding.
struct sums_to_finish { const float *partial; void *to; int64_t parts, stride, cols; int dtype, add; };
struct all_sums_to_finish { sums_to_finish of[3]; int64_t count; };

// Does the last step of sums: adds up the rows of partial sums. A block has 32 columns, and its 32 warps take
// rows in turn; a thread has 8 loads in flight, so that a block loads up to 256 rows at once.
__global__ void __launch_bounds__(1024) finish_sums(const __grid_constant__ all_sums_to_finish all)
{
    tt__begin_kernel();
    TT__SHARED(float, sums, [32][33]);
    const sums_to_finish &s = all.of[blockIdx.y];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t c = (int64_t)blockIdx.x * 32 + lane;
    float sum = 0;
    for (int64_t k = warp; k < s.parts && c < s.cols; k += 256) {
        float v[8];
        TT__UNROLL for (int u = 0; u < 8; u++)
            v[u] = k + 32 * u < s.parts ? s.partial[(k + 32 * u) * s.stride + c] : 0;
        TT__UNROLL for (int u = 0; u < 8; u++) sum += v[u];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || c >= s.cols) return;
    TT__UNROLL for (int k = 1; k < 32; k++) sum += sums[k][lane];
    if (s.add) sum += load_any(s.to, (tt_dtype)s.dtype, c);
    store_any(s.to, (tt_dtype)s.dtype, c, sum);
}

void add_sums_to_finish(all_sums_to_finish *all, const float *partial, int64_t parts, int64_t stride,
                        const tt__mat *to, bool add)
{
    all->of[all->count++] = {partial, to->data, parts, stride, to->cols, to->dtype, add};
}

// Does the last step of all sums in `all`. One launch of finish_sums serves consecutive sums that have
// different results. Sums that are added to the same result need one launch after another.
cudaError_t run_all_finish_sums(tt__device *d, const all_sums_to_finish *all)
{
    const int64_t sums = all->count;
    all_sums_to_finish some = *all;
    cudaError_t e = cudaSuccess;
    for (int64_t from = 0; from < sums && e == cudaSuccess; from += some.count) {
        int64_t columns = 0;
        bool apart = true;
        some.count = 0;
        for (int64_t k = from; k < sums; k++) {
            for (int64_t j = from; j < k; j++) apart = apart && all->of[j].to != all->of[k].to;
            if (!apart) break;
            some.of[some.count++] = all->of[k];
            columns = max(columns, all->of[k].cols);
        }
        e = TT__LAUNCH(finish_sums, dim3(blocks_for(columns, 32), (unsigned)some.count), 1024, 0, d->stream,
                       some);
    }
    return e;
}

cudaError_t run_finish_sums(tt__device *d, const float *partial, int64_t parts, int64_t stride,
                            const tt__mat *to, bool add)
{
    all_sums_to_finish all;
    memset(&all, 0, sizeof all);
    add_sums_to_finish(&all, partial, parts, stride, to, add);
    return run_all_finish_sums(d, &all);
}

// Sums 256 columns over the 8 warps of a block. Lane i passes columns [8 i, 8 i + 8); thread k gets the sum
// of column k.
__device__ __forceinline__ float sum_warps(const float (&v)[8])
{
    TT__SHARED(float, part, [8][256]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    TT__UNROLL for (int j = 0; j < 8; j++) part[warp][lane * 8 + j] = v[j];
    __syncthreads();
    float sum = 0;
    TT__UNROLL for (int w = 0; w < 8; w++) sum += part[w][threadIdx.x];
    return sum;
}

// Returns the number of blocks that sum rows: at least 1, and otherwise the smallest of three numbers. The
// first is `each` for each multiprocessor of the device. The second is `pieces`, the number of blocks that
// have rows to sum. The third is the number of blocks whose f32 sums, `bytes` bytes a block, fit the resident
// workspace after its first `used` bytes.
int64_t sum_blocks(const tt__device *d, int each, int64_t pieces, size_t used, size_t bytes)
{
    const int64_t room = (int64_t)((resident_workspace::BYTES - used) / bytes);
    return max((int64_t)1, min(min(pieces, each * (int64_t)d->properties.multiProcessorCount), room));
}

#define TT__ROW_COLUMNS 4096 // largest number of columns of a row that fits the registers of a block

// Returns the number of rows in a chunk of column sums. The columns of a gradient may be summed by the kernel
// that computes the gradient, or by another kernel, if a pipeline stage gets the gradient from the next
// stage. Both kernels must give the same bits, so each sums the numbers as they are stored, chunk by chunk.
// The threads of a block form sum_teams() teams, which take the rows of a chunk in turn.
int64_t rows_of_sums(const tt__device *d, int64_t rows, int64_t columns)
{
    // Number of layernorm_backward's blocks that fit a multiprocessor.
    const int64_t blocks = min((columns <= 1024 ? 1024 : TT__ROW_COLUMNS) / columns, (int64_t)4);
    const int64_t largest = sum_blocks(d, (int)max(blocks, (int64_t)1), (rows + 7) / 8, 0,
                                    (size_t)(3 * columns) * sizeof(float));
    return max(((rows + largest - 1) / largest + 7) / 8 * 8, (int64_t)8);
}

__host__ __device__ inline int sum_teams(int64_t columns)
{
    return columns > 1024 && columns <= TT__ROW_COLUMNS ? 1 : 4;
}

// Rounds the 8 numbers v to `dtype`, in pairs, because rounding a single number uses a GPU's slow units.
__device__ __forceinline__ void round8(float (&v)[8], tt_dtype dtype)
{
    if (dtype == TT_F32) return;
    uint32_t h[4];
    TT__UNROLL for (int k = 0; k < 4; k++) h[k] = pack_as(dtype, v[2 * k], v[2 * k + 1]);
    TT__WITH_HALF(dtype, T, widen8<T>(v, make_uint4(h[0], h[1], h[2], h[3])));
}

// Writes sums of the columns of dy (rows, n) over chunks of rows_each rows to partial[chunk][n]; finish_sums
// adds up the chunks. Reads dy once. The threads of a block form `teams` teams, which take the rows of a
// chunk in turn. A thread sums one column of its team's rows.
__global__ void __launch_bounds__(TT__ROW_THREADS) column_sums(float *partial, tt__mat dy, int64_t rows_each,
                                                               int teams)
{
    tt__begin_kernel();
    TT__SHARED(float, part, [TT__ROW_THREADS]);
    const int across = TT__ROW_THREADS / teams;
    const int64_t j = (int64_t)blockIdx.x * across + threadIdx.x % across, from = blockIdx.y * rows_each;
    const int64_t to = min(dy.rows, from + rows_each);
    float sum = 0;
    if (j < dy.cols) {
        for (int64_t r = from + threadIdx.x / across; r < to; r += teams) sum += element(dy, r, j);
    }
    part[threadIdx.x] = sum;
    __syncthreads();
    if ((int)threadIdx.x < across && j < dy.cols) {
        for (int k = 1; k < teams; k++) sum += part[k * across + threadIdx.x];
        partial[blockIdx.y * dy.cols + j] = sum;
    }
}

// Returns columns [first, first + n) of a matrix.
tt__mat columns_of(const tt__mat *m, int64_t first, int64_t n)
{
    tt__mat part = *m;
    if (m->data) part.data = (char *)m->data + (size_t)first * tt_dtype_bytes(m->dtype);
    part.cols = n;
    return part;
}

// Writes the sums of the columns of dy to `to`, or adds them to `to` if `add`. Each launch takes some of the
// columns, because their partial sums must fit the resident workspace.
cudaError_t run_column_sums(const tt__launch *l, const tt__mat *dy, const tt__mat *to, bool add)
{
    tt__device *d = l->device;
    float *partial = resident_of(l)->sums;
    const int64_t room = resident_workspace::BYTES / sizeof(float) / 3;
    cudaError_t e = cudaSuccess;
    for (int64_t c = 0, n; c < dy->cols && e == cudaSuccess; c += n) {
        n = min(dy->cols - c, room);
        const tt__mat from = columns_of(dy, c, n), sums = columns_of(to, c, n);
        const int teams = sum_teams(dy->cols);
        const int64_t rows = rows_of_sums(d, dy->rows, n);
        const int64_t chunks = max((dy->rows + rows - 1) / rows, (int64_t)1);
        const dim3 grid(blocks_for(n, TT__ROW_THREADS / teams), (unsigned)chunks);
        e = TT__LAUNCH(column_sums, grid, TT__ROW_THREADS, 0, d->stream, partial, from, rows, teams);
        if (e == cudaSuccess) e = run_finish_sums(d, partial, chunks, n, &sums, add);
    }
    return e;
}

// ANY is the template argument of kernels that take any dtype. Kernels whose template arguments are dtypes
// take operands of these dtypes only, in whole vectors of 8 elements. Each of these kernels sets the dtypes
// in its copy of the operands, so that the compiler drops the code for other dtypes.
enum { ANY = -1 };

// 8 columns of a row as they are loaded: the bits of vectors of dtype X, or f32 numbers for ANY.
template <int X> struct row_bits { uint4 q[X == TT_F32 ? 2 : 1]; };
template <> struct row_bits<ANY> { float v[8]; };

template <int X> __device__ __forceinline__ void widen_row(float (&v)[8], const row_bits<X> &from)
{
    if constexpr (X == ANY) {
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] = from.v[j];
    } else if constexpr (X == TT_F32) {
        TT__UNROLL for (int h = 0; h < 2; h++) {
            v[4 * h] = __uint_as_float(from.q[h].x); v[4 * h + 1] = __uint_as_float(from.q[h].y);
            v[4 * h + 2] = __uint_as_float(from.q[h].z); v[4 * h + 3] = __uint_as_float(from.q[h].w);
        }
    } else {
        TT__WITH_HALF((tt_dtype)X, T, widen8<T>(v, from.q[0]));
    }
}

// Moves the beginning of each matrix by `by` rows.
template <class... M> __device__ __forceinline__ void move_rows(int64_t by, M &...m)
{
    ((m.data = row_at(m, by)), ...);
}

// Sets *grid to the number of blocks of a kernel with a grid-stride loop: `blocks`, the number of blocks with
// work, but at most `times` the number of blocks that the device's multiprocessors run at once.
template <class... P>
cudaError_t grid_of(tt__device *d, void (*kernel)(P...), int threads, int times, int64_t blocks,
                    unsigned *grid)
{
    int resident = 1;
    const cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0);
    const int64_t units = d->properties.multiProcessorCount;
    const int64_t largest = times * units * (resident > 0 ? resident : 1);
    *grid = (unsigned)max((int64_t)1, min(blocks, largest));
    return e;
}

// Arguments of an op that computes y from up to two operands, a and b, in groups of 8 columns. OP is a struct
// with begin(), which all threads of a block call, and get(), which computes the results v of the group of n
// columns that begins at column c of row r, or returns false where nothing is to be written.
struct group_args { tt__mat a, b, y; bool add, vector; int64_t per_row, first, all; };

// Computes y by op.get(). X: dtype of the operands; Y: dtype of the result. The launch bounds for X == ANY
// keep the compiler from spilling a register for compute capability 10.0.
template <class OP, int X, int Y>
__global__ void __launch_bounds__(TT__ROW_THREADS, X == ANY ? 2 : 0) each_group(group_args g, OP op)
{
    tt__begin_kernel();
    if (X != ANY) {
        g.a.dtype = g.b.dtype = (tt_dtype)X;
        g.y.dtype = (tt_dtype)Y;
        g.vector = true;
    }
    op.begin();
    for (int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x; k < g.all;
         k += (int64_t)gridDim.x * TT__ROW_THREADS) {
        const int64_t row = g.all == g.per_row ? 0 : (uint32_t)k / (uint32_t)g.per_row;
        const int64_t c = (k - row * g.per_row) * 8, r = g.first + row;
        const int n = X != ANY ? 8 : (int)min(g.y.cols - c, (int64_t)8);
        float v[8], old[8];
        if (!op.get(g, r, c, n, v)) continue;
        if (g.add) {
            load_group(old, g.y, r, c, n, g.vector);
            TT__UNROLL for (int j = 0; j < 8; j++) v[j] += old[j];
        }
        store8(row_at(g.y, r), g.y.dtype, c, n, g.vector, v);
    }
}

template <class OP, int X, int Y> cudaError_t launch_groups(tt__device *d, group_args g, OP op)
{
    cudaError_t e = cudaSuccess;
    unsigned grid;
    const int64_t rows = max((int64_t)1, INT32_MAX / g.per_row); // rows of one launch, few enough for 32-bit
                                                                 // division
    for (; g.first < g.y.rows && e == cudaSuccess; g.first += rows) {
        g.all = min(rows, g.y.rows - g.first) * g.per_row;
        e = grid_of(d, each_group<OP, X, Y>, TT__ROW_THREADS, 2, blocks_for(g.all, TT__ROW_THREADS), &grid);
        if (e == cudaSuccess)
            e = TT__LAUNCH((each_group<OP, X, Y>), grid, TT__ROW_THREADS, 0, d->stream, g, op);
    }
    return e;
}

// Loads n columns, from column c on, of m's first row.
template <int X>
__device__ __forceinline__ void fetch_group(row_bits<X> &to, const tt__mat &m, int64_t c, int n, bool vector)
{
    if constexpr (X == ANY) {
        load_group(to.v, m, 0, c, n, vector);
    } else {
        constexpr int N = X == TT_F32 ? 2 : 1;
        TT__UNROLL for (int h = 0; h < N; h++) to.q[h] = ((const uint4 *)m.data)[c / 8 * N + h];
    }
}

// Computes y as each_group does, and writes to partial[blockIdx.y][c] the sum of rows_each rows of column c
// of y. OP also has finish(both, r, c, v, other). Before the call, v has elements of a, and `other` has
// elements of b if `both`; after the call, v has the results. A thread has 8 columns. There are few blocks,
// because each block writes a row of partial sums. So that few blocks keep the memory busy, a thread loads
// the rows of its next turn ahead.
template <class OP, int X, int Y>
__global__ void __launch_bounds__(TT__ROW_THREADS, 2)
    each_group_sums(group_args g, OP op, float *partial, int64_t rows_each)
{
    tt__begin_kernel();
    if (X != ANY) {
        g.a.dtype = g.b.dtype = (tt_dtype)X;
        g.y.dtype = (tt_dtype)Y;
        g.vector = true;
    }
    op.begin();
    constexpr int ROWS = X == ANY || X == TT_F32 ? 1 : 2; // rows that a thread loads at once
    const int teams = sum_teams(g.y.cols), across = (int)blockDim.x / teams;
    const int team = (int)threadIdx.x / across, place = (int)threadIdx.x - team * across;
    const int64_t column = (int64_t)blockIdx.x * across * 8, c = column + place * 8;
    const int64_t from = blockIdx.y * rows_each + team;
    const int n = X != ANY ? 8 : (int)min(g.y.cols - c, (int64_t)8);
    const bool both = g.b.data != NULL;
    float *const of_block = partial + blockIdx.y * g.y.cols;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    row_bits<X> a[ROWS] = {}, b[ROWS] = {};
    // left: number of rows from the thread's first row of the current turn to the end of the chunk. g.a and
    // g.b begin at the rows of the next turn, which are loaded ahead. All of these loads are issued together,
    // because a thread that waits for one of its loads may wait for all loads in flight.
    int left = c < g.y.cols ? (int)(min(g.y.rows, (blockIdx.y + 1) * rows_each) - from) : 0;
    move_rows(from, g.a, g.b, g.y);
    const auto fetch = [&](int many) {
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            if (i * teams < many) fetch_group(a[i], g.a, c, n, g.vector);
            if (i * teams < many && both) fetch_group(b[i], g.b, c, n, g.vector);
            move_rows(teams, g.a, g.b);
        }
    };
    fetch(left);
    for (int64_t r = from; left > 0; r += ROWS * teams, left -= ROWS * teams) {
        float v[ROWS][8], other[ROWS][8], old[8];
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            widen_row(v[i], a[i]);
            widen_row(other[i], b[i]);
        }
        fetch(left - ROWS * teams);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            if (i * teams >= left) continue;
            op.finish(both, r + i * teams, c, v[i], other[i]);
            if (g.add) {
                load_group(old, g.y, 0, c, n, g.vector);
                TT__UNROLL for (int j = 0; j < 8; j++) v[i][j] += old[j];
            }
            store8(g.y.data, g.y.dtype, c, n, g.vector, v[i]);
            move_rows(teams, g.y);
            round8(v[i], g.y.dtype);
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += v[i][j];
        }
    }
    if (teams == 1) {
        TT__UNROLL for (int j = 0; j < 8; j++) if (c + j < g.y.cols) of_block[c + j] = sum[j];
        return;
    }
    TT__SHARED(float4, part, [4][2][64]); // [team][half][thread]: sums of half of the thread's 8 columns
    part[team][0][place] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    part[team][1][place] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    __syncthreads();
    for (int k = threadIdx.x; k < across * 8 && column + k < g.y.cols; k += (int)blockDim.x) {
        float all = 0;
        TT__UNROLL for (int team = 0; team < 4; team++)
            all += ((const float *)&part[team][k / 4 % 2][k / 8])[k % 4];
        of_block[column + k] = all;
    }
}

// The typed kernels that are compiled for an op, beside its kernel for any dtype. RARE: none. HOT: for each
// float dtype, a kernel whose operands and result have that dtype. HOT_CASTS: the kernels of HOT, and for
// bf16 and f16 a kernel that computes a result of that dtype from f32 operands.
enum { RARE, HOT, HOT_CASTS };

bool is_typed(const group_args &g)
{
    return g.vector && g.y.cols % 8 == 0 && (!g.b.data || g.b.dtype == g.a.dtype);
}

template <class OP> cudaError_t launch_typed_groups(tt__device *d, const group_args &g, OP op)
{
    const tt_dtype x = g.a.dtype, y = g.y.dtype;
    const bool typed = is_typed(g);
    if constexpr (OP::KIND != RARE) {
        if (typed && x == TT_F32 && y == TT_F32) return launch_groups<OP, TT_F32, TT_F32>(d, g, op);
        if (typed && x == TT_BF16 && y == TT_BF16) return launch_groups<OP, TT_BF16, TT_BF16>(d, g, op);
        if (typed && x == TT_F16 && y == TT_F16) return launch_groups<OP, TT_F16, TT_F16>(d, g, op);
    }
    if constexpr (OP::KIND == HOT_CASTS) {
        if (typed && x == TT_F32 && y == TT_BF16) return launch_groups<OP, TT_F32, TT_BF16>(d, g, op);
        if (typed && x == TT_F32 && y == TT_F16) return launch_groups<OP, TT_F32, TT_F16>(d, g, op);
    }
    return launch_groups<OP, ANY, ANY>(d, g, op);
}

// Computes y by op or, if `add`, adds the results of op to y. by_row: whether the op uses the numbers of rows
// or columns as indices. If not, contiguous matrices are taken as one long row. Operands whose data is NULL
// are absent.
template <class OP>
cudaError_t run_groups(tt__device *d, tt__mat a, tt__mat b, tt__mat y, bool add, bool by_row, OP op)
{
    group_args g = {a, b, y, add, true, 1, 0, 0};
    tt__mat *const all[3] = {&g.a, &g.b, &g.y};
    for (int k = 0; k < 3; k++) {
        g.vector = g.vector && is_wide(all[k]);
        by_row = by_row || (all[k]->data && all[k]->rows > 1 && all[k]->ld != all[k]->cols);
    }
    for (int k = 0; k < 3 && !by_row; k++) {
        all[k]->ld = all[k]->cols *= all[k]->rows;
        all[k]->rows = 1;
    }
    if (!by_row) g.vector = ((uintptr_t)a.data | (uintptr_t)b.data | (uintptr_t)y.data) % 16 == 0;
    g.per_row = (g.y.cols + 7) / 8;
    return launch_typed_groups(d, g, op);
}

const tt__mat no_operand = {NULL, TT_F32, 0, 0, 0};

// Computes y as run_groups does. Unless sums.data is NULL, also writes the sums of y's columns to `sums`, or
// adds them to it if add_sums.
template <class OP>
cudaError_t run_groups_sums(const tt__launch *l, tt__mat a, tt__mat b, tt__mat y, bool add, bool by_row,
                            OP op, const tt__mat &sums, bool add_sums)
{
    tt__device *d = l->device;
    group_args g = {a, b, y, add, is_wide(&a) && is_wide(&b) && is_wide(&y), 1, 0, 0};
    float *partial = resident_of(l)->sums;
    const int64_t room = (int64_t)(resident_workspace::BYTES / sizeof(float)) / (3 * y.cols);
    if (!sums.data || !y.rows || !room) {
        const cudaError_t e = run_groups(d, a, b, y, add, by_row, op);
        return e == cudaSuccess && sums.data ? run_column_sums(l, &y, &sums, add_sums) : e;
    }
    const int64_t each = rows_of_sums(d, y.rows, y.cols);
    // `pieces` blocks of TT__ROW_THREADS threads would cover the columns. The number of threads of a block is
    // chosen so that all blocks get equal shares of the columns.
    const int teams = sum_teams(y.cols);
    const unsigned groups = blocks_for(y.cols, 8), pieces = blocks_for(groups, TT__ROW_THREADS / teams);
    const unsigned threads = blocks_for(blocks_for(groups, pieces) * teams, 32) * 32;
    const dim3 grid(blocks_for(groups, threads / teams), blocks_for(y.rows, each));
    const bool alike = is_typed(g) && y.dtype == a.dtype;
    cudaError_t e = cudaSuccess;
    if constexpr (OP::KIND == RARE) {
        e = TT__LAUNCH((each_group_sums<OP, ANY, ANY>), grid, threads, 0, d->stream, g, op, partial, each);
    } else {
        const auto kernel = alike && a.dtype == TT_F32 ? each_group_sums<OP, TT_F32, TT_F32>
            : alike && a.dtype == TT_BF16 ? each_group_sums<OP, TT_BF16, TT_BF16>
            : alike && a.dtype == TT_F16 ? each_group_sums<OP, TT_F16, TT_F16>
            : each_group_sums<OP, ANY, ANY>;
        e = TT__LAUNCH(kernel, grid, threads, 0, d->stream, g, op, partial, each);
    }
    return e == cudaSuccess ? run_finish_sums(d, partial, grid.y, y.cols, &sums, add_sums) : e;
}

} // namespace

/* ==== src/cuda/kernels.cuh */
namespace {

// ============================================================================================ kernels of ops

typedef cudaError_t (*run_fn)(const tt__launch *l);
typedef cudaError_t (*run_together_fn)(const tt__launch *l, int n); // runs n launches with few kernels

// The function that runs an op, `run` or `together` (if both are NULL, CUDA has no kernel for the op), and
// the max numbers of rows and columns of the op's operands (0: any number).
struct op_kernels {
    run_fn run;
    run_together_fn together;
    int64_t max_rows, max_cols;
    op_kernels() : run(NULL), together(NULL), max_rows(0), max_cols(0) {}
    op_kernels(run_fn f, int64_t rows = 0, int64_t cols = 0) : op_kernels()
    {
        run = f;
        max_rows = rows;
        max_cols = cols;
    }
    op_kernels(run_together_fn f) : op_kernels() { together = f; }
};
enum {
    MAX_SET_ROWS = 1 << 27,   // SET_ROWS and its backward: max rows; the workspace has a bit for each row
    MAX_SUM_COLUMNS = 1 << 20 // max columns of ops whose partial column sums are in the resident workspace
};

// Returns the kernels of op number OP. Without a TT__RUN_BY(OP, ...) CUDA has no kernel for the op.
template <int OP> op_kernels kernels_of() { return {}; }

// Says by which function an op runs, and optionally the max numbers of rows and columns. Write the TT__RUN_BY
// of an op below that function.
#define TT__RUN_BY(OP, ...) \
    template <> op_kernels kernels_of<TT__OP_##OP>() { return {__VA_ARGS__}; }

} // namespace

/* ==== src/ops/elementwise/cuda.cuh */
namespace {

// ---------------------------------------------------------------------------------------- element by element

// Computes y = s * x. Reads x and writes y once.
struct op_scale {
    static constexpr int KIND = HOT_CASTS;
    float s;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        load_group(v, g.a, r, c, n, g.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] *= s;
        return true;
    }
};

cudaError_t run_scale(const tt__launch *l)
{
    const op_scale op = {l->instr->op == TT__OP_SCALE ? l->instr->attr.scale : 1.0f}; // a CAST scales by 1
    return run_groups(l->device, l->in[0], no_operand, l->out[0], l->add[0], false, op);
}
TT__RUN_BY(SCALE, run_scale)
TT__RUN_BY(CAST, run_scale)

// Computes y from a and b by PAIR::of. b is a matrix or, if ROW, a single row. Reads a and b and writes y
// once.
template <class PAIR, bool ROW> struct op_pair {
    static constexpr int KIND = PAIR::KIND;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        float b[8];
        load_group(v, g.a, r, c, n, g.vector);
        load_group(b, g.b, ROW ? 0 : r, c, n, g.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] = PAIR::of(v[j], b[j]);
        return true;
    }
};

template <class PAIR, bool ROW> cudaError_t run_pair(const tt__launch *l)
{
    return run_groups(l->device, l->in[0], l->in[1], l->out[0], l->add[0], ROW, op_pair<PAIR, ROW>());
}

#define TT__ACT_OF(ACT) act_##ACT
#define TT__PAIR(OP, kind, formula)                                              \
    struct pair_##OP {                                                           \
        static constexpr int KIND = kind;                                        \
        static __device__ float of(float a, float b) { return formula; }         \
    };                                                                           \
    TT__RUN_BY(OP, run_pair<pair_##OP, false>)
TT__PAIRS(TT__PAIR, TT__ACT_OF)
#undef TT__PAIR
#undef TT__ACT_OF
TT__RUN_BY(ADD_ROW, run_pair<pair_ADD, true>)

// Computes y = a * b, where b has one row, one column, or one number. Reads a and writes y once.
struct op_mul_broadcast {
    static constexpr int KIND = RARE;
    tt__mat b;
    bool wide;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        const int64_t row = b.rows > 1 ? r : 0;
        float w[8];
        load_group(v, g.a, r, c, n, g.vector);
        if (b.cols > 1) load_group(w, b, row, c, n, wide);
        else TT__UNROLL for (int j = 0; j < 8; j++) w[j] = element(b, row, 0);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] *= w[j];
        return true;
    }
};

cudaError_t run_mul_broadcast(const tt__launch *l)
{
    return run_groups(l->device, l->in[0], no_operand, l->out[0], l->add[0], true,
                      op_mul_broadcast{l->in[1], is_wide(&l->in[1])});
}
TT__RUN_BY(MUL_BROADCAST, run_mul_broadcast)

// Computes the sum of a * b over each row, and writes the sum to y or, if `add`, adds the sum to y. A warp
// works on a row. Reads a and b once.
__global__ void __launch_bounds__(256) row_dots(tt__mat a, tt__mat b, tt__mat y, bool add, bool wide)
{
    tt__begin_kernel();
    for (int64_t r = blockIdx.x * (int64_t)8 + threadIdx.x / 32; r < a.rows; r += gridDim.x * (int64_t)8) {
        float v[8], w[8], sum = 0;
        for (int64_t c = 8 * (threadIdx.x % 32); c < a.cols; c += 8 * 32) {
            load8(v, row_at(a, r), a.dtype, c, a.cols - c, wide);
            load8(w, row_at(b, r), b.dtype, c, a.cols - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) sum += v[k] * w[k];
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32) continue;
        if (add) sum += element(y, r, 0);
        store_any(y.data, y.dtype, r * y.ld, sum);
    }
}

cudaError_t run_row_dots(const tt__launch *l)
{
    const tt__mat *a = &l->in[0], *b = &l->in[1];
    return TT__LAUNCH(row_dots, grid_for(a->rows, 8, 4096), 256, 0, l->device->stream, *a, *b, l->out[0],
                      l->add[0], is_wide(a) && is_wide(b));
}
TT__RUN_BY(ROW_DOTS, run_row_dots)

// Rotary positions. A thread works on 8 pairs of columns, or fewer at the end, and rotates these pairs in
// TURN_HEADS heads. Reads x and writes y once.
enum { TURN_HEADS = 8 };
struct rotary_args {
    tt__mat x, y;
    const int32_t *position;
    bool add, vector;
    int heads, head_size, pairs, neighbours;
    float sign, magnitude;
    // groups: groups of pairs in a head; spans: groups of heads in a row; all: tasks of all rows.
    int64_t groups, spans, all;
    float frequency[TT__MAX_PAIRS];
};

// Writes v to n columns of row r of y, beginning with column c, or adds v to them if a.add.
__device__ void put_group(const rotary_args &a, int64_t r, int64_t c, int n, float (&v)[8])
{
    float old[8];
    if (a.add) {
        load_group(old, a.y, r, c, n, a.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] += old[j];
    }
    store8(row_at(a.y, r), a.y.dtype, c, n, a.vector, v);
}

__global__ void __launch_bounds__(TT__ROW_THREADS, 2) rotary_kernel(rotary_args a)
{
    tt__begin_kernel();
    for (int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x; k < a.all;
         k += (int64_t)gridDim.x * TT__ROW_THREADS) {
        const int64_t r = k / (a.groups * a.spans);
        const int group = (int)(k % a.groups), first = (int)(k / a.groups % a.spans) * TURN_HEADS;
        const int from = group * 8, n = min(8, a.pairs - from); // the last group may have no pair
        const int last = min(first + TURN_HEADS, a.heads);
        float s[8], c[8], v[8], w[8];
        TT__UNROLL for (int j = 0; j < 8; j++) {
            const int pair = min(from + j, a.pairs - 1);
            sincosf((float)a.position[r] * a.frequency[pair], &s[j], &c[j]);
            s[j] *= a.sign * a.magnitude;
            c[j] *= a.magnitude;
        }
        for (int h = first; h < last; h++) {
            const int64_t head = (int64_t)h * a.head_size;
            const int64_t lower = head + (a.neighbours ? 2 * from : from);
            const int64_t upper = a.neighbours ? lower + 8 : lower + a.pairs;
            const int n_lower = a.neighbours ? min(8, 2 * n) : n;
            const int n_upper = a.neighbours ? 2 * n - n_lower : n;
            load_group(v, a.x, r, lower, n_lower, a.vector);
            load_group(w, a.x, r, upper, n_upper, a.vector);
            if (a.neighbours) {
                TT__UNROLL for (int j = 0; j < 4; j++) {
                    const float x = v[2 * j], y = w[2 * j];
                    v[2 * j] = x * c[j] - v[2 * j + 1] * s[j];
                    v[2 * j + 1] = v[2 * j + 1] * c[j] + x * s[j];
                    w[2 * j] = y * c[4 + j] - w[2 * j + 1] * s[4 + j];
                    w[2 * j + 1] = w[2 * j + 1] * c[4 + j] + y * s[4 + j];
                }
            } else {
                TT__UNROLL for (int j = 0; j < 8; j++) {
                    const float x = v[j];
                    v[j] = x * c[j] - w[j] * s[j];
                    w[j] = w[j] * c[j] + x * s[j];
                }
            }
            put_group(a, r, lower, n_lower, v);
            put_group(a, r, upper, n_upper, w);
            if (group || (a.x.data == a.y.data && !a.add)) continue;
            // Copies the columns that are not rotated.
            for (int64_t e = 2 * a.pairs; e < a.head_size; e += 8) {
                const int rest = min((int64_t)8, a.head_size - e);
                load_group(v, a.x, r, head + e, rest, a.vector);
                put_group(a, r, head + e, rest, v);
            }
        }
    }
}

cudaError_t run_rotary(const tt__launch *l)
{
    const tt_rotary_options *o = &l->instr->attr.rotary;
    rotary_args a;
    memset(&a, 0, sizeof a);
    a.x = l->in[0];
    a.y = l->out[0];
    a.position = (const int32_t *)l->in[1].data;
    a.add = l->add[0];
    a.heads = l->instr->attr.heads;
    a.head_size = (int)(a.x.cols / a.heads);
    a.pairs = tt__rotary_pairs_of(o);
    a.neighbours = o->pairs == TT_ROTARY_NEIGHBOURS;
    a.sign = l->instr->attr.scale;
    a.magnitude = o->magnitude;
    a.vector = is_wide(&a.x) && is_wide(&a.y) && a.pairs % 8 == 0 && a.head_size % 8 == 0;
    a.groups = (a.pairs + 7) / 8;
    a.spans = (a.heads + TURN_HEADS - 1) / TURN_HEADS;
    a.all = a.y.rows * a.groups * a.spans;
    double frequency[TT__MAX_PAIRS];
    tt__rotary_frequencies(o, frequency);
    for (int j = 0; j < a.pairs; j++) a.frequency[j] = (float)frequency[j];
    unsigned grid;
    const cudaError_t e = grid_of(l->device, rotary_kernel, TT__ROW_THREADS, 2,
                                  blocks_for(a.all, TT__ROW_THREADS), &grid);
    return e != cudaSuccess ? e : TT__LAUNCH(rotary_kernel, grid, TT__ROW_THREADS, 0, l->device->stream, a);
}
TT__RUN_BY(ROTARY, run_rotary)

// Sets y to a constant, multiplied by the loss scale if `scale` is not NULL. Writes y once.
struct op_fill {
    static constexpr int KIND = RARE;
    float x;
    const tt__scale_state *scale;
    __device__ void begin() { if (scale) x *= (float)scale->scale; }
    __device__ bool get(const group_args &, int64_t, int64_t, int, float (&v)[8]) const
    {
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] = x;
        return true;
    }
};

cudaError_t run_fill(const tt__launch *l)
{
    tt__device *d = l->device;
    const op_fill op = {l->instr->attr.scale, (const tt__scale_state *)l->in[0].data};
    return l->add[0] ? cudaSuccess : run_groups(d, no_operand, no_operand, l->out[0], false, false, op);
}
TT__RUN_BY(FILL, run_fill)

// Computes y = act(x); op_act_backward computes dx = dy * act'(saved). op_act and op_act_backward read and
// write each matrix once.
template <int ACT> struct op_act {
    static constexpr int KIND = ACT == TT__ACT_GELU || ACT == TT__ACT_GELU_TANH ? HOT : RARE;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        load_group(v, g.a, r, c, n, g.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] = activate(ACT, v[j]);
        return true;
    }
};

template <int ACT> struct op_act_backward {
    static constexpr int KIND = ACT == TT__ACT_GELU || ACT == TT__ACT_GELU_TANH ? HOT : RARE;
    __device__ void begin() {}
    __device__ void finish(bool, int64_t, int64_t, float (&v)[8], const float (&saved)[8]) const
    {
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] *= activation_slope(ACT, saved[j]);
    }
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        float saved[8];
        load_group(v, g.a, r, c, n, g.vector);
        load_group(saved, g.b, r, c, n, g.vector);
        finish(true, r, c, v, saved);
        return true;
    }
};

// Calls run(op), where op is OP<act> for the activation `act`.
template <template <int> class OP, class RUN> cudaError_t with_act(int act, RUN run)
{
#define TT__RUN_ACT(ACT, function, by_result) case TT__ACT_##ACT: return run(OP<TT__ACT_##ACT>());
    switch (act) { TT__ACTS(TT__RUN_ACT) }
#undef TT__RUN_ACT
    return cudaErrorInvalidValue; // there is no such activation
}

cudaError_t run_act(tt__device *d, int act, const tt__mat &x, const tt__mat &y, bool add)
{
    return with_act<op_act>(act, [&](auto op) { return run_groups(d, x, no_operand, y, add, false, op); });
}

cudaError_t run_slope(const tt__launch *l, int act, const tt__mat &dy, const tt__mat &saved,
                      const tt__mat &dx, bool add, const tt__mat &sums, bool add_sums)
{
    return with_act<op_act_backward>(act, [&](auto op) {
        return run_groups_sums(l, dy, saved, dx, add, false, op, sums, add_sums);
    });
}

cudaError_t run_activation(const tt__launch *l)
{
    return run_act(l->device, l->instr->attr.act, l->in[0], l->out[0], l->add[0]);
}
TT__RUN_BY(ACTIVATION, run_activation)

cudaError_t run_activation_backward(const tt__launch *l)
{
    return run_slope(l, l->instr->attr.act, l->in[0], l->in[1], l->out[0], l->add[0], l->out[1], l->add[1]);
}
TT__RUN_BY(ACTIVATION_BACKWARD, run_activation_backward)

// Arguments of the backward of swiglu, which works on groups of 8 columns, as each_group does. dgate or dup
// may be absent, or have the memory of an operand. Reads operands and writes results once.
struct swiglu_args { tt__mat dy, gate, up, dgate, dup; bool add_dgate, add_dup, vector; int64_t per_row; };

// Computes dgate and dup. X: dtype of all operands and results, or ANY.
template <int X> __global__ void __launch_bounds__(TT__ROW_THREADS, 2) swiglu_backward(swiglu_args g)
{
    tt__begin_kernel();
    if (X != ANY) {
        g.dy.dtype = g.gate.dtype = g.up.dtype = g.dgate.dtype = g.dup.dtype = (tt_dtype)X;
        g.vector = true;
    }
    const auto write = [&](const tt__mat &y, bool add, int64_t r, int64_t c, int n, float (&v)[8]) {
        float old[8];
        if (!y.data) return;
        if (add) {
            load_group(old, y, r, c, n, g.vector);
            TT__UNROLL for (int j = 0; j < 8; j++) v[j] += old[j];
        }
        store8(row_at(y, r), y.dtype, c, n, g.vector, v);
    };
    for (int64_t r = blockIdx.y; r < g.dy.rows; r += gridDim.y)
        for (int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x; k < g.per_row;
             k += (int64_t)gridDim.x * TT__ROW_THREADS) {
            const int64_t c = k * 8;
            const int n = X != ANY ? 8 : (int)min(g.dy.cols - c, (int64_t)8);
            float dy[8], gate[8], up[8];
            load_group(dy, g.dy, r, c, n, g.vector);
            load_group(gate, g.gate, r, c, n, g.vector);
            load_group(up, g.up, r, c, n, g.vector);
            TT__UNROLL for (int j = 0; j < 8; j++) {
                up[j] *= dy[j] * slope_SILU(gate[j]);
                dy[j] *= act_SILU(gate[j]);
            }
            write(g.dgate, g.add_dgate, r, c, n, up);
            write(g.dup, g.add_dup, r, c, n, dy);
        }
}

cudaError_t run_swiglu_backward(const tt__launch *l)
{
    swiglu_args g = {l->in[0], l->in[1], l->in[2], l->out[0], l->out[1], l->add[0], l->add[1], true, 0};
    const tt__mat *const all[5] = {&g.dy, &g.gate, &g.up, &g.dgate, &g.dup};
    bool alike = g.dy.cols % 8 == 0;
    if (g.dy.rows < 1) return cudaSuccess;
    for (int k = 0; k < 5; k++) {
        g.vector = g.vector && is_wide(all[k]);
        alike = alike && (!all[k]->data || all[k]->dtype == g.dy.dtype);
    }
    g.per_row = (g.dy.cols + 7) / 8;
    alike = alike && g.vector;
    const unsigned across = grid_for(g.per_row, TT__ROW_THREADS, 64);
    unsigned blocks;
    const auto kernel = alike && g.dy.dtype == TT_F32 ? swiglu_backward<TT_F32>
        : alike && g.dy.dtype == TT_BF16 ? swiglu_backward<TT_BF16>
        : alike && g.dy.dtype == TT_F16 ? swiglu_backward<TT_F16> : swiglu_backward<ANY>;
    const cudaError_t e = grid_of(l->device, kernel, TT__ROW_THREADS, 2, g.dy.rows * across, &blocks);
    if (e != cudaSuccess) return e;
    const dim3 grid(across, min((blocks + across - 1) / across, 65535u));
    return TT__LAUNCH(kernel, grid, TT__ROW_THREADS, 0, l->device->stream, g);
}
TT__RUN_BY(SWIGLU_BACKWARD, run_swiglu_backward)

// Computes y = x / (1 - p) for elements that dropout keeps, 0 for others, plus the residual if it is
// present. A group of 8 columns gets its 16-bit random numbers from Philox counter `{r, c / 8, 0, 0}`. Here
// c counts the columns of all ranks; r is number[row] or, if `number` is NULL, counts the rows of all ranks.
// Reads x and residual and writes y once; the random numbers take some 12 integer operations an element.
struct op_dropout {
    static constexpr int KIND = HOT;
    const tt__step_settings *run;
    const int32_t *number;
    int64_t first_row, first_col; // first_col is a multiple of 8
    uint32_t stream, drop;
    float scale;
    uint64_t key;
    __device__ void begin()
    {
        TT__SHARED(uint64_t, shared, );
        if (threadIdx.x == 0)
            shared = stream_key(run->seed, TT__RANDOM_DROPOUT, (uint64_t)run->step,
                                (uint64_t)run->micro << 32 | stream);
        __syncthreads();
        key = shared;
    }
    __device__ uint32_t number_of(int64_t r) const
    {
        return number ? (uint32_t)number[r] : (uint32_t)(first_row + r);
    }
    // Applies dropout to v, group number `group` of 8 columns of row number `row`.
    __device__ void apply(uint32_t row, uint32_t group, float (&v)[8]) const
    {
        const uint32_t counter[4] = {row, (uint32_t)(first_col / 8) + group, 0, 0};
        uint32_t u[4];
        philox<TT__DRAW_ROUNDS>(counter, key, u);
        TT__UNROLL for (int j = 0; j < 8; j++)
            v[j] = (u[j / 2] >> (j % 2 * 16) & 0xffff) >= drop ? v[j] * scale : 0.0f;
    }
    __device__ void finish(bool adds, int64_t r, int64_t c, float (&v)[8], const float (&residual)[8]) const
    {
        apply(number_of(r), (uint32_t)(c / 8), v);
        if (adds) TT__UNROLL for (int j = 0; j < 8; j++) v[j] += residual[j];
    }
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        float residual[8];
        load_group(v, g.a, r, c, n, g.vector);
        if (g.b.data) load_group(residual, g.b, r, c, n, g.vector);
        finish(g.b.data != NULL, r, c, v, residual);
        return true;
    }
};

op_dropout dropout_of(const tt__launch *l)
{
    const uint32_t drop = (uint32_t)TT__DROP_THRESHOLD(l->instr->attr.dropout);
    return {TT__RUN_OF(l), (const int32_t *)l->in[2].data, l->first_row, l->first_col, l->instr->random, drop,
            65536.0f / (float)(65536 - drop), 0};
}

cudaError_t run_dropout(const tt__launch *l)
{
    return run_groups_sums(l, l->in[0], l->in[1], l->out[0], l->add[0], true, dropout_of(l), l->out[1],
                           l->add[1]);
}
TT__RUN_BY(DROPOUT, run_dropout)

} // namespace

/* ==== src/ops/casts/cuda.cuh */
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

/* ==== src/ops/rows/cuda.cuh */
namespace {

// ------------------------------------------------------------------- rows: gather, scatter, pooling, patches

// Computes y[r], row `index[r] - first` of x, or zeros where x has no such row. Reads the rows of x and
// writes y.
struct op_gather {
    static constexpr int KIND = HOT_CASTS;
    const int32_t *index;
    int64_t first;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        const int64_t row = index[r] - first;
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] = 0;
        if (row >= 0 && row < g.a.rows) load_group(v, g.a, row, c, n, g.vector);
        return true;
    }
};

cudaError_t run_gather(const tt__launch *l)
{
    const bool embedding = l->instr->op == TT__OP_EMBEDDING;
    const op_gather op = {(const int32_t *)l->in[embedding ? 0 : 1].data,
                          embedding ? l->first_row - l->instr->attr.offset : 0};
    return run_groups(l->device, l->in[embedding ? 1 : 0], no_operand, l->out[0], l->add[0], true, op);
}
TT__RUN_BY(EMBEDDING, run_gather)
TT__RUN_BY(GATHER_ROWS, run_gather)

// Returns the sequence s that contains row r: start[s] <= r < start[s + 1].
__device__ __forceinline__ int64_t sequence_of(const int32_t *start, int64_t seqs, int64_t r)
{
    int64_t low = 0, high = seqs;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (start[middle] <= r) low = middle;
        else high = middle;
    }
    return low;
}

// Computes dx[r] = dy[s] / (number of rows of sequence s) or, if `sums`, dx[r] = dy[s], where s is the
// sequence of row r. Writes dx once.
struct op_mean_pool_backward {
    static constexpr int KIND = RARE;
    const int32_t *start;
    int64_t seqs;
    bool sums;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        const int64_t s = sequence_of(start, seqs, r);
        const float scale = sums ? 1.0f : 1.0f / (float)(start[s + 1] - start[s]);
        load_group(v, g.a, s, c, n, g.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] *= scale;
        return true;
    }
};

cudaError_t run_mean_pool_backward(const tt__launch *l)
{
    const op_mean_pool_backward op = {(const int32_t *)l->in[1].data, l->in[0].rows, l->instr->attr.sums};
    return run_groups(l->device, l->in[0], no_operand, l->out[0], l->add[0], true, op);
}
TT__RUN_BY(MEAN_POOL_BACKWARD, run_mean_pool_backward)

// Arguments of patches, which writes one patch to each row y[r], one channel after another. The patch has
// number `position[r] - 1` in the image of row r; if position[r] is 0, y[r] becomes zeros. A thread works on
// up to 8 pixels of a line of a patch, with all C channels. words: groups of 8 pixels begin at multiples of
// 4 bytes. Reads pixels and writes y once.
struct patches_args {
    const uint8_t *pixels;
    int64_t ld, seqs;
    const int32_t *position, *start;
    int width, patch;
    float scale[4], shift[4]; // factor and addend of the pixels of each channel
    tt__mat y;
    bool add, vector, words;
};

template <int C> __global__ void __launch_bounds__(TT__ROW_THREADS) patches(patches_args g)
{
    tt__begin_kernel();
    const unsigned across = (unsigned)(g.width / g.patch), area = (unsigned)(g.patch * g.patch);
    const unsigned runs = ((unsigned)g.patch + 7) / 8, each = runs * (unsigned)g.patch;
    for (int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x; k < g.y.rows * each;
         k += (int64_t)gridDim.x * TT__ROW_THREADS) {
        const int64_t r = g.y.rows * each > INT32_MAX ? k / each : (uint32_t)k / each;
        const unsigned unit = (unsigned)(k - r * each), line = unit / runs, x = unit % runs * 8;
        const int n = min(8, g.patch - (int)x), p = g.position[r] - 1;
        uint32_t pixels[2 * C]; // the bytes of 8 pixels, C channels each
        TT__UNROLL for (int i = 0; i < 2 * C; i++) pixels[i] = 0;
        if (p >= 0) {
            const int64_t corner = ((int64_t)((unsigned)p / across) * g.patch + line) * g.width
                + (unsigned)p % across * (unsigned)g.patch + x;
            const uint8_t *from = g.pixels + sequence_of(g.start, g.seqs, r) * g.ld + corner * C;
            if (g.words) {
                TT__UNROLL for (int i = 0; i < 2 * C; i++) pixels[i] = ((const uint32_t *)from)[i];
            } else {
                TT__UNROLL for (int i = 0; i < 8 * C; i++)
                    if (i < n * C) pixels[i / 4] |= (uint32_t)from[i] << (i % 4 * 8);
            }
        }
        TT__UNROLL for (int channel = 0; channel < C; channel++) {
            const int64_t c = channel * area + line * (unsigned)g.patch + x;
            float v[8], old[8];
            TT__UNROLL for (int j = 0; j < 8; j++) {
                const int i = j * C + channel;
                v[j] = p < 0 ? 0.0f
                    : (float)(pixels[i / 4] >> (i % 4 * 8) & 255) * g.scale[channel] + g.shift[channel];
            }
            if (g.add) {
                load_group(old, g.y, r, c, n, g.vector);
                TT__UNROLL for (int j = 0; j < 8; j++) v[j] += old[j];
            }
            store8(row_at(g.y, r), g.y.dtype, c, n, g.vector, v);
        }
    }
}

cudaError_t run_patches(const tt__launch *l)
{
    const tt_patch_options *o = &l->instr->attr.image;
    const tt__mat *y = &l->out[0];
    patches_args g = {(const uint8_t *)l->in[0].data, l->in[0].ld, l->in[2].rows - 1,
                      (const int32_t *)l->in[1].data, (const int32_t *)l->in[2].data, o->width, o->patch, {},
                      {}, *y, l->add[0], o->patch % 8 == 0 && is_wide(y), false};
    for (int c = 0; c < o->channels; c++) {
        g.scale[c] = 1 / (255 * o->std[c]);
        g.shift[c] = -o->mean[c] / o->std[c];
    }
    // words: whether all lines of images, and so all groups of 8 pixels, begin at multiples of 4 bytes.
    const uintptr_t pitches = (uintptr_t)g.ld | (uintptr_t)(o->width * o->channels);
    g.words = o->patch % 8 == 0 && ((uintptr_t)g.pixels | pitches) % 4 == 0;
    if (!y->rows) return cudaSuccess;
    const auto kernel = o->channels == 1 ? patches<1> : o->channels == 2 ? patches<2>
        : o->channels == 3 ? patches<3> : patches<4>;
    unsigned grid;
    const int64_t units = y->rows * ((o->patch + 7) / 8) * o->patch;
    const cudaError_t e = grid_of(l->device, kernel, TT__ROW_THREADS, 2, blocks_for(units, TT__ROW_THREADS),
                                  &grid);
    return e != cudaSuccess ? e : TT__LAUNCH(kernel, grid, TT__ROW_THREADS, 0, l->device->stream, g);
}
TT__RUN_BY(PATCHES, run_patches)

// ---- sums over rows

// Loads columns [c, c + n) of the N rows that `rows` lists; a negative number stands for a row of zeros. All
// loads are in flight together.
template <int N>
__device__ __forceinline__ void load_rows(float (&v)[N][8], const tt__mat &m, const int64_t (&rows)[N],
                                          int64_t c, int n, bool vector)
{
    if (!vector || n < 8) {
        TT__UNROLL for (int k = 0; k < N; k++)
            load_group(v[k], m, rows[k] < 0 ? 0 : rows[k], c, rows[k] < 0 ? 0 : n, false);
    } else if (m.dtype == TT_F32) {
        TT__UNROLL for (int k = 0; k < N; k++) {
            const float4 zero = make_float4(0, 0, 0, 0),
                *p = (const float4 *)((const float *)m.data + rows[k] * m.ld + c);
            const float4 a = rows[k] < 0 ? zero : p[0], b = rows[k] < 0 ? zero : p[1];
            v[k][0] = a.x; v[k][1] = a.y; v[k][2] = a.z; v[k][3] = a.w; v[k][4] = b.x; v[k][5] = b.y;
            v[k][6] = b.z; v[k][7] = b.w;
        }
    } else {
        uint4 u[N];
        TT__UNROLL for (int k = 0; k < N; k++)
            u[k] = rows[k] < 0 ? make_uint4(0, 0, 0, 0)
                : *(const uint4 *)((const uint16_t *)m.data + rows[k] * m.ld + c);
        TT__WITH_HALF(m.dtype, T, TT__UNROLL for (int k = 0; k < N; k++) widen8<T>(v[k], u[k]));
    }
}

// Sets y[s] to the mean or, if `sums`, to the sum of the rows of sequence s. A block sums 256 columns of a
// sequence; each warp of the block sums every eighth row. Reads x once.
__global__ void __launch_bounds__(TT__ROW_THREADS) mean_pool(tt__mat x, const int32_t *start, tt__mat y,
                                                             bool add, bool sums, bool vector)
{
    tt__begin_kernel();
    const int64_t s = blockIdx.x, from = start[s], to = start[s + 1], column = (int64_t)blockIdx.y * 256;
    const int64_t c = column + threadIdx.x % 32 * 8;
    const int n = (int)min(x.cols - c, (int64_t)8);
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[4][8];
    for (int64_t r = from + threadIdx.x / 32; r < to && n > 0; r += 32) {
        const int64_t rows[4] = {r, r + 8 < to ? r + 8 : -1, r + 16 < to ? r + 16 : -1,
                                 r + 24 < to ? r + 24 : -1};
        load_rows(v, x, rows, c, n, vector);
        TT__UNROLL for (int k = 0; k < 4; k++)
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += v[k][j];
    }
    float mean = sum_warps(sum) * (sums ? 1.0f : 1.0f / (float)(to - from));
    const int64_t at = s * y.ld + column + threadIdx.x;
    if (column + threadIdx.x >= y.cols) return;
    if (add) mean += load_any(y.data, y.dtype, at);
    store_any(y.data, y.dtype, at, mean);
}

cudaError_t run_mean_pool(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *y = &l->out[0];
    if (!y->rows) return cudaSuccess;
    return TT__LAUNCH(mean_pool, dim3((unsigned)y->rows, blocks_for(y->cols, 256)), TT__ROW_THREADS, 0,
                      d->stream, l->in[0], (const int32_t *)l->in[1].data, *y, l->add[0], l->instr->attr.sums,
                      is_wide(&l->in[0]));
}
TT__RUN_BY(MEAN_POOL, run_mean_pool)

// ---- set_rows: a bit marks each row that the index lists, because the index may list a row twice

__global__ void __launch_bounds__(TT__ROW_THREADS) mark_rows(const int32_t *index, int64_t n, unsigned *bits)
{
    tt__begin_kernel();
    const int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x;
    if (k < n) atomicOr(bits + (index[k] >> 5), 1u << (index[k] & 31));
}

size_t bits_bytes(int64_t rows) { return tt__align_to(((size_t)rows + 7) / 8, TT__CUDA_ALIGN); }

cudaError_t run_mark_rows(const tt__launch *l, int64_t rows)
{
    tt__device *d = l->device;
    cudaError_t e = cudaMemsetAsync(resident_of(l)->words, 0, bits_bytes(rows), d->stream);
    if (e != cudaSuccess || !l->in[1].rows) return e;
    return TT__LAUNCH(mark_rows, blocks_for(l->in[1].rows, TT__ROW_THREADS), TT__ROW_THREADS, 0, d->stream,
                      (const int32_t *)l->in[1].data, l->in[1].rows, resident_of(l)->words);
}

// Sets y[r] to b where the bit of row r is set, and to x[r] elsewhere. If y has the memory of x, writes only
// the set rows; otherwise reads x and writes y once. In the backward, b is absent: y[r] becomes 0 where the
// bit is set or, if `add`, stays as it is.
struct op_set_rows {
    static constexpr int KIND = RARE;
    const unsigned *bits;
    bool in_place, add; // in_place: y has the memory of x; add: y[r] += x[r] where row r is not set
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        const bool set = bits[r >> 5] >> (r & 31) & 1;
        if (!set) {
            if (in_place) return false;
            load_group(v, g.a, r, c, n, g.vector);
            if (add) {
                float old[8];
                load_group(old, g.y, r, c, n, g.vector);
                TT__UNROLL for (int j = 0; j < 8; j++) v[j] += old[j];
            }
        } else if (g.b.data) {
            load_group(v, g.b, 0, c, n, g.vector);
        } else {
            if (add) return false;
            TT__UNROLL for (int j = 0; j < 8; j++) v[j] = 0;
        }
        return true;
    }
};

cudaError_t run_set_rows(const tt__launch *l)
{
    const op_set_rows op = {resident_of(l)->words, l->in[0].data == l->out[0].data, l->add[0]};
    cudaError_t e = run_mark_rows(l, l->out[0].rows);
    return e == cudaSuccess ? run_groups(l->device, l->in[0], l->in[2], l->out[0], false, true, op) : e;
}
TT__RUN_BY(SET_ROWS, run_set_rows, MAX_SET_ROWS)

// Copies row r of x to row index[r] of y. Reads x and writes the rows of y once.
__global__ void __launch_bounds__(TT__ROW_THREADS) store_rows(tt__mat x, const int32_t *index, tt__mat y,
                                                              int64_t groups, bool vector)
{
    tt__begin_kernel();
    const int64_t all = x.rows * groups;
    for (int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x; k < all;
         k += (int64_t)gridDim.x * TT__ROW_THREADS) {
        const int64_t r = k / groups, c = k % groups * 8;
        const int n = (int)min((int64_t)8, x.cols - c);
        float v[8];
        load_group(v, x, r, c, n, vector);
        store8(row_at(y, index[r]), y.dtype, c, n, vector, v);
    }
}

cudaError_t run_store_rows(const tt__launch *l)
{
    const tt__mat &x = l->in[0], &y = l->out[0];
    const int64_t groups = (x.cols + 7) / 8;
    const int64_t blocks = min((x.rows * groups + TT__ROW_THREADS - 1) / TT__ROW_THREADS, (int64_t)2112);
    return TT__LAUNCH(store_rows, (unsigned)blocks, TT__ROW_THREADS, 0, l->device->stream, x,
                      (const int32_t *)l->in[1].data, y, groups, is_wide(&x) && is_wide(&y));
}
TT__RUN_BY(STORE_ROWS, run_store_rows)

// Sums the rows of dy whose bits are set, and writes the sum of column c to partial[blockIdx.x][c]. A block
// sums 256 columns of the rows of `words` words of bits, 32 rows a word; each warp takes every eighth word.
__global__ void __launch_bounds__(TT__ROW_THREADS) sum_set_rows(tt__mat dy, const unsigned *bits,
                                                                int64_t words, float *partial, bool vector)
{
    tt__begin_kernel();
    const int64_t column = (int64_t)blockIdx.y * 256, c = column + threadIdx.x % 32 * 8;
    const int64_t end = min((blockIdx.x + 1) * words, (dy.rows + 31) / 32);
    const int n = (int)min(dy.cols - c, (int64_t)8);
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[8];
    for (int64_t k = blockIdx.x * words + threadIdx.x / 32; k < end && n > 0; k += 8) {
        for (unsigned left = bits[k]; left; left &= left - 1) {
            load_group(v, dy, k * 32 + __ffs((int)left) - 1, c, n, vector);
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += v[j];
        }
    }
    const float all = sum_warps(sum);
    if (column + threadIdx.x < dy.cols) partial[blockIdx.x * dy.cols + column + threadIdx.x] = all;
}

cudaError_t run_set_rows_backward(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *dy = &l->in[0];
    const size_t used = bits_bytes(dy->rows);
    const unsigned *bits = resident_of(l)->words;
    float *partial = resident_of(l)->sums + used / sizeof(float);
    cudaError_t e = run_mark_rows(l, dy->rows);
    if (e == cudaSuccess && l->out[1].data) { // sums dy first, because dx may have the memory of dy
        const int64_t all = (dy->rows + 31) / 32;
        const int64_t blocks = sum_blocks(d, 2, (all + 7) / 8, used, (size_t)dy->cols * 4);
        const int64_t words = (all + blocks - 1) / blocks;
        e = TT__LAUNCH(sum_set_rows, dim3((unsigned)blocks, blocks_for(dy->cols, 256)), TT__ROW_THREADS, 0,
                       d->stream, *dy, bits, words, partial, is_wide(dy));
        if (e == cudaSuccess) e = run_finish_sums(d, partial, blocks, dy->cols, &l->out[1], l->add[1]);
    }
    if (e != cudaSuccess || !l->out[0].data) return e;
    const op_set_rows op = {bits, dy->data == l->out[0].data && !l->add[0], l->add[0]};
    return run_groups(d, *dy, no_operand, l->out[0], false, true, op);
}
TT__RUN_BY(SET_ROWS_BACKWARD, run_set_rows_backward, MAX_SET_ROWS, MAX_SUM_COLUMNS)

} // namespace

/* ==== src/ops/embedding/cuda.cuh */
namespace {

// ---- gradients of tables: sort the rows of dy by id, and for equal ids by row; then sum rows of equal ids

#ifndef TT__SORT_TILES // max number of blocks of the radix sort, smaller in tests
#define TT__SORT_TILES 128
#endif
enum { TT__SORT_STEP = 1024 }; // number of ids that a block sorts at a time

// The kernels below run only once or twice in a step, so the device reads their code from its memory each
// time. Short code therefore saves more time than unrolled loops.

// Loads from[k], from[k + 32], from[k + 64] and from[k + 96], with all loads in flight together. Elements
// from number `end` on are 0.
__device__ __forceinline__ void load_ids(int32_t (&to)[4], const int32_t *from, int64_t k, int64_t end)
{
    TT__UNROLL for (int u = 0; u < 4; u++) to[u] = k + u * 32 < end ? from[k + u * 32] : 0;
}

// Sets counts[block][digit] to the number of the block's ids that have this digit. A digit is the 8 bits of
// an id from bit `shift` on.
__global__ void __launch_bounds__(TT__ROW_THREADS) count_digits(const int32_t *ids, int64_t n, int shift,
                                                                int64_t tile, unsigned *counts)
{
    tt__begin_kernel();
    TT__SHARED(unsigned, count, [256]);
    const int64_t from = (int64_t)blockIdx.x * tile, to = min(n, from + tile);
    count[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t at = from; at < to; at += TT__SORT_STEP) {
        const int64_t k = at + threadIdx.x / 32 * 128 + threadIdx.x % 32;
        int32_t id[4];
        load_ids(id, ids, k, to);
        TT__UNROLL for (int u = 0; u < 4; u++)
            if (k + u * 32 < to) atomicAdd(&count[(uint32_t)id[u] >> shift & 255], 1u);
    }
    __syncthreads();
    counts[(int64_t)blockIdx.x * 256 + threadIdx.x] = count[threadIdx.x];
}

// Sorts ids, and their rows, by digit. Ids with the same digit keep their order. If rows is NULL, the rows
// are 0, 1, ... Thread k of a block computes the counts and places of digit k.
__global__ void __launch_bounds__(TT__ROW_THREADS) scatter_digits(const int32_t *ids, const int32_t *rows,
                                                                  int64_t n, int shift, int64_t tile,
                                                                  const unsigned *counts, int32_t *to_ids,
                                                                  int32_t *to_rows)
{
    tt__begin_kernel();
    TT__SHARED(unsigned, place, [8][256]); // where each warp puts its next id with a given digit
    TT__SHARED(unsigned, totals, [8]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t from = (int64_t)blockIdx.x * tile, to = min(n, from + tile);
    unsigned before = 0, all = 0;
    for (unsigned b = 0; b < gridDim.x; b += 8) {
        unsigned count[8];
        TT__UNROLL for (unsigned u = 0; u < 8; u++)
            count[u] = b + u < gridDim.x ? counts[(int64_t)(b + u) * 256 + threadIdx.x] : 0;
        TT__UNROLL for (unsigned u = 0; u < 8; u++) {
            before += b + u < blockIdx.x ? count[u] : 0;
            all += count[u];
        }
    }
    unsigned sum = all; // becomes the number of ids with the digits of the warp's threads up to this thread
    for (int m = 1; m < 32; m *= 2) {
        const unsigned other = __shfl_up_sync(0xffffffffu, sum, m);
        if (lane >= m) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    TT__UNROLL for (int w = 0; w < 7; w++) before += w < warp ? totals[w] : 0;
    before += sum - all;
    for (int64_t at = from; at < to; at += TT__SORT_STEP) {
        const int64_t first = at + warp * 128 + lane;
        unsigned rank[4];
        int32_t id[4], row[4];
        load_ids(id, ids, first, to);
        TT__UNROLL for (int u = 0; u < 4; u++) row[u] = (int32_t)(first + u * 32);
        if (rows) load_ids(row, rows, first, to);
        TT__UNROLL for (int k = 0; k < 8; k++) place[warp][k * 32 + lane] = 0;
        __syncwarp();
        // rank: the number of ids with the same digit that come before an id among the warp's 128 ids.
        TT__UNROLL for (int u = 0; u < 4; u++) {
            const bool there = first + u * 32 < to;
            const unsigned digit = (uint32_t)id[u] >> shift & 255;
            const unsigned same = __match_any_sync(0xffffffffu, there ? digit : 256);
            const unsigned lower = same & ((1u << lane) - 1);
            rank[u] = place[warp][digit] + (unsigned)__popc(lower);
            __syncwarp();
            if (there && !lower) place[warp][digit] = rank[u] + (unsigned)__popc(same);
            __syncwarp();
        }
        __syncthreads();
        for (int w = 0; w < 8; w++) {
            const unsigned count = place[w][threadIdx.x];
            place[w][threadIdx.x] = before;
            before += count;
        }
        __syncthreads();
        TT__UNROLL for (int u = 0; u < 4; u++) {
            if (first + u * 32 >= to) continue;
            const unsigned p = place[warp][(uint32_t)id[u] >> shift & 255] + rank[u];
            to_ids[p] = id[u];
            to_rows[p] = row[u];
        }
        __syncwarp();
    }
}

// Sorts up to TT__RANKED ids and their rows in one step: the place of an id is the number of ids that come
// before the id. A block finds the places of 32 ids; each of its 8 warps compares the 32 ids with an eighth
// of all ids. The other blocks write zeros to `zero`.
#ifndef TT__RANKED // tests make TT__RANKED smaller
#define TT__RANKED 8192
#endif
enum { TT__ZEROS = 4096 }; // number of 16-byte vectors of zeros that a block writes at a time
__global__ void __launch_bounds__(TT__ROW_THREADS) rank_ids(const int32_t *ids, int n, int32_t *to_ids,
                                                            int32_t *to_rows, uint4 *zero,
                                                            int64_t zero_vectors)
{
    tt__begin_kernel();
    const int ranking = (n + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    TT__SHARED(int32_t, all, [(TT__RANKED + 255) / 256 * 256]);
    TT__SHARED(unsigned, before, [8][32]);
    if ((int)blockIdx.x >= ranking) {
        const int64_t step = (int64_t)(gridDim.x - ranking) * TT__ZEROS;
        const int64_t begin = (int64_t)(blockIdx.x - ranking) * TT__ZEROS + threadIdx.x;
        TT__ROLLED for (int64_t k = begin; k < zero_vectors; k += step)
            TT__UNROLL for (int u = 0; u < TT__ZEROS; u += TT__ROW_THREADS)
                if (k + u < zero_vectors) zero[k + u] = make_uint4(0, 0, 0, 0);
        return;
    }
    const int from = (int)blockIdx.x * 32, each = ((n + 7) / 8 + 31) / 32 * 32; // each: ids per warp
    const int whole = (uintptr_t)ids % 16 == 0 ? n / 4 * 4 : 0;
    TT__ROLLED for (int k = threadIdx.x * 4; k < whole; k += 4 * TT__ROW_THREADS)
        tt__cp_async_16(all + k, ids + k);
    TT__ROLLED for (int k = whole + threadIdx.x; k < n; k += TT__ROW_THREADS)
        tt__cp_async_4(all + k, ids + k);
    // Pads the ids to 8 * each with fewer than 256 large ids.
    if (n + (int)threadIdx.x < 8 * each) all[n + threadIdx.x] = INT32_MAX - 1;
    tt__cp_async_commit();
    tt__cp_async_wait<0>();
    __syncthreads();
    const int32_t id = all[from + lane];
    unsigned count = 0;
    for (int at = warp * each; at < (warp + 1) * each; at += 32) {
        // Counts ids below `id` and, if they come before the block's 32 ids, also ids equal to `id`.
        const int32_t largest = id + (at < from);
        TT__UNROLL for (int k = 0; k < 32; k += 4) {
            const int4 of = *(const int4 *)(all + at + k);
            // The sign of a difference costs less than a comparison. The numbers are not negative, so no
            // difference overflows.
            count += (unsigned)(of.x - largest) >> 31;
            count += (unsigned)(of.y - largest) >> 31;
            count += (unsigned)(of.z - largest) >> 31;
            count += (unsigned)(of.w - largest) >> 31;
        }
    }
    TT__UNROLL for (int k = warp * 4; k < warp * 4 + 4; k++) count += k < lane && all[from + k] == id;
    before[warp][lane] = count;
    __syncthreads();
    if (warp || from + lane >= n) return;
    TT__UNROLL for (int k = 1; k < 8; k++) count += before[k][lane];
    to_ids[count] = id;
    to_rows[count] = from + lane;
}

enum { TT__SUMMED = 16 }; // max vectors in flight to each thread of sum_ids

// Copies 8 columns of row r, beginning with column c, asynchronously to shared memory as whole vectors.
__device__ __forceinline__ void copy_group(uint4 *to, const tt__mat &m, int64_t r, int64_t c)
{
    const int vectors = m.dtype == TT_F32 ? 2 : 1;
    const uint4 *p = (const uint4 *)row_at(m, r) + c / 8 * vectors;
    tt__cp_async_16(to, p);
    if (vectors == 2) tt__cp_async_16(to + 1, p + 1);
}

// Sums the rows of dy that have equal ids. A thread block sums a chunk of `chunk` rows in sorted order. The
// sum of an id whose rows are all in the chunk goes to row `id - first` of `to`, and is dropped if `to` has
// no such row. The sum of an id with rows in other chunks is partial: it goes to partial[block][0] if the
// chunk before has rows of the id, else to partial[block][1]. wide: dy and `to` have whole groups of 8
// columns at multiples of 16 bytes, and shared memory has room for the rows in flight. Reads dy and writes
// the rows of `to` once.
__global__ void __launch_bounds__(128) sum_ids(const int32_t *ids, const int32_t *rows, int64_t n, tt__mat dy,
                                               tt__mat to, int64_t first, bool add, bool wide, int64_t chunk,
                                               float *partial)
{
    tt__begin_kernel();
    TT__DYN_SHARED(uint4, coming);
    // Ids of the row before, of up to `largest` rows, and of the row after.
    TT__SHARED(int32_t, id, [TT__SUMMED + 2]);
    TT__SHARED(int32_t, row, [TT__SUMMED]);
    const int64_t from = (int64_t)blockIdx.x * chunk, end = min(n, from + chunk);
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const int width = (int)max((int64_t)0, min(dy.cols - c, (int64_t)8)), t = (int)threadIdx.x;
    const bool copies = wide && width > 0;
    const int vectors = dy.dtype == TT_F32 || (add && to.dtype == TT_F32) ? 2 : 1; // vectors in 8 columns
    const int largest = TT__SUMMED / vectors / (add ? 2 : 1), step = (int)blockDim.x * vectors;
    // own: the thread's columns of rows of dy; old: the thread's columns of rows of `to`.
    uint4 *const own = coming + t * vectors, *const old = own + largest * step;
    const tt__mat parts = {partial, TT_F32, 0, dy.cols, dy.cols};
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[8];
    bool began = false;
    TT__ROLLED for (int64_t k = from; k < end; k += largest) {
        const int count = (int)min(end - k, (int64_t)largest);
        __syncthreads();
        if (t < count + 2) id[t] = k + t > 0 && k + t <= n ? ids[k + t - 1] : -1; // -1: no row; ids are >= 0
        if (t < count) row[t] = rows[k + t];
        __syncthreads();
        TT__ROLLED for (int u = 0; u < count && copies; u++) {
            const int64_t r = id[u + 1] - first;
            copy_group(own + u * step, dy, row[u], c);
            if (add && id[u + 2] != id[u + 1] && r >= 0 && r < to.rows) copy_group(old + u * step, to, r, c);
        }
        tt__cp_async_commit();
        tt__cp_async_wait<0>();
        if (k == from) began = id[0] == id[1];
        TT__ROLLED for (int u = 0; u < count && width > 0; u++) {
            if (copies) load8(v, own + u * step, dy.dtype, 0, 8, true);
            else load_group(v, dy, row[u], c, width, false);
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += v[j];
            const bool last = id[u + 2] != id[u + 1];
            if (!last && k + u + 1 < end) continue;
            const int64_t r = id[u + 1] - first;
            if (began || !last) {
                store8(row_at(parts, (int64_t)blockIdx.x * 2 + !began), TT_F32, c, width, wide, sum);
            } else if (r >= 0 && r < to.rows) {
                if (add && copies) load8(v, old + u * step, to.dtype, 0, 8, true);
                else if (add) load_group(v, to, r, c, width, false);
                TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += add ? v[j] : 0;
                store8(row_at(to, r), to.dtype, c, width, wide, sum);
            }
            began = false;
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] = 0;
        }
    }
}

// Sums the partial sums of ids whose rows are in several chunks. The block of the chunk in which an id begins
// sums the partial sums of this id.
__global__ void __launch_bounds__(128) join_ids(const int32_t *ids, int64_t n, tt__mat to, int64_t first,
                                                bool add, bool vector, int64_t chunk, float *partial)
{
    tt__begin_kernel();
    const int64_t from = (int64_t)blockIdx.x * chunk, end = from + chunk;
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const int width = (int)min(to.cols - c, (int64_t)8);
    if (end >= n || width <= 0 || ids[end] != ids[end - 1]) return;
    const int32_t id = ids[end];
    const int64_t row = id - first;
    if ((from > 0 && ids[from - 1] == id) || row < 0 || row >= to.rows) return;
    int64_t low = end, high = n; // ids[low] == id; ids from ids[high] on are larger
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (ids[middle] == id) low = middle;
        else high = middle;
    }
    const int64_t last = low / chunk;
    const tt__mat parts = {partial, TT_F32, 2 * last + 2, to.cols, to.cols};
    const bool whole = to.cols % 8 == 0;
    float sum[8], v[8][8];
    load_group(sum, parts, (int64_t)blockIdx.x * 2 + 1, c, width, whole);
    for (int64_t b = blockIdx.x + 1; b <= last; b += 8) { // 8 loads are in flight at a time
        int64_t at[8];
        TT__UNROLL for (int u = 0; u < 8; u++) at[u] = b + u <= last ? (b + u) * 2 : -1;
        load_rows(v, parts, at, c, width, whole);
        TT__UNROLL for (int u = 0; u < 8; u++)
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += v[u][j];
    }
    if (add) {
        float old[8];
        load_group(old, to, row, c, width, vector);
        TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += old[j];
    }
    store8(row_at(to, row), to.dtype, c, width, vector, sum);
}

cudaError_t run_table_backward(const tt__launch *l)
{
    tt__device *d = l->device;
    const bool embedding = l->instr->op == TT__OP_EMBEDDING_BACKWARD;
    const tt__mat *index = &l->in[embedding ? 0 : 1], *dy = &l->in[embedding ? 1 : 0], *to = &l->out[0];
    const int64_t n = index->rows, first = embedding ? l->first_row - l->instr->attr.offset : 0;
    const int64_t ids_end = embedding && l->whole_rows ? l->whole_rows : to->rows;
    const size_t each = tt__align_to((size_t)n * sizeof(int32_t), TT__CUDA_ALIGN);
    int32_t *array[4]; // two pairs of arrays: ids and rows
    for (int k = 0; k < 4; k++) array[k] = (int32_t *)((char *)l->workspace + k * each);
    const int32_t *ids = (const int32_t *)index->data, *rows = NULL;
    const bool ranked = n > 0 && n <= TT__RANKED;
    const size_t bytes = (size_t)to->rows * (size_t)to->cols * tt_dtype_bytes(to->dtype);
    const bool filled = ranked && to->ld == to->cols && (uintptr_t)to->data % 16 == 0 && bytes % 16 == 0;
    const op_fill zero = {0, NULL};
    cudaError_t e = cudaSuccess;
    if (!l->add[0] && !filled) e = run_groups(d, no_operand, no_operand, *to, false, false, zero);
    if (!n) return e;
    if (e == cudaSuccess && ranked) {
        const int64_t vectors = l->add[0] || !filled ? 0 : (int64_t)(bytes / 16);
        const int64_t fill = min((vectors + TT__ZEROS - 1) / TT__ZEROS,
                                 8 * (int64_t)d->properties.multiProcessorCount);
        e = TT__LAUNCH(rank_ids, blocks_for(n, 32) + (unsigned)fill, TT__ROW_THREADS, 0, d->stream, ids,
                       (int)n, array[0], array[1], (uint4 *)to->data, vectors);
        ids = array[0];
        rows = array[1];
    }
    const int64_t tiles = min((n + TT__SORT_STEP - 1) / TT__SORT_STEP, (int64_t)TT__SORT_TILES);
    const int64_t tile = ((n + tiles - 1) / tiles + TT__SORT_STEP - 1) / TT__SORT_STEP * TT__SORT_STEP;
    const int64_t blocks = (n + tile - 1) / tile;
    for (int shift = 0; e == cudaSuccess && !ranked && (shift == 0 || (ids_end - 1) >> shift > 0);
         shift += 8) {
        int32_t *to_ids = array[shift / 8 % 2 * 2], *to_rows = array[shift / 8 % 2 * 2 + 1];
        e = TT__LAUNCH(count_digits, (unsigned)blocks, TT__ROW_THREADS, 0, d->stream, ids, n, shift, tile,
                       resident_of(l)->words);
        if (e == cudaSuccess)
            e = TT__LAUNCH(scatter_digits, (unsigned)blocks, TT__ROW_THREADS, 0, d->stream, ids, rows, n,
                           shift, tile, resident_of(l)->words, to_ids, to_rows);
        ids = to_ids;
        rows = to_rows;
    }
    const int64_t room = max((int64_t)1, (int64_t)(resident_workspace::BYTES / ((size_t)dy->cols * 8)));
    const int64_t chunk = max((int64_t)(ranked ? 16 : 32), (n + room - 1) / room);
    const unsigned threads = dy->cols <= 256 ? 32 : dy->cols <= 512 ? 64 : dy->cols <= 768 ? 96 : 128;
    const dim3 grid(blocks_for(n, chunk), blocks_for(dy->cols, threads * 8));
    const bool vector = is_wide(dy) && is_wide(to), whole = vector && dy->cols % 8 == 0;
    if (e == cudaSuccess)
        e = TT__LAUNCH(sum_ids, grid, threads, whole ? threads * TT__SUMMED * sizeof(uint4) : 0, d->stream,
                       ids, rows, n, *dy, *to, first, l->add[0], whole, chunk, resident_of(l)->sums);
    if (e == cudaSuccess && n > chunk)
        e = TT__LAUNCH(join_ids, grid, threads, 0, d->stream, ids, n, *to, first, l->add[0], vector, chunk,
                       resident_of(l)->sums);
    return e;
}
TT__RUN_BY(EMBEDDING_BACKWARD, run_table_backward, 0, MAX_SUM_COLUMNS)
TT__RUN_BY(GATHER_ROWS_BACKWARD, run_table_backward, 0, MAX_SUM_COLUMNS)

} // namespace

/* ==== src/ops/losses/cuda.cuh */
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

/* ==== src/ops/norm/cuda.cuh */
namespace {

// ---- layernorm

// A thread of a row. Whole warps share a row, and each thread has 8 of the row's columns. The columns are
// neighbours if `vector`; otherwise they are `of` columns apart, where `of` is the number of threads that
// share the row.
struct row_thread {
    int at, of; // number of the thread among the `of` threads that share a row
    bool vector;
    __device__ int64_t column(int j) const { return vector ? at * 8 + j : j * of + at; }
};
inline int row_threads(int64_t cols) { return (int)((cols + 255) / 256 * 32); }

// Loads the thread's columns of row r. Columns after the last become 0, as does the whole row unless `there`.
template <int X>
__device__ __forceinline__ void fetch_row(row_bits<X> &to, const tt__mat &m, int64_t r, const row_thread &t,
                                          bool there = true)
{
    if constexpr (X == ANY) {
        const int64_t cols = there ? m.cols : 0;
        if (t.vector) {
            load_group(to.v, m, r, t.column(0), t.column(0) < cols ? 8 : 0, true);
        } else {
            TT__UNROLL for (int j = 0; j < 8; j++)
                to.v[j] = t.column(j) < cols ? load_any(m.data, m.dtype, r * m.ld + t.column(j)) : 0;
        }
    } else {
        constexpr int N = X == TT_F32 ? 2 : 1;
        const uint4 *p = (const uint4 *)((const char *)m.data + r * m.ld * (X == TT_F32 ? 4 : 2)) + t.at * N;
        TT__UNROLL for (int h = 0; h < N; h++)
            to.q[h] = there && t.at * 8 < (int)m.cols ? p[h] : make_uint4(0, 0, 0, 0);
    }
}

// Loads the thread's columns of the weights w, and adds `offset` to them.
template <int W>
__device__ __forceinline__ void load_weights(float (&to)[8], row_bits<W> &bits, const tt__mat &w,
                                             const row_thread &t, float offset)
{
    fetch_row(bits, w, 0, t);
    widen_row(to, bits);
    TT__UNROLL for (int j = 0; j < 8; j++) to[j] += offset;
}

// Stores v to row r of m. Sets v to the numbers as rounded to the dtype of m.
template <int X>
__device__ __forceinline__ void put_row(const tt__mat &m, int64_t r, const row_thread &t, float (&v)[8])
{
    if constexpr (X == ANY) {
        if (t.vector) {
            if (t.column(0) < m.cols) store8(row_at(m, r), m.dtype, t.column(0), 8, true, v);
        } else {
            TT__UNROLL for (int j = 0; j < 8; j++)
                if (t.column(j) < m.cols) store_any(m.data, m.dtype, r * m.ld + t.column(j), v[j]);
        }
        round8(v, m.dtype);
    } else {
        constexpr int N = X == TT_F32 ? 2 : 1;
        uint4 *p = (uint4 *)((char *)m.data + r * m.ld * (X == TT_F32 ? 4 : 2)) + t.at * N;
        const bool there = t.at * 8 < (int)m.cols;
        if constexpr (X == TT_F32) {
            if (there) store8(p, TT_F32, 0, 8, true, v);
        } else {
            const uint4 q = make_uint4(pack<bf16>(v[0], v[1]), pack<bf16>(v[2], v[3]),
                                       pack<bf16>(v[4], v[5]), pack<bf16>(v[6], v[7]));
            if (there) *p = q;
            widen8<bf16>(v, q);
        }
    }
}

template <int X> __device__ __forceinline__ void add_row(float (&v)[8], const row_bits<X> &from)
{
    float u[8];
    widen_row(u, from);
    TT__UNROLL for (int j = 0; j < 8; j++) v[j] += u[j];
}

// Sums each of N numbers (1, 2 or 4) over the threads of a row: `warps` warps, at most MAX, beginning with
// warp `first` of the block. All threads of the block must call the function. `part` has a row for each warp
// of the block; no thread may still read `part` from an earlier call.
template <int MAX, int N>
__device__ __forceinline__ void row_sums(float (&v)[N], float (*part)[N], int first, int warps)
{
    const int lane = threadIdx.x % 32;
    int m = 16;
    TT__UNROLL for (int n = N; n > 1; n /= 2, m /= 2) // in each step, a lane keeps half of its numbers
        TT__UNROLL for (int k = 0; k < n / 2; k++) {
            const float keep = lane & m ? v[k + n / 2] : v[k], give = lane & m ? v[k] : v[k + n / 2];
            v[k] = keep + __shfl_xor_sync(0xffffffffu, give, m);
        }
    TT__UNROLL for (; m; m >>= 1) v[0] += __shfl_xor_sync(0xffffffffu, v[0], m);
    if (lane % (32 / N) == 0) part[threadIdx.x / 32][lane / (32 / N)] = v[0];
    __syncthreads();
    TT__UNROLL for (int n = 0; n < N; n++) v[n] = 0;
    TT__UNROLL for (int k = 0; k < MAX; k++)
        if (k < warps)
            TT__UNROLL for (int n = 0; n < N; n++) v[n] += part[first + k][n];
}

// Statistics of a row: mean and 1 / std. For rmsnorm, `centred` is false, mean is 0 and rstd is 1 / rms.
struct row_stats { bool centred; float mean, rstd; };

__device__ __forceinline__ void set_stats(const tt__mat &stats, int64_t r, bool centred, float mean,
                                          float rstd)
{
    float *at = (float *)stats.data + r * stats.ld;
    if (centred) *at++ = mean;
    *at = rstd;
}

__device__ __forceinline__ row_stats get_stats(const tt__mat &stats, int64_t r)
{
    const float *at = (const float *)stats.data + r * stats.ld;
    const bool centred = stats.cols == 2;
    return {centred, centred ? at[0] : 0.0f, at[centred]};
}

// Dropout in a norm's kernel. In the forward, the kernel first computes dropout(from) + residual, stores the
// sum in x and normalises it; there is no residual if residual.data is NULL. In the backward, the kernel
// stores dropout(dx) in `to`, and also computes the column sums of `to`, beside those for dw and db.
struct norm_dropout { op_dropout op; tt__mat from, residual, to; };

// Sizes of a thread block. For NARROW rows, of up to 1,024 columns, a block has EACH teams of threads. In a
// turn, a team works on two rows, or on one row if X is ANY. For wider rows, a block is one team and works on
// one row at a time.
template <bool NARROW, int X, int EACH> struct norm_block {
    static constexpr int TEAMS = NARROW ? EACH : 1, ROWS = NARROW && X != ANY ? 2 : 1, TURN = TEAMS * ROWS;
    static constexpr int ROW_WARPS = NARROW ? 4 : 16, WARPS = TEAMS * ROW_WARPS, MAX = WARPS * 32;
};
template <bool NARROW, int X> using forward_block = norm_block<NARROW, X, 2>;
// A block of the backward has 4 teams of threads, or 1 for wide rows. sum_teams gives the same number.
template <bool NARROW, int X> using backward_block = norm_block<NARROW, X, 4>;

// Computes y = (x - mean) / std * w + b, and stores mean and 1 / std to stats. If not `centred`, the mean
// counts as 0. A row stays in the registers of its threads and is read once. X: dtype of x and y, or ANY; W:
// dtype of w and b. Unless X is ANY, a thread loads its next rows while it computes. DROP: the kernel also
// computes dropout; X must not be ANY then.
template <int X, int W, bool NARROW, bool DROP>
__global__ void __launch_bounds__(forward_block<NARROW, X>::MAX, NARROW ? X == TT_BF16 && !DROP ? 3 : 2 : 1)
    layernorm(tt__mat x, tt__mat w, tt__mat b, tt__mat y, tt__mat stats, float offset, float eps,
              bool centred, bool add, bool vector, norm_dropout drop)
{
    tt__begin_kernel();
    typedef forward_block<NARROW, X> B;
    constexpr int ROWS = B::ROWS;
    TT__SHARED(float, sum_part, [B::WARPS][ROWS]);
    TT__SHARED(float, square_part, [B::WARPS][ROWS]);
    if (X != ANY) {
        x.dtype = y.dtype = (tt_dtype)X;
        w.dtype = b.dtype = (tt_dtype)W;
        vector = true;
    }
    constexpr bool AHEAD = X != ANY;
    const int width = (int)blockDim.x / B::TEAMS, team = (int)threadIdx.x / width, warps = width / 32;
    const row_thread t = {(int)threadIdx.x - team * width, width, vector};
    const float each = 1.0f / (float)x.cols;
    row_bits<X> next[ROWS] = {}, next_residual[ROWS] = {};
    uint32_t next_number[ROWS] = {};
    row_bits<W> bits;
    float scale[8], shift[8];
    // The thread's first row in the current turn. The rows in flight are those of the next turn.
    int64_t r = (int64_t)blockIdx.x * B::TURN + team;
    const int64_t step = (int64_t)gridDim.x * B::TURN, rows = x.rows;
    tt__mat from = DROP ? drop.from : x;
    const bool adds_residual = DROP && drop.residual.data, keeps = stats.data;
    move_rows(r, from, y, stats);
    if (DROP) move_rows(r, x, drop.residual);
    const auto fetch = [&](int64_t first) {
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            const bool there = first + i * B::TEAMS < rows;
            fetch_row(next[i], from, i * B::TEAMS, t, there);
            if (!DROP) continue;
            fetch_row(next_residual[i], drop.residual, i * B::TEAMS, t, there && adds_residual);
            next_number[i] = there ? drop.op.number_of(first + i * B::TEAMS) : 0;
        }
        move_rows(step, from);
        if (DROP) move_rows(step, drop.residual);
    };
    if (AHEAD) fetch(r);
    load_weights(scale, bits, w, t, offset);
    fetch_row(bits, b, 0, t, b.data != NULL);
    widen_row(shift, bits);
    if constexpr (DROP) drop.op.begin();
    for (; r - team < rows; r += step) { // the whole block leaves the loop together
        float v[ROWS][8], sum[ROWS], squares[ROWS];
        row_bits<X> residual[ROWS];
        uint32_t number[ROWS];
        if (!AHEAD) fetch(r);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            widen_row(v[i], next[i]);
            residual[i] = next_residual[i];
            number[i] = next_number[i];
        }
        if constexpr (AHEAD) fetch(r + step);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            if constexpr (DROP) {
                drop.op.apply(number[i], (uint32_t)t.at, v[i]);
                if (adds_residual) add_row(v[i], residual[i]);
                if (r + i * B::TEAMS < rows) put_row<X>(x, i * B::TEAMS, t, v[i]);
            }
            sum[i] = 0;
            TT__UNROLL for (int j = 0; j < 8; j++) sum[i] += v[i][j];
        }
        if (centred) row_sums<B::ROW_WARPS>(sum, sum_part, team * warps, warps);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            sum[i] = centred ? sum[i] * each : 0.0f; // sum[i] is the mean from here on
            squares[i] = 0;
            TT__UNROLL for (int j = 0; j < 8; j++) {
                v[i][j] -= sum[i];
                if (t.column(vector ? 0 : j) < x.cols) squares[i] += v[i][j] * v[i][j];
            }
        }
        row_sums<B::ROW_WARPS>(squares, square_part, team * warps, warps);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            const float rstd = rsqrtf(squares[i] * each + eps);
            if (r + i * B::TEAMS >= rows) continue;
            TT__UNROLL for (int j = 0; j < 8; j++) v[i][j] = v[i][j] * (rstd * scale[j]) + shift[j];
            if (add) {
                row_bits<X> old;
                fetch_row(old, y, i * B::TEAMS, t);
                add_row(v[i], old);
            }
            put_row<X>(y, i * B::TEAMS, t, v[i]);
            if (keeps && t.at == 0) set_stats(stats, i * B::TEAMS, centred, sum[i], rstd);
        }
        move_rows(step, y, stats);
        if (DROP) move_rows(step, x);
        if (!centred) __syncthreads(); // waits until all threads have read square_part
    }
}

// Computes y and the statistics of layernorm for rows of more than TT__ROW_COLUMNS columns. A block works on
// one row and reads it three times.
__global__ void __launch_bounds__(TT__ROW_THREADS)
    layernorm_wide(tt__mat x, tt__mat w, tt__mat b, tt__mat y, tt__mat stats, float offset, float eps,
                   bool centred, bool add)
{
    tt__begin_kernel();
    const int64_t r = blockIdx.x;
    float sum = 0, squares = 0;
    for (int64_t c = threadIdx.x; c < x.cols; c += TT__ROW_THREADS)
        sum += load_any(x.data, x.dtype, r * x.ld + c);
    const float mean = centred ? block_sum<TT__ROW_THREADS>(sum) / (float)x.cols : 0.0f;
    for (int64_t c = threadIdx.x; c < x.cols; c += TT__ROW_THREADS) {
        const float v = load_any(x.data, x.dtype, r * x.ld + c) - mean;
        squares += v * v;
    }
    const float rstd = 1.0f / sqrtf(block_sum<TT__ROW_THREADS>(squares) / (float)x.cols + eps);
    for (int64_t c = threadIdx.x; c < x.cols; c += TT__ROW_THREADS) {
        float v = (load_any(x.data, x.dtype, r * x.ld + c) - mean) * rstd *
            (load_any(w.data, w.dtype, c) + offset);
        if (b.data) v += load_any(b.data, b.dtype, c);
        if (add) v += load_any(y.data, y.dtype, r * y.ld + c);
        store_any(y.data, y.dtype, r * y.ld + c, v);
    }
    if (stats.data && threadIdx.x == 0) set_stats(stats, r, centred, mean, rstd);
}

// Runs code with X, W and NARROW for rows of `cols` columns, up to TT__ROW_COLUMNS. Operands that are `typed`
// (of matching dtypes, in vectors) get kernels for the dtypes x and w.
#define TT__WITH_NORM(cols, typed, x, w, ...)                                                          \
    do {                                                                                               \
        const bool typed_ = (typed) && (x) != TT_F16 && (w) != TT_F16;                                 \
        if (typed_ && (x) == TT_F32 && (w) == TT_F32) TT__NORM_ROWS(cols, TT_F32, TT_F32, __VA_ARGS__)  \
        else if (typed_ && (x) == TT_BF16 && (w) == TT_F32)                                            \
            TT__NORM_ROWS(cols, TT_BF16, TT_F32, __VA_ARGS__)                                          \
        else if (typed_ && (x) == TT_BF16) TT__NORM_ROWS(cols, TT_BF16, TT_BF16, __VA_ARGS__)           \
        else TT__NORM_ROWS(cols, ANY, ANY, __VA_ARGS__)                                                \
    } while (0)
#define TT__NORM_ROWS(cols, x, w, ...)                                                                 \
    {                                                                                                  \
        constexpr int X = x, W = w;                                                                    \
        if ((cols) <= 1024) { constexpr bool NARROW = true; __VA_ARGS__; }                             \
        else { constexpr bool NARROW = false; __VA_ARGS__; }                                           \
    }

const norm_dropout no_dropout = {{NULL, NULL, 0, 0, 0, 0, 0, 0}, no_operand, no_operand, no_operand};

template <int X, int W, bool NARROW, bool DROP>
cudaError_t launch_layernorm(const tt__launch *l, bool centred, bool vector, const norm_dropout &drop)
{
    const tt__mat *x = &l->in[0];
    const auto kernel = layernorm<X, W, NARROW, DROP>;
    typedef forward_block<NARROW, X> B;
    const int threads = B::TEAMS * row_threads(x->cols);
    unsigned grid;
    const cudaError_t e = grid_of(l->device, kernel, threads, 1, blocks_for(x->rows, B::TURN), &grid);
    return e != cudaSuccess ? e : TT__LAUNCH(kernel, grid, (unsigned)threads, 0, l->device->stream, *x,
                                             l->in[1], l->in[2], l->out[0], l->out[1],
                                             l->instr->attr.weight_offset, l->instr->attr.eps, centred,
                                             l->add[0], vector, drop);
}

// Runs layernorm or rmsnorm. dropout: NULL, or the launch of the dropout that makes x. The same kernel then
// computes the dropout, too (run_with_dropout).
cudaError_t run_layernorm_with(const tt__launch *l, const tt__launch *dropout)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[0], *w = &l->in[1], *b = &l->in[2], *y = &l->out[0];
    const bool vector = x->cols % 8 == 0 && is_wide(x) && is_wide(w) && is_wide(b) && is_wide(y);
    const bool centred = l->instr->op == TT__OP_LAYERNORM;
    if (!x->rows) return cudaSuccess;
    if (x->cols > TT__ROW_COLUMNS)
        return TT__LAUNCH(layernorm_wide, (unsigned)x->rows, TT__ROW_THREADS, 0, d->stream, *x, *w, *b, *y,
                          l->out[1], l->instr->attr.weight_offset, l->instr->attr.eps, centred, l->add[0]);
    const bool typed = vector && y->dtype == x->dtype && (!b->data || b->dtype == w->dtype);
    norm_dropout drop = no_dropout;
    if (dropout) {
        drop.op = dropout_of(dropout);
        drop.from = dropout->in[0];
        drop.residual = dropout->in[1];
    }
    TT__WITH_NORM(x->cols, typed, x->dtype, w->dtype,
                  constexpr bool DROP = X != ANY;
                  return DROP && dropout ? launch_layernorm<X, W, NARROW, DROP>(l, centred, vector, drop)
                                         : launch_layernorm<X, W, NARROW, false>(l, centred, vector, drop));
}

cudaError_t run_layernorm(const tt__launch *l) { return run_layernorm_with(l, NULL); }
TT__RUN_BY(LAYERNORM, run_layernorm)

cudaError_t run_rmsnorm(const tt__launch *l)
{
    tt__launch part;
    cudaError_t e = cudaSuccess;
    for (int k = 0; e == cudaSuccess && tt__norm_launch(l, 0, k, &part); k++) e = run_layernorm(&part);
    return e;
}
TT__RUN_BY(RMSNORM, run_rmsnorm)

// Stores a block's sums over its rows: dw and db to `to` (2, cols) or, if `sums`, dw, db and ds (the column
// sums of dx) to `to` (3, cols). memory: shared memory (TEAMS, 4, threads of a row), if the block has several
// teams.
template <int TEAMS>
__device__ __forceinline__ void store_column_sums(float *to, int64_t cols, const row_thread &t, int team,
                                                  float4 *memory, const float (&dw)[8], const float (&db)[8],
                                                  const float (&ds)[8], bool sums)
{
    const int width = t.of;
    const auto store = [&](int kind, const float (&v)[8]) {
        TT__UNROLL for (int j = 0; j < 8; j++)
            if (t.column(j) < cols) to[kind * cols + t.column(j)] = v[j];
    };
    if constexpr (TEAMS == 1) {
        store(0, dw);
        store(1, db);
        if (sums) store(2, ds);
    } else { // adds up the sums of the teams; a thread's 8 columns are stored as two halves
        float4 *const own = memory + team * 2 * width + t.at;
        const auto leave = [&](int place, const float (&v)[8]) {
            own[place * 2 * width] = make_float4(v[0], v[1], v[2], v[3]);
            own[place * 2 * width + width] = make_float4(v[4], v[5], v[6], v[7]);
        };
        // Each team adds up one kind of sums: dw, db or ds.
        const auto sum_up = [&](int kind, int place, int count) {
            float all[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            for (int k = place; k < place + count; k++) {
                const float4 a = memory[k * 2 * width + t.at], b = memory[(k * 2 + 1) * width + t.at];
                all[0] += a.x; all[1] += a.y; all[2] += a.z; all[3] += a.w;
                all[4] += b.x; all[5] += b.y; all[6] += b.z; all[7] += b.w;
            }
            store(kind, all);
        };
        leave(0, dw);
        leave(TEAMS, db);
        __syncthreads();
        if (team < 2) sum_up(team, team * TEAMS, TEAMS);
        if (!sums) return;
        __syncthreads();
        leave(0, ds);
        __syncthreads();
        if (team == 2) sum_up(2, 0, TEAMS);
    }
}

// Computes, for one row, what the gradient needs of dy (in g) and x (in n). Sets n to (x - mean) / std, g to
// dy * w, sum[0] to the thread's sum of g, and sum[1] to the thread's sum of g * n. dw and db are sums over
// rows: adds dy * n to dw, and dy to db.
__device__ __forceinline__ void begin_gradient(float (&g)[8], float (&n)[8], float *sum, float (&dw)[8],
                                               float (&db)[8], const float (&scale)[8], const row_stats &of)
{
    const float shift = -of.mean * of.rstd;
    sum[0] = sum[1] = 0;
    TT__UNROLL for (int j = 0; j < 8; j++) {
        n[j] = n[j] * of.rstd + shift;
        dw[j] += g[j] * n[j];
        db[j] += g[j];
        g[j] *= scale[j];
        sum[0] += g[j];
        sum[1] += g[j] * n[j];
    }
}

// Computes `dx = (g - avg(g) - n * avg(g * n)) / std`, where `n = (x - mean) / std` and `g = dy * w`. Sums
// `dw = dy * n` and `db = dy` over the block's rows. Writes to `partial`, for each block, the sums of dw and
// db and, if `sums`, the column sums of dx (if `add`, after the addition). dx.data may be NULL. X: dtype of
// dy, x and dx; W: dtype of w. A row and the sums over rows stay in registers; with bf16, the rows of the
// next turn are in flight meanwhile. Reads dy and x (if `add`, also dx) and writes dx once. DROP: the kernel
// also computes dropout; dx must not be NULL then, and X not ANY. The rows of drop.to are dx.ld elements
// apart.
template <int X, int W, bool NARROW, bool DROP>
__global__ void __launch_bounds__(backward_block<NARROW, X>::MAX, 1)
    layernorm_backward(tt__mat dy, tt__mat x, tt__mat w, tt__mat stats, tt__mat dx, int64_t rows_each,
                       float *partial, float offset, bool add, bool vector, bool sums, float each,
                       norm_dropout drop)
{
    tt__begin_kernel();
    typedef backward_block<NARROW, X> B;
    constexpr int TEAMS = B::TEAMS, ROWS = B::ROWS;
    // There are two copies, used in alternate turns: bit TURN (a power of 2) of `left` chooses the copy.
    TT__SHARED(float, sum_part, [2][B::WARPS][2 * ROWS]);
    TT__SHARED(float4, memory, [NARROW ? 2048 : 1]);
    if (X != ANY) {
        dy.dtype = x.dtype = dx.dtype = (tt_dtype)X;
        w.dtype = (tt_dtype)W;
        vector = true;
    }
    constexpr bool AHEAD = X == TT_BF16;
    const int width = (int)blockDim.x / TEAMS, team = (int)threadIdx.x / width, warps = width / 32;
    const row_thread t = {(int)threadIdx.x - team * width, width, vector};
    const bool leaves = dx.data != NULL, centred = stats.cols == 2;
    add = add && leaves;
    float dw[8] = {}, db[8] = {}, ds[8] = {}, scale[8];
    row_bits<X> next_dy[ROWS], next_x[ROWS], next_old[ROWS];
    row_stats next[ROWS];
    uint32_t next_number[ROWS] = {};
    row_bits<W> bits;
    // `left`: number of the block's rows from the thread's first row in the current turn on. The pointers of
    // operands and results are at the thread's first row of the turn that is fetched next. All rows of a turn
    // are fetched together: a thread that waits for one load may have to wait for all loads in flight.
    const int64_t from = (int64_t)blockIdx.x * rows_each;
    const int64_t end = min(x.rows, from + rows_each);
    int left = (int)(end - from) - team;
    // Bytes from dy to x. dy and x have the same ld, so that one pointer serves both.
    const int64_t beside = X != ANY ? (char *)x.data - (char *)dy.data : 0;
    const int64_t dropped = (char *)drop.to.data - (char *)dx.data; // bytes from dx to drop.to
    move_rows(from + team, dy, dx, stats);
    if (X == ANY) move_rows(from + team, x);
    const auto fetch = [&](int many) {
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            const bool there = i * TEAMS < many;
            fetch_row(next_dy[i], dy, i * TEAMS, t, there);
            if (X != ANY) x.data = (char *)dy.data + beside;
            fetch_row(next_x[i], x, i * TEAMS, t, there);
            fetch_row(next_old[i], dx, i * TEAMS, t, there && add);
            next[i] = there ? get_stats(stats, i * TEAMS) : row_stats{centred, 0, 0};
            if constexpr (DROP) next_number[i] = there ? drop.op.number_of(end - many + i * TEAMS) : 0;
        }
        move_rows(B::TURN, dy, dx, stats);
        if (X == ANY) move_rows(B::TURN, x);
    };
    if (AHEAD) fetch(left);
    load_weights(scale, bits, w, t, offset);
    if constexpr (DROP) drop.op.begin();
    // left + team is equal in the whole block, so all threads leave the loop together.
    for (; left + team > 0; left -= B::TURN) {
        float g[ROWS][8], n[ROWS][8], sum[2 * ROWS];
        row_bits<X> old[ROWS];
        row_stats of[ROWS];
        uint32_t number[ROWS];
        if (!AHEAD) fetch(left);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            widen_row(g[i], next_dy[i]);
            widen_row(n[i], next_x[i]);
            old[i] = next_old[i];
            of[i] = next[i];
            number[i] = next_number[i];
        }
        if constexpr (AHEAD) fetch(left - B::TURN);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            float start[8] = {};
            if (add) widen_row(start, old[i]);
            begin_gradient(g[i], n[i], sum + 2 * i, dw, db, scale, of[i]);
            TT__UNROLL for (int j = 0; j < 8; j++) g[i][j] = g[i][j] * of[i].rstd + start[j];
        }
        if (!leaves) continue;
        const int64_t back = AHEAD ? 2 * B::TURN : B::TURN; // the fetched rows are `back` rows further on
        row_sums<B::ROW_WARPS>(sum, sum_part[(left & B::TURN) != 0], team * warps, warps);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            const float avg_g = centred ? sum[2 * i] * each : 0.0f, avg_gn = sum[2 * i + 1] * each;
            const float of_n = -of[i].rstd * avg_gn, rest = -of[i].rstd * avg_g;
            if (i * TEAMS >= left) continue;
            TT__UNROLL for (int j = 0; j < 8; j++) g[i][j] += n[i][j] * of_n + rest;
            put_row<X>(dx, i * TEAMS - back, t, g[i]);
            if constexpr (DROP) {
                drop.op.apply(number[i], (uint32_t)t.at, g[i]);
                drop.to.data = (char *)dx.data + dropped;
                put_row<X>(drop.to, i * TEAMS - back, t, g[i]);
            }
            TT__UNROLL for (int j = 0; j < 8; j++) ds[j] += g[i][j];
        }
    }
    store_column_sums<TEAMS>(partial + (int64_t)blockIdx.x * (sums ? 3 : 2) * x.cols, x.cols, t, team, memory,
                             dw, db, ds, sums);
}

// Computes dx for rows of more than TT__ROW_COLUMNS columns, one row for each block. A multiprocessor has
// four blocks: with eight, the compiler spills registers on compute capability 10.0.
__global__ void __launch_bounds__(TT__ROW_THREADS, 4) layernorm_backward_wide(tt__mat dy, tt__mat x,
        tt__mat w, tt__mat stats, tt__mat dx, float offset, bool add)
{
    tt__begin_kernel();
    const int64_t r = blockIdx.x;
    const row_stats s = get_stats(stats, r);
    const float mean = s.mean, rstd = s.rstd;
    float sum_g = 0, sum_gn = 0;
    for (int64_t c = threadIdx.x; c < x.cols; c += TT__ROW_THREADS) {
        const float g = load_any(dy.data, dy.dtype, r * dy.ld + c) * (load_any(w.data, w.dtype, c) + offset);
        sum_g += g;
        sum_gn += g * (load_any(x.data, x.dtype, r * x.ld + c) - mean) * rstd;
    }
    const float avg_g = s.centred ? block_sum<TT__ROW_THREADS>(sum_g) / (float)x.cols : 0.0f;
    const float avg_gn = block_sum<TT__ROW_THREADS>(sum_gn) / (float)x.cols;
    for (int64_t c = threadIdx.x; c < x.cols; c += TT__ROW_THREADS) {
        const float g = load_any(dy.data, dy.dtype, r * dy.ld + c) * (load_any(w.data, w.dtype, c) + offset);
        const float n = (load_any(x.data, x.dtype, r * x.ld + c) - mean) * rstd;
        const float v = (g - avg_g - n * avg_gn) * rstd;
        store_any(dx.data, dx.dtype, r * dx.ld + c,
                  v + (add ? load_any(dx.data, dx.dtype, r * dx.ld + c) : 0.0f));
    }
}

// Computes the sums of dw and db over a block's rows for rows of more than TT__ROW_COLUMNS columns. A thread
// sums one column.
__global__ void __launch_bounds__(TT__ROW_THREADS) layernorm_sums_wide(tt__mat dy, tt__mat x, tt__mat stats,
        int64_t rows_each, float *partial)
{
    tt__begin_kernel();
    const int64_t c = (int64_t)blockIdx.y * TT__ROW_THREADS + threadIdx.x;
    const int64_t from = (int64_t)blockIdx.x * rows_each, to = min(x.rows, from + rows_each);
    float dw = 0, db = 0;
    if (c >= x.cols) return;
    for (int64_t r = from; r < to; r++) {
        const float g = load_any(dy.data, dy.dtype, r * dy.ld + c);
        const row_stats s = get_stats(stats, r);
        dw += g * (load_any(x.data, x.dtype, r * x.ld + c) - s.mean) * s.rstd;
        db += g;
    }
    partial[(int64_t)blockIdx.x * 2 * x.cols + c] = dw;
    partial[((int64_t)blockIdx.x * 2 + 1) * x.cols + c] = db;
}

template <int X, int W, bool NARROW, bool DROP>
cudaError_t launch_layernorm_backward(const tt__launch *l, unsigned blocks, int64_t rows_each, float *partial,
                                      bool vector, bool sums, const norm_dropout &drop)
{
    const unsigned threads = (unsigned)(backward_block<NARROW, X>::TEAMS * row_threads(l->in[1].cols));
    return TT__LAUNCH((layernorm_backward<X, W, NARROW, DROP>), blocks, threads, 0, l->device->stream,
                      l->in[0], l->in[1], l->in[2], l->in[3], l->out[0], rows_each, partial,
                      l->instr->attr.weight_offset, l->add[0], vector, sums, 1.0f / (float)l->in[1].cols,
                      drop);
}

// Runs the backward of layernorm or rmsnorm. dropout: NULL, or the launch of the dropout of dx. The same
// kernel then computes the dropout, too (run_with_dropout).
cudaError_t run_layernorm_backward_with(const tt__launch *l, const tt__launch *dropout)
{
    tt__device *d = l->device;
    const tt__mat *dy = &l->in[0], *x = &l->in[1], *w = &l->in[2], *stats = &l->in[3], *dx = &l->out[0];
    const bool vector = x->cols % 8 == 0 && is_wide(dy) && is_wide(x) && is_wide(w) && is_wide(dx);
    const bool biased = l->instr->op == TT__OP_LAYERNORM_BACKWARD, wide = x->cols > TT__ROW_COLUMNS;
    const tt__mat *sums = dropout ? &dropout->out[1] : &l->out[biased ? 3 : 2];
    const bool add_sums = dropout ? dropout->add[1] : l->add[biased ? 3 : 2];
    float *partial = resident_of(l)->sums;
    const int kinds = sums->data && !wide ? 3 : 2;
    const int64_t each = rows_of_sums(d, x->rows, x->cols);
    const int64_t blocks = (x->rows + each - 1) / each;
    cudaError_t e = cudaSuccess;
    if (wide) {
        e = TT__LAUNCH(layernorm_sums_wide, dim3((unsigned)blocks, blocks_for(x->cols, TT__ROW_THREADS)),
                       TT__ROW_THREADS, 0, d->stream, *dy, *x, *stats, each, partial);
        if (e == cudaSuccess && dx->data) // dx is computed last, because it may have the memory of dy
            e = TT__LAUNCH(layernorm_backward_wide, (unsigned)x->rows, TT__ROW_THREADS, 0, d->stream, *dy, *x,
                           *w, *stats, *dx, l->instr->attr.weight_offset, l->add[0]);
    } else {
        norm_dropout drop = no_dropout;
        if (dropout) {
            drop.op = dropout_of(dropout);
            drop.to = dropout->out[0];
        }
        const bool typed = vector && dy->dtype == x->dtype && dy->ld == x->ld &&
            (!dx->data || dx->dtype == x->dtype);
        TT__WITH_NORM(x->cols, typed, x->dtype, w->dtype,
                      constexpr bool DROP = X != ANY;
                      e = DROP && dropout
                          ? launch_layernorm_backward<X, W, NARROW, DROP>(l, (unsigned)blocks, each, partial,
                                                                        vector, kinds == 3, drop)
                          : launch_layernorm_backward<X, W, NARROW, false>(l, (unsigned)blocks, each, partial,
                                                                         vector, kinds == 3, drop));
    }
    const tt__mat *const of[3] = {&l->out[1], biased ? &l->out[2] : &no_operand,
                                  kinds == 3 ? sums : &no_operand};
    const bool adds[3] = {l->add[1], l->add[2], add_sums};
    all_sums_to_finish all;
    memset(&all, 0, sizeof all);
    for (int k = 0; k < 3; k++)
        if (of[k]->data)
            add_sums_to_finish(&all, partial + k * x->cols, blocks, kinds * x->cols, of[k], adds[k]);
    if (e == cudaSuccess) e = run_all_finish_sums(d, &all);
    return e == cudaSuccess && sums->data && wide ? run_column_sums(l, dx, sums, add_sums) : e;
}

cudaError_t run_layernorm_backward(const tt__launch *l) { return run_layernorm_backward_with(l, NULL); }
TT__RUN_BY(LAYERNORM_BACKWARD, run_layernorm_backward, 0, MAX_SUM_COLUMNS)

cudaError_t run_rmsnorm_backward(const tt__launch *l)
{
    if (l->instr->attr.heads <= 1) return run_layernorm_backward(l);
    tt__launch part;
    cudaError_t e = cudaSuccess;
    for (int k = 0; e == cudaSuccess && tt__norm_launch(l, 1, k, &part); k++) {
        part.out[2].data = NULL; // the column sums of dx are computed below, for all groups at once
        e = run_layernorm_backward(&part);
    }
    return e == cudaSuccess && l->out[2].data ? run_column_sums(l, &l->out[0], &l->out[2], l->add[2]) : e;
}
TT__RUN_BY(RMSNORM_BACKWARD, run_rmsnorm_backward, 0, MAX_SUM_COLUMNS)

// ---- dropout and a norm in one kernel, if the second of two launches reads the result of the first

// Returns whether a and b share no bytes, or hold the same rows at the same place.
bool is_apart(const tt__mat &a, const tt__mat &b)
{
    if (!a.data || !b.data) return true;
    if (a.data == b.data && a.ld == b.ld && a.dtype == b.dtype) return true;
    const auto end = [](const tt__mat &m) {
        return (const char *)m.data + (size_t)(m.rows > 0 ? (m.rows - 1) * m.ld + m.cols : 0)
            * tt_dtype_bytes(m.dtype);
    };
    return end(a) <= (const char *)b.data || end(b) <= (const char *)a.data;
}

// Runs two launches: dropout and a norm of its result, or the backward of a norm and dropout of its dx. The
// memory plan assumes that the first launch is done before the second begins, so the plan may store results
// of the second where operands of the first are. In one kernel, a thread reads and writes the same columns of
// its rows; this is right if operands and results do not overlap or hold the same rows at the same place.
// Otherwise two kernels run. The results are the same either way.
cudaError_t run_with_dropout(const tt__launch *l)
{
    const bool forward = l->instr->op == TT__OP_DROPOUT;
    const tt__launch *dropout = &l[!forward], *norm = &l[forward];
    const tt__mat *x = forward ? &norm->in[0] : &norm->in[1], *w = forward ? &norm->in[1] : &norm->in[2];
    const tt__mat *const rows[] = {&dropout->in[0], &dropout->in[1], &dropout->out[0], &norm->in[0],
                                   forward ? x : &norm->in[1], &norm->out[0]};
    bool one = x->cols % 8 == 0 && x->cols <= TT__ROW_COLUMNS && x->dtype != TT_F16 && w->dtype != TT_F16 &&
        (x->dtype == TT_BF16 || w->dtype == TT_F32) && is_wide(w) && !dropout->add[0] && w->cols == x->cols;
    for (const tt__mat *m : rows) one = one && is_wide(m) && (!m->data || m->dtype == x->dtype);
    if (forward) {
        const tt__mat *b = &norm->in[2];
        one = one && !dropout->out[1].data && is_wide(b) && (!b->data || b->dtype == w->dtype);
        for (int k = 0; k < 2; k++)
            for (int j = 0; j < 2; j++) one = one && is_apart(norm->out[k], dropout->in[j]);
        one = one && norm->out[1].data != dropout->in[0].data && norm->out[1].data != dropout->in[1].data;
    } else {
        const int sums = norm->instr->op == TT__OP_LAYERNORM_BACKWARD ? 3 : 2;
        one = one && norm->out[0].data && !norm->out[sums].data && !dropout->in[1].data &&
            norm->out[0].ld == dropout->out[0].ld && norm->in[0].ld == norm->in[1].ld;
        for (int k = 0; k < 4; k++) one = one && is_apart(dropout->out[0], norm->in[k]);
    }
    if (one) return forward ? run_layernorm_with(norm, dropout) : run_layernorm_backward_with(norm, dropout);
    const bool rms = norm->instr->op == (forward ? TT__OP_RMSNORM : TT__OP_RMSNORM_BACKWARD);
    const cudaError_t e = forward ? run_dropout(dropout)
        : rms ? run_rmsnorm_backward(norm) : run_layernorm_backward(norm);
    return e != cudaSuccess ? e : !forward ? run_dropout(dropout)
        : rms ? run_rmsnorm(norm) : run_layernorm(norm);
}

// ---- softmax and normalize: GROUP threads work on a row, a warp or a block

template <int GROUP> __device__ __forceinline__ float group_sum(float v)
{
    return GROUP == 32 ? warp_sum(v) : block_sum<256>(v);
}

// Writes v to columns [c, c + 8) of row r of y or, if `add`, adds v to them.
__device__ __forceinline__ void put_columns(const tt__mat &y, int64_t r, int64_t c, bool add, bool wide,
                                            float (&v)[8])
{
    float old[8];
    if (add) {
        load8(old, row_at(y, r), y.dtype, c, y.cols - c, wide);
        TT__UNROLL for (int k = 0; k < 8; k++) v[k] += old[k];
    }
    store8(row_at(y, r), y.dtype, c, y.cols - c, wide, v);
}

// Computes y = exp(x - m) / sum(exp(x - m)), where m is the log-sum-exp of the row. Reads a row three times.
template <int GROUP>
__global__ void __launch_bounds__(256) softmax(tt__mat x, tt__mat y, bool add, bool wide)
{
    tt__begin_kernel();
    const int64_t groups = 256 / GROUP, n = x.cols;
    for (int64_t r = blockIdx.x * groups + threadIdx.x / GROUP; r < x.rows; r += gridDim.x * groups) {
        const float m = row_cross_entropy<GROUP>(row_at(x, r), x.dtype, n, wide, -1, 0).lse;
        float v[8], sum = 0;
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(v, row_at(x, r), x.dtype, c, n - c, wide, -INFINITY);
            TT__UNROLL for (int k = 0; k < 8; k++) sum += fast_exp(v[k] - m);
        }
        const float factor = 1.0f / group_sum<GROUP>(sum);
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(v, row_at(x, r), x.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) v[k] = fast_exp(v[k] - m) * factor;
            put_columns(y, r, c, add, wide, v);
        }
    }
}

// Computes y = x / max(norm, eps), and stores 1 / max(norm, eps) to `inverse` unless inverse.data is NULL.
// Reads a row twice.
template <int GROUP>
__global__ void __launch_bounds__(256) normalize(tt__mat x, tt__mat y, tt__mat inverse, float eps, bool add,
                                                 bool wide)
{
    tt__begin_kernel();
    const int64_t groups = 256 / GROUP, n = x.cols;
    for (int64_t r = blockIdx.x * groups + threadIdx.x / GROUP; r < x.rows; r += gridDim.x * groups) {
        float v[8], sum = 0;
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(v, row_at(x, r), x.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) sum += v[k] * v[k];
        }
        const float norm = sqrtf(group_sum<GROUP>(sum)), factor = 1.0f / (norm < eps ? eps : norm);
        if (inverse.data && threadIdx.x % GROUP == 0) ((float *)inverse.data)[r * inverse.ld] = factor;
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(v, row_at(x, r), x.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) v[k] *= factor;
            put_columns(y, r, c, add, wide, v);
        }
    }
}

// Computes the gradient of softmax, y * (dy - sum(dy * y)), or of normalize if inverse.data is not NULL:
// inverse * (dy - y * sum(dy * y)) or, where `inverse` is at its limit 1 / eps, inverse * dy. Reads a row
// twice.
template <int GROUP>
__global__ void __launch_bounds__(256) whole_rows_backward(tt__mat dy, tt__mat y, tt__mat inverse,
                                                           float limit, tt__mat dx, bool add, bool wide)
{
    tt__begin_kernel();
    const int64_t groups = 256 / GROUP, n = y.cols;
    for (int64_t r = blockIdx.x * groups + threadIdx.x / GROUP; r < y.rows; r += gridDim.x * groups) {
        const float factor = inverse.data ? ((const float *)inverse.data)[r * inverse.ld] : 0;
        float v[8], d[8], dot = 0;
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(d, row_at(dy, r), dy.dtype, c, n - c, wide);
            load8(v, row_at(y, r), y.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) dot += d[k] * v[k];
        }
        dot = group_sum<GROUP>(dot);
        if (inverse.data && factor >= limit) dot = 0;
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(d, row_at(dy, r), dy.dtype, c, n - c, wide);
            load8(v, row_at(y, r), y.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++)
                v[k] = inverse.data ? factor * (d[k] - v[k] * dot) : v[k] * (d[k] - dot);
            put_columns(dx, r, c, add, wide, v);
        }
    }
}

enum { WARP_COLUMNS = 1024 }; // rows with more columns are computed by a block, not a warp

cudaError_t run_softmax(const tt__launch *l)
{
    const tt__mat *x = &l->in[0], *y = &l->out[0];
    const bool many = x->cols > WARP_COLUMNS, wide = is_wide(x) && is_wide(y);
    const unsigned blocks = grid_for(x->rows, many ? 1 : 8, TT__ELEMENT_BLOCKS);
    return TT__LAUNCH(many ? softmax<256> : softmax<32>, blocks, 256, 0, l->device->stream, *x, *y, l->add[0],
                      wide);
}
TT__RUN_BY(SOFTMAX, run_softmax)

cudaError_t run_normalize(const tt__launch *l)
{
    const tt__mat *x = &l->in[0], *y = &l->out[0];
    const bool many = x->cols > WARP_COLUMNS, wide = is_wide(x) && is_wide(y);
    const unsigned blocks = grid_for(x->rows, many ? 1 : 8, TT__ELEMENT_BLOCKS);
    return TT__LAUNCH(many ? normalize<256> : normalize<32>, blocks, 256, 0, l->device->stream, *x, *y,
                      l->out[1], l->instr->attr.eps, l->add[0], wide);
}
TT__RUN_BY(NORMALIZE, run_normalize)

cudaError_t run_whole_rows_backward(const tt__launch *l)
{
    const tt__mat *dy = &l->in[0], *y = &l->in[1], *dx = &l->out[0];
    const bool many = y->cols > WARP_COLUMNS, wide = is_wide(dy) && is_wide(y) && is_wide(dx);
    const unsigned blocks = grid_for(y->rows, many ? 1 : 8, TT__ELEMENT_BLOCKS);
    return TT__LAUNCH(many ? whole_rows_backward<256> : whole_rows_backward<32>, blocks, 256, 0,
                      l->device->stream, *dy, *y, l->in[2], 1.0f / l->instr->attr.eps, *dx, l->add[0], wide);
}
TT__RUN_BY(SOFTMAX_BACKWARD, run_whole_rows_backward)
TT__RUN_BY(NORMALIZE_BACKWARD, run_whole_rows_backward)

} // namespace

/* ==== src/ops/optimizers/cuda.cuh */
namespace {

// ================================================================================================ optimizers
// Parameters, gradients and states are contiguous, so kernels treat them as vectors.

enum { TT__SQUARES_BLOCKS = 1024 };

// Max number of tensors in a kernel launch that runs several instructions. Tests make the number smaller.
#ifndef TT__TENSORS
// The arguments of a kernel may have 32,764 bytes, or 4,096 bytes before CUDA 12.1.
#define TT__TENSORS (CUDART_VERSION >= 12010 ? 448 : 56)
#endif

// Returns the number of this block's tensor. of: `count` tensors in the order of their first blocks.
template <class T> __device__ __forceinline__ int tensor_of_block(const T *of, int count)
{
    int low = 0;
    for (int high = count; high - low > 1;) {
        const int middle = (low + high) / 2;
        if (of[middle].first <= blockIdx.x) low = middle;
        else high = middle;
    }
    return low;
}

struct square_sum {
    const void *g;
    void *to;
    int64_t n;
    unsigned first, blocks;
    uint8_t type;
    bool wide;
};

struct square_sums {
    int count;
    double *partial; // partial[k]: sum of squares of thread block k
    square_sum of[TT__TENSORS];
};

// Returns the sum, in f32, of the squares of elements [i, i + 8) of g.
__device__ __forceinline__ float squares8(const square_sum &t, int64_t i)
{
    float x[8];
    load8(x, t.g, (tt_dtype)t.type, i, t.n - i, t.wide);
    TT__UNROLL for (int k = 0; k < 8; k++) x[k] *= x[k];
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// Sums the squares of tensors, and writes each block's sum to partial. Sums eight squares in f32, and these
// sums in double. Reads each tensor once.
__global__ void __launch_bounds__(256) sum_squares(const __grid_constant__ square_sums s)
{
    tt__begin_kernel();
    const square_sum &t = s.of[tensor_of_block(s.of, s.count)];
    double sum = 0;
    for (int64_t i = 8 * ((blockIdx.x - t.first) * (int64_t)256 + threadIdx.x); i < t.n;
         i += 8 * (t.blocks * (int64_t)256))
        sum += squares8(t, i);
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) s.partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(256) finish_sum_squares(const __grid_constant__ square_sums s)
{
    tt__begin_kernel();
    const square_sum &t = s.of[blockIdx.x];
    double sum = 0;
    for (unsigned k = threadIdx.x; k < t.blocks; k += 256) sum += s.partial[t.first + k];
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) *(float *)t.to = (float)sum;
}

// Sums the squares of each chunk of a tensor; a block sums one chunk. fold_squares adds up the chunks' sums.
__global__ void __launch_bounds__(256) chunk_squares(const __grid_constant__ square_sums s)
{
    tt__begin_kernel();
    const square_sum &t = s.of[tensor_of_block(s.of, s.count)];
    const int64_t chunk = blockIdx.x - t.first, from = chunk * TT__CHUNK, end = from + TT__CHUNK;
    const int64_t to = end < t.n ? end : t.n;
    double sum = 0;
    for (int64_t i = from + 8 * threadIdx.x; i < to; i += 2048) sum += squares8(t, i);
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) ((double *)t.to)[chunk] = sum;
}

__global__ void __launch_bounds__(256) fold_squares(const __grid_constant__ square_sums s)
{
    tt__begin_kernel();
    const square_sum &t = s.of[blockIdx.x];
    double sum = 0;
    for (int64_t k = threadIdx.x; k < t.n; k += 256) sum += ((const double *)t.g)[k];
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) *(float *)t.to = (float)sum;
}

// Computes the mean loss from the counts of a loss.
__global__ void mean_loss(const float *counts, float *loss)
{
    tt__begin_kernel();
    if (threadIdx.x == 0) *loss = (float)((double)counts[0] / counts[1]);
}

cudaError_t run_mean_loss(const tt__launch *l)
{
    return TT__LAUNCH(mean_loss, 1, 32, 0, l->device->stream, (const float *)l->in[0].data,
                      (float *)l->out[0].data);
}
TT__RUN_BY(MEAN_LOSS, run_mean_loss)

// Writes the counts of a loss to totals, a tt__totals, or adds them if `add`. by_total: the fourth count is
// the total of tt_loss_total, which is not added.
__global__ void add_counts(const float *counts, double *totals, bool add, bool by_total)
{
    tt__begin_kernel();
    const int k = (int)threadIdx.x;
    if (k < TT__TOTALS) totals[k] = (add ? totals[k] : 0) + (k == 3 && by_total ? 0 : counts[k]);
}

cudaError_t run_add_counts(const tt__launch *l)
{
    tt__device *d = l->device;
    return TT__LAUNCH(add_counts, 1, 32, 0, d->stream, (const float *)l->in[0].data, (double *)l->out[0].data,
                      l->add[0], l->instr->attr.by_total);
}
TT__RUN_BY(ADD_COUNTS, run_add_counts)

// Computes, from the sums of squares of n gradients, the global norm and the factor by which all gradients
// are multiplied, as in torch.nn.utils.clip_grad_norm_.
__global__ void __launch_bounds__(256) clip(const float *squares, int64_t n, float clip_norm,
                                            const tt__totals *totals, const tt__scale_state *loss_scale,
                                            const tt__step_settings *run, tt__clipped *out)
{
    tt__begin_kernel();
    double sum = 0;
    for (int64_t k = threadIdx.x; k < n; k += 256) sum += squares[k];
    sum = block_sum<256>(sum);
    if (threadIdx.x) return;
    double scale = (run ? run->loss_norm / totals->targets : 1) / (loss_scale ? loss_scale->scale : 1),
        norm = sqrt(sum) * scale, factor = scale;
    if (!isfinite(totals->loss) || !(totals->targets > 0)) norm = NAN; // then no parameter is updated
    if (clip_norm > 0 && clip_norm < norm + 1e-6) factor *= clip_norm / (norm + 1e-6);
    out->norm = (float)norm;
    out->factor = (float)factor;
}

cudaError_t run_clip(const tt__launch *l)
{
    return TT__LAUNCH(clip, 1, 256, 0, l->device->stream, (const float *)l->in[0].data, l->in[0].rows,
                      l->instr->attr.clip_norm, (const tt__totals *)l->in[1].data,
                      (const tt__scale_state *)l->in[2].data, TT__RUN_OF(l), (tt__clipped *)l->out[0].data);
}
TT__RUN_BY(CLIP, run_clip)

// Computes the next loss scale, as the CPU's run_LOSS_SCALE does.
__global__ void next_loss_scale(const tt__clipped *clipped, const tt__totals *totals, tt__scale_state *s,
                                float growth, float backoff, int interval)
{
    tt__begin_kernel();
    if (threadIdx.x || !isfinite(totals->loss) || !(totals->targets > 0)) return;
    if (isfinite(clipped->norm)) {
        if (++s->good_steps < interval) return;
        s->scale = fmin(s->scale * growth, TT__LOSS_SCALE_MOST);
    } else {
        if (s->scale * backoff < 1) return;
        s->scale *= backoff;
        s->skipped++;
    }
    s->good_steps = 0;
}

cudaError_t run_loss_scale(const tt__launch *l)
{
    const tt__attr *a = &l->instr->attr;
    return TT__LAUNCH(next_loss_scale, 1, 32, 0, l->device->stream, (const tt__clipped *)l->in[0].data,
                      (const tt__totals *)l->in[1].data, (tt__scale_state *)l->out[0].data, a->growth,
                      a->backoff, a->interval);
}
TT__RUN_BY(LOSS_SCALE, run_loss_scale)

// Returns the stream of a launch. Only copies and collectives are on a stream other than the compute stream.
cudaStream_t stream_of(const tt__launch *l) { return stream_of(l->device, l->instr->stream); }

// Copies between or within the memories of the device and the host.
cudaError_t run_copy(const tt__launch *l)
{
    const tt__mat *x = &l->in[0], *y = &l->out[0];
    const size_t size = tt_dtype_bytes(x->dtype);
    if (tt__is_coded(x->dtype))
        return cudaMemcpyAsync(y->data, x->data, (size_t)tt__coded_parts_of(x->dtype, x->rows, x->cols).bytes,
                               cudaMemcpyDefault, stream_of(l));
    const bool whole = x->rows == 1 || (x->ld == x->cols && y->ld == y->cols);
    if (whole) // a contiguous matrix may have more bytes than cudaMemcpy2DAsync allows in a row
        return cudaMemcpyAsync(y->data, x->data, (size_t)(x->rows * x->cols) * size, cudaMemcpyDefault,
                               stream_of(l));
    return cudaMemcpy2DAsync(y->data, (size_t)y->ld * size, x->data, (size_t)x->ld * size,
                             (size_t)x->cols * size, (size_t)x->rows, cudaMemcpyDefault, stream_of(l));
}
TT__RUN_BY(COPY, run_copy)

cudaError_t run_nothing(const tt__launch *) { return cudaSuccess; }
TT__RUN_BY(WAIT, run_nothing)
TT__RUN_BY(SEND, run_nothing) // the RECV after a SEND fetches SEND's operand

// Rounds x to 16 bits stochastically, as the CPU's round_16 does: rounds up with a probability equal to the
// dropped fraction, by 16 random bits. Rounds numbers that are not finite and, in f16, numbers from 65504 on
// to nearest, so that they overflow only from 65520 on, as with rounding to nearest.
__device__ __forceinline__ uint32_t round_16(float x, uint32_t random, tt_dtype dtype)
{
    const uint32_t u = __float_as_uint(x), magnitude = u & 0x7fffffff, sign = u >> 16 & 0x8000;
    const bool nan = magnitude > 0x7f800000;
    if (dtype == TT_BF16) return magnitude >= 0x7f800000 ? u >> 16 | (nan ? 0x40 : 0) : (u + random) >> 16;
    if (nan) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    if (magnitude >= 0x477fe000) return sign | 0x7bff;
    if (magnitude >= 0x38800000) return sign | (magnitude - 0x38000000 + (random & 0x1fff)) >> 13;
    const float units = __uint_as_float(magnitude) * 0x1p24f; // exact: subnormals are below 1024 units
    const uint32_t whole = (uint32_t)units;
    return sign | (whole + ((units - (float)whole) * 65536.0f + (float)random >= 65536.0f));
}

// Returns the bits of x plus 16 random bits; the upper half of the sum is x in bf16, stochastically rounded.
// Kernels compute NaN as 0x7fffffff, where the addition would overflow, so the bits of x are limited to
// 0x7fff0000. NaNs with smaller bits stay NaN, because their upper half is a NaN.
__device__ __forceinline__ uint32_t round_up(float x, uint32_t random)
{
    return (uint32_t)min((int)__float_as_uint(x), 0x7fff0000) + random;
}

// Rounds elements `[i, i + 8)` of a vector to its dtype and writes them. Element e of a 16-bit vector is
// rounded stochastically, by number `e % 8` of Philox counter `{e / 8}`. Steps smaller than half a unit in
// the last place then survive on average (Gupta et al., "Deep learning with limited numerical precision",
// 2015). e counts from the first element of the whole tensor; the vector begins at element `8 * first` of
// the tensor.
__device__ __forceinline__ void update8(void *p, tt_dtype dtype, int64_t i, int64_t left, bool wide,
                                        const float (&x)[8], const philox_keys &keys, int64_t first)
{
    if (dtype == TT_F32) {
        store8(p, TT_F32, i, left, wide, x);
        return;
    }
    const uint64_t group = (uint64_t)(first + i / 8);
    uint32_t random[4] = {(uint32_t)group, (uint32_t)(group >> 32), 0, 0}, h[8], none = 0;
    tt__forget(none); // otherwise the compiler would keep the keys in registers
    TT__UNROLL for (int pair = 0; 2 * pair < TT__DRAW_ROUNDS; pair++) {
        const uint4 k = keys[pair + none];
        philox_round(random, k.x, k.y);
        if (2 * pair + 1 < TT__DRAW_ROUNDS) philox_round(random, k.z, k.w);
    }
    if (dtype == TT_BF16 && wide && left >= 8) { // the bits are those of round_16, except for NaN
        uint32_t pair[4];
        TT__UNROLL for (int k = 0; k < 4; k++)
            pair[k] = __byte_perm(round_up(x[2 * k], random[k] & 0xffff),
                                  round_up(x[2 * k + 1], random[k] >> 16), 0x7632);
        ((uint4 *)p)[i / 8] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        return;
    }
    TT__UNROLL for (int k = 0; k < 8; k++)
        h[k] = round_16(x[k], random[k / 2] >> (k % 2 * 16) & 0xffff, dtype);
    store8_bits(p, i, left, wide, h);
}

// ---- optimizer states of 8 bits, see src/ops/optimizers/map8.h

// Returns magnitude k of a map, as the CPU's tt__map8_magnitude does.
__device__ __forceinline__ float map8_magnitude(int k, bool is_signed)
{
    const int interval = is_signed ? k : k + 1;
    int count = 1, decade = is_signed ? 0 : -1;
    if (!k) return 0;
    if (k == (is_signed ? 128 : 255)) return 1;
    for (; 2 * count <= interval; count *= 2) decade++;
    double divisor = 20 * count;
    for (; decade < 6; decade++) divisor *= 10;
    return (float)((2 * count + 18 * (interval - count) + 9) / divisor);
}

// Reads elements [i, i + 8) of a state, of which the first `left` exist; the others are 0. map: number of
// each code. scale: scale of each block.
__device__ __forceinline__ void load8_small(float (&x)[8], const void *p, const float *map,
                                            const float *scale, int64_t i, int64_t left)
{
    TT__UNROLL for (int k = 0; k < 8; k++)
        x[k] = k < left ? map[((const uint8_t *)p)[i + k]] * scale[i / TT__STATE_BLOCK] : 0;
}

// Writes elements [i, i + 8) of a state, of which the first `left` exist. The lanes of a warp together have a
// block, whose scale the first lane writes. Rounds as the CPU's row_to_8.
__device__ __forceinline__ void store8_small(void *p, const float *map, float *scale, bool is_signed,
                                             int64_t i, int64_t left, const float (&x)[8])
{
    float most = 0;
    TT__UNROLL for (int k = 0; k < 8; k++) if (k < left) most = fmaxf(most, fabsf(x[k]));
    most = warp_max(most);
    if (!(most >= 1.17549435e-38f)) most = 0;
    __syncwarp(); // all lanes have read the old scale
    if (threadIdx.x % 32 == 0) scale[i / TT__STATE_BLOCK] = most;
    for (int k = 0; k < 8 && k < left; k++) {
        const float y = most > 0 ? x[k] / most : 0;
        int code = 0; // the code of the largest number of the map that is at most y
        for (int step = 128; step; step /= 2) if (map[code + step] <= y) code += step;
        const float middle = code < 255 ? (map[code] + map[code + 1]) / 2 : INFINITY;
        if (y > 0 ? y > middle : y >= middle) code++; // the nearest, or the smaller magnitude
        if (!is_signed && !code && y > 0) code = 1;
        ((uint8_t *)p)[i + k] = (uint8_t)code;
    }
}

struct param_update { // the update of one parameter, or of a rank's shard of it
    static constexpr bool SMALL = false;
    const void *g;
    void *p, *m, *v;    // m, v: Adam's moments; m: momentum of SGD, which may be NULL, and of Lion
    int64_t n, begin;   // p has n elements, beginning with element 8 * begin of the whole parameter
    unsigned first;
    float weight_decay, lr_factor;
    uint32_t random;    // number of the instruction's stream of random numbers
    uint8_t types[3];   // dtype of g; dtype of p; dtype of m and v
    bool wide;
};

struct small_update : param_update { // an update whose states may have 8 bits
    static constexpr bool SMALL = true;
    float *scales[2];   // scales of m and v; NULL: the states have no scales
};

struct update_rule {
    float beta1, beta2, eps;
    int nesterov, decoupled;
};

template <class T, int N> struct updates_of {
    typedef T update;
    static constexpr int MOST = N;
    int count;
    update_rule rule;
    const float *clip;  // a tt__clipped: the norm of the gradients, and their factor
    T of[N];
};
typedef updates_of<param_update, TT__TENSORS> param_updates;
typedef updates_of<small_update, (TT__TENSORS + 1) / 2> small_updates;

// Max number of pointers to members' operands in a launch of collectives. Tests make the number smaller.
#ifndef TT__PEERS
#define TT__PEERS (CUDART_VERSION >= 12010 ? 2048 : 256)
#endif

struct member_sum { // the sum of the members' elements in a collective (ops/collectives/cuda.cuh)
    void *y;
    int64_t n;
    unsigned first;
    int peers, present; // peers: index of the first operand in member_sums.peers; present: number of operands
    uint8_t type, how;
    bool add, wide;
};

struct member_sums {
    int count, used;
    member_sum of[TT__TENSORS];
    const void *peers[TT__PEERS];
};

struct member_copy {
    void *y;
    const void *x;
    int64_t bytes;
    unsigned first;
    int unit;           // bytes that a thread copies at once
};

struct member_copies {
    int count;
    member_copy of[TT__TENSORS];
};

struct group_arguments {
    square_sums squares;
    param_updates updates;
    small_updates small;
    member_sums sums;
    member_copies copies;
};
constexpr size_t MAX_ARGUMENTS = CUDART_VERSION >= 12010 ? 32764 : 4096;
static_assert(sizeof(square_sums) <= MAX_ARGUMENTS && sizeof(member_sums) <= MAX_ARGUMENTS &&
              sizeof(member_copies) <= MAX_ARGUMENTS &&
              sizeof(small_updates) + sizeof(void *) <= MAX_ARGUMENTS &&
              sizeof(param_updates) + sizeof(void *) <= MAX_ARGUMENTS, "a kernel's arguments");
static_assert(TT__PEERS >= TT__RANKS, "the operands of one sum");
static_assert(TT__TENSORS * TT__SQUARES_BLOCKS * sizeof(double) <= resident_workspace::BYTES,
              "the partial sums of a launch");

bool make_arguments(tt__device *d)
{
    if (!d->arguments) d->arguments = (group_arguments *)calloc(1, sizeof *d->arguments);
    return d->arguments != NULL;
}

// Runs `count` instructions of one op: SUM_SQUARES, CHUNK_SQUARES or FOLD_SQUARES.
cudaError_t run_squares(const tt__launch *l, int count)
{
    tt__device *d = l->device;
    if (!make_arguments(d)) return cudaErrorMemoryAllocation;
    square_sums *s = &d->arguments->squares;
    const int op = l->instr->op;
    s->partial = op == TT__OP_SUM_SQUARES ? resident_of(l)->squares : NULL;
    for (int from = 0; from < count; from += s->count) {
        unsigned blocks = 0;
        s->count = count - from < TT__TENSORS ? count - from : TT__TENSORS;
        for (int k = 0; k < s->count; k++) {
            const tt__mat *g = &l[from + k].in[0];
            square_sum *t = &s->of[k];
            t->g = g->data; t->to = l[from + k].out[0].data;
            t->n = g->rows * g->cols;
            t->first = blocks;
            t->blocks = op == TT__OP_CHUNK_SQUARES ? blocks_for(t->n, TT__CHUNK)
                : grid_for(t->n, 4 * 2048, TT__SQUARES_BLOCKS);
            blocks += t->blocks;
            t->type = (uint8_t)g->dtype;
            t->wide = is_wide(g);
        }
        const unsigned tensors = (unsigned)s->count;
        cudaError_t e = cudaSuccess;
        if (op == TT__OP_SUM_SQUARES) e = TT__LAUNCH(sum_squares, blocks, 256, 0, d->stream, *s);
        if (op == TT__OP_CHUNK_SQUARES && blocks) // there are no blocks if all shards of the rank are empty
            e = TT__LAUNCH(chunk_squares, blocks, 256, 0, d->stream, *s);
        if (op == TT__OP_FOLD_SQUARES) e = TT__LAUNCH(fold_squares, tensors, 256, 0, d->stream, *s);
        if (e == cudaSuccess && op == TT__OP_SUM_SQUARES)
            e = TT__LAUNCH(finish_sum_squares, tensors, 256, 0, d->stream, *s);
        if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
}
TT__RUN_BY(SUM_SQUARES, run_squares)
TT__RUN_BY(CHUNK_SQUARES, run_squares)
TT__RUN_BY(FOLD_SQUARES, run_squares)

enum { TT__UPDATE_CHUNK = 4 * 2048 }; // number of elements that a block updates

// Updates parameters. For each f32 element, reads and writes 28 bytes for Adam, 20 bytes for Lion and for SGD
// with momentum, and 12 bytes for SGD without momentum; for a 16-bit element, half as many; a state of 8 bits
// is read and written with 2 bytes. OP: the optimizer's op. G: dtype of all gradients of the launch, or ANY;
// P: dtype of all parameters and their states, or ANY. If P is ANY, only three blocks fit a multiprocessor: a
// thread needs more registers than the 64 that four blocks allow. U: param_updates or small_updates.
template <int OP, int G, int P, class U>
__global__ void __launch_bounds__(256, OP == TT__OP_ADAM && P != ANY ? 4 : 3)
    update_parameters(const __grid_constant__ U u, const tt__step_settings *run)
{
    tt__begin_kernel();
    constexpr bool ADAM = OP == TT__OP_ADAM, LION = OP == TT__OP_LION, MUON = OP == TT__OP_MUON;
    constexpr bool MOMENTUM = OP == TT__OP_MUON_MOMENTUM, SMALL = U::update::SMALL;
    TT__SHARED(philox_keys, keys, [3]);
    TT__SHARED(float, of_step, [2]);
    TT__SHARED(float, maps, [SMALL ? 2 : 1][SMALL ? 256 : 1]);
    if (!isfinite(u.clip[0])) return; // either all threads return or none
    const typename U::update &t = u.of[tensor_of_block(u.of, u.count)];
    const tt_dtype type_g = (tt_dtype)(G != ANY ? G : t.types[0]);
    const tt_dtype type_p = (tt_dtype)(P != ANY ? P : t.types[1]);
    const tt_dtype type_m = (tt_dtype)(P != ANY ? P : t.types[2]);
    const bool wide = P != ANY || t.wide;
    const int64_t from = (int64_t)(blockIdx.x - t.first) * TT__UPDATE_CHUNK, end = from + TT__UPDATE_CHUNK;
    const int64_t to = end < t.n ? end : t.n;
    const float factor = u.clip[1], lr = run->lr * t.lr_factor, b1 = u.rule.beta1, b2 = u.rule.beta2;
    const float decay = t.weight_decay;
    if (threadIdx.x < 3)
        expand_key(stream_key(run->seed, TT__RANDOM_ROUNDING, (uint64_t)run->step,
                              (uint64_t)threadIdx.x << 32 | t.random), keys[threadIdx.x]);
    // Two threads of the second warp compute the two bias corrections, each a power, by squaring.
    if (ADAM && threadIdx.x / 2 == 16) {
        double power = 1, b = threadIdx.x % 2 ? b2 : b1;
        for (uint64_t e = (uint64_t)run->step + 1; e; e >>= 1, b *= b) if (e & 1) power *= b;
        of_step[threadIdx.x % 2] = threadIdx.x % 2 ? (float)(1 / sqrt(1 - power)) : (float)(lr / (1 - power));
    }
    if (SMALL) { // thread k computes number k of each map
        const int k = threadIdx.x, magnitude = k < 127 ? 127 - k : k - 127;
        maps[0][k] = k < 127 ? -map8_magnitude(magnitude, true) : map8_magnitude(magnitude, true);
        maps[1 % (1 + SMALL)][k] = map8_magnitude(k, false);
    }
    __syncthreads();
    const float step = ADAM ? of_step[0] : 0, root = ADAM ? of_step[1] : 0;
    const bool decoupled = LION || MUON || (ADAM && u.rule.decoupled), bytes = SMALL && type_m == TT_U8;
    const float l2 = decoupled ? 0 : decay, keep = decoupled ? 1 - lr * decay : 1;
    const auto load_state = [&](float (&x)[8], void *from, int state, int64_t i, int64_t left) {
        if constexpr (SMALL) {
            if (bytes) return load8_small(x, from, maps[state], t.scales[state], i, left);
        }
        load8(x, from, type_m, i, left, wide);
    };
    const auto store_state = [&](const float (&x)[8], void *to, int state, int64_t i, int64_t left) {
        if constexpr (SMALL) {
            if (bytes) return store8_small(to, maps[state], t.scales[state], state == 0, i, left, x);
        }
        update8(to, type_m, i, left, wide, x, keys[1 + state], t.begin);
    };
    const auto update = [&](int64_t i, int64_t left) {
        float g[8], p[8], m[8] = {0}, v[8];
        load8(g, t.g, type_g, i, left, wide);
        if (!MOMENTUM) load8(p, t.p, type_p, i, left, wide);
        if (ADAM || t.m) load_state(m, t.m, 0, i, left);
        if (ADAM) load_state(v, t.v, 1, i, left);
        TT__UNROLL for (int k = 0; k < 8; k++) {
            float d = MOMENTUM ? g[k] * factor : g[k] * factor + p[k] * l2;
            if (MOMENTUM) {
                m[k] += (d - m[k]) * (1 - b1);
                p[k] = u.rule.nesterov ? d + (m[k] - d) * b1 : m[k];
            } else if (MUON) {
                p[k] = p[k] * keep - g[k] * (lr * b2);
            } else if (LION) {
                const float blend = m[k] * b1 + d * (1 - b1);
                p[k] = p[k] * keep - ((blend > 0) - (blend < 0)) * lr;
                m[k] = m[k] * b2 + d * (1 - b2);
            } else if (ADAM) {
                m[k] = m[k] * b1 + d * (1 - b1);
                v[k] = v[k] * b2 + d * d * (1 - b2);
                // The approximations change the step by at most 4 ulp.
                p[k] = p[k] * keep - m[k] * step * tt__reciprocal(tt__root(v[k]) * root + u.rule.eps);
            } else {
                m[k] = m[k] * b1 + d;
                if (t.m) d = u.rule.nesterov ? d + m[k] * b1 : m[k];
                p[k] -= d * lr;
            }
        }
        update8(t.p, type_p, i, left, wide, p, keys[0], t.begin);
        if (ADAM || t.m) store_state(m, t.m, 0, i, left);
        if (ADAM) store_state(v, t.v, 1, i, left);
    };
    int64_t i = from + 8 * threadIdx.x;
    if (SMALL) { // all lanes of a warp go on while one lane has elements, because they share a block's scale
        for (; i - 8 * (threadIdx.x % 32) < to; i += 2048) update(i, to - i);
    } else if (P == ANY) {
        for (; i < to; i += 2048) update(i, to - i);
    } else { // updates whole groups of 8 elements, then the elements that are left
        for (; i + 8 <= to; i += 2048) update(i, 8);
        if (i < to) update(i, to - i);
    }
}

template <int OP, class U> cudaError_t launch_update(const tt__launch *l, const U *u, unsigned blocks)
{
#define TT__UPDATE(G, P) \
    TT__LAUNCH((update_parameters<OP, G, P, U>), blocks, 256, 0, l->device->stream, *u, TT__RUN_OF(l))
    const int g = u->of[0].types[0], p = u->of[0].types[1];
    bool typed = true;
    for (int k = 0; k < u->count; k++) {
        const typename U::update *t = &u->of[k];
        typed = typed && t->wide && t->types[0] == g && t->types[1] == p && (!t->m || t->types[2] == p);
    }
    // Gradients are f32 with 32-true, with accumulation and for norms' weights.
    if constexpr (OP == TT__OP_ADAM && !U::update::SMALL) {
        if (typed && g == TT_F32 && p == TT_F32) return TT__UPDATE(TT_F32, TT_F32);
        if (typed && g == TT_BF16 && p == TT_F32) return TT__UPDATE(TT_BF16, TT_F32);
        if (typed && g == TT_BF16 && p == TT_BF16) return TT__UPDATE(TT_BF16, TT_BF16);
    }
    return TT__UPDATE(ANY, ANY);
#undef TT__UPDATE
}

update_rule rule_of(const tt__launch *l)
{
    const tt__attr *a = &l->instr->attr;
    return {a->beta1, a->beta2, a->eps, a->nesterov, a->decoupled};
}

void set_scales(param_update *, const tt__launch *) {}
void set_scales(small_update *t, const tt__launch *l)
{
    for (int k = 0; k < 2; k++) t->scales[k] = (float *)l->out[TT__STATES + 1 + k].data;
}

template <int OP, class U> cudaError_t run_updates(const tt__launch *l, int count, U *u)
{
    // Each round launches a kernel for updates that follow one rule.
    for (int from = 0; from < count; from += u->count) {
        const update_rule rule = rule_of(&l[from]);
        const float *clip = (const float *)l[from].in[1].data;
        unsigned blocks = 0;
        u->rule = rule;
        u->clip = clip;
        for (u->count = 0; from + u->count < count && u->count < U::MOST; u->count++) {
            const tt__launch *k = &l[from + u->count];
            const update_rule other = rule_of(k);
            if (memcmp(&other, &rule, sizeof rule) != 0 || k->in[1].data != clip) break;
            const tt__mat *g = &k->in[0], *p = &k->out[0], *m = &k->out[1], *v = &k->out[2];
            typename U::update *t = &u->of[u->count];
            t->g = g->data; t->p = p->data; t->m = m->data; t->v = v->data;
            t->n = p->rows * p->cols;
            t->begin = k->first / 8;
            t->first = blocks;
            blocks += blocks_for(t->n, TT__UPDATE_CHUNK);
            t->weight_decay = k->instr->attr.weight_decay;
            t->lr_factor = tt__lr_factor(&k->instr->attr);
            t->random = k->instr->random;
            t->types[0] = (uint8_t)g->dtype; t->types[1] = (uint8_t)p->dtype; t->types[2] = (uint8_t)m->dtype;
            t->wide = ((uintptr_t)g->data | (uintptr_t)p->data | (uintptr_t)m->data
                       | (uintptr_t)v->data) % 16 == 0;
            set_scales(t, k);
        }
        cudaError_t e = launch_update<OP>(l, u, blocks);
        if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
}

template <int OP> cudaError_t run_update(const tt__launch *l, int count)
{
    bool small = false;
    for (int k = 0; k < count; k++) small = small || (l[k].out[1].data && l[k].out[1].dtype == TT_U8);
    if (!make_arguments(l->device)) return cudaErrorMemoryAllocation;
    if constexpr (OP != TT__OP_MUON) { // MUON has no state: MUON_MOMENTUM updates the momentum
        if (small) return run_updates<OP>(l, count, &l->device->arguments->small);
    }
    return run_updates<OP>(l, count, &l->device->arguments->updates);
}
TT__RUN_BY(SGD, run_update<TT__OP_SGD>)
TT__RUN_BY(ADAM, run_update<TT__OP_ADAM>)
TT__RUN_BY(LION, run_update<TT__OP_LION>)
TT__RUN_BY(MUON_MOMENTUM, run_update<TT__OP_MUON_MOMENTUM>)
TT__RUN_BY(MUON, run_update<TT__OP_MUON>)

// ---- Adafactor, see tt__shape_ADAFACTOR in src/ops/optimizers/rules.h

enum { TT__ADAFACTOR_BLOCKS = 512 }; // max number of blocks that sum squares

struct adafactor_update {
    const void *g;
    void *p;
    float *row, *column;    // running means of g^2; row may be NULL
    int64_t rows, cols;
    const float *clip;
    double *sums;           // the mean of `row`; of each block two sums, of squares of the update and of p
    float weight_decay, lr_factor;
    uint32_t random;
    tt_dtype type_g, type_p;
    bool wide;
};

__device__ __forceinline__ float adafactor_weight(const tt__step_settings *run)
{
    return (float)pow((double)run->step + 1, TT__ADAFACTOR_POWER);
}

// Moves the running mean of a row of g^2. Each block has a row.
__global__ void __launch_bounds__(256) adafactor_square_rows(adafactor_update a, const tt__step_settings *run)
{
    tt__begin_kernel();
    if (!isfinite(a.clip[0])) return;
    const int64_t r = blockIdx.x;
    double sum = 0;
    for (int64_t c = threadIdx.x; c < a.cols; c += 256) {
        const float g = load_any(a.g, a.type_g, r * a.cols + c) * a.clip[1];
        sum += g * g;
    }
    sum = block_sum<256>(sum);
    const float before = a.row[r], mean = (float)(sum / (double)a.cols) + TT__ADAFACTOR_EPS;
    if (threadIdx.x == 0) a.row[r] = before + (mean - before) * adafactor_weight(run);
}

// Moves the running means of 32 columns of g^2. Block 0 also computes the mean of the rows' running means.
__global__ void __launch_bounds__(256) adafactor_square_columns(adafactor_update a,
                                                                const tt__step_settings *run)
{
    tt__begin_kernel();
    TT__SHARED(float, part, [8][32]);
    if (!isfinite(a.clip[0])) return;
    const int x = threadIdx.x % 32, y = threadIdx.x / 32;
    const int64_t c = blockIdx.x * (int64_t)32 + x;
    float sum = 0;
    for (int64_t r = y; r < a.rows && c < a.cols; r += 8) {
        const float g = load_any(a.g, a.type_g, r * a.cols + c) * a.clip[1];
        sum += g * g;
    }
    part[y][x] = sum;
    __syncthreads();
    if (y == 0 && c < a.cols) {
        TT__UNROLL for (int k = 1; k < 8; k++) sum += part[k][x];
        const float before = a.column[c], mean = sum / (float)a.rows + TT__ADAFACTOR_EPS;
        a.column[c] = before + (mean - before) * adafactor_weight(run);
    }
    if (blockIdx.x) return;
    double all = 0;
    for (int64_t r = threadIdx.x; r < a.rows && a.row; r += 256) all += a.row[r];
    all = block_sum<256>(all);
    if (threadIdx.x == 0) a.sums[0] = all / (double)a.rows;
}

// Computes elements [i, i + 8) of the update, of which the first `left` exist; the others are 0. mean: the
// mean of the rows' running means.
__device__ __forceinline__ void adafactor_update8(const adafactor_update &a, float mean, int64_t i,
                                                  int64_t left, float (&u)[8])
{
    int64_t r = i / a.cols, c = i - r * a.cols;
    load8(u, a.g, a.type_g, i, left, a.wide);
    for (int k = 0; k < 8 && k < left; k++) {
        const float of_row = a.row ? sqrtf(mean / a.row[r]) : 1;
        u[k] = u[k] * (a.clip[1] * of_row) / sqrtf(a.column[c]);
        if (++c == a.cols) c = 0, r++;
    }
}

__global__ void __launch_bounds__(256, 4) adafactor_squares(adafactor_update a)
{
    tt__begin_kernel();
    if (!isfinite(a.clip[0])) return;
    const int64_t n = a.rows * a.cols, threads = gridDim.x * (int64_t)256;
    const float mean = (float)a.sums[0];
    double updates = 0, params = 0;
    for (int64_t i = 8 * (blockIdx.x * (int64_t)256 + threadIdx.x); i < n; i += 8 * threads) {
        float u[8], p[8];
        adafactor_update8(a, mean, i, n - i, u);
        load8(p, a.p, a.type_p, i, n - i, a.wide);
        TT__UNROLL for (int k = 0; k < 8; k++) {
            updates += u[k] * u[k];
            params += p[k] * p[k];
        }
    }
    updates = block_sum<256>(updates);
    params = block_sum<256>(params);
    if (threadIdx.x) return;
    a.sums[1 + 2 * blockIdx.x] = updates;
    a.sums[2 + 2 * blockIdx.x] = params;
}

// blocks: number of blocks of adafactor_squares.
__global__ void __launch_bounds__(256) adafactor_step(adafactor_update a, int blocks,
                                                      const tt__step_settings *run)
{
    tt__begin_kernel();
    TT__SHARED(philox_keys, keys, [1]);
    if (!isfinite(a.clip[0])) return;
    const int64_t n = a.rows * a.cols, from = blockIdx.x * (int64_t)TT__UPDATE_CHUNK;
    const int64_t end = from + TT__UPDATE_CHUNK, to = end < n ? end : n;
    const float lr = run->lr * a.lr_factor, keep = 1 - lr * a.weight_decay, mean = (float)a.sums[0];
    double updates = 0, params = 0;
    for (int k = threadIdx.x; k < blocks; k += 256) {
        updates += a.sums[1 + 2 * k];
        params += a.sums[2 + 2 * k];
    }
    updates = block_sum<256>(updates);
    params = block_sum<256>(params);
    if (threadIdx.x == 0)
        expand_key(stream_key(run->seed, TT__RANDOM_ROUNDING, (uint64_t)run->step, a.random), keys[0]);
    __syncthreads();
    const float step = (float)(lr * fmax(TT__ADAFACTOR_LEAST, sqrt(params / (double)n)) /
                               fmax(1.0, sqrt(updates / (double)n)));
    for (int64_t i = from + 8 * threadIdx.x; i < to; i += 2048) {
        float u[8], p[8];
        adafactor_update8(a, mean, i, to - i, u);
        load8(p, a.p, a.type_p, i, to - i, a.wide);
        TT__UNROLL for (int k = 0; k < 8; k++) p[k] = p[k] * keep - u[k] * step;
        update8(a.p, a.type_p, i, to - i, a.wide, p, keys[0], 0);
    }
}

cudaError_t run_adafactor(const tt__launch *l)
{
    const tt__mat *g = &l->in[0], *p = &l->out[0];
    const adafactor_update a = {g->data, p->data, (float *)l->out[1].data, (float *)l->out[2].data, g->rows,
                                g->cols, (const float *)l->in[1].data, resident_of(l)->squares,
                                l->instr->attr.weight_decay, tt__lr_factor(&l->instr->attr),
                                l->instr->random, g->dtype, p->dtype,
                                ((uintptr_t)g->data | (uintptr_t)p->data) % 16 == 0};
    const int64_t n = g->rows * g->cols;
    const unsigned blocks = grid_for(n, 2048, TT__ADAFACTOR_BLOCKS);
    cudaStream_t s = l->device->stream;
    cudaError_t e = cudaSuccess;
    if (a.row) e = TT__LAUNCH(adafactor_square_rows, (unsigned)g->rows, 256, 0, s, a, TT__RUN_OF(l));
    if (e == cudaSuccess)
        e = TT__LAUNCH(adafactor_square_columns, blocks_for(g->cols, 32), 256, 0, s, a, TT__RUN_OF(l));
    if (e == cudaSuccess) e = TT__LAUNCH(adafactor_squares, blocks, 256, 0, s, a);
    if (e == cudaSuccess)
        e = TT__LAUNCH(adafactor_step, blocks_for(n, TT__UPDATE_CHUNK), 256, 0, s, a, (int)blocks,
                       TT__RUN_OF(l));
    return e;
}
TT__RUN_BY(ADAFACTOR, run_adafactor)

// Divides x by the root of a sum of squares.
struct op_unit {
    static constexpr int KIND = RARE;
    const float *squares;
    float factor;
    __device__ void begin() { factor = 1 / fmaxf(sqrtf(*squares), 1e-7f); }
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        load_group(v, g.a, r, c, n, g.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] *= factor;
        return true;
    }
};

cudaError_t run_unit(const tt__launch *l)
{
    const op_unit op = {(const float *)l->in[1].data, 0};
    return run_groups(l->device, l->in[0], no_operand, l->out[0], l->add[0], false, op);
}
TT__RUN_BY(UNIT, run_unit)

// Moves the average of a parameter towards the parameter, as the CPU's ema_rows does.
__global__ void move_average(const float *p, float *average, int64_t n, float decay, const float *clip,
                             const tt__step_settings *run)
{
    tt__begin_kernel();
    if (!isfinite(clip[0])) return;
    const float more = run->step ? 1 - decay : 1;
    const int64_t threads = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += threads)
        average[i] = more < 1 ? average[i] + (p[i] - average[i]) * more : p[i];
}

cudaError_t run_ema(const tt__launch *l)
{
    const int64_t n = l->out[0].rows * l->out[0].cols;
    if (!n) return cudaSuccess;
    return TT__LAUNCH(move_average, grid_for(n, 256, 4096), 256, 0, l->device->stream,
                      (const float *)l->in[0].data, (float *)l->out[0].data, n, l->instr->attr.beta1,
                      (const float *)l->in[1].data, TT__RUN_OF(l));
}
TT__RUN_BY(EMA, run_ema)

} // namespace

/* ==== src/ops/optimizers/cuda_prune.cuh */
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

/* ==== src/ops/collectives/cuda.cuh */
namespace {

// =============================================================================================== collectives
// Collectives over ranks. Kernels load other members' operands from the memory of their devices, or from host
// memory to which cuda_stage has copied them. One kernel does all sums of a launch, and another does all
// copies, if the kernel's arguments have room for them.

// Number of elements of a sum, and number of bytes of a copy, that a thread block works on.
enum { TT__MOVE_ELEMENTS = 4 * 2048, TT__MOVE_BYTES = 1 << 15 };

__device__ __forceinline__ float reduce_two(int how, tt_dtype dtype, float a, float b)
{
    // The result is NaN if a or b is NaN.
    if (how != TT__SUM) return a != a || (how == TT__MAX ? a > b : a < b) ? a : b;
    if (dtype == TT_F32) return a + b;
    TT__WITH_HALF(dtype, T, return to_float(round_to<T>(a + b)));
}
__device__ __forceinline__ double reduce_two(int how, tt_dtype, double a, double b)
{
    if (how != TT__SUM) return a != a || (how == TT__MAX ? a > b : a < b) ? a : b;
    return a + b;
}

// The tree of sums (src/ranks/threads.h), to which members are added one after another. Level b holds the sum
// of 2^b members, or nothing if bit b of the number of members so far is 0.
template <class T, int N, int LEVELS> struct sum_tree {
    T level[LEVELS][N];

    __device__ __forceinline__ void take(int number, T (&x)[N], int how, tt_dtype dtype)
    {
        bool up = true;
        TT__UNROLL for (int b = 0; b < LEVELS; b++) {
            const bool full = number >> b & 1;
            if (up && full) {
                TT__UNROLL for (int k = 0; k < N; k++) x[k] = reduce_two(how, dtype, level[b][k], x[k]);
            } else if (up) {
                TT__UNROLL for (int k = 0; k < N; k++) level[b][k] = x[k];
            }
            up = up && full;
        }
    }

    // Sets x to the sum of the first `count` members, which are all members so far, at least 1.
    __device__ __forceinline__ void finish(int count, T (&x)[N], int how, tt_dtype dtype)
    {
        bool some = false;
        TT__UNROLL for (int b = 0; b < LEVELS; b++) {
            const bool full = count >> b & 1;
            if (full) {
                TT__UNROLL for (int k = 0; k < N; k++)
                    x[k] = some ? reduce_two(how, dtype, level[b][k], x[k]) : level[b][k];
            }
            some = some || full;
        }
    }
};

// Computes sums over members. LEVELS: 4 for at most 8 members, 7 for at most 64 members.
template <int LEVELS>
__global__ void __launch_bounds__(256, LEVELS == 4 ? 3 : 2)
    sum_members(const __grid_constant__ member_sums s)
{
    tt__begin_kernel();
    const member_sum &t = s.of[tensor_of_block(s.of, s.count)];
    const void *const *peer = s.peers + t.peers;
    const tt_dtype type = (tt_dtype)t.type;
    const int64_t from = (int64_t)(blockIdx.x - t.first) * TT__MOVE_ELEMENTS, end = from + TT__MOVE_ELEMENTS;
    const int64_t to = end < t.n ? end : t.n;
    if (t.type == TT__F64) {
        for (int64_t i = from + threadIdx.x; i < to; i += 256) {
            sum_tree<double, 1, LEVELS> tree;
            double x[1] = {0};
            for (int k = 0; k < t.present; k++) {
                x[0] = ((const double *)peer[k])[i];
                tree.take(k, x, t.how, type);
            }
            tree.finish(t.present, x, t.how, type);
            double *y = (double *)t.y + i;
            *y = t.add ? reduce_two(t.how, type, *y, x[0]) : x[0];
        }
        return;
    }
    for (int64_t i = from + 8 * threadIdx.x; i < to; i += 2048) {
        const int64_t left = to - i;
        sum_tree<float, 8, LEVELS> tree;
        float x[8], y[8];
        for (int k = 0; k < t.present; k++) {
            load8(x, peer[k], type, i, left, t.wide);
            tree.take(k, x, t.how, type);
        }
        tree.finish(t.present, x, t.how, type);
        if (t.add) {
            load8(y, t.y, type, i, left, t.wide);
            TT__UNROLL for (int k = 0; k < 8; k++) x[k] = reduce_two(t.how, type, y[k], x[k]);
        }
        store8(t.y, type, i, left, t.wide, x);
    }
}

// Copies bytes [from, to) of t, as elements of type T.
template <class T> __device__ __forceinline__ void copy_as(const member_copy &t, int64_t from, int64_t to)
{
    for (int64_t i = from / (int64_t)sizeof(T) + threadIdx.x; i < to / (int64_t)sizeof(T); i += 256)
        ((T *)t.y)[i] = ((const T *)t.x)[i];
}

__global__ void __launch_bounds__(256) copy_members(const __grid_constant__ member_copies c)
{
    tt__begin_kernel();
    const member_copy &t = c.of[tensor_of_block(c.of, c.count)];
    const int64_t from = (int64_t)(blockIdx.x - t.first) * TT__MOVE_BYTES, end = from + TT__MOVE_BYTES;
    const int64_t to = end < t.bytes ? end : t.bytes, whole = to / t.unit * t.unit;
    switch (t.unit) {
    case 16: copy_as<uint4>(t, from, whole); break;
    case 8: copy_as<uint2>(t, from, whole); break;
    case 4: copy_as<uint32_t>(t, from, whole); break;
    case 2: copy_as<uint16_t>(t, from, whole); break;
    default: copy_as<uint8_t>(t, from, whole); break;
    }
    copy_as<uint8_t>(t, whole, to);
}

// The sums and copies that run_move has collected for its next kernel launches.
struct move_batch {
    cudaStream_t stream;
    member_sums *sums;
    member_copies *copies;
    unsigned sum_blocks, copy_blocks;
    bool many;          // whether any sum has more than 8 members
};

cudaError_t launch_sums(move_batch *b)
{
    cudaError_t e = cudaSuccess;
    if (b->sum_blocks && b->many)
        e = TT__LAUNCH((sum_members<7>), b->sum_blocks, 256, 0, b->stream, *b->sums);
    else if (b->sum_blocks) e = TT__LAUNCH((sum_members<4>), b->sum_blocks, 256, 0, b->stream, *b->sums);
    b->sums->count = b->sums->used = 0;
    b->sum_blocks = 0;
    b->many = false;
    return e;
}

cudaError_t launch_copies(move_batch *b)
{
    cudaError_t e = cudaSuccess;
    if (b->copy_blocks)
        e = TT__LAUNCH(copy_members, b->copy_blocks, 256, 0, b->stream, *b->copies);
    b->copies->count = 0;
    b->copy_blocks = 0;
    return e;
}

// The work of a collective in one phase. Each member has a shard of the whole tensor. Unless `spread`, a
// member makes its own shard from the same elements of all members' operands. If `spread`, a member copies
// the shard of each member from the operand of that member.
struct move_plan {
    bool spread;
    bool sums;          // true: sums the operands of all present members; false: copies one operand
    bool of_results;    // true: the operands are in peer_out; false: in peer_in
    bool packed;        // whether an operand has only its member's shard
    bool to_piece;      // whether the result has only this member's shard
    int owner;          // the member whose shard is the whole tensor; -1: tt__shard gives the shards
    int only;           // the only member with an operand; -1: all members have operands
};

move_plan plan_of(const tt__launch *l)
{
    const tt__move *m = &l->instr->move;
    const bool spread = l->phase == TT__SPREAD_PHASE;
    const int owner = m->root ? 0 : -1;
    switch (l->instr->op) {
    //                                       spread  sums     results packed to_piece owner  only
    case TT__OP_ALL_REDUCE: return          {spread, !spread, spread, false, false,   -1,    -1};
    case TT__OP_REDUCE_SCATTER: return      {false,  true,    false,  false, true,    owner, -1};
    case TT__OP_SUM_SLOTS: return           {false,  true,    false,  false, false,   l->me, -1};
    case TT__OP_ALL_GATHER: return          {true,   false,   false,  true,  false,   owner, -1};
    case TT__OP_BROADCAST: return           {spread, false,   spread, false, false,   -1,    spread ? -1 : 0};
    case TT__OP_SEND: case TT__OP_RECV: default:
        return                              {false,  false,   false,  false, false,   m->to, m->from};
    }
}

int64_t elements_of(const tt__mat &m) { return m.data ? m.rows * m.cols : 0; }

// The part of a member's shard that a launch works on: elements [first, first + n) of the whole tensor. The
// shard begins at element `begin` and has `left` more elements after this part.
struct shard_part { int64_t begin, first, n, left; };

shard_part part_of(const tt__launch *l, const move_plan &p, int member)
{
    const int64_t whole = max(elements_of(l->in[0]), elements_of(l->out[0]));
    shard_part part = {0, 0, member == p.owner ? whole : 0, 0};
    if (p.owner < 0)
        part.n = tt__shard(whole, l->instr->move.unit, false, member, l->members, &part.begin);
    const int64_t from = l->staged ? min(l->from, part.n) : 0;
    part.first = part.begin + from;
    part.n -= from;
    part.left = l->staged ? max(part.n - l->max, (int64_t)0) : 0;
    part.n -= part.left;
    return part;
}

char *element_of(const void *data, tt_dtype dtype, int64_t k)
{
    return (char *)data + k * (int64_t)tt_dtype_bytes(dtype);
}

// Returns the address at which this member's kernels read `part` of member k's operand.
const void *operand_of(const tt__launch *l, const move_plan &p, int k, const shard_part &part)
{
    const tt__mat &m = p.of_results ? l->peer_out[k] : l->peer_in[k];
    const tt_dtype dtype = l->out[0].dtype;
    if (!l->staged || k == l->me || !l->staged[k])
        return element_of(m.data, dtype, part.first - (p.packed ? part.begin : 0));
    return element_of(l->staged[k], dtype, p.spread ? 0 : l->me * l->max);
}

// Returns the largest power of two, up to 16 bytes, that divides both addresses.
int unit_of(const void *x, const void *y)
{
    int unit = 16;
    while (((uintptr_t)x | (uintptr_t)y) % (unsigned)unit) unit /= 2;
    return unit;
}

cudaError_t add_copy(move_batch *b, void *y, const void *x, int64_t bytes)
{
    cudaError_t e = cudaSuccess;
    if (bytes <= 0 || y == x) return e;
    if (b->copies->count == TT__TENSORS) e = launch_copies(b);
    b->copies->of[b->copies->count++] = {y, x, bytes, b->copy_blocks, unit_of(x, y)};
    b->copy_blocks += blocks_for(bytes, TT__MOVE_BYTES);
    return e;
}

cudaError_t add_sum(move_batch *b, const tt__launch *l, const move_plan &p, const shard_part &part, void *y)
{
    cudaError_t e = cudaSuccess;
    if (part.n <= 0) return e;
    member_sums *s = b->sums;
    if (s->count == TT__TENSORS || s->used + l->present > TT__PEERS) e = launch_sums(b);
    int unit = 16;
    for (int k = 0; k < l->present; k++) {
        s->peers[s->used + k] = operand_of(l, p, k, part);
        unit = min(unit, unit_of(y, s->peers[s->used + k]));
    }
    s->of[s->count++] = {y, part.n, b->sum_blocks, s->used, l->present, (uint8_t)l->out[0].dtype,
                         (uint8_t)l->instr->move.reduce, l->add[0], unit == 16};
    s->used += l->present;
    b->sum_blocks += blocks_for(part.n, TT__MOVE_ELEMENTS);
    b->many = b->many || l->present > 8;
    return e;
}

cudaError_t add_move(move_batch *b, const tt__launch *l)
{
    const move_plan p = plan_of(l);
    const tt__mat &y = l->out[0];
    const int64_t item = (int64_t)tt_dtype_bytes(y.dtype);
    const bool adds_up = p.sums || l->instr->op == TT__OP_ALL_REDUCE;
    cudaError_t e = cudaSuccess;
    if (adds_up && !l->present) return e; // no member has an operand
    if (!p.spread) {
        const shard_part part = part_of(l, p, l->me);
        void *to = element_of(y.data, y.dtype, part.first - (p.to_piece ? part.begin : 0));
        return p.sums ? add_sum(b, l, p, part, to)
            : part.n ? add_copy(b, to, operand_of(l, p, p.only, part), part.n * item) : e;
    }
    // In a broadcast, the result of member 0 may be its operand; then there is nothing to copy.
    if (l->instr->op == TT__OP_BROADCAST && l->me == 0 && y.data == l->in[0].data) return e;
    for (int k = 0; k < l->members && e == cudaSuccess; k++) {
        const shard_part part = part_of(l, p, k);
        if (!part.n) continue;
        void *to = element_of(y.data, y.dtype, part.first);
        e = add_copy(b, to, operand_of(l, p, k, part), part.n * item);
    }
    return e;
}

// Runs `count` collectives of one op in one phase.
cudaError_t run_move(const tt__launch *l, int count)
{
    if (!make_arguments(l->device)) return cudaErrorMemoryAllocation;
    group_arguments *a = l->device->arguments;
    move_batch b = {stream_of(l), &a->sums, &a->copies, 0, 0, false};
    cudaError_t e = cudaSuccess;
    b.sums->count = b.sums->used = b.copies->count = 0;
    for (int k = 0; k < count && e == cudaSuccess; k++) e = add_move(&b, &l[k]);
    if (e == cudaSuccess) e = launch_sums(&b);
    return e == cudaSuccess ? launch_copies(&b) : e;
}
TT__RUN_BY(ALL_REDUCE, run_move)
TT__RUN_BY(REDUCE_SCATTER, run_move)
TT__RUN_BY(ALL_GATHER, run_move)
TT__RUN_BY(BROADCAST, run_move)
TT__RUN_BY(RECV, run_move)
TT__RUN_BY(SUM_SLOTS, run_move)

tt_status cuda_stage(const tt__launch *l, bool *more)
{
    tt__device *d = l->device;
    const move_plan p = plan_of(l);
    const tt__mat &m = p.of_results ? l->out[0] : l->in[0];
    tt_status status = use(d) && stream_of(l) ? TT_OK : TT_ERR_DEVICE;
    *more = false;
    for (int k = 0; k < l->members && status == TT_OK; k++) {
        const shard_part part = part_of(l, p, k);
        const bool needed = p.spread ? k == l->me : k != l->me;
        const bool there = p.only < 0 ? !p.sums || l->me < l->present : p.only == l->me;
        *more = *more || part.left > 0;
        if (!needed || !there || !part.n) continue;
        const char *x = element_of(m.data, m.dtype, part.first - (p.packed ? part.begin : 0));
        char *to = element_of(l->staged[l->me], m.dtype, p.spread ? 0 : k * l->max);
        const size_t bytes = (size_t)part.n * tt_dtype_bytes(m.dtype);
        status = check(d, cudaMemcpyAsync(to, x, bytes, cudaMemcpyDeviceToHost, stream_of(l)),
                       "copy for other devices");
    }
    return status;
}

} // namespace

/* ==== src/ops/collectives/cuda_peers.cuh */
namespace {

// ---- trials that find out which devices can load from each other's memory

#ifndef TT__PROBE_BYTES // tests make TT__PROBE_BYTES smaller
#define TT__PROBE_BYTES ((size_t)16 << 20)
#endif

__device__ __forceinline__ uint4 probe_words(int64_t i)
{
    const uint32_t u = (uint32_t)i * 4;
    return make_uint4(u * 2654435761u, (u + 1) * 2654435761u, (u + 2) * 2654435761u, (u + 3) * 2654435761u);
}

__global__ void __launch_bounds__(256) fill_probe(uint4 *to, int64_t n)
{
    tt__begin_kernel();
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < n; i += gridDim.x * (int64_t)256)
        to[i] = probe_words(i);
}

// Adds to *wrong the number of the n vectors at p that differ from the vectors of fill_probe.
__global__ void __launch_bounds__(256) check_probe(const uint4 *p, int64_t n, unsigned *wrong)
{
    tt__begin_kernel();
    unsigned count = 0;
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < n; i += gridDim.x * (int64_t)256) {
        const uint4 found = p[i], expected = probe_words(i);
        count += found.x != expected.x || found.y != expected.y || found.z != expected.z ||
            found.w != expected.w;
    }
    if (count) atomicAdd(wrong, count);
}

// A trial with two devices: kernels of d load bytes from the memory of `from`.
struct peer_probe {
    tt__device *d, *from;
    // Buffers of TT__PROBE_BYTES. source: in the memory of `from`; target: in d's memory; pinned: in the
    // host's memory, or NULL.
    void *source, *target, *pinned;
    unsigned *wrong;                // number of 16-byte vectors with wrong bytes; in d's memory
    enum { WORDS = TT__PROBE_BYTES / 16, BLOCKS = WORDS < 65536 ? 2 : 256 };
};

tt_status open_probe(peer_probe *p)
{
    tt__device *d = p->d, *from = p->from;
    if (!(p->source = cuda_allocate(from, TT__PROBE_BYTES))) return fail(d, TT_ERR_DEVICE, "%s", from->error);
    if (!(p->target = cuda_allocate(d, TT__PROBE_BYTES)) ||
        !(p->wrong = (unsigned *)cuda_allocate(d, sizeof *p->wrong)))
        return TT_ERR_DEVICE;
    if (!use(from) ||
        check(from, TT__LAUNCH(fill_probe, p->BLOCKS, 256, 0, from->stream, (uint4 *)p->source, p->WORDS),
              "launch of a probe") != TT_OK || cuda_wait(from) != TT_OK)
        return fail(d, TT_ERR_DEVICE, "%s", from->error);
    const bool made = make_arguments(d) && make_arguments(from);
    return made ? TT_OK : fail(d, TT_ERR_MEMORY, "out of memory: free memory");
}

void close_probe(peer_probe *p)
{
    if (p->source || p->target) { // waits, because the other device may still use memory that is released
        cuda_wait(p->from);
        cuda_wait(p->d);
    }
    if (p->pinned) cuda_release_host(p->from, p->pinned);
    if (p->source) cuda_release(p->from, p->source);
    if (p->target) cuda_release(p->d, p->target);
    if (p->wrong) cuda_release(p->d, p->wrong);
}

// Sets *wrong to the number of 16-byte vectors of the probe at `at` that kernels of d load with wrong bytes.
tt_status count_wrong(peer_probe *p, const void *at, unsigned *wrong)
{
    tt__device *d = p->d;
    tt_status status = cuda_fill(d, p->wrong, 0, sizeof *p->wrong);
    if (status == TT_OK)
        status = check(d, TT__LAUNCH(check_probe, p->BLOCKS, 256, 0, d->stream, (const uint4 *)at, p->WORDS,
                                     p->wrong), "launch of a probe");
    return status == TT_OK ? cuda_read(d, wrong, p->wrong, sizeof *wrong) : status;
}

// Times a copy of TT__PROBE_BYTES on d, by the kernel that collectives use (by_kernel) or by cudaMemcpyAsync.
// Adds the milliseconds to *ms.
tt_status time_copy(tt__device *d, void *to, const void *from, bool by_kernel, double *ms)
{
    cudaEvent_t event[2] = {NULL, NULL};
    float took = 0;
    tt_status status = use(d) ? TT_OK : TT_ERR_DEVICE;
    for (int k = 0; k < 2 && status == TT_OK; k++)
        status = check(d, cudaEventCreateWithFlags(&event[k], cudaEventDefault), "cudaEventCreate");
    for (int k = 0; k < 2 && status == TT_OK; k++) {
        move_batch b = {d->stream, &d->arguments->sums, &d->arguments->copies, 0, 0, false};
        b.copies->count = 0;
        if (k && by_kernel) {
            cudaError_t e = add_copy(&b, to, from, TT__PROBE_BYTES);
            status = check(d, e == cudaSuccess ? launch_copies(&b) : e, "launch of a probe");
        } else if (k) {
            status = check(d, cudaMemcpyAsync(to, from, TT__PROBE_BYTES, cudaMemcpyDefault, d->stream),
                           "copy of a probe");
        }
        if (status == TT_OK) status = check(d, cudaEventRecord(event[k], d->stream), "cudaEventRecord");
    }
    if (status == TT_OK) status = cuda_wait(d);
    if (status == TT_OK)
        status = check(d, cudaEventElapsedTime(&took, event[0], event[1]), "cudaEventElapsedTime");
    for (int k = 0; k < 2; k++) if (event[k]) cudaEventDestroy(event[k]);
    *ms += took;
    return status;
}

// Tests whether copies and loads by peer access get the right bytes. If not, sets *wrong to a message. Adds
// the milliseconds of a copy to *ms.
tt_status try_access(peer_probe *p, const char **wrong, double *ms)
{
    tt__device *d = p->d;
    const int from = p->from->index;
    unsigned copied = 0, loaded = 0;
    if (!use(d)) return TT_ERR_DEVICE;
    const cudaError_t e = cudaDeviceEnablePeerAccess(from, 0);
    const bool before = e == cudaErrorPeerAccessAlreadyEnabled;
    if (before) cudaGetLastError();
    tt_status status = before ? TT_OK : check(d, e, "cudaDeviceEnablePeerAccess");
    if (status != TT_OK) return status;
    status = check(d, cudaMemcpyPeerAsync(p->target, d->index, p->source, from, TT__PROBE_BYTES, d->stream),
                   "copy of a probe");
    if (status == TT_OK) status = count_wrong(p, p->target, &copied);
    if (status == TT_OK) status = count_wrong(p, p->source, &loaded);
    if (status == TT_OK) status = time_copy(d, p->target, p->source, true, ms);
    if (copied || loaded) *wrong = copied ? "copies wrong bytes" : "loads wrong bytes";
    if ((status != TT_OK || *wrong) && !before && use(d)) cudaDeviceDisablePeerAccess(from);
    return status;
}

// Times a copy through the host's memory, and adds the milliseconds to *ms.
tt_status time_staged(peer_probe *p, double *ms)
{
    if (!(p->pinned = cuda_allocate_host(p->from, TT__PROBE_BYTES)) ||
        time_copy(p->from, p->pinned, p->source, false, ms) != TT_OK)
        return fail(p->d, TT_ERR_DEVICE, "%s", p->from->error);
    return time_copy(p->d, p->target, p->pinned, true, ms);
}

const char *cuda_peer(tt__device *d, tt__device *from, double *rate)
{
    const char *peers = getenv("TINYTRAIN_PEERS"), *wrong = NULL;
    const bool forced = peers && strcmp(peers, "0") == 0;
    peer_probe p = {d, from, NULL, NULL, NULL, NULL};
    double ms = 0;
    int can = 0;
    *rate = 0;
    if (d == from || (d->index == from->index && !forced)) return NULL;
    tt_status status = open_probe(&p);
    if (status == TT_OK && !forced)
        status = check(d, cudaDeviceCanAccessPeer(&can, d->index, from->index), "cudaDeviceCanAccessPeer");
    if (status == TT_OK && can) status = try_access(&p, &wrong, &ms);
    const bool reached = status == TT_OK && can && !wrong;
    if (!reached) ms = 0;
    if (status == TT_OK && !reached) status = time_staged(&p, &ms);
    close_probe(&p);
    if (status == TT_OK && ms > 0) *rate = 1e3 * (double)TT__PROBE_BYTES / ms;
    if (reached) return NULL;
    char measured[64] = "";
    if (*rate > 0) snprintf(measured, sizeof measured, " (%.1f GB/s)", 1e-9 * *rate);
    snprintf(d->peer, sizeof d->peer,
             "device pair %d -> %d %s%s%s: copies between them go through the host%s", from->index, d->index,
             status != TT_OK ? "could not be tried, " : forced ? "is not tried, because TINYTRAIN_PEERS is 0"
             : wrong ? "reports peer access, but " : "has no peer access", status != TT_OK ? d->error : "",
             status == TT_OK && wrong ? wrong : "", measured);
    return d->peer;
}

} // namespace

/* ==== src/ops/attention/cuda_shared.cuh */
namespace {

// ================================================================================================= attention
// Attention within each sequence and head, without the matrix of scores in memory (Dao: "FlashAttention-2",
// 2023). A thread block owns a tile of queries (or of keys) of one head and goes through the sequence's keys
// (or queries). The backward is two kernels. In one, a block owns a tile of queries and makes dq and the sums
// of dout * out of each row and head; in the other, a block owns a tile of keys and makes dk and dv. The
// scores are thus computed twice, with seven products instead of five, but no two blocks add to one number,
// so that neither atomics nor a dq in fp32 are needed. If a block holds all keys of a sequence, one kernel
// makes dq, dk and dv with five products; bench/results/NOTES.md has the arithmetic. A separate kernel makes
// the sums of dout * out before that kernel, and where no dq is wanted or the rows of out are not aligned.
// The tiles of SIZE rows of sequence s are numbered from start[s] / SIZE + s on. These numbers leave room for
// all tiles of sequences of any lengths, so rows / SIZE + seqs blocks are enough and the host need not know
// the lengths. Blocks whose number has no tile do nothing.

struct attention_args {
    tt__mat q, k, v, out, dout, dq, dk, dv;
    const int32_t *seq_start, *query_start; // (seqs + 1): first row, first query of each sequence
    // Each query's row of the batch, and each query's row in q; NULL: the row is the number of the query.
    const int32_t *query_row, *query_at;
    // Log-sum-exp of the scores, and sum of dout * out; both have the shape (rows of q, heads).
    float *lse, *delta;
    const tt__step_settings *run;
    int seqs, heads, head_size;
    int group;      // heads of q that share a head of k and v
    int first_head; // number of the first head among all ranks' heads
    int longest;    // max number of rows of a sequence
    bool causal, add_dq, add_dk, add_dv;
    int window;                             // rows seen back and, unless causal, ahead; 0: no window
    int smallest, largest;                        // a row sees keys with smallest <= row - key <= largest
    int alibi_heads;                        // number of heads of all ranks; 0: no ALiBi
    float alibi;
    bool alibi_rounded;                     // rounds as transformers' Falcon does (tt_attention_options)
    // Options of block-sparse attention (tt_attention_options). Without block-sparse attention, `block` is 0.
    int block, dense, listed, list_rows;
    const uint16_t *lists;                  // copy of tt__launch.lists in the device's memory
    // scale: factor of the scores; factor: `scale * log2 e`, for exp2; keep_scale: factor of the weights that
    // dropout keeps.
    float scale, factor, keep_scale;
    // Partial column sums of dq (parts_q rows), dk and dv (parts_k rows). Each row has the sums over one
    // tile of rows, written by the thread blocks that own the tile. NULL: the sums are not wanted.
    float *sums_q, *sums_k, *sums_v;
    int parts_q, parts_k;
    // Partial sums of dq, which attention_sum_parts adds up: one matrix after another, each with a row of the
    // shape (heads, head_size) for every query that its thread blocks see. attention_backward_wide fills the
    // matrices. NULL: a thread block has all keys of a sequence, so dq has no partial sums.
    float *parts;
    int64_t slot_begin[TT__CUDA_ATTENTION_SLOTS]; // row of `parts` at which each slot begins
    int slots;
    int pass;                               // number of the current launch of attention_backward_wide, from 0
    int span_rows, span_cols;               // shape of the matrix of span numbers, see attention_find_span
    bool drop;
    uint32_t either[4];                     // masks for the threshold of dropout (tt__attention_either)
    uint32_t random;
    // Bits that tell which weights dropout keeps (attention_bits); NULL: each kernel draws for itself.
    unsigned char *bits;
    bool sums_deltas;                       // whether the kernel of dq computes `delta`
    int warps;                              // warps of attention_backward; 0: two kernels make the gradients
    // item_tiles: number of tiles of a head; item_group: number of heads that are computed at a time;
    // item_rounds: number of items that a thread block takes. See attention_item_of.
    int item_tiles, item_group, item_rounds;
};

#define TT__LOG2E 1.44269504088896341f

__device__ __forceinline__ uint64_t attention_key(const attention_args &p)
{
    const tt__step_settings *run = p.run;
    return p.drop ? stream_key(run->seed, TT__RANDOM_DROPOUT, (uint64_t)run->step,
                               (uint64_t)run->micro << 32 | p.random) : 0;
}

// Returns 16 bits that tell which weights of a query dropout keeps, for the keys from `16 * group` to
// `16 * group + 15` of the query's sequence. row: the query's row of the batch. See tt__attention_either.
__device__ __forceinline__ uint32_t attention_keep(const attention_args &p, uint64_t key, int row, int group,
                                                   int head)
{
    const uint32_t counter[4] = {(uint32_t)row, (uint32_t)group, (uint32_t)head, 0};
    uint32_t x[4], kept = 0xffffffffu;
    philox<TT__DRAW_ROUNDS>(counter, key, x);
    TT__UNROLL for (int b = 0; b < 4; b++) kept = (x[b] & kept) | (p.either[b] & (x[b] | kept));
    kept <<= 16;
    TT__UNROLL for (int b = 0; b < 4; b++) kept = (x[b] & kept) | (p.either[b] & (x[b] | kept));
    return kept >> 16;
}

// A tile of a sequence's queries or of its keys.
struct attention_tile {
    int sequence;
    int begin, length;  // the sequence's first row of the batch, and its number of rows
    int first, queries; // the sequence's first query, and its number of queries
    int at;             // first row or first query of the tile, counted in the sequence
};

// Returns the tile of SIZE rows that has this number (see the beginning of the file); start[s] is the first
// row or query of sequence s. The result has at < 0 if no tile has the number.
template <int SIZE>
__device__ __forceinline__ attention_tile attention_find(const attention_args &p, const int32_t *start,
                                                         int number)
{
    const int lane = threadIdx.x % 32;
    int s = 0, n = p.seqs; // the sequence is one of the n sequences from s on; each pass tests 32 of these n
    while (n > 1) {
        int step = (n + 31) / 32, probe = s + lane * step;
        bool before = lane * step < n && start[probe] / SIZE + probe <= number;
        int last = __popc(__ballot_sync(0xffffffffu, before)) - 1;
        s += last * step;
        n = min(step, n - last * step);
    }
    attention_tile t;
    t.sequence = s;
    t.begin = p.seq_start[s];
    t.length = p.seq_start[s + 1] - t.begin;
    t.first = p.query_start[s];
    t.queries = p.query_start[s + 1] - t.first;
    t.at = (number - start[s] / SIZE - s) * SIZE;
    if (t.at >= start[s + 1] - start[s]) t.at = -1;
    return t;
}

// Returns the place of the bits that tell which weights of a tile of 64 queries and a tile of 64 keys
// dropout keeps. queries, keys: the numbers of the two tiles in a sequence; begin: the sequence's
// attention_bits_begin. The kernel of dq writes the bits for the kernel of dk and dv. The bits have the
// shape (4, 64, 16): the bit of query i and key j, see attention_keep, has number
// `(j / 16 * 64 + i) * 16 + j % 16`. The pairs of tiles are stored as a matrix. In causal attention no pair
// above the diagonal exists, so the pairs are stored as a triangle. See tt__cuda_attention_bits.
__device__ __forceinline__ unsigned char *attention_bits(const attention_args &p, int64_t begin, int queries,
                                                         int keys, int head)
{
    const int pair = p.causal ? queries * (queries + 1) / 2 : queries * ((p.longest + 63) / 64);
    return p.bits + ((begin + pair + keys) * p.heads + head) * TT__CUDA_ATTENTION_BITS;
}

// Returns the number of pairs of tiles whose bits are stored before those of t's sequence.
__device__ __forceinline__ int64_t attention_bits_begin(const attention_args &p, const attention_tile &t)
{
    const int64_t across = (p.longest + 63) / 64, tiles = t.begin / 64 + t.sequence;
    return p.causal ? tiles * (across + 1) / 2 : tiles * across;
}

// Returns the end of the keys that any of a tile's `count` queries sees, without a window.
__device__ __forceinline__ int attention_end(const attention_args &p, const attention_tile &t, int count)
{
    return p.causal && !p.query_row ? min(t.length, t.at + count) : t.length;
}

// attention_window_end returns the end of the keys that any of a tile's `count` queries sees, with or without
// a window; attention_window_begin returns the first of these keys. Listed queries count as seeing all keys.
__device__ __forceinline__ int attention_window_end(const attention_args &p, const attention_tile &t,
                                                    int count)
{
    const bool ends = p.window && !p.causal && !p.query_row;
    return ends ? min(t.length, t.at + count + p.window - 1) : attention_end(p, t, count);
}
__device__ __forceinline__ int attention_window_begin(const attention_args &p, const attention_tile &t)
{
    return p.window && !p.query_row ? max(0, t.at - p.window + 1) : 0;
}

// attention_queries_begin returns the first query that sees any of a tile's `count` keys;
// attention_queries_end returns the end of these queries.
__device__ __forceinline__ int attention_queries_begin(const attention_args &p, const attention_tile &t)
{
    return p.query_row ? 0 : p.causal ? t.at : attention_window_begin(p, t);
}
__device__ __forceinline__ int attention_queries_end(const attention_args &p, const attention_tile &t,
                                                     int count)
{
    return p.window && !p.query_row ? min(t.queries, t.at + count + p.window - 1) : t.queries;
}

// Returns whether row `row` of a sequence sees key `key`.
__device__ __forceinline__ bool attention_sees(const attention_args &p, int row, int key, int length)
{
    return key < length && row - key >= p.smallest && row - key <= p.largest;
}

// Returns the number of blocks of a sequence in block-sparse attention; 0: the sequence is dense.
__device__ __forceinline__ int attention_blocks(const attention_args &p, int length)
{
    return p.block && length > p.dense ? (length + p.block - 1) / p.block : 0;
}

// Returns how many times block i of queries sees block j of keys in a sequence of n blocks. head: a number
// among the heads of all ranks.
__device__ __forceinline__ int attention_times(const attention_args &p, int head, int n, int i, int j)
{
    const int last = n - 1;
    int times = i == 0 || i == last || j == 0 || j == last || abs(i - j) < 2;
    if (i == 0 || i == last || i >= p.list_rows) return times;
    if (!p.lists) return times + (j == 0 ? p.listed : 0);
    const uint16_t *list = p.lists + ((int64_t)head * p.list_rows + i) * p.listed;
    for (int k = 0; k < p.listed; k++) times += list[k] == j;
    return times;
}

// A part of the lists of blocks, which a launch of attention_write_lists passes as a kernel argument. If the
// lists were copied instead, the host would have to wait before it could change them again.
struct attention_lists { uint16_t block[1536]; };
__global__ __launch_bounds__(256) void attention_write_lists(attention_lists lists, uint16_t *to, int n)
{
    tt__begin_kernel();
    for (int i = (int)threadIdx.x; i < n; i += 256) to[i] = lists.block[i];
}

// Returns the ALiBi slope of a head, see tt__alibi_exponent; 0 without ALiBi. head: a number among the heads
// of all ranks.
__device__ __forceinline__ float attention_slope(const attention_args &p, int head)
{
    const int n = p.alibi_heads ? 1 << (31 - __clz(p.alibi_heads)) : 1;
    if (p.alibi_heads == 0) return 0;
    const float slope =
        exp2f((head < n ? -8.0f * (float)(head + 1) : -4.0f * (float)(2 * (head - n) + 1)) / (float)n);
    return p.alibi * (p.alibi_rounded ? to_float(round_to<bf16>(slope)) : slope);
}

// Returns the number that ALiBi subtracts from the score of a row and a key.
__device__ __forceinline__ float attention_bias(const attention_args &p, float slope, int row, int key)
{
    if (!p.alibi_rounded) return slope * fabsf((float)(row - key));
    const float own = to_float(round_to<bf16>(slope / p.alibi)); // exact: the slope is a bf16 number
    const float at_row = own * to_float(round_to<bf16>((float)row));
    const float at_key = own * to_float(round_to<bf16>((float)key));
    return p.alibi * (to_float(round_to<bf16>(at_row)) - to_float(round_to<bf16>(at_key)));
}

// Returns the row of the batch of query number `query`.
__device__ __forceinline__ int attention_row(const attention_args &p, int query)
{
    return p.query_row ? p.query_row[query] : query;
}

// Returns the index of a query and head in lse and delta.
__device__ __forceinline__ int64_t attention_sums_at(const attention_args &p, int query, int head)
{
    return (int64_t)(p.query_at ? p.query_at[query] : query) * p.heads + head;
}

// Sorts n queries by sequence, and within a sequence in the order of `index`; index[j] is the row of query j.
// Makes n^2 comparisons, which even for tens of thousands of queries are less work than one tile of scores
// for each query.
__global__ __launch_bounds__(256) void attention_order(const int32_t *index, int n, const int32_t *seq_start,
                                                       int seqs, int32_t *query_start, int32_t *query_row,
                                                       int32_t *query_at)
{
    tt__begin_kernel();
    TT__SHARED(int32_t, rows, [256]);
    const int j = (int)(blockIdx.x * 256 + threadIdx.x); // a query or, from n on, the start of a sequence
    int begin = 0, end = 0, row = 0, rank = 0;
    if (j < n) {
        int low = 0, high = seqs;
        row = index[j];
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (seq_start[middle] <= row) low = middle;
            else high = middle;
        }
        begin = seq_start[low];
        end = seq_start[low + 1];
    } else if (j <= n + seqs) begin = end = seq_start[j - n];
    for (int from = 0; from < n; from += 256) {
        __syncthreads();
        if (from + (int)threadIdx.x < n) rows[threadIdx.x] = index[from + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < min(256, n - from); i++)
            rank += rows[i] < begin || (from + i < j && rows[i] < end);
    }
    if (j < n) {
        query_row[rank] = row;
        query_at[rank] = j;
    } else if (j <= n + seqs) query_start[j - n] = rank;
}

// Computes the sums of dout * out of each row and head, with loads of 16 bytes. PARTS threads of a warp
// compute a sum together. The PARTS threads make NUMBERS sums, whose loads are in flight together.
enum { TT__DELTA_NUMBERS = 4 };
template <class T, int PARTS> __global__ __launch_bounds__(256) void attention_delta(attention_args p)
{
    tt__begin_kernel();
    enum { LANES = 16 / (int)sizeof(T), NUMBERS = TT__DELTA_NUMBERS, STEP = 256 / PARTS };
    const int64_t all = p.q.rows * p.heads;
    const int64_t first = (int64_t)blockIdx.x * NUMBERS * STEP + threadIdx.x / PARTS;
    const int part = (int)threadIdx.x % PARTS * LANES;
    const bool mine = part < p.head_size;
    uint4 a[NUMBERS], b[NUMBERS];
    TT__UNROLL for (int k = 0; k < NUMBERS; k++) {
        const int64_t number = min(first + k * STEP, all - 1), row = number / p.heads;
        const int64_t column = number % p.heads * p.head_size + (mine ? part : 0);
        a[k] = *(const uint4 *)((const T *)p.out.data + row * p.out.ld + column);
        b[k] = *(const uint4 *)((const T *)p.dout.data + row * p.dout.ld + column);
    }
    TT__UNROLL for (int k = 0; k < NUMBERS; k++) {
        float x[8], y[8], sum = 0;
        widen8<T>(x, a[k]);
        widen8<T>(y, b[k]);
        if (mine) TT__UNROLL for (int i = 0; i < LANES; i++) sum += x[i] * y[i];
        TT__UNROLL for (int m = 1; m < PARTS; m *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
        const int64_t number = first + k * STEP;
        if (part == 0 && number < all) p.delta[number] = sum;
    }
}

// Computes the sums of dout * out of each row and head for any dtypes and addresses; a warp computes one sum.
__global__ __launch_bounds__(256) void attention_delta_any(attention_args p)
{
    tt__begin_kernel();
    const int64_t number = (int64_t)blockIdx.x * 8 + threadIdx.x / 32, row = number / p.heads;
    const int64_t column = number % p.heads * p.head_size;
    const int lane = threadIdx.x % 32;
    float sum = 0;
    for (int i = lane; i < p.head_size && row < p.q.rows; i += 32)
        sum += load_any(p.out.data, p.out.dtype, row * p.out.ld + column + i) * load_any(p.dout.data,
                p.dout.dtype, row * p.dout.ld + column + i);
    sum = warp_sum(sum);
    if (lane == 0 && row < p.q.rows) p.delta[number] = sum;
}

} // namespace

/* ==== src/ops/attention/cuda_f32.cuh */
namespace {

// ---- attention in f32 arithmetic, for any dtypes, strides and head sizes. A block of 256 threads works on
// tiles of 64 queries and 64 keys. Thread (x, y) of 16 x 16 has the scores of rows `y + 16 * a` and columns
// `x + 16 * b`, for a and b in 0 to 3, and the outputs of rows `y + 16 * a` and columns `4 * x` to
// `4 * x + 3`. A block makes 64 columns of a head; several blocks make a larger head, and each of them
// computes the scores.

struct attention_rows { // `count` rows of the matrix m
    const tt__mat *m;
    const int32_t *at; // row numbers; NULL: the rows from `first` on
    int first, count;
};

// Copies COLUMNS columns of the rows x, beginning with column `column`, into `to` (64, PITCH). columns:
// number of columns that x has from column `column` on. Columns that x lacks, and rows after the last row of
// x, become zeros.
template <int COLUMNS, int PITCH>
__device__ __forceinline__ void attention_stage(float *to, const attention_rows &x, int64_t column,
                                                int columns)
{
    const tt__mat &m = *x.m;
    const bool whole = m.dtype == TT_F32 && columns >= COLUMNS && m.ld % 4 == 0 && column % 4 == 0 &&
        (uintptr_t)m.data % 16 == 0;
    for (int i = (int)threadIdx.x; i < 64 * COLUMNS / 4; i += 256) {
        const int r = i / (COLUMNS / 4), c = i % (COLUMNS / 4) * 4;
        float4 v = make_float4(0, 0, 0, 0);
        if (r < x.count) {
            const int64_t from = (int64_t)(x.at ? x.at[x.first + r] : x.first + r) * m.ld + column + c;
            if (whole) v = *(const float4 *)((const float *)m.data + from);
            else {
                if (c < columns) v.x = load_any(m.data, m.dtype, from);
                if (c + 1 < columns) v.y = load_any(m.data, m.dtype, from + 1);
                if (c + 2 < columns) v.z = load_any(m.data, m.dtype, from + 2);
                if (c + 3 < columns) v.w = load_any(m.data, m.dtype, from + 3);
            }
        }
        *(float4 *)(to + r * PITCH + c) = v;
    }
}

// ATTENTION_STAGE: floats of two staged matrices, (64, 36) each. ATTENTION_PITCH: floats from row to row of a
// tile. The pitches 36 and 68 spread the rows that a warp reads over the banks.
enum { ATTENTION_STAGE = 2 * 64 * 36, ATTENTION_PITCH = 68 };

// Computes s = a b^T, summed over the columns of head a_head of a and head b_head of b. Has barriers at the
// beginning and before the end; threads may still read `stage` after the last barrier.
__device__ __forceinline__ void attention_scores(float (&s)[4][4], float *stage, const attention_rows &a,
                                                 const attention_rows &b, int a_head, int b_head,
                                                 int head_size)
{
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const float *as = stage + y * 36, *bs = stage + 64 * 36 + x * 36;
    TT__UNROLL for (int i = 0; i < 4; i++) TT__UNROLL for (int j = 0; j < 4; j++) s[i][j] = 0;
    for (int c = 0; c < head_size; c += 32) {
        __syncthreads();
        attention_stage<32, 36>(stage, a, (int64_t)a_head * head_size + c, head_size - c);
        attention_stage<32, 36>(stage + 64 * 36, b, (int64_t)b_head * head_size + c, head_size - c);
        __syncthreads();
        for (int k = 0; k < 32; k += 4) {
            float4 u[4], w[4];
            TT__UNROLL for (int i = 0; i < 4; i++) u[i] = *(const float4 *)(as + i * 16 * 36 + k);
            TT__UNROLL for (int i = 0; i < 4; i++) w[i] = *(const float4 *)(bs + i * 16 * 36 + k);
            TT__UNROLL for (int i = 0; i < 4; i++)
                TT__UNROLL for (int j = 0; j < 4; j++) {
                    s[i][j] = fmaf(u[i].x, w[j].x, s[i][j]);
                    s[i][j] = fmaf(u[i].y, w[j].y, s[i][j]);
                    s[i][j] = fmaf(u[i].z, w[j].z, s[i][j]);
                    s[i][j] = fmaf(u[i].w, w[j].w, s[i][j]);
                }
        }
    }
}

// Adds the product of tile (64, ATTENTION_PITCH) and y to `to`. Multiplies up to 64 of y's `columns` columns,
// beginning with column `column`. Has a barrier before the tile is read, and none after the last read.
__device__ __forceinline__ void attention_add(float (&to)[4][4], const float *tile, float *stage,
                                              const attention_rows &y, int64_t column, int columns)
{
    const float *ts = tile + threadIdx.x / 16 * ATTENTION_PITCH, *ys = stage + threadIdx.x % 16 * 4;
    __syncthreads();
    attention_stage<64, ATTENTION_PITCH>(stage, y, column, columns);
    __syncthreads();
    for (int k = 0; k < 64; k += 4) {
        float4 u[4], w[4];
        TT__UNROLL for (int i = 0; i < 4; i++) u[i] = *(const float4 *)(ts + i * 16 * ATTENTION_PITCH + k);
        TT__UNROLL for (int i = 0; i < 4; i++) w[i] = *(const float4 *)(ys + (k + i) * ATTENTION_PITCH);
        TT__UNROLL for (int i = 0; i < 4; i++) {
            to[i][0] = fmaf(u[i].w, w[3].x,
                            fmaf(u[i].z, w[2].x, fmaf(u[i].y, w[1].x, fmaf(u[i].x, w[0].x, to[i][0]))));
            to[i][1] = fmaf(u[i].w, w[3].y,
                            fmaf(u[i].z, w[2].y, fmaf(u[i].y, w[1].y, fmaf(u[i].x, w[0].y, to[i][1]))));
            to[i][2] = fmaf(u[i].w, w[3].z,
                            fmaf(u[i].z, w[2].z, fmaf(u[i].y, w[1].z, fmaf(u[i].x, w[0].z, to[i][2]))));
            to[i][3] = fmaf(u[i].w, w[3].w,
                            fmaf(u[i].z, w[2].w, fmaf(u[i].y, w[1].w, fmaf(u[i].x, w[0].w, to[i][3]))));
        }
    }
}

// Multiplies `from` by `scale`, and writes the results to the thread's four columns of a row of m or, if
// `add`, adds them to these columns.
__device__ __forceinline__ void attention_write(const tt__mat &m, int64_t row, int64_t column, int columns,
                                                const float (&from)[4], float scale, bool add)
{
    const int x = threadIdx.x % 16 * 4;
    TT__UNROLL for (int j = 0; j < 4; j++) {
        if (x + j >= columns) break;
        const int64_t at = row * m.ld + column + x + j;
        store_any(m.data, m.dtype, at, from[j] * scale + (add ? load_any(m.data, m.dtype, at) : 0));
    }
}

// Sets keep, (64 queries, 4 groups of 16 keys), to the results of attention_keep for 64 keys, beginning with
// `key`. A barrier must follow before `keep` is read.
__device__ __forceinline__ void attention_draw(uint16_t *keep, const attention_args &p, uint64_t random,
                                               const int32_t *rows, int first, int count, int key, int head)
{
    const int r = threadIdx.x % 64, group = threadIdx.x / 64, query = first + min(r, count - 1);
    keep[r * 4 + group] = (uint16_t)attention_keep(p, random, rows ? rows[query] : query, key / 16 + group,
                                                   p.first_head + head);
}

// Counts how often each of a tile's `count` queries sees each block of keys that has any of the 64 keys from
// `key` on. Writes the counts to times (64 queries, 64 blocks), where block 0 is the block of `key`. Returns
// false if no query sees any of these blocks. All threads of the thread block must call the function.
__device__ __forceinline__ bool attention_time_tile(unsigned char *times, const attention_args &p,
                                                    const attention_tile &t, int first, int count, int key,
                                                    int blocks, int head)
{
    const int from = key / p.block, to = min(blocks, (key + 63) / p.block + 1);
    int any = 0;
    for (int i = (int)threadIdx.x; i < 64 * (to - from); i += 256) {
        const int r = i % 64, row = attention_row(p, first + min(r, count - 1)) - t.begin;
        const int n = attention_times(p, p.first_head + head, blocks, row / p.block, from + i / 64);
        times[r * 64 + i / 64] = (unsigned char)min(n, 255);
        any |= n;
    }
    return __syncthreads_or(any) != 0;
}

// The work of a thread block of the f32 kernels: tile `t` of head `head`, and one part of the head's columns.
// skip: number of the head's columns before the part; columns: number of the remaining columns.
struct attention_block { attention_tile t; int head, skip, columns; };

// Returns the work of thread block number `block`. heads: number of heads over which the blocks are divided.
__device__ __forceinline__ attention_block attention_block_at(const attention_args &p, const int32_t *start,
                                                              int heads, int64_t block)
{
    attention_block b;
    const int parts = (p.head_size + 63) / 64;
    b.head = (int)(block / parts % heads);
    b.skip = (int)(block % parts) * 64;
    b.columns = p.head_size - b.skip;
    b.t = attention_find<64>(p, start, (int)(block / parts / heads));
    return b;
}

// Computes the forward in f32 arithmetic. NEAR: attention with a window or ALiBi, or block-sparse attention.
template <bool NEAR>
__global__ __launch_bounds__(256, NEAR ? 1 : 2) void attention_forward_any(attention_args p)
{
    tt__begin_kernel();
    TT__SHARED(float, stage, [ATTENTION_STAGE]);
    TT__SHARED(float, tile, [64 * ATTENTION_PITCH]);
    TT__SHARED(uint16_t, keep, [64 * 4]);
    TT__SHARED(unsigned char, times, [64 * 64]);
    const attention_block b = attention_block_at(p, p.query_start, p.heads, blockIdx.x);
    const attention_tile t = b.t;
    const int key_head = b.head / p.group, column = b.head * p.head_size + b.skip;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    if (t.at < 0) return;
    const uint64_t random = attention_key(p);
    const attention_rows q = {&p.q, p.query_at, t.first + t.at, min(64, t.queries - t.at)};
    const int end = NEAR ? attention_window_end(p, t, q.count) : attention_end(p, t, q.count);
    const float slope = NEAR ? attention_slope(p, p.first_head + b.head) : 0;
    const int blocks = NEAR ? attention_blocks(p, t.length) : 0;
    float largest[4], sum[4], out[4][4];
    int row[4]; // row[a]: the tile's row y + 16 a, counted in the sequence
    TT__UNROLL for (int a = 0; a < 4; a++) {
        row[a] = attention_row(p, q.first + min(y + 16 * a, q.count - 1)) - t.begin;
        largest[a] = -3.4028235e38f;
        sum[a] = 0;
        TT__UNROLL for (int c = 0; c < 4; c++) out[a][c] = 0;
    }
    for (int key = NEAR ? attention_window_begin(p, t) & -64 : 0; key < end; key += 64) {
        const attention_rows k = {&p.k, NULL, t.begin + key, min(64, t.length - key)};
        const attention_rows v = {&p.v, NULL, k.first, k.count};
        float s[4][4];
        if (blocks && !attention_time_tile(times, p, t, q.first, q.count, key, blocks, b.head)) continue;
        if (p.drop) attention_draw(keep, p, random, p.query_row, q.first, q.count, key, b.head);
        attention_scores(s, stage, q, k, b.head, key_head, p.head_size);
        TT__UNROLL for (int a = 0; a < 4; a++) {
            float now = largest[a], factor, total = 0, often[4];
            TT__UNROLL for (int c = 0; c < 4; c++) {
                const int i = key + x + 16 * c;
                bool seen = NEAR ? attention_sees(p, row[a], i, t.length)
                                 : i <= (p.causal ? row[a] : t.length - 1);
                often[c] = !NEAR || !blocks || !seen
                    ? 1 : times[(y + 16 * a) * 64 + i / p.block - key / p.block];
                if (NEAR) seen = seen && often[c] != 0;
                const float bias = NEAR ? attention_bias(p, slope, row[a], i) : 0;
                s[a][c] = seen ? (s[a][c] * p.scale - bias) * TT__LOG2E : -INFINITY;
                now = fmaxf(now, s[a][c]);
            }
            TT__UNROLL for (int m = 8; m; m >>= 1) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, m));
            factor = exp2f(largest[a] - now);
            largest[a] = now;
            TT__UNROLL for (int c = 0; c < 4; c++) {
                const int i = x + 16 * c;
                float weight = exp2f(s[a][c] - now);
                if (NEAR) weight *= often[c];
                total += weight;
                if (p.drop && !(keep[(y + 16 * a) * 4 + i / 16] >> i % 16 & 1)) weight = 0;
                tile[(y + 16 * a) * ATTENTION_PITCH + i] = weight;
                out[a][c] *= factor;
            }
            sum[a] = sum[a] * factor + total;
        }
        attention_add(out, tile, stage, v, key_head * p.head_size + b.skip, b.columns);
    }
    TT__UNROLL for (int a = 0; a < 4; a++) {
        TT__UNROLL for (int m = 8; m; m >>= 1) sum[a] += __shfl_xor_sync(0xffffffffu, sum[a], m);
        if (y + 16 * a >= q.count) continue;
        const int query = q.first + y + 16 * a;
        const int64_t row = p.query_at ? p.query_at[query] : query;
        attention_write(p.out, row, column, b.columns, out[a], p.keep_scale / sum[a], false);
        if (x == 0 && b.skip == 0)
            p.lse[row * p.heads + b.head] = largest[a] / TT__LOG2E + logf(sum[a]);
    }
}

// Turns one product q k^T (`weight`) into the weight after dropout, and the product dout v^T (`dscore`) into
// the gradient of the score without the factor `scale`. seen: how many times the query sees the key; bias:
// the number that ALiBi subtracts from the score.
__device__ __forceinline__ void attention_gradient(const attention_args &p, float &weight, float &dscore,
                                                   int seen, bool kept, float bias, float lse,
                                                   float delta)
{
    const float w = seen ? (float)seen * exp2f((weight * p.scale - bias - lse) * TT__LOG2E) : 0;
    dscore = seen ? w * ((kept ? dscore * p.keep_scale : 0) - delta) : 0;
    weight = kept ? w : 0;
}

__global__ __launch_bounds__(256, 1) void attention_dq_any(attention_args p)
{
    tt__begin_kernel();
    TT__SHARED(float, stage, [ATTENTION_STAGE]);
    TT__SHARED(float, tile, [64 * ATTENTION_PITCH]);
    TT__SHARED(uint16_t, keep, [64 * 4]);
    TT__SHARED(unsigned char, times, [64 * 64]);
    const attention_block b = attention_block_at(p, p.query_start, p.heads, blockIdx.x);
    const attention_tile t = b.t;
    const int key_head = b.head / p.group, column = b.head * p.head_size + b.skip;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    if (t.at < 0) return;
    const uint64_t random = attention_key(p);
    const attention_rows q = {&p.q, p.query_at, t.first + t.at, min(64, t.queries - t.at)};
    const attention_rows dout = {&p.dout, p.query_at, q.first, q.count};
    const int end = attention_window_end(p, t, q.count);
    const float slope = attention_slope(p, p.first_head + b.head);
    const int blocks = attention_blocks(p, t.length);
    float lse[4], delta[4], dq[4][4];
    int row[4];
    TT__UNROLL for (int a = 0; a < 4; a++) {
        const int query = q.first + min(y + 16 * a, q.count - 1);
        const int64_t at = attention_sums_at(p, query, b.head);
        row[a] = attention_row(p, query) - t.begin;
        lse[a] = p.lse[at];
        delta[a] = p.delta[at];
        TT__UNROLL for (int c = 0; c < 4; c++) dq[a][c] = 0;
    }
    for (int key = attention_window_begin(p, t) & -64; key < end; key += 64) {
        const attention_rows k = {&p.k, NULL, t.begin + key, min(64, t.length - key)};
        const attention_rows v = {&p.v, NULL, k.first, k.count};
        float s[4][4], ds[4][4];
        if (blocks && !attention_time_tile(times, p, t, q.first, q.count, key, blocks, b.head)) continue;
        if (p.drop) attention_draw(keep, p, random, p.query_row, q.first, q.count, key, b.head);
        attention_scores(s, stage, q, k, b.head, key_head, p.head_size);
        attention_scores(ds, stage, dout, v, b.head, key_head, p.head_size);
        TT__UNROLL for (int a = 0; a < 4; a++)
            TT__UNROLL for (int c = 0; c < 4; c++) {
                const int i = x + 16 * c;
                const bool kept = !p.drop || (keep[(y + 16 * a) * 4 + i / 16] >> i % 16 & 1);
                int seen = attention_sees(p, row[a], key + i, t.length);
                if (blocks && seen) seen = times[(y + 16 * a) * 64 + (key + i) / p.block - key / p.block];
                attention_gradient(p, s[a][c], ds[a][c], seen, kept,
                                   attention_bias(p, slope, row[a], key + i), lse[a], delta[a]);
                tile[(y + 16 * a) * ATTENTION_PITCH + i] = ds[a][c];
            }
        attention_add(dq, tile, stage, k, key_head * p.head_size + b.skip, b.columns);
    }
    TT__UNROLL for (int a = 0; a < 4; a++) {
        if (y + 16 * a >= q.count) continue;
        const int query = q.first + y + 16 * a;
        attention_write(p.dq, p.query_at ? p.query_at[query] : query, column, b.columns, dq[a], p.scale,
                        p.add_dq);
    }
}

// Transposes squares of 8 x 8 bits over 8 lanes whose numbers differ only in bits 2 to 4. `group`, from 0 to
// 7, is the value of these bits. In each byte of x, bit i of the lane with group k becomes bit k of the lane
// with group i.
__device__ __forceinline__ uint32_t attention_turn_bits(uint32_t x, int group)
{
    TT__UNROLL for (int k = 1; k < 8; k *= 2) {
        const int odd = group & k;
        uint32_t stays = 0xffu / (1 + (1 << k)) * 0x01010101u << odd;
        tt__forget(stays);
        const uint32_t y = __shfl_xor_sync(0xffffffffu, x, 4 * k);
        x = (x & stays) | (__funnelshift_l(y, y, k - 2 * odd) & ~stays);
    }
    return x;
}

// Returns, as bits, which of a thread's weights dropout keeps. Rows of the weights are the warp's keys,
// columns are QUERIES queries. In the thread's fragment of an mma, element e of half h in row tile m and
// column tile n has bit `8 * (2 * e + h) + m * QUERIES / 8 + n`. rows: the queries' rows of the batch; first:
// the warp's first key, divided by 16.
template <int MT, int QUERIES>
__device__ __forceinline__ uint32_t attention_draw_columns(const attention_args &p, uint64_t random,
                                                           const int *rows, int first, int head,
                                                           uint32_t thread = threadIdx.x)
{
    enum { ACROSS = QUERIES / 8, TILES = MT * ACROSS };
    static_assert(TILES == 8 || TILES == 4, "a thread draws for two queries or one");
    const int group = thread % 32 / 4, pair = thread % 4 * 2;
    if (!p.drop) return 0xffffffffu;
    // Eight threads have the same two columns; each of them draws for 16 keys.
    const int *const row = rows + group % ACROSS * 8 + pair;
    const int at = first + group % TILES / ACROSS;
    if (TILES == 8) {
        const uint32_t bits = attention_keep(p, random, row[0], at, head);
        return attention_turn_bits(bits | attention_keep(p, random, row[1], at, head) << 16, group);
    }
    const uint32_t bits = attention_turn_bits(attention_keep(p, random, row[group / 4], at, head), group);
    return (bits & 0x0f0f) | (bits & 0xf0f0) << 12;
}

// Returns the bits that attention_draw_columns would return, but reads them from `bits`, to which
// attention_fetch_bits has copied them. bits: the bits of QUERIES queries and the warp's first 16 keys.
template <int MT, int QUERIES>
__device__ __forceinline__ uint32_t attention_read_columns(const unsigned char *bits)
{
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    uint32_t keep = 0;
    TT__UNROLL for (int i = MT * QUERIES / 8 - 1; i >= 0; i--) // the bits of two queries and 16 keys
        keep = 2 * keep + (*(const uint32_t *)(bits + 16 * i + 2 * pair) >> group & 0x01010101u);
    return keep;
}

// Makes dk and dv in f32 arithmetic. Rows of scores are keys here, columns are queries.
__global__ __launch_bounds__(256, 1) void attention_dkdv_any(attention_args p)
{
    tt__begin_kernel();
    TT__SHARED(float, stage, [ATTENTION_STAGE]);
    TT__SHARED(float, tile, [64 * ATTENTION_PITCH]);
    TT__SHARED(uint16_t, keep, [64 * 4]);
    TT__SHARED(unsigned char, times, [64 * 64]);
    const attention_block b = attention_block_at(p, p.seq_start, p.heads / p.group, blockIdx.x);
    const attention_tile t = b.t;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    if (t.at < 0) return;
    const uint64_t random = attention_key(p);
    const attention_rows k = {&p.k, NULL, t.begin + t.at, min(64, t.length - t.at)};
    const attention_rows v = {&p.v, NULL, k.first, k.count};
    float dk[4][4], dv[4][4];
    TT__UNROLL for (int a = 0; a < 4; a++) TT__UNROLL for (int c = 0; c < 4; c++) dk[a][c] = dv[a][c] = 0;
    const int blocks = attention_blocks(p, t.length);
    for (int head = b.head * p.group; head < (b.head + 1) * p.group; head++) {
        const int64_t column = (int64_t)head * p.head_size + b.skip;
        const float slope = attention_slope(p, p.first_head + head);
        for (int from = attention_queries_begin(p, t); from < attention_queries_end(p, t, k.count);
             from += 64) {
            const attention_rows q = {&p.q, p.query_at, t.first + from, min(64, t.queries - from)};
            const attention_rows dout = {&p.dout, p.query_at, q.first, q.count};
            float s[4][4], ds[4][4];
            if (blocks && !attention_time_tile(times, p, t, q.first, q.count, t.at, blocks, head)) continue;
            if (p.drop) attention_draw(keep, p, random, p.query_row, q.first, q.count, t.at, head);
            attention_scores(s, stage, k, q, b.head, head, p.head_size);
            attention_scores(ds, stage, v, dout, b.head, head, p.head_size);
            TT__UNROLL for (int c = 0; c < 4; c++) {
                const int i = x + 16 * c, query = q.first + min(i, q.count - 1);
                const int64_t at = attention_sums_at(p, query, head);
                const int row = attention_row(p, query) - t.begin;
                const float lse = p.lse[at], delta = p.delta[at];
                TT__UNROLL for (int a = 0; a < 4; a++) {
                    const int r = y + 16 * a;
                    const bool kept = !p.drop || (keep[i * 4 + r / 16] >> r % 16 & 1);
                    int seen = i < q.count && attention_sees(p, row, t.at + r, t.length);
                    if (blocks && seen) seen = times[i * 64 + (t.at + r) / p.block - t.at / p.block];
                    attention_gradient(p, s[a][c], ds[a][c], seen, kept,
                                       attention_bias(p, slope, row, t.at + r), lse, delta);
                    tile[r * ATTENTION_PITCH + i] = s[a][c];
                }
            }
            attention_add(dv, tile, stage, dout, column, b.columns);
            __syncthreads();
            TT__UNROLL for (int a = 0; a < 4; a++)
                TT__UNROLL for (int c = 0; c < 4; c++)
                    tile[(y + 16 * a) * ATTENTION_PITCH + x + 16 * c] = ds[a][c];
            attention_add(dk, tile, stage, q, column, b.columns);
        }
    }
    // The same thread stores an element of dk and of dv, because dk and dv may have the same memory.
    const int64_t column = (int64_t)b.head * p.head_size + b.skip;
    TT__UNROLL for (int a = 0; a < 4; a++) {
        if (y + 16 * a >= k.count) continue;
        if (p.dk.data)
            attention_write(p.dk, k.first + y + 16 * a, column, b.columns, dk[a], p.scale, p.add_dk);
        if (p.dv.data)
            attention_write(p.dv, k.first + y + 16 * a, column, b.columns, dv[a], p.keep_scale, p.add_dv);
    }
}

} // namespace

/* ==== src/ops/attention/cuda_cores.cuh */
namespace {

// ---- attention on tensor cores. q, k, v and dout have the same 16-bit dtype T, their rows and heads begin
// at multiples of 16 bytes, and heads have up to 128 columns. D is the head size rounded up to 32, 64, 80, 96
// or 128; the surplus columns are zero. Thread blocks have 4 warps, each with 16 MT rows of the tile that the
// block owns. The block reads the other tiles in turn and has two of them in shared memory, one in use and
// one in flight. Rows in shared memory are 16 bytes longer than D elements, so that eight rows are in
// different banks.

template <class T> __device__ __forceinline__ uint32_t attention_pack(float low, float high)
{
    return pack<T>(low, high);
}

// Copies `count` rows of a head, asynchronously: the rows from `first` on or, if `at` is not NULL, the rows
// that `at` lists from at[first] on. `to` is (ROWS, D + 8) or, if WIDE, (ROWS, D) in the layout of
// tt__wgmma_matrix. The other rows and columns of `to` become zeros.
template <class T, int D, int ROWS, int THREADS = 128, bool WIDE = false>
__device__ __forceinline__ void attention_fetch(T *to, const tt__mat &m, const int32_t *at, int first,
                                                int count, int head, int head_size,
                                                int thread = (int)threadIdx.x)
{
    // PARTS: vectors of 16 bytes in a row; STEP: rows copied at a time. 8 of 128 threads idle if D is 80 or
    // 96.
    enum { PARTS = D / 8, STEP = THREADS / PARTS, PITCH = WIDE ? D : D + 8 };
    static_assert(!WIDE || (D == 64 && STEP % 8 == 0), "a row's vectors have one order in all steps");
    const int r = thread / PARTS, c = thread % PARTS * 8;
    const T *from = (const T *)m.data + (int64_t)head * head_size + c;
    to += r * PITCH + (WIDE ? c ^ r % 8 * 8 : c);
    if (r >= STEP) return;
    if (c >= head_size) count = 0;
    TT__UNROLL for (int i = 0; i < ROWS; i += STEP) {
        if (ROWS % STEP != 0 && r + i >= ROWS) break;
        const bool there = r + i < count;
        const int row = at && there ? at[first + r + i] : first + r + i;
        tt__cp_async_16(to + i * PITCH, there ? from + row * m.ld : (const T *)m.data, there ? 16 : 0);
    }
}

// Kernels with WIDE compute by warpgroups, with tiles of 64 rows, for heads of up to 64 columns. Each of a
// group's four warps has 16 rows; threads have the same elements of these rows as with mma.sync and MT = 1.
// Tiles begin at multiples of 1,024 bytes; a launch asks for TT__WIDE_ROOM more bytes of shared memory for
// this alignment.
enum { TT__WIDE_ROOM = 1024 };
template <class T> __device__ __forceinline__ T *attention_room(T *shared)
{
    return shared + (-tt__shared_address(shared) & 1023) / sizeof(T);
}

// Computes s = a b^T, where a and b are tiles of 64 rows and s is (64, 64).
template <class T>
__device__ __forceinline__ void attention_wide(float (&s)[1][8][4], const T *a, const T *b)
{
    const uint32_t ma = tt__wgmma_matrix(a), mb = tt__wgmma_matrix(b);
    TT__UNROLL for (uint32_t k = 0; k < 64; k += 16)
        tt__wgmma_rows<T>(s[0], ma + k * 2 / 16, mb + k * 2 / 16, k > 0);
}

// Adds the product of w and y to `to`. All are (64, 64); w is in registers, rounded to T, and y is a tile.
template <class T>
__device__ __forceinline__ void attention_wide_add(float (&to)[1][8][4], const uint32_t (&w)[4][4],
                                                   const T *y)
{
    const uint32_t my = tt__wgmma_matrix(y);
    TT__UNROLL for (uint32_t k = 0; k < 64; k += 16) tt__wgmma_add<T>(to[0], w[k / 16], my + k * 128 / 16);
}

// Rounds w to T and packs it as the first operand of a product.
template <class T>
__device__ __forceinline__ void attention_wide_pack(uint32_t (&to)[4][4], const float (&w)[1][8][4])
{
    TT__UNROLL for (int k = 0; k < 4; k++)
        TT__UNROLL for (int i = 0; i < 4; i++)
            to[k][i] = pack<T>(w[0][2 * k + i / 2][i % 2 * 2], w[0][2 * k + i / 2][i % 2 * 2 + 1]);
}

// Clears the sums of a warp: `16 * M` rows and `8 * N` columns.
template <int M, int N> __device__ __forceinline__ void attention_clear(float (&x)[M][N][4])
{
    TT__UNROLL for (int m = 0; m < M; m++)
        TT__UNROLL for (int n = 0; n < N; n++) TT__UNROLL for (int i = 0; i < 4; i++) x[m][n][i] = 0;
}
template <int M, int N>
__device__ __forceinline__ void attention_clear(float (&x)[M][N][4], float (&y)[M][N][4])
{
    attention_clear(x);
    attention_clear(y);
}

// Computes s = a b^T, where a (16 MT, D) and b (N, D) are in shared memory and s is (16 MT, N).
template <class T, int D, int MT, int N>
__device__ __forceinline__ void attention_mma(float (&s)[MT][N / 8][4], const T *a, const T *b)
{
    const int lane = threadIdx.x % 32;
    a += lane % 16 * (D + 8) + lane / 16 * 8;
    b += (lane % 8 + lane / 16 * 8) * (D + 8) + lane / 8 % 2 * 8;
    attention_clear(s);
    TT__UNROLL for (int k = 0; k < D; k += 16) {
        uint32_t af[MT][4];
        TT__UNROLL for (int m = 0; m < MT; m++) tt__ldmatrix_x4(af[m], a + m * 16 * (D + 8) + k);
        TT__UNROLL for (int n = 0; n < N; n += 16) {
            uint32_t r[4];
            tt__ldmatrix_x4(r, b + n * (D + 8) + k);
            const uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
            TT__UNROLL for (int m = 0; m < MT; m++) {
                tt__mma_16816<T>(s[m][n / 8], af[m], b0);
                tt__mma_16816<T>(s[m][n / 8 + 1], af[m], b1);
            }
        }
    }
}

// Adds the product of w (16 MT, N) and y (N, D) to `to` (16 MT, D). w is in registers and is rounded to T; y
// is in shared memory.
template <class T, int D, int MT, int N>
__device__ __forceinline__ void attention_mma_add(float (&to)[MT][D / 8][4], const float (&w)[MT][N / 8][4],
                                                  const T *y)
{
    const int lane = threadIdx.x % 32;
    y += lane % 16 * (D + 8) + lane / 16 * 8;
    TT__UNROLL for (int k = 0; k < N; k += 16) {
        uint32_t af[MT][4];
        TT__UNROLL for (int m = 0; m < MT; m++)
            TT__UNROLL for (int i = 0; i < 4; i++)
                af[m][i] = attention_pack<T>(w[m][k / 8 + i / 2][i % 2 * 2],
                                             w[m][k / 8 + i / 2][i % 2 * 2 + 1]);
        TT__UNROLL for (int n = 0; n < D; n += 16) {
            uint32_t r[4];
            tt__ldmatrix_x4_trans(r, y + k * (D + 8) + n);
            const uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
            TT__UNROLL for (int m = 0; m < MT; m++) {
                tt__mma_16816<T>(to[m][n / 8], af[m], b0);
                tt__mma_16816<T>(to[m][n / 8 + 1], af[m], b1);
            }
        }
    }
}

// Column sums of the numbers that attention_store writes, as rounded to T. `sum` has the sums over the
// thread's elements. The function `write` adds up `sum` over the warp's rows, and writes the result to
// part[column] or, if `add`, adds the result to part[column]. lane: the thread's lane.
template <class T, int D> struct attention_columns {
    enum { N = (D / 4 + 7) / 8 * 8 }; // elements of a row that a thread has, rounded up to a multiple of 8
    float sum[N];
    __device__ __forceinline__ void clear() { TT__UNROLL for (int i = 0; i < N; i++) sum[i] = 0; }
    __device__ __forceinline__ void add(int n, uint32_t pair) // pair: two numbers of tile n of 8 columns
    {
        float x[8];
        // Widens the two numbers as they were rounded for storing.
        widen8<T>(x, {(uint32_t)tt__opaque((int)pair), 0, 0, 0});
        sum[2 * n] += x[0];
        sum[2 * n + 1] += x[1];
    }
    __device__ __forceinline__ void write(float *part, int lane, bool add)
    {
        // The eight threads that have the same columns divide the sums: in each of three rounds, a thread
        // gives half of its sums to another thread.
        int n = N, first = 0;
        TT__UNROLL for (int bit = 16; bit > 2; bit /= 2) {
            const bool upper = lane & bit;
            n /= 2;
            first += upper ? n : 0;
            TT__UNROLL for (int i = 0; i < N / 2; i++) {
                if (i >= n) continue;
                const float other = __shfl_xor_sync(0xffffffffu, upper ? sum[i] : sum[i + n], bit);
                sum[i] = (upper ? sum[i + n] : sum[i]) + other;
            }
        }
        TT__UNROLL for (int i = 0; i < N / 8; i++) {
            const int column = (first + i) / 2 * 8 + lane % 4 * 2 + (first + i) % 2;
            if (D == N * 4 || column < D) part[column] = add ? part[column] + sum[i] : sum[i];
        }
    }
};

// Stores the thread's elements `2 * h` and `2 * h + 1` of each tile of 8 columns, multiplied by `scale`, or
// adds them if `add`. The destination is row `row` of head `head` of the output m; the first tile begins at
// column `column` of the head. If `sums`, adds the stored numbers to `columns`, too; this works only for
// 16-bit results without `add`.
template <class T, int D>
__device__ __forceinline__ void attention_store(const tt__mat &m, int row, int head, int head_size,
                                                const float (&from)[D / 8][4], int h, float scale, bool add,
                                                int lane, attention_columns<T, D> &columns, bool sums,
                                                int column = 0)
{
    const int64_t start = row * m.ld + (int64_t)head * head_size + column + lane % 4 * 2;
    if (m.dtype != TT_F32 && !add) {
        T *to = (T *)m.data + start;
        TT__UNROLL for (int n = 0; n < D / 8; n++) {
            const uint32_t pair = attention_pack<T>(from[n][2 * h] * scale, from[n][2 * h + 1] * scale);
            if (column + 8 * n < head_size) *(uint32_t *)(to + 8 * n) = pair;
            if (sums) columns.add(n, pair);
        }
        return;
    }
    TT__UNROLL for (int n = 0; n < D / 8; n++) {
        if (column + 8 * n >= head_size) break;
        float x = from[n][2 * h] * scale, y = from[n][2 * h + 1] * scale;
        if (m.dtype == TT_F32) {
            float2 *to = (float2 *)((float *)m.data + start + 8 * n);
            *to = add ? make_float2(x + to->x, y + to->y) : make_float2(x, y);
        } else {
            T *to = (T *)m.data + start + 8 * n;
            if (add) { x += to_float(to[0]); y += to_float(to[1]); }
            *(uint32_t *)to = attention_pack<T>(x, y);
        }
    }
}

// Adds up the column sums of a head over the first `parts` warps of the thread block, and writes them to
// `to`, beginning with to[at]. Does nothing if `to` is NULL.
template <int D>
__device__ __forceinline__ void attention_write_sums(float *to, int64_t at, const float (*part)[D], int parts,
                                                     int head_size, int thread)
{
    for (int c = thread; c < head_size && to; c += (int)blockDim.x) {
        float sum = 0;
        for (int k = 0; k < parts; k++) sum += part[k][c];
        to[at + c] = sum;
    }
}

// Returns the index at which the thread block's partial column sums of head `head` begin. heads: the number
// of heads of the output.
__device__ __forceinline__ int64_t attention_sums_begin(const attention_args &p, int heads, int head)
{
    return ((int64_t)(blockIdx.x / heads) * heads + head) * p.head_size;
}

// Sets row[m][h] to a query's row of the batch, in the kernels of the forward and dq. The query is number
// `mine + 16 * m + 8 * h + lane / 4` of the tile; `mine` is the warp's first query. Queries from `count` on
// get the last query's row.
template <int MT>
__device__ __forceinline__ void attention_rows_of(int (&row)[MT][2], const attention_args &p, int first,
                                                  int count, int mine)
{
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            const int query = first + min(mine + 16 * m + 8 * h + (int)threadIdx.x % 32 / 4, count - 1);
            row[m][h] = attention_row(p, query);
        }
}

// Draws which of the warp's weights for keys `key` to `key + KEYS - 1` dropout keeps; attention_kept reads
// the result. The draw comes before the scores, which need the registers. The four threads of a row draw 16
// bits each: together for 64 keys of the row or, if KEYS is 32, for 32 keys of this row and 32 keys of the
// row that is 8 rows below. to: attention_bits of the warp's first query and of key `key`; NULL: the bits are
// not written.
template <int MT, int KEYS>
__device__ __forceinline__ void attention_draw_rows(uint32_t (&keep)[MT * KEYS / 64], const attention_args &p,
                                                    uint64_t random, const int (&row)[MT][2], int key,
                                                    int head, unsigned char *to = NULL)
{
    enum { WIDE = KEYS == 64 };
    const int t = threadIdx.x % 4, group = WIDE ? t : t % 2;
    uint16_t *const place = (uint16_t *)to + group * 64 + threadIdx.x % 32 / 4;
    TT__UNROLL for (int i = 0; i < MT * KEYS / 64; i++) keep[i] = p.drop ? 0 : 0xffffffffu;
    if (!p.drop) return;
    TT__UNROLL for (int i = 0; i < MT * KEYS / 32; i++) {
        const int m = WIDE ? i / 2 : i, h = WIDE ? i % 2 : t / 2;
        const uint32_t mine = attention_keep(p, random, h ? row[m][1] : row[m][0], key / 16 + group, head);
        if (to) place[16 * m + 8 * h] = (uint16_t)mine;
        uint32_t bits = mine << 16 * (t % 2);
        bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
        const uint32_t other = __shfl_xor_sync(0xffffffffu, bits, 2);
        keep[i / 2] |= ((t < 2 ? bits : other) >> 2 * t & 0x03030303u) << i % 2 * 4
            | ((t < 2 ? other : bits) >> 2 * t & 0x03030303u) << (i % 2 * 4 + 2);
    }
}

// Returns whether dropout keeps the weight of row `16 * m + 8 * h + lane / 4` and key
// `8 * n + lane % 4 * 2 + e` of the warp's part of the tile.
template <int MT, int KEYS>
__device__ __forceinline__ bool attention_kept(const uint32_t (&keep)[MT * KEYS / 64], int m, int h, int n,
                                               int e)
{
    const int i = (2 * m + h) * (KEYS / 32) + n / 4;
    return keep[i / 4] >> (n % 4 * 8 + i % 4 * 2 + e) & 1;
}

// Kinds of kernels. PLAIN: plain and causal attention; NEARBY: attention with a window or ALiBi; BY_BLOCKS:
// block-sparse attention with blocks of a multiple of 64 rows.
enum attention_kind { PLAIN, NEARBY, BY_BLOCKS };

// Returns whether the warp's queries, which begin at row `at` of the sequence, all come before key `key` and
// therefore do not see the keys from `key` on.
template <int MT, attention_kind KIND>
__device__ __forceinline__ bool attention_after(const attention_args &p, int at, int key)
{
    return KIND == PLAIN && p.causal && !p.query_row && key >= at + 16 * MT;
}

// The work of a warp in the kernels of the forward and dq: t is the thread block's tile of queries, and the
// warp's queries begin at `mine` in the tile.
template <int MT> struct attention_queries {
    attention_tile t;
    int head, mine, pair; // pair: first of the thread's two columns in each 8 columns of scores
    int first, count;     // number of the tile's first query; number of queries of the tile
    int begin, end, all;  // no query sees keys outside [begin, end); all queries of the warp see keys < `all`
    int row[MT][2];       // the batch's row of each of the thread's queries (attention_rows_of)
};

// The blocks that a thread block works on in block-sparse attention: blocks `from` to `to`, inclusive, of a
// sequence's queries or keys. n: number of blocks of the sequence; 0: the sequence is dense.
struct attention_sparse { int n, from, to; };

__device__ __forceinline__ attention_sparse attention_sparse_of(const attention_args &p, int length, int at,
                                                                int count)
{
    const attention_sparse b = {attention_blocks(p, length), at / p.block, (at + count - 1) / p.block};
    return b;
}

// Returns the first key, from `at` on, whose block is seen by any of b's blocks of queries. If no key is
// seen, returns `end` or a larger number. If KEYS, b has blocks of keys, and the result is the first query
// whose block sees any of b's blocks. Tests 32 blocks at a time.
template <bool KEYS>
__device__ __forceinline__ int attention_seen_from(const attention_args &p, const attention_sparse &b,
                                                   int head, int at, int end)
{
    if (b.n == 0) return at;
    for (int j = at / p.block; j < b.n; j += 32) {
        const int mine = j + (int)threadIdx.x % 32;
        bool seen = false;
        for (int i = b.from; i <= b.to && mine < b.n; i++)
            seen |= attention_times(p, head, b.n, KEYS ? mine : i, KEYS ? i : mine) > 0;
        const uint32_t any = __ballot_sync(0xffffffffu, seen);
        if (any) return max(at, (j + __ffs((int)any) - 1) * p.block);
    }
    return end;
}

// Finds the thread block's queries; returns false if it has none. In causal attention, the first thread
// blocks get the last tiles, so that the tiles of a sequence that see most keys come first. NEAR: attention
// with a window or ALiBi.
template <bool NEAR, int MT, int WARPS = 4>
__device__ __forceinline__ bool attention_find_queries(attention_queries<MT> &b, const attention_args &p)
{
    enum { QUERIES = 16 * MT * WARPS };
    const int number = (int)(blockIdx.x / p.heads), tiles = (int)(gridDim.x / p.heads);
    b.head = p.first_head + (int)(blockIdx.x % p.heads);
    b.mine = (int)threadIdx.x / 32 * 16 * MT;
    b.pair = threadIdx.x % 4 * 2;
    b.t = attention_find<QUERIES>(p, p.query_start, p.causal ? tiles - 1 - number : number);
    if (b.t.at < 0) return false;
    b.first = b.t.first + b.t.at;
    b.count = min(QUERIES + 0, b.t.queries - b.t.at);
    b.begin = NEAR ? attention_window_begin(p, b.t) : 0;
    b.end = NEAR ? attention_window_end(p, b.t, b.count) : attention_end(p, b.t, b.count);
    b.all = !p.causal ? b.t.length : p.query_row ? 1 : b.t.at + b.mine + 1;
    attention_rows_of(b.row, p, b.first, b.count, b.mine);
    return true;
}

// Copies rows first ... first + count - 1 of a head of the keys and of the values by attention_fetch.
template <class T, int D, int KEYS, int THREADS = 128, bool WIDE = false>
__device__ __forceinline__ void attention_fetch_rows(T *ks, T *vs, const attention_args &p, int first,
                                                     int count, int head)
{
    attention_fetch<T, D, KEYS, THREADS, WIDE>(ks, p.k, NULL, first, count, head, p.head_size);
    attention_fetch<T, D, KEYS, THREADS, WIDE>(vs, p.v, NULL, first, count, head, p.head_size);
    tt__cp_async_commit();
}

// Copies KEYS keys and values of a sequence, beginning with key `key`, into one of two stages. head: the head
// of q that reads these keys.
template <class T, int D, int KEYS>
__device__ __forceinline__ void attention_fetch_keys(T *ks, T *vs, const attention_args &p,
                                                     const attention_tile &t, int key, int stage, int head)
{
    const int at = stage * KEYS * (D + 8);
    head /= p.group;
    attention_fetch<T, D, KEYS>(ks + at, p.k, NULL, t.begin + key, t.length - key, head, p.head_size);
    attention_fetch<T, D, KEYS>(vs + at, p.v, NULL, t.begin + key, t.length - key, head, p.head_size);
    tt__cp_async_commit();
}

// Finishes the products of the warp's queries and keys key ... key + KEYS - 1: subtracts ALiBi's bias, and
// sets the products of keys that a query does not see to -INFINITY. slope: the slope of ALiBi divided by the
// scale, which the products do not have yet.
template <int MT, int KEYS, attention_kind KIND>
__device__ __forceinline__ void attention_mask(float (&s)[MT][KEYS / 8][4], const attention_args &p,
                                               const attention_queries<MT> &b, int key, float slope)
{
    if (KIND == NEARBY)
        TT__UNROLL for (int m = 0; m < MT; m++)
            TT__UNROLL for (int i = 0; i < 4; i++) {
                const int row = b.row[m][i / 2] - b.t.begin, ahead = row - key - b.pair - i % 2;
                const int smallest = max(p.smallest, row - b.t.length + 1);
                TT__UNROLL for (int n = 0; n < KEYS / 8; n++) {
                    float &x = s[m][n][i];
                    x = fmaf(-slope, fabsf((float)(ahead - 8 * n)), x);
                    if (ahead - 8 * n < smallest || ahead - 8 * n > p.largest) x = -INFINITY;
                }
            }
    else if (key + KEYS > b.all)
        TT__UNROLL for (int m = 0; m < MT; m++)
            TT__UNROLL for (int i = 0; i < 4; i++) {
                const int last = (p.causal ? b.row[m][i / 2] - b.t.begin
                                  : b.t.length - 1) - key - b.pair - i % 2;
                TT__UNROLL for (int n = 0; n < KEYS / 8; n++) if (8 * n > last) s[m][n][i] = -INFINITY;
            }
}

// Turns the scores of a tile of keys into weights after dropout. largest, sum: each row's largest score so
// far, and the thread's part of the row's sum of weights so far. Rescales `out`, the weighted sums of values,
// to the new largest scores. often: how many times the queries see the keys.
template <int MT, int KEYS, attention_kind KIND, int N>
__device__ __forceinline__ void attention_weigh(float (&s)[MT][KEYS / 8][4], float (&largest)[MT][2],
                                                float (&sum)[MT][2], float (&out)[MT][N][4],
                                                const attention_args &p,
                                                const uint32_t (&keep)[MT * KEYS / 64], float factor,
                                                int often)
{
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            float now = largest[m][h], total = 0;
            TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                now = fmaxf(now, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
            now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
            const float correction = tt__exp2((largest[m][h] - now) * factor);
            // With a window, a query may not have seen any key so far.
            const float offset = NEAR && now == -3.4028235e38f ? 0 : -now * factor;
            largest[m][h] = now;
            TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                TT__UNROLL for (int i = 2 * h; i < 2 * h + 2; i++) {
                    s[m][n][i] = tt__exp2(fmaf(s[m][n][i], factor, offset));
                    if (BLOCKS) s[m][n][i] *= (float)often;
                    total += s[m][n][i];
                }
            sum[m][h] = sum[m][h] * correction + total;
            TT__UNROLL for (int n = 0; n < N; n++)
                { out[m][n][2 * h] *= correction; out[m][n][2 * h + 1] *= correction; }
            if (p.drop)
                TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                    TT__UNROLL for (int i = 0; i < 2; i++)
                        if (!attention_kept<MT, KEYS>(keep, m, h, n, i)) s[m][n][2 * h + i] = 0;
        }
}

template <class T, int D, int MT, int KEYS, attention_kind KIND>
__global__ __launch_bounds__(128, 2) void attention_forward(attention_args p)
{
    tt__begin_kernel();
    enum { QUERIES = 64 * MT, PITCH = D + 8 };
    TT__SHARED(uint64_t, random, ); // in shared memory, or Philox's round keys would stay in registers
    TT__DYN_SHARED(T, qs);
    T *ks = qs + QUERIES * PITCH, *vs = ks + 2 * KEYS * PITCH;
    attention_queries<MT> b;
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    if (!attention_find_queries<KIND == NEARBY, MT>(b, p)) return;
    const attention_tile &t = b.t;
    const int head = b.head, mine = b.mine, first = b.first, count = b.count, begin = b.begin & -KEYS;
    attention_sparse sparse = {0, 0, 0};
    if (BLOCKS) sparse = attention_sparse_of(p, t.length, t.at, count);
    const float factor = fabsf(p.scale) * TT__LOG2E;
    const float slope = NEAR ? attention_slope(p, head) / fabsf(p.scale) : 0; // for products before scaling
    if (threadIdx.x == 0) random = attention_key(p);
    attention_fetch<T, D, QUERIES>(qs, p.q, p.query_at, first, count, head, p.head_size);
    attention_fetch_keys<T, D, KEYS>(ks, vs, p, t, begin, 0, head);
    float largest[MT][2], sum[MT][2], out[MT][D / 8][4];
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) { largest[m][h] = -3.4028235e38f; sum[m][h] = 0; }
    attention_clear(out);
    for (int key = begin, next, stage = 0; key < b.end; key = next, stage ^= 1) {
        const T *kt = ks + stage * KEYS * PITCH, *vt = vs + stage * KEYS * PITCH;
        next = key + KEYS;
        if (BLOCKS && next < b.end) next = attention_seen_from<false>(p, sparse, head, next, b.end);
        tt__cp_async_wait<0>();
        __syncthreads(); // the tile has arrived, and the other tile is no longer in use
        // With a negative scale, the largest score would be the smallest product. Negating q prevents this.
        if (key == begin && p.scale < 0) {
            for (int i = (int)threadIdx.x; i < QUERIES * PITCH / 2; i += 128)
                if (i % (PITCH / 2) < D / 2) ((uint32_t *)qs)[i] ^= 0x80008000u;
            __syncthreads();
        }
        if (next < b.end) attention_fetch_keys<T, D, KEYS>(ks, vs, p, t, next, stage ^ 1, head);
        // Skips the tile if the warp has no queries, or if none of its queries sees any of the tile's keys.
        if (mine >= count || attention_after<MT, KIND>(p, t.at + mine, key)) continue;
        int often = 1; // how many times the warp's queries see the keys
        if (BLOCKS && sparse.n)
            often = attention_times(p, head, sparse.n, (t.at + mine) / p.block, key / p.block);
        if (often == 0) continue;
        uint32_t keep[MT * KEYS / 64];
        float s[MT][KEYS / 8][4];
        attention_draw_rows<MT, KEYS>(keep, p, random, b.row, key, head);
        attention_mma<T, D, MT, KEYS>(s, qs + mine * PITCH, kt);
        attention_mask<MT, KEYS, KIND>(s, p, b, key, slope);
        attention_weigh<MT, KEYS, KIND>(s, largest, sum, out, p, keep, factor, often);
        attention_mma_add<T, D, MT, KEYS>(out, s, vt);
    }
    attention_columns<T, D> none;
    none.clear();
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            float total = sum[m][h] + __shfl_xor_sync(0xffffffffu, sum[m][h], 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const int i = mine + 16 * m + 8 * h + (int)threadIdx.x % 32 / 4;
            const int at = i >= count ? -1 : p.query_at ? p.query_at[first + i] : first + i;
            if (at < 0) continue;
            attention_store<T, D>(p.out, at, head, p.head_size, out[m], h, p.keep_scale / total, false,
                                  threadIdx.x % 32, none, false);
            if (b.pair == 0)
                p.lse[(int64_t)at * p.heads + head] = largest[m][h] * fabsf(p.scale) + logf(total);
        }
}

} // namespace

/* ==== src/ops/attention/cuda_forward_wide.cuh */
namespace {

// ---- the forward by warpgroups with different tasks (Shah et al.: "FlashAttention-3", 2024). The first
// warpgroup of a block copies queries, keys and values, up to STAGES tiles ahead, and draws which weights
// dropout keeps. The other GROUPS warpgroups compute the products of 64 queries each. Warpgroups wait for one
// another at barriers of phases. As many blocks run as the device holds; each takes one tile of queries after
// another, so that the copies for the next tile run during the products of the current tile. For heads of 64
// columns, a multiprocessor has two blocks, and one block computes while the other waits. For heads of 128
// columns, a multiprocessor has one block, which multiplies a tile's weights by values while it computes the
// next tile's scores (OVERLAPS).
template <int D> struct attention_wide_sizes {
    enum { GROUPS = 2, QUERIES = 64 * GROUPS, KEYS = D, BLOCKS = D > 64 ? 1 : 2, STAGES = D > 64 ? 2 : 4,
           // GIVEN: number of registers that each thread has at the launch.
           OVERLAPS = D > 64, GIVEN = 65536 / (128 * (GROUPS + 1) * BLOCKS) / 8 * 8 };
};

// An item of work: a tile of up to QUERIES queries of one head. The tile has `count` queries, beginning with
// number `first`, which is row `at` of a sequence. The sequence has rows begin ... begin + length - 1 of the
// batch. count < 0: there are no more items.
struct attention_item { int begin, length, at, first, count, head; };

// A block's shared memory. keep: bit i of keep[stage][k][query] tells whether dropout keeps the weight for
// key 32 * k + i of the stage's tile of keys.
template <class T, int D, bool DROPS> struct attention_wide_tiles {
    typedef attention_wide_sizes<D> S;
    enum { GROUPS = S::GROUPS, STAGES = S::STAGES, KEYS = S::KEYS };
    T q[2][GROUPS][64 * D], k[STAGES][KEYS * D], v[STAGES][KEYS * D];
    uint32_t keep[DROPS ? STAGES : 1][DROPS ? KEYS / 32 : 1][DROPS ? 64 * GROUPS : 1];
};

// Computes s (64, KEYS) = a b^T, where a is (64, D) and b is (KEYS, D). a and b are stored as parts of 64
// columns, one part after another.
template <class T, int D, int KEYS>
__device__ __forceinline__ void attention_wide_scores(float (&s)[KEYS / 8][4], const T *a, const T *b)
{
    const uint32_t ma = tt__wgmma_matrix(a), mb = tt__wgmma_matrix(b);
    TT__UNROLL for (uint32_t k = 0; k < D; k += 16) {
        const uint32_t part = k / 64, at = k % 64 * 2 / 16;
        tt__wgmma_rows<T>(s, ma + part * 64 * 128 / 16 + at, mb + part * KEYS * 128 / 16 + at, k > 0);
    }
}

// Adds the product of w (64, KEYS) and y (KEYS, D) to `to` (64, D). w is in registers; y is stored as parts
// of 64 columns.
template <class T, int D, int KEYS>
__device__ __forceinline__ void attention_wide_values(float (&to)[D / 8][4],
                                                      const uint32_t (&w)[KEYS / 16][4], const T *y)
{
    const uint32_t my = tt__wgmma_matrix(y);
    TT__UNROLL for (uint32_t k = 0; k < KEYS; k += 16)
        TT__UNROLL for (uint32_t part = 0; part < D / 64; part++)
            tt__wgmma_add<T>(to + 8 * part, w[k / 16], my + (part * KEYS + k) * 128 / 16);
}

// Returns item number `round` of a thread block, or an item with count < 0 if the block has no such item.
// Items are ordered by groups of heads; the L2 cache holds the keys and values of a group. Within a group,
// the last tiles of queries come first, because they take longest in causal attention. In each second round,
// blocks take items in reverse order, so that a block with long items also gets short ones.
template <int QUERIES>
__device__ __forceinline__ attention_item attention_item_of(const attention_args &p, int round)
{
    const uint32_t mine = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const uint32_t number = (uint32_t)round * gridDim.x + mine;
    const uint32_t whole = (uint32_t)(p.item_group * p.item_tiles);
    const uint32_t of = number % whole, head = number / whole * p.item_group + of % p.item_group;
    attention_item item = {0, 0, (p.item_tiles - 1 - (int)of / p.item_group) * QUERIES, 0, -1, 0};
    if (head >= (uint32_t)(p.seqs * p.heads)) return item;
    const int s = (int)head / p.heads;
    item.head = p.first_head + (int)head % p.heads;
    item.begin = p.seq_start[s];
    item.length = p.seq_start[s + 1] - item.begin;
    item.first = p.query_start[s] + item.at;
    item.count = min(QUERIES + 0, p.query_start[s + 1] - item.first);
    if (item.count == 0) item.count = -1;
    return item;
}

// attention_item_begin returns the first key that an item's queries see, rounded down to a multiple of KEYS;
// attention_item_end returns the end of the keys that they see (see attention_window_begin and
// attention_window_end). at: the item's first row; after: the row after the item's last row.
template <int KEYS> __device__ __forceinline__ int attention_item_begin(const attention_args &p, int at)
{
    return p.window && !p.query_row ? max(0, at - p.window + 1) / KEYS * KEYS : 0;
}
__device__ __forceinline__ int attention_item_end(const attention_args &p, int length, int after)
{
    return p.query_row ? length : p.causal ? min(length, after)
        : p.window ? min(length, after + p.window - 1) : length;
}

// Copies rows of a head as attention_fetch does, with 128 threads that have few registers. `to` (ROWS, D) is
// stored as parts of 64 columns.
template <class T, int D, int ROWS>
__device__ __forceinline__ void attention_copy(T *to, const tt__mat &m, const int32_t *at, int first,
                                               int count, int head, int head_size)
{
    TT__UNROLL for (int part = 0; part < D / 64; part++) {
        const int thread = tt__opaque((int)threadIdx.x), r = thread / 8, c = thread % 8 * 8;
        const int left = 64 * part + c < head_size ? count - r : 0;
        const T *const data = (const T *)m.data + (int64_t)head * head_size + 64 * part + c;
        const T *from = data + (int64_t)(first + r) * m.ld;
        T *const row = to + part * ROWS * 64 + r * 64 + (c ^ r % 8 * 8);
        TT__UNROLL for (int i = 0; i < ROWS; i += 16, from += 16 * m.ld) {
            const bool there = i < left;
            if (at && there) from = data + (int64_t)at[first + r + i] * m.ld;
            tt__cp_async_16(row + i * 64, there ? from : (const T *)m.data, there ? 16 : 0);
        }
    }
}

// Barriers for the places in shared memory: two places for queries, STAGES for keys and STAGES for values.
// Threads pass a barrier with the name `..._there` when the place is filled, and a barrier with the name
// `..._used` when the place is free.
struct attention_wide_barriers {
    uint64_t *q_there; // also says that `items` is filled
    uint64_t *q_used, *k_there;
    uint64_t *v_there; // also says that the tile's `keep` is filled
    uint64_t *k_used, *v_used;
    template <class S> __device__ __forceinline__ void begin(bool draws) const
    {
        for (int k = 0; k < 2; k++) {
            tt__phases_init(&q_there[k], 129);
            tt__phases_init(&q_used[k], 4 * S::GROUPS);
        }
        for (int k = 0; k < S::STAGES; k++) {
            tt__phases_init(&k_there[k], 128);
            tt__phases_init(&v_there[k], draws ? 256 : 128);
            tt__phases_init(&k_used[k], 4 * S::GROUPS);
            tt__phases_init(&v_used[k], 4 * S::GROUPS);
        }
    }
};

// The task of a block's first warpgroup: to copy, and to draw for dropout.
template <class T, int D, bool DROPS> struct attention_wide_copies {
    typedef attention_wide_sizes<D> S;
    enum { GROUPS = S::GROUPS, QUERIES = S::QUERIES, KEYS = S::KEYS, STAGES = S::STAGES };
    const attention_args &p;
    attention_wide_tiles<T, D, DROPS> &tile;
    const attention_wide_barriers &barriers;
    attention_item *items, (*found)[32]; // found[warp]: the next 32 items, which the warp's lanes have found
    uint32_t k0, k1;                     // halves of attention_key
    // The tile of keys for which dropout is still to be drawn. last: the tile's item in found[warp]; -1:
    // there is no tile to draw for. last_key: the tile's first key.
    int last, last_key;
    int fetched, taken; // fetched: tiles of keys copied so far; taken: items begun so far

    __device__ __forceinline__ void draw()
    {
        if (!DROPS || last < 0) return;
        const attention_item &item = found[threadIdx.x / 32][last];
        const int stage = (fetched - 1) % STAGES;
        static_assert(QUERIES == 128, "a thread draws for a query");
        const int query = (int)threadIdx.x, row = attention_row(p, item.first + min(query, item.count - 1));
        TT__UNROLL for (int part = 0; part < KEYS / 32; part++) {
            uint32_t bits = 0;
            tt__forget(k0);
            tt__forget(k1);
            const uint64_t random = (uint64_t)k1 << 32 | k0;
            TT__UNROLL for (int k = 0; k < 2; k++)
                bits |= attention_keep(p, random, row, last_key / 16 + 2 * part + k, item.head) << 16 * k;
            tile.keep[stage][part][query] = bits;
        }
        tt__phases_arrive(&barriers.v_there[stage]);
        last = -1;
    }

    __device__ __forceinline__ void take(const attention_item &item)
    {
        if (taken > 1) tt__phases_wait(&barriers.q_used[taken % 2], (taken / 2 & 1) ^ 1);
        if (threadIdx.x == 0) {
            items[taken % 2] = item;
            tt__phases_arrive(&barriers.q_there[taken % 2]);
        }
    }

    // Copies the queries, keys and values of the item found[warp][lane].
    __device__ __forceinline__ void copy(int lane)
    {
        const int slot = taken % 2;
        const attention_item &item = found[threadIdx.x / 32][lane];
        take(item);
        for (int k = 0; k < GROUPS; k++)
            attention_copy<T, D, 64>(tile.q[slot][k], p.q, p.query_at, item.first + 64 * k,
                                     item.count - 64 * k, item.head, p.head_size);
        tt__phases_arrive_with_copies(&barriers.q_there[slot]);
        const int end = attention_item_end(p, item.length, item.at + item.count);
        const int key_head = item.head / p.group;
        for (int key = attention_item_begin<KEYS>(p, item.at); key < end; key += KEYS) {
            const int stage = fetched % STAGES, parity = (fetched / STAGES & 1) ^ 1;
            if (fetched >= STAGES) tt__phases_wait(&barriers.k_used[stage], parity);
            attention_copy<T, D, KEYS>(tile.k[stage], p.k, NULL, item.begin + key, item.length - key,
                                       key_head, p.head_size);
            tt__phases_arrive_with_copies(&barriers.k_there[stage]);
            if (fetched >= STAGES) tt__phases_wait(&barriers.v_used[stage], parity);
            attention_copy<T, D, KEYS>(tile.v[stage], p.v, NULL, item.begin + key, item.length - key,
                                       key_head, p.head_size);
            tt__phases_arrive_with_copies(&barriers.v_there[stage]);
            draw();
            fetched++;
            last = lane;
            last_key = key;
        }
        taken++;
    }

    __device__ __forceinline__ void run()
    {
        for (int from = 0; from < p.item_rounds; from += 32) { // each lane finds one of the next 32 items
            const int round = from + (int)threadIdx.x % 32;
            attention_item mine = {0, 0, 0, 0, -1, 0};
            if (round < p.item_rounds) mine = attention_item_of<QUERIES>(p, round);
            draw();
            __syncwarp();
            found[threadIdx.x / 32][threadIdx.x % 32] = mine;
            __syncwarp();
            for (uint32_t all = __ballot_sync(0xffffffffu, mine.count > 0); all; all &= all - 1)
                copy(__ffs((int)all) - 1);
        }
        draw();
        take({0, 0, 0, 0, -1, 0});
        tt__phases_arrive_with_copies(&barriers.q_there[taken % 2]);
        tt__cp_async_wait<0>();
    }
};

// The task of each other warpgroup: to compute products. group: the number of the warpgroup; team: the
// warpgroup's first query; mine: the warp's first query. Both queries are counted in the item. The lane is
// computed wherever it is used, to save a register.
template <class T, int D, bool DROPS> struct attention_wide_products {
    typedef attention_wide_sizes<D> S;
    enum { KEYS = S::KEYS, STAGES = S::STAGES };
    const attention_args &p;
    attention_wide_tiles<T, D, DROPS> &tile;
    const attention_wide_barriers &barriers;
    int group, team, mine;
    float factor;
    int used; // number of tiles of keys used so far

    __device__ __forceinline__ int lane_of() const { return tt__opaque((int)threadIdx.x) % 32; }
    __device__ __forceinline__ void arrive(uint64_t *barrier) const
    {
        if (lane_of() == 0) tt__phases_arrive(barrier);
    }

    // Begins to compute s, the products of the queries in `slot` and a tile of keys.
    __device__ __forceinline__ void multiply(float (&s)[KEYS / 8][4], int slot) const
    {
        const int stage = used % STAGES;
        tt__phases_wait(&barriers.k_there[stage], used / STAGES & 1);
        tt__wgmma_publish();
        tt__wgmma_fence();
        attention_wide_scores<T, D, KEYS>(s, tile.q[slot][group], tile.k[stage]);
        tt__wgmma_commit();
    }

    __device__ __forceinline__ void add_values(float (&out)[D / 8][4], uint32_t (&w)[KEYS / 16][4],
                                               int used) const
    {
        const int stage = used % STAGES;
        tt__phases_wait(&barriers.v_there[stage], used / STAGES & 1);
        tt__wgmma_publish();
        tt__wgmma_ready(w);
        tt__wgmma_done(out);
        tt__wgmma_fence();
        attention_wide_values<T, D, KEYS>(out, w, tile.v[stage]);
        tt__wgmma_commit();
    }

    // Sets to -INFINITY the scores of the keys in [key, key + KEYS) that a query does not see. Each of the
    // warp's queries sees the keys before `all`, except for keys before its window.
    __device__ __forceinline__ void mask(float (&s)[KEYS / 8][4], const attention_item &item, int key,
                                         int all) const
    {
        const auto row_of = [&](int h, int lane) {
            const int i = min(mine + 8 * h + lane / 4, item.count - 1);
            return attention_row(p, item.first + i) - item.begin;
        };
        if (key + KEYS > all)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int lane = lane_of(), row = row_of(h, lane);
                const int last = (p.causal ? row : p.window ? min(row + p.window, item.length) - 1
                                  : item.length - 1) - key - lane % 4 * 2;
                TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                    TT__UNROLL for (int e = 0; e < 2; e++)
                        if (8 * n + e > last) s[n][2 * h + e] = -INFINITY;
            }
        if (p.window)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int lane = lane_of(), from = row_of(h, lane) - p.window + 1 - key - lane % 4 * 2;
                TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                    TT__UNROLL for (int e = 0; e < 2; e++)
                        if (8 * n + e < from) s[n][2 * h + e] = -INFINITY;
            }
    }

    // Turns scores into weights. Works on the thread's two rows side by side, with two chains of operations
    // for each row, because the latency of a chain decides the time.
    __device__ __forceinline__ void weigh(float (&s)[KEYS / 8][4], float (&largest)[2], float (&sum)[2],
                                          float (&correction)[2]) const
    {
        float now[4] = {largest[0], s[0][1], largest[1], s[0][3]}, total[4] = {0, 0, 0, 0};
        TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
            TT__UNROLL for (int i = 0; i < 4; i++) now[i] = fmaxf(now[i], s[n][i]);
        TT__UNROLL for (int h = 0; h < 2; h++) now[h] = fmaxf(now[2 * h], now[2 * h + 1]);
        TT__UNROLL for (int m = 1; m < 4; m *= 2)
            TT__UNROLL for (int h = 0; h < 2; h++)
                now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], m));
        float offset[2];
        TT__UNROLL for (int h = 0; h < 2; h++) {
            correction[h] = tt__exp2((largest[h] - now[h]) * factor);
            // With a window, a query may not have seen any key so far.
            offset[h] = now[h] == -3.4028235e38f ? 0 : -now[h] * factor;
            largest[h] = now[h];
        }
        TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
            TT__UNROLL for (int i = 0; i < 4; i++) {
                s[n][i] = tt__exp2(fmaf(s[n][i], factor, offset[i / 2]));
                total[i] += s[n][i];
            }
        TT__UNROLL for (int h = 0; h < 2; h++)
            sum[h] = sum[h] * correction[h] + (total[2 * h] + total[2 * h + 1]);
    }

    // Applies dropout to the weights, and packs them as the first operand of a product.
    __device__ __forceinline__ void round(uint32_t (&w)[KEYS / 16][4], const float (&s)[KEYS / 8][4]) const
    {
        TT__UNROLL for (int k = 0; k < KEYS / 16; k++)
            TT__UNROLL for (int i = 0; i < 4; i++)
                w[k][i] = pack<T>(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]);
        if (!DROPS) return;
        const int stage = used % STAGES, lane = lane_of(), pair = lane % 4 * 2;
        tt__phases_wait(&barriers.v_there[stage], used / STAGES & 1);
        TT__UNROLL for (int part = 0; part < KEYS / 32; part++)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                // A thread has two of each 8 keys. In `low`, the highest bit of each byte is the bit of the
                // first of the two keys; in `high`, the highest bit is that of the second.
                const uint32_t bits = tile.keep[stage][part][mine + 8 * h + lane / 4];
                const uint32_t low = bits << (7 - pair), high = bits << (6 - pair);
                TT__UNROLL for (int n = 0; n < 4; n++)
                    w[2 * part + n / 2][n % 2 * 2 + h] &= tt__bytes(low, high, 0xcc88u + 0x1111u * n);
            }
    }

    // Stores the warp's rows of the output. Writes them first to shared memory, over the warp's queries,
    // which are no longer in use, and copies them from there to memory as whole vectors.
    __device__ __forceinline__ void store(const float (&out)[D / 8][4], const float (&largest)[2],
                                          const float (&sum)[2], const attention_item &item, int slot) const
    {
        const int lane = lane_of(), pair = lane % 4 * 2;
        T *const rows = tile.q[slot][group] + (mine - team) * 64;
        __syncwarp(); // all lanes have waited for the products that read these rows
        TT__UNROLL for (int h = 0; h < 2; h++) {
            float total = sum[h] + __shfl_xor_sync(0xffffffffu, sum[h], 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const float scale = p.keep_scale / total;
            const int r = 8 * h + lane / 4;
            TT__UNROLL for (int n = 0; n < D / 8; n++)
                *(uint32_t *)(rows + n / 8 * 64 * 64 + r * 64 + (n % 8 ^ r % 8) * 8 + pair) =
                    pack<T>(out[n][2 * h] * scale, out[n][2 * h + 1] * scale);
            if (pair == 0 && mine + r < item.count)
                p.lse[attention_sums_at(p, item.first + mine + r, item.head)] =
                    largest[h] * fabsf(p.scale) + logf(total);
        }
        __syncwarp();
        for (int i = lane; i < 16 * D / 8; i += 32) {
            const int r = i / (D / 8), c = i % (D / 8), query = item.first + mine + r;
            if (mine + r >= item.count || 8 * c >= p.head_size) continue;
            const int64_t at = p.query_at ? p.query_at[query] : query;
            *(uint4 *)((T *)p.out.data + at * p.out.ld + item.head * p.head_size + 8 * c) =
                *(const uint4 *)(rows + c / 8 * 64 * 64 + r * 64 + (c % 8 ^ r % 8) * 8);
        }
        __syncwarp();
        if (lane == 0) tt__phases_arrive(&barriers.q_used[slot]);
    }

    __device__ __forceinline__ void run(const attention_item &item, int slot)
    {
        const int count = item.count, begin = attention_item_begin<KEYS>(p, item.at);
        // The group's queries see none of the item's keys from `end` on. Each of the warp's queries sees the
        // keys before `all`.
        const int item_end = attention_item_end(p, item.length, item.at + count);
        const int end = team < count
            ? attention_item_end(p, item.length, item.at + min(count, team + 64)) : begin;
        const int all = p.query_row ? 0 : attention_item_end(p, item.length, item.at + mine + 1);
        float largest[2], sum[2], correction[2], s[KEYS / 8][4], out[D / 8][4];
        uint32_t w[KEYS / 16][4];
        TT__UNROLL for (int h = 0; h < 2; h++) { largest[h] = -3.4028235e38f; sum[h] = 0; }
        TT__UNROLL for (int n = 0; n < D / 8; n++) TT__UNROLL for (int i = 0; i < 4; i++) out[n][i] = 0;
        int key = begin;
        for (; key < end; key += KEYS) {
            if (S::OVERLAPS && key > begin) {
                used++;
                multiply(s, slot);
                add_values(out, w, used - 1);
                tt__wgmma_wait<1>();
                tt__wgmma_done(s);
                arrive(&barriers.k_used[used % STAGES]);
                mask(s, item, key, all);
                weigh(s, largest, sum, correction);
                tt__wgmma_wait<0>();
                tt__wgmma_done(out);
                arrive(&barriers.v_used[(used - 1) % STAGES]);
            } else {
                multiply(s, slot);
                tt__wgmma_wait<0>();
                tt__wgmma_done(s);
                arrive(&barriers.k_used[used % STAGES]);
                mask(s, item, key, all);
                weigh(s, largest, sum, correction);
            }
            if (key > begin && __any_sync(0xffffffffu, correction[0] != 1 || correction[1] != 1))
                TT__UNROLL for (int n = 0; n < D / 8; n++)
                    TT__UNROLL for (int i = 0; i < 4; i++) out[n][i] *= correction[i / 2];
            round(w, s);
            if (S::OVERLAPS && key + KEYS < end) continue;
            add_values(out, w, used);
            tt__wgmma_wait<0>();
            tt__wgmma_done(out);
            arrive(&barriers.v_used[used % STAGES]);
            used++;
        }
        for (; key < item_end; key += KEYS) { // tiles of keys that only the queries of other warpgroups see
            const int stage = used % STAGES, parity = used / STAGES & 1;
            tt__phases_wait(&barriers.k_there[stage], parity);
            arrive(&barriers.k_used[stage]);
            tt__phases_wait(&barriers.v_there[stage], parity);
            arrive(&barriers.v_used[stage]);
            used++;
        }
        store(out, largest, sum, item, slot);
    }
};

template <class T, int D, bool DROPS>
__global__ __launch_bounds__(128 * (attention_wide_sizes<D>::GROUPS + 1), attention_wide_sizes<D>::BLOCKS)
void attention_forward_wide(attention_args p)
{
    tt__begin_kernel();
    typedef attention_wide_sizes<D> S;
    enum { FEW = DROPS ? 48 : D > 64 ? 40 : 32,
           MANY = (S::GIVEN * (S::GROUPS + 1) - FEW) / S::GROUPS / 8 * 8 };
    TT__SHARED(uint64_t, q_there, [2]);
    TT__SHARED(uint64_t, q_used, [2]);
    TT__SHARED(uint64_t, k_there, [S::STAGES]);
    TT__SHARED(uint64_t, v_there, [S::STAGES]);
    TT__SHARED(uint64_t, k_used, [S::STAGES]);
    TT__SHARED(uint64_t, v_used, [S::STAGES]);
    TT__SHARED(attention_item, items, [2]);
    TT__SHARED(attention_item, found, [4][32]);
    TT__DYN_SHARED(T, shared);
    auto &tile = *(attention_wide_tiles<T, D, DROPS> *)attention_room(shared);
    const attention_wide_barriers barriers = {q_there, q_used, k_there, v_there, k_used, v_used};
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0) - 1;
    if (threadIdx.x == 0) barriers.begin<S>(DROPS);
    __syncthreads();
    if (group < 0) {
        tt__fewer_registers<FEW>();
        const uint64_t random = DROPS ? attention_key(p) : 0;
        attention_wide_copies<T, D, DROPS> copies =
            {p, tile, barriers, items, found, (uint32_t)random, (uint32_t)(random >> 32), -1, 0, 0, 0};
        copies.run();
        return;
    }
    tt__more_registers<MANY>();
    const int team = 64 * group, mine = team + __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0) % 4 * 16;
    attention_wide_products<T, D, DROPS> products =
        {p, tile, barriers, group, team, mine, fabsf(p.scale) * TT__LOG2E, 0};
    for (int taken = 0;; taken++) {
        const int slot = taken % 2;
        tt__phases_wait(&q_there[slot], taken / 2 & 1);
        if (items[slot].count < 0) break;
        products.run(items[slot], slot);
    }
}

} // namespace

/* ==== src/ops/attention/cuda_backward.cuh */
namespace {

// ------------------------------------------------------------------- the backward on tensor cores (mma.sync)

// Returns the sum of dout * out over a head's columns of row `row`. The four threads that have the row's
// scores compute the sum together.
template <class T>
__device__ __forceinline__ float attention_delta_of(const attention_args &p, int row, int head)
{
    const T *out = (const T *)p.out.data + row * p.out.ld + (int64_t)head * p.head_size;
    const T *dout = (const T *)p.dout.data + row * p.dout.ld + (int64_t)head * p.head_size;
    float sum = 0;
    for (int c = threadIdx.x % 4 * 8; c < p.head_size; c += 32) {
        float x[8], y[8];
        widen8<T>(x, *(const uint4 *)(out + c));
        widen8<T>(y, *(const uint4 *)(dout + c));
        TT__UNROLL for (int i = 0; i < 8; i++) sum += x[i] * y[i];
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// Gets, for a thread's queries, the log-sum-exps of the scores (converted to base 2) and the sums of dout *
// out. If p.sums_deltas, the sums of dout * out are computed and stored; otherwise they are read.
template <class T, int MT>
__device__ __forceinline__ void attention_row_sums(float (&lse)[MT][2], float (&delta)[MT][2],
                                                   const attention_args &p, const attention_queries<MT> &b)
{
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            const int query = b.first + min(b.mine + 16 * m + 8 * h + (int)threadIdx.x % 32 / 4, b.count - 1);
            const int64_t at = attention_sums_at(p, query, b.head);
            lse[m][h] = p.lse[at] * TT__LOG2E;
            if (p.sums_deltas) {
                delta[m][h] = attention_delta_of<T>(p, p.query_at ? p.query_at[query] : query, b.head);
                if (b.pair == 0 && b.mine + 16 * m + 8 * h + (int)threadIdx.x % 32 / 4 < b.count)
                    p.delta[at] = delta[m][h];
            } else {
                delta[m][h] = p.delta[at];
            }
        }
}

// Turns the products q k^T (s) and dout v^T (g) into the gradients of scores (g), without the factor `scale`.
// Rows are queries, columns are keys from `key` on. often: how many times the queries see the keys.
template <int MT, int KEYS, attention_kind KIND>
__device__ __forceinline__ void attention_row_slopes(float (&s)[MT][KEYS / 8][4],
                                                     float (&g)[MT][KEYS / 8][4], const attention_args &p,
                                                     const attention_queries<MT> &b,
                                                     const uint32_t (&keep)[MT * KEYS / 64],
                                                     const float (&lse)[MT][2], const float (&delta)[MT][2],
                                                     int key, float factor, float slope, int often)
{
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            const int last = key + KEYS <= b.all ? KEYS + 0
                : (p.causal ? b.row[m][h] - b.t.begin : b.t.length - 1) - key - b.pair;
            const int row = b.row[m][h] - b.t.begin, ahead = row - key - b.pair;
            const int smallest = max(p.smallest, row - b.t.length + 1);
            TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                TT__UNROLL for (int i = 0; i < 2; i++) {
                    float &x = s[m][n][2 * h + i], &y = g[m][n][2 * h + i];
                    const int d = ahead - 8 * n - i;
                    if (NEAR) x = fmaf(-slope, fabsf((float)d), x);
                    x = (NEAR ? d < smallest || d > p.largest : 8 * n + i > last)
                        ? 0 : tt__exp2(fmaf(x, factor, -lse[m][h]));
                    if (BLOCKS) x *= (float)often;
                    y = x * ((attention_kept<MT, KEYS>(keep, m, h, n, i) ? y * p.keep_scale
                              : 0) - delta[m][h]);
                }
        }
}

template <class T, int D, int MT, int KEYS, attention_kind KIND>
__global__ __launch_bounds__(128, 2) void attention_dq(attention_args p)
{
    tt__begin_kernel();
    enum { WARPS = 4, QUERIES = 16 * MT * WARPS, PITCH = D + 8 };
    TT__SHARED(uint64_t, random, ); // in shared memory, or Philox's round keys would stay in registers
    TT__SHARED(float, part, [WARPS][D]);
    TT__SHARED(unsigned char *, kept_at, [WARPS]); // place of the bits of the warp's first query and key 0
    TT__DYN_SHARED(T, qs);
    T *ds = qs + QUERIES * PITCH, *ks = ds + QUERIES * PITCH;
    T *vs = ks + 2 * KEYS * PITCH;
    attention_queries<MT> b;
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    const bool keeps = KIND == PLAIN && D <= 64 && p.bits;
    if (!attention_find_queries<KIND == NEARBY, MT, WARPS>(b, p)) {
        attention_write_sums<D>(p.sums_q, attention_sums_begin(p, p.heads, b.head), part, 0, p.head_size,
                                (int)threadIdx.x);
        return;
    }
    const attention_tile &t = b.t;
    const int head = b.head, mine = b.mine, first = b.first, count = b.count, begin = b.begin & -KEYS;
    attention_sparse sparse = {0, 0, 0};
    if (BLOCKS) sparse = attention_sparse_of(p, t.length, t.at, count);
    const float factor = p.scale * TT__LOG2E, slope = NEAR ? attention_slope(p, head) / p.scale : 0;
    if (threadIdx.x == 0) random = attention_key(p);
    if (keeps && threadIdx.x % 32 == 0)
        kept_at[threadIdx.x / 32] = attention_bits(p, attention_bits_begin(p, t), (t.at + mine) / 64, 0, head)
            + mine % 64 * 2;
    attention_fetch<T, D, QUERIES>(qs, p.q, p.query_at, first, count, head, p.head_size);
    attention_fetch<T, D, QUERIES>(ds, p.dout, p.query_at, first, count, head, p.head_size);
    attention_fetch_keys<T, D, KEYS>(ks, vs, p, t, begin, 0, head);
    float lse[MT][2], delta[MT][2], dq[MT][D / 8][4];
    attention_clear(dq);
    attention_row_sums<T>(lse, delta, p, b);
    for (int key = begin, next, stage = 0; key < b.end; key = next, stage ^= 1) {
        const T *kt = ks + stage * KEYS * PITCH, *vt = vs + stage * KEYS * PITCH;
        next = key + KEYS;
        if (BLOCKS && next < b.end) next = attention_seen_from<false>(p, sparse, head, next, b.end);
        tt__cp_async_wait<0>();
        __syncthreads();
        if (next < b.end) attention_fetch_keys<T, D, KEYS>(ks, vs, p, t, next, stage ^ 1, head);
        if (mine >= count || attention_after<MT, KIND>(p, t.at + mine, key)) continue;
        int often = 1;
        if (BLOCKS && sparse.n)
            often = attention_times(p, head, sparse.n, (t.at + mine) / p.block, key / p.block);
        if (often == 0) continue;
        uint32_t keep[MT * KEYS / 64];
        float s[MT][KEYS / 8][4], g[MT][KEYS / 8][4];
        unsigned char *bits = NULL;
        if (keeps)
            bits = kept_at[threadIdx.x / 32] + key / 64 * ((int64_t)p.heads * TT__CUDA_ATTENTION_BITS)
                + key % 64 * 8;
        attention_draw_rows<MT, KEYS>(keep, p, random, b.row, key, head, bits);
        attention_mma<T, D, MT, KEYS>(s, qs + mine * PITCH, kt);
        attention_mma<T, D, MT, KEYS>(g, ds + mine * PITCH, vt);
        attention_row_slopes<MT, KEYS, KIND>(s, g, p, b, keep, lse, delta, key, factor, slope, often);
        attention_mma_add<T, D, MT, KEYS>(dq, g, kt);
    }
    attention_columns<T, D> columns;
    columns.clear();
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            const int i = mine + 16 * m + 8 * h + (int)threadIdx.x % 32 / 4;
            if (i >= count) continue;
            attention_store<T, D>(p.dq, p.query_at ? p.query_at[first + i] : first + i, head, p.head_size,
                                  dq[m], h, p.scale, p.add_dq, threadIdx.x % 32, columns, p.sums_q);
        }
    if (!p.sums_q) return;
    columns.write(part[threadIdx.x / 32], threadIdx.x % 32, false);
    __syncthreads();
    attention_write_sums<D>(p.sums_q, attention_sums_begin(p, p.heads, head), part, WARPS, p.head_size,
                            (int)threadIdx.x);
}

// Copies QUERIES queries, beginning with query number `first`, into buffer `stage` (0 or 1). n: number of
// queries from `first` to the sequence's end. qs holds first q and then dout, each as (2, QUERIES, PITCH):
// one matrix for each stage. lses holds first log-sum-exps and then deltas, each as (2, QUERIES); after the
// last query both become 0. rows, (2, QUERIES), gets the queries' rows of the batch.
template <class T, int D, int QUERIES, int THREADS, bool WIDE = false>
__device__ __forceinline__ void attention_fetch_queries(T *qs, float *lses, int *rows,
                                                        const attention_args &p, int first, int n, int head,
                                                        int stage, int thread = (int)threadIdx.x)
{
    enum { PITCH = WIDE ? D : D + 8 };
    const int i = thread;
    const int at = stage * QUERIES * PITCH, after = at + 2 * QUERIES * PITCH;
    attention_fetch<T, D, QUERIES, THREADS, WIDE>(qs + at, p.q, p.query_at, first, n, head, p.head_size,
                                                  thread);
    attention_fetch<T, D, QUERIES, THREADS, WIDE>(qs + (WIDE ? tt__opaque(after) : after), p.dout,
                                                  p.query_at, first, n, head, p.head_size, thread);
    if (i < QUERIES) {
        const int query = first + min(i, n - 1), bytes = i < n ? 4 : 0, to = stage * QUERIES + i;
        const int64_t at = attention_sums_at(p, query, head);
        tt__cp_async_4(lses + to, p.lse + at, bytes);
        tt__cp_async_4(lses + 2 * QUERIES + to, p.delta + at, bytes);
        rows[to] = attention_row(p, query);
    }
    tt__cp_async_commit();
}

// Copies bits of dropout (attention_bits), asynchronously, to `to`: the bits of the queries from `from` on
// and the keys from t.at on, as (KEYS / 16, QUERIES, 16). Bits after the sequence's end become zeros. If
// no query of a tile of QUERIES x QUERIES sees a key, the kernel of dq writes no bits, and the copied bits
// become zeros, too. begin: the sequence's attention_bits_begin.
template <int KEYS, int QUERIES>
__device__ __forceinline__ void attention_fetch_bits(unsigned char *to, const attention_args &p,
                                                     const attention_tile &t, int64_t begin, int from,
                                                     int head)
{
    enum { PARTS = QUERIES / 8 }; // number of 16-byte parts of the bits of QUERIES queries and 16 keys
    const int i = tt__opaque((int)threadIdx.x), key = tt__opaque(t.at) + i / PARTS * 16;
    if (i >= KEYS / 16 * PARTS) return;
    const bool there = key < t.length && (!p.causal || key / QUERIES <= from / QUERIES);
    const unsigned char *bits = there ? attention_bits(p, begin, from / 64, key / 64, head) + key % 64 * 8
        + from % 64 * 2 + i % PARTS * 16 : p.bits;
    tt__cp_async_16(to + i * 16, bits, there ? 16 : 0);
}

// Stores the thread's elements of row `row` of dk (k is 0) or dv (k is 1): elements `2 * h` and `2 * h + 1`
// of each tile of 8 columns.
template <class T, int D>
__device__ __forceinline__ void attention_store_key(const attention_args &p, int k, int row, int head,
                                                    const float (&from)[D / 8][4], int h, int lane,
                                                    attention_columns<T, D> &columns)
{
    const tt__mat &m = k ? p.dv : p.dk;
    if (!m.data) return;
    attention_store<T, D>(m, row, head, p.head_size, from, h, k ? p.keep_scale : p.scale,
                          k ? p.add_dv : p.add_dk, lane, columns, k ? p.sums_v : p.sums_k);
}

// Writes the thread block's column sums of dk and dv: adds up the column sums of its first `parts` warps,
// which are in part[warp] for dk and in part[WARPS + warp] for dv.
template <int D, int WARPS>
__device__ __forceinline__ void attention_write_key_sums(const attention_args &p, int64_t at,
                                                         const float (*part)[D], int parts, int thread)
{
    attention_write_sums<D>(p.sums_k, at, part, parts, p.head_size, thread);
    attention_write_sums<D>(p.sums_v, at, part + WARPS, parts, p.head_size, thread);
}

// Writes the thread block's column sums of dk and dv, if sums are wanted. A barrier comes first. After the
// barrier, all warps have stored their sums, and `at`, which may be in shared memory, is set.
template <int D, int WARPS>
__device__ __forceinline__ void attention_finish_key_sums(const attention_args &p, const int64_t &at,
                                                          const float (*part)[D], int parts, int thread)
{
    if (!p.sums_k && !p.sums_v) return;
    __syncthreads();
    attention_write_key_sums<D, WARPS>(p, at, part, parts, thread);
}

// Moves `to` to the sequence's next tile of queries that sees any of the block's keys; after the last such
// tile, moves to `begin`, the first tile, of the next head.
template <int QUERIES, bool BLOCKS>
__device__ __forceinline__ void attention_advance(int &to, int &head, const attention_args &p,
                                                  const attention_sparse &sparse, int begin, int end)
{
    to += QUERIES;
    if (BLOCKS && to < end) to = attention_seen_from<true>(p, sparse, head, to, end);
    if (to >= end) { to = begin; head++; }
}

// Gives all threads of the thread block, in shared memory, the tile of keys that they work on. With READS
// also gives them the place of the tile's bits of dropout, otherwise the sparse blocks that the tile's keys
// are in.
template <int KEYS, bool READS>
__device__ __forceinline__ void attention_share(attention_tile &tile, int64_t &bits_begin,
                                                attention_sparse &sparse, const attention_args &p,
                                                const attention_tile &found)
{
    if (threadIdx.x == 0) {
        tile = found;
        if (READS) bits_begin = attention_bits_begin(p, found);
        else
            sparse = attention_sparse_of(p, found.length, found.at, min(KEYS + 0, found.length - found.at));
    }
    __syncthreads();
}

// Turns the products q k^T (s) and dout v^T (g) into weights after dropout (s) and the gradients of scores
// (g), without the factor `scale`. Rows are keys, columns are queries. row: the queries' rows of the batch,
// beginning with the tile's first query; lse, delta: the queries' sums, beginning with the thread's first
// column; mine: the warp's first key, counted in tile t; masked: whether the warp has a key that a query does
// not see; often: how many times each query sees each key, as block-sparse attention may list a block twice.
template <int MT, int QUERIES, attention_kind KIND>
__device__ __forceinline__ void attention_column_slopes(float (&s)[MT][QUERIES / 8][4],
                                                        float (&g)[MT][QUERIES / 8][4],
                                                        const attention_args &p, uint32_t keep,
                                                        const int *row, const float *lse, const float *delta,
                                                        const attention_tile &t, int mine, bool masked,
                                                        float factor, float slope, int often)
{
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    TT__UNROLL for (int n = 0; n < QUERIES / 8; n++)
        TT__UNROLL for (int e = 0; e < 2; e++) {
            const int c = 8 * n + e;
            // The last key that the query sees, counted from the thread's first key.
            const int last = masked ? row[c + pair] - t.begin - t.at - mine - group : 16 * MT;
            const int ahead = row[c + pair] - t.begin - t.at - mine - group;
            const float log_sum = lse[c] * TT__LOG2E, sum = delta[c];
            TT__UNROLL for (int m = 0; m < MT; m++)
                TT__UNROLL for (int h = 0; h < 2; h++) {
                    const bool kept = keep >> (8 * (2 * e + h) + m * (QUERIES / 8) + n) & 1;
                    float &x = s[m][n][2 * h + e], &y = g[m][n][2 * h + e];
                    const int d = ahead - 16 * m - 8 * h;
                    if (NEAR) x = fmaf(-slope, fabsf((float)d), x);
                    x = (NEAR ? d < p.smallest || d > p.largest : 16 * m + 8 * h > last)
                        ? 0 : tt__exp2(fmaf(x, NEAR ? p.factor : factor, -log_sum));
                    if (BLOCKS) x *= (float)often;
                    y = x * ((kept ? y * p.keep_scale : 0) - sum);
                    if (!kept) x = 0;
                }
        }
}

// Makes dk and dv. Rows of scores are keys here, columns are queries. READS: p.bits tells which weights
// dropout keeps.
template <class T, int D, int MT, int QUERIES, attention_kind KIND, bool READS = false>
__global__ __launch_bounds__(128, 2) void attention_dkdv(attention_args p)
{
    tt__begin_kernel();
    enum { WARPS = 4, KEYS = 64 * MT, PITCH = D + 8, BITS = KEYS * QUERIES / 8 };
    TT__SHARED(int64_t, sums_begin, ); // these three variables are in shared memory to save registers
    TT__SHARED(int64_t, bits_begin, );
    TT__SHARED(uint64_t, random, );
    TT__SHARED(attention_sparse, sparse, ); // `sparse` and `tile` are used by kernels that lack registers
    TT__SHARED(attention_tile, tile, );
    TT__DYN_SHARED(T, ks);
    T *vs = ks + KEYS * PITCH, *qs = vs + KEYS * PITCH, *ds = qs + 2 * QUERIES * PITCH;
    float *lses = (float *)(ds + 2 * QUERIES * PITCH), *deltas = lses + 2 * QUERIES; // (2, QUERIES)
    int *rows = (int *)(deltas + 2 * QUERIES); // (2, QUERIES): each query's row of the batch
    unsigned char *const kept = (unsigned char *)(rows + 2 * QUERIES); // dropout's bits for two stages
    const int key_heads = p.heads / p.group, mine = (int)threadIdx.x / 32 * 16 * MT;
    const int key_head = p.first_head / p.group + (int)(blockIdx.x % key_heads), pair = threadIdx.x % 4 * 2;
    const attention_tile found = attention_find<KEYS>(p, p.seq_start, (int)(blockIdx.x / key_heads));
    float (*const part)[D] = (float (*)[D])ks; // after the loop: each warp's column sums of dk, then of dv
    static_assert(2 * WARPS * D * sizeof(float) <= KEYS * PITCH * sizeof(T), "their place is that of keys");
    if (threadIdx.x == 0) sums_begin = attention_sums_begin(p, key_heads, key_head);
    if (found.at < 0)
        return attention_finish_key_sums<D, WARPS>(p, sums_begin, part, 0, (int)threadIdx.x);
    if (KIND == BY_BLOCKS || READS) attention_share<KEYS, READS>(tile, bits_begin, sparse, p, found);
    const attention_tile &t = KIND == BY_BLOCKS ? tile : found;
    const int count = min(KEYS + 0, t.length - t.at);
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    const bool diagonal = p.causal && !p.query_row; // query i sees keys up to i
    const float factor = p.scale * TT__LOG2E; // p.factor, computed here to save a register
    if (threadIdx.x == 0) random = attention_key(p);
    float dk[MT][D / 8][4], dv[MT][D / 8][4];
    attention_clear(dk, dv);
    attention_fetch_rows<T, D, KEYS>(ks, vs, p, t.begin + t.at, count, key_head);
    const auto fetch = [&](int from, int head, int stage) { // copies queries, beginning with `from`
        if (READS) attention_fetch_bits<KEYS, QUERIES>(kept + stage * BITS, p, t, bits_begin, from, head);
        attention_fetch_queries<T, D, QUERIES, 128>(qs, lses, rows, p, t.first + from, t.queries - from,
                                                    head, stage);
    };
    const int begin = NEAR ? attention_queries_begin(p, t) : diagonal ? t.at : 0;
    const int end = NEAR ? attention_queries_end(p, t, count) : t.queries;
    const int heads_end = begin < end ? (key_head + 1) * p.group : 0; // end of the heads that read key_head
    int from = begin, head = key_head * p.group;
    if (head < heads_end) fetch(from, head, 0);
    for (int stage = 0; head < heads_end;
         attention_advance<QUERIES, BLOCKS>(from, head, p, sparse, begin, end), stage ^= 1) {
        const T *qt = qs + stage * QUERIES * PITCH, *dt = ds + stage * QUERIES * PITCH;
        const float *lse = lses + stage * QUERIES + pair, *delta = deltas + stage * QUERIES + pair;
        tt__cp_async_wait<0>();
        __syncthreads();
        int next = from, next_head = head;
        attention_advance<QUERIES, BLOCKS>(next, next_head, p, sparse, begin, end);
        if (next_head < heads_end) fetch(next, next_head, stage ^ 1);
        // Skips the tile if the warp has no keys, or if no query of the tile sees any of the warp's keys.
        if (mine >= count || (diagonal && t.at + mine > from + QUERIES - 1)) continue;
        const int often = !BLOCKS || !sparse.n ? 1
            : attention_times(p, head, sparse.n, from / p.block, (t.at + mine) / p.block);
        if (often == 0) continue;
        const float slope = NEAR ? attention_slope(p, head) / p.scale : 0;
        const int first = t.at + mine; // the warp's first key
        const bool masked = p.causal && (!diagonal || first + 16 * MT - 1 > from);
        float s[MT][QUERIES / 8][4], g[MT][QUERIES / 8][4];
        const uint32_t keep = READS
            ? attention_read_columns<MT, QUERIES>(kept + stage * BITS + mine / 8 * QUERIES)
            : attention_draw_columns<MT, QUERIES>(p, random, rows + stage * QUERIES, first / 16, head);
        attention_mma<T, D, MT, QUERIES>(s, ks + mine * PITCH, qt);
        attention_mma<T, D, MT, QUERIES>(g, vs + mine * PITCH, dt);
        attention_column_slopes<MT, QUERIES, KIND>(s, g, p, keep, rows + stage * QUERIES, lse, delta, t, mine,
                                                   masked, factor, slope, often);
        attention_mma_add<T, D, MT, QUERIES>(dv, s, dt);
        attention_mma_add<T, D, MT, QUERIES>(dk, g, qt);
    }
    tt__cp_async_wait<0>(); // waits for k and v, if the loop did not run
    if (p.sums_k || p.sums_v) __syncthreads();
    const int thread = tt__opaque((int)threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int to_head = KIND == NEARBY // in other kernels computed again, to save a register in the loop
        ? key_head : p.first_head / p.group + tt__opaque((int)blockIdx.x) % key_heads;
    // The same thread stores an element of dk and of dv, because dk and dv may have the same memory.
    TT__UNROLL for (int k = 0; k < 2; k++) {
        attention_columns<T, D> columns;
        columns.clear();
        TT__UNROLL for (int m = 0; m < MT; m++)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int r = 16 * MT * warp + 16 * m + 8 * h + lane / 4;
                const int row = (READS ? tile : t).begin + t.at + r;
                if (r >= count) continue;
                attention_store_key<T, D>(p, k, row, to_head, k ? dv[m] : dk[m], h, lane, columns);
            }
        if (k ? p.sums_v : p.sums_k) columns.write(part[WARPS * k + warp], lane, false);
    }
    if (p.sums_k || p.sums_v) __syncthreads();
    attention_write_key_sums<D, WARPS>(p, sums_begin, part, WARPS, thread);
}

// Turns the products q k^T (s) and dout v^T (g) into weights after dropout (s) and the gradients of scores
// (g), without the factor `scale`. Rows are keys, columns are queries. lse, delta: the queries' sums,
// beginning with the thread's first column; first: row of the batch of the thread's first key; inside: number
// of keys from that key to the sequence's end. Weights after the end are set to 0, because they could make dq
// infinite where all scores are far below 0.
template <int MT, int QUERIES>
__device__ __forceinline__ void attention_slopes(float (&s)[MT][QUERIES / 8][4],
                                                 float (&g)[MT][QUERIES / 8][4], const attention_args &p,
                                                 uint32_t keep, const int *rows, const float *lse,
                                                 const float *delta, int first, int inside)
{
    const float factor = p.scale * TT__LOG2E; // p.factor, computed here to save a register
    TT__UNROLL for (int n = 0; n < QUERIES / 8; n++)
        TT__UNROLL for (int e = 0; e < 2; e++) {
            const int c = 8 * n + e;
            // The last key that the query sees, counted from the thread's first key.
            const int last = min(p.causal ? rows[c + threadIdx.x % 4 * 2] - first : 16 * MT, inside - 1);
            const float log_sum = lse[c] * TT__LOG2E, sum = delta[c];
            TT__UNROLL for (int m = 0; m < MT; m++)
                TT__UNROLL for (int h = 0; h < 2; h++) {
                    const bool kept = keep >> (8 * (2 * e + h) + m * (QUERIES / 8) + n) & 1;
                    float &x = s[m][n][2 * h + e], &y = g[m][n][2 * h + e];
                    x = 16 * m + 8 * h > last ? 0 : tt__exp2(fmaf(x, factor, -log_sum));
                    y = x * ((kept ? y * p.keep_scale : 0) - sum);
                    if (!kept) x = 0;
                }
        }
}

} // namespace

/* ==== src/ops/attention/cuda_backward_wide.cuh */
namespace {

// ----------------------------------------------------- the backward in one kernel, and by warpgroups (wgmma)

// The work of a thread block of attention_backward: a sequence, with its rows of the batch (begin, count)
// and its queries (first, queries), one head of keys, and the end of the heads of q that share this head.
// `thread` is 0, but the compiler does not know the 0. Expressions that contain `thread` are therefore
// computed where they are used and take no registers before.
struct attention_whole {
    int begin, count, first, queries, key_head, heads_end, thread;
    __device__ __forceinline__ void find(const attention_args &p)
    {
        const int key_heads = p.heads / p.group, seq = (int)(blockIdx.x / key_heads);
        key_head = p.first_head / p.group + (int)(blockIdx.x % key_heads);
        begin = p.seq_start[seq];
        count = p.seq_start[seq + 1] - begin;
        first = p.query_start[seq];
        queries = p.query_start[seq + 1] - first;
        heads_end = queries > 0 ? (key_head + 1) * p.group : 0;
        thread = 0;
    }
};

// Computes to = a^T b, where a (K, 16 MT) and b (K, N) are in shared memory and `to` is (16 MT, N). Sums over
// the first `end` of the K rows. The rows of a are ACROSS elements apart, the rows of b are PITCH apart.
template <class T, int MT, int N, int ACROSS, int PITCH>
__device__ __forceinline__ void attention_mma_down(float (&to)[MT][N / 8][4], const T *a, const T *b,
                                                   int lane, int end)
{
    a += (lane % 8 + lane / 16 * 8) * ACROSS + lane / 8 % 2 * 8;
    b += lane % 16 * PITCH + lane / 16 * 8;
    attention_clear(to);
    for (int k = 0; k < end; k += 16, a += 16 * ACROSS, b += 16 * PITCH) {
        uint32_t af[MT][4];
        TT__UNROLL for (int m = 0; m < MT; m++) tt__ldmatrix_x4_trans(af[m], a + 16 * m);
        TT__UNROLL for (int n = 0; n < N; n += 16) {
            uint32_t r[4];
            tt__ldmatrix_x4_trans(r, b + n);
            const uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
            TT__UNROLL for (int m = 0; m < MT; m++) {
                tt__mma_16816<T>(to[m][n / 8], af[m], b0);
                tt__mma_16816<T>(to[m][n / 8 + 1], af[m], b1);
            }
        }
    }
}

// Sizes of attention_backward. A warp makes 16 * QM rows and COLUMNS columns of dq.
template <int D, int WARPS> struct attention_whole_sizes {
    enum { MT = 2, KEYS = 32 * WARPS, QUERIES = 64, PART = 32, PITCH = D + 8, ACROSS = QUERIES + 8,
           QM = WARPS * D > 256 ? 2 : 1, DOWN = QUERIES / (16 * QM), COLUMNS = D * DOWN / WARPS };
};

// Writes the warp's gradients of scores to `to`, with keys as rows, ACROSS elements apart, and queries as
// columns. Writes zeros if none of the queries sees any of the keys.
template <class T, int MT, int PART, int ACROSS>
__device__ __forceinline__ void attention_put_slopes(T *to, const float (&g)[MT][PART / 8][4], bool seen)
{
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int n = 0; n < PART / 8; n++)
            TT__UNROLL for (int h = 0; h < 2; h++)
                *(uint32_t *)(to + (16 * m + 8 * h) * ACROSS + 8 * n) =
                    seen ? attention_pack<T>(g[m][n][2 * h], g[m][n][2 * h + 1]) : 0;
}

template <int D, int DOWN> __device__ __forceinline__ void attention_clear_sums(float (*part)[D], int threads)
{
    for (int c = (int)threadIdx.x; c < D; c += threads)
        for (int k = 0; k < DOWN; k++) part[k][c] = 0;
}

// Makes dq of the tile of queries that begins at `from`: multiplies the gradients of scores (`slopes`) by
// the keys that these queries see. part_q: column sums of dq, to which the tile's column sums are added.
template <class T, int D, int WARPS>
__device__ __forceinline__ void attention_whole_dq(const attention_args &p, const attention_whole &of,
                                                   const T *slopes, const T *ks, float (*part_q)[D], int from,
                                                   int head, bool diagonal)
{
    typedef attention_whole_sizes<D, WARPS> S;
    enum { QM = S::QM, DOWN = S::DOWN, COLUMNS = S::COLUMNS };
    const int thread = (int)threadIdx.x + of.thread, warp = thread / 32, lane = thread % 32;
    const int row = warp % DOWN * 16 * QM, column = warp / DOWN * COLUMNS;
    // The end of the keys that any of the tile's queries sees.
    const int end = min(of.count, diagonal ? from + S::QUERIES : of.count);
    float dq[QM][COLUMNS / 8][4];
    attention_mma_down<T, QM, COLUMNS, S::ACROSS, S::PITCH>(dq, slopes + row, ks + column, lane, end);
    attention_columns<T, COLUMNS> columns;
    columns.clear();
    TT__UNROLL for (int m = 0; m < QM; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            const int query = from + row + 16 * m + 8 * h + lane / 4, i = of.first + query;
            if (query >= of.queries) continue;
            attention_store<T, COLUMNS>(p.dq, p.query_at ? p.query_at[i] : i, head, p.head_size, dq[m], h,
                                        p.scale, p.add_dq, threadIdx.x % 32, columns, p.sums_q, column);
        }
    if (p.sums_q) columns.write(part_q[warp % DOWN] + column, lane, true);
}

// Makes dq, dk and dv in one kernel, with five products. A block has all keys of a sequence of at most
// 32 * WARPS keys, so its gradients of scores times these keys are the whole of dq. Shared memory passes the
// gradients of the scores of QUERIES queries at a time to the warps that make dq. dk and dv are made as in
// attention_dkdv.
template <class T, int D, int WARPS>
__global__ __launch_bounds__(32 * WARPS, 8 / WARPS) void attention_backward(attention_args p)
{
    tt__begin_kernel();
    typedef attention_whole_sizes<D, WARPS> S;
    enum { MT = S::MT, KEYS = S::KEYS, QUERIES = S::QUERIES, PART = S::PART, PITCH = S::PITCH,
           ACROSS = S::ACROSS, DOWN = S::DOWN };
    TT__SHARED(uint64_t, random, );
    TT__SHARED(attention_whole, of, ); // in shared memory, to save registers in the loop
    TT__SHARED(float, part, [2 * WARPS][D]);
    TT__SHARED(float, part_q, [DOWN][D]); // column sums of a head's dq so far
    TT__DYN_SHARED(T, ks);
    T *vs = ks + KEYS * PITCH, *qs = vs + KEYS * PITCH, *ds = qs + 2 * QUERIES * PITCH;
    T *slopes = ds + 2 * QUERIES * PITCH; // shape (KEYS, ACROSS)
    float *lses = (float *)(slopes + KEYS * ACROSS), *deltas = lses + 2 * QUERIES;
    int *rows = (int *)(deltas + 2 * QUERIES);
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    const int mine = 16 * MT * (int)(threadIdx.x / 32);
    const bool diagonal = p.causal && !p.query_row;
    if (threadIdx.x == 0) { random = attention_key(p); of.find(p); }
    const auto write_sums = [&](int of_head) { // writes the column sums of dq, and clears them
        const int64_t sequence = blockIdx.x / (p.heads / p.group);
        attention_write_sums<D>(p.sums_q, (sequence * p.heads + of_head) * p.head_size, part_q, DOWN,
                                p.head_size, (int)threadIdx.x);
        attention_clear_sums<D, DOWN>(part_q, 32 * WARPS);
    };
    attention_clear_sums<D, DOWN>(part_q, 32 * WARPS);
    __syncthreads();
    float dk[MT][D / 8][4], dv[MT][D / 8][4];
    attention_clear(dk, dv);
    attention_fetch_rows<T, D, KEYS, 32 * WARPS>(ks, vs, p, of.begin, of.count, of.key_head);
    const auto fetch = [&](int from, int head, int stage) { // copies queries, beginning with `from`
        attention_fetch_queries<T, D, QUERIES, 32 * WARPS>(qs, lses, rows, p, of.first + from,
                                                           of.queries - from, head, stage);
    };
    int from = 0, head = of.key_head * p.group;
    if (head < of.heads_end) fetch(from, head, 0);
    for (int stage = 0; head < of.heads_end; stage ^= 1) {
        tt__cp_async_wait<0>();
        __syncthreads(); // the tile has arrived; the other tile and `slopes` are no longer in use
        if (p.sums_q && from == 0 && head > of.key_head * p.group) write_sums(head - 1);
        if (from + QUERIES < of.queries) fetch(from + QUERIES, head, stage ^ 1);
        else if (head + 1 < of.heads_end) fetch(0, head + 1, stage ^ 1);
        for (int part = 0; part < QUERIES && mine < of.count; part += PART) {
            const int at = stage * QUERIES + part;
            const T *qt = qs + at * PITCH, *dt = ds + at * PITCH;
            float s[MT][PART / 8][4], g[MT][PART / 8][4];
            const bool seen = !diagonal || mine < from + part + PART; // a query may see a key of the warp
            if (seen) {
                const uint32_t x = threadIdx.x + of.thread; // computed here, or x would stay in a register
                const auto keep =
                    attention_draw_columns<MT, PART>(p, random, rows + at, MT * (x / 32), head, x);
                attention_mma<T, D, MT, PART>(s, ks + mine * PITCH, qt);
                attention_mma<T, D, MT, PART>(g, vs + mine * PITCH, dt);
                attention_slopes<MT, PART>(s, g, p, keep, rows + at, lses + at + pair, deltas + at + pair,
                                           of.begin + mine + group, of.count - mine - group);
            }
            attention_put_slopes<T, MT, PART, ACROSS>(slopes + (mine + group) * ACROSS + part + pair, g,
                                                      seen);
            if (!seen) continue;
            attention_mma_add<T, D, MT, PART>(dv, s, dt);
            attention_mma_add<T, D, MT, PART>(dk, g, qt);
        }
        __syncthreads();
        attention_whole_dq<T, D, WARPS>(p, of, slopes, ks, part_q, from, head, diagonal);
        from += QUERIES;
        if (from >= of.queries) { from = 0; head++; }
    }
    tt__cp_async_wait<0>(); // waits for k and v, if the loop did not run
    __syncthreads();        // completes dq: if dk has the memory of dq, dk is added to dq below
    if (p.sums_q) // writes the last head's sums or, without queries, the zeros of all heads
        for (int h = of.queries > 0 ? of.heads_end - 1 : of.key_head * p.group;
             h < (of.key_head + 1) * p.group; h++)
            write_sums(h);
    // The same thread stores an element of dk and of dv, because dk and dv may have the same memory.
    const int last = tt__opaque((int)threadIdx.x);
    TT__UNROLL for (int k = 0; k < 2; k++) {
        attention_columns<T, D> columns;
        columns.clear();
        TT__UNROLL for (int m = 0; m < MT; m++)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int r = last / 32 * 16 * MT + 16 * m + 8 * h + last % 32 / 4;
                if (r >= of.count) continue;
                attention_store_key<T, D>(p, k, of.begin + r, of.key_head, k ? dv[m] : dk[m], h, last % 32,
                                          columns);
            }
        if (k ? p.sums_v : p.sums_k) columns.write(part[WARPS * k + last / 32], last % 32, false);
    }
    const int64_t at = attention_sums_begin(p, p.heads / p.group, of.key_head);
    attention_finish_key_sums<D, WARPS>(p, at, part, WARPS, (int)threadIdx.x);
}

// The backward by warpgroups, in one kernel with five products. A block of two warpgroups owns 256 keys of a
// sequence in tiles of 64 keys. One group has the even tiles, the other the odd tiles, with dk and dv in
// registers. The block goes through the tiles of queries. Both groups write the gradients of a tile's scores
// to shared memory. The groups take turns: one multiplies these gradients by the keys, while the other
// begins the next tile. The product is the block's part of dq. If no sequence has more than 256 keys
// (p.parts is NULL), this part is the whole of dq. Otherwise the block writes the part in f32 to a slot of
// p.parts. The first launch runs the first p.slots blocks of each sequence, one for each slot. Each later
// launch runs the next p.slots blocks, which add to the slots. Finally attention_sum_parts sums the slots.
enum { TT__SPAN_TILES = 4, TT__SPAN = 64 * TT__SPAN_TILES, TT__SPAN_SLOTS = TT__CUDA_ATTENTION_SLOTS };

// Returns the row of p.parts where, in slot `slot`, a sequence begins. first: the number of the sequence's
// first query. In causal attention, a slot lacks the first `256 * slot` rows of each sequence.
__device__ __forceinline__ int64_t attention_slot_row(const attention_args &p, int first, int slot)
{
    const int before = TT__SPAN * slot;
    if (!p.causal) return p.slot_begin[slot] + first;
    return p.slot_begin[slot] + (int64_t)first * (p.longest - before) / p.longest - before;
}

// Packs weights as the first operand of a product. Weights that dropout does not keep become 0.
template <class T, class F>
__device__ __forceinline__ void attention_wide_pack_kept(uint32_t (&to)[4][4], const float (&w)[1][8][4],
                                                         F kept)
{
    TT__UNROLL for (int k = 0; k < 4; k++)
        TT__UNROLL for (int i = 0; i < 4; i++) {
            const int n = 2 * k + i / 2, first = i % 2 * 2;
            to[k][i] = pack<T>(kept(n, first) ? w[0][n][first] : 0,
                               kept(n, first + 1) ? w[0][n][first + 1] : 0);
        }
}

// Returns the span of keys that block `n` of a head has; its `at` is negative if the block has none. Most
// queries of a causal sequence see the sequence's first span. First spans are therefore given out first, so
// that the blocks that begin last have least work: the numbers of the spans fill the rows of a matrix with
// span_cols columns, and blocks take the numbers column by column.
__device__ __forceinline__ attention_tile attention_find_span(const attention_args &p, int n)
{
    const bool within = n < p.span_rows * p.span_cols;
    const int number = within ? n % p.span_rows * p.span_cols + n / p.span_rows : n;
    if (p.longest > TT__SPAN) return attention_find<TT__SPAN>(p, p.seq_start, number);
    attention_tile t;
    t.sequence = number;
    t.begin = t.first = p.seq_start[number];
    t.length = t.queries = p.seq_start[number + 1] - t.begin;
    t.at = t.length > 0 ? 0 : -1;
    return t;
}

// A tile of queries in shared memory, of head `head` of q. from: the first query, counted in the sequence;
// lse, delta: the queries' sums, beginning with the thread's first column.
template <class T> struct attention_span_queries {
    const T *q, *dout;
    const float *lse, *delta;
    const int *row; // each query's row of the batch
    int from, head;
};

// Stores a row of the block's part of dq: in dq itself if p.parts is NULL, otherwise in a slot of p.parts.
// i: the thread's query, counted in the sequence; slot_row: attention_slot_row of the block.
template <class T>
__device__ __forceinline__ void attention_span_put(const attention_args &p, const attention_tile &t,
                                                   const float (&dq)[8][4], int h, int i, int64_t slot_row,
                                                   int head, int lane, attention_columns<T, 64> &columns)
{
    if (!p.parts) {
        attention_store<T, 64>(p.dq, t.first + i, head, p.head_size, dq, h, p.scale, p.add_dq, lane, columns,
                               p.sums_q);
        return;
    }
    float *to = p.parts + ((slot_row + i) * p.heads + head) * p.head_size + lane % 4 * 2;
    TT__UNROLL for (int n = 0; n < 8; n++) {
        if (8 * n >= p.head_size) break;
        float2 sum = make_float2(dq[n][2 * h], dq[n][2 * h + 1]);
        if (p.pass > 0) {
            const float2 before = *(const float2 *)(to + 8 * n);
            sum.x += before.x;
            sum.y += before.y;
        }
        *(float2 *)(to + 8 * n) = sum;
    }
}

// Makes the block's part of dq for the tile of queries that begins at `from`. slopes: the gradients of
// scores, (KEYS, QUERIES) in the layout of tt__wgmma_matrix. part_q: column sums of dq, to which the tile's
// column sums are added.
template <class T>
__device__ __forceinline__ void attention_span_dq(const attention_args &p, const attention_tile &t,
                                                  const T *slopes, const T *ks, float (*part_q)[64], int from,
                                                  int head, int at, int count, int64_t slot_row)
{
    const int thread = tt__opaque((int)threadIdx.x), lane = thread % 32, group = lane / 4;
    // The end of the keys that any of the tile's queries sees.
    const int end = p.causal ? min(count, from + 64 - at) : count;
    const uint32_t a = tt__wgmma_matrix(slopes), b = tt__wgmma_matrix(ks);
    float dq[8][4];
    tt__wgmma_fence();
    // The first product overwrites dq. In the loop it would need a cleared dq, which takes registers.
    tt__wgmma_across<T>(dq, a, b, false);
    for (int k = 16; k < end; k += 16) tt__wgmma_across<T>(dq, a + k * 128 / 16, b + k * 128 / 16, true);
    tt__wgmma_commit();
    tt__wgmma_wait<0>();
    tt__wgmma_done(dq);
    attention_columns<T, 64> columns;
    columns.clear();
    TT__UNROLL for (int h = 0; h < 2; h++) {
        const int i = from + thread / 32 % 4 * 16 + 8 * h + group;
        if (i >= t.queries) continue;
        attention_span_put<T>(p, t, dq, h, i, slot_row, head, lane, columns);
    }
    if (p.sums_q && !p.parts) columns.write(part_q[thread / 32], lane, true);
}

// Turns the products q k^T (s) into weights, 0 where a query does not see a key. Rows are the warp's 16 keys,
// beginning with key `own` of the block; columns are the tile's queries.
template <class T>
__device__ __forceinline__ void attention_span_weights(float (&s)[1][8][4], const attention_args &p,
                                                       const attention_span_queries<T> &b, int own, int at,
                                                       int count, float factor)
{
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    TT__UNROLL for (int n = 0; n < 8; n++) {
        const float2 sums = *(const float2 *)(b.lse + 8 * n);
        TT__UNROLL for (int i = 0; i < 4; i++)
            s[0][n][i] = tt__exp2(fmaf(s[0][n][i], factor, -TT__LOG2E * (i % 2 ? sums.y : sums.x)));
    }
    if (own + 15 >= count || (p.causal && at + own + 15 > b.from))
        TT__UNROLL for (int n = 0; n < 8; n++)
            TT__UNROLL for (int i = 0; i < 4; i++) {
                const int key = own + group + i / 2 * 8, query = b.from - at + 8 * n + pair + i % 2;
                if (key >= count || (p.causal && key > query)) s[0][n][i] = 0;
            }
}

// Adds the contributions of a tile of queries to dk and dv of the warp's 16 keys, which begin at row `row` of
// tile number `tile` of the block's keys. k, v: that tile of keys and values. Writes the tile's gradients of
// scores to slopes, (64 keys, 64 queries).
template <class T, bool DROPS>
__device__ __forceinline__ void attention_span_add(float (&dk)[8][4], float (&dv)[8][4],
                                                   const attention_args &p, uint64_t random,
                                                   const attention_span_queries<T> &b, const T *k, const T *v,
                                                   T *slopes, int tile, int row, int at, int count,
                                                   float factor)
{
    const int own = tile * 64 + row;
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    float s[1][8][4], g[1][8][4];
    tt__wgmma_fence();
    attention_wide<T>(s, k, b.q);
    tt__wgmma_commit();
    attention_wide<T>(g, v, b.dout);
    tt__wgmma_commit();
    uint32_t keep = 0;
    if (DROPS)
        keep = attention_draw_columns<1, 64>(p, random, b.row, (at + own) / 16, b.head,
                                             (uint32_t)tt__opaque((int)threadIdx.x));
    const auto kept = [&](int n, int i) { return !DROPS || keep >> (8 * (2 * (i % 2) + i / 2) + n) & 1; };
    tt__wgmma_wait<1>();
    tt__wgmma_done(s[0]);
    attention_span_weights(s, p, b, own, at, count, factor);
    uint32_t w[4][4], dw[4][4];
    tt__wgmma_wait<0>();
    tt__wgmma_done(g[0]);
    TT__UNROLL for (int n = 0; n < 8; n++) {
        const float2 sums = *(const float2 *)(b.delta + 8 * n);
        TT__UNROLL for (int i = 0; i < 4; i++) {
            float &y = g[0][n][i];
            if (DROPS) y *= kept(n, i) ? p.keep_scale : 0;
            y = s[0][n][i] * (y - (i % 2 ? sums.y : sums.x));
        }
    }
    attention_wide_pack_kept<T>(w, s, kept);
    tt__wgmma_fence();
    attention_wide_add<T>(*(float (*)[1][8][4])dv, w, b.dout);
    tt__wgmma_commit();
    attention_wide_pack<T>(dw, g);
    tt__wgmma_fence();
    attention_wide_add<T>(*(float (*)[1][8][4])dk, dw, b.q);
    tt__wgmma_commit();
    // A row of `slopes` has 8 parts of 16 bytes. Part n is stored in place `n ^ row % 8`, as the layout of
    // tt__wgmma_matrix demands.
    char *to = (char *)slopes + (row + group) * 128 + pair * 2;
    TT__UNROLL for (int n = 0; n < 8; n++)
        TT__UNROLL for (int h = 0; h < 2; h++)
            *(uint32_t *)(to + h * 8 * 128 + (n ^ group) * 16) = dw[n / 2][n % 2 * 2 + h];
    tt__wgmma_wait<0>();
    tt__wgmma_done(dk);
    tt__wgmma_done(dv);
}

template <class T, bool DROPS>
__global__ __launch_bounds__(256, 1) void attention_backward_wide(attention_args p)
{
    tt__begin_kernel();
    enum { D = 64, TILE = 64 * D, QUERIES = 64, TILES = TT__SPAN_TILES, KEYS = TT__SPAN, WARPS = 8 };
    TT__SHARED(uint64_t, random, ); // in a register, `random` would keep Philox's keys in registers, too
    TT__SHARED(attention_tile, t, ); TT__SHARED(int64_t, slot_row, );
    TT__SHARED(float, part, [2 * WARPS][D]);
    TT__SHARED(float, part_q, [WARPS][D]); // column sums of dq so far
    TT__DYN_SHARED(T, shared);
    T *ks = attention_room(shared), *vs = ks + TILES * TILE, *qs = vs + TILES * TILE, *ds = qs + 2 * TILE;
    T *slopes = ds + 2 * TILE; // (2, KEYS, QUERIES), in the layout of tt__wgmma_matrix
    float *lses = (float *)(slopes + 2 * TILES * TILE), *deltas = lses + 2 * QUERIES; // (2, QUERIES)
    int *rows = (int *)(deltas + 2 * QUERIES); // (2, QUERIES): each query's row of the batch
    const int key_heads = p.heads / p.group;
    const int key_head = p.first_head / p.group + (int)(blockIdx.x % key_heads);
    const int64_t sums_begin = attention_sums_begin(p, key_heads, key_head);
    const auto write_sums = [&](int parts) {
        attention_write_key_sums<D, WARPS>(p, sums_begin, part, parts, (int)threadIdx.x);
        attention_write_sums<D>(p.parts ? NULL : p.sums_q, sums_begin, part_q, parts, p.head_size,
                                (int)threadIdx.x);
    };
    const attention_tile found = attention_find_span(p, (int)(blockIdx.x / key_heads));
    if (found.at < 0) {
        write_sums(0);
        return;
    }
    if (p.parts && found.at / KEYS / p.slots != p.pass) return;
    if (threadIdx.x == 0) {
        t = found;
        random = attention_key(p);
        slot_row = p.parts ? attention_slot_row(p, found.first, found.at / KEYS % p.slots) : 0;
    }
    for (int i = (int)threadIdx.x; i < WARPS * D; i += 256) part_q[i / D][i % D] = 0;
    __syncthreads();
    const int at = t.at, count = min(KEYS + 0, t.length - at), pair = threadIdx.x % 4 * 2;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), team = warp / 4;
    const float factor = p.scale * TT__LOG2E;
    float dk[2][8][4], dv[2][8][4];
    attention_clear(dk, dv);
    attention_fetch_rows<T, D, KEYS, 256, true>(ks, vs, p, t.begin + at, count, key_head);
    const auto fetch = [&](int from, int head, int stage) { // copies queries, beginning with `from`
        attention_fetch_queries<T, D, QUERIES, 256, true>(qs, lses, rows, p, t.first + from, t.queries - from,
                                                          head, stage, tt__opaque((int)threadIdx.x));
    };
    const int begin = p.causal ? at : 0, heads_end = (key_head + 1) * p.group;
    int from = begin, head = key_head * p.group, before = -1, head_before = head;
    fetch(from, head, 0);
    for (int stage = 0; ; stage ^= 1) {
        tt__cp_async_wait<0>();
        tt__wgmma_publish();
        __syncthreads(); // the tile has arrived, and the gradients of the tile before are written
        const bool more = head < heads_end;
        int next = from + QUERIES, next_head = head;
        if (next >= t.queries) { next = begin; next_head++; }
        if (next_head < heads_end) fetch(next, next_head, stage ^ 1);
        if (before >= 0 && team == stage && p.dq.data)
            attention_span_dq<T>(p, t, slopes + (stage ^ 1) * TILES * TILE, ks, part_q, before, head_before,
                                 at, count, slot_row);
        if (!more) break;
        const attention_span_queries<T> queries =
            {qs + stage * TILE, ds + stage * TILE, lses + stage * QUERIES + pair,
             deltas + stage * QUERIES + pair, rows + stage * QUERIES, from, head};
        TT__UNROLL for (int m = 0; m < 2; m++) {
            const int tile = 2 * m + team;
            if (tile * 64 >= count || (p.causal && at + tile * 64 >= from + QUERIES)) continue;
            attention_span_add<T, DROPS>(dk[m], dv[m], p, random, queries, ks + tile * TILE, vs + tile * TILE,
                                         slopes + (stage * TILES + tile) * TILE, tile, warp % 4 * 16, at,
                                         count, factor);
        }
        before = from; head_before = head;
        from = next; head = next_head;
    }
    if (p.sums_k || p.sums_v || p.dq.data == p.dk.data || p.dq.data == p.dv.data) __syncthreads();
    // The same thread stores an element of dk and of dv, because dk and dv may have the same memory.
    const int last = tt__opaque((int)threadIdx.x), lane = last % 32;
    TT__UNROLL for (int k = 0; k < 2; k++) {
        attention_columns<T, D> columns;
        columns.clear();
        TT__UNROLL for (int m = 0; m < 2; m++)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int r = (2 * m + last / 128) * 64 + last / 32 % 4 * 16 + 8 * h + last % 32 / 4;
                if (r >= count) continue;
                attention_store_key<T, D>(p, k, t.begin + at + r, key_head, k ? dv[m] : dk[m], h, lane,
                                          columns);
            }
        if (k ? p.sums_v : p.sums_k) columns.write(part[WARPS * k + last / 32], last % 32, false);
    }
    if (!p.sums_k && !p.sums_v && !p.sums_q) return;
    __syncthreads();
    write_sums(WARPS);
}

// Makes dq, the sum of the slots of p.parts. A block makes a tile of 64 rows of a head.
template <class T> __global__ __launch_bounds__(256) void attention_sum_parts(attention_args p)
{
    tt__begin_kernel();
    TT__SHARED(float, part, [16][64]);
    const int head = p.first_head + (int)(blockIdx.x % p.heads);
    const int r = threadIdx.x / 16, c = threadIdx.x % 16 * 4;
    const attention_tile t = attention_find<64>(p, p.query_start, (int)(blockIdx.x / p.heads));
    float sums[4] = {0, 0, 0, 0};
    if (t.at >= 0 && c < p.head_size) {
        const int blocks = ((p.causal ? t.at : t.length - 1)) / TT__SPAN + 1;
        const int slots = min(blocks, p.slots);
        const int64_t first = t.first + t.at + r, column = (int64_t)head * p.head_size + c;
        // All loads of y are in flight together.
        float4 y[4][TT__SPAN_SLOTS];
        TT__UNROLL for (int slot = 0; slot < TT__SPAN_SLOTS; slot++) {
            const int64_t row = attention_slot_row(p, t.first, slot) + t.at + r;
            const float *from = p.parts + row * p.heads * p.head_size + column;
            TT__UNROLL for (int k = 0; k < 4; k++, from += 16 * p.heads * p.head_size) {
                const bool there = slot < slots && t.at + r + 16 * k < t.queries;
                y[k][slot] = there ? *(const float4 *)from : make_float4(0, 0, 0, 0);
            }
        }
        TT__UNROLL for (int k = 0; k < 4; k++) {
            const int64_t row = first + 16 * k;
            if (t.at + r + 16 * k >= t.queries) continue;
            float x[4] = {0, 0, 0, 0};
            TT__UNROLL for (int slot = 0; slot < TT__SPAN_SLOTS; slot++) {
                x[0] += y[k][slot].x; x[1] += y[k][slot].y;
                x[2] += y[k][slot].z; x[3] += y[k][slot].w;
            }
            TT__UNROLL for (int i = 0; i < 4; i++) x[i] *= p.scale;
            if (p.dq.dtype == TT_F32) {
                float *to = (float *)p.dq.data + row * p.dq.ld + column;
                TT__UNROLL for (int i = 0; i < 4; i++) to[i] = p.add_dq ? to[i] + x[i] : x[i];
            } else {
                T *to = (T *)p.dq.data + row * p.dq.ld + column;
                if (p.add_dq) TT__UNROLL for (int i = 0; i < 4; i++) x[i] += to_float(to[i]);
                const uint32_t words[2] = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3])};
                float y[8];
                ((uint32_t *)to)[0] = words[0];
                ((uint32_t *)to)[1] = words[1];
                widen8<T>(y, {words[0], words[1], 0, 0});
                TT__UNROLL for (int i = 0; i < 4; i++) sums[i] += y[i];
            }
        }
    }
    if (!p.sums_q) return;
    TT__UNROLL for (int i = 0; i < 4; i++) part[r][c + i] = sums[i];
    __syncthreads();
    attention_write_sums<64>(p.sums_q, attention_sums_begin(p, p.heads, head), part, 16, p.head_size,
                             (int)threadIdx.x);
}

} // namespace

/* ==== src/ops/attention/cuda.cuh */
namespace {

// ---- launches

// Sets the arguments that the forward and the backward share. If only some rows of the batch are queries,
// sorts the numbers of these rows into the beginning of the workspace. Sets *used to the bytes of the
// workspace in use.
cudaError_t attention_begin(const tt__launch *l, bool backward, attention_args *p, size_t *used)
{
    const tt__attr *attr = &l->instr->attr;
    const tt__attention_operands operand = tt__attention_of(backward);
    const tt__mat *q = &l->in[operand.q], *starts = &l->in[operand.starts];
    const tt__mat *numbers = &l->in[operand.numbers];
    memset(p, 0, sizeof *p);
    *used = 0;
    p->q = q[0]; p->k = q[1]; p->v = q[2];
    p->seq_start = p->query_start = (const int32_t *)starts->data;
    p->seqs = (int)(starts->rows - 1);
    p->run = TT__RUN_OF(l);
    p->heads = attr->heads;
    p->group = attr->heads / attr->key_heads;
    p->head_size = (int)(p->q.cols / p->heads);
    p->first_head = (int)(l->first_col / p->head_size);
    p->longest = (int)(attr->max_length && attr->max_length < p->k.rows ? attr->max_length : p->k.rows);
    p->causal = attr->causal;
    p->window = attr->window > p->k.rows ? 0 : attr->window; // a window longer than all rows hides nothing
    p->largest = p->window ? p->window - 1 : INT32_MAX;
    p->smallest = p->causal ? 0 : -p->largest;
    p->alibi = attr->alibi;
    p->alibi_heads = attr->alibi_heads;
    p->alibi_rounded = attr->alibi_rounded;
    p->scale = attr->scale;
    p->factor = attr->scale * TT__LOG2E;
    p->drop = attr->dropout > 0;
    p->keep_scale = 256.0f / (float)(256 - TT__ATTENTION_DROP(attr->dropout));
    tt__attention_either(TT__ATTENTION_DROP(attr->dropout), p->either);
    p->random = l->instr->random;
    p->block = attr->dense >= p->k.rows ? 0 : attr->block; // block 0: all sequences are dense
    p->dense = attr->dense;
    p->listed = attr->listed;
    p->list_rows = attr->list_rows;
    cudaError_t e = cudaSuccess;
    if (p->block && l->lists) {
        enum { MAX = sizeof(attention_lists) / sizeof(uint16_t) };
        const int n = (int)tt__listed_blocks(attr);
        uint16_t *lists = (uint16_t *)l->workspace;
        for (int k = 0; k < n && e == cudaSuccess; k += MAX) {
            attention_lists some;
            const int count = n - k < MAX ? n - k : MAX;
            memset(&some, 0, sizeof some);
            memcpy(some.block, l->lists + k, sizeof(uint16_t) * (size_t)count);
            e = TT__LAUNCH(attention_write_lists, 1, 256, 0, l->device->stream, some, lists + k, count);
        }
        p->lists = lists;
        *used = tt__align_to(sizeof(uint16_t) * (size_t)n, TT__CUDA_ALIGN);
    }
    if (e != cudaSuccess || !numbers->data || p->q.rows == 0) return e;
    const int n = (int)p->q.rows;
    int32_t *start = (int32_t *)((char *)l->workspace + *used), *row = start + p->seqs + 1, *at = row + n;
    p->query_start = start; p->query_row = row; p->query_at = at;
    *used += tt__align_to(((size_t)p->seqs + 1 + 2 * (size_t)n) * sizeof(int32_t), TT__CUDA_ALIGN);
    return TT__LAUNCH(attention_order, blocks_for((int64_t)n + p->seqs + 1, 256), 256, 0, l->device->stream,
                      (const int32_t *)numbers->data, n, p->seq_start, p->seqs, start, row, at);
}

// Returns whether a matrix has dtype `dtype` and its rows can be loaded 16 bytes at a time.
bool attention_aligned(const tt__mat *m, tt_dtype dtype)
{
    return m->dtype == dtype && (uintptr_t)m->data % 16 == 0 && m->ld * (dtype == TT_F32 ? 4 : 2) % 16 == 0;
}

// Returns whether a matrix is absent or its rows can be stored two elements at a time.
bool attention_paired(const tt__mat *m, tt_dtype dtype)
{
    return !m->data ||
        ((m->dtype == dtype || m->dtype == TT_F32) && (uintptr_t)m->data % 8 == 0 && m->ld % 2 == 0);
}

// Returns whether the kernels on tensor cores can run with these arguments.
bool attention_fast(const attention_args *p)
{
    const tt_dtype dtype = p->q.dtype;
    const bool fits = p->block ? p->head_size <= 64 && p->block % 64 == 0 && !p->query_row
                               : p->head_size <= 128;
    if (p->alibi_rounded) return false; // attention_dkdv has no registers left for rounded ALiBi
    return dtype != TT_F32 && p->head_size % 8 == 0 && fits &&
        attention_aligned(&p->q, dtype) && attention_aligned(&p->k, dtype) &&
        attention_aligned(&p->v, dtype) && (!p->dout.data || attention_aligned(&p->dout, dtype)) &&
        (p->dout.data || attention_paired(&p->out, dtype)) && attention_paired(&p->dq, dtype) &&
        attention_paired(&p->dk, dtype) && attention_paired(&p->dv, dtype);
}

// Returns the number of thread blocks for tiles of `size` rows. Every tile's number is below this count,
// whatever the lengths of the sequences (see the beginning of cuda_shared.cuh). Blocks whose number has no
// tile do nothing.
int attention_tiles(const attention_args *p, int64_t rows, int size) { return (int)(rows / size + p->seqs); }

// Launches a kernel with one thread block for each combination of a tile of `size` rows, one of `heads`
// heads, and one of `parts` parts of a head.
template <class K>
cudaError_t attention_launch(tt__device *d, K kernel, const attention_args *p, int64_t rows, int size,
                             int heads, int parts, unsigned threads, size_t shared)
{
    const unsigned blocks = (unsigned)(attention_tiles(p, rows, size) * heads * parts);
    cudaError_t e = shared > 48 << 10
        ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared)
        : cudaSuccess;
    return e == cudaSuccess ? TT__LAUNCH(kernel, blocks, threads, shared, d->stream, *p) : e;
}

template <class T, int D, bool DROPS>
cudaError_t attention_forward_wide_on(tt__device *d, const attention_args *p)
{
    typedef attention_wide_sizes<D> S;
    const auto kernel = attention_forward_wide<T, D, DROPS>;
    const size_t shared = sizeof(attention_wide_tiles<T, D, DROPS>) + TT__WIDE_ROOM;
    const int64_t items = (int64_t)attention_tiles(p, p->q.rows, S::QUERIES) * p->heads;
    const int64_t largest = (int64_t)d->properties.multiProcessorCount * S::BLOCKS;
    const int64_t blocks = items < largest ? items : largest, heads = (int64_t)p->seqs * p->heads;
    const int64_t tiles = ((p->query_row ? p->q.rows : p->longest) + S::QUERIES - 1) / S::QUERIES;
    const int64_t groups = (heads * tiles + 2 * blocks - 1) / (2 * blocks);
    attention_args args = *p;
    args.item_tiles = (int)tiles;
    args.item_group = (int)((heads + groups - 1) / groups);
    args.item_rounds = (int)((groups * args.item_group * tiles + blocks - 1) / blocks);
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               (int)shared);
    if (e != cudaSuccess) return e;
    return TT__LAUNCH(kernel, (unsigned)blocks, 128 * (S::GROUPS + 1), shared, d->stream, args);
}

// Launches the forward by mma.sync. A warp has `16 * MT` queries, and a tile has KEYS keys; MT and KEYS are
// the largest for which the sums fit into 255 registers a thread without spills.
template <class T, int D, attention_kind KIND>
cudaError_t attention_forward_on(tt__device *d, const attention_args *p)
{
    enum { MT = 2, KEYS = D <= 64 ? 64 : 32 };
    return attention_launch(d, attention_forward<T, D, MT, KEYS, KIND>, p, p->q.rows, 64 * MT, p->heads, 1,
                            128, (64 * MT + 4 * KEYS) * (D + 8) * sizeof(T));
}

// Returns the bytes of shared memory of attention_backward.
size_t attention_backward_bytes(int head_size, int warps)
{
    const size_t keys = 32 * (size_t)warps, queries = 64, pitch = (size_t)head_size + 8;
    return ((2 * keys + 4 * queries) * pitch + keys * (queries + 8)) * sizeof(uint16_t)
        + 6 * queries * sizeof(float);
}

// Returns whether attention_backward_wide makes dq, dk and dv. dq may have the memory of dk or dv only if
// one block has all keys of a sequence and makes dq, dk and dv; several blocks complete dq only after dk is
// stored.
bool attention_spans(const tt__device *d, const attention_args *p)
{
    const bool plain = !p->window && !p->alibi_heads && !p->block && !p->query_row;
    const bool apart = p->dq.data != p->dk.data && p->dq.data != p->dv.data;
    if (!d->wgmma || !plain || p->head_size <= 32 || p->head_size > 64) return false;
    return p->longest <= TT__SPAN ? apart || p->group == 1 : apart && p->parts;
}

// Returns the number of warps of attention_backward, which makes dq, dk and dv in one kernel; 0: two kernels
// make the gradients. With listed queries, one kernel is wrong if dq has the memory of dk or dv, because the
// rows of dq may then be rows of dk that another block makes.
int attention_warps(const tt__device *d, const attention_args *p)
{
    const int warps = p->longest <= 128 ? 4 : 8, head_size = p->head_size <= 32 ? 32 : 64;
    const bool plain = !p->window && !p->alibi_heads && !p->block && p->head_size <= 64;
    if (!plain || attention_spans(d, p)) return 0;
    const bool apart = p->dq.data != p->dk.data && p->dq.data != p->dv.data;
    const bool all = p->dq.data && (p->dk.data || p->dv.data) && p->longest <= 256;
    const size_t bytes = attention_backward_bytes(head_size, warps)
        + 256 + (2 * (size_t)warps + 4) * (size_t)head_size * sizeof(float); // the static shared memory
    // With 4 warps and wider heads, the kernel spills registers on compute capability 8.0.
    if (warps == 4 && head_size > 32) return 0;
    return all && (apart || !p->query_row) && bytes <= d->properties.sharedMemPerBlockOptin ? warps : 0;
}

template <class T, int D, int WARPS> cudaError_t attention_backward_of(tt__device *d, attention_args *p)
{
    p->parts_q = p->parts_k = p->seqs;
    const size_t shared = attention_backward_bytes(D, WARPS);
    const unsigned blocks = (unsigned)(p->seqs * (p->heads / p->group));
    const cudaError_t e = cudaFuncSetAttribute(attention_backward<T, D, WARPS>,
                                               cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    return e == cudaSuccess
        ? TT__LAUNCH((attention_backward<T, D, WARPS>), blocks, 32 * WARPS, shared, d->stream, *p) : e;
}

// Returns the bytes of shared memory in which attention_dkdv has the bits of dropout for two tiles of
// queries: one in use and one in flight.
size_t attention_kept_bytes(const attention_args *p, int keys, int queries)
{
    return p->bits ? 2 * (size_t)keys * (size_t)queries / 8 : 0;
}

template <class T> cudaError_t attention_backward_spans(tt__device *d, attention_args *p)
{
    enum { TILE = 64 * 64, TILES = 4 * TT__SPAN_TILES + 4 };
    const bool whole = p->longest <= TT__SPAN;
    const size_t shared = TILES * TILE * sizeof(T) + 6 * 64 * sizeof(float) + TT__WIDE_ROOM;
    const int key_heads = p->heads / p->group, spans = (p->longest + TT__SPAN - 1) / TT__SPAN;
    if (whole) p->parts = NULL;
    p->parts_k = whole ? p->seqs : attention_tiles(p, p->k.rows, TT__SPAN);
    p->parts_q = whole ? p->seqs : attention_tiles(p, p->q.rows, 64);
    // attention_find_span puts the span numbers into the rows of a matrix with span_cols columns, and blocks
    // take the numbers column by column. If all sequences have the max length, every (spans + 1)-th number
    // begins a sequence. Column 0 then has the first span of each sequence.
    p->span_cols = p->causal && !whole && spans < p->parts_k ? spans + 1 : 1;
    p->span_rows = p->parts_k / p->span_cols;
    p->slots = tt__cuda_attention_slots(p->causal, p->longest);
    for (int k = 1; k < p->slots; k++)
        p->slot_begin[k] = p->slot_begin[k - 1] +
            tt__cuda_attention_slot_row(p->q.rows, p->causal, p->longest, k - 1);
    const auto kernel = p->drop ? attention_backward_wide<T, true> : attention_backward_wide<T, false>;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    for (p->pass = 0; e == cudaSuccess && p->pass * p->slots < spans; p->pass++)
        e = TT__LAUNCH(kernel, (unsigned)(p->parts_k * key_heads), 256, shared, d->stream, *p);
    if (e == cudaSuccess && !whole && p->dq.data)
        e = TT__LAUNCH((attention_sum_parts<T>), (unsigned)(p->parts_q * p->heads), 256, 0, d->stream, *p);
    return e;
}

template <class T, int D, attention_kind KIND>
cudaError_t attention_backward_on(tt__device *d, attention_args *p)
{
    enum { QMT = D <= 96 ? 2 : 1, KEYS = D <= 96 ? 32 : 64, KMT = D <= 64 ? 2 : 1,
          QUERIES = D <= 64 || D > 96 ? 32 : 64 };
    cudaError_t e = cudaSuccess;
    if constexpr (D == 64 && KIND == PLAIN)
        if (attention_spans(d, p)) return attention_backward_spans<T>(d, p);
    if constexpr (D <= 64 && KIND == PLAIN) {
        if constexpr (D <= 32)
            if (p->warps == 4) return attention_backward_of<T, D, 4>(d, p);
        if (p->warps == 8) return attention_backward_of<T, D, 8>(d, p);
    }
    p->parts_q = attention_tiles(p, p->q.rows, 64 * QMT);
    p->parts_k = attention_tiles(p, p->k.rows, 64 * KMT);
    if (p->dq.data && p->q.rows > 0)
        e = attention_launch(d, attention_dq<T, D, QMT, KEYS, KIND>, p, p->q.rows, 64 * QMT, p->heads, 1, 128,
                             (2 * 64 * QMT + 4 * KEYS) * (D + 8) * sizeof(T));
    auto dkdv = attention_dkdv<T, D, KMT, QUERIES, KIND>;
    if constexpr (D <= 64 && KIND == PLAIN)
        if (p->bits) dkdv = attention_dkdv<T, D, KMT, QUERIES, KIND, true>;
    if (e == cudaSuccess && (p->dk.data || p->dv.data))
        e = attention_launch(d, dkdv, p, p->k.rows, 64 * KMT, p->heads / p->group, 1, 128,
                             (2 * 64 * KMT + 4 * QUERIES) * (D + 8) * sizeof(T)
                             + 6 * QUERIES * sizeof(float) + attention_kept_bytes(p, 64 * KMT, QUERIES));
    return e;
}

// Returns whether attention_forward_wide can run. The kernel supports neither ALiBi nor block-sparse
// attention, and stores whole vectors.
bool attention_forward_fits_wide(const tt__device *d, const attention_args *p)
{
    return d->wgmma && p->scale > 0 && !p->alibi_heads && !p->block && p->head_size > 32
        && attention_aligned(&p->out, p->q.dtype);
}

template <class T, int D> cudaError_t attention_of_size(tt__device *d, attention_args *p)
{
    if constexpr (D == 64 || D == 128)
        if (!p->dout.data && attention_forward_fits_wide(d, p))
            return p->drop ? attention_forward_wide_on<T, D, true>(d, p)
                           : attention_forward_wide_on<T, D, false>(d, p);
    const bool near = p->window || p->alibi_heads;
    if (!p->dout.data)
        return near ? attention_forward_on<T, D, NEARBY>(d, p) : attention_forward_on<T, D, PLAIN>(d, p);
    return near ? attention_backward_on<T, D, NEARBY>(d, p) : attention_backward_on<T, D, PLAIN>(d, p);
}

template <class T> cudaError_t attention_on(tt__device *d, attention_args *p)
{
    if (p->block) // attention_fast has refused heads of more than 64 columns
        return p->dout.data ? attention_backward_on<T, 64, BY_BLOCKS>(d, p)
                            : attention_forward_on<T, 64, BY_BLOCKS>(d, p);
#define TT__ATTENTION_SIZE(D) if (p->head_size <= D) return attention_of_size<T, D>(d, p)
    TT__ATTENTION_SIZE(32);
    TT__ATTENTION_SIZE(64);
    TT__ATTENTION_SIZE(80);
    TT__ATTENTION_SIZE(96);
    TT__ATTENTION_SIZE(128);
#undef TT__ATTENTION_SIZE
    return cudaErrorInvalidValue;
}

// Runs attention on tensor cores. Random numbers need a head's number among the heads of all ranks. Kernels
// index the operands with this number, too, and so need no register for a second number. The operands'
// addresses are therefore moved back by the heads of lower ranks.
cudaError_t attention_on_cores(tt__device *d, attention_args *p)
{
    tt__mat *mats[] = {&p->q, &p->out, &p->dout, &p->dq, &p->k, &p->v, &p->dk, &p->dv};
    for (int k = 0; k < 8; k++) {
        tt__mat *m = mats[k];
        const int64_t columns = (int64_t)(k < 4 ? p->first_head : p->first_head / p->group) * p->head_size;
        if (m->data) m->data = (char *)m->data - columns * (int64_t)tt_dtype_bytes(m->dtype);
    }
    if (p->lse) p->lse -= p->first_head;
    if (p->delta) p->delta -= p->first_head;
    if (p->bits) p->bits -= (int64_t)p->first_head * TT__CUDA_ATTENTION_BITS;
    if (p->parts) p->parts -= p->first_head * p->head_size;
    if (p->sums_q) p->sums_q -= p->first_head * p->head_size;
    if (p->sums_k) p->sums_k -= p->first_head / p->group * p->head_size;
    if (p->sums_v) p->sums_v -= p->first_head / p->group * p->head_size;
    return p->q.dtype == TT_BF16 ? attention_on<bf16>(d, p) : attention_on<f16>(d, p);
}

cudaError_t run_attention(const tt__launch *l)
{
    tt__device *d = l->device;
    attention_args p;
    size_t used;
    cudaError_t e = attention_begin(l, false, &p, &used);
    p.out = l->out[0];
    p.lse = (float *)l->out[1].data;
    if (e != cudaSuccess || p.seqs < 1 || p.q.rows < 1) return e;
    if (attention_fast(&p)) return attention_on_cores(d, &p);
    const bool near = p.window || p.alibi_heads || p.block;
    const auto kernel = near ? attention_forward_any<true> : attention_forward_any<false>;
    return attention_launch(d, kernel, &p, p.q.rows, 64, p.heads, (p.head_size + 63) / 64, 256, 0);
}
TT__RUN_BY(ATTENTION, run_attention)

template <class T, int PARTS> cudaError_t attention_deltas_by(tt__device *d, const attention_args *p)
{
    const unsigned blocks = blocks_for(p->q.rows * p->heads, TT__DELTA_NUMBERS * (256 / PARTS));
    return TT__LAUNCH((attention_delta<T, PARTS>), blocks, 256, 0, d->stream, *p);
}

// Launches a kernel for the sums of dout * out of each row and head. attention_delta_any serves operands of
// any kind, and is slow. Heads of more than 64 columns in 16 bits seldom need attention_delta_any: if dq is
// wanted, the kernel of dq makes the sums.
cudaError_t attention_deltas(tt__device *d, const attention_args *p)
{
    const tt_dtype dtype = p->out.dtype;
    const int lanes = dtype == TT_F32 ? 4 : 8, parts = p->head_size / lanes;
    if (p->head_size % lanes || parts > (dtype == TT_F32 ? 32 : 8) || !attention_aligned(&p->out, dtype) ||
        !attention_aligned(&p->dout, dtype))
        return TT__LAUNCH(attention_delta_any, blocks_for(p->q.rows * p->heads, 8), 256, 0, d->stream, *p);
    if (dtype == TT_BF16) return attention_deltas_by<bf16, 8>(d, p);
    if (dtype == TT_F16) return attention_deltas_by<f16, 8>(d, p);
    return parts <= 8 ? attention_deltas_by<float, 8>(d, p)
        : parts <= 16 ? attention_deltas_by<float, 16>(d, p) : attention_deltas_by<float, 32>(d, p);
}

// Computes the backward for any dtypes, strides and head sizes, without column sums.
cudaError_t attention_backward_any(tt__device *d, const attention_args *p)
{
    const int parts = (p->head_size + 63) / 64;
    cudaError_t e = cudaSuccess;
    if (p->dq.data && p->q.rows > 0)
        e = attention_launch(d, attention_dq_any, p, p->q.rows, 64, p->heads, parts, 256, 0);
    // Runs even without queries: the gradients of a key that no query sees are 0.
    if (e == cudaSuccess && (p->dk.data || p->dv.data))
        e = attention_launch(d, attention_dkdv_any, p, p->k.rows, 64, p->heads / p->group, parts, 256, 0);
    return e;
}

// Runs the backward of attention. The kernels on tensor cores also make the column sums (gradients of
// the biases of q, k and v) of 16-bit results that they write, not of results that they add to. The resident
// workspace must have room for a row of partial sums for each tile of 64 rows. Other column sums need a
// second sweep over the results.
cudaError_t run_attention_backward(const tt__launch *l)
{
    tt__device *d = l->device;
    attention_args p;
    size_t used;
    cudaError_t e = attention_begin(l, true, &p, &used);
    p.dout = l->in[0];
    p.out = l->in[5];
    p.lse = (float *)l->in[6].data;
    p.delta = (float *)((char *)l->workspace + used);
    p.dq = l->out[0]; p.dk = l->out[1]; p.dv = l->out[2];
    p.add_dq = l->add[0]; p.add_dk = l->add[1]; p.add_dv = l->add[2];
    if (e != cudaSuccess) return e;
    used += tt__align_to((size_t)(p.q.rows * p.heads) * sizeof(float), TT__CUDA_ALIGN);
    const bool both = p.dq.data && (p.dk.data || p.dv.data);
    const size_t bits = (size_t)tt__cuda_attention_bits(&l->instr->attr, &p.q, p.seqs);
    if (both && !p.query_row && bits > 0 && used + bits <= l->instr->workspace)
        p.bits = (unsigned char *)l->workspace + used;
    const size_t parts = (size_t)tt__cuda_attention_parts(&l->instr->attr, &p.q);
    if (!p.query_row && parts > 0 && used + parts <= l->instr->workspace)
        p.parts = (float *)((char *)l->workspace + used);
    const bool fast = p.seqs > 0 && attention_fast(&p);
    float *next = resident_of(l)->sums, *const end = next + resident_workspace::BYTES / sizeof(float);
    float *partial[3] = {NULL, NULL, NULL};
    for (int k = 0; k < 3 && fast; k++) {
        const tt__mat *y = &l->out[k];
        const int64_t floats = y->cols * attention_tiles(&p, y->rows, 64);
        const bool shared = k == 0 && p.group > 1 && attention_spans(d, &p) && p.longest <= TT__SPAN;
        if (!l->out[3 + k].data || l->add[k] || y->dtype == TT_F32 || floats > end - next || shared) continue;
        partial[k] = next;
        next += floats;
    }
    p.sums_q = partial[0]; p.sums_k = partial[1]; p.sums_v = partial[2];
    p.warps = attention_warps(d, &p);
    p.sums_deltas = fast && p.warps == 0 && !attention_spans(d, &p) && p.dq.data
        && attention_aligned(&p.out, p.q.dtype);
    if (p.seqs > 0 && p.q.rows > 0 && !p.sums_deltas) e = attention_deltas(d, &p);
    if (p.seqs > 0 && e == cudaSuccess) e = fast ? attention_on_cores(d, &p) : attention_backward_any(d, &p);
    all_sums_to_finish all;
    memset(&all, 0, sizeof all);
    for (int k = 0; k < 3; k++) {
        const int parts = l->out[k].rows == 0 ? 0 : k ? p.parts_k : p.parts_q;
        if (partial[k])
            add_sums_to_finish(&all, partial[k], parts, l->out[k].cols, &l->out[3 + k], l->add[3 + k]);
    }
    if (e == cudaSuccess) e = run_all_finish_sums(d, &all);
    for (int k = 0; k < 3 && e == cudaSuccess; k++) // now, because run_column_sums overwrites `partial`
        if (l->out[3 + k].data && !partial[k])
            e = run_column_sums(l, &l->out[k], &l->out[3 + k], l->add[3 + k]);
    return e;
}
TT__RUN_BY(ATTENTION_BACKWARD, run_attention_backward)

} // namespace

/* ==== src/ops/linear/cuda_products.cuh */
namespace {

// ================================================================================================== matmuls
// cuBLASLt makes the products. Its epilogues finish the sums where they fit; otherwise kernels of our own
// sweep over the result. If cuBLASLt has no algorithm (operands of different dtypes), a kernel of our own
// makes the product. A linear layer computes y (rows, out) from x (rows, in) and w (out, in).

// A product C = A B of A (m, k) and B (k, n). Element (i, j) of A is a[i * a_row + j * a_col], element (i, j)
// of B is b[i * b_row + j * b_col]. These steps finish a sum v, element (i, j) of A B:
//     v += bias[j];  pre[i, j] = v;  v = act(v)      or, with `saved`: v *= act'(saved[i, j])
//     C[i, j] = v + residual[i, j] + (accumulate ? C[i, j] : 0)
struct product {
    int64_t m, n, k;
    const void *a, *b;
    tt_dtype a_type, b_type;
    int64_t a_row, a_col, b_row, b_col;
    tt__mat c, pre, saved, residual; // a matrix without data is absent
    tt__mat sums;                    // gets the column sums of C (with `saved`) or row sums of A (sums_rows)
    const void *bias;
    tt_dtype bias_type;
    int act;
    bool accumulate, add_sums;
    bool sums_rows;        // whether k is the number of rows of the batch; otherwise m is
    // If not NULL, A and B are fp8, and A must be multiplied by *unscale_a, B by *unscale_b.
    const float *unscale_a, *unscale_b;
};

// Returns element i of an operand as a float. FP8: the dtype is TT__E4M3 or TT__E5M2, unknown to load_any.
template <bool FP8> __device__ __forceinline__ float factor(const void *p, tt_dtype dtype, int64_t i)
{
    if (!FP8) return load_any(p, dtype, i);
    const unsigned char *q = (const unsigned char *)p + i;
    return dtype == TT__E5M2 ? (float)*(const __nv_fp8_e5m2 *)q : (float)*(const __nv_fp8_e4m3 *)q;
}

__device__ __forceinline__ void finish_element(const product &g, int64_t i, int64_t j, float v)
{
    if (g.bias) v += load_any(g.bias, g.bias_type, j);
    if (g.saved.data) {
        v *= activation_slope(g.act, element(g.saved, i, j));
    } else if (g.act) {
        if (g.pre.data) {
            store_any(g.pre.data, g.pre.dtype, i * g.pre.ld + j, v);
            v = element(g.pre, i, j); // rounded to the number that the backward will read
        }
        v = activate(g.act, v);
    }
    if (g.residual.data) v += element(g.residual, i, j);
    if (g.accumulate) v += element(g.c, i, j);
    store_any(g.c.data, g.c.dtype, i * g.c.ld + j, v);
}

// Makes a product by tiles of 64 x 64 elements of C: 256 threads have 4 x 4 sums each and add 16 products to
// each sum at a time. The kernel serves small or rare products for which cuBLASLt has no algorithm.
template <bool FP8> __global__ void __launch_bounds__(256) any_matmul(product g)
{
    tt__begin_kernel();
    TT__SHARED(float, a, [16][68]);
    TT__SHARED(float, b, [16][68]);
    const int64_t tiles = (g.n + 63) / 64, i0 = (int64_t)blockIdx.x / tiles * 64;
    const int64_t j0 = (int64_t)blockIdx.x % tiles * 64;
    const int t = threadIdx.x, ti = t / 16 * 4, tj = t % 16 * 4;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < g.k; k0 += 16) {
        for (int e = t; e < 1024; e += 256) {
            // Neighbouring threads copy neighbouring elements.
            int ka = g.a_col == 1 ? e % 16 : e / 64, ia = g.a_col == 1 ? e / 16 : e % 64;
            int kb = g.b_col == 1 ? e / 64 : e % 16, jb = g.b_col == 1 ? e % 64 : e / 16;
            a[ka][ia] = i0 + ia < g.m && k0 + ka < g.k
                ? factor<FP8>(g.a, g.a_type, (i0 + ia) * g.a_row + (k0 + ka) * g.a_col) : 0.0f;
            b[kb][jb] = j0 + jb < g.n && k0 + kb < g.k
                ? factor<FP8>(g.b, g.b_type, (k0 + kb) * g.b_row + (j0 + jb) * g.b_col) : 0.0f;
        }
        __syncthreads();
        TT__UNROLL for (int k = 0; k < 16; k++) {
            float x[4], y[4];
            TT__UNROLL for (int r = 0; r < 4; r++) { x[r] = a[k][ti + r]; y[r] = b[k][tj + r]; }
            TT__UNROLL for (int r = 0; r < 4; r++) {
                TT__UNROLL for (int c = 0; c < 4; c++) sum[r][c] += x[r] * y[c];
            }
        }
        __syncthreads();
    }
    const float unscale = FP8 ? *g.unscale_a * *g.unscale_b : 1;
    for (int r = 0; r < 4; r++) {
        for (int c = 0; c < 4; c++) {
            if (i0 + ti + r < g.m && j0 + tj + c < g.n)
                finish_element(g, i0 + ti + r, j0 + tj + c, FP8 ? sum[r][c] * unscale : sum[r][c]);
        }
    }
}

__global__ void cast_bias(void *to, tt_dtype to_type, const void *from, tt_dtype from_type, int64_t n)
{
    tt__begin_kernel();
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n) store_any(to, to_type, i, load_any(from, from_type, i));
}


cudaDataType_t lt_type(tt_dtype t)
{
    return t == TT_BF16 ? CUDA_R_16BF : t == TT_F16 ? CUDA_R_16F
        : t == TT__E4M3 ? CUDA_R_8F_E4M3 : t == TT__E5M2 ? CUDA_R_8F_E5M2 : CUDA_R_32F;
}

// An epilogue of cuBLASLt. `bias` is added, or gets the sum of each row of A (BGRADB) or of each column of
// the result (DGELU_BGRAD). For other kinds, `bias` must be NULL: given a pointer that the kind does not use,
// cublasLtMatmul returns CUBLAS_STATUS_INVALID_VALUE, even with algorithms that
// cublasLtMatmulAlgoGetHeuristic offers and cublasLtMatmulAlgoCheck accepts (seen in cuBLASLt 13.1). `aux`,
// the operand of GELU, is written or read.
struct lt_epilogue { cublasLtEpilogue_t kind; const void *bias; tt__mat aux; };

// A product in the form for cuBLASLt: to = A B + addend with an epilogue, where A and B are those of g. In
// cuBLASLt's column-major view this is C^T = B^T A^T.
struct lt_product {
    const product *g;
    const tt__mat *to, *addend; // addend may be NULL
    const lt_epilogue *more;
    bool tf32;

    bool a_plain() const { return g->a_col == 1; } // whether A is row-major
    bool b_plain() const { return g->b_col == 1; }
    int64_t a_ld() const { return a_plain() ? g->a_row : g->a_col; }
    int64_t b_ld() const { return b_plain() ? g->b_row : g->b_col; }
    int64_t c_ld() const { return addend ? addend->ld : to->ld; }
    const void *c() const { return addend ? addend->data : to->data; }
};

// All numbers on which cuBLASLt's choice of an algorithm depends.
struct product_key {
    int64_t m, n, k, lda, ldb, ldc, ldd, ld_aux;
    int a_type, b_type, to_type, epilogue;
    uint16_t alignment[6]; // bytes to which B, A, C, the result, bias and aux are aligned
    bool a_plain, b_plain, adds, tf32, sums_rows, exact;
    bool tuned; // whether the program was compiled with `tune`
};

struct product_choice { product_key key; cublasLtMatmulAlgo_t algo; bool used, possible; };

uint16_t alignment_of(const void *p)
{
    uint16_t k = 4;
    while (k < 256 && (uintptr_t)p % (2 * k) == 0) k *= 2;
    return (uintptr_t)p % 4 ? 2 : k;
}

// Returns the number of rows for which an algorithm is chosen: `rows` if `exact`, otherwise the next multiple
// of 128 if there are more than 128 rows. The rounded number makes as many tiles as `rows`. Batches of texts
// differ in their number of rows; with multiples of 128, they seldom need a new choice. The number must not
// depend on earlier products, because the bits of a product may depend on its algorithm.
int64_t rows_to_choose_for(int64_t rows, bool exact)
{
    return exact || rows <= 128 ? rows : (rows + 127) / 128 * 128;
}

product_key key_of(const lt_product &p, bool exact, bool tuned)
{
    product_key key;
    memset(&key, 0, sizeof key); // clears the padding, too, because memcmp compares keys
    key.m = p.g->sums_rows ? p.g->m : rows_to_choose_for(p.g->m, exact);
    key.n = p.g->n;
    key.k = p.g->sums_rows ? rows_to_choose_for(p.g->k, exact) : p.g->k;
    key.lda = p.a_ld(); key.ldb = p.b_ld(); key.ldc = p.c_ld(); key.ldd = p.to->ld;
    // If the rows of the batch run along memory, as in fp8, lda and ldb limit the number of rows.
    if (p.g->sums_rows && p.a_plain()) key.k = min(key.k, min(key.lda, key.ldb));
    key.ld_aux = p.more->aux.data ? p.more->aux.ld : 0;
    key.a_type = lt_type(p.g->a_type); key.b_type = lt_type(p.g->b_type); key.to_type = lt_type(p.to->dtype);
    key.epilogue = p.more->kind;
    const void *const operands[6] = {p.g->b, p.g->a, p.c(), p.to->data, p.more->bias, p.more->aux.data};
    for (int k = 0; k < 6; k++) key.alignment[k] = alignment_of(operands[k]);
    key.a_plain = p.a_plain(); key.b_plain = p.b_plain(); key.adds = p.addend != NULL; key.tf32 = p.tf32;
    key.sums_rows = p.g->sums_rows; key.exact = exact; key.tuned = tuned;
    return key;
}

// Returns the entry of `key` in the device's table of choices, or a free entry. Empties the table once three
// quarters of its entries are in use. Returns NULL when out of memory.
product_choice *choice_of(tt__device *d, const product_key &key)
{
    if (!d->choices) d->choices = (product_choice *)calloc(TT__PRODUCT_CHOICES, sizeof *d->choices);
    if (!d->choices) return NULL;
    uint64_t hash = 1469598103934665603u; // FNV-1a
    for (size_t k = 0; k < sizeof key; k++) hash = (hash ^ ((const unsigned char *)&key)[k]) * 1099511628211u;
    for (;; hash++) {
        product_choice *choice = &d->choices[hash % TT__PRODUCT_CHOICES];
        if (choice->used && memcmp(&choice->key, &key, sizeof key) == 0) return choice;
        if (choice->used) continue;
        if (++d->choice_count > TT__PRODUCT_CHOICES * 3 / 4) {
            memset(d->choices, 0, TT__PRODUCT_CHOICES * sizeof *d->choices);
            d->choice_count = 1;
        }
        choice->key = key;
        return choice;
    }
}

// cuBLASLt's description of a product whose A is (m, k).
struct lt_description {
    cublasLtMatmulDesc_t desc = NULL;
    cublasLtMatrixLayout_t a = NULL, b = NULL, c = NULL, to = NULL;
    cublasStatus_t status;

    lt_description(const lt_product &p, int64_t m, int64_t k)
    {
        const product &g = *p.g;
        const lt_epilogue &more = *p.more;
        status = cublasLtMatmulDescCreate(&desc, p.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                          CUDA_R_32F);
        set(CUBLASLT_MATMUL_DESC_TRANSA, p.b_plain() ? CUBLAS_OP_N : CUBLAS_OP_T);
        set(CUBLASLT_MATMUL_DESC_TRANSB, p.a_plain() ? CUBLAS_OP_N : CUBLAS_OP_T);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, more.kind);
        if (more.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, more.bias);
        if (g.unscale_a) {
            set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, g.unscale_b);
            set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, g.unscale_a);
            // Hopper sums fp8 products in 14 bits. Without fast accumulation, cuBLASLt adds these sums to
            // f32 sums at intervals. Products of gradients, which are E5M2, need the f32 sums more than
            // products of values; Transformer Engine makes the same choice.
            set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)(g.a_type != TT__E5M2));
            // cuBLASLt accepts no other dtype of bias for fp8 operands.
            const cudaDataType bias_type = p.to->dtype == TT_F16 ? CUDA_R_16F : CUDA_R_16BF;
            if (more.bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type);
        }
        if (more.aux.data) {
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, more.aux.data);
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, more.aux.ld);
        }
        lay_out(&b, lt_type(g.b_type), p.b_plain(), k, g.n, p.b_ld());
        lay_out(&a, lt_type(g.a_type), p.a_plain(), m, k, p.a_ld());
        lay_out(&c, lt_type(p.to->dtype), true, m, g.n, p.c_ld());
        lay_out(&to, lt_type(p.to->dtype), true, m, g.n, p.to->ld);
    }
    lt_description(const lt_description &) = delete;
    lt_description &operator=(const lt_description &) = delete;
    ~lt_description()
    {
        for (cublasLtMatrixLayout_t layout : {a, b, c, to}) if (layout) cublasLtMatrixLayoutDestroy(layout);
        if (desc) cublasLtMatmulDescDestroy(desc);
    }

    template <class T> void set(cublasLtMatmulDescAttributes_t name, const T &value)
    {
        if (status == CUBLAS_STATUS_SUCCESS)
            status = cublasLtMatmulDescSetAttribute(desc, name, &value, sizeof value);
    }
    void lay_out(cublasLtMatrixLayout_t *layout, cudaDataType type, bool plain, int64_t rows, int64_t cols,
                 int64_t ld)
    {
        if (status != CUBLAS_STATUS_SUCCESS) return;
        status = cublasLtMatrixLayoutCreate(layout, type, (uint64_t)(plain ? cols : rows),
                                            (uint64_t)(plain ? rows : cols), ld);
    }
};

constexpr int LT_OFFERS = 8; // max algorithms per product: cuBLASLt 13.1 never offers more than 8

// Writes to `found` the algorithms, at most `largest`, that cuBLASLt's heuristic offers for the key, the
// fastest first, and sets *count to their number.
cublasStatus_t lt_ask(tt__device *d, const lt_product &p, const product_key &key, int largest,
                      cublasLtMatmulHeuristicResult_t (&found)[LT_OFFERS], int *count)
{
    static const cublasLtMatmulPreferenceAttributes_t names[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const lt_description of(p, key.m, key.k);
    const size_t workspace = resident_workspace::LT_BYTES;
    cublasLtMatmulPreference_t preference = NULL;
    cublasStatus_t s = of.status;
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t name, const auto &value) {
        if (s == CUBLAS_STATUS_SUCCESS)
            s = cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof value);
    };
    *count = 0;
    if (s == CUBLAS_STATUS_SUCCESS) s = cublasLtMatmulPreferenceCreate(&preference);
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    for (int k = 0; k < 4; k++) set(names[k], (uint32_t)key.alignment[k]);
    if (s == CUBLAS_STATUS_SUCCESS) {
        const cublasStatus_t none = cublasLtMatmulAlgoGetHeuristic(d->lt, of.desc, of.b, of.a, of.c, of.to,
                                                                   preference, largest, found, count);
        if (none != CUBLAS_STATUS_SUCCESS || found[0].state != CUBLAS_STATUS_SUCCESS) *count = 0;
    }
    if (preference) cublasLtMatmulPreferenceDestroy(preference);
    return s;
}

// Returns whether cuBLASLt can use `algo` for a product of the key's sizes with the resident workspace.
bool lt_has(tt__device *d, const lt_product &p, const product_key &key, const cublasLtMatmulAlgo_t &algo)
{
    const lt_description of(p, key.m, key.k);
    cublasLtMatmulHeuristicResult_t found;
    return of.status == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatmulAlgoCheck(d->lt, of.desc, of.b, of.a, of.c, of.to, &algo, &found) ==
            CUBLAS_STATUS_SUCCESS &&
        found.workspaceSize <= resident_workspace::LT_BYTES;
}

enum lt_outcome { LT_DONE, LT_REFUSED, LT_NOT_OFFERED };

// The result of timing a kind of product, measured or read from a text. possible: the algorithm `algo` of
// cuBLASLt is the fastest way; otherwise a way that is tried later is faster. met: the device's programs
// have a product whose key, at the product's max number of rows, is this key.
struct tuned_product { product_key key; cublasLtMatmulAlgo_t algo; bool possible, met; };

tuned_product *tuned_of(tt__device *d, const product_key &key)
{
    for (int k = 0; k < d->tuned_count; k++)
        if (memcmp(&d->tuned[k].key, &key, sizeof key) == 0) return &d->tuned[k];
    return NULL;
}

// Returns the tuned entry that fits the key in all but the number of rows: the entry with the key's number of
// rows, else with the next larger number, else with the largest; NULL if no entry fits. Only entries with
// `met` count, so the result does not depend on the products that ran before.
const tuned_product *nearest_tuned(tt__device *d, const product_key &key)
{
    const tuned_product *nearest = NULL;
    const auto rows_of = [](const product_key &x) { return x.sums_rows ? x.k : x.m; };
    const int64_t rows = rows_of(key);
    for (int k = 0; k < d->tuned_count; k++) {
        const tuned_product *x = &d->tuned[k];
        product_key same = x->key;
        (same.sums_rows ? same.k : same.m) = rows;
        if (!x->met || memcmp(&same, &key, sizeof key) != 0) continue;
        const int64_t best = nearest ? rows_of(nearest->key) : 0, now = rows_of(x->key);
        if (!nearest || (best < rows ? now > best : now >= rows && now < best)) nearest = x;
    }
    return nearest;
}

// Ways to make a product, in the order in which they are tried.
enum product_way {
    LT_WITH_SUMS,   // cuBLASLt also sums the columns of the result, or the rows of A
    LT_WITH_GELU,   // cuBLASLt also applies GELU or its slope; kernels of our own compute the sums
    LT_ALONE,       // cuBLASLt adds a bias at most; kernels of our own do the rest
    LT_WAYS
};

// The trial of one way to make a product. `algo` has the algorithms to be timed: all that cuBLASLt offers or,
// if a tuned entry is known, only the algorithm of the entry.
struct way_trial {
    bool asked;     // whether lt_try has run in this way, as it does if the way suits the product
    product_key key;
    tuned_product *known;
    cublasLtMatmulAlgo_t algo[LT_OFFERS];
    int count;
};

struct product_trial {
    way_trial of[LT_WAYS];
    int way, offer; // numbers of the way, and of its algorithm, that lt_run runs now
    bool asks;      // whether lt_run only finds the offered algorithms and makes no product
};

cublasStatus_t lt_make(const tt__launch *l, const lt_product &p, const lt_description &of,
                       const cublasLtMatmulAlgo_t *algo)
{
    const float one = 1, zero = 0;
    return cublasLtMatmul(l->device->lt, of.desc, &one, p.g->b, of.b, p.g->a, of.a, p.addend ? &one : &zero,
                          p.c(), of.c, p.to->data, of.to, algo, resident_of(l)->product.lt,
                          resident_workspace::LT_BYTES, l->device->stream);
}

// Returns whether cublasLtMatmul's status means that cuBLASLt cannot use the algorithm for the product.
bool lt_refuses(cublasStatus_t s)
{
    return s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_INVALID_VALUE;
}

// Does the work of lt_run while a product is timed: finds the algorithms for the trial's way, if they are not
// known yet, and makes the product with the trial's algorithm.
cublasStatus_t lt_try(const tt__launch *l, const lt_product &p, lt_outcome *outcome)
{
    tt__device *d = l->device;
    way_trial &way = d->trial->of[d->trial->way];
    cublasLtMatmulHeuristicResult_t found[LT_OFFERS];
    *outcome = LT_NOT_OFFERED;
    if (!way.asked) {
        way.asked = true;
        way.key = key_of(p, false, true);
        way.known = tuned_of(d, way.key);
        cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
        if (!way.known) s = lt_ask(d, p, way.key, LT_OFFERS, found, &way.count);
        else way.count = way.known->possible && lt_has(d, p, way.key, way.known->algo);
        for (int k = 0; k < way.count; k++) way.algo[k] = way.known ? way.known->algo : found[k].algo;
        if (s != CUBLAS_STATUS_SUCCESS) return s;
    }
    if (d->trial->asks || d->trial->offer >= way.count) return CUBLAS_STATUS_SUCCESS;
    const lt_description of(p, p.g->m, p.g->k);
    const cublasStatus_t s = of.status != CUBLAS_STATUS_SUCCESS ? of.status
        : lt_make(l, p, of, &way.algo[d->trial->offer]);
    *outcome = lt_refuses(s) ? LT_REFUSED : LT_DONE;
    return lt_refuses(s) ? CUBLAS_STATUS_SUCCESS : s;
}

// Returns whether a product that was not timed uses this epilogue. Times on an H200 with GPT-2's sizes,
// 16,384 rows of 3,072 and 768 columns: the slope of GELU and column sums take 439 us with the epilogue;
// without, the product takes 108 us and a kernel of our own 75 us. Sums of A's rows take 154 us with the
// epilogue; without, 112 us and 25 us. GELU takes 155 us with the epilogue; without, 114 us and 50 us. The
// times of kernels of our own are computed from their memory traffic. Only the epilogue of GELU is therefore
// faster.
bool is_usual(cublasLtEpilogue_t kind)
{
    return kind != CUBLASLT_EPILOGUE_DGELU && kind != CUBLASLT_EPILOGUE_DGELU_BGRAD &&
        kind != CUBLASLT_EPILOGUE_BGRADB;
}

// Makes the product with the algorithm chosen for its key. If none was chosen yet, chooses the tuned
// algorithm or the first offered algorithm that cuBLASLt does not refuse.
cublasStatus_t lt_run(const tt__launch *l, const lt_product &p, bool exact, lt_outcome *outcome)
{
    tt__device *d = l->device;
    if (d->trial) return lt_try(l, p, outcome);
    const product_key key = key_of(p, exact, l->tuned);
    cublasLtMatmulHeuristicResult_t found[LT_OFFERS];
    product_choice *choice = choice_of(d, key);
    if (!choice) return CUBLAS_STATUS_ALLOC_FAILED;
    *outcome = LT_NOT_OFFERED;
    if (choice->used && !choice->possible) return CUBLAS_STATUS_SUCCESS;
    // If the tuned entry has another number of rows, only its `possible` is used, not its algorithm. On an
    // H200, with 3,072 rows of 3,072 inputs, the fastest algorithm for 6,144 rows took 39 us, the algorithm
    // offered first 27 us.
    const tuned_product *tuned = choice->used || exact || !l->tuned ? NULL : nearest_tuned(d, key);
    const bool same = tuned && memcmp(&tuned->key, &key, sizeof key) == 0;
    int count = 1;
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (choice->used) found[0].algo = choice->algo;
    else if (tuned ? !tuned->possible : !is_usual(p.more->kind)) count = 0;
    else if (same && lt_has(d, p, key, tuned->algo)) found[0].algo = tuned->algo;
    else s = lt_ask(d, p, key, exact ? LT_OFFERS : 1, found, &count);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    const lt_description of(p, p.g->m, p.g->k);
    if (of.status != CUBLAS_STATUS_SUCCESS) return of.status;
    if (count) {
        *outcome = LT_REFUSED;
        choice->algo = found[0].algo;
    }
    for (int k = 0; k < count && *outcome == LT_REFUSED; k++) {
        s = lt_make(l, p, of, &found[k].algo);
        if (lt_refuses(s)) continue; // cuBLASLt refuses some algorithms that its heuristic offers
        if (s != CUBLAS_STATUS_SUCCESS) return s;
        choice->algo = found[k].algo;
        *outcome = LT_DONE;
    }
    choice->used = true;
    choice->possible = exact ? *outcome == LT_DONE : count > 0;
    return CUBLAS_STATUS_SUCCESS;
}

// Makes to = A B + addend (NULL: no addend) with an epilogue by cuBLASLt. Sets *done to false where cuBLASLt
// has no algorithm.
cudaError_t lt_matmul(const tt__launch *l, const product *g, const tt__mat *to,
                      const tt__mat *addend, const lt_epilogue *more, bool *done)
{
    const lt_product p = {g, to, addend, more, l->tf32 && g->a_type == TT_F32};
    lt_outcome outcome = LT_NOT_OFFERED;
    *done = false;
    const bool alike = g->a_type == g->b_type && (to->dtype == TT_F32 || to->dtype == g->a_type);
    if (!(alike || g->unscale_a) || !g->k) return cudaSuccess;
    cublasStatus_t s = lt_run(l, p, false, &outcome);
    if (s == CUBLAS_STATUS_SUCCESS && outcome == LT_REFUSED && !l->device->trial)
        s = lt_run(l, p, true, &outcome);
    *done = outcome == LT_DONE;
    if (s == CUBLAS_STATUS_SUCCESS) return cudaSuccess;
    const cudaError_t cause = cudaPeekAtLastError();
    if (ends_all(cause)) return cause;
    fail(l->device, TT_ERR_DEVICE, "cuBLASLt failed with status %d in a product of %lld x %lld x %lld: "
         "update CUDA and the driver", (int)s, (long long)g->m, (long long)g->n, (long long)g->k);
    return cudaErrorUnknown;
}

// Returns whether cuBLASLt's GELU, the tanh approximation (github.com/pytorch/pytorch/pull/104061), can be
// used. The operand of GELU must have the dtype of the result, and its rows must be a multiple of 8 elements
// apart (cublasLt.h, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD).
bool lt_gelu(const product *g, const tt__mat *aux)
{
    if (g->act != TT__ACT_GELU_TANH || g->accumulate || g->residual.data) return false;
    return !aux->data || (aux->dtype == g->c.dtype && aux->ld % 8 == 0 && (uintptr_t)aux->data % 16 == 0);
}

// Makes a product with an epilogue that also computes sums, and writes the sums to `sums` or, if `add`, adds
// them to `sums`. cuBLASLt writes sums in the dtype of the result and cannot add, so sums to be added go
// through a buffer.
cudaError_t lt_sums(const tt__launch *l, const product *g, const tt__mat *to, const tt__mat *addend,
                    lt_epilogue more, const tt__mat *sums, bool add, bool *done)
{
    float *apart = resident_of(l)->product.bias;
    *done = false;
    if (sums->dtype != to->dtype) return cudaSuccess;
    if (add && (sums->dtype != TT_F32 || (size_t)sums->cols * 4 > resident_workspace::BIAS_BYTES))
        return cudaSuccess;
    more.bias = add ? apart : sums->data;
    const cudaError_t e = lt_matmul(l, g, to, addend, &more, done);
    if (e != cudaSuccess || !*done || !add) return e;
    return run_finish_sums(l->device, apart, 1, sums->cols, sums, true);
}

// operand_a and operand_b return A and B of a product as matrices with contiguous rows: the matrix itself or
// its transpose.
tt__mat operand_a(const product *g)
{
    return g->sums_rows ? tt__mat{(void *)g->a, g->a_type, g->k, g->m, g->a_col}
                        : tt__mat{(void *)g->a, g->a_type, g->m, g->k, g->a_row};
}
tt__mat operand_b(const product *g)
{
    return g->b_col == 1 ? tt__mat{(void *)g->b, g->b_type, g->k, g->n, g->b_row}
                         : tt__mat{(void *)g->b, g->b_type, g->n, g->k, g->b_col};
}

// Computes g->sums, the column sums of C or the row sums of A, by kernels of our own.
cudaError_t sum_apart(const tt__launch *l, const product *g)
{
    const tt__mat a = operand_a(g);
    return run_column_sums(l, g->sums_rows ? &a : &g->c, &g->sums, g->add_sums);
}

// Returns whether cuBLASLt can make the product fast without copies: the operands are fp8, or tt__cuda_even
// is true of A, B and C.
bool is_even(const product *g)
{
    const tt__mat a = operand_a(g), b = operand_b(g);
    return g->unscale_a || (tt__cuda_even(&a) && tt__cuda_even(&b) && tt__cuda_even(&g->c));
}

// Finishes the f32 sums in `sum`, the matrix A B, by the steps of struct product, and stores them in g.c.
__global__ void __launch_bounds__(256) finish_elements(product g, tt__mat sum)
{
    tt__begin_kernel();
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x, r = i / g.n, c = i % g.n;
    if (r < g.m) finish_element(g, r, c, ((const float *)sum.data)[r * sum.ld + c]);
}

// Makes a product whose operands cuBLASLt cannot read fast (is_even returns false), from padded copies of
// the operands. The copies are at the end of the workspace (tt__cuda_padded_bytes) and have at most
// TT__CUDA_LOSS_CHUNK rows of activations at a time. Sets *done to false where the workspace has no room or
// cuBLASLt has no algorithm.
cudaError_t padded_matmul(const tt__launch *l, const product *g, bool *done)
{
    tt__device *d = l->device;
    const int64_t rows = g->sums_rows ? g->k : g->m, largest = min(rows, (int64_t)TT__CUDA_LOSS_CHUNK);
    const auto up = [](int64_t n) { return (n + 7) / 8 * 8; };
    const int64_t m = g->sums_rows ? up(g->m) : largest, n = up(g->n), k = g->sums_rows ? largest : up(g->k);
    product p = *g;
    p.a_row = g->sums_rows ? 1 : k; p.a_col = g->sums_rows ? m : 1;
    p.b_row = g->b_col == 1 ? n : 1; p.b_col = g->b_col == 1 ? 1 : k;
    const size_t of_a = tt__align_to((size_t)(m * k) * tt_dtype_bytes(g->a_type), TT__CUDA_ALIGN);
    const size_t of_b = tt__align_to((size_t)(n * k) * tt_dtype_bytes(g->b_type), TT__CUDA_ALIGN);
    const size_t of_c = tt__align_to((size_t)(m * n) * sizeof(float), TT__CUDA_ALIGN);
    char *at = (char *)l->workspace + l->instr->workspace;
    *done = false;
    if (g->a_type != g->b_type || !g->k || of_a + of_b + of_c > l->instr->workspace) return cudaSuccess;
    p.c = {at -= of_c, TT_F32, m, n, n};
    p.b = at -= of_b;
    p.a = at -= of_a;
    p.bias = NULL;
    p.act = 0;
    p.accumulate = false;
    p.pre = p.saved = p.residual = p.sums = no_operand;
    cudaError_t e = cudaSuccess;
    for (int64_t r = 0; r < rows && e == cudaSuccess; r += largest) {
        product part = *g; // the product of rows [r, r + some)
        const int64_t some = min(largest, rows - r);
        const tt__mat a = operand_a(g), b = operand_b(g), a_rows = rows_of(&a, r, some);
        const tt__mat b_rows = g->sums_rows ? rows_of(&b, r, some) : b;
        p.m = g->sums_rows ? m : some; p.n = n; p.k = g->sums_rows ? some : k;
        p.c.rows = p.m;
        const tt__mat to_a = operand_a(&p), to_b = operand_b(&p);
        e = run_copy_padded(d, a_rows, to_a);
        if (e == cudaSuccess && (g->sums_rows || r == 0)) e = run_copy_padded(d, b_rows, to_b);
        const lt_epilogue none = {CUBLASLT_EPILOGUE_DEFAULT, NULL, no_operand};
        if (e == cudaSuccess) e = lt_matmul(l, &p, &p.c, g->sums_rows && r > 0 ? &p.c : NULL, &none, done);
        if (e != cudaSuccess || !*done) return e;
        if (g->sums_rows && r + some < rows) continue;
        if (!g->sums_rows) {
            part.m = some;
            for (tt__mat *y : {&part.c, &part.pre, &part.saved, &part.residual}) *y = rows_of(y, r, some);
        }
        e = TT__LAUNCH(finish_elements, blocks_for(part.m * part.n, 256), 256, 0, d->stream, part, p.c);
    }
    return e == cudaSuccess && g->sums.data ? sum_apart(l, g) : e;
}

// A product prepared for matmul_by.
struct matmul_form {
    const product *g;
    tt__mat to;             // destination of the product plus its bias
    const tt__mat *addend, *aux;
    lt_epilogue plain;      // an epilogue that adds the bias, or does nothing
    // fits: cuBLASLt can make the product; gelu: cuBLASLt can also apply GELU or its slope.
    bool fits, gelu;
    // passes: an activation follows the sum and the bias; later: `residual` is added by a kernel afterwards.
    bool passes, later;
};

// Sets *f for the product g. Converts the bias if cuBLASLt needs it in another dtype.
cudaError_t form_of(const tt__launch *l, const product *g, matmul_form *f)
{
    f->g = g;
    f->passes = g->act != 0 || g->saved.data;
    f->to = f->passes && g->pre.data ? g->pre : g->c;
    // cuBLASLt cannot add a 16-bit residual to an f32 result, so a kernel adds the residual afterwards.
    f->later = !f->passes && !g->accumulate && g->residual.data && g->residual.dtype != f->to.dtype &&
        f->to.dtype == TT_F32;
    f->addend = !f->passes && g->accumulate ? &g->c
        : !f->passes && g->residual.data && !f->later ? &g->residual : NULL;
    f->aux = g->saved.data ? &g->saved : &g->pre;
    f->plain = {g->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT, g->bias, no_operand};
    f->fits = is_even(g) && !(g->accumulate && (f->passes || g->residual.data)) &&
        !(f->passes && g->residual.data) && !(f->addend && f->addend->dtype != f->to.dtype);
    const bool fp8 = f->fits && g->unscale_a && g->k > 0;
    // The dtype that a bias needs for cuBLASLt.
    const tt_dtype bias_type = !fp8 || f->to.dtype != TT_F32 ? f->to.dtype : TT_BF16;
    cudaError_t e = cudaSuccess;
    if (f->fits && g->bias && g->bias_type != bias_type) {
        if ((size_t)g->n * tt_dtype_bytes(bias_type) <= resident_workspace::BIAS_BYTES) {
            void *copy = resident_of(l)->product.bias;
            e = TT__LAUNCH(cast_bias, blocks_for(g->n, 256), 256, 0, l->device->stream, copy, bias_type,
                           g->bias, g->bias_type, g->n);
            f->plain.bias = copy;
        } else {
            f->fits = false;
        }
    }
    f->gelu = f->fits && !fp8 && lt_gelu(g, f->aux);
    return e;
}

// Makes a product in one of the ways. Sets *done to false where cuBLASLt cannot; in the way LT_ALONE, a
// kernel of our own then makes the product, except while the product is timed.
cudaError_t matmul_by(const tt__launch *l, const matmul_form &f, int way, bool *done)
{
    tt__device *d = l->device;
    const product *g = f.g;
    cudaError_t e = cudaSuccess;
    *done = false;
    if (way == LT_WITH_SUMS) {
        if (!g->sums.data || !f.fits || g->unscale_a) return cudaSuccess;
        if (g->sums_rows)
            return lt_sums(l, g, &f.to, f.addend, {CUBLASLT_EPILOGUE_BGRADB, NULL, no_operand}, &g->sums,
                           g->add_sums, done);
        if (!f.gelu) return cudaSuccess;
        return lt_sums(l, g, &g->c, NULL, {CUBLASLT_EPILOGUE_DGELU_BGRAD, NULL, *f.aux}, &g->sums,
                       g->add_sums, done);
    }
    if (way == LT_WITH_GELU) {
        if (!f.gelu) return cudaSuccess;
        lt_epilogue more = {CUBLASLT_EPILOGUE_DGELU, f.plain.bias, *f.aux};
        if (!g->saved.data && g->bias)
            more.kind = f.aux->data ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_BIAS;
        else if (!g->saved.data)
            more.kind = f.aux->data ? CUBLASLT_EPILOGUE_GELU_AUX : CUBLASLT_EPILOGUE_GELU;
        e = lt_matmul(l, g, &g->c, NULL, &more, done);
        return e == cudaSuccess && *done && g->sums.data ? sum_apart(l, g) : e;
    }
    if (f.fits) e = lt_matmul(l, g, &f.to, f.addend, &f.plain, done);
    if (e != cudaSuccess || (!*done && d->trial)) return e;
    if (!*done) {
        const int64_t tiles = (g->m + 63) / 64 * ((g->n + 63) / 64);
        *done = true;
        e = g->unscale_a ? TT__LAUNCH((any_matmul<true>), (unsigned)tiles, 256, 0, d->stream, *g)
                         : TT__LAUNCH((any_matmul<false>), (unsigned)tiles, 256, 0, d->stream, *g);
        return e == cudaSuccess && g->sums.data ? sum_apart(l, g) : e;
    }
    if (f.later) return run_groups(d, g->residual, no_operand, f.to, true, false, op_scale{1.0f});
    if (g->saved.data) return run_slope(l, g->act, f.to, g->saved, g->c, false, g->sums, g->add_sums);
    if (g->act) return run_act(d, g->act, f.to, g->c, false);
    return g->sums_rows && g->sums.data ? sum_apart(l, g) : cudaSuccess;
}

// A list of the products that a launch would make.
struct collected_products { product *list; int count, capacity; };

cudaError_t collect(collected_products *to, const product *g)
{
    if (to->count == to->capacity) {
        const int capacity = 2 * to->capacity + 4;
        product *more = (product *)realloc(to->list, (size_t)capacity * sizeof *more);
        if (!more) return cudaErrorMemoryAllocation;
        to->list = more;
        to->capacity = capacity;
    }
    to->list[to->count++] = *g;
    return cudaSuccess;
}

cudaError_t matmul(const tt__launch *l, const product *g)
{
    matmul_form f;
    bool done = false;
    if (g->m <= 0 || g->n <= 0) return cudaSuccess;
    if (l->device->collected) return is_even(g) ? collect(l->device->collected, g) : cudaSuccess;
    cudaError_t e = is_even(g) ? cudaSuccess : padded_matmul(l, g, &done);
    if (e != cudaSuccess || done) return e;
    e = form_of(l, g, &f);
    for (int way = 0; way < LT_WAYS && e == cudaSuccess && !done; way++) e = matmul_by(l, f, way, &done);
    return e;
}

} // namespace

/* ==== src/ops/linear/cuda_coded.cuh */
namespace {

// ---------------------------------------------------------------------------------------- coded weights
// Products whose weight is a coded matrix (src/backend/launch.h). Products of few rows read the codes. Before
// other products a kernel widens the whole matrix to the dtype of operand 0, in the workspace.

enum { CODED_FEW = 8 }; // max rows of x for which a product reads the codes

// A coded matrix (rows, cols). numbers: the number of each code of 4 bits.
struct coded_matrix {
    const unsigned char *codes, *scales;
    const float *nested, *offset, *map;
    tt_dtype dtype;
    int64_t rows, cols;
    float numbers[16];
};

coded_matrix coded_of(const tt__mat *m)
{
    static const float nf4[16] = TT__NF4_NUMBERS;
    const tt__coded_parts p = tt__coded_parts_of(m->dtype, m->rows, m->cols);
    const unsigned char *at = (const unsigned char *)m->data;
    coded_matrix c = {at, at + p.scales, (const float *)(at + p.nested), (const float *)(at + p.offset),
                      (const float *)(at + p.map), m->dtype, m->rows, m->cols, {}};
    for (int k = 0; k < 16; k++) c.numbers[k] = m->dtype == TT__NF4 ? nf4[k] : (float)(k - 8);
    return c;
}

// Reads elements [col, col + n) of a row, n at most 8; the others become 0. col is a multiple of 8, so that
// the elements belong to one block. The numbers are those that the CPU computes.
__device__ __forceinline__ void load_coded8(float (&v)[8], const coded_matrix &c, int64_t row, int64_t col,
                                            int64_t n)
{
    const int64_t at = row * c.cols + col;
    if (c.dtype == TT__INT8) {
        const float scale = ((const float *)c.scales)[row] / 127;
        TT__UNROLL for (int k = 0; k < 8; k++)
            v[k] = k < n ? (float)(signed char)c.codes[at + k] * scale : 0.0f;
        return;
    }
    float scale;
    if (c.dtype == TT__NF4) {
        const int64_t block = at / TT__NF4_BLOCK;
        scale = __fadd_rn(__fmul_rn(c.map[c.scales[block]], c.nested[block / TT__NF4_NESTED]), *c.offset);
    } else {
        scale = load_any(c.scales, TT_F16, at / TT__INT4_GROUP);
    }
    const uint32_t word = *(const uint32_t *)(c.codes + at / 2); // the width is a multiple of 32
    TT__UNROLL for (int k = 0; k < 8; k++)
        v[k] = c.numbers[word >> (k / 2 * 8 + (k % 2 ? 0 : 4)) & 15] * scale;
}

// Writes matrix c to `to`, a contiguous matrix of floats; a thread converts 8 elements.
__global__ void __launch_bounds__(256) widen_coded(coded_matrix c, void *to, tt_dtype dtype)
{
    tt__begin_kernel();
    const int64_t across = (c.cols + 7) / 8, groups = c.rows * across;
    for (int64_t g = blockIdx.x * (int64_t)256 + threadIdx.x; g < groups; g += (int64_t)gridDim.x * 256) {
        const int64_t row = g / across, col = g % across * 8;
        float v[8];
        load_coded8(v, c, row, col, c.cols - col);
        const int64_t at = row * c.cols + col;
        if (c.cols % 8 == 0) store8(to, dtype, at, 8, true, v);
        else for (int k = 0; k < 8 && col + k < c.cols; k++) store_any(to, dtype, at + k, v[k]);
    }
}

// Makes a product of at most CODED_FEW rows; a warp computes a column of the result. The weight's numbers are
// not rounded to 16 bits.
__global__ void __launch_bounds__(256) coded_few(coded_matrix c, product g)
{
    tt__begin_kernel();
    const int64_t column = blockIdx.x * (int64_t)8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (column >= c.rows) return;
    float sum[CODED_FEW] = {};
    for (int64_t k = lane * 8; k < c.cols; k += 256) {
        float w[8], x[8];
        load_coded8(w, c, column, k, c.cols - k);
        TT__UNROLL for (int r = 0; r < CODED_FEW; r++) {
            if (r >= g.m) continue;
            load8(x, (const char *)g.a + r * g.a_row * (g.a_type == TT_F32 ? 4 : 2), g.a_type, k, c.cols - k,
                  g.a_row % 8 == 0 && (uintptr_t)g.a % 16 == 0);
            TT__UNROLL for (int e = 0; e < 8; e++) sum[r] += x[e] * w[e];
        }
    }
    TT__UNROLL for (int r = 0; r < CODED_FEW; r++) {
        if (r >= g.m) continue;
        const float v = warp_sum(sum[r]);
        if (lane == 0) finish_element(g, r, column, v);
    }
}

// Returns whether coded_few makes the product of a LINEAR.
bool is_few(const tt__launch *l)
{
    return tt__is_coded(l->in[1].dtype) && l->in[0].rows <= CODED_FEW && !l->device->collected;
}

cudaError_t run_coded_few(const tt__launch *l, const product *g)
{
    const coded_matrix c = coded_of(&l->in[1]);
    if (g->m <= 0 || g->n <= 0) return cudaSuccess;
    return TT__LAUNCH(coded_few, blocks_for(c.rows, 8), 256, 0, l->device->stream, c, *g);
}

// Sets *w to operand 1 of a product or, if that is a coded matrix, to the widened matrix in the workspace.
// Widens nothing for a product that reads the codes, or while products are collected for timing.
cudaError_t widened(const tt__launch *l, tt__mat *w)
{
    *w = l->in[1];
    if (!tt__is_coded(w->dtype)) return cudaSuccess;
    const coded_matrix c = coded_of(w);
    w->dtype = l->in[0].dtype;
    w->data = l->workspace;
    if (l->device->collected || l->in[0].rows <= 0) return cudaSuccess;
    if (l->instr->op == TT__OP_LINEAR && is_few(l)) return cudaSuccess;
    const int64_t groups = c.rows * ((c.cols + 7) / 8);
    return TT__LAUNCH(widen_coded, grid_for(groups, 256, 16384), 256, 0, l->device->stream, c, w->data,
                      w->dtype);
}

} // namespace

/* ==== src/ops/linear/cuda_tuned.cuh */
namespace {

// ------------------------------------------------------------------------------------------ tuned products
// Timing finds the fastest way to make a product (tt_compile_options.tune). Each round times all ways, with
// all algorithms that cuBLASLt offers, one after another, so that a change of the clock rates affects all of
// them; the median of the rounds counts. The operands are separate copies with random numbers, because zeros
// need less power and would give higher clock rates than training has. Several sets of operands, together
// twice the size of the L2 cache, are used in turn, so that the cache holds no operand from earlier runs.

enum { TUNE_ROUNDS = 7, TUNE_SETS = 16, TUNE_CANDIDATES = LT_WAYS * LT_OFFERS };

// An operand of a product. bytes: from its first to its last element; at: offset of its copy in a set.
struct tuned_operand { const void *data; size_t bytes; tt_dtype dtype; size_t at; };

// Calls each(pointer, bytes, dtype) for all operands of a product that are present.
template <class F> void each_operand(product *g, F each)
{
    const auto matrix = [&](const void **data, tt_dtype dtype, int64_t elements) {
        if (*data) each(data, (size_t)elements * tt_dtype_bytes(dtype), dtype);
    };
    matrix(&g->a, g->a_type, (g->m - 1) * g->a_row + (g->k - 1) * g->a_col + 1);
    matrix(&g->b, g->b_type, (g->k - 1) * g->b_row + (g->n - 1) * g->b_col + 1);
    for (tt__mat *m : {&g->c, &g->pre, &g->saved, &g->residual, &g->sums})
        matrix((const void **)&m->data, m->dtype, (m->rows - 1) * m->ld + m->cols);
    matrix(&g->bias, g->bias_type, g->n);
    matrix((const void **)&g->unscale_a, TT_F32, 1);
    matrix((const void **)&g->unscale_b, TT_F32, 1);
}

// Fills an operand with random numbers in (-1, 1). Both kinds of fp8 get numbers of E4M3, whose bits, read as
// E5M2, are never a NaN.
__global__ void __launch_bounds__(256) random_operand(void *to, tt_dtype dtype, int64_t n, uint32_t seed)
{
    tt__begin_kernel();
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < n; i += (int64_t)gridDim.x * 256) {
        // A hash of i and the seed: Knuth, TAOCP 3, 6.4, and then MurmurHash3's final mix.
        uint32_t u = (uint32_t)i * 2654435761u ^ seed;
        u = (u ^ u >> 16) * 0x85ebca6bu;
        u = (u ^ u >> 13) * 0xc2b2ae35u;
        const float v = (float)(int32_t)(u ^ u >> 16) * 0x1p-31f;
        if (dtype == TT__E4M3 || dtype == TT__E5M2)
            ((unsigned char *)to)[i] = (unsigned char)__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
        else store_any(to, dtype, i, v);
    }
}

// Memory for timing a product: `sets` copies of all its operands.
struct tuning_sets {
    tuned_operand operand[10];
    int operands, sets;
    size_t bytes;    // bytes of one set
    char *memory;    // NULL: not enough memory

    tuning_sets(const tt__device *d, const product &g) : operands(0), sets(0), bytes(0), memory(NULL)
    {
        product of = g;
        each_operand(&of, [&](const void **data, size_t n, tt_dtype dtype) {
            tuned_operand *x = find(*data); // a result may have the memory of an operand
            if (!x) *(x = &operand[operands++]) = {*data, 0, dtype, 0};
            x->bytes = max(x->bytes, n);
        });
        for (int k = 0; k < operands; k++) { // a copy has the address of its operand, modulo 256
            operand[k].at = bytes + (uintptr_t)operand[k].data % TT__CUDA_ALIGN;
            bytes = tt__align_to(operand[k].at + operand[k].bytes, TT__CUDA_ALIGN);
        }
        const size_t fills = (2 * (size_t)d->properties.l2CacheSize + bytes - 1) / bytes;
        sets = (int)max((size_t)1, min(fills, (size_t)TUNE_SETS));
        if (cudaMalloc(&memory, bytes * (size_t)sets) == cudaSuccess) return;
        cudaGetLastError();
        memory = NULL;
    }
    tuning_sets(const tuning_sets &) = delete;
    tuning_sets &operator=(const tuning_sets &) = delete;
    ~tuning_sets() { cudaFree(memory); }

    tuned_operand *find(const void *data)
    {
        for (int k = 0; k < operands; k++) if (operand[k].data == data) return &operand[k];
        return NULL;
    }
    // Returns the product g with the operands of set number `set`.
    product of(const product &g, int set)
    {
        product there = g;
        each_operand(&there, [&](const void **data, size_t, tt_dtype) {
            *data = memory + bytes * (size_t)(set % sets) + find(*data)->at;
        });
        return there;
    }
    cudaError_t fill(tt__device *d) const
    {
        cudaError_t e = cudaSuccess;
        for (int k = 0; k < operands * sets && e == cudaSuccess; k++) {
            const tuned_operand &x = operand[k % operands];
            const int64_t n = (int64_t)(x.bytes / tt_dtype_bytes(x.dtype));
            e = TT__LAUNCH(random_operand, grid_for(n, 2048, 2048), 256, 0, d->stream,
                           memory + bytes * (size_t)(k / operands) + x.at, x.dtype, n, (uint32_t)k * 40503u);
        }
        return e;
    }
};

// A candidate: a way, the number of one of the way's algorithms, and the times that the product took with it.
struct tuning_candidate {
    int way, offer;
    cudaEvent_t begin, end;
    float ms[TUNE_ROUNDS], median;
};

// Makes the product g in the way and with the algorithm of candidate c.
cudaError_t make_candidate(const tt__launch *l, const product &g, const tuning_candidate &c, bool *done)
{
    matmul_form f;
    l->device->trial->way = c.way;
    l->device->trial->offer = c.offer;
    const cudaError_t e = form_of(l, &g, &f);
    return e == cudaSuccess ? matmul_by(l, f, c.way, done) : e;
}

// Lists the candidates that cuBLASLt does not refuse, and makes the product once with each.
cudaError_t list_candidates(const tt__launch *l, const product &g, tuning_candidate *c, int *count)
{
    cudaError_t e = cudaSuccess;
    for (int way = 0; way < LT_WAYS; way++) {
        for (int offer = 0; offer < l->device->trial->of[way].count && e == cudaSuccess; offer++) {
            tuning_candidate *x = &c[*count];
            bool done = false;
            memset(x, 0, sizeof *x);
            x->way = way;
            x->offer = offer;
            e = make_candidate(l, g, *x, &done);
            if (e == cudaSuccess && done) e = cudaEventCreate(&x->begin);
            if (e == cudaSuccess && done) e = cudaEventCreate(&x->end);
            *count += done;
        }
    }
    return e;
}

// Times all candidates once. Fills the operands first: this replaces the contents of the L2 cache, and the
// host meanwhile queues the launches, so that no candidate waits for the host.
cudaError_t time_round(const tt__launch *l, const product &g, tuning_sets *sets, tuning_candidate *c,
                       int count, int round)
{
    tt__device *d = l->device;
    cudaError_t e = sets->fill(d);
    for (int k = 0; k < count && e == cudaSuccess; k++) {
        const product there = sets->of(g, k);
        bool done;
        e = cudaEventRecord(c[k].begin, d->stream);
        if (e == cudaSuccess) e = make_candidate(l, there, c[k], &done);
        if (e == cudaSuccess) e = cudaEventRecord(c[k].end, d->stream);
    }
    if (e == cudaSuccess) e = cudaStreamSynchronize(d->stream);
    for (int k = 0; k < count && e == cudaSuccess; k++)
        e = cudaEventElapsedTime(&c[k].ms[round], c[k].begin, c[k].end);
    return e;
}

void sort(float *x, int n)
{
    for (int k = 1; k < n; k++)
        for (int j = k; j > 0 && x[j] < x[j - 1]; j--) {
            const float less = x[j];
            x[j] = x[j - 1];
            x[j - 1] = less;
        }
}

bool add_tuned(tt__device *d, const tuned_product &x)
{
    tuned_product *more = (tuned_product *)realloc(d->tuned, (size_t)(d->tuned_count + 1) * sizeof *more);
    if (!more) return false;
    d->tuned = more;
    more[d->tuned_count++] = x;
    return true;
}

// Times the candidates of a product and adds the best one to the tuned entries. The best is the candidate
// offered first among those within 1% of the fastest, because timing is no more exact than 1%. Sets *untimed
// to whether memory for the operands was lacking.
cudaError_t time_product(const tt__launch *l, const product &g, bool *untimed)
{
    tt__device *d = l->device;
    tuning_candidate c[TUNE_CANDIDATES];
    tuning_sets sets(d, g);
    int count = 0;
    *untimed = !sets.memory;
    if (*untimed) return cudaSuccess;
    cudaError_t e = sets.fill(d);
    if (e == cudaSuccess) e = list_candidates(l, sets.of(g, 0), c, &count);
    for (int r = 0; r < TUNE_ROUNDS && e == cudaSuccess && count > 1; r++)
        e = time_round(l, g, &sets, c, count, r);
    cudaStreamSynchronize(d->stream); // waits before `sets` frees the memory
    const tuning_candidate *best = NULL;
    for (int k = 0; k < count; k++) {
        for (cudaEvent_t event : {c[k].begin, c[k].end}) if (event) cudaEventDestroy(event);
        sort(c[k].ms, TUNE_ROUNDS);
        c[k].median = c[k].ms[TUNE_ROUNDS / 2];
        if (!best || c[k].median < best->median) best = &c[k];
    }
    for (int k = count - 1; k >= 0; k--) if (c[k].median <= 1.01f * best->median) best = &c[k];
    for (int way = 0; way < LT_WAYS && e == cudaSuccess && best && way <= best->way; way++) {
        const way_trial &of = d->trial->of[way];
        if (!of.asked || of.known) continue;
        tuned_product x;
        memset(&x, 0, sizeof x);
        x.key = of.key;
        x.possible = way == best->way;
        if (x.possible) x.algo = of.algo[best->offer];
        x.met = true;
        if (!add_tuned(d, x)) e = cudaErrorMemoryAllocation;
    }
    return e;
}

// Marks the tuned entries of the product as met by the device's programs. If there are no entries and `times`
// is true, times the product.
cudaError_t tune_product(const tt__launch *l, const product &g, bool times, bool *untimed)
{
    tt__device *d = l->device;
    product_trial trial = {};
    matmul_form f;
    bool known = false, unknown = false, done;
    d->trial = &trial;
    trial.asks = true;
    cudaError_t e = form_of(l, &g, &f);
    for (int way = 0; way < LT_WAYS && e == cudaSuccess && !known; way++) {
        trial.way = way;
        e = matmul_by(l, f, way, &done);
        if (!trial.of[way].asked) continue;
        if (trial.of[way].known) trial.of[way].known->met = true;
        else unknown = true;
        // If true, programs make the product in this way and need no entries for later ways.
        known = !unknown && trial.of[way].known->possible;
    }
    trial.asks = false;
    if (e == cudaSuccess && unknown && times) e = time_product(l, g, untimed);
    d->trial = NULL;
    return e;
}

// Adds to `to` the products that a launch would make. The stream is captured meanwhile, so that no kernel of
// the launch runs.
cudaError_t collect_products(const tt__launch *l, cudaError_t (*run)(const tt__launch *l),
                             collected_products *to)
{
    tt__device *d = l->device;
    cudaGraph_t graph = NULL;
    cudaError_t e = cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal);
    if (e != cudaSuccess) return e;
    d->collected = to;
    e = run(l);
    d->collected = NULL;
    const cudaError_t ended = cudaStreamEndCapture(d->stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    return e != cudaSuccess ? e : ended;
}

void forget_choices(tt__device *d)
{
    if (d->choices) memset(d->choices, 0, TT__PRODUCT_CHOICES * sizeof *d->choices);
    d->choice_count = 0;
}

// ---- tuned entries as text: a title, a line about the device, a line for each tuned product, a last line

void append(text_buffer *text, const char *format, ...) TT_PRINTF(2, 3);
// Appends text as printf does; text->length also counts what does not fit.
void append(text_buffer *text, const char *format, ...)
{
    va_list args;
    const size_t room = text->length < text->capacity ? text->capacity - text->length : 0;
    va_start(args, format);
    const int n = vsnprintf(room ? text->to + text->length : NULL, room, format, args);
    va_end(args);
    if (n > 0) text->length += (size_t)n;
}

#define TT__TUNED_TITLE "tinytrain: the fastest products, version 1"

// Writes the line of a file of tuned products that names the device. The meaning of an algorithm's 64 bytes
// depends only on the version of cuBLASLt, but the choice of the fastest algorithm depends on the device.
void tuned_device(const tt__device *d, char to[512])
{
    snprintf(to, 512, "%s, compute capability %d.%d, %d multiprocessors, cuBLASLt %llu, workspace %llu",
             d->properties.name, d->properties.major, d->properties.minor, d->properties.multiProcessorCount,
             (unsigned long long)cublasLtGetVersion(), (unsigned long long)resident_workspace::LT_BYTES);
}

enum { TUNED_NUMBERS = 23 };
typedef char algorithm_is_64_bytes[sizeof(cublasLtMatmulAlgo_t) == 64 ? 1 : -1];

// Sets n to the fields of a key, in the order in which a line of the text has them.
void numbers_of(const product_key &k, int64_t (&n)[TUNED_NUMBERS])
{
    const int64_t all[TUNED_NUMBERS] = {
        k.m, k.n, k.k, k.lda, k.ldb, k.ldc, k.ldd, k.ld_aux, k.a_type, k.b_type, k.to_type, k.epilogue,
        k.alignment[0], k.alignment[1], k.alignment[2], k.alignment[3], k.alignment[4], k.alignment[5],
        k.a_plain, k.b_plain, k.adds, k.tf32, k.sums_rows};
    memcpy(n, all, sizeof n);
}

// Sets a key from numbers of the text; returns false if no key can have these numbers.
bool key_from(const int64_t (&n)[TUNED_NUMBERS], product_key *k)
{
    int64_t again[TUNED_NUMBERS];
    memset(k, 0, sizeof *k);
    k->m = n[0]; k->n = n[1]; k->k = n[2]; k->lda = n[3]; k->ldb = n[4]; k->ldc = n[5]; k->ldd = n[6];
    k->ld_aux = n[7]; k->a_type = (int)n[8]; k->b_type = (int)n[9]; k->to_type = (int)n[10];
    k->epilogue = (int)n[11];
    for (int j = 0; j < 6; j++) k->alignment[j] = (uint16_t)n[12 + j];
    k->a_plain = n[18] != 0; k->b_plain = n[19] != 0; k->adds = n[20] != 0; k->tf32 = n[21] != 0;
    k->sums_rows = n[22] != 0;
    k->tuned = true;
    numbers_of(*k, again);
    return memcmp(n, again, sizeof n) == 0 && k->m > 0 && k->n > 0 && k->k > 0;
}

size_t cuda_tuned_text(tt__device *d, char *to, size_t capacity)
{
    text_buffer text = {to, capacity, 0};
    char device[512];
    tuned_device(d, device);
    append(&text, TT__TUNED_TITLE "\n%s\n", device);
    for (int j = 0; j < d->tuned_count; j++) {
        const tuned_product &x = d->tuned[j];
        int64_t n[TUNED_NUMBERS];
        uint64_t words[8];
        numbers_of(x.key, n);
        memcpy(words, &x.algo, sizeof words);
        for (int64_t number : n) append(&text, "%lld ", (long long)number);
        if (!x.possible) append(&text, "slower\n");
        for (int k = 0; k < 8 && x.possible; k++)
            append(&text, "%016llx%s", (unsigned long long)words[k], k < 7 ? " " : "\n");
    }
    append(&text, "%d products\n", d->tuned_count);
    return text.length;
}

// Reads a tuned entry from a line of the text without its newline. Returns NULL, or a message that says what
// is wrong with the line.
const char *read_tuned(const char *line, tuned_product *x)
{
    int64_t n[TUNED_NUMBERS];
    uint64_t words[8];
    const char *at = line;
    memset(x, 0, sizeof *x);
    for (int k = 0; k < TUNED_NUMBERS; k++) {
        char *end;
        errno = 0;
        n[k] = strtoll(at, &end, 10);
        if (*at < '0' || *at > '9' || errno || *end != ' ') return "it does not begin with 23 numbers";
        at = end + 1;
    }
    if (!key_from(n, &x->key)) return "its numbers describe no matrix product";
    if (strcmp(at, "slower") == 0) return NULL;
    for (int k = 0; k < 8; k++) {
        const bool hex = strspn(at, "0123456789abcdef") == 16;
        if (!hex || at[16] != (k < 7 ? ' ' : 0))
            return "it ends neither with 'slower' nor with 8 numbers of 16 hexadecimal digits";
        words[k] = strtoull(at, NULL, 16);
        at += 17;
    }
    memcpy(&x->algo, words, sizeof words);
    x->possible = true;
    return NULL;
}

// Reads a text of tuned entries: does the work of tt__backend.learn.
tt_status cuda_learn(tt__device *d, const char *text, int *line)
{
    char device[512], now[1024];
    tuned_product *const before = d->tuned;
    const int count_before = d->tuned_count;
    const char *wrong = NULL;
    bool ended = false;
    tt_status status = TT_OK;
    tuned_device(d, device);
    d->tuned = NULL;
    d->tuned_count = 0;
    *line = 0;
    for (const char *at = text; !wrong && status == TT_OK && !ended;) {
        const size_t length = strcspn(at, "\n");
        tuned_product x;
        ++*line;
        if (length >= sizeof now || !at[length]) {
            wrong = !at[length] ? "it is cut off" : "it is too long";
            break;
        }
        memcpy(now, at, length);
        now[length] = 0;
        at += length + 1;
        char last[64];
        snprintf(last, sizeof last, "%d products", d->tuned_count);
        if (*line == 1 && strcmp(now, TT__TUNED_TITLE) != 0) wrong = "it is not '" TT__TUNED_TITLE "'";
        else if (*line == 2 && strcmp(now, device) != 0)
            status = fail(d, TT_ERR_UNSUPPORTED,
                          "it was made on '%.200s', but this device is '%.200s': name another file", now,
                          device);
        else if (*line > 2 && strcmp(now, last) == 0) {
            ended = true;
            if (*at) wrong = "there is text after the last line";
        } else if (*line > 2) {
            wrong = read_tuned(now, &x);
            if (!wrong && tuned_of(d, x.key)) wrong = "an earlier line has the same product";
            if (!wrong && !add_tuned(d, x)) status = fail(d, TT_ERR_MEMORY, "out of memory: free memory");
        }
    }
    if (wrong) status = fail(d, TT_ERR_FORMAT, "%s: the file is damaged; remove it, or use another", wrong);
    free(status == TT_OK ? before : d->tuned);
    if (status == TT_OK) {
        forget_choices(d);
        return TT_OK;
    }
    d->tuned = before;
    d->tuned_count = count_before;
    return status;
}

} // namespace

/* ==== src/ops/linear/cuda.cuh */
namespace {

// --------------------------------------------------------------------------------------------- linear layers

// Sets A and B of the product of l if they are fp8. The rows of both matrices then run along k and are padded
// with zeros to a multiple of 16.
void read_fp8(const tt__launch *l, product *g)
{
    if (!tt__is_fp8(g->a_type)) return;
    g->k = (g->k + 15) / 16 * 16;
    g->a_row = l->in[0].ld; g->a_col = 1;
    g->b_row = 1; g->b_col = l->in[1].ld;
    g->unscale_a = (const float *)l->in[TT__UNSCALE_IN].data;
    g->unscale_b = (const float *)l->in[TT__UNSCALE_IN + 1].data;
}

product linear_of(const tt__mat *x, const tt__mat *w, const tt__mat *b, const tt__mat *y)
{
    product g;
    memset(&g, 0, sizeof g);
    g.m = x->rows; g.n = w->rows; g.k = x->cols;
    g.a = x->data; g.a_type = x->dtype; g.a_row = x->ld; g.a_col = 1;
    g.b = w->data; g.b_type = w->dtype; g.b_row = 1; g.b_col = w->ld;
    g.c = *y;
    g.bias = b->data; g.bias_type = b->dtype;
    return g;
}

product linear_dx_of(const tt__mat *dy, const tt__mat *w, const tt__mat *dx, bool add)
{
    product g;
    memset(&g, 0, sizeof g);
    g.m = dy->rows; g.n = w->cols; g.k = dy->cols;
    g.a = dy->data; g.a_type = dy->dtype; g.a_row = dy->ld; g.a_col = 1;
    g.b = w->data; g.b_type = w->dtype; g.b_row = w->ld; g.b_col = 1;
    g.c = *dx;
    g.accumulate = add;
    return g;
}

cudaError_t linear(const tt__launch *l, const tt__mat *x, const tt__mat *w, const tt__mat *b,
                   const tt__mat *y)
{
    product g = linear_of(x, w, b, y);
    return matmul(l, &g);
}

cudaError_t linear_dx(const tt__launch *l, const tt__mat *dy, const tt__mat *w, const tt__mat *dx, bool add)
{
    product g = linear_dx_of(dy, w, dx, add);
    return matmul(l, &g);
}

cudaError_t run_sum_rows(const tt__launch *l)
{
    return run_column_sums(l, &l->in[0], &l->out[0], l->add[0]);
}
TT__RUN_BY(SUM_ROWS, run_sum_rows)

cudaError_t linear_dw(const tt__launch *l, const tt__mat *dy, const tt__mat *x,
                      const tt__mat *dw, const tt__mat *db, bool add_w, bool add_b)
{
    product g;
    memset(&g, 0, sizeof g);
    g.m = dy->cols; g.n = x->cols; g.k = dy->rows;
    g.sums_rows = true;
    g.a = dy->data; g.a_type = dy->dtype; g.a_row = 1; g.a_col = dy->ld;
    g.b = x->data; g.b_type = x->dtype; g.b_row = x->ld; g.b_col = 1;
    g.c = *dw;
    g.accumulate = add_w;
    read_fp8(l, &g);
    g.sums = *db; // the product may compute the sums of dy, as it reads dy anyway
    g.add_sums = add_b;
    if (dw->data) return matmul(l, &g);
    return db->data ? run_column_sums(l, dy, db, add_b) : cudaSuccess;
}

cudaError_t run_linear(const tt__launch *l)
{
    tt__mat w;
    const cudaError_t e = widened(l, &w);
    if (e != cudaSuccess) return e;
    product g = linear_of(&l->in[0], &w, &l->in[2], &l->out[0]);
    read_fp8(l, &g);
    g.act = l->instr->attr.act;
    g.pre = l->out[1];
    g.residual = l->in[3];
    g.accumulate = l->add[0];
    return is_few(l) ? run_coded_few(l, &g) : matmul(l, &g);
}
TT__RUN_BY(LINEAR, run_linear)

cudaError_t run_linear_dx(const tt__launch *l)
{
    tt__mat w;
    const cudaError_t e = widened(l, &w);
    if (e != cudaSuccess) return e;
    product g = linear_dx_of(&l->in[0], &w, &l->out[0], l->add[0]);
    read_fp8(l, &g);
    g.act = l->instr->attr.act;
    g.saved = l->in[2];
    g.sums = l->out[1];
    g.add_sums = l->add[1];
    return matmul(l, &g);
}
TT__RUN_BY(LINEAR_DX, run_linear_dx)

cudaError_t run_linear_dw(const tt__launch *l)
{
    return linear_dw(l, &l->in[0], &l->in[1], &l->out[0], &l->out[1], l->add[0], l->add[1]);
}
TT__RUN_BY(LINEAR_DW, run_linear_dw)

// Writes attr.beyond to the columns of out[0] from number `first` on.
cudaError_t fill_beyond(const tt__launch *l, int64_t first)
{
    const tt__mat *y = &l->out[0];
    const float beyond = l->instr->attr.beyond, lowest = y->dtype == TT_F16 ? -65504.0f : beyond;
    if (first >= y->cols) return cudaSuccess;
    return run_groups(l->device, no_operand, no_operand, columns_of(y, first, y->cols - first), false, true,
                      op_fill{max(beyond, lowest), NULL});
}

cudaError_t run_matmul(const tt__launch *l)
{
    const tt__mat *a = &l->in[0], *b = &l->in[1];
    if (l->instr->attr.untransposed) {
        product g = linear_dx_of(a, b, &l->out[0], l->add[0]);
        g.k = b->rows;
        return matmul(l, &g);
    }
    const tt__mat y = columns_of(&l->out[0], 0, b->rows);
    product g = linear_of(a, b, &no_operand, &y);
    g.accumulate = l->add[0];
    const cudaError_t e = matmul(l, &g);
    return e == cudaSuccess && !l->add[0] ? fill_beyond(l, b->rows) : e;
}
TT__RUN_BY(MATMUL, run_matmul)

cudaError_t run_matmul_db(const tt__launch *l)
{
    const tt__mat a = columns_of(&l->in[0], 0, l->out[0].rows);
    return linear_dw(l, &a, &l->in[1], &l->out[0], &no_operand, l->add[0], false);
}
TT__RUN_BY(MATMUL_DB, run_matmul_db)

} // namespace

/* ==== src/ops/fp8/cuda.cuh */
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

/* ==== src/ops/kernels.cuh */
namespace {

// ======================================================================================= table of kernels

op_kernels kernels_of(int op)
{
#define TT__KERNELS(OP, name, inputs, outputs, flags) kernels_of<TT__OP_##OP>(),
    static const op_kernels table[] = {TT__OPS(TT__KERNELS)};
#undef TT__KERNELS
    return table[op];
}

const char *name_of(int op)
{
#define TT__OP_NAME(OP, name, inputs, outputs, flags) name,
    static const char *const names[] = {TT__OPS(TT__OP_NAME)};
#undef TT__OP_NAME
    return names[op];
}

const char *cuda_refuses(int index, const tt__launch *l)
{
    const op_kernels kernels = kernels_of(l->instr->op);
    if (!kernels.run && !kernels.together) return "CUDA has no kernel for it; the CPU has (device 'cpu')";
    int major = 9, minor = 0; // the compute capability that is assumed if there is no device
    if (tt__is_fp8(l->in[0].dtype)) {
        if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) != cudaSuccess ||
            cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index) != cudaSuccess)
            (void)cudaGetLastError(); // without a device, programs can still be planned
        if (major * 10 + minor < 89) return "matmul 'fp8' needs a GPU of compute capability 8.9 or more";
    }
    for (const tt__mat &m : l->in) {
        if (kernels.max_cols && m.cols > kernels.max_cols)
            return "the CUDA backend's kernel for it takes at most 2^20 columns: make the width smaller";
        if (kernels.max_rows && m.rows > kernels.max_rows)
            return "the CUDA backend's kernel for it takes at most 2^27 rows: make the batch smaller";
    }
    return NULL;
}

cudaError_t run_all(const tt__launch *l, int n)
{
    const op_kernels kernels = kernels_of(l->instr->op);
    cudaError_t e = cudaSuccess;
    if (kernels.together) return kernels.together(l, n);
    if (n == 2 && l[1].instr->op != l->instr->op) return run_with_dropout(l);
    for (int k = 0; k < n && e == cudaSuccess; k++) e = kernels.run(&l[k]);
    return e;
}

// Implements tt__backend.tune.
tt_status cuda_tune(const tt__launch *l, int n, bool times, int *untimed)
{
    tt__device *d = l->device;
    const op_kernels kernels = kernels_of(l->instr->op);
    const int tuned = d->tuned_count;
    cudaError_t e = cudaSuccess;
    if (!use(d)) return TT_ERR_DEVICE;
    d->error[0] = 0;
    for (int k = 0; k < n && e == cudaSuccess && kernels.run; k++) {
        collected_products found = {};
        e = collect_products(&l[k], kernels.run, &found);
        for (int j = 0; j < found.count && e == cudaSuccess; j++) {
            bool short_of_memory = false;
            e = tune_product(&l[k], found.list[j], times, &short_of_memory);
            *untimed += short_of_memory;
        }
        free(found.list);
    }
    if (d->tuned_count != tuned) forget_choices(d);
    if (e == cudaSuccess) return TT_OK;
    return d->error[0] ? TT_ERR_DEVICE : check(d, e, "timing of products");
}

tt_status cuda_launch(const tt__launch *l, int n)
{
    tt__device *d = l->device;
    char what[128];
    if (!use(d) || !stream_of(l)) return TT_ERR_DEVICE;
    d->error[0] = 0;
    cudaError_t e = run_all(l, n);
    const bool launched = e == cudaSuccess;
    if (launched && d->waits) e = cudaStreamSynchronize(stream_of(l));
    if (e == cudaSuccess) return TT_OK;
    if (d->error[0]) return TT_ERR_DEVICE; // the op has set a more precise error
    snprintf(what, sizeof what, "%s of %s, whose result has %lld rows and %lld columns",
             launched ? "run" : "launch", name_of(l->instr->op), (long long)l->out[0].rows,
             (long long)l->out[0].cols);
    return check(d, e, what);
}

} // namespace

extern "C" const tt__backend tt__cuda_backend = {
    cuda_open, cuda_close, cuda_error, cuda_allocate, cuda_release, cuda_allocate_managed, cuda_keep,
        cuda_prefetch, cuda_allocate_host, cuda_release_host, cuda_copy, cuda_fill, cuda_init, cuda_read,
        cuda_wait, cuda_mark, cuda_after, cuda_release_event, cuda_launch, cuda_capture, cuda_captured,
        cuda_replay, cuda_forget, cuda_refuses, cuda_describe, cuda_peer, cuda_stage, cuda_available,
        cuda_tune, cuda_tuned_text, cuda_learn, };

#endif // TT__PORTABILITY_ONLY
