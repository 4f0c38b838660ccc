#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/shapes.h"
#include "data.h"

/* --------------------------------------------------------------------------------------------------- muon
   Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) moves a matrix along
   its momentum, whose singular values a Newton-Schulz iteration makes about equal to 1. The iteration is
   matrix products: instructions of the update, so that the planner knows their scratch memory. */

/* Makes a matrix that an update computes and reads again; 0 after tt__tape_fail. */
static int32_t tt__new_scratch(tt_tape *t, int64_t rows, int64_t cols, const char *what, const char *name)
{
    tt__shape shape;
    tt__set_fixed(&shape, TT_F32, rows, cols);
    const int32_t id = tt__new_value(t, &shape, TT__TRANSIENT, "%s of %.50s", what, name);
    if (id) t->values[id].pinned_f32 = true;
    return id;
}

/* Appends the Gram matrix y of x: x x^T or, if `tall`, x^T x. */
static bool tt__append_gram(tt_tape *t, int32_t x, bool tall, int32_t y)
{
    tt__instr i = tt__instr_of(tall ? TT__OP_MATMUL_DB : TT__OP_MATMUL, x, y);
    i.in[1] = x;
    return x && y && tt__append_step(t, &i, false);
}

/* Appends an instruction that adds the product of a and b to y. */
static bool tt__append_product(tt_tape *t, int32_t a, int32_t b, int32_t y)
{
    tt__instr i = tt__instr_of(TT__OP_MATMUL, a, y);
    i.in[1] = b;
    i.add = 1;
    i.attr.untransposed = true;
    return a && b && y && tt__append_step(t, &i, false);
}

static bool tt__append_scale(tt_tape *t, int32_t x, float factor, int32_t y)
{
    tt__instr i = tt__instr_of(TT__OP_SCALE, x, y);
    i.attr.scale = factor;
    return x && y && tt__append_step(t, &i, false);
}

/* Appends the Newton-Schulz iteration on the matrix x, and returns the value of its result; 0 after
   tt__tape_fail. Five steps compute x = a x + (b G + c G G) x, where G = x x^T; for a matrix with more rows
   than columns they compute the transpose. a, b, c: Jordan et al., 2024. */
static int32_t tt__append_orthogonal(tt_tape *t, int32_t x, const char *name)
{
    static const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    const int64_t rows = t->values[x].shape.rows, cols = t->values[x].shape.cols, n = tt__min(rows, cols);
    const bool tall = rows > cols;
    const int32_t squares = tt__new_scratch(t, 1, 1, "squared norm", name);
    int32_t y = tt__new_scratch(t, rows, cols, "unit update", name);
    const tt__instr sum = tt__instr_of(TT__OP_SUM_SQUARES, x, squares);
    tt__instr unit = tt__instr_of(TT__OP_UNIT, x, y);
    unit.in[1] = squares;
    bool ok = squares && y && tt__append_step(t, &sum, false) && tt__append_step(t, &unit, false);
    for (int step = 0; step < 5 && ok; step++) {
        const int32_t gram = tt__new_scratch(t, n, n, "G", name);
        const int32_t sums = tt__new_scratch(t, n, n, "b G", name);
        const int32_t scaled = tt__new_scratch(t, n, n, "c G", name);
        const int32_t next = tt__new_scratch(t, rows, cols, "next update", name);
        ok = tt__append_gram(t, y, tall, gram) && tt__append_scale(t, gram, b, sums) &&
             tt__append_scale(t, gram, c, scaled) && tt__append_product(t, scaled, gram, sums) &&
             tt__append_scale(t, y, a, next) &&
             tt__append_product(t, tall ? y : sums, tall ? sums : y, next);
        y = next;
    }
    return ok ? y : 0;
}
