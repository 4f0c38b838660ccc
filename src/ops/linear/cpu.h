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
    g.b_narrow = l->instr->attr.narrow;
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
    g.b_narrow = l->instr->attr.narrow;
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
