#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../../cuda/kernels.cuh"
#include "../elementwise/cuda.cuh"
#include "../rows/cuda.cuh"

namespace {

// ---- gradients of tables: sort the rows of dy by id, and for equal ids by row; then sum rows of equal ids

#ifndef TT__SORT_TILES // max number of blocks of the radix sort, smaller in tests
#define TT__SORT_TILES 128
#endif
enum { TT__SORT_STEP = 1024 }; // number of ids that a block sorts at a time

// The kernels below run only once or twice in a step, so the device reads their code from its memory each
// time. Short code therefore saves more time than unrolled loops.

// Loads from[k], from[k + 32], from[k + 64] and from[k + 96], with all loads in flight together. Elements
// from number `end` on are 0.
__device__ __forceinline__ void load_ids(int32_t (&to)[4], const int32_t *from, int64_t k, int64_t end)
{
    TT__UNROLL for (int u = 0; u < 4; u++) to[u] = k + u * 32 < end ? from[k + u * 32] : 0;
}

// Sets counts[block][digit] to the number of the block's ids that have this digit. A digit is the 8 bits of
// an id from bit `shift` on.
__global__ void __launch_bounds__(TT__ROW_THREADS) count_digits(const int32_t *ids, int64_t n, int shift,
                                                                int64_t tile, unsigned *counts)
{
    tt__begin_kernel();
    TT__SHARED(unsigned, count, [256]);
    const int64_t from = (int64_t)blockIdx.x * tile, to = min(n, from + tile);
    count[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t at = from; at < to; at += TT__SORT_STEP) {
        const int64_t k = at + threadIdx.x / 32 * 128 + threadIdx.x % 32;
        int32_t id[4];
        load_ids(id, ids, k, to);
        TT__UNROLL for (int u = 0; u < 4; u++)
            if (k + u * 32 < to) atomicAdd(&count[(uint32_t)id[u] >> shift & 255], 1u);
    }
    __syncthreads();
    counts[(int64_t)blockIdx.x * 256 + threadIdx.x] = count[threadIdx.x];
}

// Sorts ids, and their rows, by digit. Ids with the same digit keep their order. If rows is NULL, the rows
// are 0, 1, ... Thread k of a block computes the counts and places of digit k.
__global__ void __launch_bounds__(TT__ROW_THREADS) scatter_digits(const int32_t *ids, const int32_t *rows,
                                                                  int64_t n, int shift, int64_t tile,
                                                                  const unsigned *counts, int32_t *to_ids,
                                                                  int32_t *to_rows)
{
    tt__begin_kernel();
    TT__SHARED(unsigned, place, [8][256]); // where each warp puts its next id with a given digit
    TT__SHARED(unsigned, totals, [8]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t from = (int64_t)blockIdx.x * tile, to = min(n, from + tile);
    unsigned before = 0, all = 0;
    for (unsigned b = 0; b < gridDim.x; b += 8) {
        unsigned count[8];
        TT__UNROLL for (unsigned u = 0; u < 8; u++)
            count[u] = b + u < gridDim.x ? counts[(int64_t)(b + u) * 256 + threadIdx.x] : 0;
        TT__UNROLL for (unsigned u = 0; u < 8; u++) {
            before += b + u < blockIdx.x ? count[u] : 0;
            all += count[u];
        }
    }
    unsigned sum = all; // becomes the number of ids with the digits of the warp's threads up to this thread
    for (int m = 1; m < 32; m *= 2) {
        const unsigned other = __shfl_up_sync(0xffffffffu, sum, m);
        if (lane >= m) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    TT__UNROLL for (int w = 0; w < 7; w++) before += w < warp ? totals[w] : 0;
    before += sum - all;
    for (int64_t at = from; at < to; at += TT__SORT_STEP) {
        const int64_t first = at + warp * 128 + lane;
        unsigned rank[4];
        int32_t id[4], row[4];
        load_ids(id, ids, first, to);
        TT__UNROLL for (int u = 0; u < 4; u++) row[u] = (int32_t)(first + u * 32);
        if (rows) load_ids(row, rows, first, to);
        TT__UNROLL for (int k = 0; k < 8; k++) place[warp][k * 32 + lane] = 0;
        __syncwarp();
        // rank: the number of ids with the same digit that come before an id among the warp's 128 ids.
        TT__UNROLL for (int u = 0; u < 4; u++) {
            const bool there = first + u * 32 < to;
            const unsigned digit = (uint32_t)id[u] >> shift & 255;
            const unsigned same = __match_any_sync(0xffffffffu, there ? digit : 256);
            const unsigned lower = same & ((1u << lane) - 1);
            rank[u] = place[warp][digit] + (unsigned)__popc(lower);
            __syncwarp();
            if (there && !lower) place[warp][digit] = rank[u] + (unsigned)__popc(same);
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
            if (first + u * 32 >= to) continue;
            const unsigned p = place[warp][(uint32_t)id[u] >> shift & 255] + rank[u];
            to_ids[p] = id[u];
            to_rows[p] = row[u];
        }
        __syncwarp();
    }
}

// Sorts up to TT__RANKED ids and their rows in one step: the place of an id is the number of ids that come
// before the id. A block finds the places of 32 ids; each of its 8 warps compares the 32 ids with an eighth
// of all ids. The other blocks write zeros to `zero`.
#ifndef TT__RANKED // tests make TT__RANKED smaller
#define TT__RANKED 8192
#endif
enum { TT__ZEROS = 4096 }; // number of 16-byte vectors of zeros that a block writes at a time
__global__ void __launch_bounds__(TT__ROW_THREADS) rank_ids(const int32_t *ids, int n, int32_t *to_ids,
                                                            int32_t *to_rows, uint4 *zero,
                                                            int64_t zero_vectors)
{
    tt__begin_kernel();
    const int ranking = (n + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    TT__SHARED(int32_t, all, [(TT__RANKED + 255) / 256 * 256]);
    TT__SHARED(unsigned, before, [8][32]);
    if ((int)blockIdx.x >= ranking) {
        const int64_t step = (int64_t)(gridDim.x - ranking) * TT__ZEROS;
        const int64_t begin = (int64_t)(blockIdx.x - ranking) * TT__ZEROS + threadIdx.x;
        TT__ROLLED for (int64_t k = begin; k < zero_vectors; k += step)
            TT__UNROLL for (int u = 0; u < TT__ZEROS; u += TT__ROW_THREADS)
                if (k + u < zero_vectors) zero[k + u] = make_uint4(0, 0, 0, 0);
        return;
    }
    const int from = (int)blockIdx.x * 32, each = ((n + 7) / 8 + 31) / 32 * 32; // each: ids per warp
    const int whole = (uintptr_t)ids % 16 == 0 ? n / 4 * 4 : 0;
    TT__ROLLED for (int k = threadIdx.x * 4; k < whole; k += 4 * TT__ROW_THREADS)
        tt__cp_async_16(all + k, ids + k);
    TT__ROLLED for (int k = whole + threadIdx.x; k < n; k += TT__ROW_THREADS)
        tt__cp_async_4(all + k, ids + k);
    // Pads the ids to 8 * each with fewer than 256 large ids.
    if (n + (int)threadIdx.x < 8 * each) all[n + threadIdx.x] = INT32_MAX - 1;
    tt__cp_async_commit();
    tt__cp_async_wait<0>();
    __syncthreads();
    const int32_t id = all[from + lane];
    unsigned count = 0;
    for (int at = warp * each; at < (warp + 1) * each; at += 32) {
        // Counts ids below `id` and, if they come before the block's 32 ids, also ids equal to `id`.
        const int32_t largest = id + (at < from);
        TT__UNROLL for (int k = 0; k < 32; k += 4) {
            const int4 of = *(const int4 *)(all + at + k);
            // The sign of a difference costs less than a comparison. The numbers are not negative, so no
            // difference overflows.
            count += (unsigned)(of.x - largest) >> 31;
            count += (unsigned)(of.y - largest) >> 31;
            count += (unsigned)(of.z - largest) >> 31;
            count += (unsigned)(of.w - largest) >> 31;
        }
    }
    TT__UNROLL for (int k = warp * 4; k < warp * 4 + 4; k++) count += k < lane && all[from + k] == id;
    before[warp][lane] = count;
    __syncthreads();
    if (warp || from + lane >= n) return;
    TT__UNROLL for (int k = 1; k < 8; k++) count += before[k][lane];
    to_ids[count] = id;
    to_rows[count] = from + lane;
}

enum { TT__SUMMED = 16 }; // max vectors in flight to each thread of sum_ids

// Copies 8 columns of row r, beginning with column c, asynchronously to shared memory as whole vectors.
__device__ __forceinline__ void copy_group(uint4 *to, const tt__mat &m, int64_t r, int64_t c)
{
    const int vectors = m.dtype == TT_F32 ? 2 : 1;
    const uint4 *p = (const uint4 *)row_at(m, r) + c / 8 * vectors;
    tt__cp_async_16(to, p);
    if (vectors == 2) tt__cp_async_16(to + 1, p + 1);
}

// Sums the rows of dy that have equal ids. A thread block sums a chunk of `chunk` rows in sorted order. The
// sum of an id whose rows are all in the chunk goes to row `id - first` of `to`, and is dropped if `to` has
// no such row. The sum of an id with rows in other chunks is partial: it goes to partial[block][0] if the
// chunk before has rows of the id, else to partial[block][1]. wide: dy and `to` have whole groups of 8
// columns at multiples of 16 bytes, and shared memory has room for the rows in flight. Reads dy and writes
// the rows of `to` once.
__global__ void __launch_bounds__(128) sum_ids(const int32_t *ids, const int32_t *rows, int64_t n, tt__mat dy,
                                               tt__mat to, int64_t first, bool add, bool wide, int64_t chunk,
                                               float *partial)
{
    tt__begin_kernel();
    TT__DYN_SHARED(uint4, coming);
    // Ids of the row before, of up to `largest` rows, and of the row after.
    TT__SHARED(int32_t, id, [TT__SUMMED + 2]);
    TT__SHARED(int32_t, row, [TT__SUMMED]);
    const int64_t from = (int64_t)blockIdx.x * chunk, end = min(n, from + chunk);
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const int width = (int)max((int64_t)0, min(dy.cols - c, (int64_t)8)), t = (int)threadIdx.x;
    const bool copies = wide && width > 0;
    const int vectors = dy.dtype == TT_F32 || (add && to.dtype == TT_F32) ? 2 : 1; // vectors in 8 columns
    const int largest = TT__SUMMED / vectors / (add ? 2 : 1), step = (int)blockDim.x * vectors;
    // own: the thread's columns of rows of dy; old: the thread's columns of rows of `to`.
    uint4 *const own = coming + t * vectors, *const old = own + largest * step;
    const tt__mat parts = {partial, TT_F32, 0, dy.cols, dy.cols};
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[8];
    bool began = false;
    TT__ROLLED for (int64_t k = from; k < end; k += largest) {
        const int count = (int)min(end - k, (int64_t)largest);
        __syncthreads();
        if (t < count + 2) id[t] = k + t > 0 && k + t <= n ? ids[k + t - 1] : -1; // -1: no row; ids are >= 0
        if (t < count) row[t] = rows[k + t];
        __syncthreads();
        TT__ROLLED for (int u = 0; u < count && copies; u++) {
            const int64_t r = id[u + 1] - first;
            copy_group(own + u * step, dy, row[u], c);
            if (add && id[u + 2] != id[u + 1] && r >= 0 && r < to.rows) copy_group(old + u * step, to, r, c);
        }
        tt__cp_async_commit();
        tt__cp_async_wait<0>();
        if (k == from) began = id[0] == id[1];
        TT__ROLLED for (int u = 0; u < count && width > 0; u++) {
            if (copies) load8(v, own + u * step, dy.dtype, 0, 8, true);
            else load_group(v, dy, row[u], c, width, false);
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += v[j];
            const bool last = id[u + 2] != id[u + 1];
            if (!last && k + u + 1 < end) continue;
            const int64_t r = id[u + 1] - first;
            if (began || !last) {
                store8(row_at(parts, (int64_t)blockIdx.x * 2 + !began), TT_F32, c, width, wide, sum);
            } else if (r >= 0 && r < to.rows) {
                if (add && copies) load8(v, old + u * step, to.dtype, 0, 8, true);
                else if (add) load_group(v, to, r, c, width, false);
                TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += add ? v[j] : 0;
                store8(row_at(to, r), to.dtype, c, width, wide, sum);
            }
            began = false;
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] = 0;
        }
    }
}

// Sums the partial sums of ids whose rows are in several chunks. The block of the chunk in which an id begins
// sums the partial sums of this id.
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
    int64_t low = end, high = n; // ids[low] == id; ids from ids[high] on are larger
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
    for (int64_t b = blockIdx.x + 1; b <= last; b += 8) { // 8 loads are in flight at a time
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
    int32_t *array[4]; // two pairs of arrays: ids and rows
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
        const int64_t fill = min((vectors + TT__ZEROS - 1) / TT__ZEROS,
                                 8 * (int64_t)d->properties.multiProcessorCount);
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
    const bool vector = is_wide(dy) && is_wide(to), whole = vector && dy->cols % 8 == 0;
    if (e == cudaSuccess)
        e = TT__LAUNCH(sum_ids, grid, threads, whole ? threads * TT__SUMMED * sizeof(uint4) : 0, d->stream,
                       ids, rows, n, *dy, *to, first, l->add[0], whole, chunk, resident_of(l)->sums);
    if (e == cudaSuccess && n > chunk)
        e = TT__LAUNCH(join_ids, grid, threads, 0, d->stream, ids, n, *to, first, l->add[0], vector, chunk,
                       resident_of(l)->sums);
    return e;
}
TT__RUN_BY(EMBEDDING_BACKWARD, run_table_backward, 0, MAX_SUM_COLUMNS)
TT__RUN_BY(GATHER_ROWS_BACKWARD, run_table_backward, 0, MAX_SUM_COLUMNS)

} // namespace
