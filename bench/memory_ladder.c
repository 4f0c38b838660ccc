/* Shows the memory of fine-tuning a vision transformer, rung by rung: each rung adds a technique that saves
   memory. Plans give the memory before anything is allocated.

   Many rungs are the techniques of S. Raschka, "Optimizing memory usage for training LLMs and vision
   transformers in PyTorch" (2023). The article takes ViT-L/16 on 224 x 224 pixels and ten classes from 26.84
   to 2.02 GB. The other rungs are further techniques of tinytrain. GB are 10^9 bytes. "planned" is the size
   of the step's one arena on the device kind that --device names. With --measure, which needs "cpu", a real
   step runs here: "measured" is the number of bytes that the allocator gave for the arena, and "resident" is
   the growth of the resident memory. If something is offloaded, "host" is the planned host memory, beside the
   bytes that the allocator gave for host memory, and "copied" are the bytes copied to and from the host in a
   step of all micro-batches. With several ranks all figures are of one rank. "plan s" are the seconds of
   recording, differentiating, choosing and planning together. --json: an object a line with rung,
   planned_bytes, measured_bytes, extra_flops (a share of the step's), host_bytes, host_measured_bytes,
   copied_bytes, article_gb; null where there is no value, and where a budget is too small.

   --fits shows the largest micro-batch whose plan, with AdamW, fits a GPU of 8, 12, 24 or 80 GB
   (tt_largest_micro_batch). CUDA's context and kernels are assumed to take 0.7 GB of the GPU's memory.
   --json: an object a line with model, precision, recompute, offload, card_gb, batch (0: not even 1 fits),
   planned_bytes, next_bytes (the plan of a micro-batch larger by 1, with a budget that everything fits), and
   host_bytes.

   --ranks N shows the memory of each of N ranks, by how the ranks share the work, for ViT-L/16 in fp32 on 64
   images and for a language model of 6.05 billion parameters (bench.h) in bf16-mixed on 4 sequences of 2048
   tokens, on each data rank; Adam, blocks recomputed. --json: an object a line with model, what (the model is
   trained on), ranks, strategy, planned_bytes, moved_bytes and least_bytes (tt_plan.min_moved_bytes) of a
   step, and the bytes of each category at the peak; chart.py draws bench/results/ranks.svg from them. */

#include "bench.h"

#include <sys/wait.h>

typedef struct rung {
    const char *name, *precision, *recompute;
    tt_optimizer_kind optimizer;
    int batch, accumulate;      /* images or texts in a micro-batch; number of micro-batches */
    double article_gb;          /* GB that the article reports; 0: the rung is not in the article */
    bool initialise;            /* measures after the parameters are initialised, before a step */
    const char *offload;        /* tensors to offload; NULL: none */
    int ranks;                  /* number of ranks; 2 or more: with ZeRO 3 */
    double budget_gb;           /* budget in GB; 0: none */
    const char *update;         /* the option `update`; NULL: "end" */
    int tokens;                 /* tokens of a text. 512: DistilBERT-base, the article's other model; 4,096:
                                   BigBird-base; 2,048: LLaMA-7B */
    int lora;                   /* LLaMA-7B: rank of the adapters, which alone are trained; 0: no adapters */
    const char *base;           /* format of the weights below the adapters (tt_lm_store); NULL: floats */
    int state_bits;             /* bits of the optimizer state; 0: the default */
} rung;

#define ALL "optimizer,gradients,parameters,activations"

static const rung rungs[] = {
    {"fp32, Adam", "32-true", "cheap", TT_ADAM, 64, 1, .article_gb = 26.84},
    {"16-mixed", "16-mixed", "cheap", TT_ADAM, 64, 1, .article_gb = 18.21},
    {"bf16-true", "bf16-true", "cheap", TT_ADAM, 64, 1, .article_gb = 13.82},
    {"bf16-true, a quarter of the batch", "bf16-true", "cheap", TT_ADAM, 16, 1, .article_gb = 5.69},
    {"and accumulation, 4 x 4", "bf16-true", "cheap", TT_ADAM, 4, 4, .article_gb = 3.91},
    {"and SGD with cosine schedule", "bf16-true", "cheap", TT_SGD, 4, 4, .article_gb = 2.02},
    {"initialisation in bf16", "bf16-true", "cheap", TT_SGD, 4, 4, .article_gb = 0.65, .initialise = true},
    {"bf16-true, nothing recomputed", "bf16-true", "none", TT_ADAM, 64, 1, .article_gb = 0},
    {"bf16-true, attention recomputed", "bf16-true", "attention", TT_ADAM, 64, 1, .article_gb = 0},
    {"bf16-true, blocks recomputed", "bf16-true", "blocks", TT_ADAM, 64, 1, .article_gb = 0},
    {"bf16-true, blocks, SGD, 4 x 4", "bf16-true", "blocks", TT_SGD, 4, 4, .article_gb = 0},
    {"16-mixed, blocks", "16-mixed", "blocks", TT_ADAM, 64, 1, .article_gb = 0},
    {"fp32, blocks", "32-true", "blocks", TT_ADAM, 64, 1, .article_gb = 0},
    {"fp32, blocks, optimizer state in 8 bits", "32-true", "blocks", TT_ADAM, 64, 1, .state_bits = 8},
    {"fp32, blocks, Adafactor", "32-true", "blocks", TT_ADAFACTOR, 64, 1, .article_gb = 0},
    {"bf16-true, blocks, optimizer state in 8 bits", "bf16-true", "blocks", TT_ADAM, 64, 1, .state_bits = 8},
    {"bf16-true, blocks, Adafactor", "bf16-true", "blocks", TT_ADAFACTOR, 64, 1, .article_gb = 0},
    {"bf16-true, blocks, 16 images, update in the backward", "bf16-true", "blocks", TT_ADAM, 16, 1,
     .update = "backward"},
    {"and SGD", "bf16-true", "blocks", TT_SGD, 16, 1, .update = "backward"},
    {"and activations offloaded", "bf16-true", "blocks", TT_SGD, 16, 1,
     .offload = "activations", .update = "backward"},
    {"bf16-true, optimizer offloaded", "bf16-true", "cheap", TT_ADAM, 64, 1, .offload = "optimizer"},
    {"bf16-true, blocks, optimizer offloaded", "bf16-true", "blocks", TT_ADAM, 64, 1, .offload = "optimizer"},
    {"bf16-true, blocks, updated by the host", "bf16-true", "blocks", TT_ADAM, 64, 1, .update = "host"},
    {"bf16-true, blocks, 4 x 16, gradients offloaded, in 2.15 GB", "bf16-true", "blocks", TT_ADAM, 16, 4,
     .offload = "gradients", .budget_gb = 2.15},
    {"bf16-true, blocks, 4 x 16, optimizer offloaded", "bf16-true", "blocks", TT_ADAM, 16, 4,
     .offload = "optimizer"},
    {"bf16-true, blocks, 4 x 16, all but parameters offloaded, in 0.85 GB",
     "bf16-true", "blocks", TT_ADAM, 16, 4, .offload = "optimizer,gradients,activations", .budget_gb = 0.85},
    {"bf16-true, blocks, SGD, 4 x 16, gradients, activations offloaded, in 0.87 GB",
     "bf16-true", "blocks", TT_SGD, 16, 4, .offload = "gradients,activations", .budget_gb = 0.87},
    {"bf16-true, blocks, all offloaded", "bf16-true", "blocks", TT_ADAM, 64, 1, .offload = ALL},
    {"bf16-true, blocks, all offloaded, updated by the host", "bf16-true", "blocks", TT_ADAM, 64, 1,
     .offload = ALL, .update = "host"},
    {"bf16-true, blocks, all offloaded, update in the backward", "bf16-true", "blocks", TT_ADAM, 64, 1,
     .offload = ALL, .update = "backward"},
    {"bf16-true, blocks, 4 x 16, all offloaded, in 0.24 GB", "bf16-true", "blocks", TT_ADAM, 16, 4,
     .offload = ALL, .budget_gb = 0.24},
    {"bf16-true, blocks, 16 x 4, all offloaded, in 0.1 GB", "bf16-true", "blocks", TT_ADAM, 4, 16,
     .offload = ALL, .budget_gb = 0.1},
    {"bf16-true, in 5 GB", "bf16-true", "budget", TT_ADAM, 64, 1, .budget_gb = 5},
    {"bf16-true, in 2.95 GB", "bf16-true", "budget", TT_ADAM, 64, 1, .budget_gb = 2.95},
    {"bf16-true, offload chosen too, in 2 GB", "bf16-true", "budget", TT_ADAM, 64, 1,
     .offload = "budget", .budget_gb = 2},
    {"bf16-true, offload chosen too, in 0.8 GB", "bf16-true", "budget", TT_ADAM, 64, 1,
     .offload = "budget", .budget_gb = 0.8},
    {"16-mixed, in 5.5 GB", "16-mixed", "budget", TT_ADAM, 64, 1, .budget_gb = 5.5},
    {"fp32, in 5.8 GB", "32-true", "budget", TT_ADAM, 64, 1, .budget_gb = 5.8},
    {"bf16-true, 4 x 16, optimizer offloaded, in 2.15 GB", "bf16-true", "budget", TT_ADAM, 16, 4,
     .offload = "optimizer", .budget_gb = 2.15},
    {"fp32, blocks, each of 4 ranks with ZeRO 3", "32-true", "blocks", TT_ADAM, 64, 1,
     .article_gb = 6.59, .ranks = 4},
    {"and optimizer offloaded", "32-true", "blocks", TT_ADAM, 64, 1, .offload = "optimizer", .ranks = 4},
    {"and parameters offloaded", "32-true", "blocks", TT_ADAM, 64, 1,
     .article_gb = 6.03, .offload = "optimizer,parameters", .ranks = 4},
    {"and updated by the host", "32-true", "blocks", TT_ADAM, 64, 1,
     .offload = "optimizer,parameters", .ranks = 4, .update = "host"},
    {"and all offloaded", "32-true", "blocks", TT_ADAM, 64, 1, .offload = ALL, .ranks = 4},
    {"and all offloaded, 8 x 8", "32-true", "blocks", TT_ADAM, 8, 8, .offload = ALL, .ranks = 4},
    {"fp32, each of 4 ranks with ZeRO 3, offload chosen too, in 2.2 GB", "32-true", "budget", TT_ADAM, 64, 1,
     .offload = "budget", .ranks = 4, .budget_gb = 2.2},
    {"DistilBERT-base, 12 x 512, bf16-true", "bf16-true", "cheap", TT_ADAM, 12, 1, .tokens = 512},
    {"DistilBERT-base, 12 x 512, bf16-true, all offloaded, in 0.23 GB", "bf16-true", "cheap", TT_ADAM, 12, 1,
     .offload = ALL, .budget_gb = 0.23, .tokens = 512},
    {"DistilBERT-base, 3 x 512 on 4 ranks, ZeRO 3, optimizer offloaded, in 0.23 GB",
     "bf16-true", "cheap", TT_ADAM, 3, 1,
     .article_gb = 1.15, .offload = "optimizer", .ranks = 4, .budget_gb = 0.23, .tokens = 512},
    {"BigBird-base, 1 x 4,096, bf16-true, blocks", "bf16-true", "blocks", TT_ADAM, 1, 1, .tokens = 4096},
    {"BigBird-base, 1 x 4,096, update in the backward", "bf16-true", "blocks", TT_ADAM, 1, 1,
     .update = "backward", .tokens = 4096},
    {"BigBird-base, 1 x 4,096, optimizer offloaded", "bf16-true", "blocks", TT_ADAM, 1, 1,
     .offload = "optimizer", .tokens = 4096},
    {"BigBird-base, 1 x 4,096, both", "bf16-true", "blocks", TT_ADAM, 1, 1, .offload = "optimizer",
     .update = "backward", .tokens = 4096},
    {"LLaMA-7B, 1 x 2,048, bf16-true, blocks", "bf16-true", "blocks", TT_ADAM, 1, 1, .tokens = 2048},
    {"LLaMA-7B, optimizer state in 8 bits", "bf16-true", "blocks", TT_ADAM, 1, 1, .tokens = 2048,
     .state_bits = 8},
    {"LLaMA-7B, adapters of rank 16", "bf16-true", "blocks", TT_ADAM, 1, 1, .tokens = 2048, .lora = 16},
    {"LLaMA-7B, adapters of rank 16, base in int8", "bf16-true", "blocks", TT_ADAM, 1, 1, .tokens = 2048,
     .lora = 16, .base = "int8"},
    {"LLaMA-7B, adapters of rank 16, base in NF4", "bf16-true", "blocks", TT_ADAM, 1, 1, .tokens = 2048,
     .lora = 16, .base = "nf4"},
};

typedef struct result {
    double planned, measured, resident, extra, seconds;
    /* with offload: planned host memory, host memory that the allocator gave, and bytes copied in a step;
       else 0 */
    double host, host_measured, copied;
    double planning;     /* seconds from a model to its plan */
    bool ok;
} result;

static struct { const char *size, *device; int pixels, batch, ranks; } opt = {"L/16", "cuda", 224, 64, 0};

static int batch_of(const rung *g) { return (int)tt__max(1, (int64_t)g->batch * opt.batch / 64); }

/* Measures the memory of the parameters before the first step. The arena is allocated in one piece, but so
   far only the parameters are touched: resident memory grows by their size. */
static void measure_init(tt_context *ctx, tt_trainer *t, result *out)
{
    double before = bench_resident_peak();
    if (tt_allocate(t->train) != TT_OK) bench_die("%s", tt_error(ctx));
    out->resident = bench_resident_peak() - before;
}

/* Returns the bytes that the allocator gave for the arenas of all ranks. */
static double arena_bytes(const tt_program *p)
{
    double sum = 0;
    for (int r = 0; r < p->arena->data; r++)
        sum += (double)(((const tt__block *)(const void *)p->arena->memory[r] - 1)->bytes -
                        sizeof(tt__block));
    return sum;
}

static bool of_decoder(const rung *g) { return g->tokens == 2048; }

/* Returns the number of tokens of a text. A measured step of LLaMA-7B is that of a small LLaMA. */
static int tokens_of(const rung *g, bool run) { return run && of_decoder(g) ? 64 : g->tokens; }

/* Runs a step of one rung, with the same number of micro-batches on each rank, on random images, or on random
   texts if m is NULL. */
static void measure(tt_context *ctx, tt_trainer *t, const tt_vit *m, const rung *g, result *out)
{
    tt_array targets = {"targets", NULL, 0};
    const int n = batch_of(g);
    int32_t labels[64] = {0};
    const int ranks = (int)tt__max(1, g->ranks), micros = g->accumulate * ranks;
    const tt_vit_config *c = m ? &m->config : NULL;
    size_t bytes = c ? (size_t)n * (size_t)(c->image_size * c->image_size * c->channels) : 1;
    /* starts the ranks' threads before measuring, because plans do not count the threads' memory */
    const bool open = tt__device_group_open(ctx, t->train->arena->group) == TT_OK;
    size_t held = tt_allocated_bytes(ctx);
    uint8_t *pixels = (uint8_t *)malloc(bytes);
    bench_batches texts;
    double before = bench_resident_peak(), begin = tt__seconds();
    tt_batch b;
    memset(&b, 0, sizeof b);
    memset(&texts, 0, sizeof texts);
    if (!pixels || !open) bench_die("out of memory");
    for (size_t k = 0; k < bytes; k++) pixels[k] = (uint8_t)(k * 2654435761u >> 13);
    for (int k = 0; k < n && c; k++) labels[k] = k % c->classes;
    b.seqs = n;
    b.pixels = pixels;
    b.image_bytes = (int64_t)bytes / n;
    b.labels = labels;
    if (!c) bench_random_batch(&texts, n, tokens_of(g, true), of_decoder(g) ? 1000 : 30522);
    if (!c) b = texts.batch[0];
    if (of_decoder(g)) { /* the tokens themselves */
        targets.data = b.ids;
        targets.rows = b.rows;
        b.arrays = &targets;
        b.n_arrays = 1;
    }
    for (int k = 0; k < micros; k++) {
        b.last_of_step = k + 1 == micros;
        if (tt_train_batch(t, &b, NULL, NULL) != TT_OK) bench_die("%s: %s", g->name, tt_error(ctx));
    }
    out->seconds = tt__seconds() - begin;
    const double all = (double)(tt_allocated_bytes(ctx) - held), arenas = arena_bytes(t->train);
    out->measured = arenas / ranks;
    out->host_measured = (all - arenas) / ranks;
    out->resident = bench_resident_peak() - before;
    bench_free_batches(&texts);
    free(pixels);
}

/* Makes plans as small as the options allow: they reserve no memory for the inputs of the next run. With a
   tight budget, tt_compile leaves out this memory first. */
static const tt__attempt least_needed = {false, false, false, true, 0, 0};

static tt_trainer *least_trainer(tt_context *ctx, const tt_model *m, const tt_train_options *o)
{
    tt__attempt attempt = least_needed;
    return tt__try_trainer(ctx, m, o, &attempt);
}

static tt_train_options options_of(const rung *g, bool run, char device[64])
{
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_COSINE;
    o.schedule.total_steps = 1000;
    o.compile.optimizer.kind = g->optimizer;
    o.compile.optimizer.clip_norm = 0;
    o.compile.optimizer.weight_decay = 0;
    o.compile.precision = g->precision;
    o.compile.recompute = g->recompute;
    o.compile.offload = g->offload;
    if (g->update) o.compile.update = g->update;
    if (g->state_bits) o.compile.optimizer.state_bits = g->state_bits;
    o.compile.memory_budget = (size_t)(g->budget_gb * 1e9);
    snprintf(device, 64, g->ranks > 1 ? "%s*%d" : "%s", opt.device, g->ranks);
    o.compile.device = device;
    if (g->ranks > 1) o.compile.parallel.zero = 3;
    o.compile.accumulate = g->accumulate > 1;
    o.max_seqs = batch_of(g);
    o.max_tokens = o.max_seqs * tt__max(1, tokens_of(g, run));
    return o;
}

/* Makes LLaMA-7B (Touvron et al., 2023) or, to run a step, a small LLaMA. */
static tt_status new_decoder(tt_context *ctx, const rung *g, bool run, tt_lm *m)
{
    tt_lm_config c = tt_lm_config_default("llama");
    tt_lora_options o = tt_lora_options_default();
    o.rank = g->lora;
    o.alpha = 2 * (float)g->lora;
    if (run) c = tt_lm_config_sized("llama", 3, 192, 6);
    if (run) c.vocab_size = 1000;
    tt_status status = tt_lm_new(ctx, m, &c);
    if (status == TT_OK && g->base) status = tt_lm_store(m, g->base);
    return status == TT_OK && g->lora ? tt_lm_lora(m, &o) : status;
}

static void read_plan(const rung *g, const tt_program *p, result *r)
{
    const tt_plan plan = tt_program_plan(p);
    r->planned = (double)(g->initialise ? plan.init_bytes : plan.bytes);
    r->extra = plan.extra_flops / (plan.flops - plan.extra_flops);
    if (plan.transfer_bytes) {
        r->host = (double)plan.host_bytes;
        r->copied = (double)plan.transfer_bytes + (g->accumulate - 1) * (double)plan.transfer_micro_bytes;
    }
    r->ok = true;
}

static result climb(const rung *g, bool run)
{
    result r;
    tt_vit vit;
    tt_bert bert;
    tt_lm lm;
    char device[64];
    tt_context *ctx = bench_reopen();
    tt_vit_config v = tt_vit_config_default(opt.size);
    const tt_bert_config b = tt_bert_config_default(g->tokens > 512 ? TT_BIG_BIRD : TT_DISTILBERT);
    const tt_train_options o = options_of(g, run, device);
    const bool decoder = of_decoder(g);
    memset(&r, 0, sizeof r);
    v.image_size = opt.pixels;
    v.classes = 10;
    tt_status status = decoder ? new_decoder(ctx, g, run, &lm)
        : g->tokens ? tt_bert_new(ctx, &bert, &b) : tt_vit_new(ctx, &vit, &v);
    if (status != TT_OK) bench_die("%s", tt_error(ctx));
    tt_model model = decoder ? tt_lm_model(&lm) : g->tokens ? tt_bert_model(&bert) : tt_vit_classifier(&vit);
    const double begin = tt__seconds();
    tt_trainer *t = least_trainer(ctx, &model, &o);
    r.planning = tt__seconds() - begin;
    r.ok = !t && g->budget_gb > 0; /* with a budget, a plan that does not fit is a result */
    if (!t && !r.ok) bench_die("%s: %s", g->name, tt_error(ctx));
    if (t) read_plan(g, tt_trainer_program(t), &r);
    if (t && run && g->initialise) measure_init(ctx, t, &r);
    else if (t && run) measure(ctx, t, g->tokens ? NULL : &vit, g, &r);
    tt_trainer_free(t);
    if (decoder) tt_lm_free(&lm);
    else if (g->tokens) tt_bert_free(&bert);
    else tt_vit_free(&vit);
    return r;
}

/* Calls climb() in a child process, so that the resident memory belongs to one rung alone. */
static result climb_apart(const rung *g)
{
    int ends[2], status = 0;
    result r;
    memset(&r, 0, sizeof r);
    fflush(stdout);
    if (pipe(ends) != 0) bench_die("cannot make a pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0) bench_die("cannot start a process: %s", strerror(errno));
    if (child == 0) {
        bench.ctx = NULL; /* forgets the context of the parent, whose threads do not exist in this process */
        r = climb(g, true);
        bool sent = write(ends[1], &r, sizeof r) == (ssize_t)sizeof r;
        _exit(!sent);
    }
    close(ends[1]);
    bool got = read(ends[0], &r, sizeof r) == (ssize_t)sizeof r;
    close(ends[0]);
    r.ok = waitpid(child, &status, 0) == child && got && status == 0;
    return r;
}

/* ------------------------------------------------------------------------------------- what fits a card */

typedef struct subject {
    const char *name;
    int tokens;                 /* tokens of a sequence; 0: images */
    bench_decoder_shape decoder; /* the language model; layers 0: a ViT or DistilBERT */
} subject;

/* The sizes are those of GPT-2 XL (Radford et al., 2019) and LLaMA 7B (Touvron et al., 2023). */
static const subject subjects[] = {
    {"ViT-L/16, 224 x 224 pixels", 0, {0}},
    {"DistilBERT-base, 512 tokens", 512, {0}},
    {"1.6B language model, 1,024 tokens", 1024, {48, 1600, 6400, 25, 50257, false, true}},
    {"7B language model, 2,048 tokens", 2048, {32, 4096, 11008, 32, 32000, true, false}},
};

/* The policies in order of the memory that they save, the least first. */
static const struct policy { const char *recompute, *offload; } policies[] = {
    {"cheap", "none"}, {"blocks", "none"}, {"blocks", ALL},
};

static tt_value record_decoder(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    const subject *s = (const subject *)self;
    (void)output;
    return bench_record_decoder(bench.ctx, t, &s->decoder, o->max_seqs, s->tokens);
}

/* Returns the options of a step of AdamW on `batch` images or texts, with a budget of `room` bytes. */
static tt_train_options subject_options(const subject *s, const char *precision,
                                        const struct policy *policy, int batch, double room)
{
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.compile.precision = precision;
    o.compile.recompute = policy->recompute;
    o.compile.offload = policy->offload;
    o.compile.device = opt.device;
    o.compile.memory_budget = (size_t)room;
    o.max_seqs = batch;
    o.max_tokens = batch * s->tokens;
    return o;
}

static tt_plan plan_of(const tt_model *m, const tt_train_options *o)
{
    tt_trainer *t = least_trainer(bench.ctx, m, o);
    if (!t) bench_die("%s", tt_error(bench.ctx));
    tt_plan plan = tt_program_plan(tt_trainer_program(t));
    tt_trainer_free(t);
    return plan;
}

/* Returns the largest micro-batch within `room` bytes. *at: the plan of that micro-batch (all 0 if not
   even one image or text fits); *above: the plan of a micro-batch larger by one. */
static int largest(const subject *s, const tt_model *m, const char *precision, const struct policy *policy,
                   double room, tt_plan *at, tt_plan *above)
{
    tt_train_options o = subject_options(s, precision, policy, 1, room);
    memset(at, 0, sizeof *at);
    const int fits = tt_largest_micro_batch(bench.ctx, m, &o, 1 << 20);
    if (!fits && tt_error_code(bench.ctx) != TT_ERR_BUDGET) bench_die("%s", tt_error(bench.ctx));
    o = subject_options(s, precision, policy, fits, room);
    if (fits) *at = plan_of(m, &o);
    /* With any budget, products that read the same x are not joined. So this plan also has a budget, of a
       size that every plan fits: the two plans are then comparable. */
    o = subject_options(s, precision, policy, fits + 1, 1e15);
    *above = plan_of(m, &o);
    return fits;
}

static void fit_cards(const subject *s)
{
    static const char *const precisions[] = {"bf16-mixed", "bf16-true"};
    static const int cards[] = {8, 12, 24, 80};
    tt_context *ctx = bench_reopen();
    tt_vit vit;
    tt_bert bert;
    const tt_vit_config v = tt_vit_config_default("L/16");
    const tt_bert_config b = tt_bert_config_default(TT_DISTILBERT);
    const bool decoder = s->decoder.layers > 0, images = !s->tokens;
    tt_model model;
    memset(&model, 0, sizeof model);
    tt_status status = decoder ? TT_OK : images ? tt_vit_new(ctx, &vit, &v) : tt_bert_new(ctx, &bert, &b);
    if (status != TT_OK) bench_die("%s", tt_error(ctx));
    if (decoder) model.self = s, model.record = record_decoder;
    else model = images ? tt_vit_classifier(&vit) : tt_bert_model(&bert);
    for (int k = 0; k < TT__COUNT(precisions) * TT__COUNT(policies); k++) {
        const char *precision = precisions[k / TT__COUNT(policies)];
        const struct policy *policy = &policies[k % TT__COUNT(policies)];
        const bool offload = strcmp(policy->offload, "none") != 0;
        double host[2] = {0, 0};
        if (!bench.json)
            printf("%-34s %-10s %-17s", s->name, precision, offload ? "blocks, offload" : policy->recompute);
        for (int c = 0; c < TT__COUNT(cards); c++) {
            tt_plan at, above;
            const int fits = largest(s, &model, precision, policy, (cards[c] - 0.7) * 1e9, &at, &above);
            if (!host[0]) host[0] = (double)at.host_bytes;
            host[1] = (double)at.host_bytes;
            if (!bench.json) { printf(" %7d", fits); continue; }
            printf("{\"model\": \"%s\", \"precision\": \"%s\", \"recompute\": \"%s\", \"offload\": \"%s\", ",
                   s->name, precision, policy->recompute, policy->offload);
            printf("\"card_gb\": %d, \"batch\": %d, \"planned_bytes\": %zu, \"next_bytes\": %zu, "
                   "\"host_bytes\": %zu}\n", cards[c], fits, at.bytes, above.bytes, at.host_bytes);
        }
        if (!bench.json && offload) printf(" %5.0f to %.0f GB on the host", host[0] / 1e9, host[1] / 1e9);
        if (!bench.json) printf("\n");
        fflush(stdout);
    }
    if (!decoder && images) tt_vit_free(&vit);
    if (!decoder && !images) tt_bert_free(&bert);
}

/* ------------------------------------------------------------------------------------------ several ranks */

static const struct strategy { const char *name; int zero, tensor; bool one; } strategies[] = {
    {"one device", 0, 1, true},
    {"data parallel", 0, 1, false},
    {"ZeRO 1", 1, 1, false},
    {"ZeRO 2", 2, 1, false},
    {"ZeRO 3", 3, 1, false},
    {"tensor 2, ZeRO 1", 1, 2, false},
    {"tensor 4, ZeRO 1", 1, 4, false},
};

static void print_rank(const char *model, const char *what, const struct strategy *s, const tt_program *p)
{
    const tt_plan plan = tt_program_plan(p);
    if (!bench.json) {
        printf("%-18s %-17s %8.2f %8.2f %8.2f\n", model, s->name, (double)plan.bytes / 1e9,
               (double)plan.moved_bytes / 1e9, (double)plan.min_moved_bytes / 1e9);
        return;
    }
    printf("{\"model\": \"%s\", \"what\": \"%s\", \"ranks\": %d, \"strategy\": \"%s\", ", model, what,
           opt.ranks, s->name);
    printf("\"planned_bytes\": %zu, \"moved_bytes\": %zu, \"least_bytes\": %zu", plan.bytes, plan.moved_bytes,
           plan.min_moved_bytes);
    for (int c = 0; c < TT_MEM_CATEGORIES; c++)
        printf(", \"%s\": %zu", tt_category_name((tt_category)c), plan.at_peak[c]);
    printf("}\n");
}

static void share_vit(const struct strategy *s, const char *device, tt_parallel how)
{
    tt_context *ctx = bench_reopen();
    tt_vit m;
    tt_vit_config c = tt_vit_config_default("L/16");
    tt_train_options o = tt_train_options_default();
    c.classes = 10;
    o.schedule.kind = TT_CONSTANT;
    o.compile.optimizer.kind = TT_ADAM;
    o.compile.recompute = "blocks";
    o.compile.device = device;
    o.compile.parallel = how;
    o.max_seqs = 64;
    if (tt_vit_new(ctx, &m, &c) != TT_OK) bench_die("%s", tt_error(ctx));
    tt_model model = tt_vit_classifier(&m);
    tt_trainer *t = least_trainer(ctx, &model, &o);
    if (!t) bench_die("%s", tt_error(ctx));
    print_rank("ViT-L/16", "fp32, 64 images a data rank", s, tt_trainer_program(t));
    tt_trainer_free(t);
    tt_vit_free(&m);
}

static void share_decoder(const struct strategy *s, const char *device, tt_parallel how)
{
    tt_context *ctx = bench_reopen();
    tt_value loss;
    tt_tape *t = bench_decoder(ctx, 4, 2048, &loss);
    tt_compile_options o = tt_compile_options_default();
    o.optimizer.kind = TT_ADAM;
    o.precision = "bf16-mixed";
    o.recompute = "blocks";
    o.device = device;
    o.parallel = how;
    tt__attempt attempt = least_needed;
    tt_program *p = tt__try_compile(t, loss, &o, &attempt);
    if (!p) bench_die("%s", tt_error(ctx));
    print_rank("6B language model", "bf16-mixed, 4 x 2048 tokens a data rank", s, p);
    tt_program_free(p);
    tt_tape_free(t);
}

static void share_ranks(void)
{
    if (!bench.json)
        printf("%d ranks, Adam, blocks recomputed, GB of each\n%-18s %-17s %8s %8s %8s\n", opt.ranks, "", "",
               "planned", "moved", "at least");
    for (int model = 0; model < 2; model++)
        for (int k = 0; k < TT__COUNT(strategies); k++) {
            const struct strategy *s = &strategies[k];
            tt_parallel how = tt_parallel_default();
            char device[64];
            how.zero = s->zero;
            how.tensor = s->tensor;
            if (s->one) snprintf(device, sizeof device, "%s", opt.device);
            else snprintf(device, sizeof device, "%s*%d", opt.device, opt.ranks);
            if (!s->one && opt.ranks % s->tensor) continue;
            if (model) share_decoder(s, device, how);
            else share_vit(s, device, how);
        }
}

/* ------------------------------------------------------------------------------------------------ output */

static void print_rung(const rung *g, result r, double article)
{
    char text[6][32];
    if (!r.ok) bench_die("%s: the step failed", g->name);
    if (bench.json) {
        const double bytes[] = {r.planned, r.measured, r.host, r.host > 0 ? r.host_measured : 0, r.copied};
        for (int k = 0; k < 5; k++)
            if (bytes[k] > 0) snprintf(text[k], sizeof text[k], "%.0f", bytes[k]);
            else snprintf(text[k], sizeof text[k], "null");
        printf("{\"rung\": \"%s\", \"planned_bytes\": %s, \"measured_bytes\": %s, \"extra_flops\": %.6g, "
               "\"host_bytes\": %s, \"host_measured_bytes\": %s, \"copied_bytes\": %s, \"article_gb\": %s}\n",
               g->name, text[0], text[1], r.extra, text[2], text[3], text[4],
               bench__number(text[5], article));
        return;
    }
    const double gb[] = {r.measured, r.resident};
    printf("%-80s", g->name);
    if (r.planned > 0) printf(" %8.3f", r.planned / 1e9);
    else printf(" %8s", "-");
    for (int k = 0; k < 2; k++)
        if (gb[k] > 0) printf(" %9.3f", gb[k] / 1e9);
        else printf(" %9s", "-");
    printf(" %+8.1f%%", 100 * r.extra);
    if (r.copied > 0) printf(" %8.3f", r.host / 1e9);
    else printf(" %8s", "-");
    if (r.copied > 0 && r.measured > 0) printf(" %9.3f", r.host_measured / 1e9);
    else printf(" %9s", "-");
    if (r.copied > 0) printf(" %8.3f", r.copied / 1e9);
    else printf(" %8s", "-");
    if (article > 0) printf(" %8.2f", article);
    else printf(" %8s", "-");
    printf(" %8.2f\n", r.planning);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    bool run = false, fits = false;
    const bench_flag flags[] = {
        {"--vit", NULL, &opt.size, NULL, "SIZE: Ti/16, S/16, B/16, L/16 or H/14"},
        {"--pixels", &opt.pixels, NULL, NULL, "height and width of the images"},
        {"--batch", &opt.batch, NULL, NULL, "images of the first rung, up to 64; other rungs in proportion"},
        {"--device", NULL, &opt.device, NULL, "KIND for which to plan: cpu or cuda (cuda)"},
        {"--measure", NULL, NULL, &run, "measure a step of each rung (with --device cpu)"},
        {"--fits", NULL, NULL, &fits,
         "instead, print the largest micro-batch on cards of 8, 12, 24 and 80 GB"},
        {"--ranks", &opt.ranks, NULL, NULL, "N: instead, print what each of N ranks needs"},
    };
    bench_open(argc, argv, flags, TT__COUNT(flags));
    if (opt.batch > 64) bench_die("--batch is %d, but must be at most 64", opt.batch);
    if (run && strcmp(opt.device, "cpu") != 0) bench_die("--measure needs --device cpu: add it");
    if (opt.ranks) return share_ranks(), bench_close(), 0;
    if (fits) {
        if (!bench.json) {
            printf("largest micro-batch with AdamW, device kind %s, 0.7 GB left to the driver\n", opt.device);
            printf("%-34s %-10s %-17s %7s %7s %7s %7s\n", "", "", "", "8 GB", "12 GB", "24 GB", "80 GB");
        }
        for (int k = 0; k < TT__COUNT(subjects); k++) fit_cards(&subjects[k]);
        bench_close();
        return 0;
    }
    if (!bench.json)
        printf("ViT-%s, %d x %d pixels, batch %d, device kind %s\n"
               "%-80s %8s %9s %9s %9s %8s %9s %8s %8s %8s\n",
               opt.size, opt.pixels, opt.pixels, opt.batch, opt.device, "rung", "planned", "measured",
               "resident", "FLOPs", "host", "measured", "copied", "article", "plan s");
    for (int k = 0; k < TT__COUNT(rungs); k++) {
        const rung *g = &rungs[k];
        const bool whole = opt.batch == 64 && opt.pixels == 224 && strcmp(opt.size, "L/16") == 0;
        print_rung(g, run ? climb_apart(g) : climb(g, false), whole ? g->article_gb : 0);
    }
    bench_close();
    return 0;
}
