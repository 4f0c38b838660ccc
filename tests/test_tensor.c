/* Tests of tensor parallelism: layouts, the pass that divides a tape over ranks, layouts that the verifier
   refuses, and gradients of several ranks compared with those of one. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

/* ----------------------------------------------------------------------------------------------- networks */

enum { SEQS = 3, TOKENS = 24, LENGTH = 600, WIDTH = 32, IMAGE = 8 * 8, CLASSES = 5 };

typedef enum net_kind { BERT, DISTIL, VIT, GATED, MIXED, SHARED, TIED, WORDS, NETS } net_kind;
static const char *const net_names[NETS] = {"BERT", "DistilBERT", "ViT", "gated", "mixed", "shared", "tied",
                                            "words"};

typedef struct net {
    net_kind kind;
    tt_context *ctx;
    test_allocator a;
    tt_bert bert;
    tt_vit vit;
    tt_tape *t;
    tt_inputs in;
    tt_value x, target, weights, loss;
    tt_program *p;
} net;

static tt_param *matrix(tt_context *ctx, const char *name, int64_t rows, int64_t cols)
{
    const int64_t dims[2] = {rows, cols};
    tt_init init = {TT_INIT_NORMAL, 0.2f};
    return tt_param_new(ctx, name, 2, dims, init);
}

static tt_param *vector(tt_context *ctx, const char *name, int64_t n, bool ones)
{
    tt_init init = {TT_INIT_NORMAL, 0.1f};
    if (ones) init.kind = TT_INIT_ONES;
    return tt_param_new(ctx, name, 1, &n, init);
}

/* Records a net in which attention and a gated layer read one norm. Then follow a gated layer with dropout
   inside, and a layer that cannot be divided, because its hidden values are an output. */
static tt_value record_gated(net *n)
{
    tt_context *ctx = n->ctx;
    tt_tape *t = n->t;
    const int64_t tokens = tt_axis(t, "tokens", TOKENS), seqs = tt_axis(t, "seqs", SEQS);
    tt_attention_options attention = tt_attention_options_default(4);
    tt_value h[4];
    attention.causal = true;
    attention.dropout = 0.2f;
    attention.alibi = 1; /* ALiBi's slopes depend on the number of heads, which is that of all ranks
                            together */
    attention.window = 6;
    n->x = tt_input(t, "x", TT_F32, tokens, WIDTH);
    n->target = tt_input(t, "target", TT_F32, tokens, WIDTH);
    n->in.seq_start = tt_seq_start(t, "seq_start", seqs);
    tt_value x = tt_add(t, n->x, tt_linear(t, n->x, matrix(ctx, "in", WIDTH, WIDTH), NULL));
    tt_value norm = tt_rmsnorm(t, x, vector(ctx, "norm", WIDTH, true), 1e-5f);
    for (int k = 0; k < 3; k++) {
        static const char *const names[] = {"q", "k", "v"};
        h[k] = tt_linear(t, norm, matrix(ctx, names[k], WIDTH, WIDTH), k == 1 ? NULL :
                         vector(ctx, k ? "v_b" : "q_b", WIDTH, false));
    }
    tt_value o = tt_linear(t, tt_attention(t, h[0], h[1], h[2], n->in.seq_start, &attention),
                           matrix(ctx, "o", WIDTH, WIDTH), vector(ctx, "o_b", WIDTH, false));
    tt_value gate = tt_silu(t, tt_linear(t, norm, matrix(ctx, "gate", 64, WIDTH), NULL));
    tt_value up = tt_linear(t, norm, matrix(ctx, "up", 64, WIDTH), vector(ctx, "up_b", 64, false));
    tt_value down = tt_linear(t, tt_mul(t, gate, up), matrix(ctx, "down", WIDTH, 64), NULL);
    x = tt_add(t, tt_add(t, x, tt_dropout(t, o, 0.1f)), down);
    norm = tt_layernorm(t, x, vector(ctx, "norm2", WIDTH, true), vector(ctx, "norm2_b", WIDTH, false), 1e-5f);
    tt_value wide = tt_gelu(t, tt_linear(t, norm, matrix(ctx, "wide", 64, WIDTH), NULL));
    wide = tt_scale(t, tt_dropout(t, wide, 0.2f), 0.7f);
    tt_param *bias = vector(ctx, "narrow_b", WIDTH, true);
    tt_value narrow = tt_linear(t, wide, matrix(ctx, "narrow", WIDTH, 64), bias);
    x = tt_add(t, x, tt_dropout(t, narrow, 0.1f));
    tt_value kept = tt_relu(t, tt_linear(t, x, matrix(ctx, "kept", WIDTH, WIDTH), NULL));
    tt_output(t, kept);
    x = tt_add(t, x, tt_linear(t, kept, matrix(ctx, "last", WIDTH, WIDTH), NULL));
    return tt_mean_squared_error(t, x, n->target, tt__handle(t, 0));
}

/* Records a layer with a sigmoid inside, which ranks can divide, and a layer with a softmax inside, which
   ranks cannot divide. Ranks may divide the operands of the normalisation, and of the products of two values,
   by rows. */
static tt_value record_mixed(net *n)
{
    tt_context *ctx = n->ctx;
    tt_tape *t = n->t;
    const int64_t tokens = tt_axis(t, "tokens", TOKENS), seqs = tt_axis(t, "seqs", SEQS);
    tt_matmul_options scaled = tt_matmul_options_default(), plain = scaled;
    scaled.scale = 0.5f;
    plain.untransposed = true;
    n->x = tt_input(t, "x", TT_F32, tokens, WIDTH);
    n->target = tt_input(t, "target", TT_F32, tokens, WIDTH);
    n->in.seq_start = tt_seq_start(t, "seq_start", seqs);
    tt_value x = tt_add(t, n->x, tt_linear(t, n->x, matrix(ctx, "in", WIDTH, WIDTH), NULL));
    for (int k = 0; k < 2; k++) {
        tt_value h = tt_normalize(t, x, 1e-3f);
        h = tt_linear(t, h, matrix(ctx, k ? "up.1" : "up.0", 64, WIDTH), NULL);
        h = k ? tt_softmax(t, h) : tt_sigmoid(t, h);
        x = tt_add(t, x, tt_linear(t, h, matrix(ctx, k ? "down.1" : "down.0", WIDTH, 64), NULL));
    }
    tt_value y = tt_normalize(t, x, 1e-3f), shares = tt_softmax(t, tt_matmul(t, y, x, &scaled));
    x = tt_add(t, x, tt_matmul(t, shares, y, &plain));
    return tt_sigmoid_cross_entropy(t, x, n->target, NULL);
}

/* Records four layers. The first norm is applied to whole values and to values that ranks may hold by rows.
   The second norm is applied to two values that ranks may hold by rows. */
static tt_value record_shared(net *n)
{
    tt_context *ctx = n->ctx;
    tt_tape *t = n->t;
    tt_param *w[2], *b[2];
    const int64_t tokens = tt_axis(t, "tokens", TOKENS), seqs = tt_axis(t, "seqs", SEQS);
    n->x = tt_input(t, "x", TT_F32, tokens, WIDTH);
    n->target = tt_input(t, "target", TT_F32, tokens, WIDTH);
    n->in.seq_start = tt_seq_start(t, "seq_start", seqs);
    for (int k = 0; k < 2; k++) {
        w[k] = vector(ctx, k ? "norm2" : "norm", WIDTH, true);
        b[k] = vector(ctx, k ? "norm2_b" : "norm_b", WIDTH, false);
    }
    tt_value x = tt_add(t, n->x, tt_linear(t, n->x, matrix(ctx, "in", WIDTH, WIDTH), NULL));
    for (int k = 0; k < 4; k++) {
        char up[24], down[24];
        snprintf(up, sizeof up, "up.%d", k);
        snprintf(down, sizeof down, "down.%d", k);
        tt_value h = tt_layernorm(t, x, w[k / 2], b[k / 2], 1e-5f);
        h = tt_gelu(t, tt_linear(t, h, matrix(ctx, up, 64, WIDTH), NULL));
        h = tt_linear(t, h, matrix(ctx, down, WIDTH, 64), NULL);
        x = tt_add(t, x, tt_dropout(t, h, 0.1f));
    }
    return tt_mean_squared_error(t, x, n->target, tt__handle(t, 0));
}

/* Records a language model. Either its head shares the table of words, whose gradient then sums both uses. Or
   the head has another table, whose number of rows is no multiple of 4. */
static tt_value record_words(net *n)
{
    tt_context *ctx = n->ctx;
    tt_tape *t = n->t;
    const int64_t tokens = tt_axis(t, "tokens", 2 * LENGTH); /* large enough for a loss in chunks */
    tt_attention_options attention = tt_attention_options_default(4);
    tt_cross_entropy_options o = tt_cross_entropy_options_default();
    tt_rotary_options rotary = tt_rotary_options_default(4);
    rotary.size = 2;
    rotary.pairs = n->kind == TIED ? TT_ROTARY_HALVES : TT_ROTARY_NEIGHBOURS;
    attention.causal = true;
    n->in.ids = tt_input(t, "ids", TT_I32, tokens, 1);
    n->target = tt_input(t, "target", TT_I32, tokens, 1);
    n->weights = tt_input(t, "weights", TT_F32, tokens, 1);
    n->in.seq_start = tt_seq_start(t, "seq_start", tt_axis(t, "seqs", SEQS));
    tt_param *words = matrix(ctx, "words", n->kind == TIED ? 52 : 50, WIDTH), *w[4];
    static const char *const names[] = {"q", "k", "v", "o"};
    const int key_heads = n->kind == TIED ? 4 : 2; /* four ranks cannot divide 2 heads */
    for (int k = 0; k < 4; k++)
        w[k] = matrix(ctx, names[k], k == 1 || k == 2 ? WIDTH / 4 * key_heads : WIDTH, WIDTH);
    tt_value x = tt_dropout(t, tt_embedding(t, n->in.ids, words), 0.1f);
    tt_value norm = tt_rmsnorm(t, x, vector(ctx, "norm", WIDTH, true), 1e-5f);
    tt_value q = tt_linear(t, norm, w[0], NULL), k = tt_linear(t, norm, w[1], NULL);
    q = tt_rotary(t, q, n->in.ids, &rotary); /* any numbers serve as positions */
    rotary.heads = key_heads;
    k = tt_rotary(t, k, n->in.ids, &rotary);
    tt_value h = tt_attention(t, q, k, tt_linear(t, norm, w[2], NULL), n->in.seq_start, &attention);
    x = tt_add(t, x, tt_linear(t, h, w[3], NULL));
    x = tt_rmsnorm(t, x, vector(ctx, "last_norm", WIDTH, true), 1e-5f);
    if (n->kind == TIED) o.weights = n->weights;
    else o.label_smoothing = 0.1f;
    tt_param *head = n->kind == TIED ? words : matrix(ctx, "head", 50, WIDTH);
    return tt_cross_entropy(t, tt_linear(t, x, head, vector(ctx, "head_b", n->kind == TIED ? 52 : 50, false)),
                            n->target, &o);
}

static bool record(net *n, net_kind kind)
{
    tt_train_options o = tt_train_options_default();
    tt_bert_config bert = tt_bert_config_default(kind == DISTIL ? TT_DISTILBERT : TT_BERT);
    tt_vit_config vit = tt_vit_config_default("Ti/16");
    memset(n, 0, sizeof *n);
    n->kind = kind;
    tt_context_options co = test_options(&n->a);
    co.threads = 4;
    co.verify = true;
    if (!CHECK((n->ctx = tt_open(&co)) != NULL)) return false;
    n->t = tt_tape_new(n->ctx);
    o.max_seqs = SEQS;
    o.max_tokens = TOKENS;
    bert.vocab_size = 50;
    bert.hidden_size = vit.hidden_size = WIDTH;
    bert.layers = vit.layers = 2;
    bert.heads = vit.heads = 4;
    bert.intermediate_size = vit.intermediate_size = 64;
    bert.max_positions = TOKENS;
    bert.classes = vit.classes = CLASSES;
    bert.initializer_range = vit.initializer_range = 0.2f;
    bert.dropout = bert.attention_dropout = vit.dropout = vit.attention_dropout = 0.2f;
    vit.image_size = 8;
    vit.patch_size = 4;
    vit.channels = 1;
    if (kind >= GATED) {
        n->loss = kind == GATED ? record_gated(n) : kind == MIXED ? record_mixed(n)
                : kind == SHARED ? record_shared(n) : record_words(n);
    } else {
        tt_value logits;
        if (kind == VIT) {
            if (!CHECK(tt_vit_new(n->ctx, &n->vit, &vit) == TT_OK)) return false;
            n->in = tt_image_inputs(n->t, &o, 5, IMAGE);
            logits = tt_vit_logits(&n->vit, n->t, &n->in);
        } else {
            if (!CHECK(tt_bert_new(n->ctx, &n->bert, &bert) == TT_OK)) return false;
            n->in = tt_text_inputs(n->t, &o);
            logits = tt_bert_logits(&n->bert, n->t, &n->in);
        }
        n->loss = tt_cross_entropy(n->t, logits, n->in.labels, NULL);
    }
    if (!CHECK(tt_tape_status(n->t) == TT_OK)) CHECK_ERROR(n->ctx, TT_OK, "a tape");
    return n->loss.id != 0;
}

static void close_net(net *n)
{
    tt_program_free(n->p);
    tt_tape_free(n->t);
    if (n->kind == VIT) tt_vit_free(&n->vit);
    else if (n->kind < GATED) tt_bert_free(&n->bert);
    TEST_CLOSE(n->ctx, &n->a);
}

/* Sets a micro-batch of `seqs` sequences for a data rank. short_one: each sequence has one token, so that
   some tensor ranks have no rows. */
static void set_inputs(net *n, int rank, int batch, int seqs, bool short_one)
{
    static float x[(TOKENS + 1) * WIDTH];
    int32_t start[SEQS + 1] = {0}, first[SEQS], labels[SEQS], ids[LENGTH], types[LENGTH], positions[LENGTH];
    uint8_t pixels[SEQS * IMAGE];
    uint64_t state = 77 + (uint64_t)batch;
#ifdef TT_EMULATE
    const int max = TOKENS / SEQS;
#else
    const int max = (n->kind > SHARED ? LENGTH : TOKENS) / SEQS;
#endif
    for (int s = 0; s < seqs; s++) {
        int length = short_one ? 1 : n->kind == VIT ? 5 : max - (int)(test_random(&state) % 8);
        for (int k = 0; k < length; k++) {
            const int row = start[s] + k;
            positions[row] = k;
            ids[row] = (int32_t)(test_random(&state) % 50);
            types[row] = (int32_t)(test_random(&state) % 2);
        }
        first[s] = start[s];
        start[s + 1] = start[s] + length;
        labels[s] = (int32_t)(test_random(&state) % CLASSES);
    }
    for (int k = 0; k < SEQS * IMAGE; k++) pixels[k] = (uint8_t)test_random(&state);
    for (int k = 0; k < (TOKENS + 1) * WIDTH; k++) x[k] = (float)(int32_t)test_random(&state) * 0x1p-31f;
    const int rows = start[seqs];
    CHECK(tt_set_rank(n->p, rank, n->in.seq_start, start, seqs + 1) == TT_OK);
    if (n->kind >= GATED && n->kind <= SHARED) {
        CHECK(tt_set_rank(n->p, rank, n->x, x, rows) == TT_OK);
        CHECK(tt_set_rank(n->p, rank, n->target, x + WIDTH, rows) == TT_OK);
        return;
    }
    if (n->kind > SHARED) {
        CHECK(tt_set_rank(n->p, rank, n->in.ids, ids, rows) == TT_OK);
        for (int k = 0; k < rows; k++) ids[k] = k % 7 == 3 ? -100 : (ids[k] * 7 + 3) % 50;
        for (int k = 0; k < rows; k++) x[k] = 0.5f + fabsf(x[k]);
        CHECK(tt_set_rank(n->p, rank, n->target, ids, rows) == TT_OK);
        if (n->kind == TIED) CHECK(tt_set_rank(n->p, rank, n->weights, x, rows) == TT_OK);
        return;
    }
    CHECK(tt_set_rank(n->p, rank, n->in.first, first, seqs) == TT_OK);
    CHECK(tt_set_rank(n->p, rank, n->in.labels, labels, seqs) == TT_OK);
    CHECK(tt_set_rank(n->p, rank, n->in.positions, positions, rows) == TT_OK);
    if (n->kind == VIT) CHECK(tt_set_rank(n->p, rank, n->in.pixels, pixels, seqs) == TT_OK);
    else CHECK(tt_set_rank(n->p, rank, n->in.ids, ids, rows) == TT_OK);
    if (n->kind == BERT) CHECK(tt_set_rank(n->p, rank, n->in.types, types, rows) == TT_OK);
}

static tt_compile_options options_of(const char *device, int tensor, bool sequence)
{
    tt_compile_options o = tt_compile_options_default();
    o.device = device;
    o.parallel.tensor = tensor;
    o.parallel.sequence = sequence;
    o.accumulate = true;
    o.optimizer.kind = TT_SGD; /* Adam takes full steps even where gradients are only rounding */
    o.optimizer.momentum = 0.9f;
    return o;
}

/* ---------------------------------------------------------------------------------------------- gradients */

enum { FLOATS = 60000 };
typedef struct trained { float gradient[FLOATS], value[FLOATS]; double loss, norm; } trained;

/* Checks that every persistent storage that is replicated over tensor ranks has equal bits on each rank. */
static void check_replicas(const net *n)
{
    static float a[FLOATS], b[FLOATS];
    const tt_tape *t = n->p->built.t;
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__tape_value *x = &t->values[v];
        const bool stays = x->persistent && x->base == v && x->storage != TT__STEP;
        for (int r = 0; r < n->p->settings.group->ranks && stays && x->part.split == TT__WHOLE; r++) {
            const int first = r - r % n->p->arena->tensor;
            const tt__mat m = tt__resolve(n->p, first, v), other = tt__resolve(n->p, r, v);
            const size_t size = (size_t)(m.rows * m.cols);
            if (!CHECK(size <= FLOATS && other.rows * other.cols == (int64_t)size) || r == first) continue;
            const tt__memory from[] = {{n->p->arena, first, x->space, m.dtype, m.data},
                                       {n->p->arena, r, x->space, m.dtype, other.data}};
            const tt_dtype dtype = m.dtype == TT_U8 ? TT_U8 : TT_F32;
            CHECK(tt__read_memory(&from[0], a, dtype, size) == TT_OK);
            CHECK(tt__read_memory(&from[1], b, dtype, size) == TT_OK);
            test__check(memcmp(a, b, size * tt_dtype_bytes(dtype)) == 0, __FILE__, __LINE__, x->name);
        }
    }
}

/* Trains two steps of two micro-batches. Writes the first step's gradients, if wanted, and the parameters at
   the end. */
static bool train(net_kind kind, const tt_compile_options *o, trained *to, bool gradients)
{
    net n;
    tt_stats s;
    int at = 0;
    memset(&s, 0, sizeof s);
    if (!record(&n, kind)) return false;
    n.p = tt_compile(n.t, n.loss, o);
    bool ok = CHECK(n.p != NULL);
    if (!ok) CHECK_ERROR(n.ctx, TT_OK, "a program");
    const int data = ok ? n.p->settings.options.parallel.data : 1;
    for (int step = 0; step < 2 && ok; step++) {
        n.p->poison = true;
        for (int micro = 0; micro < 2 && ok; micro += data) {
            for (int r = 0; r < data; r++)
                set_inputs(&n, r, 2 * step + micro + r, SEQS - micro - r, step && micro + r && kind != VIT);
            tt_status status = o->accumulate ? tt_micro_step(n.p, &s) : tt_step(n.p, 0.01f, &s);
            ok = CHECK(status == TT_OK);
            if (!ok) CHECK_ERROR(n.ctx, TT_OK, "a step");
        }
        for (int k = 0; k < n.ctx->n_params && !step && gradients && ok; at += (int)n.ctx->params[k++]->size)
            ok = CHECK(at + n.ctx->params[k]->size <= FLOATS) &&
                 CHECK(tt_get_gradient(n.p, n.ctx->params[k], to->gradient + at) == TT_OK);
        ok = ok && (!o->accumulate || CHECK(tt_update(n.p, 0.01f, &s) == TT_OK));
        if (!step) to->norm = s.grad_norm;
    }
    to->loss = s.loss;
    at = 0;
    for (int k = 0; k < n.ctx->n_params && ok; at += (int)n.ctx->params[k++]->size)
        ok = CHECK(tt_param_get(n.ctx->params[k], to->value + at) == TT_OK);
    memset(to->gradient + at, 0, sizeof(float) * (size_t)(FLOATS - at));
    memset(to->value + at, 0, sizeof(float) * (size_t)(FLOATS - at));
    if (ok) check_replicas(&n);
    close_net(&n);
    return ok;
}

/* Checks that the elements of each parameter in a and b differ by at most `tolerance * max`. `max` is the
   parameter's largest element in b, but at least a hundredth of b's largest element. `what` names the
   case. */
static void compare(net_kind kind, const float *a, const float *b, double tolerance, const char *what)
{
    net n;
    double largest = 0;
    int at = 0;
    if (!record(&n, kind)) return;
    for (int k = 0; k < FLOATS; k++) largest = fmax(largest, fabs(b[k]));
    for (int k = 0; k < n.ctx->n_params; k++) {
        const tt_param *p = n.ctx->params[k];
        double max = largest * 1e-2, error = 0;
        char text[256];
        for (int64_t e = 0; e < p->size; e++) max = fmax(max, fabs(b[at + e]));
        for (int64_t e = 0; e < p->size; e++)
            if (!(fabs(a[at + e] - b[at + e]) <= error) && !isnan(error)) /* keeps a NaN */
                error = fabs(a[at + e] - b[at + e]);
        snprintf(text, sizeof text, "%s of %s, %s: %g of %g", p->name, net_names[kind], what, error, max);
        test__check(error <= tolerance * max, __FILE__, __LINE__, text);
        at += (int)p->size;
    }
    close_net(&n);
}

static trained one, many;

/* devices: the device names for one rank, for two ranks and for four */
static void gradients(const char *const devices[3])
{
    for (int kind = 0; kind < NETS; kind++) {
        tt_compile_options o = options_of(devices[0], 1, false);
        if (!train((net_kind)kind, &o, &one, true)) return;
        for (int k = 1; k < 3; k++)
            for (int sequence = 0; sequence < 2; sequence++) {
                char what[64];
                o = options_of(devices[k], 2 * k, sequence);
                snprintf(what, sizeof what, "%s%s", devices[k], sequence ? ", sequence" : "");
                if (!train((net_kind)kind, &o, &many, true)) return;
                compare((net_kind)kind, many.gradient, one.gradient, 1e-5, what);
                compare((net_kind)kind, many.value, one.value, 1e-5, what);
                CHECK_NEAR(many.loss, one.loss, 1e-5 * fabs(one.loss));
                CHECK_NEAR(many.norm, one.norm, 1e-5 * one.norm);
            }
    }
}

TEST(gradients_of_ranks)
{
    static const char *const devices[] = {"cpu", "cpu*2", "cpu*4"};
    gradients(devices);
}

TEST(gradients_of_ranks_cuda) /* all ranks are on one device */
{
#ifdef TINYTRAIN_CUDA
    static const char *const devices[] = {"cuda", "cuda:0,0", "cuda:0,0,0,0"};
    gradients(devices);
#else
    SKIP("this build is without TINYTRAIN_CUDA");
#endif
}

TEST(tensor_ranks_offload) /* offload changes no bits */
{
    static const char *const policies[] = {"none", "cheap", "attention", "blocks"};
    for (int kind = 0; kind < NETS; kind++)
        for (int k = 0; k < 4; k++) {
            tt_compile_options o = options_of(k % 2 ? "cpu*4" : "cpu*2", 2, k / 2);
            o.parallel.zero = (k + kind) % 4;
            o.recompute = policies[(k + kind / 2) % 4];
            if (!train((net_kind)kind, &o, &one, true)) return;
            o.offload = k == 3 ? "activations" : "optimizer,gradients,parameters,activations";
            if (!train((net_kind)kind, &o, &many, true)) return;
            CHECK(memcmp(&one, &many, sizeof one) == 0);
        }
}

/* ------------------------------------------------------------------------------------------------ regions */

static int collectives(const tt_program *p, int op, bool backward)
{
    int n = 0;
    for (int k = 0; k < p->built.t->n_code; k++) {
        const tt__instr *i = &p->built.t->code[k];
        const bool of_step = i->segment == TT__EACH_STEP;
        n += i->op == op && i->move.over == TT__OVER_TENSOR && i->backward == backward && !of_step;
    }
    return n;
}

/* Returns how a parameter is divided. `name` may be the last part of the parameter's name. */
static tt__split split_of(const tt_program *p, const char *name)
{
    const tt_tape *t = p->built.t;
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__tape_value *x = &t->values[v];
        const size_t n = strlen(x->name), m = strlen(name);
        const bool is = x->storage == TT__PARAMETER && x->base == v && n >= m;
        if (is && strcmp(x->name + n - m, name) == 0) return x->part.split;
    }
    test__check(false, __FILE__, __LINE__, name);
    return TT__ZEROS;
}

TEST(regions_of_a_network)
{
    static const char *const rows[] = {"q", "k", "v", "gate", "up", "wide"}, *const cols[] = {"o", "down",
        "narrow", "q_b", "v_b", "up_b"}, *const whole[] = {"in", "norm", "norm2", "o_b", "narrow_b", "kept",
        "last"};
    for (int sequence = 0; sequence < 2; sequence++) {
        net n;
        REQUIRE(record(&n, GATED));
        tt_compile_options o = options_of("cpu*2", 2, sequence);
        n.p = tt_compile(n.t, n.loss, &o);
        REQUIRE(n.p != NULL);
        for (int k = 0; k < TEST_COUNT(rows); k++) CHECK(split_of(n.p, rows[k]) == TT__ROWS);
        for (int k = 0; k < TEST_COUNT(cols); k++) CHECK(split_of(n.p, cols[k]) == TT__COLS);
        for (int k = 0; k < TEST_COUNT(whole); k++) CHECK(split_of(n.p, whole[k]) == TT__WHOLE);
        /* Attention and the layer next to it read one norm, so their regions begin together. */
        CHECK(collectives(n.p, TT__OP_ALL_REDUCE, false) == (sequence ? 0 : 3));
        CHECK(collectives(n.p, TT__OP_REDUCE_SCATTER, false) == (sequence ? 3 : 0));
        close_net(&n);
    }
}

/* If a norm is applied to values divided by rows and to whole values, all these values are whole, so that the
   norm's gradient has one layout. */
TEST(regions_that_share_parameters)
{
    for (int frozen = 0; frozen < 2; frozen++) {
        net n;
        int norms = 0;
        REQUIRE(record(&n, SHARED));
        if (frozen) CHECK(tt_param_freeze(n.ctx, "norm*", true) == 4);
        tt_compile_options o = options_of("cpu*2", 2, true);
        n.p = tt_compile(n.t, n.loss, &o);
        REQUIRE(n.p != NULL);
        const tt_tape *t = n.p->built.t;
        for (int k = 0; k < t->n_code; k++) {
            const tt__instr *i = &t->code[k];
            const bool norm = i->op == TT__OP_LAYERNORM && !i->recomputed;
            norms += norm && t->values[i->out[0]].part.split == TT__ROWS;
        }
        CHECK(norms == (frozen ? 3 : 2));
        close_net(&n);
    }
}

static int instructions(const tt_program *p, int op)
{
    int n = 0;
    for (int k = 0; k < p->built.t->n_code; k++) n += p->built.t->code[k].op == op;
    return n;
}

TEST(tables_and_heads)
{
    for (int kind = TIED; kind <= WORDS; kind++)
        for (int ranks = 2; ranks <= 4; ranks += 2) {
            net n;
            const bool divides = kind == TIED || ranks == 2;
            const tt__split expected = divides ? TT__ROWS : TT__WHOLE;
            REQUIRE(record(&n, (net_kind)kind));
            tt_compile_options o = options_of(ranks == 2 ? "cpu*2" : "cpu*4", ranks, false);
            n.p = tt_compile(n.t, n.loss, &o);
            REQUIRE(n.p != NULL);
            CHECK(split_of(n.p, "words") == expected && split_of(n.p, "head_b") == TT__WHOLE);
            if (kind == WORDS) CHECK(split_of(n.p, "head") == expected);
            CHECK(instructions(n.p, TT__OP_MEAN_LOSS) == 1);
            /* Each of two ranks has 600 rows, so linear and loss are one instruction. Each of four ranks has
               300 rows, fewer than a chunk. */
            CHECK(instructions(n.p, TT__OP_LINEAR_CROSS_ENTROPY) == (ranks == 2));
            CHECK(collectives(n.p, TT__OP_ALL_GATHER, false) == divides);
            CHECK(collectives(n.p, TT__OP_REDUCE_SCATTER, true) == divides);
            /* Ranks sum embedded words and attention's projection; four ranks also sum the loss's counts. */
            CHECK(collectives(n.p, TT__OP_ALL_REDUCE, false) == 2 * divides + (ranks == 4));
            close_net(&n);
        }
}

/* Returns the number of a model's regions. *millions: number of divided parameters, in millions. */
static int regions(bool vit, const char *size, int ranks, double *millions)
{
    net n;
    int found = 0;
    tt_train_options o = tt_train_options_default();
    tt_bert_config bert = tt_bert_config_default(TT_DISTILBERT);
    tt_vit_config config = tt_vit_config_default(size);
    tt_compile_options c = options_of(ranks == 2 ? "cpu*2" : "cpu*4", ranks, false);
    memset(&n, 0, sizeof n);
    n.kind = vit ? VIT : DISTIL;
    n.ctx = test_open(&n.a);
    n.t = tt_tape_new(n.ctx);
    o.max_seqs = 4;
    o.max_tokens = 1024;
    if (vit) CHECK(tt_vit_new(n.ctx, &n.vit, &config) == TT_OK);
    else CHECK(tt_bert_new(n.ctx, &n.bert, &bert) == TT_OK);
    n.in = vit ? tt_image_inputs(n.t, &o, 197, (int64_t)3 * 224 * 224) : tt_text_inputs(n.t, &o);
    tt_value logits = vit ? tt_vit_logits(&n.vit, n.t, &n.in) : tt_bert_logits(&n.bert, n.t, &n.in);
    n.loss = tt_cross_entropy(n.t, logits, n.in.labels, NULL);
    n.p = tt_compile(n.t, n.loss, &c);
    *millions = 0;
    if (CHECK(n.p != NULL)) {
        const tt_tape *t = n.p->built.t;
        found = collectives(n.p, TT__OP_ALL_REDUCE, false);
        for (int32_t v = 1; v < t->n_values; v++) {
            const tt__tape_value *x = &t->values[v];
            const bool split = x->storage == TT__PARAMETER && x->base == v && x->part.split;
            if (split) *millions += (double)(x->shape.rows * x->shape.cols * ranks) * 1e-6;
            if (split) CHECK(x->shape.rows * x->shape.cols * ranks == n.ctx->params[x->param]->size);
        }
    }
    close_net(&n);
    return found;
}

TEST(regions_of_real_architectures)
{
    double millions;
    tt__limit_tensor_least = 1000000;
    tt__limit_loss_whole = (int64_t)16 << 20;
    CHECK(regions(false, NULL, 2, &millions) == 12 + 1); /* the table of words is one more region */
    CHECK_NEAR(millions, 42.5 + 23.44, 0.05);
    CHECK(regions(false, NULL, 4, &millions) == 12); /* 4 does not divide the rows of the table */
    CHECK(regions(true, "L/16", 2, &millions) == 48);
    CHECK_NEAR(millions, 302.16, 0.01); /* of 303.3 million parameters */
    CHECK(regions(true, "L/16", 4, &millions) == 48);
    CHECK(regions(true, "S/16", 4, &millions) == 12); /* 4 ranks cannot divide the 6 heads of S/16 */
    CHECK(regions(true, "Ti/16", 2, &millions) == 0); /* the layers are too small to be divided */
    tt__limit_tensor_least = 1;
    CHECK(regions(true, "S/16", 4, &millions) == 12);
    CHECK(regions(true, "S/16", 2, &millions) == 24);
    tt__limit_loss_whole = 0;
}

/* Rows that are gathered for the forward are gathered a second time for the backward, unless recompute is
   "none". A second gather needs less memory than whole rows on each rank. */
TEST(gathered_again)
{
    size_t bytes[2][2] = {{0}};
    for (int sequence = 0; sequence < 2; sequence++)
        for (int cheap = 0; cheap < 2; cheap++) {
            net n;
            REQUIRE(record(&n, VIT));
            tt_compile_options o = options_of("cpu*4", 4, sequence);
            o.recompute = cheap ? "cheap" : "none";
            n.p = tt_compile(n.t, n.loss, &o);
            REQUIRE(n.p != NULL);
            const int gathers = collectives(n.p, TT__OP_ALL_GATHER, true), ends = sequence ? 4 : 0;
            /* without second gathers the backward gathers only the gradient at each region's end */
            CHECK(sequence && cheap ? gathers > ends : gathers == ends);
            bytes[sequence][cheap] = tt_program_plan(n.p).bytes;
            close_net(&n);
        }
    CHECK(bytes[1][0] < bytes[0][0] && bytes[1][1] < bytes[1][0] && bytes[1][1] < bytes[0][1]);
}

/* ------------------------------------------------------------------------------------------- the verifier */

static void refused(const net *n, const char *text, int line)
{
    CHECK(tt__verify(n->p->built.t, "test") == TT_ERR_INTERNAL);
    test__error(n->ctx, TT_ERR_INTERNAL, text, __FILE__, line);
}
#define REFUSED(n, text) refused(n, text, __LINE__)

/* Damages the collectives, biases and divided parameters of a program, one at a time. */
TEST(verifier_finds_wrong_layouts)
{
    static const char *const unsummed = "reads a value that must first be summed over ranks";
    static const char *const misfit = "has operands that are split over ranks in ways that do not fit";
    int sums = 0, biases = 0, params = 0;
    for (int kind = 0; kind < 2 * NETS; kind++) {
        net n;
        REQUIRE(record(&n, (net_kind)(kind / 2)));
        tt_compile_options o = options_of("cpu*2", 2, kind % 2);
        n.p = tt_compile(n.t, n.loss, &o);
        REQUIRE(n.p != NULL);
        tt_tape *t = n.p->built.t;
        CHECK(tt__verify(t, "test") == TT_OK);
        for (int k = 0; k < t->n_code; k++) {
            tt__instr *i = &t->code[k];
            const tt__instr intact = *i;
            if (i->move.over == TT__OVER_TENSOR && (tt__rules_of(i)->phases & TT__REDUCE_PHASE)) {
                const bool joined = k && i[-1].with_next;
                i->op = TT__OP_SCALE; /* copies this rank's part instead of summing */
                i->attr.scale = 1;
                i->with_next = false;
                if (i->in[0] == i->out[0]) *i = intact;
                if (i->in[0] == i->out[0]) i->move.over = TT__OVER_DATA;
                if (joined) i[-1].with_next = false;
                if (t->values[i->out[0]].part.split == TT__ROWS) {
                    const tt__tape_value y = t->values[i->out[0]];
                    i->in[0] = tt__new_view(t, i->in[0], &y.shape, 0, y.ld, "own rows");
                    t->values[i->in[0]].part = y.part;
                }
                REFUSED(&n, unsummed);
                if (joined) i[-1].with_next = true;
                *i = intact;
                sums++;
            }
            if (i->once) {
                i->once = 0;
                REFUSED(&n, misfit);
                if (biases == 0) { /* even with verify off, a pass refuses the bias */
                    n.ctx->options.verify = false;
                    CHECK(tt__pass_tensor_gradients(t) == TT_ERR_INTERNAL);
                    CHECK_ERROR(n.ctx, TT_ERR_INTERNAL, misfit);
                    n.ctx->options.verify = true;
                }
                *i = intact;
                biases++;
            } else if (tt__is(i, TT__PRODUCT) && i->in[2] && !i->backward) {
                i->once = 1u << 2;
                REFUSED(&n, misfit);
                *i = intact;
            }
        }
        for (int32_t v = 1; v < t->n_values; v++) {
            tt__tape_value *x = &t->values[v];
            if (x->storage != TT__PARAMETER || x->base != v || !x->part.split) continue;
            const tt__split was = x->part.split;
            x->part.split = was == TT__ROWS ? TT__COLS : TT__ROWS;
            REFUSED(&n, "split");
            x->part.split = TT__WHOLE;
            REFUSED(&n, "split");
            x->part.split = was;
            params++;
        }
        CHECK(tt__verify(t, "test") == TT_OK);
        close_net(&n);
    }
    CHECK(sums > 80 && biases > 20 && params > 80);
}

/* ----------------------------------------------------------------------------------------------- programs */

/* A training with frozen layers, and an evaluation in the training's arena, give on several ranks the logits
   of one rank. */
TEST(frozen_layers_and_evaluation)
{
    static float logits[2][SEQS * CLASSES];
    for (int kind = BERT; kind <= VIT; kind++)
        for (int sequence = 0; sequence < 2; sequence++)
            for (int ranks = 1; ranks <= 4; ranks *= 2) {
                static const char *const devices[] = {"", "cpu", "cpu*2", "", "cpu*4"};
                net n;
                tt_stats s;
                tt_compile_options o = options_of(devices[ranks], ranks, sequence && ranks > 1);
                REQUIRE(record(&n, (net_kind)kind));
                CHECK(tt_param_freeze(n.ctx, "*layer.0*", true) > 0);
                CHECK(tt_param_freeze(n.ctx, "*embed*", true) > 0);
                n.p = tt_compile(n.t, n.loss, &o);
                REQUIRE(n.p != NULL);
                set_inputs(&n, 0, 0, SEQS, false);
                CHECK(tt_micro_step(n.p, &s) == TT_OK && tt_update(n.p, 0.1f, &s) == TT_OK);
                tt_program *trained = n.p;
                const tt_value root = tt__handle(n.t, n.t->code[n.t->n_code - 1].in[0]);
                o.share = trained;
                o.train = o.accumulate = false;
                n.p = tt_compile(n.t, root, &o);
                REQUIRE(n.p != NULL);
                CHECK(collectives(n.p, TT__OP_ALL_REDUCE, true) == 0);
                set_inputs(&n, 0, 1, SEQS, false);
                CHECK(tt_run(n.p, &s) == TT_OK);
                CHECK(tt_get(n.p, root, logits[ranks > 1], SEQS * CLASSES) == TT_OK);
                for (int k = 0; k < SEQS * CLASSES; k++) CHECK_NEAR(logits[ranks > 1][k], logits[0][k], 1e-5);
                tt_program_free(trained);
                close_net(&n);
            }
}

static tt_compile_options options_of_precision(int k, const char *device, int tensor, bool sequence)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"};
    tt_compile_options o = options_of(device, tensor, sequence);
    o.precision = precisions[k];
    o.loss_scale.init = 256;
    o.optimizer.kind = TT_ADAMW;
    return o;
}

/* Losses equal those of one rank up to rounding. Recomputation changes no bits. */
TEST(precisions_and_recomputation)
{
    static const char *const policies[] = {"none", "cheap", "attention", "blocks"};
    static const double tolerance[] = {1e-5, 2e-2, 5e-3, 2e-2, 5e-3};
    static trained kept;
    for (int kind = 0; kind < NETS; kind++)
        for (int k = 0; k < 5; k++) {
            if ((kind + k) % test_every(2)) continue;
            tt_compile_options o = options_of_precision(k, "cpu", 1, false);
            if (!train((net_kind)kind, &o, &one, false)) return;
            for (int sequence = 0; sequence < 2; sequence++)
                for (int policy = 0; policy < 4; policy++) {
                    if (policy && (policy + kind + k + sequence) % test_every(3)) continue;
                    o = options_of_precision(k, "cpu*2", 2, sequence);
                    o.recompute = policies[policy];
                    if (!train((net_kind)kind, &o, &many, false)) return;
                    if (policy == 0) kept = many;
                    CHECK(memcmp(kept.value, many.value, sizeof kept.value) == 0);
                    CHECK(kept.loss == many.loss && kept.norm == many.norm);
                    CHECK_NEAR(many.loss, one.loss, tolerance[k] * fabs(one.loss));
                    CHECK_NEAR(many.norm, one.norm, 5 * tolerance[k] * one.norm);
                }
            o = options_of_precision(k, "cpu*2", 2, true);
            o.accumulate = false;
            CHECK(train((net_kind)kind, &o, &many, false));
        }
}

/* With data ranks and tensor ranks, `zero` and a server change no bits. */
TEST(data_and_tensor_ranks)
{
    static trained sums[2];
    for (int kind = 0; kind < NETS; kind++)
        for (int sequence = 0; sequence < 2; sequence++)
            for (int k = 0; k < 12; k++) {
                /* `zero` 4 and 5 stand for a parameter server. */
                const int zero = k % 6, micros = zero == 2 || zero == 3 || zero == 5;
                if (((kind + sequence) % 2 + 2 * ((kind / 2 + k / 6) % 2)) % test_every(4)) continue;
                tt_compile_options o = options_of("cpu*4", 2, sequence);
                o.optimizer.kind = TT_ADAM;
                o.precision = k / 6 ? "bf16-mixed" : "32-true";
                o.parallel.zero = zero < 4 ? zero : zero == 5;
                o.parallel.server = zero == 4;
                o.parallel.reduce_micros = zero == 5;
                if (!train((net_kind)kind, &o, &many, true)) return;
                if (zero == 0 || zero == 2) sums[micros] = many;
                CHECK(memcmp(sums[micros].gradient, many.gradient, sizeof many.gradient) == 0);
                CHECK(memcmp(sums[micros].value, many.value, sizeof many.value) == 0);
                CHECK(sums[micros].loss == many.loss && sums[micros].norm == many.norm);
                if (k) continue;
                o = options_of("cpu", 1, false);
                o.optimizer.kind = TT_ADAM;
                if (!train((net_kind)kind, &o, &one, true)) return;
                compare((net_kind)kind, many.gradient, one.gradient, 1e-5, "2 x 2 ranks");
                CHECK_NEAR(many.loss, one.loss, 1e-5 * fabs(one.loss));
            }
}

/* The blocks of optimizer states of 8 bits are those of a tensor rank's shards: `zero`, offload and updates
   on the host change no bits, and losses are near those of 32 bits. */
TEST(states_of_8_bits)
{
    static trained first;
    tt__limit_state_small = 256;
    for (int kind = 0; kind < NETS; kind++)
        for (int k = 0; k < 6; k++) {
            tt_compile_options o = options_of(k ? "cpu*4" : "cpu*2", 2, kind % 2);
            o.optimizer.kind = kind % 3 ? TT_ADAMW : TT_LION;
            o.parallel.zero = k % 4;
            o.optimizer.state_bits = 8;
            if (k == 4) o.offload = "optimizer";
            if (k == 5) o.update = "host";
            if (!train((net_kind)kind, &o, &many, false)) return;
            if (k < 2) first = many; /* two data ranks sum micro-batches in another order than one */
            const bool micros = k == 2 || k == 3;
            if (!micros) CHECK(memcmp(first.value, many.value, sizeof first.value) == 0 || k == 0);
            o.optimizer.state_bits = 32;
            if (!train((net_kind)kind, &o, &one, false)) return;
            CHECK(memcmp(one.value, many.value, sizeof one.value) != 0);
            CHECK_NEAR(many.loss, one.loss, 1e-2 * fabs(one.loss));
        }
    tt__limit_state_small = 4096;
}

/* A state of 8 bits resumes with equal bits, but not with another number of tensor ranks. */
TEST(states_of_8_bits_resume)
{
    static float value[2][FLOATS];
    static const struct { const char *device; int tensor, zero; bool fits; } rows[] = {
        {"cpu*2", 2, 1, true}, {"cpu*4", 2, 1, true}, {"cpu*4", 2, 3, true}, {"cpu", 1, 1, false},
        {"cpu*2", 1, 1, false}};
    const char *path = test_path(test_folder(), "state");
    tt__limit_state_small = 256;
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        net n;
        tt_stats s;
        REQUIRE(record(&n, SHARED));
        tt_compile_options o = options_of(rows[k].device, rows[k].tensor, false);
        o.optimizer.kind = TT_ADAMW;
        o.optimizer.state_bits = 8;
        o.parallel.zero = rows[k].zero;
        n.p = tt_compile(n.t, n.loss, &o);
        REQUIRE(n.p != NULL);
        for (int step = k ? 1 : 0; step < 2; step++) {
            const tt_status status = k ? tt_program_load(n.p, path) : TT_OK;
            CHECK((status == TT_OK) == rows[k].fits);
            if (status != TT_OK)
                CHECK_ERROR(n.ctx, TT_ERR_STATE, "and, if these are 8, equal parallel.tensor");
            if (status != TT_OK) continue;
            set_inputs(&n, 0, step, SEQS, false);
            CHECK(tt_micro_step(n.p, &s) == TT_OK && tt_update(n.p, 0.01f, &s) == TT_OK);
            if (!k && !step) CHECK(tt_program_save(n.p, path) == TT_OK);
        }
        for (int j = 0, at = 0; j < n.ctx->n_params && rows[k].fits; at += (int)n.ctx->params[j++]->size)
            CHECK(tt_param_get(n.ctx->params[j], value[k > 0] + at) == TT_OK);
        if (k && rows[k].fits && rows[k].zero < 2) CHECK(memcmp(value[0], value[1], sizeof value[0]) == 0);
        close_net(&n);
    }
    tt__limit_state_small = 4096;
}

/* Updates in the backward change no bits, for shards over tensor ranks, also if data ranks divide the shards
   again. */
TEST(updates_in_the_backward)
{
    static trained end;
    for (int kind = 0; kind < NETS; kind++)
        for (int sequence = 0; sequence < 2; sequence++)
            for (int data = 0; data < 2; data++) { /* data: whether two data ranks divide the shards again */
                const int zero = data ? (kind + 2 * sequence) % 4 : -1;
                tt_compile_options o = options_of(data ? "cpu*4" : "cpu*2", 2, sequence);
                o.optimizer.kind = (kind + zero) % 2 ? TT_ADAMW : TT_SGD;
                o.precision = (kind + zero) % 3 ? "bf16-true" : "32-true";
                o.accumulate = false;
                o.parallel.zero = data ? zero : 0;
                if (!train((net_kind)kind, &o, &end, false)) return;
                o.update = "backward";
                if (!train((net_kind)kind, &o, &many, false)) return;
                CHECK(memcmp(end.value, many.value, sizeof many.value) == 0);
                CHECK(end.loss == many.loss && end.norm == many.norm);
            }
}

/* ----------------------------------------------------------------------------------- programs that share */

/* Returns the result of the instruction that is number `at` among those of an op. */
static tt_value result_of(const net *n, int op, int at)
{
    const tt_tape *t = n->t;
    for (int k = 0; k < t->n_code; k++)
        if (t->code[k].op == op && at-- == 0) return tt__handle(t, t->code[k].out[0]);
    test__check(false, __FILE__, __LINE__, "no such instruction");
    return tt__handle(t, 0);
}

/* An evaluation that needs a layer whole is refused after a training that divides the layer. A training after
   such an evaluation keeps the layer whole. An evaluation may end before the last layers. */
TEST(programs_split_alike)
{
    static const char *const sentence = "an earlier program shards parameter 'up.0' over the tensor ranks, "
                                        "but this program needs it whole, because here ";
    static const char *const causes[] = {"is an output: compile this program first",
                                         "is needed whole: compile this program first", "2 ops read it"};
    static float x[2][TOKENS * WIDTH];
    for (int cause = 0; cause < 3; cause++) {
        net n;
        REQUIRE(record(&n, SHARED));
        tt_compile_options o = options_of("cpu*2", 2, true);
        n.p = tt_compile(n.t, n.loss, &o);
        REQUIRE(n.p != NULL && split_of(n.p, "up.0") == TT__ROWS && split_of(n.p, "down.0") == TT__COLS);
        const tt_value gelu = result_of(&n, TT__OP_ACTIVATION, 0), norm = result_of(&n, TT__OP_LAYERNORM, 0);
        if (cause == 0) tt_output(n.t, gelu);
        if (cause == 1) tt_output(n.t, tt_rmsnorm(n.t, gelu, vector(n.ctx, "norm3", 64, true), 1e-5f));
        if (cause == 2) tt_output(n.t, tt_linear(n.t, norm, n.ctx->params[5], NULL));
        CHECK(strcmp(n.ctx->params[5]->name, "up.0") == 0);
        o.share = n.p;
        o.train = o.accumulate = false;
        CHECK(tt_compile(n.t, n.loss, &o) == NULL);
        CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, sentence);
        CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, causes[cause]);
        close_net(&n);
    }
    for (int ranks = 1; ranks <= 2; ranks++) { /* with 2 ranks, the evaluation is compiled first */
        net n;
        tt_stats s;
        REQUIRE(record(&n, SHARED));
        tt_compile_options o = options_of(ranks > 1 ? "cpu*2" : "cpu", ranks, ranks > 1), train = o;
        const tt_value gelu = result_of(&n, TT__OP_ACTIVATION, 0), early = result_of(&n, TT__OP_ADD, 2);
        o.train = o.accumulate = false;
        n.t->values[gelu.id].keep = true;
        tt_program *first = tt_compile(n.t, n.loss, &o);
        n.t->values[gelu.id].keep = false;
        REQUIRE(first != NULL);
        train.share = o.share = first;
        tt_program *trained = n.p = tt_compile(n.t, n.loss, &train);
        REQUIRE(trained != NULL);
        if (ranks > 1) CHECK(split_of(trained, "up.0") == TT__WHOLE && split_of(trained, "up.1") == TT__ROWS);
        tt_program *part = tt_compile(n.t, early, &o);
        if (!CHECK(part != NULL)) CHECK_ERROR(n.ctx, TT_OK, "a program without the last layers");
        REQUIRE(part != NULL);
        if (ranks > 1) CHECK(split_of(part, "up.3") == TT__ROWS && split_of(part, "down.3") == TT__COLS);
        set_inputs(&n, 0, 0, SEQS, false);
        CHECK(tt_micro_step(n.p, &s) == TT_OK && tt_update(n.p, 0.1f, &s) == TT_OK);
        n.p = part;
        set_inputs(&n, 0, 1, SEQS, false);
        CHECK(tt_run(n.p, &s) == TT_OK);
        CHECK(tt_get(n.p, early, x[ranks - 1], TOKENS * WIDTH) == TT_OK);
        for (int k = 0; k < 3 * WIDTH; k++)
            CHECK_NEAR(x[ranks - 1][k], x[0][k], 1e-4 * fabs(x[0][k]) + 1e-4);
        tt_program_free(first);
        tt_program_free(trained);
        close_net(&n);
    }
}

/* Three programs share a table that ranks hold by rows. The first computes the tape's loss, the second the
   logits. The third trains, and its root is the loss times 1, so that the program needs whole logits. */
TEST(programs_share_tables)
{
    static float logits[2][LENGTH * 52], value[2][FLOATS];
    double loss = 0;
    for (int kind = TIED; kind <= WORDS; kind++)
        for (int ranks = 1; ranks <= 2; ranks++) {
            net n;
            tt_stats s;
            REQUIRE(record(&n, (net_kind)kind));
            const int rows = kind == TIED ? 52 : 50, k = ranks - 1;
            const tt_value root = tt_scale(n.t, n.loss, 1),
                           y = tt__handle(n.t, n.t->code[n.t->n_code - 2].in[0]);
            tt_compile_options o = options_of(ranks > 1 ? "cpu*2" : "cpu", ranks, ranks > 1), train = o;
            o.train = o.accumulate = false;
            tt_program *p[3] = {tt_compile(n.t, n.loss, &o), NULL, NULL};
            if (!p[0]) CHECK_ERROR(n.ctx, TT_OK, "a program");
            REQUIRE(p[0] != NULL);
            o.share = train.share = p[0];
            p[1] = tt_compile(n.t, y, &o);
            p[2] = tt_compile(n.t, root, &train);
            REQUIRE(p[1] != NULL && p[2] != NULL);
            for (int c = 0; c < 3; c++) CHECK(split_of(p[c], "words") == (k ? TT__ROWS : TT__WHOLE));
            for (int c = 0; c < 3; c++) CHECK(instructions(p[c], TT__OP_MEAN_LOSS) == (k && c == 0));
            n.p = p[2];
            set_inputs(&n, 0, 0, SEQS, false);
            CHECK(tt_micro_step(n.p, &s) == TT_OK && tt_update(n.p, 0.1f, &s) == TT_OK);
            n.p = p[0];
            set_inputs(&n, 0, 1, SEQS, false);
            float mean = 0;
            CHECK(tt_run(n.p, &s) == TT_OK && tt_get(n.p, n.loss, &mean, 1) == TT_OK);
            CHECK_NEAR(mean, s.loss, 1e-6 * fabs(s.loss));
            if (!k) loss = s.loss;
            CHECK_NEAR(s.loss, loss, 1e-5 * fabs(loss));
            n.p = p[1];
            set_inputs(&n, 0, 1, SEQS, false);
            CHECK(tt_run(n.p, &s) == TT_OK && tt_get(n.p, y, logits[k], LENGTH * 52) == TT_OK);
            for (int e = 0; e < 100 * rows; e++) CHECK_NEAR(logits[k][e], logits[0][e], 1e-4);
            for (int c = 0, at = 0; c < n.ctx->n_params; at += (int)n.ctx->params[c++]->size) {
                CHECK(tt_param_get(n.ctx->params[c], value[k] + at) == TT_OK);
                for (int64_t e = at; e < at + n.ctx->params[c]->size; e++)
                    CHECK_NEAR(value[k][e], value[0][e], 1e-5);
            }
            for (int c = 0; c < 2; c++) tt_program_free(p[c]);
            n.p = p[2];
            close_net(&n);
        }
}

/* Without gradients only weight decay moves parameters. Whole parameters and parameters divided by rows are
   rounded with the random numbers of one rank; parameters divided by columns are rounded with other numbers.
   A state of one rank resumes on two. */
TEST(rounding_of_parts)
{
    static float value[2][FLOATS], ones[64 * WIDTH];
    test_log log;
    const char *path = test_path(test_folder(), "state");
    memset(&log, 0, sizeof log);
    for (int k = 0; k < 64 * WIDTH; k++) ones[k] = 1;
    for (int ranks = 1; ranks <= 2; ranks++) {
        net n;
        tt_stats s;
        REQUIRE(record(&n, SHARED));
        n.ctx->options.logger.log = test__keep_log;
        n.ctx->options.logger.user = &log;
        tt_compile_options o = options_of(ranks > 1 ? "cpu*2" : "cpu", ranks, false);
        o.precision = "bf16-true";
        o.optimizer.kind = TT_ADAMW;
        o.optimizer.weight_decay = 0.1f;
        n.p = tt_compile(n.t, tt_scale(n.t, n.loss, 0), &o);
        REQUIRE(n.p != NULL);
        for (int k = 0; k < n.ctx->n_params; k++) CHECK(tt_param_set(n.ctx->params[k], ones) == TT_OK);
        set_inputs(&n, 0, 0, SEQS, false);
        CHECK(tt_micro_step(n.p, &s) == TT_OK && tt_update(n.p, 0.01f, &s) == TT_OK);
        CHECK(s.grad_norm == 0);
        for (int k = 0, at = 0; k < n.ctx->n_params; at += (int)n.ctx->params[k++]->size) {
            const tt_param *p = n.ctx->params[k];
            float *now = value[ranks - 1] + at;
            const bool cols = ranks > 1 && split_of(n.p, p->name) == TT__COLS;
            CHECK(tt_param_get(p, now) == TT_OK);
            bool same = memcmp(now, value[0] + at, sizeof *now * (size_t)p->size) == 0, halves = true;
            for (int64_t e = 0; e < p->size && cols; e++) halves = halves && now[e] == now[e ^ 32];
            test__check(cols ? !halves : same, __FILE__, __LINE__, p->name);
            if (p->ndim > 1) CHECK(memcmp(now, ones, sizeof *now * (size_t)p->size) != 0);
        }
        if (ranks == 1) CHECK(tt_program_save(n.p, path) == TT_OK);
        else CHECK(tt_program_load(n.p, path) == TT_OK);
        CHECK(log.warnings == 0);
        close_net(&n);
    }
}

/* A plan tells how many parameters are divided. If no parameter is divided, the logger gets a warning. */
TEST(plans_say_what_is_split)
{
    for (int split = 0; split < 2; split++) {
        net n;
        test_log log;
        char text[4096], line[160];
        int64_t parted = 0, all = 0;
        REQUIRE(record(&n, DISTIL));
        memset(&log, 0, sizeof log);
        n.ctx->options.logger.log = test__keep_log;
        n.ctx->options.logger.user = &log;
        tt__limit_tensor_least = split ? 1 : 1000000;
        tt_compile_options o = options_of("cpu*2", 2, false);
        n.p = tt_compile(n.t, n.loss, &o);
        tt__limit_tensor_least = 1;
        REQUIRE(n.p != NULL);
        const tt_plan plan = tt_program_plan(n.p);
        for (int k = 0; k < n.ctx->n_params; k++) {
            all += n.ctx->params[k]->size;
            const tt__placement *placement = tt__placement_in(n.p->arena, k);
            if (placement->part.split != TT__WHOLE) parted += n.ctx->params[k]->size;
        }
        CHECK(plan.split_params == parted && (parted > 0) == split && plan.params == all);
        CHECK(log.warnings == !split);
        snprintf(line, sizeof line, "\n  split over the tensor ranks: %.1f of %.1f million parameters\n",
                 1e-6 * (double)parted, 1e-6 * (double)plan.params);
        CHECK(tt_plan_text(n.p, text, sizeof text) < sizeof text && strstr(text, line));
        close_net(&n);
    }
}

static const test_case tests[] = {TEST_CASE(gradients_of_ranks), TEST_CASE(gradients_of_ranks_cuda),
    TEST_CASE(tensor_ranks_offload),
    TEST_CASE(regions_of_a_network), TEST_CASE(regions_that_share_parameters), TEST_CASE(tables_and_heads),
    TEST_CASE(regions_of_real_architectures), TEST_CASE(gathered_again),
    TEST_CASE(verifier_finds_wrong_layouts), TEST_CASE(frozen_layers_and_evaluation),
    TEST_CASE(precisions_and_recomputation), TEST_CASE(data_and_tensor_ranks),
    TEST_CASE(states_of_8_bits), TEST_CASE(states_of_8_bits_resume),
    TEST_CASE(updates_in_the_backward), TEST_CASE(programs_split_alike), TEST_CASE(programs_share_tables),
    TEST_CASE(rounding_of_parts), TEST_CASE(plans_say_what_is_split)};

int main(int argc, char **argv)
{
    tt__limit_tensor_least = 1; /* tiny layers and losses are divided, too */
    tt__limit_loss_whole = 0;
    tt__limit_pieces_from = 256;
    tt__limit_update_from = 1;
    return test_main(argc, argv, tests, TEST_COUNT(tests));
}
