#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/gradients.h"
#include "../ops/linear/rules.h"
#include "../ops/rules.h"
#include "verify.h"
#include "recompute.h"

/* ------------------------------------------------------------------------------------------------- stages
   Divides a tape into the stages of a pipeline. Each stage runs a contiguous part of the forward, and the
   backward of that part, on its own ranks. Each stage has its own program. The same passes make all programs
   from the same tape; this pass then leaves only the instructions of one stage. So a value has the same
   number in all stages, and an instruction the same random numbers. The forwards of micro-batches are one
   segment, the backwards another, and a schedule orders them. In the forward, one value goes from a stage to
   the next, and in the backward its gradient comes back: by a SEND on one stage and a RECV on the other. A
   stage saves all that its backward reads once for each micro-batch in flight (tt__tape_value.copies). A
   stage has the parameters that it reads. */

/* A possible cut of the forward, after instruction `at`: of all results before the cut, later instructions
   read only `value`. */
typedef struct tt__cut { int at; int32_t value; double cost; } tt__cut; /* FLOPs before the cut */

static double tt__forward_cost(const tt_tape *t, const tt__instr *i)
{
    tt__mat in[TT__MAX_IN];
    for (int j = 0; j < TT__MAX_IN; j++) in[j] = tt__at_capacity(t, i->in[j]);
    return i->in[0] ? tt__flops(i, in) : 0;
}

/* Returns, for each storage, 1 + the first instruction that writes it; 0: none. The caller frees the array.
   NULL: out of memory. */
static int32_t *tt__first_writers(const tt_tape *t)
{
    int32_t *first = tt__new_map(t);
    for (int k = t->n_code - 1; k >= 0 && first; k--)
        for (int j = 0; j < TT__MAX_OUT; j++)
            if (t->code[k].out[j]) first[t->values[t->code[k].out[j]].base] = k + 1;
    return first;
}

/* Finds the places where the forward can be cut, at tt_block_end marks. Writes the places to `cut` and
   returns their number. `cut` has room for n + 1 entries; `cross` is scratch memory for n + 1 numbers, all 0
   at first. Sets *all to the FLOPs of the whole forward. */
static int tt__find_cuts(const tt_tape *t, int n, const int32_t *first, tt__cut *cut, int *cross, double *all)
{
    int cuts = 0, crossing = 0;
    *all = 0;
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__tape_value *x = &t->values[v];
        if (x->base != v || x->storage != TT__TRANSIENT || !first[v] || x->reader < first[v]) continue;
        cross[first[v] - 1]++;
        cross[x->reader]--;
    }
    for (int k = 0; k < n; k++) {
        const tt__instr *i = &t->code[k];
        *all += tt__forward_cost(t, i);
        crossing += cross[k];
        for (int j = 0; j < TT__MAX_OUT; j++) {
            const int32_t v = i->out[j];
            const tt__tape_value *x = &t->values[v];
            const bool may = v && x->block_end && x->base == v && x->writer == k && x->reader > k;
            if (!may || crossing != 1) continue;
            const tt__cut c = {k, v, *all};
            cut[cuts++] = c;
        }
    }
    return cuts;
}

/* Returns whether an instruction reads a parameter that other stages hold and stage s does not. */
static bool tt__held_elsewhere(const tt_tape *t, const tt__instr *i, int s)
{
    for (int j = 0; j < TT__MAX_IN; j++) {
        const tt__tape_value *x = &t->values[t->values[i->in[j]].base];
        if (x->storage != TT__PARAMETER) continue;
        const uint64_t stages = t->ctx->params[x->param]->stages;
        if (stages && !(stages >> s & 1)) return true;
    }
    return false;
}

/* Chooses stages - 1 of the cuts so that each stage gets the parameters that it already holds, and the
   largest number of FLOPs of a stage is as small as possible. best[s][c]: the largest number of FLOPs of the
   stages 0 to s, if stage s ends at cut c. from[s][c]: the cut at which stage s then begins. refused[s][c]:
   number of instructions before cut c that stage s cannot run. Cut number `cuts` is the end of the tape. */
static tt_status tt__choose_cuts(tt_tape *t, const tt__cut *cut, int cuts, double all, int stages)
{
    const int row = cuts + 1, n = t->n_code;
    const size_t size = (size_t)stages * (size_t)row;
    double *best = (double *)tt__alloc(t->ctx, sizeof *best * size);
    int *from = (int *)tt__calloc(t->ctx, sizeof *from * size);
    int *refused = (int *)tt__calloc(t->ctx, sizeof *refused * size);
    tt_status status = best && from && refused ? TT_OK : TT_ERR_MEMORY;
    for (int s = 0; s < stages && status == TT_OK; s++)
        for (int c = 0, k = 0, count = 0; c <= cuts; c++) {
            const double end = c < cuts ? cut[c].cost : all;
            double *max = &best[s * row + c];
            for (; k < n && (c == cuts || k <= cut[c].at); k++)
                count += tt__held_elsewhere(t, &t->code[k], s);
            refused[s * row + c] = count;
            *max = s || count ? INFINITY : end;
            for (int b = s - 1; b < c && s; b++) {
                const double with = fmax(best[(s - 1) * row + b], end - cut[b].cost);
                if (!(with < *max) || refused[s * row + b] != count) continue;
                *max = with;
                from[s * row + c] = b;
            }
        }
    if (status == TT_OK && best[size - 1] == INFINITY)
        status = tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "{parallel.pipeline %d}: every cut moves some "
                          "parameter away from the stage on which an earlier program keeps it: record both "
                          "programs with the same ends of blocks, or free the earlier program first", stages);
    for (int s = stages - 1, c = cuts; s > 0 && status == TT_OK; s--) {
        c = from[s * row + c];
        t->values[cut[c].value].ends = s;
    }
    tt__free(t->ctx, best);
    tt__free(t->ctx, from);
    tt__free(t->ctx, refused);
    return status;
}

/* Chooses and marks the values at which the stages end (tt__tape_value.ends). */
static tt_status tt__pass_ends(tt_tape *t)
{
    const int n = tt__index(t), stages = t->stages;
    char names[256] = "";
    tt__text_buffer text = {names, sizeof names, 0};
    double all;
    tt__cut *cut = (tt__cut *)tt__alloc(t->ctx, sizeof *cut * (size_t)(n + 1) * TT__MAX_OUT);
    int *cross = (int *)tt__calloc(t->ctx, sizeof *cross * (size_t)(n + 1)), marks = 0;
    int32_t *first = tt__first_writers(t);
    tt_status status = cut && cross && first ? TT_OK : TT_ERR_MEMORY;
    const int cuts = status == TT_OK ? tt__find_cuts(t, n, first, cut, cross, &all) : 0;
    if (status == TT_OK && cuts >= stages - 1) status = tt__choose_cuts(t, cut, cuts, all, stages);
    for (int k = 0; k < cuts && cuts < stages - 1; k++)
        tt__print(&text, "%s'%s'", k ? ", " : ": ", t->values[cut[k].value].name);
    tt__free(t->ctx, cut);
    tt__free(t->ctx, cross);
    tt__free(t->ctx, first);
    for (int32_t v = 1; v < t->n_values; v++) marks += t->values[v].block_end && t->values[v].base == v;
    if (status != TT_OK || cuts >= stages - 1) return status;
    return tt__fail(t->ctx, TT_ERR_ARGUMENT, "{parallel.pipeline %d} needs %d places to cut, but only %d of "
                    "the %d values that tt_block_end marks are places to cut, where all that follows depends "
                    "on the marked value alone%s: mark more ends of blocks, or use fewer stages", stages,
                    stages - 1, cuts, marks, names);
}

/* Sets the stage of each instruction of the forward. Autodiff gives the backward of an instruction the same
   stage. */
static void tt__number_stages(tt_tape *t)
{
    int stage = 1;
    for (int k = 0; k < t->n_code; k++) {
        int ends = 0;
        t->code[k].stage = stage;
        for (int j = 0; j < TT__MAX_OUT; j++) {
            const tt__tape_value *y = &t->values[t->code[k].out[j]];
            if (t->code[k].out[j] && y->ends) ends = y->ends;
        }
        if (ends) stage = ends + 1;
    }
}

typedef struct tt__cutter {
    tt_tape *t;
    int n, forward;     /* n: number of instructions; forward: number of instructions of the forward */
    int me;             /* 1 + the number of this stage */
    bool *kept;         /* for each instruction: this stage runs it */
    bool *written;      /* for each storage: an instruction visited so far writes it */
    uint64_t *reading;  /* for each storage: bit set of the stages that read it */
} tt__cutter;

static bool tt__casts_weight(const tt_tape *t, const tt__instr *i)
{
    return tt__is(i, TT__CASTS) && tt__is_weight(t, i->in[0]);
}

/* Returns the storage of the gradient that the backward of stages 1 to `stage` reads from later stages; 0:
   none. *other: a second storage that this backward reads from later stages; 0: none. */
static int32_t tt__gradient_between(const tt__cutter *c, int stage, int32_t *other)
{
    tt_tape *t = c->t;
    int32_t found = 0;
    *other = 0;
    memset(c->written, 0, (size_t)t->n_values);
    for (int k = 0; k < c->n; k++) {
        const tt__instr *i = &t->code[k];
        const bool inside = i->stage <= stage || tt__casts_weight(t, i);
        for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT && inside && k >= c->forward; j++) {
            const int out = j - TT__MAX_IN;
            const int32_t base = t->values[out < 0 ? i->in[j] : i->out[out]].base;
            const bool needs = base && (out < 0 || (i->add >> out & 1));
            if (!needs || t->values[base].storage != TT__TRANSIENT || c->written[base]) continue;
            if (found && base != found) *other = base;
            else found = base;
        }
        for (int j = 0; j < TT__MAX_OUT && inside; j++) c->written[t->values[i->out[j]].base] = true;
    }
    return found;
}

/* Fails if the forward of this stage reads a value of an earlier stage that is not the last value of the
   stage before. */
static tt_status tt__check_forward(const tt__cutter *c)
{
    const tt_tape *t = c->t;
    for (int k = 0; k < c->n; k++)
        for (int j = 0; j < TT__MAX_IN && c->kept[k]; j++) {
            const int32_t base = t->values[t->code[k].in[j]].base;
            const tt__tape_value *x = &t->values[base];
            const int at = x->producer - 1;
            if (!base || x->storage != TT__TRANSIENT || at < 0 || at >= c->forward || c->kept[at]) continue;
            if (x->ends == c->me - 1 || t->code[at].stage > c->me) continue;
            return tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "{parallel.pipeline}: stage %d would need '%s' of "
                            "stage %d, besides that stage's last value: use fewer stages, or mark other ends "
                            "of blocks with tt_block_end", c->me - 1, x->name, t->code[at].stage - 1);
        }
    return TT_OK;
}

/* Notes which stages read each storage. A stage that reads the 16-bit copy of a weight reads the weight. */
static void tt__note_reading(const tt__cutter *c)
{
    const tt_tape *t = c->t;
    for (int k = c->n - 1; k >= 0; k--) { /* backwards, because the readers of a copy come after the cast */
        const tt__instr *i = &t->code[k];
        uint64_t stages = 1ull << (i->stage - 1);
        if (tt__casts_weight(t, i)) stages = c->reading[t->values[i->out[0]].base];
        for (int j = 0; j < TT__MAX_IN; j++) c->reading[t->values[i->in[j]].base] |= stages;
    }
}

/* Sets `elsewhere` for parameters that this stage does not read, and `tied` for parameters that two stages
   read. Fails if more than two stages read a parameter. A parameter that no stage reads belongs to the first
   stage. */
static tt_status tt__share_parameters(const tt__cutter *c)
{
    tt_tape *t = c->t;
    for (int32_t v = 1; v < t->n_values; v++) {
        tt__tape_value *x = &t->values[v];
        if (x->storage != TT__PARAMETER || x->base != v) continue;
        uint64_t stages = c->reading[v];
        if (!stages) stages = 1;
        for (x->tied[0] = 0; !(stages >> x->tied[0] & 1);) x->tied[0]++;
        for (int s = x->tied[0] + 1, n = 1; s < t->stages; s++) {
            if (!(stages >> s & 1)) continue;
            x->tied[1] = s;
            if (++n < 3) continue;
            return tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "{parallel.pipeline %d}: more than two stages read "
                            "parameter '%s': use fewer stages", t->stages, x->name);
        }
        if (stages >> (c->me - 1) & 1) continue;
        x->elsewhere = true;
        x->persistent = false;
        x->storage = TT__TRANSIENT;
    }
    return TT_OK;
}

/* Makes this stage's first contribution to a parameter's gradient overwrite the gradient, even if another
   stage contributes earlier: if two stages read a parameter, each has its own gradient. Gradients without a
   contribution are set to 0. Returns false if out of memory. */
static bool tt__begin_gradients(const tt__cutter *c)
{
    tt_tape *t = c->t;
    memset(c->written, 0, (size_t)t->n_values);
    for (int k = 0; k < c->n; k++)
        for (int j = 0; j < TT__MAX_OUT && c->kept[k]; j++) {
            tt__instr *i = &t->code[k];
            const int32_t y = i->out[j], base = t->values[y].base;
            tt__tape_value *g = &t->values[base];
            if (!y || g->storage != TT__GRADIENT || c->written[base]) continue;
            c->written[base] = true;
            if (!(i->add >> j & 1)) continue;
            const tt__tape_value *x = &t->values[y];
            if (x->shape.rows * x->shape.cols == g->shape.rows * g->shape.cols) {
                i->add &= ~(1u << j);
                if (g->persistent) i->add_later |= 1u << j;
                continue;
            }
            /* Later instructions may add to the gradient's other elements, so all its elements start as 0. */
            tt__instr zeros = tt__instr_like(i, TT__OP_FILL, 0, base);
            zeros.add_later = g->persistent;
            if (!tt__insert(t, k, &zeros)) return false;
        }
    for (int32_t v = 1; v < t->n_values; v++) {
        tt__tape_value *x = &t->values[v], *g = &t->values[x->grad];
        const bool trained = (x->storage == TT__PARAMETER || x->elsewhere) && x->base == v && x->grad;
        if (!trained || c->written[x->grad]) continue;
        if (x->elsewhere) { g->persistent = false; continue; }
        const tt__instr zeros = tt__instr_like(&t->code[c->n - 1], TT__OP_FILL, 0, x->grad);
        if (!tt__insert(t, c->n, &zeros)) return false;
    }
    return true;
}

/* Inserts, before instruction `at`, a SEND of v to stage `stage` or, if not `sends`, a RECV of v from stage
   `stage`. Returns false if out of memory. */
static bool tt__put_move(tt_tape *t, bool sends, int32_t v, int stage, int at, tt__segment segment)
{
    tt__instr i = tt__instr_of(sends ? TT__OP_SEND : TT__OP_RECV, sends ? v : 0, sends ? 0 : v);
    /* member 0 of a collective over stages is the last stage */
    const int last = t->stages - 1, me = last - t->stage, other = last - stage;
    i.segment = segment;
    i.backward = segment == TT__EACH_BACKWARD;
    i.move.over = TT__OVER_STAGES;
    i.move.from = sends ? me : other;
    i.move.to = sends ? other : me;
    return tt__insert(t, at, &i) != 0;
}

/* Returns the place directly after the last instruction of this stage, from `first` on, that writes storage
   `base`; `first` if there is none. */
static int tt__after_writer(const tt__cutter *c, int32_t base, int first)
{
    for (int k = c->n - 1; k >= first; k--)
        if (c->kept[k] && tt__writes(c->t, &c->t->code[k], base)) return k + 1;
    return first;
}

/* Inserts the SENDs and RECVs of this stage. from_next: the gradient that comes from the next stage;
   to_before: the gradient that goes to the stage before; 0: none. */
static bool tt__join_stages(const tt__cutter *c, int32_t from_next, int32_t to_before)
{
    tt_tape *t = c->t;
    const int values = t->n_values, s = t->stage;
    bool ok = true;
    for (int32_t v = 1; v < values && ok; v++) {
        const int ends = t->values[v].base == v ? t->values[v].ends : 0;
        if (ends && ends == s) ok = tt__put_move(t, false, v, s - 1, 0, TT__EACH_MICRO);
        if (ends && ends == s + 1)
            ok = tt__put_move(t, true, v, s + 1, tt__after_writer(c, v, 0), TT__EACH_MICRO);
    }
    const int after = tt__after_writer(c, to_before, c->forward);
    if (from_next && ok) ok = tt__put_move(t, false, from_next, s + 1, c->forward, TT__EACH_BACKWARD);
    if (to_before && ok) ok = tt__put_move(t, true, to_before, s - 1, after, TT__EACH_BACKWARD);
    return ok;
}

static tt_status tt__cut_stage(tt__cutter *c)
{
    tt_tape *t = c->t;
    int32_t other = 0, more = 0;
    for (int k = 0; k < c->n; k++)
        if (!t->code[k].stage) return tt__verify_fail(t, "stages", k, "has no stage", t->code[k].out[0]);
    tt__note_reading(c);
    for (int k = c->n - 1; k >= 0; k--) { /* each stage casts the weights that it reads */
        const tt__instr *i = &t->code[k];
        c->kept[k] = i->stage == c->me;
        if (tt__casts_weight(t, i))
            c->kept[k] = c->reading[t->values[i->out[0]].base] >> (c->me - 1) & 1;
    }
    const int32_t from_next = c->me < t->stages ? tt__gradient_between(c, c->me, &other) : 0;
    const int32_t to_before = c->me > 1 ? tt__gradient_between(c, c->me - 1, &more) : 0;
    if (other || more)
        return tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "{parallel.pipeline}: a stage would have to pass '%s' to "
                        "the stage before it, besides the gradient '%s': use fewer stages, or mark other "
                        "ends of blocks with tt_block_end", t->values[other ? other : more].name,
                        t->values[other ? from_next : to_before].name);
    tt_status status = tt__check_forward(c);
    if (status == TT_OK) status = tt__share_parameters(c);
    if (status != TT_OK) return status;
    bool counts = false;
    for (int k = 0; k < c->n; k++) {
        if (k >= c->forward) t->code[k].segment = TT__EACH_BACKWARD;
        if (k + 1 < c->n && !c->kept[k + 1]) t->code[k].with_next = false;
        counts = counts || (c->kept[k] && t->code[k].out[0] && t->code[k].out[0] == t->counted);
    }
    if (!tt__begin_gradients(c) || !tt__join_stages(c, from_next, to_before)) return TT_ERR_MEMORY;
    if (t->counted && !counts) {
        t->values[t->counted].persistent = false;
        t->counted = 0;
    }
    for (int k = 0; k < c->n; k++) if (!c->kept[k]) t->code[k].op = -1;
    return tt__settle(t, c->n);
}

/* Removes the instructions that this stage does not run, and inserts its exchange with other stages. */
static tt_status tt__pass_stages(tt_tape *t)
{
    tt__cutter c = {t, tt__index(t), tt__forward_of(t), t->stage + 1, NULL, NULL, NULL};
    c.kept = (bool *)tt__calloc(t->ctx, sizeof *c.kept * (size_t)(c.n + 1));
    c.written = (bool *)tt__alloc(t->ctx, sizeof *c.written * (size_t)t->n_values);
    c.reading = (uint64_t *)tt__calloc(t->ctx, sizeof *c.reading * (size_t)t->n_values);
    tt_status status = c.kept && c.written && c.reading ? tt__cut_stage(&c) : TT_ERR_MEMORY;
    tt__free(t->ctx, c.kept);
    tt__free(t->ctx, c.written);
    tt__free(t->ctx, c.reading);
    return status;
}

/* Marks the storages of a stage that hold several micro-batches at once: up to `max` micro-batches are
   between their forward and backward. first: for each storage, 1 + the first instruction that writes it. */
static void tt__hold_micros(tt_tape *t, const int32_t *first, int max)
{
    const int backward = tt__segment_first(t, TT__EACH_BACKWARD), end = tt__segment_first(t, TT__EACH_LAP);
    for (int k = backward; k < end; k++)
        for (int j = 0; j < TT__MAX_IN; j++) {
            const int32_t base = t->values[t->code[k].in[j]].base;
            tt__tape_value *x = &t->values[base];
            const bool micro = x->storage == TT__TRANSIENT || x->storage == TT__INPUT;
            const int made = first[base] - 1;
            if (!base || x->persistent || !micro || (x->storage != TT__INPUT && made >= backward)) continue;
            x->saved = true; /* all micro-batches share the copy of a weight */
            x->copies = made >= 0 && tt__casts_weight(t, &t->code[made]) ? 1 : max;
        }
    for (int k = 0; k < end; k++) {
        const tt__instr *i = &t->code[k];
        if (i->move.over != TT__OVER_STAGES || !i->in[0]) continue;
        tt__tape_value *x = &t->values[t->values[i->in[0]].base];
        if (i->segment == TT__EACH_MICRO) x->copies = max;
        else if (!x->saved) x->copies = 1;
        x->saved = true;
    }
}
