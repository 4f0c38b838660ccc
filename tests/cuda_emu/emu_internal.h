// emu_internal.h - declarations that cuda_emu.cpp, cuda_emu_trace.cpp and cuda_emu_blas.cpp share. These
// files are never compiled with -fsanitize=thread.
#ifndef TT_EMU_INTERNAL_H
#define TT_EMU_INTERNAL_H
#include "cuda_emu.h"
#include <stdio.h>
#include <stdlib.h>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#endif

enum {
    EMU_MAX_DEVICES = 16,
    EMU_MAX_THREADS = 1024,
    EMU_SHARED_ARENA = 384 * 1024, // more bytes than a block may have, for gaps between its arrays
    EMU_STATIC_SHARED = 48 * 1024, // limits of compute capability 9.0
    EMU_OPTIN_SHARED = 227 * 1024,
    EMU_REDZONE = 256,             // bytes before and after each allocation
    EMU_EXIT_STATUS = 86
};

// ---------------------------------------------------------------------------------- operations
typedef std::function<void(int part, int parts)> emu_body; // called once for each part 0 ... parts-1
typedef std::vector<uint32_t> emu_clock;                   // vector clock, one component per stream
enum emu_kind { EMU_KERNEL, EMU_COPY, EMU_MEMSET, EMU_GEMM, EMU_HOST_FUNCTION, EMU_MARK };

struct emu_pin { const char *p; size_t n; bool device_writes; }; // pinned memory that an operation uses

struct emu_work { // the work of an operation of a stream, or of a node of a graph
    emu_kind kind = EMU_MARK;
    std::string name;
    // mask of the devices whose memory the work may use; bit 31: the work is a kernel, which may use no other
    // memory
    unsigned devices = 0;
    int least_parts = 1;  // the min (least_parts) and max (most_parts) number of parts; other streams' work
                          // may run between two parts
    int most_parts = 1;
    emu_body body;
    double us = 0; // microseconds of virtual time, without the one microsecond that each part takes
    std::vector<emu_pin> pins;
};
struct emu_op {
    emu_work work;
    struct emu_stream *stream = nullptr;
    std::vector<std::shared_ptr<emu_op>> after;
    int part = 0, parts = 0;
    bool done = false;
    double finished_us = 0; // virtual time of the end, in microseconds
    uint32_t number = 0;    // number among all operations, from 1
    uint32_t ticket = 0;    // number among the operations of its stream: the stream's component of `clock`
    emu_clock clock;        // the operation's end and everything that happens before
};
typedef std::shared_ptr<emu_op> emu_op_ptr;

struct emu_stream {
    int id, device;
    unsigned flags;
    std::deque<emu_op_ptr> queue;
    emu_op_ptr last;
    std::vector<emu_op_ptr> waits; // events that the next operation waits for
    uint32_t tickets = 0;
    uint32_t used = 0;             // ticket of the last operation whose kind is not EMU_MARK
    uint64_t priority = 0;         // the stream's priority for the scheduler EMU_PCT
    struct emu_graph *capture = nullptr;
    bool capture_origin = false;
    int capture_lane = 0, capture_last = -1;
    std::vector<int> capture_waits;
};

// ---------------------------------------------------------------------------------- devices
struct emu_allocation {
    char *p;
    size_t n, charged;
    bool freed;
    int serial;
    bool managed = false, open = false; // open: the host's code may use the memory
};
struct emu_device {
    char *mapped = nullptr;               // result of mmap
    char *base = nullptr, *end = nullptr; // range of the device's addresses: whole huge pages
    char *bottom = nullptr; // [bottom, end) has been handed out; each address is handed out only once
    char *shadow = nullptr; // the trace build's records of accesses, one record for two bytes
    size_t used = 0, limit = 0;
    int major = 9, minor = 0;                // compute capability
    bool concurrent = true;                  // cudaDevAttrConcurrentManagedAccess
    std::vector<emu_allocation> allocations; // by address, the highest first
    unsigned peers = 0;                      // mask of the devices whose memory the device may reach
    unsigned wrong[EMU_MAX_DEVICES] = {};   // faults of the links from each device (EMU_NO_ACCESS ...)
    bool readable = false;                   // whether [bottom, end) is accessible now
    emu_stream *legacy = nullptr;
};

// ---------------------------------------------------------------------------------- the running block
struct emu_fiber { void *sp; char *stack; size_t size; void *fake; int thread; };
struct emu_thread {
    emu_fiber *fiber;
    const char *what, *file;
    int line;
    bool done, began; // began: the thread has called tt__begin_kernel
    uint16_t warp_epoch;
};
// a TT__SHARED array of the running block
struct emu_slot { void *key; char *p; size_t n; const char *name; };
struct emu_running_block {
    int current = -1;         // the running thread; -1: no kernel runs
    bool in_kernel = false;   // the kernel's own code runs, not the emulator's
    int threads = 0;
    uint32_t index = 0;       // number of the block in the grid
    uint16_t epoch = 0;       // number of barriers so far
    size_t dynamic = 0;       // bytes of dynamic shared memory
    bool chained = false;     // the block may begin before the previous kernel is done
    emu_thread thread[EMU_MAX_THREADS];
    std::vector<emu_slot> slots;
};

extern std::recursive_mutex emu_lock;
extern emu_device emu_devices[EMU_MAX_DEVICES];
extern int emu_device_count;
extern size_t emu_address_space; // bytes of addresses of one device
extern emu_running_block emu_block;
extern emu_fiber *emu_current_fiber;
extern emu_op *emu_current_op;
extern emu_clock emu_host_clock; // vector clock of the host: the waits of one host thread count for all
extern char *emu_shared_arena;
extern emu_counts emu_stats;
extern unsigned emu_refused; // algorithms that cuBLASLt refuses, a bit each
extern int emu_refused_status;
extern double emu_product_us[4], emu_epilogue_us; // microseconds that emu_set_product_times has set

struct emu_pinned { char *p; size_t n; bool registered; char *shadow; }; // pinned memory of the host

int emu_device_of(const void *p); // returns -1 for host memory
emu_pinned *emu_find_pinned(const void *p); // the pinned memory that holds p, or nullptr
emu_allocation *emu_find_allocation(int device, const void *p);
void emu_describe(const void *p, char *text, size_t size);
// begins every API call, under the lock: counts calls, injects faults
cudaError_t emu_enter(const char *call);
cudaError_t emu_error(cudaError_t e);    // stores e for cudaGetLastError
cudaError_t emu_enqueue(cudaStream_t s, emu_work work);
int emu_stream_device(cudaStream_t s); // returns -1 if the stream does not exist
int emu_current_device();
void emu_count_object(int by); // counts handles of cuBLAS for emu_live_objects
// returns whether the range begins in device memory, but is not inside one live allocation
bool emu_bad_range(const void *p, size_t n);
uint64_t emu_random();

// ---------------------------------------------------------------------------------- the trace build's checks
// emu_touch checks an access of the running operation, for accesses that no __tsan_ function sees. Copying
// bytes that were never written is allowed.
enum emu_access { EMU_READS, EMU_WRITES, EMU_COPIES_FROM };
#ifdef EMU_TRACE
void emu_trace_reset();
void emu_trace_device(emu_device &d);
void emu_trace_device_gone(emu_device &d);
void emu_trace_pinned(emu_pinned &m);
void emu_trace_pinned_gone(emu_pinned &m);
void emu_trace_op(const emu_op &op);
void emu_trace_pins(const emu_op &op);
// marks shared memory as never written, until a cp.async has filled it
void emu_trace_undefined(const void *p, size_t n);
void emu_touch(const void *p, size_t n, emu_access access, const char *file = nullptr, int line = 0);
#else
inline void emu_trace_reset() {}
inline void emu_trace_device(emu_device &) {}
inline void emu_trace_device_gone(emu_device &) {}
inline void emu_trace_pinned(emu_pinned &) {}
inline void emu_trace_pinned_gone(emu_pinned &) {}
inline void emu_trace_op(const emu_op &) {}
inline void emu_trace_pins(const emu_op &) {}
inline void emu_trace_undefined(const void *, size_t) {}
inline void emu_touch(const void *, size_t, emu_access, const char * = nullptr, int = 0) {}
#endif
#endif
