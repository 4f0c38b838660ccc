#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../../tape/record.h"
#include "../../tape/edit.h"
#include "../record.h"
#include "../shapes.h"
#include "../layouts.h"
#include "../gradients.h"
#include "../scratch.h"
#include "../linear/rules.h"

/* -------------------------------------------------------------------------------------------- loss_total */

void tt_loss_total(tt_tape *t, tt_value loss, tt_value total)
{
    const tt__shape one = {TT_F32, 1, 1, 0, 0};
    int at = -1;
    if (!tt__on_tape(t, "loss_total", 0, loss) || !tt__on_tape(t, "loss_total", 1, total)) return;
    for (int k = 0; k < t->n_code; k++)
        if (tt__is(&t->code[k], TT__LOSS) && t->code[k].out[0] == loss.id) at = k;
    if (at < 0) {
        tt__tape_fail(t, TT_ERR_ARGUMENT, "loss_total: '%s' is not the result of a loss: give each loss its "
                      "total before losses are added or scaled", t->values[loss.id].name);
        return;
    }
    t->code[at].in[TT__LOSS_TOTAL] = total.id;
    t->code[at].attr.by_total = true;
    tt__weights_in(t, &t->code[at], TT__LOSS_TOTAL, &one, 1);
}

/* Leaves a loss out of the step's counts. While micro-batches accumulate, the gradient of this loss is then
   divided by the number of targets of the other losses. The loss must therefore have the same number of
   targets as the other losses in each run. */
static void tt__uncounted_loss(tt_tape *t, tt_value loss)
{
    for (int k = 0; k < t->n_code; k++)
        if (tt__is(&t->code[k], TT__LOSS) && t->code[k].out[0] == loss.id) t->code[k].attr.uncounted = true;
}

/* ------------------------------------------------------------------------------------------ cross_entropy */

tt_cross_entropy_options tt_cross_entropy_options_default(void)
{
    tt_cross_entropy_options o;
    memset(&o, 0, sizeof o);
    o.ignore_index = -100;
    return o;
}

static bool tt__shape_CROSS_ENTROPY(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *logits = tt__in(t, i, 0);
    const float smoothing = i->attr.smoothing;
    if (!tt__float_in(t, i, 0) || !tt__index_in(t, i, 1)) return false;
    if (!tt__same_rows(logits, tt__in(t, i, 1))) return tt__bad(t, i, 1, "as many rows as the logits");
    const tt__shape one_row = {TT_F32, 1, logits->cols, 0, 0};
    const bool by_class = i->attr.by_class;
    if (!tt__weights_in(t, i, 2, by_class ? &one_row : logits, by_class ? logits->cols : 1)) return false;
    if (!(smoothing >= 0 && smoothing < 1))
        return tt__tape_fail(t, TT_ERR_ARGUMENT,
                             "cross_entropy: label_smoothing is %g, but must be in [0, 1)", smoothing);
    tt__set_loss(out);
    tt__set_shape(&out[1], TT_F32, logits, 1);
    return true;
}

/* The layout rule of losses. If rows are sharded, the loss and its counts are partial; the mean loss is
   computed later, from the sums of all ranks' counts. */
static bool tt__layout_CROSS_ENTROPY(const tt_tape *t, const tt__instr *i, const tt__split *in,
                                     tt__split *out)
{
    (void)t;
    out[0] = out[TT__LOSS_COUNTS] = in[0] == TT__ROWS ? TT__PARTIAL : TT__WHOLE;
    out[1] = in[0];
    if (i->attr.by_total && in[0] != TT__WHOLE) return false;
    return in[0] <= TT__ROWS && tt__laid_out(i, in, TT__LOSS_TARGETS, in[0]) &&
           tt__laid_out(i, in, TT__LOSS_WEIGHTS, i->attr.by_class ? TT__WHOLE : in[0]);
}

tt_value tt_cross_entropy(tt_tape *t, tt_value logits, tt_value targets,
                          const tt_cross_entropy_options *options)
{
    tt_cross_entropy_options o = options ? *options : tt_cross_entropy_options_default();
    tt__instr i = tt__new_instr(TT__OP_CROSS_ENTROPY);
    i.attr.ignore_index = o.ignore_index;
    i.attr.smoothing = o.label_smoothing;
    i.attr.by_class = o.class_weights.id != 0;
    if (o.weights.id && i.attr.by_class)
        tt__tape_fail(t, TT_ERR_ARGUMENT, "cross_entropy: weights of rows and weights of classes are both "
                      "given: give one of them");
    return tt__record(t, i, "vvV", logits, targets, i.attr.by_class ? o.class_weights : o.weights);
}

/* The linear layer and its backward that a fused loss replaces. */
typedef struct tt__loss_head {
    /* Numbers of instructions. linear: the instruction that makes the logits; back: the instruction that
       makes the gradient of the logits, -1: no such instruction; last: the last instruction that is
       replaced. */
    int linear, back, last;
    /* Number of a FILL that is not replaced, although it is among the replaced instructions. The FILL fills
       a gradient to which a product then adds a rank's rows. 0: no such instruction. */
    int fill;
    tt__instr fused;
} tt__loss_head;

/* Finds the instructions after instruction k, a loss, that compute the backward of the loss, which has the op
   `op`, and of the linear layer, and sets the fields of *h for the backward. Returns false if these
   instructions cannot be fused. */
static bool tt__fuse_head_backward(const tt_tape *t, int32_t logits, int op, tt__loss_head *h)
{
    h->back = t->values[logits].reader;
    const tt__instr *back = &t->code[h->back];
    if (back->op != op || back->in[1] != logits) return false;
    int32_t d = t->code[h->back].out[0];
    h->fused.backward = true;
    for (h->last = h->back; h->last + 1 < t->n_code; h->last++) {
        const tt__instr *i = &t->code[h->last + 1];
        const bool fill = i->op == TT__OP_FILL && !h->fill && h->last + 2 < t->n_code;
        if (fill && i[1].in[0] == d && i[1].out[0] && tt__is_own_rows(t, i[1].out[0])) {
            h->fill = h->last + 1;
            continue;
        }
        bool dw = i->op == TT__OP_LINEAR_DW, dx = i->op == TT__OP_LINEAR_DX;
        if ((!dw && !dx) || i->in[0] != d) break;
        for (int o = 0; o < 1 + dw; o++) {
            int to = dx ? 1 : 3 + o;
            const bool halves = dw && i->out[o] && t->values[i->out[o]].shape.dtype != TT_F32;
            if (halves && t->host) return false;
            h->fused.out[to] = i->out[o];
            h->fused.add |= (i->add >> o & 1) << to;
            h->fused.add_later |= (i->add_later >> o & 1) << to;
        }
    }
    const int products = h->last - h->back - (h->fill != 0);
    return !t->code[h->back].add && t->values[d].base == d && tt__uses(t, d) == products;
}

/* The min bytes of logits for which linear + cross_entropy are fused. Logits of fewer bytes are stored
   whole. */
#ifndef TT__LOSS_WHOLE /* tests set a smaller number */
#define TT__LOSS_WHOLE ((int64_t)16 << 20)
#endif

/* Finds the linear layer of a loss, instruction k, whose many logits need not exist as a whole, and sets the
   fields of *h for it. Returns false if there is none. */
static bool tt__find_loss_head(const tt_tape *t, int k, int32_t root, tt__loss_head *h)
{
    const int32_t logits = t->code[k].in[0];
    const tt__tape_value *v = &t->values[logits];
    const tt__loss_head found = {tt__producer(t, logits), -1, k, 0, t->code[k]};
    *h = found;
    if (h->linear < 0 || v->base != logits || v->keep || logits == root) return false;
    if (v->shape.rows <= TT__LOSS_CHUNK) return false;
    const tt__instr *linear = &t->code[h->linear];
    if (linear->op != TT__OP_LINEAR || linear->out[0] != logits || linear->attr.act || linear->in[3])
        return false;
    h->fused.in[0] = linear->in[0];
    h->fused.in[3] = linear->in[1];
    h->fused.in[4] = linear->in[2];
    h->fused.out[1] = 0;
    return v->shape.rows * v->shape.cols * (int64_t)sizeof(float) >= TT__LOSS_WHOLE;
}

/* Fuses linear + cross_entropy of many logits, and their backward, into one instruction. The instruction
   computes loss and gradients one chunk of rows after another, so that only a chunk's logits exist at a time,
   as in Liger Kernel (Hsu et al., arXiv 2410.10989). The fused instruction takes the place of the last
   instruction that it replaces, so nothing may read the loss before that place. A sum of several losses is
   therefore not fused. On a CPU, 16-bit gradients of parameters are not fused, because each chunk would round
   them once more. On CUDA the workspace holds sums of these gradients in f32. */
static void tt__fuse_CROSS_ENTROPY(tt_tape *t, int k, int32_t root)
{
    const int32_t logits = t->code[k].in[0], loss = t->code[k].out[0];
    const tt__attr *a = &t->code[k].attr;
    tt__loss_head h;
    if (a->by_class || a->by_total || !tt__find_loss_head(t, k, root, &h)) return;
    h.fused.op = TT__OP_LINEAR_CROSS_ENTROPY;
    const int uses = tt__uses(t, logits), op = TT__OP_CROSS_ENTROPY_BACKWARD;
    if (uses != 1 && (uses != 2 || !tt__fuse_head_backward(t, logits, op, &h))) return;
    for (int b = k + 1; b <= h.last && tt__uses(t, loss); b++)
        if (tt__reads(t, &t->code[b], loss)) return;
    if (h.back >= 0) h.fused.in[5] = t->code[h.back].in[0];
    for (int b = h.back; b >= 0 && b < h.last; b++) if (b != h.fill) tt__drop(t, b);
    if (h.last != k) tt__drop(t, k);
    tt__drop(t, h.linear);
    tt__put(t, h.last, &h.fused);
}

static tt_status tt__check_CROSS_ENTROPY(const tt__launch *l)
{
    const int op = l->instr->op;
    const bool linear = op == TT__OP_LINEAR_CROSS_ENTROPY || op == TT__OP_LINEAR_TOKEN_LOSSES;
    const int64_t classes = linear ? l->in[3].rows : l->in[0].cols;
    const int32_t *ignored = &l->instr->attr.ignore_index;
    return tt__check_indices(l, TT__LOSS_TARGETS, classes, ignored, "classes of the logits");
}

static const tt__rules tt__rules_CROSS_ENTROPY = {tt__shape_CROSS_ENTROPY, tt__layout_CROSS_ENTROPY,
    {NULL, "g012BC", "0", TT__OP_CROSS_ENTROPY_BACKWARD}, tt__row_pairs_bytes, NULL, tt__check_CROSS_ENTROPY,
    NULL, tt__fuse_CROSS_ENTROPY};

/* The shape rule of a loss's backward: operand 0 is the gradient of the loss; the result has the shape of
   operand 1. */
static bool tt__shape_of_error(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = *tt__in(t, i, 1);
    return tt__fixed_in(t, i, 0, 1, 1) && tt__float_in(t, i, 1);
}

/* The layout rule of a loss's backward. The counts are operand 5. If rows are sharded, the kernel does not
   read the counts, so the counts may be partial. */
static bool tt__layout_CROSS_ENTROPY_BACKWARD(const tt_tape *t, const tt__instr *i, const tt__split *in,
                                              tt__split *out)
{
    bool fits = in[1] <= TT__ROWS && tt__laid_out(i, in, 0, TT__WHOLE);
    for (int k = 2; k < 5; k++)
        fits = fits && tt__laid_out(i, in, k, k == 3 && i->attr.by_class ? TT__WHOLE : in[1]);
    out[0] = in[1];
    return fits && (in[1] == TT__WHOLE ? in[5] == TT__WHOLE : t->accumulate);
}

static const tt__rules tt__rules_CROSS_ENTROPY_BACKWARD = {tt__shape_of_error,
    tt__layout_CROSS_ENTROPY_BACKWARD};

static bool tt__shape_LINEAR_CROSS_ENTROPY(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *x = tt__in(t, i, 0), *w = tt__in(t, i, 3);
    if (!tt__float_in(t, i, 0) || !tt__index_in(t, i, 1) || !tt__weights_in(t, i, 2, x, 1)) return false;
    tt__set_loss(out);
    out[1] = *x;
    tt__set_fixed(&out[3], TT_F32, w->rows, w->cols);
    tt__set_fixed(&out[4], TT_F32, 1, w->rows);
    return tt__fixed_in(t, i, 3, w->rows, x->cols) && tt__fixed_in(t, i, 4, 1, w->rows) &&
           tt__fixed_in(t, i, 5, 1, 1);
}

static bool tt__layout_LINEAR_CROSS_ENTROPY(const tt_tape *t, const tt__instr *i, const tt__split *in,
                                            tt__split *out)
{
    /* Without `accumulate`, the backward divides by the sum of the weights of all ranks' rows, which a rank
       that has only some rows does not know. */
    const bool backward = i->out[1] || i->out[3] || i->out[4];
    bool fits = in[0] <= TT__ROWS && (in[0] == TT__WHOLE || t->accumulate || !backward);
    for (int k = 1; k < 6; k++) fits = fits && tt__laid_out(i, in, k, k < 3 ? in[0] : TT__WHOLE);
    for (int k = 0; k < TT__MAX_OUT; k++) out[k] = in[0] == TT__ROWS ? TT__PARTIAL : TT__WHOLE;
    out[1] = in[0];
    return fits;
}

static double tt__flops_LINEAR_CROSS_ENTROPY(const tt__instr *i, const tt__mat *in)
{
    int products = 1 + (i->out[1] != 0) + (i->out[3] != 0);
    return 2.0 * (double)in[0].rows * (double)in[3].rows * (double)in[3].cols * products;
}

static size_t tt__cpu_LINEAR_CROSS_ENTROPY(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__shape *x = tt__in(t, i, 0);
    int64_t chunk = tt__min(x->rows, TT__LOSS_CHUNK), classes = tt__in(t, i, 3)->rows;
    size_t widen = tt__buffer_bytes(threads, classes), max = 0;
    size_t parts[] = {tt__gemm_workspace(chunk, classes, x->cols),
                      tt__gemm_workspace(chunk, x->cols, classes),
                      tt__gemm_workspace(classes, x->cols, chunk),
                      tt__partial_bytes(chunk, classes) + widen, tt__align_up((size_t)chunk * 8) + widen};
    for (int k = 0; k < TT__COUNT(parts); k++) max = parts[k] > max ? parts[k] : max;
    return tt__loss_bytes(x->rows, classes) + max;
}

/* Returns the bytes of scratch for copies of operands in the three products of a chunk, see
   tt__cuda_padded_bytes. */
static size_t tt__cuda_loss_products(const tt_tape *t, const tt__instr *i)
{
    const tt__mat x = tt__at_capacity(t, i->in[0]), w = tt__at_capacity(t, i->in[3]);
    const tt__mat z = {NULL, TT_F32, x.rows, (w.rows + 7) / 8 * 8, (w.rows + 7) / 8 * 8};
    const int64_t of_y = tt__cuda_padded_bytes(&x, &w, &z, &z), of_x = tt__cuda_padded_bytes(&x, &w, &z, &x);
    const int64_t of_w = tt__cuda_padded_bytes(&x, &w, &z, &w);
    return (size_t)tt__max(of_y, tt__max(of_x, of_w));
}

/* Returns the bytes of scratch on CUDA. The scratch begins with each row's loss and whether the row's
   prediction is right. If the number of classes is not a multiple of 8, there follow, for the classes after
   the last multiple of 64, copies of the weight's rows and of the bias's elements, and f32 sums of their
   gradients, all padded to a multiple of 8 classes. If weight and bias have 16-bit gradients and there are
   several chunks, there follow f32 sums of these gradients. Then come a chunk's logits, in rows of a multiple
   of 8, and at the end the scratch of the products. */
static size_t tt__cuda_LINEAR_CROSS_ENTROPY(const tt_tape *t, const tt__instr *i)
{
    const tt__shape *w = tt__in(t, i, 3);
    const size_t rows = (size_t)tt__in(t, i, 0)->rows, classes = tt__align_to((size_t)w->rows, 8);
    const size_t chunk = rows < TT__CUDA_LOSS_CHUNK ? rows : TT__CUDA_LOSS_CHUNK;
    size_t sums = 0, tail = 0;
    for (int k = 3; k < 5 && rows > chunk; k++)
        if (i->out[k] && t->values[i->out[k]].shape.dtype != TT_F32)
            sums += tt__align_to((size_t)(w->rows * (k == 3 ? w->cols : 1)) * 4, TT__CUDA_ALIGN);
    if (w->rows % 8) {
        const size_t more = tt__align_to((size_t)(w->rows % 64), 8);
        const size_t gradient = i->out[3] || i->out[4] ? 4 : 0;
        tail = tt__align_to(more * (size_t)w->cols * tt_dtype_bytes(w->dtype), TT__CUDA_ALIGN) +
               tt__align_to(more * (size_t)w->cols * gradient, TT__CUDA_ALIGN);
        if (i->in[4])
            tail += tt__align_to(more * tt_dtype_bytes(tt__in(t, i, 4)->dtype), TT__CUDA_ALIGN) +
                    tt__align_to(more * gradient, TT__CUDA_ALIGN);
    }
    return tt__align_to(rows * 8, TT__CUDA_ALIGN) + tail + sums +
           tt__align_to(chunk * classes * 4, TT__CUDA_ALIGN) + tt__cuda_loss_products(t, i);
}

static const tt__rules tt__rules_LINEAR_CROSS_ENTROPY = {tt__shape_LINEAR_CROSS_ENTROPY,
    tt__layout_LINEAR_CROSS_ENTROPY, {NULL}, tt__cpu_LINEAR_CROSS_ENTROPY, tt__cuda_LINEAR_CROSS_ENTROPY,
    tt__check_CROSS_ENTROPY, NULL, NULL, tt__flops_LINEAR_CROSS_ENTROPY};

/* ------------------------------------------------------------------------------------------- token_losses */

static bool tt__shape_TOKEN_LOSSES(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *logits = tt__in(t, i, 0);
    if (!tt__float_in(t, i, 0) || !tt__index_in(t, i, 1)) return false;
    if (!tt__same_rows(logits, tt__in(t, i, 1))) return tt__bad(t, i, 1, "as many rows as the logits");
    tt__set_shape(&out[0], TT_F32, logits, 1);
    tt__set_shape(&out[1], TT_F32, logits, 1);
    return true;
}

tt_value tt_token_losses(tt_tape *t, tt_value logits, tt_value targets)
{
    tt__instr i = tt__new_instr(TT__OP_TOKEN_LOSSES);
    i.attr.ignore_index = -100;
    const tt_value losses = tt__record(t, i, "vv", logits, targets);
    if (!losses.id) return losses;
    tt__tape_value *x = &t->values[t->values[logits.id].base];
    t->values[losses.id].pinned_f32 = true;
    if (x->storage == TT__TRANSIENT) x->pinned_f32 = true;
    return losses;
}

/* Fuses linear + token_losses of many logits, and fuses their backward. The backward computes the logits of a
   chunk of rows again, because the gradients of the rows are known only after all rows' losses. */
static void tt__fuse_TOKEN_LOSSES(tt_tape *t, int k, int32_t root)
{
    const int32_t logits = t->code[k].in[0];
    tt__loss_head h;
    if (!tt__find_loss_head(t, k, root, &h)) return;
    h.fused.op = TT__OP_LINEAR_TOKEN_LOSSES;
    h.fused.in[2] = 0;
    const tt__instr forward = h.fused;
    const int uses = tt__uses(t, logits), op = TT__OP_TOKEN_LOSSES_BACKWARD;
    if (uses != 1 && (uses != 2 || !tt__fuse_head_backward(t, logits, op, &h))) return;
    if (h.back >= 0) {
        h.fused.in[2] = t->code[h.back].in[3];
        h.fused.out[0] = 0;
        for (int b = h.back; b < h.last; b++) if (b != h.fill) tt__drop(t, b);
        tt__put(t, h.last, &h.fused);
    }
    tt__drop(t, h.linear);
    tt__put(t, k, &forward);
}

static const tt__rules tt__rules_TOKEN_LOSSES = {tt__shape_TOKEN_LOSSES, tt__layout_of_whole_rows,
    {NULL, "-01gB", "0", TT__OP_TOKEN_LOSSES_BACKWARD}, tt__row_pairs_bytes, NULL, tt__check_CROSS_ENTROPY,
    NULL, tt__fuse_TOKEN_LOSSES};

static bool tt__shape_TOKEN_LOSSES_BACKWARD(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = *tt__in(t, i, 1);
    return tt__float_in(t, i, 1) && tt__shape_in(t, i, 3, &out[0], 1);
}

static bool tt__layout_TOKEN_LOSSES_BACKWARD(const tt_tape *t, const tt__instr *i, const tt__split *in,
                                             tt__split *out)
{
    (void)t;
    out[0] = in[1];
    return in[1] <= TT__ROWS && tt__laid_out(i, in, 2, in[1]) && tt__laid_out(i, in, 3, in[1]) &&
           tt__laid_out(i, in, 4, in[1]);
}

static const tt__rules tt__rules_TOKEN_LOSSES_BACKWARD = {tt__shape_TOKEN_LOSSES_BACKWARD,
    tt__layout_TOKEN_LOSSES_BACKWARD};

static bool tt__shape_LINEAR_TOKEN_LOSSES(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *x = tt__in(t, i, 0), *w = tt__in(t, i, 3);
    if (!tt__float_in(t, i, 0) || !tt__index_in(t, i, 1)) return false;
    if (i->in[2] && !tt__shape_in(t, i, 2, x, 1)) return false;
    tt__set_shape(&out[0], TT_F32, x, 1);
    out[1] = *x;
    tt__set_fixed(&out[3], TT_F32, w->rows, w->cols);
    tt__set_fixed(&out[4], TT_F32, 1, w->rows);
    return tt__fixed_in(t, i, 3, w->rows, x->cols) && tt__fixed_in(t, i, 4, 1, w->rows);
}

static bool tt__layout_LINEAR_TOKEN_LOSSES(const tt_tape *t, const tt__instr *i, const tt__split *in,
                                           tt__split *out)
{
    bool fits = in[0] <= TT__ROWS;
    (void)t;
    for (int k = 1; k < 5; k++) fits = fits && tt__laid_out(i, in, k, k < 3 ? in[0] : TT__WHOLE);
    out[0] = out[1] = in[0];
    out[3] = out[4] = in[0] == TT__ROWS ? TT__PARTIAL : TT__WHOLE;
    return fits;
}

static const tt__rules tt__rules_LINEAR_TOKEN_LOSSES = {tt__shape_LINEAR_TOKEN_LOSSES,
    tt__layout_LINEAR_TOKEN_LOSSES, {NULL}, tt__cpu_LINEAR_CROSS_ENTROPY, tt__cuda_LINEAR_CROSS_ENTROPY,
    tt__check_CROSS_ENTROPY, NULL, NULL, tt__flops_LINEAR_CROSS_ENTROPY};

/* ------------------------------------------------------------------------------------- soft_cross_entropy */

static bool tt__shape_SOFT_CROSS_ENTROPY(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    bool fits = tt__shape_of_two(t, i, out) && tt__weights_in(t, i, 2, tt__in(t, i, 0), 1);
    tt__set_loss(out);
    tt__set_shape(&out[1], TT_F32, tt__in(t, i, 0), 2);
    return fits;
}

tt_value tt_soft_cross_entropy(tt_tape *t, tt_value logits, tt_value targets, tt_value weights)
{
    return tt__record(t, tt__new_instr(TT__OP_SOFT_CROSS_ENTROPY), "vvV", logits, targets, weights);
}

static const tt__rules tt__rules_SOFT_CROSS_ENTROPY = {tt__shape_SOFT_CROSS_ENTROPY, NULL,
    {NULL, "g012BC", "0", TT__OP_SOFT_CROSS_ENTROPY_BACKWARD}, tt__row_pairs_bytes};
static const tt__rules tt__rules_SOFT_CROSS_ENTROPY_BACKWARD = {tt__shape_of_error, NULL};

/* ------------------------------------------------------------------------------------- mean_squared_error */

static bool tt__shape_MEAN_SQUARED_ERROR(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    bool fits = tt__shape_of_two(t, i, out) && tt__weights_in(t, i, 2, tt__in(t, i, 0), 1);
    tt__set_loss(out);
    return fits;
}

tt_value tt_mean_squared_error(tt_tape *t, tt_value x, tt_value target, tt_value weights)
{
    return tt__record(t, tt__new_instr(TT__OP_MEAN_SQUARED_ERROR), "vvV", x, target, weights);
}

static void tt__backward_MEAN_SQUARED_ERROR(tt__builder *b, const tt__instr *f, int32_t g)
{
    const int op = TT__OP_MEAN_SQUARED_ERROR_BACKWARD;
    if (tt__wants(b->t, f->in[0])) tt__emit_gradient(b, f, g, op, "g012C", "0");
    /* The gradient of the target is that of x with x and target swapped. */
    if (tt__wants(b->t, f->in[1])) tt__emit_gradient(b, f, g, op, "g102C", "1");
}

static const tt__rules tt__rules_MEAN_SQUARED_ERROR = {tt__shape_MEAN_SQUARED_ERROR, NULL,
    {tt__backward_MEAN_SQUARED_ERROR}, tt__row_pairs_bytes};
static const tt__rules tt__rules_MEAN_SQUARED_ERROR_BACKWARD = {tt__shape_of_error, NULL};

/* ---------------------------------------------------------------------------------- sigmoid_cross_entropy */

tt_sigmoid_cross_entropy_options tt_sigmoid_cross_entropy_options_default(void)
{
    tt_sigmoid_cross_entropy_options o;
    memset(&o, 0, sizeof o);
    return o;
}

static bool tt__shape_SIGMOID_CROSS_ENTROPY(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *logits = tt__in(t, i, 0), one_row = {TT_F32, 1, logits->cols, 0, 0};
    bool fits = tt__shape_of_two(t, i, out) && tt__weights_in(t, i, 2, logits, 1) &&
                tt__weights_in(t, i, 3, &one_row, logits->cols);
    tt__set_loss(out);
    return fits;
}

tt_value tt_sigmoid_cross_entropy(tt_tape *t, tt_value logits, tt_value targets,
                                  const tt_sigmoid_cross_entropy_options *options)
{
    const tt_sigmoid_cross_entropy_options o = options ? *options
                                                       : tt_sigmoid_cross_entropy_options_default();
    return tt__record(t, tt__new_instr(TT__OP_SIGMOID_CROSS_ENTROPY), "vvVV", logits, targets, o.weights,
                      o.positive_weights);
}

static const tt__rules tt__rules_SIGMOID_CROSS_ENTROPY = {tt__shape_SIGMOID_CROSS_ENTROPY, NULL,
    {NULL, "g0123C", "0", TT__OP_SIGMOID_CROSS_ENTROPY_BACKWARD}, tt__row_pairs_bytes};
static const tt__rules tt__rules_SIGMOID_CROSS_ENTROPY_BACKWARD = {tt__shape_of_error, NULL};
