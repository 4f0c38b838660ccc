/* Times training steps of a vision transformer on the ranks of several processes, and prints the plan's
   forecast. bench/machines.py makes several machines out of network namespaces, with a network of the speed
   --mbit and the delay --delay, and starts one process on each machine. The costs of computation are measured
   here, on one rank. The costs of the network come from the flags alone: a link of --mbit in each direction,
   and 2 * --delay for a barrier, at which ranks ask and answer. Rows: the median of the seconds of a step,
   with the forecast; the bytes that a process sends, with the smallest number that the strategy allows; and a
   hash of the bits of all parameters, which must equal the hash of as many ranks in one process. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* setenv */
#endif
#include "bench.h"

static struct {
    const char *size;
    int ranks, batch, zero, steps, mbit, delay;
} opt = {"S/16", 1, 16, 1, 3, 100, 1000};

/* Measures the costs of computation on this process's machine, apart from the other processes. */
static tt_costs measured_costs(void)
{
    tt_costs c = tt_costs_default();
    setenv("TINYTRAIN_ALONE", "1", 1);
    tt_context *ctx = tt_open(&bench.options);
    if (!ctx || tt_measure_costs(ctx, "cpu", &c) != TT_OK)
        bench_die("%s", ctx ? tt_error(ctx) : "out of memory");
    tt_close(ctx);
    unsetenv("TINYTRAIN_ALONE");
    c.between_ranks = 1e6 / 8 * opt.mbit;
    c.barrier = 2e-6 * opt.delay;
    return c;
}

/* Returns the FNV-1a hash of the numbers of all parameters. */
static uint32_t hash_of(tt_context *ctx)
{
    uint32_t hash = 2166136261u;
    for (int k = 0; k < ctx->n_params; k++) {
        const tt_param *p = ctx->params[k];
        float *x = (float *)malloc(sizeof *x * (size_t)p->size);
        if (!x || tt_param_get(p, x) != TT_OK) bench_die("%s", x ? tt_error(ctx) : "out of memory");
        for (size_t b = 0; b < sizeof *x * (size_t)p->size; b++)
            hash = (hash ^ ((const unsigned char *)x)[b]) * 16777619u;
        free(x);
    }
    return hash;
}

int main(int argc, char **argv)
{
    const bench_flag flags[] = {
        {"--vit", NULL, &opt.size, NULL, "SIZE: Ti/16, S/16, B/16, L/16 or H/14"},
        {"--ranks", &opt.ranks, NULL, NULL, "number of ranks of each process"},
        {"--batch", &opt.batch, NULL, NULL, "images on each rank"},
        {"--zero", &opt.zero, NULL, NULL, "ZeRO, 1 to 3"},
        {"--steps", &opt.steps, NULL, NULL, "measured steps, after one that is not measured"},
        {"--mbit", &opt.mbit, NULL, NULL, "speed of each machine's link in each direction, in Mbit/s"},
        {"--delay", &opt.delay, NULL, NULL, "delay between two machines, in microseconds"},
    };
    char device[32], name[64];
    tt_vit m;
    tt_batch b;
    bench_open(argc, argv, flags, TT__COUNT(flags));
    const tt_costs costs = measured_costs();
    /* a context whose kernels are not timed, because ranks run at the same time */
    tt_context *ctx = tt_open(&bench.options);
    if (!ctx) bench_die("cannot open a context: the message above says why");
    if (tt_process(ctx) && !freopen("/dev/null", "w", stdout))
        bench_die("cannot write to /dev/null: %s", strerror(errno));
    const int ranks = opt.ranks * tt_processes(ctx);
    tt_vit_config c = tt_vit_config_default(opt.size);
    tt_train_options o = tt_train_options_default();
    c.classes = 10;
    snprintf(device, sizeof device, "cpu*%d", opt.ranks);
    o.schedule.kind = TT_CONSTANT;
    o.compile.precision = bench.precision;
    o.compile.device = device;
    o.compile.costs = &costs;
    o.max_seqs = opt.batch;
    o.compile.parallel.zero = opt.zero;
    o.compile.parallel.groups = ranks;
    if (tt_vit_new(ctx, &m, &c) != TT_OK) bench_die("%s", tt_error(ctx));
    const tt_model model = tt_vit_classifier(&m);
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) bench_die("%s", tt_error(ctx));
    const tt_plan plan = tt_program_plan(tt_trainer_program(t));

    const size_t image = (size_t)c.image_size * (size_t)c.image_size * (size_t)c.channels;
    uint8_t *pixels = (uint8_t *)malloc(image * (size_t)opt.batch);
    int32_t *labels = (int32_t *)malloc(sizeof *labels * (size_t)opt.batch);
    double *seconds = (double *)calloc((size_t)opt.steps, sizeof *seconds);
    if (!pixels || !labels || !seconds) bench_die("out of memory");
    memset(&b, 0, sizeof b);
    b.seqs = opt.batch;
    b.pixels = pixels;
    b.image_bytes = (int64_t)image;
    b.labels = labels;
    uint32_t random = 1;
    for (int step = -1; step < opt.steps; step++) {
        double took = 0;
        for (int k = 0; k < ranks; k++) {
            for (size_t p = 0; p < image * (size_t)opt.batch; p++) {
                random = random * 1664525u + 1013904223u;
                pixels[p] = (uint8_t)(random >> 24);
            }
            for (int n = 0; n < opt.batch; n++) labels[n] = (n + k + step + 1) % c.classes;
            b.last_of_step = k + 1 == ranks;
            const double now = tt__seconds();
            if (tt_train_batch(t, &b, NULL, NULL) != TT_OK) bench_die("%s", tt_error(ctx));
            took += tt__seconds() - now;
        }
        if (step >= 0) seconds[step] = took;
    }
    qsort(seconds, (size_t)opt.steps, sizeof *seconds, bench_ascending);
    const double forecast = plan.compute_seconds + plan.exposed_seconds;
    bench_row("forecast: computation", plan.compute_seconds, "s", 0);
    bench_row("forecast: what it waits for the network", plan.exposed_seconds, "s", 0);
    bench_peer_row("a step, beside the forecast", seconds[opt.steps / 2], "s", 0, forecast);
    if (plan.sent_bytes)
        bench_peer_row("sent by a process, beside the least", (double)plan.sent_bytes / 1e6, "MB", 0,
                       (double)plan.min_sent_bytes / 1e6);
    const uint32_t hash = hash_of(ctx); /* all processes take part: they gather the parameters */
    snprintf(name, sizeof name, "hash %08x of so many parameters", hash);
    bench_row(name, ctx->n_params, "", 0);
    free(pixels);
    free(labels);
    free(seconds);
    tt_trainer_free(t);
    tt_vit_free(&m);
    tt_close(ctx);
    bench_close();
    return 0;
}
