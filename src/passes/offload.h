#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "precision.h"
#include "recompute.h"
#include "data.h"
#include "update.h"

/* ------------------------------------------------------------------------------------------------ offload
   Keeps storages in the host's memory. Instructions use temporary copies on the device. A storage is copied
   to the device before the first instruction that reads it, and copied back after the last that writes it.
   With the option update "host", updates run in the host's memory instead and use temporary host copies of
   storages on the device. */

/* The words of the option `offload`, as bits; tt__out_names has the words in the order of the bits. */
enum { TT__OUT_OPTIMIZER = 1, TT__OUT_GRADIENTS = 2, TT__OUT_PARAMETERS = 4, TT__OUT_ACTIVATIONS = 8 };

static const char *const tt__out_names[] = {"optimizer", "gradients", "parameters", "activations"};

/* Reads the option `offload` into the bits *out. Sets *fits to whether the option is "budget": tt_compile
   then chooses what to offload. Fails if a word is unknown. */
static tt_status tt__parse_offload(tt_context *ctx, const char *list, unsigned *out, bool *fits)
{
    *out = 0;
    *fits = list && strcmp(list, "budget") == 0;
    if (!list || *fits || strcmp(list, "none") == 0) return TT_OK;
    for (const char *at = list;;) {
        const size_t n = strcspn(at, ",");
        int k = 0;
        while (k < TT__COUNT(tt__out_names) &&
               (strlen(tt__out_names[k]) != n || strncmp(tt__out_names[k], at, n) != 0)) k++;
        if (k == TT__COUNT(tt__out_names))
            return tt__fail(ctx, TT_ERR_UNSUPPORTED, "{offload '%.*s'} is unknown: use none or budget "
                            "alone, or a list of optimizer, gradients, parameters and activations, "
                            "separated by commas", (int)n, at);
        *out |= 1u << k;
        if (!at[n]) return TT_OK;
        at += n + 1;
    }
}

#ifndef TT__OFFLOAD_TOGETHER /* tests set a smaller number */
#define TT__OFFLOAD_TOGETHER ((size_t)32 << 20) /* max bytes on the device for the operands of a group of
                                                   instructions that run together */
#endif
enum { TT__ONE_BY_ONE = 30 }; /* after this number of halvings TT__OFFLOAD_TOGETHER is 0, and each instruction
                                 is a group */

/* Returns whether values a and b are the same elements of the same storage. */
static bool tt__same_part(const tt_tape *t, int32_t a, int32_t b)
{
    const tt__tape_value *x = &t->values[a], *y = &t->values[b];
    return a == b || (x->base == y->base && x->slot == y->slot && x->offset == y->offset && x->ld == y->ld &&
                      x->shape.rows == y->shape.rows && x->shape.cols == y->shape.cols &&
                      x->part.unit == y->part.unit && x->part.split == y->part.split);
}

/* The use of a storage by a range of instructions. several: the instructions use more than one view of the
   storage. reads_several: they read more than one view. all_slots: one instruction sums all slots. always:
   one instruction also runs on ranks without a micro-batch. */
typedef struct tt__use {
    int32_t any, read, written;   /* any: first value of the storage that the range uses; read: first value
                                     that the range reads; written: first value that the range writes; 0:
                                     none */
    bool several, reads_several, all_slots, always;
    bool in;                      /* the range reads contents that were written before the range */
    bool later;                   /* the contents are read only to add to them, after a step's first
                                     micro-batch */
} tt__use;

static void tt__note_use(const tt_tape *t, const tt__instr *i, int32_t id, int out, tt__use *u)
{
    const bool first = !u->any, updates = tt__is(i, TT__RMW) && !i->move.over;
    const bool later = out >= 0 && (i->add_later >> out & 1);
    const bool reads = out < 0 || updates || (i->add >> out & 1);
    if (first) u->any = id;
    if (!tt__same_part(t, u->any, id)) u->several = true;
    if (out >= 0 && !u->written) u->written = id;
    if (reads || later) {
        if (!u->read) u->read = id;
        if (!tt__same_part(t, u->read, id)) u->reads_several = true;
    }
    if (first) u->in = reads || later;
    if (first) u->later = later && !reads;
    if (out < 0 && i->move.over == TT__OVER_SLOTS) u->all_slots = true;
    u->always |= i->always;
}

/* Describes how instructions [from, to] use storage v. */
static tt__use tt__use_of(const tt_tape *t, int32_t v, int from, int to)
{
    tt__use u;
    memset(&u, 0, sizeof u);
    for (int k = from; k <= to; k++)
        for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
            const int out = j - TT__MAX_IN;
            const int32_t id = out < 0 ? t->code[k].in[j] : t->code[k].out[out];
            if (id && t->values[id].base == v) tt__note_use(t, &t->code[k], id, out, &u);
        }
    return u;
}

/* Returns the view of storage d that corresponds to value `of`. Storage d is a copy of value `like`, which
   has the same storage as `of`. Returns 0 after tt__tape_fail. */
static int32_t tt__in_copy(tt_tape *t, int32_t d, int32_t like, int32_t of)
{
    const tt__tape_value x = t->values[of];
    const bool slots = t->values[d].slots > 1;
    if (!slots && tt__same_part(t, like, of)) return d;
    int32_t id = tt__view_like(t, of, d, x.offset - t->values[like].offset);
    if (id) t->values[id].slot = slots ? x.slot : 0;
    return id;
}

/* Inserts a copy from x in one memory to y in the other before instruction `before`, in the segment of
   `like`. Returns false if x or y is 0 or memory runs out. */
static bool tt__copy_before(tt_tape *t, int before, const tt__instr *like, int32_t x, int32_t y, bool always,
                            bool later)
{
    tt__instr i = tt__instr_like(like, TT__OP_COPY, x, y);
    i.always = always;
    i.later = later;
    return x && y && tt__insert(t, before, &i);
}

/* Makes the storage for a copy of storage v in the other memory, as small as the use u allows. If the
   instructions use only one shard or one slot of v, the copy has only that shard or slot. Otherwise the copy
   has the whole storage, so that kernels find the layout that they find without copies. Sets *like to the
   value of v that the copy corresponds to. Returns 0 if out of memory. */
static int32_t tt__new_copy(tt_tape *t, int32_t v, const tt__use *u, int32_t *like)
{
    const tt__tape_value base = t->values[v], x = t->values[u->any];
    *like = u->any;
    if (u->several || (!x.part.unit && !x.slot)) *like = x.slot ? tt__slot_view(t, v, x.slot - 1) : v;
    if (!*like) return 0;
    const tt__tape_value of = t->values[*like];
    const tt__storage storage = base.storage == TT__PARAMETER ? TT__TRANSIENT : base.storage;
    int32_t d = tt__value_like(t, v, tt__new_value(t, &of.shape, storage, "%s", base.name));
    if (!d) return 0;
    t->values[d].part = of.part;
    t->values[d].param = base.param;
    t->values[d].host_copy = base.space == TT__DEVICE;
    t->values[d].space = base.space == TT__DEVICE ? TT__HOST : TT__DEVICE;
    t->values[d].slots = u->all_slots ? base.slots : 0;
    return d;
}

/* Inserts, before instruction `from`, copies of the elements that the use u reads into storage d, which is a
   copy of value `like`. */
static bool tt__bring_in(tt_tape *t, int from, const tt__use *u, int32_t like, int32_t d)
{
    const tt__instr first = t->code[from];
    const int32_t what = u->reads_several ? like : u->read;
    const tt__tape_value x = t->values[what];
    bool ok = true;
    if (!u->in) return true;
    if (!u->all_slots) return tt__copy_before(t, from, &first, what, tt__in_copy(t, d, like, what), u->always,
                                              u->later);
    for (int k = 0; k < t->values[d].slots && ok; k++) {
        const int32_t slot = tt__view_like(t, what, x.base, x.offset);
        if (!slot) return false;
        t->values[slot].slot = k + 1;
        ok = tt__copy_before(t, from, &first, slot, tt__in_copy(t, d, like, slot), u->always, u->later);
    }
    return ok;
}

/* Makes instructions [from, to] use a copy of storage v in the memory on which they work. Inserts copies from
   v before these instructions, and copies back to v after them. Returns false if out of memory. */
static bool tt__use_copy(tt_tape *t, int32_t v, int from, int to)
{
    const tt__use u = tt__use_of(t, v, from, to);
    int32_t like, d = u.any ? tt__new_copy(t, v, &u, &like) : 0;
    if (!u.any) return true;
    if (!d || !tt__bring_in(t, from, &u, like, d)) return false;
    int32_t written[2 * TT__MAX_OUT];
    int n = 0;
    for (int k = from; k <= to; k++)
        for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
            const bool out = j >= TT__MAX_IN;
            int32_t *id = out ? &t->code[k].out[j - TT__MAX_IN] : &t->code[k].in[j];
            const int32_t was = *id;
            if (!was || t->values[was].base != v) continue;
            if (!(*id = tt__in_copy(t, d, like, was))) return false;
            bool known = !out;
            for (int m = 0; m < n && !known; m++) known = tt__same_part(t, written[m], was);
            if (known) continue;
            if (n == TT__COUNT(written)) written[0] = like; /* too many parts: `like` covers them all */
            else written[n++] = was;
        }
    const tt__instr last = t->code[to];
    bool whole = false;
    for (int m = 0; m < n; m++) whole = whole || tt__same_part(t, written[m], like);
    if (whole) written[0] = like;
    bool ok = true;
    for (int m = 0; m < (whole ? 1 : n) && ok; m++) {
        const int32_t x = tt__in_copy(t, d, like, written[m]);
        ok = tt__copy_before(t, to + 1, &last, x, written[m], u.always, false);
    }
    return ok;
}

/* Returns whether storage v is kept in the host's memory. `what` has bits of TT__OUT_. A gradient is kept
   there only if it waits for the end of the round or step. */
static bool tt__goes_out(const tt_tape *t, int32_t v, unsigned what)
{
    const tt__tape_value *x = &t->values[v];
    const bool large = x->param >= 0 && t->ctx->params[x->param]->size >= TT__PIECES_FROM;
    const bool waits = x->persistent || x->reader >= tt__segment_first(t, TT__EACH_LAP);
    if (x->base != v || (!large && !x->offload)) return false;
    if (x->storage == TT__PARAMETER) return what & TT__OUT_PARAMETERS || x->offload;
    if (x->storage == TT__STATE) return what & TT__OUT_OPTIMIZER || t->on_host;
    return x->storage == TT__GRADIENT && waits && what & TT__OUT_GRADIENTS;
}

/* Instructions [from, to]; -1 in `from`: none. */
typedef struct tt__range { int from, to; } tt__range;

static void tt__reach(tt__range *r, int k)
{
    if (r->from < 0) r->from = k;
    r->to = k;
}

/* Makes the instructions of a micro-batch use one copy of v in the forward and another in the backward. of[0]
   and of[1]: the ranges of instructions that use v in the forward and in the backward. Returns false if out
   of memory. */
static bool tt__use_micro(tt_tape *t, int32_t v, const tt__range *of)
{
    for (int backward = 0; backward < 2; backward++) {
        const tt__range r = of[backward];
        if (r.from < 0) continue;
        if (r.from > 0) t->code[r.from - 1].with_next = false;
        t->code[r.to].with_next = false;
        if (!tt__use_copy(t, v, r.from, r.to)) return false;
    }
    return true;
}

/* Returns whether pass "offload" has put storage `base` into the host's memory. Settings and results of a
   step do not count. */
static bool tt__is_out(const tt__tape_value *base)
{
    return base->space == TT__HOST && base->storage != TT__STEP;
}

/* Returns whether storage `base` is in the memory that instruction i does not work on: host or device. */
static bool tt__is_away(const tt__tape_value *base, const tt__instr *i)
{
    return i->on_host ? base->space == TT__DEVICE : tt__is_out(base);
}

/* Returns the bytes of instruction i's storages that are in the memory on which i does not work. */
static size_t tt__out_bytes(const tt_tape *t, const tt__instr *i)
{
    size_t bytes = 0;
    for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
        const int32_t id = j < TT__MAX_IN ? i->in[j] : i->out[j - TT__MAX_IN];
        const tt__tape_value *x = &t->values[id];
        if (id && tt__is_away(&t->values[x->base], i)) bytes += tt__slot_bytes(x);
    }
    return bytes;
}

/* Cuts a group off the instructions that run together from k on, and returns its range; the remaining
   instructions run together after the group. The instructions of a group work on one memory and use at most
   `max` bytes of storages in the other memory, unless the group is a single instruction. *largest: bytes so
   far of the group that there would be if `max` were TT__OFFLOAD_TOGETHER; the count goes on from one call to
   the next. */
static tt__range tt__cut_group(tt_tape *t, int k, size_t max, size_t *largest)
{
    tt__range r = {k, k};
    size_t bytes = tt__out_bytes(t, &t->code[k]);
    bool several = false;
    *largest += bytes;
    while (t->code[r.to].with_next) {
        const size_t more = tt__out_bytes(t, &t->code[r.to + 1]);
        const bool full = more && bytes + more > max;
        const bool cut = full && *largest + more <= TT__OFFLOAD_TOGETHER;
        t->cuts += cut;
        if (!cut && full) *largest = 0;
        if (full || t->code[r.to + 1].on_host != t->code[k].on_host) break;
        several = several || (bytes && more);
        bytes += more;
        *largest += more;
        r.to++;
    }
    if (!t->code[r.to].with_next || t->code[r.to + 1].on_host != t->code[k].on_host) *largest = 0;
    if (several && bytes > t->grouped) t->grouped = bytes;
    t->code[r.to].with_next = false;
    return r;
}

/* Makes a group of instructions use copies of storages that are in the memory that the group does not work
   on. Returns false if out of memory. */
static bool tt__use_group(tt_tape *t, tt__range r)
{
    for (int k = r.from; k <= r.to; k++)
        for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
            const int32_t id = j < TT__MAX_IN ? t->code[k].in[j] : t->code[k].out[j - TT__MAX_IN];
            const int32_t base = t->values[id].base;
            const bool away = id && tt__is_away(&t->values[base], &t->code[k]);
            if (away && !tt__use_copy(t, base, r.from, r.to)) return false;
        }
    return true;
}

/* Returns whether activation v is kept in the host's memory between its uses in the forward, of[0], and in
   the backward, of[1]. large: v is kept there if it has TT__PIECES_FROM elements or more. */
static bool tt__activation_goes_out(const tt_tape *t, int32_t v, int32_t root, bool large,
                                    const tt__range *of)
{
    const tt__tape_value *x = &t->values[v];
    const bool between = of[0].from >= 0 && of[1].from >= 0;
    if (x->storage != TT__TRANSIENT || x->base != v || x->keep || v == t->values[root].base) return false;
    if (!between || x->writer >= of[1].from) return false;
    return x->offload || (large && x->shape.rows * x->shape.cols >= TT__PIECES_FROM);
}

/* Copies activation v to the host's memory after its last use in the forward, and back before its first use
   in the backward. Returns false if out of memory. */
static bool tt__use_activation(tt_tape *t, int32_t v, const tt__range *of)
{
    const tt__range forward = of[0], backward = of[1];
    const bool always = tt__use_of(t, v, backward.from, backward.to).always;
    const int32_t out = tt__new_like(t, v), back = out ? tt__new_like(t, v) : 0;
    if (!back) return false;
    t->values[out].space = TT__HOST;
    t->code[forward.to].with_next = t->code[backward.from - 1].with_next = false;
    const tt__instr last = t->code[forward.to], first = t->code[backward.from];
    bool ok = tt__copy_before(t, forward.to + 1, &last, v, out, always, false) &&
              tt__copy_before(t, backward.from, &first, out, back, always, false);
    for (int k = backward.from; k <= backward.to && ok; k++)
        for (int j = 0; j < TT__MAX_IN && ok; j++) {
            const int32_t id = t->code[k].in[j];
            if (id && t->values[id].base == v) ok = (t->code[k].in[j] = tt__in_copy(t, back, v, id)) != 0;
        }
    return ok;
}

/* Keeps storages in the host's memory: the parameters, gradients and optimizer state that `what` (bits of
   TT__OUT_) names, activations of the first `blocks` blocks, and values that tt_offload marks. In a
   micro-batch, all instructions of the forward share one copy of a parameter or gradient, and those of the
   backward share another. At the end of a round or step, and for the optimizer state, each group of
   instructions has its own copies, of at most TT__OFFLOAD_TOGETHER bytes, halved `halved` times. The pass
   also decides which updates run in the host's memory. */
static tt_status tt__pass_offload(tt_tape *t, int32_t root, unsigned what, int blocks, int halved)
{
    bool any = what != 0 || t->on_host;
    t->grouped = 0;
    t->cuts = 0;
    for (int32_t v = 1; v < t->n_values; v++) any = any || t->values[v].offload;
    if (!any) return TT_OK;
    const int end = tt__blocks_to_recompute(t, tt__forward_of(t), what & TT__OUT_ACTIVATIONS ? blocks : 0);
    const int n = tt__index(t), values = t->n_values, laps = tt__segment_first(t, TT__EACH_LAP);
    tt__range (*micro)[2] = (tt__range (*)[2])tt__alloc(t->ctx, sizeof *micro * (size_t)values);
    bool ok = micro != NULL;
    for (int32_t v = 1; v < values && ok; v++) {
        const tt__range none = {-1, -1};
        micro[v][0] = micro[v][1] = none;
        if (tt__goes_out(t, v, what)) t->values[v].space = TT__HOST;
    }
    for (int32_t v = 1; v < values && ok; v++) t->values[v].space = t->values[t->values[v].base].space;
    for (int k = 0; k < laps && ok; k++)
        for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
            const tt__instr *i = &t->code[k];
            const int32_t base = t->values[j < TT__MAX_IN ? i->in[j] : i->out[j - TT__MAX_IN]].base;
            if (base) tt__reach(&micro[base][i->backward], k);
        }
    for (int32_t v = 1; v < values && ok; v++)
        if (t->values[v].base == v && tt__is_out(&t->values[v]) && t->values[v].storage != TT__STATE)
            ok = tt__use_micro(t, v, micro[v]);
        else if (tt__activation_goes_out(t, v, root, micro[v][0].from < end, micro[v]))
            ok = tt__use_activation(t, v, micro[v]);
    for (int k = 0; k < n; k++)
        t->code[k].on_host = tt__is(&t->code[k], TT__WITH_RUN | TT__RMW) &&
                             tt__updates_on_host(t, t->code[k].out[0]);
    size_t largest = 0;
    for (int k = 0; k < n && ok;) {
        const tt__range r = tt__cut_group(t, k, TT__OFFLOAD_TOGETHER >> halved, &largest);
        ok = tt__use_group(t, r);
        k = r.to + 1;
    }
    tt__free(t->ctx, micro);
    return ok ? tt__settle(t, n) : TT_ERR_MEMORY;
}
