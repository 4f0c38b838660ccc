#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/linear/rules.h"
#include "overlap.h"

/* ---------------------------------------------------------------------------------------------------- join
   Makes products run together that would be one product if their operands were adjacent in memory
   (tt__is_one_product). The transient operands of these products become views of one value.
   tt__place_persistent makes parameters and persistent gradients adjacent. If the operands are not adjacent
   in the end, each product is launched alone. */

/* Largest distance, in instructions. Products further apart are not joined. Values whose first write or last
   read is further apart are not joined either, because both would then stay in memory for longer. */
enum { TT__TOGETHER = 32 };

/* Returns, for each storage, whether the storage must keep its own place in memory. A storage must keep
   its place if another stream or a collective uses the storage, if an instruction stores its result in the
   place of the storage, or if the storage is such a result in the place of another storage. The caller frees
   the array. NULL: out of memory. */
static bool *tt__never_joined(const tt_tape *t)
{
    bool *apart = (bool *)tt__calloc(t->ctx, sizeof *apart * (size_t)t->n_values);
    for (int k = 0; k < t->n_code && apart; k++) {
        const tt__instr *i = &t->code[k];
        const bool moves = i->stream || i->move.over || i->on_host || tt__stream_beside(t, i) ||
                           tt__is(i, TT__WAITS);
        for (int j = 0; j < TT__MAX_IN; j++) {
            const int32_t base = t->values[i->in[j]].base;
            bool replaced = (j == 0 && tt__is(i, TT__INPLACE0)) || (j == 1 && tt__is(i, TT__INPLACE1));
            replaced = replaced && t->values[base].reader == k;
            if (replaced) apart[t->values[i->out[0]].base] = true;
            if (replaced || moves) apart[base] = true;
        }
        for (int j = 0; j < TT__MAX_OUT && moves; j++) apart[t->values[i->out[j]].base] = true;
    }
    return apart;
}

/* Returns whether v is a contiguous, whole storage on the device, without slots or copies. */
static bool tt__is_plain(const tt_tape *t, int32_t v)
{
    const tt__tape_value *x = &t->values[v];
    return x->base == v && x->ld == x->shape.cols && x->slots < 2 && x->copies < 2 && !x->part.unit &&
           x->part.split == TT__WHOLE && x->space == TT__DEVICE;
}

/* Returns whether v may become a view of a joined value: v does not outlive the step, and the bytes of a row
   are a multiple of 16, because kernels need rows that are aligned to 16 bytes. */
static bool tt__may_be_joined(const tt_tape *t, int32_t v, int32_t root, const bool *apart)
{
    const tt__tape_value *x = &t->values[v];
    const bool passes = x->storage == TT__TRANSIENT || x->storage == TT__GRADIENT;
    const int64_t row = x->shape.cols * (int64_t)tt_dtype_bytes(x->shape.dtype);
    return passes && tt__is_plain(t, v) && x->views == 0 && x->writes == 1 && !x->persistent && !x->slot &&
           !x->saved && !x->ends && !x->keep && !x->block_end && !x->host_copy && v != root && !apart[v] &&
           row % 16 == 0;
}

/* Returns whether another storage may directly follow persistent storage v: whether v has no padding at its
   end. */
static bool tt__may_be_followed(const tt_tape *t, int32_t v)
{
    const tt__shape *x = &t->values[v].shape;
    const size_t bytes = (size_t)(x->rows * x->cols) * tt_dtype_bytes(x->dtype);
    return tt__is_plain(t, v) && tt__storage_bytes(&t->values[v]) == bytes;
}

/* Returns whether a and b, which have the same role in two products, may be adjacent in memory. Transient
   values must live at about the same time, so that joining them takes hardly more memory. */
static bool tt__may_lie_beside(const tt_tape *t, int32_t a, int32_t b, int32_t root, const bool *apart)
{
    const tt__tape_value *x = &t->values[a], *y = &t->values[b];
    if (a == b || x->storage != y->storage || x->persistent != y->persistent) return false;
    if (x->persistent) return tt__may_be_followed(t, a) && tt__may_be_followed(t, b);
    return tt__may_be_joined(t, a, root, apart) && tt__may_be_joined(t, b, root, apart) &&
           abs(x->producer - y->producer) <= TT__TOGETHER && abs(x->reader - y->reader) <= TT__TOGETHER;
}

/* Returns whether product b may run together with product a. */
static bool tt__may_join(const tt_tape *t, const tt__instr *a, const tt__instr *b, int32_t root,
                         const bool *apart)
{
    if (!tt__is_one_product(t, a, b)) return false;
    for (int role = 0; role < TT__ROLES; role++) {
        const int32_t x = tt__in_role(a, role), y = tt__in_role(b, role);
        if (role != tt__shared_role(a) && x && !tt__may_lie_beside(t, x, y, root, apart)) return false;
    }
    return true;
}

/* Moves the instruction at place `from` to place `to`. */
static void tt__move_instr(tt_tape *t, int from, int to)
{
    const tt__instr i = t->code[from];
    const int step = to < from ? -1 : 1;
    for (int k = from; k != to; k += step) t->code[k] = t->code[k + step];
    t->code[to] = i;
}

/* Moves instruction m directly after the instructions from *first to *last, or moves those directly before
   instruction m; updates *first and *last. Returns false if an instruction in between forbids both moves. */
static bool tt__bring_together(tt_tape *t, int *first, int *last, int m)
{
    const int many = *last - *first + 1;
    bool rises = true, sink = true;
    for (int k = *first; k <= *last; k++) if (tt__is_ordered(t, &t->code[k], &t->code[m])) return false;
    for (int n = *last + 1; n < m && (rises || sink); n++) {
        rises = rises && !tt__is_ordered(t, &t->code[n], &t->code[m]);
        for (int k = *first; k <= *last; k++) sink = sink && !tt__is_ordered(t, &t->code[k], &t->code[n]);
    }
    if (rises) tt__move_instr(t, m, *last + 1);
    for (int k = 0; k < many && sink && !rises; k++) tt__move_instr(t, *first, m - 1);
    if (sink && !rises) *first = m - many;
    if (rises || sink) *last = *first + many;
    return rises || sink;
}

/* Sorts products by the numbers of their weights, or of the gradients of their weights, and makes them run
   together. The arena has persistent values in the order of their numbers, and recomputed products are in the
   order of the products that they repeat. */
static void tt__order_products(tt_tape *t, int first, int last)
{
    for (int k = first + 1; k <= last; k++) {
        int to = k, role = 0;
        while (!tt__lies_below(&t->code[k], role)) role++;
        const int32_t weight = tt__in_role(&t->code[k], role);
        while (to > first && tt__in_role(&t->code[to - 1], role) > weight) to--;
        tt__move_instr(t, k, to);
    }
    for (int k = first; k <= last; k++) t->code[k].with_next = k < last;
}

/* Makes the values in role `role` (an operand or a result) of products `first` to `last` views of one new
   value. Marks persistent values instead, so that they become adjacent in memory. Returns false if out of
   memory. */
static bool tt__join_values(tt_tape *t, int first, int last, int role)
{
    const bool below = tt__lies_below(&t->code[first], role);
    const int32_t of_first = tt__in_role(&t->code[first], role);
    const tt__tape_value v = t->values[of_first];
    tt__shape whole = v.shape;
    int64_t at = 0;
    if (!of_first) return true;
    for (int k = first; k < last && v.persistent; k++) {
        const int32_t a = tt__in_role(&t->code[k], role), b = tt__in_role(&t->code[k + 1], role);
        if (a < b && !t->values[a].after) t->values[a].after = b;
    }
    if (v.persistent) return true;
    for (int k = first + 1; k <= last; k++) {
        const tt__shape *more = &t->values[tt__in_role(&t->code[k], role)].shape;
        if (below) whole.rows += more->rows;
        else whole.cols += more->cols;
    }
    const int32_t id = tt__new_value(t, &whole, v.storage, "%.60s ...", v.name);
    for (int k = first; k <= last && id; k++) {
        tt__tape_value *x = &t->values[tt__in_role(&t->code[k], role)];
        x->base = id;
        x->offset = at;
        x->ld = whole.cols;
        at += below ? x->shape.rows * whole.cols : x->shape.cols;
    }
    return id != 0;
}

static tt_status tt__pass_join(tt_tape *t, int32_t root)
{
    const int n = tt__index(t);
    bool *apart = tt__never_joined(t), ok = apart != NULL;
    for (int k = 0; k + 1 < n && ok; k++) {
        int first = k, last = k;
        if (!tt__is(&t->code[k], TT__PRODUCT) || t->code[k].with_next || (k && t->code[k - 1].with_next))
            continue;
        for (int m = k + 1; m < n && m <= last + TT__TOGETHER; m++)
            if (tt__may_join(t, &t->code[first], &t->code[m], root, apart))
                tt__bring_together(t, &first, &last, m);
        if (first == last) continue;
        tt__order_products(t, first, last);
        for (int role = 0; role < TT__ROLES && ok; role++)
            if (role != tt__shared_role(&t->code[first])) ok = tt__join_values(t, first, last, role);
        k -= first != k; /* visits this place again if the moves have put a later instruction there */
    }
    tt__free(t->ctx, apart);
    return ok ? TT_OK : TT_ERR_MEMORY;
}
