#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../../tape/edit.h"
#include "../record.h"
#include "../shapes.h"
#include "../layouts.h"
#include "../gradients.h"
#include "../scratch.h"

/* ------------------------------------------------------------------------------------------ cast and fill */

static void tt__backward_CAST(tt__builder *b, const tt__instr *f, int32_t g)
{
    /* A weight needs no CAST of its gradient, because tt__grad_owner makes g the weight's gradient. */
    bool weight = tt__is_weight(b->t, f->in[0]);
    if (!weight) tt__emit_gradient(b, f, g, TT__OP_CAST, "g", "0");
}

static const tt__rules tt__rules_CAST = {tt__shape_elementwise, tt__layout_alike, {tt__backward_CAST}};

/* The numbers to which ROUND rounds weights: multiples of `step`. many: 1 / step, or 0 if step is about 0. */
typedef struct tt__few_bits { float step, many; } tt__few_bits;

/* Returns the steps of a row of n columns. measure: for int8 the largest magnitude of the row, for binary the
   sum of the row's magnitudes, and for ternary the mean of these sums over all rows. The mean magnitude of
   ternary weights is at least 1e-5, as in transformers. */
static tt__few_bits tt__few_bits_of(tt_rounding kind, double measure, int64_t n)
{
    tt__few_bits s;
    s.step = (float)(kind == TT_ROUND_INT8 ? measure / 127 : measure / (double)n);
    s.many = s.step < 1e-5f ? 1e5f : 1 / s.step; /* of ternary weights */
    if (kind == TT_ROUND_TERNARY) s.step = 1 / s.many;
    else s.many = s.step > 1e-30f ? 1 / s.step : 0;
    return s;
}

enum { TT__ROUND_PART = 256 }; /* elements whose magnitudes the CPU sums as floats, before doubles */

/* Emits nothing: ROUND reads weights only, to which tt__grad_owner passes the gradient straight through. */
static void tt__backward_ROUND(tt__builder *b, const tt__instr *f, int32_t g) { (void)b; (void)f; (void)g; }

/* Returns the bytes of scratch on a CPU: a number for each row, and rows for the threads. */
static size_t tt__cpu_ROUND(int threads, const tt_tape *t, const tt__instr *i)
{
    return tt__align_up((size_t)tt__in(t, i, 0)->rows * 8) + tt__widen_bytes(threads, t, i);
}

/* Returns the bytes of scratch on CUDA: a number for each row, and one for the matrix. */
static size_t tt__cuda_ROUND(const tt_tape *t, const tt__instr *i)
{
    return (size_t)(tt__in(t, i, 0)->rows + 1) * 8;
}

static const tt__rules tt__rules_ROUND = {tt__shape_elementwise, NULL, {tt__backward_ROUND}, tt__cpu_ROUND,
    tt__cuda_ROUND};

static bool tt__shape_FILL(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = t->values[i->out[0]].shape;
    return true;
}

static bool tt__layout_FILL(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    (void)t; (void)in;
    out[0] = i->attr.scale == 0 ? TT__ZEROS : TT__WHOLE;
    return true;
}

/* Returns whether i adds to all of `storage`: its results in `storage` are added, do not overlap, and cover
   all columns. */
static bool tt__adds_all_columns(const tt_tape *t, const tt__instr *i, int32_t storage)
{
    const tt__tape_value *whole = &t->values[storage];
    int64_t cols = 0;
    for (int j = 0; j < TT__MAX_OUT; j++) {
        const tt__tape_value *y = &t->values[i->out[j]];
        if (!i->out[j] || y->base != storage) continue;
        const bool adds = i->add >> j & 1, columns = tt__same_rows(&y->shape, &whole->shape);
        if (!adds || !columns || y->ld != whole->ld) return false;
        for (int o = 0; o < j; o++) {
            const tt__tape_value *other = &t->values[i->out[o]];
            const bool apart = y->offset + y->shape.cols <= other->offset ||
                               other->offset + other->shape.cols <= y->offset;
            if (i->out[o] && other->base == storage && !apart) return false;
        }
        cols += y->shape.cols;
    }
    return cols == whole->shape.cols;
}

/* Drops a fill with zeros if the next instruction that uses the tensor adds to all of the tensor. That
   instruction then writes instead of adding. An example is the backward of attention, which makes the
   gradient of packed queries, keys and values. */
static void tt__fuse_FILL(tt_tape *t, int k, int32_t root)
{
    const tt__instr *i = &t->code[k];
    const int32_t g = i->out[0];
    const tt__tape_value *v = &t->values[g];
    (void)root;
    if (i->attr.scale != 0 || i->add || v->base != g || v->storage != TT__TRANSIENT) return;
    for (int m = k + 1; m <= v->writer; m++) {
        tt__instr next = t->code[m];
        const bool writes = tt__writes(t, &next, g);
        if (tt__reads(t, &next, g) || (writes && !tt__adds_all_columns(t, &next, g))) return;
        if (!writes) continue;
        for (int j = 0; j < TT__MAX_OUT; j++)
            if (next.out[j] && t->values[next.out[j]].base == g) next.add &= ~(1u << j);
        tt__drop(t, k);
        tt__put(t, m, &next);
        return;
    }
}

static const tt__rules tt__rules_FILL = {tt__shape_FILL, tt__layout_FILL, {NULL}, tt__no_bytes, NULL, NULL,
    NULL, tt__fuse_FILL};
