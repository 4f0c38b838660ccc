/* Losses: a plain loop in double precision for each op (eval_*), and a function that records the op. */
#pragma once

TEST_PLAIN static void eval_cross_entropy(node *n)
{
    int classes = IN(0)->cols;
    double loss = 0, total = 0;
    for (int r = 0; r < IN(0)->rows; r++) {
        const double *x = IN(0)->v + r * classes;
        double max = x[0], sum = 0;
        int target = IN(1)->index[r];
        if (target == n->k) continue;
        double w = n->flag ? IN(2)->v[target] : n->in[2] ? IN(2)->v[r] : 1;
        for (int c = 0; c < classes; c++) max = x[c] > max ? x[c] : max;
        for (int c = 0; c < classes; c++) sum += exp(x[c] - max);
        loss += w * (1 - n->a) * (max + log(sum) - x[target]);
        for (int c = 0; c < classes; c++)
            loss += (n->flag ? IN(2)->v[c] : w) * n->a / classes * (max + log(sum) - x[c]);
        total += w;
        note(n, fabs(max) + log(sum) + fabs(x[target]));
    }
    n->v[0] = loss / total;
}

/* Records a cross entropy with targets below the number of classes. ignored: every third target is ignored,
   but not the first. weighted: by row or by class. */
enum { UNWEIGHTED, BY_ROW, BY_CLASS };
static int cross_entropy(int logits, bool ignored, float smoothing, int weighted)
{
    node *x = &g->nodes[logits];
    const int classes = x->eval == eval_matmul ? g->nodes[x->in[1]].rows : x->cols;
    int targets = new_index(x->kind, x->rows, classes),
        weights = weighted == BY_CLASS ? input(CONSTANT, 1, x->cols, 1)
                  : weighted ? input(x->kind, x->rows, 1, 1) : 0;
    tt_cross_entropy_options o = tt_cross_entropy_options_default();
    if (ignored) o.ignore_index = -7;
    for (int r = 2; r < x->rows && ignored; r += 3) g->nodes[targets].index[r] = -7;
    for (int r = 0; r < g->nodes[weights].rows * g->nodes[weights].cols && weighted; r++)
        g->nodes[weights].v[r] = (double)(float)fabs(g->nodes[weights].v[r]) +
                                 0.125 * (r == 0 || weighted == BY_CLASS);
    int at = new_node(eval_cross_entropy, CONSTANT, 1, 1, logits, targets, weights);
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

TEST_PLAIN static void eval_token_losses(node *n)
{
    const int classes = IN(0)->cols;
    for (int r = 0; r < n->rows; r++) {
        const double *x = IN(0)->v + r * classes;
        double max = x[0], sum = 0;
        const int target = IN(1)->index[r];
        n->v[r] = 0;
        if (target == -100) continue;
        for (int c = 0; c < classes; c++) max = x[c] > max ? x[c] : max;
        for (int c = 0; c < classes; c++) sum += exp(x[c] - max);
        n->v[r] = max + log(sum) - x[target];
        note(n, fabs(max) + log(sum) + fabs(x[target]));
    }
}

/* Records the losses of rows. ignored: every third target is ignored, but not the first. */
static int token_losses(int logits, bool ignored)
{
    const node *x = &g->nodes[logits];
    const int rows = x->rows, targets = new_index(x->kind, rows, x->cols);
    for (int r = 2; r < rows && ignored; r += 3) g->nodes[targets].index[r] = -100;
    const int at = new_node(eval_token_losses, g->nodes[logits].kind, rows, 1, logits, targets, 0);
    record(at, tt_token_losses(g->tape, g->nodes[logits].t, g->nodes[targets].t));
    return at;
}

TEST_PLAIN static void eval_soft_cross_entropy(node *n)
{
    const int classes = IN(0)->cols;
    double loss = 0, total = 0;
    for (int r = 0; r < IN(0)->rows; r++) {
        const double *x = IN(0)->v + r * classes, *p = IN(1)->v + r * classes, w = n->in[2] ? IN(2)->v[r] : 1;
        double max = x[0], sum = 0;
        for (int c = 1; c < classes; c++) max = x[c] > max ? x[c] : max;
        for (int c = 0; c < classes; c++) sum += exp(x[c] - max);
        for (int c = 0; c < classes; c++) {
            const double term = p[c] * (max + log(sum) - x[c]);
            loss += w * term;
            note(n, fabs(p[c]) * (fabs(max) + log(sum) + fabs(x[c])));
        }
        total += w;
    }
    n->v[0] = loss / total;
    note(n, n->v[0]); /* with many classes the loss is larger than each term, so the loss counts as a term */
}

/* Records a soft cross entropy. Some targets are 0, and a row's targets do not sum to 1. */
static int soft_cross_entropy(int logits, bool weighted)
{
    node *x = &g->nodes[logits];
    const int kind = x->kind, rows = x->rows, cols = x->cols;
    const int targets = input(kind, rows, cols, 1), weights = weighted ? input(kind, rows, 1, 1) : 0;
    for (int k = 0; k < rows * cols; k++)
        g->nodes[targets].v[k] = k % 3 == 1 ? 0 : (double)(float)fabs(g->nodes[targets].v[k]);
    for (int r = 0; r < rows && weighted; r++)
        g->nodes[weights].v[r] = (double)(float)fabs(g->nodes[weights].v[r]) + 0.125 * (r == 0);
    const int at = new_node(eval_soft_cross_entropy, CONSTANT, 1, 1, logits, targets, weights);
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
    int at = new_node(eval_squared_error, CONSTANT, 1, 1, x, target, weights);
    g->nodes[at].loss = true;
    record(at, tt_mean_squared_error(g->tape, g->nodes[x].t, g->nodes[target].t, g->nodes[weights].t));
    return at;
}

TEST_PLAIN static void eval_sigmoid_cross_entropy(node *n)
{
    const int cols = IN(0)->cols;
    double loss = 0, total = 0;
    for (int r = 0; r < IN(0)->rows; r++) {
        const double w = n->in[2] ? IN(2)->v[r] : 1;
        double sum = 0;
        for (int c = 0; c < cols; c++) {
            const double x = IN(0)->v[r * cols + c], target = IN(1)->v[r * cols + c];
            const double p = n->in[3] ? IN(3)->v[c] : 1;
            const double above = x > 0 ? x + log1p(exp(-x)) : log1p(exp(x)); /* log(1 + e^x) */
            sum += p * target * (above - x) + (1 - target) * above;
            note(n, (p * fabs(target) + fabs(1 - target)) * (fabs(x) + 1));
        }
        loss += w * sum / cols;
        total += w;
    }
    n->v[0] = loss / total;
}

/* Records a cross entropy of sigmoids. Targets are 0, 1 and numbers between. */
static int sigmoid_cross_entropy(int logits, bool weighted, bool positive)
{
    node *x = &g->nodes[logits];
    const int kind = x->kind, rows = x->rows, cols = x->cols;
    const int targets = input(kind, rows, cols, 1), weights = weighted ? input(kind, rows, 1, 1) : 0;
    const int labels = positive ? input(CONSTANT, 1, cols, 1) : 0;
    tt_sigmoid_cross_entropy_options o = tt_sigmoid_cross_entropy_options_default();
    for (int k = 0; k < rows * cols; k++)
        g->nodes[targets].v[k] = k % 3 == 1 ? 0 : k % 3 ? 1 : (double)(float)fabs(g->nodes[targets].v[k]);
    for (int r = 0; r < rows && weighted; r++) /* rows 2, 5, 8 and so on have weight 0 */
        g->nodes[weights].v[r] = r % 3 == 2 ? 0 : (double)(float)fabs(g->nodes[weights].v[r]) + 0.125 * !r;
    for (int c = 0; c < cols && positive; c++)
        g->nodes[labels].v[c] = (double)(float)(3 * fabs(g->nodes[labels].v[c]));
    const int at = new_node(eval_sigmoid_cross_entropy, CONSTANT, 1, 1, logits, targets, weights);
    g->nodes[at].in[3] = labels;
    g->nodes[at].loss = true;
    o.weights = g->nodes[weights].t;
    o.positive_weights = g->nodes[labels].t;
    record(at, tt_sigmoid_cross_entropy(g->tape, g->nodes[logits].t, g->nodes[targets].t, &o));
    return at;
}
