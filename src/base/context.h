#pragma once
#include "../api/standard.h"
#include "../api/context.h"
#include "system.h"

/* ------------------------------------------------------------------------------------------------ context */

typedef struct tt__pool tt__pool;
typedef struct tt__isa_table tt__isa_table; /* the kernels of one instruction set, see src/cpu/ */
/* How kernels multiply bf16 matrices: tt_context_options.bf16. */
typedef enum tt__bf16 { TT__BF16_CONVERT, TT__BF16_DOT, TT__BF16_TILES } tt__bf16;

/* The CPU as a device: the threads that run its kernels, and the kernels' instruction set. */
typedef struct tt__cpu {
    tt_context *ctx;
    tt__pool *pool;
    const tt__isa_table *isa;
    tt__bf16 bf16;
} tt__cpu;

enum { TT__KINDS = 2, TT__DEVICES = 64 }; /* kinds of devices; maximum number of devices of a kind */
enum { TT__ERROR = 1024 }; /* maximum bytes of the sentence that tt_error returns */

struct tt_context {
    tt_context_options options;
    tt_status status;
    char error[TT__ERROR];
    size_t allocated;
    pthread_mutex_t mutex; /* guards what threads share: the allocator, `allocated`, and the fields about
                              errors */
    bool late;             /* tests: the CPU does another stream's work at its WAIT, not at its start */
    bool apart;            /* tests: device "cpu" has its own memory, as GPUs have */
    bool ranks_run;        /* several ranks run: only the first of their errors is kept */
    bool rank_failed;      /* an error was recorded since the ranks began to run */
    pthread_t failed;      /* thread that recorded the last error */
    double measured_peak;
    bool profiles;         /* tt_measure_costs: each launch has one instruction and is timed by itself */
    double *profile;       /* seconds of each instruction in its fastest run so far, by the instruction's
                              number */
    bool searches;         /* a search for the largest size that fits is running: errors give no advice */
    bool unbudgeted;       /* the caller of the search has no budget and will compile without one */
    size_t needs;          /* bytes of the smallest possible program with the options as they are */
    size_t advised;        /* bytes of the smallest program that an error's advice leads to; 0: the advice
                              fits the budget */
    bool no_arrivals;      /* plans reserve no memory for the inputs of the next run, as under a tight
                              budget */
    tt__cpu cpu;           /* device "cpu", set up by the options */
    struct tt__device_group *device_groups; /* list of the device groups that have programs */
    struct tt__net *net;   /* the other processes; NULL: there are none */
    tt_param **params;
    int n_params, cap_params;
    uint32_t n_tapes;      /* number of tapes made so far */
    char unmade[TT__ERROR]; /* message of the first tt_param_new that failed since the last tt_error; "": none
                               failed */
    uint32_t *param_slots, n_param_slots; /* hash table of parameter names (tt__param_slot). An entry is 1 +
                                             the parameter's index; 0: free */
    bool writes_nothing;   /* this process writes no files: the first process writes them for all */
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

/* Records the sentence that tt_error() returns, and returns `status`. While several ranks run, keeps their
   first error. */
TT_PRINTF(3, 4)
static tt_status tt__fail(tt_context *ctx, tt_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&ctx->mutex);
    if (!ctx->ranks_run || !ctx->rank_failed) {
        vsnprintf(ctx->error, sizeof ctx->error, format, args);
        ctx->status = status;
        ctx->failed = pthread_self();
    }
    ctx->rank_failed = true;
    pthread_mutex_unlock(&ctx->mutex);
    va_end(args);
    return status;
}

const char *tt_status_name(tt_status status)
{
    static const char *const names[] = {"TT_OK", "TT_ERR_ARGUMENT", "TT_ERR_SHAPE", "TT_ERR_MEMORY",
                                        "TT_ERR_BUDGET", "TT_ERR_FILE", "TT_ERR_FORMAT", "TT_ERR_STATE",
                                        "TT_ERR_NUMERIC", "TT_ERR_UNSUPPORTED", "TT_ERR_DEVICE",
                                        "TT_ERR_INTERNAL"};
    return (unsigned)status < (unsigned)TT__COUNT(names) ? names[status] : "unknown status";
}

const char *tt_error(const tt_context *ctx)
{
    if (!ctx) return "there is no context: tt_open failed, and the log says why";
    ((tt_context *)(uintptr_t)ctx)->unmade[0] = 0;
    return ctx->error;
}

tt_status tt_error_code(const tt_context *ctx) { return ctx ? ctx->status : TT_ERR_ARGUMENT; }
