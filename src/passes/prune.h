#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/edit.h"
#include "../ops/record.h"

/* -------------------------------------------------------------------------------------------------- prune */

/* Removes instructions whose outputs are neither read nor kept nor persistent. If `drop_saved` (after
   differentiation), also removes outputs saved for the backward that the backward does not read. Collectives
   stay, because other ranks take part in them. */
static tt_status tt__pass_prune(tt_tape *t, int32_t root, bool drop_saved)
{
    bool *needed = (bool *)tt__calloc(t->ctx, (size_t)t->n_values);
    if (!needed) return TT_ERR_MEMORY;
    if (root) needed[t->values[root].base] = true;
    for (int32_t v = 1; v < t->n_values; v++)
        if (t->values[v].keep || t->values[v].persistent) needed[t->values[v].base] = true;
    for (int k = t->n_code - 1; k >= 0; k--) {
        tt__instr *i = &t->code[k];
        const bool of_ranks = tt__rules_of(i)->phases != 0;
        bool live = of_ranks || (tt__is(i, TT__WAITS) && needed[t->values[i->in[0]].base]);
        for (int j = 0; j < TT__MAX_OUT; j++) live |= i->out[j] && needed[t->values[i->out[j]].base];
        for (int j = 0; j < TT__MAX_OUT && of_ranks; j++) needed[t->values[i->out[j]].base] = true;
        for (int j = 0; j < TT__MAX_IN && live; j++) if (i->in[j]) needed[t->values[i->in[j]].base] = true;
        /* Column sums include all that earlier instructions wrote to the summed output, so those instructions
           stay. */
        for (int o = 0; o < tt__summed(i) && live; o++)
            if (tt__column_sums(i, o)) needed[t->values[i->out[o]].base] = true;
        if (!live) i->op = -1;
        if (!live || !drop_saved || !tt__is(i, TT__SAVES1) || !i->out[1]) continue;
        const tt__tape_value *x = &t->values[i->out[1]];
        /* out[1] stays if its dtype is not that of out[0], which is then computed from the rounded out[1] */
        bool same = x->pinned_f32 || x->shape.dtype == t->values[i->out[0]].shape.dtype;
        if (same && !needed[x->base]) i->out[1] = 0;
    }
    tt__free(t->ctx, needed);
    return tt__settle(t, t->n_code);
}
