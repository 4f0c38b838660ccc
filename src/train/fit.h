#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ranks/processes.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "../compile/compile.h"
#include "../run/step.h"
#include "../run/state.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../models/preferences.h"
#include "features.h"
#include "trainer.h"
#include "evaluate.h"
#include "reference.h"
#include "state.h"
#include "ema.h"
#include "progress.h"
#include "picture.h"

/* ------------------------------------------------------------------------------------------------------- fit
   tt_fit runs epochs and validations, skips steps that fail, and saves and resumes states. */

/* Returns whether the run has done or skipped a step. */
static bool tt__fit_has_steps(const tt__fit_run *f) { return f->p.epoch > 0 || f->p.step > 0; }

static tt_status tt__fit_save_metrics(const tt__fit_run *f)
{
    char path[TT__PATH];
    tt_status status = tt__path_join(f->r->ctx, path, f->o.folder, "metrics.csv");
    return status == TT_OK ? tt__write_text(f->r->ctx, path, f->csv) : status;
}

/* Returns whether the training loss has diverged: the mean loss of the last 4 steps is more than 10 times the
   loss of the first step, plus 1. */
static bool tt__fit_has_diverged(const tt__fit_run *f)
{
    enum { LAST = 4 };
    double first = INFINITY, sum = 0;
    int n = 0;
    for (int k = f->points - 1; k >= 0; k--) {
        if (f->point[k].validation || isnan(f->point[k].value[TT__FIT_LOSS])) continue;
        first = f->point[k].value[TT__FIT_LOSS];
        if (n < LAST) sum += first, n++;
    }
    return sum / n > first + 9 * fabs(first) + 1;
}

/* Returns whether a run may resume from the current state: the loss has not diverged, and the last validation
   and the last step were finite. */
static bool tt__fit_is_sound(const tt__fit_run *f)
{
    const tt__fit_point *last = f->points ? &f->point[f->points - 1] : NULL;
    const bool finite = !last || !last->validation || !isnan(last->value[TT__FIT_LOSS]);
    return finite && !f->not_finite && !tt__fit_has_diverged(f);
}

/* Saves metrics, picture and state. Saves the metrics first, because a resumed run drops lines of metrics
   that are newer than its state. Once the loss has diverged, saves the state to a second file, so that the
   last state from before the divergence remains. If the loss recovers, only one state is left. */
static tt_status tt__fit_save(tt__fit_run *f)
{
    tt_context *ctx = f->r->ctx;
    const tt_files *files = &ctx->options.files;
    if (!f->o.folder) return TT_OK;
    tt_status status = tt__fit_save_metrics(f);
    if (status == TT_OK) status = tt__save_printed(ctx, f->o.folder, "loss.svg", tt__fit_draw, f);
    status = tt__agree(ctx, "saving metrics", status, NULL, 0);
    if (status == TT_OK && tt__fit_has_steps(f)) {
        const bool sound = tt__fit_is_sound(f), beside = !sound && f->has_state && f->state_is_sound;
        /* Removes the old diverged state first, so that the disk never holds three states. */
        if (beside && f->has_diverged) files->remove(files->user, f->diverged);
        status = tt_trainer_save(f->r, beside ? f->diverged : f->state, &f->p);
        if (!sound && !f->reported_diverged)
            tt__log(ctx, TT_LOG_WARNING, "fit", "the loss %s by step %lld: %s%s%s",
                    f->not_finite ? "is not finite any more" : "has diverged",
                    (long long)tt_trainer_steps(f->r),
                    beside ? "its state is saved in '" : "a lower learning rate may help",
                    beside ? f->diverged : "",
                    beside ? "', from which a resumed run continues; remove this file to continue from the "
                             "earlier state.safetensors" : "");
        f->reported_diverged = !sound;
        if (status == TT_OK && !beside) {
            if (f->has_diverged) files->remove(files->user, f->diverged);
            f->state_is_sound = sound;
        }
        if (status == TT_OK) {
            f->has_diverged = beside;
            f->has_state = true;
        }
    }
    f->saved = tt__seconds();
    return status;
}

/* Returns the step that is in the name of a kept state, state-STEP.safetensors. Returns -1 if the name is
   that of another file. */
static int64_t tt__kept_step(const char *name)
{
    static const char before[] = "state-", after[] = ".safetensors";
    const size_t length = strlen(name), around = sizeof before - 1 + sizeof after - 1;
    const size_t digits = length > around ? length - around : 0;
    if (!digits || digits > 18 || memcmp(name, before, sizeof before - 1) != 0) return -1;
    if (strspn(name + sizeof before - 1, "0123456789") != digits) return -1;
    if (strcmp(name + sizeof before - 1 + digits, after) != 0) return -1;
    return strtoll(name + sizeof before - 1, NULL, 10);
}

/* The kept states of a folder up to step `step`. count: their number; oldest: the lowest of their steps. */
typedef struct tt__kept_states { int64_t step, count, oldest; } tt__kept_states;

static bool tt__count_kept(void *arg, const char *name)
{
    tt__kept_states *k = (tt__kept_states *)arg;
    const int64_t step = tt__kept_step(name);
    if (step < 0 || step > k->step) return true; /* later states are those of an abandoned run */
    if (!k->count++ || step < k->oldest) k->oldest = step;
    return true;
}

static tt_status tt__kept_path(const tt__fit_run *f, int64_t step, char path[TT__PATH])
{
    char name[48];
    snprintf(name, sizeof name, "state-%lld.safetensors", (long long)step);
    return tt__path_join(f->r->ctx, path, f->o.folder, name);
}

/* Keeps the state after a validation under the number of its step, and removes the oldest kept states, so
   that o.keep_states remain. Keeps no state whose loss has diverged. */
static tt_status tt__fit_keep_state(tt__fit_run *f)
{
    tt_context *ctx = f->r->ctx;
    const tt_files *files = &ctx->options.files;
    tt__kept_states k = {tt_trainer_steps(f->r), 0, 0};
    char path[TT__PATH];
    if (!f->o.keep_states || !f->o.folder || f->has_diverged || !f->state_is_sound) return TT_OK;
    tt_status status = tt__kept_path(f, k.step, path);
    if (status == TT_OK) status = tt_trainer_save(f->r, path, &f->p);
    while (status == TT_OK && tt_process(ctx) == 0) {
        k.count = 0;
        files->list(files->user, f->o.folder, tt__count_kept, &k);
        if (k.count <= f->o.keep_states) break;
        status = tt__kept_path(f, k.oldest, path);
        if (status != TT_OK || !files->remove(files->user, path)) break;
    }
    return status;
}

/* Ends a run whose steps give no finite results any more because the weights have diverged. Keeps the state
   from before the divergence, and adds to the error message what may help. */
static void tt__fit_give_up(tt__fit_run *f)
{
    char error[sizeof f->r->ctx->error];
    tt_context *ctx = f->r->ctx;
    const tt_files *files = &ctx->options.files;
    const tt_status status = ctx->status;
    memcpy(error, ctx->error, sizeof error);
    tt_status saved = f->o.folder ? tt__fit_save_metrics(f) : TT_OK;
    if (saved == TT_OK && f->o.folder)
        saved = tt__save_printed(ctx, f->o.folder, "loss.svg", tt__fit_draw, f);
    if (saved != TT_OK)
        tt__log(ctx, TT_LOG_WARNING, "fit", "the metrics could not be saved either: %s", ctx->error);
    if (f->has_diverged) files->remove(files->user, f->diverged);
    int64_t steps = -1;
    if (f->has_state && tt__state_steps(ctx, f->state, &steps) != TT_OK) steps = -1;
    f->r->saved_steps = steps;
    const bool at_fault = steps >= 0 && !f->has_diverged && (!f->updated || !f->state_is_sound);
    if (steps < 0 && !f->updated)
        tt__fail(ctx, status, "%.850s; no step has updated anything, so the initial weights or the data are "
                 "at fault: check them", error);
    else if (steps < 0 || at_fault)
        tt__fail(ctx, status, "%.850s; %s start again with a lower learning rate", error,
                 steps < 0 ? "no state was saved before:" : "the saved state has diverged too:");
    else
        tt__fail(ctx, status, "%.850s; the state of step %lld is saved: resume it with a lower learning rate",
                 error, (long long)steps);
}

static void tt__fit_report(const tt__fit_run *f, const tt_stats *validation, bool best)
{
    tt_fit_event e;
    tt_stats epoch; /* sums of the epoch so far */
    if (!f->o.report) return;
    memset(&e, 0, sizeof e);
    memset(&epoch, 0, sizeof epoch);
    double seconds = tt__seconds() - f->started;
    int64_t done = tt__fit_total(f);
    epoch.loss = f->p.targets > 0 ? f->p.loss_sum / f->p.targets : 0;
    epoch.targets = f->p.targets;
    epoch.correct = f->p.correct;
    epoch.margin = f->margin_targets > 0 ? f->margin / f->margin_targets * epoch.targets : 0;
    e.epoch = f->p.epoch;
    e.epochs = f->o.epochs;
    e.step = f->p.step;
    e.steps = f->steps;
    e.loss = epoch.loss;
    e.metric_name = validation || f->metric.of ? f->metric.name : NULL;
    if (e.metric_name && validation) e.metric = f->values[f->by];
    else if (e.metric_name && epoch.targets > 0) e.metric = f->metric.of(&epoch);
    for (int k = 0; k < f->n_metrics; k++) e.margins |= f->r->model.metrics[k].of == tt__margin_of;
    const tt_stats *of = validation ? validation : &epoch;
    if (e.margins && of->targets > 0) e.margin = tt__margin_of(of);
    e.unit = f->unit;
    e.per_second = seconds > 0 ? f->items / seconds : 0;
    e.of_peak = seconds > 0 && f->peak > 0 ? f->flops / seconds / f->peak : 0;
    if (e.of_peak > 1) e.of_peak = 0; /* a busy machine made the measured peak too low */
    double each = done > f->first_step ? seconds / (double)(done - f->first_step) : 0;
    e.seconds_left = each * (double)(f->o.epochs * f->steps - done);
    e.validation = validation;
    e.best = best;
    e.worse = f->p.worse;
    e.patience = f->o.patience;
    f->o.report(f->o.user, &e);
}

/* Warns once if the first step of an epoch had fewer micro-batches than there are data ranks. */
static void tt__fit_tell_idle(tt__fit_run *f, int micros)
{
    if (f->p.step > 0 || micros >= f->r->data || f->reported_idle) return;
    f->reported_idle = true;
    tt__log(f->r->ctx, TT_LOG_WARNING, "fit", "the steps of the source have %d micro-batch%s for %d data "
            "ranks, so some data ranks have nothing to do: give the loader the trainer's tt_parallel", micros,
            micros > 1 ? "es" : "", f->r->data);
}

/* Adds the last step to the counts and the metrics, if its results are known and not yet counted. */
static tt_status tt__fit_count_step(tt__fit_run *f)
{
    const tt_program *p = f->r->train;
    const tt_stats *s = &p->done;
    if (!f->last.any || p->reads == f->last.reads) return TT_OK;
    f->last.any = false;
    f->in_row = f->not_finite = 0;
    f->updated++;
    f->items += f->last.items;
    f->flops += s->flops;
    f->p.step++;
    f->p.loss_sum += s->loss * s->targets;
    f->p.targets += s->targets;
    f->p.correct += s->correct;
    f->margin += s->margin;
    f->margin_targets += s->targets;
    const double now = tt__seconds();
    tt_status status = tt__fit_metrics(f, s, false, f->last.lr, f->last.items, now - f->began);
    tt__fit_report(f, NULL, false);
    f->began = now;
    return status;
}

/* Fails because too many steps in a row were skipped. */
static tt_status tt__fit_stuck(const tt__fit_run *f)
{
    return tt__fail(f->r->ctx, TT_ERR_NUMERIC, "%d step%s in a row updated nothing; the last: %.800s",
                    f->in_row, f->in_row > 1 ? "s" : "", f->why);
}

/* Skips a step that updated nothing because none of its targets counts, or because the loss or a gradient is
   not finite. Counts the step like a step that loss scaling skips. Fails after too many skipped steps in a
   row. If `status`, the step's error, has another cause, returns `status`. lr: the step's learning rate. */
static tt_status tt__fit_skip(tt__fit_run *f, tt_status status, float lr)
{
    enum { MAX_IN_A_ROW = 10 };
    tt_context *ctx = f->r->ctx;
    tt_program *p = f->r->train;
    tt_stats s;
    if (status != TT_ERR_NUMERIC || (p->outcome != TT__NO_TARGET && p->outcome != TT__NOT_FINITE)) {
        f->not_finite += status == TT_ERR_NUMERIC;
        return status;
    }
    memcpy(f->why, ctx->error, sizeof f->why);
    tt__skip_step(p);
    tt__trainer_discard_step(f->r);
    f->r->step_failed = f->last.any = false;
    f->p.step++;
    f->in_row++;
    f->not_finite += p->outcome == TT__NOT_FINITE;
    memset(&s, 0, sizeof s);
    s.loss = s.correct = NAN;
    s.step = p->run.step;
    s.loss_scale = p->results.scale.scale;
    s.skipped = p->done.skipped;
    const double now = tt__seconds();
    const tt_status written = tt__fit_metrics(f, &s, false, lr, 0, now - f->began);
    tt__fit_report(f, NULL, false);
    f->began = now;
    if (written != TT_OK) return written;
    if (f->in_row >= tt__min(MAX_IN_A_ROW, f->steps)) return tt__fit_stuck(f);
    if (!f->reported_skipped)
        tt__log(ctx, TT_LOG_WARNING, "fit",
                "%s; the step is skipped, and later ones like it without a warning", f->why);
    f->reported_skipped = true;
    return tt__from_source(ctx, f->train, f->p.epoch, f->p.step, NULL, NULL);
}

/* Waits for the last step, and counts or skips that step. */
static tt_status tt__fit_last_step(tt__fit_run *f)
{
    tt_status status = f->last.any ? tt_wait(f->r->train, NULL) : TT_OK;
    if (status == TT_OK) status = tt__fit_count_step(f);
    else status = tt__fit_skip(f, status, f->last.lr);
    f->last.any = false;
    return status;
}

/* Returns whether a validation with this value of the metric and this loss is better than the best so far. */
static bool tt__fit_better(const tt__fit_run *f, double value, double loss)
{
    const bool lower = !f->best_by_metric || f->metric.lower_is_better;
    if (value == f->p.best) return loss < f->p.best_loss;
    return lower ? value < f->p.best : value > f->p.best;
}

/* Computes the features of both sources, with features_once. */
static tt_status tt__fit_features(tt__fit_run *f)
{
    tt__features *x = f->r->features;
    tt_status status = TT_OK;
    if (!x) return TT_OK;
    f->judged = f->validation && f->validation->self != f->train->self ? &x->set[1] : &x->set[0];
    status = tt__compute_features(f->r, &x->set[0], f->train, f->o.stop);
    if (status == TT_OK && f->validation && f->judged == &x->set[1])
        status = tt__compute_features(f->r, &x->set[1], f->validation, f->o.stop);
    if (status == TT_OK) x->now = &x->set[0];
    return status;
}

/* Frees the features. Sources then give data again. */
static void tt__fit_forget_features(tt__fit_run *f)
{
    tt__features *x = f->r->features;
    if (!x) return;
    x->now = NULL;
    for (int k = 0; k < 2; k++) {
        const tt_source *s = k ? f->validation : f->train;
        if (s && s->deal) s->deal(s->self, f->r->data, 0, f->r->data, !k);
        tt__feature_set_free(x->ctx, &x->set[k]);
    }
}

/* Does nothing without features. If `begin`, makes evaluations read the features of the validation source;
   otherwise makes micro-batches read the features of the training source again. */
static void tt__fit_judge(tt__fit_run *f, bool begin)
{
    tt__features *x = f->r->features;
    if (!x) return;
    f->r->by_features = begin;
    x->now = begin ? f->judged : &x->set[0];
}

/* Evaluates the validation source, with the moving averages if there are any, and computes the metrics. */
static tt_status tt__fit_evaluate(tt__fit_run *f, const volatile int *stop, tt_stats *s, double *items)
{
    const tt_metric *m = f->r->model.metrics;
    tt__collected *c = NULL;
    bool any = false;
    for (int k = 0; k < f->n_metrics; k++) any = any || !m[k].of;
    if (any && !(c = tt__collect(f->r, f->validation))) return tt_error_code(f->r->ctx);
    tt_status status = tt__has_ema(f->r) ? tt_trainer_use_ema(f->r, true) : TT_OK;
    const bool averages = tt__has_ema(f->r) && status == TT_OK;
    tt__fit_judge(f, true);
    if (status == TT_OK) status = tt__evaluate_source(f->r, f->validation, stop, s, items, c);
    tt__fit_judge(f, false);
    if (c) tt__collected_show(c);
    for (int k = 0; k < f->n_metrics && status == TT_OK && !(stop && *stop); k++) {
        f->r->ctx->error[0] = 0;
        f->values[k] = tt_metric_value(&m[k], s, c ? &c->p : NULL);
        const bool failed = isnan(f->values[k]) && f->r->ctx->error[0]; /* the metric ran out of memory */
        if (failed) status = tt_error_code(f->r->ctx);
    }
    tt_predictions_free(c ? &c->p : NULL);
    const tt_status back = averages ? tt_trainer_use_ema(f->r, false) : TT_OK;
    return status == TT_OK ? back : status;
}

/* Calls the callback `keep`. During the call, the parameters hold their moving averages, if there are any. */
static tt_status tt__fit_keep(tt__fit_run *f)
{
    tt_context *ctx = f->r->ctx;
    tt_status status = tt__has_ema(f->r) ? tt_trainer_use_ema(f->r, true) : TT_OK;
    if (status != TT_OK) return status;
    ctx->error[0] = 0;
    status = tt__returned(ctx, f->o.keep(f->o.user), "keep", f->p.epoch, f->p.step - 1);
    status = tt__agree(ctx, "keep", status, NULL, 0);
    const tt_status back = tt__has_ema(f->r) ? tt_trainer_use_ema(f->r, false) : TT_OK;
    return status == TT_OK ? back : status;
}

/* Validates, keeps the best model, ends the epoch if `ends`, and saves the state. */
static tt_status tt__fit_validate(tt__fit_run *f, bool ends)
{
    tt_stats s;
    tt_context *ctx = f->r->ctx;
    double began = tt__seconds(), items = 0;
    const volatile int *stop = ctx->net ? NULL : f->o.stop;
    bool save = false;
    tt_status status = f->validation ? tt__fit_evaluate(f, stop, &s, &items) : TT_OK;
    if (ctx->net) status = tt__fit_agree(f, status, &save);
    if (status != TT_OK || tt__fit_stopped(f)) return status;
    /* If the last steps were not finite, either just these steps failed or the weights have diverged. */
    const bool blew_up = f->validation ? !isfinite(s.loss) : tt__fit_has_diverged(f) || f->in_row == f->steps;
    const bool judges = f->validation || ends;
    if (f->not_finite && blew_up && judges) return tt__fit_stuck(f);
    if (judges) f->not_finite = 0;
    double loss = f->validation && isfinite(s.loss) ? s.loss : INFINITY, value = loss;
    if (f->validation && f->best_by_metric) value = f->values[f->by];
    const bool undefined = !isfinite(value) && isfinite(loss); /* then the loss decides */
    if (undefined) value = f->metric.lower_is_better ? INFINITY : -INFINITY;
    bool best = f->validation ? tt__fit_better(f, value, loss) : ends;
    const bool any = best || isfinite(f->p.best) || isfinite(f->p.best_loss);
    const bool none = !any && f->p.epoch + 1 >= f->o.epochs;
    if (f->validation && !(isfinite(s.loss) && isfinite(value)))
        tt__log(ctx, TT_LOG_WARNING, "fit", "epoch %lld: the validation's %s is not finite%s",
                (long long)f->p.epoch + 1, isfinite(s.loss) ? f->metric.name : "loss",
                undefined ? ", so the loss is compared" :
                none ? ", as in all epochs before, so no best model was saved" : "");
    if (f->validation) status = tt__fit_metrics(f, &s, true, 0, items, tt__seconds() - began);
    if (best && f->o.keep) {
        /* Saves a state first: in a folder with a model but no state, a run could not be resumed, and a
           caller who protects models from being overwritten could not start a new run either. */
        if (status == TT_OK && !f->has_state) status = tt__fit_save(f);
        if (status == TT_OK) status = tt__fit_keep(f);
    }
    if (status != TT_OK) return status; /* f->p.best is unchanged: a resumed run validates again */
    if (best && f->validation) {
        f->p.best = value;
        f->p.best_loss = loss;
    }
    f->p.validated = tt__fit_total(f);
    f->p.worse = best ? 0 : f->p.worse + (f->validation != NULL);
    if (f->validation) tt__fit_report(f, &s, best);
    if (ends) {
        f->p.epoch++;
        f->p.step = 0;
        f->p.loss_sum = f->p.targets = f->p.correct = f->margin = f->margin_targets = 0;
    }
    status = tt__fit_save(f);
    if (status == TT_OK) status = tt__fit_keep_state(f);
    f->started += tt__seconds() - began;
    return status;
}

/* Returns whether the run validates within the epoch, before the next step. */
static bool tt__fit_is_due(const tt__fit_run *f)
{
    const int64_t pending = f->last.any, step = f->p.step + pending, total = tt__fit_total(f) + pending;
    return f->o.validate_steps && step > 0 && step < f->steps && total % f->o.validate_steps == 0 &&
           total != f->p.validated;
}

/* Validates within an epoch, and returns to the next step of the training source. */
static tt_status tt__fit_pause(tt__fit_run *f)
{
    tt_status status = tt__fit_last_step(f);
    if (status == TT_OK) status = tt__fit_validate(f, false);
    if (status == TT_OK && f->validation && f->validation->self == f->train->self) {
        tt__deal(f->r, f->train, true);
        status = tt__from_source(f->r->ctx, f->train, f->p.epoch, f->p.step, NULL, NULL);
    }
    f->began = tt__seconds();
    return status;
}

/* Trains from step f->p.step to the end of the epoch, or until the run is stopped. A device may run a step
   while the host makes the next batch, so a step is counted only after the next step has begun. */
static tt_status tt__fit_epoch(tt__fit_run *f)
{
    tt_batch b;
    bool updated, more = true;
    int micros = 0; /* micro-batches of the current step so far */
    double items = 0;
    tt_context *ctx = f->r->ctx;
    tt__deal(f->r, f->train, true);
    tt_status status = tt__from_source(ctx, f->train, f->p.epoch, f->p.step, NULL, NULL);
    f->began = tt__seconds();
    f->last.any = false;
    /* A run that is asked to stop completes its current step first. */
    while (status == TT_OK && (tt__trainer_within_step(f->r) || !tt__fit_stopped(f))) {
        if (!tt__trainer_within_step(f->r) && tt__fit_is_due(f)) {
            status = tt__fit_pause(f);
            if (status != TT_OK || tt__fit_is_over(f)) break;
            continue; /* tests again whether the run was stopped, perhaps within the validation */
        }
        const float lr = tt_trainer_lr(f->r);
        const int64_t reads = f->r->train->reads;
        status = tt__from_source(ctx, f->train, f->p.epoch, f->p.step + f->last.any, &b, &more);
        if (status != TT_OK || !more) break;
        status = tt_train_batch(f->r, &b, NULL, &updated);
        items += tt__items(&b);
        micros++;
        const tt_status counted = tt__fit_count_step(f);
        const bool failed = status == TT_ERR_NUMERIC;
        if (failed) { /* the previous step or this step failed */
            status = tt__fit_skip(f, status, f->last.any ? f->last.lr : lr);
            items = micros = 0;
        }
        if (status == TT_OK) status = counted;
        if (status != TT_OK || !updated) continue;
        tt__fit_tell_idle(f, micros);
        f->last.any = true;
        f->last.lr = lr;
        f->last.items = items;
        f->last.reads = f->r->train->unread.any ? f->r->train->reads : reads;
        status = tt__fit_count_step(f);
        bool save = tt__seconds() - f->saved > f->o.save_seconds;
        if (ctx->net) status = tt__fit_agree(f, status, &save);
        items = micros = 0;
        if (status != TT_OK || !save) continue;
        status = tt__fit_last_step(f);
        if (status == TT_OK) status = tt__fit_save(f);
        f->began = tt__seconds(); /* the time of a step excludes saving */
    }
    if (status == TT_OK) status = tt__fit_last_step(f);
    else if (f->last.any) { /* ends the last step, but returns the first error */
        char error[sizeof ctx->error];
        memcpy(error, ctx->error, sizeof error);
        tt__fit_last_step(f);
        tt__fail(ctx, status, "%s", error);
    }
    const long long epoch = (long long)f->p.epoch + 1, steps = (long long)f->p.step;
    const bool ended = status == TT_OK && !more;
    if (ended && tt__trainer_within_step(f->r))
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "epoch %lld of the source ends within a step, after %lld "
                          "whole steps: the last micro-batch of a step must set last_of_step", epoch, steps);
    else if (ended && !steps)
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "epoch %lld of the source has no step: give it at least one",
                          epoch);
    else if (ended && steps < f->steps && !f->reported_short) {
        f->reported_short = true;
        tt__log(ctx, TT_LOG_WARNING, "fit", "epoch %lld of the source ends after %lld steps, but "
                "tt_source.steps is %lld: count the steps of an epoch", epoch, steps, (long long)f->steps);
    }
    if (status != TT_OK) tt__trainer_discard_step(f->r); /* so that the complete steps can be saved */
    return status;
}

/* Locks the folder, and fails if another run uses it. Continues without a lock on a file system without
   locks, and if the folder is read-only: saving the metrics then fails. */
static tt_status tt__fit_lock(tt__fit_run *f)
{
    char host[64] = "", when[32] = "", text[160];
    tt_context *ctx = f->r->ctx;
    const tt_files *files = &ctx->options.files;
    struct tm utc;
    bool held = false;
    tt_status status = tt__path_join(ctx, f->lock_path, f->o.folder, "run.lock");
    if (status != TT_OK || !files->lock) return status;
    tt__machine_name(host, sizeof host);
    if (tt__utc(time(NULL), &utc)) strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S UTC", &utc);
    snprintf(text, sizeof text, "process %ld of %s, since %s\n", tt__process_number(), host, when);
    f->lock = files->lock(files->user, f->lock_path, text, &held);
    if (!held) return TT_OK;
    tt__file_bytes by;
    const bool reported = tt__file_open(ctx, f->lock_path, &by) == TT_OK && by.size > 1 &&
                          by.size < sizeof text;
    status = tt__fail(ctx, TT_ERR_FILE, "'%s' is in use by another run%s%.*s%s: wait for its end, or name "
                      "another folder", f->o.folder, reported ? " (" : "",
                      reported ? (int)strcspn(by.bytes, "\n") : 0, reported ? by.bytes : "",
                      reported ? ")" : "");
    tt__file_close(ctx, &by);
    return status;
}

/* Removes the lock file, then releases the lock. After the release, the file may belong to another run. */
static void tt__fit_unlock(tt__fit_run *f)
{
    const tt_files *files = &f->r->ctx->options.files;
    if (!f->lock) return;
    files->remove(files->user, f->lock_path);
    files->close(files->user, f->lock);
}

/* Returns whether the diverged state is older than the sound state: a run was killed before it removed the
   diverged state, or an older version of this library, which has one state, continued the run. */
static bool tt__fit_is_stale(const tt__fit_run *f)
{
    int64_t steps, diverged;
    return f->has_diverged && tt__state_steps(f->r->ctx, f->state, &steps) == TT_OK &&
           tt__state_steps(f->r->ctx, f->diverged, &diverged) == TT_OK && diverged < steps;
}

/* Returns the name, "loss" or the name of a metric, that has this hash. Returns "metric" if no name has the
   hash. */
static const char *tt__fit_name_of(const tt__fit_run *f, uint64_t hash)
{
    for (int k = 0; k < f->n_metrics; k++)
        if (tt__hash(f->r->model.metrics[k].name) == hash) return f->r->model.metrics[k].name;
    return hash == tt__hash("loss") ? "loss" : "metric";
}

/* Resumes from the newer state. Fails if the state's classes differ from f->p's, and warns if its data
   differ. */
static tt_status tt__fit_resume(tt__fit_run *f)
{
    tt_context *ctx = f->r->ctx;
    const tt_progress now = f->p;
    const bool stale = tt__fit_is_stale(f);
    tt_status status = tt__agree(ctx, "the states of a folder", TT_OK, NULL, 0); /* all processes have now
                                                                                    read both states */
    if (stale && status == TT_OK) {
        ctx->options.files.remove(ctx->options.files.user, f->diverged);
        f->has_diverged = false;
    }
    if (status == TT_OK) status = tt_trainer_load(f->r, f->has_diverged ? f->diverged : f->state, &f->p);
    if (status != TT_OK) return status;
    if (f->p.epoch > f->o.epochs || f->p.step > f->steps || f->p.epoch < 0 || f->p.step < 0)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' has done %lld epochs and %lld steps, but this run has "
                        "only %lld epochs of %lld steps: ask for more epochs", f->o.folder,
                        (long long)f->p.epoch, (long long)f->p.step, (long long)f->o.epochs,
                        (long long)f->steps);
    if (f->p.best_by && f->p.best_by != now.best_by)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "the best model in '%s' was chosen by its %s, not by its %s: "
                        "resume with the same best_by", f->o.folder, tt__fit_name_of(f, f->p.best_by),
                        f->best_by_metric ? f->metric.name : "loss");
    if (f->p.classes && now.classes && f->p.classes != now.classes)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' was trained on classes with other names than this run's "
                        "data, whose first class is '%s': resume with the same data", f->o.folder,
                        f->train->class_names[0]);
    if (f->p.data && now.data && f->p.data != now.data)
        tt__log(ctx, TT_LOG_WARNING, "resume", "'%s' was trained on other data or masks: the run continues "
                "with the new ones, and differs from a run without interruption", f->o.folder);
    f->p.classes = now.classes;
    f->p.data = now.data;
    status = tt__fit_read_metrics(f);
    f->state_is_sound = f->has_diverged || tt__fit_is_sound(f);
    f->reported_diverged = !f->state_is_sound || f->has_diverged;
    return status;
}

size_t tt_trainer_state_bytes(const tt_trainer *r, size_t *parameters)
{
    int count, frozen;
    size_t state = 0, model = 0;
    tt__kept *kept = r->train ? tt__kept_of(r->train, &count, &frozen) : NULL;
    for (int k = 0; kept && k < count; k++) {
        const tt_program *p = r->train->stage[kept[k].stage];
        const tt__tape_value *x = &p->built.t->values[kept[k].value];
        const tt__stored stored = tt__kept_stored(r->ctx, x, p->arena);
        const size_t bytes = (size_t)(stored.rows * stored.cols) * tt_dtype_bytes(x->shape.dtype);
        state += bytes;
        if (!kept[k].state) model += bytes;
    }
    tt__free(r->ctx, kept);
    if (parameters) *parameters = model;
    return state;
}

/* Fails if the disk has no room for two states, because only a complete new state replaces the old state.
   Warns if the disk has no room for the parameters too, which the callback `keep` may write there. */
static tt_status tt__fit_disk(const tt__fit_run *f)
{
    tt_context *ctx = f->r->ctx;
    const tt_files *files = &ctx->options.files;
    const double space = files->space ? (double)files->space(files->user, f->o.folder) : -1;
    size_t parameters;
    const double state = (double)tt_trainer_state_bytes(f->r, &parameters), model = (double)parameters;
    if (state <= 0) return ctx->status;
    const double kept = (double)f->o.keep_states; /* states beside the newest */
    const double needs = (f->has_state ? 1 : 2) * state + kept * state, all = needs + (f->o.keep ? model : 0);
    if (space >= 0 && space < needs)
        return tt__fail(ctx, TT_ERR_FILE, "'%s': the run needs %.1f MB there for its states (two of %.1f MB "
                        "while one replaces the other%s), but the disk has room for %.1f MB: free some, or "
                        "name a folder on another disk", f->o.folder, 1e-6 * needs, 1e-6 * state,
                        kept > 0 ? ", and those of keep_states" : "", 1e-6 * space);
    if (space >= 0 && space < all)
        tt__log(ctx, TT_LOG_WARNING, "fit", "'%s': two states of %.1f MB and a model of %.1f MB or more may "
                "not fit on the disk, which has room for %.1f MB: free some", f->o.folder, 1e-6 * state,
                1e-6 * model, 1e-6 * space);
    return TT_OK;
}

/* Fails if a class number has different names in the sources for training and validation. */
static tt_status tt__fit_same_classes(const tt__fit_run *f)
{
    const tt_source *a = f->train, *b = f->validation;
    for (int c = 0; b && c < a->classes && c < b->classes; c++)
        if (strcmp(a->class_names[c], b->class_names[c]) != 0)
            return tt__fail(f->r->ctx, TT_ERR_ARGUMENT, "tt_fit: class %d is '%.200s' in the training data, "
                            "but '%.200s' in the validation data: number the classes of both alike "
                            "(tt_bert_name_classes, tt_vit_name_classes)", c, a->class_names[c],
                            b->class_names[c]);
    return TT_OK;
}

/* Chooses the value by which validations are compared. */
static tt_status tt__fit_choose(tt__fit_run *f)
{
    const tt_metric *m = f->r->model.metrics;
    const bool by_loss = f->o.best_by && strcmp(f->o.best_by, "loss") == 0;
    char names[40 * TT_METRICS] = "";
    tt__text_buffer text = {names, sizeof names, 0};
    bool found = by_loss || !f->o.best_by;
    for (int k = 0; k < f->n_metrics; k++) {
        tt__print(&text, "%s '%s'", k + 1 < f->n_metrics ? "," : " or", m[k].name);
        if (by_loss || !f->o.best_by || strcmp(f->o.best_by, m[k].name) != 0) continue;
        f->by = k;
        found = true;
    }
    f->metric = m[f->by];
    if (!found)
        return tt__fail(f->r->ctx, TT_ERR_ARGUMENT, "tt_fit: best_by is '%.100s', and the model has only "
                        "'loss'%s", f->o.best_by, names);
    f->best_by_metric = f->n_metrics && !by_loss;
    f->p.best = f->best_by_metric && !f->metric.lower_is_better ? -INFINITY : INFINITY;
    f->p.best_loss = INFINITY;
    f->p.best_by = tt__hash(f->best_by_metric ? f->metric.name : "loss");
    return TT_OK;
}

/* Fails if the state to resume belongs to the reference of another model than the trainer's. */
static tt_status tt__fit_same_reference(tt__fit_run *f)
{
    tt_status status = tt__model_hash(f->r, &f->r->reference);
    tt_safetensors *file = status == TT_OK ? tt_safetensors_open(f->r->ctx, f->state) : NULL;
    if (status == TT_OK) status = file ? tt__state_same_other(f->r, file, f->state) : f->r->ctx->status;
    tt_safetensors_close(file);
    return status;
}

/* Reads or computes the reference of sources of pairs, before a state changes the parameters. */
static tt_status tt__fit_reference(tt__fit_run *f)
{
    tt_status status = TT_OK;
    const bool computes = f->train->reference && !tt__reference_known(f->train);
    if (f->o.resume && computes) status = tt__fit_same_reference(f);
    for (int k = 0; k < 2 && status == TT_OK; k++) {
        const tt_source *s = k ? f->validation : f->train;
        if (s && s->reference)
            status = tt_trainer_reference(f->r, s, f->o.folder, k ? "reference.validation.safetensors"
                                                                  : "reference.safetensors");
    }
    return status;
}

static tt_status tt__fit_begin(tt__fit_run *f)
{
    char heading[TT__FIT_HEADING];
    tt_context *ctx = f->r->ctx;
    tt_status status = tt__source_fits(f->r, f->train, "to train on");
    if (status == TT_OK && f->validation) status = tt__source_fits(f->r, f->validation, "for validation");
    if (status == TT_OK) status = tt__fit_same_classes(f);
    if (status != TT_OK) return status;
    if (f->train->accumulates && !f->r->options.compile.accumulate)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_fit: the source's steps may have several micro-batches: "
                        "make the trainer with accumulate = true");
    if (f->o.epochs < 1 || f->o.epochs > TT__MAX_STEPS / f->steps)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_fit: epochs is %lld, but must be 1 to %lld",
                        (long long)f->o.epochs, (long long)(TT__MAX_STEPS / f->steps));
    if (f->o.validate_steps < 0 || f->o.patience < 0 || f->o.keep_states < 0)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_fit: validate_steps is %lld, patience is %lld and "
                        "keep_states is %lld, but all must be at least 0", (long long)f->o.validate_steps,
                        (long long)f->o.patience, (long long)f->o.keep_states);
    if (f->o.patience && !f->validation)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_fit: patience is %lld, but `validation` is NULL: patience "
                        "counts validations", (long long)f->o.patience);
    if ((status = tt__fit_choose(f)) != TT_OK) return status;
    if (f->o.resume && !f->o.folder)
        return tt__fail(ctx, TT_ERR_ARGUMENT,
                        "tt_fit: resume is set, but folder is not: name the folder that holds the run");
    f->bytes = tt_program_plan(f->r->train).bytes;
    status = tt_allocate(f->r->train); /* fails before any file is written */
    if (status == TT_OK) status = tt__fit_line(f, heading, tt__fit_heading(f, heading));
    if (status != TT_OK) return status;
    if (!f->o.folder) return tt__fit_reference(f);
    status = tt__path_join(ctx, f->state, f->o.folder, "state.safetensors");
    if (status == TT_OK)
        status = tt__path_join(ctx, f->diverged, f->o.folder, "state.diverged.safetensors");
    if (status != TT_OK) return status;
    if (!f->o.resume) status = tt__make_folder(ctx, f->o.folder);
    if (status == TT_OK) status = tt__fit_lock(f);
    status = tt__agree(ctx, "locking a folder", status, NULL, 0); /* only process 0 locks */
    if (status != TT_OK) return status;
    status = tt__folder_has(ctx, f->o.folder, "state.safetensors", &f->has_state);
    if (status == TT_OK)
        status = tt__folder_has(ctx, f->o.folder, "state.diverged.safetensors", &f->has_diverged);
    if (status != TT_OK) return status;
    if (f->has_state && !f->o.resume)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' holds a run: resume it, or name another folder",
                        f->o.folder);
    if (!f->has_state && f->o.resume)
        return tt__fail(ctx, TT_ERR_FILE, "nothing to resume: '%s' does not exist: start without resume",
                        f->state);
    f->p.classes = f->train->classes ? TT__HASH_BEGIN : 0; /* a hash of the names; 0: no classes */
    for (int c = 0; c < f->train->classes; c++) {
        const char *name = f->train->class_names[c];
        f->p.classes = tt__hash_on(f->p.classes, name, strlen(name) + 1);
    }
    f->p.data = f->train->hash ? f->train->hash(f->train->self) : 0;
    status = tt__fit_reference(f);
    if (status == TT_OK && f->o.resume) status = tt__fit_resume(f);
    if (status == TT_OK && !tt__fit_is_over(f)) status = tt__fit_disk(f);
    return status == TT_OK ? tt__fit_save_metrics(f) : status; /* fails early in a read-only folder */
}

tt_status tt_fit(tt_trainer *r, const tt_source *train, const tt_source *validation, const tt_fit_options *o,
                 bool *finished)
{
    tt_context *ctx = r->ctx;
    tt__fit_run *f = (tt__fit_run *)tt__calloc(ctx, sizeof *f);
    if (finished) *finished = false;
    if (!f) return TT_ERR_MEMORY;
    f->r = r;
    f->train = train;
    f->validation = validation;
    f->o = o ? *o : tt_fit_options_default();
    while (f->n_metrics < TT_METRICS && r->model.metrics[f->n_metrics].name) f->n_metrics++;
    f->unit = r->model.unit ? r->model.unit : "examples";
    f->steps = train ? train->steps : 0;
    bool save = false;
    tt_status status = tt__must_train(r);
    if (status == TT_OK) status = tt__fit_begin(f);
    if (status == TT_OK && !tt__fit_is_over(f)) status = tt__fit_features(f);
    if (ctx->net) status = tt__fit_agree(f, status, &save);
    char lines[TT__NOTE] = {0};
    tt__text_buffer text = {lines, sizeof lines, 0};
    if (ctx->net && status == TT_OK) {
        tt__source_lines(train, "to train on", &text);
        tt__source_lines(validation, "to validate on", &text);
        tt__print(&text, "epochs %lld of %lld steps\nvalidation of %lld steps\nvalidate_steps %lld, patience "
                  "%lld\n", (long long)f->o.epochs, (long long)f->steps,
                  (long long)(validation ? validation->steps : 0), (long long)f->o.validate_steps,
                  (long long)f->o.patience);
    }
    status = tt__agree_lines(ctx, "tt_fit", status, lines);
    bool began = status == TT_OK;
    f->peak = began && strcmp(tt_program_plan(r->train).device, "cpu") == 0 ? tt_measured_peak(ctx) : 0;
    f->first_step = began ? tt__fit_total(f) : 0;
    f->started = f->saved = tt__seconds();
    while (status == TT_OK && !tt__fit_is_over(f) && !tt__fit_stopped(f)) {
        status = tt__fit_epoch(f);
        if (status == TT_OK && !tt__fit_is_over(f) && !tt__fit_stopped(f)) status = tt__fit_validate(f, true);
    }
    bool done = status == TT_OK && tt__fit_is_over(f);
    const bool can_save = !ctx->net || !tt__net_has_failed(ctx->net), blown_up = f->not_finite > 0;
    if (began && status == TT_ERR_NUMERIC && blown_up && can_save) tt__fit_give_up(f);
    else if (began && !done && can_save && tt__fit_has_steps(f) && !tt__trainer_within_step(r)) {
        /* Saves the steps since the last save. */
        char error[sizeof ctx->error];
        memcpy(error, ctx->error, sizeof error);
        tt_status saved = tt__fit_save(f);
        if (status != TT_OK && saved != TT_OK)
            tt__log(ctx, TT_LOG_WARNING, "fit", "the state could not be saved either: %s", ctx->error);
        status = status == TT_OK ? saved : tt__fail(ctx, status, "%s", error); /* keeps the first error */
    }
    if (finished) *finished = done;
    tt__fit_forget_features(f);
    tt__fit_unlock(f);
    tt__free(ctx, f->csv);
    tt__free(ctx, f->point);
    tt__free(ctx, f);
    return status;
}
