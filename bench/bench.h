/* bench.h - code that the benchmarks share. A program includes this file alone; the file holds tinytrain's
   implementation.

   Kernels are timed inside real programs: bench_open() gives the context a table of kernels that times each
   op while it calls the real one. The figure printed for a kernel is its best run, because other work on the
   machine can only slow a kernel down.

   A row has a name, a value, a unit and, where one exists, the machine's limit in that unit. The limit is the
   best rate that all threads of the context reach together. For bytes, this is the rate of a loop through
   arrays in memory (bench_stream). For FLOPs, this is the rate of multiply-adds in registers. If a program
   times a single kernel, bursts of multiply-adds run between the runs of the kernel, and each burst takes as
   long as the kernel. In other programs the limit is the best short burst so far (bench_peak). If the
   multiply-adds between a kernel's runs were clearly slower than the limit, the kernel is measured again. If
   the multiply-adds stay slower, the row is marked as measured on a busy machine. With --json each row is an
   object on a line of its own, with the keys name, value, unit, peak, of_peak, peer, ratio (value / peer). A
   key is null where it does not apply; of_peak is null on a busy machine. */
#ifndef TINYTRAIN_BENCH_H
#define TINYTRAIN_BENCH_H

#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"

#include <sys/resource.h>

enum { BENCH_FP32, BENCH_BF16, BENCH_PEAKS };
enum {
    BENCH_READ,
    BENCH_COPY,
    BENCH_COPY_IN_PLACE,
    BENCH_TRIAD,
    BENCH_TRIAD_IN_PLACE,
    BENCH_4R_3W,
    BENCH_STREAMS
};

typedef struct bench_cost {
    double seconds, flops, bytes;
    /* the shortest time of the FLOPs, in seconds: at the rate of multiply-adds measured between the runs; 0:
       not measured */
    double min;
    bool in_place;
    bool busy;    /* other work slowed the machine while `min` was measured */
} bench_cost;

static struct {
    tt_context *ctx;
    tt_context_options options;
    const char *program, *precision;
    bool json, has[3];                 /* has[k]: whether the CPU can multiply bf16 in way k of tt__bf16 */
    tt__bf16 fastest;
    double min; /* minimum seconds for which a kernel is measured */
    tt__isa_table timed;
    const tt__isa_table *real;
    /* best rates so far: FLOP/s of multiply-adds, and bytes/s of bench_stream() */
    double peak[BENCH_PEAKS], stream[BENCH_STREAMS];
    /* best FLOP/s of the multiply-adds that run between the runs of the current kernel */
    double beside;
    float *array[4];                                 /* the arrays that bench_stream() reads and writes */
    /* cost of each op in the current run, and in its fastest run */
    bench_cost run[TT__OP_COUNT], best[TT__OP_COUNT];
} bench;

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2), noreturn))
#endif
static inline void bench_die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, "%s: ", bench.program ? bench.program : "benchmark");
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    exit(1);
}

/* returns bytes: ru_maxrss is in KiB on Linux, in bytes on macOS */
static inline double bench_resident_peak(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
#if defined(__APPLE__)
    return (double)u.ru_maxrss;
#else
    return 1024.0 * (double)u.ru_maxrss;
#endif
}

/* ------------------------------------------------------------------------------------------------- timing */

static double bench__size(const tt__mat *m)
{
    return m->data ? (double)m->rows * (double)m->cols * (double)tt_dtype_bytes(m->dtype) : 0;
}

/* Returns the bytes that a launch reads and writes, as the program sees them: each operand and each result.
   A result that the launch adds to or updates counts twice, because the launch also reads the result. */
static double bench__bytes(const tt__launch *l)
{
    double n = 0;
    for (int j = 0; j < TT__MAX_IN; j++)
        n += l->instr->op == TT__OP_EMBEDDING && j == 1 ? bench__size(&l->out[0]) : bench__size(&l->in[j]);
    for (int j = 0; j < TT__MAX_OUT; j++)
        n += (l->add[j] || tt__ops[l->instr->op].flags & TT__RMW ? 2 : 1) * bench__size(&l->out[j]);
    return n;
}

static tt_status bench__run(const tt__launch *l)
{
    int op = l->instr->op;
    bench_cost *c = &bench.run[op];
    double begin = tt__seconds();
    tt_status status = bench.real->run[op](l);
    c->seconds += tt__seconds() - begin;
    c->flops += tt__flops(l->instr, l->in);
    c->bytes += bench__bytes(l);
    for (int j = 0; j < TT__MAX_IN; j++) c->in_place |= l->in[j].data && l->in[j].data == l->out[0].data;
    return status;
}

static inline void bench_begin_run(void) { memset(bench.run, 0, sizeof bench.run); }

/* returns the longest time, in seconds, of an op with FLOPs in the current run */
static inline double bench_longest(void)
{
    double longest = 0;
    for (int op = 0; op < TT__OP_COUNT; op++)
        if (bench.run[op].flops > 0 && bench.run[op].seconds > longest) longest = bench.run[op].seconds;
    return longest;
}

static inline void bench_end_run(void)
{
    for (int op = 0; op < TT__OP_COUNT; op++)
        if (bench.run[op].seconds > 0 &&
            (bench.best[op].seconds == 0 || bench.run[op].seconds < bench.best[op].seconds))
            bench.best[op] = bench.run[op];
}

static inline bench_cost bench_sum(bench_cost a, bench_cost b)
{
    bench_cost c = {a.seconds + b.seconds, a.flops + b.flops,        a.bytes + b.bytes,
                    a.min + b.min,     a.in_place || b.in_place, a.busy || b.busy};
    return c;
}

/* ------------------------------------------------------------------------------------------------- limits */

typedef struct bench_burst {
    double (*loop)(int64_t rounds, float *sink);
    int64_t rounds;
    double flops[256]; /* FLOPs of each task */
} bench_burst;

static void bench__burst_task(void *arg, int64_t task, int thread)
{
    bench_burst *b = (bench_burst *)arg;
    float sink = 1e-3f;
    (void)thread;
    b->flops[task] = b->loop(b->rounds, &sink);
}

/* Returns the FLOP/s of a burst of multiply-adds on all threads. */
static double bench__burst(bench_burst *b)
{
    const int threads = tt_threads(bench.ctx);
    double flops = 0, begin = tt__seconds();
    tt__run_tasks(bench.ctx->cpu.pool, threads, bench__burst_task, b);
    double seconds = tt__seconds() - begin;
    for (int t = 0; t < threads; t++) flops += b->flops[t];
    return seconds > 0 ? flops / seconds : 0;
}

static double bench__measure(int peak)
{
    double best = 0;
    for (int how = 0; how < (peak == BENCH_BF16 ? 3 : 1); how++) {
        bench_burst b = {bench.real->peak[how], 200000, {0}};
        /* keeps the best burst: other work only slows bursts */
        for (int k = 0; k < 8 && bench.has[how]; k++) {
            double now = bench__burst(&b);
            if (now > best && peak == BENCH_BF16) bench.fastest = (tt__bf16)how;
            if (now > best) best = now;
        }
    }
    return best;
}

static inline int bench__peak_of(const char *precision)
{
    return strncmp(precision, "bf16", 4) == 0 ? BENCH_BF16 : BENCH_FP32;
}

/* Returns the FLOP/s of the fastest multiply-adds for products in `precision`. Measures at least once, and
   again while the result is below `flops`, because a low result means that the machine was busy. */
static inline double bench_peak(const char *precision, double flops)
{
    int peak = bench__peak_of(precision);
    for (int k = 0; k == 0 || (k < 50 && bench.peak[peak] < flops); k++) {
        double now = bench__measure(peak);
        if (now > bench.peak[peak]) bench.peak[peak] = now;
    }
    return bench.peak[peak];
}

#define BENCH_BURST 200e-6 /* seconds; in a shorter burst the start of the threads would count */

/* Runs one burst of multiply-adds of about `seconds`, and raises bench.beside and bench.peak to the burst's
   FLOP/s if they are lower. */
static inline void bench_run_beside(double seconds)
{
    int peak = bench__peak_of(bench.precision);
    double rate = bench.peak[peak] > 0 ? bench.peak[peak] : bench_peak(bench.precision, 0);
    bench_burst b = {bench.real->peak[peak == BENCH_BF16 ? bench.fastest : TT__BF16_CONVERT], 1, {0}};
    bench__burst_task(&b, 0, 0);
    if (seconds < BENCH_BURST) seconds = BENCH_BURST;
    b.rounds = tt__max(1000, (int64_t)(seconds * rate / tt_threads(bench.ctx) / b.flops[0]));
    bench.beside = fmax(bench.beside, bench__burst(&b));
    if (bench.beside > bench.peak[peak]) bench.peak[peak] = bench.beside;
}

/* bench_stream() times loops over arrays of 50 MB, the size of the tensors of bench/rows.c. The bytes of a
   loop leave out a hidden read: before a store changes memory that no cache holds, the processor reads the
   memory. */
enum { BENCH_ARRAY = 16384 * 768, BENCH_STREAM_TASK = 1 << 16 };
typedef float bench_f32x8 __attribute__((vector_size(32)));
typedef struct bench_stream_job {
    int kind;
    bench_f32x8 sums[BENCH_ARRAY / BENCH_STREAM_TASK];
} bench_stream_job;

static void bench__stream_task(void *arg, int64_t task, int thread)
{
    bench_stream_job *job = (bench_stream_job *)arg;
    bench_f32x8 *a[4], sum[4];
    (void)thread;
    memset(sum, 0, sizeof sum);
    for (int k = 0; k < 4; k++) a[k] = (bench_f32x8 *)(void *)(bench.array[k] + task * BENCH_STREAM_TASK);
    for (int64_t i = 0; i < BENCH_STREAM_TASK / 8; i += job->kind == BENCH_READ ? 4 : 1) {
        switch (job->kind) {
        case BENCH_READ: for (int k = 0; k < 4; k++) sum[k] += a[0][i + k]; break;
        case BENCH_COPY: a[1][i] = a[0][i]; break;
        case BENCH_COPY_IN_PLACE: a[0][i] = a[0][i] * 0.5f; break;
        case BENCH_TRIAD: a[2][i] = a[0][i] + a[1][i] * 0.5f; break;
        case BENCH_TRIAD_IN_PLACE: a[0][i] = a[0][i] * 0.5f + a[1][i]; break;
        default:
            a[1][i] = a[1][i] * 0.5f + a[0][i];
            a[2][i] = a[2][i] * 0.5f + a[0][i];
            a[3][i] = a[3][i] * 0.5f + a[1][i] + a[2][i];
        }
    }
    job->sums[task] = sum[0] + sum[1] + sum[2] + sum[3];
}

/* Returns the best bytes per second so far of the loop `kind` on all threads. */
static inline double bench_stream(int kind)
{
    static const int passes[BENCH_STREAMS] = {1, 2, 2, 3, 3, 7};
    bench_stream_job *job = (bench_stream_job *)tt__alloc(bench.ctx, sizeof *job);
    if (!job) bench_die("%s", tt_error(bench.ctx));
    for (int k = 0; k < 4; k++) {
        if (bench.array[k]) continue;
        bench.array[k] = (float *)bench.options.allocator.allocate(bench.options.allocator.user,
                                                                   BENCH_ARRAY * sizeof(float), TT__ALIGN);
        if (!bench.array[k]) bench_die("out of memory for the streams");
        memset(bench.array[k], 0, BENCH_ARRAY * sizeof(float));
    }
    job->kind = kind;
    double first = tt__seconds();
    for (int run = 0; run < 3 || tt__seconds() - first < bench.min / 2; run++) {
        double begin = tt__seconds();
        tt__run_tasks(bench.ctx->cpu.pool, BENCH_ARRAY / BENCH_STREAM_TASK, bench__stream_task, job);
        double speed = passes[kind] * (double)BENCH_ARRAY * sizeof(float) / (tt__seconds() - begin);
        if (speed > bench.stream[kind]) bench.stream[kind] = speed;
    }
    tt__free(bench.ctx, job);
    return bench.stream[kind];
}

/* --------------------------------------------------------------------------------------------------- GPUs */

#if defined(TINYTRAIN_CUDA) /* functions that bench/gpu.cu defines and describes */
#ifdef __cplusplus
extern "C" {
#endif
size_t bench_gpu_used(void);
void *bench_gpu_event(void);
double bench_gpu_between(void *from, void *to);
double bench_gpu_copy(size_t bytes, double seconds, char error[256]);
double bench_gpu_product(const char *type, int n, double seconds, char error[256]);
#ifdef __cplusplus
}
#endif
#else
static inline double bench__gpu_none(char error[256])
{
    return snprintf(error, 256, "this build is without CUDA"), 0;
}
static inline size_t bench_gpu_used(void) { return 0; }
static inline void *bench_gpu_event(void) { return NULL; }
static inline double bench_gpu_between(void *from, void *to) { return from && to ? 0 : -1; }
static inline double bench_gpu_copy(size_t bytes, double seconds, char error[256])
{
    (void)bytes;
    (void)seconds;
    return bench__gpu_none(error);
}
static inline double bench_gpu_product(const char *type, int n, double seconds, char error[256])
{
    (void)type;
    (void)n;
    (void)seconds;
    return bench__gpu_none(error);
}
#endif

/* ------------------------------------------------------------------------------------------ options, rows */

/* An option of a program. The option takes a number above 0, or a text, or no value. */
typedef struct bench_flag {
    const char *name;
    int *number;
    const char **text;
    bool *on;
    const char *help;
} bench_flag;

static inline void bench__usage(const bench_flag *flags, int n)
{
    printf("usage: %s [options]\n", bench.program);
    printf("  --json         print results as JSON, an object a line\n  --precision P  32-true, 16-mixed, "
           "16-true, bf16-mixed or bf16-true (32-true)\n  --threads N    0: all (0)\n");
    printf("  --seconds X    time for which each kernel is measured, at least (0.5)\n");
    for (int k = 0; k < n; k++) {
        printf("  %-14s %s", flags[k].name, flags[k].help);
        if (flags[k].number) printf(" (%d)", *flags[k].number);
        printf("\n");
    }
    exit(fflush(stdout) != 0);
}

/* Closes the current context, and opens a new one, which has no parameters and no arenas. */
static inline tt_context *bench_reopen(void)
{
    tt_close(bench.ctx);
    bench.ctx = tt_open(&bench.options);
    if (!bench.ctx) bench_die("cannot open a context: the message above says why");
    tt__bf16 how;
    bench.real = bench.ctx->cpu.isa;
    for (int k = 0; k < 3; k++) bench.has[k] = tt__choose_bf16(bench.real, tt__bf16_name[k], &how);
    bench.timed = *bench.ctx->cpu.isa;
    for (int op = 0; op < TT__OP_COUNT; op++) bench.timed.run[op] = bench__run;
    bench.ctx->cpu.isa = &bench.timed;
    return bench.ctx;
}

/* Reads the options, and opens a context that times the ops of its programs. */
static inline tt_context *bench_open(int argc, char **argv, const bench_flag *flags, int n)
{
    const char *slash = strrchr(argv[0], '/');
    bench.options = tt_context_options_default();
    bench.program = slash ? slash + 1 : argv[0];
    bench.precision = "32-true";
    bench.min = 0.5;
    for (int i = 1; i < argc; i++) {
        const bench_flag *f = NULL;
        const char *name = argv[i];
        char *end = NULL;
        double number = 0;
        bool threads = strcmp(name, "--threads") == 0, seconds = strcmp(name, "--seconds") == 0,
             precision = strcmp(name, "--precision") == 0;
        for (int k = 0; k < n; k++) if (strcmp(name, flags[k].name) == 0) f = &flags[k];
        if (strcmp(name, "--help") == 0) bench__usage(flags, n);
        if (strcmp(name, "--json") == 0) { bench.json = true; continue; }
        if (f && f->on) { *f->on = true; continue; }
        if (!f && !threads && !seconds && !precision)
            bench_die("there is no option '%s'; --help lists all options", name);
        if (++i == argc) bench_die("%s needs a value after it", name);
        if (precision) {
            static const char *const known[] = {"32-true", "16-mixed", "16-true", "bf16-mixed", "bf16-true"};
            bool is = false;
            for (int k = 0; k < TT__COUNT(known); k++) is = is || strcmp(argv[i], known[k]) == 0;
            if (!is) bench_die("--precision '%s' is unknown; --help lists them", argv[i]);
            bench.precision = argv[i];
            continue;
        }
        if (f && f->text) { *f->text = argv[i]; continue; }
        number = strtod(argv[i], &end);
        if (end == argv[i] || *end || !(number >= (f ? 1 : 0)) || number > 1e9 ||
            (!seconds && number != (int)number))
            bench_die("%s must be a %s, not '%s'", name,
                      f ? "whole number above 0" : threads ? "number of threads" : "number of seconds",
                      argv[i]);
        if (f) *f->number = (int)number;
        else if (threads) bench.options.threads = (int)number;
        else bench.min = number;
    }
    tt_context *ctx = bench_reopen();
    if (!bench.json) printf("%s, %d threads, %s\n", tt_isa(ctx), tt_threads(ctx), bench.precision);
    return ctx;
}

static inline void bench_close(void)
{
    for (int k = 0; k < 4; k++)
        if (bench.array[k])
            bench.options.allocator.release(bench.options.allocator.user, bench.array[k],
                                            BENCH_ARRAY * sizeof(float));
    tt_close(bench.ctx);
}

static inline const char *bench__number(char to[32], double x)
{
    if (x > 0 && isfinite(x)) snprintf(to, 32, "%.6g", x);
    else snprintf(to, 32, "null");
    return to;
}

static inline void bench__print_row(const char *name, double value, const char *unit, double peak,
                                    double peer, bool busy)
{
    char text[5][32];
    if (bench.json) {
        printf("{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"peak\": %s, \"of_peak\": %s, "
               "\"peer\": %s, \"ratio\": %s}\n",
               name, value, unit, bench__number(text[0], peak),
               bench__number(text[1], peak > 0 && !busy ? value / peak : 0), bench__number(text[2], peer),
               bench__number(text[3], peer > 0 ? value / peer : 0));
    } else {
        printf("%-48s %10.4g %-9s", name, value, unit);
        if (peak > 0) printf(" %5.1f%% of %.4g", 100 * value / peak, peak);
        if (peer > 0) printf(" %6.2f times %.4g", value / peer, peer);
        if (busy) printf("  busy machine");
        printf("\n");
    }
    fflush(stdout);
}

/* Prints a row. A `peak` or `peer` of 0 is left out of the row. */
static inline void bench_peer_row(const char *name, double value, const char *unit, double peak, double peer)
{
    bench__print_row(name, value, unit, peak, peer, false);
}

static inline void bench_row(const char *name, double value, const char *unit, double peak)
{
    bench_peer_row(name, value, unit, peak, 0);
}

static inline void bench_flops_row(const char *name, double flops) /* FLOP/s */
{
    bench_row(name, flops / 1e9, "GFLOP/s", bench_peak(bench.precision, flops) / 1e9);
}

static inline void bench_cost_row(const char *name, bench_cost c)
{
    if (c.min > 0)
        bench__print_row(name, c.flops / c.seconds / 1e9, "GFLOP/s", c.flops / c.min / 1e9, 0, c.busy);
    else bench_flops_row(name, c.flops / c.seconds);
}

/* Prints the bytes per second of the op with cost `c`, beside those of the loop `stream` (bench_stream). If
   the op worked in place, the row shows the loop that works in place. */
static inline void bench_bytes_row(const char *name, bench_cost c, int stream)
{
    if ((stream == BENCH_COPY || stream == BENCH_TRIAD) && c.in_place) stream++;
    bench_row(name, c.bytes / c.seconds / 1e9, "GB/s", bench_stream(stream) / 1e9);
}

static inline int bench_ascending(const void *a, const void *b) /* compares doubles, for qsort */
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Waits for a line on standard input, for a program that takes turns with another (--turns). Returns false at
   the end of input. */
static inline bool bench_turn(void)
{
    int c;
    while ((c = getchar()) != EOF) if (c == '\n') return true;
    return false;
}

/* ----------------------------------------------------------------------------------------------- programs */

/* Returns the parameter `name`, and creates it if it does not exist. With rows 0 the parameter is 1-D. */
static inline tt_param *bench_param(tt_context *ctx, const char *name, int64_t rows, int64_t cols,
                                    float scale)
{
    int64_t dims[2] = {rows ? rows : cols, cols};
    tt_init init = {TT_INIT_NORMAL, scale};
    tt_param *p = tt_param_find(ctx, name);
    if (!p) p = tt_param_new(ctx, name, rows ? 2 : 1, dims, init);
    if (!p) bench_die("%s", tt_error(ctx));
    return p;
}

/* Returns an embedding of `ids`: a value of shape (rows, width) that has a gradient and costs next to
   nothing. */
enum { BENCH_VOCAB = 64 };
static inline tt_value bench_source(tt_context *ctx, tt_tape *t, const char *name, tt_value ids,
                                    int64_t width)
{
    return tt_embedding(t, ids, bench_param(ctx, name, BENCH_VOCAB, width, 1));
}

/* Inputs and optimizer settings of a program that times a kernel. */
typedef struct bench_inputs {
    /* ids: i32 (rows, 1). target: f32 (rows, width), all zeros, or i32 (rows, 1) if width is 0. seq_start:
       the starts of the sequences, or an empty value. */
    tt_value ids, target, seq_start;
    int64_t rows, width, seqs;
    const int32_t *starts;           /* first rows of the sequences; shape (seqs + 1) */
    int vocab;                       /* number of different ids; 0: BENCH_VOCAB */
    tt_optimizer_kind optimizer;
    float clip_norm;
} bench_inputs;

static inline bench_inputs bench_inputs_new(tt_tape *t, int64_t rows, int64_t width)
{
    bench_inputs in;
    memset(&in, 0, sizeof in);
    in.rows = rows;
    in.width = width;
    in.ids = tt_input(t, "ids", TT_I32, rows, 1);
    in.target = width ? tt_input(t, "zero", TT_F32, rows, width) : tt_input(t, "target", TT_I32, rows, 1);
    in.vocab = BENCH_VOCAB;
    in.optimizer = TT_SGD;
    return in;
}

/* Returns whether the multiply-adds beside the kernels were too slow: below 0.85 of the best rate of this
   process, or below the rate of a kernel. */
static inline bool bench__busy(void)
{
    if (bench.beside <= 0) return false; /* no kernel has FLOPs, so no multiply-adds ran beside kernels */
    for (int op = 0; op < TT__OP_COUNT; op++)
        if (bench.best[op].flops > bench.beside * bench.best[op].seconds) return true;
    return bench.beside < 0.85 * bench.peak[bench__peak_of(bench.precision)];
}

enum { BENCH_ATTEMPTS = 4 };

/* Trains on mean(y^2), or on the loss y if width is 0, for at least bench.min seconds and 3 steps, and times
   each step. Frees the tape. */
static inline void bench_train(tt_context *ctx, tt_tape *t, tt_value y, const bench_inputs *in)
{
    tt_value none = {0};
    tt_compile_options o = tt_compile_options_default();
    o.optimizer.kind = in->optimizer;
    o.optimizer.clip_norm = in->clip_norm;
    o.precision = bench.precision;
    tt_program *p = tt_compile(t, in->width ? tt_mean_squared_error(t, y, in->target, none) : y, &o);
    int32_t *id = (int32_t *)malloc((size_t)in->rows * sizeof *id);
    void *zeros = calloc((size_t)(in->rows * tt__max(in->width, 1)), 4);
    uint32_t random = 1;
    if (!p) bench_die("%s", tt_error(ctx));
    if (!id || !zeros) bench_die("out of memory");
    for (int64_t r = 0; r < in->rows; r++) {
        random = random * 1664525u + 1013904223u;
        id[r] = (int32_t)(random >> 8) % in->vocab;
    }
    bench_peak(bench.precision, 0);
    for (int attempt = 0; attempt < (bench.min > 0 ? BENCH_ATTEMPTS : 1); attempt++) {
        bench_cost best[TT__OP_COUNT];
        double beside = bench.beside;
        memcpy(best, bench.best, sizeof best);
        memset(bench.best, 0, sizeof bench.best);
        bench.beside = 0;
        double begin = tt__seconds();
        for (int step = 0; step < 3 || tt__seconds() - begin < bench.min; step++) {
            bool ok = tt_set(p, in->ids, id, in->rows) == TT_OK &&
                      tt_set(p, in->target, zeros, in->rows) == TT_OK;
            if (ok && in->seq_start.id) ok = tt_set(p, in->seq_start, in->starts, in->seqs + 1) == TT_OK;
            bench_begin_run();
            if (!ok || tt_step(p, 1e-3f, NULL) != TT_OK) bench_die("%s", tt_error(ctx));
            bench_end_run();
            if (bench_longest() > 0) bench_run_beside(bench_longest());
        }
        /* keeps the figures of the attempt in which the machine was less busy */
        if (attempt > 0 && bench.beside < beside) {
            memcpy(bench.best, best, sizeof best);
            bench.beside = beside;
        }
        if (!bench__busy()) break;
    }
    bool busy = bench__busy();
    for (int op = 0; op < TT__OP_COUNT && bench.beside > 0; op++) {
        bench.best[op].min = bench.best[op].flops / bench.beside;
        bench.best[op].busy = busy;
    }
    tt_program_free(p);
    tt_tape_free(t);
    free(id);
    free(zeros);
}

/* ------------------------------------------------------------------------------------------------ batches */

typedef struct bench_batches { int n, max_seqs, max_rows; tt_batch *batch; } bench_batches;

static inline int32_t *bench_numbers(int64_t n)
{
    int32_t *x = (int32_t *)calloc((size_t)n, sizeof *x);
    if (!x) bench_die("out of memory");
    return x;
}

/* Adds a batch, which then owns ids, starts and labels. The function makes the other arrays of the batch. */
static inline void bench_add_batch(bench_batches *all, int seqs, const int32_t *ids, const int32_t *starts,
                                   const int32_t *labels)
{
    int rows = starts[seqs];
    int32_t *positions = bench_numbers(rows);
    all->batch = (tt_batch *)realloc(all->batch, (size_t)(all->n + 1) * sizeof *all->batch);
    if (!all->batch) bench_die("out of memory");
    tt_batch *b = &all->batch[all->n++];
    memset(b, 0, sizeof *b);
    for (int s = 0; s < seqs; s++)
        for (int r = starts[s]; r < starts[s + 1]; r++) positions[r] = r - starts[s];
    b->seqs = seqs;
    b->rows = rows;
    b->ids = ids;
    b->positions = positions;
    b->types = bench_numbers(rows);
    b->seq_start = starts;
    b->labels = labels;
    b->last_of_step = true;
    if (seqs > all->max_seqs) all->max_seqs = seqs;
    if (rows > all->max_rows) all->max_rows = rows;
}

static inline void bench_random_batch(bench_batches *all, int seqs, int length, int vocab)
{
    if ((int64_t)seqs * length > INT32_MAX)
        bench_die("%d sequences of %d tokens are 2^31 rows or more: use a smaller batch", seqs, length);
    int32_t *ids = bench_numbers((int64_t)seqs * length), *starts = bench_numbers(seqs + 1);
    int32_t *labels = bench_numbers(seqs);
    uint32_t random = 1;
    for (int r = 0; r < seqs * length; r++) {
        random = random * 1664525u + 1013904223u;
        ids[r] = (int32_t)(random >> 8) % vocab;
    }
    for (int s = 0; s < seqs; s++) {
        starts[s + 1] = starts[s] + length;
        labels[s] = s % 2;
    }
    bench_add_batch(all, seqs, ids, starts, labels);
}

static inline void bench_free_batches(bench_batches *all)
{
    for (int k = 0; k < all->n; k++) {
        free((void *)(uintptr_t)all->batch[k].ids);
        free((void *)(uintptr_t)all->batch[k].positions);
        free((void *)(uintptr_t)all->batch[k].types);
        free((void *)(uintptr_t)all->batch[k].seq_start);
        free((void *)(uintptr_t)all->batch[k].labels);
        free((void *)(uintptr_t)all->batch[k].pixels);
    }
    free(all->batch);
}

/* ------------------------------------------------------------------------------------------------- models */

/* Records a linear layer without a bias. */
static inline tt_value bench__decoder_linear(tt_context *ctx, tt_tape *t, tt_value x, int layer,
                                             const char *name, int64_t n_in, int64_t n_out)
{
    char w[64];
    snprintf(w, sizeof w, "layer.%d.%s.weight", layer, name);
    return tt_linear(t, x, bench_param(ctx, w, n_out, n_in, 0.02f), NULL);
}

static inline tt_value bench__decoder_norm(tt_context *ctx, tt_tape *t, tt_value x, int layer,
                                           const char *name, int64_t width)
{
    char w[64];
    snprintf(w, sizeof w, "layer.%d.%s.weight", layer, name);
    return tt_rmsnorm(t, x, bench_param(ctx, w, 0, width, 1), 1e-5f);
}

/* Sizes of a language model that is planned and never run. The model has RMS norms, causal attention, and a
   GELU or a gated SiLU between two linear layers. */
typedef struct bench_decoder_shape {
    int layers, width, inner, heads, vocab;
    bool gated, tied; /* tied: the weight of the last layer is the embedding */
} bench_decoder_shape;

/* Records the model for `seqs` sequences of `length` tokens on a tape. Returns the loss of predicting each
   next token. */
static inline tt_value bench_record_decoder(tt_context *ctx, tt_tape *t, const bench_decoder_shape *s,
                                            int64_t seqs, int64_t length)
{
    const int64_t rows = tt_axis(t, "tokens", seqs * length), texts = tt_axis(t, "seqs", seqs);
    const int width = s->width;
    tt_value ids = tt_input(t, "ids", TT_I32, rows, 1), next = tt_input(t, "next", TT_I32, rows, 1),
             starts = tt_seq_start(t, "starts", texts);
    tt_attention_options attention = tt_attention_options_default(s->heads);
    attention.causal = true;
    attention.max_length = (int)length;
    tt_param *words = bench_param(ctx, "words.weight", s->vocab, width, 0.02f);
    tt_value x = tt_embedding(t, ids, words);
    for (int k = 0; k < s->layers; k++) {
        tt_value y = bench__decoder_norm(ctx, t, x, k, "norm1", width),
                 q = bench__decoder_linear(ctx, t, y, k, "q", width, width),
                 key = bench__decoder_linear(ctx, t, y, k, "k", width, width),
                 v = bench__decoder_linear(ctx, t, y, k, "v", width, width);
        y = tt_attention(t, q, key, v, starts, &attention);
        x = tt_add(t, x, bench__decoder_linear(ctx, t, y, k, "out", width, width));
        y = bench__decoder_norm(ctx, t, x, k, "norm2", width);
        tt_value up = bench__decoder_linear(ctx, t, y, k, "up", width, s->inner);
        if (s->gated)
            y = tt_mul(t, up, tt_silu(t, bench__decoder_linear(ctx, t, y, k, "gate", width, s->inner)));
        else y = tt_gelu_tanh(t, up);
        x = tt_add(t, x, bench__decoder_linear(ctx, t, y, k, "down", s->inner, width));
        tt_block_end(t, x);
    }
    x = bench__decoder_norm(ctx, t, x, s->layers, "norm", width);
    x = s->tied ? tt_linear(t, x, words, NULL)
                : bench__decoder_linear(ctx, t, x, s->layers, "head", width, s->vocab);
    return tt_cross_entropy(t, x, next, NULL);
}

/* Records a language model of 6.05 billion parameters for `seqs` sequences on a new tape. Widths, layers and
   vocabulary equal those of GPT-J (Wang, Komatsuzaki, 2021). */
static inline tt_tape *bench_decoder(tt_context *ctx, int seqs, int length, tt_value *loss)
{
    const bench_decoder_shape shape = {28, 4096, 16384, 32, 50400, false, false};
    tt_tape *t = tt_tape_new(ctx);
    if (!t) bench_die("%s", tt_error(ctx));
    *loss = bench_record_decoder(ctx, t, &shape, seqs, length);
    if (tt_tape_status(t) != TT_OK) bench_die("%s", tt_error(ctx));
    return t;
}

#endif
