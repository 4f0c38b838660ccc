#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/record.h"
#include "../cpu/isa.h"
#include "../ops/cpu_launch.h"

/* ------------------------------------------------------------------------------------------------ devices */

/* PIECE: max number of elements of a tensor that move at once between files, host and device. BOUNCE: bytes
   of the buffer for them. */
#define TT__PIECE 16384
#define TT__BOUNCE (sizeof(float) * TT__PIECE)

/* Returns the number of threads of each rank if `ranks` ranks share the CPU. */
static int tt__rank_threads(const tt_context *ctx, int ranks)
{
    return (int)tt__max(1, ctx->cpu.pool->threads / ranks);
}

/* Opens a CPU device for one of `ranks` ranks. A single rank uses the context's device; several ranks divide
   the context's threads. */
static tt__device *tt__cpu_open(tt_context *ctx, int index, int ranks, char *error, size_t capacity)
{
    (void)index;
    if (ranks == 1) return (tt__device *)(void *)&ctx->cpu;
    tt__cpu *cpu = (tt__cpu *)tt__calloc(ctx, sizeof *cpu);
    if (cpu) *cpu = ctx->cpu;
    if (cpu) cpu->pool = tt__pool_new(ctx, tt__rank_threads(ctx, ranks));
    if (cpu && cpu->pool) return (tt__device *)(void *)cpu;
    snprintf(error, capacity, "%s", ctx->error);
    tt__free(ctx, cpu);
    return NULL;
}

static tt_context *tt__cpu_context(tt__device *d) { return ((tt__cpu *)(void *)d)->ctx; }

static void tt__cpu_close(tt__device *d)
{
    tt__cpu *cpu = (tt__cpu *)(void *)d;
    if (cpu == &cpu->ctx->cpu) return;
    tt__pool_free(cpu->ctx, cpu->pool);
    tt__free(cpu->ctx, cpu);
}

static const char *tt__cpu_error(tt__device *d) { return tt__cpu_context(d)->error; }
static void *tt__cpu_allocate(tt__device *d, size_t bytes) { return tt__alloc(tt__cpu_context(d), bytes); }
static void tt__cpu_release(tt__device *d, void *memory) { tt__free(tt__cpu_context(d), memory); }

static tt_status tt__cpu_read(tt__device *d, void *to, const void *from, size_t bytes)
{
    (void)d;
    memcpy(to, from, bytes);
    return TT_OK;
}

static tt_status tt__cpu_copy(tt__device *d, int stream, void *to, const void *from, size_t bytes)
{
    (void)stream;
    return tt__cpu_read(d, to, from, bytes);
}

/* Does nothing: CPU work is done when its function returns, so an event owns nothing. */
static void tt__cpu_release_event(tt__device *d, void *event) { (void)d; (void)event; }

static tt_status tt__cpu_mark(tt__device *d, int stream, void **event)
{
    (void)stream;
    *event = d;
    return TT_OK;
}

static tt_status tt__cpu_after(tt__device *d, int stream, void *event)
{
    (void)d; (void)stream; (void)event;
    return TT_OK;
}

static tt_status tt__cpu_fill(tt__device *d, void *memory, int byte, size_t bytes)
{
    (void)d;
    memset(memory, byte, bytes);
    return TT_OK;
}

/* Computes elements [first, first + n) that an initialiser gives a tensor; one Philox block gives four
   elements. first: a multiple of 4. */
static void tt__init_values(tt_init init, uint64_t key, int64_t first, int64_t n, float *to)
{
    for (int64_t k = 0; k < n; k += 4) {
        float four[4] = {0, 0, 0, 0};
        uint64_t block = (uint64_t)(first + k) / 4;
        if (init.kind == TT_INIT_ONES) four[0] = four[1] = four[2] = four[3] = 1;
        if (init.kind == TT_INIT_NORMAL) {
            tt__normal4(key, block, four);
            for (int c = 0; c < 4; c++) four[c] *= init.scale;
        }
        if (init.kind == TT_INIT_UNIFORM) {
            uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), 0, 0}, u[4];
            tt__philox(counter, key, u);
            for (int c = 0; c < 4; c++) four[c] = (2 * tt__uniform(u[c]) - 1) * init.scale;
        }
        memcpy(to + k, four, sizeof(float) * (size_t)tt__min(4, n - k));
    }
}

static tt_status tt__cpu_init(tt__device *d, void *memory, tt_dtype dtype, int64_t first, int64_t n,
                              tt_init init, uint64_t key)
{
    float shard[4096];
    (void)d;
    for (int64_t done = 0, m; done < n; done += m) {
        m = tt__min(TT__COUNT(shard), n - done);
        tt__init_values(init, key, first + done, m, shard);
        tt__convert((char *)memory + (size_t)done * tt_dtype_bytes(dtype), dtype, shard, TT_F32, (size_t)m);
    }
    return TT_OK;
}

static tt_status tt__cpu_wait(tt__device *d) { (void)d; return TT_OK; }
static tt_status tt__cpu_launch(const tt__launch *l, int n)
{
    tt_status status = TT_OK;
    for (int k = 0; k < n && status == TT_OK; k++) {
        const tt__instr *i = l[k].instr;
        const tt__isa_table *isa = tt__cpu_of(l)->isa;
        status = isa->run[i->op](&l[k]);
        for (int o = 0; o < tt__summed(i) && status == TT_OK; o++) {
            const int sums = tt__ops[i->op].outputs - tt__summed(i) + o;
            if (!l[k].out[sums].data) continue;
            tt__launch of_sums = l[k];
            of_sums.in[0] = l[k].out[o];
            of_sums.out[0] = l[k].out[sums];
            of_sums.add[0] = l[k].add[sums];
            status = isa->run[TT__OP_SUM_ROWS](&of_sums);
        }
    }
    return status;
}

static const char *tt__cpu_refuses(int index, const tt__launch *l)
{
    (void)index; (void)l;
    return NULL;
}

/* Finds the first line of a file that begins with `key` and copies it to `to` without key and colon. Without
   such a line, `to` becomes "". */
static void tt__line_of(const char *path, const char *key, char to[128])
{
    char line[1024];
    FILE *f = fopen(path, "r");
    *to = 0;
    while (f && !*to && fgets(line, sizeof line, f)) {
        const char *from = *key ? strchr(line, ':') : line;
        if (!from || strncmp(line, key, strlen(key)) != 0) continue;
        from += strspn(from, ": \t");
        snprintf(to, 128, "%.*s", (int)strcspn(from, "\n"), from);
    }
    if (f) fclose(f);
}

static void tt__cpu_describe(tt_context *ctx, int index, char *to, size_t capacity);

static const tt__backend tt__cpu_backend = {
    tt__cpu_open, tt__cpu_close, tt__cpu_error, tt__cpu_allocate, tt__cpu_release, NULL, NULL, NULL,
    tt__cpu_allocate, tt__cpu_release, tt__cpu_copy, tt__cpu_fill, tt__cpu_init, tt__cpu_read, tt__cpu_wait,
    tt__cpu_mark, tt__cpu_after, tt__cpu_release_event, tt__cpu_launch, NULL, NULL, NULL, NULL,
    tt__cpu_refuses, tt__cpu_describe, NULL, NULL, NULL,
};
