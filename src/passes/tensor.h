#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/record.h"
#include "../ops/shapes.h"
#include "../ops/gradients.h"
#include "../ops/losses/rules.h"
#include "verify.h"

/* ------------------------------------------------------------------------------------------------- tensor
   Splits layers over the tensor ranks. All ranks run the same instructions, each on its shard (Shoeybi et
   al., "Megatron-LM", 2019). The pass itself finds the regions of the tape to split. A region begins at
   linear layers that read replicated values: their weights are sharded by rows, so their results are sharded
   by columns. The region goes on through ops that compute columns from the same columns (in attention,
   heads). The region ends at linear layers whose weights are sharded by columns: the ranks sum their results.
   With `sequence`, values between regions are sharded by rows instead of replicated. */

/* Fewest weights of a region to split: in smaller regions, ranks would wait longer than they compute. */
#ifndef TT__TENSOR_LEAST /* tests set a smaller number */
#define TT__TENSOR_LEAST 1000000
#endif
#define TT__RANDOM_UNIT 8 /* number of columns for which a kernel draws random numbers at once */

/* The role of an instruction. APART: each rank computes the whole instruction. BEGIN, INNER, END: the
   instruction belongs to a region, whose columns the ranks divide. OWN: the instruction is outside of
   regions, and each rank computes its shard of the rows. LOOKUP: the instruction looks up rows of a table
   that is sharded by rows. HEAD, HEAD_LOSS: a linear layer, and the loss of its results; each rank computes
   its shard of the rows. */
typedef enum tt__role {
    TT__APART, TT__BEGIN, TT__INNER, TT__END, TT__OWN, TT__LOOKUP, TT__HEAD, TT__HEAD_LOSS
} tt__role;

typedef struct tt__tensor {
    tt_tape *t;
    int ranks, n;           /* n: number of instructions before the pass inserts any */
    bool sequence, train;
    int32_t root;
    tt__role *role;         /* the role of each instruction */
    int *code; int n_code;  /* the instructions of the region that is being found */
    bool *inside;           /* for each activation, whether it is sharded by columns; for each parameter
                               outside of regions, whether it is sharded by rows */
    bool *by_rows;          /* for each value, whether it is sharded by rows */
    int32_t *own_uses;      /* for each storage: number of operands that instructions of role OWN read
                               whole */
    int32_t *values; int n_values;  /* the values of the region that is being found */
    int32_t unsplit;        /* the value because of which the last candidate is no region; 0: none */
    /* Each array gives, for value v, a value made from v; 0: none. gathered: a value with all rows of v, if v
       is sharded. region_input: the result of a SCALE of v by 1, whose backward sums partial gradients. own:
       this rank's shard of the rows of v, if v is replicated. */
    int32_t *gathered, *region_input, *own;
} tt__tensor;

static bool tt__is_activation(const tt_tape *t, int32_t v)
{
    return t->values[v].storage == TT__TRANSIENT && tt__is_float(t->values[v].shape.dtype);
}

/* Returns whether value v may be sharded. v must be an activation that a single instruction writes, must have
   no views, and must be neither an output nor the root (the loss). */
static bool tt__may_split(const tt__tensor *s, int32_t v)
{
    const tt__tape_value *x = &s->t->values[v];
    const bool alone = x->base == v && !x->views && !x->keep && v != s->root;
    return alone && tt__is_activation(s->t, v) && x->writes == 1;
}

/* Returns whether parameter v can have layout `split`. A parameter can be sharded if its shards are equally
   large and a single instruction reads it. */
static bool tt__may_lay_out(const tt__tensor *s, int32_t v, tt__split split)
{
    const tt__tape_value *p = &s->t->values[v];
    if (p->held && p->held != 1 + (int)split) return false;
    if (split == TT__WHOLE) return true;
    if (tt__is_coded(p->shape.dtype)) return false;
    bool alone = p->storage == TT__PARAMETER && p->base == v && !p->views && !p->keep && p->uses == 1;
    return alone && (split == TT__ROWS ? p->shape.rows : p->shape.cols) % s->ranks == 0;
}

/* Returns whether the readers of v may compute partial gradients of v, to be summed over the ranks
   (tt__entered). v must have no gradient, or be a whole storage that an instruction computes: not a view, not
   a parameter. */
static bool tt__may_enter(const tt__tensor *s, int32_t v)
{
    const tt__tape_value *x = &s->t->values[v];
    return (x->storage == TT__TRANSIENT && x->base == v) || !x->needs_grad;
}

/* Returns the layout that operand j of a linear layer needs at the beginning (`begin`) or at the end of a
   region. w: number of the weight operand. */
static tt__split tt__split_in(bool begin, int w, int j)
{
    if (j == 0) return begin ? TT__WHOLE : TT__COLS;
    if (j == w) return begin ? TT__ROWS : TT__COLS;
    return begin ? TT__COLS : TT__WHOLE;
}

/* Returns the role that instruction k could have in the region; APART: none. reads: the instruction reads a
   value of the region; otherwise the instruction writes a value of the region. */
static tt__role tt__role_in(const tt__tensor *s, int k, bool reads)
{
    const tt_tape *t = s->t;
    tt__instr i = t->code[k];
    const int w = tt__is(&i, TT__PRODUCT) ? tt__weight(&i) : 0;
    const tt__role role = !w ? TT__INNER : reads ? TT__END : TT__BEGIN;
    const tt__rules *rules = tt__rules_of(&i);
    tt__split in[TT__MAX_IN] = {TT__WHOLE}, out[TT__MAX_OUT] = {TT__WHOLE};
    if (role == TT__BEGIN && !tt__may_enter(s, i.in[0])) return TT__APART;
    for (int j = 0; j < TT__MAX_IN; j++) {
        const int32_t v = i.in[j];
        if (!v) continue;
        if (w) in[j] = tt__split_in(role == TT__BEGIN, w, j);
        else if (tt__is_activation(t, v)) in[j] = TT__COLS;
        if (w && j && !tt__may_lay_out(s, v, in[j])) return TT__APART;
        if (role == TT__END && j && j != w) i.once |= 1u << j;
    }
    const bool draws = tt__is(&i, TT__RANDOM) && !i.attr.heads;
    if (draws && tt__in(t, &i, 0)->cols / s->ranks % TT__RANDOM_UNIT) return TT__APART;
    const bool parts = i.attr.heads % s->ranks || i.attr.key_heads % s->ranks;
    if (parts || !rules->layout || !rules->layout(t, &i, in, out)) return TT__APART;
    for (int o = 1; o < TT__MAX_OUT; o++) if (i.out[o] && tt__uses(t, i.out[o])) return TT__APART;
    return out[0] == (role == TT__END ? TT__PARTIAL : TT__COLS) ? role : TT__APART;
}

static bool tt__take_value(tt__tensor *s, int32_t v)
{
    if (s->inside[v]) return true;
    s->unsplit = v;
    if (!tt__may_split(s, v) || s->t->values[v].shape.cols % s->ranks) return false;
    s->unsplit = 0;
    s->inside[v] = true;
    s->values[s->n_values++] = v;
    return true;
}

/* Adds instruction k to the region, and also the values of k that must then be sharded. reads: k reads a
   value of the region; otherwise k writes a value of the region. Returns false if k cannot belong to the
   region. */
static bool tt__take_instr(tt__tensor *s, int k, bool reads)
{
    const tt__instr *i = &s->t->code[k];
    if (s->role[k] == TT__APART) {
        if ((s->role[k] = tt__role_in(s, k, reads)) == TT__APART) return false;
        s->code[s->n_code++] = k;
        for (int j = 0; j < TT__MAX_IN && s->role[k] == TT__INNER; j++)
            if (i->in[j] && tt__is_activation(s->t, i->in[j]) && !tt__take_value(s, i->in[j])) return false;
        return s->role[k] == TT__END || tt__take_value(s, i->out[0]);
    }
    for (int c = 0; c < s->n_code; c++) /* the role of k must come from this region, not from an earlier
                                           region */
        if (s->code[c] == k) return s->role[k] != (reads ? TT__BEGIN : TT__END);
    return false;
}

/* Finds the region that begins at instruction k, and possibly at other instructions as well. Returns false if
   no region begins at k. */
static bool tt__find_region(tt__tensor *s, int k)
{
    const tt_tape *t = s->t;
    bool ends = false;
    int64_t weights = 0;
    s->n_code = s->n_values = 0;
    s->unsplit = 0;
    bool fits = tt__take_instr(s, k, false);
    for (int n = 0; n < s->n_values && fits; n++) {
        const int32_t v = s->values[n];
        const int at = tt__producer(t, v);
        fits = at >= 0 && t->code[at].out[0] == v && tt__take_instr(s, at, false);
        for (int r = at + 1; r <= t->values[v].reader && fits; r++)
            for (int j = 0; j < TT__MAX_IN && fits; j++)
                if (t->code[r].in[j] == v) fits = tt__take_instr(s, r, true);
        if (!fits && !s->unsplit) s->unsplit = v;
    }
    for (int n = 0; n < s->n_code && fits; n++) {
        const tt__instr *i = &t->code[s->code[n]];
        const tt__role role = s->role[s->code[n]];
        ends |= role == TT__END;
        if (role == TT__BEGIN) fits = !s->inside[i->in[0]];
        if (role == TT__END) fits = !s->inside[i->out[0]];
        const tt__shape *w = tt__in(t, i, tt__weight(i));
        if (role != TT__INNER) weights += w->rows * w->cols;
    }
    if (fits && ends && weights >= TT__TENSOR_LEAST) return true;
    for (int n = 0; n < s->n_code; n++) s->role[s->code[n]] = TT__APART;
    for (int n = 0; n < s->n_values; n++) s->inside[s->values[n]] = false;
    return false;
}

/* Returns whether the rows of value x can be sharded: x must have the rows of an axis, and no extra rows. */
static bool tt__has_rows(const tt__tape_value *x) { return x->shape.axis && !x->shape.extra; }

/* Finds the head: a linear layer with many output columns, and the loss that alone reads its results. Each
   rank computes a shard of the rows of the layer and of the loss. The loss must be the root, because no rank
   knows the loss until all ranks have counted their targets. */
static void tt__find_head(tt__tensor *s)
{
    const tt_tape *t = s->t;
    int losses = 0, loss = 0;
    for (int k = 0; k < s->n; k++) losses += tt__is(&t->code[k], TT__LOSS);
    for (int k = 0; k < s->n && losses == 1; k++) if (tt__is(&t->code[k], TT__LOSS)) loss = k;
    if (losses != 1 || t->code[loss].out[0] != s->root || tt__uses(t, s->root)) return;
    const tt__instr *i = &t->code[loss];
    const int32_t logits = i->in[0];
    const int at = tt__producer(t, logits);
    const tt__rules *rules = tt__rules_of(i);
    tt__split in[TT__MAX_IN] = {TT__WHOLE}, out[TT__MAX_OUT] = {TT__WHOLE};
    for (int j = 0; j <= TT__LOSS_WEIGHTS; j++) {
        if (i->in[j]) in[j] = TT__ROWS;
        if (i->in[j] && (!tt__has_rows(&t->values[i->in[j]]) || !tt__may_enter(s, i->in[j]))) return;
    }
    if (at < 0 || s->role[at] != TT__APART || !tt__weight(&t->code[at])) return;
    if (!tt__may_split(s, logits) || tt__uses(t, logits) != 1 || !tt__may_enter(s, t->code[at].in[0])) return;
    const int32_t w = t->code[at].in[tt__weight(&t->code[at])];
    const tt__shape *y = &t->values[logits].shape;
    const int64_t weights = t->values[w].shape.rows * t->values[w].shape.cols;
    if (weights < TT__TENSOR_LEAST || y->rows * y->cols * (int64_t)sizeof(float) < TT__LOSS_WHOLE) return;
    if (t->values[w].storage != TT__PARAMETER || t->values[w].views) return;
    if (!rules->layout || !rules->layout(t, i, in, out) || out[0] != TT__PARTIAL) return;
    s->role[at] = TT__HEAD;
    s->role[loss] = TT__HEAD_LOSS;
}

/* Returns whether instruction k looks up rows of operand j. With a row shard of operand j, each rank then
   computes a summand of the result. */
static bool tt__looks_up(const tt__tensor *s, int k, int j)
{
    const tt_tape *t = s->t;
    const tt__instr *i = &t->code[k];
    const tt__rules *rules = tt__rules_of(i);
    tt__split in[TT__MAX_IN] = {TT__WHOLE}, out[TT__MAX_OUT] = {TT__WHOLE};
    if (!i->in[j]) return false;
    in[j] = TT__ROWS;
    return s->role[k] == TT__APART && rules->layout && rules->layout(t, i, in, out) && out[0] == TT__PARTIAL;
}

/* Returns whether each rank keeps a shard of the rows of parameter v. This is so if an arena holds row shards
   of v already, or if v has many weights, its number of rows is divisible by the number of ranks, and only
   look-ups and the head read v. */
static bool tt__may_split_table(const tt__tensor *s, int32_t v)
{
    const tt_tape *t = s->t;
    const tt__tape_value *x = &t->values[v];
    bool fits = x->storage == TT__PARAMETER && x->base == v && !x->views && !x->keep;
    if (x->held) return fits && x->held == 1 + (int)TT__ROWS;
    if (x->shape.rows % s->ranks || x->shape.rows * x->shape.cols < TT__TENSOR_LEAST) return false;
    for (int k = 0; k <= x->reader && fits; k++)
        for (int j = 0; j < TT__MAX_IN && fits; j++) {
            const bool head = s->role[k] == TT__HEAD && j == tt__weight(&t->code[k]);
            fits = t->code[k].in[j] != v || head || s->role[k] == TT__LOOKUP || tt__looks_up(s, k, j);
        }
    return fits;
}

/* Returns the axis of one rank's shard of the rows of axis `of`; makes it if needed. 0: out of memory. */
static int32_t tt__own_axis(tt_tape *t, int32_t of, int parts)
{
    for (int32_t a = 1; a < t->n_axes; a++) if (t->axes[a].of == of && t->axes[a].parts == parts) return a;
    if (!TT__GROW(t->ctx, t->axes, t->n_axes, t->cap_axes)) return tt__out_of_memory(t);
    tt__row_axis a = t->axes[of];
    const int64_t named = tt__min((int64_t)strlen(a.name), (int64_t)sizeof a.name - 2);
    memcpy(a.name + named, "/", 2); /* the axis "tokens" becomes "tokens/" */
    a.capacity = tt__ceil_div(a.capacity, parts);
    a.of = of;
    a.parts = parts;
    t->axes[t->n_axes] = a;
    return t->n_axes++;
}

/* Changes *shape to that of one rank's shard of the rows. Returns false if out of memory. */
static bool tt__own_shape(const tt__tensor *s, tt__shape *shape)
{
    shape->axis = tt__own_axis(s->t, shape->axis, s->ranks);
    shape->rows = s->t->axes[shape->axis].capacity;
    return shape->axis != 0;
}

/* Inserts a collective `op` over the tensor ranks before instruction `at`. The collective reads v and writes
   a new value of the given shape, which is replicated and otherwise like v. Returns the new value; 0: out of
   memory. */
static int32_t tt__move_value(const tt__tensor *s, int at, int op, int32_t v, const tt__shape *shape)
{
    tt_tape *t = s->t;
    const int32_t y = tt__value_like(t, v, tt__new_value(t, shape, TT__TRANSIENT, "%s", t->values[v].name));
    tt__instr i = tt__instr_like(&t->code[at], op, v, y);
    i.attr.scale = 1;
    i.move.over = TT__OVER_TENSOR;
    i.move.unit = shape->cols;
    if (!y) return 0;
    t->values[y].part.split = TT__WHOLE;
    t->values[y].param = tt__is_weight(t, v) ? t->values[v].param : -1;
    return tt__insert(t, at, &i) ? y : 0;
}

/* Returns a value with all rows of v, an activation or a table, for instruction `at`. Gathers the rows if v
   is sharded. 0: out of memory. */
static int32_t tt__gathered_rows(const tt__tensor *s, int at, int32_t v)
{
    const tt__tape_value *x = &s->t->values[v];
    if (x->part.split != TT__ROWS || s->gathered[v]) return x->part.split == TT__ROWS ? s->gathered[v] : v;
    tt__shape shape = x->shape;
    if (shape.axis) shape.axis = s->t->axes[shape.axis].of;
    shape.rows = shape.axis ? s->t->axes[shape.axis].capacity : shape.rows * s->ranks;
    return s->gathered[v] = tt__move_value(s, at, TT__OP_ALL_GATHER, v, &shape);
}

/* Returns the value with all rows of v that instruction `at` reads in place of v, because ranks compute
   partial gradients of v. In training, a SCALE by 1 makes this value; the backward of the SCALE sums the
   partial gradients, and tt__pass_tensor_gradients removes the SCALE. 0: out of memory. */
static int32_t tt__entered(const tt__tensor *s, int at, int32_t v)
{
    const int32_t whole = tt__gathered_rows(s, at, v);
    if (!whole || !s->train || !s->t->values[v].needs_grad) return whole;
    const tt__shape shape = s->t->values[whole].shape;
    if (!s->region_input[v]) s->region_input[v] = tt__move_value(s, at, TT__OP_SCALE, whole, &shape);
    return s->region_input[v];
}

/* Returns this rank's shard of the rows of v, for instruction `at`. 0: out of memory. */
static int32_t tt__own_rows(const tt__tensor *s, int at, int32_t v)
{
    tt_tape *t = s->t;
    if (t->values[v].part.split == TT__ROWS || s->own[v]) return s->own[v] ? s->own[v] : v;
    tt__shape shape = t->values[v].shape;
    const int32_t of = tt__entered(s, at, v);
    if (!of || !tt__own_shape(s, &shape)) return 0;
    s->own[v] = tt__new_view(t, of, &shape, 0, t->values[of].ld, t->values[v].name);
    if (s->own[v]) t->values[s->own[v]].part.split = TT__ROWS;
    return s->own[v];
}

/* Gives value or parameter v the layout `split` and the shape of one rank's shard. */
static void tt__split_value(const tt__tensor *s, int32_t v, tt__split split)
{
    tt__tape_value *x = &s->t->values[v];
    if (split == TT__ROWS) x->shape.rows /= s->ranks;
    else x->ld = x->shape.cols /= s->ranks;
    x->part.split = split;
}

/* Gives the results of i the shapes that follow from the shapes of its operands, and the layout `split`. */
static tt_status tt__split_results(const tt__tensor *s, const tt__instr *i, tt__split split)
{
    tt__shape shape[TT__MAX_OUT];
    if (!tt__shape_of(s->t, i, shape)) return s->t->status;
    for (int o = 0; o < TT__MAX_OUT; o++) {
        tt__tape_value *y = &s->t->values[i->out[o]];
        if (!i->out[o]) continue;
        y->shape = shape[o];
        y->ld = y->shape.cols;
        y->part.split = split;
    }
    return TT_OK;
}

/* Makes instruction k write this rank's summand of its result, and inserts the sum over the ranks. */
static tt_status tt__sum_results(const tt__tensor *s, int k)
{
    tt_tape *t = s->t;
    const int32_t y = t->code[k].out[0];
    const bool own = s->by_rows[y];
    const tt__shape shape = t->values[y].shape;
    const int32_t part = tt__new_value(t, &shape, TT__TRANSIENT, "part of %.60s", t->values[y].name);
    const int op = own ? TT__OP_REDUCE_SCATTER : TT__OP_ALL_REDUCE;
    tt__instr sum = tt__instr_like(&t->code[k], op, part, y);
    if (!tt__value_like(t, y, part)) return TT_ERR_MEMORY;
    t->code[k].out[0] = part;
    sum.move.over = TT__OVER_TENSOR;
    sum.move.unit = shape.cols;
    if (own && !tt__own_shape(s, &t->values[y].shape)) return TT_ERR_MEMORY;
    if (own) t->values[y].part.split = TT__ROWS;
    return tt__insert(t, k + 1, &sum) ? TT_OK : TT_ERR_MEMORY;
}

/* Returns a mask of operands: bit j is set if instruction i reads one row of operand j for each row that it
   writes. */
static unsigned tt__row_operands(const tt__instr *i)
{
    const int numbers = tt__numbers(i);
    if (tt__is(i, TT__LOSS))
        return 1u | 1u << TT__LOSS_TARGETS | (i->attr.by_class ? 0 : 1u << TT__LOSS_WEIGHTS);
    return (tt__ops[i->op].flags / TT__BY_ROW(1) & 15) | (numbers ? 1u << numbers : 0);
}

/* Returns whether the ranks sum y, at the end of a region, so that each rank gets only its shard of the
   rows. */
static bool tt__ends_by_rows(const tt__tensor *s, int32_t y)
{
    return s->sequence && tt__may_split(s, y) && tt__has_rows(&s->t->values[y]);
}

/* Returns whether instruction k, outside of regions, can compute a shard of the rows of its results from
   shards of the rows of its operands. */
static bool tt__by_own_rows(const tt__tensor *s, int k)
{
    const tt_tape *t = s->t;
    const tt__instr *i = &t->code[k];
    const tt__rules *rules = tt__rules_of(i);
    const unsigned by_row = tt__row_operands(i);
    tt__split in[TT__MAX_IN], out[TT__MAX_OUT];
    bool any = false;
    for (int j = 0; j < TT__MAX_IN; j++) {
        const int32_t v = i->in[j];
        const bool rows = v && by_row >> j & 1, whole = v && !s->by_rows[v];
        in[j] = rows ? TT__ROWS : TT__WHOLE;
        any |= rows && !whole;
        if (rows && whole && (!tt__has_rows(&t->values[v]) || !tt__may_enter(s, v))) return false;
    }
    for (int o = 0; o < TT__MAX_OUT && any; o++) {
        const int32_t y = i->out[o];
        const bool splits = tt__may_split(s, y) && tt__has_rows(&t->values[y]) && !(o && tt__uses(t, y));
        if (y && !splits) return false;
    }
    bool fits = any && !tt__is(i, TT__PRODUCT) && rules->layout && rules->layout(t, i, in, out);
    return fits && out[0] == TT__ROWS;
}

/* Counts in own_uses, for each storage, the operands through which instructions of role OWN (each rank
   computes its shard of the rows) read the storage whole. */
static void tt__count_own_uses(tt__tensor *s)
{
    memset(s->own_uses, 0, sizeof *s->own_uses * (size_t)s->t->n_values);
    for (int k = 0; k < s->n; k++) {
        const tt__instr *i = &s->t->code[k];
        for (int j = 0; j < TT__MAX_IN && s->role[k] == TT__OWN; j++)
            if (!(tt__row_operands(i) >> j & 1)) s->own_uses[s->t->values[i->in[j]].base]++;
    }
}

/* Returns whether gradients may be partial for the operands that instruction k reads whole. Instruction k has
   the role OWN: each rank computes its shard of the rows. Each of the operands must be a parameter that only
   instructions of role OWN read, so that the ranks can sum all gradients of the parameter. */
static bool tt__gives_parts(const tt__tensor *s, int k)
{
    const tt__instr *i = &s->t->code[k];
    for (int j = 0; j < TT__MAX_IN; j++) {
        const tt__tape_value *x = &s->t->values[i->in[j]];
        if (!s->train || !x->needs_grad || (tt__row_operands(i) >> j & 1)) continue;
        const bool alike = s->own_uses[x->base] == s->t->values[x->base].uses;
        if (x->storage != TT__PARAMETER || !alike) return false;
    }
    return true;
}

static void tt__set_own(tt__tensor *s, int k, bool own)
{
    s->role[k] = own ? TT__OWN : TT__APART;
    for (int o = 0; o < TT__MAX_OUT; o++) s->by_rows[s->t->code[k].out[o]] = own;
}

/* Finds the instructions of role OWN (each rank computes its shard of the rows). First takes all candidates.
   Then removes each candidate whose operands no longer allow the role, until none is removed. */
static void tt__find_own_rows(tt__tensor *s)
{
    bool changed = true;
    for (int k = 0; k < s->n; k++) {
        const int32_t y = s->t->code[k].out[0];
        const bool sums = s->role[k] == TT__END || s->role[k] == TT__LOOKUP;
        if (sums) s->by_rows[y] = tt__ends_by_rows(s, y);
        if (s->role[k] == TT__HEAD) s->by_rows[y] = true;
        if (s->role[k] == TT__APART && tt__by_own_rows(s, k)) tt__set_own(s, k, true);
    }
    while (changed) {
        changed = false;
        tt__count_own_uses(s);
        for (int k = 0; k < s->n; k++) {
            if (s->role[k] != TT__OWN || (tt__by_own_rows(s, k) && tt__gives_parts(s, k))) continue;
            tt__set_own(s, k, false);
            changed = true;
        }
    }
}

/* Returns the value that instruction k reads in place of operand j; shards operand j if it is a parameter. 0:
   out of memory. */
static int32_t tt__split_operand(const tt__tensor *s, int k, int j)
{
    const tt__instr *i = &s->t->code[k];
    const tt__role role = s->role[k];
    const bool own = role == TT__OWN || role == TT__HEAD || role == TT__HEAD_LOSS;
    const int32_t v = i->in[j];
    if (own && tt__row_operands(i) >> j & 1) return tt__own_rows(s, k, v);
    if (role == TT__HEAD || (role == TT__BEGIN && j == 0)) return tt__entered(s, k, v);
    if (role == TT__BEGIN) tt__split_value(s, v, j == tt__weight(i) ? TT__ROWS : TT__COLS);
    else if (role == TT__END && j == tt__weight(i)) tt__split_value(s, v, TT__COLS);
    else if (role != TT__END && role != TT__LOOKUP) return tt__gathered_rows(s, k, v);
    return v;
}

/* Shards the operands and results of instruction k according to its role, or gathers operands that it needs
   whole. */
static tt_status tt__split_instr(tt__tensor *s, int k)
{
    tt_tape *t = s->t;
    const tt__role role = s->role[k];
    for (int j = 0; j < TT__MAX_IN; j++) {
        if (!t->code[k].in[j]) continue;
        const int32_t v = tt__split_operand(s, k, j);
        if (!v) return TT_ERR_MEMORY;
        t->code[k].in[j] = v; /* read t->code anew: insertions may move it */
        if (role == TT__END && j && j != tt__weight(&t->code[k])) t->code[k].once |= 1u << j;
    }
    tt__instr i = t->code[k];
    if (role == TT__INNER) {
        t->code[k].attr.heads /= s->ranks;
        t->code[k].attr.key_heads /= s->ranks;
    }
    if (role == TT__APART) return TT_OK;
    if (role == TT__END || role == TT__LOOKUP) return tt__sum_results(s, k);
    if (role == TT__HEAD_LOSS) i.out[0] = i.out[TT__LOSS_COUNTS] = 0; /* leaves out the loss and its counts,
                                                                         which stay whole */
    if (role == TT__INNER || role == TT__BEGIN) return tt__split_results(s, &t->code[k], TT__COLS);
    return tt__split_results(s, &i, TT__ROWS);
}

/* Fails because this program needs parameter v whole, but an earlier program left shards on the ranks. The
   error says why v is needed whole. */
static tt_status tt__held_in_parts(tt__tensor *s, int32_t v)
{
    const tt__tape_value *p = &s->t->values[v];
    char why[160] = "the ops around it cannot be split";
    if (p->uses == 1) tt__find_region(s, p->reader);
    const tt__tape_value *x = &s->t->values[p->uses == 1 ? s->unsplit : 0];
    const bool output = x->keep || s->unsplit == s->root;
    if (p->uses > 1) snprintf(why, sizeof why, "%d ops read it", (int)p->uses);
    else if (s->unsplit)
        snprintf(why, sizeof why, output ? "'%s' is an output" : "'%s' is needed whole", x->name);
    return tt__fail(s->t->ctx, TT_ERR_ARGUMENT, "an earlier program shards parameter '%s' over the tensor "
                    "ranks, but this program needs it whole, because here %s: compile this program first, so "
                    "that both have it whole", p->name, why);
}

/* Returns whether an arena holds shards of parameter v in layout `split`, but this program needs v whole. */
static bool tt__is_unfit(const tt__tensor *s, int32_t v, tt__split split)
{
    const tt__tape_value *p = &s->t->values[v];
    const bool held = p->held == 1 + (int)split && p->uses && !s->inside[v];
    return held && (p->uses > 1 || s->role[p->reader] == TT__APART);
}

/* Gives a parameter the layout of its shards, if an arena holds shards of it. A parameter that this program
   needs whole must then be sharded by rows and have no views, so that the program can gather it; otherwise
   the function fails. The error names the parameter and the value that keeps the parameter's region whole. A
   parameter sharded by rows is named before a parameter sharded by columns. */
static tt_status tt__check_held(tt__tensor *s)
{
    bool gathers = true;
    for (int32_t v = 1; v < s->t->n_values; v++) {
        const bool rows = tt__is_unfit(s, v, TT__ROWS);
        if (tt__is_unfit(s, v, TT__COLS) || (rows && s->t->values[v].views)) gathers = false;
    }
    for (int split = TT__ROWS; split <= TT__COLS; split++)
        for (int32_t v = 1; v < s->t->n_values; v++) {
            const tt__tape_value *p = &s->t->values[v];
            const bool unfit = tt__is_unfit(s, v, (tt__split)split);
            if (unfit && !gathers) return tt__held_in_parts(s, v);
            if (unfit) s->inside[v] = true;
            if (p->held == 1 + split && !p->uses) tt__split_value(s, v, (tt__split)split);
        }
    return TT_OK;
}

/* Finds the head, and the tables to shard. With a head, whose rows the ranks divide, no rank knows the number
   of targets during the backward. Training then divides by that number at the end, as programs that
   accumulate do. */
static void tt__find_tables(tt__tensor *s)
{
    tt_tape *t = s->t;
    tt__find_head(s);
    for (int k = 0; k < s->n; k++) {
        const tt__instr *i = &t->code[k];
        for (int j = 0; j < TT__MAX_IN; j++) {
            const bool table = s->role[k] == TT__HEAD ? j == tt__weight(i) : tt__looks_up(s, k, j);
            if (!table || !tt__may_split_table(s, i->in[j])) continue;
            if (s->role[k] == TT__APART) s->role[k] = TT__LOOKUP;
            s->inside[i->in[j]] = true;
        }
        if (s->role[k] == TT__HEAD && s->train) t->accumulate = true;
    }
}

/* Splits the tape over `ranks` tensor ranks. sequence: shard the values between regions by rows. */
static tt_status tt__pass_tensor(tt_tape *t, int32_t root, int ranks, bool sequence, bool train)
{
    tt__tensor s;
    memset(&s, 0, sizeof s);
    s.t = t;
    s.ranks = t->tensor = ranks;
    s.sequence = sequence;
    s.train = train;
    s.root = root;
    s.n = tt__index(t);
    const size_t values = (size_t)t->n_values, code = (size_t)s.n + 1;
    s.role = (tt__role *)tt__calloc(t->ctx, sizeof *s.role * code);
    s.code = (int *)tt__calloc(t->ctx, sizeof *s.code * code);
    s.inside = (bool *)tt__calloc(t->ctx, 2 * values);
    s.values = (int32_t *)tt__calloc(t->ctx, sizeof *s.values * 5 * values);
    tt_status status = s.role && s.code && s.inside && s.values ? TT_OK : TT_ERR_MEMORY;
    if (status == TT_OK) {
        s.gathered = s.values + values;
        s.region_input = s.gathered + values;
        s.own = s.region_input + values;
        s.own_uses = s.own + values;
        s.by_rows = s.inside + values;
        for (int k = 0; k < s.n; k++)
            if (s.role[k] == TT__APART && tt__role_in(&s, k, false) == TT__BEGIN) tt__find_region(&s, k);
        tt__find_tables(&s);
        status = tt__check_held(&s);
        for (int32_t v = 1; v < t->n_values; v++)
            if (s.inside[v] && t->values[v].storage == TT__PARAMETER) tt__split_value(&s, v, TT__ROWS);
        tt__find_own_rows(&s);
        for (int k = 0; k < s.n && status == TT_OK; k++) status = tt__split_instr(&s, k);
    }
    tt__free(t->ctx, s.role);
    tt__free(t->ctx, s.code);
    tt__free(t->ctx, s.inside);
    tt__free(t->ctx, s.values);
    return status == TT_OK ? tt__settle(t, s.n) : status;
}

/* Makes a value for the partial gradient of a replicated parameter, and appends an instruction that sums the
   partial gradients over the ranks into the gradient g. with_previous: the sum runs together with the
   instruction before. Returns the value; 0: out of memory. */
static int32_t tt__sum_gradient(tt_tape *t, int32_t g, bool with_previous)
{
    const tt__tape_value of = t->values[g];
    const int32_t part = tt__new_value(t, &of.shape, TT__TRANSIENT, "part of %.60s", of.name);
    tt__instr *sum = tt__value_like(t, g, part) ? tt__append(t, TT__OP_ALL_REDUCE) : NULL;
    if (!sum) return 0;
    sum->in[0] = part;
    sum->out[0] = g;
    sum->add_later = of.persistent;
    sum->backward = true;
    sum->move.over = TT__OVER_TENSOR;
    sum->move.unit = of.shape.cols;
    if (with_previous) sum[-1].with_next = true;
    return part;
}

/* Moves views to other storages: map[s] replaces storage s, unless map[s] is 0. */
static void tt__map_views(tt_tape *t, int values, const int32_t *map)
{
    for (int32_t v = 1; v < values; v++) {
        tt__tape_value *x = &t->values[v];
        if (x->base != v && map[x->base]) x->base = map[x->base];
    }
}

/* Returns the pipeline stage of the last instruction before k that writes operand 0 of instruction k; 0: no
   pipeline. */
static int tt__operand_stage(const tt_tape *t, int k)
{
    const int32_t base = t->values[t->code[k].in[0]].base;
    while (k-- > 0) if (tt__writes(t, &t->code[k], base)) return t->code[k].stage;
    return 0;
}

/* Makes instructions write partial gradients to new values, and appends sums over the ranks. layout: the
   layout of each storage. part: receives, for each value, the new value with its partial gradient; all 0 at
   first. */
static tt_status tt__sum_gradients(tt_tape *t, const tt__split *layout, int32_t *part)
{
    const int values = t->n_values, n = t->n_code; /* values and instructions with these or higher numbers are
                                                      new */
    int sums = 0;
    for (int32_t v = 1; v < values; v++) {
        if (t->values[v].storage != TT__GRADIENT || layout[v] != TT__PARTIAL) continue;
        if (!(part[v] = tt__sum_gradient(t, v, sums++ > 0))) return TT_ERR_MEMORY;
    }
    tt__map_views(t, values, part);
    for (int k = 0; k < n && sums; k++)
        for (int o = 0; o < TT__MAX_OUT; o++) {
            tt__instr *i = &t->code[k];
            if (part[i->out[o]]) i->out[o] = part[i->out[o]];
            if (t->values[i->out[o]].base >= values) i->add_later &= ~(1u << o);
        }
    for (int k = n; k < t->n_code; k++) t->code[k].stage = tt__operand_stage(t, k);
    return TT_OK;
}

/* After differentiation: removes the instructions that exist only for their backward, and inserts the sums of
   partial gradients over the ranks. */
static tt_status tt__pass_tensor_gradients(tt_tape *t)
{
    const int n = tt__index(t);
    int32_t *instead = tt__new_map(t), *part = tt__new_map(t);
    tt__split *layout = tt__first_layouts(t);
    tt_status status = instead && part && layout ? TT_OK : TT_ERR_MEMORY;
    for (int k = 0; k < n && status == TT_OK; k++) {
        tt__instr *i = &t->code[k];
        tt__map_operands(i, instead);
        if (i->move.over == TT__ALONE || tt__rules_of(i)->phases) continue;
        instead[i->out[0]] = i->in[0]; /* in[0] is a storage: tt__may_enter refused views */
        tt__drop(t, k);
    }
    if (status == TT_OK) tt__map_views(t, t->n_values, instead);
    if (status == TT_OK) status = tt__settle(t, n);
    for (int k = 0; k < t->n_code && status == TT_OK; k++) {
        int32_t value;
        const char *wrong = tt__derive(t, &t->code[k], layout, &value);
        if (wrong) status = tt__verify_fail(t, "differentiate", k, wrong, value);
    }
    if (status == TT_OK) status = tt__sum_gradients(t, layout, part);
    tt__free(t->ctx, instead);
    tt__free(t->ctx, part);
    tt__free(t->ctx, layout);
    return status;
}

/* If tensor ranks divide the rows of a loss, makes the loss the mean over the targets of all these ranks. */
static tt_status tt__pass_tensor_losses(tt_tape *t)
{
    const int n = tt__index(t);
    for (int k = 0; k < n; k++) {
        const tt__instr *i = &t->code[k];
        if (!tt__is(i, TT__LOSS) || t->values[i->in[0]].part.split != TT__ROWS) continue;
        const int32_t counts = i->out[TT__LOSS_COUNTS];
        tt__instr sum = tt__instr_like(i, TT__OP_ALL_REDUCE, counts, counts);
        tt__instr mean = tt__instr_like(i, TT__OP_MEAN_LOSS, counts, i->out[0]);
        sum.move.over = TT__OVER_TENSOR;
        sum.move.unit = 1;
        if (!tt__insert(t, k + 1, &sum) || !tt__insert(t, k + 1, &mean)) return TT_ERR_MEMORY;
    }
    return tt__settle(t, n);
}
