/* The CUDA backend as a whole: training beside the CPU's, waits of the host, and calls of CUDA that fail. On
   a GPU (TINYTRAIN_CUDA=1 make test) or on the emulator, which some of it needs. */
#ifndef TINYTRAIN_CUDA
#include <stdio.h>

int main(void) /* without the header, whose code takes a minute to compile */
{
    return puts("skip test_cuda: this build is without TINYTRAIN_CUDA\n0 checks, 1 skipped: 0 passed, 0 "
                "failed") < 0;
}

#else
#define TT__PIECES_FROM 8 /* what is small goes to the host's memory, too */
#define TT__FP8_FROM 0 /* and is read in fp8 */
static long loss_chunk = 256, loss_whole = 16 << 20;
#define TT__LOSS_CHUNK loss_chunk
#define TT__LOSS_WHOLE loss_whole
#define TINYTRAIN_IMPLEMENTATION
#ifdef TT_EMULATE
#define TT__BLOCK ((size_t)4096) /* of managed memory */
#endif
#include "tinytrain.h"
#include "test.h"
#ifdef TT_EMULATE
#include "emu_control.h"
#endif

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

/* The orders that the emulator takes of what CUDA leaves open, by number; a GPU has its own. */
#ifdef TT_EMULATE
enum { SCHEDULERS = EMU_SCHEDULERS };
static void schedule(int number) { emu_set_scheduler((emu_scheduler)number); }
#else
enum { SCHEDULERS = 1 };
static void schedule(int number) { (void)number; }
#endif

/* ----------------------------------------------------------------------------------------------- training */

enum {
    STEPS = 20,
    MOST_SEQS = 5,
    MOST_ROWS = 48,
    IMAGE = 12,
    IMAGE_BYTES = IMAGE * IMAGE * 3,
    VOCAB = 50,
    CLASSES = 3
};

typedef struct made_batch { /* what a tt_batch points to */
    tt_batch b;
    int32_t ids[MOST_ROWS], positions[MOST_ROWS], types[MOST_ROWS], seq_start[MOST_SEQS + 1],
        labels[MOST_SEQS];
    int64_t index[MOST_SEQS];
    uint8_t pixels[MOST_SEQS * IMAGE_BYTES];
} made_batch;

/* Micro-batch `number`: of one of two shapes in turn, with other contents each. */
static void make_batch(made_batch *m, int number, bool images, bool last)
{
    static const int lengths[2][MOST_SEQS] = {{9, 5, 17, 3, 11}, {14, 8, 12, 0, 0}};
    uint64_t random = 0x9E3779B97F4A7C15ull * (uint64_t)(number + 1);
    memset(m, 0, sizeof *m);
    m->b.seqs = number % 2 ? 3 : MOST_SEQS;
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

typedef struct outcome { /* of a training run */
    double loss[STEPS], norm[STEPS];
    float *parameters; /* one after another; to be freed */
    size_t n;
} outcome;

typedef struct trained {
    test_allocator a;
    tt_context *ctx;
    tt_bert text;
    tt_vit vision;
    tt_trainer *trainer;
} trained;

static const char *offload, *update, *precision, *residual; /* of all programs */
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
    /* Else elements whose gradient is rounding errors alone, as of keys' biases, take steps of full size. */
    o.compile.optimizer.eps = 1e-5f;
    o.compile.device = device;
    o.compile.accumulate = accumulate;
    o.max_seqs = MOST_SEQS;
    o.max_tokens = images ? 0 : MOST_ROWS;
    o.compile.offload = offload;
    if (precision) o.compile.precision = precision;
    o.compile.residual = residual;
    o.compile.update = update;
    tt_model model = images ? tt_vit_classifier(&t->vision) : tt_bert_classifier(&t->text);
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

/* Twenty steps with both: losses to 1e-5 relative, parameters to 2e-5, a fiftieth of what one step may
   change. */
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
        /* It is training. */
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
    /* Most runs are replays of both shapes. */
    CHECK(emu_get_counts().graph_launches >= (accumulate + (update ? 1 : 2)) * (STEPS - 6));
#endif
}

/* Indices reach a kernel only if they are in range, also where a view of an input reads them. */
TEST(indices_behind_a_view_are_checked)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int64_t dims[2] = {5, 8};
    tt_init zeros = {TT_INIT_ZEROS, 0};
    tt_param *table = tt_param_new(ctx, "table", 2, dims, zeros);
    tt_tape *t = tt_tape_new(ctx);
    tt_value first = tt_input(t, "first", TT_I32, 6, 1), pairs = tt_input(t, "pairs", TT_I32, 3, 2);
    tt_value rows = tt_embedding(t, tt_reshape(t, pairs, 6, 1), table), target = {0};
    tt_value loss = tt_mean_squared_error(t, rows, tt_embedding(t, first, table), target);
    tt_compile_options o = tt_compile_options_default();
    o.train = false;
    o.device = "cuda";
    tt_program *p = tt_compile(t, loss, &o);
    static const int32_t good[6] = {4, 0, 1, 2, 3, 4}, bad[6] = {0, 1, 5, 0, 0, 0};
    if (CHECK(p != NULL)) {
        CHECK(tt_set(p, first, good, 6) == TT_OK && tt_set(p, pairs, good, 3) == TT_OK &&
              tt_run(p, NULL) == TT_OK);
        CHECK(tt_set(p, first, good, 6) == TT_OK && tt_set(p, pairs, bad, 3) == TT_OK);
        CHECK(tt_run(p, NULL) == TT_ERR_ARGUMENT);
        CHECK(strstr(tt_error(ctx), "'pairs' has 5 in row 2, which is not in 0..4") != NULL);
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* A bias of so many outputs that, on the emulator, there is no room for a partial sum of each of them; the
   weight is frozen, so that no matrix product makes its gradient. */
TEST(bias_of_very_many_columns)
{
    enum { OUTPUTS = 140000, ROWS = 8 };
    float *b[2], *zeros = (float *)calloc((size_t)ROWS * OUTPUTS, sizeof(float));
    double worst = 0;
#ifdef TT_EMULATE
    emu_configure(1, (size_t)256 << 20, 1, 4);
    CHECK(OUTPUTS * sizeof(float) > TT__CUDA_RESIDENT);
#endif
    for (int on = 0; on < 2; on++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        const int64_t dims[2] = {OUTPUTS, 1}, outputs = OUTPUTS;
        const tt_init normal = {TT_INIT_NORMAL, 1};
        tt_param *w = tt_param_new(ctx, "w", 2, dims, normal);
        tt_param *bias = tt_param_new(ctx, "b", 1, &outputs, normal);
        CHECK(tt_param_freeze(ctx, "w", true) == 1);
        tt_tape *t = tt_tape_new(ctx);
        tt_value x = tt_input(t, "x", TT_F32, ROWS, 1), none = {0};
        tt_value y = tt_linear(t, x, w, bias), target = tt_input(t, "target", TT_F32, ROWS, OUTPUTS);
        tt_compile_options o = tt_compile_options_default();
        o.device = on ? "cuda" : "cpu";
        o.optimizer.kind = TT_SGD;
        tt_program *p = tt_compile(t, tt_mean_squared_error(t, y, target, none), &o);
        float data[ROWS];
        for (int k = 0; k < ROWS; k++) data[k] = (float)(k % 7) - 2;
        b[on] = (float *)calloc(OUTPUTS, sizeof(float));
        REQUIRE(p && b[on] && zeros);
        CHECK(tt_set(p, x, data, ROWS) == TT_OK && tt_set(p, target, zeros, ROWS) == TT_OK &&
              tt_step(p, OUTPUTS / 2.0f, NULL) == TT_OK);
        CHECK(tt_param_get(bias, b[on]) == TT_OK);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
    for (int k = 0; k < OUTPUTS; k++) {
        const double error = fabs((double)b[0][k] - b[1][k]);
        if (!(error <= worst) && !isnan(worst)) worst = error;
    }
    CHECK_NEAR(worst, 0, 2e-5);
    for (int on = 0; on < 2; on++) free(b[on]);
    free(zeros);
}

/* Kernels whose partial sums, or bits of rows, would not fit take so many columns or rows and refuse more. */
TEST(costs_of_a_gpu)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_costs costs;
    CHECK(tt_measure_costs(ctx, "cuda", &costs) == TT_OK);
    CHECK(tt__check_costs(ctx, &costs) == TT_OK);
    CHECK(tt_measure_costs(ctx, "cuda:15", &costs) == TT_ERR_DEVICE);
    CHECK_ERROR(ctx, TT_ERR_DEVICE, "device 'cuda:15'");
    TEST_CLOSE(ctx, &a);
}

static tt_value record_rows(void *user, tt_tape *t, int64_t n)
{
    const tt_value none = {0}, x = tt_input(t, "x", TT_F32, n, 1024);
    (void)user;
    return tt_mean_squared_error(t, tt_gelu(t, x), x, none);
}

TEST(largest_batch_of_what_is_free)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options o = tt_compile_options_default();
    o.train = false;
    o.device = "cuda";
    tt__crew *c = tt__find_devices(ctx, o.device);
    size_t available = 0;
    REQUIRE(c && tt__crew_open(ctx, c) == TT_OK);
    CHECK(c->kind->backend->available(c->device[0], &available) == TT_OK);
    const int64_t n = tt_largest_batch(ctx, record_rows, NULL, &o, (int64_t)1 << 30);
    CHECK(n > 1 && n < (int64_t)1 << 30);
    size_t bytes[2];
    for (int k = 0; k < 2; k++) {
        tt_tape *t = tt_tape_new(ctx);
        tt_program *p = tt_compile(t, record_rows(NULL, t, n + k), &o);
        REQUIRE(p != NULL);
        bytes[k] = tt_program_plan(p).bytes;
        tt_program_free(p);
        tt_tape_free(t);
    }
    CHECK(bytes[0] < available && 2 * bytes[1] > available); /* others may take some of it meanwhile */
    o.device = "cuda:15";
    CHECK(tt_largest_batch(ctx, record_rows, NULL, &o, 4) == 0);
    CHECK_ERROR(ctx, TT_ERR_DEVICE, "device 'cuda:15'");
    TEST_CLOSE(ctx, &a);
}

TEST(sizes_that_kernels_refuse)
{
    enum { LAYERNORM, RMSNORM, EMBEDDING, GATHER, SET, SET_LONG, CASES };
    static const char *const names[CASES] = {"layernorm_backward", "rmsnorm_backward", "embedding_backward",
                                             "gather_rows_backward", "set_rows_backward", "set_rows"};
    for (int k = 0; k < 2 * CASES; k++) {
        const int kind = k / 2;
        const bool wide = kind != SET_LONG;
        const int64_t most = wide ? 1 << 20 : 1 << 27, n = most + k % 2;
        const int64_t rows = wide ? 4 : n, cols = wide ? n : 1, dims[2] = {cols, 1}, table[2] = {3, cols};
        const tt_init ones = {TT_INIT_ONES, 0};
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_param *w = tt_param_new(ctx, "w", 2, dims, ones);
        tt_value x = tt_linear(t, tt_input(t, "x", TT_F32, rows, 1), w, NULL);
        tt_value index = tt_input(t, "index", TT_I32, 2, 1), y = {0}, none = {0};
        tt_param *row = tt_param_new(ctx, "row", 1, &cols, ones);
        if (kind == EMBEDDING || kind == GATHER)
            y = tt_embedding(t, tt_input(t, "ids", TT_I32, rows, 1),
                             tt_param_new(ctx, "table", 2, table, ones));
        if (kind == LAYERNORM) y = tt_layernorm(t, x, row, NULL, 1e-5f);
        else if (kind == RMSNORM) y = tt_rmsnorm(t, x, row, 1e-5f);
        else if (kind == GATHER) y = tt_gather_rows(t, y, index);
        else if (kind != EMBEDDING) y = tt_set_rows(t, x, index, row);
        tt_value target = tt_input(t, "target", TT_F32, kind == GATHER ? 2 : rows, cols);
        tt_compile_options o = tt_compile_options_default();
        char expected[128];
        o.device = "cuda";
        tt_program *p = tt_compile(t, tt_mean_squared_error(t, y, target, none), &o);
        snprintf(expected, sizeof expected, "device 'cuda' cannot run %s, ", names[kind]);
        if (!CHECK((p == NULL) == k % 2)) printf("%s %s\n", names[kind], tt_error(ctx));
        if (!p) {
            CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, expected);
            CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, wide ? "kernel for it takes at most 2^20 columns"
                                                      : "kernel for it takes at most 2^27 rows");
        }
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* GELU and its slope in f32 beside those in double precision. A step of SGD takes the gradient off what was
   there, so what is missing afterwards is the slope; the target makes the gradient of each result 1. */
TEST(gelu_is_as_exact_as_said)
{
    enum { N = 4096 };
    const int64_t dims[2] = {1, N};
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    static float from[N], after[N], result[N], target[N];
    test_allocator a;
#ifdef TT_EMULATE
    emu_configure(1, (size_t)16 << 20, 1, 4);
#endif
    for (int k = 0; k < N; k++) from[k] = (float)(k - N / 2) / 128;
    for (int slope = 0; slope < 2; slope++) {
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_param *p = tt_param_new(ctx, "x", 2, dims, zeros);
        tt_compile_options o = tt_compile_options_default();
        const tt_value none = {0}, to = tt_input(t, "target", TT_F32, 1, N);
        const tt_value x = slope ? tt_param_value(t, p) : tt_input(t, "in", TT_F32, 1, N), y = tt_gelu(t, x);
        o.device = "cuda";
        o.optimizer.kind = TT_SGD;
        o.optimizer.weight_decay = 0;
        o.train = slope;
        tt_program *run = tt_compile(t, slope ? tt_mean_squared_error(t, y, to, none) : y, &o);
        if (!run) printf("%s\n", tt_error(ctx));
        REQUIRE(run != NULL);
        if (!slope) {
            CHECK(tt_set(run, x, from, 1) == TT_OK && tt_run(run, NULL) == TT_OK &&
                  tt_get(run, y, result, N) == TT_OK);
        } else {
            for (int k = 0; k < N; k++) target[k] = result[k] - N / 2;
            CHECK(tt_param_set(p, from) == TT_OK && tt_set(run, to, target, 1) == TT_OK &&
                  tt_step(run, 1, NULL) == TT_OK && tt_param_get(p, after) == TT_OK);
        }
        double worst = 0;
        for (int k = 0; k < N; k++) {
            const double v = from[k], share = 0.5 * erfc(-v / sqrt(2));
            const double density = exp(-v * v / 2) * 0.3989422804014327;
            const double exact = slope ? share + v * density : v * share;
            const double got = slope ? v - after[k] : result[k];
            /* the target is rounded to an integer's size, and what the step leaves once more */
            const double error = fabs(got - exact) - (slope ? 1.3e-7 + 6e-8 * fabs(v) : 0);
            const double most = fabs(v) > 4 ? 1e-7 * fabs(v) : 3e-7;
            if (!(error / most <= worst)) worst = error / most;
        }
        CHECK(worst <= 1);
        if (!(worst <= 1) || getenv("TINYTRAIN_TEST_VERBOSE")) printf("  %.3f of the error\n", worst);
        tt_program_free(run);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(trains_distilbert_as_the_cpu_does) { compare_with_cpu(false, 0.1f, true); }
TEST(trains_vit_as_the_cpu_does) { compare_with_cpu(true, 0, false); }

/* Also where the CPU updates what the GPU trains, whatever else lies in the host's memory. */
TEST(trains_with_updates_in_the_hosts_memory)
{
    update = "host";
    compare_with_cpu(false, 0.1f, true);
    offload = "gradients,parameters";
    compare_with_cpu(true, 0, false);
    offload = update = NULL;
}

#ifdef TT_EMULATE

/* -------------------------------------------------------------------------------------------------- waits */

static emu_counts since(emu_counts before) /* what was counted since then */
{
    emu_counts now = emu_get_counts();
    now.host_syncs -= before.host_syncs;
    now.pageable_async -= before.pageable_async;
    now.allocations -= before.allocations;
    now.graph_launches -= before.graph_launches;
    now.kernels -= before.kernels;
    return now;
}

/* Once every shape has been met twice, a step whose results are asked for waits once, for these, and so does
   each such micro-batch; others wait for events alone. None allocates. */
TEST(a_step_waits_once_for_its_results)
{
    for (int accumulate = 0; accumulate < 2; accumulate++)
        for (int asked = 0; asked < 2; asked++) {
            trained t;
            tt_stats stats;
            emu_counts n;
            emu_configure(1, (size_t)64 << 20, 1, 4);
            if (!open_training(&t, "cuda", true, 0, accumulate)) { close_training(&t); return; }
            for (int k = 0; k < 4; k++) CHECK(one_step(&t, k, true, accumulate, &stats) == TT_OK);
            n = emu_get_counts();
            for (int k = 4; k < 8; k++)
                CHECK(one_step(&t, k, true, accumulate, asked ? &stats : NULL) == TT_OK);
            n = since(n);
            CHECK_NEAR((double)n.host_syncs, !asked ? 0 : accumulate ? 4 * 3 : 4, 0);
            /* A micro-batch each, and an update. */
            CHECK_NEAR((double)n.graph_launches, accumulate ? 4 * 3 : 4 * 2, 0);
            CHECK(n.pageable_async == 0 && n.allocations == 0 && n.kernels > 0);
            close_training(&t);
        }
}

#endif

/* -------------------------------------------------------------------------------------- the host's memory */

/* gelu(x) goes to the host's memory and comes back: instructions by hand, as no pass emits them yet. */
TEST(values_in_the_hosts_memory)
{
    test_allocator a;
    float x[160], y[160];
    start(1, (size_t)64 << 20, 5);
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_value in = tt_input(t, "x", TT_F32, 40, 4), h = tt_gelu(t, in);
    tt__shape shape = t->values[h.id].shape;
    int32_t away = tt__new_value(t, &shape, TT__TRANSIENT, "away"),
            back = tt__new_value(t, &shape, TT__TRANSIENT, "back");
    t->values[away].space = TT__HOST;
    const int32_t from[2] = {h.id, away}, to[2] = {away, back};
    for (int k = 0; k < 4; k++) {
        tt__instr *i = tt__append(t, k % 2 ? TT__OP_WAIT : TT__OP_COPY);
        i->stream = k % 2 ? 0 : 1;
        i->in[0] = k % 2 ? to[k / 2] : from[k / 2];
        if (k % 2) i->in[1] = from[k / 2];
        else i->out[0] = to[k / 2];
    }
    tt_value out = tt_scale(t, tt__handle(t, back), 2);
    tt_compile_options o = tt_compile_options_default();
    o.device = "cuda";
    o.train = false;
    tt_program *p = tt_compile(t, out, &o);
    REQUIRE(p != NULL);
    /* The value, of 640 bytes, in whole 256 bytes; twice x; the buffer of the arena. */
    CHECK_NEAR((double)tt_program_plan(p).host_bytes, 768 + 2 * 640 + 65536, 0);
    CHECK(tt_program_plan(p).instructions == 6);
    for (int run = 0; run < 4; run++) { /* from the second on a replay */
        for (int k = 0; k < 160; k++) x[k] = (float)k / 40 - 2 + (float)run;
        CHECK(tt_set(p, in, x, 40) == TT_OK && tt_run(p, NULL) == TT_OK && tt_get(p, out, y, 160) == TT_OK);
        for (int k = 0; k < 160; k++)
            CHECK_NEAR(y[k], x[k] * (1 + erf(x[k] / sqrt(2))), 2e-6 * (1 + fabs(x[k])));
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

#ifdef TT_EMULATE
/* All pinned memory of programs is in their plans: what is copied to the device, twice, what lies in the
   host's memory, and of the arena parameters there and a buffer, which programs that share one have in
   common. */
TEST(pinned_memory_is_what_was_planned)
{
    for (int k = 0; k < 8; k++) {
        const int accumulate = k % 2;
        trained t;
        emu_configure(1, (size_t)64 << 20, 1, 1);
        offload = k / 2 % 2 ? everything : NULL;
        update = k < 4 ? NULL : "host";
        if (!open_training(&t, "cuda", accumulate, 0, accumulate)) { close_training(&t); return; }
        CHECK(emu_pinned_bytes() == 0 && tt_allocate(t.trainer->train) == TT_OK);
        const tt_plan train = tt_program_plan(t.trainer->train), eval = tt_program_plan(t.trainer->eval);
        CHECK_NEAR((double)emu_pinned_bytes(), (double)train.host_bytes, 0);
        CHECK(tt_allocate(t.trainer->eval) == TT_OK && t.trainer->eval->arena == t.trainer->train->arena);
        const size_t shared = TT__BOUNCE + t.trainer->train->arena->on_host;
        CHECK_NEAR((double)emu_pinned_bytes(), (double)(train.host_bytes + eval.host_bytes - shared), 0);
        CHECK((shared > TT__BOUNCE) == (offload != NULL));
        CHECK((train.transfer_bytes > 0) == (offload || update));
        close_training(&t);
        CHECK(emu_pinned_bytes() == 0);
    }
    offload = update = NULL;
}

/* ---------------------------------------------------------------------------------------- several devices */

/* Programs on two devices of a context give what each gives on the first alone, however their steps
   alternate. */
TEST(programs_on_two_devices)
{
    enum { RUNS = 4, ROWS = 8, WIDTH = 16 };
    double loss[2][2][RUNS];
    float w[2][2][WIDTH];
    for (int both = 0; both < 2; both++) {
        test_allocator a;
        emu_configure(2, (size_t)64 << 20, 1, 6);
        tt_context *ctx = test_open(&a);
        tt_tape *t[2];
        tt_program *p[2] = {NULL, NULL};
        tt_value x[2], y[2], missing;
        for (int k = 0; k < 2; k++) {
            const int64_t dims[] = {1, WIDTH};
            const tt_init init = {TT_INIT_NORMAL, 1};
            tt_compile_options o = tt_compile_options_default();
            t[k] = tt_tape_new(ctx);
            x[k] = tt_input(t[k], "x", TT_F32, ROWS, WIDTH);
            y[k] = tt_input(t[k], "y", TT_F32, ROWS, 1);
            tt_param *param = tt_param_new(ctx, k ? "second" : "first", 2, dims, init);
            missing = tt_mean_squared_error(t[k], tt_linear(t[k], x[k], param, NULL), y[k],
                                            (tt_value){0});
            o.device = k && both ? "cuda:1" : "cuda:0";
            p[k] = tt_compile(t[k], missing, &o);
            REQUIRE(p[k] && tt_allocate(p[k]) == TT_OK && p[k]->arena->crew->index[0] == (k && both));
        }
        CHECK((p[0]->arena->crew == p[1]->arena->crew) == !both);
        for (int run = 0; run < 2 * RUNS; run++) {
            const int k = run % 2;
            float data[ROWS * WIDTH], target[ROWS];
            tt_stats stats;
            for (int i = 0; i < ROWS * WIDTH; i++) data[i] = (float)sin(i + run / 2 + 10 * k);
            for (int i = 0; i < ROWS; i++) target[i] = (float)(i % 3);
            CHECK(tt_set(p[k], x[k], data, ROWS) == TT_OK && tt_set(p[k], y[k], target, ROWS) == TT_OK);
            CHECK(tt_step(p[k], 0.01f, &stats) == TT_OK);
            loss[both][k][run / 2] = stats.loss;
        }
        for (int k = 0; k < 2; k++)
            CHECK(tt_param_get(tt_param_find(ctx, k ? "second" : "first"), w[both][k]) == TT_OK);
        /* A parameter is on one device; a device may be absent. */
        tt_compile_options o = tt_compile_options_default();
        if (both) {
            o.device = "cuda:0";
            CHECK(!tt_compile(t[1], missing, &o));
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                        "parameter 'second' lives on device 'cuda:1', where an earlier program has "
                        "put it, and this program is for 'cuda'");
            CHECK(tt_device_text(ctx, "cuda:1", NULL, 0) == TT_OK &&
                  tt_device_text(ctx, "cuda:2", NULL, 0) == TT_ERR_DEVICE);
            CHECK_ERROR(ctx, TT_ERR_DEVICE, "device 'cuda:2' cannot be opened: number 2 asked for, 2 found");
        }
        for (int k = 0; k < 2; k++) {
            tt_program_free(p[k]);
            tt_tape_free(t[k]);
        }
        TEST_CLOSE(ctx, &a);
    }
    CHECK(memcmp(loss[0], loss[1], sizeof loss[0]) == 0 && memcmp(w[0], w[1], sizeof w[0]) == 0);
}

/* A program in fp8 is refused where its own device, and no other, is too old. One that is not there is no
   reason: the program is planned. */
TEST(fp8_asks_its_own_device)
{
    static const struct { int devices, old; const char *device; bool refused; } cases[] = {
        {2, 0, "cuda:0", true}, {2, 0, "cuda:1", false}, {2, 1, "cuda:0", false}, {2, 1, "cuda:1", true},
        {2, 0, "cuda:2", false}, {0, -1, "cuda:0", false}, {0, -1, "cuda:1", false}};
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        test_allocator a;
        const int64_t dims[2] = {16, 16};
        const tt_init init = {TT_INIT_NORMAL, 1};
        char expected[64];
        emu_configure(cases[k].devices, (size_t)64 << 20, 1, 1);
        if (cases[k].old >= 0) emu_set_capability(cases[k].old, 8, 0);
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_value x = tt_input(t, "x", TT_F32, 16, 16);
        tt_compile_options o = tt_compile_options_default();
        o.device = cases[k].device;
        o.precision = "bf16-mixed";
        o.matmul = "fp8";
        o.train = false;
        tt_param *w = tt_param_new(ctx, "w", 2, dims, init);
        tt_value h = tt_gelu(t, tt_linear(t, x, w, NULL));
        tt_program *p = tt_compile(t, tt_scale(t, tt_linear(t, h, w, NULL), 2), &o);
        CHECK((p == NULL) == cases[k].refused);
        snprintf(expected, sizeof expected, "device '%s' cannot run linear, ",
                 k < 2 ? "cuda" : cases[k].device);
        if (!p) {
            CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, expected);
            CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, ": matmul 'fp8' needs compute capability 8.9");
        }
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

#endif

/* ---- fp8: a net of two blocks, whose Q, K, V read the same, trained in steps of four micro-batches */

enum { FP8_WIDTH = 32, FP8_HIDDEN = 64, FP8_ROWS = 40, FP8_STEPS = 6, FP8_MICROS = 4, FP8_SIZE = 2 * (4 *
       FP8_WIDTH * FP8_WIDTH + 2 * FP8_WIDTH * FP8_HIDDEN + FP8_HIDDEN + 2 * FP8_WIDTH) };
typedef struct fp8_run {
    const char *device, *matmul, *recompute, *offload;
    int zero, pipeline, saved; /* saved: after so many steps another process goes on; 0: none */
    /* Results */
    double loss[FP8_STEPS];
    float w[FP8_SIZE];
    int quantized, fp8, plain; /* instructions of a micro-batch; products of these in fp8 and not */
    int64_t skipped;
} fp8_run;

static bool fp8_overflows; /* programs are of 16-mixed, with a loss scale that is too large at first */

static tt_param *fp8_param(tt_context *ctx, int block, const char *name, int rows, int cols,
                           tt_init_kind kind)
{
    const tt_init init = {kind, 0.2f};
    const int64_t dims[] = {rows, cols};
    char full[64];
    snprintf(full, sizeof full, "block.%d.%s", block, name);
    return tt_param_new(ctx, full, rows > 1 ? 2 : 1, rows > 1 ? dims : dims + 1, init);
}

/* Ranks of a device each are on a GPU ranks that share it. */
static const char *ranks_here(const char *device)
{
#ifndef TT_EMULATE
    if (strcmp(device, "cuda*2") == 0) return "cuda:0,0";
    if (strcmp(device, "cuda*4") == 0) return "cuda:0,0,0,0";
#endif
    return device;
}

/* Steps [from, to) of the run, from the state in a file if `from` is not 0, to one if not all are done. */
static bool fp8_train(fp8_run *run, int from, int to)
{
    static const char path[] = "fp8_state.safetensors";
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options o = tt_compile_options_default();
    const int D = FP8_WIDTH;
    const int64_t rows = tt_axis(t, "rows", FP8_ROWS);
    const tt_value x = tt_input(t, "x", TT_F32, rows, D), target = tt_input(t, "target", TT_F32, rows, D);
    tt_value h = tt_linear(t, x, fp8_param(ctx, 0, "in", D, D, TT_INIT_NORMAL), NULL);
    /* Its gradient is read in fp8, then added to, and read again. */
    h = tt_add(t, tt_linear(t, h, fp8_param(ctx, 0, "mix", D, D, TT_INIT_NORMAL), NULL), h);
    for (int b = 0; b < 2; b++) {
        const tt_value n = tt_layernorm(t, h, fp8_param(ctx, b, "norm", 1, D, TT_INIT_ONES),
                                        fp8_param(ctx, b, "norm_bias", 1, D, TT_INIT_ZEROS), 1e-5f);
        const tt_value q = tt_linear(t, n, fp8_param(ctx, b, "q", D, D, TT_INIT_NORMAL), NULL);
        const tt_value k = tt_linear(t, n, fp8_param(ctx, b, "k", D, D, TT_INIT_NORMAL), NULL);
        const tt_value v = tt_linear(t, n, fp8_param(ctx, b, "v", D, D, TT_INIT_NORMAL), NULL);
        const tt_value all = tt_add(t, tt_mul(t, q, k), v);
        const tt_value up = tt_gelu(t, tt_linear(t, all, fp8_param(ctx, b, "up", FP8_HIDDEN, D,
                                                                   TT_INIT_NORMAL),
                                                 fp8_param(ctx, b, "up_bias", 1, FP8_HIDDEN,
                                                           TT_INIT_ZEROS)));
        h = tt_add(t, h, tt_linear(t, up, fp8_param(ctx, b, "down", D, FP8_HIDDEN, TT_INIT_NORMAL), NULL));
        tt_block_end(t, h);
    }
    const tt_value loss = tt_mean_squared_error(t, h, target, tt__handle(t, 0));
    o.device = ranks_here(run->device);
    o.precision = fp8_overflows ? "16-mixed" : "bf16-mixed";
    o.loss_scale.init = 0x1p21f;
    o.matmul = run->matmul ? run->matmul : "fp8";
    o.recompute = run->recompute;
    o.offload = run->offload;
    o.accumulate = true;
    o.optimizer.clip_norm = 1;
    o.parallel.groups = 2;
    o.parallel.zero = run->zero;
    o.parallel.reduce_micros = run->pipeline == 0;
    o.parallel.pipeline = run->pipeline;
    tt_program *p = tt_compile(t, loss, &o);
    tt_status status = p ? TT_OK : tt_error_code(ctx);
    if (p && from) status = tt_program_load(p, path);
    for (int m = from * FP8_MICROS; m < to * FP8_MICROS && status == TT_OK; m++) {
        const int data = p->arena->data, n = 1 + m * 7 % FP8_ROWS;
        float xs[FP8_ROWS * FP8_WIDTH], ys[FP8_ROWS * FP8_WIDTH];
        for (int e = 0; e < n * D; e++) xs[e] = (float)((e * 37 + m * 11) % 101) / 50 - 1;
        for (int e = 0; e < n * D; e++) ys[e] = xs[e / D * D + (e + 1) % D] * (m % 2 ? 4.0f : 1);
        tt_stats stats;
        status = tt_set_rank(p, m % data, x, xs, n);
        if (status == TT_OK) status = tt_set_rank(p, m % data, target, ys, n);
        if (status == TT_OK && m % data == data - 1) status = tt_micro_step(p, NULL);
        if (m % FP8_MICROS != FP8_MICROS - 1) continue;
        if (status == TT_OK) status = tt_update(p, 0.01f, &stats);
        run->loss[m / FP8_MICROS] = status == TT_OK ? stats.loss : 0;
        run->skipped = status == TT_OK ? stats.skipped : -1;
    }
    if (status == TT_OK && to < FP8_STEPS) status = tt_program_save(p, path);
    run->quantized = run->fp8 = run->plain = 0;
    for (int k = 0; p && k < p->built.t->n_code; k++) {
        const tt__instr *i = &p->built.t->code[k];
        run->quantized += i->op == TT__OP_QUANTIZE;
        if (tt__is(i, TT__PRODUCT)) *(tt__reads_fp8(p->built.t, i) ? &run->fp8 : &run->plain) += 1;
    }
    float *w = run->w;
    for (int k = 0; k < ctx->n_params && status == TT_OK; k++) {
        status = tt_param_get(ctx->params[k], w);
        w += tt_param_size(ctx->params[k]);
    }
    CHECK(status != TT_OK || w == run->w + FP8_SIZE);
    const bool ok = test__check(status == TT_OK, "test_cuda.c", __LINE__, tt_error(ctx));
    tt_program_free(p);
    tt_tape_free(t);
    if (to == FP8_STEPS && run->saved) remove(path);
    TEST_CLOSE(ctx, &a);
    return ok;
}

/* What products read is rounded once for all of them, the backward's too. Training converges as with bf16;
   its bits are the same with recompute, offload, several ranks and a restart, as scales are. */
TEST(training_in_fp8_keeps_its_bits)
{
    static fp8_run exact = {"cuda", "fp32", NULL, NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0};
    static fp8_run first = {"cuda", NULL, NULL, NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0};
    /* Of a pipeline, where sums of micro-batches are others: the first is of one stage. */
    static fp8_run staged = {"cuda", NULL, NULL, NULL, 0, 1, 0, {0}, {0}, 0, 0, 0, 0};
    static const fp8_run others[] = {
        {"cuda", NULL, "blocks", NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda", NULL, "cheap", NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda", NULL, "none", NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda", NULL, NULL, "activations", 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda", NULL, NULL, "optimizer,gradients,parameters", 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda*2", NULL, NULL, NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda*2", NULL, "blocks", NULL, 1, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda*2", NULL, NULL, NULL, 3, 0, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda", NULL, NULL, NULL, 0, 0, 1, {0}, {0}, 0, 0, 0, 0},
        {"cuda*2", NULL, "blocks", NULL, 3, 0, 4, {0}, {0}, 0, 0, 0, 0},
        {"cuda*2", NULL, NULL, NULL, 0, 2, 0, {0}, {0}, 0, 0, 0, 0},
        {"cuda*4", NULL, "blocks", NULL, 0, 2, 3, {0}, {0}, 0, 0, 0, 0}};
    for (int k = 0; k < 3; k++) {
        start(1, (size_t)64 << 20, 5);
        REQUIRE(fp8_train(k == 0 ? &exact : k == 1 ? &first : &staged, 0, FP8_STEPS));
    }
    CHECK(exact.quantized == 0 && exact.fp8 == 0);
    /* Of a block's 15 products: forward 5 weights and 3 other operands, as Q, K and V share one; backward the
       same, of which one is still there in fp8, and 5 gradients, each rounded once for two products. The two
       layers before have 7 more, as the gradient that both read changes in between. */
    CHECK(first.plain == 0 && first.fp8 == exact.plain && first.quantized == 2 * 20 + 7);
    /* A number of E4M3 errs by up to 2^-4 of itself, a product of two by up to 13%. A loss, of a sum of many,
       is nearer, and the mean over the steps within 2^-4: with 12 seeds on the emulator, where small changes
       of a start lead to other roundings, the worst step was 10.7% off and the worst mean 4.6%. */
    double mean = 0;
    for (int k = 0; k < FP8_STEPS; k++) {
        const double ratio = first.loss[k] / exact.loss[k];
        CHECK_NEAR(ratio, 1, (1 + 0x1p-4) * (1 + 0x1p-4) - 1);
        CHECK(first.loss[k] != exact.loss[k]);
        mean += ratio / FP8_STEPS;
    }
    CHECK_NEAR(mean, 1, 0x1p-4);
    CHECK(first.loss[FP8_STEPS - 1] < 0.2 * first.loss[0]);
    for (int k = 0; k < TEST_COUNT(others); k++) {
        static fp8_run run;
        run = others[k];
        const fp8_run *like = run.pipeline ? &staged : &first;
        start(4, (size_t)64 << 20, (uint64_t)(6 + k));
        char what[256];
        snprintf(what, sizeof what, "bits of %s, recompute %s, offload %s, zero %d, %d stages, saved after "
                 "step %d", run.device, run.recompute ? run.recompute : "default",
                 run.offload ? run.offload : "none", run.zero, run.pipeline, run.saved);
        bool ok = !run.saved || fp8_train(&run, 0, run.saved);
        if (run.saved) start(4, (size_t)64 << 20, (uint64_t)(60 + k));
        ok = ok && fp8_train(&run, run.saved, FP8_STEPS);
        const bool same = memcmp(run.loss, like->loss, sizeof run.loss) == 0;
        test__check(ok && same && memcmp(run.w, like->w, sizeof run.w) == 0, __FILE__, __LINE__, what);
    }
}

/* What overflows f16 becomes NaN in fp8, so that loss scaling skips the step, and is no part of the history:
   later steps train. */
TEST(overflows_in_fp8_are_skipped)
{
    static fp8_run run[2] = {{"cuda", NULL, "none", NULL, 0, 0, 0, {0}, {0}, 0, 0, 0, 0},
                             {"cuda", NULL, "blocks", NULL, 0, 0, 2, {0}, {0}, 0, 0, 0, 0}};
    fp8_overflows = true;
    for (int k = 0; k < 2; k++) {
        bool ok = true;
        for (int part = run[k].saved ? 0 : 1; part < 2 && ok; part++) {
            start(1, (size_t)64 << 20, (uint64_t)(k + 3));
            ok = fp8_train(&run[k], part ? run[k].saved : 0, part ? FP8_STEPS : run[k].saved);
        }
        CHECK(ok && run[k].skipped > 0 && run[k].skipped < FP8_STEPS - 1);
        CHECK(run[k].loss[FP8_STEPS - 1] < 0.8 * run[k].loss[0]);
        for (int e = 0; e < FP8_SIZE; e++) if (!isfinite(run[k].w[e])) CHECK(isfinite(run[k].w[e]));
    }
    CHECK(memcmp(run[0].loss, run[1].loss, sizeof run[0].loss) == 0);
    CHECK(memcmp(run[0].w, run[1].w, sizeof run[0].w) == 0);
    fp8_overflows = false;
}

#ifdef TT_EMULATE
/* The description names the device that was asked for, if it is there. */
TEST(the_device_that_is_described)
{
    test_allocator a;
    char text[8192];
    emu_configure(2, (size_t)64 << 20, 1, 1);
    emu_set_capability(1, 8, 6);
    tt_context *ctx = test_open(&a);
    CHECK(tt_device_text(ctx, "cuda", text, sizeof text) == TT_OK && strstr(text, "\nused: device 0"));
    CHECK(tt_device_text(ctx, "cuda:1", text, sizeof text) == TT_OK && strstr(text, "\nused: device 1"));
    CHECK(strstr(text, "\ndevice 0: emulated device, compute capability 9.0,") &&
          strstr(text, "\ndevice 1: emulated device, compute capability 8.6,"));
    CHECK(tt_device_text(ctx, "cuda:2", text, sizeof text) == TT_ERR_DEVICE && !strstr(text, "used:"));
    TEST_CLOSE(ctx, &a);
}

#endif

/* ----------------------------------------------------------------------------------------- small programs */

enum {
    FAULT = 999 /* cudaErrorUnknown */,
    LOST = 719 /* cudaErrorLaunchFailure, after which nothing works */
};

typedef struct small_net {
    tt_tape *t;
    tt_value x, y, ids, out;
    tt_program *p;
    tt_param *w, *table;
} small_net;

/* What a run of a small program gives: losses of its steps, its output and a parameter. */
typedef struct small_result { double loss[4]; float out[6 * 5], w[5 * 4]; } small_result;

enum { SMALL_ROWS = 200, USUAL_ROWS = 6 };

/* Inputs of so many rows; other numbers, other contents. */
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
static bool reads_later; /* small_run asks for no step's results before the next is begun */

/* Opens, compiles, allocates, takes four steps (the second makes a graph, the third replays it, the fourth
   has other rows), reads. */
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

/* A sentence that names the device, and the call or product that failed. */
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
    LITTLE = 800 << 10, /* bytes of a device; a GPU has an AMPLE amount */
    AMPLE = 16 << 20
};

typedef struct deep_net {
    test_allocator a;
    tt_context *ctx;
    tt_tape *t;
    tt_value x, target;
    tt_program *p;
} deep_net;

/* Layers whose parameters, gradients and state, with the resident workspace, are more than LITTLE bytes. */
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

/* Stands between a program and CUDA, and models a device of `room` bytes that lets go of the blocks that were
   used longest ago. */
typedef struct spy_device {
    tt__device_kind kind;
    const tt__arena *a;
    bool kept[1024], there[1024]; /* of each block */
    bool waits[1024];             /* came, and nothing has used it yet */
    long used[1024], now;
    size_t kept_bytes, waiting;
    long launches, faults, brought, most_waiting;
    bool prefetched;               /* since the last batch ended */
    long batch[1024], batches, arrived, turns; /* of prefetches: a block's, all, those waited for, waits */
    void *of_batch[TT__WINDOWS];               /* events, of the last ones */
} spy_device;
static spy_device spy;
static tt__backend spied;

static size_t spy_blocks(const void *memory, size_t bytes, size_t *end)
{
    const size_t first = (size_t)((const char *)memory - spy.a->memory[0]), size = tt__arena_size(spy.a, 0);
    *end = first < size && bytes ? (first + bytes - 1) / TT__BLOCK + 1 : 0;
    return first / TT__BLOCK;
}

/* A block comes, if it is not there, and is the one used last. */
static void spy_use(size_t b)
{
    size_t bytes = 0, oldest = 0;
    spy.used[b] = ++spy.now;
    spy.there[b] = true;
    for (size_t k = 0; k < spy.a->paging->blocks; k++) {
        if (!spy.there[k] || spy.kept[k]) continue;
        if (!bytes || spy.used[k] < spy.used[oldest]) oldest = k;
        bytes += TT__BLOCK;
    }
    if (bytes <= spy.a->paging->room) return;
    spy.there[oldest] = false;
    spy.waiting -= spy.waits[oldest] ? TT__BLOCK : 0;
    spy.waits[oldest] = false;
}

static tt_status spy_keep(tt__device *d, void *memory, size_t bytes)
{
    size_t end;
    for (size_t b = spy_blocks(memory, bytes, &end); b < end && spy.a->paging; b++) {
        spy.kept[b] = spy.there[b] = true;
        spy.kept_bytes += TT__BLOCK;
    }
    return tt__cuda_backend.keep(d, memory, bytes);
}

static tt_status spy_prefetch(tt__device *d, int stream, void *memory, size_t bytes)
{
    size_t end;
    CHECK(stream == TT__IN_STREAM);
    spy.brought += (long)bytes;
    spy.prefetched = true;
    for (size_t b = spy_blocks(memory, bytes, &end); b < end; b++) {
        CHECK(!spy.kept[b]);
        spy.waiting += spy.waits[b] ? 0 : TT__BLOCK;
        spy.waits[b] = true;
        spy.batch[b] = spy.batches + 1;
        spy_use(b);
    }
    if ((long)spy.waiting > spy.most_waiting) spy.most_waiting = (long)spy.waiting;
    return tt__cuda_backend.prefetch(d, stream, memory, bytes);
}

/* Copies between the memories may bring blocks themselves: their streams do not wait for prefetches. */
static void spy_load(const tt__mat *m, bool computes)
{
    size_t end;
    if (!m->data || !m->rows) return;
    const size_t bytes = (size_t)((m->rows - 1) * m->ld + m->cols) * tt_dtype_bytes(m->dtype);
    for (size_t b = spy_blocks(m->data, bytes, &end); b < end; b++) {
        spy.faults += computes && (!spy.there[b] || spy.batch[b] > spy.arrived);
        spy.waiting -= spy.waits[b] ? TT__BLOCK : 0;
        spy.waits[b] = false;
        if (!spy.kept[b]) spy_use(b);
    }
}

static tt_status spy_mark(tt__device *d, int stream, void **event)
{
    const tt_status status = tt__cuda_backend.mark(d, stream, event);
    if (stream == TT__IN_STREAM && spy.prefetched) spy.of_batch[spy.batches++ % TT__WINDOWS] = *event;
    spy.prefetched = spy.prefetched && stream != TT__IN_STREAM;
    return status;
}

static tt_status spy_after(tt__device *d, int stream, void *event)
{
    spy.turns += stream == TT__IN_STREAM;
    for (long k = spy.batches; k > 0 && k > spy.batches - TT__WINDOWS && stream == TT__COMPUTE_STREAM; k--)
        if (spy.of_batch[(k - 1) % TT__WINDOWS] == event && k > spy.arrived) spy.arrived = k;
    return tt__cuda_backend.after(d, stream, event);
}

static tt_status spy_launch(const tt__launch *l, int n)
{
    for (int k = 0; k < n && spy.a->paging; k++) {
        const tt__mat workspace = {l[k].workspace, TT_U8, 1, (int64_t)l[k].instr->workspace, 0};
        const bool computes = l[k].instr->stream == TT__COMPUTE_STREAM;
        for (int j = 0; j < TT__MAX_IN; j++) spy_load(&l[k].in[j], computes);
        for (int j = 0; j < TT__MAX_OUT; j++) spy_load(&l[k].out[j], computes);
        if (workspace.cols) spy_load(&workspace, computes);
        spy.launches++;
    }
    return tt__cuda_backend.launch(l, n);
}

static void spy_on(tt_program *p)
{
    memset(&spy, 0, sizeof spy);
    spied = tt__cuda_backend;
    spied.keep = spy_keep;
    spied.prefetch = spy_prefetch;
    spied.launch = spy_launch;
    spied.mark = spy_mark;
    spied.after = spy_after;
    spy.kind = *p->settings.kind;
    spy.kind.backend = &spied;
    spy.a = p->arena;
    p->settings.kind = p->arena->kind = p->arena->crew->kind = &spy.kind;
}

typedef struct deep_result {
    double loss[DEEP_STEPS];
    float w[DEEP_LAYERS][DEEP_WIDTH * DEEP_WIDTH];
} deep_result;

static void deep_run(const char *memory, size_t device, uint64_t seed, bool accumulate, deep_result *to)
{
    deep_net n;
    tt_stats stats;
    start(1, device, seed);
    memset(to, 0, sizeof *to);
    bool ok = CHECK(deep_open(&n, memory, accumulate) == TT_OK);
    if (ok) spy_on(n.p);
    for (int k = 0; k < DEEP_STEPS && ok; k++) {
        ok = CHECK(deep_step(&n, k, accumulate, &stats) == TT_OK);
        to->loss[k] = stats.loss;
    }
    if (!ok) printf("%s\n", tt_error(n.ctx));
    for (int k = 0; k < DEEP_LAYERS && ok; k++)
        CHECK(tt_param_get(n.ctx->params[2 * k], to->w[k]) == TT_OK);
    const tt__paging *g = ok ? n.p->arena->paging : NULL;
    CHECK((g != NULL) == (device == LITTLE));
    if (g) { /* what is kept and what comes fits, and is there when it is used */
        CHECK(tt_program_plan(n.p).bytes > device && g->room + spy.kept_bytes <= device);
        CHECK(spy.launches > 0 && spy.batches > 0 && spy.batches <= spy.turns);
        CHECK(offload ? spy.faults < spy.launches / 50 : spy.faults == 0); /* copies push a few blocks out */
        /* What copies have brought themselves no launch takes out of what waits. */
        CHECK(offload || spy.most_waiting <= (long)(g->room / (TT__WINDOWS + 1) * TT__WINDOWS));
        CHECK_NEAR((double)g->prefetched, (double)spy.brought, 0);
    }
#ifdef TT_EMULATE
    const emu_counts counts = emu_get_counts();
    const size_t bytes = g ? spy.kept_bytes : ok && strcmp(memory, "device") ? tt_program_plan(n.p).bytes : 0;
    CHECK_NEAR((double)counts.advised, (double)bytes, 0);
    CHECK_NEAR((double)counts.prefetched, g ? (double)spy.brought : 0, 0);
    CHECK((counts.prefetches > 0) == (device == LITTLE));
    CHECK((counts.graph_launches > 0) == (device != LITTLE));
#endif
    deep_close(&n);
#ifdef TT_EMULATE
    check_nothing_left(0, 1);
#endif
}

/* Managed memory gives the bits of the device's own, also with some in the host's. Where all fits, nothing is
   prefetched, and steps are graphs; where it does not, what an instruction needs has come before it. */
TEST(managed_memory_gives_the_same_bits)
{
    static const struct { const char *memory; size_t device; const char *offload; } runs[] = {
        {"device", AMPLE, NULL}, {"managed", AMPLE, NULL}, {"managed-oversubscribed", AMPLE, NULL},
        {"managed-oversubscribed", LITTLE, NULL}, {"managed-oversubscribed", LITTLE, NULL},
        {"device", AMPLE, everything}, {"managed-oversubscribed", LITTLE, "optimizer"}};
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        static deep_result first, other;
        for (int k = 0; k < TEST_COUNT(runs); k++) {
#ifndef TT_EMULATE
            if (runs[k].device == LITTLE) continue;
#endif
            offload = runs[k].offload;
            deep_run(runs[k].memory, runs[k].device, (uint64_t)(accumulate * 5 + k), accumulate,
                     k ? &other : &first);
            offload = NULL;
            CHECK(!k || memcmp(&first, &other, sizeof first) == 0);
        }
        CHECK(first.loss[0] > 0 && fabs(first.loss[DEEP_STEPS - 1] - first.loss[0]) > 1e-4);
    }
}

#ifdef TT_EMULATE
/* More than what is free is managed only if that is asked for by name. */
TEST(managed_memory_that_does_not_fit_is_refused)
{
    for (int k = 0; k < 2; k++) {
        deep_net n;
        size_t available, total;
        char expected[128];
        emu_configure(1, LITTLE, 1, 1);
        CHECK(deep_open(&n, k ? "managed-oversubscribed" : "managed", false) == TT_OK);
        CHECK(tt_allocate(n.p) == (k ? TT_OK : TT_ERR_MEMORY));
        available = total = LITTLE;
        snprintf(expected, sizeof expected, "the arena has %zu bytes of managed memory, and %zu of the "
                 "device's %zu are free", tt_program_plan(n.p).bytes, available, total);
        if (!k) CHECK_ERROR(n.ctx, TT_ERR_MEMORY, expected);
        if (!k) CHECK_ERROR(n.ctx, TT_ERR_MEMORY, "choose memory 'managed-oversubscribed'");
        deep_close(&n);
        check_nothing_left(k, 1);
    }
}

/* What has no managed memory, or not for this, says so. */
TEST(managed_memory_that_is_not_there)
{
    static const struct { const char *memory, *device, *error; } cases[] = {
        {"managed", "cpu", "memory 'managed' is for device 'cuda', and the device is 'cpu'"},
        {"managed-oversubscribed", "cpu*2", "memory 'managed-oversubscribed' is for device 'cuda', and"},
        {"managed", "cuda*2", "memory 'managed' is for one rank, and 'cuda*2' has 2: leave `memory` out"},
        {"unified", "cuda", "memory 'unified' is unknown: use device, managed or managed-oversubscribed"}};
    deep_net n;
    emu_configure(2, AMPLE, 1, 1);
    emu_set_managed(0, 0);
    CHECK(deep_open(&n, "managed", false) == TT_OK && tt_allocate(n.p) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(n.ctx, TT_ERR_UNSUPPORTED, "device 'cuda': emulated device and the host cannot use managed "
                "memory at the same time");
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        tt_compile_options o = tt_compile_options_default();
        o.train = false;
        o.memory = cases[k].memory;
        o.device = cases[k].device;
        tt_program *p = tt_compile(n.t, n.x, &o);
        CHECK(!p);
        CHECK_ERROR(n.ctx, TT_ERR_UNSUPPORTED, cases[k].error);
        tt_program_free(p);
    }
    tt_compile_options o = tt_compile_options_default();
    o.train = false;
    o.device = "cuda";
    o.share = n.p;
    CHECK(!tt_compile(n.t, n.x, &o));
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "`share` is a program with memory 'managed', and this one is with "
                "'device'");
    deep_close(&n);
    check_nothing_left(0, 1);
}

/* Each call that managed memory needs fails once: a sentence names it, and the next step is done. */
TEST(managed_memory_whose_calls_fail)
{
    static const struct { const char *call, *said; int nth; } cases[] = {
        {"cudaDeviceGetAttribute", "cudaDeviceGetAttribute", 1}, {"cudaMemGetInfo", "cudaMemGetInfo", 1},
        {"cudaMallocManaged", "cudaMallocManaged", 1}, {"cudaMemAdvise", "cudaMemAdvise", 1},
        {"cudaMemAdvise", "cudaMemAdvise", 2}, {"cudaMemPrefetchAsync", "cudaMemPrefetchAsync", 1},
        {"cudaMemPrefetchAsync", "cudaMemPrefetchAsync", 5}, {"cudaStreamCreate", "cudaStreamCreate", 2},
        {"cudaEventRecord", "cudaEventRecord", 4}, {"cudaEventRecord", "cudaEventRecord", 9},
        {"cudaStreamWaitEvent", "cudaStreamWaitEvent", 1}, {"cudaStreamWaitEvent", "cudaStreamWaitEvent", 4}};
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        deep_net n;
        tt_stats stats;
        emu_configure(1, LITTLE, 1, (uint64_t)k);
        CHECK(deep_open(&n, "managed-oversubscribed", false) == TT_OK);
        emu_inject_fault_into(cases[k].call, cases[k].nth, FAULT, 1);
        const tt_status status = deep_step(&n, 0, false, &stats);
        if (!CHECK(status == TT_ERR_DEVICE && names_the_fault(tt_error(n.ctx)) &&
                   strstr(tt_error(n.ctx), cases[k].said)))
            printf("%s %d: %s\n", cases[k].call, cases[k].nth, tt_error(n.ctx));
        CHECK(deep_step(&n, 1, false, &stats) == TT_OK && stats.loss > 0);
        deep_close(&n);
        check_nothing_left(k, 1);
    }
}

#endif
/* Micro-batches whose results nobody asks for do not wait, and the next inputs may not overwrite those that
   are still being copied: the same bits as with a wait after each, in every order that CUDA allows. */
TEST(micro_steps_that_do_not_wait_keep_their_inputs)
{
    for (int scheduler = 0; scheduler < SCHEDULERS; scheduler++) {
        float w[2][5 * 4];
        for (int asked = 0; asked < 2; asked++) {
            test_allocator a;
            small_net net;
            tt_stats stats;
            start(1, (size_t)16 << 20, 1);
            schedule(scheduler);
            tt_context *ctx = test_open(&a);
            bool ok = CHECK(small_open(ctx, &net, true) == TT_OK);
            /* Five micro-batches a step; each sets its inputs twice. */
            for (int k = 0; k < 3 * 5 && ok; k++) {
                ok = CHECK(small_set(&net, 5, k + 7) == TT_OK && small_set(&net, USUAL_ROWS, k) == TT_OK);
                ok = ok && CHECK(tt_micro_step(net.p, asked ? &stats : NULL) == TT_OK);
                if (k % 5 == 4) ok = ok && CHECK(tt_update(net.p, 0.1f, NULL) == TT_OK);
            }
            CHECK(tt_param_get(net.w, w[asked]) == TT_OK);
            small_close(&net);
            TEST_CLOSE(ctx, &a);
        }
        CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0);
    }
}

/* The same of steps: bits, statistics and counts are those of steps that are waited for, one step later, and
   what is copied for the next step while one is under way does not disturb that. */
TEST(steps_are_read_one_later)
{
    for (int scheduler = 0; scheduler < SCHEDULERS; scheduler++) {
        float w[2][5 * 4];
        tt_stats stats[2][6];
        for (int asked = 0; asked < 2; asked++) {
            test_allocator a;
            small_net net;
            start(1, (size_t)16 << 20, 7);
            schedule(scheduler);
            tt_context *ctx = test_open(&a);
            bool ok = CHECK(small_open(ctx, &net, false) == TT_OK);
            for (int k = 0; k < 6 && ok; k++) {
                ok = CHECK(small_set(&net, 5, k + 7) == TT_OK && small_set(&net, USUAL_ROWS, k) == TT_OK);
                ok = ok && CHECK(tt_step(net.p, 0.1f, asked ? &stats[1][k] : NULL) == TT_OK);
                CHECK(tt_program_steps(net.p) == k + 1 && net.p->unread.any == !asked);
                CHECK(net.p->reads == k + asked);
                if (!asked && k > 0) stats[0][k - 1] = net.p->done;
            }
            if (!asked) CHECK(tt_wait(net.p, &stats[0][5]) == TT_OK && !net.p->unread.any);
            CHECK(tt_param_get(net.w, w[asked]) == TT_OK);
            small_close(&net);
            TEST_CLOSE(ctx, &a);
        }
        CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0);
        for (int k = 0; k < 6; k++) {
            const tt_stats *x = &stats[0][k], *y = &stats[1][k];
            CHECK(x->loss == y->loss && x->targets == y->targets && x->correct == y->correct);
            CHECK(x->grad_norm == y->grad_norm && x->flops == y->flops && x->step == y->step);
        }
    }
}

/* A loss that is not finite is an error of whatever comes after its step, which does nothing else: the same
   sentence as at once, and parameters as they were. */
TEST(errors_are_read_one_later)
{
    static const char *const after[] = {"at once", "a step", "tt_wait", "tt_get", "tt_program_save"};
    char sentence[1100] = "";
    float x[USUAL_ROWS * 4] = {NAN};
    for (int k = 0; k < TEST_COUNT(after); k++) {
        test_allocator a;
        small_net net;
        tt_stats stats;
        float before[5 * 4], w[5 * 4], out[USUAL_ROWS * 5];
        tt_status status = TT_OK;
        start(1, (size_t)16 << 20, 7);
        tt_context *ctx = test_open(&a);
        CHECK(small_open(ctx, &net, false) == TT_OK && small_step(&net, 0, NULL) == TT_OK);
        CHECK(tt_param_get(net.w, before) == TT_OK && small_set(&net, USUAL_ROWS, 0) == TT_OK);
        CHECK(tt_set(net.p, net.x, x, USUAL_ROWS) == TT_OK);
        status = tt_step(net.p, 0.1f, k ? NULL : &stats);
        CHECK(status == (k ? TT_OK : TT_ERR_NUMERIC));
        if (k == 1) status = small_step(&net, 1, &stats);
        if (k == 2) status = tt_wait(net.p, &stats);
        if (k == 3) status = tt_get(net.p, net.out, out, TEST_COUNT(out));
        if (k == 4) status = tt_program_save(net.p, test_path(test_folder(), "state.safetensors"));
        CHECK(status == TT_ERR_NUMERIC && tt_program_steps(net.p) == 1);
        if (k == 0) snprintf(sentence, sizeof sentence, "%s", tt_error(ctx));
        if (!CHECK(strcmp(tt_error(ctx), sentence) == 0)) printf("%s: %s\n", after[k], tt_error(ctx));
        CHECK(tt_param_get(net.w, w) == TT_OK && memcmp(w, before, sizeof w) == 0);
        CHECK(tt_wait(net.p, &stats) == TT_OK && stats.step == 1); /* it is told once */
        CHECK(small_step(&net, 1, &stats) == TT_OK && stats.step == 2);
        small_close(&net);
        TEST_CLOSE(ctx, &a);
    }
}

/* A source of so many steps, of which one (from 0; -1: none) has a target that does not count. */
typedef struct few_steps { made_batch m; int next, bad; } few_steps;
enum { FEW_STEPS = 5 };

static tt_status few_seek(void *self, int64_t epoch, int64_t step)
{
    (void)epoch;
    ((few_steps *)self)->next = (int)step;
    return TT_OK;
}

static tt_status few_next(void *self, tt_batch *b, bool *more)
{
    few_steps *f = (few_steps *)self;
    *more = f->next < FEW_STEPS;
    if (!*more) return TT_OK;
    make_batch(&f->m, f->next, false, true);
    for (int k = 0; k < MOST_SEQS && f->next == f->bad; k++) f->m.labels[k] = -100;
    f->next++;
    *b = f->m.b;
    return TT_OK;
}

typedef struct told { double loss[FEW_STEPS + 1]; int n; bool in_turn; } told;

static void tell(void *user, const tt_fit_event *e)
{
    told *t = (told *)user;
    t->in_turn = t->in_turn && e->step == t->n + 1 && t->n <= FEW_STEPS;
    if (t->n <= FEW_STEPS) t->loss[t->n++] = e->loss;
}

/* tt_fit tells of each step once and in turn, with the statistics of steps that are waited for; also of one
   that fails, behind which it goes on. */
TEST(fit_counts_each_step)
{
    for (int bad = -1; bad < FEW_STEPS; bad += 2) {
        static few_steps f;
        trained t;
        tt_stats stats;
        told to = {{0}, 0, true};
        double sum = 0, targets = 0;
        bool finished;
        char folder[1100];
        start(1, (size_t)64 << 20, 2);
        snprintf(folder, sizeof folder, "%s%d", test_path(test_folder(), "fit"), bad + 1);
        tt_source source;
        memset(&source, 0, sizeof source);
        source.self = &f;
        source.seek = few_seek;
        source.next = few_next;
        source.steps = FEW_STEPS;
        source.max_seqs = MOST_SEQS;
        source.max_tokens = MOST_ROWS;
        tt_fit_options o = tt_fit_options_default();
        o.folder = folder;
        o.report = tell;
        o.user = &to;
        f.bad = bad;
        const int good = FEW_STEPS - (bad >= 0);
        if (!CHECK(open_training(&t, "cuda", false, 0.1f, false))) { close_training(&t); return; }
        CHECK(tt_fit(t.trainer, &source, NULL, &o, &finished) == TT_OK && finished);
        CHECK(to.n == FEW_STEPS && to.in_turn && tt_trainer_steps(t.trainer) == good);
        CHECK(tt_trainer_saved_steps(t.trainer) == good);
        close_training(&t);
        if (!CHECK(open_training(&t, "cuda", false, 0.1f, false))) { close_training(&t); return; }
        for (int k = 0; k < FEW_STEPS; k++) {
            if (k != bad) {
                CHECK(one_step(&t, k, false, false, &stats) == TT_OK);
                sum += stats.loss * stats.targets;
                targets += stats.targets;
            }
            CHECK(to.loss[k] == (targets > 0 ? sum / targets : 0));
        }
        close_training(&t);
    }
}

#ifdef TT_EMULATE
/* Steps with so many lengths in turn, `rounds` times over; how many graphs were launched. */
static long graphs_of_lengths(int lengths, int rounds)
{
    test_allocator a;
    small_net net;
    emu_configure(1, (size_t)16 << 20, 1, 4); /* in order, which is the fastest */
    tt_context *ctx = test_open(&a);
    bool ok = CHECK(small_open(ctx, &net, false) == TT_OK);
    emu_counts before = emu_get_counts();
    for (int k = 0; k < lengths * rounds && ok; k++)
        ok = CHECK(small_set(&net, 1 + k % lengths, k) == TT_OK && tt_step(net.p, 0.1f, NULL) == TT_OK);
    small_close(&net);
    TEST_CLOSE(ctx, &a);
    return since(before).graph_launches;
}

/* The update is one graph whatever the lengths; the rest of a step is one for each length that is met again,
   unless there are more lengths than graphs: then some of them keep theirs. */
TEST(lengths_that_are_met_again_are_replayed)
{
    CHECK_NEAR((double)graphs_of_lengths(9, 3), (3 * 9 - 1) + 2 * 9, 0);
    CHECK_NEAR((double)graphs_of_lengths(200, 1), 200 - 1, 0);
    CHECK(graphs_of_lengths(100, 5) > 5 * 100 - 1 + 3 * 100 / 4);
}

static void count_log(void *user, tt_log_level level, const char *id, const char *message)
{
    *(int *)user += level == TT_LOG_WARNING && strcmp(id, "graph") == 0 &&
                      (strstr(message, "cudaError") || strstr(message, "TINYTRAIN_CUDA_SYNC"));
}

/* A device that cannot make graphs runs the instructions one by one, and says so once. */
TEST(steps_go_on_without_graphs)
{
    static const char *const calls[] = {"cudaStreamBeginCapture", "cudaStreamEndCapture",
                                        "cudaGraphInstantiate"};
    small_result reference, result;
    memset(&reference, 0, sizeof reference);
    memset(&result, 0, sizeof result);
    for (int c = -1; c < TEST_COUNT(calls); c++) {
        test_allocator a;
        small_net net;
        int lines = 0;
        emu_configure(1, (size_t)16 << 20, 1, 1);
        tt_context_options o = test_options(&a);
        o.logger.user = &lines;
        o.logger.log = count_log;
        tt_context *ctx = tt_open(&o);
        if (c >= 0) emu_inject_fault_into(calls[c], 1, FAULT, 1L << 40);
        CHECK(small_run(ctx, &net, c < 0 ? &reference : &result) == TT_OK);
        CHECK(c < 0 || memcmp(&result, &reference, sizeof result) == 0);
        CHECK((emu_get_counts().graph_launches > 0) == (c < 0));
        CHECK_NEAR(lines, c >= 0, 0);
        small_close(&net);
        TEST_CLOSE(ctx, &a);
        check_nothing_left(c, 1);
    }
}

typedef struct kept_log { int lines; char text[1024]; } kept_log;

static void keep_log(void *user, tt_log_level level, const char *id, const char *message)
{
    kept_log *kept = (kept_log *)user;
    if (level != TT_LOG_WARNING || strcmp(id, "graph") != 0) return;
    kept->lines++;
    snprintf(kept->text, sizeof kept->text, "%s", message);
}

/* A launch that fails while it is recorded: the program goes on without graphs, and the warning has that
   launch's sentence, not the one of the end of the capture. Where the device is lost nothing goes on, so
   there is no warning, and the error has that sentence. */
TEST(a_launch_that_fails_in_a_capture_is_named)
{
    for (int lost = 0; lost < 2; lost++) {
        test_allocator a;
        small_net net;
        tt_stats stats;
        kept_log kept = {0, ""};
        emu_configure(1, (size_t)16 << 20, 1, 1);
        tt_context_options o = test_options(&a);
        o.logger.user = &kept;
        o.logger.log = keep_log;
        tt_context *ctx = tt_open(&o);
        CHECK(small_open(ctx, &net, false) == TT_OK && small_step(&net, 0, &stats) == TT_OK);
        emu_inject_fault_into("a launch", 1, lost ? LOST : FAULT, 1);
        const tt_status status = small_step(&net, 1, &stats);
        const char *said = lost ? tt_error(ctx) : kept.text;
        CHECK(status == (lost ? TT_ERR_DEVICE : TT_OK) && kept.lines == !lost);
        if (!CHECK(strstr(said, "launch of embedding, whose result has 6 rows and 4 columns: ")))
            printf("'%s'\n", said);
        CHECK(!strstr(said, "end of a capture") && emu_get_counts().graph_launches == 0);
        CHECK(lost || small_step(&net, 2, &stats) == TT_OK);
        small_close(&net);
        TEST_CLOSE(ctx, &a);
    }
}

/* ----------------------------------------------------------------------------------------------- products */

/* A fault may have a product made by other means. */
static bool same_results(const small_result *a, const small_result *b)
{
    bool same = true;
    for (int k = 0; k < 4; k++) same &= fabs(a->loss[k] - b->loss[k]) <= 1e-6;
    for (int k = 0; k < TEST_COUNT(a->w); k++) same &= fabsf(a->w[k] - b->w[k]) <= 1e-5f;
    /* The last step has 4 rows. */
    for (int k = 0; k < 4 * 5; k++) same &= fabsf(a->out[k] - b->out[k]) <= 1e-5f;
    return same;
}

/* What cublasLtMatmul refuses although its heuristic offered it is made by another of the algorithms that it
   offers, or by the kernel that makes any product. */
TEST(products_that_cublaslt_refuses)
{
    enum { NOT_SUPPORTED = 15, INVALID_VALUE = 7, ALL = 0x1e };
    static const struct { unsigned algorithms; int status; } refused[] = {
        {0, 0}, {2, NOT_SUPPORTED}, {2, INVALID_VALUE}, {ALL & ~16u, NOT_SUPPORTED}, {ALL, NOT_SUPPORTED}};
    small_result reference, result;
    long gemms = 0;
    memset(&reference, 0, sizeof reference);
    for (int c = 0; c < TEST_COUNT(refused); c++) {
        test_allocator a;
        small_net net;
        emu_configure(1, (size_t)16 << 20, 1, 4);
        emu_refuse_algorithms(refused[c].algorithms, refused[c].status);
        tt_context *ctx = test_open(&a);
        memset(&result, 0, sizeof result);
        if (!CHECK(small_run(ctx, &net, &result) == TT_OK)) printf("%s\n", tt_error(ctx));
        if (c == 0) reference = result;
        if (c == 0) gemms = emu_get_counts().gemms;
        CHECK(gemms > 0 && emu_get_counts().gemms == (refused[c].algorithms == ALL ? 0 : gemms));
        CHECK(same_results(&result, &reference));
        small_close(&net);
        TEST_CLOSE(ctx, &a);
    }
}

/* A training step of each model in each precision: no product goes to the kernel that makes any product, by
   the rules of cuBLASLt that the emulator has; language models compute their loss in chunks. */
TEST(no_product_of_a_model_needs_that_kernel)
{
    static const struct { const char *name, *residual; } precisions[] = {
        {"32-true", NULL}, {"bf16-mixed", NULL}, {"bf16-true", NULL}, {"16-mixed", NULL}, {"16-true", NULL},
        {"bf16-mixed", "f32"}, {"16-mixed", "16-bit"}};
    loss_chunk = loss_whole = 1;
    for (int c = 0; c < 4 * TEST_COUNT(precisions); c++) {
        const int kind = c % 4;
        const bool text = kind != 1;
        trained t;
        tt_lm l;
        made_batch b;
        tt_model model;
        int32_t targets[MOST_ROWS];
        tt_array array = {"targets", targets, 0};
        tt_train_options o = tt_train_options_default();
        tt_lm_config config = tt_lm_config_default(kind == 2 ? "gpt2" : "llama");
        config.vocab_size = VOCAB + 1; /* odd, as GPT-2's */
        config.hidden_size = 24;
        config.heads = config.key_heads = 3;
        config.layers = 2;
        config.intermediate_size = 40;
        config.max_positions = 20;
        config.rotary.size = kind == 3 ? 8 : 0;
        emu_configure(1, (size_t)16 << 20, 1, (uint64_t)c);
        emu_watch("(any_matmul<false>)");
        precision = precisions[c / 4].name;
        residual = precisions[c / 4].residual;
        make_batch(&b, 0, !text, true);
        memset(&l, 0, sizeof l);
        if (kind < 2) {
            if (!open_training(&t, "cuda", !text, 0, false)) { close_training(&t); break; }
        } else {
            memset(&t, 0, sizeof t);
            t.ctx = test_open(&t.a);
            if (!CHECK(tt_lm_new(t.ctx, &l, &config) == TT_OK)) printf("%s\n", tt_error(t.ctx));
            model = tt_lm_model(&l);
            o.schedule.kind = TT_CONSTANT;
            o.compile.device = "cuda";
            o.compile.precision = precision;
            o.compile.residual = residual;
            o.compile.loss_scale.init = 16;
            o.compile.tune = "on"; /* which finds those of the loss, too */
            o.max_seqs = MOST_SEQS;
            o.max_tokens = MOST_ROWS;
            t.trainer = tt_trainer_new(t.ctx, &model, &o);
            for (int k = 0; k < MOST_ROWS; k++) targets[k] = b.ids[k];
            array.rows = b.b.rows;
            b.b.arrays = &array;
            b.b.n_arrays = 1;
        }
        if (!CHECK(t.trainer && tt_train_batch(t.trainer, &b.b, NULL, NULL) == TT_OK))
            printf("%s\n", tt_error(t.ctx));
        const emu_counts counts = emu_get_counts();
        if (!CHECK(counts.watched == 0 && counts.gemms >= 3 * 8))
            printf("%s, kind %d: %ld of %ld\n", precision, kind, counts.watched, counts.gemms);
        tt_trainer_free(t.trainer);
        t.trainer = NULL;
        if (kind > 1) tt_lm_free(&l);
        close_training(&t);
    }
    precision = residual = NULL;
    loss_chunk = 256;
    loss_whole = 16 << 20;
}

/* Each shape is asked for once, however many there are; shapes of more than 128 rows together with those of
   the same multiple of 128. */
TEST(algorithms_are_chosen_once)
{
    enum { WIDTH = 8 }; /* even, so that products are not of copies of few rows */
    static const int64_t dims[2] = {WIDTH, WIDTH};
    static float data[SMALL_ROWS * WIDTH];
    const tt_init normal = {TT_INIT_NORMAL, 0.5f};
    test_allocator a;
    emu_configure(1, (size_t)16 << 20, 1, 4);
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options o = tt_compile_options_default();
    const int64_t rows = tt_axis(t, "rows", SMALL_ROWS);
    const tt_value x = tt_input(t, "x", TT_F32, rows, WIDTH), y = tt_input(t, "y", TT_F32, rows, WIDTH);
    const tt_value h = tt_gelu(t, tt_linear(t, x, tt_param_new(ctx, "first", 2, dims, normal), NULL));
    const tt_value out = tt_linear(t, h, tt_param_new(ctx, "second", 2, dims, normal), NULL);
    o.device = "cuda";
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, out, y, tt__handle(t, 0)), &o);
    bool ok = CHECK(p != NULL);
    long first = 0;
    for (int k = 0; k < SMALL_ROWS * WIDTH; k++) data[k] = (float)(k * 7 % 11) / 11 - 0.4f;
    for (int k = 0; k < 2 * SMALL_ROWS && ok; k++) {
        const int n = 1 + k % SMALL_ROWS;
        ok = CHECK(tt_set(p, x, data, n) == TT_OK && tt_set(p, y, data, n) == TT_OK &&
                   tt_step(p, 0.1f, NULL) == TT_OK);
        if (k == SMALL_ROWS - 1) first = emu_get_counts().heuristics;
    }
    const long shapes = 128 + 1, products = first / shapes;
    CHECK(products >= 3 && first == products * shapes);
    CHECK_NEAR((double)emu_get_counts().heuristics, (double)first, 0);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* ---- tt_compile_options.tune: a net whose products have a bias, GELU, its slope and sums of columns */

enum { TUNED_ROWS = 400, TUNED_IN = 16, TUNED_HIDDEN = 24, TUNED_STEPS = 6 };
enum { TUNED_WEIGHTS = 2 * TUNED_IN * TUNED_HIDDEN + TUNED_HIDDEN + TUNED_IN };

static const double alike[4] = {1000, 1000, 1000, 1000}; /* us: slices, at random, are less than 1% of it */

typedef struct tuned_run {
    const char *device, *tune;
    int fastest;              /* of cuBLASLt's algorithms 1 to 4; 0: they take as long */
    double epilogue_us;       /* that GELU, its slope or sums take in a product */
    size_t memory;            /* of a device; 0: 64 MiB */
    int from, to;             /* steps; behind the first 0, from the state in `state`, which the run writes */
    const char *state;
    bool accumulate;
    bool erf;                 /* GELU by erf, which is in no product */
    tt_status status;         /* that is expected */
    const char *error;        /* a part of the expected error message */
    unsigned refused;         /* algorithms, by their bits, after the first step */
    long fault, faults;       /* from the first step on calls number `fault` ... fault + faults - 1 fail */
    /* Results */
    float w[TUNED_WEIGHTS];
    double loss[TUNED_STEPS];
    emu_counts first, later;  /* of the first step, which times; of those after it */
    char log[256];            /* the last line */
    bool fault_met;
} tuned_run;

static void tuned_log(void *user, tt_log_level level, const char *id, const char *text)
{
    tuned_run *r = (tuned_run *)user;
    (void)id;
    if (level >= TT_LOG_INFO) snprintf(r->log, sizeof r->log, "%s", text);
}

static tt_status tuned_step(tuned_run *r, tt_program *p, tt_value x, tt_value y, int step)
{
    static const int rows[TUNED_STEPS] = {400, 400, 390, 130, 400, 400}; /* all but 130 count as 512 */
    static float xs[TUNED_ROWS * TUNED_IN], ys[TUNED_ROWS * TUNED_IN];
    const int n = rows[step], ranks = p->arena->data, micros = r->accumulate ? 4 : 1;
    tt_stats stats;
    tt_status status = TT_OK;
    for (int m = 0; m < micros && status == TT_OK; m++) { /* on the ranks in turn */
        for (int e = 0; e < n * TUNED_IN; e++) xs[e] = (float)((e * 37 + step * 11 + m * 5) % 101) / 50 - 1;
        for (int e = 0; e < n * TUNED_IN; e++) ys[e] = xs[(e * 7 + 3) % (n * TUNED_IN)];
        status = tt_set_rank(p, m % ranks, x, xs, n);
        if (status == TT_OK) status = tt_set_rank(p, m % ranks, y, ys, n);
        if (status == TT_OK && r->accumulate && m % ranks == ranks - 1) status = tt_micro_step(p, NULL);
    }
    if (status == TT_OK) status = r->accumulate ? tt_update(p, 0.02f, &stats) : tt_step(p, 0.02f, &stats);
    r->loss[step] = status == TT_OK ? stats.loss : 0;
    return status;
}

static bool run_tuned(tuned_run *r)
{
    test_allocator a;
    tt_context_options options = test_options(&a);
    tt_compile_options o = tt_compile_options_default();
    const int64_t up[2] = {TUNED_HIDDEN, TUNED_IN}, down[2] = {TUNED_IN, TUNED_HIDDEN};
    const tt_init normal = {TT_INIT_NORMAL, 0.3f}, zeros = {TT_INIT_ZEROS, 0};
    double us[4];
    char left[256];
    emu_configure(2, r->memory ? r->memory : (size_t)64 << 20, 1, 5);
    memcpy(us, alike, sizeof us);
    if (r->fastest) us[r->fastest - 1] = 500;
    emu_set_product_times(us, r->epilogue_us);
    options.logger.user = r;
    options.logger.log = tuned_log;
    r->log[0] = 0;
    tt_context *ctx = tt_open(&options);
    tt_tape *t = tt_tape_new(ctx);
    const int64_t rows = tt_axis(t, "rows", TUNED_ROWS);
    const tt_value x = tt_input(t, "x", TT_F32, rows, TUNED_IN), y = tt_input(t, "y", TT_F32, rows, TUNED_IN);
    tt_value h = tt_linear(t, x, tt_param_new(ctx, "up", 2, up, normal),
                           tt_param_new(ctx, "up_bias", 1, up, zeros));
    h = tt_linear(t, r->erf ? tt_gelu(t, h) : tt_gelu_tanh(t, h), tt_param_new(ctx, "down", 2, down, normal),
                  tt_param_new(ctx, "down_bias", 1, down, zeros));
    const tt_value loss = tt_mean_squared_error(t, h, y, tt__handle(t, 0));
    o.device = r->device ? r->device : "cuda";
    o.tune = r->tune;
    o.accumulate = r->accumulate;
    o.parallel.groups = r->accumulate ? 2 : 0;
    o.parallel.zero = 0;
    tt_program *p = tt_compile(t, loss, &o);
    tt_status status = p ? TT_OK : tt_error_code(ctx);
    if (p && r->from) status = tt_program_load(p, r->state);
    emu_reset_counts();
    const long calls = emu_api_calls();
    if (r->fault) emu_inject_fault(r->fault, r->faults == 1 ? FAULT : LOST, r->faults);
    for (int k = r->from; k < r->to && status == TT_OK; k++) {
        status = tuned_step(r, p, x, y, k);
        if (status != TT_OK && r->fault) {
            const bool told = (status == TT_ERR_DEVICE || status == TT_ERR_MEMORY) &&
                              names_the_fault(tt_error(ctx));
            if (!told) fault_failed(r->fault, r->faults, tt_status_name(status), tt_error(ctx));
            if (r->faults > 1) break;
            status = tuned_step(r, p, x, y, k); /* which goes on */
        }
        if (k == r->from) {
            r->first = emu_get_counts();
            emu_reset_counts();
            if (r->refused) emu_refuse_algorithms(r->refused, 15);
        }
    }
    r->later = emu_get_counts();
    if (status == TT_OK && r->state) status = tt_program_save(p, r->state);
    float *w = r->w;
    for (int k = 0; k < ctx->n_params && status == TT_OK; k++) {
        status = tt_param_get(ctx->params[k], w);
        w += tt_param_size(ctx->params[k]);
    }
    r->fault_met = r->fault && emu_api_calls() >= calls + r->fault;
    const bool ok = (r->faults > 1 || status == r->status) && (!r->error || strstr(tt_error(ctx), r->error));
    if (!ok) printf("%s, not %s: %s\n", tt_status_name(status), tt_status_name(r->status), tt_error(ctx));
    CHECK(ok && (status != TT_OK || w == r->w + TUNED_WEIGHTS));
    for (int d = 1; d < (p ? p->settings.crew->ranks : 0) && status == TT_OK && r->tune; d++) {
        char *first = tt__tuned_text(p, 0), *other = tt__tuned_text(p, d); /* all devices know the same */
        if (!CHECK(first && other && strcmp(first, other) == 0 && strstr(first, " products")))
            printf("%s\n%s", first, other);
        tt__free(ctx, first);
        tt__free(ctx, other);
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    CHECK(emu_live_objects(left, sizeof left) == 0);
    return ok;
}

static bool same_bits(const tuned_run *a, const tuned_run *b)
{
    return memcmp(a->w, b->w, sizeof a->w) == 0 && memcmp(a->loss, b->loss, sizeof a->loss) == 0;
}

/* Whichever algorithm is the fastest makes all products of as many rows as there may be, also where it does
   not add up in the order of the first; those that take as long make way for the first that is offered. */
TEST(the_fastest_algorithm_is_taken)
{
    static tuned_run off, run[5];
    off.to = TUNED_STEPS;
    off.erf = true;
    run_tuned(&off);
    CHECK(off.first.by_algorithm[1] == off.first.gemms && off.later.by_algorithm[1] == off.later.gemms);
    CHECK(off.first.gemms >= 5);
    for (int k = 0; k < 5; k++) {
        run[k].tune = "on";
        run[k].erf = true;
        run[k].epilogue_us = 5000; /* so that all have the same kernels of our own */
        run[k].fastest = k;
        run[k].to = TUNED_STEPS;
        run_tuned(&run[k]);
        CHECK(run[k].first.gemms > 20 * off.first.gemms && run[k].later.gemms == off.later.gemms);
        const emu_counts *n = &run[k].later;
        CHECK(n->by_algorithm[k ? k : 1] == n->gemms - (k > 1 ? off.first.gemms : 0)); /* but of 130 rows */
        CHECK(k < 2 || n->by_algorithm[1] == off.first.gemms);
        CHECK(same_bits(&run[k], &off) == (k != 2 && k != 3)); /* which sum otherwise; timing has no trace */
        CHECK(fabs(run[k].loss[5] - off.loss[5]) <= 0.02 * off.loss[5]);
    }
    CHECK(off.loss[5] < 0.9 * off.loss[0]);
}

/* GELU, its slope and the sums that a bias gets are part of a product where that is faster than kernels of
   our own behind it, and else are not. Where nothing is timed, GELU alone is. */
TEST(epilogues_are_taken_where_they_pay)
{
    static tuned_run run[2], off;
    off.to = 1;
    run_tuned(&off);
    CHECK(off.first.gelus > 0 && off.first.gelu_slopes == 0 && off.first.bias_gradients == 0);
    for (int slow = 0; slow < 2; slow++) {
        run[slow].tune = "on";
        run[slow].epilogue_us = slow ? 500 : 0;
        run[slow].to = TUNED_STEPS;
        run_tuned(&run[slow]);
        const emu_counts *n = &run[slow].later;
        CHECK((n->gelus > 0) == !slow && (n->gelu_slopes > 0) == !slow && (n->bias_gradients > 0) == !slow);
    }
    CHECK(run[0].later.gemms == run[1].later.gemms);
    CHECK(fabs(run[0].loss[5] - run[1].loss[5]) <= 0.02 * run[0].loss[5]);
}

/* A run that goes on from a state has the bits of one that was never stopped, though timing would come to
   other algorithms by then: it times nothing. */
TEST(resumed_runs_keep_their_algorithms)
{
    static tuned_run whole, part, rest, other, without;
    const char *state = test_path(test_folder(), "tuned.safetensors");
    char path[1100];
    snprintf(path, sizeof path, "%s", state);
    whole.tune = part.tune = rest.tune = other.tune = "on";
    whole.fastest = part.fastest = 3;
    rest.fastest = other.fastest = 2;
    whole.epilogue_us = part.epilogue_us = 500;
    whole.to = rest.to = other.to = TUNED_STEPS;
    part.to = rest.from = 2;
    part.state = rest.state = path;
    run_tuned(&whole);
    run_tuned(&other);
    CHECK(!same_bits(&whole, &other)); /* so that the bits tell */
    run_tuned(&part);
    run_tuned(&rest);
    memcpy(rest.loss, part.loss, sizeof *rest.loss * (size_t)part.to);
    CHECK(same_bits(&whole, &rest));
    CHECK(rest.first.by_algorithm[3] == rest.first.gemms && rest.first.gelus == 0);
    const long resumed = rest.first.gemms;
    /* Its own state has them too. */
    rest.from = 5;
    run_tuned(&rest);
    CHECK(rest.first.by_algorithm[3] == rest.first.gemms);
    /* A run without `tune` goes on by other algorithms, and says so. */
    without.from = 2;
    without.to = 3;
    without.state = path;
    run_tuned(&without);
    CHECK(without.first.by_algorithm[1] == without.first.gemms && without.first.gemms == resumed);
    CHECK(strstr(without.log, "is of a run with tune, and this one is without it"));
    rest.from = 2;
    rest.to = 3;
    run_tuned(&rest); /* from the state of the one without */
    CHECK(strstr(rest.log, "timed")); /* the later line: it has timed, as nothing was known */
    remove(path);
}

/* The file that `tune` names holds the choices of the products that were timed: a later program does not time
   them again, and adds its other products. */
TEST(a_file_keeps_what_was_timed)
{
    static tuned_run first, second, more, again;
    char path[1100];
    long size[3];
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "tuned.txt"));
    remove(path);
    first.tune = second.tune = more.tune = again.tune = path;
    first.to = second.to = again.to = TUNED_STEPS;
    more.to = 2;
    first.fastest = 3;
    second.fastest = more.fastest = again.fastest = 2;
    more.accumulate = true; /* has products that add */
    tuned_run *const runs[] = {&first, &second, &more, &again};
    for (int k = 0; k < 4; k++) {
        run_tuned(runs[k]);
        FILE *f = fopen(path, "rb");
        CHECK(f && fseek(f, 0, SEEK_END) == 0);
        if (k != 2) size[k == 3 ? 2 : k] = f ? ftell(f) : 0;
        if (f) fclose(f);
        if (k == 1) CHECK(size[0] > 1000 && size[0] == size[1]);
    }
    CHECK(size[2] > size[0]);
    CHECK(same_bits(&first, &second) && same_bits(&first, &again)); /* though another has added to the file */
    CHECK(second.first.by_algorithm[3] == second.first.gemms && strcmp(second.log, "") == 0);
    CHECK(more.first.by_algorithm[2] > 0);
    remove(path);
}

static char *read_text(const char *path, size_t *n)
{
    static char text[1 << 16];
    FILE *f = fopen(path, "rb");
    *n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    text[*n] = 0;
    if (f) fclose(f);
    return text;
}

static void write_text(const char *path, const char *text, size_t n)
{
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(text, 1, n, f) == n);
    if (f) fclose(f);
}

/* Damaged files, cut off at any place, of another device, or with lines that are wrong, are refused before
   anything is timed, by a sentence that names the file and the line; and they stay as they are. */
TEST(a_file_that_is_damaged_is_refused)
{
    static const struct { const char *find, *with, *error; tt_status status; } wrong[] = {
        {"tinytrain: the", "tinytrain: a", ", line 1: it is not '", TT_ERR_FORMAT},
        {"version 1", "version 2", ", line 1: it is not '", TT_ERR_FORMAT},
        {"cuBLASLt ", "cuBLASLt 9", ", line 2: it is of '", TT_ERR_UNSUPPORTED},
        {"multiprocessors", "of another make", ", line 2: it is of '", TT_ERR_UNSUPPORTED},
        {" 1 0 0 0 ", " 1 2 0 0 ", ": its numbers are those of no product", TT_ERR_FORMAT},
        {" 256 256 256 ", " 256 99999256 256 ", ": its numbers are those of no product", TT_ERR_FORMAT},
        {" 256 256 256 ", " 256 256  256 ", ": it does not begin with 23 numbers", TT_ERR_FORMAT},
        {" 256 256 256 ", " 256 -256 256 ", ": it does not begin with 23 numbers", TT_ERR_FORMAT},
        {" 256 256 256 ", " 256 99999999999999999999 256 ", ": it does not begin with 23 ", TT_ERR_FORMAT},
        {"0000000000000000\n", "000000000000000\n", ": it ends neither with 'slower' nor", TT_ERR_FORMAT},
        {"0000000000000000\n", "000000000000000x\n", ": it ends neither with 'slower' nor", TT_ERR_FORMAT},
        {"0000000000000000\n", "slow\n", ": it ends neither with 'slower' nor", TT_ERR_FORMAT},
        {"0000000000000000\n", "\n", ": it ends neither with 'slower' nor", TT_ERR_FORMAT},
        {" products\n", " products\n\n", ": more comes behind the last line", TT_ERR_FORMAT},
        {" products\n", " product\n", ": it does not begin with 23 numbers", TT_ERR_FORMAT}};
    static tuned_run good, bad;
    char path[1100], named[1200];
    size_t n, now;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "tuned.txt"));
    remove(path);
    good.tune = bad.tune = path;
    good.to = bad.to = 1;
    if (!run_tuned(&good)) return;
    char *whole = strdup(read_text(path, &n)), *text = (char *)malloc(2 * n + 4096);
    if (!CHECK(whole && text && n > 500)) { free(whole); free(text); return; }
    for (int k = 0; k < TEST_COUNT(wrong); k++) {
        char *at = strstr(whole, wrong[k].find);
        if (!CHECK(at != NULL)) { printf("no '%s' in\n%s", wrong[k].find, whole); continue; }
        const int length = sprintf(text, "%.*s%s%s", (int)(at - whole), whole, wrong[k].with,
                                   at + strlen(wrong[k].find));
        write_text(path, text, (size_t)length);
        snprintf(named, sizeof named, "%s'%s", k < 4 ? "tune: " : "", k < 4 ? path : "");
        bad.status = wrong[k].status;
        bad.error = wrong[k].error;
        if (!run_tuned(&bad)) printf("case %d\n", k);
        CHECK(memcmp(read_text(path, &now), text, (size_t)length) == 0 && now == (size_t)length);
        CHECK(bad.first.by_algorithm[1] == 0); /* nothing has run */
    }
    /* The last product twice. */
    char *end = strrchr(whole, '\n');
    while (end > whole && end[-1] != '\n') end--; /* of the last line */
    char *line = end - 1;
    while (line > whole && line[-1] != '\n') line--;
    sprintf(text, "%.*s%.*s%s", (int)(end - whole), whole, (int)(end - line), line, end);
    write_text(path, text, strlen(text));
    bad.status = TT_ERR_FORMAT;
    bad.error = ": an earlier line has the same product";
    run_tuned(&bad);
    bad.error = path;
    for (size_t cut = 0; cut < n; cut += cut + 40 < n ? 31 : 1) {
        write_text(path, whole, cut);
        if (!run_tuned(&bad)) { printf("cut off at %zu\n", cut); break; }
    }
    write_text(path, whole, n);
    text[0] = 0;
    bad.status = TT_OK;
    bad.error = NULL;
    run_tuned(&bad);
    CHECK(memcmp(bad.w, good.w, sizeof good.w) == 0);
    /* A folder that is not there. */
    bad.tune = "nowhere/at/all/tuned.txt";
    bad.status = TT_ERR_FILE;
    bad.error = "nowhere/at/all";
    run_tuned(&bad);
    bad.tune = "";
    bad.status = TT_ERR_ARGUMENT;
    bad.error = "tune '' is neither off nor on";
    run_tuned(&bad);
    remove(path);
    free(whole);
    free(text);
}

/* A file's algorithm that cuBLASLt does not have, and one that cublasLtMatmul refuses, give way to what is
   offered. */
TEST(tuned_algorithms_that_are_refused_give_way)
{
    static tuned_run off, refused, unknown;
    char path[1100];
    size_t n;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "tuned.txt"));
    remove(path);
    off.to = refused.to = TUNED_STEPS;
    unknown.to = 1;
    run_tuned(&off);
    refused.tune = unknown.tune = path;
    refused.fastest = unknown.fastest = 2;
    refused.refused = 1 << 2;
    run_tuned(&refused);
    CHECK(refused.first.by_algorithm[2] > 0);
    CHECK(refused.later.by_algorithm[2] == 0 && refused.later.by_algorithm[1] > 0);
    for (int k = 0; k < TUNED_STEPS; k++) CHECK(fabs(refused.loss[k] - off.loss[k]) <= 0.02 * off.loss[k]);
    char *text = read_text(path, &n);
    int changed = 0;
    for (char *at; (at = strstr(text, " 0000000000000002 ")) != NULL; changed++) at[16] = 'e';
    CHECK(changed > 3);
    write_text(path, text, n);
    run_tuned(&unknown);
    CHECK(unknown.first.by_algorithm[1] == unknown.first.gemms);
    CHECK(unknown.loss[0] == off.loss[0]);
    remove(path);
}

/* Where there is no memory to time in, products are made as without `tune`, for the same bits, and the logger
   is warned; the plan's bytes are enough. */
TEST(tuning_without_memory_does_without)
{
    static tuned_run off, on;
    off.to = on.to = 3;
    off.memory = on.memory = (size_t)1 << 20;
    on.tune = "on";
    on.fastest = 2;
    run_tuned(&off);
    run_tuned(&on);
    CHECK(same_bits(&off, &on) && on.first.gemms == off.first.gemms);
    if (!CHECK(strstr(on.log, "products were not timed, as the device has no memory left"))) puts(on.log);
}

/* All ranks make a product in the same way, so that two of them have the bits of one. */
TEST(ranks_share_what_was_timed)
{
    static tuned_run one, two, same;
    one.tune = two.tune = same.tune = "on";
    one.fastest = two.fastest = same.fastest = 3;
    one.accumulate = two.accumulate = same.accumulate = true;
    one.to = two.to = same.to = 3;
    two.device = "cuda*2";
    same.device = "cuda:0,0";
    run_tuned(&one);
    run_tuned(&two);
    run_tuned(&same);
    CHECK(one.later.by_algorithm[3] == one.later.gemms && two.later.by_algorithm[3] == two.later.gemms);
    CHECK(memcmp(one.w, two.w, sizeof one.w) == 0 && memcmp(one.w, same.w, sizeof one.w) == 0);
    CHECK(two.first.gemms < one.first.gemms * 3 / 2); /* the second has timed nothing */
}

/* After an error that ends all work on a device every call fails with the first sentence, even if CUDA had
   forgotten. */
TEST(a_lost_device_says_so)
{
    static const int errors[] = {700, 719, 716};
    for (int k = 0; k < TEST_COUNT(errors); k++) {
        test_allocator a;
        small_net net;
        tt_stats stats;
        float w[5 * 4];
        char first[1024];
        emu_configure(1, (size_t)16 << 20, 1, 1);
        tt_context *ctx = test_open(&a);
        CHECK(small_open(ctx, &net, false) == TT_OK && small_step(&net, 0, &stats) == TT_OK);
        emu_inject_fault_into("cudaStreamSynchronize", 1, errors[k], 1);
        CHECK(small_step(&net, 1, &stats) == TT_ERR_DEVICE);
        snprintf(first, sizeof first, "%s", tt_error(ctx));
        CHECK(strstr(first, "CUDA does nothing more in this process") &&
              strstr(first, "TINYTRAIN_CUDA_SYNC"));
        CHECK(small_step(&net, 2, &stats) == TT_ERR_DEVICE && strcmp(tt_error(ctx), first) == 0);
        CHECK(tt_param_get(net.w, w) == TT_ERR_DEVICE && strcmp(tt_error(ctx), first) == 0);
        CHECK(tt_param_set(net.w, w) == TT_ERR_DEVICE && strcmp(tt_error(ctx), first) == 0);
        small_close(&net);
        TEST_CLOSE(ctx, &a);
        check_nothing_left(k, 1);
    }
}

/* With TINYTRAIN_CUDA_SYNC=1 each op is waited for, so that an error has the name of the op that it came
   from. */
TEST(an_op_that_fails_is_named)
{
    static const char *const ops[] = {"run of embedding, whose result has 6 rows and 4 columns",
                                      "run of add, ", "run of layernorm, "};
    setenv("TINYTRAIN_CUDA_SYNC", "1", 1);
    for (int k = 0; k < TEST_COUNT(ops); k++) {
        test_allocator a;
        small_net net;
        tt_stats stats;
        int lines = 0;
        emu_configure(1, (size_t)16 << 20, 1, 1);
        tt_context_options o = test_options(&a);
        o.logger.user = &lines;
        o.logger.log = count_log;
        tt_context *ctx = tt_open(&o);
        CHECK(small_open(ctx, &net, false) == TT_OK && small_step(&net, 0, &stats) == TT_OK &&
              small_step(&net, 1, &stats) == TT_OK);
        CHECK(emu_get_counts().graph_launches == 0 && lines == 1);
        CHECK(small_set(&net, USUAL_ROWS, 0) == TT_OK);
        emu_inject_fault_into("cudaStreamSynchronize", k + 1, 700, 1);
        CHECK(tt_step(net.p, 0.1f, &stats) == TT_ERR_DEVICE);
        CHECK_ERROR(ctx, TT_ERR_DEVICE, ops[k]);
        small_close(&net);
        TEST_CLOSE(ctx, &a);
    }
    unsetenv("TINYTRAIN_CUDA_SYNC");
}

/* Call n of CUDA fails, or all from it on do, for each n up to the last of closing. A run that fails says
   why, and one that does not has the right results. After a single failure the program goes on. */
static void sweep(long count)
{
    small_result reference;
    long tolerated = 0, n = 0;
    for (bool reached = true; reached; n++) { /* 0: none fails */
        test_allocator a;
        small_net net;
        small_result result;
        tt_stats stats;
        memset(&net, 0, sizeof net);
        memset(&result, 0, sizeof result);
        emu_configure(1, (size_t)16 << 20, 1, (uint64_t)n);
        tt_context *ctx = test_open(&a);
        if (n) emu_inject_fault(n, count == 1 ? FAULT : LOST, count);
        tt_status status = small_run(ctx, &net, &result);
        if (n == 0) reference = result;
        if (status == TT_OK) {
            tolerated += n > 0 && emu_api_calls() >= n; /* the others fail in the close */
            if (!same_results(&result, &reference)) fault_failed(n, count, "TT_OK", "and wrong results");
        } else if ((status != TT_ERR_DEVICE && status != TT_ERR_MEMORY) || tt_error_code(ctx) != status ||
                   !names_the_fault(tt_error(ctx))) {
            fault_failed(n, count, tt_status_name(status), tt_error(ctx));
        } else if (count == 1 && (small_step(&net, 0, &stats) != TT_OK || !(stats.loss > 0))) {
            fault_failed(n, count, "the next step", tt_error(ctx));
        }
        small_close(&net);
        TEST_CLOSE(ctx, &a);
        reached = n == 0 || emu_api_calls() >= n;
        check_nothing_left(n, count);
    }
    CHECK(n > 200 && tolerated < n / 2); /* most calls matter */
}

TEST(any_call_may_fail_once) /* with copies between the memories, too */
{
    offload = everything;
    sweep(1);
    offload = NULL;
}

TEST(any_call_may_fail_for_ever)
{
    update = "host";
    reads_later = true;
    sweep(1L << 40);
    reads_later = false;
    update = NULL;
}

/* Any call may fail while products are timed: the step says so or has the right results, the next one goes
   on, and nothing is left. */
TEST(any_call_may_fail_while_tuning)
{
    for (int endless = 0; endless < 2; endless++) {
        static tuned_run r;
        long n = 1;
        r.tune = "on";
        r.to = 1;
        r.faults = endless ? 1L << 40 : 1;
        for (r.fault_met = true; r.fault_met; n += endless ? 501 : 151) { /* most calls repeat others */
            r.fault = n;
            run_tuned(&r);
        }
        CHECK(n > 1500);
    }
}

/* The same where a trainer's state and its model are saved, and loaded again. A state that could not be
   written is not there. */
TEST(any_call_may_fail_while_saving)
{
    char state[1100], folder[1100];
    snprintf(state, sizeof state, "%s", test_path(test_folder(), "state.safetensors"));
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "model"));
    for (int endless = 0; endless < 2; endless++) {
        const long count = endless ? 1L << 40 : 1;
        long n = 0;
        /* One function reads, another writes, each of them many parameters. */
        for (bool reached = true; reached; n += n < 6 ? 1 : 29) {
            trained t;
            tt_progress progress;
            memset(&progress, 0, sizeof progress);
            emu_configure(1, (size_t)16 << 20, 1, (uint64_t)n);
            if (!open_training(&t, "cuda", false, 0, false)) { close_training(&t); return; }
            CHECK(tt_allocate(t.trainer->train) == TT_OK);
            const long calls = emu_api_calls();
            if (n) emu_inject_fault(n, endless ? LOST : FAULT, count);
            tt_status status = tt_trainer_save(t.trainer, state, &progress);
            const bool saved = status == TT_OK;
            CHECK(saved == (access(state, F_OK) == 0));
            if (saved) status = tt_bert_save(&t.text, folder);
            if (status == TT_OK) status = tt_trainer_load(t.trainer, state, &progress);
            const bool failed = n > 0 && emu_api_calls() >= calls + n;
            if (status != TT_OK && (status != TT_ERR_DEVICE || !names_the_fault(tt_error(t.ctx))))
                fault_failed(n, count, tt_status_name(status), tt_error(t.ctx));
            CHECK(status != TT_OK || !failed || !endless);
            remove(state);
            close_training(&t);
            reached = n == 0 || emu_api_calls() >= calls + n;
            check_nothing_left(n, count);
        }
        CHECK(n > 300);
    }
}

#else

#define NEEDS_EMULATOR SKIP("only the emulator counts waits and makes calls fail")
TEST(programs_on_two_devices) { NEEDS_EMULATOR; }
TEST(pinned_memory_is_what_was_planned) { NEEDS_EMULATOR; }
TEST(fp8_asks_its_own_device) { NEEDS_EMULATOR; }
TEST(the_device_that_is_described) { NEEDS_EMULATOR; }
TEST(a_launch_that_fails_in_a_capture_is_named) { NEEDS_EMULATOR; }
TEST(a_step_waits_once_for_its_results) { NEEDS_EMULATOR; }
TEST(lengths_that_are_met_again_are_replayed) { NEEDS_EMULATOR; }
TEST(steps_go_on_without_graphs) { NEEDS_EMULATOR; }
TEST(products_that_cublaslt_refuses) { NEEDS_EMULATOR; }
TEST(no_product_of_a_model_needs_that_kernel) { NEEDS_EMULATOR; }
TEST(algorithms_are_chosen_once) { NEEDS_EMULATOR; }
TEST(a_lost_device_says_so) { NEEDS_EMULATOR; }
TEST(an_op_that_fails_is_named) { NEEDS_EMULATOR; }
TEST(any_call_may_fail_once) { NEEDS_EMULATOR; }
TEST(any_call_may_fail_for_ever) { NEEDS_EMULATOR; }
TEST(any_call_may_fail_while_saving) { NEEDS_EMULATOR; }
TEST(managed_memory_that_does_not_fit_is_refused) { NEEDS_EMULATOR; }
TEST(managed_memory_that_is_not_there) { NEEDS_EMULATOR; }
TEST(managed_memory_whose_calls_fail) { NEEDS_EMULATOR; }
TEST(the_fastest_algorithm_is_taken) { NEEDS_EMULATOR; }
TEST(epilogues_are_taken_where_they_pay) { NEEDS_EMULATOR; }
TEST(resumed_runs_keep_their_algorithms) { NEEDS_EMULATOR; }
TEST(a_file_keeps_what_was_timed) { NEEDS_EMULATOR; }
TEST(a_file_that_is_damaged_is_refused) { NEEDS_EMULATOR; }
TEST(tuned_algorithms_that_are_refused_give_way) { NEEDS_EMULATOR; }
TEST(tuning_without_memory_does_without) { NEEDS_EMULATOR; }
TEST(ranks_share_what_was_timed) { NEEDS_EMULATOR; }
TEST(any_call_may_fail_while_tuning) { NEEDS_EMULATOR; }

#endif

static const test_case tests[] = {
    TEST_CASE(indices_behind_a_view_are_checked), TEST_CASE(bias_of_very_many_columns),
    TEST_CASE(costs_of_a_gpu), TEST_CASE(largest_batch_of_what_is_free), TEST_CASE(sizes_that_kernels_refuse),
    TEST_CASE(trains_distilbert_as_the_cpu_does),
    TEST_CASE(trains_vit_as_the_cpu_does), TEST_CASE(trains_with_updates_in_the_hosts_memory),
    TEST_CASE(values_in_the_hosts_memory),
    TEST_CASE(a_step_waits_once_for_its_results), TEST_CASE(programs_on_two_devices),
    TEST_CASE(micro_steps_that_do_not_wait_keep_their_inputs), TEST_CASE(steps_are_read_one_later),
    TEST_CASE(errors_are_read_one_later), TEST_CASE(fit_counts_each_step),
    TEST_CASE(lengths_that_are_met_again_are_replayed), TEST_CASE(steps_go_on_without_graphs),
    TEST_CASE(products_that_cublaslt_refuses), TEST_CASE(algorithms_are_chosen_once),
    TEST_CASE(no_product_of_a_model_needs_that_kernel), TEST_CASE(gelu_is_as_exact_as_said),
    TEST_CASE(a_lost_device_says_so), TEST_CASE(an_op_that_fails_is_named), TEST_CASE(any_call_may_fail_once),
    TEST_CASE(any_call_may_fail_for_ever), TEST_CASE(any_call_may_fail_while_saving),
    TEST_CASE(pinned_memory_is_what_was_planned), TEST_CASE(fp8_asks_its_own_device),
    TEST_CASE(training_in_fp8_keeps_its_bits), TEST_CASE(overflows_in_fp8_are_skipped),
    TEST_CASE(managed_memory_gives_the_same_bits), TEST_CASE(managed_memory_that_does_not_fit_is_refused),
    TEST_CASE(managed_memory_that_is_not_there), TEST_CASE(managed_memory_whose_calls_fail),
    TEST_CASE(the_device_that_is_described), TEST_CASE(a_launch_that_fails_in_a_capture_is_named),
    TEST_CASE(the_fastest_algorithm_is_taken),
    TEST_CASE(epilogues_are_taken_where_they_pay),
    TEST_CASE(resumed_runs_keep_their_algorithms),
    TEST_CASE(a_file_keeps_what_was_timed),
    TEST_CASE(a_file_that_is_damaged_is_refused),
    TEST_CASE(tuned_algorithms_that_are_refused_give_way),
    TEST_CASE(tuning_without_memory_does_without),
    TEST_CASE(ranks_share_what_was_timed),
    TEST_CASE(any_call_may_fail_while_tuning),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }

#endif
