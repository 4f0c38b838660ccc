#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../../tape/record.h"
#include "../record.h"
#include "../shapes.h"
#include "../gradients.h"

/* ------------------------------------------------------------------------------------- ops of the caller
   tt_custom: an op whose kernels are functions of the caller. */

tt_value tt_custom(tt_tape *t, const tt_custom_op *op, const tt_value *inputs, int n, int64_t rows,
                   int64_t width)
{
    tt__instr i = tt__new_instr(TT__OP_CUSTOM);
    tt_value in[TT_CUSTOM_INPUTS];
    tt__shape shape;
    if (t->status == TT_OK && (!op || !inputs))
        tt__tape_fail(t, TT_ERR_ARGUMENT, "tt_custom: %s is NULL", op ? "inputs" : "op");
    if (t->status != TT_OK) return tt__handle(t, 0);
    const char *name = op->name ? op->name : "custom";
    memset(in, 0, sizeof in);
    if (n < 1 || n > TT_CUSTOM_INPUTS)
        tt__tape_fail(t, TT_ERR_ARGUMENT, "tt_custom: op '%.60s' has %d inputs, expected 1 to %d", name, n,
                      (int)TT_CUSTOM_INPUTS);
    else if (!op->forward)
        tt__tape_fail(t, TT_ERR_ARGUMENT, "tt_custom: op '%.60s' has no function `forward`", name);
    else if (!tt__decode_rows(t, rows, &shape) || width < 1 || shape.rows > INT_MAX || width > INT_MAX)
        tt__tape_fail(t, TT_ERR_SHAPE,
                      "tt_custom: op '%.60s' has an output of %lld rows of width %lld, expected "
                      "1 or more of both, or an axis as rows", name, (long long)rows, (long long)width);
    if (t->status != TT_OK) return tt__handle(t, 0);
    memcpy(in, inputs, sizeof *in * (size_t)n);
    i.attr.custom = op;
    i.attr.custom_hash = 2166136261u; /* FNV-1a */
    for (const char *c = name; *c; c++)
        i.attr.custom_hash = (i.attr.custom_hash ^ (unsigned char)*c) * 16777619u;
    i.attr.out_axis = shape.axis;
    i.attr.out_extra = shape.extra;
    i.attr.out_width = (int)width;
    if (!shape.axis) i.attr.out_rows = (int)shape.rows;
    static const char *const kinds[] = {"vVVVVV", "vvVVVV", "vvvVVV", "vvvvVV", "vvvvvV", "vvvvvv"};
    const tt_value y = tt__record(t, i, kinds[n - 1], in[0], in[1], in[2], in[3], in[4], in[5]);
    if (y.id) tt_name(t, y, "%.60s.%d", name, t->n_code - 1);
    return y;
}

static bool tt__shape_CUSTOM(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__attr *a = &i->attr;
    tt__set_fixed(&out[0], TT_F32, a->out_rows, a->out_width);
    if (!a->out_axis) return true;
    out[0].axis = a->out_axis;
    out[0].extra = a->out_extra;
    out[0].rows = t->axes[a->out_axis].capacity + a->out_extra;
    return true;
}

static bool tt__shape_CUSTOM_BACKWARD(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    for (int k = 0; k < TT_CUSTOM_INPUTS; k++) if (i->out[k]) out[k] = *tt__in(t, i, 2 + k);
    return true;
}

static void tt__backward_CUSTOM(tt__builder *b, const tt__instr *f, int32_t g)
{
    const tt_custom_op *op = f->attr.custom;
    b->ok = b->ok && op->backward;
    if (b->ok) tt__emit_gradient(b, f, g, TT__OP_CUSTOM_BACKWARD, "gA012345", "012345");
    else if (!op->backward)
        tt__fail(b->t->ctx, TT_ERR_UNSUPPORTED, "op '%.60s' has no function `backward`, and '%s' needs a "
                 "gradient", op->name ? op->name : "custom", b->t->values[f->out[0]].name);
}

/* Returns the bytes of the copy that a kernel makes of a matrix, because the functions of the caller take
   contiguous floats; 0 if they take the matrix itself. adds: the functions' result is added to the matrix. */
static size_t tt__custom_bytes(const tt__mat *m, bool adds)
{
    const size_t item = tt__is_float(m->dtype) ? sizeof(float) : tt_dtype_bytes(m->dtype);
    const bool plain = m->dtype == TT_F32 || !tt__is_float(m->dtype);
    if (plain && !adds && (m->ld == m->cols || m->rows == 1)) return 0;
    return tt__align_up((size_t)m->rows * (size_t)m->cols * item);
}

/* Returns the bytes of scratch for the copies of all matrices. */
static size_t tt__cpu_custom(int threads, const tt_tape *t, const tt__instr *i)
{
    size_t bytes = 0;
    (void)threads;
    for (int j = 0; j < TT__MAX_IN + TT_CUSTOM_INPUTS; j++) {
        const int out = j - TT__MAX_IN;
        const int32_t v = out < 0 ? i->in[j] : i->out[out];
        const tt__tape_value *x = &t->values[v];
        const tt__mat m = {NULL, x->shape.dtype, x->shape.rows, x->shape.cols, x->ld};
        if (v) bytes += tt__custom_bytes(&m, out >= 0 && ((i->add | i->add_later) >> out & 1));
    }
    return bytes;
}

static const tt__rules tt__rules_CUSTOM = {tt__shape_CUSTOM, NULL, {tt__backward_CUSTOM}, tt__cpu_custom};
static const tt__rules tt__rules_CUSTOM_BACKWARD = {tt__shape_CUSTOM_BACKWARD, NULL, {NULL}, tt__cpu_custom};
