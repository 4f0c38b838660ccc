#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"

/* ------------------------------------------------------------------------------------------------- features
   The frozen part of a recorded tape consists of the instructions that depend on inputs and frozen parameters
   alone. The features are the results of the frozen part that the rest of the tape reads. A program can read
   features as inputs, in place of computing the frozen part. */

/* Facts about a tape that tt__find_features needs. The index of a storage's flags is the number of its base
   value. */
typedef struct tt__frozen_part {
    bool *trained;   /* of a storage: depends on a trained parameter */
    bool *fed;       /* of a storage: depends on an input */
    bool *needed;    /* of a storage: an instruction that reads a frozen parameter depends on it */
    bool *made;      /* of a storage: an instruction of the frozen part writes it */
    bool *feature;   /* of a storage: it is a feature */
    bool *within;    /* of an instruction: it belongs to the frozen part */
} tt__frozen_part;

static bool tt__any_of(const tt_tape *t, const tt__instr *i, const bool *flags)
{
    for (int j = 0; j < TT__MAX_IN; j++) if (i->in[j] && flags[t->values[i->in[j]].base]) return true;
    return false;
}

static void tt__flag_outputs(const tt_tape *t, const tt__instr *i, bool *flags)
{
    for (int j = 0; j < TT__MAX_OUT; j++) if (i->out[j]) flags[t->values[i->out[j]].base] = true;
}

/* Returns whether each operand of instruction i is an input, a parameter, or made by the frozen part, and at
   least one operand is made by the frozen part. */
static bool tt__only_of_part(const tt_tape *t, const tt__instr *i, const bool *made)
{
    for (int j = 0; j < TT__MAX_IN; j++) {
        const int32_t base = t->values[i->in[j]].base;
        if (base && t->values[base].storage == TT__TRANSIENT && !made[base]) return false;
    }
    return tt__any_of(t, i, made);
}

/* Notes the frozen part of the tape. An instruction belongs to the frozen part if it does not depend on a
   trained parameter, and if it reads a frozen parameter or comes before an instruction that reads one. After
   the last instruction that reads a frozen parameter, the frozen part goes on until the first dropout. So it
   includes, for example, the choice of the first row of each sequence. The dropout stays with the trained
   part. */
static void tt__note_frozen_part(const tt_tape *t, tt__frozen_part *p)
{
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__tape_value *x = &t->values[v];
        if (x->base != v) continue;
        p->trained[v] = x->storage == TT__PARAMETER && !t->ctx->params[x->param]->frozen;
        p->fed[v] = x->storage == TT__INPUT;
    }
    for (int k = 0; k < t->n_code; k++) {
        if (tt__any_of(t, &t->code[k], p->trained)) tt__flag_outputs(t, &t->code[k], p->trained);
        if (tt__any_of(t, &t->code[k], p->fed)) tt__flag_outputs(t, &t->code[k], p->fed);
    }
    for (int k = t->n_code - 1; k >= 0; k--) {
        const tt__instr *i = &t->code[k];
        bool within = false;
        for (int j = 0; j < TT__MAX_IN; j++)
            within = within || (i->in[j] && t->values[t->values[i->in[j]].base].storage == TT__PARAMETER);
        for (int j = 0; j < TT__MAX_OUT; j++)
            within = within || (i->out[j] && p->needed[t->values[i->out[j]].base]);
        if (!within || tt__any_of(t, i, p->trained)) continue;
        p->within[k] = true;
        for (int j = 0; j < TT__MAX_IN; j++) if (i->in[j]) p->needed[t->values[i->in[j]].base] = true;
    }
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const bool random = tt__is(i, TT__RANDOM) && i->attr.dropout > 0;
        const bool trained = random || tt__is(i, TT__LOSS) || tt__any_of(t, i, p->trained);
        if (!p->within[k] && !trained) p->within[k] = tt__only_of_part(t, i, p->made);
        if (p->within[k]) tt__flag_outputs(t, i, p->made);
    }
}

/* Lists the features of a tape in *features, which the caller frees. output: a value that is a feature if the
   frozen part makes it. Fails if the frozen part has no features, or a feature without a row for each row of
   an input. Values that depend on no input are no features. */
static tt_status tt__find_features(tt_tape *t, tt_value output, int32_t **features, int *count)
{
    tt__frozen_part p;
    const size_t values = (size_t)t->n_values, all = 5 * values + (size_t)t->n_code;
    char what[256];
    bool *flags = (bool *)tt__calloc(t->ctx, all);
    int32_t *list = (int32_t *)tt__alloc(t->ctx, sizeof *list * values);
    *count = 0;
    *features = list;
    if (!flags || !list) {
        tt__free(t->ctx, flags);
        return TT_ERR_MEMORY;
    }
    p.trained = flags;
    p.fed = flags + values;
    p.needed = flags + 2 * values;
    p.made = flags + 3 * values;
    p.feature = flags + 4 * values;
    p.within = flags + 5 * values;
    tt__note_frozen_part(t, &p);
    p.feature[t->values[output.id].base] = true;
    for (int k = 0; k < t->n_code; k++)
        for (int j = 0; j < TT__MAX_IN && !p.within[k]; j++)
            p.feature[t->values[t->code[k].in[j]].base] = true;
    tt_status status = TT_OK;
    for (int32_t v = 1; v < t->n_values && status == TT_OK; v++) {
        const tt__tape_value *x = &t->values[v];
        if (x->base != v || !p.feature[v] || !p.made[v] || !p.fed[v]) continue;
        list[(*count)++] = v;
        if (!x->shape.axis || x->shape.extra || x->shape.dtype != TT_F32)
            status = tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "{features_once}: %s depends on frozen parameters "
                              "alone, but has no row for each example or token: unfreeze the parameters "
                              "before it", tt__describe(t, v, what, sizeof what));
    }
    if (status == TT_OK && !*count)
        status = tt__fail(t->ctx, TT_ERR_ARGUMENT, "{features_once} is set, but the model computes nothing "
                          "from inputs and frozen parameters alone: freeze the first layers, for example "
                          "the encoder (tt_param_freeze)");
    tt__free(t->ctx, flags);
    return status;
}

/* Makes features inputs of the tape. The pass "prune" then removes the frozen part. */
static tt_status tt__read_features(tt_tape *t, const int32_t *features, int count)
{
    for (int n = 0; n < count; n++)
        for (int k = 0; k < t->n_code; k++)
            if (t->code[k].op >= 0 && tt__writes(t, &t->code[k], features[n])) t->code[k] = tt__new_instr(-1);
    for (int32_t v = 1; v < t->n_values; v++)
        for (int n = 0; n < count; n++)
            if (t->values[v].base == features[n]) t->values[v].storage = TT__INPUT;
    return tt__settle(t, t->n_code);
}
