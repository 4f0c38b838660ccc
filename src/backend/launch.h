#pragma once
#include "../api/params.h"
#include "../api/tape.h"

#include <math.h>

/* Dtypes that users' tensors never have: f64 for sums that a step keeps; fp8 for operands of matrix products,
   E5M2 for gradients and E4M3 for all other operands; and the dtypes of coded matrices (tt_param_store). */
#define TT__F64 TT_DTYPE_COUNT
#define TT__E4M3 ((tt_dtype)(TT_DTYPE_COUNT + 1))
#define TT__E5M2 ((tt_dtype)(TT_DTYPE_COUNT + 2))
#define TT__INT8 ((tt_dtype)(TT_DTYPE_COUNT + 3))
#define TT__NF4 ((tt_dtype)(TT_DTYPE_COUNT + 4))
#define TT__INT4 ((tt_dtype)(TT_DTYPE_COUNT + 5))
static inline bool tt__is_fp8(tt_dtype dtype) { return dtype > TT__F64 && dtype <= TT_DTYPE_COUNT + 2; }
static inline bool tt__is_coded(tt_dtype dtype) { return dtype > TT_DTYPE_COUNT + 2; }

/* Table of the dtypes, in the order of the enum: X(dtype, name, bytes, whether it is a float that kernels
   compute with, its name in safetensors, its name in config.json). A coded matrix has no bytes of one
   element: tt__coded_parts_of counts its bytes. */
#define TT__DTYPES(X) \
    X(TT_F32, "f32", 4, true, "F32", "float32") \
    X(TT_BF16, "bf16", 2, true, "BF16", "bfloat16") \
    X(TT_F16, "f16", 2, true, "F16", "float16") \
    X(TT_I32, "i32", 4, false, NULL, NULL) \
    X(TT_U8, "u8", 1, false, NULL, NULL) \
    X(TT__F64, "f64", 8, false, NULL, NULL) \
    X(TT__E4M3, "e4m3", 1, false, NULL, NULL) \
    X(TT__E5M2, "e5m2", 1, false, NULL, NULL) \
    X(TT__INT8, "int8", 0, false, NULL, NULL) \
    X(TT__NF4, "nf4", 0, false, NULL, NULL) \
    X(TT__INT4, "int4", 0, false, NULL, NULL)

/* Number of float dtypes in the table. Kernels treat a float dtype that is neither f32 nor bf16 as f16. Each
   file with such kernels asserts this number, so that a fourth float dtype does not compile before the
   kernels know it. */
#define TT__IS_FLOAT(dtype, name, bytes, is_float, safetensors, config) + is_float
enum { TT__FLOATS = 0 TT__DTYPES(TT__IS_FLOAT) };
#undef TT__IS_FLOAT

/* Elements of a chunk. Kernels process long vectors (parameters, gradients, state) chunk by chunk. */
#define TT__CHUNK 4096

/* Constants of Adafactor's paper: what is added to squares; the power of the step's number that is its weight
   in the running means; the least root mean square that a parameter counts as. */
#define TT__ADAFACTOR_EPS 1e-30f
#define TT__ADAFACTOR_POWER (-0.8)
#define TT__ADAFACTOR_LEAST 1e-3

/* Elements of a block: numbers of an 8-bit optimizer state that share a scale. A chunk has whole blocks. */
#define TT__STATE_BLOCK 256
enum { TT__STATES = 2 }; /* max number of states that an optimizer's op keeps for a parameter */

/* A row-major matrix as a kernel reads it: row r starts at element r * ld. */
typedef struct tt__mat { void *data; tt_dtype dtype; int64_t rows, cols, ld; } tt__mat;

/* Coded matrices. An element has a code of 8 or 4 bits, and elements in a block share a scale. The codes of
   all elements come first, in row-major order; of two codes of 4 bits, the high half of the byte is the
   first. The scales follow:
   INT8: a row is a block, and its scale is an f32; value = code * scale / 127 (Dettmers et al., "LLM.int8()",
   2022).
   NF4: TT__NF4_BLOCK elements are a block; value = number of NF4 * scale (Dettmers et al., "QLoRA", 2023).
   The scale itself is coded: scale = map[code of 8 bits] * nested scale + offset. TT__NF4_NESTED scales share
   a nested scale. After the codes of the scales come the nested scales, the offset and the map of 256
   numbers, all f32.
   INT4: TT__INT4_GROUP elements are a block, and its scale is an f16; value = (code - 8) * scale (llama.cpp's
   q4_0). */
#define TT__NF4_NUMBERS { /* quantiles of the normal distribution (QLoRA, appendix E) */ \
    -1, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, \
    -0.18477343022823334f, -0.09105003625154495f, 0, 0.07958029955625534f, 0.16093020141124725f, \
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, \
    0.7229568362236023f, 1}
enum { TT__NF4_BLOCK = 64, TT__NF4_NESTED = 256, TT__INT4_GROUP = 32 };

/* Distances, in bytes from the first code of a coded matrix, to its scales and to what follows them; bytes:
   those of the whole matrix. */
typedef struct tt__coded_parts { int64_t scales, nested, offset, map, bytes; } tt__coded_parts;

static inline tt__coded_parts tt__coded_parts_of(tt_dtype dtype, int64_t rows, int64_t cols)
{
    const bool int8 = dtype == TT_DTYPE_COUNT + 3, nf4 = dtype == TT_DTYPE_COUNT + 4;
    const int64_t n = rows * cols, codes = int8 ? n : n / 2, blocks = n / TT__NF4_BLOCK;
    tt__coded_parts p = {(codes + 15) / 16 * 16, 0, 0, 0, 0};
    p.nested = p.scales + (blocks + 15) / 16 * 16;
    p.offset = p.nested + (blocks + TT__NF4_NESTED - 1) / TT__NF4_NESTED * 4;
    p.map = p.offset + 4;
    p.bytes = nf4 ? p.map + 256 * 4 : int8 ? p.scales + rows * 4 : p.scales + n / TT__INT4_GROUP * 2;
    return p;
}

typedef enum tt__act {
#define TT__ENUM(ACT, function, by_result) TT__ACT_##ACT,
    TT__ACT_NONE, TT__ACTS(TT__ENUM) TT__ACT_COUNT
#undef TT__ENUM
} tt__act;

#define TT__MAX_IN 9
#define TT__RUN_IN 8 /* in ops with TT__WITH_RUN: number of the operand that holds the step's settings      */
#define TT__UNSCALE_IN 4 /* in an fp8 product, operands 4 and 5 hold 1 / scale of operands 0 and 1          */
#define TT__MAX_OUT 6

/* Attributes: the settings that distinguish instructions of one op. X(type, name), then the ops that use the
   attribute; in other ops it is 0. The hash of a saved state reads every field of this list, so no type may
   have padding. */
#define TT__ATTRS(X) \
    X(int, act)           /* used by LINEAR and ACTIVATION: a tt__act */ \
    X(bool, untransposed) /* used by MATMUL: true: a b; false: a b^T */ \
    X(float, beyond)      /* used by MATMUL: the number in the columns beyond the rows of b */ \
    X(int, heads)         /* used by ATTENTION, ROTARY: number of heads; by RMSNORM: of groups of columns */ \
    X(int, key_heads)     /* ATTENTION */ \
    X(bool, causal)       /* ATTENTION */ \
    X(int, window)        /* used by ATTENTION; 0: no window */ \
    X(float, alibi)       /* ATTENTION */ \
    X(int, alibi_heads)   /* used by ATTENTION with alibi: heads of all tensor ranks together */ \
    X(bool, alibi_rounded) /* ATTENTION */ \
    X(int, block) X(int, dense) X(int, listed) X(int, list_rows) /* used by ATTENTION, see \
                                                                    tt_attention_options */ \
    X(int, lists)         /* used by ATTENTION: 1 + index of the first list in tt_tape.lists; 0: each list \
                             names block 0 */ \
    X(int, list_heads) X(uint32_t, lists_hash) X(bool, lists_for_training) /* used by ATTENTION; list_heads: \
                                                                              heads of all tensor ranks \
                                                                              together */ \
    X(bool, nesterov)     /* used by SGD and MUON_MOMENTUM */ \
    X(int, ignore_index)  /* used by CROSS_ENTROPY and TOKEN_LOSSES */ \
    X(bool, by_class)     /* used by CROSS_ENTROPY: weights belong to classes, not to rows */ \
    X(bool, sums)         /* used by MEAN_POOL and its backward: sums instead of means */ \
    X(bool, by_total)     /* used by losses and their backward: the divisor is operand TT__LOSS_TOTAL */ \
    X(bool, uncounted)    /* used by losses: the step's counts leave out the loss (tt__uncounted_loss) */ \
    X(float, scale)       /* factor of SCALE and ATTENTION; value of FILL; in ROTARY, -1 rotates back */ \
    X(bool, as_weights)   /* used by SCALE: `scale` is rounded to the dtype of 16-bit weights */ \
    X(bool, scaled)       /* used by optimizers: `scale` multiplies the learning rate */ \
    X(float, growth) X(float, backoff) X(int, interval) /* LOSS_SCALE */ \
    X(float, dropout)     /* used by DROPOUT and ATTENTION */ \
    X(float, eps)         /* used by LAYERNORM, RMSNORM, NORMALIZE and ADAM */ \
    X(float, weight_offset) /* used by RMSNORM: number that is added to the weights */ \
    X(float, smoothing)   /* CROSS_ENTROPY */ \
    X(float, weight_decay) /* used by optimizers */ \
    X(float, beta1)       /* used by ADAM, LION; the momentum of SGD, MUON_MOMENTUM; the decay of EMA */ \
    X(float, beta2)       /* used by ADAM and LION; in MUON the factor on the update */ \
    X(bool, decoupled)    /* used by ADAM: weight decay is decoupled, as in AdamW */ \
    X(float, clip_norm)   /* CLIP */ \
    X(tt_patch_options, image) /* PATCHES */ \
    X(tt_rotary_options, rotary) /* ROTARY */ \
    X(uint32_t, custom_hash) /* used by CUSTOM: hash of the name of the caller's op */ \
    X(int, out_axis) X(int, out_extra) X(int, out_width) X(int, out_rows) /* shape of CUSTOM's output, which \
                             has out_rows rows if out_axis is 0 (no axis) */ \
    X(int, offset)        /* number that EMBEDDING and EMBEDDING_BACKWARD add to ids */ \
    X(tt_dtype, narrow)   /* dtype to which products and LINEAR_... losses round f32 weights */

/* The schedule of PRUNE: tt_optimizer_options.prune and the fields below. */
typedef struct tt__pruning { float share; int every; int64_t begin, end; } tt__pruning;

typedef struct tt__attr {
#define TT__FIELD(type, name) type name;
    TT__ATTRS(TT__FIELD)
#undef TT__FIELD
    int max_length; /* used by ATTENTION: no sequence is longer, as the caller promises; 0: no promise. The
                       hash of a saved state leaves max_length out */
    tt__pruning pruning; /* used by PRUNE. The hash of a saved state has the options instead */
    int rounding;   /* used by ROUND: a tt_rounding. The hash of a saved state has the roundings of parameters
                       instead */
    const tt_custom_optimizer *optimizer; /* the caller's optimizer of a CUSTOM_UPDATE; else NULL */
    const tt_custom_op *custom; /* the caller's op of a CUSTOM or CUSTOM_BACKWARD; else NULL */
} tt__attr;
/* Returns the factor of an optimizer's instruction on the learning rate. */
static inline float tt__lr_factor(const tt__attr *a) { return a->scaled ? a->scale : 1; }

typedef char tt__image_has_no_padding[sizeof(tt_patch_options) == 12 * sizeof(float) ? 1 : -1];
typedef char tt__rotary_has_no_padding[sizeof(tt_rotary_options) == 10 * sizeof(float) ? 1 : -1];

/* Segments: contiguous ranges of a tape's instructions, in the order in which they run: the instructions of
   each micro-batch, of the backward of each micro-batch in a pipeline's stage, of each lap, and of each step.
   A lap has as many micro-batches as the tree of sums has leaves (see src/ranks/threads.h). */
typedef enum tt__segment {
    TT__EACH_MICRO, TT__EACH_BACKWARD, TT__EACH_LAP, TT__EACH_STEP, TT__SEGMENTS
} tt__segment;

/* Ranks: devices that run one program together, each on its shards of the tensors. The ranks form a grid of
   stages, data ranks and tensor ranks. Rank number = (stage * data ranks + data rank) * tensor ranks + tensor
   rank. A collective runs on all ranks of one line of the grid: its members. Members are numbered in the
   order of their ranks, but in a collective over stages from the last stage to the first. TIED: the stages
   `from` and `to` share a parameter. The two members are ranks of these stages with equal data rank and equal
   tensor rank. SLOTS: the members are the slots of one storage (tt__tape_value.slots). */
enum { TT__RANKS = 64 }; /* largest number of ranks */
typedef enum tt__over {
    TT__ALONE, TT__OVER_DATA, TT__OVER_TENSOR, TT__OVER_SLOTS, TT__OVER_STAGES, TT__OVER_TIED
} tt__over;
typedef enum tt__reduce { TT__SUM, TT__MAX, TT__MIN } tt__reduce;
typedef struct tt__move {
    tt__over over;
    tt__reduce reduce;
    int64_t unit;       /* elements that stay together: shards are whole units                              */
    bool root;          /* member 0's shard is the whole tensor, other shards are empty                     */
    int from, to;       /* from: number of the member that sends; to: number of the member that receives. A
                           RECV over stages has no operand: the sent value is on another tape */
} tt__move;

/* Computes the shard that `member` of `members` has of a tensor: elements [*first, *first + count) of its
   `elements` elements. Returns count. */
static inline int64_t tt__shard(int64_t elements, int64_t unit, bool root, int member, int members,
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

/* Phases of a collective. A collective is launched once for each phase, and all members meet at a barrier
   between the phases. In the first phase each member sums its shard or fetches the shard from the root. In
   the second phase the member copies the other members' shards. */
enum {
    TT__REDUCE_PHASE = 1, TT__SPREAD_PHASE = 2,
    /* Flags that only tt__rules.phases has. PIECES_IN: the members' operands are shards. PIECES_OUT: the
       members' results are shards. OF_FIRST: member 0 has all data. */
    TT__PIECES_IN = 4, TT__PIECES_OUT = 8, TT__OF_FIRST = 16
};

typedef struct tt__instr {
    int op;             /* TT__OP_...; -1: removed by the current pass                                      */
    int before;         /* set by the pass that inserts this instruction: number of the instruction before
                           which it goes */
    int32_t in[TT__MAX_IN], out[TT__MAX_OUT]; /* value ids; 0: absent                                       */
    uint32_t add, add_later;
    tt__attr attr;
    uint32_t random;    /* number of the stream of random numbers; a recomputed copy has the same stream */
    int factor[2];      /* matrix products: 1 + row of fp8_history for operands 0 and 1; 0: none            */
    tt__segment segment;
    int stage;          /* 1 + number of the instruction's pipeline stage; 0: unknown, or the only one */
    bool backward;      /* emitted by autodiff, or copied by recompute from an instruction that autodiff
                           emitted */
    bool recomputed;    /* a copy that recomputes a value                                                   */
    bool always;        /* runs also on ranks without a micro-batch                                         */
    bool later;         /* runs only in the micro-batches in which add_later adds to the result of an earlier
                           micro-batch */
    bool with_next;     /* launched together with the next instruction, which has the same op
                           (tt__backend.launch) */
    bool on_host;       /* the CPU's kernel runs the instruction in the host's memory, even with a GPU      */
    int stream;         /* stream of the instruction. If it is not TT__COMPUTE_STREAM, the work begins here
                           and ends at a WAIT */
    tt__move move;      /* how a collective moves data                                                      */
    /* Bits (1 << operand) of the operands that count once in a sum over the tensor ranks, such as the bias of
       partial sums: only tensor rank 0 is launched with these operands. */
    uint32_t once;
    int slot;           /* 1 + number of the instruction's slot of gradients; 0: none                       */
    size_t workspace;   /* bytes of scratch memory of the instruction; workspace_place: place of this memory
                           in the arena */
    size_t workspace_place;
} tt__instr;
