#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../record.h"
#include "../shapes.h"
#include "../scratch.h"

/* ---------------------------------------------------------------------------------------------------- fp8
   QUANTIZE rounds x once, for all products that read x, to an fp8 dtype, TT__E4M3 or TT__E5M2 (Micikevicius
   et al.: "FP8 formats for deep learning", 2022). cuBLASLt needs operands that are contiguous along the
   summed dimension, so out[0] stores x row by row and out[1] stores x column by column. out[0] and out[1]
   have the shape of x. The `ld` of each, the distance of two rows or two columns, is a multiple of 16
   elements, with zeros after the elements of x. With a history, the scale is known before x is read (delayed
   scaling, as in NVIDIA's Transformer Engine): in[1] has the largest magnitudes of x in earlier steps, and at
   the end of the step the history gets this step's largest magnitude from out[3]. Without a history, or while
   the history has no magnitude, QUANTIZE first finds the largest magnitude of x. */

static bool tt__shape_QUANTIZE(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *x = tt__in(t, i, 0);
    tt__set_shape(&out[0], TT__E4M3, x, x->cols);
    out[1] = out[0];
    tt__set_fixed(&out[2], TT_F32, 1, 1);
    out[3] = out[2];
    return tt__float_in(t, i, 0) && tt__fixed_in(t, i, 1, 1, 1 + TT__FP8_STEPS);
}

/* The layout rule of QUANTIZE: each tensor-parallel rank scales its own shard. */
static bool tt__layout_QUANTIZE(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    (void)t;
    out[0] = out[1] = in[0];
    out[2] = out[3] = TT__WHOLE;
    return in[0] <= TT__COLS && !i->in[1];
}

/* Returns the bytes of scratch on CUDA, which holds the largest magnitude of x. With a history, out[3] holds
   the magnitude, and no scratch is needed. */
static size_t tt__cuda_QUANTIZE(const tt_tape *t, const tt__instr *i)
{
    (void)t;
    return i->in[1] ? 0 : TT__CUDA_ALIGN;
}

static const tt__rules tt__rules_QUANTIZE = {tt__shape_QUANTIZE, tt__layout_QUANTIZE, {NULL}, NULL,
    tt__cuda_QUANTIZE};

static bool tt__shape_FP8_HISTORY(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const int64_t tensors = tt__in(t, i, 0)->cols;
    tt__set_fixed(&out[0], TT_F32, tensors, 1 + TT__FP8_STEPS);
    tt__set_fixed(&out[1], TT_F32, 1, tensors);
    return tt__fixed_in(t, i, 0, 1, tensors);
}

static const tt__rules tt__rules_FP8_HISTORY = {tt__shape_FP8_HISTORY, NULL, {NULL}, tt__no_bytes};
