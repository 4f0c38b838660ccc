/* The base of all cases: sizes, precisions, a net that is both recorded and computed by plain loops, its
   inputs, and the random numbers of dropout. */
#pragma once

#define FORWARD_F32 2e-6
#define GRADIENT_F32 2e-5

/* A precision and the dtype of its residual stream. The last two rows of `precisions` differ from earlier
   rows only in the residual stream. Only half of the cases run these two rows (`halved`). */
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

/* Kinds of rows of a value: a fixed number, or an axis of the tape. */
enum { CONSTANT, ROWS, SEQS, PICKED, KINDS };

typedef struct size_set {
    const char *name;
    int heads, head_size, out, vocab, picked;
    int length[8];          /* lengths of the sequences, which sum to the number of rows */
    const char *only;       /* NULL, or a pattern of the cases that run this large size */
    bool half;              /* if `only`: also runs gradients in mixed precisions */
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
    {"whole_rows_of_1500", 1, 1500, 2, 2, 2, {3}, "softmax", false},
    {"whole_rows_of_1500", 1, 1500, 2, 2, 2, {3}, "normalize", false},
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

/* Value operands are inputs, parameters, or rows of parameters gathered on an axis. */
enum { AS_INPUT, AS_PARAM, AS_GATHERED, MODES };

typedef struct node {
    void (*eval)(struct node *n);
    int in[4], kind, rows, cols, depth;
    double *v, magnitude;   /* v: (rows, cols); magnitude: largest sum of absolute terms */
    int32_t *index;         /* indices of an index input; shape (rows) */
    uint8_t *bytes;         /* numbers of a u8 input; shape (rows, cols) */
    double a, b, alibi;     /* attributes of the op */
    int k, window;
    tt_attention_options blocks; /* options of block-sparse attention                                       */
    bool flag, loss, input, leaf, stale;
    uint32_t stream;        /* stream of random numbers                                                     */
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
    double upstream, gain; /* largest gradient into the case (0: unknown); product of the case's scales */
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
    int at = leaf(CONSTANT, rows, cols, scale);
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

/* Returns a random weight matrix, scaled so that a product has about the variance of its operand. */
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

/* Makes a value operand whose rows are of `kind`. */
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

static int starts(void) /* returns the input of the sequences' starts, which a net has once */
{
    int rows = g->count[SEQS] + 1;
    if (g->starts) return g->starts;
    g->starts = new_node(NULL, CONSTANT, rows, 1, 0, 0, 0);
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

/* Returns the words of Philox block {i, j, h, 0}. The last block is kept for repeated calls. */
TEST_PLAIN static const uint32_t *drawn(uint64_t key, uint32_t i, uint32_t j, uint32_t h)
{
    static uint32_t last[4], u[4];
    static uint64_t last_key;
    const uint32_t counter[4] = {i, j, h, 0};
    if (key != last_key || memcmp(counter, last, sizeof last) != 0) philox(7, counter, key, u);
    last_key = key;
    memcpy(last, counter, sizeof last);
    return u;
}

/* Returns the factor of element j of row i: 0, or `1 / (1 - p)`. The Philox block `{i, j / 8, 0, 0}` has
   eight 16-bit numbers, and number `j % 8` decides. */
TEST_PLAIN static double kept(uint64_t key, uint32_t i, uint32_t j, double p)
{
    const uint32_t threshold = (uint32_t)floor(65536 * p + 0.5);
    const uint32_t bits = drawn(key, i, j / 8, 0)[j % 8 / 2] >> (j % 2 * 16) & 0xffff;
    return bits >= threshold ? 65536.0 / (65536.0 - threshold) : 0;
}

/* Returns the factor of the attention weight of query i for key j of head h. p is rounded to steps of 1/256,
   at least one. The Philox block `{i, j / 16, h, 0}` of four words has an 8-bit number for each of 16 keys.
   Bits 0 to 3 of the number are bit `j % 16` of each word. Bits 4 to 7 are bit `16 + j % 16` of each word. */
TEST_PLAIN static double kept_weight(uint64_t key, uint32_t i, uint32_t j, uint32_t h, double p)
{
    const double threshold = fmax(1, floor(256 * p + 0.5));
    const uint32_t *u = drawn(key, i, j / 16, h);
    uint32_t number = 0;
    for (uint32_t bit = 0; bit < 8; bit++) number += (u[bit % 4] >> (j % 16 + (bit < 4 ? 0 : 16)) & 1) << bit;
    return number >= threshold ? 256 / (256 - threshold) : 0;
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
