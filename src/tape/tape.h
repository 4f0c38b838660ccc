#pragma once
#include "../base/base.h"

/* ===========================================================================================================
   TAPE                                                                                              src/tape/
   Values and instructions, and how a model records its instructions. Uses base.

   A value is a matrix (rows, cols). Its number of rows is fixed, or is that of an axis, which has a capacity
   when a model records and an actual number of rows in each run. A view is a value without memory of its own:
   the view shares the storage of another value, its base. An instruction reads the values `in` and writes the
   values `out`. If bit o of `add` is set, the instruction adds to out[o] (+=); otherwise the instruction
   overwrites out[o] (=).

   The gradient rule: the first contribution to a gradient writes (=), later contributions add (+=). In
   programs that accumulate over micro-batches, the first contribution to a parameter's gradient also adds in
   all micro-batches but the first (`add_later`). The totals of losses follow this rule, too.

   Values of the tape hold the state of a step. The host writes the step's settings (tt__step_settings) into
   one value before it runs a segment. Instructions write the step's results (tt__results) into another value:
   ADD_COUNTS writes the counts of losses, CLIP the norm and the factor of the gradient, LOSS_SCALE the next
   loss scale.
   ======================================================================================================== */

/* Largest number of elements of a tensor. Within this limit, the bytes of a tensor and of an op's scratch
   memory for the tensor fit a size_t. tt__check_total checks the sum over all tensors of a program. */
#define TT__MAX_ELEMENTS (((int64_t)1 << 47) - 1)

struct tt_param {
    tt_context *ctx;
    char *name;
    int index, ndim;
    int64_t dims[4], size;
    tt_init init;
    bool frozen;
    bool factor;            /* a part of another weight: a low-rank factor, or A or B of an adapter */
    tt_rounding rounding;
    tt_dtype form;          /* dtype of a coded matrix (tt_param_store); TT_F32: no coded matrix */
    /* Source of the parameter's values until arena `owner` has memory: `read` if not NULL, else `init`. */
    tt_status (*read)(void *source, int64_t first, int64_t n, float *to);
    /* Reads bytes [first, first + n) of the parameter's coded matrix; NULL: the source has floats. */
    tt_status (*read_codes)(void *source, size_t first, size_t n, void *to);
    void (*release)(tt_context *ctx, void *source);
    void *source;
    /* Arena that holds the parameter's values; NULL until a program that uses the parameter is compiled. If
       two stages of a pipeline use the parameter, `second_owner` is the arena of the other stage. */
    struct tt__arena *owner, *second_owner;
    uint64_t stages;        /* bit s is set if pipeline stage s held the parameter when tt_compile began */
    struct tt_param *low_a, *low_b; /* factors (rank, in) and (out, rank) that tape code reads instead of the
                                       parameter; NULL: none */
    bool keeps_source; /* `source` is still needed: only one of `owner` and `second_owner` has memory */
};

/* Kind of a storage. STEP: settings or results of the step. CACHE: the rows of a tt_cache. */
typedef enum tt__storage {
    TT__TRANSIENT, TT__INPUT, TT__PARAMETER, TT__GRADIENT, TT__STATE, TT__STEP, TT__CACHE
} tt__storage;
/* User's mark on a value, from tt_keep or tt_recompute. */
typedef enum tt__mark { TT__UNMARKED, TT__MARKED_KEEP, TT__MARKED_AGAIN } tt__mark;
/* Memory that stores a value: the device's or the host's. The two are the same memory if the device is the
   CPU; instructions may then use both spaces. */
typedef enum tt__space { TT__DEVICE, TT__HOST, TT__SPACES } tt__space;
/* Layout of a tensor over the tensor ranks. WHOLE: each rank has the whole tensor (replicated). ROWS, COLS:
   each rank has its own rows or columns (sharded). The shards have equal sizes, unless the number of rows is
   that of an axis: then tt__shard gives the rows of each rank (tt__row_axis.parts). Instructions may leave a
   storage in two more layouts. PARTIAL: each rank has a summand of the tensor's shape, and the tensor is the
   sum over the ranks. ZEROS: all elements are 0; a storage of any other layout may start as ZEROS. */
typedef enum tt__split { TT__WHOLE, TT__ROWS, TT__COLS, TT__PARTIAL, TT__ZEROS } tt__split;
/* Shard of a tensor that a value or a placement has. Over the tensor ranks: `split` is WHOLE, ROWS or COLS,
   and the shape counts the elements of one rank. A view may be a rank's shard of the rows of a replicated
   storage. Over the data ranks: `of` is the number of elements of the tensor. If `unit` is not 0, tt__shard
   computes the shard from `of`, `unit` and `root`, and the shape is (1, elements of the largest shard). */
typedef struct tt__part {
    tt__split split;
    bool root;          /* member 0 has the whole tensor (see tt__shard) */
    int64_t unit, of;
} tt__part;

typedef struct tt__shape {
    tt_dtype dtype;
    int64_t rows, cols; /* rows: a fixed number, or the capacity of the axis */
    int32_t axis;       /* number of the axis; 0: the number of rows is fixed */
    int32_t extra;      /* actual number of rows = rows of the axis + extra (1 for sequence starts) */
} tt__shape;

typedef struct tt__tape_value {
    tt__shape shape;
    int64_t ld;         /* distance in elements between the starts of two rows in the storage */
    tt__storage storage;
    tt__space space;
    tt__part part;
    /* slots: number of slots of a storage, which are stored one after another; each slot has the gradients of
       one leaf of the tree of sums (src/ranks/threads.h). 0: one slot. slot: of a view, 1 + the number of its
       slot; 0: the slot of the micro-batch that runs. */
    int32_t slots, slot;
    bool host_copy;        /* temporary host copy of a device storage, for an update in the host's memory */
    /* Fields of a pipeline stage's storages. saved: the contents are saved from the forward of a micro-batch
       to the backward, or until another stage has received them. copies: number of micro-batches whose
       contents are saved at once; 0: one. */
    bool saved;
    int32_t copies;
    int32_t ends;       /* 1 + number of the pipeline stage whose last value this is; 0: none */
    bool elsewhere;     /* only other pipeline stages read the parameter */
    int tied[2];        /* pipeline stages that read the parameter, the lower first; tied[1] is 0 if only one
                           stage reads it */
    bool parted;        /* in a program: the place of the value or of its storage depends on the run
                           (tt__resolve_part) */
    int32_t base;       /* the value whose storage this value shares; the value itself unless it is a view */
    int64_t offset;     /* distance in elements from the start of the storage of `base` */
    int32_t param;      /* index in ctx->params of PARAMETER, GRADIENT and STATE values; else -1 */
    int state;          /* of a STATE value: number of the state of the optimizer or of the state's scales,
                           from 1; TT__EMA: the moving average; TT__PRUNED: the mask of
                           pruned weights; TT__MOVEMENT: their movements */
    bool row_state;     /* the STATE value is a row of numbers, not of the parameter's shape */
    int held;           /* 1 + the layout in which an arena holds the parameter; 0: no arena does */
    bool keep;          /* the user may read the value after the run */
    bool block_end;     /* the value ends a block (tt_block_end) and is never recomputed */
    bool offload;       /* of a storage: tt_offload has marked it */
    tt__mark mark;      /* set by tt_keep or tt_recompute */
    bool persistent;    /* the value keeps its contents from run to run */
    bool pinned_f32;    /* the value stays f32 in any precision, as statistics and losses do */
    bool residual;      /* the value is part of the residual stream (tt_compile_options.residual) */
    bool needs_grad;    /* the value depends on a trainable parameter */
    int32_t grad;       /* number of the value that holds the gradient; 0: none yet */
    /* Set by tt__index. producer: 1 + the first instruction that writes the value; 0: none. The other fields
       are for a storage, that is, for a base and its views together. uses: number of operands that read the
       storage. writes: number of results that write the storage. views: number of views. reader: the last
       instruction that reads the storage. writer: the last instruction that writes the storage. */
    int32_t producer, uses, writes, views, reader, writer;
    int32_t after;     /* of a persistent storage: the storage, of a higher number, that must be placed
                          directly after it; 0: none */
    int32_t arrival;    /* of an input: the value into which the host writes the next run's data
                           (src/passes/overlap.h); 0: the input itself */
    bool named;         /* tt_name or a pass has set the name */
    size_t place;       /* byte offset of the value in its region of the arena, set by the planner */
    char name[72];
} tt__tape_value;

/* Axis: a number of rows that may differ in each run. If `parts` is not 0, the rows are one rank's shard of
   the rows of axis `of`, divided over `parts` tensor ranks (tt__shard); a rank may have 0 rows. */
typedef struct tt__row_axis { char name[72]; int64_t capacity; int32_t of; int parts; } tt__row_axis;

struct tt_tape {
    tt_context *ctx;
    uint32_t number;                                /* number that each tt_value of this tape has in its field
                                                       `tape`; a copy of the tape has the same number */
    tt__tape_value *values; int n_values, cap_values;    /* element 0 means "none" */
    tt__instr *code; int n_code, cap_code;
    tt__row_axis *axes; int n_axes, cap_axes;           /* element 0 means "none" */
    int32_t *params; int n_params, cap_params;      /* value of each parameter, by tt_param.index; 0: none */
    bool shares_inputs;                             /* an input with the name of an earlier input is that
                                                       input (src/train/teacher.h) */
    uint32_t n_random;
    size_t alignment;                               /* alignment of storages in bytes, required by the kind of
                                                       device */
    bool host;                                      /* the device is a CPU, whose memory is the host's */
    bool accumulate;                                /* a step may have several micro-batches, on one rank or
                                                       on several */
    bool by_totals;                                 /* all losses have a total (tt_loss_total) */
    int data, slots;                                /* data: number of data ranks; slots: number of leaves of
                                                       the tree of sums (src/ranks/threads.h) on each data
                                                       rank */
    int zero;                                       /* tt_parallel.zero */
    bool unverified;                                /* the verifier skips this tape, which only serves an
                                                       estimate */
    bool early;                                     /* parameters are updated in the backward, as soon as
                                                       their gradients are final */
    bool on_host;                                   /* large parameters are updated in the host's memory */
    bool server, sums_micros;                       /* server: tt_parallel.server; sums_micros: gradients are
                                                       summed over ranks after each micro-batch, see
                                                       src/ranks/threads.h */
    int stages, stage;                              /* stages: number of pipeline stages; stage: number of
                                                       this tape's stage, from 0. Both fields are 0 without a
                                                       pipeline */
    int tensor;                                     /* number of tensor ranks; 0 and 1 mean one */
    /* Values of the step's settings and results. `totals`, `scale` and `clipped` are views of `results`:
       tt__totals, tt__scale_state, tt__clipped. 0: none. */
    int32_t run, results, totals, scale, clipped;
    int32_t counted;    /* value with the counts of losses on a rank, one part for each slot; the parts are
                           summed into `totals` later. 0: losses count into `totals` directly */
    /* f32 (trained parameters, 1): squared norm of each gradient. Parameters that the tensor ranks shard come
       first. 0: none. */
    int32_t squares;
    /* Largest magnitudes of fp8 tensors. fp8_history: f32 (tensors, 1 + TT__FP8_STEPS), of earlier steps.
       fp8_largest: f32 (1, tensors), of this step. 0: none. */
    int32_t fp8_history, fp8_largest;
    /* Set by the pass "offload", which copies the operands of a group of instructions from the host's memory
       and back. grouped: largest number of device bytes for the operands of a group of several instructions.
       cuts: number of groups that exist only because the limit of a group is below TT__OFFLOAD_TOGETHER
       bytes. */
    size_t grouped;
    int cuts;
    uint16_t *lists; int n_lists, cap_lists;        /* block lists of all block-sparse attention, see the
                                                       attribute `lists` */
    tt_status status;                               /* status of the first op that failed; `error` is its
                                                       message */
    char error[512];
};

/* Row of the table TT__OPS (src/backend/). The rules of an op are in src/ops/. */
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
#define TT__NAME(ACT, function, by_result) &#function[3], /* the function's name without "tt_" */
    static const char *const names[] = {"none", TT__ACTS(TT__NAME)};
#undef TT__NAME
    return names[act];
}

static const char *tt__instr_name(const tt__instr *i)
{
    return tt__is(i, TT__NAMED_BY_ACT) ? tt__act_name(i->attr.act) : tt__ops[i->op].name;
}
