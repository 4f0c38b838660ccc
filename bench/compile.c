/* Measures the seconds from a model to a program that can run: creating the parameters of a BERT of many
   small layers, recording the BERT, and tt_compile (differentiation, passes, lifetimes, placement): forward
   only, for training, and for training with the verifier after each pass. Nothing is allocated, and nothing
   runs. Each figure is the best of --rounds. With --shapes, this benchmark shows how the time of tt_compile
   and of tt_plan_text grows with the size of programs of other shapes: each shape is recorded with `n`,
   `2 n` and `4 n` repetitions. */

#include "bench.h"

enum { PARAMETERS, RECORD, FORWARD, TRAIN, VERIFIED, PHASES };
static const char *const phase_names[PHASES] = {
    "parameters", "recording", "compiling, forward only", "compiling, training",
    "compiling, training, verified"};
typedef struct phases { double seconds[PHASES]; int instructions; } phases;

/* Compiles the tape and returns the seconds. If report is not NULL, also calls tt_plan_text, and sets *report
   to the seconds of that call. */
static double compile(tt_context *ctx, tt_tape *t, tt_value loss, bool train, int *instructions,
                      double *report)
{
    char text[4096];
    tt_compile_options o = tt_compile_options_default();
    o.train = train;
    o.precision = bench.precision;
    o.optimizer.clip_norm = 1;
    double begin = tt__seconds();
    tt_program *p = tt_compile(t, loss, &o);
    double seconds = tt__seconds() - begin;
    if (!p) bench_die("%s", tt_error(ctx));
    *instructions = tt_program_plan(p).instructions;
    begin = tt__seconds();
    if (report) tt_plan_text(p, text, sizeof text);
    if (report) *report = tt__seconds() - begin;
    tt_program_free(p);
    return seconds;
}

/* Measures each phase once, and lowers the seconds in `best` where this round was faster. */
static void measure(int layers, bool verify, phases *best)
{
    tt_bert m;
    tt_inputs in;
    double now[PHASES] = {0};
    int forward;
    tt_bert_config c = tt_bert_config_default(TT_BERT);
    c.vocab_size = 64;
    c.max_positions = 32;
    c.hidden_size = 16;
    c.heads = 2;
    c.intermediate_size = 32;
    c.layers = layers;
    memset(&in, 0, sizeof in);
    bench.options.verify = verify;
    tt_context *ctx = bench_reopen();
    double begin = tt__seconds();
    if (tt_bert_new(ctx, &m, &c) != TT_OK) bench_die("%s", tt_error(ctx));
    now[PARAMETERS] = tt__seconds() - begin;
    begin = tt__seconds();
    tt_tape *t = tt_tape_new(ctx);
    int64_t rows = tt_axis(t, "tokens", 256), seqs = tt_axis(t, "seqs", 8);
    in.ids = tt_input(t, "ids", TT_I32, rows, 1);
    in.positions = tt_input(t, "positions", TT_I32, rows, 1);
    in.types = tt_input(t, "types", TT_I32, rows, 1);
    in.seq_start = tt_seq_start(t, "starts", seqs);
    in.first = tt_input(t, "first", TT_I32, seqs, 1);
    tt_value labels = tt_input(t, "labels", TT_I32, seqs, 1);
    tt_value loss = tt_cross_entropy(t, tt_bert_logits(&m, t, &in), labels, NULL);
    now[RECORD] = tt__seconds() - begin;
    if (!verify) now[FORWARD] = compile(ctx, t, loss, false, &forward, NULL);
    now[verify ? VERIFIED : TRAIN] = compile(ctx, t, loss, true, &best->instructions, NULL);
    for (int k = 0; k < PHASES; k++)
        if (now[k] > 0 && (best->seconds[k] == 0 || now[k] < best->seconds[k])) best->seconds[k] = now[k];
    tt_tape_free(t);
    tt_bert_free(&m);
}

/* ------------------------------------------------------------------------------------------------- shapes */

/* Returns a new parameter of shape (rows, cols) with a unique name. */
static tt_param *parameter(tt_tape *t, int64_t rows, int64_t cols)
{
    char name[32];
    const tt_init init = {TT_INIT_NORMAL, 1};
    const int64_t dims[] = {rows, cols};
    snprintf(name, sizeof name, "p.%d", t->ctx->n_params);
    return tt_param_new(t->ctx, name, 2, dims, init);
}

static tt_value linear(tt_tape *t, tt_value x, tt_param *w) { return tt_linear(t, x, w, NULL); }

/* Records n layers, each with its own parameter. */
static tt_value parameters(tt_tape *t, tt_value x, int n)
{
    for (int k = 0; k < n; k++) x = linear(t, x, parameter(t, 4, 4));
    return x;
}

/* Records n layers, and returns only 8 rows of the last layer. */
static tt_value gathered(tt_tape *t, tt_value x, int n)
{
    tt_param *w = parameter(t, 4, 4);
    for (int k = 0; k < n; k++) x = tt_gelu(t, linear(t, x, w));
    return tt_gather_rows(t, x, tt_input(t, "rows", TT_I32, 8, 1));
}

/* Records n branches op by op, each op for all branches, and returns their sum. */
static tt_value branches(tt_tape *t, tt_value x, int n)
{
    tt_param *w = parameter(t, 4, 4);
    tt_value *v = (tt_value *)malloc(sizeof *v * (size_t)n);
    for (int k = 0; k < n; k++) v[k] = linear(t, x, w);
    for (int k = 0; k < n; k++) v[k] = tt_dropout(t, tt_gelu(t, v[k]), 0.1f);
    for (int k = 0; k < n; k++) v[k] = linear(t, v[k], w);
    for (int k = 1; k < n; k++) v[0] = tt_add(t, v[0], v[k]);
    x = v[0];
    free(v);
    return x;
}

/* Records n layers, then n layers that add the outputs of the first n, the last output first. */
static tt_value skips(tt_tape *t, tt_value x, int n)
{
    tt_param *w = parameter(t, 4, 4);
    tt_value *v = (tt_value *)malloc(sizeof *v * (size_t)n);
    for (int k = 0; k < n; k++) v[k] = x = tt_gelu(t, linear(t, x, w));
    for (int k = n - 1; k >= 0; k--) x = tt_gelu(t, tt_add(t, linear(t, x, w), v[k]));
    free(v);
    return x;
}

/* Records n layers of many widths. */
static tt_value widths(tt_tape *t, tt_value x, int n)
{
    for (int k = 0, width = 4, next; k < n; k++, width = next) {
        next = k == n - 1 ? 4 : 1 + (k * 167 + 13) % 251;
        x = linear(t, x, parameter(t, next, width));
    }
    return x;
}

static void measure_shapes(int rounds)
{
    static const struct {
        const char *name;
        tt_value (*record)(tt_tape *t, tt_value x, int n);
        int n;
    } shape[] = {
        {"parameters", parameters, 2000}, {"gathered", gathered, 2000}, {"branches", branches, 1000},
        {"skips", skips, 1000}, {"widths", widths, 2000},
    };
    for (int k = 0; k < 3 * TT__COUNT(shape); k++) {
        double compiling = 0, report = 0;
        int instructions = 0;
        tt_context *ctx = bench_reopen();
        tt_tape *t = tt_tape_new(ctx);
        tt_value y = shape[k / 3].record(t, tt_input(t, "x", TT_F32, 64, 4), shape[k / 3].n << k % 3);
        tt_value target = tt_input(t, "y", TT_F32, t->values[y.id].shape.rows, 4), none = {0};
        tt_value loss = tt_mean_squared_error(t, y, target, none);
        for (int round = 0; round < rounds; round++) {
            double seconds = compile(ctx, t, loss, true, &instructions, &report);
            if (round == 0 || seconds < compiling) compiling = seconds;
        }
        char name[96];
        snprintf(name, sizeof name, "%s, %d instructions, compiling", shape[k / 3].name, instructions);
        bench_row(name, 1e3 * compiling, "ms", 0);
        snprintf(name, sizeof name, "%s, %d instructions, plan as text", shape[k / 3].name, instructions);
        bench_row(name, 1e3 * report, "ms", 0);
        tt_tape_free(t);
    }
}

int main(int argc, char **argv)
{
    int layers = 0, rounds = 3;
    bool shapes = false;
    const bench_flag flags[] = {
        {"--layers", &layers, NULL, NULL,
         "number of layers (without it: programs of 3,500 and 55,000 instructions)"},
        {"--rounds", &rounds, NULL, NULL, "how often each program is measured"},
        {"--shapes", NULL, NULL, &shapes, "programs of other shapes instead"},
    };
    const int some[] = {55, 873};
    bench_open(argc, argv, flags, TT__COUNT(flags));
    if (shapes) measure_shapes(rounds);
    for (int k = 0; k < (shapes ? 0 : layers ? 1 : TT__COUNT(some)); k++) {
        phases best;
        memset(&best, 0, sizeof best);
        for (int round = 0; round < 2 * rounds; round++) measure(layers ? layers : some[k], round % 2, &best);
        for (int phase = 0; phase < PHASES; phase++) {
            char name[96];
            snprintf(name, sizeof name, "%d instructions, %s", best.instructions, phase_names[phase]);
            bench_row(name, 1e3 * best.seconds[phase], "ms", 0);
        }
    }
    bench_close();
    return 0;
}
