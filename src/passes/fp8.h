#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/shapes.h"
#include "../ops/scratch.h"
#include "../ops/linear/rules.h"
#include "data.h"

/* ---------------------------------------------------------------------------------------------------- fp8 */

#ifndef TT__FP8_FROM /* tests set 0: then every product of 16-bit operands is in fp8 */
#define TT__FP8_FROM 1.0
#endif

/* Returns whether i, a product (m, k) times (k, n) of 16-bit operands, is faster in fp8. The three products
   of a linear layer have equal sizes, and 6 m n k operations in total. cuBLASLt 13.1 on an H200 computes them
   at 1,150 instead of 740 TFLOP/s, on average over the layers of ViT-L, DistilBERT and GPT-2. By calculation,
   rounding the three tensors that the products read, and their transposes, takes three launches of a
   microsecond each and moves 4 bytes per element at 4.3 TB/s. Products that a cross-entropy computes in
   chunks are never in fp8. */
static bool tt__pays_in_fp8(const tt_tape *t, const tt__instr *i)
{
    if (!tt__takes_fp8(i) || !i->out[0]) return false;
    const tt_dtype dtype = tt__in(t, i, 0)->dtype;
    const tt__mnk p = tt__mnk_at_capacity(t, i);
    if (tt_dtype_bytes(dtype) != 2 || dtype != tt__in(t, i, 1)->dtype || p.n % 16) return false;
    const double m = (double)p.m, n = (double)p.n, k = (double)p.k;
    const double rounding = 4 * (m * n + m * k + n * k) / 4.3e12 + 3e-6;
    return 6 * m * n * k * (1 / 740e12 - 1 / 1150e12) > TT__FP8_FROM * rounding;
}

/* Numbers the tensors that products read. In a program that trains, makes the history of largest magnitudes,
   with a row for each tensor. This pass runs before recompute and before the division into stages, so that
   the numbers depend on neither. Programs with tensor ranks have no history: a rank sees only shards. */
static tt_status tt__pass_number_factors(tt_tape *t, bool train)
{
    int32_t *number = (int32_t *)tt__calloc(t->ctx, sizeof *number * 2 * (size_t)t->n_values), n = 0;
    if (!number) return TT_ERR_MEMORY;
    for (int k = 0; k < t->n_code; k++) {
        tt__instr *i = &t->code[k];
        for (int o = 0; o < 2 && tt__takes_fp8(i); o++) {
            int32_t *of = &number[2 * i->in[o] + tt__is_gradient_operand(i, o)];
            if (!*of) *of = ++n;
            i->factor[o] = *of;
        }
    }
    tt__free(t->ctx, number);
    if (!n || !train || t->tensor > 1) return TT_OK;
    tt__shape shape;
    tt__set_fixed(&shape, TT_F32, n, 1 + TT__FP8_STEPS);
    t->fp8_history = tt__new_value(t, &shape, TT__STEP, "largest magnitudes of fp8 tensors");
    tt__set_fixed(&shape, TT_F32, 1, n);
    t->fp8_largest = tt__new_value(t, &shape, TT__STEP, "largest magnitudes of a step");
    if (!t->fp8_history || !t->fp8_largest) return TT_ERR_MEMORY;
    for (int k = 0; k < 2; k++) {
        tt__tape_value *v = &t->values[k ? t->fp8_history : t->fp8_largest];
        v->persistent = v->pinned_f32 = true;
    }
    return TT_OK;
}

/* The QUANTIZE instruction that rounds a value to fp8. */
typedef struct tt__quantized {
    int at;      /* 1 + number of the QUANTIZE, which holds until tt__settle renumbers; 0: none */
    int before;  /* the instruction before which the QUANTIZE is inserted */
} tt__quantized;

typedef struct tt__fp8 {
    tt_tape *t;
    tt__quantized *of;   /* of[2 * v + 1]: QUANTIZE of value v as a gradient, in E5M2; of[2 * v]: of value v
                            as any other operand, in E4M3 */
    int *written, *read; /* written: for each storage, 1 + the last instruction visited that writes it; read:
                            for each storage, 1 + the last instruction that reads it unrounded */
} tt__fp8;

/* Makes a value for the fp8 copy of v, or of its transpose, in the layout that QUANTIZE writes: rows start at
   multiples of 16 elements. Returns 0 after tt__tape_fail. */
static int32_t tt__new_fp8(tt_tape *t, int32_t v, tt_dtype dtype, bool transposed)
{
    const tt__tape_value x = t->values[v];
    tt__shape shape = x.shape, whole;
    const int64_t ld = (int64_t)tt__align_to((size_t)(transposed ? shape.rows : shape.cols), 16);
    const char *format = transposed ? "fp8 of %.52s, transposed" : "fp8 of %.60s";
    shape.dtype = dtype;
    whole = shape;
    if (transposed) tt__set_fixed(&whole, dtype, shape.cols, ld);
    else whole.cols = ld;
    const int32_t storage = tt__value_like(t, v, tt__new_value(t, &whole, TT__TRANSIENT, format, x.name));
    if (!storage || (!transposed && ld == shape.cols)) return storage;
    return tt__new_view(t, storage, &shape, 0, ld, t->values[storage].name);
}

/* Finds the QUANTIZE of operand o of product k, or inserts one directly before the product. The backward
   uses the fp8 copy of the forward, unless the unrounded operand stays in memory until then anyway: a
   second QUANTIZE then saves the memory of the fp8 copy. Returns 1 + the number of the QUANTIZE; 0: out of
   memory. */
static int tt__quantize(tt__fp8 *f, int k, int o)
{
    tt_tape *t = f->t;
    const tt__instr product = t->code[k];
    const int32_t v = product.in[o], base = t->values[v].base;
    const bool gradient = tt__is_gradient_operand(&product, o);
    tt__quantized *q = &f->of[2 * v + gradient];
    if (q->at) {
        const tt__instr *found = &t->code[q->at - 1];
        const tt__tape_value *x = &t->values[base];
        const bool saved = x->storage != TT__TRANSIENT || x->keep || f->read[base] > k;
        const bool together = found->segment == product.segment && found->stage == product.stage &&
                              found->always == product.always && found->later == product.later;
        const bool recomputed = product.backward && !found->backward && saved;
        if (together && !recomputed && f->written[base] <= q->before) return q->at;
    }
    tt__instr i = tt__instr_like(&product, TT__OP_QUANTIZE, v, 0);
    i.recomputed = product.recomputed;
    const tt__shape scalar = {TT_F32, 1, 1, 0, 0};
    i.out[2] = tt__new_value(t, &scalar, TT__TRANSIENT, "1/scale of %.58s", t->values[v].name);
    if (!i.out[2]) return 0;
    t->values[i.out[2]].pinned_f32 = true;
    if (t->fp8_history) {
        const int64_t row = product.factor[o] - 1, cols = t->values[t->fp8_history].shape.cols;
        const tt__shape known = {TT_F32, 1, cols, 0, 0};
        i.in[1] = tt__new_view(t, t->fp8_history, &known, row * cols, cols, t->values[v].name);
        i.out[3] = tt__new_view(t, t->fp8_largest, &scalar, row, 1, t->values[v].name);
        if (!i.in[1] || !i.out[3]) return 0;
        i.add = 1u << 3;
    }
    const int at = tt__insert(t, k, &i);
    q->at = at ? at + 1 : 0;
    q->before = k;
    return q->at;
}

/* Makes product k read operand o in fp8. Returns false if out of memory. */
static bool tt__read_fp8(tt__fp8 *f, int k, int o)
{
    tt_tape *t = f->t;
    const int at = tt__quantize(f, k, o) - 1;
    const bool transposed = tt__sums_rows_of(&t->code[k], o);
    if (at < 0) return false;
    if (!t->code[at].out[transposed]) {
        const tt_dtype dtype = tt__is_gradient_operand(&t->code[k], o) ? TT__E5M2 : TT__E4M3;
        const int32_t q = tt__new_fp8(t, t->code[k].in[o], dtype, transposed);
        if (!q) return false;
        t->code[at].out[transposed] = q;
    }
    t->code[k].in[o] = t->code[at].out[transposed];
    t->code[k].in[TT__UNSCALE_IN + o] = t->code[at].out[2];
    return true;
}

/* Appends the update of the history by the largest magnitudes of the step, over all data ranks. */
static bool tt__emit_fp8_history(tt_tape *t)
{
    tt__instr i = tt__instr_of(TT__OP_FP8_HISTORY, t->fp8_largest, t->fp8_history);
    tt__instr max = tt__data_move(TT__OP_ALL_REDUCE, t->fp8_largest, t->fp8_largest, NULL);
    max.move.reduce = TT__MAX;
    if (t->data > 1 && !tt__append_step(t, &max, false)) return false;
    i.out[1] = t->fp8_largest;
    return tt__append_step(t, &i, false);
}

/* Makes products read their operands in fp8 where fp8 is faster. */
static tt_status tt__pass_fp8(tt_tape *t)
{
    const int n = tt__index(t), values = t->n_values;
    tt__fp8 f = {t, NULL, NULL, NULL};
    f.of = (tt__quantized *)tt__calloc(t->ctx, sizeof *f.of * 2 * (size_t)values);
    f.written = (int *)tt__calloc(t->ctx, sizeof *f.written * (size_t)values);
    f.read = (int *)tt__calloc(t->ctx, sizeof *f.read * (size_t)values);
    bool ok = f.of && f.written && f.read, any = false;
    for (int k = 0; k < n && ok; k++)
        for (int j = tt__pays_in_fp8(t, &t->code[k]) ? 2 : 0; j < TT__MAX_IN; j++)
            f.read[t->values[t->code[k].in[j]].base] = k + 1;
    for (int k = 0; k < n && ok; k++) {
        const bool pays = tt__pays_in_fp8(t, &t->code[k]);
        any |= pays;
        if (pays && tt__operand_sums(&t->code[k]))
            tt__sum_columns_apart(t, k, tt__operand_sums(&t->code[k])); /* sums the unrounded operands */
        for (int o = 0; o < 2 && pays && ok; o++) ok = tt__read_fp8(&f, k, o);
        for (int j = 0; j < TT__MAX_OUT; j++)
            if (t->code[k].out[j]) f.written[t->values[t->code[k].out[j]].base] = k + 1;
    }
    tt__free(t->ctx, f.of);
    tt__free(t->ctx, f.written);
    tt__free(t->ctx, f.read);
    tt_status status = ok ? tt__settle(t, n) : TT_ERR_MEMORY;
    if (status == TT_OK && any && t->fp8_history && !tt__emit_fp8_history(t)) status = TT_ERR_MEMORY;
    return status;
}
