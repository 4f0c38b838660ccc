#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/device.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "cuda_products.cuh"

namespace {

// ---------------------------------------------------------------------------------------- coded weights
// Products whose weight is a coded matrix (src/backend/launch.h). Products of few rows read the codes. Before
// other products a kernel widens the whole matrix to the dtype of operand 0, in the workspace.

enum { CODED_FEW = 8 }; // max rows of x for which a product reads the codes

// A coded matrix (rows, cols). numbers: the number of each code of 4 bits.
struct coded_matrix {
    const unsigned char *codes, *scales;
    const float *nested, *offset, *map;
    tt_dtype dtype;
    int64_t rows, cols;
    float numbers[16];
};

coded_matrix coded_of(const tt__mat *m)
{
    static const float nf4[16] = TT__NF4_NUMBERS;
    const tt__coded_parts p = tt__coded_parts_of(m->dtype, m->rows, m->cols);
    const unsigned char *at = (const unsigned char *)m->data;
    coded_matrix c = {at, at + p.scales, (const float *)(at + p.nested), (const float *)(at + p.offset),
                      (const float *)(at + p.map), m->dtype, m->rows, m->cols, {}};
    for (int k = 0; k < 16; k++) c.numbers[k] = m->dtype == TT__NF4 ? nf4[k] : (float)(k - 8);
    return c;
}

// Reads elements [col, col + n) of a row, n at most 8; the others become 0. col is a multiple of 8, so that
// the elements belong to one block. The numbers are those that the CPU computes.
__device__ __forceinline__ void load_coded8(float (&v)[8], const coded_matrix &c, int64_t row, int64_t col,
                                            int64_t n)
{
    const int64_t at = row * c.cols + col;
    if (c.dtype == TT__INT8) {
        const float scale = ((const float *)c.scales)[row] / 127;
        TT__UNROLL for (int k = 0; k < 8; k++)
            v[k] = k < n ? (float)(signed char)c.codes[at + k] * scale : 0.0f;
        return;
    }
    float scale;
    if (c.dtype == TT__NF4) {
        const int64_t block = at / TT__NF4_BLOCK;
        scale = __fadd_rn(__fmul_rn(c.map[c.scales[block]], c.nested[block / TT__NF4_NESTED]), *c.offset);
    } else {
        scale = load_any(c.scales, TT_F16, at / TT__INT4_GROUP);
    }
    const uint32_t word = *(const uint32_t *)(c.codes + at / 2); // the width is a multiple of 32
    TT__UNROLL for (int k = 0; k < 8; k++)
        v[k] = c.numbers[word >> (k / 2 * 8 + (k % 2 ? 0 : 4)) & 15] * scale;
}

// Writes matrix c to `to`, a contiguous matrix of floats; a thread converts 8 elements.
__global__ void __launch_bounds__(256) widen_coded(coded_matrix c, void *to, tt_dtype dtype)
{
    tt__begin_kernel();
    const int64_t across = (c.cols + 7) / 8, groups = c.rows * across;
    for (int64_t g = blockIdx.x * (int64_t)256 + threadIdx.x; g < groups; g += (int64_t)gridDim.x * 256) {
        const int64_t row = g / across, col = g % across * 8;
        float v[8];
        load_coded8(v, c, row, col, c.cols - col);
        const int64_t at = row * c.cols + col;
        if (c.cols % 8 == 0) store8(to, dtype, at, 8, true, v);
        else for (int k = 0; k < 8 && col + k < c.cols; k++) store_any(to, dtype, at + k, v[k]);
    }
}

// Makes a product of at most CODED_FEW rows; a warp computes a column of the result. The weight's numbers are
// not rounded to 16 bits.
__global__ void __launch_bounds__(256) coded_few(coded_matrix c, product g)
{
    tt__begin_kernel();
    const int64_t column = blockIdx.x * (int64_t)8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (column >= c.rows) return;
    float sum[CODED_FEW] = {};
    for (int64_t k = lane * 8; k < c.cols; k += 256) {
        float w[8], x[8];
        load_coded8(w, c, column, k, c.cols - k);
        TT__UNROLL for (int r = 0; r < CODED_FEW; r++) {
            if (r >= g.m) continue;
            load8(x, (const char *)g.a + r * g.a_row * (g.a_type == TT_F32 ? 4 : 2), g.a_type, k, c.cols - k,
                  g.a_row % 8 == 0 && (uintptr_t)g.a % 16 == 0);
            TT__UNROLL for (int e = 0; e < 8; e++) sum[r] += x[e] * w[e];
        }
    }
    TT__UNROLL for (int r = 0; r < CODED_FEW; r++) {
        if (r >= g.m) continue;
        const float v = warp_sum(sum[r]);
        if (lane == 0) finish_element(g, r, column, v);
    }
}

// Returns whether coded_few makes the product of a LINEAR.
bool is_few(const tt__launch *l)
{
    return tt__is_coded(l->in[1].dtype) && l->in[0].rows <= CODED_FEW && !l->device->collected;
}

cudaError_t run_coded_few(const tt__launch *l, const product *g)
{
    const coded_matrix c = coded_of(&l->in[1]);
    if (g->m <= 0 || g->n <= 0) return cudaSuccess;
    return TT__LAUNCH(coded_few, blocks_for(c.rows, 8), 256, 0, l->device->stream, c, *g);
}

// Sets *w to operand 1 of a product or, if that is a coded matrix, to the widened matrix in the workspace.
// Widens nothing for a product that reads the codes, or while products are collected for timing.
cudaError_t widened(const tt__launch *l, tt__mat *w)
{
    *w = l->in[1];
    if (!tt__is_coded(w->dtype)) return cudaSuccess;
    const coded_matrix c = coded_of(w);
    w->dtype = l->in[0].dtype;
    w->data = l->workspace;
    if (l->device->collected || l->in[0].rows <= 0) return cudaSuccess;
    if (l->instr->op == TT__OP_LINEAR && is_few(l)) return cudaSuccess;
    const int64_t groups = c.rows * ((c.cols + 7) / 8);
    return TT__LAUNCH(widen_coded, grid_for(groups, 256, 16384), 256, 0, l->device->stream, c, w->data,
                      w->dtype);
}

} // namespace
