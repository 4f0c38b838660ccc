#pragma once
#include "system.cuh"

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
