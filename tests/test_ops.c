/* Generic tests of the ops, their gradients, and the programs made of them.

   Everything hangs on one table, CASES: a line is a small program. The functions it calls (linear(), gelu(),
   ...) record an op on a tape and, beside it, a plain float64 loop that computes the same. Two tests then run
   every case at every size in every precision and instruction set: `reference` compares results with the
   loops, `gradient` compares gradients with central differences of the loops. A new op is its loop in
   ops/, beside those of its family, and a line in the table, ops/cases.h.

   Tolerances. f32: 2e-6 per op of the longest path, relative to the largest sum of the absolute terms of a
   result. bf16 keeps 8 bits of mantissa, so a rounding errs by at most 2^-9: 2^-8 per op of the path
   (operands and result). f16 keeps 11: 2^-11. Gradients: 2e-5, in bf16 and f16 as many 2^-8 or 2^-11 as there
   are ops on the path to the loss, relative to the largest element of the parameter's gradient plus, for sums
   that cancel, a tenth (16 bits: half) of the largest of all gradients and the largest gradient that enters
   the case. */
#define TINYTRAIN_IMPLEMENTATION
/* So that linear_cross_entropy stands for every linear layer before a cross-entropy, in several chunks. */
#define TT__LOSS_CHUNK 5
#define TT__LOSS_WHOLE 0
#define TT__FP8_FROM 0
#include "tinytrain.h"
#include "test.h"
#ifdef TT_EMULATE
#include "emu_control.h"
#endif
#undef I /* of complex.h, which some <cblas.h> include */

#define FORWARD_F32 2e-6
#define GRADIENT_F32 2e-5

/* The last two, which differ from others in the residual stream only, take half of the cases. */
typedef struct precision_case {
    const char *name, *residual;
    tt_dtype half;
    double rounding;
    bool mixed, halved;
} precision_case;
static const precision_case precisions[] = {
    {"32-true", NULL, TT_F32, 0, false, false},
    {"bf16-mixed", NULL, TT_BF16, 0x1p-8, true, false},
    {"bf16-true", NULL, TT_BF16, 0x1p-8, false, false},
    {"16-mixed", NULL, TT_F16, 0x1p-11, true, false},
    {"16-true", NULL, TT_F16, 0x1p-11, false, false},
    {"bf16-mixed", "f32", TT_BF16, 0x1p-8, true, true},
    {"16-mixed", "16-bit", TT_F16, 0x1p-11, true, true},
};
enum { PRECISIONS = sizeof precisions / sizeof precisions[0] };

/* -------------------------------------------------------------------------------------------------- sizes */

/* What the rows of a value are: an axis of the tape, or just so many. */
enum { FIXED, ROWS, SEQS, PICKED, KINDS };

typedef struct size_set {
    const char *name;
    int heads, head_size, out, vocab, picked;
    int length[8];          /* of the sequences; rows is their sum                                          */
    const char *only;       /* a large size, for the cases of this pattern:                                 */
    bool half;              /* ... and its gradients in the mixed precisions too                            */
} size_set;

static const size_set sizes[] = {
    {"odd", 3, 4, 7, 11, 5, {5, 1, 7}, NULL, false},
    {"ones", 1, 1, 1, 1, 1, {1}, NULL, false},
    {"one_row", 1, 33, 9, 3, 4, {1}, NULL, false},
    {"one_sequence", 3, 5, 17, 6, 10, {9}, NULL, false},
    {"short_sequences", 3, 7, 1, 4, 1, {1, 1, 1, 1, 1, 1}, NULL, false},
    {"head_size_1", 2, 1, 3, 5, 40, {1, 20, 16}, NULL, false},
    {"one_column", 1, 1, 18, 2, 3, {2, 3}, NULL, false},
    {"blocks", 2, 19, 67, 77, 150, {257, 1, 3}, "*", false},
    {"wide", 1, 401, 19, 9, 3, {3, 18}, "*", false},
    {"few_rows", 1, 129, 5, 3, 3, {3}, "*act*", false},
    {"octets", 2, 8, 24, 3, 6, {9, 1, 5}, "linear_gelu_tanh*", true},
    {"octets", 2, 8, 24, 3, 6, {9, 1, 5}, "swiglu*", true},
    {"octets", 2, 8, 24, 3, 6, {9, 1, 5}, "add_row_layer", true},
    {"classes_of_32", 1, 5, 32, 16, 3, {6, 3}, "cross_entropy_linear*", false},
    {"whole_classes_of_rows_kept", 1, 8, 2, 5003, 3, {9, 2}, "cross_entropy_linear", true},
    {"whole_classes_of_rows_read_twice", 1, 8, 2, 5301, 3, {9, 2}, "cross_entropy_linear", true},
    {"norm_of_1500", 1, 1500, 2, 2, 2, {3}, "layernorm", false},
    {"pooled", 1, 5, 3, 2, 3, {9, 20, 27, 3}, "mean_pool*", false},
    {"tall", 1, 11, 1030, 9, 3, {1000, 35}, "linear_residual", false},
    {"causal_picked", 1, 5, 2, 2, 60, {300, 80}, "rows_of_attention_packed", false},
    {"many_picked", 1, 3, 2, 2, 600, {20, 300, 300, 99}, "rows_of_attention_*s*", false},
    {"long_sequence", 1, 2, 1, 2, 1, {4200}, "attention_causal", false},
    {"long_sequence", 1, 2, 1, 2, 1, {4200}, "attention", false},
    {"long_sequence", 1, 2, 1, 2, 1, {4200}, "attention_window*", false},
    {"long_sequence", 1, 2, 1, 2, 1, {4200}, "attention_blocks_of_64", false},
    {"heads_of_6", 2, 6, 2, 2, 5, {5, 3}, "attention*", false},
    {"heads_of_64", 2, 64, 2, 2, 40, {150, 1, 67}, "attention*", true},
    {"short_heads_of_64", 2, 64, 2, 2, 30, {33, 1, 70}, "attention_causal*", true},
    {"long_heads_of_64", 1, 64, 2, 2, 30, {213, 80}, "attention*_dropout", true},
    {"heads_of_80", 1, 80, 2, 2, 60, {131, 3}, "attention_causal_dropout", true},
    {"heads_of_96", 1, 96, 2, 2, 60, {70, 3}, "attention_dropout", true},
    {"heads_of_120", 1, 120, 2, 2, 60, {170, 30}, "attention_causal*", true},
    {"heads_of_32", 2, 32, 2, 2, 50, {140, 9, 2}, "rows_of_attention*", true},
    {"short_heads_of_32", 2, 32, 2, 2, 40, {90, 20}, "attention_grouped*", true},
    {"long_heads_of_32", 1, 32, 2, 2, 40, {290}, "attention_dropout", true},
    {"whole_many_classes", 1, 1, 2, 2100, 2, {7}, "*cross_entropy_*slice", true},
    {"whole_heads_of_16", 2, 16, 2, 2, 4, {70, 3}, "attention_scaled", true},
    {"nine_heads_of_16", 9, 16, 2, 2, 3, {5, 2}, "rotary*", true},
    {"many_ids", 1, 3, 2, 5, 3, {2000, 100}, "embedding", true},
    {"whole_long_blocks", 1, 16, 2, 2, 2, {600, 70}, "attention_blocks_of_64", true},
    {"whole_very_wide", 1, 8200, 2, 2, 2, {3}, "layernorm_same_parameters", true},
    {"heads_of_40", 2, 40, 2, 2, 30, {140, 9}, "attention_causal_dropout", true},
};

#define SIZES ((int)(sizeof sizes / sizeof sizes[0]))

/* -------------------------------------------------------------------------------------- the net of a case */

/* Value operands: inputs; parameters; rows of parameters picked on an axis. */
enum { AS_INPUT, AS_PARAM, AS_GATHERED, MODES };

typedef struct node {
    void (*eval)(struct node *n);
    int in[4], kind, rows, cols, depth;
    double *v, magnitude;   /* (rows, cols); the largest sum of absolute terms                              */
    int32_t *index;         /* (rows) of index inputs                                                       */
    uint8_t *bytes;         /* (rows, cols) of u8 inputs                                                    */
    double a, b, alibi;     /* attributes                                                                   */
    int k, window;
    tt_attention_options blocks; /* of block-sparse attention                                               */
    bool flag, loss, input, leaf, stale;
    uint32_t stream;        /* of random numbers                                                            */
    tt_value t;
    tt_param *param;
} node;

typedef struct net {
    tt_context *ctx;
    tt_tape *tape;
    const size_set *size;
    int mode, count[KINDS], params, n, d, starts;
    bool axes, train, round, has_random, differencing;
    int64_t axis[KINDS];
    uint64_t random, seed, step, micro;
    double upstream, gain; /* the largest gradient that enters the case (0: unknown); factors of its scales */
    node nodes[128];
} net;

static net *g; /* the net that is being built or evaluated */

static int new_node(void (*eval)(node *), int kind, int rows, int cols, int a, int b, int c)
{
    node *n = &g->nodes[++g->n]; /* node 0 is "none" */
    memset(n, 0, sizeof *n);
    n->eval = eval;
    n->in[0] = a; n->in[1] = b; n->in[2] = c;
    n->kind = kind; n->rows = rows; n->cols = cols;
    for (int k = 0; k < 3; k++)
        if (g->nodes[n->in[k]].depth >= n->depth) n->depth = g->nodes[n->in[k]].depth + 1;
    n->v = (double *)calloc((size_t)(rows * cols), sizeof(double));
    return g->n;
}

TEST_PLAIN static double uniform(void) /* [-1, 1) */
{
    return (double)test_random(&g->random) / 2147483648.0 - 1;
}

static float number(double scale)
{
    float x = (float)(uniform() * scale);
    return g->round ? tt__from_bf16(tt__to_bf16(x)) : x;
}

static int64_t code(int kind, int rows) { return g->axes && kind ? g->axis[kind] : rows; }

static int leaf(int kind, int rows, int cols, double scale)
{
    int at = new_node(NULL, kind, rows, cols, 0, 0, 0);
    node *n = &g->nodes[at];
    n->leaf = true;
    n->depth = 0;
    for (int k = 0; k < rows * cols; k++) {
        n->v[k] = number(scale);
        if (fabs(n->v[k]) > n->magnitude) n->magnitude = fabs(n->v[k]);
    }
    return at;
}

static int input(int kind, int rows, int cols, double scale)
{
    int at = leaf(kind, rows, cols, scale);
    char name[32];
    snprintf(name, sizeof name, "input%d", at);
    g->nodes[at].t = tt_input(g->tape, name, TT_F32, code(kind, rows), cols);
    g->nodes[at].input = true;
    return at;
}

static int new_param(int ndim, int rows, int cols, double scale)
{
    int at = leaf(FIXED, rows, cols, scale);
    node *n = &g->nodes[at];
    char name[32];
    int64_t dims[2] = {rows, cols};
    tt_init zeros = {TT_INIT_ZEROS, 0};
    float *values = (float *)malloc(sizeof(float) * (size_t)(rows * cols));
    snprintf(name, sizeof name, "param%d", at);
    n->param = tt_param_new(g->ctx, name, ndim, ndim == 1 ? &dims[1] : dims, zeros);
    for (int k = 0; k < rows * cols; k++) values[k] = (float)n->v[k];
    test__check(n->param && tt_param_set(n->param, values) == TT_OK, __FILE__, __LINE__,
                "cannot make a parameter");
    free(values);
    g->params++;
    return at;
}

/* keeps variances */
static int W(int rows, int cols) { return new_param(2, rows, cols, cols > 3 ? sqrt(3.0 / cols) : 1); }
static int B(int n) { return new_param(1, 1, n, 1); }

static int new_index(int kind, int rows, int limit)
{
    int at = new_node(NULL, kind, rows, 1, 0, 0, 0);
    char name[32];
    g->nodes[at].depth = 0;
    g->nodes[at].index = (int32_t *)malloc(sizeof(int32_t) * (size_t)rows);
    for (int k = 0; k < rows; k++)
        g->nodes[at].index[k] = (int32_t)(test_random(&g->random) % (uint32_t)limit);
    snprintf(name, sizeof name, "index%d", at);
    g->nodes[at].t = tt_input(g->tape, name, TT_I32, code(kind, rows), 1);
    g->nodes[at].input = true;
    return at;
}

static int pixels(int images, int size)
{
    int at = new_node(NULL, SEQS, images, size, 0, 0, 0);
    g->nodes[at].depth = 0;
    g->nodes[at].bytes = (uint8_t *)malloc((size_t)(images * size));
    for (int k = 0; k < images * size; k++) g->nodes[at].bytes[k] = (uint8_t)(test_random(&g->random) >> 11);
    g->nodes[at].t = tt_input(g->tape, "pixels", TT_U8, code(SEQS, images), size);
    g->nodes[at].input = true;
    return at;
}

static int I(int kind, int limit) { return new_index(kind, g->count[kind], limit); }

/* A value operand, rows of `kind`. */
static int V(int kind, int cols)
{
    int rows = g->count[kind], at;
    if (g->mode == AS_INPUT) return input(kind, rows, cols, 2);
    at = new_param(2, rows, cols, 2);
    g->nodes[at].t = tt_param_value(g->tape, g->nodes[at].param);
    if (g->mode == AS_GATHERED) {
        int all = new_index(kind, rows, rows);
        for (int k = 0; k < rows; k++) g->nodes[all].index[k] = k;
        g->nodes[at].t = tt_gather_rows(g->tape, g->nodes[at].t, g->nodes[all].t);
    }
    g->nodes[at].kind = kind;
    return at;
}

static int starts(void) /* of the sequences; one input serves a net */
{
    int rows = g->count[SEQS] + 1;
    if (g->starts) return g->starts;
    g->starts = new_node(NULL, FIXED, rows, 1, 0, 0, 0);
    node *n = &g->nodes[g->starts];
    n->depth = 0;
    n->index = (int32_t *)calloc((size_t)rows, sizeof(int32_t));
    for (int s = 1; s < rows; s++) n->index[s] = n->index[s - 1] + g->size->length[s - 1];
    n->t = tt_seq_start(g->tape, "seq_start", g->axes ? g->axis[SEQS] : rows - 1);
    n->input = true;
    return g->starts;
}

/* -------------------------------------------------------------------------- random numbers, as documented */

TEST_PLAIN static void philox(int rounds, const uint32_t counter[4], uint64_t key, uint32_t c[4])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    memcpy(c, counter, 16);
    for (int round = 0; round < rounds; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ k1,
                            (uint32_t)p0};
        memcpy(c, next, 16);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

TEST_PLAIN static uint64_t dropout_key(uint64_t seed, uint64_t step, uint64_t micro, uint32_t stream)
{
    uint32_t u[4];
    const uint32_t high = (uint32_t)(step >> 32) ^ (2 * 0x9E3779B9u);
    const uint32_t counter[4] = {(uint32_t)step, high, stream, (uint32_t)micro};
    philox(10, counter, seed, u);
    return (uint64_t)u[1] << 32 | u[0];
}

/* 0, or 1 / (1 - p): number j % 8 of the 16-bit halves of block {i, j / 8, h, 0} decides. */
TEST_PLAIN static double kept(uint64_t key, uint32_t i, uint32_t j, uint32_t h, double p)
{
    static uint32_t last[3], u[4]; /* the block drawn before */
    static uint64_t last_key;
    uint32_t counter[4] = {i, j / 8, h, 0}, threshold = (uint32_t)floor(65536 * p + 0.5);
    if (key != last_key || memcmp(counter, last, sizeof last) != 0) philox(7, counter, key, u);
    last_key = key;
    memcpy(last, counter, sizeof last);
    uint32_t bits = u[j % 8 / 2] >> (j % 2 * 16) & 0xffff;
    return bits >= threshold ? 65536.0 / (65536.0 - threshold) : 0;
}

TEST_PLAIN static uint64_t node_key(const node *n)
{
    return dropout_key(g->seed, g->step, g->micro, n->stream);
}

/* -------------------------------------------------------------------------------- the ops, as plain loops */

#define IN(k) (&g->nodes[n->in[k]])

TEST_PLAIN static void note(node *n, double x) { if (fabs(x) > n->magnitude) n->magnitude = fabs(x); }

static void record(int at, tt_value t)
{
    node *n = &g->nodes[at];
    n->t = t;
    for (int k = 0; k < g->tape->n_code; k++)
        if (g->tape->code[k].out[0] == t.id) n->stream = g->tape->code[k].random;
}

TEST_PLAIN static void eval_linear(node *n)
{
    const double *x = IN(0)->v, *w = IN(1)->v, *b = n->in[2] ? IN(2)->v : NULL;
    int depth = IN(0)->cols;
    for (int r = 0; r < n->rows; r++)
        for (int c = 0; c < n->cols; c++) {
            double sum = b ? b[c] : 0, size = fabs(sum), part[4] = {0, 0, 0, 0};
            if (g->differencing) { /* fast, without the magnitude */
                int k = 0;
                for (; k + 4 <= depth; k += 4)
                    for (int j = 0; j < 4; j++) part[j] += x[r * depth + k + j] * w[c * depth + k + j];
                for (; k < depth; k++) sum += x[r * depth + k] * w[c * depth + k];
                n->v[r * n->cols + c] = sum + part[0] + part[1] + part[2] + part[3];
                continue;
            }
            for (int k = 0; k < depth; k++) {
                double term = x[r * depth + k] * w[c * depth + k];
                sum += term;
                size += fabs(term);
            }
            n->v[r * n->cols + c] = sum;
            note(n, size);
        }
}

static int linear(int x, int w, int b)
{
    int at = new_node(eval_linear, g->nodes[x].kind, g->nodes[x].rows, g->nodes[w].rows, x, w, b);
    record(at, tt_linear(g->tape, g->nodes[x].t, g->nodes[w].param, g->nodes[b].param));
    return at;
}

TEST_PLAIN static void eval_rows(node *n) /* rows of in[0] by the index in[1] */
{
    for (int r = 0; r < n->rows; r++)
        for (int c = 0; c < n->cols; c++)
            n->v[r * n->cols + c] = IN(0)->v[(IN(1)->index[r] + n->k) * n->cols + c];
    n->magnitude = IN(0)->magnitude;
}

static int embedding(int ids, int table)
{
    int at = new_node(eval_rows, g->nodes[ids].kind, g->nodes[ids].rows, g->nodes[table].cols, table, ids, 0);
    record(at, tt_embedding(g->tape, g->nodes[ids].t, g->nodes[table].param));
    return at;
}

static int embedding_offset(int ids, int table, int offset)
{
    int at = new_node(eval_rows, g->nodes[ids].kind, g->nodes[ids].rows, g->nodes[table].cols, table, ids, 0);
    g->nodes[at].k = offset;
    record(at, tt_embedding_offset(g->tape, g->nodes[ids].t, g->nodes[table].param, offset));
    return at;
}

static int gather_rows(int x, int index)
{
    int at = new_node(eval_rows, g->nodes[index].kind, g->nodes[index].rows, g->nodes[x].cols, x, index, 0);
    record(at, tt_gather_rows(g->tape, g->nodes[x].t, g->nodes[index].t));
    return at;
}

TEST_PLAIN static void eval_layernorm(node *n)
{
    for (int r = 0; r < n->rows; r++) {
        const double *x = IN(0)->v + r * n->cols;
        double mean = 0, variance = 0;
        for (int c = 0; c < n->cols; c++) mean += x[c] / n->cols;
        for (int c = 0; c < n->cols; c++) variance += (x[c] - mean) * (x[c] - mean) / n->cols;
        double rstd = 1 / sqrt(variance + n->a);
        for (int c = 0; c < n->cols; c++) {
            double b = n->in[2] ? IN(2)->v[c] : 0;
            n->v[r * n->cols + c] = (x[c] - mean) * rstd * IN(1)->v[c] + b;
            note(n, (fabs(x[c]) + fabs(mean)) * rstd * fabs(IN(1)->v[c]) + fabs(b));
        }
    }
}

static int layernorm(int x, int w, int b, float eps)
{
    int at = new_node(eval_layernorm, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, w, b);
    g->nodes[at].a = eps;
    record(at, tt_layernorm(g->tape, g->nodes[x].t, g->nodes[w].param, g->nodes[b].param, eps));
    return at;
}

TEST_PLAIN static void eval_rmsnorm(node *n)
{
    for (int r = 0; r < n->rows; r++) {
        const double *x = IN(0)->v + r * n->cols;
        double squares = 0;
        for (int c = 0; c < n->cols; c++) squares += x[c] * x[c] / n->cols;
        for (int c = 0; c < n->cols; c++) {
            n->v[r * n->cols + c] = x[c] / sqrt(squares + n->a) * IN(1)->v[c];
            note(n, n->v[r * n->cols + c]);
        }
    }
}

static int rmsnorm(int x, int w, float eps)
{
    int at = new_node(eval_rmsnorm, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, w, 0);
    g->nodes[at].a = eps;
    record(at, tt_rmsnorm(g->tape, g->nodes[x].t, g->nodes[w].param, eps));
    return at;
}

TEST_PLAIN static void eval_activation(node *n)
{
    if (!n->index) n->index = (int32_t *)calloc((size_t)(n->rows * n->cols), sizeof(int32_t));
    for (int k = 0; k < n->rows * n->cols; k++) {
        double x = IN(0)->v[k], y = 0;
        if (!g->differencing) n->index[k] = x > 0;
        if (n->k == TT__ACT_GELU) y = x / 2 * (1 + erf(x / sqrt(2.0)));
        if (n->k == TT__ACT_GELU_TANH)
            y = x / 2 * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
        /* No difference across the kink. */
        if (n->k == TT__ACT_RELU) y = (g->differencing ? n->index[k] : x > 0) ? x : 0;
        if (n->k == TT__ACT_TANH) y = tanh(x);
        if (n->k == TT__ACT_SILU) y = x / (1 + exp(-x));
        n->v[k] = y;
        note(n, n->k == TT__ACT_TANH ? 1 : x);
    }
    note(n, IN(0)->magnitude);
}

static int activation(int x, int kind, tt_value t)
{
    int at = new_node(eval_activation, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, 0, 0);
    g->nodes[at].k = kind;
    record(at, t);
    return at;
}

static int gelu(int x) { return activation(x, TT__ACT_GELU, tt_gelu(g->tape, g->nodes[x].t)); }
static int gelu_tanh(int x) { return activation(x, TT__ACT_GELU_TANH, tt_gelu_tanh(g->tape, g->nodes[x].t)); }
static int relu(int x) { return activation(x, TT__ACT_RELU, tt_relu(g->tape, g->nodes[x].t)); }
static int tanh_(int x) { return activation(x, TT__ACT_TANH, tt_tanh(g->tape, g->nodes[x].t)); }
static int silu(int x) { return activation(x, TT__ACT_SILU, tt_silu(g->tape, g->nodes[x].t)); }

TEST_PLAIN static void eval_add(node *n)
{
    for (int k = 0; k < n->rows * n->cols; k++) {
        n->v[k] = IN(0)->v[k] + IN(1)->v[k];
        note(n, fabs(IN(0)->v[k]) + fabs(IN(1)->v[k]));
    }
    note(n, IN(0)->magnitude);
    note(n, IN(1)->magnitude);
}

static int add(int a, int b)
{
    int at = new_node(eval_add, g->nodes[a].kind, g->nodes[a].rows, g->nodes[a].cols, a, b, 0);
    record(at, tt_add(g->tape, g->nodes[a].t, g->nodes[b].t));
    return at;
}

TEST_PLAIN static void eval_add_row(node *n)
{
    for (int k = 0; k < n->rows * n->cols; k++) n->v[k] = IN(0)->v[k] + IN(1)->v[k % n->cols];
    note(n, IN(0)->magnitude + IN(1)->magnitude);
}

static int add_row(int a, int row)
{
    const node *x = &g->nodes[a];
    const int at = new_node(eval_add_row, x->kind, x->rows, x->cols, a, row, 0);
    record(at, tt_add(g->tape, g->nodes[a].t, g->nodes[row].t));
    return at;
}

TEST_PLAIN static void eval_swiglu(node *n)
{
    for (int k = 0; k < n->rows * n->cols; k++) {
        const double gate = IN(0)->v[k], up = IN(1)->v[k];
        n->v[k] = gate / (1 + exp(-gate)) * up;
        note(n, fabs(gate * up));
    }
    note(n, IN(0)->magnitude * IN(1)->magnitude);
}

static int swiglu(int gate, int up)
{
    int at = new_node(eval_swiglu, g->nodes[up].kind, g->nodes[up].rows, g->nodes[up].cols, gate, up, 0);
    record(at, tt_swiglu(g->tape, g->nodes[gate].t, g->nodes[up].t));
    return at;
}

TEST_PLAIN static void eval_mul(node *n)
{
    for (int k = 0; k < n->rows * n->cols; k++) {
        n->v[k] = IN(0)->v[k] * IN(1)->v[k];
        note(n, fabs(n->v[k]));
    }
    note(n, IN(0)->magnitude * IN(1)->magnitude);
}

static int mul(int a, int b)
{
    int at = new_node(eval_mul, g->nodes[a].kind, g->nodes[a].rows, g->nodes[a].cols, a, b, 0);
    record(at, tt_mul(g->tape, g->nodes[a].t, g->nodes[b].t));
    return at;
}

/* By complex numbers. n->k: columns that turn, and one if odd; n->a: 1 for neighbours. */
TEST_PLAIN static void eval_rotary(node *n)
{
    const int size = n->cols / g->size->heads, pairs = (n->k + 1) / 2;
    memcpy(n->v, IN(0)->v, sizeof *n->v * (size_t)(n->rows * n->cols));
    for (int r = 0; r < n->rows; r++)
        for (int h = 0; h < g->size->heads; h++)
            for (int j = 0; j < pairs; j++) {
                const int at = r * n->cols + h * size, one = at + (n->a > 0 ? 2 * j : j);
                const int two = n->a > 0 ? one + 1 : one + pairs;
                double angle = IN(1)->index[r] * (double)(float)pow(10000, -2.0 * j / n->k);
                double x = IN(0)->v[one], y = IN(0)->v[two];
                n->v[one] = x * cos(angle) - y * sin(angle);
                n->v[two] = y * cos(angle) + x * sin(angle);
            }
    note(n, 2 * IN(0)->magnitude);
}

/* x turned by positions below 20, in so many columns of each head, or in all (at most 512). */
static int rotary(int x, int columns, bool neighbours)
{
    int size = g->nodes[x].cols / g->size->heads, index = new_index(g->nodes[x].kind, g->nodes[x].rows, 20);
    int at = new_node(eval_rotary, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, index, 0);
    tt_rotary_options o = tt_rotary_options_default(g->size->heads);
    o.size = g->nodes[at].k = columns && columns < size ? columns : size > 512 ? 512 : size;
    o.pairs = neighbours ? TT_ROTARY_NEIGHBOURS : TT_ROTARY_HALVES;
    g->nodes[at].a = neighbours;
    record(at, tt_rotary(g->tape, g->nodes[x].t, g->nodes[index].t, &o));
    return at;
}

TEST_PLAIN static void eval_scale(node *n)
{
    for (int k = 0; k < n->rows * n->cols; k++) n->v[k] = n->a * IN(0)->v[k];
    n->magnitude = fabs(n->a) * IN(0)->magnitude;
}

static int scale(int x, float s)
{
    int at = new_node(eval_scale, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, 0, 0);
    g->nodes[at].a = s;
    if (fabs((double)s) > g->gain) g->gain = fabs((double)s);
    g->nodes[at].loss = g->nodes[x].loss;
    record(at, tt_scale(g->tape, g->nodes[x].t, s));
    return at;
}

static int cast(int x) /* recorded by passes only */
{
    int at = new_node(eval_scale, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, 0, 0);
    tt__instr i = tt__new_instr(TT__OP_CAST);
    g->nodes[at].a = 1;
    record(at, tt__record(g->tape, i, "v", g->nodes[x].t));
    return at;
}

TEST_PLAIN static void eval_dropout(node *n)
{
    uint64_t key = node_key(n);
    for (int r = 0; r < n->rows; r++)
        for (int c = 0; c < n->cols; c++) {
            n->v[r * n->cols + c] = IN(0)->v[r * n->cols + c] *
                                    (g->train && n->a > 0 ? kept(key, (uint32_t)r, (uint32_t)c, 0, n->a) : 1);
            note(n, n->v[r * n->cols + c]);
        }
    note(n, IN(0)->magnitude);
}

static int dropout(int x, float p)
{
    int at = new_node(eval_dropout, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, 0, 0);
    g->nodes[at].a = p;
    g->has_random |= p > 0;
    record(at, tt_dropout(g->tape, g->nodes[x].t, p));
    return at;
}

/* As transformers' build_alibi_tensor. */
static double alibi_slope(int head, int heads)
{
    const int power = (int)exp2(floor(log2(heads)));
    if (head < power) return pow(exp2(-exp2(-(log2(power) - 3))), head + 1);
    return pow(exp2(-exp2(-(log2(2 * power) - 3))), 2 * (head - power) + 1);
}

static double in_bf16(double x) { return tt__from_bf16(tt__to_bf16((float)x)); }

/* How often row i of a sequence sees row j, by blocks. */
TEST_PLAIN static int times_seen(const tt_attention_options *o, int head, int i, int j, int length)
{
    if (o->block == 0 || length <= o->dense) return 1;
    const int from = i / o->block, to = j / o->block, last = (length - 1) / o->block;
    const bool near = abs(from - to) < 2, global = from == 0 || from == last || to == 0 || to == last;
    int times = near || global;
    for (int k = 0; k < o->listed && from > 0 && from < last && from < o->list_rows; k++)
        times += (o->lists_for_training && !g->train ? 0
                  : o->lists[(head * o->list_rows + from) * o->listed + k]) == to;
    return times;
}

TEST_PLAIN static void eval_attention(node *n)
{
    int heads = n->k, size = n->cols / heads, width = n->cols;
    int key_width = IN(1)->cols, group = width / key_width; /* heads of q that one of k serves */
    const int32_t *start = g->nodes[g->starts].index;
    uint64_t key = node_key(n);
    double *w = (double *)malloc(sizeof(double) * (size_t)n->rows);
    for (int s = 0; s < g->count[SEQS]; s++)
        for (int h = 0; h < heads; h++)
            for (int i = start[s]; i < start[s + 1]; i++) {
                int first = start[s], last = n->flag ? i + 1 : start[s + 1];
                double most = -INFINITY, sum = 0, *out = n->v + i * width + h * size;
                const double slope = n->alibi != 0 ? n->alibi * alibi_slope(h, heads) : 0;
                if (n->window && first < i - n->window + 1) first = i - n->window + 1;
                if (n->window && last > i + n->window) last = i + n->window;
                for (int j = first; j < last; j++) {
                    double dot = 0;
                    const double *q = IN(0)->v + i * width + h * size;
                    const double *k = IN(1)->v + j * key_width + h / group * size;
                    for (int c = 0; c < size; c++) dot += q[c] * k[c];
                    w[j] = dot * n->a - slope * abs(i - j);
                    if (n->blocks.alibi_rounded) {
                        const double falls = in_bf16(in_bf16(alibi_slope(h, heads)) * in_bf16(j - start[s]));
                        w[j] = dot * n->a + n->alibi * falls;
                    }
                    if (w[j] > most) most = w[j];
                }
                for (int j = first; j < last; j++)
                    sum += w[j] = exp(w[j] - most) * times_seen(&n->blocks, h, i - start[s], j - start[s],
                                                                start[s + 1] - start[s]);
                for (int c = 0; c < size; c++) out[c] = 0;
                for (int j = first; j < last; j++) {
                    double weight = w[j] / sum;
                    if (g->train && n->b > 0)
                        weight *= kept(key, (uint32_t)i, (uint32_t)(j - start[s]), (uint32_t)h, n->b);
                    const double *v = IN(2)->v + j * key_width + h / group * size;
                    for (int c = 0; c < size && weight != 0; c++) out[c] += weight * v[c];
                }
            }
    free(w);
    for (int k = 0; k < n->rows * width; k++) note(n, n->v[k]);
    note(n, IN(2)->magnitude);
}

/* q has a head for each `D / heads` columns; k and v may have fewer. `with` has the
   rest. */
static int attention_of(int q, int k, int v, float scaling, float p, const tt_attention_options *with)
{
    int from = starts(), heads = g->nodes[q].cols / g->size->head_size;
    int at = new_node(eval_attention, g->nodes[q].kind, g->nodes[q].rows, g->nodes[q].cols, q, k, v);
    node *n = &g->nodes[at];
    tt_attention_options o = *with;
    n->blocks = o;
    n->flag = o.causal;
    n->window = o.window;
    n->alibi = o.alibi;
    o.heads = heads;
    o.scale = scaling;
    o.dropout = p;
    n->k = heads;
    n->a = scaling != 0 ? scaling : 1 / sqrt((double)(n->cols / heads));
    n->b = p;
    g->has_random |= p > 0;
    record(at, tt_attention(g->tape, g->nodes[q].t, g->nodes[k].t, g->nodes[v].t, g->nodes[from].t, &o));
    return at;
}

static int attention_with(int q, int k, int v, bool causal, float scaling, float p, int window, float alibi)
{
    tt_attention_options o = tt_attention_options_default(1);
    o.causal = causal;
    o.window = window;
    o.alibi = alibi;
    return attention_of(q, k, v, scaling, p, &o);
}

/* Block-sparse attention, the first blocks of a sequence with lists that overlap with what is seen anyway,
   have a block twice, or one that most sequences do not have. */
static int attention_by_blocks(int q, int k, int v, float scaling, float p, int block, int dense, int listed)
{
    enum { LIST_ROWS = 40, LISTS = 9 * LIST_ROWS * 4 };
    static int32_t lists[LISTS];
    tt_attention_options o = tt_attention_options_default(1);
    for (int i = 0; i < LISTS; i++) lists[i] = (i * 7 + i / 5) % 23;
    o.block = block;
    o.dense = dense;
    o.listed = listed;
    o.list_rows = LIST_ROWS;
    o.lists = lists;
    o.lists_for_training = listed == 2;
    return attention_of(q, k, v, scaling, p, &o);
}

static int attention(int q, int k, int v, bool causal, float scaling, float p)
{
    return attention_with(q, k, v, causal, scaling, p, 0, 0);
}

TEST_PLAIN static void eval_mean_pool(node *n)
{
    const int32_t *start = g->nodes[g->starts].index;
    for (int s = 0; s < n->rows; s++)
        for (int c = 0; c < n->cols; c++) {
            double sum = 0;
            for (int r = start[s]; r < start[s + 1]; r++) sum += IN(0)->v[r * n->cols + c];
            n->v[s * n->cols + c] = sum / (start[s + 1] - start[s]);
        }
    note(n, IN(0)->magnitude);
}

static int mean_pool(int x)
{
    int from = starts(), at = new_node(eval_mean_pool, SEQS, g->count[SEQS], g->nodes[x].cols, x, 0, 0);
    record(at, tt_mean_pool(g->tape, g->nodes[x].t, g->nodes[from].t));
    return at;
}

TEST_PLAIN static void eval_set_rows(node *n)
{
    memcpy(n->v, IN(0)->v, sizeof *n->v * (size_t)(n->rows * n->cols));
    for (int k = 0; k < IN(1)->rows; k++)
        memcpy(n->v + IN(1)->index[k] * n->cols, IN(2)->v, sizeof *n->v * (size_t)n->cols);
    note(n, IN(0)->magnitude);
    note(n, IN(2)->magnitude);
}

static int set_rows(int x, int index, int row)
{
    int at = new_node(eval_set_rows, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, index, row);
    record(at, tt_set_rows(g->tape, g->nodes[x].t, g->nodes[index].t, g->nodes[row].param));
    return at;
}

/* Images of 2 x 3 patches of k x k pixels and 3 channels, one a sequence. */
TEST_PLAIN static void eval_patches(node *n)
{
    int side = n->k, width = 3 * side, channels = n->cols / (side * side);
    const int32_t *start = g->nodes[g->starts].index;
    for (int s = 0; s < g->count[SEQS]; s++)
        for (int r = start[s]; r < start[s + 1]; r++)
            for (int c = 0; c < channels; c++)
                for (int y = 0; y < side; y++)
                    for (int x = 0; x < side; x++) {
                        int p = IN(1)->index[r] - 1,
                            at = ((p / 3 * side + y) * width + p % 3 * side + x) * channels + c;
                        double mean = (float)(0.25 * (c + 1)), std = (float)(0.5 + 0.125 * c);
                        const uint8_t *image = IN(0)->bytes + s * 6 * side * side * channels;
                        n->v[((r * channels + c) * side + y) * side + x] =
                            p < 0 ? 0 : (image[at] / 255.0 - mean) / std;
                    }
    note(n, 4);
}

static int patches(int side, int channels)
{
    int from = starts(), images = pixels(g->count[SEQS], 6 * side * side * channels),
        positions = new_index(ROWS, g->count[ROWS], 7);
    int at = new_node(eval_patches, ROWS, g->count[ROWS], channels * side * side, images, positions, 0);
    tt_patch_options o = tt_patch_options_default(2 * side, 3 * side, channels, side);
    for (int c = 0; c < channels; c++) {
        o.mean[c] = 0.25f * (float)(c + 1);
        o.std[c] = 0.5f + 0.125f * (float)c;
    }
    g->nodes[at].k = side;
    record(at, tt_patches(g->tape, g->nodes[images].t, g->nodes[positions].t, g->nodes[from].t, &o));
    return at;
}

TEST_PLAIN static void eval_slice(node *n)
{
    for (int r = 0; r < n->rows; r++)
        for (int c = 0; c < n->cols; c++) n->v[r * n->cols + c] = IN(0)->v[r * IN(0)->cols + n->k + c];
    n->magnitude = IN(0)->magnitude;
}

static int slice(int x, int from, int width)
{
    int at = new_node(eval_slice, g->nodes[x].kind, g->nodes[x].rows, width, x, 0, 0);
    g->nodes[at].k = from;
    g->nodes[at].depth--;
    g->nodes[at].t = tt_slice(g->tape, g->nodes[x].t, from, width);
    return at;
}

TEST_PLAIN static void eval_reshape(node *n)
{
    memcpy(n->v, IN(0)->v, sizeof *n->v * (size_t)(n->rows * n->cols));
    n->magnitude = IN(0)->magnitude;
}

static int reshape(int x, int rows, int cols) /* rows of an axis can only be reshaped to themselves */
{
    bool axis = g->axes && g->nodes[x].kind;
    if (axis) { rows = g->nodes[x].rows; cols = g->nodes[x].cols; }
    int at = new_node(eval_reshape, axis ? g->nodes[x].kind : FIXED, rows, cols, x, 0, 0);
    g->nodes[at].depth--;
    g->nodes[at].t = tt_reshape(g->tape, g->nodes[x].t, code(g->nodes[at].kind, rows), cols);
    return at;
}

static int param_value(int w)
{
    int at = new_node(eval_reshape, FIXED, g->nodes[w].rows, g->nodes[w].cols, w, 0, 0);
    g->nodes[at].depth = 0;
    g->nodes[at].t = tt_param_value(g->tape, g->nodes[w].param);
    return at;
}

TEST_PLAIN static void eval_cross_entropy(node *n)
{
    int classes = IN(0)->cols;
    double loss = 0, total = 0;
    for (int r = 0; r < IN(0)->rows; r++) {
        const double *x = IN(0)->v + r * classes;
        double most = x[0], sum = 0;
        int target = IN(1)->index[r];
        if (target == n->k) continue;
        double w = n->flag ? IN(2)->v[target] : n->in[2] ? IN(2)->v[r] : 1;
        for (int c = 0; c < classes; c++) most = x[c] > most ? x[c] : most;
        for (int c = 0; c < classes; c++) sum += exp(x[c] - most);
        loss += w * (1 - n->a) * (most + log(sum) - x[target]);
        for (int c = 0; c < classes; c++)
            loss += (n->flag ? IN(2)->v[c] : w) * n->a / classes * (most + log(sum) - x[c]);
        total += w;
        note(n, fabs(most) + log(sum) + fabs(x[target]));
    }
    n->v[0] = loss / total;
}

/* Targets below `classes`; with `ignored` every third counts for nothing, but not the first. Weights are
   those of rows or of classes. */
enum { UNWEIGHTED, BY_ROW, BY_CLASS };
static int cross_entropy(int logits, bool ignored, float smoothing, int weighted)
{
    node *x = &g->nodes[logits];
    int targets = new_index(x->kind, x->rows, x->cols),
        weights = weighted == BY_CLASS ? input(FIXED, 1, x->cols, 1)
                  : weighted ? input(x->kind, x->rows, 1, 1) : 0;
    tt_cross_entropy_options o = tt_cross_entropy_options_default();
    if (ignored) o.ignore_index = -7;
    for (int r = 2; r < x->rows && ignored; r += 3) g->nodes[targets].index[r] = -7;
    for (int r = 0; r < g->nodes[weights].rows * g->nodes[weights].cols && weighted; r++)
        g->nodes[weights].v[r] = (double)(float)fabs(g->nodes[weights].v[r]) +
                                 0.125 * (r == 0 || weighted == BY_CLASS);
    int at = new_node(eval_cross_entropy, FIXED, 1, 1, logits, targets, weights);
    node *n = &g->nodes[at];
    o.label_smoothing = smoothing;
    if (weighted == BY_CLASS) o.class_weights = g->nodes[weights].t;
    else o.weights = g->nodes[weights].t;
    n->flag = weighted == BY_CLASS;
    n->k = o.ignore_index;
    n->a = smoothing;
    n->loss = true;
    record(at, tt_cross_entropy(g->tape, g->nodes[logits].t, g->nodes[targets].t, &o));
    return at;
}

TEST_PLAIN static void eval_soft_cross_entropy(node *n)
{
    const int classes = IN(0)->cols;
    double loss = 0, total = 0;
    for (int r = 0; r < IN(0)->rows; r++) {
        const double *x = IN(0)->v + r * classes, *p = IN(1)->v + r * classes, w = n->in[2] ? IN(2)->v[r] : 1;
        double most = x[0], sum = 0;
        for (int c = 1; c < classes; c++) most = x[c] > most ? x[c] : most;
        for (int c = 0; c < classes; c++) sum += exp(x[c] - most);
        for (int c = 0; c < classes; c++) {
            const double term = p[c] * (most + log(sum) - x[c]);
            loss += w * term;
            note(n, fabs(p[c]) * (fabs(most) + log(sum) + fabs(x[c])));
        }
        total += w;
    }
    n->v[0] = loss / total;
    note(n, n->v[0]); /* of many classes, more than any of its terms: it is an f32, too */
}

/* Targets of which some are 0, and which do not sum to 1. */
static int soft_cross_entropy(int logits, bool weighted)
{
    node *x = &g->nodes[logits];
    const int kind = x->kind, rows = x->rows, cols = x->cols;
    const int targets = input(kind, rows, cols, 1), weights = weighted ? input(kind, rows, 1, 1) : 0;
    for (int k = 0; k < rows * cols; k++)
        g->nodes[targets].v[k] = k % 3 == 1 ? 0 : (double)(float)fabs(g->nodes[targets].v[k]);
    for (int r = 0; r < rows && weighted; r++)
        g->nodes[weights].v[r] = (double)(float)fabs(g->nodes[weights].v[r]) + 0.125 * (r == 0);
    const int at = new_node(eval_soft_cross_entropy, FIXED, 1, 1, logits, targets, weights);
    g->nodes[at].loss = true;
    record(at, tt_soft_cross_entropy(g->tape, g->nodes[logits].t, g->nodes[targets].t, g->nodes[weights].t));
    return at;
}

TEST_PLAIN static void eval_squared_error(node *n)
{
    int cols = IN(0)->cols;
    double loss = 0, total = 0;
    for (int r = 0; r < IN(0)->rows; r++) {
        double sum = 0, w = n->in[2] ? IN(2)->v[r] : 1;
        for (int c = 0; c < cols; c++) {
            double d = IN(0)->v[r * cols + c] - IN(1)->v[r * cols + c];
            sum += d * d;
            note(n, d * d);
        }
        loss += w * sum / cols;
        total += w;
    }
    n->v[0] = loss / total;
}

static int squared_error(int x, int target, bool weighted)
{
    int weights = weighted ? input(g->nodes[x].kind, g->nodes[x].rows, 1, 1) : 0;
    for (int r = 0; r < g->nodes[x].rows && weighted; r++)
        g->nodes[weights].v[r] = fabs(g->nodes[weights].v[r]) + 0.25 * (r == 0);
    int at = new_node(eval_squared_error, FIXED, 1, 1, x, target, weights);
    g->nodes[at].loss = true;
    record(at, tt_mean_squared_error(g->tape, g->nodes[x].t, g->nodes[target].t, g->nodes[weights].t));
    return at;
}

/* -------------------------------------------------------------------------------------------------- cases */

/* X(name, the op it is for, body). R rows, D = heads x head size, O another width, C classes, S a scale of
   scores. V: a value operand, W, B: a parameter of two dimensions, of one; I: an index. */
#define CASES(X) \
    X(linear, LINEAR, return linear(V(ROWS, D), W(O, D), B(O));) \
    X(linear_no_bias, LINEAR, return linear(V(ROWS, D), W(O, D), 0);) \
    X(linear_gelu, LINEAR, return gelu(linear(V(ROWS, D), W(O, D), B(O)));) \
    X(linear_gelu_tanh, LINEAR, return gelu_tanh(linear(V(ROWS, D), W(O, D), B(O)));) \
    X(linear_gelu_tanh_linear, LINEAR, int x = gelu(V(ROWS, D)); \
        return gelu(linear(gelu_tanh(linear(x, W(O, D), B(O))), W(D, O), B(D)));) \
    X(linear_relu, LINEAR, return relu(linear(V(ROWS, D), W(O, D), B(O)));) \
    X(linear_tanh, LINEAR, return tanh_(linear(V(ROWS, D), W(O, D), B(O)));) \
    X(linear_silu_no_bias, LINEAR, return silu(linear(V(ROWS, D), W(O, D), 0));) \
    X(linear_residual, LINEAR, return add(linear(V(ROWS, D), W(O, D), B(O)), V(ROWS, O));) \
    X(linear_residual_first, LINEAR, return add(V(ROWS, O), linear(V(ROWS, D), W(O, D), 0));) \
    X(linear_residual_of_input, LINEAR, int x = V(ROWS, D); return add(linear(x, W(D, D), B(D)), x);) \
    X(linear_plus_linear, LINEAR, int x = V(ROWS, D); \
        return add(linear(x, W(O, D), B(O)), linear(x, W(O, D), B(O)));) \
    X(linear_same_weight, LINEAR, int w = W(D, D); int b = B(D); \
        return linear(linear(V(ROWS, D), w, b), w, b);) \
    X(linear_bias_is_weight, LINEAR, int w = W(1, 1); return linear(V(ROWS, 1), w, w);) \
    X(linear_gelu_residual, LINEAR, int x = V(ROWS, D); return add(gelu(linear(x, W(D, D), B(D))), x);) \
    X(linear_used_twice, LINEAR, int h = linear(V(ROWS, D), W(D, D), B(D)); return add(gelu(h), h);) \
    X(linear_weight_as_value, LINEAR, int w = W(D, D); \
        return add(linear(V(ROWS, D), w, 0), gather_rows(param_value(w), I(ROWS, D)));) \
    X(embedding, EMBEDDING, return embedding(I(ROWS, C), W(C, D));) \
    X(embedding_offset, EMBEDDING, int w = W(C + 3, D); \
        return add(embedding_offset(I(ROWS, C + 1), w, 2), embedding(I(ROWS, 2), w));) \
    X(embedding_tied, EMBEDDING, int w = W(C, D); return linear(embedding(I(ROWS, C), w), w, 0);) \
    X(embedding_two, EMBEDDING, int w = W(C, D); \
        return add(embedding(I(ROWS, C), w), embedding(I(ROWS, C), w));) \
    X(embedding_sum, EMBEDDING, \
        return layernorm(add(embedding(I(ROWS, C), W(C, D)), embedding(I(ROWS, 2), W(2, D))), \
                         B(D), B(D), 1e-2f);) \
    X(layernorm, LAYERNORM, return layernorm(V(ROWS, D), B(D), B(D), 1e-3f);) \
    X(layernorm_no_bias, LAYERNORM, return layernorm(V(ROWS, D), B(D), 0, 1e-3f);) \
    X(layernorm_of_sum, LAYERNORM, int x = add(V(ROWS, D), V(ROWS, D)); \
        return add(x, layernorm(x, B(D), B(D), 1e-2f));) \
    X(layernorm_same_parameters, LAYERNORM, int w = B(D); int b = B(D); \
        return layernorm(layernorm(V(ROWS, D), w, b, 1e-1f), w, b, 1e-1f);) \
    X(layernorm_weight_is_bias, LAYERNORM, int w = B(D); return layernorm(V(ROWS, D), w, w, 1e-3f);) \
    X(rmsnorm, RMSNORM, return rmsnorm(V(ROWS, D), B(D), 1e-3f);) \
    X(rmsnorm_of_sum, RMSNORM, int x = add(V(ROWS, D), V(ROWS, D)); return add(x, rmsnorm(x, B(D), 1e-2f));) \
    X(rmsnorm_same_parameters, RMSNORM, int w = B(D); \
        return rmsnorm(linear(rmsnorm(V(ROWS, D), w, 1e-1f), W(D, D), 0), w, 1e-1f);) \
    X(rmsnorm_slice, RMSNORM, return rmsnorm(slice(gelu(V(ROWS, D + 2)), 1, D), B(D), 1e-2f);) \
    X(rmsnorm_of_rows, RMSNORM, int x = gelu(V(ROWS, D)); \
        return gather_rows(rmsnorm(x, B(D), 1e-2f), I(PICKED, R));) \
    X(gelu, ACTIVATION, return gelu(V(ROWS, D));) \
    X(gelu_tanh, ACTIVATION, return gelu_tanh(V(ROWS, D));) \
    X(relu, ACTIVATION, return relu(V(ROWS, D));) \
    X(tanh, ACTIVATION, return tanh_(V(ROWS, D));) \
    X(silu, ACTIVATION, return silu(V(ROWS, D));) \
    X(gelu_far, ACTIVATION, return gelu(scale(V(ROWS, D), 30));) \
    X(gelu_tanh_far, ACTIVATION, return gelu_tanh(scale(V(ROWS, D), 30));) \
    X(gelu_tanh_very_far, ACTIVATION, return scale(gelu_tanh(scale(V(ROWS, D), 1e25f)), 1e-25f);) \
    X(tanh_far, ACTIVATION, return tanh_(scale(V(ROWS, D), 30));) \
    X(silu_far, ACTIVATION, return silu(scale(V(ROWS, D), 60));) \
    X(activation_chain, ACTIVATION, return silu(tanh_(gelu(V(ROWS, D))));) \
    X(add, ADD, return add(V(ROWS, D), V(ROWS, D));) \
    X(add_self, ADD, int x = V(ROWS, D); return add(x, x);) \
    X(add_self_computed, ADD, int x = gelu(V(ROWS, D)); return add(x, x);) \
    X(add_chain, ADD, int x = V(ROWS, D); int y = add(gelu(x), x); int z = add(y, tanh_(y)); \
        return add(add(z, y), x);) \
    X(add_shared, ADD, int x = gelu(V(ROWS, D)); int y = gelu(V(ROWS, D)); \
        return add(add(x, y), add(gelu(x), gelu(y)));) \
    X(mul, MUL, return mul(V(ROWS, D), V(ROWS, D));) \
    X(mul_self, MUL, int x = V(ROWS, D); return mul(x, x);) \
    X(mul_gated, MUL, int x = V(ROWS, D); return mul(silu(linear(x, W(O, D), 0)), linear(x, W(O, D), 0));) \
    X(mul_slices, MUL, int x = gelu(V(ROWS, 2 * D)); return mul(slice(x, 0, D), slice(x, D, D));) \
    X(add_row, ADD_ROW, return add_row(V(ROWS, D), gelu(V(FIXED, D)));) \
    X(add_row_of_value, ADD_ROW, int x = gelu(V(ROWS, D)); return mul(x, add_row(x, gelu(V(FIXED, D))));) \
    X(add_row_layer, ADD_ROW, int row = linear(V(FIXED, D), W(O, D), 0); \
        return linear(add_row(linear(V(ROWS, D), W(O, D), 0), row), W(D, O), B(D));) \
    X(add_row_of_rows, ADD_ROW, int x = gelu(V(ROWS, D)); \
        return gather_rows(add_row(tanh_(x), V(FIXED, D)), I(PICKED, R));) \
    X(swiglu, SWIGLU, return swiglu(V(ROWS, D), V(ROWS, D));) \
    X(swiglu_self, SWIGLU, int x = V(ROWS, D); return swiglu(x, x);) \
    X(swiglu_far, SWIGLU, return swiglu(scale(V(ROWS, D), 20), V(ROWS, D));) \
    X(swiglu_layer, SWIGLU, int x = V(ROWS, D); \
        return linear(swiglu(linear(x, W(O, D), 0), linear(x, W(O, D), B(O))), W(D, O), 0);) \
    X(swiglu_slices, SWIGLU, int x = linear(V(ROWS, D), W(2 * O, D), 0); \
        return swiglu(slice(x, 0, O), slice(x, O, O));) \
    X(swiglu_up_of_input, SWIGLU, return swiglu(linear(V(ROWS, D), W(O, D), 0), V(ROWS, O));) \
    X(swiglu_gate_of_input, SWIGLU, return swiglu(V(ROWS, O), linear(V(ROWS, D), W(O, D), 0));) \
    X(swiglu_of_rows, SWIGLU, int x = gelu(V(ROWS, D)); \
        return gather_rows(swiglu(x, tanh_(x)), I(PICKED, R));) \
    X(mul_of_rows, MUL, int x = gelu(V(ROWS, D)); return gather_rows(mul(x, tanh_(x)), I(PICKED, R));) \
    X(rotary, ROTARY, return rotary(V(ROWS, 2 * D), 0, false);) \
    X(rotary_of_value, ROTARY, int x = gelu(V(ROWS, 2 * D)); return add(x, rotary(x, 0, false));) \
    X(rotary_neighbours, ROTARY, return rotary(gelu(V(ROWS, 2 * D)), 0, true);) \
    X(rotary_some_columns, ROTARY, return rotary(gelu(V(ROWS, 2 * D)), 2, false);) \
    X(rotary_odd, ROTARY, return rotary(gelu(V(ROWS, 2 * D)), 3, false);) \
    X(rotary_some_neighbours, ROTARY, int x = V(ROWS, 2 * D); \
        return add(rotary(x, 4, true), rotary(x, 4, true));) \
    X(rotary_slice, ROTARY, return rotary(slice(linear(V(ROWS, D), W(3 * D, D), 0), D, 2 * D), 0, false);) \
    X(scale, SCALE, return scale(V(ROWS, D), 0.37f);) \
    X(scale_negative, SCALE, return scale(gelu(V(ROWS, D)), -3);) \
    X(scale_loss, SCALE, int x = V(ROWS, D); \
        return scale(squared_error(gelu(x), input(ROWS, R, D, 1), false), 2.5f);) \
    X(dropout, DROPOUT, return dropout(V(ROWS, D), 0.3f);) \
    X(dropout_none, DROPOUT, return add(dropout(V(ROWS, D), 0), dropout(gelu(V(ROWS, D)), 0));) \
    X(dropout_residual, DROPOUT, return add(dropout(V(ROWS, D), 0.3f), V(ROWS, D));) \
    X(dropout_residual_first, DROPOUT, return add(V(ROWS, D), dropout(gelu(V(ROWS, D)), 0.5f));) \
    X(dropout_residual_of_input, DROPOUT, int x = gelu(V(ROWS, D)); return add(dropout(x, 0.1f), x);) \
    X(dropout_linear_residual, DROPOUT, int x = V(ROWS, D); \
        return add(dropout(linear(gelu(x), W(D, D), B(D)), 0.25f), x);) \
    X(dropout_twice, DROPOUT, int x = V(ROWS, D); return add(dropout(x, 0.4f), dropout(x, 0.4f));) \
    X(attention, ATTENTION, return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 0);) \
    X(attention_causal, ATTENTION, return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), true, 0, 0);) \
    X(attention_dropout, ATTENTION, return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 0.3f);) \
    X(attention_causal_dropout, ATTENTION, \
        return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), true, S, 0.5f);) \
    X(attention_scaled, ATTENTION, return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, -S, 0);) \
    X(attention_same, ATTENTION, int x = V(ROWS, D); return attention(x, x, x, false, S, 0);) \
    X(attention_same_computed, ATTENTION, int x = gelu(V(ROWS, D)); \
        return add(attention(x, x, x, true, S, 0.2f), x);) \
    X(attention_same_keys_values, ATTENTION, int x = gelu(V(ROWS, D)); \
        return attention(V(ROWS, D), x, x, true, 0, 0);) \
    X(attention_grouped, ATTENTION, return attention(V(ROWS, 3 * D), V(ROWS, D), V(ROWS, D), false, S, 0);) \
    X(attention_grouped_causal, ATTENTION, int x = linear(V(ROWS, D), W(4 * D, D), B(4 * D)); \
        return attention(slice(x, 0, 2 * D), slice(x, 2 * D, D), slice(x, 3 * D, D), true, S, 0.2f);) \
    X(attention_window, ATTENTION, \
        return attention_with(V(ROWS, D), V(ROWS, D), V(ROWS, D), true, S, 0.1f, 5, 0);) \
    X(attention_window_both_sides, ATTENTION, \
        return attention_with(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 0, 40, 0);) \
    X(attention_window_of_one, ATTENTION, int x = V(ROWS, D); \
        return attention_with(x, x, x, false, 0, 0, 1, 0);) \
    X(attention_alibi, ATTENTION, \
        return attention_with(V(ROWS, 3 * D), V(ROWS, D), V(ROWS, D), true, -S, 0, 0, 1);) \
    X(attention_alibi_both_sides, ATTENTION, \
        return attention_with(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 0.1f, 0, 0.25f);) \
    X(attention_alibi_rounded, ATTENTION, tt_attention_options o = tt_attention_options_default(1); \
        o.causal = o.alibi_rounded = true; o.alibi = 1.5f; \
        return attention_of(V(ROWS, 3 * D), V(ROWS, D), V(ROWS, D), -S, 0.1f, &o);) \
    X(attention_window_alibi, ATTENTION, int x = linear(V(ROWS, D), W(4 * D, D), B(4 * D)); \
        return attention_with(slice(x, 0, 2 * D), slice(x, 2 * D, D), slice(x, 3 * D, D), true, 0, 0.2f, \
                              70, 0.7f);) \
    X(attention_multi_query, ATTENTION, int h = g->size->head_size; int x = gelu(V(ROWS, 2 * h)); \
        return attention(V(ROWS, D), slice(x, h, h), slice(x, 0, h), true, 0, 0);) \
    X(attention_one_key_value, ATTENTION, int x = gelu(V(ROWS, g->size->head_size)); \
        return attention(V(ROWS, 2 * D), x, x, false, S, 0.1f);) \
    X(rows_of_attention_grouped, ATTENTION, int i = I(PICKED, R); \
        return gather_rows(attention(V(ROWS, 2 * D), V(ROWS, D), V(ROWS, D), true, S, 0.1f), i);) \
    X(attention_blocks, ATTENTION, \
        return attention_by_blocks(V(ROWS, D), V(ROWS, D), V(ROWS, D), 0, 0, 3, 6, 0);) \
    X(attention_blocks_listed, ATTENTION, int x = linear(V(ROWS, D), W(4 * D, D), B(4 * D)); \
        return attention_by_blocks(slice(x, 0, 2 * D), slice(x, 2 * D, D), slice(x, 3 * D, D), S, 0.1f, 2, \
                                   0, 3);) \
    X(attention_blocks_of_64, ATTENTION, \
        return attention_by_blocks(V(ROWS, D), V(ROWS, D), V(ROWS, D), -S, 0, 64, 0, 1);) \
    X(attention_blocks_of_20, ATTENTION, int x = gelu(V(ROWS, D)); \
        return attention_by_blocks(V(ROWS, D), x, x, 0, 0.3f, 20, 60, 2);) \
    X(rows_of_attention_blocks, ATTENTION, int i = I(PICKED, R); \
        return gather_rows(attention_by_blocks(V(ROWS, 2 * D), V(ROWS, D), V(ROWS, D), S, 0.1f, 3, 5, 3), \
                           i);) \
    X(attention_packed, ATTENTION, int x = linear(V(ROWS, D), W(3 * D, D), B(3 * D)); \
        return attention(slice(x, 0, D), slice(x, D, D), slice(x, 2 * D, D), false, 0, 0.1f);) \
    X(attention_packed_values, ATTENTION, int x = V(ROWS, 3 * D); \
        return add(attention(slice(x, 2 * D, D), slice(x, D, D), slice(x, 0, D), true, 0, 0), \
                   slice(x, D, D));) \
    X(gather_rows, GATHER_ROWS, return gather_rows(V(ROWS, D), I(PICKED, R));) \
    X(gather_rows_computed, GATHER_ROWS, int x = gelu(V(ROWS, D)); \
        return add(gather_rows(x, I(PICKED, R)), gather_rows(x, I(PICKED, R)));) \
    X(gather_rows_slice, GATHER_ROWS, return gather_rows(slice(V(ROWS, D + 3), 2, D), I(PICKED, R));) \
    X(rows_of_linear, LINEAR, int i = I(PICKED, R); int x = V(ROWS, D); \
        return gather_rows(tanh_(add(linear(x, W(D, D), B(D)), x)), i);) \
    X(rows_of_dropout, DROPOUT, int i = I(PICKED, R); int x = gelu(V(ROWS, D)); \
        return gather_rows(add(dropout(scale(x, 2), 0.3f), x), i);) \
    X(rows_of_layernorm, LAYERNORM, int i = I(PICKED, R); int x = linear(V(ROWS, D), W(D, D), B(D)); \
        int y = layernorm(add(gelu(x), x), B(D), B(D), 1e-1f); \
        return gather_rows(add(silu(linear(y, W(D, D), 0)), dropout(y, 0.2f)), i);) \
    X(rows_of_same, ADD, int i = I(PICKED, R); int x = gelu(V(ROWS, D)); int y = tanh_(x); \
        return gather_rows(add(add(y, y), add(x, y)), i);) \
    X(rows_twice, ACTIVATION, int x = gelu(V(ROWS, D)); int i = I(PICKED, R); \
        return add(gather_rows(tanh_(x), i), \
                   add(gather_rows(silu(x), i), gather_rows(gelu(x), I(PICKED, R))));) \
    X(rows_of_slice, LINEAR, int i = I(PICKED, R); int x = gelu(V(ROWS, D + O)); \
        return gather_rows(add(linear(slice(x, 0, D), W(O, D), B(O)), gelu(slice(x, D, O))), i);) \
    X(rows_of_attention, ATTENTION, int i = I(PICKED, R); \
        return gather_rows(attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, S, 0.2f), i);) \
    X(rows_of_attention_window, ATTENTION, int i = I(PICKED, R); \
        return gather_rows(attention_with(V(ROWS, 2 * D), V(ROWS, D), V(ROWS, D), true, S, 0.1f, 6, 0.5f), \
                           i);) \
    X(rows_of_attention_window_both_sides, ATTENTION, int i = I(PICKED, R); \
        return gather_rows(attention_with(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 0, 4, 0), i);) \
    X(rows_of_attention_first, ATTENTION, int i = I(PICKED, g->size->length[0]); \
        return gather_rows(attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, S, 0), i);) \
    X(rows_of_attention_same, ATTENTION, int i = I(PICKED, R); int x = gelu(V(ROWS, D)); \
        return gather_rows(add(attention(linear(x, W(D, D), B(D)), x, x, false, S, 0), x), i);) \
    X(rows_of_attention_packed, ATTENTION, int i = I(PICKED, R); \
        int x = linear(V(ROWS, D), W(3 * D, D), B(3 * D)); \
        return gather_rows(attention(slice(x, 0, D), slice(x, D, D), slice(x, 2 * D, D), true, S, 0.1f), \
                           i);) \
    X(rows_of_block, ATTENTION, int i = I(PICKED, R); int x = V(ROWS, D); \
        int h = layernorm(x, B(D), B(D), 1e-1f); \
        h = attention(linear(h, W(D, D), B(D)), linear(h, W(D, D), B(D)), linear(h, W(D, D), B(D)), \
                      true, S, 0.1f); \
        x = add(x, dropout(linear(h, W(D, D), B(D)), 0.1f)); h = layernorm(x, B(D), B(D), 1e-1f); \
        x = add(x, linear(gelu(linear(h, W(O, D), B(O))), W(D, O), B(D))); \
        return linear(gather_rows(x, i), W(O, D), B(O));) \
    X(mean_pool, MEAN_POOL, return mean_pool(V(ROWS, D));) \
    X(mean_pool_computed, MEAN_POOL, int x = gelu(V(ROWS, D)); \
        return add(mean_pool(x), tanh_(mean_pool(x)));) \
    X(mean_pool_slice, MEAN_POOL, int x = V(ROWS, 2 * D); return gelu(mean_pool(slice(x, D, D)));) \
    X(set_rows, SET_ROWS, return set_rows(V(ROWS, D), I(PICKED, R), B(D));) \
    X(set_rows_computed, SET_ROWS, int x = gelu(V(ROWS, D)); \
        return set_rows(linear(x, W(D, D), B(D)), I(PICKED, R), B(D));) \
    X(set_rows_of_shared, SET_ROWS, int x = gelu(V(ROWS, D)); \
        return add(set_rows(tanh_(x), I(PICKED, R), B(D)), set_rows(x, I(PICKED, R), B(D)));) \
    X(set_rows_again, SET_ROWS, int row = B(D); \
        return add(set_rows(set_rows(silu(V(ROWS, D)), I(PICKED, R), row), I(SEQS, R), row), V(ROWS, D));) \
    X(set_rows_of_frozen, SET_ROWS, return set_rows(input(ROWS, R, D, 1), I(PICKED, R), B(D));) \
    X(patches, PATCHES, return linear(patches(2, 4), W(O, 16), B(O));) \
    X(patches_of_a_pixel, PATCHES, \
        return linear(set_rows(add(linear(patches(1, 3), W(D, 3), B(D)), V(ROWS, D)), I(SEQS, R), B(D)), \
        W(O, D), 0);) \
    X(patches_used_twice, PATCHES, int x = patches(3, 2); \
        return add(linear(x, W(O, 18), B(O)), tanh_(linear(x, W(O, 18), 0)));) \
    X(cross_entropy, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), false, 0, false);) \
    X(cross_entropy_ignored, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), true, 0, false);) \
    X(cross_entropy_smoothed, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), false, 0.1f, false);) \
    X(cross_entropy_weighted, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), false, 0, true);) \
    X(cross_entropy_all, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), true, 0.25f, true);) \
    X(cross_entropy_classes, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), true, 0, BY_CLASS);) \
    X(cross_entropy_classes_slice, CROSS_ENTROPY, \
        return cross_entropy(slice(V(ROWS, C + 5), 3, C), true, 0.25f, BY_CLASS);) \
    X(cross_entropy_classes_linear, CROSS_ENTROPY, \
        return cross_entropy(linear(V(ROWS, D), W(O, D), B(O)), false, 0.1f, BY_CLASS);) \
    X(cross_entropy_linear, CROSS_ENTROPY, \
        return cross_entropy(linear(V(ROWS, D), W(O, D), B(O)), true, 0.1f, true);) \
    X(cross_entropy_linear_no_bias, CROSS_ENTROPY, \
        return cross_entropy(linear(gelu(V(ROWS, D)), W(C, D), 0), false, 0, false);) \
    X(cross_entropy_linear_all, CROSS_ENTROPY, int x = gelu(V(ROWS, D)); \
        return cross_entropy(linear(add(x, tanh_(x)), W(C, D), B(C)), true, 0.2f, true);) \
    X(cross_entropy_linear_tied, CROSS_ENTROPY, int w = W(C, D); \
        return cross_entropy(linear(silu(add(V(ROWS, D), embedding(I(ROWS, C), w))), w, 0), true, 0, true);) \
    X(cross_entropy_linear_of_input, CROSS_ENTROPY, \
        return cross_entropy(linear(input(ROWS, R, D, 1), W(C, D), B(C)), false, 0.1f, false);) \
    X(cross_entropy_slice, CROSS_ENTROPY, \
        return cross_entropy(slice(V(ROWS, C + 5), 3, C), true, 0.1f, false);) \
    X(soft_cross_entropy, SOFT_CROSS_ENTROPY, return soft_cross_entropy(V(ROWS, C), false);) \
    X(soft_cross_entropy_weighted, SOFT_CROSS_ENTROPY, return soft_cross_entropy(V(ROWS, C), true);) \
    X(soft_cross_entropy_linear, SOFT_CROSS_ENTROPY, \
        return scale(soft_cross_entropy(linear(gelu(V(ROWS, D)), W(C, D), B(C)), true), 2.5f);) \
    X(soft_cross_entropy_slice, SOFT_CROSS_ENTROPY, \
        return soft_cross_entropy(slice(gelu(V(ROWS, 2 * C)), C, C), false);) \
    X(squared_error, MEAN_SQUARED_ERROR, return squared_error(V(ROWS, D), input(ROWS, R, D, 1), false);) \
    X(squared_error_weighted, MEAN_SQUARED_ERROR, \
        return squared_error(V(ROWS, D), input(ROWS, R, D, 1), true);) \
    X(squared_error_both, MEAN_SQUARED_ERROR, int x = gelu(V(ROWS, D)); \
        return squared_error(x, add(gelu(x), V(ROWS, D)), true);) \
    X(squared_error_slices, MEAN_SQUARED_ERROR, int x = V(ROWS, 2 * D); \
        return squared_error(slice(x, 0, D), slice(x, D, D), false);) \
    X(slice_activation, ACTIVATION, return gelu(slice(V(ROWS, D + 5), 3, D));) \
    X(slice_overlapping, ADD, int x = V(ROWS, D + 1); return add(slice(x, 0, D), gelu(slice(x, 1, D)));) \
    X(slice_of_slice, LINEAR, return linear(slice(slice(V(ROWS, D + 9), 4, D + 4), 1, D), W(O, D), B(O));) \
    X(slice_residual, LINEAR, int x = gelu(V(ROWS, D + O)); \
        return add(linear(slice(x, 0, D), W(O, D), B(O)), slice(x, D, O));) \
    X(slice_layernorm, LAYERNORM, return layernorm(slice(V(ROWS, D + 2), 1, D), B(D), B(D), 1e-2f);) \
    X(slice_dropout, DROPOUT, int x = gelu(V(ROWS, 2 * D)); \
        return add(dropout(slice(x, D, D), 0.2f), slice(x, 0, D));) \
    X(slice_of_linear, LINEAR, int x = linear(V(ROWS, D), W(2 * O, D), B(2 * O)); \
        return add(slice(x, O, O), tanh_(slice(x, 0, O)));) \
    X(slice_of_parameter, SCALE, int w = W(R, D + 4); \
        return add(scale(slice(param_value(w), 1, D), 3), gelu(slice(param_value(w), 4, D)));) \
    X(reshape_value, ACTIVATION, return gelu(reshape(V(ROWS, D), D, R));) \
    X(reshape_computed, LINEAR, int x = tanh_(V(ROWS, D)); \
        return linear(reshape(x, R * D, 1), W(O, g->axes ? D : 1), B(O));) \
    X(reshape_and_slice, ADD, int x = reshape(gelu(V(ROWS, 2 * D)), R, 2 * D); \
        return add(slice(x, 0, D), slice(x, D, D));) \
    X(reshape_parameter, ADD, int w = W(2, 3 * D); \
        return add(reshape(param_value(w), 6, D), gelu(reshape(param_value(w), 6, D)));) \
    X(residual_before_act, LINEAR, int h = linear(V(ROWS, D), W(D, D), B(D)); \
        return add(linear(gelu(h), W(D, D), B(D)), h);) \
    X(slice_of_act_used_again, LINEAR, int h = gelu(linear(V(ROWS, D), W(D, D), B(D))); \
        return add(scale(linear(h, W(D, D), B(D)), 0.5f), linear(slice(h, 0, D), W(D, D), B(D)));) \
    X(cast, CAST, return gelu(cast(gelu(V(ROWS, D))));) \
    X(block, ATTENTION, int x = V(ROWS, D); int h = layernorm(x, B(D), B(D), 1e-1f); \
        int qkv = linear(h, W(3 * D, D), B(3 * D)); \
        h = attention(slice(qkv, 0, D), slice(qkv, D, D), slice(qkv, 2 * D, D), true, S, 0.1f); \
        x = add(x, dropout(linear(h, W(D, D), B(D)), 0.1f)); h = layernorm(x, B(D), B(D), 1e-1f); \
        x = add(x, linear(gelu(linear(h, W(O, D), B(O))), W(D, O), B(D))); \
        return linear(mean_pool(x), W(O, D), B(O));)

#define CASE_FUNCTION(name, op, ...) \
    static int case_##name(void) \
    { \
        const int R = g->count[ROWS], D = g->d, O = g->size->out, C = g->size->vocab; \
        const float S = 1.0f / (float)g->size->head_size; \
        (void)R; (void)D; (void)O; (void)C; (void)S; \
        __VA_ARGS__ \
    }
CASES(CASE_FUNCTION)

typedef struct op_case { const char *name; int op; int (*build)(void); } op_case;

static const op_case cases[] = {
#define CASE_ROW(name, op, ...) {#name, TT__OP_##op, case_##name},
    CASES(CASE_ROW)
};

#define CASE_COUNT ((int)(sizeof cases / sizeof cases[0]))

/* ----------------------------------------------------------------------------------------- building a net */

/* isa: an instruction set's name, with _dot or _tiles behind it for bf16 products that are so computed. */
static bool is_bf16(const char *isa) { return strchr(isa, '_') != NULL; }

/* What runs the kernels: an instruction set of the CPU, or device "cuda" of a build with that backend. */
static bool is_cuda(const char *isa) { return strcmp(isa, "cuda") == 0; }

static tt_context *open_isa(tt_context_options o, const char *isa)
{
    char name[32];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(isa, "_"), isa);
    o.isa = is_cuda(isa) ? NULL : name;
    o.bf16 = is_bf16(isa) ? strchr(isa, '_') + 1 : "convert";
    tt_context *ctx = tt_open(&o);
    if (ctx) ctx->options.isa = ctx->options.bf16 = NULL;
    return ctx;
}

static bool has_isa(const char *isa)
{
#ifndef TINYTRAIN_CUDA
    if (is_cuda(isa)) return false;
#endif
    tt_context_options o = tt_context_options_default();
    o.threads = 1;
    o.logger.log = test__no_log;
    tt_context *ctx = open_isa(o, isa);
    tt_close(ctx);
    return ctx != NULL;
}

static void net_open(net *to, const op_case *c, const size_set *size, const char *isa, int mode, bool axes,
                     bool round)
{
    static const char *const names[KINDS] = {"", "rows", "seqs", "picked"};
    tt_context_options o = tt_context_options_default();
    memset(to, 0, sizeof *to);
    g = to;
    o.threads = 2;
    o.seed = 7;
    o.verify = true;
    o.logger.log = test__no_log;
    g->seed = o.seed;
#ifdef TT_EMULATE /* a new device in each case, with another order of all that CUDA leaves open */
    static uint64_t seed;
    if (is_cuda(isa)) emu_configure(1, (size_t)64 << 20, 1, ++seed);
#endif
    g->ctx = open_isa(o, isa);
    g->tape = tt_tape_new(g->ctx);
    g->size = size;
    g->mode = mode;
    g->axes = axes;
    g->gain = 1;
    g->round = round;
    g->d = size->heads * size->head_size;
    for (int s = 0; s < 8; s++) {
        g->count[ROWS] += size->length[s];
        g->count[SEQS] += size->length[s] > 0;
    }
    g->count[FIXED] = 1;
    g->count[PICKED] = size->picked;
    for (int k = 1; k < KINDS && axes; k++) g->axis[k] = tt_axis(g->tape, names[k], g->count[k] + 3);
    g->random = tt__hash(c->name) ^ tt__hash(size->name) ^ (uint64_t)mode;
}

static bool report(bool ok, const char *format, ...);

static void net_close(void)
{
    for (int k = 1; k <= g->n; k++) { free(g->nodes[k].v); free(g->nodes[k].index); free(g->nodes[k].bytes); }
    tt_tape_free(g->tape);
    tt_close(g->ctx);
#ifdef TT_EMULATE
    char left[256] = "";
    if (emu_live_objects(left, sizeof left)) report(false, "left on the device: %s", left);
#endif
}

TEST_PLAIN static void evaluate(void)
{
    for (int k = 1; k <= g->n; k++) {
        if (!g->nodes[k].eval) continue;
        g->nodes[k].magnitude = 0;
        g->nodes[k].eval(&g->nodes[k]);
    }
}

/* The loss of a case: its result, or its squared error, directly or through a linear layer to one column. The
   targets lie far from the results, so that their difference, a factor of all gradients, has no rounding
   error of its own. */
static int loss_of(int result, bool projected)
{
    node *n = &g->nodes[result];
    double most = 0;
    /* A row's gradient is a difference of numbers up to 1 / rows, which may cancel altogether. */
    if (n->loss) {
        g->upstream = g->gain / g->nodes[n->in[0]].rows;
        return result;
    }
    if (projected) n = &g->nodes[result = linear(result, W(1, n->cols), 0)];
    evaluate();
    int target = input(n->kind, n->rows, n->cols, 1);
    for (int k = 0; k < n->rows * n->cols; k++) if (fabs(n->v[k]) > most) most = fabs(n->v[k]);
    for (int k = 0; k < n->rows * n->cols; k++)
        g->nodes[target].v[k] = (float)((most + 1) * (g->nodes[target].v[k] + (k % 2 ? 3 : -3)));
    g->upstream = 8 * g->gain * (most + 1) / (n->rows * n->cols);
    return squared_error(result, target, false);
}

static bool set_inputs(tt_program *p)
{
    bool ok = true;
    for (int k = 1; k <= g->n && ok; k++) {
        node *n = &g->nodes[k];
        if (!n->input) continue;
        float *values = (float *)malloc(sizeof(float) * (size_t)(n->rows * n->cols));
        for (int e = 0; e < n->rows * n->cols && !n->index; e++) values[e] = (float)n->v[e];
        const void *data = n->index ? (const void *)n->index
                           : n->bytes ? (const void *)n->bytes
                           : (const void *)values;
        ok = tt_set(p, n->t, data, n->rows) == TT_OK;
        free(values);
    }
    return ok;
}

static char where[256]; /* what is being tested, for messages */

static bool report(bool ok, const char *format, ...)
{
    char message[768], text[400];
    va_list args;
    if (ok) return test__check(true, __FILE__, __LINE__, "");
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(message, sizeof message, "%s: %s", where, text);
    if (getenv("TT_TEST_ALL")) fprintf(stderr, "  %s\n", message);
    return test__check(false, "test_ops.c", 0, message);
}

TEST_PLAIN static bool all_near(const char *what, const float *got, const double *expected, int n,
                                double tolerance)
{
    int worst = 0;
    for (int k = 0; k < n; k++) {
        double error = fabs(got[k] - expected[k]);
        if (!(error <= fabs(got[worst] - expected[worst]))) worst = k;
        if (!(error <= tolerance) && error != error) break;
    }
    return report(fabs(got[worst] - expected[worst]) <= tolerance,
                  "%s: element %d of %d is %.9g, expected %.9g; they differ by %.3g, tolerance %.3g", what,
                  worst, n, (double)got[worst], expected[worst], fabs(got[worst] - expected[worst]),
                  tolerance);
}

static bool check_result(tt_program *p, int at, const precision_case *precision)
{
    node *n = &g->nodes[at];
    float *got = (float *)malloc(sizeof(float) * (size_t)(n->rows * n->cols));
    bool ok = tt_get(p, n->t, got, (size_t)(n->rows * n->cols)) == TT_OK;
    report(ok, "tt_get: %s", tt_error(g->ctx));
    if (ok)
        ok = all_near("result", got, n->v, n->rows * n->cols,
                      (precision->rounding > 0 ? precision->rounding : FORWARD_F32) * (1 + n->depth) *
                          n->magnitude);
    free(got);
    return ok;
}

static const char *tuned; /* tt_compile_options.tune of all programs */

static void compile_in(tt_compile_options *o, const char *isa, const precision_case *precision)
{
    o->tune = tuned;
    o->device = is_cuda(isa) ? "cuda" : "cpu";
    o->precision = precision->name;
    o->residual = precision->residual;
}

/* f16 holds no more than 65504: only a case that is made of larger numbers is left out. */
static bool fits(const op_case *c, const precision_case *precision)
{
    double most = 0;
    for (int k = 1; k <= g->n; k++) /* losses are f32 */
        for (int e = 0; e < g->nodes[k].rows * g->nodes[k].cols && !g->nodes[k].loss; e++)
            if (fabs(g->nodes[k].v[e]) > most) most = fabs(g->nodes[k].v[e]);
    bool ok = precision->half != TT_F16 || most < 32768;
    report(ok || strcmp(c->name, "gelu_tanh_very_far") == 0, "values of %g are more than f16 can hold", most);
    return ok;
}

/* TT_TEST_CASE='linear*': only these cases. */
static bool asked_for(const op_case *c)
{
    return !getenv("TT_TEST_CASE") || tt__match(getenv("TT_TEST_CASE"), c->name);
}

/* A name that no case has would pass without a check. */
static void ask_for_a_case(void)
{
    bool found = false;
    for (int c = 0; c < CASE_COUNT; c++) found |= asked_for(&cases[c]);
    snprintf(where, sizeof where, "TT_TEST_CASE");
    report(found, "no case is called '%s'", found ? "" : getenv("TT_TEST_CASE"));
}

/* The emulator is slow: each of its three builds takes another part of all combinations, the fastest the
   largest, but for sizes "whole_*", for which asan alone has its part. TT_TEST_CASE: all, unless
   TT_TEST_SHARE is there too. */
static bool left_out(const char *isa, const size_set *size, int combination)
{
#ifdef TT_EMULATE
    const int part = combination % 16;
    if (tt__match("whole_*", size->name) && strcmp(emu_build(), "asan") != 0) return false;
    if (!is_cuda(isa) || (getenv("TT_TEST_CASE") && !getenv("TT_TEST_SHARE"))) return false;
    return strcmp(emu_build(), "plain") == 0 ? part > 5
           : strcmp(emu_build(), "asan") == 0 ? part != 6
           : part != 7;
#else
    (void)isa; (void)size; (void)combination;
    return false;
#endif
}

/* In a thinned sweep (TEST_SWEEP) the instruction sets whose loops are one text take the combinations by
   turns: portable, avx2, avx512, neon; `times` as few where these take longer. What multiplies bf16 has only
   combinations with bf16. */
static bool leaves_to_others(const char *isa, int combination, int times)
{
    const int every = is_bf16(isa) ? (TEST_SWEEP + 2) / 3 : times * TEST_SWEEP;
    return TEST_SWEEP > 1 && !is_cuda(isa) && (combination + (int)strlen(isa) / 2) % every != 0;
}

/* In the slow builds of the emulator a gradient's case has one kind of run by turns, of which the fast one
   runs all. */
static bool takes_turns(const char *isa)
{
#ifdef TT_EMULATE
    if (getenv("TT_TEST_CASE") && !getenv("TT_TEST_SHARE")) return false;
    return is_cuda(isa) && strcmp(emu_build(), "plain") != 0;
#else
    (void)isa;
    return false;
#endif
}

/* Whether the size is for the case. Thousands of rows of attention would take the emulator minutes. */
static bool fits_case(const size_set *size, const op_case *c, const char *isa)
{
    int rows = 0;
    for (int k = 0; k < TEST_COUNT(size->length); k++) rows += size->length[k];
#ifdef TT_EMULATE
    if (is_cuda(isa) && rows > 2200) return false;
#endif
    (void)isa;
    return asked_for(c) && rows > 0 && (!size->only || tt__match(size->only, c->name));
}

/* -------------------------------------------------------------------------------------- test 1: reference */

static void reference_case(const op_case *c, const size_set *size, const char *isa,
                           const precision_case *precision, int mode, bool axes)
{
    net n;
    tt_compile_options o = tt_compile_options_default();
    bool train = mode != AS_INPUT;
    net_open(&n, c, size, isa, mode, axes, precision->half != TT_F32);
    snprintf(where, sizeof where, "%s, size %s, %s, %s%s, %s%s", c->name, size->name, isa, precision->name,
             precision->halved ? " with the other residual" : "", train ? "training" : "inference",
             axes ? ", axes" : "");
    int result = c->build(), loss = train ? loss_of(result, false) : result;
    bool used = false;
    for (int k = 0; k < g->tape->n_code; k++) used |= g->tape->code[k].op == c->op;
    used |= c->op == TT__OP_ADD_ROW && g->count[ROWS] == 1 && !axes; /* two values of one shape */
    report(used, "the case does not record the op that it is for");
    o.train = o.accumulate = g->train = train;
    compile_in(&o, isa, precision);
    tt_output(g->tape, g->nodes[result].t);
    evaluate();
    bool wanted = fits(c, precision);
    tt_program *p = wanted ? tt_compile(g->tape, g->nodes[loss].t, &o) : NULL;
    if (wanted && report(p != NULL, "%s", tt_error(g->ctx))) {
        p->poison = true;
        bool ok = set_inputs(p) && (train ? tt_micro_step(p, NULL) : tt_run(p, NULL)) == TT_OK;
        if (report(ok, "%s", tt_error(g->ctx))) check_result(p, result, precision);
    }
    tt_program_free(p);
    net_close();
}

static void reference(const char *isa)
{
    if (!has_isa(isa))
        SKIP(is_cuda(isa) ? "this build is without TINYTRAIN_CUDA" : "this CPU does not have it");
    ask_for_a_case();
    for (int c = 0; c < CASE_COUNT; c++)
        for (int s = 0; s < SIZES; s++) {
            if (!fits_case(&sizes[s], &cases[c], isa) || !test_takes(c + s)) continue;
            for (int k = 0; k < PRECISIONS; k++) {
                const precision_case *p = &precisions[k];
                if (left_out(isa, &sizes[s], c + s + k) || (is_bf16(isa) && p->half != TT_BF16) ||
                    (p->halved && (sizes[s].only || (c + s) % 2)) || leaves_to_others(isa, c + s + k, 1))
                    continue;
                /* Three kinds of a size; thinned sweeps and the emulator of CUDA have one, by turns. */
                const bool without_axes = (p->mixed && !p->halved) || k == 0;
                const bool all = TEST_SWEEP == 1 && !is_cuda(isa);
                int turn = (c + s + k + (int)strlen(isa)) % 3;
                if (turn == 1 && !without_axes) turn = 2;
                if (sizes[s].only) {
                    if (p->mixed || k == 0) reference_case(&cases[c], &sizes[s], isa, p, AS_INPUT, true);
                    continue;
                }
                if (all || turn == 0) reference_case(&cases[c], &sizes[s], isa, p, AS_INPUT, true);
                if ((all || turn == 1) && without_axes)
                    reference_case(&cases[c], &sizes[s], isa, p, AS_INPUT, false);
                if (all || turn == 2) reference_case(&cases[c], &sizes[s], isa, p, AS_GATHERED, true);
            }
        }
#ifdef TT_EMULATE
    CHECK(emu_get_counts().uneven_gemms == 0);
#endif
}

TEST(reference_portable) { reference("portable"); }
TEST(reference_avx2) { reference("avx2"); }
TEST(reference_avx512) { reference("avx512"); }
TEST(reference_avx512_dot) { reference("avx512_dot"); }
TEST(reference_avx512_tiles) { reference("avx512_tiles"); }
TEST(reference_neon) { reference("neon"); }
TEST(reference_neon_dot) { reference("neon_dot"); }
TEST(reference_cuda) /* by warpgroups: attention_by_warpgroups */
{
    setenv("TINYTRAIN_WGMMA", "0", 1);
    reference("cuda");
    unsetenv("TINYTRAIN_WGMMA");
}

/* --------------------------------------------------------------------------------------- test 2: gradient */

typedef struct expected { /* gradients of a net's parameters, one after another, for micro-batches 0 and 1 */
    double *grad[2], *direction;
    int size;
} expected;

/* The same for all instruction sets and 16-bit precisions. */
static expected known[CASE_COUNT][SIZES][MODES][2];
static bool ran[TT__OP_COUNT];

/* The loss after a change of parameter k: evaluates what depends on it. */
TEST_PLAIN static double loss_at(int loss, int k)
{
    for (int i = 1; i <= g->n; i++) {
        node *n = &g->nodes[i];
        n->stale = i == k || (n->eval && (g->nodes[n->in[0]].stale || g->nodes[n->in[1]].stale ||
                                          g->nodes[n->in[2]].stale));
        if (n->stale && n->eval) n->eval(n);
    }
    return g->nodes[loss].v[0];
}

/* Of many elements only the derivative along one random direction is compared: two evaluations instead of
   thousands. */
static bool by_direction(const node *n) { return g->size->only || n->rows * n->cols > 400; }

static void difference(expected *e, int loss)
{
    int size = 0;
    for (int k = 1; k <= g->n; k++) if (g->nodes[k].param) size += g->nodes[k].rows * g->nodes[k].cols;
    e->size = size;
    e->direction = (double *)calloc((size_t)size, sizeof(double));
    for (int k = 0; k < size; k++) e->direction[k] = uniform();
    evaluate();
    g->differencing = true;
    for (int micro = 0; micro < (g->has_random ? 2 : 1); micro++) {
        double *grad = e->grad[micro] = (double *)calloc((size_t)size, sizeof(double)),
               *direction = e->direction;
        g->micro = (uint64_t)micro;
        evaluate();
        for (int k = 1; k <= g->n; k++) {
            node *n = &g->nodes[k];
            int count = n->param ? n->rows * n->cols : 0;
            bool along = by_direction(n);
            const double h = along ? 2e-5 : 2e-6;
            double l[2];
            for (int x = 0; x < count && !along; x++) {
                double old = n->v[x];
                for (int side = 0; side < 2; side++) {
                    n->v[x] = old + (side ? h : -h);
                    l[side] = loss_at(loss, k);
                }
                n->v[x] = old;
                if (x == count - 1) loss_at(loss, k);
                grad[x] = (l[1] - l[0]) / (2 * h);
            }
            for (int side = 0; side < 2 && along && count; side++) {
                double *old = (double *)malloc(sizeof(double) * (size_t)count);
                memcpy(old, n->v, sizeof(double) * (size_t)count);
                for (int x = 0; x < count; x++) n->v[x] += (side ? h : -h) * direction[x];
                l[side] = loss_at(loss, k);
                memcpy(n->v, old, sizeof(double) * (size_t)count);
                free(old);
                loss_at(loss, k);
            }
            if (along && count) grad[0] = (l[1] - l[0]) / (2 * h);
            grad += count;
            direction += count;
        }
    }
    g->micro = 0;
    g->differencing = false;
}

/* Compares a parameter's gradient (its first is number `at` of the net's) with the mean of what micro-batches
   0..micros-1 have. */
TEST_PLAIN static void check_gradient(const expected *e, const node *n, int at, const float *got, int micros,
                           const precision_case *precision, const char *what)
{
    int count = n->rows * n->cols;
    bool along = by_direction(n);
    double *mean = (double *)malloc(sizeof(double) * (size_t)count), most = 0, most_of_all = 0;
    double relative = precision->rounding > 0 ? precision->rounding * g->nodes[g->n].depth : GRADIENT_F32;
    float dot = 0;
    for (int k = 0; k < count; k++) {
        mean[k] = e->grad[1] && micros == 2 ? (e->grad[0][at + k] + e->grad[1][at + k]) / 2
                                            : e->grad[0][at + k];
        if (fabs(mean[k]) > most) most = fabs(mean[k]);
    }
    for (int k = 0; k < e->size; k++)
        if (fabs(e->grad[0][k]) > most_of_all) most_of_all = fabs(e->grad[0][k]);
    if (along) {
        double sum = 0, size = 0;
        for (int k = 0; k < count; k++) {
            sum += got[k] * e->direction[at + k];
            size += fabs(got[k] * e->direction[at + k]);
        }
        dot = (float)sum;
        most = size / sqrt((double)count) + fabs(sum);
        if (most > most_of_all) most_of_all = most;
    }
    all_near(what, along ? &dot : got, mean, along ? 1 : count,
             relative * (most + (precision->rounding > 0 ? 0.5 : 0.1) * most_of_all + g->upstream) + 1e-9);
    free(mean);
}

static void note_ops(const tt_program *p)
{
    for (int k = 0; k < p->built.t->n_code; k++) ran[p->built.t->code[k].op] = true;
}

/* Runs `micros` micro-batches of the same inputs, checks the gradients of all trainable parameters after
   each. */
static void check_accumulated(tt_program *p, const expected *e, int micros, const precision_case *precision,
                              const char *what)
{
    char name[96];
    for (int micro = 0; micro < micros; micro++) {
        if (!report(set_inputs(p) && tt_micro_step(p, NULL) == TT_OK, "%s: %s", what, tt_error(g->ctx)))
            return;
        for (int k = 1, at = 0; k <= g->n; k++) {
            node *n = &g->nodes[k];
            if (!n->param) continue;
            if (!tt_param_frozen(n->param)) {
                float *got = (float *)malloc(sizeof(float) * (size_t)(n->rows * n->cols));
                snprintf(name, sizeof name, "%s, gradient of %s after %d micro-batches", what,
                         tt_param_name(n->param), micro + 1);
                if (report(tt_get_gradient(p, n->param, got) == TT_OK, "%s: %s", name, tt_error(g->ctx)))
                    check_gradient(e, n, at, got, micro + 1, precision, name);
                free(got);
            }
            at += n->rows * n->cols;
        }
    }
}

/* The gradients that plain descent shows: a step of tt_step with a large learning rate. */
static void check_stepped(tt_program *p, const expected *e, const precision_case *precision)
{
    const float lr = 1024;
    char name[96];
    if (!report(set_inputs(p) && tt_step(p, lr, NULL) == TT_OK, "tt_step: %s", tt_error(g->ctx))) return;
    for (int k = 1, at = 0; k <= g->n; k++) {
        node *n = &g->nodes[k];
        if (!n->param) continue;
        int count = n->rows * n->cols;
        float *got = (float *)malloc(sizeof(float) * (size_t)count);
        snprintf(name, sizeof name, "tt_step, gradient of %s", tt_param_name(n->param));
        tt_param_get(n->param, got);
        for (int x = 0; x < count; x++) got[x] = (float)((n->v[x] - got[x]) / lr);
        check_gradient(e, n, at, got, 1, precision, name);
        for (int x = 0; x < count; x++) got[x] = (float)n->v[x];
        tt_param_set(n->param, got);
        free(got);
        at += count;
    }
}

static void gradient_case(int c, int s, const char *isa, const precision_case *precision, int mode)
{
    net n;
    tt_compile_options o = tt_compile_options_default();
    bool half = precision->half != TT_F32, large = sizes[s].only != NULL;
    const bool all = !takes_turns(isa), may_step = precision->mixed || !half;
    const bool steps = may_step && (all || (c + s) % 2), sums = all || !steps;
    expected *e = &known[c][s][mode][half];
    net_open(&n, &cases[c], &sizes[s], isa, mode, mode == AS_GATHERED, half);
    snprintf(where, sizeof where, "%s, size %s, %s, %s%s%s", cases[c].name, sizes[s].name, isa,
             precision->name, precision->halved ? " with the other residual" : "", g->axes ? ", axes" : "");
    int loss = loss_of(cases[c].build(), mode == AS_GATHERED);
    g->train = true;
    evaluate();
    bool wanted = fits(&cases[c], precision);
    compile_in(&o, isa, precision);
    o.loss_scale.init = 65536;
    /* Room for the sums of the backward. */
    while (o.loss_scale.init > 1 && o.loss_scale.init * g->upstream > 256) o.loss_scale.init /= 2;
    o.accumulate = true;
    tt_program *p = wanted ? tt_compile(g->tape, g->nodes[loss].t, &o) : NULL, *q = NULL;
    if (wanted && report(p != NULL, "%s", tt_error(g->ctx))) {
        if (!e->grad[0]) difference(e, loss);
        p->poison = true;
        note_ops(p);
        if (sums) check_accumulated(p, e, large ? 1 : 2, precision, "all");
        else tt_program_free(p), p = NULL; /* the parameters are then the next program's */
        if (steps) { /* stochastic rounding would hide the gradient */
            o.accumulate = false;
            o.optimizer.kind = TT_SGD;
            o.optimizer.weight_decay = 0;
            q = tt_compile(g->tape, g->nodes[loss].t, &o);
            if (report(q != NULL, "%s", tt_error(g->ctx))) {
                q->poison = true;
                note_ops(q);
                check_stepped(q, e, precision);
            }
            tt_program_free(q);
        }
        o.accumulate = true;
        const bool alone = g->params > 1 && !large && !half && all; /* one parameter at a time */
        for (int k = 1; k <= g->n && alone; k++) {
            if (!g->nodes[k].param) continue;
            tt_param_freeze(g->ctx, "*", true);
            tt_param_freeze(g->ctx, tt_param_name(g->nodes[k].param), false);
            q = tt_compile(g->tape, g->nodes[loss].t, &o);
            if (report(q != NULL, "only %s: %s", tt_param_name(g->nodes[k].param), tt_error(g->ctx))) {
                q->poison = true;
                check_accumulated(q, e, 1, precision, "alone");
            }
            tt_program_free(q);
        }
    }
    tt_program_free(p);
    net_close();
}

static void gradient(const char *isa)
{
    if (!has_isa(isa))
        SKIP(is_cuda(isa) ? "this build is without TINYTRAIN_CUDA" : "this CPU does not have it");
    ask_for_a_case();
    for (int c = 0; c < CASE_COUNT; c++)
        for (int s = 0; s < SIZES; s++) {
            if (!fits_case(&sizes[s], &cases[c], isa) || !test_takes(c + s)) continue;
            for (int k = 0; k < PRECISIONS; k++)
                for (int mode = AS_PARAM; mode <= AS_GATHERED; mode++) {
                    const precision_case *p = &precisions[k];
                    if (leaves_to_others(isa, c + s + k, 2)) continue;
                    if (sizes[s].only && k > 0 && !(sizes[s].half && p->mixed && !p->halved)) continue;
                    const bool both = k == 0 && TEST_SWEEP == 1 && !is_cuda(isa);
                    const int turn = is_cuda(isa) ? c : c + s; /* of builds of the emulator, see left_out */
                    bool wanted = sizes[s].only ? mode == AS_GATHERED : both || turn % 2 == mode - AS_PARAM;
                    if (p->halved) wanted = (c + s) % 4 == mode;
                    if (left_out(isa, &sizes[s], c + s + k)) wanted = false;
                    if (wanted && (!is_bf16(isa) || p->half == TT_BF16)) gradient_case(c, s, isa, p, mode);
                }
        }
}

TEST(gradient_portable) { gradient("portable"); }
TEST(gradient_avx2) { gradient("avx2"); }
TEST(gradient_avx512) { gradient("avx512"); }
TEST(gradient_avx512_dot) { gradient("avx512_dot"); }
TEST(gradient_avx512_tiles) { gradient("avx512_tiles"); }
TEST(gradient_neon) { gradient("neon"); }
TEST(gradient_neon_dot) { gradient("neon_dot"); }
TEST(gradient_cuda) /* by warpgroups: attention_by_warpgroups */
{
    setenv("TINYTRAIN_WGMMA", "0", 1);
    gradient("cuda");
    unsetenv("TINYTRAIN_WGMMA");
}

/* Whether "cuda" opens; else why not. */
static bool opens_cuda(char *message, size_t capacity)
{
    tt_context_options co = tt_context_options_default();
    tt_compile_options o = tt_compile_options_default();
    co.threads = 1;
    co.logger.log = test__no_log;
    tt_context *ctx = open_isa(co, "cuda");
    tt_tape *t = ctx ? tt_tape_new(ctx) : NULL;
    const tt_value x = tt_input(t, "x", TT_F32, 1, 4), y = tt_gelu(t, x);
    tt_output(t, y);
    o.train = false;
    o.device = "cuda";
    tt_program *p = t ? tt_compile(t, y, &o) : NULL;
    const bool has = p && tt_allocate(p) == TT_OK;
    snprintf(message, capacity, "%.190s", has ? "" : tt_error(ctx));
    tt_program_free(p);
    tt_tape_free(t);
    tt_close(ctx);
    return has;
}

/* Sizes with heads of 33 to 64, whole sequences and listed queries, in both dtypes by turns, and of 97 to
   128, in both. */
TEST(attention_by_warpgroups)
{
    char why[200];
    if (!has_isa("cuda")) SKIP("this build is without TINYTRAIN_CUDA");
#ifdef TT_EMULATE
    emu_configure(1, (size_t)16 << 20, 1, 1);
    emu_set_capability(0, 9, 0);
#endif
    const bool has = opens_cuda(why, sizeof why);
    for (int c = 0; c < CASE_COUNT && has; c++)
        for (int s = 0; s < SIZES; s++) {
            const char *name = cases[c].name;
            const bool other = tt__match("*alibi*", name) || tt__match("*blocks*", name); /* other kernels' */
            const int head_size = sizes[s].head_size;
            const bool wide = (head_size > 32 && head_size <= 64) || (head_size > 96 && head_size <= 128);
            if (cases[c].op != TT__OP_ATTENTION || other || !wide || !asked_for(&cases[c])) continue;
            if (!test_takes(c + s)) continue;
            if (sizes[s].only && !tt__match(sizes[s].only, name) &&
                !tt__match("rows_of_attention_grouped", name))
                continue;
#ifdef TT_EMULATE
            if (strcmp(emu_build(), "plain") != 0 && !tt__match("rows_*", name) && c % 8 != 0) continue;
#endif
            for (int turn = 0; turn < (head_size > 96 ? 2 : 1); turn++) { /* bf16-mixed, 16-mixed */
                const precision_case *p = &precisions[(c + s + turn) % 2 ? 1 : 3];
                reference_case(&cases[c], &sizes[s], "cuda", p, AS_INPUT, true);
                gradient_case(c, s, "cuda", p, AS_GATHERED);
            }
        }
    if (!has) SKIP(why);
}

/* Every op with a backward has a case, and every op of all was run by the gradient tests. */
TEST(every_op_has_a_case)
{
    for (int op = 0; op < TT__OP_COUNT; op++) {
        const tt__instr i = tt__new_instr(op);
        const tt__gradient *how = &tt__rules_of(&i)->backward;
        bool found = (!how->emit && !how->reads) || op >= TT__OP_ALL_REDUCE; /* test_tensor.c has these */
        for (int c = 0; c < CASE_COUNT; c++) found |= cases[c].op == op;
        snprintf(where, sizeof where, "op '%s'", tt__ops[op].name);
        report(found, "has a backward, but no line in CASES");
    }
    if (!ran[TT__OP_FILL] || getenv("TEST_PART")) return; /* not all gradient tests ran in this process */
    for (int op = 0; op < TT__OP_COUNT; op++) {
        snprintf(where, sizeof where, "op '%s'", tt__ops[op].name);
        bool streams = tt__ops[op].flags & TT__ANY_SPACE; /* test_planner.c has programs with these */
        bool of_ranks = op >= TT__OP_ALL_REDUCE;          /* and test_ranks.c with these */
        bool caches = op == TT__OP_STORE_ROWS;            /* which has no backward: and test_lm.c */
        bool fp8 = op == TT__OP_QUANTIZE || op == TT__OP_FP8_HISTORY; /* see training_in_fp8 */
        report(ran[op] || streams || of_ranks || caches || fp8, "was in no program of the gradient tests");
    }
}

/* Far from 0 an activation is x, 0, 1 or -1, and its derivative 1 or 0: nothing may be left of 1 - 1 and
   multiplied by a large x. */
TEST(activations_far_from_zero)
{
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon"};
    static float x[8] = {-1e4f, 1e4f, -200, 200, -90, 90, -1e10f, 1e10f};
    for (int k = 0; k < 4; k++)
        for (int act = TT__ACT_GELU; act <= TT__ACT_SILU && has_isa(isa[k]); act++) {
            test_allocator a;
            tt_context_options co = test_options(&a);
            tt_context *ctx = open_isa(co, isa[k]);
            int64_t dims[2] = {1, 8};
            tt_init zeros = {TT_INIT_ZEROS, 0};
            tt_compile_options o = tt_compile_options_default();
            tt_param *w = tt_param_new(ctx, "w", 2, dims, zeros);
            tt_tape *t = tt_tape_new(ctx);
            tt_value y = tt__activation(t, tt_param_value(t, w), act),
                     target = tt_input(t, "target", TT_F32, 1, 8);
            tt_value loss = tt_mean_squared_error(t, y, target, tt__handle(t, 0));
            float far[8], got[8], gradient_of[8];
            tt_output(t, y);
            tt_param_set(w, x);
            o.accumulate = true;
            tt_program *p = tt_compile(t, loss, &o);
            for (int c = 0; c < 8; c++) far[c] = -4e12f; /* the gradient that enters: 1e12 */
            if (CHECK(p && tt_set(p, target, far, 1) == TT_OK && tt_micro_step(p, NULL) == TT_OK &&
                      tt_get(p, y, got, 8) == TT_OK && tt_get_gradient(p, w, gradient_of) == TT_OK))
                for (int c = 0; c < 8; c++) {
                    double limit = act == TT__ACT_TANH ? (x[c] > 0 ? 1 : -1) : x[c] > 0 ? x[c] : 0;
                    snprintf(where, sizeof where, "%s(%g), %s", tt__act_name(act), (double)x[c], isa[k]);
                    report(fabs(got[c] - limit) <= 1e-12 * fabs((double)x[c]), "is %.9g, expected %.9g",
                           (double)got[c], limit);
                    report(fabs(gradient_of[c] / 1e12 - (act == TT__ACT_TANH ? 0 : limit > 0)) <= 0.003,
                           "has the derivative %.9g", gradient_of[c] / 1e12);
                }
            tt_program_free(p);
            tt_tape_free(t);
            TEST_CLOSE(ctx, &a);
        }
}

/* ------------------------------------------------------------------------------------------------- rotary */

/* Frequencies and magnitudes of each scaling, as ROPE_INIT_FUNCTIONS of transformers 5.23 has them: rows
   (1, 0) are turned by position 1, and by one where the angle in floats is far from its start. */
TEST(rotary_scaling)
{
    static const struct {
        const char *name; tt_rotary_scaling scaling; int size, original;
        float base, factor, low, high; double magnitude, frequency[8];
    } rows[] = {
        {"plain", TT_ROTARY_PLAIN, 4, 0, 100, 0.5f, -1, -1, 1, {1, 0.1}},
        {"linear", TT_ROTARY_LINEAR, 8, 8192, 10000, 4, 0, 0, 1, {0.25, 0.025, 0.0024999999, 0.00025000001}},
        {"llama3", TT_ROTARY_LLAMA3, 16, 8192, 500000, 8, 0, 0, 1,
         {1, 0.19392276, 0.037606031, 0.0072926651, 0.00052484602, 3.4281024e-05, 6.6478697e-06,
          1.2891732e-06}},
        {"yarn", TT_ROTARY_YARN, 16, 4096, 10000, 16, 0, 0, 1.2772588722239782,
         {1, 0.31622776, 0.1, 0.024211189, 0.0053125001, 0.00093880121, 6.2500003e-05, 1.9764237e-05}},
        {"yarn of other turns", TT_ROTARY_YARN, 12, 32768, 1000000, 4, 2, 24, 1.138629436111989,
         {1, 0.099999994, 0.0099999988, 0.00062500004, 2.4999992e-05, 2.5000008e-06}},
    };
    const int far = 100003; /* the angle of pair 0, whose frequency is 1 */
    for (size_t k = 0; k < TT__COUNT(rows); k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_rotary_options o = tt_rotary_options_default(1);
        tt_compile_options c = tt_compile_options_default();
        const int size = rows[k].size, pairs = size / 2;
        float in[2 * 16] = {0}, out[2 * 16] = {0};
        int32_t position[2] = {1, far};
        o.scaling = rows[k].scaling;
        o.base = rows[k].base;
        o.factor = rows[k].factor;
        o.original = rows[k].original;
        o.low = rows[k].low;
        o.high = rows[k].high;
        for (int j = 0; j < pairs; j++) in[j] = in[size + j] = 1;
        tt_value x = tt_input(t, "x", TT_F32, 2, size), at = tt_input(t, "at", TT_I32, 2, 1);
        tt_value y = tt_rotary(t, x, at, &o);
        tt_output(t, y);
        c.train = false;
        c.device = "cpu";
        tt_program *p = tt_compile(t, y, &c);
        CHECK(p && tt_set(p, x, in, 2) == TT_OK && tt_set(p, at, position, 2) == TT_OK &&
              tt_run(p, NULL) == TT_OK && tt_get(p, y, out, 2 * size) == TT_OK);
        for (int j = 0; j < pairs; j++) {
            const double cosine = out[j], sine = out[pairs + j], expected = rows[k].frequency[j];
            snprintf(where, sizeof where, "%s, pair %d", rows[k].name, j);
            report(fabs(atan2(sine, cosine) - expected) <= 1e-6 * expected, "turns by %.9g, expected %.9g",
                   atan2(sine, cosine), expected);
            report(fabs(hypot(sine, cosine) - rows[k].magnitude) <= 1e-6, "is multiplied by %.9g, not %.9g",
                   hypot(sine, cosine), rows[k].magnitude);
        }
        if (rows[k].frequency[0] == 1) {
            CHECK_NEAR(out[size], rows[k].magnitude * cos(far), 1e-6);
            CHECK_NEAR(out[size + pairs], rows[k].magnitude * sin(far), 1e-6);
        }
        position[1] = 1 << 24;
        CHECK(p && tt_set(p, x, in, 2) == TT_OK && tt_set(p, at, position, 2) == TT_OK &&
              tt_run(p, NULL) == TT_ERR_ARGUMENT && strstr(tt_error(ctx), "'at' has 16777216 in row 1"));
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* ------------------------------------------------------------------------------------------------ dropout */

/* Masks are those of the documented generator in every step and micro-batch, the same when run again,
   different elsewhere. */
TEST(dropout_masks)
{
    static const size_set size = {"masks", 3, 37, 1, 1, 1, {150, 50}, NULL, false};
    const uint32_t zero[4] = {0, 0, 0, 0};
    uint32_t u[4];
    double first[4] = {0, 0, 0, 0};
    philox(10, zero, 0, u); /* the known answers of Random123 */
    CHECK(u[0] == 0x6627e8d5u && u[1] == 0xe169c58du && u[2] == 0xbc57ac4cu && u[3] == 0x9b00dbd8u);
    philox(7, zero, 0, u);
    CHECK(u[0] == 0x5f6fb709u && u[1] == 0x0d893f64u && u[2] == 0x4f121f81u && u[3] == 0x4f730a48u);
    for (int accumulate = 0; accumulate < 2; accumulate++)
        for (int again = 0; again < 2; again++) {
            net n;
            tt_compile_options o = tt_compile_options_default();
            op_case c = {"masks", TT__OP_DROPOUT, NULL};
            o.accumulate = accumulate;
            net_open(&n, &c, &size, "portable", AS_PARAM, false, false);
            int x = V(ROWS, g->d), y = dropout(x, 0.1f), z = dropout(y, 0.25f), count = 200 * g->d,
                loss = loss_of(z, false);
            float *got = (float *)malloc(sizeof(float) * (size_t)count);
            tt_output(g->tape, g->nodes[y].t);
            tt_output(g->tape, g->nodes[z].t);
            g->train = true;
            tt_program *p = tt_compile(g->tape, g->nodes[loss].t, &o);
            for (int k = 0; k < 4 && CHECK(p != NULL); k++) {
                long kept_elements = 0;
                snprintf(where, sizeof where, "dropout, run %d, %s", k,
                         accumulate ? "micro-batches" : "steps");
                g->step = accumulate ? 0 : (uint64_t)k;
                g->micro = accumulate ? (uint64_t)k : 0;
                evaluate();
                CHECK(set_inputs(p) && (accumulate ? tt_micro_step(p, NULL) : tt_step(p, 0, NULL)) == TT_OK);
                check_result(p, y, &precisions[0]);
                check_result(p, z, &precisions[0]);
                double sum = 0;
                tt_get(p, g->nodes[z].t, got, (size_t)count);
                for (int e = 0; e < count; e++) { sum += got[e] * (1 + e % 7); kept_elements += got[e] != 0; }
                if (again) report(first[k] == sum, "another run gives another mask");
                first[k] = sum;
                for (int j = 0; j < k; j++) report(first[j] != sum, "two runs have the same mask");
                double p_kept = 0.9 * 0.75;
                CHECK_NEAR((double)kept_elements / count, p_kept,
                           4 * sqrt(p_kept * (1 - p_kept) / count) + 2.0 / 65536);
            }
            free(got);
            tt_program_free(p);
            net_close();
        }
}

/* ------------------------------------------------------------------------------------------ a small model */

enum { MODEL_TOKENS = 640, MODEL_SEQS = 16, MODEL_WIDTH = 24, MODEL_VOCAB = 40, MODEL_CLASSES = 4 };

typedef struct model {
    tt_context *ctx;
    tt_tape *t;
    tt_value ids, start, labels, loss;
} model;

typedef struct batch {
    int seqs, rows;
    int32_t ids[MODEL_TOKENS], start[MODEL_SEQS + 1], labels[MODEL_SEQS];
} batch;

static tt_param *model_param(tt_context *ctx, const char *part, int layer, int rows, int cols,
                             tt_init_kind kind)
{
    char name[64];
    int64_t dims[2] = {rows, cols};
    tt_init init = {kind, 0.2f};
    snprintf(name, sizeof name, "layer.%d.%s", layer, part);
    return tt_param_new(ctx, name, rows > 1 ? 2 : 1, rows > 1 ? dims : &dims[1], init);
}

/* Embedding, two attention layers, mean of each sequence, classes. */
static void model_open(model *m, int threads, float p)
{
    tt_context_options o = tt_context_options_default();
    tt_attention_options a = tt_attention_options_default(3);
    const int D = MODEL_WIDTH;
    o.threads = threads;
    o.seed = 11;
    o.logger.log = test__no_log;
    a.dropout = p;
    a.max_length = MODEL_TOKENS / MODEL_SEQS;
    tt_context *ctx = m->ctx = tt_open(&o);
    tt_tape *t = m->t = tt_tape_new(ctx);
    int64_t tokens = tt_axis(t, "tokens", MODEL_TOKENS), seqs = tt_axis(t, "seqs", MODEL_SEQS);
    m->ids = tt_input(t, "ids", TT_I32, tokens, 1);
    m->start = tt_seq_start(t, "seq_start", seqs);
    m->labels = tt_input(t, "labels", TT_I32, seqs, 1);
    tt_value x = tt_embedding(t, m->ids, model_param(ctx, "embedding", 0, MODEL_VOCAB, D, TT_INIT_NORMAL));
    for (int l = 0; l < 2; l++) {
        tt_value h = tt_layernorm(t, x, model_param(ctx, "norm1.weight", l, 1, D, TT_INIT_ONES),
                                  model_param(ctx, "norm1.bias", l, 1, D, TT_INIT_ZEROS), 1e-5f);
        tt_value qkv = tt_linear(t, h, model_param(ctx, "qkv.weight", l, 3 * D, D, TT_INIT_NORMAL),
                                 model_param(ctx, "qkv.bias", l, 1, 3 * D, TT_INIT_ZEROS));
        h = tt_attention(t, tt_slice(t, qkv, 0, D), tt_slice(t, qkv, D, D), tt_slice(t, qkv, 2 * D, D),
                         m->start, &a);
        h = tt_linear(t, h, model_param(ctx, "out.weight", l, D, D, TT_INIT_NORMAL),
                      model_param(ctx, "out.bias", l, 1, D, TT_INIT_ZEROS));
        x = tt_add(t, x, tt_dropout(t, h, p));
        h = tt_layernorm(t, x, model_param(ctx, "norm2.weight", l, 1, D, TT_INIT_ONES),
                         model_param(ctx, "norm2.bias", l, 1, D, TT_INIT_ZEROS), 1e-5f);
        h = tt_gelu(t, tt_linear(t, h, model_param(ctx, "up.weight", l, 2 * D, D, TT_INIT_NORMAL),
                                 model_param(ctx, "up.bias", l, 1, 2 * D, TT_INIT_ZEROS)));
        h = tt_linear(t, h, model_param(ctx, "down.weight", l, D, 2 * D, TT_INIT_NORMAL),
                      model_param(ctx, "down.bias", l, 1, D, TT_INIT_ZEROS));
        x = tt_add(t, x, tt_dropout(t, h, p));
    }
    x = tt_linear(t, tt_mean_pool(t, x, m->start),
                  model_param(ctx, "classes", 0, MODEL_CLASSES, D, TT_INIT_NORMAL), NULL);
    m->loss = tt_cross_entropy(t, x, m->labels, NULL);
}

static void model_close(model *m)
{
    tt_tape_free(m->t);
    tt_close(m->ctx);
}

/* Sequences of different lengths, whose tokens lean towards their class. */
static batch make_batch(int seqs, int longest, uint64_t seed)
{
    batch b;
    memset(&b, 0, sizeof b);
    seed = seed * 7919 + 12345;
    for (int k = 0; k < 8; k++) test_random(&seed);
    b.seqs = seqs;
    for (int s = 0; s < seqs; s++) {
        int length = 1 + (int)(test_random(&seed) % (uint32_t)longest);
        b.labels[s] = (int32_t)(test_random(&seed) % MODEL_CLASSES);
        for (int k = 0; k < length; k++) {
            bool leans = test_random(&seed) % 10 < 5;
            b.ids[b.rows++] = (int32_t)(leans ? (uint32_t)b.labels[s] * 10 + test_random(&seed) % 10
                                              : test_random(&seed) % MODEL_VOCAB);
        }
        b.start[s + 1] = b.rows;
    }
    return b;
}

static bool model_set(const model *m, tt_program *p, const batch *b)
{
    return tt_set(p, m->ids, b->ids, b->rows) == TT_OK &&
           tt_set(p, m->start, b->start, b->seqs + 1) == TT_OK &&
           tt_set(p, m->labels, b->labels, b->seqs) == TT_OK;
}

/* All parameters, one after another; *size of them. To be freed. */
static float *all_params(tt_context *ctx, size_t *size)
{
    float *values = NULL;
    *size = 0;
    for (int k = 0; k < ctx->n_params; k++) {
        size_t n = (size_t)tt_param_size(ctx->params[k]);
        values = (float *)realloc(values, sizeof(float) * (*size + n));
        CHECK(tt_param_get(ctx->params[k], values + *size) == TT_OK);
        *size += n;
    }
    return values;
}

static bool same_params(const float *a, const float *b, size_t n)
{
    return memcmp(a, b, sizeof(float) * n) == 0;
}

TEST(same_bits_for_any_number_of_threads)
{
    static const int threads[] = {1, 2, 3, 5};
    for (int precision = 0; precision < PRECISIONS; precision++) {
        float *first = NULL;
        tt_stats first_stats;
        memset(&first_stats, 0, sizeof first_stats);
        for (int k = 0; k < 4; k++) {
            model m;
            tt_stats stats;
            size_t n;
            tt_compile_options o = tt_compile_options_default();
            compile_in(&o, "portable", &precisions[precision]);
            o.loss_scale.init = 256;
            o.optimizer.clip_norm = 0.5f;
            memset(&stats, 0, sizeof stats);
            model_open(&m, threads[k], 0.1f);
            tt_program *p = tt_compile(m.t, m.loss, &o);
            for (int step = 0; step < 4 && CHECK(p != NULL); step++) {
                batch b = make_batch(MODEL_SEQS - step, MODEL_TOKENS / MODEL_SEQS, (uint64_t)step);
                CHECK(model_set(&m, p, &b) && tt_step(p, 0.01f, &stats) == TT_OK);
            }
            float *now = all_params(m.ctx, &n);
            if (!first) { first = now; first_stats = stats; }
            else {
                snprintf(where, sizeof where, "%s, %d threads", precisions[precision].name, threads[k]);
                report(same_params(first, now, n), "the parameters have other bits than with one thread");
                report(stats.loss == first_stats.loss && stats.grad_norm == first_stats.grad_norm,
                       "loss or gradient norm differ from one thread's");
                free(now);
            }
            tt_program_free(p);
            model_close(&m);
        }
        free(first);
    }
}

/* ---------------------------------------------------------------------------------------------- precision */

/* The mean loss of the last 20 of 60 steps; the first losses; steps skipped. */
static double train_model(int precision, double first[10], int64_t *skipped)
{
    model m;
    tt_stats stats;
    double last = 0;
    tt_compile_options o = tt_compile_options_default();
    compile_in(&o, "portable", &precisions[precision]);
    o.loss_scale.init = 1024;
    model_open(&m, 2, 0);
    tt_program *p = tt_compile(m.t, m.loss, &o);
    for (int step = 0; step < 60 && CHECK(p != NULL); step++) {
        batch b = make_batch(MODEL_SEQS, 30, (uint64_t)step % 20);
        CHECK(model_set(&m, p, &b) && tt_step(p, 3e-3f, &stats) == TT_OK);
        if (step >= 40) last += stats.loss / 20;
        if (step < 10) first[step] = stats.loss;
        *skipped = stats.skipped;
    }
    tt_program_free(p);
    model_close(&m);
    return last;
}

/* The mean loss of the last 20 of 60 steps: within 0.05 of that of 32-true, which is far below that of
   guessing. The losses of the first ten steps, of about 1.5, differ by what rounds in two layers: 2^-8 and
   2^-11 in each of 16 ops. */
TEST(precisions_train_alike)
{
    double first[10], others[10];
    int64_t skipped;
    double loss = train_model(0, first, &skipped);
    CHECK(loss < 0.6 && skipped == 0);
    for (int k = 1; k < PRECISIONS; k++) {
        CHECK_NEAR(train_model(k, others, &skipped), loss, 0.05);
        CHECK(skipped == 0); /* so that steps can be compared */
        for (int step = 0; step < 10; step++)
            CHECK_NEAR(others[step], first[step], 16 * precisions[k].rounding * 1.5);
    }
}

/* Rounds up with a probability equal to the dropped fraction; r holds 16 random bits. */
static uint16_t bf16_stochastic(float x, uint32_t r)
{
    uint32_t u = tt__bits(x);
    if ((u & 0x7f800000u) == 0x7f800000u) return tt__to_bf16(x);
    return (uint16_t)((u + (r & 0xffff)) >> 16);
}

/* As bf16_stochastic, where nearest does not overflow either. */
static uint16_t f16_stochastic(float x, uint32_t r)
{
    uint32_t u = tt__bits(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffffu;
    if (magnitude >= 0x477fe000u) return tt__to_f16(x); /* 65504 and more */
    if (magnitude >= 0x38800000u) return (uint16_t)(sign | ((magnitude - 0x38000000u + (r & 0x1fff)) >> 13));
    float units = tt__float(magnitude) * 0x1p24f; /* of the subnormals; exact */
    return (uint16_t)(sign | ((uint32_t)units +
                              ((units - (float)(uint32_t)units) * 65536 + (float)(r & 0xffff) >= 65536)));
}

/* Every step moves 16-bit parameters of 1.5 by a 64th of their unit in the last place, u = 2^-7 or 2^-10.
   Rounding to nearest would leave them where they are; stochastic rounding moves their mean as exact
   arithmetic does, up to 5 standard deviations of u / sqrt(4096). */
TEST(stochastic_rounding_is_unbiased)
{
    enum { N = 4096 };
    static float values[N], targets[N];
    for (int k = 0; k < 4; k++) {
        const int steps = k % 2 ? 64 : 32;
        const bool f16 = k >= 2;
        const double u = f16 ? 0x1p-10 : 0x1p-7, lr = 32 * u;
        test_allocator a;
        tt_context *ctx = test_open(&a);
        int64_t dims[2] = {64, 64};
        tt_init zeros = {TT_INIT_ZEROS, 0};
        tt_param *w = tt_param_new(ctx, "w", 2, dims, zeros);
        tt_tape *t = tt_tape_new(ctx);
        tt_value y = tt_input(t, "y", TT_F32, 64, 64),
                 loss = tt_mean_squared_error(t, tt_param_value(t, w), y, tt__handle(t, 0));
        tt_compile_options o = tt_compile_options_default();
        double exact = 1.5, mean = 0;
        o.precision = f16 ? "16-true" : "bf16-true";
        o.optimizer.kind = TT_SGD;
        o.optimizer.weight_decay = 0;
        for (int e = 0; e < N; e++) { values[e] = 1.5f; targets[e] = 0.5f; }
        tt_param_set(w, values);
        tt_program *p = tt_compile(t, loss, &o);
        if (CHECK(p != NULL)) {
            for (int s = 0; s < steps; s++) {
                CHECK(tt_set(p, y, targets, 64) == TT_OK && tt_step(p, (float)lr, NULL) == TT_OK);
                exact -= lr * 2 * (exact - 0.5) / N;
            }
            tt_param_get(w, values);
            for (int e = 0; e < N; e++) mean += values[e] / N;
            CHECK_NEAR(mean, exact, 5 * u / 64);
            CHECK(1.5 - mean > 0.4 * u);
            float before[N];
            memcpy(before, values, sizeof before);
            CHECK(tt_set(p, y, targets, 64) == TT_OK && tt_step(p, 0, NULL) == TT_OK);
            tt_param_get(w, values);
            CHECK(same_params(before, values, N)); /* what 16 bits hold exactly is not rounded */
        }
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

#ifdef TINYTRAIN_CUDA
/* Runs an instruction, whose operands are the host's, on a GPU. workspace_after: where not NULL, it gets what
   that then has. */
static void *workspace_after;
static bool run_on_cuda(const tt__launch *host, size_t workspace)
{
    const tt__backend *b = &tt__cuda_backend;
    char error[256] = "";
    enum { WORKSPACE = TT__MAX_IN + TT__MAX_OUT, RESIDENT, MEMORIES };
    void *memory[MEMORIES] = {0};
    tt__launch l = *host;
    tt__device *d = l.device = b->open(tt__cpu_of(host)->ctx, 0, 1, error, sizeof error);
    bool ok = report(d != NULL, "%s", error);
    if (ok && workspace)
        ok = (l.workspace = memory[WORKSPACE] = b->allocate(d, workspace)) &&
             (l.resident = memory[RESIDENT] = b->allocate(d, TT__CUDA_RESIDENT));
    for (int to = 0; to < 2; to++) {
        for (int k = 0; k < TT__MAX_IN + TT__MAX_OUT && ok; k++) {
            tt__mat *m = k < TT__MAX_IN ? &l.in[k] : &l.out[k - TT__MAX_IN];
            const tt__mat *h = k < TT__MAX_IN ? &host->in[k] : &host->out[k - TT__MAX_IN];
            /* fp8 lies row by row or column by column. */
            const int64_t lines = tt__is_fp8(h->dtype) ? tt__max(h->rows, h->cols) : h->rows;
            size_t bytes = (size_t)(lines * h->ld) * tt_dtype_bytes(h->dtype);
            if (!h->data) continue;
            if (to) ok = b->read(d, h->data, m->data, bytes) == TT_OK;
            else
                ok = (m->data = memory[k] = b->allocate(d, bytes)) != NULL &&
                     b->copy(d, TT__COMPUTE_STREAM, m->data, h->data, bytes) == TT_OK && b->wait(d) == TT_OK;
        }
        if (ok && !to) ok = b->launch(&l, 1) == TT_OK;
    }
    if (ok && workspace_after) ok = b->read(d, workspace_after, l.workspace, workspace) == TT_OK;
    if (d) report(ok, "%s", b->error(d));
    for (int k = 0; k < MEMORIES; k++) if (memory[k]) b->release(d, memory[k]);
    b->close(d);
    return ok;
}
#else
static bool run_on_cuda(const tt__launch *host, size_t workspace)
{
    (void)host;
    (void)workspace;
    return false;
}
#endif

/* Each instruction set rounds as the functions above do with the documented numbers: halves of the words of
   Philox counter {element / 8} under the key of step, tensor and instruction. From 0 with a rate of 1, a step
   of SGD leaves the gradient's negative: numbers of every size, near the limits of both dtypes, infinite and
   not a number, in a last chunk that is no whole number of vectors. */
TEST(stochastic_rounding_of_each_isa)
{
    enum { N = 2 * TT__CHUNK + 1237 };
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon", "cuda"};
    static const uint32_t edges[] = {0,          0x80000000, 1,          0x7fffff,   0x800000,
                                     0x33000000, 0x33800001, 0x387fffff, 0x38800000, 0x477fdfff,
                                     0x477fe000, 0x477fefff, 0x477ff000, 0xc7800000, 0x7f7f0000,
                                     0x7f7fffff, 0x7f800000, 0xff800000, 0x7f800001, 0xffc12345};
    static float g[N];
    static uint16_t h[N];
    uint64_t s = 23;
    for (int e = 0; e < N; e++)
        g[e] = tt__float(e % 3 == 0 ? edges[e / 3 % TT__COUNT(edges)]
                         : e % 3 == 1 ? test_random(&s)
                         : (test_random(&s) & 0x8fffffff) + 0x32000000);
    for (int k = 0; k < TT__COUNT(isa); k++) {
        if (!has_isa(isa[k])) continue;
        for (int threads = 1; threads <= (is_cuda(isa[k]) ? 1 : 2); threads++) {
            for (int f16 = 0; f16 < 2; f16++) {
                test_allocator a;
                tt_context_options co = test_options(&a);
                co.threads = threads;
                tt_context *ctx = open_isa(co, isa[k]);
                tt__instr i = tt__new_instr(TT__OP_SGD);
                float clip[2] = {1, 1};
                tt__run run;
                tt__launch l;
                int wrong = 0;
                memset(&run, 0, sizeof run);
                memset(&l, 0, sizeof l);
                memset(h, 0, sizeof h);
                run.seed = 5;
                run.step = 3;
                run.lr = 1;
                i.random = 7;
                l.device = (tt__device *)(void *)&ctx->cpu;
                l.instr = &i;
                l.in[TT__RUN_IN].data = &run;
                l.in[TT__RUN_IN].dtype = TT_U8;
                l.in[TT__RUN_IN].rows = 1;
                l.in[TT__RUN_IN].cols = l.in[TT__RUN_IN].ld = sizeof run;
                l.in[0].data = g;
                l.in[0].dtype = TT_F32;
                l.in[0].rows = 1;
                l.in[0].cols = l.in[0].ld = N;
                l.in[1].data = clip;
                l.in[1].rows = 1;
                l.in[1].cols = l.in[1].ld = 2;
                l.out[0].data = h;
                l.out[0].dtype = f16 ? TT_F16 : TT_BF16;
                l.out[0].rows = 1;
                l.out[0].cols = l.out[0].ld = N;
                l.workspace = calloc((size_t)threads * TT__ROW_BUFFERS, tt__row_bytes(TT__CHUNK));
                CHECK(is_cuda(isa[k]) ? run_on_cuda(&l, 0) : ctx->cpu.isa->run[TT__OP_SGD](&l) == TT_OK);
                uint64_t key = tt__stream_key(run.seed, TT__RANDOM_ROUNDING, 3, 7);
                for (int e = 0; e < N; e++) {
                    uint32_t counter[4] = {(uint32_t)e / 8, 0, 0, 0}, u[4];
                    tt__philox_rounds(TT__DRAW_ROUNDS, counter, key, u);
                    uint32_t bits = u[e % 8 / 2] >> (e % 2 * 16);
                    float x = 0.0f - (g[e] + 0.0f);
                    uint16_t expected = f16 ? f16_stochastic(x, bits) : bf16_stochastic(x, bits);
                    if (x != x)
                        wrong += f16 ? tt__from_f16(h[e]) == tt__from_f16(h[e])
                                     : tt__from_bf16(h[e]) == tt__from_bf16(h[e]);
                    else wrong += h[e] != expected;
                }
                snprintf(where, sizeof where, "%s, %s, %d threads", isa[k], f16 ? "f16" : "bf16", threads);
                report(wrong == 0, "%d of %d numbers are rounded wrongly", wrong, N);
                free(l.workspace);
                TEST_CLOSE(ctx, &a);
            }
        }
    }
}

/* A parameter of which each of three ranks updates its piece, with random rounding, has the bits of one that
   is updated whole. */
TEST(pieces_are_updated_as_the_whole)
{
    enum { N = 5 * TT__CHUNK + 1237, RANKS = 3, OUTPUTS = 3 };
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon", "cuda"};
    static const int op[] = {TT__OP_ADAM, TT__OP_SGD};
    static const tt_dtype dtype[] = {TT_BF16, TT_F16, TT_F32};
    static float made[2][1 + OUTPUTS][N]; /* [whole, pieces][gradient, parameter and state] */
    for (int c = 0; c < TT__COUNT(isa) * TT__COUNT(op) * TT__COUNT(dtype); c++) {
        const char *on = isa[c / (TT__COUNT(op) * TT__COUNT(dtype))];
        const tt_dtype type = dtype[c % TT__COUNT(dtype)];
        const size_t item = tt_dtype_bytes(type);
        test_allocator a;
        uint64_t s = (uint64_t)c;
        if (!has_isa(on)) continue;
        tt_context_options co = test_options(&a);
        tt_context *ctx = open_isa(co, on);
        tt__instr i = tt__new_instr(op[c / TT__COUNT(dtype) % TT__COUNT(op)]);
        const int outputs = i.op == TT__OP_ADAM ? 3 : 2;
        float clip[2] = {1, 1};
        tt__run run;
        tt__launch l;
        bool ok = true;
        memset(&run, 0, sizeof run);
        memset(&l, 0, sizeof l);
        run.seed = 5;
        run.lr = 0.1f;
        i.random = 7;
        i.attr.beta1 = 0.9f;
        i.attr.beta2 = 0.99f;
        i.attr.eps = 1e-8f;
        l.device = (tt__device *)(void *)&ctx->cpu;
        l.instr = &i;
        const tt__mat of_run = {&run, TT_U8, 1, sizeof run, sizeof run}, of_clip = {clip, TT_F32, 1, 2, 2};
        l.in[TT__RUN_IN] = of_run;
        l.in[1] = of_clip;
        for (int m = 0; m <= outputs; m++)
            for (int e = 0; e < N; e++) {
                float x = (m == 3 ? 0 : -0.5f) + (float)test_random(&s) * 0x1p-32f;
                tt__convert((char *)made[0][m] + (size_t)e * item, type, &x, TT_F32, 1);
            }
        memcpy(made[1], made[0], sizeof made[0]);
        l.workspace = calloc(TT__ROW_BUFFERS, tt__row_bytes(TT__CHUNK));
        for (int r = -1; r < RANKS && ok; r++) { /* -1: whole */
            const int64_t n = tt__piece(N, TT__CHUNK, false, r < 0 ? 0 : r, r < 0 ? 1 : RANKS, &l.first);
            for (int m = 0; m <= outputs; m++) {
                const tt__mat of = {(char *)made[r >= 0][m] + (size_t)l.first * item, type, 1, n, n};
                if (m) l.out[m - 1] = of;
                else l.in[0] = of;
            }
            ok = CHECK(is_cuda(on) ? run_on_cuda(&l, 0) : ctx->cpu.isa->run[i.op](&l) == TT_OK);
        }
        snprintf(where, sizeof where, "%s, %s, %s", on, tt__ops[i.op].name, tt_dtype_name(type));
        report(memcmp(made[1], made[0], sizeof made[0]) == 0, "pieces have other bits than the whole");
        free(l.workspace);
        TEST_CLOSE(ctx, &a);
    }
}

/* A weight that is rounded while it is read gives the bits of a rounded copy: products of few rows, of few
   sums and packed ones, with cut tiles. */
TEST(weights_narrowed_while_read)
{
    enum { MOST = 600 * 130 };
    static const char *const isa[] = {"portable",     "avx2", "avx512",  "avx512_dot",
                                      "avx512_tiles", "neon", "neon_dot"};
    /* rows, out, width */
    static const int shape[][3] = {{1, 1, 1}, {3, 40, 130}, {20, 130, 70}, {31, 7, 600}, {100, 130, 33}};
    static float w[MOST], got[2][MOST];
    static uint16_t x[MOST], copy[MOST];
    for (int k = 0; k < TT__COUNT(isa); k++) {
        if (!has_isa(isa[k])) continue;
        for (int f16 = 0; f16 < (is_bf16(isa[k]) ? 1 : 2); f16++)
            for (int s = 0; s < 2 * TT__COUNT(shape); s++) {
                /* odd: the gradient of x */
                const int *z = shape[s / 2], rows = z[0], from = s % 2 ? z[1] : z[2],
                          to = s % 2 ? z[2] : z[1];
                const tt_dtype half = f16 ? TT_F16 : TT_BF16;
                uint64_t random = (uint64_t)s + 99;
                test_allocator a;
                tt_context_options co = test_options(&a);
                co.threads = 2;
                tt_context *ctx = open_isa(co, isa[k]);
                for (int e = 0; e < MOST; e++) w[e] = (float)test_random(&random) * 0x1p-31f - 1;
                for (int e = 0; e < MOST; e++) tt__convert(&copy[e], half, &w[e], TT_F32, 1);
                for (int e = 0; e < MOST; e++) {
                    float y = (float)test_random(&random) * 0x1p-31f - 1;
                    tt__convert(&x[e], half, &y, TT_F32, 1);
                }
                memset(got, 0, sizeof got);
                for (int narrow = 0; narrow < 2; narrow++) {
                    tt__instr i = tt__new_instr(s % 2 ? TT__OP_LINEAR_DX : TT__OP_LINEAR);
                    tt__launch l;
                    memset(&l, 0, sizeof l);
                    i.attr.narrow = narrow ? half : TT_F32;
                    l.device = (tt__device *)(void *)&ctx->cpu;
                    l.instr = &i;
                    tt__mat in = {x, half, rows, from, from}, weight = {copy, half, z[1], z[2], z[2]},
                            out = {got[narrow], TT_F32, rows, to, to};
                    if (narrow) { weight.data = w; weight.dtype = TT_F32; }
                    l.in[0] = in;
                    l.in[1] = weight;
                    l.out[0] = out;
                    size_t bytes = tt__gemm_workspace(rows, to, from);
                    l.workspace = tt__alloc(ctx, bytes);
                    CHECK(l.workspace && ctx->cpu.isa->run[i.op](&l) == TT_OK);
                    tt__free(ctx, l.workspace);
                }
                snprintf(where, sizeof where, "%s, %s, %d x %d, %s of width %d", isa[k], tt_dtype_name(half),
                         z[1], z[2], s % 2 ? "gradients" : "rows", from);
                report(memcmp(got[0], got[1], sizeof got[0]) == 0, "bits differ");
                report(rows * to == 1 || got[0][0] != got[0][1], "nothing is computed");
                TEST_CLOSE(ctx, &a);
            }
    }
}

/* Products of which every sum is exact in fp32, in any order: all bits are known. Cut panels, tiles and
   blocks in each direction, and so many sums that they are taken up in a second and third block. */
TEST(products_exact)
{
    enum { MOST = 1100 * 1100 };
    static const char *const isa[] = {"portable",     "avx2", "avx512",  "avx512_dot",
                                      "avx512_tiles", "neon", "neon_dot"};
    static const int op[] = {TT__OP_LINEAR, TT__OP_LINEAR_DX, TT__OP_LINEAR_DW},
                     shape[][3] = {{1100, 40, 200},  {40, 1100, 200}, {1100, 20, 800}, {25, 1100, 800},
                                   {1100, 1100, 20}, {33, 29, 1700},  {161, 97, 129},  {64, 96, 64}};
    static const char *const names[] = {"forward", "dx", "dw"};
    static float x[2][MOST], got[MOST], expected[MOST];
    static uint16_t half[2][MOST];
    uint64_t random = 5;
    for (int k = 0; k < 2; k++)
        for (int e = 0; e < MOST; e++) {
            x[k][e] = (float)((int)(test_random(&random) % 17) - 8) / 8;
            tt__convert(&half[k][e], TT_BF16, &x[k][e], TT_F32, 1);
        }
    for (int c = 0; c < TT__COUNT(op) * TT__COUNT(shape); c++) {
        /* (m, n), k products each */
        const int which = c % TT__COUNT(op), *z = shape[c / TT__COUNT(op)], m = z[0], n = z[1], k = z[2];
        const int a_row = which == 2 ? 1 : k, a_col = which == 2 ? m : 1, b_row = which == 0 ? 1 : n,
                  b_col = which == 0 ? k : 1;
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j++) {
                double sum = 0;
                for (int e = 0; e < k; e++)
                    sum += (double)x[0][i * a_row + e * a_col] * (double)x[1][e * b_row + j * b_col];
                expected[i * n + j] = (float)sum;
            }
        for (int s = 0; s < TT__COUNT(isa); s++)
            for (int f32 = is_bf16(isa[s]); has_isa(isa[s]) && f32 < 2; f32++) {
                test_allocator a;
                tt_context_options co = test_options(&a);
                co.threads = 2;
                tt_context *ctx = open_isa(co, isa[s]);
                tt__instr i = tt__new_instr(op[which]);
                tt__launch l;
                size_t bytes = tt__gemm_workspace(m, n, k);
                bool wide = f32 && !is_bf16(isa[s]);
                memset(&l, 0, sizeof l);
                memset(got, 0xff, sizeof got);
                i.attr.narrow = TT_F32;
                l.device = (tt__device *)(void *)&ctx->cpu;
                l.instr = &i;
                tt__mat left = {wide ? (void *)x[0] : (void *)half[0], wide ? TT_F32 : TT_BF16,
                                which == 2 ? k : m, which == 2 ? m : k, which == 2 ? m : k};
                tt__mat right = {wide ? (void *)x[1] : (void *)half[1], wide ? TT_F32 : TT_BF16,
                                 which == 0 ? n : k, which == 0 ? k : n, which == 0 ? k : n};
                tt__mat to = {got, TT_F32, m, n, n};
                l.in[0] = left;
                l.in[1] = right;
                l.out[0] = to;
                l.workspace = tt__alloc(ctx, bytes);
                memset(l.workspace, 0xff, bytes);
                CHECK(ctx->cpu.isa->run[i.op](&l) == TT_OK);
                tt__free(ctx, l.workspace);
                snprintf(where, sizeof where, "%s, %s, %s, %d x %d x %d", isa[s], wide ? "f32" : "bf16",
                         names[which], m, n, k);
                report(memcmp(got, expected, sizeof *got * (size_t)(m * n)) == 0,
                       "other bits than those of exact sums");
                TEST_CLOSE(ctx, &a);
            }
    }
}

/* The work of a window is counted by the rows that each row sees, of whole sequences and of listed rows. */
TEST(attention_window_flops)
{
    for (int c = 0; c < 8; c++) {
        static int32_t starts[] = {0, 30, 37, 100};
        const bool causal = c % 2, listed = c / 2 % 2, windowed = c / 4;
        const int window = 9;
        double expected = 0;
        int32_t rows[100];
        tt__mat in[TT__MAX_IN];
        tt__instr i = tt__new_instr(TT__OP_ATTENTION);
        memset(in, 0, sizeof in);
        i.attr.heads = i.attr.key_heads = 2;
        i.attr.causal = causal;
        i.attr.window = windowed ? window : 0;
        for (int k = 0; k < 5; k++) {
            const tt__mat m = {NULL, TT_F32, 100, 6, 6}, start = {starts, TT_I32, 4, 1, 1},
                          list = {listed ? rows : NULL, TT_I32, 100, 1, 1};
            in[k] = k < 3 ? m : k == 3 ? start : list;
        }
        if (listed) i.in[4] = 1;
        for (int s = 0; s < 3; s++)
            for (int row = starts[s]; row < starts[s + 1]; row++) {
                const bool cut = windowed && starts[s + 1] - starts[s] > window;
                rows[row] = row;
                for (int key = starts[s]; key < starts[s + 1]; key++) {
                    const bool seen = !cut || abs(row - key) < window;
                    if (causal && !cut && !listed) expected += 0.5; /* as everybody counts it */
                    else expected += seen && (key <= row || !causal);
                }
            }
        snprintf(where, sizeof where, "%scausal, %s, %s", causal ? "" : "not ", listed ? "listed" : "whole",
                 windowed ? "window" : "no window");
        const double got = tt__flops_of_attention(&i, in);
        report(got == 4 * expected * 6, "%g FLOPs, not %g", got, 4 * expected * 6);
    }
}

/* The work of block-sparse attention is that of the blocks that are seen, of listed ones as whole ones. */
TEST(attention_blocks_flops)
{
    static int32_t starts[] = {0, 30, 37, 100}, lists[2 * 9 * 2];
    for (int c = 0; c < 4; c++) {
        const bool listed = c % 2;
        double expected = 0;
        int32_t rows[100];
        tt__mat in[TT__MAX_IN];
        tt__instr i = tt__new_instr(TT__OP_ATTENTION);
        tt_attention_options o = tt_attention_options_default(2);
        memset(in, 0, sizeof in);
        o.block = i.attr.block = 7;
        o.dense = i.attr.dense = 20;
        o.listed = i.attr.listed = c / 2 ? 2 : 0;
        o.list_rows = i.attr.list_rows = 4;
        o.lists = lists; /* block 0, which is whole */
        i.attr.heads = i.attr.key_heads = 2;
        for (int k = 0; k < 5; k++) {
            const tt__mat m = {NULL, TT_F32, 100, 6, 6}, start = {starts, TT_I32, 4, 1, 1},
                          list = {listed ? rows : NULL, TT_I32, 100, 1, 1};
            in[k] = k < 3 ? m : k == 3 ? start : list;
        }
        if (listed) i.in[4] = 1;
        for (int s = 0; s < 3; s++)
            for (int row = starts[s]; row < starts[s + 1]; row++) {
                rows[row] = row;
                for (int key = starts[s]; key < starts[s + 1]; key++)
                    expected += times_seen(&o, 0, row - starts[s], key - starts[s],
                                           starts[s + 1] - starts[s]);
            }
        const double got = tt__flops_of_attention(&i, in);
        report(got == 4 * expected * 6, "%g FLOPs, not %g", got, 4 * expected * 6);
    }
}

/* ... and in a plan, for sequences of one length: FLOPs and, by the costs, seconds of a step. */
TEST(attention_window_plan)
{
    const double length = 256, window = 32;
    const double seen = length * (length + 1) / 2 - (length - window) * (length - window + 1) / 2;
    double flops[2], seconds[2];
    for (int k = 0; k < 2; k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_costs costs = tt_costs_default();
        tt_attention_options o = tt_attention_options_default(4);
        tt_compile_options c = tt_compile_options_default();
        o.causal = true;
        o.window = k ? 32 : 0;
        costs.memory = 1e30; /* so that only work takes time */
        c.costs = &costs;
        const tt_value x = tt_input(t, "x", TT_F32, 512, 16), y = tt_input(t, "y", TT_F32, 512, 16);
        const tt_value starts = tt_seq_start(t, "starts", 2);
        const int64_t dims[] = {16, 16};
        const tt_init ones = {TT_INIT_ONES, 1};
        const tt_value h = tt_linear(t, x, tt_param_new(ctx, "w", 2, dims, ones), NULL);
        const tt_value out = tt_attention(t, h, h, h, starts, &o);
        tt_program *p = tt_compile(t, tt_mean_squared_error(t, out, y, tt__handle(t, 0)), &c);
        REQUIRE(p != NULL);
        flops[k] = tt_program_plan(p).flops;
        seconds[k] = tt_program_plan(p).compute_seconds;
        if (k == 1) { /* two products forward and four backward, of two FLOPs for each number */
            const double saved = 12 * 2 * 16 * (length * length / 2 - seen);
            CHECK_NEAR(flops[0] - flops[1], saved, 1e-9 * saved);
            CHECK_NEAR(seconds[0] - seconds[1], saved / costs.attention_f32, 1e-6 * seconds[0]);
        }
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* The fused op needs at least one value of (rows, hidden) less than the pair: silu(gate) or its gradient. */
TEST(swiglu_keeps_less)
{
    enum { ROWS_ = 256, WIDTH = 16, HIDDEN = 512 };
    for (int half = 0; half < 2; half++) {
        size_t bytes[2];
        for (int fused = 0; fused < 2; fused++) {
            test_allocator a;
            tt_context *ctx = test_open(&a);
            tt_tape *t = tt_tape_new(ctx);
            tt_param *w[3];
            tt_compile_options c = tt_compile_options_default();
            const tt_init init = {TT_INIT_NORMAL, 0.1f};
            if (half) c.precision = "bf16-mixed";
            for (int k = 0; k < 3; k++) {
                static const char *const names[] = {"gate", "up", "down"};
                const int64_t dims[] = {k < 2 ? HIDDEN : WIDTH, k < 2 ? WIDTH : HIDDEN};
                w[k] = tt_param_new(ctx, names[k], 2, dims, init);
            }
            const tt_value x = tt_input(t, "x", TT_F32, ROWS_, WIDTH);
            const tt_value y = tt_input(t, "y", TT_F32, ROWS_, WIDTH);
            const tt_value gate = tt_linear(t, x, w[0], NULL), up = tt_linear(t, x, w[1], NULL);
            const tt_value h = fused ? tt_swiglu(t, gate, up) : tt_mul(t, tt_silu(t, gate), up);
            tt_program *p = tt_compile(t, tt_mean_squared_error(t, tt_linear(t, h, w[2], NULL), y,
                                                                tt__handle(t, 0)), &c);
            REQUIRE(p != NULL);
            bytes[fused] = tt_program_plan(p).at_peak[TT_MEM_ACTIVATIONS];
            tt_program_free(p);
            tt_tape_free(t);
            TEST_CLOSE(ctx, &a);
        }
        CHECK(bytes[0] - bytes[1] >= (size_t)ROWS_ * HIDDEN * (half ? 2 : 4));
    }
}

/* Attention by dot products and by tiles against attention in fp32 of the same bf16 numbers: several blocks
   of keys and queries, head sizes that fill no tile. */
static void attention_of_bf16(const char *by)
{
    enum { ROWS = 434, WIDTH = 160, MOST = ROWS * WIDTH, LISTED = 40 };
    static const int sizes[] = {64, 32, 80, 20, 160, 1};
    /* LISTED: as many queries, in any order */
    static int32_t starts[] = {0, 300, 301, 400, ROWS}, index[LISTED];
    static uint16_t x[4][MOST], grad[2][3][MOST], kept[MOST];
    static float out[2][MOST], lse[2][ROWS * WIDTH];
    uint64_t random = 11;
    for (int k = 0; k < 4; k++)
        for (int e = 0; e < MOST; e++) {
            float y = (float)test_random(&random) * 0x1p-31f - 1;
            tt__convert(&x[k][e], TT_BF16, &y, TT_F32, 1);
        }
    for (int k = 0; k < LISTED; k++) index[k] = (int32_t)(test_random(&random) % ROWS);
    for (int c = 0; c < 16 * TT__COUNT(sizes); c++) {
        const bool causal = c % 2, drop = c / 2 % 2, listed = c / 4 % 2, windowed = c / 8 % 2;
        const int d = sizes[c / 16], heads = tt__max(1, tt__min(3, WIDTH / d)), width = heads * d,
                  queries = listed ? LISTED : ROWS;
        static const char *const names[] = {"out", "dq", "dk", "dv"};
        for (int narrow = 0; narrow < 2; narrow++) {
            test_allocator a;
            tt_context_options co = test_options(&a);
            co.threads = 2;
            tt_context *ctx = open_isa(co, narrow ? by : "avx512");
            tt__run run;
            memset(&run, 0, sizeof run);
            for (int back = 0; back < 2; back++) {
                tt__instr i = tt__new_instr(back ? TT__OP_ATTENTION_BACKWARD : TT__OP_ATTENTION);
                tt__launch l;
                size_t bytes = tt__attention_workspace(ROWS, d, 1, back, 2) +
                               tt__attention_queries_bytes(4, LISTED);
                memset(&l, 0, sizeof l);
                i.attr.heads = i.attr.key_heads = heads;
                i.attr.causal = causal;
                i.attr.window = windowed ? 70 : 0;
                i.attr.alibi = windowed ? 0.1f : 0;
                i.attr.alibi_heads = windowed ? heads : 0;
                i.attr.dropout = drop ? 0.25f : 0;
                i.attr.scale = c % 3 ? 1.5f / sqrtf((float)d) : -0.5f;
                l.device = (tt__device *)(void *)&ctx->cpu;
                l.instr = &i;
                l.in[TT__RUN_IN].data = &run;
                for (int k = 0; k < 3; k++) {
                    tt__mat m = {x[k], TT_BF16, k ? ROWS : queries, width, width};
                    l.in[back + k] = m;
                }
                tt__mat begin = {starts, TT_I32, TT__COUNT(starts), 1, 1},
                        list = {index, TT_I32, LISTED, 1, 1};
                tt__mat o = {back ? (void *)kept : (void *)out[narrow], back ? TT_BF16 : TT_F32, queries,
                             width, width},
                        sums = {lse[narrow], TT_F32, queries, heads, heads};
                l.in[3 + back] = begin;
                if (listed) l.in[back ? 7 : 4] = list;
                if (back) {
                    tt__mat dout = {x[3], TT_BF16, queries, width, width};
                    if (!narrow) tt__convert(kept, TT_BF16, out[0], TT_F32, (size_t)(queries * width));
                    sums.data = lse[0];
                    l.in[0] = dout;
                    l.in[5] = o;
                    l.in[6] = sums;
                    for (int k = 0; k < 3; k++) {
                        tt__mat m = {grad[narrow][k], TT_BF16, k ? ROWS : queries, width, width};
                        l.out[k] = m;
                    }
                } else {
                    l.out[0] = o;
                    l.out[1] = sums;
                }
                l.workspace = tt__alloc(ctx, bytes);
                memset(l.workspace, 0xff, bytes);
                CHECK(ctx->cpu.isa->run[i.op](&l) == TT_OK);
                tt__free(ctx, l.workspace);
            }
            TEST_CLOSE(ctx, &a);
        }
        for (int k = 0; k < 4; k++) {
            double most = 0, off = 0;
            for (int e = 0; e < (k < 2 ? queries : ROWS) * width; e++) {
                double got = k ? tt__from_bf16(grad[1][k - 1][e]) : out[1][e],
                       expected = k ? tt__from_bf16(grad[0][k - 1][e]) : out[0][e];
                double difference = fabs(got - expected);
                if (fabs(expected) > most) most = fabs(expected);
                if (!(difference <= off)) off = difference;
            }
            snprintf(where, sizeof where, "%s, %d heads of %d%s%s%s%s, %s: off by %g of %g", by, heads, d,
                     causal ? ", causal" : "", drop ? ", dropout" : "", listed ? ", listed" : "",
                     windowed ? ", window and alibi" : "", names[k], off, most);
            /* The backward rounds weights and their gradients to bf16. */
            report(off <= (k ? 0.02 : 2e-5) * most && most > 0.01, "bf16 and fp32 differ");
        }
    }
}

TEST(attention_by_dot)
{
    if (!has_isa("avx512_dot")) SKIP("this CPU has no AVX-512 with bf16");
    attention_of_bf16("avx512_dot");
}

TEST(attention_by_tiles)
{
    if (!has_isa("avx512_tiles")) SKIP("this CPU has no tiles");
    attention_of_bf16("avx512_tiles");
}

/* ... so on the CPU mixed precision makes no copies of weights, not even for a second time in the
   backward. */
TEST(mixed_precision_without_copies)
{
    static const char *const device[] = {"cpu", "cuda"};
    for (int d = 0; d < 2; d++)
        for (int train = 0; train < 2; train++) {
            model m;
            tt_compile_options o = tt_compile_options_default();
            int casts = 0, narrow = 0;
            o.precision = "bf16-mixed";
            o.device = device[d];
            o.train = train;
            model_open(&m, 1, 0.1f);
            tt_program *p = tt_compile(m.t, m.loss, &o);
            for (int k = 0; CHECK(p != NULL) && k < p->built.t->n_code; k++) {
                casts += p->built.t->code[k].op == TT__OP_CAST;
                narrow += p->built.t->code[k].attr.narrow == TT_BF16;
            }
            report(d == 0 ? casts == 0 && narrow > 0 : casts > 0 && narrow == 0,
                   "%s: %d copies, %d products that round", device[d], casts, narrow);
            tt_program_free(p);
            model_close(&m);
        }
}

/* A deep pre-norm stack, each layer of which adds little to the stream: its last norm and the gradient of its
   first weight. */
enum { DEEP_LAYERS = 24, DEEP_ROWS = 40, DEEP_WIDTH = 32 };

static void deep_stack(const char *precision, const char *residual, float *result, float *gradient_of)
{
    const int D = DEEP_WIDTH;
    static float x[DEEP_ROWS * DEEP_WIDTH], y[DEEP_ROWS * DEEP_WIDTH];
    tt_context_options co = tt_context_options_default();
    tt_compile_options o = tt_compile_options_default();
    char name[64];
    uint64_t s = 17;
    co.threads = 1;
    tt_context *ctx = tt_open(&co);
    tt_tape *t = tt_tape_new(ctx);
    tt_value in = tt_input(t, "x", TT_F32, DEEP_ROWS, D), target = tt_input(t, "y", TT_F32, DEEP_ROWS, D);
    tt_param *first = model_param(ctx, "first", 0, D, D, TT_INIT_NORMAL);
    const int64_t down[2] = {DEEP_WIDTH, 2 * DEEP_WIDTH};
    const tt_init small = {TT_INIT_NORMAL, 0.02f};
    tt_value h = tt_linear(t, in, first, NULL);
    for (int l = 0; l < DEEP_LAYERS; l++) {
        tt_value b = tt_layernorm(t, h, model_param(ctx, "norm.weight", l, 1, D, TT_INIT_ONES),
                                  model_param(ctx, "norm.bias", l, 1, D, TT_INIT_ZEROS), 1e-5f);
        b = tt_gelu(t, tt_linear(t, b, model_param(ctx, "up", l, 2 * D, D, TT_INIT_NORMAL), NULL));
        snprintf(name, sizeof name, "layer.%d.down", l);
        h = tt_add(t, h,
                   tt_linear(t, b, tt_param_new(ctx, name, 2, down, small),
                             model_param(ctx, "down.bias", l, 1, D, TT_INIT_ZEROS)));
    }
    h = tt_layernorm(t, h, model_param(ctx, "norm.weight", DEEP_LAYERS, 1, D, TT_INIT_ONES),
                     model_param(ctx, "norm.bias", DEEP_LAYERS, 1, D, TT_INIT_ZEROS), 1e-5f);
    tt_output(t, h);
    o.precision = precision;
    o.residual = residual;
    o.accumulate = true;
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, h, target, tt__handle(t, 0)), &o);
    for (int k = 0; k < DEEP_ROWS * D; k++) {
        x[k] = (float)test_random(&s) * 0x1p-31f - 1;
        y[k] = (float)test_random(&s) * 0x1p-31f - 1;
    }
    CHECK(p && tt_set(p, in, x, DEEP_ROWS) == TT_OK && tt_set(p, target, y, DEEP_ROWS) == TT_OK &&
          tt_micro_step(p, NULL) == TT_OK);
    CHECK(tt_get(p, h, result, DEEP_ROWS * DEEP_WIDTH) == TT_OK &&
          tt_get_gradient(p, first, gradient_of) == TT_OK);
    tt_program_free(p);
    tt_tape_free(t);
    tt_close(ctx);
}

static double relative_error(const float *x, const float *reference, int n)
{
    double error = 0, size = 0;
    for (int k = 0; k < n; k++) {
        error += (x[k] - reference[k]) * (x[k] - reference[k]);
        size += reference[k] * reference[k];
    }
    return sqrt(error / size);
}

/* A stream kept in f32 is rounded by none of its additions: nearer to 32-true than one of 16 bits, in results
   and gradients. */
TEST(residual_stream_in_f32)
{
    enum { N = DEEP_ROWS * DEEP_WIDTH, M = DEEP_WIDTH * DEEP_WIDTH };
    static const char *const names[] = {"bf16-mixed", "16-mixed"};
    static float exact[N], exact_gradient[M], got[N], got_gradient[M];
    deep_stack("32-true", NULL, exact, exact_gradient);
    for (int k = 0; k < 2; k++) {
        double error[3], gradient_error[3];
        for (int r = 0; r < 3; r++) {
            deep_stack(names[k], r == 0 ? "16-bit" : r == 1 ? "f32" : NULL, got, got_gradient);
            error[r] = relative_error(got, exact, N);
            gradient_error[r] = relative_error(got_gradient, exact_gradient, M);
        }
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  %s, 24 layers: results differ by %.2e (16-bit), %.2e (f32); gradients by %.2e, %.2e\n",
                   names[k], error[0], error[1], gradient_error[0], gradient_error[1]);
        CHECK(error[1] > 0 && error[1] < 0.5 * error[0] && gradient_error[1] < 0.5 * gradient_error[0]);
        /* The default: 16-bit with bf16, f32 with f16. */
        CHECK(error[2] == error[k] && gradient_error[2] == gradient_error[k]);
    }
}

/* Every number of f16 and, between each two neighbours, f32 numbers below, at and above the middle: each
   instruction set widens and narrows as the scalar functions do, which are checked against ldexp and what is
   known of nearest even. */
TEST(f16_conversions)
{
    enum { PATTERNS = 65536, COLS = 64, ROWS = 4 * PATTERNS / COLS };
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon"};
    uint16_t *half = (uint16_t *)calloc(4 * PATTERNS, sizeof(uint16_t));
    float *wide = (float *)calloc(4 * PATTERNS, sizeof(float)),
          *zero = (float *)calloc(4 * PATTERNS, sizeof(float)),
          *got = (float *)calloc(4 * PATTERNS, sizeof(float));
    for (int k = 0; k < PATTERNS; k++) {
        int exponent = k >> 10 & 31, fraction = k & 1023;
        double x = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24),
               above = exponent ? ldexp(1025 + fraction, exponent - 25) : ldexp(fraction + 1, -24);
        float sign = k >> 15 ? -1.0f : 1.0f, f = tt__from_f16((uint16_t)k);
        if (exponent == 31) CHECK(fraction ? f != f : f == sign * INFINITY);
        else CHECK(f == sign * (float)x && tt__to_f16(f) == k);
        /* itself, and a third, a half and two thirds of the way to the next: all are f32 */
        for (int part = 0; part < 4; part++) {
            double between = x + (above - x) * (part == 3 ? 0.6875 : part * 0.3125);
            if (part == 2) between = (x + above) / 2;
            float y = exponent == 31 ? f : sign * (float)between;
            uint16_t expected = part < 2 || (part == 2 && k % 2 == 0) ? (uint16_t)k : (uint16_t)(k + 1);
            if (exponent < 31) CHECK(tt__to_f16(y) == expected);
            wide[4 * k + part] = y;
            half[4 * k + part] = (uint16_t)k;
        }
    }
    for (int k = 0; k < 4; k++) {
        if (!has_isa(isa[k])) continue;
        test_allocator a;
        tt_context *ctx = open_isa(test_options(&a), isa[k]);
        tt_tape *t = tt_tape_new(ctx);
        tt_compile_options o = tt_compile_options_default();
        int wrong = 0;
        tt_value h = tt_input(t, "half", TT_F16, ROWS, COLS), w = tt_input(t, "wide", TT_F32, ROWS, COLS),
                 z = tt_input(t, "zero", TT_F32, ROWS, COLS);
        /* Dtype of the first operand. */
        tt_value zh = tt_input(t, "zero half", TT_F16, ROWS, COLS), widened = tt_add(t, z, h),
                 narrowed = tt_add(t, zh, w);
        tt_output(t, narrowed);
        o.train = false;
        tt_program *p = tt_compile(t, widened, &o);
        for (int part = 0; part < 2 && CHECK(p != NULL); part++) {
            CHECK(tt_set(p, h, half, ROWS) == TT_OK && tt_set(p, w, wide, ROWS) == TT_OK &&
                  tt_set(p, z, zero, ROWS) == TT_OK && tt_set(p, zh, zero, ROWS) == TT_OK);
            CHECK(tt_run(p, NULL) == TT_OK &&
                  tt_get(p, part ? narrowed : widened, got, 4 * PATTERNS) == TT_OK);
            for (int e = 0; e < 4 * PATTERNS; e++) {
                float expected = part ? tt__from_f16(tt__to_f16(wide[e])) : tt__from_f16(half[e]);
                wrong += expected != expected ? got[e] == got[e] : got[e] != expected;
            }
        }
        snprintf(where, sizeof where, "f16, %s", isa[k]);
        report(wrong == 0, "%d of %d numbers are converted wrongly", wrong, 8 * PATTERNS);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
    /* Stochastic rounding: to one of both neighbours, up as often as the distance says. */
    for (int k = 0; k < 2 * PATTERNS; k++) {
        float x = wide[2 * k];
        uint32_t ups = 0, draws = 64;
        int pattern = k / 2;
        if ((pattern & 0x7fff) > 0x7bfe) continue;
        for (uint32_t r = 0; r < draws; r++) { /* evenly over 16 bits, and over the lower 13 */
            uint16_t y = f16_stochastic(x, r * 1024);
            CHECK(y == pattern || y == pattern + 1);
            ups += y != pattern;
        }
        CHECK(ups == (k % 2 ? draws / 2 : 0));
    }
    free(half);
    free(wide);
    free(zero);
    free(got);
}

/* ------------------------------------------------------------------------------------------- accumulation */

static batch part_of(const batch *b, int from, int n)
{
    batch part;
    memset(&part, 0, sizeof part);
    part.seqs = n;
    part.rows = b->start[from + n] - b->start[from];
    memcpy(part.ids, b->ids + b->start[from], sizeof *b->ids * (size_t)part.rows);
    memcpy(part.labels, b->labels + from, sizeof *b->labels * (size_t)n);
    for (int s = 0; s <= n; s++) part.start[s] = b->start[from + s] - b->start[from];
    return part;
}

/* A step over `parts` (ending with 0) of 16 sequences, or one tt_step: gradient and parameters after it. */
static float *accumulated(const int *parts, int ignored, tt_optimizer_kind kind, float **gradient,
                          size_t *size, tt_stats *stats)
{
    model m;
    tt_compile_options o = tt_compile_options_default();
    batch all = make_batch(MODEL_SEQS, 30, 3);
    o.accumulate = parts != NULL;
    o.optimizer.kind = kind;
    o.optimizer.clip_norm = 0.1f;
    o.optimizer.eps = 1e-3f; /* or Adam would turn the rounding of a gradient near 0 into a step */
    for (int s = 0; s < MODEL_SEQS; s++)
        if ((ignored & 1 && s < 4) || (ignored & 2 && s % 3 == 0)) all.labels[s] = -100;
    model_open(&m, 2, 0);
    tt_program *p = tt_compile(m.t, m.loss, &o);
    CHECK(p != NULL);
    for (int step = 0; step < 2 && p; step++) {
        for (int k = 0, from = 0; parts && parts[k]; from += parts[k++]) {
            batch part = part_of(&all, from, parts[k]);
            CHECK(model_set(&m, p, &part) && tt_micro_step(p, stats) == TT_OK);
        }
        if (parts && step == 0) {
            *size = 0;
            for (int k = 0; k < m.ctx->n_params; k++) *size += (size_t)tt_param_size(m.ctx->params[k]);
            *gradient = (float *)malloc(sizeof(float) * *size);
            for (int k = 0, at = 0; k < m.ctx->n_params; at += (int)tt_param_size(m.ctx->params[k++]))
                CHECK(tt_get_gradient(p, m.ctx->params[k], *gradient + at) == TT_OK);
        }
        if (parts) CHECK(tt_update(p, 0.05f, stats) == TT_OK);
        else CHECK(model_set(&m, p, &all) && tt_step(p, 0.05f, stats) == TT_OK);
    }
    float *params = all_params(m.ctx, size);
    tt_program_free(p);
    model_close(&m);
    return params;
}

static double largest(const float *x, size_t n)
{
    double most = 0;
    for (size_t k = 0; k < n; k++) if (fabs(x[k]) > most) most = fabs(x[k]);
    return most;
}

static double distance(const float *a, const float *b, size_t n)
{
    double most = 0;
    for (size_t k = 0; k < n; k++)
        if (!(fabs(a[k] - b[k]) <= most) && !isnan(most)) most = fabs(a[k] - b[k]);
    return most;
}

/* One batch of 16 equals micro-batches of any sizes, with any number of targets in each, up to the rounding
   of sums: 1e-6. */
TEST(micro_batches_equal_a_batch)
{
    static const int whole[] = {16, 0}, fours[] = {4, 4, 4, 4, 0}, uneven[] = {1, 7, 3, 5, 0};
    for (int ignored = 0; ignored < 4; ignored++)
        for (int kind = 0; kind < 2; kind++) {
            float *g1 = NULL, *g2 = NULL, *g3 = NULL;
            size_t n;
            tt_stats s0, s1, s2, s3;
            tt_optimizer_kind optimizer = kind ? TT_ADAMW : TT_SGD;
            float *p0 = accumulated(NULL, ignored, optimizer, &g1, &n, &s0);
            float *p1 = accumulated(whole, ignored, optimizer, &g1, &n, &s1);
            float *p2 = accumulated(fours, ignored, optimizer, &g2, &n, &s2);
            float *p3 = accumulated(uneven, ignored, optimizer, &g3, &n, &s3);
            double scale_g = largest(g1, n), scale_p = largest(p1, n);
            CHECK(distance(g1, g2, n) <= 1e-6 * scale_g);
            CHECK(distance(g1, g3, n) <= 1e-6 * scale_g);
            CHECK(distance(p0, p1, n) <= 1e-6 * scale_p);
            CHECK(distance(p1, p2, n) <= 1e-6 * scale_p);
            CHECK(distance(p1, p3, n) <= 1e-6 * scale_p);
            CHECK(s1.targets == s0.targets && s1.targets == s2.targets && s1.targets == s3.targets &&
                  s1.targets == (ignored == 0 ? 16
                                 : ignored == 1 ? 12
                                 : ignored == 2 ? 10
                                 : 8));
#ifndef TINYTRAIN_CBLAS /* two bits of a loss of 4 */
            CHECK_NEAR(s1.loss, s0.loss, 1e-6);
            CHECK_NEAR(s1.loss, s2.loss, 1e-6);
            CHECK_NEAR(s1.loss, s3.loss, 1e-6);
#endif
            CHECK_NEAR(s1.grad_norm, s2.grad_norm, 1e-5 * s1.grad_norm);
            CHECK_NEAR(s1.grad_norm, s0.grad_norm, 1e-5 * s1.grad_norm);
            CHECK(s1.correct == s2.correct && s1.correct == s3.correct && s1.correct == s0.correct &&
                  s1.step == 2);
            free(p0); free(p1); free(p2); free(p3); free(g1); free(g2); free(g3);
        }
#ifdef TINYTRAIN_CBLAS
    SKIP("the same but for the losses, which are not compared: a CBLAS rounds in its own ways");
#endif
}

/* ---------------------------------------------------------------------------------------------- bad input */

static tt_value rotary_of(tt_tape *t, tt_value x, tt_value positions, int heads, int size, float base,
                          float factor)
{
    tt_rotary_options o = tt_rotary_options_default(heads);
    o.size = size;
    o.base = base;
    o.scaling = TT_ROTARY_LINEAR;
    o.factor = factor;
    return tt_rotary(t, x, positions, &o);
}

/* X(name, status, words that the message must have, the op). x (rows<=8, 6), y (rows<=8, 5), z (4, 6) f32; i
   (rows<=8, 1), pairs (rows<=8, 2), few (4, 1) i32; s sequence starts; w (5, 6), w7 (5, 7), v (6), v5 (5)
   parameters. */
#define REFUSED(X) \
    X(linear_width, TT_ERR_SHAPE, "linear", "w7", tt_linear(t, x, w7, NULL)) \
    X(linear_bias, TT_ERR_SHAPE, "linear", "'v'", tt_linear(t, x, w, v)) \
    X(linear_dtype, TT_ERR_SHAPE, "linear", "'i'", tt_linear(t, i, w, NULL)) \
    X(linear_no_weight, TT_ERR_ARGUMENT, "linear", "NULL", tt_linear(t, x, NULL, NULL)) \
    X(linear_no_value, TT_ERR_ARGUMENT, "linear", "operand 0", tt_linear(t, tt__handle(t, 999), w, NULL)) \
    X(embedding_offset, TT_ERR_ARGUMENT, "embedding", "offset 5 is not in 0..4", \
        tt_embedding_offset(t, i, w, 5)) \
    X(embedding_dtype, TT_ERR_SHAPE, "embedding", "'x'", tt_embedding(t, x, w)) \
    X(embedding_width, TT_ERR_SHAPE, "embedding", "'pairs'", tt_embedding(t, pairs, w)) \
    X(embedding_part, TT_ERR_SHAPE, "embedding", "'pairs'", tt_embedding(t, tt_slice(t, pairs, 1, 1), w)) \
    X(layernorm_weight, TT_ERR_SHAPE, "layernorm", "'v5'", tt_layernorm(t, x, v5, NULL, 1e-5f)) \
    X(layernorm_bias, TT_ERR_SHAPE, "layernorm", "'v5'", tt_layernorm(t, x, v, v5, 1e-5f)) \
    X(layernorm_dtype, TT_ERR_SHAPE, "layernorm", "'i'", tt_layernorm(t, i, v, v, 1e-5f)) \
    X(layernorm_eps, TT_ERR_ARGUMENT, "layernorm", "eps", tt_layernorm(t, x, v, v, -1)) \
    X(layernorm_eps_nan, TT_ERR_ARGUMENT, "layernorm", "eps", tt_layernorm(t, x, v, v, NAN)) \
    X(gelu_dtype, TT_ERR_SHAPE, "gelu", "'i'", tt_gelu(t, i)) \
    X(gelu_tanh_dtype, TT_ERR_SHAPE, "gelu_tanh", "'i'", tt_gelu_tanh(t, i)) \
    X(relu_dtype, TT_ERR_SHAPE, "relu", "'i'", tt_relu(t, i)) \
    X(tanh_dtype, TT_ERR_SHAPE, "tanh", "'i'", tt_tanh(t, i)) \
    X(silu_dtype, TT_ERR_SHAPE, "silu", "'i'", tt_silu(t, i)) \
    X(soft_targets_shape, TT_ERR_SHAPE, "soft_cross_entropy", "'y'", \
      tt_soft_cross_entropy(t, x, y, tt__handle(t, 0))) \
    X(swiglu_shape, TT_ERR_SHAPE, "swiglu", "'y'", tt_swiglu(t, x, y)) \
    X(add_width, TT_ERR_SHAPE, "add", "'y'", tt_add(t, x, y)) \
    X(add_rows, TT_ERR_SHAPE, "add", "'z'", tt_add(t, x, z)) \
    X(add_dtype, TT_ERR_SHAPE, "add", "'i'", tt_add(t, i, i)) \
    X(scale_dtype, TT_ERR_SHAPE, "scale", "'i'", tt_scale(t, i, 2)) \
    X(rotary_heads, TT_ERR_SHAPE, "rotary", "4 heads", rotary_of(t, x, i, 4, 2, 10000, 1)) \
    X(rotary_no_heads, TT_ERR_SHAPE, "rotary", "0 heads", rotary_of(t, x, i, 0, 2, 10000, 1)) \
    X(rotary_odd, TT_ERR_SHAPE, "rotary", "3 columns", rotary_of(t, x, i, 2, 3, 10000, 1)) \
    X(rotary_too_many, TT_ERR_SHAPE, "rotary", "514 columns", rotary_of(t, x, i, 1, 514, 10000, 1)) \
    X(rotary_base, TT_ERR_ARGUMENT, "rotary", "base 1", rotary_of(t, x, i, 1, 2, 1, 1)) \
    X(rotary_base_nan, TT_ERR_ARGUMENT, "rotary", "nan", rotary_of(t, x, i, 1, 2, NAN, 1)) \
    X(rotary_factor, TT_ERR_ARGUMENT, "rotary", "factor 0.5", rotary_of(t, x, i, 1, 2, 10000, 0.5f)) \
    X(rotary_positions, TT_ERR_SHAPE, "rotary", "i32", rotary_of(t, x, x, 1, 2, 10000, 1)) \
    X(rotary_no_positions, TT_ERR_ARGUMENT, "rotary", "operand 1", \
        rotary_of(t, x, tt__handle(t, 0), 1, 2, 10000, 1)) \
    X(rotary_dtype, TT_ERR_SHAPE, "rotary", "'i'", rotary_of(t, i, i, 1, 2, 10000, 1)) \
    X(dropout_dtype, TT_ERR_SHAPE, "dropout", "'i'", tt_dropout(t, i, 0.1f)) \
    X(dropout_one, TT_ERR_ARGUMENT, "dropout", "below 65535/65536", tt_dropout(t, x, 1)) \
    X(dropout_nan, TT_ERR_ARGUMENT, "dropout", "below 65535/65536", tt_dropout(t, x, NAN)) \
    X(attention_keys, TT_ERR_SHAPE, "attention", "'y'", tt_attention(t, x, y, x, s, &two)) \
    X(attention_values, TT_ERR_SHAPE, "attention", "'z'", tt_attention(t, x, x, z, s, &two)) \
    X(attention_overlap, TT_ERR_SHAPE, "attention", "slices that overlap", \
        tt_attention(t, tt_slice(t, x, 0, 4), tt_slice(t, x, 2, 4), tt_slice(t, x, 0, 4), s, &two)) \
    X(attention_key_heads, TT_ERR_SHAPE, "attention", "(rows<=8, 6)", \
        tt_attention(t, x, tt_slice(t, x, 0, 4), tt_slice(t, x, 0, 4), s, &three)) \
    X(attention_value_heads, TT_ERR_SHAPE, "attention", "(rows<=8, 3)", \
        tt_attention(t, x, tt_slice(t, x, 0, 3), x, s, &two)) \
    X(attention_key_overlap, TT_ERR_SHAPE, "attention", "slices that overlap", \
        tt_attention(t, x, tt_slice(t, x, 0, 3), tt_slice(t, x, 3, 3), s, &two)) \
    X(attention_starts, TT_ERR_SHAPE, "attention", "'y'", tt_attention(t, x, x, x, y, &two)) \
    X(attention_heads, TT_ERR_SHAPE, "attention", "4 heads", tt_attention(t, x, x, x, s, &four)) \
    X(attention_no_heads, TT_ERR_SHAPE, "attention", "0 heads", tt_attention(t, x, x, x, s, &none)) \
    X(attention_dropout, TT_ERR_ARGUMENT, "attention", "below 65535/65536", \
        tt_attention(t, x, x, x, s, &dropped)) \
    X(attention_window, TT_ERR_ARGUMENT, "attention", "window -1 must be at least 1", \
        tt_attention(t, x, x, x, s, &windowed)) \
    X(attention_max_length, TT_ERR_ARGUMENT, "attention", "max_length -2 must be at least 1", \
        tt_attention(t, x, x, x, s, &below)) \
    X(attention_alibi, TT_ERR_ARGUMENT, "attention", "must be finite", \
        tt_attention(t, x, x, x, s, &steep)) \
    X(attention_alibi_rounded, TT_ERR_ARGUMENT, "attention", "alibi_rounded needs causal rows", \
        tt_attention(t, x, x, x, s, &rounded)) \
    X(attention_blocks, TT_ERR_ARGUMENT, "attention", "cannot be combined with causal rows", \
        tt_attention(t, x, x, x, s, &blocked)) \
    X(attention_no_lists, TT_ERR_ARGUMENT, "attention", "`lists` is NULL", \
        tt_attention(t, x, x, x, s, &unlisted)) \
    X(attention_lists, TT_ERR_ARGUMENT, "attention", "have block 65536 at 0", \
        tt_attention(t, x, x, x, s, &misplaced)) \
    X(gather_index, TT_ERR_SHAPE, "gather_rows", "'y'", tt_gather_rows(t, x, y)) \
    X(gather_part, TT_ERR_SHAPE, "gather_rows", "'pairs'", tt_gather_rows(t, x, tt_slice(t, pairs, 0, 1))) \
    X(gather_dtype, TT_ERR_SHAPE, "gather_rows", "'i'", tt_gather_rows(t, i, i)) \
    X(mean_pool_starts, TT_ERR_SHAPE, "mean_pool", "'y'", tt_mean_pool(t, x, y)) \
    X(mean_pool_index, TT_ERR_SHAPE, "mean_pool", "'i'", tt_mean_pool(t, x, i)) \
    X(mean_pool_dtype, TT_ERR_SHAPE, "mean_pool", "'i'", tt_mean_pool(t, i, s)) \
    X(slice_outside, TT_ERR_SHAPE, "slice", "'x'", tt_slice(t, x, 3, 4)) \
    X(slice_negative, TT_ERR_SHAPE, "slice", "'x'", tt_slice(t, x, -1, 2)) \
    X(slice_empty, TT_ERR_SHAPE, "slice", "'x'", tt_slice(t, x, 2, 0)) \
    X(slice_overflow, TT_ERR_SHAPE, "slice", "'x'", tt_slice(t, x, 2, INT64_MAX)) \
    X(reshape_elements, TT_ERR_SHAPE, "reshape", "'z'", tt_reshape(t, z, 5, 5)) \
    X(reshape_axis, TT_ERR_SHAPE, "reshape", "'x'", tt_reshape(t, x, 16, 3)) \
    X(reshape_of_slice, TT_ERR_SHAPE, "reshape", "'z'", tt_reshape(t, tt_slice(t, z, 0, 2), 2, 4)) \
    X(cross_entropy_rows, TT_ERR_SHAPE, "cross_entropy", "'few'", tt_cross_entropy(t, x, few, NULL)) \
    X(cross_entropy_targets, TT_ERR_SHAPE, "cross_entropy", "'y'", tt_cross_entropy(t, x, y, NULL)) \
    X(cross_entropy_logits, TT_ERR_SHAPE, "cross_entropy", "'i'", tt_cross_entropy(t, i, i, NULL)) \
    X(cross_entropy_weights, TT_ERR_SHAPE, "cross_entropy", "'y'", tt_cross_entropy(t, x, i, &weighted)) \
    X(cross_entropy_class_weights, TT_ERR_SHAPE, "cross_entropy", "'z'", \
        tt_cross_entropy(t, x, i, &classes)) \
    X(cross_entropy_both_weights, TT_ERR_ARGUMENT, "weights of rows", "are both given", \
        tt_cross_entropy(t, x, i, &both)) \
    X(cross_entropy_smoothing, TT_ERR_ARGUMENT, "cross_entropy", "smoothing", \
        tt_cross_entropy(t, x, i, &smooth)) \
    X(squared_error_shape, TT_ERR_SHAPE, "mean_squared_error", "'y'", \
        tt_mean_squared_error(t, x, y, tt__handle(t, 0))) \
    X(squared_error_dtype, TT_ERR_SHAPE, "mean_squared_error", "'i'", \
        tt_mean_squared_error(t, x, i, tt__handle(t, 0))) \
    X(squared_error_weights, TT_ERR_SHAPE, "mean_squared_error", "'z'", tt_mean_squared_error(t, x, x, z))

enum {
#define REFUSED_ENUM(name, status, part1, part2, call) REFUSED_##name,
    REFUSED(REFUSED_ENUM)
    REFUSED_COUNT
};

TEST(ops_refuse_wrong_operands)
{
    static const struct { const char *name, *part[2]; tt_status status; } rows[] = {
#define REFUSED_ROW(name, status, part1, part2, call) {#name, {part1, part2}, status},
        REFUSED(REFUSED_ROW)
    };
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int64_t dims[3] = {5, 6, 7}, wide[2] = {5, 7};
    tt_init zeros = {TT_INIT_ZEROS, 0};
    tt_param *w = tt_param_new(ctx, "w", 2, dims, zeros), *w7 = tt_param_new(ctx, "w7", 2, wide, zeros);
    tt_param *v = tt_param_new(ctx, "v", 1, &dims[1], zeros), *v5 = tt_param_new(ctx, "v5", 1, dims, zeros);
    tt_attention_options two = tt_attention_options_default(2), four = tt_attention_options_default(4),
                         three = tt_attention_options_default(3), none = tt_attention_options_default(0),
                         dropped = two, windowed = two, steep = two, blocked = two, below = two,
                         unlisted = two, misplaced = two, rounded = two;
    const int32_t far = 65536;
    dropped.dropout = 1;
    windowed.window = -1;
    below.max_length = -2;
    steep.alibi = INFINITY;
    rounded.alibi = 1;
    rounded.alibi_rounded = true;
    blocked.block = 2;
    blocked.causal = true;
    unlisted.block = unlisted.listed = unlisted.list_rows = 1;
    misplaced.heads = misplaced.block = misplaced.listed = misplaced.list_rows = 1;
    misplaced.lists = &far;
    for (int k = 0; k < REFUSED_COUNT; k++) {
        tt_tape *t = tt_tape_new(ctx);
        int64_t axis = tt_axis(t, "rows", 8), seqs = tt_axis(t, "seqs", 3);
        tt_value x = tt_input(t, "x", TT_F32, axis, 6), y = tt_input(t, "y", TT_F32, axis, 5),
                 z = tt_input(t, "z", TT_F32, 4, 6), result = {0};
        tt_value i = tt_input(t, "i", TT_I32, axis, 1), pairs = tt_input(t, "pairs", TT_I32, axis, 2),
                 few = tt_input(t, "few", TT_I32, 4, 1);
        tt_value s = tt_seq_start(t, "s", seqs);
        tt_cross_entropy_options weighted = tt_cross_entropy_options_default(), smooth = weighted,
                                 classes = weighted, both = weighted;
        weighted.weights = both.weights = y;
        classes.class_weights = both.class_weights = z;
        smooth.label_smoothing = 1;
        CHECK(tt_tape_status(t) == TT_OK);
        switch (k) {
#define REFUSED_CASE(name, status, part1, part2, call) case REFUSED_##name: result = call; break;
            REFUSED(REFUSED_CASE)
        default: break;
        }
        snprintf(where, sizeof where, "%s", rows[k].name);
        report(tt_tape_status(t) == rows[k].status && result.id == 0, "status %s, expected %s: %s",
               tt_status_name(tt_tape_status(t)), tt_status_name(rows[k].status), tt_error(ctx));
        for (int j = 0; j < 2; j++)
            report(strstr(t->error, rows[k].part[j]) != NULL, "the message has no \"%s\": %s",
                   rows[k].part[j], t->error);
        report(tt_compile(t, x, NULL) == NULL && tt_error_code(ctx) == rows[k].status &&
                   strcmp(tt_error(ctx), t->error) == 0,
               "tt_compile must repeat the error: %s", tt_error(ctx));
        tt_tape_free(t);
    }
    TEST_CLOSE(ctx, &a);
}

/* One good step of the model, optionally `spoil` in between, and a second good step: the same bits as without
   it. */
typedef struct spoiled { const char *name, *part[2]; tt_status status; void (*spoil)(batch *b); } spoiled;

static void spoil_id(batch *b) { b->ids[2] = MODEL_VOCAB; }
static void spoil_id_negative(batch *b) { b->ids[3] = -1; }
static void spoil_label(batch *b) { b->labels[1] = MODEL_CLASSES; }
static void spoil_label_negative(batch *b) { b->labels[1] = -2; }
static void spoil_first_start(batch *b) { b->start[0] = 1; }
static void spoil_empty_sequence(batch *b) { b->start[2] = b->start[1]; }
static void spoil_order(batch *b) { b->start[1] = b->rows + 100; }
static void spoil_length(batch *b) { for (int s = 1; s < b->seqs; s++) b->start[s] = b->rows - b->seqs + s; }
static void spoil_last_start(batch *b) { b->start[b->seqs]++; }
static void spoil_all_ignored(batch *b) { for (int s = 0; s < b->seqs; s++) b->labels[s] = -100; }

TEST(bad_batches_change_nothing)
{
    static const spoiled bad[] = {
        {"id", {"'ids' has 40 in row 2", "0..39"}, TT_ERR_ARGUMENT, spoil_id},
        {"negative id", {"'ids' has -1 in row 3", "0..39"}, TT_ERR_ARGUMENT, spoil_id_negative},
        {"label", {"'labels' has 4 in row 1", "0..3"}, TT_ERR_ARGUMENT, spoil_label},
        {"negative label", {"'labels' has -2 in row 1", "classes"}, TT_ERR_ARGUMENT, spoil_label_negative},
        {"first start", {"'seq_start' begins with 1", "attention"}, TT_ERR_ARGUMENT, spoil_first_start},
        {"empty sequence", {"'seq_start' has", "at least one row"}, TT_ERR_ARGUMENT, spoil_empty_sequence},
        {"order", {"'seq_start' has", "at least one row"}, TT_ERR_ARGUMENT, spoil_order},
        {"long sequence", {"'seq_start' has a sequence of ", "max_length is 40"}, TT_ERR_ARGUMENT,
         spoil_length},
        {"last start", {"'seq_start' ends with", "rows"}, TT_ERR_ARGUMENT, spoil_last_start},
        {"all ignored", {"no target counts", "nothing was updated"}, TT_ERR_NUMERIC, spoil_all_ignored},
    };
    float *good[2] = {NULL, NULL}; /* without anything in between */
    size_t n;
    for (int k = -1; k < (int)(sizeof bad / sizeof bad[0]); k++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            model m;
            tt_compile_options o = tt_compile_options_default();
            batch b = make_batch(6, 20, 1), spoiled_batch = b, second = make_batch(7, 20, 2);
            o.accumulate = accumulate;
            model_open(&m, 2, 0.1f);
            tt_program *p = tt_compile(m.t, m.loss, &o);
            REQUIRE(p != NULL);
            CHECK(model_set(&m, p, &b) &&
                  (accumulate ? tt_micro_step(p, NULL) == TT_OK && tt_update(p, 0.01f, NULL) == TT_OK
                              : tt_step(p, 0.01f, NULL) == TT_OK));
            if (k >= 0) {
                float *before = all_params(m.ctx, &n);
                snprintf(where, sizeof where, "%s%s", bad[k].name, accumulate ? ", accumulating" : "");
                bad[k].spoil(&spoiled_batch);
                CHECK(model_set(&m, p, &spoiled_batch));
                tt_status status = accumulate ? tt_micro_step(p, NULL) : tt_step(p, 0.01f, NULL);
                if (accumulate && bad[k].status == TT_ERR_NUMERIC &&
                    report(status == TT_OK, "a micro-batch may be without targets, a step may not: %s",
                           tt_error(m.ctx))) {
                    float grad[MODEL_CLASSES * MODEL_WIDTH];
                    const tt_param *classes = tt_param_find(m.ctx, "layer.0.classes");
                    CHECK(tt_get_gradient(p, classes, grad) == TT_ERR_NUMERIC);
                    CHECK_ERROR(m.ctx, TT_ERR_NUMERIC, "no target counted");
                    status = tt_update(p, 0.01f, NULL);
                }
                report(status == bad[k].status && tt_error_code(m.ctx) == status, "status %s",
                       tt_status_name(status));
                for (int j = 0; j < 2; j++)
                    report(strstr(tt_error(m.ctx), bad[k].part[j]) != NULL, "the message has no \"%s\": %s",
                           bad[k].part[j], tt_error(m.ctx));
                float *after = all_params(m.ctx, &n);
                report(same_params(before, after, n), "parameters changed");
                free(before);
                free(after);
            }
            CHECK(model_set(&m, p, &second) &&
                  (accumulate ? tt_micro_step(p, NULL) == TT_OK && tt_update(p, 0.01f, NULL) == TT_OK
                              : tt_step(p, 0.01f, NULL) == TT_OK));
            float *now = all_params(m.ctx, &n);
            if (!good[accumulate]) good[accumulate] = now;
            else { report(same_params(good[accumulate], now, n), "training went on differently"); free(now); }
            tt_program_free(p);
            model_close(&m);
        }
    free(good[0]);
    free(good[1]);
}

/* NaN and overflow: the step fails and names the tensor; parameters and optimizer are as if it had not
   been. */
TEST(numbers_that_are_not_finite)
{
    static const struct { const char *name, *part; float value; int batch_at; } bad[] = {
        {"nothing", "", 1, -1},
        {"NaN", "the loss 'the loss' is not finite", NAN, 1},
        {"infinity", "the loss 'the loss' is not finite", INFINITY, 1},
        {"gradient", "the gradient of 'w' is not finite", 3e38f, 1},
    };
    float good[2][15];
    for (int k = 0; k < 4; k++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            test_allocator a;
            tt_context *ctx = test_open(&a);
            int64_t dims[2] = {3, 5};
            float x[20], y[12], before[15], after[15];
            tt_init zeros = {TT_INIT_ZEROS, 0};
            tt_param *w = tt_param_new(ctx, "w", 2, dims, zeros);
            tt_tape *t = tt_tape_new(ctx);
            tt_value in = tt_input(t, "x", TT_F32, 4, 5), target = tt_input(t, "y", TT_F32, 4, 3);
            tt_value loss = tt_mean_squared_error(t, tt_linear(t, in, w, NULL), target, tt__handle(t, 0));
            tt_compile_options o = tt_compile_options_default();
            tt_name(t, loss, "the loss");
            o.accumulate = accumulate;
            tt_program *p = tt_compile(t, loss, &o);
            REQUIRE(p != NULL);
            for (int step = 0; step < 3; step++) {
                bool spoil = step == 1;
                if (spoil && k == 0) continue;
                for (int e = 0; e < 20; e++) x[e] = (float)((e * 7 + step) % 5 - 2);
                for (int e = 0; e < 12; e++) y[e] = (float)((e * 5 + step) % 7 - 3) * (spoil ? 100.0f : 1.0f);
                if (spoil) { x[7] = bad[k].value; memset(after, 0, sizeof after); }
                /* Zero weights: the loss stays finite. */
                if (spoil && k == 3) tt_param_get(w, before), tt_param_set(w, after);
                else tt_param_get(w, before);
                CHECK(tt_set(p, in, x, 4) == TT_OK && tt_set(p, target, y, 4) == TT_OK);
                tt_status status = accumulate ? tt_micro_step(p, NULL) : tt_step(p, 0.1f, NULL);
                if (accumulate && status == TT_OK) status = tt_update(p, 0.1f, NULL);
                if (spoil) {
                    CHECK(status == TT_ERR_NUMERIC);
                    CHECK_ERROR(ctx, TT_ERR_NUMERIC, bad[k].part);
                    if (k == 3) {
                        float now[15];
                        tt_param_get(w, now);
                        CHECK(same_params(now, after, 15));
                        tt_param_set(w, before);
                    } else {
                        tt_param_get(w, after);
                        CHECK(same_params(before, after, 15));
                    }
                } else CHECK(status == TT_OK);
            }
            tt_param_get(w, after);
            if (k == 0) memcpy(good[accumulate], after, sizeof after);
            else CHECK(same_params(good[accumulate], after, 15));
            tt_program_free(p);
            tt_tape_free(t);
            TEST_CLOSE(ctx, &a);
        }
}

/* A failed micro-batch in the middle of a step ends the step without an update; the next step is a clean
   one. */
TEST(failed_micro_batch_ends_the_step)
{
    model m;
    tt_compile_options o = tt_compile_options_default();
    batch b = make_batch(6, 20, 1), broken = b;
    size_t n;
    o.accumulate = true;
    spoil_label(&broken);
    model_open(&m, 1, 0);
    tt_program *p = tt_compile(m.t, m.loss, &o);
    REQUIRE(p != NULL);
    CHECK(tt_update(p, 0.01f, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(m.ctx, TT_ERR_ARGUMENT, "no micro-batch");
    CHECK(model_set(&m, p, &b) && tt_micro_step(p, NULL) == TT_OK);
    float *before = all_params(m.ctx, &n);
    CHECK(model_set(&m, p, &broken) && tt_micro_step(p, NULL) == TT_ERR_ARGUMENT);
    CHECK(model_set(&m, p, &b) && tt_micro_step(p, NULL) == TT_ERR_NUMERIC);
    CHECK(tt_update(p, 0.01f, NULL) == TT_ERR_NUMERIC);
    float *after = all_params(m.ctx, &n);
    CHECK(same_params(before, after, n));
    free(after);
    CHECK(model_set(&m, p, &b) && tt_micro_step(p, NULL) == TT_OK && tt_update(p, 0.01f, NULL) == TT_OK);
    after = all_params(m.ctx, &n);
    tt_program_free(p);
    model_close(&m);
    model_open(&m, 1, 0); /* the same single step from the start */
    p = tt_compile(m.t, m.loss, &o);
    CHECK(p && model_set(&m, p, &b) && tt_micro_step(p, NULL) == TT_OK && tt_update(p, 0.01f, NULL) == TT_OK);
    free(before);
    before = all_params(m.ctx, &n);
    CHECK(same_params(before, after, n));
    free(before);
    free(after);
    tt_program_free(p);
    model_close(&m);
}

#ifdef TINYTRAIN_CUDA
#ifdef TT_EMULATE
/* What cuBLASLt did in a micro-batch of gelu(second(act(first(gelu(x))))) and its backward. The loss reads
   something else, since what it reads is never 16-bit. */
static bool count_products(int act(int), int width, bool biases, const precision_case *precision,
                           emu_counts *got)
{
    static const op_case c = {"products", TT__OP_LINEAR, NULL};
    static const size_set size = {"products", 2, 8, 24, 2, 2, {5, 1, 7}, NULL, false};
    tt_compile_options o = tt_compile_options_default();
    net n;
    net_open(&n, &c, &size, "cuda", AS_PARAM, false, precision->half != TT_F32);
    int x = gelu(V(ROWS, g->d)), first = linear(x, W(width, g->d), biases ? B(width) : 0);
    int loss = loss_of(scale(gelu(linear(act(first), W(g->d, width), biases ? B(g->d) : 0)), 2), false);
    g->train = o.accumulate = true;
    compile_in(&o, "cuda", precision);
    tt_program *p = tt_compile(g->tape, g->nodes[loss].t, &o);
    bool ok = p && set_inputs(p);
    emu_reset_counts();
    ok = report(ok && tt_micro_step(p, NULL) == TT_OK, "%s", tt_error(g->ctx));
    *got = emu_get_counts();
    tt_program_free(p);
    net_close();
    return ok;
}

enum { ANY_NUMBER = -1 };

/* tunes: what was timed is in a file, so that it is not counted. */
static void check_products(bool tunes, int act(int), int width, bool biases, const precision_case *precision,
                           int products, int gelus, int slopes, int bias_gradients)
{
    char path[1100];
    emu_counts got;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "products.txt"));
    snprintf(where, sizeof where, "width %d, %s biases, %s%s", width, biases ? "with" : "without",
             precision->name, tunes ? ", tuned" : "");
    remove(path);
    if (tunes) tuned = path;
    bool ok = !tunes || count_products(act, width, biases, precision, &got);
    if (ok && count_products(act, width, biases, precision, &got))
        report(got.gemms == products && got.gelus == gelus && got.bias_gradients == bias_gradients &&
                   (slopes == ANY_NUMBER || got.gelu_slopes == slopes),
               "of %ld products, %ld have GELU, %ld its derivative, %ld a bias gradient; expected of %d %d, "
               "%d, %d",
               got.gemms, got.gelus, got.gelu_slopes, got.bias_gradients, products, gelus, slopes,
               bias_gradients);
    remove(path);
    tuned = NULL;
}

static int twice(int x) { return scale(x, 2); }
#endif

/* The epilogues are used where they fit, and only there: for GELU by tanh, not by erf, with rows of a
   multiple of 8 elements, and, where timing has found them to be the fastest, as on the emulator, for its
   slope and for a bias gradient of the dtype of the result whose dy no other kernel sums, all of which the
   emulator counts. The results are right with them: also of micro-batches that add to gradients. */
TEST(cuda_epilogues)
{
    for (int k = 0; k < PRECISIONS; k++) {
        const precision_case *precision = &precisions[k];
#ifdef TT_EMULATE
        /* A bias gradient of another dtype has kernels of its own, which may as well do the slope. */
        const bool mixed = strstr(precision->name, "mixed") != NULL;
        check_products(true, gelu_tanh, 24, true, precision, 6, 1, mixed ? ANY_NUMBER : 1, !mixed);
        check_products(true, gelu_tanh, 24, false, precision, 6, 1, 1, 0);
        check_products(true, twice, 24, true, precision, 6, 0, 0, 1);
        check_products(false, gelu_tanh, 24, true, precision, 6, 1, 0, 0);
        /* Uneven: each of the six of three times at most 5 rows (TT__CUDA_LOSS_CHUNK). */
        check_products(false, gelu_tanh, 23, true, precision, 18, 0, 0, 0);
        check_products(false, gelu, 24, true, precision, 6, 0, 0, 0);
#endif
        for (int c = 0; c < CASE_COUNT; c++)
            for (int s = 0; s < SIZES; s++) {
                if (strcmp(sizes[s].name, "octets") != 0 || !tt__match(sizes[s].only, cases[c].name))
                    continue;
                tuned = strncmp(cases[c].name, "linear", 6) == 0 ? "on" : NULL;
                reference_case(&cases[c], &sizes[s], "cuda", precision, AS_INPUT, true);
                reference_case(&cases[c], &sizes[s], "cuda", precision, AS_GATHERED, true);
                gradient_case(c, s, "cuda", precision, AS_PARAM);
                gradient_case(c, s, "cuda", precision, AS_GATHERED);
                tuned = NULL;
            }
    }
}
#else
TEST(cuda_epilogues) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif

#ifdef TINYTRAIN_CUDA
enum { SHARED_LAYERS = 6, SHARED_WIDTH = 40 };

/* Two steps of a chain of linear layers with biases; the parameters after them, and the launches of the
   second update. */
static long train_chain(tt_optimizer_kind kind, const char *precision, bool alone, float *to)
{
    test_allocator a;
    tt_context_options co = test_options(&a);
#ifdef TT_EMULATE
    emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
    co.seed = 11;
    tt_context *ctx = tt_open(&co);
    tt_tape *t = tt_tape_new(ctx);
    tt_param *params[2 * SHARED_LAYERS];
    int64_t dims[2] = {SHARED_WIDTH, SHARED_WIDTH};
    tt_init normal = {TT_INIT_NORMAL, 0.2f};
    tt_value x = tt_input(t, "x", TT_F32, 5, SHARED_WIDTH), y = tt_input(t, "y", TT_F32, 5, SHARED_WIDTH),
             h = x;
    tt_value no_weights = {0};
    float values[5 * SHARED_WIDTH];
    long launches = 0;
    uint64_t s = 1;
    for (int k = 0; k < 2 * SHARED_LAYERS; k++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", k);
        params[k] = tt_param_new(ctx, name, k % 2 ? 1 : 2, dims, normal);
        if (k % 2) h = tt_linear(t, h, params[k - 1], params[k]);
    }
    tt_value loss = tt_mean_squared_error(t, h, y, no_weights);
    for (int k = 0; k < 5 * SHARED_WIDTH; k++) values[k] = (float)(test_random(&s) % 1000) / 500 - 1;
    tt_compile_options o = tt_compile_options_default();
    o.device = "cuda";
    o.precision = precision;
    o.accumulate = true;
    o.optimizer.kind = kind;
    o.optimizer.momentum = 0.9f;
    o.optimizer.nesterov = true;
    tt_program *p = tt_compile(t, loss, &o);
    if (CHECK(p != NULL)) {
        for (int k = 0; k < p->built.t->n_code && alone; k++) p->built.t->code[k].with_next = false;
        for (int step = 0; step < 2; step++) {
            CHECK(tt_set(p, x, values, 5) == TT_OK && tt_set(p, y, values, 5) == TT_OK &&
                  tt_micro_step(p, NULL) == TT_OK);
#ifdef TT_EMULATE
            emu_reset_counts();
#endif
            CHECK(tt_update(p, 0.01f, NULL) == TT_OK);
#ifdef TT_EMULATE
            launches = emu_get_counts().launches;
#endif
        }
        for (int k = 0; k < 2 * SHARED_LAYERS; k++)
            CHECK(tt_param_get(params[k], to + k * SHARED_WIDTH * SHARED_WIDTH) == TT_OK);
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return launches;
}

enum { JOINED_D = 64, JOINED_ROWS = 11, JOINED_PARAMS = 8 };

typedef struct joined_case {
    const char *precision, *update;
    int key_heads;  /* of 4 */
    bool biases, accumulate;
    const char *recompute;
} joined_case;

/* Two steps of an attention layer, whose q, k and v are of one x; the parameters after them, and the products
   of the second forward and backward. alone: products are launched one by one. */
static long train_attention(const joined_case *c, bool alone, float *to)
{
    static const char *const names[JOINED_PARAMS] = {"q.w", "q.b", "k.w", "k.b",
                                                     "v.w", "v.b", "in.w", "in.b"};
    static const int32_t starts[4] = {0, 4, 5, JOINED_ROWS};
    const int64_t d = JOINED_D, narrow = d / 4 * c->key_heads, out[4] = {d, narrow, narrow, d};
    const tt_init normal = {TT_INIT_NORMAL, 0.2f};
    const tt_value none = {0};
    test_allocator a;
    tt_context_options co = test_options(&a);
    tt_param *params[JOINED_PARAMS] = {NULL};
    float values[2][JOINED_ROWS * JOINED_D], before[JOINED_D * JOINED_D] = {0};
    long products = 0;
    uint64_t s = 1;
#ifdef TT_EMULATE
    emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
    co.seed = 11;
    tt_context *ctx = tt_open(&co);
    ctx->options.verify = true;
    tt_tape *t = tt_tape_new(ctx);
    const int64_t rows = tt_axis(t, "rows", JOINED_ROWS + 3), seqs = tt_axis(t, "seqs", 3);
    const tt_value x = tt_input(t, "x", TT_F32, rows, d), y = tt_input(t, "y", TT_F32, rows, d);
    const tt_value start = tt_seq_start(t, "starts", seqs);
    for (int k = 0; k < JOINED_PARAMS; k++) {
        const int64_t dims[2] = {out[k / 2], d};
        if (k % 2 == 0 || c->biases) params[k] = tt_param_new(ctx, names[k], k % 2 ? 1 : 2, dims, normal);
    }
    const tt_attention_options attention = tt_attention_options_default(4);
    const tt_value h = tt_linear(t, x, params[6], params[7]), of = tt_gelu(t, h);
    tt_value qkv[3];
    for (int k = 0; k < 3; k++) qkv[k] = tt_linear(t, of, params[2 * k], params[2 * k + 1]);
    const tt_value attended = tt_attention(t, qkv[0], qkv[1], qkv[2], start, &attention);
    const tt_value loss = tt_mean_squared_error(t, tt_add(t, attended, h), y, none);
    for (int k = 0; k < 2 * JOINED_ROWS * JOINED_D; k++)
        values[k / (JOINED_ROWS * JOINED_D)][k % (JOINED_ROWS * JOINED_D)] =
            (float)(test_random(&s) % 1000) / 500 - 1;
    tt_compile_options o = tt_compile_options_default();
    o.device = "cuda";
    o.precision = c->precision;
    o.accumulate = c->accumulate;
    o.update = c->update;
    o.recompute = c->recompute;
    o.loss_scale.init = 16;
    o.optimizer.kind = TT_SGD; /* whose updates differ no more than gradients do */
    tt_program *p = tt_compile(t, loss, &o);
    if (!CHECK(p != NULL)) printf("%s\n", tt_error(ctx));
    for (int k = 0; p && k < p->built.t->n_code && alone; k++) p->built.t->code[k].with_next = false;
    if (p) p->poison = true;
    for (int step = 0; step < 2 && p; step++) {
        for (int micro = 0; micro <= c->accumulate; micro++) {
            /* Rows are fewer than there is room for, and of the second micro-batch fewer still. */
            const int64_t n = micro ? 4 : JOINED_ROWS;
            CHECK(tt_set(p, x, values[0], n) == TT_OK && tt_set(p, y, values[1], n) == TT_OK &&
                  tt_set(p, start, starts, micro ? 2 : 4) == TT_OK);
#ifdef TT_EMULATE
            emu_reset_counts();
#endif
            if (c->accumulate) CHECK(tt_micro_step(p, NULL) == TT_OK);
        }
        if (step == 0) CHECK(tt_param_get(params[0], before) == TT_OK);
        if (c->accumulate) CHECK(tt_update(p, 0.1f, NULL) == TT_OK);
        else if (!CHECK(tt_step(p, 0.1f, NULL) == TT_OK)) printf("%s\n", tt_error(ctx));
#ifdef TT_EMULATE
        products = emu_get_counts().gemms;
#endif
    }
    for (int k = 0; k < JOINED_PARAMS && p; k++)
        if (params[k]) CHECK(tt_param_get(params[k], to + k * JOINED_D * JOINED_D) == TT_OK);
    CHECK(memcmp(before, to, sizeof before) != 0);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return products;
}

/* Products of one x are one, forward and backward, for the same bits on the emulator as three. */
TEST(cuda_products_of_one_x)
{
    enum { N = JOINED_PARAMS * JOINED_D * JOINED_D };
    static const joined_case c[] = {
        {"32-true", "end", 4, true, false, "cheap"}, {"bf16-mixed", "end", 4, true, false, "cheap"},
        {"bf16-true", "end", 4, true, false, "none"}, {"16-true", "end", 4, true, false, "cheap"},
        {"bf16-true", "backward", 4, true, false, "cheap"}, {"bf16-true", "end", 4, true, true, "cheap"},
        {"bf16-mixed", "end", 2, true, true, "cheap"}, {"16-mixed", "end", 1, false, false, "none"},
        {"bf16-true", "backward", 2, false, false, "attention"}, {"32-true", "end", 1, false, true, "cheap"}};
    float *one = (float *)calloc(N, sizeof(float)), *all = (float *)calloc(N, sizeof(float));
    for (int k = 0; k < TEST_COUNT(c); k++) {
        memset(one, 0, N * sizeof(float));
        memset(all, 0, N * sizeof(float));
        const long alone = train_attention(&c[k], true, one), together = train_attention(&c[k], false, all);
        bool close = true;
#ifdef TT_EMULATE
        const double most = 0;
#else
        const double most = 0.03;
#endif
        for (int e = 0; e < N; e++) close = close && fabs((double)one[e] - (double)all[e]) <= most;
        CHECK(close);
#ifdef TT_EMULATE
        /* Of four linear layers a product forward and a weight's gradient, of three the gradient of x. */
        CHECK(alone == 4 + 4 + 3 && together == alone - 2 - 2);
        if (together != alone - 4) printf("case %d: %ld products, of %ld\n", k, together, alone);
#else
        (void)alone; (void)together;
#endif
    }
    free(one);
    free(all);
}

/* Norms and updates of many parameters share launches, for the same bits as one by one. */
TEST(cuda_tensors_share_launches)
{
    enum { N = 2 * SHARED_LAYERS * SHARED_WIDTH * SHARED_WIDTH };
    static const char *const names[] = {"32-true", "bf16-mixed", "bf16-true", "16-true"};
    float *one = (float *)calloc(N, sizeof(float)), *all = (float *)calloc(N, sizeof(float)),
          *start = (float *)calloc(N, sizeof(float));
    for (int k = 0; k < 8; k++) {
        tt_optimizer_kind kind = k % 2 ? TT_SGD : TT_ADAMW;
        long alone = train_chain(kind, names[k / 2], true, one),
             together = train_chain(kind, names[k / 2], false, all);
        CHECK(memcmp(one, all, N * sizeof(float)) == 0 && memcmp(one, start, N * sizeof(float)) != 0);
/* Of 12 parameters, 5 at a time: 2 launches for squares, 1 for the update; and clip, next_loss_scale. */
#ifdef TT_EMULATE
        CHECK(alone == 12 * 3 + 1 + (k / 2 == 3) && together == 3 * 3 + 1 + (k / 2 == 3));
#else
        (void)alone; (void)together;
#endif
    }
    free(one);
    free(all);
    free(start);
}
#else
TEST(cuda_products_of_one_x) { SKIP("this build is without TINYTRAIN_CUDA"); }
TEST(cuda_tensors_share_launches) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif

/* A linear layer (33, 70) -> (33, 50) on a device; its products that were in TF32, as the emulator counts
   them. */
static long run_linear_layer(const char *device, const char *matmul, float *y)
{
    enum { ROWS_ = 33, IN_ = 70, OUT_ = 50 };
    test_allocator a;
    tt_context_options co = test_options(&a);
#ifdef TT_EMULATE
    emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
    co.seed = 5;
    tt_context *ctx = tt_open(&co);
    tt_tape *t = tt_tape_new(ctx);
    int64_t dims[2] = {OUT_, IN_};
    tt_init normal = {TT_INIT_NORMAL, 1};
    float x[ROWS_ * IN_];
    uint64_t s = 1;
    long tf32 = 0;
    for (int k = 0; k < ROWS_ * IN_; k++) x[k] = (float)(test_random(&s) % 100003) / 50000 - 1;
    tt_value in = tt_input(t, "x", TT_F32, ROWS_, IN_),
             out = tt_linear(t, in, tt_param_new(ctx, "w", 2, dims, normal), NULL);
    tt_compile_options o = tt_compile_options_default();
    CHECK(strcmp(o.matmul, "fp32") == 0);
    o.train = false;
    o.device = device;
    o.matmul = matmul;
    tt_program *p = tt_compile(t, out, &o);
    if (CHECK(p != NULL))
        CHECK(tt_set(p, in, x, ROWS_) == TT_OK && tt_run(p, NULL) == TT_OK &&
              tt_get(p, out, y, ROWS_ * OUT_) == TT_OK);
#ifdef TT_EMULATE
    tf32 = emu_get_counts().tf32;
#endif
    tt_program_free(p);
    o.matmul = "tf16";
    CHECK(tt_compile(t, out, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "matmul 'tf16' is unknown: use fp32, tf32 or fp8");
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return tf32;
}

/* Products of fp32 matrices in TF32 differ from those in fp32, by as much as operands of 11 bits do: 2^-11 of
   each term, here up to 4. The CPU computes the same with either. */
TEST(matmul_in_tf32)
{
    enum { N = 33 * 50 };
    static float exact[N], rounded[N], none[N];
    run_linear_layer("cpu", "fp32", exact);
    run_linear_layer("cpu", "tf32", rounded);
    run_linear_layer("cpu", NULL, none);
    CHECK(memcmp(exact, rounded, sizeof exact) == 0 && memcmp(exact, none, sizeof exact) == 0);
#ifdef TINYTRAIN_CUDA
    static float fp32[N];
    int other = 0, far = 0, far_fp32 = 0;
    double squares = 0, all = 0;
    long without = run_linear_layer("cuda", "fp32", fp32), with = run_linear_layer("cuda", "tf32", rounded);
    for (int k = 0; k < N; k++) {
        double error = fabs((double)rounded[k] - exact[k]);
        other += rounded[k] != fp32[k];
        far += !(error <= 70 * 4 * 0x1p-11);
        far_fp32 += !(fabs((double)fp32[k] - exact[k]) <= 70 * 4 * 0x1p-23);
        squares += error * error;
        all += (double)exact[k] * exact[k];
    }
    CHECK(other > N / 2 && far == 0 && far_fp32 == 0);
    /* Both operands rounded by up to 2^-11, a third of that squared on average. */
    CHECK(squares > all * 0x1p-26 && squares < all * 0x1p-20);
#ifdef TT_EMULATE
    CHECK(without == 0 && with > 0);
#else
    (void)without; (void)with;
#endif
#endif
}

/* Gradients of the biases of q, k and v, of layers of their own or of one for the three, after two
   micro-batches; how many of the tape's instructions sum columns of attention's gradients. */
enum { BIASED_ROWS = 75, BIASED_HEAD = 24, BIASED_LISTED = 9 };
static int biases_of_attention(const char *isa, const char *precision, bool packed, int key_heads,
                               bool listed, float *got)
{
    enum { ROWS = BIASED_ROWS, HEADS = 2, WIDTH = HEADS * BIASED_HEAD, IN = 17 };
    static const char *const names[] = {"q", "k", "v"};
    const int widths[] = {WIDTH, key_heads * BIASED_HEAD, key_heads * BIASED_HEAD};
    const int all = widths[0] + widths[1] + widths[2], queries = listed ? BIASED_LISTED : ROWS;
    static const int32_t starts[] = {0, 40, 41, ROWS};
    test_allocator a;
    tt_context *ctx = open_isa(test_options(&a), isa);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options c = tt_compile_options_default();
    tt_attention_options o = tt_attention_options_default(HEADS);
    const tt_init init = {TT_INIT_NORMAL, 0.4f};
    tt_param *w[3], *b[3], *last;
    tt_value parts[3];
    float x[ROWS * IN], y[ROWS * WIDTH];
    int32_t rows[BIASED_LISTED];
    uint64_t s = 3;
    int found = 0;
    for (int k = 0; k < ROWS * IN; k++) x[k] = (float)test_random(&s) * 0x1p-31f - 1;
    for (int k = 0; k < ROWS * WIDTH; k++) y[k] = (float)test_random(&s) * 0x1p-31f - 1;
    for (int k = 0; k < BIASED_LISTED; k++) rows[k] = (k * 31 + 5) % ROWS;
    o.causal = !listed;
    const tt_value in = tt_input(t, "x", TT_F32, ROWS, IN), start = tt_input(t, "starts", TT_I32, 4, 1);
    const tt_value at = tt_input(t, "rows", TT_I32, BIASED_LISTED, 1);
    const tt_value target = tt_input(t, "y", TT_F32, queries, WIDTH);
    for (int k = 0; k < 3; k++) {
        const int64_t dims[] = {packed ? all : widths[k], IN};
        if (k == 0 || !packed) {
            w[k] = tt_param_new(ctx, names[k], 2, dims, init);
            b[k] = tt_param_new(ctx, packed ? "b" : k == 0 ? "bq" : k == 1 ? "bk" : "bv", 1, dims, init);
        }
        parts[k] = packed && k ? parts[0] : tt_linear(t, in, w[k], b[k]);
        if (packed && k == 2) {
            parts[1] = tt_slice(t, parts[0], widths[0], widths[1]);
            parts[2] = tt_slice(t, parts[0], widths[0] + widths[1], widths[2]);
            parts[0] = tt_slice(t, parts[0], 0, widths[0]);
        }
    }
    const int64_t dims[] = {WIDTH, WIDTH};
    last = tt_param_new(ctx, "last", 2, dims, init);
    const tt_value q = listed ? tt_gather_rows(t, parts[0], at) : parts[0];
    const tt_value out = listed ? tt_attention_rows(t, q, parts[1], parts[2], start, at, &o)
                                : tt_attention(t, q, parts[1], parts[2], start, &o);
    const tt_value loss = tt_mean_squared_error(t, tt_linear(t, out, last, NULL), target, tt__handle(t, 0));
    c.device = is_cuda(isa) ? "cuda" : "cpu";
    c.precision = precision;
    c.accumulate = true;
    tt_program *p = tt_compile(t, loss, &c);
    if (report(p != NULL, "%s", tt_error(ctx))) {
        for (int k = 0; k < 2; k++)
            CHECK(tt_set(p, in, x, ROWS) == TT_OK && tt_set(p, start, starts, 4) == TT_OK &&
                  (!listed || tt_set(p, at, rows, BIASED_LISTED) == TT_OK) &&
                  tt_set(p, target, y, queries) == TT_OK && tt_micro_step(p, NULL) == TT_OK);
        for (int k = 0, from = 0; k < (packed ? 1 : 3); from += widths[k++])
            CHECK(tt_get_gradient(p, b[k], got + from) == TT_OK);
        for (int k = 0; k < p->built.t->n_code; k++)
            for (int j = 0; j < 3 && p->built.t->code[k].op == TT__OP_ATTENTION_BACKWARD; j++)
                found += tt__column_sums(&p->built.t->code[k], j) != 0;
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return found;
}

TEST(biases_of_attention_cuda)
{
    static const char *const precision[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed"};
    if (!has_isa("cuda")) SKIP("this build is without TINYTRAIN_CUDA");
#ifdef TT_EMULATE
    emu_configure(1, (size_t)16 << 20, 1, 1);
#endif
    for (int c = 0; c < 4 * 8; c++) {
        const bool packed = c / 4 % 2, listed = c / 16;
        const int key_heads = c / 8 % 2 + 1, width = 2 * BIASED_HEAD, keys = key_heads * BIASED_HEAD;
        float got[2][6 * BIASED_HEAD];
        snprintf(where, sizeof where, "%s, %d heads of keys%s%s", precision[c % 4], key_heads,
                 packed ? ", packed" : "", listed ? ", listed queries" : "");
        biases_of_attention("portable", precision[c % 4], packed, key_heads, listed, got[0]);
        const int found = biases_of_attention("cuda", precision[c % 4], packed, key_heads, listed, got[1]);
        /* Of a packed gradient, listed queries' rows are not all: others add to it. */
        const int expected = c % 4 == 0 || (listed && packed) ? 0 : 3;
        report(found == expected, "attention's backward has %d sums of columns, not %d", found, expected);
        for (int k = 0, from = 0; k < 3; from += k++ ? keys : width) {
            double most = 0, off = 0; /* those of keys are 0 but for rounding */
            for (int e = 0; e < (k == 1 ? width : k ? keys : width); e++)
                most = fmax(most, fabs((double)got[0][(k == 1 ? 0 : from) + e]));
            for (int e = 0; e < (k ? keys : width); e++)
                off = fmax(off, fabs((double)got[1][from + e] - got[0][from + e]));
            report(off <= 0.05 * most && most > 0, "biases of %c differ by %g of %g", "qkv"[k], off, most);
        }
    }
}

#ifdef TINYTRAIN_CUDA
/* ------------------------------------------------------------- one instruction on the CPU and on a GPU */

/* A matrix of numbers between two, to be freed. */
static tt__mat some(tt_dtype dtype, int64_t rows, int64_t cols, float from, float to, uint64_t *random)
{
    tt__mat m = {calloc((size_t)(rows * cols), tt_dtype_bytes(dtype)), dtype, rows, cols, cols};
    for (int64_t k = 0; k < rows * cols; k++) {
        float x = from + (to - from) * 0.5f * ((float)test_random(random) * 0x1p-31f);
        tt__convert((char *)m.data + (size_t)k * tt_dtype_bytes(dtype), dtype, &x, TT_F32, 1);
    }
    return m;
}

static tt__mat some_indices(const int32_t *index, int n)
{
    tt__mat m = {malloc(sizeof *index * (size_t)n), TT_I32, n, 1, 1};
    memcpy(m.data, index, sizeof *index * (size_t)n);
    return m;
}

static void free_operands(tt__launch *l)
{
    for (int k = 0; k < TT__RUN_IN; k++) free(l->in[k].data);
    for (int k = 0; k < TT__MAX_OUT; k++) free(l->out[k].data);
    memset(l->in, 0, sizeof *l->in * TT__RUN_IN);
    memset(l->out, 0, sizeof l->out);
}

static bool run_on_cpu(tt__launch *l)
{
    const tt_status status = (l->workspace = calloc(1, (size_t)16 << 20)) ? tt__cpu_launch(l, 1)
                                                                          : TT_ERR_MEMORY;
    free(l->workspace);
    l->workspace = NULL;
    return status == TT_OK;
}

/* Both give the same, within `units` of the last place of each result's largest number. Frees the
   operands. */
static void same_on_both(tt__launch *l, double units, const char *what)
{
    tt__launch cpu = *l;
    snprintf(where, sizeof where, "%s, %s", what,
             tt_dtype_name(l->in[0].dtype == TT_I32 ? l->in[1].dtype : l->in[0].dtype));
    for (int k = 0; k < TT__MAX_OUT; k++) {
        const size_t bytes = (size_t)(l->out[k].rows * l->out[k].cols) * tt_dtype_bytes(l->out[k].dtype);
        if (l->out[k].data) cpu.out[k].data = memcpy(malloc(bytes), l->out[k].data, bytes);
    }
    const bool ok = report(run_on_cpu(&cpu), "the CPU fails") && run_on_cuda(l, (size_t)1 << 18);
    for (int k = 0; k < TT__MAX_OUT && ok; k++) {
        const tt__mat *m = &l->out[k];
        const int64_t n = m->data ? m->rows * m->cols : 0;
        const double unit = m->dtype == TT_F32 ? 0x1p-23 : m->dtype == TT_F16 ? 0x1p-10 : 0x1p-7;
        float *got = (float *)malloc(sizeof *got * (size_t)(2 * n + 1)), *expected = got + n;
        double most = 0;
        int64_t wrong = 0;
        if (n) tt__convert(got, TT_F32, m->data, m->dtype, (size_t)n);
        if (n) tt__convert(expected, TT_F32, cpu.out[k].data, m->dtype, (size_t)n);
        for (int64_t e = 0; e < n; e++) if (fabs(expected[e]) > most) most = fabs(expected[e]);
        for (int64_t e = 0; e < n; e++) wrong += !(fabs((double)got[e] - expected[e]) <= units * unit * most);
        report(wrong == 0 && (most > 0 || n == 0), "%lld of %lld numbers of result %d differ",
               (long long)wrong, (long long)n, k);
        free(got);
    }
    for (int k = 0; k < TT__MAX_OUT; k++) if (l->out[k].data) free(cpu.out[k].data);
    free_operands(l);
}

/* Attention of two sequences, and its backward, of one head of `size` columns. The number of rows chooses the
   kernels of the backward. near: with a window and a bias, which have kernels of their own. far: scores are
   far below 0, and numbers need be finite only. */
static void attention_on_both(tt__launch *l, tt_dtype dtype, int size, const int32_t *starts,
                              bool near, bool far, uint64_t *s)
{
    const int rows = starts[2];
    const float at = far ? 8 : 0; /* scores around -400, whose exponentials are 0 and of -scores infinite */
    const double units = far ? INFINITY : dtype == TT_F16 ? 8 : 4;
    tt__instr i = tt__new_instr(TT__OP_ATTENTION);
    tt__mat kept = some_indices(starts, 3);
    i.attr.heads = i.attr.key_heads = 1;
    i.attr.scale = 0.1f;
    i.attr.causal = dtype == TT_F16;
    i.attr.dropout = near ? 0 : 0.2f;
    if (near) {
        i.attr.window = 3;
        i.attr.alibi = 0.5f;
        i.attr.alibi_heads = 1;
    }
    l->instr = &i;
    l->in[3] = kept;
    for (int k = 0; k < 3; k++) {
        const float middle = k == 0 ? -at : k == 1 ? at : 0;
        l->in[k] = some(dtype, rows, size, middle - 1, middle + 1, s);
    }
    l->out[0] = some(dtype, rows, size, 0, 0, s);
    l->out[1] = some(TT_F32, rows, 1, 0, 0, s);
    report(run_on_cpu(l), "attention on the CPU");
    const tt__launch forward = *l; /* whose operands are those of both */
    memset(l->out, 0, sizeof l->out);
    for (int k = 0; k < 4; k++)
        l->in[k] = k == 3 ? some_indices(starts, 3) : some(dtype, rows, size, -1, 1, s);
    for (int k = 0; k < 3; k++)
        memcpy(l->in[k].data, forward.in[k].data, (size_t)(rows * size) * 2);
    l->out[0] = some(dtype, rows, size, 0, 0, s);
    l->out[1] = some(TT_F32, rows, 1, 0, 0, s);
    same_on_both(l, units, "attention");
    i.op = TT__OP_ATTENTION_BACKWARD;
    l->in[0] = some(dtype, rows, size, -1, 1, s);
    for (int k = 0; k < 4; k++) l->in[1 + k] = forward.in[k];
    for (int k = 0; k < 2; k++) l->in[5 + k] = forward.out[k];
    for (int k = 0; k < 3; k++) l->out[k] = some(dtype, rows, size, 0, 0, s);
    same_on_both(l, 2 * units, "attention_backward");
}

/* For instructions that run on both: their launch, of a run with a seed, and a device to run them on. */
static tt_context *open_for_launches(test_allocator *a, tt__run *run, tt__launch *l)
{
    tt_context_options co = test_options(a);
#ifdef TT_EMULATE
    emu_configure(1, (size_t)96 << 20, 1, 1);
#endif
    tt_context *ctx = tt_open(&co);
    const tt__mat of_run = {run, TT_U8, 1, sizeof *run, sizeof *run};
    memset(run, 0, sizeof *run);
    memset(l, 0, sizeof *l);
    run->seed = 5;
    l->device = (tt__device *)(void *)&ctx->cpu;
    l->in[TT__RUN_IN] = of_run;
    return ctx;
}

/* ---- sums of columns that attention's backward leaves */

typedef struct attention_sums_case {
    const char *name;
    int head, heads, key_heads, rows, seqs, listed, window, block;
    bool causal, alibi, add, wgmma;
} attention_sums_case;

/* The sums of the columns of result o of l, which has `old` added to them: of its numbers as they are. */
static void check_column_sums(const tt__launch *l, int o, const tt__mat *old)
{
    const tt__mat *y = &l->out[o], *sums = &l->out[3 + o];
    int wrong = 0;
    for (int64_t c = 0; c < y->cols; c++) {
        const size_t at = (size_t)c * tt_dtype_bytes(sums->dtype);
        float x, got;
        double sum = 0, size = 0;
        for (int64_t r = 0; r < y->rows; r++) {
            tt__convert(&x, TT_F32, (char *)y->data + (r * y->ld + c) * 2, y->dtype, 1);
            sum += x;
            size += fabs((double)x);
        }
        if (old->data) {
            tt__convert(&x, TT_F32, (char *)old->data + at, old->dtype, 1);
            sum += x;
        }
        tt__convert(&got, TT_F32, (char *)sums->data + at, sums->dtype, 1);
        const double unit = sums->dtype == TT_F32 ? 0x1p-24 : sums->dtype == TT_F16 ? 0x1p-11 : 0x1p-8;
        wrong += !(fabs(got - sum) <= 1.001 * unit * fabs(sum) + 0x1p-19 * size + (unit > 0x1p-12) * 0x1p-25);
    }
    report(wrong == 0, "%d of %d sums of result %d are wrong", wrong, (int)y->cols, o);
}

/* The forward and the numbers that come of it are the CPU's. */
static void attention_sums_on_cuda(tt__launch *l, const attention_sums_case *c, tt_dtype dtype,
                                   tt_dtype of_sums, uint64_t *s)
{
    const int queries = c->listed ? c->listed : c->rows, width = c->head * c->heads,
              key_width = c->head * c->key_heads;
    int32_t *starts = (int32_t *)calloc((size_t)c->seqs + 1 + (size_t)c->listed, sizeof *starts);
    int32_t *numbers = starts + c->seqs + 1;
    tt__mat old[3];
    tt__instr i = tt__new_instr(TT__OP_ATTENTION);
    for (int k = 0; k <= c->seqs; k++) /* of other lengths each, none for one */
        starts[k] = k < c->seqs ? (int32_t)((int64_t)k * c->rows / c->seqs - (k % 2 && c->rows > 2 * c->seqs))
                                : c->rows;
    for (int k = 0; k < c->listed; k++) numbers[k] = (int32_t)(test_random(s) % (uint32_t)c->rows);
    i.attr.heads = c->heads;
    i.attr.key_heads = c->key_heads;
    i.attr.scale = 0.2f;
    i.attr.causal = c->causal;
    i.attr.window = c->window;
    i.attr.alibi = c->alibi ? 0.5f : 0;
    i.attr.alibi_heads = c->alibi ? c->heads : 0;
    i.attr.block = c->block;
    i.attr.listed = c->block ? 1 : 0;
    i.attr.list_rows = c->block ? c->rows / c->block : 0;
    i.attr.dropout = c->head % 3 ? 0.2f : 0;
    l->instr = &i;
    i.workspace = (size_t)1 << 20;
    l->in[0] = some(dtype, queries, width, -1, 1, s);
    for (int k = 1; k < 3; k++) l->in[k] = some(dtype, c->rows, key_width, -1, 1, s);
    l->in[3] = some_indices(starts, c->seqs + 1);
    if (c->listed) l->in[4] = some_indices(numbers, c->listed);
    l->out[0] = some(dtype, queries, width, 0, 0, s);
    l->out[1] = some(TT_F32, queries, c->heads, 0, 0, s);
    report(run_on_cpu(l), "attention on the CPU");
    i.op = TT__OP_ATTENTION_BACKWARD;
    for (int k = 4; k >= 0; k--) l->in[k == 4 ? 7 : k + 1] = l->in[k];
    l->in[0] = some(dtype, queries, width, -1, 1, s);
    l->in[5] = l->out[0];
    l->in[6] = l->out[1];
    for (int k = 0; k < 3; k++) {
        const int columns = k ? key_width : width;
        l->out[k] = some(dtype, k ? c->rows : queries, columns, -(float)c->add, (float)c->add, s);
        l->add[k] = c->add;
        l->out[3 + k] = some(of_sums, 1, columns, -1, 1, s);
        l->add[3 + k] = k != 1;
        old[k] = some(of_sums, 1, columns, 0, 0, s);
        memcpy(old[k].data, l->out[3 + k].data, (size_t)columns * tt_dtype_bytes(of_sums));
    }
    snprintf(where, sizeof where, "%s, %s, sums in %s", c->name, tt_dtype_name(dtype),
             tt_dtype_name(of_sums));
    if (report(run_on_cuda(l, (size_t)1 << 20), "fails"))
        for (int k = 0; k < 3; k++) {
            const tt__mat none = {NULL, TT_F32, 0, 0, 0};
            check_column_sums(l, k, l->add[3 + k] ? &old[k] : &none);
        }
    for (int k = 0; k < 3; k++) free(old[k].data);
    memset(l->add, 0, sizeof l->add);
    free_operands(l);
    free(starts);
}

/* Each kernel of attention's backward leaves the sums of columns of what it writes: of queries, or keys, that
   fill no tile, of sequences without any, of few queries, of heads that share keys, of more parts than there
   is room for, and of gradients that are added to. */
TEST(cuda_column_sums_of_attention)
{
    static const attention_sums_case cases_of[] = {
        {"heads of 32 in one pass", 32, 2, 2, 80, 2, 0, 0, 0, false, false, false, false},
        {"heads of 24 in one pass of 8 warps", 24, 3, 1, 200, 3, 0, 0, 0, true, false, false, false},
        {"heads of 64 in one pass", 64, 2, 1, 141, 1, 0, 0, 0, false, false, false, false},
        {"listed queries in one pass", 64, 2, 2, 190, 4, 7, 0, 0, false, false, false, false},
        {"heads of 24", 24, 2, 2, 280, 3, 0, 0, 0, true, false, false, false},
        {"heads of 64", 64, 2, 1, 290, 2, 0, 0, 0, false, false, false, false},
        {"listed queries", 64, 1, 1, 280, 5, 70, 0, 0, true, false, false, false},
        {"a window", 64, 2, 2, 280, 2, 0, 20, 0, true, false, false, false},
        {"ALiBi", 40, 2, 1, 270, 2, 0, 0, 0, false, true, false, false},
        {"heads of 80", 80, 2, 2, 100, 3, 0, 0, 0, true, false, false, false},
        {"heads of 96", 96, 2, 1, 100, 2, 0, 0, 0, false, false, false, false},
        {"heads of 128", 128, 2, 1, 150, 2, 0, 0, 0, true, false, false, false},
        {"blocks", 64, 1, 1, 320, 1, 0, 0, 64, false, false, false, false},
        {"more sequences than there is room for", 64, 2, 2, 600, 600, 0, 0, 0, false, false, false, false},
        {"gradients that are added to", 64, 2, 2, 270, 2, 0, 0, 0, false, false, true, false},
        {"heads without vectors", 20, 2, 2, 70, 2, 0, 0, 0, false, false, false, false},
        {"by warpgroups, a head of keys each", 64, 2, 2, 200, 3, 0, 0, 0, false, false, false, true},
        {"by warpgroups", 64, 2, 1, 290, 3, 0, 0, 0, false, false, false, true},
        {"by warpgroups, heads of 40", 40, 2, 2, 270, 2, 0, 0, 0, true, false, false, true},
        {"by warpgroups, listed queries", 64, 2, 2, 290, 4, 7, 0, 0, true, false, false, true},
    };
    test_allocator a;
    uint64_t s = 7;
    tt__run run;
    tt__launch l;
    tt_context *ctx = open_for_launches(&a, &run, &l);
    for (int c = 0; c < TT__COUNT(cases_of); c++)
        for (int f16 = 0; f16 < 2; f16++) {
            const attention_sums_case *of = &cases_of[c];
            const tt_dtype dtype = f16 ? TT_F16 : TT_BF16;
#ifdef TT_EMULATE
            if (of->wgmma) emu_set_capability(0, 9, 0);
#endif
            if (!of->wgmma) setenv("TINYTRAIN_WGMMA", "0", 1);
            attention_sums_on_cuda(&l, of, dtype, (c + f16) % 2 ? TT_F32 : dtype, &s);
            unsetenv("TINYTRAIN_WGMMA");
        }
    TEST_CLOSE(ctx, &a);
}

/* ---- bits of dropout that attention's backward keeps from dq to dk and dv */

typedef struct kept_case {
    const char *name;
    int head, heads, key_heads, first_head, starts[6];
    bool causal, wgmma, listed; /* listed: each second row is a query */
} kept_case;

/* Bits in the workspace, behind the sums of dout * out, that are not those that Philox gives. */
static int wrong_bits(const kept_case *c, const tt__instr *i, const tt__run *run, const unsigned char *bits)
{
    const uint64_t key = dropout_key(run->seed, (uint64_t)run->step, (uint64_t)run->micro, i->random);
    const int across = (i->attr.max_length + 63) / 64;
    int wrong = 0;
    for (int s = 0; s < 5; s++)
        for (int h = 0; h < c->heads; h++)
            for (int q = 0; q < c->starts[s + 1] - c->starts[s]; q++)
                for (int k = 0; k < (c->causal ? q + 1 : c->starts[s + 1] - c->starts[s]); k++) {
                    const int before = c->starts[s] / 64 + s, row = q / 64;
                    const int pair = c->causal ? before * (across + 1) / 2 + row * (row + 1) / 2
                                               : (before + row) * across;
                    const size_t at = ((size_t)(pair + k / 64) * (size_t)c->heads + (size_t)h) * 512 +
                                      (size_t)(k % 64 / 16 * 64 + q % 64) * 2 + (size_t)(k % 16 / 8);
                    const double factor = kept(key, (uint32_t)(c->starts[s] + q), (uint32_t)k,
                                               (uint32_t)(c->first_head + h), (double)i->attr.dropout);
                    wrong += (bits[at] >> k % 8 & 1) != (factor > 0);
                }
    return wrong;
}

/* The largest difference of n numbers of 16 bits, where the largest of a is 1. */
static double most_apart(const void *a, const void *b, tt_dtype dtype, int64_t n)
{
    double apart = 0, most = 0;
    for (int64_t k = 0; k < n; k++) {
        float x, y;
        tt__convert(&x, TT_F32, (const char *)a + 2 * k, dtype, 1);
        tt__convert(&y, TT_F32, (const char *)b + 2 * k, dtype, 1);
        const double d = fabs((double)x - (double)y);
        if (!(d < INFINITY)) return INFINITY;
        if (d > apart) apart = d;
        if (fabs((double)x) > most) most = fabs((double)x);
    }
    return apart / most;
}

/* The backward with room for the bits gives the same bits of dq, dk and dv as without, also where only dq is
   wanted; dk and dv alone, for which another kernel adds up dout * out, are as near as 16 bits are. It leaves
   the bits that tt__cuda_attention_bits counts. Where a head is not of 64 columns, rows of out begin at no
   multiple of 16 bytes. */
static void dropout_kept_on_cuda(tt__launch *l, const kept_case *c, tt_dtype dtype, const tt__run *run,
                                 uint64_t *s)
{
    enum { OUTS = 3 };
    const int rows = c->starts[5], width = c->head * c->heads, key_width = c->head * c->key_heads;
    const int queries = c->listed ? rows / 2 : rows;
    tt__instr i = tt__new_instr(TT__OP_ATTENTION);
    int32_t *numbers = (int32_t *)calloc((size_t)rows, sizeof *numbers);
    void *without[OUTS];
    for (int k = 0; k < queries; k++) numbers[k] = 2 * k;
    i.attr.heads = c->heads;
    i.attr.key_heads = c->key_heads;
    i.attr.scale = 0.2f;
    i.attr.causal = c->causal;
    i.attr.dropout = 0.3f;
    for (int k = 0; k < 5; k++)
        i.attr.max_length = (int)tt__max(i.attr.max_length, c->starts[k + 1] - c->starts[k]);
    i.random = 7;
    l->instr = &i;
    l->first_col = c->first_head * c->head;
    l->in[0] = some(dtype, queries, width, -1, 1, s);
    for (int k = 1; k < 3; k++) l->in[k] = some(dtype, rows, key_width, -1, 1, s);
    l->in[3] = some_indices(c->starts, 6);
    if (c->listed) l->in[4] = some_indices(numbers, queries);
    l->out[0] = some(dtype, queries, width + (c->head != 64) * 4, 0, 0, s);
    l->out[0].cols = width;
    l->out[1] = some(TT_F32, queries, c->heads, 0, 0, s);
    snprintf(where, sizeof where, "%s, %s", c->name, tt_dtype_name(dtype));
    report(run_on_cpu(l), "attention on the CPU");
    i.op = TT__OP_ATTENTION_BACKWARD;
    for (int k = 4; k >= 0; k--) l->in[k == 4 ? 7 : k + 1] = l->in[k];
    l->in[0] = some(dtype, queries, width, -1, 1, s);
    for (int k = 0; k < 2; k++) l->in[5 + k] = l->out[k];
    for (int k = 0; k < OUTS; k++)
        l->out[k] = some(dtype, k ? rows : queries, k ? key_width : width, 0, 0, s);
    const size_t order = c->listed ? tt__align_to((size_t)(6 + 2 * queries) * 4, TT__CUDA_ALIGN) : 0;
    const size_t deltas = order + tt__align_to((size_t)queries * (size_t)c->heads * 4, TT__CUDA_ALIGN);
    const size_t bits = (size_t)tt__cuda_attention_bits(&i.attr, &l->in[1], 5), room = deltas + bits;
    unsigned char *after = (unsigned char *)calloc(1, room);
    report(bits > 0 && bits <= (size_t)(queries * width) * 2, "%zu bytes of bits", bits);
    i.attr.dropout = 1e-6f; /* rounded, it drops none, and no kernel leaves bits */
    report(tt__cuda_attention_bits(&i.attr, &l->in[1], 5) == 0, "bits of a rate that drops none");
    i.attr.dropout = 0.3f;
    i.workspace = room - 1; /* so none of the place of bits is touched */
    report(run_on_cuda(l, deltas), "fails without room");
    i.workspace = room;
    for (int k = 0; k < OUTS; k++) without[k] = l->out[k].data;
    for (int wanted = 0; wanted < 3; wanted++) { /* all; dq; dk and dv */
        for (int k = 0; k < OUTS; k++)
            l->out[k] = some(dtype, k ? rows : queries, k ? key_width : width, 0, 0, s);
        for (int k = 0; k < OUTS; k++) {
            if (wanted == 0 || (wanted == 1) == (k == 0)) continue;
            free(l->out[k].data);
            memset(&l->out[k], 0, sizeof l->out[k]);
        }
        workspace_after = wanted ? NULL : after;
        report(run_on_cuda(l, room), "fails");
        workspace_after = NULL;
        for (int k = 0; k < OUTS; k++) {
            const int64_t n = k ? (int64_t)rows * key_width : (int64_t)queries * width;
            const double apart = l->out[k].data ? most_apart(without[k], l->out[k].data, dtype, n) : 0;
            const double unit = dtype == TT_F16 ? 0x1p-10 : 0x1p-7;
            report(apart <= (wanted == 2 ? unit : 0), "result %d is another by %g, wanted %d", k, apart,
                   wanted);
            free(l->out[k].data);
        }
    }
    const int wrong = c->listed ? 0 : wrong_bits(c, &i, run, after + deltas);
    report(wrong == 0, "%d bits are wrong", wrong);
    for (int k = 0; k < OUTS; k++) {
        free(without[k]);
        memset(&l->out[k], 0, sizeof l->out[k]);
    }
    free(after);
    free(numbers);
    l->first_col = 0;
    free_operands(l);
}

/* Of sequences of any length, none, or a tile's, heads that share keys, some of all ranks' heads, and listed
   queries, for which each kernel draws. */
TEST(cuda_dropout_kept_for_keys)
{
    static const kept_case cases_of[] = {
        {"heads of 64", 64, 2, 2, 0, {0, 300, 301, 301, 429, 520}, false, false, false},
        {"heads of 64, causal", 64, 4, 2, 0, {0, 33, 353, 353, 417, 510}, true, false, false},
        {"heads of 24, causal", 24, 2, 1, 2, {0, 1, 290, 290, 301, 333}, true, false, false},
        {"listed queries", 64, 2, 2, 0, {0, 30, 330, 680, 680, 700}, true, false, true},
        {"heads of 40 of one sequence, causal", 40, 2, 2, 2, {0, 0, 0, 0, 0, 270}, true, false, false},
        {"by warpgroups", 64, 2, 1, 0, {0, 300, 301, 301, 429, 520}, false, true, false},
        {"by warpgroups, listed queries", 64, 2, 1, 0, {0, 30, 330, 680, 680, 700}, true, true, true},
        {"by warpgroups, causal", 64, 4, 2, 4, {0, 33, 353, 353, 417, 510}, true, true, false},
        {"by warpgroups, heads of 40", 40, 3, 3, 0, {0, 0, 64, 345, 345, 400}, true, true, false},
    };
    test_allocator a;
    uint64_t s = 3;
    tt__run run;
    tt__launch l;
    tt_context *ctx = open_for_launches(&a, &run, &l);
    run.step = 3;
    for (int c = 0; c < TT__COUNT(cases_of); c++) {
#ifdef TT_EMULATE
        if (cases_of[c].wgmma) emu_set_capability(0, 9, 0);
#endif
        if (!cases_of[c].wgmma) setenv("TINYTRAIN_WGMMA", "0", 1);
        for (int f16 = 0; f16 < 2; f16++)
            dropout_kept_on_cuda(&l, &cases_of[c], f16 ? TT_F16 : TT_BF16, &run, &s);
        unsetenv("TINYTRAIN_WGMMA");
    }
    TEST_CLOSE(ctx, &a);
}

/* Dropout and a norm of its result, or a norm's backward and dropout of its dx, in one call and in two leave
   the same bits in memory. Matrices of the rows lie one behind the other; places: which of these each has,
   and `shift`: of the second launch's result, rows from there on. */
typedef struct norm_places {
    const char *what;
    int from, residual, h, y; /* forward: operands and result of dropout, result of the norm */
    int dy, dx, masked;       /* backward, of which h is an operand */
    int shift;
} norm_places;

static void dropout_with_norm_on_cuda(tt__device *d, unsigned char *memory, size_t room, void *resident,
                                      const norm_places *at, bool forward, bool centred, tt_dtype x,
                                      tt_dtype of_w, int cols, uint64_t *s)
{
    enum { ROWS_ = 37, MATRICES = 6, SMALL = 7 };
    const tt__backend *b = &tt__cuda_backend;
    const size_t rows_bytes = ((size_t)(ROWS_ + 1) * (size_t)cols * 4 + 255) / 256 * 256;
    const size_t small_bytes = ((size_t)cols * 4 + 1023) / 256 * 256, all = MATRICES * rows_bytes +
                               SMALL * small_bytes;
    unsigned char *before = (unsigned char *)calloc(all, 1), *after[2];
    tt__run run;
    tt__instr drop = tt__new_instr(TT__OP_DROPOUT), norm = tt__new_instr(TT__OP_LAYERNORM);
    memset(&run, 0, sizeof run);
    run.seed = 5;
    run.step = 3;
    snprintf(where, sizeof where, "%s, %s, %s/%s, %d columns", at->what, forward ? "forward" : "backward",
             tt_dtype_name(x), tt_dtype_name(of_w), cols);
    for (int k = 0; k < MATRICES + SMALL; k++) {
        const bool rows = k < MATRICES, f32 = k >= MATRICES + 2;
        const size_t place = rows ? (size_t)k * rows_bytes
                                  : MATRICES * rows_bytes + (size_t)(k - MATRICES) * small_bytes;
        const tt__mat m = some(rows ? x : f32 ? TT_F32 : of_w, rows ? ROWS_ + 1 : 1, cols,
                               f32 ? 0.1f : -2, 2, s);
        memcpy(before + place, m.data, (size_t)(m.rows * m.cols) * tt_dtype_bytes(m.dtype));
        free(m.data);
    }
    memcpy(before + all - small_bytes, &run, sizeof run);
    drop.attr.dropout = 0.3f;
    drop.random = 4;
    norm.attr.eps = 1e-5f;
    norm.op = forward ? centred ? TT__OP_LAYERNORM : TT__OP_RMSNORM
        : centred ? TT__OP_LAYERNORM_BACKWARD : TT__OP_RMSNORM_BACKWARD;
    for (int together = 0; together < 2; together++) {
        tt__launch l[2], *dropout = &l[!forward], *of_norm = &l[forward];
        memset(l, 0, sizeof l);
        after[together] = (unsigned char *)calloc(all, 1);
        dropout->instr = &drop;
        of_norm->instr = &norm;
        l[0].device = l[1].device = d;
        l[0].resident = l[1].resident = resident;
#define ROWS_AT(place) (tt__mat){memory + (size_t)(place) * rows_bytes, x, ROWS_, cols, cols}
#define SMALL_AT(place, type, n) \
    (tt__mat){memory + MATRICES * rows_bytes + (place) * small_bytes, type, 1, n, n}
        const tt__mat stats = {memory + MATRICES * rows_bytes + 5 * small_bytes, TT_F32, ROWS_,
                               centred ? 2 : 1, centred ? 2 : 1};
        dropout->in[TT__RUN_IN] = SMALL_AT(6, TT_U8, (int64_t)sizeof run);
        if (forward) {
            dropout->in[0] = ROWS_AT(at->from);
            if (at->residual >= 0) dropout->in[1] = ROWS_AT(at->residual);
            dropout->out[0] = of_norm->in[0] = ROWS_AT(at->h);
            of_norm->in[1] = SMALL_AT(0, of_w, cols);
            if (centred) of_norm->in[2] = SMALL_AT(1, of_w, cols);
            of_norm->out[0] = ROWS_AT(at->y);
            of_norm->out[1] = stats;
        } else {
            of_norm->in[0] = ROWS_AT(at->dy);
            of_norm->in[1] = ROWS_AT(at->h);
            of_norm->in[2] = SMALL_AT(0, of_w, cols);
            of_norm->in[3] = stats;
            of_norm->out[0] = dropout->in[0] = ROWS_AT(at->dx);
            of_norm->add[0] = at->dx != at->dy;
            of_norm->out[1] = SMALL_AT(2, TT_F32, cols);
            if (centred) of_norm->out[2] = SMALL_AT(3, TT_F32, cols);
            dropout->out[0] = ROWS_AT(at->masked);
            dropout->out[1] = SMALL_AT(4, TT_F32, cols);
            dropout->add[1] = true;
        }
        l[1].out[0].data = (char *)l[1].out[0].data + (size_t)(at->shift * cols) * tt_dtype_bytes(x);
        bool ok = all <= room && b->copy(d, TT__COMPUTE_STREAM, memory, before, all) == TT_OK &&
                  b->wait(d) == TT_OK;
        if (ok && together) ok = b->launch(l, 2) == TT_OK;
        else if (ok) ok = b->launch(&l[0], 1) == TT_OK && b->launch(&l[1], 1) == TT_OK;
        if (ok) ok = b->read(d, after[together], memory, all) == TT_OK;
        report(ok, "fails: %s", b->error(d));
#undef ROWS_AT
#undef SMALL_AT
    }
    report(memcmp(before, after[0], all) != 0, "nothing is written");
    report(memcmp(after[0], after[1], all) == 0, "one launch does not leave what two leave");
    for (int k = 0; k < 2; k++) free(after[k]);
    free(before);
}

TEST(cuda_dropout_with_norms)
{
    enum { ROOM = 2 << 20 };
    static const norm_places places[] = {
        {"apart", 0, 1, 2, 3, 3, 4, 5, 0},
        {"without a residual", 0, -1, 2, 3, 3, 4, 5, 0},
        {"in place", 0, 1, 0, 1, 3, 3, 2, 0},
        {"in the place of what dropout reads", 0, 1, 2, 0, 3, 4, 3, 0},
        {"a row behind what dropout reads", 0, 1, 2, 0, 3, 4, 3, 1},
        {"in the place of dx", 0, 1, 1, 1, 3, 4, 4, 0},
    };
    static const tt_dtype norm[][2] = {
        {TT_F32, TT_F32}, {TT_BF16, TT_F32}, {TT_BF16, TT_BF16}, {TT_F16, TT_F32}};
    static const int width[] = {40, 384, 1024, 1504, 77};
    const tt__backend *b = &tt__cuda_backend;
    char error[256] = "";
    test_allocator a;
    uint64_t s = 9;
#ifdef TT_EMULATE
    emu_configure(1, (size_t)16 << 20, 1, 1);
#endif
    const tt_context_options co = test_options(&a);
    tt_context *ctx = tt_open(&co);
    tt__device *d = b->open(ctx, 0, 1, error, sizeof error);
    unsigned char *memory = d ? (unsigned char *)b->allocate(d, ROOM) : NULL;
    void *resident = d ? b->allocate(d, TT__CUDA_RESIDENT) : NULL;
    if (!report(memory && resident, "no memory: %s", d ? b->error(d) : error)) return;
    for (int p = 0; p < TT__COUNT(places); p++)
        for (int t = 0; t < TT__COUNT(norm); t++)
            for (int w = 0; w < TT__COUNT(width); w++)
                for (int forward = 0; forward < 2; forward++)
                    dropout_with_norm_on_cuda(d, memory, ROOM, resident, &places[p], forward,
                                              (p + t + w) % 3 != 0, norm[t][0], norm[t][1], width[w], &s);
    b->release(d, memory);
    b->release(d, resident);
    b->close(d);
    TEST_CLOSE(ctx, &a);
}

/* Trains three blocks with dropout for two steps; their norms come behind it (as BERT's) or in front of what
   it drops (as GPT-2's). Writes the parameters and returns how many launches are of dropout and a norm.
   apart: none is, and storages are overwritten as soon as they are dead. */
enum { NORMED_D = 24, NORMED_BLOCKS = 3, NORMED_PARAMS = 4 * NORMED_BLOCKS };
static int blocks_with_dropout(const char *precision, bool behind, bool apart, float *to)
{
    enum { ROWS = 37, D = NORMED_D };
    static const char *const names[] = {"w", "b", "norm", "shift"};
    const tt_init init[] = {
        {TT_INIT_NORMAL, 0.4f}, {TT_INIT_NORMAL, 0.4f}, {TT_INIT_ONES, 0}, {TT_INIT_ZEROS, 0}};
    const int64_t dims[] = {D, D};
    const tt_value none = {0};
    test_allocator a;
    tt_param *params[NORMED_PARAMS];
    float x[ROWS * D], y[ROWS * D];
    uint64_t s = 3;
    int found = 0;
#ifdef TT_EMULATE
    emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
    tt_context *ctx = open_isa(test_options(&a), "cuda");
    ctx->options.verify = true;
    tt_tape *t = tt_tape_new(ctx);
    const tt_value in = tt_input(t, "x", TT_F32, ROWS, D), target = tt_input(t, "y", TT_F32, ROWS, D);
    tt_value h = in;
    for (int k = 0; k < ROWS * D; k++) x[k] = (float)test_random(&s) * 0x1p-31f - 1;
    for (int k = 0; k < ROWS * D; k++) y[k] = (float)test_random(&s) * 0x1p-31f - 1;
    for (int k = 0; k < NORMED_PARAMS; k++) {
        char name[16];
        snprintf(name, sizeof name, "%s%d", names[k % 4], k / 4);
        params[k] = tt_param_new(ctx, name, k % 4 ? 1 : 2, dims, init[k % 4]);
    }
    for (int k = 0; k < NORMED_BLOCKS; k++) {
        tt_param **w = params + 4 * k;
        tt_value of = h;
        if (!behind) of = k == 1 ? tt_rmsnorm(t, h, w[2], 1e-5f) : tt_layernorm(t, h, w[2], w[3], 1e-5f);
        h = tt_add(t, h, tt_dropout(t, tt_linear(t, of, w[0], w[1]), 0.3f));
        if (behind) h = k == 1 ? tt_rmsnorm(t, h, w[2], 1e-5f) : tt_layernorm(t, h, w[2], w[3], 1e-5f);
    }
    tt_compile_options o = tt_compile_options_default();
    o.device = "cuda";
    o.precision = precision;
    o.loss_scale.init = 16;
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, h, target, none), &o);
    if (!CHECK(p != NULL)) printf("%s\n", tt_error(ctx));
    if (p) p->poison = apart;
    for (int k = 0; p && k < p->built.t->n_code; k++) found += tt__leads_to_next(p, k);
    for (int step = 0; step < 2 && p; step++)
        CHECK(tt_set(p, in, x, ROWS) == TT_OK && tt_set(p, target, y, ROWS) == TT_OK &&
              tt_step(p, 0.1f, NULL) == TT_OK);
    memset(to, 0, sizeof *to * NORMED_PARAMS * D * D);
    for (int k = 0; k < NORMED_PARAMS && p; k++) CHECK(tt_param_get(params[k], to + k * D * D) == TT_OK);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return found;
}

/* In programs the two are one launch, for the same bits. */
TEST(cuda_programs_with_dropout_and_norms)
{
    static const char *const precision[] = {"32-true", "bf16-mixed", "bf16-true"};
    static float of[2][NORMED_PARAMS * NORMED_D * NORMED_D];
    for (int c = 0; c < 2 * TT__COUNT(precision); c++) {
        snprintf(where, sizeof where, "%s, norms %s", precision[c / 2], c % 2 ? "behind" : "in front");
        const int together = blocks_with_dropout(precision[c / 2], c % 2, false, of[0]);
        const int apart = blocks_with_dropout(precision[c / 2], c % 2, true, of[1]);
        /* Forward and backward, but of what comes behind the last norm in front, or before the first one. */
        const int expected = c % 2 ? 2 * NORMED_BLOCKS : 2 * (NORMED_BLOCKS - 1);
        report(together == expected && apart == 0, "%d launches are of both, not %d", together, expected);
        report(memcmp(of[0], of[1], sizeof of[0]) == 0, "parameters differ");
    }
}

/* ---- attention's backward by warpgroups, in one pass */

typedef struct wide_case {
    const char *name;
    int head, heads, key_heads, first_head, starts[5];
    bool causal, drops;
} wide_case;

/* As the CPU's, with the second of the sequences not a number in each operand, which the others don't see. */
static void wide_backward_on_cuda(tt__launch *l, const wide_case *c, tt_dtype dtype, uint64_t *s)
{
    enum { OUTS = 3, SEQS = 4 };
    const int rows = c->starts[SEQS], width = c->head * c->heads, key_width = c->head * c->key_heads;
    const int first = c->starts[1], ends = c->starts[2];
    tt__instr i = tt__new_instr(TT__OP_ATTENTION);
    i.attr.heads = c->heads;
    i.attr.key_heads = c->key_heads;
    i.attr.scale = 0.2f;
    i.attr.causal = c->causal;
    i.attr.dropout = c->drops ? 0.3f : 0;
    for (int k = 0; k < SEQS; k++)
        i.attr.max_length = (int)tt__max(i.attr.max_length, c->starts[k + 1] - c->starts[k]);
    i.random = 7;
    l->instr = &i;
    l->first_col = c->first_head * c->head;
    l->in[0] = some(dtype, rows, width, -1, 1, s);
    for (int k = 1; k < 3; k++) l->in[k] = some(dtype, rows, key_width, -1, 1, s);
    l->in[3] = some_indices(c->starts, SEQS + 1);
    l->out[0] = some(dtype, rows, width, 0, 0, s);
    l->out[1] = some(TT_F32, rows, c->heads, 0, 0, s);
    snprintf(where, sizeof where, "%s, %s", c->name, tt_dtype_name(dtype));
    report(run_on_cpu(l), "attention on the CPU");
    i.op = TT__OP_ATTENTION_BACKWARD;
    for (int k = 3; k >= 0; k--) l->in[k + 1] = l->in[k];
    l->in[0] = some(dtype, rows, width, -1, 1, s);
    for (int k = 0; k < 2; k++) l->in[5 + k] = l->out[k];
    memset(l->out, 0, sizeof l->out);
    tt__launch cpu = *l;
    for (int k = 0; k < OUTS; k++) {
        l->out[k] = some(dtype, rows, k ? key_width : width, 0, 0, s);
        cpu.out[k] = some(dtype, rows, k ? key_width : width, 0, 0, s);
    }
    i.workspace = (size_t)16 << 20; /* as run_on_cpu gives it */
    report(run_on_cpu(&cpu), "the backward on the CPU");
    for (int k = 0; k < 6; k++)
        if (k != 4)
            memset((char *)l->in[k].data + first * l->in[k].ld * 2, 0xff,
                   (size_t)((ends - first) * l->in[k].cols * 2));
    const size_t parts = (size_t)tt__cuda_attention_parts(&i.attr, &l->in[1]);
    i.workspace = parts + tt__align_to((size_t)(rows * c->heads) * 4, TT__CUDA_ALIGN) + SEQS * c->heads * 4;
    report(run_on_cuda(l, i.workspace), "fails");
    for (int k = 0; k < OUTS; k++)
        for (int q = 0; q < SEQS; q++) {
            const int64_t at = c->starts[q] * l->out[k].cols, n = c->starts[q + 1] * l->out[k].cols - at;
            if (q == 1 || n == 0) continue;
            const double apart = most_apart((char *)cpu.out[k].data + 2 * at, (char *)l->out[k].data + 2 * at,
                                            dtype, n);
            report(apart <= (dtype == TT_F16 ? 0x1p-10 : 0x1p-7), "result %d of sequence %d is another by %g",
                   k, q, apart);
        }
    for (int k = 0; k < OUTS; k++) free(cpu.out[k].data);
    l->first_col = 0;
    free_operands(l);
}

/* Sequences of one block, of several, and of more than there are slots for, to which later passes add. */
TEST(cuda_backward_by_warpgroups)
{
    static const wide_case cases_of[] = {
        {"one block", 64, 2, 2, 0, {0, 197, 260, 265, 290}, false, false},
        {"one block, causal", 64, 4, 2, 2, {0, 129, 192, 199, 449}, true, true},
        {"one block of a head of 40", 40, 2, 1, 0, {0, 64, 70, 75, 326}, false, true},
        {"blocks", 64, 2, 2, 2, {0, 300, 340, 345, 853}, false, true},
        {"blocks, causal", 64, 2, 1, 0, {0, 261, 290, 310, 1000}, true, false},
        {"two passes", 64, 1, 1, 0, {0, 30, 60, 65, 1190}, false, false},
        {"two passes, causal", 48, 1, 1, 0, {0, 300, 301, 310, 1400}, true, true},
    };
    test_allocator a;
    uint64_t s = 3;
    tt__run run;
    tt__launch l;
    tt_context *ctx = open_for_launches(&a, &run, &l);
    run.step = 3;
#ifdef TT_EMULATE
    emu_set_capability(0, 9, 0);
#endif
    for (int c = 0; c < TT__COUNT(cases_of); c++)
        wide_backward_on_cuda(&l, &cases_of[c], c % 2 ? TT_F16 : TT_BF16, &s);
    TEST_CLOSE(ctx, &a);
}

/* The kernels that are compiled for certain dtypes and sizes, each of them: what tests of whole programs meet
   of these is left to chance. */
TEST(cuda_kernels_of_each_dtype)
{
    enum { ROWS_ = 5, MORE_ROWS = 37, D = 40 };
    static const tt_dtype dtype[] = {TT_F32, TT_BF16, TT_F16};
    static const tt_dtype pair[][2] = {
        {TT_F32, TT_F32}, {TT_BF16, TT_BF16}, {TT_F16, TT_F16}, {TT_F32, TT_BF16}, {TT_F32, TT_F16}};
    static const tt_dtype norm[][2] = {
        {TT_F32, TT_F32}, {TT_BF16, TT_F32}, {TT_BF16, TT_BF16}, {TT_F16, TT_F32}};
    static const int width[] = {200, 512, 768, 1000, 1504, 3000, 5000}, head[] = {24, 64, 80, 96, 128};
    static const int acts[] = {TT__ACT_GELU, TT__ACT_GELU_TANH, TT__ACT_RELU, TT__ACT_TANH, TT__ACT_SILU},
                     of_two[] = {TT__OP_ADD, TT__OP_MUL, TT__OP_DROPOUT};
    static const int32_t index[ROWS_] = {2, 0, 4, 2, 1};
    static const int32_t sequences[][3] = {{0, 67, 80}, {0, 141, 190}, {0, 80, 280}};
    test_allocator a;
    uint64_t s = 1;
    tt__instr i;
    tt__run run;
    tt__launch l;
    tt_context *ctx = open_for_launches(&a, &run, &l);
    run.lr = 0.1f;
    l.instr = &i;
    for (int t = 0; t < TT__COUNT(dtype); t++) {
        for (int act = 0; act < TT__COUNT(acts); act++) {
            i = tt__new_instr(TT__OP_ACTIVATION);
            i.attr.act = acts[act];
            l.in[0] = some(dtype[t], ROWS_, D, -3, 3, &s);
            l.out[0] = some(dtype[t], ROWS_, D, 0, 0, &s);
            same_on_both(&l, 8, "activation");
            i.op = TT__OP_ACTIVATION_BACKWARD;
            for (int sums = 0; sums < 2; sums++) {
                const int rows = sums ? MORE_ROWS : ROWS_;
                l.in[0] = some(dtype[t], rows, D, -3, 3, &s);
                l.in[1] = some(dtype[t], rows, D, -3, 3, &s);
                l.out[0] = some(dtype[t], rows, D, 0, 0, &s);
                if (sums) l.out[1] = some(dtype[t], 1, D, 0, 0, &s);
                same_on_both(&l, 8, "activation_backward");
            }
        }
        for (int op = 0; op < TT__COUNT(of_two); op++)
            for (int sums = 0; sums <= (of_two[op] == TT__OP_DROPOUT); sums++) {
                const int rows = sums ? MORE_ROWS : ROWS_;
                i = tt__new_instr(of_two[op]);
                i.attr.dropout = 0.3f;
                l.in[0] = some(dtype[t], rows, D, -3, 3, &s);
                l.in[1] = some(dtype[t], rows, D, -3, 3, &s);
                l.out[0] = some(dtype[t], rows, D, 0, 0, &s);
                if (sums) l.out[1] = some(dtype[t], 1, D, 0, 0, &s);
                same_on_both(&l, sums ? 8 : 1, tt__ops[i.op].name);
            }
    }
    for (int t = 0; t < TT__COUNT(pair); t++) {
        i = tt__new_instr(TT__OP_SCALE);
        i.attr.scale = 0.37f;
        l.in[0] = some(pair[t][0], ROWS_, D, -3, 3, &s);
        l.out[0] = some(pair[t][1], ROWS_, D, 0, 0, &s);
        same_on_both(&l, 1, "scale");
        i = tt__new_instr(TT__OP_EMBEDDING);
        l.in[0] = some_indices(index, ROWS_);
        l.in[1] = some(pair[t][0], ROWS_, D, -3, 3, &s);
        l.out[0] = some(pair[t][1], ROWS_, D, 0, 0, &s);
        same_on_both(&l, 1, "embedding");
    }
    for (int w = 0; w < TT__COUNT(width); w++)
        for (int t = 0; t < (width[w] <= 4096 ? TT__COUNT(norm) : 1); t++) {
            const tt_dtype x = norm[t][0], of_w = norm[t][1];
            i = tt__new_instr(TT__OP_LAYERNORM);
            i.attr.eps = 1e-5f;
            l.in[0] = some(x, ROWS_, width[w], -3, 3, &s);
            l.in[1] = some(of_w, 1, width[w], -1, 1, &s);
            l.in[2] = some(of_w, 1, width[w], -1, 1, &s);
            l.out[0] = some(x, ROWS_, width[w], 0, 0, &s);
            l.out[1] = some(TT_F32, ROWS_, 2, 0, 0, &s);
            same_on_both(&l, 16, "layernorm");
            i.op = TT__OP_LAYERNORM_BACKWARD;
            for (int sums = 0; sums < 2; sums++) { /* with them, adds to dx and to the sums */
                const int rows = sums ? MORE_ROWS : ROWS_;
                l.in[0] = some(x, rows, width[w], -3, 3, &s);
                l.in[1] = some(x, rows, width[w], -3, 3, &s);
                l.in[2] = some(of_w, 1, width[w], -1, 1, &s);
                l.in[3] = some(TT_F32, rows, 2, 0.1f, 0.5f, &s);
                l.out[0] = some(x, rows, width[w], -(float)sums, (float)sums, &s);
                l.out[1] = some(of_w, 1, width[w], 0, 0, &s);
                l.out[2] = some(of_w, 1, width[w], 0, 0, &s);
                if (sums) l.out[3] = some(x, 1, width[w], -1, 1, &s);
                l.add[0] = l.add[3] = sums;
                same_on_both(&l, 32, "layernorm_backward");
            }
            l.add[0] = l.add[3] = false;
        }
    for (int t = 0; t < TT__COUNT(norm); t++) {
        i = tt__new_instr(TT__OP_ADAM);
        i.attr.beta1 = 0.9f;
        i.attr.beta2 = 0.99f;
        i.attr.eps = 1e-8f;
        i.attr.weight_decay = 0.01f;
        i.attr.decoupled = true;
        l.in[0] = some(norm[t][0], ROWS_, 1000, -1, 1, &s);
        l.in[1] = some(TT_F32, 1, 2, 1, 1, &s);
        for (int k = 0; k < 3; k++) l.out[k] = some(norm[t][1], ROWS_, 1000, k == 2 ? 0.1f : -1, 1, &s);
        same_on_both(&l, 2, "adam");
    }
    setenv("TINYTRAIN_WGMMA", "0", 1);
    for (int h = 0; h < 2 * TT__COUNT(head); h++)
        for (int n = 0; n < (h % 2 || head[h / 2] > 64 ? 2 : 2 * TT__COUNT(sequences)); n++)
            attention_on_both(&l, dtype[1 + n % 2], head[h / 2], sequences[n / 2], h % 2, false, &s);
    for (int n = 0; n < TT__COUNT(sequences); n++)
        attention_on_both(&l, TT_BF16, 64, sequences[n], false, true, &s);
    unsetenv("TINYTRAIN_WGMMA");
    TEST_CLOSE(ctx, &a);
}

#else
TEST(cuda_kernels_of_each_dtype) { SKIP("this build is without TINYTRAIN_CUDA"); }
TEST(cuda_column_sums_of_attention) { SKIP("this build is without TINYTRAIN_CUDA"); }
TEST(cuda_dropout_kept_for_keys) { SKIP("this build is without TINYTRAIN_CUDA"); }
TEST(cuda_dropout_with_norms) { SKIP("this build is without TINYTRAIN_CUDA"); }
TEST(cuda_backward_by_warpgroups) { SKIP("this build is without TINYTRAIN_CUDA"); }
TEST(cuda_programs_with_dropout_and_norms) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif

/* fp8 by its definition: 3 or 2 bits of mantissa, exponents from -6 or -14 on, E4M3 up to 448, E5M2 up to
   57344. */
static double to_fp8(double x, bool e5m2)
{
    int e;
    if (x == 0) return 0;
    frexp(x, &e);
    double unit = ldexp(1, (e - 1 < (e5m2 ? -14 : -6) ? (e5m2 ? -14 : -6) : e - 1) - (e5m2 ? 2 : 3)),
           most = e5m2 ? 57344 : 448, y = nearbyint(x / unit) * unit;
    return y > most ? most : y < -most ? -most : y;
}

/* The number that fp8 stands for; NaN. */
static double from_fp8(uint8_t q, bool e5m2)
{
    const int bits = e5m2 ? 2 : 3, e = (q & 0x7f) >> bits, mantissa = q & ((1 << bits) - 1);
    const double sign = q & 0x80 ? -1 : 1, one = 1 << bits;
    if (e5m2 ? e == 31 : (q & 0x7f) == 0x7f) return NAN;
    return sign * ldexp((e ? one + mantissa : mantissa) / one, (e ? e : 1) - (e5m2 ? 15 : 7));
}

enum { FP8_ROWS = 144, FP8_COLS = 144, FP8_TENSORS = 3 };
typedef struct fp8_result {
    uint8_t q[FP8_ROWS * FP8_COLS], across[FP8_ROWS * FP8_COLS];
    float unscale, largest[FP8_TENSORS];
} fp8_result;

/* Runs QUANTIZE of x (rows, cols), row 1 of a history. history: NULL, or the largest known of each. */
static bool quantize_on(bool cuda, const tt__mat *x, bool e5m2, bool plain, bool turned, const float *history,
                        fp8_result *to)
{
    test_allocator a;
    tt_context_options co = test_options(&a);
    tt__instr i = tt__new_instr(TT__OP_QUANTIZE);
    tt__launch l;
    float rows[FP8_TENSORS * (1 + TT__FP8_STEPS)] = {0};
#ifdef TT_EMULATE
    if (cuda) emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
    tt_context *ctx = tt_open(&co);
    const tt_dtype dtype = e5m2 ? TT__E5M2 : TT__E4M3;
    const tt__mat q = {to->q, dtype, x->rows, x->cols, tt__ceil_div(x->cols, 16) * 16};
    const tt__mat across = {to->across, dtype, x->rows, x->cols, tt__ceil_div(x->rows, 16) * 16};
    const tt__mat unscale = {&to->unscale, TT_F32, 1, 1, 1};
    const tt__mat known = {&rows[1 + TT__FP8_STEPS], TT_F32, 1, 1 + TT__FP8_STEPS, 1 + TT__FP8_STEPS};
    const tt__mat largest = {&to->largest[1], TT_F32, 1, 1, 1};
    memset(&l, 0, sizeof l);
    l.device = (tt__device *)(void *)&ctx->cpu;
    l.instr = &i;
    l.in[0] = *x;
    if (plain) l.out[0] = q;
    if (turned) l.out[1] = across;
    l.out[2] = unscale;
    for (int k = 0; k < FP8_TENSORS && history; k++) rows[k * (1 + TT__FP8_STEPS)] = history[k];
    if (history) {
        l.in[1] = known;
        l.out[3] = largest;
        l.add[3] = true;
    }
    const bool ok = cuda ? run_on_cuda(&l, TT__CUDA_ALIGN) : ctx->cpu.isa->run[i.op](&l) == TT_OK;
    TEST_CLOSE(ctx, &a);
    return ok;
}

/* QUANTIZE by its definition on the CPU, and with the same bits on CUDA: odd sizes, one row, one column, both
   copies or one; scales from the tensor at hand, or from what a history knows, too large or too small; all
   zeros; what is not finite. */
TEST(quantize)
{
    static const int sizes[][2] = {{1, 1}, {1, 70}, {70, 1}, {16, 16}, {33, 80}, {129, 65}, {5, 144}};
    static const char *const values[] = {"numbers", "zeros", "an infinity", "NaN", "tiny numbers"};
    /* Of the tensor: nothing, a number below and one above the largest. */
    static const float known[] = {-1, 0, 0.5f, 300};
    static fp8_result got[2];
    static float wide[FP8_ROWS * FP8_COLS];
    static uint16_t half[FP8_ROWS * FP8_COLS];
    for (int c = 0; c < TT__COUNT(sizes) * TT__COUNT(values) * TT__COUNT(known) * 2; c++) {
        const int *size = sizes[c % TT__COUNT(sizes)], how = c / TT__COUNT(sizes) % TT__COUNT(values);
        const float history = known[c / (TT__COUNT(sizes) * TT__COUNT(values)) % TT__COUNT(known)];
        const bool e5m2 = c >= TT__COUNT(sizes) * TT__COUNT(values) * TT__COUNT(known);
        const int rows = size[0], cols = size[1], count = rows * cols, copies = c % 3; /* both, or one */
        const tt_dtype dtype = c % 5 == 0 ? TT_F32 : c % 2 ? TT_BF16 : TT_F16;
        const float histories[FP8_TENSORS] = {1e9f, history, 1e-9f};
        const double most = e5m2 ? 57344 : 448;
        uint64_t random = (uint64_t)c + 1;
        double largest = 0, scale = 1;
        int wrong = 0;
        for (int e = 0; e < count; e++) {
            float x = how == 1 ? 0 : (how == 4 ? 1e-5f : 3.0f) * ((float)test_random(&random) * 0x1p-31f - 1);
            if (how == 2 && e == count / 2) x = -INFINITY;
            if (how == 3 && e == count / 2) x = NAN;
            if (dtype != TT_F32) {
                tt__convert(&half[e], dtype, &x, TT_F32, 1);
                tt__convert(&x, TT_F32, &half[e], dtype, 1);
            }
            wide[e] = x;
            if (isnan(x) || fabs(x) > largest) largest = fabs(x);
        }
        const tt__mat x = {dtype == TT_F32 ? (void *)wide : (void *)half, dtype, rows, cols, cols};
        const bool with = history >= 0, delayed = history > 0;
        memset(got, 0x55, sizeof got);
        for (int k = 0; k < 2; k++) {
            for (int j = 0; j < FP8_TENSORS; j++) got[k].largest[j] = 0.25f;
            CHECK(k == 0 || has_isa("cuda") ? quantize_on(k == 1, &x, e5m2, copies != 1, copies != 2,
                                                     with ? histories : NULL, &got[k]) : true);
        }
        snprintf(where, sizeof where, "%d x %d %s of %s, %s, known %g", rows, cols, tt_dtype_name(dtype),
                 values[how], e5m2 ? "E5M2" : "E4M3", history);
        double by = delayed ? history : largest;
        if (!isfinite(by)) scale = NAN;
        else if (by == 0) scale = 0x1p100;
        else {
            while (by * scale * 2 <= most) scale *= 2;
            while (by * scale > most) scale /= 2;
        }
        if (delayed) scale /= 1 << TT__FP8_MARGIN;
        report(isnan(scale) ? isnan(got[0].unscale) : got[0].unscale == (float)(1 / scale),
               "1/scale is %g, not %g", got[0].unscale, 1 / scale);
        const int q_ld = (int)tt__ceil_div(cols, 16) * 16, across_ld = (int)tt__ceil_div(rows, 16) * 16;
        for (int r = 0; r < across_ld; r++)
            for (int k = 0; k < q_ld; k++) {
                const bool there = r < rows && k < cols;
                const double v = there ? wide[r * cols + k] : 0;
                const double is = !isfinite(v * scale) ? NAN : to_fp8(v * scale, e5m2);
                for (int m = 0; m < 2; m++) {
                    if (m ? k >= cols || copies == 2 : r >= rows || copies == 1) continue;
                    const uint8_t q = m ? got[0].across[k * across_ld + r] : got[0].q[r * q_ld + k];
                    const double number = from_fp8(q, e5m2);
                    wrong += isnan(is) ? !isnan(number) : number != is;
                }
            }
        report(wrong == 0, "%d numbers are not those of fp8", wrong);
        if (with)
            report(isnan(largest) ? isnan(got[0].largest[1])
                                  : got[0].largest[1] == (float)(largest > 0.25 ? largest : 0.25),
                   "the largest is %g, not %g", got[0].largest[1], largest);
        report(got[0].largest[0] == 0.25f && got[0].largest[2] == 0.25f, "another tensor's largest");
        if (has_isa("cuda")) {
            /* The bits of NaN are not the same. */
            const bool nan = isnan(got[0].unscale) || isnan(got[0].largest[1]);
            bool same = nan ? isnan(got[1].unscale) == isnan(got[0].unscale)
                            : memcmp(&got[0].unscale, &got[1].unscale, sizeof(float)) == 0;
            same = same && (nan || memcmp(got[0].largest, got[1].largest, sizeof got[0].largest) == 0);
            for (int k = 0; k < FP8_ROWS * FP8_COLS && same; k++)
                same = ((got[0].q[k] ^ got[1].q[k]) & 0x7f) == 0 &&
                       ((got[0].across[k] ^ got[1].across[k]) & 0x7f) == 0 &&
                       (got[0].q[k] == got[1].q[k] || (got[0].q[k] & 0x7f) == 0x7f);
            report(same, "CUDA's bits are others");
        }
    }
}

/* A spike enters the scale a step later, and leaves it after TT__FP8_STEPS steps; what is not finite is left
   out; each tensor has its own. */
TEST(history_of_fp8_scales)
{
    enum { TENSORS = 300, STEPS = 40, COLS = 1 + TT__FP8_STEPS };
    static float history[2][TENSORS * COLS];
    for (int cuda = 0; cuda <= has_isa("cuda"); cuda++) {
        int wrong = 0;
        memset(history[cuda], 0, sizeof history[cuda]);
        for (int step = 0; step < STEPS; step++) {
            test_allocator a;
            tt_context_options co = test_options(&a);
            tt__instr i = tt__new_instr(TT__OP_FP8_HISTORY);
            float largest[TENSORS];
            tt__launch l;
#ifdef TT_EMULATE
            if (cuda) emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
            tt_context *ctx = tt_open(&co);
            for (int k = 0; k < TENSORS; k++) largest[k] = (float)(1 + k);
            largest[7] = step == 3 ? 1000.0f : 1;       /* a spike */
            largest[8] = step == 3 ? INFINITY : step == 4 ? NAN : 2;
            largest[9] = step == 0 ? 5.0f : 0;          /* and then nothing */
            memset(&l, 0, sizeof l);
            l.device = (tt__device *)(void *)&ctx->cpu;
            l.instr = &i;
            const tt__mat of_step = {largest, TT_F32, 1, TENSORS, TENSORS};
            const tt__mat all = {history[cuda], TT_F32, TENSORS, COLS, COLS};
            l.out[0] = all;
            l.out[1] = of_step;
            CHECK(cuda ? run_on_cuda(&l, 0) : ctx->cpu.isa->run[i.op](&l) == TT_OK);
            for (int k = 0; k < TENSORS; k++) {
                const bool spike = step >= 3 && step < 3 + TT__FP8_STEPS, begun = step < TT__FP8_STEPS;
                const float known = k == 7 ? (spike ? 1000.0f : 1) : k == 8 ? 2 : k == 9 ? (begun ? 5.0f : 0)
                                                                             : (float)(1 + k);
                wrong += history[cuda][k * COLS] != known || largest[k] != 0;
            }
            TEST_CLOSE(ctx, &a);
        }
        report(wrong == 0, "%d entries of %s are wrong", wrong, cuda ? "CUDA" : "the CPU");
    }
    const bool same = memcmp(history[0], history[1], sizeof history[0]) == 0;
    report(!has_isa("cuda") || same, "CUDA's bits are others");
}

#ifdef TINYTRAIN_CUDA
/* Rounds v[n] to fp8, scaled by the largest power of two that keeps the largest of them in range; returns
   1 / scale. */
static double round_to_fp8(double *v, int n, bool e5m2)
{
    double most = 0, scale = 1;
    for (int k = 0; k < n; k++) if (fabs(v[k]) > most) most = fabs(v[k]);
    if (most == 0) return 1;
    while (most * scale * 2 <= (e5m2 ? 57344 : 448)) scale *= 2;
    while (most * scale > (e5m2 ? 57344 : 448)) scale /= 2;
    for (int k = 0; k < n; k++) v[k] = to_fp8(v[k] * scale, e5m2);
    return 1 / scale;
}

/* The exponent of x, or `least` where x is smaller: that of fp8's subnormal numbers. */
static int exponent_from(double x, int least)
{
    int e;
    frexp(x, &e);
    return e - 1 > least ? e - 1 : least;
}

/* The largest error of a sum of products a[i] b[i] of fp8 numbers on a tensor core of Hopper. An instruction
   adds 32 products and the sum so far. It shifts them to the largest of their exponents, where a product has
   the sum of its factors' exponents, cuts the bits beyond 13 behind the point, and cuts the new sum to 13
   bits behind the point as well (DeepSeek-V3, arXiv 2412.19437, section 3.3.2; Xie et al., MMA-Sim, arXiv
   2511.10909: FP8 of Hopper's WGMMA). So each number that is not a multiple of the last bit loses less than
   that bit. cuBLASLt may move the sum to an f32 register behind any instruction and begin at 0 again
   (CUBLASLT_MATMUL_DESC_FAST_ACCUM): the sum so far is that of any run of instructions that ends there. */
static double fp8_sum_error(const double *a, const double *b, int n, bool a_e5m2)
{
    enum { AT_ONCE = 32, BITS = 13, MOST_RUNS = 8 };
    double runs[MOST_RUNS] = {0}, reach = 0, error = 0; /* exact sums of the runs, by their beginning */
    for (int from = 0; from < n; from += AT_ONCE) {
        const int end = from + AT_ONCE < n ? from + AT_ONCE : n;
        int exponent = reach > 0 ? exponent_from(reach, -126) : -126, lose = reach > 0;
        double sum = 0;
        for (int k = from; k < end; k++) {
            const int e = exponent_from(a[k], a_e5m2 ? -14 : -6) + exponent_from(b[k], -6);
            if (a[k] != 0 && b[k] != 0 && e > exponent) exponent = e;
            sum += a[k] * b[k];
        }
        for (int k = from; k < end; k++) lose += fmod(a[k] * b[k], ldexp(1, exponent - BITS)) != 0;
        error += lose * ldexp(1, exponent - BITS);
        reach = 0;
        for (int r = 0; r <= from / AT_ONCE; r++) {
            runs[r] += sum;
            if (fabs(runs[r]) > reach) reach = fabs(runs[r]);
        }
        reach += error;
        if (reach > 0) error += ldexp(1, exponent_from(reach, -126) - BITS);
    }
    return error;
}

static bool is_hopper(tt_context *ctx)
{
    char text[4096];
    return tt_device_text(ctx, "cuda", text, sizeof text) == TT_OK &&
           strstr(text, ", compute capability 9.0, ");
}

/* Forward, gradient of x and gradient of w of a linear layer (rows, IN) -> (rows, OUT), all of which are
   products (m, n) of (m, k) and (n, k). */
TEST(matmul_in_fp8)
{
    enum { FEW = 33, MANY = 141, WIDE = 80, ANY = 70, MOST = MANY * WIDE };
    static fp8_result factor[2];
    static const char *const names[] = {"linear", "linear_dx", "linear_dw"};
    static uint16_t operand[2][MOST];
    static double exact[2][MOST], low[2][MOST];
    static float got[MOST], bias[WIDE];
    for (int c = 0; c < 3 * 2 * 6; c++) { /* which product, dtype, values */
        /* 0 plain, 1 tiny gradients, 2 all of A zero, 3 one of A infinite; 4: as 0, without cuBLASLt, which
           refuses lines that do not begin at multiples of 16 bytes; 5: as 0, of more than the 128 rows up to
           which each number of rows has an algorithm of its own */
        const int which = c % 3, values = c / 6 < 4 ? c / 6 : 0;
        const bool refused = c / 6 == 4;
        const int count = c / 6 == 5 ? MANY : FEW;
        const tt_dtype half = c / 3 % 2 ? TT_F16 : TT_BF16;
        const int op[] = {TT__OP_LINEAR, TT__OP_LINEAR_DX, TT__OP_LINEAR_DW}, out = which == 1 ? ANY : WIDE,
                  in = which ? WIDE : ANY;
        const int rows[2] = {count, which == 2 ? count : out}, cols[2] = {which ? out : in, in};
        const int m = which == 2 ? out : count, n = which == 0 ? out : in,
                  k = which == 0 ? in
                      : which == 1 ? out
                      : count;
        uint64_t s = (uint64_t)c + 1;
        double unscale = 1, loosest = 0;
        int wrong = 0, same = 0, coarse = 0;
        for (int o = 0; o < 2; o++) {
            float size = o ? 0.02f
                         : values == 1 && which ? (half == TT_F16 ? 1e-3f : 1e-9f)
                         : values == 2 ? 0.0f
                         : 3.0f;
            for (int e = 0; e < rows[o] * cols[o]; e++) {
                float x = size * ((float)test_random(&s) * 0x1p-31f - 1);
                if (values == 3 && o == 0 && e == 5) x = INFINITY;
                tt__convert(&operand[o][e], half, &x, TT_F32, 1);
                tt__convert(&x, TT_F32, &operand[o][e], half, 1);
                exact[o][e] = low[o][e] = x;
            }
            unscale *= round_to_fp8(low[o], rows[o] * cols[o], which && o == 0);
        }
        for (int e = 0; e < WIDE; e++) bias[e] = (float)(test_random(&s) % 16) / 8; /* bf16 has these */
        test_allocator a;
        tt_context_options co = test_options(&a);
        tt_context *ctx = tt_open(&co);
        tt__instr i = tt__new_instr(op[which]);
        tt__launch l;
        memset(&l, 0, sizeof l);
        memset(got, 0, sizeof got);
        l.device = (tt__device *)(void *)&ctx->cpu;
        l.instr = &i;
        tt__mat x = {operand[0], half, rows[0], cols[0], cols[0]},
                y = {operand[1], half, rows[1], cols[1], cols[1]};
        tt__mat b = {bias, TT_F32, 1, n, n}, to = {got, TT_F32, m, n, n};
        const tt__mat *factors[2] = {&x, &y};
        for (int o = 0; o < 2; o++) {
            const bool turned = which == 2 || (which == 1 && o == 1);
            const tt__mat *f = factors[o];
            uint8_t *lines = turned ? factor[o].across : factor[o].q;
            const int64_t ld = tt__ceil_div(turned ? f->rows : f->cols, 16) * 16;
            const int64_t apart = refused ? ld + 8 : ld;
            const tt_dtype dtype = which && o == 0 ? TT__E5M2 : TT__E4M3;
            const tt__mat q = {lines, dtype, f->rows, f->cols, apart};
            const tt__mat of_scale = {&factor[o].unscale, TT_F32, 1, 1, 1};
            CHECK(quantize_on(true, f, which && o == 0, !turned, turned, NULL, &factor[o]));
            for (int64_t r = turned ? f->cols : f->rows; r-- > 0 && refused;)
                memmove(lines + r * apart, lines + r * ld, (size_t)ld);
            l.in[o] = q;
            l.in[TT__UNSCALE_IN + o] = of_scale;
        }
#ifdef TT_EMULATE
        emu_configure(1, (size_t)64 << 20, 1, (uint64_t)c);
#endif
        if (which == 0) l.in[2] = b;
        l.out[0] = to;
        CHECK(run_on_cuda(&l, TT__CUDA_ALIGN));
#ifdef TT_EMULATE
        CHECK(emu_get_counts().fp8 == !refused);
#endif
        snprintf(where, sizeof where, "%s, %s, values %d", names[which], tt_dtype_name(half), c / 6);
        for (int r = 0; r < m; r++)
            for (int j = 0; j < n; j++) {
                double sum = 0, terms = 0, other = 0, from_a[MANY], from_b[MANY];
                for (int e = 0; e < k; e++) {
                    int at = which == 2 ? e * cols[0] + r : r * cols[0] + e,
                        bt = which == 0 ? j * cols[1] + e : e * cols[1] + j;
                    from_a[e] = low[0][at];
                    from_b[e] = low[1][bt];
                    sum += from_a[e] * from_b[e] * unscale;
                    terms += fabs(from_a[e] * from_b[e] * unscale);
                    other += exact[0][at] * exact[1][bt];
                }
                const double of_cores = refused || values == 3 ? 0
                    : fp8_sum_error(from_a, from_b, k, which != 0) * unscale;
                if (which == 0) { sum += bias[j]; other += bias[j]; }
                const double error = fabs(got[r * n + j] - sum), of_f32 = 1e-6 * terms + 1e-7 * fabs(sum);
                wrong += values == 3 ? isfinite(got[r * n + j]) : !(error <= of_cores + of_f32);
                coarse += error > of_f32;
                same += fabs(got[r * n + j] - other) <= 1e-6 * terms;
                if (terms > 0 && of_cores / terms > loosest) loosest = of_cores / terms;
            }
        report(wrong == 0, "%d of %d numbers are not those of fp8", wrong, m * n);
        report(loosest < 0x1p-9, "the error that is allowed is %.3g of the sum of all |a b|", loosest);
        report(refused || values > 1 || coarse > 0 || !is_hopper(ctx), "a tensor core is not so exact");
        report(values > 1 || same < m * n / 10, "%d of %d numbers are those of 16 bits", same, m * n);
        TEST_CLOSE(ctx, &a);
    }
}
#else
TEST(matmul_in_fp8) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif

/* A model some of whose products have widths for fp8, some not: trains as with bf16. Where fp8 cannot be had,
   that is said. */
TEST(training_in_fp8)
{
    static const struct { const char *device, *precision, *error; } refused[] = {
        {"cpu", "bf16-mixed", "matmul 'fp8' is for device 'cuda', and the device is 'cpu'"},
        {"cuda", "32-true", "matmul 'fp8' rounds 16-bit operands, of which precision '32-true' has none"},
    };
    tt_compile_options o = tt_compile_options_default();
    model m;
    o.matmul = "fp8";
    model_open(&m, 1, 0);
    for (int k = 0; k < TT__COUNT(refused); k++) {
        o.device = refused[k].device;
        o.precision = refused[k].precision;
        CHECK(tt_compile(m.t, m.loss, &o) == NULL);
        CHECK_ERROR(m.ctx, TT_ERR_UNSUPPORTED, refused[k].error);
    }
    model_close(&m);
#ifdef TINYTRAIN_CUDA
    enum { STEPS = 8 };
    double loss[2][STEPS];
    for (int fp8 = 0; fp8 < 2; fp8++) {
#ifdef TT_EMULATE
        emu_configure(1, (size_t)64 << 20, 1, 7);
#endif
        model_open(&m, 1, 0.1f);
        o.device = "cuda";
        o.precision = "bf16-mixed";
        o.matmul = fp8 ? "fp8" : "fp32";
        tt_program *p = tt_compile(m.t, m.loss, &o);
        for (int step = 0; CHECK(p != NULL) && step < STEPS; step++) {
            tt_stats stats;
            batch b = make_batch(6, 12, 3);
            CHECK(model_set(&m, p, &b) && tt_step(p, 0.003f, &stats) == TT_OK);
            loss[fp8][step] = stats.loss;
        }
        tt_program_free(p);
        model_close(&m);
#ifdef TT_EMULATE
        /* Up forward, down backward (x and w), of two layers, in a step that is run and one that is
           captured. */
        CHECK(emu_get_counts().fp8 == (fp8 ? 12 : 0));
#endif
    }
    int same = 0;
    for (int step = 0; step < STEPS; step++) {
        CHECK_NEAR(loss[1][step], loss[0][step], 0.05);
        same += loss[1][step] == loss[0][step];
    }
    CHECK(same == 0 && loss[1][STEPS - 1] < 0.5 * loss[1][0]);
#endif
}
#ifdef TINYTRAIN_CUDA
/* On a device, parameters that no file fills are made there, in their dtype, without a copy; with the CPU's
   bits on the emulator, and on a GPU as near to them as its logarithm and sine are. */
TEST(parameters_begin_on_the_device)
{
    enum { LARGE = 33 * 1031 };
    static const char *const precision[] = {"32-true", "bf16-true", "16-true"};
    /* Of a number: a unit in the last place or two. */
    static const double near[] = {0x1p-22, 0x1p-7, 0x1p-10};
    float *expected = (float *)malloc(sizeof(float) * LARGE), *got = (float *)malloc(sizeof(float) * LARGE);
    setenv("TINYTRAIN_WGMMA", "0", 1); /* a device that is opened is not asked for wgmma by a launch */
    for (int how = 0; how < TT__COUNT(precision); how++)
        for (int kind = 0; kind <= TT_INIT_UNIFORM; kind++)
            for (int large = 0; large < 2; large++) {
                test_allocator a;
                tt_context_options co = test_options(&a);
#ifdef TT_EMULATE
                emu_configure(1, (size_t)64 << 20, 1, (uint64_t)kind);
#endif
                co.seed = 3;
                tt_context *ctx = tt_open(&co);
                tt_tape *t = tt_tape_new(ctx);
                int64_t dims[2] = {large ? 33 : 1, large ? 1031 : 7}, n = dims[0] * dims[1];
                tt_init init = {(tt_init_kind)kind, 0.3f};
                tt_dtype dtype = how == 0 ? TT_F32 : how == 1 ? TT_BF16 : TT_F16;
                tt_param *w = tt_param_new(ctx, "w", 2, dims, init);
                tt_value out = tt_linear(t, tt_input(t, "x", TT_F32, 1, dims[1]), w, NULL);
                tt_compile_options o = tt_compile_options_default();
                int wrong = 0;
                o.device = "cuda";
                o.train = false;
                o.precision = precision[how];
                CHECK(tt_param_get(w, expected) == TT_OK); /* from the initialiser */
                tt_program *p = tt_compile(t, out, &o);
                if (CHECK(p != NULL)) {
#ifdef TT_EMULATE
                    emu_reset_counts();
#endif
                    CHECK(tt_allocate(p) == TT_OK && tt__param_home(w)->dtype == dtype);
#ifdef TT_EMULATE
                    CHECK(emu_get_counts().copies == 0 && emu_get_counts().launches == 1);
#endif
                    CHECK(tt_param_get(w, got) == TT_OK);
                    for (int64_t k = 0; k < n; k++) {
                        uint16_t h[2];
                        if (dtype != TT_F32) {
                            tt__convert(h, dtype, &expected[k], TT_F32, 1);
                            tt__convert(&expected[k], TT_F32, h, dtype, 1);
                        }
#ifdef TT_EMULATE
                        wrong += memcmp(&got[k], &expected[k], sizeof(float)) != 0;
#endif
                        wrong += !(fabs((double)got[k] - expected[k]) <=
                                   near[how] * fabs((double)expected[k]));
                    }
                    CHECK(wrong == 0);
                    /* In memory that ends behind the last of them. */
                    const tt__backend *b = w->holder->kind->backend;
                    tt__device *d = w->holder->crew->device[0];
                    void *exact = b->allocate(d, (size_t)n * tt_dtype_bytes(dtype));
                    CHECK(exact && b->init(d, exact, dtype, 0, n, init, 1) == TT_OK && b->wait(d) == TT_OK);
                    b->release(d, exact);
                }
                tt_program_free(p);
                tt_tape_free(t);
                TEST_CLOSE(ctx, &a);
            }
    unsetenv("TINYTRAIN_WGMMA");
    free(expected);
    free(got);
}
#else
TEST(parameters_begin_on_the_device) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif

/* Inputs that the program does not need may be set: they must not disturb those that it does. */
TEST(unused_inputs)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int64_t dims[2] = {2, 3};
    tt_init ones = {TT_INIT_ONES, 0};
    tt_param *w = tt_param_new(ctx, "w", 2, dims, ones);
    tt_tape *t = tt_tape_new(ctx);
    int64_t rows = tt_axis(t, "rows", 5);
    tt_value x = tt_input(t, "x", TT_F32, rows, 3), y = tt_input(t, "y", TT_I32, rows, 1),
             unused = tt_input(t, "unused", TT_F32, 1000, 64);
    tt_value logits = tt_linear(t, x, w, NULL);
    tt_cross_entropy(t, logits, y, NULL);
    tt_compile_options o = tt_compile_options_default();
    float in[6] = {1, 2, 3, 4, 5, 6}, out[4], *big = (float *)calloc(64000, sizeof(float));
    int32_t labels[2] = {1, 0};
    o.train = false;
    tt_program *p = tt_compile(t, logits, &o);
    if (CHECK(p != NULL)) {
        CHECK(tt_set(p, x, in, 2) == TT_OK && tt_set(p, y, labels, 2) == TT_OK &&
              tt_set(p, unused, big, 1000) == TT_OK);
        CHECK(tt_run(p, NULL) == TT_OK && tt_get(p, logits, out, 4) == TT_OK);
        CHECK(out[0] == 6 && out[1] == 6 && out[2] == 15 && out[3] == 15);
    }
    free(big);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* What tt_device_text says of GPUs; on emulated ones also why there is none to be used. */
TEST(device_described_cuda)
{
#ifdef TINYTRAIN_CUDA
    test_allocator a;
    char text[8192];
#ifdef TT_EMULATE
    emu_configure(3, (size_t)64 << 20, 1, 1);
#endif
    tt_context *ctx = test_open(&a);
    REQUIRE(ctx != NULL);
    tt_status status = tt_device_text(ctx, "cuda", text, sizeof text);
    if (!CHECK(status == TT_OK)) printf("%s%s\n", text, tt_error(ctx));
    CHECK(strstr(text, "driver: for CUDA up to ") && strstr(text, "cuBLASLt ") &&
          strstr(text, "\ndevice 0: ") && strstr(text, "\nused: device 0"));
    CHECK(tt_device_text(ctx, "cuda", text, 10) == TT_OK && strlen(text) == 9);
    TEST_CLOSE(ctx, &a);
#ifdef TT_EMULATE
    static const struct { int error; const char *part; } reasons[] = {
        {35, "the driver is for CUDA 13.0, which is too old for this build with CUDA 13.0"},
        {35, "there is no NVIDIA driver: install one for CUDA "},
        {209, "emulated device has compute capability 9.0, and the kernels were built for 9.0: build them "
              "with CUDA_ARCHS=90"},
        {2, "cudaStreamCreate: out of memory (cudaErrorMemoryAllocation)"}};
    for (int peers = 0; peers < 2; peers++) {
        emu_configure(2, (size_t)64 << 20, peers, 1);
        ctx = test_open(&a);
        CHECK(tt_device_text(ctx, "cuda", text, sizeof text) == TT_OK &&
              strstr(text, "\ndevice 1: emulated device, compute capability 9.0, 0.1 GB"));
        CHECK(strstr(text, peers ? "\npeers:   0   1\n     0   - yes\n     1 yes   -\n"
                                 : "\npeers:   0   1\n     0   -  no\n     1  no   -\n"));
        TEST_CLOSE(ctx, &a);
    }
    for (int r = 0; r < TEST_COUNT(reasons); r++) {
        bool said = false;
        /* Each call of CUDA fails once, or all from there on. */
        for (long nth = 1, calls = 2; nth < calls; nth++) {
            for (int all = 0; all < 2; all++) {
                emu_configure(1, (size_t)64 << 20, 1, 1);
                ctx = test_open(&a);
                emu_inject_fault(nth, reasons[r].error, all ? 1000 : 1);
                status = tt_device_text(ctx, "cuda", text, sizeof text);
                CHECK(status == TT_OK || strstr(tt_error(ctx), "device 'cuda' cannot be opened: "));
                said = said || (status == TT_ERR_DEVICE && strstr(tt_error(ctx), reasons[r].part));
                calls = emu_api_calls() > calls ? emu_api_calls() : calls;
                emu_inject_fault(0, 0, 0);
                TEST_CLOSE(ctx, &a);
                CHECK(emu_live_objects(text, sizeof text) == 0);
            }
        }
        test__check(said, __FILE__, __LINE__, reasons[r].part);
    }
    emu_configure(0, 0, 0, 1);
    ctx = test_open(&a);
    CHECK(tt_device_text(ctx, "cuda", text, sizeof text) == TT_ERR_DEVICE && !strstr(text, "used: "));
    CHECK_ERROR(ctx, TT_ERR_DEVICE, "the driver finds no GPU");
    TEST_CLOSE(ctx, &a);
#endif
#else
    SKIP("this build is without TINYTRAIN_CUDA");
#endif
}

static const test_case tests[] = {
    TEST_CASE_IN_PARTS(reference_portable), TEST_CASE_IN_PARTS(reference_avx2),
    TEST_CASE_IN_PARTS(reference_avx512), TEST_CASE_IN_PARTS(reference_avx512_dot),
    TEST_CASE_IN_PARTS(reference_avx512_tiles), TEST_CASE_IN_PARTS(reference_neon),
    TEST_CASE_IN_PARTS(reference_neon_dot), TEST_CASE_IN_PARTS(reference_cuda),
    TEST_CASE_IN_PARTS(gradient_portable), TEST_CASE_IN_PARTS(gradient_avx2),
    TEST_CASE_IN_PARTS(gradient_avx512), TEST_CASE_IN_PARTS(gradient_avx512_dot),
    TEST_CASE_IN_PARTS(gradient_avx512_tiles), TEST_CASE_IN_PARTS(gradient_neon),
    TEST_CASE_IN_PARTS(gradient_neon_dot), TEST_CASE_IN_PARTS(gradient_cuda),
    TEST_CASE_IN_PARTS(attention_by_warpgroups), TEST_CASE(every_op_has_a_case),
    TEST_CASE(activations_far_from_zero),
    TEST_CASE(rotary_scaling),
    TEST_CASE(dropout_masks), TEST_CASE(same_bits_for_any_number_of_threads),
    TEST_CASE(precisions_train_alike), TEST_CASE(stochastic_rounding_is_unbiased),
    TEST_CASE(stochastic_rounding_of_each_isa), TEST_CASE(pieces_are_updated_as_the_whole),
    TEST_CASE(weights_narrowed_while_read),
    TEST_CASE(products_exact), TEST_CASE(attention_window_flops),
    TEST_CASE(attention_blocks_flops),
    TEST_CASE(attention_window_plan), TEST_CASE(swiglu_keeps_less),
    TEST_CASE(attention_by_dot), TEST_CASE(attention_by_tiles),
    TEST_CASE(mixed_precision_without_copies), TEST_CASE(f16_conversions), TEST_CASE(residual_stream_in_f32),
    TEST_CASE(micro_batches_equal_a_batch), TEST_CASE(ops_refuse_wrong_operands),
    TEST_CASE(bad_batches_change_nothing), TEST_CASE(numbers_that_are_not_finite),
    TEST_CASE(failed_micro_batch_ends_the_step), TEST_CASE(unused_inputs), TEST_CASE(cuda_epilogues),
    TEST_CASE(cuda_products_of_one_x), TEST_CASE(cuda_tensors_share_launches),
    TEST_CASE(cuda_kernels_of_each_dtype),
    TEST_CASE(cuda_column_sums_of_attention), TEST_CASE(cuda_dropout_kept_for_keys),
    TEST_CASE(cuda_dropout_with_norms), TEST_CASE(cuda_programs_with_dropout_and_norms),
    TEST_CASE(cuda_backward_by_warpgroups),
    TEST_CASE(biases_of_attention_cuda), TEST_CASE(matmul_in_tf32), TEST_CASE(quantize),
    TEST_CASE(history_of_fp8_scales), TEST_CASE(matmul_in_fp8), TEST_CASE(training_in_fp8),
    TEST_CASE(parameters_begin_on_the_device), TEST_CASE(device_described_cuda),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
