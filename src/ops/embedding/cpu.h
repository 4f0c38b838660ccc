#pragma once
#include "../../base/base.h"
#include "../cpu_launch.h"
#include "../../cpu/kernels.h"
#include "../../cpu/rows.h"
#include "../cpu_rows.h"

/* ---------------------------------------------------------------------------------------------- embedding */

/* Computes rows [from, to) of out[0]. If `index` is NULL, row r of the result is row r of m. Otherwise row r
   of the result is the row of m with the number `index[r] - first`. If m has no row of that number, row r of
   the result is zeros. */
TT__INLINE void TT__K(take_rows)(const tt__launch *l, int64_t from, int64_t to, float *scratch,
                                 const tt__mat *m, const int32_t *index, int64_t first)
{
    for (int64_t r = from; r < to; r++) {
        const int64_t row = index ? index[r] - first : r;
        const bool there = row >= 0 && row < m->rows;
        const float *x = there ? TT__K(row_in)(m, row, scratch, 0) : TT__K(scratch_row)(scratch, m->cols, 0);
        if (!there) memset(TT__K(scratch_row)(scratch, m->cols, 0), 0, (size_t)m->cols * 4);
        TT__K(row_end)(&l->out[0], l->add[0], r, x, scratch, 1);
    }
}

TT__RUN_ROWS(EMBEDDING, TT__K(take_rows)(l, from, to, scratch, &l->in[1], (const int32_t *)l->in[0].data,
                                         l->first_row - l->instr->attr.offset))
TT__RUN_ROWS(GATHER_ROWS, TT__K(take_rows)(l, from, to, scratch, &l->in[0], (const int32_t *)l->in[1].data,
                                           0))

TT__ROWS_FN(copy_rows)
{
    TT__K(take_rows)(l, from, to, scratch, &l->in[0], NULL, 0);
}

TT__ROWS_FN(zero_rows)
{
    const size_t bytes = (size_t)l->out[0].cols * tt_dtype_bytes(l->out[0].dtype);
    for (int64_t r = from; r < to; r++) memset(tt__at(&l->out[0], r), 0, bytes);
}

/* Sums the rows of dy that have equal ids. `order` lists the rows of dy by their numbers, sorted by id; rows
   of equal ids keep their order. Rows whose id has no row in out[0] are left out. [from, to) counts entries
   of `order`. The task in which an id begins adds all rows of the id, so that the rows are added in their
   order. */
TT__ROWS_FN(embedding_backward_rows)
{
    const int32_t *ids = (const int32_t *)l->in[0].data, *order = (const int32_t *)l->workspace;
    const int64_t n = l->out[0].cols, rows = order[l->in[0].rows + l->out[0].rows];
    int64_t k = from;
    float *sum = TT__K(scratch_row)(scratch, n, 0);
    while (k > 0 && k < to && ids[order[k]] == ids[order[k - 1]]) k++;
    while (k < to) {
        int32_t id = ids[order[k]];
        memset(sum, 0, (size_t)n * 4);
        for (; k < rows && ids[order[k]] == id; k++) {
            const float *dy = TT__K(row_in)(&l->in[1], order[k], scratch, 1);
            TT__K(axpby)(sum, 1, sum, 1, dy, n);
        }
        TT__K(row_end)(&l->out[0], l->add[0], id - l->first_row + l->instr->attr.offset, sum, scratch, 2);
    }
}

TT__FN tt_status TT__K(run_EMBEDDING_BACKWARD)(const tt__launch *l)
{
    const int32_t *ids = (const int32_t *)l->in[0].data;
    int64_t rows = l->in[0].rows, vocab = l->out[0].rows, n = l->out[0].cols, id;
    int32_t *order = (int32_t *)l->workspace, *first = order + rows;
    const int64_t first_row = l->first_row - l->instr->attr.offset;
    memset(first, 0, (size_t)(vocab + 1) * 4); /* begins a counting sort by id */
    for (int64_t r = 0; r < rows; r++)
        if ((id = ids[r] - first_row) >= 0 && id < vocab) first[id + 1]++;
    for (int64_t v = 0; v < vocab; v++) first[v + 1] += first[v];
    for (int64_t r = 0; r < rows; r++)
        if ((id = ids[r] - first_row) >= 0 && id < vocab) order[first[id]++] = (int32_t)r;
    if (!l->add[0]) tt__for_rows(l, &l->out[0], 0, TT__K(zero_rows));
    return tt__for_chunks(l, first[vocab], n, 64, tt__align_up((size_t)(rows + vocab + 1) * 4),
                          TT__K(embedding_backward_rows));
}
