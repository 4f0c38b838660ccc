#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "cuda_shared.cuh"
#include "cuda_f32.cuh"
#include "cuda_cores.cuh"

namespace {

// ------------------------------------------------------------------- the backward on tensor cores (mma.sync)

// Returns the sum of dout * out over a head's columns of row `row`. The four threads that have the row's
// scores compute the sum together.
template <class T>
__device__ __forceinline__ float attention_delta_of(const attention_args &p, int row, int head)
{
    const T *out = (const T *)p.out.data + row * p.out.ld + (int64_t)head * p.head_size;
    const T *dout = (const T *)p.dout.data + row * p.dout.ld + (int64_t)head * p.head_size;
    float sum = 0;
    for (int c = threadIdx.x % 4 * 8; c < p.head_size; c += 32) {
        float x[8], y[8];
        widen8<T>(x, *(const uint4 *)(out + c));
        widen8<T>(y, *(const uint4 *)(dout + c));
        TT__UNROLL for (int i = 0; i < 8; i++) sum += x[i] * y[i];
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// Gets, for a thread's queries, the log-sum-exps of the scores (converted to base 2) and the sums of dout *
// out. If p.sums_deltas, the sums of dout * out are computed and stored; otherwise they are read.
template <class T, int MT>
__device__ __forceinline__ void attention_row_sums(float (&lse)[MT][2], float (&delta)[MT][2],
                                                   const attention_args &p, const attention_queries<MT> &b)
{
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            const int query = b.first + min(b.mine + 16 * m + 8 * h + (int)threadIdx.x % 32 / 4, b.count - 1);
            const int64_t at = attention_sums_at(p, query, b.head);
            lse[m][h] = p.lse[at] * TT__LOG2E;
            if (p.sums_deltas) {
                delta[m][h] = attention_delta_of<T>(p, p.query_at ? p.query_at[query] : query, b.head);
                if (b.pair == 0 && b.mine + 16 * m + 8 * h + (int)threadIdx.x % 32 / 4 < b.count)
                    p.delta[at] = delta[m][h];
            } else {
                delta[m][h] = p.delta[at];
            }
        }
}

// Turns the products q k^T (s) and dout v^T (g) into the gradients of scores (g), without the factor `scale`.
// Rows are queries, columns are keys from `key` on. often: how many times the queries see the keys.
template <int MT, int KEYS, attention_kind KIND>
__device__ __forceinline__ void attention_row_slopes(float (&s)[MT][KEYS / 8][4],
                                                     float (&g)[MT][KEYS / 8][4], const attention_args &p,
                                                     const attention_queries<MT> &b,
                                                     const uint32_t (&keep)[MT * KEYS / 64],
                                                     const float (&lse)[MT][2], const float (&delta)[MT][2],
                                                     int key, float factor, float slope, int often)
{
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            const int last = key + KEYS <= b.all ? KEYS + 0
                : (p.causal ? b.row[m][h] - b.t.begin : b.t.length - 1) - key - b.pair;
            const int row = b.row[m][h] - b.t.begin, ahead = row - key - b.pair;
            const int smallest = max(p.smallest, row - b.t.length + 1);
            TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                TT__UNROLL for (int i = 0; i < 2; i++) {
                    float &x = s[m][n][2 * h + i], &y = g[m][n][2 * h + i];
                    const int d = ahead - 8 * n - i;
                    if (NEAR) x = fmaf(-slope, fabsf((float)d), x);
                    x = (NEAR ? d < smallest || d > p.largest : 8 * n + i > last)
                        ? 0 : tt__exp2(fmaf(x, factor, -lse[m][h]));
                    if (BLOCKS) x *= (float)often;
                    y = x * ((attention_kept<MT, KEYS>(keep, m, h, n, i) ? y * p.keep_scale
                              : 0) - delta[m][h]);
                }
        }
}

template <class T, int D, int MT, int KEYS, attention_kind KIND>
__global__ __launch_bounds__(128, 2) void attention_dq(attention_args p)
{
    tt__begin_kernel();
    enum { WARPS = 4, QUERIES = 16 * MT * WARPS, PITCH = D + 8 };
    TT__SHARED(uint64_t, random, ); // in shared memory, or Philox's round keys would stay in registers
    TT__SHARED(float, part, [WARPS][D]);
    TT__SHARED(unsigned char *, kept_at, [WARPS]); // place of the bits of the warp's first query and key 0
    TT__DYN_SHARED(T, qs);
    T *ds = qs + QUERIES * PITCH, *ks = ds + QUERIES * PITCH;
    T *vs = ks + 2 * KEYS * PITCH;
    attention_queries<MT> b;
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    const bool keeps = KIND == PLAIN && D <= 64 && p.bits;
    if (!attention_find_queries<KIND == NEARBY, MT, WARPS>(b, p)) {
        attention_write_sums<D>(p.sums_q, attention_sums_begin(p, p.heads, b.head), part, 0, p.head_size,
                                (int)threadIdx.x);
        return;
    }
    const attention_tile &t = b.t;
    const int head = b.head, mine = b.mine, first = b.first, count = b.count, begin = b.begin & -KEYS;
    attention_sparse sparse = {0, 0, 0};
    if (BLOCKS) sparse = attention_sparse_of(p, t.length, t.at, count);
    const float factor = p.scale * TT__LOG2E, slope = NEAR ? attention_slope(p, head) / p.scale : 0;
    if (threadIdx.x == 0) random = attention_key(p);
    if (keeps && threadIdx.x % 32 == 0)
        kept_at[threadIdx.x / 32] = attention_bits(p, attention_bits_begin(p, t), (t.at + mine) / 64, 0, head)
            + mine % 64 * 2;
    attention_fetch<T, D, QUERIES>(qs, p.q, p.query_at, first, count, head, p.head_size);
    attention_fetch<T, D, QUERIES>(ds, p.dout, p.query_at, first, count, head, p.head_size);
    attention_fetch_keys<T, D, KEYS>(ks, vs, p, t, begin, 0, head);
    float lse[MT][2], delta[MT][2], dq[MT][D / 8][4];
    attention_clear(dq);
    attention_row_sums<T>(lse, delta, p, b);
    for (int key = begin, next, stage = 0; key < b.end; key = next, stage ^= 1) {
        const T *kt = ks + stage * KEYS * PITCH, *vt = vs + stage * KEYS * PITCH;
        next = key + KEYS;
        if (BLOCKS && next < b.end) next = attention_seen_from<false>(p, sparse, head, next, b.end);
        tt__cp_async_wait<0>();
        __syncthreads();
        if (next < b.end) attention_fetch_keys<T, D, KEYS>(ks, vs, p, t, next, stage ^ 1, head);
        if (mine >= count || attention_after<MT, KIND>(p, t.at + mine, key)) continue;
        int often = 1;
        if (BLOCKS && sparse.n)
            often = attention_times(p, head, sparse.n, (t.at + mine) / p.block, key / p.block);
        if (often == 0) continue;
        uint32_t keep[MT * KEYS / 64];
        float s[MT][KEYS / 8][4], g[MT][KEYS / 8][4];
        unsigned char *bits = NULL;
        if (keeps)
            bits = kept_at[threadIdx.x / 32] + key / 64 * ((int64_t)p.heads * TT__CUDA_ATTENTION_BITS)
                + key % 64 * 8;
        attention_draw_rows<MT, KEYS>(keep, p, random, b.row, key, head, bits);
        attention_mma<T, D, MT, KEYS>(s, qs + mine * PITCH, kt);
        attention_mma<T, D, MT, KEYS>(g, ds + mine * PITCH, vt);
        attention_row_slopes<MT, KEYS, KIND>(s, g, p, b, keep, lse, delta, key, factor, slope, often);
        attention_mma_add<T, D, MT, KEYS>(dq, g, kt);
    }
    attention_columns<T, D> columns;
    columns.clear();
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            const int i = mine + 16 * m + 8 * h + (int)threadIdx.x % 32 / 4;
            if (i >= count) continue;
            attention_store<T, D>(p.dq, p.query_at ? p.query_at[first + i] : first + i, head, p.head_size,
                                  dq[m], h, p.scale, p.add_dq, threadIdx.x % 32, columns, p.sums_q);
        }
    if (!p.sums_q) return;
    columns.write(part[threadIdx.x / 32], threadIdx.x % 32, false);
    __syncthreads();
    attention_write_sums<D>(p.sums_q, attention_sums_begin(p, p.heads, head), part, WARPS, p.head_size,
                            (int)threadIdx.x);
}

// Copies QUERIES queries, beginning with query number `first`, into buffer `stage` (0 or 1). n: number of
// queries from `first` to the sequence's end. qs holds first q and then dout, each as (2, QUERIES, PITCH):
// one matrix for each stage. lses holds first log-sum-exps and then deltas, each as (2, QUERIES); after the
// last query both become 0. rows, (2, QUERIES), gets the queries' rows of the batch.
template <class T, int D, int QUERIES, int THREADS, bool WIDE = false>
__device__ __forceinline__ void attention_fetch_queries(T *qs, float *lses, int *rows,
                                                        const attention_args &p, int first, int n, int head,
                                                        int stage, int thread = (int)threadIdx.x)
{
    enum { PITCH = WIDE ? D : D + 8 };
    const int i = thread;
    const int at = stage * QUERIES * PITCH, after = at + 2 * QUERIES * PITCH;
    attention_fetch<T, D, QUERIES, THREADS, WIDE>(qs + at, p.q, p.query_at, first, n, head, p.head_size,
                                                  thread);
    attention_fetch<T, D, QUERIES, THREADS, WIDE>(qs + (WIDE ? tt__opaque(after) : after), p.dout,
                                                  p.query_at, first, n, head, p.head_size, thread);
    if (i < QUERIES) {
        const int query = first + min(i, n - 1), bytes = i < n ? 4 : 0, to = stage * QUERIES + i;
        const int64_t at = attention_sums_at(p, query, head);
        tt__cp_async_4(lses + to, p.lse + at, bytes);
        tt__cp_async_4(lses + 2 * QUERIES + to, p.delta + at, bytes);
        rows[to] = attention_row(p, query);
    }
    tt__cp_async_commit();
}

// Copies bits of dropout (attention_bits), asynchronously, to `to`: the bits of the queries from `from` on
// and the keys from t.at on, as (KEYS / 16, QUERIES, 16). Bits after the sequence's end become zeros. If
// no query of a tile of QUERIES x QUERIES sees a key, the kernel of dq writes no bits, and the copied bits
// become zeros, too. begin: the sequence's attention_bits_begin.
template <int KEYS, int QUERIES>
__device__ __forceinline__ void attention_fetch_bits(unsigned char *to, const attention_args &p,
                                                     const attention_tile &t, int64_t begin, int from,
                                                     int head)
{
    enum { PARTS = QUERIES / 8 }; // number of 16-byte parts of the bits of QUERIES queries and 16 keys
    const int i = tt__opaque((int)threadIdx.x), key = tt__opaque(t.at) + i / PARTS * 16;
    if (i >= KEYS / 16 * PARTS) return;
    const bool there = key < t.length && (!p.causal || key / QUERIES <= from / QUERIES);
    const unsigned char *bits = there ? attention_bits(p, begin, from / 64, key / 64, head) + key % 64 * 8
        + from % 64 * 2 + i % PARTS * 16 : p.bits;
    tt__cp_async_16(to + i * 16, bits, there ? 16 : 0);
}

// Stores the thread's elements of row `row` of dk (k is 0) or dv (k is 1): elements `2 * h` and `2 * h + 1`
// of each tile of 8 columns.
template <class T, int D>
__device__ __forceinline__ void attention_store_key(const attention_args &p, int k, int row, int head,
                                                    const float (&from)[D / 8][4], int h, int lane,
                                                    attention_columns<T, D> &columns)
{
    const tt__mat &m = k ? p.dv : p.dk;
    if (!m.data) return;
    attention_store<T, D>(m, row, head, p.head_size, from, h, k ? p.keep_scale : p.scale,
                          k ? p.add_dv : p.add_dk, lane, columns, k ? p.sums_v : p.sums_k);
}

// Writes the thread block's column sums of dk and dv: adds up the column sums of its first `parts` warps,
// which are in part[warp] for dk and in part[WARPS + warp] for dv.
template <int D, int WARPS>
__device__ __forceinline__ void attention_write_key_sums(const attention_args &p, int64_t at,
                                                         const float (*part)[D], int parts, int thread)
{
    attention_write_sums<D>(p.sums_k, at, part, parts, p.head_size, thread);
    attention_write_sums<D>(p.sums_v, at, part + WARPS, parts, p.head_size, thread);
}

// Writes the thread block's column sums of dk and dv, if sums are wanted. A barrier comes first. After the
// barrier, all warps have stored their sums, and `at`, which may be in shared memory, is set.
template <int D, int WARPS>
__device__ __forceinline__ void attention_finish_key_sums(const attention_args &p, const int64_t &at,
                                                          const float (*part)[D], int parts, int thread)
{
    if (!p.sums_k && !p.sums_v) return;
    __syncthreads();
    attention_write_key_sums<D, WARPS>(p, at, part, parts, thread);
}

// Moves `to` to the sequence's next tile of queries that sees any of the block's keys; after the last such
// tile, moves to `begin`, the first tile, of the next head.
template <int QUERIES, bool BLOCKS>
__device__ __forceinline__ void attention_advance(int &to, int &head, const attention_args &p,
                                                  const attention_sparse &sparse, int begin, int end)
{
    to += QUERIES;
    if (BLOCKS && to < end) to = attention_seen_from<true>(p, sparse, head, to, end);
    if (to >= end) { to = begin; head++; }
}

// Gives all threads of the thread block, in shared memory, the tile of keys that they work on. With READS
// also gives them the place of the tile's bits of dropout, otherwise the sparse blocks that the tile's keys
// are in.
template <int KEYS, bool READS>
__device__ __forceinline__ void attention_share(attention_tile &tile, int64_t &bits_begin,
                                                attention_sparse &sparse, const attention_args &p,
                                                const attention_tile &found)
{
    if (threadIdx.x == 0) {
        tile = found;
        if (READS) bits_begin = attention_bits_begin(p, found);
        else
            sparse = attention_sparse_of(p, found.length, found.at, min(KEYS + 0, found.length - found.at));
    }
    __syncthreads();
}

// Turns the products q k^T (s) and dout v^T (g) into weights after dropout (s) and the gradients of scores
// (g), without the factor `scale`. Rows are keys, columns are queries. row: the queries' rows of the batch,
// beginning with the tile's first query; lse, delta: the queries' sums, beginning with the thread's first
// column; mine: the warp's first key, counted in tile t; masked: whether the warp has a key that a query does
// not see; often: how many times each query sees each key, as block-sparse attention may list a block twice.
template <int MT, int QUERIES, attention_kind KIND>
__device__ __forceinline__ void attention_column_slopes(float (&s)[MT][QUERIES / 8][4],
                                                        float (&g)[MT][QUERIES / 8][4],
                                                        const attention_args &p, uint32_t keep,
                                                        const int *row, const float *lse, const float *delta,
                                                        const attention_tile &t, int mine, bool masked,
                                                        float factor, float slope, int often)
{
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    TT__UNROLL for (int n = 0; n < QUERIES / 8; n++)
        TT__UNROLL for (int e = 0; e < 2; e++) {
            const int c = 8 * n + e;
            // The last key that the query sees, counted from the thread's first key.
            const int last = masked ? row[c + pair] - t.begin - t.at - mine - group : 16 * MT;
            const int ahead = row[c + pair] - t.begin - t.at - mine - group;
            const float log_sum = lse[c] * TT__LOG2E, sum = delta[c];
            TT__UNROLL for (int m = 0; m < MT; m++)
                TT__UNROLL for (int h = 0; h < 2; h++) {
                    const bool kept = keep >> (8 * (2 * e + h) + m * (QUERIES / 8) + n) & 1;
                    float &x = s[m][n][2 * h + e], &y = g[m][n][2 * h + e];
                    const int d = ahead - 16 * m - 8 * h;
                    if (NEAR) x = fmaf(-slope, fabsf((float)d), x);
                    x = (NEAR ? d < p.smallest || d > p.largest : 16 * m + 8 * h > last)
                        ? 0 : tt__exp2(fmaf(x, NEAR ? p.factor : factor, -log_sum));
                    if (BLOCKS) x *= (float)often;
                    y = x * ((kept ? y * p.keep_scale : 0) - sum);
                    if (!kept) x = 0;
                }
        }
}

// Makes dk and dv. Rows of scores are keys here, columns are queries. READS: p.bits tells which weights
// dropout keeps.
template <class T, int D, int MT, int QUERIES, attention_kind KIND, bool READS = false>
__global__ __launch_bounds__(128, 2) void attention_dkdv(attention_args p)
{
    tt__begin_kernel();
    enum { WARPS = 4, KEYS = 64 * MT, PITCH = D + 8, BITS = KEYS * QUERIES / 8 };
    TT__SHARED(int64_t, sums_begin, ); // these three variables are in shared memory to save registers
    TT__SHARED(int64_t, bits_begin, );
    TT__SHARED(uint64_t, random, );
    TT__SHARED(attention_sparse, sparse, ); // `sparse` and `tile` are used by kernels that lack registers
    TT__SHARED(attention_tile, tile, );
    TT__DYN_SHARED(T, ks);
    T *vs = ks + KEYS * PITCH, *qs = vs + KEYS * PITCH, *ds = qs + 2 * QUERIES * PITCH;
    float *lses = (float *)(ds + 2 * QUERIES * PITCH), *deltas = lses + 2 * QUERIES; // (2, QUERIES)
    int *rows = (int *)(deltas + 2 * QUERIES); // (2, QUERIES): each query's row of the batch
    unsigned char *const kept = (unsigned char *)(rows + 2 * QUERIES); // dropout's bits for two stages
    const int key_heads = p.heads / p.group, mine = (int)threadIdx.x / 32 * 16 * MT;
    const int key_head = p.first_head / p.group + (int)(blockIdx.x % key_heads), pair = threadIdx.x % 4 * 2;
    const attention_tile found = attention_find<KEYS>(p, p.seq_start, (int)(blockIdx.x / key_heads));
    float (*const part)[D] = (float (*)[D])ks; // after the loop: each warp's column sums of dk, then of dv
    static_assert(2 * WARPS * D * sizeof(float) <= KEYS * PITCH * sizeof(T), "their place is that of keys");
    if (threadIdx.x == 0) sums_begin = attention_sums_begin(p, key_heads, key_head);
    if (found.at < 0)
        return attention_finish_key_sums<D, WARPS>(p, sums_begin, part, 0, (int)threadIdx.x);
    if (KIND == BY_BLOCKS || READS) attention_share<KEYS, READS>(tile, bits_begin, sparse, p, found);
    const attention_tile &t = KIND == BY_BLOCKS ? tile : found;
    const int count = min(KEYS + 0, t.length - t.at);
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    const bool diagonal = p.causal && !p.query_row; // query i sees keys up to i
    const float factor = p.scale * TT__LOG2E; // p.factor, computed here to save a register
    if (threadIdx.x == 0) random = attention_key(p);
    float dk[MT][D / 8][4], dv[MT][D / 8][4];
    attention_clear(dk, dv);
    attention_fetch_rows<T, D, KEYS>(ks, vs, p, t.begin + t.at, count, key_head);
    const auto fetch = [&](int from, int head, int stage) { // copies queries, beginning with `from`
        if (READS) attention_fetch_bits<KEYS, QUERIES>(kept + stage * BITS, p, t, bits_begin, from, head);
        attention_fetch_queries<T, D, QUERIES, 128>(qs, lses, rows, p, t.first + from, t.queries - from,
                                                    head, stage);
    };
    const int begin = NEAR ? attention_queries_begin(p, t) : diagonal ? t.at : 0;
    const int end = NEAR ? attention_queries_end(p, t, count) : t.queries;
    const int heads_end = begin < end ? (key_head + 1) * p.group : 0; // end of the heads that read key_head
    int from = begin, head = key_head * p.group;
    if (head < heads_end) fetch(from, head, 0);
    for (int stage = 0; head < heads_end;
         attention_advance<QUERIES, BLOCKS>(from, head, p, sparse, begin, end), stage ^= 1) {
        const T *qt = qs + stage * QUERIES * PITCH, *dt = ds + stage * QUERIES * PITCH;
        const float *lse = lses + stage * QUERIES + pair, *delta = deltas + stage * QUERIES + pair;
        tt__cp_async_wait<0>();
        __syncthreads();
        int next = from, next_head = head;
        attention_advance<QUERIES, BLOCKS>(next, next_head, p, sparse, begin, end);
        if (next_head < heads_end) fetch(next, next_head, stage ^ 1);
        // Skips the tile if the warp has no keys, or if no query of the tile sees any of the warp's keys.
        if (mine >= count || (diagonal && t.at + mine > from + QUERIES - 1)) continue;
        const int often = !BLOCKS || !sparse.n ? 1
            : attention_times(p, head, sparse.n, from / p.block, (t.at + mine) / p.block);
        if (often == 0) continue;
        const float slope = NEAR ? attention_slope(p, head) / p.scale : 0;
        const int first = t.at + mine; // the warp's first key
        const bool masked = p.causal && (!diagonal || first + 16 * MT - 1 > from);
        float s[MT][QUERIES / 8][4], g[MT][QUERIES / 8][4];
        const uint32_t keep = READS
            ? attention_read_columns<MT, QUERIES>(kept + stage * BITS + mine / 8 * QUERIES)
            : attention_draw_columns<MT, QUERIES>(p, random, rows + stage * QUERIES, first / 16, head);
        attention_mma<T, D, MT, QUERIES>(s, ks + mine * PITCH, qt);
        attention_mma<T, D, MT, QUERIES>(g, vs + mine * PITCH, dt);
        attention_column_slopes<MT, QUERIES, KIND>(s, g, p, keep, rows + stage * QUERIES, lse, delta, t, mine,
                                                   masked, factor, slope, often);
        attention_mma_add<T, D, MT, QUERIES>(dv, s, dt);
        attention_mma_add<T, D, MT, QUERIES>(dk, g, qt);
    }
    tt__cp_async_wait<0>(); // waits for k and v, if the loop did not run
    if (p.sums_k || p.sums_v) __syncthreads();
    const int thread = tt__opaque((int)threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int to_head = KIND == NEARBY // in other kernels computed again, to save a register in the loop
        ? key_head : p.first_head / p.group + tt__opaque((int)blockIdx.x) % key_heads;
    // The same thread stores an element of dk and of dv, because dk and dv may have the same memory.
    TT__UNROLL for (int k = 0; k < 2; k++) {
        attention_columns<T, D> columns;
        columns.clear();
        TT__UNROLL for (int m = 0; m < MT; m++)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int r = 16 * MT * warp + 16 * m + 8 * h + lane / 4;
                const int row = (READS ? tile : t).begin + t.at + r;
                if (r >= count) continue;
                attention_store_key<T, D>(p, k, row, to_head, k ? dv[m] : dk[m], h, lane, columns);
            }
        if (k ? p.sums_v : p.sums_k) columns.write(part[WARPS * k + warp], lane, false);
    }
    if (p.sums_k || p.sums_v) __syncthreads();
    attention_write_key_sums<D, WARPS>(p, sums_begin, part, WARPS, thread);
}

// Turns the products q k^T (s) and dout v^T (g) into weights after dropout (s) and the gradients of scores
// (g), without the factor `scale`. Rows are keys, columns are queries. lse, delta: the queries' sums,
// beginning with the thread's first column; first: row of the batch of the thread's first key; inside: number
// of keys from that key to the sequence's end. Weights after the end are set to 0, because they could make dq
// infinite where all scores are far below 0.
template <int MT, int QUERIES>
__device__ __forceinline__ void attention_slopes(float (&s)[MT][QUERIES / 8][4],
                                                 float (&g)[MT][QUERIES / 8][4], const attention_args &p,
                                                 uint32_t keep, const int *rows, const float *lse,
                                                 const float *delta, int first, int inside)
{
    const float factor = p.scale * TT__LOG2E; // p.factor, computed here to save a register
    TT__UNROLL for (int n = 0; n < QUERIES / 8; n++)
        TT__UNROLL for (int e = 0; e < 2; e++) {
            const int c = 8 * n + e;
            // The last key that the query sees, counted from the thread's first key.
            const int last = min(p.causal ? rows[c + threadIdx.x % 4 * 2] - first : 16 * MT, inside - 1);
            const float log_sum = lse[c] * TT__LOG2E, sum = delta[c];
            TT__UNROLL for (int m = 0; m < MT; m++)
                TT__UNROLL for (int h = 0; h < 2; h++) {
                    const bool kept = keep >> (8 * (2 * e + h) + m * (QUERIES / 8) + n) & 1;
                    float &x = s[m][n][2 * h + e], &y = g[m][n][2 * h + e];
                    x = 16 * m + 8 * h > last ? 0 : tt__exp2(fmaf(x, factor, -log_sum));
                    y = x * ((kept ? y * p.keep_scale : 0) - sum);
                    if (!kept) x = 0;
                }
        }
}

} // namespace
