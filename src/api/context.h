#pragma once
#include "standard.h"

#define TT_VERSION "0.1.0"

/* ===========================================================================================================
   PUBLIC API                                                                                         src/api/
   Shapes are written (rows, D): row-major, last dimension contiguous. Sizes are in elements unless a name
   ends in _bytes. Functions that can fail return a tt_status (or NULL) and leave a sentence in tt_error().
   ======================================================================================================== */

/* ------------------------------------------------------------------------------------- status and context */

typedef enum tt_status {
    TT_OK = 0,
    TT_ERR_ARGUMENT,    /* a value outside its documented range, or options that contradict one another */
    TT_ERR_SHAPE,       /* a tensor of the wrong shape or dtype */
    TT_ERR_MEMORY,      /* the allocator returned NULL, or the machine or the GPU has too little free memory
                           for the plan */
    TT_ERR_BUDGET,      /* the plan does not fit memory_budget */
    TT_ERR_FILE,        /* a file could not be opened, read, written, synced or renamed */
    TT_ERR_FORMAT,      /* a file's content violates its format */
    TT_ERR_STATE,       /* a saved state whose tensors differ from those of the program or trainer that loads
                           the state */
    TT_ERR_NUMERIC,     /* a loss or gradient that is not finite */
    TT_ERR_UNSUPPORTED, /* an op, dtype or configuration that this build lacks */
    TT_ERR_DEVICE,      /* a device that is absent or has failed */
    TT_ERR_INTERNAL     /* the verifier found an error in the library: please report the error, with its
                           message */
} tt_status;

const char *tt_status_name(tt_status status); /* returns the constant's name, such as "TT_ERR_SHAPE" */

typedef struct tt_context tt_context; /* owns threads, hooks and parameters; use from one thread at a time */
typedef struct tt_tape tt_tape;       /* the recorded values and instructions of a model */
typedef struct tt_program tt_program; /* a compiled tape: instructions, and one arena for all values */
typedef struct tt_param tt_param;     /* a named tensor that outlives programs */

/* Lets the compiler check a function that formats like printf. `text`: the number of the format argument.
   `first`: the number of the first argument to format; 0 if the arguments come in a va_list. */
#if defined(_WIN32) && defined(__GNUC__) && !defined(__clang__) /* "printf" has Microsoft's formats there */
#define TT_PRINTF(text, first) __attribute__((__format__(__gnu_printf__, text, first)))
#elif defined(__GNUC__)
#define TT_PRINTF(text, first) __attribute__((__format__(__printf__, text, first)))
#else
#define TT_PRINTF(text, first)
#endif

typedef enum tt_log_level { TT_LOG_DEBUG, TT_LOG_INFO, TT_LOG_WARNING, TT_LOG_ERROR } tt_log_level;

/* Receives messages. `id` is a short stable word ("threads", "checkpoint"), `message` one sentence without a
   newline. */
typedef struct tt_logger {
    void (*log)(void *user, tt_log_level level, const char *id, const char *message);
    void *user;
} tt_logger;

/* Memory functions. `allocate` returns memory aligned to `alignment` (a power of two, at least 64) or NULL. A
   context calls one of these functions at a time, but not always from the same thread. */
typedef struct tt_allocator {
    void *(*allocate)(void *user, size_t bytes, size_t alignment);
    void (*release)(void *user, void *memory, size_t bytes);
    void *user;
} tt_allocator;

/* File functions. `open` takes mode 'r' or 'w' (create or truncate) and returns NULL on failure. `read` and
   `write` move exactly n bytes or return false; reads are positioned, writes are sequential. `reason`
   describes the last failure. */
typedef struct tt_files {
    void *(*open)(void *user, const char *path, char mode);
    int64_t (*size)(void *user, void *file);
    bool (*read)(void *user, void *file, uint64_t offset, void *to, size_t n);
    bool (*write)(void *user, void *file, const void *from, size_t n);
    bool (*sync)(void *user, void *file);
    bool (*close)(void *user, void *file);
    bool (*rename)(void *user, const char *from, const char *to);
    bool (*remove)(void *user, const char *path);
    bool (*make_folder)(void *user, const char *path); /* returns true also if the folder already exists */
    /* Calls `each` with the name of every entry until `each` returns false. Returns false if the folder does
       not exist, or on an error. */
    bool (*list)(void *user, const char *path, bool (*each)(void *arg, const char *name), void *arg);
    const char *(*reason)(void *user);
    void *user;
    /* `lock` and `space` may be NULL. `lock` opens a file, creates the file if necessary, writes a text into
       it and locks it. Until the file is closed or the process has ended, no second call can lock the file,
       not even in this process. `lock` returns NULL on failure, and sets *held to true if the file is already
       locked. `space` returns how many bytes can still be written to a folder, or -1 if the number is
       unknown. */
    void *(*lock)(void *user, const char *path, const char *text, bool *held);
    int64_t (*space)(void *user, const char *folder);
} tt_files;

/* Table of the options that errors name: fields of tt_compile_options and of loaders' options, and "rows",
   the rows of a micro-batch. */
#define TT__OPTIONS(X) \
    X("accumulate") X("batch") X("beta") X("clip_norm") X("device") X("ema_decay") X("features_once") \
    X("hidden_weight") X("label_smoothing") X("layer_decay") X("matmul") X("memory") X("memory_budget") \
    X("offload") \
    X("parallel.data") X("parallel.groups") X("parallel.micros") X("parallel.pipeline") \
    X("parallel.reduce_micros") X("parallel.schedule") X("parallel.sequence") X("parallel.server") \
    X("parallel.tensor") X("parallel.zero") X("precision") X("prune") X("prune_by_movement") \
    X("recompute") X("residual") X("rows") X("state_bits") X("step_seqs") X("teacher_model") \
    X("temperature") X("tune") X("update") X("weight_decay") X("across") X("all_tokens") X("length")

/* The name by which errors call a field of TT__OPTIONS, such as {"clip_norm", "--clip"}. */
typedef struct tt_option_name { const char *field, *name; } tt_option_name;

/* Names that errors give to options, and units of numbers of bytes. A program with command-line options can
   make errors name its own options. */
typedef struct tt_wording {
    const tt_option_name *names; /* Set it if users set the fields by names of your program: an array that
                                    ends with a NULL field. Errors print values without quotes after these
                                    names. Default NULL: errors name the fields */
    void (*bytes)(void *user, size_t bytes, char *to, size_t capacity); /* Set it to write numbers of bytes in
                                                                           another unit, such as GB; default:
                                                                           digits without a unit */
    void *user; /* argument of `bytes` */
} tt_wording;

typedef struct tt_context_options {
    int threads;            /* Set it if other programs on the machine need some of the processors: the number
                               of threads that compute, the caller's thread included, 0..256; default 0: as
                               many as the calling thread may use by its affinity mask and the CPU quotas of
                               its control groups */
    uint64_t seed;          /* Set it to repeat a training with other random numbers (initialisation, dropout,
                               shuffling, stochastic rounding); default 1 */
    bool verify;            /* Set it if you change the library itself: the verifier checks the program after
                               each pass; default: true unless NDEBUG is defined */
    const char *isa;        /* Set it to get the same bits on CPUs that have different instruction sets:
                               "portable", "avx2", "avx512", "neon"; default NULL: TINYTRAIN_ISA in the
                               environment if it is set, else the best */
    double timeout;         /* Set it higher if a rank may keep the other ranks waiting for longer than ten
                               minutes, and lower to notice a failure sooner: seconds, above 0. A rank that
                               has waited so long for another rank fails, and all ranks with it; tt_open and
                               tt_close wait so long for other processes; default 600 */
    const char *bf16;       /* Set it to get the same bits of bf16 training on CPUs of different models:
                               "convert" (to fp32), "dot" (bf16 dot-product instructions) or "tiles" (Intel
                               AMX); default NULL: TINYTRAIN_BF16 in the environment if it is set, else the
                               fastest on this CPU model. With "dot" and "tiles", attention on x86 uses these
                               instructions and its backward rounds attention weights and their gradients to
                               bf16 */
    tt_logger logger;       /* Set it to show or store warnings and errors your own way; default: they go to
                               stderr */
    tt_allocator allocator; /* Set it if all memory must come from your own functions; default:
                               posix_memalign, with huge pages advised for large blocks; on Windows
                               _aligned_malloc */
    tt_files files;         /* Set it to read and write elsewhere than in the file system; default: the
                               functions of POSIX or of Windows, where paths are UTF-8 */
    tt_wording wording;     /* Set it if the users of your program know the options by other names than the
                               fields'; default: the fields' names */
} tt_context_options;

tt_context_options tt_context_options_default(void);

/* Opens a context; NULL options stand for the defaults. Returns NULL, and tells the logger why, if memory
   runs out, if threads cannot be started, if the CPU lacks the requested isa or bf16, or if another process
   has a different version, isa, bf16 or seed, or does not arrive before the timeout. */
tt_context *tt_open(const tt_context_options *options);
/* Closes a context and frees its parameters. Free programs, tapes and trainers first. ctx may be NULL. */
void tt_close(tt_context *ctx);

/* Returns the last failure in one sentence, or "" if no call has failed. After tt_param_new or tt_set has
   failed, an op without its parameter, or a run without its input, reports the same failure again, until the
   caller calls tt_error. */
const char *tt_error(const tt_context *ctx);
tt_status tt_error_code(const tt_context *ctx);
int tt_threads(const tt_context *ctx);
/* tt_process returns the number of this process, tt_processes the number of processes that a launcher such as
   mpirun has started (needs TINYTRAIN_MPI). Without a launcher tt_process returns 0 and tt_processes 1. */
int tt_process(const tt_context *ctx);
int tt_processes(const tt_context *ctx);
const char *tt_isa(const tt_context *ctx);          /* returns "avx512", "avx2", "neon" or "portable" */
size_t tt_allocated_bytes(const tt_context *ctx);   /* bytes of memory in use, without the 64 bytes that each
                                                       allocation adds */
double tt_measured_peak(tt_context *ctx);           /* fp32 FLOP/s of all threads; measured once, in 30 ms */

/* Writes lines of text: which devices of a kind this machine has, which of them programs use, and why. kind:
   "cpu", "cuda", or NULL for the default of tt_compile_options.device. The text in `to` is always terminated
   and cut at `capacity` bytes (0: nothing is written). The function opens the device. Returns TT_OK if
   programs can run on these devices, else tt_error says why not. examples/tt_doctor.c prints the text. */
tt_status tt_device_text(tt_context *ctx, const char *kind, char *to, size_t capacity);
