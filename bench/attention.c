/* GFLOP/s of attention, timed inside a training step. Counted: 4 pairs width forward and 8 backward (half for causal), with pairs the
   sum of squared sequence lengths; what backward computes again is not counted. */

#include "bench.h"

int main(int argc, char **argv)
{
    static const struct { const char *name; int seqs, length, step, heads, size; bool causal; } cases[] = {
        {"DistilBERT 16 x 128", 16, 128, 0, 12, 64, false}, {"DistilBERT 8 x 512", 8, 512, 0, 12, 64, false},
        {"DistilBERT 16 x (20, 40, ..., 320)", 16, 20, 20, 12, 64, false}, {"MiniLM 16 x 128", 16, 128, 0, 12, 32, false},
        {"MiniLM 8 x 512", 8, 512, 0, 12, 32, false}, {"causal 1 x 4096", 1, 4096, 0, 4, 64, true}, {"head size 128, causal 4 x 512", 4, 512, 0, 8, 128, true},
    };
    tt_context *ctx = bench_open(argc, argv, NULL, 0);
    for (int k = 0; k < TT__COUNT(cases); k++) {
        int64_t seqs = cases[k].seqs, width = (int64_t)cases[k].heads * cases[k].size;
        int32_t starts[64] = {0};
        char name[128];
        tt_value v[3];
        for (int s = 0; s < seqs; s++) starts[s + 1] = starts[s] + cases[k].length + s * cases[k].step;
        tt_attention_options o = tt_attention_options_default(cases[k].heads);
        o.causal = cases[k].causal;
        tt_tape *t = tt_tape_new(ctx);
        tt_value ids = tt_input(t, "ids", TT_I32, starts[seqs], 1), seq_start = tt_seq_start(t, "seq_start", seqs);
        for (int j = 0; j < 3; j++) {
            snprintf(name, sizeof name, "table %d %d", k, j);
            v[j] = bench_source(ctx, t, name, ids, width);
        }
        tt_value y = tt_attention(t, v[0], v[1], v[2], seq_start, &o);
        bench_train(ctx, t, y, ids, seq_start, starts, seqs, starts[seqs], width, 0.5);
        snprintf(name, sizeof name, "%s forward", cases[k].name);
        bench_op_row(name, TT__OP_ATTENTION);
        snprintf(name, sizeof name, "%s backward", cases[k].name);
        bench_op_row(name, TT__OP_ATTENTION_BACKWARD);
    }
    tt_close(ctx);
    return 0;
}
