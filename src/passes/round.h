#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/gradients.h"
#include "verify.h"

/* -------------------------------------------------------------------------------------------------- round */

/* Makes products read rounded copies of the weights that tt_param_round names. A copy is made directly before
   the first product that reads it. The copy is no weight (tt__is_weight), so that in mixed precision it
   has 16 bits itself. prunes: whether the program sets weights to 0 (tt_optimizer_options.prune). */
static tt_status tt__pass_round(tt_tape *t, bool prunes)
{
    const int n = tt__index(t);
    int32_t *copy = tt__new_map(t);
    bool ok = copy != NULL;
    for (int k = 0; k < n && ok; k++) {
        const int number = tt__weight(&t->code[k]);
        const int32_t w = number ? t->code[k].in[number] : 0;
        const tt__tape_value x = t->values[w];
        const tt_param *p = w && tt__is_weight(t, w) ? t->ctx->params[x.param] : NULL;
        if (!p || p->rounding == TT_ROUND_NONE) continue;
        if (prunes && p->rounding == TT_ROUND_BINARY) {
            tt__free(t->ctx, copy);
            return tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "parameter '%s' is rounded to binary numbers, which "
                            "have no 0, so that pruning has no effect: set {prune 0}, or round to ternary "
                            "numbers", p->name);
        }
        if (t->tensor > 1) {
            tt__free(t->ctx, copy);
            return tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "parameter '%s' is rounded (tt_param_round) by "
                            "scales of whole rows or matrices, which tensor ranks divide: use "
                            "{parallel.tensor 1}", p->name);
        }
        if (!copy[w]) {
            const int32_t y = tt__new_value(t, &x.shape, TT__TRANSIENT, "rounded %.60s", p->name);
            tt__instr round = tt__instr_like(&t->code[k], TT__OP_ROUND, w, y);
            round.attr.rounding = (int)p->rounding;
            copy[w] = tt__value_like(t, w, y) && tt__insert(t, k, &round) ? y : 0;
        }
        t->code[k].in[number] = copy[w];
        ok = copy[w] != 0;
    }
    tt__free(t->ctx, copy);
    return ok ? tt__settle(t, n) : TT_ERR_MEMORY;
}
