#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/device.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../../cuda/kernels.cuh"

namespace {

// ================================================================================================ optimizers
// Parameters, gradients and states are contiguous, so kernels treat them as vectors.

enum { TT__SQUARES_BLOCKS = 1024 };

// Max number of tensors in a kernel launch that runs several instructions. Tests make the number smaller.
#ifndef TT__TENSORS
// The arguments of a kernel may have 32,764 bytes, or 4,096 bytes before CUDA 12.1.
#define TT__TENSORS (CUDART_VERSION >= 12010 ? 448 : 56)
#endif

// Returns the number of this block's tensor. of: `count` tensors in the order of their first blocks.
template <class T> __device__ __forceinline__ int tensor_of_block(const T *of, int count)
{
    int low = 0;
    for (int high = count; high - low > 1;) {
        const int middle = (low + high) / 2;
        if (of[middle].first <= blockIdx.x) low = middle;
        else high = middle;
    }
    return low;
}

struct square_sum {
    const void *g;
    void *to;
    int64_t n;
    unsigned first, blocks;
    uint8_t type;
    bool wide;
};

struct square_sums {
    int count;
    double *partial; // partial[k]: sum of squares of thread block k
    square_sum of[TT__TENSORS];
};

// Returns the sum, in f32, of the squares of elements [i, i + 8) of g.
__device__ __forceinline__ float squares8(const square_sum &t, int64_t i)
{
    float x[8];
    load8(x, t.g, (tt_dtype)t.type, i, t.n - i, t.wide);
    TT__UNROLL for (int k = 0; k < 8; k++) x[k] *= x[k];
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// Sums the squares of tensors, and writes each block's sum to partial. Sums eight squares in f32, and these
// sums in double. Reads each tensor once.
__global__ void __launch_bounds__(256) sum_squares(const __grid_constant__ square_sums s)
{
    tt__begin_kernel();
    const square_sum &t = s.of[tensor_of_block(s.of, s.count)];
    double sum = 0;
    for (int64_t i = 8 * ((blockIdx.x - t.first) * (int64_t)256 + threadIdx.x); i < t.n;
         i += 8 * (t.blocks * (int64_t)256))
        sum += squares8(t, i);
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) s.partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(256) finish_sum_squares(const __grid_constant__ square_sums s)
{
    tt__begin_kernel();
    const square_sum &t = s.of[blockIdx.x];
    double sum = 0;
    for (unsigned k = threadIdx.x; k < t.blocks; k += 256) sum += s.partial[t.first + k];
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) *(float *)t.to = (float)sum;
}

// Sums the squares of each chunk of a tensor; a block sums one chunk. fold_squares adds up the chunks' sums.
__global__ void __launch_bounds__(256) chunk_squares(const __grid_constant__ square_sums s)
{
    tt__begin_kernel();
    const square_sum &t = s.of[tensor_of_block(s.of, s.count)];
    const int64_t chunk = blockIdx.x - t.first, from = chunk * TT__CHUNK, end = from + TT__CHUNK;
    const int64_t to = end < t.n ? end : t.n;
    double sum = 0;
    for (int64_t i = from + 8 * threadIdx.x; i < to; i += 2048) sum += squares8(t, i);
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) ((double *)t.to)[chunk] = sum;
}

__global__ void __launch_bounds__(256) fold_squares(const __grid_constant__ square_sums s)
{
    tt__begin_kernel();
    const square_sum &t = s.of[blockIdx.x];
    double sum = 0;
    for (int64_t k = threadIdx.x; k < t.n; k += 256) sum += ((const double *)t.g)[k];
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) *(float *)t.to = (float)sum;
}

// Computes the mean loss from the counts of a loss.
__global__ void mean_loss(const float *counts, float *loss)
{
    tt__begin_kernel();
    if (threadIdx.x == 0) *loss = (float)((double)counts[0] / counts[1]);
}

cudaError_t run_mean_loss(const tt__launch *l)
{
    return TT__LAUNCH(mean_loss, 1, 32, 0, l->device->stream, (const float *)l->in[0].data,
                      (float *)l->out[0].data);
}
TT__RUN_BY(MEAN_LOSS, run_mean_loss)

// Writes the counts of a loss to totals, a tt__totals, or adds them if `add`. by_total: the fourth count is
// the total of tt_loss_total, which is not added.
__global__ void add_counts(const float *counts, double *totals, bool add, bool by_total)
{
    tt__begin_kernel();
    const int k = (int)threadIdx.x;
    if (k < TT__TOTALS) totals[k] = (add ? totals[k] : 0) + (k == 3 && by_total ? 0 : counts[k]);
}

cudaError_t run_add_counts(const tt__launch *l)
{
    tt__device *d = l->device;
    return TT__LAUNCH(add_counts, 1, 32, 0, d->stream, (const float *)l->in[0].data, (double *)l->out[0].data,
                      l->add[0], l->instr->attr.by_total);
}
TT__RUN_BY(ADD_COUNTS, run_add_counts)

// Computes, from the sums of squares of n gradients, the global norm and the factor by which all gradients
// are multiplied, as in torch.nn.utils.clip_grad_norm_.
__global__ void __launch_bounds__(256) clip(const float *squares, int64_t n, float clip_norm,
                                            const tt__totals *totals, const tt__scale_state *loss_scale,
                                            const tt__step_settings *run, tt__clipped *out)
{
    tt__begin_kernel();
    double sum = 0;
    for (int64_t k = threadIdx.x; k < n; k += 256) sum += squares[k];
    sum = block_sum<256>(sum);
    if (threadIdx.x) return;
    double scale = (run ? run->loss_norm / totals->targets : 1) / (loss_scale ? loss_scale->scale : 1),
        norm = sqrt(sum) * scale, factor = scale;
    if (!isfinite(totals->loss) || !(totals->targets > 0)) norm = NAN; // then no parameter is updated
    if (clip_norm > 0 && clip_norm < norm + 1e-6) factor *= clip_norm / (norm + 1e-6);
    out->norm = (float)norm;
    out->factor = (float)factor;
}

cudaError_t run_clip(const tt__launch *l)
{
    return TT__LAUNCH(clip, 1, 256, 0, l->device->stream, (const float *)l->in[0].data, l->in[0].rows,
                      l->instr->attr.clip_norm, (const tt__totals *)l->in[1].data,
                      (const tt__scale_state *)l->in[2].data, TT__RUN_OF(l), (tt__clipped *)l->out[0].data);
}
TT__RUN_BY(CLIP, run_clip)

// Computes the next loss scale, as the CPU's run_LOSS_SCALE does.
__global__ void next_loss_scale(const tt__clipped *clipped, const tt__totals *totals, tt__scale_state *s,
                                float growth, float backoff, int interval)
{
    tt__begin_kernel();
    if (threadIdx.x || !isfinite(totals->loss) || !(totals->targets > 0)) return;
    if (isfinite(clipped->norm)) {
        if (++s->good_steps < interval) return;
        s->scale = fmin(s->scale * growth, TT__LOSS_SCALE_MOST);
    } else {
        if (s->scale * backoff < 1) return;
        s->scale *= backoff;
        s->skipped++;
    }
    s->good_steps = 0;
}

cudaError_t run_loss_scale(const tt__launch *l)
{
    const tt__attr *a = &l->instr->attr;
    return TT__LAUNCH(next_loss_scale, 1, 32, 0, l->device->stream, (const tt__clipped *)l->in[0].data,
                      (const tt__totals *)l->in[1].data, (tt__scale_state *)l->out[0].data, a->growth,
                      a->backoff, a->interval);
}
TT__RUN_BY(LOSS_SCALE, run_loss_scale)

// Returns the stream of a launch. Only copies and collectives are on a stream other than the compute stream.
cudaStream_t stream_of(const tt__launch *l) { return stream_of(l->device, l->instr->stream); }

// Copies between or within the memories of the device and the host.
cudaError_t run_copy(const tt__launch *l)
{
    const tt__mat *x = &l->in[0], *y = &l->out[0];
    const size_t size = tt_dtype_bytes(x->dtype);
    if (tt__is_coded(x->dtype))
        return cudaMemcpyAsync(y->data, x->data, (size_t)tt__coded_parts_of(x->dtype, x->rows, x->cols).bytes,
                               cudaMemcpyDefault, stream_of(l));
    const bool whole = x->rows == 1 || (x->ld == x->cols && y->ld == y->cols);
    if (whole) // a contiguous matrix may have more bytes than cudaMemcpy2DAsync allows in a row
        return cudaMemcpyAsync(y->data, x->data, (size_t)(x->rows * x->cols) * size, cudaMemcpyDefault,
                               stream_of(l));
    return cudaMemcpy2DAsync(y->data, (size_t)y->ld * size, x->data, (size_t)x->ld * size,
                             (size_t)x->cols * size, (size_t)x->rows, cudaMemcpyDefault, stream_of(l));
}
TT__RUN_BY(COPY, run_copy)

cudaError_t run_nothing(const tt__launch *) { return cudaSuccess; }
TT__RUN_BY(WAIT, run_nothing)
TT__RUN_BY(SEND, run_nothing) // the RECV after a SEND fetches SEND's operand

// Rounds x to 16 bits stochastically, as the CPU's round_16 does: rounds up with a probability equal to the
// dropped fraction, by 16 random bits. Rounds numbers that are not finite and, in f16, numbers from 65504 on
// to nearest, so that they overflow only from 65520 on, as with rounding to nearest.
__device__ __forceinline__ uint32_t round_16(float x, uint32_t random, tt_dtype dtype)
{
    const uint32_t u = __float_as_uint(x), magnitude = u & 0x7fffffff, sign = u >> 16 & 0x8000;
    const bool nan = magnitude > 0x7f800000;
    if (dtype == TT_BF16) return magnitude >= 0x7f800000 ? u >> 16 | (nan ? 0x40 : 0) : (u + random) >> 16;
    if (nan) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    if (magnitude >= 0x477fe000) return sign | 0x7bff;
    if (magnitude >= 0x38800000) return sign | (magnitude - 0x38000000 + (random & 0x1fff)) >> 13;
    const float units = __uint_as_float(magnitude) * 0x1p24f; // exact: subnormals are below 1024 units
    const uint32_t whole = (uint32_t)units;
    return sign | (whole + ((units - (float)whole) * 65536.0f + (float)random >= 65536.0f));
}

// Returns the bits of x plus 16 random bits; the upper half of the sum is x in bf16, stochastically rounded.
// Kernels compute NaN as 0x7fffffff, where the addition would overflow, so the bits of x are limited to
// 0x7fff0000. NaNs with smaller bits stay NaN, because their upper half is a NaN.
__device__ __forceinline__ uint32_t round_up(float x, uint32_t random)
{
    return (uint32_t)min((int)__float_as_uint(x), 0x7fff0000) + random;
}

// Rounds elements `[i, i + 8)` of a vector to its dtype and writes them. Element e of a 16-bit vector is
// rounded stochastically, by number `e % 8` of Philox counter `{e / 8}`. Steps smaller than half a unit in
// the last place then survive on average (Gupta et al., "Deep learning with limited numerical precision",
// 2015). e counts from the first element of the whole tensor; the vector begins at element `8 * first` of
// the tensor.
__device__ __forceinline__ void update8(void *p, tt_dtype dtype, int64_t i, int64_t left, bool wide,
                                        const float (&x)[8], const philox_keys &keys, int64_t first)
{
    if (dtype == TT_F32) {
        store8(p, TT_F32, i, left, wide, x);
        return;
    }
    const uint64_t group = (uint64_t)(first + i / 8);
    uint32_t random[4] = {(uint32_t)group, (uint32_t)(group >> 32), 0, 0}, h[8], none = 0;
    tt__forget(none); // otherwise the compiler would keep the keys in registers
    TT__UNROLL for (int pair = 0; 2 * pair < TT__DRAW_ROUNDS; pair++) {
        const uint4 k = keys[pair + none];
        philox_round(random, k.x, k.y);
        if (2 * pair + 1 < TT__DRAW_ROUNDS) philox_round(random, k.z, k.w);
    }
    if (dtype == TT_BF16 && wide && left >= 8) { // the bits are those of round_16, except for NaN
        uint32_t pair[4];
        TT__UNROLL for (int k = 0; k < 4; k++)
            pair[k] = __byte_perm(round_up(x[2 * k], random[k] & 0xffff),
                                  round_up(x[2 * k + 1], random[k] >> 16), 0x7632);
        ((uint4 *)p)[i / 8] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        return;
    }
    TT__UNROLL for (int k = 0; k < 8; k++)
        h[k] = round_16(x[k], random[k / 2] >> (k % 2 * 16) & 0xffff, dtype);
    store8_bits(p, i, left, wide, h);
}

// ---- optimizer states of 8 bits, see src/ops/optimizers/map8.h

// Returns magnitude k of a map, as the CPU's tt__map8_magnitude does.
__device__ __forceinline__ float map8_magnitude(int k, bool is_signed)
{
    const int interval = is_signed ? k : k + 1;
    int count = 1, decade = is_signed ? 0 : -1;
    if (!k) return 0;
    if (k == (is_signed ? 128 : 255)) return 1;
    for (; 2 * count <= interval; count *= 2) decade++;
    double divisor = 20 * count;
    for (; decade < 6; decade++) divisor *= 10;
    return (float)((2 * count + 18 * (interval - count) + 9) / divisor);
}

// Reads elements [i, i + 8) of a state, of which the first `left` exist; the others are 0. map: number of
// each code. scale: scale of each block.
__device__ __forceinline__ void load8_small(float (&x)[8], const void *p, const float *map,
                                            const float *scale, int64_t i, int64_t left)
{
    TT__UNROLL for (int k = 0; k < 8; k++)
        x[k] = k < left ? map[((const uint8_t *)p)[i + k]] * scale[i / TT__STATE_BLOCK] : 0;
}

// Writes elements [i, i + 8) of a state, of which the first `left` exist. The lanes of a warp together have a
// block, whose scale the first lane writes. Rounds as the CPU's row_to_8.
__device__ __forceinline__ void store8_small(void *p, const float *map, float *scale, bool is_signed,
                                             int64_t i, int64_t left, const float (&x)[8])
{
    float most = 0;
    TT__UNROLL for (int k = 0; k < 8; k++) if (k < left) most = fmaxf(most, fabsf(x[k]));
    most = warp_max(most);
    if (!(most >= 1.17549435e-38f)) most = 0;
    __syncwarp(); // all lanes have read the old scale
    if (threadIdx.x % 32 == 0) scale[i / TT__STATE_BLOCK] = most;
    for (int k = 0; k < 8 && k < left; k++) {
        const float y = most > 0 ? x[k] / most : 0;
        int code = 0; // the code of the largest number of the map that is at most y
        for (int step = 128; step; step /= 2) if (map[code + step] <= y) code += step;
        const float middle = code < 255 ? (map[code] + map[code + 1]) / 2 : INFINITY;
        if (y > 0 ? y > middle : y >= middle) code++; // the nearest, or the smaller magnitude
        if (!is_signed && !code && y > 0) code = 1;
        ((uint8_t *)p)[i + k] = (uint8_t)code;
    }
}

struct param_update { // the update of one parameter, or of a rank's shard of it
    static constexpr bool SMALL = false;
    const void *g;
    void *p, *m, *v;    // m, v: Adam's moments; m: momentum of SGD, which may be NULL, and of Lion
    int64_t n, begin;   // p has n elements, beginning with element 8 * begin of the whole parameter
    unsigned first;
    float weight_decay, lr_factor;
    uint32_t random;    // number of the instruction's stream of random numbers
    uint8_t types[3];   // dtype of g; dtype of p; dtype of m and v
    bool wide;
};

struct small_update : param_update { // an update whose states may have 8 bits
    static constexpr bool SMALL = true;
    float *scales[2];   // scales of m and v; NULL: the states have no scales
};

struct update_rule {
    float beta1, beta2, eps;
    int nesterov, decoupled;
};

template <class T, int N> struct updates_of {
    typedef T update;
    static constexpr int MOST = N;
    int count;
    update_rule rule;
    const float *clip;  // a tt__clipped: the norm of the gradients, and their factor
    T of[N];
};
typedef updates_of<param_update, TT__TENSORS> param_updates;
typedef updates_of<small_update, (TT__TENSORS + 1) / 2> small_updates;

// Max number of pointers to members' operands in a launch of collectives. Tests make the number smaller.
#ifndef TT__PEERS
#define TT__PEERS (CUDART_VERSION >= 12010 ? 2048 : 256)
#endif

struct member_sum { // the sum of the members' elements in a collective (ops/collectives/cuda.cuh)
    void *y;
    int64_t n;
    unsigned first;
    int peers, present; // peers: index of the first operand in member_sums.peers; present: number of operands
    uint8_t type, how;
    bool add, wide;
};

struct member_sums {
    int count, used;
    member_sum of[TT__TENSORS];
    const void *peers[TT__PEERS];
};

struct member_copy {
    void *y;
    const void *x;
    int64_t bytes;
    unsigned first;
    int unit;           // bytes that a thread copies at once
};

struct member_copies {
    int count;
    member_copy of[TT__TENSORS];
};

struct group_arguments {
    square_sums squares;
    param_updates updates;
    small_updates small;
    member_sums sums;
    member_copies copies;
};
constexpr size_t MAX_ARGUMENTS = CUDART_VERSION >= 12010 ? 32764 : 4096;
static_assert(sizeof(square_sums) <= MAX_ARGUMENTS && sizeof(member_sums) <= MAX_ARGUMENTS &&
              sizeof(member_copies) <= MAX_ARGUMENTS &&
              sizeof(small_updates) + sizeof(void *) <= MAX_ARGUMENTS &&
              sizeof(param_updates) + sizeof(void *) <= MAX_ARGUMENTS, "a kernel's arguments");
static_assert(TT__PEERS >= TT__RANKS, "the operands of one sum");
static_assert(TT__TENSORS * TT__SQUARES_BLOCKS * sizeof(double) <= resident_workspace::BYTES,
              "the partial sums of a launch");

bool make_arguments(tt__device *d)
{
    if (!d->arguments) d->arguments = (group_arguments *)calloc(1, sizeof *d->arguments);
    return d->arguments != NULL;
}

// Runs `count` instructions of one op: SUM_SQUARES, CHUNK_SQUARES or FOLD_SQUARES.
cudaError_t run_squares(const tt__launch *l, int count)
{
    tt__device *d = l->device;
    if (!make_arguments(d)) return cudaErrorMemoryAllocation;
    square_sums *s = &d->arguments->squares;
    const int op = l->instr->op;
    s->partial = op == TT__OP_SUM_SQUARES ? resident_of(l)->squares : NULL;
    for (int from = 0; from < count; from += s->count) {
        unsigned blocks = 0;
        s->count = count - from < TT__TENSORS ? count - from : TT__TENSORS;
        for (int k = 0; k < s->count; k++) {
            const tt__mat *g = &l[from + k].in[0];
            square_sum *t = &s->of[k];
            t->g = g->data; t->to = l[from + k].out[0].data;
            t->n = g->rows * g->cols;
            t->first = blocks;
            t->blocks = op == TT__OP_CHUNK_SQUARES ? blocks_for(t->n, TT__CHUNK)
                : grid_for(t->n, 4 * 2048, TT__SQUARES_BLOCKS);
            blocks += t->blocks;
            t->type = (uint8_t)g->dtype;
            t->wide = is_wide(g);
        }
        const unsigned tensors = (unsigned)s->count;
        cudaError_t e = cudaSuccess;
        if (op == TT__OP_SUM_SQUARES) e = TT__LAUNCH(sum_squares, blocks, 256, 0, d->stream, *s);
        if (op == TT__OP_CHUNK_SQUARES && blocks) // there are no blocks if all shards of the rank are empty
            e = TT__LAUNCH(chunk_squares, blocks, 256, 0, d->stream, *s);
        if (op == TT__OP_FOLD_SQUARES) e = TT__LAUNCH(fold_squares, tensors, 256, 0, d->stream, *s);
        if (e == cudaSuccess && op == TT__OP_SUM_SQUARES)
            e = TT__LAUNCH(finish_sum_squares, tensors, 256, 0, d->stream, *s);
        if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
}
TT__RUN_BY(SUM_SQUARES, run_squares)
TT__RUN_BY(CHUNK_SQUARES, run_squares)
TT__RUN_BY(FOLD_SQUARES, run_squares)

enum { TT__UPDATE_CHUNK = 4 * 2048 }; // number of elements that a block updates

// Updates parameters. For each f32 element, reads and writes 28 bytes for Adam, 20 bytes for Lion and for SGD
// with momentum, and 12 bytes for SGD without momentum; for a 16-bit element, half as many; a state of 8 bits
// is read and written with 2 bytes. OP: the optimizer's op. G: dtype of all gradients of the launch, or ANY;
// P: dtype of all parameters and their states, or ANY. If P is ANY, only three blocks fit a multiprocessor: a
// thread needs more registers than the 64 that four blocks allow. U: param_updates or small_updates.
template <int OP, int G, int P, class U>
__global__ void __launch_bounds__(256, OP == TT__OP_ADAM && P != ANY ? 4 : 3)
    update_parameters(const __grid_constant__ U u, const tt__step_settings *run)
{
    tt__begin_kernel();
    constexpr bool ADAM = OP == TT__OP_ADAM, LION = OP == TT__OP_LION, MUON = OP == TT__OP_MUON;
    constexpr bool MOMENTUM = OP == TT__OP_MUON_MOMENTUM, SMALL = U::update::SMALL;
    TT__SHARED(philox_keys, keys, [3]);
    TT__SHARED(float, of_step, [2]);
    TT__SHARED(float, maps, [SMALL ? 2 : 1][SMALL ? 256 : 1]);
    if (!isfinite(u.clip[0])) return; // either all threads return or none
    const typename U::update &t = u.of[tensor_of_block(u.of, u.count)];
    const tt_dtype type_g = (tt_dtype)(G != ANY ? G : t.types[0]);
    const tt_dtype type_p = (tt_dtype)(P != ANY ? P : t.types[1]);
    const tt_dtype type_m = (tt_dtype)(P != ANY ? P : t.types[2]);
    const bool wide = P != ANY || t.wide;
    const int64_t from = (int64_t)(blockIdx.x - t.first) * TT__UPDATE_CHUNK, end = from + TT__UPDATE_CHUNK;
    const int64_t to = end < t.n ? end : t.n;
    const float factor = u.clip[1], lr = run->lr * t.lr_factor, b1 = u.rule.beta1, b2 = u.rule.beta2;
    const float decay = t.weight_decay;
    if (threadIdx.x < 3)
        expand_key(stream_key(run->seed, TT__RANDOM_ROUNDING, (uint64_t)run->step,
                              (uint64_t)threadIdx.x << 32 | t.random), keys[threadIdx.x]);
    // Two threads of the second warp compute the two bias corrections, each a power, by squaring.
    if (ADAM && threadIdx.x / 2 == 16) {
        double power = 1, b = threadIdx.x % 2 ? b2 : b1;
        for (uint64_t e = (uint64_t)run->step + 1; e; e >>= 1, b *= b) if (e & 1) power *= b;
        of_step[threadIdx.x % 2] = threadIdx.x % 2 ? (float)(1 / sqrt(1 - power)) : (float)(lr / (1 - power));
    }
    if (SMALL) { // thread k computes number k of each map
        const int k = threadIdx.x, magnitude = k < 127 ? 127 - k : k - 127;
        maps[0][k] = k < 127 ? -map8_magnitude(magnitude, true) : map8_magnitude(magnitude, true);
        maps[1 % (1 + SMALL)][k] = map8_magnitude(k, false);
    }
    __syncthreads();
    const float step = ADAM ? of_step[0] : 0, root = ADAM ? of_step[1] : 0;
    const bool decoupled = LION || MUON || (ADAM && u.rule.decoupled), bytes = SMALL && type_m == TT_U8;
    const float l2 = decoupled ? 0 : decay, keep = decoupled ? 1 - lr * decay : 1;
    const auto load_state = [&](float (&x)[8], void *from, int state, int64_t i, int64_t left) {
        if constexpr (SMALL) {
            if (bytes) return load8_small(x, from, maps[state], t.scales[state], i, left);
        }
        load8(x, from, type_m, i, left, wide);
    };
    const auto store_state = [&](const float (&x)[8], void *to, int state, int64_t i, int64_t left) {
        if constexpr (SMALL) {
            if (bytes) return store8_small(to, maps[state], t.scales[state], state == 0, i, left, x);
        }
        update8(to, type_m, i, left, wide, x, keys[1 + state], t.begin);
    };
    const auto update = [&](int64_t i, int64_t left) {
        float g[8], p[8], m[8] = {0}, v[8];
        load8(g, t.g, type_g, i, left, wide);
        if (!MOMENTUM) load8(p, t.p, type_p, i, left, wide);
        if (ADAM || t.m) load_state(m, t.m, 0, i, left);
        if (ADAM) load_state(v, t.v, 1, i, left);
        TT__UNROLL for (int k = 0; k < 8; k++) {
            float d = MOMENTUM ? g[k] * factor : g[k] * factor + p[k] * l2;
            if (MOMENTUM) {
                m[k] += (d - m[k]) * (1 - b1);
                p[k] = u.rule.nesterov ? d + (m[k] - d) * b1 : m[k];
            } else if (MUON) {
                p[k] = p[k] * keep - g[k] * (lr * b2);
            } else if (LION) {
                const float blend = m[k] * b1 + d * (1 - b1);
                p[k] = p[k] * keep - ((blend > 0) - (blend < 0)) * lr;
                m[k] = m[k] * b2 + d * (1 - b2);
            } else if (ADAM) {
                m[k] = m[k] * b1 + d * (1 - b1);
                v[k] = v[k] * b2 + d * d * (1 - b2);
                // The approximations change the step by at most 4 ulp.
                p[k] = p[k] * keep - m[k] * step * tt__reciprocal(tt__root(v[k]) * root + u.rule.eps);
            } else {
                m[k] = m[k] * b1 + d;
                if (t.m) d = u.rule.nesterov ? d + m[k] * b1 : m[k];
                p[k] -= d * lr;
            }
        }
        update8(t.p, type_p, i, left, wide, p, keys[0], t.begin);
        if (ADAM || t.m) store_state(m, t.m, 0, i, left);
        if (ADAM) store_state(v, t.v, 1, i, left);
    };
    int64_t i = from + 8 * threadIdx.x;
    if (SMALL) { // all lanes of a warp go on while one lane has elements, because they share a block's scale
        for (; i - 8 * (threadIdx.x % 32) < to; i += 2048) update(i, to - i);
    } else if (P == ANY) {
        for (; i < to; i += 2048) update(i, to - i);
    } else { // updates whole groups of 8 elements, then the elements that are left
        for (; i + 8 <= to; i += 2048) update(i, 8);
        if (i < to) update(i, to - i);
    }
}

template <int OP, class U> cudaError_t launch_update(const tt__launch *l, const U *u, unsigned blocks)
{
#define TT__UPDATE(G, P) \
    TT__LAUNCH((update_parameters<OP, G, P, U>), blocks, 256, 0, l->device->stream, *u, TT__RUN_OF(l))
    const int g = u->of[0].types[0], p = u->of[0].types[1];
    bool typed = true;
    for (int k = 0; k < u->count; k++) {
        const typename U::update *t = &u->of[k];
        typed = typed && t->wide && t->types[0] == g && t->types[1] == p && (!t->m || t->types[2] == p);
    }
    // Gradients are f32 with 32-true, with accumulation and for norms' weights.
    if constexpr (OP == TT__OP_ADAM && !U::update::SMALL) {
        if (typed && g == TT_F32 && p == TT_F32) return TT__UPDATE(TT_F32, TT_F32);
        if (typed && g == TT_BF16 && p == TT_F32) return TT__UPDATE(TT_BF16, TT_F32);
        if (typed && g == TT_BF16 && p == TT_BF16) return TT__UPDATE(TT_BF16, TT_BF16);
    }
    return TT__UPDATE(ANY, ANY);
#undef TT__UPDATE
}

update_rule rule_of(const tt__launch *l)
{
    const tt__attr *a = &l->instr->attr;
    return {a->beta1, a->beta2, a->eps, a->nesterov, a->decoupled};
}

void set_scales(param_update *, const tt__launch *) {}
void set_scales(small_update *t, const tt__launch *l)
{
    for (int k = 0; k < 2; k++) t->scales[k] = (float *)l->out[TT__STATES + 1 + k].data;
}

template <int OP, class U> cudaError_t run_updates(const tt__launch *l, int count, U *u)
{
    // Each round launches a kernel for updates that follow one rule.
    for (int from = 0; from < count; from += u->count) {
        const update_rule rule = rule_of(&l[from]);
        const float *clip = (const float *)l[from].in[1].data;
        unsigned blocks = 0;
        u->rule = rule;
        u->clip = clip;
        for (u->count = 0; from + u->count < count && u->count < U::MOST; u->count++) {
            const tt__launch *k = &l[from + u->count];
            const update_rule other = rule_of(k);
            if (memcmp(&other, &rule, sizeof rule) != 0 || k->in[1].data != clip) break;
            const tt__mat *g = &k->in[0], *p = &k->out[0], *m = &k->out[1], *v = &k->out[2];
            typename U::update *t = &u->of[u->count];
            t->g = g->data; t->p = p->data; t->m = m->data; t->v = v->data;
            t->n = p->rows * p->cols;
            t->begin = k->first / 8;
            t->first = blocks;
            blocks += blocks_for(t->n, TT__UPDATE_CHUNK);
            t->weight_decay = k->instr->attr.weight_decay;
            t->lr_factor = tt__lr_factor(&k->instr->attr);
            t->random = k->instr->random;
            t->types[0] = (uint8_t)g->dtype; t->types[1] = (uint8_t)p->dtype; t->types[2] = (uint8_t)m->dtype;
            t->wide = ((uintptr_t)g->data | (uintptr_t)p->data | (uintptr_t)m->data
                       | (uintptr_t)v->data) % 16 == 0;
            set_scales(t, k);
        }
        cudaError_t e = launch_update<OP>(l, u, blocks);
        if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
}

template <int OP> cudaError_t run_update(const tt__launch *l, int count)
{
    bool small = false;
    for (int k = 0; k < count; k++) small = small || (l[k].out[1].data && l[k].out[1].dtype == TT_U8);
    if (!make_arguments(l->device)) return cudaErrorMemoryAllocation;
    if constexpr (OP != TT__OP_MUON) { // MUON has no state: MUON_MOMENTUM updates the momentum
        if (small) return run_updates<OP>(l, count, &l->device->arguments->small);
    }
    return run_updates<OP>(l, count, &l->device->arguments->updates);
}
TT__RUN_BY(SGD, run_update<TT__OP_SGD>)
TT__RUN_BY(ADAM, run_update<TT__OP_ADAM>)
TT__RUN_BY(LION, run_update<TT__OP_LION>)
TT__RUN_BY(MUON_MOMENTUM, run_update<TT__OP_MUON_MOMENTUM>)
TT__RUN_BY(MUON, run_update<TT__OP_MUON>)

// ---- Adafactor, see tt__shape_ADAFACTOR in src/ops/optimizers/rules.h

enum { TT__ADAFACTOR_BLOCKS = 512 }; // max number of blocks that sum squares

struct adafactor_update {
    const void *g;
    void *p;
    float *row, *column;    // running means of g^2; row may be NULL
    int64_t rows, cols;
    const float *clip;
    double *sums;           // the mean of `row`; of each block two sums, of squares of the update and of p
    float weight_decay, lr_factor;
    uint32_t random;
    tt_dtype type_g, type_p;
    bool wide;
};

__device__ __forceinline__ float adafactor_weight(const tt__step_settings *run)
{
    return (float)pow((double)run->step + 1, TT__ADAFACTOR_POWER);
}

// Moves the running mean of a row of g^2. Each block has a row.
__global__ void __launch_bounds__(256) adafactor_square_rows(adafactor_update a, const tt__step_settings *run)
{
    tt__begin_kernel();
    if (!isfinite(a.clip[0])) return;
    const int64_t r = blockIdx.x;
    double sum = 0;
    for (int64_t c = threadIdx.x; c < a.cols; c += 256) {
        const float g = load_any(a.g, a.type_g, r * a.cols + c) * a.clip[1];
        sum += g * g;
    }
    sum = block_sum<256>(sum);
    const float before = a.row[r], mean = (float)(sum / (double)a.cols) + TT__ADAFACTOR_EPS;
    if (threadIdx.x == 0) a.row[r] = before + (mean - before) * adafactor_weight(run);
}

// Moves the running means of 32 columns of g^2. Block 0 also computes the mean of the rows' running means.
__global__ void __launch_bounds__(256) adafactor_square_columns(adafactor_update a,
                                                                const tt__step_settings *run)
{
    tt__begin_kernel();
    TT__SHARED(float, part, [8][32]);
    if (!isfinite(a.clip[0])) return;
    const int x = threadIdx.x % 32, y = threadIdx.x / 32;
    const int64_t c = blockIdx.x * (int64_t)32 + x;
    float sum = 0;
    for (int64_t r = y; r < a.rows && c < a.cols; r += 8) {
        const float g = load_any(a.g, a.type_g, r * a.cols + c) * a.clip[1];
        sum += g * g;
    }
    part[y][x] = sum;
    __syncthreads();
    if (y == 0 && c < a.cols) {
        TT__UNROLL for (int k = 1; k < 8; k++) sum += part[k][x];
        const float before = a.column[c], mean = sum / (float)a.rows + TT__ADAFACTOR_EPS;
        a.column[c] = before + (mean - before) * adafactor_weight(run);
    }
    if (blockIdx.x) return;
    double all = 0;
    for (int64_t r = threadIdx.x; r < a.rows && a.row; r += 256) all += a.row[r];
    all = block_sum<256>(all);
    if (threadIdx.x == 0) a.sums[0] = all / (double)a.rows;
}

// Computes elements [i, i + 8) of the update, of which the first `left` exist; the others are 0. mean: the
// mean of the rows' running means.
__device__ __forceinline__ void adafactor_update8(const adafactor_update &a, float mean, int64_t i,
                                                  int64_t left, float (&u)[8])
{
    int64_t r = i / a.cols, c = i - r * a.cols;
    load8(u, a.g, a.type_g, i, left, a.wide);
    for (int k = 0; k < 8 && k < left; k++) {
        const float of_row = a.row ? sqrtf(mean / a.row[r]) : 1;
        u[k] = u[k] * (a.clip[1] * of_row) / sqrtf(a.column[c]);
        if (++c == a.cols) c = 0, r++;
    }
}

__global__ void __launch_bounds__(256, 4) adafactor_squares(adafactor_update a)
{
    tt__begin_kernel();
    if (!isfinite(a.clip[0])) return;
    const int64_t n = a.rows * a.cols, threads = gridDim.x * (int64_t)256;
    const float mean = (float)a.sums[0];
    double updates = 0, params = 0;
    for (int64_t i = 8 * (blockIdx.x * (int64_t)256 + threadIdx.x); i < n; i += 8 * threads) {
        float u[8], p[8];
        adafactor_update8(a, mean, i, n - i, u);
        load8(p, a.p, a.type_p, i, n - i, a.wide);
        TT__UNROLL for (int k = 0; k < 8; k++) {
            updates += u[k] * u[k];
            params += p[k] * p[k];
        }
    }
    updates = block_sum<256>(updates);
    params = block_sum<256>(params);
    if (threadIdx.x) return;
    a.sums[1 + 2 * blockIdx.x] = updates;
    a.sums[2 + 2 * blockIdx.x] = params;
}

// blocks: number of blocks of adafactor_squares.
__global__ void __launch_bounds__(256) adafactor_step(adafactor_update a, int blocks,
                                                      const tt__step_settings *run)
{
    tt__begin_kernel();
    TT__SHARED(philox_keys, keys, [1]);
    if (!isfinite(a.clip[0])) return;
    const int64_t n = a.rows * a.cols, from = blockIdx.x * (int64_t)TT__UPDATE_CHUNK;
    const int64_t end = from + TT__UPDATE_CHUNK, to = end < n ? end : n;
    const float lr = run->lr * a.lr_factor, keep = 1 - lr * a.weight_decay, mean = (float)a.sums[0];
    double updates = 0, params = 0;
    for (int k = threadIdx.x; k < blocks; k += 256) {
        updates += a.sums[1 + 2 * k];
        params += a.sums[2 + 2 * k];
    }
    updates = block_sum<256>(updates);
    params = block_sum<256>(params);
    if (threadIdx.x == 0)
        expand_key(stream_key(run->seed, TT__RANDOM_ROUNDING, (uint64_t)run->step, a.random), keys[0]);
    __syncthreads();
    const float step = (float)(lr * fmax(TT__ADAFACTOR_LEAST, sqrt(params / (double)n)) /
                               fmax(1.0, sqrt(updates / (double)n)));
    for (int64_t i = from + 8 * threadIdx.x; i < to; i += 2048) {
        float u[8], p[8];
        adafactor_update8(a, mean, i, to - i, u);
        load8(p, a.p, a.type_p, i, to - i, a.wide);
        TT__UNROLL for (int k = 0; k < 8; k++) p[k] = p[k] * keep - u[k] * step;
        update8(a.p, a.type_p, i, to - i, a.wide, p, keys[0], 0);
    }
}

cudaError_t run_adafactor(const tt__launch *l)
{
    const tt__mat *g = &l->in[0], *p = &l->out[0];
    const adafactor_update a = {g->data, p->data, (float *)l->out[1].data, (float *)l->out[2].data, g->rows,
                                g->cols, (const float *)l->in[1].data, resident_of(l)->squares,
                                l->instr->attr.weight_decay, tt__lr_factor(&l->instr->attr),
                                l->instr->random, g->dtype, p->dtype,
                                ((uintptr_t)g->data | (uintptr_t)p->data) % 16 == 0};
    const int64_t n = g->rows * g->cols;
    const unsigned blocks = grid_for(n, 2048, TT__ADAFACTOR_BLOCKS);
    cudaStream_t s = l->device->stream;
    cudaError_t e = cudaSuccess;
    if (a.row) e = TT__LAUNCH(adafactor_square_rows, (unsigned)g->rows, 256, 0, s, a, TT__RUN_OF(l));
    if (e == cudaSuccess)
        e = TT__LAUNCH(adafactor_square_columns, blocks_for(g->cols, 32), 256, 0, s, a, TT__RUN_OF(l));
    if (e == cudaSuccess) e = TT__LAUNCH(adafactor_squares, blocks, 256, 0, s, a);
    if (e == cudaSuccess)
        e = TT__LAUNCH(adafactor_step, blocks_for(n, TT__UPDATE_CHUNK), 256, 0, s, a, (int)blocks,
                       TT__RUN_OF(l));
    return e;
}
TT__RUN_BY(ADAFACTOR, run_adafactor)

// Divides x by the root of a sum of squares.
struct op_unit {
    static constexpr int KIND = RARE;
    const float *squares;
    float factor;
    __device__ void begin() { factor = 1 / fmaxf(sqrtf(*squares), 1e-7f); }
    __device__ bool get(const group_args &g, int64_t r, int64_t c, int n, float (&v)[8]) const
    {
        load_group(v, g.a, r, c, n, g.vector);
        TT__UNROLL for (int j = 0; j < 8; j++) v[j] *= factor;
        return true;
    }
};

cudaError_t run_unit(const tt__launch *l)
{
    const op_unit op = {(const float *)l->in[1].data, 0};
    return run_groups(l->device, l->in[0], no_operand, l->out[0], l->add[0], false, op);
}
TT__RUN_BY(UNIT, run_unit)

// Moves the average of a parameter towards the parameter, as the CPU's ema_rows does.
__global__ void move_average(const float *p, float *average, int64_t n, float decay, const float *clip,
                             const tt__step_settings *run)
{
    tt__begin_kernel();
    if (!isfinite(clip[0])) return;
    const float more = run->step ? 1 - decay : 1;
    const int64_t threads = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += threads)
        average[i] = more < 1 ? average[i] + (p[i] - average[i]) * more : p[i];
}

cudaError_t run_ema(const tt__launch *l)
{
    const int64_t n = l->out[0].rows * l->out[0].cols;
    if (!n) return cudaSuccess;
    return TT__LAUNCH(move_average, grid_for(n, 256, 4096), 256, 0, l->device->stream,
                      (const float *)l->in[0].data, (float *)l->out[0].data, n, l->instr->attr.beta1,
                      (const float *)l->in[1].data, TT__RUN_OF(l));
}
TT__RUN_BY(EMA, run_ema)

} // namespace
