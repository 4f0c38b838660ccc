#pragma once
#include "../../base/base.h"
#include "../layouts.h"
#include "../scratch.h"
#include "rules.h"

/* ---------------------------------------------------------------------- attention, shared by all variants */

/* Arguments of attention. Each head of each sequence is computed on its own. Shapes: k, v
   (rows, heads / group * head_size); q, out (queries, heads * head_size); lse f32 (queries, heads). The
   queries are all rows or, in any order, the rows that query_row lists. For each weight, dropout draws a
   random number of 8 bits: number `j % 16` of the 16 numbers of Philox counter `{i, j / 16, h, 0}`, where i
   is the query's row of the batch, j the key of the sequence, and h the head among the heads of all ranks;
   see tt__attention_either. The weight is kept if the number is at least `TT__ATTENTION_DROP(dropout)`. */
typedef struct tt__attention_args {
    const int32_t *seq_start; int64_t seqs;
    const int32_t *query_start;  /* (seqs + 1): number of the first query of each sequence               */
    const int32_t *query_row;    /* each query's row of the batch; NULL: the row is the query's number    */
    const int32_t *query_at;     /* each query's row of q; NULL: the row is the query's number            */
    int heads, first_head, group; /* group: heads of q that share a head of k and v                       */
    int64_t head_size;
    bool causal; float scale; float dropout; uint64_t dropout_key;
    int64_t window;               /* rows that a row sees backwards and, unless causal, ahead; 0: no window */
    float alibi; int alibi_heads; /* alibi_heads: number of heads of all ranks; 0: no ALiBi              */
    bool alibi_rounded;           /* rounds as transformers' Falcon does (tt_attention_options) */
    const tt__attr *attr;         /* options of block-sparse attention                                   */
    const uint16_t *lists;        /* lists of blocks that queries see (tt__launch.lists) */
    tt__mat q, k, v, out;
    float *lse;
    tt__mat dout, dq, dk, dv;    /* gradients; only in the backward */
    bool add_dq, add_dk, add_dv; /* only in the backward: whether to add to the gradient or write it      */
    tt__bf16 bf16;               /* how products of bf16 are computed; fp32 operands are rounded to bf16 */
    void *workspace;             /* tt__attention_workspace bytes                                         */
} tt__attention_args;

/* Sorts n queries by sequence: sets query_start, query_row and query_at of `a`. `index[j]` is query j's row
   of the batch. `memory` has tt__attention_queries_bytes bytes. */
static void tt__attention_queries(tt__attention_args *a, const int32_t *index, int64_t n, void *memory)
{
    int32_t *start = (int32_t *)memory, *row = start + a->seqs + 1, *at = row + n;
    memset(start, 0, (size_t)(a->seqs + 1) * sizeof *start);
    for (int64_t j = 0; j < n; j++) start[tt__sequence_of(a->seq_start, a->seqs, index[j]) + 1]++;
    for (int64_t s = 0; s < a->seqs; s++) start[s + 1] += start[s];
    /* Places the queries from the last to the first: start[s + 1] moves down from the end of sequence s to
       its start. */
    for (int64_t j = n - 1; j >= 0; j--) {
        int32_t number = --start[tt__sequence_of(a->seq_start, a->seqs, index[j]) + 1];
        row[number] = index[j];
        at[number] = (int32_t)j;
    }
    memmove(start, start + 1, (size_t)a->seqs * sizeof *start);
    start[a->seqs] = (int32_t)n;
    a->query_start = start;
    a->query_row = row;
    a->query_at = at;
}

/* A sequence: it has rows [begin, begin + length) of the batch and queries [first, first + queries). */
typedef struct tt__attention_sequence {
    int64_t begin, length, first, queries;
    bool diagonal;  /* query i is row i of the sequence and sees keys up to i */
    int64_t blocks; /* number of blocks in block-sparse attention; 0: the sequence is dense */
    int64_t from;   /* the queries of the current tile see no key before this one */
} tt__attention_sequence;

static tt__attention_sequence tt__attention_sequence_at(const tt__attention_args *a, int64_t s)
{
    tt__attention_sequence x = {a->seq_start[s], a->seq_start[s + 1] - a->seq_start[s], a->query_start[s],
                                a->query_start[s + 1] - a->query_start[s], a->causal && !a->query_row, 0, 0};
    x.blocks = tt__attention_blocks(a->attr, x.length);
    return x;
}

/* Returns how many times the queries of block i of sequence x see block j of its keys. head: a number among
   the heads of all ranks. */
static int tt__attention_times(const tt__attention_args *a, const tt__attention_sequence *x, int head,
                               int64_t i, int64_t j)
{
    const int64_t last = x->blocks - 1, listed = a->attr->listed, rows = a->attr->list_rows;
    int times = i == 0 || i == last || j == 0 || j == last || (i <= j + 1 && j <= i + 1);
    if (i == 0 || i == last || i >= rows) return times;
    if (!a->lists) return times + (j == 0 ? (int)listed : 0);
    const uint16_t *list = a->lists + (head * rows + i) * listed;
    for (int64_t k = 0; k < listed; k++) times += list[k] == j;
    return times;
}

/* Counts the queries of sequence x that directly follow query `query` in the same block, including query
   `query`. The result is at most n, and at most the number of queries of a tile. Sets *block to the number
   of the block. */
static int64_t tt__attention_of_block(const tt__attention_args *a, const tt__attention_sequence *x,
                                      int64_t query, int64_t n, int64_t *block)
{
    const int64_t size = a->attr->block;
    int64_t count = 1;
    n = tt__min(n, TT__ATTENTION_QUERIES);
    *block = (a->query_row ? a->query_row[x->first + query] - x->begin : query) / size;
    if (!a->query_row) return tt__min(n, (*block + 1) * size - query);
    while (count < n && (a->query_row[x->first + query + count] - x->begin) / size == *block) count++;
    return count;
}

/* Takes the next tile of keys from `[*at, end)`. Sets *keys to the tile's number of keys and returns the
   tile's first key. The first key is *at, rounded down to a multiple of 16, because random numbers and tiles
   are in groups of 16 keys. Sets x->from to the old *at, because no key before the old *at is seen, and *at
   to the tile's end. */
static int64_t tt__attention_next_keys(tt__attention_sequence *x, int64_t *at, int64_t end, int64_t *keys)
{
    const int64_t first = *at & ~(int64_t)15;
    x->from = *at;
    *at = tt__min(end, first + TT__ATTENTION_KEYS);
    *keys = *at - first;
    return first;
}

/* Finds the keys that are seen by any of n queries of sequence x, beginning with query `query`. Returns the
   end of these keys and sets *from to the first of these keys. Without a window, listed queries count as
   seeing all keys. */
static int64_t tt__attention_keys(const tt__attention_args *a, const tt__attention_sequence *x, int64_t query,
                                  int64_t n, int64_t *from)
{
    int64_t low = query, high = query + n - 1; /* first and last query's row in the sequence */
    *from = 0;
    if (!a->window) return x->diagonal ? query + n : x->length;
    for (int64_t i = 0; a->query_row && i < n; i++) {
        const int64_t row = a->query_row[x->first + query + i] - x->begin;
        low = i ? tt__min(low, row) : row;
        high = i ? tt__max(high, row) : row;
    }
    *from = tt__max(0, low - a->window + 1);
    return tt__min(x->length, (a->causal ? high : high + a->window - 1) + 1);
}

/* Returns the largest number of rows or queries that any sequence has. */
static int64_t tt__attention_longest(const tt__attention_args *a)
{
    int64_t longest = 0;
    for (int64_t s = 0; s < a->seqs; s++) {
        tt__attention_sequence x = tt__attention_sequence_at(a, s);
        longest = tt__max(longest, tt__max(x.length, x.queries));
    }
    return longest;
}

/* Returns the buffers of a thread. The buffers' addresses depend on the thread, but not the numbers in the
   buffers. */
static tt__attention_buffers tt__attention_thread_buffers(const tt__attention_args *a, int64_t longest,
                                                          bool backward, int thread)
{
    tt__attention_buffers b;
    size_t bytes = tt__attention_layout(NULL, longest, a->head_size, a->group, backward, &b);
    char *memory = (char *)a->workspace + bytes * (size_t)thread;
    tt__attention_layout(memory, longest, a->head_size, a->group, backward, &b);
    return b;
}

/* Returns the number of the first group of queries of sequence s: `query_start[s] / TT__ATTENTION_GROUP + s`.
   This numbering leaves enough numbers for all groups of a sequence without counting the groups of earlier
   sequences. Some numbers have no group. */
static int64_t tt__attention_first_group(const tt__attention_args *a, int64_t s)
{
    return a->query_start[s] / TT__ATTENTION_GROUP + s;
}

static int64_t tt__attention_group_sequence(const tt__attention_args *a, int64_t group)
{
    int64_t low = 0, high = a->seqs; /* first_group(low) <= group < first_group(high) */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (tt__attention_first_group(a, middle) <= group) low = middle;
        else high = middle;
    }
    return low;
}

/* Returns the size of the blocks into which n numbers are divided about equally. The size is at most `max`
   and a multiple of 16. n and max must be > 0. */
static int64_t tt__attention_block(int64_t n, int64_t max)
{
    return tt__attention_padded(tt__ceil_div(n, tt__ceil_div(n, max)));
}

static void *tt__attention_row(const tt__mat *m, int64_t row, int64_t column)
{
    return (char *)m->data + (size_t)(row * m->ld + column) * tt_dtype_bytes(m->dtype);
}

/* Prefetches a head's columns of a row, because the rows of a head are too far apart for a CPU's own
   prefetchers. `next`: prefetches the columns of the next head, the thread's most likely next task, into L2
   instead. */
static inline void tt__attention_prefetch(const tt__mat *m, int64_t row, int64_t column, int64_t d,
                                          const bool next)
{
    const char *p = (const char *)tt__attention_row(m, row, column + (next ? d : 0));
    for (const char *end = p + (size_t)d * tt_dtype_bytes(m->dtype); p < end; p += 64) {
        if (next) __builtin_prefetch(p, 0, 2);
        else __builtin_prefetch(p);
    }
}
