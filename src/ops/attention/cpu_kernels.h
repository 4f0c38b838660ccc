#pragma once
#include "../../base/base.h"
#include "../scratch.h"
#include "cpu_shared.h"
#include "../cpu_draw.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "../linear/cpu_packing.h"
#include "../linear/cpu_computing.h"
#include "cpu_blocks.h"
#include "cpu_softmax.h"

/* ---- the forward and the backward ---- */

TT__FN TT__K(attention_call) TT__K(attention_begin)(const tt__attention_args *a)
{
    TT__K(attention_call) call;
    call.a = a;
    call.longest = tt__attention_longest(a);
    call.query_scale = a->scale * 1.44269504088896341f;
    call.keep_scale = 256.0f / (float)(256 - TT__ATTENTION_DROP(a->dropout));
    tt__attention_either(TT__ATTENTION_DROP(a->dropout), call.either);
    tt__philox_keys(a->dropout_key, call.keys);
    return call;
}

/* Returns task number `task` of a call; the task works on sequence s. */
TT__FN TT__K(attention_task) TT__K(attention_task_of)(const TT__K(attention_call) *call, int64_t task,
                                                      int64_t s, bool backward, int thread)
{
    TT__K(attention_task) t;
    t.call = call;
    t.a = call->a;
    t.head = (int)(task % t.a->heads);
    t.x = tt__attention_sequence_at(t.a, s);
    t.b = tt__attention_thread_buffers(t.a, call->longest, backward, thread);
    return t;
}

/* Copies n keys and values into the task's buffers, beginning with row `row` of the batch. */
TT__FN void TT__K(attention_take_keys)(const TT__K(attention_task) *t, int64_t row, int64_t n, bool backward)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    const int64_t d = a->head_size, stride = tt__attention_stride(d);
    const int64_t column = t->head / a->group * d;
    TT__K(attention_pack)(&a->k, NULL, row, n, column, d, 1.0f, b->k, stride);
    TT__K(attention_pack)(&a->v, NULL, row, n, column, d, 1.0f, b->v, stride);
    (void)backward;
#ifdef TT__ATTENTION_BF16
    if (a->bf16) TT__K(attention_pairs_of_columns)(b->k_pairs, b->k, stride, n, d);
    if (a->bf16 && backward) TT__K(attention_pairs_of_columns)(b->v_pairs, b->v, stride, n, d);
    if (a->bf16 == TT__BF16_TILES || (a->bf16 && backward))
        TT__K(attention_summed_bf16)(a->bf16, b, n, d, backward ? b->k : b->v, stride);
#endif
}

#define TT__ATTENTION_NO_DIAGONAL ((int64_t)1 << 40) /* a diagonal beyond all keys: every query sees every
                                                        key */

/* Returns the part of a block of keys that any of n queries sees, extended to whole tiles, but not beyond
   the block. If no query sees any key, the result has `keys <= skip`. key, query: the first key and the
   first query, counted in the sequence. */
TT__INLINE TT__K(attention_block) TT__K(attention_block_of)(const TT__K(attention_task) *t, int64_t key,
                                                            int64_t keys, int64_t query, int64_t n)
{
    const int64_t diagonal = t->x.diagonal ? query - key : TT__ATTENTION_NO_DIAGONAL;
    int64_t from, end = tt__attention_keys(t->a, &t->x, query, n, &from);
    end = key + ((end - key + 31) & ~(int64_t)31);
    TT__K(attention_block) s = {t->a->bf16, tt__max(0, from - key) & ~(int64_t)31, tt__min(keys, end - key),
                                n, t->a->head_size, diagonal, &t->b};
    return s;
}

/* Returns the ALiBi slope of the task's head in units of log 2; 0 without ALiBi. */
TT__INLINE TT__K(attention_fall) TT__K(attention_fall_of)(const TT__K(attention_task) *t)
{
    const tt__attention_args *a = t->a;
    TT__K(attention_fall) fall = {0, 0};
    if (!a->alibi_heads) return fall;
    const double exponent_of_2 = tt__alibi_exponent(a->first_head + t->head, a->alibi_heads);
    fall.slope = (float)tt__exp(0.69314718055994531 * exponent_of_2);
    if (a->alibi_rounded) {
        int exponent;
        fall.digits = 2 * frexpf(tt__from_bf16(tt__to_bf16(fall.slope)), &exponent);
        fall.slope = ldexpf(0.5f, exponent);
    }
    fall.slope *= a->alibi * 1.44269504088896341f;
    return fall;
}

/* Adds the weighted values of a block of keys to the sums `out` of a block of queries. key, query: the first
   key and the first query, counted in the sequence. first: `out` has no sums yet and is written. */
TT__FN void TT__K(attention_forward_tile)(const TT__K(attention_task) *t, bool first, int64_t key,
                                          int64_t keys, int64_t query, int64_t n, const float *qt, float *out,
                                          float *max, float *sum)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    const int64_t d = a->head_size, stride = tt__attention_stride(d);
    const TT__K(attention_fall) fall = TT__K(attention_fall_of)(t);
    TT__K(attention_block) s = TT__K(attention_block_of)(t, key, keys, query, n);
    float correction[TT__ATTENTION_QUERIES];
    if (s.keys <= s.skip) return;
    TT__K(attention_scores)(&s, t->call->query_scale, a->bf16 ? b->k_pairs : b->k, qt, b->weights);
    for (int64_t i = 0; i < n; i += TT__LANES) {
        TT__K(attention_lanes) l = TT__K(attention_lanes_at)(t, key, &s, query + i);
        if (fall.slope != 0) TT__K(attention_alibi)(&l, t->x.begin, &fall, b->weights + i);
        tt__vf c = l.drop ? TT__K(attention_softmax)(true, &l, s.keys, b->weights + i, max + i, sum + i)
                          : TT__K(attention_softmax)(false, &l, s.keys, b->weights + i, max + i, sum + i);
        TT__K(store)(correction + i, c);
    }
    for (int64_t i = 0; !first && i < n; i++) {
        float *row = out + i * stride;
        for (int64_t j = 0; j < d && correction[i] != 1.0f; j += TT__LANES)
            TT__K(store)(row + j, TT__K(load)(row + j) * correction[i]);
    }
    /* The weights are not rounded here. With rounded weights, dout * out would differ from the backward's
       sum of weights times their gradients. The gradients of keys, in which terms cancel out, would then
       have errors 1.5 times as large. */
    if (s.by == TT__BF16_DOT) s.by = TT__BF16_CONVERT;
    TT__K(attention_to_queries)(&s, true, b->weights, b->v, out, stride, !first);
}

/* Writes the output and the log-sum-exp of n queries whose sums are in the buffers. query: the first query,
   counted in the sequence. */
TT__FN void TT__K(attention_put)(const TT__K(attention_task) *t, int64_t query, int64_t n)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    const int64_t d = a->head_size, stride = tt__attention_stride(d);
    for (int64_t i = 0; i < n; i++) {
        int64_t number = t->x.first + query + i, row = a->query_at ? a->query_at[number] : number;
        TT__K(attention_unpack)(&a->out, NULL, row, 1, t->head * d, d, t->call->keep_scale / b->sum[i],
                                b->out + i * stride, stride, false);
        a->lse[row * a->heads + t->head] = b->max[i] * 0.693147180559945309f + tt__lnf(b->sum[i]);
    }
}

/* Computes block-sparse attention for `queries` queries of a sequence, the queries of one block at a time.
   first: the first query, counted in the sequence. */
TT__FN void TT__K(attention_forward_blocks)(TT__K(attention_task) *t, int64_t first, int64_t queries)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    const int64_t d = a->head_size, stride = tt__attention_stride(d), size = a->attr->block;
    const float q_scale = a->bf16 ? 1.0f : t->call->query_scale;
    const int head = a->first_head + t->head;
    int64_t count, i, keys;
    for (int64_t query = first; query < first + queries; query += count) {
        bool begun = false;
        count = tt__attention_of_block(a, &t->x, query, first + queries - query, &i);
        TT__K(attention_pack)(&a->q, a->query_at, t->x.first + query, count, t->head * d, d, q_scale, b->q,
                              stride);
        TT__K(attention_columns)(a, b, b->q, count, 1.0f, b->qt);
        for (int64_t k = 0; k < TT__ATTENTION_QUERIES; k++) {
            b->max[k] = -FLT_MAX;
            b->sum[k] = 0;
        }
        for (int64_t j = 0, end; j < t->x.blocks; j = end) {
            const int times = tt__attention_times(a, &t->x, head, i, j);
            for (end = j + 1; end < t->x.blocks; end++)
                if (tt__attention_times(a, &t->x, head, i, end) != times) break;
            for (int64_t at = j * size, to = tt__min(end * size, t->x.length); times && at < to;) {
                const int64_t key = tt__attention_next_keys(&t->x, &at, to, &keys);
                TT__K(attention_take_keys)(t, t->x.begin + key, keys, false);
                for (int k = 0; k < times; k++, begun = true)
                    TT__K(attention_forward_tile)(t, !begun, key, keys, query, count, b->qt, b->out, b->max,
                                                  b->sum);
            }
        }
        TT__K(attention_put)(t, query, count);
    }
}

TT__FN void TT__K(attention_forward_task)(void *arg, int64_t task, int thread)
{
    const TT__K(attention_call) *call = (const TT__K(attention_call) *)arg;
    const tt__attention_args *a = call->a;
    const int64_t group = task / a->heads, s = tt__attention_group_sequence(a, group);
    TT__K(attention_task) t = TT__K(attention_task_of)(call, task, s, false, thread);
    const tt__attention_buffers *b = &t.b;
    int64_t first = (group - tt__attention_first_group(a, s)) * TT__ATTENTION_GROUP;
    int64_t queries = tt__min(TT__ATTENTION_GROUP, t.x.queries - first), key_begin, key_end;
    int64_t d = a->head_size, column = t.head * d, stride = tt__attention_stride(d);
    int64_t qt_size = tt__attention_qt_rows(d) * TT__ATTENTION_TILE;
    if (queries <= 0) return;
    if (a->bf16 == TT__BF16_TILES) TT__K(tiles_begin)(32);
    if (t.x.blocks) {
        TT__K(attention_forward_blocks)(&t, first, queries);
        if (a->bf16 == TT__BF16_TILES) TT__K(tiles_end)();
        return;
    }
    key_end = tt__attention_keys(a, &t.x, first, queries, &key_begin);
    key_begin &= ~(int64_t)15;
    int64_t query_block = tt__attention_block(queries, TT__ATTENTION_QUERIES);
    int64_t key_block = tt__attention_block(key_end - key_begin, TT__ATTENTION_KEYS);
    const float q_scale = a->bf16 ? 1.0f : call->query_scale; /* with bf16, the scores are scaled after the
                                                                 product */
    for (int64_t i = 0, block = 0; i < queries; i += query_block, block++) {
        int64_t n = tt__min(query_block, queries - i);
        TT__K(attention_pack)(&a->q, a->query_at, t.x.first + first + i, n, column, d, q_scale, b->q, stride);
        TT__K(attention_columns)(a, b, b->q, n, 1.0f, b->qt + block * qt_size);
    }
    for (int64_t i = 0; i < TT__ATTENTION_GROUP; i++) {
        b->max[i] = -FLT_MAX;
        b->sum[i] = 0;
    }
    /* With a window, the queries do not share a first block of keys, so their sums begin as zeros. */
    if (a->window) memset(b->out, 0, (size_t)(queries * stride) * sizeof(float));
    for (int64_t key = key_begin; key < key_end; key += key_block) {
        int64_t keys = tt__min(key_block, key_end - key);
        TT__K(attention_take_keys)(&t, t.x.begin + key, keys, false);
        for (int64_t i = 0, block = 0; i < queries; i += query_block, block++) {
            int64_t n = tt__min(query_block, queries - i);
            TT__K(attention_forward_tile)(&t, !a->window && key == 0, key, keys, first + i, n,
                                          b->qt + block * qt_size, b->out + i * stride, b->max + i,
                                          b->sum + i);
        }
    }
    if (a->bf16 == TT__BF16_TILES) TT__K(tiles_end)();
    TT__K(attention_put)(&t, first, queries);
}

/* Computes attention: writes `out`, and to `lse` the natural log-sum-exp of each query's scaled scores. */
TT__FN void TT__K(attention_forward)(tt__pool *pool, const tt__attention_args *a)
{
    TT__K(attention_call) call = TT__K(attention_begin)(a);
    if (a->seqs > 0)
        tt__run_tasks(pool, tt__attention_first_group(a, a->seqs) * a->heads, TT__K(attention_forward_task),
                     &call);
}

/* For n queries, beginning with number `first`: reads the log2-sum-exp2 of the scores into b->lse, and
   computes the sums of dout * out into b->delta. */
TT__FN void TT__K(attention_backward_rows)(const TT__K(attention_task) *t, int64_t first, int64_t n)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    int64_t d = a->head_size, stride = tt__attention_stride(d);
    for (int64_t i = 0; i < n; i += TT__ATTENTION_QUERIES) {
        int64_t block = tt__min(TT__ATTENTION_QUERIES, n - i);
        TT__K(attention_pack)(&a->out, a->query_at, first + i, block, t->head * d, d, 1.0f, b->q, stride);
        TT__K(attention_pack)(&a->dout, a->query_at, first + i, block, t->head * d, d, 1.0f, b->dout, stride);
        for (int64_t k = 0; k < block; k++) {
            tt__vf sum = TT__K(zero)();
            for (int64_t j = 0; j < d; j += TT__LANES)
                sum = TT__K(fma)(TT__K(load)(b->q + k * stride + j), TT__K(load)(b->dout + k * stride + j),
                                 sum);
            b->delta[i + k] = TT__K(sum)(sum);
            int64_t number = first + i + k, row = a->query_at ? a->query_at[number] : number;
            b->lse[i + k] = a->lse[row * a->heads + t->head] * 1.44269504088896341f;
        }
    }
}

/* Computes the contributions of a block of queries and a block of keys to dq, dk and dv, and adds them to
   the sums in the buffers. span: the first query whose lse, delta and dq are in the buffers. first: dq has
   no sums yet and is written. */
TT__FN void TT__K(attention_backward_tile)(const TT__K(attention_task) *t, bool first, int64_t key,
                                           int64_t keys, int64_t span, int64_t query, int64_t n)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    const bool half = a->bf16 != TT__BF16_CONVERT;
    const float query_scale = t->call->query_scale, keep_scale = t->call->keep_scale;
    const int64_t d = a->head_size, stride = tt__attention_stride(d), dq_stride = tt__attention_padded(d);
    const int64_t column = t->head * d, row = t->x.first + query;
    const TT__K(attention_fall) fall = TT__K(attention_fall_of)(t);
    const TT__K(attention_block) s = TT__K(attention_block_of)(t, key, keys, query, n);
    if (s.keys <= s.skip) return;
    TT__K(attention_pack)(&a->q, a->query_at, row, n, column, d, 1.0f, b->q, stride);
    TT__K(attention_pack)(&a->dout, a->query_at, row, n, column, d, half ? 1.0f : keep_scale, b->dout,
                          stride);
    TT__K(attention_columns)(a, b, b->q, n, query_scale, b->qt);
    TT__K(attention_columns)(a, b, b->dout, n, 1.0f, b->doutt);
    TT__K(attention_scores)(&s, query_scale, half ? b->k_pairs : b->k, b->qt, b->weights);
    TT__K(attention_scores)(&s, keep_scale, half ? b->v_pairs : b->v, b->doutt, b->dscores);
    float lses[TT__ATTENTION_QUERIES], deltas[TT__ATTENTION_QUERIES]; /* zeros after the last of n queries */
    for (int64_t i = 0; i < tt__attention_padded(n); i++) {
        lses[i] = i < n ? b->lse[query - span + i] : 0;
        deltas[i] = i < n ? b->delta[query - span + i] : 0;
    }
    for (int64_t i = 0; i < n; i += TT__LANES) {
        TT__K(attention_lanes) l = TT__K(attention_lanes_at)(t, key, &s, query + i);
        if (fall.slope != 0) TT__K(attention_alibi)(&l, t->x.begin, &fall, b->weights + i);
        float *w = b->weights + i, *ds = b->dscores + i;
        if (l.drop) TT__K(attention_softmax_backward)(true, &l, s.keys, w, ds, lses + i, deltas + i);
        else TT__K(attention_softmax_backward)(false, &l, s.keys, w, ds, lses + i, deltas + i);
    }
    float *dq = b->dq + (query - span) * dq_stride;
#ifdef TT__ATTENTION_BF16
    if (half) {
        TT__K(attention_pairs_of_rows)(b->q_pairs, stride, b->q, stride, n, d);
        TT__K(attention_pairs_of_rows)(b->dout_pairs, stride, b->dout, stride, n, d);
    }
#endif
    TT__K(attention_to_keys)(&s, b->weights, half ? b->dout_pairs : b->dout, b->dv);
    TT__K(attention_to_keys)(&s, b->dscores, half ? b->q_pairs : b->q, b->dk);
    TT__K(attention_to_queries)(&s, false, b->dscores, half ? b->summed : b->k, dq, dq_stride, !first);
}

/* Destination of the gradients of a sequence's keys and values. row: the sequence's first row; column: the
   head's first column. */
typedef struct TT__K(attention_sums) {
    tt__mat dk, dv;
    int64_t row, column;
    bool add_dk, add_dv;
} TT__K(attention_sums);

/* Writes the gradients of `count` keys to `to` or, if `add`, adds them. key: the first key, counted in the
   sequence; from: the first key's row in the buffers. */
TT__FN void TT__K(attention_put_keys)(const TT__K(attention_task) *t, const TT__K(attention_sums) *to,
                                      int64_t key, int64_t from, int64_t count, bool add)
{
    const tt__attention_args *a = t->a;
    const int64_t d = a->head_size, stride = tt__attention_stride(d), row = to->row + key;
    const float dv_scale = a->bf16 ? t->call->keep_scale : 1.0f; /* with bf16, dout was packed without
                                                                    keep_scale, so dv gets the factor */
    const float *dk = t->b.dk + from * stride, *dv = t->b.dv + from * stride;
    TT__K(attention_unpack)(&to->dk, NULL, row, count, to->column, d, a->scale, dk, stride,
                            add || to->add_dk);
    TT__K(attention_unpack)(&to->dv, NULL, row, count, to->column, d, dv_scale, dv, stride,
                            add || to->add_dv);
}

/* Computes, for block-sparse attention, the gradients that come from n queries of a sequence, beginning with
   query `span`; attention_backward_span does the same for dense sequences. */
TT__FN void TT__K(attention_backward_blocks)(TT__K(attention_task) *t, const TT__K(attention_sums) *to,
                                             int64_t span, int64_t n)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    const int64_t stride = tt__attention_stride(a->head_size), size = a->attr->block;
    const int head = a->first_head + t->head;
    int64_t keys, count, i;
    for (int64_t j = 0; j < t->x.blocks; j++)
        for (int64_t at = j * size, end = tt__min(at + size, t->x.length); at < end;) {
            const int64_t key = tt__attention_next_keys(&t->x, &at, end, &keys), from = t->x.from - key;
            bool seen = false;
            memset(b->dk, 0, (size_t)(keys * stride) * sizeof(float));
            memset(b->dv, 0, (size_t)(keys * stride) * sizeof(float));
            for (int64_t query = span; query < span + n; query += count) {
                count = tt__attention_of_block(a, &t->x, query, span + n - query, &i);
                const int times = tt__attention_times(a, &t->x, head, i, j);
                if (times && !seen) TT__K(attention_take_keys)(t, t->x.begin + key, keys, true);
                seen |= times > 0;
                for (int k = 0; k < times; k++)
                    TT__K(attention_backward_tile)(t, false, key, keys, span, query, count);
            }
            if (seen || !span) TT__K(attention_put_keys)(t, to, t->x.from, from, keys - from, span > 0);
        }
    t->x.from = 0;
}

/* Computes the gradients that come from n queries of a sequence, beginning with query `span`. If n is 0,
   writes zeros as the gradients of the sequence's keys and values. */
TT__FN void TT__K(attention_backward_span)(TT__K(attention_task) *t, const TT__K(attention_sums) *to,
                                           int64_t span, int64_t n)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    const tt__attention_sequence *x = &t->x;
    int64_t d = a->head_size, column = t->head * d, stride = tt__attention_stride(d);
    int64_t key_end = x->diagonal ? span + n : x->length, seen_from, seen_end;
    int64_t query_block = tt__attention_block(tt__max(1, n), TT__ATTENTION_QUERIES);
    int64_t key_block = tt__attention_block(key_end, TT__ATTENTION_KEYS);
    const int64_t dq_stride = tt__attention_padded(d);
    TT__K(attention_backward_rows)(t, x->first + span, n);
    seen_end = tt__attention_keys(a, x, span, n, &seen_from);
    if (a->window || x->blocks) memset(b->dq, 0, (size_t)(n * dq_stride) * sizeof(float));
    if (x->blocks) TT__K(attention_backward_blocks)(t, to, span, n);
    for (int64_t key = 0; key < key_end && !x->blocks; key += key_block) {
        int64_t keys = tt__min(key_block, key_end - key);
        const bool seen_now = key < seen_end && key + keys > seen_from;
        if (a->window && span && !seen_now) continue; /* earlier spans of queries have written the gradients
                                                         of these keys */
        if (seen_now) TT__K(attention_take_keys)(t, x->begin + key, keys, true);
        memset(b->dk, 0, (size_t)(keys * stride) * sizeof(float));
        memset(b->dv, 0, (size_t)(keys * stride) * sizeof(float));
        for (int64_t query = span; seen_now && query < span + n; query += query_block)
            TT__K(attention_backward_tile)(t, !a->window && key == 0, key, keys, span, query,
                                           tt__min(query_block, span + n - query));
        /* Earlier spans of queries have written gradients of the first `old` keys; the new gradients are
           added to those. */
        const int64_t seen = x->diagonal ? tt__max(0, tt__min(keys, span - key)) : keys,
                      old = span ? seen : 0;
        for (int64_t from = 0, end = old; from < keys; from = end, end = keys)
            TT__K(attention_put_keys)(t, to, key + from, from, end - from, from < old);
    }
    TT__K(attention_unpack)(&a->dq, a->query_at, x->first + span, n, column, d, a->scale, b->dq, dq_stride,
                            a->add_dq);
}

/* Computes the gradients of one sequence in one head of keys. If several heads of q share the head of keys,
   dk and dv stay in fp32 until the last head of q is done. */
TT__FN void TT__K(attention_backward_task)(void *arg, int64_t task, int thread)
{
    const TT__K(attention_call) *call = (const TT__K(attention_call) *)arg;
    const tt__attention_args *a = call->a;
    const int64_t first = task * a->group, d = a->head_size, stride = tt__attention_stride(d);
    TT__K(attention_task) t = TT__K(attention_task_of)(call, first, first / a->heads, true, thread);
    const int64_t column = t.head / a->group * d;
    TT__K(attention_sums) to = {a->dk, a->dv, t.x.begin, column, a->add_dk, a->add_dv};
    if (a->group > 1) {
        const tt__mat dk = {a->dk.data ? t.b.all_dk : NULL, TT_F32, t.x.length, d, stride};
        const tt__mat dv = {a->dv.data ? t.b.all_dv : NULL, TT_F32, t.x.length, d, stride};
        const TT__K(attention_sums) sums = {dk, dv, 0, 0, false, false};
        to = sums;
    }
    if (a->bf16 == TT__BF16_TILES) TT__K(tiles_begin)(32);
    for (int k = 0; k < a->group; k++, t.head++, to.add_dk = to.add_dv = true)
        for (int64_t span = 0; span == 0 || span < t.x.queries; span += TT__ATTENTION_SPAN)
            TT__K(attention_backward_span)(&t, &to, span, tt__min(TT__ATTENTION_SPAN, t.x.queries - span));
    if (a->bf16 == TT__BF16_TILES) TT__K(tiles_end)();
    if (a->group == 1) return;
    const int64_t row = t.x.begin, n = t.x.length;
    TT__K(attention_unpack)(&a->dk, NULL, row, n, column, d, 1, t.b.all_dk, stride, a->add_dk);
    TT__K(attention_unpack)(&a->dv, NULL, row, n, column, d, 1, t.b.all_dv, stride, a->add_dv);
}

/* Computes the backward of attention: writes or adds to dq, dk and dv. */
TT__FN void TT__K(attention_backward)(tt__pool *pool, const tt__attention_args *a)
{
    TT__K(attention_call) call = TT__K(attention_begin)(a);
    const int64_t tasks = a->seqs * (a->heads / a->group);
    if (a->seqs > 0) tt__run_tasks(pool, tasks, TT__K(attention_backward_task), &call);
}

#undef TT__ATTENTION_MR
#undef TT__ATTENTION_NV
