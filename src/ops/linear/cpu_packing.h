#pragma once
#include "../../base/base.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "../../cpu/halves.h"
#include "../../cpu/rows.h"

/* ------------------------------------------------------------------------------------------- matrix product
   One function, gemm, computes products of every transposition and dtype. Blocks of A and B are packed into
   panels, [k][MR] and [k][NR], of fp32 or pairs of bf16, so that the microkernel reads both in sequence (for
   AMX, A is packed as tiles or read in place). Tiles of C are then divided among tasks. A single task
   computes an element of C, and the blocks of its sum depend on k alone, so the bits of C depend neither on
   the tiles nor on the number of threads. */

/* Heights in rows (MR) and widths in vectors (NV) of the microkernels, for panels and for attention's blocks.
   The accumulators, one row of B and a broadcast element of A fill the 32 (AVX-512, NEON) or 16 registers.
   With AVX-512, blocks of 8 x 48 need fewer loads than 12 x 32 and are 7% faster on Granite Rapids. */
#if TT__LANES == 16
#define TT__GEMM_MR 8
#define TT__GEMM_NV 3
#define TT__ATTENTION_MR 6
#define TT__ATTENTION_NV 4
#elif defined(TT__NEON)
#define TT__GEMM_MR 12
#define TT__GEMM_NV 2
#define TT__ATTENTION_MR 8
#define TT__ATTENTION_NV 2
#else
#define TT__GEMM_MR (TT__LANES == 8 ? 6 : 4)
#define TT__GEMM_NV 2
#define TT__ATTENTION_MR 6
#define TT__ATTENTION_NV 2
#endif
#define TT__GEMM_NR (TT__GEMM_NV * TT__LANES)
#define TT__GEMM_WIDEST (TT__GEMM_MR > TT__GEMM_NR ? TT__GEMM_MR : TT__GEMM_NR) /* max rows of A, or columns
                                                                                   of B, in a panel */
#define TT__GEMM_TILES 32 /* four tiles hold 32 x 32 numbers of C */

/* Reads n numbers, beginning with element `at`, as floats. Rounds f32 numbers to dtype `narrow`, unless
   `narrow` is TT_F32. */
TT__FN void TT__K(gemm_read)(float *to, const void *from, tt_dtype dtype, tt_dtype narrow, int64_t at,
                             int64_t n)
{
    uint16_t half[64];
    if (dtype != TT_F32) {
        TT__K(row_widen)(to, (const uint16_t *)from + at, dtype, n);
    } else if (narrow == TT_F32) {
        memcpy(to, (const float *)from + at, (size_t)n * 4);
    } else for (int64_t c = 0, some; c < n; c += some) {
        some = tt__min(TT__COUNT(half), n - c);
        TT__K(row_narrow)(half, (const float *)from + at + c, narrow, some);
        TT__K(row_widen)(to + c, half, narrow, some);
    }
}

/* Writes n pairs of bf16, each in the place of a float: even[i] in the lower half, odd[i] in the upper half.
   If `odd` is NULL, the upper halves are 0. */
TT__FN void TT__K(gemm_interleave)(float *to, const uint16_t *even, const uint16_t *odd, int64_t n)
{
    int64_t i = 0;
    for (; i + TT__LANES <= n && odd; i += TT__LANES) {
        tt__vu pair = TT__K(load_h)(even + i) | TT__K(load_h)(odd + i) << 16;
        memcpy(to + i, &pair, sizeof pair);
    }
    for (; i < n; i++) {
        uint32_t pair = even[i] | (uint32_t)(odd ? odd[i] : 0) << 16;
        memcpy(to + i, &pair, sizeof pair);
    }
}

/* ---- packing ---- */

/* These macros work within each four lanes. LOW interleaves the first two lanes of a with the first two
   lanes of b, and HIGH interleaves the last two lanes of a and b. FIRST concatenates the first two lanes of
   a and b, and LAST concatenates the last two. */
#if TT__LANES == 16 /* these instructions have masks of ones because g++ 12 warns about the plain forms */
#define TT__LOW(a, b) (tt__vf)_mm512_maskz_unpacklo_ps(0xffff, (__m512)(a), (__m512)(b))
#define TT__HIGH(a, b) (tt__vf)_mm512_maskz_unpackhi_ps(0xffff, (__m512)(a), (__m512)(b))
#define TT__FIRST(a, b) (tt__vf)_mm512_maskz_shuffle_ps(0xffff, (__m512)(a), (__m512)(b), 0x44)
#define TT__LAST(a, b) (tt__vf)_mm512_maskz_shuffle_ps(0xffff, (__m512)(a), (__m512)(b), 0xee)
#define TT__QUARTERS(a, b, which) (tt__vf)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)(a), (__m512)(b), which)
#elif TT__LANES == 8
#define TT__LOW(a, b) (tt__vf)_mm256_unpacklo_ps((__m256)(a), (__m256)(b))
#define TT__HIGH(a, b) (tt__vf)_mm256_unpackhi_ps((__m256)(a), (__m256)(b))
#define TT__FIRST(a, b) (tt__vf)_mm256_shuffle_ps((__m256)(a), (__m256)(b), 0x44)
#define TT__LAST(a, b) (tt__vf)_mm256_shuffle_ps((__m256)(a), (__m256)(b), 0xee)
#define TT__HALVES(a, b, which) (tt__vf)_mm256_permute2f128_ps((__m256)(a), (__m256)(b), which)
#else
#define TT__LOW(a, b) TT__SHUFFLE(a, b, 0, 4, 1, 5)
#define TT__HIGH(a, b) TT__SHUFFLE(a, b, 2, 6, 3, 7)
#define TT__FIRST(a, b) TT__SHUFFLE(a, b, 0, 1, 4, 5)
#define TT__LAST(a, b) TT__SHUFFLE(a, b, 2, 3, 6, 7)
#endif

/* Transposes within each four lanes of four vectors: lane j of vector i becomes lane i of vector j. */
TT__INLINE void TT__K(transpose_quads)(tt__vf r[4])
{
    tt__vf a = TT__LOW(r[0], r[1]), b = TT__HIGH(r[0], r[1]), c = TT__LOW(r[2], r[3]),
           d = TT__HIGH(r[2], r[3]);
    r[0] = TT__FIRST(a, c);
    r[1] = TT__LAST(a, c);
    r[2] = TT__FIRST(b, d);
    r[3] = TT__LAST(b, d);
}

/* Transposes TT__LANES vectors: lane j of vector i becomes lane i of vector j. */
TT__INLINE void TT__K(transpose)(tt__vf r[TT__LANES])
{
    TT__UNROLL(4)
    for (int i = 0; i < TT__LANES; i += 4) TT__K(transpose_quads)(r + i);
#if TT__LANES == 16
    tt__vf t[16];
    TT__EACH(i, 4) {
        t[i] = TT__QUARTERS(r[i], r[4 + i], 0x88);
        t[4 + i] = TT__QUARTERS(r[i], r[4 + i], 0xdd);
        t[8 + i] = TT__QUARTERS(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = TT__QUARTERS(r[8 + i], r[12 + i], 0xdd);
    }
    TT__EACH(i, 4) {
        r[i] = TT__QUARTERS(t[i], t[8 + i], 0x88);
        r[8 + i] = TT__QUARTERS(t[i], t[8 + i], 0xdd);
        r[4 + i] = TT__QUARTERS(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = TT__QUARTERS(t[4 + i], t[12 + i], 0xdd);
    }
#elif TT__LANES == 8
    TT__EACH(i, 4) {
        tt__vf a = r[i], b = r[4 + i];
        r[i] = TT__HALVES(a, b, 0x20);
        r[4 + i] = TT__HALVES(a, b, 0x31);
    }
#endif
}
#undef TT__LOW
#undef TT__HIGH
#undef TT__FIRST
#undef TT__LAST
#undef TT__QUARTERS
#undef TT__HALVES

/* An operand seen as lines of k elements. The lines are the rows of A or the columns of B; element k of a
   line is at `line * line_step + k * k_step`. Panels hold units: floats or, for dot products and tiles,
   pairs of bf16. The functions below count k in units. */
typedef struct TT__K(gemm_operand) {
    const void *data;
    tt_dtype dtype, narrow; /* narrow: dtype to which f32 elements are rounded; TT_F32: not rounded */
    bool pairs;
    int64_t lines, line_step, k_step, elements; /* elements: number of elements of a line */
} TT__K(gemm_operand);

/* Reads n units of a line, beginning with unit k, of an operand with k_step 1. */
TT__INLINE void TT__K(gemm_line)(float *to, const TT__K(gemm_operand) *x, int64_t line, int64_t k, int64_t n)
{
    if (!x->pairs) { TT__K(gemm_read)(to, x->data, x->dtype, x->narrow, line * x->line_step + k, n); return; }
    int64_t present = tt__min(2 * n, x->elements - 2 * k);
    if (present < 2 * n) memset(to + present / 2, 0, (size_t)(n - present / 2) * sizeof *to);
    if (x->dtype == TT_F32)
        TT__K(row_narrow)(to, (const float *)x->data + line * x->line_step + 2 * k, x->narrow, present);
    else memcpy(to, (const uint16_t *)x->data + line * x->line_step + 2 * k, (size_t)present * 2);
}

#define TT__GEMM_CHUNK 32    /* units of a line that are widened or transposed at a time                 */
#define TT__GEMM_STRAIGHT 96 /* lines that are copied at a time if line_step is 1: whole panels          */

/* Reads unit k of n lines (at most TT__GEMM_STRAIGHT) of an operand with line_step 1. */
TT__INLINE void TT__K(gemm_column)(float *to, const TT__K(gemm_operand) *x, int64_t line, int64_t k,
                                   int64_t n)
{
    uint16_t half[2][TT__GEMM_STRAIGHT];
    int64_t at = 2 * k * x->k_step + line;
    bool odd = 2 * k + 1 < x->elements;
    if (!x->pairs) { TT__K(gemm_read)(to, x->data, x->dtype, x->narrow, k * x->k_step + line, n); return; }
    if (2 * k >= x->elements) { memset(to, 0, (size_t)n * sizeof *to); return; }
    if (x->dtype == TT_F32) {
        for (int r = 0; r <= odd; r++)
            TT__K(row_narrow)(half[r], (const float *)x->data + at + r * x->k_step, x->narrow, n);
        TT__K(gemm_interleave)(to, half[0], odd ? half[1] : NULL, n);
    } else {
        const uint16_t *even = (const uint16_t *)x->data + at;
        TT__K(gemm_interleave)(to, even, odd ? even + x->k_step : NULL, n);
    }
}

/* Packs `lines` lines of an operand with k_step 1, beginning with number `line`. Of each line, packs k
   units, beginning with unit k0. Writes panels [k][width] that begin `panel` floats apart; lines missing
   from the last panel become 0. If a vector is several panels wide, one transposition packs several times
   TT__LANES units. */
TT__INLINE void TT__K(gemm_pack_transposed)(float *to, int64_t panel, const int width,
                                            const TT__K(gemm_operand) *x, int64_t line, int64_t lines,
                                            int64_t k0, int64_t k)
{
    enum { L = TT__LANES };
    const int parts = width < L && L % width == 0 ? L / width : 1;
    float copy[TT__GEMM_WIDEST * TT__GEMM_CHUNK]; /* holds copies of lines that are incomplete or are not
                                                     float */
    for (int64_t done = 0; done < lines; done += width, to += panel) {
        int64_t present = tt__min(width, lines - done);
        for (int64_t kk = 0; kk < k; kk += TT__GEMM_CHUNK) {
            int64_t some = tt__min(TT__GEMM_CHUNK, k - kk), step = x->line_step;
            bool whole = present == width && some == TT__GEMM_CHUNK;
            const float *from = copy;
            if (whole && x->dtype == TT_F32 && x->narrow == TT_F32) {
                from = (const float *)x->data + (line + done) * step + k0 + kk;
            } else if (whole && x->pairs && x->dtype == TT_BF16 && step % 2 == 0
                       && 2 * (k0 + kk + some) <= x->elements) {
                step /= 2;
                from = (const float *)x->data + (line + done) * step + k0 + kk;
            } else {
                if (!whole) memset(copy, 0, sizeof copy);
                step = TT__GEMM_CHUNK;
                for (int64_t i = 0; i < present; i++)
                    TT__K(gemm_line)(copy + i * step, x, line + done + i, k0 + kk, some);
            }
            TT__UNROLL(4)
            for (int first = 0; first < width; first += L) {
                const int used = parts > 1 ? L : width - first < L ? width - first : L;
                for (int64_t t = 0; t < some; t += parts * L) {
                    tt__vf r[L];
                    TT__EACH(i, L)
                        r[i] = i < used ? TT__K(load)(from + (first + i % width) * step + t + i / width * L)
                               : TT__K(zero)();
                    TT__K(transpose)(r);
                    if (t + parts * L <= some) {
                        TT__EACH(i, L) {
                            TT__EACH(part, parts)
                                memcpy(to + (kk + t + part * L + i) * width + first,
                                       (const float *)&r[i] + part * width, (size_t)(used / parts) * 4);
                        }
                    } else {
                        for (int i = 0; i < parts * L && t + i < some; i++)
                            memcpy(to + (kk + t + i) * width + first,
                                   (const float *)&r[i % L] + i / L * width, (size_t)(used / parts) * 4);
                    }
                }
            }
        }
    }
}

/* Packs the panels of gemm_pack_transposed from an operand with line_step 1, whose lines are side by side. A
   panel is a number of whole vectors wide, or narrower than a vector. The vector stored to a narrower panel
   spills into the place of the next k, which is written later; only the last k is stored without a spill. */
TT__INLINE void TT__K(gemm_pack_straight)(float *to, int64_t panel, const int width,
                                          const TT__K(gemm_operand) *x, int64_t line, int64_t lines,
                                          int64_t k0, int64_t k)
{
    float copy[TT__GEMM_STRAIGHT + TT__LANES];
    memset(copy, 0, sizeof copy);
    for (int64_t kk = 0; kk < k; kk++) {
        for (int64_t strip = 0; strip < lines; strip += TT__GEMM_STRAIGHT) {
            int64_t some = tt__min(TT__GEMM_STRAIGHT, lines - strip);
            /* number of lines beyond the last panel that are read because loads are whole vectors */
            const int spill = (width + TT__LANES - 1) / TT__LANES * TT__LANES - width;
            bool copied = x->dtype != TT_F32 || x->narrow != TT_F32 || some % width
                || line + strip + some + spill > x->lines;
            const float *from = copy;
            float *out = to + strip / width * panel + kk * width;
            if (copied) TT__K(gemm_column)(copy, x, line + strip, k0 + kk, some);
            else from = (const float *)x->data + (k0 + kk) * x->k_step + line + strip;
            if (copied && some % width) memset(copy + some, 0, (size_t)(width - some % width) * sizeof *copy);
            for (int64_t done = 0; done < some; done += width, from += width, out += panel) {
                TT__UNROLL(4)
                for (int first = 0; first < width; first += TT__LANES) {
                    tt__vf v = TT__K(load)(from + first);
                    if (width - first >= TT__LANES || kk < k - 1) TT__K(store)(out + first, v);
                    else TT__K(store_n)(out + first, v, width - first);
                }
            }
        }
    }
}

#if defined(TT__DOT) && TT__DOT_DEPTH == 4
/* Turns panels [k][width] into [k / 2][width][2], with each two units of a line side by side; k is even. */
TT__INLINE void TT__K(gemm_regroup)(float *panels, int64_t panel, const int width, int64_t lines, int64_t k)
{
    for (float *end = panels + tt__ceil_div(lines, width) * panel; panels < end; panels += panel) {
        for (float *pair = panels; pair < panels + width * k; pair += 2 * width) {
            float32x4x2_t both[TT__GEMM_WIDEST / 4];
            TT__EACH(v, width / 4) {
                both[v].val[0] = vld1q_f32(pair + 4 * v);
                both[v].val[1] = vld1q_f32(pair + width + 4 * v);
            }
            TT__EACH(v, width / 4) vst2q_f32(pair + 8 * v, both[v]);
        }
    }
}
#endif

#ifdef TT__TILES
/* Packs lines of A for tiles: panels [k / 16][32][16] of units, with 32 lines each. Leaves the places of
   lines that do not exist as they are. */
TT__FN void TT__K(gemm_pack_tiles)(float *to, const TT__K(gemm_operand) *x, int64_t line, int64_t lines,
                                   int64_t k0, int64_t k)
{
    for (int64_t kk = 0; kk < k; kk += 16) {
        for (int64_t done = 0; done < lines; done += 32) {
            int64_t present = tt__min(32, lines - done);
            float *tile = to + done * k + kk * 32;
            if (x->k_step == 1) {
                for (int64_t i = 0; i < present; i++)
                    TT__K(gemm_line)(tile + i * 16, x, line + done + i, k0 + kk, 16);
                continue;
            }
            tt__vf r[16];
            float units[16][32];
            for (int64_t t = 0; t < 16; t++)
                TT__K(gemm_column)(units[t], x, line + done, k0 + kk + t, present);
            for (int half = 0; half < (present > 16 ? 2 : 1); half++) {
                TT__EACH(t, 16) r[t] = TT__K(load)(units[t] + 16 * half);
                TT__K(transpose)(r);
                TT__EACH(t, 16) TT__K(store)(tile + (16 * half + t) * 16, r[t]);
            }
        }
    }
}
#endif

TT__FN void TT__K(gemm_pack)(float *to, int64_t panel, int width, const TT__K(gemm_operand) *x, int64_t line,
                             int64_t lines, int64_t k0, int64_t k)
{
    const bool straight = x->k_step != 1;
    if (width == TT__GEMM_MR && straight)
        TT__K(gemm_pack_straight)(to, panel, TT__GEMM_MR, x, line, lines, k0, k);
    else if (width == TT__GEMM_MR) TT__K(gemm_pack_transposed)(to, panel, TT__GEMM_MR, x, line, lines, k0, k);
    else if (width == TT__GEMM_NR && straight)
        TT__K(gemm_pack_straight)(to, panel, TT__GEMM_NR, x, line, lines, k0, k);
    else if (width == TT__GEMM_NR) TT__K(gemm_pack_transposed)(to, panel, TT__GEMM_NR, x, line, lines, k0, k);
#ifdef TT__TILES
    else if (straight) TT__K(gemm_pack_straight)(to, panel, TT__GEMM_TILES, x, line, lines, k0, k);
    else TT__K(gemm_pack_transposed)(to, panel, TT__GEMM_TILES, x, line, lines, k0, k);
#endif
#if defined(TT__DOT) && TT__DOT_DEPTH == 4
    if (x->pairs && width == TT__GEMM_MR) TT__K(gemm_regroup)(to, panel, TT__GEMM_MR, lines, k);
    else if (x->pairs) TT__K(gemm_regroup)(to, panel, TT__GEMM_NR, lines, k);
#endif
}
