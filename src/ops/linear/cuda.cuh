#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/groups.cuh"
#include "../../cuda/kernels.cuh"
#include "../losses/cuda.cuh"
#include "cuda_products.cuh"
#include "cuda_coded.cuh"

namespace {

// --------------------------------------------------------------------------------------------- linear layers

// Sets A and B of the product of l if they are fp8. The rows of both matrices then run along k and are padded
// with zeros to a multiple of 16.
void read_fp8(const tt__launch *l, product *g)
{
    if (!tt__is_fp8(g->a_type)) return;
    g->k = (g->k + 15) / 16 * 16;
    g->a_row = l->in[0].ld; g->a_col = 1;
    g->b_row = 1; g->b_col = l->in[1].ld;
    g->unscale_a = (const float *)l->in[TT__UNSCALE_IN].data;
    g->unscale_b = (const float *)l->in[TT__UNSCALE_IN + 1].data;
}

product linear_of(const tt__mat *x, const tt__mat *w, const tt__mat *b, const tt__mat *y)
{
    product g;
    memset(&g, 0, sizeof g);
    g.m = x->rows; g.n = w->rows; g.k = x->cols;
    g.a = x->data; g.a_type = x->dtype; g.a_row = x->ld; g.a_col = 1;
    g.b = w->data; g.b_type = w->dtype; g.b_row = 1; g.b_col = w->ld;
    g.c = *y;
    g.bias = b->data; g.bias_type = b->dtype;
    return g;
}

product linear_dx_of(const tt__mat *dy, const tt__mat *w, const tt__mat *dx, bool add)
{
    product g;
    memset(&g, 0, sizeof g);
    g.m = dy->rows; g.n = w->cols; g.k = dy->cols;
    g.a = dy->data; g.a_type = dy->dtype; g.a_row = dy->ld; g.a_col = 1;
    g.b = w->data; g.b_type = w->dtype; g.b_row = w->ld; g.b_col = 1;
    g.c = *dx;
    g.accumulate = add;
    return g;
}

cudaError_t linear(const tt__launch *l, const tt__mat *x, const tt__mat *w, const tt__mat *b,
                   const tt__mat *y)
{
    product g = linear_of(x, w, b, y);
    return matmul(l, &g);
}

cudaError_t linear_dx(const tt__launch *l, const tt__mat *dy, const tt__mat *w, const tt__mat *dx, bool add)
{
    product g = linear_dx_of(dy, w, dx, add);
    return matmul(l, &g);
}

cudaError_t run_sum_rows(const tt__launch *l)
{
    return run_column_sums(l, &l->in[0], &l->out[0], l->add[0]);
}
TT__RUN_BY(SUM_ROWS, run_sum_rows)

cudaError_t linear_dw(const tt__launch *l, const tt__mat *dy, const tt__mat *x,
                      const tt__mat *dw, const tt__mat *db, bool add_w, bool add_b)
{
    product g;
    memset(&g, 0, sizeof g);
    g.m = dy->cols; g.n = x->cols; g.k = dy->rows;
    g.sums_rows = true;
    g.a = dy->data; g.a_type = dy->dtype; g.a_row = 1; g.a_col = dy->ld;
    g.b = x->data; g.b_type = x->dtype; g.b_row = x->ld; g.b_col = 1;
    g.c = *dw;
    g.accumulate = add_w;
    read_fp8(l, &g);
    g.sums = *db; // the product may compute the sums of dy, as it reads dy anyway
    g.add_sums = add_b;
    if (dw->data) return matmul(l, &g);
    return db->data ? run_column_sums(l, dy, db, add_b) : cudaSuccess;
}

cudaError_t run_linear(const tt__launch *l)
{
    tt__mat w;
    const cudaError_t e = widened(l, &w);
    if (e != cudaSuccess) return e;
    product g = linear_of(&l->in[0], &w, &l->in[2], &l->out[0]);
    read_fp8(l, &g);
    g.act = l->instr->attr.act;
    g.pre = l->out[1];
    g.residual = l->in[3];
    g.accumulate = l->add[0];
    return is_few(l) ? run_coded_few(l, &g) : matmul(l, &g);
}
TT__RUN_BY(LINEAR, run_linear)

cudaError_t run_linear_dx(const tt__launch *l)
{
    tt__mat w;
    const cudaError_t e = widened(l, &w);
    if (e != cudaSuccess) return e;
    product g = linear_dx_of(&l->in[0], &w, &l->out[0], l->add[0]);
    read_fp8(l, &g);
    g.act = l->instr->attr.act;
    g.saved = l->in[2];
    g.sums = l->out[1];
    g.add_sums = l->add[1];
    return matmul(l, &g);
}
TT__RUN_BY(LINEAR_DX, run_linear_dx)

cudaError_t run_linear_dw(const tt__launch *l)
{
    return linear_dw(l, &l->in[0], &l->in[1], &l->out[0], &l->out[1], l->add[0], l->add[1]);
}
TT__RUN_BY(LINEAR_DW, run_linear_dw)

// Writes attr.beyond to the columns of out[0] from number `first` on.
cudaError_t fill_beyond(const tt__launch *l, int64_t first)
{
    const tt__mat *y = &l->out[0];
    const float beyond = l->instr->attr.beyond, lowest = y->dtype == TT_F16 ? -65504.0f : beyond;
    if (first >= y->cols) return cudaSuccess;
    return run_groups(l->device, no_operand, no_operand, columns_of(y, first, y->cols - first), false, true,
                      op_fill{max(beyond, lowest), NULL});
}

cudaError_t run_matmul(const tt__launch *l)
{
    const tt__mat *a = &l->in[0], *b = &l->in[1];
    if (l->instr->attr.untransposed) {
        product g = linear_dx_of(a, b, &l->out[0], l->add[0]);
        g.k = b->rows;
        return matmul(l, &g);
    }
    const tt__mat y = columns_of(&l->out[0], 0, b->rows);
    product g = linear_of(a, b, &no_operand, &y);
    g.accumulate = l->add[0];
    const cudaError_t e = matmul(l, &g);
    return e == cudaSuccess && !l->add[0] ? fill_beyond(l, b->rows) : e;
}
TT__RUN_BY(MATMUL, run_matmul)

cudaError_t run_matmul_db(const tt__launch *l)
{
    const tt__mat a = columns_of(&l->in[0], 0, l->out[0].rows);
    return linear_dw(l, &a, &l->in[1], &l->out[0], &no_operand, l->add[0], false);
}
TT__RUN_BY(MATMUL_DB, run_matmul_db)

} // namespace
