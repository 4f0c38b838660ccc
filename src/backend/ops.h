#pragma once
#include "../api/context.h"
#include "../api/params.h"
#include "../api/tape.h"
#include "launch.h"

/* ---------------------------------------------------------------------------------------------- the op table
   Table of the ops: X(OP, name, inputs, outputs, flags); inputs and outputs are the largest numbers of
   operands and results. Below the row of an op is the row of its backward, if that has kernels of its own.
   Other parts of an op carry its name: tt__rules_OP (src/ops/), TT__K(run_OP) (cpu), TT__RUN_BY(OP, ...)
   (cuda), and the case in the generic tests. The comment of a row lists the operands and, after ->, the
   results, in the order of their numbers. A name in [brackets] may be absent; "unused" is a number that the
   op does not use. The flags: */
#define TT__NAMED_BY_ACT 0x1 /* errors and printed programs call the op by its activation                   */
#define TT__INPLACE0 0x2     /* out[0] may take in[0]'s place if in[0] is dead after this instruction       */
#define TT__INPLACE1 0x4     /* out[0] may take in[1]'s place if in[1] is dead after this instruction       */
#define TT__RMW 0x8          /* the op also reads its outputs, as optimizer steps do                        */
#define TT__RANDOM 0x10      /* the op draws random numbers */
#define TT__WITH_RUN 0x20    /* operand TT__RUN_IN holds the step's settings, for updates or dropout */
#define TT__MEAN 0x40        /* with TT__WITH_RUN: the op reads the settings only in programs that accumulate,
                                because a step's number of targets is unknown while its micro-batches run */
#define TT__ANY_SPACE 0x80   /* the op's operands may be in the host's memory                               */
#define TT__WAITS 0x100      /* the op is WAIT: its operands are all operands and results of the work that it
                                waits for */
#define TT__PRODUCT 0x200    /* out[0] is a matrix product, which may be in fp8 (TT__E4M3)                  */
#define TT__ACTIVATES 0x400  /* out[0] may be an activation (attr.act) of out[1], if out[1] is present      */
#define TT__LOSS 0x800       /* out[0] is the mean loss over the targets, in[TT__LOSS_TARGETS];
                                out[TT__LOSS_COUNTS] has the loss's counts */
#define TT__GATHERS 0x1000   /* row r of out[0] is row in[1][r] of in[0]                                    */
#define TT__CASTS 0x2000     /* out[0] is in[0] in another dtype or in few bits (attr.rounding)             */
#define TT__SAVES1 0x4000    /* only a backward reads out[1]                                                */
#define TT__SUMS 0x8000      /* out[0] is in[0] + in[1], of equal shape                                     */
#define TT__MOVES 0x10000    /* out[0] is in[0], a part of in[0], in[0] times a factor, or a sum with in[0] */
#define TT__BEGINS 0x20000   /* out[0] may begin a residual stream                                          */
/* The backward may recompute out[0] instead of saving it. CHEAP: if in[0], or a shard of in[0], is saved
   anyway. CHEAP_ATTENTION: on the condition of CHEAP, if recompute is "attention". CHEAP_KEPT: if in[0] is an
   input or a parameter. */
#define TT__CHEAP 0x40000
#define TT__CHEAP_ATTENTION 0x80000
#define TT__CHEAP_KEPT (TT__CHEAP | TT__CHEAP_ATTENTION)
/* Row r of out[0] depends on row r alone of each operand in `slots`. Bit k of `slots` stands for operand k, 0
   to 3. */
#define TT__BY_ROW(slots) ((slots) << 20)
/* Each of the next three flags holds the number of an operand; 0: none. WEIGHT: a matrix that a product may
   round while reading it (attr.narrow). RESIDUAL: an operand that is added to everything else in out[0].
   NUMBERS: i32 (rows, 1), the number in the batch of each row of out[0]; present only if out[0] lacks some of
   the batch's rows (tt__pass_rows). */
#define TT__WEIGHT(operand) ((operand) << 24)
#define TT__RESIDUAL(operand) ((operand) << 26)
#define TT__NUMBERS(operand) ((operand) << 28)
/* The last output, if present, is (1, columns of out[0]): the sum of out[0]'s rows. Attention's backward has
   three such outputs: the sums of out[0], out[1] and out[2]. Only instructions of the backward have these
   outputs, and only if the device's memory is not the host's: see tt__fuse_column_sums. */
#define TT__COLUMN_SUMS 0x80000000u

/* The numbers of three operands of losses, and the number of the output that has a loss's counts. TOTAL: the
   operand that tt_loss_total sets. */
enum { TT__LOSS_TARGETS = 1, TT__LOSS_WEIGHTS = 2, TT__LOSS_TOTAL = 6, TT__LOSS_COUNTS = 2 };

#define TT__OPS(X) \
    X(LINEAR, "linear", 6, 2, TT__BY_ROW(1 | 8) | TT__PRODUCT | TT__ACTIVATES | TT__SAVES1 | TT__BEGINS | \
      TT__WEIGHT(1) | TT__RESIDUAL(3)) \
        /* x, w, [b], [residual], [1/scale of x], [1/scale of w] -> y, [pre-activation] */ \
    X(LINEAR_DX, "linear_dx", 6, 2, TT__PRODUCT | TT__WEIGHT(1) | TT__COLUMN_SUMS) \
        /* dy, w, [saved], unused, [1/scale of dy, w] -> dx * act'(saved), [column sums of dx] */ \
    X(LINEAR_DW, "linear_dw", 6, 2, TT__PRODUCT) /* dy, x, 2 unused, [1/scale of dy, x] -> dw, [db] */ \
    X(MATMUL, "matmul", 2, 1, TT__BY_ROW(1) | TT__PRODUCT) /* a, b -> a b^T or a b */ \
    X(MATMUL_DB, "matmul_db", 2, 1, TT__PRODUCT) /* a, b -> a^T b, summed over the actual rows only */ \
    X(EMBEDDING, "embedding", 2, 1, TT__BEGINS) /* ids, table -> y */ \
    X(EMBEDDING_BACKWARD, "embedding_backward", 2, 1, 0) /* ids, dy -> dtable */ \
    X(LAYERNORM, "layernorm", 3, 2, TT__INPLACE0 | TT__BY_ROW(1) | TT__SAVES1 | TT__CHEAP) \
        /* x, w, [b] -> y, (mean, 1/std) */ \
    X(LAYERNORM_BACKWARD, "layernorm_backward", 4, 4, TT__INPLACE0 | TT__COLUMN_SUMS) \
        /* dy, x, w, stats -> [dx], [dw], [db], [column sums of dx] */ \
    X(RMSNORM, "rmsnorm", 2, 2, TT__INPLACE0 | TT__BY_ROW(1) | TT__SAVES1 | TT__CHEAP) \
        /* x, w -> y, 1/rms of each group of columns */ \
    X(RMSNORM_BACKWARD, "rmsnorm_backward", 4, 3, TT__INPLACE0 | TT__COLUMN_SUMS) \
        /* dy, x, w, 1/rms -> [dx], [dw], [column sums of dx] */ \
    X(SOFTMAX, "softmax", 1, 1, TT__INPLACE0 | TT__BY_ROW(1) | TT__CHEAP) /* x -> y */ \
    X(SOFTMAX_BACKWARD, "softmax_backward", 2, 1, TT__INPLACE0 | TT__INPLACE1) /* dy, y -> dx */ \
    X(NORMALIZE, "normalize", 1, 2, TT__INPLACE0 | TT__BY_ROW(1) | TT__SAVES1 | TT__CHEAP) \
        /* x -> y, 1/norm */ \
    X(NORMALIZE_BACKWARD, "normalize_backward", 3, 1, TT__INPLACE0 | TT__INPLACE1) /* dy, y, 1/norm -> dx */ \
    X(ACTIVATION, "activation", 1, 1, TT__NAMED_BY_ACT | TT__INPLACE0 | TT__BY_ROW(1) | TT__CHEAP) \
        /* x -> act(x) */ \
    X(ACTIVATION_BACKWARD, "activation_backward", 2, 2, TT__INPLACE0 | TT__INPLACE1 | TT__COLUMN_SUMS) \
        /* dy, saved -> dx, [column sums of dx] */ \
    X(ADD, "add", 2, 1, TT__INPLACE0 | TT__INPLACE1 | TT__BY_ROW(1 | 2) | TT__SUMS | TT__MOVES | \
      TT__RESIDUAL(1)) /* a, b -> a + b */ \
    X(ADD_ROW, "add_row", 2, 1, TT__INPLACE0 | TT__BY_ROW(1)) /* a, row -> a + row, in every row */ \
    X(SUM_ROWS, "sum_rows", 1, 1, 0) /* dy -> (1, D), the sum of all rows */ \
    X(MUL, "mul", 2, 1, TT__INPLACE0 | TT__INPLACE1 | TT__BY_ROW(1 | 2) | TT__CHEAP) /* a, b -> a * b */ \
    X(MUL_BROADCAST, "mul_broadcast", 2, 1, TT__INPLACE0 | TT__CHEAP) \
        /* a, b (a column, a row or one number) -> a * b */ \
    X(ROW_DOTS, "row_dots", 2, 1, 0) /* a, b -> (rows, 1), the sum of a * b over each row */ \
    X(SWIGLU, "swiglu", 2, 1, TT__INPLACE0 | TT__INPLACE1 | TT__BY_ROW(1 | 2) | TT__CHEAP) \
        /* gate, up -> silu(gate) * up */ \
    X(SWIGLU_BACKWARD, "swiglu_backward", 3, 2, TT__INPLACE0 | TT__INPLACE1) \
        /* dy, gate, up -> [dgate], [dup] */ \
    X(ROTARY, "rotary", 2, 1, TT__INPLACE0 | TT__CHEAP) /* x, positions -> y */ \
    X(SCALE, "scale", 1, 1, TT__INPLACE0 | TT__BY_ROW(1) | TT__MOVES) /* x -> s * x */ \
    X(DROPOUT, "dropout", 3, 2, TT__INPLACE0 | TT__INPLACE1 | TT__RANDOM | TT__WITH_RUN | TT__MOVES | \
      TT__BY_ROW(1 | 2) | TT__RESIDUAL(1) | TT__NUMBERS(2) | TT__COLUMN_SUMS) \
        /* x, [residual], [row numbers] -> y, [column sums] */ \
    X(ATTENTION, "attention", 5, 2, TT__RANDOM | TT__WITH_RUN | TT__BY_ROW(1) | TT__NUMBERS(4) | \
      TT__CHEAP_ATTENTION) /* q, k, v, seq_start, [row numbers] -> out, log-sum-exp */ \
    X(CUSTOM, "custom", 6, 1, 0) /* 1 to TT_CUSTOM_INPUTS inputs -> y */ \
    X(CUSTOM_BACKWARD, "custom_backward", 8, 6, 0) /* dy, y, the inputs -> [gradient of each input] */ \
    X(ATTENTION_BACKWARD, "attention_backward", 8, 6, TT__WITH_RUN | TT__COLUMN_SUMS) \
        /* dout, q, k, v, seq_start, out, lse, [row numbers] -> dq, dk, dv, [column sums of each] */ \
    X(GATHER_ROWS, "gather_rows", 2, 1, TT__GATHERS | TT__MOVES) /* x, index -> y */ \
    X(GATHER_ROWS_BACKWARD, "gather_rows_backward", 2, 1, 0) /* dy, index -> dx */ \
    X(MEAN_POOL, "mean_pool", 2, 1, TT__BEGINS) /* x, seq_start -> y, the mean or sum of each sequence */ \
    X(MEAN_POOL_BACKWARD, "mean_pool_backward", 2, 1, 0) /* dy, seq_start -> dx */ \
    X(SET_ROWS, "set_rows", 3, 1, TT__INPLACE0) /* x, index, row -> y */ \
    X(SET_ROWS_BACKWARD, "set_rows_backward", 2, 2, TT__INPLACE0) /* dy, index -> [dx], [drow] */ \
    X(STORE_ROWS, "store_rows", 2, 1, TT__RMW) /* x, index -> cache */ \
    X(PATCHES, "patches", 3, 1, TT__CHEAP_KEPT) /* pixels, positions, seq_start -> y */ \
    X(CROSS_ENTROPY, "cross_entropy", 7, 3, TT__LOSS) \
        /* logits, targets, [weights], 3 unused, [total] -> loss, lse, counts */ \
    X(CROSS_ENTROPY_BACKWARD, "cross_entropy_backward", 6, 1, TT__INPLACE1 | TT__WITH_RUN | TT__MEAN) \
        /* dloss, logits, targets, [weights], lse, counts -> dlogits */ \
    X(TOKEN_LOSSES, "token_losses", 2, 2, 0) \
        /* logits, targets -> loss of each row, lse */ \
    X(TOKEN_LOSSES_BACKWARD, "token_losses_backward", 5, 1, TT__INPLACE1) \
        /* unused, logits, targets, gradient of each row's loss, lse -> dlogits */ \
    X(SOFT_CROSS_ENTROPY, "soft_cross_entropy", 7, 3, TT__LOSS) \
        /* logits, targets, [weights], 3 unused, [total] -> loss, (lse, sum of targets), counts */ \
    X(SOFT_CROSS_ENTROPY_BACKWARD, "soft_cross_entropy_backward", 6, 1, \
      TT__INPLACE1 | TT__WITH_RUN | TT__MEAN) \
        /* dloss, logits, targets, [weights], (lse, sum of targets), counts -> dlogits */ \
    X(MEAN_SQUARED_ERROR, "mean_squared_error", 7, 3, TT__LOSS) \
        /* x, target, [weights], 3 unused, [total] -> loss, unused, counts */ \
    X(MEAN_SQUARED_ERROR_BACKWARD, "mean_squared_error_backward", 5, 1, \
      TT__INPLACE1 | TT__WITH_RUN | TT__MEAN) /* dloss, x, target, [weights], counts -> dx */ \
    X(SIGMOID_CROSS_ENTROPY, "sigmoid_cross_entropy", 7, 3, TT__LOSS) \
        /* logits, targets, [weights], [positive weights], 2 unused, [total] -> loss, unused, counts */ \
    X(SIGMOID_CROSS_ENTROPY_BACKWARD, "sigmoid_cross_entropy_backward", 6, 1, \
      TT__INPLACE1 | TT__WITH_RUN | TT__MEAN) \
        /* dloss, logits, targets, [weights], [positive weights], counts -> dlogits */ \
    X(CAST, "cast", 1, 1, TT__CASTS | TT__CHEAP_KEPT) /* x -> x in another dtype */ \
    X(ROUND, "round", 1, 1, TT__CASTS | TT__CHEAP_KEPT) /* w -> w in few bits (attr.rounding) */ \
    X(FILL, "fill", 1, 1, 0) /* [loss scale] -> constant */ \
    X(QUANTIZE, "quantize", 2, 4, 0) \
        /* x, [history of x] -> [fp8 of x], [fp8 of x^T], 1/scale, [largest |x|] */ \
    X(FP8_HISTORY, "fp8_history", 1, 2, TT__RMW) /* magnitudes of a step -> history, magnitudes set to 0 */ \
    X(LINEAR_CROSS_ENTROPY, "linear_cross_entropy", 6, 5, \
      TT__LOSS | TT__WITH_RUN | TT__MEAN | TT__WEIGHT(3)) \
        /* x, targets, [weights], w, [b], [dloss] -> loss, [dx], counts, [dw], [db] */ \
    X(LINEAR_TOKEN_LOSSES, "linear_token_losses", 5, 5, TT__WEIGHT(3)) \
        /* x, targets, [gradient of the rows' losses], w, [b] -> [rows' losses], [dx], unused, [dw], [db] */ \
    X(SUM_SQUARES, "sum_squares", 1, 1, 0) /* g -> sum of g^2 */ \
    X(ADD_COUNTS, "add_counts", 1, 1, 0) /* a loss's counts -> tt__totals of the step */ \
    X(CLIP, "clip", 3, 1, TT__WITH_RUN | TT__MEAN) \
        /* sums of squares, totals, [loss scale] -> (norm, factor) */ \
    X(SGD, "sgd", 2, 4, TT__RMW | TT__RANDOM | TT__WITH_RUN) \
        /* g, factor -> p, [momentum], unused, [scales of momentum] */ \
    X(ADAM, "adam", 2, 5, TT__RMW | TT__RANDOM | TT__WITH_RUN) \
        /* g, factor -> p, m, v, [scales of m], [scales of v] */ \
    X(LION, "lion", 2, 4, TT__RMW | TT__RANDOM | TT__WITH_RUN) \
        /* g, factor -> p, m, unused, [scales of m] */ \
    X(MUON_MOMENTUM, "muon_momentum", 2, 4, TT__RMW | TT__RANDOM | TT__WITH_RUN) \
        /* g, factor -> update, momentum, unused, [scales of momentum] */ \
    X(UNIT, "unit", 2, 1, TT__INPLACE0) /* x, sum of x^2 -> x divided by the root of the sum */ \
    X(MUON, "muon", 2, 1, TT__RMW | TT__RANDOM | TT__WITH_RUN) /* update, factor -> p */ \
    X(ADAFACTOR, "adafactor", 2, 3, TT__RMW | TT__RANDOM | TT__WITH_RUN) \
        /* g, factor -> p, [means of g^2 in rows], means of g^2 in columns */ \
    X(CUSTOM_UPDATE, "custom_update", 2, 3, TT__RMW | TT__WITH_RUN) /* g, factor -> p, [state], [state] */ \
    X(EMA, "ema", 2, 1, TT__RMW | TT__WITH_RUN) /* p, (norm, factor) -> average */ \
    X(MOVEMENT, "movement", 3, 1, TT__RMW) /* g, (norm, factor), p -> movement */ \
    X(PRUNE, "prune", 2, 2, TT__RMW | TT__WITH_RUN) /* (norm, factor), [movement] -> mask, p */ \
    X(LOSS_SCALE, "loss_scale", 2, 1, TT__RMW) /* (norm, factor), totals -> loss scale */ \
    X(COPY, "copy", 1, 1, TT__ANY_SPACE) /* x -> x in other memory: the device's or the host's */ \
    X(WAIT, "wait", 8, 0, TT__ANY_SPACE | TT__WAITS) /* the results and operands of the work to wait for */ \
    X(ALL_REDUCE, "all_reduce", 1, 1, TT__RMW | TT__INPLACE0 | TT__MOVES) \
        /* x -> y, the sum (or max, min) of all members' x */ \
    X(REDUCE_SCATTER, "reduce_scatter", 1, 1, TT__RMW | TT__MOVES) \
        /* x -> this member's shard of the sum of all members' x */ \
    X(ALL_GATHER, "all_gather", 1, 1, TT__RMW | TT__MOVES | TT__CHEAP) /* shard -> y, all members' shards */ \
    X(BROADCAST, "broadcast", 1, 1, TT__RMW | TT__INPLACE0) /* x -> y, member 0's x */ \
    X(SEND, "send", 1, 0, 0) /* x, for the RECV that follows */ \
    X(RECV, "recv", 1, 1, TT__RMW | TT__INPLACE0) /* x of member move.from -> y of member move.to */ \
    X(SUM_SLOTS, "sum_slots", 1, 1, TT__RMW) /* x -> y, the sum of all slots of x */ \
    X(CHUNK_SQUARES, "chunk_squares", 1, 1, 0) /* g -> sum of g^2 of each TT__CHUNK elements */ \
    X(FOLD_SQUARES, "fold_squares", 1, 1, 0) /* sums of chunks -> sum of g^2 */ \
    X(MEAN_LOSS, "mean_loss", 1, 1, TT__RMW) /* a loss's counts on all ranks -> loss */

enum {
#define TT__ENUM(OP, name, inputs, outputs, flags) TT__OP_##OP,
    TT__OPS(TT__ENUM)
#undef TT__ENUM
    TT__OP_COUNT
};

/* Table of the ops that compute each element of out[0] from the same elements a and b of two operands:
   X(OP, kind, formula). The kernels of the CPU and of CUDA are made of the formula. ACT(SILU)(a) is an
   activation of TT__ACTS. kind: RARE or, if training spends much time in the op, HOT (see
   src/cuda/groups.cuh). */
#define TT__PAIRS(X, ACT) \
    X(ADD, HOT, a + b) \
    X(MUL, HOT, a * b) \
    X(SWIGLU, HOT, ACT(SILU)(a) * b)

/* Purposes of random numbers. The purpose is a part of the key of a stream (tt__stream_key). */
enum {
    TT__RANDOM_INIT = 1, TT__RANDOM_DROPOUT, TT__RANDOM_ROUNDING, TT__RANDOM_SHUFFLE, TT__RANDOM_IMAGE,
    TT__RANDOM_TOKEN, TT__RANDOM_MASK
};

/* The mask of PRUNE for n weights: 8 bytes with the number of pruned weights, then words of 32 bits; bit
   j % 32 of word j / 32 is set if weight j is pruned. */
enum { TT__MASK_HEAD = 8 };
static inline int64_t tt__mask_bytes(int64_t n) { return TT__MASK_HEAD + (n + 31) / 32 * 4; }

/* Settings of a step, which the host writes before it runs a segment. */
typedef struct tt__step_settings {
    uint64_t seed;
    int64_t step, micro;    /* step: optimizer steps done so far; micro: number of the micro-batch in this
                               step */
    float lr;
    double loss_norm;       /* divisor of gradients while the number of targets is unknown (accumulation) */
} tt__step_settings;

/* Results of a step, which the host reads: totals of losses, the loss scale, and what CLIP computes.
   Instructions read and write each of the three. */
/* Sums over the micro-batches of a step so far. margin: the sum of the margins of tt_preference_loss. */
typedef struct tt__totals { double loss, targets, correct, margin; } tt__totals;
enum { TT__TOTALS = 4 };        /* number of the fields of a tt__totals */
typedef struct tt__scale_state {
    double scale;               /* scale of the loss's gradient: a power of two                             */
    double good_steps, skipped; /* good_steps: steps without overflow since the scale last changed; skipped:
                                   all steps without an update */
} tt__scale_state;
#define TT__LOSS_SCALE_MOST 0x1p40
typedef struct tt__clipped { /* norm: the gradient's norm; if it is not finite, no parameter was changed.
                                factor: the factor that updates apply to gradients */
    float norm, factor;
} tt__clipped;
typedef struct tt__results { tt__totals totals; tt__scale_state scale; tt__clipped clipped; } tt__results;

typedef struct tt__device tt__device; /* an open device, opaque outside its backend                         */

typedef struct tt__launch {
    tt__device *device;     /* device to run on (on the CPU a tt__cpu), equal for all launches of a call    */
    const tt_tape *tape;
    const tt__instr *instr;
    tt__mat in[TT__MAX_IN], out[TT__MAX_OUT]; /* operands and results with their actual number of rows; absent
                                                 if `data` is NULL */
    bool add[TT__MAX_OUT];
    bool tf32;              /* operands of fp32 matrix products may be rounded to TF32                      */
    bool tuned;             /* matrix products are computed in the fastest ways that tt__backend.tune has
                               found */
    const uint16_t *lists;  /* block lists of block-sparse attention: (heads of all ranks, list_rows, listed),
                               in the host's memory. NULL: every list names block 0 */
    /* Number of the first random number of an update, a multiple of 8: the place of out[0]'s first element in
       the whole tensor. The numbers of a tensor rank's shard begin after those of the lower ranks' shards.
       These numbers equal the elements' places in the whole tensor only if ranks divide the rows and a shard
       has a multiple of 8 elements. */
    int64_t first;
    /* For the first operand or result that is sharded over the tensor ranks: the numbers of its first row and
       first column in the whole tensor, and the whole tensor's number of rows (0: none is sharded). Random
       numbers belong to elements of whole tensors. */
    int64_t first_row, first_col, whole_rows;
    /* Fields of a collective. phase: TT__REDUCE_PHASE or TT__SPREAD_PHASE. members: number of members. me:
       number of this member. present: the first `present` members have data to reduce. peer_in, peer_out:
       operand 0 and result 0 of each member. */
    int phase, members, me, present;
    const tt__mat *peer_in, *peer_out;
    /* Memory of allocate_host for members whose memory this member's kernels cannot load from: staged[k]
       holds what tt__backend.stage copied from member k (NULL: kernels can load from it). Only elements
       [from, from + max) of each shard are processed. If `staged` is NULL, all elements are processed, from
       peer_in and peer_out. */
    void *const *staged;
    int64_t from, max;
    void *workspace;        /* scratch memory of tt__device_kind.workspace bytes */
    void *resident;         /* the device's resident workspace; any instruction may use it                  */
} tt__launch;

/* Divides a norm l whose rows have several groups of columns (attr.heads) into launches, each a norm of rows
   of one group. Sets *part to launch number k. x: number of the norm's operand x, 0, or 1 in a backward. One
   launch computes all groups if rows lie one after another in memory; otherwise each group has its launch.
   Returns false if k is past the last launch. */
static inline bool tt__norm_launch(const tt__launch *l, int x, int k, tt__launch *part)
{
    const int64_t groups = l->instr->attr.heads > 1 ? l->instr->attr.heads : 1;
    tt__mat *const of[] = {&part->in[0], x ? &part->in[1] : &part->out[0], x ? &part->in[3] : &part->out[1],
                           x ? &part->out[0] : NULL};
    bool whole = true;
    *part = *l;
    for (int m = 0; m < 4 && of[m]; m++) whole = whole && (!of[m]->data || of[m]->ld == of[m]->cols);
    if (k >= (whole ? 1 : groups)) return false;
    for (int m = 0; m < 4 && of[m]; m++) {
        of[m]->cols /= groups;
        if (whole) of[m]->rows *= groups, of[m]->ld = of[m]->cols;
        else if (of[m]->data) { /* a union converts the pointer: C++ warns of casts of C */
            const size_t bytes = tt_dtype_bytes(of[m]->dtype);
            union { void *any; char *byte; } data;
            data.any = of[m]->data;
            for (int64_t c = 0; c < k * of[m]->cols; c++) data.byte += bytes;
            of[m]->data = data.any;
        }
    }
    if (x && k) part->add[1] = true; /* the gradient of the weights is a sum over the groups */
    return true;
}

/* The step's settings in the device's memory; NULL: the instruction needs no settings. */
#define TT__RUN_OF(l) ((const tt__step_settings *)(l)->in[TT__RUN_IN].data)

/* Rows that linear_cross_entropy processes at a time: enough that reading and writing the weight's gradient
   costs little compared with the product. The logits of these rows are f32; the gradients of the logits are
   stored over them. */
#ifndef TT__LOSS_CHUNK /* tests make TT__LOSS_CHUNK and TT__CUDA_LOSS_CHUNK smaller */
#define TT__LOSS_CHUNK 512
#endif
/* Rows that linear_cross_entropy processes at a time on a GPU. A GPU needs more rows than a CPU: reading and
   writing GPT-2's weight gradient takes an H200 as long as the product of some 700 rows (4.3 TB/s, 788
   TFLOP/s). */
#ifndef TT__CUDA_LOSS_CHUNK
#define TT__CUDA_LOSS_CHUNK 2048
#endif

/* Bytes of CUDA's resident workspace: the size that cuBLAS recommends on Hopper (its documentation,
   cublasSetWorkspace), less a page for what programs keep; with less, cuBLAS avoids its faster kernels.
   Instructions run one after another, so other ops use this workspace, too: for partial sums of biases,
   norms, losses and squares. */
#ifndef TT__CUDA_RESIDENT /* tests define a smaller TT__CUDA_RESIDENT */
#define TT__CUDA_RESIDENT (((size_t)32 << 20) - 4096)
#endif
/* Alignment in bytes of storages and of the parts of workspaces: the alignment of cudaMalloc, which suffices
   for any vector load. */
#define TT__CUDA_ALIGN 256

/* Returns the smallest multiple of a unit, a power of two, that is not less than n. */
static inline size_t tt__align_to(size_t n, size_t unit) { return (n + unit - 1) & ~(unit - 1); }

/* Scaling of fp8 (see QUANTIZE). A tensor is multiplied by the largest power of two that keeps in range
   2^margin times the tensor's largest magnitude of the last TT__FP8_STEPS steps. A tensor may therefore grow
   twofold from one step to the next without saturation, and a loss scale may double. A row of the history
   belongs to one tensor: first the largest magnitude over all these steps (0: unknown), then the largest
   magnitude of each step, the latest step first. */
enum { TT__FP8_STEPS = 16, TT__FP8_MARGIN = 1 };
#define TT__FP8_MOST(e5m2) ((e5m2) ? 57344.0f : 448.0f) /* the largest finite number of E5M2 or E4M3 */

/* Number of rounds of Philox with which a random number for each element is drawn, for dropout and stochastic
   rounding. */
#define TT__DRAW_ROUNDS 7
/* Threshold of dropout: an element whose 16 random bits are below the threshold is dropped. */
#define TT__DROP_THRESHOLD(p) ((int32_t)((p) * 65536.0f + 0.5f))
/* Threshold of dropout for attention weights: a weight whose 8 random bits are below the threshold is
   dropped. A rate above 0 gives a threshold of at least 1. */
#define TT__ATTENTION_DROP(p) ((p) * 256.0f < 0.5f ? (p) > 0 : (int32_t)((p) * 256.0f + 0.5f))

/* Computes the masks with which a kernel compares 16 random numbers of 8 bits (one draw of Philox) with the
   threshold `drop`, all at once. Bit b of number j is bit 16 * (b / 4) + j of word b % 4. The kernel goes
   from bit 0 to bit 7. Its word `kept` has a bit for each number: whether the number's bits seen so far are
   at least those of the threshold. If bit b of the threshold is 1, a number stays in `kept` only if its bit b
   is 1, too. If bit b of the threshold is 0, a number is in `kept` if it was before or if its bit b is 1. For
   a word x of random bits this is `kept = (x & kept) | (either & (x | kept))`, first for the lower halves of
   the words, then for the higher. */
static inline void tt__attention_either(int32_t drop, uint32_t either[4])
{
    for (int b = 0; b < 4; b++)
        either[b] = (drop >> b & 1 ? 0 : 0xffffu) | (drop >> (b + 4) & 1 ? 0 : 0xffff0000u);
}

/* Largest number of rotary pairs in a head. The frequencies of all pairs follow transformers' formulas
   (modeling_rope_utils.py). */
enum { TT__MAX_PAIRS = 256 };
static inline int tt__rotary_pairs_of(const tt_rotary_options *o) { return (o->size + 1) / 2; }

static inline void tt__rotary_frequencies(const tt_rotary_options *o, double frequency[TT__MAX_PAIRS])
{
    const double turn = 6.283185307179586, size = o->size, log_base = log(o->base);
    /* YARN: numbers of the pairs that turn `high` and `low` times within the original positions. */
    double from = floor(size * log(o->original / (o->high * turn)) / (2 * log_base));
    double to = ceil(size * log(o->original / (o->low * turn)) / (2 * log_base));
    from = from > 0 ? from : 0;
    to = to < size - 1 ? to : size - 1;
    if (!(from < to)) to = from + 0.001;
    for (int j = 0; j < tt__rotary_pairs_of(o); j++) {
        const double plain = pow(o->base, -2 * j / size), turns = o->original * plain / turn;
        double part = 1; /* fraction of the frequency that is divided by the factor */
        if (o->scaling == TT_ROTARY_PLAIN) part = 0;
        if (o->scaling == TT_ROTARY_LLAMA3) part = (o->high - turns) / (o->high - o->low);
        if (o->scaling == TT_ROTARY_YARN) part = (j - from) / (to - from);
        part = part < 0 ? 0 : part > 1 ? 1 : part;
        frequency[j] = plain * (1 - part) + plain / o->factor * part;
    }
}

/* Numbers of the operands of attention or its backward: q, seq_start, row numbers. k and v follow q. */
typedef struct tt__attention_operands { int q, starts, numbers; bool backward; } tt__attention_operands;

static inline tt__attention_operands tt__attention_of(bool backward)
{
    const tt__attention_operands of_forward = {0, 3, 4, false}, of_backward = {1, 4, 7, true};
    return backward ? of_backward : of_forward;
}

/* Returns how many numbers tt__launch.lists has. */
static inline int64_t tt__listed_blocks(const tt__attr *a)
{
    int64_t n = a->lists ? a->list_heads : 0;
    n *= a->list_rows;
    return n * a->listed;
}

/* Returns the bytes for the dropout mask of attention's backward on CUDA. The kernel of dq draws which
   weights dropout keeps, and stores them as bits for the kernel of dk and dv: TT__CUDA_ATTENTION_BITS bytes
   for 64 queries and 64 keys of a sequence and a head. The function returns 0, and both kernels draw, if the
   mask would be larger than q: memory must not grow faster than the number of rows. It also returns 0 if no
   sequence has more than 256 rows: mma.sync then needs one sweep. */
#define TT__CUDA_ATTENTION_BITS 512
static inline int64_t tt__cuda_attention_bits(const tt__attr *a, const tt__mat *q, int64_t seqs)
{
    const int64_t longest = a->max_length && a->max_length < q->rows ? a->max_length : q->rows;
    const int64_t across = (longest + 63) / 64, tiles = q->rows / 64 + seqs;
    const bool plain = !a->window && !a->alibi_heads && !a->block && q->cols / a->heads <= 64;
    if (!(a->dropout > 0) || !plain || q->dtype == TT_F32 || longest <= 256) return 0;
    const int64_t pairs = a->causal ? tiles * (across + 1) / 2 : tiles * across;
    const int64_t bytes = pairs * a->heads * TT__CUDA_ATTENTION_BITS;
    return bytes <= q->rows * q->cols * 2 ? bytes : 0; /* the limit is q's bytes, at 16 bits a number */
}

/* Returns whether cuBLASLt has fast kernels for a matrix: the number of its columns, and the distance from a
   row to the next, must be multiples of 8 elements. For other matrices the product's operands are copied,
   padded with zeros to multiples of 8, at most TT__CUDA_LOSS_CHUNK rows of activations at a time; the product
   writes its result in f32 beside the copies. */
static inline bool tt__cuda_even(const tt__mat *m) { return m->cols % 8 == 0 && m->ld % 8 == 0; }

static inline int64_t tt__cuda_copy_bytes(int64_t rows, int64_t cols, tt_dtype dtype)
{
    const int64_t bytes = rows * ((cols + 7) / 8 * 8) * (dtype == TT_F32 ? 4 : 2);
    return (bytes + TT__CUDA_ALIGN - 1) / TT__CUDA_ALIGN * TT__CUDA_ALIGN;
}

/* Returns the bytes of scratch memory for padded copies of a product's operands and result; 0 if none needs
   padding. The product computes `result`, one of x (rows, in), w (out, in) and y (rows, out), from the other
   two. */
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

/* Attention's backward by warpgroups keeps dq of sequences of more than 256 rows as partial f32 sums, which
   are then added up: each 256 keys of a sequence have a slot, up to TT__CUDA_ATTENTION_SLOTS if attention is
   causal and up to 2 otherwise. Longer sequences reuse the slots. */
#define TT__CUDA_ATTENTION_SLOTS 4
static inline int tt__cuda_attention_slots(bool causal, int64_t longest)
{
    const int max = causal ? TT__CUDA_ATTENTION_SLOTS : 2;
    int slots = 1;
    while (slots < max && 256 * slots < longest) slots++;
    return slots;
}

/* Returns the row of slot `slot` that holds the first row of a sequence. row: the first row of the sequence
   in the batch. In causal attention the queries that see the keys of slot k begin 256 k rows after the start
   of a sequence. A slot therefore has fewer rows than the batch; the sequences' shares are proportional to
   their lengths. */
static inline int64_t tt__cuda_attention_slot_row(int64_t row, bool causal, int64_t longest, int slot)
{
    return causal ? row * (longest - 256 * slot) / longest : row;
}

/* Returns the bytes of all slots with partial sums of dq; 0: the kernels use no slots. */
static inline int64_t tt__cuda_attention_parts(const tt__attr *a, const tt__mat *q)
{
    const int64_t longest = a->max_length && a->max_length < q->rows ? a->max_length : q->rows;
    const int64_t head = q->cols / a->heads;
    const bool plain = !a->window && !a->alibi_heads && !a->block && head > 32 && head <= 64;
    int64_t rows = 0;
    if (!plain || q->dtype == TT_F32 || longest <= 256) return 0;
    for (int slot = 0; slot < tt__cuda_attention_slots(a->causal, longest); slot++)
        rows += tt__cuda_attention_slot_row(q->rows, a->causal, longest, slot);
    return rows * q->cols * 4;
}

/* Returns log2 of ALiBi's slope for head `head` of `heads`. For n heads, n a power of two, the result is -8 *
   (head + 1) / n. For any other number of heads, n is the largest power of two below that number: the first n
   heads have the slopes of n heads, the others have every second slope of 2 * n heads. */
static inline double tt__alibi_exponent(int head, int heads)
{
    int n = 1;
    while (2 * n <= heads) n *= 2;
    return head < n ? -8.0 * (head + 1) / n : -4.0 * (2 * (head - n) + 1) / n;
}
