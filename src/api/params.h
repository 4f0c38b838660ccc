#pragma once
#include "standard.h"
#include "context.h"

/* ---------------------------------------------------------------------------------- dtypes and parameters */

typedef enum tt_dtype {
    TT_F32, TT_BF16, TT_F16, TT_I32, TT_U8, TT_DTYPE_COUNT, TT__DTYPE_MAX = 15 /* room for private dtypes */
} tt_dtype;

size_t tt_dtype_bytes(tt_dtype dtype);
const char *tt_dtype_name(tt_dtype dtype); /* "f32" */

typedef enum tt_init_kind { TT_INIT_ZEROS, TT_INIT_ONES, TT_INIT_NORMAL, TT_INIT_UNIFORM } tt_init_kind;

typedef struct tt_init { /* initial values of a parameter that neither a file nor tt_param_set fills */
    tt_init_kind kind;
    float scale; /* standard deviation of NORMAL (mean 0); half-width of UNIFORM */
} tt_init;

/* Makes a parameter of up to 4 dimensions. The name must be unique in the context. A parameter needs no
   memory until a program that uses it allocates its arena. Then the parameter is filled in place: from its
   file, from tt_param_set, or from `init` by a counter-based generator (the same values for every dtype,
   device and number of threads). */
tt_param *tt_param_new(tt_context *ctx, const char *name, int ndim, const int64_t *dims, tt_init init);
/* Set a prefix, such as "teacher.", before a second model is made or loaded whose parameters have names that
   the context has already, and set it to NULL afterwards. The names of parameters made in between begin with
   the prefix, of at most 63 bytes; names in the model's files have no prefix. */
tt_status tt_param_prefix(tt_context *ctx, const char *prefix);
const char *tt_param_name(const tt_param *p);
int tt_param_ndim(const tt_param *p);
const int64_t *tt_param_dims(const tt_param *p);
int64_t tt_param_size(const tt_param *p);
/* Copy tt_param_size floats to or from the parameter, converted to or from its dtype. */
tt_status tt_param_set(tt_param *p, const float *values);
tt_status tt_param_get(const tt_param *p, float *values);
/* Replaces a weight (out, in) by the factors B (out, rank) and A (rank, in) of its singular value
   decomposition: programs that are recorded afterwards train A and B, whose product is the best of this rank,
   and tt_linear computes x A^T B^T. rank: the largest rank; 0: no limit. error, in [0, 1): the rank is the
   smallest whose relative error |W - B A| / |W| (Frobenius norms) is at most `error`. A weight whose factors
   would not be smaller stays whole. The factors are the parameters NAME.low_A and NAME.low_B. tt_param_get
   and the functions that save a model give the product B A, so files have the weight's shape. The
   decomposition takes about a second for a weight whose smaller side is 384, and its time grows with the cube
   of that side. If the smaller side is longer than 512 and rank + 10 at most half of it, a randomised
   decomposition computes only the wanted singular values (Halko, Martinsson, Tropp, "Finding structure with
   randomness", 2011): in about 15 seconds for 4096 x 4096 and rank 64, with an error up to a hundredth above
   the smallest. Fails with TT_ERR_ARGUMENT if a program uses the weight: free programs and trainers first.
   Also fails so if the weight has factors or is a factor itself, is A or B of an adapter, is rounded
   (tt_param_round), or is stored in few bits (tt_param_store). */
tt_status tt_param_low_rank(tt_param *p, int rank, float error);
int tt_param_rank(const tt_param *p); /* the rank of the factors; 0: the parameter is whole */
tt_param *tt_param_find(tt_context *ctx, const char *name); /* NULL if no parameter has that name */
/* tt_param_at returns parameter k of a context, in the order of their creation, k from 0 to tt_param_count -
   1, or NULL if k is outside that range. */
int tt_param_count(const tt_context *ctx);
tt_param *tt_param_at(const tt_context *ctx, int k);

/* Marks the parameters whose names match a pattern as frozen or trainable. In the pattern '*' stands for any
   run of characters, '?' for one character, '[0-3a]' for one of 0, 1, 2, 3 and a. In programs compiled
   afterwards a frozen parameter has no gradient, no optimizer state and no work in the backward. The low-rank
   factors of a weight are marked with the weight. Returns the number of matching parameters. */
int tt_param_freeze(tt_context *ctx, const char *pattern, bool frozen);
bool tt_param_frozen(const tt_param *p);

/* Table of the roundings of weights: X(kind, name), with the values that a weight of a matrix (rows, columns)
   may have. */
#define TT__ROUNDINGS(X) \
    X(TT_ROUND_NONE, "none")       /* any number */ \
    X(TT_ROUND_INT8, "int8")       /* -127..127 times the largest magnitude of the row / 127 (Jacob et al., \
                                      "Quantization and training of neural networks for efficient \
                                      integer-arithmetic-only inference", 2018) */ \
    X(TT_ROUND_TERNARY, "ternary") /* -1, 0 or 1 times the mean magnitude of the matrix (Ma et al., "The Era \
                                      of 1-bit LLMs: BitNet b1.58", 2024) */ \
    X(TT_ROUND_BINARY, "binary")   /* -1 or 1 times the mean magnitude of the row (Rastegari et al., \
                                      "XNOR-Net", 2016) */
#define TT__KIND(kind, name) kind,
typedef enum tt_rounding { TT__ROUNDINGS(TT__KIND) } tt_rounding;
#undef TT__KIND

/* Sets the rounding of the two-dimensional parameters whose names match a pattern, as in tt_param_freeze,
   except those that have low-rank factors or that are stored in few bits, the factors themselves, and A and B
   of adapters. In programs compiled afterwards, tt_linear and the losses of its result read such a parameter
   rounded, from a copy that each run makes anew and that recompute "cheap" drops; other ops read the
   parameter itself, as tt_embedding does. The gradient passes straight through the rounding to the parameter,
   without a limit on the magnitude: the scales follow the weights, so that BinaryConnect's limit of 1 has no
   meaning here (Bengio et al., "Estimating or propagating gradients through stochastic neurons", 2013;
   Courbariaux et al., "BinaryConnect", 2015). Needs parallel.tensor 1. Returns the number of parameters whose
   rounding was set. */
int tt_param_round(tt_context *ctx, const char *pattern, tt_rounding kind);
tt_rounding tt_param_rounding(const tt_param *p);

/* Makes programs store a frozen matrix, whose first dimension counts its rows, in few bits. Only tt_linear
   reads such a matrix: as its weight, which each product widens to floats while it reads the codes. Call
   tt_param_store before a tape uses the parameter, or after the programs that use it were freed before they
   ran. Formats:
   "int8": 8 bits an element, and an f32 scale for each row: value = code * scale / 127, |code| <= 127, scale
       = largest magnitude in the row (Dettmers et al., "LLM.int8()", 2022).
   "nf4": 4.13 bits an element: one of the 16 numbers of NF4, times the scale of a block of 64 elements. The
       scales, less their mean, have 8 bits and an f32 scale for each 256 (Dettmers et al., "QLoRA", 2023;
       bitsandbytes' quantize_4bit with compress_statistics). The matrix's width must be a multiple of 64.
   "int4": 4.5 bits an element: value = (code - 8) * scale, code 0 to 15, with an f16 scale for each 32
       elements (llama.cpp's q4_0). The width must be a multiple of 32.
   NULL: as the program stores floats.
   tt_param_set and files then give the floats to be rounded, and tt_param_get returns the rounded numbers, as
   soon as a program has memory for the parameter. A program that trains refuses the parameter unless it is
   frozen (tt_param_freeze). Each tensor rank and each data rank has the whole matrix.
   TT_ERR_ARGUMENT: unknown format, no matrix, or a program has the parameter already; TT_ERR_SHAPE: the width
   does not fit. */
tt_status tt_param_store(tt_param *p, const char *format);

/* A parameter, or the shard of it that a rank updates, for a function that is an optimizer. */
typedef struct tt_custom_update {
    const char *name;      /* name of the parameter */
    float *parameter;      /* n numbers, to be updated in place */
    const float *gradient; /* n numbers: the gradient of the mean loss, after clipping */
    float *state[2];       /* n numbers of each optimizer state, 0 before the first step; NULL: no such
                              state */
    int64_t n, first;      /* first: index of parameter[0] in the whole parameter */
    int64_t step;          /* number of steps before the current step */
    float lr, weight_decay; /* this parameter's learning rate and weight decay, after no_decay, lr_rules and
                               layer_decay */
} tt_custom_update;

/* An optimizer that the caller writes, on the CPU (TT_OPTIMIZER_CUSTOM). It must outlive its programs. */
typedef struct tt_custom_optimizer {
    /* Updates a parameter. Several ranks call the function at once, each from its own thread. After an error
       the run fails, and can only continue from the last saved state. */
    tt_status (*update)(void *user, const tt_custom_update *u);
    void *user;            /* argument of `update` */
    int states;            /* number of states, 0 to 2 */
} tt_custom_optimizer;
