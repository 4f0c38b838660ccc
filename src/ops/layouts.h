#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "shapes.h"

/* ------------------------------------------------------------------------------------------- layout rules
   Rules that decide how the results of an op are divided over the ranks: see tt__rules.layout. */

/* Returns whether operand k has the layout `as` or is absent. */
static bool tt__laid_out(const tt__instr *i, const tt__split *in, int k, tt__split as)
{
    return !i->in[k] || in[k] == as;
}

/* The layout rule of elementwise ops. All tensors of floats have the layout of operand 0. An operand of
   integers has one number for each row: it is split if the rows of operand 0 are split, else whole. */
static bool tt__layout_alike(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    if (in[0] == TT__PARTIAL) return false;
    for (int k = 1; k < TT__RUN_IN; k++) {
        const bool numbers = i->in[k] && !tt__is_float(tt__in(t, i, k)->dtype);
        if (!tt__laid_out(i, in, k, numbers && in[0] != TT__ROWS ? TT__WHOLE : in[0])) return false;
    }
    for (int k = 0; k < TT__MAX_OUT; k++) out[k] = in[0];
    return true;
}

/* The layout rule of ops that read whole rows: columns must not be split. */
static bool tt__layout_of_whole_rows(const tt_tape *t, const tt__instr *i, const tt__split *in,
                                     tt__split *out)
{
    return in[0] <= TT__ROWS && tt__layout_alike(t, i, in, out);
}

/* The layout rule of ops whose rows depend on other rows. Rows must not be split; apart from this, the rule
   is that of elementwise ops. */
static bool tt__layout_by_columns(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    return in[0] != TT__ROWS && tt__layout_alike(t, i, in, out);
}

/* The layout rule of optimizers: the parameter and its state have the layout of the gradient. */
static bool tt__layout_of_update(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    (void)t;
    for (int k = 0; k < TT__MAX_OUT; k++) out[k] = in[0];
    return in[0] != TT__PARTIAL && tt__laid_out(i, in, 1, TT__WHOLE);
}

/* The layout rule of sums of squares: the sum over a split tensor is partial. */
static bool tt__layout_of_squares(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out)
{
    (void)t; (void)i;
    out[0] = in[0] == TT__WHOLE ? TT__WHOLE : TT__PARTIAL;
    return in[0] != TT__PARTIAL;
}

/* ------------------------------------------------------------------------------------ checks before a run */

TT_PRINTF(3, 4)
static tt_status tt__launch_fail(const tt__launch *l, int operand, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return tt__fail(l->tape->ctx, TT_ERR_ARGUMENT, "%s: '%s' %s", tt__instr_name(l->instr),
                    l->tape->values[l->instr->in[operand]].name, text);
}

/* Fails unless every index in the operand is in [0, limit) or equal to *ignored. ignored may be NULL. */
static tt_status tt__check_indices(const tt__launch *l, int operand, int64_t limit, const int32_t *ignored,
                                   const char *of_what)
{
    const int32_t *index = (const int32_t *)l->in[operand].data;
    const int64_t first = tt__is_own_rows(l->tape, l->instr->in[operand]) ? l->first_row : 0;
    for (int64_t r = 0; index && r < l->in[operand].rows; r++)
        if ((index[r] < 0 || index[r] >= limit) && !(ignored && index[r] == *ignored))
            return tt__launch_fail(l, operand, "has %d in row %lld, but must have 0 to %lld (%s)", index[r],
                                   (long long)(first + r), (long long)(limit - 1), of_what);
    return TT_OK;
}

/* Fails unless the operand's numbers are the first rows of sequences, then the number of all rows:
   0 = start[0] < start[1] < ... < start[seqs] = rows. */
static tt_status tt__check_starts(const tt__launch *l, int operand, int64_t rows)
{
    const int32_t *start = (const int32_t *)l->in[operand].data;
    int64_t seqs = l->in[operand].rows - 1;
    if (start[0] != 0)
        return tt__launch_fail(l, operand,
                               "begins with %d, but must begin with 0, the first row of the first sequence",
                               start[0]);
    for (int64_t s = 0; s < seqs; s++)
        if (start[s + 1] <= start[s])
            return tt__launch_fail(l, operand, "has %d after %d at entry %lld, but each sequence must have "
                                   "at least one row", start[s + 1], start[s], (long long)(s + 1));
    if (start[seqs] == rows) return TT_OK;
    return tt__launch_fail(l, operand, "ends with %d, but must end with the number of rows, %lld",
                           start[seqs], (long long)rows);
}

/* Returns the number of the sequence that contains a row. */
static int64_t tt__sequence_of(const int32_t *start, int64_t seqs, int64_t row)
{
    int64_t low = 0, high = seqs; /* start[low] <= row < start[high] */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (start[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}
