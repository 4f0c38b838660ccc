#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../../cuda/kernels.cuh"

namespace {

// ------------------------------------------------------------------- rows: gather, scatter, pooling, patches

// Computes y[r], row `index[r] - first` of x, or zeros where x has no such row. Reads the rows of x and
// writes y.
struct op_gather {
    static constexpr int KIND = HOT_CASTS;
    const int32_t *index;
    int64_t first;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        const int64_t row = index[r] - first;
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] = 0;
        if (row >= 0 && row < g.a.rows) load_group(v, g.a, row, c, n, g.vector);
        return true;
    }
};

cudaError_t run_gather(const tt__launch *l)
{
    const bool embedding = l->instr->op == TT__OP_EMBEDDING;
    const op_gather op = {(const int32_t *)l->in[embedding ? 0 : 1].data,
                          embedding ? l->first_row - l->instr->attr.offset : 0};
    return run_groups(l->device, l->in[embedding ? 1 : 0], no_operand, l->out[0], l->add[0], true, op);
}
TT__RUN_BY(EMBEDDING, run_gather)
TT__RUN_BY(GATHER_ROWS, run_gather)

// Returns the sequence s that contains row r: start[s] <= r < start[s + 1].
__device__ __forceinline__ int64_t sequence_of(const int32_t *start, int64_t seqs, int64_t r)
{
    int64_t low = 0, high = seqs;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (start[middle] <= r) low = middle;
        else high = middle;
    }
    return low;
}

// Computes dx[r] = dy[s] / (number of rows of sequence s) or, if `sums`, dx[r] = dy[s], where s is the
// sequence of row r. Writes dx once.
struct op_mean_pool_backward {
    static constexpr int KIND = RARE;
    const int32_t *start;
    int64_t seqs;
    bool sums;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        const int64_t s = sequence_of(start, seqs, r);
        const float scale = sums ? 1.0f : 1.0f / (float)(start[s + 1] - start[s]);
        load_group(v, g.a, s, c, n, g.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] *= scale;
        return true;
    }
};

cudaError_t run_mean_pool_backward(const tt__launch *l)
{
    const op_mean_pool_backward op = {(const int32_t *)l->in[1].data, l->in[0].rows, l->instr->attr.sums};
    return run_groups(l->device, l->in[0], no_operand, l->out[0], l->add[0], true, op);
}
TT__RUN_BY(MEAN_POOL_BACKWARD, run_mean_pool_backward)

// Arguments of patches, which writes one patch to each row y[r], one channel after another. The patch has
// number `position[r] - 1` in the image of row r; if position[r] is 0, y[r] becomes zeros. A thread works on
// up to 8 pixels of a line of a patch, with all C channels. words: groups of 8 pixels begin at multiples of
// 4 bytes. Reads pixels and writes y once.
struct patches_args {
    const uint8_t *pixels;
    int64_t ld, seqs;
    const int32_t *position, *start;
    int width, patch;
    float scale[4], shift[4]; // factor and addend of the pixels of each channel
    tt__mat y;
    bool add, vector, words;
};

template <int C> __global__ void __launch_bounds__(TT__ROW_THREADS) patches(patches_args g)
{
    tt__begin_kernel();
    const unsigned across = (unsigned)(g.width / g.patch), area = (unsigned)(g.patch * g.patch);
    const unsigned runs = ((unsigned)g.patch + 7) / 8, each = runs * (unsigned)g.patch;
    for (int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x; k < g.y.rows * each;
         k += (int64_t)gridDim.x * TT__ROW_THREADS) {
        const int64_t r = g.y.rows * each > INT32_MAX ? k / each : (uint32_t)k / each;
        const unsigned unit = (unsigned)(k - r * each), line = unit / runs, x = unit % runs * 8;
        const int n = min(8, g.patch - (int)x), p = g.position[r] - 1;
        uint32_t pixels[2 * C]; // the bytes of 8 pixels, C channels each
        TT__UNROLL for (int i = 0; i < 2 * C; i++) pixels[i] = 0;
        if (p >= 0) {
            const int64_t corner = ((int64_t)((unsigned)p / across) * g.patch + line) * g.width
                + (unsigned)p % across * (unsigned)g.patch + x;
            const uint8_t *from = g.pixels + sequence_of(g.start, g.seqs, r) * g.ld + corner * C;
            if (g.words) {
                TT__UNROLL for (int i = 0; i < 2 * C; i++) pixels[i] = ((const uint32_t *)from)[i];
            } else {
                TT__UNROLL for (int i = 0; i < 8 * C; i++)
                    if (i < n * C) pixels[i / 4] |= (uint32_t)from[i] << (i % 4 * 8);
            }
        }
        TT__UNROLL for (int channel = 0; channel < C; channel++) {
            const int64_t c = channel * area + line * (unsigned)g.patch + x;
            float v[8], old[8];
            TT__UNROLL for (int j = 0; j < 8; j++) {
                const int i = j * C + channel;
                v[j] = p < 0 ? 0.0f
                    : (float)(pixels[i / 4] >> (i % 4 * 8) & 255) * g.scale[channel] + g.shift[channel];
            }
            if (g.add) {
                load_group(old, g.y, r, c, n, g.vector);
                TT__UNROLL for (int j = 0; j < 8; j++) v[j] += old[j];
            }
            store8(row_at(g.y, r), g.y.dtype, c, n, g.vector, v);
        }
    }
}

cudaError_t run_patches(const tt__launch *l)
{
    const tt_patch_options *o = &l->instr->attr.image;
    const tt__mat *y = &l->out[0];
    patches_args g = {(const uint8_t *)l->in[0].data, l->in[0].ld, l->in[2].rows - 1,
                      (const int32_t *)l->in[1].data, (const int32_t *)l->in[2].data, o->width, o->patch, {},
                      {}, *y, l->add[0], o->patch % 8 == 0 && is_wide(y), false};
    for (int c = 0; c < o->channels; c++) {
        g.scale[c] = 1 / (255 * o->std[c]);
        g.shift[c] = -o->mean[c] / o->std[c];
    }
    // words: whether all lines of images, and so all groups of 8 pixels, begin at multiples of 4 bytes.
    const uintptr_t pitches = (uintptr_t)g.ld | (uintptr_t)(o->width * o->channels);
    g.words = o->patch % 8 == 0 && ((uintptr_t)g.pixels | pitches) % 4 == 0;
    if (!y->rows) return cudaSuccess;
    const auto kernel = o->channels == 1 ? patches<1> : o->channels == 2 ? patches<2>
        : o->channels == 3 ? patches<3> : patches<4>;
    unsigned grid;
    const int64_t units = y->rows * ((o->patch + 7) / 8) * o->patch;
    const cudaError_t e = grid_of(l->device, kernel, TT__ROW_THREADS, 2, blocks_for(units, TT__ROW_THREADS),
                                  &grid);
    return e != cudaSuccess ? e : TT__LAUNCH(kernel, grid, TT__ROW_THREADS, 0, l->device->stream, g);
}
TT__RUN_BY(PATCHES, run_patches)

// ---- sums over rows

// Loads columns [c, c + n) of the N rows that `rows` lists; a negative number stands for a row of zeros. All
// loads are in flight together.
template <int N>
__device__ __forceinline__ void load_rows(float (&v)[N][8], const tt__mat &m, const int64_t (&rows)[N],
                                          int64_t c, int n, bool vector)
{
    if (!vector || n < 8) {
        TT__UNROLL for (int k = 0; k < N; k++)
            load_group(v[k], m, rows[k] < 0 ? 0 : rows[k], c, rows[k] < 0 ? 0 : n, false);
    } else if (m.dtype == TT_F32) {
        TT__UNROLL for (int k = 0; k < N; k++) {
            const float4 zero = make_float4(0, 0, 0, 0),
                *p = (const float4 *)((const float *)m.data + rows[k] * m.ld + c);
            const float4 a = rows[k] < 0 ? zero : p[0], b = rows[k] < 0 ? zero : p[1];
            v[k][0] = a.x; v[k][1] = a.y; v[k][2] = a.z; v[k][3] = a.w; v[k][4] = b.x; v[k][5] = b.y;
            v[k][6] = b.z; v[k][7] = b.w;
        }
    } else {
        uint4 u[N];
        TT__UNROLL for (int k = 0; k < N; k++)
            u[k] = rows[k] < 0 ? make_uint4(0, 0, 0, 0)
                : *(const uint4 *)((const uint16_t *)m.data + rows[k] * m.ld + c);
        TT__WITH_HALF(m.dtype, T, TT__UNROLL for (int k = 0; k < N; k++) widen8<T>(v[k], u[k]));
    }
}

// Sets y[s] to the mean or, if `sums`, to the sum of the rows of sequence s. A block sums 256 columns of a
// sequence; each warp of the block sums every eighth row. Reads x once.
__global__ void __launch_bounds__(TT__ROW_THREADS) mean_pool(tt__mat x, const int32_t *start, tt__mat y,
                                                             bool add, bool sums, bool vector)
{
    tt__begin_kernel();
    const int64_t s = blockIdx.x, from = start[s], to = start[s + 1], column = (int64_t)blockIdx.y * 256;
    const int64_t c = column + threadIdx.x % 32 * 8;
    const int n = (int)min(x.cols - c, (int64_t)8);
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[4][8];
    for (int64_t r = from + threadIdx.x / 32; r < to && n > 0; r += 32) {
        const int64_t rows[4] = {r, r + 8 < to ? r + 8 : -1, r + 16 < to ? r + 16 : -1,
                                 r + 24 < to ? r + 24 : -1};
        load_rows(v, x, rows, c, n, vector);
        TT__UNROLL for (int k = 0; k < 4; k++)
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += v[k][j];
    }
    float mean = sum_warps(sum) * (sums ? 1.0f : 1.0f / (float)(to - from));
    const int64_t at = s * y.ld + column + threadIdx.x;
    if (column + threadIdx.x >= y.cols) return;
    if (add) mean += load_any(y.data, y.dtype, at);
    store_any(y.data, y.dtype, at, mean);
}

cudaError_t run_mean_pool(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *y = &l->out[0];
    if (!y->rows) return cudaSuccess;
    return TT__LAUNCH(mean_pool, dim3((unsigned)y->rows, blocks_for(y->cols, 256)), TT__ROW_THREADS, 0,
                      d->stream, l->in[0], (const int32_t *)l->in[1].data, *y, l->add[0], l->instr->attr.sums,
                      is_wide(&l->in[0]));
}
TT__RUN_BY(MEAN_POOL, run_mean_pool)

// ---- set_rows: a bit marks each row that the index lists, because the index may list a row twice

__global__ void __launch_bounds__(TT__ROW_THREADS) mark_rows(const int32_t *index, int64_t n, unsigned *bits)
{
    tt__begin_kernel();
    const int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x;
    if (k < n) atomicOr(bits + (index[k] >> 5), 1u << (index[k] & 31));
}

size_t bits_bytes(int64_t rows) { return tt__align_to(((size_t)rows + 7) / 8, TT__CUDA_ALIGN); }

cudaError_t run_mark_rows(const tt__launch *l, int64_t rows)
{
    tt__device *d = l->device;
    cudaError_t e = cudaMemsetAsync(resident_of(l)->words, 0, bits_bytes(rows), d->stream);
    if (e != cudaSuccess || !l->in[1].rows) return e;
    return TT__LAUNCH(mark_rows, blocks_for(l->in[1].rows, TT__ROW_THREADS), TT__ROW_THREADS, 0, d->stream,
                      (const int32_t *)l->in[1].data, l->in[1].rows, resident_of(l)->words);
}

// Sets y[r] to b where the bit of row r is set, and to x[r] elsewhere. If y has the memory of x, writes only
// the set rows; otherwise reads x and writes y once. In the backward, b is absent: y[r] becomes 0 where the
// bit is set or, if `add`, stays as it is.
struct op_set_rows {
    static constexpr int KIND = RARE;
    const unsigned *bits;
    bool in_place, add; // in_place: y has the memory of x; add: y[r] += x[r] where row r is not set
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        const bool set = bits[r >> 5] >> (r & 31) & 1;
        if (!set) {
            if (in_place) return false;
            load_group(v, g.a, r, c, n, g.vector);
            if (add) {
                float old[8];
                load_group(old, g.y, r, c, n, g.vector);
                TT__UNROLL for (int j = 0; j < 8; j++) v[j] += old[j];
            }
        } else if (g.b.data) {
            load_group(v, g.b, 0, c, n, g.vector);
        } else {
            if (add) return false;
            TT__UNROLL for (int j = 0; j < 8; j++) v[j] = 0;
        }
        return true;
    }
};

cudaError_t run_set_rows(const tt__launch *l)
{
    const op_set_rows op = {resident_of(l)->words, l->in[0].data == l->out[0].data, l->add[0]};
    cudaError_t e = run_mark_rows(l, l->out[0].rows);
    return e == cudaSuccess ? run_groups(l->device, l->in[0], l->in[2], l->out[0], false, true, op) : e;
}
TT__RUN_BY(SET_ROWS, run_set_rows, MAX_SET_ROWS)

// Copies row r of x to row index[r] of y. Reads x and writes the rows of y once.
__global__ void __launch_bounds__(TT__ROW_THREADS) store_rows(tt__mat x, const int32_t *index, tt__mat y,
                                                              int64_t groups, bool vector)
{
    tt__begin_kernel();
    const int64_t all = x.rows * groups;
    for (int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x; k < all;
         k += (int64_t)gridDim.x * TT__ROW_THREADS) {
        const int64_t r = k / groups, c = k % groups * 8;
        const int n = (int)min((int64_t)8, x.cols - c);
        float v[8];
        load_group(v, x, r, c, n, vector);
        store8(row_at(y, index[r]), y.dtype, c, n, vector, v);
    }
}

cudaError_t run_store_rows(const tt__launch *l)
{
    const tt__mat &x = l->in[0], &y = l->out[0];
    const int64_t groups = (x.cols + 7) / 8;
    const int64_t blocks = min((x.rows * groups + TT__ROW_THREADS - 1) / TT__ROW_THREADS, (int64_t)2112);
    return TT__LAUNCH(store_rows, (unsigned)blocks, TT__ROW_THREADS, 0, l->device->stream, x,
                      (const int32_t *)l->in[1].data, y, groups, is_wide(&x) && is_wide(&y));
}
TT__RUN_BY(STORE_ROWS, run_store_rows)

// Sums the rows of dy whose bits are set, and writes the sum of column c to partial[blockIdx.x][c]. A block
// sums 256 columns of the rows of `words` words of bits, 32 rows a word; each warp takes every eighth word.
__global__ void __launch_bounds__(TT__ROW_THREADS) sum_set_rows(tt__mat dy, const unsigned *bits,
                                                                int64_t words, float *partial, bool vector)
{
    tt__begin_kernel();
    const int64_t column = (int64_t)blockIdx.y * 256, c = column + threadIdx.x % 32 * 8;
    const int64_t end = min((blockIdx.x + 1) * words, (dy.rows + 31) / 32);
    const int n = (int)min(dy.cols - c, (int64_t)8);
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[8];
    for (int64_t k = blockIdx.x * words + threadIdx.x / 32; k < end && n > 0; k += 8) {
        for (unsigned left = bits[k]; left; left &= left - 1) {
            load_group(v, dy, k * 32 + __ffs((int)left) - 1, c, n, vector);
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += v[j];
        }
    }
    const float all = sum_warps(sum);
    if (column + threadIdx.x < dy.cols) partial[blockIdx.x * dy.cols + column + threadIdx.x] = all;
}

cudaError_t run_set_rows_backward(const tt__launch *l)
{
    tt__device *d = l->device;
    const tt__mat *dy = &l->in[0];
    const size_t used = bits_bytes(dy->rows);
    const unsigned *bits = resident_of(l)->words;
    float *partial = resident_of(l)->sums + used / sizeof(float);
    cudaError_t e = run_mark_rows(l, dy->rows);
    if (e == cudaSuccess && l->out[1].data) { // sums dy first, because dx may have the memory of dy
        const int64_t all = (dy->rows + 31) / 32;
        const int64_t blocks = sum_blocks(d, 2, (all + 7) / 8, used, (size_t)dy->cols * 4);
        const int64_t words = (all + blocks - 1) / blocks;
        e = TT__LAUNCH(sum_set_rows, dim3((unsigned)blocks, blocks_for(dy->cols, 256)), TT__ROW_THREADS, 0,
                       d->stream, *dy, bits, words, partial, is_wide(dy));
        if (e == cudaSuccess) e = run_finish_sums(d, partial, blocks, dy->cols, &l->out[1], l->add[1]);
    }
    if (e != cudaSuccess || !l->out[0].data) return e;
    const op_set_rows op = {bits, dy->data == l->out[0].data && !l->add[0], l->add[0]};
    return run_groups(d, *dy, no_operand, l->out[0], false, true, op);
}
TT__RUN_BY(SET_ROWS_BACKWARD, run_set_rows_backward, MAX_SET_ROWS, MAX_SUM_COLUMNS)

} // namespace
