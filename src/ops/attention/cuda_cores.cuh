#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "cuda_shared.cuh"

namespace {

// ---- attention on tensor cores. q, k, v and dout have the same 16-bit dtype T, their rows and heads begin
// at multiples of 16 bytes, and heads have up to 128 columns. D is the head size rounded up to 32, 64, 80, 96
// or 128; the surplus columns are zero. Thread blocks have 4 warps, each with 16 MT rows of the tile that the
// block owns. The block reads the other tiles in turn and has two of them in shared memory, one in use and
// one in flight. Rows in shared memory are 16 bytes longer than D elements, so that eight rows are in
// different banks.

template <class T> __device__ __forceinline__ uint32_t attention_pack(float low, float high)
{
    return pack<T>(low, high);
}

// Copies `count` rows of a head, asynchronously: the rows from `first` on or, if `at` is not NULL, the rows
// that `at` lists from at[first] on. `to` is (ROWS, D + 8) or, if WIDE, (ROWS, D) in the layout of
// tt__wgmma_matrix. The other rows and columns of `to` become zeros.
template <class T, int D, int ROWS, int THREADS = 128, bool WIDE = false>
__device__ __forceinline__ void attention_fetch(T *to, const tt__mat &m, const int32_t *at, int first,
                                                int count, int head, int head_size,
                                                int thread = (int)threadIdx.x)
{
    // PARTS: vectors of 16 bytes in a row; STEP: rows copied at a time. 8 of 128 threads idle if D is 80 or
    // 96.
    enum { PARTS = D / 8, STEP = THREADS / PARTS, PITCH = WIDE ? D : D + 8 };
    static_assert(!WIDE || (D == 64 && STEP % 8 == 0), "a row's vectors have one order in all steps");
    const int r = thread / PARTS, c = thread % PARTS * 8;
    const T *from = (const T *)m.data + (int64_t)head * head_size + c;
    to += r * PITCH + (WIDE ? c ^ r % 8 * 8 : c);
    if (r >= STEP) return;
    if (c >= head_size) count = 0;
    TT__UNROLL for (int i = 0; i < ROWS; i += STEP) {
        if (ROWS % STEP != 0 && r + i >= ROWS) break;
        const bool there = r + i < count;
        const int row = at && there ? at[first + r + i] : first + r + i;
        tt__cp_async_16(to + i * PITCH, there ? from + row * m.ld : (const T *)m.data, there ? 16 : 0);
    }
}

// Kernels with WIDE compute by warpgroups, with tiles of 64 rows, for heads of up to 64 columns. Each of a
// group's four warps has 16 rows; threads have the same elements of these rows as with mma.sync and MT = 1.
// Tiles begin at multiples of 1,024 bytes; a launch asks for TT__WIDE_ROOM more bytes of shared memory for
// this alignment.
enum { TT__WIDE_ROOM = 1024 };
template <class T> __device__ __forceinline__ T *attention_room(T *shared)
{
    return shared + (-tt__shared_address(shared) & 1023) / sizeof(T);
}

// Computes s = a b^T, where a and b are tiles of 64 rows and s is (64, 64).
template <class T>
__device__ __forceinline__ void attention_wide(float (&s)[1][8][4], const T *a, const T *b)
{
    const uint32_t ma = tt__wgmma_matrix(a), mb = tt__wgmma_matrix(b);
    TT__UNROLL for (uint32_t k = 0; k < 64; k += 16)
        tt__wgmma_rows<T>(s[0], ma + k * 2 / 16, mb + k * 2 / 16, k > 0);
}

// Adds the product of w and y to `to`. All are (64, 64); w is in registers, rounded to T, and y is a tile.
template <class T>
__device__ __forceinline__ void attention_wide_add(float (&to)[1][8][4], const uint32_t (&w)[4][4],
                                                   const T *y)
{
    const uint32_t my = tt__wgmma_matrix(y);
    TT__UNROLL for (uint32_t k = 0; k < 64; k += 16) tt__wgmma_add<T>(to[0], w[k / 16], my + k * 128 / 16);
}

// Rounds w to T and packs it as the first operand of a product.
template <class T>
__device__ __forceinline__ void attention_wide_pack(uint32_t (&to)[4][4], const float (&w)[1][8][4])
{
    TT__UNROLL for (int k = 0; k < 4; k++)
        TT__UNROLL for (int i = 0; i < 4; i++)
            to[k][i] = pack<T>(w[0][2 * k + i / 2][i % 2 * 2], w[0][2 * k + i / 2][i % 2 * 2 + 1]);
}

// Clears the sums of a warp: `16 * M` rows and `8 * N` columns.
template <int M, int N> __device__ __forceinline__ void attention_clear(float (&x)[M][N][4])
{
    TT__UNROLL for (int m = 0; m < M; m++)
        TT__UNROLL for (int n = 0; n < N; n++) TT__UNROLL for (int i = 0; i < 4; i++) x[m][n][i] = 0;
}
template <int M, int N>
__device__ __forceinline__ void attention_clear(float (&x)[M][N][4], float (&y)[M][N][4])
{
    attention_clear(x);
    attention_clear(y);
}

// Computes s = a b^T, where a (16 MT, D) and b (N, D) are in shared memory and s is (16 MT, N).
template <class T, int D, int MT, int N>
__device__ __forceinline__ void attention_mma(float (&s)[MT][N / 8][4], const T *a, const T *b)
{
    const int lane = threadIdx.x % 32;
    a += lane % 16 * (D + 8) + lane / 16 * 8;
    b += (lane % 8 + lane / 16 * 8) * (D + 8) + lane / 8 % 2 * 8;
    attention_clear(s);
    TT__UNROLL for (int k = 0; k < D; k += 16) {
        uint32_t af[MT][4];
        TT__UNROLL for (int m = 0; m < MT; m++) tt__ldmatrix_x4(af[m], a + m * 16 * (D + 8) + k);
        TT__UNROLL for (int n = 0; n < N; n += 16) {
            uint32_t r[4];
            tt__ldmatrix_x4(r, b + n * (D + 8) + k);
            const uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
            TT__UNROLL for (int m = 0; m < MT; m++) {
                tt__mma_16816<T>(s[m][n / 8], af[m], b0);
                tt__mma_16816<T>(s[m][n / 8 + 1], af[m], b1);
            }
        }
    }
}

// Adds the product of w (16 MT, N) and y (N, D) to `to` (16 MT, D). w is in registers and is rounded to T; y
// is in shared memory.
template <class T, int D, int MT, int N>
__device__ __forceinline__ void attention_mma_add(float (&to)[MT][D / 8][4], const float (&w)[MT][N / 8][4],
                                                  const T *y)
{
    const int lane = threadIdx.x % 32;
    y += lane % 16 * (D + 8) + lane / 16 * 8;
    TT__UNROLL for (int k = 0; k < N; k += 16) {
        uint32_t af[MT][4];
        TT__UNROLL for (int m = 0; m < MT; m++)
            TT__UNROLL for (int i = 0; i < 4; i++)
                af[m][i] = attention_pack<T>(w[m][k / 8 + i / 2][i % 2 * 2],
                                             w[m][k / 8 + i / 2][i % 2 * 2 + 1]);
        TT__UNROLL for (int n = 0; n < D; n += 16) {
            uint32_t r[4];
            tt__ldmatrix_x4_trans(r, y + k * (D + 8) + n);
            const uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
            TT__UNROLL for (int m = 0; m < MT; m++) {
                tt__mma_16816<T>(to[m][n / 8], af[m], b0);
                tt__mma_16816<T>(to[m][n / 8 + 1], af[m], b1);
            }
        }
    }
}

// Column sums of the numbers that attention_store writes, as rounded to T. `sum` has the sums over the
// thread's elements. The function `write` adds up `sum` over the warp's rows, and writes the result to
// part[column] or, if `add`, adds the result to part[column]. lane: the thread's lane.
template <class T, int D> struct attention_columns {
    enum { N = (D / 4 + 7) / 8 * 8 }; // elements of a row that a thread has, rounded up to a multiple of 8
    float sum[N];
    __device__ __forceinline__ void clear() { TT__UNROLL for (int i = 0; i < N; i++) sum[i] = 0; }
    __device__ __forceinline__ void add(int n, uint32_t pair) // pair: two numbers of tile n of 8 columns
    {
        float x[8];
        // Widens the two numbers as they were rounded for storing.
        widen8<T>(x, {(uint32_t)tt__opaque((int)pair), 0, 0, 0});
        sum[2 * n] += x[0];
        sum[2 * n + 1] += x[1];
    }
    __device__ __forceinline__ void write(float *part, int lane, bool add)
    {
        // The eight threads that have the same columns divide the sums: in each of three rounds, a thread
        // gives half of its sums to another thread.
        int n = N, first = 0;
        TT__UNROLL for (int bit = 16; bit > 2; bit /= 2) {
            const bool upper = lane & bit;
            n /= 2;
            first += upper ? n : 0;
            TT__UNROLL for (int i = 0; i < N / 2; i++) {
                if (i >= n) continue;
                const float other = __shfl_xor_sync(0xffffffffu, upper ? sum[i] : sum[i + n], bit);
                sum[i] = (upper ? sum[i + n] : sum[i]) + other;
            }
        }
        TT__UNROLL for (int i = 0; i < N / 8; i++) {
            const int column = (first + i) / 2 * 8 + lane % 4 * 2 + (first + i) % 2;
            if (D == N * 4 || column < D) part[column] = add ? part[column] + sum[i] : sum[i];
        }
    }
};

// Stores the thread's elements `2 * h` and `2 * h + 1` of each tile of 8 columns, multiplied by `scale`, or
// adds them if `add`. The destination is row `row` of head `head` of the output m; the first tile begins at
// column `column` of the head. If `sums`, adds the stored numbers to `columns`, too; this works only for
// 16-bit results without `add`.
template <class T, int D>
__device__ __forceinline__ void attention_store(const tt__mat &m, int row, int head, int head_size,
                                                const float (&from)[D / 8][4], int h, float scale, bool add,
                                                int lane, attention_columns<T, D> &columns, bool sums,
                                                int column = 0)
{
    const int64_t start = row * m.ld + (int64_t)head * head_size + column + lane % 4 * 2;
    if (m.dtype != TT_F32 && !add) {
        T *to = (T *)m.data + start;
        TT__UNROLL for (int n = 0; n < D / 8; n++) {
            const uint32_t pair = attention_pack<T>(from[n][2 * h] * scale, from[n][2 * h + 1] * scale);
            if (column + 8 * n < head_size) *(uint32_t *)(to + 8 * n) = pair;
            if (sums) columns.add(n, pair);
        }
        return;
    }
    TT__UNROLL for (int n = 0; n < D / 8; n++) {
        if (column + 8 * n >= head_size) break;
        float x = from[n][2 * h] * scale, y = from[n][2 * h + 1] * scale;
        if (m.dtype == TT_F32) {
            float2 *to = (float2 *)((float *)m.data + start + 8 * n);
            *to = add ? make_float2(x + to->x, y + to->y) : make_float2(x, y);
        } else {
            T *to = (T *)m.data + start + 8 * n;
            if (add) { x += to_float(to[0]); y += to_float(to[1]); }
            *(uint32_t *)to = attention_pack<T>(x, y);
        }
    }
}

// Adds up the column sums of a head over the first `parts` warps of the thread block, and writes them to
// `to`, beginning with to[at]. Does nothing if `to` is NULL.
template <int D>
__device__ __forceinline__ void attention_write_sums(float *to, int64_t at, const float (*part)[D], int parts,
                                                     int head_size, int thread)
{
    for (int c = thread; c < head_size && to; c += (int)blockDim.x) {
        float sum = 0;
        for (int k = 0; k < parts; k++) sum += part[k][c];
        to[at + c] = sum;
    }
}

// Returns the index at which the thread block's partial column sums of head `head` begin. heads: the number
// of heads of the output.
__device__ __forceinline__ int64_t attention_sums_begin(const attention_args &p, int heads, int head)
{
    return ((int64_t)(blockIdx.x / heads) * heads + head) * p.head_size;
}

// Sets row[m][h] to a query's row of the batch, in the kernels of the forward and dq. The query is number
// `mine + 16 * m + 8 * h + lane / 4` of the tile; `mine` is the warp's first query. Queries from `count` on
// get the last query's row.
template <int MT>
__device__ __forceinline__ void attention_rows_of(int (&row)[MT][2], const attention_args &p, int first,
                                                  int count, int mine)
{
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            const int query = first + min(mine + 16 * m + 8 * h + (int)threadIdx.x % 32 / 4, count - 1);
            row[m][h] = attention_row(p, query);
        }
}

// Draws which of the warp's weights for keys `key` to `key + KEYS - 1` dropout keeps; attention_kept reads
// the result. The draw comes before the scores, which need the registers. The four threads of a row draw 16
// bits each: together for 64 keys of the row or, if KEYS is 32, for 32 keys of this row and 32 keys of the
// row that is 8 rows below. to: attention_bits of the warp's first query and of key `key`; NULL: the bits are
// not written.
template <int MT, int KEYS>
__device__ __forceinline__ void attention_draw_rows(uint32_t (&keep)[MT * KEYS / 64], const attention_args &p,
                                                    uint64_t random, const int (&row)[MT][2], int key,
                                                    int head, unsigned char *to = NULL)
{
    enum { WIDE = KEYS == 64 };
    const int t = threadIdx.x % 4, group = WIDE ? t : t % 2;
    uint16_t *const place = (uint16_t *)to + group * 64 + threadIdx.x % 32 / 4;
    TT__UNROLL for (int i = 0; i < MT * KEYS / 64; i++) keep[i] = p.drop ? 0 : 0xffffffffu;
    if (!p.drop) return;
    TT__UNROLL for (int i = 0; i < MT * KEYS / 32; i++) {
        const int m = WIDE ? i / 2 : i, h = WIDE ? i % 2 : t / 2;
        const uint32_t mine = attention_keep(p, random, h ? row[m][1] : row[m][0], key / 16 + group, head);
        if (to) place[16 * m + 8 * h] = (uint16_t)mine;
        uint32_t bits = mine << 16 * (t % 2);
        bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
        const uint32_t other = __shfl_xor_sync(0xffffffffu, bits, 2);
        keep[i / 2] |= ((t < 2 ? bits : other) >> 2 * t & 0x03030303u) << i % 2 * 4
            | ((t < 2 ? other : bits) >> 2 * t & 0x03030303u) << (i % 2 * 4 + 2);
    }
}

// Returns whether dropout keeps the weight of row `16 * m + 8 * h + lane / 4` and key
// `8 * n + lane % 4 * 2 + e` of the warp's part of the tile.
template <int MT, int KEYS>
__device__ __forceinline__ bool attention_kept(const uint32_t (&keep)[MT * KEYS / 64], int m, int h, int n,
                                               int e)
{
    const int i = (2 * m + h) * (KEYS / 32) + n / 4;
    return keep[i / 4] >> (n % 4 * 8 + i % 4 * 2 + e) & 1;
}

// Kinds of kernels. PLAIN: plain and causal attention; NEARBY: attention with a window or ALiBi; BY_BLOCKS:
// block-sparse attention with blocks of a multiple of 64 rows.
enum attention_kind { PLAIN, NEARBY, BY_BLOCKS };

// Returns whether the warp's queries, which begin at row `at` of the sequence, all come before key `key` and
// therefore do not see the keys from `key` on.
template <int MT, attention_kind KIND>
__device__ __forceinline__ bool attention_after(const attention_args &p, int at, int key)
{
    return KIND == PLAIN && p.causal && !p.query_row && key >= at + 16 * MT;
}

// The work of a warp in the kernels of the forward and dq: t is the thread block's tile of queries, and the
// warp's queries begin at `mine` in the tile.
template <int MT> struct attention_queries {
    attention_tile t;
    int head, mine, pair; // pair: first of the thread's two columns in each 8 columns of scores
    int first, count;     // number of the tile's first query; number of queries of the tile
    int begin, end, all;  // no query sees keys outside [begin, end); all queries of the warp see keys < `all`
    int row[MT][2];       // the batch's row of each of the thread's queries (attention_rows_of)
};

// The blocks that a thread block works on in block-sparse attention: blocks `from` to `to`, inclusive, of a
// sequence's queries or keys. n: number of blocks of the sequence; 0: the sequence is dense.
struct attention_sparse { int n, from, to; };

__device__ __forceinline__ attention_sparse attention_sparse_of(const attention_args &p, int length, int at,
                                                                int count)
{
    const attention_sparse b = {attention_blocks(p, length), at / p.block, (at + count - 1) / p.block};
    return b;
}

// Returns the first key, from `at` on, whose block is seen by any of b's blocks of queries. If no key is
// seen, returns `end` or a larger number. If KEYS, b has blocks of keys, and the result is the first query
// whose block sees any of b's blocks. Tests 32 blocks at a time.
template <bool KEYS>
__device__ __forceinline__ int attention_seen_from(const attention_args &p, const attention_sparse &b,
                                                   int head, int at, int end)
{
    if (b.n == 0) return at;
    for (int j = at / p.block; j < b.n; j += 32) {
        const int mine = j + (int)threadIdx.x % 32;
        bool seen = false;
        for (int i = b.from; i <= b.to && mine < b.n; i++)
            seen |= attention_times(p, head, b.n, KEYS ? mine : i, KEYS ? i : mine) > 0;
        const uint32_t any = __ballot_sync(0xffffffffu, seen);
        if (any) return max(at, (j + __ffs((int)any) - 1) * p.block);
    }
    return end;
}

// Finds the thread block's queries; returns false if it has none. In causal attention, the first thread
// blocks get the last tiles, so that the tiles of a sequence that see most keys come first. NEAR: attention
// with a window or ALiBi.
template <bool NEAR, int MT, int WARPS = 4>
__device__ __forceinline__ bool attention_find_queries(attention_queries<MT> &b, const attention_args &p)
{
    enum { QUERIES = 16 * MT * WARPS };
    const int number = (int)(blockIdx.x / p.heads), tiles = (int)(gridDim.x / p.heads);
    b.head = p.first_head + (int)(blockIdx.x % p.heads);
    b.mine = (int)threadIdx.x / 32 * 16 * MT;
    b.pair = threadIdx.x % 4 * 2;
    b.t = attention_find<QUERIES>(p, p.query_start, p.causal ? tiles - 1 - number : number);
    if (b.t.at < 0) return false;
    b.first = b.t.first + b.t.at;
    b.count = min(QUERIES + 0, b.t.queries - b.t.at);
    b.begin = NEAR ? attention_window_begin(p, b.t) : 0;
    b.end = NEAR ? attention_window_end(p, b.t, b.count) : attention_end(p, b.t, b.count);
    b.all = !p.causal ? b.t.length : p.query_row ? 1 : b.t.at + b.mine + 1;
    attention_rows_of(b.row, p, b.first, b.count, b.mine);
    return true;
}

// Copies rows first ... first + count - 1 of a head of the keys and of the values by attention_fetch.
template <class T, int D, int KEYS, int THREADS = 128, bool WIDE = false>
__device__ __forceinline__ void attention_fetch_rows(T *ks, T *vs, const attention_args &p, int first,
                                                     int count, int head)
{
    attention_fetch<T, D, KEYS, THREADS, WIDE>(ks, p.k, NULL, first, count, head, p.head_size);
    attention_fetch<T, D, KEYS, THREADS, WIDE>(vs, p.v, NULL, first, count, head, p.head_size);
    tt__cp_async_commit();
}

// Copies KEYS keys and values of a sequence, beginning with key `key`, into one of two stages. head: the head
// of q that reads these keys.
template <class T, int D, int KEYS>
__device__ __forceinline__ void attention_fetch_keys(T *ks, T *vs, const attention_args &p,
                                                     const attention_tile &t, int key, int stage, int head)
{
    const int at = stage * KEYS * (D + 8);
    head /= p.group;
    attention_fetch<T, D, KEYS>(ks + at, p.k, NULL, t.begin + key, t.length - key, head, p.head_size);
    attention_fetch<T, D, KEYS>(vs + at, p.v, NULL, t.begin + key, t.length - key, head, p.head_size);
    tt__cp_async_commit();
}

// Finishes the products of the warp's queries and keys key ... key + KEYS - 1: subtracts ALiBi's bias, and
// sets the products of keys that a query does not see to -INFINITY. slope: the slope of ALiBi divided by the
// scale, which the products do not have yet.
template <int MT, int KEYS, attention_kind KIND>
__device__ __forceinline__ void attention_mask(float (&s)[MT][KEYS / 8][4], const attention_args &p,
                                               const attention_queries<MT> &b, int key, float slope)
{
    if (KIND == NEARBY)
        TT__UNROLL for (int m = 0; m < MT; m++)
            TT__UNROLL for (int i = 0; i < 4; i++) {
                const int row = b.row[m][i / 2] - b.t.begin, ahead = row - key - b.pair - i % 2;
                const int smallest = max(p.smallest, row - b.t.length + 1);
                TT__UNROLL for (int n = 0; n < KEYS / 8; n++) {
                    float &x = s[m][n][i];
                    x = fmaf(-slope, fabsf((float)(ahead - 8 * n)), x);
                    if (ahead - 8 * n < smallest || ahead - 8 * n > p.largest) x = -INFINITY;
                }
            }
    else if (key + KEYS > b.all)
        TT__UNROLL for (int m = 0; m < MT; m++)
            TT__UNROLL for (int i = 0; i < 4; i++) {
                const int last = (p.causal ? b.row[m][i / 2] - b.t.begin
                                  : b.t.length - 1) - key - b.pair - i % 2;
                TT__UNROLL for (int n = 0; n < KEYS / 8; n++) if (8 * n > last) s[m][n][i] = -INFINITY;
            }
}

// Turns the scores of a tile of keys into weights after dropout. largest, sum: each row's largest score so
// far, and the thread's part of the row's sum of weights so far. Rescales `out`, the weighted sums of values,
// to the new largest scores. often: how many times the queries see the keys.
template <int MT, int KEYS, attention_kind KIND, int N>
__device__ __forceinline__ void attention_weigh(float (&s)[MT][KEYS / 8][4], float (&largest)[MT][2],
                                                float (&sum)[MT][2], float (&out)[MT][N][4],
                                                const attention_args &p,
                                                const uint32_t (&keep)[MT * KEYS / 64], float factor,
                                                int often)
{
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            float now = largest[m][h], total = 0;
            TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                now = fmaxf(now, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
            now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
            const float correction = tt__exp2((largest[m][h] - now) * factor);
            // With a window, a query may not have seen any key so far.
            const float offset = NEAR && now == -3.4028235e38f ? 0 : -now * factor;
            largest[m][h] = now;
            TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                TT__UNROLL for (int i = 2 * h; i < 2 * h + 2; i++) {
                    s[m][n][i] = tt__exp2(fmaf(s[m][n][i], factor, offset));
                    if (BLOCKS) s[m][n][i] *= (float)often;
                    total += s[m][n][i];
                }
            sum[m][h] = sum[m][h] * correction + total;
            TT__UNROLL for (int n = 0; n < N; n++)
                { out[m][n][2 * h] *= correction; out[m][n][2 * h + 1] *= correction; }
            if (p.drop)
                TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                    TT__UNROLL for (int i = 0; i < 2; i++)
                        if (!attention_kept<MT, KEYS>(keep, m, h, n, i)) s[m][n][2 * h + i] = 0;
        }
}

template <class T, int D, int MT, int KEYS, attention_kind KIND>
__global__ __launch_bounds__(128, 2) void attention_forward(attention_args p)
{
    tt__begin_kernel();
    enum { QUERIES = 64 * MT, PITCH = D + 8 };
    TT__SHARED(uint64_t, random, ); // in shared memory, or Philox's round keys would stay in registers
    TT__DYN_SHARED(T, qs);
    T *ks = qs + QUERIES * PITCH, *vs = ks + 2 * KEYS * PITCH;
    attention_queries<MT> b;
    const bool NEAR = KIND == NEARBY, BLOCKS = KIND == BY_BLOCKS;
    if (!attention_find_queries<KIND == NEARBY, MT>(b, p)) return;
    const attention_tile &t = b.t;
    const int head = b.head, mine = b.mine, first = b.first, count = b.count, begin = b.begin & -KEYS;
    attention_sparse sparse = {0, 0, 0};
    if (BLOCKS) sparse = attention_sparse_of(p, t.length, t.at, count);
    const float factor = fabsf(p.scale) * TT__LOG2E;
    const float slope = NEAR ? attention_slope(p, head) / fabsf(p.scale) : 0; // for products before scaling
    if (threadIdx.x == 0) random = attention_key(p);
    attention_fetch<T, D, QUERIES>(qs, p.q, p.query_at, first, count, head, p.head_size);
    attention_fetch_keys<T, D, KEYS>(ks, vs, p, t, begin, 0, head);
    float largest[MT][2], sum[MT][2], out[MT][D / 8][4];
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) { largest[m][h] = -3.4028235e38f; sum[m][h] = 0; }
    attention_clear(out);
    for (int key = begin, next, stage = 0; key < b.end; key = next, stage ^= 1) {
        const T *kt = ks + stage * KEYS * PITCH, *vt = vs + stage * KEYS * PITCH;
        next = key + KEYS;
        if (BLOCKS && next < b.end) next = attention_seen_from<false>(p, sparse, head, next, b.end);
        tt__cp_async_wait<0>();
        __syncthreads(); // the tile has arrived, and the other tile is no longer in use
        // With a negative scale, the largest score would be the smallest product. Negating q prevents this.
        if (key == begin && p.scale < 0) {
            for (int i = (int)threadIdx.x; i < QUERIES * PITCH / 2; i += 128)
                if (i % (PITCH / 2) < D / 2) ((uint32_t *)qs)[i] ^= 0x80008000u;
            __syncthreads();
        }
        if (next < b.end) attention_fetch_keys<T, D, KEYS>(ks, vs, p, t, next, stage ^ 1, head);
        // Skips the tile if the warp has no queries, or if none of its queries sees any of the tile's keys.
        if (mine >= count || attention_after<MT, KIND>(p, t.at + mine, key)) continue;
        int often = 1; // how many times the warp's queries see the keys
        if (BLOCKS && sparse.n)
            often = attention_times(p, head, sparse.n, (t.at + mine) / p.block, key / p.block);
        if (often == 0) continue;
        uint32_t keep[MT * KEYS / 64];
        float s[MT][KEYS / 8][4];
        attention_draw_rows<MT, KEYS>(keep, p, random, b.row, key, head);
        attention_mma<T, D, MT, KEYS>(s, qs + mine * PITCH, kt);
        attention_mask<MT, KEYS, KIND>(s, p, b, key, slope);
        attention_weigh<MT, KEYS, KIND>(s, largest, sum, out, p, keep, factor, often);
        attention_mma_add<T, D, MT, KEYS>(out, s, vt);
    }
    attention_columns<T, D> none;
    none.clear();
    TT__UNROLL for (int m = 0; m < MT; m++)
        TT__UNROLL for (int h = 0; h < 2; h++) {
            float total = sum[m][h] + __shfl_xor_sync(0xffffffffu, sum[m][h], 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const int i = mine + 16 * m + 8 * h + (int)threadIdx.x % 32 / 4;
            const int at = i >= count ? -1 : p.query_at ? p.query_at[first + i] : first + i;
            if (at < 0) continue;
            attention_store<T, D>(p.out, at, head, p.head_size, out[m], h, p.keep_scale / total, false,
                                  threadIdx.x % 32, none, false);
            if (b.pair == 0)
                p.lse[(int64_t)at * p.heads + head] = largest[m][h] * fabsf(p.scale) + logf(total);
        }
}

} // namespace
