#pragma once
#include "standard.h"
#include "context.h"
#include "params.h"

/* --------------------------------------------------------------------------------------------------- tape */

/* A value of a tape; id 0 is "none". `tape` identifies the tape, so that another tape's value is refused. */
typedef struct tt_value { int32_t id; uint32_t tape; } tt_value;

/* Makes an empty tape; NULL when out of memory. tt_compile copies it, so it may be freed afterwards. */
tt_tape *tt_tape_new(tt_context *ctx);
void tt_tape_free(tt_tape *t);

/* Returns TT_OK, or the error of the first op that failed, such as a wrong shape. After an error later ops do
   nothing, and tt_compile fails; this function tells the error earlier. */
tt_status tt_tape_status(const tt_tape *t);
void tt_name(tt_tape *t, tt_value v, const char *format, ...) TT_PRINTF(3, 4); /* names v in plans and
                                                                                  errors */
int64_t tt_value_rows(const tt_tape *t, tt_value v);  /* number of rows, of an axis its capacity; 0 if v is
                                                         not on the tape */
/* Returns the rows of v in the form that an op takes: their axis, or a fixed number; 0 if the tape has no
   such value. tt_input(t, "score", TT_F32, tt_value_axis(t, logits), 1) has as many rows as `logits`. */
int64_t tt_value_axis(const tt_tape *t, tt_value v);
int64_t tt_value_width(const tt_tape *t, tt_value v);

/* Returns an axis: a named number of rows with a capacity, whose actual number may differ in each run. Pass
   the result where an op takes rows, for example tt_axis(t, "tokens", 8192). A second call with the same name
   and capacity returns the same axis. */
int64_t tt_axis(tt_tape *t, const char *name, int64_t capacity);

/* Records an input (rows, width); rows is a number or an axis. tt_set gives the input data before each
   run. */
tt_value tt_input(tt_tape *t, const char *name, tt_dtype dtype, int64_t rows, int64_t width);
/* Records an input i32 (seqs + 1, 1): the first row of each sequence, then the number of rows. The numbers
   rise strictly. */
tt_value tt_seq_start(tt_tape *t, const char *name, int64_t seqs);
tt_value tt_param_value(tt_tape *t, tt_param *p); /* returns a parameter as an operand of ops; shape (n)
                                                     becomes (1, n) */
void tt_output(tt_tape *t, tt_value v); /* keeps v until the end of a run, for tt_get */
void tt_block_end(tt_tape *t, tt_value v); /* marks v as the end of a block, which
                                              tt_compile_options.recompute saves */
/* Stores v in the host's memory while nothing uses it, whatever tt_compile_options.offload says. v is a
   parameter, or a value of the forward that the backward reads; recompute then saves v. */
void tt_offload(tt_tape *t, tt_value v);
/* tt_keep saves v for the backward, and tt_recompute makes the backward recompute it from saved values,
   whatever tt_compile_options.recompute says; the bits are the same. The later of two marks counts. A mark
   changes nothing if the backward does not read v (such as an operand of a sum), or if v cannot be recomputed
   (inputs, parameters, losses, outputs, ends of blocks, values marked by tt_offload). */
void tt_keep(tt_tape *t, tt_value v);
void tt_recompute(tt_tape *t, tt_value v);

/* Records `y = x W^T + b`. x (rows, in), w (out, in), b (out) or NULL -> (rows, out) */
tt_value tt_linear(tt_tape *t, tt_value x, tt_param *w, tt_param *b);
typedef struct tt_matmul_options {
    bool untransposed; /* Set it if the rows of b, not its columns, run along the sum; default false: b is
                          transposed */
    float scale;       /* Set it to spare a tt_scale: a is multiplied by this number first; default 1 */
    float beyond;      /* Set it if something other than softmax and cross-entropy reads the result, and the
                          rows of b are an axis: the number in the columns beyond the rows of b; default -1e30
                          (-65504 in f16), so that softmax and cross-entropy ignore these columns */
} tt_matmul_options;
tt_matmul_options tt_matmul_options_default(void);

/* Records a product of two values, a b^T: a (rows, K), b (cols, K) -> (rows, cols). If the rows of b are an
   axis, cols is the axis' capacity; columns beyond the actual rows of b hold `beyond` and have no gradient.
   Do not use label_smoothing on the result, as it gives each column a share; the mean squared error and the
   cross-entropy of sigmoids divide by the capacity. With `untransposed`: a b, a (rows, K), b (K, cols) ->
   (rows, cols). If the rows of b are an axis, K is the axis' capacity, and columns of a beyond the actual
   rows of b are not read. NULL: defaults. */
tt_value tt_matmul(tt_tape *t, tt_value a, tt_value b, const tt_matmul_options *o);
/* Records a table lookup. ids i32 (rows, 1), table (vocab, D) -> (rows, D). An id outside [0, vocab) fails
   the run, and the error names the id. */
tt_value tt_embedding(tt_tape *t, tt_value ids, tt_param *table);
/* Records a lookup of the rows `ids + offset` of the table; shapes and errors as tt_embedding's. */
tt_value tt_embedding_offset(tt_tape *t, tt_value ids, tt_param *table, int offset);
/* Records `(x - mean) / sqrt(var + eps) * w + b` over each row (Ba et al. 2016). x (rows, D), w (D), b (D) or
   NULL */
tt_value tt_layernorm(tt_tape *t, tt_value x, tt_param *w, tt_param *b, float eps);
/* Records `x / sqrt(mean(x^2) + eps) * w`, with the mean over a row (Zhang, Sennrich 2019). x (rows, D), w
   (D), eps >= 0. If w has fewer elements, a divisor d of D, each group of d columns is normalised by itself
   and multiplied by w: with d columns a head, the norm of queries and keys in Qwen3 and Gemma 3. */
tt_value tt_rmsnorm(tt_tape *t, tt_value x, tt_param *w, float eps);
/* Records tt_rmsnorm with the weights offset + w: the offset is 1 in Gemma, whose weights begin at 0. */
tt_value tt_rmsnorm_offset(tt_tape *t, tt_value x, tt_param *w, float offset, float eps);
/* Records `exp(x) / sum(exp(x))` over each row. x (rows, D) -> (rows, D) */
tt_value tt_softmax(tt_tape *t, tt_value x);
/* Records `x / max(sqrt(sum(x^2)), eps)` over each row, as torch.nn.functional.normalize with p = 2. x (rows,
   D), eps > 0 -> (rows, D) */
tt_value tt_normalize(tt_tape *t, tt_value x, float eps);

/* Table of the activations: X(ACT, function, by_result). `function` records the activation of x (rows, D),
   element by element. by_result: the backward computes the slope from the result, otherwise from x. The
   values and slopes are functions act_ACT and slope_ACT of the CPU's and of CUDA's kernels. */
#define TT__ACTS(X) \
    X(GELU, tt_gelu, false)           /* x/2 (1 + erf(x / sqrt 2)) (Hendrycks, Gimpel 2016) */ \
    X(GELU_TANH, tt_gelu_tanh, false) /* tanh approximation of GELU, "gelu_new" */ \
    X(RELU, tt_relu, true)            /* max(x, 0) */ \
    X(TANH, tt_tanh, true) \
    X(SILU, tt_silu, false)           /* x / (1 + exp(-x)) */ \
    X(SIGMOID, tt_sigmoid, true)      /* 1 / (1 + exp(-x)) */
#define TT__DECLARE(ACT, function, by_result) tt_value function(tt_tape *t, tt_value x);
TT__ACTS(TT__DECLARE)
#undef TT__DECLARE

tt_value tt_add(tt_tape *t, tt_value a, tt_value b); /* b has a's shape, or is (1, D) and is added to every
                                                        row of a */
/* Records a product element by element. a (rows, D), b (rows, D), (rows, 1), (1, D) or (1, 1) -> (rows, D) */
tt_value tt_mul(tt_tape *t, tt_value a, tt_value b);
/* Records tt_mul(t, tt_silu(t, gate), up) as one op: the backward needs only gate and up, and in 16 bits
   silu(gate) is not rounded. gate, up (rows, D) -> (rows, D) (SwiGLU: Shazeer, "GLU variants improve
   transformer", 2020) */
tt_value tt_swiglu(tt_tape *t, tt_value gate, tt_value up);
tt_value tt_scale(tt_tape *t, tt_value x, float s); /* s x */
/* Records dropout. In training an element becomes zero with probability p, else x / (1 - p); p in [0, 1). The
   mask is a function of (seed, step, micro-batch, instruction, element) and is never stored. p is rounded to
   a multiple of 2^-16. Without training the result is x. */
tt_value tt_dropout(tt_tape *t, tt_value x, float p);

/* The columns of a head that form a pair: j and j + size / 2 (GPT-NeoX; LLaMA in transformers), or 2j and 2j
   + 1 (GPT-J; LLaMA in Meta's code). */
typedef enum tt_rotary_pairs { TT_ROTARY_HALVES, TT_ROTARY_NEIGHBOURS } tt_rotary_pairs;
/* Frequencies for sequences longer than in the pretraining. PLAIN: base^(-2j / size) for pair j. LINEAR:
   PLAIN / `factor` (Chen et al., "Extending context window of large language models via positional
   interpolation", 2023). LLAMA3 and YARN: a frequency between those of LINEAR and PLAIN. In LLAMA3 (Llama
   3.1) it depends on the pair's wavelength, in YARN on the pair's turns within `original` positions (Peng et
   al., "YaRN: Efficient context window extension of large language models", 2023). */
typedef enum tt_rotary_scaling {
    TT_ROTARY_PLAIN, TT_ROTARY_LINEAR, TT_ROTARY_LLAMA3, TT_ROTARY_YARN
} tt_rotary_scaling;

typedef struct tt_rotary_options {
    int heads;                 /* Set it to the heads of x, which divide its width; there is no default */
    int size;                  /* Set it if the model turns only the first `size` columns of each head, at
                                  most 512; default 0: all. With an odd size one more column turns, as in
                                  transformers' GPT-NeoX */
    tt_rotary_pairs pairs;     /* Set it if the model pairs neighbouring columns; default TT_ROTARY_HALVES */
    float base;                /* Set it if the model has another rotary base; default 10000 */
    tt_rotary_scaling scaling; /* Set it if sequences are longer than in the pretraining; default
                                  TT_ROTARY_PLAIN, which does not read the fields below */
    float factor;              /* Set it with a scaling other than PLAIN: positions are stretched by this
                                  factor, at least 1; default 1 */
    int original;              /* Set it with LLAMA3 and YARN to the positions of the pretraining; default
                                  8192 */
    float low, high;           /* Set them with LLAMA3 to low_freq_factor and high_freq_factor (default 1 and
                                  4 if both are 0), with YARN to beta_slow and beta_fast (default 1 and 32) */
    float magnitude;           /* Set it with YARN if the model multiplies the result by another number;
                                  default 0: 0.1 log(factor) + 1 */
} tt_rotary_options;
tt_rotary_options tt_rotary_options_default(int heads);

/* Records rotary positions (Su et al., "RoFormer", 2021): pair j of each head is turned by position *
   frequency j. x (rows, heads * head_size), positions i32 (rows, 1), in 0..2^24 - 1 -> (rows, heads *
   head_size) */
tt_value tt_rotary(tt_tape *t, tt_value x, tt_value positions, const tt_rotary_options *o);

typedef struct tt_attention_options {
    int heads;     /* Set it to the heads of q, which divide its width; there is no default. Heads of k and v
                      have as many columns as heads of q */
    bool causal;   /* Set it for decoders: a row attends to itself and to earlier rows of its sequence;
                      default false */
    float scale;   /* Set it if the model scales q k^T by another factor; default 0: 1 / sqrt(head size) */
    float dropout; /* Set it if the model overfits: the share of attention weights that is dropped in
                      training, at most 255/256, rounded to a multiple of 1/256; a rate above 0 is rounded to
                      1/256 at least; default 0 */
    int window;    /* Set it if the model limits attention to near rows, which saves time in long sequences;
                      default 0: no window. Row i attends to row j if i - window < j <= i, as with
                      sliding_window in transformers' Mistral and Qwen2; unless causal, also if i < j < i +
                      window. Time is proportional to rows * window (Beltagy et al., "Longformer", 2020) */
    float alibi;   /* Set it if the model has ALiBi instead of positions; default 0: no ALiBi. q k^T is
                      lowered by `alibi * slope of the head * distance of the rows` (Press et al., "Train
                      short, test long", 2022; the slopes of transformers' build_alibi_tensor, unrounded).
                      BLOOM has 1, Falcon `1 / sqrt(head size)` */
    bool alibi_rounded; /* Set it, with causal rows, to compute as transformers' Falcon does; default false.
                           Slopes, row numbers within the sequence, and their products are then rounded to
                           bf16 first; with at least 9 heads or 257 rows, the rounding changes results. "cuda"
                           then uses no tensor cores */
    /* Set it for block-sparse attention, in long sequences: the rows of a block; default 0: off (Zaheer et
       al., "Big bird", 2020). Block-sparse attention excludes causal, window and alibi. A sequence is divided
       into blocks of `block` rows; the last may have fewer. The first and the last block attend to all
       blocks, and all attend to them; block i also attends to blocks i - 1, i and i + 1 and to the blocks in
       its list. Time is proportional to the pairs of blocks that attend */
    int block;
    int dense;            /* Set it, with block, if short sequences should attend densely: the rows of the
                             longest such sequence; default 0 */
    int listed, list_rows; /* Set them, with block, if blocks also attend to far blocks. listed: number of
                              blocks in a list; list_rows: number of blocks, from a sequence's first on, that
                              have a list; default 0 */
    /* Set it with `listed` above 0: the lists (heads, list_rows, listed), in 0..65535, copied; default NULL,
       for `listed` 0. A block beyond the sequence's end is skipped. A block that is listed several times, or
       that is attended anyway, counts each time. */
    const int32_t *lists;
    bool lists_for_training; /* Set it if only training reads the lists: in a program that does not train each
                                listed block becomes block 0, as in transformers' BigBird; default false */
    int max_length; /* Set it if you know the rows of the longest sequence: a GPU then chooses its kernels by
                       this number, and a longer sequence is refused; default 0: any number */
} tt_attention_options;
tt_attention_options tt_attention_options_default(int heads);

/* Records `softmax(scale q k^T) v` within each sequence, per head; O(rows) memory (Dao et al. 2022).
   q (rows, heads * head_size), k, v (rows, key_heads * head_size), seq_start (seqs + 1, 1)
   -> (rows, heads * head_size). key_heads divides heads: each key head serves heads / key_heads consecutive
   heads of q (1: Shazeer, "Fast transformer decoding", 2019; else Ainslie et al., "GQA", 2023). */
tt_value tt_attention(tt_tape *t, tt_value q, tt_value k, tt_value v, tt_value seq_start,
                      const tt_attention_options *o);

/* Records attention in which only some rows are queries. row i32 (n, 1): for each row of q, the row of its
   token in k and v. q (n, heads * head_size), k, v (rows, key_heads * head_size) -> (n, heads * head_size) */
tt_value tt_attention_rows(tt_tape *t, tt_value q, tt_value k, tt_value v, tt_value seq_start, tt_value row,
                           const tt_attention_options *o);
/* Records a cache: rows that a program keeps from run to run, 0 at first; f32 (rows, width), or 16-bit if
   activations are. tt_attention_rows reads from a cache the keys and values of tokens of earlier runs. Only
   for programs that do not train. */
tt_value tt_cache(tt_tape *t, const char *name, int64_t rows, int64_t width);
/* Records a store of row r of x in row index[r] of a cache, for each r; a run must not store a row twice. x
   (n, width), index i32 (n, 1) -> the cache for ops recorded later */
tt_value tt_store_rows(tt_tape *t, tt_value cache, tt_value x, tt_value index);

tt_value tt_gather_rows(tt_tape *t, tt_value x, tt_value index); /* x (rows, D), index i32 (n, 1) -> (n, D) */
/* Records the mean of each sequence. x (rows, D), seq_start (seqs + 1, 1) -> (seqs, D) */
tt_value tt_mean_pool(tt_tape *t, tt_value x, tt_value seq_start);
/* Records the sum of each sequence. x (rows, D), seq_start (seqs + 1, 1) -> (seqs, D) */
tt_value tt_sum_pool(tt_tape *t, tt_value x, tt_value seq_start);
/* Records a copy of x in which `row` (a class or mask token) replaces the rows that index lists. x (rows, D),
   index i32 (n, 1), row (D) -> (rows, D) */
tt_value tt_set_rows(tt_tape *t, tt_value x, tt_value index, tt_param *row);

typedef struct tt_patch_options {
    int height, width, channels; /* Set them to the size of the images; channels 1..4; there is no default */
    int patch;                   /* Set it to the side of a patch, which divides height and width; there is no
                                    default */
    float mean[4], std[4];       /* Set them if the model was trained with other means and deviations of the
                                    channels: patches hold `(pixel / 255 - mean) / std`; default 0.5 */
} tt_patch_options;
tt_patch_options tt_patch_options_default(int height, int width, int channels, int patch);

/* Records patches of images as rows (Dosovitskiy et al. 2021). pixels u8 (seqs, height * width * channels):
   the top row of the image first, the channels of a pixel together. positions i32 (rows, 1): p > 0 is patch p
   - 1, counted along the rows of patches; 0 gives a row of zeros, for a class token. seq_start (seqs + 1, 1):
   the rows of each image; an image may have any of its patches, in any order.
   -> (rows, channels * patch * patch), in the order channel, y, x of a convolution's weight. */
tt_value tt_patches(tt_tape *t, tt_value pixels, tt_value positions, tt_value seq_start,
                    const tt_patch_options *o);
tt_value tt_slice(tt_tape *t, tt_value x, int64_t from, int64_t width); /* returns a view of `width` columns
                                                                           of x, from column `from` on */
/* Records a view of x as (rows, width), with as many elements as x. If rows is an axis, width must be the
   width of x. */
tt_value tt_reshape(tt_tape *t, tt_value x, int64_t rows, int64_t width);
typedef struct tt_cross_entropy_options {
    int ignore_index;      /* Set it if another target value than -100 marks rows that do not count; default
                              -100 */
    float label_smoothing; /* Set it, for example to 0.1, if the model is too sure of wrong answers, in [0,
                              1): targets become (1 - s) one-hot + s / classes; default 0 */
    tt_value weights;      /* Set it if rows do not count equally: their weights, an f32 (rows, 1)
                              input, >= 0; default none (all 1) */
    /* Set it if classes do not count equally: their weights, an f32 (1, classes) input, >= 0; default none. A
       row has the weight of its target's class; with smoothing, each class's share of the target has the
       weight of that class, as in PyTorch's CrossEntropyLoss. Excludes `weights`. */
    tt_value class_weights;
} tt_cross_entropy_options;
tt_cross_entropy_options tt_cross_entropy_options_default(void);

/* Records the cross-entropy: the sum over rows of `w_r * -log softmax(logits_r)[target_r]`, divided by the
   sum of the weights of the rows that count. logits (rows, classes), targets i32 (rows, 1) -> (1, 1). NULL:
   defaults. If the logits come from tt_linear, are read by no other op and need 16 MiB or more, at most 512
   rows of logits (2,048 on "cuda") are stored at a time, provided that gradients of parameters are f32. */
tt_value tt_cross_entropy(tt_tape *t, tt_value logits, tt_value targets, const tt_cross_entropy_options *o);
/* Records the cross-entropy of each row: -log softmax(logits_r)[target_r], or 0 where the target is -100.
   logits (rows, classes), targets i32 (rows, 1) -> f32 (rows, 1). Logits are stored as for tt_cross_entropy;
   the backward computes the logits of a chunk of rows a second time. */
tt_value tt_token_losses(tt_tape *t, tt_value logits, tt_value targets);
/* Records the cross-entropy with targets that are probabilities of all classes: a teacher's (Hinton et al.,
   "Distilling the knowledge in a neural network", 2015), or mixed labels. A row's loss is the sum over
   classes of `-target * log softmax(logits)`. The cross-entropy is the mean of the rows' losses, weighted by
   `weights`. logits, targets (rows, classes), weights (rows, 1) or none -> (1, 1). Targets are used as given,
   whatever they sum to, and get no gradient; no row counts as predicted right. */
tt_value tt_soft_cross_entropy(tt_tape *t, tt_value logits, tt_value targets, tt_value weights);
/* Records the mean over all elements of `(x - target)^2`, rows weighted by `weights` (rows, 1) or none -> (1,
   1) */
tt_value tt_mean_squared_error(tt_tape *t, tt_value x, tt_value target, tt_value weights);

typedef struct tt_sigmoid_cross_entropy_options {
    tt_value weights;          /* Set it if rows do not count equally: their weights, an f32 (rows, 1) input,
                                  >= 0; default none (all 1). A row with weight 0 does not count */
    tt_value positive_weights; /* Set it if few rows have a label: the factor of each label's positive part of
                                  the loss, an f32 (1, labels) input, >= 0; default none (all 1). PyTorch's
                                  BCEWithLogitsLoss calls it pos_weight */
} tt_sigmoid_cross_entropy_options;
tt_sigmoid_cross_entropy_options tt_sigmoid_cross_entropy_options_default(void);

/* Records the cross-entropy of sigmoids, for labels of which a row may have any number: torch.nn's
   BCEWithLogitsLoss. With p the label's positive weight, an element's loss is `-(p * target * log sigmoid(x)
   + (1 - target) * log(1 - sigmoid(x)))`; the result is the mean over all elements, rows weighted by
   `weights`. logits (rows, labels), targets f32 (rows, labels), 0..1 -> (1, 1). NULL: defaults. Targets get
   no gradient. A row counts as predicted right if each logit is above 0 exactly where its target is above
   0.5. */
tt_value tt_sigmoid_cross_entropy(tt_tape *t, tt_value logits, tt_value targets,
                                  const tt_sigmoid_cross_entropy_options *o);

/* Divides a loss and its gradient by `total` instead of by the number of targets of a run. loss: the result
   of one of the four losses above; total: f32 (1, 1) input, the sum of the weights of the loss's targets in
   the whole step, over all micro-batches and data ranks. Several losses in a program that accumulates, or on
   several data ranks, need totals: the backward of the first micro-batch mixes the gradients of the losses
   before later micro-batches are counted. The total is not compared with the targets. tt_scale and tt_add
   make a weighted sum of losses. */
void tt_loss_total(tt_tape *t, tt_value loss, tt_value total);

/* An array that tt_custom gives to its functions: rows of `width` numbers, one row directly after another.
   Floats of any precision come as TT_F32; an input of integers has its own dtype. */
typedef struct tt_custom_array { void *data; tt_dtype dtype; int64_t rows, width; } tt_custom_array;

/* An op whose kernels are the caller's functions on the CPU. Each run calls them with its rows, from the
   thread of each rank. The functions must be pure: recompute calls `forward` again, with the same inputs, for
   the same output. A function that returns an error fails the run, which then has updated nothing. */
typedef struct tt_custom_op {
    const char *name; /* names the op in plans and errors */
    /* Computes `out` from the n inputs. */
    tt_status (*forward)(void *user, const tt_custom_array *in, int n, const tt_custom_array *out);
    /* Computes the gradients `din` of the inputs from the inputs, the output and its gradient `dout`.
       din[k].data is NULL if input k needs no gradient. NULL: the op has no backward. */
    tt_status (*backward)(void *user, const tt_custom_array *in, int n, const tt_custom_array *out,
                          const tt_custom_array *dout, const tt_custom_array *din);
    void *user;       /* argument of `forward` and `backward` */
} tt_custom_op;
enum { TT_CUSTOM_INPUTS = 6 }; /* largest number of inputs of tt_custom */
/* Records an op of the caller: 1 to TT_CUSTOM_INPUTS inputs -> (rows, width), where rows is a number or an
   axis (tt_value_axis). *op is not copied: it must exist as long as programs of the tape. Arrays are planned
   as those of other ops, recompute and offload included. Other devices than "cpu" are refused when the
   program is compiled. Tensor ranks compute the op whole. */
tt_value tt_custom(tt_tape *t, const tt_custom_op *op, const tt_value *inputs, int n, int64_t rows,
                   int64_t width);
