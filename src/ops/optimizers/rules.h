#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../record.h"
#include "../shapes.h"
#include "../layouts.h"
#include "../scratch.h"
#include "map8.h"
#include "adafactor.h"

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

/* Fails unless operand k has dtype f64 and shape (1, n), as the parts of tt__results have. */
static bool tt__doubles_in(tt_tape *t, const tt__instr *i, int k, int n)
{
    const tt__shape *s = tt__in(t, i, k);
    return (s->dtype == TT__F64 && s->rows == 1 && s->cols == n) || tt__bad(t, i, k, "f64 (1, %d)", n);
}

static bool tt__shape_ADD_COUNTS(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT__F64, 1, TT__TOTALS);
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
    return tt__float_in(t, i, 0) && tt__doubles_in(t, i, 1, TT__TOTALS) &&
           (!i->in[2] || tt__doubles_in(t, i, 2, 3));
}

static bool tt__shape_LOSS_SCALE(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT__F64, 1, 3);
    return tt__fixed_in(t, i, 0, 1, 2) && tt__doubles_in(t, i, 1, TT__TOTALS);
}

static const tt__rules tt__rules_ADD_COUNTS = {tt__shape_ADD_COUNTS, NULL, {NULL}, tt__no_bytes};
static const tt__rules tt__rules_MEAN_LOSS = {tt__shape_MEAN_LOSS, NULL, {NULL}, tt__no_bytes};
static const tt__rules tt__rules_CLIP = {tt__shape_CLIP, NULL, {NULL}, tt__no_bytes};
static const tt__rules tt__rules_LOSS_SCALE = {tt__shape_LOSS_SCALE, NULL, {NULL}, tt__no_bytes};

/* The shape rule of optimizers. The parameter and its states, outputs 0 to TT__STATES, have the shape of the
   gradient. Output `TT__STATES + k` has the scales of state k, if the state has 8 bits: a number for each
   TT__STATE_BLOCK elements. */
static bool tt__shape_of_update(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *g = tt__in(t, i, 0);
    out[0] = *g;
    for (int k = 1; k <= TT__STATES; k++) {
        out[k] = *g;
        if (t->values[i->out[k]].shape.dtype == TT_U8) out[k].dtype = TT_U8;
        tt__set_fixed(&out[TT__STATES + k], TT_F32, 1, tt__ceil_div(g->rows * g->cols, TT__STATE_BLOCK));
    }
    return tt__float_in(t, i, 0) && tt__fixed_in(t, i, 1, 1, 2);
}

/* Returns the bytes of scratch of an optimizer on a CPU: the maps of 8-bit states, and rows for the
   threads. */
static size_t tt__cpu_of_update(int threads, const tt_tape *t, const tt__instr *i)
{
    const bool maps = t->values[i->out[1]].shape.dtype == TT_U8;
    return (maps ? tt__maps8_bytes() : 0) + tt__chunk_bytes(threads, t, i);
}

/* The op of each optimizer has tt__rules_OP and tt__use_OP. tt__use_OP appends messages about invalid options
   to `wrong`, which may be NULL if the options are known to be valid. tt__use_OP also copies the options that
   the op reads to the op's attributes, and returns the number of states that the op keeps for each
   parameter. */

static const tt__rules tt__rules_SGD = {tt__shape_of_update, tt__layout_of_update, {NULL},
    tt__cpu_of_update};

static int tt__use_SGD(const tt_optimizer_options *o, tt__attr *a, tt__text_buffer *wrong)
{
    if (!(o->momentum >= 0 && o->momentum < 1))
        tt__print(wrong, "; momentum is %g, but must be in [0, 1)", o->momentum);
    if (o->nesterov && !(o->momentum > 0)) tt__print(wrong, "; nesterov needs a momentum above 0");
    a->beta1 = o->momentum;
    a->nesterov = o->nesterov;
    return o->momentum != 0;
}

static const tt__rules tt__rules_ADAM = {tt__shape_of_update, tt__layout_of_update, {NULL},
    tt__cpu_of_update};
static const tt__rules tt__rules_LION = {tt__shape_of_update, tt__layout_of_update, {NULL},
    tt__cpu_of_update};

static int tt__use_LION(const tt_optimizer_options *o, tt__attr *a, tt__text_buffer *wrong)
{
    if (!(o->beta1 >= 0 && o->beta1 < 1)) tt__print(wrong, "; beta1 is %g, but must be in [0, 1)", o->beta1);
    if (!(o->beta2 >= 0 && o->beta2 < 1)) tt__print(wrong, "; beta2 is %g, but must be in [0, 1)", o->beta2);
    a->beta1 = o->beta1;
    a->beta2 = o->beta2;
    return 1;
}

static bool tt__shape_MUON_MOMENTUM(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const bool ok = tt__shape_of_update(t, i, out);
    out[0].dtype = TT_F32;
    return ok;
}

static bool tt__shape_UNIT(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = *tt__in(t, i, 0);
    return tt__float_in(t, i, 0) && tt__fixed_in(t, i, 1, 1, 1);
}

static const tt__rules tt__rules_MUON_MOMENTUM = {tt__shape_MUON_MOMENTUM, tt__layout_of_update, {NULL},
    tt__cpu_of_update};
static const tt__rules tt__rules_UNIT = {tt__shape_UNIT, NULL, {NULL}};
static const tt__rules tt__rules_MUON = {tt__shape_of_update, tt__layout_of_update, {NULL}, tt__chunk_bytes};

static int tt__use_MUON(const tt_optimizer_options *o, tt__attr *a, tt__text_buffer *wrong)
{
    if (!(o->momentum > 0 && o->momentum < 1))
        tt__print(wrong, "; momentum is %g, but Muon needs one above 0 and below 1, usually 0.95",
                  o->momentum);
    tt__use_LION(o, a, wrong);
    a->beta1 = o->momentum;
    a->nesterov = o->nesterov;
    return 1;
}

static int tt__use_ADAM(const tt_optimizer_options *o, tt__attr *a, tt__text_buffer *wrong)
{
    tt__use_LION(o, a, wrong);
    if (!(o->eps >= 0)) tt__print(wrong, "; eps is %g, but must be at least 0", o->eps);
    a->eps = o->eps;
    return 2;
}

/* Adafactor: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018,
   algorithm 4. For a matrix of several rows, out[1] has the running mean of g^2 in each row, and out[2] that
   in each column. All other parameters are one row, of which out[2] alone has the running means. */
static bool tt__shape_ADAFACTOR(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *g = tt__in(t, i, 0);
    out[0] = *g;
    tt__set_fixed(&out[1], TT_F32, 1, g->rows);
    tt__set_fixed(&out[2], TT_F32, 1, g->cols);
    return tt__float_in(t, i, 0) && tt__fixed_in(t, i, 1, 1, 2);
}

static size_t tt__cpu_ADAFACTOR(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__shape *g = tt__in(t, i, 0);
    return tt__adafactor_space_of(g->rows, g->cols).end + tt__chunk_bytes(threads, t, i);
}

static const tt__rules tt__rules_ADAFACTOR = {tt__shape_ADAFACTOR, NULL, {NULL}, tt__cpu_ADAFACTOR};

static int tt__use_ADAFACTOR(const tt_optimizer_options *o, tt__attr *a, tt__text_buffer *wrong)
{
    (void)a;
    if (o->state_bits != 32 && o->state_bits != TT_STATE_BITS_BUDGET)
        tt__print(wrong, "; TT_ADAFACTOR has a state of a few rows of floats, so {state_bits %d} must be 32",
                  o->state_bits);
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
    if (o->state_bits != 32)
        tt__print(wrong, "; kind TT_OPTIMIZER_CUSTOM has states of 32 bits, so {state_bits %d} must be 32",
                  o->state_bits);
    a->optimizer = c;
    return known ? c->states : 0;
}

/* The rules of EMA, which updates the moving average of a parameter. The average is a further state, whatever
   the optimizer. */
static const tt__rules tt__rules_EMA = {tt__shape_of_update, tt__layout_of_update, {NULL}, tt__no_bytes};

/* Returns how many of n weights are pruned after the update of step number `step`, from 0 on. */
static int64_t tt__pruned_at(const tt__pruning *s, int64_t step, int64_t n)
{
    if (step < s->begin) return 0;
    const int64_t at = step - (step - s->begin) % s->every; /* the last step in which weights were chosen */
    const double left = step >= s->end ? 0 : (double)(s->end - at) / (double)(s->end - s->begin);
    return (int64_t)((double)s->share * (1 - left * left * left) * (double)n + 0.5);
}

static bool tt__shape_MOVEMENT(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = *tt__in(t, i, 0);
    out[0].dtype = TT_F32;
    return tt__float_in(t, i, 0) && tt__fixed_in(t, i, 1, 1, 2) && tt__float_in(t, i, 2);
}

/* The rules of MOVEMENT, which adds to the movements of a matrix's weights; see the CPU's movement_rows. */
static const tt__rules tt__rules_MOVEMENT = {tt__shape_MOVEMENT, NULL, {NULL}, tt__chunk_bytes};

static bool tt__shape_PRUNE(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[1] = t->values[i->out[1]].shape;
    tt__set_fixed(&out[0], TT_U8, 1, tt__mask_bytes(out[1].rows * out[1].cols));
    return tt__fixed_in(t, i, 0, 1, 2);
}

enum { TT__PRUNE_BINS = 2048 }; /* counters, for 11 of the 32 bits of a key */

static size_t tt__cpu_PRUNE(int threads, const tt_tape *t, const tt__instr *i)
{
    (void)threads; (void)t; (void)i;
    return sizeof(int64_t) * TT__PRUNE_BINS;
}

static const tt__rules tt__rules_PRUNE = {tt__shape_PRUNE, NULL, {NULL}, tt__cpu_PRUNE};

/* The states of a parameter have the numbers 1 to TT__STATES, and the scales of state k have the number
   `TT__STATES + k`. */
enum { TT__EMA = 2 * TT__STATES + 1 }; /* number of the state that is the parameter's moving average */
enum { TT__PRUNED = TT__EMA + 1 }; /* number of the state that is the mask of PRUNE */
enum { TT__MOVEMENT = TT__PRUNED + 1 }; /* number of the state that MOVEMENT writes; the last state */
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

/* Returns whether updates need whole matrices. */
static bool tt__is_muon(const tt__optimizer *o) { return o->op == TT__OP_MUON; }

/* Returns how many floats state k, from 0, of a parameter of shape *s has, if the state is a row of floats.
   0: the parameter has no such state. -1: the state has the parameter's shape. */
static int64_t tt__row_state(const tt__optimizer *o, int k, const tt__shape *s)
{
    if (o->op != TT__OP_ADAFACTOR) return -1;
    return k ? s->cols : s->rows > 1 ? s->rows : 0;
}
