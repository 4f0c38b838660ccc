/* Times products whose weight is stored in few bits against those with fp32 weights: y = x w^T (forward) and
   dx = dy w, in programs that run the products of all formats in turn. A row shows GFLOP/s, and how many
   times as fast as with fp32 weights. */
#include "bench.h"

enum { FORMATS = 4, PRODUCTS = 2 };
static const char *const formats[FORMATS] = {"fp32", "int8", "nf4", "int4"};
static double best[PRODUCTS][FORMATS]; /* seconds of the fastest run */

/* Returns seconds: of the processor if there is one thread, so that other work on the machine counts less. */
static double now(void)
{
    struct timespec t;
    if (tt_threads(bench.ctx) > 1) return tt__seconds();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static tt_status run(const tt__launch *l)
{
    const bool back = l->instr->op == TT__OP_LINEAR_DX;
    const tt_dtype dtype = l->in[1].dtype;
    double *least = &best[back][dtype == TT__INT8 ? 1 : dtype == TT__NF4 ? 2 : dtype == TT__INT4 ? 3 : 0];
    tt_status status = bench.real->run[l->instr->op](l); /* warms the caches: no product adds to its result */
    const double begin = now();
    if (status == TT_OK) status = bench.real->run[l->instr->op](l);
    const double seconds = now() - begin;
    if (*least == 0 || seconds < *least) *least = seconds;
    return status;
}

static void layer(int64_t rows, int64_t in, int64_t out)
{
    tt_context *ctx = bench_reopen();
    tt_tape *t = tt_tape_new(ctx);
    bench_inputs inputs = bench_inputs_new(t, rows, out);
    tt_value y = {0};
    bench.timed.run[TT__OP_LINEAR] = bench.timed.run[TT__OP_LINEAR_DX] = run;
    memset(best, 0, sizeof best);
    for (int f = 0; f < FORMATS; f++) {
        char name[32];
        snprintf(name, sizeof name, "%s.table", formats[f]);
        const tt_value x = bench_source(ctx, t, name, inputs.ids, in);
        tt_param *w = bench_param(ctx, formats[f], out, in, 0.02f);
        if (tt_param_freeze(ctx, formats[f], true) != 1 || tt_param_store(w, f ? formats[f] : NULL) != TT_OK)
            bench_die("%s", tt_error(ctx));
        /* tt_scale keeps tt_add from becoming a part of the product */
        const tt_value part = tt_scale(t, tt_linear(t, x, w, NULL), 0.5f);
        y = f ? tt_add(t, y, part) : part;
    }
    bench_train(ctx, t, y, &inputs);
    for (int p = 0; p < PRODUCTS; p++)
        for (int f = 0; f < FORMATS; f++) {
            char name[128];
            const double flops = 2e-9 * (double)rows * (double)in * (double)out;
            snprintf(name, sizeof name, "%lld x %lld -> %lld, %s, %s", (long long)rows, (long long)in,
                     (long long)out, p ? "dX" : "forward", formats[f]);
            bench_peer_row(name, flops / best[p][f], "GFLOP/s", 0, f ? flops / best[p][0] : 0);
        }
}

int main(int argc, char **argv)
{
    static const int rows[] = {1, 8, 64, 512}, sizes[][2] = {{4096, 4096}, {1024, 1024}, {1536, 4096}};
    int only_rows = 0, only_in = 0, only_out = 0;
    const bench_flag flags[] = {
        {"--rows", &only_rows, NULL, NULL, "only this number of rows"},
        {"--in", &only_in, NULL, NULL, "with --out: only this layer"},
        {"--out", &only_out, NULL, NULL, ""}};
    bench_open(argc, argv, flags, TT__COUNT(flags));
    if (!only_in != !only_out) bench_die("--in and --out must be given together");
    for (int s = 0; s < (only_in ? 1 : TT__COUNT(sizes)); s++)
        for (int r = 0; r < (only_rows ? 1 : TT__COUNT(rows)); r++)
            layer(only_rows ? only_rows : rows[r], only_in ? only_in : sizes[s][0],
                  only_in ? only_out : sizes[s][1]);
    bench_close();
    return 0;
}
