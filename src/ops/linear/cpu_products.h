#pragma once
#include "../../base/base.h"
#include "../scratch.h"
#include "cpu_shared.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "cpu_packing.h"
#include "cpu_computing.h"

/* ---- the packed product ---- */

/* A step of the product: computes rows [row, row + rows) and columns [col, col + cols) of C, and sums over
   units [k0, k0 + k). */
typedef struct TT__K(gemm_block) {
    const tt__gemm_args *args;
    TT__K(micro_fn) micro;
    int mr, nr;                           /* mr: lines of a panel of A; nr: of a panel of B */
    bool tiles, in_place;                 /* tiles: tile kernels compute the product; in_place: they read A in
                                             place */
    bool direct;                          /* C itself holds the sums, which begin as `base` or as 0 */
    tt__mat base;
    TT__K(gemm_operand) a, b;
    /* partial: the sums over units [0, k0), as [panel of columns][partial_rows][NR]. */
    float *a_panels, *b_panels, *partial;
    int64_t row, rows, col, cols, k0, k, partial_rows;
    bool last;                            /* whether this step adds the last units of k */
    int64_t a_tasks, pack_tasks;          /* numbers of packing tasks of A, and of A and B together */
    int64_t tile_rows, tile_cols, tiles_across;
} TT__K(gemm_block);

/* Runs task `task` of packing an operand. A task packs TT__GEMM_PACK_LINES lines if a line is contiguous in
   memory; otherwise it packs TT__GEMM_PACK_K units of all lines. */
TT__FN void TT__K(gemm_pack_some)(const TT__K(gemm_block) *w, int64_t task, float *to, int width,
                                  const TT__K(gemm_operand) *x, int64_t line, int64_t lines)
{
    int64_t k = 0, first = 0, ks = w->k;
    if (x->k_step != 1) {
        k = task * TT__GEMM_PACK_K;
        ks = tt__min(TT__GEMM_PACK_K, ks - k);
    } else {
        first = task * TT__GEMM_PACK_LINES;
        lines = tt__min(TT__GEMM_PACK_LINES, lines - first);
    }
    TT__K(gemm_pack)(to + first * w->k + k * width, width * w->k, width, x, line + first, lines, w->k0 + k,
                     ks);
}

TT__FN int64_t TT__K(gemm_pack_count)(const TT__K(gemm_block) *w, const TT__K(gemm_operand) *x, int64_t lines)
{
    return x->k_step != 1 ? tt__ceil_div(w->k, TT__GEMM_PACK_K) : tt__ceil_div(lines, TT__GEMM_PACK_LINES);
}

TT__FN void TT__K(gemm_pack_task)(void *arg, int64_t task, int thread)
{
    const TT__K(gemm_block) *w = (const TT__K(gemm_block) *)arg;
    int64_t a = task * w->a_tasks / w->pack_tasks;
    (void)thread;
    if ((task + 1) * w->a_tasks / w->pack_tasks == a) {
        TT__K(gemm_pack_some)(w, task - a, w->b_panels, w->nr, &w->b, w->col, w->cols);
        return;
    }
#ifdef TT__TILES
    if (w->tiles) {
        int64_t line = a * TT__GEMM_PACK_LINES, lines = tt__min(TT__GEMM_PACK_LINES, w->rows - line);
        TT__K(gemm_pack_tiles)(w->a_panels + line * w->k, &w->a, w->row + line, lines, w->k0, w->k);
        return;
    }
#endif
    TT__K(gemm_pack_some)(w, a, w->a_panels, w->mr, &w->a, w->row, w->rows);
}

/* Prefetches the part of m that belongs to a block of C, unless m is absent, so that the part is in the cache
   when the sums of the block are ready. */
TT__INLINE void TT__K(gemm_prefetch)(const tt__mat *m, int64_t row, int64_t col, int64_t rows, int64_t cols)
{
    const int64_t item = (int64_t)tt_dtype_bytes(m->dtype), step = m->ld * item, last = (cols - 1) * item;
    if (!m->data) return;
    const char *p = (const char *)m->data + row * step + col * item;
    for (int64_t i = 0; i < rows; i++, p += step) {
        __builtin_prefetch(p, 1);
        __builtin_prefetch(p + last, 1);
    }
}

/* Runs the microkernel on the panel of A that begins at row i of the block and the panel of B that begins at
   column j. */
TT__INLINE void TT__K(gemm_panels)(const TT__K(gemm_block) *w, int64_t i, int64_t j, int64_t rows,
                                   int64_t cols, float *c, int64_t c_row, const float *base, int64_t base_row)
{
    const float *a = w->a_panels + i * w->k, *b = w->b_panels + j * w->k;
    const tt__product p = {w->k, a, 1, TT__GEMM_MR, b, TT__GEMM_NR, c, c_row, base, base_row, 1.0f};
    w->micro(rows, cols, &p);
}

/* Computes a microkernel's tile in C itself, for products with `direct`. An incomplete tile at the edge of C
   is computed in a copy. */
TT__INLINE void TT__K(gemm_direct)(const TT__K(gemm_block) *w, int64_t i, int64_t j, int64_t rows,
                                   int64_t cols)
{
    const tt__mat *to = &w->args->c, *from = w->k0 ? to : &w->base;
    const int64_t row = w->row + i, col = w->col + j;
    float *c = (float *)to->data + row * to->ld + col, copy[TT__GEMM_MR * TT__GEMM_NR];
    const float *base = from->data ? (const float *)from->data + row * from->ld + col : NULL;
    TT__K(gemm_prefetch)(to, row, col, rows, cols);
    if (base != c && from->ld) TT__K(gemm_prefetch)(from, row, col, rows, cols);
    if (rows == TT__GEMM_MR && cols == TT__GEMM_NR) {
        TT__K(gemm_panels)(w, i, j, rows, cols, c, to->ld, base, from->ld);
        return;
    }
    memset(copy, 0, sizeof copy);
    for (int64_t r = 0; r < rows && base; r++)
        memcpy(copy + r * TT__GEMM_NR, base + r * from->ld, (size_t)cols * 4);
    TT__K(gemm_panels)(w, i, j, rows, cols, copy, TT__GEMM_NR, copy, TT__GEMM_NR);
    for (int64_t r = 0; r < rows; r++) memcpy(c + r * to->ld, copy + r * TT__GEMM_NR, (size_t)cols * 4);
}

TT__FN void TT__K(gemm_tile_task)(void *arg, int64_t task, int thread)
{
    const TT__K(gemm_block) *w = (const TT__K(gemm_block) *)arg;
    int64_t row = task / w->tiles_across * w->tile_rows, row_end = tt__min(w->rows, row + w->tile_rows);
    int64_t col = task % w->tiles_across * w->tile_cols, col_end = tt__min(w->cols, col + w->tile_cols);
    const tt__gemm_args *g = w->args;
    float sums[TT__GEMM_MR * TT__GEMM_NR];
    (void)thread;
    for (int64_t j = col; j < col_end; j += TT__GEMM_NR) {
        for (int64_t i = row; i < row_end; i += TT__GEMM_MR) {
            int64_t rows = tt__min(TT__GEMM_MR, row_end - i), cols = tt__min(TT__GEMM_NR, col_end - j);
            float *partial = w->partial + j * w->partial_rows + i * TT__GEMM_NR;
            if (w->direct) {
                TT__K(gemm_direct)(w, i, j, rows, cols);
            } else if (!w->last) {
                const tt__mat tile = {partial, TT_F32, rows, TT__GEMM_NR, TT__GEMM_NR};
                TT__K(gemm_prefetch)(&tile, 0, 0, rows, TT__GEMM_NR);
                TT__K(gemm_panels)(w, i, j, rows, cols, partial, TT__GEMM_NR, w->k0 ? partial : NULL,
                                   TT__GEMM_NR);
            } else {
                TT__K(gemm_prefetch)(&g->c, w->row + i, w->col + j, rows, cols);
                TT__K(gemm_prefetch)(&g->saved, w->row + i, w->col + j, rows, cols);
                TT__K(gemm_prefetch)(&g->residual, w->row + i, w->col + j, rows, cols);
                TT__K(gemm_panels)(w, i, j, rows, cols, sums, TT__GEMM_NR, NULL, 0);
                TT__K(gemm_finish)(g, w->row + i, w->col + j, rows, cols, sums, w->k0 ? partial : NULL,
                                   TT__GEMM_NR);
            }
        }
    }
}

#ifdef TT__TILES
#define TT__TILES_K 192 /* units summed at a time, so that the panel of B stays in L1 */

TT__FN void TT__K(gemm_tiles_task)(void *arg, int64_t task, int thread)
{
    const TT__K(gemm_block) *w = (const TT__K(gemm_block) *)arg;
    int64_t row = task / w->tiles_across * w->tile_rows, rows = tt__min(w->tile_rows, w->rows - row);
    int64_t col = task % w->tiles_across * w->tile_cols, cols = tt__min(w->tile_cols, w->cols - col);
    float tile[TT__GEMM_TILE_M * TT__GEMM_TILE_N] __attribute__((aligned(64)));
    float *partial = w->partial + row * tt__ceil_div(w->cols, 32) * 32 + tt__ceil_div(rows, 32) * 32 * col;
    float *to = w->last ? tile : partial;
    int64_t across = tt__ceil_div(cols, 32) * 32, set = 0;
    (void)thread;
    if (!w->k) memset(tile, 0, sizeof tile);
    for (int64_t k = 0; k < w->k; k += TT__TILES_K) {
        const float *from = k ? to : w->k0 ? partial : NULL;
        int64_t depth = tt__min(TT__TILES_K, w->k - k);
        for (int64_t j = 0; j < cols; j += 32) {
            for (int64_t i = 0; i < rows; i += 32) {
                int64_t n = tt__min(32, rows - i), at = i * across + j;
                const float *a = w->a_panels + (row + i) * w->k + k * 32,
                            *b = w->b_panels + (col + j) * w->k + k * 32;
                tt__product p = {depth, a, 16, 512, b, 32, to + at, across, from ? from + at : NULL, across,
                                 1.0f};
                if (w->in_place) {
                    p.a_row = w->a.line_step / 2;
                    p.a_col = 16;
                    p.a = (const float *)w->a.data + (w->row + row + i) * p.a_row + w->k0 + k;
                }
                if (n != set) TT__K(tiles_begin)(set = n);
                TT__K(tiles_micro)(n, 32, &p);
            }
        }
    }
    TT__K(tiles_end)();
    if (w->last) TT__K(gemm_finish)(w->args, w->row + row, w->col + col, rows, cols, tile, NULL, across);
}
#endif

/* Chooses the size of the tiles of C, small enough that there are tiles for every thread even with few rows.
   Returns the number of tiles. */
TT__FN int64_t TT__K(gemm_tile_count)(TT__K(gemm_block) *w)
{
    int64_t rows = TT__GEMM_TILE_M, cols = TT__GEMM_TILE_N;
    while (tt__ceil_div(w->rows, rows) * tt__ceil_div(w->cols, cols) < 32) {
        if (cols > 16) cols /= 2;
        else if (rows > 12) rows /= 2;
        else break;
    }
    w->tile_rows = tt__gemm_block(w->rows, rows, w->mr);
    w->tile_cols = tt__gemm_block(w->cols, cols, w->nr);
    w->tiles_across = tt__ceil_div(w->cols, w->tile_cols);
    return tt__ceil_div(w->rows, w->tile_rows) * w->tiles_across;
}

TT__FN void TT__K(gemm_packed)(tt__pool *pool, const tt__gemm_args *g)
{
    const bool halves = g->a.dtype == TT_BF16 && (g->b.dtype == TT_BF16 || g->b_narrow == TT_BF16);
    const bool pairs = halves && g->bf16 != TT__BF16_CONVERT;
    const tt__codes codes = tt__codes_of(&g->b), none = tt__codes_like(TT_F32, 1);
    const TT__K(gemm_operand) a = {g->a.data, g->a.dtype, TT_F32, pairs, g->m, g->a_row, g->a_col, g->k,
                                   none};
    const TT__K(gemm_operand) b = {g->b.data, g->b.dtype, g->b_narrow, pairs, g->n, g->b_col, g->b_row, g->k,
                                   codes};
    TT__K(gemm_block) w;
    memset(&w, 0, sizeof w);
    tt__task_function tile_task = TT__K(gemm_tile_task);
    int64_t units = g->k;
    w.args = g;
    w.a = a;
    w.b = b;
    w.micro = TT__K(gemm_micro);
    w.mr = TT__GEMM_MR;
    w.nr = TT__GEMM_NR;
#ifdef TT__DOT
    if (pairs && g->bf16 == TT__BF16_DOT) {
        w.micro = TT__K(gemm_dot_micro);
        units = tt__ceil_div(g->k, TT__DOT_DEPTH) * (TT__DOT_DEPTH / 2);
    }
#endif
#ifdef TT__TILES
    if (pairs && g->bf16 == TT__BF16_TILES) {
        w.in_place = g->a_col == 1 && g->k % 32 == 0 && g->a_row % 32 == 0 && (uintptr_t)g->a.data % 64 == 0;
        tile_task = TT__K(gemm_tiles_task);
        w.mr = w.nr = TT__GEMM_TILES;
        w.tiles = true;
        units = tt__ceil_div(g->k, 32) * 16;
    }
#endif
    int64_t rows = tt__gemm_block(g->m, TT__GEMM_M, w.mr), cols = tt__gemm_block(g->n, TT__GEMM_N, w.nr);
    const int addends = (g->bias.data != NULL) + (g->residual.data != NULL) + g->accumulate;
    if (g->bias.data) w.base = g->bias;
    else if (g->residual.data) w.base = g->residual;
    else if (g->accumulate) w.base = g->c;
    if (g->bias.data) w.base.ld = 0; /* every row adds the same bias */
    w.direct = g->c.dtype == TT_F32 && g->act == TT__ACT_NONE && addends <= 1
        && (!w.base.data || w.base.dtype == TT_F32);
    int64_t depth = tt__gemm_block(units, TT__GEMM_K, 16);
    w.a_panels = (float *)g->workspace;
    w.b_panels = w.a_panels + tt__align_up((size_t)(rows * tt__min(depth, units)) * 4) / 4;
    w.partial = w.b_panels + tt__align_up((size_t)(cols * tt__min(depth, units)) * 4) / 4;
    w.partial_rows = rows;
    for (w.col = 0; w.col < g->n; w.col += cols) {
        w.cols = tt__min(cols, g->n - w.col);
        for (w.row = 0; w.row < g->m; w.row += rows) {
            w.rows = tt__min(rows, g->m - w.row);
            int64_t tiles = TT__K(gemm_tile_count)(&w);
            w.k0 = 0;
            do {
                w.k = tt__min(depth, units - w.k0);
                w.last = w.k0 + w.k == units;
                const bool whole = w.k == units; /* then the panels of A from an earlier block can be used
                                                    again */
                if (whole && w.col > 0 && w.rows == g->m) w.a_tasks = 0;
                else if (!w.tiles) w.a_tasks = TT__K(gemm_pack_count)(&w, &w.a, w.rows);
                else w.a_tasks = w.in_place ? 0 : tt__ceil_div(w.rows, TT__GEMM_PACK_LINES);
                w.pack_tasks = w.a_tasks;
                if (!whole || w.row == 0) w.pack_tasks += TT__K(gemm_pack_count)(&w, &w.b, w.cols);
                if (w.k && w.pack_tasks) tt__gemm_tasks(pool, g, w.pack_tasks, TT__K(gemm_pack_task), &w);
                tt__gemm_tasks(pool, g, tiles, tile_task, &w);
                w.k0 += w.k;
            } while (w.k0 < units);
        }
    }
}

/* ---- the product with few rows ---- */

typedef struct TT__K(gemm_few) {
    const tt__gemm_args *args;
    tt__codes codes; /* of a coded B */
    const float *a; /* A as floats */
    int64_t a_row;
} TT__K(gemm_few);

/* Adds the lanes of each of the first n of 8 vectors. Transposes the vectors first, so that adding vectors
   adds the lanes of all at once. */
TT__INLINE void TT__K(gemm_totals)(const tt__vf sum[8], const int n, float total[16])
{
    TT__UNROLL(2)
    for (int first = 0; first < 8; first += TT__LANES) {
        tt__vf r[TT__LANES];
        TT__EACH(i, TT__LANES) r[i] = first + i < n ? sum[(first + i) & 7] : TT__K(zero)();
        TT__K(transpose)(r);
        TT__UNROLL(4)
        for (int half = TT__LANES / 2; half; half /= 2) {
            TT__EACH(i, half) r[i] += r[i + half];
        }
        TT__K(store)(total + first, r[0]);
    }
}

/* Adds the dot product of row i of A and column j of b, over k elements, to `sums[i * TT__GEMM_STRIP + j]`.
   Works on up to 4 rows and 2 columns at once, so that there are fewer loads than multiplications. */
TT__INLINE void TT__K(gemm_dots)(const int rows, const int cols, const float *a, int64_t a_row,
                                 const float *b, int64_t b_col, int64_t k, float *sums)
{
    tt__vf sum[8], x[4], y[2];
    float total[16];
    TT__EACH(i, 8) sum[i] = TT__K(zero)();
    int64_t kk = 0;
    for (; kk + TT__LANES <= k; kk += TT__LANES) {
        TT__EACH(j, cols) y[j] = TT__K(load)(b + j * b_col + kk);
        TT__EACH(i, rows) {
            tt__vf x1 = TT__K(load)(a + i * a_row + kk);
            TT__EACH(j, cols) sum[2 * i + j] = TT__K(fma)(x1, y[j], sum[2 * i + j]);
        }
    }
    if (kk < k) {
        TT__EACH(i, rows) x[i] = TT__K(load_n)(a + i * a_row + kk, k - kk);
        TT__EACH(j, cols) y[j] = TT__K(load_n)(b + j * b_col + kk, k - kk);
        TT__EACH(i, rows)
            TT__EACH(j, cols) sum[2 * i + j] = TT__K(fma)(x[i], y[j], sum[2 * i + j]);
    }
    TT__K(gemm_totals)(sum, 2 * rows, total);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) sums[i * TT__GEMM_STRIP + j] += total[2 * i + j];
}

/* Computes the sums of `cols` columns, from `col` on, by dot products. The columns of B are contiguous
   and have floats. */
TT__FN void TT__K(gemm_few_dots)(const TT__K(gemm_few) *w, int64_t col, int64_t cols, float *sums)
{
    const tt__gemm_args *g = w->args;
    const int64_t step = g->b_col;
    for (int64_t j = 0; j < cols; j += 2) {
        const int64_t pair = tt__min(2, cols - j);
        const float *b = (const float *)g->b.data + (col + j) * step;
        for (int64_t i = 0; i < g->m; i += 4) {
            const float *a = w->a + i * w->a_row;
            float *out = sums + i * TT__GEMM_STRIP + j;
            if (g->m - i >= 4 && pair == 2) {
                TT__K(gemm_dots)(4, 2, a, w->a_row, b, step, g->k, out);
                continue;
            }
            for (int64_t r = 0; r < tt__min(4, g->m - i); r++, a += w->a_row, out += TT__GEMM_STRIP) {
                if (pair == 2) TT__K(gemm_dots)(1, 2, a, w->a_row, b, step, g->k, out);
                else TT__K(gemm_dots)(1, 1, a, w->a_row, b, step, g->k, out);
            }
        }
    }
}

#define TT__CODED_COLS 4    /* columns of B that are widened together */
/* Rows of A that are multiplied by these columns together. 12 sums, and elements of 3 rows and of a column,
   fill 16 registers; the portable code needs more. */
#define TT__CODED_ROWS (TT__GEMM_MR == 4 ? 2 : 3)

/* Adds, to the vectors `sum[i][j]`, the products of k elements of row i of A and of column j of b. */
TT__INLINE void TT__K(gemm_coded_sums)(const int rows, const float *a, int64_t a_row, const float *b,
                                       int64_t k, tt__vf (*sum)[TT__CODED_COLS])
{
    tt__vf s[TT__CODED_ROWS][TT__CODED_COLS], x[TT__CODED_ROWS];
    TT__EACH(i, rows)
        TT__EACH(j, TT__CODED_COLS) s[i][j] = sum[i][j];
    for (int64_t kk = 0; kk < k; kk += TT__LANES) {
        if (kk + TT__LANES <= k) {
            TT__EACH(i, rows) x[i] = TT__K(load)(a + i * a_row + kk);
        } else {
            TT__EACH(i, rows) x[i] = TT__K(load_some)(a + i * a_row + kk, k - kk);
        }
        TT__EACH(j, TT__CODED_COLS) {
            const tt__vf y = TT__K(load)(b + j * TT__CODED_MOST + kk);
            TT__EACH(i, rows) s[i][j] = TT__K(fma)(x[i], y, s[i][j]);
        }
    }
    TT__EACH(i, rows)
        TT__EACH(j, TT__CODED_COLS) sum[i][j] = s[i][j];
}

/* Adds, to the vectors sum[j], the products of the first k elements of a, k a multiple of 32, and of column j
   of a coded B, whose elements begin with number at[j]. Each number is used as soon as it is converted. */
TT__INLINE void TT__K(gemm_coded_row)(const TT__K(decoder) *d, const float *a, const int64_t *at, int64_t k,
                                      int64_t ahead, tt__vf *sum, const bool bytes)
{
    const tt__codes *c = d->c;
    const int shift = bytes ? 16 : c->shift;
    float scale[TT__CODED_COLS][TT__CODED_SCALES];
    const uint8_t *codes[TT__CODED_COLS];
    tt__vf s[TT__CODED_COLS];
    TT__EACH(j, TT__CODED_COLS) {
        const int64_t first = tt__block_at(c, at[j]);
        TT__K(code_scales)(scale[j], c, first, 1, bytes ? 1 : (k + c->block - 1) >> shift);
        codes[j] = c->codes + (bytes ? at[j] : at[j] / 2);
        s[j] = sum[j];
    }
    ahead = bytes ? ahead : ahead / 2;
    for (int64_t kk = 0; kk < k; kk += 32) {
        const int64_t from = bytes ? kk : kk / 2;
        TT__EACH(j, TT__CODED_COLS) {
            tt__vf v[32 / TT__LANES];
            __builtin_prefetch(codes[j] + from + ahead);
            TT__K(decode_32)(v, d, codes[j] + from, bytes);
            TT__EACH(i, 32 / TT__LANES)
                s[j] = TT__K(fma)(TT__K(load)(a + kk + i * TT__LANES), v[i] * scale[j][kk >> shift], s[j]);
        }
    }
    TT__EACH(j, TT__CODED_COLS) sum[j] = s[j];
}

/* Computes gemm_coded_row for the whole groups of 32 elements among k. Returns the number of elements. */
TT__FN int64_t TT__K(gemm_coded_groups)(const TT__K(gemm_few) *w, const int64_t *at, int64_t k0, int64_t k,
                                        tt__vf *sum)
{
    const TT__K(decoder) d = TT__K(decoder_of)(&w->codes);
    const int64_t ahead = TT__CODED_COLS * w->args->b_col;
    if (w->codes.numbers) TT__K(gemm_coded_row)(&d, w->a + k0, at, k / 32 * 32, ahead, sum, false);
    else TT__K(gemm_coded_row)(&d, w->a + k0, at, k / 32 * 32, ahead, sum, true);
    return k / 32 * 32;
}

/* Computes the sums of gemm_few_dots for a B that is not f32, or is rounded. The sums of all rows stay in
   vectors while columns are widened piece by piece, so that each sum adds the same numbers in the same order
   as gemm_few_dots. */
TT__FN void TT__K(gemm_few_widened)(const TT__K(gemm_few) *w, int64_t col, int64_t cols, float *sums)
{
    const tt__gemm_args *g = w->args;
    const bool coded = w->codes.codes != NULL;
    const bool one = g->m == 1 && coded && g->b_narrow == TT_F32 && w->codes.block > 1;
    float wide[TT__CODED_COLS * TT__CODED_MOST];
    tt__vf sum[TT__GEMM_FEW_ROWS][TT__CODED_COLS];
    memset(wide, 0, sizeof wide);
    for (int64_t j = 0; j < cols; j += TT__CODED_COLS) {
        int64_t at[TT__CODED_COLS];
        memset(sum, 0, sizeof *sum * (size_t)(g->m + g->m % 2));
        for (int64_t k0 = 0, k; k0 < g->k; k0 += k) {
            k = tt__min(TT__CODED_MOST, g->k - k0);
            for (int c = 0; c < TT__CODED_COLS; c++) /* beyond the last column, the last column again */
                at[c] = tt__min(col + j + c, col + cols - 1) * g->b_col + k0;
            const int64_t done = one ? TT__K(gemm_coded_groups)(w, at, k0, k, sum[0]) : 0, left = k - done;
            if (!left) continue;
            if (left % TT__LANES) memset(wide, 0, sizeof wide);
            for (int64_t c = 0; c < TT__CODED_COLS; c++) {
                float *to = wide + c * TT__CODED_MOST;
                if (coded) TT__K(gemm_decode)(to, &w->codes, g->b_narrow, at[c] + done, left,
                                              TT__CODED_COLS * g->b_col);
                else TT__K(gemm_read)(to, g->b.data, g->b.dtype, g->b_narrow, at[c], left);
            }
            const float *a = w->a + k0 + done;
            for (int64_t i = 0; i < g->m; i += TT__CODED_ROWS, a += TT__CODED_ROWS * w->a_row) {
                if (g->m - i >= TT__CODED_ROWS)
                    TT__K(gemm_coded_sums)(TT__CODED_ROWS, a, w->a_row, wide, left, sum + i);
                else if (g->m - i == 2) TT__K(gemm_coded_sums)(2, a, w->a_row, wide, left, sum + i);
                else TT__K(gemm_coded_sums)(1, a, w->a_row, wide, left, sum + i);
            }
        }
        for (int64_t i = 0; i < g->m; i += 2) { /* two rows have 8 sums */
            float total[16];
            TT__K(gemm_totals)(sum[i], 8, total);
            for (int64_t r = 0; r < tt__min(2, g->m - i); r++)
                for (int64_t c = 0; c < tt__min(TT__CODED_COLS, cols - j); c++)
                    sums[(i + r) * TT__GEMM_STRIP + j + c] += total[r * TT__CODED_COLS + c];
        }
    }
}

/* Computes the sums of `cols` columns, from `col` on, by adding scaled rows of B, four rows at a time so that
   the sums are loaded less often. The rows of B are contiguous. */
TT__FN void TT__K(gemm_few_rows)(const TT__K(gemm_few) *w, int64_t col, int64_t cols, float *sums)
{
    const tt__gemm_args *g = w->args;
    float wide[4 * TT__GEMM_STRIP];
    memset(wide, 0, sizeof wide);
    for (int64_t k0 = 0; k0 < g->k; k0 += 4) {
        int64_t k = tt__min(4, g->k - k0), at = k0 * g->b_row + col, step = g->b_row;
        const float *b = wide;
        if (g->b.dtype == TT_F32 && g->b_narrow == TT_F32 && k == 4 && cols == TT__GEMM_STRIP) {
            b = (const float *)g->b.data + at;
        } else {
            if (k < 4) memset(wide, 0, sizeof wide);
            for (int64_t r = 0; r < k; r++) {
                float *to = wide + r * TT__GEMM_STRIP;
                if (w->codes.codes)
                    TT__K(gemm_decode)(to, &w->codes, g->b_narrow, at + r * step, cols, 8 * step);
                else TT__K(gemm_read)(to, g->b.data, g->b.dtype, g->b_narrow, at + r * step, cols);
            }
            step = TT__GEMM_STRIP;
        }
        for (int64_t i = 0; i < g->m; i++) {
            const float *a = w->a + i * w->a_row + k0;
            tt__vf x[4];
            for (int r = 0; r < 4; r++) x[r] = TT__K(splat)(r < k ? a[r] : 0.0f);
            for (int64_t j = 0; j < cols; j += TT__LANES) {
                float *p = sums + i * TT__GEMM_STRIP + j;
                tt__vf s = TT__K(load)(p);
                TT__EACH(r, 4) s = TT__K(fma)(x[r], TT__K(load)(b + r * step + j), s);
                TT__K(store)(p, s);
            }
        }
    }
}

TT__FN void TT__K(gemm_few_task)(void *arg, int64_t task, int thread)
{
    const TT__K(gemm_few) *w = (const TT__K(gemm_few) *)arg;
    const tt__gemm_args *g = w->args;
    int64_t col = task * TT__GEMM_STRIP, cols = tt__min(TT__GEMM_STRIP, g->n - col);
    float sums[TT__GEMM_FEW_ROWS * TT__GEMM_STRIP];
    (void)thread;
    memset(sums, 0, sizeof sums);
    const bool in_place = g->b.dtype == TT_F32 && g->b_narrow == TT_F32;
    if (g->k && g->b_row == 1 && !in_place) TT__K(gemm_few_widened)(w, col, cols, sums);
    else if (g->k && g->b_row == 1) TT__K(gemm_few_dots)(w, col, cols, sums);
    else if (g->k) TT__K(gemm_few_rows)(w, col, cols, sums);
    TT__K(gemm_finish)(g, 0, col, g->m, cols, sums, NULL, TT__GEMM_STRIP);
}

TT__FN void TT__K(gemm_few_go)(tt__pool *pool, const tt__gemm_args *g)
{
    TT__K(gemm_few) w;
    w.args = g;
    w.codes = tt__codes_of(&g->b);
    w.a = (const float *)g->a.data;
    w.a_row = g->a_row;
    if (g->a.dtype != TT_F32 || g->a_col != 1) {
        float *copy = (float *)g->workspace, column[TT__GEMM_FEW_ROWS];
        for (int64_t i = 0; i < g->m && g->a_col == 1; i++)
            TT__K(gemm_take)(copy + i * g->k, &g->a, i, 0, g->k);
        for (int64_t k = 0; k < g->k && g->a_col != 1; k++) {
            TT__K(gemm_take)(column, &g->a, k, 0, g->m);
            for (int64_t i = 0; i < g->m; i++) copy[i * g->k + k] = column[i];
        }
        w.a = copy;
        w.a_row = g->k;
    }
    tt__gemm_tasks(pool, g, tt__ceil_div(g->n, TT__GEMM_STRIP), TT__K(gemm_few_task), &w);
}

#ifdef TINYTRAIN_CBLAS
/* ---- the product by a CBLAS: written to C, or block by block to the workspace, from which gemm_finish
   computes C ---- */

typedef struct TT__K(gemm_product) {
    const tt__gemm_args *args;
    int64_t row, rows, col, cols, stride;
} TT__K(gemm_product);

TT__FN void TT__K(gemm_product_task)(void *arg, int64_t task, int thread)
{
    const TT__K(gemm_product) *w = (const TT__K(gemm_product) *)arg;
    int64_t i = task * 8;
    (void)thread;
    float *sums = (float *)w->args->workspace + i * w->stride;
    TT__K(gemm_finish)(w->args, w->row + i, w->col, tt__min(8, w->rows - i), w->cols, sums, NULL, w->stride);
}

TT__FN void TT__K(gemm_cblas)(tt__pool *pool, const tt__gemm_args *g)
{
    TT__K(gemm_product) w;
    if (g->c.dtype == TT_F32 && !g->bias.data && g->act == TT__ACT_NONE && !g->residual.data) {
        tt__cblas_product(g, 0, g->m, 0, g->n, (float *)g->c.data, g->c.ld, g->accumulate);
        return;
    }
    w.args = g;
    w.stride = tt__gemm_block(tt__min(g->n, TT__GEMM_N), TT__GEMM_N, 32);
    for (w.row = 0; w.row < g->m; w.row += TT__CBLAS_M) {
        for (w.col = 0; w.col < g->n; w.col += TT__GEMM_N) {
            w.rows = tt__min(TT__CBLAS_M, g->m - w.row);
            w.cols = tt__min(TT__GEMM_N, g->n - w.col);
            tt__cblas_product(g, w.row, w.rows, w.col, w.cols, (float *)g->workspace, w.stride, false);
            tt__gemm_tasks(pool, g, tt__ceil_div(w.rows, 8), TT__K(gemm_product_task), &w);
        }
    }
}
#endif

/* Computes the product of `args`, whose workspace has tt__gemm_workspace(m, n, k) bytes. */
TT__FN void TT__K(gemm)(tt__pool *pool, const tt__gemm_args *args)
{
    if (args->m <= 0 || args->n <= 0) return;
    if (args->m <= (args->b_row == 1 ? TT__GEMM_FEW_ROWS : TT__GEMM_FEW_SUMS)) TT__K(gemm_few_go)(pool, args);
#ifdef TINYTRAIN_CBLAS
    else if (tt__cblas_takes(args)) TT__K(gemm_cblas)(pool, args);
#endif
    else TT__K(gemm_packed)(pool, args);
}

/* Runs n rounds of multiply-adds that do not depend on one another, at the max rate of a thread. Returns the
   number of floating-point operations. Using *sink keeps the compiler from dropping the loop. */
TT__FN double TT__K(peak_loop)(int64_t n, float *sink)
{
    enum { SUMS = TT__GEMM_MR * TT__GEMM_NV >= 24 ? 24 : 12 }; /* 24 sums with 32 registers, 12 with 16 */
    tt__vf sum[SUMS], x = TT__K(splat)(0.999f), y = TT__K(splat)(*sink);
    TT__EACH(i, SUMS) sum[i] = TT__K(splat)((float)i);
    for (int64_t round = 0; round < n; round++) {
        TT__UNROLL(24)
#ifdef TT__NEON /* NEON's instruction overwrites its addend: if this were y, y would have to be copied */
        for (int i = 0; i < SUMS; i++) sum[i] = TT__K(fma)(x, y, sum[i]);
#else
        for (int i = 0; i < SUMS; i++) sum[i] = TT__K(fma)(sum[i], x, y);
#endif
    }
    TT__UNROLL(24)
    for (int i = 1; i < SUMS; i++) sum[0] += sum[i];
    *sink = TT__K(sum)(sum[0]);
    return (double)n * (double)(2 * SUMS * TT__LANES);
}

#undef TT__MICRO_TALL
#undef TT__GEMM_MR
#undef TT__GEMM_NV
