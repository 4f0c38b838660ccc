#pragma once
#include "../backend/backend.h"
#include "system.cuh"
#include "portability.cuh"
#include "numbers.cuh"

namespace {

// ================================================================================================== rows
// Building blocks of ops that work row by row or element by element.

#define TT__ROW_THREADS 256
struct loss_sums { double loss, weight, right; };

// The resident workspace that a launch may use. A matrix product uses it in two parts: the first part is for
// cuBLASLt; the second holds the sums for a bias gradient, or a bias that was converted to another dtype.
// Other kernels use the whole workspace.
union resident_workspace {
    static constexpr size_t BYTES = TT__CUDA_RESIDENT, BIAS_BYTES = (BYTES / 32 + 4095) / 4096 * 4096;
    static constexpr size_t LT_BYTES = BYTES - BIAS_BYTES;
    struct { unsigned char lt[LT_BYTES]; float bias[BIAS_BYTES / sizeof(float)]; } product;
    float sums[BYTES / sizeof(float)]; // partial sums of kernels that sum in two steps
    double squares[BYTES / sizeof(double)];
    loss_sums losses[BYTES / sizeof(loss_sums)];
    unsigned words[BYTES / sizeof(unsigned)]; // SET_ROWS: a bit for each row; sorting: counts of digits
};
static_assert(sizeof(resident_workspace) == resident_workspace::BYTES, "there is nothing between the parts");

resident_workspace *resident_of(const tt__launch *l) { return (resident_workspace *)l->resident; }

__device__ __forceinline__ void load_group(float (&v)[8], const tt__mat &m, int64_t r, int64_t c, int n,
                                           bool vector)
{
    load8(v, row_at(m, r), m.dtype, c, n, vector);
}

// ---- sums over rows: f32 sums of parts of the rows, then the sum of the parts

__device__ __forceinline__ float element(const tt__mat &m, int64_t i, int64_t j)
{
    return load_any(m.data, m.dtype, i * m.ld + j);
}

// Arguments of the last step of a sum. `partial` has `parts` rows, `stride` floats apart. The sum of column c
// of the rows becomes `to[c]` or, if `add`, is added to `to[c]`. The structure has no padding, because in
// arrays of structures gcc 12 with -ftrivial-auto-var-init clears wrong bytes instead of the padding.
struct sums_to_finish { const float *partial; void *to; int64_t parts, stride, cols; int dtype, add; };
struct all_sums_to_finish { sums_to_finish of[3]; int64_t count; };

// Does the last step of sums: adds up the rows of partial sums. A block has 32 columns, and its 32 warps take
// rows in turn; a thread has 8 loads in flight, so that a block loads up to 256 rows at once.
__global__ void __launch_bounds__(1024) finish_sums(const __grid_constant__ all_sums_to_finish all)
{
    tt__begin_kernel();
    TT__SHARED(float, sums, [32][33]);
    const sums_to_finish &s = all.of[blockIdx.y];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t c = (int64_t)blockIdx.x * 32 + lane;
    float sum = 0;
    for (int64_t k = warp; k < s.parts && c < s.cols; k += 256) {
        float v[8];
        TT__UNROLL for (int u = 0; u < 8; u++)
            v[u] = k + 32 * u < s.parts ? s.partial[(k + 32 * u) * s.stride + c] : 0;
        TT__UNROLL for (int u = 0; u < 8; u++) sum += v[u];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || c >= s.cols) return;
    TT__UNROLL for (int k = 1; k < 32; k++) sum += sums[k][lane];
    if (s.add) sum += load_any(s.to, (tt_dtype)s.dtype, c);
    store_any(s.to, (tt_dtype)s.dtype, c, sum);
}

void add_sums_to_finish(all_sums_to_finish *all, const float *partial, int64_t parts, int64_t stride,
                        const tt__mat *to, bool add)
{
    all->of[all->count++] = {partial, to->data, parts, stride, to->cols, to->dtype, add};
}

// Does the last step of all sums in `all`. One launch of finish_sums serves consecutive sums that have
// different results. Sums that are added to the same result need one launch after another.
cudaError_t run_all_finish_sums(tt__device *d, const all_sums_to_finish *all)
{
    const int64_t sums = all->count;
    all_sums_to_finish some = *all;
    cudaError_t e = cudaSuccess;
    for (int64_t from = 0; from < sums && e == cudaSuccess; from += some.count) {
        int64_t columns = 0;
        bool apart = true;
        some.count = 0;
        for (int64_t k = from; k < sums; k++) {
            for (int64_t j = from; j < k; j++) apart = apart && all->of[j].to != all->of[k].to;
            if (!apart) break;
            some.of[some.count++] = all->of[k];
            columns = max(columns, all->of[k].cols);
        }
        e = TT__LAUNCH(finish_sums, dim3(blocks_for(columns, 32), (unsigned)some.count), 1024, 0, d->stream,
                       some);
    }
    return e;
}

cudaError_t run_finish_sums(tt__device *d, const float *partial, int64_t parts, int64_t stride,
                            const tt__mat *to, bool add)
{
    all_sums_to_finish all;
    memset(&all, 0, sizeof all);
    add_sums_to_finish(&all, partial, parts, stride, to, add);
    return run_all_finish_sums(d, &all);
}

// Sums 256 columns over the 8 warps of a block. Lane i passes columns [8 i, 8 i + 8); thread k gets the sum
// of column k.
__device__ __forceinline__ float sum_warps(const float (&v)[8])
{
    TT__SHARED(float, part, [8][256]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    TT__UNROLL for (int j = 0; j < 8; j++) part[warp][lane * 8 + j] = v[j];
    __syncthreads();
    float sum = 0;
    TT__UNROLL for (int w = 0; w < 8; w++) sum += part[w][threadIdx.x];
    return sum;
}

// Returns the number of blocks that sum rows: at least 1, and otherwise the smallest of three numbers. The
// first is `each` for each multiprocessor of the device. The second is `pieces`, the number of blocks that
// have rows to sum. The third is the number of blocks whose f32 sums, `bytes` bytes a block, fit the resident
// workspace after its first `used` bytes.
int64_t sum_blocks(const tt__device *d, int each, int64_t pieces, size_t used, size_t bytes)
{
    const int64_t room = (int64_t)((resident_workspace::BYTES - used) / bytes);
    return max((int64_t)1, min(min(pieces, each * (int64_t)d->properties.multiProcessorCount), room));
}

#define TT__ROW_COLUMNS 4096 // largest number of columns of a row that fits the registers of a block

// Returns the number of rows in a chunk of column sums. The columns of a gradient may be summed by the kernel
// that computes the gradient, or by another kernel, if a pipeline stage gets the gradient from the next
// stage. Both kernels must give the same bits, so each sums the numbers as they are stored, chunk by chunk.
// The threads of a block form sum_teams() teams, which take the rows of a chunk in turn.
int64_t rows_of_sums(const tt__device *d, int64_t rows, int64_t columns)
{
    // Number of layernorm_backward's blocks that fit a multiprocessor.
    const int64_t blocks = min((columns <= 1024 ? 1024 : TT__ROW_COLUMNS) / columns, (int64_t)4);
    const int64_t largest = sum_blocks(d, (int)max(blocks, (int64_t)1), (rows + 7) / 8, 0,
                                    (size_t)(3 * columns) * sizeof(float));
    return max(((rows + largest - 1) / largest + 7) / 8 * 8, (int64_t)8);
}

__host__ __device__ inline int sum_teams(int64_t columns)
{
    return columns > 1024 && columns <= TT__ROW_COLUMNS ? 1 : 4;
}

// Rounds the 8 numbers v to `dtype`, in pairs, because rounding a single number uses a GPU's slow units.
__device__ __forceinline__ void round8(float (&v)[8], tt_dtype dtype)
{
    if (dtype == TT_F32) return;
    uint32_t h[4];
    TT__UNROLL for (int k = 0; k < 4; k++) h[k] = pack_as(dtype, v[2 * k], v[2 * k + 1]);
    TT__WITH_HALF(dtype, T, widen8<T>(v, make_uint4(h[0], h[1], h[2], h[3])));
}

// Writes sums of the columns of dy (rows, n) over chunks of rows_each rows to partial[chunk][n]; finish_sums
// adds up the chunks. Reads dy once. The threads of a block form `teams` teams, which take the rows of a
// chunk in turn. A thread sums one column of its team's rows.
__global__ void __launch_bounds__(TT__ROW_THREADS) column_sums(float *partial, tt__mat dy, int64_t rows_each,
                                                               int teams)
{
    tt__begin_kernel();
    TT__SHARED(float, part, [TT__ROW_THREADS]);
    const int across = TT__ROW_THREADS / teams;
    const int64_t j = (int64_t)blockIdx.x * across + threadIdx.x % across, from = blockIdx.y * rows_each;
    const int64_t to = min(dy.rows, from + rows_each);
    float sum = 0;
    if (j < dy.cols) {
        for (int64_t r = from + threadIdx.x / across; r < to; r += teams) sum += element(dy, r, j);
    }
    part[threadIdx.x] = sum;
    __syncthreads();
    if ((int)threadIdx.x < across && j < dy.cols) {
        for (int k = 1; k < teams; k++) sum += part[k * across + threadIdx.x];
        partial[blockIdx.y * dy.cols + j] = sum;
    }
}

// Returns columns [first, first + n) of a matrix.
tt__mat columns_of(const tt__mat *m, int64_t first, int64_t n)
{
    tt__mat part = *m;
    if (m->data) part.data = (char *)m->data + (size_t)first * tt_dtype_bytes(m->dtype);
    part.cols = n;
    return part;
}

// Writes the sums of the columns of dy to `to`, or adds them to `to` if `add`. Each launch takes some of the
// columns, because their partial sums must fit the resident workspace.
cudaError_t run_column_sums(const tt__launch *l, const tt__mat *dy, const tt__mat *to, bool add)
{
    tt__device *d = l->device;
    float *partial = resident_of(l)->sums;
    const int64_t room = resident_workspace::BYTES / sizeof(float) / 3;
    cudaError_t e = cudaSuccess;
    for (int64_t c = 0, n; c < dy->cols && e == cudaSuccess; c += n) {
        n = min(dy->cols - c, room);
        const tt__mat from = columns_of(dy, c, n), sums = columns_of(to, c, n);
        const int teams = sum_teams(dy->cols);
        const int64_t rows = rows_of_sums(d, dy->rows, n);
        const int64_t chunks = max((dy->rows + rows - 1) / rows, (int64_t)1);
        const dim3 grid(blocks_for(n, TT__ROW_THREADS / teams), (unsigned)chunks);
        e = TT__LAUNCH(column_sums, grid, TT__ROW_THREADS, 0, d->stream, partial, from, rows, teams);
        if (e == cudaSuccess) e = run_finish_sums(d, partial, chunks, n, &sums, add);
    }
    return e;
}

// ANY is the template argument of kernels that take any dtype. Kernels whose template arguments are dtypes
// take operands of these dtypes only, in whole vectors of 8 elements. Each of these kernels sets the dtypes
// in its copy of the operands, so that the compiler drops the code for other dtypes.
enum { ANY = -1 };

// 8 columns of a row as they are loaded: the bits of vectors of dtype X, or f32 numbers for ANY.
template <int X> struct row_bits { uint4 q[X == TT_F32 ? 2 : 1]; };
template <> struct row_bits<ANY> { float v[8]; };

template <int X> __device__ __forceinline__ void widen_row(float (&v)[8], const row_bits<X> &from)
{
    if constexpr (X == ANY) {
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] = from.v[j];
    } else if constexpr (X == TT_F32) {
        TT__UNROLL for (int h = 0; h < 2; h++) {
            v[4 * h] = __uint_as_float(from.q[h].x); v[4 * h + 1] = __uint_as_float(from.q[h].y);
            v[4 * h + 2] = __uint_as_float(from.q[h].z); v[4 * h + 3] = __uint_as_float(from.q[h].w);
        }
    } else {
        TT__WITH_HALF((tt_dtype)X, T, widen8<T>(v, from.q[0]));
    }
}

// Moves the beginning of each matrix by `by` rows.
template <class... M> __device__ __forceinline__ void move_rows(int64_t by, M &...m)
{
    ((m.data = row_at(m, by)), ...);
}

// Sets *grid to the number of blocks of a kernel with a grid-stride loop: `blocks`, the number of blocks with
// work, but at most `times` the number of blocks that the device's multiprocessors run at once.
template <class... P>
cudaError_t grid_of(tt__device *d, void (*kernel)(P...), int threads, int times, int64_t blocks,
                    unsigned *grid)
{
    int resident = 1;
    const cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0);
    const int64_t units = d->properties.multiProcessorCount;
    const int64_t largest = times * units * (resident > 0 ? resident : 1);
    *grid = (unsigned)max((int64_t)1, min(blocks, largest));
    return e;
}

// Arguments of an op that computes y from up to two operands, a and b, in groups of 8 columns. OP is a struct
// with begin(), which all threads of a block call, and get(), which computes the results v of the group of n
// columns that begins at column c of row r, or returns false where nothing is to be written.
struct group_args { tt__mat a, b, y; bool add, vector; int64_t per_row, first, all; };

// Computes y by op.get(). X: dtype of the operands; Y: dtype of the result. The launch bounds for X == ANY
// keep the compiler from spilling a register for compute capability 10.0.
template <class OP, int X, int Y>
__global__ void __launch_bounds__(TT__ROW_THREADS, X == ANY ? 2 : 0) each_group(group_args g, OP op)
{
    tt__begin_kernel();
    if (X != ANY) {
        g.a.dtype = g.b.dtype = (tt_dtype)X;
        g.y.dtype = (tt_dtype)Y;
        g.vector = true;
    }
    op.begin();
    for (int64_t k = (int64_t)blockIdx.x * TT__ROW_THREADS + threadIdx.x; k < g.all;
         k += (int64_t)gridDim.x * TT__ROW_THREADS) {
        const int64_t row = g.all == g.per_row ? 0 : (uint32_t)k / (uint32_t)g.per_row;
        const int64_t c = (k - row * g.per_row) * 8, r = g.first + row;
        const int n = X != ANY ? 8 : (int)min(g.y.cols - c, (int64_t)8);
        float v[8], old[8];
        if (!op.get(g, r, c, n, v)) continue;
        if (g.add) {
            load_group(old, g.y, r, c, n, g.vector);
            TT__UNROLL for (int j = 0; j < 8; j++) v[j] += old[j];
        }
        store8(row_at(g.y, r), g.y.dtype, c, n, g.vector, v);
    }
}

template <class OP, int X, int Y> cudaError_t launch_groups(tt__device *d, group_args g, OP op)
{
    cudaError_t e = cudaSuccess;
    unsigned grid;
    const int64_t rows = max((int64_t)1, INT32_MAX / g.per_row); // rows of one launch, few enough for 32-bit
                                                                 // division
    for (; g.first < g.y.rows && e == cudaSuccess; g.first += rows) {
        g.all = min(rows, g.y.rows - g.first) * g.per_row;
        e = grid_of(d, each_group<OP, X, Y>, TT__ROW_THREADS, 2, blocks_for(g.all, TT__ROW_THREADS), &grid);
        if (e == cudaSuccess)
            e = TT__LAUNCH((each_group<OP, X, Y>), grid, TT__ROW_THREADS, 0, d->stream, g, op);
    }
    return e;
}

// Loads n columns, from column c on, of m's first row.
template <int X>
__device__ __forceinline__ void fetch_group(row_bits<X> &to, const tt__mat &m, int64_t c, int n, bool vector)
{
    if constexpr (X == ANY) {
        load_group(to.v, m, 0, c, n, vector);
    } else {
        constexpr int N = X == TT_F32 ? 2 : 1;
        TT__UNROLL for (int h = 0; h < N; h++) to.q[h] = ((const uint4 *)m.data)[c / 8 * N + h];
    }
}

// Computes y as each_group does, and writes to partial[blockIdx.y][c] the sum of rows_each rows of column c
// of y. OP also has finish(both, r, c, v, other). Before the call, v has elements of a, and `other` has
// elements of b if `both`; after the call, v has the results. A thread has 8 columns. There are few blocks,
// because each block writes a row of partial sums. So that few blocks keep the memory busy, a thread loads
// the rows of its next turn ahead.
template <class OP, int X, int Y>
__global__ void __launch_bounds__(TT__ROW_THREADS, 2)
    each_group_sums(group_args g, OP op, float *partial, int64_t rows_each)
{
    tt__begin_kernel();
    if (X != ANY) {
        g.a.dtype = g.b.dtype = (tt_dtype)X;
        g.y.dtype = (tt_dtype)Y;
        g.vector = true;
    }
    op.begin();
    constexpr int ROWS = X == ANY || X == TT_F32 ? 1 : 2; // rows that a thread loads at once
    const int teams = sum_teams(g.y.cols), across = (int)blockDim.x / teams;
    const int team = (int)threadIdx.x / across, place = (int)threadIdx.x - team * across;
    const int64_t column = (int64_t)blockIdx.x * across * 8, c = column + place * 8;
    const int64_t from = blockIdx.y * rows_each + team;
    const int n = X != ANY ? 8 : (int)min(g.y.cols - c, (int64_t)8);
    const bool both = g.b.data != NULL;
    float *const of_block = partial + blockIdx.y * g.y.cols;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    row_bits<X> a[ROWS] = {}, b[ROWS] = {};
    // left: number of rows from the thread's first row of the current turn to the end of the chunk. g.a and
    // g.b begin at the rows of the next turn, which are loaded ahead. All of these loads are issued together,
    // because a thread that waits for one of its loads may wait for all loads in flight.
    int left = c < g.y.cols ? (int)(min(g.y.rows, (blockIdx.y + 1) * rows_each) - from) : 0;
    move_rows(from, g.a, g.b, g.y);
    const auto fetch = [&](int many) {
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            if (i * teams < many) fetch_group(a[i], g.a, c, n, g.vector);
            if (i * teams < many && both) fetch_group(b[i], g.b, c, n, g.vector);
            move_rows(teams, g.a, g.b);
        }
    };
    fetch(left);
    for (int64_t r = from; left > 0; r += ROWS * teams, left -= ROWS * teams) {
        float v[ROWS][8], other[ROWS][8], old[8];
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            widen_row(v[i], a[i]);
            widen_row(other[i], b[i]);
        }
        fetch(left - ROWS * teams);
        TT__UNROLL for (int i = 0; i < ROWS; i++) {
            if (i * teams >= left) continue;
            op.finish(both, r + i * teams, c, v[i], other[i]);
            if (g.add) {
                load_group(old, g.y, 0, c, n, g.vector);
                TT__UNROLL for (int j = 0; j < 8; j++) v[i][j] += old[j];
            }
            store8(g.y.data, g.y.dtype, c, n, g.vector, v[i]);
            move_rows(teams, g.y);
            round8(v[i], g.y.dtype);
            TT__UNROLL for (int j = 0; j < 8; j++) sum[j] += v[i][j];
        }
    }
    if (teams == 1) {
        TT__UNROLL for (int j = 0; j < 8; j++) if (c + j < g.y.cols) of_block[c + j] = sum[j];
        return;
    }
    TT__SHARED(float4, part, [4][2][64]); // [team][half][thread]: sums of half of the thread's 8 columns
    part[team][0][place] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    part[team][1][place] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    __syncthreads();
    for (int k = threadIdx.x; k < across * 8 && column + k < g.y.cols; k += (int)blockDim.x) {
        float all = 0;
        TT__UNROLL for (int team = 0; team < 4; team++)
            all += ((const float *)&part[team][k / 4 % 2][k / 8])[k % 4];
        of_block[column + k] = all;
    }
}

// The typed kernels that are compiled for an op, beside its kernel for any dtype. RARE: none. HOT: for each
// float dtype, a kernel whose operands and result have that dtype. HOT_CASTS: the kernels of HOT, and for
// bf16 and f16 a kernel that computes a result of that dtype from f32 operands.
enum { RARE, HOT, HOT_CASTS };

bool is_typed(const group_args &g)
{
    return g.vector && g.y.cols % 8 == 0 && (!g.b.data || g.b.dtype == g.a.dtype);
}

template <class OP> cudaError_t launch_typed_groups(tt__device *d, const group_args &g, OP op)
{
    const tt_dtype x = g.a.dtype, y = g.y.dtype;
    const bool typed = is_typed(g);
    if constexpr (OP::KIND != RARE) {
        if (typed && x == TT_F32 && y == TT_F32) return launch_groups<OP, TT_F32, TT_F32>(d, g, op);
        if (typed && x == TT_BF16 && y == TT_BF16) return launch_groups<OP, TT_BF16, TT_BF16>(d, g, op);
        if (typed && x == TT_F16 && y == TT_F16) return launch_groups<OP, TT_F16, TT_F16>(d, g, op);
    }
    if constexpr (OP::KIND == HOT_CASTS) {
        if (typed && x == TT_F32 && y == TT_BF16) return launch_groups<OP, TT_F32, TT_BF16>(d, g, op);
        if (typed && x == TT_F32 && y == TT_F16) return launch_groups<OP, TT_F32, TT_F16>(d, g, op);
    }
    return launch_groups<OP, ANY, ANY>(d, g, op);
}

// Computes y by op or, if `add`, adds the results of op to y. by_row: whether the op uses the numbers of rows
// or columns as indices. If not, contiguous matrices are taken as one long row. Operands whose data is NULL
// are absent.
template <class OP>
cudaError_t run_groups(tt__device *d, tt__mat a, tt__mat b, tt__mat y, bool add, bool by_row, OP op)
{
    group_args g = {a, b, y, add, true, 1, 0, 0};
    tt__mat *const all[3] = {&g.a, &g.b, &g.y};
    for (int k = 0; k < 3; k++) {
        g.vector = g.vector && is_wide(all[k]);
        by_row = by_row || (all[k]->data && all[k]->rows > 1 && all[k]->ld != all[k]->cols);
    }
    for (int k = 0; k < 3 && !by_row; k++) {
        all[k]->ld = all[k]->cols *= all[k]->rows;
        all[k]->rows = 1;
    }
    if (!by_row) g.vector = ((uintptr_t)a.data | (uintptr_t)b.data | (uintptr_t)y.data) % 16 == 0;
    g.per_row = (g.y.cols + 7) / 8;
    return launch_typed_groups(d, g, op);
}

const tt__mat no_operand = {NULL, TT_F32, 0, 0, 0};

// Computes y as run_groups does. Unless sums.data is NULL, also writes the sums of y's columns to `sums`, or
// adds them to it if add_sums.
template <class OP>
cudaError_t run_groups_sums(const tt__launch *l, tt__mat a, tt__mat b, tt__mat y, bool add, bool by_row,
                            OP op, const tt__mat &sums, bool add_sums)
{
    tt__device *d = l->device;
    group_args g = {a, b, y, add, is_wide(&a) && is_wide(&b) && is_wide(&y), 1, 0, 0};
    float *partial = resident_of(l)->sums;
    const int64_t room = (int64_t)(resident_workspace::BYTES / sizeof(float)) / (3 * y.cols);
    if (!sums.data || !y.rows || !room) {
        const cudaError_t e = run_groups(d, a, b, y, add, by_row, op);
        return e == cudaSuccess && sums.data ? run_column_sums(l, &y, &sums, add_sums) : e;
    }
    const int64_t each = rows_of_sums(d, y.rows, y.cols);
    // `pieces` blocks of TT__ROW_THREADS threads would cover the columns. The number of threads of a block is
    // chosen so that all blocks get equal shares of the columns.
    const int teams = sum_teams(y.cols);
    const unsigned groups = blocks_for(y.cols, 8), pieces = blocks_for(groups, TT__ROW_THREADS / teams);
    const unsigned threads = blocks_for(blocks_for(groups, pieces) * teams, 32) * 32;
    const dim3 grid(blocks_for(groups, threads / teams), blocks_for(y.rows, each));
    const bool alike = is_typed(g) && y.dtype == a.dtype;
    cudaError_t e = cudaSuccess;
    if constexpr (OP::KIND == RARE) {
        e = TT__LAUNCH((each_group_sums<OP, ANY, ANY>), grid, threads, 0, d->stream, g, op, partial, each);
    } else {
        const auto kernel = alike && a.dtype == TT_F32 ? each_group_sums<OP, TT_F32, TT_F32>
            : alike && a.dtype == TT_BF16 ? each_group_sums<OP, TT_BF16, TT_BF16>
            : alike && a.dtype == TT_F16 ? each_group_sums<OP, TT_F16, TT_F16>
            : each_group_sums<OP, ANY, ANY>;
        e = TT__LAUNCH(kernel, grid, threads, 0, d->stream, g, op, partial, each);
    }
    return e == cudaSuccess ? run_finish_sums(d, partial, grid.y, y.cols, &sums, add_sums) : e;
}

} // namespace
