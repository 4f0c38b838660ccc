/* Products: a plain loop in double precision for each op (eval_*), and a function that records the op. */
#pragma once

TEST_PLAIN static void eval_linear(node *n)
{
    const double *x = IN(0)->v, *w = IN(1)->v, *b = n->in[2] ? IN(2)->v : NULL;
    int depth = IN(0)->cols;
    for (int r = 0; r < n->rows; r++)
        for (int c = 0; c < n->cols; c++) {
            double sum = b ? b[c] : 0, size = fabs(sum), part[4] = {0, 0, 0, 0};
            if (g->differencing) { /* a faster loop, without the magnitude */
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

/* Records a linear layer of x whose weight, (out, width of x), is stored in few bits. The weight is frozen,
   so the node of the weight is no parameter of the net. */
static int linear_stored(int x, int out, int b, const char *format)
{
    const int cols = g->nodes[x].cols, w = leaf(CONSTANT, out, cols, sqrt(3.0 / cols));
    const int64_t dims[2] = {out, cols};
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    const size_t n = (size_t)(out * cols);
    char name[32];
    snprintf(name, sizeof name, "stored%d", w);
    tt_param *p = tt_param_new(g->ctx, name, 2, dims, zeros);
    tt_param_freeze(g->ctx, name, true);
    float *values = (float *)malloc(n * sizeof *values), *absmax = (float *)malloc(n * sizeof *absmax);
    for (size_t k = 0; k < n; k++) values[k] = (float)g->nodes[w].v[k];
    test__check(p && tt_param_store(p, format) == TT_OK && tt_param_set(p, values) == TT_OK, __FILE__,
                __LINE__, "cannot store a parameter");
    uint8_t *codes = (uint8_t *)malloc(tt__matrix_bytes(p->form, out, cols));
    const tt__coding coding = {p->form, out, cols, codes, absmax};
    for (int r = 0; r < out; r++) tt__encode_row(&coding, r, values + r * cols);
    tt__encode_end(&coding);
    const tt__codes coded = tt__codes_at(codes, p->form, out, cols);
    tt__widen_codes(values, &coded, 0, (int64_t)n);
    for (size_t k = 0; k < n; k++) g->nodes[w].v[k] = values[k];
    free(values);
    free(absmax);
    free(codes);
    int at = new_node(eval_linear, g->nodes[x].kind, g->nodes[x].rows, out, x, w, b);
    record(at, tt_linear(g->tape, g->nodes[x].t, p, g->nodes[b].param));
    return at;
}

/* Computes `a b^T`, or `a b` if n->flag. Columns of `a b^T` beyond the actual rows of b hold n->a. */
TEST_PLAIN static void eval_matmul(node *n)
{
    const node *a = IN(0), *b = IN(1);
    for (int r = 0; r < n->rows; r++)
        for (int c = 0; c < n->cols; c++) {
            double sum = 0, size = 0;
            const int depth = n->flag ? b->rows : a->cols;
            for (int k = 0; k < depth && (n->flag || c < b->rows); k++) {
                const double term = n->b * a->v[r * a->cols + k] *
                                    (n->flag ? b->v[k * b->cols + c] : b->v[c * b->cols + k]);
                sum += term;
                size += fabs(term);
            }
            n->v[r * n->cols + c] = n->flag || c < b->rows ? sum : n->a;
            note(n, size);
        }
}

/* Returns the number of columns of `a b^T`: b's number of rows or, if the rows are an axis, its capacity. */
static int capacity(const node *b) { return b->rows + (g->axes && b->kind ? 3 : 0); }

static int matmul_of(int a, int b, bool untransposed, float scale, float beyond)
{
    const node *x = &g->nodes[a], *w = &g->nodes[b];
    const int at = new_node(eval_matmul, x->kind, x->rows, untransposed ? w->cols : capacity(w), a, b, 0);
    tt_matmul_options o = tt_matmul_options_default();
    o.untransposed = untransposed;
    o.scale = scale;
    o.beyond = beyond;
    g->nodes[at].flag = untransposed;
    g->nodes[at].a = beyond;
    g->nodes[at].b = scale;
    record(at, tt_matmul(g->tape, g->nodes[a].t, g->nodes[b].t, &o));
    return at;
}

static int matmul(int a, int b) { return matmul_of(a, b, false, 1, 0.25f); }
