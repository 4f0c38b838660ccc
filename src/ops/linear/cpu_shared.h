#pragma once
#include "../../base/base.h"
#include "../scratch.h"

/* ---- matrix product: shared by all instruction sets ---- */

/* Arguments of a product C = act(A B + bias) + residual or, with `saved`, C = act'(saved) * (A B). If
   `accumulate`, the old C is added. A(i, k) is `a[i * a_row + k * a_col]`, and B(k, j) is
   `b[k * b_row + j * b_col]`. One stride of A is 1, and one stride of B is 1. Sums are fp32, in an order
   that does not depend on the number of threads. Matrices without data are absent. */
typedef struct tt__gemm_args {
    int64_t m, n, k;
    tt__mat a, b, c;
    int64_t a_row, a_col, b_row, b_col;
    tt_dtype b_narrow;   /* dtype to which an f32 B is rounded when read; TT_F32: not rounded        */
    bool accumulate;
    tt__bf16 bf16;       /* how products are computed where A and B are bf16                          */
    int act;
    tt__mat bias;        /* shape (n)                                                                 */
    tt__mat pre;         /* (m, n): is set to A B + bias, the operand of act                          */
    tt__mat residual;    /* shape (m, n)                                                              */
    tt__mat saved;       /* (m, n): the numbers that act saved in the forward                         */
    void *workspace;     /* tt__gemm_workspace bytes, 64-byte aligned                                 */
} tt__gemm_args;

/* The work of a microkernel: computes a block C = scale * (A B) + base, with the sums in registers. k counts
   floats or, in bf16 products, pairs of bf16 in the place of a float. A(i, k) is `a[i * a_row + k * a_col]`
   or, for AMX, `a[i * a_row + k / 16 * a_col + k % 16]`. Rows of B begin b_row floats apart, and rows of C
   begin c_row floats apart. `base` is NULL, C itself, or another block. */
typedef struct tt__product {
    int64_t k;
    const float *a; int64_t a_row, a_col;
    const float *b; int64_t b_row;
    float *c; int64_t c_row;
    const float *base; int64_t base_row;
    float scale;
} tt__product;

/* Returns the size of the blocks into which n is divided about equally. The size is at most `max` and a
   multiple of `multiple`, which must divide `max`. */
static int64_t tt__gemm_block(int64_t n, int64_t max, int64_t multiple)
{
    int64_t blocks = tt__max(1, tt__ceil_div(n, max));
    return tt__ceil_div(tt__ceil_div(n, blocks), multiple) * multiple;
}

#ifdef TINYTRAIN_CBLAS
/* Returns whether a CBLAS can compute the product. A CBLAS takes only f32 operands, and sizes of type int. */
static bool tt__cblas_takes(const tt__gemm_args *g)
{
    const int64_t sizes[] = {g->m, g->n, g->k, g->c.ld, g->a_row, g->a_col, g->b_row, g->b_col};
    for (int k = 0; k < TT__COUNT(sizes); k++)
        if (sizes[k] > INT32_MAX) return false;
    return g->a.dtype == TT_F32 && g->b.dtype == TT_F32 && g->b_narrow == TT_F32 && g->k > 0;
}

/* Multiplies rows [row, row + rows) of A by columns [col, col + cols) of B. Writes the product to c or, if
   `add`, adds it; the rows of c are c_row floats apart. */
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

/* Runs tasks in parallel, or one after another if the whole product is too small to share. */
static void tt__gemm_tasks(tt__pool *pool, const tt__gemm_args *g, int64_t count, tt__task_function run,
                           void *arg)
{
    if ((double)g->m * (double)g->n * (double)g->k > TT__GEMM_ALONE) tt__run_tasks(pool, count, run, arg);
    else for (int64_t task = 0; task < count; task++) run(arg, task, 0);
}
