#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/linear/rules.h"
#include "../ops/attention/rules.h"
#include "../passes/precision.h"
#include "../passes/recompute.h"
#include "../passes/offload.h"
#include "../passes/overlap.h"
#include "../context/memory.h"
#include "../context/cpu.h"
#include "../context/devices.h"
#include "program.h"

/* Fails if the device has no kernel for an instruction. */
static tt_status tt__refused(const tt_tape *t, const tt__crew *c)
{
    const tt__device_kind *kind = c->kind;
    const int index = c->index[0];
    tt__launch l;
    char device[32];
    memset(&l, 0, sizeof l);
    l.tape = t;
    for (int k = 0; k < t->n_code && kind->backend; k++) {
        const char *why;
        const tt__instr *i = l.instr = &t->code[k];
        if (i->on_host) continue;
        l.lists = tt__lists_of(t, i);
        for (int j = 0; j < TT__MAX_IN; j++) l.in[j] = tt__at_capacity(t, i->in[j]);
        for (int j = 0; j < TT__MAX_OUT; j++) l.out[j] = tt__at_capacity(t, i->out[j]);
        if (!(why = kind->backend->refuses(index, &l))) continue;
        int32_t named = i->out[0] ? i->out[0] : i->out[1] ? i->out[1] : i->in[0];
        return tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "device '%s' cannot run %s, for '%s': %s",
                        tt__device_name(kind, index, device), tt__instr_name(i), t->values[named].name, why);
    }
    return TT_OK;
}

static tt_status tt__check_matmul(tt_context *ctx, const tt__settings *s)
{
    if (s->matmul != TT__MATMUL_FP8) return TT_OK;
    if (s->kind && s->kind->host)
        return tt__fail(ctx, TT_ERR_UNSUPPORTED, "matmul 'fp8' is for device 'cuda', and the device is '%s'",
                        s->kind->name);
    if (s->precision.kind != TT__32_TRUE) return TT_OK;
    return tt__fail(ctx, TT_ERR_UNSUPPORTED, "matmul 'fp8' rounds 16-bit operands, of which precision "
                    "'32-true' has none");
}

/* Where parameters are updated; update "backward" with what it cannot do is refused. */
static tt_status tt__parse_update(tt_context *ctx, const tt_compile_options *o, bool scales, tt__update *out)
{
    char text[512];
    tt__text all = {text, sizeof text, 0};
    int k;
    tt_status status = tt__parse(ctx, "update", o->update ? o->update : "end", tt__update_names,
                                 TT__COUNT(tt__update_names), "end, backward or host", &k);
    *out = (tt__update)k;
    if (status != TT_OK || *out != TT__UPDATE_BACKWARD || !o->train) return status;
    if (o->accumulate)
        tt__print(&all, ", nor with accumulate, as gradients are final at the step's end only");
    if (o->optimizer.clip_norm > 0)
        tt__print(&all, ", nor with clip_norm %g, as the norm of all gradients is known at the step's end "
                  "only", o->optimizer.clip_norm);
    if (scales) tt__print(&all, ", nor with precision '%s', as loss scaling skips whole steps", o->precision);
    if (o->parallel.server) tt__print(&all, ", nor with parallel.server");
    if (o->parallel.pipeline > 1) tt__print(&all, ", nor with parallel.pipeline");
    if (!all.length) return TT_OK;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "update 'backward' does not go%s: use update 'end'", text + 5);
}

static tt_status tt__parse_memory(tt_context *ctx, const char *name, tt__memory_kind *out)
{
    int k;
    tt_status status = tt__parse(ctx, "memory", name ? name : "device", tt__memory_names, TT__MEMORY_KINDS,
                                 "device, managed or managed-oversubscribed", &k);
    *out = (tt__memory_kind)k;
    return status;
}

static tt_status tt__check_memory(tt_context *ctx, const tt__settings *s)
{
    const char *name = tt__memory_names[s->memory];
    if (!s->crew || s->memory == TT__OWN_MEMORY) return TT_OK;
    if (s->kind->host)
        return tt__fail(ctx, TT_ERR_UNSUPPORTED, "memory '%s' is for device 'cuda', and the device is '%s'",
                        name, s->kind->name);
    if (s->crew->ranks == 1) return TT_OK;
    return tt__fail(ctx, TT_ERR_UNSUPPORTED, "memory '%s' is for one rank, and '%s' has %d: leave `memory` "
                    "out", name, s->crew->name, s->crew->ranks);
}

/* Options that say "budget" need one. */
static tt_status tt__check_budget(tt_context *ctx, const tt__settings *s)
{
    const bool recompute = s->recompute == TT__RECOMPUTE_BUDGET && s->options.train;
    if (s->options.memory_budget || !(recompute || s->offload_fits || s->zero_fits)) return TT_OK;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "%s 'budget' chooses what fits memory_budget, which is not set",
                    recompute ? "recompute" : s->offload_fits ? "offload" : "zero");
}

/* Adds the sentence of a check that has failed to those before it; *first is the status of the first. */
static void tt__note_error(tt_context *ctx, tt__text *all, tt_status *first, tt_status status)
{
    if (status != TT_OK) tt__print(all, "; %s", ctx->error);
    if (*first == TT_OK) *first = status;
}

/* Checks options and finds what their names stand for. One message names all that is wrong. */
static tt_status tt__parse_settings(tt_context *ctx, const tt_compile_options *o, tt__settings *s)
{
    char text[sizeof ctx->error];
    tt__text all = {text, sizeof text, 0};
    tt_status status = TT_OK;
    memset(s, 0, sizeof *s);
    s->options = *o;
    tt__note_error(ctx, &all, &status, tt__parse_precision(ctx, o->precision, o->residual, &s->precision));
    s->scales = o->train && s->precision.half == TT_F16;
    if (s->scales) tt__note_error(ctx, &all, &status, tt__check_loss_scale(ctx, &o->loss_scale));
    tt__note_error(ctx, &all, &status, tt__parse_matmul(ctx, o->matmul, &s->matmul));
    tt__note_error(ctx, &all, &status, tt__parse_recompute(ctx, o->recompute, &s->recompute));
    tt__note_error(ctx, &all, &status, tt__parse_offload(ctx, o->offload, &s->offload, &s->offload_fits));
    s->zero_fits = o->parallel.zero == TT_ZERO_BUDGET;
    tt__note_error(ctx, &all, &status, tt__check_budget(ctx, s));
    tt__note_error(ctx, &all, &status, tt__parse_memory(ctx, o->memory, &s->memory));
    if (o->tune && !*o->tune)
        tt__note_error(ctx, &all, &status,
                       tt__fail(ctx, TT_ERR_ARGUMENT, "tune '' is neither off nor on, nor a file's name"));
    s->costs = o->costs ? *o->costs : tt_costs_default();
    tt__note_error(ctx, &all, &status, tt__check_costs(ctx, &s->costs));
    if (o->train) tt__note_error(ctx, &all, &status, tt__check_optimizer(ctx, &o->optimizer));
    tt__note_error(ctx, &all, &status, tt__parse_update(ctx, o, s->scales, &s->update));
    s->crew = tt__find_devices(ctx, o->device);
    s->kind = s->crew ? s->crew->kind : NULL;
    s->threads = s->crew ? tt__rank_threads(ctx, s->crew->local) : ctx->cpu.pool->threads;
    tt__note_error(ctx, &all, &status,
                   s->crew ? tt__parallel_for(ctx, s->crew, &s->options.parallel) : ctx->status);
    tt__note_error(ctx, &all, &status, tt__check_matmul(ctx, s));
    tt__note_error(ctx, &all, &status, tt__check_memory(ctx, s));
    return status == TT_OK ? TT_OK : tt__fail(ctx, status, "%s", text + 2);
}
