#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../../tape/record.h"
#include "../record.h"
#include "../shapes.h"
#include "../layouts.h"
#include "../gradients.h"
#include "../scratch.h"

/* ---------------------------------------------------------------------------------------------- attention */

tt_attention_options tt_attention_options_default(int heads)
{
    tt_attention_options o;
    memset(&o, 0, sizeof o);
    o.heads = heads;
    return o;
}

#define TT__MAX_HEAD 65536 /* max columns of a head; bounds the scratch for blocks of queries and keys */

/* Fails if the options of block-sparse attention are invalid. */
static bool tt__blocks_in(tt_tape *t, const tt__attr *a)
{
    if (a->block < 0 || a->dense < 0 || a->listed < 0 || a->list_rows < 0)
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "attention: block %d, dense %d, listed %d and list_rows %d "
                             "must be at least 0", a->block, a->dense, a->listed, a->list_rows);
    if (!a->block && a->listed)
        return tt__tape_fail(t, TT_ERR_ARGUMENT,
                             "attention: listed is %d, but block is 0: set block, the rows of a block",
                             a->listed);
    if (a->block && (a->causal || a->window || a->alibi_heads))
        return tt__tape_fail(t, TT_ERR_ARGUMENT,
                             "attention: block %d cannot be combined with %s: leave one out", a->block,
                             a->causal ? "causal rows" : a->window ? "a window" : "alibi");
    return true;
}

static bool tt__shape_ATTENTION(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *q = tt__in(t, i, 0), *keys = i->in[4] ? tt__in(t, i, 1) : q;
    const int heads = i->attr.heads;
    if (heads < 1 || q->cols % heads)
        return tt__tape_fail(t, TT_ERR_SHAPE,
                             "attention: the width is %lld, but must be a multiple of heads, %d",
                             (long long)q->cols, heads);
    if (!tt__float_in(t, i, 0)) return false;
    for (int k = 1; k < 3; k++)
        if (!tt__shape_in(t, i, k, keys, q->cols / heads * i->attr.key_heads)) return false;
    if (!tt__index_in(t, i, 3) || !tt__numbers_in(t, i, 4, 0)) return false;
    if (q->cols / heads > TT__MAX_HEAD)
        return tt__tape_fail(t, TT_ERR_SHAPE, "attention: heads have %lld columns, but at most %d are "
                             "supported: use more heads", (long long)(q->cols / heads), TT__MAX_HEAD);
    for (int k = 1; k < 3; k++)
        /* Heads are computed in parallel, so two heads must not add to the same column of a gradient. */
        for (int j = 0; j < k; j++) {
            const tt__tape_value *a = &t->values[i->in[j]], *b = &t->values[i->in[k]];
            const int64_t apart = b->offset - a->offset;
            const bool overlap = apart < a->shape.cols && -apart < b->shape.cols;
            if (a->base == b->base && overlap && (apart || a->shape.cols != b->shape.cols))
                return tt__tape_fail(t, TT_ERR_SHAPE, "attention: '%s' and '%s' are slices that overlap: use "
                                     "the same columns, or columns that do not overlap", a->name, b->name);
        }
    if (i->attr.window < 0)
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "attention: window %d must be at least 1, or 0 for none",
                             i->attr.window);
    if (i->attr.max_length < 0)
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "attention: max_length %d must be at least 1, or 0 for any",
                             i->attr.max_length);
    if (!isfinite(i->attr.alibi))
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "attention: alibi %g must be finite", i->attr.alibi);
    if (i->attr.alibi_rounded && !i->attr.causal)
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "attention: alibi_rounded needs causal = true");
    if (!tt__blocks_in(t, &i->attr)) return false;
    out[0] = *q;
    tt__set_shape(&out[1], TT_F32, q, heads);
    if (!(i->attr.dropout >= 0 && i->attr.dropout <= 255.0f / 256))
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "attention: dropout is %g, but must be 0 to 255/256",
                             i->attr.dropout);
    return true;
}

/* Copies the options' lists of blocks to the tape. */
static bool tt__take_lists(tt_tape *t, const tt_attention_options *o, tt__attr *attr)
{
    const int64_t n = (int64_t)o->heads * o->list_rows * o->listed;
    uint32_t hash = 2166136261u; /* FNV-1a */
    attr->block = o->block;
    attr->dense = o->dense;
    attr->listed = o->listed;
    attr->list_rows = o->list_rows;
    attr->lists_for_training = o->lists_for_training;
    if (t->status != TT_OK || o->heads < 1 || o->listed < 1 || o->list_rows < 1) return true;
    if ((double)o->heads * o->list_rows * o->listed > INT32_MAX / 2 - t->n_lists)
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "attention: lists of %d blocks for each of %d blocks and %d "
                             "heads are too long: list fewer blocks", o->listed, o->list_rows, o->heads);
    if (!o->lists)
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "attention: `lists` is NULL: pass the lists of blocks");
    for (int64_t k = 0; k < n; k++)
        if (o->lists[k] < 0 || o->lists[k] > UINT16_MAX)
            return tt__tape_fail(t, TT_ERR_ARGUMENT, "attention: lists have block %d at entry %lld, but "
                                 "blocks must be 0 to 65535", (int)o->lists[k], (long long)k);
    attr->lists = t->n_lists + 1;
    attr->list_heads = o->heads;
    for (int64_t k = 0; k < n; k++) {
        const uint16_t block = (uint16_t)o->lists[k];
        if (!TT__GROW(t->ctx, t->lists, t->n_lists, t->cap_lists))
            return tt__tape_fail(t, TT_ERR_MEMORY, "attention: out of memory for the lists of blocks: free "
                                 "memory");
        t->lists[t->n_lists++] = block;
        hash = (hash ^ block) * 16777619u;
    }
    attr->lists_hash = hash;
    return true;
}

static tt_value tt__attend(tt_tape *t, tt_value q, tt_value k, tt_value v, tt_value seq_start, tt_value row,
                           const tt_attention_options *o)
{
    tt__instr i = tt__new_instr(TT__OP_ATTENTION);
    if (!tt__take_lists(t, o, &i.attr)) return tt__handle(t, 0);
    i.attr.heads = o->heads;
    i.attr.causal = o->causal;
    i.attr.dropout = o->dropout;
    i.attr.window = o->window;
    i.attr.max_length = o->max_length;
    i.attr.alibi = o->alibi;
    if (o->alibi != 0) i.attr.alibi_heads = o->heads;
    i.attr.alibi_rounded = o->alibi != 0 && o->alibi_rounded;
    /* The number of k's heads must divide the number of q's heads; otherwise the shape rule reports an
       error. */
    const int64_t head = o->heads < 1 ? 0 : tt_value_width(t, q) / o->heads;
    const int64_t key_heads = head && tt_value_width(t, k) % head == 0 ? tt_value_width(t, k) / head : 0;
    const bool divides = key_heads && key_heads <= o->heads && o->heads % key_heads == 0;
    i.attr.key_heads = divides ? (int)key_heads : o->heads;
    bool given = o->scale != 0 || o->heads < 1;
    i.attr.scale = given ? o->scale : 1.0f / sqrtf((float)(tt_value_width(t, q) / o->heads));
    return tt__record(t, i, "vvvvV", q, k, v, seq_start, row);
}

tt_value tt_attention(tt_tape *t, tt_value q, tt_value k, tt_value v, tt_value seq_start,
                      const tt_attention_options *o)
{
    return tt__attend(t, q, k, v, seq_start, tt__handle(t, 0), o);
}


tt_value tt_attention_rows(tt_tape *t, tt_value q, tt_value k, tt_value v, tt_value seq_start, tt_value row,
                           const tt_attention_options *o)
{
    return tt__attend(t, q, k, v, seq_start, row, o);
}

static void tt__backward_ATTENTION(tt__builder *b, const tt__instr *f, int32_t g)
{
    const tt__tape_value *v = b->t->values;
    /* If operands share storage, dq, dk and dv are added to the gradient of that storage, in the order in
       which the kernel writes them. */
    for (int k = 1; k < 3; k++)
        for (int j = 0; j < k; j++, v = b->t->values) {
            int32_t base = v[f->in[k]].base;
            if (v[f->in[j]].base != base || !tt__wants(b->t, base) || v[base].grad) continue;
            int32_t whole = tt__new_gradient(b, base);
            if (whole) tt__fill(b, whole, 0);
        }
    tt__emit_gradient(b, f, g, TT__OP_ATTENTION_BACKWARD, "g0123AB4", "012");
}

static tt_status tt__check_ATTENTION(const tt__launch *l)
{
    tt_status status = tt__check_starts(l, 3, l->in[1].rows);
    const int32_t *start = (const int32_t *)l->in[3].data;
    const int max = l->instr->attr.max_length;
    for (int64_t s = 0; s < l->in[3].rows - 1 && max && status == TT_OK; s++)
        if (start[s + 1] - start[s] > max)
            return tt__launch_fail(l, 3, "has a sequence of %d rows at entry %lld, but attention's "
                                   "max_length is %d: cut the sequence, or record a larger max_length",
                                   start[s + 1] - start[s], (long long)s, max);
    return status == TT_OK ? tt__check_indices(l, 4, l->in[1].rows, NULL, "rows to gather from") : status;
}

/* Returns the lists of blocks of an instruction; NULL: the instruction has no lists. */
static const uint16_t *tt__lists_of(const tt_tape *t, const tt__instr *i)
{
    return i->attr.lists ? t->lists + i->attr.lists - 1 : NULL;
}

/* Returns the number of blocks of a sequence of `length` rows in block-sparse attention; 0 if dense. */
static inline int64_t tt__attention_blocks(const tt__attr *attr, int64_t length)
{
    return attr->block && length > attr->dense ? tt__ceil_div(length, attr->block) : 0;
}

/* Returns the number of keys that row `row` of a sequence of `length` rows sees. Counts each random block of
   block-sparse attention (tt_attention_options.lists) as a whole block. */
static double tt__attention_seen(const tt__attr *attr, int64_t row, int64_t length)
{
    const int64_t n = tt__attention_blocks(attr, length), i = n ? row / attr->block : 0;
    if (i > 0 && i < n - 1) {
        int64_t keys = attr->block + length - (n - 1) * attr->block; /* keys of first and last block */
        for (int64_t j = tt__max(1, i - 1); j < tt__min(n - 1, i + 2); j++) keys += attr->block;
        return (double)(keys + (i < attr->list_rows ? (int64_t)attr->listed * attr->block : 0));
    }
    const int64_t max = attr->window ? attr->window - 1 : length;
    return (double)(1 + tt__min(row, max) + (attr->causal ? 0 : tt__min(length - 1 - row, max)));
}

/* Returns the number of pairs of a query and a key that the query sees, in a sequence of `length` rows.
   Without a window, causal attention counts as half of length * length, as is usual. */
static double tt__attention_pairs(const tt__attr *attr, double length)
{
    const double unseen = length - attr->window; /* keys that the last row does not see */
    const int64_t n = tt__attention_blocks(attr, (int64_t)ceil(length));
    double pairs = 0;
    for (int64_t i = 0; i < n; i++) {
        const double rows = i < n - 1 ? attr->block : length - (double)((n - 1) * attr->block);
        pairs += rows * tt__attention_seen(attr, i * attr->block, (int64_t)ceil(length));
    }
    if (n) return pairs;
    if (!attr->window || unseen <= 0) return length * length * (attr->causal ? 0.5 : 1.0);
    return attr->causal ? length * (length + 1) / 2 - unseen * (unseen + 1) / 2
                        : length * length - unseen * (unseen + 1);
}

/* Returns the floating-point operations of attention: two products in the forward and four in the backward,
   for each pair of a query and a key that the query sees. If the operands have no data, all sequences count
   as equally long. */
static double tt__flops_of_attention(const tt__instr *i, const tt__mat *in)
{
    const tt__attention_operands at = tt__attention_of(i->op == TT__OP_ATTENTION_BACKWARD);
    const tt__mat *q = &in[at.q], *k = q + 1;
    const int32_t *start = (const int32_t *)in[at.starts].data, *row = (const int32_t *)in[at.numbers].data;
    const tt__attr *attr = &i->attr;
    const int64_t seqs = in[at.starts].rows - 1;
    const double length = (double)k->rows / (double)tt__max(1, seqs); /* rows of a sequence, at capacity */
    const double part = length > 0 ? tt__attention_pairs(attr, length) / (length * length) : 0;
    double pairs = start ? 0 : (double)q->rows * (double)k->rows / (double)tt__max(1, seqs) * part;
    for (int64_t r = 0; start && r < (row ? q->rows : seqs); r++) {
        int64_t s = row ? tt__sequence_of(start, seqs, row[r]) : r, rows = start[s + 1] - start[s];
        pairs += row ? tt__attention_seen(attr, row[r] - start[s], rows)
                     : tt__attention_pairs(attr, (double)rows);
    }
    return (at.backward ? 8.0 : 4.0) * pairs * (double)q->cols;
}

static size_t tt__cpu_attention(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__attention_operands at = tt__attention_of(i->op == TT__OP_ATTENTION_BACKWARD);
    const tt__shape *q = tt__in(t, i, at.q), *k = tt__in(t, i, at.q + 1);
    int64_t seqs = tt__in(t, i, at.starts)->rows - 1, longest = tt__max(q->rows, k->rows);
    const int group = i->attr.heads / i->attr.key_heads;
    size_t bytes = tt__attention_workspace(longest, q->cols / i->attr.heads, group, at.backward, threads);
    return bytes + (i->in[at.numbers] ? tt__attention_queries_bytes(seqs, q->rows) : 0);
}

/* Returns the bytes of scratch on CUDA. The scratch holds the sorted listed queries (starts, rows and places)
   and the lists of blocks. In the backward it also holds the sum of dout * out of each row and head, which
   all thread blocks that own queries or keys read (Dao: "FlashAttention-2", 2023, algorithm 2), and either
   the bits of dropout or the parts of dq, whichever is larger. */
static size_t tt__cuda_attention(const tt_tape *t, const tt__instr *i)
{
    const tt__attention_operands at = tt__attention_of(i->op == TT__OP_ATTENTION_BACKWARD);
    size_t rows = (size_t)tt__in(t, i, at.q)->rows, starts = (size_t)tt__in(t, i, at.starts)->rows;
    size_t order = i->in[at.numbers] ? tt__align_to((starts + 2 * rows) * 4, TT__CUDA_ALIGN) : 0;
    order += tt__align_to(sizeof(uint16_t) * (size_t)tt__listed_blocks(&i->attr), TT__CUDA_ALIGN);
    if (!at.backward) return order;
    const tt__shape *q = tt__in(t, i, at.q);
    const tt__mat all = {NULL, q->dtype, q->rows, q->cols, q->cols};
    const bool listed = i->in[at.numbers] > 0;
    const int64_t bits = listed ? 0 : tt__cuda_attention_bits(&i->attr, &all, (int64_t)starts - 1);
    const int64_t parts = listed ? 0 : tt__cuda_attention_parts(&i->attr, &all);
    return order + tt__align_to(rows * (size_t)i->attr.heads * 4, TT__CUDA_ALIGN)
        + (size_t)tt__max(bits, parts);
}

static const tt__rules tt__rules_ATTENTION = {tt__shape_ATTENTION, tt__layout_by_columns,
    {tt__backward_ATTENTION}, tt__cpu_attention, tt__cuda_attention, tt__check_ATTENTION, NULL, NULL,
    tt__flops_of_attention};

static bool tt__shape_ATTENTION_BACKWARD(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *q = tt__in(t, i, 1), *keys = tt__in(t, i, 2);
    const int64_t cols = q->cols / i->attr.heads * i->attr.key_heads;
    for (int k = 0; k < 6; k++) {
        const bool of_keys = k == 2 || k == 3;
        const tt__shape *rows = of_keys && i->in[7] ? keys : q;
        if (k != 4 && !tt__shape_in(t, i, k, rows, of_keys ? cols : q->cols)) return false;
    }
    for (int k = 0; k < 3; k++) out[k] = k ? *keys : *q;
    return tt__index_in(t, i, 4) && tt__shape_in(t, i, 6, q, i->attr.heads) && tt__numbers_in(t, i, 7, 1);
}

static const tt__rules tt__rules_ATTENTION_BACKWARD = {tt__shape_ATTENTION_BACKWARD, tt__layout_by_columns,
    {NULL}, tt__cpu_attention, tt__cuda_attention, NULL, NULL, NULL, tt__flops_of_attention};
