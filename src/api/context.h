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
    TT_ERR_ARGUMENT,    /* a value outside its documented range, or a contradiction between options */
    TT_ERR_SHAPE,       /* a tensor of the wrong shape or dtype */
    TT_ERR_MEMORY,      /* the allocator returned NULL */
    TT_ERR_BUDGET,      /* the plan does not fit memory_budget */
    TT_ERR_FILE,        /* a file could not be opened, read, written, synced or renamed */
    TT_ERR_FORMAT,      /* a file's content is not what its format prescribes */
    TT_ERR_STATE,       /* a saved state has other tensors than the program or trainer that is to load it */
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
    /* These may be NULL. lock: opens a file, made if need be, writes a text into it and holds it: until it is
       closed or the process has ended, nobody else can, in this process neither. NULL on failure: *held, as
       another holds it. space: bytes that can still be written to files of a folder; -1: that is unknown. */
    void *(*lock)(void *user, const char *path, const char *text, bool *held);
    int64_t (*space)(void *user, const char *folder);
} tt_files;

/* How errors of memory_budget name options and bytes: by default as the fields of tt_compile_options, and a
   program with options of its own as these. */
typedef struct tt_wording {
    const char *budget;  /* default "memory_budget" */
    const char *smaller; /* what needs less memory; default "A micro-batch of fewer rows" */
    /* Writes an option and its value; default: recompute "blocks". value NULL: the option alone. */
    void (*option)(void *user, const char *name, const char *value, char *to, size_t capacity);
    void (*bytes)(void *user, size_t bytes, char *to, size_t capacity); /* default: only the number */
    void *user;
} tt_wording;

typedef struct tt_context_options {
    int threads;            /* that compute, the caller's included, 0..256; 0: as many as the calling thread
                               may use by its affinity mask and the CPU quotas of its control groups */
    uint64_t seed;          /* of initialisation, dropout, shuffling, stochastic rounding. Default 1 */
    bool verify;            /* run the verifier after each pass. Default: true unless NDEBUG is defined */
    const char *isa;        /* instruction set: NULL (best), "portable", "avx2", "avx512", "neon"; also the
                               environment's TINYTRAIN_ISA */
    double timeout;         /* seconds, above 0, that a rank waits for another, or a process for others to
                               come to tt_open and tt_close, before all fail. Default 600 */
    const char *bf16;       /* products of two bf16 matrices: "convert" (to fp32), "dot" (bf16 dot-product
                               instructions), "tiles" (Intel AMX), NULL (the fastest on this CPU model); also
                               TINYTRAIN_BF16. With the second and third, attention on x86 uses them too, and
                               its backward rounds its weights and their gradients to bf16 */
    tt_logger logger;       /* default: warnings and errors to stderr */
    tt_allocator allocator; /* default: posix_memalign, huge pages advised for large blocks */
    tt_files files;         /* default: POSIX */
    tt_wording wording;
} tt_context_options;

tt_context_options tt_context_options_default(void);

/* Opens a context; options NULL: defaults. Returns NULL, and tells the logger why, if there is not enough
   memory, if threads cannot be started, if the CPU lacks the isa or bf16 that was asked for, or if another
   process has a different version, isa, bf16 or seed, or does not come before the timeout. */
tt_context *tt_open(const tt_context_options *options);
/* Frees the parameters too. Free programs, tapes and trainers first. NULL is fine. */
void tt_close(tt_context *ctx);

/* The last failure in one sentence; "" if none. Where a status was not read, the first failure is kept: an op
   whose parameter could not be made, and a run without an input whose tt_set failed, name it. */
const char *tt_error(const tt_context *ctx);
tt_status tt_error_code(const tt_context *ctx);
int tt_threads(const tt_context *ctx);
/* Of the processes that a launcher such as mpirun has started, where TINYTRAIN_MPI is defined: which one this
   is, and how many there are. 0 and 1 without one. */
int tt_process(const tt_context *ctx);
int tt_processes(const tt_context *ctx);
const char *tt_isa(const tt_context *ctx);          /* "avx512", "avx2", "neon", "portable" */
size_t tt_allocated_bytes(const tt_context *ctx);   /* now held, less 64 for each block of the allocator's */
double tt_measured_peak(tt_context *ctx);           /* fp32 FLOP/s of all threads, measured once, in 30 ms */

/* Describes the devices of a kind ("cpu", "cuda"; NULL: that of tt_compile_options.device) on this machine,
   which of them programs use, and why: lines of text into `to`, always terminated and cut at `capacity` bytes
   (0: nothing is written). Opens the device. Returns TT_OK if programs can run there, else tt_error says why
   not. examples/tt_doctor.c prints the text. */
tt_status tt_device_text(tt_context *ctx, const char *kind, char *to, size_t capacity);
