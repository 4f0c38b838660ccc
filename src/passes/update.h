#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/record.h"
#include "../ops/shapes.h"
#include "../ops/optimizers/rules.h"
#include "precision.h"
#include "step.h"
#include "data.h"
#include "muon.h"

/* ------------------------------------------------------------------------------------------------- update */

/* Makes the value of a parameter's optimizer state number `state`, counted from 1. */
static int32_t tt__new_state(tt__builder *b, int32_t param, int state, tt_dtype dtype, const char *what)
{
    tt_tape *t = b->t;
    tt__shape shape = t->values[param].shape;
    shape.dtype = dtype;
    int32_t id = tt__new_value(t, &shape, TT__STATE, "%s(%.60s)", what, t->values[param].name);
    if (!tt__value_like(t, param, id)) { b->ok = false; return 0; }
    t->values[id].persistent = true;
    t->values[id].param = t->values[param].param;
    t->values[id].state = state;
    return id;
}

/* Makes the value of a state that is a row of n floats and belongs to value `of`. The row has this rank's
   shard `part`. */
static int32_t tt__new_row(tt__builder *b, int32_t of, int state, int64_t n, const tt__part *part,
                           const char *what)
{
    tt_tape *t = b->t;
    const int param = t->values[of].param;
    tt__shape shape;
    tt__set_fixed(&shape, TT_F32, 1, n);
    int32_t id = of ? tt__new_value(t, &shape, TT__STATE, "%s(%.50s)", what, t->ctx->params[param]->name) : 0;
    if (!tt__value_like(t, of, id)) { b->ok = false; return 0; }
    t->values[id].part = *part;
    t->values[id].persistent = t->values[id].row_state = true;
    t->values[id].param = param;
    t->values[id].state = state;
    return id;
}

/* Makes the value of the scales of an 8-bit state, which has the value `of`. A rank that has a shard of the
   state has the scales of the shard's blocks. */
static int32_t tt__new_scales(tt__builder *b, int32_t of, const char *what)
{
    const tt__tape_value x = b->t->values[of];
    const int64_t n = tt__ceil_div(x.shape.rows * x.shape.cols, TT__STATE_BLOCK);
    char name[32];
    tt__part part = x.part;
    part.of = tt__ceil_div(part.of, TT__STATE_BLOCK);
    part.unit /= TT__STATE_BLOCK;
    snprintf(name, sizeof name, "scales of %.20s", what);
    return tt__new_row(b, of, TT__STATES + x.state, n, &part, name);
}

/* Makes the value of the mask of the pruned weights of a parameter; see tt__mask_bytes. */
static int32_t tt__new_mask(tt__builder *b, int32_t param)
{
    tt_tape *t = b->t;
    const tt__tape_value x = t->values[param];
    tt__shape shape;
    tt__set_fixed(&shape, TT_U8, 1, tt__mask_bytes(x.shape.rows * x.shape.cols));
    const int32_t id = tt__new_value(t, &shape, TT__STATE, "pruned(%.60s)", x.name);
    if (!(b->ok = id != 0)) return 0;
    t->values[id].persistent = t->values[id].row_state = true;
    t->values[id].param = x.param;
    t->values[id].state = TT__PRUNED;
    return id;
}

#ifndef TT__STATE_SMALL /* tests set a smaller number */
#define TT__STATE_SMALL 4096 /* elements; states of smaller parameters, which would save little memory, keep
                                the dtype of the weights */
#endif

/* Returns the dtype of the optimizer states of parameter v. */
static tt_dtype tt__state_dtype(const tt_tape *t, const tt_optimizer_options *o, int32_t v)
{
    const tt_dtype dtype = t->values[v].shape.dtype;
    const bool large = t->ctx->params[t->values[v].param]->size >= TT__STATE_SMALL;
    if (o->state_bits == 8 && large) return TT_U8;
    /* In f16 the squares of small gradients would be 0. */
    return dtype == TT_F16 || (o->state_bits == 16 && large) ? TT_BF16 : dtype;
}

static bool tt__decays(tt_context *ctx, const tt_optimizer_options *o, int param)
{
    if (!o->no_decay) return ctx->params[param]->ndim > 1;
    for (int k = 0; o->no_decay[k]; k++)
        if (tt__match(o->no_decay[k], ctx->params[param]->name)) return false;
    return true;
}

/* Returns the layer's number in a parameter's name; -1: none. The number is the first number in the name that
   has a '.', a '_' or nothing before it, and a '.' or nothing after it. */
static int tt__layer_of(const char *name)
{
    enum { MAX_DIGITS = 6 };
    for (const char *c = name; *c; c++) {
        const size_t digits = strspn(c, "0123456789");
        const bool begins = c == name || c[-1] == '.' || c[-1] == '_';
        const bool ends = !c[digits] || c[digits] == '.';
        if (digits && digits <= MAX_DIGITS && begins && ends) return atoi(c);
        if (digits) c += digits - 1;
    }
    return -1;
}

/* The layers that the names of a context's parameters tell. */
typedef struct tt__layers {
    int count;      /* one more than the largest number of a layer */
    int begin;      /* index of the first parameter that belongs to a layer; 0 if none does */
} tt__layers;

static tt__layers tt__find_layers(const tt_context *ctx)
{
    tt__layers layers = {0, 0};
    for (int k = 0; k < ctx->n_params; k++) {
        const int layer = tt__layer_of(ctx->params[k]->name);
        if (layer >= 0 && !layers.count) layers.begin = k;
        layers.count = (int)tt__max(layers.count, layer + 1);
    }
    return layers;
}

/* Returns the factor on the learning rate of a parameter, by the optimizer's options. */
static float tt__lr_factor_of(const tt_context *ctx, const tt_optimizer_options *o, tt__layers layers,
                              int param)
{
    const char *name = ctx->params[param]->name;
    const int layer = tt__layer_of(name), above = layer >= 0 ? layers.count - layer : layers.count + 1;
    double factor = layer >= 0 || param < layers.begin ? tt__pow(o->layer_decay, above) : 1;
    for (const tt_lr_rule *r = o->lr_rules; r && r->pattern; r++) {
        if (!tt__match(r->pattern, name)) continue;
        factor *= r->scale;
        break;
    }
    return (float)factor;
}

/* Returns whether this pipeline stage or another one trains parameter v. */
static bool tt__is_listed(const tt_tape *t, int32_t v)
{
    return tt__is_trained(t, v) || (t->values[v].elsewhere && t->values[v].grad);
}

/* Returns a list of the *n trained parameters, in the order of t->squares, which has the squared norms of
   their gradients. The first *parted parameters are those that tensor ranks shard. The caller frees the
   array. NULL: out of memory. */
static int32_t *tt__trained(const tt_tape *t, int *n, int *parted)
{
    int32_t *list = (int32_t *)tt__alloc(t->ctx, sizeof *list * (size_t)t->n_values);
    *n = *parted = 0;
    for (int whole = 0; whole < 2 && list; whole++)
        for (int32_t v = 1; v < t->n_values; v++) {
            if (!tt__is_listed(t, v) || (t->values[v].part.split == TT__WHOLE) != whole) continue;
            list[(*n)++] = v;
            *parted += !whole;
        }
    return list;
}

/* Returns whether two stages train parameter v and this stage is the second of the two. The first stage alone
   squares the gradient. */
static bool tt__is_tied_again(const tt_tape *t, int32_t v)
{
    return t->values[v].tied[1] && t->values[v].tied[1] == t->stage;
}

/* Appends an instruction that runs once a step, and runs it together with the instruction before if both have
   the same op. */
static bool tt__emit_step(tt_tape *t, int op, int32_t in, int32_t out)
{
    const tt__instr i = tt__instr_of(op, in, out);
    return in && out && tt__append_step(t, &i, true);
}

/* The pass's notes on a trained parameter. */
typedef struct tt__due {
    int32_t clipped;        /* value with the gradient's norm and the factor that the update reads */
    int32_t target, state[2 * TT__STATES]; /* values that this rank updates. target: the parameter or its
                                              shard; state: the optimizer states or their shards, then the
                                              scales of states in 8 bits (0: none) */
    int32_t average;        /* the parameter's moving average; 0: none */
    int32_t pruned, movement; /* the mask of pruned weights, and the movements of weights; 0: none */
    uint32_t random;
    int32_t chunks;         /* value with the squared norm of each chunk of the gradient; 0: none yet */
    int next;               /* for updates in the backward: 1 + the index in `list` of the next parameter
                               whose update is due at the same instruction; 0: none */
} tt__due;

typedef struct tt__updater {
    tt_tape *t;
    const tt_optimizer_options *o;
    int32_t *list;          /* the n trained parameters; tensor ranks shard the first `parted` of them */
    int n, parted;
    int32_t parts;          /* value with the squared norms of this rank's shards of the first `parted`
                               gradients */
    int *row, rows;         /* row: indices in `list` of the parameters that the pass updates together now;
                               rows: their number */
    tt__due *due;           /* for each value; used for trained parameters only */
} tt__updater;

/* Returns a view of element `row` of x, f32 (rows, 1); 0 after tt__tape_fail. */
static int32_t tt__number_view(tt_tape *t, int32_t x, int row)
{
    const tt__shape number = {TT_F32, 1, 1, 0, 0};
    return tt__new_view(t, x, &number, row, 1, t->values[x].name);
}

/* Appends the squared norms of gradients. The squared norm of a gradient that each rank has whole is one
   instruction. If a gradient is sharded, each data rank squares the chunks of its shard, gathers the squares
   of all ranks and sums them. */
static bool tt__square_gradients(tt__updater *u)
{
    tt_tape *t = u->t;
    bool ok = true;
    for (int m = 0; m < u->rows && ok; m++) {
        const int k = u->row[m];
        const int32_t g = t->values[u->list[k]].grad;
        if (t->values[g].part.unit || tt__is_tied_again(t, u->list[k])) continue;
        ok = tt__emit_step(t, TT__OP_SUM_SQUARES, g,
                           tt__number_view(t, k < u->parted ? u->parts : t->squares, k));
    }
    /* `stage` 0 squares the chunks of each shard, 1 gathers the squares of all ranks, 2 sums them. */
    for (int stage = 0; stage < 3; stage++)
        for (int m = 0; m < u->rows && ok; m++) {
            const int k = u->row[m];
            const tt__tape_value *x = &t->values[u->list[k]];
            const int32_t g = x->grad;
            tt__part part = t->values[g].part;
            if (!part.unit || tt__is_tied_again(t, u->list[k])) continue;
            part.of = tt__ceil_div(part.of, part.unit);
            part.unit = 1;
            part.split = TT__WHOLE;
            const tt__shape shape = {TT__F64, 1, part.of, 0, 0};
            int32_t *chunks = &u->due[u->list[k]].chunks;
            if (!*chunks) *chunks = tt__new_value(t, &shape, TT__TRANSIENT, "squares of %.60s", x->name);
            const int32_t table = *chunks;
            const int32_t shard = table && stage < 2 ? tt__shard_view(t, table, &part) : 0;
            if (stage == 0) ok = tt__emit_step(t, TT__OP_CHUNK_SQUARES, g, shard);
            else if (stage == 1) {
                tt__instr gather = tt__data_move(TT__OP_ALL_GATHER, shard, table, &part);
                ok = shard && tt__append_step(t, &gather, true);
            } else
                ok = tt__emit_step(t, TT__OP_FOLD_SQUARES, table,
                                   tt__number_view(t, k < u->parted ? u->parts : t->squares, k));
        }
    return ok;
}

/* Appends the sums, over the tensor ranks, of the squared norms of sharded gradients. All norms have one
   instruction; but if the backward updates parameters, each gradient has its own instruction. */
static bool tt__sum_parts(tt__updater *u)
{
    tt_tape *t = u->t;
    const tt__shape all = {TT_F32, u->parted, 1, 0, 0};
    bool ok = true;
    for (int m = 0; m < u->rows && ok; m++) {
        const int k = u->row[m];
        if (k >= u->parted) continue;
        const int32_t x = t->early ? tt__number_view(t, u->parts, k) : u->parts;
        const int32_t y = t->early ? tt__number_view(t, t->squares, k)
                                   : tt__new_view(t, t->squares, &all, 0, 1, t->values[u->parts].name);
        tt__instr sum = tt__data_move(TT__OP_ALL_REDUCE, x, y, NULL);
        sum.move.over = TT__OVER_TENSOR;
        ok = x && y && tt__append_step(t, &sum, true);
        if (!t->early) break;
    }
    return ok;
}

/* Appends a CLIP, which computes the norm of all gradients from their squared norms x, and the factor by
   which the update multiplies the gradients. CLIP writes the norm and the factor to y. */
static bool tt__emit_clip(tt__updater *u, int32_t x, int32_t y)
{
    tt__instr i = tt__instr_of(TT__OP_CLIP, x, y);
    i.in[1] = u->t->totals;
    i.in[2] = u->t->scale;
    i.attr.clip_norm = u->o->clip_norm;
    return x && y && tt__append_step(u->t, &i, true);
}

/* Appends a collective on x, in place, over the ranks at the same position in all pipeline stages. */
static bool tt__over_stages(tt_tape *t, int op, int32_t x)
{
    tt__instr i = tt__data_move(op, x, x, NULL);
    i.move.over = TT__OVER_STAGES;
    return x && tt__append_step(t, &i, false);
}

static bool tt__append_zeros(tt_tape *t, int32_t v)
{
    const tt__instr i = tt__instr_of(TT__OP_FILL, 0, v);
    return tt__append_step(t, &i, false);
}

/* Appends the work of a pipeline that comes before squaring gradients. The last stage sends the counts of
   losses to all stages. Two stages that share a parameter sum their two gradients of the parameter. Squared
   norms start as 0, because a stage writes only those of its own gradients. */
static bool tt__before_squares(tt__updater *u)
{
    tt_tape *t = u->t;
    if (t->stages <= 1) return true;
    bool ok = tt__over_stages(t, TT__OP_BROADCAST, t->totals) && tt__append_zeros(t, t->squares) &&
              (!u->parted || tt__append_zeros(t, u->parts));
    for (int m = 0; m < u->rows && ok; m++) {
        const tt__tape_value *x = &t->values[u->list[u->row[m]]];
        if (!x->tied[1]) continue;
        tt__instr sum = tt__data_move(TT__OP_ALL_REDUCE, x->grad, x->grad, NULL);
        sum.move.over = TT__OVER_TIED;
        sum.move.from = x->tied[0];
        sum.move.to = x->tied[1];
        ok = tt__append_step(t, &sum, false);
    }
    return ok;
}

/* Appends the sum of the squared norms over pipeline stages. For each gradient, all stages but one add 0. */
static bool tt__after_squares(tt__updater *u)
{
    return u->t->stages <= 1 || tt__over_stages(u->t, TT__OP_ALL_REDUCE, u->t->squares);
}

/* Appends a CLIP for each parameter, so that no parameter with an infinite or NaN gradient is updated. */
static bool tt__clip_alone(tt__updater *u)
{
    tt_tape *t = u->t;
    const tt__shape shape = {TT_F32, 1, 2, 0, 0};
    bool ok = true;
    for (int m = 0; m < u->rows && ok; m++) {
        const int k = u->row[m];
        tt__due *d = &u->due[u->list[k]];
        d->clipped = tt__new_value(t, &shape, TT__TRANSIENT, "factor of %.60s", t->values[u->list[k]].name);
        if (!d->clipped) return false;
        t->values[d->clipped].pinned_f32 = true;
        ok = tt__emit_clip(u, tt__number_view(t, t->squares, k), d->clipped);
    }
    return ok;
}

static bool tt__is_layer_matrix(const tt_context *ctx, int param)
{
    return ctx->params[param]->ndim == 2 && tt__layer_of(ctx->params[param]->name) >= 0;
}

/* Returns whether weights of a parameter become 0: not those of adapters and of low-rank factors. */
static bool tt__prunes(const tt_context *ctx, const tt_optimizer_options *o, int param)
{
    return o->prune > 0 && tt__is_layer_matrix(ctx, param) && !ctx->params[param]->factor;
}

/* Returns the optimizer of a parameter. Muon is for the matrices of layers, and AdamW for all else. */
static const tt__optimizer *tt__optimizer_of(const tt_context *ctx, const tt_optimizer_options *o, int param)
{
    return &tt__optimizers[o->kind == TT_MUON && !tt__is_layer_matrix(ctx, param) ? TT_ADAMW : o->kind];
}

/* Appends the collectives that follow updates of shards: each data rank gets the other ranks' shards of
   replicated parameters. Muon updates whole matrices on each rank. */
static bool tt__spread_parameters(tt__updater *u)
{
    tt_tape *t = u->t;
    for (int m = 0; m < u->rows; m++) {
        const int32_t v = u->list[u->row[m]];
        const tt__part part = t->values[t->values[v].grad].part;
        const bool whole = tt__is_muon(tt__optimizer_of(t->ctx, u->o, t->values[v].param));
        if (!part.unit || t->values[v].part.unit || whole) continue;
        const int32_t shard = part.root ? v : tt__shard_view(t, v, &part);
        const int op = part.root ? TT__OP_BROADCAST : TT__OP_ALL_GATHER;
        tt__instr i = tt__data_move(op, shard, v, &part);
        if (!shard || !tt__append_step(t, &i, true)) return false;
    }
    return true;
}

/* Finds the tensors that each update writes, and numbers the updates for their random numbers in the order of
   the parameters on the tape. The random numbers then do not depend on the shards of tensor ranks, nor on
   where the updates are inserted. */
static bool tt__prepare_updates(tt__updater *u)
{
    tt_tape *t = u->t;
    tt__builder b = {t, false, true, TT__EACH_STEP, false};
    const int32_t values = t->n_values;
    tt__attr unread;
    for (int32_t v = 1; v < values && b.ok; v++) {
        tt__due *d = &u->due[v];
        if (!tt__is_listed(t, v)) continue;
        d->random = ++t->n_random;
        if (t->values[v].elsewhere) continue;
        const tt__part part = t->values[t->values[v].grad].part;
        const bool shard = part.unit && !t->values[v].part.unit;
        d->target = shard ? tt__shard_view(t, v, &part) : v;
        if (!d->target) return false;
        const tt__optimizer *how = tt__optimizer_of(t->ctx, u->o, t->values[v].param);
        const int states = how->use(u->o, &unread, NULL);
        for (int k = 0; k < states; k++) {
            const int64_t n = tt__row_state(how, k, &t->values[v].shape);
            if (n > 0) d->state[k] = tt__new_row(&b, d->target, k + 1, n, &part, how->state[k].name);
            if (n < 0) d->state[k] = tt__new_state(&b, d->target, k + 1, tt__state_dtype(t, u->o, v),
                                                   how->state[k].name);
        }
        for (int k = 0; k < states; k++)
            if (d->state[k] && t->values[d->state[k]].shape.dtype == TT_U8)
                d->state[TT__STATES + k] = tt__new_scales(&b, d->state[k], how->state[k].name);
        if (u->o->ema_decay > 0) d->average = tt__new_state(&b, d->target, TT__EMA, TT_F32, "ema");
        if (tt__prunes(t->ctx, u->o, t->values[v].param)) d->pruned = tt__new_mask(&b, d->target);
        if (d->pruned && u->o->prune_by_movement)
            d->movement = tt__new_state(&b, d->target, TT__MOVEMENT, TT_F32, "movement");
        d->clipped = t->clipped;
    }
    return b.ok;
}

/* Returns whether parameter v is updated in the host's memory. */
static bool tt__updates_on_host(const tt_tape *t, int32_t v)
{
    const int32_t param = t->values[v].param;
    return t->on_host && param >= 0 && t->ctx->params[param]->size >= TT__PIECES_FROM;
}

/* Appends an update for each moving average, in the order of the parameters' updates. */
static bool tt__emit_averages(tt__updater *u)
{
    bool ok = true;
    for (int m = 0; m < 2 * u->rows && ok; m++) {
        const int32_t v = u->list[u->row[m % u->rows]];
        const tt__due *d = &u->due[v];
        if (!d->average || tt__updates_on_host(u->t, v) != (m >= u->rows)) continue;
        tt__instr i = tt__instr_of(TT__OP_EMA, d->target, d->average);
        i.in[1] = d->clipped;
        i.attr.beta1 = u->o->ema_decay;
        ok = tt__append_step(u->t, &i, true);
    }
    return ok;
}

/* Appends an instruction that adds to the movements of weights, for each matrix that is pruned by movement,
   before the updates: a movement needs the weights to which the gradient belongs. */
static bool tt__emit_movement(tt__updater *u)
{
    bool ok = true;
    for (int m = 0; m < u->rows && ok; m++) {
        const int32_t v = u->list[u->row[m]];
        const tt__due *d = &u->due[v];
        if (!d->movement) continue;
        tt__instr i = tt__instr_of(TT__OP_MOVEMENT, u->t->values[v].grad, d->movement);
        i.in[1] = d->clipped;
        i.in[2] = d->target;
        ok = tt__append_step(u->t, &i, true);
    }
    return ok;
}

/* Appends an instruction that prunes, for each matrix of a layer, after all updates. */
static bool tt__emit_pruning(tt__updater *u)
{
    bool ok = true;
    for (int m = 0; m < u->rows && ok; m++) {
        const tt__due *d = &u->due[u->list[u->row[m]]];
        if (!d->pruned) continue;
        tt__instr i = tt__instr_of(TT__OP_PRUNE, d->clipped, d->pruned);
        const tt__pruning schedule = {u->o->prune, u->o->prune_every, u->o->prune_begin, u->o->prune_end};
        i.in[1] = d->movement;
        i.out[1] = d->target;
        i.attr.pruning = schedule;
        ok = tt__append_step(u->t, &i, true);
    }
    return ok;
}

/* Appends what Muon does before it changes matrix v: i, the instruction that changes the matrix, gets the
   orthogonal update as operand. If data ranks divide the gradient, each rank computes the momentum of its
   shard, gathers the momentum of all ranks, and changes all of the matrix that it has. */
static bool tt__emit_muon(tt_tape *t, const tt__due *d, int32_t v, tt__instr *i)
{
    const tt_param *p = t->ctx->params[t->values[v].param];
    const int64_t rows = p->dims[0], cols = p->dims[1];
    const tt__part part = t->values[i->in[0]].part;
    const int32_t update = tt__new_scratch(t, rows, cols, "update", p->name);
    const int32_t shard = update && part.unit ? tt__shard_view(t, update, &part) : update;
    tt__instr momentum = tt__instr_of(TT__OP_MUON_MOMENTUM, i->in[0], shard);
    momentum.in[1] = d->clipped;
    momentum.out[1] = d->state[0];
    momentum.out[1 + TT__STATES] = d->state[TT__STATES];
    momentum.random = d->random;
    momentum.attr = i->attr;
    i->attr.beta2 = 0.2f * (float)sqrt((double)tt__max(rows, cols));
    i->out[1] = i->out[1 + TT__STATES] = 0;
    if (!shard || !tt__append_step(t, &momentum, false)) return false;
    const tt__instr gather = tt__data_move(TT__OP_ALL_GATHER, shard, update, &part);
    if (part.unit && !tt__append_step(t, &gather, false)) return false;
    i->out[0] = v;
    i->in[0] = tt__append_orthogonal(t, update, p->name);
    if (i->in[0] && t->values[v].part.unit) i->in[0] = tt__shard_view(t, i->in[0], &part);
    return i->in[0] != 0;
}

/* Appends an update for each parameter. Updates in the host's memory come last. */
static bool tt__emit_updates(tt__updater *u)
{
    tt_tape *t = u->t;
    const tt_optimizer_options *o = u->o;
    const tt__layers layers = tt__find_layers(t->ctx);
    bool ok = tt__emit_movement(u);
    for (int m = 0; m < 2 * u->rows && ok; m++) {
        const int32_t v = u->list[u->row[m % u->rows]];
        const tt__due *d = &u->due[v];
        if (tt__updates_on_host(t, v) != (m >= u->rows)) continue;
        const tt__optimizer *how = tt__optimizer_of(t->ctx, o, t->values[v].param);
        tt__instr i = tt__instr_of(how->op, t->values[v].grad, d->target);
        i.in[1] = d->clipped;
        for (int k = 0; k < 2 * TT__STATES; k++) i.out[1 + k] = d->state[k];
        i.random = d->random;
        i.attr.weight_decay = tt__decays(t->ctx, o, t->values[v].param) ? o->weight_decay : 0;
        i.attr.decoupled = how->decoupled;
        const float factor = tt__lr_factor_of(t->ctx, o, layers, t->values[v].param);
        i.attr.scaled = factor != 1;
        if (i.attr.scaled) i.attr.scale = factor;
        how->use(o, &i.attr, NULL);
        if (tt__is_muon(how) && !tt__emit_muon(t, d, v, &i)) return false;
        ok = tt__append_step(t, &i, true);
    }
    return ok && tt__emit_pruning(u) && tt__emit_averages(u);
}

/* ---- in the backward */

#ifndef TT__UPDATE_FROM /* tests set a smaller number */
#define TT__UPDATE_FROM 65536 /* elements of gradients; due updates wait until their gradients have this
                                 number of elements in total, and then share a launch */
#endif

/* Moves the instructions from number `from` on to the place before instruction `at`, into the segment of
   micro-batches. Ranks without a micro-batch run them, too. */
static void tt__move_into_micro(tt_tape *t, int from, int at)
{
    for (int k = from; k < t->n_code; k++) {
        t->code[k].before = at;
        t->code[k].segment = TT__EACH_MICRO;
        t->code[k].backward = t->code[k].always = true;
    }
}

/* Inserts the updates of trained parameters into the backward. An update is due after the last instruction
   that writes the gradient, reads the parameter, or adds to the counts of losses. Due updates wait until
   their gradients have TT__UPDATE_FROM elements. n: number of instructions of the tape, without the updates.
   head: scratch memory for n numbers, all 0 at first. */
static bool tt__update_early(tt__updater *u, int n, int *head)
{
    tt_tape *t = u->t;
    int64_t elements = 0;
    for (int k = u->n - 1; k >= 0; k--) {
        const int32_t v = u->list[k], g = t->values[t->values[v].grad].base;
        int at = (int)tt__max(t->values[g].writer, t->values[v].reader);
        at = (int)tt__max(at, t->values[t->results].writer);
        while (t->code[at].with_next) at++; /* do not separate instructions that run together */
        u->due[v].next = head[at];
        head[at] = k + 1;
    }
    bool ok = true;
    for (int at = 0; at < n && ok; at++) {
        for (int k = head[at]; k; k = u->due[u->list[k - 1]].next) {
            const tt__shape *s = &t->values[u->list[k - 1]].shape;
            elements += s->rows * s->cols;
            u->row[u->rows++] = k - 1;
        }
        if (!u->rows || (elements < TT__UPDATE_FROM && at < n - 1)) continue;
        const int from = t->n_code;
        ok = tt__square_gradients(u) && tt__sum_parts(u) && tt__clip_alone(u) && tt__emit_updates(u) &&
             tt__spread_parameters(u);
        tt__move_into_micro(t, from, at + 1);
        elements = u->rows = 0;
    }
    return ok;
}

/* Updates each trained parameter in the backward, as early as possible, to free the memory of its gradient.
   Appends the norm of all gradients at the end of the step. */
static tt_status tt__pass_update_early(tt__updater *u)
{
    tt_tape *t = u->t;
    const int n = tt__index(t);
    int *head = (int *)tt__calloc(t->ctx, sizeof *head * (size_t)n);
    const bool ok = head && tt__update_early(u, n, head) && tt__emit_clip(u, t->squares, t->clipped);
    tt__free(t->ctx, head);
    if (!ok) return TT_ERR_MEMORY;
    t->code[t->n_code - 1].before = n;
    return tt__settle(t, n);
}

/* ---- the whole pass */

static tt_status tt__emit_loss_scale(tt_tape *t, const tt_loss_scale *scale)
{
    tt__instr i = tt__instr_of(TT__OP_LOSS_SCALE, t->clipped, t->scale);
    i.in[1] = t->totals;
    i.attr.growth = scale->growth;
    i.attr.backoff = scale->backoff;
    i.attr.interval = scale->interval;
    return tt__append_step(t, &i, false) ? TT_OK : TT_ERR_MEMORY;
}

/* Appends the update at the end of a step: norm and clipping of the gradients, an optimizer's instruction for
   each trained parameter, and the next loss scale. */
static tt_status tt__update_at_end(tt__updater *u, const tt_loss_scale *scale)
{
    tt_tape *t = u->t;
    for (int k = 0; k < u->n; k++) if (!t->values[u->list[k]].elsewhere) u->row[u->rows++] = k;
    const bool ok = tt__before_squares(u) && tt__square_gradients(u) && tt__sum_parts(u) &&
                    tt__after_squares(u) &&
                    tt__emit_clip(u, t->squares, t->clipped) && tt__emit_updates(u) &&
                    tt__spread_parameters(u);
    if (!ok) return TT_ERR_MEMORY;
    return t->scale ? tt__emit_loss_scale(t, scale) : TT_OK;
}

static tt_status tt__pass_update(tt_tape *t, const tt_optimizer_options *o, const tt_loss_scale *scale)
{
    tt__updater u = {t, o, NULL, 0, 0, 0, NULL, 0, NULL};
    tt__shape shape;
    u.list = tt__trained(t, &u.n, &u.parted);
    tt__set_fixed(&shape, TT_F32, u.n, 1);
    t->squares = u.list ? tt__new_value(t, &shape, TT__TRANSIENT, "squared gradient norms") : 0;
    if (t->squares) t->values[t->squares].pinned_f32 = t->values[t->squares].keep = true;
    shape.rows = u.parted;
    u.parts = u.parted && t->squares ? tt__new_value(t, &shape, TT__TRANSIENT, "squared norms of parts") : 0;
    if (u.parts) t->values[u.parts].pinned_f32 = true;
    u.due = (tt__due *)tt__calloc(t->ctx, sizeof *u.due * (size_t)t->n_values);
    u.row = (int *)tt__alloc(t->ctx, sizeof *u.row * (size_t)t->n_values);
    const bool ok = t->squares && (u.parts || !u.parted) && u.due && u.row && tt__prepare_updates(&u);
    tt_status status = !ok ? TT_ERR_MEMORY : t->early ? tt__pass_update_early(&u)
                                                      : tt__update_at_end(&u, scale);
    tt__free(t->ctx, u.list);
    tt__free(t->ctx, u.due);
    tt__free(t->ctx, u.row);
    return status;
}
