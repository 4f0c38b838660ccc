#pragma once
#include "../base/base.h"
#include "../cpu/isa.h"
#include "../cpu/variants.h"
#include "../ranks/processes.h"
#include "../ranks/mpi.h"
#include "cpu.h"
#include "devices.h"

/* ------------------------------------------------------------------------------------------------ context */

static const tt__isa_table *tt__choose_isa(const char *name)
{
    const tt__isa_table *table[3] = {&tt__isa_table_portable, NULL, NULL};
#ifdef TT__HAS_AVX2
    unsigned a, b, c = 0, d;
    /* CPUID says whether the CPU has F16C, which __builtin_cpu_supports of some compilers does not know. */
    bool avx2 = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    __builtin_cpu_init();
    avx2 = avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2) table[1] = &tt__isa_table_avx2;
#endif
#ifdef TT__HAS_AVX512
    if (table[1] && TT__AVX512_HERE) table[2] = &tt__isa_table_avx512;
#endif
#ifdef TT__HAS_NEON
    table[1] = &tt__isa_table_neon;
#endif
    for (int k = TT__COUNT(table) - 1; k >= 0; k--)
        if (table[k] && (!name || strcmp(name, table[k]->name) == 0)) return table[k];
    return NULL;
}

static const char *const tt__bf16_name[] = {"convert", "dot", "tiles"};

/* Chooses how bf16 matrix products are computed. name: a value of tt__bf16_name, or NULL for the fastest way.
   Returns false if the CPU or the kernels lack the named way. Relative to fp32, bf16 dot products run at
   twice the rate on AMD's CPUs, at four times the rate on Arm's (see tt__bfmmla) and at half the rate on
   Intel's. Tiles, which only Intel's CPUs have, run at 16 times the rate. */
static bool tt__choose_bf16(const tt__isa_table *isa, const char *name, tt__bf16 *how)
{
    bool has[TT__COUNT(tt__bf16_name)] = {true, false, false};
    *how = TT__BF16_CONVERT;
#ifdef TT__AVX512_DOT
    has[TT__BF16_DOT] = isa == &tt__isa_table_avx512 && TT__AVX512_DOT_HERE;
    if (has[TT__BF16_DOT] && __builtin_cpu_is("amd")) *how = TT__BF16_DOT;
#endif
#ifdef TT__TILES_HERE
    /* TT__TILES_HERE asks Linux for the tile registers, so it is evaluated only if tiles are wanted. */
    const bool wanted = !name || strcmp(name, "tiles") == 0;
    has[TT__BF16_TILES] = wanted && isa == &tt__isa_table_avx512 && TT__TILES_HERE;
    if (has[TT__BF16_TILES]) *how = TT__BF16_TILES;
#endif
#ifdef TT__NEON_DOT_HERE
    has[TT__BF16_DOT] = isa == &tt__isa_table_neon && TT__NEON_DOT_HERE;
    if (has[TT__BF16_DOT]) *how = TT__BF16_DOT;
#endif
    (void)isa;
    for (int k = 0; name; k++) {
        if (k == TT__COUNT(tt__bf16_name)) return false;
        if (strcmp(name, tt__bf16_name[k]) == 0) return *how = (tt__bf16)k, has[k];
    }
    return true;
}

static const char tt__unoptimized[] =
#ifdef TT__UNALIGNED_STACK
    "GCC for Windows cannot compile the kernels for AVX without -DTINYTRAIN_UNALIGNED_MOVES "
    "-Wa,-muse-unaligned-vector-move: add both options, or compile with clang";
#else
    "the kernels were compiled without optimisation: compile with -O2 (CMake: -DCMAKE_BUILD_TYPE=Release)";
#endif

/* Returns the first field that is not in TT__OPTIONS, or NULL. names may be NULL. */
static const char *tt__unknown_option(const tt_option_name *names)
{
    while (names && names->field && tt__is_option(names->field, strlen(names->field))) names++;
    return names ? names->field : NULL;
}

tt_context *tt_open(const tt_context_options *options)
{
    tt_context_options o = options ? *options : tt_context_options_default();
    tt_context *ctx = (tt_context *)o.allocator.allocate(o.allocator.user, sizeof *ctx, TT__ALIGN);
    tt_context failed;
    memset(&failed, 0, sizeof failed);
    failed.options = o;
    if (!ctx) {
        tt__log(&failed, TT_LOG_ERROR, "open", "out of memory: the allocator returned NULL for the context: "
                "free memory");
        return NULL;
    }
    memset(ctx, 0, sizeof *ctx);
    ctx->options = o;
    ctx->cpu.ctx = ctx;
    pthread_mutex_init(&ctx->mutex, NULL);
    const char *isa = tt__option(o.isa, "TINYTRAIN_ISA"), *bf16 = tt__option(o.bf16, "TINYTRAIN_BF16");
    ctx->cpu.isa = tt__choose_isa(isa);
    if (!ctx->cpu.isa)
        tt__fail(ctx, TT_ERR_UNSUPPORTED, "instruction set '%s' is unknown, or this CPU does not have it: "
                 "use portable, avx2, avx512 or neon", isa);
    else if (!tt__choose_bf16(ctx->cpu.isa, bf16, &ctx->cpu.bf16))
        tt__fail(ctx, TT_ERR_UNSUPPORTED, "bf16 is '%s', but must be convert, or dot or tiles where this CPU "
                 "and its kernels (%s) have dot products or tiles of bf16", bf16, ctx->cpu.isa->name);
    else if (!(o.timeout > 0))
        tt__fail(ctx, TT_ERR_ARGUMENT, "timeout is %g seconds, but must be above 0", o.timeout);
    else if (o.threads < 0 || o.threads > 256)
        tt__fail(ctx, TT_ERR_ARGUMENT, "threads is %d, but must be 0 (all) to 256", o.threads);
    else if (tt__unknown_option(o.wording.names))
        tt__fail(ctx, TT_ERR_ARGUMENT, "wording.names has '%s', which is no name of an option: correct it",
                 tt__unknown_option(o.wording.names));
    else ctx->cpu.pool = tt__pool_new(ctx, o.threads ? o.threads : tt__usable_cpus());
    const int first = 0;
    tt_status status = ctx->cpu.pool ? TT_OK : ctx->status;
    if (status == TT_OK) status = tt__net_open(ctx, tt_isa(ctx), tt__bf16_name[ctx->cpu.bf16]);
    if (status == TT_OK && !tt__device_group_of(ctx, &tt__device_kinds[0], &first, 1, 0))
        status = ctx->status;
    if (status == TT_OK && !ctx->cpu.isa->optimized)
        tt__log(ctx, TT_LOG_WARNING, "build", "training is several times slower than it could be, because %s",
                tt__unoptimized);
    if (status == TT_OK) return ctx;
    tt__net_close(ctx);
    tt__pool_free(ctx, ctx->cpu.pool);
    tt__log(ctx, TT_LOG_ERROR, "open", "%s", ctx->error);
    pthread_mutex_destroy(&ctx->mutex);
    o.allocator.release(o.allocator.user, ctx, sizeof *ctx);
    return NULL;
}

static void tt__cpu_describe(tt_context *ctx, int index, char *to, size_t capacity)
{
    static const char *const isas[] = {"portable", "avx2", "avx512", "neon"};
    static const char *const text_of_bf16[] = {"converted to fp32", "bf16 dot products", "tiles (AMX)"};
    tt__text_buffer text = {to, capacity, 0};
    char line[128], available[128];
    (void)index;
    const int online = tt__online_cpus();
    const char *asked = tt__option(ctx->options.isa, "TINYTRAIN_ISA");
    const char *of = asked ? "as requested, of" : "the best of";
    tt__line_of("/proc/cpuinfo", "model name", line);
    tt__print(&text, "processor: %s, %d online\n", *line ? line : "unknown", online);
    tt__print(&text, "instruction set: %s, %s", tt_isa(ctx), of);
    for (int k = 0; k < TT__COUNT(isas); k++) if (tt__choose_isa(isas[k])) tt__print(&text, " %s", isas[k]);
    tt__bf16 how;
    const bool unused = ctx->cpu.bf16 == TT__BF16_CONVERT && tt__choose_bf16(ctx->cpu.isa, "dot", &how);
    tt__print(&text, "; bf16 matrices: %s%s\n", text_of_bf16[ctx->cpu.bf16],
              unused ? ", although the CPU has bf16 dot products" : "");
    if (!ctx->cpu.isa->optimized) tt__print(&text, "build: slow, because %s\n", tt__unoptimized);
    tt__print(&text, "threads: %d, %s", tt_threads(ctx),
              ctx->options.threads ? "as the options say" : "all that this process may use");
#if defined(__linux__)
    double quota = tt__cgroup_quota("");
    int mask = tt__affinity_cpus();
    if (mask) tt__print(&text, "; the affinity mask allows %d", mask);
    if (isfinite(quota)) tt__print(&text, "; control groups allow the time of %.4g processors", quota);
    else tt__print(&text, "; control groups set no limit");
#endif
    tt__print(&text, "\n");
    tt__line_of("/proc/meminfo", "MemAvailable", available);
    tt__line_of("/proc/meminfo", "MemTotal", line);
    if (*line && *available)
        tt__print(&text, "memory: %.1f GB, of which %.1f GB are available", 1024e-9 * strtod(line, NULL),
                  1024e-9 * strtod(available, NULL));
#if defined(TT__KNOWS_ROOM)
    const tt__room room = tt__memory_room("");
    if (room.group_limit < 0x1p60)
        tt__print(&text, "; control groups allow %.3g GB", 1e-9 * room.group_limit);
    else tt__print(&text, "; control groups set no limit");
    if (room.bytes < 0x1p60) tt__print(&text, "; a plan may have %.3g GB", 1e-9 * room.bytes);
#endif
    tt__print(&text, "\n");
    tt__line_of("/sys/kernel/mm/transparent_hugepage/enabled", "", line);
    const bool never = strstr(line, "[never]") != NULL;
    if (*line)
        tt__print(&text, "huge pages for large tensors: %s\n",
                  never ? "never, which is slower; to allow them, write madvise to "
                  "/sys/kernel/mm/transparent_hugepage/enabled" : "yes");
}

int tt_threads(const tt_context *ctx) { return ctx->cpu.pool->threads; }
const char *tt_isa(const tt_context *ctx) { return ctx->cpu.isa->name; }
size_t tt_allocated_bytes(const tt_context *ctx) { return ctx->allocated; }

typedef struct tt__peak_job {
    double (*loop)(int64_t rounds, float *sink);
    double flops[256]; /* FLOPs that each task executed */
} tt__peak_job;

static void tt__peak_task(void *arg, int64_t task, int thread)
{
    tt__peak_job *job = (tt__peak_job *)arg;
    float sink = 1e-3f;
    (void)thread;
    job->flops[task] = job->loop(200000, &sink);
}

double tt_measured_peak(tt_context *ctx)
{
    const int threads = ctx->cpu.pool->threads;
    tt__peak_job job;
    job.loop = ctx->cpu.isa->peak[TT__BF16_CONVERT];
    for (int attempt = 0; attempt < 8 && ctx->measured_peak <= 0; attempt++)
        for (int k = 0; k < 8; k++) { /* keeps the best run: other programs can only slow a run down */
            double start = tt__seconds(), flops = 0;
            tt__run_tasks(ctx->cpu.pool, threads, tt__peak_task, &job);
            double seconds = tt__seconds() - start;
            for (int t = 0; t < threads; t++) flops += job.flops[t];
            if (seconds > 0) ctx->measured_peak = fmax(ctx->measured_peak, flops / seconds);
        }
    return ctx->measured_peak;
}
