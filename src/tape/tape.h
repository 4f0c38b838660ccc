#pragma once
#include "../base/base.h"

/* ===========================================================================================================
   TAPE                                                                                              src/tape/
   Values and instructions, and how a model records its instructions. Uses base.

   A value is a matrix (rows, cols). Its number of rows is fixed, or is an axis: a capacity while recording, a
   number at run time. A view shares the storage of its base. An instruction reads the values `in` and writes
   the values `out`; if bit o of `add` is set, the instruction adds to out[o] (+=) instead of overwriting it
   (=).

   The gradient rule: the first contribution to a gradient writes (=), later contributions add (+=). In
   programs that accumulate over micro-batches, the first contribution to a parameter's gradient also adds in
   all micro-batches but the first (`add_later`). The totals of losses follow the same rule.

   The state of a step is on the tape, too. The host writes the step's settings (tt__step_settings) into one
   value before it runs a segment. Instructions write the step's results (tt__results) into another value:
   ADD_COUNTS writes what losses counted, CLIP the norm and the factor, LOSS_SCALE the next loss scale.
   ======================================================================================================== */

/* Largest number of elements of a tensor. Below this limit the tensor's bytes and an op's scratch for the
   tensor fit a size_t. tt__check_total checks the sum over all tensors of a program when the program is
   planned. */
#define TT__MOST_ELEMENTS (((int64_t)1 << 47) - 1)

struct tt_param {
    tt_context *ctx;
    char *name;
    int index, ndim;
    int64_t dims[4], size;
    tt_init init;
    bool frozen;
    /* Source of the parameter's values until the arena `owner` has memory: `read` if not NULL, else
       `init`. */
    tt_status (*read)(void *source, int64_t first, int64_t n, float *to);
    void (*release)(tt_context *ctx, void *source);
    void *source;
    /* Arena that holds the parameter's values, from the compilation of the first program that uses the
       parameter; NULL: none. If two stages of a pipeline use the parameter, `second_owner` is the arena of
       the other stage. */
    struct tt__arena *owner, *second_owner;
    uint64_t stages;        /* set of the pipeline stages that held the parameter when tt_compile began, one
                               bit for each; 0: none */
    bool keeps_source; /* `source` is not released yet: only one of `owner` and `second_owner` has memory */
};

/* Kind of a storage. STEP: settings and results of the step. CACHE: the rows of a tt_cache. */
typedef enum tt__storage {
    TT__TRANSIENT, TT__INPUT, TT__PARAMETER, TT__GRADIENT, TT__STATE, TT__STEP, TT__CACHE
} tt__storage;
/* User's mark on a value, from tt_keep or tt_recompute. */
typedef enum tt__mark { TT__UNMARKED, TT__MARKED_KEEP, TT__MARKED_AGAIN } tt__mark;
/* Memory that stores a value: the device's or the host's. If the device uses the host's memory, instructions
   may use both spaces. */
typedef enum tt__space { TT__DEVICE, TT__HOST, TT__SPACES } tt__space;
/* The layout of a tensor over the tensor ranks. WHOLE: replicated, each rank has the whole tensor. ROWS,
   COLS: sharded, each rank has its own rows or columns. The shards are equally large, unless the rows are an
   axis: then tt__shard gives a rank's rows (tt__row_axis.parts). Instructions leave two more layouts in a
   storage. PARTIAL: each rank has a summand of the whole tensor's shape, and the sum over the ranks is the
   tensor. ZEROS: all elements are 0; a storage of any other layout may start as ZEROS. */
typedef enum tt__split { TT__WHOLE, TT__ROWS, TT__COLS, TT__PARTIAL, TT__ZEROS } tt__split;
/* The shard of a tensor that a value or a placement has. Over the tensor ranks: `split` is WHOLE, ROWS or
   COLS, and the shape counts the elements of one rank. A view may be a rank's shard of the rows of a
   replicated storage. Over the data ranks: if `unit` is not 0, tt__shard computes the shard from `of`
   elements, `unit` and `root`, and the shape is (1, elements of the largest shard). */
typedef struct tt__part {
    tt__split split;
    bool root;          /* the argument `root` of tt__shard */
    int64_t unit, of;
} tt__part;

typedef struct tt__shape {
    tt_dtype dtype;
    int64_t rows, cols; /* rows: a fixed number, or the capacity of the axis */
    int32_t axis;       /* number of the axis; 0: none */
    int32_t extra;      /* actual rows = rows of the axis + extra (1 for sequence starts) */
} tt__shape;

typedef struct tt__tape_value {
    tt__shape shape;
    int64_t ld;         /* elements from the start of one row in the storage to the start of the next */
    tt__storage storage;
    tt__space space;
    tt__part part;
    /* slots: in a storage, the number of slots, stored one after another, for the gradients of several
       leaves; 0: one slot. slot: in a view, 1 + the number of its slot; 0: the slot of the micro-batch that
       runs. */
    int32_t slots, slot;
    bool host_copy;        /* storage of an update that runs in the host's memory: a temporary host copy of a
                           device storage */
    /* Fields of a storage of a pipeline stage. saved: the contents are saved from a micro-batch's forward to
       its backward, or until another stage has received them. copies: number of micro-batches whose contents
       are saved at the same time; 0: one. */
    bool saved;
    int32_t copies;
    int32_t ends;       /* 1 + number of the pipeline stage that ends with this value; 0: none */
    bool elsewhere;     /* a parameter that only other stages read */
    int tied[2];        /* the two stages that read the parameter, the lower first; tied[1] is 0 if only one
                           stage reads it */
    bool parted;        /* in a program: the address of the value or of its storage depends on the run, see
                           tt__resolve_part */
    int32_t base;       /* the value whose storage this value shares; the value itself unless it is a view */
    int64_t offset;     /* elements from the start of `base` */
    int32_t param;      /* index in ctx->params of PARAMETER, GRADIENT and STATE values; else -1 */
    int state;          /* of a STATE value: number of the optimizer's state, from 1; TT__EMA: the average */
    int held;           /* 1 + the layout of a parameter that an arena holds already; 0: no arena holds it */
    bool keep;          /* the value can be read after the run */
    bool block_end;     /* recompute: the value is saved for the backward, not recomputed */
    bool offload;       /* marked by tt_offload; set on storages */
    tt__mark mark;      /* recompute: the user's mark */
    bool persistent;    /* keeps its contents from run to run */
    bool pinned_f32;    /* statistics and losses: precision passes keep the value f32 */
    bool residual;      /* precision: part of the residual stream */
    bool needs_grad;    /* autodiff: the value depends on a trainable parameter */
    int32_t grad;       /* autodiff: the value that holds the gradient; 0: none yet */
    /* Counts that tt__index makes. producer: 1 + the first instruction that writes the value; 0: none. The
       other counts are those of a base and its views together. uses: operands that read it. writes: results
       that write it. views: its views. reader, writer: the last instruction that reads it, and the last that
       writes it. */
    int32_t producer, uses, writes, views, reader, writer;
    int32_t after;     /* in a persistent storage: the storage, of a higher number, that must be placed
                           directly after this one; 0: none */
    int32_t arrival;    /* in an input: the value into which the host writes the next run's data
                           (src/passes/overlap.h); 0: the input itself */
    bool named;         /* the name was set by tt_name or by a pass */
    size_t place;       /* planner: byte offset in the value's region of the arena */
    char name[72];
} tt__tape_value;

/* A number of rows that may differ in each run. If `parts` is not 0, the rows are one rank's shard of the
   rows of axis `of`, divided over `parts` tensor ranks (tt__shard); a rank may have 0 rows. */
typedef struct tt__row_axis { char name[72]; int64_t capacity; int32_t of; int parts; } tt__row_axis;

struct tt_tape {
    tt_context *ctx;
    uint32_t number;                                /* number in the field `tape` of each tt_value of this
                                                       tape; copies of the tape have the same number */
    tt__tape_value *values; int n_values, cap_values;    /* values[0] means "none" */
    tt__instr *code; int n_code, cap_code;
    tt__row_axis *axes; int n_axes, cap_axes;           /* axes[0] means "none" */
    int32_t *params; int n_params, cap_params;      /* value of each of ctx->params; 0: none */
    uint32_t n_random;
    size_t alignment;                               /* bytes of alignment of storages, which the kind of
                                                       device requires */
    bool host;                                      /* the device's memory is the host's */
    bool accumulate;                                /* a step may have several micro-batches, on one rank or
                                                       on several */
    int data, slots;                                /* number of data ranks; number of slots on each of them
                                                       for the leaves of sums (src/ranks/) */
    int zero;                                       /* tt_parallel.zero */
    bool early;                                     /* the backward updates parameters */
    bool on_host;                                   /* large parameters are updated in the host's memory */
    bool server, sums_micros;                       /* server: tt_parallel.server; sums_micros: gradients are
                                                       summed over ranks after each micro-batch, see
                                                       src/ranks/threads.h */
    int stages, stage;                              /* number of stages of the pipeline, and of this tape's
                                                       stage; 0, 0: there is no pipeline */
    int tensor;                                     /* number of tensor ranks; 0, 1: one */
    /* Values of the step's settings and results, and views of the results: tt__totals, tt__scale_state,
       tt__clipped; 0: none. */
    int32_t run, results, totals, scale, clipped;
    int32_t counted;    /* value of what losses counted on a rank, in each slot, to be summed into `totals`;
                           0: losses count into `totals` itself */
    /* f32 (trained parameters, 1): squared norms of their gradients. Parameters that the tensor ranks shard
       come first. 0: none. */
    int32_t squares;
    /* Operands of QUANTIZE and FP8_HISTORY: f32 (tensors, 1 + TT__FP8_STEPS) and f32 (1, tensors);
       0: none. */
    int32_t fp8_history, fp8_largest;
    /* The pass "offload" makes groups of instructions whose operands it copies from the host's memory and
       back. grouped: largest number of bytes on the device for the operands of a group of several
       instructions. cuts: number of groups beyond the number that a limit of TT__OFFLOAD_TOGETHER bytes would
       give. */
    size_t grouped;
    int cuts;
    uint16_t *lists; int n_lists, cap_lists;        /* block lists of all block-sparse attention, see
                                                       attr.lists */
    tt_status status;                               /* status of the first op that failed; `error` is its
                                                       message */
    char error[512];
};

/* A row of TT__OPS (src/backend/). The rules of an op are in src/ops/. */
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
