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

/* ------------------------------------------------------------------------------------------------- linear */

static bool tt__reads_fp8(const tt_tape *t, const tt__instr *i) { return tt__is_fp8(tt__in(t, i, 0)->dtype); }

/* Returns whether product i can have fp8 operands: whether its op has operands for 1/scale. */
static bool tt__takes_fp8(const tt__instr *i)
{
    return tt__is(i, TT__PRODUCT) && tt__ops[i->op].inputs > TT__UNSCALE_IN;
}

/* Fails unless operand k of a product has floats, or fp8 that QUANTIZE made from floats of the same shape. */
static bool tt__factor_in(tt_tape *t, const tt__instr *i, int k)
{
    if (!tt__reads_fp8(t, i)) return tt__float_in(t, i, k);
    if (!i->in[TT__UNSCALE_IN + k]) return tt__bad(t, i, k, "scaled");
    if (!tt__is_fp8(tt__in(t, i, k)->dtype)) return tt__bad(t, i, k, "fp8");
    return tt__fixed_in(t, i, TT__UNSCALE_IN + k, 1, 1);
}

/* Returns whether operand o of a product is a gradient, which in fp8 is E5M2. */
static bool tt__is_gradient_operand(const tt__instr *i, int o) { return o == 0 && i->op != TT__OP_LINEAR; }

/* Returns whether a product sums over the rows of operand o, which in fp8 must then be transposed. */
static bool tt__sums_rows_of(const tt__instr *i, int o)
{
    return i->op == TT__OP_LINEAR_DW || (i->op == TT__OP_LINEAR_DX && o == 1);
}

/* Returns k if result k of a product is the column sums of operand 0; 0 if the product has no such result. */
static int tt__operand_sums(const tt__instr *i) { return i->op == TT__OP_LINEAR_DW && i->out[1] ? 1 : 0; }

/* Returns the dtype of a product's result: the dtype of operand 0, or f32 if operand 0 is fp8. */
static tt_dtype tt__product_dtype(const tt_tape *t, const tt__instr *i)
{
    return tt__reads_fp8(t, i) ? TT_F32 : tt__in(t, i, 0)->dtype;
}

static bool tt__shape_LINEAR(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *x = tt__in(t, i, 0), *w = tt__in(t, i, 1);
    if (!tt__factor_in(t, i, 0) || !(tt__is_coded(w->dtype) || tt__factor_in(t, i, 1))) return false;
    if (w->axis || w->cols != x->cols)
        return tt__bad(t, i, 1, "(out, %lld): the width of x is %lld", (long long)x->cols,
                       (long long)x->cols);
    tt__set_shape(&out[0], tt__product_dtype(t, i), x, w->rows);
    if (i->attr.act) out[1] = out[0];
    return tt__fixed_in(t, i, 2, 1, w->rows) && (!i->in[3] || tt__shape_in(t, i, 3, x, w->rows));
}

/* The layout rule of LINEAR. If the rows of w are sharded, y is sharded by columns. If the columns of w and x
   are sharded, y is partial, and only one rank adds the bias. */
static bool tt__layout_LINEAR(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    const bool by_rows = in[1] == TT__ROWS, by_cols = in[1] == TT__COLS;
    const tt__split y = by_rows ? TT__COLS : by_cols ? TT__PARTIAL : in[0];
    const bool bias_once = !i->in[2] || (i->once >> 2 & 1) == by_cols;
    const bool x = by_rows ? in[0] == TT__WHOLE : by_cols ? in[0] == TT__COLS : in[0] <= TT__ROWS;
    (void)t;
    out[0] = out[1] = y;
    return x && bias_once && tt__laid_out(i, in, 2, by_rows ? TT__COLS : TT__WHOLE) &&
           tt__laid_out(i, in, 3, y) && !(by_cols && (i->in[3] || i->attr.act));
}

tt_value tt_linear(tt_tape *t, tt_value x, tt_param *w, tt_param *b)
{
    if (w && w->low_a) x = tt_linear(t, x, w->low_a, NULL), w = w->low_b;
    return tt__record(t, tt__new_instr(TT__OP_LINEAR), "vpP", x, w, b);
}

/* Returns whether the backward computes the slope of an activation from the result. */
static bool tt__act_by_result(int act)
{
#define TT__BY_RESULT(ACT, function, by_result) by_result,
    static const bool all[] = {false, TT__ACTS(TT__BY_RESULT)};
#undef TT__BY_RESULT
    return all[act];
}

static void tt__backward_LINEAR(tt__builder *b, const tt__instr *f, int32_t g)
{
    tt_tape *t = b->t;
    bool weights = tt__wants(t, f->in[1]) || tt__wants(t, f->in[2]), x = tt__wants(t, f->in[0]);
    int32_t dy = g;
    tt__instr product = *f;
    memset(&product.attr, 0, sizeof product.attr);
    if (f->attr.act && (weights || x)) { /* the gradient goes first through the backward of the activation */
        const char *reads = tt__act_by_result(f->attr.act) ? "gA" : "gB";
        tt__emit_gradient(b, f, g, TT__OP_ACTIVATION_BACKWARD, reads, "");
        const tt__tape_value *y = &t->values[f->out[0]];
        dy = b->ok ? tt__new_value(t, &y->shape, TT__TRANSIENT, "d(%.56s.pre)", y->name) : 0;
        if (!(b->ok = dy != 0)) return;
        t->values[dy].part = t->values[f->out[0]].part;
        t->code[t->n_code - 1].out[0] = dy;
    }
    if (weights) tt__emit_gradient(b, &product, dy, TT__OP_LINEAR_DW, "g0", "12");
    if (x) tt__emit_gradient(b, &product, dy, TT__OP_LINEAR_DX, "g1", "0");
    tt__grad_pass(b, g, f->in[3], true);
}

static tt__mat tt__at_capacity(const tt_tape *t, int32_t id);

/* Returns the bytes of scratch of a product on CUDA. x, w and y: ids of the values of y = x w^T or of their
   gradients. fp8 operands need no scratch, because they are padded when they are rounded. */
static size_t tt__cuda_product(const tt_tape *t, const tt__instr *i, int32_t x, int32_t w, int32_t y)
{
    const tt__mat of_x = tt__at_capacity(t, x), of_y = tt__at_capacity(t, y);
    tt__mat of_w = tt__at_capacity(t, w);
    const tt__mat *result = i->out[0] == x ? &of_x : i->out[0] == w ? &of_w : &of_y;
    size_t widened = 0;
    if (tt__reads_fp8(t, i) || !i->out[0]) return 0;
    if (tt__is_coded(of_w.dtype)) { /* the matrix in operand 0's dtype */
        of_w.dtype = tt__in(t, i, 0)->dtype;
        widened = tt__align_to(tt__matrix_bytes(of_w.dtype, of_w.rows, of_w.cols), TT__CUDA_ALIGN);
    }
    return widened + (size_t)tt__cuda_padded_bytes(&of_x, &of_w, &of_y, result);
}
static size_t tt__cuda_LINEAR(const tt_tape *t, const tt__instr *i)
{
    return tt__cuda_product(t, i, i->in[0], i->in[1], i->out[0]);
}
static size_t tt__cuda_LINEAR_DX(const tt_tape *t, const tt__instr *i)
{
    return tt__cuda_product(t, i, i->out[0], i->in[1], i->in[0]);
}
static size_t tt__cuda_LINEAR_DW(const tt_tape *t, const tt__instr *i)
{
    return tt__cuda_product(t, i, i->in[1], i->out[0], i->in[0]);
}

static const tt__rules tt__rules_LINEAR = {tt__shape_LINEAR, tt__layout_LINEAR, {tt__backward_LINEAR},
    tt__product_bytes, tt__cuda_LINEAR};

static bool tt__shape_LINEAR_DX(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *dy = tt__in(t, i, 0), *w = tt__in(t, i, 1);
    if (!tt__factor_in(t, i, 0) || w->axis || w->rows != dy->cols)
        return tt__bad(t, i, 1, "a weight whose rows are the columns of dy");
    tt__set_shape(&out[0], tt__product_dtype(t, i), dy, w->cols);
    return !i->in[2] || tt__shape_in(t, i, 2, dy, w->cols);
}

static bool tt__layout_LINEAR_DX(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    const bool by_rows = in[1] == TT__ROWS, by_cols = in[1] == TT__COLS;
    (void)t;
    out[0] = by_rows ? TT__PARTIAL : by_cols ? TT__COLS : in[0];
    return (by_rows ? in[0] == TT__COLS && !i->in[2] : by_cols ? in[0] == TT__WHOLE : in[0] <= TT__ROWS) &&
           tt__laid_out(i, in, 2, out[0]);
}

static const tt__rules tt__rules_LINEAR_DX = {tt__shape_LINEAR_DX, tt__layout_LINEAR_DX, {NULL},
    tt__product_bytes, tt__cuda_LINEAR_DX};

static bool tt__shape_LINEAR_DW(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *dy = tt__in(t, i, 0), *x = tt__in(t, i, 1);
    tt__set_fixed(&out[0], TT_F32, dy->cols, x->cols);
    tt__set_fixed(&out[1], TT_F32, 1, dy->cols);
    if (!tt__reads_fp8(t, i)) return tt__float_in(t, i, 0) && tt__shape_in(t, i, 1, dy, x->cols);
    if (!tt__factor_in(t, i, 0) || !tt__factor_in(t, i, 1)) return false;
    return tt__same_rows(x, dy) || tt__bad(t, i, 1, "as many rows as dy");
}

static bool tt__layout_LINEAR_DW(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    const bool rows = in[0] == TT__ROWS;
    (void)t; (void)i;
    out[0] = rows ? TT__PARTIAL : in[0] == TT__COLS ? TT__ROWS : in[1];
    out[1] = rows ? TT__PARTIAL : in[0];
    return rows ? in[1] == TT__ROWS : (in[0] == TT__WHOLE && in[1] == TT__COLS) ||
           (in[0] == TT__COLS && in[1] == TT__WHOLE) || (in[0] == TT__WHOLE && in[1] == TT__WHOLE);
}

static size_t tt__cpu_LINEAR_DW(int threads, const tt_tape *t, const tt__instr *i)
{
    const tt__shape *dy = tt__in(t, i, 0);
    size_t gemm = tt__product_bytes(threads, t, i), sums = tt__sum_rows_bytes(threads, dy->rows, dy->cols);
    return gemm > sums ? gemm : sums;
}

enum { TT__NEAR = 64 }; /* max number of instructions searched backwards for the writer of an operand */

/* Moves result o of instruction k, the column sums of in[0], to a new instruction before k. */
static void tt__sum_columns_apart(tt_tape *t, int k, int o)
{
    tt__instr i = t->code[k], sums = tt__instr_like(&i, TT__OP_SUM_ROWS, i.in[0], i.out[o]);
    if (i.op == TT__OP_SUM_ROWS) return;
    sums.add = i.add >> o & 1;
    sums.add_later = i.add_later >> o & 1;
    if (!tt__insert(t, k, &sums)) return;
    i.out[o] = 0;
    i.add &= ~(1u << o);
    i.add_later &= ~(1u << o);
    if (i.out[0]) tt__put(t, k, &i);
    else tt__drop(t, k);
}

/* Returns a bit for each output of i that is a part of v: one output that is all of v, or several outputs
   that lie side by side and make up v. Returns 0 if no outputs make up v, if i cannot compute the outputs'
   column sums, or if i computes column sums of these outputs already. The backward of attention sums only
   columns that its kernels write in 16 bits. */
static unsigned tt__outputs_that_make(const tt_tape *t, const tt__instr *i, const tt__tape_value *v)
{
    const int summed = tt__summed(i), first = tt__ops[i->op].outputs - summed;
    unsigned parts = 0;
    int64_t columns = 0;
    if (i->op == TT__OP_ATTENTION_BACKWARD && v->shape.dtype == TT_F32) return 0;
    for (int j = 0; j < TT__MAX_OUT; j++) {
        const tt__tape_value *y = &t->values[i->out[j]];
        if (!i->out[j] || y->base != v->base) continue;
        const bool rows = tt__same_rows(&y->shape, &v->shape) && y->ld == v->ld &&
                          y->offset / y->ld == v->offset / v->ld;
        const bool beside = rows && (y->offset + y->shape.cols <= v->offset ||
                                     v->offset + v->shape.cols <= y->offset);
        if (beside) continue;
        if (!rows || j >= summed || y->offset != v->offset + columns) return 0;
        if (i->out[first + j] || (i->add_later >> j & 1)) return 0;
        columns += y->shape.cols;
        parts |= 1u << j;
    }
    return columns == v->shape.cols ? parts : 0;
}

/* Moves the last result of instruction k, the column sums of in[0], to the instruction that wrote in[0], if
   the op of that instruction can sum columns (TT__COLUMN_SUMS). If that instruction wrote in[0] as several
   results side by side, the sums are divided in the same way. A kernel that has a gradient in registers can
   sum it at once; another kernel would read the whole gradient a second time. Nothing is moved on CPUs, where
   kernels gain nothing by this, nor with tensor parallelism, where ranks add to gradients in between. */
static void tt__fuse_column_sums(tt_tape *t, int k, int32_t root)
{
    tt__instr i = t->code[k];
    const int o = tt__ops[i.op].outputs - 1;
    const tt__tape_value *v = &t->values[i.in[0]], *sums = &t->values[i.out[o]];
    const int64_t begin = v->offset;
    (void)root;
    if (!i.out[o] || t->host || t->tensor > 1) return;
    for (int m = k - 1; m >= 0 && m >= k - TT__NEAR; m--) {
        tt__instr from = t->code[m];
        if (from.op < 0) continue;
        if (tt__reads(t, &from, sums->base) || tt__writes(t, &from, sums->base)) return;
        if (!tt__writes(t, &from, v->base)) continue;
        const bool product = from.op == TT__OP_LINEAR_DX && !from.in[2]; /* cuBLASLt writes in[0], not a
                                                                            kernel that could sum columns */
        const unsigned parts = product ? 0 : tt__outputs_that_make(t, &from, v);
        if (!parts) return;
        if (from.segment != i.segment || from.slot != i.slot) return;
        if (from.stage != i.stage) { /* the sums stay in the stage that has the bias */
            tt__sum_columns_apart(t, k, o);
            return;
        }
        for (int j = 0, first = tt__ops[from.op].outputs - tt__summed(&from); j < tt__summed(&from); j++) {
            if (!(parts >> j & 1)) continue;
            const tt__tape_value y = t->values[from.out[j]], whole = t->values[i.out[o]];
            const tt__shape columns = {whole.shape.dtype, 1, y.shape.cols, 0, 0};
            const bool all = y.shape.cols == whole.shape.cols;
            from.out[first + j] = all ? i.out[o]
                : tt__new_view(t, i.out[o], &columns, y.offset - begin, whole.ld, whole.name);
            if (!from.out[first + j]) return;
            from.add |= (i.add >> o & 1) << (first + j);
            from.add_later |= (i.add_later >> o & 1) << (first + j);
        }
        i.out[o] = 0;
        i.add &= ~(1u << o);
        i.add_later &= ~(1u << o);
        if (i.out[0]) tt__put(t, k, &i);
        else tt__drop(t, k);
        tt__put(t, m, &from);
        return;
    }
}

static const tt__rules tt__rules_LINEAR_DW = {tt__shape_LINEAR_DW, tt__layout_LINEAR_DW, {NULL},
    tt__cpu_LINEAR_DW, tt__cuda_LINEAR_DW, NULL, NULL, tt__fuse_column_sums};

/* ------------------------------------------------------------------------------------------------- matmul */

tt_matmul_options tt_matmul_options_default(void)
{
    const tt_matmul_options o = {false, 1, -1e30f};
    return o;
}

static bool tt__shape_MATMUL(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *a = tt__in(t, i, 0), *b = tt__in(t, i, 1);
    const bool untransposed = i->attr.untransposed;
    if (!tt__float_in(t, i, 0) || !tt__float_in(t, i, 1)) return false;
    if (!untransposed && b->cols != a->cols)
        return tt__bad(t, i, 1, "(cols, %lld): the width of a is %lld", (long long)a->cols,
                       (long long)a->cols);
    if (untransposed && b->rows != a->cols)
        return tt__bad(t, i, 1, "(%lld, cols): the width of a is %lld", (long long)a->cols,
                       (long long)a->cols);
    tt__set_shape(&out[0], a->dtype, a, untransposed ? b->cols : b->rows);
    return true;
}

tt_value tt_matmul(tt_tape *t, tt_value a, tt_value b, const tt_matmul_options *options)
{
    const tt_matmul_options o = options ? *options : tt_matmul_options_default();
    tt__instr i = tt__new_instr(TT__OP_MATMUL);
    i.attr.untransposed = o.untransposed;
    i.attr.beyond = o.untransposed ? 0 : o.beyond;
    if (!(o.beyond >= -FLT_MAX && o.beyond <= FLT_MAX))
        tt__tape_fail(t, TT_ERR_ARGUMENT, "matmul: beyond is %g, but must be a finite number", o.beyond);
    if (o.scale != 1) a = tt_scale(t, a, o.scale);
    return tt__record(t, i, "vv", a, b);
}

static void tt__backward_MATMUL(tt__builder *b, const tt__instr *f, int32_t g)
{
    tt__instr back = *f;
    back.attr.untransposed = !f->attr.untransposed;
    back.attr.beyond = 0;
    if (tt__wants(b->t, f->in[0])) tt__emit_gradient(b, &back, g, TT__OP_MATMUL, "g1", "0");
    back.attr.untransposed = false;
    if (tt__wants(b->t, f->in[1]))
        tt__emit_gradient(b, &back, g, TT__OP_MATMUL_DB, f->attr.untransposed ? "0g" : "g0", "1");
}

static size_t tt__cuda_MATMUL(const tt_tape *t, const tt__instr *i)
{
    return i->attr.untransposed ? tt__cuda_product(t, i, i->out[0], i->in[1], i->in[0])
                                : tt__cuda_product(t, i, i->in[0], i->in[1], i->out[0]);
}

static const tt__rules tt__rules_MATMUL = {tt__shape_MATMUL, NULL, {tt__backward_MATMUL}, tt__product_bytes,
    tt__cuda_MATMUL};

/* The shape rule of MATMUL_DB. The result is the gradient of the forward's operand b. The number of rows is
   that of b, and equals the number of columns of operand 0. */
static bool tt__shape_MATMUL_DB(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *a = tt__in(t, i, 0), *b = tt__in(t, i, 1), *to = &t->values[i->out[0]].shape;
    tt__set_shape(&out[0], TT_F32, to, b->cols);
    return tt__float_in(t, i, 0) && tt__shape_in(t, i, 1, a, b->cols) &&
           (a->cols == to->rows || tt__bad(t, i, 0, "%lld columns", (long long)to->rows));
}

static const tt__rules tt__rules_MATMUL_DB = {tt__shape_MATMUL_DB, NULL, {NULL}, tt__product_bytes,
    tt__cuda_LINEAR_DW};

/* Several products of one x become one product, such as the products that make queries, keys and values, or
   the gradients of their weights. The other operands and results of the products must be side by side in
   memory. Weights and their gradients must be joined row below row; biases, results, and the gradients of
   both, column beside column. Each operand and result has a role: 0 to 2 are in[0] to in[2], 3 and 4 are
   out[0] and out[1]. */

enum { TT__ROLES = 5, TT__RESULT_ROLE = 3 };

/* Returns the role of x, which the products share. */
static int tt__shared_role(const tt__instr *i) { return i->op == TT__OP_LINEAR_DW ? 1 : 0; }

/* Returns whether operands with this role are joined row below row; otherwise column beside column. */
static bool tt__lies_below(const tt__instr *i, int role)
{
    return role == (i->op == TT__OP_LINEAR_DW ? TT__RESULT_ROLE : 1);
}

static int32_t tt__in_role(const tt__instr *i, int role)
{
    return role < TT__RESULT_ROLE ? i->in[role] : i->out[role - TT__RESULT_ROLE];
}

/* Returns whether products i and j have the same x, op and attributes, so that they can become one product if
   their other operands are side by side. */
static bool tt__is_one_product(const tt_tape *t, const tt__instr *i, const tt__instr *j)
{
    const bool joins = i->op == TT__OP_LINEAR || i->op == TT__OP_LINEAR_DW;
    const int x = tt__shared_role(i);
    if (!joins || i->op != j->op || i->in[x] != j->in[x] || i->in[3] || j->in[3]) return false;
    if (tt__is_coded(t->values[i->in[1]].shape.dtype)) return false;
    if (tt__reads_fp8(t, i) || i->attr.act || j->attr.act || i->attr.narrow != j->attr.narrow) return false;
    for (int role = 0; role < TT__ROLES; role++) {
        const int32_t a = tt__in_role(i, role), b = tt__in_role(j, role);
        if (!a != !b || t->values[a].shape.dtype != t->values[b].shape.dtype) return false;
    }
    return i->out[0] && i->add == j->add && i->add_later == j->add_later && i->segment == j->segment &&
           i->stage == j->stage && i->recomputed == j->recomputed && i->always == j->always &&
           i->later == j->later &&
           i->slot == j->slot && i->once == j->once;
}

static tt__mat *tt__mat_in_role(tt__launch *l, int role)
{
    return role < TT__RESULT_ROLE ? &l->in[role] : &l->out[role - TT__RESULT_ROLE];
}

/* Returns whether b begins in memory where a ends, below a or beside a, so that both are one matrix. Returns
   true, too, if both are absent. */
static bool tt__lies_after(const tt__mat *a, const tt__mat *b, bool below)
{
    const int64_t apart = (below ? a->rows * a->ld : a->cols) * (int64_t)tt_dtype_bytes(a->dtype);
    const bool alike = below ? a->cols == b->cols && a->ld == b->ld
                             : a->rows == b->rows && (a->ld == b->ld || a->rows == 1);
    if (!a->data || !b->data) return !a->data && !b->data;
    if (tt__is_coded(a->dtype)) return false;
    return alike && a->dtype == b->dtype && (char *)a->data + apart == (char *)b->data;
}

/* Joins products whose operands are side by side, among the n products in l, which run together. Does not
   join products that need scratch, because the scratch is sized for one product. Returns the number of
   launches left in l. */
static int tt__join_launches(tt__launch *l, int n)
{
    int last = 0;
    for (int k = 1; k < n; k++) {
        tt__launch *to = &l[last];
        const int x = tt__shared_role(to->instr);
        bool joins = to->in[x].data == l[k].in[x].data && !to->instr->workspace && !l[k].instr->workspace;
        for (int role = 0; role < TT__ROLES && joins; role++) {
            const bool below = tt__lies_below(to->instr, role);
            const tt__mat *a = tt__mat_in_role(to, role), *b = tt__mat_in_role(&l[k], role);
            joins = role == x || tt__lies_after(a, b, below);
        }
        if (!joins && ++last != k) l[last] = l[k];
        for (int role = 0; role < TT__ROLES && joins; role++) {
            tt__mat *whole = tt__mat_in_role(to, role);
            if (role == x) continue;
            if (tt__lies_below(to->instr, role)) whole->rows += tt__mat_in_role(&l[k], role)->rows;
            else whole->cols += tt__mat_in_role(&l[k], role)->cols;
        }
    }
    return last + 1;
}
