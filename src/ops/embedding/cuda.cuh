#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../elementwise/cuda.cuh"
#include "../rows/cuda.cuh"

namespace {

// ---- gradients of tables: the rows of dy in the order of their ids (equal ids in row order), then the sums
// of equal ids

#ifndef TT__SORT_TILES // at most so many blocks; tests make it smaller
#define TT__SORT_TILES 128
#endif
enum { TT__SORT_STEP = 1024 }; // each of which takes so many numbers at a time

// counts[block][digit] = how many of the block's ids have this digit of 8 bits.
__global__ void __launch_bounds__(TT__ROW_THREADS) count_digits(const int32_t *ids, int64_t n, int shift,
                                                                int64_t tile, unsigned *counts)
{
    tt__begin_kernel();
    TT__SHARED(unsigned, count, [256]);
    const int64_t from = (int64_t)blockIdx.x * tile, to = min(n, from + tile);
    count[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t k = from + threadIdx.x; k < to; k += TT__ROW_THREADS)
        atomicAdd(&count[(uint32_t)ids[k] >> shift & 255], 1u);
    __syncthreads();
    counts[(int64_t)blockIdx.x * 256 + threadIdx.x] = count[threadIdx.x];
}

// Moves ids and rows (NULL: 0, 1, ...) behind those with a lesser digit, in the order that they had. Thread k
// of a block looks after digit k.
__global__ void __launch_bounds__(TT__ROW_THREADS) scatter_digits(const int32_t *ids, const int32_t *rows,
                                                                  int64_t n, int shift, int64_t tile,
                                                                  const unsigned *counts, int32_t *to_ids,
                                                                  int32_t *to_rows)
{
    tt__begin_kernel();
    TT__SHARED(unsigned, place, [8][256]); // of each warp's next id with a digit
    TT__SHARED(unsigned, totals, [8]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t from = (int64_t)blockIdx.x * tile, to = min(n, from + tile);
    unsigned before = 0, all = 0;
    for (unsigned b = 0; b < gridDim.x; b++) {
        const unsigned count = counts[(int64_t)b * 256 + threadIdx.x];
        if (b < blockIdx.x) before += count;
        all += count;
    }
    unsigned sum = all; // of the digits of this warp up to this one
    for (int m = 1; m < 32; m *= 2) {
        const unsigned other = __shfl_up_sync(0xffffffffu, sum, m);
        if (lane >= m) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) before += totals[w];
    before += sum - all;
    for (int64_t at = from; at < to; at += TT__SORT_STEP) {
        unsigned rank[4];
        int32_t id[4];
        for (int k = lane; k < 256; k += 32) place[warp][k] = 0;
        __syncwarp();
        // How many ids with the same digit the warp has before each of its 128.
        TT__UNROLL for (int u = 0; u < 4; u++) {
            const int64_t k = at + warp * 128 + u * 32 + lane;
            id[u] = k < to ? ids[k] : 0;
            const unsigned digit = (uint32_t)id[u] >> shift & 255;
            unsigned same = __ballot_sync(0xffffffffu, k < to);
            TT__UNROLL for (int bit = 0; bit < 8; bit++) {
                const unsigned ones = __ballot_sync(0xffffffffu, (int)(digit >> bit & 1));
                same &= digit >> bit & 1 ? ones : ~ones;
            }
            const unsigned lower = same & ((1u << lane) - 1);
            rank[u] = place[warp][digit] + (unsigned)__popc(lower);
            __syncwarp();
            if (k < to && !lower) place[warp][digit] = rank[u] + (unsigned)__popc(same);
            __syncwarp();
        }
        __syncthreads();
        for (int w = 0; w < 8; w++) {
            const unsigned count = place[w][threadIdx.x];
            place[w][threadIdx.x] = before;
            before += count;
        }
        __syncthreads();
        TT__UNROLL for (int u = 0; u < 4; u++) {
            const int64_t k = at + warp * 128 + u * 32 + lane;
            if (k >= to) continue;
            const unsigned p = place[warp][(uint32_t)id[u] >> shift & 255] + rank[u];
            to_ids[p] = id[u];
            to_rows[p] = rows ? rows[k] : (int32_t)k;
        }
        __syncwarp();
    }
}

// The same for up to TT__RANKED ids at once: the place of an id is how many come before it. A block counts
// for 32 ids, and each of its warps compares them with an eighth of all. Blocks behind these write zeros.
#ifndef TT__RANKED // tests make it smaller
#define TT__RANKED 8192
#endif
__global__ void __launch_bounds__(TT__ROW_THREADS) rank_ids(const int32_t *ids, int n, int32_t *to_ids,
                                                            int32_t *to_rows, uint4 *zero,
                                                            int64_t zero_vectors)
{
    tt__begin_kernel();
    const int ranking = (n + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    TT__SHARED(int32_t, all, [(TT__RANKED + 255) / 256 * 256]);
    TT__SHARED(int, before, [8][32]);
    if ((int)blockIdx.x >= ranking) {
        const int64_t step = (int64_t)(gridDim.x - ranking) * TT__ROW_THREADS;
        for (int64_t k = (int64_t)(blockIdx.x - ranking) * TT__ROW_THREADS + threadIdx.x; k < zero_vectors;
             k += step)
            zero[k] = make_uint4(0, 0, 0, 0);
        return;
    }
    const int from = (int)blockIdx.x * 32, each = ((n + 7) / 8 + 31) / 32 * 32; // a warp's
    for (int k = threadIdx.x; k < 8 * each; k += TT__ROW_THREADS) all[k] = k < n ? ids[k] : INT32_MAX - 1;
    __syncthreads();
    const int32_t id = all[from + lane];
    int count = 0;
    for (int k = warp * each; k < (warp + 1) * each; k += 4) {
        const int4 of = *(const int4 *)(all + k);
        const int32_t most = id + (k < from); // equal ids of earlier blocks come before it
        count += (of.x < most) + (of.y < most) + (of.z < most) + (of.w < most);
    }
    before[warp][lane] = count;
    __syncthreads();
    if (warp || from + lane >= n) return;
    for (int k = 1; k < 8; k++) count += before[k][lane];
    for (int k = 0; k < lane; k++) count += all[from + k] == id;
    to_ids[count] = id;
    to_rows[count] = from + lane;
}

// Sums the rows of dy with equal ids, `chunk` of them a block. A sum of rows that are all in the chunk goes
// to row id - first of `to`, if it has that; of those that go on from the chunk before to partial[block][0],
// of those that begin here and go on to partial[block][1]. Bytes: dy and the rows of `to`.
__global__ void __launch_bounds__(128) sum_ids(const int32_t *ids, const int32_t *rows, int64_t n, tt__mat dy,
                                               tt__mat to, int64_t first, bool add, bool vector,
                                               int64_t chunk, float *partial)
{
    tt__begin_kernel();
    const int64_t from = (int64_t)blockIdx.x * chunk, end = min(n, from + chunk);
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const int width = (int)min(dy.cols - c, (int64_t)8);
    if (width <= 0) return;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[8][8];
    bool began = from > 0 && ids[from - 1] == ids[from];
    for (int64_t k = from; k < end; k += 8) {
        int64_t at[8];
        TT__UNROLL for (int u = 0; u < 8; u++) at[u] = k + u < end ? rows[k + u] : -1;
        load_rows(v, dy, at, c, width, vector);
        TT__UNROLL for (int u = 0; u < 8; u++) {
            if (k + u >= end) continue;
            const int32_t id = ids[k + u];
            const bool last = k + u + 1 == n || ids[k + u + 1] != id;
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += v[u][j];
            if (!last && k + u + 1 < end) continue;
            if (began || !last) {
                float *p = partial + ((int64_t)blockIdx.x * 2 + !began) * dy.cols + c;
                TT__UNROLL for (int j = 0; j < 8; j++) if (j < width) p[j] = sum[j];
            } else if (id >= first && id - first < to.rows) {
                if (add) {
                    float old[8];
                    load_group(old, to, id - first, c, width, vector);
                    TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += old[j];
                }
                store8(row_at(to, id - first), to.dtype, c, width, vector, sum);
            }
            began = false;
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] = 0;
        }
    }
}

// Adds up what ids whose rows lie in several chunks left in `partial`: the chunk in which they begin does.
__global__ void __launch_bounds__(128) join_ids(const int32_t *ids, int64_t n, tt__mat to, int64_t first,
                                                bool add, bool vector, int64_t chunk, float *partial)
{
    tt__begin_kernel();
    const int64_t from = (int64_t)blockIdx.x * chunk, end = from + chunk;
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const int width = (int)min(to.cols - c, (int64_t)8);
    if (end >= n || width <= 0 || ids[end] != ids[end - 1]) return;
    const int32_t id = ids[end];
    const int64_t row = id - first;
    if ((from > 0 && ids[from - 1] == id) || row < 0 || row >= to.rows) return;
    int64_t low = end, high = n; // ids[low] == id, and those from high on are greater
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (ids[middle] == id) low = middle;
        else high = middle;
    }
    const int64_t last = low / chunk;
    const tt__mat parts = {partial, TT_F32, 2 * last + 2, to.cols, to.cols};
    const bool whole = to.cols % 8 == 0;
    float sum[8], v[8][8];
    load_group(sum, parts, (int64_t)blockIdx.x * 2 + 1, c, width, whole);
    for (int64_t b = blockIdx.x + 1; b <= last; b += 8) { // 8 loads are under way at a time
        int64_t at[8];
        TT__UNROLL for (int u = 0; u < 8; u++) at[u] = b + u <= last ? (b + u) * 2 : -1;
        load_rows(v, parts, at, c, width, whole);
        TT__UNROLL for (int u = 0; u < 8; u++)
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += v[u][j];
    }
    if (add) {
        float old[8];
        load_group(old, to, row, c, width, vector);
        TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += old[j];
    }
    store8(row_at(to, row), to.dtype, c, width, vector, sum);
}

cudaError_t run_table_backward(const tt__launch *l)
{
    tt__device *d = l->device;
    const bool embedding = l->instr->op == TT__OP_EMBEDDING_BACKWARD;
    const tt__mat *index = &l->in[embedding ? 0 : 1], *dy = &l->in[embedding ? 1 : 0], *to = &l->out[0];
    const int64_t n = index->rows, first = embedding ? l->first_row - l->instr->attr.offset : 0;
    const int64_t ids_end = embedding && l->whole_rows ? l->whole_rows : to->rows;
    const size_t each = tt__align_to((size_t)n * sizeof(int32_t), TT__CUDA_ALIGN);
    int32_t *array[4]; // ids and rows, and again
    for (int k = 0; k < 4; k++) array[k] = (int32_t *)((char *)l->workspace + k * each);
    const int32_t *ids = (const int32_t *)index->data, *rows = NULL;
    const bool ranked = n > 0 && n <= TT__RANKED;
    const size_t bytes = (size_t)to->rows * (size_t)to->cols * tt_dtype_bytes(to->dtype);
    const bool filled = ranked && to->ld == to->cols && (uintptr_t)to->data % 16 == 0 && bytes % 16 == 0;
    const op_fill zero = {0, NULL};
    cudaError_t e = cudaSuccess;
    if (!l->add[0] && !filled) e = run_groups(d, no_operand, no_operand, *to, false, false, zero);
    if (!n) return e;
    if (e == cudaSuccess && ranked) {
        const int64_t vectors = l->add[0] || !filled ? 0 : (int64_t)(bytes / 16);
        const int64_t fill = min((vectors + 4095) / 4096, 8 * (int64_t)d->properties.multiProcessorCount);
        e = TT__LAUNCH(rank_ids, blocks_for(n, 32) + (unsigned)fill, TT__ROW_THREADS, 0, d->stream, ids,
                       (int)n, array[0], array[1], (uint4 *)to->data, vectors);
        ids = array[0];
        rows = array[1];
    }
    const int64_t tiles = min((n + TT__SORT_STEP - 1) / TT__SORT_STEP, (int64_t)TT__SORT_TILES);
    const int64_t tile = ((n + tiles - 1) / tiles + TT__SORT_STEP - 1) / TT__SORT_STEP * TT__SORT_STEP;
    const int64_t blocks = (n + tile - 1) / tile;
    for (int shift = 0; e == cudaSuccess && !ranked && (shift == 0 || (ids_end - 1) >> shift > 0);
         shift += 8) {
        int32_t *to_ids = array[shift / 8 % 2 * 2], *to_rows = array[shift / 8 % 2 * 2 + 1];
        e = TT__LAUNCH(count_digits, (unsigned)blocks, TT__ROW_THREADS, 0, d->stream, ids, n, shift, tile,
                       resident_of(l)->words);
        if (e == cudaSuccess)
            e = TT__LAUNCH(scatter_digits, (unsigned)blocks, TT__ROW_THREADS, 0, d->stream, ids, rows, n,
                           shift, tile, resident_of(l)->words, to_ids, to_rows);
        ids = to_ids;
        rows = to_rows;
    }
    const int64_t room = max((int64_t)1, (int64_t)(resident_workspace::BYTES / ((size_t)dy->cols * 8)));
    const int64_t chunk = max((int64_t)(ranked ? 16 : 32), (n + room - 1) / room);
    const unsigned threads = dy->cols <= 256 ? 32 : dy->cols <= 512 ? 64 : dy->cols <= 768 ? 96 : 128;
    const dim3 grid(blocks_for(n, chunk), blocks_for(dy->cols, threads * 8));
    const bool vector = is_wide(dy) && is_wide(to);
    if (e == cudaSuccess)
        e = TT__LAUNCH(sum_ids, grid, threads, 0, d->stream, ids, rows, n, *dy, *to, first, l->add[0], vector,
                       chunk, resident_of(l)->sums);
    if (e == cudaSuccess && n > chunk)
        e = TT__LAUNCH(join_ids, grid, threads, 0, d->stream, ids, n, *to, first, l->add[0], vector, chunk,
                       resident_of(l)->sums);
    return e;
}

} // namespace
