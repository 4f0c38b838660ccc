#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/linear/rules.h"
#include "../ops/elementwise/rules.h"
#include "../passes/precision.h"
#include "../plan/place.h"
#include "../ranks/threads.h"
#include "../ranks/processes.h"
#include "../ranks/groups.h"
#include "../ranks/collectives.h"
#include "../compile/program.h"
#include "ranks.h"
#include "memory.h"
#include "inputs.h"
#include "collectives.h"
#include "processes.h"
#include "stages.h"

/* -------------------------------------------------------------------------------------------------- launches
   Runs a segment of a program on one rank: launches its instructions in order, on streams with events between
   them, or replays a recording of the launches. */

/* The progress of a rank through a segment. */
typedef struct tt__rank_progress {
    tt__launch like;        /* fields that all launches of the rank have in common */
    bool absent;            /* the rank has no micro-batch, so it runs only instructions that all ranks run
                               (tt__instr.always) */
    bool later;             /* the run adds to gradients of earlier micro-batches */
    /* `met`: the ranks (data ranks, tensor ranks, ...) that have passed a barrier on stream `met_stream` and
       have launched nothing since. `met` and `met_stream` are equal on all these ranks, also on ranks without
       a micro-batch. */
    tt__over met;
    int met_stream;
} tt__rank_progress;

static bool tt__is_left_out(const tt__rank_progress *at, const tt__instr *i)
{
    return (at->absent && !i->always) || (i->later && !at->later);
}

/* Waits until instruction k is done on rank 0. Computes the seconds since its launch, which was at time
   `begin`, and keeps them if they are the fewest so far. */
static tt_status tt__note_time(const tt_program *p, int k, double begin)
{
    const tt__device_group *c = p->settings.group;
    double *min = &p->ctx->profile[k];
    tt_status status = tt__device_status(p->ctx, c, 0, c->kind->backend->wait(c->device[0]));
    *min = fmin(*min, tt__seconds() - begin);
    return status;
}

/* Returns whether instruction k is launched in one call with the next instruction, another op that reads k's
   result. The device then runs both in one kernel if it can. Returns false if work is needed between them. */
static bool tt__leads_to_next(const tt_program *p, int k)
{
    const tt__instr *i = &p->built.t->code[k], *next = i + 1;
    const bool alone = p->settings.kind->host || p->head->poison || p->ctx->profile || p->arena->paging;
    if (alone || tt__stages(p) > 1 || k + 1 >= tt__segment_first(p->built.t, i->segment + 1u)) return false;
    if (i->stream || next->stream || i->on_host || next->on_host) return false;
    if (i->with_next || next->with_next || i->later || next->later) return false;
    return i->always == next->always && next->in[0] == i->out[0] && tt__has_kernel_of_both(i, next);
}

/* Launches instruction k, and the instructions that run together with k, in one call. */
static tt_status tt__launch_together(tt_program *p, int rank, tt__rank_progress *at, int k)
{
    tt_status status = TT_OK;
    const tt__rank *r = &p->rank[rank];
    const tt__instr *i = &p->built.t->code[k];
    const size_t peers = 2 * (size_t)tt__max(p->settings.group->ranks, tt__slots(p));
    const bool pair = i->move.from != i->move.to, together = tt__is_collective(i);
    const bool nothing = i->move.over && tt__present(p, rank, i, 1) == 0;
    const bool met = at->met == i->move.over && at->met_stream == i->stream && !pair;
    const bool timed = p->ctx->profile && rank == 0;
    const double begin = timed ? tt__seconds() : 0;
    int some = 0; /* number of launches that are not empty */
    if (p->settings.group->rank_group)
        tt__rank_group_note(p->settings.group->rank_group, rank, tt__instr_name(i),
                       p->built.t->values[i->out[0] ? i->out[0] : i->in[0]].name);
    for (int n = 0; n == 0 || i[n - 1].with_next || (n == 1 && tt__leads_to_next(p, k)); n++) {
        tt__launch *l = &r->launches[some];
        if (tt__is_left_out(at, &i[n])) continue;
        *l = at->like;
        tt__set_launch(p, rank, &i[n], l, r->peers + (size_t)some * peers);
        const bool empty = tt__is_empty(&l->in[0]) || tt__is_empty(&l->out[0]);
        if (together || !empty) some++;
        else if (status == TT_OK) status = tt__sum_nothing(p, rank, l);
    }
    if (status != TT_OK) return status;
    if (some > 1 && tt__is(i, TT__PRODUCT)) some = tt__join_launches(r->launches, some);
    if (some && pair && i->move.over == TT__OVER_STAGES)
        status = tt__pass_on(p, rank, r->launches);
    else if (some && !nothing && together)
        status = tt__launch_collective(p, rank, r->launches, some, met);
    else if (some && !nothing)
        status = tt__launch_alone(p, rank, r->launches, some);
    at->met = together && !pair && !nothing ? i->move.over : TT__ALONE;
    at->met_stream = i->stream;
    return timed && status == TT_OK ? tt__note_time(p, k, begin) : status;
}

/* Returns whether work on other streams runs as late as possible, at its WAIT: a mode for tests. */
static bool tt__runs_late(const tt_program *p) { return p->ctx->late && p->settings.kind->host; }

/* Starts instruction k on its stream, after all work on the computation stream so far. */
static tt_status tt__start(tt_program *p, int rank, tt__rank_progress *at, int k)
{
    const tt__device_group *c = p->settings.group;
    const tt__backend *b = c->kind->backend;
    tt__device *d = c->device[rank];
    tt__rank *r = &p->rank[rank];
    const int stream = p->built.t->code[k].stream;
    tt__started *x = r->started;
    if (tt__is_left_out(at, &p->built.t->code[k])) { /* `met` must change here as on ranks that launch k */
        if (!tt__runs_late(p)) at->met = TT__ALONE;
        return TT_OK;
    }
    while (x->at) x++;
    tt_status status = b->mark(d, TT__COMPUTE_STREAM, &r->ready);
    if (status == TT_OK) status = b->after(d, stream, r->ready);
    status = tt__device_status(p->ctx, c, rank, status);
    if (status == TT_OK && !tt__runs_late(p)) status = tt__launch_together(p, rank, at, k);
    if (status != TT_OK) return status;
    x->at = k + 1;
    return tt__device_status(p->ctx, c, rank, b->mark(d, stream, &x->done));
}

/* Runs WAIT instruction k: the computation stream waits for the work on another stream whose result is
   in[0]. */
static tt_status tt__finish(tt_program *p, int rank, tt__rank_progress *at, int k)
{
    const tt__device_group *c = p->settings.group;
    const tt__instr *code = p->built.t->code;
    tt__rank *r = &p->rank[rank];
    tt__started *x = r->started, *const end = x + p->built.in_flight;
    while (x < end && !(x->at && code[x->at - 1].out[0] == code[k].in[0])) x++;
    at->met = TT__ALONE;
    if (x == end) return TT_OK; /* this rank has not started the work */
    const int started = x->at - 1;
    x->at = 0;
    if (tt__runs_late(p)) return tt__launch_together(p, rank, at, started);
    return tt__device_status(p->ctx, c, rank,
                             c->kind->backend->after(c->device[rank], TT__COMPUTE_STREAM, x->done));
}

/* Consecutive instructions [first, end) of a segment, which are launched or recorded together. */
typedef struct tt__stretch { tt__segment segment; int first, end; } tt__stretch;

static tt__stretch tt__whole_segment(const tt_program *p, tt__segment segment)
{
    const tt_tape *t = p->built.t;
    const tt__stretch s = {segment, tt__segment_first(t, segment), tt__segment_first(t, segment + 1u)};
    return s;
}

/* Launches the instructions of a stretch on a rank. A rank without a micro-batch launches only instructions
   that all ranks run together. */
static tt_status tt__launch_stretch(tt_program *p, int rank, const tt__launch *like, const tt__stretch *s)
{
    tt_status status = TT_OK;
    const tt__now *now = &p->rank[rank].now;
    const bool absent = s->segment <= TT__EACH_BACKWARD && tt__data_rank(p, rank) >= now->present;
    tt__rank_progress at = {*like, absent, now->later, TT__ALONE, TT__COMPUTE_STREAM};
    tt__windows windows = {s->first, s->end, {0}, 0, 0};
    for (int k = 0; k < p->built.in_flight; k++) p->rank[rank].started[k].at = 0; /* entries may remain after
                                                                                     a failure */
    for (int k = s->first, n; k < s->end && status == TT_OK; k += n) {
        const tt__instr *i = &p->built.t->code[k];
        if ((status = tt__enter_window(p, &windows, k)) != TT_OK) return status; /* may clear with_next of
                                                                                    instruction k */
        tt__go_on_passing(p, rank);
        for (n = 1; i[n - 1].with_next || (n == 1 && tt__leads_to_next(p, k)); n++) {}
        if (tt__is(i, TT__WAITS)) status = tt__finish(p, rank, &at, k);
        else if (i->stream != TT__COMPUTE_STREAM) status = tt__start(p, rank, &at, k);
        else status = tt__launch_together(p, rank, &at, k);
        for (int j = 0; j < n && p->head->poison && status == TT_OK; j++) tt__poison(p, rank, k + j);
    }
    return status;
}

/* Records the launches of stretch s in x->made. After an error, x->made is NULL, and `why` has the error. */
static void tt__record_stretch(tt_program *p, int rank, tt__launch *l, const tt__stretch *s, tt__recording *x,
                               char why[512])
{
    const tt__backend *b = p->settings.kind->backend;
    tt__device *d = p->settings.group->device[rank];
    tt_status status = b->capture(d);
    const bool began = status == TT_OK;
    if (began) status = tt__launch_stretch(p, rank, l, s);
    if (status != TT_OK) snprintf(why, 512, "%s", b->error(d)); /* before captured() replaces the error */
    if (began) x->made = b->captured(d);                        /* ends the capture, even after an error */
    if (status == TT_OK && !x->made) snprintf(why, 512, "%s", b->error(d));
    if (status == TT_OK || !x->made) return;
    b->forget(d, x->made);
    x->made = NULL;
}

/* Marks the inputs, on all ranks, whose bytes a segment is about to overwrite. */
static void tt__overwrite_segment(const tt_program *p, tt__segment segment)
{
    const tt_tape *t = p->built.t;
    const tt_program *reader = segment == TT__EACH_MICRO ? p : NULL; /* the update reads no inputs */
    if (p->stages > 1) return; /* a pipeline keeps copies of its inputs */
    const int first = tt__segment_first(t, segment), end = tt__segment_first(t, segment + 1u);
    for (int k = 0; k < p->built.n_boxes; k++) {
        const tt__box *box = &p->built.box[k];
        if (box->space != TT__DEVICE || box->first >= end || box->last < first) continue;
        for (int r = 0; r < p->settings.group->ranks; r++)
            tt__overwrite(p->arena, reader, r, box->place, box->bytes);
    }
}

/* Returns whether the host has work between the launches of a segment, so that they cannot be recorded: ranks
   wait for one another in collectives, or the CPU runs an instruction. */
static bool tt__needs_host(const tt_program *p, tt__segment segment)
{
    const int end = tt__segment_first(p->built.t, segment + 1u);
    for (int k = tt__segment_first(p->built.t, segment); k < end; k++) {
        const tt__instr *i = &p->built.t->code[k];
        if (i->on_host || (p->settings.group->ranks > 1 && tt__is_collective(i))) return true;
    }
    return false;
}

/* Writes the settings of the step and, if `scale`, the loss scale to a rank's memory. */
static tt_status tt__write_settings(tt_program *p, int rank, bool scale)
{
    const tt_tape *t = p->built.t;
    const tt__results *results = &p->head->results;
    tt__step_settings run = p->head->run;
    tt_status status = TT_OK;
    run.micro = p->rank[rank].now.round * p->arena->data + tt__data_rank(p, rank);
    if (t->run) status = tt__write_value(p, rank, t->run, &run, sizeof run);
    if (status == TT_OK && t->scale && scale)
        status = tt__write_value(p, rank, t->results, results, sizeof *results);
    return status;
}

/* Returns a launch with the fields that all launches of a rank have in common. */
static tt__launch tt__launch_on(const tt_program *p, int rank)
{
    tt__launch l;
    memset(&l, 0, sizeof l);
    l.device = p->settings.group->device[rank];
    l.tape = p->built.t;
    l.tf32 = p->settings.matmul == TT__MATMUL_TF32;
    l.tuned = p->tunes;
    l.resident = p->arena->memory[rank];
    return l;
}

/* Runs a stretch on a rank. If a device can record launches, the second of several equal runs is recorded,
   and later runs replay the recording. A rank on which recording fails never records again. */
static tt_status tt__run_stretch(tt_program *p, int rank, tt__launch *l, const tt__stretch *s)
{
    const tt__device_group *c = p->settings.group;
    const tt__backend *b = c->kind->backend;
    tt__rank *r = &p->rank[rank];
    char why[512] = "";
    tt_status status = TT_OK;
    const bool absent = s->segment == TT__EACH_MICRO && tt__data_rank(p, rank) >= r->now.present;
    /* a recording (CUDA graph) cannot prefetch managed memory */
    const bool can_record = b->capture && !r->never_records && !p->arena->paging && !p->ctx->profiles;
    const bool records = can_record && !absent && !tt__needs_host(p, s->segment);
    tt__recording *x = records ? tt__recording_of(p, rank, s->segment, s->first) : NULL;
    if (x && !x->made) tt__record_stretch(p, rank, l, s, x, why);
    if (x && x->made) status = tt__device_status(p->ctx, c, rank, b->replay(l->device, x->made));
    else status = tt__launch_stretch(p, rank, l, s);
    if (status == TT_OK && *why) {
        r->never_records = true;
        snprintf(r->why, sizeof r->why, "%.255s", why);
    }
    return status;
}

/* Returns the end of the first of two parts of stretch s: after the last instruction that writes the step's
   results. The host can read the results while the second part updates parameters, and can launch the next
   step before the updates end. Returns s->end, so that there is no second part, in three cases: results are
   not read later; work on another stream is in flight there; or the instruction there is launched together
   with the next one. */
static int tt__results_end(const tt_program *p, const tt__stretch *s)
{
    const tt_tape *t = p->built.t;
    int end = s->first, started = 0;
    if (s->segment != TT__EACH_STEP || !tt__reads_later(p) || p->arena->paging) return s->end;
    for (int k = s->first; k < s->end; k++)
        for (int j = 0; j < TT__MAX_OUT; j++)
            if (t->code[k].out[j] && t->values[t->code[k].out[j]].base == t->results) end = k + 1;
    for (int k = s->first; k < end; k++) {
        if (tt__is(&t->code[k], TT__WAITS)) started--;
        else started += t->code[k].stream != TT__COMPUTE_STREAM;
    }
    const bool together = end > s->first && (t->code[end - 1].with_next || tt__leads_to_next(p, end - 1));
    return started || together || end == s->first ? s->end : end;
}

/* Starts to copy a step's results to the host, on a stream beside the next computations. */
static tt_status tt__send_results(tt_program *p, int rank)
{
    const tt__device_group *c = p->settings.group;
    const tt__backend *b = c->kind->backend;
    tt__device *d = c->device[rank];
    tt__rank *r = &p->rank[rank];
    const void *from = tt__resolve(p, rank, p->built.t->results).data;
    tt_status status = b->mark(d, TT__COMPUTE_STREAM, &r->ready);
    if (status == TT_OK) status = b->after(d, TT__OUT_STREAM, r->ready);
    if (status == TT_OK) status = b->copy(d, TT__OUT_STREAM, r->found, from, sizeof *r->found);
    if (status == TT_OK) status = b->mark(d, TT__OUT_STREAM, &r->has_found);
    return tt__device_status(p->ctx, c, rank, status);
}

/* A segment to run on all ranks. sends: the first rank copies the results to the host. */
typedef struct tt__segment_job { tt_program *p; tt__segment segment; bool sends; } tt__segment_job;

/* Runs a segment on a rank. arg: the tt__segment_job. */
static tt_status tt__run_rank(void *arg, int rank)
{
    const tt__segment_job *job = (const tt__segment_job *)arg;
    tt_program *p = tt__stage_of(job->p, rank);
    const tt__device_group *c = p->settings.group;
    const tt__stretch all = tt__whole_segment(p, job->segment);
    const bool sends = job->sends && rank == tt__first_of(p, 0);
    tt__stretch s = all;
    tt__rank *r = &p->rank[rank];
    tt__launch l = tt__launch_on(p, rank);
    tt__float_mode mode = tt__float_default();
    r->now = tt__now_of(job->p);
    r->now.later = tt__adds_later(job->p, job->segment);
    s.end = tt__results_end(p, &all);
    tt_status status = tt__write_settings(p, rank, !job->p->scale_set);
    if (status == TT_OK && job->segment == TT__EACH_MICRO) status = tt__take_arrivals(p, rank);
    if (status == TT_OK) status = tt__run_stretch(p, rank, &l, &s);
    if (status == TT_OK && sends) status = tt__send_results(p, rank);
    s.first = s.end;
    s.end = all.end;
    if (status == TT_OK && s.first < s.end) status = tt__run_stretch(p, rank, &l, &s);
    if (status == TT_OK && sends) /* later work may overwrite the results */
        status = tt__device_status(p->ctx, c, rank,
                                   c->kind->backend->after(l.device, TT__COMPUTE_STREAM, r->has_found));
    tt__float_restore(mode);
    return status;
}

/* Logs a warning for each device that cannot record launches. */
static void tt__tell_graphs(tt_program *p)
{
    char device[32];
    const tt__device_group *c = p->settings.group;
    for (int r = c->first; r < c->first + c->local; r++) {
        if (!p->rank[r].why[0]) continue;
        tt__log(p->ctx, TT_LOG_WARNING, "graph", "device '%s' cannot record the launches of a step as one "
                "graph, so this program makes them one by one, which is slower: %s",
                tt__device_name(c->kind, c->index[r], device), p->rank[r].why);
        p->rank[r].why[0] = 0;
    }
}

/* Makes all processes agree on whether a micro-batch's inputs are valid, and adds up all ranks' FLOPs. */
static tt_status tt__agree_flops(tt_program *p, tt_status status)
{
    const tt__device_group *c = p->settings.group;
    double flops = 0;
    for (int r = c->first; r < c->first + c->local && status == TT_OK; r++) flops += p->rank[r].flops;
    status = tt__agree(p->ctx, "a micro-batch", status, &flops, sizeof flops);
    for (int k = 0; k < c->ranks / c->local && status == TT_OK; k++)
        p->flops += *(const double *)tt__noted(p->ctx, k, &flops);
    return status;
}
