#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../record.h"
#include "../shapes.h"
#include "../layouts.h"
#include "../scratch.h"

/* ------------------------------------------------------------------------------------------------ updates */

static bool tt__shape_SUM_SQUARES(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT_F32, 1, 1);
    return tt__float_in(t, i, 0);
}

/* Returns the bytes of scratch on a CPU: a sum for each chunk, and rows for the threads. */
static size_t tt__cpu_SUM_SQUARES(int threads, const tt_tape *t, const tt__instr *i)
{
    int64_t chunks = tt__ceil_div(tt__in(t, i, 0)->rows * tt__in(t, i, 0)->cols, TT__CHUNK);
    return tt__align_up((size_t)chunks * 8) + tt__chunk_bytes(threads, t, i);
}

static const tt__rules tt__rules_SUM_SQUARES = {tt__shape_SUM_SQUARES, tt__layout_of_squares, {NULL},
    tt__cpu_SUM_SQUARES};

/* For a gradient that is divided over ranks in shards of whole chunks, three instructions do the work of
   SUM_SQUARES, with the same bits: CHUNK_SQUARES sums the squares of each chunk of a shard, ALL_GATHER makes
   one table of all sums, and FOLD_SQUARES adds up the table. */
static bool tt__shape_CHUNK_SQUARES(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *g = tt__in(t, i, 0);
    tt__set_fixed(&out[0], TT__F64, 1, tt__ceil_div(g->rows * g->cols, TT__CHUNK));
    return tt__float_in(t, i, 0);
}

static bool tt__shape_FOLD_SQUARES(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *s = tt__in(t, i, 0);
    tt__set_fixed(&out[0], TT_F32, 1, 1);
    return (s->dtype == TT__F64 && s->rows == 1) || tt__bad(t, i, 0, "a row of f64");
}

static bool tt__layout_FOLD_SQUARES(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    (void)t; (void)i;
    out[0] = in[0];
    return true;
}

static const tt__rules tt__rules_CHUNK_SQUARES = {tt__shape_CHUNK_SQUARES, tt__layout_of_squares, {NULL},
    tt__chunk_bytes};
static const tt__rules tt__rules_FOLD_SQUARES = {tt__shape_FOLD_SQUARES, tt__layout_FOLD_SQUARES, {NULL},
    tt__no_bytes};

/* Fails unless operand k has dtype f64 and shape (1, 3), as the parts of tt__results have. */
static bool tt__doubles_in(tt_tape *t, const tt__instr *i, int k)
{
    const tt__shape *s = tt__in(t, i, k);
    return (s->dtype == TT__F64 && s->rows == 1 && s->cols == 3) || tt__bad(t, i, k, "f64 (1, 3)");
}

static bool tt__shape_ADD_COUNTS(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT__F64, 1, 3);
    return tt__fixed_in(t, i, 0, 1, 4);
}

static bool tt__shape_MEAN_LOSS(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT_F32, 1, 1);
    return tt__fixed_in(t, i, 0, 1, 4);
}

static bool tt__shape_CLIP(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT_F32, 1, 2);
    return tt__float_in(t, i, 0) && tt__doubles_in(t, i, 1) && (!i->in[2] || tt__doubles_in(t, i, 2));
}

static bool tt__shape_LOSS_SCALE(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT__F64, 1, 3);
    return tt__fixed_in(t, i, 0, 1, 2) && tt__doubles_in(t, i, 1);
}

static const tt__rules tt__rules_ADD_COUNTS = {tt__shape_ADD_COUNTS, NULL, {NULL}, tt__no_bytes};
static const tt__rules tt__rules_MEAN_LOSS = {tt__shape_MEAN_LOSS, NULL, {NULL}, tt__no_bytes};
static const tt__rules tt__rules_CLIP = {tt__shape_CLIP, NULL, {NULL}, tt__no_bytes};
static const tt__rules tt__rules_LOSS_SCALE = {tt__shape_LOSS_SCALE, NULL, {NULL}, tt__no_bytes};

/* The shape rule of optimizers: all outputs have the shape and dtype of the gradient. */
static bool tt__shape_of_update(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    for (int k = 0; k < TT__MAX_OUT; k++) out[k] = *tt__in(t, i, 0);
    return tt__float_in(t, i, 0) && tt__fixed_in(t, i, 1, 1, 2);
}

/* The op of each optimizer has tt__rules_OP and tt__use_OP. tt__use_OP appends messages about invalid options
   to `wrong`, which may be NULL if the options are known to be valid. It copies the options that the op reads
   to the op's attributes, and returns the number of states that the op keeps for each parameter. */

static const tt__rules tt__rules_SGD = {tt__shape_of_update, tt__layout_of_update, {NULL}, tt__chunk_bytes};

static int tt__use_SGD(const tt_optimizer_options *o, tt__attr *a, tt__text_buffer *wrong)
{
    if (!(o->momentum >= 0 && o->momentum < 1))
        tt__print(wrong, "; momentum is %g, but must be in [0, 1)", o->momentum);
    if (o->nesterov && !(o->momentum > 0)) tt__print(wrong, "; nesterov needs a momentum above 0");
    a->beta1 = o->momentum;
    a->nesterov = o->nesterov;
    return o->momentum != 0;
}

static const tt__rules tt__rules_ADAM = {tt__shape_of_update, tt__layout_of_update, {NULL}, tt__chunk_bytes};
static int tt__use_ADAM(const tt_optimizer_options *o, tt__attr *a, tt__text_buffer *wrong)
{
    if (!(o->beta1 >= 0 && o->beta1 < 1)) tt__print(wrong, "; beta1 is %g, but must be in [0, 1)", o->beta1);
    if (!(o->beta2 >= 0 && o->beta2 < 1)) tt__print(wrong, "; beta2 is %g, but must be in [0, 1)", o->beta2);
    if (!(o->eps >= 0)) tt__print(wrong, "; eps is %g, but must be at least 0", o->eps);
    a->beta1 = o->beta1;
    a->beta2 = o->beta2;
    a->eps = o->eps;
    return 2;
}

/* Returns the bytes of the gradient that the caller's function gets. */
static size_t tt__cpu_CUSTOM_UPDATE(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__shape *g = tt__in(t, i, 0);
    (void)threads;
    return tt__align_up((size_t)(g->rows * g->cols) * sizeof(float));
}

static const tt__rules tt__rules_CUSTOM_UPDATE = {tt__shape_of_update, tt__layout_of_update, {NULL},
    tt__cpu_CUSTOM_UPDATE};

static int tt__use_CUSTOM_UPDATE(const tt_optimizer_options *o, tt__attr *a, tt__text_buffer *wrong)
{
    const tt_custom_optimizer *c = o->custom;
    const bool known = c && c->update && c->states >= 0 && c->states <= 2;
    if (!c || !c->update)
        tt__print(wrong, "; kind TT_OPTIMIZER_CUSTOM needs `custom` with a function `update`");
    else if (!known) tt__print(wrong, "; custom.states %d is not in 0 to 2", c->states);
    a->optimizer = c;
    return known ? c->states : 0;
}

/* The rules of EMA, which updates the moving average of a parameter. The average is a further state, whatever
   the optimizer. */
static const tt__rules tt__rules_EMA = {tt__shape_of_update, tt__layout_of_update, {NULL}, tt__no_bytes};

enum { TT__STATES = 2 }; /* max number of states that an op keeps for a parameter */
enum { TT__EMA = TT__STATES + 1 }; /* number of the state that is the parameter's moving average */
typedef struct tt__optimizer {
    const char *name;
    int op;
    bool decoupled;
    struct { const char *name, *word; } state[TT__STATES];
    int (*use)(const tt_optimizer_options *o, tt__attr *a, tt__text_buffer *wrong);
} tt__optimizer;
#define TT__OPTIMIZER(kind, name, op, decoupled, state, word, second, its_word) \
    {name, TT__OP_##op, decoupled, {{state, word}, {second, its_word}}, tt__use_##op},
static const tt__optimizer tt__optimizers[] = {TT__OPTIMIZERS(TT__OPTIMIZER)}; /* element k is for
                                                                                  tt_optimizer_kind k */
#undef TT__OPTIMIZER
