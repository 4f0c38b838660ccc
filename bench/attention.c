/* GFLOP/s of attention, timed inside a training step. With `pairs`, the sum of the squared sequence lengths,
   the forward counts as `4 * pairs * width` FLOPs and the backward as `8 * pairs * width`. Causal attention
   counts as half of that. FLOPs that the backward recomputes are not counted. */

#include "bench.h"

int main(int argc, char **argv)
{
    static const struct { const char *name; int seqs, length, step, heads, size; bool causal; } cases[] = {
        {"12 x 64, T 64", 32, 64, 0, 12, 64, false},
        {"12 x 64, T 128", 16, 128, 0, 12, 64, false},
        {"12 x 64, T 197", 16, 197, 0, 12, 64, false},
        {"12 x 64, T 512", 4, 512, 0, 12, 64, false},
        {"12 x 64, T 1024", 2, 1024, 0, 12, 64, false},
        {"12 x 64, T 20, 40, ..., 320", 16, 20, 20, 12, 64, false},
        {"12 x 64, causal, T 64", 32, 64, 0, 12, 64, true},
        {"12 x 64, causal, T 128", 16, 128, 0, 12, 64, true},
        {"12 x 64, causal, T 197", 16, 197, 0, 12, 64, true},
        {"12 x 64, causal, T 512", 4, 512, 0, 12, 64, true},
        {"12 x 64, causal, T 1024", 2, 1024, 0, 12, 64, true},
        {"12 x 32, T 128", 16, 128, 0, 12, 32, false},
        {"12 x 32, T 512", 4, 512, 0, 12, 32, false},
        {"4 x 64, causal, T 4096", 1, 4096, 0, 4, 64, true},
        {"8 x 128, causal, T 512", 4, 512, 0, 8, 128, true},
    };
    static const char *const tables[3] = {"q", "k", "v"};
    bench_open(argc, argv, NULL, 0);
    for (int k = 0; k < TT__COUNT(cases); k++) {
        int64_t seqs = cases[k].seqs, width = (int64_t)cases[k].heads * cases[k].size;
        int32_t starts[64] = {0};
        char name[128];
        tt_value v[3];
        for (int s = 0; s < seqs; s++) starts[s + 1] = starts[s] + cases[k].length + s * cases[k].step;
        tt_attention_options o = tt_attention_options_default(cases[k].heads);
        o.causal = cases[k].causal;
        tt_context *ctx = bench_reopen();
        tt_tape *t = tt_tape_new(ctx);
        bench_inputs in = bench_inputs_new(t, starts[seqs], width);
        in.seq_start = tt_seq_start(t, "seq_start", seqs);
        in.starts = starts;
        in.seqs = seqs;
        for (int j = 0; j < 3; j++) v[j] = bench_source(ctx, t, tables[j], in.ids, width);
        bench_train(ctx, t, tt_attention(t, v[0], v[1], v[2], in.seq_start, &o), &in);
        snprintf(name, sizeof name, "%s: forward", cases[k].name);
        bench_cost_row(name, bench.best[TT__OP_ATTENTION]);
        snprintf(name, sizeof name, "%s: backward", cases[k].name);
        bench_cost_row(name, bench.best[TT__OP_ATTENTION_BACKWARD]);
        snprintf(name, sizeof name, "%s: both", cases[k].name);
        bench_cost_row(name, bench_sum(bench.best[TT__OP_ATTENTION], bench.best[TT__OP_ATTENTION_BACKWARD]));
    }
    bench_close();
    return 0;
}
