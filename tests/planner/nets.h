/* Networks for tests: random ops, stacks of layers, and options. */
#pragma once

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
    c.loss_scale.init = 256; /* a larger scale would skip steps of small networks */
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

/* Opens a context that treats device "cpu" as a device with separate memory, so that plans for "cpu" offload
   like plans for GPUs. */
static tt_context *open_apart(const tt_context_options *o)
{
    tt_context *ctx = tt_open(o);
    if (ctx) ctx->apart = true;
    return ctx;
}

/* ----------------------------------------------------------------------------------------- random networks
   Chains, branches, residuals, views, shared parameters, attention and pooling, chosen by the seed. */

enum { NET_ROWS = 24, NET_SEQS = 4, NET_VOCAB = 11, NET_CLASSES = 5, NET_VALUES = 40 };

typedef struct net {
    tt_tape *t;
    tt_value x, ids, index, starts, labels, target, weights; /* a value with id 0 is absent */
    tt_value loss;
    int width;          /* columns of x and target */
    bool per_sequence;  /* each sequence has one label */
} net;

/* kinks: uses ReLU, at whose kink finite differences are wrong */
typedef struct net_options { bool dropout, kinks; } net_options;

static tt_param *random_matrix(tt_context *ctx, uint64_t *s, int64_t rows, int64_t cols)
{
    char name[64];
    /* Parameters of equal names are shared. */
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

/* Records a random op on `from`, a value of the pool. Returns a value of width d, 2 d or 3 d. */
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

/* Records a pre-norm and a post-norm block over token and position embeddings, with packed qkv and an output
   layer that shares the token embedding. */
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

/* Records network `seed`: 0 is the small transformer, the others are random. */
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
    if (pick(&s, 2)) { /* a view of a parameter: some columns, or rows of half the length */
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
