#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "cuda_shared.cuh"

namespace {

// ---- attention in f32 arithmetic, for any dtypes, strides and head sizes. A block of 256 threads works on
// tiles of 64 queries and 64 keys. Thread (x, y) of 16 x 16 has the scores of rows `y + 16 * a` and columns
// `x + 16 * b`, for a and b in 0 to 3, and the outputs of rows `y + 16 * a` and columns `4 * x` to
// `4 * x + 3`. A block makes 64 columns of a head; several blocks make a larger head, and each of them
// computes the scores.

struct attention_rows { // `count` rows of the matrix m
    const tt__mat *m;
    const int32_t *at; // row numbers; NULL: the rows from `first` on
    int first, count;
};

// Copies COLUMNS columns of the rows x, beginning with column `column`, into `to` (64, PITCH). columns:
// number of columns that x has from column `column` on. Columns that x lacks, and rows after the last row of
// x, become zeros.
template <int COLUMNS, int PITCH>
__device__ __forceinline__ void attention_stage(float *to, const attention_rows &x, int64_t column,
                                                int columns)
{
    const tt__mat &m = *x.m;
    const bool whole = m.dtype == TT_F32 && columns >= COLUMNS && m.ld % 4 == 0 && column % 4 == 0 &&
        (uintptr_t)m.data % 16 == 0;
    for (int i = (int)threadIdx.x; i < 64 * COLUMNS / 4; i += 256) {
        const int r = i / (COLUMNS / 4), c = i % (COLUMNS / 4) * 4;
        float4 v = make_float4(0, 0, 0, 0);
        if (r < x.count) {
            const int64_t from = (int64_t)(x.at ? x.at[x.first + r] : x.first + r) * m.ld + column + c;
            if (whole) v = *(const float4 *)((const float *)m.data + from);
            else {
                if (c < columns) v.x = load_any(m.data, m.dtype, from);
                if (c + 1 < columns) v.y = load_any(m.data, m.dtype, from + 1);
                if (c + 2 < columns) v.z = load_any(m.data, m.dtype, from + 2);
                if (c + 3 < columns) v.w = load_any(m.data, m.dtype, from + 3);
            }
        }
        *(float4 *)(to + r * PITCH + c) = v;
    }
}

// ATTENTION_STAGE: floats of two staged matrices, (64, 36) each. ATTENTION_PITCH: floats from row to row of a
// tile. The pitches 36 and 68 spread the rows that a warp reads over the banks.
enum { ATTENTION_STAGE = 2 * 64 * 36, ATTENTION_PITCH = 68 };

// Computes s = a b^T, summed over the columns of head a_head of a and head b_head of b. Has barriers at the
// beginning and before the end; threads may still read `stage` after the last barrier.
__device__ __forceinline__ void attention_scores(float (&s)[4][4], float *stage, const attention_rows &a,
                                                 const attention_rows &b, int a_head, int b_head,
                                                 int head_size)
{
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const float *as = stage + y * 36, *bs = stage + 64 * 36 + x * 36;
    TT__UNROLL for (int i = 0; i < 4; i++) TT__UNROLL for (int j = 0; j < 4; j++) s[i][j] = 0;
    for (int c = 0; c < head_size; c += 32) {
        __syncthreads();
        attention_stage<32, 36>(stage, a, (int64_t)a_head * head_size + c, head_size - c);
        attention_stage<32, 36>(stage + 64 * 36, b, (int64_t)b_head * head_size + c, head_size - c);
        __syncthreads();
        for (int k = 0; k < 32; k += 4) {
            float4 u[4], w[4];
            TT__UNROLL for (int i = 0; i < 4; i++) u[i] = *(const float4 *)(as + i * 16 * 36 + k);
            TT__UNROLL for (int i = 0; i < 4; i++) w[i] = *(const float4 *)(bs + i * 16 * 36 + k);
            TT__UNROLL for (int i = 0; i < 4; i++)
                TT__UNROLL for (int j = 0; j < 4; j++) {
                    s[i][j] = fmaf(u[i].x, w[j].x, s[i][j]);
                    s[i][j] = fmaf(u[i].y, w[j].y, s[i][j]);
                    s[i][j] = fmaf(u[i].z, w[j].z, s[i][j]);
                    s[i][j] = fmaf(u[i].w, w[j].w, s[i][j]);
                }
        }
    }
}

// Adds the product of tile (64, ATTENTION_PITCH) and y to `to`. Multiplies up to 64 of y's `columns` columns,
// beginning with column `column`. Has a barrier before the tile is read, and none after the last read.
__device__ __forceinline__ void attention_add(float (&to)[4][4], const float *tile, float *stage,
                                              const attention_rows &y, int64_t column, int columns)
{
    const float *ts = tile + threadIdx.x / 16 * ATTENTION_PITCH, *ys = stage + threadIdx.x % 16 * 4;
    __syncthreads();
    attention_stage<64, ATTENTION_PITCH>(stage, y, column, columns);
    __syncthreads();
    for (int k = 0; k < 64; k += 4) {
        float4 u[4], w[4];
        TT__UNROLL for (int i = 0; i < 4; i++) u[i] = *(const float4 *)(ts + i * 16 * ATTENTION_PITCH + k);
        TT__UNROLL for (int i = 0; i < 4; i++) w[i] = *(const float4 *)(ys + (k + i) * ATTENTION_PITCH);
        TT__UNROLL for (int i = 0; i < 4; i++) {
            to[i][0] = fmaf(u[i].w, w[3].x,
                            fmaf(u[i].z, w[2].x, fmaf(u[i].y, w[1].x, fmaf(u[i].x, w[0].x, to[i][0]))));
            to[i][1] = fmaf(u[i].w, w[3].y,
                            fmaf(u[i].z, w[2].y, fmaf(u[i].y, w[1].y, fmaf(u[i].x, w[0].y, to[i][1]))));
            to[i][2] = fmaf(u[i].w, w[3].z,
                            fmaf(u[i].z, w[2].z, fmaf(u[i].y, w[1].z, fmaf(u[i].x, w[0].z, to[i][2]))));
            to[i][3] = fmaf(u[i].w, w[3].w,
                            fmaf(u[i].z, w[2].w, fmaf(u[i].y, w[1].w, fmaf(u[i].x, w[0].w, to[i][3]))));
        }
    }
}

// Multiplies `from` by `scale`, and writes the results to the thread's four columns of a row of m or, if
// `add`, adds them to these columns.
__device__ __forceinline__ void attention_write(const tt__mat &m, int64_t row, int64_t column, int columns,
                                                const float (&from)[4], float scale, bool add)
{
    const int x = threadIdx.x % 16 * 4;
    TT__UNROLL for (int j = 0; j < 4; j++) {
        if (x + j >= columns) break;
        const int64_t at = row * m.ld + column + x + j;
        store_any(m.data, m.dtype, at, from[j] * scale + (add ? load_any(m.data, m.dtype, at) : 0));
    }
}

// Sets keep, (64 queries, 4 groups of 16 keys), to the results of attention_keep for 64 keys, beginning with
// `key`. A barrier must follow before `keep` is read.
__device__ __forceinline__ void attention_draw(uint16_t *keep, const attention_args &p, uint64_t random,
                                               const int32_t *rows, int first, int count, int key, int head)
{
    const int r = threadIdx.x % 64, group = threadIdx.x / 64, query = first + min(r, count - 1);
    keep[r * 4 + group] = (uint16_t)attention_keep(p, random, rows ? rows[query] : query, key / 16 + group,
                                                   p.first_head + head);
}

// Counts how often each of a tile's `count` queries sees each block of keys that has any of the 64 keys from
// `key` on. Writes the counts to times (64 queries, 64 blocks), where block 0 is the block of `key`. Returns
// false if no query sees any of these blocks. All threads of the thread block must call the function.
__device__ __forceinline__ bool attention_time_tile(unsigned char *times, const attention_args &p,
                                                    const attention_tile &t, int first, int count, int key,
                                                    int blocks, int head)
{
    const int from = key / p.block, to = min(blocks, (key + 63) / p.block + 1);
    int any = 0;
    for (int i = (int)threadIdx.x; i < 64 * (to - from); i += 256) {
        const int r = i % 64, row = attention_row(p, first + min(r, count - 1)) - t.begin;
        const int n = attention_times(p, p.first_head + head, blocks, row / p.block, from + i / 64);
        times[r * 64 + i / 64] = (unsigned char)min(n, 255);
        any |= n;
    }
    return __syncthreads_or(any) != 0;
}

// The work of a thread block of the f32 kernels: tile `t` of head `head`, and one part of the head's columns.
// skip: number of the head's columns before the part; columns: number of the remaining columns.
struct attention_block { attention_tile t; int head, skip, columns; };

// Returns the work of thread block number `block`. heads: number of heads over which the blocks are divided.
__device__ __forceinline__ attention_block attention_block_at(const attention_args &p, const int32_t *start,
                                                              int heads, int64_t block)
{
    attention_block b;
    const int parts = (p.head_size + 63) / 64;
    b.head = (int)(block / parts % heads);
    b.skip = (int)(block % parts) * 64;
    b.columns = p.head_size - b.skip;
    b.t = attention_find<64>(p, start, (int)(block / parts / heads));
    return b;
}

// Computes the forward in f32 arithmetic. NEAR: attention with a window or ALiBi, or block-sparse attention.
template <bool NEAR>
__global__ __launch_bounds__(256, NEAR ? 1 : 2) void attention_forward_any(attention_args p)
{
    tt__begin_kernel();
    TT__SHARED(float, stage, [ATTENTION_STAGE]);
    TT__SHARED(float, tile, [64 * ATTENTION_PITCH]);
    TT__SHARED(uint16_t, keep, [64 * 4]);
    TT__SHARED(unsigned char, times, [64 * 64]);
    const attention_block b = attention_block_at(p, p.query_start, p.heads, blockIdx.x);
    const attention_tile t = b.t;
    const int key_head = b.head / p.group, column = b.head * p.head_size + b.skip;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    if (t.at < 0) return;
    const uint64_t random = attention_key(p);
    const attention_rows q = {&p.q, p.query_at, t.first + t.at, min(64, t.queries - t.at)};
    const int end = NEAR ? attention_window_end(p, t, q.count) : attention_end(p, t, q.count);
    const float slope = NEAR ? attention_slope(p, p.first_head + b.head) : 0;
    const int blocks = NEAR ? attention_blocks(p, t.length) : 0;
    float largest[4], sum[4], out[4][4];
    int row[4]; // row[a]: the tile's row y + 16 a, counted in the sequence
    TT__UNROLL for (int a = 0; a < 4; a++) {
        row[a] = attention_row(p, q.first + min(y + 16 * a, q.count - 1)) - t.begin;
        largest[a] = -3.4028235e38f;
        sum[a] = 0;
        TT__UNROLL for (int c = 0; c < 4; c++) out[a][c] = 0;
    }
    for (int key = NEAR ? attention_window_begin(p, t) & -64 : 0; key < end; key += 64) {
        const attention_rows k = {&p.k, NULL, t.begin + key, min(64, t.length - key)};
        const attention_rows v = {&p.v, NULL, k.first, k.count};
        float s[4][4];
        if (blocks && !attention_time_tile(times, p, t, q.first, q.count, key, blocks, b.head)) continue;
        if (p.drop) attention_draw(keep, p, random, p.query_row, q.first, q.count, key, b.head);
        attention_scores(s, stage, q, k, b.head, key_head, p.head_size);
        TT__UNROLL for (int a = 0; a < 4; a++) {
            float now = largest[a], factor, total = 0, often[4];
            TT__UNROLL for (int c = 0; c < 4; c++) {
                const int i = key + x + 16 * c;
                bool seen = NEAR ? attention_sees(p, row[a], i, t.length)
                                 : i <= (p.causal ? row[a] : t.length - 1);
                often[c] = !NEAR || !blocks || !seen
                    ? 1 : times[(y + 16 * a) * 64 + i / p.block - key / p.block];
                if (NEAR) seen = seen && often[c] != 0;
                const float bias = NEAR ? attention_bias(p, slope, row[a], i) : 0;
                s[a][c] = seen ? (s[a][c] * p.scale - bias) * TT__LOG2E : -INFINITY;
                now = fmaxf(now, s[a][c]);
            }
            TT__UNROLL for (int m = 8; m; m >>= 1) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, m));
            factor = exp2f(largest[a] - now);
            largest[a] = now;
            TT__UNROLL for (int c = 0; c < 4; c++) {
                const int i = x + 16 * c;
                float weight = exp2f(s[a][c] - now);
                if (NEAR) weight *= often[c];
                total += weight;
                if (p.drop && !(keep[(y + 16 * a) * 4 + i / 16] >> i % 16 & 1)) weight = 0;
                tile[(y + 16 * a) * ATTENTION_PITCH + i] = weight;
                out[a][c] *= factor;
            }
            sum[a] = sum[a] * factor + total;
        }
        attention_add(out, tile, stage, v, key_head * p.head_size + b.skip, b.columns);
    }
    TT__UNROLL for (int a = 0; a < 4; a++) {
        TT__UNROLL for (int m = 8; m; m >>= 1) sum[a] += __shfl_xor_sync(0xffffffffu, sum[a], m);
        if (y + 16 * a >= q.count) continue;
        const int query = q.first + y + 16 * a;
        const int64_t row = p.query_at ? p.query_at[query] : query;
        attention_write(p.out, row, column, b.columns, out[a], p.keep_scale / sum[a], false);
        if (x == 0 && b.skip == 0)
            p.lse[row * p.heads + b.head] = largest[a] / TT__LOG2E + logf(sum[a]);
    }
}

// Turns one product q k^T (`weight`) into the weight after dropout, and the product dout v^T (`dscore`) into
// the gradient of the score without the factor `scale`. seen: how many times the query sees the key; bias:
// the number that ALiBi subtracts from the score.
__device__ __forceinline__ void attention_gradient(const attention_args &p, float &weight, float &dscore,
                                                   int seen, bool kept, float bias, float lse,
                                                   float delta)
{
    const float w = seen ? (float)seen * exp2f((weight * p.scale - bias - lse) * TT__LOG2E) : 0;
    dscore = seen ? w * ((kept ? dscore * p.keep_scale : 0) - delta) : 0;
    weight = kept ? w : 0;
}

__global__ __launch_bounds__(256, 1) void attention_dq_any(attention_args p)
{
    tt__begin_kernel();
    TT__SHARED(float, stage, [ATTENTION_STAGE]);
    TT__SHARED(float, tile, [64 * ATTENTION_PITCH]);
    TT__SHARED(uint16_t, keep, [64 * 4]);
    TT__SHARED(unsigned char, times, [64 * 64]);
    const attention_block b = attention_block_at(p, p.query_start, p.heads, blockIdx.x);
    const attention_tile t = b.t;
    const int key_head = b.head / p.group, column = b.head * p.head_size + b.skip;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    if (t.at < 0) return;
    const uint64_t random = attention_key(p);
    const attention_rows q = {&p.q, p.query_at, t.first + t.at, min(64, t.queries - t.at)};
    const attention_rows dout = {&p.dout, p.query_at, q.first, q.count};
    const int end = attention_window_end(p, t, q.count);
    const float slope = attention_slope(p, p.first_head + b.head);
    const int blocks = attention_blocks(p, t.length);
    float lse[4], delta[4], dq[4][4];
    int row[4];
    TT__UNROLL for (int a = 0; a < 4; a++) {
        const int query = q.first + min(y + 16 * a, q.count - 1);
        const int64_t at = attention_sums_at(p, query, b.head);
        row[a] = attention_row(p, query) - t.begin;
        lse[a] = p.lse[at];
        delta[a] = p.delta[at];
        TT__UNROLL for (int c = 0; c < 4; c++) dq[a][c] = 0;
    }
    for (int key = attention_window_begin(p, t) & -64; key < end; key += 64) {
        const attention_rows k = {&p.k, NULL, t.begin + key, min(64, t.length - key)};
        const attention_rows v = {&p.v, NULL, k.first, k.count};
        float s[4][4], ds[4][4];
        if (blocks && !attention_time_tile(times, p, t, q.first, q.count, key, blocks, b.head)) continue;
        if (p.drop) attention_draw(keep, p, random, p.query_row, q.first, q.count, key, b.head);
        attention_scores(s, stage, q, k, b.head, key_head, p.head_size);
        attention_scores(ds, stage, dout, v, b.head, key_head, p.head_size);
        TT__UNROLL for (int a = 0; a < 4; a++)
            TT__UNROLL for (int c = 0; c < 4; c++) {
                const int i = x + 16 * c;
                const bool kept = !p.drop || (keep[(y + 16 * a) * 4 + i / 16] >> i % 16 & 1);
                int seen = attention_sees(p, row[a], key + i, t.length);
                if (blocks && seen) seen = times[(y + 16 * a) * 64 + (key + i) / p.block - key / p.block];
                attention_gradient(p, s[a][c], ds[a][c], seen, kept,
                                   attention_bias(p, slope, row[a], key + i), lse[a], delta[a]);
                tile[(y + 16 * a) * ATTENTION_PITCH + i] = ds[a][c];
            }
        attention_add(dq, tile, stage, k, key_head * p.head_size + b.skip, b.columns);
    }
    TT__UNROLL for (int a = 0; a < 4; a++) {
        if (y + 16 * a >= q.count) continue;
        const int query = q.first + y + 16 * a;
        attention_write(p.dq, p.query_at ? p.query_at[query] : query, column, b.columns, dq[a], p.scale,
                        p.add_dq);
    }
}

// Transposes squares of 8 x 8 bits over 8 lanes whose numbers differ only in bits 2 to 4. `group`, from 0 to
// 7, is the value of these bits. In each byte of x, bit i of the lane with group k becomes bit k of the lane
// with group i.
__device__ __forceinline__ uint32_t attention_turn_bits(uint32_t x, int group)
{
    TT__UNROLL for (int k = 1; k < 8; k *= 2) {
        const int odd = group & k;
        uint32_t stays = 0xffu / (1 + (1 << k)) * 0x01010101u << odd;
        tt__forget(stays);
        const uint32_t y = __shfl_xor_sync(0xffffffffu, x, 4 * k);
        x = (x & stays) | (__funnelshift_l(y, y, k - 2 * odd) & ~stays);
    }
    return x;
}

// Returns, as bits, which of a thread's weights dropout keeps. Rows of the weights are the warp's keys,
// columns are QUERIES queries. In the thread's fragment of an mma, element e of half h in row tile m and
// column tile n has bit `8 * (2 * e + h) + m * QUERIES / 8 + n`. rows: the queries' rows of the batch; first:
// the warp's first key, divided by 16.
template <int MT, int QUERIES>
__device__ __forceinline__ uint32_t attention_draw_columns(const attention_args &p, uint64_t random,
                                                           const int *rows, int first, int head,
                                                           uint32_t thread = threadIdx.x)
{
    enum { ACROSS = QUERIES / 8, TILES = MT * ACROSS };
    static_assert(TILES == 8 || TILES == 4, "a thread draws for two queries or one");
    const int group = thread % 32 / 4, pair = thread % 4 * 2;
    if (!p.drop) return 0xffffffffu;
    // Eight threads have the same two columns; each of them draws for 16 keys.
    const int *const row = rows + group % ACROSS * 8 + pair;
    const int at = first + group % TILES / ACROSS;
    if (TILES == 8) {
        const uint32_t bits = attention_keep(p, random, row[0], at, head);
        return attention_turn_bits(bits | attention_keep(p, random, row[1], at, head) << 16, group);
    }
    const uint32_t bits = attention_turn_bits(attention_keep(p, random, row[group / 4], at, head), group);
    return (bits & 0x0f0f) | (bits & 0xf0f0) << 12;
}

// Returns the bits that attention_draw_columns would return, but reads them from `bits`, to which
// attention_fetch_bits has copied them. bits: the bits of QUERIES queries and the warp's first 16 keys.
template <int MT, int QUERIES>
__device__ __forceinline__ uint32_t attention_read_columns(const unsigned char *bits)
{
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    uint32_t keep = 0;
    TT__UNROLL for (int i = MT * QUERIES / 8 - 1; i >= 0; i--) // the bits of two queries and 16 keys
        keep = 2 * keep + (*(const uint32_t *)(bits + 16 * i + 2 * pair) >> group & 0x01010101u);
    return keep;
}

// Makes dk and dv in f32 arithmetic. Rows of scores are keys here, columns are queries.
__global__ __launch_bounds__(256, 1) void attention_dkdv_any(attention_args p)
{
    tt__begin_kernel();
    TT__SHARED(float, stage, [ATTENTION_STAGE]);
    TT__SHARED(float, tile, [64 * ATTENTION_PITCH]);
    TT__SHARED(uint16_t, keep, [64 * 4]);
    TT__SHARED(unsigned char, times, [64 * 64]);
    const attention_block b = attention_block_at(p, p.seq_start, p.heads / p.group, blockIdx.x);
    const attention_tile t = b.t;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    if (t.at < 0) return;
    const uint64_t random = attention_key(p);
    const attention_rows k = {&p.k, NULL, t.begin + t.at, min(64, t.length - t.at)};
    const attention_rows v = {&p.v, NULL, k.first, k.count};
    float dk[4][4], dv[4][4];
    TT__UNROLL for (int a = 0; a < 4; a++) TT__UNROLL for (int c = 0; c < 4; c++) dk[a][c] = dv[a][c] = 0;
    const int blocks = attention_blocks(p, t.length);
    for (int head = b.head * p.group; head < (b.head + 1) * p.group; head++) {
        const int64_t column = (int64_t)head * p.head_size + b.skip;
        const float slope = attention_slope(p, p.first_head + head);
        for (int from = attention_queries_begin(p, t); from < attention_queries_end(p, t, k.count);
             from += 64) {
            const attention_rows q = {&p.q, p.query_at, t.first + from, min(64, t.queries - from)};
            const attention_rows dout = {&p.dout, p.query_at, q.first, q.count};
            float s[4][4], ds[4][4];
            if (blocks && !attention_time_tile(times, p, t, q.first, q.count, t.at, blocks, head)) continue;
            if (p.drop) attention_draw(keep, p, random, p.query_row, q.first, q.count, t.at, head);
            attention_scores(s, stage, k, q, b.head, head, p.head_size);
            attention_scores(ds, stage, v, dout, b.head, head, p.head_size);
            TT__UNROLL for (int c = 0; c < 4; c++) {
                const int i = x + 16 * c, query = q.first + min(i, q.count - 1);
                const int64_t at = attention_sums_at(p, query, head);
                const int row = attention_row(p, query) - t.begin;
                const float lse = p.lse[at], delta = p.delta[at];
                TT__UNROLL for (int a = 0; a < 4; a++) {
                    const int r = y + 16 * a;
                    const bool kept = !p.drop || (keep[i * 4 + r / 16] >> r % 16 & 1);
                    int seen = i < q.count && attention_sees(p, row, t.at + r, t.length);
                    if (blocks && seen) seen = times[i * 64 + (t.at + r) / p.block - t.at / p.block];
                    attention_gradient(p, s[a][c], ds[a][c], seen, kept,
                                       attention_bias(p, slope, row, t.at + r), lse, delta);
                    tile[r * ATTENTION_PITCH + i] = s[a][c];
                }
            }
            attention_add(dv, tile, stage, dout, column, b.columns);
            __syncthreads();
            TT__UNROLL for (int a = 0; a < 4; a++)
                TT__UNROLL for (int c = 0; c < 4; c++)
                    tile[(y + 16 * a) * ATTENTION_PITCH + x + 16 * c] = ds[a][c];
            attention_add(dk, tile, stage, q, column, b.columns);
        }
    }
    // The same thread stores an element of dk and of dv, because dk and dv may have the same memory.
    const int64_t column = (int64_t)b.head * p.head_size + b.skip;
    TT__UNROLL for (int a = 0; a < 4; a++) {
        if (y + 16 * a >= k.count) continue;
        if (p.dk.data)
            attention_write(p.dk, k.first + y + 16 * a, column, b.columns, dk[a], p.scale, p.add_dk);
        if (p.dv.data)
            attention_write(p.dv, k.first + y + 16 * a, column, b.columns, dv[a], p.keep_scale, p.add_dv);
    }
}

} // namespace
