#pragma once
#include "../../base/base.h"
#include "../cpu_launch.h"
#include "../../cpu/kernels.h"
#include "rules.h"

/* ------------------------------------------------------------------------------------- ops of the caller */

/* Returns a matrix as an array for the caller's functions: the matrix itself, or a copy of the matrix in the
   workspace. A copy begins at byte *used of the workspace, and its size is added to *used. If `reads`, the
   numbers of the matrix are copied; otherwise the copy only has room for the functions' result. adds: the
   result is added to the matrix. */
TT__OUTLINE tt_custom_array TT__K(custom_array)(const tt__launch *l, const tt__mat *m, bool reads, bool adds,
                                                size_t *used)
{
    const bool floats = tt__is_float(m->dtype);
    const tt_dtype dtype = floats ? TT_F32 : m->dtype;
    tt_custom_array a = {m->data, dtype, m->rows, m->cols};
    const size_t bytes = m->data ? tt__custom_bytes(m, adds) : 0;
    const size_t row = (size_t)m->cols * tt_dtype_bytes(dtype);
    if (!bytes) return a;
    a.data = tt__workspace_at(l, *used);
    *used += bytes;
    for (int64_t r = 0; r < m->rows && reads; r++) {
        char *to = (char *)a.data + (size_t)r * row;
        if (floats) tt__convert(to, TT_F32, tt__at(m, r), m->dtype, (size_t)m->cols);
        else memcpy(to, tt__at(m, r), row);
    }
    return a;
}

/* Moves a result of the caller's functions from its copy in the workspace to its matrix; does nothing if
   there is no copy. */
TT__OUTLINE void TT__K(custom_store)(const tt__mat *m, const tt_custom_array *a, bool adds)
{
    float *x = (float *)a->data, before;
    const size_t item = tt_dtype_bytes(m->dtype);
    if (!m->data || a->data == m->data) return;
    for (int64_t r = 0; r < m->rows; r++, x += m->cols) {
        char *to = (char *)tt__at(m, r);
        for (int64_t c = 0; c < m->cols && adds; c++) {
            tt__convert(&before, TT_F32, to + (size_t)c * item, m->dtype, 1);
            x[c] += before;
        }
        tt__convert(to, m->dtype, x, TT_F32, (size_t)m->cols);
    }
}

/* Returns `status`, which a function of the caller has returned; sets an error that names the op. */
TT__OUTLINE tt_status TT__K(custom_done)(const tt__launch *l, tt_status status, const char *function)
{
    const char *name = l->instr->attr.custom->name;
    if (status == TT_OK) return TT_OK;
    return tt__fail(l->tape->ctx, status, "the function `%s` of op '%.60s' failed (%s)", function,
                    name ? name : "custom", tt_status_name(status));
}

TT__FN tt_status TT__K(run_CUSTOM)(const tt__launch *l)
{
    const tt_custom_op *op = l->instr->attr.custom;
    tt_custom_array in[TT_CUSTOM_INPUTS];
    size_t used = 0;
    int n = 0;
    for (; n < TT_CUSTOM_INPUTS && l->in[n].data; n++)
        in[n] = TT__K(custom_array)(l, &l->in[n], true, false, &used);
    const tt_custom_array out = TT__K(custom_array)(l, &l->out[0], false, l->add[0], &used);
    const tt_status status = op->forward(op->user, in, n, &out);
    TT__K(custom_store)(&l->out[0], &out, l->add[0]);
    return TT__K(custom_done)(l, status, "forward");
}

TT__FN tt_status TT__K(run_CUSTOM_BACKWARD)(const tt__launch *l)
{
    const tt_custom_op *op = l->instr->attr.custom;
    tt_custom_array in[TT_CUSTOM_INPUTS], din[TT_CUSTOM_INPUTS];
    size_t used = 0;
    int n = 0;
    const tt_custom_array dout = TT__K(custom_array)(l, &l->in[0], true, false, &used);
    const tt_custom_array out = TT__K(custom_array)(l, &l->in[1], true, false, &used);
    for (; n < TT_CUSTOM_INPUTS && l->in[2 + n].data; n++)
        in[n] = TT__K(custom_array)(l, &l->in[2 + n], true, false, &used);
    for (int k = 0; k < n; k++) din[k] = TT__K(custom_array)(l, &l->out[k], false, l->add[k], &used);
    const tt_status status = op->backward(op->user, in, n, &out, &dout, din);
    for (int k = 0; k < n; k++) TT__K(custom_store)(&l->out[k], &din[k], l->add[k]);
    return TT__K(custom_done)(l, status, "backward");
}
