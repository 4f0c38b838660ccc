// cuda_emu_trace.cpp - the trace build: the functions that -fsanitize=thread calls before each load and
// store, without libtsan.
//
// Each two bytes of device, shared or pinned memory have a cell of 32 bytes, which holds who wrote the bytes
// last and who has read them since. An access is an error if its bytes are outside of every allocation, were
// never written, or were last used by an access that is not ordered before this one. An earlier access is
// ordered before this one
//
//   in one block          if there is a barrier, or a __syncwarp for lanes of one warp, in between (epochs)
//   in one operation      never, if two blocks access the bytes and one of them writes
//   in two operations     if the vector clock of this operation includes the other one
//
// The cells lose information. A cell holds the last writer, the last reader, and whether other threads of the
// reader's block, or of other blocks, have read the bytes. So a race can be missed with one seed, but no
// false race is reported.
#include "emu_internal.h"
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>

extern "C" char __executable_start, _end;

struct cell {
    uint32_t write_op, write_block, read_op, read_block; // numbers of operations and of blocks; operation 0:
                                                         // none
    uint16_t write_thread, read_thread, write_epoch, write_warp_epoch, read_epoch, read_warp_epoch;
    uint8_t defined : 2, write_mask : 2, read_mask : 2, atomic : 1; // masks of the cell's two bytes
    uint8_t other_readers;
};
static_assert(sizeof(cell) == 32, "a cell for two bytes");
enum { OTHER_LANES = 1, OTHER_WARPS = 2, OTHER_BLOCKS = 4 };
// The number of the block for accesses of operations that are not kernels, such as copies and cuBLAS.
enum : uint32_t { NO_BLOCK = 0xffffffff };

// place of an access: return address, or file and line
struct place { void *pc; const char *file; int line; };
struct op_record { uint32_t stream, ticket; std::string name; };
struct pinned_use { emu_pin pin; uint32_t op; };

static cell shared_cells[EMU_SHARED_ARENA / 2];
static std::vector<op_record> ops(1); // records by number of the operation
static std::vector<pinned_use> pinned_uses;
static std::atomic<size_t> pinned_use_count;

// =================================================================================== upkeep
void emu_trace_reset()
{
    ops.resize(1);
    pinned_uses.clear();
    pinned_use_count = 0;
    memset((void *)shared_cells, 0, sizeof shared_cells);
}
static size_t shadow_bytes() { return emu_address_space / 2 * sizeof(cell); }
void emu_trace_device(emu_device &d)
{
    d.shadow = (char *)mmap(nullptr, shadow_bytes(), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (d.shadow == MAP_FAILED) emu_fatal("no address space for the cells of a device");
}
void emu_trace_device_gone(emu_device &d) { munmap(d.shadow, shadow_bytes()); }
// The host's writes are not recorded, so pinned memory counts as written.
static size_t pinned_shadow_bytes(const emu_pinned &m) { return (m.n / 2 + 2) * sizeof(cell); }
void emu_trace_pinned(emu_pinned &m)
{
    m.shadow = (char *)mmap(nullptr, pinned_shadow_bytes(m), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m.shadow == MAP_FAILED) emu_fatal("no address space for the cells of pinned memory");
}
void emu_trace_pinned_gone(emu_pinned &m) { munmap(m.shadow, pinned_shadow_bytes(m)); }
void emu_trace_op(const emu_op &op) { ops.push_back({(uint32_t)op.stream->id, op.ticket, op.work.name}); }
void emu_trace_pins(const emu_op &op)
{
    for (auto &p : op.work.pins) pinned_uses.push_back({p, op.number});
    pinned_use_count = pinned_uses.size();
}
void emu_trace_undefined(const void *p, size_t n)
{
    size_t first = (size_t)((const char *)p - emu_shared_arena) / 2;
    for (size_t i = 0; i < n / 2; i++) shared_cells[first + i].defined = 0;
}

// =================================================================================== reports
static std::string text_of(const place &at)
{
    char exe[1024], command[1400], line[512] = "";
    if (at.file) return std::string(" at ") + at.file + ":" + std::to_string(at.line);
    ssize_t n = at.pc ? readlink("/proc/self/exe", exe, sizeof exe - 1) : -1;
    if (n < 0) return "";
    exe[n] = 0;
    unsigned long offset = (unsigned long)((char *)at.pc - 1 - &__executable_start);
#if defined(__aarch64__)
    const char *tool = "$(command -v aarch64-linux-gnu-addr2line || echo addr2line)";
#else
    const char *tool = "addr2line";
#endif
    snprintf(command, sizeof command, "%s -e '%s' -s %#lx 2>/dev/null", tool, exe, offset);
    if (FILE *f = popen(command, "r")) {
        if (!fgets(line, sizeof line, f)) line[0] = 0;
        pclose(f);
    }
    line[strcspn(line, "\n")] = 0;
    if (char *discriminator = strstr(line, " (disc")) *discriminator = 0;
    return line[0] ? std::string(" at ") + line : "";
}

static std::string text_of_address(const void *p, bool shared)
{
    char text[300];
    if (shared)
        snprintf(text, sizeof text, "byte %ld of shared memory", (long)((const char *)p - emu_shared_arena));
    else emu_describe(p, text, sizeof text);
    for (auto &s : emu_block.slots) if (shared && (const char *)p >= s.p && (const char *)p < s.p + s.n) {
        snprintf(text, sizeof text, "byte %ld of shared memory '%s'", (long)((const char *)p - s.p), s.name);
    }
    return text;
}

[[noreturn]] static void report_race(const char *kind, const void *p, bool shared, bool write,
                                     bool previous_write, uint32_t op, uint32_t in_block, unsigned thread,
                                     const place &at)
{
    std::string who;
    if (op < ops.size())
        who = " by operation " + std::to_string(op) + " '" + ops[op].name + "' (stream " +
              std::to_string(ops[op].stream) + ")";
    if (in_block != NO_BLOCK)
        who += " block " + std::to_string(in_block) + " thread " + std::to_string(thread);
    emu_fatal("RACE between %s: %s%s; the %s%s before it is not ordered with it; %s", kind,
              write ? "write" : "read", text_of(at).c_str(), previous_write ? "write" : "read", who.c_str(),
              text_of_address(p, shared).c_str());
}

// =================================================================================== the check
static bool happened_before(uint32_t op)
{
    const op_record &r = ops[op];
    const emu_clock &now = emu_current_op->clock;
    return now.size() > r.stream && now[r.stream] >= r.ticket;
}

struct usage { // an access: who makes it, and which kind
    uint32_t op, in_block;
    uint16_t thread, epoch, warp_epoch;
    bool write, atomic, may_be_undefined;
    place at;
};

static void against_writer(const cell &c, const usage &a, const void *p, bool shared)
{
    if (c.write_op != a.op) {
        if (!happened_before(c.write_op))
            report_race("operations", p, shared, a.write, true, c.write_op, c.write_block, c.write_thread,
                        a.at);
    } else if (c.write_block != a.in_block) {
        report_race("blocks", p, shared, a.write, true, c.write_op, c.write_block, c.write_thread, a.at);
    } else if (c.write_thread != a.thread && c.write_epoch == a.epoch) {
        bool ordered_in_warp = c.write_thread / 32 == a.thread / 32 && c.write_warp_epoch != a.warp_epoch;
        if (!ordered_in_warp)
            report_race("threads", p, shared, a.write, true, c.write_op, c.write_block, c.write_thread, a.at);
    }
}

static void against_readers(const cell &c, const usage &a, const void *p, bool shared)
{
    if (c.read_op != a.op) {
        if (!happened_before(c.read_op))
            report_race("operations", p, shared, true, false, c.read_op, c.read_block, c.read_thread, a.at);
    } else if (c.read_block != a.in_block || c.other_readers & OTHER_BLOCKS) {
        report_race("blocks", p, shared, true, false, c.read_op, c.read_block, c.read_thread, a.at);
    } else if (c.read_epoch == a.epoch) {
        bool same_warp = c.read_thread / 32 == a.thread / 32;
        bool other_lane = c.read_warp_epoch == a.warp_epoch &&
                          (c.other_readers & OTHER_LANES || c.read_thread != a.thread);
        bool race = c.other_readers & OTHER_WARPS || !same_warp || other_lane;
        if (race)
            report_race("threads", p, shared, true, false, c.read_op, c.read_block, c.read_thread, a.at);
    }
}

static void note_write(cell &c, const usage &a, uint8_t mask)
{
    bool plain_before = c.write_op == a.op && c.write_block == a.in_block && c.write_thread == a.thread &&
                        c.write_epoch == a.epoch && !c.atomic;
    c.atomic = a.atomic && !plain_before; // an atomic after a plain write of the thread counts as plain
    c.write_op = a.op;
    c.write_block = a.in_block;
    c.write_thread = a.thread;
    c.write_epoch = a.epoch;
    c.write_warp_epoch = a.warp_epoch;
    c.write_mask = mask & 3;
    c.defined = (c.defined | mask) & 3;
}

static void note_read(cell &c, const usage &a, uint8_t mask)
{
    uint8_t others = 0;
    if (c.read_op == a.op && c.read_mask & mask) {
        others = c.other_readers & OTHER_BLOCKS;
        if (c.read_block != a.in_block) others |= OTHER_BLOCKS;
        else if (c.read_epoch == a.epoch) {
            const bool same_warp = c.read_thread / 32 == a.thread / 32,
                       ordered = same_warp && c.read_warp_epoch != a.warp_epoch;
            // If `ordered`, a __syncwarp came after the reads of the warp's other lanes, so they cannot race.
            others |= c.other_readers & (ordered ? OTHER_WARPS | OTHER_BLOCKS : ~0);
            if (c.read_thread != a.thread && !ordered) others |= same_warp ? OTHER_LANES : OTHER_WARPS;
        }
    }
    c.read_op = a.op;
    c.read_block = a.in_block;
    c.read_thread = a.thread;
    c.read_epoch = a.epoch;
    c.read_warp_epoch = a.warp_epoch;
    c.read_mask = mask & 3;
    c.other_readers = others;
}

static bool of_a_stack(const char *p);

static void check(const void *address, size_t n, bool write, bool atomic, bool kernel, bool may_be_undefined,
                  const place &at)
{
    const char *p = (const char *)address;
    const char *verb = write ? "write" : "read";
    bool shared = p >= emu_shared_arena && p < emu_shared_arena + EMU_SHARED_ARENA;
    cell *c;
    if (shared) {
        bool inside = p + n <= emu_shared_arena + emu_block.dynamic;
        for (auto &s : emu_block.slots) inside = inside || (p >= s.p && p + n <= s.p + s.n);
        if (!inside) {
            emu_fatal("shared memory out of bounds: %s of %zu bytes%s, in no array of the block and not in "
                      "its %zu dynamic bytes",
                      verb, n, text_of(at).c_str(), emu_block.dynamic);
        }
        c = shared_cells + (p - emu_shared_arena) / 2;
    } else {
        if (kernel && emu_block.chained && !emu_block.thread[emu_block.current].began && !of_a_stack(p) &&
            !(p >= &__executable_start && p < &_end))
            emu_fatal("%s%s before tt__begin_kernel, while the kernel in front may still run", verb,
                      text_of(at).c_str());
        int device = emu_device_of(p);
        const emu_pinned *pin = device < 0 ? emu_find_pinned(p) : nullptr;
        if (device < 0 && !pin) {
            if (!kernel || (p >= &__executable_start && p < &_end) || of_a_stack(p)) return;
            if (text_of_address(p, false).find("far beyond") != std::string::npos) {
                emu_fatal("%s of %zu bytes%s: %s", verb, n, text_of(at).c_str(),
                          text_of_address(p, false).c_str());
            }
            emu_fatal("a kernel's %s of %zu bytes%s: %p is memory of the host that is not pinned", verb, n,
                      text_of(at).c_str(), address);
        }
        if (pin ? p + n > pin->p + pin->n : emu_bad_range(p, n))
            emu_fatal("%s of %zu bytes%s: %s", verb, n, text_of(at).c_str(),
                      text_of_address(p, false).c_str());
        if (!pin && !(emu_current_op->work.devices >> device & 1)) {
            emu_fatal("%s%s without peer access: %s", verb, text_of(at).c_str(),
                      text_of_address(p, false).c_str());
        }
        if (pin) c = (cell *)pin->shadow + ((uintptr_t)p / 2 - (uintptr_t)pin->p / 2);
        else c = (cell *)emu_devices[device].shadow + (p - emu_devices[device].base) / 2;
        // The host's writes are not recorded, so managed memory counts as written.
        may_be_undefined = may_be_undefined || pin || emu_find_allocation(device, p)->managed;
    }
    usage a = {emu_current_op->number, NO_BLOCK, 0, 0, 0, write, atomic, may_be_undefined, at};
    if (kernel) {
        a.in_block = emu_block.index;
        a.thread = (uint16_t)emu_block.current;
        a.epoch = emu_block.epoch;
        a.warp_epoch = emu_block.thread[emu_block.current].warp_epoch;
    }
    const uintptr_t begin = (uintptr_t)p, end = begin + n;
    for (uintptr_t x = begin & ~(uintptr_t)1; x < end; x += 2, c++) {
        uint8_t mask = (uint8_t)((x >= begin ? 1 : 0) | (x + 1 < end ? 2 : 0));
        if (shared && (c->write_op != a.op || c->write_block != a.in_block)) { // an earlier block wrote here
            c->write_op = 0;
            c->defined = c->write_mask = 0;
        }
        if (shared && (c->read_op != a.op || c->read_block != a.in_block)) c->read_op = 0;
        if (c->write_op && c->write_mask & mask && !(atomic && c->atomic))
            against_writer(*c, a, (void *)x, shared);
        if (write) {
            if (c->read_op && c->read_mask & mask && !(atomic && c->atomic))
                against_readers(*c, a, (void *)x, shared);
            note_write(*c, a, mask);
        } else {
            if (!may_be_undefined && (c->defined & mask) != mask) {
                emu_fatal("read%s of memory that was never written: %s", text_of(at).c_str(),
                          text_of_address((void *)x, shared).c_str());
            }
            note_read(*c, a, mask);
        }
    }
}

void emu_touch(const void *p, size_t n, emu_access how, const char *file, int line)
{
    if (n)
        check(p, n, how == EMU_WRITES, false, emu_block.current >= 0, how == EMU_COPIES_FROM,
              {nullptr, file, line});
}

void emu_atomic(void *p, size_t n, const char *file, int line)
{
    if (emu_block.current < 0) return;
    emu_block.in_kernel = false;
    check(p, n, false, true, true, false, {nullptr, file, line});
    check(p, n, true, true, true, false, {nullptr, file, line});
    emu_block.in_kernel = true;
}

// Reports an access of the host to pinned memory that a running operation uses.
static void check_host(const char *p, size_t n, bool write, void *pc)
{
    // Only tries to lock, because another thread may hold the lock and wait for this thread.
    std::unique_lock<std::recursive_mutex> lock(emu_lock, std::try_to_lock);
    if (!lock.owns_lock() || emu_current_op) return;
    size_t kept = 0;
    for (size_t i = 0; i < pinned_uses.size(); i++) {
        const pinned_use u = pinned_uses[i];
        const op_record &r = ops[u.op];
        // The host has waited for this operation since.
        if (emu_host_clock.size() > r.stream && emu_host_clock[r.stream] >= r.ticket) continue;
        if (p < u.pin.p + u.pin.n && u.pin.p < p + n && (write || u.pin.device_writes)) {
            emu_fatal("RACE of the host with the device: %s%s of pinned memory that operation %u '%s' %s, "
                      "and nothing waited for it",
                      write ? "write" : "read", text_of({pc, nullptr, 0}).c_str(), u.op, r.name.c_str(),
                      u.pin.device_writes ? "writes" : "reads");
        }
        pinned_uses[kept++] = u;
    }
    pinned_uses.resize(kept);
    pinned_use_count = kept;
}

// Returns whether p is on the stack of any thread of the block: a thread may run another thread's lambda.
static bool of_a_stack(const char *p)
{
    for (int i = 0; i < emu_block.threads; i++) {
        emu_fiber *f = emu_block.thread[i].fiber;
        if (f && p >= f->stack && p < f->stack + f->size) return true;
    }
    return false;
}

// Checks an access. Other host threads run at the same time; the stack pointer tells whether a kernel runs.
static inline void hook(const void *address, size_t n, bool write, void *pc)
{
    const char *p = (const char *)address, *frame = (const char *)__builtin_frame_address(0);
    const emu_fiber *f = emu_current_fiber;
    if (frame >= f->stack && frame < f->stack + f->size) {
        // A kernel's registers and local variables need no check.
        if (!emu_block.in_kernel || (p >= f->stack && p < f->stack + f->size)) return;
        emu_block.in_kernel = false;
        check(p, n, write, false, true, false, {pc, nullptr, 0});
        emu_block.in_kernel = true;
    } else if (pinned_use_count) {
        check_host(p, n, write, pc);
    }
}

// ======================================================================== functions that the compiler calls
#define CALLER __builtin_return_address(0)
#define EMU_TSAN_ACCESS(n) \
    void __tsan_read##n(void *p) { hook(p, n, false, CALLER); } \
    void __tsan_write##n(void *p) { hook(p, n, true, CALLER); } \
    void __tsan_read_write##n(void *p) { hook(p, n, false, CALLER); hook(p, n, true, CALLER); } \
    void __tsan_unaligned_read##n(void *p) { hook(p, n, false, CALLER); } \
    void __tsan_unaligned_write##n(void *p) { hook(p, n, true, CALLER); } \
    void __tsan_unaligned_read_write##n(void *p) { hook(p, n, false, CALLER); hook(p, n, true, CALLER); }
// Atomics of host code; kernels of a .cu never use these functions.
#define EMU_TSAN_ATOMIC(bits, T) \
    T __tsan_atomic##bits##_load(const volatile T *p, int) { return __atomic_load_n(p, 5); } \
    void __tsan_atomic##bits##_store(volatile T *p, T v, int) { __atomic_store_n(p, v, 5); } \
    T __tsan_atomic##bits##_exchange(volatile T *p, T v, int) { return __atomic_exchange_n(p, v, 5); } \
    T __tsan_atomic##bits##_fetch_add(volatile T *p, T v, int) { return __atomic_fetch_add(p, v, 5); } \
    T __tsan_atomic##bits##_fetch_sub(volatile T *p, T v, int) { return __atomic_fetch_sub(p, v, 5); } \
    T __tsan_atomic##bits##_fetch_and(volatile T *p, T v, int) { return __atomic_fetch_and(p, v, 5); } \
    T __tsan_atomic##bits##_fetch_or(volatile T *p, T v, int) { return __atomic_fetch_or(p, v, 5); } \
    T __tsan_atomic##bits##_fetch_xor(volatile T *p, T v, int) { return __atomic_fetch_xor(p, v, 5); } \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile T *p, T *expected, T v, int, int) \
    { \
        return __atomic_compare_exchange_n(p, expected, v, false, 5, 5); \
    } \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile T *p, T *expected, T v, int, int) \
    { \
        return __atomic_compare_exchange_n(p, expected, v, false, 5, 5); \
    } \
    T __tsan_atomic##bits##_compare_exchange_val(volatile T *p, T expected, T v, int, int) \
    { \
        __atomic_compare_exchange_n(p, &expected, v, false, 5, 5); \
        return expected; \
    }

extern "C" {
EMU_TSAN_ACCESS(1)
EMU_TSAN_ACCESS(2)
EMU_TSAN_ACCESS(4)
EMU_TSAN_ACCESS(8)
EMU_TSAN_ACCESS(16)
EMU_TSAN_ATOMIC(8, unsigned char)
EMU_TSAN_ATOMIC(16, unsigned short)
EMU_TSAN_ATOMIC(32, unsigned)
EMU_TSAN_ATOMIC(64, unsigned long)
void __tsan_read_range(void *p, unsigned long n) { hook(p, n, false, CALLER); }
void __tsan_write_range(void *p, unsigned long n) { hook(p, n, true, CALLER); }
void *__tsan_memcpy(void *to, const void *from, unsigned long n)
{
    hook(from, n, false, CALLER);
    hook(to, n, true, CALLER);
    return memcpy(to, from, n);
}
void *__tsan_memmove(void *to, const void *from, unsigned long n)
{
    hook(from, n, false, CALLER);
    hook(to, n, true, CALLER);
    return memmove(to, from, n);
}
void *__tsan_memset(void *p, int v, unsigned long n)
{
    hook(p, n, true, CALLER);
    return memset(p, v, n);
}
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(5); }
void __tsan_atomic_signal_fence(int) {}
}
