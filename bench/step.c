/* Measures whole training steps of DistilBERT-base (66 million parameters, random weights, AdamW, decay 0.01,
   clipping 1, dropout as in its config), with --vit of a vision transformer, or with --gpt2 of GPT-2 with 124
   million parameters: tokens/s, GFLOP/s beside the peak, how the time of a step divides, and the plan's bytes
   beside the growth of the process.

   Tokens are random, or come from --batches: a safetensors file of int32 tensors batchB.input_ids (all
   sequences one after another), batchB.seq_start (sequences + 1) and batchB.labels for B = 0, 1, ..., as
   bench/pytorch.py and bench/minilm_imdb.py write them. Images are random, too, or come from uint8 tensors
   batchB.pixels (images, height, width, 3). With --turns each step waits for a line on standard input and
   reports itself, so that two programs can take turns.

   On a GPU (--device cuda, in a build with tinytrain_cuda.cu and bench/gpu.cu) steps are timed as a whole,
   from a call of tt_train_batch to its return. Without --turns a step begins while the one before is in
   flight, as in tt_fit. The peak is the rate of cuBLASLt's products, measured before and after the steps;
   the larger of the two rates counts. Memory is the device memory in use (cudaMemGetInfo) after the steps,
   less the memory in use before the model existed. The memory before already held the CUDA context and the
   cuBLASLt kernels of the peak. So kernels, graphs and whatever else CUDA keeps come on top of the plan.

   With --ops each op is then timed by itself on the GPU: one step counts the launches, bytes and FLOPs of
   each op; in 5 more steps, events before and after each launch take the time.

   With --estimate the costs of the device are measured before the steps, and again after the steps
   (tt_measure_costs). The plan forecasts the time of a step from each measurement. The mean of the two
   forecasts is printed beside the median step, and on the CPU also beside the sum of the fastest times of all
   launches, which other load hardly changes. */

#include "bench.h"

static int32_t *read_tensor(tt_context *ctx, const tt_safetensors *file, int batch, const char *name,
                            int64_t *n)
{
    char full[64];
    snprintf(full, sizeof full, "batch%d.%s", batch, name);
    int k = tt_safetensors_find(file, full);
    *n = 0;
    if (k < 0) return NULL;
    const tt_tensor_info *info = tt_safetensors_info(file, k);
    if (info->ndim != 1 || info->dims[0] > INT32_MAX) bench_die("tensor '%s' is not a list of numbers", full);
    int32_t *x = bench_numbers(info->dims[0]);
    *n = info->dims[0];
    if (tt_safetensors_read_i32(file, k, 0, *n, x) != TT_OK) bench_die("%s", tt_error(ctx));
    return x;
}

static void read_batches(tt_context *ctx, bench_batches *all, const char *path, int max)
{
    tt_safetensors *file = tt_safetensors_open(ctx, path);
    if (!file) bench_die("%s", tt_error(ctx));
    for (int b = 0;; b++) {
        int64_t rows, starts, labels;
        int32_t *ids = read_tensor(ctx, file, b, "input_ids", &rows),
                *start = read_tensor(ctx, file, b, "seq_start", &starts),
                *label = read_tensor(ctx, file, b, "labels", &labels);
        if (!ids && b > 0) break;
        if (!ids || !start || !label || starts < 2 || labels != starts - 1 || start[0] != 0 ||
            start[starts - 1] != rows)
            bench_die("'%s': batch %d has no batch%d.input_ids, .seq_start or .labels, or their sizes do not "
                      "match", path, b, b);
        for (int64_t s = 0; s + 1 < starts; s++)
            if (start[s + 1] <= start[s] || start[s + 1] - start[s] > max)
                bench_die("'%s': sequence %lld of batch %d must have 1 to %d tokens", path, (long long)s, b,
                          max);
        bench_add_batch(all, (int)(starts - 1), ids, start, label);
    }
    tt_safetensors_close(file);
}

static void add_images(bench_batches *all, int images, const uint8_t *pixels, int64_t bytes,
                       const int32_t *labels, int tokens)
{
    all->batch = (tt_batch *)realloc(all->batch, (size_t)(all->n + 1) * sizeof *all->batch);
    if (!all->batch) bench_die("out of memory");
    tt_batch *b = &all->batch[all->n++];
    memset(b, 0, sizeof *b);
    b->seqs = images;
    b->rows = images * tokens; /* the number of tokens a second counts these rows */
    b->pixels = pixels;
    b->image_bytes = bytes;
    b->labels = labels;
    b->last_of_step = true;
    if (images > all->max_seqs) all->max_seqs = images;
}

static void random_images(bench_batches *all, int images, int bytes, int tokens)
{
    uint8_t *pixels = (uint8_t *)malloc((size_t)images * (size_t)bytes);
    int32_t *labels = bench_numbers(images);
    uint32_t random = 1;
    if (!pixels) bench_die("out of memory");
    for (int64_t k = 0; k < (int64_t)images * bytes; k++) {
        random = random * 1664525u + 1013904223u;
        pixels[k] = (uint8_t)(random >> 24);
    }
    for (int k = 0; k < images; k++) labels[k] = k % 2;
    add_images(all, images, pixels, bytes, labels, tokens);
}

static void read_images(tt_context *ctx, bench_batches *all, const char *path, int64_t bytes, int tokens)
{
    tt_safetensors *file = tt_safetensors_open(ctx, path);
    if (!file) bench_die("%s", tt_error(ctx));
    for (int b = 0;; b++) {
        char name[64];
        int64_t images;
        snprintf(name, sizeof name, "batch%d.pixels", b);
        int k = tt_safetensors_find(file, name);
        int32_t *label = read_tensor(ctx, file, b, "labels", &images);
        if (k < 0 && b > 0) break;
        if (k < 0 || !label || strcmp(tt_safetensors_info(file, k)->dtype, "U8") != 0 ||
            (int64_t)tt_safetensors_info(file, k)->bytes != images * bytes)
            bench_die("'%s': batch %d has no batch%d.pixels or .labels, or their sizes are not the model's",
                      path, b, b);
        uint8_t *pixels = (uint8_t *)malloc((size_t)(images * bytes));
        if (!pixels) bench_die("out of memory");
        if (tt_safetensors_read(file, k, 0, (size_t)(images * bytes), pixels) != TT_OK)
            bench_die("%s", tt_error(ctx));
        add_images(all, (int)images, pixels, bytes, label, tokens);
    }
    tt_safetensors_close(file);
}

/* The parts into which the time of a step is divided. */
enum { MATMULS, ATTENTION, ROWS, OPTIMIZER, REST, PARTS };
static const char *const part_names[PARTS] = {"matmuls", "attention", "rows (all other ops)",
                                              "optimizer and clipping", "rest (outside of ops)"};

static int part_of(int op)
{
    switch (op) {
    case TT__OP_LINEAR: case TT__OP_LINEAR_DX: case TT__OP_LINEAR_DW: case TT__OP_LINEAR_CROSS_ENTROPY:
        return MATMULS;
    case TT__OP_ATTENTION: case TT__OP_ATTENTION_BACKWARD: return ATTENTION;
    case TT__OP_SUM_SQUARES: case TT__OP_CLIP: case TT__OP_SGD: case TT__OP_ADAM: return OPTIMIZER;
    default: return ROWS;
    }
}

/* Returns the TFLOP/s of cuBLASLt's products in the multiplication type of a precision. Returns 0 if the
   products cannot be measured: after the steps, memory may be short. */
static double gpu_peak(const char *precision, int n)
{
    char error[256];
    const char *type = strncmp(precision, "bf16", 4) == 0 ? "bf16"
                       : strncmp(precision, "16", 2) == 0 ? "fp16"
                       : "fp32";
    double flops = bench_gpu_product(type, n, bench.min, error);
    if (!(flops > 0)) fprintf(stderr, "%s: cannot measure the peak: %s\n", bench.program, error);
    return flops / 1e12;
}

/* --peaks: prints the best rates that a device can reach. */
static void peaks(bool gpu, int n)
{
    static const char *const types[] = {"fp32", "tf32", "fp16", "bf16"};
    char name[128], error[256] = "";
    for (int k = 0; k < TT__COUNT(types) && gpu; k++) {
        double flops = bench_gpu_product(types[k], n, bench.min, error);
        if (!(flops > 0)) bench_die("%s", error);
        snprintf(name, sizeof name, "matrix products of %s, %d x %d", types[k], n, n);
        bench_row(name, flops / 1e12, "TFLOP/s", 0);
    }
    double bytes = gpu ? bench_gpu_copy(16 * (size_t)n * (size_t)n, bench.min, error)
                       : bench_stream(BENCH_COPY);
    if (!(bytes > 0)) bench_die("%s", error);
    if (!gpu) bench_row("multiply-adds of fp32", bench_peak("32-true", 0) / 1e9, "GFLOP/s", 0);
    if (!gpu) bench_row("multiply-adds of bf16", bench_peak("bf16-true", 0) / 1e9, "GFLOP/s", 0);
    bench_row("copies of memory, bytes read and written", bytes / 1e9, "GB/s", 0);
}

/* --estimate: returns the seconds of a step that its plan forecasts with newly measured costs. */
static double seconds_by_plan(tt_context *ctx, const tt_model *model, tt_train_options o)
{
    tt_costs costs;
    double begin = tt__seconds();
    if (tt_measure_costs(ctx, o.compile.device, &costs) != TT_OK) bench_die("%s", tt_error(ctx));
    bench_row("measuring costs", tt__seconds() - begin, "s", 0);
    o.compile.costs = &costs;
    tt_trainer *t = tt_trainer_new(ctx, model, &o);
    if (!t) bench_die("%s", tt_error(ctx));
    const tt_plan plan = tt_program_plan(tt_trainer_program(t));
    tt_trainer_free(t);
    return plan.compute_seconds + plan.exposed_seconds;
}

/* --gpt2: returns the targets of all batches, which the caller frees. The target of a token is the next token
   of the sequence. */
static tt_array *next_tokens(bench_batches *all)
{
    tt_array *targets = (tt_array *)malloc((size_t)all->n * sizeof *targets);
    if (!targets) bench_die("out of memory");
    for (int k = 0; k < all->n; k++) {
        tt_batch *b = &all->batch[k];
        int32_t *next = bench_numbers(b->rows);
        for (int s = 0; s < b->seqs; s++)
            for (int r = b->seq_start[s]; r < b->seq_start[s + 1]; r++)
                next[r] = r + 1 < b->seq_start[s + 1] ? b->ids[r + 1] : -100;
        targets[k].input = "targets";
        targets[k].data = next;
        targets[k].rows = b->rows;
        b->arrays = &targets[k];
        b->n_arrays = 1;
    }
    return targets;
}

/* --ops: a backend that replaces the program's own and notes the time before and after each launch. In the
   first step the backend counts launches, bytes and FLOPs instead. */
enum { TIMED_STEPS = 5 };
static struct {
    const tt__backend *real;
    tt__backend backend;
    tt__device_kind kind;
    bench_cost op[TT__OP_COUNT];
    int launches[TT__OP_COUNT];
    bool counts;
    void **event; /* event: two events for each launch of a step, in order; `of`: the op of each launch */
    int *of, n, made;
} timed;

/* Adds the FLOPs of a launch. FLOPs of attention depend on the starts of sequences, which are read from the
   device. */
static tt_status add_flops(const tt__launch *l, bench_cost *to)
{
    tt_status status = TT_OK;
    tt__mat in[TT__MAX_IN];
    memcpy(in, l->in, sizeof in);
    for (int j = 0; j < TT__MAX_IN; j++) {
        const bool numbers = in[j].data && in[j].dtype == TT_I32;
        in[j].data = numbers ? bench_numbers(in[j].rows) : NULL;
        if (!numbers || status != TT_OK) continue;
        status = timed.real->read(l->device, in[j].data, l->in[j].data, sizeof(int32_t) * (size_t)in[j].rows);
    }
    if (status == TT_OK) to->flops += tt__flops(l->instr, in);
    for (int j = 0; j < TT__MAX_IN; j++) free(in[j].data);
    return status;
}

static tt_status counted_launch(const tt__launch *l, int n)
{
    const int op = l->instr->op;
    tt_status status = timed.real->launch(l, n);
    timed.launches[op]++;
    for (int k = 0; k < n && status == TT_OK; k++) {
        timed.op[op].bytes += bench__bytes(&l[k]);
        status = add_flops(&l[k], &timed.op[op]);
    }
    return status;
}

static tt_status timed_launch(const tt__launch *l, int n)
{
    if (timed.counts) return counted_launch(l, n);
    if (timed.n == timed.made) {
        timed.event = (void **)realloc(timed.event, sizeof(void *) * 2 * (size_t)(++timed.made));
        timed.of = (int *)realloc(timed.of, sizeof(int) * (size_t)timed.made);
        if (!timed.event || !timed.of) bench_die("out of memory");
        for (int k = 0; k < 2; k++) {
            timed.event[2 * timed.n + k] = bench_gpu_event();
            if (!timed.event[2 * timed.n + k]) bench_die("cannot make an event for the times of ops");
        }
    }
    void **event = &timed.event[2 * timed.n];
    timed.of[timed.n++] = l->instr->op;
    tt_status status = timed.real->mark(l->device, l->instr->stream, &event[0]);
    if (status == TT_OK) status = timed.real->launch(l, n);
    return status == TT_OK ? timed.real->mark(l->device, l->instr->stream, &event[1]) : status;
}

static void time_ops(tt_context *ctx, tt_trainer *t, const tt_batch *b)
{
    tt_program *p = (tt_program *)(uintptr_t)tt_trainer_program(t);
    const tt__device_kind *kind = p->settings.kind;
    char name[128];
    tt_stats s;
    bool updated;
    timed.kind = *kind;
    timed.real = kind->backend;
    timed.backend = *kind->backend;
    timed.backend.launch = timed_launch;
    timed.kind.backend = &timed.backend;
    p->settings.kind = &timed.kind;
    ctx->profiles = true; /* keeps launches out of CUDA graphs, so that events separate launches */
    for (int step = 0; step <= TIMED_STEPS; step++) {
        timed.counts = step == 0;
        timed.n = 0;
        if (tt_train_batch(t, b, &s, &updated) != TT_OK) bench_die("%s", tt_error(ctx));
        for (int k = 0; k < timed.n; k++) {
            const double seconds = bench_gpu_between(timed.event[2 * k], timed.event[2 * k + 1]);
            if (seconds < 0) bench_die("the device does not tell the time of a launch");
            timed.op[timed.of[k]].seconds += seconds / TIMED_STEPS;
        }
    }
    ctx->profiles = false;
    p->settings.kind = kind;
    for (int op = 0; op < TT__OP_COUNT; op++) {
        const bench_cost *c = &timed.op[op];
        if (!timed.launches[op]) continue;
        const char *const what[] = {"launches", "alone", "bytes read and written", "multiply-adds"};
        const double value[] = {timed.launches[op], 1e3 * c->seconds, c->bytes / c->seconds / 1e9,
                                c->flops / c->seconds / 1e12};
        const char *const unit[] = {"of a step", "ms a step", "GB/s", "TFLOP/s"};
        for (int k = 0; k < 3 + (c->flops > 0); k++) {
            snprintf(name, sizeof name, "op %s: %s", tt__ops[op].name, what[k]);
            bench_row(name, value[k], unit[k], 0);
        }
    }
}

int main(int argc, char **argv)
{
    int seqs = 16, length = 128, layers = 0, steps = 5, warm = 1, side = 224, product = 8192, done = 0;
    bool turns = false, only_peaks = false, estimate = false, gpt2 = false, ops = false, updated;
    bool no_dropout = false;
    const char *path = NULL, *size = NULL, *device = NULL, *recompute = NULL, *big_bird = NULL;
    const char *tune = NULL;
    const char *matmul = NULL;
    const bench_flag flags[] = {
        {"--seqs", &seqs, NULL, NULL, "sequences or images in a step"},
        {"--length", &length, NULL, NULL,
         "tokens of a sequence, up to 512; for GPT-2 up to 1024, for BigBird up to 4096"},
        {"--layers", &layers, NULL, NULL, "number of layers, if not the model's own"},
        {"--vit", NULL, &size, NULL, "SIZE of a vision transformer, such as L/16, instead of DistilBERT"},
        {"--big-bird", NULL, &big_bird, NULL,
         "ATTENTION of BigBird-base, block_sparse or original_full, without dropout, instead of DistilBERT"},
        {"--gpt2", NULL, NULL, &gpt2, "GPT-2 of 124 million parameters, instead of DistilBERT"},
        {"--pixels", &side, NULL, NULL, "height and width of the images for --vit"},
        {"--steps", &steps, NULL, NULL,
         "number of measured steps; with --batches at least one for each batch"},
        {"--warm", &warm, NULL, NULL, "steps before the measured ones"},
        {"--device", NULL, &device, NULL, "KIND: cpu or cuda (TINYTRAIN_DEVICE, else cpu)"},
        {"--recompute", NULL, &recompute, NULL, "R: none, cheap (the default), attention or blocks"},
        {"--tune", NULL, &tune, NULL,
         "T: off (the default), on or a FILE with the choices of matrix products"},
        {"--matmul", NULL, &matmul, NULL, "M: fp32 (the default), tf32 or, on a GPU, fp8"},
        {"--ops", NULL, NULL, &ops,
         "on a GPU: also measure the time of each op, with events around each launch"},
        {"--product", &product, NULL, NULL,
         "rows, columns and depth of the matrix products that measure a GPU's peak"},
        {"--peaks", NULL, NULL, &only_peaks, "measure the device's peaks only, without steps"},
        {"--estimate", NULL, NULL, &estimate, "forecast the time of a step from measured costs"},
        {"--batches", NULL, &path, NULL,
         "FILE.safetensors of token ids to train on, instead of --seqs and --length"},
        {"--no-dropout", NULL, NULL, &no_dropout, "train without dropout"},
        {"--turns", NULL, NULL, &turns, "run and report a step for each line of standard input"},};
    tt_context *ctx = bench_open(argc, argv, flags, TT__COUNT(flags));
    tt_bert_config c = tt_bert_config_default(big_bird ? TT_BIG_BIRD : TT_DISTILBERT);
    tt_vit_config v = tt_vit_config_default(size);
    tt_lm_config g = tt_lm_config_default("gpt2");
    tt_bert m;
    tt_vit vit;
    tt_lm lm;
    tt_stats s;
    bench_batches all = {0, 0, 0, NULL};
    char name[128];
    memset(&m, 0, sizeof m);
    memset(&vit, 0, sizeof vit);
    memset(&lm, 0, sizeof lm);
    if (!device || !*device) device = getenv("TINYTRAIN_DEVICE");
    if (!device || !*device) device = "cpu";
    if (tt_device_text(ctx, device, NULL, 0) != TT_OK) bench_die("%s", tt_error(ctx));
    bool gpu = strcmp(device, "cuda") == 0;
    if (ops && !gpu)
        bench_die("--ops is for a GPU, because on the CPU every run times its ops: leave it out");
    if (only_peaks) return peaks(gpu, product), bench_close(), 0;
    double peak = gpu ? gpu_peak(bench.precision, product) : 0;
    v.image_size = side;
    v.classes = 2;
    if (layers) c.layers = v.layers = g.layers = layers;
    if ((size != NULL) + gpt2 + (big_bird != NULL) > 1)
        bench_die("--vit, --gpt2 and --big-bird name different models: leave all but one out");
    if (big_bird || no_dropout) c.dropout = c.attention_dropout = c.classifier_dropout = 0;
    if (no_dropout) v.dropout = v.attention_dropout = 0;
    if (no_dropout) g.embedding_dropout = g.dropout = g.attention_dropout = 0;
    if (big_bird) c.block_sparse = strcmp(big_bird, "block_sparse") == 0;
    if (big_bird && !c.block_sparse && strcmp(big_bird, "original_full") != 0)
        bench_die("--big-bird is '%s', but must be block_sparse or original_full", big_bird);
    const tt_status made = size ? tt_vit_new(ctx, &vit, &v)
                         : gpt2 ? tt_lm_new(ctx, &lm, &g)
                         : tt_bert_new(ctx, &m, &c);
    if (made != TT_OK) bench_die("%s", tt_error(ctx));
    tt_model model = size ? tt_vit_classifier(&vit) : gpt2 ? tt_lm_model(&lm) : tt_bert_model(&m);
    const int positions = gpt2 ? g.max_positions : c.max_positions;
    if (!size && length > positions)
        bench_die("--length is %d, but the model has only %d positions", length, positions);
    const int image_bytes = v.image_size * v.image_size * v.channels;
    if (size && path) read_images(ctx, &all, path, image_bytes, model.max_length);
    else if (size) random_images(&all, seqs, image_bytes, model.max_length);
    else if (path) read_batches(ctx, &all, path, positions);
    else bench_random_batch(&all, seqs, length, gpt2 ? g.vocab_size : c.vocab_size);
    tt_array *targets = gpt2 ? next_tokens(&all) : NULL;
    if (steps < all.n) steps = all.n;

    double before = gpu ? (double)bench_gpu_used() : bench_resident_peak();
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.compile.precision = bench.precision;
    o.compile.device = device;
    if (recompute) o.compile.recompute = recompute;
    o.compile.tune = tune;
    if (matmul) o.compile.matmul = matmul;
    o.max_seqs = all.max_seqs;
    o.max_tokens = all.max_rows;
    double planned = estimate ? seconds_by_plan(ctx, &model, o) : 0;
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) bench_die("%s", tt_error(ctx));

    const int launches = tt_trainer_program(t)->built.t->n_code;
    double *fastest = (double *)malloc((size_t)launches * sizeof *fastest), fastest_step = 0;
    if (!fastest) bench_die("out of memory");
    for (int k = 0; k < launches; k++) fastest[k] = INFINITY;
    if (estimate && !gpu) ctx->profile = fastest;
    const tt_program *program = tt_trainer_program(t);
    const bool waits = !gpu || turns; /* if false, a step begins while one is in flight, as in tt_fit */
    double seconds = 0, tokens = 0, step_flops = 0, first = 0, part[PARTS] = {0}, *speeds = NULL;
    bench_cost by_op[TT__OP_COUNT];
    memset(by_op, 0, sizeof by_op);
    for (int step = 0; turns ? bench_turn() : step < warm + steps; step++) {
        /* The warm-up steps take the last batches, so that the measured steps begin with batch 0. */
        const tt_batch *b = &all.batch[(step + all.n * warm - warm) % all.n];
        bench_begin_run();
        if (!waits && step == warm && tt_trainer_wait(t, NULL) != TT_OK) bench_die("%s", tt_error(ctx));
        const int64_t reads = program->reads;
        double begin = tt__seconds();
        if (tt_train_batch(t, b, waits ? &s : NULL, &updated) != TT_OK) bench_die("%s", tt_error(ctx));
        if (!waits) s.flops = program->reads > reads ? program->done.flops : 0;
        if (!waits && step == warm + steps - 1) {
            const int64_t last = program->reads;
            if (tt_trainer_wait(t, NULL) != TT_OK) bench_die("%s", tt_error(ctx));
            s.flops += program->reads > last ? program->done.flops : 0;
        }
        double now = tt__seconds() - begin;
        if (turns) bench_row("step", now, "s", 0);
        if (step == 0) first = now;
        if (step < warm) continue;
        speeds = (double *)realloc(speeds, (size_t)(done + 1) * sizeof *speeds);
        if (!speeds) bench_die("out of memory");
        speeds[done++] = b->rows / now;
        seconds += now;
        tokens += b->rows;
        step_flops += s.flops;
        part[REST] += now;
        for (int op = 0; op < TT__OP_COUNT; op++) {
            by_op[op] = bench_sum(by_op[op], bench.run[op]);
            part[part_of(op)] += bench.run[op].seconds;
            part[REST] -= bench.run[op].seconds;
        }
    }
    ctx->profile = NULL;
    for (int k = 0; k < launches; k++) fastest_step += isfinite(fastest[k]) ? fastest[k] : 0;
    double grown = (gpu ? (double)bench_gpu_used() : bench_resident_peak()) - before,
           plan = (double)tt_program_plan(tt_trainer_program(t)).bytes;
    if (done) {
        qsort(speeds, (size_t)done, sizeof *speeds, bench_ascending);
        bench_row("tokens a second, mean", tokens / seconds, "tokens/s", 0);
        bench_row("tokens a second, median step", speeds[done / 2], "tokens/s", 0);
        bench_row("tokens a second, best step", speeds[done - 1], "tokens/s", 0);
        bench_row("time of a step, mean", 1e3 * seconds / done, "ms", 0);
        if (tune) bench_row("time of the first step, with that of tuning", 1e3 * first, "ms", 0);
        bench_row("FLOPs of a step, mean", step_flops / done / 1e12, "TFLOP", 0);
        if (!gpu) bench_flops_row("matmuls and attention, whole step, mean", step_flops / seconds);
        if (estimate) planned = (planned + seconds_by_plan(ctx, &model, o)) / 2;
        if (estimate) bench_row("time of a step, by the plan", 1e3 * planned, "ms", 0);
        if (estimate)
            bench_row("plan / median step", planned * speeds[done / 2] / (tokens / done), "times", 0);
        if (estimate && !gpu)
            bench_row("plan / step of the fastest launches", planned / fastest_step, "times", 0);
    }
    if (gpu && done) {
        double after = gpu_peak(bench.precision, product);
        if (size) bench_row("images a second, mean", tokens / model.max_length / seconds, "images/s", 0);
        bench_row("matmuls and attention, whole step, mean", step_flops / seconds / 1e12, "TFLOP/s",
                  fmax(peak, after));
        bench_row("matrix products of the peak, before the steps", peak, "TFLOP/s", 0);
        bench_row("matrix products of the peak, after the steps", after, "TFLOP/s", 0);
    }
    bench_row("planned memory", plan / 1e6, "MB", 0);
    bench_row(gpu ? "device memory grew by" : "resident memory grew by", grown / 1e6, "MB", 0);
    bench_row("peak resident memory", bench_resident_peak() / 1e6, "MB", 0);
    for (int k = 0; k < PARTS && done && !gpu; k++) {
        double ms = 1e3 * part[k] / done, share = 100 * part[k] / seconds;
        if (!bench.json) {
            printf("%-48s %10.4g ms        %5.1f%% of the step\n", part_names[k], ms, share);
            continue;
        }
        snprintf(name, sizeof name, "a step's %s", part_names[k]);
        bench_row(name, ms, "ms", 0);
        snprintf(name, sizeof name, "share of a step's %s", part_names[k]);
        bench_row(name, share, "%", 0);
    }
    for (int op = 0; op < TT__OP_COUNT && done; op++) {
        if (by_op[op].seconds == 0) continue;
        snprintf(name, sizeof name, "%s, time of a step", tt__ops[op].name);
        bench_row(name, 1e3 * by_op[op].seconds / done, "ms", 0);
        if (by_op[op].flops > 0) bench_cost_row(tt__ops[op].name, by_op[op]);
    }
    if (ops) time_ops(ctx, t, &all.batch[0]);
    for (int k = 0; k < all.n && targets; k++) free((void *)(uintptr_t)targets[k].data);
    free(targets);
    bench_free_batches(&all);
    free(speeds);
    free(fastest);
    tt_trainer_free(t);
    tt_bert_free(&m);
    tt_vit_free(&vit);
    tt_lm_free(&lm);
    bench_close();
    return 0;
}
