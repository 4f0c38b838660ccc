#pragma once
#include "../../base/base.h"
#include "../scratch.h"
#include "../../cpu/isa.h"

/* ---- matrix product: what all instruction sets share ---- */

/* Size of equal blocks of n: at most `most`, but for the last a multiple of `multiple`, a divisor of that. */
static int64_t tt__gemm_block(int64_t n, int64_t most, int64_t multiple)
{
    int64_t blocks = tt__max(1, tt__ceil_div(n, most));
    return tt__ceil_div(tt__ceil_div(n, blocks), multiple) * multiple;
}

#ifdef TINYTRAIN_CBLAS
/* Operands and strides that a CBLAS takes. */
static bool tt__cblas_takes(const tt__gemm_args *g)
{
    const int64_t sizes[] = {g->m, g->n, g->k, g->c.ld, g->a_row, g->a_col, g->b_row, g->b_col};
    for (int k = 0; k < TT__COUNT(sizes); k++)
        if (sizes[k] > INT32_MAX) return false;
    return g->a.dtype == TT_F32 && g->b.dtype == TT_F32 && g->b_narrow == TT_F32 && g->k > 0;
}

/* c (rows, c_row) = or += rows [row, row + rows) of A times columns [col, col + cols) of B. */
static void tt__cblas_product(const tt__gemm_args *g, int64_t row, int64_t rows, int64_t col, int64_t cols,
                              float *c, int64_t c_row, bool add)
{
    const float *a = (const float *)g->a.data + row * g->a_row,
                *b = (const float *)g->b.data + col * g->b_col;
    const bool a_lies = g->a_col == 1 && g->a_row >= g->k, b_lies = g->b_col == 1 && g->b_row >= g->n;
    const CBLAS_TRANSPOSE a_as = a_lies ? CblasNoTrans : CblasTrans,
                          b_as = b_lies ? CblasNoTrans : CblasTrans;
    const int a_step = (int)(a_lies ? g->a_row : g->a_col), b_step = (int)(b_lies ? g->b_row : g->b_col);
    cblas_sgemm(CblasRowMajor, a_as, b_as, (int)rows, (int)cols, (int)g->k, 1, a, a_step, b, b_step,
                add ? 1.0f : 0.0f, c, (int)c_row);
}
#endif

/* tt__parallel, unless the whole product is too small to share. */
static void tt__gemm_tasks(tt__pool *pool, const tt__gemm_args *g, int64_t count, tt__task run, void *arg)
{
    if ((double)g->m * (double)g->n * (double)g->k > TT__GEMM_ALONE) tt__parallel(pool, count, run, arg);
    else for (int64_t task = 0; task < count; task++) run(arg, task, 0);
}
