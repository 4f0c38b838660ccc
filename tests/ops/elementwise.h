/* Ops on single elements: a plain loop in double precision for each op (eval_*), and a function that records
   the op. */
#pragma once

TEST_PLAIN static void eval_activation(node *n)
{
    if (!n->index) n->index = (int32_t *)calloc((size_t)(n->rows * n->cols), sizeof(int32_t));
    for (int k = 0; k < n->rows * n->cols; k++) {
        double x = IN(0)->v[k], y = 0;
        if (!g->differencing) n->index[k] = x > 0;
        if (n->k == TT__ACT_GELU) y = x / 2 * (1 + erf(x / sqrt(2.0)));
        if (n->k == TT__ACT_GELU_TANH)
            y = x / 2 * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
        /* Finite differences must not cross the kink of ReLU. */
        if (n->k == TT__ACT_RELU) y = (g->differencing ? n->index[k] : x > 0) ? x : 0;
        if (n->k == TT__ACT_TANH) y = tanh(x);
        if (n->k == TT__ACT_SILU) y = x / (1 + exp(-x));
        if (n->k == TT__ACT_SIGMOID) y = 1 / (1 + exp(-x));
        n->v[k] = y;
        note(n, n->k == TT__ACT_TANH || n->k == TT__ACT_SIGMOID ? 1 : x);
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
static int sigmoid(int x) { return activation(x, TT__ACT_SIGMOID, tt_sigmoid(g->tape, g->nodes[x].t)); }
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
    const node *b = IN(1);
    for (int k = 0; k < n->rows * n->cols; k++) {
        const int r = b->rows == 1 ? 0 : k / n->cols, c = b->cols == 1 ? 0 : k % n->cols;
        n->v[k] = IN(0)->v[k] * b->v[r * b->cols + c];
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

static int cast(int x) /* only passes record a cast */
{
    int at = new_node(eval_scale, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, 0, 0);
    tt__instr i = tt__new_instr(TT__OP_CAST);
    g->nodes[at].a = 1;
    record(at, tt__record(g->tape, i, "v", g->nodes[x].t));
    return at;
}

/* Rounds a weight to few bits. Around the weight the gradient passes straight through: finite differences see
   the weight plus a constant, the difference between rounded and unrounded weight. Steps are floats, as in
   kernels, so that numbers halfway between two steps are rounded alike. */
TEST_PLAIN static void eval_rounded(node *n)
{
    const int count = n->rows * n->cols, kind = n->k;
    if (!n->bytes) n->bytes = (uint8_t *)calloc((size_t)count, sizeof(double));
    double *apart = (double *)(void *)n->bytes, mean = 0;
    for (int k = 0; k < count; k++) mean += fabs(IN(0)->v[k]) / count;
    for (int k = 0; k < count; k++) {
        const double w = IN(0)->v[k], *row = IN(0)->v + k / n->cols * n->cols;
        double sum = 0, max = 0;
        for (int c = 0; c < n->cols; c++) sum += fabs(row[c]) / n->cols, max = fmax(max, fabs(row[c]));
        const float step = (float)(kind == TT_ROUND_INT8 ? max / 127 : kind == TT_ROUND_BINARY ? sum
                                   : fmax(mean, 1e-5));
        const float steps = rintf((float)w * (step > 0 ? 1 / step : 0));
        const double most = kind == TT_ROUND_INT8 ? 127 : 1;
        const double y = kind == TT_ROUND_BINARY ? (w < 0 ? -step : step)
                                                 : fmax(-most, fmin(steps, most)) * (double)step;
        if (!g->differencing) apart[k] = y - w;
        n->v[k] = w + apart[k];
        note(n, y);
    }
}

static int rounded(int w, int kind)
{
    int at = new_node(eval_rounded, CONSTANT, g->nodes[w].rows, g->nodes[w].cols, w, 0, 0);
    tt__instr i = tt__new_instr(TT__OP_ROUND);
    i.attr.rounding = g->nodes[at].k = kind;
    record(at, tt__record(g->tape, i, "p", g->nodes[w].param));
    return at;
}

TEST_PLAIN static void eval_dropout(node *n)
{
    uint64_t key = node_key(n);
    for (int r = 0; r < n->rows; r++)
        for (int c = 0; c < n->cols; c++) {
            n->v[r * n->cols + c] = IN(0)->v[r * n->cols + c] *
                                    (g->train && n->a > 0 ? kept(key, (uint32_t)r, (uint32_t)c, n->a) : 1);
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
