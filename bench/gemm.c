/* Measures the GFLOP/s of matrix products inside a training step: `y = x W^T` (forward), `dx = dy W` and
   `dW = dy^T x`. The shapes are the layers of DistilBERT-base and ViT-L at several numbers of tokens, and
   some small and odd shapes. */

#include "bench.h"

/* Measures and prints the three products of a layer. Returns the sum of their costs. */
static bench_cost layer(const char *name, int64_t rows, int64_t in, int64_t out)
{
    tt_context *ctx = bench_reopen();
    tt_tape *t = tt_tape_new(ctx);
    bench_inputs inputs = bench_inputs_new(t, rows, out);
    tt_value x = bench_source(ctx, t, "table", inputs.ids, in);
    char row[128];
    tt_value y = tt_linear(t, x, bench_param(ctx, "w", out, in, 0.02f), NULL);
    /* tt_scale keeps y from being the loss. So y and its gradient have the dtype of activations. */
    bench_train(ctx, t, tt_scale(t, y, 0.5f), &inputs);
    snprintf(row, sizeof row, "%s forward", name);
    bench_cost_row(row, bench.best[TT__OP_LINEAR]);
    snprintf(row, sizeof row, "%s dX", name);
    bench_cost_row(row, bench.best[TT__OP_LINEAR_DX]);
    snprintf(row, sizeof row, "%s dW", name);
    bench_cost_row(row, bench.best[TT__OP_LINEAR_DW]);
    bench_cost backward = bench_sum(bench.best[TT__OP_LINEAR_DX], bench.best[TT__OP_LINEAR_DW]);
    return bench_sum(bench.best[TT__OP_LINEAR], backward);
}

int main(int argc, char **argv)
{
    static const struct { int64_t rows, d, ff; } models[] = {
        {512, 768, 3072}, {1536, 768, 3072}, {6144, 768, 3072}, {788, 1024, 4096}, {3152, 1024, 4096}};
    static const struct { const char *name; int64_t rows, in, out; } others[] = {
        {"MiniLM 2048 x 384 -> 384", 2048, 384, 384},
        {"MiniLM 2048 x 384 -> 1536", 2048, 384, 1536},
        {"16 rows 768 -> 768", 16, 768, 768},
        {"odd 1001 x 333 -> 777", 1001, 333, 777},    {"square 1024", 1024, 1024, 1024},
    };
    int only_rows = 0, only_in = 0, only_out = 0;
    const bench_flag flags[] = {
        {"--rows", &only_rows, NULL, NULL, "with --in and --out: only this layer"},
        {"--in", &only_in, NULL, NULL, ""},
        {"--out", &only_out, NULL, NULL, ""}};
    bench_cost all = {0, 0, 0, 0, false, false};
    char name[128];
    bench_open(argc, argv, flags, TT__COUNT(flags));
    if (only_rows || only_in || only_out) {
        if (!only_rows || !only_in || !only_out) bench_die("--rows, --in and --out must be given together");
        snprintf(name, sizeof name, "%d x %d -> %d", only_rows, only_in, only_out);
        layer(name, only_rows, only_in, only_out);
        bench_close();
        return 0;
    }
    for (int k = 0; k < TT__COUNT(models); k++) {
        int64_t rows = models[k].rows, d = models[k].d, ff = models[k].ff;
        const int64_t shapes[3][2] = {{d, d}, {d, ff}, {ff, d}};
        bench_cost sum = {0, 0, 0, 0, false, false};
        for (int j = 0; j < 3; j++) {
            const int64_t in = shapes[j][0], out = shapes[j][1];
            snprintf(name, sizeof name, "%lld x %lld -> %lld", (long long)rows, (long long)in,
                     (long long)out);
            sum = bench_sum(sum, layer(name, rows, in, out));
        }
        snprintf(name, sizeof name, "%lld rows, D %lld: all nine, by flops", (long long)rows, (long long)d);
        bench_cost_row(name, sum);
        all = bench_sum(all, sum);
    }
    bench_cost_row("all of these, by flops", all);
    for (int k = 0; k < TT__COUNT(others); k++)
        layer(others[k].name, others[k].rows, others[k].in, others[k].out);
    bench_close();
    return 0;
}
