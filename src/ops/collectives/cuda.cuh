#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/device.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/kernels.cuh"
#include "../optimizers/cuda.cuh"

namespace {

// =============================================================================================== collectives
// Collectives over ranks. Kernels load other members' operands from the memory of their devices, or from host
// memory to which cuda_stage has copied them. One kernel does all sums of a launch, and another does all
// copies, if the kernel's arguments have room for them.

// Number of elements of a sum, and number of bytes of a copy, that a thread block works on.
enum { TT__MOVE_ELEMENTS = 4 * 2048, TT__MOVE_BYTES = 1 << 15 };

__device__ __forceinline__ float reduce_two(int how, tt_dtype dtype, float a, float b)
{
    // The result is NaN if a or b is NaN.
    if (how != TT__SUM) return a != a || (how == TT__MAX ? a > b : a < b) ? a : b;
    if (dtype == TT_F32) return a + b;
    TT__WITH_HALF(dtype, T, return to_float(round_to<T>(a + b)));
}
__device__ __forceinline__ double reduce_two(int how, tt_dtype, double a, double b)
{
    if (how != TT__SUM) return a != a || (how == TT__MAX ? a > b : a < b) ? a : b;
    return a + b;
}

// The tree of sums (src/ranks/threads.h), to which members are added one after another. Level b holds the sum
// of 2^b members, or nothing if bit b of the number of members so far is 0.
template <class T, int N, int LEVELS> struct sum_tree {
    T level[LEVELS][N];

    __device__ __forceinline__ void take(int number, T (&x)[N], int how, tt_dtype dtype)
    {
        bool up = true;
        TT__UNROLL for (int b = 0; b < LEVELS; b++) {
            const bool full = number >> b & 1;
            if (up && full) {
                TT__UNROLL for (int k = 0; k < N; k++) x[k] = reduce_two(how, dtype, level[b][k], x[k]);
            } else if (up) {
                TT__UNROLL for (int k = 0; k < N; k++) level[b][k] = x[k];
            }
            up = up && full;
        }
    }

    // Sets x to the sum of the first `count` members, which are all members so far, at least 1.
    __device__ __forceinline__ void finish(int count, T (&x)[N], int how, tt_dtype dtype)
    {
        bool some = false;
        TT__UNROLL for (int b = 0; b < LEVELS; b++) {
            const bool full = count >> b & 1;
            if (full) {
                TT__UNROLL for (int k = 0; k < N; k++)
                    x[k] = some ? reduce_two(how, dtype, level[b][k], x[k]) : level[b][k];
            }
            some = some || full;
        }
    }
};

// Computes sums over members. LEVELS: 4 for at most 8 members, 7 for at most 64 members.
template <int LEVELS>
__global__ void __launch_bounds__(256, LEVELS == 4 ? 3 : 2)
    sum_members(const __grid_constant__ member_sums s)
{
    tt__begin_kernel();
    const member_sum &t = s.of[tensor_of_block(s.of, s.count)];
    const void *const *peer = s.peers + t.peers;
    const tt_dtype type = (tt_dtype)t.type;
    const int64_t from = (int64_t)(blockIdx.x - t.first) * TT__MOVE_ELEMENTS, end = from + TT__MOVE_ELEMENTS;
    const int64_t to = end < t.n ? end : t.n;
    if (t.type == TT__F64) {
        for (int64_t i = from + threadIdx.x; i < to; i += 256) {
            sum_tree<double, 1, LEVELS> tree;
            double x[1] = {0};
            for (int k = 0; k < t.present; k++) {
                x[0] = ((const double *)peer[k])[i];
                tree.take(k, x, t.how, type);
            }
            tree.finish(t.present, x, t.how, type);
            double *y = (double *)t.y + i;
            *y = t.add ? reduce_two(t.how, type, *y, x[0]) : x[0];
        }
        return;
    }
    for (int64_t i = from + 8 * threadIdx.x; i < to; i += 2048) {
        const int64_t left = to - i;
        sum_tree<float, 8, LEVELS> tree;
        float x[8], y[8];
        for (int k = 0; k < t.present; k++) {
            load8(x, peer[k], type, i, left, t.wide);
            tree.take(k, x, t.how, type);
        }
        tree.finish(t.present, x, t.how, type);
        if (t.add) {
            load8(y, t.y, type, i, left, t.wide);
            TT__UNROLL for (int k = 0; k < 8; k++) x[k] = reduce_two(t.how, type, y[k], x[k]);
        }
        store8(t.y, type, i, left, t.wide, x);
    }
}

// Copies bytes [from, to) of t, as elements of type T.
template <class T> __device__ __forceinline__ void copy_as(const member_copy &t, int64_t from, int64_t to)
{
    for (int64_t i = from / (int64_t)sizeof(T) + threadIdx.x; i < to / (int64_t)sizeof(T); i += 256)
        ((T *)t.y)[i] = ((const T *)t.x)[i];
}

__global__ void __launch_bounds__(256) copy_members(const __grid_constant__ member_copies c)
{
    tt__begin_kernel();
    const member_copy &t = c.of[tensor_of_block(c.of, c.count)];
    const int64_t from = (int64_t)(blockIdx.x - t.first) * TT__MOVE_BYTES, end = from + TT__MOVE_BYTES;
    const int64_t to = end < t.bytes ? end : t.bytes, whole = to / t.unit * t.unit;
    switch (t.unit) {
    case 16: copy_as<uint4>(t, from, whole); break;
    case 8: copy_as<uint2>(t, from, whole); break;
    case 4: copy_as<uint32_t>(t, from, whole); break;
    case 2: copy_as<uint16_t>(t, from, whole); break;
    default: copy_as<uint8_t>(t, from, whole); break;
    }
    copy_as<uint8_t>(t, whole, to);
}

// The sums and copies that run_move has collected for its next kernel launches.
struct move_batch {
    cudaStream_t stream;
    member_sums *sums;
    member_copies *copies;
    unsigned sum_blocks, copy_blocks;
    bool many;          // whether any sum has more than 8 members
};

cudaError_t launch_sums(move_batch *b)
{
    cudaError_t e = cudaSuccess;
    if (b->sum_blocks && b->many)
        e = TT__LAUNCH((sum_members<7>), b->sum_blocks, 256, 0, b->stream, *b->sums);
    else if (b->sum_blocks) e = TT__LAUNCH((sum_members<4>), b->sum_blocks, 256, 0, b->stream, *b->sums);
    b->sums->count = b->sums->used = 0;
    b->sum_blocks = 0;
    b->many = false;
    return e;
}

cudaError_t launch_copies(move_batch *b)
{
    cudaError_t e = cudaSuccess;
    if (b->copy_blocks)
        e = TT__LAUNCH(copy_members, b->copy_blocks, 256, 0, b->stream, *b->copies);
    b->copies->count = 0;
    b->copy_blocks = 0;
    return e;
}

// The work of a collective in one phase. Each member has a shard of the whole tensor. Unless `spread`, a
// member makes its own shard from the same elements of all members' operands. If `spread`, a member copies
// the shard of each member from the operand of that member.
struct move_plan {
    bool spread;
    bool sums;          // true: sums the operands of all present members; false: copies one operand
    bool of_results;    // true: the operands are in peer_out; false: in peer_in
    bool packed;        // whether an operand has only its member's shard
    bool to_piece;      // whether the result has only this member's shard
    int owner;          // the member whose shard is the whole tensor; -1: tt__shard gives the shards
    int only;           // the only member with an operand; -1: all members have operands
};

move_plan plan_of(const tt__launch *l)
{
    const tt__move *m = &l->instr->move;
    const bool spread = l->phase == TT__SPREAD_PHASE;
    const int owner = m->root ? 0 : -1;
    switch (l->instr->op) {
    //                                       spread  sums     results packed to_piece owner  only
    case TT__OP_ALL_REDUCE: return          {spread, !spread, spread, false, false,   -1,    -1};
    case TT__OP_REDUCE_SCATTER: return      {false,  true,    false,  false, true,    owner, -1};
    case TT__OP_SUM_SLOTS: return           {false,  true,    false,  false, false,   l->me, -1};
    case TT__OP_ALL_GATHER: return          {true,   false,   false,  true,  false,   owner, -1};
    case TT__OP_BROADCAST: return           {spread, false,   spread, false, false,   -1,    spread ? -1 : 0};
    case TT__OP_SEND: case TT__OP_RECV: default:
        return                              {false,  false,   false,  false, false,   m->to, m->from};
    }
}

int64_t elements_of(const tt__mat &m) { return m.data ? m.rows * m.cols : 0; }

// The part of a member's shard that a launch works on: elements [first, first + n) of the whole tensor. The
// shard begins at element `begin` and has `left` more elements after this part.
struct shard_part { int64_t begin, first, n, left; };

shard_part part_of(const tt__launch *l, const move_plan &p, int member)
{
    const int64_t whole = max(elements_of(l->in[0]), elements_of(l->out[0]));
    shard_part part = {0, 0, member == p.owner ? whole : 0, 0};
    if (p.owner < 0)
        part.n = tt__shard(whole, l->instr->move.unit, false, member, l->members, &part.begin);
    const int64_t from = l->staged ? min(l->from, part.n) : 0;
    part.first = part.begin + from;
    part.n -= from;
    part.left = l->staged ? max(part.n - l->max, (int64_t)0) : 0;
    part.n -= part.left;
    return part;
}

char *element_of(const void *data, tt_dtype dtype, int64_t k)
{
    return (char *)data + k * (int64_t)tt_dtype_bytes(dtype);
}

// Returns the address at which this member's kernels read `part` of member k's operand.
const void *operand_of(const tt__launch *l, const move_plan &p, int k, const shard_part &part)
{
    const tt__mat &m = p.of_results ? l->peer_out[k] : l->peer_in[k];
    const tt_dtype dtype = l->out[0].dtype;
    if (!l->staged || k == l->me || !l->staged[k])
        return element_of(m.data, dtype, part.first - (p.packed ? part.begin : 0));
    return element_of(l->staged[k], dtype, p.spread ? 0 : l->me * l->max);
}

// Returns the largest power of two, up to 16 bytes, that divides both addresses.
int unit_of(const void *x, const void *y)
{
    int unit = 16;
    while (((uintptr_t)x | (uintptr_t)y) % (unsigned)unit) unit /= 2;
    return unit;
}

cudaError_t add_copy(move_batch *b, void *y, const void *x, int64_t bytes)
{
    cudaError_t e = cudaSuccess;
    if (bytes <= 0 || y == x) return e;
    if (b->copies->count == TT__TENSORS) e = launch_copies(b);
    b->copies->of[b->copies->count++] = {y, x, bytes, b->copy_blocks, unit_of(x, y)};
    b->copy_blocks += blocks_for(bytes, TT__MOVE_BYTES);
    return e;
}

cudaError_t add_sum(move_batch *b, const tt__launch *l, const move_plan &p, const shard_part &part, void *y)
{
    cudaError_t e = cudaSuccess;
    if (part.n <= 0) return e;
    member_sums *s = b->sums;
    if (s->count == TT__TENSORS || s->used + l->present > TT__PEERS) e = launch_sums(b);
    int unit = 16;
    for (int k = 0; k < l->present; k++) {
        s->peers[s->used + k] = operand_of(l, p, k, part);
        unit = min(unit, unit_of(y, s->peers[s->used + k]));
    }
    s->of[s->count++] = {y, part.n, b->sum_blocks, s->used, l->present, (uint8_t)l->out[0].dtype,
                         (uint8_t)l->instr->move.reduce, l->add[0], unit == 16};
    s->used += l->present;
    b->sum_blocks += blocks_for(part.n, TT__MOVE_ELEMENTS);
    b->many = b->many || l->present > 8;
    return e;
}

cudaError_t add_move(move_batch *b, const tt__launch *l)
{
    const move_plan p = plan_of(l);
    const tt__mat &y = l->out[0];
    const int64_t item = (int64_t)tt_dtype_bytes(y.dtype);
    const bool adds_up = p.sums || l->instr->op == TT__OP_ALL_REDUCE;
    cudaError_t e = cudaSuccess;
    if (adds_up && !l->present) return e; // no member has an operand
    if (!p.spread) {
        const shard_part part = part_of(l, p, l->me);
        void *to = element_of(y.data, y.dtype, part.first - (p.to_piece ? part.begin : 0));
        return p.sums ? add_sum(b, l, p, part, to)
            : part.n ? add_copy(b, to, operand_of(l, p, p.only, part), part.n * item) : e;
    }
    // In a broadcast, the result of member 0 may be its operand; then there is nothing to copy.
    if (l->instr->op == TT__OP_BROADCAST && l->me == 0 && y.data == l->in[0].data) return e;
    for (int k = 0; k < l->members && e == cudaSuccess; k++) {
        const shard_part part = part_of(l, p, k);
        if (!part.n) continue;
        void *to = element_of(y.data, y.dtype, part.first);
        e = add_copy(b, to, operand_of(l, p, k, part), part.n * item);
    }
    return e;
}

// Runs `count` collectives of one op in one phase.
cudaError_t run_move(const tt__launch *l, int count)
{
    if (!make_arguments(l->device)) return cudaErrorMemoryAllocation;
    group_arguments *a = l->device->arguments;
    move_batch b = {stream_of(l), &a->sums, &a->copies, 0, 0, false};
    cudaError_t e = cudaSuccess;
    b.sums->count = b.sums->used = b.copies->count = 0;
    for (int k = 0; k < count && e == cudaSuccess; k++) e = add_move(&b, &l[k]);
    if (e == cudaSuccess) e = launch_sums(&b);
    return e == cudaSuccess ? launch_copies(&b) : e;
}
TT__RUN_BY(ALL_REDUCE, run_move)
TT__RUN_BY(REDUCE_SCATTER, run_move)
TT__RUN_BY(ALL_GATHER, run_move)
TT__RUN_BY(BROADCAST, run_move)
TT__RUN_BY(RECV, run_move)
TT__RUN_BY(SUM_SLOTS, run_move)

tt_status cuda_stage(const tt__launch *l, bool *more)
{
    tt__device *d = l->device;
    const move_plan p = plan_of(l);
    const tt__mat &m = p.of_results ? l->out[0] : l->in[0];
    tt_status status = use(d) && stream_of(l) ? TT_OK : TT_ERR_DEVICE;
    *more = false;
    for (int k = 0; k < l->members && status == TT_OK; k++) {
        const shard_part part = part_of(l, p, k);
        const bool needed = p.spread ? k == l->me : k != l->me;
        const bool there = p.only < 0 ? !p.sums || l->me < l->present : p.only == l->me;
        *more = *more || part.left > 0;
        if (!needed || !there || !part.n) continue;
        const char *x = element_of(m.data, m.dtype, part.first - (p.packed ? part.begin : 0));
        char *to = element_of(l->staged[l->me], m.dtype, p.spread ? 0 : k * l->max);
        const size_t bytes = (size_t)part.n * tt_dtype_bytes(m.dtype);
        status = check(d, cudaMemcpyAsync(to, x, bytes, cudaMemcpyDeviceToHost, stream_of(l)),
                       "copy for other devices");
    }
    return status;
}

} // namespace
