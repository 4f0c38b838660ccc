#pragma once
#include "../base/base.h"
#include "tape.h"
#include "record.h"

/* --------------------------------------------------------------------------------------------------- editing
   Functions with which a pass rewrites instructions in one sweep. Instructions keep their numbers until
   tt__settle. tt__index counts the reads and writes of each value; tt__drop, tt__put and tt__insert update
   the counts. A dropped instruction has op -1 and no operands. */

/* Adds the reads and writes of instruction k to the counts of its values; subtracts them if `by` is -1. */
static void tt__count(tt_tape *t, int k, int by)
{
    const tt__instr *i = &t->code[k];
    for (int j = 0; j < TT__MAX_IN; j++) if (i->in[j]) t->values[t->values[i->in[j]].base].uses += by;
    for (int j = 0; j < TT__MAX_OUT; j++) {
        tt__tape_value *y = &t->values[i->out[j]];
        if (!i->out[j]) continue;
        t->values[y->base].writes += by;
        if (by > 0 && k > t->values[y->base].writer) t->values[y->base].writer = k;
        if (by > 0 && (!y->producer || k < y->producer)) y->producer = k + 1;
        if (by < 0 && y->producer == k + 1) y->producer = 0;
    }
}

/* Counts the reads, writes and views of every value; returns the number of instructions. */
static int tt__index(tt_tape *t)
{
    for (int32_t v = 0; v < t->n_values; v++) {
        tt__tape_value *x = &t->values[v];
        x->producer = x->uses = x->writes = x->views = x->reader = x->writer = 0;
    }
    for (int32_t v = 1; v < t->n_values; v++) t->values[t->values[v].base].views += t->values[v].base != v;
    for (int k = 0; k < t->n_code; k++) {
        tt__count(t, k, 1);
        for (int j = 0; j < TT__MAX_IN; j++) t->values[t->values[t->code[k].in[j]].base].reader = k;
    }
    return t->n_code;
}

static bool tt__is_of(const tt_tape *t, const int32_t *ids, int n, int32_t base)
{
    for (int j = 0; j < n; j++) if (ids[j] && t->values[ids[j]].base == base) return true;
    return false;
}

/* tt__reads and tt__writes return whether instruction i reads or writes storage `base` or a view of it. */
static bool tt__reads(const tt_tape *t, const tt__instr *i, int32_t base)
{
    return tt__is_of(t, i->in, TT__MAX_IN, base);
}

static bool tt__writes(const tt_tape *t, const tt__instr *i, int32_t base)
{
    return tt__is_of(t, i->out, TT__MAX_OUT, base);
}

static int tt__uses(const tt_tape *t, int32_t v) { return t->values[t->values[v].base].uses; }
/* Returns the number of the first instruction that writes v; -1 if there is none. */
static int tt__producer(const tt_tape *t, int32_t v) { return t->values[v].producer - 1; }

/* Returns whether exactly one operand reads v and nothing needs v's contents afterwards: v is a transient
   storage, not a view, and neither `root` (the loss), an output nor the end of a pipeline stage. */
static bool tt__only_use(const tt_tape *t, int32_t v, int32_t root)
{
    const tt__tape_value *x = &t->values[v];
    const bool kept = v == root || x->keep || x->ends;
    return v && !kept && x->base == v && x->storage == TT__TRANSIENT && x->uses == 1;
}

/* Returns whether instruction `at` may run at place `later` instead. No other instruction may write out[0] of
   instruction `at`, and no instruction in between may write an operand of instruction `at`. */
static bool tt__may_wait(const tt_tape *t, int at, int later)
{
    bool written = false; /* an instruction after `at` writes an operand */
    if (t->values[t->code[at].out[0]].writes != 1) return false;
    for (int j = 0; j < TT__MAX_IN; j++) written |= t->values[t->values[t->code[at].in[j]].base].writer > at;
    for (int k = at + 1; k <= later && written; k++)
        for (int j = 0; j < TT__MAX_IN; j++) {
            const int32_t in = t->code[at].in[j];
            if (in && tt__writes(t, &t->code[k], t->values[in].base)) return false;
        }
    return true;
}

/* Returns an instruction of `op` that reads x and writes y. */
static tt__instr tt__instr_of(int op, int32_t x, int32_t y)
{
    tt__instr i = tt__new_instr(op);
    i.in[0] = x;
    i.out[0] = y;
    return i;
}

/* Returns an instruction of `op` that reads x and writes y, in the segment and on the ranks of `like`. */
static tt__instr tt__instr_like(const tt__instr *like, int op, int32_t x, int32_t y)
{
    tt__instr i = tt__instr_of(op, x, y);
    i.segment = like->segment;
    i.stage = like->stage;
    i.backward = like->backward;
    i.always = like->always;
    i.later = like->later;
    return i;
}

static void tt__drop(tt_tape *t, int k)
{
    tt__count(t, k, -1);
    t->code[k] = tt__new_instr(-1);
}

/* Replaces instruction k of the tape by `i`. */
static void tt__put(tt_tape *t, int k, const tt__instr *i)
{
    tt__drop(t, k);
    t->code[k] = *i;
    tt__count(t, k, 1);
}

/* Drops instruction `at` and replaces instruction k by `merged`, which does the work of both and writes
   out[0] of instruction k. */
static void tt__merge(tt_tape *t, int at, int k, tt__instr merged)
{
    merged.out[0] = t->code[k].out[0];
    merged.add = t->code[k].add;
    merged.add_later = t->code[k].add_later;
    tt__drop(t, at);
    tt__put(t, k, &merged);
}

/* Inserts `i` directly before instruction `before`, after earlier insertions there. Returns the number that
   `i` has until tt__settle, which is above the numbers of all other instructions; 0: out of memory. */
static int tt__insert(tt_tape *t, int before, const tt__instr *i)
{
    if (!TT__GROW(t->ctx, t->code, t->n_code, t->cap_code)) return tt__out_of_memory(t);
    t->code[t->n_code] = *i;
    t->code[t->n_code].before = before;
    tt__count(t, t->n_code, 1);
    return t->n_code++;
}

/* Removes dropped instructions, and moves inserted instructions (numbers n and above) to their places. */
static tt_status tt__settle(tt_tape *t, int n)
{
    int kept = 0;
    if (t->n_code == n) {
        while (kept < n && t->code[kept].op >= 0) kept++; /* instructions before `kept` keep their places */
        for (int k = kept; k < n; k++) if (t->code[k].op >= 0) t->code[kept++] = t->code[k];
        t->n_code = kept;
        return TT_OK;
    }
    tt__instr *code = (tt__instr *)tt__alloc(t->ctx, sizeof *code * (size_t)t->n_code);
    /* For each place, the number of instructions that are inserted there. Later, for each place, the new
       number of the first inserted instruction that is not yet moved. */
    int *place = (int *)tt__calloc(t->ctx, sizeof *place * (size_t)(n + 1));
    if (code && place) {
        for (int k = n; k < t->n_code; k++) place[t->code[k].before] += t->code[k].op >= 0;
        for (int k = 0; k <= n; k++) {
            int many = place[k];
            place[k] = kept;
            kept += many;
            if (k < n && t->code[k].op >= 0) code[kept++] = t->code[k];
        }
        for (int k = n; k < t->n_code; k++)
            if (t->code[k].op >= 0) code[place[t->code[k].before]++] = t->code[k];
        tt__instr *old = t->code;
        t->code = code;
        t->cap_code = t->n_code;
        t->n_code = kept;
        code = old;
    }
    bool ok = place && code;
    tt__free(t->ctx, code);
    tt__free(t->ctx, place);
    return ok ? TT_OK : TT_ERR_MEMORY;
}
