// cuda_emu.h - enough of CUDA for a C++17 compiler to build tinytrain_cuda.cu, and to run it on a CPU as an
// adversary would.
//
// This is a test double, never a backend. CUDA leaves much open: the order of threads, warps, blocks and of
// operations of different streams; what fresh memory holds; when an asynchronous copy reads its source. For
// each seed the emulator makes another legal choice, so that a missing barrier or event shows as a wrong
// result. Many mistakes it reports itself, with one message that begins `emu error:` and exit status 86.
// There are three builds of one runtime:
//
//     plain   divergence, far accesses, writes beyond an allocation, missing peer access, host code in device
//             memory, stack overflow
//     asan    -fsanitize=address,undefined: also reads beyond allocations, use after free, misaligned
//             vectors, undefined arithmetic
//     trace   the .cu (not the runtime) with -fsanitize=thread, linked with our own __tsan_* functions and
//             not with libtsan: every load and store of a kernel is checked for bounds, for memory never
//             written, and for races within a block, between blocks and between operations. Vector clocks
//             tell which operations are ordered. The host's accesses to pinned memory are checked, too.
//             Messages have the file and the line
//
//     c++ -std=c++17 -g -O2 -I tests/cuda_emu -x c++ my.cu -x none cuda_emu.o cuda_emu_blas.o -lpthread
//
// How it works. All device work runs on the host thread that synchronises or enqueues, under one lock.
// Threads of a block are fibers. Streams are chains in a graph of operations, from which a seeded scheduler
// picks the next operation. See emu_control.h for what a test can set and ask.
//
// Rules for the .cu. A violation does not compile, or is reported, or makes results differ from a GPU's:
//   1. Launch with TT__LAUNCH; declare shared memory with TT__SHARED and TT__DYN_SHARED; inline assembly only
//      in the portability block.
//   2. No __device__ or __constant__ variables, no static variables in kernels: virtual devices would share
//      them.
//   3. Blocks are multiples of 32 threads. Every thread reaches every __syncthreads; every lane of a mask
//      reaches its warp operation. Shuffles do not order memory, __syncwarp does.
//   4. A kernel does not wait for other blocks, devices or the host, and two blocks make no plain accesses to
//      an address that one of them writes.
//   5. 16-bit and 8-bit floats have no arithmetic: convert, compute in float, convert back.
//   6. No memcpy or memset of device memory in kernels; vector accesses through float4 and similar types.
//   7. Managed memory belongs to the device that was current when it was allocated; other devices need peer
//      access to it. The host touches it only after waiting for all operations.
#ifndef TT_CUDA_EMU_H
#define TT_CUDA_EMU_H
#ifdef __CUDACC__
#error "cuda_emu.h is for plain C++ compilers; take its folder out of nvcc's include path"
#endif
#ifndef TT_EMULATE
#define TT_EMULATE 1
#endif
#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include "emu_control.h"

// ========================================================================= language
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__
#define __shared__ static_assert(false, "shared memory is declared with TT__SHARED or TT__DYN_SHARED");
#define __constant__ static_assert(false, "no __constant__ variables: virtual devices would share them");
// __noinline__ is not defined, because libstdc++ spells __attribute__((__noinline__)).

// Default arguments: the file and line of the caller. So calls need no macro.
#define EMU_HERE const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
// Hides a function from the trace build. noinline, because inlined code is instrumented with the caller.
#define EMU_UNTRACED __attribute__((no_sanitize("thread"), noinline))

#define TT__UNROLL
#define TT__ROLLED
// Declares a shared array, TT__SHARED(float, tile, [32][33]), or scalar, TT__SHARED(int, count, ).
#define TT__SHARED(T, name, dims) \
    static char name##_key; \
    using name##_type = T dims; \
    name##_type &name = *(name##_type *)emu_shared(&name##_key, sizeof(name##_type), #name)
// Declares a pointer to the launch's dynamic shared memory, which is aligned to 128 bytes.
#define TT__DYN_SHARED(T, name) T *name = (T *)emu_dynamic_shared()
// TT__LAUNCH(kernel, grid, block, shared bytes, stream, arguments...) launches a kernel and returns a
// cudaError_t. A template goes in parentheses: (kernel<64, 2>). The stream may be a tt__stream. If the
// tt__stream chains, a thread that ends without tt__begin_kernel is an error. In the trace build, any access
// to memory before tt__begin_kernel is an error, too.
#define TT__LAUNCH(kernel, grid, block, shared, ...) \
    emu_launch_kernel(#kernel, kernel, grid, block, shared, __VA_ARGS__)

// ========================================================================= vector types
struct uint3 { unsigned x, y, z; };
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
#define EMU_VECTORS(T, name, align2, align4) \
    struct alignas(align2) name##2 { T x, y; }; \
    struct name##3 { T x, y, z; }; \
    struct alignas(align4) name##4 { T x, y, z, w; }; \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define uint3 emu_uint3 // emu_uint3, because uint3 is defined above: threadIdx needs the whole type
EMU_VECTORS(float, float, 8, 16)
EMU_VECTORS(int, int, 8, 16)
EMU_VECTORS(unsigned, uint, 8, 16)
EMU_VECTORS(short, short, 4, 8)
EMU_VECTORS(unsigned short, ushort, 4, 8)
EMU_VECTORS(unsigned char, uchar, 2, 4)
EMU_VECTORS(long long, longlong, 16, 16)
EMU_VECTORS(double, double, 16, 16)
#undef uint3

// ========================================================================= runtime API: types
#define EMU_ERRORS(X) \
    X(cudaSuccess, 0, "no error") \
    X(cudaErrorInvalidValue, 1, "an argument is out of range") \
    X(cudaErrorMemoryAllocation, 2, "out of memory") \
    X(cudaErrorInitializationError, 3, "CUDA could not be initialised") \
    X(cudaErrorInvalidConfiguration, 9, "the launch asks for more than the device has") \
    X(cudaErrorInvalidPitchValue, 12, "a pitch is smaller than the width") \
    X(cudaErrorInvalidMemcpyDirection, 21, "the direction of the copy is not one") \
    X(cudaErrorInsufficientDriver, 35, "the driver is older than the runtime") \
    X(cudaErrorInvalidDeviceFunction, 98, "the function is not a kernel of this device") \
    X(cudaErrorNoDevice, 100, "there is no CUDA device") \
    X(cudaErrorInvalidDevice, 101, "there is no device with this number") \
    X(cudaErrorNoKernelImageForDevice, 209, "there is no code of the kernel for this device") \
    X(cudaErrorPeerAccessUnsupported, 217, "the devices cannot reach each other's memory") \
    X(cudaErrorECCUncorrectable, 214, "memory lost its contents") \
    X(cudaErrorInvalidResourceHandle, 400, "the handle is not valid here") \
    X(cudaErrorIllegalState, 401, "what the call needs is not in a state for it") \
    X(cudaErrorNotReady, 600, "the work is not done yet") \
    X(cudaErrorIllegalAddress, 700, "a kernel used an address that it may not") \
    X(cudaErrorLaunchOutOfResources, 701, "a launch asked for too many resources") \
    X(cudaErrorLaunchTimeout, 702, "a kernel took too long") \
    X(cudaErrorPeerAccessAlreadyEnabled, 704, "peer access is on already") \
    X(cudaErrorPeerAccessNotEnabled, 705, "peer access is not on") \
    X(cudaErrorHostMemoryAlreadyRegistered, 712, "the host memory is registered already") \
    X(cudaErrorHostMemoryNotRegistered, 713, "the host memory is not registered") \
    X(cudaErrorAssert, 710, "an assertion in a kernel failed") \
    X(cudaErrorHardwareStackError, 714, "a kernel broke its stack") \
    X(cudaErrorIllegalInstruction, 715, "a kernel had an illegal instruction") \
    X(cudaErrorMisalignedAddress, 716, "a kernel used an address that is not aligned") \
    X(cudaErrorInvalidAddressSpace, 717, "a kernel used an address of another space") \
    X(cudaErrorInvalidPc, 718, "a kernel jumped out of its code") \
    X(cudaErrorLaunchFailure, 719, "a kernel failed") \
    X(cudaErrorNotSupported, 801, "not supported") \
    X(cudaErrorStreamCaptureUnsupported, 900, "not allowed while a stream is captured") \
    X(cudaErrorStreamCaptureInvalidated, 901, "an earlier error made the capture invalid") \
    X(cudaErrorStreamCaptureMerge, 902, "two captures would merge") \
    X(cudaErrorStreamCaptureUnmatched, 903, "the capture did not begin on this stream") \
    X(cudaErrorStreamCaptureUnjoined, 904, "a stream forked off in the capture was not joined") \
    X(cudaErrorStreamCaptureIsolation, 905, "a dependency crosses the border of the capture") \
    X(cudaErrorStreamCaptureImplicit, 906, "the legacy stream cannot take part in a capture") \
    X(cudaErrorCapturedEvent, 907, "the event was last recorded in a capture") \
    X(cudaErrorStreamCaptureWrongThread, 908, "the capture began on another thread") \
    X(cudaErrorGraphExecUpdateFailure, 910, "the graph cannot be updated in place") \
    X(cudaErrorUnknown, 999, "unknown error")
#define EMU_ERROR_ENUM(name, number, text) name = number,
enum cudaError { EMU_ERRORS(EMU_ERROR_ENUM) };
typedef enum cudaError cudaError_t;

#define CUDART_VERSION 13000
#define __CUDA_ARCH_LIST__ 900

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum {
    cudaStreamDefault = 0,
    cudaStreamNonBlocking = 1,
    cudaEventDefault = 0,
    cudaEventBlockingSync = 1,
    cudaEventDisableTiming = 2
};
enum {
    cudaHostAllocDefault = 0,
    cudaHostAllocPortable = 1,
    cudaHostAllocMapped = 2,
    cudaHostAllocWriteCombined = 4
};
enum {
    cudaHostRegisterDefault = 0,
    cudaHostRegisterPortable = 1,
    cudaHostRegisterMapped = 2,
    cudaHostRegisterReadOnly = 8
};
enum { cudaMemAttachGlobal = 1, cudaMemAttachHost = 2 };
enum cudaMemoryAdvise {
    cudaMemAdviseSetReadMostly = 1,
    cudaMemAdviseUnsetReadMostly,
    cudaMemAdviseSetPreferredLocation,
    cudaMemAdviseUnsetPreferredLocation,
    cudaMemAdviseSetAccessedBy,
    cudaMemAdviseUnsetAccessedBy
};
enum cudaMemLocationType {
    cudaMemLocationTypeInvalid,
    cudaMemLocationTypeDevice,
    cudaMemLocationTypeHost
};
struct cudaMemLocation { cudaMemLocationType type; int id; };
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated
};
enum cudaGraphExecUpdateResult {
    cudaGraphExecUpdateSuccess,
    cudaGraphExecUpdateError,
    cudaGraphExecUpdateErrorTopologyChanged,
    cudaGraphExecUpdateErrorNodeTypeChanged,
    cudaGraphExecUpdateErrorFunctionChanged,
    cudaGraphExecUpdateErrorParametersChanged,
    cudaGraphExecUpdateErrorNotSupported
};
enum cudaMemoryType {
    cudaMemoryTypeUnregistered,
    cudaMemoryTypeHost,
    cudaMemoryTypeDevice,
    cudaMemoryTypeManaged
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrConcurrentKernels = 31,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrGlobalMemoryBusWidth = 37,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrAsyncEngineCount = 40,
    cudaDevAttrUnifiedAddressing = 41,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrConcurrentManagedAccess = 89,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
typedef struct emu_stream *cudaStream_t;
typedef struct emu_event *cudaEvent_t;
typedef struct emu_graph *cudaGraph_t;
typedef struct emu_graph_exec *cudaGraphExec_t;
typedef struct emu_node *cudaGraphNode_t;
typedef void (*cudaHostFn_t)(void *);
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor,
        regsPerBlock, l2CacheSize, asyncEngineCount;
    int concurrentKernels, unifiedAddressing, canMapHostMemory, pciBusID, pciDeviceID, pciDomainID;
};
struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, maxDynamicSharedSizeBytes, ptxVersion;
};
struct cudaPointerAttributes { cudaMemoryType type; int device; void *devicePointer, *hostPointer; };
struct cudaGraphExecUpdateResultInfo {
    cudaGraphExecUpdateResult result;
    cudaGraphNode_t errorNode, errorFromNode;
};

// ========================================================================= runtime API: functions
const char *cudaGetErrorName(cudaError_t e);
const char *cudaGetErrorString(cudaError_t e);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr a, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceDisablePeerAccess(int peer);
cudaError_t cudaDeviceGetStreamPriorityRange(int *min, int *greatest);

cudaError_t cudaMalloc(void **p, size_t n);
cudaError_t cudaFree(void *p);
cudaError_t cudaMemGetInfo(size_t *available, size_t *total);
cudaError_t cudaMallocManaged(void **p, size_t n, unsigned flags = cudaMemAttachGlobal);
cudaError_t cudaMemAdvise(const void *p, size_t n, cudaMemoryAdvise advice, cudaMemLocation location);
cudaError_t cudaMemPrefetchAsync(const void *p, size_t n, cudaMemLocation location, unsigned flags,
                                 cudaStream_t s = 0);
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags);
cudaError_t cudaHostUnregister(void *p);
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p);
inline cudaError_t cudaMallocHost(void **p, size_t n) { return cudaHostAlloc(p, n, 0); }
template <class T> cudaError_t cudaMalloc(T **p, size_t n) { return cudaMalloc((void **)p, n); }
template <class T> cudaError_t cudaMallocManaged(T **p, size_t n, unsigned flags = cudaMemAttachGlobal)
{
    return cudaMallocManaged((void **)p, n, flags);
}
template <class T> cudaError_t cudaMallocHost(T **p, size_t n) { return cudaHostAlloc((void **)p, n, 0); }
template <class T> cudaError_t cudaHostAlloc(T **p, size_t n, unsigned flags)
{
    return cudaHostAlloc((void **)p, n, flags);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind kind, cudaStream_t s = 0);
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                         size_t height, cudaMemcpyKind kind);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t s = 0);
cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t n);
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t n,
                                cudaStream_t s = 0);
cudaError_t cudaMemset(void *p, int value, size_t n);
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s = 0);

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority);
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    return cudaStreamCreateWithPriority(s, flags, 0);
}
inline cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaStreamQuery(cudaStream_t s);
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *user);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
inline cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s = 0);
cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaEventQuery(cudaEvent_t e);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to);

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g);
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *status);
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long flags = 0);
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t x, cudaGraph_t g, cudaGraphExecUpdateResultInfo *info);
cudaError_t cudaGraphUpload(cudaGraphExec_t x, cudaStream_t s);
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s);
cudaError_t cudaGraphDestroy(cudaGraph_t g);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x);

// ========================================================================= calls of the emulator
[[noreturn]] void emu_fatal(const char *format, ...) __attribute__((format(printf, 1, 2)));
struct tt__stream { cudaStream_t it; bool chains; operator cudaStream_t() const { return it; } };
struct emu_any_stream {
    cudaStream_t it;
    bool chains;
    emu_any_stream(cudaStream_t s) : it(s), chains(false) {}
    template <class S, class = std::enable_if_t<std::is_convertible<const S &, cudaStream_t>::value>>
    emu_any_stream(const S &s) : it(s), chains(false) {} // takes types that convert to a stream
    emu_any_stream(const tt__stream &s) : it(s.it), chains(s.chains) {}
};
cudaError_t emu_launch(const char *name, const void *kernel, dim3 grid, dim3 block, size_t shared,
                       emu_any_stream s, std::function<void()> body);
cudaError_t emu_function_set(const void *kernel, cudaFuncAttribute a, int value);
cudaError_t emu_function_get(cudaFuncAttributes *a, const void *kernel);
cudaError_t emu_occupancy(int *blocks, const void *kernel, int threads, size_t shared);
void emu_kernel_begins();
void *emu_shared(void *key, size_t n, const char *name);
void *emu_dynamic_shared();
int emu_lane();
void emu_block_barrier(const char *file, int line);
int emu_block_vote(int predicate, int how, const char *file, int line); // how: 0, count; 1, and; 2, or
void emu_shuffle(unsigned mask, const void *in, void *out, size_t n, int from, const char *file, int line);
unsigned emu_ballot(unsigned mask, int predicate, const char *file, int line);
unsigned emu_match(unsigned mask, unsigned v, const char *file, int line);
// how: '+', '&', '|' or '^'; for the min or max of signed numbers '<' or '>', of unsigned '(' or ')'
unsigned emu_reduce(unsigned mask, unsigned v, int how, const char *file, int line);
void emu_warp_barrier(unsigned mask, const char *file, int line);
void emu_mma_16816(float *d, const uint32_t *a, const uint32_t *b, bool half, const char *file, int line);
void emu_mma_1688_tf32(float *d, const uint32_t *a, const uint32_t *b, const char *file, int line);
void emu_ldmatrix(uint32_t *r, int matrices, bool transposed, const void *row, const char *file, int line);
void emu_cp_async(void *to, const void *from, int n, int bytes, const char *file, int line);
void emu_cp_async_commit();
void emu_cp_async_wait(int groups_left, const char *file, int line);
uint32_t emu_shared_address(const void *p);
// The places of the operands of a warpgroup's product. REGISTERS: a is in registers. ROWS: a is in shared
// memory at `rows`, and the rows of a and b run along the summed dimension. ACROSS: the rows of a and b run
// across the summed dimension. tiles: number of tiles of 8 columns of d, 8 or 16.
enum emu_wide { EMU_WIDE_REGISTERS, EMU_WIDE_ROWS, EMU_WIDE_ACROSS };
void emu_wgmma(emu_wide how, float *d, int tiles, const uint32_t *a, uint32_t rows, uint32_t b, bool add,
               bool half,
               const char *file, int line);
void emu_wgmma_fence();
void emu_wgmma_commit();
void emu_wgmma_wait(int groups_left, const char *file, int line);
void emu_wgmma_publish();
void emu_phases_init(uint64_t *barrier, int count, const char *file, int line);
void emu_phases_arrive(uint64_t *barrier, bool with_copies, const char *file, int line);
void emu_phases_wait(uint64_t *barrier, int parity, const char *file, int line);
void emu_atomic(void *p, size_t n, const char *file, int line);

template <class... P, class... A> cudaError_t emu_launch_kernel(const char *name, void (*kernel)(P...),
                                                                dim3 grid, dim3 block, size_t shared,
                                                                emu_any_stream s, A &&...arguments)
{
    // Copies the arguments with the parameters' types, as <<<>>> does.
    std::tuple<std::decay_t<P>...> copies(std::forward<A>(arguments)...);
    return emu_launch(name, (const void *)kernel, grid, block, shared, s, [kernel, copies] {
        // The thread copies the arguments to its own stack, so that only the kernel reads other memory later.
        void (*function)(P...) = kernel;
        std::tuple<std::decay_t<P>...> own = copies;
        emu_kernel_begins();
        std::apply(function, std::move(own));
    });
}
template <class F> cudaError_t cudaFuncSetAttribute(F *kernel, cudaFuncAttribute a, int value)
{
    return emu_function_set((const void *)kernel, a, value);
}
template <class F> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, F *kernel)
{
    return emu_function_get(a, (const void *)kernel);
}
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F *kernel, int threads, size_t shared)
{
    return emu_occupancy(blocks, (const void *)kernel, threads, shared);
}
template <class F> cudaError_t cudaOccupancyMaxPotentialBlockSize(int *grid, int *block, F *kernel,
                                                                  size_t shared = 0, int limit = 0)
{
    *block = limit && limit < 1024 ? limit / 32 * 32 : 1024;
    *grid = 0;
    cudaError_t e = emu_occupancy(grid, (const void *)kernel, *block, shared);
    int device = 0, processors = 0;
    if (!e) e = cudaGetDevice(&device);
    if (!e) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    *grid *= processors;
    return e;
}

// ========================================================================= device code: threads and warps
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
enum { warpSize = 32 };

void emu_begin_kernel();
inline void tt__begin_kernel() { emu_begin_kernel(); }
inline int tt__opaque(int x) { return x; }
inline void __syncthreads(EMU_HERE) { emu_block_barrier(emu_file, emu_line); }
inline int __syncthreads_count(int p, EMU_HERE) { return emu_block_vote(p, 0, emu_file, emu_line); }
inline int __syncthreads_and(int p, EMU_HERE) { return emu_block_vote(p, 1, emu_file, emu_line); }
inline int __syncthreads_or(int p, EMU_HERE) { return emu_block_vote(p, 2, emu_file, emu_line); }
inline void __syncwarp(unsigned mask = ~0u, EMU_HERE) { emu_warp_barrier(mask, emu_file, emu_line); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __trap(EMU_HERE) { emu_fatal("__trap at %s:%d", emu_file, emu_line); }

template <class T> T __shfl_sync(unsigned mask, T v, int lane, int width = 32, EMU_HERE)
{
    T r;
    emu_shuffle(mask, &v, &r, sizeof v, (emu_lane() & ~(width - 1)) | (lane & (width - 1)), emu_file,
                emu_line);
    return r;
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, EMU_HERE)
{
    T r;
    int me = emu_lane(), from = me ^ bits;
    if (from >= (me & ~(width - 1)) + width) from = me;
    emu_shuffle(mask, &v, &r, sizeof v, from, emu_file, emu_line);
    return r;
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32, EMU_HERE)
{
    T r;
    int me = emu_lane(), from = (me & (width - 1)) + (int)by >= width ? me : me + (int)by;
    emu_shuffle(mask, &v, &r, sizeof v, from, emu_file, emu_line);
    return r;
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32, EMU_HERE)
{
    T r;
    int me = emu_lane(), from = me - (int)by < (me & ~(width - 1)) ? me : me - (int)by;
    emu_shuffle(mask, &v, &r, sizeof v, from, emu_file, emu_line);
    return r;
}
inline unsigned __ballot_sync(unsigned mask, int p, EMU_HERE)
{
    return emu_ballot(mask, p, emu_file, emu_line);
}
inline unsigned __match_any_sync(unsigned mask, unsigned v, EMU_HERE)
{
    return emu_match(mask, v, emu_file, emu_line);
}
inline int __any_sync(unsigned mask, int p, EMU_HERE) { return emu_ballot(mask, p, emu_file, emu_line) != 0; }
inline int __all_sync(unsigned mask, int p, EMU_HERE)
{
    return emu_ballot(mask, p, emu_file, emu_line) == mask;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v, EMU_HERE)
{
    return emu_reduce(mask, v, '+', emu_file, emu_line);
}
inline int __reduce_add_sync(unsigned mask, int v, EMU_HERE)
{
    return (int)emu_reduce(mask, (unsigned)v, '+', emu_file, emu_line);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v, EMU_HERE)
{
    return emu_reduce(mask, v, '(', emu_file, emu_line);
}
inline int __reduce_min_sync(unsigned mask, int v, EMU_HERE)
{
    return (int)emu_reduce(mask, (unsigned)v, '<', emu_file, emu_line);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, EMU_HERE)
{
    return emu_reduce(mask, v, ')', emu_file, emu_line);
}
inline int __reduce_max_sync(unsigned mask, int v, EMU_HERE)
{
    return (int)emu_reduce(mask, (unsigned)v, '>', emu_file, emu_line);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned v, EMU_HERE)
{
    return emu_reduce(mask, v, '&', emu_file, emu_line);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned v, EMU_HERE)
{
    return emu_reduce(mask, v, '|', emu_file, emu_line);
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v, EMU_HERE)
{
    return emu_reduce(mask, v, '^', emu_file, emu_line);
}

// ========================================================================= device code: atomics
// One thread runs at a time, so plain code is atomic. The trace build treats EMU_ATOMIC functions as atomic
// accesses.
#define EMU_ATOMIC(name, T, result) \
    EMU_UNTRACED inline T name(T *p, T v, EMU_HERE) \
    { \
        emu_atomic(p, sizeof(T), emu_file, emu_line); \
        T old = *p; \
        *p = (result); \
        return old; \
    }
#define EMU_ATOMIC_INTEGER(T) \
    EMU_ATOMIC(atomicMin, T, old < v ? old : v) EMU_ATOMIC(atomicMax, T, old > v ? old : v) \
    EMU_ATOMIC(atomicExch, T, v) EMU_ATOMIC(atomicAnd, T, old & v) \
    EMU_ATOMIC(atomicOr, T, old | v) EMU_ATOMIC(atomicXor, T, old ^ v) \
    EMU_UNTRACED inline T atomicCAS(T *p, T expected, T v, EMU_HERE) \
    { \
        emu_atomic(p, sizeof(T), emu_file, emu_line); \
        T old = *p; \
        if (old == expected) *p = v; \
        return old; \
    }
EMU_ATOMIC_INTEGER(int)
EMU_ATOMIC_INTEGER(unsigned)
EMU_ATOMIC_INTEGER(unsigned long long)
EMU_ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)v))
EMU_ATOMIC(atomicAdd, unsigned, old + v)
EMU_ATOMIC(atomicAdd, unsigned long long, old + v)
EMU_ATOMIC(atomicAdd, float, old + v)
EMU_ATOMIC(atomicAdd, double, old + v)
EMU_ATOMIC(atomicSub, int, (int)((unsigned)old - (unsigned)v))
EMU_ATOMIC(atomicSub, unsigned, old - v)
EMU_ATOMIC(atomicExch, float, v)

// ========================================================================= device code: arithmetic
template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldcs(const T *p) { return *p; }
template <class T> T __ldcg(const T *p) { return *p; }
template <class T> T __ldca(const T *p) { return *p; }
template <class T> T __ldlu(const T *p) { return *p; }
template <class T> void __stcs(T *p, T v) { *p = v; }
template <class T> void __stcg(T *p, T v) { *p = v; }
template <class T> void __stwt(T *p, T v) { *p = v; }

#define __expf(x) expf(x) // macros, as old C libraries declare functions with these names
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanhf(x) tanhf(x)
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1.0f : 0.0f; } // NaN becomes 0
inline int __float_as_int(float f) { int i; memcpy(&i, &f, 4); return i; }
inline unsigned __float_as_uint(float f) { unsigned i; memcpy(&i, &f, 4); return i; }
inline float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
inline float __uint_as_float(unsigned i) { float f; memcpy(&f, &i, 4); return f; }
inline int __float2int_rn(float f) { return (int)lrintf(f); }
inline int __float2int_rz(float f) { return (int)f; }
inline float __int2float_rn(int i) { return (float)i; }
inline float __uint2float_rn(unsigned i) { return (float)i; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32,
             middle = a1 * b0 + (a0 * b0 >> 32);
    return a1 * b1 + (middle >> 32) + ((a0 * b1 + (uint32_t)middle) >> 32);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by)
{
    return by & 31 ? high << (by & 31) | low >> (32 - (by & 31)) : high;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by)
{
    return by & 31 ? low >> (by & 31) | high << (32 - (by & 31)) : low;
}
#define EMU_MIN_MAX(T) \
    inline T min(T a, T b) { return a < b ? a : b; } \
    inline T max(T a, T b) { return a > b ? a : b; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// ========================================================================= 16-bit floats
// These types need no CUDA toolkit. They have no arithmetic, so that accidental bf16 arithmetic does not
// compile. The conversions give the same bits as NVIDIA's (test_emu.cu).
struct __nv_bfloat16 { uint16_t emu_bits; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
struct __half { uint16_t emu_bits; };
struct alignas(4) __half2 { __half x, y; };
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
typedef __half half;
typedef __half2 half2;

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.emu_bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { return {u}; }
inline unsigned short __half_as_ushort(__half h) { return h.emu_bits; }
inline __half __ushort_as_half(unsigned short u) { return {u}; }

inline float __bfloat162float(__nv_bfloat16 b) { return __uint_as_float((unsigned)b.emu_bits << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) // rounds to nearest, ties to even
{
    unsigned u = __float_as_uint(f);
    if ((u & 0x7fffffff) > 0x7f800000) return {0x7fff};
    return {(uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16_rz(float f) // towards zero
{
    unsigned u = __float_as_uint(f);
    if ((u & 0x7fffffff) > 0x7f800000) return {0x7fff};
    return {(uint16_t)(u >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float f) { return __float2bfloat16_rn(f); }

inline float __half2float(__half h)
{
    unsigned sign = (unsigned)(h.emu_bits & 0x8000) << 16, exponent = h.emu_bits >> 10 & 31,
             mantissa = h.emu_bits & 1023;
    if (exponent == 31) return __uint_as_float(mantissa ? 0x7fffffff : sign | 0x7f800000);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
    float f = (float)mantissa * 0x1p-24f; // subnormal
    return sign ? -f : f;
}
inline __half __float2half_rn(float f) // rounds to nearest, ties to even
{
    unsigned u = __float_as_uint(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return {0x7fff};
    if (a >= 0x477ff000) return {(uint16_t)(sign | 0x7c00)}; // 65520 and above round to infinity
    if (a >= 0x38800000) {
        a -= 0x38000000;
        return {(uint16_t)(sign | (a + 0xfff + (a >> 13 & 1)) >> 13)};
    }
    // Subnormals are multiples of 2^-24.
    return {(uint16_t)(sign | (unsigned)lrintf(__uint_as_float(a) * 0x1p24f))};
}
inline __half __float2half_rz(float f) // towards zero
{
    unsigned u = __float_as_uint(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return {0x7fff};
    if (a == 0x7f800000) return {(uint16_t)(sign | 0x7c00)};
    if (a >= 0x47800000) return {(uint16_t)(sign | 0x7bff)};
    if (a >= 0x38800000) return {(uint16_t)(sign | (a - 0x38000000) >> 13)};
    return {(uint16_t)(sign | (unsigned)(__uint_as_float(a) * 0x1p24f))};
}
inline __half __float2half(float f) { return __float2half_rn(f); }

#define EMU_PAIR(T, T2, to, from, name_floats, name_float22, name_2float2, name_halves, \
                 name_low, name_high, name_both) \
    inline T2 name_floats(float a, float b) { return {to(a), to(b)}; } \
    inline T2 name_float22(float2 v) { return {to(v.x), to(v.y)}; } \
    inline float2 name_2float2(T2 v) { return {from(v.x), from(v.y)}; } \
    inline T2 name_halves(T a, T b) { return {a, b}; } \
    inline T name_low(T2 v) { return v.x; } \
    inline T name_high(T2 v) { return v.y; } \
    inline T2 name_both(float a) { return {to(a), to(a)}; } \
    inline float __low2float(T2 v) { return from(v.x); } \
    inline float __high2float(T2 v) { return from(v.y); } \
    EMU_ATOMIC(atomicAdd, T, to(from(old) + from(v))) \
    EMU_ATOMIC(atomicAdd, T2, (T2{to(from(old.x) + from(v.x)), to(from(old.y) + from(v.y))}))
EMU_PAIR(__nv_bfloat16, __nv_bfloat162, __float2bfloat16_rn, __bfloat162float, __floats2bfloat162_rn,
         __float22bfloat162_rn, __bfloat1622float2, __halves2bfloat162, __low2bfloat16, __high2bfloat16,
         __float2bfloat162_rn)
EMU_PAIR(__half, __half2, __float2half_rn, __half2float, __floats2half2_rn, __float22half2_rn, __half22float2,
         __halves2half2, __low2half, __high2half, __float2half2_rn)

// ========================================================================= 8-bit floats
typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
typedef unsigned __nv_fp8x4_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
struct __half_raw { unsigned short x; };

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float f, __nv_saturation_t saturate,
                                                __nv_fp8_interpretation_t kind)
{
    const bool e4m3 = kind == __NV_E4M3;
    const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
    unsigned u = __float_as_uint(f), sign = u >> 24 & 0x80, a = u & 0x7fffffff;
    float x = __uint_as_float(a);
    if (a > 0x7f800000) return 0x7f; // NaN, of either sign
    // Beyond the largest finite number after rounding (464 itself is a tie, which rounds down, to even).
    if (e4m3 ? x > 464.0f : x >= 61440.0f)
        return (__nv_fp8_storage_t)(sign | (saturate == __NV_SATFINITE ? (e4m3 ? 0x7e : 0x7b)
                                                                       : (e4m3 ? 0x7f : 0x7c)));
    int exponent = (int)(a >> 23) - 127;
    if (exponent < 1 - bias) // subnormal: a multiple of the smallest subnormal
        return (__nv_fp8_storage_t)(sign | (unsigned)lrintf(x * (e4m3 ? 0x1p9f : 0x1p16f)));
    int drop = 23 - mantissa_bits;
    unsigned r = a - ((unsigned)(127 - bias) << 23);
    r += (1u << (drop - 1)) - 1 + (r >> drop & 1);
    return (__nv_fp8_storage_t)(sign | r >> drop);
}
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t v, __nv_fp8_interpretation_t kind)
{
    unsigned u = (unsigned)v << 8;
    if (kind == __NV_E5M2) return {(unsigned short)((u & 0x7fff) > 0x7c00 ? 0x7fff : u)};
    unsigned sign = u & 0x8000, magnitude = v & 0x7f;
    if (magnitude == 0x7f) return {0x7fff};
    // subnormal
    if (magnitude < 8) return {(unsigned short)(sign | __float2half_rn((float)magnitude * 0x1p-9f).emu_bits)};
    return {(unsigned short)(sign | (magnitude + (8 << 3)) << 7)}; // the bias goes from 7 to 15
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t saturate,
                                                     __nv_fp8_interpretation_t kind)
{
    return (__nv_fp8x2_storage_t)(__nv_cvt_float_to_fp8(v.x, saturate, kind) |
                                  __nv_cvt_float_to_fp8(v.y, saturate, kind) << 8);
}
#define EMU_FP8(T, kind) \
    struct T { \
        __nv_fp8_storage_t __x; \
        T() = default; \
        explicit T(float f) : __x(__nv_cvt_float_to_fp8(f, __NV_SATFINITE, kind)) {} \
        explicit operator float() const { return __half2float({__nv_cvt_fp8_to_halfraw(__x, kind).x}); } \
    };
EMU_FP8(__nv_fp8_e4m3, __NV_E4M3)
EMU_FP8(__nv_fp8_e5m2, __NV_E5M2)

// ========================================================================= the portability block's functions
// Functions that are inline assembly under nvcc. The portability block of tinytrain_cuda.cu holds the
// assembly and describes each function.
template <class T> void tt__mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_HERE)
{
    static_assert(std::is_same<T, __half>::value || std::is_same<T, __nv_bfloat16>::value,
                  "mma of __half or __nv_bfloat16");
    emu_mma_16816(d, a, b, std::is_same<T, __half>::value, emu_file, emu_line);
}
inline void tt__mma_1688_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_HERE)
{
    emu_mma_1688_tf32(d, a, b, emu_file, emu_line);
}
inline void tt__ldmatrix_x1(uint32_t &r, const void *row, EMU_HERE)
{
    emu_ldmatrix(&r, 1, false, row, emu_file, emu_line);
}
inline void tt__ldmatrix_x2(uint32_t (&r)[2], const void *row, EMU_HERE)
{
    emu_ldmatrix(r, 2, false, row, emu_file, emu_line);
}
inline void tt__ldmatrix_x4(uint32_t (&r)[4], const void *row, EMU_HERE)
{
    emu_ldmatrix(r, 4, false, row, emu_file, emu_line);
}
inline void tt__ldmatrix_x1_trans(uint32_t &r, const void *row, EMU_HERE)
{
    emu_ldmatrix(&r, 1, true, row, emu_file, emu_line);
}
inline void tt__ldmatrix_x2_trans(uint32_t (&r)[2], const void *row, EMU_HERE)
{
    emu_ldmatrix(r, 2, true, row, emu_file, emu_line);
}
inline void tt__ldmatrix_x4_trans(uint32_t (&r)[4], const void *row, EMU_HERE)
{
    emu_ldmatrix(r, 4, true, row, emu_file, emu_line);
}
inline void tt__cp_async_4(void *to, const void *from, int bytes = 4, EMU_HERE)
{
    emu_cp_async(to, from, 4, bytes, emu_file, emu_line);
}
inline void tt__cp_async_8(void *to, const void *from, int bytes = 8, EMU_HERE)
{
    emu_cp_async(to, from, 8, bytes, emu_file, emu_line);
}
inline void tt__cp_async_16(void *to, const void *from, int bytes = 16, EMU_HERE)
{
    emu_cp_async(to, from, 16, bytes, emu_file, emu_line);
}
inline void tt__cp_async_commit() { emu_cp_async_commit(); }
template <int N> void tt__cp_async_wait(EMU_HERE) { emu_cp_async_wait(N, emu_file, emu_line); }
#define TT__HAS_WGMMA true
inline uint32_t tt__shared_address(const void *p) { return emu_shared_address(p); }
template <class T, int TILES>
void tt__wgmma_rows(float (&d)[TILES][4], uint32_t a, uint32_t b, bool add, EMU_HERE)
{
    emu_wgmma(EMU_WIDE_ROWS, d[0], TILES, nullptr, a, b, add, std::is_same<T, __half>::value, emu_file,
              emu_line);
}
template <class T> void tt__wgmma_add(float (*d)[4], const uint32_t (&a)[4], uint32_t b, EMU_HERE)
{
    emu_wgmma(EMU_WIDE_REGISTERS, d[0], 8, a, 0, b, true, std::is_same<T, __half>::value, emu_file, emu_line);
}
template <class T> void tt__wgmma_across(float (&d)[8][4], uint32_t a, uint32_t b, bool add, EMU_HERE)
{
    emu_wgmma(EMU_WIDE_ACROSS, d[0], 8, nullptr, a, b, add, std::is_same<T, __half>::value, emu_file,
              emu_line);
}
inline void tt__wgmma_fence() { emu_wgmma_fence(); }
inline void tt__wgmma_commit() { emu_wgmma_commit(); }
template <int N> void tt__wgmma_wait(EMU_HERE) { emu_wgmma_wait(N, emu_file, emu_line); }
template <int TILES> void tt__wgmma_done(float (&)[TILES][4]) {}
template <int N> void tt__wgmma_ready(uint32_t (&)[N][4]) {}
inline void tt__wgmma_publish() { emu_wgmma_publish(); }
inline void tt__phases_init(uint64_t *b, int n, EMU_HERE) { emu_phases_init(b, n, emu_file, emu_line); }
inline void tt__phases_arrive(uint64_t *b, EMU_HERE) { emu_phases_arrive(b, false, emu_file, emu_line); }
inline void tt__phases_arrive_with_copies(uint64_t *b, EMU_HERE)
{
    emu_phases_arrive(b, true, emu_file, emu_line);
}
inline void tt__phases_wait(uint64_t *b, int p, EMU_HERE) { emu_phases_wait(b, p, emu_file, emu_line); }
template <int N> void tt__fewer_registers() {}
template <int N> void tt__more_registers() {}
inline uint32_t tt__bytes(uint32_t low, uint32_t high, uint32_t selector)
{
    const uint64_t both = (uint64_t)high << 32 | low;
    uint32_t r = 0;
    for (int k = 0; k < 4; k++) {
        const uint32_t s = selector >> 4 * k & 15, byte = (uint32_t)(both >> 8 * (s & 7)) & 0xff;
        r |= (s > 7 ? byte >> 7 ? 0xffu : 0 : byte) << 8 * k;
    }
    return r;
}
inline uint32_t tt__tf32(float f) // rounds to nearest, ties away from zero
{
    unsigned u = __float_as_uint(f);
    return (u & 0x7f800000) == 0x7f800000 ? u : (u + 0x1000) & 0xffffe000;
}
inline float tt__exp2(float x) { return exp2f(x); }
inline float tt__reciprocal(float x) { return 1 / x; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector)
{
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int k = 0; k < 4; k++) r |= (unsigned)(both >> 8 * (selector >> 4 * k & 7) & 0xff) << 8 * k;
    return r;
}
inline unsigned __vmaxu2(unsigned a, unsigned b)
{
    const unsigned low = (a & 0xffff) > (b & 0xffff) ? a : b, high = a >> 16 > b >> 16 ? a : b;
    return (low & 0xffff) | (high & 0xffff0000u);
}
inline void tt__multiply(uint32_t a, uint32_t b, uint32_t &low, uint32_t &high)
{
    const uint64_t both = (uint64_t)a * b;
    low = (uint32_t)both;
    high = (uint32_t)(both >> 32);
}
inline void tt__forget(uint32_t &) {}
inline float tt__root(float x) { return sqrtf(x); }

#include "emu_cublas.h"
#endif
