/* Reports what tinytrain finds on this machine, what a program would use of it and why, and trains a tiny
   model to show that training works.

       make build/tt_doctor && build/tt_doctor
       make cuda && build/cuda/tt_doctor --device cuda

   Exits with 0 if training works on the device, else with 1 and a sentence on what to do. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"
#include "cli.h"

static const char *device;

static const cli_flag flags[] = {
    {"--device", "KIND", CLI_TEXT, &device,
     .help = "cpu or cuda: show and try only this one (all are shown, and TINYTRAIN_DEVICE, else cpu, is "
     "tried)"},
};

/* Prints the devices of a kind, or why programs cannot use them. */
static tt_status show(tt_context *ctx, const char *kind)
{
    char text[16384];
    tt_status status = tt_device_text(ctx, kind, text, sizeof text);
    printf("\n%s\n", kind);
    for (const char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) printf("  %s\n", line);
    if (status != TT_OK) printf("  cannot be used: %s\n", tt_error(ctx));
    return status;
}

/* Trains a small network to compute the exclusive or of two numbers. */
static tt_status train(tt_context *ctx, const char *kind, tt_stats *first, tt_stats *last)
{
    enum { ROWS = 4, WIDTH = 2, HIDDEN = 16, CLASSES = 2, STEPS = 100 };
    static const float xs[ROWS][WIDTH] = {{0, 0}, {0, 1}, {1, 0}, {1, 1}};
    static const int32_t ys[ROWS] = {0, 1, 1, 0};
    const int64_t d1[2] = {HIDDEN, WIDTH}, d2[2] = {CLASSES, HIDDEN}, n1 = HIDDEN;
    const tt_init normal = {TT_INIT_NORMAL, 0.5f}, zeros = {TT_INIT_ZEROS, 0};
    tt_param *w1 = tt_param_new(ctx, "w1", 2, d1, normal), *b1 = tt_param_new(ctx, "b1", 1, &n1, zeros);
    tt_param *w2 = tt_param_new(ctx, "w2", 2, d2, normal);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options o = tt_compile_options_default();
    o.device = kind;
    tt_value x = tt_input(t, "x", TT_F32, ROWS, WIDTH), y = tt_input(t, "y", TT_I32, ROWS, 1);
    tt_value logits = tt_linear(t, tt_gelu(t, tt_linear(t, x, w1, b1)), w2, NULL);
    tt_program *p = tt_compile(t, tt_cross_entropy(t, logits, y, NULL), &o);
    tt_status status = p ? TT_OK : tt_error_code(ctx);
    for (int step = 0; step < STEPS && status == TT_OK; step++) {
        status = tt_set(p, x, xs, ROWS);
        if (status == TT_OK) status = tt_set(p, y, ys, ROWS);
        if (status == TT_OK) status = tt_step(p, 0.03f, last);
        if (step == 0) *first = *last;
    }
    tt_program_free(p);
    tt_tape_free(t);
    return status;
}

int main(int argc, char **argv)
{
    cli_parse(argc, argv, flags, CLI_COUNT(flags), "tt_doctor", "Shows what tinytrain finds on this machine "
              "and which devices and instruction set a program would use, and trains a tiny model.");
    const char *environment = getenv("TINYTRAIN_DEVICE"), *tried = device ? device : "cpu";
    if (!device && environment && *environment) tried = environment;
    tt_context *ctx = tt_open(NULL);
    tt_stats first, last;
    if (!ctx) return 1; /* the logger has reported the error */
#if defined(__clang__)
    printf("tinytrain %s, compiled by %s\n", TT_VERSION, __VERSION__);
#else
    printf("tinytrain %s, compiled by gcc %s\n", TT_VERSION, __VERSION__);
#endif
    memset(&first, 0, sizeof first);
    memset(&last, 0, sizeof last);
    if (!device && strcmp(tried, "cpu") != 0) show(ctx, "cpu");
    tt_status status = show(ctx, tried);
    if (!device && strcmp(tried, "cuda") != 0) show(ctx, "cuda");
    if (status == TT_OK) {
        status = train(ctx, tried, &first, &last);
        if (status != TT_OK) printf("\ntraining on %s fails: %s\n", tried, tt_error(ctx));
    }
    bool learned = status == TT_OK && last.loss < first.loss && last.correct == 4;
    if (status == TT_OK)
        printf("\ntraining on %s %s: loss %.4f, after %lld steps %.4f, %.0f of 4 right\n", tried,
               learned ? "works" : "does not learn", first.loss, (long long)last.step, last.loss,
               last.correct);
    if (status == TT_OK && !learned) puts("the loss does not fall as it should: please report this output");
    tt_close(ctx);
    return !learned;
}
