/* A transformer of your own that learns to repeat digits backwards: trained, saved and resumed.
       make build/hello && build/hello 100     takes 100 steps, and saves its state in hello.safetensors
       build/hello 200                         continues to step 200, with the same bits as one run of 200 */
#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
enum { DIGITS = 10, LENGTH = 2 * DIGITS, SEQS = 32, ROWS = SEQS * LENGTH, D = 64, HEADS = 4, LAYERS = 2 };

/* 1. The model is a struct of named parameters. Weights are (out, in). */
typedef struct block { tt_param *norm1, *q, *k, *v, *out, *norm2, *up, *down; } block;
typedef struct model { tt_param *digit, *position, *norm; block block[LAYERS]; } model;
static tt_param *param(tt_context *ctx, const char *name, int layer, int64_t out, int64_t in)
{
    const tt_init init = {in ? TT_INIT_NORMAL : TT_INIT_ONES, 0.1f}; /* a norm (in = 0) has one dimension */
    const int64_t dims[2] = {out, in};
    char full[32];
    snprintf(full, sizeof full, "%s.%d", name, layer);
    return tt_param_new(ctx, full, in ? 2 : 1, dims, init);
}
static void make_model(tt_context *ctx, model *m)
{
    m->digit = param(ctx, "digit", 0, 10, D), m->position = param(ctx, "position", 0, LENGTH, D);
    m->norm = param(ctx, "norm", 0, D, 0);
    for (int n = 0; n < LAYERS; n++) {
        block *b = &m->block[n];
        b->norm1 = param(ctx, "norm1", n, D, 0), b->norm2 = param(ctx, "norm2", n, D, 0);
        b->q = param(ctx, "q", n, D, D), b->k = param(ctx, "k", n, D, D), b->v = param(ctx, "v", n, D, D);
        b->out = param(ctx, "out", n, D, D);
        b->up = param(ctx, "up", n, 4 * D, D), b->down = param(ctx, "down", n, D, 4 * D);
    }
}

/* 2. The computation is recorded on a tape: embeddings of the digits, then blocks, then logits (ROWS, 10). */
static tt_value record(tt_tape *t, const model *m, tt_value digits, tt_value positions, tt_value starts)
{
    tt_attention_options a = tt_attention_options_default(HEADS);
    a.causal = true;
    tt_value x = tt_embedding(t, digits, m->digit), h = tt_embedding(t, positions, m->position);
    x = tt_add(t, x, h);
    for (const block *b = m->block; b < m->block + LAYERS; b++) {
        h = tt_layernorm(t, x, b->norm1, NULL, 1e-5f);
        tt_value q = tt_linear(t, h, b->q, NULL), k = tt_linear(t, h, b->k, NULL);
        h = tt_attention(t, q, k, tt_linear(t, h, b->v, NULL), starts, &a);
        x = tt_add(t, x, tt_linear(t, h, b->out, NULL));
        h = tt_gelu(t, tt_linear(t, tt_layernorm(t, x, b->norm2, NULL, 1e-5f), b->up, NULL));
        x = tt_add(t, x, tt_linear(t, h, b->down, NULL));
    }
    return tt_linear(t, tt_layernorm(t, x, m->norm, NULL, 1e-5f), m->digit, NULL); /* tied to the embedding */
}
/* 3. The data depend on the step alone, so that a resumed run sees the same data. -100: no target. */
static void make_batch(uint64_t random, int32_t *digits, int32_t *targets)
{
    for (int r = 0, at = 0; r < ROWS; targets[r++] = -100, at = r % LENGTH) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        digits[r] = at < DIGITS ? (int32_t)((random >> 33) % 10) : digits[r + LENGTH - 1 - 2 * at];
        if (at >= DIGITS) targets[r - 1] = digits[r]; /* the target of a row is the next digit */
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && atoi(argv[1]) < 1) return fprintf(stderr, "usage: hello [STEPS, in all (200)]\n"), 1;
    static int32_t digits[ROWS], targets[ROWS], positions[ROWS], starts[SEQS + 1];
    for (int r = 0; r < ROWS; r++) positions[r] = r % LENGTH, starts[r / LENGTH + 1] = r + 1;
    tt_context *ctx = tt_open(NULL);
    if (!ctx) return 1; /* the logger has reported the error */
    model m;
    make_model(ctx, &m);
    tt_tape *t = tt_tape_new(ctx);
    tt_value d = tt_input(t, "digits", TT_I32, ROWS, 1), y = tt_input(t, "targets", TT_I32, ROWS, 1);
    tt_value at = tt_input(t, "positions", TT_I32, ROWS, 1), first = tt_seq_start(t, "starts", SEQS);
    /* 4. The program plans all of its memory before the first step. Then the program only runs steps. */
    tt_program *p = tt_compile(t, tt_cross_entropy(t, record(t, &m, d, at, first), y, NULL), NULL);
    tt_status status = p ? TT_OK : tt_error_code(ctx);
    if (p && access("hello.safetensors", F_OK) == 0) status = tt_program_load(p, "hello.safetensors");
    for (tt_stats s; status == TT_OK && tt_program_steps(p) < (argc > 1 ? atoi(argv[1]) : 200);) {
        make_batch((uint64_t)tt_program_steps(p), digits, targets);
        tt_set(p, d, digits, ROWS), tt_set(p, y, targets, ROWS); /* the step reports errors of tt_set */
        tt_set(p, at, positions, ROWS), tt_set(p, first, starts, SEQS + 1);
        status = tt_step(p, 1e-3f, &s);
        if (status != TT_OK || s.step % 20) continue;
        printf("step %d: loss %.4f, %.1f%% right\n", (int)s.step, s.loss, 100 * s.correct / s.targets);
    }
    if (status == TT_OK) status = tt_program_save(p, "hello.safetensors");
    if (status != TT_OK) fprintf(stderr, "hello: %s\n", tt_error(ctx));
    tt_program_free(p), tt_tape_free(t), tt_close(ctx);
    return status != TT_OK;
}
