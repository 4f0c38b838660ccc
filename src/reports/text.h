#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../passes/recompute.h"
#include "../ranks/groups.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "../passes/overlap.h"
#include "../compile/choice.h"

/* -------------------------------------------------------------------------------------------- text of a plan
   tt_plan_text prints a memory plan. */

static bool tt__is_alphanumeric(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* Copies a name, and replaces each number that is a whole word by '*': "layer.3.norm1" becomes
   "layer.*.norm1". */
static void tt__without_numbers(const char *name, char *to, size_t capacity)
{
    size_t n = 0;
    bool inside = false; /* `name` is within a word */
    while (*name && n + 1 < capacity) {
        size_t digits = inside ? 0 : strspn(name, "0123456789");
        bool number = digits && !tt__is_alphanumeric(name[digits]);
        inside = !number && tt__is_alphanumeric(*name);
        to[n++] = number ? '*' : *name;
        name += number ? digits : 1;
    }
    to[n] = 0;
}

/* Values of the same size and category whose names differ only in numbers. first: the first of these
   values. */
typedef struct tt__plan_group { char name[72]; const tt_plan_value *first; int count; } tt__plan_group;

/* Prints the largest values at the peak: 8 lines, then up to 12 more until the printed values have 4/5 of the
   peak's bytes. Values whose names differ only in numbers, such as a value of each layer, share a line. */
static void tt__print_largest(const tt_program *p, tt__text_buffer *text)
{
    const int n = tt_plan_values(p, NULL, 0);
    int groups = 0, others = n;
    uint32_t mask = 1;
    size_t rest = 0;
    while (mask < 2 * (uint32_t)n) mask = 2 * mask + 1;
    tt_plan_value *all = (tt_plan_value *)tt__alloc(p->ctx, sizeof *all * (size_t)(n + 1));
    tt__plan_group *group = (tt__plan_group *)tt__calloc(p->ctx, sizeof *group * (size_t)(n + 1));
    uint32_t *slot = (uint32_t *)tt__calloc(p->ctx, sizeof *slot * ((size_t)mask + 1)); /* a hash table */
    const bool ok = all && group && slot && tt_plan_values(p, all, n) == n;
    if (!ok) others = 0; /* out of memory: leaves out the list */
    for (int i = 0; i < others; i++) {
        const tt_plan_value *v = &all[i];
        tt__plan_group *g = &group[groups];
        tt__without_numbers(v->name, g->name, sizeof g->name);
        const uint64_t hash = tt__hash_on(tt__hash(g->name), &v->bytes, sizeof v->bytes);
        uint32_t at = (uint32_t)(hash ^ hash >> 32) & mask;
        for (; slot[at]; at = (at + 1) & mask) {
            const tt__plan_group *has = &group[slot[at] - 1];
            const bool like = has->first->bytes == v->bytes && has->first->category == v->category;
            if (like && strcmp(has->name, g->name) == 0) break;
        }
        if (!slot[at]) {
            g->first = v;
            slot[at] = (uint32_t)++groups;
        }
        group[slot[at] - 1].count++;
        rest += v->bytes;
    }
    const size_t whole = rest;
    for (int k = 0; k < groups && (k < 8 || (k < 20 && rest > whole / 5)); k++) {
        tt__plan_group *g = group;
        for (tt__plan_group *i = group + 1; i < &group[groups]; i++)
            if (i->first->bytes * (size_t)i->count > g->first->bytes * (size_t)g->count) g = i;
        const size_t bytes = g->first->bytes * (size_t)g->count;
        tt__print(text, "  %8s %10.1f MB  ", k ? "" : "largest:", (double)bytes / 1e6);
        if (g->count > 1) tt__print(text, "%d x ", g->count);
        tt__print(text, "%.71s (%s)\n", g->count > 1 ? g->name : g->first->name,
                  tt_category_name(g->first->category));
        rest -= bytes;
        others -= g->count;
        g->count = 0;
    }
    if (others) tt__print(text, "  %8s %10.1f MB  %d others\n", "", (double)rest / 1e6, others);
    tt__free(p->ctx, slot);
    tt__free(p->ctx, group);
    tt__free(p->ctx, all);
}

/* Prints the devices of a program and how they share the work, such as "cuda*8 (data 4, tensor 2, zero
   3)". */
static void tt__print_ranks(const tt_program *p, tt__text_buffer *text)
{
    const tt_parallel *how = &p->settings.options.parallel;
    const tt__device_group *c = p->settings.group;
    tt__print(text, "%s", c->ranks > 1 ? c->name : c->kind->name);
    if (c->ranks == 1) return;
    tt__print(text, " (data %d", how->data);
    if (how->tensor > 1) tt__print(text, ", tensor %d%s", how->tensor, how->sequence ? ", sequence" : "");
    if (how->pipeline > 1) tt__print(text, ", pipeline %d, %s", how->pipeline, how->schedule);
    if (how->groups > how->data) tt__print(text, ", groups %d", how->groups);
    if (how->reduce_micros && how->zero < 2) tt__print(text, ", sums of micro-batches");
    if (how->server) tt__print(text, ", server");
    else if (how->data > 1) tt__print(text, ", zero %d", how->zero);
    tt__print(text, ")");
}

/* Prints the choices that the compiler made to fit the program into memory_budget. */
static void tt__print_choice(const tt_program *p, const tt_plan *plan, tt__text_buffer *text)
{
    const tt_tape *t = p->built.t;
    const tt__settings *s = &p->settings;
    const char *before = " recompute ";
    tt__print(text, "  chosen for memory_budget %.1f MB:", 1e-6 * (double)s->options.memory_budget);
    for (int op = 0; op < TT__OP_COUNT && s->recompute == TT__RECOMPUTE_BUDGET; op++) {
        int recomputed = 0;
        for (int k = 0; k < t->n_code; k++) recomputed += t->code[k].recomputed && t->code[k].op == op;
        if (!recomputed) continue;
        tt__print(text, "%s%d %s", before, recomputed, tt__ops[op].name);
        before = ", ";
    }
    if (s->recompute == TT__RECOMPUTE_BUDGET) {
        if (plan->recomputed) tt__print(text, " (%.1f MB)", 1e-6 * (double)plan->recomputed_bytes);
        else tt__print(text, "%snothing", before);
        before = "; ";
    } else {
        before = " ";
    }
    if (s->offload_fits) tt__print(text, "%soffload %s", before, plan->offload);
    if (s->offload_fits && plan->offload_blocks) tt__print(text, " of %d blocks", plan->offload_blocks);
    if (s->zero_fits) tt__print(text, "%szero %d", s->offload_fits ? "; " : before, plan->zero);
    if (plan->ahead)
        tt__print(text, "; copies run at most %d block%s ahead", plan->ahead, plan->ahead > 1 ? "s" : "");
    tt__print(text, "\n");
}

/* Prints the bits of the optimizer state that the compiler chose, and the seconds of a step with 32 bits. */
static void tt__print_bits(const tt_program *p, tt__text_buffer *text)
{
    const tt__settings *s = &p->settings;
    const tt__spent r = tt__spent_on(&p->built.replay, tt__micros_of(s));
    const int bits = s->options.optimizer.state_bits;
    tt__print(text, "  chosen for memory_budget %.1f MB: optimizer state in %d bits",
              1e-6 * (double)s->options.memory_budget, bits);
    if (bits < 32 && s->with_32 > 0)
        tt__print(text, ", as a step takes an estimated %.1f ms, and %.1f ms with 32 bits",
                  1e3 * (r.compute + r.exposed), 1e3 * s->with_32);
    else if (bits < 32) tt__print(text, ", as no plan with 32 bits fits");
    tt__print(text, "\n");
}

/* Prints the bytes and FLOPs of each stage of a pipeline. */
static void tt__print_stages(const tt_program *p, tt__text_buffer *text)
{
    for (int s = 0; s < p->stages && p->stages > 1; s++) {
        const tt_plan plan = tt_stage_plan(p, s);
        tt__print(text, "  stage %d: %.1f MB, of which %.1f persistent; %.2f GFLOP per micro-batch", s,
                  1e-6 * (double)plan.bytes, 1e-6 * (double)plan.persistent_bytes, plan.flops / 1e9);
        if (p->settings.options.train)
            tt__print(text, "; holds %d micro-batch%s", p->stage[s]->settings.in_flight,
                      p->stage[s]->settings.in_flight > 1 ? "es" : "");
        tt__print(text, "\n");
    }
}

/* Prints the seconds that a step should take at the device's rates. Prints nothing unless the options give
   rates or, on a device other than the CPU, data moves between memories or ranks. */
static void tt__print_seconds(const tt_program *p, const tt_plan *plan, tt__text_buffer *text)
{
    const tt__settings *s = &p->settings;
    const tt_costs usual = tt_costs_default();
    const bool given = memcmp(&s->costs, &usual, sizeof usual) != 0;
    if (!given && (s->kind->host || (!plan->transfer_bytes && plan->ranks == 1))) return;
    tt__print(text, "  by %s: %.1f ms of computation", given ? "the given rates" : "generic rates",
              1e3 * plan->compute_seconds);
    if (plan->host_seconds > 0)
        tt__print(text, " (%.1f by the host's processor)", 1e3 * plan->host_seconds);
    tt__print(text, ", which waits %.1f ms for links", 1e3 * plan->exposed_seconds);
    if (s->options.accumulate)
        tt__print(text, "; %.1f and %.1f ms for each further micro-batch", 1e3 * plan->micro_compute_seconds,
                  1e3 * plan->micro_exposed_seconds);
    tt__print(text, "\n");
}

size_t tt_plan_text(const tt_program *p, char *to, size_t capacity)
{
    tt__text_buffer text = {to, capacity, 0};
    const tt_plan plan = tt_program_plan(p);
    const double mb = 1e-6, transient = mb * (double)(plan.bytes - plan.persistent_bytes);
    const bool alike = plan.bytes == plan.min_bytes || plan.pipeline > 1;
    tt__print(&text, "memory plan for ");
    tt__print_ranks(p, &text);
    tt__print(&text, ": %s%.1f MB", plan.ranks == 1 ? "" : plan.pipeline > 1 ? "at most "
              : alike ? "every rank " : "the server ", mb * (double)plan.bytes);
    if (!alike) tt__print(&text, ", every other rank %.1f", mb * (double)plan.min_bytes);
    tt__print(&text, " (%.1f persistent, %.1f transient; lower bound %.1f; %.1f to initialise the "
              "parameters)\n", mb * (double)plan.persistent_bytes, transient,
              mb * (double)plan.lower_bound_bytes, mb * (double)plan.init_bytes);
    tt__print_stages(p, &text);
    if (plan.ranks > 1)
        tt__print(&text, "  moved per step and rank: %.1f MB between ranks (at least %.1f), with one "
                  "micro-batch on each\n", mb * (double)plan.moved_bytes, mb * (double)plan.min_moved_bytes);
    if (plan.sent_bytes)
        tt__print(&text, "  sent by this process in that step: %.1f MB (at least %.1f)\n",
                  mb * (double)plan.sent_bytes, mb * (double)plan.min_sent_bytes);
    if (plan.tensor > 1)
        tt__print(&text, "  split over the tensor ranks: %.1f of %.1f million parameters\n",
                  mb * (double)plan.split_params, mb * (double)plan.params);
    if (plan.transfer_bytes)
        tt__print(&text, "  on the host: %.1f MB; copied to and from it per step%s: %.1f MB",
                  mb * (double)plan.host_bytes, plan.ranks > 1 ? " and rank" : "",
                  mb * (double)plan.transfer_bytes);
    if (plan.transfer_bytes && p->settings.options.accumulate)
        tt__print(&text, ", with one micro-batch%s; %.1f MB for each further one",
                  plan.ranks > 1 ? " on each" : "", mb * (double)plan.transfer_micro_bytes);
    if (plan.transfer_bytes) tt__print(&text, "\n");
    tt__print_seconds(p, &plan, &text);
    tt__print(&text, "  peak at instruction %d of %d: %s; %.2f GFLOP per run at full capacity",
              plan.peak_instruction, plan.instructions, plan.peak_name, plan.flops / 1e9);
    if (plan.extra_flops > 0) tt__print(&text, ", %.2f of them recomputed", plan.extra_flops / 1e9);
    tt__print(&text, "\n");
    if (p->settings.recompute == TT__RECOMPUTE_BUDGET || p->settings.offload_fits || p->settings.zero_fits)
        tt__print_choice(p, &plan, &text);
    if (p->settings.bits_fit) tt__print_bits(p, &text);
    for (int c = 0; c < TT_MEM_CATEGORIES; c++) {
        const char *name = tt_category_name((tt_category)c);
        if (plan.at_peak[c]) tt__print(&text, "  %-12s %6.1f MB\n", name, mb * (double)plan.at_peak[c]);
    }
    tt__print_largest(p, &text);
    return text.length;
}
