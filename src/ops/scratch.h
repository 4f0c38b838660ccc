#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "shapes.h"

/* ---------------------------------------------------------------------------------------- scratch of kernels
   Sizes of scratch. The plan reserves these sizes, and the CPU kernels lay their scratch out by them. */

/* Number of rows of floats that each thread has as scratch, into which it can widen rows of other dtypes. */
#define TT__ROW_BUFFERS 5
#define TT__SUM_ROWS 128 /* rows summed into one partial result of a column sum */

static size_t tt__row_bytes(int64_t cols) { return tt__align_up((size_t)cols * 4); }

/* Block sizes, in elements, after Goto, van de Geijn, "Anatomy of high-performance matrix multiplication",
   2008: a panel of A (4..12 x K) stays in L1. A panel of B (K x 8..48) and a tile of A (TILE_M x K) stay in
   L2, the packed A (M x K) and B (K x N) in L3. Sums over at most K elements need no memory for partial sums,
   so K is chosen as the width of many models. M and TILE_M are multiples of the height of every microkernel,
   N and TILE_N multiples of its width. */
#define TT__GEMM_K 768
#define TT__GEMM_M 1056
#define TT__GEMM_N 1056
#define TT__GEMM_TILE_M 96
#define TT__GEMM_TILE_N 192
#define TT__GEMM_PACK_LINES 96 /* rows of A or columns of B per packing task; a multiple of panels' widths  */
#define TT__GEMM_PACK_K 32    /* units of k per packing task if a line is not contiguous; an even number */
#define TT__GEMM_ALONE 131072 /* number of multiplications that take no longer than waking a thread         */
/* Few rows of A use each element of B too few times for packing B to pay. If the columns of B are contiguous,
   the product is then made by dot products. If the rows of B are contiguous, the product is made by sums of
   rows of B. */
#define TT__GEMM_STRIP 64     /* columns of C per task if B is not packed                                   */
#define TT__GEMM_FEW_ROWS 24  /* max rows of A for which a B with contiguous columns is not packed          */
#define TT__GEMM_FEW_SUMS 4   /* max rows of A for which a B with contiguous rows is not packed             */
#ifdef TINYTRAIN_CBLAS
#include <cblas.h>
#define TT__CBLAS_M 192 /* rows of C, of at most GEMM_N columns, that are finished while in the cache      */
#endif

/* Returns the bytes of workspace of the product of an (m, k) and a (k, n) matrix. The number is the same for
   every instruction set and number of threads. The number never shrinks as m, n or k grow, so a plan for the
   max number of rows also serves fewer rows. */
static size_t tt__gemm_workspace(int64_t m, int64_t n, int64_t k)
{
    size_t few = tt__align_up((size_t)(tt__min(m, TT__GEMM_FEW_ROWS) * k) * 4); /* bytes of a copy of A as
                                                                                   floats */
    size_t rows = (size_t)tt__min(m + 31, TT__GEMM_M); /* m rounded up to whole panels of A */
    size_t cols = (size_t)tt__min(n + 47, TT__GEMM_N);
    size_t depth = (size_t)tt__min(tt__max(k, 16), TT__GEMM_K); /* at least the 16 units of k of a tile */
    size_t packed = tt__align_up(rows * depth * 4) + tt__align_up(cols * depth * 4);
    if (k > TT__GEMM_K) packed += rows * cols * 4;
#ifdef TINYTRAIN_CBLAS
    size_t sums = (size_t)tt__min(m, TT__CBLAS_M) * cols * 4;
    if (packed < sums) packed = sums;
#endif
    return m > TT__GEMM_FEW_SUMS && packed > few ? packed : few;
}

/* Block sizes of the flash-attention kernels. A tile of KEYS x QUERIES scores, as floats, stays in the cache.
   A forward task computes up to GROUP queries, so that packing a block of keys and values pays for itself.
   All sizes are multiples of 16; one Philox call draws the random numbers of 16 keys. */
enum {
    TT__ATTENTION_KEYS = 256,
    TT__ATTENTION_QUERIES = 64,
    TT__ATTENTION_GROUP = 256,
    TT__ATTENTION_SPAN = 4096, /* max queries whose dq the backward holds in fp32; bounds the workspace */
    TT__ATTENTION_TILE = TT__ATTENTION_QUERIES + 16 /* row stride of tiles: an odd number of cache lines */
};

/* Returns the stride of packed rows in floats. The stride leaves room for the widest vectors, and is an odd
   number of cache lines: strides of a power of two would put a column of a block into few cache sets. */
static int64_t tt__attention_stride(int64_t head_size) { return (tt__ceil_div(head_size, 16) | 1) * 16; }

static int64_t tt__attention_padded(int64_t n) { return tt__ceil_div(n, 16) * 16; }

/* Returns the number of rows of qt and doutt, the transposes of q and dout. Each transpose has a row for
   each column of a head or, in bf16, for each pair of columns, padded to whole tiles; the result is enough
   for both. */
static int64_t tt__attention_qt_rows(int64_t head_size)
{
    return tt__max(head_size, tt__ceil_div(head_size, 32) * 16);
}

/* The buffers of one thread, each 64-byte aligned. X(of, name, floats) is a buffer of the forward, of the
   backward or of both; `floats`, its size, uses variables of tt__attention_layout. Buffers of pairs, for
   products of bf16, hold two bf16 in each float: neighbours in a row (pairs of columns) or in a column (pairs
   of rows). */
#define TT__ATTENTION_BUFFERS(X) \
    X(both, k_pairs, keys * whole / 2)           /* k in bf16, pairs of columns */ \
    X(both, summed, keys * stride / 2)           /* v or k in bf16, pairs of rows; transposed for tiles */ \
    X(both, columns, queries * whole / 2)        /* q or dout in bf16, pairs of columns */ \
    X(both, left, keys * queries / 2)            /* weights or dscores in bf16, in pairs */ \
    X(both, across, tt__max(whole * queries, keys * stride / 2)) /* tile kernels' sums or transposed rows */ \
    X(both, k, keys * stride) \
    X(both, v, keys * stride) \
    X(both, weights, keys * tile)                /* scores, which become weights */ \
    X(both, q, queries * stride) \
    X(both, qt, blocks * qt_rows * tile)         /* q transposed, for each block of queries of a task */ \
    X(forward, out, max_queries * stride) \
    X(forward, max, max_queries)               /* running maximum of the scores */ \
    X(forward, sum, max_queries)                /* sum of the weights */ \
    X(backward, v_pairs, keys * whole / 2)       /* v in bf16, pairs of columns */ \
    X(backward, q_pairs, queries * stride / 2)   /* q in bf16, pairs of rows */ \
    X(backward, dout_pairs, queries * stride / 2) \
    X(backward, dk, keys * stride) \
    X(backward, dv, keys * stride) \
    X(backward, dscores, keys * tile) \
    X(backward, dout, queries * stride) \
    X(backward, doutt, qt_rows * tile) \
    X(backward, lse, span)                       /* log2-sum-exp2 of each query's scores */ \
    X(backward, delta, span)                     /* sum of dout * out of each query */ \
    X(backward, dq, span * tt__attention_padded(head_size)) \
    X(shared, all_dk, rows * stride)             /* dk of a sequence, summed over the heads of q */ \
    X(shared, all_dv, rows * stride)

typedef struct tt__attention_buffers {
#define TT__BUFFER(of, name, floats) float *name;
    TT__ATTENTION_BUFFERS(TT__BUFFER)
#undef TT__BUFFER
} tt__attention_buffers;

/* Lays the buffers out in `memory`, unless that is NULL, and returns their bytes. rows: the number of rows of
   the longest sequence; group: the number of heads of q that read one head of k. */
static size_t tt__attention_layout(char *memory, int64_t rows, int64_t head_size, int group, bool backward,
                                   tt__attention_buffers *b)
{
    int64_t stride = tt__attention_stride(head_size), tile = TT__ATTENTION_TILE, keys = TT__ATTENTION_KEYS;
    int64_t queries = TT__ATTENTION_QUERIES, max_queries = TT__ATTENTION_GROUP;
    int64_t span = tt__attention_padded(tt__min(rows, TT__ATTENTION_SPAN));
    int64_t whole = tt__ceil_div(head_size, 32) * 32; /* columns of a head, padded to whole tiles of pairs */
    int64_t qt_rows = tt__attention_qt_rows(head_size);
    int64_t blocks = backward ? 1 : tt__ceil_div(max_queries, queries);
    const bool both = true, forward = !backward, shared = backward && group > 1;
    size_t used = 0;
    memset(b, 0, sizeof *b);
#define TT__BUFFER(of, name, floats) \
    if (of) { \
        b->name = memory ? (float *)(void *)(memory + used) : NULL; \
        used += tt__align_up((size_t)(floats) * sizeof(float)); \
    }
    TT__ATTENTION_BUFFERS(TT__BUFFER)
#undef TT__BUFFER
    return used;
}

/* Returns the bytes of workspace of attention for sequences of up to max_rows rows. The number is the same
   for all instruction sets. */
static size_t tt__attention_workspace(int64_t max_rows, int64_t head_size, int group, bool backward,
                                      int threads)
{
    tt__attention_buffers b;
    return tt__attention_layout(NULL, max_rows, head_size, group, backward, &b) * (size_t)threads;
}

static size_t tt__attention_queries_bytes(int64_t seqs, int64_t n)
{
    return tt__align_up((size_t)(seqs + 1 + 2 * n) * sizeof(int32_t));
}

/* Returns the bytes that linear_cross_entropy keeps: of each row, the loss and whether the prediction is
   right; of a chunk of rows, the log-sum-exps and the logits. */
static size_t tt__loss_bytes(int64_t rows, int64_t classes)
{
    int64_t chunk = tt__min(rows, TT__LOSS_CHUNK);
    size_t of_chunk = tt__align_up((size_t)chunk * 4) + tt__align_up((size_t)(chunk * classes) * 4);
    return tt__align_up((size_t)rows * 8) + of_chunk;
}

/* Returns the bytes of scratch into which the threads of a CPU widen rows: TT__ROW_BUFFERS rows of `cols`
   floats for each thread. */
static size_t tt__buffer_bytes(int threads, int64_t cols)
{
    return (size_t)threads * TT__ROW_BUFFERS * tt__row_bytes(cols);
}

/* Returns the max number of rows and the max number of columns of all operands and results. */
static tt__shape tt__largest(const tt_tape *t, const tt__instr *i)
{
    tt__shape max;
    tt__set_fixed(&max, TT_F32, 1, 1);
    for (int k = 0; k < TT__MAX_IN + TT__MAX_OUT; k++) {
        int32_t id = k < TT__MAX_IN ? i->in[k] : i->out[k - TT__MAX_IN];
        if (!id) continue;
        max.cols = tt__max(max.cols, t->values[id].shape.cols);
        max.rows = tt__max(max.rows, t->values[id].shape.rows);
    }
    return max;
}

/* Returns the bytes of scratch of a kernel that widens rows of any of its operands. */
static size_t tt__widen_bytes(int threads, const tt_tape *t, const tt__instr *i)
{
    return tt__buffer_bytes(threads, tt__largest(t, i).cols);
}

/* Returns the bytes of partial column sums: one row of sums for each TT__SUM_ROWS rows. */
static size_t tt__partial_bytes(int64_t rows, int64_t cols)
{
    return (size_t)tt__ceil_div(rows, TT__SUM_ROWS) * tt__row_bytes(cols);
}

/* Returns the bytes of scratch of a kernel that computes column sums. */
static size_t tt__sum_rows_bytes(int threads, int64_t rows, int64_t cols)
{
    return tt__partial_bytes(rows, cols) + tt__buffer_bytes(threads, cols);
}

/* Returns the bytes of scratch of a kernel that keeps two floats for each row and widens rows. */
static size_t tt__row_pairs_bytes(int threads, const tt_tape *t, const tt__instr *i)
{
    return tt__align_up((size_t)tt__largest(t, i).rows * 8) + tt__widen_bytes(threads, t, i);
}

/* Returns the bytes of scratch of a kernel that widens TT__CHUNK elements at a time. */
static size_t tt__chunk_bytes(int threads, const tt_tape *t, const tt__instr *i)
{
    (void)t; (void)i;
    return tt__buffer_bytes(threads, TT__CHUNK);
}

static size_t tt__no_bytes(int threads, const tt_tape *t, const tt__instr *i)
{
    (void)threads; (void)t; (void)i;
    return 0;
}

/* Sizes of the product of an (m, k) and a (k, n) matrix. */
typedef struct tt__mnk { int64_t m, n, k; } tt__mnk;

/* Returns the sizes of i, a TT__PRODUCT. rows and cols: the shape of in[0], which may have fewer rows than
   its capacity; w_rows and w_cols: the shape of in[1] at capacity. */
static tt__mnk tt__mnk_of(const tt__instr *i, int64_t rows, int64_t cols, int64_t w_rows, int64_t w_cols)
{
    tt__mnk p = {rows, w_rows, cols};              /* LINEAR multiplies x (rows, cols) by the transpose
                                                      of w (w_rows, w_cols) */
    if (i->op == TT__OP_LINEAR_DX) p.n = w_cols;   /* LINEAR_DX multiplies dy by w */
    if (i->op == TT__OP_MATMUL && i->attr.untransposed) {
        p.n = w_cols;
        p.k = w_rows;
    }
    if (i->op == TT__OP_LINEAR_DW || i->op == TT__OP_MATMUL_DB) { /* LINEAR_DW multiplies dy^T by x */
        p.m = cols;
        p.n = w_cols;
        p.k = rows;
    }
    return p;
}

static tt__mnk tt__mnk_at_capacity(const tt_tape *t, const tt__instr *i)
{
    const tt__shape *a = tt__in(t, i, 0), *b = tt__in(t, i, 1);
    return tt__mnk_of(i, a->rows, a->cols, b->rows, b->cols);
}

static size_t tt__product_bytes(int threads, const tt_tape *t, const tt__instr *i)
{
    tt__mnk p = tt__mnk_at_capacity(t, i);
    (void)threads;
    return tt__gemm_workspace(p.m, p.n, p.k);
}

/* Returns the bytes of scratch of CUDA's radix sort of pairs (id, row) by id: two arrays of ids and two of
   rows. The counts of the sort are in the resident workspace. */
static size_t tt__sort_bytes(const tt_tape *t, const tt__instr *i)
{
    return 4 * tt__align_to((size_t)tt__in(t, i, 1)->rows * 4, TT__CUDA_ALIGN);
}
