#pragma once
#include "../../base/base.h"
#include "cpu_shared.h"
#include "../cpu_launch.h"
#include "../../cpu/kernels.h"
#include "cpu_products.h"
#include "../cpu_column_sums.h"

/* -------------------------------------------------------------------------------- linear layers: launches */

/* Returns the arguments of the product C = A B, where C is out[0] (m, n) and the sums run over k elements.
   Each row of the matrix a is a row of A; if a_columns, each column is a row of A. Each row of the matrix b
   is a column of B; if b_columns, each column is a column of B. */
TT__INLINE tt__gemm_args TT__K(gemm_args)(const tt__launch *l, int64_t k, const tt__mat *a, bool a_columns,
                                          const tt__mat *b, bool b_columns)
{
    tt__gemm_args g;
    memset(&g, 0, sizeof g);
    g.m = a_columns ? a->cols : a->rows;
    g.n = b_columns ? b->cols : b->rows;
    g.k = k;
    g.a = *a;
    g.a_row = a_columns ? 1 : a->ld;
    g.a_col = a_columns ? a->ld : 1;
    g.b = *b;
    g.b_row = b_columns ? b->ld : 1;
    g.b_col = b_columns ? 1 : b->ld;
    g.c = l->out[0];
    g.accumulate = l->add[0];
    g.workspace = l->workspace;
    g.bf16 = tt__cpu_of(l)->bf16;
    return g;
}

TT__FN tt_status TT__K(run_LINEAR)(const tt__launch *l)
{
    tt__gemm_args g = TT__K(gemm_args)(l, l->in[0].cols, &l->in[0], false, &l->in[1], false);
    g.b_narrow = tt__is_coded(g.b.dtype) ? g.a.dtype : l->instr->attr.narrow;
    g.bias = l->in[2];
    g.act = l->instr->attr.act;
    g.pre = l->out[1];
    g.residual = l->in[3];
    TT__K(gemm)(tt__cpu_of(l)->pool, &g);
    return TT_OK;
}

TT__FN tt_status TT__K(run_LINEAR_DX)(const tt__launch *l)
{
    tt__gemm_args g = TT__K(gemm_args)(l, l->in[0].cols, &l->in[0], false, &l->in[1], true);
    g.b_narrow = tt__is_coded(g.b.dtype) ? g.a.dtype : l->instr->attr.narrow;
    g.act = l->instr->attr.act;
    g.saved = l->in[2];
    TT__K(gemm)(tt__cpu_of(l)->pool, &g);
    return TT_OK;
}

TT__FN tt_status TT__K(run_LINEAR_DW)(const tt__launch *l)
{
    const tt__mat *dy = &l->in[0], *db = &l->out[1];
    if (l->out[0].data) {
        tt__gemm_args g = TT__K(gemm_args)(l, dy->rows, dy, true, &l->in[1], true);
        TT__K(gemm)(tt__cpu_of(l)->pool, &g);
    }
    if (db->data) TT__K(column_sums)(l, db, l->add[1]);
    return TT_OK;
}

/* Writes attr.beyond to the columns of out[0] from number `first` on. */
TT__FN void TT__K(fill_beyond)(const tt__launch *l, int64_t first)
{
    const tt__mat *y = &l->out[0];
    const size_t item = tt_dtype_bytes(y->dtype);
    const float beyond = y->dtype == TT_F16 ? fmaxf(l->instr->attr.beyond, -65504.0f) : l->instr->attr.beyond;
    const uint16_t half = tt__to_half(beyond, y->dtype);
    for (int64_t r = 0; r < y->rows; r++)
        for (int64_t c = first; c < y->cols; c++)
            memcpy((char *)tt__at(y, r) + (size_t)c * item,
                   y->dtype == TT_F32 ? (const void *)&beyond : (const void *)&half, item);
}

TT__FN tt_status TT__K(run_MATMUL)(const tt__launch *l)
{
    const tt__mat *a = &l->in[0], *b = &l->in[1];
    const bool plain = l->instr->attr.untransposed;
    tt__gemm_args g = TT__K(gemm_args)(l, plain ? b->rows : a->cols, a, false, b, plain);
    TT__K(gemm)(tt__cpu_of(l)->pool, &g);
    if (!plain && !l->add[0]) TT__K(fill_beyond)(l, b->rows);
    return TT_OK;
}

TT__FN tt_status TT__K(run_MATMUL_DB)(const tt__launch *l)
{
    tt__mat a = l->in[0];
    a.cols = l->out[0].rows;
    tt__gemm_args g = TT__K(gemm_args)(l, a.rows, &a, true, &l->in[1], true);
    TT__K(gemm)(tt__cpu_of(l)->pool, &g);
    return TT_OK;
}
