/* Norms: a plain loop in double precision for each op (eval_*), and a function that records the op. */
#pragma once

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
    const int cols = IN(1)->cols; /* number of columns that are normalised together */
    for (int r = 0; r < n->rows * n->cols / cols; r++) {
        const double *x = IN(0)->v + r * cols;
        double squares = 0;
        for (int c = 0; c < cols; c++) squares += x[c] * x[c] / cols;
        for (int c = 0; c < cols; c++) {
            n->v[r * cols + c] = x[c] / sqrt(squares + n->a) * (n->b + IN(1)->v[c]);
            note(n, n->v[r * cols + c]);
        }
    }
}

static int rmsnorm_offset(int x, int w, float offset, float eps)
{
    int at = new_node(eval_rmsnorm, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, w, 0);
    g->nodes[at].a = eps;
    g->nodes[at].b = offset;
    record(at, offset == 0 ? tt_rmsnorm(g->tape, g->nodes[x].t, g->nodes[w].param, eps)
                           : tt_rmsnorm_offset(g->tape, g->nodes[x].t, g->nodes[w].param, offset, eps));
    return at;
}

static int rmsnorm(int x, int w, float eps) { return rmsnorm_offset(x, w, 0, eps); }

TEST_PLAIN static void eval_softmax(node *n)
{
    for (int r = 0; r < n->rows; r++) {
        const double *x = IN(0)->v + r * n->cols;
        double max = x[0], sum = 0;
        for (int c = 1; c < n->cols; c++) max = x[c] > max ? x[c] : max;
        for (int c = 0; c < n->cols; c++) sum += exp(x[c] - max);
        for (int c = 0; c < n->cols; c++) n->v[r * n->cols + c] = exp(x[c] - max) / sum;
    }
    note(n, 1 + IN(0)->magnitude / 8);
}

static int softmax(int x)
{
    int at = new_node(eval_softmax, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, 0, 0);
    record(at, tt_softmax(g->tape, g->nodes[x].t));
    return at;
}

TEST_PLAIN static void eval_normalize(node *n)
{
    for (int r = 0; r < n->rows; r++) {
        const double *x = IN(0)->v + r * n->cols;
        double squares = 0;
        for (int c = 0; c < n->cols; c++) squares += x[c] * x[c];
        for (int c = 0; c < n->cols; c++) n->v[r * n->cols + c] = x[c] / fmax(sqrt(squares), n->a);
    }
    note(n, 1);
}

static int normalize(int x, float eps)
{
    int at = new_node(eval_normalize, g->nodes[x].kind, g->nodes[x].rows, g->nodes[x].cols, x, 0, 0);
    g->nodes[at].a = eps;
    record(at, tt_normalize(g->tape, g->nodes[x].t, eps));
    return at;
}
