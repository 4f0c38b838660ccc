#pragma once
#include "../../base/base.h"
#include "../scratch.h"
#include "../linear/cpu_shared.h"
#include "cpu_shared.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "../../cpu/halves.h"
#include "../linear/cpu_packing.h"
#include "../linear/cpu_computing.h"

/* ------------------------------------------------------------------------------------------------- attention
   Flash attention (Dao et al., "FlashAttention", 2022). Scores exist only as tiles; the forward saves only
   the log-sum-exp of each query, and the backward recomputes the scores. Tiles are transposed, with keys as
   rows and queries in lanes, so that the softmax needs no shuffles, and the products P V and P^T dO (P: the
   weights) broadcast weights straight from the tile. Scores are in units of log 2 (the scale of Q includes
   log2 e), so that every exp becomes an exp2. */

typedef uint64_t TT__K(vw) __attribute__((vector_size(4 * TT__LANES)));
#define tt__vw TT__K(vw)

/* Returns the 64-bit products of the lower halves of each 64-bit lane; ignores the upper halves. */
TT__INLINE tt__vw TT__K(mul_low)(tt__vw a, tt__vw b)
{
#if TT__LANES == 16
    /* This is _mm512_mul_epu32, masked with all ones because g++ 12 warns about the plain form. */
    return (tt__vw)_mm512_maskz_mul_epu32((__mmask8)-1, (__m512i)a, (__m512i)b);
#elif TT__LANES == 8
    return (tt__vw)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(TT__NEON)
    return (tt__vw)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

TT__INLINE tt__vw TT__K(splat_w)(uint64_t x) { tt__vw v; memset(&v, 0, sizeof v); return x - v; }

/* Computes a Philox draw in every lane: out[] gets the four words of counter {c0, c1, c2, c3}. Inside, even
   and odd lanes are in separate vectors of 64-bit lanes whose lower halves hold the words, because
   multiplications of 32 x 32 to 64 bits take operands in this form. */
TT__INLINE void TT__K(philox)(const uint64_t keys[2 * TT__DRAW_ROUNDS], tt__vu c0, tt__vu c1, tt__vu c2,
                              tt__vu c3, tt__vu out[4])
{
    const tt__vw m0 = TT__K(splat_w)(0xD2511F53u), m1 = TT__K(splat_w)(0xCD9E8D57u);
    tt__vw e0 = (tt__vw)c0, e1 = (tt__vw)c1, e2 = (tt__vw)c2, e3 = (tt__vw)c3;
    tt__vw o0 = e0 >> 32, o1 = e1 >> 32, o2 = e2 >> 32, o3 = e3 >> 32;
    TT__EACH(round, TT__DRAW_ROUNDS) {
        tt__vw ea = TT__K(mul_low)(e0, m0), eb = TT__K(mul_low)(e2, m1);
        tt__vw oa = TT__K(mul_low)(o0, m0), ob = TT__K(mul_low)(o2, m1);
        e0 = (eb >> 32) ^ e1 ^ keys[2 * round];
        o0 = (ob >> 32) ^ o1 ^ keys[2 * round];
        e2 = (ea >> 32) ^ e3 ^ keys[2 * round + 1];
        o2 = (oa >> 32) ^ o3 ^ keys[2 * round + 1];
        e1 = eb; o1 = ob; e3 = ea; o3 = oa;
    }
    out[0] = (tt__vu)((e0 & 0xffffffffu) | (o0 << 32));
    out[1] = (tt__vu)((e1 & 0xffffffffu) | (o1 << 32));
    out[2] = (tt__vu)((e2 & 0xffffffffu) | (o2 << 32));
    out[3] = (tt__vu)((e3 & 0xffffffffu) | (o3 << 32));
}

/* Returns, for each lane, the number of the counter that philox_numbers expects in that lane. With this
   order, transposing quads of lanes puts the four words of a counter side by side, before the words of the
   next counter. */
TT__INLINE tt__vu TT__K(philox_groups)(void)
{
    tt__vu groups;
    for (int i = 0; i < TT__LANES; i++) groups[i] = (uint32_t)(i % 4 * (TT__LANES / 4) + i / 4);
    return groups;
}

/* Draws eight 16-bit numbers for each of TT__LANES counters {c0, c1, 0, 0}; the lower half of a word is the
   earlier number. The numbers are in the order of the counters if c0 has the order of philox_groups. */
TT__INLINE void TT__K(philox_numbers)(const uint64_t keys[2 * TT__DRAW_ROUNDS], tt__vu c0, tt__vu c1,
                                      uint16_t numbers[8 * TT__LANES])
{
    const tt__vu none = TT__K(splat_u)(0);
    tt__vu bits[4];
    tt__vf words[4];
    TT__K(philox)(keys, c0, c1, none, none, bits);
    for (int i = 0; i < 4; i++) words[i] = (tt__vf)bits[i];
    TT__K(transpose_quads)(words);
    memcpy(numbers, words, sizeof words);
}

/* A block of `keys` keys and `queries` queries of a sequence, in a head of d columns. Query i of the block
   sees the block's keys up to i + diagonal; no query sees the first `skip` keys. skip is a multiple of 32.
   by: how products of bf16 are computed. */
typedef struct TT__K(attention_block) {
    tt__bf16 by;
    int64_t skip, keys, queries, d, diagonal;
    const tt__attention_buffers *b;
} TT__K(attention_block);

/* Transposes the first n rows and m columns of `from` into `to`, and multiplies by `scale` if `scaled`. `to`
   has m rows, which are `to_row` floats apart. Writes whole vectors, with zeros for rows of `from` after the
   n rows. */
TT__INLINE void TT__K(attention_transpose)(float *to, int64_t to_row, const float *from, int64_t from_row,
                                           int64_t n, int64_t m, const bool scaled, float scale)
{
    enum { L = TT__LANES };
    tt__vf r[L];
    for (int64_t i = 0; i < n; i += L) {
        for (int64_t j = 0; j < m; j += L) {
            TT__EACH(t, L) r[t] = i + t < n ? TT__K(load)(from + (i + t) * from_row + j) : TT__K(zero)();
            if (scaled) TT__EACH(t, L) r[t] *= scale;
            TT__K(transpose)(r);
            TT__EACH(t, L) if (j + t < m) TT__K(store)(to + (j + t) * to_row + i, r[t]);
        }
    }
}

#ifdef TT__ATTENTION_BF16
/* ---- bf16 operands for dot products and tiles: pairs of bf16, made from fp32 blocks ---- */

/* Rounds n vectors of 16 floats to bf16, and pads the result with zeros to a multiple of 32 elements. */
TT__DOT_INLINE void TT__K(attention_narrow)(float *to, const float *from, int64_t n)
{
    for (int64_t v = 0; v < n; v += 2) {
        tt__vf low = TT__K(load)(from + 16 * v),
               high = v + 1 < n ? TT__K(load)(from + 16 * (v + 1)) : TT__K(zero)();
        TT__K(store)(to + 8 * v, (tt__vf)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
}

/* Writes pairs of columns: each row of `to` gets the bf16 pairs of neighbouring elements of a row of `from`
   (n, width). `to` has the shape (n, ceil(width / 32) * 16) in floats. */
TT__DOT_FN void TT__K(attention_pairs_of_columns)(float *to, const float *from, int64_t stride, int64_t n,
                                                  int64_t width)
{
    const int64_t to_row = tt__ceil_div(width, 32) * 16, vectors = tt__ceil_div(width, 16);
    for (int64_t i = 0; i < n; i++) TT__K(attention_narrow)(to + i * to_row, from + i * stride, vectors);
}

/* Writes pairs of rows: each row of `to` gets the bf16 pairs of an even row of `from` (n, width) and the row
   after it. `to` has the shape (ceil(n / 32) * 16, to_row) in floats; missing rows of `from` count as 0. */
TT__DOT_FN void TT__K(attention_pairs_of_rows)(float *to, int64_t to_row, const float *from, int64_t stride,
                                               int64_t n, int64_t width)
{
    uint16_t order[32];
    for (int k = 0; k < 32; k++) order[k] = (uint16_t)(k / 2 + k % 2 * 16);
    const __m512i alternate = _mm512_loadu_si512((const void *)order);
    const int64_t whole = tt__ceil_div(n, 32) * 32;
    for (int64_t i = 0; i < whole; i += 2, to += to_row, from += 2 * stride) {
        for (int64_t j = 0; j < width; j += 16) {
            tt__vf x = i < n ? TT__K(load)(from + j) : TT__K(zero)(),
                   y = i + 1 < n ? TT__K(load)(from + stride + j) : TT__K(zero)();
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
            TT__K(store)(to + j, (tt__vf)_mm512_permutexvar_epi16(alternate, both));
        }
    }
}

/* Stores y (keys, d), whose rows attention_to_queries adds up, as pairs of rows. attention_to_queries
   multiplies the transpose of `tile` (keys, queries) by y. The tile kernels need a left operand that is
   contiguous along the summed dimension, the keys; `tile` is contiguous along the queries. For the tile
   kernels y is therefore transposed and becomes the left operand: the kernels multiply y^T by `tile`, which
   gives out^T. */
TT__FN void TT__K(attention_summed_bf16)(tt__bf16 by, const tt__attention_buffers *buffers, int64_t keys,
                                         int64_t d, const float *y, int64_t stride)
{
    float *pairs = by == TT__BF16_TILES ? buffers->across : buffers->summed;
    const int64_t rows = tt__ceil_div(keys, 32) * 16, cols = tt__attention_padded(d);
    TT__K(attention_pairs_of_rows)(pairs, stride, y, stride, keys, d);
    if (by != TT__BF16_TILES) return;
    TT__K(attention_transpose)(buffers->summed, TT__ATTENTION_KEYS / 2, pairs, stride, rows, cols, false, 1);
}

#ifdef TT__TILES
/* Replaces each of n floats by the error of rounding it to bf16. */
TT__DOT_FN void TT__K(attention_rest)(float *x, int64_t n)
{
    float half[16];
    for (int64_t i = 0; i < n; i += 16) {
        TT__K(attention_narrow)(half, x + i, 1);
        TT__K(store)(x + i, TT__K(load)(x + i) - TT__K(load_16)((const uint16_t *)half, TT_BF16));
    }
}

/* Computes attention_to_queries with the tile kernels. If `twice`, then replaces `tile` by the errors of
   rounding `tile` to bf16, and adds the product of these errors and y. */
TT__FN void TT__K(attention_to_queries_by_tiles)(const TT__K(attention_block) *x, bool twice, float *tile,
                                                 float *out, int64_t out_stride, bool add)
{
    const int64_t whole = tt__ceil_div(x->keys, 32) * 32;
    const int64_t m = tt__attention_padded(x->d), n = tt__attention_padded(x->queries);
    const int64_t y_row = TT__ATTENTION_KEYS / 2;
    float *b = x->b->left, *c = x->b->across;
    tt__vf r[16];
    for (int part = 0; part <= twice; part++) {
        for (int64_t i = 0; i < x->keys && part; i++) TT__K(attention_rest)(tile + i * TT__ATTENTION_TILE, n);
        TT__K(attention_pairs_of_rows)(b, n, tile, TT__ATTENTION_TILE, x->keys, x->queries);
        for (int64_t j = 0; j < n; j += 32) {
            const int64_t skip = x->skip / 2,
                          seen = tt__min(whole, tt__ceil_div(j + 32 + x->diagonal, 32) * 32) / 2;
            for (int64_t i = 0; i < m; i += 32) {
                float *to = c + i * n + j;
                tt__product p = {tt__max(0, seen - skip), x->b->summed + i * y_row + skip, y_row, 16,
                                 b + skip * n + j, n, to, n, part ? to : NULL, n, 1.0f};
                TT__K(tiles_micro)(m - i, n - j, &p);
            }
        }
    }
    for (int64_t i = 0; i < m; i += 16)
        for (int64_t j = 0; j < n; j += 16) {
            TT__EACH(t, 16) r[t] = TT__K(load)(c + (i + t) * n + j);
            TT__K(transpose)(r);
            for (int t = 0; t < tt__min(16, x->queries - j); t++) {
                float *to = out + (j + t) * out_stride + i;
                TT__K(store)(to, add ? r[t] + TT__K(load)(to) : r[t]);
            }
        }
}
#endif
#endif

/* ---- products ---- */

/* A microkernel, and the number of rows and columns of its blocks. Along k, the microkernel multiplies
   `whole` elements at a time; `whole` is a power of 2. In an operand, the place of a float holds one fp32
   element or, if `pairs` is 1, two bf16 elements. */
typedef struct TT__K(attention_kernel) {
    TT__K(micro_fn) run;
    int64_t rows, cols, whole;
    int pairs;
} TT__K(attention_kernel);

/* Returns the microkernel for attention's products. `by` chooses the kernel: one for dot products of bf16,
   one for tiles of bf16 or, for TT__BF16_CONVERT, one for fp32 numbers. */
TT__INLINE TT__K(attention_kernel) TT__K(attention_kernel_of)(tt__bf16 by)
{
    TT__K(attention_kernel) kernel = {TT__K(attention_micro), TT__ATTENTION_MR, TT__ATTENTION_NV * TT__LANES,
                                      1, 0};
#ifdef TT__ATTENTION_BF16
    if (by == TT__BF16_DOT) {
        kernel.run = TT__K(attention_dot_micro);
        kernel.whole = 2;
    }
#endif
#ifdef TT__TILES
    if (by == TT__BF16_TILES) {
        kernel.run = TT__K(tiles_micro);
        kernel.rows = kernel.cols = kernel.whole = 32;
    }
#endif
    kernel.pairs = by != TT__BF16_CONVERT;
    return kernel;
}

/* Computes a block of the product p, summed over elements [from, to) of k. The block begins at row i and
   column j of C; it ends at row `rows` and column `cols`, or where the microkernel's block ends. */
TT__INLINE void TT__K(attention_multiply)(const TT__K(attention_kernel) *kernel, const tt__product *p,
                                          int64_t i, int64_t rows, int64_t j, int64_t cols, int64_t from,
                                          int64_t to)
{
    const int64_t first = (from & -kernel->whole) >> kernel->pairs;
    tt__product block = *p;
    block.k = ((to + kernel->whole - 1) & -kernel->whole) >> kernel->pairs;
    block.k -= first;
    /* Tile kernels need an A that is contiguous along k; the A of other microkernels has the stride a_col. */
    block.a += i * p->a_row + (kernel->whole > 2 ? first : first * p->a_col);
    block.b += first * p->b_row + j;
    block.c += i * p->c_row + j;
    if (p->base) block.base = block.c;
    kernel->run(tt__min(kernel->rows, rows - i), tt__min(kernel->cols, cols - j), &block);
}

/* attention_scores, attention_to_keys and attention_to_queries skip the parts of a tile that none of a
   vector's queries sees. If query_row lists the queries, nothing is skipped: the softmax sets the weights of
   unseen keys to 0. */

/* Multiplies x (keys, d) by yt (d, queries) into tile (keys, queries). In bf16, x has pairs of columns, yt
   has pairs of rows, and the product is multiplied by scale; fp32 operands are already scaled. */
TT__FN void TT__K(attention_scores)(const TT__K(attention_block) *s, float scale, const float *x,
                                    const float *yt, float *tile)
{
    const TT__K(attention_kernel) kernel = TT__K(attention_kernel_of)(s->by);
    const bool by_tiles = s->by == TT__BF16_TILES;
    const int64_t row = s->by ? tt__ceil_div(s->d, 32) * 16 : tt__attention_stride(s->d),
                  step = TT__ATTENTION_TILE;
    const int64_t rows = by_tiles ? tt__attention_padded(s->keys) : s->keys;
    const int64_t cols = tt__ceil_div(s->queries, TT__LANES) * TT__LANES;
    const tt__product p = {0, x, row, by_tiles ? 16 : 1, yt, step, tile, step, NULL, 0, scale};
    for (int64_t j = 0; j < cols; j += kernel.cols) {
        int64_t seen = tt__min(rows, tt__min(j + kernel.cols, cols) + s->diagonal);
        for (int64_t i = s->skip; i < seen; i += kernel.rows)
            TT__K(attention_multiply)(&kernel, &p, i, seen, j, cols, 0, s->d);
    }
    tile += s->skip * step;
    for (int64_t i = s->skip; i < s->keys && by_tiles; i++, tile += step)
        for (int64_t j = 0; j < cols; j += TT__LANES) TT__K(store)(tile + j, TT__K(load)(tile + j) * scale);
}

/* Adds the product of tile (keys, queries) and y (queries, d) to dx (keys, d). In bf16, y has pairs of
   rows. */
TT__FN void TT__K(attention_to_keys)(const TT__K(attention_block) *s, const float *tile, const float *y,
                                     float *dx)
{
    const TT__K(attention_kernel) kernel = TT__K(attention_kernel_of)(s->by);
    const int64_t cols = tt__ceil_div(s->d, TT__LANES) * TT__LANES, stride = tt__attention_stride(s->d);
    int64_t rows = s->keys;
    tt__product p = {0, tile, TT__ATTENTION_TILE, 1, y, stride, dx, stride, dx, stride, 1.0f};
#ifdef TT__ATTENTION_BF16
    if (s->by) {
        p.a = s->b->left;
        p.a_row = tt__ceil_div(s->queries, 32) * 16;
        TT__K(attention_pairs_of_columns)(s->b->left, tile, TT__ATTENTION_TILE, s->keys, s->queries);
    }
#endif
    if (s->by == TT__BF16_TILES) {
        p.a_col = 16;
        rows = tt__attention_padded(rows);
    }
    for (int64_t j = 0; j < cols; j += kernel.cols)
        for (int64_t i = s->skip; i < rows; i += kernel.rows)
            TT__K(attention_multiply)(&kernel, &p, i, rows, j, cols, tt__max(0, i - s->diagonal), s->queries);
}

/* Multiplies tile^T (queries, keys) by y (keys, d). Writes the product to out (queries, d) or, if `add`,
   adds the product to `out`. In bf16, y comes from attention_summed_bf16. All rows of a microkernel's block
   multiply the same keys (in bf16, pairs of keys), with weights of 0 for keys that a query does not see.
   Therefore a NaN or infinity in a key's row of y also reaches queries that do not see the key: the few
   earlier queries of the block, the 32 earlier queries with the tile kernels, and all queries of the
   sequence if query_row lists the queries. */
TT__FN void TT__K(attention_to_queries)(const TT__K(attention_block) *s, bool twice, float *tile,
                                        const float *y, float *out, int64_t out_row, bool add)
{
    (void)twice;
#ifdef TT__TILES
    if (s->by == TT__BF16_TILES) {
        TT__K(attention_to_queries_by_tiles)(s, twice, tile, out, out_row, add);
        return;
    }
#endif
    const TT__K(attention_kernel) kernel = TT__K(attention_kernel_of)(s->by);
    const int64_t cols = tt__ceil_div(s->d, TT__LANES) * TT__LANES, y_row = tt__attention_stride(s->d);
    tt__product p = {0, tile, 1, TT__ATTENTION_TILE, y, y_row, out, out_row, add ? out : NULL, out_row, 1.0f};
#ifdef TT__ATTENTION_BF16
    if (s->by) {
        p.a = s->b->left;
        p.a_col = tt__attention_padded(s->queries);
        TT__K(attention_pairs_of_rows)(s->b->left, p.a_col, tile, TT__ATTENTION_TILE, s->keys, s->queries);
    }
#endif
    for (int64_t j = 0; j < cols; j += kernel.cols)
        for (int64_t i = 0; i < s->queries; i += kernel.rows) {
            int64_t seen = tt__min(s->keys, tt__min(i + kernel.rows, s->queries) + s->diagonal);
            if (seen > s->skip)
                TT__K(attention_multiply)(&kernel, &p, i, s->queries, j, cols, s->skip, seen);
        }
}

/* ---- copies of a head's rows into and out of fp32 blocks ---- */

/* Reads a row of d numbers, multiplied by scale, into an fp32 block. `dtype` is a constant, so that the loop
   over whole vectors does not branch on the dtype. */
TT__INLINE void TT__K(attention_row_in)(const tt_dtype dtype, float *to, const void *from, int64_t d,
                                        float scale)
{
    const float *f = (const float *)from;
    const uint16_t *h = (const uint16_t *)from;
    int64_t j = 0;
    for (; j + TT__LANES <= d; j += TT__LANES)
        TT__K(store)(to + j, (dtype == TT_F32 ? TT__K(load)(f + j) : TT__K(load_16)(h + j, dtype)) * scale);
    if (j < d) TT__K(store)(to + j, TT__K(load_as)(from, dtype, j, d - j) * scale);
}

/* Writes a row of d numbers of an fp32 block, multiplied by scale, to `to` or, if `add`, adds the row to
   `to`. `dtype` is a constant, so that the loop over whole vectors does not branch on the dtype. */
TT__INLINE void TT__K(attention_row_out)(const tt_dtype dtype, void *to, const float *from, int64_t d,
                                         float scale, bool add)
{
    float *f = (float *)to;
    uint16_t *h = (uint16_t *)to;
    int64_t j = 0;
    for (; j + TT__LANES <= d; j += TT__LANES) {
        tt__vf x = TT__K(load)(from + j) * scale;
        if (add) x += dtype == TT_F32 ? TT__K(load)(f + j) : TT__K(load_16)(h + j, dtype);
        if (dtype == TT_F32) TT__K(store)(f + j, x);
        else TT__K(store_16)(h + j, x, dtype);
    }
    if (j == d) return;
    /* A -0 among the last columns is stored as 0, because 0 is added to it. */
    tt__vf x = TT__K(load)(from + j) * scale;
    TT__K(store_as)(to, dtype, j, x + (add ? TT__K(load_as)(to, dtype, j, d - j) : TT__K(zero)()), d - j);
}

/* Copies n rows of one head of m to `to`, multiplied by `scale`. The head begins at column `column` of m;
   the rows of `to` are `stride` floats apart. The rows of m are `row` to `row + n - 1` or, if `at` is not
   NULL, `at[row]` to `at[row + n - 1]`. Pads each row with zeros to a whole vector. */
TT__FN void TT__K(attention_pack)(const tt__mat *m, const int32_t *at, int64_t row, int64_t n, int64_t column,
                                  int64_t d, float scale, float *to, int64_t stride)
{
    for (int64_t i = 0; i < n; i++, to += stride) {
        int64_t number = at ? at[row + i] : row + i;
        const void *from = tt__attention_row(m, number, column);
        if (i + 8 < n) tt__attention_prefetch(m, at ? at[row + i + 8] : row + i + 8, column, d, false);
        tt__attention_prefetch(m, number, column, d, true);
        TT__BY_FLOAT(m->dtype, D, TT__K(attention_row_in)(D, to, from, d, scale));
    }
}

/* Multiplies n rows of `from` by `scale`, and writes the results to one head of m or, if `add`, adds them to
   the head. The head begins at column `column` of m. The rows of m are `row` to `row + n - 1` or, if `at` is
   not NULL, `at[row]` to `at[row + n - 1]`. m is absent if nothing needs the gradient; the function then
   does nothing. */
TT__FN void TT__K(attention_unpack)(const tt__mat *m, const int32_t *at, int64_t row, int64_t n,
                                    int64_t column, int64_t d, float scale, const float *from, int64_t stride,
                                    bool add)
{
    for (int64_t i = 0; i < n && m->data; i++, from += stride) {
        void *to = tt__attention_row(m, at ? at[row + i] : row + i, column);
        if (i + 8 < n) tt__attention_prefetch(m, at ? at[row + i + 8] : row + i + 8, column, d, false);
        TT__BY_FLOAT(m->dtype, D, TT__K(attention_row_out)(D, to, from, d, scale, add));
    }
}

/* Writes scale * from^T to `to`, whose d rows are TT__ATTENTION_TILE floats apart; `from` has n rows. In
   bf16, writes the pairs of rows of from^T, without the scale. */
TT__FN void TT__K(attention_columns)(const tt__attention_args *a, const tt__attention_buffers *b,
                                     const float *from, int64_t n, float scale, float *to)
{
    int64_t d = a->head_size, stride = tt__attention_stride(d), step = TT__ATTENTION_TILE;
#ifdef TT__ATTENTION_BF16
    if (a->bf16) {
        const int64_t row = tt__ceil_div(d, 32) * 16;
        TT__K(attention_pairs_of_columns)(b->columns, from, stride, n, d);
        TT__K(attention_transpose)(to, step, b->columns, row, n, row, false, 1);
        return;
    }
#endif
    (void)b;
    TT__K(attention_transpose)(to, step, from, stride, n, d, true, scale);
}
