#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../../cuda/kernels.cuh"
#include "../elementwise/cuda.cuh"
#include "../losses/cuda.cuh"

namespace {

// ---- layernorm

// A thread of a row. Whole warps share a row, and each thread has 8 of the row's columns. The columns are
// neighbours if `vector`; otherwise they are `of` columns apart, where `of` is the number of threads that
// share the row.
struct row_thread {
    int at, of; // number of the thread among the `of` threads that share a row
    bool vector;
    __device__ int64_t column(int j) const { return vector ? at * 8 + j : j * of + at; }
};
inline int row_threads(int64_t cols) { return (int)((cols + 255) / 256 * 32); }

// Loads the thread's columns of row r. Columns after the last become 0, as does the whole row unless `there`.
template <int X>
__device__ __forceinline__ void fetch_row(row_bits<X> &to, const tt__mat &m, int64_t r, const row_thread &t,
                                          bool there = true)
{
    if constexpr (X == ANY) {
        const int64_t cols = there ? m.cols : 0;
        if (t.vector) {
            load_group(to.v, m, r, t.column(0), t.column(0) < cols ? 8 : 0, true);
        } else {
            TT__UNROLL for (int j = 0; j < 8; j++)
                to.v[j] = t.column(j) < cols ? load_any(m.data, m.dtype, r * m.ld + t.column(j)) : 0;
        }
    } else {
        constexpr int N = X == TT_F32 ? 2 : 1;
        const uint4 *p = (const uint4 *)((const char *)m.data + r * m.ld * (X == TT_F32 ? 4 : 2)) + t.at * N;
        TT__UNROLL for (int h = 0; h < N; h++)
            to.q[h] = there && t.at * 8 < (int)m.cols ? p[h] : make_uint4(0, 0, 0, 0);
    }
}

// Loads the thread's columns of the weights w, and adds `offset` to them.
template <int W>
__device__ __forceinline__ void load_weights(float (&to)[8], row_bits<W> &bits, const tt__mat &w,
                                             const row_thread &t, float offset)
{
    fetch_row(bits, w, 0, t);
    widen_row(to, bits);
    TT__UNROLL for (int j = 0; j < 8; j++) to[j] += offset;
}

// Stores v to row r of m. Sets v to the numbers as rounded to the dtype of m.
template <int X>
__device__ __forceinline__ void put_row(const tt__mat &m, int64_t r, const row_thread &t, float (&v)[8])
{
    if constexpr (X == ANY) {
        if (t.vector) {
            if (t.column(0) < m.cols) store8(row_at(m, r), m.dtype, t.column(0), 8, true, v);
        } else {
            TT__UNROLL for (int j = 0; j < 8; j++)
                if (t.column(j) < m.cols) store_any(m.data, m.dtype, r * m.ld + t.column(j), v[j]);
        }
        round8(v, m.dtype);
    } else {
        constexpr int N = X == TT_F32 ? 2 : 1;
        uint4 *p = (uint4 *)((char *)m.data + r * m.ld * (X == TT_F32 ? 4 : 2)) + t.at * N;
        const bool there = t.at * 8 < (int)m.cols;
        if constexpr (X == TT_F32) {
            if (there) store8(p, TT_F32, 0, 8, true, v);
        } else {
            const uint4 q = make_uint4(pack<bf16>(v[0], v[1]), pack<bf16>(v[2], v[3]),
                                       pack<bf16>(v[4], v[5]), pack<bf16>(v[6], v[7]));
            if (there) *p = q;
            widen8<bf16>(v, q);
        }
    }
}

template <int X> __device__ __forceinline__ void add_row(float (&v)[8], const row_bits<X> &from)
{
    float u[8];
    widen_row(u, from);
    TT__UNROLL for (int j = 0; j < 8; j++) v[j] += u[j];
}

// Sums each of N numbers (1, 2 or 4) over the threads of a row: `warps` warps, at most MAX, beginning with
// warp `first` of the block. All threads of the block must call the function. `part` has a row for each warp
// of the block; no thread may still read `part` from an earlier call.
template <int MAX, int N>
__device__ __forceinline__ void row_sums(float (&v)[N], float (*part)[N], int first, int warps)
{
    const int lane = threadIdx.x % 32;
    int m = 16;
    TT__UNROLL for (int n = N; n > 1; n /= 2, m /= 2) // in each step, a lane keeps half of its numbers
        TT__UNROLL for (int k = 0; k < n / 2; k++) {
            const float keep = lane & m ? v[k + n / 2] : v[k], give = lane & m ? v[k] : v[k + n / 2];
            v[k] = keep + __shfl_xor_sync(0xffffffffu, give, m);
        }
    TT__UNROLL for (; m; m >>= 1) v[0] += __shfl_xor_sync(0xffffffffu, v[0], m);
    if (lane % (32 / N) == 0) part[threadIdx.x / 32][lane / (32 / N)] = v[0];
    __syncthreads();
    TT__UNROLL for (int n = 0; n < N; n++) v[n] = 0;
    TT__UNROLL for (int k = 0; k < MAX; k++)
        if (k < warps)
            TT__UNROLL for (int n = 0; n < N; n++) v[n] += part[first + k][n];
}

// Statistics of a row: mean and 1 / std. For rmsnorm, `centred` is false, mean is 0 and rstd is 1 / rms.
struct row_stats { bool centred; float mean, rstd; };

__device__ __forceinline__ void set_stats(const tt__mat &stats, int64_t r, bool centred, float mean,
                                          float rstd)
{
    float *at = (float *)stats.data + r * stats.ld;
    if (centred) *at++ = mean;
    *at = rstd;
}

__device__ __forceinline__ row_stats get_stats(const tt__mat &stats, int64_t r)
{
    const float *at = (const float *)stats.data + r * stats.ld;
    const bool centred = stats.cols == 2;
    return {centred, centred ? at[0] : 0.0f, at[centred]};
}

// Dropout in a norm's kernel. In the forward, the kernel first computes dropout(from) + residual, stores the
// sum in x and normalises it; there is no residual if residual.data is NULL. In the backward, the kernel
// stores dropout(dx) in `to`, and also computes the column sums of `to`, beside those for dw and db.
struct norm_dropout { op_dropout op; tt__mat from, residual, to; };

// Sizes of a thread block. For NARROW rows, of up to 1,024 columns, a block has EACH teams of threads. In a
// turn, a team works on two rows, or on one row if X is ANY. For wider rows, a block is one team and works on
// one row at a time.
template <bool NARROW, int X, int EACH> struct norm_block {
    static constexpr int TEAMS = NARROW ? EACH : 1, ROWS = NARROW && X != ANY ? 2 : 1, TURN = TEAMS * ROWS;
    static constexpr int ROW_WARPS = NARROW ? 4 : 16, WARPS = TEAMS * ROW_WARPS, MAX = WARPS * 32;
};
template <bool NARROW, int X> using forward_block = norm_block<NARROW, X, 2>;
// A block of the backward has 4 teams of threads, or 1 for wide rows. sum_teams gives the same number.
template <bool NARROW, int X> using backward_block = norm_block<NARROW, X, 4>;

// Computes y = (x - mean) / std * w + b, and stores mean and 1 / std to stats. If not `centred`, the mean
// counts as 0. A row stays in the registers of its threads and is read once. X: dtype of x and y, or ANY; W:
// dtype of w and b. Unless X is ANY, a thread loads its next rows while it computes. DROP: the kernel also
// computes dropout; X must not be ANY then.
template <int X, int W, bool NARROW, bool DROP>
__global__ void __launch_bounds__(forward_block<NARROW, X>::MAX, NARROW ? X == TT_BF16 && !DROP ? 3 : 2 : 1)
    layernorm(tt__mat x, tt__mat w, tt__mat b, tt__mat y, tt__mat stats, float offset, float eps,
              bool centred, bool add, bool vector, norm_dropout drop)
{
    tt__begin_kernel();
    typedef forward_block<NARROW, X> B;
    constexpr int ROWS = B::ROWS;
    TT__SHARED(float, sum_part, [B::WARPS][ROWS]);
    TT__SHARED(float, square_part, [B::WARPS][ROWS]);
    if (X != ANY) {
        x.dtype = y.dtype = (tt_dtype)X;
        w.dtype = b.dtype = (tt_dtype)W;
        vector = true;
    }
    constexpr bool AHEAD = X != ANY;
    const int width = (int)blockDim.x / B::TEAMS, team = (int)threadIdx.x / width, warps = width / 32;
    const row_thread t = {(int)threadIdx.x - team * width, width, vector};
    const float each = 1.0f / (float)x.cols;
    row_bits<X> next[ROWS] = {}, next_residual[ROWS] = {};
    uint32_t next_number[ROWS] = {};
    row_bits<W> bits;
    float scale[8], shift[8];
    // The thread's first row in the current turn. The rows in flight are those of the next turn.
    int64_t r = (int64_t)blockIdx.x * B::TURN + team;
    const int64_t step = (int64_t)gridDim.x * B::TURN, rows = x.rows;
    tt__mat from = DROP ? drop.from : x;
    const bool adds_residual = DROP && drop.residual.data, keeps = stats.data;
    move_rows(r, from, y, stats);
    if (DROP) move_rows(r, x, drop.residual);
    const auto fetch = [&](int64_t first) {
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            const bool there = first + i * B::TEAMS < rows;
            fetch_row(next[i], from, i * B::TEAMS, t, there);
            if (!DROP) continue;
            fetch_row(next_residual[i], drop.residual, i * B::TEAMS, t, there && adds_residual);
            next_number[i] = there ? drop.op.number_of(first + i * B::TEAMS) : 0;
        }
        move_rows(step, from);
        if (DROP) move_rows(step, drop.residual);
    };
    if (AHEAD) fetch(r);
    load_weights(scale, bits, w, t, offset);
    fetch_row(bits, b, 0, t, b.data != NULL);
    widen_row(shift, bits);
    if constexpr (DROP) drop.op.begin();
    for (; r - team < rows; r += step) { // the whole block leaves the loop together
        float v[ROWS][8], sum[ROWS], squares[ROWS];
        row_bits<X> residual[ROWS];
        uint32_t number[ROWS];
        if (!AHEAD) fetch(r);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            widen_row(v[i], next[i]);
            residual[i] = next_residual[i];
            number[i] = next_number[i];
        }
        if constexpr (AHEAD) fetch(r + step);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            if constexpr (DROP) {
                drop.op.apply(number[i], (uint32_t)t.at, v[i]);
                if (adds_residual) add_row(v[i], residual[i]);
                if (r + i * B::TEAMS < rows) put_row<X>(x, i * B::TEAMS, t, v[i]);
            }
            sum[i] = 0;
            TT__UNROLL for (int j = 0; j < 8; j++) sum[i] += v[i][j];
        }
        if (centred) row_sums<B::ROW_WARPS>(sum, sum_part, team * warps, warps);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            sum[i] = centred ? sum[i] * each : 0.0f; // sum[i] is the mean from here on
            squares[i] = 0;
            TT__UNROLL for (int j = 0; j < 8; j++) {
                v[i][j] -= sum[i];
                if (t.column(vector ? 0 : j) < x.cols) squares[i] += v[i][j] * v[i][j];
            }
        }
        row_sums<B::ROW_WARPS>(squares, square_part, team * warps, warps);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            const float rstd = rsqrtf(squares[i] * each + eps);
            if (r + i * B::TEAMS >= rows) continue;
            TT__UNROLL for (int j = 0; j < 8; j++) v[i][j] = v[i][j] * (rstd * scale[j]) + shift[j];
            if (add) {
                row_bits<X> old;
                fetch_row(old, y, i * B::TEAMS, t);
                add_row(v[i], old);
            }
            put_row<X>(y, i * B::TEAMS, t, v[i]);
            if (keeps && t.at == 0) set_stats(stats, i * B::TEAMS, centred, sum[i], rstd);
        }
        move_rows(step, y, stats);
        if (DROP) move_rows(step, x);
        if (!centred) __syncthreads(); // waits until all threads have read square_part
    }
}

// Computes y and the statistics of layernorm for rows of more than TT__ROW_COLUMNS columns. A block works on
// one row and reads it three times.
__global__ void __launch_bounds__(TT__ROW_THREADS)
    layernorm_wide(tt__mat x, tt__mat w, tt__mat b, tt__mat y, tt__mat stats, float offset, float eps,
                   bool centred, bool add)
{
    tt__begin_kernel();
    const int64_t r = blockIdx.x;
    float sum = 0, squares = 0;
    for (int64_t c = threadIdx.x; c < x.cols; c += TT__ROW_THREADS)
        sum += load_any(x.data, x.dtype, r * x.ld + c);
    const float mean = centred ? block_sum<TT__ROW_THREADS>(sum) / (float)x.cols : 0.0f;
    for (int64_t c = threadIdx.x; c < x.cols; c += TT__ROW_THREADS) {
        const float v = load_any(x.data, x.dtype, r * x.ld + c) - mean;
        squares += v * v;
    }
    const float rstd = 1.0f / sqrtf(block_sum<TT__ROW_THREADS>(squares) / (float)x.cols + eps);
    for (int64_t c = threadIdx.x; c < x.cols; c += TT__ROW_THREADS) {
        float v = (load_any(x.data, x.dtype, r * x.ld + c) - mean) * rstd *
            (load_any(w.data, w.dtype, c) + offset);
        if (b.data) v += load_any(b.data, b.dtype, c);
        if (add) v += load_any(y.data, y.dtype, r * y.ld + c);
        store_any(y.data, y.dtype, r * y.ld + c, v);
    }
    if (stats.data && threadIdx.x == 0) set_stats(stats, r, centred, mean, rstd);
}

// Runs code with X, W and NARROW for rows of `cols` columns, up to TT__ROW_COLUMNS. Operands that are `typed`
// (of matching dtypes, in vectors) get kernels for the dtypes x and w.
#define TT__WITH_NORM(cols, typed, x, w, ...)                                                          \
    do {                                                                                               \
        const bool typed_ = (typed) && (x) != TT_F16 && (w) != TT_F16;                                 \
        if (typed_ && (x) == TT_F32 && (w) == TT_F32) TT__NORM_ROWS(cols, TT_F32, TT_F32, __VA_ARGS__)  \
        else if (typed_ && (x) == TT_BF16 && (w) == TT_F32)                                            \
            TT__NORM_ROWS(cols, TT_BF16, TT_F32, __VA_ARGS__)                                          \
        else if (typed_ && (x) == TT_BF16) TT__NORM_ROWS(cols, TT_BF16, TT_BF16, __VA_ARGS__)           \
        else TT__NORM_ROWS(cols, ANY, ANY, __VA_ARGS__)                                                \
    } while (0)
#define TT__NORM_ROWS(cols, x, w, ...)                                                                 \
    {                                                                                                  \
        constexpr int X = x, W = w;                                                                    \
        if ((cols) <= 1024) { constexpr bool NARROW = true; __VA_ARGS__; }                             \
        else { constexpr bool NARROW = false; __VA_ARGS__; }                                           \
    }

const norm_dropout no_dropout = {{NULL, NULL, 0, 0, 0, 0, 0, 0}, no_operand, no_operand, no_operand};

template <int X, int W, bool NARROW, bool DROP>
cudaError_t launch_layernorm(const tt__launch *l, bool centred, bool vector, const norm_dropout &drop)
{
    const tt__mat *x = &l->in[0];
    const auto kernel = layernorm<X, W, NARROW, DROP>;
    typedef forward_block<NARROW, X> B;
    const int threads = B::TEAMS * row_threads(x->cols);
    unsigned grid;
    const cudaError_t e = grid_of(l->device, kernel, threads, 1, blocks_for(x->rows, B::TURN), &grid);
    return e != cudaSuccess ? e : TT__LAUNCH(kernel, grid, (unsigned)threads, 0, l->device->stream, *x,
                                             l->in[1], l->in[2], l->out[0], l->out[1],
                                             l->instr->attr.weight_offset, l->instr->attr.eps, centred,
                                             l->add[0], vector, drop);
}

// Runs layernorm or rmsnorm. dropout: NULL, or the launch of the dropout that makes x. The same kernel then
// computes the dropout, too (run_with_dropout).
cudaError_t run_layernorm_with(const tt__launch *l, const tt__launch *dropout)
{
    tt__device *d = l->device;
    const tt__mat *x = &l->in[0], *w = &l->in[1], *b = &l->in[2], *y = &l->out[0];
    const bool vector = x->cols % 8 == 0 && is_wide(x) && is_wide(w) && is_wide(b) && is_wide(y);
    const bool centred = l->instr->op == TT__OP_LAYERNORM;
    if (!x->rows) return cudaSuccess;
    if (x->cols > TT__ROW_COLUMNS)
        return TT__LAUNCH(layernorm_wide, (unsigned)x->rows, TT__ROW_THREADS, 0, d->stream, *x, *w, *b, *y,
                          l->out[1], l->instr->attr.weight_offset, l->instr->attr.eps, centred, l->add[0]);
    const bool typed = vector && y->dtype == x->dtype && (!b->data || b->dtype == w->dtype);
    norm_dropout drop = no_dropout;
    if (dropout) {
        drop.op = dropout_of(dropout);
        drop.from = dropout->in[0];
        drop.residual = dropout->in[1];
    }
    TT__WITH_NORM(x->cols, typed, x->dtype, w->dtype,
                  constexpr bool DROP = X != ANY;
                  return DROP && dropout ? launch_layernorm<X, W, NARROW, DROP>(l, centred, vector, drop)
                                         : launch_layernorm<X, W, NARROW, false>(l, centred, vector, drop));
}

cudaError_t run_layernorm(const tt__launch *l) { return run_layernorm_with(l, NULL); }
TT__RUN_BY(LAYERNORM, run_layernorm)

cudaError_t run_rmsnorm(const tt__launch *l)
{
    tt__launch part;
    cudaError_t e = cudaSuccess;
    for (int k = 0; e == cudaSuccess && tt__norm_launch(l, 0, k, &part); k++) e = run_layernorm(&part);
    return e;
}
TT__RUN_BY(RMSNORM, run_rmsnorm)

// Stores a block's sums over its rows: dw and db to `to` (2, cols) or, if `sums`, dw, db and ds (the column
// sums of dx) to `to` (3, cols). memory: shared memory (TEAMS, 4, threads of a row), if the block has several
// teams.
template <int TEAMS>
__device__ __forceinline__ void store_column_sums(float *to, int64_t cols, const row_thread &t, int team,
                                                  float4 *memory, const float (&dw)[8], const float (&db)[8],
                                                  const float (&ds)[8], bool sums)
{
    const int width = t.of;
    const auto store = [&](int kind, const float (&v)[8]) {
        TT__UNROLL for (int j = 0; j < 8; j++)
            if (t.column(j) < cols) to[kind * cols + t.column(j)] = v[j];
    };
    if constexpr (TEAMS == 1) {
        store(0, dw);
        store(1, db);
        if (sums) store(2, ds);
    } else { // adds up the sums of the teams; a thread's 8 columns are stored as two halves
        float4 *const own = memory + team * 2 * width + t.at;
        const auto leave = [&](int place, const float (&v)[8]) {
            own[place * 2 * width] = make_float4(v[0], v[1], v[2], v[3]);
            own[place * 2 * width + width] = make_float4(v[4], v[5], v[6], v[7]);
        };
        // Each team adds up one kind of sums: dw, db or ds.
        const auto sum_up = [&](int kind, int place, int count) {
            float all[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            for (int k = place; k < place + count; k++) {
                const float4 a = memory[k * 2 * width + t.at], b = memory[(k * 2 + 1) * width + t.at];
                all[0] += a.x; all[1] += a.y; all[2] += a.z; all[3] += a.w;
                all[4] += b.x; all[5] += b.y; all[6] += b.z; all[7] += b.w;
            }
            store(kind, all);
        };
        leave(0, dw);
        leave(TEAMS, db);
        __syncthreads();
        if (team < 2) sum_up(team, team * TEAMS, TEAMS);
        if (!sums) return;
        __syncthreads();
        leave(0, ds);
        __syncthreads();
        if (team == 2) sum_up(2, 0, TEAMS);
    }
}

// Computes, for one row, what the gradient needs of dy (in g) and x (in n). Sets n to (x - mean) / std, g to
// dy * w, sum[0] to the thread's sum of g, and sum[1] to the thread's sum of g * n. dw and db are sums over
// rows: adds dy * n to dw, and dy to db.
__device__ __forceinline__ void begin_gradient(float (&g)[8], float (&n)[8], float *sum, float (&dw)[8],
                                               float (&db)[8], const float (&scale)[8], const row_stats &of)
{
    const float shift = -of.mean * of.rstd;
    sum[0] = sum[1] = 0;
    TT__UNROLL for (int j = 0; j < 8; j++) {
        n[j] = n[j] * of.rstd + shift;
        dw[j] += g[j] * n[j];
        db[j] += g[j];
        g[j] *= scale[j];
        sum[0] += g[j];
        sum[1] += g[j] * n[j];
    }
}

// Computes `dx = (g - avg(g) - n * avg(g * n)) / std`, where `n = (x - mean) / std` and `g = dy * w`. Sums
// `dw = dy * n` and `db = dy` over the block's rows. Writes to `partial`, for each block, the sums of dw and
// db and, if `sums`, the column sums of dx (if `add`, after the addition). dx.data may be NULL. X: dtype of
// dy, x and dx; W: dtype of w. A row and the sums over rows stay in registers; with bf16, the rows of the
// next turn are in flight meanwhile. Reads dy and x (if `add`, also dx) and writes dx once. DROP: the kernel
// also computes dropout; dx must not be NULL then, and X not ANY. The rows of drop.to are dx.ld elements
// apart.
template <int X, int W, bool NARROW, bool DROP>
__global__ void __launch_bounds__(backward_block<NARROW, X>::MAX, 1)
    layernorm_backward(tt__mat dy, tt__mat x, tt__mat w, tt__mat stats, tt__mat dx, int64_t rows_each,
                       float *partial, float offset, bool add, bool vector, bool sums, float each,
                       norm_dropout drop)
{
    tt__begin_kernel();
    typedef backward_block<NARROW, X> B;
    constexpr int TEAMS = B::TEAMS, ROWS = B::ROWS;
    // There are two copies, used in alternate turns: bit TURN (a power of 2) of `left` chooses the copy.
    TT__SHARED(float, sum_part, [2][B::WARPS][2 * ROWS]);
    TT__SHARED(float4, memory, [NARROW ? 2048 : 1]);
    if (X != ANY) {
        dy.dtype = x.dtype = dx.dtype = (tt_dtype)X;
        w.dtype = (tt_dtype)W;
        vector = true;
    }
    constexpr bool AHEAD = X == TT_BF16;
    const int width = (int)blockDim.x / TEAMS, team = (int)threadIdx.x / width, warps = width / 32;
    const row_thread t = {(int)threadIdx.x - team * width, width, vector};
    const bool leaves = dx.data != NULL, centred = stats.cols == 2;
    add = add && leaves;
    float dw[8] = {}, db[8] = {}, ds[8] = {}, scale[8];
    row_bits<X> next_dy[ROWS], next_x[ROWS], next_old[ROWS];
    row_stats next[ROWS];
    uint32_t next_number[ROWS] = {};
    row_bits<W> bits;
    // `left`: number of the block's rows from the thread's first row in the current turn on. The pointers of
    // operands and results are at the thread's first row of the turn that is fetched next. All rows of a turn
    // are fetched together: a thread that waits for one load may have to wait for all loads in flight.
    const int64_t from = (int64_t)blockIdx.x * rows_each;
    const int64_t end = min(x.rows, from + rows_each);
    int left = (int)(end - from) - team;
    // Bytes from dy to x. dy and x have the same ld, so that one pointer serves both.
    const int64_t beside = X != ANY ? (char *)x.data - (char *)dy.data : 0;
    const int64_t dropped = (char *)drop.to.data - (char *)dx.data; // bytes from dx to drop.to
    move_rows(from + team, dy, dx, stats);
    if (X == ANY) move_rows(from + team, x);
    const auto fetch = [&](int many) {
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            const bool there = i * TEAMS < many;
            fetch_row(next_dy[i], dy, i * TEAMS, t, there);
            if (X != ANY) x.data = (char *)dy.data + beside;
            fetch_row(next_x[i], x, i * TEAMS, t, there);
            fetch_row(next_old[i], dx, i * TEAMS, t, there && add);
            next[i] = there ? get_stats(stats, i * TEAMS) : row_stats{centred, 0, 0};
            if constexpr (DROP) next_number[i] = there ? drop.op.number_of(end - many + i * TEAMS) : 0;
        }
        move_rows(B::TURN, dy, dx, stats);
        if (X == ANY) move_rows(B::TURN, x);
    };
    if (AHEAD) fetch(left);
    load_weights(scale, bits, w, t, offset);
    if constexpr (DROP) drop.op.begin();
    // left + team is equal in the whole block, so all threads leave the loop together.
    for (; left + team > 0; left -= B::TURN) {
        float g[ROWS][8], n[ROWS][8], sum[2 * ROWS];
        row_bits<X> old[ROWS];
        row_stats of[ROWS];
        uint32_t number[ROWS];
        if (!AHEAD) fetch(left);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            widen_row(g[i], next_dy[i]);
            widen_row(n[i], next_x[i]);
            old[i] = next_old[i];
            of[i] = next[i];
            number[i] = next_number[i];
        }
        if constexpr (AHEAD) fetch(left - B::TURN);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            float start[8] = {};
            if (add) widen_row(start, old[i]);
            begin_gradient(g[i], n[i], sum + 2 * i, dw, db, scale, of[i]);
            TT__UNROLL for (int j = 0; j < 8; j++) g[i][j] = g[i][j] * of[i].rstd + start[j];
        }
        if (!leaves) continue;
        const int64_t back = AHEAD ? 2 * B::TURN : B::TURN; // the fetched rows are `back` rows further on
        row_sums<B::ROW_WARPS>(sum, sum_part[(left & B::TURN) != 0], team * warps, warps);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            const float avg_g = centred ? sum[2 * i] * each : 0.0f, avg_gn = sum[2 * i + 1] * each;
            const float of_n = -of[i].rstd * avg_gn, rest = -of[i].rstd * avg_g;
            if (i * TEAMS >= left) continue;
            TT__UNROLL for (int j = 0; j < 8; j++) g[i][j] += n[i][j] * of_n + rest;
            put_row<X>(dx, i * TEAMS - back, t, g[i]);
            if constexpr (DROP) {
                drop.op.apply(number[i], (uint32_t)t.at, g[i]);
                drop.to.data = (char *)dx.data + dropped;
                put_row<X>(drop.to, i * TEAMS - back, t, g[i]);
            }
            TT__UNROLL for (int j = 0; j < 8; j++) ds[j] += g[i][j];
        }
    }
    store_column_sums<TEAMS>(partial + (int64_t)blockIdx.x * (sums ? 3 : 2) * x.cols, x.cols, t, team, memory,
                             dw, db, ds, sums);
}

// Computes dx for rows of more than TT__ROW_COLUMNS columns, one row for each block. A multiprocessor has
// four blocks: with eight, the compiler spills registers on compute capability 10.0.
__global__ void __launch_bounds__(TT__ROW_THREADS, 4) layernorm_backward_wide(tt__mat dy, tt__mat x,
        tt__mat w, tt__mat stats, tt__mat dx, float offset, bool add)
{
    tt__begin_kernel();
    const int64_t r = blockIdx.x;
    const row_stats s = get_stats(stats, r);
    const float mean = s.mean, rstd = s.rstd;
    float sum_g = 0, sum_gn = 0;
    for (int64_t c = threadIdx.x; c < x.cols; c += TT__ROW_THREADS) {
        const float g = load_any(dy.data, dy.dtype, r * dy.ld + c) * (load_any(w.data, w.dtype, c) + offset);
        sum_g += g;
        sum_gn += g * (load_any(x.data, x.dtype, r * x.ld + c) - mean) * rstd;
    }
    const float avg_g = s.centred ? block_sum<TT__ROW_THREADS>(sum_g) / (float)x.cols : 0.0f;
    const float avg_gn = block_sum<TT__ROW_THREADS>(sum_gn) / (float)x.cols;
    for (int64_t c = threadIdx.x; c < x.cols; c += TT__ROW_THREADS) {
        const float g = load_any(dy.data, dy.dtype, r * dy.ld + c) * (load_any(w.data, w.dtype, c) + offset);
        const float n = (load_any(x.data, x.dtype, r * x.ld + c) - mean) * rstd;
        const float v = (g - avg_g - n * avg_gn) * rstd;
        store_any(dx.data, dx.dtype, r * dx.ld + c,
                  v + (add ? load_any(dx.data, dx.dtype, r * dx.ld + c) : 0.0f));
    }
}

// Computes the sums of dw and db over a block's rows for rows of more than TT__ROW_COLUMNS columns. A thread
// sums one column.
__global__ void __launch_bounds__(TT__ROW_THREADS) layernorm_sums_wide(tt__mat dy, tt__mat x, tt__mat stats,
        int64_t rows_each, float *partial)
{
    tt__begin_kernel();
    const int64_t c = (int64_t)blockIdx.y * TT__ROW_THREADS + threadIdx.x;
    const int64_t from = (int64_t)blockIdx.x * rows_each, to = min(x.rows, from + rows_each);
    float dw = 0, db = 0;
    if (c >= x.cols) return;
    for (int64_t r = from; r < to; r++) {
        const float g = load_any(dy.data, dy.dtype, r * dy.ld + c);
        const row_stats s = get_stats(stats, r);
        dw += g * (load_any(x.data, x.dtype, r * x.ld + c) - s.mean) * s.rstd;
        db += g;
    }
    partial[(int64_t)blockIdx.x * 2 * x.cols + c] = dw;
    partial[((int64_t)blockIdx.x * 2 + 1) * x.cols + c] = db;
}

template <int X, int W, bool NARROW, bool DROP>
cudaError_t launch_layernorm_backward(const tt__launch *l, unsigned blocks, int64_t rows_each, float *partial,
                                      bool vector, bool sums, const norm_dropout &drop)
{
    const unsigned threads = (unsigned)(backward_block<NARROW, X>::TEAMS * row_threads(l->in[1].cols));
    return TT__LAUNCH((layernorm_backward<X, W, NARROW, DROP>), blocks, threads, 0, l->device->stream,
                      l->in[0], l->in[1], l->in[2], l->in[3], l->out[0], rows_each, partial,
                      l->instr->attr.weight_offset, l->add[0], vector, sums, 1.0f / (float)l->in[1].cols,
                      drop);
}

// Runs the backward of layernorm or rmsnorm. dropout: NULL, or the launch of the dropout of dx. The same
// kernel then computes the dropout, too (run_with_dropout).
cudaError_t run_layernorm_backward_with(const tt__launch *l, const tt__launch *dropout)
{
    tt__device *d = l->device;
    const tt__mat *dy = &l->in[0], *x = &l->in[1], *w = &l->in[2], *stats = &l->in[3], *dx = &l->out[0];
    const bool vector = x->cols % 8 == 0 && is_wide(dy) && is_wide(x) && is_wide(w) && is_wide(dx);
    const bool biased = l->instr->op == TT__OP_LAYERNORM_BACKWARD, wide = x->cols > TT__ROW_COLUMNS;
    const tt__mat *sums = dropout ? &dropout->out[1] : &l->out[biased ? 3 : 2];
    const bool add_sums = dropout ? dropout->add[1] : l->add[biased ? 3 : 2];
    float *partial = resident_of(l)->sums;
    const int kinds = sums->data && !wide ? 3 : 2;
    const int64_t each = rows_of_sums(d, x->rows, x->cols);
    const int64_t blocks = (x->rows + each - 1) / each;
    cudaError_t e = cudaSuccess;
    if (wide) {
        e = TT__LAUNCH(layernorm_sums_wide, dim3((unsigned)blocks, blocks_for(x->cols, TT__ROW_THREADS)),
                       TT__ROW_THREADS, 0, d->stream, *dy, *x, *stats, each, partial);
        if (e == cudaSuccess && dx->data) // dx is computed last, because it may have the memory of dy
            e = TT__LAUNCH(layernorm_backward_wide, (unsigned)x->rows, TT__ROW_THREADS, 0, d->stream, *dy, *x,
                           *w, *stats, *dx, l->instr->attr.weight_offset, l->add[0]);
    } else {
        norm_dropout drop = no_dropout;
        if (dropout) {
            drop.op = dropout_of(dropout);
            drop.to = dropout->out[0];
        }
        const bool typed = vector && dy->dtype == x->dtype && dy->ld == x->ld &&
            (!dx->data || dx->dtype == x->dtype);
        TT__WITH_NORM(x->cols, typed, x->dtype, w->dtype,
                      constexpr bool DROP = X != ANY;
                      e = DROP && dropout
                          ? launch_layernorm_backward<X, W, NARROW, DROP>(l, (unsigned)blocks, each, partial,
                                                                        vector, kinds == 3, drop)
                          : launch_layernorm_backward<X, W, NARROW, false>(l, (unsigned)blocks, each, partial,
                                                                         vector, kinds == 3, drop));
    }
    const tt__mat *const of[3] = {&l->out[1], biased ? &l->out[2] : &no_operand,
                                  kinds == 3 ? sums : &no_operand};
    const bool adds[3] = {l->add[1], l->add[2], add_sums};
    all_sums_to_finish all;
    memset(&all, 0, sizeof all);
    for (int k = 0; k < 3; k++)
        if (of[k]->data)
            add_sums_to_finish(&all, partial + k * x->cols, blocks, kinds * x->cols, of[k], adds[k]);
    if (e == cudaSuccess) e = run_all_finish_sums(d, &all);
    return e == cudaSuccess && sums->data && wide ? run_column_sums(l, dx, sums, add_sums) : e;
}

cudaError_t run_layernorm_backward(const tt__launch *l) { return run_layernorm_backward_with(l, NULL); }
TT__RUN_BY(LAYERNORM_BACKWARD, run_layernorm_backward, 0, MAX_SUM_COLUMNS)

cudaError_t run_rmsnorm_backward(const tt__launch *l)
{
    if (l->instr->attr.heads <= 1) return run_layernorm_backward(l);
    tt__launch part;
    cudaError_t e = cudaSuccess;
    for (int k = 0; e == cudaSuccess && tt__norm_launch(l, 1, k, &part); k++) {
        part.out[2].data = NULL; // the column sums of dx are computed below, for all groups at once
        e = run_layernorm_backward(&part);
    }
    return e == cudaSuccess && l->out[2].data ? run_column_sums(l, &l->out[0], &l->out[2], l->add[2]) : e;
}
TT__RUN_BY(RMSNORM_BACKWARD, run_rmsnorm_backward, 0, MAX_SUM_COLUMNS)

// ---- dropout and a norm in one kernel, if the second of two launches reads the result of the first

// Returns whether a and b share no bytes, or hold the same rows at the same place.
bool is_apart(const tt__mat &a, const tt__mat &b)
{
    if (!a.data || !b.data) return true;
    if (a.data == b.data && a.ld == b.ld && a.dtype == b.dtype) return true;
    const auto end = [](const tt__mat &m) {
        return (const char *)m.data + (size_t)(m.rows > 0 ? (m.rows - 1) * m.ld + m.cols : 0)
            * tt_dtype_bytes(m.dtype);
    };
    return end(a) <= (const char *)b.data || end(b) <= (const char *)a.data;
}

// Runs two launches: dropout and a norm of its result, or the backward of a norm and dropout of its dx. The
// memory plan assumes that the first launch is done before the second begins, so the plan may store results
// of the second where operands of the first are. In one kernel, a thread reads and writes the same columns of
// its rows; this is right if operands and results do not overlap or hold the same rows at the same place.
// Otherwise two kernels run. The results are the same either way.
cudaError_t run_with_dropout(const tt__launch *l)
{
    const bool forward = l->instr->op == TT__OP_DROPOUT;
    const tt__launch *dropout = &l[!forward], *norm = &l[forward];
    const tt__mat *x = forward ? &norm->in[0] : &norm->in[1], *w = forward ? &norm->in[1] : &norm->in[2];
    const tt__mat *const rows[] = {&dropout->in[0], &dropout->in[1], &dropout->out[0], &norm->in[0],
                                   forward ? x : &norm->in[1], &norm->out[0]};
    bool one = x->cols % 8 == 0 && x->cols <= TT__ROW_COLUMNS && x->dtype != TT_F16 && w->dtype != TT_F16 &&
        (x->dtype == TT_BF16 || w->dtype == TT_F32) && is_wide(w) && !dropout->add[0] && w->cols == x->cols;
    for (const tt__mat *m : rows) one = one && is_wide(m) && (!m->data || m->dtype == x->dtype);
    if (forward) {
        const tt__mat *b = &norm->in[2];
        one = one && !dropout->out[1].data && is_wide(b) && (!b->data || b->dtype == w->dtype);
        for (int k = 0; k < 2; k++)
            for (int j = 0; j < 2; j++) one = one && is_apart(norm->out[k], dropout->in[j]);
        one = one && norm->out[1].data != dropout->in[0].data && norm->out[1].data != dropout->in[1].data;
    } else {
        const int sums = norm->instr->op == TT__OP_LAYERNORM_BACKWARD ? 3 : 2;
        one = one && norm->out[0].data && !norm->out[sums].data && !dropout->in[1].data &&
            norm->out[0].ld == dropout->out[0].ld && norm->in[0].ld == norm->in[1].ld;
        for (int k = 0; k < 4; k++) one = one && is_apart(dropout->out[0], norm->in[k]);
    }
    if (one) return forward ? run_layernorm_with(norm, dropout) : run_layernorm_backward_with(norm, dropout);
    const bool rms = norm->instr->op == (forward ? TT__OP_RMSNORM : TT__OP_RMSNORM_BACKWARD);
    const cudaError_t e = forward ? run_dropout(dropout)
        : rms ? run_rmsnorm_backward(norm) : run_layernorm_backward(norm);
    return e != cudaSuccess ? e : !forward ? run_dropout(dropout)
        : rms ? run_rmsnorm(norm) : run_layernorm(norm);
}

// ---- softmax and normalize: GROUP threads work on a row, a warp or a block

template <int GROUP> __device__ __forceinline__ float group_sum(float v)
{
    return GROUP == 32 ? warp_sum(v) : block_sum<256>(v);
}

// Writes v to columns [c, c + 8) of row r of y or, if `add`, adds v to them.
__device__ __forceinline__ void put_columns(const tt__mat &y, int64_t r, int64_t c, bool add, bool wide,
                                            float (&v)[8])
{
    float old[8];
    if (add) {
        load8(old, row_at(y, r), y.dtype, c, y.cols - c, wide);
        TT__UNROLL for (int k = 0; k < 8; k++) v[k] += old[k];
    }
    store8(row_at(y, r), y.dtype, c, y.cols - c, wide, v);
}

// Computes y = exp(x - m) / sum(exp(x - m)), where m is the log-sum-exp of the row. Reads a row three times.
template <int GROUP>
__global__ void __launch_bounds__(256) softmax(tt__mat x, tt__mat y, bool add, bool wide)
{
    tt__begin_kernel();
    const int64_t groups = 256 / GROUP, n = x.cols;
    for (int64_t r = blockIdx.x * groups + threadIdx.x / GROUP; r < x.rows; r += gridDim.x * groups) {
        const float m = row_cross_entropy<GROUP>(row_at(x, r), x.dtype, n, wide, -1, 0).lse;
        float v[8], sum = 0;
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(v, row_at(x, r), x.dtype, c, n - c, wide, -INFINITY);
            TT__UNROLL for (int k = 0; k < 8; k++) sum += fast_exp(v[k] - m);
        }
        const float factor = 1.0f / group_sum<GROUP>(sum);
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(v, row_at(x, r), x.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) v[k] = fast_exp(v[k] - m) * factor;
            put_columns(y, r, c, add, wide, v);
        }
    }
}

// Computes y = x / max(norm, eps), and stores 1 / max(norm, eps) to `inverse` unless inverse.data is NULL.
// Reads a row twice.
template <int GROUP>
__global__ void __launch_bounds__(256) normalize(tt__mat x, tt__mat y, tt__mat inverse, float eps, bool add,
                                                 bool wide)
{
    tt__begin_kernel();
    const int64_t groups = 256 / GROUP, n = x.cols;
    for (int64_t r = blockIdx.x * groups + threadIdx.x / GROUP; r < x.rows; r += gridDim.x * groups) {
        float v[8], sum = 0;
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(v, row_at(x, r), x.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) sum += v[k] * v[k];
        }
        const float norm = sqrtf(group_sum<GROUP>(sum)), factor = 1.0f / (norm < eps ? eps : norm);
        if (inverse.data && threadIdx.x % GROUP == 0) ((float *)inverse.data)[r * inverse.ld] = factor;
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(v, row_at(x, r), x.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) v[k] *= factor;
            put_columns(y, r, c, add, wide, v);
        }
    }
}

// Computes the gradient of softmax, y * (dy - sum(dy * y)), or of normalize if inverse.data is not NULL:
// inverse * (dy - y * sum(dy * y)) or, where `inverse` is at its limit 1 / eps, inverse * dy. Reads a row
// twice.
template <int GROUP>
__global__ void __launch_bounds__(256) whole_rows_backward(tt__mat dy, tt__mat y, tt__mat inverse,
                                                           float limit, tt__mat dx, bool add, bool wide)
{
    tt__begin_kernel();
    const int64_t groups = 256 / GROUP, n = y.cols;
    for (int64_t r = blockIdx.x * groups + threadIdx.x / GROUP; r < y.rows; r += gridDim.x * groups) {
        const float factor = inverse.data ? ((const float *)inverse.data)[r * inverse.ld] : 0;
        float v[8], d[8], dot = 0;
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(d, row_at(dy, r), dy.dtype, c, n - c, wide);
            load8(v, row_at(y, r), y.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++) dot += d[k] * v[k];
        }
        dot = group_sum<GROUP>(dot);
        if (inverse.data && factor >= limit) dot = 0;
        for (int64_t c = 8 * (threadIdx.x % GROUP); c < n; c += 8 * GROUP) {
            load8(d, row_at(dy, r), dy.dtype, c, n - c, wide);
            load8(v, row_at(y, r), y.dtype, c, n - c, wide);
            TT__UNROLL for (int k = 0; k < 8; k++)
                v[k] = inverse.data ? factor * (d[k] - v[k] * dot) : v[k] * (d[k] - dot);
            put_columns(dx, r, c, add, wide, v);
        }
    }
}

enum { WARP_COLUMNS = 1024 }; // rows with more columns are computed by a block, not a warp

cudaError_t run_softmax(const tt__launch *l)
{
    const tt__mat *x = &l->in[0], *y = &l->out[0];
    const bool many = x->cols > WARP_COLUMNS, wide = is_wide(x) && is_wide(y);
    const unsigned blocks = grid_for(x->rows, many ? 1 : 8, TT__ELEMENT_BLOCKS);
    return TT__LAUNCH(many ? softmax<256> : softmax<32>, blocks, 256, 0, l->device->stream, *x, *y, l->add[0],
                      wide);
}
TT__RUN_BY(SOFTMAX, run_softmax)

cudaError_t run_normalize(const tt__launch *l)
{
    const tt__mat *x = &l->in[0], *y = &l->out[0];
    const bool many = x->cols > WARP_COLUMNS, wide = is_wide(x) && is_wide(y);
    const unsigned blocks = grid_for(x->rows, many ? 1 : 8, TT__ELEMENT_BLOCKS);
    return TT__LAUNCH(many ? normalize<256> : normalize<32>, blocks, 256, 0, l->device->stream, *x, *y,
                      l->out[1], l->instr->attr.eps, l->add[0], wide);
}
TT__RUN_BY(NORMALIZE, run_normalize)

cudaError_t run_whole_rows_backward(const tt__launch *l)
{
    const tt__mat *dy = &l->in[0], *y = &l->in[1], *dx = &l->out[0];
    const bool many = y->cols > WARP_COLUMNS, wide = is_wide(dy) && is_wide(y) && is_wide(dx);
    const unsigned blocks = grid_for(y->rows, many ? 1 : 8, TT__ELEMENT_BLOCKS);
    return TT__LAUNCH(many ? whole_rows_backward<256> : whole_rows_backward<32>, blocks, 256, 0,
                      l->device->stream, *dy, *y, l->in[2], 1.0f / l->instr->attr.eps, *dx, l->add[0], wide);
}
TT__RUN_BY(SOFTMAX_BACKWARD, run_whole_rows_backward)
TT__RUN_BY(NORMALIZE_BACKWARD, run_whole_rows_backward)

} // namespace
