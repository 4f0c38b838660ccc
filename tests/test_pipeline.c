/* Tests of pipelines on CPU ranks: the bits of one stage with any schedule; tied parameters; what stages
   store and allocate; errors; faults in a stage.

   The training is a small transformer with dropout, clipping and, in 16 bits, a loss scale that overflows at
   first. Its micro-batches have different sizes. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"
#ifdef TT_EMULATE
#include "emu_control.h"
#endif

enum { WIDTH = 32, HIDDEN = 56, VOCAB = 83, LAYERS = 5, ROWS = 24, SEQS = 4, PARAMS = 64 };

/* The options of a training. */
typedef struct setup {
    const char *device;
    int pipeline, tensor, zero, groups;
    const char *schedule;
    int max;                /* tt_parallel.micros */
    int micros;              /* micro-batches of a step, on all data ranks */
    const char *precision, *recompute, *offload;
    bool tied;               /* one table for embedding and head */
    bool sgd, at_once, poison, late, frozen;
    int threads, steps;
    size_t budget;
    bool sequence;
    bool on_host;            /* parameters are updated in the host's memory */
} setup;

static setup setup_of(const char *device, int pipeline, const char *schedule, int micros)
{
    const setup s = {device, pipeline, 1, 1, 1, schedule, 0, micros, "32-true", "cheap", NULL,
                     false, false, false, false, false, false, 1, 3, 0, false, false};
    return s;
}

/* ------------------------------------------------------------------------------------------------ the net */

typedef struct net {
    test_allocator a;
    test_log log;
    tt_context *ctx;
    tt_tape *t;
    tt_param *param[PARAMS];
    int n_params;
    tt_value ids, starts, targets, out, first, loss;
    tt_program *p, *eval;
    int data; /* number of data ranks */
    tt_stats stats;
} net;

static tt_param *new_param(net *n, const char *name, int64_t rows, int64_t cols, tt_init_kind kind)
{
    const int64_t dims[] = {rows, cols};
    const tt_init init = {kind, 0.1f};
    return n->param[n->n_params++] = tt_param_new(n->ctx, name, cols ? 2 : 1, dims, init);
}

/* Makes a layer's parameter, e.g. "layer.1.up". */
static tt_param *layer_param(net *n, int layer, const char *name, int64_t rows, int64_t cols)
{
    char full[64];
    snprintf(full, sizeof full, "layer.%d.%s", layer, name);
    return new_param(n, full, rows, cols, cols ? TT_INIT_NORMAL : TT_INIT_ONES);
}

static tt_value record_layer(net *n, int layer, tt_value x)
{
    tt_tape *t = n->t;
    tt_attention_options o = tt_attention_options_default(4);
    o.dropout = 0.1f;
    tt_param *norm = layer_param(n, layer, "norm", WIDTH, 0);
    tt_param *after = layer_param(n, layer, "after", WIDTH, 0);
    tt_param *qkv = layer_param(n, layer, "qkv", 3 * WIDTH, WIDTH);
    tt_param *out = layer_param(n, layer, "out", WIDTH, WIDTH);
    tt_param *up = layer_param(n, layer, "up", HIDDEN, WIDTH);
    tt_param *up_b = layer_param(n, layer, "up_b", HIDDEN, 0);
    tt_param *down = layer_param(n, layer, "down", WIDTH, HIDDEN);
    tt_value y = tt_linear(t, tt_layernorm(t, x, norm, NULL, 1e-5f), qkv, NULL);
    tt_value q = tt_slice(t, y, 0, WIDTH), k = tt_slice(t, y, WIDTH, WIDTH);
    tt_value v = tt_slice(t, y, 2 * WIDTH, WIDTH);
    y = tt_linear(t, tt_attention(t, q, k, v, n->starts, &o), out, NULL);
    x = tt_add(t, x, tt_dropout(t, y, 0.1f));
    y = tt_linear(t, tt_layernorm(t, x, after, NULL, 1e-5f), up, up_b);
    x = tt_add(t, x, tt_dropout(t, tt_linear(t, tt_gelu(t, y), down, NULL), 0.1f));
    tt_name(t, x, "layer.%d", layer);
    tt_block_end(t, x);
    return x;
}

static bool record(net *n, bool tied)
{
    tt_tape *t = n->t = tt_tape_new(n->ctx);
    const int64_t rows = tt_axis(t, "tokens", ROWS), seqs = tt_axis(t, "seqs", SEQS);
    tt_param *table = new_param(n, "table", VOCAB, WIDTH, TT_INIT_NORMAL);
    n->ids = tt_input(t, "ids", TT_I32, rows, 1);
    n->starts = tt_seq_start(t, "starts", seqs);
    n->targets = tt_input(t, "targets", TT_I32, rows, 1);
    tt_value x = tt_embedding(t, n->ids, table);
    for (int k = 0; k < LAYERS; k++) {
        x = record_layer(n, k, x);
        if (!k) n->first = x;
    }
    tt_param *head = tied ? table : new_param(n, "head", VOCAB, WIDTH, TT_INIT_NORMAL);
    n->out = tt_mean_pool(t, x, n->starts);
    tt_name(t, n->out, "pooled");
    tt_output(t, n->out);
    tt_output(t, n->first);
    n->loss = tt_cross_entropy(t, tt_linear(t, x, head, NULL), n->targets, NULL);
    return tt_tape_status(t) == TT_OK;
}

static tt_compile_options options_of(const setup *s)
{
    tt_compile_options o = tt_compile_options_default();
    o.device = s->device;
    o.parallel.pipeline = s->pipeline;
    o.parallel.tensor = s->tensor;
    o.parallel.sequence = s->sequence;
    o.parallel.schedule = s->schedule;
    o.parallel.micros = s->max;
    o.parallel.zero = s->zero;
    o.parallel.groups = s->groups;
    o.precision = s->precision;
    o.recompute = s->recompute;
    o.offload = s->offload;
    if (s->on_host) o.update = "host";
    o.memory_budget = s->budget;
    o.accumulate = !s->at_once;
    o.optimizer.clip_norm = 0.5f;
    o.loss_scale.init = 0x1p36f; /* overflows */
    o.loss_scale.backoff = 0x1p-28f;
    if (s->sgd) {
        o.optimizer.kind = TT_SGD;
        o.optimizer.momentum = 0.9f;
    }
    return o;
}

static bool fine(net *n, tt_status status, const char *what, int line)
{
    char text[1280];
    snprintf(text, sizeof text, "%s: %s", what, status == TT_OK ? "" : tt_error(n->ctx));
    return test__check(status == TT_OK, __FILE__, line, text);
}
#define FINE(n, call) fine((n), (call), #call, __LINE__)

/* Opens a context and records the net. */
static bool open_context(net *n, const setup *s)
{
    memset(n, 0, sizeof *n);
    tt_context_options co = test_options(&n->a);
    co.logger.log = test__keep_log;
    co.logger.user = &n->log;
    co.threads = s->threads;
    co.timeout = 3000; /* the test program's time limit ends a rank that waits for ever */
    co.verify = true;
    n->ctx = tt_open(&co);
    if (!n->ctx || !CHECK(record(n, s->tied))) return false;
    if (s->frozen) tt_param_freeze(n->ctx, "table", true), tt_param_freeze(n->ctx, "layer.0.*", true);
    n->ctx->late = s->late;
    return true;
}

/* Opens a context with the net and its program; with `evaluates` also a program that shares the arena. */
static bool open_net(net *n, const setup *s, bool evaluates)
{
    if (!open_context(n, s)) return false;
    tt_compile_options o = options_of(s);
    n->p = tt_compile(n->t, n->loss, &o);
    if (!FINE(n, n->p ? TT_OK : tt_error_code(n->ctx))) return false;
    n->p->poison = s->poison;
    n->data = n->p->arena->data;
    if (!evaluates) return true;
    o.train = false;
    o.share = n->p;
    n->eval = tt_compile(n->t, n->loss, &o);
    return FINE(n, n->eval ? TT_OK : tt_error_code(n->ctx));
}

static void close_net(net *n)
{
    tt_program_free(n->eval);
    tt_program_free(n->p);
    tt_tape_free(n->t);
    TEST_CLOSE(n->ctx, &n->a);
}

/* ------------------------------------------------------------------------------------------ micro-batches */

typedef struct micro_batch {
    int32_t ids[ROWS], targets[ROWS], starts[SEQS + 1];
    int rows, seqs;
} micro_batch;

/* Makes micro-batch `number` of a step: 1 to SEQS sequences of 1 to ROWS / SEQS tokens. */
static micro_batch batch_of(int step, int number)
{
    micro_batch m;
    uint64_t random = 1 + (uint64_t)step * 1000003u + (uint64_t)number * 7919u;
    for (int k = 0; k < 4; k++) test_random(&random);
    m.seqs = 1 + (int)(test_random(&random) % SEQS);
    m.starts[0] = 0;
    for (int k = 0; k < m.seqs; k++)
        m.starts[k + 1] = m.starts[k] + 1 + (int32_t)(test_random(&random) % (ROWS / SEQS));
    m.rows = m.starts[m.seqs];
    for (int k = 0; k < m.rows; k++) {
        m.ids[k] = (int32_t)(test_random(&random) % VOCAB);
        m.targets[k] = k && test_random(&random) % 4 == 0 ? -100 : (m.ids[k] * 7 + 3) % VOCAB;
    }
    return m;
}

static tt_status set_batch(net *n, tt_program *p, int rank, const micro_batch *m)
{
    tt_status status = tt_set_rank(p, rank, n->ids, m->ids, m->rows);
    if (status == TT_OK) status = tt_set_rank(p, rank, n->starts, m->starts, m->seqs + 1);
    return status == TT_OK ? tt_set_rank(p, rank, n->targets, m->targets, m->rows) : status;
}

/* Runs micro-batches [first, end), at most one for each data rank. Returns the first micro-batch of the next
   round. */
static int run_round(net *n, tt_program *p, int step, int first, int end, tt_status *status)
{
    int rank = 0;
    *status = TT_OK;
    for (; rank < n->data && first < end && *status == TT_OK; rank++, first++) {
        const micro_batch m = batch_of(step, first);
        *status = set_batch(n, p, rank, &m);
    }
    if (*status != TT_OK) return first;
    if (p != n->p) *status = tt_run(p, &n->stats);
    else if (p->settings.options.accumulate) *status = tt_micro_step(p, &n->stats);
    else *status = tt_step(p, 0.01f, &n->stats);
    return first;
}

static tt_status run_step(net *n, int step, int micros)
{
    tt_status status = TT_OK;
    for (int m = 0; m < micros && status == TT_OK;) m = run_round(n, n->p, step, m, micros, &status);
    const bool over = status != TT_OK || !n->p->settings.options.accumulate;
    return over ? status : tt_update(n->p, 0.01f, &n->stats);
}

/* ------------------------------------------------------------------------------------------------ records */

/* Results of a training: statistics of each step, all parameters, the file of the state, statistics and
   outputs of an evaluation. */
typedef struct blob { char *bytes; size_t n; } blob;
typedef struct outcome { tt_stats stats[8]; int steps; blob params, file, eval; } outcome;

static void append(blob *to, const void *from, size_t bytes)
{
    to->bytes = (char *)realloc(to->bytes, to->n + bytes);
    memcpy(to->bytes + to->n, from, bytes);
    to->n += bytes;
}

static void free_outcome(outcome *o)
{
    free(o->params.bytes);
    free(o->file.bytes);
    free(o->eval.bytes);
    memset(o, 0, sizeof *o);
}

static bool same_blob(const blob *a, const blob *b)
{
    return a->bytes && a->n == b->n && memcmp(a->bytes, b->bytes, a->n) == 0;
}

static void keep_end(net *n, outcome *o)
{
    const char *path = test_path(test_folder(), "state");
    for (int k = 0; k < n->n_params; k++) {
        float *x = test_values(n->param[k]);
        append(&o->params, x, sizeof *x * (size_t)tt_param_size(n->param[k]));
        free(x);
    }
    if (!FINE(n, tt_program_save(n->p, path))) return;
    o->file.bytes = test_read(path, &o->file.n);
    remove(path);
}

static void keep_evaluation(net *n, outcome *o)
{
    float pooled[SEQS * WIDTH], first[ROWS * WIDTH];
    tt_status status;
    run_round(n, n->eval, 99, 0, 1, &status);
    if (!FINE(n, status)) return;
    tt_stats s = n->stats;
    s.step = 0; /* an evaluation has no step number */
    append(&o->eval, &s, sizeof s);
    const micro_batch m = batch_of(99, 0);
    FINE(n, tt_get_rank(n->eval, 0, n->out, pooled, TT__COUNT(pooled)));
    FINE(n, tt_get_rank(n->eval, 0, n->first, first, TT__COUNT(first)));
    append(&o->eval, pooled, sizeof *pooled * (size_t)m.seqs * WIDTH);
    append(&o->eval, first, sizeof *first * (size_t)m.rows * WIDTH);
}

static outcome train(const setup *s)
{
    outcome o;
    net n;
    memset(&o, 0, sizeof o);
    if (open_net(&n, s, true)) {
        for (; o.steps < s->steps; o.steps++) {
            if (!FINE(&n, run_step(&n, o.steps, o.steps == 1 && s->micros > 2 ? s->micros - 1 : s->micros)))
                break;
            o.stats[o.steps] = n.stats;
            if (o.steps == 0) keep_evaluation(&n, &o);
        }
        keep_end(&n, &o);
    }
    close_net(&n);
    return o;
}

/* Compares statistics without FLOPs, because some runs recompute more. */
static bool same_stats(const tt_stats *a, const tt_stats *b)
{
    tt_stats x = *a, y = *b;
    x.flops = y.flops = 0;
    return memcmp(&x, &y, sizeof x) == 0;
}

static void check_same(const outcome *a, const outcome *b, const char *what, int line)
{
    const char *wrong = a->steps == b->steps ? NULL : "the number of steps";
    char message[512], text[160];
    for (int k = 0; k < a->steps && !wrong; k++) {
        if (same_stats(&a->stats[k], &b->stats[k])) continue;
        snprintf(text, sizeof text, "step %d (loss %.17g and %.17g, norm %.9g and %.9g)", k, a->stats[k].loss,
                 b->stats[k].loss, a->stats[k].grad_norm, b->stats[k].grad_norm);
        wrong = text;
    }
    if (!wrong && !same_blob(&a->params, &b->params)) wrong = "a parameter";
    if (!wrong && !same_blob(&a->file, &b->file)) wrong = "the file of the state";
    if (!wrong && !same_blob(&a->eval, &b->eval)) wrong = "the evaluation";
    snprintf(message, sizeof message, "%s: %s differs", what, wrong ? wrong : "nothing");
    test__check(!wrong, __FILE__, line, message);
}

/* Returns the setup of this training on one rank. */
static setup on_one(const setup *s)
{
    setup one = *s;
    one.device = "cpu";
    one.pipeline = one.tensor = 1;
    one.late = false;
    return one;
}

static void as_one(const setup *s, const char *what, int line)
{
    const setup one = on_one(s);
    outcome a = train(&one), b = train(s);
    check_same(&a, &b, what, line);
    free_outcome(&a);
    free_outcome(&b);
}

TEST(stages_have_the_bits_of_one)
{
    static const int micros[] = {1, 4, 7};
    for (int m = 0; m < TT__COUNT(micros); m++) {
        const setup like = setup_of("cpu", 1, NULL, micros[m]);
        outcome one = train(&like);
        for (int k = 0; k < 4; k++) {
            char what[64];
            setup s = setup_of(k < 2 ? "cpu*2" : "cpu*4", k < 2 ? 2 : 4, k % 2 ? "gpipe" : "1f1b", micros[m]);
            s.max = k % 2 ? micros[m] : 0;
            s.poison = m == 1;
            snprintf(what, sizeof what, "pipeline %d, %s, %d micro-batches", s.pipeline, s.schedule,
                     s.micros);
            outcome o = train(&s);
            check_same(&one, &o, what, __LINE__);
            free_outcome(&o);
        }
        free_outcome(&one);
    }
}

/* Writes a setup as text. */
static const char *text_of(const setup *s, char text[256])
{
    snprintf(text, 256, "%s pipeline %d %s tensor %d zero %d groups %d, %d micro-batches, %s, %s, offload %s"
             "%s%s%s", s->device, s->pipeline, s->schedule, s->tensor, s->zero, s->groups, s->micros,
             s->precision, s->recompute, s->offload ? s->offload : "none", s->sgd ? ", sgd" : "",
             s->frozen ? ", frozen" : "", s->on_host ? ", updates on the host" : "");
    return text;
}

#define AS_ONE(s) as_one((s), text_of((s), (char[256]){0}), __LINE__)

TEST(stages_in_each_precision)
{
    static const char *const precisions[] = {"bf16-mixed", "bf16-true", "16-mixed", "16-true"};
    for (int k = 0; k < TT__COUNT(precisions); k++) {
        setup s = setup_of("cpu*3", 3, "1f1b", 4);
        s.precision = precisions[k];
        s.sgd = k % 2;
        s.steps = 4;
        AS_ONE(&s);
    }
}

TEST(stages_with_data_ranks)
{
    for (int zero = 0; zero < 2; zero++)
        /* the last round of a step has one micro-batch or, if `micros` is 4, one for each data rank */
        for (int micros = 1; micros <= 7; micros += 3) {
            setup s = setup_of("cpu*4", 2, micros == 4 ? "gpipe" : "1f1b", micros);
            s.max = 4;
            s.zero = zero;
            s.groups = micros == 7 ? 4 : 2;
            AS_ONE(&s);
        }
}

TEST(stages_recompute_and_offload)
{
    static const char *const recomputes[] = {"none", "attention", "blocks"};
    static const char *const offloads[] = {"optimizer", "gradients", "parameters", "activations",
                                           "optimizer,gradients,parameters,activations"};
    for (int k = 0; k < TT__COUNT(recomputes) + TT__COUNT(offloads); k++) {
        setup s = setup_of("cpu*2", 2, k % 2 ? "gpipe" : "1f1b", 3);
        const int offload = k - TT__COUNT(recomputes);
        s.max = 3;
        s.late = k % 3 == 0;
        if (offload < 0) s.recompute = recomputes[k];
        else s.offload = offloads[offload];
        AS_ONE(&s);
        s.on_host = true;
        if (k > 1) AS_ONE(&s);
    }
}

TEST(stages_that_train_nothing_at_first)
{
    setup s = setup_of("cpu*4", 4, "1f1b", 4);
    s.frozen = true;
    AS_ONE(&s);
}

TEST(stages_step_at_once)
{
    setup s = setup_of("cpu*4", 4, "1f1b", 1);
    s.at_once = true;
    AS_ONE(&s);
    s.threads = 8;
    AS_ONE(&s);
}

/* Returns the largest difference of two outcomes' parameters, relative to the largest parameter. */
static double difference(const outcome *a, const outcome *b)
{
    const float *x = (const float *)(const void *)a->params.bytes;
    const float *y = (const float *)(const void *)b->params.bytes;
    double max = 0, scale = 0;
    if (!x || !y || a->params.n != b->params.n) return INFINITY;
    for (size_t k = 0; k < a->params.n / sizeof *x; k++) {
        const double d = fabs((double)x[k] - (double)y[k]);
        if (!(d <= max)) max = d;
        scale = fmax(scale, fabs((double)x[k]));
    }
    return max / scale;
}

/* The first and the last stage both have the tied table, each with a gradient and a state. */
TEST(a_table_of_two_stages)
{
    for (int k = 0; k < 4; k++) {
        setup s = setup_of(k % 2 ? "cpu*4" : "cpu*2", 2, k == 3 ? "gpipe" : "1f1b", 4);
        char what[256], message[512];
        s.max = 4;
        s.tied = true;
        s.sgd = k == 2;
        s.groups = k % 2 ? 2 : 1;
        const setup one = on_one(&s);
        outcome a = train(&one), b = train(&s);
        const double far = difference(&a, &b);
        snprintf(message, sizeof message, "%s: parameters differ by %g of the largest", text_of(&s, what),
                 far);
        test__check(far <= 2e-5, __FILE__, __LINE__, message);
        CHECK(fabs(a.stats[0].grad_norm - b.stats[0].grad_norm) <= 1e-5 * a.stats[0].grad_norm);
        free_outcome(&a);
        free_outcome(&b);
    }
}

/* Both copies of a tied table keep equal numbers, even after a state is loaded. */
TEST(the_copies_of_a_tied_table_stay_alike)
{
    setup s = setup_of("cpu*2", 2, "1f1b", 3);
    const char *path = test_path(test_folder(), "tied");
    net n, m;
    s.tied = true;
    for (int k = 0; k < 2; k++) {
        net *x = k ? &m : &n;
        if (!open_net(x, &s, false)) return;
        if (k) FINE(x, tt_program_load(x->p, path));
        else FINE(x, run_step(x, 0, 3));
        if (!k) FINE(x, tt_program_save(x->p, path));
        FINE(x, run_step(x, 1, 3));
        const tt_param *table = x->param[0];
        if (!CHECK(table->second_owner != NULL && table->owner != table->second_owner)) return;
        const char *first = tt__param_memory(table, 0), *last = tt__param_memory(table, 1);
        CHECK(memcmp(first, last, sizeof(float[VOCAB][WIDTH])) == 0);
        float *set = test_values(x->param[0]);
        for (int j = 0; j < VOCAB * WIDTH; j++) set[j] += 1;
        FINE(x, tt_param_set(x->param[0], set));
        CHECK(memcmp(first, set, sizeof(float[VOCAB][WIDTH])) == 0);
        CHECK(memcmp(last, set, sizeof(float[VOCAB][WIDTH])) == 0);
        free(set);
    }
    CHECK(same_stats(&n.stats, &m.stats));
    close_net(&n);
    close_net(&m);
    remove(path);
}

TEST(stages_of_split_layers)
{
    tt__limit_tensor_least = 1000;
    setup s = setup_of("cpu*4", 2, "1f1b", 3), alone = setup_of("cpu*2", 1, NULL, 3);
    s.tensor = alone.tensor = 2;
    for (int sequence = 0; sequence < 2; sequence++) {
        s.sequence = alone.sequence = sequence;
        outcome a = train(&alone), b = train(&s);
        check_same(&a, &b, "tensor 2 with and without pipeline 2", __LINE__);
        free_outcome(&a);
        free_outcome(&b);
    }
    tt__limit_tensor_least = 1000000;
}

/* A run that stops, is saved, and resumes with another number of stages equals an uninterrupted run. */
TEST(states_resume_on_other_stages)
{
    static const struct { const char *device; int pipeline; } on[] = {
        {"cpu", 1}, {"cpu*2", 2}, {"cpu*4", 4}, {"cpu*4", 2}, {"cpu*3", 3}, {"cpu*2", 1}};
    const char *path = test_path(test_folder(), "resumed");
    blob whole = {NULL, 0}, parts = {NULL, 0};
    for (int resumed = 0; resumed < 2; resumed++) {
        net n;
        for (int step = 0; step < TT__COUNT(on); step++) {
            setup s = setup_of(resumed ? on[step].device : "cpu", resumed ? on[step].pipeline : 1, "1f1b", 4);
            s.groups = 2;
            if (step == 0 || resumed) {
                if (!open_net(&n, &s, false)) return;
                if (step > 0) FINE(&n, tt_program_load(n.p, path));
                CHECK(n.log.warnings == 0);
            }
            FINE(&n, run_step(&n, step, 4));
            if (resumed || step == TT__COUNT(on) - 1) {
                FINE(&n, tt_program_save(n.p, path));
                close_net(&n);
            }
        }
        blob *to = resumed ? &parts : &whole;
        to->bytes = test_read(path, &to->n);
    }
    CHECK(same_blob(&whole, &parts));
    free(whole.bytes);
    free(parts.bytes);
    remove(path);
}

/* ------------------------------------------------------------------------------------------------- memory */

/* Returns the bytes of activations that a stage stores for several micro-batches. */
static size_t bytes_of_micros(const tt_program *p)
{
    size_t bytes = 0;
    for (int k = 0; k < p->built.n_boxes; k++) {
        const tt__box *b = &p->built.box[k];
        const tt__tape_value *x = &p->built.t->values[b->value];
        if (b->value && b->merged == k && x->copies > 1) bytes += tt__slot_bytes(x) * (size_t)x->copies;
    }
    return bytes;
}

/* With 1F1B, stage s of S stages stores the activations of `S - s` micro-batches; with GPipe, of all. The
   bytes planned are the bytes allocated. */
TEST(stages_allocate_what_is_planned)
{
    size_t bytes[2][4];
    for (int gpipe = 0; gpipe < 2; gpipe++) {
        setup s = setup_of("cpu*4", 4, gpipe ? "gpipe" : "1f1b", 7);
        net n;
        s.max = gpipe ? 7 : 0;
        if (!open_net(&n, &s, false)) return;
        size_t planned = 0;
        for (int k = 0; k < 4; k++) {
            const tt_program *q = n.p->stage[k];
            const tt_plan plan = tt_stage_plan(n.p, k);
            CHECK(q->settings.in_flight == (gpipe ? 7 : 4 - k));
            CHECK(plan.bytes == tt__arena_size(q->arena, k) && plan.pipeline == 4);
            CHECK(q->built.transient >= bytes_of_micros(q));
            bytes[gpipe][k] = bytes_of_micros(q) / (size_t)(gpipe ? 7 : 4 - k);
            planned += plan.bytes;
        }
        const long before = n.a.live_bytes;
        if (!FINE(&n, tt_allocate(n.p))) return;
        size_t arenas = 0;
        for (int k = 0; k < 4; k++) arenas += tt__arena_size(n.p->stage[k]->arena, k);
        CHECK(arenas == planned);
        CHECK((size_t)(n.a.live_bytes - (size_t)before) >= planned);
        FINE(&n, run_step(&n, 0, 7));
        const size_t after = n.a.live_bytes;
        for (int step = 1; step < 4; step++) FINE(&n, run_step(&n, step, 7));
        CHECK(n.a.live_bytes == after); /* the first step allocated all buffers of inputs */
        close_net(&n);
    }
    for (int k = 0; k < 3; k++) CHECK(bytes[0][k] == bytes[1][k]); /* equal bytes with both schedules */
}

/* No stage stores more micro-batches than planned, for any number of micro-batches in a step. */
TEST(schedules_of_stages)
{
    for (int stages = 1; stages <= 5; stages++)
        for (int s = 0; s < stages; s++)
            for (int micros = 1; micros <= 9; micros++)
                for (int gpipe = 0; gpipe < 2; gpipe++) {
                    const int max = gpipe ? 9 : micros < stages - s ? micros : stages - s;
                    int forwards = 0, backwards = 0, held = 0;
                    for (int k = 0; k < 2 * micros; k++) {
                        bool backward;
                        const int64_t m = tt__pipeline_action(k, micros, max - 1, &backward);
                        CHECK(m == (backward ? backwards : forwards)); /* micro-batches run in order */
                        if (backward) backwards++;
                        else forwards++;
                        CHECK(backwards <= forwards);
                        if (forwards - backwards > held) held = forwards - backwards;
                    }
                    CHECK(forwards == micros && backwards == micros);
                    CHECK(held <= max && held == (gpipe ? micros : max));
                }
}

/* ------------------------------------------------------------------------------------- refused pipelines */

TEST(pipelines_that_contradict_are_refused)
{
    static const struct { const char *device; tt_parallel p; const char *update, *part; } cases[] = {
        {"cpu*4", {0, 1, 1, false, false, 0, false, 3, NULL, 0}, NULL,
         "device 'cpu*4' has 4 ranks, but parallel.data 1 x parallel.tensor 1 x parallel.pipeline 3 need 3"},
        {"cpu*4", {0, 1, 1, false, false, 0, false, -2, NULL, 0}, NULL, "x parallel.pipeline -2 need"},
        {"cpu*2", {0, 1, 2, false, false, 0, false, 2, NULL, 0}, NULL,
         "does not go with parallel.zero 2 and 3"},
        {"cpu*2", {0, 1, 1, true, false, 0, false, 2, NULL, 0}, NULL,
         "pipeline 2 does not go with parallel.server"},
        {"cpu*2", {0, 1, 1, false, false, 0, true, 2, NULL, 0}, NULL,
         "does not go with parallel.reduce_micros"},
        {"cpu*2", {0, 1, 1, false, false, 0, false, 2, "gpipe", 0}, NULL,
         "schedule 'gpipe' needs parallel.micros"},
        {"cpu*2", {0, 1, 1, false, false, 0, false, 2, "zigzag", 0}, NULL, "schedule 'zigzag' is unknown"},
        {"cpu*2", {0, 1, 1, false, false, 0, false, 2, NULL, -1}, NULL, "micros -1 is negative"},
        {"cpu*2", {0, 1, 1, false, false, 0, false, 2, NULL, 0}, "backward",
         "update 'backward' does not go with parallel.pipeline"},
        {"cpu*8", {0, 1, 1, false, false, 0, false, 8, NULL, 0}, NULL,
         "pipeline 8 needs 7 places to cut, but only 5 of the 5 values that tt_block_end marks are places to "
         "cut, where all that follows depends on the marked value alone: 'layer.0', 'layer.1'"}};
    for (int k = 0; k < TT__COUNT(cases); k++) {
        setup s = setup_of(cases[k].device, 1, NULL, 1);
        net n;
        if (!open_context(&n, &s)) return;
        tt_compile_options o = tt_compile_options_default();
        o.device = cases[k].device;
        o.parallel = cases[k].p;
        o.update = cases[k].update;
        CHECK(!tt_compile(n.t, n.loss, &o));
        CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, cases[k].part);
        close_net(&n);
    }
}

/* Each stage has its parameters in its memory, so another program must keep each parameter on its stage. */
TEST(programs_that_share_are_cut_alike)
{
    setup s = setup_of("cpu*2", 2, NULL, 1);
    net n;
    if (!open_context(&n, &s)) return;
    tt_param *w[4];
    for (int k = 0; k < 4; k++) {
        char name[8];
        snprintf(name, sizeof name, "w.%d", k);
        w[k] = new_param(&n, name, WIDTH, WIDTH, TT_INIT_NORMAL);
    }
    static const int order[3][5] = {{0, 1, 2, 3, -1}, {1, 2, 3, 3, -1}, {3, 1, 2, 0, -1}};
    tt_program *p[3] = {NULL};
    for (int k = 0; k < 3; k++) {
        tt_compile_options o = options_of(&s);
        tt_tape *t = tt_tape_new(n.ctx);
        tt_value x = tt_input(t, "x", TT_F32, 2, WIDTH);
        for (int j = 0; order[k][j] >= 0; j++) {
            x = tt_linear(t, x, w[order[k][j]], NULL);
            tt_block_end(t, x);
        }
        o.train = false;
        o.share = p[0];
        p[k] = tt_compile(t, x, &o);
        tt_tape_free(t);
    }
    CHECK(p[0] && p[1] && !p[2]);
    CHECK_ERROR(n.ctx, TT_ERR_UNSUPPORTED, "pipeline 2: every cut moves some parameter away from the stage");
    for (int k = 0; k < 3; k++) tt_program_free(p[k]);
    close_net(&n);
}

TEST(misuse_of_pipelines)
{
    setup s = setup_of("cpu*2", 2, "gpipe", 2);
    net n;
    float gradient[VOCAB * WIDTH];
    s.max = 2;
    if (!open_net(&n, &s, true)) return;
    CHECK(run_step(&n, 0, 3) != TT_OK);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "more than parallel.micros = 2 micro-batches on a data rank");
    CHECK(tt_update(n.p, 0.01f, NULL) != TT_OK);
    FINE(&n, run_step(&n, 0, 2));
    tt_status status;
    run_round(&n, n.p, 1, 0, 1, &status);
    FINE(&n, status);
    CHECK(tt_get_gradient(n.p, n.param[0], gradient) != TT_OK);
    CHECK_ERROR(n.ctx, TT_ERR_UNSUPPORTED,
                "a pipeline runs the micro-batches of a step and its update together");
    micro_batch m = batch_of(0, 0);
    m.ids[0] = VOCAB; /* an error on the first stage, which reads ids */
    FINE(&n, set_batch(&n, n.p, 0, &m));
    CHECK(tt_micro_step(n.p, NULL) != TT_OK);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "ids");
    CHECK(tt_update(n.p, 0.01f, NULL) != TT_OK);
    CHECK_ERROR(n.ctx, TT_ERR_NUMERIC, "a micro-batch failed");
    m = batch_of(0, 0);
    m.targets[0] = VOCAB + 7; /* an error on the last stage, which reads targets */
    FINE(&n, set_batch(&n, n.p, 0, &m));
    CHECK(tt_micro_step(n.p, NULL) != TT_OK);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "rank 1 of cpu*2: ");
    tt_update(n.p, 0.01f, NULL);
    m = batch_of(0, 0);
    FINE(&n, tt_set_rank(n.p, 0, n.ids, m.ids, m.rows));
    CHECK(tt_micro_step(n.p, NULL) != TT_OK);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "was not set before this run");
    FINE(&n, run_step(&n, 1, 1)); /* the next step succeeds */
    close_net(&n);
}

/* Each allocation of a training fails in turn. The error is returned, nothing leaks, and no rank waits for
   ever. */
TEST(each_allocation_of_a_pipeline_fails)
{
    const setup s = setup_of("cpu*2", 2, "1f1b", 2);
    bool failed = true;
    for (long at = 1; failed; at += 1 + at / 60) {
        test_allocator a;
        net n;
        memset(&n, 0, sizeof n);
        tt_context_options co = test_options(&a);
        co.verify = false;
        n.ctx = tt_open(&co);
        if (!n.ctx || !CHECK(record(&n, false))) return;
        tt_compile_options o = options_of(&s);
        a.fail_at = a.calls + at;
        n.data = 1;
        tt_status status = (n.p = tt_compile(n.t, n.loss, &o)) ? TT_OK : tt_error_code(n.ctx);
        if (status == TT_OK) status = run_step(&n, 0, 2);
        failed = a.failed;
        CHECK(failed ? status == TT_ERR_MEMORY : status == TT_OK);
        a.fail_at = 0;
        tt_program_free(n.p);
        tt_tape_free(n.t);
        TEST_CLOSE(n.ctx, &a);
    }
}

/* Each stage recomputes as much as its own memory requires. */
TEST(stages_fit_a_budget)
{
    setup s = setup_of("cpu*2", 2, "1f1b", 4);
    net n;
    s.recompute = "none";
    if (!open_net(&n, &s, false)) return;
    const size_t max = tt_program_plan(n.p).bytes;
    close_net(&n);
    s.recompute = "blocks";
    if (!open_net(&n, &s, false)) return;
    const size_t min = tt_program_plan(n.p).bytes;
    close_net(&n);
    if (!CHECK(min < max)) return;
    s.recompute = "budget";
    s.budget = min + (max - min) / 2;
    if (!open_net(&n, &s, false)) return;
    for (int k = 0; k < 2; k++) CHECK(tt_stage_plan(n.p, k).bytes <= s.budget);
    CHECK(tt_program_plan(n.p).extra_flops > 0);
    close_net(&n);
    setup one = on_one(&s);
    one.recompute = "none";
    one.budget = 0;
    outcome a = train(&one), b = train(&s);
    check_same(&a, &b, "two stages within a budget", __LINE__);
    free_outcome(&a);
    free_outcome(&b);
}

/* The bytes that a refusal names are enough for all stages, whichever needs most. */
TEST(stages_that_do_not_fit_are_refused_together)
{
    static const char *const recompute[] = {"none", "blocks", "budget"};
    int later = 0;
    for (int k = 0; k < 12; k++) {
        if ((k + k / 6 + 1) % test_every(2)) continue;
        setup s = setup_of("cpu*3", 3, k % 2 ? "gpipe" : "1f1b", 4);
        test_allocator a;
        net n;
        memset(&n, 0, sizeof n);
        tt_context_options co = test_options(&a);
        n.ctx = tt_open(&co);
        if (n.ctx) n.ctx->apart = true; /* the device has its own memory, so the error can advise offload */
        if (!n.ctx || !CHECK(record(&n, k / 6))) return;
        if (k % 2) tt_param_freeze(n.ctx, "table", true), tt_param_freeze(n.ctx, "layer.0.*", true);
        s.max = 4;
        s.recompute = recompute[k / 2 % 3];
        s.budget = 1;
        tt_compile_options o = options_of(&s);
        CHECK(!tt_compile(n.t, n.loss, &o));
        CHECK_ERROR(n.ctx, TT_ERR_BUDGET, "a rank, but memory_budget is 1: ");
        int stage = -1;
        size_t needs = 0;
        CHECK(sscanf(tt_error(n.ctx), "the plan of stage %d needs %zu", &stage, &needs) == 2);
        const char *min = strstr(tt_error(n.ctx), "at least ");
        if (min) CHECK(sscanf(min, "at least %zu", &needs) == 1);
        later += stage > 0;
        o.memory_budget = needs - 1;
        CHECK(!tt_compile(n.t, n.loss, &o));
        CHECK_ERROR(n.ctx, TT_ERR_BUDGET, "the plan of stage ");
        o.memory_budget = needs;
        CHECK((n.p = tt_compile(n.t, n.loss, &o)) != NULL);
        for (int j = 0; j < 3 && n.p; j++) CHECK(tt_stage_plan(n.p, j).bytes <= needs);
        CHECK(!n.p || tt_program_plan(n.p).bytes == needs);
        tt_program_free(n.p);
        tt_tape_free(n.t);
        TEST_CLOSE(n.ctx, &a);
    }
    CHECK(later > 0);
}

/* An error about a stage that does not fit says how many bytes "bf16-true" needs, although the other stage
   fits and has set the dtype of its parameters. */
TEST(stages_are_advised_of_precision)
{
    setup s = setup_of("cpu*2", 2, "1f1b", 4);
    test_allocator a;
    net n;
    memset(&n, 0, sizeof n);
    n.ctx = test_open(&a);
    if (!n.ctx || !CHECK(record(&n, 0))) return;
    s.max = 4;
    s.budget = 1;
    tt_compile_options o = options_of(&s);
    CHECK(!tt_compile(n.t, n.loss, &o));
    int stage = -1;
    CHECK(sscanf(tt_error(n.ctx), "the plan of stage %d needs %zu", &stage, &o.memory_budget) == 2);
    o.memory_budget--; /* one byte too few for this stage; the other stage fits */
    CHECK(!tt_compile(n.t, n.loss, &o));
    CHECK_ERROR(n.ctx, TT_ERR_BUDGET, "; precision \"bf16-true\" needs ");
    o.precision = "bf16-true";
    CHECK((n.p = tt_compile(n.t, n.loss, &o)) != NULL);
    tt_program_free(n.p);
    tt_tape_free(n.t);
    TEST_CLOSE(n.ctx, &a);
}

/* ------------------------------------------------------------------------------------------------ on CUDA */

TEST(stages_on_cuda)
{
#ifdef TINYTRAIN_CUDA
    static const char *const devices[][2] = {{"cuda:0,0", "cuda*2"}, {"cuda:0,0,0,0", "cuda*4"}};
    int several = 0, seeds = 1, skips = -1;
#ifdef TT_EMULATE /* each slow build runs half of the cases; the trace build runs the half with offload */
    several = 1;
    seeds = strcmp(emu_build(), "plain") == 0 ? 3 : 1;
    skips = strcmp(emu_build(), "plain") == 0 ? -1 : strcmp(emu_build(), "trace") == 0;
#endif
    for (int k = 0; k < 4; k++)
        for (int seed = 1; seed <= seeds; seed++) {
            if (skips == (k == 1 || k == 2)) continue;
            setup s = setup_of(devices[k / 2][several], k < 2 ? 2 : 4, k % 2 ? "gpipe" : "1f1b", 4);
            setup one = s;
            s.max = 4;
            s.precision = one.precision = k == 1 ? "16-mixed" : k == 2 ? "bf16-true" : "32-true";
            s.offload = k == 3 ? "optimizer,activations" : NULL;
            s.steps = one.steps = 2;
            one.device = "cuda";
            one.pipeline = 1;
#ifdef TT_EMULATE
            emu_configure(4, (size_t)64 << 20, 1, (uint64_t)seed);
#endif
            outcome a = train(&one), b = train(&s);
            char what[256];
            check_same(&a, &b, text_of(&s, what), __LINE__);
            free_outcome(&a);
            free_outcome(&b);
        }
#else
    SKIP("this build is without TINYTRAIN_CUDA");
#endif
}

/* Kernels copy from one stage to another, so stages on devices that do not reach each other are refused. */
TEST(stages_that_are_apart_are_refused)
{
#ifdef TT_EMULATE
    setup s = setup_of("cuda*2", 2, "1f1b", 1);
    net n;
    emu_configure(2, (size_t)64 << 20, 0, 1);
    if (!open_net(&n, &s, false)) return;
    CHECK(tt_allocate(n.p) != TT_OK);
    CHECK_ERROR(n.ctx, TT_ERR_UNSUPPORTED, "pipeline 2 needs devices that load from each other's memory");
    close_net(&n);
#else
    SKIP("only the emulator of CUDA has such devices");
#endif
}

static const test_case tests[] = {
    TEST_CASE(stages_have_the_bits_of_one),
    TEST_CASE(stages_in_each_precision),
    TEST_CASE(stages_with_data_ranks),
    TEST_CASE(stages_recompute_and_offload),
    TEST_CASE(stages_that_train_nothing_at_first),
    TEST_CASE(stages_step_at_once),
    TEST_CASE(a_table_of_two_stages),
    TEST_CASE(the_copies_of_a_tied_table_stay_alike),
    TEST_CASE(stages_of_split_layers),
    TEST_CASE(states_resume_on_other_stages),
    TEST_CASE(stages_allocate_what_is_planned),
    TEST_CASE(schedules_of_stages),
    TEST_CASE(pipelines_that_contradict_are_refused),
    TEST_CASE(programs_that_share_are_cut_alike), TEST_CASE(misuse_of_pipelines),
    TEST_CASE(each_allocation_of_a_pipeline_fails),
    TEST_CASE(stages_fit_a_budget),
    TEST_CASE(stages_that_do_not_fit_are_refused_together),
    TEST_CASE(stages_are_advised_of_precision),
    TEST_CASE(stages_on_cuda),
    TEST_CASE(stages_that_are_apart_are_refused),
};

int main(int argc, char **argv)
{
    tt__limit_pieces_from = 1;
    tt__limit_offload_together = 1L << 14;
    return test_main(argc, argv, tests, TEST_COUNT(tests));
}
