/* tinytrain.h - trains transformers from C                           MIT license, at the end of the file

   WHAT IT IS
     One header that trains transformer models on the CPU: copy it into your project, no other file and no
     library but libc, libm and pthreads. A training step is a straight-line program that is known before it
     runs: ops are recorded on a tape, differentiated, rewritten by passes, and placed in one arena whose size
     is known before anything is allocated.

   DO THIS
     In exactly one C or C++ file, before other includes:

         #define TINYTRAIN_IMPLEMENTATION
         #include "tinytrain.h"

     and link with -lm -lpthread. Six lines to a first training step of a linear classifier (README.md has a
     whole program around such lines, which tests/check_readme.py builds and runs):

         tt_tape *t = tt_tape_new(ctx);
         tt_value x = tt_input(t, "x", TT_F32, 64, 16), y = tt_input(t, "y", TT_I32, 64, 1);
         tt_value loss = tt_cross_entropy(t, tt_linear(t, x, w, b), y, NULL);
         tt_program *p = tt_compile(t, loss, NULL);
         tt_set(p, x, features, 64), tt_set(p, y, classes, 64);
         tt_step(p, 1e-3f, &stats);

   COMPILE-TIME OPTIONS, to be defined in the file with the implementation
     TINYTRAIN_FILENAME         the header's name, if you renamed it, for it includes itself ("tinytrain.h")
     TINYTRAIN_ALLOW_FAST_MATH  does not refuse -ffast-math, which breaks NaN checks and rounding
     TINYTRAIN_NO_AVX512, TINYTRAIN_NO_AVX2
                                leaves these instruction sets out (NO_AVX2: both), for faster debug builds
     TINYTRAIN_CBLAS            a CBLAS (<cblas.h>; link one, for example -lopenblas) multiplies matrices of
                                fp32, except those of few rows. Its threads are its own (OPENBLAS_NUM_THREADS)
     TINYTRAIN_CUDA             device "cuda" runs: compile tinytrain_cuda.cu with nvcc and link it, cublasLt
                                and cudart
     NDEBUG                     the verifier, which checks the program after each pass, is off by default
     A file that is a backend, as tinytrain_cuda.cu, defines TINYTRAIN_BACKEND instead (>>backend).
     Needs gcc >= 9 or clang >= 11 (vector extensions) and POSIX (Linux, macOS). Compile with optimisation
     (-O2). No -march flag is needed: the instruction set is chosen at run time, and so is how bf16 matrices
     are multiplied. TINYTRAIN_ISA and TINYTRAIN_BF16 in the environment force one (tt_context_options).
     With TINYTRAIN_CUDA_SYNC=1 in the environment "cuda" waits after each op and errors name the op.

   VENDORING
     One file      copy tinytrain.h (and tinytrain_cuda.cu for GPUs). The file with the implementation
                   includes it before any system header, as it defines _GNU_SOURCE; with -std=gnu99 or later,
                   or in C++, the place is free.
     CMake 3.16    add_subdirectory or FetchContent of the repository, or find_package(tinytrain) after an
                   install: target_link_libraries(app PRIVATE tinytrain::tinytrain) brings the folder of the
                   header, libm and threads. tinytrain::cuda is a library of tinytrain_cuda.cu that brings
                   TINYTRAIN_CUDA too; it is there with -DTINYTRAIN_CUDA=ON, or set(TINYTRAIN_CUDA ON) before,
                   and needs a CUDA compiler.
     pkg-config    `make install` or `cmake --install`; pkg-config --cflags --libs tinytrain. The path of
                   tinytrain_cuda.cu is pkg-config --variable=cuda_source tinytrain.
     Warnings      The header has none under -Wall -Wextra -Wpedantic -Wconversion -Wshadow (gcc and clang;
                   C99, C11, C++17, C++20), nor under -Wold-style-cast, which the implementation turns off
                   for itself: it is C.

   THREE LEVELS
     models    tt_bert_load or tt_vit_load, tt_loader_new or tt_image_loader_new, tt_trainer_new, tt_fit (or
               tt_train_batch and tt_evaluate), tt_predict, tt_bert_save or tt_vit_save. See
               examples/distilbert_imdb.c and examples/vit_l16.c.
     tape      your own model: tt_param_new, a function that records ops; tt_compile, tt_set, tt_step, tt_get;
               tt_program_save, tt_program_load. As a tt_model with a tt_source of data, tt_fit trains it.
     ops       a row in TT__OPS (>>backend), its block in >>ops (recorder, shape rule, backward), a CPU kernel
               (>>cpu), CUDA's (tinytrain_cuda.cu), and one line in each of the two generic tests
               (tests/test_ops.c).

   ROWS
     Activations are (rows, width); rows are the tokens of all sequences one after another, without padding.
     Attention and pooling read seq_start, the first row of each sequence. Rows have a capacity when recorded
     and a number in each run.
     What is read of some rows only is computed for these only: tt_gather_rows moves up through ops that work
     row by row and through the queries of attention. So a classifier that reads [CLS] skips most of its last
     layer. It gets what all rows would give, up to rounding (in 16 bits, operands of a loss are not rounded).

   MEMORY
     tt_compile says how much a program needs (tt_program_plan, tt_plan_text, tt_plan_svg) and allocates
     nothing, even for a kind of device that is not there. tt_allocate, or the first tt_set, allocates the
     arena, exactly that large; a step allocates nothing (but a CBLAS may). A program that shares another's
     arena (evaluation) costs the larger of the two, not the sum. The arena is released with the last of its
     programs and parameters: by tt_close, when parameters live there.

   DETERMINISM
     The same inputs, seed, options and instruction set give the same bits, for any number of threads, after a
     restart from a saved state, for any placement, and whatever the caller's floating-point mode (rounding,
     subnormals). Random numbers are functions of (seed, step, micro-batch, instruction, element). Different
     devices and instruction sets, and dot products or tiles of bf16 against conversion, differ by rounding.
     With TINYTRAIN_CBLAS all of this is as the library has it.

   GRADIENTS
     A loss is a mean over its targets: those of all micro-batches of a step together. tt_step says what
     becomes of a gradient or loss that is not finite. With f16 ("16-mixed", "16-true") the backward starts
     from a loss scale (tt_loss_scale) instead of 1, so that small gradients do not vanish, and the update
     divides it out again: norms, tt_get_gradient and the optimizer see true gradients.

   THREADS
     A context has a pool of threads that sleep when idle. Use a context from one thread at a time; contexts
     do not know of each other. A tokenizer may be used by several threads at once. Threads need 256 KB of
     stack.

   ERRORS
     Functions return tt_status or NULL; tt_error(ctx) is one sentence that names the culprit and what to do.
     Nothing here exits, aborts or prints; the default logger writes warnings and errors to stderr.

   LIMITS
     A program runs on one device; "cuda" needs compute capability 8.0. Little-endian machines. At most 4
     dimensions for parameters, 2 for activations; 2^31 rows. Products of matrices add up in fp32 whatever the
     dtype of these; dot products and tiles of bf16 take subnormals as 0, dot products on Arm round to odd.
     Tiles (AMX) are used where Linux lets the process have them: it refuses if a thread has an alternate
     signal stack too small to save them, and afterwards takes no such stack. Cross-entropy with 16-bit
     gradients, or of logits that something else reads too, holds the logits whole.

   SECTIONS (search for the tag)
     >>api  >>backend  >>base  >>tape  >>ops  >>passes  >>planner  >>cpu  >>context  >>compile  >>run
     >>reports  >>formats  >>models  >>trainer  >>unicode
     Each stands only on those before it, but for >>formats, which reads the tables of >>unicode. */

/* Under -std=c99 the C library's headers show POSIX (sigset_t, clock_gettime, pread) and syscall only if they
   are asked to before the first of them is read. That one defines _FEATURES_H, in glibc and in musl; what it
   shows can be told from __USE_MISC and __USE_XOPEN2K8 in glibc, from _GNU_SOURCE and _BSD_SOURCE in musl. */
#if defined(TINYTRAIN_IMPLEMENTATION) && defined(_FEATURES_H) && \
    !(defined(__USE_MISC) && defined(__USE_XOPEN2K8)) && \
    (defined(__GLIBC__) || !(defined(_GNU_SOURCE) || defined(_BSD_SOURCE)))
#error "tinytrain: headers before this one hide POSIX: include it first, or use -D_GNU_SOURCE or -std=gnu99"
#undef TINYTRAIN_IMPLEMENTATION /* so that this is the only error */
#endif
#if defined(TINYTRAIN_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif

#ifndef TINYTRAIN_H
#define TINYTRAIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TT_VERSION "0.1.0"

/* ===========================================================================================================
   PUBLIC API                                                                                            >>api
   Shapes are written (rows, D): row-major, last dimension contiguous. Sizes are in elements unless a name
   ends in _bytes. Functions that can fail return a tt_status (or NULL) and leave a sentence in tt_error().
   ======================================================================================================== */

/* ------------------------------------------------------------------------------------- status and context */

typedef enum tt_status {
    TT_OK = 0,
    TT_ERR_ARGUMENT,    /* a value outside its documented range, or a contradiction between options */
    TT_ERR_SHAPE,       /* a tensor of the wrong shape or dtype */
    TT_ERR_MEMORY,      /* the allocator returned NULL */
    TT_ERR_BUDGET,      /* the plan does not fit memory_budget */
    TT_ERR_FILE,        /* a file could not be opened, read, written, synced or renamed */
    TT_ERR_FORMAT,      /* a file's content is not what its format prescribes */
    TT_ERR_NUMERIC,     /* a loss or gradient that is not finite */
    TT_ERR_UNSUPPORTED, /* an op, dtype or configuration that this build does not have */
    TT_ERR_DEVICE,      /* a device is not there, or failed */
    TT_ERR_INTERNAL     /* the verifier found a program that no user input should produce: please report it */
} tt_status;

const char *tt_status_name(tt_status status); /* "TT_ERR_SHAPE" */

typedef struct tt_context tt_context; /* owns threads, hooks and parameters; use from one thread at a time */
typedef struct tt_tape tt_tape;       /* a recorded program, not yet compiled */
typedef struct tt_program tt_program; /* a compiled program: instructions with places in one arena */
typedef struct tt_param tt_param;     /* a named tensor that outlives programs */

/* Marks a function that formats as printf: argument `text`, the format, and from `first` on (0: va_list). */
#ifdef __GNUC__
#define TT_PRINTF(text, first) __attribute__((__format__(__printf__, text, first)))
#else
#define TT_PRINTF(text, first)
#endif

typedef enum tt_log_level { TT_LOG_DEBUG, TT_LOG_INFO, TT_LOG_WARNING, TT_LOG_ERROR } tt_log_level;

/* id is a short stable word ("threads", "checkpoint"), message one sentence without a newline. */
typedef struct tt_logger {
    void (*log)(void *user, tt_log_level level, const char *id, const char *message);
    void *user;
} tt_logger;

/* allocate returns memory aligned to `alignment` (a power of two, at least 64) or NULL. A context makes one
   call of these at a time, not always from the same thread. */
typedef struct tt_allocator {
    void *(*allocate)(void *user, size_t bytes, size_t alignment);
    void (*release)(void *user, void *memory, size_t bytes);
    void *user;
} tt_allocator;

/* File access. open: mode 'r' or 'w' (create or truncate), NULL on failure. read/write move exactly n bytes
   or return false; reads are positioned, writes are sequential. reason() describes the last failure. */
typedef struct tt_files {
    void *(*open)(void *user, const char *path, char mode);
    int64_t (*size)(void *user, void *file);
    bool (*read)(void *user, void *file, uint64_t offset, void *to, size_t n);
    bool (*write)(void *user, void *file, const void *from, size_t n);
    bool (*sync)(void *user, void *file);
    bool (*close)(void *user, void *file);
    bool (*rename)(void *user, const char *from, const char *to);
    bool (*remove)(void *user, const char *path);
    bool (*make_folder)(void *user, const char *path); /* true if it exists already */
    /* Calls each() with every entry's name until it returns false. False: no folder, or an error. */
    bool (*list)(void *user, const char *path, bool (*each)(void *arg, const char *name), void *arg);
    const char *(*reason)(void *user);
    void *user;
} tt_files;

typedef struct tt_context_options {
    int threads;            /* that compute, the caller's included, 0..256; 0: as many as the calling thread
                               may use by its affinity mask and the CPU quotas of its control groups */
    uint64_t seed;          /* of initialisation, dropout, shuffling, stochastic rounding. Default 1 */
    bool verify;            /* run the verifier after each pass. Default: true unless NDEBUG is defined */
    const char *isa;        /* instruction set: NULL (best), "portable", "avx2", "avx512", "neon"; also the
                               environment's TINYTRAIN_ISA */
    const char *bf16;       /* products of two bf16 matrices: "convert" (to fp32), "dot" (bf16 dot-product
                               instructions), "tiles" (Intel AMX), NULL (the fastest on this CPU model); also
                               TINYTRAIN_BF16. With the second and third, attention on x86 uses them too, and
                               its backward rounds its weights and their gradients to bf16 */
    tt_logger logger;       /* default: warnings and errors to stderr */
    tt_allocator allocator; /* default: posix_memalign, huge pages advised for large blocks */
    tt_files files;         /* default: POSIX */
} tt_context_options;

tt_context_options tt_context_options_default(void);

/* NULL options: defaults. NULL result, the logger is told why: no memory, threads, or such an isa or bf16. */
tt_context *tt_open(const tt_context_options *options);
/* Frees the parameters too. Free programs, tapes and trainers first. NULL is fine. */
void tt_close(tt_context *ctx);

const char *tt_error(const tt_context *ctx); /* the last failure in one sentence; "" if none */
tt_status tt_error_code(const tt_context *ctx);
int tt_threads(const tt_context *ctx);
const char *tt_isa(const tt_context *ctx);          /* "avx512", "avx2", "neon", "portable" */
size_t tt_allocated_bytes(const tt_context *ctx);   /* now held, less 64 for each block of the allocator's */
double tt_measured_peak(tt_context *ctx);           /* fp32 FLOP/s of all threads, measured once, in 30 ms */

/* What this machine has of a kind of device ("cpu", "cuda"; NULL: as tt_compile_options.device), which of it
   programs use and why: lines of text into `to` (always terminated, cut at capacity; capacity 0: none). Opens
   the device: TT_OK if programs can run there, else tt_error says why not. examples/tt_doctor.c prints it. */
tt_status tt_device_text(tt_context *ctx, const char *kind, char *to, size_t capacity);

/* ---------------------------------------------------------------------------------- dtypes and parameters */

typedef enum tt_dtype { TT_F32, TT_BF16, TT_F16, TT_I32, TT_U8, TT_DTYPE_COUNT } tt_dtype;

size_t tt_dtype_bytes(tt_dtype dtype);
const char *tt_dtype_name(tt_dtype dtype); /* "f32" */

typedef enum tt_init_kind { TT_INIT_ZEROS, TT_INIT_ONES, TT_INIT_NORMAL, TT_INIT_UNIFORM } tt_init_kind;

typedef struct tt_init { /* how a parameter starts when no file or tt_param_set gives it values */
    tt_init_kind kind;
    float scale; /* standard deviation of NORMAL (mean 0); half-width of UNIFORM */
} tt_init;

/* A parameter of up to 4 dimensions. The name must be unique in the context. It takes no memory until a
   program that uses it allocates, and is then filled in place: from its file, from tt_param_set, or from
   `init` by the counter-based generator (the same values for every dtype, device and number of threads). */
tt_param *tt_param_new(tt_context *ctx, const char *name, int ndim, const int64_t *dims, tt_init init);
const char *tt_param_name(const tt_param *p);
int tt_param_ndim(const tt_param *p);
const int64_t *tt_param_dims(const tt_param *p);
int64_t tt_param_size(const tt_param *p);
/* Both take tt_param_size floats, converted to and from its dtype. */
tt_status tt_param_set(tt_param *p, const float *values);
tt_status tt_param_get(const tt_param *p, float *values);
tt_param *tt_param_find(tt_context *ctx, const char *name); /* NULL if there is none */

/* Marks the parameters whose name matches a pattern ('*' any run of characters, '?' one) as frozen or
   trainable. A frozen parameter takes no gradient, no optimizer state and no backward work in programs
   compiled afterwards. Returns how many matched. */
int tt_param_freeze(tt_context *ctx, const char *pattern, bool frozen);
bool tt_param_frozen(const tt_param *p);

/* --------------------------------------------------------------------------------------------------- tape */

typedef struct tt_value { int32_t id; } tt_value; /* a tensor on a tape; id 0 is "none" */

tt_tape *tt_tape_new(tt_context *ctx);
void tt_tape_free(tt_tape *t);

/* The first wrong shape marks the tape: later ops do nothing, tt_compile fails. This tells it earlier. */
tt_status tt_tape_status(const tt_tape *t);
void tt_name(tt_tape *t, tt_value v, const char *format, ...) TT_PRINTF(3, 4); /* in plans and errors */
int64_t tt_value_rows(const tt_tape *t, tt_value v);  /* at capacity; 0 where the tape has no such value */
int64_t tt_value_width(const tt_tape *t, tt_value v);

/* A named number of rows with a capacity; the actual number may differ in each run. Use the result where an
   op asks for rows. Example: tt_axis(t, "tokens", 8192). */
int64_t tt_axis(tt_tape *t, const char *name, int64_t capacity);

tt_value tt_input(tt_tape *t, const char *name, tt_dtype dtype, int64_t rows, int64_t width);
/* An input i32 (seqs + 1, 1): the first row of each sequence, then the number of rows; strictly rising. */
tt_value tt_seq_start(tt_tape *t, const char *name, int64_t seqs);
tt_value tt_param_value(tt_tape *t, tt_param *p); /* a parameter as operand: 1-D (n) is (1, n) */
void tt_output(tt_tape *t, tt_value v); /* keep v until the end of a run, for tt_get */
void tt_block_end(tt_tape *t, tt_value v); /* v ends a block: tt_compile_options.recompute keeps it */

/* y = x W^T + b.  x (rows, in), w (out, in), b (out) or NULL -> (rows, out) */
tt_value tt_linear(tt_tape *t, tt_value x, tt_param *w, tt_param *b);
/* ids i32 (rows, 1), table (vocab, D) -> (rows, D). An id outside [0, vocab) fails the run and is named. */
tt_value tt_embedding(tt_tape *t, tt_value ids, tt_param *table);
/* (x - mean) / sqrt(var + eps) * w + b over each row (Ba et al. 2016).  x (rows, D), w (D), b (D) or NULL */
tt_value tt_layernorm(tt_tape *t, tt_value x, tt_param *w, tt_param *b, float eps);
/* x / sqrt(mean(x^2) + eps) * w over each row (Zhang, Sennrich 2019).  x (rows, D), w (D), eps >= 0 */
tt_value tt_rmsnorm(tt_tape *t, tt_value x, tt_param *w, float eps);
tt_value tt_gelu(tt_tape *t, tt_value x);      /* x/2 (1 + erf(x / sqrt 2)) (Hendrycks, Gimpel 2016) */
tt_value tt_gelu_tanh(tt_tape *t, tt_value x); /* its tanh form, "gelu_new" */
tt_value tt_relu(tt_tape *t, tt_value x);
tt_value tt_tanh(tt_tape *t, tt_value x);
tt_value tt_silu(tt_tape *t, tt_value x);      /* x / (1 + exp(-x)) */
tt_value tt_add(tt_tape *t, tt_value a, tt_value b); /* same shape */
tt_value tt_mul(tt_tape *t, tt_value a, tt_value b); /* same shape; element by element */
tt_value tt_scale(tt_tape *t, tt_value x, float s);
/* Training: zero with probability p, else x / (1 - p); p in [0, 1). The mask is a function of (seed, step,
   micro-batch, instruction, element) and is never stored. p acts in steps of 2^-16. Without training: x. */
tt_value tt_dropout(tt_tape *t, tt_value x, float p);

typedef struct tt_attention_options {
    int heads;     /* divides the width of q, k and v */
    bool causal;   /* a row sees itself and earlier rows of its sequence. Default false */
    float scale;   /* of q k^T; default 0: 1 / sqrt(head size) */
    float dropout; /* of the attention weights, in training. Default 0 */
} tt_attention_options;
tt_attention_options tt_attention_options_default(int heads);

/* softmax(scale q k^T) v within each sequence, per head; O(rows) memory (Dao et al. 2022).
   q, k, v (rows, heads * head_size), seq_start (seqs + 1, 1) -> (rows, heads * head_size) */
tt_value tt_attention(tt_tape *t, tt_value q, tt_value k, tt_value v, tt_value seq_start,
                      const tt_attention_options *o);

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
} tt_cross_entropy_options;
tt_cross_entropy_options tt_cross_entropy_options_default(void);

/* Sum over rows of w_r * -log softmax(logits_r)[target_r], divided by the sum of the weights of the rows that
   count. logits (rows, classes), targets i32 (rows, 1) -> (1, 1). NULL: defaults. Logits that come from
   tt_linear, are read by nothing else and take 16 MiB or more are only stored 256 rows at a time, if the
   gradients of parameters are f32. */
tt_value tt_cross_entropy(tt_tape *t, tt_value logits, tt_value targets, const tt_cross_entropy_options *o);
/* Mean over all elements of (x - target)^2, rows weighted by `weights` (rows, 1) if given. -> (1, 1) */
tt_value tt_mean_squared_error(tt_tape *t, tt_value x, tt_value target, tt_value weights);

/* --------------------------------------------------------------------------------------------- optimizers */

typedef enum tt_optimizer_kind { TT_SGD, TT_ADAM, TT_ADAMW } tt_optimizer_kind;

typedef struct tt_optimizer_options {
    tt_optimizer_kind kind;         /* default TT_ADAMW (Loshchilov, Hutter 2019) */
    float momentum;                 /* SGD; default 0 */
    bool nesterov;                  /* SGD; default false */
    float beta1, beta2, eps;        /* Adam(W); default 0.9, 0.999, 1e-8 */
    float weight_decay;             /* default 0.01. SGD, ADAM: added to the gradient; ADAMW: decoupled */
    const char *const *no_decay;    /* NULL-terminated name patterns without decay; default: 1-D parameters
                                       (biases, norms). An empty list decays all */
    float clip_norm;                /* largest global norm of the gradient; 0: no clipping. Default 0 */
} tt_optimizer_options;
tt_optimizer_options tt_optimizer_options_default(void);

typedef enum tt_schedule_kind { TT_CONSTANT, TT_LINEAR, TT_COSINE } tt_schedule_kind;

typedef struct tt_schedule {
    tt_schedule_kind kind;
    float lr, min_lr;      /* after the warm-up lr stays, or falls to min_lr, linearly or along a cosine */
    int64_t warmup_steps;  /* step s < warmup_steps uses lr * s / warmup_steps (as transformers does) */
    int64_t total_steps;   /* of warm-up and decay together */
} tt_schedule;
float tt_schedule_lr(const tt_schedule *s, int64_t step); /* step counts from 0 */

/* Dynamic loss scaling (Micikevicius et al., "Mixed precision training", 2018), with PyTorch's names and
   defaults (GradScaler). All three numbers are powers of two, so that scaling is exact. */
typedef struct tt_loss_scale {
    float init;    /* what the backward of the first step starts from. 1..2^40, default 65536 */
    float growth;  /* its factor after `interval` steps without overflow, up to 2^40. >= 1, default 2 */
    float backoff; /* its factor after an overflow, below 1. Default 0.5. A scale below 1 is an error */
    int interval;  /* >= 1, default 2000 */
} tt_loss_scale;
tt_loss_scale tt_loss_scale_default(void);

/* ----------------------------------------------------------------------------------------------- programs */

typedef struct tt_compile_options {
    bool train; /* default true: backward and update; false: forward only, dropout off */
    /* "32-true" (default); "bf16-mixed" (bf16 activations and matmuls; fp32 weights, their gradients and
       optimizer state); "bf16-true" (bf16 weights, gradients and optimizer state, stochastic rounding);
       "16-mixed", "16-true": the same with f16 and loss scaling, but the optimizer state of "16-true" is
       bf16, with stochastic rounding, because Adam's v is often less than f16 can hold. */
    const char *precision;
    /* Dtype of residual sums, of what flows into the first of them, and of their gradients, in mixed
       precisions: "f32" (as PyTorch's autocast) or "16-bit". NULL (default): "f32" with "16-mixed", whose
       range such sums could leave, else "16-bit", as results of norms, activations and attention always. */
    const char *residual;
    /* What device "cuda" may round operands of matrix products to; sums are fp32. "fp32" (default): nothing
       less. "tf32": 10 bits of mantissa, of fp32 matrices (as PyTorch's
       set_float32_matmul_precision("high")), except in attention; other devices take it as "fp32". "fp8":
       E4M3, gradients E5M2, each matrix scaled by the power of two that its largest number allows
       (Micikevicius et al.: "FP8 formats for deep learning", 2022), in linear layers with 16-bit operands and
       widths that are multiples of 16; needs "cuda" of compute capability 8.9. */
    const char *matmul;
    tt_loss_scale loss_scale; /* read with "16-mixed" and "16-true" only */
    /* What the backward computes again instead of keeping it, for the same bits (on "cuda", those of a
       tanh-GELU after a linear layer differ by rounding: cuBLASLt computes it in the product). "none";
       "cheap" (default): results of layer norm, GELU and SiLU, and 16-bit copies of weights, at no matrix
       products; "attention": its results too; "blocks": whatever the backward reads of the blocks that
       tt_block_end marks, except the last, with which the backward begins (Chen et al., "Training deep nets
       with sublinear memory cost", 2016). */
    const char *recompute;
    bool accumulate; /* steps of several micro-batches: gradients persist between them. Default false */
    tt_optimizer_options optimizer;
    /* Bytes of the arena, which a program that shares it later may not exceed either: TT_ERR_BUDGET from the
       tt_compile that would need more. 0 (default): no limit. */
    size_t memory_budget;
    /* "cpu", "cuda", or by number, "cuda:1"; NULL (default): what TINYTRAIN_DEVICE in the environment says,
       else "cpu". A program for a kind that this build cannot run is there to be planned: its plan counts the
       parameters whole, but it takes no part of their memory, and tt_allocate, tt_set and runs fail with
       TT_ERR_UNSUPPORTED (or TT_ERR_DEVICE, where the device is not there or failed). */
    const char *device;
    /* A program of the same device whose arena to use; inputs are overwritten when the other runs. An arena
       that is allocated does not grow: compile the program that needs most before. NULL (default): none. */
    tt_program *share;
} tt_compile_options;
tt_compile_options tt_compile_options_default(void);

/* Differentiates, rewrites and places; allocates no tensor. root: the loss (1, 1) to train on, or any value
   when train is false. The tape is copied and stays as it is, so it can be compiled again with other options;
   its value handles are valid in every program. NULL options: defaults. NULL on error. */
tt_program *tt_compile(tt_tape *t, tt_value root, const tt_compile_options *o);
void tt_program_free(tt_program *p);

typedef enum tt_category {
    TT_MEM_PARAMETERS, TT_MEM_GRADIENTS, TT_MEM_OPTIMIZER, TT_MEM_ACTIVATIONS, TT_MEM_WORKSPACE,
    TT_MEM_INPUTS, TT_MEM_CATEGORIES
} tt_category;
const char *tt_category_name(tt_category c);

typedef struct tt_plan {
    const char *device;                /* the kind that it is for: "cpu", "cuda" */
    size_t bytes;                      /* the arena: exactly this much is allocated. Parameters that an
                                          earlier program's arena holds are in that one's plan only */
    size_t persistent_bytes;           /* parameters, optimizer state, kept gradients, resident workspace */
    /* Of the host's memory: settings and results of runs, and what a tape keeps there. Where the device has
       memory of its own, also each input twice, on its way there, and a buffer of 64 KiB, which programs that
       share an arena have in common. */
    size_t host_bytes;
    /* In use while parameters are initialised or loaded: they, the resident workspace and the buffer that
       they stream through. Nothing else of the arena is touched before the first step. */
    size_t init_bytes;
    size_t lower_bound_bytes;          /* live at one instruction, at most: no placement needs less */
    size_t at_peak[TT_MEM_CATEGORIES]; /* bytes live at the peak instruction, by category */
    int peak_instruction;              /* its number ... */
    char peak_name[96];                /* ... and what it is: "attention_backward layer.3" */
    int instructions, values;
    double flops;                      /* of matmuls and attention in one run at full capacity */
    double extra_flops;                /* of these, what is computed again */
} tt_plan;
tt_plan tt_program_plan(const tt_program *p); /* works before anything is allocated */

/* A storage. Values that view it, or work in place on it, share it. */
typedef struct tt_plan_value {
    const char *name; /* of the value that it holds at the peak, or of the op whose workspace it is */
    tt_category category;
    size_t bytes;
    int first, last;  /* the instructions from which to which it is occupied */
} tt_plan_value;
/* What lives at the peak instruction, largest first: at most `capacity` into `to`. Returns how many there
   are, 0 when out of memory; their bytes add up to tt_plan.at_peak. Names live as long as the program. */
int tt_plan_values(const tt_program *p, tt_plan_value *to, int capacity);
/* The plan as text, some lines, into `to` (always terminated). Returns the length it has or would have. */
size_t tt_plan_text(const tt_program *p, char *to, size_t capacity);
/* An SVG of the bytes in use at each instruction, by category. Returns as tt_plan_text; 0: out of memory. */
size_t tt_plan_svg(const tt_program *p, char *to, size_t capacity);
/* A line per instruction: op, name, operands with dtype, shape and offset. Returns as tt_plan_text. */
size_t tt_program_text(const tt_program *p, char *to, size_t capacity);

/* Allocates the arena and fills the parameters. tt_set and the runs do it when it has not been done. */
tt_status tt_allocate(tt_program *p);
/* Copies `rows` rows of input v; the axis of v has that many rows in the next run. Set every input right
   before every run, after tt_update: something else may use its place. A run refuses an input that was
   overwritten. */
tt_status tt_set(tt_program *p, tt_value v, const void *data, int64_t rows);
/* An input of a program. */
typedef struct tt_input_info {
    const char *name;    /* lives as long as the program */
    tt_value value;
    tt_dtype dtype;
    int64_t rows, width; /* rows: the capacity, or the only number there may be */
    int axis;            /* inputs of one axis have equally many rows (tt_seq_start: one more); 0: `rows` */
    bool read;           /* false: nothing reads it, and it need not be set */
} tt_input_info;
/* The inputs in the order of their recording: at most `capacity` into `to`. Returns how many there are. */
int tt_program_inputs(const tt_program *p, tt_input_info *to, int capacity);
/* Copies value v (the root, or marked with tt_output) as floats, rows * width of them; after a run, before
   the next tt_set and before a program of the same arena runs. */
tt_status tt_get(tt_program *p, tt_value v, float *to, size_t capacity);

typedef struct tt_stats {
    /* Mean over the targets of the step (all micro-batches), of all loss ops together. What is computed of
       them on the way to the root, as a sum or a factor, is not in it: tt_get gives the root, which is NaN
       where none of the targets of one of several loss ops counts. */
    double loss;
    double targets;       /* number of targets that counted (their weights' sum) */
    double correct;       /* of them, predicted right (cross-entropy) */
    double grad_norm;     /* before clipping; 0 when nothing was updated */
    double flops;         /* done by matmuls and attention, at the actual number of rows */
    int64_t step;         /* optimizer steps done so far */
    double loss_scale;    /* of the next step; 1 without loss scaling */
    int64_t skipped;      /* steps without an update so far, because a scaled gradient overflowed */
} tt_stats;

/* One training step on the inputs as set: forward, backward, update with learning rate lr. A gradient or loss
   that is not finite gives TT_ERR_NUMERIC naming the first such tensor; parameters and optimizer stay as they
   were. With loss scaling, such a gradient gives TT_OK, a lower scale and a step that is skipped
   (tt_stats.skipped), unless the scale would fall below 1. stats may be NULL. */
tt_status tt_step(tt_program *p, float lr, tt_stats *stats);
/* The same in parts, for programs compiled with `accumulate`: tt_micro_step once per micro-batch, then
   tt_update, which divides by the targets of all together, so that 4 micro-batches of 4 equal one of 16. */
tt_status tt_micro_step(tt_program *p, tt_stats *stats);
tt_status tt_update(tt_program *p, float lr, tt_stats *stats);
/* After tt_micro_step, before tt_update: tt_param_size floats, d(mean over the targets so far) / d(param). */
tt_status tt_get_gradient(tt_program *p, const tt_param *param, float *to);
tt_status tt_run(tt_program *p, tt_stats *stats); /* forward only (programs with train = false) */
int64_t tt_program_steps(const tt_program *p);    /* of the optimizer; not those that loss scaling skipped */

/* The whole state of a program that trains, in one safetensors file: parameters by their names, the
   optimizer's state with "exp_avg.", "exp_avg_sq." or "momentum_buffer." before them, and in the tensor
   "tinytrain.run" the number of steps, the loss scale and the seed, which all randomness comes from. Between
   steps only. A program that was recorded and compiled in the same way and loads it goes on bit for bit as if
   it had never been stopped. Loading compares tensors, precision, optimizer and seed, and changes nothing
   unless all of it fits; the logger is warned of another attribute of a recorded op or of the optimizer.
   After an error in reading the tensors themselves some are the file's: load again before the next step.
   tt_trainer_save and tt_trainer_load do this for a trainer. */
tt_status tt_program_save(tt_program *p, const char *path);
tt_status tt_program_load(tt_program *p, const char *path);

/* -------------------------------------------------------------------------------------------------- files */

/* A safetensors file (github.com/huggingface/safetensors, format of the README), fully checked when opened:
   header length, JSON, dtypes, dims, offsets inside the file, no overlap, no hole, no duplicate name, sizes.
   It stays open, and its tensors are read when they are asked for, by any number of threads. */
typedef struct tt_safetensors tt_safetensors;

typedef struct tt_tensor_info {
    const char *name;
    const char *dtype; /* as the format spells it: "F32", "BF16", "F16", "F64", "I64", "I32", "U8", ... */
    int ndim;
    int64_t dims[8];
    size_t bytes;
} tt_tensor_info;

tt_safetensors *tt_safetensors_open(tt_context *ctx, const char *path); /* NULL on error */
void tt_safetensors_close(tt_safetensors *s);
int tt_safetensors_count(const tt_safetensors *s);
const tt_tensor_info *tt_safetensors_info(const tt_safetensors *s, int i);
int tt_safetensors_find(const tt_safetensors *s, const char *name);       /* -1 if absent */
/* Returns the value of a key of "__metadata__"; NULL if absent. */
const char *tt_safetensors_metadata(const tt_safetensors *s, const char *key);
/* Reads n of a tensor's bytes, which are little-endian, from byte `first` on. All reads fail with
   TT_ERR_FILE, and name the file and the byte, if another program has cut the file off meanwhile. */
tt_status tt_safetensors_read(const tt_safetensors *s, int i, size_t first, size_t n, void *to);
/* Reads n elements from `first` on, as floats (F64, F32, BF16, F16) or as int32 (I8 to I64, U8 to U64, BOOL).
   A finite number that the result cannot hold fails, naming the element. */
tt_status tt_safetensors_read_f32(const tt_safetensors *s, int i, int64_t first, int64_t n, float *to);
tt_status tt_safetensors_read_i32(const tt_safetensors *s, int i, int64_t first, int64_t n, int32_t *to);

/* Writing streams: declare all tensors, then write their bytes in that order, in pieces of any size. The file
   appears under its name, synced, only when tt_safetensors_end returns TT_OK; until then an old file of that
   name stays whole. */
typedef struct tt_safetensors_writer tt_safetensors_writer;
/* tensors: all but `bytes` is read. metadata: pairs of strings key, value, ..., NULL; may be NULL. */
tt_safetensors_writer *tt_safetensors_begin(tt_context *ctx, const char *path, const tt_tensor_info *tensors,
                                            int count, const char *const *metadata);
tt_status tt_safetensors_write(tt_safetensors_writer *w, const void *bytes, size_t n);
/* Frees w in any case; fails if bytes are missing or were too many. */
tt_status tt_safetensors_end(tt_safetensors_writer *w);

/* ---------------------------------------------------------------------------------------------- tokenizer */

/* BERT's basic tokenizer and WordPiece (Devlin et al. 2019; greedy longest match first), equal to
   BertTokenizer of transformers 5.23.0 with tokenizers 0.23.3, from a vocab.txt: one token a line, its number
   the id, white space at the end of a line left out. Immutable: any number of threads may use one. */
typedef struct tt_tokenizer tt_tokenizer;

/* Uncased (`lowercase`): lower-cased and accents stripped; cased: neither. */
tt_tokenizer *tt_tokenizer_open(tt_context *ctx, const char *vocab_path, bool lowercase);
/* From a Hugging Face folder: vocab.txt, and tokenizer_config.json's do_lower_case if that file is there
   (else true). TT_ERR_UNSUPPORTED if that file asks for something else (strip_accents other than
   do_lower_case, no CJK splitting, split_special_tokens). */
tt_tokenizer *tt_tokenizer_load(tt_context *ctx, const char *folder);
/* Writes vocab.txt and tokenizer_config.json into a folder, as transformers reads them. */
tt_status tt_tokenizer_save(const tt_tokenizer *k, const char *folder);
void tt_tokenizer_free(tt_tokenizer *k);
int tt_tokenizer_size(const tt_tokenizer *k);
const char *tt_tokenizer_token(const tt_tokenizer *k, int id);
int tt_tokenizer_find(const tt_tokenizer *k, const char *token); /* -1 if absent */
/* [CLS] pieces [SEP], cut to max_tokens (>= 2) in all, into ids (room for max_tokens). Returns how many.
   Invalid UTF-8 bytes count as U+FFFD, which is dropped. [SEP], [CLS], [PAD], [MASK] or [UNK] spelled out in
   a text, in capitals, becomes that token if the vocabulary has it, as in transformers: a text can forge the
   structure of a sequence, so remove these from texts that you don't trust. */
int tt_tokenize(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int max_tokens);

/* ----------------------------------------------------------------------------------------------- datasets */

/* Labelled texts in memory, or labelled images. */
typedef struct tt_dataset tt_dataset;

/* A text, which may hold NULs, and the number of its class. */
typedef struct tt_text { const char *text; size_t bytes; int label; } tt_text;

/* Texts of the caller: at least one, of which the labels are 0 to classes - 1. class_names: (classes) UTF-8.
   All is copied. examples/datasets.h reads IMDb's reviews with it. */
tt_dataset *tt_dataset_texts(tt_context *ctx, const tt_text *texts, int64_t count,
                             const char *const *class_names, int classes);

/* What a table's columns are called, and what divides them. */
typedef struct tt_table_options {
    const char *text_column, *label_column; /* default "text" and "label" */
    const char *split_column;               /* default "split"; a file need not have it */
    char delimiter;                         /* default 0: a comma where the file is a .csv, else a tab */
} tt_table_options;
tt_table_options tt_table_options_default(void);

/* A table in a text file, such as CSV or TSV: a header that names the columns, in any order, among others;
   UTF-8, RFC 4180 quoting, empty lines passed over. Errors name the line.
   split: keep the rows whose split column says so; NULL keeps all. "validation", "valid", "val" and "dev"
   mean the same. Where split is one of these, "train" or "test", a row that says something else is an error.
   In a file without a split column "test" is a tenth of the rows, of each class its share, chosen by the
   context's seed, and "train" the others. A table without rows for validation or test has 0 of them, which is
   no error: tt_dataset_split takes some of "train".
   classes: labels are numbered in the order of these (n_classes of them); NULL, 0: in byte order of the
   distinct labels of the rows kept. Labels must be UTF-8, as config.json is. o NULL: defaults. */
tt_dataset *tt_dataset_table(tt_context *ctx, const char *path, const char *split, const char *const *classes,
                             int n_classes, const tt_table_options *o);

/* 8 bits a channel; rows from the top, the channels of a pixel together: (height, width, channels). */
typedef struct tt_image {
    const uint8_t *pixels;
    int height, width; /* 1..65535 */
    int channels;      /* 1: grey, 2: grey and alpha, 3: red, green, blue, 4: these and alpha */
} tt_image;

/* Writes the image, resized, to `to` (height, width, image->channels), which must not overlap it. Bilinear,
   over a neighbourhood that grows with the reduction (antialiasing); equal to Pillow's Image.resize((width,
   height), BILINEAR), and so to torchvision's Resize of such an image: first the width, then the height, with
   weights of 22 bits, rounded to grey levels in between (later versions than 12.1 at times begin with the
   height, and differ by a level; with alpha, they round otherwise). With alpha, colours weigh by it. */
tt_status tt_image_resize(tt_context *ctx, const tt_image *image, int height, int width, uint8_t *to);

/* Images that the caller reads when they are needed. */
typedef struct tt_image_source {
    int64_t count;
    const int *labels;               /* (count) 0..classes - 1; copied */
    const char *const *class_names;  /* (classes) UTF-8; copied */
    int classes;
    /* Decodes image `index`, 0..count - 1, of any size and channels. NULL, or words that say why it cannot. A
       loader's threads call read and release, several at a time. */
    const char *(*read)(void *user, int64_t index, tt_image *image);
    void (*release)(void *user, tt_image *image); /* what read gave, soon after. May be NULL */
    const char *(*name)(void *user, int64_t index); /* for errors, such as a path. NULL: its number */
    void *user;
    int height, width, channels; /* of every image, to refuse options that do not fit; 0: not known before */
} tt_image_source;
/* examples/datasets.h reads CIFAR-10 with it. */
tt_dataset *tt_dataset_images(tt_context *ctx, const tt_image_source *source);

/* Moves n texts or images out of d into a new dataset: of each class its share, by the context's seed. */
tt_dataset *tt_dataset_split(tt_dataset *d, int64_t n);
void tt_dataset_free(tt_dataset *d);
int64_t tt_dataset_count(const tt_dataset *d);
/* Returns a text with a NUL behind it, "" of an image. bytes may be NULL. */
const char *tt_dataset_text(const tt_dataset *d, int64_t i, size_t *bytes);
int tt_dataset_label(const tt_dataset *d, int64_t i);
int tt_dataset_classes(const tt_dataset *d);
const char *tt_dataset_class_name(const tt_dataset *d, int class_index);

/* Batches of a dataset: shuffled by (seed, epoch), sorted by length within windows of `window` batches
   (longest first), and cut into steps of `batch` sequences, whose order within the window is shuffled again;
   the last step of an epoch may have fewer. A step is one or more micro-batches, filled in that order, each
   of at most max_seqs = ceil(batch / accumulate) sequences (or as many as there are, or max_tokens / 2) and
   max_tokens tokens, without padding. Texts are tokenized once, when the loader is made, on the context's
   threads (some 100 MB of text a second each); their ids are kept (2 bytes each), so that the loader knows
   what its micro-batches need. The dataset and the tokenizer must stay until the loader is freed. */
typedef struct tt_loader_options {
    int batch;        /* sequences, or images, of a step. Default 16 */
    int accumulate;   /* 1..batch; micro-batches have at most ceil(batch / accumulate) sequences. Default 1 */
    int max_length;   /* tokens of a sequence, [CLS] and [SEP] included; longer ones are cut. Default 512 */
    int max_tokens;   /* tokens of a micro-batch, >= max_length. Default 0: any number */
    bool shuffle;     /* Default true. False: in dataset order, unsorted (evaluation, prediction) */
    int window;       /* batches per sorted window. Default 50; 0 or 1: no sorting */
    bool drop_last;   /* leave out a last incomplete step. Default false */
    int threads;      /* that make images ahead of the trainer, 0..64; 0: tt_loader_next does it. Default 1 */
} tt_loader_options;
tt_loader_options tt_loader_options_default(void);

/* What a loader makes of an image, in this order: resized, padded, cropped, flipped. */
typedef struct tt_image_options {
    int height, width;               /* of the result, cropped out. 1..65535 */
    int channels;                    /* of the result, 1..4; an image has as many, or for 3 also 1 (grey, put
                                        into all three) or 4 (alpha is dropped). Default 3 */
    int resize_height, resize_width; /* 1..65535, see tt_image_resize; default 0, 0: not resized */
    int pad;                         /* zeros on all four sides; 0..65535. Default 0 */
    bool random_crop;                /* each place is as likely; else the centre (half of the rest, rounded
                                        down, at top and left). Default false */
    bool flip;                       /* mirror left and right with probability 1/2. Default false */
} tt_image_options;
tt_image_options tt_image_options_default(int height, int width);

/* What an input of a model is set to. */
typedef struct tt_array {
    const char *input; /* its name */
    const void *data;  /* (rows, width) in the input's dtype */
    int64_t rows;
} tt_array;

/* A micro-batch. A trainer sets each input of its model to the array that has its name: one of `arrays`, or
   else the field of that name; "first" is where each sequence starts. What no input reads may be missing.
   Pointers are valid until the next call on whatever gave them. */
typedef struct tt_batch {
    int seqs;                 /* sequences, images or examples; a speed counts `rows`, or else these */
    int rows;                 /* tokens of all sequences together; 0: there are none, as with images */
    const int32_t *ids;       /* (rows) */
    const int32_t *positions; /* (rows) 0, 1, ... within each sequence */
    const int32_t *types;     /* (rows) 0 */
    const int32_t *seq_start; /* (seqs + 1) */
    const int32_t *labels;    /* (seqs) */
    const int64_t *index;     /* (seqs) which of the dataset */
    const uint8_t *pixels;    /* (seqs, image_bytes) */
    int64_t image_bytes;      /* height * width * channels */
    const tt_array *arrays;   /* (n_arrays): for models of your own */
    int n_arrays;
    bool last_of_step;        /* the next micro-batch belongs to another step */
} tt_batch;

/* Where a trainer gets its batches: a loader, or functions of your own. Steps of an epoch are numbered from
   0, and what a step has depends on its epoch and number alone: then a run that is resumed sees the same. */
typedef struct tt_source {
    void *self;                /* for the functions */
    /* Goes to the first micro-batch of a step, 0 to `steps`. */
    tt_status (*seek)(void *self, int64_t epoch, int64_t step);
    /* Fills in the next micro-batch, which is all 0, or sets *more to false at the end of the epoch. An error
       ends tt_fit and tt_evaluate, which return it. */
    tt_status (*next)(void *self, tt_batch *batch, bool *more);
    /* Of an epoch, at least 1. Where `next` gives more, tt_fit and tt_evaluate fail; where it gives fewer,
       tt_fit warns the logger once. A step to train on ends with a micro-batch that is last_of_step. */
    int64_t steps;
    /* The most that a micro-batch has (0: unknown); may a step have several? tt_train_options makes room. */
    int max_seqs, max_tokens;
    bool accumulates;
    /* A hash of all that is trained on, to tell other data when a run is resumed. NULL: none is told. */
    uint64_t (*hash)(void *self);
    const char *const *class_names; /* (classes) what labels mean: a run is not resumed with other names */
    int classes;                    /* 0: there are none */
} tt_source;

typedef struct tt_loader tt_loader;
/* At step 0 of epoch 0. NULL options: defaults. NULL on error. */
tt_loader *tt_loader_new(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k,
                         const tt_loader_options *o);
/* The same of images; max_length, max_tokens and window mean nothing here. Threads of its own read images and
   make of them what `image` says, ahead of the trainer, into a ring of a few micro-batches that is allocated
   here. Crops and flips depend on (seed, epoch, index of the image) alone. An image that cannot be read, or
   does not fit the options, is an error of the micro-batch that it belongs to; those before it are still
   given. tt_loader_seek to where the loader stands keeps what was made ahead. */
tt_loader *tt_image_loader_new(tt_context *ctx, const tt_dataset *d, const tt_image_options *image,
                               const tt_loader_options *o);
void tt_loader_free(tt_loader *l); /* at any time: stops its threads */
int64_t tt_loader_steps(const tt_loader *l); /* steps of an epoch */
/* What a trainer must have room for, by the texts that there are: max_seqs, max_tokens (of the max_seqs
   longest texts; 0 of images) and accumulate (a step may have several micro-batches) of tt_train_options. A
   trainer for several loaders needs the largest. */
int tt_loader_max_seqs(const tt_loader *l);
int tt_loader_max_tokens(const tt_loader *l);
bool tt_loader_accumulates(const tt_loader *l);
int tt_loader_longest(const tt_loader *l); /* tokens of the longest text before it is cut; 0: images */
int64_t tt_loader_cut(const tt_loader *l); /* texts that are cut, as they are longer than max_length */
/* Goes to a step of an epoch (both from 0); order and contents depend on (seed, epoch, step) alone. */
tt_status tt_loader_seek(tt_loader *l, int64_t epoch, int64_t step);
/* Gives the next micro-batch. Returns false at the end of the epoch, where tt_loader_status is TT_OK and one
   seeks on, and on an error, which tt_loader_status returns then. */
bool tt_loader_next(tt_loader *l, tt_batch *batch);
tt_status tt_loader_status(const tt_loader *l); /* of the last tt_loader_next */
double tt_loader_waited(const tt_loader *l); /* seconds that tt_loader_next has waited for images */
/* The loader as a trainer's source, as long as the loader lives; NULL for NULL. */
const tt_source *tt_loader_source(tt_loader *l);

/* ------------------------------------------------------------------------------------------------- models */

typedef struct tt_train_options tt_train_options;

/* How good a model is, told from what an evaluation has added up. */
typedef struct tt_metric {
    const char *name; /* in metrics.csv and texts: at most 31 letters, digits, _ and -. NULL: none */
    double (*of)(const tt_stats *s);
    bool lower_is_better;
} tt_metric;
tt_metric tt_accuracy(void);   /* "accuracy": the share of targets predicted right (cross-entropy) */
tt_metric tt_perplexity(void); /* "perplexity": exp(loss). Lower is better */

/* What a trainer trains. */
typedef struct tt_model {
    const void *self; /* for record */
    /* Declares inputs and records what becomes of a micro-batch of up to o->max_seqs sequences (or examples)
       and o->max_tokens tokens. Returns the loss (1, 1); *output, where it is set, is what tt_forward gives.
       The names of the inputs are those of a batch's arrays. */
    tt_value (*record)(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output);
    tt_metric metric;
    int classes;      /* the output has a logit for each of so many, for tt_predict. 0: something else */
    const char *unit; /* what is counted a second: "tokens", "images"; as a metric's name. NULL: "examples" */
    int max_length;   /* rows of the longest sequence that there may be; 0: it has no sequences */
    bool same_length; /* all sequences have max_length rows, as images do: the trainer knows their positions
                         and starts, and batches need not have them */
} tt_model;

/* What BERT and ViT read, of all sequences one after another. An image is one: a class token, its patches. */
typedef struct tt_inputs {
    tt_value positions; /* i32 (rows, 1): 0, 1, ... within each sequence */
    tt_value seq_start; /* i32 (seqs + 1, 1) */
    tt_value first;     /* i32 (seqs, 1): the first row of each sequence */
    tt_value ids;       /* text: i32 (rows, 1) */
    tt_value types;     /* text: i32 (rows, 1): token types, or none */
    tt_value pixels;    /* images: u8 (seqs, image_bytes) */
    tt_value labels;    /* i32 (seqs, 1): the class of each sequence */
} tt_inputs;
/* Declare these inputs, as the batches of a loader have them. length: rows of an image. */
tt_inputs tt_text_inputs(tt_tape *t, const tt_train_options *o);
tt_inputs tt_image_inputs(tt_tape *t, const tt_train_options *o, int length, int64_t image_bytes);

/* BERT (Devlin et al. 2019), DistilBERT (Sanh et al. 2019), MiniLM (Wang et al. 2020): one encoder, two
   spellings. Parameters carry the names of transformers' (Distil)BertForSequenceClassification. */
typedef struct tt_bert_config {
    bool distil;              /* DistilBERT's names, head (pre_classifier, ReLU), not BERT's (pooler, tanh) */
    int vocab_size, hidden_size, layers, heads, intermediate_size, max_positions;
    int type_vocab_size;      /* 0: no token types */
    bool pooler;              /* BERT: dense + tanh on the first token before the classifier. Default true */
    int classes;
    const char *activation;   /* "gelu", "gelu_new", "relu", "silu" */
    float layer_norm_eps, initializer_range;
    float dropout;            /* of embeddings and residual branches */
    float attention_dropout;
    float classifier_dropout;
} tt_bert_config;
tt_bert_config tt_bert_config_default(bool distil); /* the base model's sizes, 2 classes */

typedef struct tt_bert_layer { /* weights (out, in), biases (out), norms (hidden) */
    tt_param *q_w, *q_b, *k_w, *k_b, *v_w, *v_b;
    tt_param *attention_w, *attention_b, *attention_norm_w, *attention_norm_b;
    tt_param *up_w, *up_b, *down_w, *down_b, *output_norm_w, *output_norm_b;
} tt_bert_layer;

typedef struct tt_bert {
    tt_context *ctx;
    tt_bert_config config;
    /* what `config` and config.json's id2label say: (classes), UTF-8 */
    char activation[32], (*class_names)[64];
    tt_param *word, *position, *type;       /* (vocab, max_positions and type_vocab, hidden) */
    tt_param *norm_w, *norm_b;
    tt_bert_layer *layer;
    tt_param *head_w, *head_b;              /* pre_classifier or pooler (hidden, hidden), (hidden) */
    tt_param *classifier_w, *classifier_b;  /* (classes, hidden), (classes) */
} tt_bert;

/* Creates the parameters, which begin as in transformers (normal, initializer_range; norms 1, biases 0). */
tt_status tt_bert_new(tt_context *ctx, tt_bert *m, const tt_bert_config *config);
/* From a Hugging Face folder: config.json and model.safetensors (with or without the "bert."/"distilbert."
   prefix). Tensors stream into place when a program is allocated. classes 0: as config.json says. When the
   file has no classifier or one of another size, it is made anew, and the logger is told; a missing or
   misshapen tensor of the body is an error, before anything of the sizes in config.json is made. */
tt_status tt_bert_load(tt_context *ctx, tt_bert *m, const char *folder, int classes);
/* Writes config.json and model.safetensors into a folder (made if need be), each atomically, as transformers
   reads them. Of classes that share a name, all are in id2label, the last in label2id. Class names that are
   not UTF-8, and a changed `config` that could not be loaded, are refused before anything is written. */
tt_status tt_bert_save(const tt_bert *m, const char *folder);
void tt_bert_free(tt_bert *m); /* the parameters stay with the context until it closes */

/* The model's class_names are those of a dataset with as many classes, each of at most 63 bytes. */
tt_status tt_bert_name_classes(tt_bert *m, const tt_dataset *d);
/* Recorded on a tape: the last hidden states (rows, hidden), and the logits (seqs, classes). */
tt_value tt_bert_encode(const tt_bert *m, tt_tape *t, const tt_inputs *in);
tt_value tt_bert_logits(const tt_bert *m, tt_tape *t, const tt_inputs *in);
/* As a trainer sees it: the mean cross-entropy of the classes that "labels" tell. m must stay. */
tt_model tt_bert_classifier(const tt_bert *m);

/* ViT (Dosovitskiy et al. 2021). Parameters carry the names of transformers' ViTForImageClassification. */
typedef struct tt_vit_config {
    int image_size, patch_size, channels; /* images are square; channels 1..4 */
    int hidden_size, layers, heads, intermediate_size;
    int classes;
    bool qkv_bias;            /* default true */
    const char *activation;   /* as BERT's */
    float layer_norm_eps, initializer_range;
    float dropout;            /* of embeddings and residual branches. Default 0 */
    float attention_dropout;  /* default 0 */
    float mean[4], std[4];    /* of each channel; the model sees (pixel / 255 - mean) / std. Default 0.5 */
} tt_vit_config;
/* "Ti/16", "S/16", "B/16", "L/16", "H/14", or another patch: 224 x 224, 1000 classes. Else 0: refused. */
tt_vit_config tt_vit_config_default(const char *size);

typedef struct tt_vit_layer { /* weights (out, in), biases (out), norms (hidden) */
    tt_param *before_w, *before_b, *q_w, *q_b, *k_w, *k_b, *v_w, *v_b, *attention_w, *attention_b;
    tt_param *after_w, *after_b, *up_w, *up_b, *down_w, *down_b;
} tt_vit_layer;

typedef struct tt_vit {
    tt_context *ctx;
    tt_vit_config config;
    /* what `config` and config.json's id2label say: (classes), UTF-8 */
    char activation[32], (*class_names)[64];
    bool torchvision;                       /* names are spelled as by torchvision, as in the loaded file */
    tt_param *patch_w, *patch_b;            /* (hidden, channels, patch, patch), (hidden) */
    tt_param *token, *position;             /* (hidden), (1 + patches, hidden) */
    tt_vit_layer *layer;
    tt_param *norm_w, *norm_b, *classifier_w, *classifier_b;
} tt_vit;

/* As tt_bert_new. */
tt_status tt_vit_new(tt_context *ctx, tt_vit *m, const tt_vit_config *config);
/* path: a folder with model.safetensors, or a .safetensors file; config.json and preprocessor_config.json are
   read if they are in that folder. The names of tensors are those of transformers (with or without "vit.") or
   torchvision's vit_b_16 and so on. Without config.json the shapes of the tensors tell the sizes (with heads
   of 64 columns, in H/14 of 80). image_size, classes 0: as the checkpoint's. For another image_size than the
   checkpoint's, positions are interpolated (bicubic, as transformers does); a classifier that is missing or
   of another size is made anew, and the logger is told. Else as tt_bert_load. */
tt_status tt_vit_load(tt_context *ctx, tt_vit *m, const char *path, int image_size, int classes);
/* Writes model.safetensors, config.json and preprocessor_config.json into a folder, as tt_bert_save. */
tt_status tt_vit_save(const tt_vit *m, const char *folder);
void tt_vit_free(tt_vit *m); /* the parameters stay with the context until it closes */

tt_status tt_vit_name_classes(tt_vit *m, const tt_dataset *d); /* these three are as BERT's */
tt_value tt_vit_encode(const tt_vit *m, tt_tape *t, const tt_inputs *in);
tt_value tt_vit_logits(const tt_vit *m, tt_tape *t, const tt_inputs *in);
tt_model tt_vit_classifier(const tt_vit *m); /* as tt_bert_classifier */

/* ------------------------------------------------------------------------------------------------ trainer */

struct tt_train_options {
    bool train; /* default true; false: no gradients, optimizer; for tt_evaluate, tt_forward, tt_predict */
    tt_schedule schedule;            /* default: linear, lr 5e-5, no warm-up; total_steps (0) must be set */
    tt_optimizer_options optimizer;  /* default: AdamW, decay 0.01, clip_norm 1 */
    /* These are tt_compile_options', with the same defaults. */
    const char *precision, *residual, *matmul;
    tt_loss_scale loss_scale;
    const char *recompute, *device;
    size_t memory_budget;
    float label_smoothing;           /* of tt_bert_classifier and tt_vit_classifier. Default 0 */
    /* The most that a micro-batch has, and whether a step may have several micro-batches: what
       tt_loader_max_seqs, tt_loader_max_tokens (text only) and tt_loader_accumulates say. */
    int max_seqs, max_tokens;
    bool accumulate;                 /* default false */
};
tt_train_options tt_train_options_default(void);
/* Raises max_seqs and max_tokens to what the micro-batches of two sources need, and sets accumulate if steps
   of the first may have several. Either may be NULL. */
void tt_train_options_make_room(tt_train_options *o, const tt_source *train, const tt_source *validation);

typedef struct tt_trainer tt_trainer;

/* Records, compiles and plans a training and an evaluation program in one arena. All contradictions of the
   options are reported in one message. Nothing is allocated yet. NULL on error. */
tt_trainer *tt_trainer_new(tt_context *ctx, const tt_model *model, const tt_train_options *o);
void tt_trainer_free(tt_trainer *t);
const tt_program *tt_trainer_program(const tt_trainer *t); /* that trains, or the only one, for its plan */
int64_t tt_trainer_steps(const tt_trainer *t);             /* tt_program_steps of that */
/* Steps in the state last saved or loaded, here or by tt_fit, where a resumed run goes on; -1: none. */
int64_t tt_trainer_saved_steps(const tt_trainer *t);
/* Returns that of the next step: the schedule at tt_trainer_steps, which a skipped step does not move. */
float tt_trainer_lr(const tt_trainer *t);

/* Forward and backward of a micro-batch, and the update when it is the last of its step: then *updated is
   true, also where loss scaling skipped the update. stats covers the micro-batches of the step so far. When
   one fails, its step updates nothing: its other micro-batches are refused, up to the last. */
tt_status tt_train_batch(tt_trainer *t, const tt_batch *batch, tt_stats *stats, bool *updated);
/* Adds a batch to an evaluation: stats covers all batches since it was zeroed (loss: over their targets). */
tt_status tt_evaluate_batch(tt_trainer *t, const tt_batch *batch, tt_stats *stats);
/* Mean loss, targets and hits over epoch 0 of the source, which must have a target that counts. */
tt_status tt_evaluate(tt_trainer *t, const tt_source *source, tt_stats *stats);
/* The model's output for a batch, as tt_get gives it. What only the loss reads, as labels, may be missing. */
tt_status tt_forward(tt_trainer *t, const tt_batch *batch, float *to, size_t capacity);
/* Class probabilities of a batch, of a model that has classes: (seqs, classes). Else as tt_forward. */
tt_status tt_predict(tt_trainer *t, const tt_batch *batch, float *probabilities);
/* The same for one text (cut to the model's length): `classes` probabilities. */
tt_status tt_predict_text(tt_trainer *t, const tt_tokenizer *k, const char *text, float *probabilities);

/* Where a run stands: stored with the state, for the caller to go on from. */
typedef struct tt_progress {
    int64_t epoch, step;          /* the next step of the shuffled data */
    double loss_sum, targets, correct; /* of the epoch so far */
    double best, best_loss;       /* of the best validation so far: what tells the best, and the loss */
    uint64_t best_by;             /* hash of the name of what tells the best; 0: none */
    uint64_t classes, data;       /* hashes of the class names and of the examples, see tt_fit; 0: none */
} tt_progress;

/* tt_program_save and tt_program_load of the training program, with the progress (NULL: none) and the
   schedule: the logger is warned of another schedule too. */
tt_status tt_trainer_save(tt_trainer *t, const char *path, const tt_progress *progress);
tt_status tt_trainer_load(tt_trainer *t, const char *path, tt_progress *progress);

/* Where tt_fit stands, after each step and each validation. */
typedef struct tt_fit_event {
    int64_t epoch, epochs;         /* epoch counts from 0 */
    int64_t step, steps;           /* steps done of this epoch; of an epoch */
    double loss;                   /* mean over this epoch so far */
    const char *metric_name;       /* the model's metric; NULL: it has none */
    double metric;                 /* of this epoch so far; of validation, where there is one */
    const char *unit;              /* "tokens", "images", ... */
    double per_second;             /* of these, since tt_fit began, validation left out */
    double of_peak;                /* matmuls' and attention's share of tt_measured_peak; 0: unknown */
    double seconds_left;           /* of all epochs, validation left out */
    const tt_stats *validation;    /* after the last step of an epoch; else NULL */
    bool best;                     /* it is the best so far, and `keep` has been called */
} tt_fit_event;

/* Writes an event as one line for a progress display, without a newline. Returns as tt_plan_text. */
size_t tt_fit_text(const tt_fit_event *e, char *to, size_t capacity);

typedef struct tt_fit_options {
    int64_t epochs;                /* default 1 */
    const char *folder;            /* where state.safetensors, metrics.csv and loss.svg (see tt_fit) are
                                      written, made if need be. Default NULL: none of these */
    bool resume;                   /* go on from the state in folder; else one that holds one is refused */
    double save_seconds;           /* the state is saved after each epoch, and so often in one. Default 300 */
    const volatile int *stop;      /* not 0: stop after the step or the batch of validation at hand; a signal
                                      handler may set it (sig_atomic_t). Default NULL */
    const char *best_by;           /* what tells the best validation: "loss", or the model's metric by name,
                                      ties by loss. Default NULL: the metric, or else the loss */
    /* Save the model: an epoch is over whose validation is the best so far, or, without validation, any. The
       folder holds a state by then, so that a run that is killed here can be resumed. A failure ends tt_fit
       with that status, and a resumed run calls `keep` for this epoch again. Default NULL. */
    tt_status (*keep)(void *user);
    void (*report)(void *user, const tt_fit_event *event);
    void *user;
} tt_fit_options;
tt_fit_options tt_fit_options_default(void);

/* Trains over epochs of `train`, each followed by an evaluation on `validation` (NULL: none). *finished: all
   epochs are done; else it was stopped, or failed, and the state of the last whole step is saved, to be
   resumed bit for bit. Saving can fail too: tt_trainer_saved_steps says from which step a resumed run would
   go on.
   A run is resumed on the data that it began with: other names of classes are an error, and the logger is
   warned of other labels, tokens or number of examples; pixels are not compared. It is also warned of a
   validation that is not finite.

   metrics.csv has a line for each step and for each validation, and these columns. Numbers are written with a
   decimal point in any locale; one that is not finite is "nan", "inf" or "-inf".
     step         optimizer steps done, which those skipped by loss scaling are not
     epoch        from 1
     split        "train" or "validation"
     loss         mean over the targets of the step, or of all of validation
     accuracy     or what else the model's metric is called: of these targets. Left out where it has none
     lr           learning rate of the step. This and the next three are empty in a line of validation
     grad_norm    norm of all gradients together, before clipping; 0 where the step was skipped
     loss_scale   of the next step; 1 without loss scaling
     skipped      steps skipped by loss scaling so far
     bytes        of the arena: parameters, gradients, optimizer state, activations (tt_plan.bytes)
     seconds      that the step, waiting for its data included, or the validation took; saving is not counted
     tokens_per_second, or images_per_second and so on, as the model's unit is: over these seconds
   loss.svg draws loss, metric and learning rate over the steps. Both files are written whenever the state
   is. A resumed run keeps the lines up to its state; a metrics.csv with other columns is refused. */
tt_status tt_fit(tt_trainer *t, const tt_source *train, const tt_source *validation, const tt_fit_options *o,
                 bool *finished);

#ifdef __cplusplus
}
#endif

#endif /* TINYTRAIN_H */

/* ===========================================================================================================
   BACKEND API                                                                                    >>backend
   What a backend (the CPU's below, tinytrain_cuda.cu) gets to run one instruction, and the functions that it
   has. Uses the public API only. A file that brings a backend defines TINYTRAIN_BACKEND before it.
   ======================================================================================================== */

#if (defined(TINYTRAIN_IMPLEMENTATION) || defined(TINYTRAIN_BACKEND)) && !defined(TT__LANES) && \
    !defined(TT__BACKEND_API)
#define TT__BACKEND_API

/* A row-major matrix as a kernel sees it: row r starts at element r * ld. */
typedef struct tt__mat { void *data; tt_dtype dtype; int64_t rows, cols, ld; } tt__mat;

typedef enum tt__act {
    TT__ACT_NONE, TT__ACT_GELU, TT__ACT_GELU_TANH, TT__ACT_RELU, TT__ACT_TANH, TT__ACT_SILU
} tt__act;

#define TT__MAX_IN 9
#define TT__RUN_IN 8 /* the operand that is the step's settings, of ops with TT__WITH_RUN                   */
#define TT__MAX_OUT 5

/* What distinguishes two instructions of the same op. X(type, name): 0 where an op does not use it. What a
   state is hashed over is read from this list, so a type may have no padding. */
#define TT__ATTRS(X) \
    X(int, act)           /* tt__act: LINEAR, ACTIVATION */ \
    X(int, heads)         /* ATTENTION */ \
    X(bool, causal)       /* ATTENTION */ \
    X(bool, nesterov)     /* SGD */ \
    X(int, ignore_index)  /* CROSS_ENTROPY */ \
    X(float, scale)       /* SCALE, ATTENTION; value of FILL */ \
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
    X(bool, fp8)          /* LINEAR, LINEAR_DX, LINEAR_DW: operands are rounded to fp8 */ \
    X(tt_dtype, narrow)   /* LINEAR, LINEAR_DX, LINEAR_CROSS_ENTROPY: f32 w is rounded to this when read */

typedef struct tt__attr {
#define TT__FIELD(type, name) type name;
    TT__ATTRS(TT__FIELD)
#undef TT__FIELD
} tt__attr;
typedef char tt__image_has_no_padding[sizeof(tt_patch_options) == 12 * sizeof(float) ? 1 : -1];

/* What a segment, a contiguous range of a tape's instructions, is run for. They follow in this order. */
typedef enum tt__segment { TT__EACH_MICRO, TT__EACH_STEP, TT__SEGMENTS } tt__segment;

typedef struct tt__instr {
    int op;             /* TT__OP_; -1: dropped by a pass that is under way                                 */
    int before;         /* in a pass: inserted before this instruction                                      */
    int32_t in[TT__MAX_IN], out[TT__MAX_OUT]; /* value ids; 0: operand absent                               */
    uint32_t add, add_later;
    tt__attr attr;
    uint32_t random;    /* its stream of random numbers; a recomputed copy has the same                     */
    tt__segment segment;
    bool backward;      /* autodiff emitted it, or recompute for one that autodiff emitted                  */
    bool again;         /* a copy that recomputes                                                           */
    bool with_next;     /* runs together with the next instruction, of the same op: see tt__backend.launch */
    int stream;         /* 0: of computation. Work on another is only started here, and ends at its WAIT */
    size_t workspace;   /* bytes of scratch while it runs, and their place                                  */
    size_t workspace_place;
} tt__instr;

/* ---------------------------------------------------------------------------------------------- the op table
   X(OP, name, inputs, outputs, flags). OP names everything else: tt__rules_OP (>>ops),
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
#define TT__PRODUCT 0x200    /* out[0] is a matrix product, which may be of fp8 (attr.fp8)                  */
#define TT__ACTIVATES 0x400  /* out[0] may be an activation (attr.act) of out[1], which is then there       */
#define TT__LOSS 0x800       /* a mean over targets, in[TT__LOSS_TARGETS]; it counts: out[TT__LOSS_COUNTS]  */
#define TT__GATHERS 0x1000   /* row r of out[0] is the row of in[0] whose number is row r of in[1]          */
#define TT__CASTS 0x2000     /* out[0] is in[0] in another dtype                                            */
#define TT__SAVES1 0x4000    /* only a backward reads out[1]                                                */
#define TT__SUMS 0x8000      /* out[0] is in[0] + in[1], which are alike                                    */
#define TT__MOVES 0x10000    /* out[0] is in[0] scaled, some of it, or a sum with it                        */
#define TT__BEGINS 0x20000   /* out[0] may begin a residual stream                                          */
/* The backward may compute out[0] again instead of finding it: where in[0] is there anyway; the same, if
   recompute is "attention"; where in[0] is an input or a parameter. */
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

enum { TT__LOSS_TARGETS = 1, TT__LOSS_WEIGHTS = 2, TT__LOSS_COUNTS = 2 }; /* operands, and an output */

#define TT__OPS(X) \
    X(LINEAR, "linear", 4, 2, TT__BY_ROW(1 | 8) | TT__PRODUCT | TT__ACTIVATES | TT__SAVES1 | TT__BEGINS | \
      TT__WEIGHT(1) | TT__RESIDUAL(3)) /* x, w, [b], [residual] -> y, [pre-activation] */ \
    X(EMBEDDING, "embedding", 2, 1, TT__BEGINS) /* ids, table -> y */ \
    X(LAYERNORM, "layernorm", 3, 2, TT__INPLACE0 | TT__BY_ROW(1) | TT__SAVES1 | TT__AGAIN) \
        /* x, w, [b] -> y, (mean, 1/std) */ \
    X(RMSNORM, "rmsnorm", 2, 2, TT__INPLACE0 | TT__BY_ROW(1) | TT__SAVES1 | TT__AGAIN) \
        /* x, w -> y, 1/rms */ \
    X(RMSNORM_BACKWARD, "rmsnorm_backward", 4, 2, TT__INPLACE0) /* dy, x, w, 1/rms -> [dx], [dw] */ \
    X(ACTIVATION, "activation", 1, 1, TT__NAMED_BY_ACT | TT__INPLACE0 | TT__BY_ROW(1) | TT__AGAIN) \
        /* x -> act(x) */ \
    X(ADD, "add", 2, 1, TT__INPLACE0 | TT__INPLACE1 | TT__BY_ROW(1 | 2) | TT__SUMS | TT__MOVES | \
      TT__RESIDUAL(1)) /* a, b -> a + b */ \
    X(MUL, "mul", 2, 1, TT__INPLACE0 | TT__INPLACE1 | TT__BY_ROW(1 | 2) | TT__AGAIN) /* a, b -> a b */ \
    X(SCALE, "scale", 1, 1, TT__INPLACE0 | TT__BY_ROW(1) | TT__MOVES) /* x -> s x */ \
    X(DROPOUT, "dropout", 3, 1, TT__INPLACE0 | TT__INPLACE1 | TT__RANDOM | TT__WITH_RUN | TT__MOVES | \
      TT__BY_ROW(1 | 2) | TT__RESIDUAL(1) | TT__NUMBERS(2)) /* x, [residual], [row numbers] -> y */ \
    X(ATTENTION, "attention", 5, 2, TT__RANDOM | TT__WITH_RUN | TT__BY_ROW(1) | TT__NUMBERS(4) | \
      TT__AGAIN_ATTENTION) /* q, k, v, seq_start, [row numbers] -> out, log-sum-exp */ \
    X(GATHER_ROWS, "gather_rows", 2, 1, TT__GATHERS | TT__MOVES) /* x, index -> y */ \
    X(MEAN_POOL, "mean_pool", 2, 1, TT__BEGINS) /* x, seq_start -> y */ \
    X(SET_ROWS, "set_rows", 3, 1, TT__INPLACE0) /* x, index, row -> y */ \
    X(PATCHES, "patches", 3, 1, TT__AGAIN_KEPT) /* pixels, positions, seq_start -> y */ \
    X(CROSS_ENTROPY, "cross_entropy", 3, 3, TT__LOSS) /* logits, targets, [weights] -> loss, lse, counts */ \
    X(MEAN_SQUARED_ERROR, "mean_squared_error", 3, 3, TT__LOSS) \
        /* x, target, [weights] -> loss, -, counts */ \
    X(CAST, "cast", 1, 1, TT__CASTS | TT__AGAIN_KEPT) /* x -> x in another dtype */ \
    X(FILL, "fill", 1, 1, 0) /* [loss scale] -> constant */ \
    X(LINEAR_DX, "linear_dx", 3, 1, TT__PRODUCT | TT__WEIGHT(1)) /* dy, w, [saved by act] -> dx act' */ \
    X(LINEAR_DW, "linear_dw", 2, 2, TT__PRODUCT) /* dy, x -> dw, [db] */ \
    X(EMBEDDING_BACKWARD, "embedding_backward", 2, 1, 0) /* ids, dy -> dtable */ \
    X(LAYERNORM_BACKWARD, "layernorm_backward", 4, 3, TT__INPLACE0) \
        /* dy, x, w, stats -> [dx], [dw], [db] */ \
    X(ACTIVATION_BACKWARD, "activation_backward", 2, 1, TT__INPLACE0 | TT__INPLACE1) /* dy, saved -> dx */ \
    X(ATTENTION_BACKWARD, "attention_backward", 8, 3, TT__WITH_RUN) \
        /* dout, q, k, v, seq_start, out, lse, [row numbers] -> dq, dk, dv */ \
    X(GATHER_ROWS_BACKWARD, "gather_rows_backward", 2, 1, 0) /* dy, index -> dx */ \
    X(MEAN_POOL_BACKWARD, "mean_pool_backward", 2, 1, 0) /* dy, seq_start -> dx */ \
    X(SET_ROWS_BACKWARD, "set_rows_backward", 2, 2, TT__INPLACE0) /* dy, index -> [dx], [drow] */ \
    X(CROSS_ENTROPY_BACKWARD, "cross_entropy_backward", 6, 1, TT__INPLACE1 | TT__WITH_RUN | TT__MEAN) \
        /* dloss, logits, targets, [weights], lse, counts -> dlogits */ \
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
    X(WAIT, "wait", 8, 0, TT__ANY_SPACE | TT__WAITS) /* all operands of a stream's work, its result first */

enum {
#define TT__ENUM(OP, name, inputs, outputs, flags) TT__OP_##OP,
    TT__OPS(TT__ENUM)
#undef TT__ENUM
    TT__OP_COUNT
};

/* What random numbers are for: a part of their streams' keys. */
enum { TT__RANDOM_INIT = 1, TT__RANDOM_DROPOUT, TT__RANDOM_ROUNDING, TT__RANDOM_SHUFFLE, TT__RANDOM_IMAGE };

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
    void *workspace;        /* as many bytes as the kind's workspace() asks for at capacity                 */
    void *resident;         /* as many as the kind's `resident`; any instruction may use them               */
} tt__launch;

/* The step's settings in the device's memory; NULL: the instruction needs none. */
#define TT__RUN_OF(l) ((const tt__run *)(l)->in[TT__RUN_IN].data)

/* linear_cross_entropy works on so many rows at a time: enough that reading and writing the weight's gradient
   each time is little beside the product. Their logits are f32; their gradients take the same place. */
#ifndef TT__LOSS_CHUNK /* tests make both smaller */
#define TT__LOSS_CHUNK 256
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

/* Dropout: of 16 random bits, those below this drop. */
#define TT__DROP_THRESHOLD(p) ((int32_t)((p) * 65536.0f + 0.5f))

/* Where attention or its backward has its operands, k and v after q. */
typedef struct tt__attention_operands { int q, starts, numbers; bool backward; } tt__attention_operands;

static inline tt__attention_operands tt__attention_of(bool backward)
{
    const tt__attention_operands of_forward = {0, 3, 4, false}, of_backward = {1, 4, 7, true};
    return backward ? of_backward : of_forward;
}

/* ------------------------------------------------------------------------------------- a backend's functions
   Pointers called memory are the device's: only the backend looks into them. Everything is done in the order
   of the calls, and may be done after they return, but for read and wait. Where a function fails it returns a
   status or NULL, and error() tells why in a sentence. One thread uses a device at a time. */

enum { TT__HOST_STREAM = -1, TT__COMPUTE_STREAM };

typedef struct tt__backend {
    tt__device *(*open)(tt_context *ctx, int index, char *error, size_t capacity);
    void (*close)(tt__device *d);
    const char *(*error)(tt__device *d);
    void *(*allocate)(tt__device *d, size_t bytes);           /* with any contents                          */
    void (*release)(tt__device *d, void *memory);
    void *(*allocate_host)(tt__device *d, size_t bytes);      /* for write                                  */
    void (*release_host)(tt__device *d, void *host);
    /* `from`, of allocate_host, stays until a later mark or wait. */
    tt_status (*write)(tt__device *d, void *memory, const void *from, size_t bytes);
    tt_status (*fill)(tt__device *d, void *memory, int byte, size_t bytes);
    /* As tt__init_values. */
    tt_status (*init)(tt__device *d, void *memory, tt_dtype dtype, int64_t n, tt_init init, uint64_t key);
    tt_status (*read)(tt__device *d, void *to, const void *memory, size_t bytes);
    tt_status (*wait)(tt__device *d);
    /* mark: from now on `event` stands for all that the stream was given; NULL: makes a new one, to be
       released. after: what the stream, or the caller (TT__HOST_STREAM), does from now on waits for that. */
    tt_status (*mark)(tt__device *d, int stream, void **event);
    tt_status (*after)(tt__device *d, int stream, void *event);
    void (*release_event)(tt__device *d, void *event);
    /* One instruction, or several of one op of which none reads what another writes: these may be done at
       once, or, where they have a workspace, one after another. */
    tt_status (*launch)(const tt__launch *l, int n);
    /* Launches after capture are recorded, not done; captured ends that (NULL: it failed, nothing is left);
       replay does them, any number of times, until forget. NULL where there is no such thing. */
    tt_status (*capture)(tt__device *d);
    void *(*captured)(tt__device *d);
    tt_status (*replay)(tt__device *d, void *recording);
    void (*forget)(tt__device *d, void *recording);
    /* What the backend, or device number `index` if it is there, lacks for an instruction, to follow "cannot
       run", or NULL. Operands are at capacity, without data; no device need be open. */
    const char *(*refuses)(int index, const tt__launch *l);
    /* tt_device_text's lines, whether there is such a device or not. */
    void (*describe)(tt_context *ctx, int index, char *to, size_t capacity);
} tt__backend;

/* What a plan must know of a kind of device, whether this build can run it or not. */
typedef struct tt__device_kind {
    const char *name;
    const tt__backend *backend; /* NULL: this build has none, and only plans                                */
    size_t alignment;   /* of storages; a power of two, at least TT__ALIGN                                  */
    size_t resident;    /* bytes of workspace that stay between instructions and runs                       */
    bool host;          /* its memory is the host's, and a launch is done when it returns                   */
    /* Bytes that i needs beside it, at full capacity. threads: of a device of the kind "cpu". */
    size_t (*workspace)(int threads, const tt_tape *t, const tt__instr *i);
} tt__device_kind;

#if defined(TINYTRAIN_CUDA) || defined(TINYTRAIN_BACKEND)
#ifdef __cplusplus
extern "C" {
#endif
extern const tt__backend tt__cuda_backend; /* tinytrain_cuda.cu                                             */
#ifdef __cplusplus
}
#endif
#endif

#endif /* TT__BACKEND_API */

#if defined(TINYTRAIN_IMPLEMENTATION) && !defined(TT__LANES) && !defined(TT__IMPLEMENTED)
#define TT__IMPLEMENTED
#define TT__IMPLEMENT /* until the end of this reading of the file */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers" /* initialisers leave out fields that are 0 */
#ifdef __cplusplus /* C has no other casts */
#pragma GCC diagnostic ignored "-Wold-style-cast"
#endif
#if defined(TT__KERNELS_ONLY) || defined(TT__KERNELS_ELSEWHERE) /* neither uses the other's helpers */
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

#if defined(__FAST_MATH__) && !defined(TINYTRAIN_ALLOW_FAST_MATH)
#error "tinytrain: -ffast-math (or -Ofast) breaks NaN checks and rounding; build without it, or define \
TINYTRAIN_ALLOW_FAST_MATH"
#endif
#ifndef TINYTRAIN_FILENAME
#define TINYTRAIN_FILENAME "tinytrain.h"
#endif

/* ===========================================================================================================
   BASE                                                                                                 >>base
   Errors, logging, allocation, text, 16-bit floats, counter-based random numbers, threads, files. Uses the C
   library and POSIX only. Everything below may use this section.
   ======================================================================================================== */

#include <errno.h>
#include <fenv.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#include <time.h>
#include <unistd.h>

#define TT__ALIGN 64 /* of every tensor: one cache line, one AVX-512 register */
#define TT__COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static int64_t tt__min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t tt__max(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t tt__ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static size_t tt__align_up(size_t n) { return tt__align_to(n, TT__ALIGN); }

/* a * b; false when the product does not fit. */
static bool tt__mul_size(size_t a, size_t b, size_t *to) { return !__builtin_mul_overflow(a, b, to); }

/* ------------------------------------------------------------------------------------------------ context */

typedef struct tt__pool tt__pool;
typedef struct tt__isa_table tt__isa_table; /* the kernels of one instruction set, see >>cpu */
/* How bf16 matrices are multiplied: tt_context_options.bf16. */
typedef enum tt__bf16 { TT__BF16_CONVERT, TT__BF16_DOT, TT__BF16_TILES } tt__bf16;

/* The CPU as a device: the threads that kernels run on, and which kernels these are. */
typedef struct tt__cpu {
    tt_context *ctx;
    tt__pool *pool;
    const tt__isa_table *isa;
    tt__bf16 bf16;
} tt__cpu;

enum { TT__KINDS = 2, TT__DEVICES = 16 }; /* kinds of devices, and the most devices of a kind */

struct tt_context {
    tt_context_options options;
    tt_status status;
    char error[1024];
    size_t allocated;
    pthread_mutex_t mutex; /* guards `allocated` and the allocator, which background threads share */
    double measured_peak;
    tt__cpu cpu;           /* device "cpu", as the options want it */
    tt__device *devices[TT__KINDS][TT__DEVICES]; /* by kind (tt__device_kinds) and index; NULL until used */
    tt_param **params;
    int n_params, cap_params;
    uint32_t *param_slots, n_param_slots; /* hash table of their names (tt__param_slot): index + 1; 0: free */
    char file_reason[256];
};

TT_PRINTF(4, 5)
static void tt__log(tt_context *ctx, tt_log_level level, const char *id, const char *format, ...)
{
    char message[1024];
    va_list args;
    if (!ctx->options.logger.log) return;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    ctx->options.logger.log(ctx->options.logger.user, level, id, message);
}

/* Records the sentence that tt_error() returns. */
TT_PRINTF(3, 4)
static tt_status tt__fail(tt_context *ctx, tt_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(ctx->error, sizeof ctx->error, format, args);
    va_end(args);
    return ctx->status = status;
}

const char *tt_status_name(tt_status status)
{
    static const char *const names[] = {"TT_OK", "TT_ERR_ARGUMENT", "TT_ERR_SHAPE", "TT_ERR_MEMORY",
                                        "TT_ERR_BUDGET", "TT_ERR_FILE", "TT_ERR_FORMAT", "TT_ERR_NUMERIC",
                                        "TT_ERR_UNSUPPORTED", "TT_ERR_DEVICE", "TT_ERR_INTERNAL"};
    return (unsigned)status < (unsigned)TT__COUNT(names) ? names[status] : "unknown status";
}

const char *tt_error(const tt_context *ctx) { return ctx ? ctx->error : "no context: tt_open failed"; }
tt_status tt_error_code(const tt_context *ctx) { return ctx ? ctx->status : TT_ERR_ARGUMENT; }

/* --------------------------------------------------------------------------------------------- allocation */

/* Every block starts with its size, so that it can be released without the caller knowing it. */
typedef union tt__block { size_t bytes; char pad[TT__ALIGN]; } tt__block;

/* Not zeroed. Background threads use it, as a failure (NULL) sets no error. */
static void *tt__try_alloc(tt_context *ctx, size_t bytes)
{
    const tt_allocator *a = &ctx->options.allocator;
    size_t total = bytes + sizeof(tt__block);
    tt__block *block = NULL;
    pthread_mutex_lock(&ctx->mutex);
    if (total > bytes) block = (tt__block *)a->allocate(a->user, total, TT__ALIGN);
    if (block) {
        block->bytes = total;
        ctx->allocated += bytes;
    }
    pthread_mutex_unlock(&ctx->mutex);
    return block ? block + 1 : NULL;
}

static void *tt__alloc(tt_context *ctx, size_t bytes) /* not zeroed; a failure (NULL) sets the error */
{
    void *p = tt__try_alloc(ctx, bytes);
    if (!p) tt__fail(ctx, TT_ERR_MEMORY, "out of memory: the allocator returned NULL for %zu bytes", bytes);
    return p;
}

static void *tt__calloc(tt_context *ctx, size_t bytes)
{
    void *p = tt__alloc(ctx, bytes);
    return p ? memset(p, 0, bytes) : NULL;
}

static void tt__free(tt_context *ctx, void *memory)
{
    if (!memory) return;
    tt__block *block = (tt__block *)memory - 1;
    pthread_mutex_lock(&ctx->mutex);
    ctx->allocated -= block->bytes - sizeof *block;
    ctx->options.allocator.release(ctx->options.allocator.user, block, block->bytes);
    pthread_mutex_unlock(&ctx->mutex);
}

/* On failure it returns NULL, and `memory` stays. */
static void *tt__realloc(tt_context *ctx, void *memory, size_t bytes)
{
    void *bigger = tt__alloc(ctx, bytes);
    if (bigger && memory) {
        size_t old = ((tt__block *)memory - 1)->bytes - sizeof(tt__block);
        memcpy(bigger, memory, old < bytes ? old : bytes);
        tt__free(ctx, memory);
    }
    return bigger;
}

/* Grows `array` (count, capacity beside it) to hold one more; false when out of memory. */
#define TT__GROW(ctx, array, count, capacity) \
    ((count) < (capacity) || tt__grow((ctx), (void **)&(array), sizeof *(array), &(capacity)))

static bool tt__grow(tt_context *ctx, void **array, size_t item, int *capacity)
{
    size_t bytes;
    int larger = *capacity ? *capacity * 2 : 16;
    if (larger < *capacity || !tt__mul_size(item, (size_t)larger, &bytes)) {
        tt__fail(ctx, TT_ERR_MEMORY, "a list of %d entries of %zu bytes cannot grow", *capacity, item);
        return false;
    }
    void *p = tt__realloc(ctx, *array, bytes);
    if (!p) return false;
    *array = p;
    *capacity = larger;
    return true;
}

static char *tt__strdup(tt_context *ctx, const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = (char *)tt__alloc(ctx, n);
    return copy ? (char *)memcpy(copy, text, n) : NULL;
}

/* --------------------------------------------------------------------------------------------------- text */

/* Appends to a caller's buffer as snprintf does, counting what did not fit. */
typedef struct tt__text { char *to; size_t capacity, length; } tt__text;

TT_PRINTF(2, 3)
static void tt__print(tt__text *text, const char *format, ...)
{
    va_list args;
    size_t room = text->length < text->capacity ? text->capacity - text->length : 0;
    va_start(args, format);
    int n = vsnprintf(room ? text->to + text->length : NULL, room, format, args);
    va_end(args);
    if (n > 0) text->length += (size_t)n;
}

/* Does `name` match the pattern ('*': any run of characters, '?': one)? */
static bool tt__match(const char *pattern, const char *name)
{
    const char *star = NULL, *retry = NULL;
    while (*name) {
        if (*pattern == '*') { star = pattern++; retry = name; }
        else if (*pattern == '?' || *pattern == *name) { pattern++; name++; }
        else if (star) { pattern = star + 1; name = ++retry; }
        else return false;
    }
    while (*pattern == '*') pattern++;
    return !*pattern;
}

/* ------------------------------------------------------------------------------------------------- dtypes */

/* Of sums that a step keeps; no tensor of a user has it. */
#define TT__F64 TT_DTYPE_COUNT

size_t tt_dtype_bytes(tt_dtype dtype)
{
    switch (dtype) {
    case TT_F32: case TT_I32: return 4;
    case TT_BF16: case TT_F16: return 2;
    case TT_U8: return 1;
    case TT__F64: return 8;
    default: return 0;
    }
}

const char *tt_dtype_name(tt_dtype dtype)
{
    static const char *const names[TT_DTYPE_COUNT + 1] = {"f32", "bf16", "f16", "i32", "u8", "f64"};
    return (unsigned)dtype <= TT__F64 ? names[dtype] : "unknown dtype";
}

static bool tt__is_float(tt_dtype dtype) { return dtype == TT_F32 || dtype == TT_BF16 || dtype == TT_F16; }

static uint32_t tt__bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static float tt__float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

static float tt__from_bf16(uint16_t h) { return tt__float((uint32_t)h << 16); }

static uint16_t tt__to_bf16(float x) /* round to nearest even; NaN stays NaN */
{
    uint32_t u = tt__bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static float tt__from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    if (exponent == 31) return tt__float(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    return tt__float(sign | (exponent + 112) << 23 | fraction << 13);
}

static uint16_t tt__to_f16(float x)
{
    uint32_t u = tt__bits(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00); /* rounds to infinity */
    if (magnitude < 0x38800000u) { /* subnormal: the FPU rounds to 2^-24, the ulp of numbers in [0.5, 1) */
        float scaled = tt__float(magnitude) + 0.5f;
        return (uint16_t)(sign | (tt__bits(scaled) - tt__bits(0.5f)));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

/* Converts n numbers between float dtypes (either side may be f32, bf16, f16). */
static void tt__convert(void *to, tt_dtype to_type, const void *from, tt_dtype from_type, size_t n)
{
    if (to_type == from_type) { memcpy(to, from, n * tt_dtype_bytes(to_type)); return; }
    const uint16_t *half = (const uint16_t *)from;
    for (size_t i = 0; i < n; i++) {
        float x = from_type == TT_F32 ? ((const float *)from)[i]
                : from_type == TT_BF16 ? tt__from_bf16(half[i]) : tt__from_f16(half[i]);
        if (to_type == TT_F32) ((float *)to)[i] = x;
        else ((uint16_t *)to)[i] = to_type == TT_BF16 ? tt__to_bf16(x) : tt__to_f16(x);
    }
}

/* ----------------------------------------------------------------------------------------- random numbers */

/* Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a bijection of the
   128-bit counter under the 64-bit key, so any number can be had without those before it. */
static void tt__philox(const uint32_t counter[4], uint64_t key, uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b; c3 = (uint32_t)a; c0 = n0; c2 = n2;
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    out[0] = c0; out[1] = c1; out[2] = c2; out[3] = c3;
}

/* Keys one stream of random numbers: what it is for (a tag), which instance, which step. */
static uint64_t tt__stream_key(uint64_t seed, uint32_t tag, uint64_t a, uint64_t b)
{
    uint32_t high = (uint32_t)(a >> 32) ^ (tag * 0x9E3779B9u), out[4];
    uint32_t counter[4] = {(uint32_t)a, high, (uint32_t)b, (uint32_t)(b >> 32)};
    tt__philox(counter, seed, out);
    return (uint64_t)out[1] << 32 | out[0];
}

static float tt__uniform(uint32_t u) { return ((float)(u >> 8) + 0.5f) * 0x1p-24f; } /* in (0, 1) */

/* Numbers [4i, 4i + 4) of a standard normal sequence (Box, Muller 1958). */
static void tt__normal4(uint64_t key, uint64_t i, float out[4])
{
    uint32_t counter[4] = {(uint32_t)i, (uint32_t)(i >> 32), 0, 0}, u[4];
    tt__philox(counter, key, u);
    for (int k = 0; k < 4; k += 2) {
        double radius = sqrt(-2.0 * log(tt__uniform(u[k])));
        double angle = 6.283185307179586 * tt__uniform(u[k + 1]);
        out[k] = (float)(radius * cos(angle));
        out[k + 1] = (float)(radius * sin(angle));
    }
}

/* A permutation of 0..n-1 (Fisher, Yates), a function of the key alone. */
static void tt__shuffle(uint32_t *order, uint32_t n, uint64_t key)
{
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    for (uint32_t i = n; i > 1; i--) {
        uint32_t counter[4] = {i, 0, 0, 0}, u[4];
        tt__philox(counter, key, u);
        uint32_t j = (uint32_t)(((uint64_t)u[1] << 32 | u[0]) % i), swap = order[i - 1];
        order[i - 1] = order[j];
        order[j] = swap;
    }
}

/* ------------------------------------------------------------------------------------------------ threads */

/* The floating-point mode (rounding, subnormals, traps) of a thread. The library computes in the default, so
   that results don't depend on the caller's: tt__float_default sets it and returns the one to be restored. */
#if defined(__x86_64__)
typedef uint32_t tt__float_mode; /* MXCSR: flags in bits 0 to 5 */
static tt__float_mode tt__float_default(void)
{
    tt__float_mode before = __builtin_ia32_stmxcsr();
    if ((before & ~63u) != 0x1f80) __builtin_ia32_ldmxcsr(0x1f80);
    return before;
}
static void tt__float_restore(tt__float_mode mode)
{
    if ((mode & ~63u) != 0x1f80) __builtin_ia32_ldmxcsr(mode);
}
#elif defined(__aarch64__)
typedef uint64_t tt__float_mode; /* FPCR */
static tt__float_mode tt__float_default(void)
{
    tt__float_mode before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    if (before) __asm__ volatile("msr fpcr, %0" : : "r"((tt__float_mode)0) : "memory");
    return before;
}
static void tt__float_restore(tt__float_mode mode)
{
    if (mode) __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}
#else
typedef fenv_t tt__float_mode;
static tt__float_mode tt__float_default(void)
{
    tt__float_mode before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    return before;
}
static void tt__float_restore(tt__float_mode mode) { fesetenv(&mode); }
#endif

/* Starts a thread that takes none of the signals that are sent to the process: they are for the host's
   threads. A signal that an instruction raises goes to the thread of that instruction and is not blocked, so
   that the host's handlers for it stay in force. Returns false on failure. */
static bool tt__thread_start(pthread_t *handle, void *(*run)(void *), void *arg)
{
    static const int raised[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    sigset_t most, before;
    sigfillset(&most);
    for (int k = 0; k < TT__COUNT(raised); k++) sigdelset(&most, raised[k]);
    pthread_sigmask(SIG_BLOCK, &most, &before);
    int failed = pthread_create(handle, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed == 0;
}

/* A pool that runs `count` tasks on all threads, the caller's included. Each thread begins with a slice of
   its own, the same in each call, so that what it worked on is still in its cache, and then helps with the
   others'. A result must depend on the task alone, not the thread or their number. Idle workers sleep. */
typedef void (*tt__task)(void *arg, int64_t task, int thread);

typedef struct tt__worker {
    tt__pool *pool;
    int thread;
    int64_t next, end; /* the tasks left of this thread's slice; `next` is atomic */
    char apart[40];    /* so that no two slices share a cache line */
} tt__worker;

struct tt__pool {
    int threads, started;
    pthread_t handles[256];
    tt__worker workers[256]; /* [0]: the caller */
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    tt__task run;
    void *arg;
    uint64_t generation;     /* atomic; changes when there is work */
    int active;              /* atomic; workers that have not finished this generation */
    bool stop;
};

static double tt__seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void tt__pool_work(tt__pool *pool, int thread)
{
    for (int k = 0; k < pool->threads; k++) {
        tt__worker *slice = &pool->workers[(thread + k) % pool->threads];
        for (int64_t task; (task = __atomic_fetch_add(&slice->next, 1, __ATOMIC_RELAXED)) < slice->end;)
            pool->run(pool->arg, task, thread);
    }
}

/* Times around a waiting loop, about 20 us: longer than between two ops, shorter than a time slice. */
#define TT__SPINS 2000

static void tt__pause(void) /* in a loop that waits for another thread */
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void *tt__pool_main(void *arg)
{
    const int thread = ((tt__worker *)arg)->thread;
    tt__pool *pool = ((tt__worker *)arg)->pool;
    uint64_t seen = 0;
    tt__float_default();
    for (;;) {
        for (int i = 0; i < TT__SPINS && __atomic_load_n(&pool->generation, __ATOMIC_ACQUIRE) == seen; i++)
            tt__pause();
        pthread_mutex_lock(&pool->mutex);
        while (pool->generation == seen && !pool->stop) pthread_cond_wait(&pool->wake, &pool->mutex);
        seen = pool->generation;
        bool stop = pool->stop;
        pthread_mutex_unlock(&pool->mutex);
        if (stop) return NULL;
        tt__pool_work(pool, thread);
        if (__atomic_sub_fetch(&pool->active, 1, __ATOMIC_ACQ_REL) == 0) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

static void tt__parallel(tt__pool *pool, int64_t count, tt__task run, void *arg)
{
    if (count <= 0) return;
    tt__float_mode mode = tt__float_default();
    if (count == 1 || pool->threads == 1) {
        for (int64_t i = 0; i < count; i++) run(arg, i, 0);
        tt__float_restore(mode);
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    pool->run = run;
    pool->arg = arg;
    for (int t = 0; t < pool->threads; t++) {
        pool->workers[t].next = count * t / pool->threads;
        pool->workers[t].end = count * (t + 1) / pool->threads;
    }
    pool->active = pool->threads - 1;
    __atomic_add_fetch(&pool->generation, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    tt__pool_work(pool, 0);
    tt__float_restore(mode);
    for (int i = 0; i < TT__SPINS && __atomic_load_n(&pool->active, __ATOMIC_ACQUIRE); i++) tt__pause();
    pthread_mutex_lock(&pool->mutex);
    while (__atomic_load_n(&pool->active, __ATOMIC_ACQUIRE)) pthread_cond_wait(&pool->done, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

static void tt__pool_free(tt_context *ctx, tt__pool *pool)
{
    if (!pool) return;
    pthread_mutex_lock(&pool->mutex);
    pool->stop = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->started; i++) pthread_join(pool->handles[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    tt__free(ctx, pool);
}

static tt__pool *tt__pool_new(tt_context *ctx, int threads)
{
    tt__pool *pool = (tt__pool *)tt__calloc(ctx, sizeof *pool);
    if (!pool) return NULL;
    pool->threads = threads;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    while (pool->started < threads - 1) {
        tt__worker *worker = &pool->workers[pool->started + 1];
        worker->pool = pool;
        worker->thread = pool->started + 1;
        if (!tt__thread_start(&pool->handles[pool->started], tt__pool_main, worker)) {
            tt__fail(ctx, TT_ERR_MEMORY, "could not start thread %d of %d", pool->started + 2, threads);
            tt__pool_free(ctx, pool);
            return NULL;
        }
        pool->started++;
    }
    return pool;
}

#if defined(__linux__)
/* CPUs that a control group's quota is worth (version 2: cpu.max; 1: cpu.cfs_*_us); HUGE_VAL: no limit. */
static double tt__quota_in(const char *folder)
{
    static const char *const names[] = {"cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"};
    double value[4] = {0, 0, 0, 0}, quota = HUGE_VAL;
    char path[8192];
    for (int k = 0; k < 3; k++) {
        const int at = k + (k > 0); /* cpu.max holds a quota and a period: value[0] and value[1] */
        if (snprintf(path, sizeof path, "%s/%s", folder, names[k]) >= (int)sizeof path) continue;
        FILE *f = fopen(path, "r");
        if (!f) continue;
        int read = fscanf(f, k == 0 ? "%lf %lf" : "%lf", &value[at], &value[1]);
        if (read < 1) value[at] = 0; /* the word "max" */
        fclose(f);
    }
    for (int k = 0; k < 4; k += 2)
        if (value[k] > 0 && value[k + 1] > 0) quota = fmin(quota, value[k] / value[k + 1]);
    return quota;
}

/* The smallest quota from the process's control groups up to the top, below `root` ("" but in tests). In a
   container /proc may name the host's groups, with its own folder alone there: missing ones limit nothing. */
static double tt__cgroup_quota(const char *root)
{
    char line[4096], folder[8192];
    double quota = HUGE_VAL;
    if (snprintf(folder, sizeof folder, "%s/proc/self/cgroup", root) >= (int)sizeof folder) return quota;
    FILE *f = fopen(folder, "r");
    if (!f) return quota;
    while (fgets(line, sizeof line, f)) { /* number:controllers:/path; no controllers: version 2 */
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(++controllers, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        bool second = !*controllers, cpu = false;
        for (const char *c = controllers; *c; c += strcspn(c, ","), c += *c == ',')
            cpu = cpu || (strcspn(c, ",") == 3 && strncmp(c, "cpu", 3) == 0);
        if (!second && !cpu) continue;
        const char *below[2] = {second ? "" : controllers, second ? "unified" : "cpu"};
        for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
            *end = 0;
            for (int k = 0; k < 2; k++) {
                int n = snprintf(folder, sizeof folder, "%s/sys/fs/cgroup/%s%s", root, below[k], group);
                if (n < (int)sizeof folder) quota = fmin(quota, tt__quota_in(folder));
            }
        }
    }
    fclose(f);
    return quota;
}

/* Returns the number of CPUs in the affinity mask of the calling thread; 0 if the kernel doesn't tell. The C
   library's cpu_set_t needs _GNU_SOURCE, for which it may be too late here, and ends at 1,024 CPUs. */
static int tt__affinity_cpus(void)
{
    unsigned long mask[8192 / 8 / sizeof(long)]; /* bits: the most CPUs that Linux has (NR_CPUS, x86) */
    long bytes = syscall(SYS_sched_getaffinity, 0, sizeof mask, mask);
    int n = 0;
    for (long k = 0; k < bytes / (long)sizeof *mask; k++) n += __builtin_popcountl(mask[k]);
    return n;
}
#endif

/* CPUs that the calling thread may use: of its affinity mask, which threads inherit, at most the quota. */
static int tt__usable_cpus(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
#if defined(__linux__)
    double quota = tt__cgroup_quota("");
    int mask = tt__affinity_cpus();
    if (mask) n = mask;
    if (quota < (double)n) n = (long)ceil(quota);
#endif
    return (int)tt__max(1, tt__min(n, 256));
}

/* ------------------------------------------------------------------------------------------ default hooks */

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" /* none of the hooks needs its `user` */

static void tt__default_log(void *user, tt_log_level level, const char *id, const char *message)
{
    static const char *const names[] = {"debug", "info", "warning", "error"};
    if (level >= TT_LOG_WARNING) fprintf(stderr, "tinytrain %s [%s]: %s\n", names[level], id, message);
}

static void *tt__default_allocate(void *user, size_t bytes, size_t alignment)
{
    void *p = NULL;
    if (bytes >= ((size_t)4 << 20)) alignment = (size_t)2 << 20;
    if (posix_memalign(&p, alignment, bytes) != 0) return NULL;
#ifdef MADV_HUGEPAGE
    if (bytes >= ((size_t)4 << 20)) madvise(p, bytes, MADV_HUGEPAGE); /* advice only: failure is no error */
#endif
    return p;
}

static void tt__default_release(void *user, void *memory, size_t bytes) { free(memory); }

/* POSIX files: a handle is a file descriptor plus one, so that NULL means failure. */
static int tt__fd(void *file) { return (int)(intptr_t)file - 1; }

static void *tt__posix_open(void *user, const char *path, char mode)
{
    /* Opening a pipe that nobody writes to would wait without O_NONBLOCK, which regular files ignore. */
    int flags = mode == 'w' ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY | O_NONBLOCK;
    int fd = open(path, flags | O_CLOEXEC, 0666);
    struct stat info;
    if (fd >= 0 && mode == 'r' && fstat(fd, &info) == 0 && !S_ISREG(info.st_mode)) {
        close(fd);
        errno = S_ISDIR(info.st_mode) ? EISDIR : ESPIPE;
        return NULL;
    }
    return (void *)(intptr_t)(fd + 1);
}

static int64_t tt__posix_size(void *user, void *file)
{
    struct stat info;
    return fstat(tt__fd(file), &info) == 0 ? (int64_t)info.st_size : -1;
}

static bool tt__posix_read(void *user, void *file, uint64_t offset, void *to, size_t n)
{
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(tt__fd(file), (char *)to + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) { if (got == 0) errno = EIO; return false; }
        done += (size_t)got;
    }
    return true;
}

static bool tt__posix_write(void *user, void *file, const void *from, size_t n)
{
    for (size_t done = 0; done < n;) {
        ssize_t put = write(tt__fd(file), (const char *)from + done, n - done);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        done += (size_t)put;
    }
    return true;
}

static bool tt__posix_sync(void *user, void *file) { return fsync(tt__fd(file)) == 0 || errno == EINVAL; }
static bool tt__posix_close(void *user, void *file) { return close(tt__fd(file)) == 0; }
static bool tt__posix_rename(void *user, const char *from, const char *to) { return rename(from, to) == 0; }
static bool tt__posix_remove(void *user, const char *path) { return remove(path) == 0; }

static bool tt__posix_make_folder(void *user, const char *path)
{
    struct stat info;
    if (mkdir(path, 0777) == 0) return true;
    return errno == EEXIST && stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

static bool tt__posix_list(void *user, const char *path, bool (*each)(void *arg, const char *name), void *arg)
{
    DIR *folder = opendir(path);
    int error = 0;
    if (!folder) return false;
    for (struct dirent *entry;;) {
        errno = 0; /* so that an error of readdir can be told from the end of the folder */
        if (!(entry = readdir(folder))) { error = errno; break; }
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (!each(arg, entry->d_name)) break;
    }
    closedir(folder);
    errno = error;
    return error == 0;
}

static const char *tt__posix_reason(void *user)
{
    return errno == ESPIPE ? "it is a pipe or a device; expected a regular file" : strerror(errno);
}
#pragma GCC diagnostic pop

tt_context_options tt_context_options_default(void)
{
    tt_context_options o;
    memset(&o, 0, sizeof o);
    o.seed = 1;
#ifndef NDEBUG
    o.verify = true;
#endif
    o.logger.log = tt__default_log;
    o.allocator.allocate = tt__default_allocate;
    o.allocator.release = tt__default_release;
    const tt_files posix = {
        tt__posix_open, tt__posix_size, tt__posix_read, tt__posix_write, tt__posix_sync, tt__posix_close,
        tt__posix_rename, tt__posix_remove, tt__posix_make_folder, tt__posix_list, tt__posix_reason, NULL};
    o.files = posix;
    return o;
}

/* -------------------------------------------------------------------------------------------- whole files */

/* Opens a file to read it, and tells its size. */
static tt_status tt__file_begin(tt_context *ctx, const char *path, void **file, size_t *size)
{
    const tt_files *files = &ctx->options.files;
    *file = files->open(files->user, path, 'r');
    if (!*file) return tt__fail(ctx, TT_ERR_FILE, "cannot open '%s': %s", path, files->reason(files->user));
    int64_t bytes = files->size(files->user, *file);
    *size = (size_t)bytes;
    if (bytes >= 0) return TT_OK;
    tt__fail(ctx, TT_ERR_FILE, "cannot tell the size of '%s': %s", path, files->reason(files->user));
    files->close(files->user, *file);
    *file = NULL;
    return TT_ERR_FILE;
}

/* Reads n bytes from `offset` on of a file that had them when it was opened. */
static tt_status tt__file_read(tt_context *ctx, const char *path, void *file, uint64_t offset, void *to,
                               size_t n)
{
    const tt_files *files = &ctx->options.files;
    char reason[256];
    if (!n || files->read(files->user, file, offset, to, n)) return TT_OK;
    snprintf(reason, sizeof reason, "%s", files->reason(files->user));
    int64_t size = files->size(files->user, file);
    if (size >= 0 && (uint64_t)size < offset + n)
        return tt__fail(ctx, TT_ERR_FILE, "'%s', byte %lld: the file was cut off while it was read", path,
                        (long long)size);
    return tt__fail(ctx, TT_ERR_FILE, "cannot read %zu bytes of '%s': %s", n, path, reason);
}

/* A file's bytes in memory, a NUL behind them. */
typedef struct tt__file_bytes { char *bytes; size_t size; } tt__file_bytes;

static void tt__file_close(tt_context *ctx, tt__file_bytes *f)
{
    tt__free(ctx, f->bytes);
    memset(f, 0, sizeof *f);
}

static tt_status tt__file_open(tt_context *ctx, const char *path, tt__file_bytes *out)
{
    const tt_files *files = &ctx->options.files;
    void *file;
    memset(out, 0, sizeof *out);
    tt_status status = tt__file_begin(ctx, path, &file, &out->size);
    if (status != TT_OK) return status;
    out->bytes = (char *)tt__alloc(ctx, out->size + 1);
    status = out->bytes ? tt__file_read(ctx, path, file, 0, out->bytes, out->size) : TT_ERR_MEMORY;
    if (status != TT_OK) tt__file_close(ctx, out);
    else out->bytes[out->size] = 0;
    files->close(files->user, file);
    return status;
}

/* Writes a file under a temporary name; tt__writer_end syncs and renames it into place, so that readers find
   the old file or the whole new one. The first failure sticks and the temporary file is removed. */
typedef struct tt__writer {
    tt_context *ctx;
    void *file;
    tt_status status;
    size_t used;
    char path[1024], temporary[1040];
    char buffer[16384];
} tt__writer;

static void tt__writer_fail(tt__writer *w, const char *what)
{
    const tt_files *files = &w->ctx->options.files;
    if (w->status != TT_OK) return;
    const char *reason = files->reason(files->user);
    w->status = tt__fail(w->ctx, TT_ERR_FILE, "cannot %s '%s': %s", what, w->temporary, reason);
}

static tt_status tt__writer_begin(tt__writer *w, tt_context *ctx, const char *path)
{
    const tt_files *files = &ctx->options.files;
    memset(w, 0, offsetof(tt__writer, path));
    w->ctx = ctx;
    if (strlen(path) >= sizeof w->path)
        return w->status = tt__fail(ctx, TT_ERR_ARGUMENT, "path of %zu bytes is too long", strlen(path));
    snprintf(w->path, sizeof w->path, "%s", path);
    snprintf(w->temporary, sizeof w->temporary, "%s.tmp", path);
    w->file = files->open(files->user, w->temporary, 'w');
    if (!w->file) tt__writer_fail(w, "create");
    return w->status;
}

static void tt__writer_put(tt__writer *w, const void *data, size_t n)
{
    const tt_files *files = &w->ctx->options.files;
    if (w->status == TT_OK && n && !files->write(files->user, w->file, data, n)) tt__writer_fail(w, "write");
}

static void tt__writer_flush(tt__writer *w)
{
    tt__writer_put(w, w->buffer, w->used);
    w->used = 0;
}

static void tt__write(tt__writer *w, const void *data, size_t n)
{
    if (w->status != TT_OK) return;
    if (w->used + n > sizeof w->buffer) tt__writer_flush(w);
    if (n >= sizeof w->buffer) { tt__writer_put(w, data, n); return; }
    memcpy(w->buffer + w->used, data, n);
    w->used += n;
}

static tt_status tt__writer_end(tt__writer *w)
{
    const tt_files *files = &w->ctx->options.files;
    if (!w->file) return w->status;
    tt__writer_flush(w);
    if (w->status == TT_OK && !files->sync(files->user, w->file)) tt__writer_fail(w, "sync");
    if (!files->close(files->user, w->file)) tt__writer_fail(w, "close");
    w->file = NULL;
    bool renames = w->status == TT_OK;
    if (renames && !files->rename(files->user, w->temporary, w->path)) tt__writer_fail(w, "rename");
    if (w->status != TT_OK) files->remove(files->user, w->temporary);
    return w->status;
}

/* Sorts numbers by less(arg, a, b), a strict total order. Heapsort needs no memory, and n log n for any
   input. */
typedef bool (*tt__less)(const void *arg, uint32_t a, uint32_t b);

static void tt__sift_down(uint32_t *items, size_t root, size_t n, tt__less less, const void *arg)
{
    uint32_t item = items[root];
    for (size_t child = 2 * root + 1; child < n; child = 2 * root + 1) {
        if (child + 1 < n && less(arg, items[child], items[child + 1])) child++;
        if (!less(arg, item, items[child])) break;
        items[root] = items[child];
        root = child;
    }
    items[root] = item;
}

static void tt__sort_indices(uint32_t *items, size_t n, tt__less less, const void *arg)
{
    for (size_t i = n / 2; i-- > 0;) tt__sift_down(items, i, n, less, arg);
    while (n > 1) {
        uint32_t largest = items[0];
        items[0] = items[--n];
        items[n] = largest;
        tt__sift_down(items, 0, n, less, arg);
    }
}

/* ===========================================================================================================
   TAPE                                                                                              >>tape
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
    /* The arena that holds its values, from the compilation of the first program with it; NULL: none. */
    struct tt__arena *holder;
};

/* STEP: the step's settings and results. */
typedef enum tt__storage {
    TT__TRANSIENT, TT__INPUT, TT__PARAMETER, TT__GRADIENT, TT__STATE, TT__STEP
} tt__storage;
/* In whose memory a value lies. Where the device's is the host's, instructions may use both. */
typedef enum tt__space { TT__DEVICE, TT__HOST, TT__SPACES } tt__space;
/* Which part of a tensor a value or a home has: all of it; chunks of TT__CHUNK elements; rows or columns
   (dim), in each of `blocks` equal blocks. axis: of ranks, the one that it is split over. */
typedef enum tt__part_kind { TT__WHOLE, TT__FLAT, TT__ROWS, TT__COLS } tt__part_kind;
typedef struct tt__part { tt__part_kind kind; int dim, blocks, axis; } tt__part;

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
    int32_t base;       /* the value whose storage it shares: itself unless it is a view */
    int64_t offset;     /* elements from the start of base */
    int32_t param;      /* index in ctx->params of PARAMETER, GRADIENT and STATE values; -1 */
    bool keep;          /* readable after the run */
    bool block_end;     /* recompute: the backward finds it rather than computes it again */
    bool persistent;    /* lives from run to run */
    bool pinned_f32;    /* statistics and losses: no precision pass changes it */
    bool residual;      /* precision: of the residual stream */
    bool needs_grad;    /* autodiff: a trainable parameter lies behind it */
    int32_t grad;       /* autodiff: the value that holds its gradient; 0: none yet */
    /* As tt__index counts them: one more than the instruction that first writes it (0: none does); of a base,
       with its views: operands that read it, results that write it, its views, its last reader
       and writer. */
    int32_t producer, uses, writes, views, reader, writer;
    int32_t instead;    /* within a pass, what is to be read instead of it; 0: itself */
    bool named;         /* by tt_name, or by a pass */
    size_t place;       /* planner: byte offset in its region of the arena */
    char name[72];
} tt__value;

typedef struct tt__axis { char name[32]; int64_t capacity; } tt__axis;

struct tt_tape {
    tt_context *ctx;
    tt__value *values; int n_values, cap_values;    /* values[0] is "none" */
    tt__instr *code; int n_code, cap_code;
    tt__axis *axes; int n_axes, cap_axes;           /* axes[0] is "none" */
    int32_t *params; int n_params, cap_params;      /* of ctx->params: the value for each; 0: none        */
    uint32_t n_random;
    size_t alignment;                               /* of storages, as the kind of device wants it */
    bool host;                                      /* the memory of that kind is the host's */
    bool accumulate;                                /* a step has several micro-batches */
    /* the step's settings and results, and views of these: tt__totals, tt__scale, tt__clipped; 0: none */
    int32_t run, results, totals, scale, clipped;
    tt_status status;                               /* of the first op that failed, with its sentence */
    char error[512];
};

/* The rows of TT__OPS (>>backend). An op's rules are in >>ops. */
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

/* ---------------------------------------------------------------------------------------------- recording */

/* Marks the tape with its first error. Returns false, which as the number of a value is none. */
TT_PRINTF(3, 4)
static bool tt__tape_fail(tt_tape *t, tt_status status, const char *format, ...)
{
    va_list args;
    if (t->status != TT_OK) return false;
    t->status = status;
    va_start(args, format);
    vsnprintf(t->error, sizeof t->error, format, args);
    va_end(args);
    tt__fail(t->ctx, status, "%s", t->error);
    return false;
}

tt_status tt_tape_status(const tt_tape *t) { return t->status; }

void tt_tape_free(tt_tape *t)
{
    if (!t) return;
    tt__free(t->ctx, t->values);
    tt__free(t->ctx, t->code);
    tt__free(t->ctx, t->axes);
    tt__free(t->ctx, t->params);
    tt__free(t->ctx, t);
}

static bool tt__out_of_memory(tt_tape *t)
{
    return tt__tape_fail(t, TT_ERR_MEMORY, "out of memory while recording a tape");
}

/* A new value with storage of its own; 0 after tt__tape_fail. The arguments may point into the tape. */
TT_PRINTF(4, 5)
static int32_t tt__new_value(tt_tape *t, const tt__shape *shape, tt__storage storage, const char *format, ...)
{
    tt__value v;
    va_list args;
    memset(&v, 0, sizeof v);
    v.shape = *shape;
    v.ld = shape->cols;
    v.storage = storage;
    v.base = t->n_values;
    v.param = -1;
    va_start(args, format);
    vsnprintf(v.name, sizeof v.name, format, args);
    va_end(args);
    if (shape->rows > TT__MOST_ELEMENTS / shape->cols)
        return tt__tape_fail(t, TT_ERR_SHAPE, "'%s': %lld rows of width %lld are 2^47 elements or more, "
                             "which no memory holds", v.name, (long long)shape->rows, (long long)shape->cols);
    if (!TT__GROW(t->ctx, t->values, t->n_values, t->cap_values)) return tt__out_of_memory(t);
    t->values[t->n_values] = v;
    return t->n_values++;
}

/* A view of rows [0, rows) and columns [from, from + cols) of v, or (whole, contiguous) another shape. */
static int32_t tt__new_view(tt_tape *t, int32_t of, const tt__shape *shape, int64_t offset, int64_t ld,
                            const char *name)
{
    int32_t id = tt__new_value(t, shape, t->values[of].storage, "%s", name);
    if (!id) return 0;
    tt__value *v = &t->values[id], *b = &t->values[of];
    v->base = b->base;
    v->offset = b->offset + offset;
    v->ld = ld;
    v->needs_grad = b->needs_grad; /* views made by autodiff */
    v->persistent = b->persistent;
    v->space = b->space;
    v->part = b->part;
    v->param = b->param;
    return id;
}

static tt__instr tt__new_instr(int op)
{
    tt__instr i;
    memset(&i, 0, sizeof i);
    i.op = op;
    return i;
}

static tt__instr *tt__append(tt_tape *t, int op)
{
    if (!TT__GROW(t->ctx, t->code, t->n_code, t->cap_code)) { tt__out_of_memory(t); return NULL; }
    tt__instr *i = &t->code[t->n_code++];
    *i = tt__new_instr(op);
    if (tt__is(i, TT__RANDOM)) i->random = ++t->n_random;
    return i;
}

tt_tape *tt_tape_new(tt_context *ctx)
{
    tt_tape *t = (tt_tape *)tt__calloc(ctx, sizeof *t);
    if (!t) return NULL;
    t->ctx = ctx;
    t->alignment = TT__ALIGN;
    if (!TT__GROW(ctx, t->values, t->n_values, t->cap_values) ||
        !TT__GROW(ctx, t->axes, t->n_axes, t->cap_axes)) {
        tt_tape_free(t);
        return NULL;
    }
    memset(&t->values[t->n_values++], 0, sizeof *t->values);
    memset(&t->axes[t->n_axes++], 0, sizeof *t->axes);
    return t;
}

/* An axis as a number of rows: negative, so that it cannot be taken for a fixed number. */
static int64_t tt__axis_code(int32_t axis, int32_t extra) { return -((int64_t)axis * 4 + extra) - 1; }

static bool tt__decode_rows(tt_tape *t, int64_t rows, tt__shape *shape)
{
    shape->axis = shape->extra = 0;
    shape->rows = rows;
    if (rows > 0) return true;
    int64_t code = -(rows + 1);
    if (rows == 0 || code / 4 < 1 || code / 4 >= t->n_axes) return false;
    shape->axis = (int32_t)(code / 4);
    shape->extra = (int32_t)(code % 4);
    shape->rows = t->axes[shape->axis].capacity + shape->extra;
    return true;
}

int64_t tt_axis(tt_tape *t, const char *name, int64_t capacity)
{
    if (t->status != TT_OK) return 0;
    if (capacity < 1 || capacity > INT32_MAX)
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "axis '%s': capacity %lld is not in 1..2^31-1", name,
                             (long long)capacity);
    if (!TT__GROW(t->ctx, t->axes, t->n_axes, t->cap_axes)) return tt__out_of_memory(t);
    tt__axis *a = &t->axes[t->n_axes];
    snprintf(a->name, sizeof a->name, "%s", name);
    a->capacity = capacity;
    return tt__axis_code(t->n_axes++, 0);
}

/* The first instruction of a segment; for TT__SEGMENTS, their number. */
static int tt__segment_first(const tt_tape *t, unsigned segment)
{
    int from = 0, to = t->n_code;
    while (from < to) {
        int middle = (from + to) / 2;
        if ((unsigned)t->code[middle].segment < segment) from = middle + 1;
        else to = middle;
    }
    return from;
}

static size_t tt__storage_bytes(const tt__value *v)
{
    return tt__align_up((size_t)v->shape.rows * (size_t)v->shape.cols * tt_dtype_bytes(v->shape.dtype));
}

static tt_value tt__handle(int32_t id) { tt_value v; v.id = id; return v; }

/* "'h' f32 (tokens<=8192, 768)" */
static const char *tt__describe(const tt_tape *t, int32_t id, char *to, size_t capacity)
{
    const tt__shape *x = &t->values[id].shape;
    char rows[64];
    snprintf(rows, sizeof rows, "%s%s%s%lld", x->axis ? t->axes[x->axis].name : "",
             x->axis && x->extra ? "+1" : "", x->axis ? "<=" : "", (long long)x->rows);
    if (!id) snprintf(to, capacity, "nothing");
    else snprintf(to, capacity, "'%s' %s (%s, %lld)", t->values[id].name, tt_dtype_name(x->dtype), rows,
                  (long long)x->cols);
    return to;
}

tt_value tt_input(tt_tape *t, const char *name, tt_dtype dtype, int64_t rows, int64_t width)
{
    tt__shape shape;
    shape.dtype = dtype;
    shape.cols = width;
    if (t->status != TT_OK) return tt__handle(0);
    if (tt__decode_rows(t, rows, &shape) && width >= 1 && (unsigned)dtype < TT_DTYPE_COUNT)
        return tt__handle(tt__new_value(t, &shape, TT__INPUT, "%s", name));
    tt__tape_fail(t, TT_ERR_SHAPE, "input '%s': %lld rows of width %lld, dtype %d, is no tensor; rows and "
                  "width must be at least 1", name, (long long)rows, (long long)width, (int)dtype);
    return tt__handle(0);
}

tt_value tt_seq_start(tt_tape *t, const char *name, int64_t seqs)
{
    tt__shape shape;
    if (t->status == TT_OK && seqs < 0 && tt__decode_rows(t, seqs, &shape) && shape.extra == 0)
        return tt_input(t, name, TT_I32, tt__axis_code(shape.axis, 1), 1);
    if (seqs > 0 && seqs < INT64_MAX) return tt_input(t, name, TT_I32, seqs + 1, 1);
    tt__tape_fail(t, TT_ERR_SHAPE, "sequence starts '%s': %lld is neither a positive number nor an axis",
                  name, (long long)seqs);
    return tt__handle(0);
}

int64_t tt_value_rows(const tt_tape *t, tt_value v)
{
    return v.id > 0 && v.id < t->n_values ? t->values[v.id].shape.rows : 0;
}

int64_t tt_value_width(const tt_tape *t, tt_value v)
{
    return v.id > 0 && v.id < t->n_values ? t->values[v.id].shape.cols : 0;
}

void tt_name(tt_tape *t, tt_value v, const char *format, ...)
{
    va_list args;
    if (v.id <= 0 || v.id >= t->n_values) return;
    va_start(args, format);
    vsnprintf(t->values[v.id].name, sizeof t->values[v.id].name, format, args);
    t->values[v.id].named = true;
    va_end(args);
}

void tt_output(tt_tape *t, tt_value v)
{
    if (v.id > 0 && v.id < t->n_values) t->values[t->values[v.id].base].keep = t->values[v.id].keep = true;
    else tt__tape_fail(t, TT_ERR_ARGUMENT, "tt_output: value %d is not on this tape", (int)v.id);
}

void tt_block_end(tt_tape *t, tt_value v)
{
    if (v.id > 0 && v.id < t->n_values) t->values[t->values[v.id].base].block_end = true;
    else tt__tape_fail(t, TT_ERR_ARGUMENT, "tt_block_end: value %d is not on this tape", (int)v.id);
}

/* v is on the tape, as operand `number` of what an error calls `what`. */
static bool tt__on_tape(tt_tape *t, const char *what, int number, tt_value v)
{
    if (t->status != TT_OK || (v.id > 0 && v.id < t->n_values)) return t->status == TT_OK;
    return tt__tape_fail(t, TT_ERR_ARGUMENT, "%s: operand %d is not a value of this tape (id %d)", what,
                         number, (int)v.id);
}

/* The value of parameter p on this tape, as operand `number` of `what`; 0 after tt__tape_fail. */
static int32_t tt__param_id(tt_tape *t, const char *what, int number, const tt_param *p)
{
    if (t->status != TT_OK) return 0;
    if (!p) tt__tape_fail(t, TT_ERR_ARGUMENT, "%s: parameter operand %d is NULL", what, number);
    else if (p->ctx != t->ctx)
        tt__tape_fail(t, TT_ERR_ARGUMENT, "%s: parameter '%s' belongs to another context", what, p->name);
    if (t->status != TT_OK) return 0;
    while (t->n_params <= p->index) {
        if (!TT__GROW(t->ctx, t->params, t->n_params, t->cap_params)) return tt__out_of_memory(t);
        t->params[t->n_params++] = 0;
    }
    if (t->params[p->index]) return t->params[p->index];
    const int64_t rows = p->ndim > 1 ? p->dims[0] : 1;
    const tt__shape shape = {TT_F32, rows, p->size / rows, 0, 0};
    int32_t id = tt__new_value(t, &shape, TT__PARAMETER, "%s", p->name);
    if (!id) return 0;
    t->values[id].param = p->index;
    t->values[id].persistent = true;
    return t->params[p->index] = id;
}

tt_value tt_param_value(tt_tape *t, tt_param *p) { return tt__handle(tt__param_id(t, "param_value", 0, p)); }

/* -------------------------------------------------------------------------------------------------- views */

tt_value tt_slice(tt_tape *t, tt_value x, int64_t from, int64_t width)
{
    char what[256];
    if (!tt__on_tape(t, "slice", 0, x)) return tt__handle(0);
    tt__shape shape = t->values[x.id].shape;
    if (from < 0 || width < 1 || from > shape.cols - width)
        return tt__handle(tt__tape_fail(t, TT_ERR_SHAPE, "slice: %lld columns from column %lld of %s",
                                        (long long)width, (long long)from,
                                        tt__describe(t, x.id, what, sizeof what)));
    shape.cols = width;
    return tt__handle(tt__new_view(t, x.id, &shape, from, t->values[x.id].ld, t->values[x.id].name));
}

tt_value tt_reshape(tt_tape *t, tt_value x, int64_t rows, int64_t width)
{
    char what[256];
    tt__shape to;
    if (!tt__on_tape(t, "reshape", 0, x)) return tt__handle(0);
    tt__value *v = &t->values[x.id];
    bool ok = width >= 1 && tt__decode_rows(t, rows, &to) && v->ld == v->shape.cols;
    const tt__shape *from = &v->shape;
    if (ok && from->axis) ok = to.axis == from->axis && to.extra == from->extra && width == from->cols;
    else if (ok) ok = !to.axis && to.rows <= INT64_MAX / width && to.rows * width == from->rows * from->cols;
    to.dtype = v->shape.dtype;
    to.cols = width;
    if (ok) return tt__handle(tt__new_view(t, x.id, &to, 0, width, v->name));
    tt__tape_fail(t, TT_ERR_SHAPE, "reshape: %s to (%lld, %lld): the number of elements must stay, rows of "
                  "an axis cannot be split, and a slice cannot be reshaped",
                  tt__describe(t, x.id, what, sizeof what), (long long)rows, (long long)width);
    return tt__handle(0);
}

/* --------------------------------------------------------------------------------------------------- editing
   How passes rewrite code in one sweep: instructions keep their numbers until tt__settle. tt__index counts
   who writes and reads what; drop, put and insert keep the counts. A dropped instruction has op -1 and no
   operands. */

/* Adds what instruction k reads and writes to the counts, or (by: -1) takes it away. */
static void tt__count(tt_tape *t, int k, int by)
{
    const tt__instr *i = &t->code[k];
    for (int j = 0; j < TT__MAX_IN; j++) if (i->in[j]) t->values[t->values[i->in[j]].base].uses += by;
    for (int j = 0; j < TT__MAX_OUT; j++) {
        tt__value *y = &t->values[i->out[j]];
        if (!i->out[j]) continue;
        t->values[y->base].writes += by;
        if (by > 0 && k > t->values[y->base].writer) t->values[y->base].writer = k;
        if (by > 0 && (!y->producer || k < y->producer)) y->producer = k + 1;
        if (by < 0 && y->producer == k + 1) y->producer = 0;
    }
}

/* Counts anew; returns the number of instructions. */
static int tt__index(tt_tape *t)
{
    for (int32_t v = 0; v < t->n_values; v++) {
        tt__value *x = &t->values[v];
        x->producer = x->uses = x->writes = x->views = x->reader = x->writer = x->instead = 0;
    }
    for (int32_t v = 1; v < t->n_values; v++) t->values[t->values[v].base].views += t->values[v].base != v;
    for (int k = 0; k < t->n_code; k++) {
        tt__count(t, k, 1);
        for (int j = 0; j < TT__MAX_IN; j++) t->values[t->values[t->code[k].in[j]].base].reader = k;
    }
    return t->n_code;
}

static int tt__uses(const tt_tape *t, int32_t v) { return t->values[t->values[v].base].uses; }
static int tt__producer(const tt_tape *t, int32_t v) { return t->values[v].producer - 1; } /* -1: none */

/* v is read once, and nothing else needs its contents afterwards. */
static bool tt__only_use(const tt_tape *t, int32_t v, int32_t root)
{
    const tt__value *x = &t->values[v];
    return v && v != root && !x->keep && x->base == v && x->storage == TT__TRANSIENT && x->uses == 1;
}

/* Instruction `at`, alone in writing its out[0], may run at `later`: until then none writes what it reads. */
static bool tt__may_wait(const tt_tape *t, int at, int later)
{
    bool written = false; /* after `at`: only then is there something to search */
    if (t->values[t->code[at].out[0]].writes != 1) return false;
    for (int j = 0; j < TT__MAX_IN; j++) written |= t->values[t->values[t->code[at].in[j]].base].writer > at;
    for (int k = at + 1; k <= later && written; k++)
        for (int o = 0; o < TT__MAX_OUT; o++)
            for (int j = 0; j < TT__MAX_IN && t->code[k].out[o]; j++) {
                int32_t in = t->code[at].in[j];
                if (in && t->values[in].base == t->values[t->code[k].out[o]].base) return false;
            }
    return true;
}

static void tt__drop(tt_tape *t, int k)
{
    tt__count(t, k, -1);
    t->code[k] = tt__new_instr(-1);
}

/* `i` in the place of instruction k. */
static void tt__put(tt_tape *t, int k, const tt__instr *i)
{
    tt__drop(t, k);
    t->code[k] = *i;
    tt__count(t, k, 1);
}

/* Drops instruction `at`; `merged`, which does its work and k's, stands at k and writes what k wrote. */
static void tt__merge(tt_tape *t, int at, int k, tt__instr merged)
{
    merged.out[0] = t->code[k].out[0];
    merged.add = t->code[k].add;
    merged.add_later = t->code[k].add_later;
    tt__drop(t, at);
    tt__put(t, k, &merged);
}

/* `i` right before instruction `before`, after what was inserted there already. Returns the number behind all
   others that it has until tt__settle; 0: out of memory. */
static int tt__insert(tt_tape *t, int before, const tt__instr *i)
{
    if (!TT__GROW(t->ctx, t->code, t->n_code, t->cap_code)) return tt__out_of_memory(t);
    t->code[t->n_code] = *i;
    t->code[t->n_code].before = before;
    tt__count(t, t->n_code, 1);
    return t->n_code++;
}

/* Takes out what was dropped, and puts what was inserted behind the first n instructions in its place. */
static tt_status tt__settle(tt_tape *t, int n)
{
    int kept = 0;
    if (t->n_code == n) {
        for (int k = 0; k < n; k++) if (t->code[k].op >= 0) t->code[kept++] = t->code[k];
        t->n_code = kept;
        return TT_OK;
    }
    tt__instr *code = (tt__instr *)tt__alloc(t->ctx, sizeof *code * (size_t)t->n_code);
    int *place = (int *)tt__calloc(t->ctx, sizeof *place * (size_t)(n + 1)); /* how many; then where */
    if (code && place) {
        for (int k = n; k < t->n_code; k++) place[t->code[k].before] += t->code[k].op >= 0;
        for (int k = 0; k <= n; k++) {
            int many = place[k];
            place[k] = kept;
            kept += many;
            if (k < n && t->code[k].op >= 0) code[kept++] = t->code[k];
        }
        for (int k = n; k < t->n_code; k++)
            if (t->code[k].op >= 0) code[place[t->code[k].before]++] = t->code[k];
        tt__instr *old = t->code;
        t->code = code;
        t->cap_code = t->n_code;
        t->n_code = kept;
        code = old;
    }
    bool ok = place && code;
    tt__free(t->ctx, code);
    tt__free(t->ctx, place);
    return ok ? TT_OK : TT_ERR_MEMORY;
}

/* ===========================================================================================================
   OPS                                                                                               >>ops
   Each op in one place. Its block has its options' defaults, its shape rule, the function that records it,
   its backward, the rules of the ops that only its backward or a pass emits, and what else is known about it;
   it ends with the tt__rules. The row in TT__OPS (>>backend) makes its number, its name and its place in
   every table. Kernels are in >>cpu and tinytrain_cuda.cu. Nothing else asks which op an instruction is:
   passes, planner and runs read rows and rules. Uses tape.
   ======================================================================================================== */

/* Emits instructions onto the end of a tape. */
typedef struct tt__builder {
    tt_tape *t;
    bool accumulate;      /* gradients of parameters persist over micro-batches                             */
    bool ok;              /* false: out of memory                                                           */
    tt__segment segment;  /* of what it emits                                                               */
    bool backward;
} tt__builder;

/* The backward of an op. */
typedef struct tt__gradient {
    /* Emits it. f is a copy of the instruction, g the gradient of its out[0]. NULL: see reads. */
    void (*emit)(tt__builder *b, const tt__instr *f, int32_t g);
    /* Not NULL: it is one instruction of `op`, see tt__emit_gradient. */
    const char *reads, *into;
    int op;
} tt__gradient;

/* What is known of an op beside its row; NULL: see each. */
typedef struct tt__rules {
    /* Checks the operands and tells the shapes of the outputs; false after tt__tape_fail. The verifier runs
       it too, so it depends on the operands only; the outputs of ops that are not recorded exist already. */
    bool (*shape)(tt_tape *t, const tt__instr *i, tt__shape *out);
    tt__gradient backward; /* nothing in it: there is none */
    /* Bytes of scratch at capacity: on a CPU of some threads (NULL: tt__widen_bytes), on CUDA (NULL: 0). */
    size_t (*cpu_scratch)(int threads, const tt_tape *t, const tt__instr *i);
    size_t (*cuda_scratch)(const tt_tape *t, const tt__instr *i);
    /* Before a run: are the operands' integers, which are on the host, what kernels rely on? NULL: always. */
    tt_status (*check)(const tt__launch *l);
    /* Before differentiation, and later, after it: makes one instruction of instruction k and what it reads
       from, where it can. root: the value that the program is compiled for. NULL: never. */
    void (*fuse)(tt_tape *t, int k, int32_t root, bool later);
    /* Floating-point operations of matrix products, for NULL those of TT__PRODUCT. in: of a run, with
       integers on the host, or without data at capacity. */
    double (*flops)(const tt__instr *i, const tt__mat *in);
    /* How the outputs are split over devices when the operands are. NULL, as yet for all ops: not at all. */
    bool (*layout)(tt_tape *t, const tt__instr *i, tt__part *out);
} tt__rules;

static const tt__rules *tt__rules_of(const tt__instr *i); /* the table stands below the rules */

/* ---------------------------------------------------------------------------------------------- recording */

static bool tt__shape_of(tt_tape *t, const tt__instr *i, tt__shape out[TT__MAX_OUT])
{
    memset(out, 0, sizeof *out * TT__MAX_OUT);
    return tt__rules_of(i)->shape(t, i, out);
}

/* Records i with operands of the kinds that letters tell: v a tt_value, p a tt_param; V and P may be none (id
   0, NULL). Checks it by its shape rule, creates its outputs, appends it. Returns out[0]. */
static tt_value tt__record(tt_tape *t, tt__instr i, const char *kinds, ...)
{
    tt__shape shape[TT__MAX_OUT];
    va_list args;
    va_start(args, kinds);
    for (int k = 0; kinds[k]; k++) {
        const bool value = kinds[k] == 'v' || kinds[k] == 'V', optional = kinds[k] == 'V' || kinds[k] == 'P';
        tt_value v = value ? va_arg(args, tt_value) : tt__handle(0);
        tt_param *p = value ? NULL : va_arg(args, tt_param *);
        if (optional && !v.id && !p) continue;
        if (!value) i.in[k] = tt__param_id(t, tt__instr_name(&i), k, p);
        else if (tt__on_tape(t, tt__instr_name(&i), k, v)) i.in[k] = v.id;
    }
    va_end(args);
    if (t->status != TT_OK || !tt__shape_of(t, &i, shape)) return tt__handle(0);
    tt__instr *to = tt__append(t, i.op);
    if (!to) return tt__handle(0);
    i.random = to->random;
    *to = i;
    int at = t->n_code - 1;
    for (int k = 0; k < tt__ops[i.op].outputs; k++) {
        if (!shape[k].rows) continue; /* an optional output, absent here */
        int32_t id = tt__new_value(t, &shape[k], TT__TRANSIENT, k ? "%s.%d:%d" : "%s.%d", tt__instr_name(&i),
                                   at, k);
        if (!id) return tt__handle(0);
        t->values[id].pinned_f32 = k > 0 || tt__is(&i, TT__LOSS);
        t->code[at].out[k] = id;
    }
    return tt__handle(t->code[at].out[0]);
}

/* -------------------------------------------------------------------------------------------- shape rules */

static const tt__shape *tt__in(const tt_tape *t, const tt__instr *i, int k)
{
    return &t->values[i->in[k]].shape;
}

static bool tt__same_rows(const tt__shape *a, const tt__shape *b)
{
    return a->rows == b->rows && a->axis == b->axis && a->extra == b->extra;
}

TT_PRINTF(4, 5)
static bool tt__bad(tt_tape *t, const tt__instr *i, int k, const char *format, ...)
{
    char what[256], expected[256];
    va_list args;
    va_start(args, format);
    vsnprintf(expected, sizeof expected, format, args);
    va_end(args);
    return tt__tape_fail(t, TT_ERR_SHAPE, "%s: operand %d is %s, expected %s", tt__instr_name(i), k,
                         tt__describe(t, i->in[k], what, sizeof what), expected);
}

static bool tt__float_in(tt_tape *t, const tt__instr *i, int k)
{
    return tt__is_float(tt__in(t, i, k)->dtype) || tt__bad(t, i, k, "a float dtype (f32, bf16, f16)");
}

/* Operand k has floats, the rows of `like`, and `cols` columns. */
static bool tt__shape_in(tt_tape *t, const tt__instr *i, int k, const tt__shape *like, int64_t cols)
{
    const tt__shape *s = tt__in(t, i, k);
    if (!tt__float_in(t, i, k)) return false;
    if (tt__same_rows(s, like) && s->cols == cols) return true;
    const char *axis = like->axis ? t->axes[like->axis].name : "";
    return tt__bad(t, i, k, "(%s%s%lld, %lld)", axis, *axis ? "<=" : "", (long long)like->rows,
                   (long long)cols);
}

/* Operand k, where there is one, has floats, so many rows, of no axis, and so many columns. */
static bool tt__fixed_in(tt_tape *t, const tt__instr *i, int k, int64_t rows, int64_t cols)
{
    const tt__shape like = {TT_F32, rows, cols, 0, 0};
    return !i->in[k] || tt__shape_in(t, i, k, &like, cols);
}

static bool tt__index_in(tt_tape *t, const tt__instr *i, int k) /* i32 (any rows, 1) */
{
    const tt__shape *s = tt__in(t, i, k);
    if (s->dtype != TT_I32 || s->cols != 1) return tt__bad(t, i, k, "i32 of width 1");
    bool alone = t->values[i->in[k]].ld == 1;
    return alone || tt__bad(t, i, k, "an input of its own, not a column of a wider one");
}

/* Operand k, where there is one, has the numbers of the rows of operand `of`. */
static bool tt__numbers_in(tt_tape *t, const tt__instr *i, int k, int of)
{
    if (!i->in[k]) return true;
    if (!tt__index_in(t, i, k)) return false;
    bool same = tt__same_rows(tt__in(t, i, k), tt__in(t, i, of));
    return same || tt__bad(t, i, k, "one number for each row of operand %d", of);
}

/* Operand k, where there is one, has the weights of a loss's targets. They get no gradient. */
static bool tt__weights_in(tt_tape *t, const tt__instr *i, int k, const tt__shape *rows)
{
    if (!i->in[k]) return true;
    if (!tt__shape_in(t, i, k, rows, 1)) return false;
    bool input = t->values[t->values[i->in[k]].base].storage == TT__INPUT;
    return input || tt__bad(t, i, k, "an input: weights take no gradient");
}

static bool tt__rate_in(tt_tape *t, const tt__instr *i)
{
    const float p = i->attr.dropout; /* rounded to steps of 2^-16 it is still below 1 */
    if (p >= 0 && p < 65535.0f / 65536) return true;
    return tt__tape_fail(t, TT_ERR_ARGUMENT, "%s: dropout %g must be at least 0 and below 65535/65536",
                         tt__instr_name(i), p);
}

static void tt__set_shape(tt__shape *to, tt_dtype dtype, const tt__shape *rows_of, int64_t cols)
{
    *to = *rows_of;
    to->dtype = dtype;
    to->cols = cols;
}

static void tt__set_fixed(tt__shape *to, tt_dtype dtype, int64_t rows, int64_t cols)
{
    const tt__shape shape = {dtype, rows, cols, 0, 0};
    *to = shape;
}

static bool tt__shape_alike(tt_tape *t, const tt__instr *i, tt__shape *out) /* of any dtype */
{
    out[0] = *tt__in(t, i, 0);
    return true;
}

static bool tt__shape_elementwise(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    return tt__shape_alike(t, i, out) && tt__float_in(t, i, 0);
}

static void tt__set_loss(tt__shape *out)
{
    tt__set_fixed(&out[0], TT_F32, 1, 1);
    tt__set_fixed(&out[TT__LOSS_COUNTS], TT_F32, 1, 4);
}

static bool tt__shape_of_two(tt_tape *t, const tt__instr *i, tt__shape *out) /* of one shape */
{
    return tt__shape_elementwise(t, i, out) && tt__shape_in(t, i, 1, tt__in(t, i, 0), tt__in(t, i, 0)->cols);
}

/* ------------------------------------------------------------------------------------ checks before a run */

TT_PRINTF(3, 4)
static tt_status tt__launch_fail(const tt__launch *l, int operand, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return tt__fail(l->tape->ctx, TT_ERR_ARGUMENT, "%s: '%s' %s", tt__instr_name(l->instr),
                    l->tape->values[l->instr->in[operand]].name, text);
}

/* Every index in [0, limit), or equal to `ignored`. */
static tt_status tt__check_indices(const tt__launch *l, int operand, int64_t limit, const int32_t *ignored,
                                   const char *of_what)
{
    const int32_t *index = (const int32_t *)l->in[operand].data;
    for (int64_t r = 0; index && r < l->in[operand].rows; r++)
        if ((index[r] < 0 || index[r] >= limit) && !(ignored && index[r] == *ignored))
            return tt__launch_fail(l, operand, "has %d in row %lld, which is not in 0..%lld (%s)", index[r],
                                   (long long)r, (long long)(limit - 1), of_what);
    return TT_OK;
}

/* 0 = start[0] < start[1] < ... < start[seqs] = rows. */
static tt_status tt__check_starts(const tt__launch *l, int operand, int64_t rows)
{
    const int32_t *start = (const int32_t *)l->in[operand].data;
    int64_t seqs = l->in[operand].rows - 1;
    if (start[0] != 0)
        return tt__launch_fail(l, operand, "begins with %d; the first sequence starts at row 0", start[0]);
    for (int64_t s = 0; s < seqs; s++)
        if (start[s + 1] <= start[s])
            return tt__launch_fail(l, operand, "has %d after %d at %lld: sequences must have at least one "
                                   "row", start[s + 1], start[s], (long long)(s + 1));
    if (start[seqs] == rows) return TT_OK;
    return tt__launch_fail(l, operand, "ends with %d, but there are %lld rows", start[seqs], (long long)rows);
}

/* The sequence that a row lies in. */
static int64_t tt__sequence_of(const int32_t *start, int64_t seqs, int64_t row)
{
    int64_t low = 0, high = seqs; /* start[low] <= row < start[high] */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (start[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

/* ------------------------------------------------------------------------------------------------- gradients
   The gradient rule, see >>tape: the first contribution writes, later ones add. */

/* Emits an instruction that reads in[0] to in[n - 1], with f's attributes and random numbers (NULL: none). */
static tt__instr *tt__emit(tt__builder *b, int op, const tt__instr *f, const int32_t *in, int n)
{
    tt__instr *i = b->ok ? tt__append(b->t, op) : NULL;
    if (!(b->ok = i != NULL)) return NULL;
    i->segment = b->segment;
    i->backward = b->backward;
    for (int k = 0; k < n; k++) i->in[k] = in[k];
    if (!f) return i;
    i->attr = f->attr;
    i->random = f->random;
    return i;
}

/* The value whose gradient v's is: a cast of a parameter hands its gradient to the parameter. */
static int32_t tt__grad_owner(const tt_tape *t, int32_t v)
{
    int at = tt__producer(t, v);
    bool cast = at >= 0 && tt__is(&t->code[at], TT__CASTS);
    return cast && t->values[t->code[at].in[0]].storage == TT__PARAMETER ? t->code[at].in[0] : v;
}

static void tt__fill(tt__builder *b, int32_t v, float x)
{
    tt__instr *i = tt__emit(b, TT__OP_FILL, NULL, NULL, 0);
    if (!i) return;
    i->out[0] = v;
    i->attr.scale = x;
    if (b->t->values[v].persistent) i->add_later = 1; /* it starts at x once, not in each micro-batch */
}

/* A gradient with storage of its own for v, which is no view. */
static int32_t tt__new_gradient(tt__builder *b, int32_t v)
{
    tt_tape *t = b->t;
    tt__value of = t->values[v];
    bool parameter = of.storage == TT__PARAMETER;
    int32_t g = tt__new_value(t, &of.shape, parameter ? TT__GRADIENT : TT__TRANSIENT, "d(%.60s)", of.name);
    if (!(b->ok = g != 0)) return 0;
    t->values[g].param = of.param;
    t->values[g].persistent = parameter && b->accumulate;
    t->values[g].pinned_f32 = of.pinned_f32;
    t->values[v].grad = g;
    return g;
}

/* Makes out[slot] of the last instruction the gradient of v, if it needs one, or its next contribution. */
static void tt__grad_into(tt__builder *b, int slot, int32_t v)
{
    tt_tape *t = b->t;
    if (!b->ok || !v || !t->values[v].needs_grad) return;
    v = tt__grad_owner(t, v);
    int32_t base = t->values[v].base;
    bool exists = t->values[base].grad != 0;
    int32_t g = exists ? t->values[base].grad : tt__new_gradient(b, base);
    if (!g) return;
    if (base != v) {
        tt__value view = t->values[v], *whole = &t->values[base];
        bool all = view.shape.rows * view.shape.cols == whole->shape.rows * whole->shape.cols;
        if (!exists && !all) { /* before it, 0: the other views of base may add to the rest */
            tt__instr last = t->code[--t->n_code];
            tt__fill(b, g, 0);
            tt__instr *again = tt__emit(b, last.op, NULL, NULL, 0);
            if (!again) return;
            *again = last;
            exists = true;
        }
        g = tt__new_view(t, g, &view.shape, view.offset, view.ld, view.name);
        if (!(b->ok = g != 0)) return;
    }
    tt__instr *i = &t->code[t->n_code - 1];
    i->out[slot] = g;
    if (exists) i->add |= 1u << slot;
    else if (t->values[g].persistent) i->add_later |= 1u << slot;
}

/* v's gradient is g, unchanged: takes it over if nothing else will read or add to it; else copies or adds. */
static void tt__grad_pass(tt__builder *b, int32_t g, int32_t v, bool may_take)
{
    tt_tape *t = b->t;
    if (!b->ok || !v || !t->values[v].needs_grad) return;
    const tt__value *x = &t->values[v], *from = &t->values[g];
    bool whole = x->base == v && from->base == g && x->storage == TT__TRANSIENT;
    if (may_take && whole && !x->grad && from->shape.dtype == x->shape.dtype && tt__grad_owner(t, v) == v) {
        t->values[v].grad = g;
        return;
    }
    tt__instr *i = tt__emit(b, TT__OP_SCALE, NULL, &g, 1);
    if (!i) return;
    i->attr.scale = 1;
    tt__grad_into(b, 0, v);
}

/* Emits an instruction with f's attributes and random numbers that reads what letters in `reads` say: g, f's
   operands by number, its results as A, B, C, - none. Its results are gradients of the operands in `into`. */
static void tt__emit_gradient(tt__builder *b, const tt__instr *f, int32_t g, int op, const char *reads,
                              const char *into)
{
    int32_t in[TT__MAX_IN];
    int n = 0;
    for (; reads[n]; n++)
        in[n] = reads[n] == 'g' ? g : reads[n] == '-' ? 0 : reads[n] >= 'A' ? f->out[reads[n] - 'A']
              : f->in[reads[n] - '0'];
    tt__emit(b, op, f, in, n);
    for (int o = 0; into[o]; o++) tt__grad_into(b, o, f->in[into[o] - '0']);
}

static bool tt__wants(const tt_tape *t, int32_t v) { return v && t->values[v].needs_grad; }

/* ---------------------------------------------------------------------------------------- scratch of kernels
   What the sizes of a plan and the CPU kernels that lay the scratch out must agree on. */

/* Rows are handed out in chunks fixed by the shape. Each thread widens into so many rows of floats. */
#define TT__ROW_BUFFERS 5
#define TT__SUM_ROWS 128 /* rows summed into one partial result of a column sum */

static size_t tt__row_bytes(int64_t cols) { return tt__align_up((size_t)cols * 4); }

/* Long vectors (parameters, their gradients and state) are worked on in chunks of this many elements. */
#define TT__CHUNK 4096

/* Block sizes, in elements, after Goto, van de Geijn, "Anatomy of high-performance matrix multiplication",
   2008: a panel of B (K x 8..48) stays in L1 or near it, a tile of A (TILE_M x K) in L2, the packed A (M x K)
   and B (K x N) in L3. M, TILE_M are multiples of every microkernel's height, N and TILE_N of its width. */
#define TT__GEMM_K 384
#define TT__GEMM_M 1056
#define TT__GEMM_N 1056
#define TT__GEMM_TILE_M 96
#define TT__GEMM_TILE_N 192
#define TT__GEMM_PACK_LINES 96 /* a packing task takes so many lines of all k: whole panels of any width,   */
#define TT__GEMM_PACK_K 32    /* or, where lines lie side by side, so many units of all lines: even         */
#define TT__GEMM_ALONE 131072 /* multiplications that take no longer than waking a thread                   */
#define TT__GEMM_STRIP 64     /* columns of a task where B is not packed                                    */
#define TT__GEMM_FEW_ROWS 24  /* up to here B is not packed, being used only a few times: dot products      */
#define TT__GEMM_FEW_SUMS 4   /* the same where B's rows are contiguous: sums of rows                       */
#ifdef TINYTRAIN_CBLAS
#include <cblas.h>
#define TT__CBLAS_M 192 /* rows, and at most GEMM_N columns, that are finished while in the cache          */
#endif

/* Bytes of args->workspace; the same for every instruction set and number of threads, and never less for a
   larger m, n or k, so that what is planned for the most rows serves fewer. */
static size_t tt__gemm_workspace(int64_t m, int64_t n, int64_t k)
{
    size_t few = tt__align_up((size_t)(tt__min(m, TT__GEMM_FEW_ROWS) * k) * 4); /* A as float */
    size_t rows = (size_t)tt__min(m + 31, TT__GEMM_M); /* in whole panels */
    size_t cols = (size_t)tt__min(n + 47, TT__GEMM_N);
    size_t depth = (size_t)tt__min(tt__max(k, 16), TT__GEMM_K); /* 16: units of a tile */
    size_t packed = tt__align_up(rows * depth * 4) + tt__align_up(cols * depth * 4);
    if (k > TT__GEMM_K) packed += rows * cols * 4;
#ifdef TINYTRAIN_CBLAS
    size_t sums = (size_t)tt__min(m, TT__CBLAS_M) * cols * 4;
    if (packed < sums) packed = sums;
#endif
    return m > TT__GEMM_FEW_SUMS && packed > few ? packed : few;
}

/* Blocks of the flash-style kernels: score tiles of KEYS x QUERIES floats that stay in the cache. A forward
   task takes up to GROUP queries, so that packing a block of keys and values pays for itself. All are
   multiples of 16; KEYS of 8 too, because one Philox call serves 8 keys. */
enum {
    TT__ATTENTION_KEYS = 256,
    TT__ATTENTION_QUERIES = 64,
    TT__ATTENTION_GROUP = 256,
    TT__ATTENTION_SPAN = 4096, /* queries of which the backward holds dq in fp32: it bounds the workspace */
    TT__ATTENTION_TILE = TT__ATTENTION_QUERIES + 16 /* row stride of tiles: an odd number of cache lines */
};

/* Row stride of packed rows: room for the widest vectors, and an odd number of cache lines, because
   power-of-two strides would put a column of a block into a few cache sets. */
static int64_t tt__attention_stride(int64_t head_size) { return (tt__ceil_div(head_size, 16) | 1) * 16; }

static int64_t tt__attention_padded(int64_t n) { return tt__ceil_div(n, 16) * 16; }

/* Rows of qt and doutt: columns of a head, or pairs of them up to whole tiles. */
static int64_t tt__attention_qt_rows(int64_t head_size)
{
    return tt__max(head_size, tt__ceil_div(head_size, 32) * 16);
}

/* The buffers of one thread, each 64-byte aligned. X(of, name, floats): of the forward, the backward or both;
   sizes are in the variables of tt__attention_layout. Those of pairs hold two bf16 in each float, where those
   are multiplied; they are of columns or of rows, see attention_pairs_of_columns. */
#define TT__ATTENTION_BUFFERS(X) \
    X(both, k_pairs, keys * whole / 2)           /* of columns */ \
    X(both, summed, keys * stride / 2)           /* pairs; forward by tiles of v: of rows, or transposed */ \
    X(both, columns, queries * whole / 2)        /* pairs of q or dout, of columns */ \
    X(both, left, keys * queries / 2)            /* pairs of weights or dscores, of rows or columns */ \
    X(both, across, tt__max(whole * queries, keys * stride / 2)) /* by tiles: fp32; or pairs of rows */ \
    X(both, k, keys * stride) \
    X(both, v, keys * stride) \
    X(both, weights, keys * tile)                /* scores, then weights */ \
    X(both, q, queries * stride) \
    X(both, qt, blocks * qt_rows * tile)         /* for each block of queries of a task */ \
    X(forward, out, group * stride) \
    X(forward, most, group)                      /* running maximum of the scores */ \
    X(forward, sum, group)                       /* sum of the weights */ \
    X(backward, v_pairs, keys * whole / 2)       /* of columns */ \
    X(backward, q_pairs, queries * stride / 2)   /* of rows */ \
    X(backward, dout_pairs, queries * stride / 2) \
    X(backward, dk, keys * stride) \
    X(backward, dv, keys * stride) \
    X(backward, dscores, keys * tile) \
    X(backward, dout, queries * stride) \
    X(backward, doutt, qt_rows * tile) \
    X(backward, lse, span)                       /* log2-sum-exp2 */ \
    X(backward, delta, span)                     /* sum of dout * out */ \
    X(backward, dq, span * tt__attention_padded(head_size))

typedef struct tt__attention_buffers {
#define TT__BUFFER(of, name, floats) float *name;
    TT__ATTENTION_BUFFERS(TT__BUFFER)
#undef TT__BUFFER
} tt__attention_buffers;

/* Lays the buffers out in memory, unless NULL; returns their bytes. rows: of the longest sequence. */
static size_t tt__attention_layout(char *memory, int64_t rows, int64_t head_size, bool backward,
                                   tt__attention_buffers *b)
{
    int64_t stride = tt__attention_stride(head_size), tile = TT__ATTENTION_TILE, keys = TT__ATTENTION_KEYS;
    int64_t queries = TT__ATTENTION_QUERIES, group = TT__ATTENTION_GROUP;
    int64_t span = tt__attention_padded(tt__min(rows, TT__ATTENTION_SPAN));
    int64_t whole = tt__ceil_div(head_size, 32) * 32; /* columns, in whole tiles of pairs */
    int64_t qt_rows = tt__attention_qt_rows(head_size), blocks = backward ? 1 : tt__ceil_div(group, queries);
    const bool both = true, forward = !backward;
    size_t used = 0;
    memset(b, 0, sizeof *b);
#define TT__BUFFER(of, name, floats) \
    if (of) { \
        b->name = memory ? (float *)(void *)(memory + used) : NULL; \
        used += tt__align_up((size_t)(floats) * sizeof(float)); \
    }
    TT__ATTENTION_BUFFERS(TT__BUFFER)
#undef TT__BUFFER
    return used;
}

/* Bytes of workspace for sequences of up to max_rows rows, the same for all instruction sets. */
static size_t tt__attention_workspace(int64_t max_rows, int64_t head_size, bool backward, int threads)
{
    tt__attention_buffers b;
    return tt__attention_layout(NULL, max_rows, head_size, backward, &b) * (size_t)threads;
}

static size_t tt__attention_queries_bytes(int64_t seqs, int64_t n)
{
    return tt__align_up((size_t)(seqs + 1 + 2 * n) * sizeof(int32_t));
}

/* What linear_cross_entropy keeps: loss and hit of each row; of a chunk, log-sum-exp and logits. */
static size_t tt__loss_bytes(int64_t rows, int64_t classes)
{
    int64_t chunk = tt__min(rows, TT__LOSS_CHUNK);
    size_t of_chunk = tt__align_up((size_t)chunk * 4) + tt__align_up((size_t)(chunk * classes) * 4);
    return tt__align_up((size_t)rows * 8) + of_chunk;
}

/* Scratch of the rows that the threads of a CPU widen to floats: TT__ROW_BUFFERS of so many columns each. */
static size_t tt__buffer_bytes(int threads, int64_t cols)
{
    return (size_t)threads * TT__ROW_BUFFERS * tt__row_bytes(cols);
}

/* The sizes of the largest operand or result. */
static tt__shape tt__largest(const tt_tape *t, const tt__instr *i)
{
    tt__shape most;
    tt__set_fixed(&most, TT_F32, 1, 1);
    for (int k = 0; k < TT__MAX_IN + TT__MAX_OUT; k++) {
        int32_t id = k < TT__MAX_IN ? i->in[k] : i->out[k - TT__MAX_IN];
        if (!id) continue;
        most.cols = tt__max(most.cols, t->values[id].shape.cols);
        most.rows = tt__max(most.rows, t->values[id].shape.rows);
    }
    return most;
}

/* Scratch of a kernel that widens rows of any of its operands. */
static size_t tt__widen_bytes(int threads, const tt_tape *t, const tt__instr *i)
{
    return tt__buffer_bytes(threads, tt__largest(t, i).cols);
}

/* Partial sums of columns, one of so many rows. */
static size_t tt__partial_bytes(int64_t rows, int64_t cols)
{
    return (size_t)tt__ceil_div(rows, TT__SUM_ROWS) * tt__row_bytes(cols);
}

static size_t tt__row_pairs_bytes(int threads, const tt_tape *t, const tt__instr *i) /* two floats a row */
{
    return tt__align_up((size_t)tt__largest(t, i).rows * 8) + tt__widen_bytes(threads, t, i);
}

static size_t tt__chunk_bytes(int threads, const tt_tape *t, const tt__instr *i) /* of vectors in chunks */
{
    (void)t; (void)i;
    return tt__buffer_bytes(threads, TT__CHUNK);
}

static size_t tt__no_bytes(int threads, const tt_tape *t, const tt__instr *i)
{
    (void)threads; (void)t; (void)i;
    return 0;
}

/* A matrix product: (m, k) times (k, n). */
typedef struct tt__mnk { int64_t m, n, k; } tt__mnk;

/* Of a TT__PRODUCT whose in[0] has so many rows; w has the shape that it has when all rows are there. */
static tt__mnk tt__mnk_of(const tt__instr *i, int64_t rows, int64_t cols, int64_t w_rows, int64_t w_cols)
{
    tt__mnk p = {rows, w_rows, cols};              /* linear: x, w                                          */
    if (i->op == TT__OP_LINEAR_DX) p.n = w_cols;   /* dy, w                                                 */
    if (i->op == TT__OP_LINEAR_DW) {               /* dy, x                                                 */
        p.m = cols;
        p.n = w_cols;
        p.k = rows;
    }
    return p;
}

static tt__mnk tt__mnk_at_capacity(const tt_tape *t, const tt__instr *i)
{
    const tt__shape *a = tt__in(t, i, 0), *b = tt__in(t, i, 1);
    return tt__mnk_of(i, a->rows, a->cols, b->rows, b->cols);
}

static size_t tt__product_bytes(int threads, const tt_tape *t, const tt__instr *i)
{
    tt__mnk p = tt__mnk_at_capacity(t, i);
    (void)threads;
    return tt__gemm_workspace(p.m, p.n, p.k);
}

/* On CUDA: the operands of an fp8 product, (m, k) and (n, k), and their scales. */
static size_t tt__fp8_bytes(const tt_tape *t, const tt__instr *i)
{
    if (!i->attr.fp8) return 0;
    tt__mnk p = tt__mnk_at_capacity(t, i);
    size_t k = tt__align_to((size_t)p.k, 16), a = tt__align_to((size_t)p.m * k, TT__CUDA_ALIGN);
    return TT__CUDA_ALIGN + a + tt__align_to((size_t)p.n * k, TT__CUDA_ALIGN);
}

/* On CUDA: a radix sort of (id, row) by id, from one pair of arrays into another; its counts are resident. */
static size_t tt__sort_bytes(const tt_tape *t, const tt__instr *i)
{
    return 4 * tt__align_to((size_t)tt__in(t, i, 1)->rows * 4, TT__CUDA_ALIGN);
}

/* ------------------------------------------------------------------------------------------------- linear */

static bool tt__shape_LINEAR(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *x = tt__in(t, i, 0), *w = tt__in(t, i, 1);
    if (!tt__float_in(t, i, 0) || !tt__float_in(t, i, 1)) return false;
    if (w->axis || w->cols != x->cols)
        return tt__bad(t, i, 1, "(out, %lld): the width of x is %lld", (long long)x->cols,
                       (long long)x->cols);
    tt__set_shape(&out[0], x->dtype, x, w->rows);
    if (i->attr.act) out[1] = out[0];
    return tt__fixed_in(t, i, 2, 1, w->rows) && (!i->in[3] || tt__shape_in(t, i, 3, x, w->rows));
}

tt_value tt_linear(tt_tape *t, tt_value x, tt_param *w, tt_param *b)
{
    return tt__record(t, tt__new_instr(TT__OP_LINEAR), "vpP", x, w, b);
}

static bool tt__act_from_output(int act) { return act == TT__ACT_RELU || act == TT__ACT_TANH; }

static void tt__backward_LINEAR(tt__builder *b, const tt__instr *f, int32_t g)
{
    tt_tape *t = b->t;
    bool weights = tt__wants(t, f->in[1]) || tt__wants(t, f->in[2]), x = tt__wants(t, f->in[0]);
    int32_t dy = g;
    tt__instr product = *f;
    memset(&product.attr, 0, sizeof product.attr);
    if (f->attr.act && (weights || x)) { /* through the activation, from what it saved */
        const char *reads = tt__act_from_output(f->attr.act) ? "gA" : "gB";
        tt__emit_gradient(b, f, g, TT__OP_ACTIVATION_BACKWARD, reads, "");
        const tt__value *y = &t->values[f->out[0]];
        dy = b->ok ? tt__new_value(t, &y->shape, TT__TRANSIENT, "d(%.56s.pre)", y->name) : 0;
        if (!(b->ok = dy != 0)) return;
        t->code[t->n_code - 1].out[0] = dy;
    }
    if (weights) tt__emit_gradient(b, &product, dy, TT__OP_LINEAR_DW, "g0", "12");
    if (x) tt__emit_gradient(b, &product, dy, TT__OP_LINEAR_DX, "g1", "0");
    tt__grad_pass(b, g, f->in[3], true);
}

static const tt__rules tt__rules_LINEAR = {tt__shape_LINEAR, {tt__backward_LINEAR}, tt__product_bytes,
    tt__fp8_bytes};

static bool tt__shape_LINEAR_DX(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *dy = tt__in(t, i, 0), *w = tt__in(t, i, 1);
    if (!tt__float_in(t, i, 0) || w->axis || w->rows != dy->cols) return tt__bad(t, i, 1, "a weight of dy");
    tt__set_shape(&out[0], dy->dtype, dy, w->cols);
    return !i->in[2] || tt__shape_in(t, i, 2, dy, w->cols);
}

static const tt__rules tt__rules_LINEAR_DX = {tt__shape_LINEAR_DX, {NULL}, tt__product_bytes, tt__fp8_bytes};

static bool tt__shape_LINEAR_DW(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *dy = tt__in(t, i, 0), *x = tt__in(t, i, 1);
    tt__set_fixed(&out[0], TT_F32, dy->cols, x->cols);
    tt__set_fixed(&out[1], TT_F32, 1, dy->cols);
    return tt__float_in(t, i, 0) && tt__shape_in(t, i, 1, dy, x->cols);
}

static size_t tt__cpu_LINEAR_DW(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__shape *dy = tt__in(t, i, 0);
    size_t gemm = tt__product_bytes(threads, t, i);
    size_t sums = tt__partial_bytes(dy->rows, dy->cols) + tt__buffer_bytes(threads, dy->cols);
    return gemm > sums ? gemm : sums;
}

static const tt__rules tt__rules_LINEAR_DW = {tt__shape_LINEAR_DW, {NULL}, tt__cpu_LINEAR_DW, tt__fp8_bytes};

/* ---------------------------------------------------------------------------------------------- embedding */

static bool tt__shape_EMBEDDING(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *table = tt__in(t, i, 1);
    tt__set_shape(&out[0], table->dtype, tt__in(t, i, 0), table->cols);
    if (!tt__index_in(t, i, 0) || !tt__float_in(t, i, 1)) return false;
    return !table->axis || tt__bad(t, i, 1, "a table with a fixed number of rows");
}

tt_value tt_embedding(tt_tape *t, tt_value ids, tt_param *table)
{
    return tt__record(t, tt__new_instr(TT__OP_EMBEDDING), "vp", ids, table);
}

static tt_status tt__check_EMBEDDING(const tt__launch *l)
{
    return tt__check_indices(l, 0, l->in[1].rows, NULL, "rows of the embedding table");
}

static const tt__rules tt__rules_EMBEDDING = {tt__shape_EMBEDDING,
    {NULL, "0g", "1", TT__OP_EMBEDDING_BACKWARD}, NULL, NULL, tt__check_EMBEDDING};

static bool tt__shape_EMBEDDING_BACKWARD(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const int64_t cols = tt__in(t, i, 1)->cols;
    tt__set_fixed(&out[0], TT_F32, t->values[i->out[0]].shape.rows, cols);
    return tt__index_in(t, i, 0) && tt__shape_in(t, i, 1, tt__in(t, i, 0), cols);
}

static size_t tt__cpu_EMBEDDING_BACKWARD(int threads, const tt_tape *t, const tt__instr *i)
{
    int64_t sorted = tt__in(t, i, 1)->rows + t->values[i->out[0]].shape.rows + 1;
    return tt__align_up((size_t)sorted * 4) + tt__widen_bytes(threads, t, i);
}

static const tt__rules tt__rules_EMBEDDING_BACKWARD = {tt__shape_EMBEDDING_BACKWARD, {NULL},
    tt__cpu_EMBEDDING_BACKWARD, tt__sort_bytes};

/* ---------------------------------------------------------------------------------------------- layernorm */

/* x, w, [b] -> y, as many statistics of each row as the op has parameters. */
static bool tt__shape_of_norm(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *x = tt__in(t, i, 0);
    const float eps = i->attr.eps;
    if (!tt__float_in(t, i, 0)) return false;
    if (!tt__fixed_in(t, i, 1, 1, x->cols) || !tt__fixed_in(t, i, 2, 1, x->cols)) return false;
    out[0] = *x;
    tt__set_shape(&out[1], TT_F32, x, tt__ops[i->op].inputs - 1);
    return eps >= 0 || tt__tape_fail(t, TT_ERR_ARGUMENT, "%s: eps %g is negative", tt__instr_name(i), eps);
}

tt_value tt_layernorm(tt_tape *t, tt_value x, tt_param *w, tt_param *b, float eps)
{
    tt__instr i = tt__new_instr(TT__OP_LAYERNORM);
    i.attr.eps = eps;
    return tt__record(t, i, "vpP", x, w, b);
}

static const tt__rules tt__rules_LAYERNORM = {tt__shape_of_norm,
    {NULL, "g01B", "012", TT__OP_LAYERNORM_BACKWARD}};

/* dy, x, w, statistics -> [dx], [dw], [db]. */
static bool tt__shape_of_norm_backward(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *x = tt__in(t, i, 1);
    const int64_t statistics = tt__ops[i->op].outputs - 1;
    out[0] = *x;
    for (int k = 1; k < 3; k++) tt__set_fixed(&out[k], TT_F32, 1, x->cols);
    return tt__shape_in(t, i, 0, x, x->cols) && tt__fixed_in(t, i, 2, 1, x->cols) &&
           tt__shape_in(t, i, 3, x, statistics);
}

static size_t tt__cpu_LAYERNORM_BACKWARD(int threads, const tt_tape *t, const tt__instr *i)
{
    tt__shape most = tt__largest(t, i);
    return 2 * tt__partial_bytes(most.rows, most.cols) + tt__widen_bytes(threads, t, i);
}

static const tt__rules tt__rules_LAYERNORM_BACKWARD = {tt__shape_of_norm_backward, {NULL},
    tt__cpu_LAYERNORM_BACKWARD};

/* ------------------------------------------------------------------------------------------------ rmsnorm */

tt_value tt_rmsnorm(tt_tape *t, tt_value x, tt_param *w, float eps)
{
    tt__instr i = tt__new_instr(TT__OP_RMSNORM);
    i.attr.eps = eps;
    return tt__record(t, i, "vp", x, w);
}

static const tt__rules tt__rules_RMSNORM = {tt__shape_of_norm, {NULL, "g01B", "01", TT__OP_RMSNORM_BACKWARD}};
static const tt__rules tt__rules_RMSNORM_BACKWARD = {tt__shape_of_norm_backward, {NULL},
    tt__cpu_LAYERNORM_BACKWARD};

/* --------------------------------------------------------------------------------------------- activation */

static tt_value tt__activation(tt_tape *t, tt_value x, int act)
{
    tt__instr i = tt__new_instr(TT__OP_ACTIVATION);
    i.attr.act = act;
    return tt__record(t, i, "v", x);
}

tt_value tt_gelu(tt_tape *t, tt_value x) { return tt__activation(t, x, TT__ACT_GELU); }
tt_value tt_gelu_tanh(tt_tape *t, tt_value x) { return tt__activation(t, x, TT__ACT_GELU_TANH); }
tt_value tt_relu(tt_tape *t, tt_value x) { return tt__activation(t, x, TT__ACT_RELU); }
tt_value tt_tanh(tt_tape *t, tt_value x) { return tt__activation(t, x, TT__ACT_TANH); }
tt_value tt_silu(tt_tape *t, tt_value x) { return tt__activation(t, x, TT__ACT_SILU); }

static void tt__backward_ACTIVATION(tt__builder *b, const tt__instr *f, int32_t g)
{
    const char *reads = tt__act_from_output(f->attr.act) ? "gA" : "g0";
    tt__emit_gradient(b, f, g, TT__OP_ACTIVATION_BACKWARD, reads, "0");
}

/* The instruction whose out[0] is v, if only one, which may so take v over, reads v; -1: there is none. */
static int tt__sole_producer(const tt_tape *t, int32_t v, int32_t root)
{
    int at = tt__only_use(t, v, root) ? tt__producer(t, v) : -1;
    return at >= 0 && t->code[at].out[0] == v ? at : -1;
}

/* The product that x comes from applies the activation itself. Its own result becomes out[1], which GELU and
   SiLU save; pruning drops it where nothing reads it. */
static void tt__fuse_ACTIVATION(tt_tape *t, int k, int32_t root, bool later)
{
    int at = later ? -1 : tt__sole_producer(t, t->code[k].in[0], root);
    if (at < 0) return;
    tt__instr merged = t->code[at];
    if (!tt__is(&merged, TT__ACTIVATES) || merged.attr.act || merged.in[tt__residual(&merged)]) return;
    merged.attr.act = t->code[k].attr.act;
    merged.out[1] = merged.out[0];
    tt__merge(t, at, k, merged);
}

static const tt__rules tt__rules_ACTIVATION = {tt__shape_elementwise, {tt__backward_ACTIVATION}, NULL, NULL,
    NULL, tt__fuse_ACTIVATION};

/* The product of dy multiplies by the derivative: the gradient before the activation is never stored. */
static void tt__fuse_ACTIVATION_BACKWARD(tt_tape *t, int k, int32_t root, bool later)
{
    int at = later ? tt__sole_producer(t, t->code[k].in[0], root) : -1;
    if (at < 0 || t->code[at].op != TT__OP_LINEAR_DX || t->code[at].in[2] || !tt__may_wait(t, at, k)) return;
    tt__instr merged = t->code[at];
    merged.attr.act = t->code[k].attr.act;
    merged.in[2] = t->code[k].in[1];
    tt__merge(t, at, k, merged);
}

static const tt__rules tt__rules_ACTIVATION_BACKWARD = {tt__shape_of_two, {NULL}, NULL, NULL, NULL,
    tt__fuse_ACTIVATION_BACKWARD};

/* ---------------------------------------------------------------------------------------------------- add */

tt_value tt_add(tt_tape *t, tt_value a, tt_value b)
{
    return tt__record(t, tt__new_instr(TT__OP_ADD), "vv", a, b);
}

static void tt__backward_ADD(tt__builder *b, const tt__instr *f, int32_t g)
{
    const tt__value *v = b->t->values;
    tt_dtype dtype = v[g].shape.dtype;
    int take = v[f->in[0]].shape.dtype != dtype && v[f->in[1]].shape.dtype == dtype;
    tt__grad_pass(b, g, f->in[1 - take], false); /* reads g before the other may take it over */
    tt__grad_pass(b, g, f->in[take], true);
}

/* What computes one of the two adds the other itself. */
static void tt__fuse_ADD(tt_tape *t, int k, int32_t root, bool later)
{
    for (int side = 0; side < 2 && !later; side++) {
        int at = tt__sole_producer(t, t->code[k].in[side], root);
        int slot = at >= 0 ? tt__residual(&t->code[at]) : 0;
        if (!slot || t->code[at].in[slot] || t->code[at].attr.act) continue;
        tt__instr merged = t->code[at];
        merged.in[slot] = t->code[k].in[1 - side];
        tt__merge(t, at, k, merged);
        return;
    }
}

static const tt__rules tt__rules_ADD = {tt__shape_of_two, {tt__backward_ADD}, NULL, NULL, NULL, tt__fuse_ADD};

/* ---------------------------------------------------------------------------------------------------- mul */

tt_value tt_mul(tt_tape *t, tt_value a, tt_value b)
{
    return tt__record(t, tt__new_instr(TT__OP_MUL), "vv", a, b);
}

static void tt__backward_MUL(tt__builder *b, const tt__instr *f, int32_t g)
{
    if (tt__wants(b->t, f->in[0])) tt__emit_gradient(b, f, g, TT__OP_MUL, "g1", "0");
    if (tt__wants(b->t, f->in[1])) tt__emit_gradient(b, f, g, TT__OP_MUL, "g0", "1");
}

static const tt__rules tt__rules_MUL = {tt__shape_of_two, {tt__backward_MUL}};

/* -------------------------------------------------------------------------------------------------- scale */

tt_value tt_scale(tt_tape *t, tt_value x, float s)
{
    tt__instr i = tt__new_instr(TT__OP_SCALE);
    i.attr.scale = s;
    return tt__record(t, i, "v", x);
}

static const tt__rules tt__rules_SCALE = {tt__shape_elementwise, {NULL, "g", "0", TT__OP_SCALE}};

/* ------------------------------------------------------------------------------------------------ dropout */

static bool tt__shape_DROPOUT(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    bool fits = i->in[1] ? tt__shape_of_two(t, i, out) : tt__shape_elementwise(t, i, out);
    return fits && tt__rate_in(t, i) && tt__numbers_in(t, i, 2, 0);
}

tt_value tt_dropout(tt_tape *t, tt_value x, float p)
{
    tt__instr i = tt__new_instr(TT__OP_DROPOUT);
    i.attr.dropout = p;
    return tt__record(t, i, "v", x);
}

static void tt__backward_DROPOUT(tt__builder *b, const tt__instr *f, int32_t g)
{
    if (tt__wants(b->t, f->in[0])) tt__emit_gradient(b, f, g, TT__OP_DROPOUT, "g-2", "0"); /* the same mask */
    tt__grad_pass(b, g, f->in[1], true);
}

static const tt__rules tt__rules_DROPOUT = {tt__shape_DROPOUT, {tt__backward_DROPOUT}};

/* ---------------------------------------------------------------------------------------------- attention */

tt_attention_options tt_attention_options_default(int heads)
{
    tt_attention_options o;
    memset(&o, 0, sizeof o);
    o.heads = heads;
    return o;
}

#define TT__MOST_HEAD 65536 /* columns of a head: kernels keep blocks of queries and keys in scratch */

static bool tt__shape_ATTENTION(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *q = tt__in(t, i, 0), *keys = i->in[4] ? tt__in(t, i, 1) : q;
    const int heads = i->attr.heads;
    for (int k = 0; k < 3; k++) if (!tt__shape_in(t, i, k, k ? keys : q, q->cols)) return false;
    if (!tt__index_in(t, i, 3) || !tt__numbers_in(t, i, 4, 0)) return false;
    if (heads < 1 || q->cols % heads)
        return tt__tape_fail(t, TT_ERR_SHAPE, "attention: width %lld is not a multiple of %d heads",
                             (long long)q->cols, heads);
    if (q->cols / heads > TT__MOST_HEAD)
        return tt__tape_fail(t, TT_ERR_SHAPE, "attention: heads of %lld columns; at most %d are supported",
                             (long long)(q->cols / heads), TT__MOST_HEAD);
    for (int k = 1; k < 3; k++)
        for (int j = 0; j < k; j++) { /* heads run side by side: two must not add to one column */
            const tt__value *a = &t->values[i->in[j]], *b = &t->values[i->in[k]];
            if (a->base == b->base && a->offset != b->offset && llabs(a->offset - b->offset) < q->cols)
                return tt__tape_fail(t, TT_ERR_SHAPE, "attention: '%s' and '%s' are slices that overlap: "
                                     "take the same columns, or columns apart", a->name, b->name);
        }
    out[0] = *q;
    tt__set_shape(&out[1], TT_F32, q, heads);
    return tt__rate_in(t, i);
}

tt_value tt_attention(tt_tape *t, tt_value q, tt_value k, tt_value v, tt_value seq_start,
                      const tt_attention_options *o)
{
    tt__instr i = tt__new_instr(TT__OP_ATTENTION);
    i.attr.heads = o->heads;
    i.attr.causal = o->causal;
    i.attr.dropout = o->dropout;
    bool given = o->scale != 0 || o->heads < 1;
    i.attr.scale = given ? o->scale : 1.0f / sqrtf((float)(tt_value_width(t, q) / o->heads));
    return tt__record(t, i, "vvvv", q, k, v, seq_start);
}

static void tt__backward_ATTENTION(tt__builder *b, const tt__instr *f, int32_t g)
{
    const tt__value *v = b->t->values;
    for (int k = 1; k < 3; k++) /* of one storage: dq, dk and dv add to its gradient, in the kernel's order */
        for (int j = 0; j < k; j++, v = b->t->values) {
            int32_t base = v[f->in[k]].base;
            if (v[f->in[j]].base != base || !tt__wants(b->t, base) || v[base].grad) continue;
            int32_t whole = tt__new_gradient(b, base);
            if (whole) tt__fill(b, whole, 0);
        }
    tt__emit_gradient(b, f, g, TT__OP_ATTENTION_BACKWARD, "g0123AB4", "012");
}

static tt_status tt__check_ATTENTION(const tt__launch *l)
{
    tt_status status = tt__check_starts(l, 3, l->in[1].rows);
    return status == TT_OK ? tt__check_indices(l, 4, l->in[1].rows, NULL, "rows to gather from") : status;
}

/* Two products forward, four backward, of each query and key. At capacity sequences have equal lengths. */
static double tt__flops_of_attention(const tt__instr *i, const tt__mat *in)
{
    const tt__attention_operands at = tt__attention_of(i->op == TT__OP_ATTENTION_BACKWARD);
    const tt__mat *q = &in[at.q], *k = q + 1;
    const int32_t *start = (const int32_t *)in[at.starts].data, *row = (const int32_t *)in[at.numbers].data;
    int64_t seqs = in[at.starts].rows - 1;
    double pairs = start ? 0 : (double)q->rows * (double)k->rows / (double)tt__max(1, seqs);
    for (int64_t r = 0; start && r < (row ? q->rows : seqs); r++) {
        int64_t s = row ? tt__sequence_of(start, seqs, row[r]) : r, length = start[s + 1] - start[s];
        if (!row) pairs += (double)length * (double)length;
        else pairs += i->attr.causal ? 2.0 * (row[r] - start[s] + 1) : (double)length; /* halved below */
    }
    return (at.backward ? 8.0 : 4.0) * pairs * (double)q->cols * (i->attr.causal ? 0.5 : 1.0);
}

static size_t tt__cpu_attention(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__attention_operands at = tt__attention_of(i->op == TT__OP_ATTENTION_BACKWARD);
    const tt__shape *q = tt__in(t, i, at.q), *k = tt__in(t, i, at.q + 1);
    int64_t seqs = tt__in(t, i, at.starts)->rows - 1, longest = tt__max(q->rows, k->rows);
    size_t bytes = tt__attention_workspace(longest, k->cols / i->attr.heads, at.backward, threads);
    return bytes + (i->in[at.numbers] ? tt__attention_queries_bytes(seqs, q->rows) : 0);
}

/* Row numbers put in order: starts, rows and places. Backward: the sum of dout * out of each row and head,
   which all blocks that own queries or keys read (Dao: "FlashAttention-2", 2023, algorithm 2). */
static size_t tt__cuda_attention(const tt_tape *t, const tt__instr *i)
{
    const tt__attention_operands at = tt__attention_of(i->op == TT__OP_ATTENTION_BACKWARD);
    size_t rows = (size_t)tt__in(t, i, at.q)->rows, starts = (size_t)tt__in(t, i, at.starts)->rows;
    size_t order = i->in[at.numbers] ? tt__align_to((starts + 2 * rows) * 4, TT__CUDA_ALIGN) : 0;
    return order + (at.backward ? tt__align_to(rows * (size_t)i->attr.heads * 4, TT__CUDA_ALIGN) : 0);
}

static const tt__rules tt__rules_ATTENTION = {tt__shape_ATTENTION, {tt__backward_ATTENTION},
    tt__cpu_attention, tt__cuda_attention, tt__check_ATTENTION, NULL, tt__flops_of_attention};

static bool tt__shape_ATTENTION_BACKWARD(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *q = tt__in(t, i, 1), *keys = i->in[7] ? tt__in(t, i, 2) : q;
    for (int k = 0; k < 6; k++)
        if (k != 4 && !tt__shape_in(t, i, k, k == 2 || k == 3 ? keys : q, q->cols)) return false;
    for (int k = 0; k < 3; k++) out[k] = k ? *keys : *q;
    return tt__index_in(t, i, 4) && tt__shape_in(t, i, 6, q, i->attr.heads) && tt__numbers_in(t, i, 7, 1);
}

static const tt__rules tt__rules_ATTENTION_BACKWARD = {tt__shape_ATTENTION_BACKWARD, {NULL},
    tt__cpu_attention, tt__cuda_attention, NULL, NULL, tt__flops_of_attention};

/* -------------------------------------------------------------------------------------------- gather_rows */

static bool tt__shape_GATHER_ROWS(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_shape(&out[0], tt__in(t, i, 0)->dtype, tt__in(t, i, 1), tt__in(t, i, 0)->cols);
    return tt__float_in(t, i, 0) && tt__index_in(t, i, 1);
}

tt_value tt_gather_rows(tt_tape *t, tt_value x, tt_value index)
{
    return tt__record(t, tt__new_instr(TT__OP_GATHER_ROWS), "vv", x, index);
}

/* The rows of operand 0 that operand 1 tells. */
static tt_status tt__check_rows(const tt__launch *l)
{
    const char *what = tt__is(l->instr, TT__GATHERS) ? "rows to gather from" : "rows to set";
    return tt__check_indices(l, 1, l->in[0].rows, NULL, what);
}

static const tt__rules tt__rules_GATHER_ROWS = {tt__shape_GATHER_ROWS,
    {NULL, "g1", "0", TT__OP_GATHER_ROWS_BACKWARD}, NULL, NULL, tt__check_rows};

static bool tt__shape_by_index(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_shape(&out[0], TT_F32, &t->values[i->out[0]].shape, tt__in(t, i, 0)->cols);
    return tt__float_in(t, i, 0) && tt__index_in(t, i, 1);
}

static const tt__rules tt__rules_GATHER_ROWS_BACKWARD = {tt__shape_by_index, {NULL}, NULL, tt__sort_bytes};

/* ---------------------------------------------------------------------------------------------- mean_pool */

static bool tt__shape_MEAN_POOL(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    if (!tt__shape_GATHER_ROWS(t, i, out)) return false;
    if (out[0].axis && !out[0].extra) return tt__bad(t, i, 1, "sequence starts, from tt_seq_start");
    if (out[0].axis) out[0].extra = 0;
    out[0].rows--;
    return out[0].rows >= 1 || tt__bad(t, i, 1, "sequence starts of at least one sequence");
}

tt_value tt_mean_pool(tt_tape *t, tt_value x, tt_value seq_start)
{
    return tt__record(t, tt__new_instr(TT__OP_MEAN_POOL), "vv", x, seq_start);
}

static tt_status tt__check_MEAN_POOL(const tt__launch *l) { return tt__check_starts(l, 1, l->in[0].rows); }

static const tt__rules tt__rules_MEAN_POOL = {tt__shape_MEAN_POOL,
    {NULL, "g1", "0", TT__OP_MEAN_POOL_BACKWARD}, NULL, NULL, tt__check_MEAN_POOL};
static const tt__rules tt__rules_MEAN_POOL_BACKWARD = {tt__shape_by_index};

/* ----------------------------------------------------------------------------------------------- set_rows */

static bool tt__shape_SET_ROWS(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = *tt__in(t, i, 0);
    return tt__float_in(t, i, 0) && tt__index_in(t, i, 1) && tt__fixed_in(t, i, 2, 1, out[0].cols);
}

tt_value tt_set_rows(tt_tape *t, tt_value x, tt_value index, tt_param *row)
{
    return tt__record(t, tt__new_instr(TT__OP_SET_ROWS), "vvp", x, index, row);
}

static const tt__rules tt__rules_SET_ROWS = {tt__shape_SET_ROWS, {NULL, "g1", "02", TT__OP_SET_ROWS_BACKWARD},
    NULL, NULL, tt__check_rows};

static bool tt__shape_SET_ROWS_BACKWARD(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = *tt__in(t, i, 0);
    tt__set_fixed(&out[1], TT_F32, 1, out[0].cols);
    return tt__float_in(t, i, 0) && tt__index_in(t, i, 1);
}

/* A mark for each row. */
static size_t tt__cpu_SET_ROWS_BACKWARD(int threads, const tt_tape *t, const tt__instr *i)
{
    return tt__align_up((size_t)tt__in(t, i, 0)->rows) + tt__widen_bytes(threads, t, i);
}

static const tt__rules tt__rules_SET_ROWS_BACKWARD = {tt__shape_SET_ROWS_BACKWARD, {NULL},
    tt__cpu_SET_ROWS_BACKWARD};

/* ------------------------------------------------------------------------------------------------ patches */

tt_patch_options tt_patch_options_default(int height, int width, int channels, int patch)
{
    tt_patch_options o;
    memset(&o, 0, sizeof o);
    o.height = height;
    o.width = width;
    o.channels = channels;
    o.patch = patch;
    for (int c = 0; c < 4; c++) o.mean[c] = o.std[c] = 0.5f;
    return o;
}

static bool tt__shape_PATCHES(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *pixels = tt__in(t, i, 0), *starts = tt__in(t, i, 2);
    const tt_patch_options *o = &i->attr.image;
    bool image = o->height >= 1 && o->width >= 1 && o->channels >= 1 && o->channels <= 4;
    if (!image || o->patch < 1 || o->height % o->patch || o->width % o->patch)
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "patches: images of %d x %d pixels and %d channels (1 to 4) "
                             "cannot be cut into patches of %d x %d", o->width, o->height, o->channels,
                             o->patch, o->patch);
    for (int c = 0; c < o->channels; c++)
        if (!isfinite(o->mean[c]) || !(o->std[c] > 0))
            return tt__tape_fail(t, TT_ERR_ARGUMENT, "patches: mean %g and std %g of channel %d", o->mean[c],
                                 o->std[c], c);
    int64_t size = (int64_t)o->height * o->width * o->channels;
    if (pixels->dtype != TT_U8 || pixels->cols != size)
        return tt__bad(t, i, 0, "u8 of width %lld (height * width * channels)", (long long)size);
    if (!tt__index_in(t, i, 1) || !tt__index_in(t, i, 2)) return false;
    if (starts->axis != pixels->axis || starts->rows != pixels->rows + 1)
        return tt__bad(t, i, 2, "one row more than there are images");
    tt__set_shape(&out[0], TT_F32, tt__in(t, i, 1), (int64_t)o->channels * o->patch * o->patch);
    return true;
}

tt_value tt_patches(tt_tape *t, tt_value pixels, tt_value positions, tt_value seq_start,
                    const tt_patch_options *o)
{
    tt__instr i = tt__new_instr(TT__OP_PATCHES);
    i.attr.image = *o;
    return tt__record(t, i, "vvv", pixels, positions, seq_start);
}

static tt_status tt__check_PATCHES(const tt__launch *l)
{
    const tt_patch_options *o = &l->instr->attr.image;
    int64_t patches = (int64_t)(o->height / o->patch) * (o->width / o->patch);
    tt_status status = tt__check_starts(l, 2, l->out[0].rows);
    if (status != TT_OK) return status;
    return tt__check_indices(l, 1, patches + 1, NULL, "0 or the number of a patch");
}

static size_t tt__cpu_PATCHES(int threads, const tt_tape *t, const tt__instr *i)
{
    return tt__buffer_bytes(threads, t->values[i->out[0]].shape.cols);
}

static const tt__rules tt__rules_PATCHES = {tt__shape_PATCHES, {NULL}, tt__cpu_PATCHES, NULL,
    tt__check_PATCHES};

/* ------------------------------------------------------------------------------------------ cross_entropy */

tt_cross_entropy_options tt_cross_entropy_options_default(void)
{
    tt_cross_entropy_options o;
    memset(&o, 0, sizeof o);
    o.ignore_index = -100;
    return o;
}

static bool tt__shape_CROSS_ENTROPY(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *logits = tt__in(t, i, 0);
    const float smoothing = i->attr.smoothing;
    if (!tt__float_in(t, i, 0) || !tt__index_in(t, i, 1)) return false;
    if (!tt__same_rows(logits, tt__in(t, i, 1))) return tt__bad(t, i, 1, "as many rows as the logits");
    if (!tt__weights_in(t, i, 2, logits)) return false;
    if (!(smoothing >= 0 && smoothing < 1))
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "cross_entropy: label smoothing %g is not in [0, 1)",
                             smoothing);
    tt__set_loss(out);
    tt__set_shape(&out[1], TT_F32, logits, 1);
    return true;
}

tt_value tt_cross_entropy(tt_tape *t, tt_value logits, tt_value targets,
                          const tt_cross_entropy_options *options)
{
    tt_cross_entropy_options o = options ? *options : tt_cross_entropy_options_default();
    tt__instr i = tt__new_instr(TT__OP_CROSS_ENTROPY);
    i.attr.ignore_index = o.ignore_index;
    i.attr.smoothing = o.label_smoothing;
    return tt__record(t, i, "vvV", logits, targets, o.weights);
}

/* The linear layer and its backward that a fused loss replaces. */
typedef struct tt__head {
    int linear, back, last; /* instructions: of the logits, of their gradient (-1: none), the last replaced */
    tt__instr fused;
} tt__head;

/* The backward of the loss, and the gradients that come right after it. False: they cannot be fused. */
static bool tt__fuse_head_backward(const tt_tape *t, int k, int32_t logits, tt__head *h)
{
    int32_t loss = t->code[k].out[0];
    h->back = t->values[logits].reader;
    const tt__instr *back = &t->code[h->back];
    if (back->op != TT__OP_CROSS_ENTROPY_BACKWARD || back->in[1] != logits) return false;
    int32_t d = t->code[h->back].out[0];
    h->fused.backward = true;
    h->fused.in[5] = t->code[h->back].in[0];
    for (h->last = h->back; h->last + 1 < t->n_code; h->last++) {
        const tt__instr *i = &t->code[h->last + 1];
        bool dw = i->op == TT__OP_LINEAR_DW, dx = i->op == TT__OP_LINEAR_DX;
        if ((!dw && !dx) || i->in[0] != d) break;
        for (int o = 0; o < 1 + dw; o++) {
            int to = dx ? 1 : 3 + o;
            if (dw && i->out[o] && t->values[i->out[o]].shape.dtype != TT_F32) return false;
            h->fused.out[to] = i->out[o];
            h->fused.add |= (i->add >> o & 1) << to;
            h->fused.add_later |= (i->add_later >> o & 1) << to;
        }
    }
    for (int b = k + 1; b <= h->last && tt__uses(t, loss); b++)
        for (int j = 0; j < TT__MAX_IN; j++)
            if (t->code[b].in[j] && t->values[t->code[b].in[j]].base == loss) return false;
    return !t->code[h->back].add && t->values[d].base == d && tt__uses(t, d) == h->last - h->back;
}

/* Logits of fewer bytes than this are stored whole. */
#ifndef TT__LOSS_WHOLE
#define TT__LOSS_WHOLE ((int64_t)16 << 20)
#endif

/* linear + cross_entropy of many logits, and their backward, become one instruction that computes loss and
   gradients chunk by chunk of rows, so that only a chunk's logits ever exist: as in Liger Kernel (Hsu et al.,
   arXiv 2410.10989). It stands where the last of them stood, so nothing may have read the loss until then.
   Sums of several losses keep them apart; so do 16-bit gradients, which each chunk would round once more. */
static void tt__fuse_CROSS_ENTROPY(tt_tape *t, int k, int32_t root, bool later)
{
    int32_t logits = t->code[k].in[0];
    const tt__value *v = &t->values[logits];
    tt__head h = {tt__producer(t, logits), -1, k, t->code[k]};
    if (!later || h.linear < 0 || v->base != logits || v->keep || logits == root) return;
    if (v->shape.rows <= TT__LOSS_CHUNK) return;
    const tt__instr *linear = &t->code[h.linear];
    if (linear->op != TT__OP_LINEAR || linear->out[0] != logits || linear->attr.act || linear->in[3]) return;
    if (v->shape.rows * v->shape.cols * (int64_t)sizeof(float) < TT__LOSS_WHOLE) return;
    h.fused.op = TT__OP_LINEAR_CROSS_ENTROPY;
    h.fused.in[0] = linear->in[0];
    h.fused.in[3] = linear->in[1];
    h.fused.in[4] = linear->in[2];
    h.fused.out[1] = 0;
    int uses = tt__uses(t, logits);
    if (uses != 1 && (uses != 2 || !tt__fuse_head_backward(t, k, logits, &h))) return;
    for (int b = h.back; b >= 0 && b < h.last; b++) tt__drop(t, b);
    if (h.last != k) tt__drop(t, k);
    tt__drop(t, h.linear);
    tt__put(t, h.last, &h.fused);
}

static tt_status tt__check_CROSS_ENTROPY(const tt__launch *l)
{
    int64_t classes = l->instr->op == TT__OP_CROSS_ENTROPY ? l->in[0].cols : l->in[3].rows;
    const int32_t *ignored = &l->instr->attr.ignore_index;
    return tt__check_indices(l, TT__LOSS_TARGETS, classes, ignored, "classes of the logits");
}

static const tt__rules tt__rules_CROSS_ENTROPY = {tt__shape_CROSS_ENTROPY,
    {NULL, "g012BC", "0", TT__OP_CROSS_ENTROPY_BACKWARD}, tt__row_pairs_bytes, NULL, tt__check_CROSS_ENTROPY,
    tt__fuse_CROSS_ENTROPY};

static bool tt__shape_of_error(tt_tape *t, const tt__instr *i, tt__shape *out) /* dloss, x -> dx */
{
    out[0] = *tt__in(t, i, 1);
    return tt__fixed_in(t, i, 0, 1, 1) && tt__float_in(t, i, 1);
}

static const tt__rules tt__rules_CROSS_ENTROPY_BACKWARD = {tt__shape_of_error};

static bool tt__shape_LINEAR_CROSS_ENTROPY(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *x = tt__in(t, i, 0), *w = tt__in(t, i, 3);
    if (!tt__float_in(t, i, 0) || !tt__index_in(t, i, 1) || !tt__weights_in(t, i, 2, x)) return false;
    tt__set_loss(out);
    out[1] = *x;
    tt__set_fixed(&out[3], TT_F32, w->rows, w->cols);
    tt__set_fixed(&out[4], TT_F32, 1, w->rows);
    return tt__fixed_in(t, i, 3, w->rows, x->cols) && tt__fixed_in(t, i, 4, 1, w->rows) &&
           tt__fixed_in(t, i, 5, 1, 1);
}

static double tt__flops_LINEAR_CROSS_ENTROPY(const tt__instr *i, const tt__mat *in)
{
    int products = 1 + (i->out[1] != 0) + (i->out[3] != 0);
    return 2.0 * (double)in[0].rows * (double)in[3].rows * (double)in[3].cols * products;
}

static size_t tt__cpu_LINEAR_CROSS_ENTROPY(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__shape *x = tt__in(t, i, 0);
    int64_t chunk = tt__min(x->rows, TT__LOSS_CHUNK), classes = tt__in(t, i, 3)->rows;
    size_t widen = tt__buffer_bytes(threads, classes), most = 0;
    size_t parts[] = {tt__gemm_workspace(chunk, classes, x->cols),
                      tt__gemm_workspace(chunk, x->cols, classes),
                      tt__gemm_workspace(classes, x->cols, chunk),
                      tt__partial_bytes(chunk, classes) + widen, tt__align_up((size_t)chunk * 8) + widen};
    for (int k = 0; k < TT__COUNT(parts); k++) most = parts[k] > most ? parts[k] : most;
    return tt__loss_bytes(x->rows, classes) + most;
}

/* Logits of a chunk, whose rows are multiples of 8; loss and hit of each row. */
static size_t tt__cuda_LINEAR_CROSS_ENTROPY(const tt_tape *t, const tt__instr *i)
{
    size_t rows = (size_t)tt__in(t, i, 0)->rows, classes = tt__align_to((size_t)tt__in(t, i, 3)->rows, 8);
    size_t chunk = rows < TT__LOSS_CHUNK ? rows : TT__LOSS_CHUNK;
    return tt__align_to(chunk * classes * 4, TT__CUDA_ALIGN) + tt__align_to(rows * 8, TT__CUDA_ALIGN);
}

static const tt__rules tt__rules_LINEAR_CROSS_ENTROPY = {tt__shape_LINEAR_CROSS_ENTROPY, {NULL},
    tt__cpu_LINEAR_CROSS_ENTROPY, tt__cuda_LINEAR_CROSS_ENTROPY, tt__check_CROSS_ENTROPY, NULL,
    tt__flops_LINEAR_CROSS_ENTROPY};

/* ------------------------------------------------------------------------------------- mean_squared_error */

static bool tt__shape_MEAN_SQUARED_ERROR(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    bool fits = tt__shape_of_two(t, i, out) && tt__weights_in(t, i, 2, tt__in(t, i, 0));
    tt__set_loss(out);
    return fits;
}

tt_value tt_mean_squared_error(tt_tape *t, tt_value x, tt_value target, tt_value weights)
{
    return tt__record(t, tt__new_instr(TT__OP_MEAN_SQUARED_ERROR), "vvV", x, target, weights);
}

static void tt__backward_MEAN_SQUARED_ERROR(tt__builder *b, const tt__instr *f, int32_t g)
{
    const int op = TT__OP_MEAN_SQUARED_ERROR_BACKWARD;
    if (tt__wants(b->t, f->in[0])) tt__emit_gradient(b, f, g, op, "g012C", "0");
    if (tt__wants(b->t, f->in[1])) tt__emit_gradient(b, f, g, op, "g102C", "1"); /* the error is symmetric */
}

static const tt__rules tt__rules_MEAN_SQUARED_ERROR = {tt__shape_MEAN_SQUARED_ERROR,
    {tt__backward_MEAN_SQUARED_ERROR}, tt__row_pairs_bytes};
static const tt__rules tt__rules_MEAN_SQUARED_ERROR_BACKWARD = {tt__shape_of_error};

/* ------------------------------------------------------------------------------------------ cast and fill */

static void tt__backward_CAST(tt__builder *b, const tt__instr *f, int32_t g)
{
    bool parameter = b->t->values[f->in[0]].storage == TT__PARAMETER; /* which has got its gradient already */
    if (!parameter) tt__emit_gradient(b, f, g, TT__OP_CAST, "g", "0");
}

static const tt__rules tt__rules_CAST = {tt__shape_elementwise, {tt__backward_CAST}};

static bool tt__shape_FILL(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = t->values[i->out[0]].shape;
    return true;
}

static const tt__rules tt__rules_FILL = {tt__shape_FILL, {NULL}, tt__no_bytes};

/* ------------------------------------------------------------------------------------------------ updates */

static bool tt__shape_SUM_SQUARES(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT_F32, 1, 1);
    return tt__float_in(t, i, 0);
}

/* A sum for each chunk. */
static size_t tt__cpu_SUM_SQUARES(int threads, const tt_tape *t, const tt__instr *i)
{
    int64_t chunks = tt__ceil_div(tt__in(t, i, 0)->rows * tt__in(t, i, 0)->cols, TT__CHUNK);
    return tt__align_up((size_t)chunks * 8) + tt__chunk_bytes(threads, t, i);
}

static const tt__rules tt__rules_SUM_SQUARES = {tt__shape_SUM_SQUARES, {NULL}, tt__cpu_SUM_SQUARES};

static bool tt__doubles_in(tt_tape *t, const tt__instr *i, int k) /* a part of tt__results */
{
    const tt__shape *s = tt__in(t, i, k);
    return (s->dtype == TT__F64 && s->rows == 1 && s->cols == 3) || tt__bad(t, i, k, "f64 (1, 3)");
}

static bool tt__shape_ADD_COUNTS(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT__F64, 1, 3);
    return tt__fixed_in(t, i, 0, 1, 4);
}

static bool tt__shape_CLIP(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT_F32, 1, 2);
    return tt__float_in(t, i, 0) && tt__doubles_in(t, i, 1) && (!i->in[2] || tt__doubles_in(t, i, 2));
}

static bool tt__shape_LOSS_SCALE(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_fixed(&out[0], TT__F64, 1, 3);
    return tt__fixed_in(t, i, 0, 1, 2) && tt__doubles_in(t, i, 1);
}

static const tt__rules tt__rules_ADD_COUNTS = {tt__shape_ADD_COUNTS, {NULL}, tt__no_bytes};
static const tt__rules tt__rules_CLIP = {tt__shape_CLIP, {NULL}, tt__no_bytes};
static const tt__rules tt__rules_LOSS_SCALE = {tt__shape_LOSS_SCALE, {NULL}, tt__no_bytes};

/* All outputs are as the gradient. */
static bool tt__shape_of_update(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    for (int k = 0; k < TT__MAX_OUT; k++) out[k] = *tt__in(t, i, 0);
    return tt__float_in(t, i, 0) && tt__fixed_in(t, i, 1, 1, 2);
}

static const tt__rules tt__rules_SGD = {tt__shape_of_update, {NULL}, tt__chunk_bytes};
static const tt__rules tt__rules_ADAM = {tt__shape_of_update, {NULL}, tt__chunk_bytes};

/* ----------------------------------------------------------------------------------- memories and streams */

static const tt__rules tt__rules_COPY = {tt__shape_alike, {NULL}, tt__no_bytes};
static const tt__rules tt__rules_WAIT = {tt__shape_alike, {NULL}, tt__no_bytes}; /* it has no results */

/* -------------------------------------------------------------------------------------------- all of them */

static const tt__rules *tt__rules_of(const tt__instr *i)
{
    static const tt__rules *const table[TT__OP_COUNT] = {
#define TT__RULES(OP, name, inputs, outputs, flags) &tt__rules_##OP,
        TT__OPS(TT__RULES)
#undef TT__RULES
    };
    return table[i->op];
}

/* Floating-point operations of an instruction's matrix products; `in`: see tt__rules.flops. */
static double tt__flops(const tt__instr *i, const tt__mat *in)
{
    if (tt__rules_of(i)->flops) return tt__rules_of(i)->flops(i, in);
    if (!tt__is(i, TT__PRODUCT) || !i->out[0]) return 0;
    tt__mnk p = tt__mnk_of(i, in[0].rows, in[0].cols, in[1].rows, in[1].cols);
    return 2.0 * (double)p.m * (double)p.n * (double)p.k;
}

/* Scratch at full capacity, of the kinds of devices. */
static size_t tt__cpu_workspace(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__rules *r = tt__rules_of(i);
    return r->cpu_scratch ? r->cpu_scratch(threads, t, i) : tt__widen_bytes(threads, t, i);
}

static size_t tt__cuda_workspace(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__rules *r = tt__rules_of(i);
    (void)threads;
    return r->cuda_scratch ? r->cuda_scratch(t, i) : 0;
}

/* ===========================================================================================================
   PASSES                                                                                          >>passes
   Functions that rewrite a tape, and the verifier that runs after each. tt__run_passes (>>compile) has their
   order. Uses tape and ops.
   ======================================================================================================== */

/* ----------------------------------------------------------------------------------------------- verifier */

static tt_status tt__verify_fail(tt_tape *t, const char *pass, int at, const char *what, int32_t value)
{
    char text[256];
    if (value < 0 || value >= t->n_values) value = 0;
    return tt__fail(t->ctx, TT_ERR_INTERNAL, "after pass '%s': instruction %d (%s): %s: %s", pass, at,
                    tt__instr_name(&t->code[at]), what, tt__describe(t, value, text, sizeof text));
}

/* What the verifier knows of a storage in front of an instruction. */
typedef struct tt__known {
    bool defined;
    int group;      /* the last group of instructions that run together that writes it; 0: none */
    int writer;     /* one more than the instruction of another stream that writes it, before its WAIT */
    int readers;    /* how many of these read it */
} tt__known;

/* Does i have the step's settings as an operand? */
static bool tt__needs_run(const tt__instr *i, bool accumulate)
{
    if (tt__is(i, TT__MEAN)) return accumulate;
    return tt__is(i, TT__WITH_RUN) && (tt__is(i, TT__RMW) || i->attr.dropout > 0);
}

static bool tt__reaches(const tt_tape *t, const tt__instr *i, int32_t v)
{
    return t->values[v].space != TT__HOST || t->host || tt__is(i, TT__ANY_SPACE);
}

/* What is wrong with an operand: not there, out of the op's reach, or being written. NULL: nothing. */
static const char *tt__verify_operand(const tt_tape *t, const tt__instr *i, int j, const tt__known *known,
                                      int group)
{
    int32_t id = i->in[j];
    bool expected = j < tt__ops[i->op].inputs || (j == TT__RUN_IN && tt__is(i, TT__WITH_RUN));
    if (id < 0 || id >= t->n_values || !expected) return "operand is no value";
    const tt__known *k = &known[t->values[id].base];
    if (!k->defined) return "reads a value that nothing has written";
    if (!tt__reaches(t, i, id)) return "cannot read the host's memory";
    if (j == TT__RUN_IN && id != t->run) return "operand is not the step's settings";
    if (k->group == group) return "reads what an instruction that it runs together with writes";
    return k->writer && !tt__is(i, TT__WAITS) ? "is not waited for before it is read" : NULL;
}

/* What is wrong with a result, to which the op's rule gives a shape. */
static const char *tt__verify_result(const tt_tape *t, const tt__instr *i, int j, const tt__shape *rule,
                                     const tt__known *known)
{
    const tt__value *v = &t->values[i->out[j]];
    const tt__known *k = &known[v->base];
    bool updates = tt__is(i, TT__RMW), adds = i->add >> j & 1;
    bool reads = adds || updates || (i->add_later >> j & 1);
    bool same_shape = tt__same_rows(rule, &v->shape) && rule->cols == v->shape.cols;
    bool other_kind = tt__is_float(rule->dtype) != tt__is_float(v->shape.dtype);
    bool given = v->storage == TT__INPUT || v->storage == TT__PARAMETER || i->out[j] == t->run;
    if (j >= tt__ops[i->op].outputs || !rule->rows) return "writes an output that it has not";
    if (!same_shape) return "result has another shape than its rule says";
    if (other_kind || (v->pinned_f32 && v->shape.dtype != TT_F32)) return "result has the wrong dtype";
    if (!tt__reaches(t, i, i->out[j])) return "cannot write the host's memory";
    if (!updates && given) return "overwrites";
    if (adds && !k->defined) return "adds to a value that nothing has written";
    if (!reads && v->base == i->out[j] && k->defined) return "writes a value a second time";
    if (k->writer || k->readers) return "is not waited for before it is written";
    return NULL;
}

/* Ends the work whose first output is in[0]; every operand of that must be one of the WAIT's, to keep it. */
static const char *tt__verify_wait(const tt_tape *t, const tt__instr *i, tt__known *known)
{
    int at = known[t->values[i->in[0]].base].writer - 1;
    const tt__instr *work = &t->code[tt__max(0, at)];
    if (at < 0 || i->in[0] != work->out[0]) return "waits for nothing that is under way";
    if (i->stream || i->segment != work->segment) return "waits in another segment or stream";
    for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
        int32_t id = j < TT__MAX_IN ? work->in[j] : work->out[j - TT__MAX_IN];
        bool kept = !id;
        for (int m = 0; m < TT__MAX_IN; m++) kept |= i->in[m] == id;
        if (!kept) return "does not keep all operands of what it waits for";
        if (!id) continue;
        if (j < TT__MAX_IN) known[t->values[id].base].readers--;
        else known[t->values[id].base].writer = 0;
    }
    return NULL;
}

/* Every use after its definition, one definition, shapes as the rules say, dtypes of the right kind; work of
   other streams has one WAIT, before which nothing uses what it writes or changes what it reads. */
static tt_status tt__verify(tt_tape *t, const char *pass)
{
    tt_status status = TT_OK;
    int group = 1, under_way = 0;
    if (!t->ctx->options.verify) return TT_OK;
    tt__known *known = (tt__known *)tt__calloc(t->ctx, sizeof *known * (size_t)t->n_values);
    if (!known) return TT_ERR_MEMORY;
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__value *x = &t->values[v];
        bool kept = x->persistent && (x->storage == TT__STATE || x->storage == TT__STEP);
        bool given = x->storage == TT__INPUT || x->storage == TT__PARAMETER || v == t->run;
        known[v].defined = x->base == v && (given || kept);
    }
    for (int k = 0; k < t->n_code && status == TT_OK; k++) {
        const tt__instr *i = &t->code[k];
        tt__shape shape[TT__MAX_OUT];
        const char *wrong = NULL;
        int32_t which = 0;
        if (k && i->segment < i[-1].segment) wrong = "stands behind those of a later segment";
        bool alike = k + 1 < t->n_code && i[1].op == i->op && i[1].segment == i->segment;
        if (i->with_next && (!alike || i->stream || i[1].stream))
            wrong = "runs together with one of another op";
        for (int j = 0; j < TT__MAX_IN && !wrong; j++)
            if ((which = i->in[j]) != 0) wrong = tt__verify_operand(t, i, j, known, group);
        for (int j = 0; j < TT__MAX_OUT && !wrong; j++)
            if ((which = i->out[j]) < 0 || which >= t->n_values) wrong = "result is no value";
        if (!wrong && !tt__shape_of(t, i, shape)) {
            status = tt__fail(t->ctx, TT_ERR_INTERNAL, "after pass '%s': instruction %d: %s", pass, k,
                              t->error);
            break;
        }
        for (int j = 0; j < TT__MAX_OUT && !wrong; j++)
            if ((which = i->out[j]) != 0 && !(wrong = tt__verify_result(t, i, j, &shape[j], known)))
                known[t->values[which].base].defined = true; /* a later result of it may add to this one */
        if (!wrong && t->run && !i->in[TT__RUN_IN] && tt__needs_run(i, t->accumulate)) {
            wrong = "lacks the step's settings";
            which = t->run;
        }
        if (!wrong && tt__is(i, TT__WAITS)) {
            which = i->in[0];
            wrong = tt__verify_wait(t, i, known);
            under_way--;
        }
        if (!wrong && i->stream && !i->out[0]) wrong = "is of another stream and writes nothing";
        if (wrong) status = tt__verify_fail(t, pass, k, wrong, which);
        for (int j = 0; j < TT__MAX_IN && i->stream && !wrong; j++)
            if (i->in[j]) known[t->values[i->in[j]].base].readers++;
        for (int j = 0; j < TT__MAX_OUT && !wrong; j++) {
            tt__known *x = &known[t->values[i->out[j]].base];
            x->defined = true;
            x->group = group;
            if (i->stream && i->out[j]) x->writer = k + 1;
        }
        under_way += i->stream != 0;
        group += !i->with_next;
    }
    for (int32_t v = 1; v < t->n_values && under_way && status == TT_OK; v++)
        if (known[v].writer) status = tt__verify_fail(t, pass, known[v].writer - 1, "is never waited for", v);
    tt__free(t->ctx, known);
    return status;
}

/* ------------------------------------------------------------------------------------------ differentiate */

/* Appends the backward instructions of the loss `root` to the tape. */
static tt_status tt__differentiate(tt_tape *t, int32_t root, bool accumulate)
{
    tt__builder b = {t, accumulate, true, TT__EACH_MICRO, true};
    int forward = tt__index(t);
    char what[256];
    if (!t->values[root].needs_grad)
        return tt__fail(t->ctx, TT_ERR_ARGUMENT, "nothing to train: no trainable parameter lies behind the "
                        "loss %s", tt__describe(t, root, what, sizeof what));
    const tt__shape *shape = &t->values[root].shape;
    if (shape->rows != 1 || shape->cols != 1 || shape->axis || t->values[root].base != root)
        return tt__fail(t->ctx, TT_ERR_SHAPE, "the loss must be a (1, 1) result of an op, not %s",
                        tt__describe(t, root, what, sizeof what));
    int32_t seed = tt__new_gradient(&b, root);
    tt__fill(&b, seed, 1);
    if (b.ok) t->code[t->n_code - 1].in[0] = t->scale;
    for (int k = forward - 1; k >= 0 && b.ok; k--) {
        tt__instr f = t->code[k];
        int32_t g = t->values[f.out[0]].grad;
        const tt__gradient *how = &tt__rules_of(&f)->backward;
        if (!g || !t->values[f.out[0]].needs_grad) continue;
        if (!how->emit && !how->reads)
            return tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "op '%s' has no backward, and '%s' needs a gradient",
                            tt__instr_name(&f), t->values[f.out[0]].name);
        if (how->emit) how->emit(&b, &f, g);
        else tt__emit_gradient(&b, &f, g, how->op, how->reads, how->into);
    }
    return b.ok ? TT_OK : t->ctx->status;
}

/* ---------------------------------------------------------------------------------------------- inference */

/* Takes dropout out: of all ops without training, else of rate 0. Copies go, unless asked for by name. */
static tt_status tt__pass_inference(tt_tape *t, int32_t root, bool train)
{
    int n = tt__index(t);
    for (int k = 0; k < n; k++) {
        tt__instr *i = &t->code[k];
        const tt__value *y = &t->values[i->out[0]];
        for (int j = 0; j < TT__MAX_IN; j++)
            if (t->values[i->in[j]].instead) i->in[j] = t->values[i->in[j]].instead;
        if (!train) i->attr.dropout = 0;
        if (!tt__is(i, TT__RANDOM | TT__MOVES) || i->attr.dropout > 0) continue;
        i->op = TT__OP_SCALE;
        i->attr.scale = 1;
        if (y->keep || y->views || i->out[0] == root) continue;
        t->values[i->out[0]].instead = i->in[0];
        tt__drop(t, k);
    }
    return tt__settle(t, n);
}

/* --------------------------------------------------------------------------------------------------- rows */

/* Instructions that gather rows. */
typedef struct tt__gathers {
    tt_tape *t;
    int n;                      /* instructions before the pass */
    /* Every gather: its instruction, and one more than the entry of the gather of the same value that was
       found before it (0: none). */
    struct { int at, before; } *all; int n_all, cap_all;
    int *todo; int n_todo, cap_todo; /* the last is next */
} tt__gathers;

static bool tt__gathers_add(tt__gathers *g, int k)
{
    tt_context *ctx = g->t->ctx;
    if (!TT__GROW(ctx, g->all, g->n_all, g->cap_all)) return false;
    if (!TT__GROW(ctx, g->todo, g->n_todo, g->cap_todo)) return false;
    tt__value *x = &g->t->values[g->t->code[k].in[0]];
    g->all[g->n_all].at = g->todo[g->n_todo++] = k;
    g->all[g->n_all].before = x->instead; /* in this pass, the value's last entry of `all`, plus 1 */
    x->instead = ++g->n_all;
    return true;
}

/* Rows `index` of v, for instruction `at`, gathered once before the first that wants them; 0: no memory. */
static int32_t tt__gathered(tt__gathers *g, int at, int32_t v, int32_t index)
{
    tt_tape *t = g->t;
    tt__instr gather = tt__new_instr(TT__OP_GATHER_ROWS);
    int k = -1; /* the first that was found */
    for (int n = t->values[v].instead; n; n = g->all[n - 1].before) {
        const tt__instr *i = &t->code[g->all[n - 1].at];
        if (i->op >= 0 && i->in[0] == v && i->in[1] == index) k = g->all[n - 1].at;
    }
    if (k >= 0) {
        if ((k < g->n ? k : t->code[k].before) <= at) return t->code[k].out[0];
        gather = t->code[k];
        tt__drop(t, k);
    }
    if (!gather.out[0]) {
        tt__shape shape;
        tt__set_shape(&shape, t->values[v].shape.dtype, &t->values[index].shape, t->values[v].shape.cols);
        gather.in[0] = v;
        gather.in[1] = index;
        gather.out[0] = tt__new_value(t, &shape, TT__TRANSIENT, "rows of %.60s", t->values[v].name);
        if (!gather.out[0]) return 0;
        tt__value *y = &t->values[gather.out[0]];
        y->named = true;
        y->needs_grad = t->values[v].needs_grad;
        y->pinned_f32 = t->values[v].storage != TT__TRANSIENT && shape.dtype == TT_F32; /* exact, as inputs */
    }
    return tt__insert(t, at, &gather) && tt__gathers_add(g, t->n_code - 1) ? gather.out[0] : 0;
}

/* gather_rows(op(x)) becomes op(gather_rows(x)), where the op allows it and nothing else reads op(x). */
static tt_status tt__gather_before(tt__gathers *g, int k, int32_t root)
{
    tt_tape *t = g->t;
    int32_t v = t->code[k].in[0], index = t->code[k].in[1];
    int at = tt__only_use(t, v, root) ? tt__producer(t, v) : -1;
    if (at < 0 || t->values[index].shape.rows >= t->values[v].shape.rows) return TT_OK;
    tt__instr i = t->code[at];
    const int numbers = tt__numbers(&i);
    unsigned by_row = tt__ops[i.op].flags / TT__BY_ROW(1) & 15;
    tt__shape shape[TT__MAX_OUT];
    if (!by_row || i.out[0] != v || (numbers && i.in[numbers])) return TT_OK;
    bool most = 2 * t->values[index].shape.rows > t->values[v].shape.rows;
    if (i.attr.causal && most) return TT_OK; /* keys that no query sees are left out of whole rows only */
    i.out[0] = t->code[k].out[0];
    tt__value *y = &t->values[i.out[0]];
    if (!y->named) memcpy(y->name, t->values[v].name, sizeof y->name);
    tt__drop(t, k);
    for (int j = 0; j < TT__MAX_IN; j++)
        if (i.in[j] && by_row >> j & 1 && !(i.in[j] = tt__gathered(g, at, i.in[j], index)))
            return TT_ERR_MEMORY;
    if (numbers) i.in[numbers] = index;
    if (!tt__shape_of(t, &i, shape)) return t->status;
    for (int o = 1; o < TT__MAX_OUT; o++) {
        if (!i.out[o]) continue;
        i.out[o] = tt__new_value(t, &shape[o], TT__TRANSIENT, "%s", t->values[i.out[o]].name);
        if (!i.out[o]) return TT_ERR_MEMORY;
        t->values[i.out[o]].pinned_f32 = true;
    }
    tt__put(t, at, &i);
    return TT_OK;
}

/* Where only some rows of a result are read, only they are computed, from where all rows are needed on (see
   ROWS in the manual). Dropout draws the masks that it would have drawn. The gathers stand where the op stood
   (an index is an input), so that nothing lives longer. */
static tt_status tt__pass_rows(tt_tape *t, int32_t root)
{
    tt__gathers g;
    tt_status status = TT_OK;
    memset(&g, 0, sizeof g);
    g.t = t;
    g.n = tt__index(t);
    for (int k = 0; k < g.n && status == TT_OK; k++)
        if (tt__is(&t->code[k], TT__GATHERS) && !tt__gathers_add(&g, k)) status = TT_ERR_MEMORY;
    while (g.n_todo && status == TT_OK) {
        int k = g.todo[--g.n_todo];
        if (t->code[k].op >= 0) status = tt__gather_before(&g, k, root);
    }
    tt__free(t->ctx, g.all);
    tt__free(t->ctx, g.todo);
    return status == TT_OK ? tt__settle(t, g.n) : status;
}

/* --------------------------------------------------------------------------------------------------- fuse */

/* Makes one instruction of several where ops know how; `later`: after differentiation. */
static tt_status tt__pass_fuse(tt_tape *t, int32_t root, bool later)
{
    int n = tt__index(t);
    for (int k = 0; k < n; k++) {
        const tt__rules *rules = t->code[k].op >= 0 ? tt__rules_of(&t->code[k]) : NULL;
        if (rules && rules->fuse) rules->fuse(t, k, root, later);
    }
    return tt__settle(t, n);
}

/* ---------------------------------------------------------------------------------------------- precision */

/* A saved state holds these numbers. */
typedef enum tt__precision_kind {
    TT__32_TRUE, TT__BF16_MIXED, TT__BF16_TRUE, TT__16_MIXED, TT__16_TRUE
} tt__precision_kind;

/* What the options `precision` and `residual` say. */
typedef struct tt__precision {
    tt__precision_kind kind;
    bool mixed;
    bool residual_f32;
    tt_dtype half;      /* of 16-bit values; f32: there are none. f16: with loss scaling */
} tt__precision;

static const char *const tt__precision_names[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed",
                                                  "16-true"};

/* The number of an option's value among its n names. `use`: how the error lists these. */
static tt_status tt__parse(tt_context *ctx, const char *option, const char *name, const char *const *names,
                           int n, const char *use, int *out)
{
    for (*out = 0; *out < n; ++*out) if (strcmp(name, names[*out]) == 0) return TT_OK;
    *out = 0;
    return tt__fail(ctx, TT_ERR_UNSUPPORTED, "%s '%s' is unknown: use %s", option, name, use);
}

static tt_status tt__parse_precision(tt_context *ctx, const char *name, const char *residual,
                                     tt__precision *out)
{
    static const char *const residuals[] = {"16-bit", "f32"};
    int k, wide = 0;
    memset(out, 0, sizeof *out);
    tt_status status = tt__parse(ctx, "precision", name ? name : "32-true", tt__precision_names, 5,
                                 "32-true, 16-mixed, 16-true, bf16-mixed or bf16-true", &k);
    if (status != TT_OK) return status;
    out->kind = (tt__precision_kind)k; /* also if the residual is wrong: what needs it is checked too */
    out->mixed = k == TT__BF16_MIXED || k == TT__16_MIXED;
    out->half = k == TT__32_TRUE ? TT_F32 : k >= TT__16_MIXED ? TT_F16 : TT_BF16;
    if (residual)
        status = tt__parse(ctx, "residual", residual, residuals, 2,
                           "f32 or 16-bit, or NULL for what suits the precision", &wide);
    if (status != TT_OK) return status;
    out->residual_f32 = residual ? wide : k == TT__16_MIXED;
    if (!residual || out->mixed) return TT_OK;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "residual '%s': precision '%s' has one dtype for all values; leave "
                    "residual NULL, or use 16-mixed or bf16-mixed", residual, tt__precision_names[k]);
}

typedef enum tt__matmul { TT__MATMUL_FP32, TT__MATMUL_TF32, TT__MATMUL_FP8 } tt__matmul;

static tt_status tt__parse_matmul(tt_context *ctx, const char *name, tt__matmul *out)
{
    static const char *const names[] = {"fp32", "tf32", "fp8"};
    int k;
    tt_status status = tt__parse(ctx, "matmul", name ? name : "fp32", names, 3, "fp32, tf32 or fp8", &k);
    *out = (tt__matmul)k;
    return status;
}

/* v, a residual operand or a sum's, flows unchanged into a residual stream: puts it there. Not what rounds to
   16 bits for the matmuls that read it (norms, activations, attention), or is part of something wider. */
static bool tt__into_residual(tt_tape *t, int32_t v)
{
    const tt__value *x = &t->values[v], *base = &t->values[x->base];
    int at = x->base == v ? tt__producer(t, v) : -1;
    if (base->residual || base->pinned_f32 || x->storage != TT__TRANSIENT) return true;
    if (at < 0 || t->code[at].out[0] != v || t->code[at].attr.act) return false;
    const tt__instr *i = &t->code[at];
    bool in = tt__is(i, TT__BEGINS) || (tt__is(i, TT__MOVES) && tt__into_residual(t, i->in[0]));
    return t->values[v].residual = in;
}

/* Marks residual streams: sums of residual additions, rows gathered of such sums, and the values that the
   first addition of a stream adds to. */
static void tt__mark_residual(tt_tape *t)
{
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const bool gathers = tt__is(i, TT__GATHERS);
        const int last = tt__residual(i), first = tt__is(i, TT__SUMS) ? 0 : last;
        bool in = false;
        if (!gathers && !(last && i->in[last])) continue;
        for (int j = first; j <= last; j++) in |= t->values[t->values[i->in[j]].base].residual;
        for (int j = first; j <= last && !in && !gathers; j++) tt__into_residual(t, i->in[j]);
        if (in || !gathers) t->values[i->out[0]].residual = true;
    }
}

/* Gives values their dtypes; gradients follow, being made later. Mixed: matmul weights are read through a
   16-bit copy made once a run. Statistics, losses, what a loss reads and is computed from one stay f32. */
static tt_status tt__pass_precision(tt_tape *t, const tt__precision *precision)
{
    if (precision->kind == TT__32_TRUE) return TT_OK;
    const int n = tt__index(t);
    for (int k = 0; k < n; k++) {
        const tt__instr *i = &t->code[k];
        const bool loss = tt__is(i, TT__LOSS);
        tt__value *y = &t->values[i->out[0]];
        bool number = y->shape.rows == 1 && y->shape.cols == 1 && !y->shape.axis && tt__is(i, TT__MOVES);
        for (int j = 0; j < 2; j++) {
            tt__value *x = &t->values[t->values[i->in[j]].base];
            if (loss && x->storage == TT__TRANSIENT) x->pinned_f32 = true;
            if (number && x->pinned_f32) y->pinned_f32 = true;
        }
    }
    if (precision->residual_f32) tt__mark_residual(t);
    for (int32_t v = 1; v < t->n_values; v++) {
        tt__value *x = &t->values[v], *base = &t->values[x->base];
        bool changes = x->storage == TT__PARAMETER && !precision->mixed;
        if (x->storage == TT__TRANSIENT) changes = !base->pinned_f32 && !x->pinned_f32 && !base->residual;
        if (changes && x->shape.dtype == TT_F32) x->shape.dtype = precision->half;
    }
    if (!precision->mixed) return TT_OK;
    for (int k = 0; k < n; k++) { /* a cast right before its first reader, so that the copy lives no longer */
        int number = tt__weight(&t->code[k]);
        int32_t w = number ? t->code[k].in[number] : 0;
        if (!w || t->values[w].storage != TT__PARAMETER || t->values[w].base != w) continue;
        if (!t->values[w].instead) {
            tt__shape shape = t->values[w].shape;
            tt__instr cast = tt__new_instr(TT__OP_CAST);
            shape.dtype = precision->half;
            int32_t copy = tt__new_value(t, &shape, TT__TRANSIENT, "%s(%.60s)", tt_dtype_name(shape.dtype),
                                         t->values[w].name);
            if (!copy) return TT_ERR_MEMORY;
            t->values[copy].needs_grad = t->values[w].needs_grad;
            t->values[w].instead = copy;
            cast.in[0] = w;
            cast.out[0] = copy;
            if (!tt__insert(t, k, &cast)) return TT_ERR_MEMORY;
        }
        t->code[k].in[number] = t->values[w].instead;
    }
    return tt__settle(t, n);
}

/* Rounds the operands of 16-bit products to fp8, but of those that a cross-entropy makes in chunks. */
static void tt__pass_fp8(tt_tape *t)
{
    for (int k = 0; k < t->n_code; k++) {
        tt__instr *i = &t->code[k];
        if (!tt__is(i, TT__PRODUCT) || !i->out[0]) continue;
        const tt_dtype dtype = tt__in(t, i, 0)->dtype;
        bool alike = dtype != TT_F32 && dtype == tt__in(t, i, 1)->dtype;
        i->attr.fp8 = alike && tt__mnk_at_capacity(t, i).n % 16 == 0;
    }
}

/* On a device whose products can round while they read, mixed precision's copies of the weights go. */
static void tt__pass_fold_casts(tt_tape *t)
{
    tt__index(t);
    for (int k = 0; k < t->n_code; k++) {
        tt__instr *i = &t->code[k];
        int number = tt__weight(i), at = number ? tt__producer(t, i->in[number]) : -1;
        if (at < 0 || !tt__is(&t->code[at], TT__CASTS)) continue;
        const tt__value *w = &t->values[t->code[at].in[0]];
        if (w->storage != TT__PARAMETER || w->shape.dtype != TT_F32) continue;
        i->attr.narrow = t->values[i->in[number]].shape.dtype;
        i->in[number] = t->code[at].in[0];
    }
}

/* ---------------------------------------------------------------------------------------------- recompute */

typedef enum tt__recompute {
    TT__RECOMPUTE_NONE, TT__RECOMPUTE_CHEAP, TT__RECOMPUTE_ATTENTION, TT__RECOMPUTE_BLOCKS
} tt__recompute;

static tt_status tt__parse_recompute(tt_context *ctx, const char *name, tt__recompute *out)
{
    static const char *const names[] = {"none", "cheap", "attention", "blocks"};
    int k;
    tt_status status = tt__parse(ctx, "recompute", name ? name : "cheap", names, 4,
                                 "none, cheap, attention or blocks", &k);
    *out = (tt__recompute)k;
    return status;
}

typedef struct tt__recomputer {
    tt_tape *t;
    tt__recompute policy;
    int forward;     /* the first instruction of the backward */
    int whole;       /* "blocks": so many instructions, from the first on, are computed again whole */
    int at;          /* before which instructions are put in: the one that needs them */
} tt__recomputer;

/* The backward reads v anyway. */
static bool tt__is_saved(const tt__recomputer *r, int32_t v)
{
    return r->t->values[r->t->values[v].base].reader >= r->forward;
}

/* What computes v again, from values that are there; op -1 where v is kept. */
static tt__instr tt__recomputation(const tt__recomputer *r, int32_t v)
{
    const tt__value *x = &r->t->values[v];
    const int at = tt__producer(r->t, v);
    tt__instr none = tt__new_instr(-1), i = none;
    if (at < 0 || at >= r->forward || x->keep || x->persistent || x->block_end) return none;
    const tt__instr *f = &r->t->code[at];
    if (at < r->whole) return tt__is(f, TT__LOSS) ? none : *f;
    if (f->out[0] != v) return none; /* statistics are small */
    if (tt__is(f, TT__ACTIVATES) && f->attr.act && f->out[1] && tt__is_saved(r, f->out[1])) {
        i.op = TT__OP_ACTIVATION;
        i.attr = f->attr;
        i.in[0] = f->out[1];
        i.out[0] = v;
        return i;
    }
    if (tt__is(f, TT__AGAIN_KEPT)) {
        tt__storage storage = r->t->values[f->in[0]].storage;
        return storage == TT__INPUT || storage == TT__PARAMETER ? *f : none;
    }
    const unsigned cheap = r->policy == TT__RECOMPUTE_ATTENTION ? TT__AGAIN_KEPT : TT__AGAIN;
    const bool again = (tt__ops[f->op].flags & cheap) != 0;
    return again && tt__is_saved(r, f->in[0]) ? *f : none;
}

/* What the backward reads instead of operand v; 0 when out of memory. */
static int32_t tt__read_again(tt__recomputer *r, int32_t v)
{
    tt_tape *t = r->t;
    int32_t base = t->values[v].base;
    if (!t->values[base].instead) {
        tt__instr i = tt__recomputation(r, base);
        if (i.op < 0) return v;
        for (int j = 0; j < TT__MAX_IN; j++)
            if (i.in[j] && !(i.in[j] = tt__read_again(r, i.in[j]))) return 0;
        for (int o = 0; o < TT__MAX_OUT; o++) {
            int32_t old = i.out[o], id;
            if (!old) continue;
            tt__value like = t->values[old];
            id = tt__new_value(t, &like.shape, TT__TRANSIENT, "%s", like.name);
            if (!id) return 0;
            t->values[id].pinned_f32 = like.pinned_f32;
            t->values[old].instead = i.out[o] = id;
        }
        i.backward = true;
        i.again = true;
        if (!tt__insert(t, r->at, &i)) return 0;
    }
    if (v == base) return t->values[base].instead;
    tt__value view = t->values[v];
    return tt__new_view(t, t->values[base].instead, &view.shape, view.offset, view.ld, view.name);
}

/* The instructions before the last block. Without marks, 0. */
static int tt__blocks_to_recompute(const tt_tape *t, int forward)
{
    int end[2] = {0, 0}; /* of the last two marks: where what they mark is computed, and one more */
    double bytes[2] = {0, 0}; /* of what is computed between them, and after the last */
    for (int k = 0; k < forward; k++)
        for (int o = 0; o < TT__MAX_OUT; o++)
            if (t->code[k].out[o] && t->values[t->code[k].out[o]].block_end) {
                end[0] = end[1];
                end[1] = k + 1;
            }
    for (int k = end[0]; k < forward; k++)
        for (int o = 0; o < TT__MAX_OUT; o++)
            if (t->code[k].out[o])
                bytes[k >= end[1]] += (double)tt__storage_bytes(&t->values[t->code[k].out[o]]);
    return bytes[1] < bytes[0] / 2 ? end[0] : end[1]; /* a head follows the last mark, or one more block */
}

/* The backward reads what copies of forward instructions compute again, so that the forward's results need
   not be kept. A copy stands before the first instruction that reads it, and runs only what that needs. */
static tt_status tt__pass_recompute(tt_tape *t, tt__recompute policy)
{
    tt__recomputer r = {t, policy, 0, 0, 0};
    if (policy == TT__RECOMPUTE_NONE) return TT_OK;
    const int n = tt__index(t);
    while (r.forward < n && !t->code[r.forward].backward) r.forward++;
    if (policy == TT__RECOMPUTE_BLOCKS) r.whole = tt__blocks_to_recompute(t, r.forward);
    for (r.at = r.forward; r.at < n; r.at++)
        for (int j = 0; j < TT__MAX_IN && t->code[r.at].backward; j++) {
            int32_t v = t->code[r.at].in[j], with = v ? tt__read_again(&r, v) : 0;
            if (v && !with) return TT_ERR_MEMORY;
            t->code[r.at].in[j] = with;
        }
    return tt__settle(t, n);
}

/* --------------------------------------------------------------------------------------------------- step */

/* Numbers that instructions and the host share: a storage of its own, or a part of `of` from `offset` on. */
static int32_t tt__new_step_value(tt_tape *t, tt_dtype dtype, int64_t cols, int32_t of, size_t offset,
                                  const char *name)
{
    tt__shape shape;
    tt__set_fixed(&shape, dtype, 1, cols);
    if (of) return tt__new_view(t, of, &shape, (int64_t)offset, cols, name);
    int32_t id = tt__new_value(t, &shape, TT__STEP, "%s", name);
    if (id) t->values[id].space = t->host ? TT__HOST : TT__DEVICE; /* the host reads and writes it faster */
    return id;
}

/* Where a step's losses are summed up and, if it trains, its norm and loss scale. */
static tt_status tt__new_results(tt_tape *t, bool train, bool scales)
{
    t->results = tt__new_step_value(t, TT__F64, (int64_t)(sizeof(tt__results) / 8), 0, 0, "step results");
    if (!t->results) return TT_ERR_MEMORY;
    t->values[t->results].keep = true;
    t->values[t->results].persistent = t->accumulate || scales;
    t->totals = tt__new_step_value(t, TT__F64, 3, t->results, 0, "totals");
    const size_t scale = offsetof(tt__results, scale) / 8, clipped = offsetof(tt__results, clipped) / 8;
    if (scales) t->scale = tt__new_step_value(t, TT__F64, 3, t->results, scale, "loss scale");
    if (train) t->clipped = tt__new_step_value(t, TT_F32, 2, t->results, clipped, "gradient norm and factor");
    return t->totals && (t->scale || !scales) && (t->clipped || !train) ? TT_OK : TT_ERR_MEMORY;
}

/* Adds up what each loss counts. */
static tt_status tt__pass_counts(tt_tape *t)
{
    bool first = true;
    int n = tt__index(t);
    for (int k = 0; k < n && t->results; k++) {
        if (!tt__is(&t->code[k], TT__LOSS)) continue;
        tt__instr add = tt__new_instr(TT__OP_ADD_COUNTS);
        add.in[0] = t->code[k].out[TT__LOSS_COUNTS];
        add.out[0] = t->totals;
        add.add = !first;
        add.add_later = first && t->accumulate;
        add.backward = t->code[k].backward;
        first = false;
        if (!tt__insert(t, k + 1, &add)) return TT_ERR_MEMORY;
    }
    return tt__settle(t, n);
}

/* Gives the step's settings to the instructions that need them. */
static tt_status tt__pass_settings(tt_tape *t)
{
    for (int k = 0; k < t->n_code; k++) {
        if (!tt__needs_run(&t->code[k], t->accumulate)) continue;
        if (!t->run) t->run = tt__new_step_value(t, TT_U8, sizeof(tt__run), 0, 0, "step settings");
        if (!t->run) return TT_ERR_MEMORY;
        t->code[k].in[TT__RUN_IN] = t->run;
    }
    return TT_OK;
}

/* ------------------------------------------------------------------------------------------------- update */

static int32_t tt__new_state(tt__builder *b, int32_t param, const char *what)
{
    tt__shape shape = b->t->values[param].shape;
    if (shape.dtype == TT_F16) shape.dtype = TT_BF16; /* squares of small gradients would be 0 */
    int32_t id = tt__new_value(b->t, &shape, TT__STATE, "%s(%.60s)", what, b->t->values[param].name);
    if (!id) { b->ok = false; return 0; }
    b->t->values[id].persistent = true;
    b->t->values[id].param = b->t->values[param].param;
    return id;
}

static bool tt__decays(tt_context *ctx, const tt_optimizer_options *o, int param)
{
    if (!o->no_decay) return ctx->params[param]->ndim > 1;
    for (int k = 0; o->no_decay[k]; k++)
        if (tt__match(o->no_decay[k], ctx->params[param]->name)) return false;
    return true;
}

/* v is a parameter that has a gradient. */
static bool tt__is_trained(const tt_tape *t, int32_t v)
{
    return t->values[v].storage == TT__PARAMETER && t->values[v].base == v && t->values[v].grad;
}

/* Global norm, clipping, an optimizer's instruction for each parameter with a gradient, next loss scale. */
static tt_status tt__pass_update(tt_tape *t, const tt_optimizer_options *o, const tt_loss_scale *scale)
{
    tt__builder b = {t, false, true, TT__EACH_STEP, false};
    tt__shape shape;
    int values = t->n_values, n = 0;
    for (int32_t v = 1; v < values; v++) n += tt__is_trained(t, v);
    tt__set_fixed(&shape, TT_F32, n, 1);
    int32_t squares = tt__new_value(t, &shape, TT__TRANSIENT, "squared gradient norms");
    if (!squares) return TT_ERR_MEMORY;
    t->values[squares].pinned_f32 = t->values[squares].keep = true;
    tt__set_fixed(&shape, TT_F32, 1, 1);
    for (int32_t v = 1, k = 0; v < values; v++) {
        if (!tt__is_trained(t, v)) continue;
        const tt__value *g = &t->values[t->values[v].grad];
        tt__instr *i = tt__emit(&b, TT__OP_SUM_SQUARES, NULL, &t->values[v].grad, 1);
        if (!i || !(i->out[0] = tt__new_view(t, squares, &shape, k++, 1, g->name))) return TT_ERR_MEMORY;
        i->with_next = k < n;
    }
    const int32_t norms[] = {squares, t->totals, t->scale};
    tt__instr *clip = tt__emit(&b, TT__OP_CLIP, NULL, norms, 3);
    if (!clip) return TT_ERR_MEMORY;
    clip->attr.clip_norm = o->clip_norm;
    clip->out[0] = t->clipped;
    for (int32_t v = 1, k = 0; v < values && b.ok; v++) {
        if (!tt__is_trained(t, v)) continue;
        bool adam = o->kind != TT_SGD;
        int32_t first = adam || o->momentum != 0 ? tt__new_state(&b, v, adam ? "m" : "momentum") : 0;
        int32_t second = adam ? tt__new_state(&b, v, "v") : 0;
        const int32_t in[] = {t->values[v].grad, t->clipped};
        tt__instr *i = tt__emit(&b, adam ? TT__OP_ADAM : TT__OP_SGD, NULL, in, 2);
        if (!i) return TT_ERR_MEMORY;
        i->out[0] = v;
        i->out[1] = first;
        i->out[2] = second;
        i->attr.weight_decay = tt__decays(t->ctx, o, t->values[v].param) ? o->weight_decay : 0;
        i->attr.decoupled = o->kind == TT_ADAMW;
        i->attr.beta1 = adam ? o->beta1 : o->momentum;
        i->attr.beta2 = o->beta2;
        i->attr.eps = o->eps;
        i->attr.nesterov = o->nesterov;
        i->with_next = ++k < n;
    }
    if (!t->scale) return b.ok ? TT_OK : TT_ERR_MEMORY;
    const int32_t in[] = {t->clipped, t->totals};
    tt__instr *next = tt__emit(&b, TT__OP_LOSS_SCALE, NULL, in, 2);
    if (!next) return TT_ERR_MEMORY;
    next->out[0] = t->scale;
    next->attr.growth = scale->growth;
    next->attr.backoff = scale->backoff;
    next->attr.interval = scale->interval;
    return TT_OK;
}

/* -------------------------------------------------------------------------------------------------- prune */

/* Removes what no result needs: instructions none of whose outputs is read, kept or persistent, and, once the
   backward is there, outputs that would be saved for it in vain. */
static tt_status tt__pass_prune(tt_tape *t, int32_t root, bool drop_saved)
{
    bool *needed = (bool *)tt__calloc(t->ctx, (size_t)t->n_values);
    if (!needed) return TT_ERR_MEMORY;
    if (root) needed[t->values[root].base] = true;
    for (int32_t v = 1; v < t->n_values; v++)
        if (t->values[v].keep || t->values[v].persistent) needed[t->values[v].base] = true;
    for (int k = t->n_code - 1; k >= 0; k--) {
        tt__instr *i = &t->code[k];
        bool live = tt__is(i, TT__WAITS) && needed[t->values[i->in[0]].base];
        for (int j = 0; j < TT__MAX_OUT; j++) live |= i->out[j] && needed[t->values[i->out[j]].base];
        for (int j = 0; j < TT__MAX_IN && live; j++) if (i->in[j]) needed[t->values[i->in[j]].base] = true;
        if (!live) i->op = -1;
        if (!live || !drop_saved || !tt__is(i, TT__SAVES1) || !i->out[1]) continue;
        const tt__value *x = &t->values[i->out[1]];
        /* another dtype: out[0] is rounded as it */
        bool same = x->pinned_f32 || x->shape.dtype == t->values[i->out[0]].shape.dtype;
        if (same && !needed[x->base]) i->out[1] = 0;
    }
    tt__free(t->ctx, needed);
    return tt__settle(t, t->n_code);
}

/* ===========================================================================================================
   PLANNER                                                                                        >>planner
   Gives every value a place. Lifetimes are exact: from the instruction that first writes a storage to the
   last that reads it. Persistent values lie one after another; the rest is placed by greedy first and best
   fit over several orders (Pisarchyk, Lee: "Efficient memory management for deep neural net inference",
   2020), keeping the best. Each space has its own places. Uses tape.
   ======================================================================================================== */

#define TT__NO_PLACE SIZE_MAX /* of a storage that nothing uses */

/* A storage that must be placed: alive at instructions first..last, both included. */
typedef struct tt__box {
    int first, last;
    size_t bytes, place;
    int32_t value;  /* base value, or 0: the workspace of instruction `first` */
    int merged;     /* index of the box whose place it takes over; itself if none */
    tt__space space;
} tt__box;

/* The largest sum of bytes alive at once in a space, of boxes of at least `least` bytes, and where it is. */
static size_t tt__max_live(const tt__box *box, int n, int instructions, tt__space space, size_t least,
                           tt_context *ctx, int *at)
{
    int64_t *change = (int64_t *)tt__calloc(ctx, sizeof *change * ((size_t)instructions + 1));
    size_t live = 0, most = 0;
    if (!change) return SIZE_MAX;
    for (int k = 0; k < n; k++) {
        if (box[k].merged != k || box[k].space != space || box[k].bytes < least) continue;
        change[box[k].first] += (int64_t)box[k].bytes;
        change[box[k].last + 1] -= (int64_t)box[k].bytes;
    }
    *at = 0;
    for (int k = 0; k <= instructions; k++) {
        live = (size_t)((int64_t)live + change[k]);
        if (live > most) { most = live; *at = k; }
    }
    tt__free(ctx, change);
    return most;
}

/* Which bytes are taken when: a binary tree over the instructions (a segment tree: Bentley, "Solutions to
   Klee's rectangle problems", 1977). A node has two lists of spans of bytes: those taken during all of the
   node's instructions, and those taken during some of them. */
typedef struct tt__span {
    size_t from, to;
    int next;       /* the following span in order of bytes; 0: none */
    int far;        /* one that a search has met behind it, if it is still in the list */
    int list;       /* that it is in; 0: none */
} tt__span;
typedef struct tt__taken {
    tt_context *ctx;
    tt__span *span; int n_span, cap_span;   /* span[0] is "none" */
    int unused;     /* the first of the spans that are in no list */
    int *list;      /* of node k, list[2 k]: taken all the time; list[2 k + 1]: at times */
    int *hint;      /* of each list, the span that it got last */
    int leaves;     /* instructions rounded up to a power of two; node 1 is the root */
    int highest;    /* the last placed of the boxes that reach the height */
} tt__taken;

static bool tt__taken_open(tt_context *ctx, tt__taken *t, int instructions)
{
    memset(t, 0, sizeof *t);
    t->ctx = ctx;
    for (t->leaves = 1; t->leaves < instructions; t->leaves *= 2) {}
    t->list = (int *)tt__alloc(ctx, sizeof *t->list * 8 * (size_t)t->leaves);
    t->hint = t->list + 4 * t->leaves;
    return t->list != NULL;
}

static void tt__taken_close(tt__taken *t)
{
    tt__free(t->ctx, t->span);
    tt__free(t->ctx, t->list);
}

static bool tt__taken_clear(tt__taken *t)
{
    memset(t->list, 0, sizeof *t->list * 8 * (size_t)t->leaves);
    t->n_span = t->unused = 0;
    if (!TT__GROW(t->ctx, t->span, t->n_span, t->cap_span)) return false;
    t->span[0].list = 0;
    t->n_span = 1;
    return true;
}

/* The last span, from `at` on, that ends at or below `limit`, as `at` does. Leaves shorter ways behind. */
static int tt__span_before(tt__taken *t, int at, size_t limit)
{
    for (int two_back = at, back = at;;) {
        const tt__span *s = &t->span[at], *far = &t->span[s->far];
        const bool leads = far->list == s->list && far->from > s->from && far->to <= limit;
        const int next = leads ? s->far : s->next;
        if (!next || t->span[next].to > limit) return at;
        t->span[two_back].far = next;
        two_back = back;
        back = at = next;
    }
}

/* Adds bytes [from, to) to a list, where they are joined with the spans that they overlap or touch. */
static bool tt__span_add(tt__taken *t, int list, size_t from, size_t to)
{
    int before = 0, at = t->list[list], hint = t->hint[list];
    if (t->span[hint].list == list && t->span[hint].from <= from) at = hint; /* most are near the last */
    if (at && t->span[at].to < from) {
        before = tt__span_before(t, at, from - 1);
        at = t->span[before].next;
    }
    if (at && t->span[at].from <= to) { /* the first one grows, and those that it reaches then go */
        tt__span *s = &t->span[at];
        t->hint[list] = at;
        if (from < s->from) s->from = from;
        if (to <= s->to) return true;
        s->to = to;
        for (int next; (next = s->next) != 0 && t->span[next].from <= s->to;) {
            if (t->span[next].to > s->to) s->to = t->span[next].to;
            s->next = t->span[next].next;
            t->span[next].next = t->unused;
            t->span[next].list = 0;
            t->unused = next;
        }
        return true;
    }
    int made = t->unused;
    if (made) t->unused = t->span[made].next;
    else if (!TT__GROW(t->ctx, t->span, t->n_span, t->cap_span)) return false;
    else made = t->n_span++;
    t->span[made].from = from;
    t->span[made].to = to;
    t->span[made].next = t->span[made].far = at;
    t->span[made].list = list;
    t->hint[list] = made;
    *(before ? &t->span[before].next : &t->list[list]) = made;
    return true;
}

/* Takes the place of b. `node` stands for instructions [lo, lo + width). */
static bool tt__take(tt__taken *t, const tt__box *b, int node, int lo, int width)
{
    if (b->first >= lo + width || b->last < lo) return true;
    bool always = b->first <= lo && b->last >= lo + width - 1;
    if (!tt__span_add(t, 2 * node + !always, b->place, b->place + b->bytes)) return false;
    return always || (tt__take(t, b, 2 * node, lo, width / 2) &&
                      tt__take(t, b, 2 * node + 1, lo + width / 2, width / 2));
}

/* Appends to `heads` the lists of what is taken at some time in b's life; returns how many there are then: on
   each level one of at most two nodes that b's life is a part of, and two of at most two that are in it. */
enum { TT__TAKEN_LISTS = 6 * 32 };
static int tt__taken_lists(const tt__taken *t, const tt__box *b, int node, int lo, int width, int *heads,
                           int n)
{
    const int at_times = t->list[2 * node + 1];
    if (b->first >= lo + width || b->last < lo) return n;
    bool always = b->first <= lo && b->last >= lo + width - 1;
    if (t->list[2 * node]) heads[n++] = t->list[2 * node];
    if (always && at_times) heads[n++] = at_times;
    if (always || !at_times) return n;
    n = tt__taken_lists(t, b, 2 * node, lo, width / 2, heads, n);
    return tt__taken_lists(t, b, 2 * node + 1, lo + width / 2, width / 2, heads, n);
}

/* The lowest (or the tightest) gap of b's size among what is taken during its life. */
static size_t tt__gap(tt__taken *t, const tt__box *b, bool tightest)
{
    int head[TT__TAKEN_LISTS], n = tt__taken_lists(t, b, 1, 0, t->leaves, head, 0);
    size_t cursor = 0, best = SIZE_MAX, best_gap = SIZE_MAX;
    for (;;) {
        size_t next = SIZE_MAX; /* what is taken first behind the cursor */
        bool moved = false;
        for (int k = 0; k < n;) {
            if (t->span[head[k]].to <= cursor) head[k] = t->span[tt__span_before(t, head[k], cursor)].next;
            const tt__span *s = &t->span[head[k]];
            if (!head[k]) { head[k] = head[--n]; continue; }
            if (s->from <= cursor) { cursor = s->to; moved = true; }
            else if (s->from < next) next = s->from;
            k++;
        }
        if (moved) continue;
        if (next == SIZE_MAX) return best == SIZE_MAX ? cursor : best;
        if (next - cursor >= b->bytes && next - cursor < best_gap) {
            best = cursor;
            best_gap = next - cursor;
            if (!tightest) return best;
        }
        cursor = next;
    }
}

/* Places boxes in the given order, each into the lowest (or the tightest) gap among those alive with it.
   Returns the height; gives up above `limit`; SIZE_MAX: out of memory. */
static size_t tt__place_in_order(tt__box *box, const int *order, int n, bool tightest, size_t limit,
                                 tt__taken *taken)
{
    size_t height = 0;
    if (!tt__taken_clear(taken)) return SIZE_MAX;
    for (int k = 0; k < n; k++) {
        tt__box *b = &box[order[k]];
        b->place = tt__gap(taken, b, tightest);
        if (b->place + b->bytes >= height) {
            height = b->place + b->bytes;
            taken->highest = order[k];
        }
        if (height > limit) return height;
        if (!tt__take(taken, b, 1, 0, taken->leaves)) return SIZE_MAX;
    }
    return height;
}

/* Sort keys: 0 size, 1 size x duration, 2 duration, 3 time, 4 what lives at the peak by duration and then the
   rest by size; larger first, ties by size, then index. */
#define TT__ORDERS 5
static double tt__box_key(const tt__box *b, int kind, int peak)
{
    double duration = b->last - b->first + 1, bytes = (double)b->bytes;
    if (kind == 4) return b->first <= peak && peak <= b->last ? 0x1p50 + duration : bytes;
    return kind == 0 ? bytes : kind == 1 ? bytes * duration : kind == 2 ? duration : -(double)b->first;
}

static bool tt__box_before(const tt__box *box, int a, int b, int kind, int peak)
{
    double x = tt__box_key(&box[a], kind, peak), y = tt__box_key(&box[b], kind, peak);
    if (x != y) return x > y;
    if (box[a].bytes != box[b].bytes) return box[a].bytes > box[b].bytes;
    return a < b;
}

/* Merge sort. */
static void tt__sort_boxes(const tt__box *box, int *order, int *scratch, int n, int kind, int peak)
{
    for (int width = 1; width < n; width *= 2) {
        for (int lo = 0; lo < n; lo += 2 * width) {
            int mid = (int)tt__min(lo + width, n), hi = (int)tt__min(lo + 2 * width, n), a = lo, b = mid;
            for (int k = lo; k < hi; k++) {
                bool left = b >= hi || (a < mid && !tt__box_before(box, order[b], order[a], kind, peak));
                scratch[k] = left ? order[a++] : order[b++];
            }
        }
        memcpy(order, scratch, sizeof *order * (size_t)n);
    }
}

enum { TT__FEW_BOXES = 800, TT__IMPROVE = 200000 };

/* Tries to get below the height of an order: the box that reaches it is placed first instead, again and
   again. Leaves the lowest placement found, and returns its height. */
static size_t tt__improve(tt__box *box, int *order, int *best_order, int n, bool tightest, size_t bound,
                          tt__taken *taken)
{
    size_t best = tt__place_in_order(box, order, n, tightest, SIZE_MAX, taken), height = best;
    bool best_tightest = tightest;
    const int rounds = n < TT__FEW_BOXES && best > bound ? TT__IMPROVE / (n + 1) : 0;
    memcpy(best_order, order, sizeof *order * (size_t)n);
    for (int round = 0; round < rounds && best > bound && height != SIZE_MAX; round++) {
        int top = 0;
        while (order[top] != taken->highest) top++;
        memmove(order + 1, order, sizeof *order * (size_t)top);
        order[0] = taken->highest;
        tightest = !tightest;
        height = tt__place_in_order(box, order, n, tightest, best - 1, taken);
        if (height >= best) continue;
        best = height;
        best_tightest = tightest;
        memcpy(best_order, order, sizeof *order * (size_t)n);
    }
    return rounds ? tt__place_in_order(box, best_order, n, best_tightest, SIZE_MAX, taken) : best;
}

/* Places those of the n boxes that lie in a space (those merged into another take its place). *height: bytes
   needed; *bound: the largest sum of live bytes. Orders of the boxes that matter are tried until one reaches
   it (of many boxes, is within 1/256 of it); boxes below 1/1024 of it then find room between these. */
static tt_status tt__place(tt_context *ctx, tt__box *box, int n, int instructions, tt__space space,
                           size_t *height, size_t *bound, int *peak_at)
{
    int *order = (int *)tt__alloc(ctx, sizeof(int) * (size_t)(n + 1) * 2), large = 0, all = 0, winner = 0, at;
    tt__taken taken;
    bool room = tt__taken_open(ctx, &taken, instructions) && order;
    *bound = tt__max_live(box, n, instructions, space, 0, ctx, peak_at);
    size_t least = n < TT__FEW_BOXES ? 0 : *bound / 1024, best = SIZE_MAX;
    size_t goal = tt__max_live(box, n, instructions, space, least, ctx, &at);
    room = room && *bound != SIZE_MAX && goal != SIZE_MAX;
    for (int k = 0; k < 2 * n && room; k++) { /* the large ones, then the others */
        const tt__box *b = &box[k % n];
        if (b->merged != k % n || b->space != space || !b->bytes || (b->bytes < least) != (k >= n)) continue;
        order[all++] = k % n;
        large += k < n;
    }
    const size_t enough = n < TT__FEW_BOXES ? goal : goal + goal / 256;
    for (int attempt = 0; room && attempt < 2 * TT__ORDERS && best > enough; attempt++) {
        tt__sort_boxes(box, order, order + n, large, attempt / 2, *peak_at);
        size_t h = tt__place_in_order(box, order, large, attempt % 2 == 1, best - 1, &taken);
        room = h != SIZE_MAX;
        if (h >= best) continue;
        best = h;
        winner = attempt;
    }
    *height = SIZE_MAX;
    if (room) {
        tt__sort_boxes(box, order, order + n, large, winner / 2, *peak_at);
        tt__sort_boxes(box, order + large, order + n, all - large, 0, *peak_at);
        *height = tt__improve(box, order, order + n, all, winner % 2 == 1, *bound, &taken);
    }
    for (int k = 0; k < n; k++) {
        int root = k;
        while (box[root].merged != root) root = box[root].merged;
        box[k].place = box[root].place;
    }
    tt__taken_close(&taken);
    tt__free(ctx, order);
    return *height == SIZE_MAX ? TT_ERR_MEMORY : TT_OK;
}

static size_t tt__arena_bytes(const tt_tape *t, const tt__value *v)
{
    return tt__align_to(tt__storage_bytes(v), t->alignment);
}

/* Refuses a tape whose storages, workspaces and `more` are 2^62 bytes or more, so that no sum overflows. */
static tt_status tt__check_total(const tt_tape *t, size_t more)
{
    const size_t most = SIZE_MAX / 4;
    int32_t largest = 0;
    size_t total = more, bytes, of_largest = 0;
    char what[256];
    for (int32_t v = 1; v < t->n_values && total <= most; v++) {
        if (t->values[v].base != v) continue;
        total += bytes = tt__arena_bytes(t, &t->values[v]);
        if (bytes <= of_largest) continue;
        of_largest = bytes;
        largest = v;
    }
    for (int k = 0; k < t->n_code && total <= most; k++)
        total += tt__align_to(t->code[k].workspace, t->alignment);
    if (total <= most) return TT_OK;
    return tt__fail(t->ctx, TT_ERR_SHAPE,
                    "the tensors of the program are together 2^62 bytes or more; the largest is %s",
                    tt__describe(t, largest, what, sizeof what));
}

/* value 0: a workspace. */
static void tt__new_box(const tt_tape *t, tt__box *box, int at, int32_t value, size_t bytes, int first,
                        int last)
{
    const tt__box b = {first, last, tt__align_to(bytes, t->alignment), 0, value, at, t->values[value].space};
    box[at] = b;
}

/* Lifetimes of a tape's transient storages and workspaces. The caller releases *out. Instructions that run
   together need operands from the first to the last; work of other streams until its WAIT reads them. */
static tt_status tt__lifetimes(tt_tape *t, int32_t root, tt__box **out, int *count)
{
    tt_context *ctx = t->ctx;
    const int end = t->n_code > 0 ? t->n_code - 1 : 0;
    tt__box *box = (tt__box *)tt__calloc(ctx, sizeof *box * ((size_t)t->n_values + (size_t)t->n_code));
    int *of = (int *)tt__alloc(ctx, sizeof *of * (size_t)t->n_values); /* box of each base value */
    int n = 0, group = 0, group_end = 0; /* of the instructions that run together */
    *out = box;
    if (!box || !of) { tt__free(ctx, of); tt__free(ctx, box); *out = NULL; return TT_ERR_MEMORY; }
    for (int32_t v = 0; v < t->n_values; v++) of[v] = -1;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        if (k == 0 || !i[-1].with_next) group = group_end = k;
        while (t->code[group_end].with_next) group_end++;
        for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
            int32_t id = j < TT__MAX_IN ? i->in[j] : i->out[j - TT__MAX_IN];
            if (!id) continue;
            int32_t base = t->values[id].base;
            const tt__value *v = &t->values[base];
            if (v->persistent) continue;
            bool given = v->storage == TT__INPUT || base == t->run; /* the host writes it before the run */
            const int first = given ? 0 : group;
            if (of[base] < 0) tt__new_box(t, box, of[base] = n++, base, tt__storage_bytes(v), first, 0);
            box[of[base]].last = v->keep || base == t->values[root].base ? end : group_end;
        }
        if (i->workspace) tt__new_box(t, box, n++, 0, i->workspace, k, k);
    }
    for (int32_t v = 1; v < t->n_values; v++) { /* inputs that no instruction reads, but tt_get may */
        const tt__value *x = &t->values[v];
        bool kept = x->keep || v == t->values[root].base;
        if (x->storage != TT__INPUT || x->base != v || of[v] >= 0 || !kept) continue;
        tt__new_box(t, box, of[v] = n++, v, tt__storage_bytes(x), 0, end);
    }
    /* In place: out[0] begins where in[j] ends. Chains of several links merge into the first. */
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        int32_t y = i->out[0];
        if (!y || (i->add & 1) || t->values[y].base != y || of[y] < 0 || box[of[y]].first != k) continue;
        for (int j = 0; j < 2; j++) {
            int32_t x = i->in[j];
            if (!tt__is(i, j ? TT__INPLACE1 : TT__INPLACE0)) continue;
            if (!x || t->values[x].base != x || of[x] < 0) continue;
            const tt__shape *a = &t->values[x].shape, *b = &t->values[y].shape;
            const tt__box *from = &box[of[x]], *to = &box[of[y]];
            if (from->last != k || from->bytes != to->bytes || from->space != to->space) continue;
            if (a->dtype != b->dtype || a->cols != b->cols) continue;
            bool read_twice = false;
            for (int m = 0; m < TT__MAX_IN; m++) read_twice |= m != j && t->values[i->in[m]].base == x;
            if (read_twice) continue;
            int start = of[x];
            while (box[start].merged != start) start = box[start].merged;
            box[of[y]].merged = start;
            box[start].last = box[of[y]].last;
            of[y] = start; /* later links see the joined lifetime */
            break;
        }
    }
    tt__free(ctx, of);
    *count = n;
    return TT_OK;
}

/* Bytes of b's place are taken during its life. */
static bool tt__overlaps(tt__taken *t, const tt__box *b)
{
    int head[TT__TAKEN_LISTS], n = tt__taken_lists(t, b, 1, 0, t->leaves, head, 0);
    for (int k = 0; k < n; k++) {
        if (t->span[head[k]].to <= b->place) head[k] = t->span[tt__span_before(t, head[k], b->place)].next;
        if (head[k] && t->span[head[k]].from < b->place + b->bytes) return true;
    }
    return false;
}

/* Storages k and j are alive together and overlap. */
static bool tt__collide(const tt__box *box, int k, int j)
{
    const tt__box *a = &box[k], *b = &box[j];
    bool apart = a->last < b->first || b->last < a->first || a->merged != k || a->space != b->space;
    return !apart && a->place < b->place + b->bytes && b->place < a->place + a->bytes;
}

/* No two storages of a space that are alive together overlap, and all lie inside. */
static tt_status tt__verify_places(tt_tape *t, const tt__box *box, int n, tt__space space, size_t height)
{
    tt_status status = TT_OK;
    tt__taken taken;
    if (!t->ctx->options.verify) return TT_OK;
    int end = 1;
    for (int k = 0; k < n; k++) if (box[k].last >= end) end = box[k].last + 1;
    if (!tt__taken_open(t->ctx, &taken, end) || !tt__taken_clear(&taken)) status = TT_ERR_MEMORY;
    for (int k = 0; k < n && status == TT_OK; k++) {
        const tt__box *b = &box[k];
        if (b->space != space) continue;
        if (b->place % t->alignment || b->place > height || b->bytes > height - b->place) {
            status = tt__fail(t->ctx, TT_ERR_INTERNAL, "planner: storage %d of %zu bytes at %zu leaves its "
                              "region of %zu", k, b->bytes, b->place, height);
        } else if (b->merged == k && b->bytes && tt__overlaps(&taken, b)) {
            int other = 0;
            while (!tt__collide(box, other, k)) other++;
            status = tt__fail(t->ctx, TT_ERR_INTERNAL, "planner: storages %d and %d are alive together and "
                              "overlap", k, other);
        } else if (b->merged == k && b->bytes && !tt__take(&taken, b, 1, 0, taken.leaves)) {
            status = TT_ERR_MEMORY;
        }
    }
    tt__taken_close(&taken);
    return status;
}

/* ===========================================================================================================
   CPU                                                                                                >>cpu
   The CPU backend. The kernels between "one pass per instruction set" and its end are compiled once for each
   instruction set (this file includes itself with TT__LANES set); the best one the CPU has is chosen when a
   context opens. Uses base, tape and ops.
   ======================================================================================================== */

/* C = act(A B + bias) + residual, or act'(saved) A B; `accumulate` adds what C was. A(i, k) =
   a[i * a_row + k * a_col] and B(k, j) = b[k * b_row + j * b_col], where one stride of A and one of B is 1.
   Sums are fp32, in an order that does not depend on threads. Matrices without data are absent. */
typedef struct tt__gemm_args {
    int64_t m, n, k;
    tt__mat a, b, c;
    int64_t a_row, a_col, b_row, b_col;
    tt_dtype b_narrow;   /* B is float, and rounded to this when read; TT_F32: it is not             */
    bool accumulate;
    tt__bf16 bf16;       /* how products are computed where A and B are bf16                          */
    int act;
    tt__mat bias;        /* (n)                                                                       */
    tt__mat pre;         /* (m, n): keeps A B + bias, before the act                                  */
    tt__mat residual;    /* (m, n)                                                                    */
    tt__mat saved;       /* (m, n): what act saved                                                    */
    void *workspace;     /* of gemm_workspace bytes, 64-byte aligned                                  */
} tt__gemm_args;

/* What a microkernel computes: C = scale * A B + base, a block whose sums stay in registers. k counts floats
   or, where bf16 is multiplied, units: pairs of it in the place of a float. A(i, k) =
   a[i * a_row + k * a_col], for AMX a[i * a_row + k / 16 * a_col + k % 16]; B's and C's rows lie b_row and
   c_row floats apart. `base` is NULL, C itself, or another block. */
typedef struct tt__product {
    int64_t k;
    const float *a; int64_t a_row, a_col;
    const float *b; int64_t b_row;
    float *c; int64_t c_row;
    const float *base; int64_t base_row;
    float scale;
} tt__product;

/* Attention within each sequence, per head. Shapes: k, v (rows, heads * head_size); q, out (queries, heads *
   head_size); lse f32 (queries, heads). The queries are of all rows or of those that query_row lists, in any
   order. Dropout of the weight of query row i (of the batch) for key j (of its sequence) and head h takes 16
   random bits, number j % 8 of Philox counter {i, j / 8, h, 0}, low half first; kept if >= round(65536 p). */
typedef struct tt__attention_args {
    const int32_t *seq_start; int64_t seqs;
    const int32_t *query_start;  /* (seqs + 1): number of the first query of each sequence               */
    const int32_t *query_row;    /* of a query: its row of the batch; NULL: the query's number            */
    const int32_t *query_at;     /* of a query: its row in q; NULL: the query's number                    */
    int heads; int64_t head_size;
    bool causal; float scale; float dropout; uint64_t dropout_key;
    tt__mat q, k, v, out;
    float *lse;
    tt__mat dout, dq, dk, dv;    /* for backward only                                                     */
    bool add_dq, add_dk, add_dv; /* for backward: += instead of =                                         */
    tt__bf16 bf16;               /* how products of bf16 are computed; other operands are rounded to it   */
    void *workspace;             /* of attention_workspace bytes                                          */
} tt__attention_args;

struct tt__isa_table {
    const char *name;
    /* One thread's fastest multiply-adds, of fp32 and by tt__bf16, or NULL; they return the FLOPs done. */
    double (*peak[3])(int64_t rounds, float *sink);
    tt_status (*run[TT__OP_COUNT])(const tt__launch *l);
};

/* ---- matrix product: what all instruction sets share ---- */

/* Size of equal blocks of n: at most `most`, but for the last a multiple of `multiple`, a divisor of that. */
static int64_t tt__gemm_block(int64_t n, int64_t most, int64_t multiple)
{
    int64_t blocks = tt__max(1, tt__ceil_div(n, most));
    return tt__ceil_div(tt__ceil_div(n, blocks), multiple) * multiple;
}

#ifdef TINYTRAIN_CBLAS
/* Operands and strides that a CBLAS takes. */
static bool tt__cblas_takes(const tt__gemm_args *g)
{
    const int64_t sizes[] = {g->m, g->n, g->k, g->c.ld, g->a_row, g->a_col, g->b_row, g->b_col};
    for (int k = 0; k < TT__COUNT(sizes); k++)
        if (sizes[k] > INT32_MAX) return false;
    return g->a.dtype == TT_F32 && g->b.dtype == TT_F32 && g->b_narrow == TT_F32 && g->k > 0;
}

/* c (rows, c_row) = or += rows [row, row + rows) of A times columns [col, col + cols) of B. */
static void tt__cblas_product(const tt__gemm_args *g, int64_t row, int64_t rows, int64_t col, int64_t cols,
                              float *c, int64_t c_row, bool add)
{
    const float *a = (const float *)g->a.data + row * g->a_row,
                *b = (const float *)g->b.data + col * g->b_col;
    const bool a_lies = g->a_col == 1 && g->a_row >= g->k, b_lies = g->b_col == 1 && g->b_row >= g->n;
    const CBLAS_TRANSPOSE a_as = a_lies ? CblasNoTrans : CblasTrans,
                          b_as = b_lies ? CblasNoTrans : CblasTrans;
    const int a_step = (int)(a_lies ? g->a_row : g->a_col), b_step = (int)(b_lies ? g->b_row : g->b_col);
    cblas_sgemm(CblasRowMajor, a_as, b_as, (int)rows, (int)cols, (int)g->k, 1, a, a_step, b, b_step,
                add ? 1.0f : 0.0f, c, (int)c_row);
}
#endif

/* tt__parallel, unless the whole product is too small to share. */
static void tt__gemm_tasks(tt__pool *pool, const tt__gemm_args *g, int64_t count, tt__task run, void *arg)
{
    if ((double)g->m * (double)g->n * (double)g->k > TT__GEMM_ALONE) tt__parallel(pool, count, run, arg);
    else for (int64_t task = 0; task < count; task++) run(arg, task, 0);
}

/* ------------------------------------------------------------------------ attention, shared by all passes */

/* Numbers the queries, whose rows index (n) has, by sequences, in tt__attention_queries_bytes of memory. */
static void tt__attention_queries(tt__attention_args *a, const int32_t *index, int64_t n, void *memory)
{
    int32_t *start = (int32_t *)memory, *row = start + a->seqs + 1, *at = row + n;
    memset(start, 0, (size_t)(a->seqs + 1) * sizeof *start);
    for (int64_t j = 0; j < n; j++) start[tt__sequence_of(a->seq_start, a->seqs, index[j]) + 1]++;
    for (int64_t s = 0; s < a->seqs; s++) start[s + 1] += start[s];
    /* from behind: start[s + 1] moves down to where it belongs, the start of s + 1 being that of s */
    for (int64_t j = n - 1; j >= 0; j--) {
        int32_t number = --start[tt__sequence_of(a->seq_start, a->seqs, index[j]) + 1];
        row[number] = index[j];
        at[number] = (int32_t)j;
    }
    memmove(start, start + 1, (size_t)a->seqs * sizeof *start);
    start[a->seqs] = (int32_t)n;
    a->query_start = start;
    a->query_row = row;
    a->query_at = at;
}

/* Rows [begin, begin + length) of the batch, and queries [first, first + queries). */
typedef struct tt__attention_sequence {
    int64_t begin, length, first, queries;
    bool diagonal; /* query i is row i of the sequence and sees its keys up to i */
} tt__attention_sequence;

static tt__attention_sequence tt__attention_sequence_at(const tt__attention_args *a, int64_t s)
{
    tt__attention_sequence x = {a->seq_start[s], a->seq_start[s + 1] - a->seq_start[s], a->query_start[s],
                                a->query_start[s + 1] - a->query_start[s], a->causal && !a->query_row};
    return x;
}

static int64_t tt__attention_longest(const tt__attention_args *a) /* rows or queries of a sequence */
{
    int64_t longest = 0;
    for (int64_t s = 0; s < a->seqs; s++) {
        tt__attention_sequence x = tt__attention_sequence_at(a, s);
        longest = tt__max(longest, tt__max(x.length, x.queries));
    }
    return longest;
}

/* Where this thread's buffers are depends on the thread, what is computed in them does not. */
static tt__attention_buffers tt__attention_thread_buffers(const tt__attention_args *a, int64_t longest,
                                                          bool backward, int thread)
{
    tt__attention_buffers b;
    size_t bytes = tt__attention_layout(NULL, longest, a->head_size, backward, &b);
    tt__attention_layout((char *)a->workspace + bytes * (size_t)thread, longest, a->head_size, backward, &b);
    return b;
}

/* Groups of queries are numbered without looking at every sequence: those of sequence s from query_start[s] /
   GROUP + s on, which leaves room for as many as it can have (some numbers have no queries). */
static int64_t tt__attention_first_group(const tt__attention_args *a, int64_t s)
{
    return a->query_start[s] / TT__ATTENTION_GROUP + s;
}

static int64_t tt__attention_group_sequence(const tt__attention_args *a, int64_t group)
{
    int64_t low = 0, high = a->seqs; /* first_group(low) <= group < first_group(high) */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (tt__attention_first_group(a, middle) <= group) low = middle;
        else high = middle;
    }
    return low;
}

/* The size of about equal blocks of n, at most `most`, multiples of 16 but for the last; n, most > 0. */
static int64_t tt__attention_block(int64_t n, int64_t most)
{
    return tt__attention_padded(tt__ceil_div(n, tt__ceil_div(n, most)));
}

static void *tt__attention_row(const tt__mat *m, int64_t row, int64_t column)
{
    return (char *)m->data + (size_t)(row * m->ld + column) * tt_dtype_bytes(m->dtype);
}

/* Rows of a head lie far apart, where a CPU's prefetchers do not look. `next`: asks L2 for what the next head
   has of that row, which most likely is this thread's next task. */
static inline void tt__attention_prefetch(const tt__mat *m, int64_t row, int64_t column, int64_t d,
                                          const bool next)
{
    const char *p = (const char *)tt__attention_row(m, row, column + (next ? d : 0));
    for (const char *end = p + (size_t)d * tt_dtype_bytes(m->dtype); p < end; p += 64) {
        if (next) __builtin_prefetch(p, 0, 2);
        else __builtin_prefetch(p);
    }
}

#define TT__STR(x) #x
#define TT__XSTR(x) TT__STR(x)

typedef void (*tt__rows_fn)(const tt__launch *l, int64_t from, int64_t to, float *scratch);
typedef struct tt__rows_job {
    const tt__launch *l;
    tt__rows_fn fn;
    int64_t rows, chunk;
    size_t skip, stride;
} tt__rows_job;

static float *tt__workspace_at(const tt__launch *l, size_t bytes)
{
    return (float *)(void *)((char *)l->workspace + bytes);
}

static void tt__rows_task(void *arg, int64_t task, int thread)
{
    const tt__rows_job *job = (const tt__rows_job *)arg;
    float *scratch = tt__workspace_at(job->l, job->skip + job->stride * (size_t)thread);
    job->fn(job->l, task * job->chunk, tt__min((task + 1) * job->chunk, job->rows), scratch);
}

static const tt__cpu *tt__cpu_of(const tt__launch *l) { return (const tt__cpu *)(const void *)l->device; }

/* Calls fn for `rows` rows of `cols` columns, `chunk` at a time; the workspace's first `skip` bytes stay. */
static tt_status tt__for_chunks(const tt__launch *l, int64_t rows, int64_t cols, int64_t chunk, size_t skip,
                                tt__rows_fn fn)
{
    tt__rows_job job = {l, fn, rows, chunk, skip, TT__ROW_BUFFERS * tt__row_bytes(cols)};
    tt__parallel(tt__cpu_of(l)->pool, tt__ceil_div(rows, chunk), tt__rows_task, &job);
    return TT_OK;
}

/* Calls fn for the rows of m, in chunks of about 8192 elements. */
static tt_status tt__for_rows(const tt__launch *l, const tt__mat *m, size_t skip, tt__rows_fn fn)
{
    return tt__for_chunks(l, m->rows, m->cols, tt__max(1, 8192 / m->cols), skip, fn);
}

static int64_t tt__elements(const tt__mat *m) { return m->rows * m->cols; }
static void *tt__at(const tt__mat *m, int64_t r)
{
    return (char *)m->data + (size_t)(r * m->ld) * tt_dtype_bytes(m->dtype);
}

static tt__mat tt__rows_of(const tt__mat *m, int64_t first, int64_t n)
{
    tt__mat part = *m;
    part.data = tt__at(m, first);
    part.rows = n;
    return part;
}

static uint64_t tt__dropout_key(const tt__launch *l)
{
    const tt__run *run = TT__RUN_OF(l);
    return !run ? 0 : tt__stream_key(run->seed, TT__RANDOM_DROPOUT, (uint64_t)run->step,
                                     (uint64_t)run->micro << 32 | l->instr->random);
}

/* The key's words in the ten rounds of Philox, two a round. */
static void tt__philox_keys(uint64_t key, uint64_t keys[20])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        keys[2 * round] = k0;
        keys[2 * round + 1] = k1;
    }
}

/* ---- one pass per instruction set ----

   They are most of a compiler's work. A build of many programs, as the Makefile's of the tests, does it once:
   an object compiled with TT__KERNELS_ONLY has the passes' tables and ends here; programs compiled with
   TT__KERNELS_ELSEWHERE only declare the tables. The object has the public functions above, too: the linker
   is told to take the first definition, which is the program's own. */

#define TT__LANES 4
#define TT__ISA portable
#define TT__TARGET
#include TINYTRAIN_FILENAME
#undef TT__LANES

#if defined(__x86_64__) && !defined(TINYTRAIN_NO_AVX2)
#define TT__HAS_AVX2
#include <cpuid.h>
#include <immintrin.h>
#define TT__LANES 8
#define TT__ISA avx2
#define TT__TARGET __attribute__((target("avx2,fma,f16c")))
#define TT__WIDEN_F16(p) (tt__vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define TT__NARROW_F16(p, x) \
    _mm_storeu_si128((__m128i *)(void *)(p), _mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT))
#include TINYTRAIN_FILENAME
#undef TT__LANES

#ifndef TINYTRAIN_NO_AVX512
#define TT__HAS_AVX512
#define TT__LANES 16
#define TT__ISA avx512
#ifndef TT__AVX512_TARGET /* tests/emulate_avx512.h runs these kernels where the CPU has none of it */
#define TT__AVX512_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
#define TT__WIDEN_F16(p) \
    (tt__vf)_mm512_maskz_cvtph_ps((__mmask16)-1, _mm256_loadu_si256((const __m256i *)(const void *)(p)))
#define TT__NARROW_F16(p, x) \
    _mm256_storeu_si256((__m256i *)(void *)(p), \
                        _mm512_maskz_cvtps_ph((__mmask16)-1, (__m512)(x), _MM_FROUND_TO_NEAREST_INT))
#define TT__AVX512_HERE \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && \
     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#endif
#define TT__TARGET __attribute__((target(TT__AVX512_TARGET)))
#if defined(__clang__) || __GNUC__ >= 10
#ifndef TT__AVX512_DOT
#define TT__AVX512_DOT(sum, a, b) (tt__vf)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b))
#define TT__AVX512_DOT_TARGET __attribute__((target(TT__AVX512_TARGET ",avx512bf16")))
#define TT__AVX512_DOT_HERE __builtin_cpu_supports("avx512bf16")
#endif
#define TT__DOT TT__AVX512_DOT
#define TT__DOT_TARGET TT__AVX512_DOT_TARGET
#define TT__DOT_DEPTH 2
#endif
#if defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define TT__TILES
#ifndef TT__TILES_TARGET
#define TT__TILES_TARGET __attribute__((target(TT__AVX512_TARGET ",avx512bf16,amx-tile,amx-bf16")))
#define TT__TILES_HERE tt__tiles_here()
/* gcc 12's intrinsics do not say that they read and write memory, nor which. KEEP: all that p points to. */
#define TT__TILES_FENCE __asm__ volatile("" ::: "memory")
#define TT__TILES_KEEP(p) __asm__ volatile("" : : "r"(p) : "memory")
/* AMX with bf16 (CPUID leaf 7: bits 24 and 22 of EDX), and the kernel lets this process have its registers,
   which it must ask for: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA (Linux,
   Documentation/arch/x86/xstate.rst). */
static bool tt__tiles_here(void)
{
    unsigned a, b, c, d = 0;
    return __builtin_cpu_supports("avx512bf16") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) &&
           (d >> 22 & 1) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif
#endif
#include TINYTRAIN_FILENAME
#undef TT__LANES
#endif
#endif

#ifdef __aarch64__ /* NEON is part of it */
#define TT__HAS_NEON
#include <arm_neon.h>
#define TT__LANES 4
#define TT__NEON
#define TT__ISA neon
#define TT__TARGET
#define TT__WIDEN_F16(p) (tt__vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define TT__NARROW_F16(p, x) vst1_u16((p), vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(x))))
#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 10)
#include <sys/auxv.h>
/* HWCAP2_BF16, which old headers do not name */
#define TT__NEON_DOT_HERE ((getauxval(AT_HWCAP2) >> 14 & 1) != 0)
#ifdef __clang__
#define TT__DOT_TARGET __attribute__((target("bf16")))
#else
#define TT__DOT_TARGET __attribute__((target("+bf16")))
#endif
/* BFMMLA, not BFDOT: it multiplies 2 rows of 4 elements by 2 columns, 16 products where BFDOT has 8 and a
   fused multiply-add of fp32 has 4, and Neoverse V1 and N2 begin as many of either in a cycle (Arm's software
   optimization guides, as LLVM's AArch64SchedNeoverseV1.td and N2.td have them). For that, panels are
   regrouped after packing. It is two BFDOTs one after the other, so an element of C does not depend on its
   neighbours; products and sums are rounded to odd, subnormals are 0 (Arm ARM, BFMMLA with FPCR.EBF = 0). As
   assembly, because gcc 12 inlines the intrinsic only into functions for armv8.2-a or more, into which the
   kernels' building blocks, compiled for what the user asks for, then may not be inlined. */
TT__DOT_TARGET static inline __attribute__((always_inline))
float32x4_t tt__bfmmla(float32x4_t sum, float32x4_t rows, float32x4_t columns)
{
    __asm__("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(rows), "w"(columns));
    return sum;
}
#define TT__DOT(sum, rows, columns) \
    (tt__vf)tt__bfmmla((float32x4_t)(sum), (float32x4_t)(rows), (float32x4_t)(columns))
#define TT__DOT_DEPTH 4
#endif
#include TINYTRAIN_FILENAME
#undef TT__LANES
#endif

#endif /* TT__IMPLEMENT */

#ifdef TT__LANES

/* ------------------------------------------------------------------------------------------------- vectors
   A vector is TT__LANES floats, written with the vector extensions of gcc and clang, so that one text serves
   every instruction set; only what those extensions cannot say, or say slowly (fused multiply-add, max,
   square root, transposes, some loads) is spelled out for each. Names end in the instruction set through
   TT__K(). */

#define TT__JOIN2(name, isa) tt__##name##_##isa
#define TT__JOIN(name, isa) TT__JOIN2(name, isa)
#define TT__K(name) TT__JOIN(name, TT__ISA)
#define TT__ALWAYS __attribute__((always_inline))
#define TT__FN static TT__TARGET                                /* a kernel of this instruction set */
#define TT__INLINE static inline TT__TARGET TT__ALWAYS          /* its building blocks              */
#define TT__OUTLINE static TT__TARGET __attribute__((noinline)) /* what its kernels share           */
/* The same with dot products, and with tiles. */
#define TT__DOT_FN static TT__DOT_TARGET __attribute__((noinline))
#define TT__DOT_INLINE static inline TT__DOT_TARGET TT__ALWAYS
#define TT__TILES_FN static TT__TILES_TARGET __attribute__((noinline))

#if defined(TT__KERNELS_ONLY) || defined(TT__KERNELS_ELSEWHERE)
#define TT__TABLE
extern const tt__isa_table TT__K(isa_table);
#else
#define TT__TABLE static
#endif
#ifndef TT__KERNELS_ELSEWHERE

#ifndef TT__UNROLL
#define TT__PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TT__UNROLL(n) TT__PRAGMA(clang loop unroll(full)) /* clang 14 ignores GCC unroll */
#define TT__UNROLL_BY(n) TT__PRAGMA(clang loop unroll_count(n))
#else
#define TT__UNROLL(n) TT__PRAGMA(GCC unroll n)
#define TT__UNROLL_BY(n) TT__PRAGMA(GCC unroll n) /* of a loop of any length */
#endif
/* A loop over i in [0, n) that is unrolled; n, at most 24, is known to the compiler. */
#define TT__EACH(i, n) TT__UNROLL(24) for (int i = 0; i < (n); i++)
#endif

#ifndef TT__SHUFFLE /* of two vectors of four floats */
#if defined(__clang__) || __GNUC__ >= 12
#define TT__SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t tt__quad_index __attribute__((vector_size(16)));
static inline tt__quad_index tt__quad_order(int32_t i, int32_t j, int32_t k, int32_t l)
{
    tt__quad_index order = {i, j, k, l};
    return order;
}
#define TT__SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, tt__quad_order(i, j, k, l))
#endif
#endif

typedef float TT__K(vf) __attribute__((vector_size(4 * TT__LANES)));
typedef int32_t TT__K(vi) __attribute__((vector_size(4 * TT__LANES)));
typedef uint32_t TT__K(vu) __attribute__((vector_size(4 * TT__LANES)));
typedef uint16_t TT__K(vh) __attribute__((vector_size(2 * TT__LANES)));
#define tt__vf TT__K(vf)
#define tt__vi TT__K(vi)
#define tt__vu TT__K(vu)

TT__INLINE tt__vf TT__K(zero)(void) { tt__vf v; memset(&v, 0, sizeof v); return v; }
TT__INLINE tt__vf TT__K(splat)(float x) { return x - TT__K(zero)(); }
TT__INLINE tt__vu TT__K(splat_u)(uint32_t x) { tt__vu v; memset(&v, 0, sizeof v); return x - v; }
#ifdef TT__NEON /* gcc moves through two integer registers what memcpy copies */
TT__INLINE tt__vf TT__K(load)(const float *p) { return (tt__vf)vld1q_f32(p); }
TT__INLINE void TT__K(store)(float *p, tt__vf v) { vst1q_f32(p, (float32x4_t)v); }
#else
TT__INLINE tt__vf TT__K(load)(const float *p) { tt__vf v; memcpy(&v, p, sizeof v); return v; }
TT__INLINE void TT__K(store)(float *p, tt__vf v) { memcpy(p, &v, sizeof v); }
#endif

/* The first TT__LANES of n elements; zeros beyond n. Mostly n is at least TT__LANES: less is out of line. */
TT__OUTLINE tt__vf TT__K(load_some)(const float *p, int64_t n)
{
    tt__vf v = TT__K(zero)();
    memcpy(&v, p, (size_t)n * 4);
    return v;
}
TT__OUTLINE void TT__K(store_some)(float *p, tt__vf v, int64_t n) { memcpy(p, &v, (size_t)n * 4); }

TT__INLINE tt__vf TT__K(load_n)(const float *p, int64_t n)
{
    return n >= TT__LANES ? TT__K(load)(p) : TT__K(load_some)(p, n);
}
TT__INLINE void TT__K(store_n)(float *p, tt__vf v, int64_t n)
{
    if (n >= TT__LANES) TT__K(store)(p, v);
    else TT__K(store_some)(p, v, n);
}

#define TT__OF_TWO(name, result) \
    TT__INLINE tt__vf TT__K(name)(tt__vf a, tt__vf b) { return (tt__vf)(result); }
#define TT__OF_THREE(name, result) \
    TT__INLINE tt__vf TT__K(name)(tt__vf a, tt__vf b, tt__vf c) { return (tt__vf)(result); }
#if TT__LANES == 16 /* masked with all ones: g++ 12 warns of its header's plain forms */
TT__OF_THREE(fma, _mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c))
TT__OF_TWO(max, _mm512_maskz_max_ps((__mmask16)-1, (__m512)a, (__m512)b))
TT__OF_TWO(min, _mm512_maskz_min_ps((__mmask16)-1, (__m512)a, (__m512)b))
TT__INLINE tt__vf TT__K(sqrt)(tt__vf a) { return (tt__vf)_mm512_maskz_sqrt_ps((__mmask16)-1, (__m512)a); }
#elif TT__LANES == 8
TT__OF_THREE(fma, _mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c))
TT__OF_TWO(max, _mm256_max_ps((__m256)a, (__m256)b))
TT__OF_TWO(min, _mm256_min_ps((__m256)a, (__m256)b))
TT__INLINE tt__vf TT__K(sqrt)(tt__vf a) { return (tt__vf)_mm256_sqrt_ps((__m256)a); }
#elif defined(TT__NEON) /* maximum and minimum as x86 has them: the second operand for NaN */
TT__OF_THREE(fma, vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b))
TT__OF_TWO(max, vbslq_f32((uint32x4_t)(a > b), (float32x4_t)a, (float32x4_t)b))
TT__OF_TWO(min, vbslq_f32((uint32x4_t)(a < b), (float32x4_t)a, (float32x4_t)b))
TT__INLINE tt__vf TT__K(sqrt)(tt__vf a) { return (tt__vf)vsqrtq_f32((float32x4_t)a); }
#else
TT__OF_THREE(fma, a * b + c)
TT__OF_TWO(max, ((tt__vi)a & (tt__vi)(a > b)) | ((tt__vi)b & ~(tt__vi)(a > b)))
TT__OF_TWO(min, ((tt__vi)a & (tt__vi)(a < b)) | ((tt__vi)b & ~(tt__vi)(a < b)))
TT__INLINE tt__vf TT__K(sqrt)(tt__vf a) { for (int i = 0; i < TT__LANES; i++) a[i] = sqrtf(a[i]); return a; }
#endif

/* Lanes are added pairwise in a fixed order. */
TT__INLINE float TT__K(sum)(tt__vf v)
{
    float lane[TT__LANES];
    memcpy(lane, &v, sizeof lane);
    for (int half = TT__LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

TT__INLINE float TT__K(max_lane)(tt__vf v)
{
    float lane[TT__LANES], m;
    memcpy(lane, &v, sizeof lane);
    m = lane[0];
    for (int i = 1; i < TT__LANES; i++) m = lane[i] > m ? lane[i] : m;
    return m;
}

/* c[0] x^(n - 1) + ... + c[n - 1] */
TT__INLINE tt__vf TT__K(polynomial)(const float *c, const int n, tt__vf x)
{
    tt__vf p = TT__K(splat)(c[0]);
    TT__UNROLL(8)
    for (int i = 1; i < n; i++) p = TT__K(fma)(p, x, TT__K(splat)(c[i]));
    return p;
}

/* e^x, relative error < 2e-7; 0 below -87.3 (where the result would be subnormal), clamped above 88.7; NaN
   in, NaN out. Range reduction and polynomial after Cephes' expf. */
TT__INLINE tt__vf TT__K(exp)(tt__vf x)
{
    static const float c[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                              4.1665795894e-2f, 1.6666665459e-1f, 0.5f};
    const tt__vf magic = TT__K(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    tt__vi zero_result = x < TT__K(splat)(-87.3f), nan = x != x;
    tt__vf y = TT__K(min)(TT__K(max)(x, TT__K(splat)(-87.3f)), TT__K(splat)(88.7f));
    tt__vf shifted = TT__K(fma)(y, TT__K(splat)(1.44269504088896341f), magic), n = shifted - magic;
    tt__vf r = TT__K(fma)(n, TT__K(splat)(-0.693359375f), y);
    r = TT__K(fma)(n, TT__K(splat)(2.12194440e-4f), r);
    tt__vf p = TT__K(fma)(TT__K(polynomial)(c, 6, r), r * r, r + 1.0f);
    /* 2^n in two factors, so that n = 128 does not overflow the exponent field on the way */
    tt__vi e = (tt__vi)shifted - (tt__vi)magic, half = e >> 1;
    p = p * (tt__vf)((half + 127) << 23) * (tt__vf)((e - half + 127) << 23);
    tt__vi bits = ((tt__vi)p & ~zero_result & ~nan) | ((tt__vi)x & nan);
    return (tt__vf)bits;
}

/* 2^x for x <= 127, relative error < 2e-7; 2^-126 for all x below -126. NaN in, NaN out. */
TT__INLINE tt__vf TT__K(exp2)(tt__vf x)
{
    /* minimax in relative error with 2^0 = 1 */
    static const float c[] = {1.559467754e-4f, 1.340664390e-3f, 9.617692975e-3f, 5.550310551e-2f,
                              2.402265278e-1f, 6.931472150e-1f, 1.0f};
    const tt__vf magic = TT__K(splat)(12582912.0f + 127.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = TT__K(max)(TT__K(splat)(-126.0f), x); /* in this order: max() gives its second operand for NaN */
    tt__vf shifted = x + magic, r = x - (shifted - magic);
    /* the low bits of shifted are the exponent, biased */
    return TT__K(polynomial)(c, 7, r) * (tt__vf)((tt__vi)shifted << 23);
}

/* erf(x), absolute error < 2e-7: x P(x^2) / Q(x^2) on [-4, 4], as used by Eigen and XLA. */
TT__INLINE tt__vf TT__K(erf)(tt__vf x)
{
    static const float p[] = {-2.72614225801306e-10f, 2.77068142495902e-08f, -2.10102402082508e-06f,
                              -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f,
                              -1.60960333262415e-02f};
    static const float q[] = {-1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f,
                              -7.37332916720468e-03f, -1.42647390514189e-02f};
    tt__vf y = TT__K(max)(TT__K(min)(x, TT__K(splat)(4.0f)), TT__K(splat)(-4.0f)), z = y * y;
    tt__vf e = y * TT__K(polynomial)(p, 7, z) / TT__K(polynomial)(q, 5, z);
    tt__vi nan = x != x;
    return (tt__vf)(((tt__vi)e & ~nan) | ((tt__vi)x & nan));
}

/* tanh(x), relative error < 5e-7: rational approximation used by Eigen. Exactly 1 or -1 where that is as
   near: 1 - tanh^2 times a large number must be 0 there. */
TT__INLINE tt__vf TT__K(tanh)(tt__vf x)
{
    static const float p[] = {-2.76076847742355e-16f, 2.00018790482477e-13f, -8.60467152213735e-11f,
                              5.12229709037114e-08f, 1.48572235717979e-05f, 6.37261928875436e-04f,
                              4.89352455891786e-03f};
    static const float q[] = {1.19825839466702e-06f, 1.18534705686654e-04f, 2.26843463243900e-03f,
                              4.89352518554385e-03f};
    const tt__vf limit = TT__K(splat)(7.90531110763549805f);
    tt__vf y = TT__K(max)(TT__K(min)(x, limit), -limit), z = y * y;
    tt__vf t = y * TT__K(polynomial)(p, 7, z) / TT__K(polynomial)(q, 4, z);
    tt__vi nan = x != x, far = z >= TT__K(splat)(62.4f);
    tt__vi sign = (tt__vi)TT__K(splat)(-0.0f), one = (tt__vi)TT__K(splat)(1.0f);
    return (tt__vf)(((tt__vi)t & ~nan & ~far) | ((tt__vi)x & nan)
                    | ((((tt__vi)x & sign) | one) & far & ~nan));
}

TT__INLINE tt__vf TT__K(act)(const int kind, tt__vf x) /* kind: tt__act */
{
    switch (kind) {
    case TT__ACT_GELU: return x * 0.5f * (1.0f + TT__K(erf)(x * 0.70710678118654752f));
    case TT__ACT_GELU_TANH: {
        tt__vf t = TT__K(tanh)(0.7978845608028654f * x * (1.0f + 0.044715f * x * x));
        return x * 0.5f * (1.0f + t);
    }
    case TT__ACT_RELU: { tt__vi keep = ~(x < 0.0f); return (tt__vf)((tt__vi)x & keep); } /* NaN stays NaN */
    case TT__ACT_TANH: return TT__K(tanh)(x);
    case TT__ACT_SILU: return x / (1.0f + TT__K(exp)(-x));
    default: return x;
    }
}

/* d act(x) / dx from what the table says is saved: the input x, or the output y for RELU and TANH. */
TT__INLINE tt__vf TT__K(act_derivative)(const int kind, tt__vf s)
{
    switch (kind) {
    case TT__ACT_GELU: {
        tt__vf cdf = 0.5f * (1.0f + TT__K(erf)(s * 0.70710678118654752f));
        return cdf + s * 0.3989422804014327f * TT__K(exp)(s * s * -0.5f);
    }
    case TT__ACT_GELU_TANH: {
        /* no infinity times 0; NaN stays NaN */
        s = TT__K(max)(TT__K(splat)(-100.0f), TT__K(min)(TT__K(splat)(100.0f), s));
        tt__vf t = TT__K(tanh)(0.7978845608028654f * s * (1.0f + 0.044715f * s * s));
        return 0.5f * (1.0f + t) + 0.5f * s * (1.0f - t * t) * 0.7978845608028654f
               * (1.0f + 0.134145f * s * s);
    }
    case TT__ACT_RELU: { tt__vi positive = s > 0.0f; return (tt__vf)(positive & (tt__vi)TT__K(splat)(1.0f)); }
    case TT__ACT_TANH: return 1.0f - s * s;
    case TT__ACT_SILU: {
        tt__vf sig = 1.0f / (1.0f + TT__K(exp)(-s));
        return sig * (1.0f + s * (1.0f - sig));
    }
    default: return TT__K(splat)(1.0f);
    }
}

TT__INLINE void TT__K(act_each)(const int kind, float *y, const float *x, const float *saved, int64_t n)
{
    for (int64_t c = 0; c < n; c += TT__LANES) {
        tt__vf v = TT__K(load_n)(x + c, n - c);
        if (saved) v *= TT__K(act_derivative)(kind, TT__K(load_n)(saved + c, n - c));
        else v = TT__K(act)(kind, v);
        TT__K(store_n)(y + c, v, n - c);
    }
}

/* y = act(x), or, unless `saved` is NULL, x act'(saved). y may be x. */
TT__OUTLINE void TT__K(act_row)(int kind, float *y, const float *x, const float *saved, int64_t n)
{
    switch (kind) {
    case TT__ACT_GELU: TT__K(act_each)(TT__ACT_GELU, y, x, saved, n); break;
    case TT__ACT_GELU_TANH: TT__K(act_each)(TT__ACT_GELU_TANH, y, x, saved, n); break;
    case TT__ACT_RELU: TT__K(act_each)(TT__ACT_RELU, y, x, saved, n); break;
    case TT__ACT_TANH: TT__K(act_each)(TT__ACT_TANH, y, x, saved, n); break;
    case TT__ACT_SILU: TT__K(act_each)(TT__ACT_SILU, y, x, saved, n); break;
    default: TT__K(act_each)(TT__ACT_NONE, y, x, saved, n); break;
    }
}

/* ---- 16-bit floats by the vector ----
   The bits are those of tt__from_bf16 and so on, but of NaNs where f16 is converted by an instruction. */

TT__INLINE tt__vu TT__K(select)(tt__vi mask, tt__vu a, tt__vu b)
{
    return (a & (tt__vu)mask) | (b & ~(tt__vu)mask);
}

#ifdef TT__NEON /* of the conversion below gcc makes one for each lane */
TT__INLINE tt__vu TT__K(load_h)(const uint16_t *p) { return (tt__vu)vmovl_u16(vld1_u16(p)); }
TT__INLINE void TT__K(store_h)(uint16_t *p, tt__vu u) { vst1_u16(p, vmovn_u32((uint32x4_t)u)); }
#else
TT__INLINE tt__vu TT__K(load_h)(const uint16_t *p)
{
#if TT__LANES == 16 /* of the conversion below gcc 12 makes two of half the width */
    return (tt__vu)_mm512_maskz_cvtepu16_epi32((__mmask16)-1,
                                               _mm256_loadu_si256((const __m256i *)(const void *)p));
#else
    TT__K(vh) h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, tt__vu);
#endif
}
TT__INLINE void TT__K(store_h)(uint16_t *p, tt__vu u)
{
    TT__K(vh) h = __builtin_convertvector(u, TT__K(vh));
    memcpy(p, &h, sizeof h);
}
#endif

TT__INLINE tt__vf TT__K(load_16)(const uint16_t *p, tt_dtype dtype)
{
    if (dtype == TT_BF16) return (tt__vf)(TT__K(load_h)(p) << 16);
#ifdef TT__WIDEN_F16
    return TT__WIDEN_F16(p);
#else
    tt__vu u = TT__K(load_h)(p), magnitude = (u & 0x7fff) << 13, sign = (u & 0x8000) << 16;
    /* A subnormal's fraction, put below a leading 2^-14, is freed of it again by the subtraction. */
    tt__vf subnormal = (tt__vf)(magnitude + (113u << 23)) - (tt__vf)TT__K(splat_u)(113u << 23);
    tt__vu normal = magnitude + (112u << 23);
    normal += (tt__vu)(magnitude >= (0x7c00u << 13)) & (112u << 23); /* infinity, NaN */
    return (tt__vf)(sign | TT__K(select)(magnitude < (0x400u << 13), (tt__vu)subnormal, normal));
#endif
}

TT__INLINE void TT__K(store_16)(uint16_t *p, tt__vf x, tt_dtype dtype)
{
    tt__vu u = (tt__vu)x, magnitude = u & 0x7fffffff;
    tt__vi nan = magnitude > 0x7f800000;
    if (dtype == TT_BF16) {
        TT__K(store_h)(p, TT__K(select)(nan, (u >> 16) | 0x40, (u + 0x7fff + ((u >> 16) & 1)) >> 16));
        return;
    }
#ifdef TT__NARROW_F16
    TT__NARROW_F16(p, x);
#else
    tt__vu subnormal = (tt__vu)((tt__vf)magnitude + 0.5f) - 0x3f000000;
    tt__vu r = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    r = TT__K(select)(magnitude < 0x38800000, subnormal, r);
    r = TT__K(select)(magnitude >= 0x477ff000, TT__K(splat_u)(0x7c00), r);
    r = TT__K(select)(nan, TT__K(splat_u)(0x7e00), r) | ((u >> 16) & 0x8000);
    TT__K(store_h)(p, r);
#endif
}

/* Stochastic rounding: up with a probability equal to the dropped fraction, by 16 random bits in each lane.
   To the nearest instead what is not finite and, in f16, from 65504 on, where nearest overflows no sooner. */
TT__INLINE void TT__K(round_16)(uint16_t *p, tt__vf x, tt__vu random, tt_dtype dtype)
{
    tt__vu u = (tt__vu)x, magnitude = u & 0x7fffffff;
    tt__vi nan = magnitude > 0x7f800000;
    if (dtype == TT_BF16) {
        TT__K(store_h)(p, TT__K(select)(magnitude >= 0x7f800000, (u >> 16) | ((tt__vu)nan & 0x40),
                                        (u + random) >> 16));
        return;
    }
    tt__vi subnormal = magnitude < 0x38800000;
    tt__vf units = (tt__vf)(magnitude & (tt__vu)subnormal) * 0x1p24f; /* exact, below 1024 */
    tt__vi whole = __builtin_convertvector(units, tt__vi);
    tt__vf fraction = units - __builtin_convertvector(whole, tt__vf);
    tt__vi up = fraction * 65536.0f + __builtin_convertvector((tt__vi)random, tt__vf) >= 65536.0f;
    tt__vu r = (magnitude - 0x38000000 + (random & 0x1fff)) >> 13;
    r = TT__K(select)(subnormal, (tt__vu)(whole - up), r); /* up: 0 or -1 */
    /* 65504 and more: to the nearest */
    r = TT__K(select)(magnitude >= 0x477fe000, TT__K(splat_u)(0x7bff), r);
    r = TT__K(select)(magnitude >= 0x477ff000, TT__K(splat_u)(0x7c00), r);
    TT__K(store_h)(p, TT__K(select)(nan, TT__K(splat_u)(0x7e00), r) | ((u >> 16) & 0x8000));
}

/* The rest of load_as and store_as, out of line because many places have it for few elements. */
TT__OUTLINE tt__vf TT__K(load_rest)(const void *p, tt_dtype dtype, int64_t i, int64_t n)
{
    uint16_t some[TT__LANES] = {0};
    if (dtype == TT_F32) return TT__K(load_some)((const float *)p + i, n);
    if (n >= TT__LANES) return TT__K(load_16)((const uint16_t *)p + i, dtype);
    memcpy(some, (const uint16_t *)p + i, (size_t)n * 2);
    return TT__K(load_16)(some, dtype);
}

TT__OUTLINE void TT__K(store_rest)(void *p, tt_dtype dtype, int64_t i, tt__vf x, int64_t n)
{
    uint16_t some[TT__LANES];
    if (dtype == TT_F32) { TT__K(store_some)((float *)p + i, x, n); return; }
    if (n >= TT__LANES) { TT__K(store_16)((uint16_t *)p + i, x, dtype); return; }
    TT__K(store_16)(some, x, dtype);
    memcpy((uint16_t *)p + i, some, (size_t)n * 2);
}

/* As load_n and store_n, from element i of a float array of any dtype. */
TT__INLINE tt__vf TT__K(load_as)(const void *p, tt_dtype dtype, int64_t i, int64_t n)
{
    if (n >= TT__LANES && dtype == TT_F32) return TT__K(load)((const float *)p + i);
    if (n >= TT__LANES && dtype == TT_BF16) return TT__K(load_16)((const uint16_t *)p + i, TT_BF16);
    return TT__K(load_rest)(p, dtype, i, n);
}

TT__INLINE void TT__K(store_as)(void *p, tt_dtype dtype, int64_t i, tt__vf x, int64_t n)
{
    if (n >= TT__LANES && dtype == TT_F32) TT__K(store)((float *)p + i, x);
    else if (n >= TT__LANES && dtype == TT_BF16) TT__K(store_16)((uint16_t *)p + i, x, TT_BF16);
    else TT__K(store_rest)(p, dtype, i, x, n);
}

/* ---- rows as floats: through these, a kernel of floats reads and writes rows of any float dtype ---- */

/* dtype bf16 or f16 */
TT__OUTLINE void TT__K(row_widen)(float *to, const void *from, tt_dtype dtype, int64_t n)
{
    const uint16_t *h = (const uint16_t *)from;
    int64_t i = 0;
    for (; i + TT__LANES <= n; i += TT__LANES) TT__K(store)(to + i, TT__K(load_16)(h + i, dtype));
    if (i < n) TT__K(store_n)(to + i, TT__K(load_as)(h, dtype, i, n - i), n - i);
}

TT__OUTLINE void TT__K(row_narrow)(void *to, const float *from, tt_dtype dtype, int64_t n)
{
    uint16_t *h = (uint16_t *)to;
    int64_t i = 0;
    for (; i + TT__LANES <= n; i += TT__LANES) TT__K(store_16)(h + i, TT__K(load)(from + i), dtype);
    if (i < n) TT__K(store_as)(h, dtype, i, TT__K(load_n)(from + i, n - i), n - i);
}

/* y = a x + b z over a row; z may be NULL. */
TT__INLINE void TT__K(axpby)(float *y, float a, const float *x, float b, const float *z, int64_t n)
{
    for (int64_t c = 0; c < n; c += TT__LANES) {
        tt__vf v = TT__K(load_n)(x + c, n - c) * a;
        if (z) v += TT__K(load_n)(z + c, n - c) * b;
        TT__K(store_n)(y + c, v, n - c);
    }
}

/* ------------------------------------------------------------------------------------------- matrix product
   One driver for every transposition and dtype: blocks of A and B are packed into panels, [k][MR] and
   [k][NR], of fp32 or pairs of bf16, so that the microkernel reads both in sequence (for AMX, A by tiles or
   where it lies); tiles of C are then handed out. An element of C is computed by one task, its sum over k in
   blocks that depend on k alone, so neither tiles nor threads change a bit. */

/* The heights in rows and widths in vectors of the microkernels for panels and for attention's blocks: their
   accumulators, one row of B and a broadcast fill the 32 (AVX-512, NEON) or 16 registers. AVX-512: 8 x 48
   loads less often than 12 x 32 does and is 7% faster on Granite Rapids. */
#if TT__LANES == 16
#define TT__GEMM_MR 8
#define TT__GEMM_NV 3
#define TT__ATTENTION_MR 6
#define TT__ATTENTION_NV 4
#elif defined(TT__NEON)
#define TT__GEMM_MR 12
#define TT__GEMM_NV 2
#define TT__ATTENTION_MR 8
#define TT__ATTENTION_NV 2
#else
#define TT__GEMM_MR (TT__LANES == 8 ? 6 : 4)
#define TT__GEMM_NV 2
#define TT__ATTENTION_MR 6
#define TT__ATTENTION_NV 2
#endif
#define TT__GEMM_NR (TT__GEMM_NV * TT__LANES)
#define TT__GEMM_WIDEST (TT__GEMM_MR > TT__GEMM_NR ? TT__GEMM_MR : TT__GEMM_NR) /* panel */
#define TT__GEMM_TILES 32 /* rows and columns of C that four tiles hold */

/* Reads n numbers from element `at` on, rounding floats to `narrow` unless that is TT_F32. */
TT__FN void TT__K(gemm_read)(float *to, const void *from, tt_dtype dtype, tt_dtype narrow, int64_t at,
                             int64_t n)
{
    uint16_t half[64];
    if (dtype != TT_F32) {
        TT__K(row_widen)(to, (const uint16_t *)from + at, dtype, n);
    } else if (narrow == TT_F32) {
        memcpy(to, (const float *)from + at, (size_t)n * 4);
    } else for (int64_t c = 0, some; c < n; c += some) {
        some = tt__min(TT__COUNT(half), n - c);
        TT__K(row_narrow)(half, (const float *)from + at + c, narrow, some);
        TT__K(row_widen)(to + c, half, narrow, some);
    }
}

/* Pairs of bf16, the lower k in the low half, in the place of a row of floats; odd may be NULL, for zeros. */
TT__FN void TT__K(gemm_interleave)(float *to, const uint16_t *even, const uint16_t *odd, int64_t n)
{
    int64_t i = 0;
    for (; i + TT__LANES <= n && odd; i += TT__LANES) {
        tt__vu pair = TT__K(load_h)(even + i) | TT__K(load_h)(odd + i) << 16;
        memcpy(to + i, &pair, sizeof pair);
    }
    for (; i < n; i++) {
        uint32_t pair = even[i] | (uint32_t)(odd ? odd[i] : 0) << 16;
        memcpy(to + i, &pair, sizeof pair);
    }
}

/* ---- packing ---- */

/* LOW, HIGH: the first, last two of each four lanes of a and b, alternating; FIRST, LAST: a's, then b's. */
#if TT__LANES == 16 /* masked with all ones, as max */
#define TT__LOW(a, b) (tt__vf)_mm512_maskz_unpacklo_ps(0xffff, (__m512)(a), (__m512)(b))
#define TT__HIGH(a, b) (tt__vf)_mm512_maskz_unpackhi_ps(0xffff, (__m512)(a), (__m512)(b))
#define TT__FIRST(a, b) (tt__vf)_mm512_maskz_shuffle_ps(0xffff, (__m512)(a), (__m512)(b), 0x44)
#define TT__LAST(a, b) (tt__vf)_mm512_maskz_shuffle_ps(0xffff, (__m512)(a), (__m512)(b), 0xee)
#define TT__QUARTERS(a, b, which) (tt__vf)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)(a), (__m512)(b), which)
#elif TT__LANES == 8
#define TT__LOW(a, b) (tt__vf)_mm256_unpacklo_ps((__m256)(a), (__m256)(b))
#define TT__HIGH(a, b) (tt__vf)_mm256_unpackhi_ps((__m256)(a), (__m256)(b))
#define TT__FIRST(a, b) (tt__vf)_mm256_shuffle_ps((__m256)(a), (__m256)(b), 0x44)
#define TT__LAST(a, b) (tt__vf)_mm256_shuffle_ps((__m256)(a), (__m256)(b), 0xee)
#define TT__HALVES(a, b, which) (tt__vf)_mm256_permute2f128_ps((__m256)(a), (__m256)(b), which)
#else
#define TT__LOW(a, b) TT__SHUFFLE(a, b, 0, 4, 1, 5)
#define TT__HIGH(a, b) TT__SHUFFLE(a, b, 2, 6, 3, 7)
#define TT__FIRST(a, b) TT__SHUFFLE(a, b, 0, 1, 4, 5)
#define TT__LAST(a, b) TT__SHUFFLE(a, b, 2, 3, 6, 7)
#endif

/* In each four lanes, lane j of vector i becomes lane i of vector j. */
TT__INLINE void TT__K(transpose_quads)(tt__vf r[4])
{
    tt__vf a = TT__LOW(r[0], r[1]), b = TT__HIGH(r[0], r[1]), c = TT__LOW(r[2], r[3]),
           d = TT__HIGH(r[2], r[3]);
    r[0] = TT__FIRST(a, c);
    r[1] = TT__LAST(a, c);
    r[2] = TT__FIRST(b, d);
    r[3] = TT__LAST(b, d);
}

/* Lane j of vector i becomes lane i of vector j. */
TT__INLINE void TT__K(transpose)(tt__vf r[TT__LANES])
{
    TT__UNROLL(4)
    for (int i = 0; i < TT__LANES; i += 4) TT__K(transpose_quads)(r + i);
#if TT__LANES == 16
    tt__vf t[16];
    TT__EACH(i, 4) {
        t[i] = TT__QUARTERS(r[i], r[4 + i], 0x88);
        t[4 + i] = TT__QUARTERS(r[i], r[4 + i], 0xdd);
        t[8 + i] = TT__QUARTERS(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = TT__QUARTERS(r[8 + i], r[12 + i], 0xdd);
    }
    TT__EACH(i, 4) {
        r[i] = TT__QUARTERS(t[i], t[8 + i], 0x88);
        r[8 + i] = TT__QUARTERS(t[i], t[8 + i], 0xdd);
        r[4 + i] = TT__QUARTERS(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = TT__QUARTERS(t[4 + i], t[12 + i], 0xdd);
    }
#elif TT__LANES == 8
    TT__EACH(i, 4) {
        tt__vf a = r[i], b = r[4 + i];
        r[i] = TT__HALVES(a, b, 0x20);
        r[4 + i] = TT__HALVES(a, b, 0x31);
    }
#endif
}
#undef TT__LOW
#undef TT__HIGH
#undef TT__FIRST
#undef TT__LAST
#undef TT__QUARTERS
#undef TT__HALVES

/* One operand seen as lines (rows of A, columns of B) of k elements: element (line, k) is at line * line_step
   + k * k_step. Panels hold units, which k counts: floats or, for dot products and tiles, pairs of bf16. */
typedef struct TT__K(gemm_operand) {
    const void *data;
    tt_dtype dtype, narrow; /* narrow: see gemm_args.b_narrow */
    bool pairs;
    int64_t lines, line_step, k_step, elements; /* elements: of a line */
} TT__K(gemm_operand);

/* n units of a line from unit k on; for k_step 1. */
TT__INLINE void TT__K(gemm_line)(float *to, const TT__K(gemm_operand) *x, int64_t line, int64_t k, int64_t n)
{
    if (!x->pairs) { TT__K(gemm_read)(to, x->data, x->dtype, x->narrow, line * x->line_step + k, n); return; }
    int64_t present = tt__min(2 * n, x->elements - 2 * k);
    if (present < 2 * n) memset(to + present / 2, 0, (size_t)(n - present / 2) * sizeof *to);
    if (x->dtype == TT_F32)
        TT__K(row_narrow)(to, (const float *)x->data + line * x->line_step + 2 * k, x->narrow, present);
    else memcpy(to, (const uint16_t *)x->data + line * x->line_step + 2 * k, (size_t)present * 2);
}

#define TT__GEMM_CHUNK 32    /* units of a line widened or transposed at a time                          */
#define TT__GEMM_STRAIGHT 96 /* lines copied at a time, where those of one k lie side by side: whole panels */

/* Unit k of n lines, at most STRAIGHT; for line_step 1. */
TT__INLINE void TT__K(gemm_column)(float *to, const TT__K(gemm_operand) *x, int64_t line, int64_t k,
                                   int64_t n)
{
    uint16_t half[2][TT__GEMM_STRAIGHT];
    int64_t at = 2 * k * x->k_step + line;
    bool odd = 2 * k + 1 < x->elements;
    if (!x->pairs) { TT__K(gemm_read)(to, x->data, x->dtype, x->narrow, k * x->k_step + line, n); return; }
    if (2 * k >= x->elements) { memset(to, 0, (size_t)n * sizeof *to); return; }
    if (x->dtype == TT_F32) {
        for (int r = 0; r <= odd; r++)
            TT__K(row_narrow)(half[r], (const float *)x->data + at + r * x->k_step, x->narrow, n);
        TT__K(gemm_interleave)(to, half[0], odd ? half[1] : NULL, n);
    } else {
        const uint16_t *even = (const uint16_t *)x->data + at;
        TT__K(gemm_interleave)(to, even, odd ? even + x->k_step : NULL, n);
    }
}

/* Packs `lines` lines from `line`, k units from k0, as panels [k][width] that begin `panel` floats from each
   other; what the last panel lacks is 0. A vector that is several panels wide serves as many times the k. */
TT__INLINE void TT__K(gemm_pack_transposed)(float *to, int64_t panel, const int width,
                                            const TT__K(gemm_operand) *x, int64_t line, int64_t lines,
                                            int64_t k0, int64_t k)
{
    enum { L = TT__LANES };
    const int parts = width < L && L % width == 0 ? L / width : 1;
    float copy[TT__GEMM_WIDEST * TT__GEMM_CHUNK]; /* of lines that are not whole or not float */
    for (int64_t done = 0; done < lines; done += width, to += panel) {
        int64_t present = tt__min(width, lines - done);
        for (int64_t kk = 0; kk < k; kk += TT__GEMM_CHUNK) {
            int64_t some = tt__min(TT__GEMM_CHUNK, k - kk), step = x->line_step;
            bool whole = present == width && some == TT__GEMM_CHUNK;
            const float *from = copy;
            if (whole && x->dtype == TT_F32 && x->narrow == TT_F32) {
                from = (const float *)x->data + (line + done) * step + k0 + kk;
            } else if (whole && x->pairs && x->dtype == TT_BF16 && step % 2 == 0
                       && 2 * (k0 + kk + some) <= x->elements) {
                step /= 2;
                from = (const float *)x->data + (line + done) * step + k0 + kk;
            } else {
                if (!whole) memset(copy, 0, sizeof copy);
                step = TT__GEMM_CHUNK;
                for (int64_t i = 0; i < present; i++)
                    TT__K(gemm_line)(copy + i * step, x, line + done + i, k0 + kk, some);
            }
            TT__UNROLL(4)
            for (int first = 0; first < width; first += L) {
                const int used = parts > 1 ? L : width - first < L ? width - first : L;
                for (int64_t t = 0; t < some; t += parts * L) {
                    tt__vf r[L];
                    TT__EACH(i, L)
                        r[i] = i < used ? TT__K(load)(from + (first + i % width) * step + t + i / width * L)
                               : TT__K(zero)();
                    TT__K(transpose)(r);
                    if (t + parts * L <= some) {
                        TT__EACH(i, L) {
                            TT__EACH(part, parts)
                                memcpy(to + (kk + t + part * L + i) * width + first,
                                       (const float *)&r[i] + part * width, (size_t)(used / parts) * 4);
                        }
                    } else {
                        for (int i = 0; i < parts * L && t + i < some; i++)
                            memcpy(to + (kk + t + i) * width + first,
                                   (const float *)&r[i % L] + i / L * width, (size_t)(used / parts) * 4);
                    }
                }
            }
        }
    }
}

/* The same where the lines of one k lie side by side. A panel is narrower than a vector, which then spills
   into the next k's place before that is written (the last k is stored exactly), or whole vectors wide. */
TT__INLINE void TT__K(gemm_pack_straight)(float *to, int64_t panel, const int width,
                                          const TT__K(gemm_operand) *x, int64_t line, int64_t lines,
                                          int64_t k0, int64_t k)
{
    float copy[TT__GEMM_STRAIGHT + TT__LANES];
    memset(copy, 0, sizeof copy);
    for (int64_t kk = 0; kk < k; kk++) {
        for (int64_t strip = 0; strip < lines; strip += TT__GEMM_STRAIGHT) {
            int64_t some = tt__min(TT__GEMM_STRAIGHT, lines - strip);
            /* lines read beyond the last panel's */
            const int spill = (width + TT__LANES - 1) / TT__LANES * TT__LANES - width;
            bool copied = x->dtype != TT_F32 || x->narrow != TT_F32 || some % width
                || line + strip + some + spill > x->lines;
            const float *from = copy;
            float *out = to + strip / width * panel + kk * width;
            if (copied) TT__K(gemm_column)(copy, x, line + strip, k0 + kk, some);
            else from = (const float *)x->data + (k0 + kk) * x->k_step + line + strip;
            if (copied && some % width) memset(copy + some, 0, (size_t)(width - some % width) * sizeof *copy);
            for (int64_t done = 0; done < some; done += width, from += width, out += panel) {
                TT__UNROLL(4)
                for (int first = 0; first < width; first += TT__LANES) {
                    tt__vf v = TT__K(load)(from + first);
                    if (width - first >= TT__LANES || kk < k - 1) TT__K(store)(out + first, v);
                    else TT__K(store_n)(out + first, v, width - first);
                }
            }
        }
    }
}

#if defined(TT__DOT) && TT__DOT_DEPTH == 4
/* Two units of a line side by side: [k / 2][width][2]; k is even. */
TT__INLINE void TT__K(gemm_regroup)(float *panels, int64_t panel, const int width, int64_t lines, int64_t k)
{
    for (float *end = panels + tt__ceil_div(lines, width) * panel; panels < end; panels += panel) {
        for (float *pair = panels; pair < panels + width * k; pair += 2 * width) {
            float32x4x2_t both[TT__GEMM_WIDEST / 4];
            TT__EACH(v, width / 4) {
                both[v].val[0] = vld1q_f32(pair + 4 * v);
                both[v].val[1] = vld1q_f32(pair + width + 4 * v);
            }
            TT__EACH(v, width / 4) vst2q_f32(pair + 8 * v, both[v]);
        }
    }
}
#endif

#ifdef TT__TILES
/* Panels of 32 lines for the rows of tiles, [k / 16][32][16] units; only lines that exist are written. */
TT__FN void TT__K(gemm_pack_tiles)(float *to, const TT__K(gemm_operand) *x, int64_t line, int64_t lines,
                                   int64_t k0, int64_t k)
{
    for (int64_t kk = 0; kk < k; kk += 16) {
        for (int64_t done = 0; done < lines; done += 32) {
            int64_t present = tt__min(32, lines - done);
            float *tile = to + done * k + kk * 32;
            if (x->k_step == 1) {
                for (int64_t i = 0; i < present; i++)
                    TT__K(gemm_line)(tile + i * 16, x, line + done + i, k0 + kk, 16);
                continue;
            }
            tt__vf r[16];
            float units[16][32];
            for (int64_t t = 0; t < 16; t++)
                TT__K(gemm_column)(units[t], x, line + done, k0 + kk + t, present);
            for (int half = 0; half < (present > 16 ? 2 : 1); half++) {
                TT__EACH(t, 16) r[t] = TT__K(load)(units[t] + 16 * half);
                TT__K(transpose)(r);
                TT__EACH(t, 16) TT__K(store)(tile + (16 * half + t) * 16, r[t]);
            }
        }
    }
}
#endif

TT__FN void TT__K(gemm_pack)(float *to, int64_t panel, int width, const TT__K(gemm_operand) *x, int64_t line,
                             int64_t lines, int64_t k0, int64_t k)
{
    const bool straight = x->k_step != 1;
    if (width == TT__GEMM_MR && straight)
        TT__K(gemm_pack_straight)(to, panel, TT__GEMM_MR, x, line, lines, k0, k);
    else if (width == TT__GEMM_MR) TT__K(gemm_pack_transposed)(to, panel, TT__GEMM_MR, x, line, lines, k0, k);
    else if (width == TT__GEMM_NR && straight)
        TT__K(gemm_pack_straight)(to, panel, TT__GEMM_NR, x, line, lines, k0, k);
    else if (width == TT__GEMM_NR) TT__K(gemm_pack_transposed)(to, panel, TT__GEMM_NR, x, line, lines, k0, k);
#ifdef TT__TILES
    else if (straight) TT__K(gemm_pack_straight)(to, panel, TT__GEMM_TILES, x, line, lines, k0, k);
    else TT__K(gemm_pack_transposed)(to, panel, TT__GEMM_TILES, x, line, lines, k0, k);
#endif
#if defined(TT__DOT) && TT__DOT_DEPTH == 4
    if (x->pairs && width == TT__GEMM_MR) TT__K(gemm_regroup)(to, panel, TT__GEMM_MR, lines, k);
    else if (x->pairs) TT__K(gemm_regroup)(to, panel, TT__GEMM_NR, lines, k);
#endif
}

/* ---- computing ---- */

typedef tt__vf TT__K(micro_sums)[12][4]; /* at most; what a microkernel uses of it are registers */

/* A microkernel computes a block of C: constant rows and vectors (nv), so that sums live in registers. */
typedef void (*TT__K(micro_fn))(int64_t rows, int64_t cols, const tt__product *p);

TT__INLINE void TT__K(micro_begin)(const int rows, const int nv, TT__K(micro_sums) sum)
{
    TT__EACH(i, rows)
        TT__EACH(v, nv) sum[i][v] = TT__K(zero)();
}

TT__INLINE void TT__K(micro_end)(const int rows, const int nv, TT__K(micro_sums) sum, const float scale,
                                 const tt__product *p)
{
    const float *base = p->base;
    const int64_t base_row = p->base_row, c_row = p->c_row;
    float *c = p->c;
    TT__EACH(i, rows)
        TT__EACH(v, nv) sum[i][v] *= scale;
    if (base) {
        TT__EACH(i, rows)
            TT__EACH(v, nv) sum[i][v] += TT__K(load)(base + i * base_row + v * TT__LANES);
    }
    TT__EACH(i, rows)
        TT__EACH(v, nv) TT__K(store)(c + i * c_row + v * TT__LANES, sum[i][v]);
}

/* The microkernel of fp32. The strides are arguments, so that a caller can give them as constants. */
TT__INLINE void TT__K(micro)(const int rows, const int nv, int64_t a_row, int64_t a_col, int64_t b_row,
                             const tt__product *p)
{
    TT__K(micro_sums) sum;
    const float *a = p->a, *b = p->b;
    TT__K(micro_begin)(rows, nv, sum);
    /* where two threads share a core, what is short is instructions beside the multiplications */
    TT__UNROLL_BY(4)
    for (int64_t k = p->k; k > 0; k--, a += a_col, b += b_row) {
        tt__vf row[4];
        TT__EACH(v, nv) row[v] = TT__K(load)(b + v * TT__LANES);
#ifdef TT__NEON /* multiplies by a lane: loads of single floats would take most of the registers */
        tt__vf column[12 / TT__LANES];
        const bool lanes = __builtin_constant_p(a_row) && a_row == 1 && rows % TT__LANES == 0;
        const int whole = lanes ? rows / TT__LANES : 0;
        TT__EACH(v, whole) column[v] = TT__K(load)(a + v * TT__LANES);
#endif
        TT__EACH(i, rows) {
#ifdef TT__NEON
            tt__vf x = TT__K(splat)(whole ? column[i / TT__LANES][i % TT__LANES] : a[i * a_row]);
#else
            tt__vf x = TT__K(splat)(a[i * a_row]);
#endif
            TT__EACH(v, nv) sum[i][v] = TT__K(fma)(x, row[v], sum[i][v]);
        }
    }
    TT__K(micro_end)(rows, nv, sum, 1.0f, p);
}

/* For panels of A and B. Of a panel of A it takes all rows, or as many thirds (of 4 or 8 rows: halves) as
   hold `rows`; of a panel of 48 columns all, or 16 if there are no more. */
TT__OUTLINE void TT__K(gemm_micro)(int64_t rows, int64_t cols, const tt__product *p)
{
    enum { MR = TT__GEMM_MR, STEP = MR % 3 ? MR / 2 : MR / 3, THIRDS = STEP * 3 == MR, NV = TT__GEMM_NV };
    if (NV == 3 && cols <= TT__LANES) TT__K(micro)(MR, 1, 1, MR, TT__GEMM_NR, p);
    else if (rows > (THIRDS ? 2 : 1) * STEP) TT__K(micro)(MR, NV, 1, MR, TT__GEMM_NR, p);
    else if (THIRDS && rows > STEP) TT__K(micro)(2 * STEP, NV, 1, MR, TT__GEMM_NR, p);
    else TT__K(micro)(STEP, NV, 1, MR, TT__GEMM_NR, p);
}

/* For attention: any number of rows up to ATTENTION_MR and of vectors up to ATTENTION_NV. */
#define TT__MICRO_ROWS(kernel, nv) \
    switch (rows) { \
    case 1: kernel(1, nv, p->a_row, p->a_col, p->b_row, p); return; \
    case 2: kernel(2, nv, p->a_row, p->a_col, p->b_row, p); return; \
    case 3: kernel(3, nv, p->a_row, p->a_col, p->b_row, p); return; \
    case 4: kernel(4, nv, p->a_row, p->a_col, p->b_row, p); return; \
    case 5: kernel(5, nv, p->a_row, p->a_col, p->b_row, p); return; \
    TT__MICRO_TALL(kernel, nv) \
    default: kernel(TT__ATTENTION_MR, nv, p->a_row, p->a_col, p->b_row, p); return; \
    }
#if TT__ATTENTION_MR == 8
#define TT__MICRO_TALL(kernel, nv) \
    case 6: kernel(6, nv, p->a_row, p->a_col, p->b_row, p); return; \
    case 7: kernel(7, nv, p->a_row, p->a_col, p->b_row, p); return;
#else
#define TT__MICRO_TALL(kernel, nv)
#endif
#define TT__MICRO_ANY(kernel) \
    if (TT__ATTENTION_NV > 2 && cols > 3 * TT__LANES) TT__MICRO_ROWS(kernel, 4) \
    if (TT__ATTENTION_NV > 2 && cols > 2 * TT__LANES) TT__MICRO_ROWS(kernel, 3) \
    if (cols > TT__LANES) TT__MICRO_ROWS(kernel, 2) \
    TT__MICRO_ROWS(kernel, 1)

TT__OUTLINE void TT__K(attention_micro)(int64_t rows, int64_t cols, const tt__product *p)
{
    TT__MICRO_ANY(TT__K(micro))
}

#ifdef TT__DOT
/* The microkernel of pairs of bf16: one instruction multiplies TT__DOT_DEPTH elements of a row and a column.
   Not one text with that of fp32, as functions for different CPUs are not inlined into each other. */
TT__DOT_INLINE void TT__K(dot_micro)(const int rows, const int nv, int64_t a_row, int64_t a_col,
                                     int64_t b_row, const float scale, const tt__product *p)
{
    TT__K(micro_sums) sum;
    const float *a = p->a, *b = p->b;
    TT__K(micro_begin)(rows, nv, sum);
#if TT__DOT_DEPTH == 4
    /* Sums of rows i and i + 1: of columns 4 v and 4 v + 1 in sum[i][v], of the next two in sum[i + 1][v]. */
    for (int64_t k = p->k; k > 0; k -= 2, a += 2 * a_col, b += 2 * b_row) {
        tt__vf columns[4];
        TT__EACH(j, 2 * nv) columns[j] = TT__K(load)(b + 4 * j);
        TT__UNROLL(16)
        for (int i = 0; i < rows; i += 2) {
            tt__vf x = TT__K(load)(a + 2 * i * a_row);
            TT__EACH(j, 2 * nv)
                sum[i + j % 2][j / 2] = TT__DOT(sum[i + j % 2][j / 2], x, columns[j]);
        }
    }
    TT__UNROLL(16)
    for (int i = 0; i < rows; i += 2) {
        TT__EACH(v, nv) {
            tt__vf x = sum[i][v], y = sum[i + 1][v];
            sum[i][v] = TT__SHUFFLE(x, y, 0, 1, 4, 5);
            sum[i + 1][v] = TT__SHUFFLE(x, y, 2, 3, 6, 7);
        }
    }
#else
    TT__UNROLL_BY(4) /* as in micro */
    for (int64_t k = p->k; k > 0; k--, a += a_col, b += b_row) {
        tt__vf row[4];
        TT__EACH(v, nv) row[v] = TT__K(load)(b + v * TT__LANES);
        TT__EACH(i, rows) {
            uint32_t pair;
            memcpy(&pair, a + i * a_row, sizeof pair);
            tt__vf x = (tt__vf)TT__K(splat_u)(pair);
            TT__EACH(v, nv) sum[i][v] = TT__DOT(sum[i][v], x, row[v]);
        }
    }
#endif
    TT__K(micro_end)(rows, nv, sum, scale, p);
}

/* As gemm_micro, of whole panels or halves of those of A. */
TT__DOT_FN void TT__K(gemm_dot_micro)(int64_t rows, int64_t cols, const tt__product *p)
{
    enum { MR = TT__GEMM_MR, NV = TT__GEMM_NV };
    (void)cols;
    if (rows > MR / 2) TT__K(dot_micro)(MR, NV, 1, MR, TT__GEMM_NR, 1.0f, p);
    else TT__K(dot_micro)(MR / 2, NV, 1, MR, TT__GEMM_NR, 1.0f, p);
}

#if TT__LANES == 16
#define TT__ATTENTION_BF16
#define TT__SCALED_DOT(rows, nv, a_row, a_col, b_row, p) \
    TT__K(dot_micro)(rows, nv, a_row, a_col, b_row, p->scale, p)
TT__DOT_FN void TT__K(attention_dot_micro)(int64_t rows, int64_t cols, const tt__product *p)
{
    TT__MICRO_ANY(TT__SCALED_DOT)
}
#endif

TT__DOT_FN double TT__K(peak_dot)(int64_t n, float *sink) /* as peak_loop */
{
    tt__vf sum[12], x = TT__K(splat)(*sink), y = TT__K(splat)(1e-20f);
    TT__EACH(i, 12) sum[i] = TT__K(splat)((float)i);
    for (int64_t round = 0; round < n; round++) {
        TT__EACH(i, 12) sum[i] = TT__DOT(sum[i], x, y);
    }
    TT__UNROLL(12)
    for (int i = 1; i < 12; i++) sum[0] += sum[i];
    *sink = TT__K(sum)(sum[0]);
    return (double)n * 12 * 2 * TT__DOT_DEPTH * TT__LANES;
}
#endif

#ifdef TT__TILES
/* Tiles are eight registers of 16 rows of 64 bytes: 0 to 3 are 32 x 32 of C, 4 and 5 are 32 rows of A, 6 and
   7 are 32 columns of B. Called before a thread's work on them and when `rows` of C (1 to 32) change. */
TT__TILES_FN void TT__K(tiles_begin)(int64_t rows)
{
    struct { uint8_t palette, start_row, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } config;
    const uint8_t upper = (uint8_t)tt__min(16, rows), lower = (uint8_t)(rows > 16 ? rows - 16 : 16);
    const uint8_t of[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int k = 0; k < 8; k++) {
        config.row_bytes[k] = 64;
        config.rows[k] = of[k];
    }
    TT__TILES_KEEP(&config);
    _tile_loadconfig(&config);
    TT__TILES_KEEP(&config);
}

TT__TILES_FN void TT__K(tiles_end)(void) { _tile_release(); }

/* The microkernel of tiles: 32 rows (or what tiles_begin was told) and columns, or, below 17 of them, 16. k
   is a multiple of 16 units; base_row is c_row. */
TT__TILES_FN void TT__K(tiles_micro)(int64_t rows, int64_t cols, const tt__product *p)
{
    const bool below = rows > 16, beside = cols > 16;
    const int64_t a_row = p->a_row * 4, b_row = p->b_row * 4, c_row = p->c_row * 4; /* in bytes */
    const float *a = p->a, *b = p->b, *base = p->base;
    float *c = p->c;
    TT__TILES_FENCE;
    if (base) {
        _tile_loadd(0, base, c_row);
        if (beside) _tile_loadd(1, base + 16, c_row);
        if (below) _tile_loadd(2, base + 16 * p->c_row, c_row);
        if (below && beside) _tile_loadd(3, base + 16 * p->c_row + 16, c_row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = p->k; k > 0; k -= 16, a += p->a_col, b += 16 * p->b_row) {
        _tile_loadd(4, a, a_row);
        _tile_loadd(6, b, b_row);
        _tile_dpbf16ps(0, 4, 6);
        if (beside) {
            _tile_loadd(7, b + 16, b_row);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (below) {
            _tile_loadd(5, a + 16 * p->a_row, a_row);
            _tile_dpbf16ps(2, 5, 6);
            if (beside) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_row);
    if (beside) _tile_stored(1, c + 16, c_row);
    if (below) _tile_stored(2, c + 16 * p->c_row, c_row);
    if (below && beside) _tile_stored(3, c + 16 * p->c_row + 16, c_row);
    TT__TILES_FENCE;
}

TT__TILES_FN double TT__K(peak_tiles)(int64_t n, float *sink) /* as peak_loop */
{
    TT__K(tiles_begin)(32);
    for (int64_t round = 0; round < n; round++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    TT__K(tiles_end)();
    (void)sink; /* the compiler drops no operation on tiles */
    return (double)n * 4 * 2 * 16 * 16 * 32;
}
#else
TT__INLINE void TT__K(tiles_begin)(int64_t rows) { (void)rows; }
TT__INLINE void TT__K(tiles_end)(void) {}
#endif

/* These read, add to sums, or write elements [col, col + n) of a row. Sums are whole vectors. */
TT__INLINE void TT__K(gemm_take)(float *to, const tt__mat *m, int64_t row, int64_t col, int64_t n)
{
    TT__K(gemm_read)(to, m->data, m->dtype, TT_F32, row * m->ld + col, n);
}

TT__INLINE void TT__K(gemm_add)(float *sums, const tt__mat *m, int64_t row, int64_t col, int64_t n)
{
    const int64_t at = row * m->ld + col;
    int64_t j = 0;
    if (m->dtype == TT_F32) {
        const float *x = (const float *)m->data + at;
        for (; j + TT__LANES <= n; j += TT__LANES)
            TT__K(store)(sums + j, TT__K(load)(sums + j) + TT__K(load)(x + j));
    }
    for (; j < n; j += TT__LANES) {
        tt__vf x = TT__K(load_as)(m->data, m->dtype, at + j, n - j);
        TT__K(store)(sums + j, TT__K(load)(sums + j) + x);
    }
}

TT__INLINE void TT__K(gemm_keep)(const tt__mat *m, int64_t row, int64_t col, const float *sums, int64_t n)
{
    const int64_t at = row * m->ld + col;
    if (m->dtype == TT_F32) memcpy((float *)m->data + at, sums, (size_t)n * 4);
    else TT__K(row_narrow)((uint16_t *)m->data + at, sums, m->dtype, n);
}

/* C = act(sums + more sums + bias) + residual + old C for a part of C that begins at (row, col). Changes
   sums, whose rows are whole vectors; rows of `more` lie as those of sums do. Rows of a microkernel's tile
   are short, and lie behind each other: several at a time are rounded and go through act. */
TT__FN void TT__K(gemm_finish)(const tt__gemm_args *g, int64_t row, int64_t col, int64_t rows, int64_t cols,
                               float *sums, float *more, int64_t sums_row)
{
    enum { STRIP = TT__GEMM_TILE_N, TOGETHER = 2 * STRIP };
    const int64_t most = cols == sums_row && cols <= STRIP ? TOGETHER / cols : 1;
    /* act works on what would be kept, so that it can be computed again from that */
    const tt_dtype kept = g->pre.data ? g->pre.dtype : g->c.dtype;
    const bool keeps = g->pre.data && g->act != TT__ACT_NONE;
    uint16_t half[TOGETHER];
    float bias[STRIP], saved[TOGETHER];
    const tt__mat addend = {more, TT_F32, rows, cols, sums_row}, biases = {bias, TT_F32, 1, STRIP, STRIP};
    for (int64_t j = 0; j < cols; j += STRIP) {
        int64_t n = tt__min(STRIP, cols - j), at = col + j;
        if (g->bias.data) TT__K(gemm_take)(bias, &g->bias, 0, at, n);
        for (int64_t i = 0, some; i < rows; i += some) {
            some = tt__min(most, rows - i);
            float *x = sums + i * sums_row + j;
            int64_t r = row + i, whole = tt__ceil_div(some * n, TT__LANES) * TT__LANES;
            for (int64_t t = 0; t < some; t++) {
                if (more) TT__K(gemm_add)(x + t * n, &addend, i + t, j, n);
                if (g->bias.data) TT__K(gemm_add)(x + t * n, &biases, 0, 0, n);
                if (g->saved.data) TT__K(gemm_take)(saved + t * n, &g->saved, r + t, at, n);
                else if (keeps) TT__K(gemm_keep)(&g->pre, r + t, at, x + t * n, n);
            }
            if (g->saved.data) { /* without a bias */
                TT__K(act_row)(g->act, x, x, saved, some * n);
            } else if (g->act != TT__ACT_NONE) {
                if (kept != TT_F32) {
                    TT__K(row_narrow)(half, x, kept, some * n);
                    TT__K(row_widen)(x, half, kept, some * n);
                }
                TT__K(act_row)(g->act, x, x, NULL, whole);
            }
            for (int64_t t = 0; t < some; t++) {
                if (g->residual.data) TT__K(gemm_add)(x + t * n, &g->residual, r + t, at, n);
                if (g->accumulate) TT__K(gemm_add)(x + t * n, &g->c, r + t, at, n);
                TT__K(gemm_keep)(&g->c, r + t, at, x + t * n, n);
            }
        }
    }
}

/* ---- the packed product ---- */

/* The work at hand: rows [row, row + rows), columns [col, col + cols), sums over units [k0, k0 + k). */
typedef struct TT__K(gemm_block) {
    const tt__gemm_args *args;
    TT__K(micro_fn) micro;
    int mr, nr;                           /* lines of the panels of A and B */
    bool tiles, in_place;                 /* by tiles; rows of A where they are */
    bool direct;                          /* sums are kept in C itself, on top of `base`, if that has data */
    tt__mat base;
    TT__K(gemm_operand) a, b;
    /* partial[panel of columns][partial_rows][NR]: the sums over [0, k0) */
    float *a_panels, *b_panels, *partial;
    int64_t row, rows, col, cols, k0, k, partial_rows;
    bool last;                            /* k block */
    int64_t a_tasks, pack_tasks;          /* of packing: for A, and in all: those for B lie between them */
    int64_t tile_rows, tile_cols, tiles_across;
} TT__K(gemm_block);

/* Task `task` of packing an operand: some lines, or, where those of one k lie side by side, some k of all. */
TT__FN void TT__K(gemm_pack_some)(const TT__K(gemm_block) *w, int64_t task, float *to, int width,
                                  const TT__K(gemm_operand) *x, int64_t line, int64_t lines)
{
    int64_t k = 0, first = 0, ks = w->k;
    if (x->k_step != 1) {
        k = task * TT__GEMM_PACK_K;
        ks = tt__min(TT__GEMM_PACK_K, ks - k);
    } else {
        first = task * TT__GEMM_PACK_LINES;
        lines = tt__min(TT__GEMM_PACK_LINES, lines - first);
    }
    TT__K(gemm_pack)(to + first * w->k + k * width, width * w->k, width, x, line + first, lines, w->k0 + k,
                     ks);
}

TT__FN int64_t TT__K(gemm_pack_count)(const TT__K(gemm_block) *w, const TT__K(gemm_operand) *x, int64_t lines)
{
    return x->k_step != 1 ? tt__ceil_div(w->k, TT__GEMM_PACK_K) : tt__ceil_div(lines, TT__GEMM_PACK_LINES);
}

TT__FN void TT__K(gemm_pack_task)(void *arg, int64_t task, int thread)
{
    const TT__K(gemm_block) *w = (const TT__K(gemm_block) *)arg;
    int64_t a = task * w->a_tasks / w->pack_tasks;
    (void)thread;
    if ((task + 1) * w->a_tasks / w->pack_tasks == a) {
        TT__K(gemm_pack_some)(w, task - a, w->b_panels, w->nr, &w->b, w->col, w->cols);
        return;
    }
#ifdef TT__TILES
    if (w->tiles) {
        int64_t line = a * TT__GEMM_PACK_LINES, lines = tt__min(TT__GEMM_PACK_LINES, w->rows - line);
        TT__K(gemm_pack_tiles)(w->a_panels + line * w->k, &w->a, w->row + line, lines, w->k0, w->k);
        return;
    }
#endif
    TT__K(gemm_pack_some)(w, a, w->a_panels, w->mr, &w->a, w->row, w->rows);
}

/* Asks for part of a matrix, unless it is absent, so that it is there when the sums for it are ready. */
TT__INLINE void TT__K(gemm_prefetch)(const tt__mat *m, int64_t row, int64_t col, int64_t rows, int64_t cols)
{
    const int64_t item = (int64_t)tt_dtype_bytes(m->dtype), step = m->ld * item, last = (cols - 1) * item;
    if (!m->data) return;
    const char *p = (const char *)m->data + row * step + col * item;
    for (int64_t i = 0; i < rows; i++, p += step) {
        __builtin_prefetch(p, 1);
        __builtin_prefetch(p + last, 1);
    }
}

/* The microkernel on the panels of row i and column j of the block. */
TT__INLINE void TT__K(gemm_panels)(const TT__K(gemm_block) *w, int64_t i, int64_t j, int64_t rows,
                                   int64_t cols, float *c, int64_t c_row, const float *base, int64_t base_row)
{
    const float *a = w->a_panels + i * w->k, *b = w->b_panels + j * w->k;
    const tt__product p = {w->k, a, 1, TT__GEMM_MR, b, TT__GEMM_NR, c, c_row, base, base_row, 1.0f};
    w->micro(rows, cols, &p);
}

/* A tile that needs no more than sums; at the edge of C, where it is smaller, it is computed in a copy. */
TT__INLINE void TT__K(gemm_direct)(const TT__K(gemm_block) *w, int64_t i, int64_t j, int64_t rows,
                                   int64_t cols)
{
    const tt__mat *to = &w->args->c, *from = w->k0 ? to : &w->base;
    const int64_t row = w->row + i, col = w->col + j;
    float *c = (float *)to->data + row * to->ld + col, copy[TT__GEMM_MR * TT__GEMM_NR];
    const float *base = from->data ? (const float *)from->data + row * from->ld + col : NULL;
    TT__K(gemm_prefetch)(to, row, col, rows, cols);
    if (base != c && from->ld) TT__K(gemm_prefetch)(from, row, col, rows, cols);
    if (rows == TT__GEMM_MR && cols == TT__GEMM_NR) {
        TT__K(gemm_panels)(w, i, j, rows, cols, c, to->ld, base, from->ld);
        return;
    }
    memset(copy, 0, sizeof copy);
    for (int64_t r = 0; r < rows && base; r++)
        memcpy(copy + r * TT__GEMM_NR, base + r * from->ld, (size_t)cols * 4);
    TT__K(gemm_panels)(w, i, j, rows, cols, copy, TT__GEMM_NR, copy, TT__GEMM_NR);
    for (int64_t r = 0; r < rows; r++) memcpy(c + r * to->ld, copy + r * TT__GEMM_NR, (size_t)cols * 4);
}

TT__FN void TT__K(gemm_tile_task)(void *arg, int64_t task, int thread)
{
    const TT__K(gemm_block) *w = (const TT__K(gemm_block) *)arg;
    int64_t row = task / w->tiles_across * w->tile_rows, row_end = tt__min(w->rows, row + w->tile_rows);
    int64_t col = task % w->tiles_across * w->tile_cols, col_end = tt__min(w->cols, col + w->tile_cols);
    const tt__gemm_args *g = w->args;
    float sums[TT__GEMM_MR * TT__GEMM_NR];
    (void)thread;
    for (int64_t j = col; j < col_end; j += TT__GEMM_NR) {
        for (int64_t i = row; i < row_end; i += TT__GEMM_MR) {
            int64_t rows = tt__min(TT__GEMM_MR, row_end - i), cols = tt__min(TT__GEMM_NR, col_end - j);
            float *partial = w->partial + j * w->partial_rows + i * TT__GEMM_NR;
            if (w->direct) {
                TT__K(gemm_direct)(w, i, j, rows, cols);
            } else if (!w->last) {
                const tt__mat tile = {partial, TT_F32, rows, TT__GEMM_NR, TT__GEMM_NR};
                TT__K(gemm_prefetch)(&tile, 0, 0, rows, TT__GEMM_NR);
                TT__K(gemm_panels)(w, i, j, rows, cols, partial, TT__GEMM_NR, w->k0 ? partial : NULL,
                                   TT__GEMM_NR);
            } else {
                TT__K(gemm_prefetch)(&g->c, w->row + i, w->col + j, rows, cols);
                TT__K(gemm_prefetch)(&g->saved, w->row + i, w->col + j, rows, cols);
                TT__K(gemm_prefetch)(&g->residual, w->row + i, w->col + j, rows, cols);
                TT__K(gemm_panels)(w, i, j, rows, cols, sums, TT__GEMM_NR, NULL, 0);
                TT__K(gemm_finish)(g, w->row + i, w->col + j, rows, cols, sums, w->k0 ? partial : NULL,
                                   TT__GEMM_NR);
            }
        }
    }
}

#ifdef TT__TILES
#define TT__TILES_K 192 /* units that are summed at a time, so that the panel of B stays in L1 */

TT__FN void TT__K(gemm_tiles_task)(void *arg, int64_t task, int thread)
{
    const TT__K(gemm_block) *w = (const TT__K(gemm_block) *)arg;
    int64_t row = task / w->tiles_across * w->tile_rows, rows = tt__min(w->tile_rows, w->rows - row);
    int64_t col = task % w->tiles_across * w->tile_cols, cols = tt__min(w->tile_cols, w->cols - col);
    float tile[TT__GEMM_TILE_M * TT__GEMM_TILE_N] __attribute__((aligned(64)));
    float *partial = w->partial + row * tt__ceil_div(w->cols, 32) * 32 + tt__ceil_div(rows, 32) * 32 * col;
    float *to = w->last ? tile : partial;
    int64_t across = tt__ceil_div(cols, 32) * 32, set = 0;
    (void)thread;
    if (!w->k) memset(tile, 0, sizeof tile);
    for (int64_t k = 0; k < w->k; k += TT__TILES_K) {
        const float *from = k ? to : w->k0 ? partial : NULL;
        int64_t depth = tt__min(TT__TILES_K, w->k - k);
        for (int64_t j = 0; j < cols; j += 32) {
            for (int64_t i = 0; i < rows; i += 32) {
                int64_t n = tt__min(32, rows - i), at = i * across + j;
                const float *a = w->a_panels + (row + i) * w->k + k * 32,
                            *b = w->b_panels + (col + j) * w->k + k * 32;
                tt__product p = {depth, a, 16, 512, b, 32, to + at, across, from ? from + at : NULL, across,
                                 1.0f};
                if (w->in_place) {
                    p.a_row = w->a.line_step / 2;
                    p.a_col = 16;
                    p.a = (const float *)w->a.data + (w->row + row + i) * p.a_row + w->k0 + k;
                }
                if (n != set) TT__K(tiles_begin)(set = n);
                TT__K(tiles_micro)(n, 32, &p);
            }
        }
    }
    TT__K(tiles_end)();
    if (w->last) TT__K(gemm_finish)(w->args, w->row + row, w->col + col, rows, cols, tile, NULL, across);
}
#endif

/* Tiles small enough that there are some for every thread, even for few rows. */
TT__FN int64_t TT__K(gemm_tile_count)(TT__K(gemm_block) *w)
{
    int64_t rows = TT__GEMM_TILE_M, cols = TT__GEMM_TILE_N;
    while (tt__ceil_div(w->rows, rows) * tt__ceil_div(w->cols, cols) < 32) {
        if (cols > 16) cols /= 2;
        else if (rows > 12) rows /= 2;
        else break;
    }
    w->tile_rows = tt__gemm_block(w->rows, rows, w->mr);
    w->tile_cols = tt__gemm_block(w->cols, cols, w->nr);
    w->tiles_across = tt__ceil_div(w->cols, w->tile_cols);
    return tt__ceil_div(w->rows, w->tile_rows) * w->tiles_across;
}

TT__FN void TT__K(gemm_packed)(tt__pool *pool, const tt__gemm_args *g)
{
    const bool halves = g->a.dtype == TT_BF16 && (g->b.dtype == TT_BF16 || g->b_narrow == TT_BF16);
    const bool pairs = halves && g->bf16 != TT__BF16_CONVERT;
    const TT__K(gemm_operand) a = {g->a.data, g->a.dtype, TT_F32, pairs, g->m, g->a_row, g->a_col, g->k};
    const TT__K(gemm_operand) b = {g->b.data, g->b.dtype, g->b_narrow, pairs, g->n, g->b_col, g->b_row, g->k};
    TT__K(gemm_block) w;
    memset(&w, 0, sizeof w);
    tt__task tile_task = TT__K(gemm_tile_task);
    int64_t units = g->k;
    w.args = g;
    w.a = a;
    w.b = b;
    w.micro = TT__K(gemm_micro);
    w.mr = TT__GEMM_MR;
    w.nr = TT__GEMM_NR;
#ifdef TT__DOT
    if (pairs && g->bf16 == TT__BF16_DOT) {
        w.micro = TT__K(gemm_dot_micro);
        units = tt__ceil_div(g->k, TT__DOT_DEPTH) * (TT__DOT_DEPTH / 2);
    }
#endif
#ifdef TT__TILES
    if (pairs && g->bf16 == TT__BF16_TILES) {
        w.in_place = g->a_col == 1 && g->k % 32 == 0 && g->a_row % 32 == 0 && (uintptr_t)g->a.data % 64 == 0;
        tile_task = TT__K(gemm_tiles_task);
        w.mr = w.nr = TT__GEMM_TILES;
        w.tiles = true;
        units = tt__ceil_div(g->k, 32) * 16;
    }
#endif
    int64_t rows = tt__gemm_block(g->m, TT__GEMM_M, w.mr), cols = tt__gemm_block(g->n, TT__GEMM_N, w.nr);
    const int addends = (g->bias.data != NULL) + (g->residual.data != NULL) + g->accumulate;
    if (g->bias.data) w.base = g->bias;
    else if (g->residual.data) w.base = g->residual;
    else if (g->accumulate) w.base = g->c;
    if (g->bias.data) w.base.ld = 0; /* the same for every row */
    w.direct = g->c.dtype == TT_F32 && g->act == TT__ACT_NONE && addends <= 1
        && (!w.base.data || w.base.dtype == TT_F32);
    int64_t depth = tt__gemm_block(units, TT__GEMM_K, 16);
    w.a_panels = (float *)g->workspace;
    w.b_panels = w.a_panels + tt__align_up((size_t)(rows * tt__min(depth, units)) * 4) / 4;
    w.partial = w.b_panels + tt__align_up((size_t)(cols * tt__min(depth, units)) * 4) / 4;
    w.partial_rows = rows;
    for (w.col = 0; w.col < g->n; w.col += cols) {
        w.cols = tt__min(cols, g->n - w.col);
        for (w.row = 0; w.row < g->m; w.row += rows) {
            w.rows = tt__min(rows, g->m - w.row);
            int64_t tiles = TT__K(gemm_tile_count)(&w);
            w.k0 = 0;
            do {
                w.k = tt__min(depth, units - w.k0);
                w.last = w.k0 + w.k == units;
                if (!w.tiles) w.a_tasks = TT__K(gemm_pack_count)(&w, &w.a, w.rows);
                else w.a_tasks = w.in_place ? 0 : tt__ceil_div(w.rows, TT__GEMM_PACK_LINES);
                w.pack_tasks = w.a_tasks;
                const bool packed = w.row > 0 && w.k == units; /* B, for the rows before */
                if (!packed) w.pack_tasks += TT__K(gemm_pack_count)(&w, &w.b, w.cols);
                if (w.k && w.pack_tasks) tt__gemm_tasks(pool, g, w.pack_tasks, TT__K(gemm_pack_task), &w);
                tt__gemm_tasks(pool, g, tiles, tile_task, &w);
                w.k0 += w.k;
            } while (w.k0 < units);
        }
    }
}

/* ---- the product with few rows ---- */

#define TT__GEMM_DEPTH 1024 /* k elements of a 16-bit column of B widened at a time */

typedef struct TT__K(gemm_few) {
    const tt__gemm_args *args;
    const float *a; /* A as float */
    int64_t a_row;
} TT__K(gemm_few);

/* sums[i * STRIP + j] += A(i, [0, k)) . b[j]: 4 rows, 2 columns at most, to load less than it multiplies. */
TT__INLINE void TT__K(gemm_dots)(const int rows, const int cols, const float *a, int64_t a_row,
                                 const float *b, int64_t b_col, int64_t k, float *sums)
{
    tt__vf sum[8], x[4], y[2];
    float total[16];
    TT__EACH(i, 8) sum[i] = TT__K(zero)();
    int64_t kk = 0;
    for (; kk + TT__LANES <= k; kk += TT__LANES) {
        TT__EACH(j, cols) y[j] = TT__K(load)(b + j * b_col + kk);
        TT__EACH(i, rows) {
            tt__vf x1 = TT__K(load)(a + i * a_row + kk);
            TT__EACH(j, cols) sum[2 * i + j] = TT__K(fma)(x1, y[j], sum[2 * i + j]);
        }
    }
    if (kk < k) {
        TT__EACH(i, rows) x[i] = TT__K(load_n)(a + i * a_row + kk, k - kk);
        TT__EACH(j, cols) y[j] = TT__K(load_n)(b + j * b_col + kk, k - kk);
        TT__EACH(i, rows)
            TT__EACH(j, cols) sum[2 * i + j] = TT__K(fma)(x[i], y[j], sum[2 * i + j]);
    }
    /* Transposed, the lanes of all sums are added at once. */
    TT__UNROLL(2)
    for (int first = 0; first < 8; first += TT__LANES) {
        tt__vf r[TT__LANES];
        TT__EACH(i, TT__LANES)
            r[i] = first + i < 2 * rows ? sum[(first + i) & 7] : TT__K(zero)();
        TT__K(transpose)(r);
        TT__UNROLL(4)
        for (int half = TT__LANES / 2; half; half /= 2) {
            TT__EACH(i, half) r[i] += r[i + half];
        }
        TT__K(store)(total + first, r[0]);
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) sums[i * TT__GEMM_STRIP + j] += total[2 * i + j];
}

/* Columns of B contiguous: dot products. */
TT__FN void TT__K(gemm_few_dots)(const TT__K(gemm_few) *w, int64_t col, int64_t cols, float *sums)
{
    const tt__gemm_args *g = w->args;
    const bool in_place = g->b.dtype == TT_F32 && g->b_narrow == TT_F32;
    float wide[2 * TT__GEMM_DEPTH];
    for (int64_t j = 0; j < cols; j += 2) {
        int64_t pair = tt__min(2, cols - j);
        for (int64_t k0 = 0, k; k0 < g->k; k0 += k) {
            k = in_place ? g->k : tt__min(TT__GEMM_DEPTH, g->k - k0);
            int64_t at = (col + j) * g->b_col + k0, step = g->b_col;
            const float *b = wide;
            if (in_place) {
                b = (const float *)g->b.data + at;
            } else {
                for (int64_t c = 0; c < pair; c++)
                    TT__K(gemm_read)(wide + c * TT__GEMM_DEPTH, g->b.data, g->b.dtype, g->b_narrow,
                                     at + c * step, k);
                step = TT__GEMM_DEPTH;
            }
            for (int64_t i = 0; i < g->m; i += 4) {
                const float *a = w->a + i * w->a_row + k0;
                float *out = sums + i * TT__GEMM_STRIP + j;
                if (g->m - i >= 4 && pair == 2) {
                    TT__K(gemm_dots)(4, 2, a, w->a_row, b, step, k, out);
                    continue;
                }
                for (int64_t r = 0; r < tt__min(4, g->m - i); r++, a += w->a_row, out += TT__GEMM_STRIP) {
                    if (pair == 2) TT__K(gemm_dots)(1, 2, a, w->a_row, b, step, k, out);
                    else TT__K(gemm_dots)(1, 1, a, w->a_row, b, step, k, out);
                }
            }
        }
    }
}

/* Rows of B contiguous: sums of rows of B, four at a time so that the sums are loaded less often. */
TT__FN void TT__K(gemm_few_rows)(const TT__K(gemm_few) *w, int64_t col, int64_t cols, float *sums)
{
    const tt__gemm_args *g = w->args;
    float wide[4 * TT__GEMM_STRIP];
    memset(wide, 0, sizeof wide);
    for (int64_t k0 = 0; k0 < g->k; k0 += 4) {
        int64_t k = tt__min(4, g->k - k0), at = k0 * g->b_row + col, step = g->b_row;
        const float *b = wide;
        if (g->b.dtype == TT_F32 && g->b_narrow == TT_F32 && k == 4 && cols == TT__GEMM_STRIP) {
            b = (const float *)g->b.data + at;
        } else {
            if (k < 4) memset(wide, 0, sizeof wide);
            for (int64_t r = 0; r < k; r++)
                TT__K(gemm_read)(wide + r * TT__GEMM_STRIP, g->b.data, g->b.dtype, g->b_narrow, at + r * step,
                                 cols);
            step = TT__GEMM_STRIP;
        }
        for (int64_t i = 0; i < g->m; i++) {
            const float *a = w->a + i * w->a_row + k0;
            tt__vf x[4];
            for (int r = 0; r < 4; r++) x[r] = TT__K(splat)(r < k ? a[r] : 0.0f);
            for (int64_t j = 0; j < cols; j += TT__LANES) {
                float *p = sums + i * TT__GEMM_STRIP + j;
                tt__vf s = TT__K(load)(p);
                TT__EACH(r, 4) s = TT__K(fma)(x[r], TT__K(load)(b + r * step + j), s);
                TT__K(store)(p, s);
            }
        }
    }
}

TT__FN void TT__K(gemm_few_task)(void *arg, int64_t task, int thread)
{
    const TT__K(gemm_few) *w = (const TT__K(gemm_few) *)arg;
    const tt__gemm_args *g = w->args;
    int64_t col = task * TT__GEMM_STRIP, cols = tt__min(TT__GEMM_STRIP, g->n - col);
    float sums[TT__GEMM_FEW_ROWS * TT__GEMM_STRIP];
    (void)thread;
    memset(sums, 0, sizeof sums);
    if (g->k && g->b_row == 1) TT__K(gemm_few_dots)(w, col, cols, sums);
    else if (g->k) TT__K(gemm_few_rows)(w, col, cols, sums);
    TT__K(gemm_finish)(g, 0, col, g->m, cols, sums, NULL, TT__GEMM_STRIP);
}

TT__FN void TT__K(gemm_few_go)(tt__pool *pool, const tt__gemm_args *g)
{
    TT__K(gemm_few) w;
    w.args = g;
    w.a = (const float *)g->a.data;
    w.a_row = g->a_row;
    if (g->a.dtype != TT_F32 || g->a_col != 1) {
        float *copy = (float *)g->workspace, column[TT__GEMM_FEW_ROWS];
        for (int64_t i = 0; i < g->m && g->a_col == 1; i++)
            TT__K(gemm_take)(copy + i * g->k, &g->a, i, 0, g->k);
        for (int64_t k = 0; k < g->k && g->a_col != 1; k++) {
            TT__K(gemm_take)(column, &g->a, k, 0, g->m);
            for (int64_t i = 0; i < g->m; i++) copy[i * g->k + k] = column[i];
        }
        w.a = copy;
        w.a_row = g->k;
    }
    tt__gemm_tasks(pool, g, tt__ceil_div(g->n, TT__GEMM_STRIP), TT__K(gemm_few_task), &w);
}

#ifdef TINYTRAIN_CBLAS
/* ---- the product by a CBLAS: into C, or by the block into the workspace, where it is finished ---- */

typedef struct TT__K(gemm_product) {
    const tt__gemm_args *args;
    int64_t row, rows, col, cols, stride;
} TT__K(gemm_product);

TT__FN void TT__K(gemm_product_task)(void *arg, int64_t task, int thread)
{
    const TT__K(gemm_product) *w = (const TT__K(gemm_product) *)arg;
    int64_t i = task * 8;
    (void)thread;
    float *sums = (float *)w->args->workspace + i * w->stride;
    TT__K(gemm_finish)(w->args, w->row + i, w->col, tt__min(8, w->rows - i), w->cols, sums, NULL, w->stride);
}

TT__FN void TT__K(gemm_cblas)(tt__pool *pool, const tt__gemm_args *g)
{
    TT__K(gemm_product) w;
    if (g->c.dtype == TT_F32 && !g->bias.data && g->act == TT__ACT_NONE && !g->residual.data) {
        tt__cblas_product(g, 0, g->m, 0, g->n, (float *)g->c.data, g->c.ld, g->accumulate);
        return;
    }
    w.args = g;
    w.stride = tt__gemm_block(tt__min(g->n, TT__GEMM_N), TT__GEMM_N, 32);
    for (w.row = 0; w.row < g->m; w.row += TT__CBLAS_M) {
        for (w.col = 0; w.col < g->n; w.col += TT__GEMM_N) {
            w.rows = tt__min(TT__CBLAS_M, g->m - w.row);
            w.cols = tt__min(TT__GEMM_N, g->n - w.col);
            tt__cblas_product(g, w.row, w.rows, w.col, w.cols, (float *)g->workspace, w.stride, false);
            tt__gemm_tasks(pool, g, tt__ceil_div(w.rows, 8), TT__K(gemm_product_task), &w);
        }
    }
}
#endif

/* workspace: tt__gemm_workspace(m, n, k) bytes. */
TT__FN void TT__K(gemm)(tt__pool *pool, const tt__gemm_args *args)
{
    if (args->m <= 0 || args->n <= 0) return;
    if (args->m <= (args->b_row == 1 ? TT__GEMM_FEW_ROWS : TT__GEMM_FEW_SUMS)) TT__K(gemm_few_go)(pool, args);
#ifdef TINYTRAIN_CBLAS
    else if (tt__cblas_takes(args)) TT__K(gemm_cblas)(pool, args);
#endif
    else TT__K(gemm_packed)(pool, args);
}

/* The most that one thread can do: n rounds of multiply-adds that do not wait for each other. Returns the
   FLOPs done; *sink keeps the compiler from dropping them. */
TT__FN double TT__K(peak_loop)(int64_t n, float *sink)
{
    enum { SUMS = TT__GEMM_MR * TT__GEMM_NV >= 24 ? 24 : 12 }; /* of 32 or 16 registers */
    tt__vf sum[SUMS], x = TT__K(splat)(0.999f), y = TT__K(splat)(*sink);
    TT__EACH(i, SUMS) sum[i] = TT__K(splat)((float)i);
    for (int64_t round = 0; round < n; round++) {
        TT__UNROLL(24)
#ifdef TT__NEON /* its instruction overwrites what it adds to: the other way round would copy y */
        for (int i = 0; i < SUMS; i++) sum[i] = TT__K(fma)(x, y, sum[i]);
#else
        for (int i = 0; i < SUMS; i++) sum[i] = TT__K(fma)(sum[i], x, y);
#endif
    }
    TT__UNROLL(24)
    for (int i = 1; i < SUMS; i++) sum[0] += sum[i];
    *sink = TT__K(sum)(sum[0]);
    return (double)n * (double)(2 * SUMS * TT__LANES);
}

#undef TT__MICRO_TALL
#undef TT__GEMM_MR
#undef TT__GEMM_NV

/* ------------------------------------------------------------------------------------------------- attention
   Flash-style (Dao et al., "FlashAttention", 2022): scores exist only as tiles, of which only the log-sum-exp
   of each query survives the forward; the backward computes them again. Tiles are transposed, keys as rows
   and queries in lanes, so that the softmax needs no shuffles, and both P V and P^T dO broadcast their
   weights straight from the tile. Scores are in units of log 2 (the scale of Q includes log2 e), which makes
   every exp an exp2. */

typedef uint64_t TT__K(vw) __attribute__((vector_size(4 * TT__LANES)));
#define tt__vw TT__K(vw)

/* The 64-bit products of the low halves of each 64-bit lane; the high halves are ignored. */
TT__INLINE tt__vw TT__K(mul_low)(tt__vw a, tt__vw b)
{
#if TT__LANES == 16
    /* as mul_epu32, which g++ 12 warns of */
    return (tt__vw)_mm512_maskz_mul_epu32((__mmask8)-1, (__m512i)a, (__m512i)b);
#elif TT__LANES == 8
    return (tt__vw)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(TT__NEON)
    return (tt__vw)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

TT__INLINE tt__vw TT__K(splat_w)(uint64_t x) { tt__vw v; memset(&v, 0, sizeof v); return x - v; }

/* tt__philox in every lane. The counters are held as 64-bit lanes, even and odd ones apart, of which only the
   low half counts: that is what 32 x 32 -> 64 bit multiplications take and give. */
TT__INLINE void TT__K(philox)(const uint64_t keys[20], tt__vu c0, tt__vu c1, tt__vu c2, tt__vu c3,
                              tt__vu out[4])
{
    const tt__vw m0 = TT__K(splat_w)(0xD2511F53u), m1 = TT__K(splat_w)(0xCD9E8D57u);
    tt__vw e0 = (tt__vw)c0, e1 = (tt__vw)c1, e2 = (tt__vw)c2, e3 = (tt__vw)c3;
    tt__vw o0 = e0 >> 32, o1 = e1 >> 32, o2 = e2 >> 32, o3 = e3 >> 32;
    TT__EACH(round, 10) {
        tt__vw ea = TT__K(mul_low)(e0, m0), eb = TT__K(mul_low)(e2, m1);
        tt__vw oa = TT__K(mul_low)(o0, m0), ob = TT__K(mul_low)(o2, m1);
        e0 = (eb >> 32) ^ e1 ^ keys[2 * round];
        o0 = (ob >> 32) ^ o1 ^ keys[2 * round];
        e2 = (ea >> 32) ^ e3 ^ keys[2 * round + 1];
        o2 = (oa >> 32) ^ o3 ^ keys[2 * round + 1];
        e1 = eb; o1 = ob; e3 = ea; o3 = oa;
    }
    out[0] = (tt__vu)((e0 & 0xffffffffu) | (o0 << 32));
    out[1] = (tt__vu)((e1 & 0xffffffffu) | (o1 << 32));
    out[2] = (tt__vu)((e2 & 0xffffffffu) | (o2 << 32));
    out[3] = (tt__vu)((e3 & 0xffffffffu) | (o3 << 32));
}

/* 16-bit numbers of as many counters as there are lanes, eight of each, the low half of a word first: of the
   counters {c0, c1, 0, 0} in their order, when they are given in that of philox_groups, which makes the four
   words of a counter, and those of the next, neighbours. */
TT__INLINE tt__vu TT__K(philox_groups)(void)
{
    tt__vu groups;
    for (int i = 0; i < TT__LANES; i++) groups[i] = (uint32_t)(i % 4 * (TT__LANES / 4) + i / 4);
    return groups;
}

TT__INLINE void TT__K(philox_numbers)(const uint64_t keys[20], tt__vu c0, tt__vu c1,
                                      uint16_t numbers[8 * TT__LANES])
{
    const tt__vu none = TT__K(splat_u)(0);
    tt__vu bits[4];
    tt__vf words[4];
    TT__K(philox)(keys, c0, c1, none, none, bits);
    for (int i = 0; i < 4; i++) words[i] = (tt__vf)bits[i];
    TT__K(transpose_quads)(words);
    memcpy(numbers, words, sizeof words);
}

/* Some keys of a sequence and some queries, of a head of d columns: query i sees the keys that are <= i +
   diagonal. Products of bf16 are computed `by` one of the ways. */
typedef struct TT__K(attention_block) {
    tt__bf16 by;
    int64_t keys, queries, d, diagonal;
    const tt__attention_buffers *b;
} TT__K(attention_block);

/* to (m, to_row) = from^T (times scale if `scaled`), by whole vectors; rows of `from` from n on are zeros. */
TT__INLINE void TT__K(attention_transpose)(float *to, int64_t to_row, const float *from, int64_t from_row,
                                           int64_t n, int64_t m, const bool scaled, float scale)
{
    enum { L = TT__LANES };
    tt__vf r[L];
    for (int64_t i = 0; i < n; i += L) {
        for (int64_t j = 0; j < m; j += L) {
            TT__EACH(t, L) r[t] = i + t < n ? TT__K(load)(from + (i + t) * from_row + j) : TT__K(zero)();
            if (scaled) TT__EACH(t, L) r[t] *= scale;
            TT__K(transpose)(r);
            TT__EACH(t, L) if (j + t < m) TT__K(store)(to + (j + t) * to_row + i, r[t]);
        }
    }
}

#ifdef TT__ATTENTION_BF16
/* ---- operands of products of bf16, by dot products or tiles: rows of pairs, made of fp32 blocks ---- */

/* n vectors as bf16, to a multiple of 32 elements; what is more than n is 0. */
TT__DOT_INLINE void TT__K(attention_narrow)(float *to, const float *from, int64_t n)
{
    for (int64_t v = 0; v < n; v += 2) {
        tt__vf low = TT__K(load)(from + 16 * v),
               high = v + 1 < n ? TT__K(load)(from + 16 * (v + 1)) : TT__K(zero)();
        TT__K(store)(to + 8 * v, (tt__vf)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
}

/* to (n, ceil(width / 32) * 16): pairs that lie side by side in a row. */
TT__DOT_FN void TT__K(attention_pairs_of_columns)(float *to, const float *from, int64_t stride, int64_t n,
                                                  int64_t width)
{
    const int64_t to_row = tt__ceil_div(width, 32) * 16, vectors = tt__ceil_div(width, 16);
    for (int64_t i = 0; i < n; i++) TT__K(attention_narrow)(to + i * to_row, from + i * stride, vectors);
}

/* to (ceil(n / 32) * 16, to_row): pairs of a row and the next; zeros for rows from n on. */
TT__DOT_FN void TT__K(attention_pairs_of_rows)(float *to, int64_t to_row, const float *from, int64_t stride,
                                               int64_t n, int64_t width)
{
    uint16_t order[32];
    for (int k = 0; k < 32; k++) order[k] = (uint16_t)(k / 2 + k % 2 * 16);
    const __m512i alternate = _mm512_loadu_si512((const void *)order);
    const int64_t whole = tt__ceil_div(n, 32) * 32;
    for (int64_t i = 0; i < whole; i += 2, to += to_row, from += 2 * stride) {
        for (int64_t j = 0; j < width; j += 16) {
            tt__vf x = i < n ? TT__K(load)(from + j) : TT__K(zero)(),
                   y = i + 1 < n ? TT__K(load)(from + stride + j) : TT__K(zero)();
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
            TT__K(store)(to + j, (tt__vf)_mm512_permutexvar_epi16(alternate, both));
        }
    }
}

/* Y (keys, d), whose rows attention_to_queries adds, as pairs of rows. Tiles need a left operand whose rows
   run along the sum, which a transposed tile's do not; so there, Y is transposed and out^T computed. */
TT__FN void TT__K(attention_summed_bf16)(tt__bf16 by, const tt__attention_buffers *buffers, int64_t keys,
                                         int64_t d, const float *y, int64_t stride)
{
    float *pairs = by == TT__BF16_TILES ? buffers->across : buffers->summed;
    const int64_t rows = tt__ceil_div(keys, 32) * 16, cols = tt__attention_padded(d);
    TT__K(attention_pairs_of_rows)(pairs, stride, y, stride, keys, d);
    if (by != TT__BF16_TILES) return;
    TT__K(attention_transpose)(buffers->summed, TT__ATTENTION_KEYS / 2, pairs, stride, rows, cols, false, 1);
}

#ifdef TT__TILES
/* What rounding to bf16 leaves of n floats. */
TT__DOT_FN void TT__K(attention_rest)(float *x, int64_t n)
{
    float half[16];
    for (int64_t i = 0; i < n; i += 16) {
        TT__K(attention_narrow)(half, x + i, 1);
        TT__K(store)(x + i, TT__K(load)(x + i) - TT__K(load_16)((const uint16_t *)half, TT_BF16));
    }
}

/* attention_to_queries by tiles. `twice`: multiplies what rounding to bf16 leaves of tile, too. */
TT__FN void TT__K(attention_to_queries_by_tiles)(const TT__K(attention_block) *x, bool twice, float *tile,
                                                 float *out, int64_t out_stride, bool add)
{
    const int64_t whole = tt__ceil_div(x->keys, 32) * 32;
    const int64_t m = tt__attention_padded(x->d), n = tt__attention_padded(x->queries);
    const int64_t y_row = TT__ATTENTION_KEYS / 2;
    float *b = x->b->left, *c = x->b->across;
    tt__vf r[16];
    for (int part = 0; part <= twice; part++) {
        for (int64_t i = 0; i < x->keys && part; i++) TT__K(attention_rest)(tile + i * TT__ATTENTION_TILE, n);
        TT__K(attention_pairs_of_rows)(b, n, tile, TT__ATTENTION_TILE, x->keys, x->queries);
        for (int64_t j = 0; j < n; j += 32) {
            int64_t seen = tt__max(0, tt__min(whole, tt__ceil_div(j + 32 + x->diagonal, 32) * 32));
            for (int64_t i = 0; i < m; i += 32) {
                float *to = c + i * n + j;
                tt__product p = {seen / 2, x->b->summed + i * y_row, y_row, 16, b + j, n, to, n,
                                 part ? to : NULL, n, 1.0f};
                TT__K(tiles_micro)(m - i, n - j, &p);
            }
        }
    }
    for (int64_t i = 0; i < m; i += 16)
        for (int64_t j = 0; j < n; j += 16) {
            TT__EACH(t, 16) r[t] = TT__K(load)(c + (i + t) * n + j);
            TT__K(transpose)(r);
            for (int t = 0; t < tt__min(16, x->queries - j); t++) {
                float *to = out + (j + t) * out_stride + i;
                TT__K(store)(to, add ? r[t] + TT__K(load)(to) : r[t]);
            }
        }
}
#endif
#endif

/* ---- products ---- */

/* The microkernel for a way with bf16 (0: fp32), and the rows and columns of its blocks. It takes `whole`
   elements along k at a time, a power of 2, of which a unit holds 1 or, if `pairs` is 1, 2. */
typedef struct TT__K(attention_kernel) {
    TT__K(micro_fn) run;
    int64_t rows, cols, whole;
    int pairs;
} TT__K(attention_kernel);

TT__INLINE TT__K(attention_kernel) TT__K(attention_kernel_of)(tt__bf16 by)
{
    TT__K(attention_kernel) kernel = {TT__K(attention_micro), TT__ATTENTION_MR, TT__ATTENTION_NV * TT__LANES,
                                      1, 0};
#ifdef TT__ATTENTION_BF16
    if (by == TT__BF16_DOT) {
        kernel.run = TT__K(attention_dot_micro);
        kernel.whole = 2;
    }
#endif
#ifdef TT__TILES
    if (by == TT__BF16_TILES) {
        kernel.run = TT__K(tiles_micro);
        kernel.rows = kernel.cols = kernel.whole = 32;
    }
#endif
    kernel.pairs = by != TT__BF16_CONVERT;
    return kernel;
}

/* Rows [i, rows), columns [j, cols) of p's C, at most the microkernel's, summed over elements [from, to). */
TT__INLINE void TT__K(attention_multiply)(const TT__K(attention_kernel) *kernel, const tt__product *p,
                                          int64_t i, int64_t rows, int64_t j, int64_t cols, int64_t from,
                                          int64_t to)
{
    const int64_t first = (from & -kernel->whole) >> kernel->pairs;
    tt__product block = *p;
    block.k = ((to + kernel->whole - 1) & -kernel->whole) >> kernel->pairs;
    block.k -= first;
    /* tiles' rows of A lie along k */
    block.a += i * p->a_row + (kernel->whole > 2 ? first : first * p->a_col);
    block.b += first * p->b_row + j;
    block.c += i * p->c_row + j;
    if (p->base) block.base = block.c;
    kernel->run(tt__min(kernel->rows, rows - i), tt__min(kernel->cols, cols - j), &block);
}

/* Parts of a tile that no query of a vector sees are neither computed nor read in the three products; with
   listed queries all are, and the softmax leaves weights of 0 there. */

/* tile (keys, queries) = X (keys, d) Yt (d, queries); of bf16, X has pairs of columns, Yt of rows, and the
   result is scaled; fp32 operands are scaled already. */
TT__FN void TT__K(attention_scores)(const TT__K(attention_block) *s, float scale, const float *x,
                                    const float *yt, float *tile)
{
    const TT__K(attention_kernel) kernel = TT__K(attention_kernel_of)(s->by);
    const bool by_tiles = s->by == TT__BF16_TILES;
    const int64_t row = s->by ? tt__ceil_div(s->d, 32) * 16 : tt__attention_stride(s->d),
                  step = TT__ATTENTION_TILE;
    const int64_t rows = by_tiles ? tt__attention_padded(s->keys) : s->keys;
    const int64_t cols = tt__ceil_div(s->queries, TT__LANES) * TT__LANES;
    const tt__product p = {0, x, row, by_tiles ? 16 : 1, yt, step, tile, step, NULL, 0, scale};
    for (int64_t j = 0; j < cols; j += kernel.cols) {
        int64_t seen = tt__min(rows, tt__min(j + kernel.cols, cols) + s->diagonal);
        for (int64_t i = 0; i < seen; i += kernel.rows)
            TT__K(attention_multiply)(&kernel, &p, i, seen, j, cols, 0, s->d);
    }
    for (int64_t i = 0; i < s->keys && by_tiles; i++, tile += step)
        for (int64_t j = 0; j < cols; j += TT__LANES) TT__K(store)(tile + j, TT__K(load)(tile + j) * scale);
}

/* dX (keys, d) += tile (keys, queries) Y (queries, d); of bf16, Y has pairs of rows. */
TT__FN void TT__K(attention_to_keys)(const TT__K(attention_block) *s, const float *tile, const float *y,
                                     float *dx)
{
    const TT__K(attention_kernel) kernel = TT__K(attention_kernel_of)(s->by);
    const int64_t cols = tt__ceil_div(s->d, TT__LANES) * TT__LANES, stride = tt__attention_stride(s->d);
    int64_t rows = s->keys;
    tt__product p = {0, tile, TT__ATTENTION_TILE, 1, y, stride, dx, stride, dx, stride, 1.0f};
#ifdef TT__ATTENTION_BF16
    if (s->by) {
        p.a = s->b->left;
        p.a_row = tt__ceil_div(s->queries, 32) * 16;
        TT__K(attention_pairs_of_columns)(s->b->left, tile, TT__ATTENTION_TILE, s->keys, s->queries);
    }
#endif
    if (s->by == TT__BF16_TILES) {
        p.a_col = 16;
        rows = tt__attention_padded(rows);
    }
    for (int64_t j = 0; j < cols; j += kernel.cols)
        for (int64_t i = 0; i < rows; i += kernel.rows)
            TT__K(attention_multiply)(&kernel, &p, i, rows, j, cols, tt__max(0, i - s->diagonal), s->queries);
}

/* out (queries, d) = or += tile^T (queries, keys) Y (keys, d); of bf16, Y is from attention_summed_bf16. Rows
   of a block share their keys (of bf16, pairs), with weights 0 for those that a query does not see: a NaN or
   infinity in Y also reaches the few queries before it in the block, by tiles the 32 before it, and with
   listed queries all of the sequence. */
TT__FN void TT__K(attention_to_queries)(const TT__K(attention_block) *s, bool twice, float *tile,
                                        const float *y, float *out, int64_t out_row, bool add)
{
    (void)twice;
#ifdef TT__TILES
    if (s->by == TT__BF16_TILES) {
        TT__K(attention_to_queries_by_tiles)(s, twice, tile, out, out_row, add);
        return;
    }
#endif
    const TT__K(attention_kernel) kernel = TT__K(attention_kernel_of)(s->by);
    const int64_t cols = tt__ceil_div(s->d, TT__LANES) * TT__LANES, y_row = tt__attention_stride(s->d);
    tt__product p = {0, tile, 1, TT__ATTENTION_TILE, y, y_row, out, out_row, add ? out : NULL, out_row, 1.0f};
#ifdef TT__ATTENTION_BF16
    if (s->by) {
        p.a = s->b->left;
        p.a_col = tt__attention_padded(s->queries);
        TT__K(attention_pairs_of_rows)(s->b->left, p.a_col, tile, TT__ATTENTION_TILE, s->keys, s->queries);
    }
#endif
    for (int64_t j = 0; j < cols; j += kernel.cols)
        for (int64_t i = 0; i < s->queries; i += kernel.rows) {
            int64_t seen = tt__min(s->keys, tt__min(i + kernel.rows, s->queries) + s->diagonal);
            if (seen > 0) TT__K(attention_multiply)(&kernel, &p, i, s->queries, j, cols, 0, seen);
        }
}

/* ---- rows of one head in and out of fp32 blocks ---- */

/* A row of d numbers in and out. `dtype` is a constant, so that nothing is asked of each whole vector. */
TT__INLINE void TT__K(attention_row_in)(const tt_dtype dtype, float *to, const void *from, int64_t d,
                                        float scale)
{
    const float *f = (const float *)from;
    const uint16_t *h = (const uint16_t *)from;
    int64_t j = 0;
    for (; j + TT__LANES <= d; j += TT__LANES)
        TT__K(store)(to + j, (dtype == TT_F32 ? TT__K(load)(f + j) : TT__K(load_16)(h + j, dtype)) * scale);
    if (j < d) TT__K(store)(to + j, TT__K(load_as)(from, dtype, j, d - j) * scale);
}

TT__INLINE void TT__K(attention_row_out)(const tt_dtype dtype, void *to, const float *from, int64_t d,
                                         float scale, bool add)
{
    float *f = (float *)to;
    uint16_t *h = (uint16_t *)to;
    int64_t j = 0;
    for (; j + TT__LANES <= d; j += TT__LANES) {
        tt__vf x = TT__K(load)(from + j) * scale;
        if (add) x += dtype == TT_F32 ? TT__K(load)(f + j) : TT__K(load_16)(h + j, dtype);
        if (dtype == TT_F32) TT__K(store)(f + j, x);
        else TT__K(store_16)(h + j, x, dtype);
    }
    if (j == d) return;
    tt__vf x = TT__K(load)(from + j) * scale; /* the zeros in the rest of a row are positive */
    TT__K(store_as)(to, dtype, j, x + (add ? TT__K(load_as)(to, dtype, j, d - j) : TT__K(zero)()), d - j);
}

/* to (n, stride) = scale * rows [row, row + n), or those that `at` has there, of the head that starts at
   `column`, with zeros up to a whole vector. */
TT__FN void TT__K(attention_pack)(const tt__mat *m, const int32_t *at, int64_t row, int64_t n, int64_t column,
                                  int64_t d, float scale, float *to, int64_t stride)
{
    for (int64_t i = 0; i < n; i++, to += stride) {
        int64_t number = at ? at[row + i] : row + i;
        const void *from = tt__attention_row(m, number, column);
        if (i + 8 < n) tt__attention_prefetch(m, at ? at[row + i + 8] : row + i + 8, column, d, false);
        tt__attention_prefetch(m, number, column, d, true);
        if (m->dtype == TT_F32) TT__K(attention_row_in)(TT_F32, to, from, d, scale);
        else if (m->dtype == TT_BF16) TT__K(attention_row_in)(TT_BF16, to, from, d, scale);
        else TT__K(attention_row_in)(TT_F16, to, from, d, scale);
    }
}

/* The same rows of the head (+)= scale * from; a gradient that nothing needs is absent. */
TT__FN void TT__K(attention_unpack)(const tt__mat *m, const int32_t *at, int64_t row, int64_t n,
                                    int64_t column, int64_t d, float scale, const float *from, int64_t stride,
                                    bool add)
{
    for (int64_t i = 0; i < n && m->data; i++, from += stride) {
        void *to = tt__attention_row(m, at ? at[row + i] : row + i, column);
        if (i + 8 < n) tt__attention_prefetch(m, at ? at[row + i + 8] : row + i + 8, column, d, false);
        if (m->dtype == TT_F32) TT__K(attention_row_out)(TT_F32, to, from, d, scale, add);
        else if (m->dtype == TT_BF16) TT__K(attention_row_out)(TT_BF16, to, from, d, scale, add);
        else TT__K(attention_row_out)(TT_F16, to, from, d, scale, add);
    }
}

/* to (d, tile) = scale * from^T, from (n, stride); of bf16, pairs of that, and no scale. */
TT__FN void TT__K(attention_columns)(const tt__attention_args *a, const tt__attention_buffers *b,
                                     const float *from, int64_t n, float scale, float *to)
{
    int64_t d = a->head_size, stride = tt__attention_stride(d), step = TT__ATTENTION_TILE;
#ifdef TT__ATTENTION_BF16
    if (a->bf16) {
        const int64_t row = tt__ceil_div(d, 32) * 16;
        TT__K(attention_pairs_of_columns)(b->columns, from, stride, n, d);
        TT__K(attention_transpose)(to, step, b->columns, row, n, row, false, 1);
        return;
    }
#endif
    (void)b;
    TT__K(attention_transpose)(to, step, from, stride, n, d, true, scale);
}

/* ---- softmax ---- */

typedef struct TT__K(attention_call) {
    const tt__attention_args *a;
    int64_t longest;
    float query_scale;  /* scale * log2 e                       */
    float keep_scale;   /* 1 / (1 - p)                          */
    uint64_t keys[20];
} TT__K(attention_call);

/* One head of one sequence, and the buffers of the thread that works on it. */
typedef struct TT__K(attention_task) {
    const TT__K(attention_call) *call;
    const tt__attention_args *a;
    int head;
    tt__attention_sequence x;
    tt__attention_buffers b;
} TT__K(attention_task);

/* What the lanes of one vector of queries have in common. */
typedef struct TT__K(attention_lanes) {
    tt__vi last;          /* the last key of the block that each lane sees              */
    int64_t full, seen;   /* keys of the block that all lanes see, that any lane sees  */
    tt__vu row;           /* the row of the batch                                      */
    int64_t first_key;    /* of the block                                              */
    int32_t head, drop;
    const uint64_t *keys; /* of Philox                                                 */
} TT__K(attention_lanes);

/* query: of the first lane, in the sequence */
TT__INLINE TT__K(attention_lanes) TT__K(attention_lanes_at)(const TT__K(attention_task) *t, int64_t first_key,
                                                            int64_t keys, int64_t query)
{
    const tt__attention_args *a = t->a;
    TT__K(attention_lanes) l;
    l.full = keys;
    l.seen = 0;
    for (int i = 0; i < TT__LANES; i++) {
        int64_t row = t->x.begin + query + i;
        if (a->query_row) row = a->query_row[t->x.first + tt__min(query + i, t->x.queries - 1)];
        int64_t last = a->causal ? tt__max(-1, tt__min(keys, row - t->x.begin - first_key)) : keys;
        l.last[i] = (int32_t)last;
        l.row[i] = (uint32_t)row;
        l.full = tt__min(l.full, last + 1);
        l.seen = tt__max(l.seen, tt__min(keys, last + 1));
    }
    l.first_key = first_key;
    l.head = t->head;
    l.drop = TT__DROP_THRESHOLD(a->dropout);
    l.keys = t->call->keys;
    return l;
}

/* The random bits of keys r .. r + 7 of the block, r a multiple of 8: two keys a word. */
TT__INLINE void TT__K(attention_random)(const TT__K(attention_lanes) *l, int64_t r, tt__vu bits[4])
{
    TT__K(philox)(l->keys, l->row, TT__K(splat_u)((uint32_t)((l->first_key + r) / 8)),
                  TT__K(splat_u)((uint32_t)l->head), TT__K(splat_u)(0), bits);
}

TT__INLINE tt__vf TT__K(attention_and)(tt__vf x, tt__vi mask) { return (tt__vf)((tt__vi)x & mask); }

/* All bits set where key i (0..7) is kept. */
TT__INLINE tt__vi TT__K(attention_keep)(const tt__vu bits[4], int i, int32_t drop)
{
    tt__vu number = i & 1 ? bits[i / 2] >> 16 : bits[i / 2] & 0xffff;
    return (tt__vi)number >= drop;
}

/* Scores in, weights out, for one vector of queries (tile: its column), with a running maximum and sum.
   Returns what earlier sums of weights must be multiplied with. */
TT__INLINE tt__vf TT__K(attention_softmax)(const bool dropout, const TT__K(attention_lanes) *l, int64_t keys,
                                           float *tile, float *most, float *sum)
{
    const tt__vf lowest = TT__K(splat)(-FLT_MAX);
    tt__vf old = TT__K(load)(most), m0 = old, m1 = old, total0 = TT__K(zero)(), total1 = total0;
    int64_t r = 0;
    for (; r + 2 <= l->full; r += 2) {
        m0 = TT__K(max)(m0, TT__K(load)(tile + r * TT__ATTENTION_TILE));
        m1 = TT__K(max)(m1, TT__K(load)(tile + (r + 1) * TT__ATTENTION_TILE));
    }
    for (; r < l->seen; r++) {
        tt__vi visible = l->last >= (int32_t)r;
        tt__vf x = TT__K(load)(tile + r * TT__ATTENTION_TILE);
        m0 = TT__K(max)(m0, (tt__vf)(((tt__vi)x & visible) | ((tt__vi)lowest & ~visible)));
    }
    m0 = TT__K(max)(m0, m1);
    for (r = 0; r < l->seen; r += 8) {
        tt__vu bits[4];
        float *t = tile + r * TT__ATTENTION_TILE;
        if (dropout) TT__K(attention_random)(l, r, bits);
        if (r + 8 <= l->full) {
            TT__EACH(i, 8) {
                tt__vf p = TT__K(exp2)(TT__K(load)(t + i * TT__ATTENTION_TILE) - m0);
                if (i & 1) total1 += p;
                else total0 += p;
                if (dropout) p = TT__K(attention_and)(p, TT__K(attention_keep)(bits, i, l->drop));
                TT__K(store)(t + i * TT__ATTENTION_TILE, p);
            }
        } else {
            for (int i = 0; i < 8 && r + i < l->seen; i++) {
                tt__vf p = TT__K(exp2)(TT__K(load)(t + i * TT__ATTENTION_TILE) - m0);
                p = TT__K(attention_and)(p, l->last >= (int32_t)(r + i));
                total0 += p;
                if (dropout) p = TT__K(attention_and)(p, TT__K(attention_keep)(bits, i, l->drop));
                TT__K(store)(t + i * TT__ATTENTION_TILE, p);
            }
        }
    }
    for (r = l->seen; r < keys; r++) TT__K(store)(tile + r * TT__ATTENTION_TILE, TT__K(zero)());
    tt__vf correction = TT__K(exp2)(old - m0);
    TT__K(store)(most, m0);
    TT__K(store)(sum, TT__K(fma)(TT__K(load)(sum), correction, total0 + total1));
    return correction;
}

/* Scores to dropped weights P~, and gradients of those to gradients of scores P (keep dP~ - delta). */
TT__INLINE void TT__K(attention_softmax_backward)(const bool dropout, const TT__K(attention_lanes) *l,
                                                  int64_t keys, float *weights, float *dscores,
                                                  const float *lse, const float *delta)
{
    tt__vf log_sum = TT__K(load)(lse), dl = TT__K(load)(delta);
    for (int64_t r = 0; r < l->seen; r += 8) {
        tt__vu bits[4];
        float *w = weights + r * TT__ATTENTION_TILE, *ds = dscores + r * TT__ATTENTION_TILE;
        if (dropout) TT__K(attention_random)(l, r, bits);
        if (r + 8 <= l->full) {
            TT__EACH(i, 8) {
                tt__vf p = TT__K(exp2)(TT__K(load)(w + i * TT__ATTENTION_TILE) - log_sum);
                tt__vf dp = TT__K(load)(ds + i * TT__ATTENTION_TILE);
                tt__vi keep;
                if (dropout) {
                    keep = TT__K(attention_keep)(bits, i, l->drop);
                    dp = TT__K(attention_and)(dp, keep);
                }
                TT__K(store)(ds + i * TT__ATTENTION_TILE, p * (dp - dl));
                TT__K(store)(w + i * TT__ATTENTION_TILE, dropout ? TT__K(attention_and)(p, keep) : p);
            }
        } else {
            for (int i = 0; i < 8 && r + i < l->seen; i++) {
                tt__vf p = TT__K(exp2)(TT__K(load)(w + i * TT__ATTENTION_TILE) - log_sum);
                tt__vf dp = TT__K(load)(ds + i * TT__ATTENTION_TILE);
                tt__vi visible = l->last >= (int32_t)(r + i), keep = visible;
                if (dropout) keep &= TT__K(attention_keep)(bits, i, l->drop);
                dp = TT__K(attention_and)(dp, keep);
                TT__K(store)(ds + i * TT__ATTENTION_TILE, TT__K(attention_and)(p * (dp - dl), visible));
                TT__K(store)(w + i * TT__ATTENTION_TILE, TT__K(attention_and)(p, keep));
            }
        }
    }
    for (int64_t r = l->seen; r < keys; r++) {
        TT__K(store)(weights + r * TT__ATTENTION_TILE, TT__K(zero)());
        TT__K(store)(dscores + r * TT__ATTENTION_TILE, TT__K(zero)());
    }
}

/* ---- the two kernels ---- */

TT__FN TT__K(attention_call) TT__K(attention_begin)(const tt__attention_args *a)
{
    TT__K(attention_call) call;
    call.a = a;
    call.longest = tt__attention_longest(a);
    call.query_scale = a->scale * 1.44269504088896341f;
    call.keep_scale = 65536.0f / (float)(65536 - TT__DROP_THRESHOLD(a->dropout));
    tt__philox_keys(a->dropout_key, call.keys);
    return call;
}

/* Task `task` of a call, which is of sequence s. */
TT__FN TT__K(attention_task) TT__K(attention_task_of)(const TT__K(attention_call) *call, int64_t task,
                                                      int64_t s, bool backward, int thread)
{
    TT__K(attention_task) t;
    t.call = call;
    t.a = call->a;
    t.head = (int)(task % t.a->heads);
    t.x = tt__attention_sequence_at(t.a, s);
    t.b = tt__attention_thread_buffers(t.a, call->longest, backward, thread);
    return t;
}

/* Reads n keys and values from row `row` of the batch on. */
TT__FN void TT__K(attention_take_keys)(const TT__K(attention_task) *t, int64_t row, int64_t n, bool backward)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    const int64_t d = a->head_size, stride = tt__attention_stride(d);
    TT__K(attention_pack)(&a->k, NULL, row, n, t->head * d, d, 1.0f, b->k, stride);
    TT__K(attention_pack)(&a->v, NULL, row, n, t->head * d, d, 1.0f, b->v, stride);
    (void)backward;
#ifdef TT__ATTENTION_BF16
    if (a->bf16) TT__K(attention_pairs_of_columns)(b->k_pairs, b->k, stride, n, d);
    if (a->bf16 && backward) TT__K(attention_pairs_of_columns)(b->v_pairs, b->v, stride, n, d);
    if (a->bf16 == TT__BF16_TILES || (a->bf16 && backward))
        TT__K(attention_summed_bf16)(a->bf16, b, n, d, backward ? b->k : b->v, stride);
#endif
}

#define TT__ATTENTION_NO_DIAGONAL ((int64_t)1 << 40) /* the products take every key for every query */

/* One block of queries against one block of keys. key, query: the first of them, in the sequence. */
TT__FN void TT__K(attention_forward_tile)(const TT__K(attention_task) *t, int64_t key, int64_t keys,
                                          int64_t query, int64_t n, const float *qt, float *out, float *most,
                                          float *sum)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    const int64_t d = a->head_size, stride = tt__attention_stride(d);
    const int64_t diagonal = t->x.diagonal ? query - key : TT__ATTENTION_NO_DIAGONAL;
    TT__K(attention_block) s = {a->bf16, tt__min(keys, n + diagonal), n, d, diagonal, b};
    float correction[TT__ATTENTION_QUERIES];
    if (s.keys <= 0) return;
    TT__K(attention_scores)(&s, t->call->query_scale, a->bf16 ? b->k_pairs : b->k, qt, b->weights);
    for (int64_t i = 0; i < n; i += TT__LANES) {
        TT__K(attention_lanes) l = TT__K(attention_lanes_at)(t, key, s.keys, query + i);
        tt__vf c = l.drop ? TT__K(attention_softmax)(true, &l, s.keys, b->weights + i, most + i, sum + i)
                          : TT__K(attention_softmax)(false, &l, s.keys, b->weights + i, most + i, sum + i);
        TT__K(store)(correction + i, c);
    }
    for (int64_t i = 0; key > 0 && i < n; i++) {
        float *row = out + i * stride;
        for (int64_t j = 0; j < d && correction[i] != 1.0f; j += TT__LANES)
            TT__K(store)(row + j, TT__K(load)(row + j) * correction[i]);
    }
    /* The weights are not rounded here: dout * out of rounded ones would not be what the backward's weights
       and their gradients sum to, and gradients of keys, which cancel out, would be half as wrong again. */
    if (s.by == TT__BF16_DOT) s.by = TT__BF16_CONVERT;
    TT__K(attention_to_queries)(&s, true, b->weights, b->v, out, stride, key > 0);
}

TT__FN void TT__K(attention_forward_task)(void *arg, int64_t task, int thread)
{
    const TT__K(attention_call) *call = (const TT__K(attention_call) *)arg;
    const tt__attention_args *a = call->a;
    const int64_t group = task / a->heads, s = tt__attention_group_sequence(a, group);
    const TT__K(attention_task) t = TT__K(attention_task_of)(call, task, s, false, thread);
    const tt__attention_buffers *b = &t.b;
    int64_t first = (group - tt__attention_first_group(a, s)) * TT__ATTENTION_GROUP;
    int64_t queries = tt__min(TT__ATTENTION_GROUP, t.x.queries - first),
            key_end = t.x.diagonal ? first + queries : t.x.length;
    int64_t d = a->head_size, column = t.head * d, stride = tt__attention_stride(d);
    int64_t qt_size = tt__attention_qt_rows(d) * TT__ATTENTION_TILE;
    if (queries <= 0) return;
    int64_t query_block = tt__attention_block(queries, TT__ATTENTION_QUERIES);
    int64_t key_block = tt__attention_block(key_end, TT__ATTENTION_KEYS);
    const float q_scale = a->bf16 ? 1.0f : call->query_scale; /* of bf16, products are scaled */
    for (int64_t i = 0, block = 0; i < queries; i += query_block, block++) {
        int64_t n = tt__min(query_block, queries - i);
        TT__K(attention_pack)(&a->q, a->query_at, t.x.first + first + i, n, column, d, q_scale, b->q, stride);
        TT__K(attention_columns)(a, b, b->q, n, 1.0f, b->qt + block * qt_size);
    }
    for (int64_t i = 0; i < TT__ATTENTION_GROUP; i++) {
        b->most[i] = -FLT_MAX;
        b->sum[i] = 0;
    }
    if (a->bf16 == TT__BF16_TILES) TT__K(tiles_begin)(32);
    for (int64_t key = 0; key < key_end; key += key_block) {
        int64_t keys = tt__min(key_block, key_end - key);
        TT__K(attention_take_keys)(&t, t.x.begin + key, keys, false);
        for (int64_t i = 0, block = 0; i < queries; i += query_block, block++) {
            int64_t n = tt__min(query_block, queries - i);
            TT__K(attention_forward_tile)(&t, key, keys, first + i, n, b->qt + block * qt_size,
                                          b->out + i * stride, b->most + i, b->sum + i);
        }
    }
    if (a->bf16 == TT__BF16_TILES) TT__K(tiles_end)();
    for (int64_t i = 0; i < queries; i++) {
        int64_t number = t.x.first + first + i, row = a->query_at ? a->query_at[number] : number;
        TT__K(attention_unpack)(&a->out, NULL, row, 1, column, d, call->keep_scale / b->sum[i],
                                b->out + i * stride, stride, false);
        a->lse[row * a->heads + t.head] = b->most[i] * 0.693147180559945309f + logf(b->sum[i]);
    }
}

/* Writes out, and into lse the log-sum-exp (natural) of the scaled scores of each query. */
TT__FN void TT__K(attention_forward)(tt__pool *pool, const tt__attention_args *a)
{
    TT__K(attention_call) call = TT__K(attention_begin)(a);
    if (a->seqs > 0)
        tt__parallel(pool, tt__attention_first_group(a, a->seqs) * a->heads, TT__K(attention_forward_task),
                     &call);
}

/* log2-sum-exp2 of the scores and sum of dout * out of n queries from number `first` on */
TT__FN void TT__K(attention_backward_rows)(const TT__K(attention_task) *t, int64_t first, int64_t n)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    int64_t d = a->head_size, stride = tt__attention_stride(d);
    for (int64_t i = 0; i < n; i += TT__ATTENTION_QUERIES) {
        int64_t block = tt__min(TT__ATTENTION_QUERIES, n - i);
        TT__K(attention_pack)(&a->out, a->query_at, first + i, block, t->head * d, d, 1.0f, b->q, stride);
        TT__K(attention_pack)(&a->dout, a->query_at, first + i, block, t->head * d, d, 1.0f, b->dout, stride);
        for (int64_t k = 0; k < block; k++) {
            tt__vf sum = TT__K(zero)();
            for (int64_t j = 0; j < d; j += TT__LANES)
                sum = TT__K(fma)(TT__K(load)(b->q + k * stride + j), TT__K(load)(b->dout + k * stride + j),
                                 sum);
            b->delta[i + k] = TT__K(sum)(sum);
            int64_t number = first + i + k, row = a->query_at ? a->query_at[number] : number;
            b->lse[i + k] = a->lse[row * a->heads + t->head] * 1.44269504088896341f;
        }
    }
    for (int64_t i = n; i < tt__attention_padded(n); i++) b->delta[i] = b->lse[i] = 0;
}

/* span: the first query of which b holds lse, delta and dq */
TT__FN void TT__K(attention_backward_tile)(const TT__K(attention_task) *t, int64_t key, int64_t keys,
                                           int64_t span, int64_t query, int64_t n)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    const bool half = a->bf16 != TT__BF16_CONVERT;
    const float query_scale = t->call->query_scale, keep_scale = t->call->keep_scale;
    const int64_t d = a->head_size, stride = tt__attention_stride(d), dq_stride = tt__attention_padded(d);
    const int64_t column = t->head * d, row = t->x.first + query;
    const int64_t diagonal = t->x.diagonal ? query - key : TT__ATTENTION_NO_DIAGONAL;
    const TT__K(attention_block) s = {a->bf16, tt__min(keys, n + diagonal), n, d, diagonal, b};
    if (s.keys <= 0) return;
    TT__K(attention_pack)(&a->q, a->query_at, row, n, column, d, 1.0f, b->q, stride);
    TT__K(attention_pack)(&a->dout, a->query_at, row, n, column, d, half ? 1.0f : keep_scale, b->dout,
                          stride);
    TT__K(attention_columns)(a, b, b->q, n, query_scale, b->qt);
    TT__K(attention_columns)(a, b, b->dout, n, 1.0f, b->doutt);
    TT__K(attention_scores)(&s, query_scale, half ? b->k_pairs : b->k, b->qt, b->weights);
    TT__K(attention_scores)(&s, keep_scale, half ? b->v_pairs : b->v, b->doutt, b->dscores);
    for (int64_t i = 0; i < n; i += TT__LANES) {
        TT__K(attention_lanes) l = TT__K(attention_lanes_at)(t, key, s.keys, query + i);
        float *w = b->weights + i, *ds = b->dscores + i;
        const float *lse = b->lse + query - span + i, *delta = b->delta + query - span + i;
        if (l.drop) TT__K(attention_softmax_backward)(true, &l, s.keys, w, ds, lse, delta);
        else TT__K(attention_softmax_backward)(false, &l, s.keys, w, ds, lse, delta);
    }
    float *dq = b->dq + (query - span) * dq_stride;
#ifdef TT__ATTENTION_BF16
    if (half) {
        TT__K(attention_pairs_of_rows)(b->q_pairs, stride, b->q, stride, n, d);
        TT__K(attention_pairs_of_rows)(b->dout_pairs, stride, b->dout, stride, n, d);
    }
#endif
    TT__K(attention_to_keys)(&s, b->weights, half ? b->dout_pairs : b->dout, b->dv);
    TT__K(attention_to_keys)(&s, b->dscores, half ? b->q_pairs : b->q, b->dk);
    TT__K(attention_to_queries)(&s, false, b->dscores, half ? b->summed : b->k, dq, dq_stride, key > 0);
}

/* The gradients that come from n queries of a sequence; where n is 0, zeros for its keys and values. */
TT__FN void TT__K(attention_backward_span)(const TT__K(attention_task) *t, int64_t span, int64_t n)
{
    const tt__attention_args *a = t->a;
    const tt__attention_buffers *b = &t->b;
    const tt__attention_sequence *x = &t->x;
    int64_t d = a->head_size, column = t->head * d, stride = tt__attention_stride(d);
    int64_t key_end = x->diagonal ? span + n : x->length;
    int64_t query_block = tt__attention_block(tt__max(1, n), TT__ATTENTION_QUERIES);
    int64_t key_block = tt__attention_block(key_end, TT__ATTENTION_KEYS);
    const float dv_scale = a->bf16 ? t->call->keep_scale : 1.0f; /* bf16 products take dout as it is */
    TT__K(attention_backward_rows)(t, x->first + span, n);
    for (int64_t key = 0; key < key_end; key += key_block) {
        int64_t keys = tt__min(key_block, key_end - key);
        TT__K(attention_take_keys)(t, x->begin + key, keys, true);
        memset(b->dk, 0, (size_t)(keys * stride) * sizeof(float));
        memset(b->dv, 0, (size_t)(keys * stride) * sizeof(float));
        for (int64_t query = span; query < span + n; query += query_block)
            TT__K(attention_backward_tile)(t, key, keys, span, query, tt__min(query_block, span + n - query));
        /* The keys that earlier spans have seen come first: their gradients are added to. */
        const int64_t seen = x->diagonal ? tt__max(0, tt__min(keys, span - key)) : keys,
                      old = span ? seen : 0;
        for (int64_t from = 0, end = old; from < keys; from = end, end = keys) {
            int64_t row = x->begin + key + from, count = end - from;
            const float *dk = b->dk + from * stride, *dv = b->dv + from * stride;
            TT__K(attention_unpack)(&a->dk, NULL, row, count, column, d, a->scale, dk, stride,
                                    from < old || a->add_dk);
            TT__K(attention_unpack)(&a->dv, NULL, row, count, column, d, dv_scale, dv, stride,
                                    from < old || a->add_dv);
        }
    }
    const int64_t dq_stride = tt__attention_padded(d);
    TT__K(attention_unpack)(&a->dq, a->query_at, x->first + span, n, column, d, a->scale, b->dq, dq_stride,
                            a->add_dq);
}

TT__FN void TT__K(attention_backward_task)(void *arg, int64_t task, int thread)
{
    const TT__K(attention_call) *call = (const TT__K(attention_call) *)arg;
    const tt__attention_args *a = call->a;
    const TT__K(attention_task) t = TT__K(attention_task_of)(call, task, task / a->heads, true, thread);
    if (a->bf16 == TT__BF16_TILES) TT__K(tiles_begin)(32);
    for (int64_t span = 0; span == 0 || span < t.x.queries; span += TT__ATTENTION_SPAN)
        TT__K(attention_backward_span)(&t, span, tt__min(TT__ATTENTION_SPAN, t.x.queries - span));
    if (a->bf16 == TT__BF16_TILES) TT__K(tiles_end)();
}

/* Writes or adds to dq, dk, dv. */
TT__FN void TT__K(attention_backward)(tt__pool *pool, const tt__attention_args *a)
{
    TT__K(attention_call) call = TT__K(attention_begin)(a);
    if (a->seqs > 0) tt__parallel(pool, a->seqs * a->heads, TT__K(attention_backward_task), &call);
}

#undef TT__ATTENTION_MR
#undef TT__ATTENTION_NV

/* ----------------------------------------------------------------------------------------------- row kernels
   Everything but matmul and attention works on rows of floats; other dtypes are widened on the way in and
   rounded on the way out, a row at a time, so no kernel knows them. */

/* Row k of the scratch of a thread. */
TT__INLINE float *TT__K(scratch_row)(float *scratch, int64_t cols, int k)
{
    return scratch + (size_t)k * (tt__row_bytes(cols) / 4);
}

/* Row r of m as floats: in place when m is f32, else widened into row k of scratch. */
TT__INLINE const float *TT__K(row_in)(const tt__mat *m, int64_t r, float *scratch, int k)
{
    float *row = TT__K(scratch_row)(scratch, m->cols, k);
    if (m->dtype == TT_F32) return (const float *)tt__at(m, r);
    TT__K(row_widen)(row, tt__at(m, r), m->dtype, m->cols);
    return row;
}

/* Where row r of m is computed: in place, or in `row` when it must be rounded or added. */
TT__INLINE float *TT__K(row_begin)(const tt__mat *m, bool add, int64_t r, float *row)
{
    return m->dtype == TT_F32 && !add ? (float *)tt__at(m, r) : row;
}

/* Writes or adds a row of floats to row r of m, unless it was computed in place; uses row k of scratch. */
TT__INLINE void TT__K(row_end)(const tt__mat *m, bool add, int64_t r, const float *row, float *scratch, int k)
{
    float *spare = TT__K(scratch_row)(scratch, m->cols, k);
    float *to = m->dtype == TT_F32 ? (float *)tt__at(m, r) : spare;
    if (row == to) return;
    if (add) TT__K(axpby)(to, 1, row, 1, TT__K(row_in)(m, r, spare, 0), m->cols);
    else if (m->dtype == TT_F32) memcpy(to, row, (size_t)m->cols * 4);
    if (m->dtype != TT_F32) TT__K(row_narrow)(tt__at(m, r), add ? spare : row, m->dtype, m->cols);
}

/* sum += row r of m, which row k of scratch may hold. */
TT__INLINE void TT__K(row_add)(float *sum, const tt__mat *m, int64_t r, float *scratch, int k)
{
    TT__K(axpby)(sum, 1, sum, 1, TT__K(row_in)(m, r, scratch, k), m->cols);
}

/* Computes row r of out[0] as y (n) from row r of some inputs, the x; x[k] is NULL if that one is absent. */
typedef void (*TT__K(row_fn))(const tt__launch *l, int64_t r, const float *const *x, float *y, int64_t n,
                              const void *more);
#define TT__UNUSED __attribute__((unused))
#define TT__ROW_FN(name) \
    TT__FN void TT__K(name)(TT__UNUSED const tt__launch *l, TT__UNUSED int64_t r, const float *const *x, \
                            float *y, int64_t n, TT__UNUSED const void *more)
/* A function of the rows [from, to) of an op, with TT__ROW_BUFFERS rows of scratch. */
#define TT__ROWS_FN(name) \
    TT__FN void TT__K(name)(const tt__launch *l, int64_t from, int64_t to, TT__UNUSED float *scratch)

/* Rows [from, to) of out[0], each by fn from the rows of in[first] to in[first + count - 1], 3 at most. */
TT__INLINE void TT__K(map_rows)(const tt__launch *l, int64_t from, int64_t to, float *scratch,
                                const int first, const int count, TT__K(row_fn) fn, const void *more)
{
    const int64_t n = l->in[first].cols;
    for (int64_t r = from; r < to; r++) {
        const float *x[3] = {NULL, NULL, NULL};
        float *y = TT__K(row_begin)(&l->out[0], l->add[0], r, scratch);
        TT__EACH(k, count) {
            const tt__mat *in = &l->in[first + k];
            if (in->data) x[k] = TT__K(row_in)(in, r, scratch, 1 + k);
        }
        fn(l, r, x, y, n, more);
        TT__K(row_end)(&l->out[0], l->add[0], r, y, scratch, 1 + count);
    }
}

/* Kernels of ops that compute rows of out[0]. RUN_ROWS: by a statement for the rows [from, to). RUN_MAP: each
   by the function row_OP or a statement, from rows of inputs as in map_rows. */
#define TT__RUN_ROWS(OP, statement) \
    TT__ROWS_FN(rows_##OP) { statement; } \
    TT__FN tt_status TT__K(run_##OP)(const tt__launch *l) \
    { \
        return tt__for_rows(l, &l->out[0], 0, TT__K(rows_##OP)); \
    }
#define TT__RUN_MAP(OP, first, count) \
    TT__RUN_ROWS(OP, TT__K(map_rows)(l, from, to, scratch, first, count, TT__K(row_##OP), NULL))
#define TT__RUN_MAP_OF(OP, first, count, statement) \
    TT__ROW_FN(row_##OP) { statement; } \
    TT__RUN_MAP(OP, first, count)

TT__RUN_MAP_OF(SCALE, 0, 1, TT__K(axpby)(y, l->instr->attr.scale, x[0], 0, NULL, n))
TT__RUN_MAP_OF(CAST, 0, 1, TT__K(axpby)(y, 1, x[0], 0, NULL, n))
TT__RUN_MAP_OF(ADD, 0, 2, TT__K(axpby)(y, 1, x[0], 1, x[1], n))
TT__RUN_MAP_OF(MUL, 0, 2, for (int64_t c = 0; c < n; c += TT__LANES)
    TT__K(store_n)(y + c, TT__K(load_n)(x[0] + c, n - c) * TT__K(load_n)(x[1] + c, n - c), n - c))
TT__RUN_MAP_OF(ACTIVATION, 0, 1, TT__K(act_row)(l->instr->attr.act, y, x[0], NULL, n))
TT__RUN_MAP_OF(ACTIVATION_BACKWARD, 0, 2, TT__K(act_row)(l->instr->attr.act, y, x[0], x[1], n))

TT__ROWS_FN(fill_rows)
{
    const tt__mat *y = &l->out[0];
    const float loss_scale = l->in[0].data ? (float)((const tt__scale *)l->in[0].data)->scale : 1.0f;
    const float x = l->instr->attr.scale * loss_scale;
    uint16_t half = y->dtype == TT_BF16 ? tt__to_bf16(x) : tt__to_f16(x);
    for (int64_t r = from; r < to; r++) {
        for (int64_t c = 0; c < y->cols; c++) {
            if (y->dtype == TT_F32) ((float *)tt__at(y, r))[c] = x;
            else ((uint16_t *)tt__at(y, r))[c] = half;
        }
    }
}

TT__FN tt_status TT__K(run_FILL)(const tt__launch *l)
{
    return l->add[0] ? TT_OK : tt__for_rows(l, &l->out[0], 0, TT__K(fill_rows));
}

/* y = x / (1 - p) where the element of row r survives, else 0; + residual, which may be absent. Element c: 16
   random bits, number c % 8 of Philox counter {r, c / 8, 0, 0}. more: Philox's keys. */
TT__ROW_FN(dropout_row)
{
    const tt__vu groups = TT__K(philox_groups)();
    const int32_t drop = TT__DROP_THRESHOLD(l->instr->attr.dropout);
    const float scale = 65536.0f / (float)(65536 - drop);
    const int64_t number = l->in[2].data ? ((const int32_t *)l->in[2].data)[r] : r;
    uint16_t numbers[8 * TT__LANES];
    for (int64_t c = 0; c < n; c += 8 * TT__LANES) {
        TT__K(philox_numbers)((const uint64_t *)more, TT__K(splat_u)((uint32_t)number),
                              TT__K(splat_u)((uint32_t)(c / 8)) + groups, numbers);
        for (int64_t i = c; i < tt__min(n, c + 8 * TT__LANES); i += TT__LANES) {
            tt__vi keep = (tt__vi)TT__K(load_h)(numbers + (i - c)) >= drop;
            tt__vf v = (tt__vf)((tt__vi)(TT__K(load_n)(x[0] + i, n - i) * scale) & keep);
            if (x[1]) v += TT__K(load_n)(x[1] + i, n - i);
            TT__K(store_n)(y + i, v, n - i);
        }
    }
}

TT__ROWS_FN(dropout_rows)
{
    uint64_t keys[20];
    tt__philox_keys(tt__dropout_key(l), keys);
    TT__K(map_rows)(l, from, to, scratch, 0, 2, TT__K(dropout_row), keys);
}

TT__RUN_ROWS(DROPOUT, TT__K(dropout_rows)(l, from, to, scratch))

/* ---- column sums: the workspace begins with sums of TT__SUM_ROWS rows each, then added in order ---- */

TT__INLINE float *TT__K(partial_sum)(const tt__launch *l, int64_t k, int64_t cols)
{
    return tt__workspace_at(l, (size_t)k * tt__row_bytes(cols));
}

/* Writes or adds the sum of `count` partial sums from number `first` on; `scratch` has two rows. */
TT__FN void TT__K(finish_column_sums)(const tt__launch *l, const tt__mat *to, bool add, int64_t first,
                                      int64_t count, float *scratch)
{
    int64_t n = to->cols;
    memset(scratch, 0, (size_t)n * 4);
    for (int64_t k = 0; k < count; k++)
        TT__K(axpby)(scratch, 1, scratch, 1, TT__K(partial_sum)(l, first + k, n), n);
    TT__K(row_end)(to, add, 0, scratch, scratch, 1);
}

TT__ROWS_FN(column_sum_rows)
{
    int64_t n = l->in[0].cols;
    float *sum = TT__K(partial_sum)(l, from / TT__SUM_ROWS, n);
    memset(sum, 0, (size_t)n * 4);
    for (int64_t r = from; r < to; r++) TT__K(row_add)(sum, &l->in[0], r, scratch, 0);
}

/* -------------------------------------------------------------------------------------- linear, attention */

/* C = out[0] (m, n) of products with A and B, whose rows (columns, where so said) run along the sum of k. */
TT__INLINE tt__gemm_args TT__K(gemm_args)(const tt__launch *l, int64_t k, const tt__mat *a, bool a_columns,
                                          const tt__mat *b, bool b_columns)
{
    tt__gemm_args g;
    memset(&g, 0, sizeof g);
    g.m = a_columns ? a->cols : a->rows;
    g.n = b_columns ? b->cols : b->rows;
    g.k = k;
    g.a = *a;
    g.a_row = a_columns ? 1 : a->ld;
    g.a_col = a_columns ? a->ld : 1;
    g.b = *b;
    g.b_row = b_columns ? b->ld : 1;
    g.b_col = b_columns ? 1 : b->ld;
    g.c = l->out[0];
    g.accumulate = l->add[0];
    g.workspace = l->workspace;
    g.bf16 = tt__cpu_of(l)->bf16;
    return g;
}

TT__FN tt_status TT__K(run_LINEAR)(const tt__launch *l)
{
    tt__gemm_args g = TT__K(gemm_args)(l, l->in[0].cols, &l->in[0], false, &l->in[1], false);
    g.b_narrow = l->instr->attr.narrow;
    g.bias = l->in[2];
    g.act = l->instr->attr.act;
    g.pre = l->out[1];
    g.residual = l->in[3];
    TT__K(gemm)(tt__cpu_of(l)->pool, &g);
    return TT_OK;
}

TT__FN tt_status TT__K(run_LINEAR_DX)(const tt__launch *l)
{
    tt__gemm_args g = TT__K(gemm_args)(l, l->in[0].cols, &l->in[0], false, &l->in[1], true);
    g.b_narrow = l->instr->attr.narrow;
    g.act = l->instr->attr.act;
    g.saved = l->in[2];
    TT__K(gemm)(tt__cpu_of(l)->pool, &g);
    return TT_OK;
}

TT__FN tt_status TT__K(run_LINEAR_DW)(const tt__launch *l)
{
    const tt__mat *dy = &l->in[0], *db = &l->out[1];
    if (l->out[0].data) {
        tt__gemm_args g = TT__K(gemm_args)(l, dy->rows, dy, true, &l->in[1], true);
        TT__K(gemm)(tt__cpu_of(l)->pool, &g);
    }
    if (db->data) {
        int64_t parts = tt__ceil_div(dy->rows, TT__SUM_ROWS);
        size_t used = (size_t)parts * tt__row_bytes(dy->cols);
        tt__for_chunks(l, dy->rows, dy->cols, TT__SUM_ROWS, used, TT__K(column_sum_rows));
        TT__K(finish_column_sums)(l, db, l->add[1], 0, parts, tt__workspace_at(l, used));
    }
    return TT_OK;
}

/* Operands q, q + 1, q + 2: q, k, v; `numbers`: of the rows that are queries, which the workspace has in
   order. */
TT__INLINE tt__attention_args TT__K(attention_args)(const tt__launch *l, int q, int starts, int numbers)
{
    tt__attention_args a;
    memset(&a, 0, sizeof a);
    a.seq_start = a.query_start = (const int32_t *)l->in[starts].data;
    a.seqs = l->in[starts].rows - 1;
    a.heads = l->instr->attr.heads;
    a.head_size = l->in[q].cols / a.heads;
    a.causal = l->instr->attr.causal;
    a.scale = l->instr->attr.scale;
    a.dropout = l->instr->attr.dropout;
    a.dropout_key = tt__dropout_key(l);
    a.q = l->in[q]; a.k = l->in[q + 1]; a.v = l->in[q + 2];
#ifdef TT__ATTENTION_BF16
    if (a.q.dtype == TT_BF16 && a.k.dtype == TT_BF16 && a.v.dtype == TT_BF16) a.bf16 = tt__cpu_of(l)->bf16;
#endif
    a.workspace = l->workspace;
    if (l->in[numbers].data) {
        int64_t n = l->in[numbers].rows;
        tt__attention_queries(&a, (const int32_t *)l->in[numbers].data, n, l->workspace);
        a.workspace = (char *)l->workspace + tt__attention_queries_bytes(a.seqs, n);
    }
    return a;
}
#undef TT__ATTENTION_BF16

TT__FN tt_status TT__K(run_ATTENTION)(const tt__launch *l)
{
    tt__attention_args a = TT__K(attention_args)(l, 0, 3, 4);
    a.out = l->out[0];
    a.lse = (float *)l->out[1].data;
    TT__K(attention_forward)(tt__cpu_of(l)->pool, &a);
    return TT_OK;
}

TT__FN tt_status TT__K(run_ATTENTION_BACKWARD)(const tt__launch *l)
{
    tt__attention_args a = TT__K(attention_args)(l, 1, 4, 7);
    a.dout = l->in[0];
    a.out = l->in[5];
    a.lse = (float *)l->in[6].data;
    /* dout * out is taken of dout as it is, so products must be too */
    if (a.dout.dtype != TT_BF16) a.bf16 = TT__BF16_CONVERT;
    a.dq = l->out[0]; a.dk = l->out[1]; a.dv = l->out[2];
    a.add_dq = l->add[0]; a.add_dk = l->add[1]; a.add_dv = l->add[2];
    TT__K(attention_backward)(tt__cpu_of(l)->pool, &a);
    return TT_OK;
}

/* ---------------------------------------------------------------------------------------------- layernorm */

/* Sum of (x - mean)^2 over the whole pairs of vectors in x (n); of what is behind them: *rest. */
TT__INLINE float TT__K(squares)(const float *x, int64_t n, const float mean, float *rest)
{
    int64_t c = 0;
    tt__vf s0 = TT__K(zero)(), s1 = s0;
    for (; c + 2 * TT__LANES <= n; c += 2 * TT__LANES) {
        tt__vf d0 = TT__K(load)(x + c) - mean, d1 = TT__K(load)(x + c + TT__LANES) - mean;
        s0 = TT__K(fma)(d0, d0, s0);
        s1 = TT__K(fma)(d1, d1, s1);
    }
    for (*rest = 0; c < n; c++) *rest += (x[c] - mean) * (x[c] - mean);
    return TT__K(sum)(s0 + s1);
}

/* y = (x - mean) / sqrt(variance + eps) * w + b; more: w (n) and b (n), which may be NULL. rmsnorm is
   layernorm with a mean of 0, which is not kept. */
TT__ROW_FN(layernorm_row)
{
    const float *const *weights = (const float *const *)more, *w = weights[0], *b = weights[1], *row = x[0];
    const bool centred = l->instr->op == TT__OP_LAYERNORM;
    tt__vf s0 = TT__K(zero)(), s1 = s0;
    int64_t c = 0;
    for (; c + 2 * TT__LANES <= n; c += 2 * TT__LANES) {
        s0 += TT__K(load)(row + c);
        s1 += TT__K(load)(row + c + TT__LANES);
    }
    for (; c < n; c += TT__LANES) s0 += TT__K(load_n)(row + c, tt__min(TT__LANES, n - c));
    float mean = centred ? TT__K(sum)(s0 + s1) / (float)n : 0, rest;
    float squares = TT__K(squares)(row, n, mean, &rest);
    float rstd = 1.0f / sqrtf((squares + rest) / (float)n + l->instr->attr.eps);
    for (c = 0; c < n; c += TT__LANES) {
        tt__vf v = (TT__K(load_n)(row + c, n - c) - mean) * rstd * TT__K(load_n)(w + c, n - c);
        if (b) v += TT__K(load_n)(b + c, n - c);
        TT__K(store_n)(y + c, v, n - c);
    }
    if (!l->out[1].data) return;
    float *stats = (float *)tt__at(&l->out[1], r);
    if (centred) *stats++ = mean;
    *stats = rstd;
}

TT__ROWS_FN(layernorm_rows)
{
    const float *weights[2] = {TT__K(row_in)(&l->in[1], 0, scratch, 3), NULL};
    if (l->in[2].data) /* of layernorm */
        weights[1] = TT__K(row_in)(&l->in[2], 0, scratch, 4);
    TT__K(map_rows)(l, from, to, scratch, 0, 1, TT__K(layernorm_row), weights);
}

TT__RUN_ROWS(LAYERNORM, TT__K(layernorm_rows)(l, from, to, scratch))
TT__RUN_ROWS(RMSNORM, TT__K(layernorm_rows)(l, from, to, scratch))

/* With n = (x - mean) / std and g = dy w: dx = (g - avg(g) - n avg(g n)) / std, dw = sum dy n, db = sum dy.
   rmsnorm: without mean and avg(g). */
TT__ROWS_FN(layernorm_backward_rows)
{
    int64_t n = l->in[1].cols, parts = tt__ceil_div(l->in[1].rows, TT__SUM_ROWS), part = from / TT__SUM_ROWS;
    float *dw = TT__K(partial_sum)(l, part, n), *db = TT__K(partial_sum)(l, parts + part, n);
    const float *w = TT__K(row_in)(&l->in[2], 0, scratch, 3);
    const bool centred = l->instr->op == TT__OP_LAYERNORM_BACKWARD;
    memset(dw, 0, (size_t)n * 4);
    memset(db, 0, (size_t)n * 4);
    for (int64_t r = from; r < to; r++) {
        const float *dy = TT__K(row_in)(&l->in[0], r, scratch, 1);
        const float *x = TT__K(row_in)(&l->in[1], r, scratch, 2);
        const float *stats = (const float *)tt__at(&l->in[3], r);
        float mean = centred ? stats[0] : 0, rstd = centred ? stats[1] : stats[0];
        tt__vf sg = TT__K(zero)(), sgn = sg;
        for (int64_t c = 0; c < n; c += TT__LANES) {
            tt__vf d = TT__K(load_n)(dy + c, n - c), g = d * TT__K(load_n)(w + c, n - c);
            tt__vf xn = (TT__K(load_n)(x + c, n - c) - mean) * rstd;
            sg += g;
            sgn = TT__K(fma)(g, xn, sgn);
            TT__K(store_n)(dw + c, TT__K(fma)(d, xn, TT__K(load_n)(dw + c, n - c)), n - c);
            TT__K(store_n)(db + c, d + TT__K(load_n)(db + c, n - c), n - c);
        }
        float avg_g = centred ? TT__K(sum)(sg) / (float)n : 0, avg_gn = TT__K(sum)(sgn) / (float)n;
        if (!l->out[0].data) continue;
        float *dx = TT__K(row_begin)(&l->out[0], l->add[0], r, scratch);
        for (int64_t c = 0; c < n; c += TT__LANES) {
            tt__vf g = TT__K(load_n)(dy + c, n - c) * TT__K(load_n)(w + c, n - c),
                   xn = (TT__K(load_n)(x + c, n - c) - mean) * rstd;
            TT__K(store_n)(dx + c, (g - avg_g - xn * avg_gn) * rstd, n - c);
        }
        TT__K(row_end)(&l->out[0], l->add[0], r, dx, scratch, 4);
    }
}

TT__FN tt_status TT__K(run_LAYERNORM_BACKWARD)(const tt__launch *l)
{
    int64_t rows = l->in[1].rows, n = l->in[1].cols, parts = tt__ceil_div(rows, TT__SUM_ROWS);
    size_t used = 2 * (size_t)parts * tt__row_bytes(n);
    float *scratch = tt__workspace_at(l, used);
    tt__for_chunks(l, rows, n, TT__SUM_ROWS, used, TT__K(layernorm_backward_rows));
    if (l->out[1].data) TT__K(finish_column_sums)(l, &l->out[1], l->add[1], 0, parts, scratch);
    if (l->out[2].data) TT__K(finish_column_sums)(l, &l->out[2], l->add[2], parts, parts, scratch);
    return TT_OK;
}

TT__FN tt_status TT__K(run_RMSNORM_BACKWARD)(const tt__launch *l) { return TT__K(run_LAYERNORM_BACKWARD)(l); }

/* ----------------------------------------------------------------------------- embedding, gather, pooling */

/* Rows [from, to) of out[0] are rows of m: of the same numbers, or of those in `index`. */
TT__INLINE void TT__K(take_rows)(const tt__launch *l, int64_t from, int64_t to, float *scratch,
                                 const tt__mat *m, const int32_t *index)
{
    for (int64_t r = from; r < to; r++) {
        const float *x = TT__K(row_in)(m, index ? index[r] : r, scratch, 0);
        TT__K(row_end)(&l->out[0], l->add[0], r, x, scratch, 1);
    }
}

TT__RUN_ROWS(EMBEDDING, TT__K(take_rows)(l, from, to, scratch, &l->in[1], (const int32_t *)l->in[0].data))
TT__RUN_ROWS(GATHER_ROWS, TT__K(take_rows)(l, from, to, scratch, &l->in[0], (const int32_t *)l->in[1].data))

TT__ROWS_FN(copy_rows)
{
    TT__K(take_rows)(l, from, to, scratch, &l->in[0], NULL);
}

TT__ROWS_FN(zero_rows)
{
    const size_t bytes = (size_t)l->out[0].cols * tt_dtype_bytes(l->out[0].dtype);
    for (int64_t r = from; r < to; r++) memset(tt__at(&l->out[0], r), 0, bytes);
}

/* `order`: rows of dy in the order of their ids (equal ids in row order). The rows of an id belong to the
   task in which it begins, so that one task adds them, in row order. */
TT__ROWS_FN(embedding_backward_rows)
{
    const int32_t *ids = (const int32_t *)l->in[0].data, *order = (const int32_t *)l->workspace;
    int64_t rows = l->in[0].rows, n = l->out[0].cols, k = from;
    float *sum = TT__K(scratch_row)(scratch, n, 0);
    while (k > 0 && k < to && ids[order[k]] == ids[order[k - 1]]) k++;
    while (k < to) {
        int32_t id = ids[order[k]];
        memset(sum, 0, (size_t)n * 4);
        for (; k < rows && ids[order[k]] == id; k++) {
            const float *dy = TT__K(row_in)(&l->in[1], order[k], scratch, 1);
            TT__K(axpby)(sum, 1, sum, 1, dy, n);
        }
        TT__K(row_end)(&l->out[0], l->add[0], id, sum, scratch, 2);
    }
}

TT__FN tt_status TT__K(run_EMBEDDING_BACKWARD)(const tt__launch *l)
{
    const int32_t *ids = (const int32_t *)l->in[0].data;
    int64_t rows = l->in[0].rows, vocab = l->out[0].rows, n = l->out[0].cols;
    int32_t *order = (int32_t *)l->workspace, *first = order + rows;
    memset(first, 0, (size_t)(vocab + 1) * 4); /* counting sort */
    for (int64_t r = 0; r < rows; r++) first[ids[r] + 1]++;
    for (int64_t v = 0; v < vocab; v++) first[v + 1] += first[v];
    for (int64_t r = 0; r < rows; r++) order[first[ids[r]]++] = (int32_t)r;
    if (!l->add[0]) tt__for_rows(l, &l->out[0], 0, TT__K(zero_rows));
    return tt__for_chunks(l, rows, n, 64, tt__align_up((size_t)(rows + vocab + 1) * 4),
                          TT__K(embedding_backward_rows));
}

/* rows may repeat: added one after another */
TT__FN tt_status TT__K(run_GATHER_ROWS_BACKWARD)(const tt__launch *l)
{
    const int32_t *index = (const int32_t *)l->in[1].data;
    float *scratch = (float *)l->workspace;
    if (!l->add[0]) tt__for_rows(l, &l->out[0], 0, TT__K(zero_rows));
    for (int64_t r = 0; r < l->in[0].rows; r++) {
        const float *dy = TT__K(row_in)(&l->in[0], r, scratch, 0);
        TT__K(row_end)(&l->out[0], true, index[r], dy, scratch, 1);
    }
    return TT_OK;
}

TT__FN tt_status TT__K(run_SET_ROWS)(const tt__launch *l)
{
    const int32_t *index = (const int32_t *)l->in[1].data;
    float *scratch = (float *)l->workspace;
    if (l->in[0].data != l->out[0].data) tt__for_rows(l, &l->out[0], 0, TT__K(copy_rows));
    for (int64_t k = 0; k < l->in[1].rows; k++) {
        const float *row = TT__K(row_in)(&l->in[2], 0, scratch, 0);
        TT__K(row_end)(&l->out[0], false, index[k], row, scratch, 1);
    }
    return TT_OK;
}

TT__ROWS_FN(set_rows_backward_rows)
{
    const uint8_t *set = (const uint8_t *)l->workspace;
    for (int64_t r = from; r < to; r++) {
        if (!set[r] && (l->add[0] || l->in[0].data != l->out[0].data)) TT__K(copy_rows)(l, r, r + 1, scratch);
        if (set[r] && !l->add[0]) TT__K(zero_rows)(l, r, r + 1, scratch);
    }
}

/* a row may be listed twice, but was set once */
TT__FN tt_status TT__K(run_SET_ROWS_BACKWARD)(const tt__launch *l)
{
    const int32_t *index = (const int32_t *)l->in[1].data;
    int64_t rows = l->in[0].rows, n = l->in[0].cols;
    uint8_t *set = (uint8_t *)l->workspace;
    size_t skip = tt__align_up((size_t)rows);
    float *scratch = tt__workspace_at(l, skip);
    memset(set, 0, (size_t)rows);
    for (int64_t k = 0; k < l->in[1].rows; k++) set[index[k]] = 1;
    if (l->out[1].data) {
        float *sum = TT__K(row_begin)(&l->out[1], l->add[1], 0, scratch);
        memset(sum, 0, (size_t)n * 4);
        for (int64_t r = 0; r < rows; r++) {
            if (!set[r]) continue;
            TT__K(row_add)(sum, &l->in[0], r, scratch, 1);
        }
        TT__K(row_end)(&l->out[1], l->add[1], 0, sum, scratch, 2);
    }
    return l->out[0].data ? tt__for_rows(l, &l->in[0], skip, TT__K(set_rows_backward_rows)) : TT_OK;
}

TT__ROWS_FN(patches_rows)
{
    const tt_patch_options *o = &l->instr->attr.image;
    const int32_t *position = (const int32_t *)l->in[1].data, *start = (const int32_t *)l->in[2].data;
    int64_t seqs = l->in[2].rows - 1, n = l->out[0].cols, s = tt__sequence_of(start, seqs, from);
    for (int64_t r = from; r < to; r++) {
        float *y = TT__K(row_begin)(&l->out[0], l->add[0], r, scratch), *to_y = y;
        while (r >= start[s + 1]) s++;
        int p = position[r] - 1, across = o->width / o->patch;
        if (p < 0) memset(y, 0, (size_t)n * 4);
        for (int c = 0; c < o->channels && p >= 0; c++) {
            const int64_t corner = ((int64_t)p / across * o->width + p % across) * o->patch;
            const uint8_t *from_x = (const uint8_t *)tt__at(&l->in[0], s) + corner * o->channels + c;
            float scale = 1 / (255 * o->std[c]), shift = -o->mean[c] / o->std[c];
            for (int line = 0; line < o->patch; line++, from_x += (int64_t)o->width * o->channels)
                for (int x = 0; x < o->patch; x++) *to_y++ = (float)from_x[x * o->channels] * scale + shift;
        }
        TT__K(row_end)(&l->out[0], l->add[0], r, y, scratch, 1);
    }
}

TT__RUN_ROWS(PATCHES, TT__K(patches_rows)(l, from, to, scratch))

TT__ROWS_FN(mean_pool_rows)
{
    const int32_t *start = (const int32_t *)l->in[1].data;
    int64_t n = l->in[0].cols;
    float *sum = TT__K(scratch_row)(scratch, n, 0);
    for (int64_t s = from; s < to; s++) {
        memset(sum, 0, (size_t)n * 4);
        for (int64_t r = start[s]; r < start[s + 1]; r++) {
            const float *x = TT__K(row_in)(&l->in[0], r, scratch, 1);
            TT__K(axpby)(sum, 1, sum, 1, x, n);
        }
        float *y = TT__K(row_begin)(&l->out[0], l->add[0], s, TT__K(scratch_row)(scratch, n, 2));
        TT__K(axpby)(y, 1.0f / (float)(start[s + 1] - start[s]), sum, 0, NULL, n);
        TT__K(row_end)(&l->out[0], l->add[0], s, y, scratch, 3);
    }
}

TT__FN tt_status TT__K(run_MEAN_POOL)(const tt__launch *l)
{
    return tt__for_chunks(l, l->out[0].rows, l->out[0].cols, 1, 0, TT__K(mean_pool_rows));
}

TT__ROWS_FN(mean_pool_backward_rows) /* from..to: sequences */
{
    const int32_t *start = (const int32_t *)l->in[1].data;
    int64_t n = l->in[0].cols;
    for (int64_t s = from; s < to; s++) {
        const float *dy = TT__K(row_in)(&l->in[0], s, scratch, 1);
        for (int64_t r = start[s]; r < start[s + 1]; r++) {
            float *dx = TT__K(row_begin)(&l->out[0], l->add[0], r, scratch);
            TT__K(axpby)(dx, 1.0f / (float)(start[s + 1] - start[s]), dy, 0, NULL, n);
            TT__K(row_end)(&l->out[0], l->add[0], r, dx, scratch, 2);
        }
    }
}

TT__FN tt_status TT__K(run_MEAN_POOL_BACKWARD)(const tt__launch *l)
{
    return tt__for_chunks(l, l->in[0].rows, l->in[0].cols, 1, 0, TT__K(mean_pool_backward_rows));
}

/* ---------------------------------------------------------------------------------------------------- losses
   counts: sum of weighted losses, sum of weights, sum of the weights of rows that were predicted right, 0. */

TT__INLINE float TT__K(row_weight)(const tt__launch *l, int operand, int64_t r)
{
    float scratch[TT__LANES]; /* one would do, but gcc cannot see it */
    return l->in[operand].data ? *TT__K(row_in)(&l->in[operand], r, scratch, 0) : 1.0f;
}

TT__ROWS_FN(cross_entropy_rows)
{
    const tt__attr *attr = &l->instr->attr;
    const int32_t *targets = (const int32_t *)l->in[1].data;
    float *row_loss = (float *)l->workspace, *row_right = row_loss + l->in[0].rows;
    int64_t n = l->in[0].cols;
    for (int64_t r = from; r < to; r++) {
        const float *x = TT__K(row_in)(&l->in[0], r, scratch, 1);
        tt__vf top = TT__K(splat)(-INFINITY), s = TT__K(zero)(), sx = s;
        int64_t c = 0;
        for (; c + TT__LANES <= n; c += TT__LANES) top = TT__K(max)(TT__K(load)(x + c), top);
        float m = TT__K(max_lane)(top);
        for (; c < n; c++) m = x[c] > m ? x[c] : m;
        for (c = 0; c + TT__LANES <= n; c += TT__LANES) {
            tt__vf v = TT__K(load)(x + c);
            s += TT__K(exp)(v - m);
            sx += v;
        }
        float sum = TT__K(sum)(s), sum_x = TT__K(sum)(sx);
        for (; c < n; c++) { sum += expf(x[c] - m); sum_x += x[c]; }
        float lse = m + logf(sum);
        *(float *)tt__at(&l->out[1], r) = lse;
        if (targets[r] == attr->ignore_index) { row_loss[r] = row_right[r] = 0; continue; }
        const float smoothed = attr->smoothing > 0 ? attr->smoothing * (sum_x / (float)n) : 0;
        row_loss[r] = lse - (1 - attr->smoothing) * x[targets[r]] - smoothed;
        bool right = x[targets[r]] == m; /* the first of those that are greatest, as argmax */
        for (c = 0; c < targets[r] && right; c++) right = x[c] != m;
        row_right[r] = right;
    }
}

TT__INLINE void TT__K(sum_losses)(const tt__launch *l, const int32_t *targets)
{
    const float *row_loss = (const float *)l->workspace, *row_right = row_loss + l->in[0].rows;
    double loss = 0, total = 0, right = 0;
    for (int64_t r = 0; r < l->in[0].rows; r++) {
        if (targets && targets[r] == l->instr->attr.ignore_index) continue;
        double w = TT__K(row_weight)(l, 2, r);
        loss += w * row_loss[r];
        total += w;
        right += w * row_right[r];
    }
    float *counts = (float *)l->out[2].data;
    counts[0] = (float)loss; counts[1] = (float)total; counts[2] = (float)right; counts[3] = 0;
    *(float *)l->out[0].data = (float)(loss / total);
}

TT__FN tt_status TT__K(run_CROSS_ENTROPY)(const tt__launch *l)
{
    tt__for_rows(l, &l->in[0], tt__align_up((size_t)l->in[0].rows * 8), TT__K(cross_entropy_rows));
    TT__K(sum_losses)(l, (const int32_t *)l->in[1].data);
    return TT_OK;
}

/* What a row's gradient is multiplied by, beside its weight: upstream gradient / number of targets. */
TT__INLINE float TT__K(loss_factor)(const tt__launch *l, const tt__mat *counts)
{
    double norm = TT__RUN_OF(l) ? TT__RUN_OF(l)->loss_norm : ((const float *)counts->data)[1];
    return norm > 0 ? (float)(*(const float *)l->in[0].data / norm) : 0.0f;
}

TT__ROW_FN(row_CROSS_ENTROPY_BACKWARD)
{
    const float smoothing = l->instr->attr.smoothing, lse = *(const float *)tt__at(&l->in[4], r);
    const float w = TT__K(loss_factor)(l, &l->in[5]) * TT__K(row_weight)(l, 3, r);
    const int32_t target = ((const int32_t *)l->in[2].data)[r];
    if (target == l->instr->attr.ignore_index) { memset(y, 0, (size_t)n * 4); return; }
    for (int64_t c = 0; c < n; c += TT__LANES) {
        tt__vf p = TT__K(exp)(TT__K(load_n)(x[0] + c, n - c) - lse);
        TT__K(store_n)(y + c, (p - smoothing / (float)n) * w, n - c);
    }
    y[target] -= (1 - smoothing) * w;
}

TT__RUN_MAP(CROSS_ENTROPY_BACKWARD, 1, 1)

/* Forward and backward of a linear layer and its cross-entropy, chunk by chunk of rows (tt__pass_fuse_loss),
   by the kernels of those ops. Gradients of logits have the dtype of x, in the place of the logits. */
TT__FN tt_status TT__K(run_LINEAR_CROSS_ENTROPY)(const tt__launch *l)
{
    const tt__mat *x = &l->in[0], *weights = &l->in[2], *w = &l->in[3], *dx = &l->out[1];
    const int32_t *targets = (const int32_t *)l->in[1].data;
    const int64_t rows = x->rows, classes = w->rows,
                  chunk = tt__ceil_div(rows, tt__ceil_div(rows, TT__LOSS_CHUNK));
    float *row_loss = (float *)l->workspace, *row_right = row_loss + rows,
          *lse = row_loss + tt__align_up((size_t)rows * 8) / 4;
    float *logits = lse + tt__align_up((size_t)chunk * 4) / 4; /* see tt__loss_bytes */
    double total = 0;
    tt__launch forward = *l, loss = *l, back = *l, part = *l;
    for (int64_t r = 0; r < rows; r++)
        if (targets[r] != l->instr->attr.ignore_index) total += TT__K(row_weight)(l, 2, r);
    ((float *)l->out[2].data)[1] = (float)total;
    forward.workspace = tt__workspace_at(l, tt__loss_bytes(rows, classes));
    loss.workspace = back.workspace = part.workspace = forward.workspace;
    forward.in[1] = *w;
    forward.in[2] = l->in[4];
    forward.in[3].data = forward.out[1].data = part.in[2].data = NULL;
    forward.add[0] = back.add[0] = false;
    for (int64_t r = 0, n; r < rows; r += n) {
        n = tt__min(chunk, rows - r);
        tt__mat z = {logits, TT_F32, n, classes, classes}, dz = z, xs = tt__rows_of(x, r, n),
                lses = {lse, TT_F32, n, 1, 1};
        dz.dtype = x->dtype;
        dz.ld = classes * (int64_t)(sizeof(float) / tt_dtype_bytes(x->dtype));
        forward.in[0] = xs;
        forward.out[0] = z;
        TT__K(run_LINEAR)(&forward);
        loss.in[0] = z;
        loss.in[1] = tt__rows_of(&l->in[1], r, n);
        loss.out[1] = lses;
        tt__for_rows(&loss, &z, tt__align_up((size_t)n * 8), TT__K(cross_entropy_rows));
        memcpy(row_loss + r, loss.workspace, (size_t)n * 4);
        memcpy(row_right + r, (const float *)loss.workspace + n, (size_t)n * 4);
        if (!dx->data && !l->out[3].data && !l->out[4].data) continue;
        back.in[0] = l->in[5];
        back.in[1] = z;
        back.in[2] = loss.in[1];
        back.in[3] = weights->data ? tt__rows_of(weights, r, n) : *weights;
        back.in[4] = lses;
        back.in[5] = l->out[2];
        back.out[0] = dz;
        TT__K(run_CROSS_ENTROPY_BACKWARD)(&back);
        part.in[0] = dz;
        if (dx->data) {
            part.in[1] = *w;
            part.out[0] = tt__rows_of(dx, r, n);
            part.add[0] = l->add[1];
            TT__K(run_LINEAR_DX)(&part);
        }
        part.in[1] = xs;
        part.out[0] = l->out[3];
        part.out[1] = l->out[4];
        part.add[0] = l->add[3] || r > 0;
        part.add[1] = l->add[4] || r > 0;
        TT__K(run_LINEAR_DW)(&part);
    }
    TT__K(sum_losses)(l, targets);
    return TT_OK;
}

TT__ROWS_FN(squared_error_rows)
{
    float *row_loss = (float *)l->workspace, *row_right = row_loss + l->in[0].rows;
    int64_t n = l->in[0].cols;
    for (int64_t r = from; r < to; r++) {
        const float *x = TT__K(row_in)(&l->in[0], r, scratch, 1);
        const float *y = TT__K(row_in)(&l->in[1], r, scratch, 2);
        tt__vf s = TT__K(zero)();
        for (int64_t c = 0; c < n; c += TT__LANES) {
            tt__vf d = TT__K(load_n)(x + c, n - c) - TT__K(load_n)(y + c, n - c);
            s = TT__K(fma)(d, d, s);
        }
        row_loss[r] = TT__K(sum)(s) / (float)n;
        row_right[r] = 0;
    }
}

TT__FN tt_status TT__K(run_MEAN_SQUARED_ERROR)(const tt__launch *l)
{
    tt__for_rows(l, &l->in[0], tt__align_up((size_t)l->in[0].rows * 8), TT__K(squared_error_rows));
    TT__K(sum_losses)(l, NULL);
    return TT_OK;
}

TT__ROW_FN(row_MEAN_SQUARED_ERROR_BACKWARD)
{
    const float w = 2 * TT__K(loss_factor)(l, &l->in[4]) * TT__K(row_weight)(l, 3, r) / (float)n;
    TT__K(axpby)(y, w, x[0], -w, x[1], n);
}

TT__RUN_MAP(MEAN_SQUARED_ERROR_BACKWARD, 1, 2)

/* ------------------------------------------------------------------------------------------------ optimizers
   Parameters, gradients and state are contiguous, so they are vectors here, in chunks of TT__CHUNK. */

/* Elements [from, from + n) of m as floats, in place or in row k of scratch. */
TT__INLINE float *TT__K(chunk_in)(const tt__mat *m, int64_t from, int64_t n, float *scratch, int k)
{
    float *row = TT__K(scratch_row)(scratch, TT__CHUNK, k);
    if (m->dtype == TT_F32) return (float *)m->data + from;
    const uint16_t *h = (const uint16_t *)m->data + from;
    /* of what is most likely this thread's next chunk */
    for (int64_t c = 0; c < n; c += 32) __builtin_prefetch(h + n + c, 0, 2);
    TT__K(row_widen)(row, h, m->dtype, n);
    return row;
}

/* x to 16 bits by stochastic rounding; group: of h's first eight elements; its low word does not wrap. */
TT__INLINE void TT__K(round_row)(uint16_t *h, const float *x, const tt_dtype dtype, int64_t n,
                                 const uint64_t keys[20], uint64_t group)
{
    const tt__vu groups = TT__K(philox_groups)() + (uint32_t)group,
                 high = TT__K(splat_u)((uint32_t)(group >> 32));
    uint16_t numbers[8 * TT__LANES], some[TT__LANES];
    for (int64_t c = 0; c < n; c += 8 * TT__LANES) {
        int64_t i = 0, left = tt__min(n - c, 8 * TT__LANES);
        TT__K(philox_numbers)(keys, groups + (uint32_t)(c / 8), high, numbers);
        for (; i + TT__LANES <= left; i += TT__LANES)
            TT__K(round_16)(h + c + i, TT__K(load)(x + c + i), TT__K(load_h)(numbers + i), dtype);
        if (i == left) continue;
        TT__K(round_16)(some, TT__K(load_some)(x + c + i, left - i), TT__K(load_h)(numbers + i), dtype);
        memcpy(h + c + i, some, (size_t)(left - i) * 2);
    }
}

/* Back into 16 bits, so that steps smaller than half a unit in the last place survive on average (Gupta et
   al., "Deep learning with limited numerical precision", 2015): element e is rounded up with a probability
   equal to the dropped fraction, by number e % 8 of Philox counter {e / 8}. `which`: the tensor's number. */
TT__OUTLINE void TT__K(chunk_out)(const tt__launch *l, const tt__mat *m, int64_t from, int64_t n,
                                  const float *x, uint32_t which)
{
    uint16_t *h = (uint16_t *)m->data + from;
    uint64_t keys[20];
    if (m->dtype == TT_F32) return;
    const tt__run *run = TT__RUN_OF(l);
    tt__philox_keys(tt__stream_key(run->seed, TT__RANDOM_ROUNDING, (uint64_t)run->step,
                                   (uint64_t)which << 32 | l->instr->random), keys);
    if (m->dtype == TT_BF16) TT__K(round_row)(h, x, TT_BF16, n, keys, (uint64_t)from / 8);
    else TT__K(round_row)(h, x, TT_F16, n, keys, (uint64_t)from / 8);
}

TT__ROWS_FN(sum_squares_rows)
{
    const float *g = TT__K(chunk_in)(&l->in[0], from, to - from, scratch, 0);
    float rest, squares = TT__K(squares)(g, to - from, 0, &rest);
    ((double *)l->workspace)[from / TT__CHUNK] = (double)squares + rest;
}

TT__FN tt_status TT__K(run_SUM_SQUARES)(const tt__launch *l)
{
    int64_t n = tt__elements(&l->in[0]), chunks = tt__ceil_div(n, TT__CHUNK);
    double sum = 0;
    tt__for_chunks(l, n, TT__CHUNK, TT__CHUNK, tt__align_up((size_t)chunks * 8), TT__K(sum_squares_rows));
    for (int64_t k = 0; k < chunks; k++) sum += ((const double *)l->workspace)[k];
    *(float *)l->out[0].data = (float)sum;
    return TT_OK;
}

TT__FN tt_status TT__K(run_ADD_COUNTS)(const tt__launch *l)
{
    const float *counts = (const float *)l->in[0].data;
    double *totals = (double *)l->out[0].data; /* tt__totals */
    for (int k = 0; k < 3; k++) totals[k] = (l->add[0] ? totals[k] : 0) + counts[k];
    return TT_OK;
}

/* Global norm and the factor on all gradients (as torch.nn.utils.clip_grad_norm_). */
TT__FN tt_status TT__K(run_CLIP)(const tt__launch *l)
{
    const float *squares = (const float *)l->in[0].data;
    const tt__totals *totals = (const tt__totals *)l->in[1].data;
    const tt__run *run = TT__RUN_OF(l);
    double sum = 0, clip_norm = l->instr->attr.clip_norm;
    for (int64_t k = 0; k < l->in[0].rows; k++) sum += squares[k];
    const double loss_scale = l->in[2].data ? ((const tt__scale *)l->in[2].data)->scale : 1;
    double scale = (run ? run->loss_norm / totals->targets : 1) / loss_scale;
    double norm = sqrt(sum) * scale, factor = scale;
    if (!isfinite(totals->loss) || !(totals->targets > 0)) norm = NAN; /* nothing is updated */
    if (clip_norm > 0 && clip_norm < norm + 1e-6) factor *= clip_norm / (norm + 1e-6);
    ((tt__clipped *)l->out[0].data)->norm = (float)norm;
    ((tt__clipped *)l->out[0].data)->factor = (float)factor;
    return TT_OK;
}

/* The loss scale falls where gradients overflowed, and rises after `interval` steps where none did. It stays
   where it is not at fault (the loss is not finite, or nothing was counted) or cannot help (it is 1). */
TT__FN tt_status TT__K(run_LOSS_SCALE)(const tt__launch *l)
{
    const tt__totals *totals = (const tt__totals *)l->in[1].data;
    const tt__attr *a = &l->instr->attr;
    tt__scale *s = (tt__scale *)l->out[0].data;
    if (!isfinite(totals->loss) || !(totals->targets > 0)) return TT_OK;
    if (isfinite(((const tt__clipped *)l->in[0].data)->norm)) {
        if (++s->good_steps < a->interval) return TT_OK;
        s->scale = fmin(s->scale * a->growth, TT__LOSS_SCALE_MOST);
    } else {
        if (s->scale * a->backoff < 1) return TT_OK;
        s->scale *= a->backoff;
        s->skipped++;
    }
    s->good_steps = 0;
    return TT_OK;
}

/* The backend's copies wait for nothing, so that there is nothing to be waited for. */
TT__FN tt_status TT__K(run_COPY)(const tt__launch *l)
{
    size_t bytes = (size_t)l->in[0].cols * tt_dtype_bytes(l->in[0].dtype);
    for (int64_t r = 0; r < l->in[0].rows; r++) memcpy(tt__at(&l->out[0], r), tt__at(&l->in[0], r), bytes);
    return TT_OK;
}

TT__FN tt_status TT__K(run_WAIT)(const tt__launch *l) { (void)l; return TT_OK; }

TT__ROWS_FN(adam_rows)
{
    const tt__attr *a = &l->instr->attr;
    const tt__run *run = TT__RUN_OF(l);
    int64_t n = to - from, c = 0;
    double t = (double)run->step + 1;
    const float *g = TT__K(chunk_in)(&l->in[0], from, n, scratch, 0);
    float *p = TT__K(chunk_in)(&l->out[0], from, n, scratch, 1);
    float *m = TT__K(chunk_in)(&l->out[1], from, n, scratch, 2);
    float *v = TT__K(chunk_in)(&l->out[2], from, n, scratch, 3);
    float factor = ((const float *)l->in[1].data)[1], lr = run->lr, b1 = a->beta1, b2 = a->beta2;
    float step = (float)(lr / (1 - pow(b1, t))), root = (float)(1 / sqrt(1 - pow(b2, t)));
    float l2 = a->decoupled ? 0 : a->weight_decay, keep = a->decoupled ? 1 - lr * a->weight_decay : 1;
    for (; c < n; c += TT__LANES) {
        tt__vf P = TT__K(load_n)(p + c, n - c), G = TT__K(load_n)(g + c, n - c) * factor + P * l2;
        tt__vf M = TT__K(load_n)(m + c, n - c) * b1 + G * (1 - b1),
               V = TT__K(load_n)(v + c, n - c) * b2 + G * G * (1 - b2);
        P = P * keep - M * step / (TT__K(sqrt)(V) * root + a->eps);
        TT__K(store_n)(p + c, P, n - c);
        TT__K(store_n)(m + c, M, n - c);
        TT__K(store_n)(v + c, V, n - c);
    }
    TT__K(chunk_out)(l, &l->out[0], from, n, p, 0);
    TT__K(chunk_out)(l, &l->out[1], from, n, m, 1);
    TT__K(chunk_out)(l, &l->out[2], from, n, v, 2);
}

TT__ROWS_FN(sgd_rows)
{
    const tt__attr *a = &l->instr->attr;
    const tt__run *run = TT__RUN_OF(l);
    int64_t n = to - from;
    const float *g = TT__K(chunk_in)(&l->in[0], from, n, scratch, 0);
    float *p = TT__K(chunk_in)(&l->out[0], from, n, scratch, 1);
    float *m = l->out[1].data ? TT__K(chunk_in)(&l->out[1], from, n, scratch, 2) : NULL;
    float factor = ((const float *)l->in[1].data)[1], lr = run->lr;
    for (int64_t c = 0; c < n; c += TT__LANES) {
        tt__vf P = TT__K(load_n)(p + c, n - c);
        tt__vf G = TT__K(load_n)(g + c, n - c) * factor + P * a->weight_decay;
        if (m) {
            tt__vf M = TT__K(load_n)(m + c, n - c) * a->beta1 + G;
            TT__K(store_n)(m + c, M, n - c);
            G = a->nesterov ? G + M * a->beta1 : M;
        }
        TT__K(store_n)(p + c, P - G * lr, n - c);
    }
    TT__K(chunk_out)(l, &l->out[0], from, n, p, 0);
    if (m) TT__K(chunk_out)(l, &l->out[1], from, n, m, 1);
}

/* Updates all chunks, unless the norm of the gradients is not finite. */
TT__INLINE tt_status TT__K(update)(const tt__launch *l, tt__rows_fn rows)
{
    if (!isfinite(((const tt__clipped *)l->in[1].data)->norm)) return TT_OK;
    return tt__for_chunks(l, tt__elements(&l->out[0]), TT__CHUNK, TT__CHUNK, 0, rows);
}

TT__FN tt_status TT__K(run_ADAM)(const tt__launch *l) { return TT__K(update)(l, TT__K(adam_rows)); }
TT__FN tt_status TT__K(run_SGD)(const tt__launch *l) { return TT__K(update)(l, TT__K(sgd_rows)); }

/* --------------------------------------------------------------------------------------- the pass's table */

TT__TABLE const tt__isa_table TT__K(isa_table) = {
    TT__XSTR(TT__ISA),
    {
        TT__K(peak_loop),
#ifdef TT__DOT
        TT__K(peak_dot),
#else
        NULL,
#endif
#ifdef TT__TILES
        TT__K(peak_tiles),
#else
        NULL,
#endif
    },
    {
#define TT__RUN(OP, name, inputs, outputs, flags) TT__K(run_##OP),
        TT__OPS(TT__RUN)
#undef TT__RUN
    },
};

#endif /* TT__KERNELS_ELSEWHERE */

/* What differs from pass to pass, but TT__LANES, of which the rest of the file sees that it is in a pass. */
#undef TT__ISA
#undef TT__TARGET
#undef TT__NEON
#undef TT__WIDEN_F16
#undef TT__NARROW_F16
#undef TT__DOT
#undef TT__DOT_TARGET
#undef TT__DOT_DEPTH
#undef TT__TILES

#endif /* TT__LANES */

#if defined(TT__IMPLEMENT) && !defined(TT__LANES) && !defined(TT__KERNELS_ONLY)

/* ===========================================================================================================
   CONTEXT                                                                                           >>context
   Devices, contexts, parameters, and the arenas that hold memory. Uses all above.
   ======================================================================================================== */

/* ------------------------------------------------------------------------------------------------- memory */

/* Where an arena has a parameter. */
typedef struct tt__home {
    size_t offset;      /* of its persistent region; TT__NO_PLACE: it has none */
    tt_dtype dtype;
    tt__part part;      /* of the parameter, that lies there */
} tt__home;

/* Memory of a program and those that share it: persistent bytes, then the transient bytes of the largest. */
typedef struct tt__arena {
    int references;     /* programs, and parameters whose values it holds */
    struct tt_program *programs; /* a list */
    const tt__device_kind *kind;
    int index;          /* of the device among those of its kind */
    tt__device *device; /* NULL until allocated */
    char *memory;       /* NULL until allocated */
    char *bounce;       /* TT__BOUNCE bytes of the host's, on the way to memory of the device; else NULL */
    size_t persistent, transient; /* persistent: first the kind's resident workspace */
    size_t budget;      /* the least memory_budget of its programs; 0: none */
    tt__home *home;     /* by the index of the parameter */
    int n_homes;
    const void *results_of; /* the program whose last run's outputs are in the transient part; NULL: none's */
} tt__arena;

static void tt__arena_release(tt_context *ctx, tt__arena *a)
{
    if (!a || --a->references > 0) return;
    if (a->memory) a->kind->backend->release(a->device, a->memory);
    if (a->bounce) a->kind->backend->release_host(a->device, a->bounce);
    tt__free(ctx, a->home);
    tt__free(ctx, a);
}

/* The home that an arena has for a parameter, NULL if there is none. */
static const tt__home *tt__home_in(const tt__arena *a, int param)
{
    return a && param < a->n_homes && a->home[param].offset != TT__NO_PLACE ? &a->home[param] : NULL;
}

/* Room for a home of each parameter. */
static tt_status tt__homes_grow(tt_context *ctx, tt__arena *a)
{
    if (ctx->n_params <= a->n_homes) return TT_OK;
    tt__home *home = (tt__home *)tt__realloc(ctx, a->home, sizeof *home * (size_t)ctx->n_params);
    if (!home) return TT_ERR_MEMORY;
    for (int k = a->n_homes; k < ctx->n_params; k++) home[k].offset = TT__NO_PLACE;
    a->home = home;
    a->n_homes = ctx->n_params;
    return TT_OK;
}

/* The arena in which a program of arena `a` finds a parameter: the holder, or, where no program of the kind
   can run and so none may hold it, a itself. NULL: there is none yet. */
static tt__arena *tt__home_arena(const tt__device_kind *kind, tt__arena *a, const tt_param *p)
{
    return kind->backend ? p->holder : tt__home_in(a, p->index) ? a : NULL;
}

/* ------------------------------------------------------------------------------------------------ devices */

/* Elements that tensors stream through between files, host and device, and bytes of the buffer for them. */
#define TT__PIECE 16384
#define TT__BOUNCE (sizeof(float) * TT__PIECE)

/* The CPU's backend, of one device: the context's. */
static tt__device *tt__cpu_open(tt_context *ctx, int index, char *error, size_t capacity)
{
    if (index == 0) return (tt__device *)(void *)&ctx->cpu;
    snprintf(error, capacity, "there is only cpu:0");
    return NULL;
}

static tt_context *tt__cpu_context(tt__device *d) { return ((tt__cpu *)(void *)d)->ctx; }
static void tt__cpu_close(tt__device *d) { (void)d; }
static const char *tt__cpu_error(tt__device *d) { return tt__cpu_context(d)->error; }
static void *tt__cpu_allocate(tt__device *d, size_t bytes) { return tt__alloc(tt__cpu_context(d), bytes); }
static void tt__cpu_release(tt__device *d, void *memory) { tt__free(tt__cpu_context(d), memory); }

static tt_status tt__cpu_copy(tt__device *d, void *to, const void *from, size_t bytes)
{
    (void)d;
    memcpy(to, from, bytes);
    return TT_OK;
}

/* Nothing is left to wait for, so events are empty. */
static void tt__cpu_release_event(tt__device *d, void *event) { (void)d; (void)event; }

static tt_status tt__cpu_mark(tt__device *d, int stream, void **event)
{
    (void)stream;
    *event = d;
    return TT_OK;
}

static tt_status tt__cpu_after(tt__device *d, int stream, void *event)
{
    (void)d; (void)stream; (void)event;
    return TT_OK;
}

static tt_status tt__cpu_fill(tt__device *d, void *memory, int byte, size_t bytes)
{
    (void)d;
    memset(memory, byte, bytes);
    return TT_OK;
}

/* Elements [first, first + n) of an initialiser's, four from each Philox block. first: a multiple of 4. */
static void tt__init_values(tt_init init, uint64_t key, int64_t first, int64_t n, float *to)
{
    for (int64_t k = 0; k < n; k += 4) {
        float four[4] = {0, 0, 0, 0};
        uint64_t block = (uint64_t)(first + k) / 4;
        if (init.kind == TT_INIT_ONES) four[0] = four[1] = four[2] = four[3] = 1;
        if (init.kind == TT_INIT_NORMAL) {
            tt__normal4(key, block, four);
            for (int c = 0; c < 4; c++) four[c] *= init.scale;
        }
        if (init.kind == TT_INIT_UNIFORM) {
            uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), 0, 0}, u[4];
            tt__philox(counter, key, u);
            for (int c = 0; c < 4; c++) four[c] = (2 * tt__uniform(u[c]) - 1) * init.scale;
        }
        memcpy(to + k, four, sizeof(float) * (size_t)tt__min(4, n - k));
    }
}

static tt_status tt__cpu_init(tt__device *d, void *memory, tt_dtype dtype, int64_t n, tt_init init,
                              uint64_t key)
{
    float piece[4096];
    (void)d;
    for (int64_t first = 0, m; first < n; first += m) {
        m = tt__min(TT__COUNT(piece), n - first);
        tt__init_values(init, key, first, m, piece);
        tt__convert((char *)memory + (size_t)first * tt_dtype_bytes(dtype), dtype, piece, TT_F32, (size_t)m);
    }
    return TT_OK;
}

static tt_status tt__cpu_wait(tt__device *d) { (void)d; return TT_OK; }
static tt_status tt__cpu_launch(const tt__launch *l, int n)
{
    tt_status status = TT_OK;
    for (int k = 0; k < n && status == TT_OK; k++) status = tt__cpu_of(l)->isa->run[l[k].instr->op](&l[k]);
    return status;
}

static const char *tt__cpu_refuses(int index, const tt__launch *l)
{
    (void)index; (void)l;
    return NULL;
}

/* The first line of a file that begins with `key`, without that and a colon; "" if there is none. */
static void tt__line_of(const char *path, const char *key, char to[128])
{
    char line[1024];
    FILE *f = fopen(path, "r");
    *to = 0;
    while (f && !*to && fgets(line, sizeof line, f)) {
        const char *from = *key ? strchr(line, ':') : line;
        if (!from || strncmp(line, key, strlen(key)) != 0) continue;
        from += strspn(from, ": \t");
        snprintf(to, 128, "%.*s", (int)strcspn(from, "\n"), from);
    }
    if (f) fclose(f);
}

static void tt__cpu_describe(tt_context *ctx, int index, char *to, size_t capacity);

static const tt__backend tt__cpu_backend = {
    tt__cpu_open, tt__cpu_close, tt__cpu_error, tt__cpu_allocate, tt__cpu_release, tt__cpu_allocate,
    tt__cpu_release, tt__cpu_copy, tt__cpu_fill, tt__cpu_init, tt__cpu_copy, tt__cpu_wait, tt__cpu_mark,
    tt__cpu_after, tt__cpu_release_event, tt__cpu_launch, NULL, NULL, NULL, NULL, tt__cpu_refuses,
    tt__cpu_describe,
};

static const tt__device_kind tt__device_kinds[TT__KINDS] = {
    {"cpu", &tt__cpu_backend, TT__ALIGN, 0, true, tt__cpu_workspace},
#ifdef TINYTRAIN_CUDA
    {"cuda", &tt__cuda_backend, TT__CUDA_ALIGN, TT__CUDA_RESIDENT, false, tt__cuda_workspace},
#else
    {"cuda", NULL, TT__CUDA_ALIGN, TT__CUDA_RESIDENT, false, tt__cuda_workspace},
#endif
};

/* "cuda" for the first of a kind, "cuda:1" for the second, and so on. */
static const char *tt__device_name(const tt__device_kind *kind, int index, char to[32])
{
    if (index) snprintf(to, 32, "%s:%d", kind->name, index);
    else snprintf(to, 32, "%s", kind->name);
    return to;
}

/* The device of a kind that has a backend, opened when first asked for; NULL after tt__fail. */
static tt__device *tt__open_device(tt_context *ctx, const tt__device_kind *kind, int index)
{
    char why[512] = "no reason given", name[32];
    tt__device **d = &ctx->devices[kind - tt__device_kinds][index];
    if (!*d && !(*d = kind->backend->open(ctx, index, why, sizeof why)))
        tt__fail(ctx, TT_ERR_DEVICE, "device '%s' cannot be opened: %s", tt__device_name(kind, index, name),
                 why);
    return *d;
}

/* Passes on what a function of a device returned; with the device's sentence if that is an error. */
static tt_status tt__device_status(tt_context *ctx, const tt__arena *a, tt_status status)
{
    if (status == TT_OK || a->kind->host) return status; /* the CPU's functions have called tt__fail */
    char name[32];
    return tt__fail(ctx, status, "device '%s': %s", tt__device_name(a->kind, a->index, name),
                    a->kind->backend->error(a->device));
}

/* Reads n numbers of `dtype` from memory of an arena, which need not be the host's, and converts them. */
static tt_status tt__read_memory(tt_context *ctx, const tt__arena *a, void *to, tt_dtype to_type,
                                 const void *memory, tt_dtype dtype, size_t n)
{
    const tt__backend *b = a->kind->backend;
    const size_t item = tt_dtype_bytes(dtype), to_item = tt_dtype_bytes(to_type), most = TT__PIECE / 2;
    float piece[TT__PIECE / 4];
    tt_status status = TT_OK;
    if (a->kind->host) tt__convert(to, to_type, memory, dtype, n);
    else if (dtype == to_type) status = b->read(a->device, to, memory, n * item);
    else
        for (size_t done = 0, m; done < n && status == TT_OK; done += m) {
            m = n - done < most ? n - done : most;
            status = b->read(a->device, piece, (const char *)memory + done * item, m * item);
            if (status == TT_OK) tt__convert((char *)to + done * to_item, to_type, piece, dtype, m);
        }
    return tt__device_status(ctx, a, status);
}

/* Converts n numbers to `dtype` and writes them to memory of an arena. */
static tt_status tt__write_memory(tt_context *ctx, const tt__arena *a, void *memory, tt_dtype dtype,
                                  const void *from, tt_dtype from_type, size_t n)
{
    const tt__backend *b = a->kind->backend;
    const size_t item = tt_dtype_bytes(dtype);
    tt_status status = TT_OK;
    if (a->kind->host) tt__convert(memory, dtype, from, from_type, n);
    for (size_t done = a->kind->host ? n : 0, m; done < n && status == TT_OK; done += m) {
        m = n - done < TT__PIECE ? n - done : TT__PIECE;
        tt__convert(a->bounce, dtype, (const char *)from + done * tt_dtype_bytes(from_type), from_type, m);
        status = b->write(a->device, (char *)memory + done * item, a->bounce, m * item);
        if (status == TT_OK) status = b->wait(a->device);
    }
    return tt__device_status(ctx, a, status);
}

/* The option, or the environment variable where it is NULL or ""; NULL where that is empty too. */
static const char *tt__option(const char *option, const char *variable)
{
    if (!option || !*option) option = getenv(variable);
    return option && *option ? option : NULL;
}

/* The kind of device that a name is of, and *index among them: "cuda" and "cuda:0" are the first. NULL after
   tt__fail if there is no such device. Without a name it is TINYTRAIN_DEVICE's, or "cpu". */
static const tt__device_kind *tt__find_device(tt_context *ctx, const char *name, int *index)
{
    char known[128];
    tt__text text = {known, sizeof known, 0};
    name = tt__option(name, "TINYTRAIN_DEVICE");
    if (!name) name = "cpu";
    for (int k = 0; k < TT__KINDS; k++) {
        const tt__device_kind *kind = &tt__device_kinds[k];
        const size_t length = strlen(kind->name);
        tt__print(&text, "%s%s", k ? " or " : "", kind->name);
        if (strncmp(name, kind->name, length) != 0 || (name[length] && !strchr(":*", name[length]))) continue;
        const char *number = name + length + (name[length] == ':');
        const size_t digits = strspn(number, "0123456789");
        *index = 0;
        if (!name[length]) return kind;
        if (name[length] == '*' || number[digits] == ',')
            tt__fail(ctx, TT_ERR_UNSUPPORTED, "device '%s': a program runs on one device for now: use %s",
                     name, kind->name);
        else if (!digits || digits > 4 || number[digits] || (*index = atoi(number)) >= TT__DEVICES)
            tt__fail(ctx, TT_ERR_ARGUMENT, "device '%s': after '%s:' comes a number from 0 to %d", name,
                     kind->name, TT__DEVICES - 1);
        else if (kind->host && *index)
            tt__fail(ctx, TT_ERR_ARGUMENT, "device '%s' is not there: the CPU is one device, %s", name,
                     kind->name);
        else return kind;
        return NULL;
    }
    tt__fail(ctx, TT_ERR_UNSUPPORTED, "device '%s' is unknown: use %s", name, known);
    return NULL;
}

tt_status tt_device_text(tt_context *ctx, const char *name, char *to, size_t capacity)
{
    int index;
    const tt__device_kind *kind = tt__find_device(ctx, name, &index);
    if (capacity) *to = 0;
    if (!kind) return ctx->status;
    if (!kind->backend)
        return tt__fail(ctx, TT_ERR_UNSUPPORTED, "this build has no code for device '%s': define "
                        "TINYTRAIN_CUDA and link tinytrain_cuda.cu, as `make cuda` does", kind->name);
    if (capacity) kind->backend->describe(ctx, index, to, capacity);
    return tt__open_device(ctx, kind, index) ? TT_OK : ctx->status;
}

/* ------------------------------------------------------------------------------------------------ context */

static const tt__isa_table *tt__choose_isa(const char *name)
{
    const tt__isa_table *table[3] = {&tt__isa_table_portable, NULL, NULL};
#ifdef TT__HAS_AVX2
    unsigned a, b, c = 0, d;
    bool avx2 = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C); /* __builtin_cpu_supports may not know it */
    __builtin_cpu_init();
    avx2 = avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2) table[1] = &tt__isa_table_avx2;
#endif
#ifdef TT__HAS_AVX512
    if (table[1] && TT__AVX512_HERE) table[2] = &tt__isa_table_avx512;
#endif
#ifdef TT__HAS_NEON
    table[1] = &tt__isa_table_neon;
#endif
    for (int k = TT__COUNT(table) - 1; k >= 0; k--)
        if (table[k] && (!name || strcmp(name, table[k]->name) == 0)) return table[k];
    return NULL;
}

static const char *const tt__bf16_name[] = {"convert", "dot", "tiles"};

/* Dot products of bf16 run at twice the rate of fp32 on AMD's CPUs, at four times on Arm's (see tt__bfmmla),
   and at half of it on Intel's, where tiles run at 16 times. */
static bool tt__choose_bf16(const tt__isa_table *isa, const char *name, tt__bf16 *how)
{
    bool has[TT__COUNT(tt__bf16_name)] = {true, false, false};
    *how = TT__BF16_CONVERT;
#ifdef TT__AVX512_DOT
    has[TT__BF16_DOT] = isa == &tt__isa_table_avx512 && TT__AVX512_DOT_HERE;
    if (has[TT__BF16_DOT] && __builtin_cpu_is("amd")) *how = TT__BF16_DOT;
#endif
#ifdef TT__TILES_HERE
    const bool wanted = !name || strcmp(name, "tiles") == 0; /* Linux is asked for them only then */
    has[TT__BF16_TILES] = wanted && isa == &tt__isa_table_avx512 && TT__TILES_HERE;
    if (has[TT__BF16_TILES]) *how = TT__BF16_TILES;
#endif
#ifdef TT__NEON_DOT_HERE
    has[TT__BF16_DOT] = isa == &tt__isa_table_neon && TT__NEON_DOT_HERE;
    if (has[TT__BF16_DOT]) *how = TT__BF16_DOT;
#endif
    (void)isa;
    for (int k = 0; name; k++) {
        if (k == TT__COUNT(tt__bf16_name)) return false;
        if (strcmp(name, tt__bf16_name[k]) == 0) return *how = (tt__bf16)k, has[k];
    }
    return true;
}

tt_context *tt_open(const tt_context_options *options)
{
    tt_context_options o = options ? *options : tt_context_options_default();
    tt_context *ctx = (tt_context *)o.allocator.allocate(o.allocator.user, sizeof *ctx, TT__ALIGN);
    tt_context failed;
    memset(&failed, 0, sizeof failed);
    failed.options = o;
    if (!ctx) {
        tt__log(&failed, TT_LOG_ERROR, "open", "the allocator returned NULL for the context");
        return NULL;
    }
    memset(ctx, 0, sizeof *ctx);
    ctx->options = o;
    ctx->cpu.ctx = ctx;
    pthread_mutex_init(&ctx->mutex, NULL);
    const char *isa = tt__option(o.isa, "TINYTRAIN_ISA"), *bf16 = tt__option(o.bf16, "TINYTRAIN_BF16");
    ctx->cpu.isa = tt__choose_isa(isa);
    if (!ctx->cpu.isa)
        tt__fail(ctx, TT_ERR_UNSUPPORTED, "instruction set '%s' is unknown, or this CPU does not have it: "
                 "use portable, avx2, avx512 or neon", isa);
    else if (!tt__choose_bf16(ctx->cpu.isa, bf16, &ctx->cpu.bf16))
        tt__fail(ctx, TT_ERR_UNSUPPORTED, "bf16 = '%s': use convert, or dot or tiles where kernels (%s) and "
                 "CPU have dot products or tiles of bf16", bf16, ctx->cpu.isa->name);
    else if (o.threads < 0 || o.threads > 256)
        tt__fail(ctx, TT_ERR_ARGUMENT, "threads = %d is not in 0..256", o.threads);
    else ctx->cpu.pool = tt__pool_new(ctx, o.threads ? o.threads : tt__usable_cpus());
    if (ctx->cpu.pool) return ctx;
    tt__log(ctx, TT_LOG_ERROR, "open", "%s", ctx->error);
    pthread_mutex_destroy(&ctx->mutex);
    o.allocator.release(o.allocator.user, ctx, sizeof *ctx);
    return NULL;
}

static void tt__cpu_describe(tt_context *ctx, int index, char *to, size_t capacity)
{
    static const char *const isas[] = {"portable", "avx2", "avx512", "neon"};
    static const char *const text_of_bf16[] = {"converted to fp32", "bf16 dot products", "tiles (AMX)"};
    tt__text text = {to, capacity, 0};
    char line[128], available[128];
    (void)index;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    const char *asked = tt__option(ctx->options.isa, "TINYTRAIN_ISA");
    const char *of = asked ? "which was asked for, of" : "the best of";
    tt__line_of("/proc/cpuinfo", "model name", line);
    tt__print(&text, "processor: %s, %ld online\n", *line ? line : "of unknown name", online);
    tt__print(&text, "instruction set: %s, %s", tt_isa(ctx), of);
    for (int k = 0; k < TT__COUNT(isas); k++) if (tt__choose_isa(isas[k])) tt__print(&text, " %s", isas[k]);
    tt__bf16 how;
    const bool unused = ctx->cpu.bf16 == TT__BF16_CONVERT && tt__choose_bf16(ctx->cpu.isa, "dot", &how);
    tt__print(&text, "; bf16 matrices: %s%s\n", text_of_bf16[ctx->cpu.bf16],
              unused ? ", though there are bf16 dot products" : "");
    tt__print(&text, "threads: %d, %s", tt_threads(ctx),
              ctx->options.threads ? "as the options say" : "all that it may use");
#if defined(__linux__)
    double quota = tt__cgroup_quota("");
    int mask = tt__affinity_cpus();
    if (mask) tt__print(&text, "; the affinity mask allows %d", mask);
    if (isfinite(quota)) tt__print(&text, "; control groups allow the time of %.4g", quota);
    else tt__print(&text, "; control groups set no limit");
#endif
    tt__print(&text, "\n");
    tt__line_of("/proc/meminfo", "MemAvailable", available);
    tt__line_of("/proc/meminfo", "MemTotal", line);
    if (*line && *available)
        tt__print(&text, "memory: %.1f GB, of which %.1f GB are available\n", 1024e-9 * strtod(line, NULL),
                  1024e-9 * strtod(available, NULL));
    tt__line_of("/sys/kernel/mm/transparent_hugepage/enabled", "", line);
    const bool never = strstr(line, "[never]") != NULL;
    if (*line)
        tt__print(&text, "huge pages for large tensors: %s\n", never ? "never, which is slower; madvise in "
                  "/sys/kernel/mm/transparent_hugepage/enabled allows them" : "yes");
}

int tt_threads(const tt_context *ctx) { return ctx->cpu.pool->threads; }
const char *tt_isa(const tt_context *ctx) { return ctx->cpu.isa->name; }
size_t tt_allocated_bytes(const tt_context *ctx) { return ctx->allocated; }

typedef struct tt__peak_job {
    double (*loop)(int64_t rounds, float *sink);
    double flops[256]; /* by task */
} tt__peak_job;

static void tt__peak_task(void *arg, int64_t task, int thread)
{
    tt__peak_job *job = (tt__peak_job *)arg;
    float sink = 1e-3f;
    (void)thread;
    job->flops[task] = job->loop(200000, &sink);
}

double tt_measured_peak(tt_context *ctx)
{
    const int threads = ctx->cpu.pool->threads;
    tt__peak_job job;
    job.loop = ctx->cpu.isa->peak[TT__BF16_CONVERT];
    for (int attempt = 0; attempt < 8 && ctx->measured_peak <= 0; attempt++)
        for (int k = 0; k < 8; k++) { /* the best of several: a busy neighbour can only slow it down */
            double start = tt__seconds(), flops = 0;
            tt__parallel(ctx->cpu.pool, threads, tt__peak_task, &job);
            double seconds = tt__seconds() - start;
            for (int t = 0; t < threads; t++) flops += job.flops[t];
            if (seconds > 0) ctx->measured_peak = fmax(ctx->measured_peak, flops / seconds);
        }
    return ctx->measured_peak;
}

/* --------------------------------------------------------------------------------------------- parameters */

#define TT__HASH_BEGIN 14695981039346656037u /* FNV-1a */
static uint64_t tt__hash_on(uint64_t h, const void *bytes, size_t n)
{
    const unsigned char *b = (const unsigned char *)bytes;
    for (size_t i = 0; i < n; i++) h = (h ^ b[i]) * 1099511628211u;
    return h;
}
static uint64_t tt__hash(const char *text) { return tt__hash_on(TT__HASH_BEGIN, text, strlen(text)); }

/* The slot of a name in the table, or the free slot where it belongs: the first from the name's hash on. */
static uint32_t *tt__param_slot(tt_context *ctx, const char *name)
{
    uint64_t hash = tt__hash(name);
    uint32_t *slots = ctx->param_slots, mask = ctx->n_param_slots - 1;
    uint32_t at = (uint32_t)(hash ^ hash >> 32) & mask;
    while (slots[at] && strcmp(ctx->params[slots[at] - 1]->name, name) != 0) at = (at + 1) & mask;
    return &slots[at];
}

/* Makes room for one name more: at least half of the slots stay free. */
static bool tt__param_slots_grow(tt_context *ctx)
{
    uint32_t n = ctx->n_param_slots ? 2 * ctx->n_param_slots : 64;
    if ((uint32_t)ctx->n_params < ctx->n_param_slots / 2) return true;
    uint32_t *slots = (uint32_t *)tt__calloc(ctx, sizeof *slots * n);
    if (!slots) return false;
    tt__free(ctx, ctx->param_slots);
    ctx->param_slots = slots;
    ctx->n_param_slots = n;
    for (int k = 0; k < ctx->n_params; k++) *tt__param_slot(ctx, ctx->params[k]->name) = (uint32_t)k + 1;
    return true;
}

tt_param *tt_param_find(tt_context *ctx, const char *name)
{
    uint32_t found = ctx->n_params ? *tt__param_slot(ctx, name) : 0;
    return found ? ctx->params[found - 1] : NULL;
}

/* The number of elements of a parameter that is to be made; 0 after tt__fail if it must not be. */
static int64_t tt__new_param_size(tt_context *ctx, const char *name, int ndim, const int64_t *dims)
{
    int64_t size = 1;
    tt_status status = TT_OK;
    if (!name || !*name) status = tt__fail(ctx, TT_ERR_ARGUMENT, "a parameter needs a name");
    else if (tt_param_find(ctx, name))
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "parameter '%s' exists already", name);
    else if (ndim < 1 || ndim > 4)
        status = tt__fail(ctx, TT_ERR_SHAPE, "parameter '%s' has %d dimensions, not 1 to 4", name, ndim);
    for (int k = 0; status == TT_OK && k < ndim; k++) {
        if (dims[k] < 1)
            status = tt__fail(ctx, TT_ERR_SHAPE, "parameter '%s': dimension %d is %lld; each must be at "
                              "least 1", name, k, (long long)dims[k]);
        else if (dims[k] > TT__MOST_ELEMENTS / size)
            status = tt__fail(ctx, TT_ERR_SHAPE, "parameter '%s': with dimension %d, %lld, it has 2^47 "
                              "elements or more", name, k, (long long)dims[k]);
        else size *= dims[k];
    }
    return status == TT_OK ? size : 0;
}

tt_param *tt_param_new(tt_context *ctx, const char *name, int ndim, const int64_t *dims, tt_init init)
{
    const int64_t size = tt__new_param_size(ctx, name, ndim, dims);
    if (!size) return NULL;
    tt_param *p = (tt_param *)tt__calloc(ctx, sizeof *p);
    if (p) p->name = tt__strdup(ctx, name);
    bool room = p && p->name && TT__GROW(ctx, ctx->params, ctx->n_params, ctx->cap_params) &&
                tt__param_slots_grow(ctx);
    if (!room) {
        if (p) tt__free(ctx, p->name);
        tt__free(ctx, p);
        return NULL;
    }
    p->ctx = ctx;
    p->index = ctx->n_params;
    p->ndim = ndim;
    memcpy(p->dims, dims, sizeof *dims * (size_t)ndim);
    p->size = size;
    p->init = init;
    ctx->params[ctx->n_params++] = p;
    *tt__param_slot(ctx, name) = (uint32_t)ctx->n_params;
    return p;
}

static void tt__param_drop_source(tt_param *p)
{
    if (p->release) p->release(p->ctx, p->source);
    p->read = NULL;
    p->release = NULL;
    p->source = NULL;
}

/* Undoes the creation of all parameters but the first `count`; no tape may know them. The latest goes first,
   so that no search for a name that stays passes over a slot that is freed. */
static void tt__params_undo(tt_context *ctx, int count)
{
    while (ctx->n_params > count) {
        tt_param *last = ctx->params[ctx->n_params - 1];
        *tt__param_slot(ctx, last->name) = 0;
        ctx->n_params--;
        tt__param_drop_source(last);
        tt__arena_release(ctx, last->holder);
        tt__free(ctx, last->name);
        tt__free(ctx, last);
    }
}

const char *tt_param_name(const tt_param *p) { return p->name; }
int tt_param_ndim(const tt_param *p) { return p->ndim; }
const int64_t *tt_param_dims(const tt_param *p) { return p->dims; }
int64_t tt_param_size(const tt_param *p) { return p->size; }
bool tt_param_frozen(const tt_param *p) { return p->frozen; }

int tt_param_freeze(tt_context *ctx, const char *pattern, bool frozen)
{
    int n = 0;
    for (int k = 0; k < ctx->n_params; k++) {
        if (!tt__match(pattern, ctx->params[k]->name)) continue;
        ctx->params[k]->frozen = frozen;
        n++;
    }
    return n;
}

static const tt__home *tt__param_home(const tt_param *p) { return tt__home_in(p->holder, p->index); }

/* Its values, NULL until the arena that holds them is allocated. */
static char *tt__param_memory(const tt_param *p)
{
    return p->holder && p->holder->memory ? p->holder->memory + tt__param_home(p)->offset : NULL;
}

static uint64_t tt__init_key(const tt_param *p)
{
    return tt__stream_key(p->ctx->options.seed, TT__RANDOM_INIT, tt__hash(p->name), 0);
}

/* Elements [first, first + n) of p, from its source. first: a multiple of 4. */
static tt_status tt__param_read_source(const tt_param *p, int64_t first, int64_t n, float *to)
{
    if (p->read) return p->read(p->source, first, n, to);
    tt__float_mode mode = tt__float_default();
    tt__init_values(p->init, tt__init_key(p), first, n, to);
    tt__float_restore(mode);
    return TT_OK;
}

/* Elements [first, first + n) of p, from memory or, without it, its source. first: a multiple of 4. */
static tt_status tt__param_read(const tt_param *p, int64_t first, int64_t n, float *to)
{
    const char *memory = tt__param_memory(p);
    if (!memory) return tt__param_read_source(p, first, n, to);
    const tt_dtype dtype = tt__param_home(p)->dtype;
    memory += (size_t)first * tt_dtype_bytes(dtype);
    return tt__read_memory(p->ctx, p->holder, to, TT_F32, memory, dtype, (size_t)n);
}

/* Refuses finite numbers that f16 would make infinite. */
static tt_status tt__param_fits(const tt_param *p, const float *values, int64_t first, int64_t n)
{
    const bool narrow = tt__param_home(p)->dtype == TT_F16;
    for (int64_t k = 0; k < n && narrow; k++)
        if (fabsf(values[k]) >= 65520 && isfinite(values[k]))
            return tt__fail(p->ctx, TT_ERR_ARGUMENT, "parameter '%s': element %lld is %g, more than f16 can "
                            "hold (65504): use precision 16-mixed or bf16-true", p->name,
                            (long long)(first + k), (double)values[k]);
    return TT_OK;
}

/* Fills the memory of p from its source, which stays, in case another parameter fails. `piece` has TT__PIECE
   floats. An initialiser whose numbers need no check writes where they stay. */
static tt_status tt__param_fill(const tt_param *p, float *piece)
{
    char *memory = tt__param_memory(p);
    const tt__arena *a = p->holder;
    const tt_dtype dtype = tt__param_home(p)->dtype;
    /* f16 can hold what is at most this: normal numbers are up to sqrt(-2 log(2^-25)) = 5.9 deviations. */
    const double most = fabs((double)p->init.scale) * (p->init.kind == TT_INIT_NORMAL ? 6 : 1);
    const bool fits = dtype != TT_F16 || p->init.kind < TT_INIT_NORMAL || most < 65504;
    tt_status status = TT_OK;
    tt__float_mode mode = tt__float_default();
    if (!p->read && fits) {
        status = a->kind->backend->init(a->device, memory, dtype, p->size, p->init, tt__init_key(p));
        tt__float_restore(mode);
        return tt__device_status(p->ctx, a, status);
    }
    for (int64_t first = 0; first < p->size && status == TT_OK; first += TT__PIECE) {
        const int64_t n = tt__min(TT__PIECE, p->size - first);
        char *to = memory + (size_t)first * tt_dtype_bytes(dtype);
        status = tt__param_read_source(p, first, n, piece);
        if (status == TT_OK) status = tt__param_fits(p, piece, first, n);
        if (status == TT_OK) status = tt__write_memory(p->ctx, a, to, dtype, piece, TT_F32, (size_t)n);
    }
    tt__float_restore(mode);
    return status;
}

static tt_status tt__read_copy(void *source, int64_t first, int64_t n, float *to)
{
    memcpy(to, (const float *)source + first, sizeof(float) * (size_t)n);
    return TT_OK;
}

tt_status tt_param_set(tt_param *p, const float *values)
{
    char *memory = tt__param_memory(p);
    if (memory) {
        tt_status status = tt__param_fits(p, values, 0, p->size);
        if (status != TT_OK) return status;
        const tt_dtype dtype = tt__param_home(p)->dtype;
        return tt__write_memory(p->ctx, p->holder, memory, dtype, values, TT_F32, (size_t)p->size);
    }
    float *copy = (float *)tt__alloc(p->ctx, sizeof(float) * (size_t)p->size);
    if (!copy) return TT_ERR_MEMORY;
    memcpy(copy, values, sizeof(float) * (size_t)p->size);
    tt__param_drop_source(p);
    p->read = tt__read_copy;
    p->release = tt__free;
    p->source = copy;
    return TT_OK;
}

tt_status tt_param_get(const tt_param *p, float *values) { return tt__param_read(p, 0, p->size, values); }

void tt_close(tt_context *ctx)
{
    if (!ctx) return;
    tt__params_undo(ctx, 0);
    for (int kind = 0; kind < TT__KINDS; kind++)
        for (int k = 0; k < TT__DEVICES; k++)
            if (ctx->devices[kind][k]) tt__device_kinds[kind].backend->close(ctx->devices[kind][k]);
    tt__free(ctx, ctx->params);
    tt__free(ctx, ctx->param_slots);
    tt__pool_free(ctx, ctx->cpu.pool);
    if (ctx->allocated)
        tt__log(ctx, TT_LOG_WARNING, "close", "%zu bytes are still held: free programs, tapes and trainers "
                "before the context", ctx->allocated);
    tt_allocator allocator = ctx->options.allocator;
    pthread_mutex_destroy(&ctx->mutex);
    allocator.release(allocator.user, ctx, sizeof *ctx);
}

/* ===========================================================================================================
   COMPILE                                                                                           >>compile
   Makes a program of a tape: checks the options, runs the passes and plans memory; nothing is allocated
   on the device. Uses all above.
   ======================================================================================================== */

/* The launches of a segment as a device has recorded them. Those of a micro-batch are for runs with the
   same numbers of rows; the update has none. */
typedef struct tt__recording {
    void *made;             /* the device's; NULL: such a run was met once */
    tt__segment segment;
    bool later;             /* micro-batches but the first of a step: they add to gradients */
    int64_t *rows;          /* of each axis; NULL: this entry is free */
    int credit;             /* gained when it is used, lost when another run finds no entry */
} tt__recording;
enum { TT__RECORDINGS = 64, TT__RECORDING_USED = 8, TT__RECORDING_MOST = 64 };

/* Where an input is copied from when the device's memory is not the host's: two buffers in turn, each with
   the event after which it may be written again. */
typedef struct tt__staged { char *buffer[2]; void *copied[2]; int now; } tt__staged;

/* tt_compile_options, checked, with what their names stand for. */
typedef struct tt__settings {
    tt_compile_options options;
    const tt__device_kind *kind;
    int index;              /* of the device among those of its kind */
    int threads;            /* of the device "cpu" */
    tt__precision precision;
    tt__matmul matmul;
    tt__recompute recompute;
    bool scales;            /* the loss scale changes */
} tt__settings;

/* What may differ between programs of the same settings, to fit a budget. */
typedef struct tt__choice {
    tt__recompute recompute;
} tt__choice;

/* A tape made ready to run. Persistent storages have no place yet: these depend on the arena. */
typedef struct tt__built {
    tt_tape *t;             /* a copy of the caller's, rewritten */
    uint64_t recorded;      /* hash of the caller's and of the root */
    int32_t root;
    tt__box *box;           /* places of transient storages and workspaces */
    int n_boxes;
    size_t transient;       /* bytes that these take */
    size_t bound;           /* the largest sum of such bytes live at once ... */
    int peak_at;            /* ... and the instruction where it is */
    size_t host_persistent, host_transient; /* bytes of values in the host's memory */
    int together;           /* most instructions that run together */
} tt__built;

/* What tt_set has left of an input: nothing since the last run, its data, or data that an update, or a run or
   tt_set of another program of the arena, has written over. */
typedef enum tt__input_state { TT__UNSET, TT__SET, TT__OVERWRITTEN } tt__input_state;

/* What a program has for each device that it runs on, beside the arena's memory there. */
typedef struct tt__rank {
    tt__run run;            /* settings of the next run */
    int64_t *axis_rows;     /* rows of each axis in the next run; -1: not set */
    unsigned char *input;   /* of each value, a tt__input_state */
    int inputs_set;         /* values that are TT__SET */
    char *staging;          /* buffers of all inputs; NULL on the host's device */
    tt__staged *staged;     /* of each input */
    char *host;             /* values in the host's memory: persistent ones first */
    tt__launch *launches;   /* of instructions that run together */
    tt__recording recordings[TT__RECORDINGS];
    int next_recording;     /* the entry that the next new run asks for */
    bool never_records;     /* the device has failed to record what it can run */
    bool zeroed;            /* tt__zero_states has run */
    bool scale_set;         /* the program's results.scale is the device's too */
} tt__rank;

struct tt_program {
    tt_context *ctx;
    tt__settings settings;
    tt__built built;
    tt__arena *arena;
    struct tt_program *next; /* of its arena */
    tt__rank rank;
    tt__results results;    /* as read last */
    bool ready;             /* its arena and all its parameters have memory */
    bool poison;            /* tests: overwrite storages as soon as they are dead */
    bool micro_failed, norm_known;
    double flops;
};

tt_optimizer_options tt_optimizer_options_default(void)
{
    tt_optimizer_options o;
    memset(&o, 0, sizeof o);
    o.kind = TT_ADAMW;
    o.beta1 = 0.9f;
    o.beta2 = 0.999f;
    o.eps = 1e-8f;
    o.weight_decay = 0.01f;
    return o;
}

tt_loss_scale tt_loss_scale_default(void)
{
    tt_loss_scale s = {65536, 2, 0.5f, 2000};
    return s;
}

tt_compile_options tt_compile_options_default(void)
{
    tt_compile_options o;
    memset(&o, 0, sizeof o);
    o.train = true;
    o.precision = "32-true";
    o.matmul = "fp32";
    o.loss_scale = tt_loss_scale_default();
    o.recompute = "cheap";
    o.optimizer = tt_optimizer_options_default();
    return o;
}

static tt_status tt__check_optimizer(tt_context *ctx, const tt_optimizer_options *o)
{
    char text[512];
    tt__text all = {text, sizeof text, 0}; /* everything that is wrong, in one message */
    const bool sgd = o->kind == TT_SGD;
    if ((unsigned)o->kind > TT_ADAMW) tt__print(&all, "; kind %d is unknown", (int)o->kind);
    if (sgd && !(o->momentum >= 0 && o->momentum < 1))
        tt__print(&all, "; momentum %g is not in [0, 1)", o->momentum);
    if (sgd && o->nesterov && !(o->momentum > 0)) tt__print(&all, "; nesterov needs a momentum above 0");
    if (!sgd && !(o->beta1 >= 0 && o->beta1 < 1)) tt__print(&all, "; beta1 %g is not in [0, 1)", o->beta1);
    if (!sgd && !(o->beta2 >= 0 && o->beta2 < 1)) tt__print(&all, "; beta2 %g is not in [0, 1)", o->beta2);
    if (!sgd && !(o->eps >= 0)) tt__print(&all, "; eps %g is negative", o->eps);
    if (!(o->weight_decay >= 0)) tt__print(&all, "; weight_decay %g is negative", o->weight_decay);
    if (!(o->clip_norm >= 0))
        tt__print(&all, "; clip_norm %g is negative (0 means no clipping)", o->clip_norm);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "optimizer options: %s", text + 2) : TT_OK;
}

/* A power of two of least..most. */
static bool tt__is_power_of_two(double x, double least, double most)
{
    int exponent;
    return x >= least && x <= most && frexp(x, &exponent) == 0.5;
}

static tt_status tt__check_loss_scale(tt_context *ctx, const tt_loss_scale *s)
{
    char text[512];
    tt__text all = {text, sizeof text, 0};
    if (!tt__is_power_of_two(s->init, 1, TT__LOSS_SCALE_MOST))
        tt__print(&all, "; init %g is not a power of two in 1..2^40", (double)s->init);
    if (!tt__is_power_of_two(s->growth, 1, FLT_MAX))
        tt__print(&all, "; growth %g is not a power of two >= 1", (double)s->growth);
    if (!tt__is_power_of_two(s->backoff, 0, 0.5))
        tt__print(&all, "; backoff %g is not a power of two below 1", (double)s->backoff);
    if (s->interval < 1) tt__print(&all, "; interval %d is less than 1", s->interval);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "loss_scale: %s", text + 2) : TT_OK;
}

static bool tt__copy_array(tt_context *ctx, void **to, const void *from, size_t bytes)
{
    *to = tt__alloc(ctx, bytes ? bytes : 1);
    if (*to && bytes) memcpy(*to, from, bytes);
    return *to != NULL;
}

static uint64_t tt__attr_hash(uint64_t hash, const tt__attr *a)
{
#define TT__HASH_FIELD(type, name) hash = tt__hash_on(hash, &a->name, sizeof a->name);
    TT__ATTRS(TT__HASH_FIELD)
#undef TT__HASH_FIELD
    return hash;
}

/* Of all that was recorded but names of values: another model or capacity has another hash. */
static uint64_t tt__tape_hash(const tt_tape *t)
{
    uint64_t hash = TT__HASH_BEGIN;
    for (int k = 1; k < t->n_axes; k++)
        hash = tt__hash_on(hash, &t->axes[k].capacity, sizeof t->axes[k].capacity);
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__value *x = &t->values[v];
        const tt__shape *s = &x->shape;
        const int64_t shape[] = {(int64_t)s->dtype, s->rows, s->cols, s->axis, x->base, x->offset};
        const char *param = x->storage == TT__PARAMETER ? t->ctx->params[x->param]->name : "";
        hash = tt__hash_on(hash, shape, sizeof shape);
        hash = tt__hash_on(hash, param, strlen(param));
    }
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const char *name = tt__ops[i->op].name;
        hash = tt__hash_on(hash, name, strlen(name));
        hash = tt__hash_on(hash, i->in, sizeof i->in);
        hash = tt__hash_on(hash, i->out, sizeof i->out);
        hash = tt__attr_hash(hash, &i->attr);
    }
    return hash;
}

static tt_tape *tt__copy_tape(const tt_tape *t)
{
    tt_tape *copy = (tt_tape *)tt__calloc(t->ctx, sizeof *copy);
    if (!copy) return NULL;
    copy->ctx = t->ctx;
    copy->n_random = t->n_random;
    copy->n_values = copy->cap_values = t->n_values;
    copy->n_code = copy->cap_code = t->n_code;
    copy->n_axes = copy->cap_axes = t->n_axes;
    if (tt__copy_array(t->ctx, (void **)&copy->values, t->values, sizeof *t->values * (size_t)t->n_values) &&
        tt__copy_array(t->ctx, (void **)&copy->code, t->code, sizeof *t->code * (size_t)t->n_code) &&
        tt__copy_array(t->ctx, (void **)&copy->axes, t->axes, sizeof *t->axes * (size_t)t->n_axes))
        return copy;
    tt_tape_free(copy);
    return NULL;
}

static void tt__built_free(tt_context *ctx, tt__built *b)
{
    tt_tape_free(b->t);
    tt__free(ctx, b->box);
}

/* Takes a program out of its arena; the last takes the parameters out of one that was never allocated. */
static void tt__leave_arena(tt_program *p)
{
    tt__arena *a = p->arena;
    if (a->results_of == p) a->results_of = NULL;
    tt_program **at = &a->programs;
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    for (int k = 0; k < a->n_homes && !a->programs && !a->memory; k++) {
        if (p->ctx->params[k]->holder != a) continue;
        p->ctx->params[k]->holder = NULL;
        a->references--;
    }
    tt__arena_release(p->ctx, a);
}

void tt_program_free(tt_program *p)
{
    if (!p) return;
    tt_context *ctx = p->ctx;
    tt__arena *a = p->arena;
    for (int32_t v = 0; p->rank.staging && v < 2 * p->built.t->n_values; v++) {
        void *copied = p->rank.staged[v / 2].copied[v % 2];
        if (copied) a->kind->backend->release_event(a->device, copied);
    }
    if (p->rank.staging) a->kind->backend->release_host(a->device, p->rank.staging);
    if (p->rank.host && p->settings.kind->host) tt__free(ctx, p->rank.host);
    else if (p->rank.host) a->kind->backend->release_host(a->device, p->rank.host);
    for (int k = 0; k < TT__RECORDINGS; k++) {
        if (p->rank.recordings[k].made) a->kind->backend->forget(a->device, p->rank.recordings[k].made);
        tt__free(ctx, p->rank.recordings[k].rows);
    }
    if (a) tt__leave_arena(p);
    tt__built_free(ctx, &p->built);
    tt__free(ctx, p->rank.axis_rows);
    tt__free(ctx, p->rank.input);
    tt__free(ctx, p->rank.staged);
    tt__free(ctx, p->rank.launches);
    tt__free(ctx, p);
}

/* Marks the values with a trainable parameter behind them, which may have been frozen after recording. */
static void tt__mark_gradients(tt_tape *t)
{
    for (int32_t v = 1; v < t->n_values; v++) {
        tt__value *x = &t->values[v];
        x->needs_grad = x->storage == TT__PARAMETER && !t->ctx->params[x->param]->frozen;
    }
    for (int k = 0; k < t->n_code; k++) {
        bool needs = false;
        for (int j = 0; j < TT__MAX_IN; j++) needs |= t->values[t->values[t->code[k].in[j]].base].needs_grad;
        t->values[t->code[k].out[0]].needs_grad = needs;
    }
    for (int32_t v = 1; v < t->n_values; v++)
        t->values[v].needs_grad = t->values[t->values[v].base].needs_grad;
}

/* Runs a pass and then the verifier; returns from the function that it stands in after an error. */
#define TT__PASS(t, name, call) \
    do { \
        tt_status passed = (call); \
        if (passed == TT_OK) passed = tt__verify((t), (name)); \
        if (passed != TT_OK) return passed; \
    } while (0)

/* All passes, in order. A tape that is to train gets the backward of its loss and the update. */
static tt_status tt__run_passes(tt__built *b, const tt__settings *s, const tt__choice *choice)
{
    tt_tape *t = b->t;
    const bool train = s->options.train, accumulate = s->options.accumulate;
    int losses = 0;
    TT__PASS(t, "record", TT_OK);
    TT__PASS(t, "inference", tt__pass_inference(t, b->root, train));
    TT__PASS(t, "prune", tt__pass_prune(t, b->root, false));
    TT__PASS(t, "rows", tt__pass_rows(t, b->root));
    TT__PASS(t, "fuse", tt__pass_fuse(t, b->root, false));
    TT__PASS(t, "precision", tt__pass_precision(t, &s->precision));
    for (int k = 0; k < t->n_code; k++) losses += tt__is(&t->code[k], TT__LOSS);
    tt_status status = losses ? tt__new_results(t, train, s->scales) : TT_OK;
    if (status == TT_OK && train && accumulate && losses != 1)
        status = tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "accumulate divides by the targets of one loss, but "
                          "the program has %d", losses);
    if (status != TT_OK) return status;
    if (train) TT__PASS(t, "differentiate", tt__differentiate(t, b->root, accumulate));
    if (train && !losses)
        return tt__fail(t->ctx, TT_ERR_ARGUMENT, "no loss lies behind the root '%s': train on "
                        "tt_cross_entropy or tt_mean_squared_error", t->values[b->root].name);
    TT__PASS(t, "fuse later", tt__pass_fuse(t, b->root, true));
    if (train) TT__PASS(t, "recompute", tt__pass_recompute(t, choice->recompute));
    if (s->kind->host) TT__PASS(t, "fold casts", (tt__pass_fold_casts(t), TT_OK));
    TT__PASS(t, "counts", tt__pass_counts(t));
    if (train) TT__PASS(t, "update", tt__pass_update(t, &s->options.optimizer, &s->options.loss_scale));
    if (s->matmul == TT__MATMUL_FP8) TT__PASS(t, "fp8", (tt__pass_fp8(t), TT_OK));
    TT__PASS(t, "prune", tt__pass_prune(t, b->root, true));
    TT__PASS(t, "settings", tt__pass_settings(t));
    return TT_OK;
}
#undef TT__PASS

/* The matrix that operand `id` is at full capacity, without data; all 0 for no operand. */
static tt__mat tt__at_capacity(const tt_tape *t, int32_t id)
{
    const tt__value *v = &t->values[id];
    const tt__mat m = {NULL, v->shape.dtype, v->shape.rows, v->shape.cols, v->ld};
    return m;
}

/* Fails if the device has no kernel for an instruction. */
static tt_status tt__refused(const tt_tape *t, const tt__device_kind *kind, int index)
{
    tt__launch l;
    char device[32];
    memset(&l, 0, sizeof l);
    l.tape = t;
    for (int k = 0; k < t->n_code && kind->backend; k++) {
        const char *why;
        const tt__instr *i = l.instr = &t->code[k];
        for (int j = 0; j < TT__MAX_IN; j++) l.in[j] = tt__at_capacity(t, i->in[j]);
        for (int j = 0; j < TT__MAX_OUT; j++) l.out[j] = tt__at_capacity(t, i->out[j]);
        if (!(why = kind->backend->refuses(index, &l))) continue;
        int32_t named = i->out[0] ? i->out[0] : i->out[1] ? i->out[1] : i->in[0];
        return tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "device '%s' cannot run %s, for '%s': %s",
                        tt__device_name(kind, index, device), tt__instr_name(i), t->values[named].name, why);
    }
    return TT_OK;
}

static tt_status tt__check_matmul(tt_context *ctx, const tt__settings *s)
{
    if (s->matmul != TT__MATMUL_FP8) return TT_OK;
    if (s->kind && s->kind->host)
        return tt__fail(ctx, TT_ERR_UNSUPPORTED, "matmul 'fp8' is for device 'cuda', and the device is '%s'",
                        s->kind->name);
    if (s->precision.kind != TT__32_TRUE) return TT_OK;
    return tt__fail(ctx, TT_ERR_UNSUPPORTED, "matmul 'fp8' rounds 16-bit operands, of which precision "
                    "'32-true' has none");
}

/* Adds the sentence of a check that has failed to those before it; *first is the status of the first. */
static void tt__note_error(tt_context *ctx, tt__text *all, tt_status *first, tt_status status)
{
    if (status != TT_OK) tt__print(all, "; %s", ctx->error);
    if (*first == TT_OK) *first = status;
}

/* Checks options and finds what their names stand for. One message names all that is wrong. */
static tt_status tt__parse_settings(tt_context *ctx, const tt_compile_options *o, tt__settings *s)
{
    char text[sizeof ctx->error];
    tt__text all = {text, sizeof text, 0};
    tt_status status = TT_OK;
    memset(s, 0, sizeof *s);
    s->options = *o;
    s->threads = ctx->cpu.pool->threads;
    tt__note_error(ctx, &all, &status, tt__parse_precision(ctx, o->precision, o->residual, &s->precision));
    s->scales = o->train && s->precision.half == TT_F16;
    if (s->scales) tt__note_error(ctx, &all, &status, tt__check_loss_scale(ctx, &o->loss_scale));
    tt__note_error(ctx, &all, &status, tt__parse_matmul(ctx, o->matmul, &s->matmul));
    tt__note_error(ctx, &all, &status, tt__parse_recompute(ctx, o->recompute, &s->recompute));
    if (o->train) tt__note_error(ctx, &all, &status, tt__check_optimizer(ctx, &o->optimizer));
    s->kind = tt__find_device(ctx, o->device, &s->index);
    tt__note_error(ctx, &all, &status, s->kind ? TT_OK : ctx->status);
    tt__note_error(ctx, &all, &status, tt__check_matmul(ctx, s));
    return status == TT_OK ? TT_OK : tt__fail(ctx, status, "%s", text + 2);
}

/* Places transient storages and workspaces, and what lies in the host's memory. */
static tt_status tt__place_transients(tt__built *b)
{
    tt_tape *t = b->t;
    const int n = (int)tt__max(1, t->n_code);
    size_t bound;
    int peak;
    tt_status status = tt__lifetimes(t, b->root, &b->box, &b->n_boxes);
    if (status != TT_OK) return status;
    status = tt__place(t->ctx, b->box, b->n_boxes, n, TT__HOST, &b->host_transient, &bound, &peak);
    if (status == TT_OK)
        status = tt__place(t->ctx, b->box, b->n_boxes, n, TT__DEVICE, &b->transient, &b->bound, &b->peak_at);
    if (status != TT_OK) return status;
    for (int32_t v = 1; v < t->n_values; v++) t->values[v].place = TT__NO_PLACE;
    for (int k = 0; k < b->n_boxes; k++) {
        const tt__box *box = &b->box[k];
        if (box->value) t->values[box->value].place = box->place;
        else t->code[box->first].workspace_place = box->place;
    }
    for (int32_t v = 1; v < t->n_values; v++) {
        tt__value *x = &t->values[v];
        if (!x->persistent || x->base != v || x->space != TT__HOST) continue;
        x->place = b->host_persistent;
        b->host_persistent += tt__arena_bytes(t, x);
    }
    status = tt__verify_places(t, b->box, b->n_boxes, TT__HOST, b->host_transient);
    return status == TT_OK ? tt__verify_places(t, b->box, b->n_boxes, TT__DEVICE, b->transient) : status;
}

/* Rewrites a copy of a tape and gives its transient storages their places: a program in all but the arena.
   Depends on nothing but its arguments and which parameters are frozen. After an error, *b is empty. */
static tt_status tt__build(const tt_tape *t, int32_t root, const tt__settings *s, const tt__choice *choice,
                           tt__built *b)
{
    memset(b, 0, sizeof *b);
    b->root = root;
    b->recorded = tt__hash_on(tt__tape_hash(t), &root, sizeof root);
    b->t = tt__copy_tape(t);
    tt_status status = b->t ? TT_OK : TT_ERR_MEMORY;
    if (status == TT_OK) {
        b->t->alignment = s->kind->alignment;
        b->t->host = s->kind->host;
        b->t->accumulate = s->options.train && s->options.accumulate;
        tt__mark_gradients(b->t);
        if (!s->options.train) b->t->values[root].keep = b->t->values[b->t->values[root].base].keep = true;
        status = tt__run_passes(b, s, choice);
    }
    for (int k = 0, n = 1; status == TT_OK && k < b->t->n_code; k++) {
        b->t->code[k].workspace = s->kind->workspace(s->threads, b->t, &b->t->code[k]);
        b->together = (int)tt__max(b->together, n);
        n = b->t->code[k].with_next ? n + 1 : 1;
    }
    if (status == TT_OK) status = tt__check_total(b->t, s->kind->resident);
    if (status == TT_OK) status = tt__place_transients(b);
    if (status == TT_OK) status = tt__refused(b->t, s->kind, s->index);
    if (status != TT_OK) {
        tt__built_free(t->ctx, b);
        memset(b, 0, sizeof *b);
    }
    return status;
}

/* Fails if parameter value v cannot be the one that arena `a` has a home for. */
static tt_status tt__check_home(const tt_program *p, const tt__arena *a, int32_t v)
{
    char there[32], here[32];
    const tt__settings *s = &p->settings;
    const tt__value *x = &p->built.t->values[v];
    const char *name = p->ctx->params[x->param]->name;
    const tt_dtype dtype = tt__home_in(a, x->param)->dtype;
    if (a->kind != s->kind || a->index != s->index)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "parameter '%s' lives on device '%s', where an earlier "
                        "program has put it, and this program is for '%s'", name, tt__device_name(a->kind,
                        a->index, there), tt__device_name(s->kind, s->index, here));
    if (dtype == x->shape.dtype) return TT_OK;
    return tt__fail(p->ctx, TT_ERR_ARGUMENT, "precision '%s' needs parameter '%s' as %s, but an earlier "
                    "program holds it as %s: compile both with the same precision",
                    tt__precision_names[s->precision.kind], name, tt_dtype_name(x->shape.dtype),
                    tt_dtype_name(dtype));
}

/* Bytes of the persistent storages that no arena has, if the program joins arena `a` (NULL: a new one). */
static tt_status tt__added_bytes(const tt_program *p, tt__arena *a, size_t *bytes)
{
    const tt_tape *t = p->built.t;
    *bytes = 0;
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__value *x = &t->values[v];
        const tt__arena *home = NULL;
        if (!x->persistent || x->base != v || x->space == TT__HOST) continue;
        if (x->storage == TT__PARAMETER) home = tt__home_arena(p->settings.kind, a, p->ctx->params[x->param]);
        tt_status status = home ? tt__check_home(p, home, v) : TT_OK;
        if (status != TT_OK) return status;
        if (!home) *bytes += tt__arena_bytes(t, x);
    }
    return TT_OK;
}

/* The bytes of the arena that the program joins (`shared`), or of its own (NULL), once it is in there. Fails
   if they are more than the budget of one of the arena's programs, or than is allocated. */
static tt_status tt__check_extent(const tt_program *p, tt__arena *shared, size_t *persistent,
                                  size_t *transient)
{
    tt__arena none;
    const tt__arena *a = shared ? shared : &none;
    memset(&none, 0, sizeof none);
    const size_t own = p->settings.options.memory_budget, held = a->persistent + a->transient;
    const bool by_them = a->budget && (!own || a->budget < own);
    const size_t budget = by_them ? a->budget : own;
    size_t added;
    tt_status status = tt__added_bytes(p, shared, &added);
    if (status == TT_OK) status = tt__check_total(p->built.t, held);
    if (status != TT_OK) return status;
    *persistent = (shared ? a->persistent : p->settings.kind->resident) + added;
    *transient = a->transient > p->built.transient ? a->transient : p->built.transient;
    const size_t bytes = *persistent + *transient;
    if (a->memory && (added || *transient > a->transient))
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_compile: the arena of `share` is allocated already, "
                        "with %zu bytes, and this program needs %zu: compile it before tt_allocate or the "
                        "first tt_set of those that it shares with, or without `share`", held, bytes);
    if (!budget || bytes <= budget) return TT_OK;
    return tt__fail(p->ctx, TT_ERR_BUDGET, "the plan needs %zu bytes, memory_budget is %zu%s: %zu are "
                    "persistent (parameters, optimizer, gradients), the rest is proportional to the capacity "
                    "of the axes; the smallest budget with these options is %zu", bytes, budget,
                    by_them ? " for a program that this one shares an arena with" : "",
                    bytes - p->built.transient, bytes);
}

/* Gives each persistent storage that has none a place in the program's arena. */
static void tt__place_persistent(tt_program *p)
{
    tt_tape *t = p->built.t;
    tt__arena *a = p->arena;
    for (int32_t v = 1; v < t->n_values; v++) {
        tt__value *x = &t->values[v];
        tt_param *param = x->storage == TT__PARAMETER ? p->ctx->params[x->param] : NULL;
        if (!x->persistent || x->base != v || x->space == TT__HOST) continue;
        if (param && tt__home_arena(a->kind, a, param)) continue;
        x->place = a->persistent;
        a->persistent += tt__arena_bytes(t, x);
        if (!param) continue;
        a->home[x->param].offset = x->place;
        a->home[x->param].dtype = x->shape.dtype;
        a->home[x->param].part = x->part;
        if (!a->kind->backend) continue;
        param->holder = a;
        a->references++;
    }
}

/* Puts a built program into the arena of `share`, or into a new one. After an error nothing has changed. */
static tt_status tt__commit(tt_program *p, tt__arena *shared)
{
    tt_context *ctx = p->ctx;
    const tt__settings *s = &p->settings;
    const size_t budget = s->options.memory_budget;
    size_t persistent, transient;
    tt_status status = tt__check_extent(p, shared, &persistent, &transient);
    if (status != TT_OK) return status;
    tt__arena *a = shared ? shared : (tt__arena *)tt__calloc(ctx, sizeof *a);
    if (!a) return TT_ERR_MEMORY;
    if (!shared) {
        a->kind = s->kind;
        a->index = s->index;
        a->persistent = s->kind->resident;
    }
    a->references++;
    if ((status = tt__homes_grow(ctx, a)) != TT_OK) {
        tt__arena_release(ctx, a);
        return status;
    }
    p->next = a->programs;
    a->programs = p;
    a->transient = transient;
    if (budget && (!a->budget || budget < a->budget)) a->budget = budget;
    p->arena = a;
    tt__place_persistent(p);
    return TT_OK;
}

/* What a run needs beside the arena. */
static tt_status tt__make_rank(tt_program *p)
{
    const size_t values = (size_t)p->built.t->n_values, axes = (size_t)p->built.t->n_axes;
    const size_t together = (size_t)p->built.together + 1;
    p->rank.axis_rows = (int64_t *)tt__alloc(p->ctx, sizeof *p->rank.axis_rows * axes);
    p->rank.input = (unsigned char *)tt__calloc(p->ctx, values);
    p->rank.staged = (tt__staged *)tt__calloc(p->ctx, values * sizeof *p->rank.staged);
    p->rank.launches = (tt__launch *)tt__calloc(p->ctx, sizeof *p->rank.launches * together);
    if (!p->rank.axis_rows || !p->rank.input || !p->rank.staged || !p->rank.launches) return TT_ERR_MEMORY;
    for (size_t k = 0; k < axes; k++) p->rank.axis_rows[k] = -1;
    if (!p->settings.kind->host) return TT_OK; /* such memory is the device's to allocate */
    p->rank.host = (char *)tt__calloc(p->ctx, p->built.host_persistent + p->built.host_transient + 1);
    return p->rank.host ? TT_OK : TT_ERR_MEMORY;
}

static tt_status tt__check_share(tt_context *ctx, const tt__settings *s)
{
    char theirs[32], own[32];
    const tt_program *share = s->options.share;
    if (share && share->ctx != ctx)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_compile: `share` belongs to another context");
    if (!share || (share->settings.kind == s->kind && share->settings.index == s->index)) return TT_OK;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_compile: `share` is a program for device '%s', and this one is "
                    "for '%s'", tt__device_name(share->settings.kind, share->settings.index, theirs),
                    tt__device_name(s->kind, s->index, own));
}

static tt_status tt__compile_into(tt_program *p, const tt_tape *t, int32_t root, const tt_compile_options *o)
{
    tt__choice choice;
    if (t->status != TT_OK) return tt__fail(p->ctx, t->status, "%s", t->error);
    if (root <= 0 || root >= t->n_values)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_compile: the root (id %d) is not on the tape",
                        (int)root);
    tt_status status = tt__parse_settings(p->ctx, o, &p->settings);
    if (status == TT_OK) status = tt__check_share(p->ctx, &p->settings);
    choice.recompute = p->settings.recompute;
    p->rank.run.seed = p->ctx->options.seed;
    p->results.scale.scale = p->settings.scales ? o->loss_scale.init : 1;
    if (status == TT_OK) status = tt__build(t, root, &p->settings, &choice, &p->built);
    if (status == TT_OK) status = tt__make_rank(p);
    tt_compile_options *kept = &p->settings.options; /* what it points to may be gone when this returns */
    kept->precision = kept->residual = kept->matmul = kept->recompute = kept->device = NULL;
    kept->share = NULL;
    kept->optimizer.no_decay = NULL;
    return status == TT_OK ? tt__commit(p, o->share ? o->share->arena : NULL) : status;
}

tt_program *tt_compile(tt_tape *t, tt_value root, const tt_compile_options *o)
{
    const tt_compile_options defaults = tt_compile_options_default();
    tt_program *p = (tt_program *)tt__calloc(t->ctx, sizeof *p);
    if (!p) return NULL;
    p->ctx = t->ctx;
    if (tt__compile_into(p, t, root.id, o ? o : &defaults) == TT_OK) return p;
    tt_program_free(p);
    return NULL;
}

/* ===========================================================================================================
   RUN                                                                                                   >>run
   Allocates a program's memory, takes inputs, runs micro-batches and updates, and gives results. Uses all
   above.
   ======================================================================================================== */

static int64_t tt__actual_rows(const tt_program *p, int32_t id)
{
    const tt__shape *s = &p->built.t->values[id].shape;
    return s->axis ? p->rank.axis_rows[s->axis] + s->extra : s->rows;
}

/* Parameters of another program must have memory there, and be what this one takes them for. */
static tt_status tt__params_ready(const tt_program *p)
{
    const tt_tape *t = p->built.t;
    tt_status status = TT_OK;
    for (int32_t v = 1; v < t->n_values && status == TT_OK; v++) {
        if (t->values[v].storage != TT__PARAMETER || t->values[v].base != v) continue;
        const tt_param *param = p->ctx->params[t->values[v].param];
        if (!param->holder)
            return tt__fail(p->ctx, TT_ERR_ARGUMENT, "the program that held parameter '%s' was freed before "
                            "it was allocated: compile this one again", param->name);
        if (param->holder != p->arena && !param->holder->memory)
            return tt__fail(p->ctx, TT_ERR_ARGUMENT, "parameter '%s' lives in a program that is not "
                            "allocated: allocate that one first, or compile with `share`", param->name);
        status = tt__check_home(p, param->holder, v);
    }
    return status;
}

/* Optimizer state and accumulated gradients begin at 0: once, right before they are first used, so that until
   then nothing but parameters takes memory where pages that nobody has touched take none. */
static tt_status tt__zero_states(tt_program *p)
{
    const tt__arena *a = p->arena;
    tt_status status = TT_OK;
    for (int32_t v = 1; v < p->built.t->n_values && !p->rank.zeroed && status == TT_OK; v++) {
        const tt__value *x = &p->built.t->values[v];
        if (!x->persistent || x->base != v || x->storage == TT__PARAMETER || x->space == TT__HOST) continue;
        status = a->kind->backend->fill(a->device, a->memory + x->place, 0, tt__storage_bytes(x));
    }
    p->rank.zeroed = status == TT_OK;
    return tt__device_status(p->ctx, a, status);
}

/* The arena's memory, with parameters filled. */
static tt_status tt__allocate_arena(tt_context *ctx, tt__arena *a)
{
    const tt__backend *b = a->kind->backend;
    const size_t bytes = a->persistent + a->transient;
    if (!(a->device = tt__open_device(ctx, a->kind, a->index))) return ctx->status;
    float *piece = (float *)tt__alloc(ctx, TT__BOUNCE);
    if (!piece) return TT_ERR_MEMORY;
    a->memory = (char *)b->allocate(a->device, bytes ? bytes : 1);
    if (a->memory && !a->kind->host) a->bounce = (char *)b->allocate_host(a->device, TT__BOUNCE);
    tt_status status = a->memory && (a->bounce || a->kind->host) ? TT_OK : TT_ERR_MEMORY;
    if (status == TT_OK && a->kind->resident) status = b->fill(a->device, a->memory, 0, a->kind->resident);
    status = tt__device_status(ctx, a, status);
    for (int k = 0; k < ctx->n_params && status == TT_OK; k++)
        if (ctx->params[k]->holder == a) status = tt__param_fill(ctx->params[k], piece);
    for (int k = 0; k < ctx->n_params && status == TT_OK; k++)
        if (ctx->params[k]->holder == a) tt__param_drop_source(ctx->params[k]);
    tt__free(ctx, piece);
    if (status == TT_OK) return TT_OK;
    if (a->bounce) b->release_host(a->device, a->bounce);
    if (a->memory) b->release(a->device, a->memory);
    a->memory = a->bounce = NULL;
    return status;
}

/* The host writes value v into memory that is the device's. */
static bool tt__is_staged(const tt_program *p, int32_t v)
{
    const tt__value *x = &p->built.t->values[v];
    if (p->settings.kind->host || (x->storage != TT__INPUT && x->storage != TT__STEP)) return false;
    return x->base == v && x->place != TT__NO_PLACE && x->space == TT__DEVICE;
}

/* Bytes of the buffers that the host writes such values from: one is filled while another is copied. */
static size_t tt__staging_bytes(const tt_program *p)
{
    size_t bytes = 0;
    for (int32_t v = 1; v < p->built.t->n_values; v++)
        if (tt__is_staged(p, v)) bytes += 2 * tt__storage_bytes(&p->built.t->values[v]);
    return bytes;
}

/* The host's memory of a program: its values there, and the buffers of what it writes to the device. */
static tt_status tt__allocate_rank(tt_program *p)
{
    const tt__arena *a = p->arena;
    const tt_tape *t = p->built.t;
    const size_t on_host = p->built.host_persistent + p->built.host_transient, bytes = tt__staging_bytes(p);
    const tt__backend *b = a->kind->backend;
    tt__rank *r = &p->rank;
    if (on_host && !r->host) {
        if (!(r->host = (char *)b->allocate_host(a->device, on_host))) return TT_ERR_MEMORY;
        memset(r->host, 0, on_host);
    }
    if (bytes && !(r->staging = (char *)b->allocate_host(a->device, bytes))) return TT_ERR_MEMORY;
    char *at = r->staging;
    for (int32_t v = 1; v < t->n_values; v++)
        for (int k = 0; k < 2 && tt__is_staged(p, v); k++, at += tt__storage_bytes(&t->values[v]))
            r->staged[v].buffer[k] = at;
    return TT_OK;
}

tt_status tt_allocate(tt_program *p)
{
    if (p->ready) return TT_OK;
    if (!p->settings.kind->backend)
        return tt__fail(p->ctx, TT_ERR_UNSUPPORTED, "this build plans programs for device '%s' and cannot "
                        "run them: compile for \"cpu\" to run this one", p->settings.kind->name);
    tt_status status = tt__params_ready(p);
    if (status == TT_OK && !p->arena->memory) status = tt__allocate_arena(p->ctx, p->arena);
    if (status == TT_OK) status = tt__device_status(p->ctx, p->arena, tt__allocate_rank(p));
    p->ready = status == TT_OK;
    return status;
}

/* The matrix that instruction operand `id` is in the coming run. */
static tt__mat tt__resolve(const tt_program *p, int32_t id)
{
    tt__mat m = tt__at_capacity(p->built.t, id);
    if (!id) return m;
    const tt__value *v = &p->built.t->values[id], *base = &p->built.t->values[v->base];
    bool on_host = base->space == TT__HOST;
    size_t region = base->persistent ? 0 : on_host ? p->built.host_persistent : p->arena->persistent;
    char *memory = base->storage == TT__PARAMETER ? tt__param_memory(p->ctx->params[base->param])
                 : (on_host ? p->rank.host : p->arena->memory) + region + base->place;
    m.data = memory + (size_t)v->offset * tt_dtype_bytes(base->shape.dtype);
    m.rows = tt__actual_rows(p, id);
    return m;
}

/* Writes a value before what is run from now on. The data may change once this returns. */
static tt_status tt__write_value(tt_program *p, int32_t id, const void *data, size_t bytes)
{
    const tt__backend *b = p->settings.kind->backend;
    tt__device *d = p->arena->device;
    tt__staged *staged = &p->rank.staged[id];
    void *to = tt__resolve(p, id).data;
    if (!staged->buffer[0]) return memcpy(to, data, bytes), TT_OK;
    staged->now ^= 1;
    tt_status status = b->after(d, TT__HOST_STREAM, staged->copied[staged->now]);
    if (status == TT_OK) {
        memcpy(staged->buffer[staged->now], data, bytes);
        status = b->write(d, to, staged->buffer[staged->now], bytes);
    }
    if (status == TT_OK && b->mark(d, TT__COMPUTE_STREAM, &staged->copied[staged->now]) != TT_OK)
        status = b->wait(d);
    return tt__device_status(p->ctx, p->arena, status);
}

static void tt__mark_input(tt_program *p, int32_t v, tt__input_state state)
{
    p->rank.inputs_set += (state == TT__SET) - (p->rank.input[v] == TT__SET);
    p->rank.input[v] = (unsigned char)state;
}

/* Notes that these transient bytes are written: inputs of the arena's programs are lost there, but for those
   of `reader` (NULL: of none). */
static void tt__overwrite(const tt__arena *a, const tt_program *reader, size_t from, size_t bytes)
{
    for (tt_program *q = a->programs; q; q = q->next)
        for (int32_t v = 1; v < q->built.t->n_values && q != reader && q->rank.inputs_set; v++) {
            const tt__value *x = &q->built.t->values[v];
            if (q->rank.input[v] != TT__SET || x->place == TT__NO_PLACE || x->space != TT__DEVICE) continue;
            const bool apart = from >= x->place + tt__storage_bytes(x) || x->place >= from + bytes;
            if (!apart) tt__mark_input(q, v, TT__OVERWRITTEN);
        }
}

/* Sets the rows of an input's axis. Others of the axis must agree or, if it is set anew, follow. */
static tt_status tt__set_rows(tt_program *p, int32_t v, int64_t rows)
{
    const tt__value *values = p->built.t->values, *x = &values[v];
    int64_t *axis = &p->rank.axis_rows[x->shape.axis];
    const bool other = *axis != rows - x->shape.extra, again = p->rank.input[v] != TT__UNSET;
    for (int32_t k = 1; k < p->built.t->n_values && other; k++) {
        if (p->rank.input[k] != TT__SET || k == v || values[k].shape.axis != x->shape.axis) continue;
        if (!again)
            return tt__fail(p->ctx, TT_ERR_SHAPE, "tt_set: input '%s' has %lld rows, but '%s' was set with "
                            "%lld on the same axis '%s'", x->name, (long long)rows, values[k].name,
                            (long long)(*axis + values[k].shape.extra), p->built.t->axes[x->shape.axis].name);
        tt__mark_input(p, k, TT__UNSET);
    }
    *axis = rows - x->shape.extra;
    return TT_OK;
}

tt_status tt_set(tt_program *p, tt_value v, const void *data, int64_t rows)
{
    const tt_tape *t = p->built.t;
    tt_status status = tt_allocate(p);
    if (status != TT_OK) return status;
    const tt__value *x = v.id > 0 && v.id < t->n_values ? &t->values[v.id] : NULL;
    if (!x || x->storage != TT__INPUT || x->base != v.id)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_set: value %d is no input of this program", (int)v.id);
    if (!data) return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_set: the data for input '%s' is NULL", x->name);
    const bool all = x->shape.axis || rows == x->shape.rows;
    if (rows < 1 + x->shape.extra || rows > x->shape.rows || !all)
        return tt__fail(p->ctx, TT_ERR_SHAPE, "tt_set: %lld rows for input '%s', which takes %s%lld",
                        (long long)rows, x->name, x->shape.axis ? "1 to " : "", (long long)x->shape.rows);
    if (x->shape.axis && (status = tt__set_rows(p, v.id, rows)) != TT_OK) return status;
    tt__mark_input(p, v.id, TT__SET);
    if (x->place == TT__NO_PLACE) return TT_OK; /* nothing reads it */
    p->arena->results_of = NULL; /* an output may have had this place */
    tt__overwrite(p->arena, p, x->place, tt__storage_bytes(x));
    const size_t row = (size_t)x->shape.cols * tt_dtype_bytes(x->shape.dtype);
    return tt__write_value(p, v.id, data, (size_t)rows * row);
}

tt_status tt_get(tt_program *p, tt_value v, float *to, size_t capacity)
{
    const tt_tape *t = p->built.t;
    const tt__value *x = v.id > 0 && v.id < t->n_values ? &t->values[v.id] : NULL;
    if (!x || !(x->keep || x->persistent || v.id == p->built.root))
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_get: value %d is neither an output nor the root of this "
                        "program: mark it with tt_output", (int)v.id);
    if (!p->arena->memory || (!x->persistent && p->arena->results_of != p))
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_get: '%s' has no contents: get it after a run of this "
                        "program, before the next tt_set and other programs of its arena", x->name);
    const tt__mat m = tt__resolve(p, v.id);
    const size_t n = (size_t)(m.rows * m.cols);
    if (!tt__is_float(m.dtype))
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_get: '%s' holds %s, not floats", x->name,
                        tt_dtype_name(m.dtype));
    if (capacity < n)
        return tt__fail(p->ctx, TT_ERR_SHAPE, "tt_get: '%s' has %zu floats, the buffer %zu", x->name, n,
                        capacity);
    tt_status status = x->persistent ? tt__zero_states(p) : TT_OK;
    for (int64_t r = 0; r < m.rows && status == TT_OK; r++, to += m.cols)
        status = tt__read_memory(p->ctx, p->arena, to, TT_F32, tt__at(&m, r), m.dtype, (size_t)m.cols);
    return status;
}

static void tt__forget_inputs(tt_program *p)
{
    memset(p->rank.input, TT__UNSET, (size_t)p->built.t->n_values);
    p->rank.inputs_set = 0;
}

static tt_status tt__inputs_ready(tt_program *p)
{
    const tt_tape *t = p->built.t;
    for (int k = 0; k < t->n_code; k++)
        for (int j = 0; j < TT__MAX_IN; j++) {
            const int32_t base = t->values[t->code[k].in[j]].base;
            const bool overwritten = p->rank.input[base] == TT__OVERWRITTEN;
            if (t->values[base].storage != TT__INPUT || p->rank.input[base] == TT__SET) continue;
            tt__forget_inputs(p); /* so that the next batch may have other numbers of rows */
            return tt__fail(p->ctx, TT_ERR_ARGUMENT, "input '%s' was %s", t->values[base].name, overwritten ?
                            "set, and then overwritten by an update or by another program of the same arena: "
                            "tt_set all inputs right before the run" : "not set before this run: tt_set it "
                            "each time");
        }
    return TT_OK;
}

/* Fills what an instruction is the last to use with NaN. */
static void tt__poison(tt_program *p, int instruction)
{
    const tt__arena *a = p->arena;
    for (int k = 0; k < p->built.n_boxes && instruction < p->built.t->n_code - 1; k++) {
        const tt__box *box = &p->built.box[k];
        if (box->merged != k || box->space != TT__DEVICE || box->last != instruction) continue;
        a->kind->backend->fill(a->device, a->memory + a->persistent + box->place, 0xff, box->bytes);
    }
}

/* Operand `id` as the host has it where it is an input or a view of one; else, on a host's device, itself. */
static tt__mat tt__on_host(const tt_program *p, int32_t id)
{
    const tt__value *x = &p->built.t->values[id];
    const tt__staged *staged = &p->rank.staged[x->base];
    tt__mat m = tt__resolve(p, id);
    if (x->storage != TT__INPUT || !staged->buffer[0]) return m;
    m.data = staged->buffer[staged->now] + (size_t)x->offset * tt_dtype_bytes(m.dtype);
    return m;
}

/* Before anything runs, indices and starts of sequences are as the ops that read them need them. */
static tt_status tt__check_inputs(tt_program *p, tt__launch *l)
{
    tt_status status = TT_OK;
    const int end = tt__segment_first(p->built.t, TT__EACH_MICRO + 1u);
    for (int k = 0; k < end && status == TT_OK; k++) {
        l->instr = &p->built.t->code[k];
        for (int j = 0; j < TT__MAX_IN; j++) l->in[j] = tt__on_host(p, l->instr->in[j]);
        for (int j = 0; j < TT__MAX_OUT; j++) l->out[j] = tt__resolve(p, l->instr->out[j]);
        const tt__rules *rules = tt__rules_of(l->instr);
        status = rules->check ? rules->check(l) : TT_OK;
        if (status == TT_OK) p->flops += tt__flops(l->instr, l->in);
    }
    return status;
}

/* The entry of such a run if it was met before. Else NULL, and the entry whose turn it is gives way if it has
   no credit left: runs that come back keep their recordings however many others there are. */
static tt__recording *tt__recording_of(tt_program *p, tt__segment segment)
{
    const size_t all = sizeof *p->rank.axis_rows * (size_t)p->built.t->n_axes;
    const bool later = segment == TT__EACH_MICRO && p->rank.run.micro > 0;
    for (int k = 0; k < TT__RECORDINGS; k++) {
        tt__recording *r = &p->rank.recordings[k];
        if (!r->rows || r->segment != segment || r->later != later) continue;
        if (segment == TT__EACH_MICRO && memcmp(r->rows, p->rank.axis_rows, all) != 0) continue;
        r->credit = (int)tt__min(r->credit + TT__RECORDING_USED, TT__RECORDING_MOST);
        return r;
    }
    tt__recording *r = &p->rank.recordings[p->rank.next_recording];
    p->rank.next_recording = (p->rank.next_recording + 1) % TT__RECORDINGS;
    if (r->credit-- > 0) return NULL;
    if (r->made) p->settings.kind->backend->forget(p->arena->device, r->made);
    if (!r->rows) r->rows = (int64_t *)tt__alloc(p->ctx, all);
    if (r->rows) memcpy(r->rows, p->rank.axis_rows, all);
    r->made = NULL;
    r->segment = segment;
    r->later = later;
    r->credit = 1;
    return NULL;
}

/* Launches the instructions of a segment, those that run together in one call. */
static tt_status tt__launch_segment(tt_program *p, const tt__launch *like, tt__segment segment)
{
    tt_status status = TT_OK;
    const int end = tt__segment_first(p->built.t, segment + 1u);
    for (int k = tt__segment_first(p->built.t, segment), n; k < end && status == TT_OK; k += n) {
        for (n = 0; n == 0 || p->built.t->code[k + n - 1].with_next; n++) {
            const tt__instr *i = &p->built.t->code[k + n];
            tt__launch *l = &p->rank.launches[n];
            *l = *like;
            l->instr = i;
            for (int j = 0; j < TT__MAX_IN; j++) l->in[j] = tt__resolve(p, i->in[j]);
            for (int j = 0; j < TT__MAX_OUT; j++) {
                l->out[j] = tt__resolve(p, i->out[j]);
                l->add[j] = (i->add >> j & 1) || ((i->add_later >> j & 1) && p->rank.run.micro > 0);
            }
            l->workspace = p->arena->memory + p->arena->persistent + i->workspace_place;
        }
        status = p->settings.kind->backend->launch(p->rank.launches, n);
        for (int j = 0; j < n && p->poison; j++) tt__poison(p, k + j);
    }
    return status;
}

/* Records the launches of r's segment. After an error r is without a recording, and `why` is the first. */
static void tt__record_segment(tt_program *p, tt__launch *l, tt__recording *r, char why[512])
{
    const tt__backend *b = p->settings.kind->backend;
    tt__device *d = p->arena->device;
    tt_status status = b->capture(d);
    const bool began = status == TT_OK;
    if (began) status = tt__launch_segment(p, l, r->segment);
    if (status != TT_OK) snprintf(why, 512, "%s", b->error(d)); /* which captured may replace */
    if (began) r->made = b->captured(d);                        /* in any case, to end it */
    if (status == TT_OK && !r->made) snprintf(why, 512, "%s", b->error(d));
    if (status == TT_OK || !r->made) return;
    b->forget(d, r->made);
    r->made = NULL;
}

/* Notes what a segment is about to write. */
static void tt__overwrite_segment(const tt_program *p, tt__segment segment)
{
    const tt_tape *t = p->built.t;
    const tt_program *reader = segment == TT__EACH_MICRO ? p : NULL; /* the update reads no inputs */
    const int first = tt__segment_first(t, segment), end = tt__segment_first(t, segment + 1u);
    for (int k = 0; k < p->built.n_boxes; k++) {
        const tt__box *box = &p->built.box[k];
        if (box->space != TT__DEVICE || box->first >= end || box->last < first) continue;
        tt__overwrite(p->arena, reader, box->place, box->bytes);
    }
}

/* Runs a segment. A device that can records it at the second such run, and replays that from then on. One
   that cannot, but can run the instructions one by one, is never asked to record again. */
static tt_status tt__run_segment(tt_program *p, tt__segment segment)
{
    const tt__backend *b = p->settings.kind->backend;
    tt__device *d = p->arena->device;
    tt__launch l;
    char why[512] = "", device[32];
    tt__float_mode mode = tt__float_default();
    memset(&l, 0, sizeof l);
    l.device = d;
    l.tape = p->built.t;
    l.tf32 = p->settings.matmul == TT__MATMUL_TF32;
    l.resident = p->arena->memory;
    tt_status status = segment == TT__EACH_MICRO ? tt__check_inputs(p, &l) : TT_OK;
    if (status == TT_OK) status = tt__zero_states(p);
    if (status == TT_OK && l.tape->run)
        status = tt__write_value(p, l.tape->run, &p->rank.run, sizeof p->rank.run);
    if (status == TT_OK && p->built.t->scale && !p->rank.scale_set) {
        status = tt__write_value(p, p->built.t->results, &p->results, sizeof p->results);
        p->rank.scale_set = status == TT_OK;
    }
    if (segment == TT__EACH_MICRO || p->arena->results_of != p) p->arena->results_of = NULL;
    if (status == TT_OK) {
        tt__overwrite_segment(p, segment);
        tt__recording *r = b->capture && !p->rank.never_records ? tt__recording_of(p, segment) : NULL;
        if (r && !r->made) tt__record_segment(p, &l, r, why);
        status = r && r->made ? b->replay(d, r->made) : tt__launch_segment(p, &l, segment);
        status = tt__device_status(p->ctx, p->arena, status);
    }
    if (status == TT_OK && *why) {
        p->rank.never_records = true;
        tt__log(p->ctx, TT_LOG_WARNING, "graph", "device '%s' cannot record the launches of a step, which "
                "this program makes one by one from now on, more slowly: %s",
                tt__device_name(p->arena->kind, p->arena->index, device), why);
    }
    tt__float_restore(mode);
    if (segment == TT__EACH_MICRO && status == TT_OK) p->arena->results_of = p;
    return status;
}

/* Waits for what was run so far. */
static tt_status tt__read_results(tt_program *p)
{
    const tt_tape *t = p->built.t;
    tt_status status = TT_OK;
    tt__scale scale = p->results.scale;
    const tt__arena *a = p->arena;
    if (!t->results) return tt__device_status(p->ctx, a, a->kind->backend->wait(a->device));
    const void *from = tt__resolve(p, t->results).data;
    if (t->values[t->results].space == TT__DEVICE) { /* by memory that it can copy to while others work */
        status = tt__read_memory(p->ctx, a, a->bounce, TT_U8, from, TT_U8, sizeof p->results);
        from = a->bounce;
    }
    if (status == TT_OK) memcpy(&p->results, from, sizeof p->results);
    if (!t->scale) p->results.scale = scale;
    return status;
}

static void tt__give_stats(const tt_program *p, tt_stats *stats, double norm)
{
    if (!stats) return;
    stats->loss = p->results.totals.targets > 0 ? p->results.totals.loss / p->results.totals.targets : 0;
    stats->targets = p->results.totals.targets;
    stats->correct = p->results.totals.correct;
    stats->grad_norm = norm;
    stats->flops = p->flops;
    stats->step = p->rank.run.step;
    stats->loss_scale = p->results.scale.scale;
    stats->skipped = (int64_t)p->results.scale.skipped;
}

static void tt__begin_step(tt_program *p)
{
    memset(&p->results.totals, 0, sizeof p->results.totals);
    memset(&p->results.clipped, 0, sizeof p->results.clipped);
    p->flops = 0;
    p->rank.run.micro = 0;
    p->norm_known = p->micro_failed = false;
}

/* True also where the device does not let itself be read: what it says of that matters more. */
static bool tt__all_finite(tt_program *p, int32_t v)
{
    tt__mat m = tt__resolve(p, v);
    float x[256];
    for (int64_t r = 0; r < m.rows; r++)
        for (int64_t c = 0, n; c < m.cols; c += n) {
            n = tt__min(TT__COUNT(x), m.cols - c);
            const char *at = (const char *)tt__at(&m, r) + (size_t)c * tt_dtype_bytes(m.dtype);
            if (tt__read_memory(p->ctx, p->arena, x, TT_F32, at, m.dtype, (size_t)n) != TT_OK) return true;
            for (int64_t k = 0; k < n; k++) if (!isfinite(x[k])) return false;
        }
    return true;
}

/* Of a program whose results are not finite: the first parameter that is not, else NULL. */
static const char *tt__bad_parameter(tt_program *p)
{
    for (int32_t v = 1; v < p->built.t->n_values; v++) {
        const tt__value *x = &p->built.t->values[v];
        if (x->storage == TT__PARAMETER && x->base == v && !tt__all_finite(p, v)) return x->name;
    }
    return NULL;
}

/* Fails if the loss is not finite, and says whether a parameter is the cause. */
static tt_status tt__check_loss(tt_program *p, int64_t micro)
{
    if (isfinite(p->results.totals.loss)) return TT_OK;
    const char *bad = tt__bad_parameter(p);
    return tt__fail(p->ctx, TT_ERR_NUMERIC, "step %lld, micro-batch %lld: the loss '%s' is not finite; "
                    "nothing was updated: %s%s%s", (long long)p->rank.run.step, (long long)micro,
                    p->built.t->values[p->built.root].name,
                    bad ? "parameter '" : "check the inputs, or lower the learning rate", bad ? bad : "",
                    bad ? "' has a number that is not finite" : "");
}

/* Forward, and backward of a program that trains, of one micro-batch. Results that the device has yet to
   compute are read if the caller wants them, else not waited for: a loss that is not finite shows when the
   step ends. */
static tt_status tt__micro(tt_program *p, bool wanted)
{
    const tt_tape *t = p->built.t;
    tt_status status = tt_allocate(p);
    if (status == TT_OK) status = tt__inputs_ready(p);
    if (status != TT_OK) return status;
    if (t->accumulate && !p->norm_known) { /* a power of two near the targets' number: undoing it is exact */
        int exponent = 0;
        for (int k = 0; k < t->n_code; k++)
            if (tt__is(&t->code[k], TT__LOSS)) frexp((double)tt__actual_rows(p, t->code[k].in[0]), &exponent);
        p->rank.run.loss_norm = ldexp(1.0, exponent);
        p->norm_known = true;
    }
    status = tt__run_segment(p, TT__EACH_MICRO);
    tt__forget_inputs(p);
    if (status == TT_OK && (wanted || p->settings.kind->host)) status = tt__read_results(p);
    if (status == TT_OK && p->settings.options.train) status = tt__check_loss(p, p->rank.run.micro);
    return status;
}

tt_status tt_run(tt_program *p, tt_stats *stats)
{
    if (p->settings.options.train)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_run: this program trains: use tt_step, or compile with "
                        "train = false");
    tt__begin_step(p);
    tt_status status = tt__micro(p, true);
    if (status == TT_OK) tt__give_stats(p, stats, 0);
    return status;
}

static tt_status tt__check_lr(tt_program *p, float lr)
{
    if (lr >= 0 && isfinite(lr)) return TT_OK;
    return tt__fail(p->ctx, TT_ERR_ARGUMENT, "learning rate %g is not a finite number >= 0", lr);
}

/* Fails, and names the gradient that is the cause of a norm that is not finite. */
static tt_status tt__norm_failed(tt_program *p)
{
    const tt_tape *t = p->built.t;
    const char *lowest = p->settings.scales ? " at the lowest loss scale" : "";
    const long long step = (long long)p->rank.run.step;
    for (int k = tt__segment_first(t, TT__EACH_STEP); k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        float square = 0;
        if (t->values[i->in[0]].storage != TT__GRADIENT || tt__is(i, TT__RMW)) continue;
        const void *at = tt__resolve(p, i->out[0]).data;
        tt_status status = tt__read_memory(p->ctx, p->arena, &square, TT_F32, at, TT_F32, 1);
        if (status != TT_OK) return status;
        if (isfinite(square)) continue;
        const bool finite = tt__all_finite(p, i->in[0]);
        const char *what = finite ? "overflows" : "is not finite";
        return tt__fail(p->ctx, TT_ERR_NUMERIC, "step %lld: the %sgradient of '%s' %s%s; nothing was "
                        "updated", step, finite ? "sum of squares of the " : "",
                        p->ctx->params[t->values[i->in[0]].param]->name, what, lowest);
    }
    return tt__fail(p->ctx, TT_ERR_NUMERIC, "step %lld: the global gradient norm overflows%s; nothing was "
                    "updated", step, lowest);
}

/* The update, which leaves all as it is where a loss or gradient is not finite. */
static tt_status tt__finish_step(tt_program *p, float lr, tt_stats *stats)
{
    const double skipped = p->results.scale.skipped;
    p->rank.run.lr = lr;
    tt_status status = tt__run_segment(p, TT__EACH_STEP);
    if (status == TT_OK) status = tt__read_results(p);
    if (status != TT_OK) return status;
    if (!(p->results.totals.targets > 0))
        return tt__fail(p->ctx, TT_ERR_NUMERIC, "step %lld: no target counts (all are ignored or have weight "
                        "0); nothing was updated", (long long)p->rank.run.step);
    if ((status = tt__check_loss(p, p->rank.run.micro)) != TT_OK) return status;
    const bool finite = isfinite(p->results.clipped.norm), lowered = p->results.scale.skipped != skipped;
    if (!finite && !lowered) return tt__norm_failed(p); /* else the loss scale has fallen */
    if (finite) p->rank.run.step++;
    tt__give_stats(p, stats, finite ? p->results.clipped.norm : 0);
    return TT_OK;
}

tt_status tt_step(tt_program *p, float lr, tt_stats *stats)
{
    if (!p->settings.options.train)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "this program was compiled with train = false: use tt_run");
    tt_status status = tt__check_lr(p, lr);
    if (status != TT_OK) return status;
    tt__begin_step(p);
    status = tt__micro(p, false);
    return status == TT_OK ? tt__finish_step(p, lr, stats) : status;
}

tt_status tt_micro_step(tt_program *p, tt_stats *stats)
{
    if (!p->built.t->accumulate)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_micro_step needs a program compiled with train and "
                        "accumulate");
    if (p->rank.run.micro == 0) tt__begin_step(p);
    if (p->micro_failed)
        return tt__fail(p->ctx, TT_ERR_NUMERIC, "an earlier micro-batch of this step failed: tt_update ends "
                        "the step without updating");
    tt_status status = tt__micro(p, stats != NULL);
    if (status != TT_OK && p->rank.run.micro > 0) p->micro_failed = true; /* gradients may hold half of it */
    if (status != TT_OK) return status;
    p->rank.run.micro++;
    tt__give_stats(p, stats, 0);
    return TT_OK;
}

tt_status tt_update(tt_program *p, float lr, tt_stats *stats)
{
    if (!p->built.t->accumulate)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_update needs a program compiled with train and "
                        "accumulate");
    if (p->rank.run.micro == 0)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_update: no micro-batch was run in this step");
    tt_status status = tt__check_lr(p, lr);
    if (status != TT_OK) return status;
    if (!p->micro_failed) status = tt__finish_step(p, lr, stats);
    else status = tt__fail(p->ctx, TT_ERR_NUMERIC, "step %lld: a micro-batch failed; nothing was updated",
                           (long long)p->rank.run.step);
    p->rank.run.micro = 0;
    return status;
}

tt_status tt_get_gradient(tt_program *p, const tt_param *param, float *to)
{
    const tt__results *of = &p->results;
    if (!p->built.t->accumulate || p->rank.run.micro == 0)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_get_gradient: gradients are kept between tt_micro_step "
                        "and tt_update of a program compiled with accumulate");
    tt_status status = tt__read_results(p);
    if (status != TT_OK) return status;
    if (!(of->totals.targets > 0))
        return tt__fail(p->ctx, TT_ERR_NUMERIC, "tt_get_gradient: no target counted so far (all are ignored "
                        "or have weight 0), so there is no mean");
    for (int32_t v = 1; v < p->built.t->n_values; v++) {
        const tt__value *x = &p->built.t->values[v];
        const bool gradient = x->storage == TT__GRADIENT && x->base == v;
        if (!gradient || x->param != param->index || param->ctx != p->ctx) continue;
        const tt__mat m = tt__resolve(p, v);
        status = tt__read_memory(p->ctx, p->arena, to, TT_F32, m.data, m.dtype, (size_t)param->size);
        for (int64_t k = 0; k < param->size && status == TT_OK; k++)
            to[k] = (float)(to[k] * (p->rank.run.loss_norm / of->totals.targets / of->scale.scale));
        return status;
    }
    return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_get_gradient: parameter '%s' has no gradient in this "
                    "program: it is frozen or not used", param->name);
}

/* ---- what those who train a program ask of it */

int tt_program_inputs(const tt_program *p, tt_input_info *to, int capacity)
{
    int n = 0;
    for (int32_t v = 1; v < p->built.t->n_values; v++) {
        const tt__value *x = &p->built.t->values[v];
        if (x->storage != TT__INPUT || x->base != v) continue;
        tt_input_info info = {x->name, {v}, x->shape.dtype, x->shape.rows, x->shape.cols, (int)x->shape.axis,
                              x->place != TT__NO_PLACE};
        if (n++ < capacity) to[n - 1] = info;
    }
    return n;
}

/* Which values of a recorded tape v depends on: a flag for each, to be freed; NULL without memory. */
static bool *tt__needed_for(const tt_tape *t, tt_value v)
{
    bool *needed = (bool *)tt__calloc(t->ctx, (size_t)t->n_values);
    if (!needed) return NULL;
    needed[t->values[v.id].base] = true;
    for (int k = t->n_code - 1; k >= 0; k--) {
        const tt__instr *i = &t->code[k];
        bool needs = false;
        for (int j = 0; j < TT__MAX_OUT; j++)
            needs = needs || (i->out[j] && needed[t->values[i->out[j]].base]);
        for (int j = 0; j < TT__MAX_IN && needs; j++) if (i->in[j]) needed[t->values[i->in[j]].base] = true;
    }
    return needed;
}

/* Forgets the micro-batches of the step at hand: the next is the first of a step. */
static void tt__discard_step(tt_program *p) { p->rank.run.micro = 0; }
static bool tt__within_step(const tt_program *p) { return p->rank.run.micro > 0; }
int64_t tt_program_steps(const tt_program *p) { return p->rank.run.step; }

/* What decides a training's numbers: what was recorded, its precision and products, loss scaling, and how the
   optimizer's instructions update. How the program is placed, recomputed or run does not, nor its device. */
static uint64_t tt__program_hash(const tt_program *p)
{
    const tt_loss_scale *s = &p->settings.options.loss_scale;
    const bool scales = p->settings.scales;
    const int how[] = {(int)p->settings.precision.kind, p->settings.precision.residual_f32,
                       (int)p->settings.matmul, scales ? s->interval : 0};
    const float scaling[] = {scales ? s->growth : 0, scales ? s->backoff : 0};
    uint64_t hash = tt__hash_on(p->built.recorded, how, sizeof how);
    hash = tt__hash_on(hash, scaling, sizeof scaling);
    for (int k = 0; k < p->built.t->n_code; k++) {
        const tt__instr *i = &p->built.t->code[k];
        if (i->segment == TT__EACH_STEP) hash = tt__attr_hash(hash, &i->attr);
    }
    return hash;
}

enum { TT__STATE_VERSION = 5 };
#define TT__MOST_STEPS ((int64_t)1 << 62) /* more were not done: counting on would overflow */

/* What a state has beside tensors, and what it must be of to go on in a program: "tinytrain.run", all of 8
   bytes, as I64. Optimizer and precision: numbers of tt_optimizer_kind and tt__precision_kind. */
typedef struct tt__state_header {
    int64_t version, seed, step, good_steps, skipped;
    double loss_scale;
    int64_t optimizer, precision, program;
} tt__state_header;

static tt__state_header tt__state_header_of(const tt_program *p)
{
    const tt__settings *set = &p->settings;
    const tt__scale *s = &p->results.scale;
    const tt__state_header h = {TT__STATE_VERSION, (int64_t)p->rank.run.seed, p->rank.run.step,
                                (int64_t)s->good_steps, (int64_t)s->skipped, s->scale,
                                (int64_t)set->options.optimizer.kind, (int64_t)set->precision.kind,
                                (int64_t)tt__program_hash(p)};
    return h;
}

/* ===========================================================================================================
   REPORTS                                                                                           >>reports
   A program and its memory plan as numbers, as text and as a picture. Uses all above.
   ======================================================================================================== */

const char *tt_category_name(tt_category c)
{
    static const char *const names[] = {"parameters", "gradients", "optimizer", "activations", "workspace",
                                        "inputs"};
    return (unsigned)c < TT_MEM_CATEGORIES ? names[c] : "unknown category";
}

static tt_category tt__category(const tt_tape *t, int32_t base)
{
    if (!base) return TT_MEM_WORKSPACE;
    switch (t->values[base].storage) {
    case TT__STEP: return TT_MEM_WORKSPACE;
    case TT__PARAMETER: return TT_MEM_PARAMETERS;
    case TT__GRADIENT: return TT_MEM_GRADIENTS;
    case TT__STATE: return TT_MEM_OPTIMIZER;
    case TT__INPUT: return TT_MEM_INPUTS;
    default: return TT_MEM_ACTIVATIONS;
    }
}

/* Storage k of the program's arena: the resident workspace (0), then persistent values, then boxes. False if
   it has none of that number, 0 <= k < tt__storages(p). */
static int tt__storages(const tt_program *p) { return p->built.t->n_values + p->built.n_boxes; }

static bool tt__storage_of(const tt_program *p, int k, tt_plan_value *to)
{
    const tt_tape *t = p->built.t;
    memset(to, 0, sizeof *to);
    if (k >= t->n_values) {
        const tt__box *box = &p->built.box[k - t->n_values];
        to->name = box->value ? t->values[box->value].name : tt__instr_name(&t->code[box->first]);
        to->category = tt__category(t, box->value);
        to->bytes = box->bytes;
        to->first = box->first;
        to->last = box->last;
        return box->merged == k - t->n_values && box->bytes && box->space == TT__DEVICE;
    }
    const tt__value *x = &t->values[k];
    const bool elsewhere = x->storage == TT__PARAMETER && !tt__home_in(p->arena, x->param);
    to->name = k ? x->name : "matmul";
    to->category = tt__category(t, k);
    to->bytes = k ? tt__arena_bytes(t, x) : p->settings.kind->resident;
    to->last = (int)tt__max(1, t->n_code) - 1;
    return k ? x->persistent && x->base == k && x->space == TT__DEVICE && !elsewhere : to->bytes > 0;
}

/* The same, of what is alive at the peak. */
static bool tt__storage_at_peak(const tt_program *p, int k, tt_plan_value *to)
{
    return tt__storage_of(p, k, to) && to->first <= p->built.peak_at && to->last >= p->built.peak_at;
}

tt_plan tt_program_plan(const tt_program *p)
{
    tt_plan plan;
    tt_plan_value v;
    const tt_tape *t = p->built.t;
    memset(&plan, 0, sizeof plan);
    plan.device = p->settings.kind->name;
    plan.persistent_bytes = p->arena->persistent;
    plan.bytes = p->arena->persistent + p->arena->transient;
    plan.lower_bound_bytes = p->arena->persistent + p->built.bound;
    plan.host_bytes = p->built.host_persistent + p->built.host_transient + tt__staging_bytes(p);
    if (!p->settings.kind->host) plan.host_bytes += TT__BOUNCE;
    plan.instructions = t->n_code;
    plan.values = t->n_values - 1;
    for (int k = 0; k < tt__storages(p); k++)
        if (tt__storage_at_peak(p, k, &v)) plan.at_peak[v.category] += v.bytes;
    plan.init_bytes = plan.at_peak[TT_MEM_PARAMETERS] + p->settings.kind->resident;
    plan.init_bytes += TT__BOUNCE;
    plan.peak_instruction = p->built.peak_at;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const char *name = t->values[i->out[0]].name;
        tt__mat in[TT__MAX_IN];
        if (k == p->built.peak_at)
            snprintf(plan.peak_name, sizeof plan.peak_name, "%s %.60s", tt__instr_name(i), name);
        if (!i->in[0]) continue;
        for (int j = 0; j < TT__MAX_IN; j++) in[j] = tt__at_capacity(t, i->in[j]);
        double flops = tt__flops(i, in);
        plan.flops += flops;
        if (i->again) plan.extra_flops += flops;
    }
    return plan;
}

/* Orders storages by their bytes, of which `arg` is the array, largest first. */
static bool tt__larger_storage(const void *arg, uint32_t a, uint32_t b)
{
    const size_t *bytes = (const size_t *)arg;
    return bytes[a] != bytes[b] ? bytes[a] > bytes[b] : a < b;
}

int tt_plan_values(const tt_program *p, tt_plan_value *to, int capacity)
{
    const int values = p->built.t->n_values, storages = tt__storages(p);
    const size_t bytes_each = sizeof(size_t) + sizeof(uint32_t) + sizeof(int32_t);
    size_t *bytes = (size_t *)tt__calloc(p->ctx, bytes_each * (size_t)storages);
    uint32_t *order = (uint32_t *)(bytes + storages);
    int32_t *holds = (int32_t *)(order + storages); /* of boxes: the value that took over the place last */
    int n = 0;
    for (int k = 0; k < storages && bytes; k++) {
        const tt__box *box = k < values ? NULL : &p->built.box[k - values];
        tt_plan_value v;
        if (box && box->first <= p->built.peak_at) holds[values + box->merged] = box->value;
        if (!tt__storage_at_peak(p, k, &v)) continue;
        order[n++] = (uint32_t)k;
        bytes[k] = v.bytes;
    }
    if (capacity > 0 && bytes) tt__sort_indices(order, (size_t)n, tt__larger_storage, bytes);
    for (int k = 0; k < n && k < capacity; k++) {
        tt__storage_of(p, (int)order[k], &to[k]);
        if (holds[order[k]]) to[k].name = p->built.t->values[holds[order[k]]].name;
    }
    tt__free(p->ctx, bytes);
    return n;
}

static bool tt__is_alphanumeric(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* The name with '*' for each number that stands alone: "layer.*.norm1" for "layer.3.norm1". */
static void tt__without_numbers(const char *name, char *to, size_t capacity)
{
    size_t n = 0;
    bool inside = false; /* of a word */
    while (*name && n + 1 < capacity) {
        size_t digits = inside ? 0 : strspn(name, "0123456789");
        bool number = digits && !tt__is_alphanumeric(name[digits]);
        inside = !number && tt__is_alphanumeric(*name);
        to[n++] = number ? '*' : *name;
        name += number ? digits : 1;
    }
    to[n] = 0;
}

/* Values of one size and category whose names differ in numbers only. */
typedef struct tt__plan_group { char name[72]; const tt_plan_value *first; int count; } tt__plan_group;

/* The largest values at the peak; those of a group share a line: one for 24 layers. */
static void tt__print_largest(const tt_program *p, tt__text *text)
{
    const int n = tt_plan_values(p, NULL, 0);
    int groups = 0, others = n;
    uint32_t mask = 1;
    size_t rest = 0;
    while (mask < 2 * (uint32_t)n) mask = 2 * mask + 1;
    tt_plan_value *all = (tt_plan_value *)tt__alloc(p->ctx, sizeof *all * (size_t)(n + 1));
    tt__plan_group *group = (tt__plan_group *)tt__calloc(p->ctx, sizeof *group * (size_t)(n + 1));
    uint32_t *slot = (uint32_t *)tt__calloc(p->ctx, sizeof *slot * ((size_t)mask + 1)); /* a hash table */
    const bool ok = all && group && slot && tt_plan_values(p, all, n) == n;
    if (!ok) others = 0; /* the rest of the report is worth having */
    for (int i = 0; i < others; i++) {
        const tt_plan_value *v = &all[i];
        tt__plan_group *g = &group[groups];
        tt__without_numbers(v->name, g->name, sizeof g->name);
        const uint64_t hash = tt__hash_on(tt__hash(g->name), &v->bytes, sizeof v->bytes);
        uint32_t at = (uint32_t)(hash ^ hash >> 32) & mask;
        for (; slot[at]; at = (at + 1) & mask) {
            const tt__plan_group *has = &group[slot[at] - 1];
            const bool like = has->first->bytes == v->bytes && has->first->category == v->category;
            if (like && strcmp(has->name, g->name) == 0) break;
        }
        if (!slot[at]) {
            g->first = v;
            slot[at] = (uint32_t)++groups;
        }
        group[slot[at] - 1].count++;
        rest += v->bytes;
    }
    for (int k = 0; k < 8 && k < groups; k++) {
        tt__plan_group *g = group;
        for (tt__plan_group *i = group + 1; i < &group[groups]; i++)
            if (i->first->bytes * (size_t)i->count > g->first->bytes * (size_t)g->count) g = i;
        const size_t bytes = g->first->bytes * (size_t)g->count;
        tt__print(text, "  %8s %10.1f MB  ", k ? "" : "largest:", (double)bytes / 1e6);
        if (g->count > 1) tt__print(text, "%d x ", g->count);
        tt__print(text, "%.71s (%s)\n", g->count > 1 ? g->name : g->first->name,
                  tt_category_name(g->first->category));
        rest -= bytes;
        others -= g->count;
        g->count = 0;
    }
    if (others) tt__print(text, "  %8s %10.1f MB  %d others\n", "", (double)rest / 1e6, others);
    tt__free(p->ctx, slot);
    tt__free(p->ctx, group);
    tt__free(p->ctx, all);
}

size_t tt_plan_text(const tt_program *p, char *to, size_t capacity)
{
    tt__text text = {to, capacity, 0};
    const tt_plan plan = tt_program_plan(p);
    const double mb = 1e-6, transient = mb * (double)(plan.bytes - plan.persistent_bytes);
    tt__print(&text, "memory plan for %s: %.1f MB (%.1f persistent, %.1f transient; lower bound %.1f; %.1f "
              "to initialise the parameters)\n", plan.device, mb * (double)plan.bytes,
              mb * (double)plan.persistent_bytes, transient, mb * (double)plan.lower_bound_bytes,
              mb * (double)plan.init_bytes);
    tt__print(&text, "  peak at instruction %d of %d: %s; %.2f GFLOP a run at full capacity",
              plan.peak_instruction, plan.instructions, plan.peak_name, plan.flops / 1e9);
    if (plan.extra_flops > 0) tt__print(&text, ", %.2f of them computed again", plan.extra_flops / 1e9);
    tt__print(&text, "\n");
    for (int c = 0; c < TT_MEM_CATEGORIES; c++) {
        const char *name = tt_category_name((tt_category)c);
        if (plan.at_peak[c]) tt__print(&text, "  %-12s %6.1f MB\n", name, mb * (double)plan.at_peak[c]);
    }
    tt__print_largest(p, &text);
    return text.length;
}

/* 1, 2 or 5 times a power of ten: the step of an axis that so has no more than `marks` of them. */
static double tt__axis_step(double length, int marks)
{
    static const int times[] = {1, 2, 5};
    const double step = pow(10, floor(log10(length / marks)));
    for (int k = 0; k < TT__COUNT(times); k++) if (length <= times[k] * step * marks) return times[k] * step;
    return 10 * step;
}

static void tt__print_xml(tt__text *text, const char *name)
{
    for (; *name; name++) {
        if (*name == '&') tt__print(text, "&amp;");
        else if (*name == '<') tt__print(text, "&lt;");
        else tt__print(text, "%c", *name >= ' ' && *name <= '~' ? *name : '?');
    }
}

/* live[k * N + c]: bytes in use in column k, of the categories tt__layer[0..c]. A column is one of n
   instructions or, where several share it, the one that needs most. NULL when out of memory. */
static const tt_category tt__layer[] = {TT_MEM_PARAMETERS, TT_MEM_OPTIMIZER, TT_MEM_GRADIENTS, TT_MEM_INPUTS,
                                        TT_MEM_ACTIVATIONS, TT_MEM_WORKSPACE};
static int64_t *tt__live_layers(const tt_program *p, int n, int columns)
{
    enum { N = TT_MEM_CATEGORIES };
    int64_t *live = (int64_t *)tt__calloc(p->ctx, sizeof *live * (size_t)(n + 1) * N);
    tt_plan_value v;
    for (int k = 0; live && k < tt__storages(p); k++) {
        int c = 0;
        if (!tt__storage_of(p, k, &v)) continue;
        while (tt__layer[c] != v.category) c++;
        for (; c < N; c++) {
            live[v.first * N + c] += (int64_t)v.bytes;
            live[(v.last + 1) * N + c] -= (int64_t)v.bytes;
        }
    }
    for (int k = N; live && k < n * N; k++) live[k] += live[k - N];
    for (int k = 0; live && k < columns; k++) {
        int64_t most = (int64_t)k * n / columns;
        for (int64_t j = most + 1; j < (int64_t)(k + 1) * n / columns; j++)
            if (live[j * N + N - 1] > live[most * N + N - 1]) most = j;
        memmove(&live[k * N], &live[most * N], sizeof *live * N);
    }
    return live;
}

/* Pixels of the picture: the corners of the plot, and its size. */
enum { TT__LEFT = 64, TT__TOP = 66, TT__WIDTH = 600, TT__HEIGHT = 290, TT__RIGHT = TT__LEFT + TT__WIDTH,
       TT__BOTTOM = TT__TOP + TT__HEIGHT };

/* A line of text of the picture; `anchor`: "start", "middle" or "end" is at x. */
TT_PRINTF(5, 6)
static void tt__label(tt__text *text, int x, int y, const char *anchor, const char *format, ...)
{
    char label[160];
    va_list args;
    va_start(args, format);
    vsnprintf(label, sizeof label, format, args);
    va_end(args);
    tt__print(text, "<text x='%d' y='%d' text-anchor='%s'>%s</text>\n", x, y, anchor, label);
}

/* Draws the layers of memory over the columns, each down to the axis and the next over it, in tenths of a
   pixel from the lower left corner, upwards; scale: tenths a byte. Notes which there are. */
static void tt__draw_layers(tt__text *text, const int64_t *live, int columns, double scale,
                            const char *const *colour, bool *drawn)
{
    enum { N = TT_MEM_CATEGORIES };
    for (int c = N - 1; c >= 0; c--) {
        int height = 0, x = 0;
        drawn[c] = false;
        for (int k = c; k < columns * N && !drawn[c]; k += N) drawn[c] = live[k] > (c ? live[k - 1] : 0);
        if (!drawn[c]) continue;
        tt__print(text, "<path fill='%s' d='M0 0", colour[c]);
        for (int k = 0; k < columns; k++) {
            const int from = (int)(10 * (int64_t)TT__WIDTH * k / columns);
            const int h = (int)((double)live[k * N + c] * scale + 0.5);
            if (h == height) continue;
            if (from > x) tt__print(text, "h%d", from - x);
            tt__print(text, "v%d", h - height);
            x = from;
            height = h;
        }
        tt__print(text, "H%dV0z'><title>%s</title></path>\n", 10 * TT__WIDTH, tt_category_name(tt__layer[c]));
    }
}

/* Below the axis, which instructions are forward, backward and update. */
static void tt__draw_parts(tt__text *text, const tt__instr *i, int instructions)
{
    static const char *const names[] = {"forward", "backward", "update"};
    for (int part = 0, from = 0, upto = 0; part < 3; part++, from = upto) {
        for (; upto < instructions; upto++)
            if ((i[upto].segment == TT__EACH_STEP ? 2 : i[upto].backward) > part) break;
        if (upto == from) continue;
        const int x = TT__LEFT + TT__WIDTH * from / instructions;
        const int width = TT__LEFT + TT__WIDTH * upto / instructions - x;
        tt__print(text, "<rect x='%d' y='%d' width='%d' height='17' fill='%s'/>", x, TT__BOTTOM + 1, width,
                  part == 1 ? "#dcdcdc" : "#ececec");
        if (width > 60) tt__label(text, x + width / 2, TT__BOTTOM + 14, "middle", "%s", names[part]);
    }
}

size_t tt_plan_svg(const tt_program *p, char *to, size_t capacity)
{
    enum { N = TT_MEM_CATEGORIES, LEGEND = TT__RIGHT + 24 };
    static const char *const colour[N] = {"#4e79a7", "#a0cbe8", "#f28e2b", "#b07aa1", "#59a14f", "#9c9490"};
    const tt_plan plan = tt_program_plan(p);
    const int n = (int)tt__max(1, plan.instructions), columns = (int)tt__min(n, TT__WIDTH);
    size_t peak = 0;
    for (int c = 0; c < N; c++) peak += plan.at_peak[c];
    const double most = (double)(peak > plan.bytes ? peak : plan.bytes) + 1, full = 1.2 * most;
    const double scale = 10 * TT__HEIGHT / full, unit = most < 1e9 ? 1e6 : 1e9;
    const double step = tt__axis_step(full / unit, 6);
    const char *unit_name = most < 1e9 ? "MB" : "GB";
    const int digits = most < 10 * unit ? 3 : most < 100 * unit ? 2 : 1; /* behind the point */
    int64_t *live = tt__live_layers(p, n, columns);
    bool drawn[N];
    tt__text text = {to, capacity, 0};
    if (capacity) to[0] = 0;
    if (!live) return 0;
    tt__print(&text, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 880 %d' width='880' height='%d' "
              "font-family='Helvetica,Arial,sans-serif' font-size='12' fill='#222'>\n", TT__BOTTOM + 64,
              TT__BOTTOM + 64);
    tt__print(&text, "<rect x='.5' y='.5' width='879' height='%d' rx='6' fill='#fff' stroke='#ccc'/>\n"
              "<text x='%d' y='28' font-size='15' font-weight='bold'>Memory of one %s on %s, by "
              "instruction</text>\n", TT__BOTTOM + 63, TT__LEFT,
              p->settings.options.train ? "training step" : "run", plan.device);
    tt__print(&text, "<g transform='translate(%d %d) scale(.1 -.1)' fill='none' stroke-width='10'>\n"
              "<path stroke='#e2e2e2' d='", TT__LEFT, TT__BOTTOM);
    for (int k = 1; k * step * unit < full; k++)
        tt__print(&text, "M0 %dh%d", (int)(k * step * unit * scale + 0.5), 10 * TT__WIDTH);
    tt__print(&text, "'/>\n");
    tt__draw_layers(&text, live, columns, scale, colour, drawn);
    tt__free(p->ctx, live);
    const int peak_x = (int)((plan.peak_instruction + 0.5) / n * (double)(10 * TT__WIDTH));
    const int peak_y = (int)((double)peak * scale + 0.5), arena_y = (int)((double)plan.bytes * scale + 0.5);
    tt__print(&text, "<path stroke='#222' stroke-dasharray='60 40' d='M0 %dH%d'/>\n<path stroke='#222' d='M0 "
              "%dV0H%dM%d %dV%d'/><circle cx='%d' cy='%d' r='35' fill='#222'/>\n</g>\n", arena_y,
              10 * TT__WIDTH, 10 * TT__HEIGHT, 10 * TT__WIDTH, peak_x, peak_y, 10 * TT__HEIGHT - 190, peak_x,
              peak_y);
    tt__draw_parts(&text, p->built.t->code, plan.instructions);
    for (int k = 0; k * step * unit < full; k++) {
        const int up = (int)(k * step * unit * scale / 10 + 0.5);
        tt__label(&text, TT__LEFT - 6, TT__BOTTOM + 4 - up, "end", "%g", k * step);
    }
    for (int k = 0, each = (int)tt__max(1, (int64_t)tt__axis_step(n, 8)); k <= n; k += each)
        tt__label(&text, TT__LEFT + (int)((int64_t)TT__WIDTH * k / n), TT__BOTTOM + 33, "middle", "%d", k);
    tt__label(&text, TT__LEFT - 6, TT__TOP - 8, "end", "%s", unit_name);
    tt__label(&text, TT__LEFT + TT__WIDTH / 2, TT__BOTTOM + 52, "middle", "instruction");
    const int width = 7 * (24 + (int)strlen(plan.peak_name)); /* of the label of the peak, about */
    const int64_t label_x = tt__min(TT__LEFT + (peak_x - 5 * width) / 10, 872 - width);
    tt__print(&text, "<text x='%d' y='%d'><tspan font-weight='bold'>peak %.*f %s</tspan> at %d: ",
              (int)tt__max(TT__LEFT + 8, label_x), TT__TOP + 13, digits, (double)peak / unit, unit_name,
              plan.peak_instruction);
    tt__print_xml(&text, plan.peak_name);
    tt__print(&text, "</text>\n");
    tt__label(&text, TT__RIGHT + 8, TT__BOTTOM + 4 - arena_y / 10, "start", "arena %.*f %s", digits,
              (double)plan.bytes / unit, unit_name);
    tt__label(&text, LEGEND, TT__TOP + 92, "start", "at the peak");
    for (int c = N - 1, y = TT__TOP + 100; c >= 0; c--) {
        if (!drawn[c]) continue;
        tt__print(&text, "<rect x='%d' y='%d' width='13' height='13' fill='%s'/>", LEGEND, y, colour[c]);
        tt__label(&text, LEGEND + 19, y + 11, "start", "%s", tt_category_name(tt__layer[c]));
        tt__label(&text, 864, y + 11, "end", "%.*f %s", digits, (double)plan.at_peak[tt__layer[c]] / unit,
                  unit_name);
        y += 22;
    }
    tt__print(&text, "</svg>\n");
    return text.length;
}

size_t tt_program_text(const tt_program *p, char *to, size_t capacity)
{
    const tt_tape *t = p->built.t;
    tt__text text = {to, capacity, 0};
    char what[256];
    if (capacity) to[0] = 0;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        tt__print(&text, "%4d %-24s", k, tt__instr_name(i));
        for (int j = 0; j < TT__MAX_OUT; j++) {
            const tt__value *x = &t->values[t->values[i->out[j]].base];
            const tt_param *param = x->storage == TT__PARAMETER ? p->ctx->params[x->param] : NULL;
            const tt__arena *a = param ? tt__home_arena(p->settings.kind, p->arena, param) : NULL;
            if (!i->out[j]) continue;
            tt__print(&text, " %s%s @%zu", tt__describe(t, i->out[j], what, sizeof what), i->add >> j & 1 ?
                      " +=" : "", a ? tt__home_in(a, x->param)->offset : x->place);
        }
        tt__print(&text, " <-");
        for (int j = 0; j < TT__MAX_IN; j++)
            if (i->in[j]) tt__print(&text, " '%s'", t->values[i->in[j]].name);
        tt__print(&text, "%s\n", i->with_next ? " ..." : "");
    }
    return text.length;
}

/* ===========================================================================================================
   FORMATS                                                                                           >>formats
   JSON, safetensors, BERT's tokenizer, images, datasets and batches. Uses >>base and >>unicode's tables.
   Files are not trusted: every number that a file gives is checked before it is used, and no input makes a
   loop worse than n log n.
   ======================================================================================================== */

#include <locale.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tinytrain copies the little-endian numbers of files as they are: this machine is big-endian"
#endif

/* Orders by bytes, as strcmp, for strings that may hold a NUL. */
static int tt__compare_bytes(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    return order ? order : (a_bytes > b_bytes) - (a_bytes < b_bytes);
}

/* Strings whose pointers are `stride` bytes apart, as in an array of structs. */
typedef struct tt__strings { const char *const *first; size_t stride; } tt__strings;

static const char *tt__string_at(const tt__strings *s, uint32_t i)
{
    return *(const char *const *)(const void *)((const char *)s->first + i * s->stride);
}

static bool tt__less_string(const void *arg, uint32_t a, uint32_t b)
{
    const tt__strings *s = (const tt__strings *)arg;
    int order = strcmp(tt__string_at(s, a), tt__string_at(s, b));
    return order ? order < 0 : a < b;
}

/* The numbers 0..n - 1 of strings in the order of their bytes, to be freed; NULL and an error without memory.
   *twice: a string that is there more than once, else NULL. */
static uint32_t *tt__sort_strings(tt_context *ctx, tt__strings s, int n, const char **twice)
{
    uint32_t *order = (uint32_t *)tt__alloc(ctx, (size_t)n * sizeof *order);
    *twice = NULL;
    for (int i = 0; order && i < n; i++) order[i] = (uint32_t)i;
    if (order) tt__sort_indices(order, (size_t)n, tt__less_string, &s);
    for (int i = 1; order && i < n && !*twice; i++) {
        const char *name = tt__string_at(&s, order[i]);
        if (strcmp(tt__string_at(&s, order[i - 1]), name) == 0) *twice = name;
    }
    return order;
}

/* Many small pieces of memory that are released together. Unlike tt__alloc, tt__chunks_take leaves no error
   when memory is out, since background threads use it: the thread that talks to the user does that. */
typedef struct tt__chunk { struct tt__chunk *next; size_t used, capacity; } tt__chunk;

static void *tt__chunks_take(tt_context *ctx, tt__chunk **chunks, size_t bytes)
{
    const size_t least = (size_t)1 << 18;
    tt__chunk *chunk = *chunks;
    size_t padded = (bytes + 7) & ~(size_t)7;
    if (padded < bytes) return NULL;
    if (!chunk || chunk->capacity - chunk->used < padded) {
        size_t capacity = padded > least ? padded : least;
        if (capacity > SIZE_MAX - sizeof *chunk) return NULL;
        if (!(chunk = (tt__chunk *)tt__try_alloc(ctx, sizeof *chunk + capacity))) return NULL;
        chunk->capacity = capacity;
        chunk->used = 0;
        chunk->next = *chunks;
        *chunks = chunk;
    }
    chunk->used += padded;
    return (char *)(chunk + 1) + chunk->used - padded;
}

/* Copies a text, with a NUL behind it. */
static char *tt__chunks_text(tt_context *ctx, tt__chunk **chunks, const char *text, size_t bytes)
{
    char *copy = bytes < SIZE_MAX ? (char *)tt__chunks_take(ctx, chunks, bytes + 1) : NULL;
    if (copy && bytes) memcpy(copy, text, bytes);
    if (copy) copy[bytes] = 0;
    return copy;
}

static void tt__chunks_free(tt_context *ctx, tt__chunk **chunks)
{
    for (tt__chunk *chunk; (chunk = *chunks) != NULL; tt__free(ctx, chunk)) *chunks = chunk->next;
}

static void tt__free_all(tt_context *ctx, void *const *memory, int n)
{
    for (int i = 0; i < n; i++) tt__free(ctx, memory[i]);
}

#define TT__PATH 1024

/* folder/name, with one slash between them. */
static tt_status tt__path_join(tt_context *ctx, char path[TT__PATH], const char *folder, const char *name)
{
    size_t n = strlen(folder);
    int length = snprintf(path, TT__PATH, "%s%s%s", folder, n && folder[n - 1] == '/' ? "" : "/", name);
    if (length >= 0 && length < TT__PATH) return TT_OK;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "the path '%.200s...' and '%.200s' are together longer than %d "
                    "bytes", folder, name, TT__PATH - 1);
}

/* ------------------------------------------------------------------------------------------------- UTF-8 */

#define TT__INVALID 0xFFFFFFFFu

/* Returns the code point at text[*at] and moves on. Bytes that are no UTF-8 (overlong forms, surrogates, cut
   sequences) are TT__INVALID; *at then moves past the longest start of a valid sequence, as the Unicode
   Standard, section 3.9, advises. */
static uint32_t tt__utf8_next(const char *text, size_t bytes, size_t *at)
{
    const unsigned char *p = (const unsigned char *)text;
    uint32_t c = p[(*at)++], low = 0x80, high = 0xBF; /* of the next byte */
    int more = c < 0xE0 ? 1 : c < 0xF0 ? 2 : 3;
    if (c < 0x80) return c;
    if (c < 0xC2 || c > 0xF4) return TT__INVALID;
    if (c == 0xE0) low = 0xA0;
    if (c == 0xED) high = 0x9F;
    if (c == 0xF0) low = 0x90;
    if (c == 0xF4) high = 0x8F;
    for (c &= 0x3Fu >> more; more; more--) {
        if (*at == bytes || p[*at] < low || p[*at] > high) return TT__INVALID;
        c = c << 6 | (p[(*at)++] & 0x3Fu);
        low = 0x80;
        high = 0xBF;
    }
    return c;
}

static int tt__utf8_put(uint32_t c, char to[4]) /* returns the number of bytes */
{
    int more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    to[0] = (char)(more ? (0xFF00u >> (more + 1) & 0xFF) | c >> 6 * more : c);
    for (int k = 1; k <= more; k++) to[k] = (char)(0x80 | (c >> 6 * (more - k) & 0x3F));
    return more + 1;
}

/* Where the last character of a text in UTF-8, which has one, begins. */
static size_t tt__utf8_last(const char *text, size_t bytes)
{
    do {
        bytes--;
    } while (((unsigned char)text[bytes] & 0xC0) == 0x80);
    return bytes;
}

/* Offset of the first byte that is no UTF-8; `bytes` if there is none. */
static size_t tt__utf8_invalid(const char *text, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        size_t from = at;
        if (tt__utf8_next(text, bytes, &at) == TT__INVALID) return from;
    }
    return bytes;
}

static bool tt__is_utf8(const char *text) { return !text[tt__utf8_invalid(text, strlen(text))]; }

/* -------------------------------------------------------------------------------------------------- JSON */

/* RFC 8259. Where the RFC leaves a choice, duplicate keys, unpaired surrogates, numbers beyond double and
   nesting beyond TT__JSON_DEPTH are refused. A leading byte order mark is skipped. */
#define TT__JSON_DEPTH 64
#define TT__JSON_NUMBER 512 /* longest number, in characters */

typedef enum tt__json_kind {
    TT__JSON_NULL, TT__JSON_FALSE, TT__JSON_TRUE, TT__JSON_NUMBER_KIND, TT__JSON_STRING, TT__JSON_ARRAY,
    TT__JSON_OBJECT
} tt__json_kind;

/* Nodes lie in the order of the text: the first child of node i is i + 1, its next sibling nodes[i].after. */
typedef struct tt__json_node {
    uint8_t kind;
    bool exact;              /* a number written as an integer that int64 holds: `integer` is it */
    int32_t count;           /* members of an array or object; bytes of a string */
    int32_t after;           /* the node behind this one and all that it holds */
    uint32_t offset;         /* of its first byte in the text */
    uint32_t key, key_bytes; /* of a member of an object: in `pool`, with a NUL behind */
    double number;   /* in a safetensors header, of a tensor: its number; of other members: -1 */
    int64_t integer; /* a string: its place in `pool`; an object: that of its sorted members in `sorted` */
} tt__json_node;

typedef struct tt__json {
    tt_context *ctx;
    const char *path;        /* for errors */
    const char *text;
    size_t bytes, at;
    size_t base;             /* offset of the text in its file, for errors */
    tt__json_node *nodes;
    int count, capacity;
    uint32_t *sorted;        /* of each object, its members by key: for lookups, and to find duplicates */
    int n_sorted, cap_sorted;
    char *pool;              /* all strings, without escapes, a NUL behind each */
    size_t used;
} tt__json;

static void tt__json_free(tt__json *j)
{
    tt__free(j->ctx, j->nodes);
    tt__free(j->ctx, j->sorted);
    tt__free(j->ctx, j->pool);
    memset(j, 0, sizeof *j);
}

TT_PRINTF(3, 4)
static bool tt__json_fail(const tt__json *j, size_t offset, const char *format, ...)
{
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    tt__fail(j->ctx, TT_ERR_FORMAT, "'%s', byte %zu: not valid JSON: %s", j->path, j->base + offset, what);
    return false;
}

/* The next character; 0 at the end. */
static char tt__json_peek(const tt__json *j) { return j->at < j->bytes ? j->text[j->at] : 0; }

/* Fails at `offset`, saying what was expected and what is next instead. */
static bool tt__json_expected(const tt__json *j, size_t offset, const char *expected)
{
    char found[32];
    unsigned char c = (unsigned char)tt__json_peek(j);
    if (j->at >= j->bytes) snprintf(found, sizeof found, "the end of the text");
    else if (c > 0x20 && c < 0x7F) snprintf(found, sizeof found, "'%c'", c);
    else snprintf(found, sizeof found, "byte 0x%02x", c);
    return tt__json_fail(j, offset, "%s, found %s", expected, found);
}

static bool tt__json_take(tt__json *j, char c) /* moves on if it is next */
{
    if (tt__json_peek(j) != c) return false;
    j->at++;
    return true;
}

static void tt__json_skip_space(tt__json *j)
{
    for (char c = tt__json_peek(j); c == ' ' || c == '\n' || c == '\r' || c == '\t'; c = tt__json_peek(j))
        j->at++;
}

static int tt__json_push(tt__json *j, tt__json_kind kind, size_t offset) /* -1: out of memory */
{
    if (!TT__GROW(j->ctx, j->nodes, j->count, j->capacity)) {
        tt__fail(j->ctx, TT_ERR_MEMORY, "out of memory for the %d values of '%s'", j->count + 1, j->path);
        return -1;
    }
    tt__json_node *node = &j->nodes[j->count];
    memset(node, 0, sizeof *node);
    node->kind = (uint8_t)kind;
    node->offset = (uint32_t)offset;
    node->after = j->count + 1;
    return j->count++;
}

static bool tt__json_hex4(tt__json *j, uint32_t *value) /* the four digits of \uXXXX */
{
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    *value = 0;
    for (int i = 0; i < 4; i++, j->at++) {
        char c = tt__json_peek(j);
        const char *digit = c ? strchr(digits, c) : NULL;
        if (!digit) return tt__json_expected(j, j->at, "\\u needs four hexadecimal digits");
        *value = *value << 4 | ((uint32_t)(digit - digits) & 15);
    }
    return true;
}

static bool tt__json_escape(tt__json *j) /* at the backslash */
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    size_t from = j->at++;
    char c = tt__json_peek(j);
    const char *simple = c ? strchr(names, c) : NULL;
    if (simple) {
        j->pool[j->used++] = values[simple - names];
        j->at++;
        return true;
    }
    if (c != 'u')
        return tt__json_expected(j, from, "a backslash must be followed by one of \" \\ / b f n r t u");
    uint32_t code, low;
    j->at++;
    if (!tt__json_hex4(j, &code)) return false;
    if (code >= 0xDC00 && code <= 0xDFFF)
        return tt__json_fail(j, from, "\\u%04x is the second half of a surrogate pair without the first",
                             code);
    if (code >= 0xD800 && code <= 0xDBFF) {
        if (!tt__json_take(j, '\\') || !tt__json_take(j, 'u'))
            return tt__json_fail(j, from, "\\u%04x is the first half of a surrogate pair without the second",
                                 code);
        if (!tt__json_hex4(j, &low)) return false;
        if (low < 0xDC00 || low > 0xDFFF)
            return tt__json_fail(j, from, "\\u%04x\\u%04x is no surrogate pair", code, low);
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    j->used += (size_t)tt__utf8_put(code, j->pool + j->used);
    return true;
}

/* Reads a string, from its opening quote on, into the pool. The pool never overflows: a decoded string and
   its NUL are shorter than the same string with its quotes. */
static bool tt__json_string(tt__json *j, uint32_t *start, uint32_t *bytes)
{
    size_t opened = j->at++;
    *start = (uint32_t)j->used;
    while (j->at < j->bytes && j->text[j->at] != '"') {
        unsigned char c = (unsigned char)j->text[j->at];
        if (c == '\\') {
            if (!tt__json_escape(j)) return false;
        } else if (c < 0x20) {
            return tt__json_fail(j, j->at, "control character 0x%02x in a string; it must be written "
                                 "\\u%04x", c, c);
        } else {
            size_t from = j->at;
            if (tt__utf8_next(j->text, j->bytes, &j->at) == TT__INVALID)
                return tt__json_fail(j, from, "byte 0x%02x is not valid UTF-8", c);
            memcpy(j->pool + j->used, j->text + from, j->at - from);
            j->used += j->at - from;
        }
    }
    if (j->at >= j->bytes)
        return tt__json_fail(j, opened, "the string that starts here has no closing quote");
    j->at++;
    *bytes = (uint32_t)(j->used - *start);
    j->pool[j->used++] = 0;
    return true;
}

/* strtod, whatever the locale's decimal point is. */
static double tt__json_double(const char *number, size_t n)
{
    char copy[TT__JSON_NUMBER + 1], *point, *end;
    memcpy(copy, number, n);
    copy[n] = 0;
    double value = strtod(copy, &end);
    if (*end && (point = strchr(copy, '.')) != NULL) {
        *point = localeconv()->decimal_point[0];
        value = strtod(copy, &end);
    }
    return value;
}

static bool tt__json_digit(const tt__json *j) { return tt__json_peek(j) >= '0' && tt__json_peek(j) <= '9'; }

static bool tt__json_digits(tt__json *j, const char *expected) /* one or more */
{
    if (!tt__json_digit(j)) return tt__json_expected(j, j->at, expected);
    while (tt__json_digit(j)) j->at++;
    return true;
}

static bool tt__json_number(tt__json *j)
{
    size_t from = j->at;
    bool negative = tt__json_take(j, '-'), integer = true, fits = true;
    uint64_t magnitude = 0, limit = (uint64_t)INT64_MAX + (negative ? 1 : 0);
    if (!tt__json_digit(j)) return tt__json_expected(j, j->at, "expected a digit");
    if (tt__json_take(j, '0') && tt__json_digit(j))
        return tt__json_fail(j, from, "a number with a leading zero");
    for (; tt__json_digit(j); j->at++) {
        uint64_t digit = (uint64_t)(j->text[j->at] - '0');
        if (magnitude > (limit - digit) / 10) fits = false;
        else magnitude = magnitude * 10 + digit;
    }
    if (tt__json_take(j, '.')) {
        integer = false;
        if (!tt__json_digits(j, "expected a digit after the decimal point")) return false;
    }
    if (tt__json_take(j, 'e') || tt__json_take(j, 'E')) {
        integer = false;
        if (!tt__json_take(j, '+')) tt__json_take(j, '-');
        if (!tt__json_digits(j, "expected a digit in the exponent")) return false;
    }
    size_t length = j->at - from;
    if (length > TT__JSON_NUMBER)
        return tt__json_fail(j, from, "a number of %zu characters; at most %d are read", length,
                             TT__JSON_NUMBER);
    int self = tt__json_push(j, TT__JSON_NUMBER_KIND, from);
    if (self < 0) return false;
    tt__json_node *node = &j->nodes[self];
    node->exact = integer && fits;
    if (node->exact)
        node->integer = !negative ? (int64_t)magnitude : magnitude ? -(int64_t)(magnitude - 1) - 1 : 0;
    node->number = tt__json_double(j->text + from, length);
    return isfinite(node->number) || tt__json_fail(j, from, "a number too large for a double");
}

static int tt__json_compare_keys(const tt__json *j, uint32_t a, uint32_t b)
{
    const tt__json_node *x = &j->nodes[a], *y = &j->nodes[b];
    return tt__compare_bytes(j->pool + x->key, x->key_bytes, j->pool + y->key, y->key_bytes);
}

static bool tt__json_less(const void *arg, uint32_t a, uint32_t b)
{
    int order = tt__json_compare_keys((const tt__json *)arg, a, b);
    return order ? order < 0 : a < b;
}

/* Sorts the members of a finished object by key and refuses duplicates. */
static bool tt__json_index(tt__json *j, int object)
{
    int from = j->n_sorted, member = object + 1;
    j->nodes[object].integer = from;
    for (int i = 0; i < j->nodes[object].count; i++) {
        if (!TT__GROW(j->ctx, j->sorted, j->n_sorted, j->cap_sorted))
            return tt__fail(j->ctx, TT_ERR_MEMORY, "out of memory for the %d keys of '%s'", j->n_sorted + 1,
                            j->path), false;
        j->sorted[j->n_sorted++] = (uint32_t)member;
        member = j->nodes[member].after;
    }
    if (j->n_sorted - from < 2) return true;
    tt__sort_indices(j->sorted + from, (size_t)(j->n_sorted - from), tt__json_less, j);
    for (int i = from + 1; i < j->n_sorted; i++) {
        const tt__json_node *node = &j->nodes[j->sorted[i]];
        if (tt__json_compare_keys(j, j->sorted[i - 1], j->sorted[i]) == 0)
            return tt__json_fail(j, node->offset, "the key \"%.200s\" is there twice in one object; this is "
                                 "the value of the second", j->pool + node->key);
    }
    return true;
}

static bool tt__json_value(tt__json *j, int depth)
{
    static const char *const words[] = {"null", "false", "true"}; /* as in tt__json_kind */
    char c = tt__json_peek(j), close = c == '{' ? '}' : ']';
    bool object = c == '{';
    if (c == '-' || tt__json_digit(j)) return tt__json_number(j);
    for (int k = 0; k < TT__COUNT(words); k++) {
        size_t n = strlen(words[k]);
        if (c != words[k][0]) continue;
        if (j->bytes - j->at < n || memcmp(j->text + j->at, words[k], n) != 0)
            return tt__json_fail(j, j->at,
                                 "expected a value: an object, array, string, number, true, false or null");
        j->at += n;
        return tt__json_push(j, (tt__json_kind)k, j->at - n) >= 0;
    }
    if (c == '"') {
        uint32_t start, bytes;
        int self = tt__json_push(j, TT__JSON_STRING, j->at);
        if (self < 0 || !tt__json_string(j, &start, &bytes)) return false;
        j->nodes[self].integer = start;
        j->nodes[self].count = (int32_t)bytes;
        return true;
    }
    if (c != '{' && c != '[') return tt__json_expected(j, j->at, "expected a value");
    if (depth == TT__JSON_DEPTH)
        return tt__json_fail(j, j->at, "arrays and objects within each other more than %d deep",
                             TT__JSON_DEPTH);

    int self = tt__json_push(j, object ? TT__JSON_OBJECT : TT__JSON_ARRAY, j->at++);
    if (self < 0) return false;
    tt__json_skip_space(j);
    for (bool more = tt__json_peek(j) != close; more;) {
        uint32_t key = 0, key_bytes = 0;
        if (object) {
            if (tt__json_peek(j) != '"')
                return tt__json_expected(j, j->at, "expected a key in double quotes");
            if (!tt__json_string(j, &key, &key_bytes)) return false;
            tt__json_skip_space(j);
            if (!tt__json_take(j, ':')) return tt__json_expected(j, j->at, "expected ':' after a key");
            tt__json_skip_space(j);
        }
        int child = j->count;
        if (!tt__json_value(j, depth + 1)) return false;
        j->nodes[child].key = key;
        j->nodes[child].key_bytes = key_bytes;
        j->nodes[self].count++;
        tt__json_skip_space(j);
        more = tt__json_take(j, ',');
        if (more) tt__json_skip_space(j);
        else if (tt__json_peek(j) != close)
            return tt__json_expected(j, j->at, object ? "expected ',' or '}'" : "expected ',' or ']'");
    }
    j->at++;
    j->nodes[self].after = j->count;
    return !object || tt__json_index(j, self);
}

/* Reads one value and nothing behind it; node 0 is its root. The text must stay only during the call, path
   and context for the life of j, which is to be freed in any case. */
static tt_status tt__json_parse(tt__json *j, tt_context *ctx, const char *path, size_t base, const char *text,
                                size_t bytes)
{
    memset(j, 0, sizeof *j);
    j->ctx = ctx;
    j->path = path;
    j->text = text;
    j->bytes = bytes;
    j->base = base;
    if (bytes > INT32_MAX / 2)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' holds %zu bytes of JSON; at most %d are read", path, bytes,
                        INT32_MAX / 2);
    j->pool = (char *)tt__alloc(ctx, bytes + 1);
    if (!j->pool) return TT_ERR_MEMORY;
    if (bytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) j->at = 3;
    tt__json_skip_space(j);
    if (!tt__json_value(j, 0)) return ctx->status;
    tt__json_skip_space(j);
    if (j->at < bytes) return tt__json_expected(j, j->at, "expected the end after the value"), ctx->status;
    j->text = NULL;
    return TT_OK;
}

static tt_status tt__json_open(tt__json *j, tt_context *ctx, const char *path)
{
    tt__file_bytes file;
    memset(j, 0, sizeof *j);
    tt_status status = tt__file_open(ctx, path, &file);
    if (status == TT_OK) status = tt__json_parse(j, ctx, path, 0, file.bytes, file.size);
    tt__file_close(ctx, &file);
    return status;
}

/* The member `key` of an object, -1 if it has none or is no object. */
static int tt__json_get(const tt__json *j, int object, const char *key)
{
    if (object < 0 || j->nodes[object].kind != TT__JSON_OBJECT || !j->nodes[object].count) return -1;
    const uint32_t *members = j->sorted + j->nodes[object].integer;
    size_t low = 0, high = (size_t)j->nodes[object].count, bytes = strlen(key);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const tt__json_node *node = &j->nodes[members[middle]];
        int order = tt__compare_bytes(j->pool + node->key, node->key_bytes, key, bytes);
        if (order == 0) return (int)members[middle];
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return -1;
}

/* The text of a string node; NULL for another kind, and for a string that holds a NUL. */
static const char *tt__json_text(const tt__json *j, int node)
{
    if (node < 0 || j->nodes[node].kind != TT__JSON_STRING) return NULL;
    const char *text = j->pool + j->nodes[node].integer;
    return strlen(text) == (size_t)j->nodes[node].count ? text : NULL;
}

static const char *tt__json_kind_name(const tt__json *j, int node)
{
    static const char *const names[] = {"null", "false", "true", "a number", "a string", "an array",
                                        "an object"};
    return names[j->nodes[node].kind];
}

/* found: what the member is; NULL: its kind */
static tt_status tt__json_wrong(const tt__json *j, const char *key, int node, const char *found,
                                const char *expected)
{
    return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s', byte %zu: \"%s\" is %s; expected %s", j->path,
                    j->base + j->nodes[node].offset, key, found ? found : tt__json_kind_name(j, node),
                    expected);
}

/* The functions tt__json_read_... read a member of a configuration. Where the key is absent or null, *value
   stays as it is, which is an error if the key is `required`. A value of another kind or out of range is an
   error that names file, key and byte.

   Finds the member, which must be of one of `kinds` (bits 1 << TT__JSON_...). Returns -1 where it is absent
   or null, and on errors. */
static int tt__json_member(const tt__json *j, int object, const char *key, bool required, int kinds,
                           const char *expected, tt_status *status)
{
    int node = tt__json_get(j, object, key);
    *status = TT_OK;
    if (node >= 0 && kinds >> j->nodes[node].kind & 1) return node;
    if (node >= 0 && j->nodes[node].kind != TT__JSON_NULL)
        *status = tt__json_wrong(j, key, node, NULL, expected);
    else if (required)
        *status = tt__fail(j->ctx, TT_ERR_FORMAT, "'%s' has no \"%s\", which is needed", j->path, key);
    return -1;
}

static tt_status tt__json_read_int(const tt__json *j, int object, const char *key, bool required, int64_t min,
                                   int64_t max, int64_t *value)
{
    tt_status status;
    char expected[96], found[32];
    snprintf(expected, sizeof expected, "an integer from %lld to %lld", (long long)min, (long long)max);
    int node = tt__json_member(j, object, key, required, 1 << TT__JSON_NUMBER_KIND, expected, &status);
    if (node < 0) return status;
    const tt__json_node *at = &j->nodes[node];
    if (at->exact && at->integer >= min && at->integer <= max) return *value = at->integer, TT_OK;
    snprintf(found, sizeof found, "%lld", (long long)at->integer);
    return tt__json_wrong(j, key, node, at->exact ? found : NULL, expected);
}

/* The number at `node` as a float in [least, below). */
static tt_status tt__json_float_at(const tt__json *j, const char *key, int node, float least, float below,
                                   float *value)
{
    if (j->nodes[node].kind != TT__JSON_NUMBER_KIND) return tt__json_wrong(j, key, node, NULL, "a number");
    double x = j->nodes[node].number;
    if (fabs(x) <= FLT_MAX && (float)x >= least && (float)x < below) return *value = (float)x, TT_OK;
    char found[32], expected[96];
    int n = snprintf(expected, sizeof expected, "a number that a float holds, of at least %g", least);
    if (isfinite(below)) snprintf(expected + n, sizeof expected - (size_t)n, " and below %g", below);
    snprintf(found, sizeof found, "%g", x);
    return tt__json_wrong(j, key, node, found, expected);
}

static tt_status tt__json_read_float(const tt__json *j, int object, const char *key, float least, float below,
                                     float *value)
{
    tt_status status;
    int node = tt__json_member(j, object, key, false, 1 << TT__JSON_NUMBER_KIND, "a number", &status);
    return node < 0 ? status : tt__json_float_at(j, key, node, least, below, value);
}

static tt_status tt__json_read_bool(const tt__json *j, int object, const char *key, bool *value)
{
    const int kinds = 1 << TT__JSON_TRUE | 1 << TT__JSON_FALSE;
    tt_status status;
    int node = tt__json_member(j, object, key, false, kinds, "true or false", &status);
    if (node >= 0) *value = j->nodes[node].kind == TT__JSON_TRUE;
    return status;
}

static tt_status tt__json_read_string(const tt__json *j, int object, const char *key, bool required,
                                      const char **value) /* as long as j */
{
    static const char expected[] = "a string without U+0000";
    tt_status status;
    int node = tt__json_member(j, object, key, required, 1 << TT__JSON_STRING, expected, &status);
    if (node < 0) return status;
    if (!tt__json_text(j, node)) return tt__json_wrong(j, key, node, NULL, expected);
    *value = tt__json_text(j, node);
    return TT_OK;
}

static void tt__json_quote(tt__text *text, const char *string)
{
    tt__print(text, "\"");
    while (*string) {
        int plain = 0;
        while ((unsigned char)string[plain] >= 0x20 && string[plain] != '"' && string[plain] != '\\' &&
               plain < INT_MAX)
            plain++;
        if (plain) tt__print(text, "%.*s", plain, string);
        else tt__print(text, *string == '"' || *string == '\\' ? "\\%c" : "\\u%04x", *string);
        string += plain ? plain : 1;
    }
    tt__print(text, "\"");
}

static tt_status tt__write_text(tt_context *ctx, const char *path, const char *text)
{
    tt__writer *w = (tt__writer *)tt__alloc(ctx, sizeof *w);
    if (!w) return TT_ERR_MEMORY;
    if (tt__writer_begin(w, ctx, path) == TT_OK) tt__write(w, text, strlen(text));
    tt_status status = tt__writer_end(w);
    tt__free(ctx, w);
    return status;
}

/* Writes what `print` prints into a file of a folder. */
static tt_status tt__save_printed(tt_context *ctx, const char *folder, const char *file,
                                  void (*print)(tt__text *to, const void *arg), const void *arg)
{
    char path[TT__PATH];
    tt__text text = {NULL, 0, 0};
    tt_status status = tt__path_join(ctx, path, folder, file);
    if (status != TT_OK) return status;
    print(&text, arg); /* how long it is */
    text.capacity = text.length + 1;
    text.length = 0;
    text.to = (char *)tt__alloc(ctx, text.capacity);
    if (!text.to) return TT_ERR_MEMORY;
    print(&text, arg);
    status = tt__write_text(ctx, path, text.to);
    tt__free(ctx, text.to);
    return status;
}

static tt_status tt__make_folder(tt_context *ctx, const char *folder)
{
    const tt_files *files = &ctx->options.files;
    if (files->make_folder(files->user, folder)) return TT_OK;
    return tt__fail(ctx, TT_ERR_FILE, "cannot make folder '%s': %s", folder, files->reason(files->user));
}

/* ------------------------------------------------------------------------------------------- safetensors */

/* The file: a little-endian uint64, the length of the header; the header, a JSON object of name -> {dtype,
   shape, data_offsets: [begin, end) in the rest}, and "__metadata__", strings to strings; the tensors' bytes
   without a hole. */
#define TT__SAFETENSORS_HEADER 100000000u /* the limit that the format sets */

static const struct { const char *name; int bits; } tt__safetensors_types[] = {
    {"F32", 32}, {"BF16", 16}, {"F16", 16}, {"F64", 64}, {"I64", 64}, {"I32", 32}, {"I16", 16}, {"I8", 8},
    {"U8", 8}, {"BOOL", 8}, {"U16", 16}, {"U32", 32}, {"U64", 64}, {"C64", 64}, {"F8_E4M3", 8},
    {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6},
    {"F4", 4},
};
/* The first rows of the table: those that can be read as floats or int32. */
enum {
    TT__ST_F32, TT__ST_BF16, TT__ST_F16, TT__ST_F64, TT__ST_I64, TT__ST_I32, TT__ST_I16, TT__ST_I8, TT__ST_U8,
    TT__ST_BOOL, TT__ST_U16, TT__ST_U32, TT__ST_U64
};

static int tt__safetensors_type(const char *name)
{
    for (int i = 0; name && i < TT__COUNT(tt__safetensors_types); i++)
        if (strcmp(tt__safetensors_types[i].name, name) == 0) return i;
    return -1;
}

/* Counts the bytes of a tensor. Returns false when they do not fit a size_t or are no whole number. */
static bool tt__safetensors_size(const tt_tensor_info *info, int type, size_t *bytes)
{
    size_t bits, elements = 1;
    for (int d = 0; d < info->ndim; d++)
        if ((uint64_t)info->dims[d] > SIZE_MAX || !tt__mul_size(elements, (size_t)info->dims[d], &elements))
            return false;
    if (!tt__mul_size(elements, (size_t)tt__safetensors_types[type].bits, &bits) || bits % 8) return false;
    *bytes = bits / 8;
    return true;
}

struct tt_safetensors {
    tt_context *ctx;
    int shared;      /* by how many others, each of which closes it too */
    char *path;
    void *file;      /* open */
    size_t size;     /* of the file, when it was opened */
    tt__json json;   /* keeps the names and the metadata */
    size_t data;     /* where the first tensor begins in the file */
    int count;
    tt_tensor_info *infos;
    size_t *begin;   /* of each tensor, from `data` on */
    int *nodes;      /* of each tensor, for errors */
    uint32_t *order; /* tensors by place in the file, while it is checked */
};

void tt_safetensors_close(tt_safetensors *s)
{
    if (!s || s->shared-- > 0) return;
    tt_context *ctx = s->ctx;
    if (s->file) ctx->options.files.close(ctx->options.files.user, s->file);
    if (s->json.ctx) tt__json_free(&s->json);
    void *const owned[] = {s->path, s->infos, s->begin, s->nodes, s->order, s};
    tt__free_all(ctx, owned, TT__COUNT(owned));
}

static bool tt__safetensors_before(const void *arg, uint32_t a, uint32_t b)
{
    const tt_safetensors *s = (const tt_safetensors *)arg;
    if (s->begin[a] != s->begin[b]) return s->begin[a] < s->begin[b];
    /* empty ones first */
    if (s->infos[a].bytes != s->infos[b].bytes) return s->infos[a].bytes < s->infos[b].bytes;
    return a < b;
}

TT_PRINTF(4, 5)
static tt_status tt__safetensors_fail(const tt_safetensors *s, const char *name, int node, const char *format,
                                      ...)
{
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return tt__fail(s->ctx, TT_ERR_FORMAT, "'%s', byte %zu: tensor '%.200s' %s", s->path,
                    s->json.base + s->json.nodes[node].offset, name, what);
}

/* Reads what the header says of a tensor. */
static tt_status tt__safetensors_tensor(tt_safetensors *s, int index, int node, size_t data_bytes)
{
    const tt__json *j = &s->json;
    tt_tensor_info *info = &s->infos[index];
    const char *name = j->pool + j->nodes[node].key;
    int dtype = tt__json_get(j, node, "dtype"), shape = tt__json_get(j, node, "shape");
    int offsets = tt__json_get(j, node, "data_offsets");

    if (strlen(name) != j->nodes[node].key_bytes)
        return tt__safetensors_fail(s, name, node, "has a NUL in its name");
    if (j->nodes[node].kind != TT__JSON_OBJECT)
        return tt__safetensors_fail(s, name, node, "is %s; expected an object", tt__json_kind_name(j, node));
    const char *missing = dtype < 0 ? "dtype" : shape < 0 ? "shape" : offsets < 0 ? "data_offsets" : NULL;
    if (missing) return tt__safetensors_fail(s, name, node, "has no \"%s\"", missing);
    const char *type_name = tt__json_text(j, dtype);
    int type = tt__safetensors_type(type_name);
    if (type < 0)
        return tt__safetensors_fail(s, name, dtype, "has the dtype %.40s, which the format does not know",
                                    type_name ? type_name : tt__json_kind_name(j, dtype));
    if (j->nodes[shape].kind != TT__JSON_ARRAY)
        return tt__safetensors_fail(s, name, shape, "has %s as \"shape\"; expected an array",
                                    tt__json_kind_name(j, shape));
    info->name = name;
    info->dtype = tt__safetensors_types[type].name;
    info->ndim = j->nodes[shape].count;
    if (info->ndim > TT__COUNT(info->dims))
        return tt__safetensors_fail(s, name, shape, "has %d dimensions; at most %d are read", info->ndim,
                                    TT__COUNT(info->dims));
    for (int d = 0; d < info->ndim; d++) {
        const tt__json_node *dim = &j->nodes[shape + 1 + d];
        if (!dim->exact || dim->integer < 0)
            return tt__safetensors_fail(s, name, shape + 1 + d, "has a dimension that is no integer >= 0");
        info->dims[d] = dim->integer;
    }
    if (!tt__safetensors_size(info, type, &info->bytes))
        return tt__safetensors_fail(s, name, shape, "has a shape whose bytes are too many to count or, for a "
                                    "dtype of less than a byte, no whole number");
    const tt__json_node *begin = &j->nodes[offsets + 1], *end = &j->nodes[offsets + 2];
    bool two = j->nodes[offsets].kind == TT__JSON_ARRAY && j->nodes[offsets].count == 2;
    if (!two || !begin->exact || !end->exact)
        return tt__safetensors_fail(s, name, offsets,
                                    "has \"data_offsets\" that are no array of two integers");
    if (begin->integer < 0 || end->integer < begin->integer || (uint64_t)end->integer > data_bytes)
        return tt__safetensors_fail(s, name, offsets, "lies in bytes [%lld, %lld) of the data, of which the "
                                    "file has %zu; it may be truncated", (long long)begin->integer,
                                    (long long)end->integer, data_bytes);
    s->begin[index] = (size_t)begin->integer;
    size_t bytes = (size_t)(end->integer - begin->integer);
    if (bytes == info->bytes) return TT_OK;
    return tt__safetensors_fail(s, name, offsets, "has %zu bytes of data; its dtype %s and shape need %zu",
                                bytes, info->dtype, info->bytes);
}

/* Reads the header and its length, which comes first. */
static tt_status tt__safetensors_read_header(tt_safetensors *s)
{
    tt_context *ctx = s->ctx;
    uint64_t length = 0;
    if (s->size < 8)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' has %zu bytes; a safetensors file starts with 8 bytes that "
                        "give the length of its header", s->path, s->size);
    tt_status status = tt__file_read(ctx, s->path, s->file, 0, &length, 8);
    if (status != TT_OK) return status;
    if (length > TT__SAFETENSORS_HEADER)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s', byte 0: a header of %llu bytes; the format allows %u: is "
                        "it a safetensors file?", s->path, (unsigned long long)length,
                        TT__SAFETENSORS_HEADER);
    if (length > s->size - 8)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s', byte 0: a header of %llu bytes in a file of %zu: "
                        "truncated, or no safetensors file", s->path, (unsigned long long)length, s->size);
    s->data = 8 + (size_t)length;
    char *header = (char *)tt__alloc(ctx, (size_t)length + 1);
    status = header ? tt__file_read(ctx, s->path, s->file, 8, header, (size_t)length) : TT_ERR_MEMORY;
    if (status == TT_OK && (length < 2 || header[0] != '{'))
        status = tt__fail(ctx, TT_ERR_FORMAT, "'%s', byte 8: the header does not start with '{': is it a "
                          "safetensors file?", s->path);
    if (status == TT_OK) status = tt__json_parse(&s->json, ctx, s->path, 8, header, (size_t)length);
    tt__free(ctx, header);
    return status;
}

/* Reads the header, and checks all that it says. */
static tt_status tt__safetensors_check(tt_safetensors *s)
{
    tt_context *ctx = s->ctx;
    tt_status status = tt__safetensors_read_header(s);
    if (status != TT_OK) return status;
    const tt__json *j = &s->json;
    size_t data_bytes = s->size - s->data, expected = 0;
    int members = j->nodes[0].count, metadata = tt__json_get(j, 0, "__metadata__");
    if (metadata >= 0 && j->nodes[metadata].kind != TT__JSON_OBJECT)
        return tt__json_wrong(j, "__metadata__", metadata, NULL, "an object of strings");
    if (metadata >= 0)
        for (int i = 0, node = metadata + 1; i < j->nodes[metadata].count; i++, node = j->nodes[node].after)
            if (j->nodes[node].kind != TT__JSON_STRING)
                return tt__json_wrong(j, j->pool + j->nodes[node].key, node, NULL,
                                      "a string, as all in \"__metadata__\"");

    size_t n = (size_t)(members ? members : 1);
    if (!(s->infos = (tt_tensor_info *)tt__calloc(ctx, n * sizeof *s->infos)) ||
        !(s->begin = (size_t *)tt__calloc(ctx, n * sizeof *s->begin)) ||
        !(s->nodes = (int *)tt__calloc(ctx, n * sizeof *s->nodes)) ||
        !(s->order = (uint32_t *)tt__calloc(ctx, n * sizeof *s->order)))
        return TT_ERR_MEMORY;
    for (int i = 0, node = 1; i < members; i++, node = j->nodes[node].after) {
        s->json.nodes[node].number = node == metadata ? -1 : s->count;
        if (node == metadata) continue;
        status = tt__safetensors_tensor(s, s->count, node, data_bytes);
        if (status != TT_OK) return status;
        s->nodes[s->count] = node;
        s->order[s->count] = (uint32_t)s->count;
        s->count++;
    }
    tt__sort_indices(s->order, (size_t)s->count, tt__safetensors_before, s);
    for (int i = 0; i < s->count; i++) {
        int k = (int)s->order[i];
        if (s->begin[k] < expected)
            return tt__safetensors_fail(s, s->infos[k].name, s->nodes[k], "starts at byte %zu of the data, "
                                        "within '%.200s', which ends at %zu", s->begin[k],
                                        s->infos[s->order[i - 1]].name, expected);
        if (s->begin[k] > expected)
            return tt__safetensors_fail(s, s->infos[k].name, s->nodes[k], "starts at byte %zu of the data "
                                        "and leaves a hole from %zu", s->begin[k], expected);
        expected = s->begin[k] + s->infos[k].bytes;
    }
    if (expected != data_bytes)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s', byte %zu: %zu bytes behind the last tensor; expected the "
                        "end of the file", s->path, s->data + expected, data_bytes - expected);
    tt__free(ctx, s->order);
    s->order = NULL;
    return TT_OK;
}

tt_safetensors *tt_safetensors_open(tt_context *ctx, const char *path)
{
    tt_safetensors *s = (tt_safetensors *)tt__calloc(ctx, sizeof *s);
    if (!s) return NULL;
    s->ctx = ctx;
    s->path = tt__strdup(ctx, path);
    if (!s->path || tt__file_begin(ctx, path, &s->file, &s->size) != TT_OK ||
        tt__safetensors_check(s) != TT_OK) {
        tt_safetensors_close(s);
        return NULL;
    }
    return s;
}

int tt_safetensors_count(const tt_safetensors *s) { return s->count; }

const tt_tensor_info *tt_safetensors_info(const tt_safetensors *s, int i)
{
    return i >= 0 && i < s->count ? &s->infos[i] : NULL;
}

int tt_safetensors_find(const tt_safetensors *s, const char *name)
{
    int node = tt__json_get(&s->json, 0, name);
    return node < 0 ? -1 : (int)s->json.nodes[node].number;
}

const char *tt_safetensors_metadata(const tt_safetensors *s, const char *key)
{
    return tt__json_text(&s->json, tt__json_get(&s->json, tt__json_get(&s->json, 0, "__metadata__"), key));
}

/* Is there a tensor i, and does it have n elements, or bytes, from `first` on? */
static tt_status tt__safetensors_range(const tt_safetensors *s, int i, uint64_t first, uint64_t n,
                                       bool elements)
{
    if (i < 0 || i >= s->count)
        return tt__fail(s->ctx, TT_ERR_ARGUMENT, "'%s' has no tensor number %d; it has %d", s->path, i,
                        s->count);
    const tt_tensor_info *info = &s->infos[i];
    uint64_t total = info->bytes;
    if (elements) total = total * 8 / (unsigned)tt__safetensors_types[tt__safetensors_type(info->dtype)].bits;
    if (first <= total && n <= total - first) return TT_OK;
    return tt__fail(s->ctx, TT_ERR_ARGUMENT, "'%s': tensor '%.200s' has %llu %s, not %lld from %lld on",
                    s->path, info->name, (unsigned long long)total, elements ? "elements" : "bytes",
                    (long long)n, (long long)first);
}

tt_status tt_safetensors_read(const tt_safetensors *s, int i, size_t first, size_t n, void *to)
{
    tt_status status = tt__safetensors_range(s, i, first, n, false);
    if (status != TT_OK) return status;
    return tt__file_read(s->ctx, s->path, s->file, (uint64_t)s->data + s->begin[i] + first, to, n);
}

/* Converts n floats of a row of the table. Returns how many: `found` tells the next, which does not fit. */
static int64_t tt__safetensors_floats(int type, const void *from, int64_t n, float *to, char found[32])
{
    const uint16_t *half = (const uint16_t *)from;
    for (int64_t k = 0; k < n && type == TT__ST_BF16; k++) to[k] = tt__from_bf16(half[k]);
    for (int64_t k = 0; k < n && type == TT__ST_F16; k++) to[k] = tt__from_f16(half[k]);
    for (int64_t k = 0; k < n && type == TT__ST_F64; k++) {
        double value = ((const double *)from)[k];
        if (isfinite(value) && fabs(value) > FLT_MAX) return snprintf(found, 32, "%g", value), k;
        to[k] = (float)value;
    }
    return n;
}

/* The same of integers. */
static int64_t tt__safetensors_integers(int type, const void *from, int64_t n, int32_t *to, char found[32])
{
    size_t width = (size_t)(tt__safetensors_types[type].bits / 8);
    uint64_t sign = (uint64_t)1 << (8 * width - 1);
    for (int64_t k = 0; k < n; k++) {
        uint64_t raw = 0;
        memcpy(&raw, (const char *)from + (size_t)k * width, width);
        bool negative = type <= TT__ST_I8 && (raw & sign);
        uint64_t magnitude = negative ? sign - (raw & (sign - 1)) : raw;
        if (magnitude > (uint64_t)INT32_MAX + (negative ? 1 : 0))
            return snprintf(found, 32, "%s%llu", negative ? "-" : "", (unsigned long long)magnitude), k;
        int64_t value = negative ? -(int64_t)magnitude : (int64_t)magnitude;
        to[k] = type == TT__ST_BOOL ? raw != 0 : (int32_t)value;
    }
    return n;
}

/* Reads n elements from `first` on, in pieces, to floats, or to int32 if `integers`. */
static tt_status tt__safetensors_elements(const tt_safetensors *s, int i, int64_t first, int64_t n,
                                          bool integers, void *to)
{
    tt_status status = tt__safetensors_range(s, i, (uint64_t)first, (uint64_t)n, true);
    if (status != TT_OK) return status;
    const tt_tensor_info *info = &s->infos[i];
    int type = tt__safetensors_type(info->dtype);
    size_t width = (size_t)(tt__safetensors_types[type].bits / 8);
    double piece[2048]; /* aligned for all types */
    char found[32];
    if (integers ? type < TT__ST_I64 || type > TT__ST_U64 : type > TT__ST_F64)
        return tt__fail(s->ctx, TT_ERR_UNSUPPORTED, "'%s': tensor '%.200s' is %s, which cannot be read as %s",
                        s->path, info->name, info->dtype,
                        integers ? "integers (BOOL, U8 to U64 and I8 to I64 can)"
                                 : "floats (F64, F32, BF16 and F16 can)");
    if (type == TT__ST_F32) return tt_safetensors_read(s, i, (size_t)first * 4, (size_t)n * 4, to);
    for (int64_t done = 0, part; done < n && status == TT_OK; done += part) {
        part = tt__min(n - done, (int64_t)(sizeof piece / width));
        status = tt_safetensors_read(s, i, (size_t)(first + done) * width, (size_t)part * width, piece);
        if (status != TT_OK) break;
        int64_t fit = integers ? tt__safetensors_integers(type, piece, part, (int32_t *)to + done, found)
                               : tt__safetensors_floats(type, piece, part, (float *)to + done, found);
        if (fit < part)
            status = tt__fail(s->ctx, TT_ERR_FORMAT, "'%s': tensor '%.200s' holds %s at element %lld, which "
                              "a %s cannot", s->path, info->name, found, (long long)(first + done + fit),
                              integers ? "32-bit integer" : "float");
    }
    return status;
}

tt_status tt_safetensors_read_f32(const tt_safetensors *s, int i, int64_t first, int64_t n, float *to)
{
    return tt__safetensors_elements(s, i, first, n, false, to);
}

tt_status tt_safetensors_read_i32(const tt_safetensors *s, int i, int64_t first, int64_t n, int32_t *to)
{
    return tt__safetensors_elements(s, i, first, n, true, to);
}

struct tt_safetensors_writer {
    tt_context *ctx;
    int count;
    size_t *ends;     /* of each tensor, from the start of the data */
    char **names;     /* for errors */
    size_t written;
    tt__writer file;
};

static void tt__safetensors_writer_free(tt_safetensors_writer *w)
{
    for (int i = 0; w->names && i < w->count; i++) tt__free(w->ctx, w->names[i]);
    void *const owned[] = {w->ends, w->names, w};
    tt__free_all(w->ctx, owned, TT__COUNT(owned));
}

/* The whole header without its padding; prints in the order of `tensors`. */
static void tt__safetensors_header(tt__text *text, const tt_tensor_info *tensors, int count,
                                   const size_t *ends, const char *const *metadata)
{
    const bool more = metadata && metadata[0];
    tt__print(text, "{%s", more ? "\"__metadata__\":{" : "");
    for (int i = 0; more && metadata[i]; i++) {
        if (i) tt__print(text, i % 2 ? ":" : ",");
        tt__json_quote(text, metadata[i]);
    }
    if (more) tt__print(text, "}");
    for (int i = 0; i < count; i++) {
        if (i || more) tt__print(text, ",");
        tt__json_quote(text, tensors[i].name);
        tt__print(text, ":{\"dtype\":\"%s\",\"shape\":[", tensors[i].dtype);
        for (int d = 0; d < tensors[i].ndim; d++)
            tt__print(text, "%s%lld", d ? "," : "", (long long)tensors[i].dims[d]);
        tt__print(text, "],\"data_offsets\":[%zu,%zu]}", i ? ends[i - 1] : 0, ends[i]);
    }
    tt__print(text, "}");
}

/* All that would make the file invalid; fills w->ends and w->names. */
static tt_status tt__safetensors_declare(tt_safetensors_writer *w, const char *path,
                                         const tt_tensor_info *tensors, int count,
                                         const char *const *metadata)
{
    tt_context *ctx = w->ctx;
    size_t n = (size_t)(count > 0 ? count : 1), end = 0;
    if (count < 0 || (count > 0 && !tensors))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': %d tensors to write", path, count);
    for (int i = 0; metadata && metadata[i]; i++) {
        if (!tt__is_utf8(metadata[i]))
            return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': metadata string %d is not UTF-8", path, i);
        if (i % 2) continue;
        if (!metadata[i + 1])
            return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': the metadata key \"%.200s\" has no value behind it",
                            path, metadata[i]);
        for (int k = 0; k < i; k += 2)
            if (strcmp(metadata[k], metadata[i]) == 0)
                return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': the metadata key \"%.200s\" is given twice",
                                path, metadata[i]);
    }
    w->ends = (size_t *)tt__calloc(ctx, n * sizeof *w->ends);
    w->names = (char **)tt__calloc(ctx, n * sizeof *w->names);
    if (!w->ends || !w->names) return TT_ERR_MEMORY;
    w->count = count;
    for (int i = 0; i < count; i++) {
        const tt_tensor_info *t = &tensors[i];
        size_t bytes;
        int type = tt__safetensors_type(t->dtype);
        bool dims = t->ndim >= 0 && t->ndim <= TT__COUNT(t->dims);
        for (int d = 0; dims && d < t->ndim; d++) dims = t->dims[d] >= 0;
        if (!t->name || !tt__is_utf8(t->name) || strcmp(t->name, "__metadata__") == 0)
            return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': tensor %d of %d has no usable name: it must be "
                            "UTF-8 and not \"__metadata__\"", path, i, count);
        if (type < 0)
            return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': tensor '%.200s' has the dtype '%.40s', which the "
                            "format does not know", path, t->name, t->dtype ? t->dtype : "NULL");
        if (!dims || !tt__safetensors_size(t, type, &bytes) || bytes > (size_t)INT64_MAX - end)
            return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': tensor '%.200s' needs 0 to %d dimensions >= 0, of a "
                            "size that can be counted", path, t->name, TT__COUNT(t->dims));
        if (!(w->names[i] = tt__strdup(ctx, t->name))) return TT_ERR_MEMORY;
        w->ends[i] = end += bytes;
    }
    tt__strings all = {(const char *const *)w->names, sizeof *w->names};
    const char *twice;
    uint32_t *order = tt__sort_strings(ctx, all, count, &twice);
    tt__free(ctx, order);
    if (!order) return TT_ERR_MEMORY;
    if (!twice) return TT_OK;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': two tensors are named '%.200s'", path, twice);
}

tt_safetensors_writer *tt_safetensors_begin(tt_context *ctx, const char *path, const tt_tensor_info *tensors,
                                            int count, const char *const *metadata)
{
    tt_safetensors_writer *w = (tt_safetensors_writer *)tt__calloc(ctx, sizeof *w);
    if (!w) return NULL;
    w->ctx = ctx;
    tt__text text = {NULL, 0, 0};
    tt_status status = tt__safetensors_declare(w, path, tensors, count, metadata);
    if (status == TT_OK) tt__safetensors_header(&text, tensors, count, w->ends, metadata); /* measures */
    uint64_t padded = (text.length + 7) & ~(uint64_t)7; /* so that the data starts at a multiple of 8 */
    if (status == TT_OK && padded > TT__SAFETENSORS_HEADER)
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': the header would have %llu bytes; the format allows "
                          "%u", path, (unsigned long long)padded, TT__SAFETENSORS_HEADER);
    text.capacity = (size_t)padded + 1;
    if (status == TT_OK && !(text.to = (char *)tt__alloc(ctx, text.capacity))) status = TT_ERR_MEMORY;
    if (status == TT_OK) status = tt__writer_begin(&w->file, ctx, path);
    if (status == TT_OK) {
        text.length = 0;
        tt__safetensors_header(&text, tensors, count, w->ends, metadata);
        memset(text.to + text.length, ' ', (size_t)padded - text.length);
        tt__write(&w->file, &padded, sizeof padded);
        tt__write(&w->file, text.to, (size_t)padded);
        status = w->file.status;
        if (status != TT_OK) tt__writer_end(&w->file);
    }
    tt__free(ctx, text.to);
    if (status == TT_OK) return w;
    tt__safetensors_writer_free(w);
    return NULL;
}

tt_status tt_safetensors_write(tt_safetensors_writer *w, const void *bytes, size_t n)
{
    size_t total = w->count ? w->ends[w->count - 1] : 0;
    if (w->file.status != TT_OK) return w->file.status;
    if (n > total - w->written)
        return w->file.status = tt__fail(w->ctx, TT_ERR_ARGUMENT, "'%s': %zu bytes more than the %zu of all "
                                         "declared tensors", w->file.path, n - (total - w->written), total);
    if (n) tt__write(&w->file, bytes, n);
    w->written += n;
    return w->file.status;
}

tt_status tt_safetensors_end(tt_safetensors_writer *w)
{
    size_t total = w->count ? w->ends[w->count - 1] : 0;
    if (w->file.status == TT_OK && w->written < total) {
        int i = 0;
        while (w->ends[i] <= w->written) i++;
        w->file.status = tt__fail(w->ctx, TT_ERR_ARGUMENT, "'%s' was ended %zu bytes too early: tensor "
                                  "'%.200s' (%d of %d) lacks %zu of its bytes; the file was not written",
                                  w->file.path, total - w->written, w->names[i], i + 1, w->count,
                                  w->ends[i] - w->written);
    }
    tt_status status = tt__writer_end(&w->file);
    tt__safetensors_writer_free(w);
    return status;
}

/* Ends the file; after an error `status` of the caller, which stays, nothing is written. w NULL is fine. */
static tt_status tt__safetensors_end(tt_safetensors_writer *w, tt_status status)
{
    if (!w) return status;
    if (w->file.status == TT_OK) w->file.status = status;
    return tt_safetensors_end(w);
}

/* ----------------------------------------------------------------------------------------------- Unicode */

/* Classes of code points, as BERT's tokenizer tells them apart. A space ends a word. Controls, private use
   and U+FFFD are dropped. Punctuation is a word of its own. Accents are dropped from uncased text. Marks are
   not, but decomposition (NFD) sorts a run of marks and accents by combining class: a mark of a higher
   combining class has a higher number here, from TT__CLASS_MARK on. Starters have no combining class and end
   such a run; some accents are starters. */
enum {
    TT__CLASS_LETTER = 0, TT__CLASS_SPACE, TT__CLASS_DROP, TT__CLASS_PUNCTUATION, TT__CLASS_ACCENT,
    TT__CLASS_STARTER_ACCENT, TT__CLASS_MARK
};

/* The tables of >>unicode, unpacked, and what they tell. */
typedef struct tt__unicode tt__unicode;
static tt__unicode *tt__unicode_new(tt_context *ctx);              /* to be freed */
static int tt__class(const tt__unicode *u, uint32_t c);            /* a TT__CLASS_... */
static bool tt__is_cjk(uint32_t c);                                /* a word of its own */
/* Decomposes c (NFD), drops accents and lower-cases; c itself is no accent. Returns how many code points
   result: 1 to 3. */
static int tt__fold(const tt__unicode *u, uint32_t c, uint32_t out[3]);

/* --------------------------------------------------------------------------------------------- tokenizer */

/* As the Rust package `tokenizers` does it; tests/golden/compare_tokens.py compares the two. A word is looked
   up whole, then by ever shorter starts; the hashes of all starts come from one pass over its bytes (FNV-1a).
   Pieces that continue a word ("##ing") have the same table and another seed. */
#define TT__WORD_CHARS 100 /* a longer word is [UNK] */
#define TT__WORD_BYTES (TT__WORD_CHARS * 4)
#define TT__WORD_SEED 2166136261u
#define TT__PIECE_SEED 3735928559u
#define TT__LOW 0x3000 /* alphabets, punctuation, jamo */
#define TT__VOCAB_BYTES ((size_t)1 << 28) /* a larger vocab.txt is refused; offsets into it have 32 bits */

static uint32_t tt__hash_byte(uint32_t hash, unsigned char byte) { return (hash ^ byte) * 16777619u; }

/* A text that spells out one of these has that token there. The first three must be in the vocabulary. */
static const char *const tt__special_tokens[] = {"[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"};
enum { TT__UNK, TT__CLS, TT__SEP };

typedef struct tt__piece { uint32_t start, bytes; bool continues; } tt__piece; /* in the file, without ## */
typedef struct tt__bucket { uint32_t hash; int32_t id; } tt__bucket;              /* id -1: free */

struct tt_tokenizer {
    tt_context *ctx;
    tt__unicode *unicode;
    tt__file_bytes file;      /* vocab.txt with a NUL behind each token */
    tt__piece *pieces;      /* by id */
    tt__bucket *slots;        /* open addressing, at most half full */
    uint32_t mask;
    int size, capacity, longest;
    int special[TT__COUNT(tt__special_tokens)]; /* ids; -1: absent */
    bool lowercase;
    uint8_t classes[256];     /* a TT__CLASS_..., or a letter or digit, folded; 0: "[", or beyond ASCII */
    uint8_t low[TT__LOW];     /* TT__CLASS_... of the code points that most words have */
    int32_t punctuation[128]; /* id of the words that are one ASCII punctuation character */
};

void tt_tokenizer_free(tt_tokenizer *k)
{
    if (!k) return;
    void *const owned[] = {k->file.bytes, k->unicode, k->pieces, k->slots, k};
    tt__free_all(k->ctx, owned, TT__COUNT(owned));
}

/* The slot that holds the piece, or the free one where it belongs. */
static uint32_t tt__vocab_slot(const tt_tokenizer *k, const char *text, uint32_t bytes, bool continues,
                               uint32_t hash)
{
    uint32_t at = (hash ^ hash >> 15) & k->mask;
    for (; k->slots[at].id >= 0; at = (at + 1) & k->mask) {
        if (k->slots[at].hash != hash) continue;
        const tt__piece *piece = &k->pieces[k->slots[at].id];
        if (piece->bytes == bytes && piece->continues == continues &&
            memcmp(k->file.bytes + piece->start, text, bytes) == 0)
            break;
    }
    return at;
}

static uint32_t tt__vocab_hash(const char *text, size_t bytes, bool continues)
{
    uint32_t hash = continues ? TT__PIECE_SEED : TT__WORD_SEED;
    for (size_t i = 0; i < bytes; i++) hash = tt__hash_byte(hash, (unsigned char)text[i]);
    return hash;
}

int tt_tokenizer_size(const tt_tokenizer *k) { return k->size; }

const char *tt_tokenizer_token(const tt_tokenizer *k, int id)
{
    if (id < 0 || id >= k->size) return NULL;
    return k->file.bytes + k->pieces[id].start - (k->pieces[id].continues ? 2 : 0);
}

int tt_tokenizer_find(const tt_tokenizer *k, const char *token)
{
    size_t bytes = strlen(token);
    bool continues = bytes > 2 && token[0] == '#' && token[1] == '#';
    if (continues) { token += 2; bytes -= 2; }
    if (bytes > TT__VOCAB_BYTES) return -1;
    return k->slots[tt__vocab_slot(k, token, (uint32_t)bytes, continues, tt__vocab_hash(token, bytes,
        continues))].id;
}

static tt_status tt__vocab_read(tt_tokenizer *k, const char *path)
{
    tt_context *ctx = k->ctx;
    tt_status status = tt__file_open(ctx, path, &k->file);
    if (status != TT_OK) return status;
    char *text = k->file.bytes;
    if (k->file.size > TT__VOCAB_BYTES)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' has %zu bytes; a vocabulary of at most %zu is read", path,
                        k->file.size, TT__VOCAB_BYTES);
    for (size_t at = 0; at < k->file.size;) {
        const char *newline = (const char *)memchr(text + at, '\n', k->file.size - at);
        size_t start = at, end = newline ? (size_t)(newline - text) : k->file.size;
        at = end + 1;
        size_t invalid = tt__utf8_invalid(text + start, end - start);
        if (invalid < end - start || memchr(text + start, 0, end - start))
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s', line %d: the token is not UTF-8 text; a vocabulary "
                            "has one token a line", path, k->size + 1);
        while (end > start) { /* `tokenizers` drops white space from a line's end, as from "\r\r\n" */
            size_t last = tt__utf8_last(text, end), next = last;
            uint32_t c = tt__utf8_next(text, end, &next);
            bool white = (c >= 9 && c <= 13) || c == 0x85 || tt__class(k->unicode, c) == TT__CLASS_SPACE;
            if (!white) break;
            end = last;
        }
        text[end] = 0;
        if (!TT__GROW(ctx, k->pieces, k->size, k->capacity))
            return tt__fail(ctx, TT_ERR_MEMORY, "out of memory for the %d tokens of '%s'", k->size + 1, path);
        tt__piece *piece = &k->pieces[k->size++];
        piece->continues = end - start > 2 && text[start] == '#' && text[start + 1] == '#';
        piece->start = (uint32_t)(start + (piece->continues ? 2 : 0));
        piece->bytes = (uint32_t)(end - piece->start);
    }
    size_t slots = 64;
    while (slots < (size_t)k->size * 2) slots *= 2;
    k->mask = (uint32_t)(slots - 1);
    k->slots = (tt__bucket *)tt__alloc(ctx, slots * sizeof *k->slots);
    if (!k->slots) return TT_ERR_MEMORY;
    memset(k->slots, 0xFF, slots * sizeof *k->slots);
    /* a token that is there twice has the id of the last, as in transformers */
    for (int id = 0; id < k->size; id++) {
        const tt__piece *piece = &k->pieces[id];
        const char *token = text + piece->start;
        uint32_t hash = tt__vocab_hash(token, piece->bytes, piece->continues);
        tt__bucket *slot = &k->slots[tt__vocab_slot(k, token, piece->bytes, piece->continues, hash)];
        slot->hash = hash;
        slot->id = id;
        if (piece->bytes <= TT__WORD_BYTES) k->longest = (int)tt__max(k->longest, (int64_t)piece->bytes);
    }
    for (int i = 0; i < TT__COUNT(tt__special_tokens); i++) {
        k->special[i] = tt_tokenizer_find(k, tt__special_tokens[i]);
        if (i <= TT__SEP && k->special[i] < 0)
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s' has no %s among its %d tokens: is it the vocab.txt of "
                            "a BERT, one token a line?", path, tt__special_tokens[i], k->size);
    }
    return TT_OK;
}

tt_tokenizer *tt_tokenizer_open(tt_context *ctx, const char *vocab_path, bool lowercase)
{
    tt_tokenizer *k = (tt_tokenizer *)tt__calloc(ctx, sizeof *k);
    if (!k) return NULL;
    k->ctx = ctx;
    k->lowercase = lowercase;
    k->unicode = tt__unicode_new(ctx);
    if (!k->unicode || tt__vocab_read(k, vocab_path) != TT_OK) {
        tt_tokenizer_free(k);
        return NULL;
    }
    for (uint32_t c = 0; c < 128; c++) {
        char one[2] = {(char)c, 0};
        bool upper = c >= 'A' && c <= 'Z';
        k->classes[c] = (uint8_t)tt__class(k->unicode, c);
        if (k->classes[c] == TT__CLASS_LETTER) k->classes[c] = (uint8_t)(upper && lowercase ? c + 32 : c);
        int id = c ? tt_tokenizer_find(k, one) : -1;
        k->punctuation[c] = id < 0 ? k->special[TT__UNK] : id;
    }
    for (uint32_t c = 0; c < TT__LOW; c++) k->low[c] = (uint8_t)tt__class(k->unicode, c);
    k->classes[(int)'['] = TT__CLASS_LETTER; /* it may begin a special token */
    return k;
}

typedef struct tt__name_search { const char *name; bool found; } tt__name_search;

static bool tt__name_is(void *arg, const char *name)
{
    tt__name_search *search = (tt__name_search *)arg;
    search->found = strcmp(name, search->name) == 0;
    return !search->found;
}

/* Tells whether a folder holds a file of that name. The folder is listed and the file is not opened, so that
   one that cannot be opened (no permission, too many open files, a failing disk) does not count as absent. */
static tt_status tt__folder_has(tt_context *ctx, const char *folder, const char *name, bool *found)
{
    const tt_files *files = &ctx->options.files;
    tt__name_search search = {name, false};
    bool listed = files->list(files->user, folder, tt__name_is, &search);
    *found = listed && search.found;
    if (listed) return TT_OK;
    return tt__fail(ctx, TT_ERR_FILE, "cannot list the folder '%s': %s", folder, files->reason(files->user));
}

/* Opens a file of a folder, if it is there; else j->count is 0. path: the file's, which j keeps. j is to be
   freed in any case. */
static tt_status tt__json_open_if_there(tt__json *j, tt_context *ctx, char path[TT__PATH], const char *folder,
                                        const char *file)
{
    bool there = false;
    memset(j, 0, sizeof *j);
    tt_status status = tt__path_join(ctx, path, folder, file);
    if (status == TT_OK) status = tt__folder_has(ctx, folder, file, &there);
    return status == TT_OK && there ? tt__json_open(j, ctx, path) : status;
}

/* What of tokenizer_config.json changes ids. */
static tt_status tt__tokenizer_config(const tt__json *j, bool *lowercase)
{
    tt_status status = TT_OK;
    bool accents = true, cjk = true, basic = true, split_special = false;
    const struct { const char *key; bool *to; } members[] = {
        {"do_lower_case", lowercase}, {"strip_accents", &accents}, {"tokenize_chinese_chars", &cjk},
        {"do_basic_tokenize", &basic}, {"split_special_tokens", &split_special}};
    if (j->nodes[0].kind != TT__JSON_OBJECT)
        return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s' is %s; expected a JSON object", j->path,
                        tt__json_kind_name(j, 0));
    for (int k = 0; k < TT__COUNT(members) && status == TT_OK; k++) {
        status = tt__json_read_bool(j, 0, members[k].key, members[k].to);
        if (k == 0) accents = *lowercase; /* strip_accents follows do_lower_case when it is null */
    }
    const char *unsupported = accents != *lowercase ? "\"strip_accents\" is not as do_lower_case"
                            : !cjk                  ? "\"tokenize_chinese_chars\" is false"
                            : !basic                ? "\"do_basic_tokenize\" is false"
                            : split_special         ? "\"split_special_tokens\" is true" : NULL;
    if (status != TT_OK || !unsupported) return status;
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': %s, which this tokenizer does not do", j->path,
                    unsupported);
}

tt_tokenizer *tt_tokenizer_load(tt_context *ctx, const char *folder)
{
    char vocab[TT__PATH], config[TT__PATH];
    bool lowercase = true;
    tt__json j;
    tt_status status = tt__json_open_if_there(&j, ctx, config, folder, "tokenizer_config.json");
    if (status == TT_OK && j.count) status = tt__tokenizer_config(&j, &lowercase);
    if (status == TT_OK) status = tt__path_join(ctx, vocab, folder, "vocab.txt");
    tt__json_free(&j);
    return status == TT_OK ? tt_tokenizer_open(ctx, vocab, lowercase) : NULL;
}

typedef struct tt__word {     /* the word that is being read, and the ids so far */
    const tt_tokenizer *k;
    int32_t *ids;
    int count, limit;
    int chars, bytes;         /* chars TT__WORD_CHARS + 1: too long, the rest is not kept */
    int barrier;              /* no mark moves before this byte: a starter was dropped there */
    uint32_t hash[TT__WORD_BYTES]; /* of the first i + 1 bytes */
    char text[TT__WORD_BYTES];
} tt__word;

static void tt__word_id(tt__word *w, int id)
{
    if (w->count < w->limit) w->ids[w->count] = id;
    if (w->count < INT_MAX) w->count++;
}

static void tt__word_end(tt__word *w)
{
    const tt_tokenizer *k = w->k;
    int n = w->bytes, at = 0, first = w->count;
    if (!w->chars) return;
    if (w->chars > TT__WORD_CHARS) at = -1;
    /* to the end even when there is room for no more ids: a word without a match is one [UNK] */
    while (at >= 0 && at < n) {
        int end = (int)tt__min(n, at + (int64_t)k->longest), id = -1;
        if (at > 0) {
            uint32_t hash = TT__PIECE_SEED;
            for (int i = at; i < end; i++) w->hash[i] = hash = tt__hash_byte(hash, (unsigned char)w->text[i]);
        }
        for (; end > at; end--) {
            if (end < n && ((unsigned char)w->text[end] & 0xC0) == 0x80) continue; /* within a character */
            id = k->slots[tt__vocab_slot(k, w->text + at, (uint32_t)(end - at), at > 0, w->hash[end - 1])].id;
            if (id >= 0) break;
        }
        if (id >= 0) tt__word_id(w, id);
        at = id >= 0 ? end : -1;
    }
    if (at < 0) {
        w->count = first;
        tt__word_id(w, k->special[TT__UNK]);
    }
    w->chars = w->bytes = w->barrier = 0;
}

static void tt__word_add(tt__word *w, uint32_t c)
{
    if (w->chars >= TT__WORD_CHARS) { w->chars = TT__WORD_CHARS + 1; return; }
    uint32_t hash = w->bytes ? w->hash[w->bytes - 1] : TT__WORD_SEED;
    int end = w->bytes + tt__utf8_put(c, w->text + w->bytes);
    for (int i = w->bytes; i < end; i++) w->hash[i] = hash = tt__hash_byte(hash, (unsigned char)w->text[i]);
    w->bytes = end;
    w->chars++;
}

/* The class of a code point, which `low` tells faster for most. */
static int tt__word_class(const tt__word *w, uint32_t c)
{
    return c < TT__LOW ? w->k->low[c] : tt__class(w->k->unicode, c);
}

/* Adds a mark of uncased text where NFD puts it: before the marks of higher classes that the word ends in. */
static void tt__word_mark(tt__word *w, uint32_t mark, int mark_class)
{
    uint32_t moved[TT__WORD_CHARS];
    int n = 0;
    while (w->bytes > w->barrier && w->chars <= TT__WORD_CHARS) {
        size_t last = tt__utf8_last(w->text, (size_t)w->bytes), next = last;
        uint32_t c = tt__utf8_next(w->text, (size_t)w->bytes, &next);
        if (tt__class(w->k->unicode, c) <= mark_class) break;
        moved[n++] = c;
        w->bytes = (int)last;
        w->chars--;
    }
    tt__word_add(w, mark);
    while (n) tt__word_add(w, moved[--n]);
}

/* Adds a character beyond ASCII, in the reference's order: clean, split CJK, strip accents and lower-case,
   split punctuation. */
static void tt__word_other(tt__word *w, uint32_t c)
{
    uint32_t folded[3] = {c, 0, 0};
    int n = 1, first_class = c == TT__INVALID ? (int)TT__CLASS_DROP : tt__word_class(w, c);
    bool cjk = tt__is_cjk(c), uncased = w->k->lowercase;
    if (first_class == TT__CLASS_DROP) return;
    if (first_class == TT__CLASS_SPACE || cjk) tt__word_end(w);
    if (first_class == TT__CLASS_SPACE) return;
    if (uncased && (first_class == TT__CLASS_ACCENT || first_class == TT__CLASS_STARTER_ACCENT)) {
        if (first_class == TT__CLASS_STARTER_ACCENT) w->barrier = w->bytes;
        return;
    }
    if (uncased) n = tt__fold(w->k->unicode, c, folded);
    for (int i = 0; i < n; i++) {
        int folded_class = folded[i] == c ? first_class : tt__word_class(w, folded[i]);
        bool alone = folded_class == TT__CLASS_PUNCTUATION;
        if (alone) tt__word_end(w);
        if (uncased && folded_class >= TT__CLASS_MARK) tt__word_mark(w, folded[i], folded_class);
        else tt__word_add(w, folded[i]);
        if (alone) tt__word_end(w);
    }
    if (cjk) tt__word_end(w);
}

/* Adds the special token that a text begins with, or else its first character, "[". Returns its bytes. */
static size_t tt__word_bracket(tt__word *w, const char *text, size_t bytes)
{
    const tt_tokenizer *k = w->k;
    tt__word_end(w);
    for (int i = 0; i < TT__COUNT(tt__special_tokens); i++) {
        size_t n = strlen(tt__special_tokens[i]);
        if (k->special[i] < 0 || n > bytes || memcmp(text, tt__special_tokens[i], n) != 0) continue;
        tt__word_id(w, k->special[i]);
        return n;
    }
    tt__word_id(w, k->punctuation[(int)'[']);
    return 1;
}

/* tt_tokenize with room for max_tokens >= 2. Reads on to the end of a text that is longer if `whole`. Returns
   how many ids the text has: of those beyond max_tokens, all if `whole`, else some. */
static int tt__tokenize(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int max_tokens,
                        bool whole)
{
    tt__word w;
    w.k = k;
    w.ids = ids;
    w.count = w.chars = w.bytes = w.barrier = 0;
    w.limit = max_tokens - 1; /* [SEP] always fits */
    tt__word_id(&w, k->special[TT__CLS]);
    for (size_t at = 0; at < bytes && (whole || w.count < w.limit);) {
        unsigned char byte = (unsigned char)text[at];
        uint8_t c = k->classes[byte];
        if (c > TT__CLASS_PUNCTUATION) { /* a run of ASCII letters and digits: most of a text */
            uint32_t hash = w.bytes ? w.hash[w.bytes - 1] : TT__WORD_SEED;
            for (; c > TT__CLASS_PUNCTUATION && w.chars < TT__WORD_CHARS;
                 c = at < bytes ? k->classes[(unsigned char)text[at]] : (uint8_t)TT__CLASS_LETTER) {
                hash = tt__hash_byte(hash, c);
                w.hash[w.bytes] = hash;
                w.text[w.bytes++] = (char)c;
                w.chars++;
                at++;
            }
            if (c > TT__CLASS_PUNCTUATION) { w.chars = TT__WORD_CHARS + 1; at++; }
        } else if (c != TT__CLASS_LETTER) {
            at++;
            if (c == TT__CLASS_DROP) continue;
            tt__word_end(&w);
            if (c == TT__CLASS_PUNCTUATION) tt__word_id(&w, k->punctuation[byte]);
        } else if (byte == '[') {
            at += tt__word_bracket(&w, text + at, bytes - at);
        } else {
            tt__word_other(&w, tt__utf8_next(text, bytes, &at));
        }
    }
    tt__word_end(&w);
    ids[w.count < w.limit ? w.count : w.limit] = k->special[TT__SEP];
    return w.count < INT_MAX ? w.count + 1 : INT_MAX;
}

int tt_tokenize(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int max_tokens)
{
    if (max_tokens < 2) return 0;
    return (int)tt__min(tt__tokenize(k, text, bytes, ids, max_tokens, false), max_tokens);
}

/* ------------------------------------------------------------------------------------------------ images */

#define TT__IMAGE_SIDE 65535 /* the largest height and width: that of JPEG */
#define TT__WEIGHT_BITS 22   /* a weight's fraction: with the 8 bits of a pixel and 2 to spare, 32 */

typedef struct tt__buffer { void *memory; size_t bytes; } tt__buffer;

/* Room for n items of which the contents do not matter. NULL leaves no error: loader threads use it. */
static void *tt__buffer_get(tt_context *ctx, tt__buffer *b, size_t n, size_t item)
{
    size_t bytes;
    if (!tt__mul_size(n, item, &bytes)) return NULL;
    if (bytes > b->bytes || !b->memory) {
        tt__free(ctx, b->memory);
        b->memory = tt__try_alloc(ctx, bytes);
        b->bytes = bytes;
    }
    return b->memory;
}

/* One axis resampled from `in` to `out` places: output x is the sum of weights[x * taps + t] times input
   first[x] + t, t < used[x]. */
typedef struct tt__filter {
    int in, out, taps;
    int32_t *first, *used; /* (out) */
    /* (out, taps) times 2^TT__WEIGHT_BITS; those of an output add up to 1, but for their rounding */
    int32_t *weights;
    tt__buffer memory;
} tt__filter;

static double tt__triangle(double x) { x = fabs(x); return x < 1 ? 1 - x : 0; }

/* The bilinear filter of Pillow (src/libImaging/Resample.c): a triangle over one input to both sides,
   stretched by the factor of a reduction, and normalised over the inputs that there are. */
static bool tt__filter_make(tt_context *ctx, tt__filter *f, int in, int out)
{
    double scale = (double)in / out, support = scale < 1 ? 1 : scale, narrow = 1 / support;
    if (f->in == in && f->out == out) return true;
    f->in = 0;
    f->taps = 2 * (int)ceil(support) + 1;
    /* the rounding of more weights could add up to a level of 256: truncate those */
    double half = f->taps < 1 << 14 ? 0.5 : 0;
    if (!(f->first = (int32_t *)tt__buffer_get(ctx, &f->memory, (size_t)out,
                                               ((size_t)f->taps + 2) * sizeof(int32_t))))
        return false;
    f->used = f->first + out;
    f->weights = f->used + out;
    for (int x = 0; x < out; x++) {
        double center = (x + 0.5) * scale, sum = 0;
        int first = (int)tt__max(0, (int)(center - support + 0.5));
        int end = (int)tt__min(in, (int)(center + support + 0.5));
        int32_t *w = f->weights + (size_t)x * (size_t)f->taps;
        for (int k = first; k < end; k++) sum += tt__triangle((k - center + 0.5) * narrow);
        for (int k = first; k < end; k++) {
            double weight = tt__triangle((k - center + 0.5) * narrow) / sum;
            w[k - first] = (int32_t)(half + weight * (1 << TT__WEIGHT_BITS));
        }
        /* so that without resizing there is one tap, of weight 1 */
        while (end > first + 1 && !w[end - 1 - first]) end--;
        f->first[x] = first;
        f->used[x] = end - first;
    }
    f->in = in;
    f->out = out;
    return true;
}

/* Rows [top, top + height) and columns [left, left + width), these from right to left if mirrored. */
typedef struct tt__window { int top, left, height, width; bool mirror; } tt__window;

/* Resamples one row across, to the window's columns. A pixel of `in` has `stride` channels, of which channel
   c * step becomes c. */
static void tt__resample_across(const tt__filter *f, const tt__window *window, const uint8_t *in, int stride,
                                int step, int channels, uint32_t *out)
{
    const uint32_t half = 1u << (TT__WEIGHT_BITS - 1);
    for (int k = 0; k < window->width; k++, out += channels) {
        int x = window->left + (window->mirror ? window->width - 1 - k : k), used = f->used[x];
        const int32_t *w = f->weights + (size_t)x * (size_t)f->taps;
        const uint8_t *from = in + (size_t)f->first[x] * (size_t)stride;
        if (used == 1) {
            for (int c = 0; c < channels; c++) out[c] = from[c * step];
        } else if (channels == 3) {
            uint32_t sum0 = half, sum1 = half, sum2 = half;
            for (int t = 0; t < used; t++, from += stride) {
                sum0 += (uint32_t)w[t] * from[0];
                sum1 += (uint32_t)w[t] * from[step];
                sum2 += (uint32_t)w[t] * from[2 * step];
            }
            out[0] = sum0 >> TT__WEIGHT_BITS;
            out[1] = sum1 >> TT__WEIGHT_BITS;
            out[2] = sum2 >> TT__WEIGHT_BITS;
        } else {
            for (int c = 0; c < channels; c++) {
                uint32_t sum = half;
                for (int t = 0; t < used; t++) sum += (uint32_t)w[t] * from[t * stride + c * step];
                out[c] = sum >> TT__WEIGHT_BITS;
            }
        }
    }
}

/* Weighs `taps` rows of `pitch` numbers, a multiple of 4, to one row of n outputs. A multiplication does two
   at once, as no sum has over 32 bits. */
static void tt__resample_down(const int32_t *w, int taps, const uint32_t *in, size_t pitch, size_t n,
                              uint8_t *out)
{
    const uint64_t half = (uint64_t)1 << (TT__WEIGHT_BITS - 1) | (uint64_t)1 << (TT__WEIGHT_BITS + 31);
    if (taps == 1) { /* of weight 1 */
        for (size_t i = 0; i < n; i++) out[i] = (uint8_t)in[i];
        return;
    }
    for (size_t i = 0; i < n; i += 4) {
        const uint32_t *from = in + i;
        uint64_t sum0 = half, sum1 = half, two[2];
        uint8_t four[4];
        for (int t = 0; t < taps; t++, from += pitch) {
            memcpy(two, from, sizeof two);
            sum0 += (uint32_t)w[t] * two[0];
            sum1 += (uint32_t)w[t] * two[1];
        }
        four[0] = (uint8_t)(sum0 >> TT__WEIGHT_BITS);
        four[1] = (uint8_t)(sum0 >> (TT__WEIGHT_BITS + 32));
        four[2] = (uint8_t)(sum1 >> TT__WEIGHT_BITS);
        four[3] = (uint8_t)(sum1 >> (TT__WEIGHT_BITS + 32));
        if (n - i >= 4) memcpy(out + i, four, 4);
        else memcpy(out + i, four, n - i);
    }
}

/* Colours times alpha / 255, rounded, or back; the last channel is alpha. */
static void tt__scale_by_alpha(const uint8_t *in, size_t pixels, int channels, bool back, uint8_t *out)
{
    for (size_t i = 0; i < pixels; i++, in += channels, out += channels) {
        uint32_t alpha = in[channels - 1];
        for (int c = 0; c < channels - 1; c++)
            out[c] = !back  ? (uint8_t)((2 * in[c] * alpha + 255) / 510)
                   : !alpha ? in[c] : (uint8_t)tt__min(255, in[c] * 255u / alpha);
        out[channels - 1] = (uint8_t)alpha;
    }
}

typedef struct tt__resampler { /* of one thread */
    tt__filter across, down;
    tt__buffer rows, opaque;
} tt__resampler;

static void tt__resampler_free(tt_context *ctx, tt__resampler *r)
{
    tt__free(ctx, r->across.memory.memory);
    tt__free(ctx, r->down.memory.memory);
    tt__free(ctx, r->rows.memory);
    tt__free(ctx, r->opaque.memory);
}

/* Resizes the image to height x width and writes a window of that, to rows of `to` that are `pitch` bytes
   apart. channels: the image's; or 3 of 4; or any number of 1, which is repeated. Returns false when memory
   is out. */
static bool tt__resample(tt_context *ctx, tt__resampler *r, const tt_image *image, int height, int width,
                         int channels, const tt__window *window, uint8_t *to, size_t pitch)
{
    int stride = image->channels, end = 0;
    if (!tt__filter_make(ctx, &r->across, image->width, width) ||
        !tt__filter_make(ctx, &r->down, image->height, height))
        return false;
    int first = r->down.first[window->top];
    for (int y = window->top; y < window->top + window->height; y++)
        end = (int)tt__max(end, r->down.first[y] + r->down.used[y]);
    bool alpha = channels == stride && channels % 2 == 0 && (height != image->height ||
        width != image->width);
    size_t n = (size_t)window->width * (size_t)channels, row = (n + 3) & ~(size_t)3,
        image_row = (size_t)image->width * (size_t)stride;
    uint32_t *rows = (uint32_t *)tt__buffer_get(ctx, &r->rows, (size_t)(end - first), row * sizeof *rows);
    uint8_t *opaque = alpha ? (uint8_t *)tt__buffer_get(ctx, &r->opaque, image_row, 1) : NULL;
    if (!rows || (alpha && !opaque)) return false;
    for (int y = first; y < end; y++) {
        const uint8_t *in = image->pixels + (size_t)y * image_row;
        if (alpha) tt__scale_by_alpha(in, (size_t)image->width, channels, false, opaque);
        uint32_t *out = rows + (size_t)(y - first) * row;
        tt__resample_across(&r->across, window, alpha ? opaque : in, stride, stride > 1, channels, out);
        for (size_t i = n; i < row; i++) out[i] = 0;
    }
    for (int y = window->top; y < window->top + window->height; y++, to += pitch) {
        tt__resample_down(r->down.weights + (size_t)y * (size_t)r->down.taps, r->down.used[y],
                          rows + (size_t)(r->down.first[y] - first) * row, row, n, to);
        if (alpha) tt__scale_by_alpha(to, (size_t)window->width, channels, true, to);
    }
    return true;
}

static bool tt__side(int n) { return n >= 1 && n <= TT__IMAGE_SIDE; }

static bool tt__image_valid(const tt_image *image)
{
    bool sides = tt__side(image->height) && tt__side(image->width);
    return image->pixels && sides && image->channels >= 1 && image->channels <= 4;
}

tt_status tt_image_resize(tt_context *ctx, const tt_image *image, int height, int width, uint8_t *to)
{
    tt__resampler r;
    tt__window whole = {0, 0, height, width, false};
    if (!tt__image_valid(image) || !tt__side(height) || !tt__side(width))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_image_resize: %d x %d pixels%s of %d channels to %d x %d; "
                        "expected sides of 1 to %d and 1 to 4 channels", image->height, image->width,
                        image->pixels ? "" : " (NULL)", image->channels, height, width, TT__IMAGE_SIDE);
    memset(&r, 0, sizeof r);
    bool ok = tt__resample(ctx, &r, image, height, width, image->channels, &whole, to,
                           (size_t)width * (size_t)image->channels);
    tt__resampler_free(ctx, &r);
    return ok ? TT_OK : tt__fail(ctx, TT_ERR_MEMORY, "tt_image_resize: out of memory for %d x %d pixels to "
                                 "%d x %d", image->height, image->width, height, width);
}

/* ---------------------------------------------------------------------------------------------- datasets */

/* A text, or an image: its number in the source. */
typedef struct tt__example {
    const char *text, *label_text;
    size_t bytes;
    int64_t number;
    int label;
} tt__example;

struct tt_dataset {
    tt_context *ctx;
    tt__example *examples;
    int count, capacity;
    const char **classes;
    int n_classes;
    tt__chunk *chunks;       /* texts of the caller, names of classes */
    tt__file_bytes file;     /* a table's: texts and labels are in it, unquoted in place, a NUL behind each */
    bool images;
    tt_image_source source;  /* of images */
};

void tt_dataset_free(tt_dataset *d)
{
    if (!d) return;
    tt_context *ctx = d->ctx;
    tt__free(ctx, d->examples);
    tt__free(ctx, (void *)d->classes);
    tt__chunks_free(ctx, &d->chunks);
    if (d->file.bytes) tt__file_close(ctx, &d->file);
    tt__free(ctx, d);
}

int64_t tt_dataset_count(const tt_dataset *d) { return d->count; }

const char *tt_dataset_text(const tt_dataset *d, int64_t i, size_t *bytes)
{
    if (i < 0 || i >= d->count) { if (bytes) *bytes = 0; return NULL; }
    if (bytes) *bytes = d->images ? 0 : d->examples[i].bytes;
    return d->images ? "" : d->examples[i].text;
}

int tt_dataset_label(const tt_dataset *d, int64_t i)
{
    return i >= 0 && i < d->count ? d->examples[i].label : -1;
}

int tt_dataset_classes(const tt_dataset *d) { return d->n_classes; }
const char *tt_dataset_class_name(const tt_dataset *d, int class_index)
{
    return class_index >= 0 && class_index < d->n_classes ? d->classes[class_index] : NULL;
}

/* Frees the dataset unless all went well. */
static tt_dataset *tt__dataset_end(tt_dataset *d, tt_status status)
{
    if (status == TT_OK) return d;
    tt_dataset_free(d);
    return NULL;
}

static tt__example *tt__dataset_add(tt_dataset *d, const char *path)
{
    if (!TT__GROW(d->ctx, d->examples, d->count, d->capacity))
        return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for the %d %s of '%s'", d->count + 1,
                        d->images ? "images" : "texts", path), (tt__example *)NULL;
    tt__example *e = &d->examples[d->count++];
    memset(e, 0, sizeof *e);
    return e;
}

static tt_status tt__dataset_classes(tt_dataset *d, const char *const *names, int n) /* copies them */
{
    d->classes = (const char **)tt__alloc(d->ctx, (size_t)n * sizeof *d->classes);
    if (!d->classes) return TT_ERR_MEMORY;
    for (d->n_classes = 0; d->n_classes < n; d->n_classes++) {
        const char *name = names[d->n_classes];
        if (!name) return tt__fail(d->ctx, TT_ERR_ARGUMENT, "class %d of %d is NULL", d->n_classes, n);
        size_t valid = tt__utf8_invalid(name, strlen(name)); /* config.json, which names it, is UTF-8 */
        if (name[valid])
            return tt__fail(d->ctx, TT_ERR_ARGUMENT, "the name of class %d of %d, '%.*s', breaks off at byte "
                            "0x%02x, which is not UTF-8: rename the class", d->n_classes, n,
                            (int)tt__min((int64_t)valid, 200), name, (unsigned char)name[valid]);
        d->classes[d->n_classes] = tt__chunks_text(d->ctx, &d->chunks, name, strlen(name));
        if (!d->classes[d->n_classes])
            return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for the names of %d classes", n);
    }
    return TT_OK;
}

/* Chooses n of the examples, of each class its share (what rounding leaves goes to whoever comes first):
   their numbers, in random order, are the first n of `order` (count). */
static tt_status tt__dataset_choose(const tt_dataset *d, int64_t n, uint64_t key, uint32_t *order)
{
    int64_t *quota = (int64_t *)tt__calloc(d->ctx, sizeof *quota * (size_t)d->n_classes), spare = n;
    if (!quota) return TT_ERR_MEMORY;
    for (int i = 0; i < d->count; i++) quota[d->examples[i].label]++;
    for (int c = 0; c < d->n_classes; c++) spare -= quota[c] = quota[c] * n / d->count;
    tt__shuffle(order, (uint32_t)d->count, key);
    for (int k = 0, chosen = 0; k < d->count; k++) {
        int label = d->examples[order[k]].label;
        if (quota[label] > 0) quota[label]--;
        else if (spare > 0) spare--;
        else continue;
        order[chosen++] = order[k];
    }
    tt__free(d->ctx, quota);
    return TT_OK;
}

/* ---- tables */

typedef struct tt__table {
    tt_context *ctx;
    const char *path;
    char *text;
    size_t bytes, at;
    long long line, row_line; /* now, and where the row started: a quoted field may hold newlines */
    const char *column[3];    /* names, by TT__COLUMN_TEXT and so on */
    char separator;
    bool splits; /* has a column that says so */
} tt__table;

typedef struct tt__field { char *text; size_t bytes; bool last; } tt__field;

/* Reads the field at t->at, unquotes it in place, and moves behind the separator or newline that ends it
   (RFC 4180; a quote that does not start the field is a character like others). */
static tt_status tt__table_field(tt__table *t, tt__field *field)
{
    char *text = t->text, *end;
    if (t->at < t->bytes && text[t->at] == '"') {
        long long opened = t->line;
        field->text = end = text + ++t->at;
        for (;;) {
            if (t->at == t->bytes)
                return tt__fail(t->ctx, TT_ERR_FORMAT, "'%s', line %lld: the quoted field that starts here "
                                "is not closed before the end of the file", t->path, opened);
            char c = text[t->at++];
            if (c == '"') {
                if (t->at == t->bytes || text[t->at] != '"') break;
                t->at++;
            }
            if (c == '\n') t->line++;
            *end++ = c;
        }
        if (t->at + 1 < t->bytes && text[t->at] == '\r' && text[t->at + 1] == '\n') t->at++;
        if (t->at < t->bytes && text[t->at] != t->separator && text[t->at] != '\n')
            return tt__fail(t->ctx, TT_ERR_FORMAT, "'%s', line %lld: text behind a closing quote; a quote "
                            "within a quoted field is written twice", t->path, t->line);
    } else {
        field->text = text + t->at;
        while (t->at < t->bytes && text[t->at] != t->separator && text[t->at] != '\n') t->at++;
        end = text + t->at;
        if (t->at < t->bytes && text[t->at] == '\n' && end > field->text && end[-1] == '\r') end--;
    }
    field->last = t->at == t->bytes || text[t->at] == '\n';
    field->bytes = (size_t)(end - field->text);
    if (t->at < t->bytes) {
        if (text[t->at] == '\n') t->line++;
        t->at++;
    }
    *end = 0; /* over a quote, separator or newline that was read, or the NUL behind the file */
    return TT_OK;
}

static bool tt__table_row(tt__table *t) /* moves to the next row over empty lines; false at the end */
{
    for (; t->at < t->bytes; t->at++) {
        char c = t->text[t->at];
        if (c == '\r' && t->at + 1 < t->bytes && t->text[t->at + 1] == '\n') continue;
        if (c != '\n') break;
        t->line++;
    }
    t->row_line = t->line;
    return t->at < t->bytes;
}

enum { TT__COLUMN_TEXT, TT__COLUMN_LABEL, TT__COLUMN_SPLIT, TT__COLUMNS };

static bool tt__field_is(const tt__field *f, const char *text)
{
    return strlen(text) == f->bytes && memcmp(text, f->text, f->bytes) == 0;
}

static const char *tt__table_separator(const tt__table *t, char name[24]) /* in words */
{
    if (t->separator == ',' || t->separator == '\t') return t->separator == ',' ? "commas" : "tabs";
    snprintf(name, 24, "the character '%c'", t->separator);
    return name;
}

static tt_status tt__table_header(tt__table *t, int column[TT__COLUMNS], int *columns)
{
    tt__field field = {NULL, 0, false};
    char there[512] = "", separator[24];
    tt__text list = {there, sizeof there, 0};
    for (int i = 0; i < TT__COLUMNS; i++) column[i] = -1;
    if (!tt__table_row(t))
        return tt__fail(t->ctx, TT_ERR_FORMAT,
                        "'%s' is empty; expected a header with the columns %.100s and %.100s", t->path,
                        t->column[TT__COLUMN_TEXT], t->column[TT__COLUMN_LABEL]);
    for (*columns = 0; !field.last; ++*columns) {
        tt_status status = tt__table_field(t, &field);
        if (status != TT_OK) return status;
        tt__print(&list, "%s'%.100s'", *columns ? ", " : "", field.text);
        for (int i = 0; i < TT__COLUMNS; i++) {
            if (!tt__field_is(&field, t->column[i])) continue;
            if (column[i] >= 0)
                return tt__fail(t->ctx, TT_ERR_FORMAT, "'%s', line %lld: two columns are named '%.200s'",
                                t->path, t->row_line, t->column[i]);
            column[i] = *columns;
        }
        if (*columns == INT_MAX - 1)
            return tt__fail(t->ctx, TT_ERR_FORMAT, "'%s', line %lld: too many columns", t->path, t->row_line);
    }
    for (int i = 0; i < TT__COLUMNS; i++)
        if (column[i] < 0 && i != TT__COLUMN_SPLIT)
            return tt__fail(t->ctx, TT_ERR_FORMAT,
                            "'%.300s', line %lld: the header's %d columns, separated by %s, have none named "
                            "'%.100s', but %.300s%s", t->path, t->row_line, *columns,
                            tt__table_separator(t, separator), t->column[i], there,
                            strlen(there) > 300 ? "..." : "");
    return TT_OK;
}

/* Which part a row belongs to, by what its split column says. */
enum { TT__SPLIT_OTHER, TT__SPLIT_TRAIN, TT__SPLIT_VALIDATION, TT__SPLIT_TEST };

static int tt__split_of(const char *name)
{
    static const char *const validation[] = {"validation", "valid", "val", "dev"};
    for (int i = 0; i < TT__COUNT(validation); i++)
        if (strcmp(name, validation[i]) == 0) return TT__SPLIT_VALIDATION;
    if (strcmp(name, "train") == 0) return TT__SPLIT_TRAIN;
    return strcmp(name, "test") == 0 ? TT__SPLIT_TEST : TT__SPLIT_OTHER;
}

/* The number of the class of that name, or -1. order: see tt__table_given */
static int tt__find_class(const tt_dataset *d, const uint32_t *order, const char *label)
{
    for (int low = 0, high = d->n_classes; low < high;) {
        int middle = low + (high - low) / 2, compared = strcmp(d->classes[order[middle]], label);
        if (compared == 0) return (int)order[middle];
        if (compared < 0) low = middle + 1;
        else high = middle;
    }
    return -1;
}

/* order: see tt__table_given; NULL: the classes are those of the table */
static tt_status tt__table_read(tt_dataset *d, tt__table *t, const char *split, const uint32_t *order)
{
    tt_context *ctx = d->ctx;
    int column[TT__COLUMNS], columns = 0;
    char separator[24];
    tt_status status = tt__table_header(t, column, &columns);
    t->splits = column[TT__COLUMN_SPLIT] >= 0;
    if (!t->splits) split = NULL;
    int wanted = split ? tt__split_of(split) : TT__SPLIT_OTHER;
    while (status == TT_OK && tt__table_row(t)) {
        tt__field fields[TT__COLUMNS], field = {NULL, 0, false};
        int n = 0;
        memset(fields, 0, sizeof fields);
        do {
            status = tt__table_field(t, &field);
            for (int i = 0; i < TT__COLUMNS; i++)
                if (column[i] == n) fields[i] = field;
            if (n < INT_MAX) n++;
        } while (status == TT_OK && !field.last);
        if (status != TT_OK) break;
        if (n != columns)
            return tt__fail(ctx, TT_ERR_FORMAT,
                            "'%s', line %lld: %d columns; the header has %d: put fields that hold %s or "
                            "newlines in double quotes", t->path, t->row_line, n, columns,
                            tt__table_separator(t, separator));
        const tt__field *label = &fields[TT__COLUMN_LABEL], *part = &fields[TT__COLUMN_SPLIT];
        int is = wanted && strlen(part->text) == part->bytes ? tt__split_of(part->text) : TT__SPLIT_OTHER;
        if (wanted && !is)
            return tt__fail(ctx, TT_ERR_FORMAT,
                            "'%s', line %lld: the %.100s is '%.100s'; expected train, validation (or "
                            "valid, val, dev) or test", t->path, t->row_line, t->column[TT__COLUMN_SPLIT],
                            part->text);
        if (wanted ? is != wanted : split && !tt__field_is(part, split)) continue;
        if (!label->bytes)
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s', line %lld: the label is empty", t->path, t->row_line);
        if (strlen(label->text) != label->bytes)
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s', line %lld: the label holds a NUL", t->path,
                            t->row_line);
        size_t valid = tt__utf8_invalid(label->text, label->bytes); /* config.json names it, and is UTF-8 */
        unsigned char wrong = (unsigned char)label->text[valid];
        if (valid < label->bytes)
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s', line %lld: the label '%.*s' breaks off at byte "
                            "0x%02x, which is not UTF-8: save the file as UTF-8", t->path, t->row_line,
                            (int)tt__min((int64_t)valid, 200), label->text, wrong);
        tt__example *e = tt__dataset_add(d, t->path);
        if (!e) return ctx->status;
        e->text = fields[TT__COLUMN_TEXT].text;
        e->bytes = fields[TT__COLUMN_TEXT].bytes;
        e->label_text = label->text;
        if (!order) continue;
        e->label = tt__find_class(d, order, label->text);
        if (e->label < 0)
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s', line %lld: the label '%.200s' is none of the %d "
                            "classes given, of which the first is '%.200s'", t->path, t->row_line,
                            label->text, d->n_classes, d->classes[0]);
    }
    if (status != TT_OK || d->count || (wanted && wanted != TT__SPLIT_TRAIN)) return status;
    if (!split) return tt__fail(ctx, TT_ERR_FORMAT, "'%s' has a header and no rows", t->path);
    return tt__fail(ctx, TT_ERR_FORMAT, "'%s' has no row whose split is '%.200s'", t->path, split);
}

/* Numbers the distinct labels in byte order. */
static tt_status tt__table_classes(tt_dataset *d)
{
    if (!d->count) return TT_OK;
    tt__strings labels = {&d->examples->label_text, sizeof *d->examples};
    const char *twice, *last = NULL;
    uint32_t *order = tt__sort_strings(d->ctx, labels, d->count, &twice);
    for (int i = 0; order && i < d->count; i++) {
        tt__example *e = &d->examples[order[i]];
        d->n_classes += !last || strcmp(last, e->label_text) != 0;
        e->label = d->n_classes - 1;
        last = e->label_text;
    }
    if (order) d->classes = (const char **)tt__alloc(d->ctx, (size_t)d->n_classes * sizeof *d->classes);
    for (int i = 0; d->classes && i < d->count; i++)
        d->classes[d->examples[i].label] = d->examples[i].label_text;
    tt__free(d->ctx, order);
    return d->classes ? TT_OK : TT_ERR_MEMORY;
}

/* Copies the classes that the caller gave and sorts them for lookups; *order to be freed. */
static tt_status tt__table_given(tt_dataset *d, const char *const *classes, int n, uint32_t **order)
{
    const char *twice;
    tt_status status = tt__dataset_classes(d, classes, n);
    if (status != TT_OK) return status;
    tt__strings names = {d->classes, sizeof *d->classes};
    if (!(*order = tt__sort_strings(d->ctx, names, n, &twice))) return TT_ERR_MEMORY;
    if (!twice) return TT_OK;
    return tt__fail(d->ctx, TT_ERR_ARGUMENT, "the class '%.200s' is given twice", twice);
}

tt_table_options tt_table_options_default(void)
{
    tt_table_options o = {"text", "label", "split", 0};
    return o;
}

/* The rows of a table without a split column that are "train" or "test". Frees d unless it is the result. */
static tt_dataset *tt__table_divided(tt_dataset *d, const char *path, const char *split, const char *column)
{
    int part = tt__split_of(split);
    tt_dataset *held = NULL, *result;
    if (part == TT__SPLIT_VALIDATION) return d->count = 0, d;
    if (!part)
        tt__fail(d->ctx, TT_ERR_ARGUMENT,
                 "'%s' has no column '%.100s', so its rows are \"train\" or \"test\", not '%.200s'", path,
                 column, split);
    else if (d->count < 2)
        tt__fail(d->ctx, TT_ERR_FORMAT,
                 "'%s' has one row and no column '%.100s': it cannot be divided into \"train\" and \"test\"",
                 path, column);
    else
        held = tt_dataset_split(d, (d->count + 9) / 10);
    result = part == TT__SPLIT_TEST ? held : held ? d : NULL;
    tt_dataset_free(result == d ? held : d);
    return result;
}

tt_dataset *tt_dataset_table(tt_context *ctx, const char *path, const char *split, const char *const *classes,
                             int n_classes, const tt_table_options *options)
{
    tt_table_options o = options ? *options : tt_table_options_default();
    uint32_t *order = NULL;
    bool splits = false; /* has a column that says so */
    if ((classes != NULL) != (n_classes > 0) || n_classes < 0)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': %d classes given%s; give at least one, or NULL and 0 to "
                        "take them from the file", path, n_classes, classes ? "" : " as NULL"),
               (tt_dataset *)NULL;
    const char *text = o.text_column ? o.text_column : "NULL";
    const char *label = o.label_column ? o.label_column : "NULL";
    const char *part = o.split_column ? o.split_column : "NULL";
    bool named = o.text_column && o.label_column && o.split_column;
    if (!named || strcmp(text, label) == 0 || strcmp(text, part) == 0 || strcmp(label, part) == 0)
        return tt__fail(ctx, TT_ERR_ARGUMENT,
                 "table options: the columns of text, label and split are '%.100s', '%.100s' and '%.100s'; "
                 "expected three names", text, label, part), (tt_dataset *)NULL;
    if (o.delimiter && (strchr("\"\n\r", o.delimiter) || (unsigned char)o.delimiter >= 0x80))
        return tt__fail(ctx, TT_ERR_ARGUMENT,
                 "table options: the delimiter has the code %d; a table's columns cannot be divided by "
                 "quotes, by ends of lines, or by bytes beyond ASCII", (unsigned char)o.delimiter),
               (tt_dataset *)NULL;
    tt_dataset *d = (tt_dataset *)tt__calloc(ctx, sizeof *d);
    if (!d) return NULL;
    d->ctx = ctx;
    tt_status status = classes ? tt__table_given(d, classes, n_classes, &order) : TT_OK;
    if (status == TT_OK) status = tt__file_open(ctx, path, &d->file);
    if (status == TT_OK) {
        const bool csv = tt__match("*.csv", path) || tt__match("*.CSV", path);
        const char between = o.delimiter ? o.delimiter : csv ? ',' : '\t';
        tt__table t = {ctx, path, d->file.bytes, d->file.size, 0, 1, 1, {text, label, part}, between, false};
        if (t.bytes >= 3 && memcmp(t.text, "\xEF\xBB\xBF", 3) == 0) t.at = 3; /* byte order mark */
        status = tt__table_read(d, &t, split, order);
        splits = t.splits;
    }
    if (status == TT_OK && !classes) status = tt__table_classes(d);
    tt__free(ctx, order);
    if (status == TT_OK && split && !splits) return tt__table_divided(d, path, split, o.split_column);
    return tt__dataset_end(d, status);
}

/* ---- texts and images of the caller */

/* A dataset of the named classes; NULL: an error. */
static tt_dataset *tt__dataset_new(tt_context *ctx, const char *const *class_names, int classes)
{
    tt_dataset *d = (tt_dataset *)tt__calloc(ctx, sizeof *d);
    if (!d) return NULL;
    d->ctx = ctx;
    return tt__dataset_end(d, tt__dataset_classes(d, class_names, classes));
}

/* Adds an image, or a copy of a text. */
static tt_status tt__dataset_put(tt_dataset *d, const char *of, const tt_text *text, int label)
{
    if (text && !text->text && text->bytes)
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "%s: text %d is NULL", of, d->count);
    char *copy = text ? tt__chunks_text(d->ctx, &d->chunks, text->text, text->bytes) : NULL;
    if (text && !copy)
        return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for the %zu bytes of text %d", text->bytes,
                        d->count);
    if (label < 0 || label >= d->n_classes)
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "%s: %s %d has label %d; labels go from 0 to %d", of,
                        d->images ? "image" : "text", d->count, label, d->n_classes - 1);
    tt__example *e = tt__dataset_add(d, of);
    if (!e) return TT_ERR_MEMORY;
    e->number = d->count - 1;
    e->label = label;
    e->text = copy;
    e->bytes = text ? text->bytes : 0;
    return TT_OK;
}

tt_dataset *tt_dataset_texts(tt_context *ctx, const tt_text *texts, int64_t count,
                             const char *const *class_names, int classes)
{
    if (count < 1 || count > INT_MAX || !texts || classes < 1 || !class_names)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: %lld texts%s of %d classes%s; expected at "
                        "least one text and one class", (long long)count, texts ? "" : " (NULL)", classes,
                        class_names ? "" : " (NULL)"), (tt_dataset *)NULL;
    tt_dataset *d = tt__dataset_new(ctx, class_names, classes);
    tt_status status = d ? TT_OK : ctx->status;
    for (int64_t i = 0; i < count && status == TT_OK; i++)
        status = tt__dataset_put(d, "tt_dataset_texts", &texts[i], texts[i].label);
    return tt__dataset_end(d, status);
}

tt_dataset *tt_dataset_images(tt_context *ctx, const tt_image_source *source)
{
    if (source->count < 1 || source->count > INT_MAX || source->classes < 1 || !source->labels ||
        !source->class_names || !source->read)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_dataset_images: %lld images%s of %d classes%s%s; expected "
                        "at least one image and one class, and labels, class_names and read",
                        (long long)source->count, source->labels ? "" : " without labels", source->classes,
                        source->class_names ? "" : " without class_names",
                        source->read ? "" : " without read"), (tt_dataset *)NULL;
    tt_dataset *d = tt__dataset_new(ctx, source->class_names, source->classes);
    tt_status status = d ? TT_OK : ctx->status;
    if (d) {
        d->images = true;
        d->source = *source;
        d->source.labels = NULL; /* the caller may free them now */
        d->source.class_names = NULL;
    }
    for (int64_t i = 0; i < source->count && status == TT_OK; i++)
        status = tt__dataset_put(d, "tt_dataset_images", NULL, source->labels[i]);
    return tt__dataset_end(d, status);
}

/* ------------------------------------------------------------------------------------------------ loader */

tt_loader_options tt_loader_options_default(void)
{
    tt_loader_options o = {16, 1, 512, 0, true, 50, false, 1};
    return o;
}

/* b of tt__stream_key, of a loader; with a = epoch. b = 1 + window for the steps */
enum { TT__SHUFFLE_TEXTS = 0, TT__SHUFFLE_STEPS = 1 };
#define TT__SHUFFLE_SPLIT (UINT64_MAX - 1) /* a of tt__stream_key, of tt_dataset_split; with b = examples */
#define TT__LOADER_THREADS 64

/* ids: uint16_t, or int32_t for a large vocabulary */
typedef struct tt__tokens { const void *ids; int count; } tt__tokens;

typedef struct tt__loader_thread {
    struct tt_loader *loader;
    pthread_t handle;
    tt__resampler resampler;
} tt__loader_thread;

typedef struct tt__ring_slot {     /* of a micro-batch of images */
    uint8_t *pixels;
    int done;                      /* images that are made, or failed */
    int failed;                    /* the first that failed; max_seqs: none */
    tt_status status;              /* of that */
    char why[256];
} tt__ring_slot;

/* Texts are tokenized when the loader is made. Images are made anew in each epoch, micro-batches `base` to
   `base` + slots - 1 ahead of the trainer, which reads `base`. */
struct tt_loader {
    tt_context *ctx;
    const tt_dataset *d;
    const tt_tokenizer *k;
    tt_loader_options o;
    int max_seqs, max_tokens;
    bool wide;                     /* ids need more than 16 bits */
    bool sort;                     /* windows are sorted, and their steps shuffled */
    int64_t texts, steps;          /* of an epoch */

    tt__tokens *tokens;            /* (count) */
    tt__chunk *chunks;             /* where their ids are kept */
    int32_t *scratch;              /* (the context's threads, max_length) while texts are tokenized */
    int longest;                   /* tokens of a text before it is cut */
    int64_t cut;                   /* texts */
    bool accumulates;

    pthread_mutex_t mutex;         /* guards the following four, a slot but its pixels, and, while texts are
                                      tokenized, chunks, longest and cut */
    pthread_cond_t work, ready;
    int64_t cursor;                /* in `order`: the next image to make */
    bool stop, failed;
    uint32_t *order;               /* (count) this epoch's; changes under the mutex */
    tt__loader_thread threads[TT__LOADER_THREADS];
    int started;

    tt_image_options image;
    size_t image_bytes;            /* of a result */
    int slots;
    tt__ring_slot *ring;           /* micro-batch m of the epoch is in slot m % slots; NULL: texts */
    int64_t base;                  /* with `busy` guarded by the mutex, as `epoch` when a thread is busy */
    int busy;                      /* threads that make an image */

    int64_t epoch, step;           /* the consumer's from here on */
    /* the window that `sorted` and `step_order` hold; steps of every window */
    int64_t window_at, window_steps;
    uint32_t *sorted, *step_order;
    int in_step;                   /* sequences of the step that were handed out */
    tt_status status;              /* of the last tt_loader_next */
    double waited;
    int32_t *ids, *positions, *types, *seq_start, *labels;
    int64_t *index;
    tt_source source;
};

#define TT__TEXTS_AT_ONCE 64 /* of a task */

/* Tokenizes some texts. */
static void tt__loader_task(void *arg, int64_t task, int thread)
{
    tt_loader *l = (tt_loader *)arg;
    int32_t *from = l->scratch + (size_t)thread * (size_t)l->o.max_length;
    int64_t first = task * TT__TEXTS_AT_ONCE, end = tt__min(l->d->count, first + TT__TEXTS_AT_ONCE);
    for (int64_t text = first; text < end; text++) {
        const tt__example *e = &l->d->examples[text];
        int whole = tt__tokenize(l->k, e->text, e->bytes, from, l->o.max_length, true);
        int n = (int)tt__min(whole, l->o.max_length);
        pthread_mutex_lock(&l->mutex);
        void *ids = tt__chunks_take(l->ctx, &l->chunks, (size_t)n * (l->wide ? 4 : 2));
        l->failed |= !ids;
        l->longest = (int)tt__max(l->longest, whole);
        l->cut += whole > n;
        pthread_mutex_unlock(&l->mutex);
        if (!ids) return;
        if (l->wide) memcpy(ids, from, (size_t)n * 4);
        else for (int i = 0; i < n; i++) ((uint16_t *)ids)[i] = (uint16_t)from[i];
        l->tokens[text].ids = ids;
        l->tokens[text].count = n;
    }
}

static bool tt__loader_longer(const void *arg, uint32_t a, uint32_t b)
{
    const tt__tokens *tokens = (const tt__tokens *)arg;
    return tokens[a].count != tokens[b].count ? tokens[a].count > tokens[b].count : a < b;
}

/* Tokenizes all texts, and sets what their lengths decide. */
static bool tt__loader_tokenize(tt_loader *l)
{
    tt_context *ctx = l->ctx;
    size_t count = (size_t)l->d->count, scratch;
    if (!tt__mul_size((size_t)l->o.max_length, (size_t)ctx->cpu.pool->threads * sizeof *l->scratch, &scratch))
        scratch = SIZE_MAX;
    if (!(l->tokens = (tt__tokens *)tt__calloc(ctx, count * sizeof *l->tokens)) ||
        !(l->scratch = (int32_t *)tt__alloc(ctx, scratch)))
        return false;
    tt__parallel(ctx->cpu.pool, tt__ceil_div(l->d->count, TT__TEXTS_AT_ONCE), tt__loader_task, l);
    tt__free(ctx, l->scratch);
    l->scratch = NULL;
    if (l->failed)
        return tt__fail(ctx, TT_ERR_MEMORY, "loader: out of memory for the tokens of %d texts", l->d->count),
            false;

    /* A micro-batch needs no more than the longest texts do; nor does a step. */
    int64_t room = l->o.max_tokens ? l->o.max_tokens : INT32_MAX, micro = 0, step = 0;
    for (uint32_t i = 0; i < (uint32_t)count; i++) l->order[i] = i;
    tt__sort_indices(l->order, count, tt__loader_longer, l->tokens);
    l->max_seqs = (int)tt__min(l->max_seqs, room / 2); /* a text has [CLS] and [SEP] at least */
    for (int64_t i = 0; i < tt__min(l->o.batch, l->d->count); i++) {
        step += l->tokens[l->order[i]].count;
        if (i < l->max_seqs) micro = step;
    }
    l->max_tokens = (int)tt__min(room, micro);
    l->accumulates = step > l->max_tokens;
    return true;
}

/* Gives a batch what texts and images share, and goes on to the next step behind the last batch of one. */
static bool tt__loader_give(tt_loader *l, tt_batch *batch, int seqs, bool last_of_step)
{
    batch->seqs = seqs;
    batch->labels = l->labels;
    batch->index = l->index;
    batch->last_of_step = last_of_step;
    if (last_of_step) l->step++, l->in_step = 0;
    return true;
}

/* ---- images of a loader */

/* The micro-batch of place `at` of the epoch, its first place, and how many images it has. */
static int64_t tt__image_micro(const tt_loader *l, int64_t at, int64_t *first, int *seqs)
{
    int64_t step = at / l->o.batch, within = at % l->o.batch / l->max_seqs;
    *first = step * l->o.batch + within * l->max_seqs;
    *seqs = (int)tt__min(tt__min(l->max_seqs, (step + 1) * l->o.batch - *first), l->texts - *first);
    return step * tt__ceil_div(l->o.batch, l->max_seqs) + within;
}

/* Does a result fit into an image of that size (after resizing), padded? */
static bool tt__image_fits(const tt_image_options *o, int height, int width, char why[256])
{
    if (o->height <= height + 2 * o->pad && o->width <= width + 2 * o->pad) return true;
    snprintf(why, 256, "%d x %d pixels cannot be cropped out of %d x %d with %d zeros on each side: set "
             "resize_height and resize_width, or more pad", o->height, o->width, height, width, o->pad);
    return false;
}

static bool tt__image_channels(const tt_image_options *o, int channels, char why[256])
{
    if (channels == o->channels || (o->channels == 3 && (channels == 1 || channels == 4))) return true;
    snprintf(why, 256, "%d channels cannot become %d: set channels of the image options (3 takes 1 and 4 "
             "too)", channels, o->channels);
    return false;
}

/* Where along one axis a crop begins, from -pad on. */
static int tt__crop_at(const tt_image_options *o, uint32_t random, int size, int wanted)
{
    int spare = size + 2 * o->pad - wanted;
    return (o->random_crop ? (int)((uint64_t)random * ((unsigned)spare + 1) >> 32) : spare / 2) - o->pad;
}

/* Makes of an image what the options say, to `to` (height, width, channels). */
static tt_status tt__image_transform(tt_context *ctx, tt__resampler *r, const tt_image_options *o,
                                     const tt_image *image, uint64_t key, uint8_t *to, char why[256])
{
    const uint32_t zero[4] = {0, 0, 0, 0};
    uint32_t u[4];
    if (!tt__image_valid(image)) {
        snprintf(why, 256, "read gave %d x %d pixels%s of %d channels; expected sides of 1 to %d and 1 to 4 "
                 "channels", image->height, image->width, image->pixels ? "" : " (NULL)", image->channels,
                 TT__IMAGE_SIDE);
        return TT_ERR_ARGUMENT;
    }
    int height = o->resize_height ? o->resize_height : image->height;
    int width = o->resize_width ? o->resize_width : image->width;
    if (!tt__image_channels(o, image->channels, why) || !tt__image_fits(o, height, width, why))
        return TT_ERR_ARGUMENT;
    tt__philox(zero, key, u);
    int top = tt__crop_at(o, u[0], height, o->height), left = tt__crop_at(o, u[1], width, o->width);

    /* the part of the crop that is image, from place (y, x) of the result on */
    tt__window w = {(int)tt__max(top, 0), (int)tt__max(left, 0), 0, 0, o->flip && u[2] >> 31};
    w.height = (int)tt__min(top + o->height, height) - w.top;
    w.width = (int)tt__min(left + o->width, width) - w.left;
    size_t pitch = (size_t)o->width * (size_t)o->channels;
    if (w.height < o->height || w.width < o->width) memset(to, 0, (size_t)o->height * pitch);
    if (w.height < 1 || w.width < 1) return TT_OK; /* all of it is padding */
    int x = w.mirror ? left + o->width - w.left - w.width : w.left - left;
    to += (size_t)(w.top - top) * pitch + (size_t)x * (size_t)o->channels;
    if (tt__resample(ctx, r, image, height, width, o->channels, &w, to, pitch)) return TT_OK;
    snprintf(why, 256, "out of memory for %d x %d pixels to %d x %d", image->height, image->width, height,
             width);
    return TT_ERR_MEMORY;
}

/* Makes the image at the cursor. With the mutex held, but for the work. */
static void tt__image_make(tt_loader *l, tt__loader_thread *thread)
{
    const tt_image_source *source = &l->d->source;
    int64_t first, at = l->cursor++;
    int seqs;
    uint32_t index = l->order[at];
    tt__ring_slot *slot = &l->ring[tt__image_micro(l, at, &first, &seqs) % l->slots];
    uint64_t key = tt__stream_key(l->ctx->options.seed, TT__RANDOM_IMAGE, (uint64_t)l->epoch, index);
    l->busy++;
    pthread_mutex_unlock(&l->mutex);

    const tt__example *e = &l->d->examples[index];
    tt_image image = {NULL, 0, 0, 0};
    tt_status status = TT_ERR_FILE;
    char why[256] = "";
    const char *failed = source->read(source->user, e->number, &image);
    if (failed) snprintf(why, sizeof why, "%s", failed);
    else {
        tt__float_mode mode = tt__float_default();
        status = tt__image_transform(l->ctx, &thread->resampler, &l->image, &image, key,
                                     slot->pixels + (size_t)(at - first) * l->image_bytes, why);
        tt__float_restore(mode);
        if (source->release) source->release(source->user, &image);
    }

    pthread_mutex_lock(&l->mutex);
    if (status != TT_OK && at - first < slot->failed) {
        slot->failed = (int)(at - first);
        slot->status = status;
        strcpy(slot->why, why);
        l->failed = true;
    }
    slot->done++;
    l->busy--;
    pthread_cond_signal(&l->ready);
}

static void *tt__image_main(void *arg)
{
    tt__loader_thread *thread = (tt__loader_thread *)arg;
    tt_loader *l = thread->loader;
    int64_t first;
    int seqs;
    pthread_mutex_lock(&l->mutex);
    while (!l->stop) {
        if (l->cursor < l->texts && tt__image_micro(l, l->cursor, &first, &seqs) < l->base + l->slots)
            tt__image_make(l, thread);
        else pthread_cond_wait(&l->work, &l->mutex);
    }
    pthread_mutex_unlock(&l->mutex);
    return NULL;
}

static void tt__image_empty(tt_loader *l, tt__ring_slot *slot)
{
    slot->done = 0;
    slot->failed = l->max_seqs;
}

/* The next micro-batch, once all its images are made. */
static bool tt__image_next(tt_loader *l, tt_batch *batch)
{
    int64_t first, micro;
    int seqs;
    pthread_mutex_lock(&l->mutex);
    micro = tt__image_micro(l, l->step * l->o.batch + l->in_step, &first, &seqs);
    if (micro > l->base) { /* the trainer is done with the one before it */
        tt__image_empty(l, &l->ring[l->base++ % l->slots]);
        pthread_cond_broadcast(&l->work);
    }
    tt__ring_slot *slot = &l->ring[micro % l->slots];
    if (slot->done < seqs) {
        double start = tt__seconds();
        while (slot->done < seqs) {
            if (l->started) pthread_cond_wait(&l->ready, &l->mutex);
            else tt__image_make(l, &l->threads[0]);
        }
        l->waited += tt__seconds() - start;
    }
    pthread_mutex_unlock(&l->mutex);
    if (slot->failed < seqs) {
        const tt_image_source *source = &l->d->source;
        long long number = l->d->examples[l->order[first + slot->failed]].number;
        const char *name = source->name ? source->name(source->user, number) : NULL;
        l->status = name ? tt__fail(l->ctx, slot->status, "loader: image '%.500s': %s", name, slot->why)
                         : tt__fail(l->ctx, slot->status, "loader: image %lld: %s", number, slot->why);
        return false;
    }
    for (int i = 0; i < seqs; i++) {
        l->index[i] = l->order[first + i];
        l->labels[i] = l->d->examples[l->index[i]].label;
    }
    batch->pixels = slot->pixels;
    batch->image_bytes = (int64_t)l->image_bytes;
    l->in_step += seqs;
    return tt__loader_give(l, batch, seqs, l->in_step == l->o.batch || first + seqs == l->texts);
}

void tt_loader_free(tt_loader *l)
{
    if (!l) return;
    tt_context *ctx = l->ctx;
    pthread_mutex_lock(&l->mutex);
    l->stop = true;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->mutex);
    for (int i = 0; i < l->started; i++) pthread_join(l->threads[i].handle, NULL);
    pthread_cond_destroy(&l->ready);
    pthread_cond_destroy(&l->work);
    pthread_mutex_destroy(&l->mutex);
    for (int i = 0; i < TT__LOADER_THREADS; i++) tt__resampler_free(ctx, &l->threads[i].resampler);
    for (int i = 0; l->ring && i < l->slots; i++) tt__free(ctx, l->ring[i].pixels);
    tt__chunks_free(ctx, &l->chunks);
    void *const owned[] = {l->ring, l->order, l->scratch, l->tokens, l->sorted, l->step_order, l->ids,
                           l->positions, l->types, l->seq_start, l->labels, l->index, l};
    tt__free_all(ctx, owned, TT__COUNT(owned));
}

static tt_status tt__loader_check(tt_context *ctx, const tt_dataset *d, const tt_loader_options *o)
{
    if (o->batch < 1 || o->accumulate < 1 || o->accumulate > o->batch)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "loader: batch = %d and accumulate = %d; expected 1 <= "
                        "accumulate <= batch", o->batch, o->accumulate);
    if (!d->count) return tt__fail(ctx, TT_ERR_ARGUMENT, "loader: the dataset is empty");
    if (o->threads < 0 || o->threads > TT__LOADER_THREADS)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "loader: threads = %d; expected 0 to %d", o->threads,
                        TT__LOADER_THREADS);
    if (o->drop_last && d->count < o->batch)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "loader: %d %s make no whole step of batch = %d, and drop_last "
                        "leaves out others", d->count, d->images ? "images" : "texts", o->batch);
    if (d->images) return TT_OK;
    if (o->max_length < 2)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "loader: max_length = %d; expected at least 2, for [CLS] and "
                        "[SEP]", o->max_length);
    if (o->max_tokens != 0 && o->max_tokens < o->max_length)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "loader: max_tokens = %d; expected 0 or at least max_length = "
                        "%d, so that every text fits", o->max_tokens, o->max_length);
    if (o->window < 0)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "loader: window = %d; expected 0 (no sorting) or more batches",
                        o->window);
    if (tt__ceil_div(o->batch, o->accumulate) > INT32_MAX / o->max_length && !o->max_tokens)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "loader: batch = %d of max_length = %d are more tokens than "
                        "can be counted: set max_tokens", o->batch, o->max_length);
    return TT_OK;
}

static bool tt__loader_allocate(tt_loader *l) /* what texts need */
{
    tt_context *ctx = l->ctx;
    if (!tt__loader_tokenize(l)) return false;
    size_t seqs = (size_t)l->max_seqs, rows = (size_t)l->max_tokens;
    size_t window_texts = (size_t)tt__min(l->d->count, l->window_steps * l->o.batch);
    return (l->sorted = (uint32_t *)tt__alloc(ctx, window_texts * 4)) &&
           (l->step_order = (uint32_t *)tt__alloc(ctx, (size_t)l->window_steps * 4)) &&
           (l->ids = (int32_t *)tt__alloc(ctx, rows * 4)) &&
           (l->positions = (int32_t *)tt__alloc(ctx, rows * 4)) &&
           (l->types = (int32_t *)tt__calloc(ctx, rows * 4)) &&
           (l->seq_start = (int32_t *)tt__alloc(ctx, (seqs + 1) * 4));
}

static bool tt__image_allocate(tt_loader *l) /* what images need */
{
    const tt_image_options *o = &l->image;
    size_t bytes;
    l->image_bytes = (size_t)o->height * (size_t)o->width * (size_t)o->channels;
    if (!tt__mul_size(l->image_bytes, (size_t)l->max_seqs, &bytes))
        return tt__fail(l->ctx, TT_ERR_ARGUMENT, "loader: %d images of %d x %d pixels are more than memory "
                        "can hold: set batch lower", l->max_seqs, o->height, o->width), false;
    /* one that the trainer reads, one that is ready, and as many as give every thread two images to make */
    l->slots = l->o.threads ? 2 + (int)tt__ceil_div(2 * l->o.threads, l->max_seqs) : 1;
    if (!(l->ring = (tt__ring_slot *)tt__calloc(l->ctx, (size_t)l->slots * sizeof *l->ring))) return false;
    for (int i = 0; i < l->slots; i++)
        if (!(l->ring[i].pixels = (uint8_t *)tt__alloc(l->ctx, bytes))) return false;
    return true;
}

/* A loader of texts (k) or images (`image`), at the first step, its threads started. */
static tt_loader *tt__loader_make(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k,
                                  const tt_image_options *image, const tt_loader_options *options)
{
    tt_loader_options o = options ? *options : tt_loader_options_default();
    tt_loader *l = tt__loader_check(ctx, d, &o) == TT_OK ? (tt_loader *)tt__calloc(ctx, sizeof *l) : NULL;
    if (!l) return NULL;
    pthread_mutex_init(&l->mutex, NULL);
    pthread_cond_init(&l->work, NULL);
    pthread_cond_init(&l->ready, NULL);
    l->ctx = ctx;
    l->d = d;
    l->k = k;
    l->o = o;
    if (image) l->image = *image;
    l->wide = k && k->size > 65536;
    l->sort = k && o.shuffle && o.window > 1;
    l->steps = o.drop_last ? d->count / o.batch : tt__ceil_div(d->count, o.batch);
    l->texts = tt__min(d->count, l->steps * o.batch);
    l->max_seqs = (int)tt__min(tt__ceil_div(o.batch, o.accumulate), d->count);
    l->accumulates = l->max_seqs < tt__min(o.batch, d->count);
    l->window_steps = l->sort ? tt__min(o.window, l->steps) : 1;
    l->epoch = l->window_at = -1;
    size_t seqs = (size_t)l->max_seqs;
    bool ok = (l->order = (uint32_t *)tt__alloc(ctx, (size_t)d->count * 4)) &&
        (l->labels = (int32_t *)tt__alloc(ctx, seqs * 4)) &&
        (l->index = (int64_t *)tt__alloc(ctx, seqs * sizeof *l->index)) &&
        (image ? tt__image_allocate(l) : tt__loader_allocate(l)) && tt_loader_seek(l, 0, 0) == TT_OK;
    for (int i = 0; i < TT__LOADER_THREADS; i++) l->threads[i].loader = l;
    while (ok && image && l->started < o.threads) {
        tt__loader_thread *thread = &l->threads[l->started];
        ok = tt__thread_start(&thread->handle, tt__image_main, thread);
        if (ok) l->started++;
        else
            tt__fail(ctx, TT_ERR_MEMORY, "loader: could not start thread %d of %d: set threads lower",
                     l->started + 1, o.threads);
    }
    if (ok) return l;
    tt_loader_free(l);
    return NULL;
}

tt_loader *tt_loader_new(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k,
                         const tt_loader_options *options)
{
    if (!d->images) return tt__loader_make(ctx, d, k, NULL, options);
    tt__fail(ctx, TT_ERR_ARGUMENT, "tt_loader_new: the dataset holds images: use tt_image_loader_new");
    return NULL;
}

tt_image_options tt_image_options_default(int height, int width)
{
    tt_image_options o = {height, width, 3, 0, 0, 0, false, false};
    return o;
}

/* What can be said before an image is read. */
static tt_status tt__image_check(tt_context *ctx, const tt_dataset *d, const tt_image_options *o)
{
    char why[256];
    if (!o)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_image_loader_new: the image options are NULL: how large "
                        "are the results to be?");
    if (!d->images)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_image_loader_new: the dataset holds texts: use "
                        "tt_loader_new");
    if (!tt__side(o->height) || !tt__side(o->width) || o->channels < 1 || o->channels > 4)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "image options: results of %d x %d pixels of %d channels; "
                        "expected sides of 1 to %d and 1 to 4 channels", o->height, o->width, o->channels,
                        TT__IMAGE_SIDE);
    if ((o->resize_height || o->resize_width) && (!tt__side(o->resize_height) || !tt__side(o->resize_width)))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "image options: resize_height = %d and resize_width = %d; "
                        "expected both 0, or both 1 to %d", o->resize_height, o->resize_width,
                        TT__IMAGE_SIDE);
    if (o->pad < 0 || o->pad > TT__IMAGE_SIDE)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "image options: pad = %d; expected 0 to %d", o->pad,
                        TT__IMAGE_SIDE);
    int height = o->resize_height ? o->resize_height : d->source.height;
    int width = o->resize_width ? o->resize_width : d->source.width, channels = d->source.channels;
    if ((height && !tt__image_fits(o, height, width, why)) ||
        (channels && !tt__image_channels(o, channels, why)))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "image options: %s", why);
    return TT_OK;
}

tt_loader *tt_image_loader_new(tt_context *ctx, const tt_dataset *d, const tt_image_options *image,
                               const tt_loader_options *options)
{
    return tt__image_check(ctx, d, image) == TT_OK ? tt__loader_make(ctx, d, NULL, image, options) : NULL;
}

int64_t tt_loader_steps(const tt_loader *l) { return l->steps; }
int tt_loader_max_seqs(const tt_loader *l) { return l->max_seqs; }
int tt_loader_max_tokens(const tt_loader *l) { return l->max_tokens; }
bool tt_loader_accumulates(const tt_loader *l) { return l->accumulates; }
int tt_loader_longest(const tt_loader *l) { return l->longest; }
int64_t tt_loader_cut(const tt_loader *l) { return l->cut; }
double tt_loader_waited(const tt_loader *l) { return l->waited; }
tt_status tt_loader_status(const tt_loader *l) { return l->status; }

static tt_status tt__loader_source_seek(void *self, int64_t epoch, int64_t step)
{
    return tt_loader_seek((tt_loader *)self, epoch, step);
}

static tt_status tt__loader_source_next(void *self, tt_batch *batch, bool *more)
{
    tt_loader *l = (tt_loader *)self;
    *more = tt_loader_next(l, batch);
    return l->status;
}

/* Of labels, and of the tokens of texts. */
static uint64_t tt__loader_source_hash(void *self)
{
    const tt_loader *l = (const tt_loader *)self;
    uint64_t hash = TT__HASH_BEGIN;
    for (int i = 0; i < l->d->count; i++) {
        hash = tt__hash_on(hash, &l->d->examples[i].label, sizeof l->d->examples[i].label);
        if (!l->tokens) continue; /* images */
        int count = l->tokens[i].count;
        hash = tt__hash_on(hash, &count, sizeof count);
        hash = tt__hash_on(hash, l->tokens[i].ids, (size_t)count * (l->wide ? 4 : 2));
    }
    return hash;
}

const tt_source *tt_loader_source(tt_loader *l)
{
    if (!l) return NULL;
    tt_source s = {l, tt__loader_source_seek, tt__loader_source_next, l->steps, l->max_seqs, l->max_tokens,
                   l->accumulates, tt__loader_source_hash, l->d->classes, l->d->n_classes};
    l->source = s;
    return &l->source;
}

tt_status tt_loader_seek(tt_loader *l, int64_t epoch, int64_t step)
{
    if (epoch < 0 || step < 0 || step > l->steps)
        return tt__fail(l->ctx, TT_ERR_ARGUMENT, "loader: no step %lld of epoch %lld; an epoch has steps 0 "
                        "to %lld", (long long)step, (long long)epoch, (long long)l->steps - 1);
    pthread_mutex_lock(&l->mutex);
    if (l->ring && epoch == l->epoch && step == l->step && !l->in_step && !l->failed)
        return pthread_mutex_unlock(&l->mutex), TT_OK;
    l->cursor = l->texts; /* nothing more is begun */
    while (l->busy) pthread_cond_wait(&l->ready, &l->mutex);
    if (epoch != l->epoch) {
        uint32_t count = (uint32_t)l->d->count;
        uint64_t key = tt__stream_key(l->ctx->options.seed, TT__RANDOM_SHUFFLE, (uint64_t)epoch,
                                      TT__SHUFFLE_TEXTS);
        if (l->o.shuffle) tt__shuffle(l->order, count, key);
        else for (uint32_t i = 0; i < count; i++) l->order[i] = i;
        l->epoch = epoch;
        l->window_at = -1;
    }
    l->step = step;
    l->in_step = 0;
    l->cursor = tt__min(step * l->o.batch, l->texts);
    l->failed = false;
    for (int i = 0; i < l->slots; i++) tt__image_empty(l, &l->ring[i]);
    l->base = step * tt__ceil_div(l->o.batch, l->max_seqs);
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->mutex);
    return TT_OK;
}

/* Collects the texts of a window: sorted by length, so that the sequences of a step are alike, the steps then
   in random order. A last incomplete step stays the last of its epoch. */
static void tt__loader_window(tt_loader *l, int64_t window)
{
    int64_t first = window * l->window_steps * l->o.batch;
    int64_t n = tt__min(l->window_steps * l->o.batch, l->texts - first);
    for (int64_t i = 0; i < n; i++) l->sorted[i] = l->order[first + i];
    if (l->sort) {
        uint64_t key = tt__stream_key(l->ctx->options.seed, TT__RANDOM_SHUFFLE, (uint64_t)l->epoch,
                                      TT__SHUFFLE_STEPS + (uint64_t)window);
        tt__sort_indices(l->sorted, (size_t)n, tt__loader_longer, l->tokens);
        tt__shuffle(l->step_order, (uint32_t)(n / l->o.batch), key);
        if (n % l->o.batch) l->step_order[n / l->o.batch] = (uint32_t)(n / l->o.batch);
    } else {
        l->step_order[0] = 0;
    }
    l->window_at = window;
}

bool tt_loader_next(tt_loader *l, tt_batch *batch)
{
    memset(batch, 0, sizeof *batch);
    l->status = TT_OK;
    if (l->step >= l->steps) return false;
    if (l->ring) return tt__image_next(l, batch);
    int64_t window = l->step / l->window_steps;
    if (window != l->window_at) tt__loader_window(l, window);

    int64_t from = (window * l->window_steps + l->step_order[l->step % l->window_steps]) * l->o.batch;
    int in_step = (int)tt__min(l->o.batch, l->texts - from), rows = 0, seqs = 0;
    const uint32_t *texts = l->sorted + (from - window * l->window_steps * l->o.batch);
    for (; l->in_step < in_step && seqs < l->max_seqs; seqs++, l->in_step++) {
        uint32_t text = texts[l->in_step];
        const tt__tokens *tokens = &l->tokens[text];
        if (tokens->count > l->max_tokens - rows) break;
        l->seq_start[seqs] = rows;
        l->labels[seqs] = l->d->examples[text].label;
        l->index[seqs] = text;
        for (int i = 0; i < tokens->count; i++, rows++) {
            l->ids[rows] = l->wide ? ((const int32_t *)tokens->ids)[i] : ((const uint16_t *)tokens->ids)[i];
            l->positions[rows] = i;
        }
    }
    l->seq_start[seqs] = rows;
    batch->rows = rows;
    batch->ids = l->ids;
    batch->positions = l->positions;
    batch->types = l->types;
    batch->seq_start = l->seq_start;
    return tt__loader_give(l, batch, seqs, l->in_step == in_step);
}

/* ---- parts of a dataset */

tt_dataset *tt_dataset_split(tt_dataset *d, int64_t n)
{
    tt_context *ctx = d->ctx;
    if (n < 1 || n >= d->count)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_dataset_split: %lld %s of %d; at least one must go and one "
                        "stay", (long long)n, d->images ? "images" : "texts", d->count), (tt_dataset *)NULL;
    tt_dataset *part = tt__dataset_new(ctx, d->classes, d->n_classes);
    uint32_t *order = part ? (uint32_t *)tt__alloc(ctx, sizeof *order * (size_t)d->count) : NULL;
    uint64_t key = tt__stream_key(ctx->options.seed, TT__RANDOM_SHUFFLE, TT__SHUFFLE_SPLIT,
                                  (uint64_t)d->count);
    tt_status status = order ? tt__dataset_choose(d, n, key, order) : TT_ERR_MEMORY;
    if (part) part->images = d->images, part->source = d->source;
    for (int k = 0; k < (int)n && status == TT_OK; k++) {
        tt__example *from = &d->examples[order[k]], *to = tt__dataset_add(part, "tt_dataset_split");
        bool copies = to && from->text;
        char *text = copies ? tt__chunks_text(ctx, &part->chunks, from->text, from->bytes) : NULL;
        if (!to || (copies && !text))
            status = tt__fail(ctx, TT_ERR_MEMORY, "tt_dataset_split: out of memory for %lld of %d",
                              (long long)n, d->count);
        else {
            *to = *from;
            to->text = text;
            to->label_text = NULL;
        }
    }
    if (status == TT_OK) { /* take them out, keeping the order of the rest */
        for (int k = 0; k < (int)n; k++) d->examples[order[k]].label = -1;
        int kept = 0;
        for (int i = 0; i < d->count; i++)
            if (d->examples[i].label >= 0) d->examples[kept++] = d->examples[i];
        d->count = kept;
    }
    tt__free(ctx, order);
    return tt__dataset_end(part, status);
}

/* ---- a tokenizer as a Hugging Face folder holds it */

static void tt__print_vocab(tt__text *to, const void *tokenizer)
{
    const tt_tokenizer *k = (const tt_tokenizer *)tokenizer;
    for (int id = 0; id < k->size; id++) tt__print(to, "%s\n", tt_tokenizer_token(k, id));
}

static void tt__print_tokenizer_config(tt__text *to, const void *tokenizer)
{
    tt__print(to, "{\"tokenizer_class\": \"BertTokenizer\", \"do_lower_case\": %s}\n",
              ((const tt_tokenizer *)tokenizer)->lowercase ? "true" : "false");
}

tt_status tt_tokenizer_save(const tt_tokenizer *k, const char *folder)
{
    tt_status status = tt__make_folder(k->ctx, folder);
    if (status == TT_OK) status = tt__save_printed(k->ctx, folder, "vocab.txt", tt__print_vocab, k);
    if (status != TT_OK) return status;
    return tt__save_printed(k->ctx, folder, "tokenizer_config.json", tt__print_tokenizer_config, k);
}

/* ===========================================================================================================
   MODELS                                                                                             >>models
   Structs of named parameters and functions that record ops: BERT and ViT. Uses the public API, and >>formats
   for checkpoints.
   ======================================================================================================== */

/* ---------------------------------------------------------------------------------- what architectures share
   Tables say where a model's struct has its parameters and its config's numbers, what files call them, and
   their shapes. Making, checking, loading and saving them is then the same for all. Names have two spellings:
   BERT's and DistilBERT's, or transformers' and torchvision's of ViT. */

typedef struct tt__tensor_row {
    size_t offset;       /* of its tt_param * in the struct of the model or of a layer */
    const char *name[2]; /* in each spelling; a '.' at the beginning follows the prefix. NULL: it has none */
    const char *shape;   /* a letter for each dimension, whose size the architecture tells; '1' is 1. A model
                            lacks a tensor with a size of 0, and its parameter has no leading ones */
    char init;           /* 'n' normal, '1' ones, '0' zeros */
    char part;           /* spelling 1 packs three parameters into one tensor: which; 0: it does not */
    bool head;           /* it is made anew where a checkpoint has none */
} tt__tensor_row;

typedef struct tt__config_row {
    const char *field, *key[2]; /* in the config's struct; in config.json in each spelling, NULL: not there */
    size_t offset;              /* in the config's struct */
    char kind;   /* an int: 'N' at least 1 and needed in config.json, 'n' at least 1, '0' at least 0; a float:
                    'p' in [0, 1), 'f' at least 0; 'b' a bool */
    char letter; /* in shapes; 0: none */
} tt__config_row;

typedef int64_t tt__sizes['Z' - 'A' + 1]; /* of the letters of shapes */

typedef struct tt__architecture {
    const char *name;            /* in messages */
    const char *class_name[2], *type[2]; /* of config.json, in each spelling: "architectures", "model_type" */
    const char *activation_key[2], *more[2]; /* the activation's key; keys and values that never change */
    const char *prefix[2];       /* of names of tensors, which files may lack */
    const char *layer_prefix[2]; /* of those in layers, with %d for the layer, after the prefix */
    const tt__tensor_row *model, *layer;
    const tt__config_row *config;
    int n_model, n_layer, n_config;
    size_t bytes, config_bytes, layer_bytes;                  /* of the structs */
    size_t config_at, activation_at, names_at, layers_at;     /* in the model's struct */
    size_t hidden, layers, heads, classes, activation, range; /* in the config's struct */
    void (*sizes)(const void *config, tt__sizes size);        /* those that no row of the config tells */
    void (*check)(tt__text *all, const void *config);         /* adds what else is wrong; NULL: nothing */
    /* reads a tensor whose shape is not the parameter's in a way of its own and sets *done; NULL: none is */
    tt_status (*adapt)(const tt__tensor_row *row, tt_param *p, tt_safetensors *s, int index, bool *done);
    size_t image_size; /* in the config's struct */
} tt__architecture;

/* The last fields but four of an architecture whose structs are X, X_config and X_layer. */
#define TT__STRUCTS(X) \
    sizeof(X), sizeof(X##_config), sizeof(X##_layer), offsetof(X, config), offsetof(X, activation), \
    offsetof(X, class_names), offsetof(X, layer), offsetof(X##_config, hidden_size), \
    offsetof(X##_config, layers), offsetof(X##_config, heads), offsetof(X##_config, classes), \
    offsetof(X##_config, activation), offsetof(X##_config, initializer_range)
/* Rows of a tensor, of a linear layer's or a norm's weight and bias, and of a config. */
#define TT__TENSOR(X, field, a, b, shape, init, head) {offsetof(X, field), {a, b}, shape, init, 0, head}
#define TT__WEIGHT_BIAS(X, field, a, b, shape, rows, init, head) \
    TT__TENSOR(X, field##_w, a ".weight", b ".weight", shape, init, head), \
    TT__TENSOR(X, field##_b, a ".bias", b ".bias", rows, '0', head)
#define TT__CONFIG(X, field, kind, letter, a, b) {#field, {a, b}, offsetof(X##_config, field), kind, letter}

static int tt__int_field(const void *config, size_t offset)
{
    return *(const int *)(const void *)((const char *)config + offset);
}

static float tt__float_field(const void *config, size_t offset)
{
    return *(const float *)(const void *)((const char *)config + offset);
}

static void *tt__pointer_at(const void *self, size_t offset)
{
    void *p;
    memcpy(&p, (const char *)self + offset, sizeof p);
    return p;
}

/* The parameters of a model, or of one that is yet to be made. */
typedef struct tt__layout {
    tt_context *ctx;
    const tt__architecture *a;
    char *self, *layer_self; /* the model's struct, the first layer's; NULL: not made yet */
    int layers, spelling;
    tt_safetensors *file; /* that is read, in that spelling; NULL: none */
    tt__sizes size;
} tt__layout;

static tt__layout tt__layout_of(tt_context *ctx, const tt__architecture *a, const void *self,
                                const void *config, int spelling, tt_safetensors *file)
{
    tt__layout l;
    memset(&l, 0, sizeof l);
    l.ctx = ctx;
    l.a = a;
    l.self = (char *)(uintptr_t)self;
    l.layer_self = self ? (char *)tt__pointer_at(self, a->layers_at) : NULL;
    l.layers = tt__int_field(config, a->layers);
    l.spelling = spelling;
    l.file = file;
    for (int k = 0; k < a->n_config; k++) {
        const tt__config_row *r = &a->config[k];
        if (r->letter) l.size[r->letter - 'A'] = tt__int_field(config, r->offset);
    }
    l.size['C' - 'A'] = tt__int_field(config, a->classes);
    a->sizes(config, l.size);
    return l;
}

/* Parameter number k (the model's, then each layer's): its row and name; NULL behind the last. */
static const tt__tensor_row *tt__layout_row(const tt__layout *l, int k, char name[256])
{
    const tt__architecture *a = l->a;
    const int in_layers = k - a->n_model, layer = in_layers / a->n_layer, spelling = l->spelling;
    if (in_layers >= 0 && layer >= l->layers) return NULL;
    const tt__tensor_row *row = in_layers < 0 ? &a->model[k] : &a->layer[in_layers % a->n_layer];
    const char *plain = row->name[spelling] ? row->name[spelling] : "";
    int n = in_layers >= 0 || *plain == '.' ? snprintf(name, 256, "%s", a->prefix[spelling]) : 0;
    if (in_layers >= 0) n += snprintf(name + n, 256 - (size_t)n, a->layer_prefix[spelling], layer);
    snprintf(name + n, 256 - (size_t)n, "%s", plain + (*plain == '.'));
    return row;
}

/* Where the model's struct has parameter number k, which tt__layout_row knows. */
static tt_param **tt__layout_slot(const tt__layout *l, const tt__tensor_row *row, int k)
{
    const int in_layers = k - l->a->n_model;
    size_t layer = in_layers < 0 ? 0 : (size_t)(in_layers / l->a->n_layer) * l->a->layer_bytes;
    return (tt_param **)(void *)((in_layers < 0 ? l->self : l->layer_self) + layer + row->offset);
}

/* Which part of a tensor a parameter is, in the spelling that packs three; 0: all of it. */
static int tt__layout_part(const tt__layout *l, const tt__tensor_row *row)
{
    return l->spelling == 1 ? row->part : 0;
}

/* Fills in the dimensions that files give a tensor. Returns how many, 0 if the model lacks it. */
static int tt__row_dims(const tt__layout *l, const tt__tensor_row *row, int64_t dims[4])
{
    int n = 0;
    for (const char *s = row->shape; *s; s++) {
        dims[n] = *s == '1' ? 1 : l->size[*s - 'A'];
        if (dims[n++] == 0) return 0;
    }
    return n;
}

/* Creates the parameters. scale: the standard deviation of those that start at random */
static tt_status tt__layout_new(const tt__layout *l, float scale)
{
    const tt__tensor_row *row;
    char name[256];
    for (int k = 0; (row = tt__layout_row(l, k, name)) != NULL; k++) {
        int64_t dims[4];
        int n = row->name[l->spelling] ? tt__row_dims(l, row, dims) : 0, lead = (int)strspn(row->shape, "1");
        tt_init init = {row->init == '1' ? TT_INIT_ONES : TT_INIT_ZEROS, scale};
        if (row->init == 'n') init.kind = TT_INIT_NORMAL;
        if (!n) continue;
        tt_param *p = tt_param_new(l->ctx, name, n - lead, dims + lead, init);
        if (!p) return l->ctx->status;
        *tt__layout_slot(l, row, k) = p;
    }
    return TT_OK;
}

/* ---- from checkpoint files: an open file is shared by the parameters that will be read from it */

typedef struct tt__checkpoint_tensor {
    tt_safetensors *file;
    int index;
    int64_t first;
} tt__checkpoint_tensor;

static tt_status tt__checkpoint_read(void *source, int64_t first, int64_t n, float *to)
{
    tt__checkpoint_tensor *t = (tt__checkpoint_tensor *)source;
    return tt_safetensors_read_f32(t->file, t->index, t->first + first, n, to);
}

static void tt__checkpoint_drop(tt_context *ctx, void *source)
{
    tt_safetensors_close(((tt__checkpoint_tensor *)source)->file);
    tt__free(ctx, source);
}

/* Tensor `index` of s must have the shape `dims`; with `part`, three times as many rows. */
static tt_status tt__tensor_fits(const tt_safetensors *s, int index, int ndim, const int64_t *dims, int part,
                                 const char *param)
{
    const tt_tensor_info *info = &s->infos[index];
    const int64_t rows = ndim ? dims[0] * (part ? 3 : 1) : 0;
    bool same = info->ndim == ndim;
    for (int k = 0; k < ndim && same; k++) same = info->dims[k] == (k ? dims[k] : rows);
    if (same) return TT_OK;
    char text[256];
    tt__text shapes = {text, sizeof text, 0};
    tt__print(&shapes, "(");
    for (int k = 0; k < info->ndim; k++) tt__print(&shapes, k ? ", %lld" : "%lld", (long long)info->dims[k]);
    tt__print(&shapes, "), expected (");
    for (int k = 0; k < ndim; k++) tt__print(&shapes, k ? ", %lld" : "%lld", (long long)(k ? dims[k] : rows));
    return tt__fail(s->ctx, TT_ERR_SHAPE, "'%s': tensor '%s' has shape %s) for parameter '%s'", s->path,
                    info->name, text, param);
}

/* p will be read from tensor `index` of s, whose shape must be `dims`; with `part`, from that third of it. */
static tt_status tt__param_from_file(tt_param *p, tt_safetensors *s, int index, int ndim, const int64_t *dims,
                                     int part)
{
    const tt_tensor_info *info = &s->infos[index];
    tt_status status = tt__tensor_fits(s, index, ndim, dims, part, p->name);
    if (status != TT_OK) return status;
    if (tt__safetensors_type(info->dtype) > TT__ST_F64)
        return tt__fail(p->ctx, TT_ERR_FORMAT, "'%s': tensor '%s' has dtype %s; parameters are F32, BF16, "
                        "F16 or F64", s->path, info->name, info->dtype);
    tt__checkpoint_tensor *t = (tt__checkpoint_tensor *)tt__alloc(p->ctx, sizeof *t);
    if (!t) return TT_ERR_MEMORY;
    t->file = s;
    t->index = index;
    t->first = part ? (part - 1) * p->size : 0;
    s->shared++;
    tt__param_drop_source(p);
    p->source = t;
    p->read = tt__checkpoint_read;
    p->release = tt__checkpoint_drop;
    return TT_OK;
}

/* The tensor of that name, with the prefix or without, also under names of older versions; -1: none. */
static int tt__find_tensor(const tt_safetensors *s, const char *name, const char *prefix)
{
    static const char *const old[][2] = {{"LayerNorm.weight", "LayerNorm.gamma"},
                                         {"LayerNorm.bias", "LayerNorm.beta"},
                                         {"mlp.0.", "mlp.linear_1."},
                                         {"mlp.3.", "mlp.linear_2."}};
    char other[256];
    const char *plain = strncmp(name, prefix, strlen(prefix)) == 0 ? name + strlen(prefix) : name;
    int index = tt_safetensors_find(s, name);
    if (index < 0) index = tt_safetensors_find(s, plain);
    for (int k = 0; k < 2 * TT__COUNT(old) && index < 0; k++) {
        const char *from = k % 2 ? name : plain, *now = old[k / 2][0], *at = strstr(from, now);
        if (!at) continue;
        snprintf(other, sizeof other, "%.*s%s%s", (int)(at - from), from, old[k / 2][1], at + strlen(now));
        index = tt_safetensors_find(s, other);
    }
    return index;
}

static int tt__layout_find(const tt__layout *l, const char *name)
{
    return tt__find_tensor(l->file, name, l->a->prefix[l->spelling]);
}

/* A classifier (rows of C) of another number of classes than the file's is made anew. */
static bool tt__starts_anew(const tt__tensor_row *row, const tt_tensor_info *info, const int64_t *dims)
{
    return row->head && row->shape[0] == 'C' && info->dims[0] != dims[0];
}

/* Tensor `name` is missing in the file, or all of its layer are. */
static tt_status tt__layout_lacks(const tt__layout *l, int k, const char *name)
{
    const tt__architecture *a = l->a;
    const int layer = k < a->n_model ? 0 : (k - a->n_model) / a->n_layer;
    char other[256];
    bool any = layer == 0; /* tensors of this layer */
    for (int i = 0; i < a->n_layer && !any; i++) {
        const tt__tensor_row *row = tt__layout_row(l, a->n_model + layer * a->n_layer + i, other);
        any = row->name[l->spelling] && tt__layout_find(l, other) >= 0;
    }
    if (any)
        return tt__fail(l->ctx, TT_ERR_FORMAT, "'%s' has no tensor '%s', which config.json calls for, or "
                        "without one the other tensors do", l->file->path, name);
    return tt__fail(l->ctx, TT_ERR_FORMAT, "'%s' has no tensor '%s': it has %d layers, config.json calls for "
                    "%d", l->file->path, name, layer, l->layers);
}

/* Checks that the file has each tensor of the layout, of its shape, before anything of such sizes is made. */
static tt_status tt__layout_check(const tt__layout *l)
{
    const tt__tensor_row *row;
    char name[256];
    for (int k = 0; (row = tt__layout_row(l, k, name)) != NULL; k++) {
        int64_t dims[4];
        int ndim = tt__row_dims(l, row, dims);
        if (!ndim || !row->name[l->spelling]) continue;
        int index = tt__layout_find(l, name);
        tt_status status = TT_OK;
        if (index >= 0 && !tt__starts_anew(row, &l->file->infos[index], dims))
            status = tt__tensor_fits(l->file, index, ndim, dims, tt__layout_part(l, row), name);
        if (index < 0 && !row->head) status = tt__layout_lacks(l, k, name);
        if (status != TT_OK) return status;
    }
    return TT_OK;
}

/* The parameters will be read from the file, whose tensors are checked. A head that it lacks is made anew. */
static tt_status tt__layout_attach(const tt__layout *l)
{
    const tt__tensor_row *row;
    const char *path = l->file->path;
    char name[256];
    int used = 0;
    for (int k = 0; (row = tt__layout_row(l, k, name)) != NULL; k++) {
        int64_t dims[4];
        int ndim = tt__row_dims(l, row, dims), part = tt__layout_part(l, row);
        bool done = false;
        tt_param *p = *tt__layout_slot(l, row, k);
        if (!p) continue;
        int index = tt__layout_find(l, name);
        const tt_tensor_info *info = index < 0 ? NULL : &l->file->infos[index];
        if (!info) {
            tt__log(l->ctx, TT_LOG_INFO, "checkpoint", "'%s' has no '%s': it starts anew", path, name);
            continue;
        }
        used += part < 2; /* parts of one tensor count once */
        if (tt__starts_anew(row, info, dims)) {
            tt__log(l->ctx, TT_LOG_WARNING, "checkpoint", "'%s': '%s' has %lld classes, %lld are asked for: "
                    "it starts anew", path, name, (long long)info->dims[0], (long long)dims[0]);
            continue;
        }
        tt_status status = l->a->adapt ? l->a->adapt(row, p, l->file, index, &done) : TT_OK;
        if (status == TT_OK && !done) status = tt__param_from_file(p, l->file, index, ndim, dims, part);
        if (status != TT_OK) return status;
    }
    int unused = l->file->count - used;
    for (int k = 0; k < l->file->count && unused > 0; k++)
        unused -= tt__match("*embeddings.position_ids", l->file->infos[k].name);
    if (unused > 0)
        tt__log(l->ctx, TT_LOG_WARNING, "checkpoint", "'%s': %d tensors are not part of this model and were "
                "left out", path, unused);
    return TT_OK;
}

/* ---- to checkpoint files */

/* Streams the elements of p through `piece` into w, in dtype `as`. */
static tt_status tt__save_param(tt_safetensors_writer *w, const tt_param *p, tt_dtype as, float *piece,
                                void *converted)
{
    tt_status status = TT_OK;
    for (int64_t first = 0; first < p->size && status == TT_OK; first += TT__PIECE) {
        int64_t n = tt__min(TT__PIECE, p->size - first);
        status = tt__param_read(p, first, n, piece);
        if (status != TT_OK) break;
        tt__convert(converted, as, piece, TT_F32, (size_t)n);
        status = tt_safetensors_write(w, converted, (size_t)n * tt_dtype_bytes(as));
    }
    return status;
}

static const char *tt__safetensors_dtype(tt_dtype dtype)
{
    return dtype == TT_F32 ? "F32" : dtype == TT_F16 ? "F16" : "BF16";
}

/* Writes model.safetensors into a folder, which is made if need be; in the dtype of the parameters, which is
   returned. */
static tt_status tt__layout_save(const tt__layout *l, const char *folder, tt_dtype *dtype)
{
    tt_context *ctx = l->ctx;
    static const char *const metadata[] = {"format", "pt", NULL};
    const tt__tensor_row *row;
    char path[TT__PATH], name[256];
    const size_t all = (size_t)(l->a->n_model + l->a->n_layer * l->layers);
    int tensors = 0, params = 0;
    *dtype = TT_F32;
    tt_status status = tt__make_folder(ctx, folder);
    if (status == TT_OK) status = tt__path_join(ctx, path, folder, "model.safetensors");
    if (status != TT_OK) return status;
    tt_tensor_info *info = (tt_tensor_info *)tt__calloc(ctx, sizeof *info * all);
    char(*names)[256] = (char(*)[256])tt__alloc(ctx, sizeof *names * all);
    const tt_param **param = (const tt_param **)tt__alloc(ctx, sizeof *param * all);
    float *piece = (float *)tt__alloc(ctx, sizeof(float) * TT__PIECE * 2);
    if (!info || !names || !param || !piece) status = TT_ERR_MEMORY;
    for (int k = 0; status == TT_OK && (row = tt__layout_row(l, k, name)) != NULL; k++) {
        const tt_param *p = *tt__layout_slot(l, row, k);
        const int part = tt__layout_part(l, row);
        if (!p) continue;
        if (!params && p->holder) *dtype = tt__param_home(p)->dtype;
        param[params++] = p;
        if (part > 1) continue; /* it follows the first part, in one tensor */
        memcpy(names[tensors], name, sizeof name);
        info[tensors].name = names[tensors];
        info[tensors].dtype = tt__safetensors_dtype(*dtype);
        info[tensors].ndim = tt__row_dims(l, row, info[tensors].dims);
        if (part) info[tensors].dims[0] *= 3;
        tensors++;
    }
    tt_safetensors_writer *w = NULL;
    if (status == TT_OK && !(w = tt_safetensors_begin(ctx, path, info, tensors, metadata)))
        status = ctx->status;
    for (int k = 0; k < params && status == TT_OK; k++)
        status = tt__save_param(w, param[k], *dtype, piece, piece + TT__PIECE);
    status = tt__safetensors_end(w, status);
    void *const owned[] = {piece, (void *)(uintptr_t)param, names, info};
    tt__free_all(ctx, owned, TT__COUNT(owned));
    return status;
}

/* -------------------------------------------------------------------------------------------- config.json */

/* The shortest of 6 to 9 digits that reads back as x, with a decimal point in any locale. */
static const char *tt__json_float(float x, char to[32])
{
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(to, 32, "%.*g", digits, x);
        if (strtof(to, NULL) == x) break;
    }
    for (char *c = to; *c; c++) if (!strchr("+-0123456789e", *c)) *c = '.';
    return to;
}

/* Two classes may have one name, as "crane" of ImageNet. label2id can name one of them: the last, as in
   transformers. (*last)[k]: class k is the last of its name; to be freed. names: (classes, 64);
   TT_ERR_ARGUMENT if one is not UTF-8. */
static tt_status tt__last_of_names(tt_context *ctx, const char (*names)[64], int classes, bool **last)
{
    const char **name = (const char **)tt__alloc(ctx, sizeof *name * (size_t)classes), *twice;
    uint32_t *order = NULL;
    tt_status status = name ? TT_OK : TT_ERR_MEMORY;
    for (int k = 0; k < classes && status == TT_OK; k++) {
        name[k] = names[k];
        if (!memchr(name[k], 0, sizeof names[k]) || !tt__is_utf8(name[k]))
            status = tt__fail(ctx, TT_ERR_ARGUMENT,
                              "class_names[%d] is not UTF-8 of at most 63 bytes with a NUL behind them", k);
    }
    tt__strings all = {name, sizeof *name};
    *last = status == TT_OK ? (bool *)tt__calloc(ctx, sizeof **last * (size_t)classes) : NULL;
    if (*last) order = tt__sort_strings(ctx, all, classes, &twice);
    for (int k = 0; k < classes && order; k++)
        (*last)[order[k]] = k + 1 == classes || strcmp(name[order[k]], name[order[k + 1]]) != 0;
    if (status == TT_OK && !order) status = TT_ERR_MEMORY;
    tt__free(ctx, (void *)(uintptr_t)name);
    tt__free(ctx, order);
    return status;
}

static void tt__print_labels(tt__text *json, const char (*names)[64], int classes, const bool *last)
{
    const char *comma = "";
    tt__print(json, "  \"id2label\": {");
    for (int k = 0; k < classes; k++) {
        tt__print(json, "%s\"%d\": ", k ? ", " : "", k);
        tt__json_quote(json, names[k]);
    }
    tt__print(json, "},\n  \"label2id\": {");
    for (int k = 0; k < classes; k++) {
        if (!last[k]) continue;
        tt__print(json, "%s", comma);
        comma = ", ";
        tt__json_quote(json, names[k]);
        tt__print(json, ": %d", k);
    }
    tt__print(json, "}\n}\n");
}

enum { TT__MOST_CLASSES = 100000, TT__MOST_LAYERS = 1000000 }; /* so that an int can count all tensors */

/* The number of classes, from id2label or num_labels; as it is when there is neither. */
static tt_status tt__read_classes(const tt__json *j, int *classes)
{
    int labels = tt__json_get(j, 0, "id2label");
    int64_t n = *classes;
    tt_status status = TT_OK;
    if (labels >= 0 && j->nodes[labels].kind == TT__JSON_OBJECT) n = j->nodes[labels].count;
    else status = tt__json_read_int(j, 0, "num_labels", false, 1, TT__MOST_CLASSES, &n);
    if (status == TT_OK && (n < 1 || n > TT__MOST_CLASSES))
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': id2label has %lld classes; 1 to %d are supported",
                        j->path, (long long)n, TT__MOST_CLASSES);
    *classes = (int)n;
    return status;
}

/* names (classes, 64) from id2label, where it is there; cut at 63 bytes, never within a character. */
static tt_status tt__read_labels(const tt__json *j, char (*names)[64], int classes)
{
    int labels = tt__json_get(j, 0, "id2label");
    if (labels < 0 || j->nodes[labels].kind != TT__JSON_OBJECT) return TT_OK;
    for (int k = 0; k < classes; k++) {
        char key[16];
        const char *label = NULL;
        snprintf(key, sizeof key, "%d", k);
        tt_status status = tt__json_read_string(j, labels, key, true, &label);
        if (status != TT_OK) return status;
        snprintf(names[k], sizeof names[k], "%s", label);
        names[k][tt__utf8_invalid(names[k], strlen(names[k]))] = 0;
    }
    return TT_OK;
}

static bool tt__is_int(const tt__config_row *r) { return r->kind == 'N' || r->kind == 'n' || r->kind == '0'; }

/* Reads a config as its rows say, and the number of classes. Its activation's name lives as long as j. */
static tt_status tt__config_read(const tt__json *j, const tt__architecture *a, int spelling, void *config)
{
    const char *act = NULL;
    tt_status status = TT_OK;
    for (int k = 0; k < a->n_config && status == TT_OK; k++) {
        const tt__config_row *r = &a->config[k];
        const char *key = r->key[spelling];
        char *to = (char *)config + r->offset;
        if (!key) continue;
        if (tt__is_int(r)) {
            const bool needed = r->kind == 'N';
            int64_t x = tt__int_field(config, r->offset);
            status = tt__json_read_int(j, 0, key, needed, needed, INT32_MAX / 4, &x);
            *(int *)(void *)to = (int)x;
        } else if (r->kind == 'b') {
            status = tt__json_read_bool(j, 0, key, (bool *)(void *)to);
        } else {
            status = tt__json_read_float(j, 0, key, 0, r->kind == 'p' ? 1 : INFINITY, (float *)(void *)to);
        }
    }
    if (status == TT_OK) status = tt__json_read_string(j, 0, a->activation_key[spelling], false, &act);
    if (status != TT_OK) return status;
    if (act) memcpy((char *)config + a->activation, &act, sizeof act);
    return tt__read_classes(j, (int *)(void *)((char *)config + a->classes));
}

/* Records the activation of that name; NULL: there is none. */
static tt_value (*tt__activation_of(const char *name))(tt_tape *, tt_value)
{
    static const struct { const char *name; tt_value (*record)(tt_tape *, tt_value); } all[] = {
        {"gelu", tt_gelu}, {"gelu_new", tt_gelu_tanh}, {"gelu_pytorch_tanh", tt_gelu_tanh},
        {"relu", tt_relu}, {"silu", tt_silu}, {"swish", tt_silu}};
    for (int k = 0; k < TT__COUNT(all); k++) if (name && strcmp(name, all[k].name) == 0) return all[k].record;
    return NULL;
}

/* All that is wrong with a config, in one message. */
static tt_status tt__config_check(tt_context *ctx, const tt__architecture *a, const void *config)
{
    char text[512];
    tt__text all = {text, sizeof text, 0};
    const int hidden = tt__int_field(config, a->hidden), layers = tt__int_field(config, a->layers);
    const int heads = tt__int_field(config, a->heads), classes = tt__int_field(config, a->classes);
    const char *activation = (const char *)tt__pointer_at(config, a->activation);
    for (int k = 0; k < a->n_config; k++) {
        const tt__config_row *r = &a->config[k];
        if (tt__is_int(r) && tt__int_field(config, r->offset) < (r->kind != '0'))
            tt__print(&all, "; %s is %d", r->field, tt__int_field(config, r->offset));
    }
    if (classes < 1) tt__print(&all, "; classes is %d", classes);
    if (classes > TT__MOST_CLASSES)
        tt__print(&all, "; %d classes, at most %d are supported", classes, TT__MOST_CLASSES);
    if (a->check) a->check(&all, config);
    if (layers > TT__MOST_LAYERS)
        tt__print(&all, "; %d layers, at most %d are supported", layers, TT__MOST_LAYERS);
    if (heads > 0 && hidden % heads)
        tt__print(&all, "; hidden_size %d is not a multiple of %d heads", hidden, heads);
    for (int k = 0; k < a->n_config; k++) {
        const tt__config_row *r = &a->config[k];
        const float x = r->kind == 'p' || r->kind == 'f' ? tt__float_field(config, r->offset) : 0;
        if (r->kind == 'p' && !(x >= 0 && x < 1)) tt__print(&all, "; %s %g is not in [0, 1)", r->field, x);
        if (r->kind == 'f' && !(x >= 0 && isfinite(x))) tt__print(&all, "; %s is %g", r->field, x);
    }
    if (!tt__activation_of(activation))
        tt__print(&all, "; activation '%s' is unknown (gelu, gelu_new, relu, silu)",
                  activation ? activation : "(null)");
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "%s config: %s", a->name, text + 2) : TT_OK;
}

/* ------------------------------------------------------------------------------- making, loading, saving */

static void tt__model_free(const tt__architecture *a, void *self)
{
    tt_context *ctx = (tt_context *)tt__pointer_at(self, 0); /* the first of each model's struct */
    if (ctx) {
        tt__free(ctx, tt__pointer_at(self, a->layers_at));
        tt__free(ctx, tt__pointer_at(self, a->names_at));
    }
    memset(self, 0, a->bytes);
}

/* Makes a model of a config that is in order. */
static tt_status tt__model_make(tt_context *ctx, const tt__architecture *a, void *self, const void *config,
                                int spelling)
{
    const int params = ctx->n_params, classes = tt__int_field(config, a->classes);
    const char *activation = (const char *)tt__pointer_at(config, a->activation);
    char *to = (char *)self;
    char(*names)[64] = (char(*)[64])tt__alloc(ctx, sizeof *names * (size_t)classes);
    void *layers = tt__calloc(ctx, a->layer_bytes * (size_t)tt__int_field(config, a->layers));
    tt_status status = names && layers ? TT_OK : TT_ERR_MEMORY;
    for (int k = 0; k < classes && names; k++) snprintf(names[k], sizeof names[k], "LABEL_%d", k);
    memset(self, 0, a->bytes);
    memcpy(to, &ctx, sizeof ctx);
    memcpy(to + a->config_at, config, a->config_bytes);
    memset(to + a->config_at + a->activation, 0, sizeof activation); /* the model may be moved: */
    snprintf(to + a->activation_at, 32, "%s", activation);           /* its own copy says it */
    memcpy(to + a->names_at, &names, sizeof names);
    memcpy(to + a->layers_at, &layers, sizeof layers);
    tt__layout l = tt__layout_of(ctx, a, self, config, spelling, NULL);
    if (status == TT_OK) status = tt__layout_new(&l, tt__float_field(config, a->range));
    if (status == TT_OK) return TT_OK;
    tt__params_undo(ctx, params);
    tt__model_free(a, self);
    return status;
}

static tt_status tt__model_new(tt_context *ctx, const tt__architecture *a, void *self, const void *config,
                               int spelling)
{
    memset(self, 0, a->bytes);
    tt_status status = tt__config_check(ctx, a, config);
    return status == TT_OK ? tt__model_make(ctx, a, self, config, spelling) : status;
}

/* Makes a model of a file's config and tensors, which are checked first. classes, image_size: those that are
   asked for; 0: the config's. j: config.json, empty if there is none; made: the spelling of the parameters'
   names; spelling: of the file's. */
static tt_status tt__model_load(const tt__architecture *a, void *self, void *config, int classes,
                                int image_size, const tt__json *j, int made, int spelling, tt_safetensors *s)
{
    const int params = s->ctx->n_params, own_classes = tt__int_field(config, a->classes);
    if (!classes) classes = own_classes;
    *(int *)(void *)((char *)config + a->classes) = classes;
    tt_status status = tt__config_check(s->ctx, a, config);
    if (status != TT_OK) return status;
    tt__layout l = tt__layout_of(s->ctx, a, NULL, config, spelling, s);
    status = tt__layout_check(&l);
    if (status == TT_OK && image_size) { /* only the caller may ask for another size than the file's */
        *(int *)(void *)((char *)config + a->image_size) = image_size;
        status = tt__config_check(s->ctx, a, config);
    }
    if (status == TT_OK) status = tt__model_make(s->ctx, a, self, config, made);
    if (status != TT_OK) return status;
    if (j->count && classes == own_classes)
        status = tt__read_labels(j, (char(*)[64])tt__pointer_at(self, a->names_at), classes);
    l = tt__layout_of(s->ctx, a, self, config, spelling, s);
    if (status == TT_OK) status = tt__layout_attach(&l);
    if (status == TT_OK) return TT_OK;
    tt__params_undo(s->ctx, params);
    tt__model_free(a, self);
    return status;
}

typedef struct tt__saved_model {
    const tt__architecture *a;
    const void *self, *config;
    int spelling; /* of config.json */
    tt_dtype dtype;
    bool *last;   /* see tt__last_of_names */
} tt__saved_model;

static void tt__print_config(tt__text *json, const void *arg)
{
    const tt__saved_model *s = (const tt__saved_model *)arg;
    const tt__architecture *a = s->a;
    const char *dtype = s->dtype == TT_F32 ? "float32" : s->dtype == TT_F16 ? "float16" : "bfloat16";
    char number[32];
    tt__print(json, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\",\n",
              a->class_name[s->spelling], a->type[s->spelling]);
    for (int k = 0; k < a->n_config; k++) {
        const tt__config_row *r = &a->config[k];
        const char *value = number;
        if (!r->key[s->spelling]) continue;
        if (tt__is_int(r)) snprintf(number, 32, "%d", tt__int_field(s->config, r->offset));
        else if (r->kind != 'b') tt__json_float(tt__float_field(s->config, r->offset), number);
        else value = *((const bool *)s->config + r->offset) ? "true" : "false";
        tt__print(json, "  \"%s\": %s,\n", r->key[s->spelling], value);
    }
    tt__print(json, "  \"%s\": \"%s\",\n%s  \"dtype\": \"%s\",\n", a->activation_key[s->spelling],
              (const char *)s->self + a->activation_at, a->more[s->spelling], dtype);
    tt__print_labels(json, (const char(*)[64])tt__pointer_at(s->self, a->names_at),
                     tt__int_field(s->config, a->classes), s->last);
}

/* Writes model.safetensors and config.json into a folder. spelling: of the tensors' names; config_spelling:
   of config.json. `config` is the model's: where its owner has changed it, it must still be in order. */
static tt_status tt__model_save(tt_context *ctx, const tt__architecture *a, const void *self,
                                const void *config, int spelling, int config_spelling, const char *folder)
{
    tt__saved_model s = {a, self, config, config_spelling, TT_F32, NULL};
    const char(*names)[64] = (const char(*)[64])tt__pointer_at(self, a->names_at);
    tt_status status = tt__config_check(ctx, a, config);
    if (status != TT_OK) return status;
    tt__layout l = tt__layout_of(ctx, a, self, config, spelling, NULL);
    status = tt__last_of_names(ctx, names, tt__int_field(config, a->classes), &s.last);
    if (status == TT_OK) status = tt__layout_save(&l, folder, &s.dtype);
    if (status == TT_OK) status = tt__save_printed(ctx, folder, "config.json", tt__print_config, &s);
    tt__free(ctx, s.last);
    return status;
}

/* names: (classes, 64), as the dataset calls them. */
static tt_status tt__name_classes(tt_context *ctx, char (*names)[64], int classes, const tt_dataset *d)
{
    if (tt_dataset_classes(d) != classes)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "the dataset has %d classes, the model %d",
                        tt_dataset_classes(d), classes);
    for (int c = 0; c < 2 * classes; c++) { /* all are checked before one is changed */
        const char *name = tt_dataset_class_name(d, c % classes);
        if (strlen(name) >= sizeof *names)
            return tt__fail(ctx, TT_ERR_ARGUMENT, "the class '%.40s...' has more than 63 bytes", name);
        if (c >= classes) strcpy(names[c - classes], name);
    }
    return TT_OK;
}

/* ------------------------------------------------------------------------------- classifiers of sequences */

static double tt__accuracy_of(const tt_stats *s) { return s->correct / s->targets; }
static double tt__perplexity_of(const tt_stats *s) { return exp(s->loss); }

tt_metric tt_accuracy(void)
{
    tt_metric m = {"accuracy", tt__accuracy_of, false};
    return m;
}

tt_metric tt_perplexity(void)
{
    tt_metric m = {"perplexity", tt__perplexity_of, true};
    return m;
}

/* image_bytes 0: text. */
static tt_inputs tt__sequence_inputs(tt_tape *t, int max_seqs, int64_t max_rows, int64_t image_bytes)
{
    tt_inputs in;
    memset(&in, 0, sizeof in);
    int64_t rows = tt_axis(t, "tokens", max_rows), seqs = tt_axis(t, "sequences", max_seqs);
    in.positions = tt_input(t, "positions", TT_I32, rows, 1);
    if (image_bytes) {
        in.pixels = tt_input(t, "pixels", TT_U8, seqs, image_bytes);
    } else {
        in.ids = tt_input(t, "ids", TT_I32, rows, 1);
        in.types = tt_input(t, "types", TT_I32, rows, 1);
    }
    in.seq_start = tt_seq_start(t, "seq_start", seqs);
    in.first = tt_input(t, "first", TT_I32, seqs, 1);
    in.labels = tt_input(t, "labels", TT_I32, seqs, 1);
    return in;
}

tt_inputs tt_text_inputs(tt_tape *t, const tt_train_options *o)
{
    return tt__sequence_inputs(t, o->max_seqs, o->max_tokens, 0);
}

tt_inputs tt_image_inputs(tt_tape *t, const tt_train_options *o, int length, int64_t image_bytes)
{
    return tt__sequence_inputs(t, o->max_seqs, (int64_t)o->max_seqs * length, image_bytes);
}

/* The loss of a classifier with these logits (seqs, classes). */
static tt_value tt__classify(tt_tape *t, tt_value logits, const tt_inputs *in, const tt_train_options *o)
{
    tt_cross_entropy_options c = tt_cross_entropy_options_default();
    c.label_smoothing = o->label_smoothing;
    tt_value loss = tt_cross_entropy(t, logits, in->labels, &c);
    tt_name(t, loss, "loss");
    return loss;
}

/* --------------------------------------------------------------------------------------------------- BERT */

tt_bert_config tt_bert_config_default(bool distil)
{
    tt_bert_config c;
    memset(&c, 0, sizeof c);
    c.distil = distil;
    c.vocab_size = 30522;
    c.hidden_size = 768;
    c.layers = distil ? 6 : 12;
    c.heads = 12;
    c.intermediate_size = 3072;
    c.max_positions = 512;
    c.type_vocab_size = distil ? 0 : 2;
    c.pooler = !distil;
    c.classes = 2;
    c.activation = "gelu";
    c.layer_norm_eps = 1e-12f;
    c.initializer_range = 0.02f;
    c.dropout = 0.1f;
    c.attention_dropout = 0.1f;
    c.classifier_dropout = distil ? 0.2f : 0.1f;
    return c;
}

/* H hidden, I intermediate, V vocab, P positions, T types, C classes; Q: hidden, where there is a head. */
static void tt__bert_sizes(const void *config, tt__sizes size)
{
    const tt_bert_config *c = (const tt_bert_config *)config;
    size['Q' - 'A'] = c->distil || c->pooler ? c->hidden_size : 0;
}

static const tt__tensor_row tt__bert_tensors[] = {
#define T(field, bert, distil, shape) TT__TENSOR(tt_bert, field, bert, distil, shape, 'n', false)
#define W(...) TT__WEIGHT_BIAS(tt_bert, __VA_ARGS__)
    T(word, ".embeddings.word_embeddings.weight", ".embeddings.word_embeddings.weight", "VH"),
    T(position, ".embeddings.position_embeddings.weight", ".embeddings.position_embeddings.weight", "PH"),
    T(type, ".embeddings.token_type_embeddings.weight", NULL, "TH"),
    W(norm, ".embeddings.LayerNorm", ".embeddings.LayerNorm", "H", "H", '1', false),
    W(head, ".pooler.dense", "pre_classifier", "QH", "Q", 'n', true),
    W(classifier, "classifier", "classifier", "CH", "C", 'n', true),
#undef T
#undef W
};
static const tt__tensor_row tt__bert_layer_tensors[] = {
#define W(...) TT__WEIGHT_BIAS(tt_bert_layer, __VA_ARGS__, false)
    W(q, "attention.self.query", "attention.q_lin", "HH", "H", 'n'),
    W(k, "attention.self.key", "attention.k_lin", "HH", "H", 'n'),
    W(v, "attention.self.value", "attention.v_lin", "HH", "H", 'n'),
    W(attention, "attention.output.dense", "attention.out_lin", "HH", "H", 'n'),
    W(attention_norm, "attention.output.LayerNorm", "sa_layer_norm", "H", "H", '1'),
    W(up, "intermediate.dense", "ffn.lin1", "IH", "I", 'n'),
    W(down, "output.dense", "ffn.lin2", "HI", "H", 'n'),
    W(output_norm, "output.LayerNorm", "output_layer_norm", "H", "H", '1'),
#undef W
};
static const tt__config_row tt__bert_rows[] = {
#define C(...) TT__CONFIG(tt_bert, __VA_ARGS__)
    C(vocab_size, 'N', 'V', "vocab_size", "vocab_size"),
    C(hidden_size, 'N', 'H', "hidden_size", "dim"),
    C(layers, 'N', 0, "num_hidden_layers", "n_layers"),
    C(heads, 'N', 0, "num_attention_heads", "n_heads"),
    C(intermediate_size, 'N', 'I', "intermediate_size", "hidden_dim"),
    C(max_positions, 'N', 'P', "max_position_embeddings", "max_position_embeddings"),
    C(type_vocab_size, '0', 'T', "type_vocab_size", NULL),
    C(layer_norm_eps, 'f', 0, "layer_norm_eps", NULL),
    C(initializer_range, 'f', 0, "initializer_range", "initializer_range"),
    C(dropout, 'p', 0, "hidden_dropout_prob", "dropout"),
    C(attention_dropout, 'p', 0, "attention_probs_dropout_prob", "attention_dropout"),
    C(classifier_dropout, 'p', 0, "classifier_dropout", "seq_classif_dropout"),
#undef C
};

/* Spelling 1 is DistilBERT's. */
static const tt__architecture tt__bert = {
    "BERT", {"BertForSequenceClassification", "DistilBertForSequenceClassification"}, {"bert", "distilbert"},
    {"hidden_act", "activation"},
    {"  \"position_embedding_type\": \"absolute\",\n  \"pad_token_id\": 0,\n",
     "  \"sinusoidal_pos_embds\": false,\n  \"tie_weights_\": true,\n  \"qa_dropout\": 0.1,\n"
     "  \"pad_token_id\": 0,\n"},
    {"bert.", "distilbert."}, {"encoder.layer.%d.", "transformer.layer.%d."},
    tt__bert_tensors, tt__bert_layer_tensors, tt__bert_rows, TT__COUNT(tt__bert_tensors),
    TT__COUNT(tt__bert_layer_tensors), TT__COUNT(tt__bert_rows), TT__STRUCTS(tt_bert), tt__bert_sizes,
    NULL, NULL, 0};

tt_status tt_bert_new(tt_context *ctx, tt_bert *m, const tt_bert_config *config)
{
    return tt__model_new(ctx, &tt__bert, m, config, config->distil);
}

void tt_bert_free(tt_bert *m) { tt__model_free(&tt__bert, m); }

tt_status tt_bert_name_classes(tt_bert *m, const tt_dataset *d)
{
    return tt__name_classes(m->ctx, m->class_names, m->config.classes, d);
}

tt_value tt_bert_encode(const tt_bert *m, tt_tape *t, const tt_inputs *in)
{
    const tt_bert_config *c = &m->config;
    tt_attention_options attention = tt_attention_options_default(c->heads);
    attention.dropout = c->attention_dropout;
    /* All but h is (rows, hidden). The order of these two decides the random numbers of the updates. */
    tt_value places = tt_embedding(t, in->positions, m->position);
    tt_value x = tt_add(t, tt_embedding(t, in->ids, m->word), places);
    if (m->type) x = tt_add(t, x, tt_embedding(t, in->types, m->type));
    x = tt_dropout(t, tt_layernorm(t, x, m->norm_w, m->norm_b, c->layer_norm_eps), c->dropout);
    tt_name(t, x, "embeddings");
    for (int k = 0; k < c->layers; k++) {
        const tt_bert_layer *l = &m->layer[k];
        tt_value q = tt_linear(t, x, l->q_w, l->q_b), key = tt_linear(t, x, l->k_w, l->k_b);
        tt_value v = tt_linear(t, x, l->v_w, l->v_b);
        tt_value o = tt_attention(t, q, key, v, in->seq_start, &attention);
        tt_name(t, o, "layer.%d.attention", k);
        o = tt_linear(t, o, l->attention_w, l->attention_b);
        if (!c->distil) o = tt_dropout(t, o, c->dropout); /* DistilBERT has none here */
        x = tt_layernorm(t, tt_add(t, o, x), l->attention_norm_w, l->attention_norm_b, c->layer_norm_eps);
        tt_name(t, x, "layer.%d.attention_norm", k);
        tt_value h = tt_linear(t, x, l->up_w, l->up_b); /* (rows, intermediate) */
        h = tt__activation_of(m->activation)(t, h);
        tt_name(t, h, "layer.%d.intermediate", k);
        h = tt_dropout(t, tt_linear(t, h, l->down_w, l->down_b), c->dropout);
        x = tt_add(t, h, x);
        tt_block_end(t, x); /* not the norm, whose backward reads this */
        x = tt_layernorm(t, x, l->output_norm_w, l->output_norm_b, c->layer_norm_eps);
        tt_name(t, x, "layer.%d", k);
    }
    return x;
}

tt_value tt_bert_logits(const tt_bert *m, tt_tape *t, const tt_inputs *in)
{
    tt_value h = tt_gather_rows(t, tt_bert_encode(m, t, in), in->first); /* (seqs, hidden): [CLS] */
    if (m->head_w) {
        h = tt_linear(t, h, m->head_w, m->head_b);
        h = m->config.distil ? tt_relu(t, h) : tt_tanh(t, h);
    }
    h = tt_linear(t, tt_dropout(t, h, m->config.classifier_dropout), m->classifier_w, m->classifier_b);
    tt_name(t, h, "logits");
    return h;
}

static tt_value tt__bert_record(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    tt_inputs in = tt_text_inputs(t, o);
    *output = tt_bert_logits((const tt_bert *)self, t, &in);
    return tt__classify(t, *output, &in, o);
}

tt_model tt_bert_classifier(const tt_bert *m)
{
    const tt_bert_config *c = &m->config;
    tt_model model = {m, tt__bert_record, tt_accuracy(), c->classes, "tokens", c->max_positions, false};
    return model;
}

static tt_status tt__bert_read_config(const tt__json *j, tt_bert_config *c)
{
    const char *type = NULL, *position = "absolute";
    tt_status status = tt__json_read_string(j, 0, "model_type", true, &type);
    if (status != TT_OK) return status;
    if (strcmp(type, "distilbert") != 0 && strcmp(type, "bert") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED,
                        "'%s': model_type is '%s'; this loader reads 'bert' (BERT, MiniLM) and 'distilbert'",
                        j->path, type);
    *c = tt_bert_config_default(strcmp(type, "distilbert") == 0);
    if (!c->distil) c->classifier_dropout = -1; /* where there is none, it is as `dropout` */
    status = tt__config_read(j, &tt__bert, c->distil, c);
    if (c->classifier_dropout < 0) c->classifier_dropout = c->dropout;
    if (status == TT_OK) status = tt__json_read_string(j, 0, "position_embedding_type", false, &position);
    if (status != TT_OK || strcmp(position, "absolute") == 0) return status;
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED,
                    "'%s': position_embedding_type is '%s'; only 'absolute' is supported", j->path, position);
}

tt_status tt_bert_load(tt_context *ctx, tt_bert *m, const char *folder, int classes)
{
    char path[TT__PATH];
    tt__json j;
    tt_bert_config config;
    tt_safetensors *s = NULL;
    memset(m, 0, sizeof *m);
    memset(&j, 0, sizeof j);
    tt_status status = tt__path_join(ctx, path, folder, "config.json");
    if (status == TT_OK) status = tt__json_open(&j, ctx, path);
    if (status == TT_OK) status = tt__bert_read_config(&j, &config);
    if (status == TT_OK) status = tt__path_join(ctx, path, folder, "model.safetensors");
    if (status == TT_OK && !(s = tt_safetensors_open(ctx, path))) status = ctx->status;
    if (status == TT_OK)
        status = tt__model_load(&tt__bert, m, &config, classes, 0, &j, config.distil, config.distil, s);
    tt__json_free(&j);
    tt_safetensors_close(s);
    return status;
}

tt_status tt_bert_save(const tt_bert *m, const char *folder)
{
    tt_bert_config config = m->config;
    config.activation = m->activation;
    return tt__model_save(m->ctx, &tt__bert, m, &config, config.distil, config.distil, folder);
}

/* ---------------------------------------------------------------------------------------------------- ViT */

#define TT__MAX_PATCH 16384 /* pixels; so that sizes multiply without overflow */

tt_vit_config tt_vit_config_default(const char *size)
{
    static const struct { const char *name; int hidden, layers, heads; } sizes[] = {
        {"Ti", 192, 12, 3}, {"S", 384, 12, 6}, {"B", 768, 12, 12}, {"L", 1024, 24, 16}, {"H", 1280, 32, 16}};
    tt_vit_config c;
    memset(&c, 0, sizeof c);
    c.image_size = 224;
    c.channels = 3;
    c.classes = 1000;
    c.activation = "gelu";
    c.layer_norm_eps = 1e-12f;
    c.initializer_range = 0.02f;
    c.qkv_bias = true;
    for (int k = 0; k < 4; k++) c.mean[k] = c.std[k] = 0.5f;
    char letters[3];
    int patch = 0, end = 0;
    bool named = size && sscanf(size, "%2[^/]/%5d%n", letters, &patch, &end) == 2 && !size[end];
    for (int k = 0; k < TT__COUNT(sizes) && named && patch >= 1 && patch <= TT__MAX_PATCH; k++) {
        if (strcmp(sizes[k].name, letters) != 0) continue;
        c.hidden_size = sizes[k].hidden;
        c.layers = sizes[k].layers;
        c.heads = sizes[k].heads;
        c.intermediate_size = 4 * c.hidden_size;
        c.patch_size = patch;
    }
    return c;
}

static int tt__vit_tokens(const tt_vit_config *c)
{
    const int grid = c->image_size / c->patch_size;
    return grid * grid + 1;
}

/* H hidden, I intermediate, D channels, P patch, N tokens, C classes; B: hidden, of biases of q, k and v. */
static void tt__vit_sizes(const void *config, tt__sizes size)
{
    const tt_vit_config *c = (const tt_vit_config *)config;
    size['N' - 'A'] = tt__vit_tokens(c);
    size['B' - 'A'] = c->qkv_bias ? c->hidden_size : 0;
}

static void tt__vit_check(tt__text *all, const void *config)
{
    const tt_vit_config *c = (const tt_vit_config *)config;
    if (c->patch_size > 0 && c->image_size % c->patch_size)
        tt__print(all, "; image_size %d is not a multiple of patch_size %d", c->image_size, c->patch_size);
    if (c->image_size > 16384) tt__print(all, "; image_size %d is above 16384", c->image_size);
    if (c->channels > 4) tt__print(all, "; channels is %d, at most 4 are supported", c->channels);
    for (int k = 0; k < c->channels && k < 4; k++)
        if (!isfinite(c->mean[k]) || !(c->std[k] >= FLT_MIN) || !isfinite(c->std[k]))
            tt__print(all, "; mean %g and std %g of channel %d", c->mean[k], c->std[k], k);
}

/* Weights of the four pixels around, at distance x in [0, 1) from the second (Keys 1981, with a = -3/4). */
static void tt__cubic_weights(float x, float w[4])
{
    const float a = -0.75f;
    for (int k = 0; k < 4; k++) {
        float d = fabsf((float)(k - 1) - x);
        w[k] = d <= 1 ? ((a + 2) * d - (a + 3)) * d * d + 1 : ((a * d - 5 * a) * d + 8 * a) * d - 4 * a;
    }
}

/* Positions of a grid of from x from patches, for one of to x to: bicubic, pixel centres aligned, edges
   repeated, as transformers does; the class token's stays. old (1 + from^2, n) -> now (1 + to^2, n) */
static void tt__interpolate_positions(const float *old, int from, float *now, int to, int64_t n)
{
    memcpy(now, old, sizeof *now * (size_t)n);
    for (int at = 0; at < to * to; at++) {
        const int y = at / to, x = at % to;
        float sy = ((float)y + 0.5f) * (float)from / (float)to - 0.5f, wy[4];
        float sx = ((float)x + 0.5f) * (float)from / (float)to - 0.5f, wx[4];
        float *sum = now + (1 + (int64_t)at) * n;
        tt__cubic_weights(sy - floorf(sy), wy);
        tt__cubic_weights(sx - floorf(sx), wx);
        memset(sum, 0, sizeof *sum * (size_t)n);
        for (int k = 0; k < 16; k++) {
            int64_t row = tt__max(0, tt__min(from - 1, (int)floorf(sy) + k / 4 - 1));
            int64_t column = tt__max(0, tt__min(from - 1, (int)floorf(sx) + k % 4 - 1));
            const float *p = old + (1 + row * from + column) * n, w = wy[k / 4] * wx[k % 4];
            for (int64_t c = 0; c < n; c++) sum[c] += w * p[c];
        }
    }
}

static int tt__square_root(int64_t n) /* of a square; else 0 */
{
    int64_t root = n > 0 && n <= INT32_MAX ? (int64_t)(sqrt((double)n) + 0.5) : 0;
    return root * root == n ? (int)root : 0;
}

/* Positions of a checkpoint for images of another size. */
static tt_status tt__vit_adapt(const tt__tensor_row *row, tt_param *p, tt_safetensors *s, int index,
                               bool *done)
{
    const tt_tensor_info *info = tt_safetensors_info(s, index);
    const bool fits = info->ndim == 3 && info->dims[0] == 1 && info->dims[2] == p->dims[1];
    if (strcmp(row->shape, "1NH") != 0 || !fits || info->dims[1] == p->dims[0]) return TT_OK;
    int from = tt__square_root(info->dims[1] - 1), to = tt__square_root(p->dims[0] - 1);
    int64_t n = info->dims[1] * info->dims[2];
    if (!from) return TT_OK;
    float *old = (float *)tt__alloc(p->ctx, sizeof *old * (size_t)n);
    float *now = (float *)tt__alloc(p->ctx, sizeof *now * (size_t)p->size);
    tt_status status = old && now ? tt_safetensors_read_f32(s, index, 0, n, old) : TT_ERR_MEMORY;
    if (status == TT_OK) {
        tt__interpolate_positions(old, from, now, to, p->dims[1]);
        tt__param_drop_source(p);
        p->read = tt__read_copy;
        p->release = tt__free;
        p->source = now;
        *done = true;
        tt__log(p->ctx, TT_LOG_INFO, "checkpoint", "'%s': positions of %d x %d patches are interpolated to "
                "%d x %d", s->path, from, from, to, to);
    }
    if (!*done) tt__free(p->ctx, now);
    tt__free(p->ctx, old);
    return status;
}

static const tt__tensor_row tt__vit_tensors[] = {
#define T(field, a, b, shape) TT__TENSOR(tt_vit, field, a, b, shape, 'n', false)
#define W(...) TT__WEIGHT_BIAS(tt_vit, __VA_ARGS__)
    T(token, ".embeddings.cls_token", "class_token", "11H"),
    T(position, ".embeddings.position_embeddings", "encoder.pos_embedding", "1NH"),
    W(patch, ".embeddings.patch_embeddings.projection", "conv_proj", "HDPP", "H", 'n', false),
    W(norm, ".layernorm", "encoder.ln", "H", "H", '1', false),
    W(classifier, "classifier", "heads.head", "CH", "C", 'n', true),
#undef T
#undef W
};
static const tt__tensor_row tt__vit_layer_tensors[] = { /* parts of one tensor stand together */
#define W(...) TT__WEIGHT_BIAS(tt_vit_layer, __VA_ARGS__, false)
#define P(field, name, packed, shape, init, part) \
    {offsetof(tt_vit_layer, field), {"attention.attention." name, "self_attention.in_proj_" packed}, shape, \
     init, part, false}
    W(before, "layernorm_before", "ln_1", "H", "H", '1'),
    P(q_w, "query.weight", "weight", "HH", 'n', 1),
    P(k_w, "key.weight", "weight", "HH", 'n', 2),
    P(v_w, "value.weight", "weight", "HH", 'n', 3),
    P(q_b, "query.bias", "bias", "B", '0', 1),
    P(k_b, "key.bias", "bias", "B", '0', 2),
    P(v_b, "value.bias", "bias", "B", '0', 3),
    W(attention, "attention.output.dense", "self_attention.out_proj", "HH", "H", 'n'),
    W(after, "layernorm_after", "ln_2", "H", "H", '1'),
    W(up, "intermediate.dense", "mlp.0", "IH", "I", 'n'),
    W(down, "output.dense", "mlp.3", "HI", "H", 'n'),
#undef W
#undef P
};
static const tt__config_row tt__vit_rows[] = {
#define C(field, kind, letter, key) TT__CONFIG(tt_vit, field, kind, letter, key, NULL)
    C(image_size, 'n', 0, "image_size"),
    C(patch_size, 'n', 'P', "patch_size"),
    C(channels, 'n', 'D', "num_channels"),
    C(hidden_size, 'N', 'H', "hidden_size"),
    C(layers, 'N', 0, "num_hidden_layers"),
    C(heads, 'N', 0, "num_attention_heads"),
    C(intermediate_size, 'N', 'I', "intermediate_size"),
    C(layer_norm_eps, 'f', 0, "layer_norm_eps"),
    C(initializer_range, 'f', 0, "initializer_range"),
    C(dropout, 'p', 0, "hidden_dropout_prob"),
    C(attention_dropout, 'p', 0, "attention_probs_dropout_prob"),
    C(qkv_bias, 'b', 0, "qkv_bias"),
#undef C
};

/* Spelling 1, of tensors, is torchvision's; config.json is always transformers'. */
static const tt__architecture tt__vit = {
    "ViT", {"ViTForImageClassification", NULL}, {"vit", NULL}, {"hidden_act", NULL}, {"", NULL}, {"vit.", ""},
    {"encoder.layer.%d.", "encoder.layers.encoder_layer_%d."}, tt__vit_tensors, tt__vit_layer_tensors,
    tt__vit_rows, TT__COUNT(tt__vit_tensors), TT__COUNT(tt__vit_layer_tensors), TT__COUNT(tt__vit_rows),
    TT__STRUCTS(tt_vit), tt__vit_sizes, tt__vit_check, tt__vit_adapt,
    offsetof(tt_vit_config, image_size)};

tt_status tt_vit_new(tt_context *ctx, tt_vit *m, const tt_vit_config *config)
{
    return tt__model_new(ctx, &tt__vit, m, config, 0);
}

void tt_vit_free(tt_vit *m) { tt__model_free(&tt__vit, m); }

tt_status tt_vit_name_classes(tt_vit *m, const tt_dataset *d)
{
    return tt__name_classes(m->ctx, m->class_names, m->config.classes, d);
}

tt_value tt_vit_encode(const tt_vit *m, tt_tape *t, const tt_inputs *in)
{
    const tt_vit_config *c = &m->config;
    const int side = c->image_size;
    tt_attention_options attention = tt_attention_options_default(c->heads);
    tt_patch_options patches = tt_patch_options_default(side, side, c->channels, c->patch_size);
    attention.dropout = c->attention_dropout;
    memcpy(patches.mean, c->mean, sizeof patches.mean);
    memcpy(patches.std, c->std, sizeof patches.std);
    tt_value x = tt_patches(t, in->pixels, in->positions, in->seq_start, &patches);
    tt_name(t, x, "patches"); /* (rows, channels * patch * patch) */
    x = tt_set_rows(t, tt_linear(t, x, m->patch_w, m->patch_b), in->first, m->token); /* (rows, hidden) */
    x = tt_dropout(t, tt_add(t, x, tt_embedding(t, in->positions, m->position)), c->dropout);
    tt_name(t, x, "embeddings");
    for (int k = 0; k < c->layers; k++) {
        const tt_vit_layer *l = &m->layer[k];
        tt_value h = tt_layernorm(t, x, l->before_w, l->before_b, c->layer_norm_eps);
        tt_name(t, h, "layer.%d.norm_before", k);
        tt_value q = tt_linear(t, h, l->q_w, l->q_b), key = tt_linear(t, h, l->k_w, l->k_b);
        tt_value v = tt_linear(t, h, l->v_w, l->v_b);
        tt_name(t, q, "layer.%d.query", k);
        tt_name(t, key, "layer.%d.key", k);
        tt_name(t, v, "layer.%d.value", k);
        h = tt_attention(t, q, key, v, in->seq_start, &attention);
        tt_name(t, h, "layer.%d.attention", k);
        x = tt_add(t, tt_dropout(t, tt_linear(t, h, l->attention_w, l->attention_b), c->dropout), x);
        tt_name(t, x, "layer.%d.attention_residual", k);
        h = tt_layernorm(t, x, l->after_w, l->after_b, c->layer_norm_eps);
        tt_name(t, h, "layer.%d.norm_after", k);
        h = tt_linear(t, h, l->up_w, l->up_b); /* (rows, intermediate) */
        tt_name(t, h, "layer.%d.intermediate", k);
        h = tt__activation_of(m->activation)(t, h);
        tt_name(t, h, "layer.%d.activation", k);
        x = tt_add(t, tt_dropout(t, tt_linear(t, h, l->down_w, l->down_b), c->dropout), x);
        tt_name(t, x, "layer.%d", k);
        tt_block_end(t, x);
    }
    x = tt_layernorm(t, x, m->norm_w, m->norm_b, c->layer_norm_eps);
    tt_name(t, x, "norm");
    return x;
}

tt_value tt_vit_logits(const tt_vit *m, tt_tape *t, const tt_inputs *in)
{
    tt_value token = tt_gather_rows(t, tt_vit_encode(m, t, in), in->first); /* (seqs, hidden) */
    tt_value logits = tt_linear(t, token, m->classifier_w, m->classifier_b);
    tt_name(t, logits, "logits");
    return logits;
}

static tt_value tt__vit_record(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    const tt_vit *m = (const tt_vit *)self;
    const tt_vit_config *c = &m->config;
    const int64_t bytes = (int64_t)c->image_size * c->image_size * c->channels;
    tt_inputs in = tt_image_inputs(t, o, tt__vit_tokens(c), bytes);
    *output = tt_vit_logits(m, t, &in);
    return tt__classify(t, *output, &in, o);
}

tt_model tt_vit_classifier(const tt_vit *m)
{
    const tt_vit_config *c = &m->config;
    tt_model model = {m, tt__vit_record, tt_accuracy(), c->classes, "images", tt__vit_tokens(c), true};
    return model;
}

static tt_status tt__vit_read_config(const tt__json *j, tt_vit_config *c)
{
    const char *type = NULL;
    tt_status status = tt__json_read_string(j, 0, "model_type", true, &type);
    if (status != TT_OK) return status;
    if (strcmp(type, "vit") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': model_type is '%s'; this loader reads 'vit'",
                        j->path, type);
    *c = tt_vit_config_default("B/16");
    c->classes = 2; /* transformers' default */
    return tt__config_read(j, &tt__vit, 0, c);
}

/* Size k of tensor `name`, 0 when there is none. */
static int tt__tensor_size(const tt_safetensors *s, const char *name, int k)
{
    int index = tt__find_tensor(s, name, "vit.");
    const tt_tensor_info *info = tt_safetensors_info(s, index);
    return info && k < info->ndim && info->dims[k] <= INT32_MAX / 4 ? (int)info->dims[k] : 0;
}

/* The config of a file without one, from the shapes of its tensors. */
static tt_status tt__vit_infer_config(const tt_safetensors *s, int spelling, tt_vit_config *config)
{
    static const char *const position[] = {"vit.embeddings.position_embeddings", "encoder.pos_embedding"};
    static const char *const patch[] = {"vit.embeddings.patch_embeddings.projection.weight",
                                        "conv_proj.weight"};
    static const char *const up[] = {"vit.encoder.layer.%d.intermediate.dense.weight",
                                     "encoder.layers.encoder_layer_%d.mlp.0.weight"};
    static const char *const head[] = {"classifier.weight", "heads.head.weight"};
    char name[128];
    *config = tt_vit_config_default("B/16");
    config->hidden_size = tt__tensor_size(s, position[spelling], 2);
    config->patch_size = tt__tensor_size(s, patch[spelling], 2);
    config->channels = tt__tensor_size(s, patch[spelling], 1);
    if (config->patch_size > TT__MAX_PATCH)
        return tt__fail(s->ctx, TT_ERR_FORMAT, "'%s': patches of %d pixels, more than %d", s->path,
                        config->patch_size, TT__MAX_PATCH);
    config->image_size = tt__square_root(tt__tensor_size(s, position[spelling], 1) - 1) * config->patch_size;
    int head_size = config->hidden_size == 1280 ? 80 : 64; /* of the published sizes Ti, S, B, L; H */
    config->heads = config->hidden_size / head_size;
    if (spelling == 1) { /* as torchvision's models were trained */
        static const float mean[] = {0.485f, 0.456f, 0.406f}, std[] = {0.229f, 0.224f, 0.225f};
        memcpy(config->mean, mean, sizeof mean);
        memcpy(config->std, std, sizeof std);
        config->layer_norm_eps = 1e-6f;
    }
    for (config->layers = 0; config->layers < 1000; config->layers++) {
        snprintf(name, sizeof name, up[spelling], config->layers);
        int size = tt__tensor_size(s, name, 0);
        if (!size) break;
        config->intermediate_size = size;
    }
    int classes = tt__tensor_size(s, head[spelling], 0);
    if (classes) config->classes = classes;
    if (config->hidden_size % head_size)
        return tt__fail(s->ctx, TT_ERR_FORMAT,
                        "'%s': a width of %d does not tell how many heads there are: put a config.json "
                        "beside the file", s->path, config->hidden_size);
    if (config->hidden_size && config->patch_size && config->image_size && config->layers) return TT_OK;
    return tt__fail(s->ctx, TT_ERR_FORMAT,
                    "'%s' is no ViT: '%s', '%s' or the first layer is not there, or not of the shape of one",
                    s->path, position[spelling], patch[spelling]);
}

/* image_mean and image_std of preprocessor_config.json, and whether they are used. */
static tt_status tt__vit_read_preprocessor(const tt__json *j, tt_vit_config *c)
{
    if (c->channels < 1 || c->channels > 4) return TT_OK; /* tt__vit_check refuses it: mean has room for 4 */
    bool rescales = true, normalizes = true;
    float factor = 1.0f / 255;
    tt_status status = tt__json_read_bool(j, 0, "do_rescale", &rescales);
    if (status == TT_OK)
        status = tt__json_read_float(j, 0, "rescale_factor", -FLT_MAX, INFINITY, &factor);
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "do_normalize", &normalizes);
    if (status == TT_OK && (!rescales || !(fabsf(factor * 255 - 1) < 1e-6f)))
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED,
                        "'%s': pixels are taken divided by 255, and this file asks for another "
                        "\"rescale_factor\" or none", j->path);
    for (int k = 0; k < c->channels && !normalizes; k++) c->mean[k] = 0, c->std[k] = 1;
    for (int side = 0; side < 2 && normalizes && status == TT_OK; side++) {
        const char *key = side ? "image_std" : "image_mean";
        int list = tt__json_get(j, 0, key);
        if (list < 0) continue;
        if (j->nodes[list].kind != TT__JSON_ARRAY || j->nodes[list].count != c->channels)
            return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s': '%s' must be a list of %d numbers", j->path, key,
                            c->channels);
        const float least = side ? FLT_MIN : -FLT_MAX; /* what is divided by is above 0 */
        float *to = side ? c->std : c->mean;
        for (int k = 0, node = list + 1; k < c->channels && status == TT_OK; k++, node = j->nodes[node].after)
            status = tt__json_float_at(j, key, node, least, INFINITY, &to[k]);
    }
    return status;
}

tt_status tt_vit_load(tt_context *ctx, tt_vit *m, const char *path, int image_size, int classes)
{
    char folder[TT__PATH], file[TT__PATH], beside[TT__PATH];
    tt__json j, preprocessor;
    tt_vit_config config;
    bool is_file = tt__match("*.safetensors", path);
    const char *slash = is_file ? strrchr(path, '/') : NULL;
    memset(m, 0, sizeof *m);
    memset(&j, 0, sizeof j);
    memset(&preprocessor, 0, sizeof preprocessor);
    tt_status status = tt__path_join(ctx, file, path, "model.safetensors"); /* the longest that follows */
    if (status != TT_OK) return status;
    strcpy(folder, !is_file || slash ? path : ".");
    if (slash) folder[slash - path + 1] = 0;
    tt_safetensors *s = tt_safetensors_open(ctx, is_file ? path : file);
    if (!s) return ctx->status;
    const int spelling = tt_safetensors_find(s, "class_token") >= 0 ||
                         tt_safetensors_find(s, "conv_proj.weight") >= 0;
    status = tt__json_open_if_there(&j, ctx, file, folder, "config.json");
    if (status == TT_OK)
        status = j.count ? tt__vit_read_config(&j, &config)
                         : tt__vit_infer_config(s, spelling, &config);
    if (status == TT_OK)
        status = tt__json_open_if_there(&preprocessor, ctx, beside, folder, "preprocessor_config.json");
    if (status == TT_OK && preprocessor.count) status = tt__vit_read_preprocessor(&preprocessor, &config);
    if (status == TT_OK)
        status = tt__model_load(&tt__vit, m, &config, classes, image_size, &j, 0, spelling, s);
    if (status == TT_OK) m->torchvision = spelling == 1;
    tt__json_free(&preprocessor);
    tt__json_free(&j);
    tt_safetensors_close(s);
    return status;
}

static void tt__vit_print_preprocessor(tt__text *json, const void *arg)
{
    const tt_vit_config *c = (const tt_vit_config *)arg;
    char number[32];
    tt__print(json,
              "{\n  \"image_processor_type\": \"ViTImageProcessor\",\n  \"do_resize\": true,\n"
              "  \"size\": {\"height\": %d, \"width\": %d},\n  \"resample\": 2,\n  \"do_rescale\": true,\n"
              "  \"rescale_factor\": 0.00392156862745098,\n  \"do_normalize\": true",
              c->image_size, c->image_size);
    for (int side = 0; side < 2; side++) {
        tt__print(json, ",\n  \"%s\": [", side ? "image_std" : "image_mean");
        for (int k = 0; k < c->channels; k++)
            tt__print(json, "%s%s", k ? ", " : "", tt__json_float((side ? c->std : c->mean)[k], number));
        tt__print(json, "]");
    }
    tt__print(json, "\n}\n");
}

tt_status tt_vit_save(const tt_vit *m, const char *folder)
{
    tt_vit_config config = m->config;
    config.activation = m->activation;
    if (m->torchvision && !m->config.qkv_bias)
        return tt__fail(m->ctx, TT_ERR_UNSUPPORTED,
                        "torchvision's ViT has biases of q, k and v: set torchvision to false");
    tt_status status = tt__model_save(m->ctx, &tt__vit, m, &config, m->torchvision, 0, folder);
    if (status != TT_OK) return status;
    return tt__save_printed(m->ctx, folder, "preprocessor_config.json", tt__vit_print_preprocessor, &config);
}

/* ===========================================================================================================
   TRAINER                                                                                           >>trainer
   Learning-rate schedules, steps of micro-batches, evaluation, prediction, the state of a run in one file,
   tt_fit. Uses all above.
   ======================================================================================================== */

struct tt_trainer {
    tt_context *ctx;
    tt_model model;
    tt_train_options options;
    tt_program *train, *eval;
    bool step_failed; /* a micro-batch failed: the others of its step are refused */
    int64_t saved_steps;
    tt_value output;
    int64_t output_width;
    tt_input_info *inputs;
    int n_inputs;
    int64_t *rows;    /* of each input in the batch at hand; 0: not set yet */
    bool *needed;     /* for the output, by the input's value: a prediction sets the others to zeros */
    int32_t *positions, *seq_start; /* of max_seqs sequences of the same length */
    void *zeros; /* for predictions: as many as an input has at most that only the loss reads */
};

float tt_schedule_lr(const tt_schedule *s, int64_t step)
{
    if (step < s->warmup_steps) return (float)((double)s->lr * (double)step / (double)s->warmup_steps);
    if (s->kind == TT_CONSTANT) return s->lr;
    double left = (double)(s->total_steps - step) / (double)tt__max(1, s->total_steps - s->warmup_steps);
    left = left < 0 ? 0 : left > 1 ? 1 : left;
    if (s->kind == TT_COSINE) left = 0.5 * (1 - cos(3.14159265358979323846 * left));
    return (float)(s->min_lr + ((double)s->lr - s->min_lr) * left);
}

tt_train_options tt_train_options_default(void)
{
    tt_train_options o;
    memset(&o, 0, sizeof o);
    o.train = true;
    o.schedule.kind = TT_LINEAR;
    o.schedule.lr = 5e-5f;
    o.optimizer = tt_optimizer_options_default();
    o.optimizer.clip_norm = 1;
    o.precision = "32-true";
    o.matmul = "fp32";
    o.loss_scale = tt_loss_scale_default();
    o.recompute = "cheap";
    return o;
}

void tt_train_options_make_room(tt_train_options *o, const tt_source *train, const tt_source *validation)
{
    for (int k = 0; k < 2; k++) {
        const tt_source *s = k ? validation : train;
        if (s && s->max_seqs > o->max_seqs) o->max_seqs = s->max_seqs;
        if (s && s->max_tokens > o->max_tokens) o->max_tokens = s->max_tokens;
    }
    if (train && train->accumulates) o->accumulate = true;
}

/* What of these options is for tt_compile. */
static tt_compile_options tt__compile_options(const tt_train_options *o)
{
    tt_compile_options c = tt_compile_options_default();
    c.train = o->train;
    c.precision = o->precision;
    c.residual = o->residual;
    c.matmul = o->matmul;
    c.loss_scale = o->loss_scale;
    c.recompute = o->recompute;
    c.device = o->device;
    c.accumulate = o->accumulate;
    c.optimizer = o->optimizer;
    c.memory_budget = o->memory_budget;
    return c;
}

/* Can this stand in the heading of metrics.csv? */
static bool tt__is_column(const char *name)
{
    const char *letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    const size_t n = strlen(name);
    return n > 0 && n < 32 && strspn(name, letters) == n;
}

static tt_status tt__check_train_options(tt_context *ctx, const tt_model *model, const tt_train_options *o)
{
    char text[1024];
    tt__text all = {text, sizeof text, 0};
    tt__settings settings;
    const tt_compile_options c = tt__compile_options(o);
    const tt_schedule *s = &o->schedule;
    const bool decays = s->kind != TT_CONSTANT;
    if (!(s->lr >= 0) || !isfinite(s->lr)) tt__print(&all, "; lr %g is not a finite number >= 0", s->lr);
    if (!(s->min_lr >= 0) || s->min_lr > s->lr) tt__print(&all, "; min_lr %g is not in [0, lr]", s->min_lr);
    if ((unsigned)s->kind > TT_COSINE) tt__print(&all, "; schedule %d is unknown", (int)s->kind);
    if (s->warmup_steps < 0) tt__print(&all, "; warmup_steps is %lld", (long long)s->warmup_steps);
    if (o->train && decays && s->total_steps < 1)
        tt__print(&all, "; total_steps must be set for a schedule that decays");
    if (decays && s->total_steps >= 1 && s->warmup_steps > s->total_steps)
        tt__print(&all, "; warmup_steps %lld exceeds total_steps %lld", (long long)s->warmup_steps,
                  (long long)s->total_steps);
    if (o->max_seqs < 1)
        tt__print(&all, "; max_seqs is %d: set it, for example from tt_loader_max_seqs", o->max_seqs);
    if (model->max_length && !model->same_length && o->max_tokens < o->max_seqs)
        tt__print(&all, "; max_tokens %d is less than max_seqs %d", o->max_tokens, o->max_seqs);
    if (!model->record) tt__print(&all, "; the model has no function `record`");
    const tt_metric *metric = &model->metric;
    if (metric->name && !(metric->of && tt__is_column(metric->name) && strcmp(metric->name, "loss") != 0))
        tt__print(&all, "; the model's metric '%.32s' needs a function and a name of at most 31 letters, "
                  "digits, _ and - that is not 'loss'", metric->name);
    if (model->unit && !tt__is_column(model->unit))
        tt__print(&all, "; the model's unit '%.32s' is not of 1 to 31 letters, digits, _ and -", model->unit);
    if (!(o->label_smoothing >= 0 && o->label_smoothing < 1))
        tt__print(&all, "; label_smoothing %g is not in [0, 1)", o->label_smoothing);
    if (tt__parse_settings(ctx, &c, &settings) != TT_OK) tt__print(&all, "; %s", ctx->error);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "train options: %s", text + 2) : TT_OK;
}

/* Lists the inputs of the programs, recorded on t. */
static tt_status tt__trainer_inputs(tt_trainer *r, const tt_tape *t)
{
    const tt_program *p = r->train ? r->train : r->eval;
    const size_t n = (size_t)(r->n_inputs = tt_program_inputs(p, NULL, 0)) + 1;
    size_t most = 0;
    r->inputs = (tt_input_info *)tt__alloc(r->ctx, sizeof *r->inputs * n);
    r->rows = (int64_t *)tt__alloc(r->ctx, sizeof *r->rows * n);
    r->needed = tt__needed_for(t, r->output);
    if (!r->inputs || !r->rows || !r->needed) return TT_ERR_MEMORY;
    tt_program_inputs(p, r->inputs, r->n_inputs);
    for (int k = 0; k < r->n_inputs; k++) {
        const tt_input_info *i = &r->inputs[k];
        const size_t bytes = (size_t)i->rows * (size_t)i->width * tt_dtype_bytes(i->dtype);
        if (!r->needed[i->value.id] && bytes > most) most = bytes;
    }
    r->zeros = tt__calloc(r->ctx, most + 1);
    return r->zeros ? TT_OK : TT_ERR_MEMORY;
}

static tt_status tt__trainer_compile(tt_trainer *r, tt_tape *t)
{
    tt_compile_options o = tt__compile_options(&r->options);
    tt_value loss = r->model.record(r->model.self, t, &r->options, &r->output);
    if (r->output.id) tt_output(t, r->output);
    r->output_width = tt_value_width(t, r->output);
    if (o.train && !(r->train = tt_compile(t, loss, &o))) return r->ctx->status;
    o.train = false;
    o.share = r->train;
    if (!(r->eval = tt_compile(t, loss, &o))) return r->ctx->status;
    if (r->model.classes && r->output_width != r->model.classes)
        return tt__fail(r->ctx, TT_ERR_SHAPE, "the model has %d classes, and its output a width of %lld",
                        r->model.classes, (long long)r->output_width);
    return tt__trainer_inputs(r, t);
}

enum { TT__STATE_NAME = 170 }; /* bytes of the longest name of a parameter in a state */

/* A value that goes into a state: a parameter, or what an optimizer keeps of it. */
typedef struct tt__kept { int32_t value; char name[192]; } tt__kept;

/* Fails if a state cannot hold a parameter of this name. */
static tt_status tt__check_kept(const tt_param *param)
{
    static const char *const taken[] = {"__metadata__", "tinytrain.*", "exp_avg.*", "exp_avg_sq.*",
                                        "momentum_buffer.*"};
    const char *name = param->name;
    bool usable = strlen(name) <= TT__STATE_NAME && tt__utf8_invalid(name, strlen(name)) == strlen(name);
    for (int i = 0; i < TT__COUNT(taken); i++) usable = usable && !tt__match(taken[i], name);
    if (usable) return TT_OK;
    return tt__fail(param->ctx, TT_ERR_ARGUMENT, "the state of a run cannot be saved with the parameter "
                    "'%.200s' of %zu bytes: a name must be UTF-8 of at most %d bytes, not '__metadata__', "
                    "and not begin with 'tinytrain.', 'exp_avg.', 'exp_avg_sq.' or 'momentum_buffer.'", name,
                    strlen(name), TT__STATE_NAME);
}

/* The tensors of a program's state, to be freed: parameters, then the optimizer's, named with PyTorch's words
   in front. NULL after an error. */
static tt__kept *tt__kept_of(const tt_program *p, int *count)
{
    const bool sgd = p->settings.options.optimizer.kind == TT_SGD;
    tt__kept *kept = (tt__kept *)tt__alloc(p->ctx, sizeof *kept * (size_t)(3 * p->ctx->n_params + 1));
    tt_status status = kept ? TT_OK : TT_ERR_MEMORY;
    int n = 0;
    for (int side = 0; side < 2; side++)
        for (int32_t v = 1; v < p->built.t->n_values && status == TT_OK; v++) {
            const tt__value *x = &p->built.t->values[v];
            if (x->storage != (side ? TT__STATE : TT__PARAMETER) || x->base != v || x->param < 0) continue;
            const tt_param *param = p->ctx->params[x->param];
            const tt__value *last = n ? &p->built.t->values[kept[n - 1].value] : NULL;
            const bool second = last && last->storage == TT__STATE && last->param == x->param; /* Adam's */
            const char *what = sgd ? "momentum_buffer." : second ? "exp_avg_sq." : "exp_avg.";
            status = tt__check_kept(param);
            snprintf(kept[n].name, sizeof kept[n].name, "%s%.170s", side ? what : "", param->name);
            kept[n++].value = v;
        }
    *count = n;
    if (status == TT_OK) return kept;
    tt__free(p->ctx, kept);
    return NULL;
}

/* Where sequences of the same length have their rows. */
static tt_status tt__length_rows(tt_trainer *r)
{
    const int64_t seqs = r->options.max_seqs, length = r->model.max_length;
    r->positions = (int32_t *)tt__alloc(r->ctx, sizeof(int32_t) * (size_t)seqs * (size_t)length);
    r->seq_start = (int32_t *)tt__alloc(r->ctx, sizeof(int32_t) * ((size_t)seqs + 1));
    if (!r->positions || !r->seq_start) return TT_ERR_MEMORY;
    for (int64_t k = 0; k < seqs * length; k++) r->positions[k] = (int32_t)(k % length);
    for (int64_t k = 0; k <= seqs; k++) r->seq_start[k] = (int32_t)(k * length);
    return TT_OK;
}

tt_trainer *tt_trainer_new(tt_context *ctx, const tt_model *model, const tt_train_options *options)
{
    tt_train_options o = options ? *options : tt_train_options_default();
    if (!o.precision) o.precision = "32-true";
    if (tt__check_train_options(ctx, model, &o) != TT_OK) return NULL;
    tt_trainer *r = (tt_trainer *)tt__calloc(ctx, sizeof *r);
    if (!r) return NULL;
    r->ctx = ctx;
    r->model = *model;
    r->options = o;
    r->saved_steps = -1;
    tt_tape *t = tt_tape_new(ctx);
    tt_status status = t ? tt__trainer_compile(r, t) : TT_ERR_MEMORY;
    tt_tape_free(t);
    int count = 0;
    tt__kept *kept = status == TT_OK && r->train ? tt__kept_of(r->train, &count) : NULL;
    if (status == TT_OK && r->train && !kept) status = ctx->status; /* now, not after hours of training */
    tt__free(ctx, kept);
    if (status == TT_OK && model->same_length) status = tt__length_rows(r);
    if (status == TT_OK) return r;
    tt_trainer_free(r);
    return NULL;
}

void tt_trainer_free(tt_trainer *r)
{
    if (!r) return;
    tt_program_free(r->eval);
    tt_program_free(r->train);
    tt__free(r->ctx, r->positions);
    tt__free(r->ctx, r->seq_start);
    tt__free(r->ctx, r->inputs);
    tt__free(r->ctx, r->rows);
    tt__free(r->ctx, r->needed);
    tt__free(r->ctx, r->zeros);
    tt__free(r->ctx, r);
}

const tt_program *tt_trainer_program(const tt_trainer *r) { return r->train ? r->train : r->eval; }
int64_t tt_trainer_steps(const tt_trainer *r) { return r->train ? tt_program_steps(r->train) : 0; }
int64_t tt_trainer_saved_steps(const tt_trainer *r) { return r->saved_steps; }
float tt_trainer_lr(const tt_trainer *r) { return tt_schedule_lr(&r->options.schedule, tt_trainer_steps(r)); }

static tt_status tt__must_train(const tt_trainer *r)
{
    if (r->train) return TT_OK;
    return tt__fail(r->ctx, TT_ERR_ARGUMENT,
                    "this trainer was made with train = false: it evaluates and predicts only");
}

/* The number of the input of this name; -1: the model has none. */
static int tt__input_named(const tt_trainer *r, const char *name)
{
    for (int k = 0; k < r->n_inputs; k++) if (strcmp(r->inputs[k].name, name) == 0) return k;
    return -1;
}

/* Is the batch of the model's kind, and of as many sequences as there is room for? */
static tt_status tt__check_batch(tt_trainer *r, const tt_batch *b)
{
    const int pixels = tt__input_named(r, "pixels");
    const bool same = r->model.same_length, images = pixels >= 0;
    if (!b->n_arrays && (b->seqs < 1 || (!same && r->model.max_length && b->rows < 1)))
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "the batch is empty (%d sequences, %d tokens)", b->seqs,
                        b->rows);
    if (same && b->seqs > r->options.max_seqs)
        return tt__fail(r->ctx, TT_ERR_SHAPE, "the batch has %d images, max_seqs is %d", b->seqs,
                        r->options.max_seqs);
    if (images != (b->pixels != NULL) && (b->pixels || b->ids))
        return tt__fail(r->ctx, TT_ERR_ARGUMENT,
                        images ? "the model reads images, but the batch has text"
                               : "the model reads text, but the batch has images");
    if (images && b->pixels && b->image_bytes != r->inputs[pixels].width)
        return tt__fail(r->ctx, TT_ERR_SHAPE,
                        "the images of the batch have %lld bytes (height * width * channels), those of the "
                        "model %lld", (long long)b->image_bytes, (long long)r->inputs[pixels].width);
    return TT_OK;
}

/* Sets the inputs; while predicting, to zeros where only the loss reads them. */
static tt_status tt__set_arrays(tt_trainer *r, tt_program *p, const tt_batch *b, bool predicting)
{
    const bool same = r->model.same_length;
    const int64_t rows = same ? (int64_t)b->seqs * r->model.max_length : b->rows;
    const int32_t *start = same ? r->seq_start : b->seq_start;
    const tt_array fields[] = {
        {"pixels", b->pixels, b->seqs},
        {"ids", b->ids, rows},
        {"types", b->types, rows},
        {"positions", same ? r->positions : b->positions, rows},
        {"seq_start", start, (int64_t)b->seqs + 1},
        {"first", start, b->seqs},
        {"labels", b->labels, b->seqs}};
    tt_status status = TT_OK;
    for (int k = 0; k < r->n_inputs; k++) r->rows[k] = 0;
    for (int k = 0; k < b->n_arrays + TT__COUNT(fields) && status == TT_OK; k++) {
        const tt_array *a = k < b->n_arrays ? &b->arrays[k] : &fields[k - b->n_arrays];
        const int at = tt__input_named(r, a->input);
        if (at < 0 || r->rows[at]) continue;
        const bool zeros = predicting && !r->needed[r->inputs[at].value.id];
        if (!a->data && !zeros) continue;
        r->rows[at] = a->rows;
        status = tt_set(p, r->inputs[at].value, zeros ? r->zeros : a->data, a->rows);
    }
    for (int k = 0; k < r->n_inputs && status == TT_OK; k++) {
        const tt_input_info *input = &r->inputs[k];
        if (r->rows[k] || !input->read) continue;
        if (!predicting || r->needed[input->value.id])
            return tt__fail(r->ctx, TT_ERR_ARGUMENT, "the batch has no %s (NULL)", input->name);
        int64_t as_others = 0; /* rows of an input on the same axis */
        for (int j = 0; j < r->n_inputs && input->axis; j++)
            if (r->inputs[j].axis == input->axis) as_others = tt__max(as_others, r->rows[j]);
        r->rows[k] = as_others ? as_others : input->rows;
        status = tt_set(p, input->value, r->zeros, r->rows[k]);
    }
    return status;
}

static tt_status tt__set_batch(tt_trainer *r, tt_program *p, const tt_batch *b, bool predicting)
{
    tt_status status = tt__check_batch(r, b);
    if (status != TT_OK) return status;
    status = tt__set_arrays(r, p, b, predicting);
    if (status != TT_OK) tt__forget_inputs(p); /* the next batch may have another number of rows */
    return status;
}

tt_status tt_train_batch(tt_trainer *r, const tt_batch *b, tt_stats *stats, bool *updated)
{
    float lr = tt_trainer_lr(r);
    tt_status status = tt__must_train(r);
    if (updated) *updated = false;
    if (status != TT_OK) return status;
    if (!r->options.accumulate && !b->last_of_step)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT,
                        "last_of_step is not set in the batch: a step of several micro-batches needs a "
                        "trainer made with accumulate = true");
    const bool accumulates = r->options.accumulate;
    if (r->step_failed)
        status = tt__fail(r->ctx, TT_ERR_ARGUMENT, "an earlier micro-batch of this step failed: its others "
                          "are refused, up to the last, and nothing is updated");
    if (status == TT_OK) status = tt__set_batch(r, r->train, b, false);
    if (status == TT_OK) status = accumulates ? tt_micro_step(r->train, stats) : tt_step(r->train, lr, stats);
    if (status == TT_OK && accumulates && b->last_of_step) status = tt_update(r->train, lr, stats);
    if (status != TT_OK) tt__discard_step(r->train);
    r->step_failed = status != TT_OK && !b->last_of_step;
    if (updated) *updated = status == TT_OK && b->last_of_step;
    return status;
}

tt_status tt_evaluate_batch(tt_trainer *r, const tt_batch *b, tt_stats *stats)
{
    tt_stats s;
    tt_status status = tt__set_batch(r, r->eval, b, false);
    if (status == TT_OK) status = tt_run(r->eval, &s);
    if (status != TT_OK) return status;
    double targets = stats->targets + s.targets;
    if (targets > 0) stats->loss = (stats->loss * stats->targets + s.loss * s.targets) / targets;
    stats->targets = targets;
    stats->correct += s.correct;
    stats->flops += s.flops;
    stats->step = tt_trainer_steps(r);
    return TT_OK;
}

/* Has the trainer room for all of a source? Asked before the first micro-batch: a large one may come late. */
static tt_status tt__source_fits(const tt_trainer *r, const tt_source *s, const char *what)
{
    const tt_train_options *o = &r->options;
    if (!s || !s->seek || !s->next || s->steps < 1)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "the source %s %s", what, !s ? "is NULL" :
                        s->seek && s->next ? "has tt_source.steps < 1: count the steps of an epoch" :
                        "needs the functions `seek` and `next`");
    bool tokens_fit = r->model.same_length || s->max_tokens <= o->max_tokens;
    if (tokens_fit && s->max_seqs <= o->max_seqs) return TT_OK;
    return tt__fail(r->ctx, TT_ERR_SHAPE, "micro-batches %s have up to %d sequences and %d tokens, and the "
                    "trainer has max_seqs = %d and max_tokens = %d: make it for the largest of all its "
                    "sources (tt_train_options_make_room)", what, s->max_seqs, s->max_tokens, o->max_seqs,
                    o->max_tokens);
}

/* What a function of the caller's returned, before which ctx->error was emptied: an error gets a sentence
   where the function left none. */
static tt_status tt__returned(tt_context *ctx, tt_status status, const char *what, int64_t epoch,
                              int64_t step)
{
    if (status == TT_OK || ctx->error[0]) return status;
    return tt__fail(ctx, status, "epoch %lld, step %lld: %s failed (%s)", (long long)epoch + 1,
                    (long long)step + 1, what, tt_status_name(status));
}

/* Gets the next micro-batch, which is of this step if there is one. b NULL: goes to the step instead. */
static tt_status tt__from_source(tt_context *ctx, const tt_source *s, int64_t epoch, int64_t step,
                                 tt_batch *b, bool *more)
{
    if (b) memset(b, 0, sizeof *b);
    ctx->error[0] = 0;
    tt_status status = b ? s->next(s->self, b, more) : s->seek(s->self, epoch, step);
    status = tt__returned(ctx, status, "the source", epoch, step);
    if (status != TT_OK || !b || !*more || step < s->steps) return status;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "epoch %lld: the source gives a step %lld, and has tt_source.steps "
                    "= %lld", (long long)epoch + 1, (long long)step + 1, (long long)s->steps);
}

/* What the unit of the model counts. */
static int tt__items(const tt_batch *b) { return b->rows ? b->rows : b->seqs; }

/* Adds epoch 0 of the source up; stops early where *stop is not 0. */
static tt_status tt__evaluate(tt_trainer *r, const tt_source *source, const volatile int *stop,
                              tt_stats *stats, double *items)
{
    tt_batch b;
    bool more = true;
    int64_t step = 0;
    memset(stats, 0, sizeof *stats);
    tt_status status = tt__from_source(r->ctx, source, 0, 0, NULL, NULL);
    while (status == TT_OK && !(stop && *stop)) {
        status = tt__from_source(r->ctx, source, 0, step, &b, &more);
        if (status != TT_OK || !more) break;
        status = tt_evaluate_batch(r, &b, stats);
        *items += tt__items(&b);
        step += b.last_of_step;
    }
    if (status != TT_OK || (stop && *stop) || stats->targets > 0) return status;
    return tt__fail(r->ctx, TT_ERR_ARGUMENT, "the source to evaluate gives no target that counts");
}

tt_status tt_evaluate(tt_trainer *r, const tt_source *source, tt_stats *stats)
{
    double items = 0;
    memset(stats, 0, sizeof *stats);
    tt_status status = tt__source_fits(r, source, "to evaluate");
    return status == TT_OK ? tt__evaluate(r, source, NULL, stats, &items) : status;
}

tt_status tt_forward(tt_trainer *r, const tt_batch *b, float *to, size_t capacity)
{
    if (!r->output.id)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "the model gives no output: its `record` set none");
    tt_status status = tt__set_batch(r, r->eval, b, true);
    if (status == TT_OK) status = tt_run(r->eval, NULL);
    return status == TT_OK ? tt_get(r->eval, r->output, to, capacity) : status;
}

tt_status tt_predict(tt_trainer *r, const tt_batch *b, float *probabilities)
{
    int classes = r->model.classes;
    if (!classes)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT,
                        "tt_predict needs a model with classes; tt_forward gives any output");
    tt_status status = tt_forward(r, b, probabilities, (size_t)b->seqs * (size_t)classes);
    for (int s = 0; s < b->seqs && status == TT_OK; s++) {
        float *x = probabilities + (size_t)s * (size_t)classes, most = x[0];
        double sum = 0;
        for (int c = 1; c < classes; c++) most = x[c] > most ? x[c] : most;
        for (int c = 0; c < classes; c++) sum += x[c] = expf(x[c] - most);
        if (!isfinite(sum)) {
            const char *bad = tt__bad_parameter(r->eval);
            return tt__fail(r->ctx, TT_ERR_NUMERIC, "the prediction for sequence %d is not finite%s%s%s", s,
                            bad ? ": parameter '" : "", bad ? bad : "",
                            bad ? "' has a number that is not" : "");
        }
        for (int c = 0; c < classes; c++) x[c] = (float)(x[c] / sum);
    }
    return status;
}

tt_status tt_predict_text(tt_trainer *r, const tt_tokenizer *k, const char *text, float *probabilities)
{
    int most = (int)tt__min(r->model.max_length, r->options.max_tokens);
    int32_t *ids = (int32_t *)tt__calloc(r->ctx, sizeof *ids * 3 * (size_t)most), start[2] = {0, 0};
    tt_batch b;
    memset(&b, 0, sizeof b);
    if (!ids) return TT_ERR_MEMORY;
    b.seqs = 1;
    b.rows = start[1] = tt_tokenize(k, text, strlen(text), ids, most);
    for (int32_t row = 0; row < b.rows; row++) ids[most + row] = row;
    b.ids = ids;
    b.positions = ids + most;
    b.types = ids + 2 * most;
    b.seq_start = start;
    tt_status status = tt_predict(r, &b, probabilities);
    tt__free(r->ctx, ids);
    return status;
}

/* -------------------------------------------------------------------------------------------------- state */

/* The state of a program, to be written or read: first the header, last what a trainer adds. */
typedef struct tt__state {
    tt_program *p;
    const char *path;
    tt__kept *kept;       /* (count) */
    tt_tensor_info *info; /* (tensors) */
    int count, tensors;
    tt__state_header header;
    tt_safetensors *file; /* that is read */
} tt__state;

static void tt__state_close(tt__state *s)
{
    tt__free(s->p->ctx, s->kept);
    tt__free(s->p->ctx, s->info);
    tt_safetensors_close(s->file);
}

static void tt__state_integers(tt_tensor_info *info, const char *name, size_t bytes)
{
    info->name = name;
    info->dtype = "I64";
    info->ndim = 1;
    info->bytes = bytes;
    info->dims[0] = (int64_t)bytes / 8;
}

/* Lists what the program's state has. `more`: bytes of the tensor "tinytrain.progress"; 0: it has none. */
static tt_status tt__state_list(tt__state *s, tt_program *p, const char *path, size_t more)
{
    tt_context *ctx = p->ctx;
    memset(s, 0, sizeof *s);
    s->p = p;
    s->path = path;
    if (!p->settings.options.train)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "this program does not train: it has no state to save or load");
    if (!(s->kept = tt__kept_of(p, &s->count))) return ctx->status;
    s->info = (tt_tensor_info *)tt__calloc(ctx, sizeof *s->info * (size_t)(s->count + 2));
    tt_status status = s->info ? tt_allocate(p) : TT_ERR_MEMORY;
    if (status == TT_OK) status = tt__zero_states(p);
    if (status != TT_OK) return status;
    s->tensors = 1 + s->count + (more > 0);
    tt__state_integers(&s->info[0], "tinytrain.run", sizeof s->header);
    for (int k = 0; k < s->count; k++) {
        const tt__value *x = &p->built.t->values[s->kept[k].value];
        const tt_param *param = ctx->params[x->param];
        tt_tensor_info *info = &s->info[k + 1];
        info->name = s->kept[k].name;
        info->dtype = tt__safetensors_dtype(x->shape.dtype);
        info->ndim = param->ndim;
        memcpy(info->dims, param->dims, sizeof param->dims);
        info->bytes = (size_t)param->size * tt_dtype_bytes(x->shape.dtype);
    }
    if (more) tt__state_integers(&s->info[s->count + 1], "tinytrain.progress", more);
    return TT_OK;
}

/* Moves the tensors of the state in pieces: to a file that is written or, w NULL, from one that is read. */
static tt_status tt__state_move(const tt__state *s, tt_safetensors_writer *w)
{
    const tt_program *p = s->p;
    tt_status status = TT_OK;
    for (int k = 0; k < s->count; k++) {
        const int tensor = w ? -1 : tt_safetensors_find(s->file, s->kept[k].name);
        const size_t bytes = s->info[k + 1].bytes;
        char *at = (char *)tt__resolve(p, s->kept[k].value).data, piece[16384];
        for (size_t done = 0, n; done < bytes && status == TT_OK; done += n, at += n) {
            n = bytes - done < sizeof piece ? bytes - done : sizeof piece;
            if (w) status = tt__read_memory(p->ctx, p->arena, piece, TT_U8, at, TT_U8, n);
            else status = tt_safetensors_read(s->file, tensor, done, n, piece);
            if (status != TT_OK) continue;
            if (w) status = tt_safetensors_write(w, piece, n);
            else status = tt__write_memory(p->ctx, p->arena, at, TT_U8, piece, TT_U8, n);
        }
    }
    return status;
}

/* Writes the state, and `more` bytes of a trainer's progress. */
static tt_status tt__state_save(tt_program *p, const char *path, const void *progress, size_t more)
{
    tt__state s;
    tt_safetensors_writer *w = NULL;
    const tt__state_header h = tt__state_header_of(p);
    tt_status status = tt__state_list(&s, p, path, more);
    if (status == TT_OK && tt__within_step(p))
        status = tt__fail(p->ctx, TT_ERR_ARGUMENT, "the state can be saved between steps, not between the "
                          "micro-batches of one");
    if (status == TT_OK) w = tt_safetensors_begin(p->ctx, path, s.info, s.tensors, NULL);
    if (status == TT_OK) status = w ? tt_safetensors_write(w, &h, sizeof h) : p->ctx->status;
    if (status == TT_OK) status = tt__state_move(&s, w);
    if (status == TT_OK && more) status = tt_safetensors_write(w, progress, more);
    status = tt__safetensors_end(w, status);
    tt__state_close(&s);
    return status;
}

/* Checks that the file has a tensor as expected. */
static tt_status tt__state_has(const tt__state *s, const tt_tensor_info *expected)
{
    int k = tt_safetensors_find(s->file, expected->name);
    if (k < 0)
        return tt__fail(s->p->ctx, TT_ERR_FORMAT, "'%s' has no tensor '%s': it is no state of this model and "
                        "optimizer", s->path, expected->name);
    const tt_tensor_info *found = tt_safetensors_info(s->file, k);
    bool same = found->ndim == expected->ndim && strcmp(found->dtype, expected->dtype) == 0;
    for (int d = 0; d < expected->ndim && same; d++) same = found->dims[d] == expected->dims[d];
    if (same) return TT_OK;
    return tt__fail(s->p->ctx, TT_ERR_FORMAT, "'%s': tensor '%s' is %s of %zu bytes, this run has %s of %zu: "
                    "the model or the precision differs", s->path, expected->name, found->dtype, found->bytes,
                    expected->dtype, expected->bytes);
}

/* Reads the header and checks that it is of this program. */
static tt_status tt__state_check_header(tt__state *s)
{
    tt_context *ctx = s->p->ctx;
    tt__state_header *h = &s->header;
    const tt__state_header own = tt__state_header_of(s->p);
    const int at = tt_safetensors_find(s->file, s->info[0].name);
    int64_t version = TT__STATE_VERSION;
    tt_status status = TT_OK;
    if (at >= 0 && tt_safetensors_info(s->file, at)->bytes >= sizeof version)
        status = tt_safetensors_read(s->file, at, 0, sizeof version, &version);
    if (version != TT__STATE_VERSION) /* whose header has another size */
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' is a state of version %lld, this build reads %d; the "
                        "tinytrain.h that wrote it can go on with it", s->path, (long long)version,
                        TT__STATE_VERSION);
    if (status == TT_OK) status = tt__state_has(s, &s->info[0]);
    if (status == TT_OK) status = tt_safetensors_read(s->file, at, 0, sizeof *h, h);
    if (status != TT_OK) return status;
    const bool scales = tt__is_power_of_two(h->loss_scale, 1, TT__LOSS_SCALE_MOST);
    if (h->step < 0 || h->step > TT__MOST_STEPS)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' says that %lld steps were done", s->path,
                        (long long)h->step);
    if (!scales || h->good_steps < 0 || h->good_steps > TT__MOST_STEPS || h->skipped < 0 ||
        h->skipped > TT__MOST_STEPS)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' says that %lld steps were skipped, and %lld done with loss "
                        "scale %g", s->path, (long long)h->skipped, (long long)h->good_steps, h->loss_scale);
    if (h->seed != own.seed)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' was made with seed %llu, this run has %llu: open the "
                        "context with the same seed", s->path, (unsigned long long)h->seed,
                        (unsigned long long)own.seed);
    if (h->optimizer != own.optimizer)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' was made with another optimizer", s->path);
    if (h->precision != own.precision)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' was made with another precision than '%s'", s->path,
                        tt__precision_names[own.precision]);
    return TT_OK;
}

/* Opens a state and checks that all of it fits the program; tt__state_take then takes it over. */
static tt_status tt__state_open(tt__state *s, tt_program *p, const char *path, size_t more)
{
    tt_safetensors *file = tt_safetensors_open(p->ctx, path);
    memset(s, 0, sizeof *s);
    s->p = p;
    if (!file) return p->ctx->status;
    tt_status status = tt__state_list(s, p, path, more);
    s->file = file;
    if (status == TT_OK) status = tt__state_check_header(s);
    for (int k = 1; k < s->tensors && status == TT_OK; k++) status = tt__state_has(s, &s->info[k]);
    if (status != TT_OK) return status;
    /* A trainer's state is one of its program too. */
    int found = tt_safetensors_count(file) - (!more && tt_safetensors_find(file, "tinytrain.progress") >= 0);
    if (found == s->tensors) return TT_OK;
    return tt__fail(p->ctx, TT_ERR_FORMAT, "'%s' has %d tensors, this run has %d: other parameters are "
                    "trained", path, found, s->tensors);
}

static tt_status tt__state_take(tt__state *s)
{
    const tt__state_header *h = &s->header;
    tt_program *p = s->p;
    tt_status status = tt__state_move(s, NULL);
    if (status != TT_OK) return status;
    p->rank.run.step = h->step;
    p->rank.run.micro = 0; /* the next micro-batch is the first of a step */
    p->results.scale.scale = h->loss_scale;
    p->results.scale.good_steps = (double)h->good_steps;
    p->results.scale.skipped = (double)h->skipped;
    p->rank.scale_set = false;
    if (tt__state_header_of(p).program != h->program)
        tt__log(s->p->ctx, TT_LOG_WARNING, "resume", "'%s' was made with other options of the model, the "
                "optimizer or the batches (dropout, weight decay, max_tokens, ...): the run goes on with the "
                "new ones, and differs from one that was never stopped", s->path);
    return TT_OK;
}

tt_status tt_program_save(tt_program *p, const char *path) { return tt__state_save(p, path, NULL, 0); }

tt_status tt_program_load(tt_program *p, const char *path)
{
    tt__state s;
    tt_status status = tt__state_open(&s, p, path, 0);
    if (status == TT_OK) status = tt__state_take(&s);
    tt__state_close(&s);
    return status;
}

typedef struct tt__state_progress { /* the tensor "tinytrain.progress": all of 8 bytes, as I64 */
    tt_progress progress;
    int64_t schedule, warmup_steps, total_steps;
    double lr, min_lr;
} tt__state_progress;

static tt__state_progress tt__state_progress_of(const tt_progress *p, const tt_schedule *s)
{
    tt__state_progress h = {*p, (int64_t)s->kind, s->warmup_steps, s->total_steps, s->lr, s->min_lr};
    return h;
}

tt_status tt_trainer_save(tt_trainer *r, const char *path, const tt_progress *progress)
{
    tt_progress none;
    tt_status status = tt__must_train(r);
    if (status != TT_OK) return status;
    memset(&none, 0, sizeof none);
    const tt__state_progress h = tt__state_progress_of(progress ? progress : &none, &r->options.schedule);
    status = tt__state_save(r->train, path, &h, sizeof h);
    if (status == TT_OK) r->saved_steps = tt_trainer_steps(r);
    return status;
}

/* What a trainer adds to a state; *to changes if it is in order. */
static tt_status tt__state_read_progress(const tt__state *s, const tt_schedule *schedule, tt_progress *to)
{
    tt__state_progress h;
    const int at = tt_safetensors_find(s->file, "tinytrain.progress");
    tt_status status = tt_safetensors_read(s->file, at, 0, sizeof h, &h);
    if (status != TT_OK) return status;
    const tt_progress *p = &h.progress;
    if (!(p->targets >= 0 && p->correct >= 0 && p->best >= -INFINITY)) /* so that NaN is none */
        return tt__fail(s->p->ctx, TT_ERR_FORMAT, "'%s' says that %g of %g targets were right, and a metric "
                        "of %g at best", s->path, p->correct, p->targets, p->best);
    const tt__state_progress now = tt__state_progress_of(p, schedule);
    if (memcmp(&now, &h, sizeof h) != 0)
        tt__log(s->p->ctx, TT_LOG_WARNING, "resume",
                "'%s' was made with another schedule (learning rate %g, %lld steps, now %g, %lld): the run "
                "goes on with the new one, and differs from one that was never stopped", s->path, h.lr,
                (long long)h.total_steps, (double)schedule->lr, (long long)schedule->total_steps);
    *to = *p;
    return TT_OK;
}

tt_status tt_trainer_load(tt_trainer *r, const char *path, tt_progress *progress)
{
    tt__state s;
    tt_progress read;
    tt_status status = tt__must_train(r);
    if (status != TT_OK) return status;
    status = tt__state_open(&s, r->train, path, sizeof(tt__state_progress));
    if (status == TT_OK) status = tt__state_read_progress(&s, &r->options.schedule, &read);
    if (status == TT_OK) status = tt__state_take(&s);
    if (status == TT_OK) {
        if (progress) *progress = read;
        r->saved_steps = tt_trainer_steps(r);
        r->step_failed = false;
    }
    tt__state_close(&s);
    return status;
}

/* ---------------------------------------------------------------------------------------------------- fit */

/* A line of metrics.csv. A value that is not a finite float is NaN. */
typedef enum tt__fit_value { TT__FIT_LOSS, TT__FIT_METRIC, TT__FIT_LR, TT__FIT_VALUES } tt__fit_value;
typedef struct tt__fit_point {
    int64_t step, epoch;
    double value[TT__FIT_VALUES];
    bool validation;
} tt__fit_point;

typedef struct tt__fit {
    tt_trainer *r;
    const tt_source *train, *validation;
    tt_metric metric;            /* of the model */
    const char *unit;            /* of the model */
    bool best_by_metric;         /* this, and not the loss, tells the best validation */
    tt_fit_options o;
    tt_progress p;
    int64_t steps, first_step;   /* of an epoch; done when tt_fit began */
    double started, saved;       /* seconds on the clock; `started` moves on by what validation takes */
    double items, flops, peak;   /* since tt_fit began; the machine's */
    size_t bytes;                /* of the arena */
    char state[TT__PATH];
    bool has_state;              /* the folder holds a state of this run */
    bool told_short;             /* the logger knows that an epoch had fewer steps */
    char *csv;                   /* metrics.csv so far */
    size_t csv_bytes, csv_room;
    tt__fit_point *point;
    int points, cap_points;
} tt__fit;

tt_fit_options tt_fit_options_default(void)
{
    tt_fit_options o;
    memset(&o, 0, sizeof o);
    o.epochs = 1;
    o.save_seconds = 300;
    return o;
}

size_t tt_fit_text(const tt_fit_event *e, char *to, size_t capacity)
{
    tt__text text = {to, capacity, 0};
    if (e->validation) {
        tt__print(&text, "  validation: loss %.4f", e->validation->loss);
        if (e->metric_name) tt__print(&text, ", %s %.4f", e->metric_name, e->metric);
        tt__print(&text, "%s", e->best ? ", kept" : "");
        return text.length;
    }
    tt__print(&text, "epoch %lld/%lld [", (long long)e->epoch + 1, (long long)e->epochs);
    for (int k = 1; k <= 20; k++) tt__print(&text, "%c", k * e->steps <= 20 * e->step ? '#' : '.');
    tt__print(&text, "] %lld/%lld  loss %.4f", (long long)e->step, (long long)e->steps, e->loss);
    if (e->metric_name) tt__print(&text, "  %s %.3f", e->metric_name, e->metric);
    tt__print(&text, "  %.0f %s/s", e->per_second, e->unit);
    if (e->of_peak > 0) tt__print(&text, "  %.0f%% of peak", 100 * e->of_peak);
    int left = (int)fmin(fmax(e->seconds_left, 0), 1e9);
    tt__print(&text, "  ETA %d:%02d", left / 60, left % 60);
    return text.length;
}

static bool tt__fit_stopped(const tt__fit *f) { return f->o.stop && *f->o.stop; }

/* Reads a line of n characters; false where it is none of metrics.csv, as its heading. */
static bool tt__fit_read_line(const tt__fit *f, const char *line, size_t n, tt__fit_point *point)
{
    char field[3 + TT__FIT_VALUES][40];
    const char *end = line + n;
    for (int k = 0; k < TT__COUNT(field); k++) {
        const bool absent = k == 3 + TT__FIT_METRIC && !f->metric.name;
        const char *comma = absent ? line - 1 : (const char *)memchr(line, ',', (size_t)(end - line));
        const size_t length = absent ? 0 : comma ? (size_t)(comma - line) : sizeof field[k];
        if (length >= sizeof field[k]) return false;
        memcpy(field[k], line, length);
        field[k][length] = 0;
        line = comma + 1;
    }
    point->step = strtoll(field[0], NULL, 10);
    point->epoch = strtoll(field[1], NULL, 10);
    point->validation = strcmp(field[2], "validation") == 0;
    for (int k = 0; k < TT__FIT_VALUES; k++) {
        double value = tt__json_double(field[3 + k], strlen(field[3 + k]));
        point->value[k] = fabs(value) <= FLT_MAX ? value : NAN;
    }
    return point->step >= 0 && point->epoch >= 1;
}

/* Adds a line to the metrics, and what it says to the picture. */
static tt_status tt__fit_line(tt__fit *f, const char *line, size_t n)
{
    tt_context *ctx = f->r->ctx;
    tt__fit_point point;
    if (f->csv_bytes + n + 1 > f->csv_room) {
        const size_t room = 2 * (f->csv_bytes + n) + 4096;
        char *more = (char *)tt__realloc(ctx, f->csv, room);
        if (!more) return TT_ERR_MEMORY;
        f->csv = more;
        f->csv_room = room;
    }
    memcpy(f->csv + f->csv_bytes, line, n);
    f->csv[f->csv_bytes += n] = 0;
    if (!tt__fit_read_line(f, line, n, &point)) return TT_OK;
    if (!TT__GROW(ctx, f->point, f->points, f->cap_points)) return TT_ERR_MEMORY;
    f->point[f->points++] = point;
    return TT_OK;
}

static size_t tt__fit_heading(const tt__fit *f, char to[160])
{
    const char *metric = f->metric.name;
    tt__text text = {to, 160, 0};
    tt__print(&text,
              "step,epoch,split,loss,%s%slr,grad_norm,loss_scale,skipped,bytes,seconds,%s_per_second\n",
              metric ? metric : "", metric ? "," : "", f->unit);
    return text.length;
}

static const char *tt__fit_number(double x, char to[32])
{
    if (fabs(x) <= FLT_MAX) return tt__json_float((float)x, to);
    return isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
}

/* lr: of the step; items: that it, or the validation, has read, in so many seconds. */
static tt_status tt__fit_metrics(tt__fit *f, const tt_stats *s, bool validation, float lr, double items,
                                 double seconds)
{
    char line[384], number[7][32];
    tt__text text = {line, sizeof line, 0};
    tt__print(&text, "%lld,%lld,%s,%s,", (long long)s->step, (long long)f->p.epoch + 1,
              validation ? "validation" : "train", tt__fit_number(s->loss, number[0]));
    if (f->metric.name) tt__print(&text, "%s,", tt__fit_number(f->metric.of(s), number[1]));
    if (validation) tt__print(&text, ",,,,");
    else
        tt__print(&text, "%s,%s,%s,%lld,", tt__fit_number(lr, number[2]),
                  tt__fit_number(s->grad_norm, number[3]), tt__fit_number(s->loss_scale, number[4]),
                  (long long)s->skipped);
    tt__print(&text, "%zu,%s,%s\n", f->bytes, tt__fit_number(seconds, number[5]),
              tt__fit_number(seconds > 0 ? items / seconds : 0, number[6]));
    return tt__fit_line(f, line, text.length);
}

/* The metrics of the run that is resumed, up to where its state stands: lines of epochs that are over, and of
   the one at hand those of the steps that the state has. */
static tt_status tt__fit_read_metrics(tt__fit *f)
{
    char path[TT__PATH];
    tt__file_bytes file;
    bool there = false;
    int64_t steps = 0;
    char heading[160];
    size_t length = tt__fit_heading(f, heading);
    tt__fit_point point;
    tt_status status = tt__path_join(f->r->ctx, path, f->o.folder, "metrics.csv");
    if (status == TT_OK) status = tt__folder_has(f->r->ctx, f->o.folder, "metrics.csv", &there);
    if (there) status = tt__file_open(f->r->ctx, path, &file);
    if (status != TT_OK || !there) return status;
    if (strncmp(file.bytes, heading, length) != 0)
        status = tt__fail(f->r->ctx, TT_ERR_FORMAT, "'%s' has other columns than this run writes, %.*s: move "
                          "it away, and the run goes on without its lines", path, (int)length - 1, heading);
    const char *line = file.bytes, *end;
    for (; status == TT_OK && (end = strchr(line, '\n')) != NULL; line = end + 1) {
        size_t n = (size_t)(end + 1 - line);
        if (!tt__fit_read_line(f, line, n, &point)) continue;
        bool over = point.epoch <= f->p.epoch, at_hand = point.epoch == f->p.epoch + 1 && !point.validation;
        if (over || (at_hand && steps++ < f->p.step)) status = tt__fit_line(f, line, n);
    }
    tt__file_close(f->r->ctx, &file);
    return status;
}

/* ---- loss.svg: panels of loss, metric and learning rate over the steps ---- */

enum { TT__FIT_LEFT = 72, TT__FIT_WIDTH = 690 }; /* pixels of the margin for labels, and of a panel */

/* An axis upwards, of values or of their decimal logarithms, with ticks at (first + k) * step. */
typedef struct tt__fit_axis {
    bool logarithmic;
    double from, to, step, first;
    int height; /* pixels */
} tt__fit_axis;

/* A line through values of training or of validation, as they are (decay 0) or their running mean. */
typedef struct tt__fit_series {
    tt__fit_value value;
    bool validation;
    double decay, sum, weight;
} tt__fit_series;

/* What the series has at point k; false where that is nothing. */
static bool tt__fit_at(const tt__fit *f, tt__fit_series *s, int k, double *value)
{
    const tt__fit_point *p = &f->point[k];
    if (p->validation != s->validation || isnan(p->value[s->value])) return false;
    s->sum = s->decay * s->sum + p->value[s->value];
    s->weight = s->decay * s->weight + 1;
    *value = s->sum / s->weight;
    return true;
}

/* An axis that holds low..high: from 0, unless these are close, and of logarithms if they are far apart. */
static tt__fit_axis tt__fit_axis_of(double low, double high, bool may_be_logarithmic, int height)
{
    tt__fit_axis a = {may_be_logarithmic && low > 0 && high > 1000 * low, 0, 0, 0, 0, height};
    if (a.logarithmic) {
        low = log10(low);
        high = log10(high);
    } else {
        bool narrow = high - low < 0.25 * high && high - low > 1e-4 * high;
        if (low > 0 && !narrow) low = 0;
        if (!(high > low)) high = low + 1;
    }
    a.step = tt__axis_step(high - low, height / 24);
    if (a.logarithmic && a.step < 1) a.step = 1;
    a.first = floor(low / a.step + 1e-6);
    a.from = a.first * a.step;
    a.to = ceil(high / a.step - 1e-6) * a.step;
    return a;
}

/* In tenths of a pixel above the axis's start. Values outside of the axis end up outside of the panel, where
   they are cut off, at most its height away. */
static int tt__fit_y(const tt__fit_axis *a, double value)
{
    double y = a->logarithmic ? (value > 0 ? log10(value) : a->from) : value;
    y = (y - a->from) / (a->to - a->from);
    return (int)floor(10 * a->height * fmin(fmax(y, -1), 2) + 0.5);
}

static int tt__fit_x(int64_t step, int64_t last)
{
    return (int)((double)(10 * TT__FIT_WIDTH) * ((double)step / (double)last) + 0.5);
}

/* Draws a series as a line. Of the points that share a pixel of width, the lowest and the highest are drawn,
   so that the file stays small with any number of steps. A series of one point is a dot. */
static void tt__fit_line_of(tt__text *svg, const tt__fit *f, tt__fit_series s, const tt__fit_axis *a,
                            int64_t last, const char *colour, int width)
{
    int x = -1, low = 0, high = 0, before = 0;
    bool begun = false;
    double value;
    tt__print(svg, "<path clip-path='url(#p%d)' stroke='%s' stroke-width='%d' d='", (int)s.value, colour,
              width);
    for (int k = 0; k <= f->points; k++) {
        const bool end = k == f->points;
        if (!end && !tt__fit_at(f, &s, k, &value)) continue;
        const int at = end ? -1 : tt__fit_x(f->point[k].step, last), y = end ? 0 : tt__fit_y(a, value);
        if (x >= 0 && at / 10 == x / 10 && !end) {
            low = y < low ? y : low;
            high = y > high ? y : high;
            continue;
        }
        if (x >= 0) {
            bool rises = abs(before - low) <= abs(before - high);
            tt__print(svg, begun ? "L%d %d" : "M%d %dh0", x, rises ? low : high);
            if (low != high) tt__print(svg, "L%d %d", x, rises ? high : low);
            before = rises ? high : low;
            begun = true;
        }
        x = at;
        low = high = y;
    }
    tt__print(svg, "'/>\n");
}

/* Dots at the values of validation, 12 pixels apart at least. */
static void tt__fit_dots(tt__text *svg, const tt__fit *f, tt__fit_series s, const tt__fit_axis *a,
                         int64_t last)
{
    int x = -120;
    double y;
    tt__print(svg, "<path stroke='#d62728' stroke-width='65' d='");
    for (int k = 0; k < f->points; k++) {
        if (!tt__fit_at(f, &s, k, &y) || tt__fit_x(f->point[k].step, last) - x < 120) continue;
        x = tt__fit_x(f->point[k].step, last);
        tt__print(svg, "M%d %dh0", x, tt__fit_y(a, y));
    }
    tt__print(svg, "'/>\n");
}

enum { TT__FIT_EPOCHS = 16 };

/* The ends of epochs that get a mark and a number: of round numbers, and not too close to each other. Fills x
   with their places, in tenths of a pixel, and number; returns how many. */
static int tt__fit_epochs(const tt__fit *f, int64_t last, int x[TT__FIT_EPOCHS],
                          int64_t number[TT__FIT_EPOCHS])
{
    int n = 0;
    int64_t epochs = f->points ? f->point[f->points - 1].epoch : 1;
    int64_t every = tt__max(1, (int64_t)tt__axis_step((double)epochs, 12));
    for (int k = 0; k < f->points && n < TT__FIT_EPOCHS; k++) {
        bool over = k + 1 < f->points ? f->point[k + 1].epoch > f->point[k].epoch : f->p.step == 0;
        int at = tt__fit_x(f->point[k].step, last);
        if (!over || f->point[k].epoch % every != 0 || at - (n ? x[n - 1] : -TT__FIT_LEFT) < 250) continue;
        x[n] = at;
        number[n++] = f->point[k].epoch;
    }
    return n;
}

static void tt__fit_panel(tt__text *svg, const tt__fit *f, tt__fit_value value, int top, int height,
                          int64_t last)
{
    char metric[32];
    const char *title = value == TT__FIT_LOSS ? "Loss" : value == TT__FIT_LR ? "Learning rate" : metric;
    snprintf(metric, sizeof metric, "%s", f->metric.name ? f->metric.name : "");
    if (metric[0] >= 'a' && metric[0] <= 'z') metric[0] = (char)(metric[0] - 'a' + 'A');
    const bool has_validation = value != TT__FIT_LR;
    const tt__fit_series each = {value, false, 0, 0, 0}, validation = {value, true, 0, 0, 0};
    const tt__fit_series mean = {value, false, has_validation ? exp(-50 / fmax(f->points, 50)) : 0, 0, 0};
    const int64_t x_step = tt__max(1, (int64_t)tt__axis_step((double)last, 8));
    double low = INFINITY, high = -INFINITY, highest = -INFINITY, y;
    int ends[TT__FIT_EPOCHS], epochs, steps = 0;
    int64_t number[TT__FIT_EPOCHS];
    char label[32];
    for (int side = 0; side <= (int)has_validation; side++) {
        tt__fit_series s = side ? validation : mean;
        for (int k = 0; k < f->points; k++) {
            if (!tt__fit_at(f, &s, k, &y)) continue;
            low = fmin(low, y);
            high = fmax(high, y);
            if (side) continue;
            highest = fmax(highest, f->point[k].value[value]);
            steps++;
        }
    }
    if (value == TT__FIT_LOSS)
        high = fmax(high, fmin(highest, 1.5 * high)); /* single steps may be cut off, the others are not */
    if (!(low <= high)) low = 0, high = 1;
    const tt__fit_axis a = tt__fit_axis_of(low, high, value == TT__FIT_LOSS, height);
    tt__print(svg, "<text x='%d' y='%d' font-weight='bold'>%s%s</text>\n<g text-anchor='end' fill='#555'>",
              TT__FIT_LEFT, top - 10, title, a.logarithmic ? " (logarithmic)" : "");
    const int ticks = (int)fmin((a.to - a.from) / a.step + 1.5, 40);
    for (int k = 0; k < ticks; k++) {
        const double tick = (a.first + k) * a.step, at = a.logarithmic ? pow(10, tick) : tick;
        const int up = (int)(height * (tick - a.from) / (a.to - a.from) + 0.5);
        if (fabs(at) > FLT_MAX) continue;
        tt__print(svg, "<text x='%d' y='%d'>%s</text>", TT__FIT_LEFT - 8, top + 4 + height - up,
                  tt__json_float((float)at, label));
    }
    /* From here on in tenths of a pixel from the panel's lower left corner, upwards. */
    tt__print(svg,
              "</g>\n<clipPath id='p%d'><rect x='-30' y='-30' width='%d' height='%d'/></clipPath>\n"
              "<g transform='translate(%d %d) scale(.1 -.1)' fill='none' stroke-width='10' "
              "stroke-linecap='round' stroke-linejoin='round'>\n<path stroke='#e4e4e4' d='",
              (int)value, 10 * TT__FIT_WIDTH + 60, 10 * height + 60, TT__FIT_LEFT, top + height);
    for (int k = 1; k < ticks; k++) {
        const double tick = (a.first + k) * a.step;
        tt__print(svg, "M0 %dh%d", tt__fit_y(&a, a.logarithmic ? pow(10, tick) : tick), 10 * TT__FIT_WIDTH);
    }
    for (int64_t k = 1; k <= last / x_step; k++)
        tt__print(svg, "M%d 0v%d", tt__fit_x(k * x_step, last), 10 * height);
    tt__print(svg, "'/>\n<path stroke='#aaa' stroke-dasharray='20 40' d='");
    epochs = tt__fit_epochs(f, last, ends, number);
    for (int k = 0; k < epochs; k++) tt__print(svg, "M%d 0v%d", ends[k], 10 * height);
    tt__print(svg, "'/>\n<path stroke='#555' d='M0 %dV0H%d'/>\n", 10 * height, 10 * TT__FIT_WIDTH);
    if (value == TT__FIT_LOSS) tt__fit_line_of(svg, f, each, &a, last, "#aec7e8", 8);
    tt__fit_line_of(svg, f, mean, &a, last, "#1f77b4", steps == 1 ? 50 : 18);
    if (has_validation) tt__fit_line_of(svg, f, validation, &a, last, "#d62728", 14);
    if (has_validation) tt__fit_dots(svg, f, validation, &a, last);
    tt__print(svg, "</g>\n");
}

/* Of any number of steps, and at most about 100 KB. */
static void tt__fit_draw(tt__text *svg, const void *arg)
{
    enum { LOSS = 40, METRIC = 316, PANEL = 168 }; /* pixels from the upper edge; of the metric's panel */
    enum { LEFT = TT__FIT_LEFT, RIGHT = LEFT + TT__FIT_WIDTH };
    const tt__fit *f = (const tt__fit *)arg;
    const int LR = METRIC + (f->metric.name ? PANEL : 0), BOTTOM = LR + 72, HEIGHT = BOTTOM + 56;
    int x[TT__FIT_EPOCHS];
    int64_t last = 1, number[TT__FIT_EPOCHS];
    for (int k = 0; k < f->points; k++) last = tt__max(last, f->point[k].step);
    const int64_t x_step = tt__max(1, (int64_t)tt__axis_step((double)last, 8));
    tt__print(svg, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 800 %d' width='800' height='%d' "
              "font-family='Helvetica,Arial,sans-serif' font-size='12' fill='#222'>\n<rect x='.5' y='.5' "
              "width='799' height='%d' rx='6' fill='#fff' stroke='#ccc'/>\n", HEIGHT, HEIGHT, HEIGHT - 1);
    tt__print(svg, "<path stroke='#aec7e8' stroke-width='2' d='M%d 26h22'/><text x='%d' y='30'>training, "
              "each step</text><path stroke='#1f77b4' stroke-width='2' d='M%d 26h22'/><text x='%d' "
              "y='30'>training, running mean</text><path stroke='#d62728' stroke-width='2' d='M%d "
              "26h22'/><circle cx='%d' cy='26' r='3.5' fill='#d62728'/><text x='%d' "
              "y='30'>validation</text>\n", RIGHT - 418, RIGHT - 390, RIGHT - 264, RIGHT - 236, RIGHT - 86,
              RIGHT - 75, RIGHT - 58);
    tt__fit_panel(svg, f, TT__FIT_LOSS, LOSS, 232, last);
    if (f->metric.name) tt__fit_panel(svg, f, TT__FIT_METRIC, METRIC, 124, last);
    tt__fit_panel(svg, f, TT__FIT_LR, LR, BOTTOM - LR, last);
    tt__print(svg, "<g text-anchor='middle' fill='#555'>");
    for (int64_t k = 0; k <= last / x_step; k++)
        tt__print(svg, "<text x='%d' y='%d'>%lld</text>", LEFT + tt__fit_x(k * x_step, last) / 10,
                  BOTTOM + 18, (long long)(k * x_step));
    for (int k = 0, n = tt__fit_epochs(f, last, x, number); k < n; k++)
        tt__print(svg, "<text x='%d' y='%d'>%lld</text>", LEFT + x[k] / 10, BOTTOM + 38,
                  (long long)number[k]);
    tt__print(svg, "</g>\n<g text-anchor='end'><text x='%d' y='%d'>step</text><text x='%d' "
              "y='%d'>epoch</text></g>\n</svg>\n", LEFT - 22, BOTTOM + 18, LEFT - 22, BOTTOM + 38);
}

/* Has the run made a step, be it a skipped one? */
static bool tt__fit_has_steps(const tt__fit *f) { return f->p.epoch > 0 || f->p.step > 0; }

static tt_status tt__fit_save_metrics(const tt__fit *f)
{
    char path[TT__PATH];
    tt_status status = tt__path_join(f->r->ctx, path, f->o.folder, "metrics.csv");
    return status == TT_OK ? tt__write_text(f->r->ctx, path, f->csv) : status;
}

/* The metrics first: what is in them beyond the state is dropped when it is resumed. */
static tt_status tt__fit_save(tt__fit *f)
{
    tt_context *ctx = f->r->ctx;
    if (!f->o.folder) return TT_OK;
    tt_status status = tt__fit_save_metrics(f);
    if (status == TT_OK) status = tt__save_printed(ctx, f->o.folder, "loss.svg", tt__fit_draw, f);
    if (status == TT_OK && tt__fit_has_steps(f)) {
        status = tt_trainer_save(f->r, f->state, &f->p);
        if (status == TT_OK) f->has_state = true;
    }
    f->saved = tt__seconds();
    return status;
}

static void tt__fit_report(const tt__fit *f, const tt_stats *validation, bool best)
{
    tt_fit_event e;
    tt_stats epoch; /* so far */
    if (!f->o.report) return;
    memset(&e, 0, sizeof e);
    memset(&epoch, 0, sizeof epoch);
    double seconds = tt__seconds() - f->started;
    int64_t done = f->p.epoch * f->steps + f->p.step;
    epoch.loss = f->p.targets > 0 ? f->p.loss_sum / f->p.targets : 0;
    epoch.targets = f->p.targets;
    epoch.correct = f->p.correct;
    e.epoch = f->p.epoch;
    e.epochs = f->o.epochs;
    e.step = f->p.step;
    e.steps = f->steps;
    e.loss = epoch.loss;
    e.metric_name = f->metric.name;
    if (e.metric_name) e.metric = f->metric.of(validation ? validation : &epoch);
    e.unit = f->unit;
    e.per_second = seconds > 0 ? f->items / seconds : 0;
    e.of_peak = seconds > 0 && f->peak > 0 ? f->flops / seconds / f->peak : 0;
    if (e.of_peak > 1) e.of_peak = 0; /* the machine was busier when the peak was measured than it is now */
    double each = done > f->first_step ? seconds / (double)(done - f->first_step) : 0;
    e.seconds_left = each * (double)(f->o.epochs * f->steps - done);
    e.validation = validation;
    e.best = best;
    f->o.report(f->o.user, &e);
}

/* Steps from f->p.step on, to the end of the epoch or until it is stopped. */
static tt_status tt__fit_epoch(tt__fit *f)
{
    tt_batch b;
    tt_stats s;
    bool updated, more = true;
    double began = tt__seconds(), items = 0;
    tt_context *ctx = f->r->ctx;
    tt_status status = tt__from_source(ctx, f->train, f->p.epoch, f->p.step, NULL, NULL);
    while (status == TT_OK && (tt__within_step(f->r->train) || !tt__fit_stopped(f))) { /* steps stay whole */
        float lr = tt_trainer_lr(f->r);
        status = tt__from_source(ctx, f->train, f->p.epoch, f->p.step, &b, &more);
        if (status != TT_OK || !more) break;
        status = tt_train_batch(f->r, &b, &s, &updated);
        items += tt__items(&b);
        if (status != TT_OK || !updated) continue;
        f->items += items;
        f->flops += s.flops;
        f->p.step++;
        f->p.loss_sum += s.loss * s.targets;
        f->p.targets += s.targets;
        f->p.correct += s.correct;
        double now = tt__seconds();
        status = tt__fit_metrics(f, &s, false, lr, items, now - began);
        tt__fit_report(f, NULL, false);
        if (status == TT_OK && now - f->saved > f->o.save_seconds) status = tt__fit_save(f);
        began = tt__seconds(); /* saving is not counted */
        items = 0;
    }
    const long long epoch = (long long)f->p.epoch + 1, steps = (long long)f->p.step;
    const bool ended = status == TT_OK && !more;
    if (ended && tt__within_step(f->r->train))
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "epoch %lld of the source ends within a step, after %lld "
                          "whole ones: the last micro-batch of a step must set last_of_step", epoch, steps);
    else if (ended && !steps)
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "epoch %lld of the source has no step", epoch);
    else if (ended && steps < f->steps && !f->told_short) {
        f->told_short = true;
        tt__log(ctx, TT_LOG_WARNING, "fit", "epoch %lld of the source ends after %lld steps, and it has "
                "tt_source.steps = %lld", epoch, steps, (long long)f->steps);
    }
    if (status != TT_OK) tt__discard_step(f->r->train); /* so that the whole steps are saved */
    return status;
}

/* Is a validation with this value and loss better than the best so far? */
static bool tt__fit_better(const tt__fit *f, double value, double loss)
{
    const bool lower = !f->best_by_metric || f->metric.lower_is_better;
    if (value == f->p.best) return loss < f->p.best_loss;
    return lower ? value < f->p.best : value > f->p.best;
}

/* What stands at the end of an epoch. */
static tt_status tt__fit_validate(tt__fit *f)
{
    tt_stats s;
    tt_context *ctx = f->r->ctx;
    double began = tt__seconds(), items = 0;
    tt_status status = f->validation ? tt__evaluate(f->r, f->validation, f->o.stop, &s, &items) : TT_OK;
    if (status != TT_OK || tt__fit_stopped(f)) return status;
    double loss = f->validation && isfinite(s.loss) ? s.loss : INFINITY, value = loss;
    if (f->validation && f->best_by_metric) value = f->metric.of(&s);
    bool best = !f->validation || tt__fit_better(f, value, loss);
    const bool any = best || isfinite(f->p.best) || isfinite(f->p.best_loss);
    if (f->validation && !(isfinite(s.loss) && isfinite(value)))
        tt__log(ctx, TT_LOG_WARNING, "fit", "epoch %lld: the validation's %s is not finite%s",
                (long long)f->p.epoch + 1, isfinite(s.loss) ? f->metric.name : "loss",
                any || f->p.epoch + 1 < f->o.epochs ? "" : ", as in all epochs before: none was kept");
    if (f->validation) status = tt__fit_metrics(f, &s, true, 0, items, tt__seconds() - began);
    if (best && f->o.keep) {
        /* A folder with a model and no state could be neither resumed nor, by a caller who guards models,
           begun anew. */
        if (status == TT_OK && !f->has_state) status = tt__fit_save(f);
        if (status == TT_OK) {
            ctx->error[0] = 0;
            status = tt__returned(ctx, f->o.keep(f->o.user), "keep", f->p.epoch, f->p.step - 1);
        }
    }
    if (status != TT_OK) return status; /* f->p.best is as it was: a resumed run validates and keeps again */
    if (best && f->validation) {
        f->p.best = value;
        f->p.best_loss = loss;
    }
    if (f->validation) tt__fit_report(f, &s, best);
    f->p.epoch++;
    f->p.step = 0;
    f->p.loss_sum = f->p.targets = f->p.correct = 0;
    status = tt__fit_save(f);
    f->started += tt__seconds() - began;
    return status;
}

/* Resumes from f->state, which must be of the data that f->p says. */
static tt_status tt__fit_resume(tt__fit *f)
{
    tt_context *ctx = f->r->ctx;
    const tt_progress now = f->p;
    tt_status status = tt_trainer_load(f->r, f->state, &f->p);
    if (status != TT_OK) return status;
    if (f->p.epoch > f->o.epochs || f->p.step > f->steps || f->p.epoch < 0 || f->p.step < 0)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' has done %lld epochs and %lld steps, more than %lld "
                        "epochs of %lld steps", f->o.folder, (long long)f->p.epoch, (long long)f->p.step,
                        (long long)f->o.epochs, (long long)f->steps);
    if (f->p.best_by && f->p.best_by != now.best_by)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "the best model in '%s' was not told by its %s: set best_by to "
                        "what told it", f->o.folder, f->best_by_metric ? f->metric.name : "loss");
    if (f->p.classes && now.classes && f->p.classes != now.classes)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' was trained on classes with other names than those of "
                        "the data at hand; the first of these is '%s'", f->o.folder,
                        f->train->class_names[0]);
    if (f->p.data && now.data && f->p.data != now.data)
        tt__log(ctx, TT_LOG_WARNING, "resume", "'%s' was trained on other data: the run goes on with those "
                "at hand, and differs from one that was never stopped", f->o.folder);
    f->p.classes = now.classes;
    f->p.data = now.data;
    return tt__fit_read_metrics(f);
}

static tt_status tt__fit_begin(tt__fit *f)
{
    char heading[160];
    tt_context *ctx = f->r->ctx;
    tt_status status = tt__must_train(f->r);
    if (status == TT_OK) status = tt__source_fits(f->r, f->train, "to train on");
    if (status == TT_OK && f->validation) status = tt__source_fits(f->r, f->validation, "for validation");
    if (status != TT_OK) return status;
    if (f->train->accumulates && !f->r->options.accumulate)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_fit: steps may have several micro-batches: make the "
                        "trainer with accumulate = true");
    if (f->o.epochs < 1 || f->o.epochs > TT__MOST_STEPS / f->steps)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_fit: epochs is %lld", (long long)f->o.epochs);
    if (f->o.best_by && strcmp(f->o.best_by, "loss") != 0 &&
        !(f->metric.name && strcmp(f->o.best_by, f->metric.name) == 0))
        return tt__fail(ctx, TT_ERR_ARGUMENT,
                        "tt_fit: best_by is '%s', neither 'loss' nor the model's metric%s%s", f->o.best_by,
                        f->metric.name ? ", " : " (it has none)", f->metric.name ? f->metric.name : "");
    f->best_by_metric = f->metric.name && !(f->o.best_by && strcmp(f->o.best_by, "loss") == 0);
    f->p.best = f->best_by_metric && !f->metric.lower_is_better ? -INFINITY : INFINITY;
    f->p.best_loss = INFINITY;
    f->p.best_by = tt__hash(f->best_by_metric ? f->metric.name : "loss");
    if (f->o.resume && !f->o.folder)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_fit: to resume, name the folder that holds the run");
    f->bytes = tt_program_plan(f->r->train).bytes;
    status = tt__fit_line(f, heading, tt__fit_heading(f, heading));
    if (status != TT_OK || !f->o.folder) return status;
    status = tt__path_join(ctx, f->state, f->o.folder, "state.safetensors");
    if (status != TT_OK) return status;
    if (!f->o.resume && (status = tt__make_folder(ctx, f->o.folder)) != TT_OK) return status;
    status = tt__folder_has(ctx, f->o.folder, "state.safetensors", &f->has_state);
    if (status != TT_OK) return status;
    if (f->has_state && !f->o.resume)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' holds a run: resume it, or name another folder",
                        f->o.folder);
    if (!f->has_state && f->o.resume)
        return tt__fail(ctx, TT_ERR_FILE, "nothing to resume: '%s' is not there", f->state);
    f->p.classes = f->train->classes ? TT__HASH_BEGIN : 0; /* hashes; 0: there are none */
    for (int c = 0; c < f->train->classes; c++) {
        const char *name = f->train->class_names[c];
        f->p.classes = tt__hash_on(f->p.classes, name, strlen(name) + 1);
    }
    f->p.data = f->train->hash ? f->train->hash(f->train->self) : 0;
    if (f->o.resume) status = tt__fit_resume(f);
    return status == TT_OK ? tt__fit_save_metrics(f) : status; /* fails where nothing can be written */
}

tt_status tt_fit(tt_trainer *r, const tt_source *train, const tt_source *validation, const tt_fit_options *o,
                 bool *finished)
{
    tt_context *ctx = r->ctx;
    tt__fit *f = (tt__fit *)tt__calloc(ctx, sizeof *f);
    if (finished) *finished = false;
    if (!f) return TT_ERR_MEMORY;
    f->r = r;
    f->train = train;
    f->validation = validation;
    f->o = o ? *o : tt_fit_options_default();
    f->metric = r->model.metric;
    f->unit = r->model.unit ? r->model.unit : "examples";
    f->steps = train ? train->steps : 0;
    tt_status status = tt__fit_begin(f);
    bool began = status == TT_OK;
    f->peak = began && strcmp(tt_program_plan(r->train).device, "cpu") == 0 ? tt_measured_peak(ctx) : 0;
    f->first_step = began ? f->p.epoch * f->steps + f->p.step : 0;
    f->started = f->saved = tt__seconds();
    while (status == TT_OK && f->p.epoch < f->o.epochs && !tt__fit_stopped(f)) {
        status = tt__fit_epoch(f);
        if (status == TT_OK && !tt__fit_stopped(f)) status = tt__fit_validate(f);
    }
    bool done = status == TT_OK && f->p.epoch == f->o.epochs;
    if (began && !done && tt__fit_has_steps(f) && !tt__within_step(r->train)) { /* so that nothing is lost */
        char error[sizeof ctx->error];
        memcpy(error, ctx->error, sizeof error);
        tt_status saved = tt__fit_save(f);
        if (status != TT_OK && saved != TT_OK)
            tt__log(ctx, TT_LOG_WARNING, "fit", "nor could the state be saved: %s", ctx->error);
        status = status == TT_OK ? saved : tt__fail(ctx, status, "%s", error); /* the first error counts */
    }
    if (finished) *finished = done;
    tt__free(ctx, f->csv);
    tt__free(ctx, f->point);
    tt__free(ctx, f);
    return status;
}

/* ===========================================================================================================
   UNICODE                                                                                           >>unicode
   What BERT's tokenizer asks about code points. A table is a string of numbers, most of which are distances
   from the row before; tests/golden/make_unicode.py, which prints them, says what each is. Uses >>base, and
   the classes of code points from >>formats.
   ======================================================================================================== */

/* Written by tests/golden/make_unicode.py from the package tokenizers 0.23.3 of Python. */
enum {
    TT__CLASS_RANGES = 516, TT__FOLD_RUNS = 457, TT__FOLD_MANY = 42,
    TT__FOLD_CJK = 1056,
    TT__FOLD_LOOK_BACK = 3 /* rows at most from the run that holds c to the last run with first <= c */
};
static const char tt__class_text[] =
    "#b-#4#5#$#dF#$#cS-aK=a:=W#hF#$#&(&&&$%+6&&&&iHtX#(#h71&+&d.a+cBa:M6)kT#&#'#&#7#&#7#&#'O6.a9&6$6%bP#&#%$"
    "6Oe;-W%'aK&$aL#%$a;%7$X5cC$%$'Bg#aCbQ_b/&G@X$b/$H$a+%cS=H%&a^cK$gD#I[($''a^''&X#I-8#6-&3(_''Y+'78A8^''8"
    "'8%8#'&(B8&(.8^''a,$8''78/&3(_'%($Y+'+(.8B(a$(/'V(a$I(I$I#'*7.8A(_'%()(((#'78A(a&Y+'78aN'*I$(A&a#(%Y#H/"
    "(#X#I#&-6a<(%Y#7$8.X#8ZcS$&&7>'$'$'#WWa+#Y#X#($a+#&#7(bQ$i<,',a*'6a9Y$a,#'$7%8.a:+8'I3Y0(%8)'2(aE&j,H#b"
    ".bC&j764$=6a5GH8#'A8#'#6>8B8a'8$aM+(%b0#'#(#G$G%'FbO#I#%bF'a_I'8,()H+6cA7%(%6Z($aM$'$(%a^)8#a]%'DaK$a:%"
    "cDa)YT'$a,$((($*8aK-b//8DY%8#*#'#8]'$8&($I#:+WPa^%(#'&a*a%6a'a[+H#&#c3$aL'')'&7c5n/(.#XhDbM#a)#f.#4#a)#"
    "$#e*$c2$b`#$#a)$b=0616a(c3''&c#h[WA6r(cCa66Cb>fOeKa&WD6lEH*W$6aX&1'aHh7#l6$dWg<$#G'b>%b`-X#<#&/&aC7(&aB"
    "&pn_6dAGaG'&&#b@#&C7a77#a:d=(&''(<8a4Wa3',63dH)G$&Ma,#H#6:bQ$*.&DIT'%Y%(&*#c236((a*a<%8%8/(+(2W@(W'$H%7"
    "(7$'@6/8%6''c_(%(%&$'kgX'i&6c/d(#b>)d'#i*$cC$&'&$6b>%$G$a:$W-6&6=G$&>&$&$aKb>F$%d5Gd-'cR'bAa+H&T&fZ&l:&"
    "c6&C&c0I$8((#'#(#'LH''3b.J&aM7,aKa)aKaAWrP(ZcE#'#aKU'#8UY%7#6#%#Wa%HHa,$a<#7.WS'#6-8Xb0$*'a*#'#8#&0&$Ga"
    "6I%(#*#'#(#a:aS&Y(&a<#788_'&(/*;aL&a+c<*&)aTa<$('8$7%&c[Y)8$7#e['8a<a^%($'#(#GaO($(%a<#*#'aMI%Y$Y#'3Gu7"
    "*ad]a*i|E6b+a+#&_aL#a*+&r5Yj|N(#'#&#Vb|E;#H&-#a/#aZ#a]%aLBXb@Hab`nA'm,+(1(%a*2a,$cUvLaS$d>%aS$>$a2afYaL"
    "aUaC#)ntd)%By9b+ac^#}M";
static const char tt__fold_runs_text[] =
    "a(c8a'b*Ld0)#d1$-d:%3#&;%'#d9$,d8%;$(#d;$;d:'##$#d;%Le4*-,%3#&;%(,#%;$);#'6#&LY)]*++0%#eN%a/eS-]2++0%#f"
    "5%a'f:-#f;%+fQ%+$&L&)8fX'Lg**#g+%Lg:)#g;%LgE)],+;0'#g_%a@h*/+6%3#&L&+#oB$8f^'#fV$#fU%,fT%#fS&#bH$-d)%#f"
    "M%#fT$#'%#+$#&$#f['#g#$#'%#%$+q4%8j/'#g1$#g0%#g1&#g0%#g1$+qO%,qN%8g.'#g3$#g2'##++%&+#&+#&+l.%+/%++%a/+."
    ";a$'+d5%#h=%+lS%+'%;''+r)%#r>$+m'&+m4%#j#$#a9$+k2%+A%+d9%+D%;e(';#';#';'';$';$'+.%+$%#n)%+nI%#j3%8d9'+o"
    "*%+'%]3++'+#lnD$#k}S%#e>$#le-&#k}M%#fC$#hT$#'$a,b6d_8#'#f2%#f3+#{W$#aaN)#|4$#yX$#y<$5yB'#/%#+$#)$#E$b,4"
    "5U#*#E$#9$#M$5)&#==#a2$69$#0%#3$#='+4(c$'@#b$&#b%%#2$#3&4d8&+f)%a,Z$#a&%7a''8#&#a*$#($#7$#Z$d(aG$Y#+#$%"
    "bQ%B#a(:+W&#,'#a%(#a($#($#7%bQ]9+&%a,'5g$#Z#@$+e*%a<dL0;e8'#e9%+e:%6e;&#($+e>%+$%#eH%;eM'+'%6eJ&#($+e0%"
    "L:)+&%#eT%+eS%g$eT[d^aFd$+a<%8a%$#a*bG#J%#O4##i_##+##&##H4b.&#+$,+%#3$#)b(,8&#9a;#aF&#)G,b4%#+&#;cZ#aL7"
    ",a[e]#bL*,0&#OdD#1f$##-##(##(##(##0#a6c,#a7b%d^hb-K##)##l&jEaec7a7Mame.aa*6>+#2e=#B*eIcj4Q4#e:+ebA%L$)+"
    ",%a/$-a/4-H4$H$(](+;0'L&)],+L0)],+]0+;0']&+a/0-]4+a/0-;4'a/(-;4'+(%L$)#S$#9$-'&#hN&#e<%c'd2;b#K3;:'c'';"
    "aPG1]6+Iht')b#gw&3L:+L2+b#.3b#>3L6+L2+]&,W4*b#(3+a6%I'$I$(+-%++%+''b#[3b#63b#'3aKa6$6$)G.*#%&#z2$3z''+*"
    "%+*%3#&3g})&;g}0)L.*3ha#&;g~['+2%L')#6$+z>%#b>&3}#'+*%+:%33&#z:d^#p;'#|W$#8*#ijPRb$:G#A:-87#CC8_$#)Z#0("
    "##&##;8#A#*&#+&#$%#%:#iu2%#iu3.#a$$-itO%,iu;',7',#+,*',+',#H#2$,-%#%U,c.%,J+<Va&,cuNfIc8cr^z1#UdXf4aFaH"
    "#aE%#k|*$#gt_$#gt<&Ik{H)#k}8$#a%$-a*&#k}@&##,,k~C%m,k~DaS8#*##n5c$&<I#.+#&+#&+#&+#&+#;#bE-#bF1c$#<I#.+#"
    "&+#&+#&+#&+#;#bE&<b7*#1pt5e^'a'cE#bNaM#3h(#a.8#'#aigQ$a,aigR0##%#ap}8&8ap}9)bA#7#ap~4$#8$#+$#7$#(%#aL$#"
    "S$#N$#aq}J$a^~Y3#aI$#ap|I$#gtR$8aiiB'#aqa>$a^aqa@3#aqhO<#aqhPkxT#biv^%#R.;K'3^&M&*E#)8#&8#&Y#&8#'#O$#,$"
    "#5$#3p6c8biy3tSe03b]dM#c/dY$$a,#/aM#3I#+##}CfMVc@bUa&n%8a(4#,q7#+pId,a+le7d,#aHc0,ql+d<1";
static const char tt__fold_cjk_text[] =
    "ai{'jrCki]q*hoMih8arJup)#s}Upb+qd>ab%bn'exBbqPa{;lJjHbdRj|^z=aa]yRdsNcv=blRumMal1fu%a~Beu3fx5rl`ehRffP~"
    "Jj}<hy%awFkvMbjVaw_aqDhn@rq&rNiVebPauNbaRak5bqLau9bXbdJbs%af-uNjs:h)ae1avFdi_cg_eqQnf8av=hjDae+c~:axLet"
    ";b{)qt(~/czVab1j5c~DhTfy@seQl~-mh8Ckn#aa#avZeh#ccAkq0ba=ik@qhEczPaeFep%p5iw(jw7kuWdoTd~2hv9bbCfu]kw$ai5"
    "hu=cw7ax=hw`jfXi}`bu:ib1hzUeaJj~8w5c/fmXex'aq/bkFa}Jqz6k)an5apNa|=b{1br3hc5aj=aeJaVut0ev)aj%jfBm{CzDcPv"
    "/b}Zr7{PanVaeDu-deFb{.ceJzZrp8dLq]g}5fxHp3ln<j#~'bi_du7bn^jl$bh_al'oFt7eq+f)ceBePec#ajHbPf]ts(k}Ffy#alT"
    "oi<efIsXcdDbNbsTagJbfDah#deLch+dhFpfEmpHsg0e|Pd#ao3kFap5k/z/aiJgw#te8dv_nz/s}Yct7dwBimPmp8nNa|1cgHi|Jsm"
    "8p/bk+bvHjBkDaf-a~VoXbuVbsLHbp)am;sg,gxBgq(hm=wPd|7dv-arLs@osGav]euJa~MbVl7bwSr8gr1qg&n{Lm{`aMcqNaeJgk_"
    "in4d~-axOkoVa},c}BcrWldCcyUah;apv'%ao}Yao}_ak}Iak}N%aqy:in+~]tXa+1a;hn)gp[yFadx7ab~4ab~9aarEaarJ%~cWfF}"
    "{;%%{sK=a@ahTcsCasZtf,j=c;lLZcJsHcBc3oPc@aaX7ae;g'a3c7|NdZeVpLal/e=hTsHf5pRagVeR9$3/1aH%e]b-jJrTNaXj-dZ"
    "p3dL#o]aj5d@l)aXmLaRvXd7azZi@b#oy[dqg)dgt&adfX%ar~,~9bEp2o)a_jZaNvBb:b3b=u'b_dVDi#fHaa31dTb3i_c]b6d@aCd"
    "Xb/m7b]aThLiDe=+a_ae5b-m%mLCbZh;k/aw)ap>d'd)jZd_aRgD'eNFVbX6m/p-i%f1g@e)k#fJ|-e1~/o/b5DiZaZaAaT(EbDbNlP"
    "rLj@iVg9ad7c=cVd=a/;aHx1ahPcutX.chNdwlKah1a)d~w/b}Vit1dpl2bBy}'%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%asd"
    ".,5dct_dck:bH=b9d#a%bHSg~Edlm/ddh<1DJdc{BdlbQhdPa3dc|7dc{`=x2xD5emzHemx>@hhKhjD9a@-hjOhm;'ZP9%FaL35V7'#"
    "#ddw9czp:hd>Ndd~Ddd~*/Ne'c:Da'a]bTXb1Da)#NH3Bk7i&i)fGa-agQa|ZiGa3Vd6eF$d)dfjLdfh6-BL3b+dfsLb/dfq2aF;bId"
    "PjbK@jgHaT#df~@dfz$NB;dgeJdge01|-{0jlEjnJ@bPaMdgx9dgr4dgr9dgp[(Fc9%juMjvHa=Na@jxAdscZdsc$jz#))Leof#eod2"
    "dhrR#c|s`i{E#j{4dw{9ml/dzj*5j|Sj~9aN7a+dDke,`kfTdif3didEd5+'&aDLa/>9aFL+X9b/bTa-d+dir]disEb,cHZc1diuJdi"
    "sEc([kw^k~9Na%a2k|Qle__djmDdjiEi1eUlhClj]lkAa.fmD)fbRc6gl=qi&i~P+/b%8dj}'dwnWlu9cYfVaNdjxDdjx0cMh-l{^l}"
    "Bc1b9f7djy-djw>mi$mk9dkh7dkfImk2ml3aBZ%dks;hkSho=dkr*dlc+dk}8@c:eVa7aZaSa7B=dkz%dk|Oh9b)m~(nc/*dk}TdlfK"
    "l=dk|]aHdk{GcVY(nk(nlLaN.aTcya@cxz:dli#dlf(dlq%dll8=Zdma/dl}GNdmh]g=dmhOFoa,ob%oaI#og%NNLb5oh(ok)dm}Tdm"
    "|[dnb#dm~6dawVdarAdnu)RdLd~g`;orLdnxR$a5XdnyA%#a=osYov'ouIbLeaeNdoj0b'b+o{(eatBdorSdovLa=dov.c'pd*pf_7-"
    "dph_i_#dpmIpeOeb|%dpo()pkSeccZdpm2ppGpq7,_dqgDdqd0pr.puDa_b1px$edm/a%edl`edqXdqnQdqr+dqq0c99dq{1b=dqzId"
    "ra'dq~Cdcu=dt|Gqi9bNqj2ql1j|Ud}iD@nxW5dcj()cz'ukMqt7.HmrWmsD'7a9dr{+dr{,aXb7b@dGe+a;cPhKc_'Ddr{3j5d`ef{"
    "Crd/'a-dtu@dtrWdsi@egoU+egt+iJeg}<rmR;9'b+a(d@a>e%bMb1ZrtArwDa'rw>rzJ)dtoHdtkO1r|Ur}Rw|Yen|Zf+eja65sh_b"
    "Fe1fRdue5dub<Pc#c'duq/aczYcqqAAaPcqwDcqo[c7dv|XZdvr,c)a'dvxNdvx8iBe5%c&lN]dwiZdv{<ur.usLdwhLenyIuyZpf^p"
    "j-dw}#g)eo~K3u~Hdxp7epn[epsHdxsE#a#dx|-dxu`vbYve3d/Zb#vg.erf@dyt&j'f5vx0a%vzPdzr)esn>esp5hVd9dzuSwdEwfJ"
    "-171a1d{pVw{T%";
static const char tt__fold_many_text[] =
    "akS*4#$,D#f:*4#$,D#a/&b5#Z*2#$*4#$.F#d24J#b**2#$*4#$.F#b;(6#$*6#$,/#az+$aH#%$aD#%$a@#%$a;#%$a7#'$a/#R&4"
    "#$&6#aeh5*4#$,D#f+(4#%,+#d/&4#$&6#ztG0@#$0=#$2=5$4=7$6=9$8=;$:==a>&bS#$&bU#$*bS5$*bU5$.bS7$.bU7";

struct tt__unicode {
    uint32_t classes[TT__CLASS_RANGES]; /* first << 11 | last - first (7 bits) << 4 | class */
    uint32_t runs[TT__FOLD_RUNS][2]; /* first << 11 | last - first (8 bits) << 3 | stride * 3 - 3 + step; to
                                        what */
    uint32_t many[TT__FOLD_MANY][4]; /* c << 11; the two or three code points that it becomes */
    uint32_t cjk[TT__FOLD_CJK];      /* what U+F900..U+FAFF and U+2F800..U+2FA1F become */
};

/* Reads a number: its last digit is one of the first 60 characters, those before it are of the other 30. */
static uint32_t tt__unicode_number(const char **at)
{
    for (uint32_t n = 0;;) {
        char c = *(*at)++;
        uint32_t digit = (uint32_t)(c - '#' - (c > '?') - (c > '\\'));
        if (digit < 60) return n * 60 + digit;
        n = n * 30 + digit - 60 + 1;
    }
}

/* Adds a number that may be negative to `before`. */
static uint32_t tt__unicode_from(uint32_t before, const char **at)
{
    uint32_t n = tt__unicode_number(at);
    return before + ((n >> 1) ^ (0u - (n & 1)));
}

static tt__unicode *tt__unicode_new(tt_context *ctx)
{
    tt__unicode *u = (tt__unicode *)tt__alloc(ctx, sizeof *u);
    if (!u) return NULL;
    const char *at = tt__class_text;
    uint32_t c = 0, to = 0;
    for (int k = 0; k < TT__CLASS_RANGES; k++) {
        c += tt__unicode_number(&at);
        uint32_t more = tt__unicode_number(&at);
        u->classes[k] = c << 11 | more;
        c += (more >> 4) + 1;
    }
    c = 0;
    at = tt__fold_runs_text;
    for (int k = 0; k < TT__FOLD_RUNS; k++) {
        uint32_t distance = tt__unicode_number(&at);
        c += distance;
        u->runs[k][0] = c << 11 | tt__unicode_number(&at);
        u->runs[k][1] = to = tt__unicode_from(to + distance, &at);
    }
    c = 0;
    at = tt__fold_many_text;
    for (int k = 0; k < TT__FOLD_MANY; k++) {
        c += tt__unicode_number(&at);
        u->many[k][0] = c << 11;
        to = c;
        for (int i = 1; i <= 3; i++) {
            uint32_t next = tt__unicode_from(to, &at);
            u->many[k][i] = next == to ? 0 : next;
            to = next;
        }
    }
    to = 0;
    at = tt__fold_cjk_text;
    for (int k = 0; k < TT__FOLD_CJK; k++) u->cjk[k] = to = tt__unicode_from(to, &at);
    return u;
}

/* How many rows of a sorted table, of `columns` numbers each, have a first code point of at most c. */
static int tt__rows_to(const uint32_t *table, int rows, int columns, uint32_t c)
{
    int low = 0, high = rows;
    while (low < high) {
        int middle = (low + high) / 2;
        if (table[middle * columns] >> 11 <= c) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int tt__class(const tt__unicode *u, uint32_t c)
{
    bool private_use = (c >= 0xE000 && c <= 0xF8FF) || (c >= 0xF0000 && (c & 0xFFFE) != 0xFFFE);
    if (private_use) return TT__CLASS_DROP;
    int rows = tt__rows_to(u->classes, TT__CLASS_RANGES, 1, c); /* at least one: the first begins with 0 */
    uint32_t range = u->classes[rows - 1];
    return c - (range >> 11) <= (range >> 4 & 127) ? (int)(range & 15) : (int)TT__CLASS_LETTER;
}

/* The blocks that BERT's tokenizer splits into single characters. U+2B820..U+2B91F is missing in the Rust
   package `tokenizers`, which is the reference, by a typing error; so it is here. */
static bool tt__is_cjk(uint32_t c)
{
    return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) || (c >= 0xF900 && c <= 0xFAFF) ||
           (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B81F) ||
           (c >= 0x2B920 && c <= 0x2CEAF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

/* Hangul by arithmetic: the Unicode Standard, section 3.12. */
static int tt__fold(const tt__unicode *u, uint32_t c, uint32_t out[3])
{
    out[0] = c;
    if (c >= 0xAC00 && c <= 0xD7A3) {
        uint32_t s = c - 0xAC00;
        out[0] = 0x1100 + s / 588;
        out[1] = 0x1161 + s % 588 / 28;
        out[2] = 0x11A7 + s % 28;
        return s % 28 ? 3 : 2;
    }
    if (c >= 0xF900 && c <= 0xFAFF) return out[0] = u->cjk[c - 0xF900], 1;
    if (c >= 0x2F800 && c <= 0x2FA1F) return out[0] = u->cjk[c - 0x2F800 + 512], 1;
    int row = tt__rows_to(&u->many[0][0], TT__FOLD_MANY, 4, c) - 1;
    if (row >= 0 && u->many[row][0] >> 11 == c) {
        memcpy(out, u->many[row] + 1, 3 * sizeof *out);
        return out[2] ? 3 : 2;
    }
    row = tt__rows_to(&u->runs[0][0], TT__FOLD_RUNS, 2, c) - 1;
    for (int k = row; k >= 0 && k >= row - TT__FOLD_LOOK_BACK; k--) {
        uint32_t run = u->runs[k][0], offset = c - (run >> 11);
        uint32_t stride = (run & 7) / 3 + 1, step = (run & 7) % 3;
        if (offset > (run >> 3 & 255) || offset % stride) continue;
        out[0] = u->runs[k][1] + offset / stride * step;
        break;
    }
    return 1;
}

#pragma GCC diagnostic pop
#undef TT__IMPLEMENT
#endif /* TT__IMPLEMENT */

/*
MIT License

Copyright (c) 2026 tinytrain contributors

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without
limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the
Software, and to permit persons to whom the Software is furnished to do so, subject to the following
conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions
of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED
TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL
THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF
CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER
DEALINGS IN THE SOFTWARE.
*/
