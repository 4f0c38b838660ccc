#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../context/devices.h"
#include "program.h"

/* -------------------------------------------------------------------------------------- the largest batch */

#define TT__LEFT_FREE ((size_t)256 << 20)

/* Sets *budget, if it is 0, to the bytes that one rank may use. This is the device's free memory, less a
   reserve of an eighth but at most TT__LEFT_FREE bytes, divided among the ranks that share the device. */
static tt_status tt__budget_on(tt_context *ctx, const char *device, size_t *budget)
{
    size_t min = SIZE_MAX;
    if (*budget) return TT_OK;
    tt__device_group *c = tt__find_devices(ctx, device);
    if (!c) return ctx->status;
    if (c->kind->host || !c->kind->backend)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "the largest batch for device '%s' depends on memory_budget, "
                        "which is not set%s", c->name,
                        c->kind->host ? "" : ", and this build cannot ask the device what it has free");
    tt_status status = tt__device_group_open(ctx, c);
    for (int r = c->first; r < c->first + c->local && status == TT_OK; r++) {
        size_t bytes = 0, sharers = 0;
        for (int k = c->first; k < c->first + c->local; k++) sharers += c->index[k] == c->index[r];
        status = tt__device_status(ctx, c, r, c->kind->backend->available(c->device[r], &bytes));
        bytes -= bytes / 8 < TT__LEFT_FREE ? bytes / 8 : TT__LEFT_FREE;
        if (bytes / sharers < min) min = bytes / sharers;
    }
    *budget = min ? min : 1;
    return status;
}

/* A function that plans a program for batch size n. It returns TT_OK and sets *bytes to the plan's bytes, or
   returns TT_ERR_BUDGET or another error. */
typedef tt_status (*tt__try_size)(void *arg, int64_t n, size_t *bytes);

/* Estimates linearly, from the bytes of the plans for batch sizes `from` and `to`, the batch size whose plan
   needs `budget` bytes. Returns it rounded down; 0 if the bytes do not grow from `from` to `to`. */
static double tt__line_meets(double from, double from_bytes, double to, double to_bytes, double budget)
{
    const double rise = (to_bytes - from_bytes) / (to - from);
    return rise > 0 ? floor(to + (budget - to_bytes) / rise) : 0;
}

/* Returns the largest batch size n, at most `max`, whose plan fits the budget; 0 after an error or if none
   fits. The bytes of a plan grow almost linearly with n, and so do the bytes that an error names for a plan
   that does not fit. The next n to try is where the line through the two nearest plans reaches the budget. If
   that line does not rise (a larger n may need fewer bytes), bytes are assumed to be proportional to n. */
static int64_t tt__largest_size(tt_context *ctx, int64_t max, size_t budget, tt__try_size try_size,
                                void *arg)
{
    int64_t fits = 0, fails = max + 1, next = 1;
    double bytes = 0, needs = 0; /* bytes of the plans for sizes `fits` and `fails`; 0: unknown */
    int slow = 0; /* number of consecutive trials that did not halve the gap between `fits` and `fails` */
    int64_t up = 1; /* how far to go up from `fits` when no guess is better */
    if (max < 1)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "the largest batch: max is %lld, but must be at least 1",
                        (long long)max),
               0;
    void (*const log)(void *, tt_log_level, const char *, const char *) = ctx->options.logger.log;
    ctx->options.logger.log = NULL; /* trial programs are not logged */
    ctx->searches = true;
    tt_status status = TT_OK;
    while (fails - fits > 1) {
        const int64_t gap = fails - fits;
        size_t now = 0;
        double guess = 0;
        ctx->needs = 0;
        status = try_size(arg, next, &now);
        if (status != TT_OK && (status != TT_ERR_BUDGET || next == 1)) break;
        if (status == TT_OK) {
            if (fits) guess = tt__line_meets((double)fits, bytes, (double)next, (double)now, (double)budget);
            if (guess <= (double)next) guess = floor((double)next * ((double)budget / (double)now));
            fits = next, bytes = (double)now;
        } else {
            fails = next, needs = (double)ctx->needs;
        }
        if (needs > bytes && fits)
            guess = tt__line_meets((double)fits, bytes, (double)fails, needs, (double)budget);
        slow = 2 * (fails - fits) > gap ? slow + 1 : 0;
        guess = fmin(guess, 16.0 * (double)fits); /* for a small n, most bytes do not depend on n */
        if (fails <= max && slow > 2) guess = 0, slow = 0;
        const bool halve = guess <= 0 && fails <= max;
        next = halve ? fits + (fails - fits) / 2 : guess > (double)fits ? (int64_t)guess : fits + up;
        up = !halve && next == fits + up ? 2 * up : 1;
        if (next >= fails) next = fails - 1;
    }
    ctx->options.logger.log = log;
    ctx->searches = false;
    return status == TT_OK || status == TT_ERR_BUDGET ? fits : 0;
}

typedef struct tt__batch_of {
    tt_context *ctx;
    tt_value (*record)(void *user, tt_tape *t, int64_t n);
    void *user;
    tt_compile_options options;
} tt__batch_of;

static tt_status tt__try_batch(void *arg, int64_t n, size_t *bytes)
{
    const tt__batch_of *b = (const tt__batch_of *)arg;
    tt_tape *t = tt_tape_new(b->ctx);
    if (!t) return TT_ERR_MEMORY;
    const tt_value root = b->record(b->user, t, n);
    tt_program *p = tt_compile(t, root, &b->options);
    tt_tape_free(t);
    if (!p) return b->ctx->status;
    *bytes = tt__arena_size(p->arena, 0);
    tt_program_free(p);
    return TT_OK;
}

int64_t tt_largest_batch(tt_context *ctx, tt_value (*record)(void *user, tt_tape *t, int64_t n), void *user,
                         const tt_compile_options *o, int64_t max)
{
    tt__batch_of b = {ctx, record, user, o ? *o : tt_compile_options_default()};
    if (b.options.share)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "the largest batch: `share` is set, but the programs that the "
                        "search tries would enlarge the shared arena: leave it NULL"), 0;
    ctx->unbudgeted = !b.options.memory_budget;
    tt_status status = tt__budget_on(ctx, b.options.device, &b.options.memory_budget);
    const int64_t n = status != TT_OK ? 0 : tt__largest_size(ctx, max, b.options.memory_budget,
                                                             tt__try_batch, &b);
    ctx->unbudgeted = false;
    return n;
}
