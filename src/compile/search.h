#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../passes/precision.h"
#include "../passes/recompute.h"
#include "../passes/offload.h"
#include "../passes/overlap.h"
#include "../context/memory.h"
#include "program.h"
#include "settings.h"
#include "build.h"
#include "choice.h"

/* -------- builds */

/* Notes in *s a choice and the bytes of its program, if the program is the smallest so far. If two
   programs have equal bytes, notes the program whose policy recomputes less. */
static tt_status tt__note_min(tt_context *ctx, const tt__choice *choice, size_t bytes, tt__shortage *s)
{
    bool *drop = NULL;
    if (bytes > s->min || (bytes == s->min && choice->recompute >= s->how.recompute)) return TT_OK;
    if (choice->n_drop && !tt__copy_array(ctx, (void **)&drop, choice->drop, (size_t)choice->n_drop))
        return TT_ERR_MEMORY;
    tt__free(ctx, (void *)(uintptr_t)s->how.drop);
    s->min = bytes;
    s->how = *choice;
    s->how.drop = drop;
    s->items = 0;
    for (int v = 0; v < choice->n_drop; v++) s->items += drop[v];
    return TT_OK;
}

/* Builds the program of a choice. *e: the sizes that the arena has with this program. */
static tt_status tt__try_build(const tt__job *j, const tt__choice *choice, tt__extent *e)
{
    tt_program *p = j->p;
    tt__built_free(p->ctx, &p->built);
    tt_status status = tt__build(j->t, j->root, &p->settings, choice, &p->built);
    p->chosen = *choice;
    p->chosen.drop = NULL;
    p->builds++;
    if (status == TT_OK) status = tt__extent_of(p, j->shared, e);
    return status == TT_OK && j->min ? tt__note_min(p->ctx, choice, e->bytes, j->min) : status;
}

/* Builds candidate k. If the build fails, marks all candidates with the same hash as failed. */
static tt_status tt__build_candidate(tt__chooser *c, int k, tt__extent *e)
{
    const tt__choice choice = tt__with_set(c, c->list[k].how, c->list[k].set);
    const tt_status status = tt__try_build(&c->job, &choice, e);
    const bool failed = status != TT_OK || !tt__fits(e);
    for (int j = 0; j < c->n_list && failed; j++) c->list[j].failed |= c->list[j].hash == c->list[k].hash;
    return status;
}

/* Sets *how to the next slower pace: first, each instruction is a group of its own; then copies run fewer
   blocks ahead. grouped: bytes of the largest group. Returns false if there is no slower pace. */
static bool tt__slow_down(tt__choice *how, size_t grouped)
{
    const bool parts = grouped && how->halved != TT__ONE_BY_ONE;
    if (!parts && how->ahead == 0) return false;
    how->halved = parts ? TT__ONE_BY_ONE : 0;
    how->ahead -= !parts;
    return true;
}

/* Adds a copy of candidate k, whose placement does not fit the budget, at the next slower pace that may
   fit. */
static tt_status tt__lower(tt__chooser *c, int k)
{
    tt__choice how = c->list[k].how;
    tt_status status = TT_OK;
    for (int at = k; status == TT_OK;) {
        if (!tt__slow_down(&how, c->list[at].parts ? c->list[at].grouped : 0)) break;
        const bool known = tt__find_candidate(c, &how, c->list[k].set) >= 0;
        status = tt__consider(c, &how, c->list[k].set, &at);
        if (status == TT_OK && !known && tt__may_fit(c, at)) break;
    }
    return status;
}

/* Adds copies of candidate k with smaller groups of instructions. They may be faster: the first updates wait
   for fewer copies, and the end of the step waits for fewer copies after the last update. */
static tt_status tt__tune(tt__chooser *c, int k)
{
    const tt__candidate was = c->list[k];
    tt__choice how = was.how;
    tt_status status = TT_OK;
    c->list[k].tuned = true;
    for (int trial = 1, at; trial < TT__HALVINGS && was.grouped && status == TT_OK; trial++) {
        how.halved = tt__halved(was.grouped, trial);
        if (how.halved < was.how.halved) continue;
        status = tt__consider(c, &how, was.set, &at);
        if (status == TT_OK) c->list[at].tuned = true;
    }
    return status;
}

/* Builds the candidates, from the cheapest on, until one fits or `max` builds were made for the program. *e:
   the arena's sizes with the last build, which may exceed the budget. */
static tt_status tt__build_cheapest(tt__chooser *c, int max, tt__extent *e)
{
    const int before = c->job.p->builds;
    tt_status status = TT_OK;
    size_t room = c->budget;
    for (int k; status == TT_OK && c->job.p->builds < max && (k = tt__cheapest(c, room)) >= 0;) {
        if (!c->list[k].raised) {
            status = tt__raise(c, k);
            continue;
        }
        if (c->by_seconds && !c->all && !c->list[k].tuned) {
            status = tt__tune(c, k);
            continue;
        }
        status = tt__build_candidate(c, k, e);
        if (status == TT_OK && tt__fits(e)) return TT_OK;
        if (status == TT_OK) status = tt__lower(c, k);
        const bool many = c->job.p->builds - before > (max - before) / 2;
        const size_t over = e->bytes > c->budget ? e->bytes - c->budget : 0;
        if (many && over < room) room -= over;
    }
    return status;
}

/* Returns whether candidate a is before b in the search for the smallest program: whether a needs fewer bytes
   or, with equal bytes, has the lower value of `update` or, with equal values, takes fewer seconds. The order
   depends on the candidates alone. */
static bool tt__is_smaller(const tt__candidate *a, const tt__candidate *b)
{
    if (a->bytes != b->bytes) return a->bytes < b->bytes;
    if (a->how.update != b->how.update) return a->how.update < b->how.update;
    if (a->seconds != b->seconds) return a->seconds < b->seconds;
    return a->flops != b->flops ? a->flops < b->flops : a->hash < b->hash;
}

/* Returns how many of the smallest candidates to build, as placement adds bytes to the estimates: for a small
   program, enough to find the smallest; for a large one 4, as more builds would save few bytes. */
static int tt__max_min(const tt__chooser *c)
{
    const int n = tt__front(c)->t->n_code;
    return n < TT__LARGE ? 4 + 6000 / (1 + n) : 4;
}

/* Builds the candidates, from the smallest on and at most `max`, until one fits or no other can be smaller
   than the program in job.least. */
static tt_status tt__build_min(tt__chooser *c, int max, tt__extent *e)
{
    for (int k = 0; k < max; k++) {
        int best = -1;
        for (int j = 0; j < c->n_list; j++)
            if (!c->list[j].failed && (best < 0 || tt__is_smaller(&c->list[j], &c->list[best]))) best = j;
        if (best < 0 || c->list[best].bytes >= c->job.min->min) return TT_OK;
        const tt_status status = tt__build_candidate(c, best, e);
        if (status == TT_ERR_MEMORY) return status;
        /* after another error, such as a missing kernel, the next candidate is tried */
        if (status == TT_OK && tt__fits(e)) return TT_OK;
    }
    return TT_OK;
}

/* -------- search for the smallest program */

/* Flags of the options that a search may change. */
enum { TT__MAY_ZERO = 1, TT__MAY_RECOMPUTE = 2, TT__MAY_OFFLOAD = 4, TT__MAY_UPDATE = 8, TT__MAY_ALL = 15 };

/* A change of one option. `value` is the new value of zero, recompute or update, or the TT__OUT_ flag of the
   storage that `offload` gains or loses. */
typedef struct tt__change { unsigned option; int value; } tt__change;
static const tt__change tt__changes[] = {
    {TT__MAY_ZERO, 0}, {TT__MAY_ZERO, 1}, {TT__MAY_ZERO, 2}, {TT__MAY_ZERO, 3},
    {TT__MAY_RECOMPUTE, TT__RECOMPUTE_NONE}, {TT__MAY_RECOMPUTE, TT__RECOMPUTE_CHEAP},
    {TT__MAY_RECOMPUTE, TT__RECOMPUTE_ATTENTION}, {TT__MAY_RECOMPUTE, TT__RECOMPUTE_BLOCKS},
    {TT__MAY_OFFLOAD, TT__OUT_OPTIMIZER}, {TT__MAY_OFFLOAD, TT__OUT_GRADIENTS},
    {TT__MAY_OFFLOAD, TT__OUT_PARAMETERS}, {TT__MAY_OFFLOAD, TT__OUT_ACTIVATIONS},
    {TT__MAY_UPDATE, TT__UPDATE_END}, {TT__MAY_UPDATE, TT__UPDATE_BACKWARD},
    {TT__MAY_UPDATE, TT__UPDATE_HOST}};

/* Returns whether the program could be compiled with this value of tt_compile_options.update. */
static bool tt__may_update(const tt_program *p, tt__update_place update)
{
    const tt_compile_options *o = &p->settings.options;
    if (!o->train || (update == TT__UPDATE_HOST && tt__one_memory(p))) return update == p->settings.update;
    return tt__goes_together(&p->settings, o->parallel.zero, update);
}

static bool tt__may_zero(const tt_program *p, int zero)
{
    const tt_parallel *r = &p->settings.options.parallel;
    return zero == r->zero || (r->data > 1 && tt__goes_together(&p->settings, zero, p->settings.update));
}

/* Changes an option of *how. Returns false if `may` lacks the option, if nothing changes, or if the program
   could not be compiled with the new value. */
static bool tt__make_change(const tt__chooser *c, unsigned may, tt__change x, tt__choice *how)
{
    const tt_program *p = c->job.p;
    const tt__choice was = *how;
    const unsigned option = x.option & may;
    const bool train = p->settings.options.train;
    const bool moves = !tt__one_memory(p) && (train || x.value == TT__OUT_PARAMETERS);
    if (option == TT__MAY_ZERO && tt__may_zero(p, x.value) && (x.value || !c->zero)) how->zero = x.value;
    if (option == TT__MAY_RECOMPUTE && train) how->recompute = (tt__recompute_policy)x.value;
    if (option == TT__MAY_OFFLOAD && moves) how->offload ^= (unsigned)x.value;
    if (option == TT__MAY_UPDATE && tt__may_update(p, (tt__update_place)x.value))
        how->update = (tt__update_place)x.value;
    return how->zero != was.zero || how->recompute != was.recompute || how->offload != was.offload ||
           how->update != was.update;
}

/* Adds a choice at the slowest pace. An impossible choice becomes a failed candidate. */
static tt_status tt__consider_slowest(tt__chooser *c, tt__choice how, const bool *set)
{
    int at;
    how = tt__at_slowest(how);
    if (!(how.offload & TT__OUT_ACTIVATIONS)) how.activations = INT_MAX;
    return tt__consider(c, &how, set, &at) == TT_ERR_MEMORY ? TT_ERR_MEMORY : TT_OK;
}

/* Sets the options of *how that `may` allows to combination k of their values. Returns false if the
   combination is impossible. */
enum { TT__COMBINATIONS = 4 * 4 * 16 * 3 };
static bool tt__combine(const tt__chooser *c, unsigned may, int k, tt__choice *how)
{
    const int zero = k % 4, policy = k / 4 % 4, offload = k / 16 % 16, update = k / 256;
    const int out = offload ^ (int)c->base.offload;
    *how = c->base;
    for (const tt__change *x = tt__changes; x < tt__changes + TT__COUNT(tt__changes); x++) {
        const int value = x->option == TT__MAY_ZERO ? zero : x->option == TT__MAY_RECOMPUTE ? policy : update;
        const bool wanted = x->option == TT__MAY_OFFLOAD ? out & x->value : x->value == value;
        if (wanted) tt__make_change(c, may, *x, how);
    }
    /* With update "host" the optimizer state is always in the host's memory. */
    return how->zero == zero && (int)how->recompute == policy && (int)how->offload == offload &&
           (int)how->update == update && (update != TT__UPDATE_HOST || !(out & TT__OUT_OPTIMIZER));
}

/* Returns the smallest candidate from number `from` on; -1: none. */
static int tt__min_live(const tt__chooser *c, int from)
{
    int best = -1;
    for (int k = from; k < c->n_list; k++) {
        const bool known = c->list[k].bytes < SIZE_MAX;
        if (known && (best < 0 || tt__is_smaller(&c->list[k], &c->list[best]))) best = k;
    }
    return best;
}

/* Returns a choice in which each option in `may` has the value that usually saves the most memory. */
static tt__choice tt__max_saving(const tt__chooser *c, unsigned may)
{
    tt__choice how = tt__at_slowest(c->base);
    how.arrivals = false;
    for (const tt__change *x = tt__changes; x < tt__changes + TT__COUNT(tt__changes); x++)
        if (x->option == TT__MAY_OFFLOAD ? !(how.offload & (unsigned)x->value) : x->value == 3)
            tt__make_change(c, may, *x, &how);
    if (!(how.offload & TT__OUT_ACTIVATIONS)) how.activations = INT_MAX;
    return how;
}

/* Removes the candidates from number `from` on. */
static void tt__forget(tt__chooser *c, int from)
{
    while (c->n_list > from) tt__free(c->ctx, c->list[--c->n_list].set);
}

/* Changes one option in `may` at a time, starting from candidate `from`, and adds the results as candidates,
   as long as the smallest candidate becomes smaller. Recomputes no items. */
static tt_status tt__try_single(tt__chooser *c, unsigned may, int from)
{
    tt_status status = TT_OK;
    memset(c->set, 0, sizeof *c->set * (size_t)c->n);
    for (int min = from, before = -1; min != before && status == TT_OK;) {
        const tt__choice was = c->list[min].how;
        for (int k = 0; k < TT__COUNT(tt__changes) && c->left > 0 && status == TT_OK; k++) {
            tt__choice how = was;
            if (tt__make_change(c, may, tt__changes[k], &how)) status = tt__consider_slowest(c, how, c->set);
        }
        before = min;
        for (int k = 0; k < c->n_list; k++) {
            const bool plain = !c->n || !memchr(c->list[k].set, true, (size_t)c->n);
            const bool known = plain && c->list[k].bytes < SIZE_MAX;
            if (known && tt__is_smaller(&c->list[k], &c->list[min])) min = k;
        }
    }
    return status;
}

/* Adds candidates whose set has one item less, or one more, than the set of the smallest candidate, as long
   as the smallest candidate becomes smaller. Adds only items that were banned before, and items whose
   instruction has a second result, which is recomputed with the item and may live longer. */
static tt_status tt__try_other_sets(tt__chooser *c, const tt__choice *how, int *min)
{
    tt_status status = TT_OK;
    memcpy(c->set, c->list[*min].set, sizeof *c->set * (size_t)c->n);
    for (int n = 0, same = 0; same < c->n && c->left > 0 && status == TT_OK; n = (n + 1) % c->n, same++) {
        if (!c->set[n] && !c->banned[n] && !tt__front(c)->t->code[c->made[n]].out[1]) continue;
        c->set[n] = !c->set[n];
        status = tt__estimate(c, how, c->set);
        if (c->list[c->n_list - 1].bytes < c->list[*min].bytes) *min = c->n_list - 1, same = 0;
        else c->set[n] = !c->set[n];
    }
    return status;
}

/* Searches for the set of items that makes a configuration need the fewest bytes: starts from the empty set,
   then tries whole blocks, then starts from the best set so far. The search depends on the program and the
   configuration alone, so that a later compilation finds the program that an error message names. *min: the
   number of the smallest candidate; -1: none, or this configuration was searched before. */
static tt_status tt__try_min_set(tt__chooser *c, tt__choice how, int *min)
{
    const int64_t max = TT__FOR_LEAST / (tt__front(c)->t->n_code + 1);
    const int from = c->n_list;
    how.recompute = TT__RECOMPUTE_CHEAP;
    memset(c->set, 0, sizeof *c->set * (size_t)c->n);
    const uint64_t hash = tt__hash_choice(c, &how, c->set);
    *min = -1;
    for (int k = 0; k < c->n_searched; k++) if (c->searched[k] == hash) return TT_OK;
    if (c->n_searched < TT__COUNT(c->searched)) c->searched[c->n_searched++] = hash;
    c->left = TT__FOR_LEAST;
    tt_status status = TT_OK;
    for (size_t before = SIZE_MAX; status == TT_OK;) {
        memset(c->banned, 0, sizeof *c->banned * (size_t)c->n);
        status = tt__try_path(c, &how, (int)(1 + c->n / tt__max(1, max)));
        if (status == TT_OK && before == SIZE_MAX) status = tt__try_blocks(c, &how);
        *min = tt__min_live(c, from);
        if (*min < 0 || status != TT_OK) break;
        status = tt__try_other_sets(c, &how, min);
        if (c->list[*min].bytes >= before || c->left <= 0) break;
        before = c->list[*min].bytes;
    }
    return status;
}

/* Finds the change of one option in `may`, except recomputation, that saves the most bytes in candidate k
   with its set of items. Returns false if no change saves bytes. */
static bool tt__find_change(tt__chooser *c, unsigned may, int k, tt__choice *how, tt_status *status)
{
    const int from = c->n_list;
    const tt__choice was = c->list[k].how;
    size_t min = c->list[k].bytes;
    bool found = false;
    memcpy(c->set, c->list[k].set, sizeof *c->set * (size_t)c->n);
    may &= ~(unsigned)TT__MAY_RECOMPUTE;
    for (int change = 0; change < TT__COUNT(tt__changes) && *status == TT_OK; change++) {
        tt__choice other = was;
        if (!tt__make_change(c, may, tt__changes[change], &other)) continue;
        *status = tt__consider_slowest(c, other, c->set);
        if (c->n_list == from || c->list[c->n_list - 1].bytes >= min) continue;
        min = c->list[c->n_list - 1].bytes;
        *how = c->list[c->n_list - 1].how;
        found = true;
    }
    tt__forget(c, from); /* a search of the changed configuration may add candidates anew */
    return found;
}

/* Adds candidates for the smallest program if the options in `may` can change: for a small program, all
   combinations of values; then changes of one option at a time; then, for the smallest of these, sets of
   items to recompute. */
static tt_status tt__try_min(tt__chooser *c, unsigned may)
{
    tt__choice how;
    int64_t combinations = 0;
    tt_status status = TT_OK;
    c->left = TT__FOR_LEAST;
    for (int k = 0; k < TT__COMBINATIONS; k++) combinations += tt__combine(c, may, k, &how);
    /* trying all combinations takes few estimates */
    const bool all = combinations * tt__front(c)->t->n_code <= TT__FOR_LEAST / 4;
    memset(c->set, 0, sizeof *c->set * (size_t)c->n);
    for (int k = 0; k < TT__COMBINATIONS && all && status == TT_OK; k++)
        if (tt__combine(c, may, k, &how)) status = tt__consider_slowest(c, how, c->set);
    if (status == TT_OK) status = tt__consider_slowest(c, c->base, c->set);
    if (status == TT_OK) status = tt__consider_slowest(c, tt__max_saving(c, may), c->set);
    int min = tt__min_live(c, 0);
    if (min < 0 || status != TT_OK) return status;
    status = tt__try_single(c, may, min);
    min = tt__min_live(c, 0);
    how = c->list[min].how;
    for (int k = 0; k < 3 && c->n && status == TT_OK; k++) {
        status = tt__try_min_set(c, how, &min);
        if (status != TT_OK || min < 0 || !tt__find_change(c, may, min, &how, &status)) break;
    }
    return status;
}

/* Starts a search anew: forgets all candidates, and allows TT__ESTIMATES estimates again. */
static void tt__restart(tt__chooser *c)
{
    tt__forget(c, 0);
    c->best = INFINITY;
    c->left = TT__ESTIMATES;
}

/* -------- when nothing fits */

/* The value of option `offload`, as a string, for each combination of TT__OUT_ flags. */
static const char *const tt__out_lists[16] = {
    "none", "optimizer", "gradients", "optimizer,gradients", "parameters", "optimizer,parameters",
    "gradients,parameters", "optimizer,gradients,parameters", "activations", "optimizer,activations",
    "gradients,activations", "optimizer,gradients,activations", "parameters,activations",
    "optimizer,parameters,activations", "gradients,parameters,activations",
    "optimizer,gradients,parameters,activations"};

/* Returns text for an option and its value (NULL: the option alone), as tt__name_options names it. */
static const char *tt__say_option(const tt_context *ctx, const char *name, const char *value, char to[96])
{
    char plain[96];
    const bool number = value && *value >= '0' && *value <= '9';
    if (!value) snprintf(plain, sizeof plain, "{%s}", name);
    else snprintf(plain, sizeof plain, number ? "{%s %s}" : "{%s \"%s\"}", name, value);
    tt__name_options(ctx, plain, to, 96);
    return to;
}

/* Returns text for a number of bytes, in the style of tt_context_options.wording. */
static const char *tt__say_bytes(const tt_context *ctx, size_t bytes, char to[32])
{
    ctx->options.wording.bytes(ctx->options.wording.user, bytes, to, 32);
    return to;
}

/* Returns text for an option, given by its TT__MAY_ flag, and its value. */
static const char *tt__say_value(const tt_program *p, unsigned option, int value, char to[96])
{
    char zero[12];
    snprintf(zero, sizeof zero, "%d", value);
    return option == TT__MAY_ZERO        ? tt__say_option(p->ctx, "parallel.zero", zero, to)
           : option == TT__MAY_RECOMPUTE ? tt__say_option(p->ctx, "recompute", tt__recompute_names[value], to)
           : option == TT__MAY_OFFLOAD   ? tt__say_option(p->ctx, "offload", tt__out_lists[value], to)
                                         : tt__say_option(p->ctx, "update", tt__update_names[value], to);
}

/* Prints a choice as options. items: number of values recomputed beyond policy "cheap". */
static void tt__print_options(tt__text_buffer *text, const tt_program *p, const tt__choice *x, int items)
{
    const bool train = p->settings.options.train;
    const int policy = items ? TT__RECOMPUTE_BUDGET : (int)x->recompute;
    char said[96];
    if (train) tt__print(text, "%s", tt__say_value(p, TT__MAY_RECOMPUTE, policy, said));
    if (train && items) tt__print(text, " (of %d value%s)", items, items > 1 ? "s" : "");
    if (x->offload || !tt__one_memory(p) || !train)
        tt__print(text, "%s%s", train ? ", " : "", tt__say_value(p, TT__MAY_OFFLOAD, (int)x->offload, said));
    if (train && (x->update || p->settings.update))
        tt__print(text, ", %s", tt__say_value(p, TT__MAY_UPDATE, (int)x->update, said));
    if (p->settings.options.parallel.data > 1)
        tt__print(text, ", %s", tt__say_value(p, TT__MAY_ZERO, x->zero, said));
}

/* A row of the error message: a memory-saving change, and the bytes that the program then needs. */
typedef struct tt__saving {
    tt__change change;
    size_t bytes;           /* bytes of the program with the changes of this row and of the rows before */
    double flops;           /* FLOPs of that program's recomputation */
    bool advice;            /* the row is advice to the user: the changed option is not set to "budget" */
} tt__saving;

/* The memory-saving changes that an error names, in the order of their cost. The changes from number
   TT__AFTER_HOST on are made only with update "host". */
static const tt__change tt__steps[] = {
    {TT__MAY_ZERO, 3}, {TT__MAY_RECOMPUTE, TT__RECOMPUTE_CHEAP},
    {TT__MAY_RECOMPUTE, TT__RECOMPUTE_ATTENTION}, {TT__MAY_RECOMPUTE, TT__RECOMPUTE_BLOCKS},
    {TT__MAY_OFFLOAD, TT__OUT_OPTIMIZER}, {TT__MAY_OFFLOAD, TT__OUT_GRADIENTS},
    {TT__MAY_OFFLOAD, TT__OUT_ACTIVATIONS}, {TT__MAY_OFFLOAD, TT__OUT_PARAMETERS},
    {TT__MAY_UPDATE, TT__UPDATE_BACKWARD}, {TT__MAY_UPDATE, TT__UPDATE_HOST},
    {TT__MAY_OFFLOAD, TT__OUT_GRADIENTS}, {TT__MAY_OFFLOAD, TT__OUT_PARAMETERS}};
enum { TT__STEPS = TT__COUNT(tt__steps), TT__AFTER_HOST = 10 };

/* Why a program is refused. */
typedef struct tt__refusal {
    tt__saving row[2 * TT__STEPS]; int n;
    tt__choice how;         /* the choice of the last row */
    bool fits;              /* the program of the last row fits the budget */
    bool replaces;          /* a row gives `update` another value than a row before */
    tt__shortage min;     /* the smallest program that any values of all options make possible */
} tt__refusal;

/* Returns the options that are set to "budget", as TT__MAY_ flags. */
static unsigned tt__free_options(const tt__chooser *c)
{
    return (c->zero ? TT__MAY_ZERO : 0) | (c->recompute ? TT__MAY_RECOMPUTE : 0) |
           (c->offload ? TT__MAY_OFFLOAD : 0);
}

/* Returns whether choice *x differs from the caller's options only in options that are "budget". */
static bool tt__is_free(const tt__chooser *c, const tt__choice *x)
{
    return (c->zero || x->zero == c->base.zero) && (c->offload || x->offload == c->base.offload) &&
           (c->recompute || (x->recompute == c->base.recompute && !x->n_drop)) &&
           x->update == c->base.update;
}

/* Adds memory-saving changes, one after the other, until a program fits: first changes of "budget" options,
   then, as advice, of other options. Notes a row for each change that makes the program smaller. */
static tt_status tt__take_steps(tt__chooser *c, tt__shortage *s, tt__extent *e, tt__refusal *r)
{
    const tt__job *j = &c->job;
    const bool chooses = c->recompute || c->by_seconds;
    size_t bytes = s->bytes;
    r->how = tt__at_slowest(c->base);
    for (int k = 0; k < (j->attempt->quiet ? 1 : 2) * TT__STEPS && !r->fits; k++) {
        const bool advice = k >= TT__STEPS, after_host = k % TT__STEPS >= TT__AFTER_HOST;
        const tt__change change = tt__steps[k % TT__STEPS];
        const bool own = tt__free_options(c) & change.option && !after_host;
        tt__choice next = r->how;
        if (own == advice || (after_host && next.update != TT__UPDATE_HOST)) continue;
        if (!tt__make_change(c, TT__MAY_ALL, change, &next)) continue;
        if (next.recompute < r->how.recompute || next.offload < r->how.offload ||
            next.update < r->how.update) continue; /* the change would need more memory */
        if (advice && chooses && s->min < bytes) bytes = s->min; /* the message first names s->min */
        c->job.min = advice ? &r->min : s;
        const tt_status built = tt__try_build(j, &next, e);
        if (built == TT_ERR_MEMORY) return built;
        /* A change may fail because parameters are already stored in another way. */
        if (built != TT_OK || e->bytes >= bytes) continue;
        const tt__saving row = {change, bytes = e->bytes, tt__flops_of_copies(j->p->built.t), advice};
        r->replaces = r->replaces || (r->how.update && next.update != r->how.update);
        r->row[r->n++] = row;
        r->how = next;
        r->fits = tt__fits(e);
    }
    return TT_OK;
}

/* Builds the smallest program that is possible with any options, and notes it in r->min. */
static tt_status tt__find_possible(tt__chooser *c, tt__extent *e, tt__refusal *r)
{
    c->job.min = &r->min;
    /* removes earlier candidates, which were made without items */
    if (!c->recompute && c->job.p->settings.options.train) {
        tt__forget(c, 0);
        c->n_searched = 0;
        tt__list_items(c);
    }
    memset(c->set, 0, sizeof *c->set * (size_t)c->n);
    tt_status status = tt__consider_slowest(c, r->how, c->set);
    if (status == TT_OK) status = tt__try_min(c, TT__MAY_ALL);
    return status == TT_OK ? tt__build_min(c, tt__max_min(c), e) : status;
}

/* Prints where the changes of "budget" options end and advice begins. reported: prints the smallest program
   that "budget" options allow. */
static void tt__print_free(tt__text_buffer *text, const tt_program *p, const tt__shortage *s, bool reported)
{
    char said[32];
    if (reported) tt__print(text, "%s at least %s with ", text->length ? "," : ":",
                        tt__say_bytes(p->ctx, s->min, said));
    if (reported) tt__print_options(text, p, &s->how, s->items);
    tt__print(text, "%s if more may change, ", text->length ? ";" : ":");
}

/* Prints the rows of a refusal and the smallest possible program. budget: bytes. */
static void tt__print_refusal(tt__text_buffer *text, const tt__chooser *c, const tt__shortage *s,
                              const tt__refusal *r, size_t budget)
{
    const tt_program *p = c->job.p;
    const tt__saving *last = r->n ? &r->row[r->n - 1] : NULL;
    const bool chooses = c->recompute || c->by_seconds, advised = last && last->advice;
    const bool reported = chooses && s->min < s->bytes, staged = p->settings.options.parallel.pipeline > 1;
    const bool more = chooses && !advised && r->min.min < s->min;
    const char *const which_fits = staged ? ", with which this stage fits" : ", which fits";
    char name[96], said[32];
    for (const tt__saving *x = r->row; x < r->row + r->n; x++) {
        const bool first = x == r->row;
        if (chooses && x->advice && (first || !x[-1].advice)) tt__print_free(text, p, s, reported);
        else tt__print(text, "%s", first ? ": " : ", then ");
        tt__print(text, "%s %s%s", tt__say_value(p, x->change.option, x->change.value, name),
                  first ? "needs " : "", tt__say_bytes(p->ctx, x->bytes, said));
        if (x->change.option == TT__MAY_RECOMPUTE)
            tt__print(text, " (%+.1f%% FLOPs)", 100 * x->flops / s->flops);
    }
    if (r->fits) {
        tt__print(text, "%s", which_fits);
        return;
    }
    if (more) tt__print_free(text, p, s, true);
    tt__print(text, "%sthe smallest possible is %s", more ? "" : "; ",
              tt__say_bytes(p->ctx, r->min.min, said));
    if (chooses || r->min.min < s->bytes) {
        const bool all = advised && !reported && !r->replaces && last->bytes == r->min.min;
        tt__print(text, " with %s", all ? "all of these" : "");
        if (!all) tt__print_options(text, p, &r->min.how, r->min.items);
    }
    if (r->min.min <= budget) tt__print(text, "%s", which_fits);
}

/* Makes the last builds, and fails with a message unless one of them fits with the options that are "budget".
   The message names the bytes after each memory-saving change and the smallest possible program. */
static tt_status tt__refuse(tt__chooser *c, tt__shortage *s, tt__extent *e)
{
    tt_program *p = c->job.p;
    tt__attempt *attempt = c->job.attempt;
    char rows[720] = "", said[32], limit[32], name[96], of_stage[32] = "";
    tt__text_buffer text = {rows, sizeof rows, 0};
    tt__refusal r;
    memset(&r, 0, sizeof r);
    r.min.min = SIZE_MAX;
    tt_status status = p->built.t ? tt__check_extent(p, c->job.shared, e) : TT_OK;
    if (status == TT_OK) status = tt__take_steps(c, s, e, &r);
    if (status == TT_OK && !r.fits) status = tt__note_min(p->ctx, &s->how, s->min, &r.min);
    if (status == TT_OK && !r.fits && !attempt->quiet) status = tt__find_possible(c, e, &r);
    if (status == TT_OK && !r.fits && tt__is_free(c, &r.min.how))
        status = tt__note_min(p->ctx, &r.min.how, r.min.min, s);
    const bool found = status == TT_OK && tt__fits(e) && tt__is_free(c, &p->chosen);
    if (status == TT_OK && !found) tt__print_refusal(&text, c, s, &r, e->budget);
    attempt->needs = s->min;
    attempt->advised = r.fits ? 0 : r.min.min;
    tt__free(p->ctx, (void *)(uintptr_t)r.min.how.drop);
    if (status != TT_OK || found) return status;
    if (p->settings.options.parallel.pipeline > 1)
        snprintf(of_stage, sizeof of_stage, " of stage %d", p->settings.stage);
    /* the budget counts offloaded bytes, so offload saves nothing */
    if (tt__one_memory(p) && p->settings.offload)
        tt__print(&text, "; without %s, which saves nothing on {device \"cpu\"}, it is less",
                  tt__say_option(p->ctx, "offload", NULL, name));
    /* whether the wording writes numbers without a unit */
    const bool plain = p->ctx->options.wording.bytes == tt__default_bytes;
    return tt__fail(p->ctx, TT_ERR_BUDGET, "the plan%s needs %s%s%s, but {memory_budget} is %s%s%s. A "
                    "micro-batch of fewer {rows} needs less", of_stage, tt__say_bytes(p->ctx, s->bytes, said),
                    plain ? " bytes" : "", p->settings.group->ranks > 1 ? " a rank" : "",
                    tt__say_bytes(p->ctx, e->budget, limit),
                    e->by_them ? " for a program that this one shares an arena with" : "", rows);
}

static void tt__chooser_close(tt__chooser *c)
{
    tt__forget(c, 0);
    for (int k = 0; k < TT__COUNT(c->front) * TT__COUNT(c->front[0]); k++)
        tt__built_free(c->ctx, &c->front[k / TT__COUNT(c->front[0])][k % TT__COUNT(c->front[0])]);
    tt__free(c->ctx, c->list);
    tt__free(c->ctx, c->item);
    tt__free(c->ctx, c->price);
    tt__free(c->ctx, c->made);
    tt__free(c->ctx, c->attention);
    tt__free(c->ctx, c->level);
    tt_tape_free(c->scratch);
}

/* Notes where earlier programs have stored the parameters, which stay there. */
static void tt__note_placements(tt__chooser *c)
{
    const tt_tape *t = c->job.t;
    const tt__settings *s = &c->job.p->settings;
    for (int32_t v = 1; v < t->n_values && c->by_seconds; v++) {
        const tt__tape_value *x = &t->values[v];
        const tt_param *param = x->storage == TT__PARAMETER && x->base == v ? c->ctx->params[x->param] : NULL;
        if (!param || param->size < TT__PIECES_FROM || x->offload) continue;
        const tt__arena *a = tt__placement_arena(s->kind, c->job.shared, param, s->stage,
                                            s->options.parallel.pipeline);
        const tt__placement *placement = tt__placement_in(a, x->param);
        if (!placement) continue;
        c->held = true;
        c->held_on_host = placement->space == TT__HOST;
        c->held_split = placement->part.unit == TT__CHUNK;
    }
    if (c->zero && c->held_split) c->base.zero = 3;
    if (c->offload && c->held_on_host) c->base.offload = TT__OUT_PARAMETERS;
}

/* Returns a chooser with its first fields set: which options may change, and `base`, the choice that does
   only what the options demand, with copies as far ahead as possible. */
static tt__chooser tt__chooser_of(const tt__job *j)
{
    const tt__settings *s = &j->p->settings;
    const tt_parallel *ranks = &s->options.parallel;
    const tt__choice base = {s->recompute, s->offload, INT_MAX, s->update, 0, INT_MAX, NULL, 0, ranks->zero};
    tt__chooser c;
    memset(&c, 0, sizeof c);
    c.ctx = j->p->ctx;
    c.job = *j;
    c.base = base;
    c.base.ahead = (s->kind->host && !c.ctx->late) || c.ctx->profiles ? 0 : TT__AHEAD;
    /* A program that does not train has its results read at once: no earlier run is in flight whose time
       could hide the copies of inputs. */
    c.base.arrivals = s->options.train && !s->kind->host && s->memory == TT__OWN_MEMORY &&
                      ranks->pipeline <= 1 && !c.ctx->profiles && !j->attempt->no_arrivals;
    if (s->recompute == TT__RECOMPUTE_BUDGET) c.base.recompute = TT__RECOMPUTE_NONE;
    if (s->zero_fits) c.base.zero = 1;
    c.recompute = s->recompute == TT__RECOMPUTE_BUDGET && s->options.train;
    c.offload = s->offload_fits && !tt__one_memory(j->p);
    c.zero = s->zero_fits && ranks->data > 1;
    const bool moves = s->offload || (ranks->data > 1 && c.base.zero == 3);
    c.by_seconds = c.offload || c.zero || (c.recompute && moves);
    c.best = INFINITY;
    c.left = TT__ESTIMATES;
    return c;
}

/* Allocates the chooser's arrays for estimates and lists its items. */
static tt_status tt__chooser_open(tt__chooser *c)
{
    const tt__settings *s = &c->job.p->settings;
    tt__built *front = &c->front[c->base.zero][c->base.update];
    tt_status status = tt__begin_build(c->job.t, c->job.root, s, &c->base, front);
    if (status != TT_OK) return status;
    c->scratch = tt__copy_tape(front->t);
    if (!c->scratch) return TT_ERR_MEMORY;
    c->forward = tt__forward_of(front->t);
    c->blocks = front->blocks;
    status = tt__items_open(c);
    if (status == TT_OK && c->recompute) tt__list_items(c);
    return status;
}

/* Notes in *s the bytes and FLOPs of the program that the options alone demand. This program does not fit the
   budget. */
static void tt__note_whole(const tt_program *p, const tt__extent *e, tt__shortage *s)
{
    const tt_tape *t = p->built.t;
    s->bytes = e->bytes;
    for (int k = 0; k < t->n_code; k++) s->flops += tt__flops_at_capacity(t, &t->code[k]);
    s->flops -= tt__flops_of_copies(t);
}

/* Builds the smallest program found so far once more, as later builds have replaced it. */
static tt_status tt__build_again(tt__chooser *c, const tt__shortage *s, tt__extent *e)
{
    tt__job job = c->job;
    job.min = NULL;
    return tt__try_build(&job, &s->how, e);
}

/* Searches for a program that is smaller than the smallest one built: sets the budget to the bytes of that
   one, and builds the cheapest candidates for this budget, because the real placement of a candidate may need
   fewer bytes than its estimate. Otherwise a compilation with this budget could find a program that the error
   message had ruled out. A large program gets 3 rounds of at most 6 builds. */
static tt_status tt__descend(tt__chooser *c, bool small, const tt__shortage *s, tt__extent *e)
{
    const size_t budget = c->budget;
    const bool large = tt__front(c)->t->n_code >= TT__LARGE;
    tt_status status = TT_OK;
    size_t before = SIZE_MAX;
    for (int k = 0; s->min < before && s->min > budget && (k < 3 || !large) && status == TT_OK; k++) {
        const int max = large ? c->job.p->builds + 6 : TT__BUILDS - 2;
        c->budget = before = s->min;
        if (!small) tt__restart(c);
        if (!small) status = tt__list_candidates(c);
        if (status == TT_OK) status = tt__build_cheapest(c, max, e);
    }
    c->budget = budget;
    if (!small) tt__restart(c);
    return status;
}

/* Builds the cheapest program that fits the budget. *e: on entry, the arena's sizes with a program that does
   not fit; on return, with the last build. Whether any program fits depends on the smallest program alone,
   which is the same for every budget. An error names the smallest program, and if the search for the cheapest
   finds nothing, the smallest is built. */
static tt_status tt__choose(tt__chooser *c, tt__shortage *s, tt__extent *e)
{
    const unsigned may = tt__free_options(c);
    tt_status status = TT_OK;
    c->budget = e->budget;
    /* Only the pace may change, and the slowest pace needs too many bytes. */
    const bool hopeless = !may && s->min > c->budget;
    if (!hopeless || !c->job.attempt->quiet) status = tt__chooser_open(c);
    if (hopeless && status == TT_OK) status = tt__refuse(c, s, e);
    if (hopeless || status != TT_OK) return status;
    if (!c->by_seconds) { /* the base choice or policy "cheap" often fits, and takes few estimates */
        tt__choice cheap = c->base;
        cheap.recompute = TT__RECOMPUTE_CHEAP;
        memset(c->set, 0, sizeof *c->set * (size_t)c->n);
        status = tt__consider_slowest(c, c->base, c->set);
        if (status == TT_OK && c->recompute) status = tt__consider_slowest(c, cheap, c->set);
        if (status == TT_OK) status = tt__build_cheapest(c, c->job.p->builds + 5, e);
        if (status != TT_OK || tt__fits(e)) return status;
        tt__restart(c);
    }
    const tt__choice saving = tt__max_saving(c, may);
    const bool small = tt__is_small(c), search = s->min > c->budget;
    if (search && tt__try_build(&c->job, &saving, e) == TT_ERR_MEMORY) return TT_ERR_MEMORY;
    const bool tight = s->min > c->budget;
    if (tight) {
        const int max = (int)tt__min(TT__MIN_BUILDS - 1, tt__max_min(c));
        if (small) status = tt__try_all(c);
        if (status == TT_OK) status = tt__try_min(c, may);
        if (status == TT_OK) status = tt__build_min(c, max, e);
        const bool descends = !c->job.attempt->quiet || tt__front(c)->t->n_code < TT__LARGE;
        if (status == TT_OK && s->min > c->budget && descends) status = tt__descend(c, small, s, e);
        if (status == TT_OK && s->min > c->budget) return tt__refuse(c, s, e);
        if (!small) tt__restart(c);
    }
    if (status == TT_OK && c->job.attempt->quiet) return tt__fits(e) ? status : tt__build_again(c, s, e);
    if (status == TT_OK && !(tight && small)) status = tt__list_candidates(c);
    if (status == TT_OK) status = tt__build_cheapest(c, TT__BUILDS - (tight ? 4 : TT__MIN_BUILDS), e);
    if (status == TT_OK && !tt__fits(e)) { /* choices estimated below the smallest program often fit */
        c->budget = s->min;
        status = tt__build_cheapest(c, TT__BUILDS - 1, e);
    }
    return status != TT_OK || tt__fits(e) ? status : tt__build_again(c, s, e);
}

/* Builds the program that the options demand or, if options other than state_bits are "budget", the cheapest
   that fits. *extra: whether the budget makes the program recompute or move more than the options demand. */
static tt_status tt__build_cheapest_with(const tt__job *to, bool *extra)
{
    tt_program *p = to->p;
    tt__job job = *to;
    tt__chooser c = tt__chooser_of(&job);
    tt__shortage s = {0, 0, SIZE_MAX, c.base, 0};
    tt__extent e;
    memset(&e, 0, sizeof e);
    job.min = c.job.min = &s;
    tt__note_placements(&c);
    tt_status status = tt__try_build(&job, &c.base, &e);
    if (status == TT_OK && !tt__fits(&e) && c.base.arrivals && !job.attempt->unbudgeted) {
        c.base.arrivals = false;
        status = tt__try_build(&job, &c.base, &e);
    }
    const tt__choice slowest = tt__at_slowest(c.base);
    const bool paced = status == TT_OK && (p->built.t->grouped || p->built.in_flight);
    if (paced && !tt__fits(&e)) status = tt__try_build(&job, &slowest, &e);
    const bool slower = p->chosen.ahead < c.base.ahead || p->chosen.halved;
    /* copies: activations are offloaded, though recomputing them may be faster. */
    const bool copies = c.recompute && c.base.offload & TT__OUT_ACTIVATIONS;
    *extra = status == TT_OK && (!tt__fits(&e) || slower || copies);
    if (*extra) { /* other candidates may be faster */
        tt__note_whole(p, &e, &s);
        status = tt__choose(&c, &s, &e);
    }
    tt__chooser_close(&c);
    tt__free(p->ctx, (void *)(uintptr_t)s.how.drop);
    p->settings.options.parallel.zero = p->chosen.zero;
    return status;
}

/* Builds the program that the options demand or, if options are "budget", the cheapest that fits. If
   state_bits is one of them: the bits are 32 if that takes no recomputation and no copies beyond the options,
   else those of the fastest program, the more bits the better if two are equally fast. */
static tt_status tt__build_chosen(const tt__job *to)
{
    tt_program *p = to->p;
    tt__settings *s = &p->settings;
    int best = 0, *bits = &s->options.optimizer.state_bits;
    double least = INFINITY;
    bool extra = true;
    tt_status status = TT_OK;
    for (int n = 32; n >= (s->bits_fit ? 8 : 32) && extra; n /= 2) {
        tt__attempt trial = *to->attempt;
        tt__job job = *to;
        if (s->bits_fit) *bits = n;
        if (s->bits_fit && (n > 8 || best)) { /* only the last error has advice, for the fewest bits */
            trial.quiet = true;
            job.attempt = &trial;
        }
        p->builds = 0;
        status = tt__build_cheapest_with(&job, &extra);
        if (status != TT_OK && (status != TT_ERR_BUDGET || !s->bits_fit)) return status;
        if (status != TT_OK) continue;
        const tt__spent r = tt__spent_on(&p->built.replay, tt__micros_of(s));
        if (n == 32) s->with_32 = r.compute + r.exposed;
        if (r.compute + r.exposed < least) best = n, least = r.compute + r.exposed;
    }
    if (!s->bits_fit || !best) return best ? TT_OK : status;
    p->ctx->status = TT_OK; /* other bits may have failed to fit */
    p->ctx->error[0] = 0;
    if (best == *bits) return TT_OK;
    *bits = best;
    p->builds = 0;
    return tt__build_cheapest_with(to, &extra);
}
