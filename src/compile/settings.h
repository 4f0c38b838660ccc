#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/linear/rules.h"
#include "../ops/attention/rules.h"
#include "../passes/precision.h"
#include "../passes/recompute.h"
#include "../passes/offload.h"
#include "../passes/overlap.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../context/cpu.h"
#include "../context/devices.h"
#include "program.h"

/* -------------------------------------------------------------------------------------------------- settings
   Turns the options of a program into settings, and refuses options that contradict one another. */

/* Fails if the device has no kernel for an instruction of the tape. */
static tt_status tt__refused(const tt_tape *t, const tt__device_group *c)
{
    const tt__device_kind *kind = c->kind;
    const int index = c->index[0];
    tt__launch l;
    char device[32];
    memset(&l, 0, sizeof l);
    l.tape = t;
    for (int k = 0; k < t->n_code && !kind->host; k++)
        if (t->code[k].attr.custom)
            return tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "device '%s' cannot run '%s': the functions of "
                            "tt_custom run on device 'cpu' alone: compile for that",
                            tt__device_name(kind, index, device), t->values[t->code[k].out[0]].name);
    for (int k = 0; k < t->n_code && kind->backend; k++) {
        const char *why;
        const tt__instr *i = l.instr = &t->code[k];
        if (i->on_host) continue;
        l.lists = tt__lists_of(t, i);
        for (int j = 0; j < TT__MAX_IN; j++) l.in[j] = tt__at_capacity(t, i->in[j]);
        for (int j = 0; j < TT__MAX_OUT; j++) l.out[j] = tt__at_capacity(t, i->out[j]);
        if (!(why = kind->backend->refuses(index, &l))) continue;
        int32_t named = i->out[0] ? i->out[0] : i->out[1] ? i->out[1] : i->in[0];
        return tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "device '%s' cannot run %s, which computes '%s': %s",
                        tt__device_name(kind, index, device), tt__instr_name(i), t->values[named].name, why);
    }
    return TT_OK;
}

static const char *const tt__stage_names[] = {"1f1b", "gpipe"}; /* words of parallel.schedule */

/* Checks the fields of *p (how ranks share the work), and replaces fields that are 0 by their defaults. */
static tt_status tt__parallel_for(tt_context *ctx, const tt__device_group *c, tt_parallel *p)
{
    char text[512];
    tt__text_buffer all = {text, sizeof text, 0};
    if (p->tensor == 0) p->tensor = 1;
    if (p->pipeline == 0) p->pipeline = 1;
    if (p->data == 0 && p->tensor > 0 && p->pipeline > 0)
        p->data = (int)tt__max(1, c->ranks / p->tensor / p->pipeline);
    if (p->groups == 0) p->groups = p->data;
    const char *schedule = p->schedule ? p->schedule : tt__stage_names[0];
    const bool gpipe = strcmp(schedule, tt__stage_names[1]) == 0;
    const bool power = p->data > 0 && (p->data & (p->data - 1)) == 0;
    char stages[48] = "";
    if (p->pipeline != 1) snprintf(stages, sizeof stages, " x {parallel.pipeline %d}", p->pipeline);
    const bool ranks = p->data > 0 && p->tensor > 0 && p->pipeline > 0 && p->pipeline <= TT__RANKS;
    if (!ranks || (int64_t)p->data * p->tensor * p->pipeline != c->ranks)
        tt__print(&all, "; {device '%s'} has %d rank%s, but {parallel.data %d} x {parallel.tensor %d}%s need "
                  "%lld: make the numbers equal", c->name, c->ranks, c->ranks > 1 ? "s" : "", p->data,
                  p->tensor, stages, (long long)p->data * p->tensor * p->pipeline);
    else if (p->groups < 0 || p->groups % p->data)
        tt__print(&all, "; {parallel.groups %d} is not a multiple of the %d data ranks", p->groups, p->data);
    else if (p->groups > p->data && !power)
        tt__print(&all, "; {parallel.groups %d} is more than the %d data ranks, whose number must then be a "
                  "power of two: use {parallel.groups %d}", p->groups, p->data, p->data);
    if (p->groups > TT__RANKS)
        tt__print(&all, "; {parallel.groups %d} is too large: at most %d are possible", p->groups, TT__RANKS);
    if (p->zero < TT_ZERO_BUDGET || p->zero > 3)
        tt__print(&all, "; {parallel.zero %d} is not 0, 1, 2, 3 or TT_ZERO_BUDGET", p->zero);
    if (!gpipe && strcmp(schedule, tt__stage_names[0]) != 0)
        tt__print(&all, "; {parallel.schedule '%.32s'} is unknown: use 1f1b or gpipe", schedule);
    if (p->micros < 0) tt__print(&all, "; {parallel.micros %d} is negative", p->micros);
    p->schedule = tt__stage_names[gpipe]; /* a string that outlives the options */
    const int of_stage = ranks ? p->data * p->tensor : 1;
    if (c->local < c->ranks && p->pipeline > 1 && c->local % of_stage && of_stage % c->local)
        tt__print(&all, "; the %d ranks of a stage must divide the %d ranks of a process, or be a multiple "
                  "of them", of_stage, c->local);
    if (p->tensor > 0 && c->local < c->ranks && c->local % p->tensor && p->tensor % c->local)
        tt__print(&all, "; {parallel.tensor %d} must divide the %d ranks of a process, or be a multiple of "
                  "them", p->tensor, c->local);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "%s", text + 2) : TT_OK;
}

/* A rule of the functions below, which check options for contradictions; each option is valid by itself. The
   functions append "; " and a sentence to *all for each broken rule, and return the status of the first. A
   rule is TT__RULE(condition that breaks it, status, sentence). */
#define TT__RULE(broken, code, ...) \
    if (broken) { tt__print(all, "; " __VA_ARGS__); if (status == TT_OK) status = code; }

/* Checks the options of the optimizer against the other options. */
static tt_status tt__optimizer_contradictions(const tt__settings *s, tt__text_buffer *all)
{
    const tt_compile_options *o = &s->options;
    const tt_parallel *p = &o->parallel;
    const char *kind = s->kind ? s->kind->name : "";
    const bool on_host = s->kind && s->kind->host;
    const bool divides = p->zero > 1 || p->zero == TT_ZERO_BUDGET; /* data ranks divide gradients, too */
    const bool custom = o->optimizer.kind == TT_OPTIMIZER_CUSTOM, muon = o->optimizer.kind == TT_MUON;
    const bool adafactor = o->optimizer.kind == TT_ADAFACTOR;
    const bool prunes = o->optimizer.prune > 0, averages = o->optimizer.ema_decay > 0;
    const bool narrow = s->precision.half != TT_F32 && !s->precision.mixed; /* weights have 16 bits */
    tt_status status = TT_OK;
    if (!o->train) return TT_OK;
    TT__RULE(custom && !on_host, TT_ERR_UNSUPPORTED,
             "the optimizer TT_OPTIMIZER_CUSTOM runs on {device 'cpu'} only, but the device is '%s'", kind)
    TT__RULE((custom || averages) && narrow, TT_ERR_UNSUPPORTED,
             "%s needs fp32 weights, but {precision '%s'} has 16-bit weights: use {precision '32-true'}, "
             "bf16-mixed or 16-mixed", custom ? "the optimizer TT_OPTIMIZER_CUSTOM" : "{ema_decay}",
             tt__precision_names[s->precision.kind])
    TT__RULE(muon && (p->tensor > 1 || p->server), TT_ERR_UNSUPPORTED,
             "the optimizer TT_MUON needs whole matrices, which %s: use only data ranks",
             p->tensor > 1 ? "{parallel.tensor} divides" : "{parallel.server} keeps on one rank")
    TT__RULE(adafactor && (p->tensor > 1 || p->server || (p->data > 1 && divides)), TT_ERR_UNSUPPORTED,
             "the optimizer TT_ADAFACTOR needs whole gradients, which %s: use only data ranks, with "
             "{parallel.zero 1} or 0", p->tensor > 1 ? "{parallel.tensor} divides"
             : p->server ? "{parallel.server} keeps on one rank" : p->zero == TT_ZERO_BUDGET
             ? "{parallel.zero 'budget'} may divide" : "{parallel.zero} above 1 divides")
    TT__RULE(prunes && (p->tensor > 1 || p->server || (p->data > 1 && p->zero)), TT_ERR_UNSUPPORTED,
             "{prune %g} needs whole matrices, which %s: use {parallel.zero 0}, only data ranks",
             o->optimizer.prune, p->tensor > 1 ? "{parallel.tensor} divides"
             : p->server ? "{parallel.server} keeps on one rank" : "{parallel.zero} divides")
    TT__RULE((muon || prunes) && s->update == TT__UPDATE_HOST, TT_ERR_UNSUPPORTED,
             "%s updates on the device only: use {update 'end'}",
             prunes ? "{prune}" : "the optimizer TT_MUON")
    TT__RULE(prunes && averages, TT_ERR_UNSUPPORTED,
             "{prune %g} does not go with {ema_decay %g}: averages of weights that became 0 are not 0",
             o->optimizer.prune, o->optimizer.ema_decay)
    return status;
}

/* Checks all options. */
static tt_status tt__contradictions(const tt__settings *s, tt__text_buffer *all)
{
    const tt_compile_options *o = &s->options;
    const tt_parallel *p = &o->parallel;
    const char *kind = s->kind ? s->kind->name : "", *memory = tt__memory_names[s->memory];
    const int ranks = s->group ? s->group->ranks : 1;
    const bool on_host = s->kind && s->kind->host, managed = s->memory != TT__OWN_MEMORY;
    const bool fp8 = s->matmul == TT__MATMUL_FP8, staged = p->pipeline > 1;
    const bool divides = p->zero > 1 || p->zero == TT_ZERO_BUDGET; /* data ranks divide gradients, too */
    const bool recompute_fits = s->recompute == TT__RECOMPUTE_BUDGET && o->train;
    const bool early = s->update == TT__UPDATE_BACKWARD && o->train;
    tt_status status = TT_OK;
    char text[400];
    tt__text_buffer late = {text, sizeof text, 0}; /* options that update "backward" excludes: they need all
                                                      gradients at once */
    if (o->accumulate)
        tt__print(&late, ", nor with {accumulate}, as gradients are final at the step's end only");
    if (tt__keeps_gradients(o))
        tt__print(&late, ", nor with %s, as the memory of gradients is reused",
                  o->before_update ? "before_update" : "keep_gradients");
    if (o->optimizer.clip_norm > 0)
        tt__print(&late, ", nor with {clip_norm %g}, as the norm of all gradients is known at the step's end "
                  "only", o->optimizer.clip_norm);
    if (s->scales)
        tt__print(&late, ", nor with {precision '%s'}, as loss scaling skips whole steps",
                  tt__precision_names[s->precision.kind]);
    if (p->server) tt__print(&late, ", nor with {parallel.server}");
    if (staged) tt__print(&late, ", nor with {parallel.pipeline}");

    TT__RULE(!o->memory_budget && (recompute_fits || s->offload_fits || s->zero_fits || s->bits_fit),
             TT_ERR_ARGUMENT,
             "{%s 'budget'} chooses what fits {memory_budget}, which is not set: set it to a number of bytes",
             recompute_fits ? "recompute" : s->offload_fits ? "offload" : s->zero_fits ? "parallel.zero"
             : "state_bits")
    TT__RULE(s->bits_fit && staged, TT_ERR_UNSUPPORTED,
             "{state_bits 'budget'} does not go with {parallel.pipeline %d}, whose stages are planned one by "
             "one: use {state_bits 16} or 8", p->pipeline)
    TT__RULE(early && late.length, TT_ERR_ARGUMENT, "{update 'backward'} does not go%s: use {update 'end'}",
             text + 5)
    TT__RULE(p->server && divides, TT_ERR_ARGUMENT,
             "{parallel.server} keeps whole gradients and parameters: use {parallel.zero 0} or 1")
    TT__RULE(p->sequence && p->tensor == 1, TT_ERR_ARGUMENT,
             "{parallel.sequence} needs {parallel.tensor 2} or more")
    TT__RULE(staged && (divides || p->server || p->reduce_micros), TT_ERR_ARGUMENT,
             "{parallel.pipeline %d} does not go with %s", p->pipeline,
             p->zero == TT_ZERO_BUDGET ? "{parallel.zero 'budget'}: use {parallel.zero 0} or 1"
             : divides ? "{parallel.zero} 2 and 3: use {parallel.zero 0} or 1"
             : p->server ? "{parallel.server}: leave one out" : "{parallel.reduce_micros}: leave one out")
    TT__RULE(staged && tt__keeps_gradients(o), TT_ERR_UNSUPPORTED,
             "{parallel.pipeline %d} does not go with %s: a pipeline runs its micro-batches together with "
             "the update", p->pipeline, o->before_update ? "before_update" : "keep_gradients")
    TT__RULE(staged && !p->micros && p->schedule && strcmp(p->schedule, "gpipe") == 0, TT_ERR_ARGUMENT,
             "{parallel.schedule 'gpipe'} needs {parallel.micros}, the largest number of micro-batches "
             "of a step on a data rank, for which the plan has memory: set it")
    const tt_status of_optimizer = tt__optimizer_contradictions(s, all);
    if (status == TT_OK) status = of_optimizer;
    TT__RULE(fp8 && on_host, TT_ERR_UNSUPPORTED,
             "{matmul 'fp8'} needs {device 'cuda'}, but the device is '%s'", kind)
    TT__RULE(fp8 && s->precision.kind == TT__32_TRUE, TT_ERR_UNSUPPORTED,
             "{matmul 'fp8'} rounds 16-bit operands, of which {precision '32-true'} has none: use "
             "{precision 'bf16-mixed'}")
    TT__RULE(managed && on_host, TT_ERR_UNSUPPORTED,
             "{memory '%s'} needs {device 'cuda'}, but the device is '%s'", memory, kind)
    TT__RULE(managed && ranks > 1, TT_ERR_UNSUPPORTED,
             "{memory '%s'} needs one rank, but {device '%s'} has %d: use {memory 'device'}", memory,
             s->group->name, ranks)
#undef TT__RULE
    return status;
}

/* Returns whether the options are free of contradictions if parallel.zero and update have these values. */
static bool tt__goes_together(const tt__settings *s, int zero, tt__update_place update)
{
    tt__settings other = *s;
    tt__text_buffer unread = {NULL, 0, 0};
    other.options.parallel.zero = zero;
    other.update = update;
    return tt__contradictions(&other, &unread) == TT_OK;
}

/* Appends the context's error to *all if `status` is an error. *first keeps the status of the first error. */
static void tt__note_error(tt_context *ctx, tt__text_buffer *all, tt_status *first, tt_status status)
{
    if (status != TT_OK) tt__print(all, "; %s", ctx->error);
    if (*first == TT_OK) *first = status;
}

/* Parses the options that are one of a list of words. NULL stands for the default. */
static void tt__parse_words(tt_context *ctx, const tt_compile_options *o, tt__settings *s,
                            tt__text_buffer *all, tt_status *status)
{
    const struct { const char *option, *word, *usual; const char *const *names; int n; } rows[] = {
        {"matmul", o->matmul, "fp32", tt__matmul_names, TT__COUNT(tt__matmul_names)},
        {"recompute", o->recompute, "cheap", tt__recompute_names, TT__COUNT(tt__recompute_names)},
        {"memory", o->memory, "device", tt__memory_names, TT__COUNT(tt__memory_names)},
        {"update", o->update, "end", tt__update_names, TT__COUNT(tt__update_names)}};
    int found[TT__COUNT(rows)];
    for (int k = 0; k < TT__COUNT(rows); k++)
        tt__note_error(ctx, all, status,
                       tt__parse(ctx, rows[k].option, rows[k].word ? rows[k].word : rows[k].usual,
                                 rows[k].names, rows[k].n, "", &found[k]));
    s->matmul = (tt__matmul_precision)found[0];
    s->recompute = (tt__recompute_policy)found[1];
    s->memory = (tt__memory_kind)found[2];
    s->update = (tt__update_place)found[3];
}

/* Checks all options and turns them into settings *s. If several are wrong, one message names all errors. */
static tt_status tt__parse_settings(tt_context *ctx, const tt_compile_options *o, tt__settings *s)
{
    char text[sizeof ctx->error];
    tt__text_buffer all = {text, sizeof text, 0};
    tt_status status = TT_OK;
    memset(s, 0, sizeof *s);
    s->options = *o;
    tt__note_error(ctx, &all, &status, tt__parse_precision(ctx, o->precision, o->residual, &s->precision));
    s->scales = o->train && s->precision.half == TT_F16;
    s->dropout = o->train;
    if (s->scales) tt__note_error(ctx, &all, &status, tt__check_loss_scale(ctx, &o->loss_scale));
    tt__parse_words(ctx, o, s, &all, &status);
    tt__note_error(ctx, &all, &status, tt__parse_offload(ctx, o->offload, &s->offload, &s->offload_fits));
    s->zero_fits = o->parallel.zero == TT_ZERO_BUDGET;
    s->bits_fit = o->train && o->optimizer.state_bits == TT_STATE_BITS_BUDGET;
    if (s->bits_fit && o->optimizer.kind == TT_ADAFACTOR) { /* its state has 32 bits in any case */
        s->bits_fit = false;
        s->options.optimizer.state_bits = 32;
    }
    if (o->tune && !*o->tune)
        tt__note_error(ctx, &all, &status,
                       tt__fail(ctx, TT_ERR_ARGUMENT, "{tune} is '', but must be off, on or a file's name"));
    s->costs = o->costs ? *o->costs : tt_costs_default();
    tt__note_error(ctx, &all, &status, tt__check_costs(ctx, &s->costs));
    if (o->train) tt__note_error(ctx, &all, &status, tt__check_optimizer(ctx, &o->optimizer));
    if (o->optimizer.state_bits == TT_STATE_BITS_BUDGET) s->options.optimizer.state_bits = 32;
    s->group = tt__find_devices(ctx, o->device);
    s->kind = s->group ? s->group->kind : NULL;
    s->threads = s->group ? tt__rank_threads(ctx, s->group->local) : ctx->cpu.pool->threads;
    tt__note_error(ctx, &all, &status,
                   s->group ? tt__parallel_for(ctx, s->group, &s->options.parallel) : ctx->status);
    const tt_status together = tt__contradictions(s, &all);
    if (status == TT_OK) status = together;
    return status == TT_OK ? TT_OK : tt__fail(ctx, status, "%s", text + 2);
}

const char *tt_option_word(const char *option, int k)
{
#define TT__NAME(kind, name, op, decoupled, state, word, second, its_word) name,
    static const char *const optimizers[] = {TT__OPTIMIZERS(TT__NAME)};
#undef TT__NAME
#define TT__NAME(kind, name) name,
    static const char *const schedules[] = {TT__SCHEDULES(TT__NAME)};
#undef TT__NAME
    static const struct { const char *option; const char *const *words; int n; } lists[] = {
        {"optimizer", optimizers, TT__COUNT(optimizers)},
        {"schedule", schedules, TT__COUNT(schedules)},
        {"precision", tt__precision_names, TT__COUNT(tt__precision_names)},
        {"matmul", tt__matmul_names, TT__COUNT(tt__matmul_names)},
        {"recompute", tt__recompute_names, TT__COUNT(tt__recompute_names)},
        {"memory", tt__memory_names, TT__COUNT(tt__memory_names)},
        {"update", tt__update_names, TT__COUNT(tt__update_names)},
        {"parallel.schedule", tt__stage_names, TT__COUNT(tt__stage_names)}};
    for (int j = 0; j < TT__COUNT(lists); j++)
        if (strcmp(option, lists[j].option) == 0) return k >= 0 && k < lists[j].n ? lists[j].words[k] : NULL;
    return NULL;
}

tt_status tt_check_options(tt_context *ctx, tt_compile_options *o)
{
    tt__settings s;
    tt_status status = tt__parse_settings(ctx, o, &s);
    if (status == TT_OK) o->parallel = s.options.parallel;
    return status;
}
