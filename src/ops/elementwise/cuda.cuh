#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../../cuda/kernels.cuh"

namespace {

// ---------------------------------------------------------------------------------------- element by element

// Computes y = s * x. Reads x and writes y once.
struct op_scale {
    static constexpr int KIND = HOT_CASTS;
    float s;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        load_group(v, g.a, r, c, n, g.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] *= s;
        return true;
    }
};

cudaError_t run_scale(const tt__launch *l)
{
    const op_scale op = {l->instr->op == TT__OP_SCALE ? l->instr->attr.scale : 1.0f}; // a CAST scales by 1
    return run_groups(l->device, l->in[0], no_operand, l->out[0], l->add[0], false, op);
}
TT__RUN_BY(SCALE, run_scale)
TT__RUN_BY(CAST, run_scale)

// Computes y from a and b by PAIR::of. b is a matrix or, if ROW, a single row. Reads a and b and writes y
// once.
template <class PAIR, bool ROW> struct op_pair {
    static constexpr int KIND = PAIR::KIND;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        float b[8];
        load_group(v, g.a, r, c, n, g.vector);
        load_group(b, g.b, ROW ? 0 : r, c, n, g.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] = PAIR::of(v[j], b[j]);
        return true;
    }
};

template <class PAIR, bool ROW> cudaError_t run_pair(const tt__launch *l)
{
    return run_groups(l->device, l->in[0], l->in[1], l->out[0], l->add[0], ROW, op_pair<PAIR, ROW>());
}

#define TT__ACT_OF(ACT) act_##ACT
#define TT__PAIR(OP, kind, formula)                                              \
    struct pair_##OP {                                                           \
        static constexpr int KIND = kind;                                        \
        static __device__ float of(float a, float b) { return formula; }         \
    };                                                                           \
    TT__RUN_BY(OP, run_pair<pair_##OP, false>)
TT__PAIRS(TT__PAIR, TT__ACT_OF)
#undef TT__PAIR
#undef TT__ACT_OF
TT__RUN_BY(ADD_ROW, run_pair<pair_ADD, true>)

// Computes y = a * b, where b has one row, one column, or one number. Reads a and writes y once.
struct op_mul_broadcast {
    static constexpr int KIND = RARE;
    tt__mat b;
    bool wide;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        const int64_t row = b.rows > 1 ? r : 0;
        float w[8];
        load_group(v, g.a, r, c, n, g.vector);
        if (b.cols > 1) load_group(w, b, row, c, n, wide);
        else TT__UNROLL for (int j = 0; j < 8; j++) w[j] = element(b, row, 0);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] *= w[j];
        return true;
    }
};

cudaError_t run_mul_broadcast(const tt__launch *l)
{
    return run_groups(l->device, l->in[0], no_operand, l->out[0], l->add[0], true,
                      op_mul_broadcast{l->in[1], is_wide(&l->in[1])});
}
TT__RUN_BY(MUL_BROADCAST, run_mul_broadcast)

// Computes the sum of a * b over each row, and writes the sum to y or, if `add`, adds the sum to y. A warp
// works on a row. Reads a and b once.
__global__ void __launch_bounds__(256) row_dots(tt__mat a, tt__mat b, tt__mat y, bool add, bool wide)
{
    tt__begin_kernel();
    for (int64_t r = blockIdx.x * (int64_t)8 + threadIdx.x / 32; r < a.rows; r += gridDim.x * (int64_t)8) {
        float v[8], w[8], sum = 0;
        for (int64_t c = 8 * (threadIdx.x % 32); c < a.cols; c += 8 * 32) {
            load8(v, row_at(a, r), a.dtype, c, a.cols - c, wide);
            load8(w, row_at(b, r), b.dtype, c, a.cols - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) sum += v[k] * w[k];
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32) continue;
        if (add) sum += element(y, r, 0);
        store_any(y.data, y.dtype, r * y.ld, sum);
    }
}

cudaError_t run_row_dots(const tt__launch *l)
{
    const tt__mat *a = &l->in[0], *b = &l->in[1];
    return TT__LAUNCH(row_dots, grid_for(a->rows, 8, 4096), 256, 0, l->device->stream, *a, *b, l->out[0],
                      l->add[0], is_wide(a) && is_wide(b));
}
TT__RUN_BY(ROW_DOTS, run_row_dots)

// Rotary positions. A thread works on 8 pairs of columns, or fewer at the end, and rotates these pairs in
// TURN_HEADS heads. Reads x and writes y once.
enum { TURN_HEADS = 8 };
struct rotary_args {
    tt__mat x, y;
    const int32_t *position;
    bool add, vector;
    int heads, head_size, pairs, neighbours;
    float sign, magnitude;
    // groups: groups of pairs in a head; spans: groups of heads in a row; all: tasks of all rows.
    int64_t groups, spans, all;
    float frequency[TT__MAX_PAIRS];
};

// Writes v to n columns of row r of y, beginning with column c, or adds v to them if a.add.
__device__ void put_group(const rotary_args &a, int64_t r, int64_t c, int n, float (&v)[8])
{
    float old[8];
    if (a.add) {
        load_group(old, a.y, r, c, n, a.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] += old[j];
    }
    store8(row_at(a.y, r), a.y.dtype, c, n, a.vector, v);
}

__global__ void __launch_bounds__(TT__ROW_THREADS, 2) rotary_kernel(rotary_args a)
{
    tt__begin_kernel();
    for (int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x; k < a.all;
         k += (int64_t)gridDim.x * TT__ROW_THREADS) {
        const int64_t r = k / (a.groups * a.spans);
        const int group = (int)(k % a.groups), first = (int)(k / a.groups % a.spans) * TURN_HEADS;
        const int from = group * 8, n = min(8, a.pairs - from); // the last group may have no pair
        const int last = min(first + TURN_HEADS, a.heads);
        float s[8], c[8], v[8], w[8];
        TT__UNROLL for (int j = 0; j < 8; j++) {
            const int pair = min(from + j, a.pairs - 1);
            sincosf((float)a.position[r] * a.frequency[pair], &s[j], &c[j]);
            s[j] *= a.sign * a.magnitude;
            c[j] *= a.magnitude;
        }
        for (int h = first; h < last; h++) {
            const int64_t head = (int64_t)h * a.head_size;
            const int64_t lower = head + (a.neighbours ? 2 * from : from);
            const int64_t upper = a.neighbours ? lower + 8 : lower + a.pairs;
            const int n_lower = a.neighbours ? min(8, 2 * n) : n;
            const int n_upper = a.neighbours ? 2 * n - n_lower : n;
            load_group(v, a.x, r, lower, n_lower, a.vector);
            load_group(w, a.x, r, upper, n_upper, a.vector);
            if (a.neighbours) {
                TT__UNROLL for (int j = 0; j < 4; j++) {
                    const float x = v[2 * j], y = w[2 * j];
                    v[2 * j] = x * c[j] - v[2 * j + 1] * s[j];
                    v[2 * j + 1] = v[2 * j + 1] * c[j] + x * s[j];
                    w[2 * j] = y * c[4 + j] - w[2 * j + 1] * s[4 + j];
                    w[2 * j + 1] = w[2 * j + 1] * c[4 + j] + y * s[4 + j];
                }
            } else {
                TT__UNROLL for (int j = 0; j < 8; j++) {
                    const float x = v[j];
                    v[j] = x * c[j] - w[j] * s[j];
                    w[j] = w[j] * c[j] + x * s[j];
                }
            }
            put_group(a, r, lower, n_lower, v);
            put_group(a, r, upper, n_upper, w);
            if (group || (a.x.data == a.y.data && !a.add)) continue;
            // Copies the columns that are not rotated.
            for (int64_t e = 2 * a.pairs; e < a.head_size; e += 8) {
                const int rest = min((int64_t)8, a.head_size - e);
                load_group(v, a.x, r, head + e, rest, a.vector);
                put_group(a, r, head + e, rest, v);
            }
        }
    }
}

cudaError_t run_rotary(const tt__launch *l)
{
    const tt_rotary_options *o = &l->instr->attr.rotary;
    rotary_args a;
    memset(&a, 0, sizeof a);
    a.x = l->in[0];
    a.y = l->out[0];
    a.position = (const int32_t *)l->in[1].data;
    a.add = l->add[0];
    a.heads = l->instr->attr.heads;
    a.head_size = (int)(a.x.cols / a.heads);
    a.pairs = tt__rotary_pairs_of(o);
    a.neighbours = o->pairs == TT_ROTARY_NEIGHBOURS;
    a.sign = l->instr->attr.scale;
    a.magnitude = o->magnitude;
    a.vector = is_wide(&a.x) && is_wide(&a.y) && a.pairs % 8 == 0 && a.head_size % 8 == 0;
    a.groups = (a.pairs + 7) / 8;
    a.spans = (a.heads + TURN_HEADS - 1) / TURN_HEADS;
    a.all = a.y.rows * a.groups * a.spans;
    double frequency[TT__MAX_PAIRS];
    tt__rotary_frequencies(o, frequency);
    for (int j = 0; j < a.pairs; j++) a.frequency[j] = (float)frequency[j];
    unsigned grid;
    const cudaError_t e = grid_of(l->device, rotary_kernel, TT__ROW_THREADS, 2,
                                  blocks_for(a.all, TT__ROW_THREADS), &grid);
    return e != cudaSuccess ? e : TT__LAUNCH(rotary_kernel, grid, TT__ROW_THREADS, 0, l->device->stream, a);
}
TT__RUN_BY(ROTARY, run_rotary)

// Sets y to a constant, multiplied by the loss scale if `scale` is not NULL. Writes y once.
struct op_fill {
    static constexpr int KIND = RARE;
    float x;
    const tt__scale_state *scale;
    __device__ void begin() { if (scale) x *= (float)scale->scale; }
    __device__ bool get(const group_args &, int64_t, int64_t, int, float (&v)[8]) const
    {
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] = x;
        return true;
    }
};

cudaError_t run_fill(const tt__launch *l)
{
    tt__device *d = l->device;
    const op_fill op = {l->instr->attr.scale, (const tt__scale_state *)l->in[0].data};
    return l->add[0] ? cudaSuccess : run_groups(d, no_operand, no_operand, l->out[0], false, false, op);
}
TT__RUN_BY(FILL, run_fill)

// Computes y = act(x); op_act_backward computes dx = dy * act'(saved). op_act and op_act_backward read and
// write each matrix once.
template <int ACT> struct op_act {
    static constexpr int KIND = ACT == TT__ACT_GELU || ACT == TT__ACT_GELU_TANH ? HOT : RARE;
    __device__ void begin() {}
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        load_group(v, g.a, r, c, n, g.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] = activate(ACT, v[j]);
        return true;
    }
};

template <int ACT> struct op_act_backward {
    static constexpr int KIND = ACT == TT__ACT_GELU || ACT == TT__ACT_GELU_TANH ? HOT : RARE;
    __device__ void begin() {}
    __device__ void finish(bool, int64_t, int64_t, float (&v)[8], const float (&saved)[8]) const
    {
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] *= activation_slope(ACT, saved[j]);
    }
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        float saved[8];
        load_group(v, g.a, r, c, n, g.vector);
        load_group(saved, g.b, r, c, n, g.vector);
        finish(true, r, c, v, saved);
        return true;
    }
};

// Calls run(op), where op is OP<act> for the activation `act`.
template <template <int> class OP, class RUN> cudaError_t with_act(int act, RUN run)
{
#define TT__RUN_ACT(ACT, function, by_result) case TT__ACT_##ACT: return run(OP<TT__ACT_##ACT>());
    switch (act) { TT__ACTS(TT__RUN_ACT) }
#undef TT__RUN_ACT
    return cudaErrorInvalidValue; // there is no such activation
}

cudaError_t run_act(tt__device *d, int act, const tt__mat &x, const tt__mat &y, bool add)
{
    return with_act<op_act>(act, [&](auto op) { return run_groups(d, x, no_operand, y, add, false, op); });
}

cudaError_t run_slope(const tt__launch *l, int act, const tt__mat &dy, const tt__mat &saved,
                      const tt__mat &dx, bool add, const tt__mat &sums, bool add_sums)
{
    return with_act<op_act_backward>(act, [&](auto op) {
        return run_groups_sums(l, dy, saved, dx, add, false, op, sums, add_sums);
    });
}

cudaError_t run_activation(const tt__launch *l)
{
    return run_act(l->device, l->instr->attr.act, l->in[0], l->out[0], l->add[0]);
}
TT__RUN_BY(ACTIVATION, run_activation)

cudaError_t run_activation_backward(const tt__launch *l)
{
    return run_slope(l, l->instr->attr.act, l->in[0], l->in[1], l->out[0], l->add[0], l->out[1], l->add[1]);
}
TT__RUN_BY(ACTIVATION_BACKWARD, run_activation_backward)

// Arguments of the backward of swiglu, which works on groups of 8 columns, as each_group does. dgate or dup
// may be absent, or have the memory of an operand. Reads operands and writes results once.
struct swiglu_args { tt__mat dy, gate, up, dgate, dup; bool add_dgate, add_dup, vector; int64_t per_row; };

// Computes dgate and dup. X: dtype of all operands and results, or ANY.
template <int X> __global__ void __launch_bounds__(TT__ROW_THREADS, 2) swiglu_backward(swiglu_args g)
{
    tt__begin_kernel();
    if (X != ANY) {
        g.dy.dtype = g.gate.dtype = g.up.dtype = g.dgate.dtype = g.dup.dtype = (tt_dtype)X;
        g.vector = true;
    }
    const auto write = [&](const tt__mat &y, bool add, int64_t r, int64_t c, int n, float (&v)[8]) {
        float old[8];
        if (!y.data) return;
        if (add) {
            load_group(old, y, r, c, n, g.vector);
            TT__UNROLL for (int j = 0; j < 8; j++) v[j] += old[j];
        }
        store8(row_at(y, r), y.dtype, c, n, g.vector, v);
    };
    for (int64_t r = blockIdx.y; r < g.dy.rows; r += gridDim.y)
        for (int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x; k < g.per_row;
             k += (int64_t)gridDim.x * TT__ROW_THREADS) {
            const int64_t c = k * 8;
            const int n = X != ANY ? 8 : (int)min(g.dy.cols - c, (int64_t)8);
            float dy[8], gate[8], up[8];
            load_group(dy, g.dy, r, c, n, g.vector);
            load_group(gate, g.gate, r, c, n, g.vector);
            load_group(up, g.up, r, c, n, g.vector);
            TT__UNROLL for (int j = 0; j < 8; j++) {
                up[j] *= dy[j] * slope_SILU(gate[j]);
                dy[j] *= act_SILU(gate[j]);
            }
            write(g.dgate, g.add_dgate, r, c, n, up);
            write(g.dup, g.add_dup, r, c, n, dy);
        }
}

cudaError_t run_swiglu_backward(const tt__launch *l)
{
    swiglu_args g = {l->in[0], l->in[1], l->in[2], l->out[0], l->out[1], l->add[0], l->add[1], true, 0};
    const tt__mat *const all[5] = {&g.dy, &g.gate, &g.up, &g.dgate, &g.dup};
    bool alike = g.dy.cols % 8 == 0;
    if (g.dy.rows < 1) return cudaSuccess;
    for (int k = 0; k < 5; k++) {
        g.vector = g.vector && is_wide(all[k]);
        alike = alike && (!all[k]->data || all[k]->dtype == g.dy.dtype);
    }
    g.per_row = (g.dy.cols + 7) / 8;
    alike = alike && g.vector;
    const unsigned across = grid_for(g.per_row, TT__ROW_THREADS, 64);
    unsigned blocks;
    const auto kernel = alike && g.dy.dtype == TT_F32 ? swiglu_backward<TT_F32>
        : alike && g.dy.dtype == TT_BF16 ? swiglu_backward<TT_BF16>
        : alike && g.dy.dtype == TT_F16 ? swiglu_backward<TT_F16> : swiglu_backward<ANY>;
    const cudaError_t e = grid_of(l->device, kernel, TT__ROW_THREADS, 2, g.dy.rows * across, &blocks);
    if (e != cudaSuccess) return e;
    const dim3 grid(across, min((blocks + across - 1) / across, 65535u));
    return TT__LAUNCH(kernel, grid, TT__ROW_THREADS, 0, l->device->stream, g);
}
TT__RUN_BY(SWIGLU_BACKWARD, run_swiglu_backward)

// Computes y = x / (1 - p) for elements that dropout keeps, 0 for others, plus the residual if it is
// present. A group of 8 columns gets its 16-bit random numbers from Philox counter `{r, c / 8, 0, 0}`. Here
// c counts the columns of all ranks; r is number[row] or, if `number` is NULL, counts the rows of all ranks.
// Reads x and residual and writes y once; the random numbers take some 12 integer operations an element.
struct op_dropout {
    static constexpr int KIND = HOT;
    const tt__step_settings *run;
    const int32_t *number;
    int64_t first_row, first_col; // first_col is a multiple of 8
    uint32_t stream, drop;
    float scale;
    uint64_t key;
    __device__ void begin()
    {
        TT__SHARED(uint64_t, shared, );
        if (threadIdx.x == 0)
            shared = stream_key(run->seed, TT__RANDOM_DROPOUT, (uint64_t)run->step,
                                (uint64_t)run->micro << 32 | stream);
        __syncthreads();
        key = shared;
    }
    __device__ uint32_t number_of(int64_t r) const
    {
        return number ? (uint32_t)number[r] : (uint32_t)(first_row + r);
    }
    // Applies dropout to v, group number `group` of 8 columns of row number `row`.
    __device__ void apply(uint32_t row, uint32_t group, float (&v)[8]) const
    {
        const uint32_t counter[4] = {row, (uint32_t)(first_col / 8) + group, 0, 0};
        uint32_t u[4];
        philox<TT__DRAW_ROUNDS>(counter, key, u);
        TT__UNROLL for (int j = 0; j < 8; j++)
            v[j] = (u[j / 2] >> (j % 2 * 16) & 0xffff) >= drop ? v[j] * scale : 0.0f;
    }
    __device__ void finish(bool adds, int64_t r, int64_t c, float (&v)[8], const float (&residual)[8]) const
    {
        apply(number_of(r), (uint32_t)(c / 8), v);
        if (adds) TT__UNROLL for (int j = 0; j < 8; j++) v[j] += residual[j];
    }
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        float residual[8];
        load_group(v, g.a, r, c, n, g.vector);
        if (g.b.data) load_group(residual, g.b, r, c, n, g.vector);
        finish(g.b.data != NULL, r, c, v, residual);
        return true;
    }
};

op_dropout dropout_of(const tt__launch *l)
{
    const uint32_t drop = (uint32_t)TT__DROP_THRESHOLD(l->instr->attr.dropout);
    return {TT__RUN_OF(l), (const int32_t *)l->in[2].data, l->first_row, l->first_col, l->instr->random, drop,
            65536.0f / (float)(65536 - drop), 0};
}

cudaError_t run_dropout(const tt__launch *l)
{
    return run_groups_sums(l, l->in[0], l->in[1], l->out[0], l->add[0], true, dropout_of(l), l->out[1],
                           l->add[1]);
}
TT__RUN_BY(DROPOUT, run_dropout)

} // namespace
