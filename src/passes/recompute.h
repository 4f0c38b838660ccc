#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/record.h"
#include "verify.h"

/* ---------------------------------------------------------------------------------------------- recompute */

typedef enum tt__recompute_policy {
    TT__RECOMPUTE_NONE, TT__RECOMPUTE_CHEAP, TT__RECOMPUTE_ATTENTION, TT__RECOMPUTE_BLOCKS,
    TT__RECOMPUTE_BUDGET    /* a value of the option only: tt_compile chooses another policy */
} tt__recompute_policy;

typedef struct tt__recomputer {
    tt_tape *t;
    tt__recompute_policy policy;
    const bool *drop; int n_drop; /* for each of n_drop values: recompute it with any policy */
    int forward;     /* number of the first instruction of the backward */
    int whole;       /* with policy "blocks": number of instructions at the start of the tape whose results
                        are all recomputed */
    int at;          /* instruction that needs a recomputed value; recomputing instructions are inserted
                        before it */
    int32_t *recomputed;  /* for each value: its recomputed copy; 0: none yet */
} tt__recomputer;

/* Returns whether the backward reads v. Then v is saved, unless v is recomputed. */
static bool tt__is_saved(const tt__recomputer *r, int32_t v)
{
    return r->t->values[r->t->values[v].base].reader >= r->forward;
}

static bool tt__is_dropped(const tt__recomputer *r, int32_t v)
{
    const tt__tape_value *x = &r->t->values[v];
    if (x->mark != TT__UNMARKED) return x->mark == TT__MARKED_AGAIN && x->writes == 1;
    return tt__producer(r->t, v) < r->whole || (v < r->n_drop && r->drop[v] && x->writes == 1);
}

/* Returns whether v is never recomputed, whatever the policy and the marks. */
static bool tt__is_kept(const tt__recomputer *r, int32_t v)
{
    const tt__tape_value *x = &r->t->values[v];
    const int at = tt__producer(r->t, v);
    return at < 0 || at >= r->forward || x->keep || x->persistent || x->block_end || x->offload;
}

/* Returns the instruction that recomputes v; its op is -1 if v is not recomputed. A recomputation is deep if
   its operands are recomputed, too, except those that the backward reads anyway. A recomputation that is not
   deep has all its operands in memory. *deep before the call: v is an operand of a deep recomputation. *deep
   after the call: the recomputation of v is deep. */
static tt__instr tt__recomputation(const tt__recomputer *r, int32_t v, bool *deep)
{
    const tt__tape_value *x = &r->t->values[v];
    const tt__instr none = tt__new_instr(-1);
    if (tt__is_kept(r, v)) return none;
    const tt__instr *f = &r->t->code[tt__producer(r->t, v)];
    const bool activated = tt__is(f, TT__ACTIVATES) && f->attr.act && f->out[1] && f->out[0] == v;
    /* whether the activation's operand, the pre-activation, is recomputed, too */
    const bool with_operand = activated && tt__is_dropped(r, f->out[1]);
    const bool dropped = tt__is_dropped(r, v), saved = tt__is_saved(r, v);
    const bool of_operand = activated && !with_operand && tt__is_saved(r, f->out[1]);
    if (x->mark == TT__MARKED_KEEP && saved) return none;
    *deep = !of_operand && (dropped || with_operand || (*deep && !saved && x->writes == 1));
    if (*deep) return tt__is(f, TT__LOSS) ? none : *f;
    if (f->out[0] != v) return none; /* row statistics such as mean and 1/std are small, so they are saved */
    if (of_operand && (dropped || r->policy != TT__RECOMPUTE_NONE)) {
        tt__instr i = tt__instr_like(f, TT__OP_ACTIVATION, f->out[1], v);
        i.attr = f->attr;
        return i;
    }
    if (r->policy == TT__RECOMPUTE_NONE) return none;
    if (tt__is(f, TT__CHEAP_KEPT)) {
        tt__storage storage = r->t->values[f->in[0]].storage;
        return storage == TT__INPUT || storage == TT__PARAMETER ? *f : none;
    }
    const unsigned cheap = r->policy == TT__RECOMPUTE_ATTENTION ? TT__CHEAP_KEPT : TT__CHEAP;
    const bool recomputed = (tt__ops[f->op].flags & cheap) != 0;
    const bool gathers = tt__rules_of(f)->phases && r->t->values[f->in[0]].storage == TT__TRANSIENT;
    /* A gather runs a second time in any case, because shards take less memory than the gathered tensor. */
    return recomputed && (gathers || tt__is_saved(r, f->in[0])) ? *f : none;
}

static int32_t tt__new_like(tt_tape *t, int32_t v)
{
    const tt__tape_value *x = &t->values[v];
    return tt__value_like(t, v, tt__new_value(t, &x->shape, TT__TRANSIENT, "%s", x->name));
}

/* Returns the value that the backward or a deep recomputation reads in place of operand v, and inserts the
   instructions that recompute v. Returns v if v is not recomputed; 0 if out of memory. */
static int32_t tt__read_again(tt__recomputer *r, int32_t v, bool deep)
{
    tt_tape *t = r->t;
    int32_t base = t->values[v].base;
    if (!r->recomputed[base]) {
        if (tt__is_kept(r, base)) return v;
        tt__instr i = tt__recomputation(r, base, &deep);
        if (i.op < 0) return v;
        for (int j = 0; j < TT__MAX_IN; j++)
            if (i.in[j] && !(i.in[j] = tt__read_again(r, i.in[j], deep))) return 0;
        for (int o = 0; o < TT__MAX_OUT; o++) {
            const int32_t old = i.out[o];
            if (!old) continue;
            i.out[o] = tt__new_like(t, old);
            if (!i.out[o]) return 0;
            r->recomputed[old] = i.out[o];
        }
        i.backward = true;
        i.recomputed = true;
        if (!tt__insert(t, r->at, &i)) return 0;
    }
    return v == base ? r->recomputed[base] : tt__view_like(t, v, r->recomputed[base], t->values[v].offset);
}

/* Returns the number of the forward's instructions, which come first in the tape. */
static int tt__forward_of(const tt_tape *t)
{
    int forward = 0;
    while (forward < t->n_code && !t->code[forward].backward) forward++;
    return forward;
}

/* Returns the number of instructions up to the end of block number `blocks`, but never includes the last
   block. Returns 0 without tt_block_end marks. */
static int tt__blocks_to_recompute(const tt_tape *t, int forward, int blocks)
{
    /* For each of the last two marked values: 1 + the instruction that computes the value. */
    int end[2] = {0, 0};
    int max = 0, marks = 0; /* max: 1 + the instruction that ends block number `blocks` */
    double bytes[2] = {0, 0}; /* bytes computed between the last two marks, and after the last */
    for (int k = 0; k < forward; k++)
        for (int o = 0; o < TT__MAX_OUT; o++)
            if (t->code[k].out[o] && t->values[t->code[k].out[o]].block_end) {
                end[0] = end[1];
                end[1] = k + 1;
                if (++marks <= blocks) max = k + 1;
            }
    for (int k = end[0]; k < forward; k++)
        for (int o = 0; o < TT__MAX_OUT; o++)
            if (t->code[k].out[o])
                bytes[k >= end[1]] += (double)tt__storage_bytes(&t->values[t->code[k].out[o]]);
    /* The last block is not recomputed. The block ends at the last mark if only a head, such as a classifier,
       follows that mark (last = 0), otherwise at the end of the forward (last = 1). */
    const int last = bytes[1] < bytes[0] / 2 ? 0 : 1;
    return max < end[last] ? max : end[last];
}

/* Makes the backward read recomputed values, so that results of the forward need not be saved. A value is
   recomputed directly before the first instruction that reads it. blocks: with policy "blocks", number of
   blocks to recompute, from the first on. drop: for each of the tape's first n_drop values, whether it is
   recomputed whatever the policy. */
static tt_status tt__pass_recompute(tt_tape *t, tt__recompute_policy policy, int blocks, const bool *drop,
                                    int n_drop)
{
    tt__recomputer r = {t, policy, drop, n_drop, tt__forward_of(t), 0, 0, tt__new_map(t)};
    const int n = tt__index(t);
    bool ok = r.recomputed != NULL;
    if (policy == TT__RECOMPUTE_BLOCKS) r.whole = tt__blocks_to_recompute(t, r.forward, blocks);
    for (r.at = r.forward; r.at < n && ok; r.at++)
        for (int j = 0; j < TT__MAX_IN && t->code[r.at].backward && ok; j++) {
            int32_t v = t->code[r.at].in[j], with = v ? tt__read_again(&r, v, false) : 0;
            ok = with || !v;
            t->code[r.at].in[j] = with;
        }
    tt__free(t->ctx, r.recomputed);
    return ok ? tt__settle(t, n) : TT_ERR_MEMORY;
}
