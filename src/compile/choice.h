#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/linear/rules.h"
#include "../ops/rules.h"
#include "../passes/recompute.h"
#include "../passes/offload.h"
#include "../passes/overlap.h"
#include "../plan/place.h"
#include "../context/memory.h"
#include "../context/params.h"
#include "program.h"
#include "build.h"

/* ---------------------------------------------------------------------------------------------- the choice
   Finds the cheapest program that fits memory_budget, where options are "budget". A candidate has three
   parts: a configuration (which storages ranks divide, which storages are offloaded); a set of items (the
   forward values to recompute); and a pace: how far copies run ahead of the computation, counted in blocks,
   and the size of the groups of instructions whose operands are copied together. An estimate runs the passes
   and computes lifetimes: this gives the cost and the max live bytes of a candidate without placing anything
   in memory. The cheapest candidate that may fit is built. If its placement does not fit, the next cheapest
   is built. The cost is the simulated seconds of a step or, if only recomputation may change, FLOPs. */

/* Max total number of instructions that the estimates of one choice process, about 0.3 us per instruction. */
#ifndef TT__ESTIMATES /* tests set a smaller number */
#define TT__ESTIMATES 1200000
#endif
#define TT__FOR_CONFIGURATIONS (TT__ESTIMATES / 4 * 3)
#define TT__FOR_CHANGES (TT__ESTIMATES / 4)
/* Instructions that estimates may process to find the smallest program, when nothing fits. */
#define TT__FOR_LEAST (TT__ESTIMATES / 2)
/* TT__BUILDS: max number of programs that one choice builds. TT__MIN_BUILDS: max number of these builds in
   the search for the smallest program. */
enum { TT__BUILDS = 30, TT__MIN_BUILDS = 13 };
enum { TT__LARGE = 300 }; /* a program with this many instructions is large: the search for the smallest
                             program builds fewer candidates */

/* The facts that the error message states when no program fits the budget. */
typedef struct tt__shortage {
    size_t bytes;           /* bytes of the program that recomputes and offloads as little as possible */
    double flops;           /* FLOPs of the program that recomputes and offloads as little as possible */
    size_t min;             /* bytes of the smallest program built; SIZE_MAX: none was built */
    tt__choice how;         /* the choice of the smallest program; `how.drop` is freed with this struct */
    int items;              /* values that the smallest program recomputes beyond its policy */
} tt__shortage;

/* One task of the choice: the tape to compile into program `p`, the arena that `p` joins (NULL: a new one),
   the attempt that `p` belongs to, and where to note the smallest program that was built (NULL: nowhere). */
typedef struct tt__job {
    tt_program *p;
    const tt_tape *t;
    int32_t root;
    tt__arena *shared;
    tt__attempt *attempt;
    tt__shortage *min;
} tt__job;

typedef struct tt__candidate {
    tt__choice how;         /* the configuration and the pace; `set` replaces `how.drop` */
    bool *set;              /* for each item: whether it is recomputed */
    /* index in tt__chooser.level of the candidate from which `set` was copied; -1: `set` is no copy */
    int level;
    bool both;              /* `set` also recomputes values in blocks whose activations are offloaded */
    double flops, seconds;  /* FLOPs that a step spends on recomputation; seconds of a step */
    double floor;           /* lower bound of a step's seconds at any pace */
    size_t bytes;           /* lower bound of the arena's bytes */
    size_t grouped;         /* tt_tape.grouped: max bytes of the operands of one group */
    /* tt_tape.cuts: by how much the number of groups exceeds the number with the largest group size */
    int cuts;
    bool parts;             /* fewer bytes may be enough if fewer instructions run together as a group
                               (tt__is_at_groups) */
    bool tuned;             /* copies of this candidate with smaller groups are in the list */
    uint64_t hash;          /* hash of configuration, pace and set */
    bool raised;            /* copies of this candidate at faster paces are in the list */
    bool failed;            /* the candidate's placement does not fit the budget */
} tt__candidate;

typedef struct tt__chooser {
    tt_context *ctx;
    tt__job job;
    bool recompute, offload, zero; /* whether the choice may change these options */
    bool by_seconds;        /* the cost is seconds, not FLOPs */
    tt__choice base;        /* recomputes and moves only what the options demand, at the fastest pace */
    bool held, held_on_host, held_split; /* whether parameters are stored already, on the host, and sharded */
    size_t budget;
    /* The tape after the first passes, for each tt_parallel.zero and update; NULL until it is needed. */
    tt__built front[4][TT__COUNT(tt__update_names)];
    tt_tape *scratch;       /* the copy that estimates rewrite */
    int forward, blocks;    /* number of forward instructions; number of blocks whose activations may be
                               offloaded */
    /* The items: values that the backward reads and could recompute at some cost, in the order of the tape.
       price: cost of recomputing the item, per byte. made: number of the instruction that computes the item.
       attention: whether policy "attention" recomputes the item. */
    int32_t *item; int n;
    double *price;
    int *made;
    bool *attention;
    /* Results of the last estimate: the number of the instruction where most bytes are live and, for each
       item, the last forward instruction that uses it (before) and the first use after the forward
       (after). */
    int peak, *before, *after;
    bool *banned;           /* for each item: recomputing it saved no bytes */
    bool *drop;             /* memory for tt__choice.drop: for each value, whether it is recomputed */
    bool *set;              /* the set to estimate: for each item, whether it is recomputed */
    tt__candidate *list; int n_list, cap_list;
    uint64_t searched[8]; int n_searched; /* hashes of the searched configurations */
    int *level; int levels; /* numbers of candidates with the configuration of `base`, in the order of cost:
                               each costs more and needs fewer bytes than the one before */
    double best;            /* seconds of a step of the fastest candidate that fits */
    int64_t left;           /* number of instructions that estimates may still process */
    bool all;               /* every configuration is tried with every set of items at every pace */
} tt__chooser;

/* Copies tape t, some of whose passes may have run, into *to. Reuses the arrays that *to already has. */
static bool tt__copy_into(tt_tape *to, const tt_tape *t)
{
    const tt_tape arrays = *to;
    *to = *t;
    to->values = arrays.values;
    to->code = arrays.code;
    to->axes = arrays.axes;
    to->lists = arrays.lists; /* keeps the lists that *to already has: no pass changes lists */
    to->cap_values = arrays.cap_values;
    to->cap_code = arrays.cap_code;
    to->cap_axes = arrays.cap_axes;
    to->params = NULL;
    to->n_params = to->cap_params = 0;
    to->n_values = to->n_code = to->n_axes = 0;
    while (to->cap_values < t->n_values) {
        to->n_values = to->cap_values;
        if (!TT__GROW(t->ctx, to->values, to->n_values, to->cap_values)) return false;
    }
    while (to->cap_code < t->n_code) {
        to->n_code = to->cap_code;
        if (!TT__GROW(t->ctx, to->code, to->n_code, to->cap_code)) return false;
    }
    while (to->cap_axes < t->n_axes) {
        to->n_axes = to->cap_axes;
        if (!TT__GROW(t->ctx, to->axes, to->n_axes, to->cap_axes)) return false;
    }
    to->n_values = t->n_values;
    to->n_code = t->n_code;
    to->n_axes = t->n_axes;
    memcpy(to->values, t->values, sizeof *t->values * (size_t)t->n_values);
    memcpy(to->code, t->code, sizeof *t->code * (size_t)t->n_code);
    memcpy(to->axes, t->axes, sizeof *t->axes * (size_t)t->n_axes);
    return true;
}

static double tt__flops_at_capacity(const tt_tape *t, const tt__instr *i)
{
    tt__mat in[TT__MAX_IN];
    for (int j = 0; j < TT__MAX_IN; j++) in[j] = tt__at_capacity(t, i->in[j]);
    return i->in[0] ? tt__flops(i, in) : 0;
}

/* Returns the FLOPs that a program spends on recomputation. */
static double tt__flops_of_copies(const tt_tape *t)
{
    double flops = 0;
    for (int k = 0; k < t->n_code; k++)
        if (t->code[k].recomputed) flops += tt__flops_at_capacity(t, &t->code[k]);
    return flops;
}

/* -------- estimates */

/* Finds for each item the last instruction of the forward that uses it (c->before) and the first use after
   the forward (c->after); -1: no use. number: scratch memory, one entry per value. */
static void tt__find_uses(tt__chooser *c, const tt_tape *t, int32_t *number)
{
    const int forward = tt__forward_of(t);
    memset(number, 0, sizeof *number * (size_t)t->n_values);
    for (int n = 0; n < c->n; n++) {
        number[c->item[n]] = n + 1;
        c->before[n] = c->after[n] = -1;
    }
    for (int k = 0; k < t->n_code; k++)
        for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
            const tt__instr *i = &t->code[k];
            int n = number[t->values[j < TT__MAX_IN ? i->in[j] : i->out[j - TT__MAX_IN]].base] - 1;
            if (n < 0) continue;
            if (k < forward) c->before[n] = k;
            else if (c->after[n] < 0) c->after[n] = k;
        }
}

/* Returns the tape after the first passes, built with the zero and the update of c->base. */
static const tt__built *tt__front(const tt__chooser *c) { return &c->front[c->base.zero][c->base.update]; }

/* Returns choice `how` changed so that it recomputes the items of `set`. The result's `drop` points to
   c->drop, which the next call overwrites. */
static tt__choice tt__with_set(tt__chooser *c, tt__choice how, const bool *set)
{
    for (int n = 0; n < c->n; n++) c->drop[c->item[n]] = set[n];
    how.drop = c->n ? c->drop : NULL;
    how.n_drop = c->n ? tt__front(c)->forward_values : 0;
    return how;
}

static uint64_t tt__hash_choice(const tt__chooser *c, const tt__choice *x, const bool *set)
{
    const int numbers[] = {(int)x->recompute, (int)x->offload, x->activations, (int)x->update, x->ahead,
                           x->zero, x->halved};
    return tt__hash_on(tt__hash_on(TT__HASH_BEGIN, numbers, sizeof numbers), set, (size_t)c->n);
}

/* Returns the number of micro-batches per step that the estimated cost of a step assumes. */
static int tt__micros_of(const tt__settings *s)
{
    return s->options.accumulate ? (int)tt__max(1, s->options.parallel.micros) : 1;
}

/* Returns whether smaller groups of instructions may need fewer bytes: whether `peak`, the instruction where
   most bytes are live, belongs to a segment that runs in groups. */
static bool tt__is_at_groups(const tt_tape *t, int peak)
{
    return t->early || (peak < t->n_code && t->code[peak].segment >= TT__EACH_LAP);
}

/* Computes the cost and the bytes of candidate *x from its rewritten tape b->t. */
static tt_status tt__weigh(tt__chooser *c, tt__built *b, tt__candidate *x)
{
    tt_program *p = c->job.p;
    tt__extent e;
    tt__box *box;
    int n;
    tt_status status = tt__lifetimes(b->t, b->root, &box, &n);
    if (status != TT_OK) return status;
    const int code = (int)tt__max(1, b->t->n_code);
    b->host_transient = tt__one_memory(p) ? tt__max_live(box, n, code, TT__HOST, 0, c->ctx, &c->peak) : 0;
    b->transient = tt__max_live(box, n, code, TT__DEVICE, 0, c->ctx, &c->peak);
    tt__free(c->ctx, box);
    int32_t *number = (int32_t *)tt__alloc(c->ctx, sizeof *number * (size_t)b->t->n_values);
    const bool measured = b->transient != SIZE_MAX && b->host_transient != SIZE_MAX;
    if (!number || !measured) return tt__free(c->ctx, number), TT_ERR_MEMORY;
    tt__find_uses(c, b->t, number);
    tt__free(c->ctx, number);
    const tt__built was = p->built;
    p->built = *b;
    status = tt__extent_of(p, c->job.shared, &e);
    p->built = was;
    if (status != TT_OK) return status;
    const tt__spent r = tt__spent_on(&b->replay, tt__micros_of(&p->settings));
    double links = 0;
    for (int s = 0; s < TT__STREAMS; s++) links = s == TT__COMPUTE_STREAM ? links : fmax(links, r.busy[s]);
    x->bytes = e.bytes;
    x->flops = tt__flops_of_copies(b->t);
    x->seconds = r.compute + r.exposed;
    const bool slowest = x->how.ahead == 0 && x->how.halved == TT__ONE_BY_ONE;
    const bool overlaps = c->base.ahead && links > 0;
    x->grouped = b->t->grouped;
    x->parts = tt__is_at_groups(b->t, c->peak);
    x->cuts = b->t->cuts;
    x->raised = !slowest || !(overlaps || b->t->cuts);
    const double cuts = (double)b->t->cuts * tt__micros_of(&p->settings);
    /* seconds of computation if all groups had the largest size */
    const double compute = r.compute - cuts * p->settings.costs.launch;
    x->floor = x->raised ? x->seconds : overlaps ? fmax(compute, links) : compute + r.exposed;
    return TT_OK;
}

/* Adds a candidate and estimates its cost and bytes. `set` is copied. */
static tt_status tt__estimate(tt__chooser *c, const tt__choice *how, const bool *set)
{
    tt__built b, *front = &c->front[how->zero][how->update];
    tt_status status = TT_OK;
    if (!front->t)
        status = tt__begin_build(c->job.t, c->job.root, &c->job.p->settings, how, front);
    if (status != TT_OK) return status;
    if (!TT__GROW(c->ctx, c->list, c->n_list, c->cap_list)) return TT_ERR_MEMORY;
    tt__candidate *x = &c->list[c->n_list];
    memset(x, 0, sizeof *x);
    x->how = *how;
    x->level = -1;
    x->hash = tt__hash_choice(c, how, set);
    if (!tt__copy_array(c->ctx, (void **)&x->set, set, sizeof *set * (size_t)c->n)) return TT_ERR_MEMORY;
    c->n_list++;
    b = *front;
    b.t = c->scratch;
    if (!tt__copy_into(b.t, front->t)) return TT_ERR_MEMORY;
    b.t->unverified = true;
    const tt__choice choice = tt__with_set(c, *how, set);
    status = tt__end_build(&b, &c->job.p->settings, &choice);
    if (status == TT_OK) status = tt__weigh(c, &b, x);
    /* the copy that is rewritten has all stages */
    c->left -= b.t->n_code * tt__max(1, front->t->stages) * (how->ahead ? 4 : 1);
    if (status != TT_OK) x->failed = true, x->bytes = SIZE_MAX;
    else if (x->bytes <= c->budget) c->best = fmin(c->best, x->seconds);
    return status;
}

/* Returns the number of the candidate with choice *how and this set of items; -1 if there is none. */
static int tt__find_candidate(const tt__chooser *c, const tt__choice *how, const bool *set)
{
    const uint64_t hash = tt__hash_choice(c, how, set);
    for (int k = 0; k < c->n_list; k++) if (c->list[k].hash == hash) return k;
    return -1;
}

/* Makes choice *how with this set of items a candidate, unless it is one already. *at: the candidate's
   number. */
static tt_status tt__consider(tt__chooser *c, const tt__choice *how, const bool *set, int *at)
{
    *at = tt__find_candidate(c, how, set);
    if (*at >= 0) return TT_OK;
    *at = c->n_list;
    return tt__estimate(c, how, set);
}

static bool tt__may_fit(const tt__chooser *c, int k) { return c->list[k].bytes <= c->budget; }

/* Returns a choice at the slowest pace, which needs the least memory: no copy runs ahead, and each
   instruction is a group of its own. */
static tt__choice tt__at_slowest(tt__choice how)
{
    how.ahead = 0;
    how.halved = TT__ONE_BY_ONE;
    return how;
}

/* Returns how many times trial number `trial` halves TT__OFFLOAD_TOGETHER, the max bytes of a group; -1: the
   trial changes nothing. grouped: bytes of the largest group; 0: smaller groups do not help. Trial 0 does not
   halve, trial 1 runs each instruction alone. If trial 1 fits, later trials find the largest groups that
   fit. */
enum { TT__HALVINGS = 5 };
static int tt__halved(size_t grouped, int trial)
{
    int min = 1;
    if (trial == 0) return 0;
    if (!grouped) return -1;
    if (trial == 1) return TT__ONE_BY_ONE;
    while (TT__OFFLOAD_TOGETHER >> min >= grouped) min++;
    return min + trial - 2 < TT__ONE_BY_ONE ? min + trial - 2 : -1;
}

/* Adds candidate k, which has the slowest pace, at faster paces: for each number of blocks that copies may
   run ahead, with the largest groups that fit or, if c->all, with groups of all sizes. */
static tt_status tt__raise(tt__chooser *c, int k)
{
    tt_status status = TT_OK;
    bool largest = false; /* a candidate with the largest groups fits */
    if (c->list[k].raised) return TT_OK;
    c->list[k].raised = true;
    c->list[k].floor = c->list[k].seconds; /* faster paces are candidates of their own */
    const tt__candidate was = c->list[k];
    for (int ahead = c->base.ahead; ahead >= !was.cuts && status == TT_OK; ahead--) {
        if (largest && !c->all) break;
        size_t grouped = 0;
        bool fits = false;
        for (int trial = 0, at = -1; trial < TT__HALVINGS && status == TT_OK; trial++) {
            tt__choice how = was.how;
            how.ahead = ahead;
            how.halved = tt__halved(grouped, trial);
            if (how.halved < 0) continue;
            const int64_t left = c->left;
            status = tt__consider(c, &how, was.set, &at);
            if (status != TT_OK) break;
            if (trial || !ahead) c->left = left; /* trials of paces do not count as estimates */
            c->list[at].level = was.level;
            c->list[at].both = was.both;
            if (trial == 0 && (c->all || c->list[at].parts)) grouped = c->list[at].grouped;
            fits = tt__may_fit(c, at);
            largest = largest || (fits && trial == 0);
            if (!c->all && fits != (trial == 1)) break;
        }
    }
    return status;
}

/* -------- recomputation */

/* Returns the cost of running instruction `at` a second time. The cost includes the instructions that compute
   its operands, at most `depth` levels back, if these operands are not saved. */
static double tt__cost_again(const tt__chooser *c, const tt__recomputer *r, int at, int depth)
{
    const tt__instr *i = &r->t->code[at];
    const tt_costs *costs = &c->job.p->settings.costs;
    double cost = c->by_seconds ? tt__seconds_of(r->t, i, costs, true) : tt__flops_at_capacity(r->t, i);
    for (int j = 0; j < TT__MAX_IN && depth; j++) {
        const int32_t v = i->in[j] ? r->t->values[i->in[j]].base : 0;
        const int from = tt__producer(r->t, v);
        const bool there = !v || tt__is_saved(r, v) || r->t->values[v].storage != TT__TRANSIENT;
        if (!there && from >= 0) cost += tt__cost_again(c, r, from, depth - 1);
    }
    return cost;
}

/* Allocates the arrays of the list of items, which stays empty. */
static tt_status tt__items_open(tt__chooser *c)
{
    const size_t max = (size_t)tt__front(c)->t->n_values;
    c->item = (int32_t *)tt__alloc(c->ctx, sizeof *c->item * max);
    c->price = (double *)tt__alloc(c->ctx, sizeof *c->price * max);
    c->made = (int *)tt__alloc(c->ctx, 3 * sizeof *c->made * max);
    c->attention = (bool *)tt__calloc(c->ctx, 4 * sizeof *c->attention * max);
    if (!c->item || !c->price || !c->made || !c->attention) return TT_ERR_MEMORY;
    c->before = c->made + max;
    c->after = c->before + max;
    c->banned = c->attention + max;
    c->drop = c->banned + max;
    c->set = c->drop + max;
    return TT_OK;
}

/* Lists the items (the values that could be recomputed), with the cost of recomputation per byte. */
static void tt__list_items(tt__chooser *c)
{
    tt_tape *t = tt__front(c)->t;
    tt__recomputer r = {t, TT__RECOMPUTE_CHEAP, NULL, 0, c->forward, 0, 0};
    tt__index(t);
    for (int k = 0; k < r.forward; k++)
        for (int o = 0; o < 2; o++) {
            const tt__instr *i = &t->code[k];
            const int32_t v = i->out[o];
            const tt__tape_value *x = &t->values[v];
            bool deep = false;
            if (!v || x->storage != TT__TRANSIENT || x->writes != 1) continue;
            const bool asked = x->mark != TT__UNMARKED || x->keep || x->block_end || x->offload;
            const bool own = x->base == v && !asked;
            const bool main = o == 0 || (tt__is(i, TT__ACTIVATES) && i->attr.act);
            if (!own || !main || tt__is(i, TT__LOSS) || !tt__is_saved(&r, v)) continue;
            if (tt__recomputation(&r, v, &deep).op >= 0) continue; /* policy "cheap" recomputes it anyway */
            c->price[c->n] = tt__cost_again(c, &r, k, 8) / (double)tt__storage_bytes(x);
            c->made[c->n] = k;
            c->attention[c->n] = tt__is(i, TT__CHEAP_ATTENTION) && !tt__is(i, TT__CHEAP_KEPT);
            c->item[c->n++] = v;
        }
}

/* Returns the cheapest item per byte among the items that are live, but not used, at the instruction where
   most bytes are live; -1 if there is none. Among items whose costs differ by at most 2%, returns the
   earliest: the backward recomputes it last, when the most memory is free. */
static int tt__next_item(const tt__chooser *c)
{
    int best = -1;
    for (int n = 0; n < c->n; n++) {
        if (c->set[n] || c->banned[n] || c->before[n] >= c->peak || c->after[n] <= c->peak) continue;
        if (best < 0 || c->price[n] < 0.98 * c->price[best]) best = n;
    }
    return best;
}

/* Adds candidates that recompute more and more items: starts from c->set and adds the best `at_once` items at
   a time. Bans items whose recomputation needs more bytes than keeping them. */
static tt_status tt__try_path(tt__chooser *c, const tt__choice *how, int at_once)
{
    int *dropped = (int *)tt__alloc(c->ctx, sizeof *dropped * (size_t)at_once);
    tt_status status = dropped ? tt__estimate(c, how, c->set) : TT_ERR_MEMORY;
    size_t before = status == TT_OK ? c->list[c->n_list - 1].bytes : 0;
    for (int many = 1; many && status == TT_OK;) {
        int n;
        for (many = 0; many < at_once && (n = tt__next_item(c)) >= 0; many++) {
            dropped[many] = n;
            c->set[n] = true;
        }
        if (many) status = tt__estimate(c, how, c->set);
        if (status != TT_OK) break;
        const size_t now = c->list[c->n_list - 1].bytes;
        const bool worse = now > before; /* recomputing these items needs more bytes than saving them */
        for (int k = 0; k < many && worse; k++) {
            c->set[dropped[k]] = false;
            c->banned[dropped[k]] = true;
        }
        /* a new estimate finds the peak of the set without these items */
        if (worse) status = tt__estimate(c, how, c->set);
        else before = now;
    }
    tt__free(c->ctx, dropped);
    return status;
}

/* Adds candidates that recompute all items of the first n blocks, for up to 32 values of n. Each n gives two
   candidates: one also recomputes the attention items of the other blocks. */
static tt_status tt__try_blocks(tt__chooser *c, const tt__choice *how)
{
    const tt_tape *t = tt__front(c)->t;
    tt_status status = TT_OK;
    int blocks = 0, block = 0;
    for (int k = 0; k < c->forward; k++) blocks += t->values[t->code[k].out[0]].block_end;
    for (int k = 0; k < c->forward; k++) {
        if (!t->values[t->code[k].out[0]].block_end || block++ % (1 + blocks / 32)) continue;
        for (int attention = 0; attention < 2 && status == TT_OK; attention++) {
            for (int n = 0; n < c->n; n++) c->set[n] = c->made[n] <= k || (attention && c->attention[n]);
            status = tt__estimate(c, how, c->set);
        }
    }
    return status;
}

static double tt__price_of(const tt__chooser *c, const tt__candidate *x)
{
    return c->by_seconds ? x->floor : x->flops;
}

/* Returns whether another candidate is better in cost or bytes, and no worse in the other. */
static bool tt__is_dominated(const tt__chooser *c, const tt__candidate *x)
{
    const double cost = tt__price_of(c, x);
    for (const tt__candidate *y = c->list; y < c->list + c->n_list; y++) {
        const bool alike = tt__price_of(c, y) == cost && y->bytes == x->bytes;
        if (tt__price_of(c, y) <= cost && y->bytes <= x->bytes && (!alike || y < x)) return true;
    }
    return false;
}

/* Adds candidates that differ by one item from a candidate that no other dominates (none is better in both
   cost and bytes). Repeats this with the new candidates until c->left has fallen to `left` (Paquete,
   Chiarandini, Stuetzle: "Pareto local optimum sets in the biobjective traveling salesman problem", 2004). */
static tt_status tt__try_neighbours(tt__chooser *c, const tt__choice *how, int64_t left)
{
    tt_status status = TT_OK;
    for (int k = 0; k < c->n_list && c->left > left; k++) {
        if (tt__is_dominated(c, &c->list[k])) continue;
        for (int n = 0; n < c->n && c->left > left && status == TT_OK; n++) {
            memcpy(c->set, c->list[k].set, sizeof *c->set * (size_t)c->n);
            c->set[n] = !c->set[n];
            if (tt__find_candidate(c, how, c->set) < 0) status = tt__estimate(c, how, c->set);
        }
    }
    return status;
}

/* Compares candidates a and b by cost and, if their costs are equal, by bytes. */
static bool tt__cheaper(const void *arg, uint32_t a, uint32_t b)
{
    const tt__chooser *c = (const tt__chooser *)arg;
    const tt__candidate *x = &c->list[a], *y = &c->list[b];
    const double cost = tt__price_of(c, x), other = tt__price_of(c, y);
    return cost != other ? cost < other : x->bytes != y->bytes ? x->bytes < y->bytes : a < b;
}

/* Adds candidates with the configuration of c->base that recompute more and more items. Lists in c->level
   those that no other candidate dominates. */
static tt_status tt__try_sets(tt__chooser *c)
{
    tt__choice how = tt__at_slowest(c->base);
    tt_status status = TT_OK;
    int at;
    /* number of instructions that are reserved for the search of configurations */
    const int64_t left = c->by_seconds ? TT__FOR_CONFIGURATIONS : 0;
    const int64_t max = tt__max(64, (c->left - left) / (tt__front(c)->t->n_code + 1));
    memset(c->set, 0, sizeof *c->set * (size_t)c->n);
    memset(c->banned, 0, sizeof *c->banned * (size_t)c->n);
    status = tt__consider(c, &how, c->set, &at);
    if (c->recompute) {
        how.recompute = TT__RECOMPUTE_CHEAP;
        if (status == TT_OK) status = tt__try_path(c, &how, (int)(1 + 2 * c->n / max));
        if (status == TT_OK) status = tt__try_blocks(c, &how);
        if (status == TT_OK) status = tt__try_neighbours(c, &how, left);
    }
    uint32_t *order = (uint32_t *)tt__alloc(c->ctx, sizeof *order * (size_t)(c->n_list + 1));
    tt__free(c->ctx, c->level); /* the levels of an earlier search */
    c->levels = 0;
    c->level = (int *)tt__alloc(c->ctx, sizeof *c->level * (size_t)(c->n_list + 1));
    if (status == TT_OK && order && c->level) {
        for (int k = 0; k < c->n_list; k++) order[k] = (uint32_t)k;
        tt__sort_indices(order, (size_t)c->n_list, tt__cheaper, c);
        for (int k = 0; k < c->n_list; k++) {
            const int x = (int)order[k];
            if (c->levels && c->list[x].bytes >= c->list[c->level[c->levels - 1]].bytes) continue;
            c->list[x].level = c->levels;
            c->level[c->levels++] = x;
        }
    } else if (status == TT_OK) {
        status = TT_ERR_MEMORY;
    }
    tt__free(c->ctx, order);
    return status;
}

/* -------- configurations */

/* Adds a candidate with configuration `how` that recomputes the items of a level. Unless `both`, leaves out
   the items of blocks whose activations are offloaded. */
static tt_status tt__consider_level(tt__chooser *c, tt__choice how, int level, bool both, int *at)
{
    const tt__candidate *x = &c->list[c->level[level]];
    const tt_tape *t = tt__front(c)->t;
    const bool out = !both && c->offload && how.offload & TT__OUT_ACTIVATIONS;
    const int end = out ? tt__blocks_to_recompute(t, c->forward, how.activations) : 0;
    how = tt__at_slowest(how);
    how.recompute = x->how.recompute;
    for (int n = 0; n < c->n; n++) c->set[n] = x->set[n] && c->made[n] >= end;
    tt_status status = tt__consider(c, &how, c->set, at);
    if (status != TT_OK) return status;
    c->list[*at].level = level;
    c->list[*at].both = both;
    return tt__may_fit(c, *at) && c->list[*at].floor < c->best ? tt__raise(c, *at) : TT_OK;
}

/* Tries the last level, which needs the fewest bytes, and if it fits, finds the first level that fits. Later
   levels recompute more but, with `both`, may move fewer bytes between host and device. */
static tt_status tt__try_levels(tt__chooser *c, const tt__choice *how, bool both)
{
    int at = 0, low = 0, high = c->levels - 1;
    tt_status status = tt__consider_level(c, *how, high, both, &at);
    if (status != TT_OK || !tt__may_fit(c, at)) return status;
    while (low < high && status == TT_OK) {
        const int middle = low + (high - low) / 2;
        status = tt__consider_level(c, *how, middle, both, &at);
        if (status == TT_OK && tt__may_fit(c, at)) high = middle;
        else low = middle + 1;
    }
    return status;
}

/* Returns whether configuration *how is possible, given how parameters are stored already. */
static bool tt__is_allowed(const tt__chooser *c, const tt__choice *how)
{
    const bool train = c->job.p->settings.options.train;
    if (how->offload & ~(unsigned)TT__OUT_PARAMETERS && !train) return false;
    if (!c->held) return true;
    if (c->zero && (how->zero == 3) != c->held_split) return false;
    return !c->offload || !(how->offload & TT__OUT_PARAMETERS) == !c->held_on_host;
}

/* Lists the configurations without offloaded activations into to[], and returns their number, at most 24. */
static int tt__list_configurations(const tt__chooser *c, tt__choice *to)
{
    int n = 0;
    for (int zero = c->zero ? 1 : c->base.zero; zero <= (c->zero ? 3 : c->base.zero); zero++)
        for (unsigned out = 0; out < (c->offload ? TT__OUT_ACTIVATIONS : 1); out++) {
            to[n] = c->base;
            to[n].zero = zero;
            if (c->offload) to[n].offload = out;
            n += tt__is_allowed(c, &to[n]);
        }
    return n;
}

/* Adds, for a small program, every configuration with every set of items. */
static tt_status tt__try_all(tt__chooser *c)
{
    tt__choice list[24];
    const int n = tt__list_configurations(c, list), blocks = c->offload ? c->blocks : 0;
    tt_status status = TT_OK;
    int at;
    c->all = true;
    for (int k = 0; k < n; k++)
        for (int block = 0; block <= blocks; block++)
            /* The last round recomputes no items: it has policy "none". */
            for (uint32_t sets = 0; sets <= (c->recompute ? 1u << c->n : 0) && status == TT_OK; sets++) {
                tt__choice how = tt__at_slowest(list[k]);
                if (block) how.offload |= TT__OUT_ACTIVATIONS;
                if (block) how.activations = block;
                if (c->recompute && sets >> c->n == 0) how.recompute = TT__RECOMPUTE_CHEAP;
                for (int i = 0; i < c->n; i++) c->set[i] = sets >> i & 1;
                status = tt__consider(c, &how, c->set, &at);
            }
    return status;
}

/* Finds the smallest number of blocks whose offloaded activations make the program fit, with the items of
   level 0 recomputed. */
static tt_status tt__try_fewest(tt__chooser *c, tt__choice how)
{
    tt_status status = TT_OK;
    for (int low = 1, high = c->blocks, at; low <= high && status == TT_OK;) {
        how.activations = low + (high - low) / 2;
        status = tt__consider_level(c, how, 0, true, &at);
        if (status == TT_OK && tt__may_fit(c, at)) high = how.activations - 1;
        else low = how.activations + 1;
    }
    return status;
}

/* Tries a configuration, alone and with the activations of all or half of the blocks offloaded. */
static tt_status tt__try_configuration(tt__chooser *c, tt__choice how)
{
    tt_status status = tt__try_levels(c, &how, false);
    how.offload |= TT__OUT_ACTIVATIONS;
    if (status == TT_OK && c->offload && c->levels == 1) return tt__try_fewest(c, how);
    for (int k = 0; k < 4 && c->offload && c->blocks && status == TT_OK; k++) {
        how.activations = k < 2 ? c->blocks : (c->blocks + 1) / 2;
        status = tt__try_levels(c, &how, k % 2 == 0);
    }
    return status;
}

/* Tries the choices that a user could name in options, for each value of parallel.zero: each recomputation
   policy (except "none", tried before) with nothing offloaded, and "blocks" with activations and other
   storages offloaded. So even a search that ends early finds nothing worse than these choices. */
static tt_status tt__try_extremes(tt__chooser *c, const tt__choice *list, int n)
{
    tt_status status = TT_OK;
    const int first = c->recompute ? TT__RECOMPUTE_CHEAP : (int)c->base.recompute;
    const int last = c->recompute ? TT__RECOMPUTE_BLOCKS : (int)c->base.recompute;
    int at;
    memset(c->set, 0, sizeof *c->set * (size_t)c->n);
    for (int k = 0; k < n; k++) {
        const bool moves = c->offload && list[k].offload && c->blocks;
        for (int policy = moves ? last : first; policy <= last && status == TT_OK; policy++) {
            tt__choice how = tt__at_slowest(list[k]);
            how.recompute = (tt__recompute_policy)policy;
            if (moves) how.offload |= TT__OUT_ACTIVATIONS, how.activations = c->blocks;
            status = tt__consider(c, &how, c->set, &at);
            const bool may = status == TT_OK && tt__may_fit(c, at) && c->list[at].floor < c->best;
            if (may) status = tt__raise(c, at);
        }
    }
    for (int k = 0; k < n && status == TT_OK; k++)
        if (!c->offload || !list[k].offload) status = tt__try_levels(c, &list[k], false);
    return status;
}

/* Tries configurations, from the smallest lower bound of a step's seconds up, until no other configuration
   can be faster than the best candidate that fits. */
static tt_status tt__try_configurations(tt__chooser *c)
{
    tt__choice list[24];
    double floor[24];
    const int n = tt__list_configurations(c, list);
    if (!n) return TT_OK;
    tt__choice all = list[n - 1]; /* saves the most bytes: if it fits, c->best is set early */
    int at;
    if (c->offload && c->blocks) all.offload |= TT__OUT_ACTIVATIONS;
    tt_status status = tt__consider_level(c, all, c->levels - 1, true, &at);
    for (int k = 0; k < n && status == TT_OK; k++) {
        status = tt__consider_level(c, list[k], 0, false, &at);
        floor[k] = status == TT_OK ? c->list[at].floor : 0;
    }
    if (status == TT_OK) status = tt__try_extremes(c, list, n);
    for (int tried = 0; tried < n && status == TT_OK; tried++) {
        int next = 0;
        for (int k = 1; k < n; k++) if (floor[k] < floor[next]) next = k;
        if (floor[next] >= c->best) return TT_OK; /* all other lower bounds are at least as high */
        floor[next] = INFINITY;
        if (c->left > 0 || c->best == INFINITY) status = tt__try_configuration(c, list[next]);
    }
    return status;
}

/* Returns the cheapest candidate of at most `room` bytes whose placement has not failed; -1: none. */
static int tt__cheapest(const tt__chooser *c, size_t room)
{
    int best = -1;
    for (int k = 0; k < c->n_list; k++) {
        const tt__candidate *x = &c->list[k], *y = &c->list[best < 0 ? k : best];
        if (x->failed || x->bytes > room) continue;
        const double cost = tt__price_of(c, x), other = tt__price_of(c, y);
        const bool better = cost != other ? cost < other
                          : x->seconds != y->seconds ? x->seconds < y->seconds : x->bytes < y->bytes;
        if (best < 0 || better) best = k;
    }
    return best;
}

enum { TT__ALTERATIONS = 18 };

/* Applies change number `change` to candidate *x: another value of parallel.zero, one storage offloaded or
   not, more or fewer offloaded blocks, or another level. Returns false if the change is impossible. */
static bool tt__alter(const tt__chooser *c, int change, tt__candidate *x)
{
    static const int steps[] = {-4, -1, 1, 4};
    tt__choice *how = &x->how;
    const tt__choice was = *how;
    const int level = x->level;
    if (change < 3 && c->zero) how->zero = 1 + change;
    else if (change >= 3 && change < 7 && c->offload) how->offload ^= 1u << (change - 3);
    const bool out = c->offload && how->offload & TT__OUT_ACTIVATIONS;
    if (out && !(was.offload & TT__OUT_ACTIVATIONS)) how->activations = 1, x->both = true;
    if (change >= 7 && change < 11 && out) how->activations += steps[change - 7];
    if (change >= 11 && change < 17) x->level += change < 15 ? steps[change - 11] : change == 15 ? -16 : 16;
    if (change == 17 && out) x->both = !x->both;
    const bool moves = how->zero != was.zero || how->offload != was.offload ||
                       (out && how->activations != was.activations);
    if (out && (how->activations < 1 || how->activations > c->blocks)) return false;
    if (x->level < 0 || x->level >= c->levels || !tt__is_allowed(c, how)) return false;
    return moves || x->level != level || change == 17;
}

/* Adds candidates that differ from the best candidate by one change (tt__alter). Repeats this as long as a
   new candidate becomes the best. */
static tt_status tt__try_changes(tt__chooser *c)
{
    tt_status status = TT_OK;
    for (double before = INFINITY; c->best < before && status == TT_OK;) {
        const int best = tt__cheapest(c, c->budget);
        before = c->best;
        if (best < 0) return TT_OK;
        const tt__candidate was = c->list[best];
        for (int change = 0, at; change < TT__ALTERATIONS && c->left > 0 && status == TT_OK; change++) {
            tt__candidate x = was;
            if (!tt__alter(c, change, &x)) continue;
            status = tt__consider_level(c, x.how, x.level, x.both, &at);
            if (status == TT_OK && !tt__may_fit(c, at) && change < 11 && c->list[at].floor < c->best)
                status = tt__try_levels(c, &x.how, x.both);
        }
    }
    return status;
}

/* Returns whether a program is so small that every configuration with every set of items can be a candidate.
   If the pace matters, a large program would have too many candidates. */
static bool tt__is_small(const tt__chooser *c)
{
    tt__choice list[24];
    if (c->by_seconds && tt__front(c)->t->n_code >= TT__LARGE) return false;
    const int configurations = tt__list_configurations(c, list) * (c->offload ? c->blocks + 1 : 1);
    const int64_t max = TT__ESTIMATES / (tt__front(c)->t->n_code + 1) / tt__max(1, configurations);
    return c->n < 20 && (int64_t)1 << c->n < tt__max(c->by_seconds ? 2 : 64, max);
}

/* Lists candidates: for a small program, all of them; for others, levels of recomputation, then
   configurations, then small changes of the best candidate. */
static tt_status tt__list_candidates(tt__chooser *c)
{
    if (tt__is_small(c)) return tt__try_all(c);
    tt_status status = tt__try_sets(c);
    c->left = tt__max(c->left, TT__FOR_CONFIGURATIONS); /* tt__try_sets may have left fewer */
    if (status == TT_OK && c->by_seconds) status = tt__try_configurations(c);
    c->left = tt__max(c->left, TT__FOR_CHANGES);
    return status == TT_OK && c->by_seconds ? tt__try_changes(c) : status;
}
