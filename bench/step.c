/* A whole training step of DistilBERT-base (66 million parameters, random weights and tokens, AdamW, dropout as in its config):
   tokens/s, GFLOP/s against the peak, seconds by op, and the plan's bytes against what the process grew by. */

#include "bench.h"

#include <sys/resource.h>

static double resident_peak(void) /* bytes; ru_maxrss is in KiB on Linux, in bytes on macOS */
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
#if defined(__APPLE__)
    return (double)u.ru_maxrss;
#else
    return 1024.0 * (double)u.ru_maxrss;
#endif
}

int main(int argc, char **argv)
{
    int seqs = 16, length = 128, layers = 6, steps = 5;
    const bench_flag flags[] = {{"--seqs", &seqs, "sequences in a step"}, {"--length", &length, "tokens of each, up to 512"},
                                {"--layers", &layers, "layers of the model"}, {"--steps", &steps, "steps measured, after one that is not"}};
    tt_context *ctx = bench_open(argc, argv, flags, TT__COUNT(flags));
    tt_bert_config c = tt_bert_config_default(true);
    tt_bert m;
    tt_stats s;
    tt_batch b;
    char name[128];
    uint32_t random = 1;
    bool updated;
    int rows = seqs * length;
    int32_t *memory = (int32_t *)malloc((size_t)(3 * rows + 2 * seqs + 1) * sizeof *memory);
    int32_t *ids = memory, *positions = ids + rows, *types = positions + rows, *starts = types + rows, *labels = starts + seqs + 1;
    if (!memory) bench_die("no memory");
    for (int r = 0; r < rows; r++) {
        random = random * 1664525u + 1013904223u;
        ids[r] = (int32_t)(random >> 8) % c.vocab_size;
        positions[r] = r % length;
        types[r] = 0;
    }
    for (int k = 0; k <= seqs; k++) starts[k] = k * length;
    for (int k = 0; k < seqs; k++) labels[k] = k % 2;
    memset(&b, 0, sizeof b);
    b.seqs = seqs;
    b.rows = rows;
    b.ids = ids;
    b.positions = positions;
    b.types = types;
    b.seq_start = starts;
    b.labels = labels;
    b.last_of_step = true;

    double before = resident_peak();
    c.layers = layers;
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.precision = bench.precision;
    o.max_seqs = seqs;
    o.max_tokens = rows;
    if (tt_bert_new(ctx, &m, &c) != TT_OK) bench_die(tt_error(ctx));
    tt_model model = tt_bert_classifier(&m);
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) bench_die(tt_error(ctx));

    double seconds = 0, best = 0, by_op[TT__OP_COUNT] = {0}, flops[TT__OP_COUNT] = {0};
    for (int step = 0; step <= steps; step++) {
        bench_begin_run();
        double begin = tt__seconds();
        if (tt_train_batch(t, &b, &s, &updated) != TT_OK) bench_die(tt_error(ctx));
        double took = tt__seconds() - begin;
        if (step == 0) continue;
        seconds += took;
        if (best == 0 || took < best) best = took;
        for (int op = 0; op < TT__OP_COUNT; op++) { by_op[op] += bench.seconds[op]; flops[op] += bench.flops[op]; }
    }
    double grown = resident_peak() - before, plan = (double)tt_program_plan(tt_trainer_program(t)).bytes;
    bench_row("tokens a second, mean", rows * steps / seconds, "tokens/s", 0);
    bench_row("tokens a second, best step", rows / best, "tokens/s", 0);
    bench_flops_row("matmuls and attention, whole step, mean", s.flops * steps / seconds);
    bench_row("planned memory", plan / 1e6, "MB", 0);
    bench_row("resident memory grew by", grown / 1e6, "MB", 0);
    for (int op = 0; op < TT__OP_COUNT; op++) {
        if (by_op[op] == 0) continue;
        snprintf(name, sizeof name, "%s, time of a step", tt__row(op)->name);
        bench_row(name, 1e3 * by_op[op] / steps, "ms", 0);
        if (flops[op] == 0) continue;
        snprintf(name, sizeof name, "%s", tt__row(op)->name);
        bench_flops_row(name, flops[op] / by_op[op]);
    }
    tt_trainer_free(t);
    tt_bert_free(&m);
    tt_close(ctx);
    free(memory);
    return 0;
}
