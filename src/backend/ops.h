#pragma once
#include "../api/context.h"
#include "../api/params.h"
#include "../api/tape.h"
#include "launch.h"

/* ---------------------------------------------------------------------------------------------- the op table
   X(OP, name, inputs, outputs, flags). OP names everything else: tt__rules_OP (src/ops/),
   TT__K(run_OP) (cpu), and the case in the generic tests. flags: */
#define TT__NAMED_BY_ACT 0x1 /* errors and programs call it by its activation                               */
#define TT__INPLACE0 0x2     /* out[0] may take the place of in[0] when that dies here                      */
#define TT__INPLACE1 0x4     /* ... of in[1]                                                                */
#define TT__RMW 0x8          /* reads and writes its outputs: optimizer steps                               */
#define TT__RANDOM 0x10      /* draws random numbers                                                        */
#define TT__WITH_RUN 0x20    /* operand TT__RUN_IN is the step's settings: where it updates or drops out    */
#define TT__MEAN 0x40        /* with TT__WITH_RUN: only in programs that accumulate, which do not know yet
                                how many targets the step has */
#define TT__ANY_SPACE 0x80   /* its operands may lie in the host's memory                                   */
#define TT__WAITS 0x100      /* its operands are what an instruction of another stream reads and writes     */
#define TT__PRODUCT 0x200    /* out[0] is a matrix product, which may be of fp8 (TT__E4M3)                  */
#define TT__ACTIVATES 0x400  /* out[0] may be an activation (attr.act) of out[1], which is then there       */
#define TT__LOSS 0x800       /* a mean over targets, in[TT__LOSS_TARGETS]; it counts: out[TT__LOSS_COUNTS]  */
#define TT__GATHERS 0x1000   /* row r of out[0] is the row of in[0] whose number is row r of in[1]          */
#define TT__CASTS 0x2000     /* out[0] is in[0] in another dtype                                            */
#define TT__SAVES1 0x4000    /* only a backward reads out[1]                                                */
#define TT__SUMS 0x8000      /* out[0] is in[0] + in[1], which are alike                                    */
#define TT__MOVES 0x10000    /* out[0] is in[0] scaled, some of it, or a sum with it                        */
#define TT__BEGINS 0x20000   /* out[0] may begin a residual stream                                          */
/* The backward may compute out[0] again instead of finding it: where in[0] is there anyway, or a piece of it;
   the same, if recompute is "attention"; where in[0] is an input or a parameter. */
#define TT__AGAIN 0x40000
#define TT__AGAIN_ATTENTION 0x80000
#define TT__AGAIN_KEPT (TT__AGAIN | TT__AGAIN_ATTENTION)
/* Row r of out[0] depends on row r of these operands (1 << operand, of the first four), and on no other. */
#define TT__BY_ROW(slots) ((slots) << 20)
/* Operands by number, not 0. A matrix that a product may round while it reads it (attr.narrow); what is added
   to the rest of out[0]; i32 (rows, 1): which rows of the batch out[0] has, if not all (tt__pass_rows). */
#define TT__WEIGHT(operand) ((operand) << 24)
#define TT__RESIDUAL(operand) ((operand) << 26)
#define TT__NUMBERS(operand) ((operand) << 28)
/* The last output, where it is there, is (1, columns of out[0]): the sum of the rows that out[0] has then. Of
   attention's backward the last three are, of out[0], out[1] and out[2]. Only backwards have it, and only
   where the device's memory is not the host's: see tt__fuse_column_sums. */
#define TT__COLUMN_SUMS 0x80000000u

enum { TT__LOSS_TARGETS = 1, TT__LOSS_WEIGHTS = 2, TT__LOSS_COUNTS = 2 }; /* operands, and an output */

#define TT__OPS(X) \
    X(LINEAR, "linear", 6, 2, TT__BY_ROW(1 | 8) | TT__PRODUCT | TT__ACTIVATES | TT__SAVES1 | TT__BEGINS | \
      TT__WEIGHT(1) | TT__RESIDUAL(3)) \
        /* x, w, [b], [residual], [1/scale of x], [of w] -> y, [pre-activation] */ \
    X(EMBEDDING, "embedding", 2, 1, TT__BEGINS) /* ids, table -> y */ \
    X(LAYERNORM, "layernorm", 3, 2, TT__INPLACE0 | TT__BY_ROW(1) | TT__SAVES1 | TT__AGAIN) \
        /* x, w, [b] -> y, (mean, 1/std) */ \
    X(RMSNORM, "rmsnorm", 2, 2, TT__INPLACE0 | TT__BY_ROW(1) | TT__SAVES1 | TT__AGAIN) \
        /* x, w -> y, 1/rms */ \
    X(RMSNORM_BACKWARD, "rmsnorm_backward", 4, 3, TT__INPLACE0 | TT__COLUMN_SUMS) \
        /* dy, x, w, 1/rms -> [dx], [dw], [column sums of dx] */ \
    X(ACTIVATION, "activation", 1, 1, TT__NAMED_BY_ACT | TT__INPLACE0 | TT__BY_ROW(1) | TT__AGAIN) \
        /* x -> act(x) */ \
    X(ADD, "add", 2, 1, TT__INPLACE0 | TT__INPLACE1 | TT__BY_ROW(1 | 2) | TT__SUMS | TT__MOVES | \
      TT__RESIDUAL(1)) /* a, b -> a + b */ \
    X(ADD_ROW, "add_row", 2, 1, TT__INPLACE0 | TT__BY_ROW(1)) /* a, row -> a + row, in every row */ \
    X(SUM_ROWS, "sum_rows", 1, 1, 0) /* dy -> (1, D), the sum of all rows */ \
    X(MUL, "mul", 2, 1, TT__INPLACE0 | TT__INPLACE1 | TT__BY_ROW(1 | 2) | TT__AGAIN) /* a, b -> a b */ \
    X(SWIGLU, "swiglu", 2, 1, TT__INPLACE0 | TT__INPLACE1 | TT__BY_ROW(1 | 2) | TT__AGAIN) \
        /* gate, up -> silu(gate) up */ \
    X(SWIGLU_BACKWARD, "swiglu_backward", 3, 2, TT__INPLACE0 | TT__INPLACE1) \
        /* dy, gate, up -> [dgate], [dup] */ \
    X(ROTARY, "rotary", 2, 1, TT__INPLACE0 | TT__AGAIN) /* x, positions -> y */ \
    X(SCALE, "scale", 1, 1, TT__INPLACE0 | TT__BY_ROW(1) | TT__MOVES) /* x -> s x */ \
    X(DROPOUT, "dropout", 3, 2, TT__INPLACE0 | TT__INPLACE1 | TT__RANDOM | TT__WITH_RUN | TT__MOVES | \
      TT__BY_ROW(1 | 2) | TT__RESIDUAL(1) | TT__NUMBERS(2) | TT__COLUMN_SUMS) \
        /* x, [residual], [row numbers] -> y, [column sums] */ \
    X(ATTENTION, "attention", 5, 2, TT__RANDOM | TT__WITH_RUN | TT__BY_ROW(1) | TT__NUMBERS(4) | \
      TT__AGAIN_ATTENTION) /* q, k, v, seq_start, [row numbers] -> out, log-sum-exp */ \
    X(GATHER_ROWS, "gather_rows", 2, 1, TT__GATHERS | TT__MOVES) /* x, index -> y */ \
    X(MEAN_POOL, "mean_pool", 2, 1, TT__BEGINS) /* x, seq_start -> y */ \
    X(SET_ROWS, "set_rows", 3, 1, TT__INPLACE0) /* x, index, row -> y */ \
    X(STORE_ROWS, "store_rows", 2, 1, TT__RMW) /* x, index -> cache */ \
    X(PATCHES, "patches", 3, 1, TT__AGAIN_KEPT) /* pixels, positions, seq_start -> y */ \
    X(CROSS_ENTROPY, "cross_entropy", 3, 3, TT__LOSS) /* logits, targets, [weights] -> loss, lse, counts */ \
    X(SOFT_CROSS_ENTROPY, "soft_cross_entropy", 3, 3, TT__LOSS) \
        /* logits, targets, [weights] -> loss, (lse, sum of targets), counts */ \
    X(MEAN_SQUARED_ERROR, "mean_squared_error", 3, 3, TT__LOSS) \
        /* x, target, [weights] -> loss, -, counts */ \
    X(CAST, "cast", 1, 1, TT__CASTS | TT__AGAIN_KEPT) /* x -> x in another dtype */ \
    X(FILL, "fill", 1, 1, 0) /* [loss scale] -> constant */ \
    X(LINEAR_DX, "linear_dx", 6, 2, TT__PRODUCT | TT__WEIGHT(1) | TT__COLUMN_SUMS) \
        /* dy, w, [saved by act], -, [1/scale of dy], [of w] -> dx act', [column sums of dx] */ \
    X(LINEAR_DW, "linear_dw", 6, 2, TT__PRODUCT) /* dy, x, -, -, [1/scale of dy], [of x] -> dw, [db] */ \
    X(QUANTIZE, "quantize", 2, 4, 0) \
        /* x, [its history] -> [fp8 of x], [its transpose], 1/scale, [its largest] */ \
    X(FP8_HISTORY, "fp8_history", 1, 2, TT__RMW) /* largest of a step -> history, largest */ \
    X(EMBEDDING_BACKWARD, "embedding_backward", 2, 1, 0) /* ids, dy -> dtable */ \
    X(LAYERNORM_BACKWARD, "layernorm_backward", 4, 4, TT__INPLACE0 | TT__COLUMN_SUMS) \
        /* dy, x, w, stats -> [dx], [dw], [db], [column sums of dx] */ \
    X(ACTIVATION_BACKWARD, "activation_backward", 2, 2, TT__INPLACE0 | TT__INPLACE1 | TT__COLUMN_SUMS) \
        /* dy, saved -> dx, [column sums of dx] */ \
    X(ATTENTION_BACKWARD, "attention_backward", 8, 6, TT__WITH_RUN | TT__COLUMN_SUMS) \
        /* dout, q, k, v, seq_start, out, lse, [row numbers] -> dq, dk, dv, [column sums of each] */ \
    X(GATHER_ROWS_BACKWARD, "gather_rows_backward", 2, 1, 0) /* dy, index -> dx */ \
    X(MEAN_POOL_BACKWARD, "mean_pool_backward", 2, 1, 0) /* dy, seq_start -> dx */ \
    X(SET_ROWS_BACKWARD, "set_rows_backward", 2, 2, TT__INPLACE0) /* dy, index -> [dx], [drow] */ \
    X(CROSS_ENTROPY_BACKWARD, "cross_entropy_backward", 6, 1, TT__INPLACE1 | TT__WITH_RUN | TT__MEAN) \
        /* dloss, logits, targets, [weights], lse, counts -> dlogits */ \
    X(SOFT_CROSS_ENTROPY_BACKWARD, "soft_cross_entropy_backward", 6, 1, \
      TT__INPLACE1 | TT__WITH_RUN | TT__MEAN) \
        /* dloss, logits, targets, [weights], (lse, sum of targets), counts -> dlogits */ \
    X(MEAN_SQUARED_ERROR_BACKWARD, "mean_squared_error_backward", 5, 1, \
      TT__INPLACE1 | TT__WITH_RUN | TT__MEAN) /* dloss, x, target, [weights], counts -> dx */ \
    X(LINEAR_CROSS_ENTROPY, "linear_cross_entropy", 6, 5, \
      TT__LOSS | TT__WITH_RUN | TT__MEAN | TT__WEIGHT(3)) \
        /* x, targets, [weights], w, [b], [dloss] -> loss, [dx], counts, [dw], [db] */ \
    X(SUM_SQUARES, "sum_squares", 1, 1, 0) /* g -> sum of g^2 */ \
    X(ADD_COUNTS, "add_counts", 1, 1, 0) /* a loss's counts -> totals */ \
    X(CLIP, "clip", 3, 1, TT__WITH_RUN | TT__MEAN) \
        /* sums of squares, totals, [loss scale] -> (norm, factor) */ \
    X(SGD, "sgd", 2, 2, TT__RMW | TT__RANDOM | TT__WITH_RUN) /* g, factor -> p, [momentum] */ \
    X(ADAM, "adam", 2, 3, TT__RMW | TT__RANDOM | TT__WITH_RUN) /* g, factor -> p, m, v */ \
    X(LOSS_SCALE, "loss_scale", 2, 1, TT__RMW) /* (norm, factor), totals -> loss scale */ \
    X(COPY, "copy", 1, 1, TT__ANY_SPACE) /* x -> x, from one memory to another */ \
    X(WAIT, "wait", 8, 0, TT__ANY_SPACE | TT__WAITS) /* all operands of a stream's work, its result first */ \
    X(ALL_REDUCE, "all_reduce", 1, 1, TT__RMW | TT__INPLACE0 | TT__MOVES) \
        /* x -> y, all members' x together */ \
    X(REDUCE_SCATTER, "reduce_scatter", 1, 1, TT__RMW | TT__MOVES) \
        /* x -> its piece of all members' x together */ \
    X(ALL_GATHER, "all_gather", 1, 1, TT__RMW | TT__MOVES | TT__AGAIN) /* piece -> y, all members' pieces */ \
    X(BROADCAST, "broadcast", 1, 1, TT__RMW | TT__INPLACE0) /* x -> y, member 0's x */ \
    X(SEND, "send", 1, 0, 0) /* x, for the RECV that follows */ \
    X(RECV, "recv", 1, 1, TT__RMW | TT__INPLACE0) /* x -> y of member move.to, the x of member move.from */ \
    X(SUM_SLOTS, "sum_slots", 1, 1, TT__RMW) /* x -> y, all slots of x together */ \
    X(CHUNK_SQUARES, "chunk_squares", 1, 1, 0) /* g -> sum of g^2 of each TT__CHUNK elements */ \
    X(FOLD_SQUARES, "fold_squares", 1, 1, 0) /* of the chunks of a g -> sum of g^2 */ \
    X(MEAN_LOSS, "mean_loss", 1, 1, TT__RMW) /* a loss's counts, of all ranks -> loss */

enum {
#define TT__ENUM(OP, name, inputs, outputs, flags) TT__OP_##OP,
    TT__OPS(TT__ENUM)
#undef TT__ENUM
    TT__OP_COUNT
};

/* What random numbers are for: a part of their streams' keys. */
enum {
    TT__RANDOM_INIT = 1, TT__RANDOM_DROPOUT, TT__RANDOM_ROUNDING, TT__RANDOM_SHUFFLE, TT__RANDOM_IMAGE,
    TT__RANDOM_TOKEN
};

/* The step's settings, which the host writes before it runs a segment. */
typedef struct tt__run {
    uint64_t seed;
    int64_t step, micro;    /* optimizer steps done before; micro-batch of this step                        */
    float lr;
    double loss_norm;       /* divides gradients before the number of targets is known, to accumulate       */
} tt__run;

/* What a step finds, which the host reads. Instructions read and write its three parts. */
typedef struct tt__totals { double loss, targets, correct; } tt__totals; /* of its micro-batches so far     */
typedef struct tt__scale {
    double scale;               /* of the gradient of the loss: a power of two                              */
    double good_steps, skipped; /* steps since it changed; steps without an update                          */
} tt__scale;
#define TT__LOSS_SCALE_MOST 0x1p40
typedef struct tt__clipped { /* not finite: no parameter was changed; what each gradient was multiplied by  */
    float norm, factor;
} tt__clipped;
typedef struct tt__results { tt__totals totals; tt__scale scale; tt__clipped clipped; } tt__results;

typedef struct tt__device tt__device; /* one that is open; what it is only its backend knows                */

typedef struct tt__launch {
    tt__device *device;     /* that it runs on; of the CPU, a tt__cpu. The same in all of a call of launch  */
    const tt_tape *tape;
    const tt__instr *instr;
    tt__mat in[TT__MAX_IN], out[TT__MAX_OUT]; /* with the actual number of rows; data NULL: there is none   */
    bool add[TT__MAX_OUT];
    bool tf32;              /* operands of fp32 matrix products may be rounded to TF32                      */
    bool tuned;             /* products are made in the ways that tune has found to be the fastest          */
    const uint16_t *lists;  /* of block-sparse attention: (heads of all ranks, list_rows, listed), in the
                               host's memory. NULL: block 0 is listed                                       */
    /* Where the random numbers of an update begin: that of out[0]'s first element in the whole tensor, a
       multiple of 8. Of a part of a tensor split over the tensor ranks, after the numbers of the parts of the
       ranks before: that is the same where rows are split, if a part has a multiple of 8 elements. */
    int64_t first;
    /* Of the first operand or result that is split over the tensor ranks: numbers in the whole tensor of its
       first row and column, and how many rows that has; 0: none is split. Random numbers are those of
       elements of whole tensors. */
    int64_t first_row, first_col, whole_rows;
    /* A collective: TT__REDUCE_PHASE or TT__SPREAD_PHASE; how many members there are, which of them this is;
       the first `present` have something to reduce; of each member, operand 0 and result 0. */
    int phase, members, me, present;
    const tt__mat *peer_in, *peer_out;
    /* Members whose memory this one's kernels cannot load from: what they need of member k is in staged[k],
       memory of allocate_host that tt__backend.stage filled (NULL: it can), and of each piece only elements
       [from, from + most) are worked on. staged NULL: all elements, from peer_in and peer_out. */
    void *const *staged;
    int64_t from, most;
    void *workspace;        /* as many bytes as the kind's workspace() asks for at capacity                 */
    void *resident;         /* as many as the kind's `resident`; any instruction may use them               */
} tt__launch;

/* The step's settings in the device's memory; NULL: the instruction needs none. */
#define TT__RUN_OF(l) ((const tt__run *)(l)->in[TT__RUN_IN].data)

/* linear_cross_entropy works on so many rows at a time: enough that reading and writing the weight's gradient
   each time is little beside the product. Their logits are f32; their gradients take the same place. */
#ifndef TT__LOSS_CHUNK /* tests make it smaller, and the next */
#define TT__LOSS_CHUNK 512
#endif
/* On a GPU more: to read and write GPT-2's weight gradient takes an H200 as long as its product with some 700
   rows (4.3 TB/s, 788 TFLOP/s). */
#ifndef TT__CUDA_LOSS_CHUNK
#define TT__CUDA_LOSS_CHUNK 2048
#endif

/* CUDA's resident workspace: what cuBLAS recommends on Hopper (its documentation, cublasSetWorkspace), less a
   page for what programs keep; with less it leaves its faster kernels out. Instructions run one after
   another, so others use it too: partial sums of biases, norms, losses and squares. */
#ifndef TT__CUDA_RESIDENT /* tests make it smaller */
#define TT__CUDA_RESIDENT (((size_t)32 << 20) - 4096)
#endif
/* Storages, and the parts of workspaces, begin at multiples of 256 bytes, as cudaMalloc's memory does, which
   is enough for any vector load. */
#define TT__CUDA_ALIGN 256

/* The least multiple of a unit, a power of two, that is not less than n. */
static inline size_t tt__align_to(size_t n, size_t unit) { return (n + unit - 1) & ~(unit - 1); }

/* fp8 (see QUANTIZE): a tensor is multiplied by the largest power of two with which the largest magnitude of
   so many steps before, times 2^margin, is within range. So what grows up to twofold from one step to the
   next does not saturate, and a loss scale may double. A row of the history: the largest of all, 0 where none
   is known, and that of each of these steps, the last first. */
enum { TT__FP8_STEPS = 16, TT__FP8_MARGIN = 1 };
#define TT__FP8_MOST(e5m2) ((e5m2) ? 57344.0f : 448.0f) /* the largest finite number of E5M2 or E4M3 */

/* Rounds of Philox where a number is drawn for each element: dropout and stochastic rounding. */
#define TT__DRAW_ROUNDS 7
/* Dropout: of 16 random bits, those below this drop. */
#define TT__DROP_THRESHOLD(p) ((int32_t)((p) * 65536.0f + 0.5f))
/* Of attention's weights: of 8 random bits; a rate above 0 drops some. */
#define TT__ATTENTION_DROP(p) ((p) * 256.0f < 0.5f ? (p) > 0 : (int32_t)((p) * 256.0f + 0.5f))

/* A draw of Philox is 16 numbers of 8 bits: bit b of number j is bit 16 (b / 4) + j of word b % 4. So all are
   compared with the threshold at once, from bit 0 on. Up to a bit a number is at least as large where it was
   so up to the one before and has this bit, if the threshold has it; else where it was so or has it. Of a
   word x that is kept = (x & kept) | (either & (x | kept)): of the lower halves first, then of the higher. */
static inline void tt__attention_either(int32_t drop, uint32_t either[4])
{
    for (int b = 0; b < 4; b++)
        either[b] = (drop >> b & 1 ? 0 : 0xffffu) | (drop >> (b + 4) & 1 ? 0 : 0xffff0000u);
}

/* Rotary positions: the frequencies of all pairs, by transformers' formulas (modeling_rope_utils.py). */
enum { TT__MOST_PAIRS = 256 };
static inline int tt__rotary_pairs(const tt_rotary_options *o) { return (o->size + 1) / 2; }

static inline void tt__rotary_frequencies(const tt_rotary_options *o, double frequency[TT__MOST_PAIRS])
{
    const double turn = 6.283185307179586, size = o->size, log_base = log(o->base);
    /* YARN: pairs that turn `high` and `low` times within the original positions. */
    double from = floor(size * log(o->original / (o->high * turn)) / (2 * log_base));
    double to = ceil(size * log(o->original / (o->low * turn)) / (2 * log_base));
    from = from > 0 ? from : 0;
    to = to < size - 1 ? to : size - 1;
    if (!(from < to)) to = from + 0.001;
    for (int j = 0; j < tt__rotary_pairs(o); j++) {
        const double plain = pow(o->base, -2 * j / size), turns = o->original * plain / turn;
        double part = 1; /* of the frequency that is divided by the factor */
        if (o->scaling == TT_ROTARY_PLAIN) part = 0;
        if (o->scaling == TT_ROTARY_LLAMA3) part = (o->high - turns) / (o->high - o->low);
        if (o->scaling == TT_ROTARY_YARN) part = (j - from) / (to - from);
        part = part < 0 ? 0 : part > 1 ? 1 : part;
        frequency[j] = plain * (1 - part) + plain / o->factor * part;
    }
}

/* Where attention or its backward has its operands, k and v after q. */
typedef struct tt__attention_operands { int q, starts, numbers; bool backward; } tt__attention_operands;

static inline tt__attention_operands tt__attention_of(bool backward)
{
    const tt__attention_operands of_forward = {0, 3, 4, false}, of_backward = {1, 4, 7, true};
    return backward ? of_backward : of_forward;
}

/* Numbers in tt__launch.lists. */
static inline int64_t tt__listed_blocks(const tt__attr *a)
{
    int64_t n = a->lists ? a->list_heads : 0;
    n *= a->list_rows;
    return n * a->listed;
}

/* The backward of attention on CUDA draws which weights dropout keeps for dq, and has them as bits for dk and
   dv: TT__CUDA_ATTENTION_BITS bytes for 64 queries and 64 keys of a sequence and a head. The bytes of all, of
   so many rows, where that is no more than q has, so that memory grows by the rows alone; else 0, and they
   are drawn again, as for sequences of up to 256 rows, for which mma.sync takes one pass. */
#define TT__CUDA_ATTENTION_BITS 512
static inline int64_t tt__cuda_attention_bits(const tt__attr *a, const tt__mat *q, int64_t seqs)
{
    const int64_t longest = a->max_length && a->max_length < q->rows ? a->max_length : q->rows;
    const int64_t across = (longest + 63) / 64, tiles = q->rows / 64 + seqs;
    const bool plain = !a->window && !a->alibi_heads && !a->block && q->cols / a->heads <= 64;
    if (!(a->dropout > 0) || !plain || q->dtype == TT_F32 || longest <= 256) return 0;
    const int64_t pairs = a->causal ? tiles * (across + 1) / 2 : tiles * across;
    const int64_t bytes = pairs * a->heads * TT__CUDA_ATTENTION_BITS;
    return bytes <= q->rows * q->cols * 2 ? bytes : 0; /* 16 bits each */
}

/* cuBLASLt has only slow kernels for products one of whose sizes along rows of memory, or the distance of two
   rows, is not a multiple of 8 elements. The operands of such a product are copied, with zeros up to
   multiples of 8, at most TT__CUDA_LOSS_CHUNK rows of activations at a time; its result is f32 beside them.
   */
static inline bool tt__cuda_even(const tt__mat *m) { return m->cols % 8 == 0 && m->ld % 8 == 0; }

static inline int64_t tt__cuda_copy_bytes(int64_t rows, int64_t cols, tt_dtype dtype)
{
    const int64_t bytes = rows * ((cols + 7) / 8 * 8) * (dtype == TT_F32 ? 4 : 2);
    return (bytes + TT__CUDA_ALIGN - 1) / TT__CUDA_ALIGN * TT__CUDA_ALIGN;
}

/* Scratch for these copies, in bytes, of a product of two of x (rows, in), w (out, in) and y (rows, out),
   which gives the third, `result`. 0: all are even. */
static inline int64_t tt__cuda_padded_bytes(const tt__mat *x, const tt__mat *w, const tt__mat *y,
                                            const tt__mat *result)
{
    const int64_t rows = x->rows < TT__CUDA_LOSS_CHUNK ? x->rows : TT__CUDA_LOSS_CHUNK;
    const int64_t out = (w->rows + 7) / 8 * 8;
    if (tt__cuda_even(x) && tt__cuda_even(w) && tt__cuda_even(y)) return 0;
    return tt__cuda_copy_bytes(rows, x->cols, result == x ? TT_F32 : x->dtype) +
           tt__cuda_copy_bytes(out, w->cols, result == w ? TT_F32 : w->dtype) +
           tt__cuda_copy_bytes(rows, y->cols, result == y ? TT_F32 : y->dtype);
}

/* The backward by warpgroups leaves dq of sequences of more than 256 rows in parts in f32, which are added up:
   each 256 keys of a sequence have a slot, up to TT__CUDA_ATTENTION_SLOTS, and longer sequences go through
   the slots again. Bytes of the slots. */
#define TT__CUDA_ATTENTION_SLOTS 4
static inline int64_t tt__cuda_attention_parts(const tt__attr *a, const tt__mat *q)
{
    const int64_t longest = a->max_length && a->max_length < q->rows ? a->max_length : q->rows;
    const int64_t head = q->cols / a->heads, spans = (longest + 255) / 256;
    const int64_t slots = spans < TT__CUDA_ATTENTION_SLOTS ? spans : TT__CUDA_ATTENTION_SLOTS;
    const bool plain = !a->window && !a->alibi_heads && !a->block && head > 32 && head <= 64;
    if (!plain || q->dtype == TT_F32 || longest <= 256) return 0;
    return slots * q->rows * q->cols * 4;
}

/* ALiBi: log2 of the slope of head `head` of so many. Of n heads, a power of two, it is -8 (head + 1) / n; of
   another number, the heads after the largest power of two n have each second slope of 2 n heads. */
static inline double tt__alibi_exponent(int head, int heads)
{
    int n = 1;
    while (2 * n <= heads) n *= 2;
    return head < n ? -8.0 * (head + 1) / n : -4.0 * (2 * (head - n) + 1) / n;
}
