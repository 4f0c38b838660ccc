#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "cuda_shared.cuh"
#include "cuda_cores.cuh"

namespace {

// ---- the forward by warpgroups with different tasks (Shah et al.: "FlashAttention-3", 2024). The first
// warpgroup of a block copies queries, keys and values, up to STAGES tiles ahead, and draws which weights
// dropout keeps. The other GROUPS warpgroups compute the products of 64 queries each. Warpgroups wait for one
// another at barriers of phases. As many blocks run as the device holds; each takes one tile of queries after
// another, so that the copies for the next tile run during the products of the current tile. For heads of 64
// columns, a multiprocessor has two blocks, and one block computes while the other waits. For heads of 128
// columns, a multiprocessor has one block, which multiplies a tile's weights by values while it computes the
// next tile's scores (OVERLAPS).
template <int D> struct attention_wide_sizes {
    enum { GROUPS = 2, QUERIES = 64 * GROUPS, KEYS = D, BLOCKS = D > 64 ? 1 : 2, STAGES = D > 64 ? 2 : 4,
           // GIVEN: number of registers that each thread has at the launch.
           OVERLAPS = D > 64, GIVEN = 65536 / (128 * (GROUPS + 1) * BLOCKS) / 8 * 8 };
};

// An item of work: a tile of up to QUERIES queries of one head. The tile has `count` queries, beginning with
// number `first`, which is row `at` of a sequence. The sequence has rows begin ... begin + length - 1 of the
// batch. count < 0: there are no more items.
struct attention_item { int begin, length, at, first, count, head; };

// A block's shared memory. keep: bit i of keep[stage][k][query] tells whether dropout keeps the weight for
// key 32 * k + i of the stage's tile of keys.
template <class T, int D, bool DROPS> struct attention_wide_tiles {
    typedef attention_wide_sizes<D> S;
    enum { GROUPS = S::GROUPS, STAGES = S::STAGES, KEYS = S::KEYS };
    T q[2][GROUPS][64 * D], k[STAGES][KEYS * D], v[STAGES][KEYS * D];
    uint32_t keep[DROPS ? STAGES : 1][DROPS ? KEYS / 32 : 1][DROPS ? 64 * GROUPS : 1];
};

// Computes s (64, KEYS) = a b^T, where a is (64, D) and b is (KEYS, D). a and b are stored as parts of 64
// columns, one part after another.
template <class T, int D, int KEYS>
__device__ __forceinline__ void attention_wide_scores(float (&s)[KEYS / 8][4], const T *a, const T *b)
{
    const uint32_t ma = tt__wgmma_matrix(a), mb = tt__wgmma_matrix(b);
    TT__UNROLL for (uint32_t k = 0; k < D; k += 16) {
        const uint32_t part = k / 64, at = k % 64 * 2 / 16;
        tt__wgmma_rows<T>(s, ma + part * 64 * 128 / 16 + at, mb + part * KEYS * 128 / 16 + at, k > 0);
    }
}

// Adds the product of w (64, KEYS) and y (KEYS, D) to `to` (64, D). w is in registers; y is stored as parts
// of 64 columns.
template <class T, int D, int KEYS>
__device__ __forceinline__ void attention_wide_values(float (&to)[D / 8][4],
                                                      const uint32_t (&w)[KEYS / 16][4], const T *y)
{
    const uint32_t my = tt__wgmma_matrix(y);
    TT__UNROLL for (uint32_t k = 0; k < KEYS; k += 16)
        TT__UNROLL for (uint32_t part = 0; part < D / 64; part++)
            tt__wgmma_add<T>(to + 8 * part, w[k / 16], my + (part * KEYS + k) * 128 / 16);
}

// Returns item number `round` of a thread block, or an item with count < 0 if the block has no such item.
// Items are ordered by groups of heads; the L2 cache holds the keys and values of a group. Within a group,
// the last tiles of queries come first, because they take longest in causal attention. In each second round,
// blocks take items in reverse order, so that a block with long items also gets short ones.
template <int QUERIES>
__device__ __forceinline__ attention_item attention_item_of(const attention_args &p, int round)
{
    const uint32_t mine = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const uint32_t number = (uint32_t)round * gridDim.x + mine;
    const uint32_t whole = (uint32_t)(p.item_group * p.item_tiles);
    const uint32_t of = number % whole, head = number / whole * p.item_group + of % p.item_group;
    attention_item item = {0, 0, (p.item_tiles - 1 - (int)of / p.item_group) * QUERIES, 0, -1, 0};
    if (head >= (uint32_t)(p.seqs * p.heads)) return item;
    const int s = (int)head / p.heads;
    item.head = p.first_head + (int)head % p.heads;
    item.begin = p.seq_start[s];
    item.length = p.seq_start[s + 1] - item.begin;
    item.first = p.query_start[s] + item.at;
    item.count = min(QUERIES + 0, p.query_start[s + 1] - item.first);
    if (item.count == 0) item.count = -1;
    return item;
}

// attention_item_begin returns the first key that an item's queries see, rounded down to a multiple of KEYS;
// attention_item_end returns the end of the keys that they see (see attention_window_begin and
// attention_window_end). at: the item's first row; after: the row after the item's last row.
template <int KEYS> __device__ __forceinline__ int attention_item_begin(const attention_args &p, int at)
{
    return p.window && !p.query_row ? max(0, at - p.window + 1) / KEYS * KEYS : 0;
}
__device__ __forceinline__ int attention_item_end(const attention_args &p, int length, int after)
{
    return p.query_row ? length : p.causal ? min(length, after)
        : p.window ? min(length, after + p.window - 1) : length;
}

// Copies rows of a head as attention_fetch does, with 128 threads that have few registers. `to` (ROWS, D) is
// stored as parts of 64 columns.
template <class T, int D, int ROWS>
__device__ __forceinline__ void attention_copy(T *to, const tt__mat &m, const int32_t *at, int first,
                                               int count, int head, int head_size)
{
    TT__UNROLL for (int part = 0; part < D / 64; part++) {
        const int thread = tt__opaque((int)threadIdx.x), r = thread / 8, c = thread % 8 * 8;
        const int left = 64 * part + c < head_size ? count - r : 0;
        const T *const data = (const T *)m.data + (int64_t)head * head_size + 64 * part + c;
        const T *from = data + (int64_t)(first + r) * m.ld;
        T *const row = to + part * ROWS * 64 + r * 64 + (c ^ r % 8 * 8);
        TT__UNROLL for (int i = 0; i < ROWS; i += 16, from += 16 * m.ld) {
            const bool there = i < left;
            if (at && there) from = data + (int64_t)at[first + r + i] * m.ld;
            tt__cp_async_16(row + i * 64, there ? from : (const T *)m.data, there ? 16 : 0);
        }
    }
}

// Barriers for the places in shared memory: two places for queries, STAGES for keys and STAGES for values.
// Threads pass a barrier with the name `..._there` when the place is filled, and a barrier with the name
// `..._used` when the place is free.
struct attention_wide_barriers {
    uint64_t *q_there; // also says that `items` is filled
    uint64_t *q_used, *k_there;
    uint64_t *v_there; // also says that the tile's `keep` is filled
    uint64_t *k_used, *v_used;
    template <class S> __device__ __forceinline__ void begin(bool draws) const
    {
        for (int k = 0; k < 2; k++) {
            tt__phases_init(&q_there[k], 129);
            tt__phases_init(&q_used[k], 4 * S::GROUPS);
        }
        for (int k = 0; k < S::STAGES; k++) {
            tt__phases_init(&k_there[k], 128);
            tt__phases_init(&v_there[k], draws ? 256 : 128);
            tt__phases_init(&k_used[k], 4 * S::GROUPS);
            tt__phases_init(&v_used[k], 4 * S::GROUPS);
        }
    }
};

// The task of a block's first warpgroup: to copy, and to draw for dropout.
template <class T, int D, bool DROPS> struct attention_wide_copies {
    typedef attention_wide_sizes<D> S;
    enum { GROUPS = S::GROUPS, QUERIES = S::QUERIES, KEYS = S::KEYS, STAGES = S::STAGES };
    const attention_args &p;
    attention_wide_tiles<T, D, DROPS> &tile;
    const attention_wide_barriers &barriers;
    attention_item *items, (*found)[32]; // found[warp]: the next 32 items, which the warp's lanes have found
    uint32_t k0, k1;                     // halves of attention_key
    // The tile of keys for which dropout is still to be drawn. last: the tile's item in found[warp]; -1:
    // there is no tile to draw for. last_key: the tile's first key.
    int last, last_key;
    int fetched, taken; // fetched: tiles of keys copied so far; taken: items begun so far

    __device__ __forceinline__ void draw()
    {
        if (!DROPS || last < 0) return;
        const attention_item &item = found[threadIdx.x / 32][last];
        const int stage = (fetched - 1) % STAGES;
        static_assert(QUERIES == 128, "a thread draws for a query");
        const int query = (int)threadIdx.x, row = attention_row(p, item.first + min(query, item.count - 1));
        TT__UNROLL for (int part = 0; part < KEYS / 32; part++) {
            uint32_t bits = 0;
            tt__forget(k0);
            tt__forget(k1);
            const uint64_t random = (uint64_t)k1 << 32 | k0;
            TT__UNROLL for (int k = 0; k < 2; k++)
                bits |= attention_keep(p, random, row, last_key / 16 + 2 * part + k, item.head) << 16 * k;
            tile.keep[stage][part][query] = bits;
        }
        tt__phases_arrive(&barriers.v_there[stage]);
        last = -1;
    }

    __device__ __forceinline__ void take(const attention_item &item)
    {
        if (taken > 1) tt__phases_wait(&barriers.q_used[taken % 2], (taken / 2 & 1) ^ 1);
        if (threadIdx.x == 0) {
            items[taken % 2] = item;
            tt__phases_arrive(&barriers.q_there[taken % 2]);
        }
    }

    // Copies the queries, keys and values of the item found[warp][lane].
    __device__ __forceinline__ void copy(int lane)
    {
        const int slot = taken % 2;
        const attention_item &item = found[threadIdx.x / 32][lane];
        take(item);
        for (int k = 0; k < GROUPS; k++)
            attention_copy<T, D, 64>(tile.q[slot][k], p.q, p.query_at, item.first + 64 * k,
                                     item.count - 64 * k, item.head, p.head_size);
        tt__phases_arrive_with_copies(&barriers.q_there[slot]);
        const int end = attention_item_end(p, item.length, item.at + item.count);
        const int key_head = item.head / p.group;
        for (int key = attention_item_begin<KEYS>(p, item.at); key < end; key += KEYS) {
            const int stage = fetched % STAGES, parity = (fetched / STAGES & 1) ^ 1;
            if (fetched >= STAGES) tt__phases_wait(&barriers.k_used[stage], parity);
            attention_copy<T, D, KEYS>(tile.k[stage], p.k, NULL, item.begin + key, item.length - key,
                                       key_head, p.head_size);
            tt__phases_arrive_with_copies(&barriers.k_there[stage]);
            if (fetched >= STAGES) tt__phases_wait(&barriers.v_used[stage], parity);
            attention_copy<T, D, KEYS>(tile.v[stage], p.v, NULL, item.begin + key, item.length - key,
                                       key_head, p.head_size);
            tt__phases_arrive_with_copies(&barriers.v_there[stage]);
            draw();
            fetched++;
            last = lane;
            last_key = key;
        }
        taken++;
    }

    __device__ __forceinline__ void run()
    {
        for (int from = 0; from < p.item_rounds; from += 32) { // each lane finds one of the next 32 items
            const int round = from + (int)threadIdx.x % 32;
            attention_item mine = {0, 0, 0, 0, -1, 0};
            if (round < p.item_rounds) mine = attention_item_of<QUERIES>(p, round);
            draw();
            __syncwarp();
            found[threadIdx.x / 32][threadIdx.x % 32] = mine;
            __syncwarp();
            for (uint32_t all = __ballot_sync(0xffffffffu, mine.count > 0); all; all &= all - 1)
                copy(__ffs((int)all) - 1);
        }
        draw();
        take({0, 0, 0, 0, -1, 0});
        tt__phases_arrive_with_copies(&barriers.q_there[taken % 2]);
        tt__cp_async_wait<0>();
    }
};

// The task of each other warpgroup: to compute products. group: the number of the warpgroup; team: the
// warpgroup's first query; mine: the warp's first query. Both queries are counted in the item. The lane is
// computed wherever it is used, to save a register.
template <class T, int D, bool DROPS> struct attention_wide_products {
    typedef attention_wide_sizes<D> S;
    enum { KEYS = S::KEYS, STAGES = S::STAGES };
    const attention_args &p;
    attention_wide_tiles<T, D, DROPS> &tile;
    const attention_wide_barriers &barriers;
    int group, team, mine;
    float factor;
    int used; // number of tiles of keys used so far

    __device__ __forceinline__ int lane_of() const { return tt__opaque((int)threadIdx.x) % 32; }
    __device__ __forceinline__ void arrive(uint64_t *barrier) const
    {
        if (lane_of() == 0) tt__phases_arrive(barrier);
    }

    // Begins to compute s, the products of the queries in `slot` and a tile of keys.
    __device__ __forceinline__ void multiply(float (&s)[KEYS / 8][4], int slot) const
    {
        const int stage = used % STAGES;
        tt__phases_wait(&barriers.k_there[stage], used / STAGES & 1);
        tt__wgmma_publish();
        tt__wgmma_fence();
        attention_wide_scores<T, D, KEYS>(s, tile.q[slot][group], tile.k[stage]);
        tt__wgmma_commit();
    }

    __device__ __forceinline__ void add_values(float (&out)[D / 8][4], uint32_t (&w)[KEYS / 16][4],
                                               int used) const
    {
        const int stage = used % STAGES;
        tt__phases_wait(&barriers.v_there[stage], used / STAGES & 1);
        tt__wgmma_publish();
        tt__wgmma_ready(w);
        tt__wgmma_done(out);
        tt__wgmma_fence();
        attention_wide_values<T, D, KEYS>(out, w, tile.v[stage]);
        tt__wgmma_commit();
    }

    // Sets to -INFINITY the scores of the keys in [key, key + KEYS) that a query does not see. Each of the
    // warp's queries sees the keys before `all`, except for keys before its window.
    __device__ __forceinline__ void mask(float (&s)[KEYS / 8][4], const attention_item &item, int key,
                                         int all) const
    {
        const auto row_of = [&](int h, int lane) {
            const int i = min(mine + 8 * h + lane / 4, item.count - 1);
            return attention_row(p, item.first + i) - item.begin;
        };
        if (key + KEYS > all)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int lane = lane_of(), row = row_of(h, lane);
                const int last = (p.causal ? row : p.window ? min(row + p.window, item.length) - 1
                                  : item.length - 1) - key - lane % 4 * 2;
                TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                    TT__UNROLL for (int e = 0; e < 2; e++)
                        if (8 * n + e > last) s[n][2 * h + e] = -INFINITY;
            }
        if (p.window)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                const int lane = lane_of(), from = row_of(h, lane) - p.window + 1 - key - lane % 4 * 2;
                TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
                    TT__UNROLL for (int e = 0; e < 2; e++)
                        if (8 * n + e < from) s[n][2 * h + e] = -INFINITY;
            }
    }

    // Turns scores into weights. Works on the thread's two rows side by side, with two chains of operations
    // for each row, because the latency of a chain decides the time.
    __device__ __forceinline__ void weigh(float (&s)[KEYS / 8][4], float (&largest)[2], float (&sum)[2],
                                          float (&correction)[2]) const
    {
        float now[4] = {largest[0], s[0][1], largest[1], s[0][3]}, total[4] = {0, 0, 0, 0};
        TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
            TT__UNROLL for (int i = 0; i < 4; i++) now[i] = fmaxf(now[i], s[n][i]);
        TT__UNROLL for (int h = 0; h < 2; h++) now[h] = fmaxf(now[2 * h], now[2 * h + 1]);
        TT__UNROLL for (int m = 1; m < 4; m *= 2)
            TT__UNROLL for (int h = 0; h < 2; h++)
                now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], m));
        float offset[2];
        TT__UNROLL for (int h = 0; h < 2; h++) {
            correction[h] = tt__exp2((largest[h] - now[h]) * factor);
            // With a window, a query may not have seen any key so far.
            offset[h] = now[h] == -3.4028235e38f ? 0 : -now[h] * factor;
            largest[h] = now[h];
        }
        TT__UNROLL for (int n = 0; n < KEYS / 8; n++)
            TT__UNROLL for (int i = 0; i < 4; i++) {
                s[n][i] = tt__exp2(fmaf(s[n][i], factor, offset[i / 2]));
                total[i] += s[n][i];
            }
        TT__UNROLL for (int h = 0; h < 2; h++)
            sum[h] = sum[h] * correction[h] + (total[2 * h] + total[2 * h + 1]);
    }

    // Applies dropout to the weights, and packs them as the first operand of a product.
    __device__ __forceinline__ void round(uint32_t (&w)[KEYS / 16][4], const float (&s)[KEYS / 8][4]) const
    {
        TT__UNROLL for (int k = 0; k < KEYS / 16; k++)
            TT__UNROLL for (int i = 0; i < 4; i++)
                w[k][i] = pack<T>(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]);
        if (!DROPS) return;
        const int stage = used % STAGES, lane = lane_of(), pair = lane % 4 * 2;
        tt__phases_wait(&barriers.v_there[stage], used / STAGES & 1);
        TT__UNROLL for (int part = 0; part < KEYS / 32; part++)
            TT__UNROLL for (int h = 0; h < 2; h++) {
                // A thread has two of each 8 keys. In `low`, the highest bit of each byte is the bit of the
                // first of the two keys; in `high`, the highest bit is that of the second.
                const uint32_t bits = tile.keep[stage][part][mine + 8 * h + lane / 4];
                const uint32_t low = bits << (7 - pair), high = bits << (6 - pair);
                TT__UNROLL for (int n = 0; n < 4; n++)
                    w[2 * part + n / 2][n % 2 * 2 + h] &= tt__bytes(low, high, 0xcc88u + 0x1111u * n);
            }
    }

    // Stores the warp's rows of the output. Writes them first to shared memory, over the warp's queries,
    // which are no longer in use, and copies them from there to memory as whole vectors.
    __device__ __forceinline__ void store(const float (&out)[D / 8][4], const float (&largest)[2],
                                          const float (&sum)[2], const attention_item &item, int slot) const
    {
        const int lane = lane_of(), pair = lane % 4 * 2;
        T *const rows = tile.q[slot][group] + (mine - team) * 64;
        __syncwarp(); // all lanes have waited for the products that read these rows
        TT__UNROLL for (int h = 0; h < 2; h++) {
            float total = sum[h] + __shfl_xor_sync(0xffffffffu, sum[h], 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const float scale = p.keep_scale / total;
            const int r = 8 * h + lane / 4;
            TT__UNROLL for (int n = 0; n < D / 8; n++)
                *(uint32_t *)(rows + n / 8 * 64 * 64 + r * 64 + (n % 8 ^ r % 8) * 8 + pair) =
                    pack<T>(out[n][2 * h] * scale, out[n][2 * h + 1] * scale);
            if (pair == 0 && mine + r < item.count)
                p.lse[attention_sums_at(p, item.first + mine + r, item.head)] =
                    largest[h] * fabsf(p.scale) + logf(total);
        }
        __syncwarp();
        for (int i = lane; i < 16 * D / 8; i += 32) {
            const int r = i / (D / 8), c = i % (D / 8), query = item.first + mine + r;
            if (mine + r >= item.count || 8 * c >= p.head_size) continue;
            const int64_t at = p.query_at ? p.query_at[query] : query;
            *(uint4 *)((T *)p.out.data + at * p.out.ld + item.head * p.head_size + 8 * c) =
                *(const uint4 *)(rows + c / 8 * 64 * 64 + r * 64 + (c % 8 ^ r % 8) * 8);
        }
        __syncwarp();
        if (lane == 0) tt__phases_arrive(&barriers.q_used[slot]);
    }

    __device__ __forceinline__ void run(const attention_item &item, int slot)
    {
        const int count = item.count, begin = attention_item_begin<KEYS>(p, item.at);
        // The group's queries see none of the item's keys from `end` on. Each of the warp's queries sees the
        // keys before `all`.
        const int item_end = attention_item_end(p, item.length, item.at + count);
        const int end = team < count
            ? attention_item_end(p, item.length, item.at + min(count, team + 64)) : begin;
        const int all = p.query_row ? 0 : attention_item_end(p, item.length, item.at + mine + 1);
        float largest[2], sum[2], correction[2], s[KEYS / 8][4], out[D / 8][4];
        uint32_t w[KEYS / 16][4];
        TT__UNROLL for (int h = 0; h < 2; h++) { largest[h] = -3.4028235e38f; sum[h] = 0; }
        TT__UNROLL for (int n = 0; n < D / 8; n++) TT__UNROLL for (int i = 0; i < 4; i++) out[n][i] = 0;
        int key = begin;
        for (; key < end; key += KEYS) {
            if (S::OVERLAPS && key > begin) {
                used++;
                multiply(s, slot);
                add_values(out, w, used - 1);
                tt__wgmma_wait<1>();
                tt__wgmma_done(s);
                arrive(&barriers.k_used[used % STAGES]);
                mask(s, item, key, all);
                weigh(s, largest, sum, correction);
                tt__wgmma_wait<0>();
                tt__wgmma_done(out);
                arrive(&barriers.v_used[(used - 1) % STAGES]);
            } else {
                multiply(s, slot);
                tt__wgmma_wait<0>();
                tt__wgmma_done(s);
                arrive(&barriers.k_used[used % STAGES]);
                mask(s, item, key, all);
                weigh(s, largest, sum, correction);
            }
            if (key > begin && __any_sync(0xffffffffu, correction[0] != 1 || correction[1] != 1))
                TT__UNROLL for (int n = 0; n < D / 8; n++)
                    TT__UNROLL for (int i = 0; i < 4; i++) out[n][i] *= correction[i / 2];
            round(w, s);
            if (S::OVERLAPS && key + KEYS < end) continue;
            add_values(out, w, used);
            tt__wgmma_wait<0>();
            tt__wgmma_done(out);
            arrive(&barriers.v_used[used % STAGES]);
            used++;
        }
        for (; key < item_end; key += KEYS) { // tiles of keys that only the queries of other warpgroups see
            const int stage = used % STAGES, parity = used / STAGES & 1;
            tt__phases_wait(&barriers.k_there[stage], parity);
            arrive(&barriers.k_used[stage]);
            tt__phases_wait(&barriers.v_there[stage], parity);
            arrive(&barriers.v_used[stage]);
            used++;
        }
        store(out, largest, sum, item, slot);
    }
};

template <class T, int D, bool DROPS>
__global__ __launch_bounds__(128 * (attention_wide_sizes<D>::GROUPS + 1), attention_wide_sizes<D>::BLOCKS)
void attention_forward_wide(attention_args p)
{
    tt__begin_kernel();
    typedef attention_wide_sizes<D> S;
    enum { FEW = DROPS ? 48 : D > 64 ? 40 : 32,
           MANY = (S::GIVEN * (S::GROUPS + 1) - FEW) / S::GROUPS / 8 * 8 };
    TT__SHARED(uint64_t, q_there, [2]);
    TT__SHARED(uint64_t, q_used, [2]);
    TT__SHARED(uint64_t, k_there, [S::STAGES]);
    TT__SHARED(uint64_t, v_there, [S::STAGES]);
    TT__SHARED(uint64_t, k_used, [S::STAGES]);
    TT__SHARED(uint64_t, v_used, [S::STAGES]);
    TT__SHARED(attention_item, items, [2]);
    TT__SHARED(attention_item, found, [4][32]);
    TT__DYN_SHARED(T, shared);
    auto &tile = *(attention_wide_tiles<T, D, DROPS> *)attention_room(shared);
    const attention_wide_barriers barriers = {q_there, q_used, k_there, v_there, k_used, v_used};
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0) - 1;
    if (threadIdx.x == 0) barriers.begin<S>(DROPS);
    __syncthreads();
    if (group < 0) {
        tt__fewer_registers<FEW>();
        const uint64_t random = DROPS ? attention_key(p) : 0;
        attention_wide_copies<T, D, DROPS> copies =
            {p, tile, barriers, items, found, (uint32_t)random, (uint32_t)(random >> 32), -1, 0, 0, 0};
        copies.run();
        return;
    }
    tt__more_registers<MANY>();
    const int team = 64 * group, mine = team + __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0) % 4 * 16;
    attention_wide_products<T, D, DROPS> products =
        {p, tile, barriers, group, team, mine, fabsf(p.scale) * TT__LOG2E, 0};
    for (int taken = 0;; taken++) {
        const int slot = taken % 2;
        tt__phases_wait(&q_there[slot], taken / 2 & 1);
        if (items[slot].count < 0) break;
        products.run(items[slot], slot);
    }
}

} // namespace
