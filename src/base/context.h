#pragma once
#include "../api/standard.h"
#include "../api/context.h"
#include "system.h"
#include "text.h"

/* ------------------------------------------------------------------------------------------------ context */

typedef struct tt__pool tt__pool;
typedef struct tt__isa_table tt__isa_table; /* the kernels of one instruction set, see src/cpu/ */
/* The way in which the CPU's kernels multiply bf16 matrices: after conversion to fp32, by dot-product
   instructions, or by the tiles of Intel AMX. tt_context_options.bf16 can demand one of the ways. */
typedef enum tt__bf16 { TT__BF16_CONVERT, TT__BF16_DOT, TT__BF16_TILES } tt__bf16;

/* The CPU as a device: the threads that run its kernels, and the kernels' instruction set. */
typedef struct tt__cpu {
    tt_context *ctx;
    tt__pool *pool;
    const tt__isa_table *isa;
    tt__bf16 bf16;
} tt__cpu;

enum { TT__KINDS = 2, TT__DEVICES = 64 }; /* number of kinds of devices; max number of devices of a kind */
enum { TT__ERROR = 1024 }; /* maximum bytes of the sentence that tt_error returns */

struct tt_context {
    tt_context_options options;
    tt_status status;
    char error[TT__ERROR];
    size_t allocated;
    pthread_mutex_t mutex; /* guards the allocator, `allocated` and the fields about errors */
    bool late;             /* set by tests: the CPU postpones work on streams other than the compute stream
                              until a WAIT for that work runs */
    bool apart;            /* set by tests: device "cpu" has its own memory, as GPUs have */
    bool ranks_run;        /* several ranks run: only the first of their errors is kept */
    bool rank_failed;      /* an error was recorded since the ranks began to run */
    pthread_t failed;      /* thread that recorded the last error */
    double measured_peak;
    bool profiles;         /* tt_measure_costs runs: each launch has one instruction and is timed by itself */
    double *profile;       /* seconds of each instruction in its fastest run so far; the index is the
                              instruction's number */
    tt__cpu cpu;           /* device "cpu", set up by the options */
    struct tt__device_group *device_groups; /* list of the device groups that have programs */
    struct tt__net *net;   /* the link to the run's other processes; NULL: there are none */
    tt_param **params;
    int n_params, cap_params;
    char prefix[64];       /* the beginning of the names of new parameters (tt_param_prefix) */
    uint32_t n_tapes;      /* number of tapes made so far */
    char unmade[TT__ERROR]; /* message of the first tt_param_new that failed since the last tt_error, or "" if
                               none failed */
    uint32_t *param_slots, n_param_slots; /* hash table of parameter names (tt__param_slot). An entry is 1 +
                                             the parameter's index; 0: free */
    bool writes_nothing;   /* this process writes no files; the first process writes all files */
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

/* Returns whether the n characters at `field` are a field of TT__OPTIONS. */
static bool tt__is_option(const char *field, size_t n)
{
#define TT__FIELD(name) name,
    static const char *const fields[] = {TT__OPTIONS(TT__FIELD)};
#undef TT__FIELD
    int k = 0;
    while (k < TT__COUNT(fields) && (strlen(fields[k]) != n || strncmp(fields[k], field, n) != 0)) k++;
    return k < TT__COUNT(fields);
}

/* Copies an error message, and names the options in the message as the user's program does. The message has
   an option of TT__OPTIONS as "{FIELD VALUE}", for example "{batch = 8}". The copy has no braces. If
   tt_context_options.wording has a name for FIELD, such as "--batch", the name replaces FIELD, and quotes and
   "=" are left out of VALUE. Other text in braces is copied unchanged. */
static void tt__name_options(const tt_context *ctx, const char *from, char *to, size_t capacity)
{
    tt__text_buffer text = {to, capacity, 0};
    to[0] = 0;
    while (*from) {
        const size_t n = *from == '{' ? strcspn(from + 1, " }") : 0;
        const char *end = n && tt__is_option(from + 1, n) ? strchr(from, '}') : NULL;
        if (!end) { tt__print(&text, "%c", *from++); continue; }
        const tt_option_name *own = ctx->options.wording.names;
        while (own && own->field && (strlen(own->field) != n || strncmp(own->field, from + 1, n) != 0)) own++;
        const bool named = own && own->field;
        if (named) tt__print(&text, "%s", own->name);
        for (from += named ? 1 + n : 1; from < end; from++) {
            if (named && *from == '=') from++; /* skips "=" and the space after "=" */
            else if (!named || !strchr("'\"", *from)) tt__print(&text, "%c", *from);
        }
        from = end + 1;
    }
}

/* Records the sentence that tt_error() returns, and returns `status`. In the sentence, tt__name_options
   replaces the names of options by those of the user's program. While several ranks run, keeps the first of
   their errors. */
TT_PRINTF(3, 4)
static tt_status tt__fail(tt_context *ctx, tt_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&ctx->mutex);
    if (!ctx->ranks_run || !ctx->rank_failed) {
        char plain[TT__ERROR];
        vsnprintf(plain, sizeof plain, format, args);
        tt__name_options(ctx, plain, ctx->error, sizeof ctx->error);
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
