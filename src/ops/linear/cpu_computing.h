#pragma once
#include "../../base/base.h"
#include "../scratch.h"
#include "cpu_shared.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "../../cpu/halves.h"
#include "../../cpu/rows.h"
#include "cpu_packing.h"

/* ---- microkernels ---- */

typedef tt__vf TT__K(micro_sums)[12][4]; /* [rows][vectors] of the largest block; the part in use is in
                                            registers */

/* A microkernel computes a block of C. The numbers of rows and of vectors (nv) of the block are constants, so
   that sums stay in registers. */
typedef void (*TT__K(micro_fn))(int64_t rows, int64_t cols, const tt__product *p);

TT__INLINE void TT__K(micro_begin)(const int rows, const int nv, TT__K(micro_sums) sum)
{
    TT__EACH(i, rows)
        TT__EACH(v, nv) sum[i][v] = TT__K(zero)();
}

TT__INLINE void TT__K(micro_end)(const int rows, const int nv, TT__K(micro_sums) sum, const float scale,
                                 const tt__product *p)
{
    const float *base = p->base;
    const int64_t base_row = p->base_row, c_row = p->c_row;
    float *c = p->c;
    TT__EACH(i, rows)
        TT__EACH(v, nv) sum[i][v] *= scale;
    if (base) {
        TT__EACH(i, rows)
            TT__EACH(v, nv) sum[i][v] += TT__K(load)(base + i * base_row + v * TT__LANES);
    }
    TT__EACH(i, rows)
        TT__EACH(v, nv) TT__K(store)(c + i * c_row + v * TT__LANES, sum[i][v]);
}

/* Computes a block of C in fp32. The strides are arguments, so that a caller can give constants. */
TT__INLINE void TT__K(micro)(const int rows, const int nv, int64_t a_row, int64_t a_col, int64_t b_row,
                             const tt__product *p)
{
    TT__K(micro_sums) sum;
    const float *a = p->a, *b = p->b;
    TT__K(micro_begin)(rows, nv, sum);
    /* The loop is unrolled, because where two threads share a core, instructions other than multiply-adds
       limit the speed. */
    TT__UNROLL_BY(4)
    for (int64_t k = p->k; k > 0; k--, a += a_col, b += b_row) {
        tt__vf row[4];
        TT__EACH(v, nv) row[v] = TT__K(load)(b + v * TT__LANES);
#ifdef TT__NEON /* loads A as vectors and multiplies by single lanes: loads of single floats of A would take
                   most registers */
        tt__vf column[12 / TT__LANES];
        const bool lanes = __builtin_constant_p(a_row) && a_row == 1 && rows % TT__LANES == 0;
        const int whole = lanes ? rows / TT__LANES : 0;
        TT__EACH(v, whole) column[v] = TT__K(load)(a + v * TT__LANES);
#endif
        TT__EACH(i, rows) {
#ifdef TT__NEON
            tt__vf x = TT__K(splat)(whole ? column[i / TT__LANES][i % TT__LANES] : a[i * a_row]);
#else
            tt__vf x = TT__K(splat)(a[i * a_row]);
#endif
            TT__EACH(v, nv) sum[i][v] = TT__K(fma)(x, row[v], sum[i][v]);
        }
    }
    TT__K(micro_end)(rows, nv, sum, 1.0f, p);
}

/* Computes a block of C from a panel of A and a panel of B. Multiplies only the part of the panel of A that
   has the block's `rows` rows: one, two or three thirds of the panel or, in a panel of 4 or 8 rows, one or
   two halves. Multiplies all columns of the panel of B, or only the first 16 of 48 if `cols` is at most
   16. */
TT__OUTLINE void TT__K(gemm_micro)(int64_t rows, int64_t cols, const tt__product *p)
{
    enum { MR = TT__GEMM_MR, STEP = MR % 3 ? MR / 2 : MR / 3, THIRDS = STEP * 3 == MR, NV = TT__GEMM_NV };
    if (NV == 3 && cols <= TT__LANES) TT__K(micro)(MR, 1, 1, MR, TT__GEMM_NR, p);
    else if (rows > (THIRDS ? 2 : 1) * STEP) TT__K(micro)(MR, NV, 1, MR, TT__GEMM_NR, p);
    else if (THIRDS && rows > STEP) TT__K(micro)(2 * STEP, NV, 1, MR, TT__GEMM_NR, p);
    else TT__K(micro)(STEP, NV, 1, MR, TT__GEMM_NR, p);
}

/* Computes a block of C for attention: any number of rows up to ATTENTION_MR and of vectors up to
   ATTENTION_NV. */
#define TT__MICRO_ROWS(kernel, nv) \
    switch (rows) { \
    case 1: kernel(1, nv, p->a_row, p->a_col, p->b_row, p); return; \
    case 2: kernel(2, nv, p->a_row, p->a_col, p->b_row, p); return; \
    case 3: kernel(3, nv, p->a_row, p->a_col, p->b_row, p); return; \
    case 4: kernel(4, nv, p->a_row, p->a_col, p->b_row, p); return; \
    case 5: kernel(5, nv, p->a_row, p->a_col, p->b_row, p); return; \
    TT__MICRO_TALL(kernel, nv) \
    default: kernel(TT__ATTENTION_MR, nv, p->a_row, p->a_col, p->b_row, p); return; \
    }
#if TT__ATTENTION_MR == 8
#define TT__MICRO_TALL(kernel, nv) \
    case 6: kernel(6, nv, p->a_row, p->a_col, p->b_row, p); return; \
    case 7: kernel(7, nv, p->a_row, p->a_col, p->b_row, p); return;
#else
#define TT__MICRO_TALL(kernel, nv)
#endif
#define TT__MICRO_ANY(kernel) \
    if (TT__ATTENTION_NV > 2 && cols > 3 * TT__LANES) TT__MICRO_ROWS(kernel, 4) \
    if (TT__ATTENTION_NV > 2 && cols > 2 * TT__LANES) TT__MICRO_ROWS(kernel, 3) \
    if (cols > TT__LANES) TT__MICRO_ROWS(kernel, 2) \
    TT__MICRO_ROWS(kernel, 1)

TT__OUTLINE void TT__K(attention_micro)(int64_t rows, int64_t cols, const tt__product *p)
{
    TT__MICRO_ANY(TT__K(micro))
}

#ifdef TT__DOT
/* Computes a block of C from pairs of bf16: one instruction multiplies TT__DOT_DEPTH elements of a row and a
   column. The function shares no code with the fp32 microkernel, because compilers do not inline a function
   into a function that is compiled for another CPU. */
TT__DOT_INLINE void TT__K(dot_micro)(const int rows, const int nv, int64_t a_row, int64_t a_col,
                                     int64_t b_row, const float scale, const tt__product *p)
{
    TT__K(micro_sums) sum;
    const float *a = p->a, *b = p->b;
    TT__K(micro_begin)(rows, nv, sum);
#if TT__DOT_DEPTH == 4
    /* Sums of rows i and i + 1: sum[i][v] has columns 4 * v and 4 * v + 1 of both rows, sum[i + 1][v] has the
       next two columns. */
    for (int64_t k = p->k; k > 0; k -= 2, a += 2 * a_col, b += 2 * b_row) {
        tt__vf columns[4];
        TT__EACH(j, 2 * nv) columns[j] = TT__K(load)(b + 4 * j);
        TT__UNROLL(16)
        for (int i = 0; i < rows; i += 2) {
            tt__vf x = TT__K(load)(a + 2 * i * a_row);
            TT__EACH(j, 2 * nv)
                sum[i + j % 2][j / 2] = TT__DOT(sum[i + j % 2][j / 2], x, columns[j]);
        }
    }
    TT__UNROLL(16)
    for (int i = 0; i < rows; i += 2) {
        TT__EACH(v, nv) {
            tt__vf x = sum[i][v], y = sum[i + 1][v];
            sum[i][v] = TT__SHUFFLE(x, y, 0, 1, 4, 5);
            sum[i + 1][v] = TT__SHUFFLE(x, y, 2, 3, 6, 7);
        }
    }
#else
    TT__UNROLL_BY(4) /* so that less time goes to instructions other than multiply-adds */
    for (int64_t k = p->k; k > 0; k--, a += a_col, b += b_row) {
        tt__vf row[4];
        TT__EACH(v, nv) row[v] = TT__K(load)(b + v * TT__LANES);
        TT__EACH(i, rows) {
            uint32_t pair;
            memcpy(&pair, a + i * a_row, sizeof pair);
            tt__vf x = (tt__vf)TT__K(splat_u)(pair);
            TT__EACH(v, nv) sum[i][v] = TT__DOT(sum[i][v], x, row[v]);
        }
    }
#endif
    TT__K(micro_end)(rows, nv, sum, scale, p);
}

/* Computes a block of C from panels of pairs of bf16. Multiplies a whole panel of A or a half of it. */
TT__DOT_FN void TT__K(gemm_dot_micro)(int64_t rows, int64_t cols, const tt__product *p)
{
    enum { MR = TT__GEMM_MR, NV = TT__GEMM_NV };
    (void)cols;
    if (rows > MR / 2) TT__K(dot_micro)(MR, NV, 1, MR, TT__GEMM_NR, 1.0f, p);
    else TT__K(dot_micro)(MR / 2, NV, 1, MR, TT__GEMM_NR, 1.0f, p);
}

#if TT__LANES == 16
#define TT__ATTENTION_BF16
#define TT__SCALED_DOT(rows, nv, a_row, a_col, b_row, p) \
    TT__K(dot_micro)(rows, nv, a_row, a_col, b_row, p->scale, p)
TT__DOT_FN void TT__K(attention_dot_micro)(int64_t rows, int64_t cols, const tt__product *p)
{
    TT__MICRO_ANY(TT__SCALED_DOT)
}
#endif

/* Runs n rounds of dot products of bf16, as peak_loop runs rounds of fp32 multiply-adds. */
TT__DOT_FN double TT__K(peak_dot)(int64_t n, float *sink)
{
    tt__vf sum[12], x = TT__K(splat)(*sink), y = TT__K(splat)(1e-20f);
    TT__EACH(i, 12) sum[i] = TT__K(splat)((float)i);
    for (int64_t round = 0; round < n; round++) {
        TT__EACH(i, 12) sum[i] = TT__DOT(sum[i], x, y);
    }
    TT__UNROLL(12)
    for (int i = 1; i < 12; i++) sum[0] += sum[i];
    *sink = TT__K(sum)(sum[0]);
    return (double)n * 12 * 2 * TT__DOT_DEPTH * TT__LANES;
}
#endif

#ifdef TT__TILES
/* Configures the eight tile registers, of 16 rows of 64 bytes each: tiles 0 to 3 hold 32 x 32 elements of C,
   4 and 5 hold 32 rows of A, 6 and 7 hold 32 columns of B. A thread calls this before it works with tiles and
   whenever `rows`, the number of rows of C (1 to 32), changes. */
TT__TILES_FN void TT__K(tiles_begin)(int64_t rows)
{
    struct { uint8_t palette, start_row, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } config;
    const uint8_t upper = (uint8_t)tt__min(16, rows), lower = (uint8_t)(rows > 16 ? rows - 16 : 16);
    const uint8_t of[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int k = 0; k < 8; k++) {
        config.row_bytes[k] = 64;
        config.rows[k] = of[k];
    }
    TT__TILES_KEEP(&config);
    _tile_loadconfig(&config);
    TT__TILES_KEEP(&config);
}

TT__TILES_FN void TT__K(tiles_end)(void) { _tile_release(); }

/* Computes a block of C with tiles. The block has 32 rows (or the number given to tiles_begin) and 32
   columns; where 16 rows or 16 columns are enough, only 16 are computed. p->k, the length of each sum, counts
   pairs of bf16 and must be a multiple of 16. p->base_row must be p->c_row. */
TT__TILES_FN void TT__K(tiles_micro)(int64_t rows, int64_t cols, const tt__product *p)
{
    const bool below = rows > 16, beside = cols > 16;
    const int64_t a_row = p->a_row * 4, b_row = p->b_row * 4, c_row = p->c_row * 4; /* strides in bytes */
    const float *a = p->a, *b = p->b, *base = p->base;
    float *c = p->c;
    TT__TILES_FENCE;
    if (base) {
        _tile_loadd(0, base, c_row);
        if (beside) _tile_loadd(1, base + 16, c_row);
        if (below) _tile_loadd(2, base + 16 * p->c_row, c_row);
        if (below && beside) _tile_loadd(3, base + 16 * p->c_row + 16, c_row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = p->k; k > 0; k -= 16, a += p->a_col, b += 16 * p->b_row) {
        _tile_loadd(4, a, a_row);
        _tile_loadd(6, b, b_row);
        _tile_dpbf16ps(0, 4, 6);
        if (beside) {
            _tile_loadd(7, b + 16, b_row);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (below) {
            _tile_loadd(5, a + 16 * p->a_row, a_row);
            _tile_dpbf16ps(2, 5, 6);
            if (beside) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_row);
    if (beside) _tile_stored(1, c + 16, c_row);
    if (below) _tile_stored(2, c + 16 * p->c_row, c_row);
    if (below && beside) _tile_stored(3, c + 16 * p->c_row + 16, c_row);
    TT__TILES_FENCE;
}

/* Runs n rounds of products of tiles of bf16, as peak_loop runs rounds of fp32 multiply-adds. */
TT__TILES_FN double TT__K(peak_tiles)(int64_t n, float *sink)
{
    TT__K(tiles_begin)(32);
    for (int64_t round = 0; round < n; round++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    TT__K(tiles_end)();
    (void)sink; /* sink is not needed here: the compiler drops no operation on tiles */
    return (double)n * 4 * 2 * 16 * 16 * 32;
}
#else
TT__INLINE void TT__K(tiles_begin)(int64_t rows) { (void)rows; }
TT__INLINE void TT__K(tiles_end)(void) {}
#endif

/* gemm_take reads elements [col, col + n) of a row of m into `to`. gemm_add adds these elements to `sums`.
   gemm_keep writes `sums` to these elements. `to` and `sums` have room for whole vectors. */
TT__INLINE void TT__K(gemm_take)(float *to, const tt__mat *m, int64_t row, int64_t col, int64_t n)
{
    TT__K(gemm_read)(to, m->data, m->dtype, TT_F32, row * m->ld + col, n);
}

TT__INLINE void TT__K(gemm_add)(float *sums, const tt__mat *m, int64_t row, int64_t col, int64_t n)
{
    const int64_t at = row * m->ld + col;
    int64_t j = 0;
    if (m->dtype == TT_F32) {
        const float *x = (const float *)m->data + at;
        for (; j + TT__LANES <= n; j += TT__LANES)
            TT__K(store)(sums + j, TT__K(load)(sums + j) + TT__K(load)(x + j));
    }
    for (; j < n; j += TT__LANES) {
        tt__vf x = TT__K(load_as)(m->data, m->dtype, at + j, n - j);
        TT__K(store)(sums + j, TT__K(load)(sums + j) + x);
    }
}

TT__INLINE void TT__K(gemm_keep)(const tt__mat *m, int64_t row, int64_t col, const float *sums, int64_t n)
{
    const int64_t at = row * m->ld + col;
    if (m->dtype == TT_F32) memcpy((float *)m->data + at, sums, (size_t)n * 4);
    else TT__K(row_narrow)((uint16_t *)m->data + at, sums, m->dtype, n);
}

/* Finishes a block of `rows` rows and `cols` columns of C, which begins at row `row` and column `col`:
   `C = act(sums + more + bias) + residual + old C`. With `saved`, multiplies by act'(saved) instead of
   applying act. Overwrites `sums`. Rows of `sums` and `more` begin sums_row floats apart and are padded to
   whole vectors. Short contiguous rows, as in a microkernel's tile, are rounded and go through act several at
   a time. */
TT__FN void TT__K(gemm_finish)(const tt__gemm_args *g, int64_t row, int64_t col, int64_t rows, int64_t cols,
                               float *sums, float *more, int64_t sums_row)
{
    enum { STRIP = TT__GEMM_TILE_N, TOGETHER = 2 * STRIP };
    const int64_t max = cols == sums_row && cols <= STRIP ? TOGETHER / cols : 1;
    /* act reads its operand rounded as it is saved, so that recomputing act gives the same result. */
    const tt_dtype kept = g->pre.data ? g->pre.dtype : g->c.dtype;
    const bool keeps = g->pre.data && g->act != TT__ACT_NONE;
    uint16_t half[TOGETHER];
    float bias[STRIP], saved[TOGETHER];
    const tt__mat addend = {more, TT_F32, rows, cols, sums_row}, biases = {bias, TT_F32, 1, STRIP, STRIP};
    for (int64_t j = 0; j < cols; j += STRIP) {
        int64_t n = tt__min(STRIP, cols - j), at = col + j;
        if (g->bias.data) TT__K(gemm_take)(bias, &g->bias, 0, at, n);
        for (int64_t i = 0, some; i < rows; i += some) {
            some = tt__min(max, rows - i);
            float *x = sums + i * sums_row + j;
            int64_t r = row + i, whole = tt__ceil_div(some * n, TT__LANES) * TT__LANES;
            for (int64_t t = 0; t < some; t++) {
                if (more) TT__K(gemm_add)(x + t * n, &addend, i + t, j, n);
                if (g->bias.data) TT__K(gemm_add)(x + t * n, &biases, 0, 0, n);
                if (g->saved.data) TT__K(gemm_take)(saved + t * n, &g->saved, r + t, at, n);
                else if (keeps) TT__K(gemm_keep)(&g->pre, r + t, at, x + t * n, n);
            }
            if (g->saved.data) { /* a product with `saved` never has a bias */
                TT__K(act_row)(g->act, x, x, saved, some * n);
            } else if (g->act != TT__ACT_NONE) {
                if (kept != TT_F32) {
                    TT__K(row_narrow)(half, x, kept, some * n);
                    TT__K(row_widen)(x, half, kept, some * n);
                }
                TT__K(act_row)(g->act, x, x, NULL, whole);
            }
            for (int64_t t = 0; t < some; t++) {
                if (g->residual.data) TT__K(gemm_add)(x + t * n, &g->residual, r + t, at, n);
                if (g->accumulate) TT__K(gemm_add)(x + t * n, &g->c, r + t, at, n);
                TT__K(gemm_keep)(&g->c, r + t, at, x + t * n, n);
            }
        }
    }
}
