#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "cuda_shared.cuh"
#include "cuda_f32.cuh"
#include "cuda_cores.cuh"
#include "cuda_backward.cuh"

namespace {

// ----------------------------------------------------- the backward in one kernel, and by warpgroups (wgmma)

// The work of a thread block of attention_backward: a sequence, with its rows of the batch (begin, count)
// and its queries (first, queries), one head of keys, and the end of the heads of q that share this head.
// `thread` is 0, but the compiler does not know the 0. Expressions that contain `thread` are therefore
// computed where they are used and take no registers before.
struct attention_whole {
    int begin, count, first, queries, key_head, heads_end, thread;
    __device__ __forceinline__ void find(const attention_args &p)
    {
        const int key_heads = p.heads / p.group, seq = (int)(blockIdx.x / key_heads);
        key_head = p.first_head / p.group + (int)(blockIdx.x % key_heads);
        begin = p.seq_start[seq];
        count = p.seq_start[seq + 1] - begin;
        first = p.query_start[seq];
        queries = p.query_start[seq + 1] - first;
        heads_end = queries > 0 ? (key_head + 1) * p.group : 0;
        thread = 0;
    }
};

// Computes to = a^T b, where a (K, 16 MT) and b (K, N) are in shared memory and `to` is (16 MT, N). Sums over
// the first `end` of the K rows. The rows of a are ACROSS elements apart, the rows of b are PITCH apart.
template <class T, int MT, int N, int ACROSS, int PITCH>
__device__ __forceinline__ void attention_mma_down(float (&to)[MT][N / 8][4], const T *a, const T *b,
                                                   int lane, int end)
{
    a += (lane % 8 + lane / 16 * 8) * ACROSS + lane / 8 % 2 * 8;
    b += lane % 16 * PITCH + lane / 16 * 8;
    attention_clear(to);
    for (int k = 0; k < end; k += 16, a += 16 * ACROSS, b += 16 * PITCH) {
        uint32_t af[MT][4];
        TT__UNROLL for (int m = 0; m < MT; m++) tt__ldmatrix_x4_trans(af[m], a + 16 * m);
        TT__UNROLL for (int n = 0; n < N; n += 16) {
            uint32_t r[4];
            tt__ldmatrix_x4_trans(r, b + n);
            const uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
            TT__UNROLL for (int m = 0; m < MT; m++) {
                tt__mma_16816<T>(to[m][n / 8], af[m], b0);
                tt__mma_16816<T>(to[m][n / 8 + 1], af[m], b1);
            }
        }
    }
}

// Sizes of attention_backward. A warp makes 16 * QM rows and COLUMNS columns of dq.
template <int D, int WARPS> struct attention_whole_sizes {
    enum { MT = 2, KEYS = 32 * WARPS, QUERIES = 64, PART = 32, PITCH = D + 8, ACROSS = QUERIES + 8,
           QM = WARPS * D > 256 ? 2 : 1, DOWN = QUERIES / (16 * QM), COLUMNS = D * DOWN / WARPS };
};

// Writes the warp's gradients of scores to `to`, with keys as rows, ACROSS elements apart, and queries as
// columns. Writes zeros if none of the queries sees any of the keys.
template <class T, int MT, int PART, int ACROSS>
__device__ __forceinline__ void attention_put_slopes(T *to, const float (&g)[MT][PART / 8][4], bool seen)
{
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int n = 0; n < PART / 8; n++)
            TT__UNROLL for (int h = 0; h < 2; h++)
                *(uint32_t *)(to + (16 * m + 8 * h) * ACROSS + 8 * n) =
                    seen ? attention_pack<T>(g[m][n][2 * h], g[m][n][2 * h + 1]) : 0;
}

template <int D, int DOWN> __device__ __forceinline__ void attention_clear_sums(float (*part)[D], int threads)
{
    for (int c = (int)threadIdx.x; c < D; c += threads)
        for (int k = 0; k < DOWN; k++) part[k][c] = 0;
}

// Makes dq of the tile of queries that begins at `from`: multiplies the gradients of scores (`slopes`) by
// the keys that these queries see. part_q: column sums of dq, to which the tile's column sums are added.
template <class T, int D, int WARPS>
__device__ __forceinline__ void attention_whole_dq(const attention_args &p, const attention_whole &of,
                                                   const T *slopes, const T *ks, float (*part_q)[D], int from,
                                                   int head, bool diagonal)
{
    typedef attention_whole_sizes<D, WARPS> S;
    enum { QM = S::QM, DOWN = S::DOWN, COLUMNS = S::COLUMNS };
    const int thread = (int)threadIdx.x + of.thread, warp = thread / 32, lane = thread % 32;
    const int row = warp % DOWN * 16 * QM, column = warp / DOWN * COLUMNS;
    // The end of the keys that any of the tile's queries sees.
    const int end = min(of.count, diagonal ? from + S::QUERIES : of.count);
    float dq[QM][COLUMNS / 8][4];
    attention_mma_down<T, QM, COLUMNS, S::ACROSS, S::PITCH>(dq, slopes + row, ks + column, lane, end);
    attention_columns<T, COLUMNS> columns;
    columns.clear();
    TT__UNROLL for (int m = 0; m < QM; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            const int query = from + row + 16 * m + 8 * h + lane / 4, i = of.first + query;
            if (query >= of.queries) continue;
            attention_store<T, COLUMNS>(p.dq, p.query_at ? p.query_at[i] : i, head, p.head_size, dq[m], h,
                                        p.scale, p.add_dq, threadIdx.x % 32, columns, p.sums_q, column);
        }
    if (p.sums_q) columns.write(part_q[warp % DOWN] + column, lane, true);
}

// Makes dq, dk and dv in one kernel, with five products. A block has all keys of a sequence of at most
// 32 * WARPS keys, so its gradients of scores times these keys are the whole of dq. Shared memory passes the
// gradients of the scores of QUERIES queries at a time to the warps that make dq. dk and dv are made as in
// attention_dkdv.
template <class T, int D, int WARPS>
__global__ __launch_bounds__(32 * WARPS, 8 / WARPS) void attention_backward(attention_args p)
{
    tt__begin_kernel();
    typedef attention_whole_sizes<D, WARPS> S;
    enum { MT = S::MT, KEYS = S::KEYS, QUERIES = S::QUERIES, PART = S::PART, PITCH = S::PITCH,
           ACROSS = S::ACROSS, DOWN = S::DOWN };
    TT__SHARED(uint64_t, random, );
    TT__SHARED(attention_whole, of, ); // in shared memory, to save registers in the loop
    TT__SHARED(float, part, [2 * WARPS][D]);
    TT__SHARED(float, part_q, [DOWN][D]); // column sums of a head's dq so far
    TT__DYN_SHARED(T, ks);
    T *vs = ks + KEYS * PITCH, *qs = vs + KEYS * PITCH, *ds = qs + 2 * QUERIES * PITCH;
    T *slopes = ds + 2 * QUERIES * PITCH; // shape (KEYS, ACROSS)
    float *lses = (float *)(slopes + KEYS * ACROSS), *deltas = lses + 2 * QUERIES;
    int *rows = (int *)(deltas + 2 * QUERIES);
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    const int mine = 16 * MT * (int)(threadIdx.x / 32);
    const bool diagonal = p.causal && !p.query_row;
    if (threadIdx.x == 0) { random = attention_key(p); of.find(p); }
    const auto write_sums = [&](int of_head) { // writes the column sums of dq, and clears them
        const int64_t sequence = blockIdx.x / (p.heads / p.group);
        attention_write_sums<D>(p.sums_q, (sequence * p.heads + of_head) * p.head_size, part_q, DOWN,
                                p.head_size, (int)threadIdx.x);
        attention_clear_sums<D, DOWN>(part_q, 32 * WARPS);
    };
    attention_clear_sums<D, DOWN>(part_q, 32 * WARPS);
    __syncthreads();
    float dk[MT][D / 8][4], dv[MT][D / 8][4];
    attention_clear(dk, dv);
    attention_fetch_rows<T, D, KEYS, 32 * WARPS>(ks, vs, p, of.begin, of.count, of.key_head);
    const auto fetch = [&](int from, int head, int stage) { // copies queries, beginning with `from`
        attention_fetch_queries<T, D, QUERIES, 32 * WARPS>(qs, lses, rows, p, of.first + from,
                                                           of.queries - from, head, stage);
    };
    int from = 0, head = of.key_head * p.group;
    if (head < of.heads_end) fetch(from, head, 0);
    for (int stage = 0; head < of.heads_end; stage ^= 1) {
        tt__cp_async_wait<0>();
        __syncthreads(); // the tile has arrived; the other tile and `slopes` are no longer in use
        if (p.sums_q && from == 0 && head > of.key_head * p.group) write_sums(head - 1);
        if (from + QUERIES < of.queries) fetch(from + QUERIES, head, stage ^ 1);
        else if (head + 1 < of.heads_end) fetch(0, head + 1, stage ^ 1);
        for (int part = 0; part < QUERIES && mine < of.count; part += PART) {
            const int at = stage * QUERIES + part;
            const T *qt = qs + at * PITCH, *dt = ds + at * PITCH;
            float s[MT][PART / 8][4], g[MT][PART / 8][4];
            const bool seen = !diagonal || mine < from + part + PART; // a query may see a key of the warp
            if (seen) {
                const uint32_t x = threadIdx.x + of.thread; // computed here, or x would stay in a register
                const auto keep =
                    attention_draw_columns<MT, PART>(p, random, rows + at, MT * (x / 32), head, x);
                attention_mma<T, D, MT, PART>(s, ks + mine * PITCH, qt);
                attention_mma<T, D, MT, PART>(g, vs + mine * PITCH, dt);
                attention_slopes<MT, PART>(s, g, p, keep, rows + at, lses + at + pair, deltas + at + pair,
                                           of.begin + mine + group, of.count - mine - group);
            }
            attention_put_slopes<T, MT, PART, ACROSS>(slopes + (mine + group) * ACROSS + part + pair, g,
                                                      seen);
            if (!seen) continue;
            attention_mma_add<T, D, MT, PART>(dv, s, dt);
            attention_mma_add<T, D, MT, PART>(dk, g, qt);
        }
        __syncthreads();
        attention_whole_dq<T, D, WARPS>(p, of, slopes, ks, part_q, from, head, diagonal);
        from += QUERIES;
        if (from >= of.queries) { from = 0; head++; }
    }
    tt__cp_async_wait<0>(); // waits for k and v, if the loop did not run
    __syncthreads();        // completes dq: if dk has the memory of dq, dk is added to dq below
    if (p.sums_q) // writes the last head's sums or, without queries, the zeros of all heads
        for (int h = of.queries > 0 ? of.heads_end - 1 : of.key_head * p.group;
             h < (of.key_head + 1) * p.group; h++)
            write_sums(h);
    // The same thread stores an element of dk and of dv, because dk and dv may have the same memory.
    const int last = tt__opaque((int)threadIdx.x);
    TT__UNROLL for (int k = 0; k < 2; k++) {
        attention_columns<T, D> columns;
        columns.clear();
        TT__UNROLL for (int m = 0; m < MT; m++)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int r = last / 32 * 16 * MT + 16 * m + 8 * h + last % 32 / 4;
                if (r >= of.count) continue;
                attention_store_key<T, D>(p, k, of.begin + r, of.key_head, k ? dv[m] : dk[m], h, last % 32,
                                          columns);
            }
        if (k ? p.sums_v : p.sums_k) columns.write(part[WARPS * k + last / 32], last % 32, false);
    }
    const int64_t at = attention_sums_begin(p, p.heads / p.group, of.key_head);
    attention_finish_key_sums<D, WARPS>(p, at, part, WARPS, (int)threadIdx.x);
}

// The backward by warpgroups, in one kernel with five products. A block of two warpgroups owns 256 keys of a
// sequence in tiles of 64 keys. One group has the even tiles, the other the odd tiles, with dk and dv in
// registers. The block goes through the tiles of queries. Both groups write the gradients of a tile's scores
// to shared memory. The groups take turns: one multiplies these gradients by the keys, while the other
// begins the next tile. The product is the block's part of dq. If no sequence has more than 256 keys
// (p.parts is NULL), this part is the whole of dq. Otherwise the block writes the part in f32 to a slot of
// p.parts. The first launch runs the first p.slots blocks of each sequence, one for each slot. Each later
// launch runs the next p.slots blocks, which add to the slots. Finally attention_sum_parts sums the slots.
enum { TT__SPAN_TILES = 4, TT__SPAN = 64 * TT__SPAN_TILES, TT__SPAN_SLOTS = TT__CUDA_ATTENTION_SLOTS };

// Returns the row of p.parts where, in slot `slot`, a sequence begins. first: the number of the sequence's
// first query. In causal attention, a slot lacks the first `256 * slot` rows of each sequence.
__device__ __forceinline__ int64_t attention_slot_row(const attention_args &p, int first, int slot)
{
    const int before = TT__SPAN * slot;
    if (!p.causal) return p.slot_begin[slot] + first;
    return p.slot_begin[slot] + (int64_t)first * (p.longest - before) / p.longest - before;
}

// Packs weights as the first operand of a product. Weights that dropout does not keep become 0.
template <class T, class F>
__device__ __forceinline__ void attention_wide_pack_kept(uint32_t (&to)[4][4], const float (&w)[1][8][4],
                                                         F kept)
{
    TT__UNROLL for (int k = 0; k < 4; k++)
        TT__UNROLL for (int i = 0; i < 4; i++) {
            const int n = 2 * k + i / 2, first = i % 2 * 2;
            to[k][i] = pack<T>(kept(n, first) ? w[0][n][first] : 0,
                               kept(n, first + 1) ? w[0][n][first + 1] : 0);
        }
}

// Returns the span of keys that block `n` of a head has; its `at` is negative if the block has none. Most
// queries of a causal sequence see the sequence's first span. First spans are therefore given out first, so
// that the blocks that begin last have least work: the numbers of the spans fill the rows of a matrix with
// span_cols columns, and blocks take the numbers column by column.
__device__ __forceinline__ attention_tile attention_find_span(const attention_args &p, int n)
{
    const bool within = n < p.span_rows * p.span_cols;
    const int number = within ? n % p.span_rows * p.span_cols + n / p.span_rows : n;
    if (p.longest > TT__SPAN) return attention_find<TT__SPAN>(p, p.seq_start, number);
    attention_tile t;
    t.sequence = number;
    t.begin = t.first = p.seq_start[number];
    t.length = t.queries = p.seq_start[number + 1] - t.begin;
    t.at = t.length > 0 ? 0 : -1;
    return t;
}

// A tile of queries in shared memory, of head `head` of q. from: the first query, counted in the sequence;
// lse, delta: the queries' sums, beginning with the thread's first column.
template <class T> struct attention_span_queries {
    const T *q, *dout;
    const float *lse, *delta;
    const int *row; // each query's row of the batch
    int from, head;
};

// Stores a row of the block's part of dq: in dq itself if p.parts is NULL, otherwise in a slot of p.parts.
// i: the thread's query, counted in the sequence; slot_row: attention_slot_row of the block.
template <class T>
__device__ __forceinline__ void attention_span_put(const attention_args &p, const attention_tile &t,
                                                   const float (&dq)[8][4], int h, int i, int64_t slot_row,
                                                   int head, int lane, attention_columns<T, 64> &columns)
{
    if (!p.parts) {
        attention_store<T, 64>(p.dq, t.first + i, head, p.head_size, dq, h, p.scale, p.add_dq, lane, columns,
                               p.sums_q);
        return;
    }
    float *to = p.parts + ((slot_row + i) * p.heads + head) * p.head_size + lane % 4 * 2;
    TT__UNROLL for (int n = 0; n < 8; n++) {
        if (8 * n >= p.head_size) break;
        float2 sum = make_float2(dq[n][2 * h], dq[n][2 * h + 1]);
        if (p.pass > 0) {
            const float2 before = *(const float2 *)(to + 8 * n);
            sum.x += before.x;
            sum.y += before.y;
        }
        *(float2 *)(to + 8 * n) = sum;
    }
}

// Makes the block's part of dq for the tile of queries that begins at `from`. slopes: the gradients of
// scores, (KEYS, QUERIES) in the layout of tt__wgmma_matrix. part_q: column sums of dq, to which the tile's
// column sums are added.
template <class T>
__device__ __forceinline__ void attention_span_dq(const attention_args &p, const attention_tile &t,
                                                  const T *slopes, const T *ks, float (*part_q)[64], int from,
                                                  int head, int at, int count, int64_t slot_row)
{
    const int thread = tt__opaque((int)threadIdx.x), lane = thread % 32, group = lane / 4;
    // The end of the keys that any of the tile's queries sees.
    const int end = p.causal ? min(count, from + 64 - at) : count;
    const uint32_t a = tt__wgmma_matrix(slopes), b = tt__wgmma_matrix(ks);
    float dq[8][4];
    tt__wgmma_fence();
    // The first product overwrites dq. In the loop it would need a cleared dq, which takes registers.
    tt__wgmma_across<T>(dq, a, b, false);
    for (int k = 16; k < end; k += 16) tt__wgmma_across<T>(dq, a + k * 128 / 16, b + k * 128 / 16, true);
    tt__wgmma_commit();
    tt__wgmma_wait<0>();
    tt__wgmma_done(dq);
    attention_columns<T, 64> columns;
    columns.clear();
    TT__UNROLL for (int h = 0; h < 2; h++) {
        const int i = from + thread / 32 % 4 * 16 + 8 * h + group;
        if (i >= t.queries) continue;
        attention_span_put<T>(p, t, dq, h, i, slot_row, head, lane, columns);
    }
    if (p.sums_q && !p.parts) columns.write(part_q[thread / 32], lane, true);
}

// Turns the products q k^T (s) into weights, 0 where a query does not see a key. Rows are the warp's 16 keys,
// beginning with key `own` of the block; columns are the tile's queries.
template <class T>
__device__ __forceinline__ void attention_span_weights(float (&s)[1][8][4], const attention_args &p,
                                                       const attention_span_queries<T> &b, int own, int at,
                                                       int count, float factor)
{
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    TT__UNROLL for (int n = 0; n < 8; n++) {
        const float2 sums = *(const float2 *)(b.lse + 8 * n);
        TT__UNROLL for (int i = 0; i < 4; i++)
            s[0][n][i] = tt__exp2(fmaf(s[0][n][i], factor, -TT__LOG2E * (i % 2 ? sums.y : sums.x)));
    }
    if (own + 15 >= count || (p.causal && at + own + 15 > b.from))
        TT__UNROLL for (int n = 0; n < 8; n++)
            TT__UNROLL for (int i = 0; i < 4; i++) {
                const int key = own + group + i / 2 * 8, query = b.from - at + 8 * n + pair + i % 2;
                if (key >= count || (p.causal && key > query)) s[0][n][i] = 0;
            }
}

// Adds the contributions of a tile of queries to dk and dv of the warp's 16 keys, which begin at row `row` of
// tile number `tile` of the block's keys. k, v: that tile of keys and values. Writes the tile's gradients of
// scores to slopes, (64 keys, 64 queries).
template <class T, bool DROPS>
__device__ __forceinline__ void attention_span_add(float (&dk)[8][4], float (&dv)[8][4],
                                                   const attention_args &p, uint64_t random,
                                                   const attention_span_queries<T> &b, const T *k, const T *v,
                                                   T *slopes, int tile, int row, int at, int count,
                                                   float factor)
{
    const int own = tile * 64 + row;
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    float s[1][8][4], g[1][8][4];
    tt__wgmma_fence();
    attention_wide<T>(s, k, b.q);
    tt__wgmma_commit();
    attention_wide<T>(g, v, b.dout);
    tt__wgmma_commit();
    uint32_t keep = 0;
    if (DROPS)
        keep = attention_draw_columns<1, 64>(p, random, b.row, (at + own) / 16, b.head,
                                             (uint32_t)tt__opaque((int)threadIdx.x));
    const auto kept = [&](int n, int i) { return !DROPS || keep >> (8 * (2 * (i % 2) + i / 2) + n) & 1; };
    tt__wgmma_wait<1>();
    tt__wgmma_done(s[0]);
    attention_span_weights(s, p, b, own, at, count, factor);
    uint32_t w[4][4], dw[4][4];
    tt__wgmma_wait<0>();
    tt__wgmma_done(g[0]);
    TT__UNROLL for (int n = 0; n < 8; n++) {
        const float2 sums = *(const float2 *)(b.delta + 8 * n);
        TT__UNROLL for (int i = 0; i < 4; i++) {
            float &y = g[0][n][i];
            if (DROPS) y *= kept(n, i) ? p.keep_scale : 0;
            y = s[0][n][i] * (y - (i % 2 ? sums.y : sums.x));
        }
    }
    attention_wide_pack_kept<T>(w, s, kept);
    tt__wgmma_fence();
    attention_wide_add<T>(*(float (*)[1][8][4])dv, w, b.dout);
    tt__wgmma_commit();
    attention_wide_pack<T>(dw, g);
    tt__wgmma_fence();
    attention_wide_add<T>(*(float (*)[1][8][4])dk, dw, b.q);
    tt__wgmma_commit();
    // A row of `slopes` has 8 parts of 16 bytes. Part n is stored in place `n ^ row % 8`, as the layout of
    // tt__wgmma_matrix demands.
    char *to = (char *)slopes + (row + group) * 128 + pair * 2;
    TT__UNROLL for (int n = 0; n < 8; n++)
        TT__UNROLL for (int h = 0; h < 2; h++)
            *(uint32_t *)(to + h * 8 * 128 + (n ^ group) * 16) = dw[n / 2][n % 2 * 2 + h];
    tt__wgmma_wait<0>();
    tt__wgmma_done(dk);
    tt__wgmma_done(dv);
}

template <class T, bool DROPS>
__global__ __launch_bounds__(256, 1) void attention_backward_wide(attention_args p)
{
    tt__begin_kernel();
    enum { D = 64, TILE = 64 * D, QUERIES = 64, TILES = TT__SPAN_TILES, KEYS = TT__SPAN, WARPS = 8 };
    TT__SHARED(uint64_t, random, ); // in a register, `random` would keep Philox's keys in registers, too
    TT__SHARED(attention_tile, t, ); TT__SHARED(int64_t, slot_row, );
    TT__SHARED(float, part, [2 * WARPS][D]);
    TT__SHARED(float, part_q, [WARPS][D]); // column sums of dq so far
    TT__DYN_SHARED(T, shared);
    T *ks = attention_room(shared), *vs = ks + TILES * TILE, *qs = vs + TILES * TILE, *ds = qs + 2 * TILE;
    T *slopes = ds + 2 * TILE; // (2, KEYS, QUERIES), in the layout of tt__wgmma_matrix
    float *lses = (float *)(slopes + 2 * TILES * TILE), *deltas = lses + 2 * QUERIES; // (2, QUERIES)
    int *rows = (int *)(deltas + 2 * QUERIES); // (2, QUERIES): each query's row of the batch
    const int key_heads = p.heads / p.group;
    const int key_head = p.first_head / p.group + (int)(blockIdx.x % key_heads);
    const int64_t sums_begin = attention_sums_begin(p, key_heads, key_head);
    const auto write_sums = [&](int parts) {
        attention_write_key_sums<D, WARPS>(p, sums_begin, part, parts, (int)threadIdx.x);
        attention_write_sums<D>(p.parts ? NULL : p.sums_q, sums_begin, part_q, parts, p.head_size,
                                (int)threadIdx.x);
    };
    const attention_tile found = attention_find_span(p, (int)(blockIdx.x / key_heads));
    if (found.at < 0) {
        write_sums(0);
        return;
    }
    if (p.parts && found.at / KEYS / p.slots != p.pass) return;
    if (threadIdx.x == 0) {
        t = found;
        random = attention_key(p);
        slot_row = p.parts ? attention_slot_row(p, found.first, found.at / KEYS % p.slots) : 0;
    }
    for (int i = (int)threadIdx.x; i < WARPS * D; i += 256) part_q[i / D][i % D] = 0;
    __syncthreads();
    const int at = t.at, count = min(KEYS + 0, t.length - at), pair = threadIdx.x % 4 * 2;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), team = warp / 4;
    const float factor = p.scale * TT__LOG2E;
    float dk[2][8][4], dv[2][8][4];
    attention_clear(dk, dv);
    attention_fetch_rows<T, D, KEYS, 256, true>(ks, vs, p, t.begin + at, count, key_head);
    const auto fetch = [&](int from, int head, int stage) { // copies queries, beginning with `from`
        attention_fetch_queries<T, D, QUERIES, 256, true>(qs, lses, rows, p, t.first + from, t.queries - from,
                                                          head, stage, tt__opaque((int)threadIdx.x));
    };
    const int begin = p.causal ? at : 0, heads_end = (key_head + 1) * p.group;
    int from = begin, head = key_head * p.group, before = -1, head_before = head;
    fetch(from, head, 0);
    for (int stage = 0; ; stage ^= 1) {
        tt__cp_async_wait<0>();
        tt__wgmma_publish();
        __syncthreads(); // the tile has arrived, and the gradients of the tile before are written
        const bool more = head < heads_end;
        int next = from + QUERIES, next_head = head;
        if (next >= t.queries) { next = begin; next_head++; }
        if (next_head < heads_end) fetch(next, next_head, stage ^ 1);
        if (before >= 0 && team == stage && p.dq.data)
            attention_span_dq<T>(p, t, slopes + (stage ^ 1) * TILES * TILE, ks, part_q, before, head_before,
                                 at, count, slot_row);
        if (!more) break;
        const attention_span_queries<T> queries =
            {qs + stage * TILE, ds + stage * TILE, lses + stage * QUERIES + pair,
             deltas + stage * QUERIES + pair, rows + stage * QUERIES, from, head};
        TT__UNROLL for (int m = 0; m < 2; m++) {
            const int tile = 2 * m + team;
            if (tile * 64 >= count || (p.causal && at + tile * 64 >= from + QUERIES)) continue;
            attention_span_add<T, DROPS>(dk[m], dv[m], p, random, queries, ks + tile * TILE, vs + tile * TILE,
                                         slopes + (stage * TILES + tile) * TILE, tile, warp % 4 * 16, at,
                                         count, factor);
        }
        before = from; head_before = head;
        from = next; head = next_head;
    }
    if (p.sums_k || p.sums_v || p.dq.data == p.dk.data || p.dq.data == p.dv.data) __syncthreads();
    // The same thread stores an element of dk and of dv, because dk and dv may have the same memory.
    const int last = tt__opaque((int)threadIdx.x), lane = last % 32;
    TT__UNROLL for (int k = 0; k < 2; k++) {
        attention_columns<T, D> columns;
        columns.clear();
        TT__UNROLL for (int m = 0; m < 2; m++)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int r = (2 * m + last / 128) * 64 + last / 32 % 4 * 16 + 8 * h + last % 32 / 4;
                if (r >= count) continue;
                attention_store_key<T, D>(p, k, t.begin + at + r, key_head, k ? dv[m] : dk[m], h, lane,
                                          columns);
            }
        if (k ? p.sums_v : p.sums_k) columns.write(part[WARPS * k + last / 32], last % 32, false);
    }
    if (!p.sums_k && !p.sums_v && !p.sums_q) return;
    __syncthreads();
    write_sums(WARPS);
}

// Makes dq, the sum of the slots of p.parts. A block makes a tile of 64 rows of a head.
template <class T> __global__ __launch_bounds__(256) void attention_sum_parts(attention_args p)
{
    tt__begin_kernel();
    TT__SHARED(float, part, [16][64]);
    const int head = p.first_head + (int)(blockIdx.x % p.heads);
    const int r = threadIdx.x / 16, c = threadIdx.x % 16 * 4;
    const attention_tile t = attention_find<64>(p, p.query_start, (int)(blockIdx.x / p.heads));
    float sums[4] = {0, 0, 0, 0};
    if (t.at >= 0 && c < p.head_size) {
        const int blocks = ((p.causal ? t.at : t.length - 1)) / TT__SPAN + 1;
        const int slots = min(blocks, p.slots);
        const int64_t first = t.first + t.at + r, column = (int64_t)head * p.head_size + c;
        // All loads of y are in flight together.
        float4 y[4][TT__SPAN_SLOTS];
        TT__UNROLL for (int slot = 0; slot < TT__SPAN_SLOTS; slot++) {
            const int64_t row = attention_slot_row(p, t.first, slot) + t.at + r;
            const float *from = p.parts + row * p.heads * p.head_size + column;
            TT__UNROLL for (int k = 0; k < 4; k++, from += 16 * p.heads * p.head_size) {
                const bool there = slot < slots && t.at + r + 16 * k < t.queries;
                y[k][slot] = there ? *(const float4 *)from : make_float4(0, 0, 0, 0);
            }
        }
        TT__UNROLL for (int k = 0; k < 4; k++) {
            const int64_t row = first + 16 * k;
            if (t.at + r + 16 * k >= t.queries) continue;
            float x[4] = {0, 0, 0, 0};
            TT__UNROLL for (int slot = 0; slot < TT__SPAN_SLOTS; slot++) {
                x[0] += y[k][slot].x; x[1] += y[k][slot].y;
                x[2] += y[k][slot].z; x[3] += y[k][slot].w;
            }
            TT__UNROLL for (int i = 0; i < 4; i++) x[i] *= p.scale;
            if (p.dq.dtype == TT_F32) {
                float *to = (float *)p.dq.data + row * p.dq.ld + column;
                TT__UNROLL for (int i = 0; i < 4; i++) to[i] = p.add_dq ? to[i] + x[i] : x[i];
            } else {
                T *to = (T *)p.dq.data + row * p.dq.ld + column;
                if (p.add_dq) TT__UNROLL for (int i = 0; i < 4; i++) x[i] += to_float(to[i]);
                const uint32_t words[2] = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3])};
                float y[8];
                ((uint32_t *)to)[0] = words[0];
                ((uint32_t *)to)[1] = words[1];
                widen8<T>(y, {words[0], words[1], 0, 0});
                TT__UNROLL for (int i = 0; i < 4; i++) sums[i] += y[i];
            }
        }
    }
    if (!p.sums_q) return;
    TT__UNROLL for (int i = 0; i < 4; i++) part[r][c + i] = sums[i];
    __syncthreads();
    attention_write_sums<64>(p.sums_q, attention_sums_begin(p, p.heads, head), part, 16, p.head_size,
                             (int)threadIdx.x);
}

} // namespace
