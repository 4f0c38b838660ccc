#pragma once
#include "../api/params.h"
#include "../api/tape.h"

#include <math.h>

/* Dtypes that no tensor of a user has: that of sums that a step keeps, and fp8 for what products read, E5M2
   for gradients and E4M3 for all else. */
#define TT__F64 TT_DTYPE_COUNT
#define TT__E4M3 ((tt_dtype)(TT_DTYPE_COUNT + 1))
#define TT__E5M2 ((tt_dtype)(TT_DTYPE_COUNT + 2))
static inline bool tt__is_fp8(tt_dtype dtype) { return dtype > TT__F64; }

/* Every dtype, in the order of the enum: X(dtype, name, bytes, is a float that kernels compute on, and then
   its names in safetensors and config.json). */
#define TT__DTYPES(X) \
    X(TT_F32, "f32", 4, true, "F32", "float32") \
    X(TT_BF16, "bf16", 2, true, "BF16", "bfloat16") \
    X(TT_F16, "f16", 2, true, "F16", "float16") \
    X(TT_I32, "i32", 4, false, NULL, NULL) \
    X(TT_U8, "u8", 1, false, NULL, NULL) \
    X(TT__F64, "f64", 8, false, NULL, NULL) \
    X(TT__E4M3, "e4m3", 1, false, NULL, NULL) \
    X(TT__E5M2, "e5m2", 1, false, NULL, NULL)

/* Kernels take a float that is neither f32 nor bf16 for f16. Each file with such kernels checks that this
   number is the one that it knows: a fourth float does not compile before they know it. */
#define TT__IS_FLOAT(dtype, name, bytes, is_float, safetensors, config) + is_float
enum { TT__FLOATS = 0 TT__DTYPES(TT__IS_FLOAT) };
#undef TT__IS_FLOAT

/* Long vectors (parameters, their gradients and state) are worked on in chunks of this many elements. */
#define TT__CHUNK 4096

/* A row-major matrix as a kernel sees it: row r starts at element r * ld. */
typedef struct tt__mat { void *data; tt_dtype dtype; int64_t rows, cols, ld; } tt__mat;

typedef enum tt__act {
    TT__ACT_NONE, TT__ACT_GELU, TT__ACT_GELU_TANH, TT__ACT_RELU, TT__ACT_TANH, TT__ACT_SILU
} tt__act;

#define TT__MAX_IN 9
#define TT__RUN_IN 8 /* the operand that is the step's settings, of ops with TT__WITH_RUN                   */
#define TT__UNSCALE_IN 4 /* and the next: of an fp8 product, what its operands are to be multiplied by      */
#define TT__MAX_OUT 6

/* What distinguishes two instructions of the same op. X(type, name): 0 where an op does not use it. What a
   state is hashed over is read from this list, so a type may have no padding. */
#define TT__ATTRS(X) \
    X(int, act)           /* tt__act: LINEAR, ACTIVATION */ \
    X(int, heads)         /* ATTENTION, ROTARY */ \
    X(int, key_heads)     /* ATTENTION */ \
    X(bool, causal)       /* ATTENTION */ \
    X(int, window)        /* ATTENTION; 0: none */ \
    X(float, alibi)       /* ATTENTION */ \
    X(int, alibi_heads)   /* ATTENTION with alibi: heads of all tensor ranks */ \
    X(bool, alibi_rounded) /* ATTENTION */ \
    X(int, block) X(int, dense) X(int, listed) X(int, list_rows) /* ATTENTION; tt_attention_options' */ \
    X(int, lists)         /* ATTENTION: one more than their first in tt_tape.lists; 0: all list block 0 */ \
    X(int, list_heads) X(uint32_t, lists_hash) X(bool, lists_for_training) /* ATTENTION; list_heads: of all \
                             tensor ranks */ \
    X(bool, nesterov)     /* SGD */ \
    X(int, ignore_index)  /* CROSS_ENTROPY */ \
    X(bool, by_class)     /* CROSS_ENTROPY: the weights are those of classes, not of rows */ \
    X(float, scale)       /* SCALE, ATTENTION; value of FILL; ROTARY: -1 turns back */ \
    X(float, growth) X(float, backoff) X(int, interval) /* LOSS_SCALE */ \
    X(float, dropout)     /* DROPOUT, ATTENTION */ \
    X(float, eps)         /* LAYERNORM, RMSNORM, ADAM */ \
    X(float, smoothing)   /* CROSS_ENTROPY */ \
    X(float, weight_decay) /* SGD, ADAM */ \
    X(float, beta1)       /* ADAM; SGD: momentum */ \
    X(float, beta2)       /* ADAM */ \
    X(bool, decoupled)    /* ADAM: AdamW's decay */ \
    X(float, clip_norm)   /* CLIP */ \
    X(tt_patch_options, image) /* PATCHES */ \
    X(tt_rotary_options, rotary) /* ROTARY */ \
    X(int, offset)        /* EMBEDDING, EMBEDDING_BACKWARD: of the table's rows */ \
    X(tt_dtype, narrow)   /* LINEAR, LINEAR_DX, LINEAR_CROSS_ENTROPY: f32 w is rounded to this when read */

typedef struct tt__attr {
#define TT__FIELD(type, name) type name;
    TT__ATTRS(TT__FIELD)
#undef TT__FIELD
    int max_length; /* ATTENTION; a promise about inputs, which two programs need not share */
} tt__attr;
typedef char tt__image_has_no_padding[sizeof(tt_patch_options) == 12 * sizeof(float) ? 1 : -1];
typedef char tt__rotary_has_no_padding[sizeof(tt_rotary_options) == 10 * sizeof(float) ? 1 : -1];

/* What a segment, a contiguous range of a tape's instructions, is run for. They follow in this order. Of the
   stages of a pipeline the backwards of micro-batches are a segment of their own. A lap is as many micro-
   batches as the tree of sums has leaves (see src/ranks/threads.h). */
typedef enum tt__segment {
    TT__EACH_MICRO, TT__EACH_BACKWARD, TT__EACH_LAP, TT__EACH_STEP, TT__SEGMENTS
} tt__segment;

/* Ranks: devices that run one program together, each on its part of the tensors. Rank number = (stage * data
   ranks + data rank) * tensor ranks + tensor rank. A collective instruction runs on all ranks along an axis
   at once: its members, numbered along that axis; of stages, from the last on. TIED: those of two stages,
   number `from` and `to`. SLOTS: on the slots of one storage instead (tt__value.slots). */
enum { TT__RANKS = 64 }; /* the most that run together */
typedef enum tt__over {
    TT__ALONE, TT__OVER_DATA, TT__OVER_TENSOR, TT__OVER_SLOTS, TT__OVER_STAGES, TT__OVER_TIED
} tt__over;
typedef enum tt__reduce { TT__SUM, TT__MAX, TT__MIN } tt__reduce;
typedef struct tt__move {
    tt__over over;
    tt__reduce reduce;
    int64_t unit;       /* elements that are never parted: pieces are whole units                           */
    bool root;          /* the piece of member 0 is all, of the others nothing                              */
    int from, to;       /* members: SEND and RECV. RECV over stages has no operand: it is another tape's    */
} tt__move;

/* The elements [*first, *first + count) of `elements` that are the piece of one of `members`; count. */
static inline int64_t tt__piece(int64_t elements, int64_t unit, bool root, int member, int members,
                                int64_t *first)
{
    const int64_t units = (elements + unit - 1) / unit;
    int64_t from = unit * (root ? (member ? units : 0) : units * member / members);
    int64_t to = unit * (root ? units : units * (member + 1) / members);
    from = from < elements ? from : elements;
    to = to < elements ? to : elements;
    *first = from;
    return to - from;
}

/* A collective is launched once for each of its phases, with all members at the same one in between: first
   all members sum, or fetch from the root, their own piece; then each copies the others' pieces. */
enum {
    TT__REDUCE_PHASE = 1, TT__SPREAD_PHASE = 2,
    /* of tt__rules.phases alone: members' operands, or results, are pieces; all is of member 0 */
    TT__PIECES_IN = 4, TT__PIECES_OUT = 8, TT__OF_FIRST = 16
};

typedef struct tt__instr {
    int op;             /* TT__OP_; -1: dropped by a pass that is under way                                 */
    int before;         /* in a pass: inserted before this instruction                                      */
    int32_t in[TT__MAX_IN], out[TT__MAX_OUT]; /* value ids; 0: operand absent                               */
    uint32_t add, add_later;
    tt__attr attr;
    uint32_t random;    /* its stream of random numbers; a recomputed copy has the same                     */
    int factor[2];      /* of a product: one more than an operand's row of fp8_history; 0: it has none      */
    tt__segment segment;
    int stage;          /* one more than that of a pipeline that it is of; 0: not known, or there is one    */
    bool backward;      /* autodiff emitted it, or recompute for one that autodiff emitted                  */
    bool again;         /* a copy that recomputes                                                           */
    bool always;        /* ranks without a micro-batch run it too                                           */
    bool later;         /* runs only where add_later adds: when earlier micro-batches have left something   */
    bool with_next;     /* runs together with the next instruction, of the same op: see tt__backend.launch */
    bool on_host;       /* the CPU's kernel runs it in the host's memory, whatever the device is            */
    int stream;         /* what is not of TT__COMPUTE_STREAM is only started here, and ends at its WAIT    */
    tt__move move;      /* of a collective                                                                  */
    /* Operands (1 << operand) that count once in a sum over the tensor ranks, as the bias of partial sums:
       tensor rank 0 alone is launched with them, the others are without. */
    uint32_t once;
    int slot;           /* one more than the slot of gradients that it works on; 0: it is not of one        */
    size_t workspace;   /* bytes of scratch while it runs, and their place                                  */
    size_t workspace_place;
} tt__instr;
