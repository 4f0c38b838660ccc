#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/gradients.h"
#include "verify.h"

/* ---------------------------------------------------------------------------------------------- precision */

/* The values of the option `precision`. Saved states contain these numbers, so they never change. */
typedef enum tt__precision_kind {
    TT__32_TRUE, TT__BF16_MIXED, TT__BF16_TRUE, TT__16_MIXED, TT__16_TRUE
} tt__precision_kind;

/* The options `precision` and `residual` after parsing. */
typedef struct tt__precision {
    tt__precision_kind kind;
    bool mixed;
    bool residual_f32;
    tt_dtype half;      /* dtype of 16-bit values; f32 if there are none. f16 also means loss scaling */
} tt__precision;

static const char *const tt__precision_names[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed",
                                                  "16-true"};

/* Finds `name` among the n values of an option and writes its index to *out. Fails if the name is unknown;
   `hint` ends the error message. */
static tt_status tt__parse(tt_context *ctx, const char *option, const char *name, const char *const *names,
                           int n, const char *hint, int *out)
{
    char list[128];
    tt__text_buffer text = {list, sizeof list, 0};
    for (*out = 0; *out < n; ++*out) if (strcmp(name, names[*out]) == 0) return TT_OK;
    *out = 0;
    for (int k = 0; k < n; k++) tt__print(&text, "%s%s", k == 0 ? "" : k < n - 1 ? ", " : " or ", names[k]);
    return tt__fail(ctx, TT_ERR_UNSUPPORTED, "{%s '%s'} is unknown: use %s%s", option, name, list, hint);
}

static tt_status tt__parse_precision(tt_context *ctx, const char *name, const char *residual,
                                     tt__precision *out)
{
    static const char *const residuals[] = {"16-bit", "f32"};
    int k, wide = 0;
    memset(out, 0, sizeof *out);
    tt_status status = tt__parse(ctx, "precision", name ? name : "32-true", tt__precision_names, 5,
                                 "", &k);
    if (status != TT_OK) return status;
    out->kind = (tt__precision_kind)k; /* set even if `residual` is wrong, for later checks */
    out->mixed = k == TT__BF16_MIXED || k == TT__16_MIXED;
    out->half = k == TT__32_TRUE ? TT_F32 : k >= TT__16_MIXED ? TT_F16 : TT_BF16;
    if (residual)
        status = tt__parse(ctx, "residual", residual, residuals, 2,
                           ", or NULL to choose by precision", &wide);
    if (status != TT_OK) return status;
    out->residual_f32 = residual ? wide : k == TT__16_MIXED;
    if (!residual || out->mixed) return TT_OK;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "{residual '%s'}: {precision '%s'} has one dtype for all values: "
                    "leave {residual} NULL, or use 16-mixed or bf16-mixed", residual, tt__precision_names[k]);
}

typedef enum tt__matmul_precision { TT__MATMUL_FP32, TT__MATMUL_TF32, TT__MATMUL_FP8 } tt__matmul_precision;

/* Puts v into a residual stream if the op that computes v begins a stream or moves a stream's values
   unchanged. Returns whether v is in the stream or needs no mark, because v is f32 anyway or not transient. v
   is a residual operand or an operand of a sum. Results of norms, activations and attention stay out:
   products read them rounded to 16 bits. */
static bool tt__into_residual(tt_tape *t, int32_t v)
{
    if (tt__is_own_rows(t, v)) v = t->values[v].base;
    const tt__tape_value *x = &t->values[v], *base = &t->values[x->base];
    int at = x->base == v ? tt__producer(t, v) : -1;
    if (base->residual || base->pinned_f32 || x->storage != TT__TRANSIENT) return true;
    if (at < 0 || t->code[at].out[0] != v || t->code[at].attr.act) return false;
    const tt__instr *i = &t->code[at];
    bool in = tt__is(i, TT__BEGINS) || (tt__is(i, TT__MOVES) && tt__into_residual(t, i->in[0]));
    return t->values[v].residual = in;
}

/* Marks the values of residual streams: the first summand of a stream, the results of residual additions, and
   rows gathered from values of the stream. */
static void tt__mark_residual(tt_tape *t)
{
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const bool gathers = tt__is(i, TT__GATHERS);
        const int last = tt__residual(i), first = tt__is(i, TT__SUMS) ? 0 : last;
        bool in = false;
        if (!gathers && !(last && i->in[last])) continue;
        for (int j = first; j <= last; j++) in |= t->values[t->values[i->in[j]].base].residual;
        for (int j = first; j <= last && !in && !gathers; j++) tt__into_residual(t, i->in[j]);
        if (in || !gathers) t->values[i->out[0]].residual = true;
    }
    /* The result of a collective over tensor ranks is in the residual stream if its operand is. */
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const bool in = i->move.over == TT__OVER_TENSOR && t->values[t->values[i->in[0]].base].residual;
        t->values[i->out[0]].residual |= in;
    }
}

/* Inserts a cast of v to another dtype directly before instruction k, so that the copy takes memory as late
   as possible. Returns the copy; 0: out of memory. */
static int32_t tt__cast_before(tt_tape *t, int k, int32_t v, tt_dtype dtype)
{
    tt__shape shape = t->values[v].shape;
    shape.dtype = dtype;
    const int32_t copy = tt__new_value(t, &shape, TT__TRANSIENT, "%s(%.60s)", tt_dtype_name(dtype),
                                       t->values[v].name);
    const tt__instr cast = tt__instr_like(&t->code[k], TT__OP_CAST, v, copy);
    return tt__value_like(t, v, copy) && tt__insert(t, k, &cast) ? copy : 0;
}

/* Sets the dtypes of all values. Gradients are made later, with the dtypes of their values. In mixed
   precision, products read weights through a 16-bit copy, which is made once a run. Statistics, losses,
   values that a loss reads, and scalars computed from a loss stay f32. */
static tt_status tt__pass_precision(tt_tape *t, const tt__precision *precision)
{
    if (precision->kind == TT__32_TRUE) return TT_OK;
    const int n = tt__index(t);
    for (int k = 0; k < n; k++) {
        const tt__instr *i = &t->code[k];
        const bool loss = tt__is(i, TT__LOSS);
        tt__tape_value *y = &t->values[i->out[0]];
        bool number = y->shape.rows == 1 && y->shape.cols == 1 && !y->shape.axis && tt__is(i, TT__MOVES);
        for (int j = 0; j < 2; j++) {
            tt__tape_value *x = &t->values[t->values[i->in[j]].base];
            if (loss && x->storage == TT__TRANSIENT) x->pinned_f32 = true;
            if (number && x->pinned_f32) y->pinned_f32 = true;
        }
    }
    /* The operand and the result of a collective over tensor ranks get one dtype. The loop goes through the
       instructions in reverse order, then in order. */
    for (int k = 2 * n - 1; k >= 0; k--) {
        const tt__instr *i = &t->code[k < n ? n - 1 - k : k - n];
        if (i->move.over != TT__OVER_TENSOR) continue;
        tt__tape_value *x = &t->values[t->values[i->in[0]].base], *y = &t->values[i->out[0]];
        if (x->storage == TT__TRANSIENT) x->pinned_f32 = y->pinned_f32 = x->pinned_f32 || y->pinned_f32;
    }
    if (precision->residual_f32) tt__mark_residual(t);
    for (int32_t v = 1; v < t->n_values; v++) {
        tt__tape_value *x = &t->values[v], *base = &t->values[x->base];
        const bool weight = tt__is_weight(t, v);
        const bool f32 = base->pinned_f32 || x->pinned_f32 || base->residual;
        const bool computed = x->storage == TT__TRANSIENT || x->storage == TT__CACHE;
        const bool changes = weight ? !precision->mixed : computed && !f32;
        if (changes && x->shape.dtype == TT_F32) x->shape.dtype = precision->half;
    }
    for (int k = 0; k < n && !precision->mixed; k++) {
        float *scale = &t->code[k].attr.scale, rounded[1];
        uint16_t half[1];
        if (!t->code[k].attr.as_weights) continue;
        tt__convert(half, precision->half, scale, TT_F32, 1);
        tt__convert(rounded, TT_F32, half, precision->half, 1);
        *scale = *rounded;
    }
    if (!precision->mixed) return TT_OK;
    int32_t *copy = tt__new_map(t);
    bool ok = copy != NULL;
    for (int k = 0; k < n && ok; k++) {
        int number = tt__weight(&t->code[k]);
        int32_t w = number ? t->code[k].in[number] : 0;
        if (!w || !tt__is_weight(t, w) || t->values[w].base != w) continue;
        if (tt__is_coded(t->values[w].shape.dtype)) continue;
        if (!copy[w]) copy[w] = tt__cast_before(t, k, w, precision->half);
        t->code[k].in[number] = copy[w];
        ok = copy[w] != 0;
    }
    tt__free(t->ctx, copy);
    return ok ? tt__settle(t, n) : TT_ERR_MEMORY;
}

#ifndef TT__PIECES_FROM /* tests set a smaller number */
#define TT__PIECES_FROM 65536 /* elements; smaller tensors are not sharded, which would save little memory */
#endif

/* Returns the shard that a data rank has of a tensor like v; unit 0: the tensor is not divided, each rank has
   it whole. */
static tt__part tt__data_part(const tt_tape *t, int32_t v)
{
    const tt__tape_value *x = &t->values[v];
    tt__part part = x->part;
    const int64_t elements = x->shape.rows * x->shape.cols;
    const bool whole = !t->server && (t->zero == 0 || elements < TT__PIECES_FROM ||
                       tt__is_coded(x->shape.dtype));
    if (t->data == 1 || part.unit || whole) return part;
    part.unit = TT__CHUNK;
    part.of = elements;
    part.root = t->server;
    return part;
}

/* Makes products read f32 weights and round them while reading, in place of mixed precision's 16-bit copies
   of weights. The pass is for devices whose products can round operands. */
static void tt__pass_fold_casts(tt_tape *t)
{
    tt__index(t);
    for (int k = 0; k < t->n_code; k++) {
        tt__instr *i = &t->code[k];
        int number = tt__weight(i), at = number ? tt__producer(t, i->in[number]) : -1;
        if (at < 0 || !tt__is(&t->code[at], TT__CASTS) || t->code[at].attr.rounding) continue;
        const tt__tape_value *w = &t->values[t->code[at].in[0]];
        if (!tt__is_weight(t, t->code[at].in[0]) || w->shape.dtype != TT_F32) continue;
        if (t->zero == 3 && tt__data_part(t, t->code[at].in[0]).unit) continue; /* ranks need the 16-bit copy:
                                                                                   they gather it */
        i->attr.narrow = t->values[i->in[number]].shape.dtype;
        i->in[number] = t->code[at].in[0];
    }
}

/* Returns whether v is written once and read only by products whose other operand has dtype `dtype`. */
static bool tt__only_feeds_products(const tt_tape *t, int32_t v, tt_dtype dtype)
{
    const tt__tape_value *x = &t->values[v];
    if (x->base != v || x->views || x->storage != TT__TRANSIENT || x->keep || x->ends || x->writes != 1)
        return false;
    if (t->code[tt__producer(t, v)].move.over != TT__ALONE) return false; /* the ranks exchange v in f32 */
    for (int k = 0; k <= x->reader; k++)
        for (int j = 0; j < TT__MAX_IN; j++) {
            const tt__instr *i = &t->code[k];
            if (i->in[j] != v) continue;
            if (j > 1 || !tt__is(i, TT__PRODUCT) || !i->out[0]) return false;
            if (t->values[i->in[1 - j]].shape.dtype != dtype) return false;
        }
    return true;
}

/* Gives both operands of a product the same dtype, for devices whose products need that. Rounds the f32
   operand of a product whose other operand has 16 bits, such as the gradient of logits or of an f32 residual
   stream. If only products read the f32 value, the value itself becomes 16-bit. Otherwise the products read a
   16-bit copy, made before the first of them. */
static tt_status tt__pass_alike_operands(tt_tape *t)
{
    const int n = tt__index(t);
    int32_t *copies = tt__new_map(t);
    bool ok = copies != NULL;
    for (int k = 0; k < n && ok; k++) {
        if (!tt__is(&t->code[k], TT__PRODUCT) || !t->code[k].out[0]) continue;
        for (int j = 0; j < 2 && ok; j++) {
            const int32_t v = t->code[k].in[j];
            const tt_dtype dtype = t->values[t->code[k].in[1 - j]].shape.dtype;
            if (t->values[v].shape.dtype != TT_F32 || dtype == TT_F32 || tt__is_coded(dtype)) continue;
            if (tt__only_feeds_products(t, v, dtype)) {
                t->values[v].shape.dtype = dtype;
                t->values[v].pinned_f32 = false;
                continue;
            }
            const int32_t copy = copies[v] ? copies[v] : tt__cast_before(t, k, v, dtype);
            if (t->values[t->values[v].base].writer < k) copies[v] = copy;
            t->code[k].in[j] = copy;
            ok = copy != 0;
        }
    }
    tt__free(t->ctx, copies);
    return ok ? tt__settle(t, n) : TT_ERR_MEMORY;
}
