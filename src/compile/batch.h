#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../context/devices.h"
#include "program.h"
#include "compile.h"

/* -------------------------------------------------------------------------------------- the largest batch */

#define TT__LEFT_FREE ((size_t)256 << 20)

/* If *budget is 0, sets it to the bytes that one rank may use: the free memory of the rank's device, less a
   reserve, divided by the number of ranks on that device. The reserve is an eighth of the free memory, at
   most TT__LEFT_FREE bytes. */
static tt_status tt__budget_on(tt_context *ctx, const char *device, size_t *budget)
{
    size_t min = SIZE_MAX;
    if (*budget) return TT_OK;
    tt__device_group *c = tt__find_devices(ctx, device);
    if (!c) return ctx->status;
    if (c->kind->host || !c->kind->backend)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "the largest batch for {device '%s'} depends on "
                        "{memory_budget}, which is not set: set it%s", c->name, c->kind->host ? "" :
                        ", because this build cannot ask the device for its free memory");
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

/* Plans a program for batch size n. Returns TT_OK and sets *bytes to the bytes of the plan, or returns an
   error: TT_ERR_BUDGET if the plan exceeds the budget. */
typedef tt_status (*tt__try_size)(void *arg, int64_t n, tt__attempt *attempt, size_t *bytes);

/* Estimates the batch size whose plan needs `budget` bytes, by the line through the plans for batch sizes
   `from` and `to`. Rounds down; returns 0 if the line does not rise. */
static double tt__line_meets(double from, double from_bytes, double to, double to_bytes, double budget)
{
    const double rise = (to_bytes - from_bytes) / (to - from);
    return rise > 0 ? floor(to + (budget - to_bytes) / rise) : 0;
}

/* Returns the largest batch size n, at most `max`, whose plan with options *o fits the budget; 0 after an
   error or if none fits. Sets o->memory_budget, if it is 0, to the bytes that the device has. The bytes of a
   plan grow almost linearly with n, and the error about a plan that does not fit names its bytes, too. So the
   next n to try is where the line through the two nearest plans reaches the budget. If the line does not rise
   (a larger n may need fewer bytes), the search assumes bytes proportional to n. */
static int64_t tt__largest_size(tt_context *ctx, tt_compile_options *o, int64_t max, tt__try_size try_size,
                                void *arg)
{
    tt__attempt attempt = {true, !o->memory_budget, false, false, 0, 0};
    tt_status status = tt__budget_on(ctx, o->device, &o->memory_budget);
    const double budget = (double)o->memory_budget;
    int64_t fits = 0, fails = max + 1, next = 1;
    double bytes = 0, needs = 0; /* bytes of the plans for sizes `fits` and `fails`; 0: unknown */
    int slow = 0; /* number of trials in a row that did not halve the gap between `fits` and `fails` */
    int64_t up = 1; /* next step up from `fits` if there is no estimate */
    if (status != TT_OK) return 0;
    if (max < 1)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "the largest batch: max is %lld, but must be at least 1",
                        (long long)max),
               0;
    while (fails - fits > 1) {
        const int64_t gap = fails - fits;
        size_t now = 0;
        double guess = 0;
        attempt.needs = 0;
        status = try_size(arg, next, &attempt, &now);
        if (status != TT_OK && (status != TT_ERR_BUDGET || next == 1)) break;
        if (status == TT_OK) {
            if (fits) guess = tt__line_meets((double)fits, bytes, (double)next, (double)now, budget);
            if (guess <= (double)next) guess = floor((double)next * (budget / (double)now));
            fits = next, bytes = (double)now;
        } else {
            fails = next, needs = (double)attempt.needs;
        }
        if (needs > bytes && fits)
            guess = tt__line_meets((double)fits, bytes, (double)fails, needs, budget);
        slow = 2 * (fails - fits) > gap ? slow + 1 : 0;
        guess = fmin(guess, 16.0 * (double)fits); /* bounded, because most bytes do not depend on n if n is
                                                     small */
        if (fails <= max && slow > 2) guess = 0, slow = 0;
        const bool halve = guess <= 0 && fails <= max;
        next = halve ? fits + (fails - fits) / 2 : guess > (double)fits ? (int64_t)guess : fits + up;
        up = !halve && next == fits + up ? 2 * up : 1;
        if (next >= fails) next = fails - 1;
    }
    return status == TT_OK || status == TT_ERR_BUDGET ? fits : 0;
}

typedef struct tt__batch_of {
    tt_context *ctx;
    tt_value (*record)(void *user, tt_tape *t, int64_t n);
    void *user;
    tt_compile_options options;
} tt__batch_of;

static tt_status tt__try_batch(void *arg, int64_t n, tt__attempt *attempt, size_t *bytes)
{
    const tt__batch_of *b = (const tt__batch_of *)arg;
    tt_tape *t = tt_tape_new(b->ctx);
    if (!t) return TT_ERR_MEMORY;
    const tt_value root = b->record(b->user, t, n);
    tt_program *p = tt__try_compile(t, root, &b->options, attempt);
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
    return tt__largest_size(ctx, &b.options, max, tt__try_batch, &b);
}
