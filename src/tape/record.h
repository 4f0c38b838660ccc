#pragma once
#include "../base/base.h"
#include "tape.h"

/* ---------------------------------------------------------------------------------------------- recording */

/* Stores the error, unless the tape has an earlier error. Returns false. A function that returns the number
   of a value can return this result as 0, which means no value. */
TT_PRINTF(3, 4)
static bool tt__tape_fail(tt_tape *t, tt_status status, const char *format, ...)
{
    va_list args;
    if (t->status != TT_OK) return false;
    t->status = status;
    va_start(args, format);
    vsnprintf(t->error, sizeof t->error, format, args);
    va_end(args);
    tt__fail(t->ctx, status, "%s", t->error);
    return false;
}

tt_status tt_tape_status(const tt_tape *t) { return t->status; }

void tt_tape_free(tt_tape *t)
{
    if (!t) return;
    tt__free(t->ctx, t->values);
    tt__free(t->ctx, t->code);
    tt__free(t->ctx, t->axes);
    tt__free(t->ctx, t->lists);
    tt__free(t->ctx, t->params);
    tt__free(t->ctx, t);
}

static bool tt__out_of_memory(tt_tape *t)
{
    return tt__tape_fail(t, TT_ERR_MEMORY, "out of memory while recording a tape: free memory");
}

/* Makes a value with its own storage; returns 0 after tt__tape_fail. Arguments may point into the tape. */
TT_PRINTF(4, 5)
static int32_t tt__new_value(tt_tape *t, const tt__shape *shape, tt__storage storage, const char *format, ...)
{
    tt__tape_value v;
    va_list args;
    memset(&v, 0, sizeof v);
    v.shape = *shape;
    v.ld = shape->cols;
    v.storage = storage;
    v.base = t->n_values;
    v.param = -1;
    va_start(args, format);
    /* Most callers pass the format "%s". Copying the name is faster than vsnprintf, and tt_compile may
       compile thousands of programs to find one plan. */
    if (strcmp(format, "%s") == 0) {
        const char *name = va_arg(args, const char *);
        const size_t length = strlen(name);
        memcpy(v.name, name, length < sizeof v.name ? length : sizeof v.name - 1);
    } else {
        vsnprintf(v.name, sizeof v.name, format, args);
    }
    va_end(args);
    if (shape->rows > TT__MAX_ELEMENTS / shape->cols)
        return tt__tape_fail(t, TT_ERR_SHAPE, "'%s': %lld rows of width %lld are 2^47 elements or more, "
                             "which is too many: make it smaller", v.name, (long long)shape->rows,
                             (long long)shape->cols);
    if (!TT__GROW(t->ctx, t->values, t->n_values, t->cap_values)) return tt__out_of_memory(t);
    t->values[t->n_values] = v;
    return t->n_values++;
}

/* Makes a view of value `of` with the given shape. The view's first element is element `offset` of `of`, and
   the view's rows are `ld` elements apart. If `of` is contiguous, the view may have another number of
   columns. Returns 0 after tt__tape_fail. */
static int32_t tt__new_view(tt_tape *t, int32_t of, const tt__shape *shape, int64_t offset, int64_t ld,
                            const char *name)
{
    int32_t id = tt__new_value(t, shape, t->values[of].storage, "%s", name);
    if (!id) return 0;
    tt__tape_value *v = &t->values[id], *b = &t->values[of];
    v->base = b->base;
    v->offset = b->offset + offset;
    v->ld = ld;
    v->needs_grad = b->needs_grad; /* for views that autodiff makes; a pass has set needs_grad of all earlier
                                      values */
    v->persistent = b->persistent;
    v->space = b->space;
    v->part = b->part;
    v->param = b->param;
    return id;
}

/* Gives value number `id` the properties of value v that passes need: the shard, needs_grad and, if value
   `id` is f32, pinned_f32. Returns `id`; does nothing if `id` is 0. */
static int32_t tt__value_like(tt_tape *t, int32_t v, int32_t id)
{
    const tt__tape_value *like = &t->values[v];
    tt__tape_value *x = &t->values[id];
    if (!id) return 0;
    x->part = like->part;
    x->needs_grad = like->needs_grad;
    x->pinned_f32 = like->pinned_f32 && x->shape.dtype == TT_F32;
    return id;
}

/* Makes a view of value `of` from element `offset` on, with shape, row distance, name and shard of view v. */
static int32_t tt__view_like(tt_tape *t, int32_t v, int32_t of, int64_t offset)
{
    const tt__tape_value like = t->values[v];
    const int32_t id = tt__new_view(t, of, &like.shape, offset, like.ld, like.name);
    if (id) t->values[id].part = like.part;
    return id;
}

static tt__instr tt__new_instr(int op)
{
    tt__instr i;
    memset(&i, 0, sizeof i);
    i.op = op;
    return i;
}

static tt__instr *tt__append(tt_tape *t, int op)
{
    if (!TT__GROW(t->ctx, t->code, t->n_code, t->cap_code)) { tt__out_of_memory(t); return NULL; }
    tt__instr *i = &t->code[t->n_code++];
    *i = tt__new_instr(op);
    if (tt__is(i, TT__RANDOM)) i->random = ++t->n_random;
    return i;
}

tt_tape *tt_tape_new(tt_context *ctx)
{
    tt_tape *t = (tt_tape *)tt__calloc(ctx, sizeof *t);
    if (!t) return NULL;
    t->ctx = ctx;
    /* The context's address makes numbers of tapes of different contexts differ. tt__axis_code stores only
       the upper 30 bits of the number, so these bits must not all be 0. */
    t->number = ((uint32_t)((uintptr_t)ctx >> 6) * 2654435761u + ++ctx->n_tapes * 8) | 4;
    t->alignment = TT__ALIGN;
    t->data = t->slots = 1;
    if (!TT__GROW(ctx, t->values, t->n_values, t->cap_values) ||
        !TT__GROW(ctx, t->axes, t->n_axes, t->cap_axes)) {
        tt_tape_free(t);
        return NULL;
    }
    memset(&t->values[t->n_values++], 0, sizeof *t->values);
    memset(&t->axes[t->n_axes++], 0, sizeof *t->axes);
    return t;
}

/* Encodes an axis as a number of rows, which tt_input and other recording functions take. The code is
   negative, unlike a fixed number of rows, and contains the tape's number. */
static int64_t tt__axis_code(const tt_tape *t, int32_t axis, int32_t extra)
{
    return -((int64_t)(t->number >> 2) << 32 | ((int64_t)axis * 4 + extra)) - 1;
}

static bool tt__decode_rows(tt_tape *t, int64_t rows, tt__shape *shape)
{
    shape->axis = shape->extra = 0;
    shape->rows = rows;
    if (rows > 0) return true;
    const int64_t tape = -(rows + 1) >> 32, code = -(rows + 1) & 0xffffffff;
    if (rows < 0 && tape && tape != t->number >> 2)
        return tt__tape_fail(t, TT_ERR_ARGUMENT,
                             "the rows are an axis of another tape: make an axis on this tape (tt_axis)");
    if (rows == 0 || !tape || code / 4 < 1 || code / 4 >= t->n_axes) return false;
    shape->axis = (int32_t)(code / 4);
    shape->extra = (int32_t)(code % 4);
    shape->rows = t->axes[shape->axis].capacity + shape->extra;
    return true;
}

int64_t tt_axis(tt_tape *t, const char *name, int64_t capacity)
{
    if (t->status != TT_OK) return 0;
    if (capacity < 1 || capacity > INT32_MAX)
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "axis '%s': capacity is %lld, but must be 1 to 2^31 - 1",
                             name, (long long)capacity);
    for (int32_t k = 1; k < t->n_axes && name[0]; k++) {
        if (strncmp(t->axes[k].name, name, sizeof t->axes[k].name - 1) != 0) continue;
        if (t->axes[k].capacity == capacity) return tt__axis_code(t, k, 0);
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "axis '%s' has capacity %lld, but this tape has an axis of "
                             "that name with capacity %lld: give one of them another name", name,
                             (long long)capacity, (long long)t->axes[k].capacity);
    }
    if (!TT__GROW(t->ctx, t->axes, t->n_axes, t->cap_axes)) return tt__out_of_memory(t);
    tt__row_axis *a = &t->axes[t->n_axes];
    memset(a, 0, sizeof *a);
    snprintf(a->name, sizeof a->name, "%s", name);
    a->capacity = capacity;
    return tt__axis_code(t, t->n_axes++, 0);
}

/* Returns the number of the first instruction of a segment; for TT__SEGMENTS, the number of instructions. */
static int tt__segment_first(const tt_tape *t, unsigned segment)
{
    int from = 0, to = t->n_code;
    while (from < to) {
        int middle = (from + to) / 2;
        if ((unsigned)t->code[middle].segment < segment) from = middle + 1;
        else to = middle;
    }
    return from;
}

/* Returns whether v is a view of one rank's shard of the rows of a replicated storage. */
static bool tt__is_own_rows(const tt_tape *t, int32_t v)
{
    return t->values[v].part.split != t->values[t->values[v].base].part.split;
}

/* Returns the bytes from the start of one slot of a storage to the start of the next slot. tt__storage_bytes
   returns the bytes of all slots and copies. */
static size_t tt__slot_bytes(const tt__tape_value *v)
{
    return tt__align_up(tt__matrix_bytes(v->shape.dtype, v->shape.rows, v->shape.cols));
}

static size_t tt__storage_bytes(const tt__tape_value *v)
{
    return tt__slot_bytes(v) * (v->slots > 1 ? (size_t)v->slots : 1) *
           (v->copies > 1 ? (size_t)v->copies : 1);
}

static tt_value tt__handle(const tt_tape *t, int32_t id)
{
    tt_value v;
    v.id = id;
    v.tape = t->number;
    return v;
}

static bool tt__has_value(const tt_tape *t, tt_value v)
{
    return v.id > 0 && v.id < t->n_values && v.tape == t->number;
}

/* Returns why v is not a value of the tape: the predicate of a sentence in an error message. */
static const char *tt__why_no_value(const tt_tape *t, tt_value v)
{
    if (v.id > 0 && v.tape != t->number)
        return "is a value of another tape: record on this tape the ops that compute it";
    return v.id ? "is not a value of this tape: pass a value that a call with this tape returned"
                : "is no value (id 0): pass a value that a call with this tape returned";
}

/* Stores the error of a function whose only operand v is not a value of the tape. Returns false. */
static bool tt__refuse_value(tt_tape *t, const char *function, tt_value v)
{
    return tt__tape_fail(t, TT_ERR_ARGUMENT, "%s: the value %s", function, tt__why_no_value(t, v));
}

/* Writes a value's name, dtype and shape to `to`, such as "'h' f32 (tokens<=8192, 768)". */
static const char *tt__describe(const tt_tape *t, int32_t id, char *to, size_t capacity)
{
    const tt__shape *x = &t->values[id].shape;
    char rows[112];
    snprintf(rows, sizeof rows, "%s%s%s%lld", x->axis ? t->axes[x->axis].name : "",
             x->axis && x->extra ? "+1" : "", x->axis ? "<=" : "", (long long)x->rows);
    if (!id) snprintf(to, capacity, "nothing");
    else snprintf(to, capacity, "'%s' %s (%s, %lld)", t->values[id].name, tt_dtype_name(x->dtype), rows,
                  (long long)x->cols);
    return to;
}

tt_value tt_input(tt_tape *t, const char *name, tt_dtype dtype, int64_t rows, int64_t width)
{
    tt__shape shape;
    shape.dtype = dtype;
    shape.cols = width;
    if (t->status != TT_OK) return tt__handle(t, 0);
    if (tt__decode_rows(t, rows, &shape) && width >= 1 && (unsigned)dtype < TT_DTYPE_COUNT) {
        for (int32_t v = 1; v < t->n_values && t->shares_inputs; v++) {
            const tt__tape_value *x = &t->values[v];
            if (x->storage != TT__INPUT || x->base != v || strcmp(x->name, name) != 0) continue;
            if (x->shape.dtype == dtype && x->shape.cols == width && x->shape.axis == shape.axis &&
                x->shape.rows == shape.rows && x->shape.extra == shape.extra) return tt__handle(t, v);
            return tt__handle(t, tt__tape_fail(t, TT_ERR_SHAPE, "the teacher reads an input '%s' of %lld "
                                               "rows and width %lld, and the student one of %lld rows and "
                                               "width %lld: both must read the same batches", name,
                                               (long long)x->shape.rows, (long long)x->shape.cols,
                                               (long long)shape.rows, (long long)width));
        }
        return tt__handle(t, tt__new_value(t, &shape, TT__INPUT, "%s", name));
    }
    tt__tape_fail(t, TT_ERR_SHAPE, "input '%s' has %lld rows, width %lld and dtype %d; rows and width must "
                  "be at least 1, and the dtype one of tt_dtype", name, (long long)rows, (long long)width,
                  (int)dtype);
    return tt__handle(t, 0);
}

tt_value tt_seq_start(tt_tape *t, const char *name, int64_t seqs)
{
    tt__shape shape;
    if (t->status == TT_OK && seqs < 0 && tt__decode_rows(t, seqs, &shape) && shape.extra == 0)
        return tt_input(t, name, TT_I32, tt__axis_code(t, shape.axis, 1), 1);
    if (seqs > 0 && seqs < INT64_MAX) return tt_input(t, name, TT_I32, seqs + 1, 1);
    tt__tape_fail(t, TT_ERR_SHAPE,
                  "sequence starts '%s': seqs is %lld, but must be above 0 or an axis (tt_axis)", name,
                  (long long)seqs);
    return tt__handle(t, 0);
}

int64_t tt_value_rows(const tt_tape *t, tt_value v)
{
    return tt__has_value(t, v) ? t->values[v.id].shape.rows : 0;
}

int64_t tt_value_axis(const tt_tape *t, tt_value v)
{
    const tt__shape *x = tt__has_value(t, v) ? &t->values[v.id].shape : NULL;
    return x && x->axis ? tt__axis_code(t, x->axis, x->extra) : x ? x->rows : 0;
}

int64_t tt_value_width(const tt_tape *t, tt_value v)
{
    return tt__has_value(t, v) ? t->values[v.id].shape.cols : 0;
}

void tt_name(tt_tape *t, tt_value v, const char *format, ...)
{
    va_list args;
    if (!tt__has_value(t, v)) return;
    va_start(args, format);
    vsnprintf(t->values[v.id].name, sizeof t->values[v.id].name, format, args);
    t->values[v.id].named = true;
    va_end(args);
}

void tt_output(tt_tape *t, tt_value v)
{
    if (tt__has_value(t, v)) t->values[t->values[v.id].base].keep = t->values[v.id].keep = true;
    else tt__refuse_value(t, "tt_output", v);
}

void tt_block_end(tt_tape *t, tt_value v)
{
    if (tt__has_value(t, v)) t->values[t->values[v.id].base].block_end = true;
    else tt__refuse_value(t, "tt_block_end", v);
}

void tt_offload(tt_tape *t, tt_value v)
{
    if (tt__has_value(t, v)) t->values[t->values[v.id].base].offload = true;
    else tt__refuse_value(t, "tt_offload", v);
}

static void tt__mark_value(tt_tape *t, const char *what, tt_value v, tt__mark mark)
{
    if (tt__has_value(t, v)) t->values[t->values[v.id].base].mark = mark;
    else tt__refuse_value(t, what, v);
}

void tt_keep(tt_tape *t, tt_value v) { tt__mark_value(t, "tt_keep", v, TT__MARKED_KEEP); }
void tt_recompute(tt_tape *t, tt_value v) { tt__mark_value(t, "tt_recompute", v, TT__MARKED_AGAIN); }

/* Returns whether v is on the tape. If not, stores an error about operand `number` of function `what`. */
static bool tt__on_tape(tt_tape *t, const char *what, int number, tt_value v)
{
    if (t->status != TT_OK || tt__has_value(t, v)) return t->status == TT_OK;
    return tt__tape_fail(t, TT_ERR_ARGUMENT, "%s: operand %d %s", what, number, tt__why_no_value(t, v));
}

/* Returns the value of parameter p on this tape; makes the value first if the tape has none. An error names p
   as operand `number` of function `what`. Returns 0 after tt__tape_fail. */
static int32_t tt__param_id(tt_tape *t, const char *what, int number, const tt_param *p)
{
    if (t->status != TT_OK) return 0;
    if (!p) tt__tape_fail(t, TT_ERR_ARGUMENT, "%s: parameter operand %d is NULL%s%s", what, number,
                          t->ctx->unmade[0] ? ": " : "", t->ctx->unmade);
    else if (p->ctx != t->ctx)
        tt__tape_fail(t, TT_ERR_ARGUMENT,
                      "%s: parameter '%s' belongs to another context: use a parameter of the tape's context",
                      what, p->name);
    else if (p->low_a)
        tt__tape_fail(t, TT_ERR_ARGUMENT, "%s: parameter '%s' has low-rank factors, which only tt_linear "
                      "reads: leave it whole (tt_param_low_rank)", what, p->name);
    if (t->status != TT_OK) return 0;
    while (t->n_params <= p->index) {
        if (!TT__GROW(t->ctx, t->params, t->n_params, t->cap_params)) return tt__out_of_memory(t);
        t->params[t->n_params++] = 0;
    }
    if (t->params[p->index]) return t->params[p->index];
    const int64_t rows = p->ndim > 1 ? p->dims[0] : 1;
    const tt__shape shape = {p->form, rows, p->size / rows, 0, 0};
    int32_t id = tt__new_value(t, &shape, TT__PARAMETER, "%s", p->name);
    if (!id) return 0;
    t->values[id].param = p->index;
    t->values[id].persistent = true;
    return t->params[p->index] = id;
}

tt_value tt_param_value(tt_tape *t, tt_param *p)
{
    return tt__handle(t, tt__param_id(t, "param_value", 0, p));
}

/* -------------------------------------------------------------------------------------------------- views */

tt_value tt_slice(tt_tape *t, tt_value x, int64_t from, int64_t width)
{
    char what[256];
    if (!tt__on_tape(t, "slice", 0, x)) return tt__handle(t, 0);
    tt__shape shape = t->values[x.id].shape;
    if (from < 0 || width < 1 || from > shape.cols - width)
        return tt__handle(t, tt__tape_fail(t, TT_ERR_SHAPE,
                                           "slice: %lld columns from column %lld on are not all within %s",
                                           (long long)width, (long long)from,
                                           tt__describe(t, x.id, what, sizeof what)));
    shape.cols = width;
    return tt__handle(t, tt__new_view(t, x.id, &shape, from, t->values[x.id].ld, t->values[x.id].name));
}

tt_value tt_reshape(tt_tape *t, tt_value x, int64_t rows, int64_t width)
{
    char what[256];
    tt__shape to;
    if (!tt__on_tape(t, "reshape", 0, x)) return tt__handle(t, 0);
    tt__tape_value *v = &t->values[x.id];
    bool ok = width >= 1 && tt__decode_rows(t, rows, &to) && v->ld == v->shape.cols;
    const tt__shape *from = &v->shape;
    if (ok && from->axis) ok = to.axis == from->axis && to.extra == from->extra && width == from->cols;
    else if (ok) ok = !to.axis && to.rows <= INT64_MAX / width && to.rows * width == from->rows * from->cols;
    to.dtype = v->shape.dtype;
    to.cols = width;
    if (ok) return tt__handle(t, tt__new_view(t, x.id, &to, 0, width, v->name));
    tt__tape_fail(t, TT_ERR_SHAPE, "reshape: %s to (%lld, %lld) is not possible: the number of elements must "
                  "stay the same, rows of an axis cannot be split, and a slice cannot be reshaped",
                  tt__describe(t, x.id, what, sizeof what), (long long)rows, (long long)width);
    return tt__handle(t, 0);
}
