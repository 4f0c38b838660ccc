/* Tape, verifier, passes, planner and replay: planted damage, random networks, brute force, poisoned
   memory. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
/* options of the header, as variables */
static long pieces_from = 1, update_from = 65536, together = 4096;
#define TT__PIECES_FROM pieces_from
#define TT__UPDATE_FROM update_from
#define TT__OFFLOAD_TOGETHER ((size_t)together)
static int test_estimates = 400000;
#define TT__ESTIMATES test_estimates
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"
#include "test_streams.h"

typedef struct precision_case { const char *name, *residual; } precision_case;
static const precision_case precisions[] = {
    {"32-true", NULL}, {"bf16-mixed", NULL}, {"bf16-true", NULL}, {"16-mixed", NULL}, {"16-true", NULL},
    {"bf16-mixed", "f32"}, {"16-mixed", "16-bit"}};
enum { PRECISIONS = sizeof precisions / sizeof precisions[0] };

static tt_compile_options options_of(const precision_case *precision)
{
    tt_compile_options c = tt_compile_options_default();
    c.precision = precision->name;
    c.residual = precision->residual;
    c.loss_scale.init = 256; /* so that the steps of small networks are not skipped */
    return c;
}

static int pick(uint64_t *state, int n) { return (int)(test_random(state) % (uint32_t)n); }

static tt_init normal_init(float scale)
{
    tt_init init = {TT_INIT_NORMAL, 0};
    init.scale = scale;
    return init;
}

static tt_param *matrix(tt_context *ctx, const char *name, int64_t rows, int64_t cols)
{
    int64_t dims[2] = {rows, cols};
    tt_param *p = tt_param_find(ctx, name);
    return p ? p : tt_param_new(ctx, name, 2, dims, normal_init(1.0f / sqrtf((float)cols)));
}

static tt_param *vector(tt_context *ctx, const char *name, int64_t n, tt_init_kind kind)
{
    tt_init init = {kind, 0.2f};
    tt_param *p = tt_param_find(ctx, name);
    return p ? p : tt_param_new(ctx, name, 1, &n, init);
}

/* ------------------------------------------------------------------------------------------------- damage
   A small program through the private API, one thing broken at a time. */

typedef struct damaged {
    tt_context *ctx;
    tt_tape *t;
    tt_value x, h, y, target, loss;
    test_allocator a;
} damaged;

/* A context whose device "cpu" has memory of its own, so that plans for it offload as those for GPUs. */
static tt_context *open_apart(const tt_context_options *o)
{
    tt_context *ctx = tt_open(o);
    if (ctx) ctx->apart = true;
    return ctx;
}

static bool intact(damaged *d) /* x -> linear -> gelu -> mean squared error */
{
    d->ctx = test_open(&d->a);
    if (!d->ctx) return false;
    d->ctx->options.verify = true;
    d->t = tt_tape_new(d->ctx);
    d->x = tt_input(d->t, "x", TT_F32, 6, 4);
    d->target = tt_input(d->t, "target", TT_F32, 6, 4);
    d->h = tt_linear(d->t, d->x, matrix(d->ctx, "w", 4, 4), vector(d->ctx, "b", 4, TT_INIT_ZEROS));
    d->y = tt_gelu(d->t, d->h);
    d->loss = tt_mean_squared_error(d->t, d->y, d->target, tt__handle(d->t, 0));
    return tt_tape_status(d->t) == TT_OK && tt__verify(d->t, "test") == TT_OK;
}

static void expect_damage(damaged *d, const char *text, const char *file, int line)
{
    test__check(tt__verify(d->t, "test") == TT_ERR_INTERNAL, file, line, text);
    test__error(d->ctx, TT_ERR_INTERNAL, "after pass 'test'", file, line);
    test__error(d->ctx, TT_ERR_INTERNAL, text, file, line);
    tt_tape_free(d->t);
    test__close(d->ctx, &d->a, file, line);
}
#define EXPECT_DAMAGE(d, text) expect_damage((d), (text), __FILE__, __LINE__)

TEST(verifier_finds_damage)
{
    damaged d;
    tt__instr swap;

    REQUIRE(intact(&d)); /* gelu before its linear */
    swap = d.t->code[0]; d.t->code[0] = d.t->code[1]; d.t->code[1] = swap;
    EXPECT_DAMAGE(&d, "reads a value that nothing has written: 'linear.0'");

    REQUIRE(intact(&d)); /* the linear is gone */
    tt__index(d.t);
    tt__drop(d.t, 0);
    CHECK(tt__settle(d.t, d.t->n_code) == TT_OK);
    EXPECT_DAMAGE(&d, "instruction 0 (gelu): reads a value that nothing has written: 'linear.0'");

    REQUIRE(intact(&d)); /* gelu writes what linear wrote */
    d.t->code[1].in[0] = d.x.id;
    d.t->code[1].out[0] = d.h.id;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): writes a value a second time: 'linear.0'");

    REQUIRE(intact(&d));
    d.t->values[d.y.id].shape.cols = 5;
    EXPECT_DAMAGE(&d, "result has another shape than its rule says: 'gelu.1' f32 (6, 5)");

    REQUIRE(intact(&d));
    d.t->values[d.y.id].shape.rows = 7;
    EXPECT_DAMAGE(&d, "result has another shape than its rule says: 'gelu.1' f32 (7, 4)");

    REQUIRE(intact(&d));
    d.t->code[0].segment = TT__EACH_STEP;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): stands behind those of a later segment");

    REQUIRE(intact(&d)); /* an operand of the wrong width: the rule of the op says so */
    d.t->values[d.target.id].shape.cols = 3;
    EXPECT_DAMAGE(&d, "mean_squared_error: operand 1 is 'target' f32 (6, 3), expected (6, 4)");

    REQUIRE(intact(&d));
    d.t->values[d.y.id].shape.dtype = TT_I32;
    EXPECT_DAMAGE(&d, "result has the wrong dtype: 'gelu.1' i32");

    REQUIRE(intact(&d)); /* statistics stay f32 */
    d.t->values[d.loss.id].shape.dtype = TT_BF16;
    EXPECT_DAMAGE(&d, "result has the wrong dtype: 'mean_squared_error.2' bf16");

    REQUIRE(intact(&d));
    d.t->code[1].add = 1;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): adds to a value that nothing has written: 'gelu.1'");

    REQUIRE(intact(&d));
    d.t->code[1].out[0] = d.target.id;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): overwrites: 'target'");

    REQUIRE(intact(&d)); /* a parameter of the same shape as the result */
    d.t->values[d.y.id].storage = TT__PARAMETER;
    d.t->values[d.y.id].param = 0;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): overwrites: 'gelu.1'");

    REQUIRE(intact(&d));
    d.t->code[0].in[3] = d.t->n_values;
    EXPECT_DAMAGE(&d, "instruction 0 (linear): operand is no value");

    REQUIRE(intact(&d));
    d.t->code[1].in[1] = d.x.id;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): operand is no value");

    REQUIRE(intact(&d));
    d.t->code[1].out[0] = d.t->n_values + 3;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): result is no value");

    REQUIRE(intact(&d));
    d.t->code[1].out[1] = d.h.id;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): writes an output that it has not: 'linear.0'");

    REQUIRE(intact(&d)); /* with verify off nothing is looked at */
    d.t->code[1].add = 1;
    d.ctx->options.verify = false;
    CHECK(tt__verify(d.t, "test") == TT_OK);
    tt_tape_free(d.t);
    TEST_CLOSE(d.ctx, &d.a);
}

static tt__box box_of(int first, int last, size_t bytes, size_t place)
{
    tt__box b;
    memset(&b, 0, sizeof b);
    b.first = first;
    b.last = last;
    b.bytes = bytes;
    b.place = place;
    return b;
}

TEST(verifier_finds_bad_places)
{
    damaged d;
    tt__box box[3];
    REQUIRE(intact(&d));
    box[0] = box_of(0, 3, 128, 0);
    box[1] = box_of(2, 5, 64, 128);
    box[2] = box_of(4, 6, 64, 0);
    for (int k = 0; k < 3; k++) box[k].merged = k;
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_OK);
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 191) == TT_ERR_INTERNAL);
    CHECK_ERROR(d.ctx, TT_ERR_INTERNAL, "storage 1 of 64 bytes at 128 leaves its region of 191");
    box[2].place = 192;
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_ERR_INTERNAL);
    CHECK_ERROR(d.ctx, TT_ERR_INTERNAL, "storage 2 of 64 bytes at 192 leaves its region of 192");
    box[2].place = 96; /* not aligned */
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 1024) == TT_ERR_INTERNAL);
    box[2].place = 128;
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_ERR_INTERNAL);
    CHECK_ERROR(d.ctx, TT_ERR_INTERNAL, "storages 2 and 1 are alive together and overlap");
    box[2].place = 64; /* over box 0, which is dead by then */
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_OK);
    box[2].first = 3;
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_ERR_INTERNAL);
    box[2].merged = 0; /* takes over its place: not looked at */
    box[2].place = 0;
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_OK);
    tt_tape_free(d.t);
    TEST_CLOSE(d.ctx, &d.a);
}

/* ----------------------------------------------------------------------------------------- random networks
   Chains, branches, residuals, views, shared parameters, attention, pooling: a function of the seed. */

enum { NET_ROWS = 24, NET_SEQS = 4, NET_VOCAB = 11, NET_CLASSES = 5, NET_VALUES = 40 };

typedef struct net {
    tt_tape *t;
    tt_value x, ids, index, starts, labels, target, weights; /* id 0 where there is none */
    tt_value loss;
    int width;          /* of x and target */
    bool per_sequence;  /* labels: one for each sequence */
} net;

/* kinks: ReLU, which finite differences stumble over */
typedef struct net_options { bool dropout, kinks; } net_options;

static tt_param *random_matrix(tt_context *ctx, uint64_t *s, int64_t rows, int64_t cols)
{
    char name[64];
    /* Equal names are shared parameters. */
    snprintf(name, sizeof name, "w%d.%dx%d", pick(s, 3), (int)rows, (int)cols);
    return matrix(ctx, name, rows, cols);
}

static tt_param *random_vector(tt_context *ctx, uint64_t *s, int64_t n, tt_init_kind kind)
{
    char name[64];
    snprintf(name, sizeof name, "%s%d.%d", kind == TT_INIT_ONES ? "scale" : "bias", pick(s, 3), (int)n);
    return vector(ctx, name, n, kind);
}

static tt_value random_attention(net *n, uint64_t *s, tt_value q, tt_value k, tt_value v, bool dropout)
{
    tt_attention_options o = tt_attention_options_default(1 + pick(s, 2));
    o.causal = pick(s, 2);
    o.dropout = dropout && pick(s, 2) ? 0.25f : 0;
    return tt_attention(n->t, q, k, v, n->starts, &o);
}

/* One more value of the pool, of width d, 2 d or 3 d; from is one of them. */
static tt_value random_op(net *n, uint64_t *s, const tt_value *pool, int count, tt_value from, int64_t d,
                          net_options o)
{
    tt_tape *t = n->t;
    int64_t width = t->values[from.id].shape.cols, rows = tt__axis_code(t, t->values[from.id].shape.axis, 0);
    tt_value same[NET_VALUES];
    int n_same = 0;
    for (int k = 0; k < count; k++) if (t->values[pool[k].id].shape.cols == width) same[n_same++] = pool[k];
    switch (pick(s, 14)) {
    case 0: case 1: case 2: {
        int64_t out = d * (1 + pick(s, 3));
        tt_param *b = pick(s, 3) ? random_vector(t->ctx, s, out, TT_INIT_UNIFORM) : NULL;
        return tt_linear(t, from, random_matrix(t->ctx, s, out, width), b);
    }
    case 3:
        return tt_layernorm(t, from, random_vector(t->ctx, s, width, TT_INIT_ONES),
                            pick(s, 3) ? random_vector(t->ctx, s, width, TT_INIT_UNIFORM) : NULL, 1e-3f);
    case 4: return tt_gelu(t, from);
    case 5: return pick(s, 2) ? tt_silu(t, from) : tt_gelu_tanh(t, from);
    case 6: return pick(s, 2) && o.kinks ? tt_relu(t, from) : tt_tanh(t, from);
    case 7: case 8: return tt_add(t, from, same[pick(s, n_same)]);
    case 9: return tt_scale(t, from, 0.7f);
    case 10:
        return o.dropout ? tt_dropout(t, from, pick(s, 4) ? 0.25f : 0) : tt_gather_rows(t, from, n->index);
    case 11:
        return pick(s, 2) || t->values[from.id].ld != width ? tt_gather_rows(t, from, n->index)
                                                            : tt_reshape(t, from, rows, width);
    case 12: if (width > d) return tt_slice(t, from, pick(s, (int)(width - d) + 1), d); /* fall through */
    default:
        if (width == 3 * d)
            return random_attention(n, s, tt_slice(t, from, 0, d), tt_slice(t, from, d, d),
                                    tt_slice(t, from, 2 * d, d), o.dropout);
        return random_attention(n, s, from, same[pick(s, n_same)], same[pick(s, n_same)], o.dropout);
    }
}

/* A pre-norm and a post-norm block over token and position embeddings, packed qkv, shared output
   embedding. */
static tt_value small_transformer(tt_context *ctx, net *n, bool dropout)
{
    tt_tape *t = n->t;
    char name[64];
    float p = dropout ? 0.1f : 0;
    const int d = 16;
    tt_value h = tt_add(t, tt_embedding(t, n->ids, matrix(ctx, "tokens", NET_VOCAB, d)),
                        tt_embedding(t, n->index, matrix(ctx, "positions", NET_ROWS, d)));
    h = tt_dropout(t,
                   tt_layernorm(t, h, vector(ctx, "norm.w", d, TT_INIT_ONES),
                                vector(ctx, "norm.b", d, TT_INIT_ZEROS), 1e-5f),
                   p);
    for (int k = 0; k < 2; k++) {
        tt_attention_options o = tt_attention_options_default(2);
        tt_param *w[12];
        static const char *const names[12] = {"norm1.w", "norm1.b", "qkv.w", "qkv.b", "out.w",  "out.b",
                                              "norm2.w", "norm2.b", "up.w",  "up.b",  "down.w", "down.b"};
        static const int rows[12] = {0, 0, 48, 48, 16, 16, 0, 0, 64, 64, 16, 16},
                         cols[12] = {0, 0, 16, 0, 16, 0, 0, 0, 16, 0, 64, 0};
        for (int j = 0; j < 12; j++) {
            snprintf(name, sizeof name, "layer.%d.%s", k, names[j]);
            w[j] = cols[j] ? matrix(ctx, name, rows[j], cols[j])
                           : vector(ctx, name, rows[j] ? rows[j] : d,
                                    rows[j] || j % 2 ? TT_INIT_ZEROS : TT_INIT_ONES);
        }
        o.causal = k == 1;
        o.dropout = p;
        tt_value x = k ? h : tt_layernorm(t, h, w[0], w[1], 1e-5f), qkv = tt_linear(t, x, w[2], w[3]);
        x = tt_attention(t, tt_slice(t, qkv, 0, d), tt_slice(t, qkv, d, d), tt_slice(t, qkv, 2 * d, d),
                         n->starts, &o);
        h = tt_add(t, h, tt_dropout(t, tt_linear(t, x, w[4], w[5]), p));
        if (k) h = tt_layernorm(t, h, w[0], w[1], 1e-5f);
        x = k ? h : tt_layernorm(t, h, w[6], w[7], 1e-5f);
        x = tt_linear(t, tt_gelu(t, tt_linear(t, x, w[8], w[9])), w[10], w[11]);
        h = tt_add(t, tt_dropout(t, x, p), h);
        if (k) h = tt_layernorm(t, h, w[6], w[7], 1e-5f);
    }
    return tt_linear(t, h, matrix(ctx, "tokens", NET_VOCAB, d), NULL);
}

/* Network 0 is the small transformer, the others are random. */
static bool random_net(tt_context *ctx, uint64_t seed, net_options o, net *n)
{
    uint64_t s = seed * 0x9E3779B97F4A7C15u + 1;
    tt_value pool[NET_VALUES];
    int count = 0, ops = 3 + pick(&s, 12);
    int64_t d = 4 * (1 + pick(&s, 3));
    memset(n, 0, sizeof *n);
    tt_tape *t = n->t = tt_tape_new(ctx);
    int64_t tokens = tt_axis(t, "tokens", NET_ROWS), seqs = tt_axis(t, "seqs", NET_SEQS);
    n->width = (int)d;
    n->starts = tt_seq_start(t, "starts", seqs);
    n->index = tt_input(t, "index", TT_I32, tokens, 1);
    n->x = tt_input(t, "x", TT_F32, tokens, d);
    n->ids = tt_input(t, "ids", TT_I32, tokens, 1);
    if (seed == 0) {
        n->labels = tt_input(t, "labels", TT_I32, tokens, 1);
        n->loss = tt_cross_entropy(t, small_transformer(ctx, n, o.dropout), n->labels, NULL);
        return tt_tape_status(t) == TT_OK;
    }
    pool[count++] = n->x;
    if (pick(&s, 2)) pool[count++] = tt_embedding(t, n->ids, random_matrix(ctx, &s, NET_VOCAB, d));
    if (pick(&s, 2)) { /* a view of a parameter: some of its columns, or with rows of half the length */
        tt_value table = tt_param_value(t, random_matrix(ctx, &s, NET_VOCAB, 2 * d));
        table = pick(&s, 2) ? tt_slice(t, table, pick(&s, (int)d + 1), d)
                            : tt_reshape(t, table, 2 * NET_VOCAB, d);
        tt_value gathered = tt_gather_rows(t, table, n->ids);
        pool[count++] = gathered;
    }
    while (ops--) {
        tt_value from = pool[pick(&s, 2) ? count - 1 : pick(&s, count)];
        tt_value made = random_op(n, &s, pool, count, from, d, o);
        pool[count++] = made;
    }
    tt_value last = pool[count - 1], other = pool[pick(&s, count)];
    int64_t width = t->values[last.id].shape.cols;
    if (pick(&s, 3) == 0) tt_output(t, pick(&s, 2) ? other : tt_slice(t, other, 1, 3));
    if (t->values[other.id].shape.cols == width) last = tt_add(t, last, other);
    n->per_sequence = pick(&s, 2);
    if (n->per_sequence) last = tt_mean_pool(t, last, n->starts);
    int64_t rows = n->per_sequence ? seqs : tokens;
    if (pick(&s, 3)) {
        tt_cross_entropy_options c = tt_cross_entropy_options_default();
        c.label_smoothing = pick(&s, 2) ? 0.1f : 0;
        n->labels = tt_input(t, "labels", TT_I32, rows, 1);
        if (pick(&s, 2)) c.weights = n->weights = tt_input(t, "weights", TT_F32, rows, 1);
        n->loss = tt_cross_entropy(t, tt_linear(t, last, random_matrix(ctx, &s, NET_CLASSES, width), NULL),
                                   n->labels, &c);
    } else {
        n->target = tt_input(t, "target", TT_F32, rows, d);
        n->loss = tt_mean_squared_error(
            t, tt_linear(t, last, random_matrix(ctx, &s, d, width), random_vector(ctx, &s, d, TT_INIT_ZEROS)),
            n->target, n->weights);
    }
    return tt_tape_status(t) == TT_OK;
}

/* Sets every input of the tape (also those that the program does not read), for batch number `batch`. */
static tt_status set_inputs(const net *n, tt_program *p, uint64_t batch)
{
    uint64_t s = batch * 77 + 5;
    int32_t starts[NET_SEQS + 1] = {0}, integer[NET_ROWS];
    float numbers[NET_ROWS * 16];
    int seqs = 1 + pick(&s, NET_SEQS);
    for (int k = 0; k < seqs; k++) starts[k + 1] = starts[k] + 1 + pick(&s, NET_ROWS / NET_SEQS);
    int rows = starts[seqs], labels = n->per_sequence ? seqs : rows;
    tt_status status = tt_set(p, n->starts, starts, seqs + 1);
    for (int k = 0; k < rows; k++) integer[k] = pick(&s, rows);
    if (status == TT_OK) status = tt_set(p, n->index, integer, rows);
    for (int k = 0; k < rows; k++) integer[k] = pick(&s, NET_VOCAB);
    if (status == TT_OK) status = tt_set(p, n->ids, integer, rows);
    for (int k = 0; k < rows * n->width; k++) numbers[k] = test_uniform(&s);
    if (status == TT_OK) status = tt_set(p, n->x, numbers, rows);
    for (int k = 0; k < labels; k++) integer[k] = pick(&s, NET_CLASSES);
    if (labels > 1) integer[1] = -100;
    if (status == TT_OK && n->labels.id) status = tt_set(p, n->labels, integer, labels);
    for (int k = 0; k < labels * n->width; k++) numbers[k] = test_uniform(&s) + 1.5f;
    if (status == TT_OK && n->weights.id) status = tt_set(p, n->weights, numbers, labels);
    if (status == TT_OK && n->target.id) status = tt_set(p, n->target, numbers, labels);
    return status;
}

/* What a few steps leave behind. */
typedef struct outcome {
    double loss[8];
    int n_losses;
    float *params;
    size_t n;
    tt_status status;
    char error[256];
} outcome;

static bool same_outcome(const outcome *a, const outcome *b)
{
    return a->status == TT_OK && b->status == TT_OK && a->n_losses == b->n_losses &&
           memcmp(a->loss, b->loss, sizeof *a->loss * (size_t)a->n_losses) == 0 && a->n == b->n &&
           memcmp(a->params, b->params, a->n * sizeof(float)) == 0;
}

static void free_outcome(outcome *o) { free(o->params); o->params = NULL; }

static void take_params(tt_context *ctx, outcome *o)
{
    o->n = 0;
    for (int k = 0; k < ctx->n_params; k++) o->n += (size_t)ctx->params[k]->size;
    o->params = (float *)malloc((o->n + 1) * sizeof(float));
    float *to = o->params;
    for (int k = 0; k < ctx->n_params; k++) { tt_param_get(ctx->params[k], to); to += ctx->params[k]->size; }
}

/* Gives each storage a place of its own: nothing is shared, nothing works in place. Before anything is
   allocated. */
static void scatter(tt_program *p)
{
    size_t at = 0;
    for (int k = 0; k < p->built.n_boxes; k++) {
        if (p->built.box[k].space == TT__HOST) continue;
        p->built.box[k].merged = k;
        p->built.box[k].place = at;
        at += p->built.box[k].bytes;
        if (p->built.box[k].value) p->built.t->values[p->built.box[k].value].place = p->built.box[k].place;
        else p->built.t->code[p->built.box[k].first].workspace_place = p->built.box[k].place;
    }
    p->built.transient = p->arena->transient = at;
}

static void poison(tt_program *p) /* now, and whatever dies in each run */
{
    p->poison = true;
    char *const *memory = p->arena->memory;
    if (tt_allocate(p) == TT_OK) memset(memory[0] + p->arena->persistent, 0xff, p->arena->transient);
}

typedef enum variant {
    PLAIN, POISONED, SCATTERED, THREADED, PLANNED, EVALUATED, KEEPING, ATTENTION, BLOCKS, BUDGETED,
    OFFLOADING, ON_HOST, EARLY, EARLY_OFFLOADING, VARIANTS
} variant;

static const char *const offloads[] = {"optimizer", "gradients", "parameters", "optimizer,gradients",
                                       "activations", "activations,gradients,parameters,optimizer"};

/* May a network be updated in the backward? All optimizers have some of them. */
static bool may_be_early(uint64_t seed, const precision_case *precision, bool accumulate)
{
    return seed % 2 && !accumulate && strncmp(precision->name, "16-", 3) != 0;
}

/* With the smallest of some budgets that the network fits. */
static tt_program *compile_within(const net *n, uint64_t seed, tt_compile_options c)
{
    tt_program *p = NULL;
    c.recompute = "none";
    tt_program *all = tt_compile(n->t, n->loss, &c);
    if (!all) return NULL;
    const tt_plan plan = tt_program_plan(all);
    tt_program_free(all);
    c.recompute = "budget";
    if (seed % 4 > 1) c.offload = "budget";
    for (size_t part = 5 + seed % 2; part <= 8 && !p; part++) {
        c.memory_budget = plan.persistent_bytes + (plan.bytes - plan.persistent_bytes) / 8 * part;
        p = tt_compile(n->t, n->loss, &c);
        CHECK(p ? tt_program_plan(p).bytes <= c.memory_budget : tt_error_code(n->t->ctx) == TT_ERR_BUDGET);
    }
    return p;
}

static outcome run_net(uint64_t seed, const precision_case *precision, bool accumulate, variant how)
{
    static const net_options with_all = {true, true};
    outcome o;
    test_allocator a;
    net n;
    tt_stats stats;
    tt_context_options co = test_options(&a);
    tt_compile_options c = options_of(precision);
    memset(&o, 0, sizeof o);
    co.threads = how == THREADED ? 3 : 1;
    co.verify = true;
    tt_context *ctx = open_apart(&co);
    c.accumulate = accumulate;
    const bool may = may_be_early(seed, precision, accumulate);
    c.optimizer.clip_norm = may ? 0 : 1;
    if (may) {
        static const tt_optimizer_kind kinds[] = {TT_SGD, TT_SGD, TT_ADAM, TT_ADAMW};
        c.optimizer.kind = kinds[seed / 2 % 4];
        c.optimizer.momentum = seed / 2 % 4 ? 0.9f : 0;
    }
    if (how >= EARLY) c.update = "backward";
    if (how == ON_HOST) c.update = "host";
    update_from = seed % 4 == 1 ? 1 : 200;
    c.recompute = how == KEEPING ? "none"
                  : how == ATTENTION ? "attention"
                  : how == BLOCKS ? "blocks"
                  : "cheap";
    ctx->late = (how == OFFLOADING || how == ON_HOST) && seed % 2; /* and so overlaps */
    if (how == OFFLOADING && seed % 4) c.recompute = seed % 4 == 1 ? "blocks" : "none";
    if (how >= EARLY && seed % 4 == 1) c.recompute = "blocks";
    const uint64_t list = how == EARLY_OFFLOADING ? seed / 2 : seed + (uint64_t)accumulate;
    if (how == EARLY_OFFLOADING || (how == OFFLOADING && seed % 7) || (how == ON_HOST && seed % 3))
        c.offload = offloads[list % TEST_COUNT(offloads)];
    bool built = random_net(ctx, seed, with_all, &n);
    for (int32_t v = 1; built && (how == BLOCKS || how >= EARLY) && v < n.t->n_values; v++)
        if ((v * 7 + (int32_t)seed) % 9 == 0) tt_block_end(n.t, tt__handle(n.t, v));
    for (int32_t v = 1; built && how == OFFLOADING && v < n.t->n_values; v++) {
        if ((v * 5 + (int32_t)seed) % 9 == 0) tt_offload(n.t, tt__handle(n.t, v));
        if ((v * 7 + (int32_t)seed) % 9 == 0) tt_block_end(n.t, tt__handle(n.t, v));
    }
    for (int32_t v = 1; built && how >= KEEPING && seed % 2 && v < n.t->n_values; v++) {
        const uint64_t marked = (uint64_t)v * 7919 % 101 + seed + (uint64_t)how;
        if (marked % 3 == 0) tt_recompute(n.t, tt__handle(n.t, v));
        else if (marked % 3 == 1) tt_keep(n.t, tt__handle(n.t, v));
    }
    tt_program *planned[2] = {NULL, NULL}; /* for another kind of device, before and after */
    c.device = "cuda";
    if (built && how == PLANNED) planned[0] = tt_compile(n.t, n.loss, &c);
    c.device = "cpu";
    tt_program *p = built && how == BUDGETED ? compile_within(&n, seed, c) : NULL, *eval = NULL;
    if (built && how != BUDGETED) p = tt_compile(n.t, n.loss, &c);
    if (p && how == EVALUATED) { /* shares the arena; runs between the steps */
        c.train = false;
        c.share = p;
        eval = tt_compile(n.t, n.loss, &c);
        if (eval) CHECK(eval->arena == p->arena);
    }
    o.status = p && (how != EVALUATED || eval) ? TT_OK : tt_error_code(ctx);
    if (o.status == TT_OK && how == SCATTERED) scatter(p);
    if (o.status == TT_OK && (how == POISONED || how >= EVALUATED)) poison(p);
    for (int step = 0; step < 3 && o.status == TT_OK; step++) {
        if (eval) {
            poison(eval);
            o.status = set_inputs(&n, eval, 100);
            if (o.status == TT_OK) o.status = tt_run(eval, &stats);
            if (o.status == TT_OK && !isfinite(stats.loss)) o.status = TT_ERR_NUMERIC;
        }
        for (int micro = 0; micro < (accumulate ? 2 : 1) && o.status == TT_OK; micro++) {
            o.status = set_inputs(&n, p, (uint64_t)(step * 2 + micro));
            if (o.status == TT_OK)
                o.status = accumulate ? tt_micro_step(p, &stats) : tt_step(p, 0.01f, &stats);
        }
        if (o.status == TT_OK && accumulate) o.status = tt_update(p, 0.01f, &stats);
        o.loss[o.n_losses++] = stats.loss;
        o.loss[o.n_losses++] = stats.grad_norm;
        if (!planned[0]) continue;
        c.device = "cuda";
        tt_program_free(planned[1]);
        planned[1] = tt_compile(n.t, n.loss, &c);
        CHECK(planned[1] && tt_program_plan(planned[1]).bytes == tt_program_plan(planned[0]).bytes);
    }
    snprintf(o.error, sizeof o.error, "%.250s", o.status == TT_OK ? "" : tt_error(ctx));
    take_params(ctx, &o);
    tt_program_free(planned[0]);
    tt_program_free(planned[1]);
    tt_program_free(eval);
    tt_program_free(p);
    tt_tape_free(n.t);
    TEST_CLOSE(ctx, &a);
    return o;
}

TEST(random_networks_replay_bit_for_bit)
{
    static const char *const names[VARIANTS] = {"plain",
                                                "poisoned",
                                                "scattered",
                                                "threaded",
                                                "planned elsewhere",
                                                "evaluated",
                                                "keeping all",
                                                "recomputing attention",
                                                "recomputing blocks",
                                                "within a budget",
                                                "offloading",
                                                "updating on the host",
                                                "updating in the backward",
                                                "updating in the backward, offloading"};
    char what[512];
    for (uint64_t seed = 0; seed <= 60; seed++) {
        for (int precision = 0; precision < PRECISIONS; precision++) {
            if (precision >= 5 && (int)seed % 2 == precision % 2) continue; /* half of the networks each */
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                if (((int)seed + precision + 3 * accumulate) % (3 * TEST_SWEEP - 2)) continue;
                const precision_case *in = &precisions[precision];
                outcome plain = run_net(seed, in, accumulate, PLAIN);
                snprintf(what, sizeof what, "network %d, %s, accumulate %d: %s", (int)seed, in->name,
                         accumulate, plain.error);
                if (plain.status == TT_ERR_ARGUMENT && strstr(plain.error, "nothing to train")) {
                    free_outcome(&plain);
                    continue;
                }
                test__check(plain.status == TT_OK && isfinite(plain.loss[0]), __FILE__, __LINE__, what);
                for (int how = POISONED; how < VARIANTS; how++) {
                    if (how >= EARLY && !may_be_early(seed, in, accumulate)) continue;
                    outcome other = run_net(seed, in, accumulate, (variant)how);
                    snprintf(what, sizeof what,
                             "network %d, %s, accumulate %d, %s: other results (first losses %.9g, %.9g) %s",
                             (int)seed, in->name, accumulate, names[how], plain.loss[0], other.loss[0],
                             other.error);
                    test__check(same_outcome(&plain, &other), __FILE__, __LINE__, what);
                    free_outcome(&other);
                }
                free_outcome(&plain);
            }
        }
    }
}

/* Gradients of random networks against differences of the loss along each parameter tensor's gradient and
   along a random direction, over two micro-batches. */
static double mean_loss(const net *n, tt_program *eval)
{
    double loss = 0, targets = 0;
    for (uint64_t batch = 0; batch < 2; batch++) {
        tt_stats stats;
        if (set_inputs(n, eval, batch) != TT_OK || tt_run(eval, &stats) != TT_OK) return NAN;
        loss += stats.loss * stats.targets;
        targets += stats.targets;
    }
    return loss / targets;
}

static double slope(const net *n, tt_program *eval, tt_param *p, const float *at, const float *direction,
                    float *scratch)
{
    double loss[4];
    static const float steps[4] = {-2, -1, 1, 2};
    const float h = 1.0f / 128;
    for (int k = 0; k < 4; k++) {
        for (int64_t i = 0; i < p->size; i++) scratch[i] = at[i] + steps[k] * h * direction[i];
        tt_param_set(p, scratch);
        loss[k] = mean_loss(n, eval);
    }
    tt_param_set(p, at);
    return (8 * (loss[2] - loss[1]) - (loss[3] - loss[0])) / (12 * h);
}

TEST(random_networks_have_true_gradients)
{
    static const net_options smooth = {false, false};
    char what[512];
    for (uint64_t seed = 0; seed <= 80; seed++) {
        test_allocator a;
        net n;
        tt_context *ctx = test_open(&a);
        tt_compile_options c = tt_compile_options_default();
        c.accumulate = true;
        tt_program *p = random_net(ctx, seed, smooth, &n) ? tt_compile(n.t, n.loss, &c) : NULL;
        c.train = false;
        c.share = p;
        tt_program *eval = p ? tt_compile(n.t, n.loss, &c) : NULL;
        CHECK(eval != NULL);
        for (uint64_t batch = 0; batch < 2 && eval; batch++)
            CHECK(set_inputs(&n, p, batch) == TT_OK && tt_micro_step(p, NULL) == TT_OK);
        for (int k = 0; eval && k < ctx->n_params; k++) {
            tt_param *w = ctx->params[k];
            uint64_t s = seed * 31 + (uint64_t)k + 1;
            size_t size = (size_t)w->size;
            float *all = (float *)malloc(size * 4 * sizeof(float)), *g = all, *at = all + size,
                  *direction = at + size, *scratch = direction + size;
            double norm = 0, along = 0, length = 0;
            /* Not behind the loss. */
            if (tt_get_gradient(p, w, g) != TT_OK) memset(g, 0, size * sizeof(float));
            tt_param_get(w, at);
            for (size_t i = 0; i < size; i++) norm += (double)g[i] * g[i];
            norm = sqrt(norm);
            for (size_t i = 0; i < size; i++) direction[i] = norm > 0 ? (float)(g[i] / norm) : 0;
            double found = slope(&n, eval, w, at, direction, scratch);
            snprintf(what, sizeof what, "network %d: gradient of '%s': slope %.6g along it, norm %.6g",
                     (int)seed, w->name, found, norm);
            test__check(fabs(found - norm) <= 0.01 * norm + 1e-3, __FILE__, __LINE__, what);
            for (size_t i = 0; i < size; i++) {
                direction[i] = test_uniform(&s);
                length += (double)direction[i] * direction[i];
            }
            for (size_t i = 0; i < size; i++) {
                direction[i] /= (float)sqrt(length);
                along += (double)direction[i] * g[i];
            }
            found = slope(&n, eval, w, at, direction, scratch);
            snprintf(what, sizeof what, "network %d: gradient of '%s': slope %.6g across it, expected %.6g",
                     (int)seed, w->name, found, along);
            test__check(fabs(found - along) <= 0.01 * fabs(along) + 0.002 * norm + 1e-3, __FILE__, __LINE__,
                        what);
            free(all);
        }
        tt_program_free(eval);
        tt_program_free(p);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
}

/* -------------------------------------------------------------------------------- streams, spaces and groups
   Tapes by hand: no pass emits such instructions yet. */

/* h = gelu(x) goes to the host's memory while u = gelu(x) is computed, and comes back while u2 = gelu(u)
   is. */
typedef struct offload { damaged d; int32_t h, a, u, b, u2, y; } offload;
enum { COPY_OUT = 1, MEANWHILE, WAIT_OUT, COPY_IN, AFTER, WAIT_IN, SUM };

static void by_hand(tt_tape *t, int op, int stream, int32_t in0, int32_t in1, int32_t out)
{
    tt__instr *i = tt__append(t, op);
    i->stream = stream;
    i->in[0] = in0;
    i->in[1] = in1;
    i->out[0] = out;
}

static int32_t copy_of(tt_tape *t, int32_t v, tt__space space, const char *name)
{
    tt__shape shape = t->values[v].shape;
    int32_t id = tt__new_value(t, &shape, TT__TRANSIENT, "%s", name);
    t->values[id].space = space;
    return id;
}

static int32_t gelu(tt_tape *t, int32_t x, const char *name)
{
    tt_value y = tt_gelu(t, tt__handle(t, x));
    tt_name(t, y, "%s", name);
    return y.id;
}

static bool offloaded(offload *o)
{
    damaged *d = &o->d;
    d->ctx = test_open(&d->a);
    if (!d->ctx) return false;
    d->ctx->options.verify = true;
    tt_tape *t = d->t = tt_tape_new(d->ctx);
    d->x = tt_input(t, "x", TT_F32, 40, 4);
    o->h = gelu(t, d->x.id, "h");
    o->a = copy_of(t, o->h, TT__HOST, "a");
    o->b = copy_of(t, o->h, TT__DEVICE, "b");
    by_hand(t, TT__OP_COPY, 1, o->h, 0, o->a);
    o->u = gelu(t, d->x.id, "u");
    by_hand(t, TT__OP_WAIT, 0, o->a, o->h, 0);
    by_hand(t, TT__OP_COPY, 2, o->a, 0, o->b);
    o->u2 = gelu(t, o->u, "u2");
    by_hand(t, TT__OP_WAIT, 0, o->b, o->a, 0);
    o->y = tt_add(t, tt__handle(t, o->b), tt__handle(t, o->u2)).id;
    return tt_tape_status(t) == TT_OK && t->n_code == SUM + 1 && tt__verify(t, "test") == TT_OK;
}

TEST(verifier_finds_what_is_not_waited_for)
{
    offload o;
    tt__instr swap, *code;

    REQUIRE(offloaded(&o)); /* used before the end */
    code = o.d.t->code;
    swap = code[WAIT_IN]; code[WAIT_IN] = code[SUM]; code[SUM] = swap;
    EXPECT_DAMAGE(&o.d, "instruction 6 (add): is not waited for before it is read: 'b'");

    REQUIRE(offloaded(&o)); /* what is copied changes meanwhile */
    o.d.t->code[MEANWHILE].out[0] = o.h;
    o.d.t->code[MEANWHILE].add = 1;
    EXPECT_DAMAGE(&o.d, "instruction 2 (gelu): is not waited for before it is written: 'h'");

    REQUIRE(offloaded(&o)); /* nor may the copy be written meanwhile */
    o.d.t->code[AFTER].out[0] = o.b;
    o.d.t->code[AFTER].add = 1;
    EXPECT_DAMAGE(&o.d, "instruction 5 (gelu): is not waited for before it is written: 'b'");

    REQUIRE(offloaded(&o)); /* no end */
    o.d.t->code[SUM].in[0] = o.u;
    o.d.t->code[WAIT_IN] = o.d.t->code[SUM];
    o.d.t->n_code--;
    EXPECT_DAMAGE(&o.d, "instruction 4 (copy): is never waited for: 'b'");

    REQUIRE(offloaded(&o)); /* two ends */
    by_hand(o.d.t, TT__OP_WAIT, 0, o.b, o.a, 0);
    EXPECT_DAMAGE(&o.d, "instruction 8 (wait): waits for nothing that is under way: 'b'");

    REQUIRE(offloaded(&o)); /* an end that lets go of an operand */
    o.d.t->code[WAIT_OUT].in[1] = 0;
    EXPECT_DAMAGE(&o.d, "instruction 3 (wait): does not keep all operands of what it waits for: 'a'");

    REQUIRE(offloaded(&o));
    o.d.t->code[WAIT_OUT].in[0] = o.h;
    EXPECT_DAMAGE(&o.d, "instruction 3 (wait): waits for nothing that is under way: 'h'");

    REQUIRE(offloaded(&o)); /* micro-batches would start it many times, and updates would wait once */
    for (int k = WAIT_IN; k <= SUM; k++) o.d.t->code[k].segment = TT__EACH_STEP;
    EXPECT_DAMAGE(&o.d, "instruction 6 (wait): waits in another segment or stream: 'b'");

    REQUIRE(offloaded(&o)); /* kernels do not reach the host's memory */
    o.d.t->code[SUM].in[1] = o.a;
    EXPECT_DAMAGE(&o.d, "instruction 7 (add): cannot read the host's memory: 'a'");

    REQUIRE(offloaded(&o));
    o.d.t->values[o.u2].space = TT__HOST;
    EXPECT_DAMAGE(&o.d, "instruction 5 (gelu): cannot write the host's memory: 'u2'");

    REQUIRE(offloaded(&o)); /* but where it is the device's */
    o.d.t->values[o.u2].space = TT__HOST;
    o.d.t->host = true;
    CHECK(tt__verify(o.d.t, "test") == TT_OK);
    tt_tape_free(o.d.t);
    TEST_CLOSE(o.d.ctx, &o.d.a);
}

TEST(verifier_finds_bad_groups)
{
    offload o;

    REQUIRE(offloaded(&o));
    o.d.t->code[AFTER].with_next = true;
    EXPECT_DAMAGE(&o.d, "instruction 5 (gelu): runs together with one of another op");

    REQUIRE(offloaded(&o)); /* u and u2, which is computed from it */
    o.d.t->code[WAIT_OUT] = o.d.t->code[COPY_OUT];
    o.d.t->code[COPY_OUT] = o.d.t->code[MEANWHILE];
    o.d.t->code[MEANWHILE] = o.d.t->code[AFTER];
    o.d.t->code[COPY_OUT].with_next = true;
    EXPECT_DAMAGE(&o.d,
                  "instruction 2 (gelu): reads what an instruction that it runs together with writes: 'u'");
}

/* Where b lies, first and last instruction that it lives at; NULL: it has no storage. */
static const tt__box *box_named(const tt_tape *t, const tt__box *box, int n, const char *name)
{
    for (int k = 0; k < n; k++)
        if (box[k].value && strcmp(t->values[box[k].value].name, name) == 0) return &box[k];
    return NULL;
}

TEST(lifetimes_and_places_of_each_space)
{
    offload o;
    tt__box *box;
    int n, at;
    size_t height[TT__SPACES], bound[TT__SPACES];
    REQUIRE(offloaded(&o));
    tt_tape *t = o.d.t;
    REQUIRE(tt__lifetimes(t, o.y, &box, &n) == TT_OK);
    const tt__box *h = box_named(t, box, n, "h"), *a = box_named(t, box, n, "a"),
                  *b = box_named(t, box, n, "b");
    REQUIRE(h && a && b);
    CHECK(h->space == TT__DEVICE && h->first == 0 && h->last == WAIT_OUT);
    CHECK(a->space == TT__HOST && a->first == COPY_OUT && a->last == WAIT_IN);
    CHECK(b->space == TT__DEVICE && b->first == COPY_IN);
    for (int space = 0; space < TT__SPACES; space++) {
        REQUIRE(tt__place(o.d.ctx, box, n, t->n_code, (tt__space)space,
                          &height[space], &bound[space], &at) == TT_OK);
        CHECK(height[space] == bound[space]);
    }
    for (int space = 0; space < TT__SPACES; space++)
        CHECK(tt__verify_places(t, box, n, (tt__space)space, height[space]) == TT_OK);
    /* (40, 4) floats: x, whose place u and u2 take, and h or b */
    CHECK(height[TT__HOST] == 640 && height[TT__DEVICE] == 2 * 640);

    box[a - box].place = 64;
    CHECK(tt__verify_places(t, box, n, TT__DEVICE, height[TT__DEVICE]) == TT_OK);
    CHECK(tt__verify_places(t, box, n, TT__HOST, height[TT__HOST]) == TT_ERR_INTERNAL);
    tt__free(o.d.ctx, box);
    tt_tape_free(t);
    TEST_CLOSE(o.d.ctx, &o.d.a);
}

/* Compiled and run, it computes gelu(x) + gelu(gelu(x)), with the copy in memory that the plan counts as the
   host's. */
TEST(values_in_the_hosts_memory)
{
    offload o;
    float x[160], y[160];
    tt_compile_options c = tt_compile_options_default();
    REQUIRE(offloaded(&o));
    c.train = false;
    tt_program *p = tt_compile(o.d.t, tt__handle(o.d.t, o.y), &c);
    REQUIRE(p != NULL);
    CHECK(tt_program_plan(p).host_bytes == 640 && tt_program_plan(p).instructions == SUM + 1);
    for (int k = 0; k < 160; k++) x[k] = (float)k / 40 - 2;
    CHECK(tt_set(p, o.d.x, x, 40) == TT_OK && tt_run(p, NULL) == TT_OK &&
          tt_get(p, tt__handle(o.d.t, o.y), y, 160) == TT_OK);
    for (int k = 0; k < 160; k++) {
        double g = 0.5 * x[k] * (1 + erf(x[k] / sqrt(2))), gg = 0.5 * g * (1 + erf(g / sqrt(2)));
        CHECK_NEAR(y[k], g + gg, 1e-6);
    }
    tt_program_free(p);
    tt_tape_free(o.d.t);
    TEST_CLOSE(o.d.ctx, &o.d.a);
}

/* Copies are done when they start or, if the context says so, when they are waited for: the same bits. In
   the latter way each wait that is left out is noticed. */
TEST(work_of_other_streams_ends_at_its_wait)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static float expected[STREAM_RUNS][STREAM_NUMBERS], got[STREAM_RUNS][STREAM_NUMBERS];
    ctx->options.verify = true;
    for (int without = -2; without < 2 * STREAM_BLOCKS; without++) { /* a wait; -1: none; -2: at the start */
        streams s;
        ctx->late = without > -2;
        REQUIRE(streams_compile(&s, ctx, "cpu"));
        s.p->poison = true;
        if (without >= 0) REQUIRE(streams_drop(&s, without));
        CHECK(streams_run(&s, without == -2 ? expected : got) == TT_OK);
        for (int k = 0; k < STREAM_NUMBERS; k++) CHECK(isfinite(expected[0][k]));
        if (without > -2) CHECK((memcmp(got, expected, sizeof got) == 0) == (without == -1));
        streams_free(&s);
    }
    CHECK(memcmp(expected[0], expected[1], sizeof expected[0]) != 0);
    TEST_CLOSE(ctx, &a);
}

/* Sums of squares and updates each run together: what the last of them reads, and all that they write, is
   there from the first to the last. An update without the step's settings is refused. */
TEST(instructions_that_run_together)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, 6, 4), target = tt_input(t, "target", TT_F32, 6, 4), h = x;
    char text[8192];
    ctx->options.verify = true;
    for (int k = 0; k < 3; k++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", k);
        h = tt_gelu(t, tt_linear(t, h, matrix(ctx, name, 4, 4), NULL));
    }
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, h, target, tt__handle(t, 0)), NULL);
    REQUIRE(p != NULL);
    const tt_tape *code = p->built.t;
    int groups = 0, end = 0, update = -1;
    for (int k = 0; k < code->n_code; k++) {
        if (!code->code[k].with_next || (k && code->code[k - 1].with_next)) continue;
        for (end = k; code->code[end].with_next; end++) {}
        CHECK(end == k + 2);
        groups++;
        update = end;
        for (int b = 0; b < p->built.n_boxes; b++) {
            const tt__box *box = &p->built.box[b];
            bool meets = box->value && box->first <= end && box->last >= k;
            if (meets) CHECK(box->first <= k && box->last >= end);
        }
    }
    CHECK(groups == 2 && p->built.together == 3);
    tt_program_text(p, text, sizeof text);
    const char *line = strstr(text, "sum_squares"), *dots = line ? strstr(line, "...\n") : NULL;
    CHECK(dots && dots < strchr(line, '\n'));
    p->built.t->code[update].in[TT__RUN_IN] = 0;
    CHECK(tt__verify(p->built.t, "test") == TT_ERR_INTERNAL);
    CHECK_ERROR(ctx, TT_ERR_INTERNAL, "lacks the step's settings: 'step settings'");
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* ---------------------------------------------------------------------------------------------- placement */

/* Smallest height of any placement: some order of lowest fits reaches it (put the storages of a best
   placement in the order of their places: each lands at its place or below). */
static size_t best_height(tt__box *box, int *order, int n, int fixed, size_t best, tt__taken *taken)
{
    if (fixed == n) {
        size_t height = tt__place_in_order(box, order, n, false, best, taken);
        return height < best ? height : best;
    }
    for (int k = fixed; k < n; k++) {
        int swap = order[fixed]; order[fixed] = order[k]; order[k] = swap;
        best = best_height(box, order, n, fixed + 1, best, taken);
        swap = order[fixed]; order[fixed] = order[k]; order[k] = swap;
    }
    return best;
}

TEST(placement_against_brute_force)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    uint64_t s = 99;
    double sum = 0, worst = 1;
    int optimal = 0, cases = 400;
    ctx->options.verify = true;
    for (int c = 0; c < cases; c++) {
        tt__box box[7];
        tt__taken taken;
        int order[7], n = 1 + pick(&s, 7), length = 2 + pick(&s, 8), at, bound_at = 0;
        size_t height, bound, most = 0;
        for (int k = 0; k < n; k++) {
            int first = pick(&s, length), last = first + pick(&s, length - first);
            box[k] = box_of(first, last, (size_t)(1 + pick(&s, 6)) * 64, 12345);
            box[k].merged = order[k] = k;
        }
        for (int i = 0; i < length; i++) {
            size_t live = 0;
            for (int k = 0; k < n; k++) if (box[k].first <= i && i <= box[k].last) live += box[k].bytes;
            if (live > most) { most = live; bound_at = i; }
        }
        REQUIRE(tt__place(ctx, box, n, length, TT__DEVICE, &height, &bound, &at) == TT_OK);
        CHECK(bound == most && at == bound_at);
        CHECK(height >= bound);
        CHECK(tt__verify_places(t, box, n, TT__DEVICE, height) == TT_OK);
        REQUIRE(tt__taken_open(ctx, &taken, length));
        size_t best = best_height(box, order, n, 0, SIZE_MAX, &taken);
        tt__taken_close(&taken);
        CHECK(best >= bound && height >= best);
        sum += (double)height / (double)best;
        if ((double)height / (double)best > worst) worst = (double)height / (double)best;
        optimal += height == best;
    }
    if (getenv("TINYTRAIN_TEST_VERBOSE"))
        printf("  placement: %d of %d optimal, mean %.4f, worst %.4f of the optimum\n", optimal, cases,
               sum / cases, worst);
    CHECK(optimal >= cases * 9 / 10);
    CHECK(sum / cases <= 1.01);
    CHECK(worst <= 1.35);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* Random storages at random places are refused exactly where two of them are alive together and overlap. */
TEST(verified_places_against_all_pairs)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    uint64_t s = 7;
    int refused = 0, cases = 2000;
    ctx->options.verify = true;
    for (int c = 0; c < cases; c++) {
        tt__box box[12];
        int n = 2 + pick(&s, 11), length = 1 + pick(&s, 40);
        bool overlap = false;
        for (int k = 0; k < n; k++) {
            int first = pick(&s, length), last = first + pick(&s, length - first);
            box[k] = box_of(first, last, (size_t)(1 + pick(&s, 3)) * 64, (size_t)pick(&s, 60) * 64);
            box[k].merged = k > 0 && pick(&s, 8) == 0 ? 0 : k;
            for (int j = 0; j < k; j++) {
                const tt__box *x = &box[k], *y = &box[j];
                bool together = x->first <= y->last && y->first <= x->last && x->merged == k &&
                                y->merged == j;
                overlap |= together && x->place < y->place + y->bytes && y->place < x->place + x->bytes;
            }
        }
        refused += overlap;
        CHECK(tt__verify_places(t, box, n, TT__DEVICE, 64 * 64) == (overlap ? TT_ERR_INTERNAL : TT_OK));
    }
    CHECK(refused > cases / 4 && refused < cases * 3 / 4);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

TEST(placement_of_merged_and_empty)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt__box box[4];
    size_t height, bound;
    int at;
    CHECK(tt__place(ctx, box, 0, 0, TT__DEVICE, &height, &bound, &at) == TT_OK && height == 0 && bound == 0);
    box[0] = box_of(0, 5, 128, 7); /* lives on as box 1, which lives on as box 2 */
    box[1] = box_of(2, 4, 128, 7);
    box[2] = box_of(4, 5, 128, 7);
    box[3] = box_of(1, 3, 64, 7);
    for (int k = 0; k < 4; k++) box[k].merged = k;
    box[1].merged = 0;
    box[2].merged = 1;
    CHECK(tt__place(ctx, box, 4, 6, TT__DEVICE, &height, &bound, &at) == TT_OK && height == 192 &&
          bound == 192 && at == 1);
    CHECK(box[1].place == box[0].place && box[2].place == box[0].place && box[3].place % 64 == 0);
    TEST_CLOSE(ctx, &a);
}

/* ---------------------------------------------------------------------------- plans of real architectures */

typedef struct shape {
    const char *name;
    int layers, width, heads, mlp, seqs, length, classes;
    bool pre_norm;
} shape;

static tt_param *layer_param(tt_context *ctx, int layer, const char *what, int64_t rows, int64_t cols)
{
    char name[128];
    snprintf(name, sizeof name, "layer.%d.%s", layer, what);
    return cols ? matrix(ctx, name, rows, cols) : vector(ctx, name, rows, TT_INIT_ZEROS);
}

static tt_value encoder_norm(tt_tape *t, int layer, const char *what, tt_value x, int64_t d)
{
    char name[96];
    snprintf(name, sizeof name, "%s.weight", what);
    tt_param *w = layer_param(t->ctx, layer, name, d, 0);
    snprintf(name, sizeof name, "%s.bias", what);
    return tt_layernorm(t, x, w, layer_param(t->ctx, layer, name, d, 0), 1e-6f);
}

static tt_value encoder_linear(tt_tape *t, int layer, const char *what, tt_value x, int64_t out)
{
    char name[96];
    snprintf(name, sizeof name, "%s.weight", what);
    tt_param *w = layer_param(t->ctx, layer, name, out, t->values[x.id].shape.cols);
    snprintf(name, sizeof name, "%s.bias", what);
    return tt_linear(t, x, w, layer_param(t->ctx, layer, name, out, 0));
}

/* Post-norm with token embeddings (DistilBERT) or pre-norm with patches (ViT). */
static tt_value encoder(tt_tape *t, const shape *e, tt_value *logits)
{
    int64_t rows = tt_axis(t, "tokens", (int64_t)e->seqs * e->length), seqs = tt_axis(t, "seqs", e->seqs),
            d = e->width;
    tt_value starts = tt_seq_start(t, "seq_start", seqs), x;
    tt_value positions = tt_embedding(t, tt_input(t, "positions", TT_I32, rows, 1),
                                      matrix(t->ctx, "positions", e->length, d));
    if (e->pre_norm) x = encoder_linear(t, -1, "patches", tt_input(t, "pixels", TT_F32, rows, 768), d);
    else x = tt_embedding(t, tt_input(t, "ids", TT_I32, rows, 1), matrix(t->ctx, "words", 30522, d));
    x = tt_add(t, x, positions);
    if (!e->pre_norm) x = encoder_norm(t, -1, "norm", x, d);
    x = tt_dropout(t, x, 0.1f);
    for (int k = 0; k < e->layers; k++) {
        tt_attention_options o = tt_attention_options_default(e->heads);
        if (!e->pre_norm) o.dropout = 0.1f;
        tt_value h = e->pre_norm ? encoder_norm(t, k, "norm1", x, d) : x;
        h = tt_attention(t, encoder_linear(t, k, "q", h, d), encoder_linear(t, k, "k", h, d),
                         encoder_linear(t, k, "v", h, d), starts, &o);
        x = tt_add(t, encoder_linear(t, k, "out", h, d), x);
        if (!e->pre_norm) x = encoder_norm(t, k, "norm1", x, d);
        h = e->pre_norm ? encoder_norm(t, k, "norm2", x, d) : x;
        h = encoder_linear(t, k, "down", tt_gelu(t, encoder_linear(t, k, "up", h, e->mlp)), d);
        x = tt_add(t, tt_dropout(t, h, 0.1f), x);
        if (!e->pre_norm) x = encoder_norm(t, k, "norm2", x, d);
    }
    if (e->pre_norm) x = encoder_norm(t, -1, "norm", x, d);
    x = tt_gather_rows(t, x, tt_input(t, "first", TT_I32, seqs, 1));
    *logits = encoder_linear(t, -1, "classifier", x, e->classes);
    return tt_cross_entropy(t, *logits, tt_input(t, "labels", TT_I32, seqs, 1), NULL);
}

/* What is f32 of all rows in 16-bit precisions, but for statistics: `sums` values of the residual stream (two
   a layer but for the last, of which only [CLS] is computed, and three at its beginning) and their
   gradients. */
static void check_f32_values(const tt_program *p, int64_t rows, int sums)
{
    const tt_tape *t = p->built.t;
    int found = 0, stray = 0;
    if (p->settings.precision.kind == TT__32_TRUE) return;
    tt__index(p->built.t);
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__value *x = &t->values[v];
        if (x->storage != TT__TRANSIENT || x->base != v || x->shape.rows != rows ||
            x->shape.dtype != TT_F32 || x->pinned_f32 || tt__producer(t, v) < 0)
            continue;
        const tt__instr *i = &t->code[tt__producer(t, v)];
        bool gradient = i->backward && !i->again;
        if (i->again) continue;
        if (!gradient) found++;
        bool of_sum = false;
        for (int32_t k = 1; k < t->n_values && gradient; k++)
            of_sum |= t->values[k].grad == v && t->values[k].residual;
        stray += gradient ? !of_sum : !x->residual;
    }
    CHECK(stray == 0);
    CHECK(found == sums);
}

TEST(plans_of_real_architectures)
{
    static const shape shapes[] = {{"DistilBERT-base, 12 x 512 tokens", 6, 768, 12, 3072, 12, 512, 2, false},
                                   {"ViT-L/16, 64 x 197 tokens", 24, 1024, 16, 4096, 64, 197, 1000, true},
                                   {"ViT-S/16, 3 x 197 tokens", 12, 384, 6, 1536, 3, 197, 10, true}};
    char what[256];
    for (int m = 0; m < TEST_COUNT(shapes); m++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_value logits, loss = encoder(t, &shapes[m], &logits);
        /* Train in all precisions, with accumulation, evaluation of the loss and of the logits alone. */
        enum { KINDS_OF_PROGRAMS = PRECISIONS + 6 };
        size_t trained[PRECISIONS] = {0};
        for (int k = 0; k < 2 * KINDS_OF_PROGRAMS; k++) {
            int kind = k % KINDS_OF_PROGRAMS;
            tt_compile_options c = options_of(&precisions[kind % PRECISIONS]);
            bool logits_only = kind == KINDS_OF_PROGRAMS - 1;
            c.device = k < KINDS_OF_PROGRAMS ? "cpu" : "cuda";
            c.train = kind <= PRECISIONS;
            c.accumulate = kind == PRECISIONS;
            tt_program *p = tt_compile(t, logits_only ? logits : loss, &c);
            REQUIRE(p != NULL);
            tt_plan plan = tt_program_plan(p);
            double ratio = (double)(plan.bytes - plan.persistent_bytes) /
                           (double)(plan.lower_bound_bytes - plan.persistent_bytes);
            snprintf(what, sizeof what, "%s, %s, %s, %s: transient %.1f MB is %.4f of its bound",
                     shapes[m].name, c.device, c.precision,
                     c.accumulate ? "accumulate"
                     : c.train ? "train"
                     : logits_only ? "logits"
                     : "eval",
                     (double)(plan.bytes - plan.persistent_bytes) / 1e6, ratio);
            if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("  %s (%d instructions)\n", what, plan.instructions);
            test__check(ratio >= 1 && ratio <= 1.02, __FILE__, __LINE__, what);
            CHECK(tt_allocated_bytes(ctx) < ((size_t)8 << 20)); /* nothing of the plan is allocated */
            size_t live = 0, params = 0;
            for (int c2 = 0; c2 < TT_MEM_CATEGORIES; c2++) live += plan.at_peak[c2];
            CHECK(live == plan.lower_bound_bytes);
            for (int i = 0; i < ctx->n_params; i++)
                params += tt__align_to((size_t)ctx->params[i]->size *
                                           (strstr(c.precision, "16-true") ? 2 : 4),
                                       p->settings.kind->alignment);
            CHECK(plan.at_peak[TT_MEM_PARAMETERS] <= params && plan.at_peak[TT_MEM_PARAMETERS] > params / 2);
            CHECK(plan.at_peak[TT_MEM_OPTIMIZER] == (c.train ? 2 * plan.at_peak[TT_MEM_PARAMETERS] : 0));
            CHECK(plan.peak_instruction >= 0 && plan.peak_instruction < plan.instructions &&
                  plan.peak_name[0]);
            if (k < PRECISIONS) trained[k] = plan.bytes - plan.persistent_bytes;
            if (logits_only) CHECK(plan.bytes - plan.persistent_bytes < trained[1] / 2);
            if (c.train)
                check_f32_values(p, (int64_t)shapes[m].seqs * shapes[m].length,
                                 kind % PRECISIONS == 3 || kind % PRECISIONS == 5 ? 2 * shapes[m].layers + 1
                                                                                  : 0);
            tt_program_free(p);
        }
        /* bf16 halves activations, bf16-true gradients as well */
        CHECK(trained[1] < trained[0] && trained[2] < trained[1]);
        /* f16 takes what bf16 takes */
        CHECK(trained[6] == trained[1] && trained[4] == trained[2] && trained[5] == trained[3]);
        /* the sums of two additions a layer are kept for the norms, but for the last layer, and gradients of
           one or two of them at a time */
        size_t sum = (size_t)shapes[m].seqs * (size_t)shapes[m].length * (size_t)shapes[m].width * 2;
        /* The peak of the smallest is in the update. */
        CHECK(m == 2 || trained[3] >= trained[1] + (size_t)(2 * shapes[m].layers - 2) * sum);
        CHECK(trained[3] <= trained[1] + (size_t)(2 * shapes[m].layers) * sum);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Products whose operands' or results' dtypes cuBLASLt does not take together: of 16-bit values it wants both
   operands of one dtype, and a result of that or f32 (documentation of cublasLtMatmul). */
static int products_for_the_fallback(const tt_tape *t, int *products)
{
    int found = 0;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const bool head = i->op == TT__OP_LINEAR_CROSS_ENTROPY;
        if ((!tt__is(i, TT__PRODUCT) || !i->out[0]) && !head) continue;
        const tt_dtype a = t->values[i->in[0]].shape.dtype, b = t->values[i->in[head ? 3 : 1]].shape.dtype;
        const tt_dtype y = t->values[i->out[0]].shape.dtype;
        const bool fits = a == b && (y == TT_F32 || y == a);
        if (!fits)
            printf("  %s of %s, %s and %s: %s\n", tt__instr_name(i), tt_dtype_name(a), tt_dtype_name(b),
                   t->values[i->in[0]].name, t->values[i->out[0]].name);
        found += !fits;
        ++*products;
    }
    return found;
}

/* On CUDA no product of a model goes to the kernel for those that cuBLASLt does not take, some fifty times
   slower on an H200, whatever the precision; a language model's loss is computed in chunks in each. Of each
   of two layers the gradients of three biases, of projection and feed-forward, are sums that the kernels
   before the products leave, of 16-bit numbers those of q, k and v too, and of BERTs' head that of one. */
TEST(products_of_models_suit_cublaslt)
{
    static const char *const kinds[] = {"vit", "bert", "distilbert", "gpt2", "llama"};
    static const int column_sums[] = {6, 7, 7, 6, 0};
    for (int m = 0; m < TEST_COUNT(kinds); m++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_vit v;
        tt_bert b;
        tt_lm l;
        tt_model model;
        tt_vit_config of_vit = tt_vit_config_default("L/16");
        tt_bert_config of_bert = tt_bert_config_default(m == 2 ? TT_DISTILBERT : TT_BERT);
        tt_lm_config of_lm = tt_lm_config_default(m == 3 ? "gpt2" : "llama");
        of_vit.layers = of_bert.layers = of_lm.layers = 2;
        if (m == 0) {
            REQUIRE(tt_vit_new(ctx, &v, &of_vit) == TT_OK);
            model = tt_vit_classifier(&v);
        } else if (m < 3) {
            REQUIRE(tt_bert_new(ctx, &b, &of_bert) == TT_OK);
            model = tt_bert_classifier(&b);
        } else {
            CHECK(m != 3 || of_lm.vocab_size == 50257); /* an odd number */
            REQUIRE(tt_lm_new(ctx, &l, &of_lm) == TT_OK);
            model = tt_lm_model(&l);
        }
        for (int k = 0; k < 2 * PRECISIONS; k++) {
            const tt_compile_options c = options_of(&precisions[k % PRECISIONS]);
            tt_train_options o = tt_train_options_default();
            int products = 0, heads = 0, zeros = 0, sums = 0;
            o.schedule.kind = TT_CONSTANT;
            o.compile.device = "cuda";
            o.compile.precision = c.precision;
            o.compile.residual = c.residual;
            o.compile.accumulate = k >= PRECISIONS;
            o.max_seqs = 8;
            o.max_tokens = m ? 8 * 512 : 0;
            tt_trainer *r = tt_trainer_new(ctx, &model, &o);
            REQUIRE(r != NULL);
            const tt_tape *t = tt_trainer_program(r)->built.t;
            CHECK(products_for_the_fallback(t, &products) == 0);
            for (int j = 0; j < t->n_code; j++) {
                heads += t->code[j].op == TT__OP_LINEAR_CROSS_ENTROPY;
                for (int o = 0; o < tt__summed(&t->code[j]); o++)
                    sums += tt__column_sums(&t->code[j], o) != 0;
                zeros += t->code[j].op == TT__OP_FILL && t->values[t->code[j].out[0]].shape.rows > 1;
            }
            CHECK(m != 3 || zeros == 0); /* attention's backward writes all of d(qkv) */
            const bool half = strcmp(c.precision, "32-true") != 0;
            CHECK(sums == column_sums[m] + (half && m < 4 ? 2 * 3 : 0));
            if (!CHECK(products >= 2 * 3 * 4 && heads == (m > 2)))
                printf("  %s, %s: %d products, %d heads\n", kinds[m], c.precision, products, heads);
            tt_trainer_free(r);
        }
        if (m == 0) tt_vit_free(&v);
        else if (m < 3) tt_bert_free(&b);
        else tt_lm_free(&l);
        TEST_CLOSE(ctx, &a);
    }
}

/* Do the parts of a role of products first..last lie one behind the other? */
static bool parts_are_behind(const tt_program *p, int first, int last, int role)
{
    const tt_tape *t = p->built.t;
    const bool below = tt__lies_below(&t->code[first], role);
    for (int k = first; k < last; k++) {
        const int32_t ids[2] = {tt__in_role(&t->code[k], role), tt__in_role(&t->code[k + 1], role)};
        tt__mat m[2];
        for (int e = 0; e < 2 && ids[0]; e++) {
            const tt__value *v = &t->values[ids[e]], *base = &t->values[v->base];
            const size_t bytes = tt_dtype_bytes(v->shape.dtype), offset = (size_t)v->offset * bytes;
            const tt__home *home = v->storage == TT__PARAMETER ? tt__home_in(p->arena, v->param) : NULL;
            m[e] = tt__at_capacity(t, ids[e]);
            m[e].data = (char *)(uintptr_t)(4096 + (home ? home->offset : base->place + offset));
        }
        if (ids[0] && !tt__lies_behind(&m[0], &m[1], below)) return false;
    }
    return true;
}

/* How many groups of `size` products of an op run together; -1: there is one whose parts do not lie side by
   side. */
static int joined_products(const tt_program *p, int op, int size)
{
    const tt_tape *t = p->built.t;
    int groups = 0;
    for (int k = 0, end; k < t->n_code; k = end + 1) {
        for (end = k; t->code[end].with_next; end++) {}
        if (t->code[k].op != op || end == k) continue;
        groups += end - k + 1 == size;
        for (int role = 0; role < TT__ROLES; role++) {
            if (role == tt__shared_role(&t->code[k])) {
                for (int m = k; m <= end; m++)
                    if (tt__in_role(&t->code[m], role) != tt__in_role(&t->code[k], role)) return -1;
            } else if (!parts_are_behind(p, k, end, role)) {
                return -1;
            }
        }
    }
    return groups;
}

/* Do the persistent storages on the device lie apart? alone: and take all that the arena has for them. */
static bool persistent_lie_apart(const tt_program *p, bool alone)
{
    const tt_tape *t = p->built.t;
    size_t first[2], bytes[2], all = p->settings.kind->resident;
    for (int32_t v = 1; v < t->n_values; v++) {
        if (!t->values[v].persistent || t->values[v].base != v || t->values[v].space != TT__DEVICE) continue;
        all += tt__arena_bytes(t, &t->values[v]);
        for (int32_t w = 1; w <= v; w++) {
            const tt__value *of[2] = {&t->values[v], &t->values[w]};
            if (!of[1]->persistent || of[1]->base != w || of[1]->space != TT__DEVICE) continue;
            for (int e = 0; e < 2; e++) {
                const bool parameter = of[e]->storage == TT__PARAMETER;
                first[e] = parameter ? p->arena->home[of[e]->param].offset : of[e]->place;
                bytes[e] = tt__storage_bytes(of[e]);
            }
            if (first[0] < p->settings.kind->resident) return false;
            if (first[0] + bytes[0] > p->arena->persistent) return false;
            if (v != w && first[0] < first[1] + bytes[1] && first[1] < first[0] + bytes[0]) return false;
        }
    }
    return !alone || all == p->arena->persistent;
}

/* On a GPU the products that make q, k and v are one, and so are those of their weights' gradients, at no
   memory: each part lies right behind another. Of the last layer, in which one row a sequence asks, k and v.
   Those of blocks that are computed again are, too. Not on a CPU, nor over ranks or with groups as of ranks,
   nor with a budget or offload, nor with biases that end within the 64 bytes that storages are made of. */
TEST(products_of_one_x)
{
    static const shape whole = {"BERT", 3, 192, 3, 256, 3, 50, 2, false},
                       odd = {"BERT", 3, 216, 3, 256, 3, 50, 2, false};
    static const struct {
        const char *device, *precision, *update, *recompute;
        bool accumulate;
        int forward, weights; /* groups of three */
    } c[] = {{"cuda", "bf16-true", "end", "cheap", false, 2, 2},
             {"cuda", "bf16-mixed", "end", "none", false, 2, 2},
             {"cuda", "32-true", "end", "cheap", false, 2, 2},
             {"cuda", "16-true", "end", "attention", false, 2, 2},
             {"cuda", "bf16-true", "backward", "cheap", false, 2, 2},
             {"cuda", "bf16-mixed", "end", "cheap", true, 2, 2},
             {"cuda", "bf16-true", "end", "none", true, 2, 2},
             {"cuda", "bf16-true", "end", "blocks", false, 3, 2},
             {"cuda*2", "bf16-true", "end", "cheap", false, 0, 0},
             {"cpu", "bf16-true", "end", "cheap", false, 0, 0},
             {"cuda", "bf16-true", "end", "cheap", true, 0, 2}}; /* the last is odd */
    for (int k = 0; k < TEST_COUNT(c); k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_value logits, loss;
        tt_compile_options o = tt_compile_options_default();
        ctx->options.verify = true;
        loss = encoder(t, k == TEST_COUNT(c) - 1 ? &odd : &whole, &logits);
        o.device = c[k].device;
        o.precision = c[k].precision;
        o.update = c[k].update;
        o.recompute = c[k].recompute;
        o.accumulate = c[k].accumulate;
        for (int i = 0; i < t->n_code && !strcmp(o.recompute, "blocks"); i++) {
            const char *name = t->code[i].op == TT__OP_LAYERNORM ? t->values[t->code[i].in[1]].name : "";
            if (strstr(name, "norm2")) tt_block_end(t, tt__handle(t, t->code[i].out[0]));
        }
        tt_program *p = tt_compile(t, loss, &o);
        if (!CHECK(p != NULL)) printf("%s\n", tt_error(ctx));
        REQUIRE(p != NULL);
        CHECK(persistent_lie_apart(p, true));
        const int forward = joined_products(p, TT__OP_LINEAR, 3);
        const int weights = joined_products(p, TT__OP_LINEAR_DW, 3);
        const int pairs = joined_products(p, TT__OP_LINEAR, 2) + joined_products(p, TT__OP_LINEAR_DW, 2);
        const bool right = forward == c[k].forward && weights == c[k].weights;
        if (!CHECK(right && pairs == (forward > 0) + (weights > 0)))
            printf("case %d: %d and %d groups, %d of two\n", k, forward, weights, pairs);
        tt_program_free(p);
        o.accumulate = true;
        for (int way = 0; k == 0 && way < 3; way++) { /* groups, and where memory is what counts */
            o.parallel.groups = way == 0 ? 2 : 0;
            o.offload = way == 1 ? "optimizer" : NULL;
            o.memory_budget = way == 2 ? (size_t)1 << 40 : 0;
            if (!CHECK((p = tt_compile(t, loss, &o)) != NULL)) continue;
            CHECK(joined_products(p, TT__OP_LINEAR, 3) == 0 && joined_products(p, TT__OP_LINEAR_DW, 3) == 0);
            tt_program_free(p);
        }
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* A program whose q has a place already, from a program before, puts k and v elsewhere. */
TEST(products_of_programs_that_share)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_program *p[2] = {NULL, NULL};
    tt_tape *t[2];
    tt_compile_options o = tt_compile_options_default();
    o.device = "cuda";
    ctx->options.verify = true;
    for (int k = 0; k < 2; k++) {
        t[k] = tt_tape_new(ctx);
        const tt_value x = tt_input(t[k], "x", TT_F32, 32, 64), none = {0};
        const tt_attention_options heads = tt_attention_options_default(2);
        const tt_value q = tt_linear(t[k], x, matrix(ctx, "q", 64, 64), NULL);
        tt_value y = q;
        if (k) {
            const tt_value keys = tt_linear(t[k], x, matrix(ctx, "k", 64, 64), NULL);
            const tt_value values = tt_linear(t[k], x, matrix(ctx, "v", 64, 64), NULL);
            y = tt_attention(t[k], q, keys, values, tt_seq_start(t[k], "starts", 1), &heads);
        }
        o.accumulate = true;
        p[k] = tt_compile(t[k], tt_mean_squared_error(t[k], y, x, none), &o);
        REQUIRE(p[k] != NULL);
        o.share = p[0];
        CHECK(persistent_lie_apart(p[k], k == 0));
    }
    CHECK(joined_products(p[1], TT__OP_LINEAR, 3) == -1 && joined_products(p[1], TT__OP_LINEAR_DW, 3) == 1);
    for (int k = 0; k < 2; k++) tt_program_free(p[k]);
    for (int k = 0; k < 2; k++) tt_tape_free(t[k]);
    TEST_CLOSE(ctx, &a);
}

/* Products a = x w1 and b = x w2, with something in between that reads a (1), makes w2 (2) or both (3): b
   rises to a, a sinks to b, or they stay where they are. A result that an op may replace (4), or that is an
   output (5), keeps its place. */
TEST(products_that_meet)
{
    for (int between = 0; between < 6; between++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        const tt__shape square = {TT_F32, 16, 16, 0, 0};
        ctx->options.verify = true;
        t->alignment = 256;
        const int32_t x = tt_input(t, "x", TT_F32, 16, 16).id;
        const int32_t source = tt_input(t, "source", TT_F32, 16, 16).id;
        const int32_t w1 = tt__new_value(t, &square, TT__TRANSIENT, "w1");
        const int32_t w2 = tt__new_value(t, &square, TT__TRANSIENT, "w2");
        const int32_t y1 = tt__new_value(t, &square, TT__TRANSIENT, "a");
        const int32_t y2 = tt__new_value(t, &square, TT__TRANSIENT, "b");
        const int32_t apart = tt__new_value(t, &square, TT__TRANSIENT, "apart");
        const bool makes = between == 2 || between == 3;
        by_hand(t, TT__OP_ADD_ROW, 0, source, tt_input(t, "row", TT_F32, 1, 16).id, w1);
        if (!makes) by_hand(t, TT__OP_MUL, 0, source, source, w2);
        by_hand(t, TT__OP_LINEAR, 0, x, w1, y1);
        if (between == 1) by_hand(t, TT__OP_MUL, 0, y1, source, apart);
        if (makes) by_hand(t, TT__OP_MUL, 0, between == 3 ? y1 : source, source, w2);
        by_hand(t, TT__OP_LINEAR, 0, x, w2, y2);
        /* The last reader of both results does not replace them, unless it is a sum. */
        if (between == 4) by_hand(t, TT__OP_ADD, 0, y1, y2, apart);
        const int32_t sum = tt__new_value(t, &square, TT__TRANSIENT, "sum");
        if (between != 4) by_hand(t, TT__OP_LINEAR, 0, y1, y2, sum);
        if (between == 5) tt_output(t, tt__handle(t, y1));
        by_hand(t, TT__OP_MUL, 0, source, source, tt__new_value(t, &square, TT__TRANSIENT, "last"));
        const int32_t root = between == 4 ? apart : sum;
        REQUIRE(tt__verify(t, "test") == TT_OK);
        const int n = t->n_code;
        CHECK(tt__pass_join(t, root) == TT_OK && tt__verify(t, "join") == TT_OK && t->n_code == n);
        int pairs = 0;
        for (int k = 0; k < n; k++) {
            if (!t->code[k].with_next) continue;
            const tt__value *first = &t->values[t->code[k].out[0]];
            const tt__value *second = &t->values[t->code[k + 1].out[0]];
            const tt__value *above = &t->values[w1], *below = &t->values[w2];
            pairs++;
            CHECK(t->code[k].out[0] == y1 && t->code[k + 1].out[0] == y2);
            CHECK(first->base == second->base && first->base != y1 && first->offset == 0);
            CHECK(first->ld == 32 && second->ld == 32 && second->offset == 16);
            CHECK(above->base == below->base && above->ld == 16 && below->offset == 16 * 16);
            CHECK(t->values[first->base].shape.cols == 32 && t->values[above->base].shape.rows == 32);
        }
        if (!CHECK(pairs == (between < 3))) printf("case %d: %d pairs\n", between, pairs);
        if (pairs) CHECK(t->code[between == 2 ? 2 : 3].out[0] == (between == 2 ? y1 : y2));
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

enum { SAME_X = 36 }; /* ways in which two products of one x do not join */

/* Two products of one x that would join, and what keeps them from it. */
static bool may_not_join(tt_context *ctx, int way, int *pairs)
{
    tt_tape *t = tt_tape_new(ctx);
    const tt__shape square = {TT_F32, 16, 16, 0, 0}, half = {TT_BF16, 16, 16, 0, 0};
    const tt__shape narrow = {TT_F32, 16, 2, 0, 0}, of_narrow = {TT_F32, 2, 16, 0, 0};
    t->alignment = 256;
    const int32_t x = tt_input(t, "x", TT_F32, 16, 16).id, other = tt_input(t, "other", TT_F32, 16, 16).id;
    int32_t w[2], y[2], u;
    for (int k = 0; k < 2; k++) {
        const bool thin = way == 1 + k; /* either */
        w[k] = tt__new_value(t, thin ? &of_narrow : &square, TT__TRANSIENT, "w%d", k);
        y[k] = tt__new_value(t, thin ? &narrow : k && way == 3 ? &half : &square, TT__TRANSIENT, "y%d", k);
        if (way == 4 && k) t->values[w[k]].storage = TT__GRADIENT;
        if (way == (k ? 5 : 34)) t->values[w[k]].persistent = true;
        by_hand(t, TT__OP_MUL, 0, other, other, w[k]);
    }
    if (way == 6) { /* a weight that could take the place of what it is made of */
        u = tt__new_value(t, &square, TT__TRANSIENT, "u");
        t->code[t->n_code - 1].out[0] = u;
        by_hand(t, TT__OP_ACTIVATION, 0, u, 0, w[1]);
        t->code[t->n_code - 1].attr.act = TT__ACT_GELU;
    }
    by_hand(t, TT__OP_LINEAR, 0, x, w[0], y[0]);
    by_hand(t, TT__OP_LINEAR, 0, way == 7 ? other : x, way == 8 ? w[0] : w[1], y[1]);
    tt__instr *a = &t->code[t->n_code - 2], *b = &t->code[t->n_code - 1];
    if (way == 35) b->in[1] = y[0];
    if (way == 9) b->in[3] = other;
    if (way == 10) b->in[2] = tt_input(t, "bias", TT_F32, 1, 16).id;
    if (way == 11) t->values[x].shape.dtype = TT__E4M3;
    if (way == 12) t->values[w[1]].shape.dtype = TT__E4M3;
    if (way == 13) b->attr.act = TT__ACT_GELU;
    if (way == 14) a->attr.act = TT__ACT_GELU;
    if (way == 15) b->attr.narrow = TT_BF16;
    if (way == 16) b->add = 1;
    if (way == 17) b->add_later = 1;
    if (way == 18) b->segment = TT__EACH_LAP;
    if (way == 19) b->stage = 1;
    if (way == 20) b->again = true;
    if (way == 21) b->always = true;
    if (way == 22) b->later = true;
    if (way == 23) b->slot = 1;
    if (way == 24) b->once = 1;
    for (int k = 0; way == 25 && k < 40; k++) /* one result lives long */
        by_hand(t, TT__OP_MUL, 0, other, other, tt__new_value(t, &square, TT__TRANSIENT, "meanwhile"));
    u = tt__new_value(t, &square, TT__TRANSIENT, "last");
    if (way == 26) by_hand(t, TT__OP_MUL, 0, other, y[1], u); /* which may take the place of y1 */
    if (way == 27) { /* a copy by another stream */
        t->values[u].space = TT__HOST;
        by_hand(t, TT__OP_COPY, 0, y[1], 0, u);
    }
    if (way == 28) tt_output(t, tt__handle(t, y[1]));
    if (way == 29) tt_block_end(t, tt__handle(t, y[1]));
    if (way == 30) tt_slice(t, tt__handle(t, y[1]), 0, 8);
    if (way == 31) t->values[y[1]].slots = 2;
    if (way == 32) t->values[y[1]].stays = true;
    if (way == 33) t->values[y[1]].space = TT__HOST;
    if (way != 26 && way != 27) by_hand(t, TT__OP_LINEAR, 0, other, y[1], u);
    by_hand(t, TT__OP_MUL, 0, other, other, tt__new_value(t, &square, TT__TRANSIENT, "end"));
    if (way == 25) { /* y0 is read right behind both, y1 at the end */
        tt__instr reads = tt__new_instr(TT__OP_LINEAR);
        reads.in[0] = other;
        reads.in[1] = y[0];
        reads.out[0] = tt__new_value(t, &square, TT__TRANSIENT, "soon");
        for (int k = 0; k < t->n_code; k++) {
            if (t->code[k].out[0] != y[1]) continue;
            by_hand(t, TT__OP_LINEAR, 0, 0, 0, 0);
            tt__move_instr(t, t->n_code - 1, k + 1);
            t->code[k + 1] = reads;
            break;
        }
    }
    const bool ok = tt__pass_join(t, u) == TT_OK;
    *pairs = 0;
    for (int k = 0; k < t->n_code; k++) *pairs += t->code[k].with_next;
    tt_tape_free(t);
    return ok;
}

TEST(products_that_do_not_join)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int pairs;
    for (int way = 0; way < SAME_X; way++)
        if (!CHECK(may_not_join(ctx, way, &pairs) && pairs == (way == 0)))
            printf("way %d: %d pairs\n", way, pairs);
    TEST_CLOSE(ctx, &a);
}

/* Three products of one x, of which the third cannot come to the first two (0); a pair within another that
   sinks (1); and one whose weights were made in the other order (2). */
TEST(products_among_others)
{
    for (int c = 0; c < 3; c++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        const tt__shape square = {TT_F32, 16, 16, 0, 0};
        int32_t v[13];
        t->alignment = 256;
        for (int k = 0; k < 2; k++) v[k] = tt_input(t, k ? "x2" : "x", TT_F32, 16, 16).id;
        for (int k = 2; k < 13; k++) v[k] = tt__new_value(t, &square, TT__TRANSIENT, "v%d", k);
        const int32_t x = v[0], x2 = v[1], *w = v + 2, *y = v + 6; /* and v[10]... */
        const int32_t x3 = tt_input(t, "x3", TT_F32, 16, 16).id;
        for (int k = 0; k < 4; k++)
            if (c < 2 ? k != 2 : k < 2) by_hand(t, TT__OP_MUL, 0, x, x2, w[c == 2 ? 1 - k : k]);
        by_hand(t, TT__OP_LINEAR, 0, x, w[c == 2], y[0]);
        if (c == 0) {
            by_hand(t, TT__OP_LINEAR, 0, x, w[1], y[1]);
            by_hand(t, TT__OP_MUL, 0, y[1], x2, v[10]);
            by_hand(t, TT__OP_MUL, 0, x, x2, w[2]);
            by_hand(t, TT__OP_LINEAR, 0, x, w[2], y[2]);
            by_hand(t, TT__OP_MUL, 0, y[0], x2, v[11]);
        } else if (c == 1) {
            by_hand(t, TT__OP_LINEAR, 0, x2, w[1], y[1]);
            by_hand(t, TT__OP_MUL, 0, x, x2, w[2]);
            by_hand(t, TT__OP_LINEAR, 0, x, w[2], y[2]);
            by_hand(t, TT__OP_LINEAR, 0, x2, w[3], y[3]);
        } else {
            by_hand(t, TT__OP_LINEAR, 0, x, w[0], y[1]);
        }
        for (int k = 0; k < 4; k++) /* all are read at the end, where nothing takes their place */
            if (c == 1 || k < 3 - (c == 2))
                by_hand(t, TT__OP_LINEAR, 0, x3, y[k], tt__new_value(t, &square, TT__TRANSIENT, "end"));
        for (int k = 0; k < 4; k++)
            by_hand(t, TT__OP_MUL, 0, x, x2, tt__new_value(t, &square, TT__TRANSIENT, "last"));
        ctx->options.verify = true;
        REQUIRE(tt__verify(t, "test") == TT_OK);
        CHECK(tt__pass_join(t, v[12]) == TT_OK && tt__verify(t, "join") == TT_OK);
        int32_t of[8][2];
        int pairs = 0;
        for (int k = 0; k < t->n_code; k++) {
            if (!t->code[k].with_next || pairs == 8) continue;
            for (int e = 0; e < 2; e++) of[pairs][e] = t->code[k + e].out[0];
            pairs++;
        }
        if (c == 0) CHECK(pairs >= 1 && of[0][0] == y[0] && of[0][1] == y[1]);
        if (c == 1) CHECK(pairs >= 2 && of[0][0] == y[1] && of[0][1] == y[3] && of[1][0] == y[0]);
        if (c == 2) CHECK(pairs >= 1 && of[0][0] == y[1] && of[0][1] == y[0]);
        for (int k = 0; k < pairs && c == 0; k++) CHECK(of[k][0] != y[2] && of[k][1] != y[2]);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Launches that lie side by side become one; the others stay, in their order. */
TEST(launches_that_become_one)
{
    enum { ROWS = 3, D = 4, N = 5 };
    static float x[ROWS * D], w[N * D * D], b[N * D], y[ROWS * N * D], dw[N * D * D];
    for (int c = 0; c < 14; c++) {
        tt__launch l[N];
        tt__instr i = tt__new_instr(c % 2 ? TT__OP_LINEAR_DW : TT__OP_LINEAR);
        const bool sums = i.op == TT__OP_LINEAR_DW;
        /* Number 2 has another x (1), its weight elsewhere (2), no bias (3), fewer rows (4), another dtype
           (5), its rows further apart (6). */
        const int odd = c / 2;
        memset(l, 0, sizeof l);
        for (int k = 0; k < N; k++) {
            const tt__mat of_x = {k == 2 && odd == 1 ? x + D : x, TT_F32, ROWS, D, D};
            const tt__mat of_b = {b + k * D, TT_F32, 1, D, D};
            tt__mat of_y = {y + k * D, TT_F32, ROWS, D, N * D};
            tt__mat of_w = {(sums ? dw : w) + k * D * D, TT_F32, D, D, D};
            const bool without = k == 2 && odd == 3;
            if (k == 2 && odd == 2) of_w.data = x;
            if (k == 2 && odd == 4) of_y.rows--;
            if (k == 2 && odd == 5) of_y.dtype = TT_I32;
            if (k == 2 && odd == 6) of_y.ld++;
            l[k].instr = &i;
            l[k].in[0] = sums ? of_y : of_x;
            l[k].in[1] = sums ? of_x : of_w;
            l[k].out[0] = sums ? of_w : of_y;
            if (!without) *(sums ? &l[k].out[1] : &l[k].in[2]) = of_b;
        }
        const int left = tt__join_launches(l, N);
        CHECK(left == (odd ? 3 : 1));
        for (int k = 0; k < left; k++) {
            const int many = !odd ? N : k == 1 ? 1 : 2, at = odd && k ? k + 1 : 0; /* 0 and 1, 2, 3 and 4 */
            const tt__mat *of_y = sums ? &l[k].in[0] : &l[k].out[0];
            const tt__mat *of_w = sums ? &l[k].out[0] : &l[k].in[1];
            const tt__mat *of_b = sums ? &l[k].out[1] : &l[k].in[2];
            const tt__mat *of_x = sums ? &l[k].in[1] : &l[k].in[0];
            CHECK(of_y->data == y + at * D && of_y->cols == many * D);
            CHECK(of_y->rows == ROWS - (odd == 4 && k == 1));
            CHECK(of_w->rows == many * D && of_w->cols == D && of_x->rows == ROWS && of_x->cols == D);
            CHECK((odd == 3 && k == 1) || (of_b->data == b + at * D && of_b->cols == many * D));
        }
    }
}

/* An update in the backward frees a gradient's memory. Of a small batch nothing is left of the gradients at
   the peak but of some layers'; what is planned is what is allocated, and the norm is all that is left to the
   end of the step. */
TEST(gradients_updated_in_the_backward)
{
    /* Adam, SGD: GB at the end and in the backward that a ViT-L/16 of bf16 with 16 images may need */
    static const struct { tt_optimizer_kind kind; double least, most; } expected[] = {
        {TT_ADAM, 2.45, 2.13}, {TT_SGD, 1.25, 0.92}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_vit v;
    tt_vit_config vc = tt_vit_config_default("L/16");
    vc.classes = 10;
    REQUIRE(tt_vit_new(ctx, &v, &vc) == TT_OK);
    const tt_model model = tt_vit_classifier(&v);
    update_from = 65536;
    for (int k = 0; k < 2 * TEST_COUNT(expected); k++) {
        tt_train_options o = tt_train_options_default();
        o.schedule.kind = TT_CONSTANT;
        o.compile.optimizer.kind = expected[k / 2].kind;
        o.compile.optimizer.clip_norm = 0;
        o.compile.precision = "bf16-true";
        o.compile.recompute = "blocks";
        o.compile.device = "cuda";
        o.max_seqs = 16;
        o.compile.update = k % 2 ? "backward" : "end";
        tt_trainer *t = tt_trainer_new(ctx, &model, &o);
        REQUIRE(t != NULL);
        const double bytes = (double)tt_program_plan(tt_trainer_program(t)).bytes / 1e9;
        if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("  %s: %.3f GB\n", o.compile.update, bytes);
        CHECK(k % 2 ? bytes <= expected[k / 2].most : bytes >= expected[k / 2].least);
        const tt_tape *tape = tt_trainer_program(t)->built.t;
        CHECK(!(k % 2) || tape->n_code - tt__segment_first(tape, TT__EACH_STEP) == 1);
        tt_trainer_free(t);
    }
    tt_vit_free(&v);
    TEST_CLOSE(ctx, &a);
}

/* --------------------------------------------------------------------------------------- kinds of devices */

/* Bytes of copies of a product's x, w and y, of up to 2,048 rows, where a row of one is not a multiple of
   8. */
static size_t operand_copies(const tt_program *p, int32_t x, int32_t w, int32_t y, int32_t result)
{
    const int32_t of[3] = {x, w, y};
    size_t bytes = 0;
    bool even = result != 0;
    for (int k = 0; k < 3; k++) {
        const tt__value *v = &p->built.t->values[of[k]];
        const size_t cols = ((size_t)v->shape.cols + 7) / 8 * 8, rows = (size_t)v->shape.rows;
        const size_t item = of[k] == result ? 4 : tt_dtype_bytes(v->shape.dtype);
        bytes += ((k == 1 ? (rows + 7) / 8 * 8 : rows) * cols * item + 255) / 256 * 256;
        even = even && v->shape.cols % 8 == 0 && v->ld % 8 == 0;
    }
    return result == 0 || even ? 0 : bytes;
}

TEST(plans_for_another_device)
{
    static const shape vit = {"ViT", 2, 128, 4, 512, 3, 197, 10, true},
                       bert = {"DistilBERT", 2, 128, 4, 512, 3, 100, 2, false};
    for (int k = 0; k < 8; k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        const shape *e = k % 2 ? &vit : &bert;
        tt_tape *t = tt_tape_new(ctx);
        tt_value logits, loss = encoder(t, e, &logits);
        tt_compile_options c = tt_compile_options_default();
        size_t rows = (size_t)(e->seqs * e->length), resident = ((size_t)32 << 20) - 4096, attention = 0,
               embedding = 0, seen = 0, kept = 0;
        c.device = "cuda";
        c.precision = precisions[k % 3].name;
        c.accumulate = k >= 4;
        tt_program *p = tt_compile(t, loss, &c);
        REQUIRE(p != NULL);
        tt_plan plan = tt_program_plan(p);
        for (int i = 0; i < plan.instructions; i++) {
            const tt__instr *in = &p->built.t->code[i];
            /* The last attention has one query a sequence. */
            size_t q = in->op == TT__OP_ATTENTION_BACKWARD ? (size_t)p->built.t->values[in->in[1]].shape.rows
                                                           : 0;
            /* Which rows ask: their order takes starts and two numbers a row. */
            bool listed = q ? in->in[7] != 0 : in->op == TT__OP_ATTENTION && in->in[4];
            size_t wanted = q || listed ? (q * (size_t)e->heads * 4 + 255) / 256 * 256 +
                                              (listed ? ((size_t)(3 * e->seqs + 1) * 4 + 255) / 256 * 256 : 0)
                            : in->op == TT__OP_EMBEDDING_BACKWARD ? (rows * 4 + 255) / 256 * 256 * 4
                            : in->op == TT__OP_GATHER_ROWS_BACKWARD
                                ? ((size_t)e->seqs * 4 + 255) / 256 * 256 * 4
                                : 0;
            /* Bits of dropout, 512 bytes for 64 x 64, in 16 bits and where that is no more than q has. */
            const tt__shape *of_q = &p->built.t->values[in->in[1]].shape;
            const size_t bits = (rows / 64 + (size_t)e->seqs) * ((rows + 63) / 64) * (size_t)e->heads * 512;
            if (q == rows && of_q->dtype != TT_F32 && in->attr.dropout > 0 &&
                bits <= rows * (size_t)of_q->cols * 2) {
                wanted += bits;
                kept++;
            }
            /* Products with the heads' 10 or 2 classes: copies of both operands up to multiples of 8, and an
               f32 result. */
            const int32_t *in_of = in->in, y = in->out[0];
            if (in->op == TT__OP_LINEAR) wanted = operand_copies(p, in_of[0], in_of[1], y, y);
            if (in->op == TT__OP_LINEAR_DX) wanted = operand_copies(p, y, in_of[1], in_of[0], y);
            if (in->op == TT__OP_LINEAR_DW) wanted = operand_copies(p, in_of[1], y, in_of[0], y);
            CHECK(in->workspace == wanted && in->workspace_place % 256 == 0);
            CHECK(!q || q == rows || q == (size_t)e->seqs);
            attention += in->op == TT__OP_ATTENTION_BACKWARD && q == rows;
            embedding += in->op == TT__OP_EMBEDDING_BACKWARD;
        }
        /* The other attention is read in its first rows only. */
        CHECK(attention == 1 && embedding == (e->pre_norm ? 1 : 2));
        CHECK(kept == (size_t)(e == &bert && k % 3 != 0));
        for (int32_t v = 1; v < p->built.t->n_values; v++) {
            const tt__value *x = &p->built.t->values[v];
            if (x->base != v || x->place == TT__NO_PLACE) continue;
            CHECK(x->place % 256 == 0);
            if (!x->persistent) continue;
            CHECK(x->place >= resident && x->place + tt__storage_bytes(x) <= plan.persistent_bytes);
            seen += (tt__storage_bytes(x) + 255) / 256 * 256;
        }
        CHECK(strcmp(plan.device, "cuda") == 0 && plan.persistent_bytes == seen + resident);
        CHECK(plan.at_peak[TT_MEM_WORKSPACE] >= resident);
        CHECK(plan.init_bytes == plan.at_peak[TT_MEM_PARAMETERS] + resident + 65536);
        for (int i = 0; i < ctx->n_params; i++) CHECK(ctx->params[i]->holder == NULL);

        /* an evaluation in the same arena adds nothing; one alone has parameters and workspace of its own */
        c.train = false;
        c.share = p;
        tt_program *eval = tt_compile(t, loss, &c);
        REQUIRE(eval != NULL);
        CHECK(eval->arena == p->arena && tt_program_plan(p).bytes == plan.bytes &&
              tt_program_plan(eval).bytes == plan.bytes);
        c.share = eval; /* whose tape may be all that is left */
        tt_program_free(p);
        tt_program *again = tt_compile(t, loss, &c);
        CHECK(again && tt_program_plan(again).bytes == plan.bytes);
        c.share = NULL;
        tt_program *alone = tt_compile(t, loss, &c);
        REQUIRE(alone != NULL);
        plan = tt_program_plan(alone);
        CHECK(plan.persistent_bytes == resident + plan.at_peak[TT_MEM_PARAMETERS] &&
              plan.at_peak[TT_MEM_PARAMETERS] == tt_program_plan(eval).at_peak[TT_MEM_PARAMETERS]);

        /* none of them can run */
        int32_t labels[3] = {0, 0, 0};
        CHECK(tt_allocate(alone) == TT_ERR_UNSUPPORTED);
        CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "plans programs for device 'cuda' and cannot run them");
        CHECK(tt_set(eval, tt__handle(t, loss.id - 1), labels, 3) == TT_ERR_UNSUPPORTED &&
              tt_run(alone, NULL) == TT_ERR_UNSUPPORTED);

        /* nor with programs of another kind or precision */
        c.share = alone;
        c.precision = precisions[(k + 1) % 3].name;
        p = tt_compile(t, loss, &c);
        CHECK((p == NULL) == (k % 3 != 0)); /* 32-true and bf16-mixed hold parameters alike */
        tt_program_free(p);
        if (k % 3) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "but an earlier program holds it as");
        c.device = "cpu";
        CHECK(tt_compile(t, loss, &c) == NULL);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                    "`share` is a program for device 'cuda', and this one is for 'cpu'");
        c.device = "abacus";
        CHECK(tt_compile(t, loss, &c) == NULL);
        CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "device 'abacus' is unknown: use cpu or cuda");
        tt_program_free(alone);
        tt_program_free(again);
        tt_program_free(eval);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Device "cpu" computes in the host's memory: offload saves nothing there. What a budget counts is what the
   context's allocator gives, and neither advice nor a choice moves anything. */
TEST(budgets_on_the_hosts_device)
{
    static const char *const offloads[] = {NULL, "optimizer", "optimizer,gradients,parameters", "budget"};
    const int64_t up[2] = {1200, 300}, down[2] = {300, 1200};
    const tt_init normal = {TT_INIT_NORMAL, 0.02f};
    for (int k = 0; k < 2 * TEST_COUNT(offloads); k++) { /* each in fp32, and in bf16 as the error advises */
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_compile_options o = tt_compile_options_default();
        tt_tape *t = tt_tape_new(ctx);
        const bool half = k % 2, chosen = k / 2 == 0 || k / 2 == 3;
        const tt_value x = tt_input(t, "x", TT_F32, 700, 300), none = {0};
        tt_value h = tt_linear(t, x, tt_param_new(ctx, "up", 2, up, normal), NULL);
        h = tt_linear(t, tt_gelu(t, h), tt_param_new(ctx, "down", 2, down, normal), NULL);
        const tt_value loss = tt_mean_squared_error(t, h, x, none);
        o.optimizer.clip_norm = 1;
        o.memory_budget = 1 << 20;
        o.offload = offloads[k / 2];
        o.recompute = o.precision = NULL; /* the defaults */
        CHECK(!tt_compile(t, loss, &o));
        CHECK_ERROR(ctx, TT_ERR_BUDGET, "; precision \"bf16-true\" with recompute \"budget\" still needs ");
        o.precision = "32-true";
        o.recompute = "budget";
        CHECK(!tt_compile(t, loss, &o));
        CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs ");
        const char *least = strstr(tt_error(ctx), half ? "\"bf16-true\" still needs "
                                                       : "the smallest possible is ");
        REQUIRE(least != NULL);
        CHECK(!strstr(tt_error(ctx), "update \"host\"") && !strstr(tt_error(ctx), "offload \"act"));
        CHECK(!chosen || !strstr(tt_error(ctx), "offload \"o"));
        if (half) o.precision = "bf16-true";
        o.memory_budget = strtoull(least + (half ? 24 : 25), NULL, 10); /* the number behind these words */
        o.memory_budget--;
        CHECK(!tt_compile(t, loss, &o));
        o.memory_budget++;
        tt_program *p = tt_compile(t, loss, &o);
        test__check(p != NULL, __FILE__, __LINE__, tt_error(ctx));
        CHECK(p && strcmp(tt_program_plan(p).offload, chosen ? "none" : offloads[k / 2]) == 0);
        const size_t before = a.live_bytes;
        CHECK(p && tt_allocate(p) == TT_OK);
        CHECK(a.live_bytes - before <= o.memory_budget + 8192);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(a_plan_has_a_budget_too)
{
    test_allocator a;
    net n;
    static const net_options with_all = {true, true};
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    c.device = "cuda";
    REQUIRE(random_net(ctx, 0, with_all, &n));
    tt_program *p = tt_compile(n.t, n.loss, &c);
    REQUIRE(p != NULL);
    c.memory_budget = tt_program_plan(p).bytes;
    tt_program_free(p);
    p = tt_compile(n.t, n.loss, &c);
    CHECK(p != NULL);
    tt_program_free(p);
    c.memory_budget--; /* what is given up first is memory for the next run's inputs */
    p = tt_compile(n.t, n.loss, &c);
    REQUIRE(p != NULL && tt_program_plan(p).bytes <= c.memory_budget);
    c.memory_budget = tt_program_plan(p).bytes - 1;
    tt_program_free(p);
    CHECK(tt_compile(n.t, n.loss, &c) == NULL);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs ");
    tt_tape_free(n.t);
    TEST_CLOSE(ctx, &a);
}

TEST(seconds_of_a_plan_by_costs)
{
    static const char *const names[] = {
        "product_16", "product_f32", "attention_16", "attention_f32", "rows_16", "rows_f32", "update_16",
        "update_f32", "update_host", "memory", "to_host", "from_host", "between_ranks", "launch", "meeting"};
    enum { COUNT = TEST_COUNT(names), RATES = COUNT - 2 };
    static const net_options with_all = {true, true};
    test_allocator a;
    net n;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    tt_costs costs[3]; /* the default; four times as slow; wrong */
    double rates[COUNT];
    c.device = "cuda";
    c.offload = "gradients";
    c.update = "host";
    REQUIRE(sizeof rates == sizeof costs[0] && random_net(ctx, 0, with_all, &n));
    costs[0] = tt_costs_default();
    memcpy(rates, &costs[0], sizeof rates);
    for (int k = 0; k < COUNT; k++) rates[k] *= k < RATES ? 0.25 : 4;
    memcpy(&costs[1], rates, sizeof rates);
    tt_plan plan[3];
    for (int k = 0; k < 3; k++) {
        c.costs = k ? &costs[k - 1] : NULL;
        tt_program *p = tt_compile(n.t, n.loss, &c);
        REQUIRE(p != NULL);
        plan[k] = tt_program_plan(p);
        tt_program_free(p);
    }
    CHECK(plan[0].compute_seconds > 0 && plan[1].compute_seconds == plan[0].compute_seconds);
    CHECK(plan[1].exposed_seconds == plan[0].exposed_seconds);
    CHECK(plan[2].compute_seconds == 4 * plan[0].compute_seconds);
    CHECK(plan[2].exposed_seconds == 4 * plan[0].exposed_seconds);
    CHECK(plan[0].host_seconds > 0 && plan[0].host_seconds < plan[0].compute_seconds);
    CHECK(plan[2].host_seconds == 4 * plan[0].host_seconds);
    CHECK(plan[0].micro_compute_seconds > 0);
    CHECK(plan[0].micro_compute_seconds + plan[0].host_seconds < plan[0].compute_seconds);
    CHECK(plan[2].micro_compute_seconds == 4 * plan[0].micro_compute_seconds);
    c.costs = &costs[2];
    for (int k = 0; k < COUNT; k++)
        for (int bad = 0; bad < 4; bad++) {
            const double wrong[] = {-1, (double)NAN, (double)INFINITY, 0};
            char text[64];
            if (k >= RATES && bad == 3) continue; /* nothing may take no time */
            memcpy(rates, &costs[0], sizeof rates);
            rates[k] = wrong[bad];
            memcpy(&costs[2], rates, sizeof rates);
            CHECK(tt_compile(n.t, n.loss, &c) == NULL);
            snprintf(text, sizeof text, "costs: %s is %g and not a finite number %s", names[k], wrong[bad],
                     k < RATES ? "above 0" : "of seconds");
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, text);
        }
    tt_tape_free(n.t);
    TEST_CLOSE(ctx, &a);
}

/* Three blocks of n rows, with parameters that are there: of a test of batches. */
typedef struct batches { tt_param *up[3], *down[3]; int recorded; int64_t fails_at; } batches;

static tt_value record_batch(void *user, tt_tape *t, int64_t n)
{
    batches *b = (batches *)user;
    const tt_value none = {0};
    const int64_t rows = tt_axis(t, "rows", n);
    tt_value x = tt_input(t, "x", TT_F32, n == b->fails_at ? 0 : rows, 16), h = x;
    b->recorded++;
    for (int k = 0; k < 3; k++) {
        h = tt_add(t, h, tt_linear(t, tt_gelu(t, tt_linear(t, h, b->up[k], NULL)), b->down[k], NULL));
        tt_block_end(t, h);
    }
    return tt_mean_squared_error(t, h, x, none);
}

static bool fits_batch(batches *b, tt_context *ctx, const tt_compile_options *o, int64_t n)
{
    tt_tape *t = tt_tape_new(ctx);
    tt_program *p = tt_compile(t, record_batch(b, t, n), o);
    CHECK(p || tt_error_code(ctx) == TT_ERR_BUDGET);
    tt_program_free(p);
    tt_tape_free(t);
    return p != NULL;
}

TEST(largest_batch_against_brute_force)
{
    enum { MOST = 30 };
    static const struct { const char *device, *recompute, *offload; int zero; } more[] = {
        {"cuda", "budget", "budget", 1}, {"cuda", "blocks", "optimizer,activations", 1},
        {"cpu", "cheap", "budget", 1}, {"cuda*2", "cheap", "budget", TT_ZERO_BUDGET}};
    static const char *const recomputes[] = {"none", "blocks", "budget"};
    test_allocator a;
    batches b;
    tt_context *ctx = test_open(&a);
    ctx->apart = true;
    tt_compile_options o = tt_compile_options_default();
    memset(&b, 0, sizeof b);
    for (int k = 0; k < 3; k++) {
        b.up[k] = matrix(ctx, k == 0 ? "up0" : k == 1 ? "up1" : "up2", 40, 16);
        b.down[k] = matrix(ctx, k == 0 ? "down0" : k == 1 ? "down1" : "down2", 16, 40);
    }
    for (int k = 0; k < TEST_COUNT(recomputes) * 2; k++) {
        tt_tape *t = tt_tape_new(ctx);
        o.recompute = k < 4 ? "none" : "blocks";
        o.device = k % 2 ? "cuda" : "cpu";
        o.memory_budget = 0;
        tt_program *p = tt_compile(t, record_batch(&b, t, 1), &o);
        REQUIRE(p != NULL);
        const size_t one = tt_program_plan(p).bytes;
        tt_program_free(p);
        tt_tape_free(t);
        o.recompute = recomputes[k / 2];
        for (int size = 0; size < 5; size++) { /* odd ones, and one less than the smallest plan */
            if ((k + size) % (2 * TEST_SWEEP - 1)) continue;
            o.memory_budget = size ? one + (size_t)size * (size_t)size * 3777 : one - 1;
            int64_t largest = 0;
            for (int64_t n = 1; n <= MOST; n++) if (fits_batch(&b, ctx, &o, n)) largest = n;
            b.recorded = 0;
            const int64_t found = tt_largest_batch(ctx, record_batch, &b, &o, MOST);
            char text[128];
            snprintf(text, sizeof text, "%s on %s, %zu bytes: %d, and by trying all %d; %d plans",
                     o.recompute, o.device, o.memory_budget, (int)found, (int)largest, b.recorded);
            test__check(found == largest && b.recorded <= 16, __FILE__, __LINE__, text);
            if (!largest) CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs");
            if (!largest) CHECK(b.recorded == 1);
        }
        o.memory_budget = one << 16;
        CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 7) == 7);
    }
    for (int k = 0; k < TEST_COUNT(more); k++) { /* a choice makes room for more, and one more is refused */
        int64_t found[2];
        for (int chosen = 0; chosen < 2; chosen++) {
            o.device = more[k].device;
            o.recompute = chosen ? more[k].recompute : "none";
            o.offload = chosen ? more[k].offload : NULL;
            o.parallel.zero = chosen ? more[k].zero : 1;
            o.memory_budget = (k == 2 ? 0 : (size_t)32 << 20) + 200000;
            found[chosen] = tt_largest_batch(ctx, record_batch, &b, &o, 5000);
            CHECK(found[chosen] > 0 && found[chosen] < 5000);
            CHECK(fits_batch(&b, ctx, &o, found[chosen]));
            for (int more_of = 1; more_of <= 3; more_of++)
                CHECK(!fits_batch(&b, ctx, &o, found[chosen] + more_of));
        }
        CHECK(found[1] > found[0]);
    }
    o.parallel.zero = 1;
    o.offload = NULL;
    o.recompute = "none";
    o.memory_budget = 0;
    o.device = "cpu";
    CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 7) == 0);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the largest batch for device 'cpu' depends on memory_budget, which is "
                                      "not set");
    o.device = "tpu";
    CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 7) == 0);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "device 'tpu' is unknown");
    o.device = "cpu";
    o.memory_budget = 1 << 20;
    CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 0) == 0);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "most 0 is less than 1");
    for (b.fails_at = 1; b.fails_at <= 7; b.fails_at += 6) { /* another error ends it */
        CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 7) == 0);
        CHECK_ERROR(ctx, TT_ERR_SHAPE, "'x': ");
    }
    b.fails_at = 0;
    tt_tape *t = tt_tape_new(ctx);
    tt_program *shared = tt_compile(t, record_batch(&b, t, 4), &o);
    o.share = shared;
    CHECK(tt_largest_batch(ctx, record_batch, &b, &o, 7) == 0);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "`share` names a program");
    tt_program_free(shared);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------------------ reports */

/* Some value of that name is written by, and read after, the peak: from the instructions, not from the
   planner's boxes. */
static bool lives_at_peak(const tt_program *p, const char *name, int peak)
{
    const tt_tape *t = p->built.t;
    for (int32_t v = 1; v < t->n_values; v++) {
        int first = t->values[v].storage == TT__INPUT ? 0 : INT_MAX,
            last = t->values[v].keep || v == t->values[p->built.root].base ? INT_MAX : -1;
        if (t->values[v].base != v || strcmp(t->values[v].name, name) != 0) continue;
        if (t->values[v].persistent) return true;
        for (int k = t->n_code - 1; k >= 0; k--)
            for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
                int32_t id = j < TT__MAX_IN ? t->code[k].in[j] : t->code[k].out[j - TT__MAX_IN];
                if (!id || t->values[id].base != v) continue;
                if (k > last) last = k;
                if (j >= TT__MAX_IN && k < first) first = k;
            }
        if (first <= peak && peak <= last) return true;
    }
    return false;
}

/* A plan's values: largest first, alive at the peak, and as many bytes as it says, whatever part of them is
   asked for. */
static void check_values(const tt_program *p)
{
    tt_plan plan = tt_program_plan(p);
    size_t at_peak[TT_MEM_CATEGORIES] = {0}, all = 0;
    int n = tt_plan_values(p, NULL, 0);
    tt_plan_value *v = (tt_plan_value *)calloc((size_t)n + 1, sizeof *v),
                  *some = (tt_plan_value *)calloc((size_t)n + 1, sizeof *some);
    CHECK(tt_plan_values(p, v, n) == n && v[n].name == NULL);
    for (int k = 0; k < n; k++) {
        CHECK(v[k].bytes > 0 && (k == 0 || v[k].bytes <= v[k - 1].bytes));
        CHECK(v[k].first >= 0 && v[k].first <= plan.peak_instruction && plan.peak_instruction <= v[k].last &&
              v[k].last < (plan.instructions ? plan.instructions : 1));
        test__check(v[k].category == TT_MEM_WORKSPACE || lives_at_peak(p, v[k].name, plan.peak_instruction),
                    __FILE__, __LINE__, v[k].name);
        at_peak[v[k].category] += v[k].bytes;
        all += v[k].bytes;
    }
    CHECK(memcmp(at_peak, plan.at_peak, sizeof at_peak) == 0);
    CHECK(all == plan.lower_bound_bytes);
    for (int part = 0; part <= n; part += 1 + n / 7) {
        memset(some, 0, sizeof *some * (size_t)(n + 1));
        CHECK(tt_plan_values(p, some, part) == n && memcmp(some, v, sizeof *v * (size_t)part) == 0 &&
              some[part].name == NULL);
    }
    free(v);
    free(some);
}

/* The heights of each layer of the picture, `points` a layer, in its own unit, bottom first; -1: no such
   layer. Returns the arena's. */
static int read_picture(const char *svg, int points, int *heights)
{
    static const char *const layers[] = {"parameters", "optimizer",   "gradients",
                                         "inputs",     "activations", "workspace"};
    const char *dashed = strstr(svg, "stroke-dasharray='60 40' d='M0 ");
    for (int c = 0; c < 6; c++) {
        char title[64];
        int *to = heights + c * points, x = 0, height = 0;
        snprintf(title, sizeof title, "'><title>%s</title></path>", layers[c]);
        const char *end = strstr(svg, title), *at = end;
        for (int k = 0; k < points; k++) to[k] = -1;
        if (!end) continue;
        while (at > svg && *at != 'M') at--;
        at += strlen("M0 0");
        for (int k = 0; k < points; k++) { /* up and down at x, then on */
            while ((*at == 'v' || *at == 'h') &&
                   (int)((int64_t)6000 * k / points) >= x + (*at == 'h' ? atoi(at + 1) : 0)) {
                if (*at == 'v') height += atoi(at + 1);
                else x += atoi(at + 1);
                at += 1 + strspn(at + 1, "-0123456789");
            }
            to[k] = height;
        }
        CHECK(strncmp(at, "H6000V0z'>", 10) == 0);
    }
    return dashed ? atoi(dashed + strlen("stroke-dasharray='60 40' d='M0 ")) : -1;
}

/* Layers, arena and peak of the picture against sums over the program's storages. */
static void check_picture(const tt_program *p, const char *svg)
{
    static const tt_category layers[] = {TT_MEM_PARAMETERS, TT_MEM_OPTIMIZER,   TT_MEM_GRADIENTS,
                                         TT_MEM_INPUTS,     TT_MEM_ACTIVATIONS, TT_MEM_WORKSPACE};
    tt_plan plan = tt_program_plan(p);
    int n = plan.instructions, points = n < 600 ? n : 600, highest = 0;
    int *heights = (int *)malloc(sizeof(int) * 6 * (size_t)points);
    int arena = read_picture(svg, points, heights);
    double unit = (double)plan.bytes / arena, drawn[6] = {0}, summed[6] = {0};
    CHECK(arena > 2000);
    for (int k = 0; k < points; k++) {
        double from_below = 0;
        int below = 0;
        for (int c = 0; c < 6; c++) {
            double bytes = 0;
            int height = heights[c * points + k] >= 0 ? heights[c * points + k] : below;
            if (layers[c] == TT_MEM_WORKSPACE) bytes = (double)p->settings.kind->resident;
            for (int32_t v = 1; v < p->built.t->n_values; v++)
                if (p->built.t->values[v].persistent && p->built.t->values[v].base == v &&
                    p->built.t->values[v].space == TT__DEVICE && tt__category(p->built.t, v) == layers[c])
                    bytes += (double)tt__arena_bytes(p->built.t, &p->built.t->values[v]);
            for (int b = 0; b < p->built.n_boxes; b++)
                if (p->built.box[b].merged == b && p->built.box[b].space == TT__DEVICE &&
                    p->built.box[b].first <= k && k <= p->built.box[b].last &&
                    tt__category(p->built.t, p->built.box[b].value) == layers[c])
                    bytes += (double)p->built.box[b].bytes;
            from_below += bytes;
            if (points == n) CHECK(fabs(height - from_below / unit) <= 1.5); /* rounded, as the unit is */
            drawn[c] += height - below;
            summed[c] += bytes;
            below = height;
        }
        if (below > highest) highest = below;
    }
    if (points == n)
        for (int c = 0; c < 6; c++)
            CHECK(fabs(drawn[c] - summed[c] / unit) <= 2.0 * points &&
                  (drawn[c] > 0) >= (summed[c] / unit > points));
    CHECK(fabs(highest - (double)plan.lower_bound_bytes / unit) <= 1.5);
    free(heights);
}

typedef size_t (*report)(const tt_program *p, char *to, size_t capacity);

/* What any capacity leaves of a report: its beginning, terminated, and nothing behind it. Returns the whole,
   to be freed. */
static char *check_report(const tt_program *p, report write, size_t every)
{
    size_t length = write(p, NULL, 0);
    char *all = (char *)malloc(length + 1), *part = (char *)malloc(length + 8);
    CHECK(length > 0 && write(p, all, length + 1) == length && strlen(all) == length);
    for (size_t capacity = 0; capacity <= length + 3;
         capacity += capacity < 400 || capacity + 50 > length ? 1 : every) {
        memset(part, '#', length + 8);
        CHECK(write(p, part, capacity) == length && part[capacity] == '#');
        if (capacity)
            CHECK(strncmp(part, all, capacity - 1) == 0 &&
                  strlen(part) == (capacity - 1 < length ? capacity - 1 : length));
    }
    free(part);
    return all;
}

TEST(reports)
{
    static const net_options with_all = {true, true};
    for (uint64_t seed = 0; seed < 12; seed++) {
        test_allocator a;
        net n;
        tt_context *ctx = test_open(&a);
        tt_compile_options c = tt_compile_options_default();
        c.device = seed % 2 ? "cuda" : "cpu";
        c.precision = precisions[seed % 3].name;
        c.accumulate = seed % 5 == 4;
        c.recompute = seed % 4 < 2 ? "blocks" : "cheap";
        c.offload = seed % 3 ? offloads[seed % TEST_COUNT(offloads)] : NULL;
        c.train = seed % 6 != 5;
        REQUIRE(random_net(ctx, seed, with_all, &n));
        tt_name(n.t, n.x, "<x> & \"\x80\"");
        tt_program *p = tt_compile(n.t, n.loss, &c);
        if (!p) {
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "nothing to train");
            tt_tape_free(n.t);
            TEST_CLOSE(ctx, &a);
            continue;
        }
        long live = a.live;
        check_values(p);
        char *text = check_report(p, tt_plan_text, 50), *svg = check_report(p, tt_plan_svg, 500), line[64];
        snprintf(line, sizeof line, "memory plan for %s: %.1f MB (", c.device,
                 (double)tt_program_plan(p).bytes / 1e6);
        CHECK(strncmp(text, line, strlen(line)) == 0 && strstr(text, "largest:"));
        const bool copies = tt_program_plan(p).transfer_bytes > 0;
        const bool moves = c.offload && strcmp(c.offload, "activations") != 0; /* without blocks */
        CHECK(copies == moves && copies == (strstr(text, "on the host: ") != NULL));
        CHECK(copies == (strstr(svg, " copied a step") != NULL));
        check_picture(p, svg);
        CHECK(strncmp(svg, "<svg ", 5) == 0 && strstr(svg, "</svg>\n") && !strstr(svg, "<x>") &&
              !strchr(svg, '\x80'));
        CHECK(a.live == live);
        free(text);
        free(svg);
        tt_program_free(p);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(reports_of_a_deep_network)
{
    static const shape vit = {"ViT", 24, 64, 4, 256, 2, 50, 10, true};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_value logits, loss = encoder(t, &vit, &logits);
    tt_compile_options c = tt_compile_options_default();
    c.recompute = "none";
    tt_program *p = tt_compile(t, loss, &c);
    REQUIRE(p != NULL);
    check_values(p);
    char *text = check_report(p, tt_plan_text, 500), *svg = check_report(p, tt_plan_svg, 5000);
    CHECK(tt_program_plan(p).instructions > 600);
    check_picture(p, svg);
    CHECK(strlen(svg) < 60000 && strlen(text) < 2048);
    CHECK(strstr(text, "24 x layer.*.up.weight (parameters)\n") &&
          strstr(text, "24 x m(layer.*.up.weight) (optimizer)\n"));
    CHECK(strstr(text, "23 x linear.* (activations)\n")); /* before the GELU; the last layer has few rows */
    free(text);
    free(svg);

    /* a report that gets no memory: the text is shorter, the picture is not there */
    size_t length = tt_plan_text(p, NULL, 0);
    a.fail_at = a.calls + 1;
    CHECK(tt_plan_text(p, NULL, 0) < length && a.failed);
    a.fail_at = a.calls + 1;
    CHECK(tt_plan_svg(p, NULL, 0) == 0);
    CHECK_ERROR(ctx, TT_ERR_MEMORY, "out of memory");
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

TEST(names_of_what_works_in_place) /* a storage is called by what it holds at the peak */
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    tt_plan_value v[8];
    int found = 0;
    c.train = false;
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, 640, 48), r = tt_relu(t, x), h = tt_tanh(t, r),
             large = tt_linear(t, h, matrix(ctx, "w", 480, 48), NULL);
    tt_value small = tt_slice(t, large, 7, 48), end = tt_gelu(t, tt_scale(t, small, 2));
    tt_name(t, r, "relu");
    tt_name(t, h, "tanh");
    tt_name(t, large, "large");
    tt_program *p = tt_compile(t, end, &c);
    REQUIRE(p != NULL);
    check_values(p);
    int n = tt_plan_values(p, v, 8);
    REQUIRE(n <= 8 && strcmp(tt_program_plan(p).peak_name, "linear large") == 0);
    for (int k = 0; k < n; k++) {
        CHECK(strcmp(v[k].name, "x") != 0 && strcmp(v[k].name, "relu") != 0);
        found += strcmp(v[k].name, "tanh") == 0 || strcmp(v[k].name, "w") == 0 ||
                 (strcmp(v[k].name, "large") == 0 && k == 0);
    }
    CHECK(found == 3);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* The backward of a * a, a = gelu(x W), reads a: if that is marked, it lies in the host's memory between its
   two uses, and is not computed again. What is not on the tape cannot be marked. */
TEST(marked_values_go_to_the_hosts_memory)
{
    static char text[20000];
    float x[40 * 4] = {1, -2, 3};
    const tt_value none = {0};
    for (int marked = 0; marked < 3; marked++) { /* nothing; the activation; the parameter */
        test_allocator a;
        const int64_t dims[2] = {4, 4};
        tt_context *ctx = test_open(&a);
        tt_param *w = tt_param_new(ctx, "w", 2, dims, normal_init(1));
        tt_tape *t = tt_tape_new(ctx);
        tt_value in = tt_input(t, "x", TT_F32, 40, 4), h = tt_gelu(t, tt_linear(t, in, w, NULL));
        tt_name(t, h, "marked");
        tt_value loss = tt_mean_squared_error(t, tt_mul(t, h, h), in, none);
        if (marked == 1) tt_offload(t, h);
        if (marked == 2) tt_offload(t, tt_param_value(t, w));
        tt_program *p = tt_compile(t, loss, NULL);
        REQUIRE(p != NULL);
        const tt_plan plan = tt_program_plan(p);
        const size_t activation = 40 * 4 * 4, parameter = 4 * 4 * 4;
        /* A parameter comes for the forward and for the update, after which it goes back. */
        CHECK(plan.transfer_bytes == (marked == 1 ? 2 * activation : marked == 2 ? 3 * parameter : 0));
        CHECK((plan.host_bytes > activation) == (marked == 1) || marked == 2);
        tt_program_text(p, text, sizeof text);
        CHECK((strstr(text, "copy") != NULL) == (marked > 0));
        CHECK((strstr(text, " gelu  ") != NULL) == (marked != 1)); /* the forward's is part of the product */
        CHECK(tt_set(p, in, x, 40) == TT_OK && tt_step(p, 0.1f, NULL) == TT_OK);
        tt_program_free(p);
        tt_offload(t, tt__handle(t, 99));
        CHECK(tt_tape_status(t) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tt_offload: the value is not a value of this tape");
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* ViT-L/16 in bf16, Adam, on 64 images in micro-batches: planned, with what lies in the host's memory. */
TEST(vit_l16_with_the_host)
{
    static const struct { const char *offload; int images; size_t most; } rows[] = {
        {"optimizer,gradients,activations", 16, 850000000u},
        {"optimizer,gradients,activations", 8, 850000000u},
        {"optimizer,gradients,activations,parameters", 8, 240000000u}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_vit v;
    tt_vit_config c = tt_vit_config_default("L/16");
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.compile.precision = "bf16-true";
    o.compile.recompute = "blocks";
    o.compile.device = "cuda";
    o.compile.accumulate = true;
    pieces_from = 65536;
    together = 32L << 20;
    REQUIRE(tt_vit_new(ctx, &v, &c) == TT_OK);
    const tt_model model = tt_vit_classifier(&v);
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        o.compile.offload = rows[k].offload;
        o.max_seqs = rows[k].images;
        o.compile.memory_budget = rows[k].most; /* or more would run beside computation */
        tt_trainer *t = tt_trainer_new(ctx, &model, &o);
        if (CHECK(t != NULL)) CHECK(tt_program_plan(tt_trainer_program(t)).bytes <= rows[k].most);
        tt_trainer_free(t);
    }
    pieces_from = 1;
    together = 4096;
    tt_vit_free(&v);
    TEST_CLOSE(ctx, &a);
}

/* What a stream copies out first is waited for first: another order waits for all that is before it, too. */
TEST(copies_out_are_waited_for_in_their_order)
{
    const int64_t dims[2] = {64, 64};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options o = tt_compile_options_default();
    tt_tape *t = tt_tape_new(ctx);
    const tt_value none = {0}, x = tt_input(t, "x", TT_F32, 4096, 64);
    tt_value h = x;
    for (int k = 0; k < 6; k++) {
        char name[32];
        snprintf(name, sizeof name, "w%d", k);
        tt_param *w = tt_param_new(ctx, name, 2, dims, normal_init(1));
        h = tt_gelu(t, tt_linear(t, h, w, NULL));
    }
    o.optimizer.kind = TT_ADAM;
    o.device = "cuda";
    o.offload = "optimizer";
    o.update = "backward";
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, h, x, none), &o);
    if (!p) printf("%s\n", tt_error(ctx));
    REQUIRE(p != NULL);
    const tt_tape *made = p->built.t;
    int32_t under_way[64];
    int n = 0, first = 0;
    for (int k = 0; k < made->n_code && n < TEST_COUNT(under_way); k++) {
        const tt__instr *i = &made->code[k];
        if (i->stream == TT__OUT_STREAM) under_way[n++] = i->out[0];
        if (!tt__is(i, TT__WAITS) || made->values[i->in[0]].space != TT__HOST) continue;
        CHECK(first < n && i->in[0] == under_way[first]);
        first++;
    }
    CHECK(n == 12 && first == n); /* m and v of each */
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* A perceptron, of whose parameters two updates at the end of a step run together. */
enum { DEEP = 6, WIDE = 32, FEW = 40 };
typedef struct perceptron { test_allocator a; tt_context *ctx; tt_tape *t; tt_value x, loss; } perceptron;

static bool perceptron_new(perceptron *n)
{
    const int64_t dims[2] = {WIDE, WIDE};
    const tt_value none = {0};
    n->ctx = test_open(&n->a);
    n->ctx->options.verify = true;
    n->ctx->apart = true;
    n->t = tt_tape_new(n->ctx);
    n->x = tt_input(n->t, "x", TT_F32, FEW, WIDE);
    tt_value h = n->x;
    for (int k = 0; k < DEEP; k++) {
        char name[32];
        snprintf(name, sizeof name, "w%d", k);
        h = tt_gelu(n->t, tt_linear(n->t, h, tt_param_new(n->ctx, name, 2, dims, normal_init(0.2f)), NULL));
    }
    n->loss = tt_mean_squared_error(n->t, h, n->x, none);
    return tt_tape_status(n->t) == TT_OK;
}

static void perceptron_free(perceptron *n)
{
    tt_tape_free(n->t);
    TEST_CLOSE(n->ctx, &n->a);
}

/* Trains, and takes what the parameters are then. without: the number of a wait that is left out, or -1.
   Returns how many waits there are. */
static int perceptron_run(const tt_compile_options *o, bool late, int without, float to[DEEP][WIDE * WIDE])
{
    float x[FEW * WIDE];
    perceptron n;
    int waits = 0;
    if (!CHECK(perceptron_new(&n))) return 0;
    n.ctx->late = late;
    tt_program *p = tt_compile(n.t, n.loss, o);
    if (!CHECK(p != NULL)) printf("%s\n", tt_error(n.ctx));
    for (int k = 0; p && k < p->built.t->n_code; k++) {
        if (p->built.t->code[k].op != TT__OP_WAIT || waits++ != without) continue;
        p->built.t->code[k].in[0] = 0;
        p->built.under_way++;
        tt__free(n.ctx, p->rank[0].started);
        p->rank[0].started = (tt__started *)tt__calloc(n.ctx, sizeof(tt__started) *
                                                              (size_t)p->built.under_way);
    }
    const size_t before = tt_allocated_bytes(n.ctx);
    if (p) p->poison = true;
    if (p && CHECK(tt_allocate(p) == TT_OK)) {
        const tt_plan plan = tt_program_plan(p);
        CHECK(tt_allocated_bytes(n.ctx) - before == plan.bytes + plan.host_bytes);
    }
    for (int step = 0; step < 3 && p; step++) {
        for (int k = 0; k < FEW * WIDE; k++) x[k] = (float)((k * 37 + step * 11) % 101) / 25 - 2;
        CHECK(tt_set(p, n.x, x, FEW) == TT_OK && (tt_step(p, 0.1f, NULL) == TT_OK || without >= 0));
    }
    for (int k = 0; k < DEEP; k++) tt_param_get(n.ctx->params[k], to[k]);
    tt_program_free(p);
    perceptron_free(&n);
    return waits;
}

/* Updates in the host's memory give the bits of those on the device, with all optimizers and whatever else
   lies there, in what the plan says. Each wait that is left out is noticed. */
TEST(updates_in_the_hosts_memory)
{
    static float expected[DEEP][WIDE * WIDE], got[DEEP][WIDE * WIDE];
    static const char *const lists[] = {NULL, "optimizer", "gradients", "optimizer,parameters",
                                        "gradients,parameters"};
    together = 5 * WIDE * WIDE * 4; /* of two parameters and their gradients */
    for (int k = 0; k < 2 * TEST_COUNT(lists); k++) {
        tt_compile_options o = tt_compile_options_default();
        o.optimizer.kind = k % 4 < 2 ? TT_SGD : k % 4 == 2 ? TT_ADAM : TT_ADAMW;
        o.optimizer.momentum = k % 4 == 1 ? 0.9f : 0;
        o.optimizer.clip_norm = k % 3 ? 0.5f : 0;
        perceptron_run(&o, false, -1, expected);
        o.update = "host";
        o.offload = lists[k % TEST_COUNT(lists)];
        const int waits = perceptron_run(&o, true, -1, got);
        CHECK(waits > DEEP && memcmp(got, expected, sizeof got) == 0);
        perceptron_run(&o, false, -1, got);
        CHECK(memcmp(got, expected, sizeof got) == 0);
        for (int without = 0; without < waits && k < TEST_COUNT(lists); without++) {
            perceptron_run(&o, true, without, got);
            CHECK(memcmp(got, expected, sizeof got) != 0);
        }
    }
    together = 4096;
}

/* What updates in the host's memory leave on the device, move, and have there: beside the group of parameters
   and gradients that is updated, two groups that come, and parameters that go back. Nothing waits for copies
   but for those of the first group there, and of the last one back. */
TEST(plans_of_updates_in_the_hosts_memory)
{
    static char text[40000];
    const size_t each = WIDE * WIDE * 4, group = 4 * each + 256;
    static const struct { const char *update, *offload; size_t moved, taken, there; } rows[] = {
        {"end", NULL, 0, 0, 0},
        {"end", "optimizer", 4 * DEEP, 2, 2},
        {"host", NULL, 3 * DEEP, 2, 2},
        {"host", "gradients", 4 * DEEP, 2, 3}, /* which come back for their norm */
        {"host", "parameters", 3 * DEEP - 1, 3, 3}}; /* which come for the forward and the backward */
    tt_costs slow = tt_costs_default();
    slow.update_host = 1e8;
    slow.launch = 0;
    together = 5 * (long)each;
    for (int on_cpu = 0; on_cpu < 2; on_cpu++) {
        tt_plan plan[TEST_COUNT(rows)];
        for (int k = 0; k < TEST_COUNT(rows); k++) {
            perceptron n;
            tt_compile_options o = tt_compile_options_default();
            REQUIRE(perceptron_new(&n));
            o.device = on_cpu ? "cpu" : "cuda";
            o.optimizer.clip_norm = 1;
            o.costs = &slow;
            o.update = rows[k].update;
            o.offload = rows[k].offload;
            tt_program *p = tt_compile(n.t, n.loss, &o);
            REQUIRE(p != NULL);
            plan[k] = tt_program_plan(p);
            size_t on_host = 0, norms = 0, scratch = 0;
            for (int j = 0; j < p->built.t->n_code; j++) {
                const tt__instr *i = &p->built.t->code[j];
                on_host += i->on_host;
                if (i->on_host) scratch = i->workspace; /* of each */
                norms += i->stream && i->in[0] == p->built.t->clipped;
            }
            CHECK(on_host == (strcmp(rows[k].update, "host") == 0 ? DEEP : 0));
            CHECK((norms > 0) == (on_host && !on_cpu));
            if (k == 2 && !on_cpu) /* where copies run beside */
                CHECK(plan[k].exposed_seconds < 6.5 * (double)each / slow.to_host);
            CHECK_NEAR((double)plan[k].transfer_bytes, (double)(rows[k].moved * each + norms * 8), 0);
            CHECK(plan[k].persistent_bytes + rows[k].taken * DEEP * each == plan[0].persistent_bytes);
            const size_t there = plan[k].host_bytes - plan[0].host_bytes;
            const size_t least = rows[k].there * DEEP * each;
            CHECK(there >= least && there <= least + (on_host ? 4 * group + scratch : 0));
            tt_program_text(p, text, sizeof text);
            CHECK((strstr(text, "adam on the host ") != NULL) == (on_host > 0));
            tt_program_free(p);
            perceptron_free(&n);
        }
    }
    together = 4096;
}

/* Nothing chooses an update in the host's memory, but where nothing fits the error says what it would save:
   of one large matrix, what its state, once it is offloaded, takes on the device while it is updated. */
TEST(updates_in_the_hosts_memory_are_advised)
{
    const int64_t dims[2] = {1024, 1024};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    ctx->apart = true;
    tt_compile_options o = tt_compile_options_default();
    const tt_value none = {0};
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, 4, 1024);
    tt_value loss = tt_mean_squared_error(
        t, tt_linear(t, x, tt_param_new(ctx, "w", 2, dims, normal_init(1)), NULL), x, none);
    char text[128];
    size_t bytes[2];
    o.optimizer.clip_norm = 1; /* so that an update in the backward is no way */
    o.offload = "optimizer,gradients,parameters";
    for (int k = 0; k < 2; k++) {
        o.update = k ? "host" : "end";
        tt_program *p = tt_compile(t, loss, &o);
        REQUIRE(p != NULL);
        bytes[k] = tt_program_plan(p).bytes;
        tt_program_free(p);
    }
    CHECK(bytes[1] + 2 * 1024 * 1024 * 4 <= bytes[0]);
    o.update = "end";
    o.offload = "budget";
    o.memory_budget = bytes[1];
    CHECK(!tt_compile(t, loss, &o));
    CHECK_ERROR(ctx, TT_ERR_BUDGET, "; if more may change, update \"host\" ");
    snprintf(text, sizeof text, ", then offload \"parameters\" %zu, which fits", bytes[1]);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, text);
    o.memory_budget = bytes[1] - 1;
    CHECK(!tt_compile(t, loss, &o));
    snprintf(text, sizeof text, "; the smallest possible is %zu with recompute \"cheap\", ", bytes[1]);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, text);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

TEST(numbers_in_names)
{
    static const char *const names[][2] = {
        {"layer.3.norm1.weight", "layer.*.norm1.weight"}, {"d(layer.23.up)", "d(layer.*.up)"}, {"12", "*"},
        {"1x", "1x"}, {"x1", "x1"}, {"h.0_7-8", "h.*_*-*"}, {"", ""}, {"conv2d.10", "conv2d.*"},
        {"a12b.3c4.5", "a12b.3c4.*"}};
    char text[32];
    for (int k = 0; k < TEST_COUNT(names); k++) {
        tt__without_numbers(names[k][0], text, sizeof text);
        test__check(strcmp(text, names[k][1]) == 0, __FILE__, __LINE__, text);
        for (size_t capacity = 1; capacity < sizeof text; capacity++) {
            tt__without_numbers(names[k][0], text, capacity);
            CHECK(strlen(text) < capacity && strncmp(text, names[k][1], strlen(text)) == 0);
        }
    }
}

TEST(allocation_failures) /* of plans that share an arena, and of their reports */
{
    static const net_options with_all = {true, true};
    bool failed = true;
    for (long at = 1; failed; at++) {
        test_allocator a;
        net n;
        tt_context *ctx = test_open(&a);
        tt_compile_options c = tt_compile_options_default();
        REQUIRE(random_net(ctx, 0, with_all, &n));
        a.fail_at = a.calls + at;
        c.device = "cuda";
        tt_program *p = tt_compile(n.t, n.loss, &c);
        c.train = false;
        c.share = p;
        tt_program *eval = p ? tt_compile(n.t, n.loss, &c) : NULL;
        failed = a.failed;
        if (failed) CHECK(!eval && tt_error_code(ctx) == TT_ERR_MEMORY);
        tt_program_free(p);
        tt_program_free(eval);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
}

/* ----------------------------------------------------------------------------------------------- in place */

TEST(elementwise_chains_work_in_place)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    size_t buffer = 640 * 48 * 4, workspace = 0;
    c.train = false;
    for (int kind = 0; kind < 3; kind++) { /* a chain; a chain whose input is kept; branches */
        tt_tape *t = tt_tape_new(ctx);
        tt_value x = tt_input(t, "x", TT_F32, 640, 48), h = x;
        if (kind == 1) tt_output(t, x);
        for (int k = 0; k < 6; k++) {
            tt_value left = tt_scale(t, tt_silu(t, tt_gelu(t, tt_tanh(t, tt_relu(t, h)))), 0.5f);
            h = kind == 2 ? tt_add(t, left, tt_relu(t, tt_scale(t, h, 2))) : left;
            h = tt_layernorm(t, h, vector(ctx, "w", 48, TT_INIT_ONES), NULL, 1e-5f);
        }
        tt_program *p = tt_compile(t, h, &c);
        REQUIRE(p != NULL);
        for (int k = 0; k < p->built.t->n_code; k++)
            if (p->built.t->code[k].workspace > workspace) workspace = p->built.t->code[k].workspace;
        tt_plan plan = tt_program_plan(p);
        CHECK(plan.bytes - plan.persistent_bytes == buffer * (kind ? 2 : 1) + workspace);
        CHECK(plan.lower_bound_bytes == plan.bytes);
        tt_program_free(p);
        tt_tape_free(t);
    }
    TEST_CLOSE(ctx, &a);
}

/* A value that is still needed is not worked on in place: x + x, a value that a view or a later op reads, an
   output. */
TEST(in_place_spares_what_is_needed)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    tt_tape *t = tt_tape_new(ctx);
    float numbers[8], got[8];
    c.train = false;
    tt_value x = tt_input(t, "x", TT_F32, 2, 4);
    tt_value a1 = tt_scale(t, x, 2), view = tt_slice(t, a1, 1, 2), b = tt_scale(t, a1, 3),
             kept = tt_scale(t, b, 5), d = tt_add(t, kept, kept);
    tt_value e = tt_add(t, tt_add(t, d, d), x), small = tt_scale(t, view, 7);
    tt_output(t, kept);
    tt_output(t, small);
    tt_output(t, x);
    tt_program *p = tt_compile(t, e, &c);
    REQUIRE(p != NULL);
    poison(p);
    for (int k = 0; k < 8; k++) numbers[k] = (float)(k + 1);
    REQUIRE(tt_set(p, x, numbers, 2) == TT_OK);
    REQUIRE(tt_run(p, NULL) == TT_OK);
    CHECK(tt_get(p, e, got, 8) == TT_OK && got[0] == 30 * 4 + 1 && got[7] == 8 * 121);
    CHECK(tt_get(p, kept, got, 8) == TT_OK && got[0] == 30 && got[7] == 240);
    CHECK(tt_get(p, small, got, 4) == TT_OK && got[0] == 28 && got[1] == 42 && got[2] == 84 && got[3] == 98);
    CHECK(tt_get(p, x, got, 8) == TT_OK && memcmp(got, numbers, sizeof got) == 0);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* -------------------------------------------------------------------------------------------------- arena */

/* A tape of n scaled copies of x (rows, cols), all of which are kept. */
static tt_tape *copies(tt_context *ctx, int64_t rows, int64_t cols, int n, tt_value *root)
{
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, rows, cols);
    for (int k = 0; k < n; k++) {
        *root = tt_scale(t, x, 2);
        tt_name(t, *root, "copy.%d", k);
        tt_output(t, *root);
    }
    return t;
}

/* Sizes whose products or sums do not fit 64 bits are refused by name, and never wrap into a plan that a
   budget lets pass. */
TEST(sizes_beyond_64_bits)
{
    static const int64_t inputs[][2] = {
        {(int64_t)1 << 31, (int64_t)1 << 31}, {INT64_MAX, INT64_MAX}, {INT64_MAX, 1}, {1, INT64_MAX},
        {(int64_t)1 << 32, (int64_t)1 << 32}, {(int64_t)1 << 58, 1}, {1, (int64_t)1 << 47},
        {(int64_t)1 << 24, (int64_t)1 << 23}};
    static const int64_t params[][4] = {
        {65536, 65536, 65536, 65536}, {1 << 15, 1 << 15, 1 << 14, 1 << 14},
        {1 << 12, 1 << 12, 1 << 12, 1 << 11}, {INT64_MAX, 2, 2, 2}, {2, INT64_MAX, INT64_MAX, 2},
        {1, 1, 1, INT64_MAX}};
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options o = tt_compile_options_default();
    tt_value root = {0};
    o.train = false;
    o.memory_budget = 1 << 30;
    for (int k = 0; k < TEST_COUNT(inputs); k++) {
        tt_tape *t = tt_tape_new(ctx);
        CHECK(tt_input(t, "wide", TT_F32, inputs[k][0], inputs[k][1]).id == 0);
        CHECK(tt_tape_status(t) == TT_ERR_SHAPE);
        CHECK_ERROR(ctx, TT_ERR_SHAPE, "'wide': ");
        CHECK_ERROR(ctx, TT_ERR_SHAPE, "are 2^47 elements or more, which no memory holds");
        tt_tape_free(t);
    }
    for (int k = 0; k < TEST_COUNT(params); k++) {
        CHECK(!tt_param_new(ctx, "wide", 4, params[k], zeros));
        CHECK_ERROR(ctx, TT_ERR_SHAPE, "parameter 'wide': with dimension ");
    }
    tt_tape *t = tt_tape_new(ctx);
    CHECK(tt_seq_start(t, "starts", INT64_MAX).id == 0);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "sequence starts 'starts': 9223372036854775807");
    tt_tape_free(t);

    /* Products: operands of 2^32 and 2^32 rows make 2^64 elements, whose bytes would wrap to 0. */
    tt_param *w = matrix(ctx, "w", (int64_t)1 << 32, 1), *table = matrix(ctx, "table", 2, (int64_t)1 << 32);
    for (int k = 0; k < 3; k++) {
        t = tt_tape_new(ctx);
        tt_value ids = tt_input(t, "ids", TT_I32, (int64_t)1 << 32, 1);
        if (k == 0) root = tt_linear(t, tt_input(t, "x", TT_F32, (int64_t)1 << 32, 1), w, NULL);
        if (k == 1) root = tt_embedding(t, ids, table);
        if (k == 2) root = tt_gather_rows(t, tt_param_value(t, table), ids);
        CHECK(root.id == 0 && tt_tape_status(t) == TT_ERR_SHAPE && !tt_compile(t, root, &o));
        CHECK_ERROR(ctx, TT_ERR_SHAPE,
                    k == 0 ? "'linear.0': 4294967296 rows of width 4294967296"
                           : k == 1 ? "'embedding.0'" : "'gather_rows.0'");
        tt_tape_free(t);
    }
    t = tt_tape_new(ctx);
    tt_attention_options heads = tt_attention_options_default(1);
    tt_value q = tt_input(t, "q", TT_F32, 2, 65537);
    CHECK(tt_attention(t, q, q, q, tt_seq_start(t, "starts", 1), &heads).id == 0);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "attention: heads of 65537 columns; at most 65536 are supported");
    tt_tape_free(t);

    /* Sums: 64 tensors of 2^48 bytes are a plan that no budget lets pass; 2^14 of almost 2^49 bytes cannot
       be summed up. */
    static const char *const devices[] = {"cpu", "cuda"};
    for (int k = 0; k < TEST_COUNT(devices); k++) {
        o.device = devices[k];
        o.memory_budget = 1 << 30;
        t = copies(ctx, (int64_t)1 << 23, (int64_t)1 << 23, 64, &root);
        CHECK(!tt_compile(t, root, &o));
        CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs ");
        o.memory_budget = 0;
        tt_program *p = tt_compile(t, root, &o);
        REQUIRE(p != NULL);
        size_t bytes = tt_program_plan(p).bytes;
        CHECK(bytes >= 64 * ((size_t)1 << 48) && bytes < 66 * ((size_t)1 << 48));
        tt_program_free(p);
        tt_tape_free(t);
        t = copies(ctx, (int64_t)1 << 23, ((int64_t)1 << 24) - 1, 1 << 14, &root);
        CHECK(!tt_compile(t, root, &o));
        CHECK_ERROR(ctx, TT_ERR_SHAPE, "the tensors of the program are together 2^62 bytes or more; the "
                    "largest is 'x' f32 (8388608, 16777215)");
        tt_tape_free(t);
    }
    TEST_CLOSE(ctx, &a);
}

TEST(arena_is_the_plan)
{
    for (int k = 0; k < 2 * PRECISIONS; k++) {
        static const net_options with_all = {true, true};
        test_allocator a;
        net n;
        tt_stats stats;
        tt_context *ctx = test_open(&a);
        tt_compile_options c = options_of(&precisions[k % PRECISIONS]);
        c.accumulate = k >= 3;
        if (k < 3) c.update = "backward";
        REQUIRE(random_net(ctx, (uint64_t)(k / 2), with_all, &n));
        tt_program *p = tt_compile(n.t, n.loss, &c);
        REQUIRE(p != NULL);
        tt_plan plan = tt_program_plan(p);
        size_t before = tt_allocated_bytes(ctx);
        long blocks = a.live;
        REQUIRE(tt_allocate(p) == TT_OK);
        CHECK(plan.host_bytes > 0 && plan.host_bytes <= 256); /* settings and results of a step */
        CHECK(a.live == blocks + 2);
        CHECK(tt_allocated_bytes(ctx) - before == plan.bytes + plan.host_bytes);
        long calls = a.calls;
        for (int step = 0; step < 3; step++) {
            CHECK(set_inputs(&n, p, (uint64_t)step) == TT_OK);
            if (c.accumulate)
                CHECK(tt_micro_step(p, &stats) == TT_OK && tt_update(p, 0.01f, &stats) == TT_OK);
            else CHECK(tt_step(p, 0.01f, &stats) == TT_OK);
        }
        CHECK(a.calls == calls); /* nothing is allocated in a step */
        tt_program_free(p);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
}

/* ------------------------------------------------------------------------------------------------- budget */

/* What all choices of a small network need and cost: each configuration, with each set of values to compute
   again and with nothing computed again. */
typedef struct menu { int items, n; size_t *bytes; double *extra, *seconds, flops; } menu;

static void free_menu(menu *m) { free(m->bytes), free(m->extra), free(m->seconds); }

/* A program that is not built yet, and what may change of it. */
static bool open_job(const net *n, const tt_compile_options *o, tt_program *p, tt__chooser *c)
{
    memset(p, 0, sizeof *p);
    p->ctx = n->t->ctx;
    const tt__job job = {p, n->t, n->loss.id, NULL, NULL};
    if (tt__parse_settings(p->ctx, o, &p->settings) != TT_OK) return false;
    *c = tt__chooser_of(&job);
    c->budget = o->memory_budget;
    if (tt__chooser_open(c) == TT_OK) return true;
    tt__chooser_close(c);
    return false;
}

/* Builds a choice and adds it. */
static void add_to_menu(tt__chooser *c, const tt__choice *choice, menu *m)
{
    tt__extent e;
    tt_program *p = c->job.p;
    if (!CHECK(tt__try_build(&c->job, choice, &e) == TT_OK)) return;
    m->bytes[m->n] = e.bytes;
    m->extra[m->n] = tt__flops_of_copies(p->built.t);
    m->seconds[m->n++] = p->built.replay.step.compute + p->built.replay.step.exposed;
}

/* Nothing is in *m, n 0, if the network has more items than `most`, fewer than 2 where these may change, or
   more blocks than 4. */
static void build_menu(const net *n, const tt_compile_options *o, int most, menu *m)
{
    tt_program p;
    tt__chooser c;
    memset(m, 0, sizeof *m);
    if (!open_job(n, o, &p, &c)) return;
    const tt_tape *t = c.front[c.base.zero][c.base.update].t;
    const int zeros = c.zero ? 3 : 1, blocks = c.offload ? c.blocks : 0, outs = c.offload ? 8 : 1;
    static const int halvings[] = {0, TT__ONE_BY_ONE}; /* of the groups that move together */
    const bool groups = c.offload || c.base.offload || c.base.update == TT__UPDATE_HOST;
    const int paces = (c.base.ahead + 1) * (groups ? TEST_COUNT(halvings) : 1);
    const size_t room = (size_t)((1 << c.n % 16) + 1) * 72 * 5 * 2;
    for (int k = 0; k < t->n_code; k++) m->flops += tt__flops_at_capacity(t, &t->code[k]);
    m->items = c.n;
    const bool wanted = (c.n >= 2 || !c.recompute) && c.n <= most && blocks <= 4;
    m->bytes = (size_t *)calloc(room, sizeof *m->bytes);
    m->extra = (double *)calloc(room, sizeof *m->extra);
    m->seconds = (double *)calloc(room, sizeof *m->seconds);
    for (int k = 0; k < zeros * outs * (blocks + 1) && wanted; k++)
        for (int sets = 0; sets <= (c.recompute ? 1 << c.n : 0); sets++)
            for (int pace = 0; pace < paces; pace++) {
                tt__choice choice = c.base;
                choice.ahead = pace % (c.base.ahead + 1);
                choice.halved = halvings[pace / (c.base.ahead + 1)];
                choice.arrivals = false; /* memory that is given up first, for no FLOPs */
                choice.activations = k % (blocks + 1);
                choice.offload = (unsigned)(k / (blocks + 1) % outs) | (choice.activations ? 8u : 0);
                if (c.zero) choice.zero = 1 + k / (blocks + 1) / outs;
                if (!c.offload) choice.offload = c.base.offload, choice.activations = INT_MAX;
                if (c.recompute && sets >> c.n == 0) choice.recompute = TT__RECOMPUTE_CHEAP;
                for (int i = 0; i < c.n; i++) c.drop[c.item[i]] = sets >> i & 1;
                choice.drop = c.drop;
                choice.n_drop = c.front[c.base.zero][c.base.update].forward_values;
                add_to_menu(&c, &choice, m);
            }
    tt__built_free(p.ctx, &p.built);
    tt__chooser_close(&c);
}

/* The least that fits a budget of what the choices cost. */
static double optimum(const menu *m, const double *cost, size_t budget)
{
    double best = INFINITY;
    for (int k = 0; k < m->n; k++) if (m->bytes[k] <= budget && cost[k] < best) best = cost[k];
    return best;
}

/* A few blocks of two linear layers, and some with attention. With 64 rows `per` piece, activations are most
   of the memory. */
static bool random_stack(tt_context *ctx, uint64_t seed, int most, int per, net *n)
{
    uint64_t s = seed * 31 + 7;
    const int blocks = 1 + pick(&s, most);
    const int64_t d = 8 * (1 + pick(&s, 3));
    const tt_attention_options o = tt_attention_options_default(2);
    memset(n, 0, sizeof *n);
    tt_tape *t = n->t = tt_tape_new(ctx);
    const int64_t rows = tt_axis(t, "tokens", per * (2 + pick(&s, 4)));
    n->starts = tt_seq_start(t, "starts", tt_axis(t, "seqs", 2));
    tt_value x = tt_input(t, "x", TT_F32, rows, d);
    for (int k = 0; k < blocks; k++) {
        const int64_t wide = d * (1 + pick(&s, 4));
        const bool attends = blocks < 3 && pick(&s, 2), norm = pick(&s, 2);
        tt_value h = norm ? encoder_norm(t, k, "norm", x, d) : x;
        if (attends) h = tt_attention(t, h, h, encoder_linear(t, k, "v", h, d), n->starts, &o);
        h = encoder_linear(t, k, "up", h, wide);
        h = encoder_linear(t, k, "down", pick(&s, 3) ? tt_gelu(t, h) : tt_tanh(t, h), d);
        x = pick(&s, 4) ? tt_add(t, x, h) : h;
        if (pick(&s, 3)) tt_block_end(t, x);
    }
    n->target = tt_input(t, "target", TT_F32, rows, d);
    n->loss = tt_mean_squared_error(t, encoder_linear(t, blocks, "head", x, d), n->target, n->weights);
    return tt_tape_status(t) == TT_OK;
}

/* Few FLOPs and little bandwidth, so that neither starting ops nor computation is all that counts. */
static tt_costs slow_costs(void)
{
    tt_costs c = tt_costs_default();
    c.product_16 = c.attention_16 = 4e9;
    c.product_f32 = c.attention_f32 = 2e9;
    c.memory = 1e9;
    c.to_host = c.from_host = 3e8;
    c.between_ranks = 6e8;
    c.launch = 1e-6;
    c.meeting = 2e-6;
    return c;
}

/* What is chosen costs at most `margin` more than the best of all, a share of `whole`, and fits. */
static void check_choice(const menu *m, tt_context *ctx, tt_program *p, const tt_compile_options *c,
                         const double *cost, double whole, double margin, double *chosen)
{
    const tt_plan no_plan = {0}, plan = p ? tt_program_plan(p) : no_plan;
    char what[1400];
    const double best = optimum(m, cost, c->memory_budget);
    const double now = cost == m->extra ? plan.extra_flops : plan.compute_seconds + plan.exposed_seconds;
    snprintf(what, sizeof what, "%d items, recompute %s, offload %s, zero %d, budget %zu: cost %g in %zu "
             "bytes, the optimum is %g (%s)", m->items, c->recompute, c->offload ? c->offload : "none",
             c->parallel.zero, c->memory_budget, now / whole, plan.bytes, best / whole,
             p ? "fits" : tt_error(ctx));
    const bool good = p && now <= best + margin * whole && plan.bytes <= c->memory_budget;
    test__check(good, __FILE__, __LINE__, what);
    CHECK(p && p->builds <= 30);
    *chosen = p ? now : INFINITY;
}

TEST(budgets_against_brute_force)
{
    static const net_options with_all = {true, true};
    const int most_programs = 60 / TEST_SWEEP;
    int programs = 0, dropped = 0;
    for (uint64_t seed = 1; programs < most_programs; seed++) {
        test_allocator a;
        net n;
        menu m;
        size_t least = SIZE_MAX, most = 0;
        double before = INFINITY, now;
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        tt_compile_options c = options_of(&precisions[seed % PRECISIONS]);
        c.device = seed % 2 ? "cpu" : "cuda";
        c.accumulate = seed % 5 == 0;
        c.recompute = "budget";
        c.memory_budget = 1;
        const bool made = seed % 4 ? random_stack(ctx, seed, 3, 64, &n) : random_net(ctx, seed, with_all, &n);
        if (made) build_menu(&n, &c, 5, &m);
        else memset(&m, 0, sizeof m);
        for (int k = 0; k < m.n; k++) {
            if (m.bytes[k] < least) least = m.bytes[k];
            if (m.bytes[k] > most) most = m.bytes[k];
        }
        programs += m.n > 0;
        for (int q = -1; q <= 4 && m.n; q++) {
            c.memory_budget = q < 0 ? least - 1 : least + (most - least) / 4 * (size_t)q;
            tt_program *p = tt_compile(n.t, n.loss, &c);
            if (q < 0) {
                CHECK(!p);
                CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs ");
                continue;
            }
            check_choice(&m, ctx, p, &c, m.extra, m.flops, 0.006, &now);
            CHECK(now <= before);
            before = now;
            dropped += now > 0;
            tt_program_free(p);
        }
        free_menu(&m);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(dropped * 60 > 50 * most_programs);
}

/* What is recomputed, offloaded and split may all change: seconds are within 1% of the best. */
TEST(seconds_within_a_budget_against_brute_force)
{
    const int most_programs = 60 / (2 * TEST_SWEEP - 1);
    int programs = 0, moved = 0, split = 0, recomputed = 0, refused = 0;
    for (uint64_t seed = 1; programs < most_programs; seed++) {
        test_allocator a;
        net n;
        menu m;
        size_t least = SIZE_MAX, most = 0;
        double now;
        const tt_costs costs = slow_costs();
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        tt_compile_options c = options_of(&precisions[seed % PRECISIONS]);
        const bool ranks = seed % 6 == 0;
        c.device = ranks ? "cuda*2" : seed % 3 ? "cuda" : "cpu";
        if (ranks) c.parallel.zero = TT_ZERO_BUDGET;
        c.accumulate = seed % 5 == 0;
        c.recompute = seed % 4 ? "budget" : "cheap";
        c.offload = ranks && seed % 4 ? NULL : "budget";
        c.memory_budget = 1;
        if (seed % 2) c.costs = &costs;
        const bool made = random_stack(ctx, seed, 2, seed % 3 ? 64 : 4, &n);
        memset(&m, 0, sizeof m);
        if (made) build_menu(&n, &c, 3, &m);
        for (int k = 0; k < m.n; k++) {
            if (m.bytes[k] < least) least = m.bytes[k];
            if (m.bytes[k] > most) most = m.bytes[k];
        }
        programs += m.n > 0;
        for (int q = -1; q <= 4 && m.n; q++) {
            c.memory_budget = q < 0 ? least - 1 : least + (most - least) / 4 * (size_t)q;
            tt_program *p = tt_compile(n.t, n.loss, &c);
            if (q < 0) { /* where sets do not help, whole policies may */
                if (p) CHECK(tt_program_plan(p).bytes <= c.memory_budget && p->builds <= 30);
                else CHECK_ERROR(ctx, TT_ERR_BUDGET, "the plan needs ");
                refused += !p;
                tt_program_free(p);
                continue;
            }
            const double best = optimum(&m, m.seconds, c.memory_budget);
            check_choice(&m, ctx, p, &c, m.seconds, best, 0.01, &now);
            moved += p && p->chosen.offload;
            split += p && p->chosen.zero > 1;
            recomputed += p && tt_program_plan(p).extra_flops > 0;
            tt_program_free(p);
        }
        free_menu(&m);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    const bool all = moved > 50 && split > 3 && recomputed > 20 && refused > 40;
    CHECK(all || TEST_SWEEP > 1);
}

static int by_size(const void *a, const void *b)
{
    const size_t x = *(const size_t *)a, y = *(const size_t *)b;
    return (x > y) - (x < y);
}

/* Wherever a choice fits, a choice is found, with candidates for all of them or only for some. */
TEST(budgets_near_the_smallest)
{
    const int most_programs = 24 / TEST_SWEEP;
    int programs = 0, budgets = 0;
    for (uint64_t seed = 1; programs < most_programs; seed++) {
        test_allocator a;
        net n;
        menu m;
        const tt_costs costs = slow_costs();
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        tt_compile_options c = options_of(&precisions[seed % PRECISIONS]);
        const bool ranks = seed % 6 == 0;
        c.device = ranks ? "cuda*2" : seed % 3 ? "cuda" : "cpu";
        if (ranks && seed % 4) c.parallel.zero = TT_ZERO_BUDGET;
        c.accumulate = seed % 5 == 0;
        c.recompute = seed % 7 ? "budget" : "cheap";
        c.offload = seed % 4 == 0 ? "optimizer,gradients" : seed % 4 == 1 ? NULL : "budget";
        c.memory_budget = 1;
        if (seed % 2) c.costs = &costs;
        const bool made = random_stack(ctx, seed, 2, seed % 3 ? 64 : 4, &n);
        memset(&m, 0, sizeof m);
        if (made) build_menu(&n, &c, c.offload ? 3 : 5, &m);
        programs += m.n > 0;
        qsort(m.bytes, (size_t)m.n, sizeof *m.bytes, by_size);
        for (int k = 0, tried = 0; k < m.n && tried < 12; k++) {
            if (k && m.bytes[k] == m.bytes[k - 1]) continue;
            tried++;
            for (int few = 0; few < 2; few++) {
                char what[400];
                test_estimates = few ? 20000 : 400000;
                c.memory_budget = m.bytes[k];
                tt_program *p = tt_compile(n.t, n.loss, &c);
                snprintf(what, sizeof what, "network %d, %d items, device %s, recompute %s, offload %s, "
                         "budget %zu, %s, size %d of %d: %.200s", (int)seed, m.items, c.device, c.recompute,
                         c.offload ? c.offload : "none", c.memory_budget, few ? "some" : "all", tried, m.n,
                         p ? "" : tt_error(ctx));
                test__check(p && tt_program_plan(p).bytes <= c.memory_budget, __FILE__, __LINE__, what);
                budgets++;
                tt_program_free(p);
            }
        }
        test_estimates = 400000;
        free_menu(&m);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(budgets > 10 * most_programs);
}

/* Sets the options that a message names, one after the other; of `offload`, from the second on, what is added
   to *list if they are steps. */
static void take_options(const char *text, bool steps, char list[128], tt_compile_options *o)
{
    static const char *const policies[] = {"none", "cheap", "attention", "blocks", "budget"};
    static const char *const updates[] = {"end", "backward", "host"};
    char word[64];
    int number;
    if (!steps) o->update = "end";
    for (const char *at = text; *at && strncmp(at, "A micro-batch", 13) != 0; at++) {
        if (sscanf(at, "recompute \"%63[^\"]", word) == 1)
            for (int k = 0; k < 5; k++) if (strcmp(word, policies[k]) == 0) o->recompute = policies[k];
        if (sscanf(at, "update \"%63[^\"]", word) == 1)
            for (int k = 0; k < 3; k++) if (strcmp(word, updates[k]) == 0) o->update = updates[k];
        if (sscanf(at, "zero %d", &number) == 1) o->parallel.zero = number;
        if (sscanf(at, "offload \"%63[^\"]", word) != 1) continue;
        if (!steps || strcmp(list, "none") == 0) list[0] = 0;
        if (!strstr(list, word) && strlen(list) + strlen(word) + 2 <= 128)
            strcat(strcat(list, list[0] ? "," : ""), word);
        o->offload = list;
    }
}

/* What a program needs at least by the message that refuses it; 0: there is none. */
static size_t needs(const net *n, tt_compile_options c)
{
    size_t bytes = 0;
    c.memory_budget = 1;
    n->t->ctx->searches = true; /* no advice */
    tt_program *p = tt_compile(n->t, n->loss, &c);
    n->t->ctx->searches = false;
    CHECK(!p);
    if (tt_error_code(n->t->ctx) != TT_ERR_BUDGET) return 0; /* options that do not go together */
    CHECK(sscanf(tt_error(n->t->ctx), "the plan needs %zu", &bytes) == 1);
    return bytes;
}

/* The smallest possible, by the message, is no larger than any combination of the options that it names, and
   a program of so many bytes compiles with what the message says of it. */
TEST(the_smallest_possible_is_the_smallest)
{
    static const char *const policies[] = {"none", "cheap", "attention", "blocks"};
    static const char *const updates[] = {"end", "backward", "host"};
    static const char *const devices[] = {"cuda", "cpu", "cuda*2"};
    const int most_programs = (7 + TEST_SWEEP) / TEST_SWEEP;
    int named = 0;
    for (int seed = 1; seed <= most_programs; seed++) {
        test_allocator a;
        net n;
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        tt_compile_options c = options_of(&precisions[seed % 3]), smallest;
        size_t least = SIZE_MAX, said = 0;
        char what[1400], list[128];
        c.device = devices[seed % 3];
        c.accumulate = seed % 4 == 0;
        c.optimizer.clip_norm = seed % 5 == 0;
        c.parallel.zero = seed % 3 == 2 ? seed / 3 % 4 : 1;
        c.update = updates[!c.accumulate && !(c.optimizer.clip_norm > 0) ? seed / 2 % 3 : seed % 2 * 2];
        REQUIRE(random_stack(ctx, (uint64_t)seed, 2, seed % 2 ? 64 : 4, &n));
        tt_compile_options all = c;
        const int zeros = seed % 3 == 2 ? 4 : 1;
        for (int k = 0; k < zeros * 4 * 16 * 3; k++) {
            if (zeros > 1) all.parallel.zero = k % 4;
            all.recompute = policies[k / zeros % 4];
            all.offload = tt__out_lists[k / zeros / 4 % 16];
            all.update = updates[k / zeros / 64];
            if (strcmp(all.update, "host") == 0 && k / zeros / 4 % 2) continue; /* the state is there then */
            const size_t bytes = needs(&n, all);
            if (bytes && bytes < least) least = bytes;
        }
        for (int chooses = 0; chooses < 2; chooses++) {
            if (chooses && seed % 2) c.recompute = "budget";
            if (chooses && seed % 3) c.offload = "budget";
            if (chooses && zeros > 1 && seed % 5) c.parallel.zero = TT_ZERO_BUDGET;
            c.memory_budget = 1;
            CHECK(!tt_compile(n.t, n.loss, &c));
            snprintf(what, sizeof what, "network %d, %s, update %s: %zu; %s", seed, c.device, c.update, least,
                     tt_error(ctx));
            const char *at = strstr(tt_error(ctx), "the smallest possible is ");
            const bool is = at && sscanf(at, "the smallest possible is %zu", &said) == 1;
            test__check(is && said <= least, __FILE__, __LINE__, what);
            if (!is) continue;
            smallest = c;
            const bool steps = strstr(at, "with all of these") != NULL;
            if (chooses && strcmp(c.recompute, "budget") == 0) smallest.recompute = "none";
            if (chooses && c.offload) smallest.offload = NULL;
            strcpy(list, "none");
            take_options(steps ? tt_error(ctx) : strstr(at, " with ") ? at : "", steps, list, &smallest);
            smallest.memory_budget = said;
            tt_program *p = tt_compile(n.t, n.loss, &smallest);
            const bool fits = p && tt_program_plan(p).bytes <= said;
            char why[800];
            snprintf(why, sizeof why, "%.340s; with recompute %s, offload %s, update %s: %.250s", what,
                     smallest.recompute, list, smallest.update, p ? "larger" : tt_error(ctx));
            test__check(fits, __FILE__, __LINE__, why);
            named += steps;
            tt_program_free(p);
        }
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(named > 0);
}

/* The smallest of what may change, by the message that refuses a budget. */
static size_t named_least(const char *message)
{
    size_t bytes = 0;
    const char *at = strstr(message, "at least "), *least = strstr(message, "the smallest possible is ");
    if (at) CHECK(sscanf(at, "at least %zu with ", &bytes) == 1);
    else if (strstr(message, "if more may change")) CHECK(sscanf(message, "the plan needs %zu", &bytes) == 1);
    else CHECK(least && sscanf(least, "the smallest possible is %zu", &bytes) == 1);
    return bytes;
}

/* Whether a budget is refused depends on the smallest alone: every refusal names it, so many bytes are
   enough, one byte less is refused, and no plan within a larger budget is smaller. So are the bytes enough
   that are named with options that may not change. */
TEST(what_is_refused_names_what_fits)
{
    static const shape deep = {"deep", 4, 32, 2, 96, 4, 30, 10, true};
    static const char *const devices[] = {"cuda", "cpu", "cuda*2"}, *const offloads[] = {
        "budget", NULL, "optimizer,gradients,parameters,activations"};
    const int most_programs = 6 / test_every(3);
    int refused = 0, advised = 0, sets = 0;
    test_estimates = 60000; /* for some all candidates, for others a search */
    for (int seed = 0; seed < most_programs; seed++) {
        test_allocator a;
        net n;
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        tt_compile_options c = options_of(&precisions[seed % 4 == 1 ? seed % PRECISIONS : 0]);
        char list[128] = "none", what[1600];
        size_t whole;
        memset(&n, 0, sizeof n);
        if (seed % 3) {
            REQUIRE(random_stack(ctx, (uint64_t)seed + 40, 3, seed % 2 ? 64 : 16, &n));
        } else {
            tt_value logits;
            n.t = tt_tape_new(ctx);
            n.loss = encoder(n.t, &deep, &logits);
            for (int32_t v = 1, sums = 0; v < n.t->n_values; v++)
                if (strncmp(n.t->values[v].name, "add.", 4) == 0 && sums++ % 2 == 0)
                    tt_block_end(n.t, tt__handle(n.t, v));
        }
        c.device = devices[seed / 2 % 3];
        c.recompute = seed % 5 == 4 ? "cheap" : "budget";
        c.offload = seed % 5 == 4 ? "budget" : offloads[seed % 4 % 3];
        c.update = seed % 4 == 3 ? "backward" : "end";
        c.optimizer.clip_norm = 0;
        if (seed / 2 % 3 == 2) c.parallel.zero = seed % 2 ? TT_ZERO_BUDGET : 3;
        c.accumulate = seed % 4 == 2;
        c.memory_budget = (size_t)1 << 40;
        tt_program *p = tt_compile(n.t, n.loss, &c);
        REQUIRE(p != NULL);
        whole = tt_program_plan(p).bytes;
        tt_program_free(p);
        c.memory_budget = 1;
        REQUIRE(!tt_compile(n.t, n.loss, &c) && tt_error_code(ctx) == TT_ERR_BUDGET);
        snprintf(what, sizeof what, "network %d on %s, recompute %s, offload %s, update %s: %.1200s", seed,
                 c.device, c.recompute, c.offload ? c.offload : "none", c.update, tt_error(ctx));
        const size_t least = named_least(tt_error(ctx));
        tt_compile_options other = c;
        char *at = strstr(what, "the smallest possible is ");
        for (int k = 0; k < 6; k++) { /* just refused, just enough, and more */
            c.memory_budget = k < 3 ? least + (size_t)k - 1 : least + (whole - least) / 64 * (size_t)(k * k);
            p = tt_compile(n.t, n.loss, &c);
            const size_t bytes = p ? tt_program_plan(p).bytes : 0;
            const bool no = !p && tt_error_code(ctx) == TT_ERR_BUDGET && named_least(tt_error(ctx)) == least;
            const bool good = k ? p && bytes >= least && bytes <= c.memory_budget : no;
            char text[2400];
            snprintf(text, sizeof text, "%zu bytes: %zu, %.600s; %.1500s", c.memory_budget, bytes,
                     p ? "" : tt_error(ctx), what);
            test__check(good, __FILE__, __LINE__, text);
            tt_program_free(p);
            refused += !p;
        }
        sets += strstr(what, " (of ") != NULL;
        const bool named = at && strstr(at, " with ") != NULL;
        const bool steps = named && strstr(at, "with all of these") != NULL;
        if (named) CHECK(sscanf(at, "the smallest possible is %zu", &other.memory_budget) == 1);
        if (steps && strcmp(other.recompute, "budget") == 0) other.recompute = "none";
        if (steps && other.offload && strcmp(other.offload, "budget") == 0) other.offload = NULL;
        if (steps && other.offload) snprintf(list, sizeof list, "%s", other.offload);
        if (named) take_options(steps ? what : at, steps, list, &other);
        p = named ? tt_compile(n.t, n.loss, &other) : NULL;
        if (named) test__check(p != NULL, __FILE__, __LINE__, what);
        advised += named && other.memory_budget < least;
        tt_program_free(p);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    test_estimates = 400000;
    const bool all = refused >= most_programs && advised >= most_programs / 4 && sets >= most_programs / 4;
    CHECK(all || TEST_SWEEP > 1);
}

/* Groups of what is offloaded are as large as a budget lets them be, down to one parameter at a time; without
   a budget they are not made smaller. */
TEST(groups_that_fit_a_budget)
{
    const size_t each = WIDE * WIDE * 4;
    for (int k = 0; k < 2; k++) {
        perceptron n;
        tt_compile_options o = tt_compile_options_default();
        size_t bytes[2];
        together = 0; /* one at a time */
        for (int large = 0; large < 2; large++) {
            REQUIRE(perceptron_new(&n));
            o.device = k ? "cpu" : "cuda";
            o.optimizer.clip_norm = 1;
            o.offload = "optimizer,gradients,parameters";
            tt_program *p = tt_compile(n.t, n.loss, &o);
            REQUIRE(p != NULL);
            bytes[large] = tt_program_plan(p).bytes;
            CHECK(p->chosen.halved == 0);
            tt_program_free(p);
            if (!large) perceptron_free(&n);
            together = 32L << 20;
        }
        CHECK(bytes[0] + each <= bytes[1]);
        for (int budget = 0; budget < 3; budget++) {
            static const char *const offloads[] = {"optimizer,gradients,parameters", "budget"};
            for (int chosen = 0; chosen < 2; chosen++) {
                o.offload = offloads[chosen];
                o.memory_budget = budget == 0 ? bytes[0] : budget == 1 ? (bytes[0] + bytes[1]) / 2 : bytes[1];
                tt_program *p = tt_compile(n.t, n.loss, &o);
                CHECK(p && tt_program_plan(p).bytes <= o.memory_budget);
                if (p && !chosen) CHECK((p->chosen.halved > 0) == (budget < 2));
                tt_program_free(p);
            }
        }
        perceptron_free(&n);
        together = 4096;
    }
}

/* Candidates that are a quarter of all sets cost little more than the best of all. */
TEST(candidates_against_all_sets)
{
    int programs = 0, compared = 0;
    char what[256];
    for (uint64_t seed = 1; programs < 8; seed++) {
        tt_compile_options o = tt_compile_options_default();
        test_allocator a;
        net n;
        tt_program p[2];
        tt__chooser c[2]; /* with all sets, with some */
        tt_context_options co = test_options(&a);
        co.verify = false;
        tt_context *ctx = open_apart(&co);
        o.recompute = "budget";
        o.memory_budget = 1;
        REQUIRE(random_stack(ctx, seed, 6, 64, &n));
        REQUIRE(open_job(&n, &o, &p[0], &c[0]) && open_job(&n, &o, &p[1], &c[1]));
        const tt_tape *t = c[0].front[c[0].base.zero][0].t;
        double flops = 0;
        for (int k = 0; k < t->n_code; k++) flops += tt__flops_at_capacity(t, &t->code[k]);
        const int items = c[1].n, sets = 1 << (items < 12 ? items : 0);
        const bool some = items >= 8 && items <= 10;
        for (int k = 0; k < 2 && some; k++) {
            test_estimates = (k ? 1 : 4) * sets * (t->n_code + 1);
            c[k].left = test_estimates;
            CHECK(tt__list_candidates(&c[k]) == TT_OK);
            CHECK(k ? c[k].n_list <= sets / 2 : c[k].n_list > sets);
        }
        size_t least = SIZE_MAX;
        for (int k = 0; k < c[0].n_list; k++)
            if (c[0].list[k].bytes < least) least = c[0].list[k].bytes;
        for (int k = 0; k < c[0].n_list; k++) { /* a budget for which set k is best, not among the tightest */
            const tt__candidate *x = &c[0].list[k];
            double best = INFINITY;
            if (tt__is_dominated(&c[0], x) || x->bytes < least + least / 16) continue;
            for (int j = 0; j < c[1].n_list; j++)
                if (c[1].list[j].bytes <= x->bytes && c[1].list[j].flops < best) best = c[1].list[j].flops;
            snprintf(what, sizeof what, "network %d, %d items: %.2f%% more FLOPs in %zu bytes, not %.2f%%",
                     (int)seed, items, 100 * best / flops, x->bytes, 100 * x->flops / flops);
            test__check(best / flops <= x->flops / flops + 0.006, __FILE__, __LINE__, what);
            compared++;
        }
        programs += some;
        tt__chooser_close(&c[0]);
        tt__chooser_close(&c[1]);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(compared > 40);
    test_estimates = 400000;
}

static void say_flag(void *user, const char *name, const char *value, char *to, size_t capacity)
{
    (void)user;
    snprintf(to, capacity, "--%s%s%s", name, value ? "=" : "", value ? value : "");
}

static void say_kilobytes(void *user, size_t bytes, char *to, size_t capacity)
{
    (void)user;
    snprintf(to, capacity, "%zu kB", bytes / 1000);
}

/* 8 layers: more sets than can be tried. */
TEST(budgets_of_a_deep_network)
{
    static const shape deep = {"deep", 8, 64, 4, 256, 8, 50, 10, true};
    test_allocator a;
    tt_context_options co = test_options(&a);
    co.verify = false;
    tt_context *ctx = open_apart(&co);
    tt_tape *t = tt_tape_new(ctx);
    tt_value logits, loss = encoder(t, &deep, &logits);
    tt_compile_options c = tt_compile_options_default();
    tt_plan plan[4];
    char text[512], choice[128];
    const char *const policies[] = {"none", "cheap", "attention", "blocks"};
    test_estimates = 50000;
    for (int k = 0; k < 4; k++) {
        for (int32_t v = 1, sums = 0; v < t->n_values && k == 0; v++)
            if (strncmp(t->values[v].name, "add.", 4) == 0 && sums++ % 2 == 0)
                tt_block_end(t, tt__handle(t, v));
        c.recompute = policies[k];
        tt_program *p = tt_compile(t, loss, &c);
        REQUIRE(p != NULL);
        CHECK(p->builds == 1);
        plan[k] = tt_program_plan(p);
        tt_program_free(p);
    }
    c.recompute = "budget";
    double before = 0;
    for (int q = 0; q <= 6; q++) { /* from all to what whole blocks leave */
        c.memory_budget = plan[0].bytes - (plan[0].bytes - plan[3].bytes) / 6 * (size_t)q;
        tt_program *p = tt_compile(t, loss, &c);
        REQUIRE(p != NULL);
        const tt_plan now = tt_program_plan(p);
        CHECK(now.bytes <= c.memory_budget && p->builds <= 30 && p->builds >= 1);
        CHECK(now.extra_flops >= before && now.extra_flops <= plan[3].extra_flops);
        CHECK(now.extra_flops > 0 ? c.memory_budget < plan[1].bytes : c.memory_budget >= plan[1].bytes);
        before = now.extra_flops;
        tt_plan_text(p, text, sizeof text);
        snprintf(choice, sizeof choice, "  chosen for memory_budget %.1f MB: recompute %s",
                 (double)c.memory_budget / 1e6, q ? "" : "nothing\n");
        CHECK(strstr(text, choice) && (q == 0 || strstr(text, " linear, ") || now.extra_flops == 0));
        tt_program_free(p);
    }
    CHECK(before > 0);
    c.memory_budget = plan[0].persistent_bytes;
    CHECK(!tt_compile(t, loss, &c));
    snprintf(text, sizeof text, "the plan needs %zu bytes, memory_budget is %zu: recompute \"cheap\" makes "
             "it %zu (+0.0%% FLOPs), then recompute \"", plan[0].bytes, c.memory_budget, plan[1].bytes);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, text);
    const tt_wording flags = {"--budget", "A smaller --batch", say_flag, say_kilobytes, NULL};
    ctx->options.wording = flags;
    CHECK(!tt_compile(t, loss, &c));
    snprintf(text, sizeof text, "the plan needs %zu kB, --budget is %zu kB: --recompute=cheap makes it %zu kB "
             "(+0.0%% FLOPs), then --recompute=", plan[0].bytes / 1000, c.memory_budget / 1000,
             plan[1].bytes / 1000);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, text);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, ". A smaller --batch needs less; --precision=bf16-true ");
    CHECK(!strchr(tt_error(ctx), '"') && !strstr(tt_error(ctx), "bytes"));
    test_estimates = 400000;
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* What "budget" chooses for ViT-L/16 within the bytes of fixed options takes no longer than these do. */
TEST(no_fixed_options_beat_a_budget)
{
    static const char *const offloads[] = {"none", "optimizer", "optimizer,parameters",
                                           "optimizer,activations",
                                           "optimizer,gradients,parameters,activations"};
    test_allocator a;
    tt_context_options co = test_options(&a);
    co.verify = false;
    test_estimates = 1200000; /* the library's own */
    for (int k = 0; k < 2 * TEST_COUNT(offloads); k++) {
        if (TEST_SWEEP > 1 && k != 1) continue; /* which needs a second there */
        tt_context *ctx = open_apart(&co);
        tt_vit m;
        tt_vit_config c = tt_vit_config_default("L/16");
        tt_train_options o = tt_train_options_default();
        double fixed = 0;
        c.image_size = 224;
        c.classes = 10;
        o.schedule.kind = TT_CONSTANT;
        o.compile.optimizer.clip_norm = 0;
        o.compile.device = k % 2 ? "cuda*4" : "cuda";
        o.compile.parallel.zero = k % 2 ? 3 : 1;
        o.max_seqs = 64;
        o.compile.recompute = "blocks";
        o.compile.offload = offloads[k / 2];
        REQUIRE(tt_vit_new(ctx, &m, &c) == TT_OK);
        const tt_model model = tt_vit_classifier(&m);
        for (int chosen = 0; chosen < 3; chosen++) { /* nothing, what is computed again, all */
            if (chosen) o.compile.recompute = "budget";
            if (chosen == 2) o.compile.offload = "budget";
            if (chosen == 2 && k % 2) o.compile.parallel.zero = TT_ZERO_BUDGET;
            tt_trainer *t = tt_trainer_new(ctx, &model, &o);
            REQUIRE(t != NULL);
            const tt_plan plan = tt_program_plan(tt_trainer_program(t));
            const double seconds = plan.compute_seconds + plan.exposed_seconds;
            char text[256];
            snprintf(text, sizeof text, "%s, %s: %zu bytes, %.4g s; chosen: %zu bytes, %.4g s, offload %s",
                     o.compile.device, offloads[k / 2], o.compile.memory_budget, fixed, plan.bytes, seconds,
                      plan.offload);
            const bool good = !chosen || (plan.bytes <= o.compile.memory_budget && seconds <= 1.005 * fixed);
            test__check(good, __FILE__, __LINE__, text);
            if (!chosen) fixed = seconds;
            if (!chosen) o.compile.memory_budget = plan.bytes;
            tt_trainer_free(t);
        }
        tt_vit_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    test_estimates = 400000;
}

/* As what_is_refused_names_what_fits, of ViT-L/16: what is named is what larger budgets reach by luck. */
TEST(what_a_large_model_reaches_is_named)
{
    if (TEST_SWEEP > 1) SKIP("it takes a minute there, and smaller programs run the same code");
    test_allocator a;
    tt_context_options co = test_options(&a);
    co.verify = false;
    test_estimates = 1200000; /* the library's own */
    tt_context *ctx = open_apart(&co);
    tt_vit m;
    tt_vit_config c = tt_vit_config_default("L/16");
    tt_train_options o = tt_train_options_default();
    c.image_size = 224;
    o.schedule.kind = TT_CONSTANT;
    o.compile.device = "cuda";
    o.compile.precision = "bf16-true";
    o.max_seqs = 64;
    o.compile.recompute = "budget";
    o.compile.memory_budget = 1;
    REQUIRE(tt_vit_new(ctx, &m, &c) == TT_OK);
    const tt_model model = tt_vit_classifier(&m);
    REQUIRE(!tt_trainer_new(ctx, &model, &o) && tt_error_code(ctx) == TT_ERR_BUDGET);
    const size_t least = named_least(tt_error(ctx));
    for (int k = 0; k < 4; k++) { /* one byte less, so many, some more */
        o.compile.memory_budget = k < 2 ? least - 1 + (size_t)k : least + least / 2000 * (size_t)(k - 1);
        tt_trainer *t = tt_trainer_new(ctx, &model, &o);
        const size_t bytes = t ? tt_program_plan(tt_trainer_program(t)).bytes : 0;
        CHECK(k ? t && bytes >= least && bytes <= o.compile.memory_budget
                : !t && tt_error_code(ctx) == TT_ERR_BUDGET && named_least(tt_error(ctx)) == least);
        tt_trainer_free(t);
    }
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
    test_estimates = 400000;
}

/* Seconds of a step of so many micro-batches. */
static double seconds_on(const tt_plan *plan, int micros)
{
    return plan->compute_seconds + plan->exposed_seconds +
           (micros - 1) * (plan->micro_compute_seconds + plan->micro_exposed_seconds);
}

/* What is computed again costs time in each micro-batch, an optimizer's state that is moved once a step. */
TEST(choices_count_micro_batches)
{
    enum { MANY = 16 };
    test_allocator a;
    tt_context_options co = test_options(&a);
    co.verify = false;
    tt_context *ctx = open_apart(&co);
    tt_plan plan[3]; /* of steps of one micro-batch, and of many; with nothing moved or computed again */
    tt_vit m;
    tt_vit_config c = tt_vit_config_default("S/16");
    tt_train_options o = tt_train_options_default();
    c.classes = 10;
    o.schedule.kind = TT_CONSTANT;
    o.compile.device = "cuda";
    o.max_seqs = 16;
    o.compile.accumulate = true;
    test_estimates = 1200000; /* the library's own */
    REQUIRE(tt_vit_new(ctx, &m, &c) == TT_OK);
    const tt_model model = tt_vit_classifier(&m);
    for (int k = 2; k >= 0; k--) {
        o.compile.recompute = k < 2 ? "budget" : "none";
        o.compile.offload = k < 2 ? "budget" : "none";
        o.compile.memory_budget = k < 2 ? plan[2].bytes / 2 : 0;
        o.compile.parallel.micros = k ? MANY : 0;
        tt_trainer *t = tt_trainer_new(ctx, &model, &o);
        REQUIRE(t != NULL);
        plan[k] = tt_program_plan(tt_trainer_program(t));
        CHECK(k == 2 || plan[k].bytes <= o.compile.memory_budget);
        CHECK(plan[k].micro_compute_seconds > 0 && plan[k].micro_exposed_seconds >= 0);
        CHECK(plan[k].micro_compute_seconds < plan[k].compute_seconds && plan[k].host_seconds == 0);
        tt_trainer_free(t);
    }
    CHECK(seconds_on(&plan[0], 1) < seconds_on(&plan[1], 1));
    CHECK(seconds_on(&plan[1], MANY) < seconds_on(&plan[0], MANY));
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
    test_estimates = 400000;
}

/* How many instructions of a program compute something again; of one op, if >= 0. */
static int copies_of(tt_tape *t, tt_value loss, const char *recompute, int op)
{
    tt_compile_options c = tt_compile_options_default();
    int n = 0;
    c.recompute = recompute;
    tt_program *p = tt_compile(t, loss, &c);
    CHECK(p != NULL);
    for (int k = 0; p && k < p->built.t->n_code; k++)
        n += p->built.t->code[k].again && (op < 0 || p->built.t->code[k].op == op);
    tt_program_free(p);
    return n;
}

TEST(marks_of_values) /* are obeyed whatever the options say */
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    const tt_value none = {0};
    tt_value x = tt_input(t, "x", TT_F32, 8, 16), y = tt_input(t, "y", TT_F32, 8, 16);
    tt_value h = tt_linear(t, x, matrix(ctx, "up", 32, 16), NULL), g = tt_gelu(t, h);
    tt_value down = tt_linear(t, g, matrix(ctx, "down", 16, 32), NULL), z = tt_tanh(t, down);
    tt_value loss = tt_mean_squared_error(t, tt_linear(t, z, matrix(ctx, "out", 16, 16), NULL), y, none);
    CHECK(copies_of(t, loss, "none", -1) == 0);
    CHECK(copies_of(t, loss, "cheap", TT__OP_ACTIVATION) == 1); /* tanh's backward reads what it computes */
    tt_keep(t, g);
    CHECK(copies_of(t, loss, "cheap", -1) == 0 && copies_of(t, loss, "blocks", -1) == 0);
    tt_recompute(t, g); /* the later mark counts */
    CHECK(copies_of(t, loss, "none", -1) == 1 && copies_of(t, loss, "none", TT__OP_ACTIVATION) == 1);
    tt_recompute(t, h); /* both at once */
    CHECK(copies_of(t, loss, "none", -1) == 1 && copies_of(t, loss, "cheap", TT__OP_LINEAR) == 1);
    tt_keep(t, h);
    tt_keep(t, g);
    tt_recompute(t, z); /* from what down is computed of, which the backward does not read */
    CHECK(copies_of(t, loss, "cheap", TT__OP_LINEAR) == 1 && copies_of(t, loss, "cheap", -1) <= 2);
    tt_block_end(t, z); /* has a mark on z change nothing */
    tt_recompute(t, x); /* and inputs are there anyway */
    CHECK(copies_of(t, loss, "none", -1) == 0 && copies_of(t, loss, "blocks", -1) == 0);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

static const test_case tests[] = {
    TEST_CASE(verifier_finds_damage), TEST_CASE(verifier_finds_bad_places),
    TEST_CASE(budgets_against_brute_force), TEST_CASE(seconds_within_a_budget_against_brute_force),
    TEST_CASE(budgets_near_the_smallest), TEST_CASE(the_smallest_possible_is_the_smallest),
    TEST_CASE(what_is_refused_names_what_fits),
    TEST_CASE(groups_that_fit_a_budget), TEST_CASE(candidates_against_all_sets),
    TEST_CASE(budgets_of_a_deep_network), TEST_CASE(no_fixed_options_beat_a_budget),
    TEST_CASE(what_a_large_model_reaches_is_named),
    TEST_CASE(choices_count_micro_batches), TEST_CASE(marks_of_values),
    TEST_CASE(random_networks_replay_bit_for_bit), TEST_CASE(random_networks_have_true_gradients),
    TEST_CASE(verifier_finds_what_is_not_waited_for), TEST_CASE(verifier_finds_bad_groups),
    TEST_CASE(lifetimes_and_places_of_each_space), TEST_CASE(values_in_the_hosts_memory),
    TEST_CASE(work_of_other_streams_ends_at_its_wait),
    TEST_CASE(instructions_that_run_together), TEST_CASE(placement_against_brute_force),
    TEST_CASE(verified_places_against_all_pairs), TEST_CASE(placement_of_merged_and_empty),
    TEST_CASE(plans_of_real_architectures), TEST_CASE(products_of_models_suit_cublaslt),
    TEST_CASE(products_of_one_x), TEST_CASE(products_that_meet), TEST_CASE(launches_that_become_one),
    TEST_CASE(products_of_programs_that_share),
    TEST_CASE(products_that_do_not_join), TEST_CASE(products_among_others),
    TEST_CASE(gradients_updated_in_the_backward),
    TEST_CASE(elementwise_chains_work_in_place),
    TEST_CASE(in_place_spares_what_is_needed), TEST_CASE(arena_is_the_plan), TEST_CASE(sizes_beyond_64_bits),
    TEST_CASE(plans_for_another_device), TEST_CASE(a_plan_has_a_budget_too),
    TEST_CASE(budgets_on_the_hosts_device),
    TEST_CASE(seconds_of_a_plan_by_costs), TEST_CASE(largest_batch_against_brute_force),
    TEST_CASE(reports),
    TEST_CASE(reports_of_a_deep_network), TEST_CASE(names_of_what_works_in_place),
    TEST_CASE(updates_in_the_hosts_memory_are_advised),
    TEST_CASE(updates_in_the_hosts_memory), TEST_CASE(plans_of_updates_in_the_hosts_memory),
    TEST_CASE(numbers_in_names), TEST_CASE(marked_values_go_to_the_hosts_memory),
    TEST_CASE(vit_l16_with_the_host), TEST_CASE(copies_out_are_waited_for_in_their_order),
    TEST_CASE(allocation_failures),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
