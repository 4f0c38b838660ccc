#pragma once
#include "../../base/base.h"
#include "../cpu_launch.h"
#include "../cpu_draw.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "../../cpu/halves.h"
#include "../../cpu/rows.h"
#include "../attention/cpu_blocks.h"
#include "../cpu_rows.h"
#include "../norm/cpu.h"

/* ------------------------------------------------------------------------------------------------ optimizers
   Parameters, gradients and states are contiguous, so kernels treat them as vectors, in chunks of
   TT__CHUNK. */

/* Returns elements [from, from + n) of m as floats: in m itself if m is f32, else widened into row k of
   scratch. */
TT__INLINE float *TT__K(chunk_in)(const tt__mat *m, int64_t from, int64_t n, float *scratch, int k)
{
    float *row = TT__K(scratch_row)(scratch, TT__CHUNK, k);
    if (m->dtype == TT_F32) return (float *)m->data + from;
    const uint16_t *h = (const uint16_t *)m->data + from;
    /* Prefetches the next chunk, which most likely is this thread's next task. */
    for (int64_t c = 0; c < n; c += 32) __builtin_prefetch(h + n + c, 0, 2);
    TT__K(row_widen)(row, h, m->dtype, n);
    return row;
}

/* Rounds n floats x stochastically to 16 bits in h. group: the Philox counter of the first 8 elements; the
   low word of the counters must not wrap within the n elements. */
TT__INLINE void TT__K(round_row)(uint16_t *h, const float *x, const tt_dtype dtype, int64_t n,
                                 const uint64_t keys[2 * TT__DRAW_ROUNDS], uint64_t group)
{
    const tt__vu groups = TT__K(philox_groups)() + (uint32_t)group,
                 high = TT__K(splat_u)((uint32_t)(group >> 32));
    uint16_t numbers[8 * TT__LANES], some[TT__LANES];
    for (int64_t c = 0; c < n; c += 8 * TT__LANES) {
        int64_t i = 0, left = tt__min(n - c, 8 * TT__LANES);
        TT__K(philox_numbers)(keys, groups + (uint32_t)(c / 8), high, numbers);
        for (; i + TT__LANES <= left; i += TT__LANES)
            TT__K(round_16)(h + c + i, TT__K(load)(x + c + i), TT__K(load_h)(numbers + i), dtype);
        if (i == left) continue;
        TT__K(round_16)(some, TT__K(load_some)(x + c + i, left - i), TT__K(load_h)(numbers + i), dtype);
        memcpy(h + c + i, some, (size_t)(left - i) * 2);
    }
}

/* Rounds elements `[from, from + n)` of m back to 16 bits stochastically. Steps smaller than half a unit in
   the last place then survive on average (Gupta et al., "Deep learning with limited numerical precision",
   2015). The random number of element e is number `e % 8` of Philox counter `{e / 8}`; the element is
   rounded up with a probability equal to the dropped fraction. e counts from the first element of the whole
   tensor, so that the elements of a shard are rounded as in the whole tensor. which: the number of the
   result. */
TT__OUTLINE void TT__K(chunk_out)(const tt__launch *l, const tt__mat *m, int64_t from, int64_t n,
                                  const float *x, uint32_t which)
{
    uint16_t *h = (uint16_t *)m->data + from;
    const uint64_t group = (uint64_t)(l->first + from) / 8;
    uint64_t keys[2 * TT__DRAW_ROUNDS];
    if (m->dtype == TT_F32) return;
    const tt__step_settings *run = TT__RUN_OF(l);
    tt__philox_keys(tt__stream_key(run->seed, TT__RANDOM_ROUNDING, (uint64_t)run->step,
                                   (uint64_t)which << 32 | l->instr->random), keys);
    TT__BY_HALF(m->dtype, D, TT__K(round_row)(h, x, D, n, keys, group));
}

/* Returns the sum of squares of one chunk of in[0]. */
TT__OUTLINE double TT__K(squares_of_chunk)(const tt__launch *l, int64_t from, int64_t to, float *scratch)
{
    const float *g = TT__K(chunk_in)(&l->in[0], from, to - from, scratch, 0);
    float rest, squares = TT__K(squares)(g, to - from, 0, &rest);
    return (double)squares + rest;
}

TT__ROWS_FN(sum_squares_rows)
{
    ((double *)l->workspace)[from / TT__CHUNK] = TT__K(squares_of_chunk)(l, from, to, scratch);
}

TT__ROWS_FN(chunk_squares_rows)
{
    ((double *)l->out[0].data)[from / TT__CHUNK] = TT__K(squares_of_chunk)(l, from, to, scratch);
}

TT__INLINE void TT__K(fold_squares)(const tt__launch *l, const double *chunk, int64_t chunks)
{
    double sum = 0;
    for (int64_t k = 0; k < chunks; k++) sum += chunk[k];
    *(float *)l->out[0].data = (float)sum;
}

TT__FN tt_status TT__K(run_SUM_SQUARES)(const tt__launch *l)
{
    int64_t n = tt__elements(&l->in[0]), chunks = tt__ceil_div(n, TT__CHUNK);
    tt__for_chunks(l, n, TT__CHUNK, TT__CHUNK, tt__align_up((size_t)chunks * 8), TT__K(sum_squares_rows));
    TT__K(fold_squares)(l, (const double *)l->workspace, chunks);
    return TT_OK;
}

TT__FN tt_status TT__K(run_CHUNK_SQUARES)(const tt__launch *l)
{
    return tt__for_chunks(l, tt__elements(&l->in[0]), TT__CHUNK, TT__CHUNK, 0, TT__K(chunk_squares_rows));
}

TT__FN tt_status TT__K(run_FOLD_SQUARES)(const tt__launch *l)
{
    TT__K(fold_squares)(l, (const double *)l->in[0].data, tt__elements(&l->in[0]));
    return TT_OK;
}

TT__FN tt_status TT__K(run_ADD_COUNTS)(const tt__launch *l)
{
    const float *counts = (const float *)l->in[0].data;
    double *totals = (double *)l->out[0].data; /* the three fields of a tt__totals */
    for (int k = 0; k < 3; k++) totals[k] = (l->add[0] ? totals[k] : 0) + counts[k];
    return TT_OK;
}

TT__FN tt_status TT__K(run_MEAN_LOSS)(const tt__launch *l)
{
    const float *counts = (const float *)l->in[0].data;
    *(float *)l->out[0].data = (float)((double)counts[0] / counts[1]);
    return TT_OK;
}

/* Computes the global norm of the gradients, and the factor by which all gradients are multiplied, as in
   torch.nn.utils.clip_grad_norm_. */
TT__FN tt_status TT__K(run_CLIP)(const tt__launch *l)
{
    const float *squares = (const float *)l->in[0].data;
    const tt__totals *totals = (const tt__totals *)l->in[1].data;
    const tt__step_settings *run = TT__RUN_OF(l);
    double sum = 0, clip_norm = l->instr->attr.clip_norm;
    for (int64_t k = 0; k < l->in[0].rows; k++) sum += squares[k];
    const double loss_scale = l->in[2].data ? ((const tt__scale_state *)l->in[2].data)->scale : 1;
    double scale = (run ? run->loss_norm / totals->targets : 1) / loss_scale;
    double norm = sqrt(sum) * scale, factor = scale;
    if (!isfinite(totals->loss) || !(totals->targets > 0)) norm = NAN; /* then no parameter is updated */
    if (clip_norm > 0 && clip_norm < norm + 1e-6) factor *= clip_norm / (norm + 1e-6);
    ((tt__clipped *)l->out[0].data)->norm = (float)norm;
    ((tt__clipped *)l->out[0].data)->factor = (float)factor;
    return TT_OK;
}

/* Lowers the loss scale if gradients have overflowed, and raises the scale after `interval` steps without
   overflow. Leaves the scale as it is where a lower scale would be below 1. Leaves it, too, where the scale
   is not the cause of the overflow: if the loss is not finite, or if there were no targets. */
TT__FN tt_status TT__K(run_LOSS_SCALE)(const tt__launch *l)
{
    const tt__totals *totals = (const tt__totals *)l->in[1].data;
    const tt__attr *a = &l->instr->attr;
    tt__scale_state *s = (tt__scale_state *)l->out[0].data;
    if (!isfinite(totals->loss) || !(totals->targets > 0)) return TT_OK;
    if (isfinite(((const tt__clipped *)l->in[0].data)->norm)) {
        if (++s->good_steps < a->interval) return TT_OK;
        s->scale = fmin(s->scale * a->growth, TT__LOSS_SCALE_MOST);
    } else {
        if (s->scale * a->backoff < 1) return TT_OK;
        s->scale *= a->backoff;
        s->skipped++;
    }
    s->good_steps = 0;
    return TT_OK;
}

/* Rounds x and its transpose to fp8. Magnitudes are compared as integers, by their bits; a NaN is then larger
   than any number. */
TT__FN tt_status TT__K(run_QUANTIZE)(const tt__launch *l)
{
    const tt__mat *x = &l->in[0], *q = &l->out[0], *across = &l->out[1];
    const float known = l->in[1].data ? *(const float *)l->in[1].data : 0;
    const int64_t cols = tt__ceil_div(x->cols, 16) * 16, rows = tt__ceil_div(x->rows, 16) * 16;
    const int64_t item = (int64_t)tt_dtype_bytes(x->dtype);
    const bool e5m2 = q->dtype == TT__E5M2 || across->dtype == TT__E5M2;
    uint32_t largest = 0;
    for (int64_t r = 0; r < x->rows; r++)
        for (int64_t c = 0; c < x->cols; c++) {
            float v;
            tt__convert(&v, TT_F32, (char *)tt__at(x, r) + c * item, x->dtype, 1);
            if ((tt__bits(v) & 0x7fffffffu) > largest) largest = tt__bits(v) & 0x7fffffffu;
        }
    const float scale = known > 0 ? tt__fp8_scale(known, e5m2) / (1 << TT__FP8_MARGIN)
                                  : tt__fp8_scale(tt__float(largest), e5m2);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            float v = 0;
            if (r < x->rows && c < x->cols)
                tt__convert(&v, TT_F32, (char *)tt__at(x, r) + c * item, x->dtype, 1);
            /* v - v turns an infinity into NaN, so that it does not saturate. */
            const uint8_t rounded = tt__to_fp8(v * scale + (v - v), e5m2);
            if (q->data && r < x->rows) ((uint8_t *)q->data)[r * q->ld + c] = rounded;
            if (across->data && c < x->cols) ((uint8_t *)across->data)[c * across->ld + r] = rounded;
        }
    *(float *)l->out[2].data = 1 / scale;
    float *max = (float *)l->out[3].data;
    if (max && largest > tt__bits(*max)) *max = tt__float(largest);
    return TT_OK;
}

/* Moves the step's largest magnitudes into the history. Leaves out magnitudes that are not finite, which
   occur in steps that update no parameter. */
TT__FN tt_status TT__K(run_FP8_HISTORY)(const tt__launch *l)
{
    float *largest = (float *)l->out[1].data;
    for (int64_t k = 0; k < l->out[0].rows; k++) {
        float *row = (float *)l->out[0].data + k * l->out[0].ld;
        if (largest[k] <= 3.4028235e38f) {
            memmove(row + 2, row + 1, sizeof *row * (TT__FP8_STEPS - 1));
            row[1] = row[0] = largest[k];
            for (int j = 2; j <= TT__FP8_STEPS; j++) if (row[j] > row[0]) row[0] = row[j];
        }
        largest[k] = 0;
    }
    return TT_OK;
}

/* Copies in[0] to out[0]. The copy is done when the call returns, so WAIT has nothing to wait for. */
TT__FN tt_status TT__K(run_COPY)(const tt__launch *l)
{
    size_t bytes = (size_t)l->in[0].cols * tt_dtype_bytes(l->in[0].dtype);
    for (int64_t r = 0; r < l->in[0].rows; r++) memcpy(tt__at(&l->out[0], r), tt__at(&l->in[0], r), bytes);
    return TT_OK;
}

TT__FN tt_status TT__K(run_WAIT)(const tt__launch *l) { (void)l; return TT_OK; }

TT__ROWS_FN(adam_rows)
{
    const tt__attr *a = &l->instr->attr;
    const tt__step_settings *run = TT__RUN_OF(l);
    int64_t n = to - from, c = 0;
    double t = (double)run->step + 1;
    const float *g = TT__K(chunk_in)(&l->in[0], from, n, scratch, 0);
    float *p = TT__K(chunk_in)(&l->out[0], from, n, scratch, 1);
    float *m = TT__K(chunk_in)(&l->out[1], from, n, scratch, 2);
    float *v = TT__K(chunk_in)(&l->out[2], from, n, scratch, 3);
    float factor = ((const float *)l->in[1].data)[1], lr = run->lr * tt__lr_factor(a);
    float b1 = a->beta1, b2 = a->beta2;
    float step = (float)(lr / (1 - pow(b1, t))), root = (float)(1 / sqrt(1 - pow(b2, t)));
    float l2 = a->decoupled ? 0 : a->weight_decay, keep = a->decoupled ? 1 - lr * a->weight_decay : 1;
    for (; c < n; c += TT__LANES) {
        tt__vf P = TT__K(load_n)(p + c, n - c), G = TT__K(load_n)(g + c, n - c) * factor + P * l2;
        tt__vf M = TT__K(load_n)(m + c, n - c) * b1 + G * (1 - b1),
               V = TT__K(load_n)(v + c, n - c) * b2 + G * G * (1 - b2);
        P = P * keep - M * step / (TT__K(sqrt)(V) * root + a->eps);
        TT__K(store_n)(p + c, P, n - c);
        TT__K(store_n)(m + c, M, n - c);
        TT__K(store_n)(v + c, V, n - c);
    }
    TT__K(chunk_out)(l, &l->out[0], from, n, p, 0);
    TT__K(chunk_out)(l, &l->out[1], from, n, m, 1);
    TT__K(chunk_out)(l, &l->out[2], from, n, v, 2);
}

TT__ROWS_FN(sgd_rows)
{
    const tt__attr *a = &l->instr->attr;
    const tt__step_settings *run = TT__RUN_OF(l);
    int64_t n = to - from;
    const float *g = TT__K(chunk_in)(&l->in[0], from, n, scratch, 0);
    float *p = TT__K(chunk_in)(&l->out[0], from, n, scratch, 1);
    float *m = l->out[1].data ? TT__K(chunk_in)(&l->out[1], from, n, scratch, 2) : NULL;
    float factor = ((const float *)l->in[1].data)[1], lr = run->lr * tt__lr_factor(a);
    for (int64_t c = 0; c < n; c += TT__LANES) {
        tt__vf P = TT__K(load_n)(p + c, n - c);
        tt__vf G = TT__K(load_n)(g + c, n - c) * factor + P * a->weight_decay;
        if (m) {
            tt__vf M = TT__K(load_n)(m + c, n - c) * a->beta1 + G;
            TT__K(store_n)(m + c, M, n - c);
            G = a->nesterov ? G + M * a->beta1 : M;
        }
        TT__K(store_n)(p + c, P - G * lr, n - c);
    }
    TT__K(chunk_out)(l, &l->out[0], from, n, p, 0);
    if (m) TT__K(chunk_out)(l, &l->out[1], from, n, m, 1);
}

/* Updates all chunks of a parameter if the norm of the gradients is finite. */
TT__INLINE tt_status TT__K(update)(const tt__launch *l, tt__rows_fn rows)
{
    if (!isfinite(((const tt__clipped *)l->in[1].data)->norm)) return TT_OK;
    return tt__for_chunks(l, tt__elements(&l->out[0]), TT__CHUNK, TT__CHUNK, 0, rows);
}

TT__FN tt_status TT__K(run_ADAM)(const tt__launch *l) { return TT__K(update)(l, TT__K(adam_rows)); }
TT__FN tt_status TT__K(run_SGD)(const tt__launch *l) { return TT__K(update)(l, TT__K(sgd_rows)); }

TT__ROWS_FN(ema_rows)
{
    const float *p = (const float *)l->in[0].data;
    float *average = (float *)l->out[0].data;
    const float more = TT__RUN_OF(l)->step ? 1 - l->instr->attr.beta1 : 1; /* the first update copies p to the
                                                                              average */
    (void)scratch;
    for (int64_t c = from; c < to; c += TT__LANES) {
        tt__vf A = TT__K(load_n)(average + c, to - c);
        A = more < 1 ? A + (TT__K(load_n)(p + c, to - c) - A) * more : TT__K(load_n)(p + c, to - c);
        TT__K(store_n)(average + c, A, to - c);
    }
}

TT__FN tt_status TT__K(run_EMA)(const tt__launch *l) { return TT__K(update)(l, TT__K(ema_rows)); }

/* Gives the caller's function the parameter, its states, and the gradient times the factor of the step. */
TT__FN tt_status TT__K(run_CUSTOM_UPDATE)(const tt__launch *l)
{
    const tt_custom_optimizer *o = l->instr->attr.optimizer;
    const tt__step_settings *run = TT__RUN_OF(l);
    const tt__clipped *c = (const tt__clipped *)l->in[1].data;
    const tt_param *param = l->tape->ctx->params[l->tape->values[l->instr->out[0]].param];
    const int64_t n = tt__elements(&l->out[0]);
    float *g = (float *)l->workspace, *state[2] = {(float *)l->out[1].data, (float *)l->out[2].data};
    if (!isfinite(c->norm) || !n) return TT_OK;
    tt__convert(g, TT_F32, l->in[0].data, l->in[0].dtype, (size_t)n);
    for (int64_t k = 0; k < n; k++) g[k] *= c->factor;
    const tt_custom_update u = {param->name, (float *)l->out[0].data, g, {state[0], state[1]}, n, l->first,
                                run->step, run->lr * tt__lr_factor(&l->instr->attr),
                                l->instr->attr.weight_decay};
    const tt_status status = o->update(o->user, &u);
    if (status == TT_OK) return TT_OK;
    return tt__fail(l->tape->ctx, status, "the function `update` of the optimizer failed for parameter "
                    "'%.200s' (%s): other parameters may have been updated; load the last state",
                    param->name, tt_status_name(status));
}
