/* What the benchmarks share. A program includes this file alone; it holds the implementation.

   Kernels are timed inside real programs: bench_open() puts a table of kernels into the context that times each op as it calls
   the real one. Rows: name, value, unit, and where there is one the machine's peak in that unit: the best that tt_measured_peak
   (multiply-adds in registers, all threads) found so far. It is measured again for each row, as others may have slowed it down. With --json each row is an object on a line of its own. */
#ifndef TINYTRAIN_BENCH_H
#define TINYTRAIN_BENCH_H

#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"

static struct {
    tt_context *ctx;
    bool json;
    const char *precision;
    tt__isa_table timed;
    const tt__isa_table *real;
    double peak;                                                              /* FLOP/s                                  */
    double seconds[TT__OP_COUNT], flops[TT__OP_COUNT], best[TT__OP_COUNT];    /* of this run; best: over the runs        */
} bench = {NULL, false, "32-true", {0}, NULL, 0, {0}, {0}, {0}};

static inline void bench_die(const char *what)
{
    fprintf(stderr, "benchmark: %s\n", what);
    exit(1);
}

static tt_status bench__run(const tt__launch *l)
{
    int op = l->instr->op;
    double begin = tt__seconds(), pairs = 0;
    tt_status status = bench.real->run[op](l);
    bench.seconds[op] += tt__seconds() - begin;
    if (op == TT__OP_ATTENTION || op == TT__OP_ATTENTION_BACKWARD) {
        const tt__mat *starts = &l->in[op == TT__OP_ATTENTION ? 3 : 4];
        const int32_t *start = (const int32_t *)starts->data;
        for (int64_t s = 0; s + 1 < starts->rows; s++) pairs += (double)(start[s + 1] - start[s]) * (start[s + 1] - start[s]);
    }
    bench.flops[op] += tt__instr_flops(l->tape, l->instr, l->in[0].rows, pairs);
    return status;
}

/* At least once, and until the peak is not below `flops`, which would only say that the machine was busy then. */
static inline void bench_measure_peak(double flops)
{
    for (int k = 0; k == 0 || (k < 50 && bench.peak < flops); k++) {
        bench.ctx->measured_peak = 0;
        double peak = tt_measured_peak(bench.ctx);
        if (peak > bench.peak) bench.peak = peak;
    }
}

/* Reads --json, --precision P and the program's own flags (name, int), then opens a context. */
typedef struct bench_flag { const char *name; int *to; const char *help; } bench_flag;

static inline tt_context *bench_open(int argc, char **argv, const bench_flag *flags, int n)
{
    for (int i = 1; i < argc; i++) {
        const bench_flag *f = NULL;
        for (int k = 0; k < n; k++) if (strcmp(argv[i], flags[k].name) == 0) f = &flags[k];
        if (strcmp(argv[i], "--json") == 0) bench.json = true;
        else if (strcmp(argv[i], "--precision") == 0 && i + 1 < argc) bench.precision = argv[++i];
        else if (f && i + 1 < argc && atoi(argv[i + 1]) > 0) *f->to = atoi(argv[++i]);
        else {
            bool help = strcmp(argv[i], "--help") == 0;
            printf("usage: %s [--json] [--precision 32-true|bf16-mixed|bf16-true]\n", argv[0]);
            for (int k = 0; k < n; k++) printf("  %s N  %s (%d)\n", flags[k].name, flags[k].help, *flags[k].to);
            exit(help ? 0 : 2);
        }
    }
    tt_context *ctx = tt_open(NULL);
    if (!ctx) bench_die("the context does not open");
    bench.ctx = ctx;
    bench_measure_peak(0);
    bench.real = ctx->isa;
    bench.timed = *ctx->isa;
    for (int op = 0; op < TT__OP_COUNT; op++) bench.timed.run[op] = bench__run;
    ctx->isa = &bench.timed;
    if (!bench.json) printf("%s, %d threads, %s\n", tt_isa(ctx), tt_threads(ctx), bench.precision);
    return ctx;
}

static inline void bench_row(const char *name, double value, const char *unit, double peak) /* peak 0: none */
{
    if (!bench.json) {
        printf("%-44s %10.4g %-9s", name, value, unit);
        if (peak > 0) printf(" %5.1f%% of %.4g", 100 * value / peak, peak);
        printf("\n");
    } else if (peak > 0) {
        printf("{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"peak\": %.6g, \"of_peak\": %.4f}\n", name, value, unit, peak, value / peak);
    } else {
        printf("{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"peak\": null, \"of_peak\": null}\n", name, value, unit);
    }
    fflush(stdout);
}

static inline void bench_begin_run(void)
{
    memset(bench.seconds, 0, sizeof bench.seconds);
    memset(bench.flops, 0, sizeof bench.flops);
}

/* Best GFLOP/s of an op over the runs since bench.best was cleared. */
static inline void bench_end_run(void)
{
    for (int op = 0; op < TT__OP_COUNT; op++) {
        double speed = bench.seconds[op] > 0 ? bench.flops[op] / bench.seconds[op] : 0;
        if (speed > bench.best[op]) bench.best[op] = speed;
    }
}

static inline void bench_flops_row(const char *name, double flops)
{
    bench_measure_peak(flops);
    bench_row(name, flops / 1e9, "GFLOP/s", bench.peak / 1e9);
}

static inline void bench_op_row(const char *name, int op) { bench_flops_row(name, bench.best[op]); }

/* An embedding of rows ids: a value (rows, width) that has a gradient and costs next to nothing. */
enum { BENCH_VOCAB = 64 };
static inline tt_value bench_source(tt_context *ctx, tt_tape *t, const char *name, tt_value ids, int64_t width)
{
    int64_t dims[2] = {BENCH_VOCAB, width};
    tt_init init = {TT_INIT_NORMAL, 1};
    tt_param *table = tt_param_new(ctx, name, 2, dims, init);
    if (!table) bench_die(tt_error(ctx));
    return tt_embedding(t, ids, table);
}

/* Trains on mean(y^2) for at least `seconds` and 3 steps, timing each. seq_start may be none. Frees the tape. */
static inline void bench_train(tt_context *ctx, tt_tape *t, tt_value y, tt_value ids, tt_value seq_start, const int32_t *starts, int64_t seqs, int64_t rows,
                        int64_t width, double seconds)
{
    tt_value zero = tt_input(t, "zero", TT_F32, rows, width), none = {0};
    tt_compile_options o = tt_compile_options_default();
    o.optimizer.kind = TT_SGD;
    o.precision = bench.precision;
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, y, zero, none), &o);
    int32_t *id = (int32_t *)malloc((size_t)rows * sizeof *id);
    float *zeros = (float *)calloc((size_t)(rows * width), sizeof *zeros);
    if (!p) bench_die(tt_error(ctx));
    if (!id || !zeros) bench_die("no memory");
    for (int64_t r = 0; r < rows; r++) id[r] = (int32_t)(r * 7 % BENCH_VOCAB);
    memset(bench.best, 0, sizeof bench.best);
    double begin = tt__seconds();
    for (int step = 0; step < 3 || tt__seconds() - begin < seconds; step++) {
        bool ok = tt_set(p, ids, id, rows) == TT_OK && tt_set(p, zero, zeros, rows) == TT_OK;
        if (ok && seq_start.id) ok = tt_set(p, seq_start, starts, seqs + 1) == TT_OK;
        bench_begin_run();
        if (!ok || tt_step(p, 1e-3f, NULL) != TT_OK) bench_die(tt_error(ctx));
        bench_end_run();
    }
    tt_program_free(p);
    tt_tape_free(t);
    free(id);
    free(zeros);
}

#endif
