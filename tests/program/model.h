/* A small model on a tape, for tests. */
#pragma once

static tt_init init_of(tt_init_kind kind, float scale)
{
    tt_init init;
    init.kind = kind;
    init.scale = scale;
    return init;
}

static tt_param *param1(tt_context *ctx, const char *name, int64_t n, tt_init init)
{
    return tt_param_new(ctx, name, 1, &n, init);
}

static tt_param *param2(tt_context *ctx, const char *name, int64_t rows, int64_t cols, tt_init init)
{
    int64_t dims[2] = {rows, cols};
    return tt_param_new(ctx, name, 2, dims, init);
}

/* ---- a logger that keeps the last message ---- */

typedef struct captured { int count; tt_log_level level; char id[64], message[512]; } captured;

static void capture(void *user, tt_log_level level, const char *id, const char *message)
{
    captured *c = (captured *)user;
    c->count++;
    c->level = level;
    snprintf(c->id, sizeof c->id, "%s", id);
    snprintf(c->message, sizeof c->message, "%s", message);
}

/* ---- a small classifier: embedding, attention, two linears ---- */

enum { ROWS = 16, SEQS = 3, VOCAB = 9, WIDTH = 8, CLASSES = 3 };

typedef struct model {
    tt_tape *t;
    tt_value ids, starts, labels, logits, loss;
} model;

static bool model_params(tt_context *ctx)
{
    static const char *const names[] = {"embed.weight", "layer.0.weight", "layer.0.bias",
                                        "norm.weight",  "norm.bias",      "layer.1.weight",
                                        "layer.1.bias", "head.weight",    "head.bias"};
    static const int64_t dims[][2] = {
        {VOCAB, WIDTH}, {3 * WIDTH, WIDTH}, {3 * WIDTH, 0}, {WIDTH, 0}, {WIDTH, 0}, {WIDTH, WIDTH},
        {WIDTH, 0}, {CLASSES, WIDTH}, {CLASSES, 0}};
    for (int k = 0; k < TEST_COUNT(names); k++) {
        bool bias = strstr(names[k], "bias") != NULL, norm = strstr(names[k], "norm") != NULL;
        tt_init init = init_of(bias ? TT_INIT_ZEROS : norm ? TT_INIT_ONES : TT_INIT_NORMAL, 0.3f);
        if (!tt_param_find(ctx, names[k]) && !tt_param_new(ctx, names[k], dims[k][1] ? 2 : 1, dims[k], init))
            return false;
    }
    return true;
}

static bool model_record(tt_context *ctx, model *m)
{
#define P(name) tt_param_find(ctx, name)
    tt_tape *t = m->t = tt_tape_new(ctx);
    if (!t) return false;
    int64_t rows = tt_axis(t, "tokens", ROWS), seqs = tt_axis(t, "seqs", SEQS);
    tt_attention_options o = tt_attention_options_default(2);
    o.dropout = 0.1f;
    m->ids = tt_input(t, "ids", TT_I32, rows, 1);
    m->starts = tt_seq_start(t, "starts", seqs);
    m->labels = tt_input(t, "labels", TT_I32, seqs, 1);
    tt_value x = tt_embedding(t, m->ids, P("embed.weight")),
             qkv = tt_linear(t, x, P("layer.0.weight"), P("layer.0.bias"));
    tt_value y = tt_attention(t, tt_slice(t, qkv, 0, WIDTH), tt_slice(t, qkv, WIDTH, WIDTH),
                              tt_slice(t, qkv, 2 * WIDTH, WIDTH), m->starts, &o);
    y = tt_layernorm(t, tt_add(t, x, y), P("norm.weight"), P("norm.bias"), 1e-5f);
    y = tt_dropout(t, tt_gelu(t, tt_linear(t, y, P("layer.1.weight"), P("layer.1.bias"))), 0.1f);
    m->logits = tt_linear(t, tt_mean_pool(t, y, m->starts), P("head.weight"), P("head.bias"));
    m->loss = tt_cross_entropy(t, m->logits, m->labels, NULL);
    return tt_tape_status(t) == TT_OK;
#undef P
}

static tt_status model_set(const model *m, tt_program *p, int batch)
{
    int32_t ids[ROWS], labels[SEQS], starts[SEQS + 1] = {0, 3 + batch % 3, 9, 12 + batch % 5};
    for (int k = 0; k < ROWS; k++) ids[k] = (k * 5 + batch) % VOCAB;
    for (int k = 0; k < SEQS; k++) labels[k] = (ids[starts[k]] + k) % CLASSES;
    tt_status status = tt_set(p, m->ids, ids, starts[SEQS]);
    if (status == TT_OK) status = tt_set(p, m->starts, starts, SEQS + 1);
    if (status == TT_OK) status = tt_set(p, m->labels, labels, SEQS);
    return status;
}

static tt_program *model_compile(const model *m, bool train, const char *precision, bool accumulate)
{
    tt_compile_options c = tt_compile_options_default();
    c.train = train;
    c.precision = precision;
    c.accumulate = accumulate;
    return tt_compile(m->t, m->loss, &c);
}
