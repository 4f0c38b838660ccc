/* Rows that are gathered, averaged, set, sliced and reshaped: a plain loop in double precision for each op
   (eval_*), and a function that records the op. */
#pragma once

TEST_PLAIN static void eval_rows(node *n) /* reads rows of in[0] at the indices in[1] */
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

TEST_PLAIN static void eval_mean_pool(node *n)
{
    const int32_t *start = g->nodes[g->starts].index;
    for (int s = 0; s < n->rows; s++)
        for (int c = 0; c < n->cols; c++) {
            double sum = 0;
            for (int r = start[s]; r < start[s + 1]; r++) sum += IN(0)->v[r * n->cols + c];
            n->v[s * n->cols + c] = n->flag ? sum : sum / (start[s + 1] - start[s]);
            if (n->flag) note(n, sum); /* a sum is larger than its terms */
        }
    note(n, IN(0)->magnitude);
}

static int sum_pool(int x)
{
    int from = starts(), at = new_node(eval_mean_pool, SEQS, g->count[SEQS], g->nodes[x].cols, x, 0, 0);
    g->nodes[at].flag = true;
    record(at, tt_sum_pool(g->tape, g->nodes[x].t, g->nodes[from].t));
    return at;
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

/* Reads patches of images of 2 x 3 patches, each of k x k pixels, one image per sequence. */
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
    int at = new_node(eval_reshape, axis ? g->nodes[x].kind : CONSTANT, rows, cols, x, 0, 0);
    g->nodes[at].depth--;
    g->nodes[at].t = tt_reshape(g->tape, g->nodes[x].t, code(g->nodes[at].kind, rows), cols);
    return at;
}

static int param_value(int w)
{
    int at = new_node(eval_reshape, CONSTANT, g->nodes[w].rows, g->nodes[w].cols, w, 0, 0);
    g->nodes[at].depth = 0;
    g->nodes[at].t = tt_param_value(g->tape, g->nodes[w].param);
    return at;
}
