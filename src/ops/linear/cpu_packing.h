#pragma once
#include "../../base/base.h"
#include "../../base/codes.h"
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

/* ---- coded matrices (src/backend/launch.h) ---- */

#define TT__CODED_MOST 512 /* max elements of a coded matrix that are converted at a time */
#define TT__CODED_SCALES (TT__CODED_MOST / TT__INT4_GROUP + 1) /* max blocks that these elements lie in */

/* Returns TT__LANES codes of 4 bits, which begin at a whole byte. Only the lowest 4 bits of a lane are the
   code. */
TT__INLINE tt__vu TT__K(load_codes)(const uint8_t *codes)
{
#if TT__LANES == 4
    static const uint32_t shift[4] = {4, 0, 12, 8};
    uint16_t word;
#else
    static const uint32_t shift[16] = {4, 0, 12, 8, 20, 16, 28, 24, 4, 0, 12, 8, 20, 16, 28, 24};
    uint32_t word;
#endif
    tt__vu by;
    memcpy(&by, shift, sizeof by);
    memcpy(&word, codes, sizeof word);
#if TT__LANES == 16
    uint32_t next;
    memcpy(&next, codes + 4, sizeof next);
    const tt__vu words = {word, word, word, word, word, word, word, word,
                          next, next, next, next, next, next, next, next};
    return words >> by;
#else
    return TT__K(splat_u)(word) >> by;
#endif
}

/* Returns numbers of a table of 16. code: index of the number in the lane's lowest 4 bits. */
TT__INLINE tt__vf TT__K(look_up)(const tt__vf table[16 / TT__LANES], tt__vu code)
{
#if TT__LANES == 16
    return (tt__vf)_mm512_maskz_permutexvar_ps((__mmask16)-1, (__m512i)code, (__m512)table[0]);
#elif TT__LANES == 8
    const __m256 low = _mm256_permutevar8x32_ps((__m256)table[0], (__m256i)code);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)table[1], (__m256i)code);
    return (tt__vf)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32((__m256i)code, 28));
#elif defined(TT__NEON) /* bytes 4 * code to 4 * code + 3 of the table */
    const uint8x16x4_t bytes = {{(uint8x16_t)table[0], (uint8x16_t)table[1], (uint8x16_t)table[2],
                                 (uint8x16_t)table[3]}};
    const tt__vu at = (code & 15) * 0x04040404u + 0x03020100u;
    return (tt__vf)vqtbl4q_u8(bytes, (uint8x16_t)at);
#else
    float numbers[16];
    tt__vf v = TT__K(zero)();
    memcpy(numbers, table, sizeof numbers);
    TT__EACH(i, TT__LANES) v[i] = numbers[code[i] & 15];
    return v;
#endif
}

/* Returns TT__LANES codes of 8 bits, beginning at `codes`, as floats. */
TT__INLINE tt__vf TT__K(load_int8)(const uint8_t *codes)
{
#if TT__LANES == 8
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)codes);
    return (tt__vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    int8_t byte[TT__LANES];
    tt__vi v = (tt__vi)TT__K(zero)();
    memcpy(byte, codes, sizeof byte);
    TT__EACH(i, TT__LANES) v[i] = byte[i];
    return __builtin_convertvector(v, tt__vf);
#endif
}

/* Computes the scales of n blocks that are `step` blocks apart, beginning with number `block`, as
   tt__code_scale does; n <= TT__CODED_SCALES. Each instruction set has this function, because calls between
   code with and without AVX are slow. */
TT__INLINE void TT__K(code_scales)(float *to, const tt__codes *c, int64_t block, int64_t step, int64_t n)
{
    uint16_t half[TT__CODED_SCALES];
    if (c->dtype == TT__INT4) {
        for (int64_t k = 0; k < n; k++) memcpy(half + k, c->scales + (block + k * step) * 2, sizeof *half);
        TT__K(row_widen)(to, half, TT_F16, n);
    } else if (c->dtype == TT__NF4) {
        for (int64_t k = 0; k < n; k++) to[k] = tt__nf4_scale(c, block + k * step);
    } else for (int64_t k = 0; k < n; k++) {
        memcpy(to + k, c->scales + (block + k * step) * 4, sizeof *to);
        to[k] /= 127;
    }
}

/* A coded matrix, and its table of 16 numbers in vectors. AVX2 looks up bytes: number[p] has byte p of the 16
   numbers, in both halves of a vector. */
typedef struct TT__K(decoder) {
    const tt__codes *c;
#if TT__LANES == 8
    __m256i number[4];
#else
    tt__vf number[16 / TT__LANES];
#endif
} TT__K(decoder);

TT__INLINE TT__K(decoder) TT__K(decoder_of)(const tt__codes *c)
{
    TT__K(decoder) d;
    d.c = c;
#if TT__LANES == 8
    TT__EACH(p, 4) {
        const __m128i *from = (const __m128i *)(const void *)c->bytes[p];
        d.number[p] = _mm256_broadcastsi128_si256(_mm_loadu_si128(from));
    }
#else
    TT__EACH(i, 16 / TT__LANES)
        d.number[i] = c->numbers ? TT__K(load)(c->numbers + i * TT__LANES) : TT__K(zero)();
#endif
    return d;
}

#if TT__LANES == 8
/* Looks up the numbers of 32 codes of 4 bits, which are bytes: one byte of all numbers at a time. Two
   interleavings put the four bytes of a number side by side; they work within the halves of a vector, so that
   to[i] has the numbers of bytes 4 i to 4 i + 3 of both halves. This takes fewer instructions than look-ups
   among eight floats. */
TT__INLINE void TT__K(look_up_32)(tt__vf to[4], const TT__K(decoder) *d, __m256i code)
{
    const __m256i b0 = _mm256_shuffle_epi8(d->number[0], code), b1 = _mm256_shuffle_epi8(d->number[1], code),
                  b2 = _mm256_shuffle_epi8(d->number[2], code), b3 = _mm256_shuffle_epi8(d->number[3], code);
    const __m256i low0 = _mm256_unpacklo_epi8(b0, b1), low1 = _mm256_unpackhi_epi8(b0, b1),
                  high0 = _mm256_unpacklo_epi8(b2, b3), high1 = _mm256_unpackhi_epi8(b2, b3);
    to[0] = (tt__vf)_mm256_unpacklo_epi16(low0, high0);
    to[1] = (tt__vf)_mm256_unpackhi_epi16(low0, high0);
    to[2] = (tt__vf)_mm256_unpacklo_epi16(low1, high1);
    to[3] = (tt__vf)_mm256_unpackhi_epi16(low1, high1);
}
#endif

/* Converts 32 codes to floats that are not multiplied by a scale yet. Codes of 4 bits begin at a whole byte.
   bytes: whether a code has 8 bits. */
TT__INLINE void TT__K(decode_32)(tt__vf to[32 / TT__LANES], const TT__K(decoder) *d, const uint8_t *codes,
                                 const bool bytes)
{
    if (bytes) {
        TT__EACH(i, 32 / TT__LANES) to[i] = TT__K(load_int8)(codes + i * TT__LANES);
        return;
    }
#if TT__LANES == 8
    /* The lower half of a vector gets codes 0 to 3, 8 to 11, 16 to 19 and 24 to 27. */
    const __m256i order = _mm256_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13,
                                           2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15);
    const __m128i packed = _mm_loadu_si128((const __m128i *)(const void *)codes);
    const __m256i twice = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(packed), order);
    TT__K(look_up_32)(to, d, _mm256_or_si256(
        _mm256_and_si256(_mm256_srli_epi16(twice, 4), _mm256_set1_epi16(0x000f)),
        _mm256_and_si256(twice, _mm256_set1_epi16(0x0f00))));
#else
    TT__EACH(i, 32 / TT__LANES)
        to[i] = TT__K(look_up)(d->number, TT__K(load_codes)(codes + i * TT__LANES / 2));
#endif
}

/* Converts the codes in the lanes of a vector to floats that are not multiplied by a scale yet: to[i] gets
   code i of each lane, which has 4 codes of 8 bits or 8 codes of 4 bits. */
TT__INLINE void TT__K(decode_lanes)(tt__vf *to, const TT__K(decoder) *d, tt__vu codes, const bool bytes)
{
    if (bytes) {
        TT__EACH(i, 4) {
            const tt__vi code = (tt__vi)(codes << (24 - 8 * i)) >> 24;
            to[i] = __builtin_convertvector(code, tt__vf);
        }
        return;
    }
#if TT__LANES == 8
    const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
                                           0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i pairs = _mm256_shuffle_epi8((__m256i)codes, order), low = _mm256_set1_epi8(15);
    tt__vf half[4];
    TT__UNROLL(2)
    for (int odd = 0; odd < 2; odd++) {
        TT__K(look_up_32)(half, d, _mm256_and_si256(odd ? pairs : _mm256_srli_epi16(pairs, 4), low));
        TT__EACH(i, 4) to[2 * i + odd] = half[i];
    }
#else
    TT__EACH(i, 8) to[i] = TT__K(look_up)(d->number, codes >> 4 * (i ^ 1));
#endif
}

/* Converts n <= TT__CODED_MOST elements of a row of a coded matrix to floats, beginning with element `at`.
   bytes: whether a code has 8 bits; then the row has a single scale. Otherwise `at` is a multiple of
   TT__LANES, so that the elements of a vector have one scale. */
TT__INLINE void TT__K(decode_row)(float *to, const TT__K(decoder) *d, int64_t at, int64_t n, const bool bytes)
{
    const tt__codes *c = d->c;
    const uint8_t *codes = c->codes + (bytes ? at : at / 2);
    const int64_t first = tt__block_at(c, at), last = bytes ? first : tt__block_at(c, at + n - 1);
    const int shift = bytes ? 16 : c->shift;
    const int64_t skipped = bytes ? 0 : at - first * c->block; /* elements from the block's first to `at` */
    float scale[TT__CODED_SCALES];
    tt__vf v[32 / TT__LANES];
    int64_t k = 0;
    TT__K(code_scales)(scale, c, first, 1, last - first + 1);
    for (; k + 32 <= n; k += 32) {
        TT__K(decode_32)(v, d, codes + (bytes ? k : k / 2), bytes);
        TT__EACH(i, 32 / TT__LANES)
            TT__K(store)(to + k + i * TT__LANES, v[i] * scale[(skipped + k + i * TT__LANES) >> shift]);
    }
    if (k == n) return;
    uint8_t rest[32] = {0};
    memcpy(rest, codes + (bytes ? k : k / 2), (size_t)(bytes ? n - k : (n - k + 1) / 2));
    TT__K(decode_32)(v, d, rest, bytes);
    TT__EACH(i, 32 / TT__LANES) {
        const int64_t done = k + i * TT__LANES;
        if (done < n) TT__K(store_n)(to + done, v[i] * scale[(skipped + done) >> shift], n - done);
    }
}

/* Rounds n floats to dtype `narrow`, unless `narrow` is TT_F32. */
TT__INLINE void TT__K(gemm_round)(float *x, tt_dtype narrow, int64_t n)
{
    uint16_t half[64];
    for (int64_t some, r = 0; r < n && narrow != TT_F32; r += some) {
        some = tt__min(TT__COUNT(half), n - r);
        TT__K(row_narrow)(half, x + r, narrow, some);
        TT__K(row_widen)(x + r, half, narrow, some);
    }
}

/* Converts elements of a coded matrix to floats, as decode_row does; the elements of a matrix with one column
   may lie in several rows. Rounds the floats to dtype `narrow`, unless `narrow` is TT_F32. Prefetches the n
   elements that begin `ahead` elements later. */
TT__OUTLINE void TT__K(gemm_decode)(float *to, const tt__codes *c, tt_dtype narrow, int64_t at, int64_t n,
                                    int64_t ahead)
{
    const TT__K(decoder) d = TT__K(decoder_of)(c);
    if (c->block == 1) {
        tt__widen_codes(to, c, at, n);
    } else if (c->numbers) {
        for (int64_t k = 0; k < n; k += 128) __builtin_prefetch(c->codes + (at + ahead + k) / 2);
        TT__K(decode_row)(to, &d, at, n, false);
    } else {
        for (int64_t k = 0; k < n; k += 64) __builtin_prefetch(c->codes + at + ahead + k);
        TT__K(decode_row)(to, &d, at, n, true);
    }
    TT__K(gemm_round)(to, narrow, n);
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
    tt__codes codes; /* of a coded matrix; then `data` is not read */
} TT__K(gemm_operand);

#define TT__GEMM_CHUNK 128   /* units of a line that are widened or transposed at a time                 */
#define TT__GEMM_STRAIGHT 96 /* lines that are copied at a time if line_step is 1: whole panels          */

/* Reads n units of a line (at most TT__GEMM_CHUNK), beginning with unit k, of an operand with k_step 1. */
TT__INLINE void TT__K(gemm_line)(float *to, const TT__K(gemm_operand) *x, int64_t line, int64_t k, int64_t n,
                               int64_t ahead)
{
    if (!x->pairs) { TT__K(gemm_read)(to, x->data, x->dtype, x->narrow, line * x->line_step + k, n); return; }
    int64_t present = tt__min(2 * n, x->elements - 2 * k);
    if (present < 2 * n) memset(to + present / 2, 0, (size_t)(n - present / 2) * sizeof *to);
    if (tt__is_coded(x->dtype)) {
        float wide[2 * TT__GEMM_CHUNK];
        TT__K(gemm_decode)(wide, &x->codes, TT_F32, line * x->line_step + 2 * k, present,
                           ahead * x->line_step);
        TT__K(row_narrow)(to, wide, x->narrow, present);
    } else if (x->dtype == TT_F32)
        TT__K(row_narrow)(to, (const float *)x->data + line * x->line_step + 2 * k, x->narrow, present);
    else memcpy(to, (const uint16_t *)x->data + line * x->line_step + 2 * k, (size_t)present * 2);
}

/* Reads unit k of n lines (at most TT__GEMM_STRAIGHT) of an operand with line_step 1. */
TT__INLINE void TT__K(gemm_column)(float *to, const TT__K(gemm_operand) *x, int64_t line, int64_t k,
                                   int64_t n)
{
    uint16_t half[2][TT__GEMM_STRAIGHT];
    int64_t at = 2 * k * x->k_step + line;
    bool odd = 2 * k + 1 < x->elements;
    if (!x->pairs) { TT__K(gemm_read)(to, x->data, x->dtype, x->narrow, k * x->k_step + line, n); return; }
    if (2 * k >= x->elements) { memset(to, 0, (size_t)n * sizeof *to); return; }
    if (tt__is_coded(x->dtype)) {
        float wide[TT__GEMM_STRAIGHT];
        for (int r = 0; r <= odd; r++) {
            TT__K(gemm_decode)(wide, &x->codes, TT_F32, at + r * x->k_step, n, 4 * x->k_step);
            TT__K(row_narrow)(half[r], wide, x->narrow, n);
        }
        TT__K(gemm_interleave)(to, half[0], odd ? half[1] : NULL, n);
    } else if (x->dtype == TT_F32) {
        for (int r = 0; r <= odd; r++)
            TT__K(row_narrow)(half[r], (const float *)x->data + at + r * x->k_step, x->narrow, n);
        TT__K(gemm_interleave)(to, half[0], odd ? half[1] : NULL, n);
    } else {
        const uint16_t *even = (const uint16_t *)x->data + at;
        TT__K(gemm_interleave)(to, even, odd ? even + x->k_step : NULL, n);
    }
}

/* Packs `lines` lines of an operand with k_step 1, beginning with number `line`. Packs k units of
   each line, beginning with unit k0. Writes panels [k][width] that begin `panel` floats apart; lines missing
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
                    TT__K(gemm_line)(copy + i * step, x, line + done + i, k0 + kk, some, width);
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

/* Packs the panels of gemm_pack_transposed, TT__GEMM_NR wide, from a coded matrix. Four bytes of a line,
   which hold several codes, are transposed as if they were a float, and then converted: this moves fewer
   bytes than a transposition of floats. */
TT__INLINE void TT__K(gemm_pack_codes)(float *to, int64_t panel, const TT__K(gemm_operand) *x, int64_t line,
                                       int64_t lines, int64_t k0, int64_t k, const bool bytes)
{
    enum { L = TT__LANES, NR = TT__GEMM_NR };
    const TT__K(decoder) d = TT__K(decoder_of)(&x->codes);
    const int each = bytes ? 4 : 8, shift = bytes ? 62 : x->codes.shift; /* each: elements in 4 bytes */
    const int64_t blocks = x->line_step / x->codes.block, end = k0 + k; /* blocks: of a line */
    float scale[8 * L / TT__INT4_GROUP][L];
    for (int64_t done = 0; done < tt__ceil_div(lines, NR) * NR; done += L) {
        const int64_t present = tt__max(0, tt__min(L, lines - done)), first = line + done;
        float *out = to + done / NR * panel + done % NR;
        memset(scale, 0, sizeof scale);
        if (bytes) TT__K(code_scales)(scale[0], &x->codes, first, 1, present);
        for (int64_t at = k0 / (each * L) * each * L; at < end; at += each * L) {
            const int64_t some = tt__min(4 * L, (x->elements - at) * 4 / each), block = at >> shift;
            const uint8_t *codes = x->codes.codes + (first * x->line_step + at) * 4 / each;
            tt__vf r[L];
            if (some < 4 * L || present < L) memset(r, 0, sizeof r);
            for (int64_t i = 0; i < present; i++) {
                const uint8_t *from = codes + i * x->line_step * 4 / each;
                if (some == 4 * L) memcpy(r + i, from, sizeof *r);
                else memcpy(r + i, from, (size_t)some);
                __builtin_prefetch(from + L * x->line_step * 4 / each);
            }
            TT__K(transpose)(r);
            for (int64_t b = block; !bytes && b <= (tt__min(at + each * L, end) - 1) >> shift; b++)
                TT__K(code_scales)(scale[b - block], &x->codes, first * blocks + b, blocks, present);
            for (int j = 0; j < L; j++) {
                const int64_t unit = at + each * j;
                tt__vf v[8];
                if (unit < k0 || unit >= end) continue;
                const tt__vf by = TT__K(load)(scale[(unit >> shift) - block]);
                TT__K(decode_lanes)(v, &d, (tt__vu)r[j], bytes);
                if (unit + each <= end) {
                    TT__EACH(e, each) TT__K(store)(out + (unit - k0 + e) * NR, v[e] * by);
                } else for (int e = 0; e < end - unit; e++) {
                    TT__K(store)(out + (unit - k0 + e) * NR, v[e] * by);
                }
            }
        }
    }
}

/* Packs the panels of gemm_pack_straight, TT__GEMM_NR wide, from a coded matrix. */
TT__INLINE void TT__K(gemm_pack_coded_rows)(float *to, int64_t panel, const TT__K(gemm_operand) *x,
                                            int64_t line, int64_t lines, int64_t k0, int64_t k,
                                            const bool bytes)
{
    enum { L = TT__LANES, NR = TT__GEMM_NR };
    const TT__K(decoder) d = TT__K(decoder_of)(&x->codes);
    const int each = bytes ? 1 : 2, shift = bytes ? 62 : x->codes.shift; /* each: elements of a byte */
    const int64_t blocks = x->k_step / x->codes.block, padded = tt__ceil_div(lines, NR) * NR;
    float scale[TT__CODED_SCALES];
    for (int64_t kk = 0; kk < k; kk++, to += NR) {
        const uint8_t *codes = x->codes.codes + ((k0 + kk) * x->k_step + line) / each;
        for (int64_t strip = 0; strip < padded; strip += TT__CODED_MOST) {
            const int64_t end = tt__min(lines, strip + TT__CODED_MOST), block = (line + strip) >> shift;
            TT__K(code_scales)(scale, &x->codes, (k0 + kk) * blocks + block, 1,
                               ((line + end - 1) >> shift) - block + 1);
            for (int64_t at = strip; at < tt__min(padded, strip + TT__CODED_MOST); at += 32) {
                const int64_t present = tt__max(0, lines - at);
                const uint8_t *from = codes + at / each;
                uint8_t rest[32] = {0};
                tt__vf v[32 / L];
                __builtin_prefetch(from + 4 * x->k_step / each);
                if (present < 32) from = (const uint8_t *)memcpy(rest, from, (size_t)(present / each));
                TT__K(decode_32)(v, &d, from, bytes);
                TT__EACH(i, 32 / L) {
                    const int64_t l = at + i * L;
                    if (l < lines) v[i] *= scale[((line + l) >> shift) - block];
                    else v[i] = TT__K(zero)();
                    if (l < padded) TT__K(store)(to + l / NR * panel + l % NR, v[i]);
                }
            }
        }
    }
}

/* Packs a coded matrix, whose units are floats, into panels that are TT__GEMM_NR wide. */
TT__FN void TT__K(gemm_pack_coded)(float *to, int64_t panel, const TT__K(gemm_operand) *x, int64_t line,
                                   int64_t lines, int64_t k0, int64_t k)
{
    const bool bytes = !x->codes.numbers;
    /* column: whether the line is a matrix of one column, whose elements have a scale each */
    const bool column = x->codes.block == 1 && x->lines == 1;
    if (x->k_step == 1 && bytes && !column) TT__K(gemm_pack_codes)(to, panel, x, line, lines, k0, k, true);
    else if (x->k_step == 1 && !bytes) TT__K(gemm_pack_codes)(to, panel, x, line, lines, k0, k, false);
    else if (bytes) TT__K(gemm_pack_coded_rows)(to, panel, x, line, lines, k0, k, true);
    else TT__K(gemm_pack_coded_rows)(to, panel, x, line, lines, k0, k, false);
    for (int64_t done = 0; done < lines; done += TT__GEMM_NR, to += panel)
        TT__K(gemm_round)(to, x->narrow, k * TT__GEMM_NR);
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
                    TT__K(gemm_line)(tile + i * 16, x, line + done + i, k0 + kk, 16, 32);
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
    if (tt__is_coded(x->dtype) && !x->pairs) TT__K(gemm_pack_coded)(to, panel, x, line, lines, k0, k);
    else if (width == TT__GEMM_MR && straight)
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
