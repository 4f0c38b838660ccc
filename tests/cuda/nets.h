/* The nets that tests of CUDA train, on the device and on the CPU; checks after a failed call of CUDA. */
#pragma once

/* Starts the emulator with `devices` devices of `memory` bytes each; a GPU stays as it is. */
static void start(int devices, size_t memory, uint64_t seed)
{
#ifdef TT_EMULATE
    emu_configure(devices, memory, 1, seed);
#else
    (void)devices;
    (void)memory;
    (void)seed;
#endif
}

#ifdef TT_EMULATE
/* Selects the order, by number, in which the emulator runs work that CUDA leaves unordered. On a GPU the
   number has no effect. */
enum { SCHEDULERS = EMU_SCHEDULERS };
static void schedule(int number) { emu_set_scheduler((emu_scheduler)number); }
#else
enum { SCHEDULERS = 1 };
static void schedule(int number) { (void)number; }
#endif

/* ----------------------------------------------------------------------------------------------- training */

enum {
    STEPS = 20,
    MAX_SEQS = 5,
    MAX_ROWS = 48,
    IMAGE = 12,
    IMAGE_BYTES = IMAGE * IMAGE * 3,
    VOCAB = 50,
    CLASSES = 3
};

typedef struct made_batch { /* the arrays that a tt_batch points to */
    tt_batch b;
    int32_t ids[MAX_ROWS], positions[MAX_ROWS], types[MAX_ROWS], seq_start[MAX_SEQS + 1],
        labels[MAX_SEQS];
    int64_t index[MAX_SEQS];
    uint8_t pixels[MAX_SEQS * IMAGE_BYTES];
} made_batch;

/* Makes micro-batch `number`: one of two shapes in turn, with different contents. */
static void make_batch(made_batch *m, int number, bool images, bool last)
{
    static const int lengths[2][MAX_SEQS] = {{9, 5, 17, 3, 11}, {14, 8, 12, 0, 0}};
    uint64_t random = 0x9E3779B97F4A7C15ull * (uint64_t)(number + 1);
    memset(m, 0, sizeof *m);
    m->b.seqs = number % 2 ? 3 : MAX_SEQS;
    for (int s = 0; s < m->b.seqs; s++) {
        m->labels[s] = (int32_t)(test_random(&random) % CLASSES);
        for (int k = 0; k < lengths[number % 2][s] && !images; k++) {
            m->ids[m->b.rows] = (int32_t)(test_random(&random) % VOCAB);
            m->positions[m->b.rows++] = k;
        }
        m->seq_start[s + 1] = m->b.rows;
    }
    for (int k = 0; k < m->b.seqs * IMAGE_BYTES && images; k++) m->pixels[k] = (uint8_t)test_random(&random);
    m->b.labels = m->labels;
    m->b.index = m->index;
    m->b.last_of_step = last;
    if (images) {
        m->b.pixels = m->pixels;
        m->b.image_bytes = IMAGE_BYTES;
    } else {
        m->b.ids = m->ids;
        m->b.positions = m->positions;
        m->b.types = m->types;
        m->b.seq_start = m->seq_start;
    }
}

typedef struct outcome { /* results of a training run */
    double loss[STEPS], norm[STEPS];
    float *parameters; /* all parameters, one after another; the caller frees them */
    size_t n;
} outcome;

typedef struct trained {
    test_allocator a;
    tt_context *ctx;
    tt_bert text;
    tt_vit vision;
    tt_trainer *trainer;
} trained;

static const char *offload, *update, *precision, *residual; /* options of all programs */
static const char everything[] = "optimizer,gradients,parameters,activations";

static bool open_training(trained *t, const char *device, bool images, float dropout, bool accumulate)
{
    tt_train_options o = tt_train_options_default();
    memset(t, 0, sizeof *t);
    t->ctx = test_open(&t->a);
    if (images) {
        tt_vit_config c = tt_vit_config_default("Ti/4");
        c.image_size = IMAGE;
        c.hidden_size = 36;
        c.heads = 3;
        c.layers = 2;
        c.intermediate_size = 52;
        c.classes = CLASSES;
        c.initializer_range = 0.2f;
        c.dropout = c.attention_dropout = dropout;
        if (!CHECK(tt_vit_new(t->ctx, &t->vision, &c) == TT_OK)) return false;
    } else {
        tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
        c.vocab_size = VOCAB;
        c.hidden_size = 24;
        c.heads = 3;
        c.layers = 2;
        c.intermediate_size = 40;
        c.max_positions = 20;
        c.classes = CLASSES;
        c.initializer_range = 0.2f;
        c.dropout = c.attention_dropout = c.classifier_dropout = dropout;
        if (!CHECK(tt_bert_new(t->ctx, &t->text, &c) == TT_OK)) return false;
    }
    o.schedule.kind = TT_CONSTANT;
    o.schedule.lr = 1e-3f;
    o.compile.optimizer.clip_norm = 1;
    /* With a smaller eps, parameters whose gradients are only rounding errors, such as keys' biases, would
       take full steps. */
    o.compile.optimizer.eps = 1e-5f;
    o.compile.device = device;
    o.compile.accumulate = accumulate;
    o.max_seqs = MAX_SEQS;
    o.max_tokens = images ? 0 : MAX_ROWS;
    o.compile.offload = offload;
    if (precision) o.compile.precision = precision;
    o.compile.residual = residual;
    o.compile.update = update;
    tt_model model = images ? tt_vit_classifier(&t->vision) : tt_bert_model(&t->text);
    t->trainer = tt_trainer_new(t->ctx, &model, &o);
    if (!t->trainer) CHECK_ERROR(t->ctx, TT_OK, "a trainer");
    return t->trainer != NULL;
}

static void close_training(trained *t)
{
    tt_trainer_free(t->trainer);
    tt_bert_free(&t->text);
    tt_vit_free(&t->vision);
    TEST_CLOSE(t->ctx, &t->a);
}

static tt_status one_step(trained *t, int step, bool images, bool accumulate, tt_stats *stats)
{
    made_batch m;
    tt_status status = TT_OK;
    for (int micro = 0; micro <= (int)accumulate && status == TT_OK; micro++) {
        make_batch(&m, accumulate ? 2 * step + micro : step, images, micro == (int)accumulate);
        status = tt_train_batch(t->trainer, &m.b, stats, NULL);
    }
    return status;
}

static bool train_on(outcome *to, const char *device, bool images, float dropout, bool accumulate)
{
    trained t;
    tt_stats stats;
    memset(to, 0, sizeof *to);
    memset(&stats, 0, sizeof stats);
    bool ok = open_training(&t, device, images, dropout, accumulate);
    for (int k = 0; k < STEPS && ok; k++) {
        ok = one_step(&t, k, images, accumulate, &stats) == TT_OK;
        if (!ok) CHECK_ERROR(t.ctx, TT_OK, "a step");
        to->loss[k] = stats.loss;
        to->norm[k] = stats.grad_norm;
    }
    for (int k = 0; k < t.ctx->n_params; k++) to->n += (size_t)t.ctx->params[k]->size;
    to->parameters = (float *)malloc(to->n * sizeof *to->parameters);
    for (int k = 0; k < t.ctx->n_params && ok; k++) {
        to->n = k ? to->n : 0;
        ok = CHECK(tt_param_get(t.ctx->params[k], to->parameters + to->n) == TT_OK);
        to->n += (size_t)t.ctx->params[k]->size;
    }
    close_training(&t);
    return ok;
}

/* Compares twenty steps on the CPU and on CUDA: losses within a relative 1e-5, parameters within 2e-5 (a
   fiftieth of the largest change of one step). */
static void compare_with_cpu(bool images, float dropout, bool accumulate)
{
    outcome cpu = {{0}, {0}, NULL, 0}, cuda = cpu;
    double worst = 0;
    start(1, (size_t)64 << 20, 3);
    if (train_on(&cpu, "cpu", images, dropout, accumulate) &&
        train_on(&cuda, "cuda", images, dropout, accumulate) && CHECK(cpu.n == cuda.n)) {
        for (int k = 0; k < STEPS; k++) {
            CHECK_NEAR(cuda.loss[k], cpu.loss[k], 1e-5 * cpu.loss[k]);
            CHECK_NEAR(cuda.norm[k], cpu.norm[k], 1e-4 * cpu.norm[k]);
        }
        /* Training changes the loss. */
        CHECK(cpu.loss[0] > 0.5 && fabs(cpu.loss[STEPS - 1] - cpu.loss[STEPS - 3]) > 1e-3);
        for (size_t k = 0; k < cpu.n; k++) {
            double error = fabs((double)cuda.parameters[k] - cpu.parameters[k]);
            if (!(error <= worst) && !isnan(worst)) worst = error;
        }
        CHECK_NEAR(worst, 0, 2e-5);
    }
    free(cpu.parameters);
    free(cuda.parameters);
#ifdef TT_EMULATE
    /* Most steps replay a graph, for both shapes of a batch. */
    CHECK(emu_get_counts().graph_launches >= (accumulate + (update ? 1 : 2)) * (STEPS - 6));
#endif
}

/* ----------------------------------------------------------------------------------------- small programs */

enum {
    FAULT = 999 /* cudaErrorUnknown */,
    LOST = 719 /* cudaErrorLaunchFailure, after which all calls fail */
};

typedef struct small_net {
    tt_tape *t;
    tt_value x, y, ids, out;
    tt_program *p;
    tt_param *w, *table;
} small_net;

/* Results of a run of a small program: losses of the steps, the last output, and a parameter. */
typedef struct small_result { double loss[4]; float out[6 * 5], w[5 * 4]; } small_result;

enum { SMALL_ROWS = 200, USUAL_ROWS = 6 };

/* Sets inputs of `rows` rows, whose contents depend on `number`. */
static tt_status small_set(small_net *n, int rows, int number)
{
    float x[SMALL_ROWS * 4];
    int32_t y[SMALL_ROWS], ids[SMALL_ROWS];
    for (int k = 0; k < rows * 4; k++) x[k] = (float)((k + number) * 7 % 11) / 11 - 0.4f;
    for (int k = 0; k < rows; k++) { y[k] = (k + number) * 3 % 5; ids[k] = (k + number) % 3; }
    tt_status status = tt_set(n->p, n->x, x, rows);
    if (status == TT_OK) status = tt_set(n->p, n->y, y, rows);
    return status == TT_OK ? tt_set(n->p, n->ids, ids, rows) : status;
}

static tt_status small_step(small_net *n, int step, tt_stats *stats)
{
    tt_status status = small_set(n, step == 3 ? 4 : USUAL_ROWS, 0);
    return status == TT_OK ? tt_step(n->p, 0.1f, stats) : status;
}

static tt_status small_open(tt_context *ctx, small_net *n, bool accumulate)
{
    static const int64_t dims[2] = {5, 4}, table[2] = {3, 4}, four = 4, five = 5;
    const tt_init normal = {TT_INIT_NORMAL, 0.5f}, ones = {TT_INIT_ONES, 0}, zeros = {TT_INIT_ZEROS, 0};
    tt_compile_options o = tt_compile_options_default();
    memset(n, 0, sizeof *n);
    n->t = tt_tape_new(ctx);
    int64_t rows = tt_axis(n->t, "rows", SMALL_ROWS);
    n->w = tt_param_new(ctx, "w", 2, dims, normal);
    n->table = tt_param_new(ctx, "table", 2, table, normal);
    n->x = tt_input(n->t, "x", TT_F32, rows, 4);
    n->y = tt_input(n->t, "y", TT_I32, rows, 1);
    n->ids = tt_input(n->t, "ids", TT_I32, rows, 1);
    tt_value h = tt_add(n->t, n->x, tt_embedding(n->t, n->ids, n->table));
    h = tt_layernorm(n->t, h, tt_param_new(ctx, "norm", 1, &four, ones), NULL, 1e-5f);
    n->out = tt_linear(n->t, tt_gelu(n->t, h), n->w, tt_param_new(ctx, "b", 1, &five, zeros));
    tt_output(n->t, n->out);
    o.device = "cuda";
    o.accumulate = accumulate;
    o.optimizer.clip_norm = 1;
    o.offload = offload;
    o.update = update;
    n->p = tt_compile(n->t, tt_cross_entropy(n->t, n->out, n->y, NULL), &o);
    return n->p ? TT_OK : tt_error_code(ctx);
}

static void small_close(small_net *n)
{
    tt_program_free(n->p);
    tt_tape_free(n->t);
}

#ifdef TT_EMULATE
static bool reads_later; /* small_run reads no step's results before the next step begins */

/* Opens, compiles, allocates, takes four steps, and reads the results. Step 2 makes a graph, step 3 replays
   the graph, and step 4 has another number of rows. */
static tt_status small_run(tt_context *ctx, small_net *n, small_result *to)
{
    tt_stats stats;
    tt_status status = small_open(ctx, n, false);
    for (int k = 0; k < 4 && status == TT_OK; k++) {
        status = small_step(n, k, reads_later ? NULL : &stats);
        if (!reads_later) to->loss[k] = stats.loss;
        else if (k > 0) to->loss[k - 1] = n->p->done.loss;
    }
    if (status == TT_OK && reads_later) {
        status = tt_wait(n->p, &stats);
        to->loss[3] = stats.loss;
    }
    if (status == TT_OK) status = tt_get(n->p, n->out, to->out, TEST_COUNT(to->out));
    return status == TT_OK ? tt_param_get(n->w, to->w) : status;
}

static void fault_failed(long n, long count, const char *what, const char *more)
{
    char text[1024];
    snprintf(text, sizeof text, "call %ld fails%s: %s: %.700s", n, count == 1 ? "" : ", and all after it",
             what, more);
    test__check(false, "test_cuda.c", 0, text);
}

/* Tells whether a message names the device, and the call or product that failed. */
static bool names_the_fault(const char *text)
{
    return strstr(text, "device 'cuda'") &&
           (strstr(text, "unknown error") || strstr(text, "a kernel failed") ||
            strstr(text, "cublasLtCreate") || strstr(text, "cuBLASLt"));
}

static void check_nothing_left(long n, long count)
{
    char left[256];
    if (emu_live_objects(left, sizeof left)) fault_failed(n, count, "left on the device", left);
}
#endif

/* ----------------------------------------------------------------------------------------- managed memory */

enum {
    DEEP_LAYERS = 6,
    DEEP_WIDTH = 64,
    DEEP_ROWS = 32,
    DEEP_STEPS = 4,
    LITTLE = 800 << 10, /* bytes of a small emulated device; a GPU always has AMPLE bytes */
    AMPLE = 16 << 20
};

typedef struct deep_net {
    test_allocator a;
    tt_context *ctx;
    tt_tape *t;
    tt_value x, target;
    tt_program *p;
} deep_net;

/* Opens a net whose parameters, gradients and state, with the resident workspace, exceed LITTLE bytes. */
static tt_status deep_open(deep_net *n, const char *memory, bool accumulate)
{
    static const int64_t dims[2] = {DEEP_WIDTH, DEEP_WIDTH}, width = DEEP_WIDTH;
    const tt_init normal = {TT_INIT_NORMAL, 0.1f}, zeros = {TT_INIT_ZEROS, 0};
    tt_compile_options o = tt_compile_options_default();
    memset(n, 0, sizeof *n);
    n->ctx = test_open(&n->a);
    n->t = tt_tape_new(n->ctx);
    n->x = tt_input(n->t, "x", TT_F32, DEEP_ROWS, DEEP_WIDTH);
    n->target = tt_input(n->t, "target", TT_F32, DEEP_ROWS, DEEP_WIDTH);
    tt_value h = n->x, none = {0};
    for (int k = 0; k < DEEP_LAYERS; k++) {
        char name[2][16];
        snprintf(name[0], sizeof name[0], "w.%d", k);
        snprintf(name[1], sizeof name[1], "b.%d", k);
        tt_param *w = tt_param_new(n->ctx, name[0], 2, dims, normal);
        h = tt_gelu(n->t, tt_linear(n->t, h, w, tt_param_new(n->ctx, name[1], 1, &width, zeros)));
    }
    o.device = "cuda";
    o.memory = memory;
    o.accumulate = accumulate;
    o.optimizer.clip_norm = 1;
    o.offload = offload;
    o.update = update;
    n->p = tt_compile(n->t, tt_mean_squared_error(n->t, h, n->target, none), &o);
    return n->p ? TT_OK : tt_error_code(n->ctx);
}

static void deep_close(deep_net *n)
{
    tt_program_free(n->p);
    tt_tape_free(n->t);
    TEST_CLOSE(n->ctx, &n->a);
}

static tt_status deep_step(deep_net *n, int step, bool accumulate, tt_stats *stats)
{
    float data[DEEP_ROWS * DEEP_WIDTH];
    tt_status status = TT_OK;
    for (int micro = 0; micro <= accumulate && status == TT_OK; micro++) {
        for (int k = 0; k < TEST_COUNT(data); k++) data[k] = (float)sin(k + 7 * step + 3 * micro);
        status = tt_set(n->p, n->x, data, DEEP_ROWS);
        if (status == TT_OK) status = tt_set(n->p, n->target, data, DEEP_ROWS);
        if (status == TT_OK && accumulate) status = tt_micro_step(n->p, NULL);
    }
    if (status != TT_OK) return status;
    return accumulate ? tt_update(n->p, 0.01f, stats) : tt_step(n->p, 0.01f, stats);
}

#ifndef TT_EMULATE
#define NEEDS_EMULATOR SKIP("only the emulator counts waits and makes calls fail")
#endif
