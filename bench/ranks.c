/* Several ranks, in eight parts (--only names one):

   moved   Bytes that a rank loads from other ranks' memory in a training step, with the least that its
           strategy needs (tt_plan.moved_bytes and .min_moved_bytes), by plans for --ranks CUDA devices.
           Also the memory of ViT-L/16 in fp32, Adam, on 64 images on each of 4 ranks, ZeRO 3, blocks
           recomputed.
   reduce  An all-reduce between N ranks on the CPU (--cpu-ranks N) with one thread each, and memcpy by the
           same threads at the same time, each on its own memory. The rates of the all-reduce and of memcpy
           count the bytes that a rank reads and writes, as the program sees them. In the all-reduce, each of
           `n` ranks with `B` bytes reads `n` slices of `B / n` bytes and writes one slice. Then the rank
           reads and writes the other `n - 1` slices. Together: `(n + 1) B / n + 2 (n - 1) B / n`. A memcpy of
           `B` bytes reads `B` and writes `B` bytes. The time lasts from one barrier of all ranks to the next,
           and includes the waits of ranks for one another.
   step    Training steps of DistilBERT-base, --seqs x --length tokens, AdamW, on N ranks (--cpu-ranks N) with
           one thread each, and N threads of one rank: one step of each in turn.
   replay  The time of a step on GPUs by its plan, without a GPU, and how long computation waits in it for
           links. An instruction takes as long as its FLOPs or its bytes take, whichever is longer; a group of
           collectives takes --latency, plus the time that the link needs for the bytes of the rank that loads
           most. Instructions run one after the other, except for what the plan lets run on other streams
           until a WAIT. The rates of three machines are presets; --flops, --memory and --link replace the
           rates of all three machines.
   offload A replay on one GPU of each of two of these machines, with a link of 50 or of 25 GB/s to the host's
           memory in each direction: ViT-L/16 on 64 images with the optimizer state on the host, by
           precision and by when parameters are updated; then other models with more of the step on the host.
           Each program is planned for the rates with which it is replayed. The peer of a row is the time
           that computation must wait at least, in any order of copies. This time is the larger of two
           numbers: the time of all copies to the device, less the computation before the last instruction
           that waits for a copy to the device; and the time of all copies to the host, less the computation
           after the first instruction whose result is copied to the host. No copy lasts into the next step.

   stages  Steps of pipelines, replayed action by action: the forward and the backward of each stage take the
           time of their plans. A transfer begins when its two stages are ready. The end of the step, with the
           update, begins when all stages are ready. This part prints the share of a step in which stages
           wait, beside `(S - 1) / (M + S - 1)` for S stages and M micro-batches: the share if all stages take
           equally long and transfers take no time. This part also prints the memory of the stage that needs
           most.
   share   A table of the cost and the memory of each way to share a step among 8 H200s: the same 512 images
           of ViT-L/16, or 16 texts of 2048 tokens for a language model with 7 billion parameters.
   devices The step of that language model on 8 to 1024 H200s in machines of 8, with a link of 100 or of 400
           Gbit/s from each GPU to the other machines (one adapter a GPU, as NVIDIA's DGX H200 has): 4 stages
           of 2 data ranks in a machine, 2 texts in each of 8 micro-batches. All transfers at a step's end use
           the slower link, with the bytes that each data rank loads: assumed, as no plan has more than 64
           ranks.

   Rates of the presets: an H200 multiplies bf16 at 989 TFLOP/s, dense, and moves 4800 GB/s, an A10 multiplies
   at 125 TFLOP/s and moves 600 GB/s (NVIDIA's data sheets); kernels should reach 60% and 85% of these
   (bench/results/NOTES.md). A link moves 300 GB/s (NVLink of an H200, which has 450 in each direction), 20
   (PCIe 4.0 x 16, of 32) or 9 (PCIe through the host's memory, where all bytes are copied twice):
   assumptions, like the latency. */

#include "bench.h"

static struct {
    const char *only;
    int ranks, cpu_ranks, elements, seqs, length, layers, steps, latency, flops, memory, link;
} opt = {NULL, 8, 2, 1 << 25, 8, 256, 0, 5, 25, 0, 0, 0};

/* ------------------------------------------------------------------------------------------------- plans */

typedef struct strategy {
    const char *name;
    int zero, tensor;
    bool server;
    const char *offload;
    bool early; /* whether `update` is "backward" */
    int pipeline;
    const char *schedule;
    int micros; /* micro-batches of a step on a data rank; 0: one */
    bool sequence;
} strategy;

/* A strategy with one stage and one micro-batch a step. */
#define STRATEGY(name, zero, tensor, server, offload) \
    {name, zero, tensor, server, offload, false, 1, NULL, 0, false}

static const strategy strategies[] = {
    STRATEGY("zero 0", 0, 1, false, NULL), STRATEGY("zero 1", 1, 1, false, NULL),
    STRATEGY("zero 2", 2, 1, false, NULL), STRATEGY("zero 3", 3, 1, false, NULL),
    STRATEGY("server", 0, 1, true, NULL),  STRATEGY("tensor 2", 1, 2, false, NULL)};

enum { DISTILBERT, VIT, DECODER, MODELS, SEVEN = MODELS };
static const char *const model_names[] = {"DistilBERT, 16 x 512", "ViT-L/16, 64 images", "6B, 2 x 2048",
                                          "7B, 2 x 2048"};

/* A program that is planned and never run, with the objects that it needs. */
typedef struct planned {
    tt_bert bert;
    tt_vit vit;
    tt_trainer *trainer;
    tt_tape *tape;
    tt_program *own;
    const tt_program *p;
} planned;

static tt_parallel parallel_of(const strategy *s)
{
    tt_parallel how = tt_parallel_default();
    how.zero = s->zero;
    how.tensor = s->tensor;
    how.server = s->server;
    how.pipeline = s->pipeline;
    how.schedule = s->schedule;
    how.micros = s->micros;
    how.sequence = s->sequence;
    return how;
}

static void plan_decoder(tt_context *ctx, planned *to, int kind, const tt_compile_options *o)
{
    const bench_decoder_shape seven = {32, 4096, 11008, 32, 32000, true, false};
    tt_value loss;
    if (kind == DECODER) to->tape = bench_decoder(ctx, 2, 2048, &loss);
    else {
        to->tape = tt_tape_new(ctx);
        if (!to->tape) bench_die("%s", tt_error(ctx));
        loss = bench_record_decoder(ctx, to->tape, &seven, 2, 2048);
    }
    to->p = to->own = tt_compile(to->tape, loss, o);
    if (!to->p) bench_die("%s", tt_error(ctx));
}

static void plan(tt_context *ctx, planned *to, int kind, const char *device, const char *precision,
                 const char *recompute, const strategy *s, const tt_costs *costs)
{
    tt_vit_config v = tt_vit_config_default("L/16");
    tt_bert_config b = tt_bert_config_default(TT_DISTILBERT);
    tt_train_options o = tt_train_options_default();
    tt_compile_options c = tt_compile_options_default();
    memset(to, 0, sizeof *to);
    v.classes = 10;
    o.schedule.kind = TT_CONSTANT;
    o.compile.optimizer.kind = c.optimizer.kind = TT_ADAM;
    o.compile.precision = c.precision = precision;
    o.compile.recompute = c.recompute = recompute;
    o.compile.device = c.device = device;
    o.compile.parallel = c.parallel = parallel_of(s);
    o.compile.offload = c.offload = s->offload;
    o.compile.update = c.update = s->early ? "backward" : "end";
    if (s->early) o.compile.optimizer.clip_norm = 0;
    o.compile.costs = c.costs = costs;
    o.compile.accumulate = c.accumulate = s->micros > 1;
    o.max_seqs = kind == VIT ? 64 : 16;
    o.max_tokens = 16 * 512;
    if (kind >= DECODER) { plan_decoder(ctx, to, kind, &c); return; }
    if ((kind == VIT ? tt_vit_new(ctx, &to->vit, &v) : tt_bert_new(ctx, &to->bert, &b)) != TT_OK)
        bench_die("%s", tt_error(ctx));
    tt_model m = kind == VIT ? tt_vit_classifier(&to->vit) : tt_bert_model(&to->bert);
    to->trainer = tt_trainer_new(ctx, &m, &o);
    if (!to->trainer) bench_die("%s", tt_error(ctx));
    to->p = tt_trainer_program(to->trainer);
}

static void forget(planned *x)
{
    tt_trainer_free(x->trainer);
    tt_program_free(x->own);
    tt_tape_free(x->tape);
    tt_bert_free(&x->bert);
    tt_vit_free(&x->vit);
}

static void moved(void)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed"};
    char device[32], name[128];
    snprintf(device, sizeof device, "cuda*%d", opt.ranks);
    for (int k = 0; k < 2 * DECODER; k++) /* k: both models, each in both precisions */
        for (int s = 0; s < TT__COUNT(strategies); s++) {
            planned x;
            if (opt.ranks % strategies[s].tensor) continue;
            plan(bench_reopen(), &x, k / 2, device, precisions[k % 2], "cheap", &strategies[s], NULL);
            const tt_plan p = tt_program_plan(x.p);
            snprintf(name, sizeof name, "%s, %s, %s", model_names[k / 2], precisions[k % 2],
                     strategies[s].name);
            bench_peer_row(name, (double)p.moved_bytes / 1e9, "GB", 0, (double)p.min_moved_bytes / 1e9);
            forget(&x);
        }
    planned x;
    plan(bench_reopen(), &x, VIT, "cuda*4", "32-true", "blocks", &strategies[3], NULL);
    const tt_plan p = tt_program_plan(x.p);
    bench_row("memory: ViT-L/16, 4 ranks, zero 3, blocks", (double)p.bytes / 1e9, "GB", 0);
    for (int c = 0; c < TT_MEM_CATEGORIES && !bench.json; c++)
        if (p.at_peak[c])
            printf("  of it at the peak, %-29s %10.4g GB\n", tt_category_name((tt_category)c),
                   (double)p.at_peak[c] / 1e9);
    forget(&x);
}

/* -------------------------------------------------------------------------------------------- all-reduce */

typedef struct reduction {
    tt__device_group *group;
    /* by rank: x is summed in place; copy receives a memcpy of equal size */
    tt__mat x[TT__RANKS], copy[TT__RANKS];
    double reduce, copied;                 /* least seconds so far of an all-reduce, and of a memcpy */
    bool go_on;
} reduction;

/* Runs all-reduces and copies in turn, until the first rank decides that it has measured enough. */
static tt_status reduce_often(void *arg, int rank)
{
    reduction *job = (reduction *)arg;
    const tt__members all = {0, 1, job->group->ranks};
    const double begin = tt__seconds();
    tt__instr i = tt__new_instr(TT__OP_ALL_REDUCE);
    tt__launch l;
    char workspace[64];
    bool ok = true;
    memset(&l, 0, sizeof l);
    i.move.over = TT__OVER_DATA;
    i.move.unit = TT__SLICE;
    l.device = job->group->device[rank];
    l.instr = &i;
    l.in[0] = l.out[0] = job->x[rank];
    l.members = l.present = all.count;
    l.me = rank;
    l.peer_in = l.peer_out = job->x;
    l.workspace = workspace;
    for (int run = 0; ok && job->go_on; run++) {
        double at[3];
        const size_t bytes = (size_t)job->x[rank].cols * tt_dtype_bytes(job->x[rank].dtype);
        ok = tt__barrier(job->group->rank_group, rank, all);
        at[0] = tt__seconds();
        for (int phase = TT__REDUCE_PHASE; phase <= TT__SPREAD_PHASE && ok; phase++) {
            l.phase = phase;
            ok = tt__cpu_backend.launch(&l, 1) == TT_OK && tt__barrier(job->group->rank_group, rank, all);
        }
        at[1] = tt__seconds();
        memcpy(job->copy[rank].data, job->x[rank].data, bytes);
        ok = ok && tt__barrier(job->group->rank_group, rank, all);
        at[2] = tt__seconds();
        if (rank == 0) {
            job->reduce = fmin(job->reduce, at[1] - at[0]);
            job->copied = fmin(job->copied, at[2] - at[1]);
            job->go_on = run < 4 || at[2] - begin < bench.min;
        }
        ok = ok && tt__barrier(job->group->rank_group, rank, all); /* then all ranks know what rank 0
                                                                      decided */
    }
    return ok ? TT_OK : TT_ERR_DEVICE;
}

/* Opens a context whose kernels are not timed, since ranks run at the same time. */
static tt_context *open_untimed(int threads)
{
    tt_context_options o = bench.options;
    o.threads = threads;
    tt_context *ctx = tt_open(&o);
    if (!ctx) bench_die("cannot open a context: the message above says why");
    return ctx;
}

static void reduce(void)
{
    static const tt_dtype dtypes[] = {TT_F32, TT_BF16};
    static const int divisors[] = {1, 16, 256};
    const int n = opt.cpu_ranks;
    tt_context *ctx = open_untimed(n);
    char device[32], name[128];
    snprintf(device, sizeof device, "cpu*%d", n);
    if (n > TT__RANKS) bench_die("--cpu-ranks is %d, but must be at most %d", n, TT__RANKS);
    if (n < 2) bench_die("--cpu-ranks is %d, but must be at least 2", n);
    tt__device_group *group = tt__find_devices(ctx, device);
    if (!group || tt__device_group_open(ctx, group) != TT_OK) bench_die("%s", tt_error(ctx));
    for (int k = 0; k < TT__COUNT(dtypes) * TT__COUNT(divisors); k++) {
        const tt_dtype dtype = dtypes[k / TT__COUNT(divisors)];
        const int64_t elements = tt__max(1, opt.elements / divisors[k % TT__COUNT(divisors)]);
        const double bytes = (double)elements * (double)tt_dtype_bytes(dtype);
        reduction job = {group, {{NULL, dtype, 0, 0, 0}}, {{NULL, dtype, 0, 0, 0}}, INFINITY, INFINITY, true};
        for (int r = 0; r < n; r++) {
            tt__mat m = {tt__calloc(ctx, (size_t)bytes), dtype, 1, elements, elements};
            job.x[r] = m;
            m.data = tt__calloc(ctx, (size_t)bytes);
            job.copy[r] = m;
            if (!job.x[r].data || !job.copy[r].data) bench_die("%s", tt_error(ctx));
        }
        if (tt__on_ranks(ctx, group, reduce_often, &job) != TT_OK) bench_die("%s", tt_error(ctx));
        snprintf(name, sizeof name, "all-reduce, %d ranks, %.3g MB of %s", n, bytes / 1e6,
                 tt_dtype_name(dtype));
        bench_peer_row(name, bytes * ((n + 1.0) / n + 2 * (n - 1.0) / n) / job.reduce / 1e9, "GB/s", 0,
                       2 * bytes / job.copied / 1e9);
        for (int r = 0; r < n; r++) {
            tt__free(ctx, job.x[r].data);
            tt__free(ctx, job.copy[r].data);
        }
    }
    tt_close(ctx);
}

/* -------------------------------------------------------------------------------------------------- steps */

typedef struct side {
    tt_context *ctx;
    tt_bert m;
    tt_trainer *t;
    bench_batches all;  /* a micro-batch for each data rank */
    double *seconds;    /* seconds of each step */
} side;

static void open_side(side *s, const char *device, int threads, int micros)
{
    tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
    tt_train_options o = tt_train_options_default();
    memset(s, 0, sizeof *s);
    if (opt.layers) c.layers = opt.layers;
    if (opt.length > c.max_positions)
        bench_die("--length is %d, but the model has only %d positions", opt.length, c.max_positions);
    if (opt.seqs % micros)
        bench_die("--seqs is %d, but must be a multiple of --cpu-ranks, %d", opt.seqs, micros);
    s->ctx = open_untimed(threads);
    for (int k = 0; k < micros; k++) {
        bench_random_batch(&s->all, opt.seqs / micros, opt.length, c.vocab_size);
        s->all.batch[k].last_of_step = k + 1 == micros;
    }
    o.schedule.kind = TT_CONSTANT;
    o.compile.precision = bench.precision;
    o.compile.device = device;
    o.max_seqs = s->all.max_seqs;
    o.max_tokens = s->all.max_rows;
    if (tt_bert_new(s->ctx, &s->m, &c) != TT_OK) bench_die("%s", tt_error(s->ctx));
    tt_model model = tt_bert_model(&s->m);
    s->t = tt_trainer_new(s->ctx, &model, &o);
    s->seconds = (double *)calloc((size_t)opt.steps, sizeof *s->seconds);
    if (!s->t || !s->seconds) bench_die("%s", tt_error(s->ctx));
}

static void run_step(side *s, double *seconds)
{
    const double begin = tt__seconds();
    for (int k = 0; k < s->all.n; k++)
        if (tt_train_batch(s->t, &s->all.batch[k], NULL, NULL) != TT_OK) bench_die("%s", tt_error(s->ctx));
    *seconds = tt__seconds() - begin;
}

static void close_side(side *s)
{
    tt_trainer_free(s->t);
    tt_bert_free(&s->m);
    tt_close(s->ctx);
    bench_free_batches(&s->all);
    free(s->seconds);
}

static void steps(void)
{
    const int n = opt.cpu_ranks;
    const double tokens = (double)opt.seqs * opt.length;
    char device[32], name[128];
    side ranks, one;
    double warm;
    snprintf(device, sizeof device, "cpu*%d", n);
    open_side(&ranks, device, n, n);
    open_side(&one, "cpu", n, 1);
    run_step(&one, &warm);
    run_step(&ranks, &warm);
    double *ratio = (double *)calloc((size_t)opt.steps, sizeof *ratio);
    if (!ratio) bench_die("out of memory");
    for (int k = 0; k < opt.steps; k++) {
        run_step(&one, &one.seconds[k]);
        run_step(&ranks, &ranks.seconds[k]);
        ratio[k] = one.seconds[k] / ranks.seconds[k];
    }
    qsort(ratio, (size_t)opt.steps, sizeof *ratio, bench_ascending);
    qsort(one.seconds, (size_t)opt.steps, sizeof *one.seconds, bench_ascending);
    qsort(ranks.seconds, (size_t)opt.steps, sizeof *ranks.seconds, bench_ascending);
    snprintf(name, sizeof name, "DistilBERT, %d x %d, %s: best step", opt.seqs, opt.length, device);
    bench_peer_row(name, tokens / ranks.seconds[0], "tokens/s", 0, tokens / one.seconds[0]);
    snprintf(name, sizeof name, "DistilBERT, %d x %d, %s: median ratio", opt.seqs, opt.length, device);
    bench_row(name, ratio[opt.steps / 2], "times", 0);
    free(ratio);
    close_side(&ranks);
    close_side(&one);
}

/* ------------------------------------------------------------------------------------------------- replay */

/* flops: FLOP/s; memory, link: bytes a second */
typedef struct machine { const char *name, *device; double flops, memory, link; } machine;
static const machine machines[] = {
    {"8 H200, NVLink", "cuda*8", 0.60 * 989e12, 0.85 * 4800e9, 300e9},
    {"4 A10, PCIe", "cuda*4", 0.60 * 125e12, 0.85 * 600e9, 20e9},
    {"4 A10, staged", "cuda*4", 0.60 * 125e12, 0.85 * 600e9, 9e9},
};

/* Returns the machine's rates, with a link to the host of `link` bytes a second. */
static tt_costs costs_of(const machine *m, double link)
{
    const double on_host = tt_costs_default().update_host;
    const tt_costs c = {m->flops, m->flops / 2, m->flops, m->flops / 2, m->memory, m->memory, m->memory,
                        m->memory, on_host, m->memory, link, link, m->link, 0, 1e-6 * opt.latency};
    return c;
}

/* Simulates a step with one micro-batch on each data rank, at the rates `c`. */
static tt__replay replay(const tt_program *p, const tt_costs *c)
{
    tt__replay r;
    if (tt__replay_of(p->built.t, c, &r) != TT_OK) bench_die("out of memory");
    return r;
}

static machine machine_of(int k)
{
    machine m = machines[k];
    if (opt.flops) m.flops = 1e12 * opt.flops;
    if (opt.memory) m.memory = 1e9 * opt.memory;
    if (opt.link) m.link = 1e9 * opt.link;
    return m;
}

/* Returns the seconds by which the links to the host are busy longer than the computation that can overlap
   with the copies. */
static double least_exposed(const tt_program *p, const tt_costs *c, const tt__replay *r)
{
    const tt_tape *t = p->built.t;
    double now = 0, before = 0, first_out = INFINITY;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const bool waits = tt__is(i, TT__WAITS);
        const int stream = tt__stream_beside(t, i);
        if (waits && t->values[i->in[1]].space != t->values[i->in[0]].space &&
            t->values[i->in[0]].space == TT__DEVICE) before = now;
        if (stream == TT__IN_STREAM && !i->stream) before = now;
        if (stream == TT__OUT_STREAM) first_out = fmin(first_out, now);
        if (!stream) now += tt__seconds_of(t, i, c, k == 0 || !i[-1].with_next);
    }
    const double in = r->step.busy[TT__IN_STREAM] - before;
    const double out = r->step.busy[TT__OUT_STREAM] - (now - first_out);
    return fmax(0, fmax(in, isfinite(out) ? out : 0));
}

/* Plans and replays the strategy on each of two machines with each of two links. */
static void offload(const char *name, int model, const char *precision, const strategy *s)
{
    for (int k = 0; k < 4; k++) {
        const machine m = machine_of(k / 2);
        const int link = k % 2 ? 25 : 50;
        const tt_costs c = costs_of(&m, 1e9 * link);
        char text[160];
        planned x;
        plan(bench_reopen(), &x, model, "cuda", precision, model == DECODER ? "blocks" : "cheap", s, &c);
        const tt__replay r = replay(x.p, &c);
        snprintf(text, sizeof text, "%s, %d GB/s: %s", m.name, link, name);
        bench_peer_row(text, 1e3 * r.step.exposed, "ms", 1e3 * (r.step.compute + r.step.exposed),
                       1e3 * least_exposed(x.p, &c, &r));
        forget(&x);
    }
}

static void offloads(void)
{
    static const struct { const char *precision; bool early; } cases[] = {
        {"16-mixed", false}, {"bf16-mixed", true}, {"bf16-true", false}, {"bf16-true", true},
        {"32-true", false}, {"32-true", true}};
    static const strategy how[] = {
        STRATEGY("optimizer", 0, 1, false, "optimizer"), STRATEGY("parameters", 0, 1, false, "parameters"),
        STRATEGY("all three", 0, 1, false, "optimizer,gradients,parameters")};
    char name[128];
    for (int k = 0; k < TT__COUNT(cases); k++) {
        strategy s = how[0];
        s.early = cases[k].early;
        snprintf(name, sizeof name, "%s, updates %s", cases[k].precision,
                 s.early ? "in the backward" : "at the end");
        offload(name, VIT, cases[k].precision, &s);
    }
    for (int k = 0; k < MODELS * TT__COUNT(how); k++) {
        const int model = k / TT__COUNT(how);
        const strategy *s = &how[k % TT__COUNT(how)];
        snprintf(name, sizeof name, "%s, %s", model_names[model], s->name);
        offload(name, model, "bf16-mixed", s);
    }
}

static void replays(void)
{
    char name[128];
    for (int k = 0; k < TT__COUNT(machines) * MODELS; k++)
        for (int s = 0; s < TT__COUNT(strategies); s++) {
            const machine m = machine_of(k / MODELS);
            planned x;
            const char *recompute = k % MODELS == DECODER ? "blocks" : "cheap";
            plan(bench_reopen(), &x, k % MODELS, m.device, "bf16-mixed", recompute, &strategies[s], NULL);
            const tt_costs c = costs_of(&m, m.link);
            const tt__replay r = replay(x.p, &c);
            snprintf(name, sizeof name, "%s: %s, %s", m.name, model_names[k % MODELS], strategies[s].name);
            bench_row(name, 1e3 * r.step.exposed, "ms", 1e3 * (r.step.compute + r.step.exposed));
            forget(&x);
        }
}

/* ------------------------------------------------------------------------------------------------- stages */

/* Returns the instructions of a segment as a tape. */
static tt_tape part_of(const tt_program *q, tt__segment segment)
{
    tt_tape t = *q->built.t;
    const int first = tt__segment_first(q->built.t, segment);
    t.n_code = tt__segment_first(q->built.t, segment + 1u) - first;
    t.code += first;
    return t;
}

/* Returns the seconds of a segment without the transfers from another stage. *taken: seconds of transfers. */
static double segment_seconds(const tt_program *q, tt__segment segment, const tt_costs *c, double *taken)
{
    const tt_tape t = part_of(q, segment);
    tt__replay r;
    *taken = 0;
    if (tt__replay_of(&t, c, &r) != TT_OK) bench_die("out of memory");
    for (int k = 0; k < t.n_code; k++) {
        const tt__instr *i = &t.code[k];
        const bool comes = i->out[0] && i->move.over == TT__OVER_STAGES && i->move.from != i->move.to;
        if (comes) *taken += tt__seconds_of(&t, i, c, true);
    }
    return r.step.compute + r.step.exposed - *taken;
}

enum { MAX_STAGES = 64, MAX_MICROS = 64 };

/* Seconds of a step. busy, wait, transfer: sums over all stages, without the end of the step. end: seconds of
   the end of the step. */
typedef struct timing { double seconds, busy, wait, transfer, end; } timing;

/* Times a step of `micros` micro-batches on each data rank. slow: the costs for transfers at the end of the
   step. */
static timing step_of(const tt_program *p, int micros, const tt_costs *c, const tt_costs *slow)
{
    static double done[2][MAX_STAGES][MAX_MICROS]; /* seconds at which each forward and backward ends */
    static double taken_at[MAX_STAGES][MAX_MICROS];
    double work[2][MAX_STAGES], taken[2][MAX_STAGES], now[MAX_STAGES] = {0}, none;
    int at[MAX_STAGES] = {0}, left;
    const int stages = tt__stages(p);
    timing t = {0, 0, 0, 0, 0};
    for (int s = 0; s < stages; s++) {
        const tt_program *q = p->stage[s];
        work[0][s] = segment_seconds(q, TT__EACH_MICRO, c, &taken[0][s]);
        work[1][s] = segment_seconds(q, TT__EACH_BACKWARD, c, &taken[1][s]);
        t.end = fmax(t.end, segment_seconds(q, TT__EACH_STEP, slow, &none));
        for (int m = 0; m < micros; m++) done[0][s][m] = done[1][s][m] = taken_at[s][m] = -1;
    }
    do {
        left = 0;
        for (int s = 0; s < stages; s++)
            for (bool ready = true; ready && at[s] < 2 * micros;) {
                bool backward;
                const int ahead = p->stages > 1 ? p->stage[s]->settings.in_flight - 1 : 0;
                const int m = (int)tt__pipeline_action(at[s], micros, ahead, &backward);
                const int from = backward ? s + 1 : s - 1;
                const bool comes = from >= 0 && from < stages;
                const double sent = comes ? done[backward][from][m] : 0;
                /* a backward waits until the stage before has taken the gradient of micro-batch m - 1 */
                const bool keeps = backward && s > 0 && m > 0;
                const double gone = keeps ? taken_at[s - 1][m - 1] : 0;
                ready = sent >= 0 && gone >= 0;
                left += !ready;
                if (!ready) continue;
                double begin = fmax(fmax(now[s], sent), gone);
                t.wait += begin - now[s];
                begin += taken[backward][s];
                t.transfer += taken[backward][s];
                if (backward) taken_at[s][m] = begin;
                t.busy += work[backward][s];
                done[backward][s][m] = now[s] = begin + work[backward][s];
                at[s]++;
            }
    } while (left);
    double last = 0;
    for (int s = 0; s < stages; s++) last = fmax(last, now[s]);
    for (int s = 0; s < stages; s++) t.wait += last - now[s];
    t.seconds = last + t.end;
    return t;
}

static void stages(void)
{
    static const struct { int machine, model, micros; } cases[] = {
        {0, VIT, 8}, {0, VIT, 32}, {0, SEVEN, 8}, {0, SEVEN, 32}, {1, VIT, 8}, {1, VIT, 32}};
    static const char *const schedules[] = {"1f1b", "gpipe"};
    char name[128], device[32];
    for (int k = 0; k < TT__COUNT(cases); k++)
        for (int n = 2; n <= (cases[k].machine ? 4 : 8); n *= 2)
            for (int g = 0; g < 2; g++) {
                const machine m = machine_of(cases[k].machine);
                const int micros = cases[k].micros;
                const strategy s = {"", 0, 1, false, NULL, false, n, schedules[g], micros, false};
                const tt_costs c = costs_of(&m, m.link);
                planned x;
                snprintf(device, sizeof device, "cuda*%d", n);
                plan(bench_reopen(), &x, cases[k].model, device, "bf16-mixed",
                     cases[k].model == SEVEN ? "blocks" : "cheap", &s, &c);
                const timing t = step_of(x.p, micros, &c, &c);
                snprintf(name, sizeof name, "%s: %s, %d stages, %s, %d micro-batches", m.name,
                         model_names[cases[k].model], n, schedules[g], micros);
                const double all = (t.seconds - t.end) * n;
                printf("%-66s %7.1f ms, waits %4.1f%% (%4.1f%%), transfers %4.1f%%; GB a stage:", name,
                       1e3 * t.seconds, 100 * t.wait / all, 100.0 * (n - 1) / (micros + n - 1),
                       100 * t.transfer / all);
                for (int stage = 0; stage < n; stage++)
                    printf(" %.2f", (double)tt_stage_plan(x.p, stage).bytes / 1e9);
                printf("\n");
                forget(&x);
            }
}

/* Returns the most bytes that a rank loads from other ranks in a step of `micros` micro-batches. */
static double moved_in_step(const tt_program *p, int micros)
{
    double max = 0, min;
    for (int s = 0; s < tt__stages(p); s++) {
        const tt_program *q = p->stage[s];
        double bytes = 0;
        for (int segment = 0; segment < TT__SEGMENTS; segment++) {
            tt_tape t = part_of(q, (tt__segment)segment);
            tt_program of_segment = *q;
            of_segment.built.t = &t;
            const double once = tt__moved_by(&of_segment, tt__first_rank(q->arena), &min);
            bytes += once * (segment <= TT__EACH_BACKWARD ? micros : 1);
        }
        max = fmax(max, bytes);
    }
    return max;
}

static void share(void)
{
    static const strategy ways[] = {
        {"data 8, zero 0", 0, 1, false, NULL, false, 1, NULL, 1, false},
        {"data 8, zero 1", 1, 1, false, NULL, false, 1, NULL, 1, false},
        {"data 8, zero 3", 3, 1, false, NULL, false, 1, NULL, 1, false},
        {"tensor 2, data 4, zero 1", 1, 2, false, NULL, false, 1, NULL, 2, false},
        {"tensor 8, sequence", 1, 8, false, NULL, false, 1, NULL, 8, true},
        {"pipeline 2, data 4, zero 1", 1, 1, false, NULL, false, 2, "1f1b", 2, false},
        {"pipeline 8, 1f1b", 1, 1, false, NULL, false, 8, "1f1b", 8, false},
        {"pipeline 8, gpipe", 1, 1, false, NULL, false, 8, "gpipe", 8, false},
        {"pipeline 4, tensor 2", 1, 2, false, NULL, false, 4, "1f1b", 8, false}};
    const machine m = machine_of(0);
    const tt_costs c = costs_of(&m, m.link);
    printf("| 8 H200 share a step by | ViT-L/16, 512 images: ms | GB | GB moved | 7B, 16 x 2048 tokens: ms | "
           "GB | GB moved |\n| --- | --- | --- | --- | --- | --- | --- |\n");
    for (int k = 0; k < TT__COUNT(ways); k++) {
        printf("| %s |", ways[k].name);
        for (int model = VIT; model <= SEVEN; model += SEVEN - VIT) {
            planned x;
            plan(bench_reopen(), &x, model, "cuda*8", "bf16-mixed", model == SEVEN ? "blocks" : "cheap",
                 &ways[k], &c);
            const timing t = step_of(x.p, ways[k].micros, &c, &c);
            printf(" %.0f | %.2f | %.2f |", 1e3 * t.seconds, (double)tt_program_plan(x.p).bytes / 1e9,
                   moved_in_step(x.p, ways[k].micros) / 1e9);
            forget(&x);
        }
        printf("\n");
    }
}

static void devices(void)
{
    static const strategy way = {"", 1, 1, false, NULL, false, 4, "1f1b", 8, false};
    const machine m = machine_of(0);
    planned x;
    char name[128];
    plan(bench_reopen(), &x, SEVEN, "cuda*8", "bf16-mixed", "blocks", &way, NULL);
    for (int n = 8; n <= 1024; n *= 2)
        for (int gigabits = 100; gigabits <= 400; gigabits *= 4) {
            const tt_costs c = costs_of(&m, m.link);
            tt_costs slow = c;
            /* The plan has two data ranks, each of which loads half of the shared bytes. With `data` ranks, a
               rank loads `2 (data - 1) / data` times as many bytes. The link is made slower by this factor
               instead. */
            const int data = n / way.pipeline;
            if (n > 8) slow.between_ranks = gigabits * 1e9 / 8 / (2.0 * (data - 1) / data);
            const timing t = step_of(x.p, way.micros, &c, &slow);
            snprintf(name, sizeof name, "7B, %d H200, %d Gbit/s between machines", n, gigabits);
            bench_row(name, 1e3 * t.seconds, "ms", 0);
        }
    forget(&x);
}

#define PARTS "moved, reduce, step, replay, offload, stages, share or devices"

int main(int argc, char **argv)
{
    const bench_flag flags[] = {
        {"--only", NULL, &opt.only, NULL, "PART: " PARTS " (all)"},
        {"--ranks", &opt.ranks, NULL, NULL, "number of devices in the plans of part moved"},
        {"--cpu-ranks", &opt.cpu_ranks, NULL, NULL, "number of ranks on the CPU, with one thread each"},
        {"--elements", &opt.elements, NULL, NULL,
         "elements of the largest all-reduce; the others have 1/16 and 1/256"},
        {"--seqs", &opt.seqs, NULL, NULL, "sequences in a step"},
        {"--length", &opt.length, NULL, NULL, "tokens of a sequence, up to 512"},
        {"--layers", &opt.layers, NULL, NULL, "number of layers, if not the model's own"},
        {"--steps", &opt.steps, NULL, NULL, "measured steps of each side, after one that is not measured"},
        {"--latency", &opt.latency, NULL, NULL, "latency of each group of collectives, in microseconds"},
        {"--flops", &opt.flops, NULL, NULL, "TFLOP/s of the devices in part replay, instead of the presets"},
        {"--memory", &opt.memory, NULL, NULL, "GB/s of the memory in part replay"},
        {"--link", &opt.link, NULL, NULL, "GB/s of the links in part replay"},
    };
    static const struct { const char *name; void (*run)(void); } parts[] = {
        {"moved", moved}, {"reduce", reduce}, {"step", steps}, {"replay", replays},
        {"offload", offloads}, {"stages", stages}, {"share", share}, {"devices", devices}};
    bool any = false;
    bench_open(argc, argv, flags, TT__COUNT(flags));
    for (int k = 0; k < TT__COUNT(parts); k++) any = any || !opt.only || strcmp(opt.only, parts[k].name) == 0;
    if (!any) bench_die("--only '%s': expected " PARTS, opt.only);
    for (int k = 0; k < TT__COUNT(parts); k++)
        if (!opt.only || strcmp(opt.only, parts[k].name) == 0) parts[k].run();
    bench_close();
    return 0;
}
