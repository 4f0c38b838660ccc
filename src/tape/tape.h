#pragma once
#include "../base/base.h"

/* ===========================================================================================================
   TAPE                                                                                              src/tape/
   Values, instructions, and how instructions are recorded. Uses base.

   A value is a matrix (rows, cols). rows is fixed, or an axis: a capacity now, a number at run time. A view
   shares the storage of its base. An instruction reads `in`, writes `out`; bit o of `add` says out[o] +=
   instead of =.

   The gradient rule: the first contribution to a gradient writes (=), later ones add (+=). In programs that
   accumulate over micro-batches, the first contribution to a parameter's gradient also adds in all
   micro-batches but the first (`add_later`). So do the totals of losses.

   A step's state is on the tape too. Its settings (tt__run) are a value that the host writes before it runs a
   segment; its results (tt__results) are one that instructions write: ADD_COUNTS what losses counted, CLIP
   the norm and the factor, LOSS_SCALE the next loss scale.
   ======================================================================================================== */

/* A tensor has no more elements, so that their bytes and an op's scratch for them fit a size_t. What the
   tensors of a program sum up to is checked when it is planned, by tt__check_total. */
#define TT__MOST_ELEMENTS (((int64_t)1 << 47) - 1)

struct tt_param {
    tt_context *ctx;
    char *name;
    int index, ndim;
    int64_t dims[4], size;
    tt_init init;
    bool frozen;
    /* where its values come from until `holder` has memory: `read` if not NULL, else init */
    tt_status (*read)(void *source, int64_t first, int64_t n, float *to);
    void (*release)(tt_context *ctx, void *source);
    void *source;
    /* The arena that holds its values, from the compilation of the first program with it; NULL: none. Where
       two stages of a pipeline have it, `again` is the other's. */
    struct tt__arena *holder, *again;
    uint64_t stages;        /* which of a pipeline held it when tt_compile began, a bit for each; 0: none */
    bool source_stays;      /* one of the two has memory, and the other is still to be filled */
};

/* STEP: the step's settings and results. CACHE: tt_cache's. */
typedef enum tt__storage {
    TT__TRANSIENT, TT__INPUT, TT__PARAMETER, TT__GRADIENT, TT__STATE, TT__STEP, TT__CACHE
} tt__storage;
/* What tt_keep and tt_recompute have asked for. */
typedef enum tt__mark { TT__UNMARKED, TT__MARKED_KEEP, TT__MARKED_AGAIN } tt__mark;
/* In whose memory a value lies. Where the device's is the host's, instructions may use both. */
typedef enum tt__space { TT__DEVICE, TT__HOST, TT__SPACES } tt__space;
/* The layout of a tensor over the tensor ranks. WHOLE: the same on each. ROWS, COLS: each has its own rows or
   columns, all equally many; but of the rows of an axis a rank's own are its piece (tt__axis.parts).
   Instructions leave two more in a storage. PARTIAL: the whole is the sum of what the ranks have, which is of
   its shape. ZEROS: 0 everywhere, as which each of the other layouts may begin. */
typedef enum tt__split { TT__WHOLE, TT__ROWS, TT__COLS, TT__PARTIAL, TT__ZEROS } tt__split;
/* Which part of a tensor a value or a home has. Over the tensor ranks: one of the first three layouts; its
   shape counts what a rank has. A view may have a rank's own rows of a storage that is whole. Over the data
   ranks: where `unit` is not 0, the piece (tt__piece) of `of` elements, and its shape is (1, the most that a
   piece has). */
typedef struct tt__part {
    tt__split split;
    bool root;          /* tt__piece's */
    int64_t unit, of;
} tt__part;

typedef struct tt__shape {
    tt_dtype dtype;
    int64_t rows, cols; /* rows: the capacity when there is an axis */
    int32_t axis;       /* 0: none */
    int32_t extra;      /* actual rows = rows of the axis + extra (seq_start has one more) */
} tt__shape;

typedef struct tt__value {
    tt__shape shape;
    int64_t ld;         /* elements from one row of its storage to the next */
    tt__storage storage;
    tt__space space;
    tt__part part;
    /* Of a storage, how many times it is there, one behind the other (0: once): gradients of several leaves.
       Of a view, one more than the slot that it is of; 0: that of the micro-batch that is run. */
    int32_t slots, slot;
    bool visits;        /* of a storage: what an update in the host's memory works on of one on the device */
    /* Of a storage of a pipeline's stage. stays: from a micro-batch's forward to its backward, or until
       another stage has taken it; `copies` (0: 1) micro-batches have it at once. */
    bool stays;
    int32_t copies;
    int32_t ends;       /* one more than the stage that ends with it, of a pipeline; 0: none does */
    bool elsewhere;     /* a parameter that other stages have */
    int tied[2];        /* the two stages that have it, the lower first; [1] 0: one has it */
    bool parted;        /* of a program: it, or its storage, is more than a place: see tt__resolve_part */
    int32_t base;       /* the value whose storage it shares: itself unless it is a view */
    int64_t offset;     /* elements from the start of base */
    int32_t param;      /* index in ctx->params of PARAMETER, GRADIENT and STATE values; -1 */
    int held;           /* of a parameter that an arena holds already, one more than its layout there; or 0 */
    bool keep;          /* readable after the run */
    bool block_end;     /* recompute: the backward finds it rather than computes it again */
    bool offload;       /* tt_offload's mark, of a storage */
    tt__mark mark;      /* recompute: what the user has asked for */
    bool persistent;    /* lives from run to run */
    bool pinned_f32;    /* statistics and losses: no precision pass changes it */
    bool residual;      /* precision: of the residual stream */
    bool needs_grad;    /* autodiff: a trainable parameter lies behind it */
    int32_t grad;       /* autodiff: the value that holds its gradient; 0: none yet */
    /* As tt__index counts them: one more than the instruction that first writes it (0: none does); of a base,
       with its views: operands that read it, results that write it, its views, its last reader
       and writer. */
    int32_t producer, uses, writes, views, reader, writer;
    int32_t behind;     /* of a persistent storage, a later one that is to lie right behind it; 0: none */
    int32_t arrival;    /* of an input, where the host writes that of the next run (src/passes/); 0: itself */
    bool named;         /* by tt_name, or by a pass */
    size_t place;       /* planner: byte offset in its region of the arena */
    char name[72];
} tt__value;

/* `parts` is not 0 where it numbers the rows that a tensor rank has of those of another axis, `of`: the
   rank's piece (tt__piece), which may have none. */
typedef struct tt__axis { char name[72]; int64_t capacity; int32_t of; int parts; } tt__axis;

struct tt_tape {
    tt_context *ctx;
    uint32_t number;                                /* of tt_value.tape; copies have the same */
    tt__value *values; int n_values, cap_values;    /* values[0] is "none" */
    tt__instr *code; int n_code, cap_code;
    tt__axis *axes; int n_axes, cap_axes;           /* axes[0] is "none" */
    int32_t *params; int n_params, cap_params;      /* of ctx->params: the value for each; 0: none        */
    uint32_t n_random;
    size_t alignment;                               /* of storages, as the kind of device wants it */
    bool host;                                      /* the memory of that kind is the host's */
    bool accumulate;                                /* a step has several micro-batches */
    int data, slots;                                /* data ranks, and leaves of sums on each (src/ranks/) */
    int zero;                                       /* tt_parallel's */
    bool early;                                     /* parameters are updated in the backward */
    bool on_host;                                   /* ... if they are large, in the host's memory */
    bool server, sums_micros;                       /* sums are of micro-batches (see src/ranks/threads.h) */
    int stages, stage;                              /* of the pipeline, and which of them it is (0, 0: one) */
    int tensor;                                     /* ranks over which it is split; 0, 1: one */
    /* the step's settings and results, and views of these: tt__totals, tt__scale, tt__clipped; 0: none */
    int32_t run, results, totals, scale, clipped;
    int32_t counted;    /* what losses counted on a rank, in each slot, to be summed into totals; 0: totals */
    /* f32 (trained parameters, 1): squared norms of their gradients, first of those that tensor ranks have
       parts of; 0: none */
    int32_t squares;
    /* f32 (tensors, 1 + TT__FP8_STEPS) and (1, tensors): see QUANTIZE; 0: none */
    int32_t fp8_history, fp8_largest;
    /* Of the groups that pass offload makes of instructions whose operands are copied from the host's memory
       and back: the most bytes that the operands of one group take on the device, if it has several; and how
       many groups more there are than with groups of TT__OFFLOAD_TOGETHER bytes. */
    size_t grouped;
    int cuts;
    uint16_t *lists; int n_lists, cap_lists;        /* of all block-sparse attention, see attr.lists */
    tt_status status;                               /* of the first op that failed, with its sentence */
    char error[512];
};

/* The rows of TT__OPS (src/backend/). An op's rules are in src/ops/. */
typedef struct tt__op {
    const char *name;
    int inputs, outputs;
    unsigned flags;
} tt__op;

static const tt__op tt__ops[TT__OP_COUNT] = {
#define TT__ROW(OP, name, inputs, outputs, flags) {name, inputs, outputs, flags},
    TT__OPS(TT__ROW)
#undef TT__ROW
};

static bool tt__is(const tt__instr *i, unsigned flags) { return (tt__ops[i->op].flags & flags) == flags; }
static int tt__weight(const tt__instr *i) { return (int)(tt__ops[i->op].flags >> 24 & 3); }
static int tt__residual(const tt__instr *i) { return (int)(tt__ops[i->op].flags >> 26 & 3); }
static int tt__numbers(const tt__instr *i) { return (int)(tt__ops[i->op].flags >> 28 & 7); }

static const char *tt__act_name(int act)
{
    static const char *const names[] = {"none", "gelu", "gelu_tanh", "relu", "tanh", "silu"};
    return names[act];
}

static const char *tt__instr_name(const tt__instr *i)
{
    return tt__is(i, TT__NAMED_BY_ACT) ? tt__act_name(i->attr.act) : tt__ops[i->op].name;
}
