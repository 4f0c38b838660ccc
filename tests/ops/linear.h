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
