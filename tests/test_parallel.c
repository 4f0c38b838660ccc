/* Tests of whole programs on CPU ranks: any layout gives the bits of one rank; errors; faults in a rank;
   planned and allocated memory.

   The training is a small transformer with a table that is embedding and head, a norm that two layers share,
   a frozen matrix, dropout, clipping and, in 16 bits, a loss scale that overflows at first. Its steps have
   micro-batches of different sizes. In one step the number of micro-batches is no multiple of the number of
   leaves, in another step there are fewer micro-batches than leaves. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

enum {
    WIDTH = 64, HIDDEN = 150, VOCAB = 410, LAYERS = 2, /* matrices of 1 to 7 chunks, some partial */
    ROWS = 24, SEQS = 4, STEPS = 4, PARAMS = 32
};

/* The options of a training. */
enum { SERVER = 1, MICROS = 2, EARLY = 4 };
typedef struct layout { const char *device; int zero, how; } layout;
typedef struct setup {
    layout on;
    const char *precision, *recompute, *offload;
    int groups, per_leaf;    /* number of leaves; per_leaf: micro-batches of a leaf in a full step */
    int threads;
    int64_t capacity, vocab; /* capacity: max rows of a micro-batch; vocab: rows of the table */
    bool sgd;
    bool poison;             /* dead storage is overwritten */
    bool at_once;            /* a step is one round of micro-batches, by tt_step */
    bool unclipped;
    bool late;               /* copies and collectives complete as late as allowed */
    bool prompt;             /* copies and collectives complete as early as possible */
    int tensor;              /* number of tensor ranks; 0: one */
    bool sequence;
    bool net;                /* runs on the ranks of all started processes, see mpi.c */
    int pipeline, max;      /* tt_parallel's `pipeline` and `micros` */
    const char *schedule;
    bool on_host;            /* parameters are updated in the host's memory */
    int bits;                /* tt_optimizer_options.state_bits; 0: the default */
    int kind;                /* a tt_optimizer_kind; 0: TT_ADAMW or, if `sgd`, TT_SGD */
    int prunes;              /* weights are pruned: 1 by magnitude, 2 by movement; 0: none */
} setup;

static const char *shared_folder; /* folder of all processes, for states */
static double wait_seconds = 3000; /* seconds; the program's time limit ends a rank that waits for ever */

static setup setup_of(layout on, const char *precision, int groups, int per_leaf)
{
    const setup s = {on,   precision, "cheap", NULL,  groups, per_leaf, 1,
                     ROWS, VOCAB,     false,   false, false,  false,    false, false, 0, false, false,
                     0,    0,         NULL,   false, 0,      0,        0};
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
    int64_t seqs; /* the axis of sequences */
    tt_value ids, starts, targets, weights, out, columns, loss;
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
    return new_param(n, full, rows, cols, cols ? TT_INIT_NORMAL : TT_INIT_UNIFORM);
}

static tt_value record_layer(net *n, int layer, tt_value x, tt_param *norm, tt_param *norm_b)
{
    tt_tape *t = n->t;
    tt_attention_options o = tt_attention_options_default(4);
    o.dropout = 0.1f;
    tt_param *qkv = layer_param(n, layer, "qkv", 3 * WIDTH, WIDTH);
    tt_param *qkv_b = layer_param(n, layer, "qkv_b", 3 * WIDTH, 0);
    tt_param *out = layer_param(n, layer, "out", WIDTH, WIDTH);
    tt_param *up = layer_param(n, layer, "up", HIDDEN, WIDTH);
    tt_param *up_b = layer_param(n, layer, "up_b", HIDDEN, 0);
    tt_param *down = layer_param(n, layer, "down", WIDTH, HIDDEN);
    tt_value y = tt_linear(t, tt_layernorm(t, x, norm, norm_b, 1e-5f), qkv, qkv_b);
    tt_value q = tt_slice(t, y, 0, WIDTH), k = tt_slice(t, y, WIDTH, WIDTH);
    tt_value v = tt_slice(t, y, 2 * WIDTH, WIDTH);
    y = tt_linear(t, tt_attention(t, q, k, v, n->starts, &o), out, NULL);
    x = tt_add(t, x, tt_dropout(t, y, 0.1f));
    y = tt_linear(t, tt_layernorm(t, x, norm, norm_b, 1e-5f), up, up_b);
    y = tt_linear(t, tt_gelu(t, y), down, NULL);
    x = tt_add(t, x, tt_dropout(t, y, 0.1f));
    tt_block_end(t, x);
    return x;
}

static bool record(net *n, int64_t capacity, int64_t vocab)
{
    tt_tape *t = n->t = tt_tape_new(n->ctx);
    const int64_t rows = tt_axis(t, "tokens", capacity), seqs = n->seqs = tt_axis(t, "seqs", SEQS);
    tt_param *table = new_param(n, "table", vocab, WIDTH, TT_INIT_NORMAL);
    tt_param *mix = new_param(n, "mix", WIDTH, WIDTH, TT_INIT_NORMAL);
    tt_param *norm = new_param(n, "norm", WIDTH, 0, TT_INIT_ONES);
    tt_param *norm_b = new_param(n, "norm_b", WIDTH, 0, TT_INIT_ZEROS);
    tt_param_freeze(n->ctx, "mix", true);
    n->ids = tt_input(t, "ids", TT_I32, rows, 1);
    n->starts = tt_seq_start(t, "starts", seqs);
    n->targets = tt_input(t, "targets", TT_I32, rows, 1);
    n->weights = tt_input(t, "weights", TT_F32, rows, 1);
    n->columns = tt_slice(t, tt_param_value(t, table), 3, 5); /* only tt_get reads the slice */
    tt_value x = tt_embedding(t, n->ids, table);
    x = tt_add(t, x, tt_linear(t, x, mix, NULL));
    for (int k = 0; k < LAYERS; k++) x = record_layer(n, k, x, norm, norm_b);
    n->out = tt_mean_pool(t, x, n->starts);
    tt_name(t, n->out, "pooled");
    tt_output(t, n->out);
    tt_cross_entropy_options o = tt_cross_entropy_options_default();
    o.weights = n->weights;
    n->loss = tt_cross_entropy(t, tt_linear(t, x, table, NULL), n->targets, &o);
    return tt_tape_status(t) == TT_OK;
}

static tt_compile_options options_of(const setup *s)
{
    tt_compile_options o = tt_compile_options_default();
    o.device = s->on.device;
    o.parallel.zero = s->on.zero;
    o.parallel.server = (s->on.how & SERVER) != 0;
    o.parallel.reduce_micros = (s->on.how & MICROS) != 0;
    o.parallel.groups = s->groups;
    o.parallel.tensor = s->tensor;
    o.parallel.sequence = s->sequence;
    o.parallel.pipeline = s->pipeline;
    o.parallel.schedule = s->schedule;
    o.parallel.micros = s->max;
    o.precision = s->precision;
    o.recompute = s->recompute;
    o.offload = s->offload;
    o.accumulate = !s->at_once;
    o.optimizer.clip_norm = s->unclipped ? 0 : 2.5f;
    if (s->on.how & EARLY) o.update = "backward";
    if (s->on_host) o.update = "host";
    o.loss_scale.init = 0x1p36f; /* overflows */
    o.loss_scale.backoff = 0x1p-28f;
    if (s->bits) o.optimizer.state_bits = s->bits;
    o.optimizer.prune = s->prunes ? 0.8f : 0;
    o.optimizer.prune_by_movement = s->prunes == 2;
    o.optimizer.prune_end = STEPS - 1;
    o.optimizer.prune_every = 1;
    if (s->kind) {
        o.optimizer.kind = (tt_optimizer_kind)s->kind;
        o.optimizer.momentum = 0.95f;
    }
    if (s->sgd) {
        o.optimizer.kind = TT_SGD;
        o.optimizer.momentum = 0.9f;
        o.optimizer.nesterov = true;
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

static void (*context_opened)(tt_context *ctx); /* NULL, or a function of tests/mpi.c */

/* Opens a context with the net and its program; with `evaluates` also a program that shares the arena. */
static bool open_net(net *n, const setup *s, bool evaluates)
{
    memset(n, 0, sizeof *n);
    tt_context_options co = test_options(&n->a);
    co.logger.log = test__keep_log;
    co.logger.user = &n->log;
    co.threads = s->threads;
    co.timeout = wait_seconds;
    co.verify = true;
    if (setenv("TINYTRAIN_ALONE", s->net ? "0" : "1", 1) != 0) return CHECK(!"setenv");
    n->ctx = tt_open(&co);
    if (n->ctx && context_opened) context_opened(n->ctx);
    if (!n->ctx || !CHECK(record(n, s->capacity, s->vocab))) return false;
    n->ctx->late = s->late;
    tt_compile_options o = options_of(s);
    n->p = tt_compile(n->t, n->loss, &o);
    if (!FINE(n, n->p ? TT_OK : tt_error_code(n->ctx))) return false;
    n->p->poison = s->poison;
    if (s->prompt) n->ctx->late = false;
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
    float weights[ROWS];
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
        m.weights[k] = (float)(1 + test_random(&random) % 3) / 2;
    }
    return m;
}

static tt_status set_batch(net *n, tt_program *p, int rank, const micro_batch *m)
{
    tt_status status = tt_set_rank(p, rank, n->ids, m->ids, m->rows);
    if (status == TT_OK) status = tt_set_rank(p, rank, n->starts, m->starts, m->seqs + 1);
    if (status == TT_OK) status = tt_set_rank(p, rank, n->targets, m->targets, m->rows);
    return status == TT_OK ? tt_set_rank(p, rank, n->weights, m->weights, m->rows) : status;
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

/* Returns the number of micro-batches of a step. Some steps are full. In other steps the number is no
   multiple of the number of leaves, or smaller than the number of leaves. */
static int micros_of(const setup *s, int step)
{
    const int full = s->groups * s->per_leaf;
    return step == 1 ? full - (full > 3 ? 3 : full > 1) : step == 2 ? 1 + s->groups / 3 : full;
}

/* ------------------------------------------------------------------------------------------------ records */

/* Results of a training: statistics of each step, all parameters, the tensors of the state, and the state's
   file. */
typedef struct blob { char *bytes; size_t n; } blob;
typedef struct outcome { tt_stats stats[STEPS]; blob params, tensors, file; } outcome;

static void free_outcome(outcome *o)
{
    free(o->params.bytes);
    free(o->tensors.bytes);
    free(o->file.bytes);
    memset(o, 0, sizeof *o);
}

static void append(blob *to, const void *from, size_t bytes)
{
    to->bytes = (char *)realloc(to->bytes, to->n + bytes);
    memcpy(to->bytes + to->n, from, bytes);
    to->n += bytes;
}

static bool same_blob(const blob *a, const blob *b)
{
    return a->bytes && a->n == b->n && memcmp(a->bytes, b->bytes, a->n) == 0;
}

/* Keeps the tensors of a state, except the tensor that describes the state's layout. */
static void keep_tensors(net *n, const char *path, outcome *o)
{
    tt_safetensors *s = tt_safetensors_open(n->ctx, path);
    if (!CHECK(s != NULL)) return;
    for (int k = 0; k < tt_safetensors_count(s); k++) {
        const tt_tensor_info *info = tt_safetensors_info(s, k);
        if (strcmp(info->name, "tinytrain.run") == 0) continue;
        char *bytes = test_tensor(s, k);
        append(&o->tensors, bytes, info->bytes);
        free(bytes);
    }
    tt_safetensors_close(s);
}

static void keep_end(net *n, outcome *o)
{
    const bool net = shared_folder && n->ctx->net;
    const char *path = test_path(net ? shared_folder : test_folder(), "state");
    for (int k = 0; k < n->n_params; k++) {
        float *x = test_values(n->param[k]);
        append(&o->params, x, sizeof *x * (size_t)tt_param_size(n->param[k]));
        free(x);
    }
    if (!FINE(n, tt_program_save(n->p, path))) return;
    o->file.bytes = test_read(path, &o->file.n);
    keep_tensors(n, path, o);
    if (!net) remove(path); /* another process may still read the file */
}

/* Compares statistics without FLOPs, because some runs recompute more. */
static bool same_stats(const tt_stats *a, const tt_stats *b)
{
    tt_stats x = *a, y = *b;
    x.flops = y.flops = 0;
    return memcmp(&x, &y, sizeof x) == 0;
}

static const char *layout_text(const setup *s, char text[256])
{
    const bool server = (s->on.how & SERVER) != 0, micros = (s->on.how & MICROS) != 0;
    snprintf(text, 256, "%s zero %d%s%s%s, groups %d, %d a leaf, %s, %s, offload %s, %d threads%s, %d bits",
             s->on.device, s->on.zero, server ? " server" : "", micros ? " of micros" : "",
             s->on.how & EARLY ? " early" : s->on_host ? " on the host" : "", s->groups, s->per_leaf,
             s->precision, s->recompute,
             s->offload ? s->offload : "none", s->threads, s->sgd ? ", sgd" : "", s->bits ? s->bits : 32);
    return text;
}

/* Compares two outcomes. If `file`, compares FLOPs and the states' files, too, which are equal only if the
   two runs sum in the same order. */
static bool same_outcome(const setup *s, const outcome *a, const outcome *b, bool file, int line)
{
    char what[256], text[512];
    const char *wrong = NULL;
    for (int k = 0; k < STEPS && file && !wrong; k++)
        if (a->stats[k].flops != b->stats[k].flops) wrong = "the work";
    for (int k = 0; k < STEPS && !wrong; k++)
        if (!same_stats(&a->stats[k], &b->stats[k])) {
            snprintf(text, sizeof text, "what step %d tells (loss %.17g and %.17g, norm %.9g and %.9g)", k,
                     a->stats[k].loss, b->stats[k].loss, a->stats[k].grad_norm, b->stats[k].grad_norm);
            wrong = text;
        }
    if (!wrong && !same_blob(&a->params, &b->params)) wrong = "a parameter";
    if (!wrong && !same_blob(&a->tensors, &b->tensors)) wrong = "the optimizer state";
    if (!wrong && file && !same_blob(&a->file, &b->file)) wrong = "the file of the state";
    char message[1024];
    snprintf(message, sizeof message, "%s: %s differs", layout_text(s, what), wrong ? wrong : "nothing");
    return test__check(!wrong, __FILE__, line, message);
}

/* Trains all steps and keeps the outcome. */
static bool train(const setup *s, outcome *o)
{
    net n;
    memset(o, 0, sizeof *o);
    bool ok = open_net(&n, s, false);
    for (int step = 0; step < STEPS && ok; step++) {
        ok = FINE(&n, run_step(&n, step, micros_of(s, step)));
        o->stats[step] = n.stats;
    }
    if (ok) keep_end(&n, o);
    close_net(&n);
    return ok && o->file.bytes;
}

/* --------------------------------------------------------------------------------------------------- bits */

static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};


/* `ones`: layouts of one rank, which sums per step or per micro-batch. Trainings on `layouts` are compared
   with trainings on `ones`. */
static const layout ones[] = {{"cpu", 1, 0}, {"cpu", 0, MICROS}};
static const layout layouts[] = {
    {"cpu", 0, 0},    {"cpu", 0, SERVER},   {"cpu*2", 0, 0},      {"cpu*4", 0, 0},
    {"cpu*8", 0, 0},  {"cpu*2", 1, 0},      {"cpu*4", 1, 0},      {"cpu*8", 1, 0},
    {"cpu", 2, 0},    {"cpu", 3, 0},        {"cpu*2", 2, 0},      {"cpu*4", 2, 0},
    {"cpu*8", 2, 0},  {"cpu*2", 3, 0},      {"cpu*4", 3, 0},      {"cpu*8", 3, 0},
    {"cpu*2", 0, SERVER}, {"cpu*4", 1, SERVER}, {"cpu*8", 0, SERVER},
    {"cpu*2", 0, MICROS}, {"cpu*4", 1, MICROS}, {"cpu*8", 0, SERVER | MICROS}};

static const char *const offloads[] = {"optimizer", "gradients", "parameters", "activations",
                                       "optimizer,gradients,parameters,activations"};

static int sums_micros(layout l) { return l.zero > 1 || l.how & MICROS; }

/* Trains on every `every`th layout, beginning with number `from`, and compares each with one rank that sums
   in the same order. one: the outcomes of one rank, which the caller frees. */
static void same_as_one(setup s, const layout *on, int count, int from, int every, outcome one[2])
{
    for (int k = 0; k < 2; k++) {
        s.on = ones[k];
        train(&s, &one[k]);
    }
    for (int k = from % every; k < count; k += every) {
        outcome many;
        s.on = on[k];
        if (train(&s, &many)) same_outcome(&s, &one[sums_micros(s.on)], &many, true, __LINE__);
        free_outcome(&many);
    }
}

static void same_bits(setup s, const layout *on, int count)
{
    outcome one[2];
    same_as_one(s, on, count, 0, 1, one);
    free_outcome(&one[0]);
    free_outcome(&one[1]);
}

/* Tells whether TINYTRAIN_ALL_LAYOUTS in the environment asks for all layouts instead of some of each
   kind. */
static bool everything(void) { return getenv("TINYTRAIN_ALL_LAYOUTS") != NULL; }
/* With TEST_SWEEP, tests run only a share of the layouts and precisions, but some layouts of every kind. */
#if TEST_SWEEP > 10
enum { SPARSE = 5, PRECISIONS = 1, EVERY = 1, TURNS = 1 };
#elif TEST_SWEEP > 1
enum { SPARSE = (2 * TEST_SWEEP + 1) / 3, PRECISIONS = 5, EVERY = 2, TURNS = (TEST_SWEEP + 2) / 3 };
#else
enum { SPARSE = 1, PRECISIONS = 5, EVERY = 1, TURNS = 1 };
#endif

static const int micros_per_leaf[] = {1, 3, 8};

static void bits_of(int number, int precision, int every)
{
    outcome one[2];
    setup s = setup_of(ones[0], precisions[precision], 8, micros_per_leaf[number]);
    s.sgd = (precision + number) % 3 == 1;
    s.poison = number == 0;
    same_as_one(s, layouts, TEST_COUNT(layouts), 3 * precision + number, every, one);
    if (number == 0) same_outcome(&s, &one[0], &one[1], false, __LINE__);
    else CHECK(one[0].params.bytes && one[1].params.bytes && !same_blob(&one[0].params, &one[1].params));
    free_outcome(&one[0]);
    free_outcome(&one[1]);
}

TEST(ranks_have_the_bits_of_one)
{
    for (int a = 0; a < TEST_COUNT(micros_per_leaf); a++)
        for (int p = 0; p < PRECISIONS; p++) bits_of(a, p, (4 + 4 * a) * EVERY * EVERY * TURNS);
}

TEST(all_ranks_have_the_bits_of_one)
{
    if (!everything()) SKIP("a minute; TINYTRAIN_ALL_LAYOUTS=1 runs it");
    for (int a = 0; a < TEST_COUNT(micros_per_leaf); a++)
        for (int p = 0; p < PRECISIONS; p++) bits_of(a, p, 1);
}

TEST(ranks_that_are_no_power_of_two)
{
    static const layout on[] = {{"cpu*3", 1, 0}, {"cpu*3", 0, 0}, {"cpu*3", 1, SERVER},
                                {"cpu*3", 2, 0}, {"cpu*3", 3, 0}, {"cpu*3", 0, SERVER | MICROS}};
    for (int p = 0; p < PRECISIONS; p++) {
        setup s = setup_of(ones[0], precisions[p], 3, 1 + p % 3);
        s.sgd = p == 2;
        s.poison = true;
        same_bits(s, on, TEST_COUNT(on));
    }
}

static const layout some[] = {{"cpu*2", 1, 0}, {"cpu*4", 1, 0}, {"cpu*4", 0, SERVER},
                              {"cpu*4", 2, 0}, {"cpu*2", 3, 0}, {"cpu*4", 3, 0}};

TEST(leaves_that_are_no_power_of_two)
{
    same_bits(setup_of(ones[0], "bf16-true", 12, 2), some, TEST_COUNT(some));
}

TEST(ranks_split_large_tensors_only)
{
    setup s = setup_of(ones[0], "bf16-mixed", 4, 2);
    s.vocab = 65536 / WIDTH; /* the table is just large enough to be divided */
    tt__limit_pieces_from = 65536;
    same_bits(s, some, TEST_COUNT(some));
    tt__limit_pieces_from = 1;
}

TEST(ranks_with_a_loss_in_chunks) /* the forward of a loss in chunks computes the loss's gradient, too */
{
    static char text[1 << 18];
    setup s = setup_of(some[0], "32-true", 4, 2);
    net n;
    tt__limit_loss_whole = 1;
    s.capacity = 600;
    s.poison = true;
    if (open_net(&n, &s, false)) {
        tt_program_text(n.p, text, sizeof text);
        CHECK(strstr(text, "linear_cross_entropy") != NULL);
    }
    close_net(&n);
    same_bits(s, some, TEST_COUNT(some));
    s.precision = "16-mixed";
    same_bits(s, some, TEST_COUNT(some));
    tt__limit_loss_whole = 16L << 20;
}

TEST(ranks_step_at_once)
{
    static const layout on[] = {{"cpu*4", 0, 0}, {"cpu*4", 1, 0},      {"cpu*4", 2, 0},
                                {"cpu*4", 3, 0}, {"cpu*4", 1, SERVER}, {"cpu*4", 0, MICROS}};
    for (int p = 0; p < PRECISIONS; p++) {
        setup s = setup_of(ones[0], precisions[p], 4, 1);
        outcome one, many;
        s.poison = true;
        if (!train(&s, &one)) return;
        s.at_once = true;
        for (int k = 0; k < TEST_COUNT(on); k++) {
            s.on = on[k];
            if (train(&s, &many)) same_outcome(&s, &one, &many, false, __LINE__);
            free_outcome(&many);
        }
        free_outcome(&one);
    }
}

TEST(ranks_recompute)
{
    static const char *const policies[] = {"none", "cheap", "attention", "blocks"};
    static const layout on[] = {{"cpu*4", 1, 0}, {"cpu*2", 0, SERVER}, {"cpu*4", 3, 0},
                                {"cpu*2", 2, 0}};
    for (int p = 0; p < PRECISIONS; p++) {
        setup s = setup_of(ones[0], precisions[p], 4, 1);
        s.poison = true;
        outcome one, many;
        if (!train(&s, &one)) return;
        for (int k = 0; k < TEST_COUNT(policies); k++) {
            s.recompute = policies[k];
            s.on = on[(k + p) % TEST_COUNT(on)];
            if (train(&s, &many)) same_outcome(&s, &one, &many, false, __LINE__);
            free_outcome(&many);
        }
        free_outcome(&one);
    }
}

/* Gathers and sums that end as late as allowed change no bits. */
TEST(ranks_overlap)
{
    static const layout on[] = {{"cpu*2", 3, 0}, {"cpu*4", 3, 0}, {"cpu*4", 2, 0}, {"cpu*2", 0, MICROS}};
    static char text[1 << 18];
    for (int p = 0; p < PRECISIONS; p++) {
        setup s = setup_of(on[0], precisions[p], 4, 2);
        net n;
        const int half = p % EVERY * 2;
        s.late = s.poison = true;
        s.recompute = p % 2 ? "blocks" : "cheap";
        if (open_net(&n, &s, false)) {
            int hoisted = 0, waits = 0;
            const tt_tape *t = n.p->built.t;
            for (int k = 0; k + 1 < t->n_code; k++) {
                waits += t->code[k].op == TT__OP_WAIT;
                hoisted += t->code[k].op == TT__OP_ALL_GATHER && t->code[k].stream == TT__RANKS_STREAM &&
                           t->code[k + 1].op != TT__OP_WAIT;
            }
            tt_program_text(n.p, text, sizeof text);
            CHECK(strstr(text, "wait") != NULL && hoisted > 8 && waits > 16 && n.p->built.in_flight > 1);
        }
        close_net(&n);
        same_bits(s, on + half, TEST_COUNT(on) / EVERY);
        s.prompt = true;
        s.offload = p % 2 ? NULL : "activations"; /* ranks without a micro-batch do not copy activations */
        same_bits(s, on + half, TEST_COUNT(on) / EVERY);
    }
}

/* Checks that offload changes no bits of the training and of the state. */
static void offloads_with(const layout *on, int count, const char *precision, int groups, int per_leaf,
                          bool at_once)
{
    const int all = TEST_COUNT(offloads) - 1;
    outcome one[2], many;
    setup s = setup_of(on[0], precision, groups, per_leaf);
    s.poison = true;
    s.at_once = at_once;
    memset(one, 0, sizeof one);
    for (int k = 0; k < count; k++) {
        s.on = at_once ? on[k] : ones[sums_micros(on[k])];
        s.offload = NULL;
        s.late = s.prompt = false;
        outcome *expected = &one[at_once ? 0 : sums_micros(on[k])];
        if (at_once) free_outcome(expected);
        if (!expected->params.bytes && !train(&s, expected)) return;
        s.on = on[k];
        for (int m = 0; m < TEST_COUNT(offloads); m++) {
            s.offload = offloads[m];
            s.late = (k + m) % 3 != 2;
            s.prompt = (k + m) % 3 == 0;
            if (!everything() && m != all && m != k % all) continue;
            if (train(&s, &many)) same_outcome(&s, expected, &many, true, __LINE__);
            free_outcome(&many);
            s.on_host = true;
            if (everything() || (m == all) == (k % 2 == 0)) {
                if (m < all && k % 4 == 1) s.offload = NULL;
                if (train(&s, &many)) same_outcome(&s, expected, &many, true, __LINE__);
                free_outcome(&many);
            }
            s.on_host = false;
        }
    }
    free_outcome(&one[0]);
    free_outcome(&one[1]);
}

TEST(ranks_offload)
{
    static const layout on[] = {{"cpu", 0, 0},    {"cpu*2", 0, 0},      {"cpu*4", 1, 0},
                                {"cpu*2", 2, 0},  {"cpu*4", 3, 0},      {"cpu*4", 0, SERVER},
                                {"cpu*2", 3, 0},  {"cpu*2", 0, MICROS}, {"cpu*2", 1, SERVER | MICROS}};
    for (int p = 0; p < PRECISIONS; p++) {
        if (EVERY > 1) { /* runs each layout in one precision */
            offloads_with(on + 2 * p, p < 4 ? 2 : 1, precisions[p], 4, 2, false);
            offloads_with(on + 2 * p, p < 4 ? 2 : 1, precisions[p], 4, 1, true);
            continue;
        }
        offloads_with(on + p % 2, everything() ? 8 : 4 + p % 4, precisions[p], 4, 2, false);
        offloads_with(on + p, 4, precisions[p], 4, 1, true);
    }
}

TEST(ranks_of_any_number_of_threads)
{
    static const layout on[] = {{"cpu", 2, 0}, {"cpu*2", 3, 0}, {"cpu*4", 2, 0}};
    static const int threads[] = {1, 2, 5, 9};
    setup s = setup_of(on[0], "bf16-true", 4, 1);
    s.poison = true;
    outcome one, many;
    if (!train(&s, &one)) return;
    for (int k = 0; k < TEST_COUNT(threads) * TEST_COUNT(on); k++) {
        s.threads = threads[k / TEST_COUNT(on)];
        s.on = on[k % TEST_COUNT(on)];
        if (train(&s, &many)) same_outcome(&s, &one, &many, true, __LINE__);
        free_outcome(&many);
    }
    free_outcome(&one);
}

/* ---------------------------------------------------------------- gradients and evaluations between runs */

/* Returns a copy of all current gradients, which the caller frees. */
static float *gradients_of(net *n, size_t *count)
{
    float *all = (float *)malloc(sizeof(float) * VOCAB * WIDTH * PARAMS);
    *count = 0;
    for (int k = 0; k < n->n_params; k++) {
        if (tt_param_frozen(n->param[k])) continue;
        if (!FINE(n, tt_get_gradient(n->p, n->param[k], all + *count))) break;
        *count += (size_t)tt_param_size(n->param[k]);
    }
    return all;
}

/* After each round, ranks have the gradients of one rank after the same number of micro-batches, and
   micro-steps return the statistics of one rank. */
static void same_gradients(const setup *one, const setup *many)
{
    char text[512], what[256];
    net a, b;
    bool ok = open_net(&a, one, false);
    ok = open_net(&b, many, false) && ok;
    for (int step = 0; step < STEPS && ok; step++) {
        tt_status status = TT_OK;
        for (int m = 0, k = 0, micros = micros_of(one, step); m < micros && ok;) {
            size_t x_count, y_count;
            m = run_round(&b, b.p, step, m, micros, &status);
            ok = FINE(&b, status);
            while (k < m && ok) {
                k = run_round(&a, a.p, step, k, micros, &status);
                ok = FINE(&a, status);
            }
            float *x = gradients_of(&a, &x_count), *y = gradients_of(&b, &y_count);
            const bool same = x_count == y_count && memcmp(x, y, sizeof(float) * x_count) == 0;
            snprintf(text, sizeof text, "%s, step %d, %d micro-batches: gradients%s differ",
                     layout_text(many, what), step, m, same ? " do not" : "");
            ok = test__check(same, __FILE__, __LINE__, text) && ok;
            ok = CHECK(same_stats(&a.stats, &b.stats)) && ok;
            free(x);
            free(y);
        }
        ok = ok && FINE(&a, tt_update(a.p, 0.01f, &a.stats)) && FINE(&b, tt_update(b.p, 0.01f, &b.stats));
    }
    close_net(&a);
    close_net(&b);
}

TEST(gradients_between_micro_steps_of_ranks)
{
    for (int k = 0; k < TEST_COUNT(layouts); k += SPARSE) {
        setup one = setup_of(ones[sums_micros(layouts[k])], precisions[k % 5], 8, 2);
        one.poison = true;
        setup many = one;
        many.on = layouts[k];
        many.offload = k % 2 ? "gradients,optimizer" : NULL;
        same_gradients(&one, &many);
    }
}

/* --------------------------------------------------------------------------------------------- evaluation */

/* Evaluates `max` micro-batches at once on ranks, and one by one on one rank. Outputs have equal bits, and
   the losses and counts add up. */
static void same_evaluation(net *one, net *many, int max)
{
    float x[SEQS * WIDTH], y[SEQS * WIDTH];
    tt_stats all = {0};
    for (int m = 0; m < max; m++) {
        const micro_batch b = batch_of(100, m);
        if (!FINE(many, set_batch(many, many->eval, m, &b))) return;
    }
    if (!FINE(many, tt_run(many->eval, &many->stats))) return;
    for (int m = 0; m < max; m++) {
        const micro_batch b = batch_of(100, m);
        const size_t n = (size_t)b.seqs * WIDTH;
        if (!FINE(one, set_batch(one, one->eval, 0, &b))) return;
        if (!FINE(one, tt_run(one->eval, &one->stats))) return;
        all.loss += one->stats.loss * one->stats.targets;
        all.targets += one->stats.targets;
        all.correct += one->stats.correct;
        all.flops += one->stats.flops;
        FINE(one, tt_get(one->eval, one->out, x, n));
        FINE(many, tt_get_rank(many->eval, m, many->out, y, n));
        CHECK(memcmp(x, y, sizeof *x * n) == 0);
    }
    CHECK_NEAR(many->stats.loss, all.loss / all.targets, 1e-12 * all.loss);
    CHECK(many->stats.targets == all.targets && many->stats.correct == all.correct);
    CHECK(many->stats.flops == all.flops);
}

/* Evaluates after each step. Evaluation does not change the training's bits. */
static void evaluates(const setup *one, const setup *many)
{
    net a, b;
    outcome x, y;
    memset(&x, 0, sizeof x);
    memset(&y, 0, sizeof y);
    bool ok = open_net(&a, one, true);
    ok = open_net(&b, many, true) && ok;
    b.eval->poison = many->poison;
    for (int step = 0; step < STEPS && ok; step++) {
        ok = FINE(&a, run_step(&a, step, micros_of(one, step)));
        ok = FINE(&b, run_step(&b, step, micros_of(many, step))) && ok;
        x.stats[step] = a.stats;
        y.stats[step] = b.stats;
        const int stride = step && b.data > 1 ? b.data - 1 : 1;
        for (int max = 1; max <= b.data; max += stride) same_evaluation(&a, &b, max);
    }
    if (ok) {
        keep_end(&a, &x);
        keep_end(&b, &y);
        same_outcome(many, &x, &y, true, __LINE__);
    }
    free_outcome(&x);
    free_outcome(&y);
    close_net(&a);
    close_net(&b);
}

TEST(ranks_evaluate)
{
    for (int k = 0; k < TEST_COUNT(layouts); k += SPARSE) {
        setup one = setup_of(ones[sums_micros(layouts[k])], precisions[k % 5], 8, 1);
        one.poison = true;
        setup many = one;
        many.on = layouts[k];
        many.offload = offloads[k % TEST_COUNT(offloads)];
        if (strcmp(many.on.device, "cpu") != 0) evaluates(&one, &many);
    }
}

/* ---------------------------------------------------------------------------------- parameters and states */

static float value_of(int param, int64_t element) /* returns numbers that are exact in all dtypes */
{
    return (float)((element * 37 + param * 11) % 255 - 127) / 1024;
}

static bool set_params(net *n, int from)
{
    float x[VOCAB * WIDTH];
    bool ok = true;
    for (int k = 0; k < n->n_params && ok; k++) {
        for (int64_t e = 0; e < tt_param_size(n->param[k]); e++) x[e] = value_of(k + from, e);
        ok = FINE(n, tt_param_set(n->param[k], x));
    }
    return ok;
}

/* Checks that all parameters have the values that set_params set. */
static void check_params(net *n, int from)
{
    float x[VOCAB * WIDTH];
    for (int k = 0; k < n->n_params; k++) {
        int wrong = 0;
        if (!FINE(n, tt_param_get(n->param[k], x))) return;
        for (int64_t e = 0; e < tt_param_size(n->param[k]); e++) wrong += x[e] != value_of(k + from, e);
        CHECK(wrong == 0);
    }
}

/* Reads a view of a parameter from each data rank, and checks its values. The ranks have the parameter whole
   or in shards. */
static void check_columns(net *n, int from)
{
    float x[VOCAB * 5];
    for (int rank = 0; rank < n->data; rank++) {
        int wrong = 0;
        if (!FINE(n, tt_get_rank(n->p, rank, n->columns, x, TEST_COUNT(x)))) return;
        for (int r = 0; r < VOCAB; r++)
            for (int c = 0; c < 5; c++) wrong += x[r * 5 + c] != value_of(from, r * WIDTH + 3 + c);
        CHECK(wrong == 0);
    }
}

TEST(parameters_of_ranks_are_set_and_read)
{
    for (int k = 0; k < TEST_COUNT(layouts); k += 3) {
        setup s = setup_of(ones[sums_micros(layouts[k])], precisions[k % 5], 8, 1);
        tt_stats reported[3]; /* 0: one rank; 1: several ranks, parameters set before the allocation;
                                 2: several ranks, parameters set after the allocation */
        for (int way = 0; way < 3; way++) {
            net n;
            if (way == 1) s.on = layouts[k];
            if (way == 1 && k % 2) s.offload = "parameters,optimizer";
            bool ok = open_net(&n, &s, false);
            if (ok && way == 2) ok = FINE(&n, tt_allocate(n.p)) && set_params(&n, 5);
            if (ok && way == 2) check_params(&n, 5);
            if (ok && way == 2) check_columns(&n, 5);
            ok = ok && set_params(&n, 0);
            if (ok) check_params(&n, 0);
            if (ok && FINE(&n, tt_allocate(n.p))) check_params(&n, 0);
            FINE(&n, run_step(&n, 0, 8));
            FINE(&n, run_step(&n, 1, 7));
            reported[way] = n.stats;
            close_net(&n);
        }
        CHECK(same_stats(&reported[0], &reported[1]) && same_stats(&reported[0], &reported[2]));
    }
}

/* Runs steps [from, to) of a net, then saves the state. */
static bool go_on(net *n, const setup *s, int from, int to, outcome *o, const char *path)
{
    bool ok = true;
    for (int step = from; step < to && ok; step++) {
        ok = FINE(n, run_step(n, step, micros_of(s, step)));
        o->stats[step] = n->stats;
    }
    return ok && FINE(n, tt_program_save(n->p, path));
}

/* Runs one step on each layout of a list, each from the state of the step before. */
static void resumes(setup s, const layout *of, int count, const outcome *whole, bool file)
{
    outcome o;
    const char *folder = test_folder();
    char path[1024];
    memset(&o, 0, sizeof o);
    snprintf(path, sizeof path, "%s/state", folder);
    for (int k = 0; k < count; k++) {
        net n;
        s.on = of[k];
        s.offload = k ? offloads[(k + count) % TEST_COUNT(offloads)] : NULL;
        bool ok = open_net(&n, &s, false);
        if (k) ok = ok && FINE(&n, tt_program_load(n.p, path));
        if (k) CHECK(n.log.warnings == (file ? 0 : 1));
        ok = ok && go_on(&n, &s, k, k + 1, &o, path);
        if (ok && k == count - 1) {
            keep_end(&n, &o);
            same_outcome(&s, whole, &o, file, __LINE__);
        }
        close_net(&n);
        if (!ok) break;
    }
    free_outcome(&o);
}

/* Updates in the backward give the bits of updates at the end, on any ranks, also if some ranks have no
   micro-batch. The state's file is equal, too, and both kinds of update can resume from the file. */
TEST(updates_in_the_backward)
{
    static const layout on[] = {{"cpu*4", 0, EARLY}, {"cpu*4", 1, EARLY}, {"cpu*4", 1, EARLY},
                                {"cpu*4", 2, EARLY}, {"cpu*4", 3, EARLY}, {"cpu*4", 1, EARLY | MICROS}};
    static const layout in_turn[] = {{"cpu*4", 1, EARLY}, {"cpu*4", 0, 0}, {"cpu*4", 0, EARLY},
                                     {"cpu*4", 1, 0}};
    static const int64_t from[] = {1, 10000, (int64_t)1 << 40};
    for (int p = 0; p < 3 && p < PRECISIONS; p++) {
        setup s = setup_of(ones[0], precisions[p], 4, 1);
        outcome one[2], many;
        s.poison = s.unclipped = true;
        s.sgd = p == 1;
        for (int k = 0; k < 2; k++) {
            s.on = ones[k];
            if (!train(&s, &one[k])) return;
        }
        s.at_once = true;
        for (int k = 0; k < TEST_COUNT(on); k++) {
            s.on = on[k];
            s.offload = (k + p) % 3 == 1 ? "optimizer,parameters" : NULL;
            s.late = (k + p) % 2;
            tt__limit_update_from = from[(k + p) % 3];
            tt__limit_pieces_from = k == 2 ? 5000 : 1; /* smaller tensors are summed at the end */
            if (train(&s, &many)) same_outcome(&s, &one[sums_micros(s.on)], &many, true, __LINE__);
            free_outcome(&many);
        }
        if (p == 2) resumes(s, in_turn, STEPS, &one[0], true);
        free_outcome(&one[0]);
        free_outcome(&one[1]);
    }
    tt__limit_update_from = tt__limit_pieces_from = 1;
}

TEST(states_resume_on_other_ranks)
{
    static const layout steps[STEPS] = {{"cpu*4", 1, 0}, {"cpu*2", 0, 0},
                                        {"cpu*8", 0, SERVER}, {"cpu*4", 0, 0}},
                        micros[STEPS] = {{"cpu*4", 3, 0}, {"cpu*2", 2, 0},
                                         {"cpu*8", 3, 0}, {"cpu*2", 0, SERVER | MICROS}},
                        both[STEPS] = {{"cpu*4", 3, 0}, {"cpu*2", 1, 0},
                                       {"cpu", 2, 0}, {"cpu*8", 1, SERVER}};
    for (int p = 0; p < PRECISIONS; p++) {
        setup s = setup_of(ones[0], precisions[p], 8, 2);
        s.sgd = p == 1;
        outcome whole;
        if (train(&s, &whole)) resumes(s, steps, STEPS, &whole, true);
        free_outcome(&whole);
        s.on = ones[1];
        if (train(&s, &whole)) resumes(s, micros, STEPS, &whole, true);
        free_outcome(&whole);
        s.per_leaf = 1;
        if (train(&s, &whole)) resumes(s, both, STEPS, &whole, false);
        free_outcome(&whole);
    }
}

/* Muon orthogonalises whole matrices, whose momentum data ranks divide. Adafactor's few numbers are on every
   rank. Both have the bits of one rank, also if states are offloaded, updated in the backward or, for
   Adafactor, on the host, and both resume on other ranks. */
TEST(optimizers_of_whole_matrices)
{
    static const layout muon[] = {{"cpu*2", 1, 0}, {"cpu*4", 0, 0}, {"cpu*4", 1, 0}, {"cpu*4", 3, 0},
                                  {"cpu*2", 2, 0}, {"cpu*4", 1, MICROS}},
                        adafactor[] = {{"cpu*4", 1, 0}, {"cpu*2", 0, 0}, {"cpu*4", 1, MICROS}},
                        early[] = {{"cpu*4", 1, EARLY}, {"cpu*4", 3, EARLY}},
                        other[STEPS] = {{"cpu*4", 1, 0}, {"cpu*2", 0, 0}, {"cpu*2", 1, 0}, {"cpu", 0, 0}};
    for (int k = 0; k < 5; k++) {
        setup s = setup_of(ones[0], precisions[k % 4], 4, 1);
        outcome one[2], many;
        const bool of_rows = k % 2;
        s.kind = of_rows ? TT_ADAFACTOR : TT_MUON;
        if (k == 2) s.bits = 8;
        s.poison = true;
        same_as_one(s, of_rows ? adafactor : muon,
                    of_rows ? (int)TEST_COUNT(adafactor) : (int)TEST_COUNT(muon), k, test_every(2), one);
        CHECK(one[0].file.n > 0);
        resumes(s, other, STEPS, &one[0], true);
        s.threads = 3;
        s.offload = "optimizer";
        s.late = true;
        s.on = muon[0];
        if (train(&s, &many)) same_outcome(&s, &one[0], &many, true, __LINE__);
        free_outcome(&many);
        s.offload = NULL;
        s.on_host = of_rows;
        if (train(&s, &many)) same_outcome(&s, &one[0], &many, true, __LINE__);
        free_outcome(&many);
        s.on_host = false;
        free_outcome(&one[0]);
        free_outcome(&one[1]);
        s.threads = 1;
        s.unclipped = true;
        for (int m = 0; m < (of_rows ? 1 : 2); m++) {
            s.on = ones[m];
            s.at_once = false;
            const bool ok = strncmp(s.precision, "16", 2) != 0 && train(&s, &one[m]);
            s.at_once = true;
            s.on = early[m];
            if (ok && train(&s, &many)) same_outcome(&s, &one[m], &many, true, __LINE__);
            if (ok) free_outcome(&many);
            if (ok) free_outcome(&one[m]);
        }
    }
}

/* Pruning by magnitude and by movement has the bits of one rank, with any number of threads, with offloaded
   states and with updates in the backward, and resumes on other ranks. */
TEST(ranks_prune)
{
    static const layout on[] = {{"cpu*4", 0, 0}, {"cpu*2", 0, MICROS}},
                        other[STEPS] = {{"cpu*4", 0, 0}, {"cpu*2", 0, 0}, {"cpu", 0, 0}, {"cpu*4", 0, 0}};
    for (int k = 0; k < 4; k++) {
        setup s = setup_of(ones[0], precisions[k], 4, 1);
        outcome one[2], many;
        s.prunes = 2 - k % 2;
        s.poison = true;
        same_as_one(s, on, TEST_COUNT(on), k / 2, test_every(2), one);
        CHECK(one[0].file.n > 0);
        resumes(s, other, STEPS, &one[0], true);
        s.threads = 3;
        s.offload = "optimizer";
        s.late = true;
        s.on = on[0];
        if (train(&s, &many)) same_outcome(&s, &one[0], &many, true, __LINE__);
        for (int m = 0; m < 2; m++) free_outcome(&one[m]);
        free_outcome(&many);
        s.unclipped = true;
        if (strncmp(s.precision, "16", 2) == 0 || !train(&s, &one[0])) continue;
        s.at_once = true;
        s.on.how = EARLY;
        if (train(&s, &many)) same_outcome(&s, &one[0], &many, true, __LINE__);
        free_outcome(&one[0]);
        free_outcome(&many);
    }
}

/* Optimizer states of 8 and 16 bits are divided, offloaded, updated in the backward and on the host, saved
   and resumed as states of 32 bits are, with any number of threads. */
TEST(states_of_fewer_bits)
{
    static const layout on[] = {{"cpu*2", 1, 0}, {"cpu*4", 3, 0}, {"cpu*4", 2, 0}, {"cpu*4", 0, SERVER},
                                {"cpu*4", 1, MICROS}},
                        early[] = {{"cpu*4", 1, EARLY}, {"cpu*4", 3, EARLY}},
                        other[STEPS] = {{"cpu*4", 1, 0}, {"cpu*2", 0, 0}, {"cpu*4", 0, SERVER},
                                        {"cpu", 0, 0}};
    for (int k = 0; k < 4; k++) {
        setup s = setup_of(ones[0], precisions[k < 2 ? k : 0], 4, 1);
        outcome one[2], many;
        s.bits = k % 2 ? 16 : 8;
        s.sgd = k >= 2;
        s.poison = true;
        same_as_one(s, on, TEST_COUNT(on), k, test_every(3), one);
        CHECK(one[0].file.n > 0);
        resumes(s, other, STEPS, &one[0], true);
        s.threads = 3;
        s.offload = "optimizer";
        s.late = true;
        s.on = on[k % 2];
        if (train(&s, &many)) same_outcome(&s, &one[sums_micros(s.on)], &many, true, __LINE__);
        free_outcome(&many);
        s.offload = NULL;
        s.on_host = true;
        if (train(&s, &many)) same_outcome(&s, &one[sums_micros(s.on)], &many, true, __LINE__);
        free_outcome(&many);
        s.on_host = false;
        free_outcome(&one[0]);
        free_outcome(&one[1]);
        s.threads = 1;
        s.unclipped = true;
        for (int m = 0; m < 2; m++) {
            s.on = ones[m];
            s.at_once = false;
            const bool ok = train(&s, &one[m]);
            s.at_once = true;
            s.on = early[m];
            if (ok && train(&s, &many)) same_outcome(&s, &one[m], &many, true, __LINE__);
            free_outcome(&many);
            free_outcome(&one[m]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------- misuse */

TEST(ranks_that_contradict_are_refused)
{
    static const struct { const char *device; tt_parallel p; const char *say; } rows[] = {
        {"cpu*4", {3, 1, 1, false, false, 0, false, 1, NULL, 0},
         "device 'cpu*4' has 4 ranks, but parallel.data 3 x parallel.tensor 1 need 3"},
        {"cpu*4", {2, 1, 1, false, false, 0, false, 1, NULL, 0},
         "has 4 ranks, but parallel.data 2 x parallel.tensor 1 need 2"},
        {"cpu*4", {4, 2, 1, false, false, 0, false, 1, NULL, 0},
         "has 4 ranks, but parallel.data 4 x parallel.tensor 2 need 8"},
        {"cpu*4", {0, 3, 1, false, false, 0, false, 1, NULL, 0},
         "has 4 ranks, but parallel.data 1 x parallel.tensor 3 need 3"},
        {"cpu*4", {-1, 1, 1, false, false, 0, false, 1, NULL, 0},
         "has 4 ranks, but parallel.data -1 x parallel.tensor 1 need -1"},
        {"cpu", {2, 1, 1, false, false, 0, false, 1, NULL, 0},
         "device 'cpu' has 1 rank, but parallel.data 2 x parallel.tensor 1 need 2"},
        {"cpu*4", {0, 1, 1, false, false, 6, false, 1, NULL, 0},
         "groups 6 is not a multiple of the 4 data ranks"},
        {"cpu*4", {0, 1, 1, false, false, -4, false, 1, NULL, 0},
         "groups -4 is not a multiple of the 4 data ranks"},
        {"cpu*3", {0, 1, 1, false, false, 6, false, 1, NULL, 0},
         "groups 6 is more than the 3 data ranks, whose number must then be a power of two: use "
         "parallel.groups 3"},
        {"cpu*4", {0, 1, 1, false, false, 128, false, 1, NULL, 0}, "groups 128 is too large: at most 64"},
        {"cpu*4", {0, 1, 4, false, false, 0, false, 1, NULL, 0}, "zero 4 is not 0, 1, 2, 3 or TT_ZERO_BU"},
        {"cpu", {0, 1, -2, false, false, 0, false, 1, NULL, 0}, "zero -2 is not 0, 1, 2, 3 or TT_ZERO_BU"},
        {"cpu*4", {0, 1, 2, true, false, 0, false, 1, NULL, 0},
         "parallel.server keeps whole gradients and parameters: use parallel.zero 0 or 1"},
        {"cpu*4", {0, 1, 1, false, true, 0, false, 1, NULL, 0},
         "parallel.sequence needs parallel.tensor 2 or more"},
        {"cpu*2", {3, 1, 7, true, true, 100, false, 1, NULL, 0},
         "device 'cpu*2' has 2 ranks, but parallel.data 3 x parallel.tensor 1 need 3: make "
         "the numbers equal; parallel.groups 100 is too large: at most 64 are possible; parallel.zero 7 is "
         "not 0, 1, 2, 3 or TT_ZERO_BUDGET; parallel.server keeps whole gradients and parameters: use "
         "parallel.zero 0 or 1; parallel.sequence needs parallel.tensor 2 or more"}};
    setup s = setup_of((layout){"cpu*2", 1, 0}, "32-true", 2, 1);
    net n;
    if (!open_net(&n, &s, false)) return;
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        tt_compile_options o = options_of(&s);
        o.device = rows[k].device;
        o.parallel = rows[k].p;
        CHECK(!tt_compile(n.t, n.loss, &o));
        CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, rows[k].say);
        CHECK(tt_check_options(n.ctx, &o) == TT_ERR_ARGUMENT);
        CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, rows[k].say);
    }
    for (int tensor = 1; tensor < 3; tensor++) {
        tt_compile_options o = tt_compile_options_default();
        o.device = "cpu*6";
        o.parallel.tensor = tensor;
        CHECK(tt_check_options(n.ctx, &o) == TT_OK);
        CHECK(o.parallel.tensor == tensor);
        CHECK(o.parallel.data == 6 / tensor && o.parallel.groups == 6 / tensor);
    }
    close_net(&n);
}

/* Programs that do not fit the first program's arena or parameters are refused without any change. */
TEST(programs_of_other_layouts_are_refused)
{
    setup s = setup_of((layout){"cpu*4", 3, 0}, "32-true", 4, 1);
    net n;
    if (!open_net(&n, &s, false)) return;
    tt_compile_options o = options_of(&s);
    o.train = false;
    o.share = n.p;
    o.device = "cpu*2";
    o.parallel.groups = 0;
    CHECK(!tt_compile(n.t, n.loss, &o));
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT,
                "`share` is a program for device 'cpu*4', but this one is for 'cpu*2'");
    o.device = "cpu*4";
    o.parallel.tensor = 2;
    CHECK(!tt_compile(n.t, n.loss, &o));
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "`share` is a program of data 4 x tensor 1 ranks, but this one has "
                "data 2 x tensor 2: use the same ranks, or leave `share` NULL");
    o.parallel.tensor = 1;
    o.offload = "parameters";
    CHECK(!tt_compile(n.t, n.loss, &o));
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "an earlier program keeps parameter 'table' in the device's memory, "
                "and this one elsewhere: compile both with the same `offload`");
    o.offload = NULL;
    o.parallel.zero = 2;
    CHECK(!tt_compile(n.t, n.loss, &o));
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT,
                "an earlier program shards parameter 'table' over the ranks in another way");
    o.share = NULL;
    CHECK(!tt_compile(n.t, n.loss, &o));
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "compile both with the same `parallel`");
    o.device = "cpu";
    CHECK(!tt_compile(n.t, n.loss, &o));
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "an earlier program has put parameter 'table' on device 'cpu*4'");
    o.device = "cpu*4";
    o.parallel.zero = 3;
    n.eval = tt_compile(n.t, n.loss, &o); /* eval has a separate arena and the first program's parameters */
    CHECK(n.eval != NULL && tt_set_rank(n.eval, 0, n.ids, &(int32_t){0}, 1) == TT_ERR_ARGUMENT);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "is in the arena of an earlier program, which is not allocated");
    FINE(&n, run_step(&n, 0, 4));
    const micro_batch m = batch_of(0, 0);
    CHECK(n.eval && FINE(&n, set_batch(&n, n.eval, 0, &m)) && FINE(&n, tt_run(n.eval, NULL)));
    close_net(&n);
}

TEST(several_losses_on_ranks_need_totals)
{
    setup s = setup_of((layout){"cpu*2", 1, 0}, "32-true", 2, 1);
    net n;
    if (!open_net(&n, &s, false)) return;
    tt_value more = tt_cross_entropy(n.t, n.out, tt_input(n.t, "classes", TT_I32, n.seqs, 1), NULL);
    tt_compile_options o = options_of(&s);
    o.accumulate = false;
    CHECK(!tt_compile(n.t, tt_add(n.t, n.loss, more), &o));
    CHECK_ERROR(n.ctx, TT_ERR_UNSUPPORTED, "several data ranks cannot count the targets of 2 losses before "
                "the first backward: give each loss the number of its targets in a step by tt_loss_total (0 "
                "of them have one)");
    close_net(&n);
}

TEST(misuse_of_ranks)
{
    setup s = setup_of((layout){"cpu*4", 1, 0}, "32-true", 4, 1);
    const micro_batch m = batch_of(0, 0);
    float x[SEQS * WIDTH];
    net n;
    if (!open_net(&n, &s, true)) return;
    CHECK(tt_set(n.p, n.ids, m.ids, m.rows) == TT_ERR_ARGUMENT);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT,
                "tt_set is for programs with one data rank, but this program has 4: use tt_set_rank");
    for (int rank = -1; rank <= 4; rank += 5) {
        CHECK(tt_set_rank(n.p, rank, n.ids, m.ids, m.rows) == TT_ERR_ARGUMENT);
        CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT,
                    rank < 0 ? "data rank -1 does not exist: the program has 4 data ranks" :
                    "tt_set_rank: data rank 4 does not exist: the program has 4 data ranks");
    }
    FINE(&n, set_batch(&n, n.p, 0, &m)); /* rank 1 gets no inputs */
    FINE(&n, set_batch(&n, n.p, 2, &m));
    CHECK(tt_micro_step(n.p, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "input 'ids' of data rank 1 was not set before this run");
    CHECK(tt_micro_step(n.p, NULL) == TT_ERR_ARGUMENT); /* inputs of the other ranks are invalid now, too */
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "input 'ids' of data rank 0 was not set before this run");
    FINE(&n, set_batch(&n, n.p, 0, &m));
    FINE(&n, tt_set_rank(n.p, 1, n.ids, m.ids, m.rows)); /* rank 1 gets only some inputs */
    CHECK(tt_micro_step(n.p, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "of data rank 1 was not set before this run");
    for (int rank = 0; rank < 3; rank++) FINE(&n, set_batch(&n, n.eval, rank, &m));
    FINE(&n, run_step(&n, 0, 1));
    CHECK(tt_run(n.eval, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "of data rank 0 was set, but then an update or another program of "
                "the same arena overwrote it");
    for (int rank = 0; rank < 3; rank++) FINE(&n, set_batch(&n, n.eval, rank, &m));
    FINE(&n, tt_run(n.eval, NULL));
    CHECK(tt_get(n.eval, n.out, x, SEQS * WIDTH) == TT_ERR_ARGUMENT);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT,
                "tt_get is for programs with one data rank, but this program has 4: use tt_get_rank");
    CHECK(tt_get_rank(n.eval, 4, n.out, x, SEQS * WIDTH) == TT_ERR_ARGUMENT);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT,
                "tt_get_rank: data rank 4 does not exist: the program has 4 data ranks");
    CHECK(tt_get_rank(n.eval, 3, n.out, x, SEQS * WIDTH) == TT_ERR_ARGUMENT);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "'pooled' has no contents on data rank 3, because only the first");
    FINE(&n, tt_get_rank(n.eval, 2, n.out, x, SEQS * WIDTH));
    FINE(&n, run_step(&n, 0, 6));
    for (int rank = 0; rank < 3; rank++) FINE(&n, set_batch(&n, n.p, rank, &m));
    FINE(&n, tt_micro_step(n.p, NULL));
    for (int rank = 0; rank < 4; rank++) FINE(&n, set_batch(&n, n.p, rank, &m));
    CHECK(tt_micro_step(n.p, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "data rank 3 has a micro-batch, but had none in an earlier round of "
                "this step: only the last round of a step may leave data ranks out");
    close_net(&n);
}

/* A micro-batch fails on rank 3, in a step's first or second round. Nothing is updated, and the next step
   equals the next step of a net without the failed step. */
static void bad_batch(const setup *s, int bad, bool nan, const char *say)
{
    net a, b;
    outcome x, y;
    memset(&x, 0, sizeof x);
    memset(&y, 0, sizeof y);
    bool ok = open_net(&a, s, false);
    ok = open_net(&b, s, false) && ok;
    ok = ok && FINE(&a, run_step(&a, 0, 8)) && FINE(&b, run_step(&b, 0, 8));
    tt_status status = TT_OK;
    for (int k = 0; k < 8 && ok && status == TT_OK; k++) {
        micro_batch m = batch_of(1, k);
        if (k == bad && nan) m.weights[0] = NAN;
        if (k == bad && !nan) m.ids[0] = VOCAB;
        ok = FINE(&a, set_batch(&a, a.p, k % a.data, &m));
        if (ok && k % a.data == a.data - 1) status = tt_micro_step(a.p, NULL);
    }
    if (ok) CHECK_ERROR(a.ctx, nan ? TT_ERR_NUMERIC : TT_ERR_ARGUMENT, say);
    if (ok) CHECK(status != TT_OK && tt_update(a.p, 0.01f, NULL) != TT_OK);
    ok = ok && FINE(&a, run_step(&a, 1, 6)) && FINE(&b, run_step(&b, 1, 6));
    x.stats[0] = a.stats;
    y.stats[0] = b.stats;
    if (ok) {
        keep_end(&a, &x);
        keep_end(&b, &y);
        same_outcome(s, &x, &y, true, __LINE__);
    }
    free_outcome(&x);
    free_outcome(&y);
    close_net(&a);
    close_net(&b);
}

TEST(bad_inputs_of_a_rank_are_named)
{
    static const layout on[] = {{"cpu*4", 1, 0}, {"cpu*4", 3, 0}, {"cpu*4", 0, SERVER | MICROS}};
    for (int k = 0; k < TEST_COUNT(on); k++) {
        setup s = setup_of(on[k], precisions[k], 4, 2);
        bad_batch(&s, 3, false, "rank 3 of cpu*4: embedding: 'ids' has 410 in row 0");
        bad_batch(&s, 7, false, "rank 3 of cpu*4: embedding: 'ids' has 410 in row 0");
        bad_batch(&s, 3, true, "step 1, micro-batch 3: the loss");
        bad_batch(&s, 6, true, "step 1, micro-batch 6: the loss");
    }
}

/* ---------------------------------------------------------------------------------------------------- faults
   The kind of device is the CPU, except that one launch of one rank fails or is late. */

static struct {
    const tt__device_group *group;
    int rank;          /* the faulty rank */
    int launches;      /* launches of that rank before the fault; -1: no fault */
    bool late;         /* no failure: a collective begins after another rank has stopped waiting */
    int made;          /* launches of the faulty rank so far */
    bool happened;
} fault;

static tt_status faulty_launch(const tt__launch *l, int n)
{
    const struct timespec nap = {0, 1000000};
    const bool counts = l->device == fault.group->device[fault.rank] &&
                        /* If a rank is late, only its collectives count, because the other ranks wait for
                           collectives alone. */
                        (!fault.late || tt__is_collective(l->instr));
    if (!counts || fault.made++ != fault.launches) return tt__cpu_backend.launch(l, n);
    fault.happened = true;
    if (!fault.late)
        return tt__fail(((tt__cpu *)(void *)l->device)->ctx, TT_ERR_DEVICE, "injected at %s",
                        tt__instr_name(l->instr));
    while (!__atomic_load_n(&fault.group->rank_group->failed, __ATOMIC_SEQ_CST)) nanosleep(&nap, NULL);
    return tt__cpu_backend.launch(l, n);
}

/* Makes the net's programs run on the faulty kind of device. No program may be compiled later. */
static void make_faulty(net *n)
{
    static tt__backend backend;
    static tt__device_kind kind;
    backend = tt__cpu_backend;
    backend.launch = faulty_launch;
    kind = *n->p->settings.kind;
    kind.backend = &backend;
    n->p->settings.kind = n->p->settings.group->kind = n->p->arena->kind = &kind;
    if (n->eval) n->eval->settings.kind = &kind;
    memset(&fault, 0, sizeof fault);
    fault.group = n->p->settings.group;
    fault.launches = -1;
}

static void arm(int rank, int launches, bool late)
{
    fault.rank = rank;
    fault.launches = launches;
    fault.late = late;
    fault.made = 0;
    fault.happened = false;
}

/* Repeats the steps after the saved state without a fault. */
static bool steps_again(net *n, const setup *s, const char *state, outcome *o)
{
    arm(0, -1, false);
    bool ok = FINE(n, tt_program_load(n->p, state));
    for (int step = 1; step < STEPS && ok; step++) {
        ok = FINE(n, run_step(n, step, micros_of(s, step)));
        o->stats[step] = n->stats;
    }
    return ok;
}

/* Checks that a failed step updated nothing, or updated some ranks and then refuses to save a state. */
static bool after_fault(net *n, const char *state, const char *path)
{
    size_t x_bytes, y_bytes;
    if (tt__within_step(n->p)) { /* the step failed in its second round */
        CHECK(tt_update(n->p, 0.01f, NULL) == TT_ERR_NUMERIC);
        CHECK_ERROR(n->ctx, TT_ERR_NUMERIC, "a micro-batch failed, so nothing was updated");
    }
    if (tt_program_save(n->p, path) != TT_OK)
        return CHECK_ERROR(n->ctx, TT_ERR_DEVICE, "load the last state");
    char *x = test_read(state, &x_bytes), *y = test_read(path, &y_bytes);
    const bool same = x_bytes == y_bytes && memcmp(x, y, x_bytes) == 0;
    free(x);
    free(y);
    return CHECK(same);
}

/* Each launch of step 1 fails once, on some rank. All ranks end with one error (a rank that kept waiting
   would exceed the test's time limit). The last state loads, and from then on the bits equal those of a run
   without a fault. */
static void each_launch_fails(const setup *s, int every)
{
    net n;
    outcome right, again;
    char state[1024], after[1024], text[64];
    int failures = 0, passed = 0;
    memset(&right, 0, sizeof right);
    memset(&again, 0, sizeof again);
    snprintf(state, sizeof state, "%s", test_path(test_folder(), "state"));
    snprintf(after, sizeof after, "%s", test_path(test_folder(), "state"));
    bool ok = open_net(&n, s, true);
    make_faulty(&n);
    ok = ok && FINE(&n, run_step(&n, 0, micros_of(s, 0))) && FINE(&n, tt_program_save(n.p, state));
    ok = ok && steps_again(&n, s, state, &right);
    const size_t held = tt_allocated_bytes(n.ctx);
    for (int at = 0; ok && passed < n.data; at += every) {
        ok = FINE(&n, tt_program_load(n.p, state));
        arm(at / every % n.data, at, false);
        tt_status status = run_step(&n, 1, micros_of(s, 0));
        passed += !fault.happened;
        if (!fault.happened) continue;
        if (n.data == 1) snprintf(text, sizeof text, "injected at ");
        else snprintf(text, sizeof text, "rank %d of %s: injected at ", fault.rank, s->on.device);
        ok = ok && CHECK(status == TT_ERR_DEVICE) && CHECK_ERROR(n.ctx, TT_ERR_DEVICE, text);
        failures++;
        arm(0, -1, false);
        ok = ok && after_fault(&n, state, after);
        ok = ok && steps_again(&n, s, state, &again);
        for (int k = 1; k < STEPS && ok; k++) ok = CHECK(same_stats(&right.stats[k], &again.stats[k]));
        ok = ok && CHECK(tt_allocated_bytes(n.ctx) == held);
    }
    CHECK(failures * every > 60);
    close_net(&n);
}

TEST(each_launch_of_a_rank_fails)
{
    static const layout on[] = {{"cpu*4", 1, 0}, {"cpu*4", 3, 0}, {"cpu*2", 0, SERVER | MICROS},
                                {"cpu*4", 1, EARLY}, {"cpu", 0, EARLY}};
    for (int k = 0; k < TEST_COUNT(on); k++) {
        setup s = setup_of(on[k], precisions[2 * (k % 3)], k < 4 ? 4 : 1, 1);
        s.at_once = s.unclipped = (on[k].how & EARLY) != 0;
        each_launch_fails(&s, everything() ? 1 : 3 * SPARSE);
    }
}

/* If a rank is late, the other ranks stop waiting after the timeout and name the late rank, which stops when
   it arrives. */
TEST(a_rank_that_is_late_is_named)
{
    static const layout on[] = {{"cpu*4", 1, 0}, {"cpu*4", 3, 0}};
    for (int k = 0; k < TEST_COUNT(on); k++) {
        setup s = setup_of(on[k], precisions[k], 4, 1);
        outcome right, again;
        char state[1024];
        net n;
        memset(&right, 0, sizeof right);
        memset(&again, 0, sizeof again);
        snprintf(state, sizeof state, "%s", test_path(test_folder(), "state"));
        bool ok = open_net(&n, &s, false);
        make_faulty(&n);
        ok = ok && FINE(&n, run_step(&n, 0, 4)) && FINE(&n, tt_program_save(n.p, state));
        ok = ok && steps_again(&n, &s, state, &right) && FINE(&n, tt_program_load(n.p, state));
        if (ok) {
            n.p->settings.group->rank_group->timeout = 0.5;
            arm(1, 1, true);
            CHECK(run_step(&n, 1, 4) == TT_ERR_DEVICE && fault.happened);
            CHECK_ERROR(n.ctx, TT_ERR_DEVICE, "has waited 0.5 s for rank 1, which has not arrived");
            n.p->settings.group->rank_group->timeout = n.ctx->options.timeout;
            ok = steps_again(&n, &s, state, &again);
        }
        for (int j = 1; j < STEPS && ok; j++) CHECK(same_stats(&right.stats[j], &again.stats[j]));
        close_net(&n);
    }
}

/* Runs one part of a training. The caller repeats a part that fails. */
static bool do_part(net *n, const setup *s, const char *state, int part)
{
    float x[VOCAB * WIDTH];
    tt_compile_options o = options_of(s);
    tt_status status = TT_OK;
    o.train = part != 1;
    o.share = n->p;
    switch (part) {
    case 0: return (n->p = tt_compile(n->t, n->loss, &o)) != NULL;
    case 1: return (n->eval = tt_compile(n->t, n->loss, &o)) != NULL;
    case 2: return tt_allocate(n->p) == TT_OK;
    case 3: return tt_allocate(n->eval) == TT_OK;
    case 4: n->data = n->p->arena->data; return run_step(n, 0, 7) == TT_OK;
    case 5: return run_round(n, n->p, 1, 0, 8, &status) && status == TT_OK;
    case 6: return tt_get_gradient(n->p, n->param[0], x) == TT_OK;
    case 7: return tt_update(n->p, 0.01f, NULL) == TT_OK;
    case 8: return tt_param_get(n->param[0], x) == TT_OK;
    case 9: return tt_program_save(n->p, state) == TT_OK;
    case 10: return tt_program_load(n->p, state) == TT_OK;
    default: return run_step(n, 2, 8) == TT_OK;
    }
}

TEST(each_allocation_of_ranks_fails)
{
    static const layout on[] = {{"cpu*4", 1, 0}, {"cpu*2", 3, 0}};
    const int every = everything() ? 1 : 9 * (SPARSE / EVERY);
    for (int k = 0; k < TEST_COUNT(on); k++) {
        setup s = setup_of(on[k], precisions[3 * k], 4, 1);
        s.offload = k ? offloads[TEST_COUNT(offloads) - 1] : NULL;
        char state[1024];
        tt_stats right, again;
        bool fails = true, ok = true;
        int failures = 0;
        memset(&right, 0, sizeof right);
        snprintf(state, sizeof state, "%s", test_path(test_folder(), "state"));
        for (long at = 0; fails && ok; at = at ? at + every : 1) { /* run 0 has no failure */
            net n;
            memset(&n, 0, sizeof n);
            tt_context_options co = test_options(&n.a);
            n.ctx = tt_open(&co);
            if (!n.ctx || !CHECK(record(&n, ROWS, VOCAB))) return;
            n.a.fail_at = at ? n.a.calls + at : 0;
            for (int part = 0; part <= 11 && ok; part++) {
                n.a.failed = false;
                bool done = do_part(&n, &s, state, part);
                if (!done) ok = CHECK(n.a.failed) && CHECK_ERROR(n.ctx, TT_ERR_MEMORY, "memory");
                failures += !done;
                if (!done) ok = ok && FINE(&n, do_part(&n, &s, state, part) ? TT_OK : tt_error_code(n.ctx));
            }
            fails = !at || n.a.calls >= n.a.fail_at;
            again = n.stats;
            if (!at) right = again;
            CHECK(!ok || same_stats(&right, &again));
            close_net(&n);
        }
        CHECK(failures * every > 100);
    }
}

/* ------------------------------------------------------------------------------------------------- memory */

TEST(ranks_allocate_what_is_planned)
{
    static const char *const policies[] = {"none", "cheap", "attention", "blocks"};
    for (int k = 0; k < TEST_COUNT(layouts); k += SPARSE) {
        setup s = setup_of(layouts[k], precisions[k % 5], 8, 1);
        s.sgd = k % 3 == 0;
        s.bits = 32 >> k / 2 % 3;
        s.recompute = policies[k % 4];
        s.offload = offloads[k % 6 % 5];
        net n;
        if (!open_net(&n, &s, true)) return;
        FINE(&n, tt_device_text(n.ctx, s.on.device, NULL, 0)); /* starts the threads of ranks */
        const tt_plan plan = tt_program_plan(n.p), eval = tt_program_plan(n.eval);
        const size_t held = tt_allocated_bytes(n.ctx);
        size_t sum = 0, peak = 0;
        for (int r = 0; r < n.data; r++) {
            const size_t own = tt__host_size(n.p, r) + tt__host_size(n.eval, r), shared = n.p->arena->on_host;
            sum += tt__arena_size(n.p->arena, r) + own + shared;
            CHECK(r || plan.host_bytes + eval.host_bytes == own + 2 * shared);
        }
        for (int c = 0; c < TT_MEM_CATEGORIES; c++) peak += plan.at_peak[c];
        CHECK(plan.bytes == tt__arena_size(n.p->arena, 0) && eval.bytes == plan.bytes && peak <= plan.bytes);
        FINE(&n, tt_allocate(n.p));
        FINE(&n, tt_allocate(n.eval));
        FINE(&n, run_step(&n, 0, 8));
        CHECK(tt_allocated_bytes(n.ctx) - held == sum);
        close_net(&n);
    }
}

/* Plans 64 images on each of four ranks. PyTorch's FSDP with checkpointing needs 6.59 GB a rank, and 6.03 GB
   with parameters, gradients and the optimizer state on the host. */
TEST(vit_l16_on_four_ranks)
{
    static const struct { const char *offload; int images; size_t min, max; } rows[] = {
        {NULL, 64, 2800000000u, 3150000000u},
        {"optimizer", 64, 2300000000u, 2400000000u},
        {"optimizer,gradients,parameters", 64, 1900000000u, 2200000000u},
        {"optimizer,gradients,parameters,activations", 64, 900000000u, 1100000000u},
        {"optimizer,gradients,parameters,activations", 16, 200000000u, 400000000u}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_vit v;
    tt_vit_config c = tt_vit_config_default("L/16");
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.compile.device = "cpu*4";
    o.compile.parallel.zero = 3;
    o.compile.recompute = "blocks";
    tt__limit_pieces_from = 65536;
    REQUIRE(tt_vit_new(ctx, &v, &c) == TT_OK);
    const tt_model model = tt_vit_classifier(&v);
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        o.compile.offload = rows[k].offload;
        o.max_seqs = rows[k].images;
        o.compile.accumulate = rows[k].images < 64;
        tt__limit_offload_together = k ? 32L << 20 : tt__limit_offload_together;
        tt_trainer *t = tt_trainer_new(ctx, &model, &o);
        if (CHECK(t != NULL)) {
            const tt_plan plan = tt_program_plan(tt_trainer_program(t));
            CHECK(plan.bytes > rows[k].min && plan.bytes <= rows[k].max);
            CHECK((plan.transfer_bytes > 0) == (k > 0) && (plan.host_bytes > (size_t)100000000) == (k > 0));
        }
        tt_trainer_free(t);
    }
    tt__limit_offload_together = 1L << 16;
    tt__limit_pieces_from = 1;
    tt_vit_free(&v);
    TEST_CLOSE(ctx, &a);
}

static const test_case tests[] = {
    TEST_CASE(ranks_have_the_bits_of_one),
    TEST_CASE(all_ranks_have_the_bits_of_one),
    TEST_CASE(ranks_that_are_no_power_of_two),
    TEST_CASE(leaves_that_are_no_power_of_two),
    TEST_CASE(ranks_split_large_tensors_only),
    TEST_CASE(ranks_with_a_loss_in_chunks),
    TEST_CASE(ranks_step_at_once),
    TEST_CASE(updates_in_the_backward), TEST_CASE(ranks_recompute), TEST_CASE(ranks_overlap),
    TEST_CASE(ranks_offload),
    TEST_CASE(ranks_of_any_number_of_threads),
    TEST_CASE(gradients_between_micro_steps_of_ranks),
    TEST_CASE(ranks_evaluate),
    TEST_CASE(parameters_of_ranks_are_set_and_read),
    TEST_CASE(states_resume_on_other_ranks), TEST_CASE(optimizers_of_whole_matrices), TEST_CASE(ranks_prune),
    TEST_CASE(states_of_fewer_bits),
    TEST_CASE(ranks_that_contradict_are_refused),
    TEST_CASE(programs_of_other_layouts_are_refused),
    TEST_CASE(several_losses_on_ranks_need_totals),
    TEST_CASE(misuse_of_ranks),
    TEST_CASE(bad_inputs_of_a_rank_are_named),
    TEST_CASE(each_launch_of_a_rank_fails),
    TEST_CASE(a_rank_that_is_late_is_named),
    TEST_CASE(each_allocation_of_ranks_fails),
    TEST_CASE(ranks_allocate_what_is_planned),
    TEST_CASE(vit_l16_on_four_ranks),
};

/* Lets ranks and offload divide the small tensors of these tests. */
static void set_limits(void)
{
    tt__limit_pieces_from = 1;
    tt__limit_update_from = 1;
    tt__limit_offload_together = 1L << 16;
}

int main(int argc, char **argv)
{
    set_limits();
    return test_main(argc, argv, tests, TEST_COUNT(tests));
}
