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
#include "map8.h"
#include "adafactor.h"
#include "../scratch.h"

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

/* Returns, in each lane, table[at]. */
TT__INLINE tt__vi TT__K(pick)(const void *table, tt__vi at)
{
    tt__vi picked = at; /* a value, because GCC 12 warns without one */
#if TT__LANES >= 8
    for (int i = 0; i < TT__LANES; i += 8) {
        __m256i some;
        memcpy(&some, (const char *)&at + 4 * i, sizeof some);
        some = _mm256_i32gather_epi32((const int *)table, some, 4);
        memcpy((char *)&picked + 4 * i, &some, sizeof some);
    }
#else
    for (int i = 0; i < TT__LANES; i++) picked[i] = ((const int32_t *)table)[at[i]];
#endif
    return picked;
}

/* Loads the first n numbers of 8 bits at p, at most TT__LANES; the other lanes are 0. */
TT__INLINE tt__vi TT__K(load_bytes)(const uint8_t *p, int64_t n)
{
    tt__vi v = (tt__vi)TT__K(zero)();
    uint8_t some[TT__LANES] = {0};
    if (n < TT__LANES) p = (const uint8_t *)memcpy(some, p, (size_t)n);
#if TT__LANES >= 8
    for (int i = 0; i < TT__LANES; i += 8) {
        const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(p + i)));
        memcpy((char *)&v + 4 * i, &wide, sizeof wide);
    }
#else
    for (int i = 0; i < TT__LANES; i++) v[i] = p[i];
#endif
    return v;
}

/* Stores the first n lanes of v, which are 0 to 255, as numbers of 8 bits. */
TT__INLINE void TT__K(store_bytes)(uint8_t *p, tt__vi v, int64_t n)
{
    uint8_t some[TT__LANES], *to = n < TT__LANES ? some : p;
#if TT__LANES >= 8
    const __m256i first = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                           -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
    for (int i = 0; i < TT__LANES; i += 8) {
        __m256i wide;
        memcpy(&wide, (const char *)&v + 4 * i, sizeof wide);
        wide = _mm256_shuffle_epi8(wide, first);
        _mm_storel_epi64((__m128i *)(void *)(to + i), _mm_or_si128(_mm256_castsi256_si128(wide),
                                                                   _mm256_extracti128_si256(wide, 1)));
    }
#else
    for (int i = 0; i < TT__LANES; i++) to[i] = (uint8_t)v[i];
#endif
    if (to == some) memcpy(p, some, (size_t)n);
}

/* Returns the numbers of codes. AVX2 picks one of 8 divisors faster than one of 256 numbers: see
   tt__map8.divisor. */
TT__INLINE tt__vf TT__K(numbers_of)(tt__vi code, const tt__map8 *map)
{
#if TT__LANES >= 8
    const tt__vi apart = code - map->zero, sign = apart >> 31, interval = (apart ^ sign) - sign + map->floor;
    tt__vf all, count, divisor;
    for (int i = 0; i < TT__LANES; i += 8) {
        __m256i some;
        memcpy(&some, (const char *)&interval + 4 * i, sizeof some);
        const __m256 as_float = _mm256_cvtepi32_ps(some), table = _mm256_loadu_ps(map->divisor);
        const __m256i exponent = _mm256_srli_epi32(_mm256_castps_si256(as_float), 23);
        const __m256 of_decade = _mm256_permutevar8x32_ps(table, exponent);
        memcpy((char *)&all + 4 * i, &as_float, sizeof as_float);
        memcpy((char *)&divisor + 4 * i, &of_decade, sizeof of_decade);
    }
    count = (tt__vf)((tt__vi)all & 0x7f800000); /* the intervals of the decade: the largest power of 2 */
    const tt__vi bits = (tt__vi)((all * 18 - count * 16 + 9) / divisor) & (apart != 0);
    return (tt__vf)(bits | (sign & INT32_MIN));
#else
    return (tt__vf)TT__K(pick)(map->number, code);
#endif
}

/* Writes n numbers of an 8-bit state as floats to x: the number of each code times the scale of its block. */
TT__OUTLINE void TT__K(row_from_8)(float *x, const uint8_t *code, const float *scale, int64_t n,
                                   const tt__map8 *map)
{
    for (int64_t c = 0; c < n; c += TT__LANES) {
        const tt__vf number = TT__K(numbers_of)(TT__K(load_bytes)(code + c, n - c), map);
        TT__K(store_n)(x + c, number * scale[c / TT__STATE_BLOCK], n - c);
    }
}

/* Returns the codes of the numbers x / scale. If two numbers of the map are equally near, the number of
   smaller magnitude is taken. */
TT__INLINE tt__vi TT__K(codes_of)(tt__vf x, float scale, const tt__map8 *map)
{
    const tt__vf quotient = x / scale;
    const tt__vi magnitude = (tt__vi)quotient & 0x7fffffff, negative = quotient < 0.0f;
    tt__vi cell = (magnitude >> 16) - TT__MAP8_BITS, k, beyond;
    cell &= ~(cell >> 31);
    beyond = cell > TT__MAP8_CELLS - 1; /* if x has NaN or infinity */
    cell = (cell & ~beyond) | ((TT__MAP8_CELLS - 1) & beyond);
    const tt__vu found = (tt__vu)TT__K(pick)(map->cell, cell);
    k = (tt__vi)(found & 0xffff) - ((magnitude & 0xffff) > (tt__vi)(found >> 16));
    k += map->floor & (k < map->floor) & (quotient > 0.0f); /* floor is 0 or 1 */
    const tt__vi least = k > map->most;
    const tt__vi opposite = -((k & ~least) | (map->most & least));
    return map->zero + ((opposite & negative) | (k & ~negative));
}

/* Writes n floats x as an 8-bit state: their codes, and the scale of each block. */
TT__OUTLINE void TT__K(row_to_8)(uint8_t *code, float *scale, const float *x, int64_t n, const tt__map8 *map)
{
    for (int64_t from = 0; from < n; from += TT__STATE_BLOCK) {
        const int64_t m = tt__min(n - from, TT__STATE_BLOCK);
        const float *block = x + from;
        tt__vf largest = TT__K(zero)();
        for (int64_t c = 0; c < m; c += TT__LANES) {
            const tt__vi magnitude = (tt__vi)TT__K(load_n)(block + c, m - c) & 0x7fffffff;
            largest = TT__K(max)(largest, (tt__vf)magnitude);
        }
        float most = TT__K(max_lane)(largest);
        if (!(most >= 1.17549435e-38f)) most = 0; /* numbers that are subnormal become 0 */
        scale[from / TT__STATE_BLOCK] = most;
        if (!(most > 0)) memset(code + from, map->zero, (size_t)m);
        for (int64_t c = 0; c < m && most > 0; c += TT__LANES)
            TT__K(store_bytes)(code + from + c, TT__K(codes_of)(TT__K(load_n)(block + c, m - c), most, map),
                               m - c);
    }
}

/* Returns the map of output k, an 8-bit state: the signed map or, for the second state, which is never
   negative, the unsigned map. */
static inline const tt__map8 *TT__K(map_of)(const tt__launch *l, int k)
{
    return (const tt__map8 *)l->workspace + (k > 1);
}

/* Returns elements [from, from + n) of output k, an optimizer state, as floats: see chunk_in. */
TT__INLINE float *TT__K(state_in)(const tt__launch *l, int k, int64_t from, int64_t n, float *scratch,
                                  int row)
{
    const tt__mat *m = &l->out[k], *scales = &l->out[TT__STATES + k];
    if (m->dtype != TT_U8) return TT__K(chunk_in)(m, from, n, scratch, row);
    float *x = TT__K(scratch_row)(scratch, TT__CHUNK, row);
    TT__K(row_from_8)(x, (const uint8_t *)m->data + from,
                      (const float *)scales->data + from / TT__STATE_BLOCK, n, TT__K(map_of)(l, k));
    return x;
}

/* Writes elements [from, from + n) of output k, an optimizer state, unless they were computed in place. */
TT__INLINE void TT__K(state_out)(const tt__launch *l, int k, int64_t from, int64_t n, const float *x)
{
    const tt__mat *m = &l->out[k], *scales = &l->out[TT__STATES + k];
    if (m->dtype != TT_U8) TT__K(chunk_out)(l, m, from, n, x, (uint32_t)k);
    else TT__K(row_to_8)((uint8_t *)m->data + from, (float *)scales->data + from / TT__STATE_BLOCK, x, n,
                         TT__K(map_of)(l, k));
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
    double *totals = (double *)l->out[0].data; /* the fields of a tt__totals */
    for (int k = 0; k < TT__TOTALS; k++)
        totals[k] = (l->add[0] ? totals[k] : 0) + (k == 3 && l->instr->attr.by_total ? 0 : counts[k]);
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
    const tt__mat *x = &l->in[0];
    const size_t bytes = (size_t)x->cols * tt_dtype_bytes(x->dtype);
    if (tt__is_coded(x->dtype)) {
        memcpy(l->out[0].data, x->data, tt__matrix_bytes(x->dtype, x->rows, x->cols));
        return TT_OK;
    }
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
    float *m = TT__K(state_in)(l, 1, from, n, scratch, 2);
    float *v = TT__K(state_in)(l, 2, from, n, scratch, 3);
    float factor = ((const float *)l->in[1].data)[1], lr = run->lr * tt__lr_factor(a);
    float b1 = a->beta1, b2 = a->beta2;
    float step = (float)(lr / (1 - tt__pow(b1, t))), root = (float)(1 / sqrt(1 - tt__pow(b2, t)));
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
    TT__K(state_out)(l, 1, from, n, m);
    TT__K(state_out)(l, 2, from, n, v);
}

TT__ROWS_FN(sgd_rows)
{
    const tt__attr *a = &l->instr->attr;
    const tt__step_settings *run = TT__RUN_OF(l);
    int64_t n = to - from;
    const float *g = TT__K(chunk_in)(&l->in[0], from, n, scratch, 0);
    float *p = TT__K(chunk_in)(&l->out[0], from, n, scratch, 1);
    float *m = l->out[1].data ? TT__K(state_in)(l, 1, from, n, scratch, 2) : NULL;
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
    if (m) TT__K(state_out)(l, 1, from, n, m);
}

/* Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2. */
TT__ROWS_FN(lion_rows)
{
    const tt__attr *a = &l->instr->attr;
    const int64_t n = to - from;
    const float *g = TT__K(chunk_in)(&l->in[0], from, n, scratch, 0);
    float *p = TT__K(chunk_in)(&l->out[0], from, n, scratch, 1);
    float *m = TT__K(state_in)(l, 1, from, n, scratch, 2);
    const float factor = ((const float *)l->in[1].data)[1], lr = TT__RUN_OF(l)->lr * tt__lr_factor(a);
    const float keep = 1 - lr * a->weight_decay, b1 = a->beta1, b2 = a->beta2;
    const tt__vi one = (tt__vi)TT__K(splat)(1.0f);
    for (int64_t c = 0; c < n; c += TT__LANES) {
        const tt__vf M = TT__K(load_n)(m + c, n - c), G = TT__K(load_n)(g + c, n - c) * factor;
        const tt__vf blend = M * b1 + G * (1 - b1);
        const tt__vf sign = (tt__vf)(one & (tt__vi)(blend > 0.0f)) - (tt__vf)(one & (tt__vi)(blend < 0.0f));
        TT__K(store_n)(p + c, TT__K(load_n)(p + c, n - c) * keep - sign * lr, n - c);
        TT__K(store_n)(m + c, M * b2 + G * (1 - b2), n - c);
    }
    TT__K(chunk_out)(l, &l->out[0], from, n, p, 0);
    TT__K(state_out)(l, 1, from, n, m);
}

TT__ROWS_FN(muon_momentum_rows)
{
    const tt__attr *a = &l->instr->attr;
    const int64_t n = to - from;
    const float *g = TT__K(chunk_in)(&l->in[0], from, n, scratch, 0);
    float *update = (float *)l->out[0].data + from, *m = TT__K(state_in)(l, 1, from, n, scratch, 2);
    const float factor = ((const float *)l->in[1].data)[1], b1 = a->beta1;
    for (int64_t c = 0; c < n; c += TT__LANES) {
        const tt__vf G = TT__K(load_n)(g + c, n - c) * factor, before = TT__K(load_n)(m + c, n - c);
        const tt__vf M = before + (G - before) * (1 - b1);
        TT__K(store_n)(update + c, a->nesterov ? G + (M - G) * b1 : M, n - c);
        TT__K(store_n)(m + c, M, n - c);
    }
    TT__K(state_out)(l, 1, from, n, m);
}

TT__ROWS_FN(muon_rows)
{
    const tt__attr *a = &l->instr->attr;
    const int64_t n = to - from;
    const float *x = TT__K(chunk_in)(&l->in[0], from, n, scratch, 0);
    float *p = TT__K(chunk_in)(&l->out[0], from, n, scratch, 1);
    const float lr = TT__RUN_OF(l)->lr * tt__lr_factor(a), keep = 1 - lr * a->weight_decay;
    for (int64_t c = 0; c < n; c += TT__LANES) {
        const tt__vf P = TT__K(load_n)(p + c, n - c) * keep;
        TT__K(store_n)(p + c, P - TT__K(load_n)(x + c, n - c) * (lr * a->beta2), n - c);
    }
    TT__K(chunk_out)(l, &l->out[0], from, n, p, 0);
}

/* Updates all chunks of a parameter if the norm of the gradients is finite. */
TT__INLINE tt_status TT__K(update)(const tt__launch *l, tt__rows_fn rows)
{
    const bool maps = l->out[1].data && l->out[1].dtype == TT_U8;
    if (!isfinite(((const tt__clipped *)l->in[1].data)->norm)) return TT_OK;
    for (int k = 0; k < 2 && maps; k++) tt__make_map8((tt__map8 *)l->workspace + k, k == 0);
    return tt__for_chunks(l, tt__elements(&l->out[0]), TT__CHUNK, TT__CHUNK, maps ? tt__maps8_bytes() : 0,
                          rows);
}

TT__FN tt_status TT__K(run_ADAM)(const tt__launch *l) { return TT__K(update)(l, TT__K(adam_rows)); }
TT__FN tt_status TT__K(run_SGD)(const tt__launch *l) { return TT__K(update)(l, TT__K(sgd_rows)); }
TT__FN tt_status TT__K(run_LION)(const tt__launch *l) { return TT__K(update)(l, TT__K(lion_rows)); }
TT__FN tt_status TT__K(run_MUON)(const tt__launch *l) { return TT__K(update)(l, TT__K(muon_rows)); }
TT__FN tt_status TT__K(run_MUON_MOMENTUM)(const tt__launch *l)
{
    return TT__K(update)(l, TT__K(muon_momentum_rows));
}

TT__INLINE tt__adafactor_space TT__K(adafactor_space)(const tt__launch *l)
{
    return tt__adafactor_space_of(l->in[0].rows, l->in[0].cols);
}

/* Returns the factor on row r of the gradient that makes it the update, apart from the columns' factors. */
TT__INLINE float TT__K(adafactor_row)(const tt__launch *l, int64_t r)
{
    const float factor = ((const float *)l->in[1].data)[1], *rows = (const float *)l->out[1].data;
    const tt__adafactor_numbers *of = (const tt__adafactor_numbers *)l->workspace;
    return rows ? factor * sqrtf(of->mean / rows[r]) : factor;
}

/* Moves the running means of rows [from, to), which are a part, and writes the part's column sums. */
TT__ROWS_FN(adafactor_square_rows)
{
    const tt__adafactor_space s = TT__K(adafactor_space)(l);
    const int64_t cols = l->in[0].cols;
    const float factor = ((const float *)l->in[1].data)[1];
    const float weight = ((const tt__adafactor_numbers *)l->workspace)->weight;
    float *rows = (float *)l->out[1].data;
    float *sums = tt__workspace_at(l, s.sums + (size_t)(from / s.part) * tt__row_bytes(cols));
    memset(sums, 0, (size_t)cols * sizeof *sums);
    for (int64_t r = from; r < to; r++) {
        double sum = 0;
        for (int64_t begin = 0, n; begin < cols; begin += n) {
            n = tt__min(cols - begin, TT__CHUNK);
            const float *g = TT__K(chunk_in)(&l->in[0], r * cols + begin, n, scratch, 0);
            tt__vf total = TT__K(zero)();
            for (int64_t c = 0; c < n; c += TT__LANES) {
                const tt__vf G = TT__K(load_n)(g + c, n - c) * factor, squares = G * G;
                total += squares;
                TT__K(store_n)(sums + begin + c, TT__K(load_n)(sums + begin + c, n - c) + squares, n - c);
            }
            sum += (double)TT__K(sum)(total);
        }
        if (rows) rows[r] += ((float)(sum / (double)cols) + TT__ADAFACTOR_EPS - rows[r]) * weight;
    }
}

/* Moves the running means of columns [from, to), and computes the columns' factors. */
TT__ROWS_FN(adafactor_square_columns)
{
    const tt__adafactor_space s = TT__K(adafactor_space)(l);
    const int64_t rows = l->in[0].rows, cols = l->in[0].cols, n = to - from;
    const float weight = ((const tt__adafactor_numbers *)l->workspace)->weight;
    float *means = (float *)l->out[2].data + from, *factors = tt__workspace_at(l, s.factors) + from;
    memset(scratch, 0, (size_t)n * sizeof *scratch);
    for (int64_t part = 0; part * s.part < rows; part++)
        TT__K(axpby)(scratch, 1, scratch, 1,
                     tt__workspace_at(l, s.sums + (size_t)part * tt__row_bytes(cols)) + from, n);
    for (int64_t c = 0; c < n; c += TT__LANES) {
        const tt__vf before = TT__K(load_n)(means + c, n - c), one = TT__K(splat)(1.0f);
        const tt__vf mean = TT__K(load_n)(scratch + c, n - c) / (float)rows + TT__ADAFACTOR_EPS;
        const tt__vf after = before + (mean - before) * weight;
        TT__K(store_n)(means + c, after, n - c);
        TT__K(store_n)(factors + c, one / TT__K(sqrt)(after), n - c);
    }
}

/* Sums the squares of elements [from, to) of the update, and of the parameter. */
TT__ROWS_FN(adafactor_squares)
{
    const tt__adafactor_space s = TT__K(adafactor_space)(l);
    const int64_t cols = l->in[0].cols;
    const float *factors = tt__workspace_at(l, s.factors);
    const float *g = TT__K(chunk_in)(&l->in[0], from, to - from, scratch, 0);
    const float *p = TT__K(chunk_in)(&l->out[0], from, to - from, scratch, 1);
    double *sums = (double *)(void *)tt__workspace_at(l, s.squares) + from / TT__CHUNK * 2;
    sums[0] = sums[1] = 0;
    for (int64_t e = from, n; e < to; e += n, g += n, p += n) {
        n = tt__min(cols - e % cols, to - e);
        const float factor = TT__K(adafactor_row)(l, e / cols), *of_column = factors + e % cols;
        tt__vf updates = TT__K(zero)(), params = updates;
        for (int64_t c = 0; c < n; c += TT__LANES) {
            const tt__vf U = TT__K(load_n)(g + c, n - c) * factor * TT__K(load_n)(of_column + c, n - c);
            const tt__vf P = TT__K(load_n)(p + c, n - c);
            updates += U * U;
            params += P * P;
        }
        sums[0] += (double)TT__K(sum)(updates);
        sums[1] += (double)TT__K(sum)(params);
    }
}

TT__ROWS_FN(adafactor_rows)
{
    const tt__attr *a = &l->instr->attr;
    const tt__adafactor_space s = TT__K(adafactor_space)(l);
    const int64_t cols = l->in[0].cols;
    const float *g = TT__K(chunk_in)(&l->in[0], from, to - from, scratch, 0);
    float *p = TT__K(chunk_in)(&l->out[0], from, to - from, scratch, 1), *at = p;
    const float step = ((const tt__adafactor_numbers *)l->workspace)->step;
    const float keep = 1 - TT__RUN_OF(l)->lr * tt__lr_factor(a) * a->weight_decay;
    for (int64_t e = from, n; e < to; e += n, g += n, at += n) {
        n = tt__min(cols - e % cols, to - e);
        const float factor = TT__K(adafactor_row)(l, e / cols);
        const float *of_column = tt__workspace_at(l, s.factors) + e % cols;
        for (int64_t c = 0; c < n; c += TT__LANES) {
            const tt__vf U = TT__K(load_n)(g + c, n - c) * factor * TT__K(load_n)(of_column + c, n - c);
            TT__K(store_n)(at + c, TT__K(load_n)(at + c, n - c) * keep - U * step, n - c);
        }
    }
    TT__K(chunk_out)(l, &l->out[0], from, to - from, p, 0);
}

/* Computes the running means, then the root mean squares of the update and of the parameter, then the
   parameter. torch.optim.Adafactor has this order, too. */
TT__FN tt_status TT__K(run_ADAFACTOR)(const tt__launch *l)
{
    const int64_t rows = l->in[0].rows, cols = l->in[0].cols, n = rows * cols;
    const tt__adafactor_space s = tt__adafactor_space_of(rows, cols);
    const float *means = (const float *)l->out[1].data;
    tt__adafactor_numbers *of = (tt__adafactor_numbers *)l->workspace;
    const double *squares = (const double *)(void *)tt__workspace_at(l, s.squares);
    double mean = 0, updates = 0, params = 0;
    if (!isfinite(((const tt__clipped *)l->in[1].data)->norm)) return TT_OK;
    of->weight = (float)tt__pow((double)TT__RUN_OF(l)->step + 1, TT__ADAFACTOR_POWER);
    tt__for_chunks(l, rows, TT__CHUNK, s.part, s.end, TT__K(adafactor_square_rows));
    tt__for_chunks(l, cols, TT__CHUNK, TT__CHUNK, s.end, TT__K(adafactor_square_columns));
    for (int64_t r = 0; r < rows && means; r++) mean += (double)means[r];
    of->mean = (float)(mean / (double)rows);
    tt__for_chunks(l, n, TT__CHUNK, TT__CHUNK, s.end, TT__K(adafactor_squares));
    for (int64_t k = 0; k * TT__CHUNK < n; k++) {
        updates += squares[2 * k];
        params += squares[2 * k + 1];
    }
    const double lr = (double)TT__RUN_OF(l)->lr * (double)tt__lr_factor(&l->instr->attr);
    of->step = (float)(lr * fmax(TT__ADAFACTOR_LEAST, sqrt(params / (double)n)) /
                       fmax(1, sqrt(updates / (double)n)));
    return tt__for_chunks(l, n, TT__CHUNK, TT__CHUNK, s.end, TT__K(adafactor_rows));
}

TT__RUN_MAP_OF(UNIT, 0, 1, const float norm = fmaxf(sqrtf(*(const float *)l->in[1].data), 1e-7f);
    TT__K(axpby)(y, 1 / norm, x[0], 0, NULL, n))

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
