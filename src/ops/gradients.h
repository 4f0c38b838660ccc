#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "record.h"

/* ------------------------------------------------------------------------------------------------- gradients
   Functions that emit backward instructions. The first contribution to a gradient writes the gradient, later
   contributions add to it (see src/tape/). */

/* Emits an instruction whose operands are in[0] to in[n - 1]. If f is not NULL, copies f's attributes and
   random numbers. Returns NULL when out of memory. */
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

/* Returns whether v has the numbers of a parameter: v is the parameter itself, or v was gathered from the
   parameter's shards on the tensor-parallel ranks. */
static bool tt__is_weight(const tt_tape *t, int32_t v)
{
    const tt__tape_value *x = &t->values[v];
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
    if (b->t->values[v].persistent) i->add_later = 1; /* only the first micro-batch sets v to x */
}

/* Creates the gradient of v with its own storage; v must not be a view. Returns 0 when out of memory. */
static int32_t tt__new_gradient(tt__builder *b, int32_t v)
{
    tt_tape *t = b->t;
    const tt__tape_value *of = &t->values[v];
    const bool parameter = of->storage == TT__PARAMETER;
    const tt__storage storage = parameter ? TT__GRADIENT : TT__TRANSIENT;
    int32_t g = tt__value_like(t, v, tt__new_value(t, &of->shape, storage, "d(%.60s)", of->name));
    if (!(b->ok = g != 0)) return 0;
    t->values[g].param = t->values[v].param;
    t->values[g].persistent = parameter && b->accumulate;
    t->values[v].grad = g;
    return g;
}

/* Makes out[slot] of the tape's last instruction the gradient of v, or a summand if that gradient exists
   already. Does nothing if v needs no gradient. */
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
        tt__tape_value view = t->values[v], *whole = &t->values[base];
        bool all = view.shape.rows * view.shape.cols == whole->shape.rows * whole->shape.cols &&
                   view.part.split == whole->part.split;
        if (!exists && !all) { /* first fill g with 0: other views of base may add to the rest of g */
            tt__instr last = t->code[--t->n_code];
            tt__fill(b, g, 0);
            tt__instr *recomputed = tt__emit(b, last.op, NULL, NULL, 0);
            if (!recomputed) return;
            *recomputed = last;
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

/* Makes the value g a contribution to the gradient of v. If may_take, nothing else reads g or adds to g, so
   that g itself can become the gradient of v. Otherwise g is copied to the gradient or added to it. */
static void tt__grad_pass(tt__builder *b, int32_t g, int32_t v, bool may_take)
{
    tt_tape *t = b->t;
    if (!b->ok || !v || !t->values[v].needs_grad) return;
    const tt__tape_value *x = &t->values[v], *from = &t->values[g];
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

/* Emits an instruction of `op` with f's attributes and random numbers. Each letter of `reads` stands for one
   operand: `g` is the value g, `0` to `9` are f's operands, `A` to `C` are f's results, and `-` is an absent
   operand. Each digit of `into` stands for one result: digit k is the gradient of f's operand k. */
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
