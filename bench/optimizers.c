/* Updates a matrix by an optimizer with gradients from standard input, and writes the matrix after each step
   to standard output:

       build/optimizers KIND BITS ROWS COLS STEPS LR DECAY < numbers > matrices

   KIND is an option of --optimizer, such as adamw; BITS is 32, 16 or 8; momentum is 0.95 in muon, else 0.9;
   betas are 0.9 and 0.99 in lion, else 0.9 and 0.999. Numbers are floats of 4 bytes: the first matrix, then
   the gradient of each step. bench/check_optimizers.py compares the matrices with PyTorch's.

       build/optimizers time MILLIONS THREADS ROUNDS

   measures updates of a matrix, by turns with AdamW (states of 32, 16 and 8 bits) and with Adafactor, and
   prints for each the least number of seconds of an update, and the middle one. MILLIONS: size of the matrix,
   in million numbers. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"

static void check(tt_context *ctx, bool ok)
{
    if (ok) return;
    fprintf(stderr, "%s\n", tt_error(ctx));
    exit(1);
}

/* A program that updates a matrix, whose gradient the mean squared error of a linear layer makes. */
typedef struct updater {
    tt_param *p;
    tt_tape *t;
    tt_value in, y;
    tt_program *program;
} updater;

static updater new_updater(tt_context *ctx, const char *kind, int bits, const int64_t dims[2], float decay)
{
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    tt_compile_options o = tt_compile_options_default();
    updater u = {tt_param_new(ctx, "layer.0.weight", 2, dims, zeros), tt_tape_new(ctx), {0, 0}, {0, 0},
                 NULL};
    int k = 0;
    for (const char *word; (word = tt_option_word("optimizer", k)) && strcmp(word, kind) != 0;) k++;
    o.optimizer.kind = (tt_optimizer_kind)k;
    o.optimizer.state_bits = bits;
    o.optimizer.momentum = strcmp(kind, "muon") == 0 ? 0.95f : 0.9f;
    o.optimizer.nesterov = true;
    if (strcmp(kind, "lion") == 0) o.optimizer.beta2 = 0.99f;
    o.optimizer.weight_decay = decay;
    o.keep_gradients = true;
    o.accumulate = true;
    check(ctx, u.p && u.t);
    u.in = tt_input(u.t, "x", TT_F32, 1, dims[1]);
    u.y = tt_input(u.t, "y", TT_F32, 1, dims[0]);
    const tt_value y = tt_linear(u.t, u.in, u.p, NULL);
    u.program = tt_compile(u.t, tt_mean_squared_error(u.t, y, u.y, (tt_value){0, 0}), &o);
    check(ctx, u.program != NULL);
    return u;
}

static double seconds(void)
{
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { TIMED = 4, MAX_ROUNDS = 100 };

static void time_updates(int millions, int threads, int rounds)
{
    static const struct { const char *kind; int bits; } rows[TIMED] = {
        {"adamw", 32}, {"adamw", 16}, {"adamw", 8}, {"adafactor", 32}};
    static double taken[TIMED][MAX_ROUNDS];
    const int64_t dims[] = {millions * 250, 4000};
    float *x = (float *)malloc(4000 * sizeof *x), *y = (float *)calloc((size_t)dims[0], sizeof *y);
    tt_context *ctx[TIMED];
    updater u[TIMED];
    for (int k = 0; k < TIMED; k++) {
        tt_context_options o = tt_context_options_default();
        o.threads = threads;
        ctx[k] = tt_open(&o);
        if (!ctx[k] || !x || !y) exit(1);
        u[k] = new_updater(ctx[k], rows[k].kind, rows[k].bits, dims, 0.01f);
    }
    for (int j = 0; j < 4000; j++) x[j] = (float)(j * 37 % 101) / 50 - 1;
    for (int round = 0; round <= rounds; round++)
        for (int k = 0; k < TIMED; k++) {
            for (int64_t r = 0; r < dims[0]; r++) y[r] = (float)((r * 71 + round) % 997) / 500 - 1;
            check(ctx[k], tt_set(u[k].program, u[k].in, x, 1) == TT_OK &&
                          tt_set(u[k].program, u[k].y, y, 1) == TT_OK &&
                          tt_micro_step(u[k].program, NULL) == TT_OK);
            const double before = seconds();
            check(ctx[k], tt_update(u[k].program, 1e-3f, NULL) == TT_OK);
            if (round) taken[k][round - 1] = seconds() - before; /* the first round warms up */
        }
    for (int k = 0; k < TIMED; k++) {
        qsort(taken[k], (size_t)rounds, sizeof taken[k][0], by_size);
        printf("%s, %d bits, %d million numbers, %d threads: least %.4f s, middle %.4f s\n",
               rows[k].kind, rows[k].bits, millions, threads, taken[k][0], taken[k][rounds / 2]);
        tt_program_free(u[k].program);
        tt_tape_free(u[k].t);
        tt_close(ctx[k]);
    }
    free(x);
    free(y);
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "time") == 0) {
        const int rounds = atoi(argv[4]);
        time_updates(atoi(argv[2]), atoi(argv[3]), (int)tt__max(1, tt__min(rounds, MAX_ROUNDS)));
        return 0;
    }
    tt_context *ctx = tt_open(NULL);
    if (!ctx || argc != 8) {
        fprintf(stderr, "usage: %s KIND BITS ROWS COLS STEPS LR DECAY\n", argv[0]);
        return 2;
    }
    const int64_t dims[] = {atoi(argv[3]), atoi(argv[4])};
    const size_t n = (size_t)(dims[0] * dims[1]);
    float *x = (float *)calloc(n, sizeof *x);
    check(ctx, x && fread(x, sizeof *x, n, stdin) == n);
    const updater u = new_updater(ctx, argv[1], atoi(argv[2]), dims, (float)atof(argv[7]));
    check(ctx, tt_param_set(u.p, x) == TT_OK);
    float *zero = (float *)calloc(n, sizeof *zero);
    for (int step = 0; step < atoi(argv[5]); step++) {
        check(ctx, zero && tt_set(u.program, u.in, zero, 1) == TT_OK &&
                   tt_set(u.program, u.y, zero, 1) == TT_OK);
        check(ctx, tt_micro_step(u.program, NULL) == TT_OK && fread(x, sizeof *x, n, stdin) == n);
        check(ctx, tt_set_gradient(u.program, u.p, x) == TT_OK &&
                   tt_update(u.program, (float)atof(argv[6]), NULL) == TT_OK &&
                   tt_param_get(u.p, x) == TT_OK);
        fwrite(x, sizeof *x, n, stdout);
    }
    tt_program_free(u.program);
    tt_tape_free(u.t);
    tt_close(ctx);
    free(x);
    free(zero);
    return 0;
}
