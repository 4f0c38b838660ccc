/* Attention and rotary embeddings: a plain loop in double precision for each op (eval_*), and a function that
   records the op. */
#pragma once

/* Rotates pairs of columns as complex numbers. n->k: number of rotated columns, rounded up to even; n->a: 1
   for pairs of neighbours. */
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

/* Rotates x by positions below 20. Rotates `columns` columns of each head. If `columns` is 0 or a head has no
   more columns, rotates all columns, but at most 512. */
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

/* Returns the slope of a head as transformers' build_alibi_tensor computes it. */
static double alibi_slope(int head, int heads)
{
    const int power = (int)exp2(floor(log2(heads)));
    if (head < power) return pow(exp2(-exp2(-(log2(power) - 3))), head + 1);
    return pow(exp2(-exp2(-(log2(2 * power) - 3))), 2 * (head - power) + 1);
}

static double in_bf16(double x) { return tt__from_bf16(tt__to_bf16((float)x)); }

/* Returns how often row i of a sequence sees row j under block-sparse attention, whose lists may overlap. */
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
    int key_width = IN(1)->cols, group = width / key_width; /* heads of q per head of k */
    const int32_t *start = g->nodes[g->starts].index;
    uint64_t key = node_key(n);
    double *w = (double *)malloc(sizeof(double) * (size_t)n->rows);
    for (int s = 0; s < g->count[SEQS]; s++)
        for (int h = 0; h < heads; h++)
            for (int i = start[s]; i < start[s + 1]; i++) {
                int first = start[s], last = n->flag ? i + 1 : start[s + 1];
                double max = -INFINITY, sum = 0, *out = n->v + i * width + h * size;
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
                    if (w[j] > max) max = w[j];
                }
                for (int j = first; j < last; j++)
                    sum += w[j] = exp(w[j] - max) * times_seen(&n->blocks, h, i - start[s], j - start[s],
                                                                start[s + 1] - start[s]);
                for (int c = 0; c < size; c++) out[c] = 0;
                for (int j = first; j < last; j++) {
                    double weight = w[j] / sum;
                    if (g->train && n->b > 0)
                        weight *= kept_weight(key, (uint32_t)i, (uint32_t)(j - start[s]), (uint32_t)h, n->b);
                    const double *v = IN(2)->v + j * key_width + h / group * size;
                    for (int c = 0; c < size && weight != 0; c++) out[c] += weight * v[c];
                }
            }
    free(w);
    for (int k = 0; k < n->rows * width; k++) note(n, n->v[k]);
    note(n, IN(2)->magnitude);
}

/* Records attention. q has a head for each `head_size` columns; k and v may have fewer heads. `with` holds
   all other options. */
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

/* Records block-sparse attention. The lists of a sequence's first blocks overlap with blocks that are always
   seen, name a block twice, or name a block beyond most sequences. */
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
