/* Measures GB/s of the ops that are limited by memory inside a training step, beside the rate of a simple
   loop over arrays that no cache can hold (bench_stream). Bytes are the operands read and the results
   written: Adam with clipping reads a gradient twice. */

#include "bench.h"

enum { ROWS = 16384, WIDTH = 768, VOCAB = 30522, CLASSES = 8192 };
static tt_context *ctx;
static tt_tape *t;
static bench_inputs in;

/* Begins a program, and returns a first value of shape (rows, width). with_loss: the op to measure is itself
   a loss. */
static tt_value begin(int64_t rows, int64_t width, bool with_loss)
{
    ctx = bench_reopen();
    t = tt_tape_new(ctx);
    in = bench_inputs_new(t, rows, with_loss ? 0 : width);
    return bench_source(ctx, t, "x", in.ids, width);
}

static tt_value another(const char *name, int64_t width) { return bench_source(ctx, t, name, in.ids, width); }

int main(int argc, char **argv)
{
    const bench_cost *best = bench.best;
    bench_open(argc, argv, NULL, 0);

    tt_value x = begin(ROWS, WIDTH, false);
    tt_param *w = bench_param(ctx, "w", 0, WIDTH, 1), *b = bench_param(ctx, "b", 0, WIDTH, 1);
    bench_train(ctx, t, tt_layernorm(t, x, w, b, 1e-5f), &in);
    bench_bytes_row("layernorm", best[TT__OP_LAYERNORM], BENCH_COPY);
    bench_bytes_row("layernorm backward", best[TT__OP_LAYERNORM_BACKWARD], BENCH_TRIAD);

    x = begin(ROWS, WIDTH, false);
    bench_train(ctx, t, tt_gelu(t, x), &in);
    bench_bytes_row("gelu", best[TT__OP_ACTIVATION], BENCH_COPY);
    bench_bytes_row("gelu backward", best[TT__OP_ACTIVATION_BACKWARD], BENCH_TRIAD);

    x = begin(ROWS, WIDTH, false);
    bench_train(ctx, t, tt_dropout(t, x, 0.1f), &in);
    bench_bytes_row("dropout, forward and backward", best[TT__OP_DROPOUT], BENCH_COPY);

    x = begin(ROWS, WIDTH, false);
    bench_train(ctx, t, tt_add(t, x, another("residual", WIDTH)), &in);
    bench_bytes_row("residual add", best[TT__OP_ADD], BENCH_TRIAD);

    x = begin(2048, CLASSES, true);
    bench_train(ctx, t, tt_cross_entropy(t, x, in.target, NULL), &in);
    bench_bytes_row("softmax cross-entropy, 8192 classes", best[TT__OP_CROSS_ENTROPY], BENCH_READ);
    bench_bytes_row("softmax cross-entropy backward", best[TT__OP_CROSS_ENTROPY_BACKWARD], BENCH_COPY);

    ctx = bench_reopen();
    t = tt_tape_new(ctx);
    in = bench_inputs_new(t, ROWS, WIDTH);
    in.vocab = VOCAB;
    in.optimizer = TT_ADAMW;
    in.clip_norm = 1;
    bench_train(ctx, t, tt_embedding(t, in.ids, bench_param(ctx, "table", VOCAB, WIDTH, 1)), &in);
    bench_bytes_row("embedding, 30522 x 768", best[TT__OP_EMBEDDING], BENCH_COPY);
    bench_bytes_row("embedding's gradient", best[TT__OP_EMBEDDING_BACKWARD], BENCH_COPY);
    bench_bytes_row("norm of the gradient", best[TT__OP_SUM_SQUARES], BENCH_READ);
    bench_bytes_row("AdamW (4r 3w)", best[TT__OP_ADAM], BENCH_4R_3W);
    bench_cost clipped = bench_sum(best[TT__OP_ADAM], best[TT__OP_SUM_SQUARES]);
    bench_bytes_row("AdamW with clipping (5r 3w)", clipped, BENCH_4R_3W);

    bench.precision = "bf16-true"; /* parameters and state of 2 bytes, rounded stochastically */
    ctx = bench_reopen();
    t = tt_tape_new(ctx);
    in = bench_inputs_new(t, ROWS, WIDTH);
    in.vocab = VOCAB;
    in.optimizer = TT_ADAMW;
    bench_train(ctx, t, tt_embedding(t, in.ids, bench_param(ctx, "table", VOCAB, WIDTH, 1)), &in);
    bench_bytes_row("AdamW in bf16-true (4r 3w)", best[TT__OP_ADAM], BENCH_4R_3W);
    bench_close();
    return 0;
}
