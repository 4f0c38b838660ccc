#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "record.h"

/* ------------------------------------------------------------------------------------------------- gradients
   The rule of gradients (see src/tape/): the first contribution to a gradient writes it, later ones add to
   it. */

/* Emits an instruction that reads in[0] to in[n - 1] and has the attributes and random numbers of f, unless f
   is NULL. Returns NULL when out of memory. */
static tt__instr *tt__emit(tt__builder *b, int op, const tt__instr *f, const int32_t *in, int n)
{
    tt__instr *i = b->ok ? tt__append(b->t, op) : NULL;
    if (!(b->ok = i != NULL)) return NULL;
    i->segment = b->segment;
    i->backward = b->backward;
    i->stage = b->stage;
    for (int k = 0; k < n; k++) i->in[k] = in[k];
    if (!f) return i;
    i->attr = f->attr;
    i->random = f->random;
    return i;
}

/* Returns whether v has the values of a parameter: v is the parameter, or the tensor ranks gathered v from
   shards of the parameter. */
static bool tt__is_weight(const tt_tape *t, int32_t v)
{
    const tt__value *x = &t->values[v];
    return x->storage == TT__PARAMETER || (x->storage == TT__TRANSIENT && x->param >= 0);
}

/* Returns the value that gets the gradient of v: the parameter if v is a cast of a parameter, else v. */
static int32_t tt__grad_owner(const tt_tape *t, int32_t v)
{
    int at = tt__producer(t, v);
    bool cast = at >= 0 && tt__is(&t->code[at], TT__CASTS);
    return cast && tt__is_weight(t, t->code[at].in[0]) ? t->code[at].in[0] : v;
}

static void tt__fill(tt__builder *b, int32_t v, float x)
{
    tt__instr *i = tt__emit(b, TT__OP_FILL, NULL, NULL, 0);
    if (!i) return;
    i->out[0] = v;
    i->attr.scale = x;
    if (b->t->values[v].persistent) i->add_later = 1; /* v becomes x once, not in each micro-batch */
}

/* Makes a gradient of v, which is no view, with its own storage. Returns 0 when out of memory. */
static int32_t tt__new_gradient(tt__builder *b, int32_t v)
{
    tt_tape *t = b->t;
    const tt__value *of = &t->values[v];
    const bool parameter = of->storage == TT__PARAMETER;
    const tt__storage storage = parameter ? TT__GRADIENT : TT__TRANSIENT;
    int32_t g = tt__value_like(t, v, tt__new_value(t, &of->shape, storage, "d(%.60s)", of->name));
    if (!(b->ok = g != 0)) return 0;
    t->values[g].param = t->values[v].param;
    t->values[g].persistent = parameter && b->accumulate;
    t->values[v].grad = g;
    return g;
}

/* Makes out[slot] of the last instruction v's gradient or its next contribution, if v needs a gradient. */
static void tt__grad_into(tt__builder *b, int slot, int32_t v)
{
    tt_tape *t = b->t;
    if (!b->ok || !v || !t->values[v].needs_grad) return;
    v = tt__grad_owner(t, v);
    int32_t base = t->values[v].base;
    bool exists = t->values[base].grad != 0;
    int32_t g = exists ? t->values[base].grad : tt__new_gradient(b, base);
    if (!g) return;
    if (base != v) {
        tt__value view = t->values[v], *whole = &t->values[base];
        bool all = view.shape.rows * view.shape.cols == whole->shape.rows * whole->shape.cols &&
                   view.part.split == whole->part.split;
        if (!exists && !all) { /* first fill all with 0: other views of base may add to the rest */
            tt__instr last = t->code[--t->n_code];
            tt__fill(b, g, 0);
            tt__instr *again = tt__emit(b, last.op, NULL, NULL, 0);
            if (!again) return;
            *again = last;
            exists = true;
        }
        g = tt__view_like(t, v, g, view.offset);
        if (!(b->ok = g != 0)) return;
    }
    tt__instr *i = &t->code[t->n_code - 1];
    i->out[slot] = g;
    if (exists) i->add |= 1u << slot;
    else if (t->values[g].persistent) i->add_later |= 1u << slot;
}

/* Makes g, unchanged, the gradient of v or its next contribution. If may_take, nothing else will read g or
   add to it, and v may take g over as its gradient; else g is copied or added. */
static void tt__grad_pass(tt__builder *b, int32_t g, int32_t v, bool may_take)
{
    tt_tape *t = b->t;
    if (!b->ok || !v || !t->values[v].needs_grad) return;
    const tt__value *x = &t->values[v], *from = &t->values[g];
    bool whole = x->base == v && from->base == g && x->storage == TT__TRANSIENT;
    if (may_take && whole && !x->grad && from->shape.dtype == x->shape.dtype && tt__grad_owner(t, v) == v) {
        t->values[v].grad = g;
        return;
    }
    tt__instr *i = tt__emit(b, TT__OP_SCALE, NULL, &g, 1);
    if (!i) return;
    i->attr.scale = 1;
    tt__grad_into(b, 0, v);
}

/* Emits an instruction of `op` with f's attributes and random numbers. Each letter of `reads` is an operand:
   g is the gradient g, 0 to 9 are f's operands, A, B, C are f's results, - is none. The instruction's results
   are gradients of f's operands, whose numbers are in `into`. */
static void tt__emit_gradient(tt__builder *b, const tt__instr *f, int32_t g, int op, const char *reads,
                              const char *into)
{
    int32_t in[TT__MAX_IN];
    int n = 0;
    for (; reads[n]; n++)
        in[n] = reads[n] == 'g' ? g : reads[n] == '-' ? 0 : reads[n] >= 'A' ? f->out[reads[n] - 'A']
              : f->in[reads[n] - '0'];
    tt__emit(b, op, f, in, n);
    for (int o = 0; into[o]; o++) tt__grad_into(b, o, f->in[into[o] - '0']);
}

static bool tt__wants(const tt_tape *t, int32_t v) { return v && t->values[v].needs_grad; }
