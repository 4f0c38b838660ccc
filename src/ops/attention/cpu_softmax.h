#pragma once
#include "../../base/base.h"
#include "../scratch.h"
#include "cpu_shared.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "cpu_blocks.h"

/* ---- softmax ---- */

/* A call of attention: its arguments, and constants that all tasks share. */
typedef struct TT__K(attention_call) {
    const tt__attention_args *a;
    int64_t longest;
    float query_scale;  /* scale * log2 e                       */
    float keep_scale;   /* 1 / (1 - p), p: rate of dropout */
    uint32_t either[4]; /* masks for comparing random bits with the threshold of dropout
                           (tt__attention_either) */
    uint64_t keys[2 * TT__DRAW_ROUNDS];
} TT__K(attention_call);

/* A task: one head of one sequence, and the buffers of the thread that works on it. */
typedef struct TT__K(attention_task) {
    const TT__K(attention_call) *call;
    const tt__attention_args *a;
    int head;
    tt__attention_sequence x;
    tt__attention_buffers b;
} TT__K(attention_task);

/* A vector of queries, one in each lane, and the keys of a block that they see. Keys are counted in the block
   unless a field says otherwise. */
typedef struct TT__K(attention_lanes) {
    tt__vi first, last;   /* the first and the last key of the block that each lane sees */
    int64_t skip;         /* no lane sees keys before this key                         */
    int64_t from, seen;   /* no lane sees keys outside [from, seen); from: a multiple of 8 */
    int64_t whole, full;  /* all lanes see the keys in [whole, full) */
    tt__vu row;           /* each lane's row of the batch                              */
    int64_t first_key;    /* the block's first key, counted in the sequence            */
    int32_t head;
    bool drop;
    const uint64_t *keys; /* keys of Philox's rounds                                   */
    const uint32_t *either;
} TT__K(attention_lanes);

/* Returns the facts about a vector of queries, one query in each lane: what keys the lanes see, and how
   dropout is drawn. query: the first lane's query, counted in the sequence. */
TT__INLINE TT__K(attention_lanes) TT__K(attention_lanes_at)(const TT__K(attention_task) *t, int64_t first_key,
                                                            const TT__K(attention_block) *s, int64_t query)
{
    const tt__attention_args *a = t->a;
    const int64_t keys = s->keys;
    TT__K(attention_lanes) l;
    l.full = keys;
    l.seen = l.whole = 0;
    l.from = a->window ? keys : 0;
    l.skip = s->skip;
    l.first = (tt__vi)TT__K(splat_u)(0);
    for (int i = 0; i < TT__LANES; i++) {
        int64_t row = t->x.begin + query + i;
        if (a->query_row) row = a->query_row[t->x.first + tt__min(query + i, t->x.queries - 1)];
        int64_t last = a->causal ? tt__max(-1, tt__min(keys, row - t->x.begin - first_key)) : keys;
        l.row[i] = (uint32_t)row;
        if (a->window) {
            const int64_t at = row - t->x.begin - first_key;
            const int64_t first = tt__max(0, tt__min(keys, at - a->window + 1));
            if (!a->causal) last = tt__max(-1, tt__min(keys, at + a->window - 1));
            l.first[i] = (int32_t)first;
            l.from = tt__min(l.from, first);
            l.whole = tt__max(l.whole, first);
        }
        l.last[i] = (int32_t)last;
        l.full = tt__min(l.full, last + 1);
        l.seen = tt__max(l.seen, tt__min(keys, last + 1));
    }
    if (t->x.from > first_key) {
        l.whole = t->x.from - first_key;
        l.first = (tt__vi)TT__K(splat_u)((uint32_t)l.whole);
    }
    l.from = tt__max(l.skip, l.from & ~(int64_t)7);
    l.first_key = first_key;
    l.head = a->first_head + t->head;
    l.drop = a->dropout > 0;
    l.keys = t->call->keys;
    l.either = t->call->either;
    return l;
}

/* Returns, in bits 24 to 31 of each lane, whether dropout keeps the weights for keys r ... r + 7 of the
   block; r is a multiple of 8. One draw serves 16 keys: the call for the first 8 keys leaves the draw in the
   upper half of *drawn, where the call for the next 8 keys finds it. */
TT__INLINE tt__vu TT__K(attention_draw)(const TT__K(attention_lanes) *l, int64_t r, tt__vu *drawn)
{
    const int64_t key = l->first_key + r;
    if (key % 16 == 0 || r == l->from) {
        tt__vu x[4], kept = TT__K(splat_u)(0xffffffff);
        TT__K(philox)(l->keys, l->row, TT__K(splat_u)((uint32_t)(key / 16)),
                      TT__K(splat_u)((uint32_t)l->head), TT__K(splat_u)(0), x);
        TT__EACH(b, 4) kept = (x[b] & kept) | (l->either[b] & (x[b] | kept));
        kept <<= 16;
        TT__EACH(b, 4) kept = (x[b] & kept) | (l->either[b] & (x[b] | kept));
        *drawn = kept;
    }
    return key % 16 ? *drawn : *drawn << 8;
}

TT__INLINE tt__vf TT__K(attention_and)(tt__vf x, tt__vi mask) { return (tt__vf)((tt__vi)x & mask); }

/* Returns a mask of the lanes where dropout keeps the weight for one key. kept: the result of attention_draw
   for 8 keys; i: the key's number among the 8 keys, from 0. */
TT__INLINE tt__vi TT__K(attention_keep)(tt__vu kept, int i) { return (tt__vi)(kept << (7 - i)) >> 31; }

/* Returns a mask of the lanes that see key r. */
TT__INLINE tt__vi TT__K(attention_sees)(const TT__K(attention_lanes) *l, int64_t r)
{
    return (l->last >= (int32_t)r) & (l->first <= (int32_t)r);
}

/* Returns x, or `other` in the lanes that do not see key r. */
TT__INLINE tt__vf TT__K(attention_visible)(const TT__K(attention_lanes) *l, int64_t r, tt__vf x, tt__vf other)
{
    const tt__vi visible = TT__K(attention_sees)(l, r);
    return (tt__vf)(((tt__vi)x & visible) | ((tt__vi)other & ~visible));
}

/* ALiBi's slope of a head. slope: the slope or, if ALiBi is rounded, only the power of two in it. digits: the
   slope divided by that power of two, or 0 if ALiBi is not rounded. */
typedef struct TT__K(attention_fall) { float slope, digits; } TT__K(attention_fall);

/* Returns digits * row, where row is counted in the sequence, with the roundings to bf16 of transformers. */
TT__INLINE float TT__K(attention_rounded)(float digits, int64_t row)
{
    return tt__from_bf16(tt__to_bf16(digits * tt__from_bf16(tt__to_bf16((float)row))));
}

/* Subtracts `slope` times the distance of query and key from the scores of a vector of queries. tile: the
   first of the vector's columns in the tile of scores; begin: the sequence's first row of the batch. */
TT__INLINE void TT__K(attention_alibi)(const TT__K(attention_lanes) *l, int64_t begin,
                                       const TT__K(attention_fall) *fall, float *tile)
{
    tt__vf at = __builtin_convertvector((tt__vi)(l->row - (uint32_t)(begin + l->first_key)), tt__vf);
    for (int i = 0; i < TT__LANES && fall->digits != 0; i++)
        at[i] = TT__K(attention_rounded)(fall->digits, (int64_t)l->row[i] - begin);
    for (int64_t r = l->from; r < l->seen; r++) {
        const float key = fall->digits == 0 ? (float)r
                        : TT__K(attention_rounded)(fall->digits, l->first_key + r);
        const tt__vf ahead = at - key, x = TT__K(load)(tile + r * TT__ATTENTION_TILE);
        TT__K(store)(tile + r * TT__ATTENTION_TILE, x - TT__K(max)(ahead, -ahead) * fall->slope);
    }
}

/* Turns the scores of a vector of queries into weights, and updates each query's running max and sum. tile:
   the first of the vector's columns in the tile. Returns the factors by which the queries' earlier sums must
   be multiplied. */
TT__INLINE tt__vf TT__K(attention_softmax)(const bool dropout, const TT__K(attention_lanes) *l, int64_t keys,
                                           float *tile, float *max, float *sum)
{
    const tt__vf lowest = TT__K(splat)(-FLT_MAX);
    tt__vf old = TT__K(load)(max), m0 = old, m1 = old, total0 = TT__K(zero)(), total1 = total0;
    tt__vu drawn = TT__K(splat_u)(0);
    int64_t r = l->from;
    for (; r < tt__min(l->whole, l->seen); r++) {
        tt__vf x = TT__K(load)(tile + r * TT__ATTENTION_TILE);
        m0 = TT__K(max)(m0, TT__K(attention_visible)(l, r, x, lowest));
    }
    for (; r + 2 <= l->full; r += 2) {
        m0 = TT__K(max)(m0, TT__K(load)(tile + r * TT__ATTENTION_TILE));
        m1 = TT__K(max)(m1, TT__K(load)(tile + (r + 1) * TT__ATTENTION_TILE));
    }
    for (; r < l->seen; r++) {
        tt__vf x = TT__K(load)(tile + r * TT__ATTENTION_TILE);
        m0 = TT__K(max)(m0, TT__K(attention_visible)(l, r, x, lowest));
    }
    m0 = TT__K(max)(m0, m1);
    for (r = l->skip; r < l->from; r++) TT__K(store)(tile + r * TT__ATTENTION_TILE, TT__K(zero)());
    for (r = l->from; r < l->seen; r += 8) {
        tt__vu kept;
        float *t = tile + r * TT__ATTENTION_TILE;
        if (dropout) kept = TT__K(attention_draw)(l, r, &drawn);
        if (r >= l->whole && r + 8 <= l->full) {
            TT__EACH(i, 8) {
                tt__vf p = TT__K(exp2)(TT__K(load)(t + i * TT__ATTENTION_TILE) - m0);
                if (i & 1) total1 += p;
                else total0 += p;
                if (dropout) p = TT__K(attention_and)(p, TT__K(attention_keep)(kept, i));
                TT__K(store)(t + i * TT__ATTENTION_TILE, p);
            }
        } else {
            for (int i = 0; i < 8 && r + i < l->seen; i++) {
                tt__vf p = TT__K(exp2)(TT__K(load)(t + i * TT__ATTENTION_TILE) - m0);
                p = TT__K(attention_and)(p, TT__K(attention_sees)(l, r + i));
                total0 += p;
                if (dropout) p = TT__K(attention_and)(p, TT__K(attention_keep)(kept, i));
                TT__K(store)(t + i * TT__ATTENTION_TILE, p);
            }
        }
    }
    for (r = l->seen; r < keys; r++) TT__K(store)(tile + r * TT__ATTENTION_TILE, TT__K(zero)());
    tt__vf correction = TT__K(exp2)(old - m0);
    TT__K(store)(max, m0);
    TT__K(store)(sum, TT__K(fma)(TT__K(load)(sum), correction, total0 + total1));
    return correction;
}

/* Turns scores (`weights`) into weights after dropout, and the gradients of these weights (`dscores`) into
   gradients of the scores. A score's gradient is `p * (g - delta)`, where p is the weight before dropout,
   and g is the weight's gradient if dropout keeps the weight, otherwise 0. */
TT__INLINE void TT__K(attention_softmax_backward)(const bool dropout, const TT__K(attention_lanes) *l,
                                                  int64_t keys, float *weights, float *dscores,
                                                  const float *lse, const float *delta)
{
    tt__vf log_sum = TT__K(load)(lse), dl = TT__K(load)(delta);
    tt__vu drawn = TT__K(splat_u)(0);
    for (int64_t r = l->skip; r < l->from; r++) {
        TT__K(store)(weights + r * TT__ATTENTION_TILE, TT__K(zero)());
        TT__K(store)(dscores + r * TT__ATTENTION_TILE, TT__K(zero)());
    }
    for (int64_t r = l->from; r < l->seen; r += 8) {
        tt__vu kept;
        float *w = weights + r * TT__ATTENTION_TILE, *ds = dscores + r * TT__ATTENTION_TILE;
        if (dropout) kept = TT__K(attention_draw)(l, r, &drawn);
        if (r >= l->whole && r + 8 <= l->full) {
            TT__EACH(i, 8) {
                tt__vf p = TT__K(exp2)(TT__K(load)(w + i * TT__ATTENTION_TILE) - log_sum);
                tt__vf dp = TT__K(load)(ds + i * TT__ATTENTION_TILE);
                tt__vi keep;
                if (dropout) {
                    keep = TT__K(attention_keep)(kept, i);
                    dp = TT__K(attention_and)(dp, keep);
                }
                TT__K(store)(ds + i * TT__ATTENTION_TILE, p * (dp - dl));
                TT__K(store)(w + i * TT__ATTENTION_TILE, dropout ? TT__K(attention_and)(p, keep) : p);
            }
        } else {
            for (int i = 0; i < 8 && r + i < l->seen; i++) {
                tt__vf p = TT__K(exp2)(TT__K(load)(w + i * TT__ATTENTION_TILE) - log_sum);
                tt__vf dp = TT__K(load)(ds + i * TT__ATTENTION_TILE);
                tt__vi visible = TT__K(attention_sees)(l, r + i), keep = visible;
                if (dropout) keep &= TT__K(attention_keep)(kept, i);
                dp = TT__K(attention_and)(dp, keep);
                TT__K(store)(ds + i * TT__ATTENTION_TILE, TT__K(attention_and)(p * (dp - dl), visible));
                TT__K(store)(w + i * TT__ATTENTION_TILE, TT__K(attention_and)(p, keep));
            }
        }
    }
    for (int64_t r = l->seen; r < keys; r++) {
        TT__K(store)(weights + r * TT__ATTENTION_TILE, TT__K(zero)());
        TT__K(store)(dscores + r * TT__ATTENTION_TILE, TT__K(zero)());
    }
}
