#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/record.h"
#include "../ops/shapes.h"

/* ===========================================================================================================
   PASSES                                                                                          src/passes/
   Passes, which are functions that rewrite a tape, and the verifier, which runs after each pass.
   tt__first_passes and tt__last_passes (src/compile/) call the passes in order. Uses tape and ops.
   ======================================================================================================== */

/* ----------------------------------------------------------------------------------------------- verifier */

static tt_status tt__verify_fail(tt_tape *t, const char *pass, int at, const char *what, int32_t value)
{
    char text[256];
    if (value < 0 || value >= t->n_values) value = 0;
    return tt__fail(t->ctx, TT_ERR_INTERNAL,
                    "after pass '%s': instruction %d (%s): %s: %s; please report this program", pass, at,
                    tt__instr_name(&t->code[at]), what, tt__describe(t, value, text, sizeof text));
}

/* The verifier's notes on a storage before the instruction that is being verified. */
typedef struct tt__known {
    bool defined;
    int group;      /* number of the last group of instructions that run together and write the storage; 0:
                       none */
    int writer;     /* 1 + index of the instruction in flight on another stream that writes the storage; 0:
                       none */
    int readers;    /* number of operands through which instructions in flight on other streams read the
                       storage */
} tt__known;

/* Returns whether instruction i needs the step's settings as an operand. */
static bool tt__needs_run(const tt_tape *t, const tt__instr *i)
{
    if (tt__is(i, TT__MEAN)) return t->accumulate && !t->by_totals;
    return tt__is(i, TT__WITH_RUN) && (tt__is(i, TT__RMW) || i->attr.dropout > 0);
}

/* Returns whether instruction i can access the memory of v. All operands of an instruction on the host are in
   the host's memory, except the step's settings, of which the host has a copy. */
static bool tt__reaches(const tt_tape *t, const tt__instr *i, int32_t v)
{
    if (i->on_host) return v == t->run || t->values[v].space == TT__HOST;
    return t->values[v].space != TT__HOST || t->host || tt__is(i, TT__ANY_SPACE);
}

/* Returns what is wrong with operand j: not a value, not yet written, in memory that the op cannot access, or
   still being written. NULL: nothing. */
static const char *tt__verify_operand(const tt_tape *t, const tt__instr *i, int j, const tt__known *known,
                                      int group)
{
    int32_t id = i->in[j];
    bool expected = j < tt__ops[i->op].inputs || (j == TT__RUN_IN && tt__is(i, TT__WITH_RUN));
    if (id < 0 || id >= t->n_values || !expected) return "operand is no value";
    const tt__known *k = &known[t->values[id].base];
    /* an earlier micro-batch has written the operand */
    const bool left = i->later && t->values[t->values[id].base].persistent;
    if (!k->defined && !left) return "reads a value that nothing has written";
    if (!tt__reaches(t, i, id)) return i->on_host ? "cannot read the device's memory"
                                                  : "cannot read the host's memory";
    if (j == TT__RUN_IN && id != t->run) return "operand is not the value of the step's settings";
    if (k->group == group) return "reads a value that an instruction of its group writes";
    return k->writer && !tt__is(i, TT__WAITS) ? "is not waited for before it is read" : NULL;
}

/* Returns what is wrong with result j; NULL: nothing. rule: the shape that the op's shape rule gives. */
static const char *tt__verify_result(const tt_tape *t, const tt__instr *i, int j, const tt__shape *rule,
                                     const tt__known *known)
{
    const tt__tape_value *v = &t->values[i->out[j]];
    const tt__known *k = &known[v->base];
    /* A copy back to the host's memory, or from a host copy to its storage, may write a storage again. */
    bool kept = v->space == TT__HOST || t->values[t->values[i->in[0]].base].host_copy;
    bool returns = tt__is(i, TT__ANY_SPACE) && kept;
    bool updates = tt__is(i, TT__RMW) || (returns && v->storage != TT__INPUT && i->out[j] != t->run);
    bool adds = i->add >> j & 1;
    bool reads = adds || updates || (i->add_later >> j & 1);
    bool same_shape = tt__same_rows(rule, &v->shape) && rule->cols == v->shape.cols;
    bool other_kind = tt__is_float(rule->dtype) != tt__is_float(v->shape.dtype);
    bool given = v->storage == TT__INPUT || v->storage == TT__PARAMETER || i->out[j] == t->run;
    if (j >= tt__ops[i->op].outputs || !rule->rows) return "writes an output that the op does not have";
    if (!same_shape) return "result has another shape than the op's rule gives";
    if (other_kind || (v->pinned_f32 && v->shape.dtype != TT_F32)) return "result has the wrong dtype";
    if (!tt__reaches(t, i, i->out[j])) return i->on_host ? "cannot write the device's memory"
                                                         : "cannot write the host's memory";
    if (!updates && given) return "overwrites";
    if (adds && !k->defined) return "adds to a value that nothing has written";
    if (!reads && v->base == i->out[j] && k->defined) return "writes a value a second time";
    if (k->writer || k->readers) return "is not waited for before it is written";
    return NULL;
}

/* Notes that work on another stream has ended: the work whose first output is in[0] of the WAIT i. All
   operands of the work must be operands of the WAIT, too, which keeps them in memory. Returns what is wrong;
   NULL: nothing. */
static const char *tt__verify_wait(const tt_tape *t, const tt__instr *i, tt__known *known)
{
    int at = known[t->values[i->in[0]].base].writer - 1;
    const tt__instr *work = &t->code[tt__max(0, at)];
    if (at < 0 || i->in[0] != work->out[0]) return "waits for a value that is not in flight";
    if (i->stream || i->segment != work->segment) return "waits in another segment or stream";
    for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
        int32_t id = j < TT__MAX_IN ? work->in[j] : work->out[j - TT__MAX_IN];
        bool kept = !id;
        for (int m = 0; m < TT__MAX_IN; m++) kept |= i->in[m] == id;
        if (!kept) return "does not keep all operands of the instruction that it waits for";
        if (!id) continue;
        if (j < TT__MAX_IN) known[t->values[id].base].readers--;
        else known[t->values[id].base].writer = 0;
    }
    return NULL;
}

/* ---- layouts */

/* Returns the layout of the contents of value v. `layout` has the layout of each storage. */
static tt__split tt__contents(const tt_tape *t, const tt__split *layout, int32_t v)
{
    const tt__split declared = t->values[v].part.split, base = layout[t->values[v].base];
    return base == TT__ZEROS || (tt__is_own_rows(t, v) && base == TT__WHOLE) ? declared : base;
}

/* Notes that result j of i leaves layout `now` in its storage. Returns what is wrong; NULL: nothing. */
static const char *tt__lay_out(const tt_tape *t, const tt__instr *i, int j, tt__split now, tt__split *layout)
{
    const tt__tape_value *y = &t->values[i->out[j]];
    tt__split *to = &layout[y->base], before = *to;
    /* joins: the storage also keeps earlier contents */
    const bool adds = i->add >> j & 1, joins = adds || y->base != i->out[j];
    if (tt__is_own_rows(t, i->out[j])) { /* a shard of the rows is added to a sum, whose other rows stay 0 */
        const bool sums = adds && now == y->part.split && (before == TT__ZEROS || before == TT__PARTIAL);
        if (!sums) return "writes a rank's own rows of a value that is no sum over ranks";
        now = TT__PARTIAL;
    } else if (now != TT__ZEROS && (now == TT__PARTIAL ? TT__WHOLE : now) != y->part.split) {
        return "result is split over ranks in another way than the op's rule gives";
    }
    if (joins && before != TT__ZEROS && now != TT__ZEROS && now != before)
        return "joins parts that are split over ranks in different ways";
    if (now != TT__ZEROS || !joins) *to = now;
    return NULL;
}

/* Notes the layouts that the results of i leave in their storages. Returns what is wrong, with the value in
   *value; NULL: nothing. */
static const char *tt__derive(const tt_tape *t, const tt__instr *i, tt__split *layout, int32_t *value)
{
    tt__split in[TT__MAX_IN], out[TT__MAX_OUT] = {TT__WHOLE};
    const tt__rules *rules = tt__rules_of(i);
    const char *wrong = NULL;
    bool whole = true, partial = false;
    *value = 0;
    for (int j = 0; j < TT__MAX_IN; j++) {
        in[j] = i->in[j] ? tt__contents(t, layout, i->in[j]) : TT__WHOLE;
        whole &= in[j] == TT__WHOLE;
        if (in[j] != TT__WHOLE && !partial) *value = i->in[j];
        partial |= in[j] == TT__PARTIAL;
    }
    const bool fits = rules->layout ? rules->layout(t, i, in, out) : whole;
    for (int o = 0; o < tt__summed(i); o++)
        if (tt__column_sums(i, o)) out[tt__column_sums(i, o)] = out[o] == TT__ROWS ? TT__PARTIAL : out[o];
    if (!fits)
        return partial ? "reads a value that must first be summed over ranks"
                       : "has operands that are split over ranks in ways that do not fit together";
    for (int j = 0; j < TT__MAX_OUT && !wrong; j++)
        if (i->out[j] && (wrong = tt__lay_out(t, i, j, out[j], layout)) != NULL) *value = i->out[j];
    return wrong;
}

/* Returns the layout of each storage before the first instruction. The caller frees the array. NULL: out of
   memory. */
static tt__split *tt__first_layouts(const tt_tape *t)
{
    tt__split *layout = (tt__split *)tt__calloc(t->ctx, sizeof *layout * (size_t)t->n_values);
    for (int32_t v = 1; v < t->n_values && layout; v++) {
        const bool holds = t->values[v].storage != TT__TRANSIENT;
        layout[v] = holds ? t->values[v].part.split : TT__ZEROS;
    }
    return layout;
}

/* Verifies a tape. Each value is written once, and before it is read; results have the shapes, and the kinds
   of dtypes, that the shape rule of their op gives. Work on another stream has one WAIT, before which no
   instruction uses its results or changes its operands. */
static tt_status tt__verify(tt_tape *t, const char *pass)
{
    tt_status status = TT_OK;
    int group = 1, in_flight = 0;
    if (!t->ctx->options.verify || t->unverified) return TT_OK;
    tt__known *known = (tt__known *)tt__calloc(t->ctx, sizeof *known * (size_t)t->n_values);
    tt__split *layout = t->tensor > 1 ? tt__first_layouts(t) : NULL;
    if (!known || (!layout && t->tensor > 1)) status = TT_ERR_MEMORY;
    for (int32_t v = 1; v < t->n_values && status == TT_OK; v++) {
        const tt__tape_value *x = &t->values[v];
        bool kept = x->persistent && (x->storage == TT__STATE || x->storage == TT__STEP ||
                                      x->storage == TT__CACHE);
        bool given = x->storage == TT__INPUT || x->storage == TT__PARAMETER || v == t->run;
        known[v].defined = x->base == v && (given || kept);
    }
    for (int k = 0; k < t->n_code && status == TT_OK; k++) {
        const tt__instr *i = &t->code[k];
        tt__shape shape[TT__MAX_OUT];
        const char *wrong = NULL;
        int32_t which = 0;
        if (k && i->segment < i[-1].segment) wrong = "follows an instruction of a later segment";
        bool alike = k + 1 < t->n_code && i[1].op == i->op && i[1].segment == i->segment;
        if (i->with_next && (!alike || i->stream || i[1].stream))
            wrong = "runs together with an instruction of another op";
        for (int j = 0; j < TT__MAX_IN && !wrong; j++)
            if ((which = i->in[j]) != 0) wrong = tt__verify_operand(t, i, j, known, group);
        for (int j = 0; j < TT__MAX_OUT && !wrong; j++)
            if ((which = i->out[j]) < 0 || which >= t->n_values) wrong = "result is no value";
        if (!wrong && !tt__shape_of(t, i, shape)) {
            status = tt__fail(t->ctx, TT_ERR_INTERNAL,
                              "after pass '%s': instruction %d: %s; please report this program", pass, k,
                              t->error);
            break;
        }
        for (int j = 0; j < TT__MAX_OUT && !wrong; j++)
            if ((which = i->out[j]) != 0 && !(wrong = tt__verify_result(t, i, j, &shape[j], known)))
                /* A later result of the same instruction may add to this result. */
                known[t->values[which].base].defined = true;
        if (!wrong && t->run && !i->in[TT__RUN_IN] && tt__needs_run(t, i)) {
            wrong = "has no operand with the step's settings";
            which = t->run;
        }
        if (!wrong && tt__is(i, TT__WAITS)) {
            which = i->in[0];
            wrong = tt__verify_wait(t, i, known);
            in_flight--;
        }
        if (!wrong && i->stream && !i->out[0]) wrong = "runs on another stream and writes nothing";
        if (!wrong && layout) wrong = tt__derive(t, i, layout, &which);
        if (wrong) status = tt__verify_fail(t, pass, k, wrong, which);
        for (int j = 0; j < TT__MAX_IN && i->stream && !wrong; j++)
            if (i->in[j]) known[t->values[i->in[j]].base].readers++;
        for (int j = 0; j < TT__MAX_OUT && !wrong; j++) {
            tt__known *x = &known[t->values[i->out[j]].base];
            x->defined = true;
            x->group = group;
            if (i->stream && i->out[j]) x->writer = k + 1;
        }
        in_flight += i->stream != 0;
        group += !i->with_next;
    }
    for (int32_t v = 1; v < t->n_values && in_flight && status == TT_OK; v++)
        if (known[v].writer) status = tt__verify_fail(t, pass, known[v].writer - 1, "is never waited for", v);
    tt__free(t->ctx, known);
    tt__free(t->ctx, layout);
    return status;
}
/* Returns a map: a number for each value, 0 at first. The caller frees the array. NULL: out of memory. */
static int32_t *tt__new_map(const tt_tape *t)
{
    return (int32_t *)tt__calloc(t->ctx, sizeof(int32_t) * (size_t)t->n_values);
}

/* Replaces each operand v of an instruction by map[v], unless map[v] is 0. */
static void tt__map_operands(tt__instr *i, const int32_t *map)
{
    for (int j = 0; j < TT__MAX_IN; j++) if (map[i->in[j]]) i->in[j] = map[i->in[j]];
}
