#pragma once
#include "../../base/base.h"
#include "rules.h"
#include "../cpu_launch.h"
#include "../cpu_draw.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "../../cpu/halves.h"
#include "../../cpu/rows.h"
#include "../attention/cpu_blocks.h"
#include "../cpu_rows.h"

/* ---------------------------------------------------------------------------------------- element by element
   Kernels that compute each row, or each element, only from the same row of their operands. */

#define TT__ACT_OF(ACT) TT__K(act_##ACT)
#define TT__PAIR(OP, kind, formula) \
    TT__RUN_MAP_OF(OP, 0, 2, for (int64_t c = 0; c < n; c += TT__LANES) { \
        const tt__vf a = TT__K(load_n)(x[0] + c, n - c); \
        const tt__vf b = TT__K(load_n)(x[1] + c, n - c); \
        TT__K(store_n)(y + c, formula, n - c); \
    })
TT__PAIRS(TT__PAIR, TT__ACT_OF)
#undef TT__PAIR
#undef TT__ACT_OF

TT__RUN_MAP_OF(SCALE, 0, 1, TT__K(axpby)(y, l->instr->attr.scale, x[0], 0, NULL, n))
TT__RUN_MAP_OF(CAST, 0, 1, TT__K(axpby)(y, 1, x[0], 0, NULL, n))
TT__ROW_FN(row_ADD_ROW) { TT__K(axpby)(y, 1, x[0], 1, (const float *)more, n); }
TT__RUN_ROWS(ADD_ROW, const float *row = TT__K(row_in)(&l->in[1], 0, scratch, 3);
    TT__K(map_rows)(l, from, to, scratch, 0, 1, TT__K(row_ADD_ROW), row))
/* If `more` is not NULL, `more` is a row, and every row of a is multiplied by this row. If `more` is NULL,
   the operand b has one column, and row r of a is multiplied by b's number for the row, or by b's only
   number. */
TT__ROW_FN(row_MUL_BROADCAST)
{
    const float *row = (const float *)more;
    float own[TT__LANES]; /* one float is enough, but gcc cannot prove that */
    if (!row) TT__K(axpby)(y, *TT__K(row_in)(&l->in[1], l->in[1].rows > 1 ? r : 0, own, 0), x[0], 0, NULL, n);
    for (int64_t c = 0; c < n && row; c += TT__LANES)
        TT__K(store_n)(y + c, TT__K(load_n)(x[0] + c, n - c) * TT__K(load_n)(row + c, n - c), n - c);
}
TT__RUN_ROWS(MUL_BROADCAST,
    const float *row = l->in[1].cols > 1 ? TT__K(row_in)(&l->in[1], 0, scratch, 3) : NULL;
    TT__K(map_rows)(l, from, to, scratch, 0, 1, TT__K(row_MUL_BROADCAST), row))

TT__ROWS_FN(row_dots_rows)
{
    for (int64_t r = from; r < to; r++) {
        const float *a = TT__K(row_in)(&l->in[0], r, scratch, 1);
        const float *b = TT__K(row_in)(&l->in[1], r, scratch, 2);
        float dot[TT__LANES] = {0}; /* one float is enough, but gcc cannot prove that */
        dot[0] = TT__K(dot_row)(a, b, l->in[0].cols);
        TT__K(row_end)(&l->out[0], l->add[0], r, dot, scratch, 0);
    }
}
TT__FN tt_status TT__K(run_ROW_DOTS)(const tt__launch *l)
{
    return tt__for_rows(l, &l->in[0], 0, TT__K(row_dots_rows));
}
TT__RUN_MAP_OF(ACTIVATION, 0, 1, TT__K(act_row)(l->instr->attr.act, y, x[0], NULL, n))
TT__RUN_MAP_OF(ACTIVATION_BACKWARD, 0, 2, TT__K(act_row)(l->instr->attr.act, y, x[0], x[1], n))

TT__ROWS_FN(swiglu_backward_rows)
{
    const int64_t n = l->in[0].cols;
    for (int64_t r = from; r < to; r++) {
        const float *x[3]; /* rows of dy, gate and up */
        float *y[2];       /* rows of dgate and dup; an absent result is computed into scratch */
        for (int k = 0; k < 3; k++) x[k] = TT__K(row_in)(&l->in[k], r, scratch, 2 + k);
        for (int k = 0; k < 2; k++) {
            float *row = TT__K(scratch_row)(scratch, n, k);
            y[k] = l->out[k].data ? TT__K(row_begin)(&l->out[k], l->add[k], r, row) : row;
        }
        for (int64_t c = 0; c < n; c += TT__LANES) {
            const tt__vf dy = TT__K(load_n)(x[0] + c, n - c), gate = TT__K(load_n)(x[1] + c, n - c);
            const tt__vf up = TT__K(load_n)(x[2] + c, n - c);
            TT__K(store_n)(y[0] + c, dy * up * TT__K(slope_SILU)(gate), n - c);
            TT__K(store_n)(y[1] + c, dy * TT__K(act_SILU)(gate), n - c);
        }
        for (int k = 0; k < 2; k++)
            if (l->out[k].data) TT__K(row_end)(&l->out[k], l->add[k], r, y[k], scratch, 2);
    }
}
TT__FN tt_status TT__K(run_SWIGLU_BACKWARD)(const tt__launch *l)
{
    return tt__for_rows(l, &l->in[0], 0, TT__K(swiglu_backward_rows));
}

/* Computes the sine and the cosine of an angle below 2^25 by Taylor series in double. The error before
   rounding to float is at most 2e-9. */
TT__INLINE void TT__K(turn)(float angle, float *sine, float *cosine)
{
    /* Adding and subtracting `nearest`, 1.5 * 2^52, rounds a number to the nearest integer. */
    const double half_pi = 1.5707963267948966, nearest = 6755399441055744.0;
    const double turns = (angle / half_pi + nearest) - nearest, x = angle - turns * half_pi, y = x * x;
    const double s = x * (1 - y / 6 * (1 - y / 20 * (1 - y / 42 * (1 - y / 72 * (1 - y / 110)))));
    const double c = 1 - y / 2 * (1 - y / 12 * (1 - y / 30 * (1 - y / 56 * (1 - y / 90))));
    const int quarter = (int)turns & 3;
    const double a = quarter & 1 ? c : s, b = quarter & 1 ? s : c;
    *sine = (float)(quarter & 2 ? -a : a);
    *cosine = (float)((quarter ^ quarter >> 1) & 1 ? -b : b);
}

/* Computes rows [from, to) of rotary positions. The frequencies are at the beginning of the workspace. */
TT__ROWS_FN(rotary_rows)
{
    const tt__instr *i = l->instr;
    const tt_rotary_options *o = &i->attr.rotary;
    const int64_t n = l->in[0].cols, size = n / i->attr.heads, pairs = tt__rotary_pairs_of(o);
    const int32_t *position = (const int32_t *)l->in[1].data;
    const float *frequency = tt__workspace_at(l, 0), sign = i->attr.scale;
    float *c = TT__K(scratch_row)(scratch, n, 3), *s = c + pairs; /* the cosines c and the sines s share one
                                                                     row of scratch */
    for (int64_t r = from; r < to; r++) {
        const float *x = TT__K(row_in)(&l->in[0], r, scratch, 1);
        float *y = TT__K(row_begin)(&l->out[0], l->add[0], r, scratch);
        for (int64_t j = 0; j < pairs; j++) {
            TT__K(turn)((float)position[r] * frequency[j], &s[j], &c[j]);
            s[j] *= sign * o->magnitude;
            c[j] *= o->magnitude;
        }
        for (int64_t h = 0; h < n; h += size) {
            const float *from_head = x + h;
            float *head = y + h;
            for (int64_t j = 0; j < pairs && o->pairs == TT_ROTARY_HALVES; j += TT__LANES) {
                const tt__vf a = TT__K(load_n)(from_head + j, pairs - j);
                const tt__vf b = TT__K(load_n)(from_head + pairs + j, pairs - j);
                const tt__vf cosine = TT__K(load_n)(c + j, pairs - j), sine = TT__K(load_n)(s + j, pairs - j);
                TT__K(store_n)(head + j, a * cosine - b * sine, pairs - j);
                TT__K(store_n)(head + pairs + j, b * cosine + a * sine, pairs - j);
            }
            for (int64_t j = 0; j < pairs && o->pairs == TT_ROTARY_NEIGHBOURS; j++) {
                const float a = from_head[2 * j], b = from_head[2 * j + 1];
                head[2 * j] = a * c[j] - b * s[j];
                head[2 * j + 1] = b * c[j] + a * s[j];
            }
            const int64_t turn = 2 * pairs;
            if (head != from_head) memcpy(head + turn, from_head + turn, (size_t)(size - turn) * 4);
        }
        TT__K(row_end)(&l->out[0], l->add[0], r, y, scratch, 2);
    }
}

TT__FN tt_status TT__K(run_ROTARY)(const tt__launch *l)
{
    double frequency[TT__MAX_PAIRS];
    const tt_rotary_options *o = &l->instr->attr.rotary;
    tt__rotary_frequencies(o, frequency);
    for (int j = 0; j < tt__rotary_pairs_of(o); j++) tt__workspace_at(l, 0)[j] = (float)frequency[j];
    return tt__for_rows(l, &l->out[0], tt__rotary_table_bytes(l->instr), TT__K(rotary_rows));
}

TT__ROWS_FN(fill_rows)
{
    const tt__mat *y = &l->out[0];
    const float loss_scale = l->in[0].data ? (float)((const tt__scale_state *)l->in[0].data)->scale : 1.0f;
    const float x = l->instr->attr.scale * loss_scale;
    const uint16_t half = tt__to_half(x, y->dtype);
    for (int64_t r = from; r < to; r++) {
        for (int64_t c = 0; c < y->cols; c++) {
            if (y->dtype == TT_F32) ((float *)tt__at(y, r))[c] = x;
            else ((uint16_t *)tt__at(y, r))[c] = half;
        }
    }
}

TT__FN tt_status TT__K(run_FILL)(const tt__launch *l)
{
    return l->add[0] ? TT_OK : tt__for_rows(l, &l->out[0], 0, TT__K(fill_rows));
}

/* Computes row r of dropout: y = x / (1 - p) for elements that dropout keeps, 0 for others, plus the
   residual if it is present. Element c is decided by 16 random bits: number `c % 8` of Philox counter
   `{r, c / 8, 0, 0}`. more: the keys of Philox. */
TT__ROW_FN(dropout_row)
{
    const tt__vu groups = TT__K(philox_groups)();
    const int32_t drop = TT__DROP_THRESHOLD(l->instr->attr.dropout);
    const float scale = 65536.0f / (float)(65536 - drop);
    const int64_t number = l->in[2].data ? ((const int32_t *)l->in[2].data)[r] : l->first_row + r;
    const int64_t first_col = l->first_col;
    uint16_t numbers[8 * TT__LANES];
    for (int64_t c = 0; c < n; c += 8 * TT__LANES) {
        TT__K(philox_numbers)((const uint64_t *)more, TT__K(splat_u)((uint32_t)number),
                              TT__K(splat_u)((uint32_t)((first_col + c) / 8)) + groups, numbers);
        for (int64_t i = c; i < tt__min(n, c + 8 * TT__LANES); i += TT__LANES) {
            tt__vi keep = (tt__vi)TT__K(load_h)(numbers + (i - c)) >= drop;
            tt__vf v = (tt__vf)((tt__vi)(TT__K(load_n)(x[0] + i, n - i) * scale) & keep);
            if (x[1]) v += TT__K(load_n)(x[1] + i, n - i);
            TT__K(store_n)(y + i, v, n - i);
        }
    }
}

TT__ROWS_FN(dropout_rows)
{
    uint64_t keys[2 * TT__DRAW_ROUNDS];
    tt__philox_keys(tt__dropout_key(l), keys);
    TT__K(map_rows)(l, from, to, scratch, 0, 2, TT__K(dropout_row), keys);
}

TT__RUN_ROWS(DROPOUT, TT__K(dropout_rows)(l, from, to, scratch))
