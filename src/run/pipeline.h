#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../plan/place.h"
#include "../context/devices.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "ranks.h"
#include "inputs.h"
#include "stages.h"
#include "launch.h"
#include "tune.h"
#include "results.h"

/* ---- a pipeline: keeps its micro-batches, and runs them all at the step's end */

/* Returns the number of the micro-batch that a stage runs in its action number k, and sets *backward to
   whether the action is a backward. A stage has two actions for each of `micros` micro-batches: forward and
   backward. ahead: number of forwards before forwards and backwards alternate. */
static int64_t tt__pipeline_action(int64_t k, int64_t micros, int64_t ahead, bool *backward)
{
    const int64_t first = tt__min(ahead, micros), both = 2 * (micros - first);
    *backward = k >= first && (k >= first + both || (k - first) % 2 == 1);
    if (k < first) return k;
    return k >= first + both ? k - micros : *backward ? (k - first) / 2 : first + (k - first) / 2;
}

/* Accepts the next micro-batch of a pipeline: checks and keeps its inputs, until tt__run_pipeline runs it. */
static tt_status tt__feed(tt_program *p)
{
    const int max = p->settings.options.parallel.micros;
    tt_status status = tt_allocate(p);
    if (status == TT_OK && p->settings.options.train && max && p->round >= max) {
        tt__forget_inputs(p);
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "a step has more than {parallel.micros = %d} micro-batches "
                        "on a data rank, but the pipeline was planned for at most %d: set {parallel.micros} "
                        "higher", max, max);
    }
    if (status == TT_OK) status = tt__inputs_ready(p);
    if (status != TT_OK) return status;
    for (int d = 0; d < p->present; d++) { /* keeps the numbers of rows of all axes */
        const int64_t *rows = p->rank[tt__first_of(p, d)].axis_rows;
        memcpy(p->queued[p->round * p->arena->data + d].rows, rows, sizeof *rows * (size_t)p->n_axes);
    }
    status = tt__check_whole(p->ctx, p->arena);
    if (status == TT_OK) status = tt__on_ranks(p->ctx, p->settings.group, tt__check_inputs, p);
    tt__forget_inputs(p);
    status = tt__agree_flops(p, status);
    if (status == TT_OK) tt__begin_micro(p);
    return status;
}

/* Writes the kept inputs of a rank's current micro-batch to the rank's memory. */
static tt_status tt__write_queued(tt_program *p, int rank)
{
    const tt__now *now = &p->rank[rank].now;
    const tt__queued *f = tt__queued_at(p, now->round, rank);
    tt_status status = TT_OK;
    if (tt__data_rank(p, rank) >= now->present) return TT_OK;
    for (int32_t v = 1; v < p->head->n_recorded && status == TT_OK; v++) {
        const tt__tape_value *x = &p->built.t->values[v];
        if (x->storage != TT__INPUT || x->base != v || x->place == TT__NO_PLACE) continue;
        const size_t row = (size_t)x->shape.cols * tt_dtype_bytes(x->shape.dtype);
        status = tt__write_value(p, rank, v, f->inputs + p->head->queued_at[v],
                                 (size_t)tt__actual_rows(p, now, rank, v) * row);
    }
    return status;
}

/* Runs all micro-batches of a step on a rank of a pipeline. arg: the program. */
static tt_status tt__run_stage(void *arg, int rank)
{
    const tt_program *head = (const tt_program *)arg;
    const bool train = head->settings.options.train;
    const int64_t micros = head->round, slots = tt__slots(head);
    tt_program *p = tt__stage_of(head, rank);
    tt__now *now = &p->rank[rank].now;
    tt__launch l = tt__launch_on(p, rank);
    tt_status status = TT_OK;
    tt__float_mode mode = tt__float_default();
    l.tuned = false; /* products are timed only after these micro-batches (tt__tune_products) */
    for (int64_t k = 0; k < (train ? 2 : 1) * micros && status == TT_OK; k++) {
        bool backward = false;
        now->round = train ? tt__pipeline_action(k, micros, p->settings.in_flight - 1, &backward) : k;
        now->present = now->round == micros - 1 ? head->present : p->arena->data;
        now->later = now->round >= slots;
        const tt__segment segment = backward ? TT__EACH_BACKWARD : TT__EACH_MICRO;
        status = tt__await_taken(p, rank, segment);
        if (status == TT_OK && !backward) status = tt__write_queued(p, rank);
        if (status == TT_OK) status = tt__write_settings(p, rank, !k && !head->scale_set);
        const tt__stretch all = tt__whole_segment(p, segment);
        if (status == TT_OK) status = tt__launch_stretch(p, rank, &l, &all);
    }
    for (int k = 0; k < 2 * p->settings.in_flight && status == TT_OK; k++)
        if (p->rank[rank].passed[k / 2].parts[k % 2]) status = tt__await_passed(p, rank, k % 2, k / 2);
    tt__float_restore(mode);
    return status;
}

/* Runs the micro-batches that a pipeline has kept. */
static tt_status tt__run_pipeline(tt_program *p)
{
    tt_status status = tt__check_whole(p->ctx, p->arena);
    if (status == TT_OK) status = tt__zero_states(p);
    p->arena->results_of = NULL;
    if (status == TT_OK) status = tt__run_on_ranks(p, tt__run_stage, p);
    if (status != TT_OK) return status;
    p->arena->results_of = p;
    p->last_round = p->round - 1;
    return TT_OK;
}

/* Runs one micro-batch on each data rank that has one: the forward and, in training, the backward. wanted:
   waits until the device has computed the results, and checks the loss. Otherwise, on a device, a loss that
   is not finite is noticed only at the end of the step. */
static tt_status tt__micro(tt_program *p, bool wanted)
{
    const bool train = p->settings.options.train;
    int bad = 0; /* the first data rank with a loss that is not finite */
    if (p->stages > 1) return tt__feed(p);
    tt_status status = tt_allocate(p);
    if (status == TT_OK) status = tt__inputs_ready(p);
    if (status != TT_OK) return status;
    tt__begin_micro(p);
    status = tt__run_segment(p, TT__EACH_MICRO, false);
    tt__forget_inputs(p);
    if (status == TT_OK && (wanted || p->settings.kind->host)) {
        status = train ? tt__read_counts(p, &bad) : tt__read_results(p);
    }
    const int64_t number = p->round * p->arena->data + bad; /* number of the micro-batch in the step */
    return status == TT_OK && train ? tt__check_loss(p, number) : status;
}

/* Runs the segment that sums the slots at the end of a lap, if the program has one. */
static tt_status tt__run_lap(tt_program *p)
{
    const tt_tape *t = p->built.t;
    const bool any = tt__segment_first(t, TT__EACH_LAP) < tt__segment_first(t, TT__EACH_STEP);
    return any ? tt__run_segment(p, TT__EACH_LAP, false) : TT_OK;
}

/* Ends a round, in which each data rank has run one micro-batch. If the round ends a lap, sums the leaves of
   the lap. */
static tt_status tt__end_round(tt_program *p)
{
    p->round++;
    return p->round % tt__slots(p) ? TT_OK : tt__run_lap(p);
}

/* Runs the forward of a program that does not train, with the random numbers of a step's round. */
static tt_status tt__run_round(tt_program *p, int64_t step, int64_t round)
{
    tt__begin_step(p);
    p->run.step = step;
    p->round = round;
    const tt_status status = tt__micro(p, true);
    p->round = 0;
    return status;
}

tt_status tt_run(tt_program *p, tt_stats *stats)
{
    if (p->settings.options.train)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_run: this program trains: use tt_step, or compile with "
                        "train = false");
    tt__begin_step(p);
    tt_status status = tt__micro(p, true);
    if (status == TT_OK && p->stages > 1) {
        p->round++;
        status = tt__run_pipeline(p);
        if (status == TT_OK) status = tt__read_results(p);
        p->round = 0;
    }
    if (status == TT_OK) tt__give_stats(p, stats, 0);
    return status;
}
