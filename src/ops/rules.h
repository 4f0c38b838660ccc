#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "record.h"
#include "scratch.h"
#include "linear/rules.h"
#include "fp8/rules.h"
#include "embedding/rules.h"
#include "norm/rules.h"
#include "elementwise/rules.h"
#include "attention/rules.h"
#include "rows/rules.h"
#include "custom/rules.h"
#include "losses/rules.h"
#include "casts/rules.h"
#include "optimizers/rules.h"
#include "collectives/rules.h"

/* ------------------------------------------------------------------------------------- rules of all ops */

static const tt__rules *tt__rules_of(const tt__instr *i)
{
    static const tt__rules *const table[TT__OP_COUNT] = {
#define TT__RULES(OP, name, inputs, outputs, flags) &tt__rules_##OP,
        TT__OPS(TT__RULES)
#undef TT__RULES
    };
    return table[i->op];
}

/* Returns the number of floating-point operations in i's matrix products. in: i's operands. */
static double tt__flops(const tt__instr *i, const tt__mat *in)
{
    if (tt__rules_of(i)->flops) return tt__rules_of(i)->flops(i, in);
    if (!tt__is(i, TT__PRODUCT) || !i->out[0]) return 0;
    tt__mnk p = tt__mnk_of(i, in[0].rows, in[0].cols, in[1].rows, in[1].cols);
    return 2.0 * (double)p.m * (double)p.n * (double)p.k;
}

/* Returns value `id` as a matrix of max size without data; all fields are 0 if id is 0. */
static tt__mat tt__at_capacity(const tt_tape *t, int32_t id)
{
    const tt__tape_value *v = &t->values[id];
    const tt__mat m = {NULL, v->shape.dtype, v->shape.rows, v->shape.cols, v->ld};
    return m;
}

/* Returns the bytes of scratch that i needs on a CPU with operands of max size. tt__cuda_workspace returns
   the bytes on a CUDA device. */
static size_t tt__cpu_workspace(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__rules *r = tt__rules_of(i);
    const size_t own = r->cpu_scratch ? r->cpu_scratch(threads, t, i) : tt__widen_bytes(threads, t, i);
    size_t max = own;
    for (int o = 0; o < tt__summed(i); o++) {
        const tt__shape *y = &t->values[i->out[o]].shape;
        const size_t sums = tt__column_sums(i, o) ? tt__sum_rows_bytes(threads, y->rows, y->cols) : 0;
        if (sums > max) max = sums;
    }
    return max;
}

static size_t tt__cuda_workspace(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__rules *r = tt__rules_of(i);
    (void)threads;
    return r->cuda_scratch ? r->cuda_scratch(t, i) : 0;
}
