#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../../tape/record.h"
#include "../record.h"
#include "../shapes.h"
#include "../layouts.h"
#include "../scratch.h"

/* ---------------------------------------------------------------------------------------------- embedding */

static bool tt__shape_EMBEDDING(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *table = tt__in(t, i, 1);
    tt__set_shape(&out[0], table->dtype, tt__in(t, i, 0), table->cols);
    if (!tt__index_in(t, i, 0) || !tt__float_in(t, i, 1)) return false;
    if (i->attr.offset < 0 || i->attr.offset >= table->rows)
        return tt__tape_fail(t, TT_ERR_ARGUMENT,
                             "embedding: offset is %d, but must be 0 to %lld, the table's last row",
                             i->attr.offset, (long long)table->rows - 1);
    return !table->axis || tt__bad(t, i, 1, "a table with a fixed number of rows");
}

/* The layout rule of EMBEDDING. If a rank has a shard of the table, the rank's result is 0 in rows whose ids
   are outside the shard, so the result is partial. */
static bool tt__layout_EMBEDDING(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    (void)t;
    out[0] = in[1] == TT__ROWS ? TT__PARTIAL : TT__WHOLE;
    return in[1] <= TT__ROWS && tt__laid_out(i, in, 0, TT__WHOLE);
}

tt_value tt_embedding_offset(tt_tape *t, tt_value ids, tt_param *table, int offset)
{
    tt__instr i = tt__new_instr(TT__OP_EMBEDDING);
    i.attr.offset = offset;
    return tt__record(t, i, "vp", ids, table);
}

tt_value tt_embedding(tt_tape *t, tt_value ids, tt_param *table)
{
    return tt_embedding_offset(t, ids, table, 0);
}

static tt_status tt__check_EMBEDDING(const tt__launch *l)
{
    const int64_t rows = l->whole_rows ? l->whole_rows : l->in[1].rows;
    return tt__check_indices(l, 0, rows - l->instr->attr.offset, NULL, "rows of the embedding table");
}

static const tt__rules tt__rules_EMBEDDING = {tt__shape_EMBEDDING, tt__layout_EMBEDDING,
    {NULL, "0g", "1", TT__OP_EMBEDDING_BACKWARD}, NULL, NULL, tt__check_EMBEDDING, NULL, NULL, NULL, 0, NULL,
    1};

static bool tt__shape_EMBEDDING_BACKWARD(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const int64_t cols = tt__in(t, i, 1)->cols;
    tt__set_fixed(&out[0], TT_F32, t->values[i->out[0]].shape.rows, cols);
    return tt__index_in(t, i, 0) && tt__shape_in(t, i, 1, tt__in(t, i, 0), cols);
}

/* The layout rule of EMBEDDING_BACKWARD. A rank sums the gradients of those rows of the table that it has. */
static bool tt__layout_EMBEDDING_BACKWARD(const tt_tape *t, const tt__instr *i, const tt__split *in,
                                          tt__split *out)
{
    out[0] = t->values[i->out[0]].part.split;
    return tt__laid_out(i, in, 0, TT__WHOLE) && tt__laid_out(i, in, 1, TT__WHOLE) && out[0] <= TT__ROWS;
}

static size_t tt__cpu_EMBEDDING_BACKWARD(int threads, const tt_tape *t, const tt__instr *i)
{
    int64_t sorted = tt__in(t, i, 1)->rows + t->values[i->out[0]].shape.rows + 1;
    return tt__align_up((size_t)sorted * 4) + tt__widen_bytes(threads, t, i);
}

static const tt__rules tt__rules_EMBEDDING_BACKWARD = {tt__shape_EMBEDDING_BACKWARD,
    tt__layout_EMBEDDING_BACKWARD, {NULL}, tt__cpu_EMBEDDING_BACKWARD, tt__sort_bytes};
