#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../passes/step.h"
#include "../passes/update.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "../compile/compile.h"

/* ---- functions by which trainers query a program and hash it */

int tt_program_inputs(const tt_program *p, tt_input_info *to, int capacity)
{
    int n = 0;
    for (int32_t v = 1; v < p->built.t->n_values; v++) {
        const tt__tape_value *x = &p->built.t->values[v];
        if (x->storage != TT__INPUT || x->base != v || x->persistent) continue;
        tt_input_info info = {x->name, tt__handle(p->built.t, v), x->shape.dtype, x->shape.rows,
                              x->shape.cols, (int)x->shape.axis, tt__reads_input(p, v)};
        if (n++ < capacity) to[n - 1] = info;
    }
    return n;
}

/* Returns a flag for each value of a recorded tape: whether v depends on the value. The caller frees the
   array. NULL: out of memory. */
static bool *tt__needed_for(const tt_tape *t, tt_value v)
{
    bool *needed = (bool *)tt__calloc(t->ctx, (size_t)t->n_values);
    if (!needed) return NULL;
    needed[t->values[v.id].base] = true;
    for (int k = t->n_code - 1; k >= 0; k--) {
        const tt__instr *i = &t->code[k];
        bool needs = false;
        for (int j = 0; j < TT__MAX_OUT; j++)
            needs = needs || (i->out[j] && needed[t->values[i->out[j]].base]);
        for (int j = 0; j < TT__MAX_IN && needs; j++) if (i->in[j]) needed[t->values[i->in[j]].base] = true;
    }
    return needed;
}

/* Discards the micro-batches of the current step; the next micro-batch begins a new step. */
static void tt__discard_step(tt_program *p) { p->round = 0; }
static bool tt__within_step(const tt_program *p) { return p->round > 0; }
int64_t tt_program_steps(const tt_program *p) { return p->run.step; }

/* Returns whether an instruction updates parameter v, or a host copy of v. An update of v's moving average
   does not count. */
static bool tt__updates(const tt_tape *t, const tt__instr *i, int32_t v)
{
    const tt__tape_value *y = &t->values[i->out[0]];
    return tt__is(i, TT__WITH_RUN | TT__RMW) && y->param == t->values[v].param &&
           t->values[y->base].storage != TT__STATE;
}

/* Continues *hash with the attributes of the instruction that updates parameter v. Returns false if no
   instruction of the tape updates v. */
static bool tt__hash_update(const tt_tape *t, int32_t v, uint64_t *hash)
{
    for (int k = tt__segment_first(t, TT__EACH_STEP); k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        if (!tt__updates(t, i, v)) continue;
        *hash = tt__attr_hash(*hash, &i->attr);
        return true;
    }
    return false;
}

/* Continues a hash with attributes of the instructions at the end of a step, and returns the hash. These
   instructions are CLIP, the updates in the order of the parameters in the tape, and LOSS_SCALE. */
static uint64_t tt__updates_hash(const tt_program *p, uint64_t hash)
{
    const tt_tape *t = p->built.t;
    const int step = tt__segment_first(t, TT__EACH_STEP), first = t->early ? 0 : step;
    /* The search for a parameter's update begins where the one before ended, and goes on by `next`: backwards
       (modulo `count`) if the updates are in the backward, which has the parameters in reverse order. */
    const int count = t->n_code - first, next = t->early ? count - 1 : 1;
    int at = t->early ? count - 1 : 0;
    for (int k = step; k < t->n_code; k++)
        if (t->code[k].out[0] == t->clipped) hash = tt__attr_hash(hash, &t->code[k].attr);
    for (int32_t v = 1; v < t->n_values; v++) {
        bool found = !tt__is_trained(t, v);
        if (p->stages > 1) {
            found = !tt__is_listed(t, v);
            for (int s = 0; s < p->stages && !found; s++)
                found = tt__hash_update(p->stage[s]->built.t, v, &hash);
        }
        for (int k = 0; k < count && !found; k++, at = (at + next) % count) {
            const tt__instr *i = &t->code[first + at];
            found = tt__updates(t, i, v);
            if (found) hash = tt__attr_hash(hash, &i->attr);
        }
    }
    for (int k = step; k < t->n_code && t->scale; k++)
        if (t->code[k].out[0] == t->scale) hash = tt__attr_hash(hash, &t->code[k].attr);
    return hash;
}

/* Returns a hash of everything that determines the numbers that training computes: the recorded tape, the
   options precision and matmul, loss scaling, and the optimizer's attributes. Placement, recomputation, the
   device and the ranks do not change the numbers and are left out. */
static uint64_t tt__program_hash(const tt_program *p)
{
    const tt_loss_scale *s = &p->settings.options.loss_scale;
    const bool scales = p->settings.scales;
    const int how[] = {(int)p->settings.precision.kind, p->settings.precision.residual_f32,
                       (int)p->settings.matmul, scales ? s->interval : 0};
    const float scaling[] = {scales ? s->growth : 0, scales ? s->backoff : 0};
    uint64_t hash = tt__hash_on(p->built.recorded, how, sizeof how);
    hash = tt__hash_on(hash, scaling, sizeof scaling);
    const tt_parallel *ranks = &p->settings.options.parallel;
    const bool micros = ranks->zero > 1 || ranks->reduce_micros; /* gradients are summed in each
                                                                    micro-batch */
    const int leaves[] = {ranks->groups, micros};
    if (ranks->groups > 1 || micros) hash = tt__hash_on(hash, leaves, sizeof leaves);
    const tt__attr none = tt__new_instr(0).attr;
    for (int32_t v = 1; v < p->built.t->n_values; v++)
        if (tt__is_listed(p->built.t, v)) hash = tt__attr_hash(hash, &none); /* the (empty) attributes of the
                                                                                SUM_SQUARES of v's gradient */
    const float average = p->settings.options.optimizer.ema_decay;
    if (average > 0) hash = tt__hash_on(hash, &average, sizeof average);
    const tt_optimizer_options *o = &p->settings.options.optimizer;
    const int64_t schedule[] = {o->prune_begin, o->prune_end, o->prune_every};
    const char by[] = "movement";
    if (o->prune > 0) hash = tt__hash_on(hash, &o->prune, sizeof o->prune);
    if (o->prune > 0) hash = tt__hash_on(hash, schedule, sizeof schedule);
    if (o->prune > 0 && o->prune_by_movement) hash = tt__hash_on(hash, by, sizeof by);
    const int bits = p->settings.options.optimizer.state_bits;
    if (bits != 32) hash = tt__hash_on(hash, &bits, sizeof bits);
    return tt__updates_hash(p, hash);
}

enum { TT__STATE_VERSION = 6 };
#define TT__MAX_STEPS ((int64_t)1 << 62) /* max number of steps in a state, so that later steps cannot
                                             overflow */

/* The header of a saved state: numbers of 8 bytes, stored as the I64 tensor "tinytrain.run". A program that
   continues from the state must have an equal seed, optimizer (tt_optimizer_kind) and precision
   (tt__precision_kind). If the hash `program` differs, a warning is logged. */
typedef struct tt__state_header {
    int64_t version, seed, step, good_steps, skipped;
    double loss_scale;
    int64_t optimizer, precision, program;
} tt__state_header;

static tt__state_header tt__state_header_of(const tt_program *p)
{
    const tt__settings *set = &p->settings;
    const tt__scale_state *s = &p->results.scale;
    const tt__state_header h = {TT__STATE_VERSION, (int64_t)p->run.seed, p->run.step,
                                (int64_t)s->good_steps, (int64_t)s->skipped, s->scale,
                                (int64_t)set->options.optimizer.kind, (int64_t)set->precision.kind,
                                (int64_t)tt__program_hash(p)};
    return h;
}
