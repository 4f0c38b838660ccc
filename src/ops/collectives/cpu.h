#pragma once
#include "../../base/base.h"
#include "../cpu_launch.h"
#include "cpu_shared.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "../../cpu/halves.h"
#include "../cpu_rows.h"

/* ----------------------------------------------------------------------------------------------- collectives
   A member is a rank that takes part in a collective. Each member reads the memory of the other members.
   Between the phases of a collective, all members wait at a barrier (src/run/). */

/* Returns the floats x rounded to a dtype. */
TT__INLINE tt__vf TT__K(rounded)(tt__vf x, const tt_dtype dtype)
{
    uint16_t h[TT__LANES];
    tt__vu u = (tt__vu)x;
    if (dtype == TT_F32) return x;
    if (dtype == TT_BF16) {
        tt__vi nan = (u & 0x7fffffff) > 0x7f800000;
        return (tt__vf)(TT__K(select)(nan, u | 0x400000, u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000);
    }
    TT__K(store_16)(h, x, TT_F16);
    return TT__K(load_16)(h, TT_F16);
}

TT__INLINE tt__vf TT__K(reduce_two)(const tt__reduce how, const tt_dtype dtype, tt__vf a, tt__vf b)
{
    if (how == TT__SUM) return TT__K(rounded)(a + b, dtype);
    tt__vf max = how == TT__MAX ? TT__K(max)(a, b) : TT__K(min)(a, b); /* TT__K(max) and TT__K(min) give b if
                                                                          a or b is NaN */
    return (tt__vf)TT__K(select)(a != a, (tt__vu)a, (tt__vu)max);
}

/* Loads a vector of member k's elements: n elements, beginning with element c. Prefetches far ahead, because
   another core may have written the elements last. */
TT__INLINE tt__vf TT__K(leaf)(const tt__leaves *t, int k, int64_t c, int64_t n, const tt_dtype dtype)
{
    __builtin_prefetch(t->x[k] + c * (dtype == TT_F32 ? 4 : 2) + 1024);
    return TT__K(load_as)(t->x[k], dtype, c, n);
}

TT__INLINE tt__vf TT__K(two_leaves)(const tt__leaves *t, int k, int64_t c, int64_t n, const tt__reduce how,
                                    const tt_dtype dtype)
{
    tt__vf a = TT__K(leaf)(t, k, c, n, dtype), b = TT__K(leaf)(t, k + 1, c, n, dtype);
    return TT__K(reduce_two)(how, dtype, a, b);
}

/* Computes a vector of n sums over all members by the tree of sums (src/ranks/threads.h), beginning with
   element c. count: t->present if t->present is 2 or 4, otherwise 0; as a constant, `count` lets the compiler
   unroll the loops. */
TT__INLINE tt__vf TT__K(tree)(const tt__leaves *t, int64_t c, int64_t n, const tt__reduce how,
                              const tt_dtype dtype, const int count)
{
    tt__vf x[TT__RANKS];
    x[0] = count ? TT__K(two_leaves)(t, 0, c, n, how, dtype) : TT__K(leaf)(t, 0, c, n, dtype);
    if (count == 4)
        x[0] = TT__K(reduce_two)(how, dtype, x[0], TT__K(two_leaves)(t, 2, c, n, how, dtype));
    for (int k = 1; !count && k < t->present; k++) x[k] = TT__K(leaf)(t, k, c, n, dtype);
    for (int s = 1; !count && s < t->present; s *= 2)
        for (int k = 0; k + s < t->present; k += 2 * s)
            x[k] = TT__K(reduce_two)(how, dtype, x[k], x[k + s]);
    if (t->y) x[0] = TT__K(reduce_two)(how, dtype, TT__K(load_as)(t->y, dtype, c, n), x[0]);
    return x[0];
}

TT__INLINE void TT__K(reduce_as)(const tt__leaves *t, void *y, int64_t n, const tt__reduce how,
                                 const tt_dtype dtype, const int count)
{
    int64_t c = 0;
    for (; c + TT__LANES <= n; c += TT__LANES)
        TT__K(store_as)(y, dtype, c, TT__K(tree)(t, c, TT__LANES, how, dtype, count), TT__LANES);
    if (c < n) TT__K(store_as)(y, dtype, c, TT__K(tree)(t, c, n - c, how, dtype, count), n - c);
}

TT__INLINE void TT__K(reduce_many)(const tt__leaves *t, void *y, int64_t n, const tt__reduce how,
                                   const tt_dtype dtype)
{
    if (t->present == 2) TT__K(reduce_as)(t, y, n, how, dtype, 2);
    else if (t->present == 4) TT__K(reduce_as)(t, y, n, how, dtype, 4);
    else TT__K(reduce_as)(t, y, n, how, dtype, 0);
}

/* Reduces n elements of all members' in[0], beginning with element `from`, by the tree of sums
   (src/ranks/threads.h). Writes or adds the results to out[0], beginning with element `to`. */
TT__OUTLINE void TT__K(reduce)(const tt__launch *l, int64_t from, int64_t to, int64_t n)
{
    const tt__reduce how = l->instr->move.reduce;
    const tt_dtype dtype = l->out[0].dtype;
    tt__leaves t;
    char *y = tt__element(&l->out[0], to);
    t.present = l->present;
    for (int k = 0; k < t.present; k++) t.x[k] = tt__element(&l->peer_in[k], from);
    t.y = l->add[0] ? y : NULL;
    if (dtype == TT__F64) tt__reduce_doubles(l, from, to, n);
    else if (how != TT__SUM) TT__K(reduce_as)(&t, y, n, how, dtype, 0);
    else TT__BY_FLOAT(dtype, D, TT__K(reduce_many)(&t, y, n, TT__SUM, D));
}

/* Computes elements [from, to) of this member's shard. */
TT__ROWS_FN(all_reduce_rows)
{
    int64_t first;
    tt__shard_of(l, &l->out[0], false, l->me, &first);
    TT__K(reduce)(l, first + from, first + from, to - from);
}

TT__ROWS_FN(reduce_scatter_rows)
{
    int64_t first;
    tt__shard_of(l, &l->in[0], l->instr->move.root, l->me, &first);
    TT__K(reduce)(l, first + from, from, to - from);
}

TT__ROWS_FN(reduce_rows) { TT__K(reduce)(l, from, from, to - from); }

TT__FN tt_status TT__K(run_ALL_REDUCE)(const tt__launch *l)
{
    int64_t first, n = tt__shard_of(l, &l->out[0], false, l->me, &first);
    if (!l->present) return TT_OK;
    if (l->phase == TT__REDUCE_PHASE) return tt__for_elements(l, n, TT__K(all_reduce_rows));
    return tt__for_elements(l, tt__elements(&l->out[0]), tt__spread_rows);
}

TT__FN tt_status TT__K(run_REDUCE_SCATTER)(const tt__launch *l)
{
    int64_t first, n = tt__shard_of(l, &l->in[0], l->instr->move.root, l->me, &first);
    return l->present ? tt__for_elements(l, n, TT__K(reduce_scatter_rows)) : TT_OK;
}

TT__FN tt_status TT__K(run_ALL_GATHER)(const tt__launch *l)
{
    return tt__for_elements(l, tt__elements(&l->out[0]), tt__all_gather_rows);
}

TT__FN tt_status TT__K(run_BROADCAST)(const tt__launch *l)
{
    int64_t first, n = tt__shard_of(l, &l->out[0], false, l->me, &first);
    if (l->out[0].data == l->peer_in[0].data) return TT_OK; /* this member has the whole tensor already */
    if (l->phase == TT__REDUCE_PHASE) return tt__for_elements(l, n, tt__broadcast_rows);
    return tt__for_elements(l, tt__elements(&l->out[0]), tt__spread_rows);
}

TT__FN tt_status TT__K(run_SUM_SLOTS)(const tt__launch *l)
{
    return l->present ? tt__for_elements(l, tt__elements(&l->out[0]), TT__K(reduce_rows)) : TT_OK;
}

/* Does nothing, because the RECV of the receiving member reads the sender's memory. */
TT__FN tt_status TT__K(run_SEND)(const tt__launch *l) { (void)l; return TT_OK; }

TT__FN tt_status TT__K(run_RECV)(const tt__launch *l)
{
    if (l->me != l->instr->move.to) return TT_OK;
    return tt__for_elements(l, tt__elements(&l->out[0]), tt__recv_rows);
}
