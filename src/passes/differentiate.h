#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/record.h"
#include "../ops/gradients.h"
#include "verify.h"

/* ------------------------------------------------------------------------------------------ differentiate */

/* Appends the backward of the loss `root` to the tape. Fails if no trainable parameter leads to `root`, or if
   an op on the way has no backward. */
static tt_status tt__differentiate(tt_tape *t, int32_t root, bool accumulate)
{
    tt__builder b = {t, accumulate, true, TT__EACH_MICRO, true};
    int forward = tt__index(t);
    char what[256];
    if (!t->values[root].needs_grad)
        return tt__fail(t->ctx, TT_ERR_ARGUMENT, "nothing to train: the loss depends on no trainable "
                        "parameter: unfreeze one; the loss is %s", tt__describe(t, root, what, sizeof what));
    const tt__shape *shape = &t->values[root].shape;
    if (shape->rows != 1 || shape->cols != 1 || shape->axis || t->values[root].base != root)
        return tt__fail(t->ctx, TT_ERR_SHAPE, "the loss must be a (1, 1) result of an op, not %s",
                        tt__describe(t, root, what, sizeof what));
    if (tt__producer(t, root) >= 0) b.stage = t->code[tt__producer(t, root)].stage;
    int32_t seed = tt__new_gradient(&b, root);
    tt__fill(&b, seed, 1);
    if (b.ok) t->code[t->n_code - 1].in[0] = t->scale;
    for (int k = forward - 1; k >= 0 && b.ok; k--) {
        tt__instr f = t->code[k];
        b.stage = f.stage;
        int32_t g = t->values[f.out[0]].grad;
        const tt__gradient *how = &tt__rules_of(&f)->backward;
        if (!g || !t->values[f.out[0]].needs_grad) continue;
        if (!how->emit && !how->reads)
            return tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "op '%s' has no backward, but its result '%s' needs "
                            "a gradient: use other ops, or freeze the parameters before it",
                            tt__instr_name(&f), t->values[f.out[0]].name);
        if (how->emit) how->emit(&b, &f, g);
        else tt__emit_gradient(&b, &f, g, how->op, how->reads, how->into);
    }
    return b.ok ? TT_OK : t->ctx->status;
}

/* ---------------------------------------------------------------------------------------------- inference */

/* Removes dropout of rate 0. Without `dropout`, removes all dropout, and the block lists that are for
   training only. A dropout becomes a copy (SCALE by 1). The copy is removed, too, unless its result is an
   output, has views or is the root. */
static tt_status tt__pass_inference(tt_tape *t, int32_t root, bool dropout)
{
    int n = tt__index(t);
    int32_t *instead = tt__new_map(t); /* for each value, the value to read instead if it was the result of a
                                          removed copy; 0: the value itself */
    if (!instead) return TT_ERR_MEMORY;
    for (int k = 0; k < n; k++) {
        tt__instr *i = &t->code[k];
        const tt__tape_value *y = &t->values[i->out[0]];
        tt__map_operands(i, instead);
        if (!dropout) i->attr.dropout = 0;
        if (!dropout && i->attr.lists_for_training) i->attr.lists = 0;
        if (!tt__is(i, TT__RANDOM | TT__MOVES) || i->attr.dropout > 0) continue;
        i->op = TT__OP_SCALE;
        i->attr.scale = 1;
        if (y->keep || y->views || i->out[0] == root) continue;
        t->values[t->values[i->in[0]].base].offload |= y->offload;
        if (y->mark != TT__UNMARKED) t->values[t->values[i->in[0]].base].mark = y->mark;
        instead[i->out[0]] = i->in[0];
        tt__drop(t, k);
    }
    tt__free(t->ctx, instead);
    return tt__settle(t, n);
}
