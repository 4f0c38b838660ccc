#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/linear/rules.h"
#include "../passes/overlap.h"
#include "../ranks/processes.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../context/devices.h"
#include "../compile/program.h"
#include "ranks.h"
#include "processes.h"
#include "stages.h"
#include "launch.h"

/* ---- timing of matrix products (tt_compile_options.tune) */

/* Returns the choices of a rank's device, which tell how it computes each matrix product, as text that the
   caller frees. NULL: out of memory. */
static char *tt__tuned_text(const tt_program *p, int rank)
{
    const tt__backend *b = p->settings.kind->backend;
    tt__device *d = p->settings.group->device[rank];
    const size_t length = b->tuned_text(d, NULL, 0);
    char *text = (char *)tt__alloc(p->ctx, length + 1);
    if (text) b->tuned_text(d, text, length + 1);
    return text;
}

/* Makes a rank's device compute each matrix product as `text` says (from tt__tuned_text). from: name of the
   text in errors. */
static tt_status tt__learn(const tt_program *p, int rank, const char *text, const char *from)
{
    const tt__backend *b = p->settings.kind->backend;
    tt__device *d = p->settings.group->device[rank];
    int line = 0;
    const tt_status status = b->learn(d, text, &line);
    if (status == TT_OK) return TT_OK;
    return tt__fail(p->ctx, status, "%s, line %d: %s", from, line, b->error(d));
}

/* Makes the devices of all ranks compute products as `text` says. Does nothing on devices without choices. */
static tt_status tt__learn_on_ranks(const tt_program *p, const char *text, const char *from)
{
    const tt__device_group *c = p->settings.group;
    tt_status status = TT_OK;
    for (int r = c->first; r < c->first + c->local && status == TT_OK; r++) {
        status = tt__learn(p, r, text, from);
        if (status == TT_ERR_UNSUPPORTED && r > c->first) status = TT_OK;
    }
    return status;
}

/* Tells a rank's device which matrix products the program computes with all axes at their capacity. If
   `times`, also times the products for which the device has no choice yet. Adds to *untimed the number of
   products for which memory did not suffice. */
static tt_status tt__tune_rank(tt_program *of, int rank, bool times, int *untimed)
{
    tt_program *p = tt__stage_of(of, rank);
    const tt_tape *t = p->built.t;
    tt__rank *r = &p->rank[rank];
    const tt__backend *b = p->settings.kind->backend;
    const size_t peers = 2 * (size_t)tt__max(p->settings.group->ranks, tt__slots(p));
    const tt__now before = r->now;
    const int64_t rounds = t->accumulate ? tt__slots(p) : 0; /* number of rounds of the first lap */
    int64_t *round = &r->now.round; /* goes through the first lap, and one round more, which adds to a slot */
    int64_t *rows = (int64_t *)tt__alloc(p->ctx, sizeof *rows * (size_t)(t->n_axes + 1));
    tt_status status = rows ? TT_OK : TT_ERR_MEMORY;
    const tt__launch like = tt__launch_on(p, rank);
    tt__rank_progress at = {like, false, false, TT__ALONE, TT__COMPUTE_STREAM};
    for (int32_t k = 0; k < t->n_axes && rows; k++) rows[k] = t->axes[k].capacity;
    r->now.rows = rows;
    for (*round = 0; *round <= rounds; ++*round) {
        r->now.later = at.later = *round && *round == rounds;
        for (int k = 0, n; k < t->n_code && status == TT_OK; k += n) {
            const tt__instr *i = &t->code[k];
            int some = 0;
            for (n = 1; i[n - 1].with_next; n++) {}
            if (i->on_host || tt__cost_of(i) != TT__COST_PRODUCT) continue;
            for (int j = 0; j < n; j++) {
                tt__launch *l = &r->launches[some];
                if (tt__is_left_out(&at, &i[j])) continue;
                *l = like;
                tt__set_launch(p, rank, &i[j], l, r->peers + (size_t)some * peers);
                some += !tt__is_empty(&l->in[0]) && !tt__is_empty(&l->out[0]);
            }
            if (some > 1 && tt__is(i, TT__PRODUCT)) some = tt__join_launches(r->launches, some);
            if (some)
                status = tt__device_status(p->ctx, p->settings.group, rank,
                                           b->tune(r->launches, some, times, untimed));
        }
    }
    r->now = before;
    tt__free(p->ctx, rows);
    return status;
}

/* Calls tt__tune_rank for all programs of the arena in which option `tune` is not "off". */
static tt_status tt__tune_arena(tt_program *p, int rank, bool times, int *untimed)
{
    tt_status status = TT_OK;
    for (tt_program *q = p->arena->programs; q && status == TT_OK; q = q->next)
        if (q->tunes) status = tt__tune_rank(q, rank, times, untimed);
    return status;
}

/* Times matrix products on one rank after another, in one process after another, so that a rank times only
   products that no earlier rank has timed. *text: the known choices, before and after the call. */
static tt_status tt__tune_in_turn(tt_program *p, char **text, int *untimed)
{
    tt_context *ctx = p->ctx;
    const tt__device_group *c = p->settings.group;
    tt_status status = TT_OK;
    for (int process = 0; process < tt_processes(ctx) && status == TT_OK; process++) {
        uint64_t bytes = 0;
        for (int r = c->first; r < c->first + c->local && process == tt_process(ctx); r++) {
            if (status == TT_OK && *text) status = tt__learn(p, r, *text, "the timings of other ranks");
            if (status == TT_ERR_UNSUPPORTED) { status = TT_OK; continue; }
            if (status == TT_OK) status = tt__tune_arena(p, r, true, untimed);
            if (status != TT_OK) break;
            tt__free(ctx, *text);
            if (!(*text = tt__tuned_text(p, r))) status = TT_ERR_MEMORY;
        }
        if (!ctx->net) continue;
        if (*text) bytes = strlen(*text) + 1;
        status = tt__agree(ctx, "timing products", status, &bytes, sizeof bytes);
        if (status != TT_OK) return status;
        bytes = *(const uint64_t *)tt__noted(ctx, process, &bytes);
        if (process != tt_process(ctx)) {
            tt__free(ctx, *text);
            *text = (char *)tt__alloc(ctx, bytes);
        }
        if (bytes && *text)
            status = tt__net_fetch(ctx, process, -1, "sharing the fastest products", *text, bytes);
        else if (bytes) status = tt__net_fail(ctx, TT_ERR_MEMORY);
    }
    return status;
}

/* Reads the choices of matrix products from a file. Sets *text to the contents, which the caller frees. If
   the file does not exist, leaves *text as it is. */
static tt_status tt__read_tuned(tt_context *ctx, const char *path, char **text)
{
    char folder[1024];
    const char *slash = strrchr(path, '/');
    const size_t length = slash ? (size_t)(slash - path) + (slash == path) : 1;
    tt__file_bytes file;
    bool there = false;
    if (length >= sizeof folder)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tune: the path '%.60s...' is too long: use a shorter one",
                        path);
    memcpy(folder, slash ? path : ".", length);
    folder[length] = 0;
    tt_status status = tt__folder_has(ctx, folder, slash ? slash + 1 : path, &there);
    if (status == TT_OK && there) status = tt__file_open(ctx, path, &file);
    if (status == TT_OK && there) *text = file.bytes;
    return status;
}

static tt_status tt__write_tuned(tt_context *ctx, const char *path, const char *text)
{
    tt__writer *w = (tt__writer *)tt__alloc(ctx, sizeof *w);
    if (!w) return TT_ERR_MEMORY;
    tt_status status = tt__writer_begin(w, ctx, path);
    if (status == TT_OK) tt__write(w, text, strlen(text));
    if (status == TT_OK) status = tt__writer_end(w);
    tt__free(ctx, w);
    return status;
}

/* Finds the fastest way to compute each matrix product of an arena's programs, before their first run. Writes
   to no memory that a program reads. */
static tt_status tt__tune_products(tt_program *p)
{
    tt_context *ctx = p->ctx;
    tt__arena *a = p->arena;
    const tt__device_group *c = p->settings.group;
    char *text = NULL, from[1100];
    int untimed = 0;
    const double begin = tt__seconds();
    tt_status status = TT_OK;
    if (a->tuned || !p->tunes || !p->settings.kind->backend->tune) return TT_OK;
    for (tt_program *q = a->programs; q && status == TT_OK; q = q->next)
        if (q->tunes) status = tt_allocate(q);
    if (status == TT_OK && !a->learnt && p->tune_file && tt_process(ctx) == 0) {
        status = tt__read_tuned(ctx, p->tune_file, &text);
        snprintf(from, sizeof from, "tune: '%s'", p->tune_file);
        if (status == TT_OK && text) status = tt__learn(p, c->first, text, from);
    }
    const size_t before = text ? strlen(text) : 0;
    status = tt__agree(ctx, "choosing the products to time", status, NULL, 0);
    if (status == TT_OK && !a->learnt) status = tt__tune_in_turn(p, &text, &untimed);
    if (status == TT_OK && text) status = tt__learn_on_ranks(p, text, "the timings of the ranks");
    for (int r = c->first; r < c->first + c->local && status == TT_OK; r++)
        status = tt__tune_arena(p, r, false, &untimed);
    const bool more = text && strlen(text) > before;
    if (status == TT_OK && more && p->tune_file && tt_process(ctx) == 0)
        status = tt__write_tuned(ctx, p->tune_file, text);
    status = tt__agree(ctx, "the end of timing products", status, NULL, 0);
    if (status == TT_OK && more)
        tt__log(ctx, TT_LOG_INFO, "tune", "matrix products were timed in %.2f s", tt__seconds() - begin);
    if (status == TT_OK && untimed)
        tt__log(ctx, TT_LOG_WARNING, "tune", "%d matrix products were not timed, because the device has no "
                "memory left for that: they use cuBLASLt's first choice", untimed);
    a->tuned = status == TT_OK;
    tt__free(ctx, text);
    return status;
}

/* Discards the recordings of all programs of an arena. Later runs record anew. */
static void tt__forget_recordings(tt_program *p)
{
    const tt__device_group *c = p->settings.group;
    for (tt_program *q = p->arena->programs; q; q = q->next)
        for (int r = c->first; r < c->first + c->local; r++)
            for (int k = 0; k < TT__RECORDINGS; k++) {
                tt__recording *x = &q->rank[r].recordings[k];
                if (x->made) c->kind->backend->forget(c->device[r], x->made);
                x->made = NULL;
            }
}

static tt_status tt__read_unread(tt_program *p);
/* Runs a function on all ranks. After an error, waits for the devices of all ranks. Then no device reads
   another device's memory or has unfinished work. */
static tt_status tt__run_on_ranks(tt_program *p, tt_status (*run)(void *arg, int rank), void *arg)
{
    tt__device_group *c = p->settings.group;
    tt_status status = tt__on_ranks(p->ctx, c, run, arg);
    if (status == TT_OK) p->scale_set = true;
    if (status == TT_OK) return status;
    for (int r = c->first; r < c->first + c->local; r++) c->kind->backend->wait(c->device[r]);
    return c->local < c->ranks ? tt__net_fail(p->ctx, status) : status;
}
