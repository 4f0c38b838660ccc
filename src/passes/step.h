#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/shapes.h"
#include "verify.h"

/* --------------------------------------------------------------------------------------------------- step */

/* Makes a value of shape (1, cols), whose numbers instructions and the host share. The value is a storage or,
   if `of` is not 0, a view of value `of` from element `offset` on. Returns 0 on failure. */
static int32_t tt__new_step_value(tt_tape *t, tt_dtype dtype, int64_t cols, int32_t of, size_t offset,
                                  const char *name)
{
    tt__shape shape;
    tt__set_fixed(&shape, dtype, 1, cols);
    if (of) return tt__new_view(t, of, &shape, (int64_t)offset, cols, name);
    int32_t id = tt__new_value(t, &shape, TT__STEP, "%s", name);
    /* Kernels of a GPU can access this value only in the device's memory. */
    if (id) t->values[id].space = t->host ? TT__HOST : TT__DEVICE;
    return id;
}

/* Makes the values for a step's results: the totals of losses and, in training, the gradient's norm and the
   loss scale. */
static tt_status tt__new_results(tt_tape *t, bool train, bool scales)
{
    t->results = tt__new_step_value(t, TT__F64, (int64_t)(sizeof(tt__results) / 8), 0, 0, "step results");
    if (!t->results) return TT_ERR_MEMORY;
    t->values[t->results].keep = true;
    t->values[t->results].persistent = t->accumulate || scales || t->stages > 1;
    t->totals = tt__new_step_value(t, TT__F64, TT__TOTALS, t->results, 0, "totals");
    if (train && (t->data > 1 || t->slots > 1)) {
        t->counted = tt__new_step_value(t, TT__F64, TT__TOTALS, 0, 0, "counted on a rank");
        if (!t->counted) return TT_ERR_MEMORY;
        t->values[t->counted].persistent = true;
        t->values[t->counted].slots = t->slots;
    }
    const size_t scale = offsetof(tt__results, scale) / 8, clipped = offsetof(tt__results, clipped) / 8;
    if (scales) t->scale = tt__new_step_value(t, TT__F64, 3, t->results, scale, "loss scale");
    if (train) t->clipped = tt__new_step_value(t, TT_F32, 2, t->results, clipped, "gradient norm and factor");
    return t->totals && (t->scale || !scales) && (t->clipped || !train) ? TT_OK : TT_ERR_MEMORY;
}

/* Inserts the instructions that add each loss's counts (the sum of losses, the targets, the correct
   predictions) to the totals of the step. */
static tt_status tt__pass_counts(tt_tape *t)
{
    bool first = true;
    int n = tt__index(t);
    for (int k = 0; k < n && t->results; k++) {
        if (!tt__is(&t->code[k], TT__LOSS) || t->code[k].attr.uncounted) continue;
        const int32_t counts = t->code[k].out[TT__LOSS_COUNTS], to = t->counted ? t->counted : t->totals;
        tt__instr add = tt__instr_like(&t->code[k], TT__OP_ADD_COUNTS, counts, to);
        add.add = !first;
        add.add_later = first && t->accumulate;
        add.attr.by_total = t->code[k].attr.by_total; /* the fourth count is then no sum of margins */
        first = false;
        const int at = t->values[counts].writer + 1; /* after tensor ranks have summed the counts */
        if (!tt__insert(t, at, &add)) return TT_ERR_MEMORY;
    }
    return tt__settle(t, n);
}

/* Makes the step's settings an operand of the instructions that need them. */
static tt_status tt__pass_settings(tt_tape *t)
{
    for (int k = 0; k < t->n_code; k++) {
        if (!tt__needs_run(t, &t->code[k])) continue;
        if (!t->run) t->run = tt__new_step_value(t, TT_U8, sizeof(tt__step_settings), 0, 0, "step settings");
        if (!t->run) return TT_ERR_MEMORY;
        t->code[k].in[TT__RUN_IN] = t->run;
    }
    return TT_OK;
}

/* Returns whether v is a parameter that has a gradient. */
static bool tt__is_trained(const tt_tape *t, int32_t v)
{
    return t->values[v].storage == TT__PARAMETER && t->values[v].base == v && t->values[v].grad;
}
