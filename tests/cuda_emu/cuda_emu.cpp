// cuda_emu.cpp - the runtime of the emulator: fibers, blocks and warps, the scheduler of operations, device
// memory, the CUDA runtime API.
#include "emu_internal.h"
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
static void poison(const void *p, size_t n) { __asan_poison_memory_region(p, n); }
static void unpoison(const void *p, size_t n) { __asan_unpoison_memory_region(p, n); }
#else
static void poison(const void *, size_t) {}
static void unpoison(const void *, size_t) {}
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

std::recursive_mutex emu_lock; // a lock that every API call, and so every kernel, holds
emu_device emu_devices[EMU_MAX_DEVICES];
int emu_device_count;
size_t emu_address_space;
emu_running_block emu_block;
emu_op *emu_current_op;
emu_clock emu_host_clock;
char *emu_shared_arena;
emu_counts emu_stats;
unsigned emu_refused;
int emu_refused_status;
double emu_product_us[4], emu_epilogue_us;

static thread_local int current_device;
static thread_local cudaError_t last_error = cudaSuccess;

// ============================================================================== random numbers, errors
static uint64_t random_state = 88172645463325252ull;
static int scheduler = EMU_EAGER;
static unsigned run_ahead; // chance, in 1/256, that the device makes progress while the host enqueues

uint64_t emu_random() // xorshift64*
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 2685821657736338717ull >> 11;
}
static unsigned random_below(size_t n) { return (unsigned)(emu_random() % n); }

static void print_place(FILE *f)
{
    if (emu_current_op) {
        fprintf(f, "  in operation '%s' (number %u, stream %d, device %d)\n",
                emu_current_op->work.name.c_str(), emu_current_op->number, emu_current_op->stream->id,
                emu_current_op->stream->device);
    }
    if (emu_block.current >= 0) {
        fprintf(f, "  block (%u,%u,%u) thread (%u,%u,%u)\n", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
                threadIdx.y, threadIdx.z);
    }
}

void emu_fatal(const char *format, ...)
{
    va_list arguments;
    fflush(stdout);
    va_start(arguments, format);
    fprintf(stderr, "emu error: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    print_place(stderr);
    fflush(stderr);
    _exit(EMU_EXIT_STATUS);
}

cudaError_t emu_error(cudaError_t e)
{
    if (e) last_error = e;
    return e;
}

// ============================================================================== fibers
// Switching stacks by hand takes 20 ns; swapcontext makes two system calls and takes 300 ns.
extern "C" void emu_switch(void **save, void *to);
#if defined(__APPLE__)
#define EMU_SWITCH "_emu_switch"
#else
#define EMU_SWITCH "emu_switch"
#endif
#if defined(__x86_64__)
asm(".text\n.globl " EMU_SWITCH "\n" EMU_SWITCH ":\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
enum { SAVED_WORDS = 8, SAVED_PC = 6 }; // six registers, the return address, and the caller's return address
#elif defined(__aarch64__)
asm(".text\n.globl " EMU_SWITCH "\n.p2align 2\n" EMU_SWITCH ":\n"
    "sub sp,sp,#176\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\n"
    "stp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\nstp "
    "d12,d13,[sp,#128]\n"
    "stp d14,d15,[sp,#144]\nmov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\nldp "
    "x27,x28,[sp,#64]\n"
    "ldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\nldp "
    "d14,d15,[sp,#144]\n"
    "add sp,sp,#176\nret\n");
enum { SAVED_WORDS = 22, SAVED_PC = 11 };
#else
#error "emu_switch is written for x86-64 and aarch64"
#endif

static emu_fiber main_fiber; // the host thread that runs the device
emu_fiber *emu_current_fiber = &main_fiber;
static emu_fiber *previous_fiber;
// Idle fibers are never freed, because a stack can be in use until the process ends.
static std::vector<emu_fiber *> &idle_fibers = *new std::vector<emu_fiber *>;

static void switch_to(emu_fiber *to)
{
    emu_fiber *me = emu_current_fiber;
    previous_fiber = me;
    emu_current_fiber = to;
    emu_stats.switches++;
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(&me->fake, to->stack, to->size);
#endif
    emu_switch(&me->sp, to->sp);
#ifdef EMU_ASAN
    const void *stack;
    size_t size;
    __sanitizer_finish_switch_fiber(me->fake, &stack, &size);
    if (previous_fiber == &main_fiber) { main_fiber.stack = (char *)stack; main_fiber.size = size; }
#endif
}

static void run_threads();
static void fiber_entry()
{
#ifdef EMU_ASAN
    const void *stack;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &size);
    if (previous_fiber == &main_fiber) { main_fiber.stack = (char *)stack; main_fiber.size = size; }
#endif
    run_threads();
}

static emu_fiber *new_fiber()
{
    static int serial;
#ifdef EMU_ASAN
    const size_t size = 256 << 10;
#else
    const size_t size = 64 << 10;
#endif
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    emu_fiber *f = new emu_fiber();
    char *m = (char *)mmap(nullptr, size + page, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m == MAP_FAILED) emu_fatal("no memory for the stack of a thread");
    mprotect(m, page, PROT_NONE); // a guard page: stacks grow down to it
    f->stack = m + page;
    f->size = size;
    // Stacks begin at different offsets in a page: 1024 equal offsets would share a few sets of the L1 cache.
    uintptr_t top = ((uintptr_t)(f->stack + size) - 64 - (uintptr_t)(serial++ % 32) * 192) & ~(uintptr_t)63;
#if defined(__x86_64__)
    // After `ret` the stack pointer is 8 above a multiple of 16, as after a call.
    void **sp = (void **)(top - sizeof(void *) * SAVED_WORDS);
#else
    void **sp = (void **)((top - sizeof(void *) * SAVED_WORDS) & ~(uintptr_t)15);
#endif
    memset((void *)sp, 0, SAVED_WORDS * sizeof(void *));
    sp[SAVED_PC] = (void *)fiber_entry;
    f->sp = sp;
    return f;
}

// ---- the scheduler of a block
// The lanes of a mask wait for one another in a warp operation. A warp has at most four of these meetings at
// once.
struct warp_meeting {
    enum { FREE, GATHERING, LEAVING } phase = FREE;
    int left = 0, line = 0;
    unsigned mask = 0, arrived = 0;
    const char *what = "", *file = "";
    unsigned char value[32][64]; // the data of each lane
    float a[16][16], b[16][8];   // the matrices of an mma
};
struct warp_state { unsigned exited = 0; warp_meeting barrier[4]; };
struct async_copy { char *to; const char *from; int n, bytes, group; };
struct wide_product { // a warp's part of a warpgroup's product in flight
    float *d[32]; // each lane's sums
    int tiles, group; // tiles: number of tiles of 8 columns; group: number of groups of products before
    uint32_t rows, b;
    emu_wide how;
    bool add, half, early; // early: the product read its shared memory when it was issued
    float of_a[16][16], of_b[16][128];
    const char *file;
    int line;
};
// the sums of a warp's product: when the warp waits for the product, registers d[i] of lane i get sum[i]
struct wide_sums { float *d[32]; int tiles; float sum[32][64]; };
struct wide_call { const char *file; int line; uint32_t rows, b; }; // equal for the four warps of a warpgroup
struct phases { // a barrier in shared memory that counts phases
    uint64_t *barrier;
    int count, pending, by;    // by: the thread that initialised the barrier, in the block's epoch `since`
    uint32_t phase;            // the number, from 0, of the current phase
    uint16_t since;
    bool copies;               // some arrivals wait for copies
    std::vector<int> waiting;  // threads that wait for the phase to end
};
// copies of a thread; when the copies are made, the thread arrives at the barrier
struct late_copies { uint64_t *barrier; std::vector<async_copy> copies; };
enum thread_order { IN_ORDER, REVERSED, SHUFFLED };

static struct {
    const std::function<void()> *kernel;
    thread_order order;
    int started, alive, multiplier, offset; // k-th thread to start: `(multiplier * k + offset) % threads`
    int ready_count, ready_head;
    uint16_t ready[2 * EMU_MAX_THREADS]; // a ring buffer of the threads that can run
    int barrier_count, barrier_line, barrier_votes[3];
    int barrier_result[3];
    const char *barrier_file, *barrier_what;
    size_t shared_top, static_bytes;
    const void *function;
    uint3 thread_index[EMU_MAX_THREADS];
    dim3 shape{0, 0, 0}; // the block shape for which thread_index was made
    warp_state warp[32];
    std::vector<async_copy> copies[EMU_MAX_THREADS]; // cp.async copies in flight, by thread
    int copy_group[EMU_MAX_THREADS];
    std::vector<wide_product> products[32]; // products in flight, by warp
    std::vector<wide_sums> sums[32];
    std::vector<wide_call> calls[8];        // calls of wgmma, by warpgroup
    size_t called[32];                      // by warp: number of its warpgroup's calls that the warp has made
    bool fenced[EMU_MAX_THREADS], committed[EMU_MAX_THREADS], unpublished[EMU_MAX_THREADS];
    int groups[32];                         // by warp: number of groups of products committed
    std::vector<phases> barriers;
    std::vector<late_copies> late[EMU_MAX_THREADS];
    bool waited[EMU_MAX_THREADS]; // by thread: the thread has waited for others' copies since it last
                                  // published
    bool copied;                   // late copies were made since `published` was stored
    std::vector<char> published;
} block;

void emu_kernel_begins() { emu_block.in_kernel = true; }
void emu_begin_kernel() { emu_block.thread[emu_block.current].began = true; }

static void set_current(int thread)
{
    emu_block.current = thread;
    threadIdx = block.thread_index[thread];
}

static int next_thread() // returns -1 if no thread can run
{
    const int ring = 2 * EMU_MAX_THREADS, unborn = emu_block.threads - block.started, n = block.ready_count;
    if (unborn + n == 0) return -1;
    bool start = n == 0;
    if (unborn > 0 && block.order == IN_ORDER) start = true;
    else if (unborn > 0 && n > 0 && block.order == SHUFFLED)
        start = (int)random_below((size_t)(unborn + n)) < unborn;
    if (start) {
        int i = block.started++;
        if (block.order == IN_ORDER) return i;
        if (block.order == REVERSED) return emu_block.threads - 1 - i;
        return (int)(((long)i * block.multiplier + block.offset) % emu_block.threads);
    }
    block.ready_count--;
    // The last thread comes first, so that warps run far apart.
    if (block.order == REVERSED) return block.ready[(block.ready_head + n - 1) % ring];
    if (block.order == SHUFFLED)
        std::swap(block.ready[block.ready_head],
                  block.ready[(block.ready_head + (int)random_below((size_t)n)) % ring]);
    int thread = block.ready[block.ready_head];
    block.ready_head = (block.ready_head + 1) % ring;
    return thread;
}

static void make_ready(int thread)
{
    block.ready[(block.ready_head + block.ready_count++) % (2 * EMU_MAX_THREADS)] = (uint16_t)thread;
}

static void go_to(int thread)
{
    emu_thread &t = emu_block.thread[thread];
    if (!t.fiber) {
        if (idle_fibers.empty()) idle_fibers.push_back(new_fiber());
        t.fiber = idle_fibers.back();
        idle_fibers.pop_back();
        t.fiber->thread = thread;
    }
    set_current(thread);
    switch_to(t.fiber);
}

[[noreturn]] static void report_divergence()
{
    std::map<std::string, std::vector<int>> groups;
    std::string text;
    for (int i = 0; i < emu_block.threads; i++) {
        emu_thread &t = emu_block.thread[i];
        char where[300];
        if (t.done) snprintf(where, sizeof where, "exited");
        else snprintf(where, sizeof where, "waiting in %s at %s:%d", t.what, t.file, t.line);
        groups[where].push_back(i);
    }
    for (auto &g : groups)
        text += "\n    " + std::to_string(g.second.size()) + " threads " + g.first + " (thread " +
                std::to_string(g.second[0]) + " is one)";
    emu_fatal("divergence: no thread of the block can run%s", text.c_str());
}

// Makes the late copies that hold up the barriers at which threads wait. Called if no thread can run
// otherwise.
static bool make_awaited_copies(const char *file, int line);

static void wait_for_others(const char *what, const char *file, int line)
{
    int me = emu_block.current;
    emu_thread &t = emu_block.thread[me];
    t.what = what;
    t.file = file;
    t.line = line;
    int next = next_thread();
    if (next < 0 && make_awaited_copies(file, line)) next = next_thread();
    if (next < 0) report_divergence();
    if (next != me) go_to(next);
    set_current(me);
}

// Body of every fiber: runs threads from begin to end, one after another on one stack, until one of them has
// to wait. So kernels without barriers cost no switches.
static void run_threads()
{
    for (;;) {
        emu_fiber *fiber = emu_current_fiber;
        int next = fiber->thread;
        do {
            int thread = next;
            fiber->thread = thread;
            emu_block.thread[thread].fiber = fiber;
            set_current(thread);
            (*block.kernel)(); // calls emu_kernel_begins
            emu_block.in_kernel = false;
            if (emu_block.chained && !emu_block.thread[thread].began)
                emu_fatal("the thread never waited for the kernel before this one, with tt__begin_kernel");
            if (!block.copies[thread].empty() || !block.late[thread].empty())
                emu_fatal("the thread ends with cp.async copies that it never waited for");
            if (!block.sums[thread / 32].empty())
                emu_fatal("the thread ends with products of its warpgroup that it never waited for");
            emu_block.thread[thread].done = true;
            block.alive--;
            block.warp[thread / 32].exited |= 1u << thread % 32;
            next = next_thread();
            if (next < 0 && block.alive && make_awaited_copies("the end of a thread", 0))
                next = next_thread();
        } while (next >= 0 && !emu_block.thread[next].fiber);
        idle_fibers.push_back(fiber);
        if (next >= 0) go_to(next);
        else if (block.alive) report_divergence();
        else {
            emu_block.current = -1;
            switch_to(&main_fiber);
        }
    }
}

static void run_block(const std::function<void()> &kernel, uint32_t index, thread_order order)
{
    block.kernel = &kernel;
    block.order = order;
    block.started = block.ready_count = block.ready_head = block.barrier_count = 0;
    block.alive = emu_block.threads;
    block.offset = (int)random_below((size_t)emu_block.threads);
    block.multiplier = (int)random_below(1024) | 1;
    while (std::gcd(block.multiplier, emu_block.threads) != 1) block.multiplier += 2;
    block.shared_top = (emu_block.dynamic + 32 + 127) & ~(size_t)127;
    block.static_bytes = 0;
    emu_block.index = index;
    emu_block.epoch = 1;
    emu_block.slots.clear();
    unpoison(emu_shared_arena, emu_block.dynamic);
    memset(emu_shared_arena, 0xff, emu_block.dynamic); // NaN in every float format, -1 as an index
    poison(emu_shared_arena + emu_block.dynamic, EMU_SHARED_ARENA - emu_block.dynamic);
    for (int i = 0; i < emu_block.threads; i++) {
        emu_block.thread[i].fiber = nullptr;
        emu_block.thread[i].done = emu_block.thread[i].began = false;
        emu_block.thread[i].warp_epoch = 1;
        block.copy_group[i] = 0;
        block.fenced[i] = block.committed[i] = block.unpublished[i] = block.waited[i] = false;
    }
    block.published.clear();
    block.barriers.clear();
    block.copied = false;
    memset(block.groups, 0, sizeof block.groups);
    for (auto &calls : block.calls) calls.clear();
    memset(block.called, 0, sizeof block.called);
    for (int i = 0; i * 32 < emu_block.threads; i++) block.warp[i].exited = 0;
    go_to(next_thread());
    emu_block.current = -1;
    for (int i = 0; i * 32 < emu_block.threads; i++)
        if (block.called[i] != block.calls[i / 4].size())
            emu_fatal("wgmma: the warps of a group made %zu and %zu products", block.called[i],
                      block.calls[i / 4].size());
}

#ifndef EMU_TRACE
void emu_atomic(void *, size_t, const char *, int) {}
#endif

// ============================================================================== shared memory, barriers
struct function_info { std::string name; int dynamic_limit = EMU_STATIC_SHARED; size_t static_bytes = 0; };
static std::map<const void *, function_info> functions;

void *emu_shared(void *key, size_t n, const char *name)
{
    for (auto &s : emu_block.slots) if (s.key == key) return s.p;
    emu_block.in_kernel = false;
    function_info &f = functions[block.function];
    char *p = emu_shared_arena + block.shared_top;
    block.shared_top = (block.shared_top + n + 32 + 127) & ~(size_t)127;
    block.static_bytes = ((block.static_bytes + 15) & ~(size_t)15) + n;
    size_t total = block.static_bytes + emu_block.dynamic;
    if (block.static_bytes > EMU_STATIC_SHARED)
        emu_fatal("static shared memory: '%s' makes it %zu bytes, more than 48 KiB", name,
                  block.static_bytes);
    if (total > EMU_OPTIN_SHARED || (total > EMU_STATIC_SHARED && f.dynamic_limit <= EMU_STATIC_SHARED)) {
        emu_fatal("shared memory: %zu static bytes with '%s' and %zu dynamic ones are more than %s",
                  block.static_bytes, name, emu_block.dynamic,
                  total > EMU_OPTIN_SHARED ? "the 227 KiB of a block"
                                           : "48 KiB, without cudaFuncSetAttribute");
    }
    f.static_bytes = std::max(f.static_bytes, block.static_bytes);
    unpoison(p, n);
    memset(p, 0xff, n);
    emu_block.slots.push_back({key, p, n, name});
    emu_block.in_kernel = true;
    return p;
}

void *emu_dynamic_shared() { return emu_shared_arena; }

int emu_lane() { return emu_block.current & 31; }

static void barrier(const char *what, int predicate, const char *file, int line)
{
    emu_block.in_kernel = false;
    if (block.barrier_count == 0) {
        block.barrier_file = file;
        block.barrier_line = line;
        block.barrier_what = what;
        block.barrier_votes[0] = block.barrier_votes[2] = 0;
        block.barrier_votes[1] = 1;
    } else if (block.barrier_line != line || block.barrier_what != what) {
        emu_fatal("divergent %s: a thread is at %s:%d, others are at %s:%d", what, file, line,
                  block.barrier_file, block.barrier_line);
    }
    block.barrier_votes[0] += predicate != 0;
    block.barrier_votes[1] &= predicate != 0;
    block.barrier_votes[2] |= predicate != 0;
    if (++block.barrier_count == emu_block.threads) {
        block.barrier_count = 0;
        memcpy(block.barrier_result, block.barrier_votes, sizeof block.barrier_votes);
        emu_block.epoch++;
        for (int i = 0; i < emu_block.threads; i++) make_ready(i);
    }
    wait_for_others(what, file, line);
}

void emu_block_barrier(const char *file, int line)
{
    static const char what[] = "__syncthreads";
    barrier(what, 0, file, line);
    emu_block.in_kernel = true;
}

int emu_block_vote(int predicate, int how, const char *file, int line)
{
    static const char what[] = "__syncthreads_count/and/or";
    barrier(what, predicate, file, line);
    // No thread can complete the next barrier before this thread has read the result.
    int result = block.barrier_result[how];
    emu_block.in_kernel = true;
    return result;
}

// ============================================================================== warps
static warp_meeting *meet(const char *what, unsigned mask, const void *value, size_t n, const char *file,
                          int line)
{
    int me = emu_block.current, lane = me & 31, first = me & ~31;
    warp_state &warp = block.warp[me / 32];
    warp_meeting *m = nullptr;
    unsigned existing = emu_block.threads - first >= 32 ? ~0u : (1u << (emu_block.threads - first)) - 1;
    emu_block.in_kernel = false;
    if (!(mask >> lane & 1))
        emu_fatal("%s at %s:%d: lane %d calls it and is not in its mask %#x", what, file, line, lane, mask);
    if (mask & ~existing)
        emu_fatal("%s at %s:%d: mask %#x has lanes that a block of %d threads has not", what, file, line,
                  mask, emu_block.threads);
    if (mask & warp.exited)
        emu_fatal("%s at %s:%d: lanes %#x of its mask %#x have exited", what, file, line, mask & warp.exited,
                  mask);
    for (auto &other : warp.barrier) {
        if (other.phase != warp_meeting::GATHERING || !(other.mask & mask)) continue;
        if (other.mask != mask || strcmp(other.what, what) != 0) {
            emu_fatal(
                "divergent warp: lane %d is in %s (mask %#x) at %s:%d, others are in %s (mask %#x) at %s:%d",
                lane, what, mask, file, line, other.what, other.mask, other.file, other.line);
        }
        m = &other;
    }
    for (auto &other : warp.barrier) if (!m && other.phase == warp_meeting::FREE) {
        m = &other;
        m->phase = warp_meeting::GATHERING;
        m->mask = mask;
        m->arrived = 0;
        m->what = what;
        m->file = file;
        m->line = line;
    }
    if (!m) emu_fatal("%s at %s:%d: more than four groups of lanes meet at once", what, file, line);
    if (n) memcpy(m->value[lane], value, n);
    m->arrived |= 1u << lane;
    if (m->arrived == mask) {
        m->phase = warp_meeting::LEAVING;
        m->left = __builtin_popcount(mask);
        for (int i = 0; i < 32; i++) if (mask >> i & 1) make_ready(first + i);
    }
    wait_for_others(what, file, line);
    return m;
}
static void leave(warp_meeting *m)
{
    if (--m->left == 0) m->phase = warp_meeting::FREE;
    emu_block.in_kernel = true;
}

void emu_shuffle(unsigned mask, const void *in, void *out, size_t n, int from, const char *file, int line)
{
    if (n > sizeof(warp_meeting::value[0])) emu_fatal("shuffle of %zu bytes at %s:%d", n, file, line);
    warp_meeting *m = meet("a shuffle", mask, in, n, file, line);
    if (!(mask >> from & 1))
        emu_fatal("a shuffle at %s:%d reads lane %d, which is not in its mask %#x", file, line, from, mask);
    memcpy(out, m->value[from], n);
    leave(m);
}

unsigned emu_ballot(unsigned mask, int predicate, const char *file, int line)
{
    unsigned char vote = predicate != 0;
    unsigned result = 0;
    warp_meeting *m = meet("a vote", mask, &vote, 1, file, line);
    for (int i = 0; i < 32; i++) if (mask >> i & 1 && m->value[i][0]) result |= 1u << i;
    leave(m);
    return result;
}

unsigned emu_match(unsigned mask, unsigned v, const char *file, int line)
{
    unsigned result = 0;
    warp_meeting *m = meet("a match", mask, &v, sizeof v, file, line);
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && memcmp(&v, m->value[i], sizeof v) == 0) result |= 1u << i;
    leave(m);
    return result;
}

unsigned emu_reduce(unsigned mask, unsigned v, int how, const char *file, int line)
{
    unsigned result = 0;
    bool first = true;
    warp_meeting *m = meet("a reduction", mask, &v, sizeof v, file, line);
    for (int i = 0; i < 32; i++) {
        unsigned x;
        if (!(mask >> i & 1)) continue;
        memcpy(&x, m->value[i], sizeof x);
        if (first) result = x;
        else if (how == '+') result += x;
        else if (how == '&') result &= x;
        else if (how == '|') result |= x;
        else if (how == '^') result ^= x;
        else if (how == '<') result = (int)x < (int)result ? x : result;
        else if (how == '>') result = (int)x > (int)result ? x : result;
        else if (how == '(') result = x < result ? x : result;
        else result = x > result ? x : result;
        first = false;
    }
    leave(m);
    return result;
}

void emu_warp_barrier(unsigned mask, const char *file, int line)
{
    int first = emu_block.current & ~31;
    unsigned existing = emu_block.threads - first >= 32 ? ~0u : (1u << (emu_block.threads - first)) - 1;
    warp_meeting *m = meet("__syncwarp", mask & existing, nullptr, 0, file, line);
    emu_block.thread[emu_block.current].warp_epoch++;
    leave(m);
}

// ============================================================================== tensor cores
// Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16 with .f16/.bf16" and "... mma.m16n8k8 with
// .tf32". With g = lane/4 and t = lane%4, a lane holds rows g and g+8 of A, column g of B, and rows g and g+8
// and columns 2t and 2t+1 of C.
struct mma_operands { uint32_t a[4], b[2]; };

static void multiply(warp_meeting *m, float *d, int depth)
{
    int lane = emu_block.current & 31;
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < depth; k++) sum += m->a[row][k] * m->b[k][column];
        d[i] += sum;
    }
    leave(m);
}

void emu_mma_16816(float *d, const uint32_t *a, const uint32_t *b, bool half_type, const char *file, int line)
{
    mma_operands mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    warp_meeting *m = meet(half_type ? "mma.16816 of f16" : "mma.16816 of bf16", ~0u, &mine, sizeof mine,
                           file, line);
    auto value = [&](uint32_t word, int high) {
        uint16_t bits = (uint16_t)(word >> 16 * high);
        return half_type ? __half2float({bits}) : __bfloat162float({bits});
    };
    if (m->left == 32) { // the first lane that continues decodes the fragments of all lanes
        for (int lane = 0; lane < 32; lane++) {
            mma_operands o;
            int g = lane / 4, t = lane % 4;
            memcpy(&o, m->value[lane], sizeof o);
            for (int high = 0; high < 2; high++) {
                for (int r = 0; r < 4; r++)
                    m->a[g + 8 * (r % 2)][2 * t + high + 8 * (r / 2)] = value(o.a[r], high);
                for (int r = 0; r < 2; r++) m->b[2 * t + high + 8 * r][g] = value(o.b[r], high);
            }
        }
    }
    multiply(m, d, 16);
}

void emu_mma_1688_tf32(float *d, const uint32_t *a, const uint32_t *b, const char *file, int line)
{
    mma_operands mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    warp_meeting *m = meet("mma.1688 of tf32", ~0u, &mine, sizeof mine, file, line);
    if (m->left == 32) {
        for (int lane = 0; lane < 32; lane++) {
            mma_operands o;
            int g = lane / 4, t = lane % 4;
            memcpy(&o, m->value[lane], sizeof o);
            // A product in TF32 ignores the low 13 bits.
            for (int r = 0; r < 4; r++)
                m->a[g + 8 * (r % 2)][t + 4 * (r / 2)] = __uint_as_float(o.a[r] & 0xffffe000);
            for (int r = 0; r < 2; r++) m->b[t + 4 * r][g] = __uint_as_float(o.b[r] & 0xffffe000);
        }
    }
    multiply(m, d, 8);
}

static void require_shared(const void *p, size_t n, size_t alignment, const char *what, const char *file,
                           int line)
{
    const char *c = (const char *)p;
    emu_block.in_kernel = false;
    bool somewhere = c >= emu_shared_arena && c + n <= emu_shared_arena + EMU_SHARED_ARENA;
    if (!somewhere) emu_fatal("%s at %s:%d: address %p is not in shared memory", what, file, line, p);
    if ((uintptr_t)c % alignment)
        emu_fatal("%s at %s:%d: the address is not aligned to %zu bytes", what, file, line, alignment);
    bool inside = c + n <= emu_shared_arena + emu_block.dynamic;
    for (auto &s : emu_block.slots) inside = inside || (c >= s.p && c + n <= s.p + s.n);
    if (!inside)
        emu_fatal("%s at %s:%d: shared memory out of bounds, %zu bytes at offset %ld", what, file, line, n,
                  (long)(c - emu_shared_arena));
    emu_block.in_kernel = true;
}

void emu_ldmatrix(uint32_t *r, int matrices, bool transposed, const void *row, const char *file, int line)
{
    int lane = emu_block.current & 31;
    if (lane < matrices * 8) { // lane 8 * j + i holds the address of row i of matrix j
        require_shared(row, 16, 16, "ldmatrix", file, line);
        emu_block.in_kernel = false;
        emu_touch(row, 16, EMU_READS, file, line);
    }
    warp_meeting *m = meet(transposed ? "ldmatrix.trans" : "ldmatrix", ~0u, &row, sizeof row, file, line);
    for (int j = 0; j < matrices; j++) {
        uint16_t element[2];
        for (int h = 0; h < 2; h++) { // a lane gets two neighbouring elements of a row, or of a column
            const uint16_t *p;
            int i = transposed ? lane % 4 * 2 + h : lane / 4, k = transposed ? lane / 4 : lane % 4 * 2 + h;
            memcpy(&p, m->value[j * 8 + i], sizeof p);
            element[h] = p[k];
        }
        r[j] = element[0] | (uint32_t)element[1] << 16;
    }
    leave(m);
}

// Starts a copy. The destination is undefined until the wait: it is filled with garbage now, and gets the
// data as late as legal.
void emu_cp_async(void *to, const void *from, int n, int bytes, const char *file, int line)
{
    if (bytes < 0 || bytes > n) emu_fatal("cp.async at %s:%d: %d of %d bytes", file, line, bytes, n);
    require_shared(to, (size_t)n, (size_t)n, "cp.async, destination", file, line);
    if (bytes && (uintptr_t)from % (uintptr_t)n)
        emu_fatal("cp.async at %s:%d: the source is not aligned to %d bytes", file, line, n);
    emu_block.in_kernel = false;
    if (bytes && emu_device_of(from) < 0)
        emu_fatal("cp.async at %s:%d: the source %p is not in device memory", file, line, from);
    emu_touch(to, (size_t)n, EMU_WRITES, file, line);
    if (bytes) emu_touch(from, (size_t)bytes, EMU_READS, file, line);
    memset(to, 0xff, (size_t)n);
    emu_trace_undefined(to, (size_t)n);
    block.copies[emu_block.current].push_back(
        {(char *)to, (const char *)from, n, bytes, block.copy_group[emu_block.current]});
    emu_block.in_kernel = true;
}

static void make_copy(const async_copy &c, const char *file, int line)
{
    emu_touch(c.to, (size_t)c.n, EMU_WRITES, file, line);
    memcpy(c.to, c.from, (size_t)c.bytes);
    memset(c.to + c.bytes, 0, (size_t)(c.n - c.bytes));
}

void emu_cp_async_commit() { block.copy_group[emu_block.current]++; }

static void make_late_copies(int thread, uint64_t *barrier, const char *file, int line);
void emu_cp_async_wait(int groups_left, const char *file, int line)
{
    std::vector<async_copy> &copies = block.copies[emu_block.current];
    size_t kept = 0;
    emu_block.in_kernel = false;
    if (groups_left == 0) make_late_copies(emu_block.current, nullptr, file, line);
    for (auto &c : copies) {
        if (c.group >= block.copy_group[emu_block.current] - groups_left) { copies[kept++] = c; continue; }
        make_copy(c, file, line);
        block.unpublished[emu_block.current] = true;
    }
    copies.resize(kept);
    emu_block.in_kernel = true;
}

// ---- barriers that count phases
static phases *phases_of(uint64_t *barrier, const char *file, int line)
{
    for (auto &b : block.barriers) {
        if (b.barrier != barrier) continue;
        if (b.since == emu_block.epoch && b.by != emu_block.current)
            emu_fatal("the barrier at %s:%d: initialised by thread %d, with no __syncthreads behind", file,
                      line, b.by);
        return &b;
    }
    emu_fatal("the barrier at %s:%d: never initialised", file, line);
}

// Counts an arrival. After the end of a phase, a thread sees all accesses before the phase's arrivals. The
// trace build treats the end of a phase as a barrier of all threads, so the trace build misses some races but
// reports no false race.
static void arrive(phases *b, const char *file, int line)
{
    if (b->pending == 0) emu_fatal("the barrier at %s:%d: more arrivals than its count", file, line);
    if (--b->pending) return;
    b->pending = b->count;
    b->phase++;
    emu_block.epoch++;
    for (int thread : b->waiting) make_ready(thread);
    b->waiting.clear();
}

// Makes late copies of a thread in order: all copies up to the thread's last arrival at `barrier`, or all
// copies if `barrier` is NULL.
static void make_late_copies(int thread, uint64_t *barrier, const char *file, int line)
{
    std::vector<late_copies> &late = block.late[thread];
    const int me = emu_block.current;
    size_t end = barrier ? 0 : late.size();
    for (size_t k = 0; k < late.size() && barrier; k++) if (late[k].barrier == barrier) end = k + 1;
    emu_block.current = thread;
    for (size_t k = 0; k < end; k++) {
        for (auto &c : late[k].copies) make_copy(c, file, line);
        block.copied = true;
        arrive(phases_of(late[k].barrier, file, line), file, line);
    }
    late.erase(late.begin(), late.begin() + (long)end);
    emu_block.current = me;
}

static bool make_awaited_copies(const char *file, int line)
{
    std::vector<uint64_t *> awaited;
    for (auto &b : block.barriers) if (!b.waiting.empty()) awaited.push_back(b.barrier);
    for (uint64_t *barrier : awaited)
        for (int i = 0; i < emu_block.threads; i++) make_late_copies(i, barrier, file, line);
    return block.ready_count > 0;
}

void emu_phases_init(uint64_t *barrier, int count, const char *file, int line)
{
    require_shared(barrier, 8, 8, "a barrier of phases", file, line);
    for (auto &b : block.barriers)
        if (b.barrier == barrier) emu_fatal("the barrier at %s:%d: initialised twice", file, line);
    if (count < 1) emu_fatal("the barrier at %s:%d: of %d arrivals", file, line, count);
    block.barriers.push_back({barrier, count, count, emu_block.current, 0, emu_block.epoch, false, {}});
}

void emu_phases_arrive(uint64_t *barrier, bool with_copies, const char *file, int line)
{
    const int me = emu_block.current;
    emu_block.in_kernel = false;
    phases *b = phases_of(barrier, file, line);
    if (with_copies) {
        b->copies = true;
        block.late[me].push_back({barrier, block.copies[me]});
        block.copies[me].clear();
        if (emu_random() & 1) make_late_copies(me, barrier, file, line); // else the copies are made late
    } else {
        arrive(b, file, line);
    }
    emu_block.in_kernel = true;
}

void emu_phases_wait(uint64_t *barrier, int parity, const char *file, int line)
{
    const int me = emu_block.current;
    emu_block.in_kernel = false;
    phases_of(barrier, file, line);
    if ((unsigned)parity > 1) emu_fatal("the barrier at %s:%d: parity %d", file, line, parity);
    for (;;) {
        phases *b = phases_of(barrier, file, line);
        if ((int)(b->phase & 1) == parity)
            for (int i = 0; i < emu_block.threads; i++) make_late_copies(i, barrier, file, line);
        b = phases_of(barrier, file, line);
        if ((int)(b->phase & 1) != parity) {
            if (b->copies) block.waited[me] = true;
            break;
        }
        b->waiting.push_back(me);
        wait_for_others("the end of a barrier's phase", file, line);
    }
    emu_block.in_kernel = true;
}

// ---- products of a warpgroup
uint32_t emu_shared_address(const void *p) { return (uint32_t)((const char *)p - emu_shared_arena); }

// Returns the address of the `i`-th 16 bytes, in the order of rows, of the matrix that descriptor `matrix`
// describes. The matrix has 64 rows of 16 columns (32 bytes) or, if transposed, 16 rows of 64 columns (128
// bytes). The addresses are swizzled over 128 bytes, and groups of 8 rows follow one another.
static const char *wide_part(uint32_t matrix, bool transposed, int i, const char *file, int line)
{
    const uint32_t start = (matrix & 0x3fff) << 4;
    const int row = transposed ? i / 8 : i / 2, part = transposed ? i % 8 : i % 2;
    uint32_t at = start + (uint32_t)row * 128 + (uint32_t)part * 16;
    if (start % 1024 >= 128)
        emu_fatal("wgmma at %s:%d: the rows begin at shared address %u, within a group of 8", file, line,
                  start);
    at ^= at >> 3 & 0x70; // the swizzle: bits 4 to 6 xor bits 7 to 9
    const char *p = emu_shared_arena + at;
    require_shared(p, 16, 16, "wgmma", file, line);
    emu_block.in_kernel = false;
    emu_touch(p, 16, EMU_READS, file, line);
    // Ordinary stores of any thread are not visible to products before a fence.
    if (at + 16 <= emu_block.dynamic && (block.published.empty() || memcmp(&block.published[at], p, 16) != 0))
        emu_fatal("wgmma at %s:%d: what it reads at shared address %u has been written with no "
                  "tt__wgmma_publish behind", file, line, at);
    return p;
}

// Reads the operands of a product from shared memory.
static void read_wide(wide_product &o, int warp)
{
    auto value = [&](const char *p, int i) {
        uint16_t bits;
        memcpy(&bits, p + 2 * i, 2);
        return o.half ? __half2float({bits}) : __bfloat162float({bits});
    };
    for (int i = 0; i < emu_block.threads; i++)
        if (block.unpublished[i])
            emu_fatal("wgmma at %s:%d: of what it reads, thread %d has copied some, with no "
                      "tt__wgmma_publish behind", o.file, o.line, i);
    for (int i = 0; i < 16 * o.tiles; i++) {
        const char *p = wide_part(o.b, o.how != EMU_WIDE_ROWS, i, o.file, o.line);
        for (int j = 0; j < 8; j++) {
            if (o.how != EMU_WIDE_ROWS) o.of_b[i / 8][i % 8 * 8 + j] = value(p, j);
            else o.of_b[i % 2 * 8 + j][i / 2] = value(p, j);
        }
    }
    for (int i = 0; i < 32 && o.how != EMU_WIDE_REGISTERS; i++) {
        const bool across = o.how == EMU_WIDE_ACROSS; // reads two parts of 16 bytes from each of 16 rows
        const int part = across ? i / 2 * 8 + warp % 4 * 2 + i % 2 : warp % 4 * 32 + i;
        const char *p = wide_part(o.rows, across, part, o.file, o.line);
        for (int j = 0; j < 8; j++) {
            if (across) o.of_a[i % 2 * 8 + j][i / 2] = value(p, j);
            else o.of_a[i / 2][i % 2 * 8 + j] = value(p, j);
        }
    }
}

struct wide_operands { float *d; uint32_t rows, b; uint32_t a[4]; };
static_assert(sizeof(wide_operands) <= sizeof(warp_meeting::value[0]), "a lane brings them");

// Issues a warp's part of a warpgroup's product: 16 of the 64 rows. The sums are garbage until the warp waits
// for the product. The product reads shared memory now or at that wait, as the seed decides.
void emu_wgmma(emu_wide how, float *d, int tiles, const uint32_t *a, uint32_t rows, uint32_t b, bool add,
               bool half_type, const char *file, int line)
{
    const int me = emu_block.current, warp = me / 32;
    wide_operands mine = {d, rows, b, {}};
    if (a) memcpy(mine.a, a, sizeof mine.a);
    emu_block.in_kernel = false;
    if (emu_block.threads % 128)
        emu_fatal("wgmma at %s:%d: %d threads are not groups of four warps", file, line, emu_block.threads);
    if (!block.fenced[me]) emu_fatal("wgmma at %s:%d: without a tt__wgmma_fence before", file, line);
    if (block.waited[me])
        emu_fatal("wgmma at %s:%d: behind a wait for copies, with no tt__wgmma_publish between", file, line);
    block.committed[me] = false;
    warp_meeting *m = meet("wgmma", ~0u, &mine, sizeof mine, file, line);
    std::vector<wide_sums> &sums = block.sums[warp];
    if (m->left == 32) { // the first lane that continues issues the product for all lanes
        wide_product o = {{}, tiles, block.groups[warp], rows, b, how, add, half_type,
                          (emu_random() & 1) != 0, {}, {}, file, line};
        std::vector<wide_call> &calls = block.calls[warp / 4];
        const wide_call call = {file, line, rows, b};
        const size_t number = block.called[warp]++;
        if (number == calls.size()) calls.push_back(call);
        else if (calls[number].line != line || calls[number].rows != rows || calls[number].b != b)
            emu_fatal("wgmma at %s:%d: another warp of its group is at %s:%d, or has other matrices", file,
                      line, calls[number].file, calls[number].line);
        for (int i = 0; i < 32; i++) {
            wide_operands of;
            memcpy(&of, m->value[i], sizeof of);
            if (of.rows != rows || of.b != b)
                emu_fatal("wgmma at %s:%d: lanes of a warp have different matrices", file, line);
            o.d[i] = of.d;
            for (int r = 0; r < 4 && how == EMU_WIDE_REGISTERS; r++)
                for (int high = 0; high < 2; high++) {
                    const uint16_t bits = (uint16_t)(of.a[r] >> 16 * high);
                    o.of_a[i / 4 + 8 * (r % 2)][i % 4 * 2 + high + 8 * (r / 2)] =
                        half_type ? __half2float({bits}) : __bfloat162float({bits});
                }
        }
        size_t k = 0;
        while (k < sums.size() && sums[k].d[0] != o.d[0]) k++;
        if (k == sums.size()) {
            sums.push_back({});
            for (int i = 0; i < 32; i++) {
                sums[k].d[i] = o.d[i];
                memcpy(sums[k].sum[i], o.d[i], (size_t)tiles * 4 * sizeof(float));
            }
            sums[k].tiles = tiles;
        }
        if (o.early) read_wide(o, warp);
        block.products[warp].push_back(o);
    }
    memset(d, 0xff, (size_t)tiles * 4 * sizeof *d);
    leave(m);
}

void emu_wgmma_fence() { block.fenced[emu_block.current] = true; }
void emu_wgmma_publish()
{
    const int me = emu_block.current;
    // `others`: the thread publishes only copies of other threads. If another thread has already published
    // the copies, `copied` is false.
    const bool others = block.waited[me] && !block.unpublished[me];
    block.unpublished[me] = block.waited[me] = false;
    if (others && !block.copied && !block.published.empty()) return;
    block.published.assign(emu_shared_arena, emu_shared_arena + emu_block.dynamic);
    block.copied = false;
}
void emu_wgmma_commit()
{
    const int me = emu_block.current;
    block.committed[me] = true;
    if (me % 32 == 0) block.groups[me / 32]++;
}

void emu_wgmma_wait(int groups_left, const char *file, int line)
{
    const int me = emu_block.current, warp = me / 32;
    std::vector<wide_sums> &sums = block.sums[warp];
    std::vector<wide_product> &products = block.products[warp];
    block.fenced[me] = false;
    warp_meeting *m = meet("the wait for wgmma", ~0u, nullptr, 0, file, line);
    if (m->left == 32 && block.committed[me]) {
        const auto ends = [&](const wide_product &o) { return o.group < block.groups[warp] - groups_left; };
        for (auto &o : products) {
            size_t k = 0;
            if (!ends(o)) continue;
            while (sums[k].d[0] != o.d[0]) k++;
            if (!o.early) read_wide(o, warp);
            for (int i = 0; i < 32; i++)
                for (int e = 0; e < 4 * o.tiles; e++) {
                    const int row = i / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + i % 4 * 2 + e % 2;
                    float sum = 0;
                    for (int j = 0; j < 16; j++) sum += o.of_a[row][j] * o.of_b[j][column];
                    sums[k].sum[i][e] = o.add ? sums[k].sum[i][e] + sum : sum;
                }
        }
        products.erase(std::remove_if(products.begin(), products.end(), ends), products.end());
        const auto there = [&](const wide_sums &s) {
            for (auto &o : products) if (o.d[0] == s.d[0]) return false;
            return true;
        };
        for (auto &s : sums)
            for (int i = 0; i < 32 && there(s); i++)
                memcpy(s.d[i], s.sum[i], (size_t)s.tiles * 4 * sizeof(float));
        sums.erase(std::remove_if(sums.begin(), sums.end(), there), sums.end());
    }
    leave(m);
}

// ============================================================================== device memory, pinned memory
static std::map<char *, emu_pinned> pinned;

emu_pinned *emu_find_pinned(const void *p)
{
    auto it = pinned.upper_bound((char *)p);
    if (it == pinned.begin()) return nullptr;
    --it;
    return (const char *)p < it->second.p + it->second.n ? &it->second : nullptr;
}
static void add_pinned(void *p, size_t n, bool registered)
{
    emu_pinned &m = pinned[(char *)p];
    m = {(char *)p, n, registered, nullptr};
    emu_trace_pinned(m);
}
static void drop_pinned(const emu_pinned &m)
{
    emu_pinned gone = m;
    pinned.erase(gone.p);
    emu_trace_pinned_gone(gone);
    if (!gone.registered) free(gone.p);
}

static const size_t FAR_REGION = (size_t)1 << 30; // memory that is never accessible, so that far-off indices
                                                  // fault

int emu_device_of(const void *p)
{
    for (int d = 0; d < emu_device_count; d++)
        if ((const char *)p >= emu_devices[d].base && (const char *)p < emu_devices[d].end) return d;
    return -1;
}

emu_allocation *emu_find_allocation(int device, const void *p)
{
    auto &all = emu_devices[device].allocations;
    auto it = std::lower_bound(all.begin(), all.end(), (char *)p,
                               [](const emu_allocation &a, char *x) { return a.p > x; });
    return it == all.end() ? nullptr : &*it;
}

void emu_describe(const void *p, char *text, size_t size)
{
    int d = emu_device_of(p);
    for (int i = 0; d < 0 && i < emu_device_count; i++) {
        if ((const char *)p >= emu_devices[i].end && (const char *)p < emu_devices[i].end + FAR_REGION) {
            snprintf(text, size, "%p is far beyond the memory of device %d", p, i);
            return;
        }
    }
    const emu_pinned *pin = d < 0 ? emu_find_pinned(p) : nullptr;
    if (pin) {
        snprintf(text, size, "%p is byte %ld of %zu bytes of pinned memory", p,
                 (long)((const char *)p - pin->p), pin->n);
        return;
    }
    if (d < 0) { snprintf(text, size, "%p is not device memory", p); return; }
    emu_allocation *a = emu_find_allocation(d, p);
    if (!a) { snprintf(text, size, "%p is on device %d, before any allocation", p, d); return; }
    long at = (long)((const char *)p - a->p);
    snprintf(text, size, "%p is byte %ld of allocation %d of device %d (%zu bytes%s)%s", p, at, a->serial, d,
             a->n, a->freed ? ", FREED" : "", at >= (long)a->n ? ": OUT OF BOUNDS" : "");
}

bool emu_bad_range(const void *p, size_t n)
{
    int d = emu_device_of(p);
    if (d < 0) return false;
    emu_allocation *a = emu_find_allocation(d, p);
    return !a || a->freed || (const char *)p + n > a->p + a->n;
}

// Makes the memory of the devices whose bits are set in `mask` accessible. While host code runs, `mask` is 0:
// no device memory is accessible. While a kernel runs, bit 31 is set, and only the memory of the kernel's
// device and of enabled peers is accessible. Copies check their ranges themselves, so without bit 31 other
// devices keep their rights. Rights are set for whole huge pages, since the time grows with the number of
// pages: small pages take up to two fifths of a test's time.
static const size_t page = (size_t)sysconf(_SC_PAGESIZE), huge_page = (size_t)2 << 20;
static char *huge_page_of(const char *p) { return (char *)((uintptr_t)p & ~(huge_page - 1)); }
static bool some_open; // the host's code may use some managed memory until the device works again
static void set_access(unsigned mask)
{
    for (int d = 0; some_open && d < emu_device_count; d++) {
        for (auto &a : emu_devices[d].allocations) {
            if (a.open) mprotect(a.p, (a.n + page - 1) & ~(page - 1), PROT_NONE);
            a.open = false;
        }
    }
    some_open = false;
    for (int d = 0; d < emu_device_count; d++) {
        emu_device &dev = emu_devices[d];
        bool on = mask >> d & 1;
        if (on == dev.readable || (mask && !(mask >> 31) && !on)) continue;
        char *first = huge_page_of(dev.bottom);
        if (first < dev.end)
            mprotect(first, (size_t)(dev.end - first), on ? PROT_READ | PROT_WRITE : PROT_NONE);
        dev.readable = on;
    }
}

static void check_canaries() // checks redzones after every operation; not in the asan build
{
#ifndef EMU_ASAN
    const uint64_t canary = 0xfdfdfdfdfdfdfdfdull;
    for (int d = 0; d < emu_device_count; d++) {
        if (!emu_devices[d].readable) continue;
        for (auto &a : emu_devices[d].allocations) {
            for (size_t i = 0; !a.freed && i < EMU_REDZONE; i += 8) {
                uint64_t before, behind;
                memcpy(&before, a.p - EMU_REDZONE + i, 8);
                memcpy(&behind, a.p + a.n + i, 8);
                if (before != canary || behind != canary) {
                    emu_fatal("write out of bounds of allocation %d of device %d (%zu bytes), near byte %ld",
                              a.serial, d, a.n, before != canary ? (long)i - EMU_REDZONE : (long)(a.n + i));
                }
            }
        }
    }
#endif
}

// Opens managed memory at p, which the host's code has touched. Returns false if p is not in managed memory.
// *busy names an operation that may still use the memory; nullptr: the host may continue.
static bool opens_to_host(char *p, const char **busy);

static struct sigaction old_segv, old_bus;
static void on_segv(int number, siginfo_t *info, void *context)
{
    char text[300];
    const char *busy = nullptr;
    bool on_fiber = false;
    if (!emu_current_op && opens_to_host((char *)info->si_addr, &busy) && !busy) return;
    emu_describe(info->si_addr, text, sizeof text);
    bool device = strstr(text, "not device memory") == nullptr;
    if (emu_current_fiber != &main_fiber) on_fiber = emu_block.current >= 0;
    if (!device && !on_fiber) { // the address is not in the emulator's memory
        struct sigaction &old = number == SIGBUS ? old_bus : old_segv;
        if (old.sa_flags & SA_SIGINFO) { old.sa_sigaction(number, info, context); return; }
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    fflush(stdout);
    const char *why = "";
    const char *stack = emu_current_fiber->stack, *at = (const char *)info->si_addr;
    if (!device)
        why = on_fiber && at < stack && at >= stack - 65536 ? ": the thread's stack is full"
                                                            : ": neither device nor shared memory";
    else if (busy) why = ": HOST code touched managed memory, and has not waited for operation ";
    else if (!emu_current_op) why = ": HOST code touched device memory";
    else why = ": not accessible from this device (is peer access enabled?) or not allocated";
    fprintf(stderr, "emu error: illegal access, %s%s%s\n", text, why, busy ? busy : "");
    print_place(stderr);
    _exit(EMU_EXIT_STATUS);
}

// ============================================================================== scheduler
struct emu_event {
    int device;
    unsigned flags;
    emu_op_ptr op;
    struct emu_graph *capture = nullptr;
    int node = -1;
};
struct emu_node { emu_work work; int lane; std::vector<int> after; };
struct emu_graph {
    std::vector<emu_node> nodes;
    std::vector<int> lanes;           // the device of each stream that took part
    std::vector<emu_stream *> joined; // the streams that take part, during the capture
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    std::thread::id thread;
    bool invalid = false;
};
struct emu_graph_exec { std::vector<emu_node> nodes; std::vector<emu_stream *> lanes; emu_op_ptr last; };

static std::vector<emu_stream *> streams; // all streams, with the legacy streams and the streams of graphs
static std::set<emu_event *> events;
static std::set<emu_graph *> graphs, captures;
static std::set<emu_graph_exec *> execs;
static int other_objects, user_streams;
static uint32_t op_count;
static double virtual_us;
static std::atomic<long> slices; // slices run so far, for the watchdog

static bool opens_to_host(char *p, const char **busy)
{
    // Does not wait for the lock: the thread that holds it may wait for this thread.
    std::unique_lock<std::recursive_mutex> lock(emu_lock, std::try_to_lock);
    const int device = emu_device_of(p);
    emu_allocation *a = device < 0 ? nullptr : emu_find_allocation(device, p);
    if (!lock.owns_lock() || !a || !a->managed || a->freed || p >= a->p + a->n) return false;
    for (auto s : streams) {
        const bool known = emu_host_clock.size() > (size_t)s->id && emu_host_clock[(size_t)s->id] >= s->used;
        if (s->used && !known) { *busy = s->last->work.name.c_str(); return true; }
    }
    mprotect(a->p, (a->n + page - 1) & ~(page - 1), PROT_READ | PROT_WRITE);
    return a->open = some_open = true;
}

static void join(emu_clock &a, const emu_clock &b)
{
    if (a.size() < b.size()) a.resize(b.size());
    for (size_t i = 0; i < b.size(); i++) a[i] = std::max(a[i], b[i]);
}

static bool runnable(emu_stream *s)
{
    if (s->queue.empty()) return false;
    for (auto &op : s->queue.front()->after) if (!op->done) return false;
    return true;
}

static void spoil(char *p, size_t n) // changes a byte in each KiB; a second call changes it back
{
    for (size_t i = 0; i < n; i += 1024) p[i + i / 1024 * 37 % std::min<size_t>(1024, n - i)] ^= 0x10;
}
// Spoils the memory of other devices if a faulty link makes kernels of the device load wrong bytes. A second
// call repairs the memory.
static void spoil_loads(const emu_op &op)
{
    if (op.work.kind != EMU_KERNEL) return;
    for (int d = 0; d < emu_device_count; d++) {
        if (d == op.stream->device || !(op.work.devices >> d & 1) ||
            !(emu_devices[op.stream->device].wrong[d] & EMU_WRONG_LOADS))
            continue;
        for (auto &a : emu_devices[d].allocations) if (!a.freed) spoil(a.p, a.n);
    }
}

static void run_slice(emu_stream *s) // runs a slice of the operation at the head of the stream
{
    emu_op_ptr op = s->queue.front();
    if (op->work.body) {
        const int smallest = op->work.least_parts, more = op->work.most_parts - smallest;
        if (!op->parts) op->parts = scheduler == EMU_EAGER ? 1
            : smallest + (int)random_below((size_t)more + 1);
        set_access(op->work.devices);
        emu_current_op = op.get();
        slices++;
        spoil_loads(*op);
        op->work.body(op->part++, op->parts);
        spoil_loads(*op);
        if (op->work.devices) check_canaries();
        emu_current_op = nullptr;
        virtual_us += 1;
        if (op->part < op->parts) return;
        emu_stats.operations++;
    }
    virtual_us += op->work.us;
    op->finished_us = virtual_us;
    op->done = true;
    op->after.clear();
    op->work.body = nullptr;
    s->queue.pop_front();
}

static emu_stream *needed_for(const emu_op_ptr &op) // returns a runnable stream without which op cannot run
{
    if (op->stream->queue.front() != op) return needed_for(op->stream->queue.front());
    std::vector<emu_op_ptr> missing;
    for (auto &x : op->after) if (!x->done) missing.push_back(x);
    return missing.empty() ? op->stream : needed_for(missing[random_below(missing.size())]);
}

static emu_stream *choose(const emu_op_ptr &target)
{
    std::vector<emu_stream *> ready;
    if (scheduler == EMU_LAZY && target) return needed_for(target);
    for (auto s : streams) if (runnable(s)) ready.push_back(s);
    if (ready.empty()) return nullptr;
    auto older = [](emu_stream *a, emu_stream *b) {
        return a->queue.front()->number < b->queue.front()->number;
    };
    auto lower = [](emu_stream *a, emu_stream *b) { return a->priority < b->priority; };
    if (scheduler == EMU_EAGER) return *std::min_element(ready.begin(), ready.end(), older);
    if (scheduler == EMU_NEWEST) return *std::max_element(ready.begin(), ready.end(), older);
    if (scheduler == EMU_PCT) {
        emu_stream *s = *std::max_element(ready.begin(), ready.end(), lower);
        if (random_below(16) == 0) s->priority = random_below(1000);
        return s;
    }
    return ready[random_below(ready.size())];
}

static void run_until(const emu_op_ptr &op) // runs operations until op is done, but does not tell the host
{
    while (op && !op->done) {
        emu_stream *s = choose(op);
        if (!s) emu_fatal("operation '%s' can never run: it waits for itself", op->work.name.c_str());
        run_slice(s);
    }
    set_access(0);
}
static void synchronise(const emu_op_ptr &op) // runs op to its end; the host may rely on op afterwards
{
    run_until(op);
    if (op) join(emu_host_clock, op->clock);
}

static void progress() // lets the device work while the host enqueues: any progress is legal
{
    if (scheduler == EMU_EAGER) {
        while (emu_stream *s = choose(nullptr)) run_slice(s);
    } else if ((scheduler == EMU_UNIFORM || scheduler == EMU_PCT) && random_below(256) < run_ahead) {
        for (unsigned n = random_below(4); n--;) if (emu_stream *s = choose(nullptr)) run_slice(s);
    }
    set_access(0);
}

static emu_stream *actual(cudaStream_t s) { return s ? s : emu_devices[current_device].legacy; }
static bool bad_stream(cudaStream_t s)
{
    return s && std::find(streams.begin(), streams.end(), s) == streams.end();
}
int emu_stream_device(cudaStream_t s) { return bad_stream(s) ? -1 : actual(s)->device; }
int emu_current_device() { return current_device; }
void emu_count_object(int by) { other_objects += by; }

static emu_op_ptr add_op(emu_stream *s, emu_work work, std::vector<emu_op_ptr> after = {})
{
    auto op = std::make_shared<emu_op>();
    op->work = std::move(work);
    op->stream = s;
    op->after = std::move(after);
    if (s->last) op->after.push_back(s->last);
    for (auto &w : s->waits) op->after.push_back(w);
    s->waits.clear();
    // The legacy stream waits for all blocking streams of its device, which wait for the legacy stream.
    for (auto t : streams) {
        bool legacy = s == emu_devices[s->device].legacy || t == emu_devices[s->device].legacy;
        if (t != s && t->device == s->device && t->last && legacy &&
            !((t->flags | s->flags) & cudaStreamNonBlocking))
            op->after.push_back(t->last);
    }
    op->clock = emu_host_clock;
    for (auto &x : op->after) join(op->clock, x->clock);
    if (op->clock.size() <= (size_t)s->id) op->clock.resize((size_t)s->id + 1);
    op->clock[(size_t)s->id] = op->ticket = ++s->tickets;
    op->number = ++op_count;
    if (op->work.kind != EMU_MARK) s->used = op->ticket;
    emu_trace_op(*op);
    if (!op->work.pins.empty()) emu_trace_pins(*op);
    s->queue.push_back(op);
    s->last = op;
    return op;
}

static int add_node(emu_stream *s, emu_work work)
{
    emu_node n{std::move(work), s->capture_lane, s->capture_waits};
    if (s->capture_last >= 0) n.after.push_back(s->capture_last);
    s->capture_waits.clear();
    s->capture->nodes.push_back(std::move(n));
    return s->capture_last = (int)s->capture->nodes.size() - 1;
}

static emu_work mark(const char *name)
{
    emu_work w;
    w.name = name;
    return w;
}

cudaError_t emu_enqueue(cudaStream_t handle, emu_work work)
{
    emu_stream *s = actual(handle);
    if (s->capture) { add_node(s, std::move(work)); return cudaSuccess; }
    if (s == emu_devices[s->device].legacy) { // the legacy stream would wait for a captured stream
        for (auto t : streams) {
            if (t->capture && t->device == s->device && !(t->flags & cudaStreamNonBlocking))
                return emu_error(cudaErrorStreamCaptureImplicit);
        }
    }
    add_op(s, std::move(work));
    progress();
    return cudaSuccess;
}

// ============================================================================== control
static long api_calls, fault_in, fault_count;
static cudaError_t fault_error;
static std::string fault_call; // the function whose calls fail; empty: all functions
static std::string watched_kernel; // the kernel whose launches emu_watch counts

static emu_stream *new_stream(int device, unsigned flags)
{
    static int serial;
    if (streams.empty()) serial = 0;
    auto s = new emu_stream();
    s->id = serial++;
    s->device = device;
    s->flags = flags;
    s->priority = random_below(1000);
    streams.push_back(s);
    return s;
}
static void delete_stream(emu_stream *s)
{
    run_until(s->last);
    streams.erase(std::find(streams.begin(), streams.end(), s));
    delete s;
}

extern "C" void emu_reseed(uint64_t seed)
{
    static const unsigned run_aheads[4] = {0, 16, 100, 255};
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    random_state = (seed + 1) * 0x9E3779B97F4A7C15ull | 1;
    for (int i = 0; i < 8; i++) emu_random();
    scheduler = (int)(seed % EMU_SCHEDULERS);
    run_ahead = run_aheads[random_below(4)];
    for (auto s : streams) s->priority = random_below(1000);
}
extern "C" void emu_set_scheduler(emu_scheduler s) { scheduler = s; }

static void watchdog(long seconds) // ends the process if an operation never ends
{
    long before = -1;
    for (;;) {
        std::this_thread::sleep_for(std::chrono::seconds(seconds));
        if (emu_current_op && slices == before) {
            fprintf(stderr,
                    "emu error: an operation runs for more than %ld s: an endless loop, or a kernel that "
                    "waits for others?\n",
                    seconds);
            print_place(stderr);
            fflush(stderr);
            _exit(EMU_EXIT_STATUS);
        }
        before = slices;
    }
}

static void first_configuration()
{
    static pid_t watched;
    if (!emu_shared_arena) {
        emu_shared_arena = (char *)mmap(nullptr, EMU_SHARED_ARENA, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (emu_shared_arena == MAP_FAILED) emu_fatal("no memory for shared memory");
        struct sigaction action{};
        action.sa_sigaction = on_segv;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
#ifndef EMU_ASAN // the asan build has its own handler
        static char signal_stack[65536]; // the handler has its own stack: a full stack cannot hold its frame
        stack_t stack{};
        stack.ss_sp = signal_stack;
        stack.ss_size = sizeof signal_stack;
        sigaltstack(&stack, nullptr);
#endif
        sigaction(SIGSEGV, &action, &old_segv);
        sigaction(SIGBUS, &action, &old_bus);
    }
    if (watched != getpid()) { // a child of fork has only the calling thread
        watched = getpid();
        const char *seconds = getenv("EMU_WATCHDOG");
        std::thread(watchdog, seconds ? atol(seconds) : 120).detach();
    }
}

static bool peers_allowed;
extern "C" void emu_configure(int devices, size_t bytes, int peers, uint64_t seed)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    if (devices < 0 || devices > EMU_MAX_DEVICES)
        emu_fatal("emu_configure: %d devices, at most %d", devices, EMU_MAX_DEVICES);
    first_configuration();
    for (auto s : std::vector<emu_stream *>(streams)) run_until(s->last);
    for (auto s : streams) delete s;
    for (auto e : events) delete e;
    for (auto g : graphs) delete g;
    for (auto g : captures) delete g;
    for (auto x : execs) delete x;
    while (!pinned.empty()) drop_pinned(pinned.begin()->second);
    streams.clear();
    events.clear();
    graphs.clear();
    captures.clear();
    execs.clear();
    functions.clear();
    emu_host_clock.clear();
    emu_trace_reset();
    for (auto &d : emu_devices) {
        if (!d.base) continue;
        unpoison(huge_page_of(d.bottom), (size_t)(d.end - huge_page_of(d.bottom)));
        munmap(d.mapped, emu_address_space + FAR_REGION + huge_page);
        emu_trace_device_gone(d);
        d = emu_device();
    }
    // Each address is used once, so the address space has room for several rounds of allocating and freeing.
    emu_address_space = (bytes * 4 + ((size_t)16 << 20) + huge_page - 1) / huge_page * huge_page;
    emu_device_count = devices;
    peers_allowed = peers != 0;
    current_device = 0;
    other_objects = user_streams = 0;
    op_count = 0;
    virtual_us = 0;
    api_calls = fault_in = fault_count = 0;
    fault_call.clear();
    emu_refused = 0;
    emu_epilogue_us = 0;
    for (double &us : emu_product_us) us = 0;
    watched_kernel.clear();
    last_error = cudaSuccess;
    emu_stats = emu_counts();
    emu_reseed(seed);
    for (int i = 0; i < devices; i++) {
        emu_device &d = emu_devices[i];
        d.mapped = (char *)mmap(nullptr, emu_address_space + FAR_REGION + huge_page, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (d.mapped == MAP_FAILED) emu_fatal("no address space for device %d: %s", i, strerror(errno));
        d.base = huge_page_of(d.mapped + huge_page - 1);
        d.end = d.bottom = d.base + emu_address_space;
#ifdef MADV_HUGEPAGE
        madvise(d.base, emu_address_space, MADV_HUGEPAGE);
#endif
        d.limit = bytes;
        d.legacy = new_stream(i, 0);
        emu_trace_device(d);
    }
}

cudaError_t emu_enter(const char *call)
{
    if (emu_current_op)
        emu_fatal("%s is called from within a kernel or a host function, where CUDA forbids it", call);
    if (!emu_shared_arena) {
        const char *devices = getenv("EMU_DEVICES"), *memory = getenv("EMU_MEMORY"),
                   *peers = getenv("EMU_PEERS"), *seed = getenv("EMU_SEED");
        emu_configure(devices ? atoi(devices) : 1, memory ? strtoull(memory, nullptr, 0) : (size_t)256 << 20,
                      peers ? atoi(peers) : 1, seed ? strtoull(seed, nullptr, 0) : 0);
    }
    api_calls++;
    const bool hit = fault_call.empty() || fault_call == call;
    if (hit && fault_in > 0 && --fault_in == 0 && fault_count != 0) {
        if (--fault_count != 0) fault_in = 1;
        return emu_error(fault_error);
    }
    return cudaSuccess;
}

extern "C" void emu_inject_fault(long nth, int error, long count)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    fault_in = nth;
    fault_error = (cudaError_t)error;
    fault_count = count;
    fault_call.clear();
}
extern "C" void emu_inject_fault_into(const char *call, long nth, int error, long count)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    emu_inject_fault(nth, error, count);
    fault_call = call;
}
extern "C" void emu_watch(const char *kernel) { watched_kernel = kernel ? kernel : ""; }
extern "C" void emu_refuse_algorithms(unsigned bits, int status)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    emu_refused = bits;
    emu_refused_status = status;
}
extern "C" void emu_set_product_times(const double us[4], double epilogue_us)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    std::copy(us, us + 4, emu_product_us);
    emu_epilogue_us = epilogue_us;
}
extern "C" void emu_set_capability(int device, int major, int minor)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    if (device < 0 || device >= emu_device_count)
        emu_fatal("emu_set_capability: device %d of %d", device, emu_device_count);
    emu_devices[device].major = major;
    emu_devices[device].minor = minor;
}
extern "C" void emu_library_copy(void *to, const void *from, size_t n)
{
    cudaError_t error = cudaMemcpy(to, from, n, cudaMemcpyDefault);
    if (error != cudaSuccess) emu_fatal("emu_library_copy: %s", cudaGetErrorString(error));
}
extern "C" void emu_set_managed(int device, int concurrent)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    if (device < 0 || device >= emu_device_count)
        emu_fatal("emu_set_managed: device %d of %d", device, emu_device_count);
    emu_devices[device].concurrent = concurrent != 0;
}
extern "C" void emu_set_link(int from, int to, unsigned wrong)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    if (std::min(from, to) < 0 || std::max(from, to) >= emu_device_count)
        emu_fatal("emu_set_link: devices %d and %d of %d", from, to, emu_device_count);
    emu_devices[to].wrong[from] = wrong;
}
extern "C" long emu_api_calls(void) { return api_calls; }
extern "C" emu_counts emu_get_counts(void) { return emu_stats; }
extern "C" void emu_reset_counts(void) { emu_stats = emu_counts(); }
extern "C" const char *emu_build(void)
{
#if defined(EMU_TRACE)
    return "trace";
#elif defined(EMU_ASAN)
    return "asan";
#else
    return "plain";
#endif
}

extern "C" size_t emu_pinned_bytes(void)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    size_t bytes = 0;
    for (auto &p : pinned) bytes += p.second.n;
    return bytes;
}

extern "C" int emu_live_objects(char *text, size_t size)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    int allocations = 0;
    for (int d = 0; d < emu_device_count; d++)
        for (auto &a : emu_devices[d].allocations) allocations += !a.freed;
    int n_graphs = (int)(graphs.size() + captures.size() + execs.size());
    if (text) {
        snprintf(text, size,
                 "%d device allocations, %zu of pinned memory, %d streams, %zu events, %d graphs, %d cuBLAS "
                 "objects",
                 allocations, pinned.size(), user_streams, events.size(), n_graphs, other_objects);
    }
    return allocations + (int)pinned.size() + user_streams + (int)events.size() + n_graphs + other_objects;
}

// ============================================================================== kernels
extern "C" char __executable_start;
static std::map<const void *, long> kernel_runs;

// EMU_KERNELS=file: at the end of the program writes how often each kernel has run, by the address that nm
// prints for the kernel (see kernels.py).
static void write_kernel_runs()
{
    FILE *f = fopen(getenv("EMU_KERNELS"), "w");
    for (auto &k : kernel_runs)
        if (f)
            fprintf(f, "%lx %ld\n", (unsigned long)((const char *)k.first - &__executable_start), k.second);
    if (f) fclose(f);
}

static uint64_t block_position(uint64_t i, uint64_t n, int part_count, thread_order order, uint32_t number)
{
    if (part_count > 1) return number & 1 ? i : n - 1 - i; // all slices of a kernel share one order
    if (order == IN_ORDER) return i;
    if (order == REVERSED) return n - 1 - i;
    uint64_t multiplier = number * 2654435761u % n | 1;
    while (std::gcd(multiplier, n) != 1) multiplier += 2;
    return (multiplier % n * i + number % n) % n;
}

cudaError_t emu_launch(const char *name, const void *kernel, dim3 grid, dim3 shape, size_t shared,
                       emu_any_stream stream, std::function<void()> body)
{
    const cudaStream_t handle = stream.it;
    const bool chained = stream.chains;
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    if (cudaError_t e = emu_enter("a launch")) return e;
    if (bad_stream(handle)) return emu_error(cudaErrorInvalidResourceHandle);
    emu_stream *s = actual(handle);
    uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z, threads = (uint64_t)shape.x * shape.y * shape.z;
    if (!blocks || !threads || threads > EMU_MAX_THREADS || shape.z > 64 || grid.x > 0x7fffffffu ||
        grid.y > 65535 || grid.z > 65535) {
        return emu_error(cudaErrorInvalidConfiguration);
    }
    function_info &f = functions[kernel];
    f.name = name;
    if (shared > (size_t)f.dynamic_limit || shared + f.static_bytes > EMU_OPTIN_SHARED)
        return emu_error(cudaErrorInvalidValue);
    if (s->device != current_device) return emu_error(cudaErrorInvalidResourceHandle);
    emu_stats.launches++;
    emu_stats.watched += watched_kernel == name;
    emu_work work;
    work.kind = EMU_KERNEL;
    work.name = name;
    work.devices = 1u << s->device | emu_devices[s->device].peers | 1u << 31;
    work.most_parts = (int)std::min<uint64_t>(blocks, 4);
    work.body = [=](int part, int parts) {
        gridDim = grid;
        blockDim = shape;
        emu_block.threads = (int)threads;
        emu_block.dynamic = shared;
        emu_block.chained = chained;
        block.function = kernel;
        if (block.shape.x != shape.x || block.shape.y != shape.y || block.shape.z != shape.z) {
            for (unsigned i = 0; i < threads; i++)
                block.thread_index[i] = {i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y};
            block.shape = shape;
        }
        if (part == 0) {
            emu_stats.kernels++;
            if (kernel_runs.empty() && getenv("EMU_KERNELS")) atexit(write_kernel_runs);
            kernel_runs[kernel]++;
        }
        thread_order order = scheduler == EMU_EAGER ? IN_ORDER : (thread_order)random_below(3);
        for (uint64_t i = blocks * (unsigned)part / (unsigned)parts;
             i < blocks * (unsigned)(part + 1) / (unsigned)parts; i++) {
            uint64_t k = block_position(i, blocks, parts, order, emu_current_op->number);
            blockIdx = {(unsigned)(k % grid.x), (unsigned)(k / grid.x % grid.y),
                        (unsigned)(k / grid.x / grid.y)};
            run_block(body, (uint32_t)k, order);
            emu_stats.blocks++;
            emu_stats.threads += (long)threads;
        }
    };
    return emu_enqueue(handle, std::move(work));
}

cudaError_t emu_function_set(const void *kernel, cudaFuncAttribute a, int value)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    if (cudaError_t e = emu_enter("cudaFuncSetAttribute")) return e;
    if (a == cudaFuncAttributePreferredSharedMemoryCarveout)
        return value < -1 || value > 100 ? emu_error(cudaErrorInvalidValue) : cudaSuccess;
    if (a != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
        value + functions[kernel].static_bytes > EMU_OPTIN_SHARED) {
        return emu_error(cudaErrorInvalidValue);
    }
    functions[kernel].dynamic_limit = value;
    return cudaSuccess;
}

cudaError_t emu_function_get(cudaFuncAttributes *a, const void *kernel)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    if (cudaError_t e = emu_enter("cudaFuncGetAttributes")) return e;
    *a = cudaFuncAttributes();
    a->sharedSizeBytes = functions[kernel].static_bytes; // the size is known after the first run
    a->maxThreadsPerBlock = EMU_MAX_THREADS;
    a->ptxVersion = 90;
    a->numRegs = 64;
    a->maxDynamicSharedSizeBytes = functions[kernel].dynamic_limit;
    return cudaSuccess;
}

// Computes the occupancy as if every kernel had 64 registers.
cudaError_t emu_occupancy(int *blocks, const void *kernel, int threads, size_t shared)
{
    std::lock_guard<std::recursive_mutex> lock(emu_lock);
    if (cudaError_t e = emu_enter("cudaOccupancyMaxActiveBlocksPerMultiprocessor")) return e;
    if (threads < 1 || threads > EMU_MAX_THREADS) return emu_error(cudaErrorInvalidValue);
    size_t rounded = ((size_t)threads + 31) / 32 * 32, bytes = shared + functions[kernel].static_bytes + 1024;
    size_t n = std::min<size_t>(32, std::min<size_t>(2048 / rounded, 65536 / (64 * rounded)));
    *blocks = shared > (size_t)functions[kernel].dynamic_limit ? 0
                                                               : (int)std::min<size_t>(n, 228 * 1024 / bytes);
    return cudaSuccess;
}

// ============================================================================== runtime API: devices
// Every call takes the lock and may be made to fail. A call that releases does its work even if it fails.
#define EMU_API(name) \
    std::lock_guard<std::recursive_mutex> lock(emu_lock); \
    if (cudaError_t e_ = emu_enter(name)) return e_
#define EMU_RELEASE(name) \
    std::lock_guard<std::recursive_mutex> lock(emu_lock); \
    const cudaError_t fault = emu_enter(name)

// Refuses calls that would wait for, or disturb, streams that are being captured.
static cudaError_t forbidden_in_capture(bool whatever_mode)
{
    for (auto g : captures) {
        bool mine = g->thread == std::this_thread::get_id();
        bool allowed = g->mode == cudaStreamCaptureModeRelaxed ||
                       (g->mode == cudaStreamCaptureModeThreadLocal && !mine);
        if (allowed && !whatever_mode) continue;
        g->invalid = true;
        return emu_error(cudaErrorStreamCaptureUnsupported);
    }
    return cudaSuccess;
}
#define EMU_NOT_IN_CAPTURE(whatever_mode) if (cudaError_t c_ = forbidden_in_capture(whatever_mode)) return c_

static bool bad_device(int d) { return d < 0 || d >= emu_device_count; }

#define EMU_ERROR_NAME(name, number, text) case name: return #name;
#define EMU_ERROR_TEXT(name, number, text) case name: return text;
const char *cudaGetErrorName(cudaError_t e)
{
    switch (e) {
        EMU_ERRORS(EMU_ERROR_NAME)
    }
    return "unrecognized error code";
}
const char *cudaGetErrorString(cudaError_t e)
{
    switch (e) {
        EMU_ERRORS(EMU_ERROR_TEXT)
    }
    return "unrecognized error code";
}
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError()
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}

cudaError_t cudaGetDeviceCount(int *n)
{
    EMU_API("cudaGetDeviceCount");
    *n = emu_device_count;
    return emu_device_count ? cudaSuccess : emu_error(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device)
{
    EMU_API("cudaSetDevice");
    if (bad_device(device)) return emu_error(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device)
{
    EMU_API("cudaGetDevice");
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device)
{
    EMU_API("cudaGetDeviceProperties");
    if (bad_device(device)) return emu_error(cudaErrorInvalidDevice);
    *p = cudaDeviceProp();
    snprintf(p->name, sizeof p->name, "emulated device");
    p->totalGlobalMem = emu_devices[device].limit;
    p->sharedMemPerBlock = EMU_STATIC_SHARED;
    p->sharedMemPerBlockOptin = EMU_OPTIN_SHARED;
    p->sharedMemPerMultiprocessor = EMU_OPTIN_SHARED + 1024;
    p->major = emu_devices[device].major;
    p->minor = emu_devices[device].minor;
    p->multiProcessorCount = 4;
    p->warpSize = 32;
    p->maxThreadsPerBlock = EMU_MAX_THREADS;
    p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerBlock = 65536;
    p->l2CacheSize = 1 << 20;
    p->asyncEngineCount = 2;
    p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = 1;
    p->pciBusID = device + 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr a, int device)
{
    EMU_API("cudaDeviceGetAttribute");
    if (bad_device(device)) return emu_error(cudaErrorInvalidDevice);
    switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: *value = EMU_MAX_THREADS; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = EMU_STATIC_SHARED; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrClockRate: case cudaDevAttrMemoryClockRate: *value = 1000000; break;
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 64; break;
    case cudaDevAttrConcurrentKernels: *value = 1; break;
    case cudaDevAttrL2CacheSize: *value = 1 << 20; break;
    case cudaDevAttrAsyncEngineCount: *value = 2; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrComputeCapabilityMajor: *value = emu_devices[device].major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = emu_devices[device].minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = EMU_OPTIN_SHARED + 1024; break;
    case cudaDevAttrConcurrentManagedAccess: *value = emu_devices[device].concurrent; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = EMU_OPTIN_SHARED; break;
    default: return emu_error(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version)
{
    EMU_API("cudaDriverGetVersion");
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version)
{
    EMU_API("cudaRuntimeGetVersion");
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize()
{
    EMU_RELEASE("cudaDeviceSynchronize");
    EMU_NOT_IN_CAPTURE(true);
    emu_stats.host_syncs++;
    for (auto s : std::vector<emu_stream *>(streams)) {
        if (s->device != current_device) continue;
        if (!s->waits.empty()) add_op(s, mark("wait"));
        synchronise(s->last);
    }
    return fault;
}
static bool may_reach(int device, int peer)
{
    return peers_allowed && !(emu_devices[device].wrong[peer] & EMU_NO_ACCESS);
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    EMU_API("cudaDeviceCanAccessPeer");
    if (bad_device(device) || bad_device(peer)) return emu_error(cudaErrorInvalidDevice);
    *can = device != peer && may_reach(device, peer);
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    EMU_API("cudaDeviceEnablePeerAccess");
    if (flags) return emu_error(cudaErrorInvalidValue);
    if (bad_device(peer) || peer == current_device) return emu_error(cudaErrorInvalidDevice);
    if (!may_reach(current_device, peer)) return emu_error(cudaErrorPeerAccessUnsupported);
    if (emu_devices[current_device].peers >> peer & 1) return emu_error(cudaErrorPeerAccessAlreadyEnabled);
    emu_devices[current_device].peers |= 1u << peer;
    return cudaSuccess;
}
cudaError_t cudaDeviceDisablePeerAccess(int peer)
{
    EMU_API("cudaDeviceDisablePeerAccess");
    if (bad_device(peer)) return emu_error(cudaErrorInvalidDevice);
    if (!(emu_devices[current_device].peers >> peer & 1)) return emu_error(cudaErrorPeerAccessNotEnabled);
    emu_devices[current_device].peers &= ~(1u << peer);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *smallest, int *greatest)
{
    EMU_API("cudaDeviceGetStreamPriorityRange");
    *smallest = 0;
    *greatest = -5;
    return cudaSuccess;
}

// ============================================================================== runtime API: memory
// Allocates at an address that is a multiple of 256 and of no larger power of two, as CUDA promises no more;
// managed memory has separate pages. Allocations are placed from the end of the device's memory downwards:
// rights are set for whole huge pages, but an access beyond the end of memory still faults at once.
static void *allocate(size_t n, size_t charged, bool managed)
{
    emu_device &d = emu_devices[current_device];
    size_t total = (EMU_REDZONE + n + EMU_REDZONE + 511) & ~(size_t)511;
    char *last = d.bottom; // the end of the new allocation
    if (managed) {
        last -= (uintptr_t)(last - EMU_REDZONE) % page;
        total = ((n + page - 1) & ~(page - 1)) + 2 * EMU_REDZONE;
    }
    if (total > (size_t)(last - d.base))
        emu_fatal("cudaMalloc: the address space of device %d is used up by freed allocations",
                  current_device);
    set_access(0); // removes all access before the device's memory grows
    emu_allocation a{last - total + EMU_REDZONE, n, charged, false, (int)d.allocations.size(), managed};
    char *before = huge_page_of(d.bottom);
    d.bottom = last - total;
    poison(huge_page_of(d.bottom), (size_t)(before - huge_page_of(d.bottom)));
    d.used += charged;
    d.allocations.push_back(a);
    set_access(1u << current_device);
    unpoison(a.p - EMU_REDZONE, total);
    memset(a.p - EMU_REDZONE, 0xfd, total);
    memset(a.p, 0xff, n); // NaN in every float format, -1 as an index
    poison(a.p - EMU_REDZONE, EMU_REDZONE);
    poison(a.p + n, total - EMU_REDZONE - n);
    set_access(0);
    return a.p;
}
cudaError_t cudaMalloc(void **p, size_t n)
{
    EMU_API("cudaMalloc");
    EMU_NOT_IN_CAPTURE(false);
    emu_stats.allocations++;
    *p = nullptr;
    if (!n) return cudaSuccess;
    emu_device &d = emu_devices[current_device];
    size_t charged = (n + 511) & ~(size_t)511;
    if (n > d.limit || d.used + charged > d.limit) return emu_error(cudaErrorMemoryAllocation);
    *p = allocate(n, charged, false);
    return cudaSuccess;
}
// Takes none of the device's memory, because no page of the allocation is placed yet.
cudaError_t cudaMallocManaged(void **p, size_t n, unsigned flags)
{
    EMU_API("cudaMallocManaged");
    EMU_NOT_IN_CAPTURE(false);
    emu_stats.allocations++;
    *p = nullptr;
    if (!n || (flags != cudaMemAttachGlobal && flags != cudaMemAttachHost))
        return emu_error(cudaErrorInvalidValue);
    *p = allocate(n, 0, true);
    return cudaSuccess;
}
// Returns the error of placing n bytes of managed memory at `to`; cudaSuccess if `to` is a valid place.
static cudaError_t misplaced(const void *p, size_t n, cudaMemLocation to)
{
    const int device = emu_device_of(p);
    const emu_allocation *a = device < 0 ? nullptr : emu_find_allocation(device, p);
    if (!n || !a || !a->managed || emu_bad_range(p, n)) return cudaErrorInvalidValue;
    if (to.type == cudaMemLocationTypeHost) return cudaSuccess;
    if (to.type != cudaMemLocationTypeDevice) return cudaErrorInvalidValue;
    return bad_device(to.id) || !emu_devices[to.id].concurrent ? cudaErrorInvalidDevice : cudaSuccess;
}
cudaError_t cudaMemAdvise(const void *p, size_t n, cudaMemoryAdvise advice, cudaMemLocation location)
{
    EMU_API("cudaMemAdvise");
    if (advice < cudaMemAdviseSetReadMostly || advice > cudaMemAdviseUnsetAccessedBy)
        return emu_error(cudaErrorInvalidValue);
    if (cudaError_t e = misplaced(p, n, location)) return emu_error(e);
    const bool stays = location.type == cudaMemLocationTypeDevice;
    if (stays && advice == cudaMemAdviseSetPreferredLocation) emu_stats.advised += (long)n;
    return cudaSuccess;
}
// Enqueues an operation that does nothing, because a prefetch does not change the contents of managed memory.
cudaError_t cudaMemPrefetchAsync(const void *p, size_t n, cudaMemLocation location, unsigned flags,
                                 cudaStream_t handle)
{
    EMU_API("cudaMemPrefetchAsync");
    if (bad_stream(handle)) return emu_error(cudaErrorInvalidResourceHandle);
    if (flags) return emu_error(cudaErrorInvalidValue);
    if (cudaError_t e = misplaced(p, n, location)) return emu_error(e);
    emu_stream *s = actual(handle);
    if (s->capture) { s->capture->invalid = true; return emu_error(cudaErrorStreamCaptureUnsupported); }
    emu_stats.prefetches++;
    emu_stats.prefetched += (long)n;
    return emu_enqueue(handle, mark("cudaMemPrefetchAsync"));
}
cudaError_t cudaFree(void *p)
{
    EMU_RELEASE("cudaFree");
    if (!p) return fault;
    EMU_NOT_IN_CAPTURE(false);
    emu_stats.allocations++;
    int device = emu_device_of(p);
    emu_allocation *a = device < 0 ? nullptr : emu_find_allocation(device, p);
    if (!a || a->p != p) emu_fatal("cudaFree(%p): not the address of an allocation", p);
    if (a->freed)
        emu_fatal("cudaFree(%p): allocation %d of device %d is freed already", p, a->serial, device);
    for (auto s : std::vector<emu_stream *>(streams)) if (s->device == device) run_until(s->last);
    set_access(1u << device);
    memset(a->p, 0xff, a->n);
    poison(a->p, a->n);
    set_access(0);
    a->freed = true;
    emu_devices[device].used -= a->charged;
    return fault;
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    EMU_API("cudaMemGetInfo");
    *total = emu_devices[current_device].limit;
    *available = *total - emu_devices[current_device].used;
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags)
{
    EMU_API("cudaHostAlloc");
    EMU_NOT_IN_CAPTURE(false);
    emu_stats.allocations++;
    *p = nullptr;
    if (flags > 7) return emu_error(cudaErrorInvalidValue);
    if (!n) return cudaSuccess;
    if (posix_memalign(p, 256, n) != 0) { *p = nullptr; return emu_error(cudaErrorMemoryAllocation); }
    memset(*p, 0xff, n);
    add_pinned(*p, n, false);
    return cudaSuccess;
}
static bool is_pinned(const void *p, size_t n)
{
    const emu_pinned *m = emu_find_pinned(p);
    return m && (const char *)p + n <= m->p + m->n;
}
cudaError_t cudaFreeHost(void *p)
{
    EMU_RELEASE("cudaFreeHost");
    if (!p) return fault;
    emu_stats.allocations++;
    auto it = pinned.find((char *)p);
    if (it == pinned.end() || it->second.registered) return emu_error(cudaErrorInvalidValue);
    for (auto s : std::vector<emu_stream *>(streams)) run_until(s->last);
    drop_pinned(it->second);
    return fault;
}
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags)
{
    EMU_API("cudaHostRegister");
    emu_stats.allocations++;
    if (!p || !n || flags > 15 || emu_device_of(p) >= 0) return emu_error(cudaErrorInvalidValue);
    auto next = pinned.lower_bound((char *)p);
    if (emu_find_pinned(p) || (next != pinned.end() && next->first < (char *)p + n))
        return emu_error(cudaErrorHostMemoryAlreadyRegistered);
    add_pinned(p, n, true);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p)
{
    EMU_RELEASE("cudaHostUnregister");
    emu_stats.allocations++;
    auto it = pinned.find((char *)p);
    if (it == pinned.end() || !it->second.registered) return emu_error(cudaErrorHostMemoryNotRegistered);
    for (auto s : std::vector<emu_stream *>(streams)) run_until(s->last);
    drop_pinned(it->second);
    return fault;
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    EMU_API("cudaHostGetDevicePointer");
    if (flags || !emu_find_pinned(host)) return emu_error(cudaErrorInvalidValue);
    *device = host; // unified addressing: both addresses are the same
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p)
{
    EMU_API("cudaPointerGetAttributes");
    int device = emu_device_of(p);
    bool pin = emu_find_pinned(p) != nullptr;
    const emu_allocation *of = device >= 0 ? emu_find_allocation(device, p) : nullptr;
    const bool managed = of && of->managed;
    a->type = managed       ? cudaMemoryTypeManaged
              : device >= 0 ? cudaMemoryTypeDevice
              : pin         ? cudaMemoryTypeHost
                            : cudaMemoryTypeUnregistered;
    a->device = device >= 0 ? device : pin ? current_device : -2;
    a->devicePointer = device >= 0 || pin ? (void *)p : nullptr;
    a->hostPointer = pin ? (void *)p : nullptr;
    return cudaSuccess;
}

// -------------------------------------------------------------------------------- copies
struct rectangle { char *to; const char *from; size_t to_pitch, from_pitch, width, height; };

static void copy_rows(const rectangle &r, size_t begin, size_t end)
{
    for (size_t y = begin; y < end; y++) {
        emu_touch(r.from + y * r.from_pitch, r.width, EMU_COPIES_FROM);
        emu_touch(r.to + y * r.to_pitch, r.width, EMU_WRITES);
        memcpy(r.to + y * r.to_pitch, r.from + y * r.from_pitch, r.width);
    }
}
static emu_body copy_body(rectangle r)
{
    if (r.height == 1) { // a slice of the copy is a slice of the row
        return [r](int part, int parts) {
            size_t begin = r.width * (size_t)part / (size_t)parts & ~(size_t)15;
            size_t end = part + 1 == parts ? r.width
                                           : r.width * (size_t)(part + 1) / (size_t)parts & ~(size_t)15;
            if (begin < end) copy_rows({r.to + begin, r.from + begin, 0, 0, end - begin, 1}, 0, 1);
        };
    }
    return [r](int part, int parts) {
        copy_rows(r, r.height * (size_t)part / (size_t)parts, r.height * (size_t)(part + 1) / (size_t)parts);
    };
}

static cudaError_t copy(rectangle r, cudaMemcpyKind kind, cudaStream_t handle, bool blocking,
                        const char *name)
{
    if (bad_stream(handle)) return emu_error(cudaErrorInvalidResourceHandle);
    if (!r.width || !r.height) return cudaSuccess;
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault)
        return emu_error(cudaErrorInvalidMemcpyDirection);
    if (r.height > 1 && (r.to_pitch < r.width || r.from_pitch < r.width))
        return emu_error(cudaErrorInvalidPitchValue);
    size_t to_bytes = (r.height - 1) * r.to_pitch + r.width,
           from_bytes = (r.height - 1) * r.from_pitch + r.width;
    int to = emu_device_of(r.to), from = emu_device_of(r.from);
    if (emu_bad_range(r.to, to_bytes) || emu_bad_range(r.from, from_bytes))
        return emu_error(cudaErrorInvalidValue);
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (to_device != (to >= 0) || from_device != (from >= 0)))
        return emu_error(cudaErrorInvalidValue);
    emu_stream *s = actual(handle);
    bool pageable = (to < 0 && !is_pinned(r.to, to_bytes)) || (from < 0 && !is_pinned(r.from, from_bytes));
    emu_work work;
    work.kind = EMU_COPY;
    work.name = name;
    work.devices = (to >= 0 ? 1u << to : 0) | (from >= 0 ? 1u << from : 0);
    work.most_parts = 4;
    emu_stats.copies++;
    if (pageable && !blocking) {
        emu_stats.pageable_async++;
        if (s->capture) { s->capture->invalid = true; return emu_error(cudaErrorStreamCaptureUnsupported); }
    }
    if (pageable && from < 0) { // staged: the source is read at once
        auto staged = std::make_shared<std::vector<char>>(r.width * r.height);
        for (size_t y = 0; y < r.height; y++)
            memcpy(staged->data() + y * r.width, r.from + y * r.from_pitch, r.width);
        emu_body inner = copy_body({r.to, staged->data(), r.to_pitch, r.width, r.width, r.height});
        work.body = [staged, inner](int part, int parts) { inner(part, parts); };
    } else {
        work.body = copy_body(r);
    }
    const bool between = to >= 0 && from >= 0 && to != from;
    const bool direct = between && ((emu_devices[to].peers >> from | emu_devices[from].peers >> to) & 1);
    if (direct && emu_devices[to].wrong[from] & EMU_WRONG_COPIES) {
        emu_body right = work.body;
        work.body = [right, r](int part, int parts) {
            right(part, parts);
            for (size_t y = 0; part + 1 == parts && y < r.height; y++) spoil(r.to + y * r.to_pitch, r.width);
        };
    }
    if (to < 0) work.pins.push_back({r.to, to_bytes, true});
    if (from < 0 && !pageable) work.pins.push_back({r.from, from_bytes, false});
    if (cudaError_t e = emu_enqueue(handle, std::move(work))) return e;
    // Copies within and between devices do not make the host wait.
    if (!s->capture && (to < 0 || (blocking && from < 0))) {
        if (blocking || pageable) {
            emu_stats.host_syncs++;
            synchronise(s->last);
        }
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind kind)
{
    EMU_API("cudaMemcpy");
    EMU_NOT_IN_CAPTURE(false);
    return copy({(char *)to, (const char *)from, n, n, n, 1}, kind, nullptr, true, "cudaMemcpy");
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind kind, cudaStream_t s)
{
    EMU_API("cudaMemcpyAsync");
    return copy({(char *)to, (const char *)from, n, n, n, 1}, kind, s, false, "cudaMemcpyAsync");
}
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                         size_t height, cudaMemcpyKind kind)
{
    EMU_API("cudaMemcpy2D");
    EMU_NOT_IN_CAPTURE(false);
    return copy({(char *)to, (const char *)from, to_pitch, from_pitch, width, height}, kind, nullptr, true,
                "cudaMemcpy2D");
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t s)
{
    EMU_API("cudaMemcpy2DAsync");
    return copy({(char *)to, (const char *)from, to_pitch, from_pitch, width, height}, kind, s, false,
                "cudaMemcpy2DAsync");
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t n,
                                cudaStream_t s)
{
    EMU_API("cudaMemcpyPeerAsync");
    if (bad_device(to_device) || bad_device(from_device)) return emu_error(cudaErrorInvalidDevice);
    if (n && (emu_device_of(to) != to_device || emu_device_of(from) != from_device))
        return emu_error(cudaErrorInvalidValue);
    return copy({(char *)to, (const char *)from, n, n, n, 1}, cudaMemcpyDeviceToDevice, s, false,
                "cudaMemcpyPeerAsync");
}
cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t n)
{
    // As in CUDA, the host does not wait.
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, n, nullptr);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s)
{
    EMU_API("cudaMemsetAsync");
    if (bad_stream(s)) return emu_error(cudaErrorInvalidResourceHandle);
    if (!n) return cudaSuccess;
    int device = emu_device_of(p);
    if (device < 0 || emu_bad_range(p, n)) return emu_error(cudaErrorInvalidValue);
    emu_work work;
    work.kind = EMU_MEMSET;
    work.name = "cudaMemset";
    work.devices = 1u << device;
    work.body = [=](int, int) {
        emu_touch(p, n, EMU_WRITES);
        memset(p, value, n);
    };
    emu_stats.memsets++;
    return emu_enqueue(s, std::move(work));
}
// As in CUDA, the host does not wait.
cudaError_t cudaMemset(void *p, int value, size_t n) { return cudaMemsetAsync(p, value, n, nullptr); }

// ============================================================================== runtime API: streams, events
static bool bad_event(cudaEvent_t e) { return !events.count(e); }
static cudaError_t in_capture(emu_stream *s) // refuses a call that is forbidden in a capture
{
    if (!s->capture) return cudaSuccess;
    s->capture->invalid = true;
    return emu_error(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int)
{
    EMU_API("cudaStreamCreate");
    if (flags > 1) return emu_error(cudaErrorInvalidValue);
    *s = new_stream(current_device, flags);
    user_streams++;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    EMU_RELEASE("cudaStreamDestroy");
    if (!s || bad_stream(s)) return emu_error(cudaErrorInvalidResourceHandle);
    if (s->capture) { // without this stream the capture is incomplete
        s->capture->invalid = true;
        if (s->capture_origin) {
            emu_graph *g = s->capture;
            for (auto t : g->joined) t->capture = nullptr;
            for (auto e : events) if (e->capture == g) e->capture = nullptr;
            captures.erase(g);
            delete g;
        } else s->capture->joined.erase(std::find(s->capture->joined.begin(), s->capture->joined.end(), s));
    }
    delete_stream(s);
    user_streams--;
    return fault;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    EMU_RELEASE("cudaStreamSynchronize");
    if (bad_stream(handle)) return emu_error(cudaErrorInvalidResourceHandle);
    emu_stream *s = actual(handle);
    if (cudaError_t e = in_capture(s)) return e;
    emu_stats.host_syncs++;
    if (!s->waits.empty()) add_op(s, mark("wait"));
    synchronise(s->last);
    return fault;
}
cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    EMU_API("cudaStreamQuery");
    if (bad_stream(handle)) return emu_error(cudaErrorInvalidResourceHandle);
    emu_stream *s = actual(handle);
    if (cudaError_t e = in_capture(s)) return e;
    progress();
    // Runs a slice, so that polling comes to an end.
    if (s->last && !s->last->done) { run_slice(choose(s->last)); set_access(0); return cudaErrorNotReady; }
    if (s->last) join(emu_host_clock, s->last->clock);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t e, unsigned flags)
{
    EMU_API("cudaStreamWaitEvent");
    if (bad_stream(handle) || bad_event(e)) return emu_error(cudaErrorInvalidResourceHandle);
    if (flags) return emu_error(cudaErrorInvalidValue);
    emu_stream *s = actual(handle);
    if (e->capture) { // the stream joins the capture
        if (s->capture && s->capture != e->capture) return emu_error(cudaErrorStreamCaptureMerge);
        if (s == emu_devices[s->device].legacy) return emu_error(cudaErrorStreamCaptureImplicit);
        if (!s->capture) {
            s->capture = e->capture;
            s->capture_last = -1;
            s->capture_origin = false;
            s->capture_waits.clear();
            s->capture_lane = (int)e->capture->lanes.size();
            e->capture->lanes.push_back(s->device);
            e->capture->joined.push_back(s);
        }
        s->capture_waits.push_back(e->node);
        return cudaSuccess;
    }
    if (s->capture) {
        if (!e->op) return cudaSuccess;
        s->capture->invalid = true;
        return emu_error(cudaErrorStreamCaptureIsolation);
    }
    if (e->op) s->waits.push_back(e->op); // as in CUDA, an event that was never recorded causes no wait
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *user)
{
    EMU_API("cudaLaunchHostFunc");
    if (bad_stream(s)) return emu_error(cudaErrorInvalidResourceHandle);
    emu_work work;
    work.kind = EMU_HOST_FUNCTION;
    work.name = "host function";
    work.body = [=](int, int) { f(user); };
    return emu_enqueue(s, std::move(work));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    EMU_API("cudaEventCreate");
    if (flags > 3) return emu_error(cudaErrorInvalidValue);
    *e = new emu_event{current_device, flags, nullptr};
    events.insert(*e);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    EMU_RELEASE("cudaEventDestroy");
    if (bad_event(e)) return emu_error(cudaErrorInvalidResourceHandle);
    events.erase(e);
    delete e;
    return fault;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t handle)
{
    EMU_API("cudaEventRecord");
    if (bad_stream(handle) || bad_event(e)) return emu_error(cudaErrorInvalidResourceHandle);
    emu_stream *s = actual(handle);
    if (e->device != s->device) return emu_error(cudaErrorInvalidResourceHandle);
    e->capture = s->capture;
    if (s->capture) {
        e->node = add_node(s, mark("event"));
        e->op = nullptr;
    } else {
        e->op = add_op(s, mark("event"));
        progress();
    }
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    EMU_RELEASE("cudaEventSynchronize");
    if (bad_event(e)) return emu_error(cudaErrorInvalidResourceHandle);
    if (e->capture) { e->capture->invalid = true; return emu_error(cudaErrorCapturedEvent); }
    emu_stats.event_syncs++;
    synchronise(e->op);
    return fault;
}
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    EMU_API("cudaEventQuery");
    if (bad_event(e)) return emu_error(cudaErrorInvalidResourceHandle);
    if (e->capture) { e->capture->invalid = true; return emu_error(cudaErrorCapturedEvent); }
    progress();
    if (e->op && !e->op->done) { run_slice(choose(e->op)); set_access(0); return cudaErrorNotReady; }
    if (e->op) join(emu_host_clock, e->op->clock);
    return cudaSuccess;
}
// Returns virtual time, in which each slice of work takes a microsecond.
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    EMU_API("cudaEventElapsedTime");
    if (bad_event(from) || bad_event(to) || !from->op || !to->op || from->device != to->device ||
        (from->flags | to->flags) & cudaEventDisableTiming) {
        return emu_error(cudaErrorInvalidResourceHandle);
    }
    if (!from->op->done || !to->op->done) return cudaErrorNotReady;
    *ms = (float)((to->op->finished_us - from->op->finished_us) * 1e-3);
    return cudaSuccess;
}

// ============================================================================== runtime API: graphs
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode)
{
    EMU_API("cudaStreamBeginCapture");
    if (bad_stream(s)) return emu_error(cudaErrorInvalidResourceHandle);
    if (!s) return emu_error(cudaErrorStreamCaptureUnsupported); // the legacy stream cannot be captured
    if (s->capture) return emu_error(cudaErrorIllegalState);
    emu_graph *g = new emu_graph();
    g->lanes = {s->device};
    g->joined = {s};
    g->mode = mode;
    g->thread = std::this_thread::get_id();
    captures.insert(g);
    s->capture = g;
    s->capture_origin = true;
    s->capture_lane = 0;
    s->capture_last = -1;
    s->capture_waits.clear();
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *status)
{
    EMU_API("cudaStreamIsCapturing");
    if (bad_stream(s)) return emu_error(cudaErrorInvalidResourceHandle);
    emu_graph *g = actual(s)->capture;
    *status = !g ? cudaStreamCaptureStatusNone
              : g->invalid ? cudaStreamCaptureStatusInvalidated
              : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    EMU_RELEASE("cudaStreamEndCapture"); // ends the capture even if the call fails
    *out = nullptr;
    if (bad_stream(s)) return emu_error(cudaErrorInvalidResourceHandle);
    emu_graph *g = s ? s->capture : nullptr;
    if (!g) return emu_error(cudaErrorIllegalState);
    if (!s->capture_origin) { g->invalid = true; return emu_error(cudaErrorStreamCaptureUnmatched); }
    if (g->mode != cudaStreamCaptureModeRelaxed && g->thread != std::this_thread::get_id())
        return emu_error(cudaErrorStreamCaptureWrongThread);
    if (!s->capture_waits.empty()) add_node(s, mark("join"));
    std::vector<char> reached(g->nodes.size() + 1, 0); // every node must precede the last node of the origin
                                                       // stream
    bool joined = true;
    if (s->capture_last >= 0) reached[(size_t)s->capture_last] = 1;
    for (size_t i = g->nodes.size(); i-- > 0;) {
        if (!reached[i]) joined = false;
        else for (int k : g->nodes[i].after) reached[(size_t)k] = 1;
    }
    for (auto t : g->joined) {
        if (t != s && !t->capture_waits.empty()) joined = false;
        t->capture = nullptr;
        t->capture_waits.clear();
    }
    for (auto e : events) if (e->capture == g) e->capture = nullptr;
    g->joined.clear();
    captures.erase(g);
    if (fault || g->invalid || !joined) {
        cudaError_t e = fault ? fault
                              : emu_error(g->invalid ? cudaErrorStreamCaptureInvalidated
                              : cudaErrorStreamCaptureUnjoined);
        delete g;
        return e;
    }
    graphs.insert(g);
    *out = g;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n)
{
    EMU_API("cudaGraphGetNodes");
    if (!graphs.count(g)) return emu_error(cudaErrorInvalidValue);
    for (size_t i = 0; nodes && i < std::min(*n, g->nodes.size()); i++) nodes[i] = &g->nodes[i];
    *n = g->nodes.size();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long)
{
    EMU_API("cudaGraphInstantiate");
    *x = nullptr;
    if (!graphs.count(g)) return emu_error(cudaErrorInvalidValue);
    emu_graph_exec *exec = new emu_graph_exec();
    exec->nodes = g->nodes;
    // Replays of a graph have their own streams.
    for (int device : g->lanes) exec->lanes.push_back(new_stream(device, cudaStreamNonBlocking));
    execs.insert(exec);
    *x = exec;
    return cudaSuccess;
}
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t x, cudaGraph_t g, cudaGraphExecUpdateResultInfo *info)
{
    EMU_API("cudaGraphExecUpdate");
    if (!execs.count(x) || !graphs.count(g) || !info) return emu_error(cudaErrorInvalidValue);
    *info = cudaGraphExecUpdateResultInfo{cudaGraphExecUpdateSuccess, nullptr, nullptr};
    if (x->nodes.size() != g->nodes.size()) info->result = cudaGraphExecUpdateErrorTopologyChanged;
    for (size_t i = 0; i < g->nodes.size() && !info->result; i++) {
        emu_node &old = x->nodes[i], &now = g->nodes[i];
        if (old.after != now.after || old.lane != now.lane)
            info->result = cudaGraphExecUpdateErrorTopologyChanged;
        else if (old.work.kind != now.work.kind) info->result = cudaGraphExecUpdateErrorNodeTypeChanged;
        else if (old.work.devices != now.work.devices)
            info->result = cudaGraphExecUpdateErrorParametersChanged;
        if (info->result) info->errorNode = &now;
    }
    if (info->result) return emu_error(cudaErrorGraphExecUpdateFailure);
    x->nodes = g->nodes;
    return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t x, cudaStream_t s)
{
    EMU_API("cudaGraphUpload");
    return !execs.count(x) || bad_stream(s) ? emu_error(cudaErrorInvalidValue) : cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t handle)
{
    EMU_API("cudaGraphLaunch");
    if (!execs.count(x) || bad_stream(handle)) return emu_error(cudaErrorInvalidResourceHandle);
    emu_stream *s = actual(handle);
    // Child graphs are not emulated.
    if (s->capture) { s->capture->invalid = true; return emu_error(cudaErrorNotSupported); }
    emu_stats.graph_launches++;
    std::vector<emu_op_ptr> before, ops;
    if (x->last) before.push_back(x->last); // launches of a graph run one after another
    emu_op_ptr start = add_op(s, mark("graph start"), before);
    for (auto &n : x->nodes) {
        std::vector<emu_op_ptr> after{start};
        for (int i : n.after) after.push_back(ops[(size_t)i]);
        ops.push_back(add_op(x->lanes[(size_t)n.lane], n.work, after));
    }
    x->last = add_op(s, mark("graph end"), ops);
    progress();
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    EMU_RELEASE("cudaGraphDestroy");
    if (!graphs.erase(g)) return emu_error(cudaErrorInvalidValue);
    delete g;
    return fault;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x)
{
    EMU_RELEASE("cudaGraphExecDestroy");
    if (!execs.erase(x)) return emu_error(cudaErrorInvalidValue);
    for (auto s : x->lanes) delete_stream(s);
    delete x;
    return fault;
}
