#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/record.h"
#include "verify.h"

/* ---------------------------------------------------------------------------------------------- recompute */

typedef enum tt__recompute {
    TT__RECOMPUTE_NONE, TT__RECOMPUTE_CHEAP, TT__RECOMPUTE_ATTENTION, TT__RECOMPUTE_BLOCKS,
    TT__RECOMPUTE_BUDGET    /* of options, not of choices */
} tt__recompute;

typedef struct tt__recomputer {
    tt_tape *t;
    tt__recompute policy;
    const bool *drop; int n_drop; /* of each value: computed again whatever the policy                      */
    int forward;     /* the first instruction of the backward */
    int whole;       /* "blocks": so many instructions, from the first on, are computed again whole */
    int at;          /* before which instructions are put in: the one that needs them */
    int32_t *again;  /* of each value, the same computed again; 0: it is not yet */
} tt__recomputer;

/* The backward reads v anyway. */
static bool tt__is_saved(const tt__recomputer *r, int32_t v)
{
    return r->t->values[r->t->values[v].base].reader >= r->forward;
}

static bool tt__is_dropped(const tt__recomputer *r, int32_t v)
{
    const tt__value *x = &r->t->values[v];
    if (x->mark != TT__UNMARKED) return x->mark == TT__MARKED_AGAIN && x->writes == 1;
    return tt__producer(r->t, v) < r->whole || (v < r->n_drop && r->drop[v] && x->writes == 1);
}

/* Is v a value that no policy and no mark computes again? */
static bool tt__is_kept(const tt__recomputer *r, int32_t v)
{
    const tt__value *x = &r->t->values[v];
    const int at = tt__producer(r->t, v);
    return at < 0 || at >= r->forward || x->keep || x->persistent || x->block_end || x->offload;
}

/* What computes v again; op -1 where v is kept. *deep: what it reads is computed again too where the backward
   does not read it anyway; else all of that is there. As an argument: v is read by something deep. */
static tt__instr tt__recomputation(const tt__recomputer *r, int32_t v, bool *deep)
{
    const tt__value *x = &r->t->values[v];
    const tt__instr none = tt__new_instr(-1);
    if (tt__is_kept(r, v)) return none;
    const tt__instr *f = &r->t->code[tt__producer(r->t, v)];
    const bool activated = tt__is(f, TT__ACTIVATES) && f->attr.act && f->out[1] && f->out[0] == v;
    const bool with_operand = activated && tt__is_dropped(r, f->out[1]); /* of the activation */
    const bool dropped = tt__is_dropped(r, v), saved = tt__is_saved(r, v);
    const bool of_operand = activated && !with_operand && tt__is_saved(r, f->out[1]);
    if (x->mark == TT__MARKED_KEEP && saved) return none;
    *deep = !of_operand && (dropped || with_operand || (*deep && !saved && x->writes == 1));
    if (*deep) return tt__is(f, TT__LOSS) ? none : *f;
    if (f->out[0] != v) return none; /* statistics are small */
    if (of_operand && (dropped || r->policy != TT__RECOMPUTE_NONE)) {
        tt__instr i = tt__instr_like(f, TT__OP_ACTIVATION, f->out[1], v);
        i.attr = f->attr;
        return i;
    }
    if (r->policy == TT__RECOMPUTE_NONE) return none;
    if (tt__is(f, TT__AGAIN_KEPT)) {
        tt__storage storage = r->t->values[f->in[0]].storage;
        return storage == TT__INPUT || storage == TT__PARAMETER ? *f : none;
    }
    const unsigned cheap = r->policy == TT__RECOMPUTE_ATTENTION ? TT__AGAIN_KEPT : TT__AGAIN;
    const bool again = (tt__ops[f->op].flags & cheap) != 0;
    const bool gathers = tt__rules_of(f)->phases && r->t->values[f->in[0]].storage == TT__TRANSIENT;
    return again && (gathers || tt__is_saved(r, f->in[0])) ? *f : none; /* pieces are less than all of them */
}

static int32_t tt__new_like(tt_tape *t, int32_t v)
{
    const tt__value *x = &t->values[v];
    return tt__value_like(t, v, tt__new_value(t, &x->shape, TT__TRANSIENT, "%s", x->name));
}

/* What the backward, or something deep, reads instead of operand v; 0 when out of memory. */
static int32_t tt__read_again(tt__recomputer *r, int32_t v, bool deep)
{
    tt_tape *t = r->t;
    int32_t base = t->values[v].base;
    if (!r->again[base]) {
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
            r->again[old] = i.out[o];
        }
        i.backward = true;
        i.again = true;
        if (!tt__insert(t, r->at, &i)) return 0;
    }
    return v == base ? r->again[base] : tt__view_like(t, v, r->again[base], t->values[v].offset);
}

/* The instructions of the forward. */
static int tt__forward_of(const tt_tape *t)
{
    int forward = 0;
    while (forward < t->n_code && !t->code[forward].backward) forward++;
    return forward;
}

/* The instructions of the first `blocks` blocks, or of all but the last, if these are fewer. Without marks,
   0. */
static int tt__blocks_to_recompute(const tt_tape *t, int forward, int blocks)
{
    int end[2] = {0, 0}; /* of the last two marks: where what they mark is computed, and one more */
    int most = 0, marks = 0; /* the end of the last block wanted */
    double bytes[2] = {0, 0}; /* of what is computed between them, and after the last */
    for (int k = 0; k < forward; k++)
        for (int o = 0; o < TT__MAX_OUT; o++)
            if (t->code[k].out[o] && t->values[t->code[k].out[o]].block_end) {
                end[0] = end[1];
                end[1] = k + 1;
                if (++marks <= blocks) most = k + 1;
            }
    for (int k = end[0]; k < forward; k++)
        for (int o = 0; o < TT__MAX_OUT; o++)
            if (t->code[k].out[o])
                bytes[k >= end[1]] += (double)tt__storage_bytes(&t->values[t->code[k].out[o]]);
    const int last = bytes[1] < bytes[0] / 2 ? 0 : 1; /* a head follows the last mark, or one more block */
    return most < end[last] ? most : end[last];
}

/* The backward reads what copies of forward instructions compute again, so that the forward's results need
   not be kept. A copy stands before the first instruction that reads it, and runs only what that needs.
   blocks: of policy "blocks", how many of the first blocks. drop: of each of the tape's first n_drop values,
   is it computed again whatever the policy? */
static tt_status tt__pass_recompute(tt_tape *t, tt__recompute policy, int blocks, const bool *drop,
                                    int n_drop)
{
    tt__recomputer r = {t, policy, drop, n_drop, tt__forward_of(t), 0, 0, tt__new_map(t)};
    const int n = tt__index(t);
    bool ok = r.again != NULL;
    if (policy == TT__RECOMPUTE_BLOCKS) r.whole = tt__blocks_to_recompute(t, r.forward, blocks);
    for (r.at = r.forward; r.at < n && ok; r.at++)
        for (int j = 0; j < TT__MAX_IN && t->code[r.at].backward && ok; j++) {
            int32_t v = t->code[r.at].in[j], with = v ? tt__read_again(&r, v, false) : 0;
            ok = with || !v;
            t->code[r.at].in[j] = with;
        }
    tt__free(t->ctx, r.again);
    return ok ? tt__settle(t, n) : TT_ERR_MEMORY;
}
