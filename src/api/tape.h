#pragma once
#include "standard.h"
#include "context.h"
#include "params.h"

/* --------------------------------------------------------------------------------------------------- tape */

/* A tensor on a tape; id 0 is "none". `tape` tells the tape, so that a value of another one is refused. */
typedef struct tt_value { int32_t id; uint32_t tape; } tt_value;

tt_tape *tt_tape_new(tt_context *ctx);
void tt_tape_free(tt_tape *t);

/* The first wrong shape marks the tape: later ops do nothing, tt_compile fails. This tells it earlier. */
tt_status tt_tape_status(const tt_tape *t);
void tt_name(tt_tape *t, tt_value v, const char *format, ...) TT_PRINTF(3, 4); /* in plans and errors */
int64_t tt_value_rows(const tt_tape *t, tt_value v);  /* at capacity; 0 where the tape has no such value */
/* The rows of v as an op takes them: the axis that they are, or a fixed number; 0 where the tape has no such
   value. tt_input(t, "score", TT_F32, tt_value_axis(t, logits), 1) has as many rows as `logits`. */
int64_t tt_value_axis(const tt_tape *t, tt_value v);
int64_t tt_value_width(const tt_tape *t, tt_value v);

/* A named number of rows with a capacity; the actual number may differ in each run. Use the result where an
   op asks for rows. Example: tt_axis(t, "tokens", 8192). Of one name there is one axis: asked for again, with
   the same capacity, it is returned. */
int64_t tt_axis(tt_tape *t, const char *name, int64_t capacity);

tt_value tt_input(tt_tape *t, const char *name, tt_dtype dtype, int64_t rows, int64_t width);
/* An input i32 (seqs + 1, 1): the first row of each sequence, then the number of rows; strictly rising. */
tt_value tt_seq_start(tt_tape *t, const char *name, int64_t seqs);
tt_value tt_param_value(tt_tape *t, tt_param *p); /* a parameter as operand: 1-D (n) is (1, n) */
void tt_output(tt_tape *t, tt_value v); /* keep v until the end of a run, for tt_get */
void tt_block_end(tt_tape *t, tt_value v); /* v ends a block: tt_compile_options.recompute keeps it */
/* Whatever tt_compile_options.offload says, v lies in the host's memory while nothing uses it: a parameter,
   or what the backward reads of the forward, which recompute then keeps. */
void tt_offload(tt_tape *t, tt_value v);
/* What the backward reads of v is kept for it, or computed again from what is there, whatever
   tt_compile_options.recompute says: the same bits. Of two marks the later one counts. Where the backward
   does not read v (as what goes into a sum), or v cannot be computed again (inputs, parameters, losses,
   outputs, ends of blocks, what is marked by tt_offload), a mark changes nothing. */
void tt_keep(tt_tape *t, tt_value v);
void tt_recompute(tt_tape *t, tt_value v);

/* y = x W^T + b.  x (rows, in), w (out, in), b (out) or NULL -> (rows, out) */
tt_value tt_linear(tt_tape *t, tt_value x, tt_param *w, tt_param *b);
/* ids i32 (rows, 1), table (vocab, D) -> (rows, D). An id outside [0, vocab) fails the run and is named. */
tt_value tt_embedding(tt_tape *t, tt_value ids, tt_param *table);
/* ... rows ids + offset of the table */
tt_value tt_embedding_offset(tt_tape *t, tt_value ids, tt_param *table, int offset);
/* (x - mean) / sqrt(var + eps) * w + b over each row (Ba et al. 2016).  x (rows, D), w (D), b (D) or NULL */
tt_value tt_layernorm(tt_tape *t, tt_value x, tt_param *w, tt_param *b, float eps);
/* x / sqrt(mean(x^2) + eps) * w over each row (Zhang, Sennrich 2019).  x (rows, D), w (D), eps >= 0 */
tt_value tt_rmsnorm(tt_tape *t, tt_value x, tt_param *w, float eps);
tt_value tt_gelu(tt_tape *t, tt_value x);      /* x/2 (1 + erf(x / sqrt 2)) (Hendrycks, Gimpel 2016) */
tt_value tt_gelu_tanh(tt_tape *t, tt_value x); /* its tanh form, "gelu_new" */
tt_value tt_relu(tt_tape *t, tt_value x);
tt_value tt_tanh(tt_tape *t, tt_value x);
tt_value tt_silu(tt_tape *t, tt_value x);      /* x / (1 + exp(-x)) */
tt_value tt_add(tt_tape *t, tt_value a, tt_value b); /* same shape, or b (1, D): added to every row of a */
tt_value tt_mul(tt_tape *t, tt_value a, tt_value b); /* same shape; element by element */
/* tt_mul(t, tt_silu(t, gate), up) at once: the backward needs gate and up and nothing else, and in 16 bits
   silu(gate) is not rounded. gate, up (rows, D) -> (rows, D) (SwiGLU: Shazeer, "GLU variants improve
   transformer", 2020) */
tt_value tt_swiglu(tt_tape *t, tt_value gate, tt_value up);
tt_value tt_scale(tt_tape *t, tt_value x, float s);
/* Training: zero with probability p, else x / (1 - p); p in [0, 1). The mask is a function of (seed, step,
   micro-batch, instruction, element) and is never stored. p acts in steps of 2^-16. Without training: x. */
tt_value tt_dropout(tt_tape *t, tt_value x, float p);

/* Which columns of a head are a pair: j and j + size / 2 (GPT-NeoX; LLaMA as transformers has it), or 2 j and
   2 j + 1 (GPT-J; LLaMA as Meta has it). */
typedef enum tt_rotary_pairs { TT_ROTARY_HALVES, TT_ROTARY_NEIGHBOURS } tt_rotary_pairs;
/* For sequences longer than those of the pretraining: PLAIN: base^(-2 j / size); LINEAR: that over `factor`
   (Chen et al., "Extending context window of large language models via positional interpolation", 2023); or
   between the two: LLAMA3 by wavelength (Llama 3.1), YARN by turns within `original` positions (Peng et al.,
   "YaRN: Efficient context window extension of large language models", 2023). */
typedef enum tt_rotary_scaling {
    TT_ROTARY_PLAIN, TT_ROTARY_LINEAR, TT_ROTARY_LLAMA3, TT_ROTARY_YARN
} tt_rotary_scaling;

typedef struct tt_rotary_options {
    int heads;                 /* divides the width of x */
    int size;                  /* columns of each head that turn, its first, at most 512. Of an odd size one
                                  more turns, as with transformers' GPT-NeoX. 0: all */
    tt_rotary_pairs pairs;     /* default TT_ROTARY_HALVES */
    float base;                /* default 10000 */
    tt_rotary_scaling scaling; /* default TT_ROTARY_PLAIN. What follows is not read then */
    float factor;              /* at least 1. Default 1 */
    int original;              /* LLAMA3, YARN: positions of the pretraining. Default 8192 */
    float low, high;           /* LLAMA3: low_freq_factor and high_freq_factor, default 1 and 4 where both are
                                  0; YARN: beta_slow and beta_fast, 1 and 32 */
    float magnitude;           /* YARN: multiplies the result. Default 0: 0.1 log(factor) + 1 */
} tt_rotary_options;
tt_rotary_options tt_rotary_options_default(int heads);

/* Rotary positions (Su et al., "RoFormer", 2021): pair j of each head is turned by position * frequency j.
   x (rows, heads * head_size), positions i32 (rows, 1), in 0..2^24 - 1 -> (rows, heads * head_size) */
tt_value tt_rotary(tt_tape *t, tt_value x, tt_value positions, const tt_rotary_options *o);

typedef struct tt_attention_options {
    int heads;     /* of q, whose width it divides; those of k and v are as wide */
    bool causal;   /* a row sees itself and earlier rows of its sequence. Default false */
    float scale;   /* of q k^T; default 0: 1 / sqrt(head size) */
    float dropout; /* of the attention weights, in training: at most 255/256, rounded to a multiple of 1/256,
                      which is not 0 unless it is 0. Default 0 */
    int window;    /* row i sees row j where i - window < j <= i, as with sliding_window in transformers'
                      Mistral and Qwen2; unless causal, also where i < j < i + window. Time goes with rows *
                      window (Beltagy et al., "Longformer", 2020). Default 0: no window */
    float alibi;   /* scores fall by alibi * slope of the head * distance of the rows (Press et al., "Train
                      short, test long", 2022; the slopes of transformers' build_alibi_tensor, unrounded).
                      1: as BLOOM; 1 / sqrt(head size): as Falcon. Default 0: not at all */
    bool alibi_rounded; /* of causal rows: slopes, the numbers of rows in their sequence, and the products of
                           both are rounded to bf16 first, as transformers' Falcon does it, which differs from
                           9 heads or 257 rows on. "cuda" takes no tensor cores for it. Default false */
    /* Block-sparse attention (Zaheer et al., "Big bird", 2020), of rows that are neither causal nor in a
       window nor biased. A sequence is blocks of so many rows, of which the last may have fewer. The first
       and the last see all blocks and are seen by all; block i also sees blocks i - 1, i and i + 1 and those
       in its list. Time goes with the blocks that are seen. Default 0: not by blocks */
    int block;
    int dense;            /* sequences of at most so many rows are not taken by blocks. Default 0 */
    int listed, list_rows; /* blocks in a list; blocks of a sequence that have one, from its first on */
    /* (heads, list_rows, listed), in 0..65535, copied; may be NULL if `listed` is 0. A block that the
       sequence does not have is not seen; one that is listed and seen anyway counts as often. */
    const int32_t *lists;
    bool lists_for_training; /* a program that does not train sees block 0 in place of each listed one, as
                                transformers' BigBird does. Default false */
    int max_length; /* rows of the longest sequence that may come: a GPU chooses its kernels by it. A longer
                       one is refused. Default 0: any number */
} tt_attention_options;
tt_attention_options tt_attention_options_default(int heads);

/* softmax(scale q k^T) v within each sequence, per head; O(rows) memory (Dao et al. 2022).
   q (rows, heads * head_size), k, v (rows, key_heads * head_size), seq_start (seqs + 1, 1)
   -> (rows, heads * head_size). key_heads divides heads: each serves heads / key_heads of q that follow each
   other (1: Shazeer, "Fast transformer decoding", 2019; else Ainslie et al., "GQA", 2023). */
tt_value tt_attention(tt_tape *t, tt_value q, tt_value k, tt_value v, tt_value seq_start,
                      const tt_attention_options *o);

/* The same of some rows as queries: row i32 (n, 1) says which rows of the batch those of q are. q (n, heads *
   head_size), k, v (rows, key_heads * head_size) -> (n, heads * head_size) */
tt_value tt_attention_rows(tt_tape *t, tt_value q, tt_value k, tt_value v, tt_value seq_start, tt_value row,
                           const tt_attention_options *o);
/* Rows that a program keeps from run to run, 0 at first: f32 (rows, width), or of 16 bits where activations
   are. With tt_attention_rows: keys and values of tokens that earlier runs have seen. For programs that do
   not train. */
tt_value tt_cache(tt_tape *t, const char *name, int64_t rows, int64_t width);
/* Row index[r] of a cache becomes row r of x; no row twice in one run. x (n, width), index i32 (n, 1) -> the
   cache, for what is recorded behind it */
tt_value tt_store_rows(tt_tape *t, tt_value cache, tt_value x, tt_value index);

tt_value tt_gather_rows(tt_tape *t, tt_value x, tt_value index); /* x (rows, D), index i32 (n, 1) -> (n, D) */
/* x (rows, D) -> (seqs, D), the mean of each sequence. */
tt_value tt_mean_pool(tt_tape *t, tt_value x, tt_value seq_start);
/* x with `row` in the rows that index lists (class, mask tokens). x (rows, D), index i32 (n, 1), row (D) */
tt_value tt_set_rows(tt_tape *t, tt_value x, tt_value index, tt_param *row);

typedef struct tt_patch_options {
    int height, width, channels; /* of the images; channels 1..4 */
    int patch;                   /* side of a patch, divides height and width */
    float mean[4], std[4];       /* of each channel: patches hold (pixel / 255 - mean) / std. Default 0.5 */
} tt_patch_options;
tt_patch_options tt_patch_options_default(int height, int width, int channels, int patch);

/* Patches of images as rows (Dosovitskiy et al. 2021). pixels u8 (seqs, height * width * channels): rows of
   the image from the top, the channels of a pixel together. positions i32 (rows, 1): p > 0 is patch p - 1,
   counted along the rows of patches; 0 gives a row of zeros, for a class token. seq_start (seqs + 1, 1):
   which rows belong to which image; any selection of patches in any order.
   -> (rows, channels * patch * patch), in the order channel, y, x (that of a convolution's weight). */
tt_value tt_patches(tt_tape *t, tt_value pixels, tt_value positions, tt_value seq_start,
                    const tt_patch_options *o);
tt_value tt_slice(tt_tape *t, tt_value x, int64_t from, int64_t width); /* a view of columns from `from` on */
/* A view of as many elements: of fixed rows, or of an axis, whose rows stay whole (the same width). */
tt_value tt_reshape(tt_tape *t, tt_value x, int64_t rows, int64_t width);
typedef struct tt_cross_entropy_options {
    int ignore_index;      /* a target with this value counts for nothing. Default -100 */
    float label_smoothing; /* in [0, 1): target (1 - s) one-hot + s / classes. Default 0 */
    tt_value weights;      /* f32 (rows, 1) input, >= 0; default none (all 1) */
    /* f32 (1, classes) input, >= 0; default none. A row weighs as its target's class, and each class's share
       of the smoothed target as that class, as in PyTorch's CrossEntropyLoss. Not with `weights`. */
    tt_value class_weights;
} tt_cross_entropy_options;
tt_cross_entropy_options tt_cross_entropy_options_default(void);

/* Sum over rows of w_r * -log softmax(logits_r)[target_r], divided by the sum of the weights of the rows that
   count. logits (rows, classes), targets i32 (rows, 1) -> (1, 1). NULL: defaults. Logits that come from
   tt_linear, are read by nothing else and take 16 MiB or more are only stored 256 rows at a time, if the
   gradients of parameters are f32. */
tt_value tt_cross_entropy(tt_tape *t, tt_value logits, tt_value targets, const tt_cross_entropy_options *o);
/* Targets that are probabilities of all classes: of a teacher (Hinton et al., "Distilling the knowledge in a
   neural network", 2015), or of mixed labels. Sum over rows of w_r * sum over classes of -target * log
   softmax(logits_r), divided by the sum of the weights. logits, targets (rows, classes), weights (rows, 1) if
   given -> (1, 1). Targets are taken as they are, whatever they sum to, and get no gradient; no row counts as
   predicted right. */
tt_value tt_soft_cross_entropy(tt_tape *t, tt_value logits, tt_value targets, tt_value weights);
/* Mean over all elements of (x - target)^2, rows weighted by `weights` (rows, 1) if given. -> (1, 1) */
tt_value tt_mean_squared_error(tt_tape *t, tt_value x, tt_value target, tt_value weights);
