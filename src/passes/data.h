#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/collectives/rules.h"
#include "verify.h"
#include "precision.h"
#include "step.h"

/* --------------------------------------------------------------------------------------------------- data
   Divides a step over data ranks: shards gradients, optimizer state and parameters, and inserts collectives.
   See src/ranks/. */

enum { TT__SLICE = 16 }; /* in elements: a cache line of f32. Shards begin at multiples of TT__SLICE */

/* Returns a view of this rank's shard of the replicated value v; 0 after tt__tape_fail. */
static int32_t tt__shard_view(tt_tape *t, int32_t v, const tt__part *part)
{
    const tt__shape shape = tt__shard_shape(t, t->values[v].shape.dtype, part);
    int32_t id = tt__new_view(t, v, &shape, 0, shape.cols, t->values[v].name);
    if (!id) return 0;
    t->values[id].part = *part;
    t->values[id].slot = t->values[v].slot;
    return id;
}

/* Returns a view of slot number k of storage v; 0 after tt__tape_fail. */
static int32_t tt__slot_view(tt_tape *t, int32_t v, int k)
{
    const tt__tape_value x = t->values[v];
    int32_t id = tt__new_view(t, v, &x.shape, 0, x.ld, x.name);
    if (id) t->values[id].slot = k + 1;
    return id;
}

/* Returns the collective `op` over the data ranks that reads x and writes y. part: the shard that x or y is;
   NULL or unit 0: x and y are whole tensors. */
static tt__instr tt__data_move(int op, int32_t x, int32_t y, const tt__part *part)
{
    tt__instr i = tt__instr_of(op, x, y);
    i.move.over = TT__OVER_DATA;
    i.move.unit = part && part->unit ? part->unit : (int64_t)TT__SLICE;
    i.move.root = part && part->unit && part->root;
    i.always = true;
    return i;
}

/* Returns the collective that sums x over the data ranks into y. y is this rank's shard of the sum; if
   part->unit is 0, y is the whole sum. */
static tt__instr tt__data_sum(const tt__part *part, int32_t x, int32_t y)
{
    return tt__data_move(part->unit ? (int)TT__OP_REDUCE_SCATTER : (int)TT__OP_ALL_REDUCE, x, y, part);
}

/* Appends an instruction that runs once a round or once a step (tt__segment). together: the instruction runs
   together with the instruction before if both have the same op and slot. */
static bool tt__append_step(tt_tape *t, const tt__instr *i, bool together)
{
    tt__instr *to = tt__append(t, i->op);
    if (!to) return false;
    *to = *i;
    to->segment = i->segment == TT__EACH_LAP ? TT__EACH_LAP : TT__EACH_STEP;
    const bool alike = t->n_code > 1 && to[-1].op == i->op && to[-1].segment == to->segment;
    if (together && alike && to[-1].slot == i->slot) to[-1].with_next = true;
    return true;
}

static tt__instr tt__sum_slots(int32_t x, int32_t y, tt__segment segment)
{
    tt__instr i = tt__instr_of(TT__OP_SUM_SLOTS, x, y);
    i.move.over = TT__OVER_SLOTS;
    i.move.unit = TT__SLICE;
    i.segment = segment;
    return i;
}

/* Appends part number `stage` of the sum of v at the end of a step; the parts are no stages of a pipeline. v
   is a storage of gradients or of counts, with a slot for each leaf. Parts 0 and 1 sum slot k over the data
   ranks: part 0 if each rank needs only its shard of the sum, part 1 if each rank needs the whole sum. Part 2
   sums the slots of each rank. The last part that is needed writes `total` or, if `total` is 0, v. */
static bool tt__sum_leaves_of(tt_tape *t, int32_t v, int32_t total, const tt__part *part, int stage, int k)
{
    int32_t x = t->slots > 1 ? tt__slot_view(t, v, k) : v, y = x;
    if (x && part->unit) y = tt__shard_view(t, x, part);
    if (!x || !y) return false;
    if (stage < 2) {
        tt__instr sum = tt__data_sum(part, x, t->slots == 1 && total ? total : y);
        sum.slot = k + 1;
        return tt__append_step(t, &sum, true);
    }
    tt__instr sum = tt__sum_slots(y, total ? total : y, TT__EACH_STEP);
    return tt__append_step(t, &sum, false);
}

/* Appends the sums of gradients over data ranks and slots at the end of a step. Gives each trained
   parameter's gradient a slot for each leaf of the tree of sums, and makes the sum the `grad` of the
   parameter. */
static tt_status tt__sum_steps(tt_tape *t)
{
    const int values = t->n_values;
    const tt__part whole = {TT__WHOLE, false, 0, 0};
    bool ok = true;
    for (int32_t v = 1; v < values; v++)
        if (tt__is_trained(t, v)) t->values[t->values[v].grad].slots = t->slots;
    for (int k = 0; k < t->slots; k++)
        for (int stage = 0; stage < 2 && t->data > 1; stage++) {
            for (int32_t v = 1; v < values && ok; v++) {
                if (!tt__is_trained(t, v)) continue;
                const tt__part part = tt__data_part(t, v);
                if ((part.unit == 0) != stage) continue;
                ok = tt__sum_leaves_of(t, t->values[v].grad, 0, &part, stage, k);
            }
            if (stage && ok && t->counted) ok = tt__sum_leaves_of(t, t->counted, t->totals, &whole, stage, k);
        }
    for (int32_t v = 1; v < values && ok; v++) {
        if (!tt__is_trained(t, v)) continue;
        const tt__part part = tt__data_part(t, v);
        const int32_t g = t->values[v].grad;
        if (t->slots > 1) ok = tt__sum_leaves_of(t, g, 0, &part, 2, 0);
        int32_t y = t->slots > 1 ? tt__slot_view(t, g, 0) : g;
        if (y && t->data > 1 && part.unit) y = tt__shard_view(t, y, &part);
        t->values[v].grad = y;
        ok = ok && y;
    }
    if (ok && t->slots > 1 && t->counted) ok = tt__sum_leaves_of(t, t->counted, t->totals, &whole, 2, 0);
    return ok ? TT_OK : TT_ERR_MEMORY;
}

/* Makes a persistent storage for the sum of gradients like g. If `slots` is above 1, the storage has a slot
   for each leaf of the tree of sums on a rank. `part` is the shard of g that the storage holds. */
static int32_t tt__new_sum(tt_tape *t, int32_t g, const tt__part *part, int slots)
{
    const tt__tape_value *like = &t->values[g];
    const tt__shape shape = part->unit ? tt__shard_shape(t, like->shape.dtype, part) : like->shape;
    int32_t id = tt__new_value(t, &shape, TT__GRADIENT, slots > 1 ? "leaves of %.60s" : "sum of %.60s",
                               like->name);
    if (!tt__value_like(t, g, id)) return 0;
    tt__tape_value *x = &t->values[id];
    x->param = t->values[g].param;
    x->part = *part;
    x->slots = slots;
    x->persistent = true;
    return id;
}

/* Returns whether the data ranks sum the gradient of parameter v together with other gradients, at the end of
   each micro-batch's backward. If the backward updates parameters, only small gradients wait for the end of
   the backward. */
static bool tt__sums_at_end(const tt_tape *t, int32_t v)
{
    const tt__shape *s = &t->values[v].shape;
    const bool small = s->rows * s->cols < TT__PIECES_FROM;
    return t->data > 1 && !tt__data_part(t, v).unit && (small || !t->early);
}

/* Inserts the sums over data ranks that run in each micro-batch. The ranks sum a gradient directly after its
   last contribution, and add the result to the sum of earlier micro-batches. Gradients that tt__sums_at_end
   names are summed together at the end of the backward. persist: steps have several micro-batches. */
static tt_status tt__sum_micros(tt_tape *t, bool persist)
{
    const int values = t->n_values, n = tt__index(t);
    int last = 0; /* number of the last sum inserted at the end of the backward */
    int32_t *leaves = tt__new_map(t); /* for each parameter: storage of its gradient's sum or, if a rank has
                                         several slots, of the leaves */
    bool ok = leaves != NULL;
    const tt__part whole = {TT__WHOLE, false, 0, 0};
    for (int32_t k = 1; k < 2 * values && ok; k++) {
        const int32_t v = k % values; /* number of a value; 0: none */
        const bool at_end = k >= values; /* the second half of the loop makes the sums at the end */
        if (!v || !tt__is_trained(t, v) || tt__sums_at_end(t, v) != at_end) continue;
        const tt__part part = tt__data_part(t, v);
        const int32_t g = t->values[v].grad, sum = tt__new_sum(t, g, &part, 1);
        leaves[v] = t->slots > 1 && sum ? tt__new_sum(t, g, &part, t->slots) : sum;
        tt__instr i = tt__data_sum(&part, g, leaves[v]);
        if (t->data == 1) {
            i = tt__instr_of(TT__OP_SCALE, g, leaves[v]);
            i.attr.scale = 1;
        }
        i.backward = true;
        t->values[sum].persistent = persist;
        if (persist && t->slots == 1) i.add_later = 1;
        int at = t->values[t->values[g].base].writer;
        while (t->code[at].with_next) at++; /* do not separate instructions that run together */
        const int made = leaves[v] ? tt__insert(t, at_end ? n : at + 1, &i) : 0;
        if (at_end && last) t->code[last].with_next = true;
        if (at_end) last = made;
        t->values[v].grad = sum;
        ok = made != 0;
    }
    if (t->early && ok) { /* the first update in the backward needs the counts of all ranks */
        tt__instr sum = tt__data_sum(&whole, t->counted, t->totals);
        ok = tt__insert(t, t->values[t->counted].writer + 1, &sum) != 0;
    }
    ok = ok && tt__settle(t, n) == TT_OK;
    for (int32_t v = 1; v < values && ok && t->slots > 1; v++) {
        if (!tt__is_trained(t, v)) continue;
        const int32_t first = tt__slot_view(t, leaves[v], 0);
        tt__instr i = tt__sum_slots(first, t->values[v].grad, TT__EACH_LAP);
        i.add_later = 1;
        ok = first && tt__append_step(t, &i, false);
    }
    tt__free(t->ctx, leaves);
    for (int k = 0; k < t->slots && ok && t->data > 1 && !t->early; k++)
        ok = tt__sum_leaves_of(t, t->counted, t->totals, &whole, 1, k);
    if (ok && t->slots > 1) ok = tt__sum_leaves_of(t, t->counted, t->totals, &whole, 2, 0);
    return ok ? TT_OK : TT_ERR_MEMORY;
}

/* Inserts the sums of gradients over data ranks and leaves. persist: steps have several micro-batches. */
static tt_status tt__pass_sums(tt_tape *t, bool persist)
{
    if (t->sums_micros && (t->data > 1 || t->slots > 1 || persist)) return tt__sum_micros(t, persist);
    return t->data > 1 || t->slots > 1 ? tt__sum_steps(t) : TT_OK;
}

/* For each storage, a list of the operands that read it or a view of it, in the order of the instructions.
   Operand j of instruction k has the number 1 + k * TT__MAX_IN + j. first[v]: first operand in the list of
   storage v; next[x]: the operand after operand x; 0: none. */
typedef struct tt__readers { int *first, *next; } tt__readers;

static bool tt__find_readers(const tt_tape *t, int n, tt__readers *r)
{
    r->first = (int *)tt__calloc(t->ctx, sizeof *r->first * (size_t)t->n_values);
    r->next = (int *)tt__alloc(t->ctx, sizeof *r->next * ((size_t)n * TT__MAX_IN + 1));
    for (int x = n * TT__MAX_IN; x > 0 && r->first && r->next; x--) {
        const int32_t v = t->code[(x - 1) / TT__MAX_IN].in[(x - 1) % TT__MAX_IN];
        if (!v) continue;
        r->next[x] = r->first[t->values[v].base];
        r->first[t->values[v].base] = x;
    }
    return r->first && r->next;
}

/* Returns whether operand x (numbered as in tt__readers) needs a parameter whole, in the backward or, if not
   `backward`, the forward. */
static bool tt__reads_whole(const tt_tape *t, int x, bool backward)
{
    const tt__instr *i = &t->code[(x - 1) / TT__MAX_IN];
    const bool casts_shard = tt__is(i, TT__CASTS) && t->values[i->out[0]].part.unit;
    return i->segment == TT__EACH_MICRO && i->backward == backward && !casts_shard;
}

/* In the backward or, if not `backward`, in the forward: lets the operands that need parameter v whole read w
   instead, and turns views of v into views of w. Returns the first instruction with such an operand; -1:
   none; -2: out of memory. */
static int tt__read_instead(tt_tape *t, const tt__readers *r, bool backward, int32_t v, int32_t w)
{
    int first = -1;
    for (int x = r->first[v]; x; x = r->next[x]) {
        const int k = (x - 1) / TT__MAX_IN;
        int32_t *in = &t->code[k].in[(x - 1) % TT__MAX_IN];
        if (!tt__reads_whole(t, x, backward)) continue;
        *in = *in == v ? w : tt__view_like(t, *in, w, t->values[*in].offset);
        if (!*in) return -2;
        if (first < 0) first = k;
    }
    return first;
}

/* Returns whether the backward or, if not `backward`, the forward has an operand that needs v whole. */
static bool tt__is_read_whole(const tt_tape *t, const tt__readers *r, bool backward, int32_t v)
{
    for (int x = r->first[v]; x; x = r->next[x]) if (tt__reads_whole(t, x, backward)) return true;
    return false;
}

/* Makes each cast of the sharded parameter v cast this rank's shard only, and gathers the results. */
static bool tt__gather_casts(tt_tape *t, const tt__readers *r, int32_t v)
{
    for (int x = r->first[v]; x; x = r->next[x]) {
        const int k = (x - 1) / TT__MAX_IN;
        tt__instr cast = t->code[k];
        if (cast.op < 0 || !tt__is(&cast, TT__CASTS) || cast.in[0] != v) continue;
        if (cast.attr.rounding) continue; /* needs the whole parameter */
        const tt__part part = t->values[v].part;
        const tt__shape shape = tt__shard_shape(t, t->values[cast.out[0]].shape.dtype, &part);
        const int32_t shard = tt__new_value(t, &shape, TT__TRANSIENT, "%s", t->values[cast.out[0]].name);
        if (!shard) return false;
        t->values[shard].part = part;
        tt__instr gather = tt__data_move(TT__OP_ALL_GATHER, shard, cast.out[0], &part);
        gather.backward = cast.backward;
        cast.out[0] = shard;
        cast.always = true;
        tt__put(t, k, &cast);
        if (!tt__insert(t, k + 1, &gather)) return false;
    }
    return true;
}

/* Gathers parameters that are sharded over the data ranks (ZeRO 3): once before the forward reads them, and
   again before the backward does. */
static tt_status tt__pass_gather(tt_tape *t)
{
    const int values = t->n_values, n = tt__index(t);
    tt__readers r = {NULL, NULL};
    bool ok = t->zero != 3 || tt__find_readers(t, n, &r);
    for (int32_t v = 1; v < values && t->zero == 3 && ok; v++) {
        const tt__tape_value x = t->values[v];
        const tt__part part = tt__data_part(t, v);
        if (x.storage != TT__PARAMETER || x.base != v || part.unit == x.part.unit) continue;
        t->values[v].shape = tt__shard_shape(t, x.shape.dtype, &part);
        t->values[v].ld = t->values[v].shape.cols;
        t->values[v].part = part;
        ok = tt__gather_casts(t, &r, v);
        for (int backward = 0; backward < 2 && ok; backward++) {
            if (!tt__is_read_whole(t, &r, backward, v)) continue;
            const int32_t w = tt__new_value(t, &x.shape, TT__TRANSIENT, "%s", x.name);
            tt__instr gather = tt__data_move(TT__OP_ALL_GATHER, v, w, &part);
            t->values[w].part.split = part.split;
            gather.backward = backward;
            const int k = w ? tt__read_instead(t, &r, backward, v, w) : -2;
            ok = k >= 0 && tt__insert(t, k, &gather);
        }
    }
    tt__free(t->ctx, r.first);
    tt__free(t->ctx, r.next);
    return ok ? tt__settle(t, n) : TT_ERR_MEMORY;
}
