#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"

namespace {

// ================================================================================================= attention
// Attention within each sequence and head, without the matrix of scores in memory (Dao: "FlashAttention-2",
// 2023). A thread block owns a tile of queries (or of keys) of one head and goes through the sequence's keys
// (or queries). The backward is two kernels. In one, a block owns a tile of queries and makes dq and the sums
// of dout * out of each row and head; in the other, a block owns a tile of keys and makes dk and dv. The
// scores are thus computed twice, with seven products instead of five, but no two blocks add to one number,
// so that neither atomics nor a dq in fp32 are needed. If a block holds all keys of a sequence, one kernel
// makes dq, dk and dv with five products; bench/results/NOTES.md has the arithmetic. A separate kernel makes
// the sums of dout * out before that kernel, and where no dq is wanted or the rows of out are not aligned.
// The tiles of SIZE rows of sequence s are numbered from start[s] / SIZE + s on. These numbers leave room for
// all tiles of sequences of any lengths, so rows / SIZE + seqs blocks are enough and the host need not know
// the lengths. Blocks whose number has no tile do nothing.

struct attention_args {
    tt__mat q, k, v, out, dout, dq, dk, dv;
    const int32_t *seq_start, *query_start; // (seqs + 1): first row, first query of each sequence
    // Each query's row of the batch, and each query's row in q; NULL: the row is the number of the query.
    const int32_t *query_row, *query_at;
    // Log-sum-exp of the scores, and sum of dout * out; both have the shape (rows of q, heads).
    float *lse, *delta;
    const tt__step_settings *run;
    int seqs, heads, head_size;
    int group;      // heads of q that share a head of k and v
    int first_head; // number of the first head among all ranks' heads
    int longest;    // max number of rows of a sequence
    bool causal, add_dq, add_dk, add_dv;
    int window;                             // rows seen back and, unless causal, ahead; 0: no window
    int smallest, largest;                        // a row sees keys with smallest <= row - key <= largest
    int alibi_heads;                        // number of heads of all ranks; 0: no ALiBi
    float alibi;
    bool alibi_rounded;                     // rounds as transformers' Falcon does (tt_attention_options)
    // Options of block-sparse attention (tt_attention_options). Without block-sparse attention, `block` is 0.
    int block, dense, listed, list_rows;
    const uint16_t *lists;                  // copy of tt__launch.lists in the device's memory
    // scale: factor of the scores; factor: `scale * log2 e`, for exp2; keep_scale: factor of the weights that
    // dropout keeps.
    float scale, factor, keep_scale;
    // Partial column sums of dq (parts_q rows), dk and dv (parts_k rows). Each row has the sums over one
    // tile of rows, written by the thread blocks that own the tile. NULL: the sums are not wanted.
    float *sums_q, *sums_k, *sums_v;
    int parts_q, parts_k;
    // Partial sums of dq, which attention_sum_parts adds up: one matrix after another, each with a row of the
    // shape (heads, head_size) for every query that its thread blocks see. attention_backward_wide fills the
    // matrices. NULL: a thread block has all keys of a sequence, so dq has no partial sums.
    float *parts;
    int64_t slot_begin[TT__CUDA_ATTENTION_SLOTS]; // row of `parts` at which each slot begins
    int slots;
    int pass;                               // number of the current launch of attention_backward_wide, from 0
    int span_rows, span_cols;               // shape of the matrix of span numbers, see attention_find_span
    bool drop;
    uint32_t either[4];                     // masks for the threshold of dropout (tt__attention_either)
    uint32_t random;
    // Bits that tell which weights dropout keeps (attention_bits); NULL: each kernel draws for itself.
    unsigned char *bits;
    bool sums_deltas;                       // whether the kernel of dq computes `delta`
    int warps;                              // warps of attention_backward; 0: two kernels make the gradients
    // item_tiles: number of tiles of a head; item_group: number of heads that are computed at a time;
    // item_rounds: number of items that a thread block takes. See attention_item_of.
    int item_tiles, item_group, item_rounds;
};

#define TT__LOG2E 1.44269504088896341f

__device__ __forceinline__ uint64_t attention_key(const attention_args &p)
{
    const tt__step_settings *run = p.run;
    return p.drop ? stream_key(run->seed, TT__RANDOM_DROPOUT, (uint64_t)run->step,
                               (uint64_t)run->micro << 32 | p.random) : 0;
}

// Returns 16 bits that tell which weights of a query dropout keeps, for the keys from `16 * group` to
// `16 * group + 15` of the query's sequence. row: the query's row of the batch. See tt__attention_either.
__device__ __forceinline__ uint32_t attention_keep(const attention_args &p, uint64_t key, int row, int group,
                                                   int head)
{
    const uint32_t counter[4] = {(uint32_t)row, (uint32_t)group, (uint32_t)head, 0};
    uint32_t x[4], kept = 0xffffffffu;
    philox<TT__DRAW_ROUNDS>(counter, key, x);
    TT__UNROLL for (int b = 0; b < 4; b++) kept = (x[b] & kept) | (p.either[b] & (x[b] | kept));
    kept <<= 16;
    TT__UNROLL for (int b = 0; b < 4; b++) kept = (x[b] & kept) | (p.either[b] & (x[b] | kept));
    return kept >> 16;
}

// A tile of a sequence's queries or of its keys.
struct attention_tile {
    int sequence;
    int begin, length;  // the sequence's first row of the batch, and its number of rows
    int first, queries; // the sequence's first query, and its number of queries
    int at;             // first row or first query of the tile, counted in the sequence
};

// Returns the tile of SIZE rows that has this number (see the beginning of the file); start[s] is the first
// row or query of sequence s. The result has at < 0 if no tile has the number.
template <int SIZE>
__device__ __forceinline__ attention_tile attention_find(const attention_args &p, const int32_t *start,
                                                         int number)
{
    const int lane = threadIdx.x % 32;
    int s = 0, n = p.seqs; // the sequence is one of the n sequences from s on; each pass tests 32 of these n
    while (n > 1) {
        int step = (n + 31) / 32, probe = s + lane * step;
        bool before = lane * step < n && start[probe] / SIZE + probe <= number;
        int last = __popc(__ballot_sync(0xffffffffu, before)) - 1;
        s += last * step;
        n = min(step, n - last * step);
    }
    attention_tile t;
    t.sequence = s;
    t.begin = p.seq_start[s];
    t.length = p.seq_start[s + 1] - t.begin;
    t.first = p.query_start[s];
    t.queries = p.query_start[s + 1] - t.first;
    t.at = (number - start[s] / SIZE - s) * SIZE;
    if (t.at >= start[s + 1] - start[s]) t.at = -1;
    return t;
}

// Returns the place of the bits that tell which weights of a tile of 64 queries and a tile of 64 keys
// dropout keeps. queries, keys: the numbers of the two tiles in a sequence; begin: the sequence's
// attention_bits_begin. The kernel of dq writes the bits for the kernel of dk and dv. The bits have the
// shape (4, 64, 16): the bit of query i and key j, see attention_keep, has number
// `(j / 16 * 64 + i) * 16 + j % 16`. The pairs of tiles are stored as a matrix. In causal attention no pair
// above the diagonal exists, so the pairs are stored as a triangle. See tt__cuda_attention_bits.
__device__ __forceinline__ unsigned char *attention_bits(const attention_args &p, int64_t begin, int queries,
                                                         int keys, int head)
{
    const int pair = p.causal ? queries * (queries + 1) / 2 : queries * ((p.longest + 63) / 64);
    return p.bits + ((begin + pair + keys) * p.heads + head) * TT__CUDA_ATTENTION_BITS;
}

// Returns the number of pairs of tiles whose bits are stored before those of t's sequence.
__device__ __forceinline__ int64_t attention_bits_begin(const attention_args &p, const attention_tile &t)
{
    const int64_t across = (p.longest + 63) / 64, tiles = t.begin / 64 + t.sequence;
    return p.causal ? tiles * (across + 1) / 2 : tiles * across;
}

// Returns the end of the keys that any of a tile's `count` queries sees, without a window.
__device__ __forceinline__ int attention_end(const attention_args &p, const attention_tile &t, int count)
{
    return p.causal && !p.query_row ? min(t.length, t.at + count) : t.length;
}

// attention_window_end returns the end of the keys that any of a tile's `count` queries sees, with or without
// a window; attention_window_begin returns the first of these keys. Listed queries count as seeing all keys.
__device__ __forceinline__ int attention_window_end(const attention_args &p, const attention_tile &t,
                                                    int count)
{
    const bool ends = p.window && !p.causal && !p.query_row;
    return ends ? min(t.length, t.at + count + p.window - 1) : attention_end(p, t, count);
}
__device__ __forceinline__ int attention_window_begin(const attention_args &p, const attention_tile &t)
{
    return p.window && !p.query_row ? max(0, t.at - p.window + 1) : 0;
}

// attention_queries_begin returns the first query that sees any of a tile's `count` keys;
// attention_queries_end returns the end of these queries.
__device__ __forceinline__ int attention_queries_begin(const attention_args &p, const attention_tile &t)
{
    return p.query_row ? 0 : p.causal ? t.at : attention_window_begin(p, t);
}
__device__ __forceinline__ int attention_queries_end(const attention_args &p, const attention_tile &t,
                                                     int count)
{
    return p.window && !p.query_row ? min(t.queries, t.at + count + p.window - 1) : t.queries;
}

// Returns whether row `row` of a sequence sees key `key`.
__device__ __forceinline__ bool attention_sees(const attention_args &p, int row, int key, int length)
{
    return key < length && row - key >= p.smallest && row - key <= p.largest;
}

// Returns the number of blocks of a sequence in block-sparse attention; 0: the sequence is dense.
__device__ __forceinline__ int attention_blocks(const attention_args &p, int length)
{
    return p.block && length > p.dense ? (length + p.block - 1) / p.block : 0;
}

// Returns how many times block i of queries sees block j of keys in a sequence of n blocks. head: a number
// among the heads of all ranks.
__device__ __forceinline__ int attention_times(const attention_args &p, int head, int n, int i, int j)
{
    const int last = n - 1;
    int times = i == 0 || i == last || j == 0 || j == last || abs(i - j) < 2;
    if (i == 0 || i == last || i >= p.list_rows) return times;
    if (!p.lists) return times + (j == 0 ? p.listed : 0);
    const uint16_t *list = p.lists + ((int64_t)head * p.list_rows + i) * p.listed;
    for (int k = 0; k < p.listed; k++) times += list[k] == j;
    return times;
}

// A part of the lists of blocks, which a launch of attention_write_lists passes as a kernel argument. If the
// lists were copied instead, the host would have to wait before it could change them again.
struct attention_lists { uint16_t block[1536]; };
__global__ __launch_bounds__(256) void attention_write_lists(attention_lists lists, uint16_t *to, int n)
{
    tt__begin_kernel();
    for (int i = (int)threadIdx.x; i < n; i += 256) to[i] = lists.block[i];
}

// Returns the ALiBi slope of a head, see tt__alibi_exponent; 0 without ALiBi. head: a number among the heads
// of all ranks.
__device__ __forceinline__ float attention_slope(const attention_args &p, int head)
{
    const int n = p.alibi_heads ? 1 << (31 - __clz(p.alibi_heads)) : 1;
    if (p.alibi_heads == 0) return 0;
    const float slope =
        exp2f((head < n ? -8.0f * (float)(head + 1) : -4.0f * (float)(2 * (head - n) + 1)) / (float)n);
    return p.alibi * (p.alibi_rounded ? to_float(round_to<bf16>(slope)) : slope);
}

// Returns the number that ALiBi subtracts from the score of a row and a key.
__device__ __forceinline__ float attention_bias(const attention_args &p, float slope, int row, int key)
{
    if (!p.alibi_rounded) return slope * fabsf((float)(row - key));
    const float own = to_float(round_to<bf16>(slope / p.alibi)); // exact: the slope is a bf16 number
    const float at_row = own * to_float(round_to<bf16>((float)row));
    const float at_key = own * to_float(round_to<bf16>((float)key));
    return p.alibi * (to_float(round_to<bf16>(at_row)) - to_float(round_to<bf16>(at_key)));
}

// Returns the row of the batch of query number `query`.
__device__ __forceinline__ int attention_row(const attention_args &p, int query)
{
    return p.query_row ? p.query_row[query] : query;
}

// Returns the index of a query and head in lse and delta.
__device__ __forceinline__ int64_t attention_sums_at(const attention_args &p, int query, int head)
{
    return (int64_t)(p.query_at ? p.query_at[query] : query) * p.heads + head;
}

// Sorts n queries by sequence, and within a sequence in the order of `index`; index[j] is the row of query j.
// Makes n^2 comparisons, which even for tens of thousands of queries are less work than one tile of scores
// for each query.
__global__ __launch_bounds__(256) void attention_order(const int32_t *index, int n, const int32_t *seq_start,
                                                       int seqs, int32_t *query_start, int32_t *query_row,
                                                       int32_t *query_at)
{
    tt__begin_kernel();
    TT__SHARED(int32_t, rows, [256]);
    const int j = (int)(blockIdx.x * 256 + threadIdx.x); // a query or, from n on, the start of a sequence
    int begin = 0, end = 0, row = 0, rank = 0;
    if (j < n) {
        int low = 0, high = seqs;
        row = index[j];
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (seq_start[middle] <= row) low = middle;
            else high = middle;
        }
        begin = seq_start[low];
        end = seq_start[low + 1];
    } else if (j <= n + seqs) begin = end = seq_start[j - n];
    for (int from = 0; from < n; from += 256) {
        __syncthreads();
        if (from + (int)threadIdx.x < n) rows[threadIdx.x] = index[from + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < min(256, n - from); i++)
            rank += rows[i] < begin || (from + i < j && rows[i] < end);
    }
    if (j < n) {
        query_row[rank] = row;
        query_at[rank] = j;
    } else if (j <= n + seqs) query_start[j - n] = rank;
}

// Computes the sums of dout * out of each row and head, with loads of 16 bytes. PARTS threads of a warp
// compute a sum together. The PARTS threads make NUMBERS sums, whose loads are in flight together.
enum { TT__DELTA_NUMBERS = 4 };
template <class T, int PARTS> __global__ __launch_bounds__(256) void attention_delta(attention_args p)
{
    tt__begin_kernel();
    enum { LANES = 16 / (int)sizeof(T), NUMBERS = TT__DELTA_NUMBERS, STEP = 256 / PARTS };
    const int64_t all = p.q.rows * p.heads;
    const int64_t first = (int64_t)blockIdx.x * NUMBERS * STEP + threadIdx.x / PARTS;
    const int part = (int)threadIdx.x % PARTS * LANES;
    const bool mine = part < p.head_size;
    uint4 a[NUMBERS], b[NUMBERS];
    TT__UNROLL for (int k = 0; k < NUMBERS; k++) {
        const int64_t number = min(first + k * STEP, all - 1), row = number / p.heads;
        const int64_t column = number % p.heads * p.head_size + (mine ? part : 0);
        a[k] = *(const uint4 *)((const T *)p.out.data + row * p.out.ld + column);
        b[k] = *(const uint4 *)((const T *)p.dout.data + row * p.dout.ld + column);
    }
    TT__UNROLL for (int k = 0; k < NUMBERS; k++) {
        float x[8], y[8], sum = 0;
        widen8<T>(x, a[k]);
        widen8<T>(y, b[k]);
        if (mine) TT__UNROLL for (int i = 0; i < LANES; i++) sum += x[i] * y[i];
        TT__UNROLL for (int m = 1; m < PARTS; m *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
        const int64_t number = first + k * STEP;
        if (part == 0 && number < all) p.delta[number] = sum;
    }
}

// Computes the sums of dout * out of each row and head for any dtypes and addresses; a warp computes one sum.
__global__ __launch_bounds__(256) void attention_delta_any(attention_args p)
{
    tt__begin_kernel();
    const int64_t number = (int64_t)blockIdx.x * 8 + threadIdx.x / 32, row = number / p.heads;
    const int64_t column = number % p.heads * p.head_size;
    const int lane = threadIdx.x % 32;
    float sum = 0;
    for (int i = lane; i < p.head_size && row < p.q.rows; i += 32)
        sum += load_any(p.out.data, p.out.dtype, row * p.out.ld + column + i) * load_any(p.dout.data,
                p.dout.dtype, row * p.dout.ld + column + i);
    sum = warp_sum(sum);
    if (lane == 0 && row < p.q.rows) p.delta[number] = sum;
}

} // namespace
