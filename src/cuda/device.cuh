#pragma once
#include "../backend/backend.h"
#include "system.cuh"
#include "portability.cuh"
#include "handle.cuh"

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
