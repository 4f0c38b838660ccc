/* The memory of fine-tuning a vision transformer, rung by rung: what each technique leaves of it, known
   before anything is allocated.

   The rungs are those of S. Raschka, "Optimizing memory usage for training LLMs and vision transformers in
   PyTorch" (2023), which takes ViT-L/16 on 224 x 224 pixels and ten classes from 26.84 to 2.02 GB, and what
   tinytrain has beyond them. GB are 10^9 bytes; planned is all that the step's one arena holds on the device
   kind named by --device, measured what the allocator gave for it in a real step here (--measure, only on
   "cpu") and what the resident memory grew by. --json: an object a line with rung, planned_bytes,
   measured_bytes, extra_flops (a share of the step's), article_gb; null where there is none.

   --fits asks the other way round: the largest micro-batch whose plan, with AdamW, fits a GPU of 8, 12, 24 or
   80 GB, when 0.7 GB of these are left to CUDA's context and kernels, an assumption. --json: an object a line
   with model, precision, recompute, card_gb, batch (0: not even 1 fits), planned_bytes, and next_bytes, which
   are planned for one more.

   --ranks N: what each of N ranks needs by how they share the work, of ViT-L/16 in fp32 on 64 images and of a
   language model of 6.05 billion parameters (bench.h) in bf16-mixed on 4 sequences of 2048 tokens, on each
   data rank; Adam, blocks recomputed. --json: an object a line with model, what (it is trained on), ranks,
   strategy, planned_bytes, moved_bytes and least_bytes (tt_plan.moved_least_bytes) of a step, and the bytes
   of each category at the peak; chart.py draws bench/results/ranks.svg from them. */

#include "bench.h"

#include <sys/wait.h>

typedef struct rung {
    const char *name, *precision, *recompute;
    tt_optimizer_kind optimizer;
    int batch, accumulate;      /* images of a micro-batch; micro-batches                                   */
    double article_gb;          /* 0: not in the article                                                    */
    bool initialise;            /* only the parameters                                                      */
} rung;

static const rung rungs[] = {
    {"fp32, Adam", "32-true", "cheap", TT_ADAM, 64, 1, 26.84, false},
    {"16-mixed", "16-mixed", "cheap", TT_ADAM, 64, 1, 18.21, false},
    {"bf16-true", "bf16-true", "cheap", TT_ADAM, 64, 1, 13.82, false},
    {"bf16-true, a quarter of the batch", "bf16-true", "cheap", TT_ADAM, 16, 1, 5.69, false},
    {"and accumulation, 4 x 4", "bf16-true", "cheap", TT_ADAM, 4, 4, 3.91, false},
    {"and SGD with cosine schedule", "bf16-true", "cheap", TT_SGD, 4, 4, 2.02, false},
    {"initialisation in bf16", "bf16-true", "cheap", TT_SGD, 4, 4, 0.65, true},
    {"bf16-true, nothing recomputed", "bf16-true", "none", TT_ADAM, 64, 1, 0, false},
    {"bf16-true, attention recomputed", "bf16-true", "attention", TT_ADAM, 64, 1, 0, false},
    {"bf16-true, blocks recomputed", "bf16-true", "blocks", TT_ADAM, 64, 1, 0, false},
    {"bf16-true, blocks, SGD, 4 x 4", "bf16-true", "blocks", TT_SGD, 4, 4, 0, false},
};

typedef struct result { double planned, measured, resident, extra, seconds; bool ok; } result;

static struct { const char *size, *device; int pixels, batch, ranks; } opt = {"L/16", "cuda", 224, 64, 0};

static int batch_of(const rung *g) { return (int)tt__max(1, (int64_t)g->batch * opt.batch / 64); }

/* What a step of DistilBERT-base on 12 x 512 tokens needs in bf16 with Adam: the article's other model. */
static result plan_distilbert(void)
{
    result r;
    tt_bert m;
    tt_context *ctx = bench_reopen();
    tt_bert_config c = tt_bert_config_default(true);
    tt_train_options o = tt_train_options_default();
    memset(&r, 0, sizeof r);
    o.schedule.kind = TT_CONSTANT;
    o.optimizer.kind = TT_ADAM;
    o.precision = "bf16-true";
    o.device = opt.device;
    o.max_seqs = 12;
    o.max_tokens = 12 * 512;
    if (tt_bert_new(ctx, &m, &c) != TT_OK) bench_die("%s", tt_error(ctx));
    tt_model model = tt_bert_classifier(&m);
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) bench_die("%s", tt_error(ctx));
    r.planned = (double)tt_program_plan(tt_trainer_program(t)).bytes;
    r.ok = true;
    tt_trainer_free(t);
    tt_bert_free(&m);
    return r;
}

/* What parameters take until the first step. Of the arena, allocated in one piece, only they are touched:
   resident memory shows it. */
static void measure_init(tt_context *ctx, tt_trainer *t, result *out)
{
    double before = bench_resident_peak();
    if (tt_allocate(t->train) != TT_OK) bench_die("%s", tt_error(ctx));
    out->resident = bench_resident_peak() - before;
}

/* A step of one rung on random images. */
static void measure(tt_context *ctx, tt_trainer *t, const tt_vit *m, const rung *g, result *out)
{
    int n = batch_of(g), labels[64] = {0};
    size_t bytes = (size_t)n * (size_t)(m->config.image_size * m->config.image_size * m->config.channels),
           held = tt_allocated_bytes(ctx);
    uint8_t *pixels = (uint8_t *)malloc(bytes);
    double before = bench_resident_peak(), begin = tt__seconds();
    tt_batch b;
    memset(&b, 0, sizeof b);
    if (!pixels) bench_die("no memory");
    for (size_t k = 0; k < bytes; k++) pixels[k] = (uint8_t)(k * 2654435761u >> 13);
    for (int k = 0; k < n; k++) labels[k] = k % m->config.classes;
    b.seqs = n;
    b.pixels = pixels;
    b.image_bytes = (int64_t)bytes / n;
    b.labels = labels;
    for (int k = 0; k < g->accumulate; k++) {
        b.last_of_step = k + 1 == g->accumulate;
        if (tt_train_batch(t, &b, NULL, NULL) != TT_OK) bench_die("%s: %s", g->name, tt_error(ctx));
    }
    out->seconds = tt__seconds() - begin;
    out->measured = (double)(tt_allocated_bytes(ctx) - held - tt_program_plan(t->train).host_bytes);
    out->resident = bench_resident_peak() - before;
    free(pixels);
}

static result climb(const rung *g, bool run)
{
    result r;
    tt_vit m;
    tt_context *ctx = bench_reopen();
    tt_vit_config c = tt_vit_config_default(opt.size);
    tt_train_options o = tt_train_options_default();
    memset(&r, 0, sizeof r);
    c.image_size = opt.pixels;
    c.classes = 10;
    o.schedule.kind = TT_COSINE;
    o.schedule.total_steps = 1000;
    o.optimizer.kind = g->optimizer;
    o.optimizer.clip_norm = 0;
    o.optimizer.weight_decay = 0;
    o.precision = g->precision;
    o.recompute = g->recompute;
    o.device = opt.device;
    o.accumulate = g->accumulate > 1;
    o.max_seqs = batch_of(g);
    if (tt_vit_new(ctx, &m, &c) != TT_OK) bench_die("%s", tt_error(ctx));
    tt_model model = tt_vit_classifier(&m);
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) bench_die("%s: %s", g->name, tt_error(ctx));
    tt_plan plan = tt_program_plan(tt_trainer_program(t));
    r.planned = (double)(g->initialise ? plan.init_bytes : plan.bytes);
    r.extra = plan.extra_flops / (plan.flops - plan.extra_flops);
    if (run && g->initialise) measure_init(ctx, t, &r);
    else if (run) measure(ctx, t, &m, g, &r);
    r.ok = true;
    tt_trainer_free(t);
    tt_vit_free(&m);
    return r;
}

/* The same in a process of its own, so that its resident memory is its own. */
static result climb_apart(const rung *g)
{
    int ends[2], status = 0;
    result r;
    memset(&r, 0, sizeof r);
    fflush(stdout);
    if (pipe(ends) != 0) bench_die("no pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0) bench_die("no process: %s", strerror(errno));
    if (child == 0) {
        bench.ctx = NULL; /* its threads are the parent's */
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

typedef struct subject { const char *name; bool vit, distil; int width, layers; } subject;

static const subject subjects[] = {
    {"ViT-L/16, 224 x 224 pixels", true, false, 0, 0},
    {"DistilBERT-base, 512 tokens", false, true, 768, 6},
    {"BERT-large, 512 tokens", false, false, 1024, 24},
};

/* Bytes planned for a step of AdamW on so many images or texts. */
static double plan_bytes(tt_context *ctx, const tt_model *m, int64_t tokens, const char *precision,
                         const char *recompute, int64_t batch)
{
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.precision = precision;
    o.recompute = recompute;
    o.device = opt.device;
    o.max_seqs = batch;
    o.max_tokens = tokens * batch;
    tt_trainer *t = tt_trainer_new(ctx, m, &o);
    if (!t) bench_die("%s", tt_error(ctx));
    double bytes = (double)tt_program_plan(tt_trainer_program(t)).bytes;
    tt_trainer_free(t);
    return bytes;
}

static void fit_cards(const subject *s)
{
    static const char *const precisions[] = {"bf16-mixed", "bf16-true"};
    static const char *const policies[] = {"cheap", "blocks"};
    static const int cards[] = {8, 12, 24, 80};
    tt_context *ctx = bench_reopen();
    tt_vit vit;
    tt_bert bert;
    tt_vit_config v = tt_vit_config_default("L/16");
    tt_bert_config b = tt_bert_config_default(s->distil);
    b.hidden_size = s->width;
    b.layers = s->layers;
    b.heads = s->width / 64;
    b.intermediate_size = 4 * s->width;
    tt_status status = s->vit ? tt_vit_new(ctx, &vit, &v) : tt_bert_new(ctx, &bert, &b);
    if (status != TT_OK) bench_die("%s", tt_error(ctx));
    tt_model model = s->vit ? tt_vit_classifier(&vit) : tt_bert_classifier(&bert);
    const int64_t tokens = s->vit ? 0 : 512;
    for (int k = 0; k < TT__COUNT(precisions) * TT__COUNT(policies); k++) {
        const char *precision = precisions[k / 2], *policy = policies[k % 2];
        if (!bench.json) printf("%-28s %-10s %-7s", s->name, precision, policy);
        for (int c = 0; c < TT__COUNT(cards); c++) {
            double room = (cards[c] - 0.7) * 1e9;
            int64_t fits = 0, fails = 1;
            double bytes = 0, above = 0, now;
            while (fails - fits > 1 || above == 0) {
                int64_t batch = above == 0 ? fails : fits + (fails - fits) / 2;
                now = plan_bytes(ctx, &model, tokens, precision, policy, batch);
                if (now > room) fails = batch, above = now;
                else if (fits = batch, bytes = now, above == 0) fails = 2 * batch;
            }
            if (!bench.json) { printf(" %7lld", (long long)fits); continue; }
            printf("{\"model\": \"%s\", \"precision\": \"%s\", \"recompute\": \"%s\", ", s->name, precision,
                   policy);
            printf("\"card_gb\": %d, \"batch\": %lld, \"planned_bytes\": %.0f, \"next_bytes\": %.0f}\n",
                   cards[c], (long long)fits, bytes, above);
        }
        if (!bench.json) printf("\n");
        fflush(stdout);
    }
    if (s->vit) tt_vit_free(&vit);
    else tt_bert_free(&bert);
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
               (double)plan.moved_bytes / 1e9, (double)plan.moved_least_bytes / 1e9);
        return;
    }
    printf("{\"model\": \"%s\", \"what\": \"%s\", \"ranks\": %d, \"strategy\": \"%s\", ", model, what,
           opt.ranks, s->name);
    printf("\"planned_bytes\": %zu, \"moved_bytes\": %zu, \"least_bytes\": %zu", plan.bytes, plan.moved_bytes,
           plan.moved_least_bytes);
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
    o.optimizer.kind = TT_ADAM;
    o.recompute = "blocks";
    o.device = device;
    o.parallel = how;
    o.max_seqs = 64;
    if (tt_vit_new(ctx, &m, &c) != TT_OK) bench_die("%s", tt_error(ctx));
    tt_model model = tt_vit_classifier(&m);
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
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
    tt_program *p = tt_compile(t, loss, &o);
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

int main(int argc, char **argv)
{
    bool run = false, fits = false;
    const bench_flag flags[] = {
        {"--vit", NULL, &opt.size, NULL, "SIZE: Ti/16, S/16, B/16, L/16 or H/14"},
        {"--pixels", &opt.pixels, NULL, NULL, "height and width of the images"},
        {"--batch", &opt.batch, NULL, NULL, "images of the first rung, up to 64; the others in proportion"},
        {"--device", NULL, &opt.device, NULL, "KIND for which to plan: cpu or cuda (cuda)"},
        {"--measure", NULL, NULL, &run, "a step of each rung (with --device cpu)"},
        {"--fits", NULL, NULL, &fits, "the largest micro-batch on cards of 8, 12, 24 and 80 GB instead"},
        {"--ranks", &opt.ranks, NULL, NULL, "N: instead, what each of N ranks needs"},
    };
    bench_open(argc, argv, flags, TT__COUNT(flags));
    if (opt.batch > 64) bench_die("--batch %d is above 64", opt.batch);
    if (run && strcmp(opt.device, "cpu") != 0) bench_die("--measure needs --device cpu");
    if (opt.ranks) return share_ranks(), bench_close(), 0;
    if (fits) {
        if (!bench.json) {
            printf("largest micro-batch with AdamW, device kind %s, 0.7 GB left to the driver\n", opt.device);
            printf("%-28s %-10s %-7s %7s %7s %7s %7s\n", "", "", "", "8 GB", "12 GB", "24 GB", "80 GB");
        }
        for (int k = 0; k < TT__COUNT(subjects); k++) fit_cards(&subjects[k]);
        bench_close();
        return 0;
    }
    if (!bench.json)
        printf("ViT-%s, %d x %d pixels, batch %d, device kind %s\n%-36s %8s %9s %9s %9s %8s\n", opt.size,
               opt.pixels, opt.pixels, opt.batch, opt.device, "rung", "planned", "measured", "resident",
               "FLOPs", "article");
    for (int k = 0; k <= TT__COUNT(rungs); k++) {
        static const rung distilbert = {
            "DistilBERT-base, 12 x 512, bf16-true", "bf16-true", "cheap", TT_ADAM, 12, 1, 0, false};
        const rung *g = k < TT__COUNT(rungs) ? &rungs[k] : &distilbert;
        bool article = g->article_gb > 0 && opt.batch == 64 && opt.pixels == 224 &&
                       strcmp(opt.size, "L/16") == 0;
        result r = g == &distilbert ? plan_distilbert() : run ? climb_apart(g) : climb(g, false);
        char text[3][32];
        if (!r.ok) bench_die("%s: the step failed", g->name);
        if (bench.json) {
            printf("{\"rung\": \"%s\", \"planned_bytes\": %.0f, \"measured_bytes\": %s, \"extra_flops\": "
                   "%.6g, \"article_gb\": %s}\n",
                   g->name, r.planned,
                   r.measured > 0 ? (snprintf(text[0], 32, "%.0f", r.measured), text[0]) : "null", r.extra,
                   article ? bench__number(text[1], g->article_gb) : "null");
            continue;
        }
        printf("%-36s %8.3f", g->name, r.planned / 1e9);
        if (r.measured > 0) printf(" %9.3f %9.3f", r.measured / 1e9, r.resident / 1e9);
        else if (r.resident > 0) printf(" %9s %9.3f", "-", r.resident / 1e9);
        else printf(" %9s %9s", "-", "-");
        printf(" %+8.1f%%", 100 * r.extra);
        if (article) printf(" %8.2f", g->article_gb);
        printf("\n");
        fflush(stdout);
    }
    bench_close();
    return 0;
}
