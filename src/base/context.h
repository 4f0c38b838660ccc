#pragma once
#include "../api/standard.h"
#include "../api/context.h"
#include "system.h"

/* ------------------------------------------------------------------------------------------------ context */

typedef struct tt__pool tt__pool;
typedef struct tt__isa_table tt__isa_table; /* the kernels of one instruction set, see src/cpu/ */
/* How bf16 matrices are multiplied: tt_context_options.bf16. */
typedef enum tt__bf16 { TT__BF16_CONVERT, TT__BF16_DOT, TT__BF16_TILES } tt__bf16;

/* The CPU as a device: the threads that kernels run on, and which kernels these are. */
typedef struct tt__cpu {
    tt_context *ctx;
    tt__pool *pool;
    const tt__isa_table *isa;
    tt__bf16 bf16;
} tt__cpu;

enum { TT__KINDS = 2, TT__DEVICES = 64 }; /* kinds of devices, and the most devices of a kind */
enum { TT__ERROR = 1024 }; /* bytes of the sentence that tt_error returns, at most */

struct tt_context {
    tt_context_options options;
    tt_status status;
    char error[TT__ERROR];
    size_t allocated;
    pthread_mutex_t mutex; /* guards what threads share: `allocated` and the allocator, errors */
    bool late;             /* tests: on the CPU, work of other streams is done at its WAIT, not its start */
    bool apart;            /* tests: device "cpu" has memory of its own, as GPUs have */
    bool ranks_run;        /* several ranks are at work: of their errors, the first counts */
    bool rank_failed;      /* ... and there was one */
    pthread_t failed;      /* ... on this thread */
    double measured_peak;
    bool profiles;         /* tt_measure_costs: launches are made, and timed, one by one */
    double *profile;       /* ... their seconds, by the number of the instruction: the fastest so far */
    bool searches;         /* for what is the largest that fits: errors need no advice, ... */
    bool unbudgeted;       /* ... and the caller, who has no budget, will compile that without one, ... */
    size_t needs;          /* ... but the bytes of the smallest possible, and ... */
    size_t advised;        /* ... those of the smallest by a refusal's advice; 0: it says what fits */
    bool no_arrivals;      /* plans have no memory for the inputs of the next run, as under a tight budget */
    tt__cpu cpu;           /* device "cpu", as the options want it */
    struct tt__crew *crews; /* devices that programs were made for: a list */
    struct tt__net *net;   /* the other processes; NULL: this one is alone */
    tt_param **params;
    int n_params, cap_params;
    uint32_t n_tapes;      /* that were made so far */
    char unmade[TT__ERROR]; /* the first failure of tt_param_new since tt_error was called; "": none */
    uint32_t *param_slots, n_param_slots; /* hash table of their names (tt__param_slot): index + 1; 0: free */
    bool writes_nothing;   /* to files, which the first process writes for all */
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

/* Records the sentence that tt_error() returns. While several ranks run, the first one stays. */
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
                                        "TT_ERR_BUDGET", "TT_ERR_FILE", "TT_ERR_FORMAT", "TT_ERR_NUMERIC",
                                        "TT_ERR_UNSUPPORTED", "TT_ERR_DEVICE", "TT_ERR_INTERNAL"};
    return (unsigned)status < (unsigned)TT__COUNT(names) ? names[status] : "unknown status";
}

const char *tt_error(const tt_context *ctx)
{
    if (!ctx) return "no context: tt_open failed";
    ((tt_context *)(uintptr_t)ctx)->unmade[0] = 0;
    return ctx->error;
}

tt_status tt_error_code(const tt_context *ctx) { return ctx ? ctx->status : TT_ERR_ARGUMENT; }
