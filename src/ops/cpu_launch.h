#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "scratch.h"

/* -------------------------------------------------------------------------------------------------- launches
   Functions that divide a kernel's rows among threads, and that find the kernel's workspace and elements. */

typedef void (*tt__rows_fn)(const tt__launch *l, int64_t from, int64_t to, float *scratch);
typedef struct tt__rows_job {
    const tt__launch *l;
    tt__rows_fn fn;
    int64_t rows, chunk;
    size_t skip, stride;
} tt__rows_job;

static float *tt__workspace_at(const tt__launch *l, size_t bytes)
{
    return (float *)(void *)((char *)l->workspace + bytes);
}

static void tt__rows_task(void *arg, int64_t task, int thread)
{
    const tt__rows_job *job = (const tt__rows_job *)arg;
    float *scratch = tt__workspace_at(job->l, job->skip + job->stride * (size_t)thread);
    job->fn(job->l, task * job->chunk, tt__min((task + 1) * job->chunk, job->rows), scratch);
}

static const tt__cpu *tt__cpu_of(const tt__launch *l) { return (const tt__cpu *)(const void *)l->device; }

/* Calls fn for `rows` rows of `cols` columns, `chunk` rows a task. The scratch of the threads begins after
   the first `skip` bytes of the workspace. */
static tt_status tt__for_chunks(const tt__launch *l, int64_t rows, int64_t cols, int64_t chunk, size_t skip,
                                tt__rows_fn fn)
{
    tt__rows_job job = {l, fn, rows, chunk, skip, TT__ROW_BUFFERS * tt__row_bytes(cols)};
    tt__run_tasks(tt__cpu_of(l)->pool, tt__ceil_div(rows, chunk), tt__rows_task, &job);
    return TT_OK;
}

/* Calls fn for the rows of m, in chunks of about 8192 elements. */
static tt_status tt__for_rows(const tt__launch *l, const tt__mat *m, size_t skip, tt__rows_fn fn)
{
    return tt__for_chunks(l, m->rows, m->cols, tt__max(1, 8192 / m->cols), skip, fn);
}

/* Fails unless the operands first to first + count - 1, if present, have as many columns as out[0]. Kernels
   of TT__RUN_MAP widen their rows side by side, into scratch that is laid out by these columns. */
static tt_status tt__same_widths(const tt__launch *l, int first, int count)
{
    for (int k = first; k < first + count; k++)
        if (l->in[k].data && l->in[k].cols != l->out[0].cols)
            return tt__fail(l->tape->ctx, TT_ERR_INTERNAL, "%s: operand %d has %lld columns, but the result "
                            "has %lld; please report this program", tt__instr_name(l->instr), k,
                            (long long)l->in[k].cols, (long long)l->out[0].cols);
    return TT_OK;
}

static int64_t tt__elements(const tt__mat *m) { return m->rows * m->cols; }
static void *tt__at(const tt__mat *m, int64_t r)
{
    return (char *)m->data + (size_t)(r * m->ld) * tt_dtype_bytes(m->dtype);
}

static tt__mat tt__rows_of(const tt__mat *m, int64_t first, int64_t n)
{
    tt__mat part = *m;
    part.data = tt__at(m, first);
    part.rows = n;
    return part;
}
