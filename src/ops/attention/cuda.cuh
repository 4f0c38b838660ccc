#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../../cuda/kernels.cuh"
#include "cuda_shared.cuh"
#include "cuda_f32.cuh"
#include "cuda_cores.cuh"
#include "cuda_forward_wide.cuh"
#include "cuda_backward.cuh"
#include "cuda_backward_wide.cuh"

namespace {

// ---- launches

// Sets the arguments that the forward and the backward share. If only some rows of the batch are queries,
// sorts the numbers of these rows into the beginning of the workspace. Sets *used to the bytes of the
// workspace in use.
cudaError_t attention_begin(const tt__launch *l, bool backward, attention_args *p, size_t *used)
{
    const tt__attr *attr = &l->instr->attr;
    const tt__attention_operands operand = tt__attention_of(backward);
    const tt__mat *q = &l->in[operand.q], *starts = &l->in[operand.starts];
    const tt__mat *numbers = &l->in[operand.numbers];
    memset(p, 0, sizeof *p);
    *used = 0;
    p->q = q[0]; p->k = q[1]; p->v = q[2];
    p->seq_start = p->query_start = (const int32_t *)starts->data;
    p->seqs = (int)(starts->rows - 1);
    p->run = TT__RUN_OF(l);
    p->heads = attr->heads;
    p->group = attr->heads / attr->key_heads;
    p->head_size = (int)(p->q.cols / p->heads);
    p->first_head = (int)(l->first_col / p->head_size);
    p->longest = (int)(attr->max_length && attr->max_length < p->k.rows ? attr->max_length : p->k.rows);
    p->causal = attr->causal;
    p->window = attr->window > p->k.rows ? 0 : attr->window; // a window longer than all rows hides nothing
    p->largest = p->window ? p->window - 1 : INT32_MAX;
    p->smallest = p->causal ? 0 : -p->largest;
    p->alibi = attr->alibi;
    p->alibi_heads = attr->alibi_heads;
    p->alibi_rounded = attr->alibi_rounded;
    p->scale = attr->scale;
    p->factor = attr->scale * TT__LOG2E;
    p->drop = attr->dropout > 0;
    p->keep_scale = 256.0f / (float)(256 - TT__ATTENTION_DROP(attr->dropout));
    tt__attention_either(TT__ATTENTION_DROP(attr->dropout), p->either);
    p->random = l->instr->random;
    p->block = attr->dense >= p->k.rows ? 0 : attr->block; // block 0: all sequences are dense
    p->dense = attr->dense;
    p->listed = attr->listed;
    p->list_rows = attr->list_rows;
    cudaError_t e = cudaSuccess;
    if (p->block && l->lists) {
        enum { MAX = sizeof(attention_lists) / sizeof(uint16_t) };
        const int n = (int)tt__listed_blocks(attr);
        uint16_t *lists = (uint16_t *)l->workspace;
        for (int k = 0; k < n && e == cudaSuccess; k += MAX) {
            attention_lists some;
            const int count = n - k < MAX ? n - k : MAX;
            memset(&some, 0, sizeof some);
            memcpy(some.block, l->lists + k, sizeof(uint16_t) * (size_t)count);
            e = TT__LAUNCH(attention_write_lists, 1, 256, 0, l->device->stream, some, lists + k, count);
        }
        p->lists = lists;
        *used = tt__align_to(sizeof(uint16_t) * (size_t)n, TT__CUDA_ALIGN);
    }
    if (e != cudaSuccess || !numbers->data || p->q.rows == 0) return e;
    const int n = (int)p->q.rows;
    int32_t *start = (int32_t *)((char *)l->workspace + *used), *row = start + p->seqs + 1, *at = row + n;
    p->query_start = start; p->query_row = row; p->query_at = at;
    *used += tt__align_to(((size_t)p->seqs + 1 + 2 * (size_t)n) * sizeof(int32_t), TT__CUDA_ALIGN);
    return TT__LAUNCH(attention_order, blocks_for((int64_t)n + p->seqs + 1, 256), 256, 0, l->device->stream,
                      (const int32_t *)numbers->data, n, p->seq_start, p->seqs, start, row, at);
}

// Returns whether a matrix has dtype `dtype` and its rows can be loaded 16 bytes at a time.
bool attention_aligned(const tt__mat *m, tt_dtype dtype)
{
    return m->dtype == dtype && (uintptr_t)m->data % 16 == 0 && m->ld * (dtype == TT_F32 ? 4 : 2) % 16 == 0;
}

// Returns whether a matrix is absent or its rows can be stored two elements at a time.
bool attention_paired(const tt__mat *m, tt_dtype dtype)
{
    return !m->data ||
        ((m->dtype == dtype || m->dtype == TT_F32) && (uintptr_t)m->data % 8 == 0 && m->ld % 2 == 0);
}

// Returns whether the kernels on tensor cores can run with these arguments.
bool attention_fast(const attention_args *p)
{
    const tt_dtype dtype = p->q.dtype;
    const bool fits = p->block ? p->head_size <= 64 && p->block % 64 == 0 && !p->query_row
                               : p->head_size <= 128;
    if (p->alibi_rounded) return false; // attention_dkdv has no registers left for rounded ALiBi
    return dtype != TT_F32 && p->head_size % 8 == 0 && fits &&
        attention_aligned(&p->q, dtype) && attention_aligned(&p->k, dtype) &&
        attention_aligned(&p->v, dtype) && (!p->dout.data || attention_aligned(&p->dout, dtype)) &&
        (p->dout.data || attention_paired(&p->out, dtype)) && attention_paired(&p->dq, dtype) &&
        attention_paired(&p->dk, dtype) && attention_paired(&p->dv, dtype);
}

// Returns the number of thread blocks for tiles of `size` rows. Every tile's number is below this count,
// whatever the lengths of the sequences (see the beginning of cuda_shared.cuh). Blocks whose number has no
// tile do nothing.
int attention_tiles(const attention_args *p, int64_t rows, int size) { return (int)(rows / size + p->seqs); }

// Launches a kernel with one thread block for each combination of a tile of `size` rows, one of `heads`
// heads, and one of `parts` parts of a head.
template <class K>
cudaError_t attention_launch(tt__device *d, K kernel, const attention_args *p, int64_t rows, int size,
                             int heads, int parts, unsigned threads, size_t shared)
{
    const unsigned blocks = (unsigned)(attention_tiles(p, rows, size) * heads * parts);
    cudaError_t e = shared > 48 << 10
        ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared)
        : cudaSuccess;
    return e == cudaSuccess ? TT__LAUNCH(kernel, blocks, threads, shared, d->stream, *p) : e;
}

template <class T, int D, bool DROPS>
cudaError_t attention_forward_wide_on(tt__device *d, const attention_args *p)
{
    typedef attention_wide_sizes<D> S;
    const auto kernel = attention_forward_wide<T, D, DROPS>;
    const size_t shared = sizeof(attention_wide_tiles<T, D, DROPS>) + TT__WIDE_ROOM;
    const int64_t items = (int64_t)attention_tiles(p, p->q.rows, S::QUERIES) * p->heads;
    const int64_t largest = (int64_t)d->properties.multiProcessorCount * S::BLOCKS;
    const int64_t blocks = items < largest ? items : largest, heads = (int64_t)p->seqs * p->heads;
    const int64_t tiles = ((p->query_row ? p->q.rows : p->longest) + S::QUERIES - 1) / S::QUERIES;
    const int64_t groups = (heads * tiles + 2 * blocks - 1) / (2 * blocks);
    attention_args args = *p;
    args.item_tiles = (int)tiles;
    args.item_group = (int)((heads + groups - 1) / groups);
    args.item_rounds = (int)((groups * args.item_group * tiles + blocks - 1) / blocks);
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               (int)shared);
    if (e != cudaSuccess) return e;
    return TT__LAUNCH(kernel, (unsigned)blocks, 128 * (S::GROUPS + 1), shared, d->stream, args);
}

// Launches the forward by mma.sync. A warp has `16 * MT` queries, and a tile has KEYS keys; MT and KEYS are
// the largest for which the sums fit into 255 registers a thread without spills.
template <class T, int D, attention_kind KIND>
cudaError_t attention_forward_on(tt__device *d, const attention_args *p)
{
    enum { MT = 2, KEYS = D <= 64 ? 64 : 32 };
    return attention_launch(d, attention_forward<T, D, MT, KEYS, KIND>, p, p->q.rows, 64 * MT, p->heads, 1,
                            128, (64 * MT + 4 * KEYS) * (D + 8) * sizeof(T));
}

// Returns the bytes of shared memory of attention_backward.
size_t attention_backward_bytes(int head_size, int warps)
{
    const size_t keys = 32 * (size_t)warps, queries = 64, pitch = (size_t)head_size + 8;
    return ((2 * keys + 4 * queries) * pitch + keys * (queries + 8)) * sizeof(uint16_t)
        + 6 * queries * sizeof(float);
}

// Returns whether attention_backward_wide makes dq, dk and dv. dq may have the memory of dk or dv only if
// one block has all keys of a sequence and makes dq, dk and dv; several blocks complete dq only after dk is
// stored.
bool attention_spans(const tt__device *d, const attention_args *p)
{
    const bool plain = !p->window && !p->alibi_heads && !p->block && !p->query_row;
    const bool apart = p->dq.data != p->dk.data && p->dq.data != p->dv.data;
    if (!d->wgmma || !plain || p->head_size <= 32 || p->head_size > 64) return false;
    return p->longest <= TT__SPAN ? apart || p->group == 1 : apart && p->parts;
}

// Returns the number of warps of attention_backward, which makes dq, dk and dv in one kernel; 0: two kernels
// make the gradients. With listed queries, one kernel is wrong if dq has the memory of dk or dv, because the
// rows of dq may then be rows of dk that another block makes.
int attention_warps(const tt__device *d, const attention_args *p)
{
    const int warps = p->longest <= 128 ? 4 : 8, head_size = p->head_size <= 32 ? 32 : 64;
    const bool plain = !p->window && !p->alibi_heads && !p->block && p->head_size <= 64;
    if (!plain || attention_spans(d, p)) return 0;
    const bool apart = p->dq.data != p->dk.data && p->dq.data != p->dv.data;
    const bool all = p->dq.data && (p->dk.data || p->dv.data) && p->longest <= 256;
    const size_t bytes = attention_backward_bytes(head_size, warps)
        + 256 + (2 * (size_t)warps + 4) * (size_t)head_size * sizeof(float); // the static shared memory
    // With 4 warps and wider heads, the kernel spills registers on compute capability 8.0.
    if (warps == 4 && head_size > 32) return 0;
    return all && (apart || !p->query_row) && bytes <= d->properties.sharedMemPerBlockOptin ? warps : 0;
}

template <class T, int D, int WARPS> cudaError_t attention_backward_of(tt__device *d, attention_args *p)
{
    p->parts_q = p->parts_k = p->seqs;
    const size_t shared = attention_backward_bytes(D, WARPS);
    const unsigned blocks = (unsigned)(p->seqs * (p->heads / p->group));
    const cudaError_t e = cudaFuncSetAttribute(attention_backward<T, D, WARPS>,
                                               cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    return e == cudaSuccess
        ? TT__LAUNCH((attention_backward<T, D, WARPS>), blocks, 32 * WARPS, shared, d->stream, *p) : e;
}

// Returns the bytes of shared memory in which attention_dkdv has the bits of dropout for two tiles of
// queries: one in use and one in flight.
size_t attention_kept_bytes(const attention_args *p, int keys, int queries)
{
    return p->bits ? 2 * (size_t)keys * (size_t)queries / 8 : 0;
}

template <class T> cudaError_t attention_backward_spans(tt__device *d, attention_args *p)
{
    enum { TILE = 64 * 64, TILES = 4 * TT__SPAN_TILES + 4 };
    const bool whole = p->longest <= TT__SPAN;
    const size_t shared = TILES * TILE * sizeof(T) + 6 * 64 * sizeof(float) + TT__WIDE_ROOM;
    const int key_heads = p->heads / p->group, spans = (p->longest + TT__SPAN - 1) / TT__SPAN;
    if (whole) p->parts = NULL;
    p->parts_k = whole ? p->seqs : attention_tiles(p, p->k.rows, TT__SPAN);
    p->parts_q = whole ? p->seqs : attention_tiles(p, p->q.rows, 64);
    // attention_find_span puts the span numbers into the rows of a matrix with span_cols columns, and blocks
    // take the numbers column by column. If all sequences have the max length, every (spans + 1)-th number
    // begins a sequence. Column 0 then has the first span of each sequence.
    p->span_cols = p->causal && !whole && spans < p->parts_k ? spans + 1 : 1;
    p->span_rows = p->parts_k / p->span_cols;
    p->slots = tt__cuda_attention_slots(p->causal, p->longest);
    for (int k = 1; k < p->slots; k++)
        p->slot_begin[k] = p->slot_begin[k - 1] +
            tt__cuda_attention_slot_row(p->q.rows, p->causal, p->longest, k - 1);
    const auto kernel = p->drop ? attention_backward_wide<T, true> : attention_backward_wide<T, false>;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    for (p->pass = 0; e == cudaSuccess && p->pass * p->slots < spans; p->pass++)
        e = TT__LAUNCH(kernel, (unsigned)(p->parts_k * key_heads), 256, shared, d->stream, *p);
    if (e == cudaSuccess && !whole && p->dq.data)
        e = TT__LAUNCH((attention_sum_parts<T>), (unsigned)(p->parts_q * p->heads), 256, 0, d->stream, *p);
    return e;
}

template <class T, int D, attention_kind KIND>
cudaError_t attention_backward_on(tt__device *d, attention_args *p)
{
    enum { QMT = D <= 96 ? 2 : 1, KEYS = D <= 96 ? 32 : 64, KMT = D <= 64 ? 2 : 1,
          QUERIES = D <= 64 || D > 96 ? 32 : 64 };
    cudaError_t e = cudaSuccess;
    if constexpr (D == 64 && KIND == PLAIN)
        if (attention_spans(d, p)) return attention_backward_spans<T>(d, p);
    if constexpr (D <= 64 && KIND == PLAIN) {
        if constexpr (D <= 32)
            if (p->warps == 4) return attention_backward_of<T, D, 4>(d, p);
        if (p->warps == 8) return attention_backward_of<T, D, 8>(d, p);
    }
    p->parts_q = attention_tiles(p, p->q.rows, 64 * QMT);
    p->parts_k = attention_tiles(p, p->k.rows, 64 * KMT);
    if (p->dq.data && p->q.rows > 0)
        e = attention_launch(d, attention_dq<T, D, QMT, KEYS, KIND>, p, p->q.rows, 64 * QMT, p->heads, 1, 128,
                             (2 * 64 * QMT + 4 * KEYS) * (D + 8) * sizeof(T));
    auto dkdv = attention_dkdv<T, D, KMT, QUERIES, KIND>;
    if constexpr (D <= 64 && KIND == PLAIN)
        if (p->bits) dkdv = attention_dkdv<T, D, KMT, QUERIES, KIND, true>;
    if (e == cudaSuccess && (p->dk.data || p->dv.data))
        e = attention_launch(d, dkdv, p, p->k.rows, 64 * KMT, p->heads / p->group, 1, 128,
                             (2 * 64 * KMT + 4 * QUERIES) * (D + 8) * sizeof(T)
                             + 6 * QUERIES * sizeof(float) + attention_kept_bytes(p, 64 * KMT, QUERIES));
    return e;
}

// Returns whether attention_forward_wide can run. The kernel supports neither ALiBi nor block-sparse
// attention, and stores whole vectors.
bool attention_forward_fits_wide(const tt__device *d, const attention_args *p)
{
    return d->wgmma && p->scale > 0 && !p->alibi_heads && !p->block && p->head_size > 32
        && attention_aligned(&p->out, p->q.dtype);
}

template <class T, int D> cudaError_t attention_of_size(tt__device *d, attention_args *p)
{
    if constexpr (D == 64 || D == 128)
        if (!p->dout.data && attention_forward_fits_wide(d, p))
            return p->drop ? attention_forward_wide_on<T, D, true>(d, p)
                           : attention_forward_wide_on<T, D, false>(d, p);
    const bool near = p->window || p->alibi_heads;
    if (!p->dout.data)
        return near ? attention_forward_on<T, D, NEARBY>(d, p) : attention_forward_on<T, D, PLAIN>(d, p);
    return near ? attention_backward_on<T, D, NEARBY>(d, p) : attention_backward_on<T, D, PLAIN>(d, p);
}

template <class T> cudaError_t attention_on(tt__device *d, attention_args *p)
{
    if (p->block) // attention_fast has refused heads of more than 64 columns
        return p->dout.data ? attention_backward_on<T, 64, BY_BLOCKS>(d, p)
                            : attention_forward_on<T, 64, BY_BLOCKS>(d, p);
#define TT__ATTENTION_SIZE(D) if (p->head_size <= D) return attention_of_size<T, D>(d, p)
    TT__ATTENTION_SIZE(32);
    TT__ATTENTION_SIZE(64);
    TT__ATTENTION_SIZE(80);
    TT__ATTENTION_SIZE(96);
    TT__ATTENTION_SIZE(128);
#undef TT__ATTENTION_SIZE
    return cudaErrorInvalidValue;
}

// Runs attention on tensor cores. Random numbers need a head's number among the heads of all ranks. Kernels
// index the operands with this number, too, and so need no register for a second number. The operands'
// addresses are therefore moved back by the heads of lower ranks.
cudaError_t attention_on_cores(tt__device *d, attention_args *p)
{
    tt__mat *mats[] = {&p->q, &p->out, &p->dout, &p->dq, &p->k, &p->v, &p->dk, &p->dv};
    for (int k = 0; k < 8; k++) {
        tt__mat *m = mats[k];
        const int64_t columns = (int64_t)(k < 4 ? p->first_head : p->first_head / p->group) * p->head_size;
        if (m->data) m->data = (char *)m->data - columns * (int64_t)tt_dtype_bytes(m->dtype);
    }
    if (p->lse) p->lse -= p->first_head;
    if (p->delta) p->delta -= p->first_head;
    if (p->bits) p->bits -= (int64_t)p->first_head * TT__CUDA_ATTENTION_BITS;
    if (p->parts) p->parts -= p->first_head * p->head_size;
    if (p->sums_q) p->sums_q -= p->first_head * p->head_size;
    if (p->sums_k) p->sums_k -= p->first_head / p->group * p->head_size;
    if (p->sums_v) p->sums_v -= p->first_head / p->group * p->head_size;
    return p->q.dtype == TT_BF16 ? attention_on<bf16>(d, p) : attention_on<f16>(d, p);
}

cudaError_t run_attention(const tt__launch *l)
{
    tt__device *d = l->device;
    attention_args p;
    size_t used;
    cudaError_t e = attention_begin(l, false, &p, &used);
    p.out = l->out[0];
    p.lse = (float *)l->out[1].data;
    if (e != cudaSuccess || p.seqs < 1 || p.q.rows < 1) return e;
    if (attention_fast(&p)) return attention_on_cores(d, &p);
    const bool near = p.window || p.alibi_heads || p.block;
    const auto kernel = near ? attention_forward_any<true> : attention_forward_any<false>;
    return attention_launch(d, kernel, &p, p.q.rows, 64, p.heads, (p.head_size + 63) / 64, 256, 0);
}
TT__RUN_BY(ATTENTION, run_attention)

template <class T, int PARTS> cudaError_t attention_deltas_by(tt__device *d, const attention_args *p)
{
    const unsigned blocks = blocks_for(p->q.rows * p->heads, TT__DELTA_NUMBERS * (256 / PARTS));
    return TT__LAUNCH((attention_delta<T, PARTS>), blocks, 256, 0, d->stream, *p);
}

// Launches a kernel for the sums of dout * out of each row and head. attention_delta_any serves operands of
// any kind, and is slow. Heads of more than 64 columns in 16 bits seldom need attention_delta_any: if dq is
// wanted, the kernel of dq makes the sums.
cudaError_t attention_deltas(tt__device *d, const attention_args *p)
{
    const tt_dtype dtype = p->out.dtype;
    const int lanes = dtype == TT_F32 ? 4 : 8, parts = p->head_size / lanes;
    if (p->head_size % lanes || parts > (dtype == TT_F32 ? 32 : 8) || !attention_aligned(&p->out, dtype) ||
        !attention_aligned(&p->dout, dtype))
        return TT__LAUNCH(attention_delta_any, blocks_for(p->q.rows * p->heads, 8), 256, 0, d->stream, *p);
    if (dtype == TT_BF16) return attention_deltas_by<bf16, 8>(d, p);
    if (dtype == TT_F16) return attention_deltas_by<f16, 8>(d, p);
    return parts <= 8 ? attention_deltas_by<float, 8>(d, p)
        : parts <= 16 ? attention_deltas_by<float, 16>(d, p) : attention_deltas_by<float, 32>(d, p);
}

// Computes the backward for any dtypes, strides and head sizes, without column sums.
cudaError_t attention_backward_any(tt__device *d, const attention_args *p)
{
    const int parts = (p->head_size + 63) / 64;
    cudaError_t e = cudaSuccess;
    if (p->dq.data && p->q.rows > 0)
        e = attention_launch(d, attention_dq_any, p, p->q.rows, 64, p->heads, parts, 256, 0);
    // Runs even without queries: the gradients of a key that no query sees are 0.
    if (e == cudaSuccess && (p->dk.data || p->dv.data))
        e = attention_launch(d, attention_dkdv_any, p, p->k.rows, 64, p->heads / p->group, parts, 256, 0);
    return e;
}

// Runs the backward of attention. The kernels on tensor cores also make the column sums (gradients of
// the biases of q, k and v) of 16-bit results that they write, not of results that they add to. The resident
// workspace must have room for a row of partial sums for each tile of 64 rows. Other column sums need a
// second sweep over the results.
cudaError_t run_attention_backward(const tt__launch *l)
{
    tt__device *d = l->device;
    attention_args p;
    size_t used;
    cudaError_t e = attention_begin(l, true, &p, &used);
    p.dout = l->in[0];
    p.out = l->in[5];
    p.lse = (float *)l->in[6].data;
    p.delta = (float *)((char *)l->workspace + used);
    p.dq = l->out[0]; p.dk = l->out[1]; p.dv = l->out[2];
    p.add_dq = l->add[0]; p.add_dk = l->add[1]; p.add_dv = l->add[2];
    if (e != cudaSuccess) return e;
    used += tt__align_to((size_t)(p.q.rows * p.heads) * sizeof(float), TT__CUDA_ALIGN);
    const bool both = p.dq.data && (p.dk.data || p.dv.data);
    const size_t bits = (size_t)tt__cuda_attention_bits(&l->instr->attr, &p.q, p.seqs);
    if (both && !p.query_row && bits > 0 && used + bits <= l->instr->workspace)
        p.bits = (unsigned char *)l->workspace + used;
    const size_t parts = (size_t)tt__cuda_attention_parts(&l->instr->attr, &p.q);
    if (!p.query_row && parts > 0 && used + parts <= l->instr->workspace)
        p.parts = (float *)((char *)l->workspace + used);
    const bool fast = p.seqs > 0 && attention_fast(&p);
    float *next = resident_of(l)->sums, *const end = next + resident_workspace::BYTES / sizeof(float);
    float *partial[3] = {NULL, NULL, NULL};
    for (int k = 0; k < 3 && fast; k++) {
        const tt__mat *y = &l->out[k];
        const int64_t floats = y->cols * attention_tiles(&p, y->rows, 64);
        const bool shared = k == 0 && p.group > 1 && attention_spans(d, &p) && p.longest <= TT__SPAN;
        if (!l->out[3 + k].data || l->add[k] || y->dtype == TT_F32 || floats > end - next || shared) continue;
        partial[k] = next;
        next += floats;
    }
    p.sums_q = partial[0]; p.sums_k = partial[1]; p.sums_v = partial[2];
    p.warps = attention_warps(d, &p);
    p.sums_deltas = fast && p.warps == 0 && !attention_spans(d, &p) && p.dq.data
        && attention_aligned(&p.out, p.q.dtype);
    if (p.seqs > 0 && p.q.rows > 0 && !p.sums_deltas) e = attention_deltas(d, &p);
    if (p.seqs > 0 && e == cudaSuccess) e = fast ? attention_on_cores(d, &p) : attention_backward_any(d, &p);
    all_sums_to_finish all;
    memset(&all, 0, sizeof all);
    for (int k = 0; k < 3; k++) {
        const int parts = l->out[k].rows == 0 ? 0 : k ? p.parts_k : p.parts_q;
        if (partial[k])
            add_sums_to_finish(&all, partial[k], parts, l->out[k].cols, &l->out[3 + k], l->add[3 + k]);
    }
    if (e == cudaSuccess) e = run_all_finish_sums(d, &all);
    for (int k = 0; k < 3 && e == cudaSuccess; k++) // now, because run_column_sums overwrites `partial`
        if (l->out[3 + k].data && !partial[k])
            e = run_column_sums(l, &l->out[k], &l->out[3 + k], l->add[3 + k]);
    return e;
}
TT__RUN_BY(ATTENTION_BACKWARD, run_attention_backward)

} // namespace
