#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/record.h"
#include "../ops/shapes.h"

/* --------------------------------------------------------------------------------------------------- rows */

/* The GATHER_ROWS instructions of a tape. */
typedef struct tt__gathers {
    tt_tape *t;
    int n;                      /* number of instructions before the pass */
    int *all; int n_all, cap_all;
    int *todo; int n_todo, cap_todo; /* stack of gathers that are still to be moved up */
} tt__gathers;

static bool tt__gathers_add(tt__gathers *g, int k)
{
    tt_context *ctx = g->t->ctx;
    if (!TT__GROW(ctx, g->all, g->n_all, g->cap_all)) return false;
    if (!TT__GROW(ctx, g->todo, g->n_todo, g->cap_todo)) return false;
    g->all[g->n_all++] = g->todo[g->n_todo++] = k;
    return true;
}

/* Returns a value with the rows `index` of v for instruction `at`. Each set of rows is gathered once, before
   the first instruction that needs it. Returns 0 if out of memory. */
static int32_t tt__gathered(tt__gathers *g, int at, int32_t v, int32_t index)
{
    tt_tape *t = g->t;
    tt__instr gather = tt__new_instr(TT__OP_GATHER_ROWS);
    int k = -1; /* number of a gather of these rows in the tape; -1: none */
    for (int n = 0; n < g->n_all && k < 0; n++) {
        const tt__instr *i = &t->code[g->all[n]];
        if (i->op >= 0 && i->in[0] == v && i->in[1] == index) k = g->all[n];
    }
    if (k >= 0) {
        if ((k < g->n ? k : t->code[k].before) <= at) return t->code[k].out[0];
        gather = t->code[k];
        tt__drop(t, k);
    }
    if (!gather.out[0]) {
        tt__shape shape;
        tt__set_shape(&shape, t->values[v].shape.dtype, &t->values[index].shape, t->values[v].shape.cols);
        gather.in[0] = v;
        gather.in[1] = index;
        gather.out[0] = tt__new_value(t, &shape, TT__TRANSIENT, "rows of %.60s", t->values[v].name);
        if (!gather.out[0]) return 0;
        tt__tape_value *y = &t->values[gather.out[0]];
        y->named = true;
        y->needs_grad = t->values[v].needs_grad;
        y->pinned_f32 = t->values[v].storage != TT__TRANSIENT && shape.dtype == TT_F32; /* inputs are not
                                                                                           rounded */
    }
    return tt__insert(t, at, &gather) && tt__gathers_add(g, t->n_code - 1) ? gather.out[0] : 0;
}

/* Replaces gather_rows(op(x)) by op(gather_rows(x)) if the op computes row by row and no other instruction
   reads op(x). */
static tt_status tt__gather_before(tt__gathers *g, int k, int32_t root)
{
    tt_tape *t = g->t;
    int32_t v = t->code[k].in[0], index = t->code[k].in[1];
    int at = tt__only_use(t, v, root) ? tt__producer(t, v) : -1;
    if (at < 0 || t->values[index].shape.rows >= t->values[v].shape.rows) return TT_OK;
    tt__instr i = t->code[at];
    const int numbers = tt__numbers(&i);
    unsigned by_row = tt__ops[i.op].flags / TT__BY_ROW(1) & 15;
    tt__shape shape[TT__MAX_OUT];
    if (!by_row || i.out[0] != v || (numbers && i.in[numbers])) return TT_OK;
    bool max = 2 * t->values[index].shape.rows > t->values[v].shape.rows;
    /* Keeps all queries: only then causal and windowed attention can skip the keys that no query sees. */
    if ((i.attr.causal || i.attr.window) && max) return TT_OK;
    i.out[0] = t->code[k].out[0];
    tt__tape_value *y = &t->values[i.out[0]];
    if (!y->named) memcpy(y->name, t->values[v].name, sizeof y->name);
    y->block_end = y->block_end || (t->stages > 1 && t->values[v].block_end); /* a stage may end here */
    tt__drop(t, k);
    for (int j = 0; j < TT__MAX_IN; j++)
        if (i.in[j] && by_row >> j & 1 && !(i.in[j] = tt__gathered(g, at, i.in[j], index)))
            return TT_ERR_MEMORY;
    if (numbers) i.in[numbers] = index;
    if (!tt__shape_of(t, &i, shape)) return t->status;
    for (int o = 1; o < TT__MAX_OUT; o++) {
        if (!i.out[o]) continue;
        i.out[o] = tt__new_value(t, &shape[o], TT__TRANSIENT, "%s", t->values[i.out[o]].name);
        if (!i.out[o]) return TT_ERR_MEMORY;
        t->values[i.out[o]].pinned_f32 = true;
    }
    tt__put(t, at, &i);
    return TT_OK;
}

/* Computes only those rows of a result that are read, back to the first instruction that needs all rows (see
   ROWS THAT ARE READ in the manual). Dropout draws the same masks as for all rows. The gather moves to the
   place of the op. The gather's index exists there, because an index is an input. */
static tt_status tt__pass_rows(tt_tape *t, int32_t root)
{
    tt__gathers g;
    tt_status status = TT_OK;
    memset(&g, 0, sizeof g);
    g.t = t;
    g.n = tt__index(t);
    for (int k = 0; k < g.n && status == TT_OK; k++)
        if (tt__is(&t->code[k], TT__GATHERS) && !tt__gathers_add(&g, k)) status = TT_ERR_MEMORY;
    while (g.n_todo && status == TT_OK) {
        int k = g.todo[--g.n_todo];
        if (t->code[k].op >= 0) status = tt__gather_before(&g, k, root);
    }
    tt__free(t->ctx, g.all);
    tt__free(t->ctx, g.todo);
    return status == TT_OK ? tt__settle(t, g.n) : status;
}
