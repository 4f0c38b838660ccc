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

// The sequence of a block of attention_backward: its rows of the batch, its queries, the head of its keys and
// the end of the heads of q that these serve. thread: 0, which the compiler does not know.
struct attention_whole { int begin, count, first, queries, key_head, heads_end, thread; };

// The backward in one pass, with five products: of a sequence of at most 32 WARPS keys a block has all keys,
// so that gradients of scores times keys are dq, which nobody else adds to. These gradients come to the warps
// that make dq by shared memory, for QUERIES queries at a time; the rest is as in attention_dkdv.
template <class T, int D, int WARPS>
__global__ __launch_bounds__(32 * WARPS, 8 / WARPS) void attention_backward(attention_args p)
{
    tt__begin_kernel();
    enum { MT = 2, KEYS = 32 * WARPS, QUERIES = 64, PART = 32, PITCH = D + 8, ACROSS = QUERIES + 8 };
    // Of dq a warp makes 16 QM rows and COLUMNS columns.
    enum { QM = WARPS * D > 256 ? 2 : 1, DOWN = QUERIES / (16 * QM), COLUMNS = D * DOWN / WARPS };
    TT__SHARED(uint64_t, random, );
    TT__SHARED(attention_whole, of, ); // here, as else the loop keeps it and what follows of it in registers
    TT__SHARED(float, part, [2][WARPS][D]);
    TT__SHARED(float, part_q, [DOWN][D]); // sums of dq so far, of a head
    TT__DYN_SHARED(T, ks);
    T *vs = ks + KEYS * PITCH, *qs = vs + KEYS * PITCH, *ds = qs + 2 * QUERIES * PITCH;
    T *slopes = ds + 2 * QUERIES * PITCH; // (KEYS, ACROSS)
    float *lses = (float *)(slopes + KEYS * ACROSS), *deltas = lses + 2 * QUERIES;
    int *rows = (int *)(deltas + 2 * QUERIES);
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    const int mine = 16 * MT * (int)(threadIdx.x / 32);
    const bool diagonal = p.causal && !p.query_row;
    if (threadIdx.x == 0) {
        const int key_heads = p.heads / p.group, seq = (int)(blockIdx.x / key_heads);
        random = attention_key(p);
        of.key_head = p.first_head / p.group + (int)(blockIdx.x % key_heads);
        of.begin = p.seq_start[seq];
        of.count = p.seq_start[seq + 1] - of.begin;
        of.first = p.query_start[seq];
        of.queries = p.query_start[seq + 1] - of.first;
        of.heads_end = of.queries > 0 ? (of.key_head + 1) * p.group : 0;
        of.thread = 0;
    }
    const auto clear_sums = [&]() {
        for (int c = (int)threadIdx.x; c < D; c += 32 * WARPS)
            for (int k = 0; k < DOWN; k++) part_q[k][c] = 0;
    };
    const auto write_sums = [&](int of_head) { // of dq; they are cleared by the threads that have read them
        const int64_t sequence = blockIdx.x / (p.heads / p.group);
        attention_write_sums<D>(p.sums_q, (sequence * p.heads + of_head) * p.head_size, part_q, DOWN,
                                p.head_size, (int)threadIdx.x);
        clear_sums();
    };
    clear_sums();
    __syncthreads();
    float dk[MT][D / 8][4], dv[MT][D / 8][4];
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int n = 0; n < D / 8; n++)
            TT__UNROLL for (int i = 0; i < 4; i++) dk[m][n][i] = dv[m][n][i] = 0;
    attention_fetch<T, D, KEYS, 32 * WARPS>(ks, p.k, NULL, of.begin, of.count, of.key_head, p.head_size);
    attention_fetch<T, D, KEYS, 32 * WARPS>(vs, p.v, NULL, of.begin, of.count, of.key_head, p.head_size);
    tt__cp_async_commit();
    const auto fetch = [&](int from, int head, int stage) { // queries from ... of the sequence
        attention_fetch_queries<T, D, QUERIES, 32 * WARPS>(qs, lses, rows, p, of.first + from,
                                                           of.queries - from, head, stage);
    };
    int from = 0, head = of.key_head * p.group;
    if (head < of.heads_end) fetch(from, head, 0);
    for (int stage = 0; head < of.heads_end; stage ^= 1) {
        tt__cp_async_wait<0>();
        __syncthreads(); // the tile is there, and the other one and `slopes` were used
        if (p.sums_q && from == 0 && head > of.key_head * p.group) write_sums(head - 1);
        if (from + QUERIES < of.queries) fetch(from + QUERIES, head, stage ^ 1);
        else if (head + 1 < of.heads_end) fetch(0, head + 1, stage ^ 1);
        for (int part = 0; part < QUERIES && mine < of.count; part += PART) {
            const int at = stage * QUERIES + part;
            const T *qt = qs + at * PITCH, *dt = ds + at * PITCH;
            T *to = slopes + (mine + group) * ACROSS + part + pair;
            float s[MT][PART / 8][4], g[MT][PART / 8][4];
            const bool seen = !diagonal || mine < from + part + PART; // any of the warp's keys
            if (seen) {
                const uint32_t keep = attention_draw_columns<MT, PART>(p, random, rows + at, mine / 8, head);
                attention_mma<T, D, MT, PART>(s, ks + mine * PITCH, qt);
                attention_mma<T, D, MT, PART>(g, vs + mine * PITCH, dt);
                // Keys behind the end would make dq infinite where all scores are far below 0.
                attention_slopes<MT, PART>(s, g, p, keep, rows + at, lses + at + pair, deltas + at + pair,
                                           of.begin + mine + group, of.count - mine - group);
            }
            TT__UNROLL for (int m = 0; m < MT; m++)
                TT__UNROLL for (int n = 0; n < PART / 8; n++)
                    TT__UNROLL for (int h = 0; h < 2; h++)
                        *(uint32_t *)(to + (16 * m + 8 * h) * ACROSS + 8 * n) =
                            seen ? attention_pack<T>(g[m][n][2 * h], g[m][n][2 * h + 1]) : 0;
            if (!seen) continue;
            attention_mma_add<T, D, MT, PART>(dv, s, dt);
            attention_mma_add<T, D, MT, PART>(dk, g, qt);
        }
        __syncthreads();
        const int thread = (int)threadIdx.x + of.thread, warp = thread / 32, lane = thread % 32;
        const int row = warp % DOWN * 16 * QM, column = warp / DOWN * COLUMNS;
        const int end = min(of.count, diagonal ? from + QUERIES : of.count); // of keys that a query sees
        const T *a = slopes + (lane % 8 + lane / 16 * 8) * ACROSS + row + lane / 8 % 2 * 8;
        const T *b = ks + lane % 16 * PITCH + column + lane / 16 * 8;
        float dq[QM][COLUMNS / 8][4];
        TT__UNROLL for (int m = 0; m < QM; m++)
            TT__UNROLL for (int n = 0; n < COLUMNS / 8; n++)
                TT__UNROLL for (int i = 0; i < 4; i++) dq[m][n][i] = 0;
        for (int k = 0; k < end; k += 16, a += 16 * ACROSS, b += 16 * PITCH) {
            uint32_t af[QM][4];
            TT__UNROLL for (int m = 0; m < QM; m++) tt__ldmatrix_x4_trans(af[m], a + 16 * m);
            TT__UNROLL for (int n = 0; n < COLUMNS; n += 16) {
                uint32_t r[4];
                tt__ldmatrix_x4_trans(r, b + n);
                const uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
                TT__UNROLL for (int m = 0; m < QM; m++) {
                    tt__mma_16816<T>(dq[m][n / 8], af[m], b0);
                    tt__mma_16816<T>(dq[m][n / 8 + 1], af[m], b1);
                }
            }
        }
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
        from += QUERIES;
        if (from >= of.queries) { from = 0; head++; }
    }
    tt__cp_async_wait<0>(); // where no query came, of k and v
    __syncthreads();        // dq may be dk, which is added to it then
    if (p.sums_q) // without queries, of all heads 0
        for (int h = of.queries > 0 ? of.heads_end - 1 : of.key_head * p.group;
             h < (of.key_head + 1) * p.group; h++)
            write_sums(h);
    // One thread has an element of dk and of dv, which may be the same.
    const int last = tt__opaque((int)threadIdx.x);
    TT__UNROLL for (int k = 0; k < 2; k++) {
        float *const sums = k ? p.sums_v : p.sums_k;
        attention_columns<T, D> columns;
        columns.clear();
        TT__UNROLL for (int m = 0; m < MT; m++)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int r = last / 32 * 16 * MT + 16 * m + 8 * h + last % 32 / 4;
                if (r >= of.count || !(k ? p.dv : p.dk).data) continue;
                attention_store<T, D>(k ? p.dv : p.dk, of.begin + r, of.key_head, p.head_size,
                                      k ? dv[m] : dk[m], h, k ? p.keep_scale : p.scale,
                                      k ? p.add_dv : p.add_dk, last % 32, columns, sums);
            }
        if (sums) columns.write(part[k][last / 32], last % 32, false);
    }
    if (!p.sums_k && !p.sums_v) return;
    const int64_t at = attention_sums_begin(p, p.heads / p.group, of.key_head);
    __syncthreads();
    attention_write_sums<D>(p.sums_k, at, part[0], WARPS, p.head_size, (int)threadIdx.x);
    attention_write_sums<D>(p.sums_v, at, part[1], WARPS, p.head_size, (int)threadIdx.x);
}

// The backward by warpgroups in one pass, with five products. A block of two warpgroups owns 256 keys of a
// sequence: tiles of 64, the even ones of one group and the odd ones of the other, with dk and dv in
// registers. The block goes through the tiles of queries. Both groups write the gradients of a tile's scores
// to shared memory, and the groups take turns at multiplying them by the keys, while the other begins the
// next tile. The product is the block's part of dq: all of it where no sequence has more than 256 keys
// (p.parts is NULL), else written in f32 to one of the two slots of p.parts. Blocks 0 and 1 of a sequence
// have a slot each; later passes, of blocks 2 and 3 and so on, add to the slots; attention_sum_parts adds the
// slots up.
enum { TT__SPAN_TILES = 4, TT__SPAN = 64 * TT__SPAN_TILES, TT__SPAN_SLOTS = 2 };
// Weights as the first operand of a product, those that are not kept as 0.
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

template <class T, bool DROPS>
__global__ __launch_bounds__(256, 1) void attention_backward_wide(attention_args p)
{
    tt__begin_kernel();
    enum { D = 64, TILE = 64 * D, QUERIES = 64, TILES = TT__SPAN_TILES, KEYS = TT__SPAN, WARPS = 8 };
    TT__SHARED(uint64_t, random, ); // here, as else the keys of Philox's ten rounds are kept in registers
    TT__SHARED(attention_tile, t, );
    TT__SHARED(float, part, [2][WARPS][D]);
    TT__SHARED(float, part_q, [WARPS][D]); // sums of dq so far
    TT__DYN_SHARED(T, shared);
    T *ks = attention_room(shared), *vs = ks + TILES * TILE, *qs = vs + TILES * TILE, *ds = qs + 2 * TILE;
    T *slopes = ds + 2 * TILE; // (2, KEYS, QUERIES), as tt__wgmma_matrix wants it
    float *lses = (float *)(slopes + 2 * TILES * TILE), *deltas = lses + 2 * QUERIES; // (2, QUERIES)
    int *rows = (int *)(deltas + 2 * QUERIES);                                        // of the batch
    const int key_heads = p.heads / p.group, lane = threadIdx.x % 32;
    const int key_head = p.first_head / p.group + (int)(blockIdx.x % key_heads);
    const int64_t sums_begin = attention_sums_begin(p, key_heads, key_head);
    const auto write_sums = [&](int parts) {
        attention_write_sums<D>(p.sums_k, sums_begin, part[0], parts, p.head_size, (int)threadIdx.x);
        attention_write_sums<D>(p.sums_v, sums_begin, part[1], parts, p.head_size, (int)threadIdx.x);
        attention_write_sums<D>(p.parts ? NULL : p.sums_q, sums_begin, part_q, parts, p.head_size,
                                (int)threadIdx.x);
    };
    {
        attention_tile found;
        if (p.longest > KEYS) {
            found = attention_find<KEYS>(p, p.seq_start, (int)(blockIdx.x / key_heads));
        } else {
            const int s = (int)(blockIdx.x / key_heads);
            found.sequence = s;
            found.begin = found.first = p.seq_start[s];
            found.length = found.queries = p.seq_start[s + 1] - found.begin;
            found.at = found.length > 0 ? 0 : -1;
        }
        if (found.at < 0) {
            write_sums(0);
            return;
        }
        if (p.parts && found.at / KEYS / TT__SPAN_SLOTS != p.pass) return;
        if (threadIdx.x == 0) {
            t = found;
            random = attention_key(p);
        }
        for (int i = (int)threadIdx.x; i < WARPS * D; i += 256) part_q[i / D][i % D] = 0;
        __syncthreads();
    }
    const int at = t.at, count = min(KEYS + 0, t.length - at);
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), team = warp / 4;
    const int group = lane / 4, pair = lane % 4 * 2;
    const float factor = p.scale * TT__LOG2E;
    float dk[2][8][4], dv[2][8][4];
    TT__UNROLL for (int m = 0; m < 2; m++)
        TT__UNROLL for (int n = 0; n < 8; n++)
            TT__UNROLL for (int i = 0; i < 4; i++) dk[m][n][i] = dv[m][n][i] = 0;
    attention_fetch<T, D, KEYS, 256, true>(ks, p.k, NULL, t.begin + at, count, key_head, p.head_size);
    attention_fetch<T, D, KEYS, 256, true>(vs, p.v, NULL, t.begin + at, count, key_head, p.head_size);
    tt__cp_async_commit();
    const auto fetch = [&](int from, int head, int stage) { // queries from ... of the sequence
        attention_fetch_queries<T, D, QUERIES, 256, true>(qs, lses, rows, p, t.first + from, t.queries - from,
                                                          head, stage, tt__opaque((int)threadIdx.x));
    };
    // dq of a tile of queries, from the gradients of scores of a stage.
    const auto finish = [&](int from, int head, int stage) {
        const int thread = tt__opaque((int)threadIdx.x), lane = thread % 32, group = lane / 4;
        const int end = p.causal ? min(count, from + QUERIES - at) : count; // of keys that a query sees
        const uint32_t a = tt__wgmma_matrix(slopes + stage * TILES * TILE), b = tt__wgmma_matrix(ks);
        float dq[8][4];
        tt__wgmma_fence();
        tt__wgmma_across<T>(dq, a, b, false); // apart, as else these sums take registers before the loop
        for (int k = 16; k < end; k += 16) tt__wgmma_across<T>(dq, a + k * 128 / 16, b + k * 128 / 16, true);
        tt__wgmma_commit();
        tt__wgmma_wait<0>();
        tt__wgmma_done(dq);
        attention_columns<T, D> columns;
        columns.clear();
        TT__UNROLL for (int h = 0; h < 2; h++) {
            const int i = from + thread / 32 % 4 * 16 + 8 * h + group;
            if (i >= t.queries) continue;
            if (!p.parts) {
                attention_store<T, D>(p.dq, t.first + i, head, p.head_size, dq, h, p.scale, p.add_dq, lane,
                                      columns, p.sums_q);
                continue;
            }
            const int64_t slot = at / KEYS % TT__SPAN_SLOTS;
            float *to = p.parts + ((slot * p.q.rows + t.first + i) * p.heads + head) * p.head_size
                + lane % 4 * 2;
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
        if (p.sums_q && !p.parts) columns.write(part_q[thread / 32], lane, true);
    };
    const int begin = p.causal ? at : 0, heads_end = (key_head + 1) * p.group;
    int from = begin, head = key_head * p.group, before = -1, head_before = head;
    fetch(from, head, 0);
    for (int stage = 0; ; stage ^= 1) {
        tt__cp_async_wait<0>();
        tt__wgmma_publish();
        __syncthreads(); // the tile is there, and so are gradients of the scores of the one before
        const bool more = head < heads_end;
        int next = from + QUERIES, next_head = head;
        if (next >= t.queries) { next = begin; next_head++; }
        if (next_head < heads_end) fetch(next, next_head, stage ^ 1);
        if (before >= 0 && team == stage && p.dq.data) finish(before, head_before, stage ^ 1);
        if (!more) break;
        const T *qt = qs + stage * TILE, *dt = ds + stage * TILE;
        const float *lse = lses + stage * QUERIES + pair, *delta = deltas + stage * QUERIES + pair;
        TT__UNROLL for (int m = 0; m < 2; m++) {
            const int tile = 2 * m + team, own = tile * 64 + warp % 4 * 16; // the warp's first key
            if (tile * 64 >= count || (p.causal && at + tile * 64 >= from + QUERIES)) continue;
            float s[1][8][4], g[1][8][4];
            tt__wgmma_fence();
            attention_wide<T>(s, ks + tile * TILE, qt);
            tt__wgmma_commit();
            attention_wide<T>(g, vs + tile * TILE, dt);
            tt__wgmma_commit();
            uint32_t keep = 0;
            if (DROPS)
                keep = attention_draw_columns<1, QUERIES>(p, random, rows + stage * QUERIES, (at + own) / 8,
                                                          head);
            const auto kept = [&](int n, int i) {
                return !DROPS || keep >> (8 * (2 * (i % 2) + i / 2) + n) & 1;
            };
            tt__wgmma_wait<1>();
            tt__wgmma_done(s[0]);
            TT__UNROLL for (int n = 0; n < 8; n++) {
                const float2 sums = *(const float2 *)(lse + 8 * n);
                TT__UNROLL for (int i = 0; i < 4; i++)
                    s[0][n][i] = tt__exp2(fmaf(s[0][n][i], factor, -TT__LOG2E * (i % 2 ? sums.y : sums.x)));
            }
            if (own + 15 >= count || (p.causal && at + own + 15 > from))
                TT__UNROLL for (int n = 0; n < 8; n++)
                    TT__UNROLL for (int i = 0; i < 4; i++) {
                        const int key = own + group + i / 2 * 8, query = from - at + 8 * n + pair + i % 2;
                        if (key >= count || (p.causal && key > query)) s[0][n][i] = 0;
                    }
            uint32_t w[4][4], dw[4][4];
            tt__wgmma_wait<0>();
            tt__wgmma_done(g[0]);
            TT__UNROLL for (int n = 0; n < 8; n++) {
                const float2 sums = *(const float2 *)(delta + 8 * n);
                TT__UNROLL for (int i = 0; i < 4; i++) {
                    float &y = g[0][n][i];
                    if (DROPS) y *= kept(n, i) ? p.keep_scale : 0;
                    y = s[0][n][i] * (y - (i % 2 ? sums.y : sums.x));
                }
            }
            attention_wide_pack_kept<T>(w, s, kept);
            tt__wgmma_fence();
            attention_wide_add<T>(*(float (*)[1][8][4])dv[m], w, dt);
            tt__wgmma_commit();
            attention_wide_pack<T>(dw, g);
            tt__wgmma_fence();
            attention_wide_add<T>(*(float (*)[1][8][4])dk[m], dw, qt);
            tt__wgmma_commit();
            // Tile (64, 64) of keys and queries: the 16 bytes n of a row lie at n ^ row % 8.
            char *to = (char *)(slopes + (stage * TILES + tile) * TILE) + (warp % 4 * 16 + group) * 128
                + pair * 2;
            TT__UNROLL for (int n = 0; n < 8; n++)
                TT__UNROLL for (int h = 0; h < 2; h++)
                    *(uint32_t *)(to + h * 8 * 128 + (n ^ group) * 16) = dw[n / 2][n % 2 * 2 + h];
            tt__wgmma_wait<0>();
            tt__wgmma_done(dk[m]);
            tt__wgmma_done(dv[m]);
        }
        before = from;
        head_before = head;
        from = next;
        head = next_head;
    }
    if (p.sums_k || p.sums_v || p.dq.data == p.dk.data || p.dq.data == p.dv.data) __syncthreads();
    // One thread has an element of dk and of dv, which may be the same.
    const int last = tt__opaque((int)threadIdx.x);
    TT__UNROLL for (int k = 0; k < 2; k++) {
        float *const sums = k ? p.sums_v : p.sums_k;
        attention_columns<T, D> columns;
        columns.clear();
        TT__UNROLL for (int m = 0; m < 2; m++)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int r = (2 * m + last / 128) * 64 + last / 32 % 4 * 16 + 8 * h + last % 32 / 4;
                if (r >= count || !(k ? p.dv : p.dk).data) continue;
                attention_store<T, D>(k ? p.dv : p.dk, t.begin + at + r, key_head, p.head_size,
                                      k ? dv[m] : dk[m], h, k ? p.keep_scale : p.scale,
                                      k ? p.add_dv : p.add_dk, last % 32, columns, sums);
            }
        if (sums) columns.write(part[k][last / 32], last % 32, false);
    }
    if (!p.sums_k && !p.sums_v && !p.sums_q) return;
    __syncthreads();
    write_sums(WARPS);
}

// dq of the slots of p.parts, a tile of 64 rows of a head a block.
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
        const int slots = min(blocks, TT__SPAN_SLOTS + 0);
        TT__UNROLL for (int k = 0; k < 64; k += 16) {
            const int64_t row = t.first + t.at + r + k, column = (int64_t)head * p.head_size + c;
            if (t.at + r + k >= t.queries) continue;
            const float *from = p.parts + row * p.heads * p.head_size + column;
            float x[4] = {0, 0, 0, 0};
            for (int slot = 0; slot < slots; slot++, from += p.q.rows * p.heads * p.head_size) {
                const float4 y = *(const float4 *)from;
                x[0] += y.x; x[1] += y.y; x[2] += y.z; x[3] += y.w;
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
