/* GFLOP/s of the matrix products of training, timed inside a training step: y = x W^T (forward), dx = dy W, dW = dy^T x. */

#include "bench.h"

int main(int argc, char **argv)
{
    static const struct { const char *name; int64_t rows, in, out; } shapes[] = {
        {"DistilBERT qkv/out 2048 tokens", 2048, 768, 768}, {"DistilBERT up 2048 tokens", 2048, 768, 3072}, {"DistilBERT down 2048 tokens", 2048, 3072, 768},
        {"DistilBERT up 256 tokens", 256, 768, 3072},       {"MiniLM qkv/out 2048 tokens", 2048, 384, 384}, {"MiniLM up 2048 tokens", 2048, 384, 1536},
        {"pooler 16 sequences", 16, 768, 768},              {"odd 1001 x 333 x 777", 1001, 333, 777},       {"square 1024", 1024, 1024, 1024},
    };
    tt_context *ctx = bench_open(argc, argv, NULL, 0);
    for (int k = 0; k < TT__COUNT(shapes); k++) {
        int64_t rows = shapes[k].rows, dims[2] = {shapes[k].out, shapes[k].in};
        tt_init init = {TT_INIT_NORMAL, 0.02f};
        tt_value none = {0};
        char name[128];
        tt_tape *t = tt_tape_new(ctx);
        tt_value ids = tt_input(t, "ids", TT_I32, rows, 1);
        snprintf(name, sizeof name, "table %d", k);
        tt_value x = bench_source(ctx, t, name, ids, shapes[k].in);
        snprintf(name, sizeof name, "w %d", k);
        tt_value y = tt_linear(t, x, tt_param_new(ctx, name, 2, dims, init), NULL);
        bench_train(ctx, t, y, ids, none, NULL, 0, rows, shapes[k].out, 0.5);
        snprintf(name, sizeof name, "%s forward", shapes[k].name);
        bench_op_row(name, TT__OP_LINEAR);
        snprintf(name, sizeof name, "%s dx", shapes[k].name);
        bench_op_row(name, TT__OP_LINEAR_DX);
        snprintf(name, sizeof name, "%s dW", shapes[k].name);
        bench_op_row(name, TT__OP_LINEAR_DW);
    }
    tt_close(ctx);
    return 0;
}
