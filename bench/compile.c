/* Seconds from a model to a program that can run: making the parameters of a BERT of many small layers,
   recording it, and tt_compile of it (differentiation, passes, lifetimes, placement): forward only, for
   training, and for training with the verifier after each pass. Nothing is allocated, and nothing runs. A
   figure is the best of --rounds. */

#include "bench.h"

enum { PARAMETERS, RECORD, FORWARD, TRAIN, VERIFIED, PHASES };
static const char *const phase_names[PHASES] = {
    "parameters", "recording", "compiling, forward only", "compiling, training",
    "compiling, training, verified"};
typedef struct phases { double seconds[PHASES]; int instructions; } phases;

static double compile(tt_context *ctx, tt_tape *t, tt_value loss, bool train, int *instructions)
{
    tt_compile_options o = tt_compile_options_default();
    o.train = train;
    o.precision = bench.precision;
    o.optimizer.clip_norm = 1;
    double begin = tt__seconds();
    tt_program *p = tt_compile(t, loss, &o);
    double seconds = tt__seconds() - begin;
    if (!p) bench_die("%s", tt_error(ctx));
    *instructions = tt_program_plan(p).instructions;
    tt_program_free(p);
    return seconds;
}

/* Adds to `best` what is faster. */
static void measure(int layers, bool verify, phases *best)
{
    tt_bert m;
    tt_inputs in;
    double now[PHASES] = {0};
    int forward;
    tt_bert_config c = tt_bert_config_default(false);
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
    if (!verify) now[FORWARD] = compile(ctx, t, loss, false, &forward);
    now[verify ? VERIFIED : TRAIN] = compile(ctx, t, loss, true, &best->instructions);
    for (int k = 0; k < PHASES; k++)
        if (now[k] > 0 && (best->seconds[k] == 0 || now[k] < best->seconds[k])) best->seconds[k] = now[k];
    tt_tape_free(t);
    tt_bert_free(&m);
}

int main(int argc, char **argv)
{
    int layers = 0, rounds = 3;
    const bench_flag flags[] = {
        {"--layers", &layers, NULL, NULL, "of the model (without it: 3,500 and 55,000 instructions)"},
        {"--rounds", &rounds, NULL, NULL, "how often each is measured"},
    };
    const int some[] = {55, 873};
    bench_open(argc, argv, flags, TT__COUNT(flags));
    for (int k = 0; k < (layers ? 1 : TT__COUNT(some)); k++) {
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
