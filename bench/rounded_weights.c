/* Trains a small network whose matrices are rounded to few bits, on numbers from standard input, and writes
   both matrices to standard output after each step:

       build/rounded_weights KIND STEPS < numbers > matrices

   KIND is none, int8, ternary or binary. The network is a linear layer, GELU and a linear layer, without
   biases; the loss is the mean squared error, and the optimizer is SGD with momentum 0.9 and a rate of 0.5.
   Numbers are floats of 4 bytes: both matrices, then the inputs and the targets of each step.
   bench/check_rounded_weights.py compares the matrices with PyTorch's. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"

enum { ROWS = 32, IN_WIDTH = 24, HIDDEN = 40, OUT_WIDTH = 16 };

static void check(tt_context *ctx, bool ok)
{
    if (ok) return;
    fprintf(stderr, "%s\n", ctx ? tt_error(ctx) : "no context");
    exit(1);
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"none", "int8", "ternary", "binary"};
    static const tt_rounding kinds[] = {TT_ROUND_NONE, TT_ROUND_INT8, TT_ROUND_TERNARY, TT_ROUND_BINARY};
    static float numbers[HIDDEN * IN_WIDTH], x[ROWS * IN_WIDTH], y[ROWS * OUT_WIDTH];
    tt_context *ctx = tt_open(NULL);
    if (!ctx || argc != 3) {
        fprintf(stderr, "usage: %s KIND STEPS\n", argv[0]);
        return 2;
    }
    const int64_t dims[2][2] = {{HIDDEN, IN_WIDTH}, {OUT_WIDTH, HIDDEN}};
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    tt_param *w[2] = {tt_param_new(ctx, "first", 2, dims[0], zeros),
                      tt_param_new(ctx, "second", 2, dims[1], zeros)};
    for (int k = 0; k < 2; k++) {
        const size_t n = (size_t)(dims[k][0] * dims[k][1]);
        check(ctx, w[k] && fread(numbers, sizeof *numbers, n, stdin) == n &&
                   tt_param_set(w[k], numbers) == TT_OK);
    }
    for (int k = 0; k < 4; k++) if (strcmp(argv[1], names[k]) == 0) tt_param_round(ctx, "*", kinds[k]);
    tt_tape *t = tt_tape_new(ctx);
    const tt_value in = tt_input(t, "x", TT_F32, ROWS, IN_WIDTH);
    const tt_value target = tt_input(t, "y", TT_F32, ROWS, OUT_WIDTH);
    const tt_value hidden = tt_gelu(t, tt_linear(t, in, w[0], NULL));
    const tt_value out = tt_linear(t, hidden, w[1], NULL);
    tt_compile_options o = tt_compile_options_default();
    o.optimizer.kind = TT_SGD;
    o.optimizer.momentum = 0.9f;
    o.optimizer.weight_decay = 0;
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, out, target, (tt_value){0, 0}), &o);
    check(ctx, p != NULL);
    for (int step = 0; step < atoi(argv[2]); step++) {
        check(ctx, fread(x, sizeof x, 1, stdin) == 1 && fread(y, sizeof y, 1, stdin) == 1 &&
                   tt_set(p, in, x, ROWS) == TT_OK && tt_set(p, target, y, ROWS) == TT_OK &&
                   tt_step(p, 0.5f, NULL) == TT_OK);
        for (int k = 0; k < 2; k++) {
            check(ctx, tt_param_get(w[k], numbers) == TT_OK);
            fwrite(numbers, sizeof *numbers, (size_t)(dims[k][0] * dims[k][1]), stdout);
        }
    }
    tt_program_free(p);
    tt_tape_free(t);
    tt_close(ctx);
    return 0;
}
