#pragma once
#include "../../base/base.h"
#include "../cpu_launch.h"

/* ---- the parts of collectives that all instruction sets share: all but sums by vectors ---- */

/* Sets *first to the first element of m in a member's shard; returns the number of elements in the shard. */
static int64_t tt__shard_of(const tt__launch *l, const tt__mat *m, bool root, int member, int64_t *first)
{
    return tt__shard(tt__elements(m), l->instr->move.unit, root, member, l->members, first);
}

static char *tt__element(const tt__mat *m, int64_t k)
{
    return (char *)m->data + (size_t)k * tt_dtype_bytes(m->dtype);
}

static void tt__copy_elements(const tt__mat *to, int64_t at, const tt__mat *from, int64_t first, int64_t n)
{
    char *y = tt__element(to, at);
    const char *x = tt__element(from, first);
    if (n > 0 && x != y) memcpy(y, x, (size_t)n * tt_dtype_bytes(to->dtype));
}

/* Calls fn(l, from, to, scratch) for chunks [from, to) of n elements, which are divided among the threads. fn
   must not use scratch. */
static tt_status tt__for_elements(const tt__launch *l, int64_t n, tt__rows_fn fn)
{
    return tt__for_chunks(l, n, 0, TT__CHUNK, 0, fn);
}

/* Copies elements [from, to) of out[0]: each from the out[0] of the member whose shard has the element. */
static void tt__spread_rows(const tt__launch *l, int64_t from, int64_t to, float *scratch)
{
    (void)scratch;
    for (int k = 0; k < l->members; k++) {
        int64_t first, n = tt__shard_of(l, &l->out[0], false, k, &first);
        const int64_t begin = tt__max(from, first), end = tt__min(to, first + n);
        tt__copy_elements(&l->out[0], begin, &l->peer_out[k], begin, end - begin);
    }
}

/* Copies elements [from, to) of out[0] from the shards of all members. The shard of a member is its in[0]. */
static void tt__all_gather_rows(const tt__launch *l, int64_t from, int64_t to, float *scratch)
{
    (void)scratch;
    for (int k = 0; k < l->members; k++) {
        int64_t first, n = tt__shard_of(l, &l->out[0], l->instr->move.root, k, &first);
        const int64_t begin = tt__max(from, first), end = tt__min(to, first + n);
        tt__copy_elements(&l->out[0], begin, &l->peer_in[k], begin - first, end - begin);
    }
}

/* Copies elements `[from, to)` of this member's shard: from in[0] of member 0 to this member's out[0]. */
static void tt__broadcast_rows(const tt__launch *l, int64_t from, int64_t to, float *scratch)
{
    int64_t first;
    (void)scratch;
    tt__shard_of(l, &l->out[0], false, l->me, &first);
    tt__copy_elements(&l->out[0], first + from, &l->peer_in[0], first + from, to - from);
}

static void tt__recv_rows(const tt__launch *l, int64_t from, int64_t to, float *scratch)
{
    (void)scratch;
    tt__copy_elements(&l->out[0], from, &l->peer_in[l->instr->move.from], from, to - from);
}

/* The operands of a tree of sums. x: the elements of each member; y: the elements to which the sum is added,
   or NULL; present: number of members that have elements. */
typedef struct tt__leaves {
    const char *x[TT__RANKS], *y;
    int present;
} tt__leaves;

static double tt__reduce_two(tt__reduce how, double a, double b)
{
    if (how == TT__SUM) return a + b;
    if (a != a || b != b) return NAN;
    return (how == TT__MAX ? a > b : a < b) ? a : b;
}

/* Reduces n f64 elements of all members' in[0], beginning with element `from`, by the tree of sums
   (src/ranks/threads.h). Writes or adds the results to out[0], beginning with element `to`. */
static void tt__reduce_doubles(const tt__launch *l, int64_t from, int64_t to, int64_t n)
{
    const tt__reduce how = l->instr->move.reduce;
    double *y = (double *)l->out[0].data + to, x[TT__RANKS];
    for (int64_t c = 0; c < n; c++) {
        for (int k = 0; k < l->present; k++) x[k] = ((const double *)l->peer_in[k].data)[from + c];
        for (int s = 1; s < l->present; s *= 2)
            for (int k = 0; k + s < l->present; k += 2 * s) x[k] = tt__reduce_two(how, x[k], x[k + s]);
        y[c] = l->add[0] ? tt__reduce_two(how, y[c], x[0]) : x[0];
    }
}
