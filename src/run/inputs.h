#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/record.h"
#include "../ops/linear/rules.h"
#include "../ops/rules.h"
#include "../plan/place.h"
#include "../ops/cpu_launch.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../context/devices.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "../compile/compile.h"
#include "ranks.h"

/* ---------------------------------------------------------------------------------------------------- inputs
   Copies inputs to a program (tt_set) and values from a program (tt_get), and finds the memory of an
   instruction's operands on a rank. */

/* Returns how many elements of a storage come before its view `id`, which is a rank's shard of the rows. */
static int64_t tt__own_first(const tt_program *p, const tt__now *now, int rank, int32_t id)
{
    const tt__tape_value *v = &p->built.t->values[id];
    int64_t first = rank % p->arena->tensor * v->shape.rows;
    if (v->shape.axis) tt__axis_rows(p, now, rank, v->shape.axis, &first);
    return first * v->ld;
}

/* Moves m from the start of a storage to the part that is value `id`: a slot, or a rank's shard. */
static void tt__resolve_part(const tt_program *p, const tt__now *now, int rank, int32_t id, tt__mat *m)
{
    const tt__tape_value *v = &p->built.t->values[id], *base = &p->built.t->values[v->base];
    const size_t item = m->data ? tt_dtype_bytes(base->shape.dtype) : 0;
    char *data = (char *)m->data;
    int64_t first;
    const int slot = v->slot ? v->slot - 1 : tt__slot(p, now->round);
    if (base->slots > 1 && item) data += (size_t)slot * tt__slot_bytes(base);
    if (base->copies > 1) data += (size_t)(now->round % base->copies) * tt__slot_bytes(base);
    if (tt__is_own_rows(p->built.t, id)) data += (size_t)tt__own_first(p, now, rank, id) * item;
    if (v->part.unit) {
        m->cols = m->ld = tt__shard(v->part.of, v->part.unit, v->part.root, tt__data_rank(p, rank),
                                    p->arena->data, &first);
        if (!base->part.unit) data += (size_t)first * item; /* otherwise the storage is the shard */
    }
    m->data = data;
}

/* Returns the matrix of value `id` on a rank in run *now. The matrix's `data` is NULL if the rank belongs to
   another process. */
static tt__mat tt__resolve_in(const tt_program *p, const tt__now *now, int rank, int32_t id)
{
    tt__mat m = tt__at_capacity(p->built.t, id);
    if (!id) return m;
    const tt__tape_value *v = &p->built.t->values[id], *base = &p->built.t->values[v->base];
    const size_t item = tt_dtype_bytes(base->shape.dtype);
    m.data = tt__storage_memory(p, rank, base);
    if (m.data) m.data = (char *)m.data + (size_t)v->offset * item;
    m.rows = tt__actual_rows(p, now, rank, id);
    if (v->parted) tt__resolve_part(p, now, rank, id, &m);
    return m;
}

static tt__mat tt__resolve(const tt_program *p, int rank, int32_t id)
{
    return tt__resolve_in(p, &p->rank[rank].now, rank, id);
}

/* Writes a value to a rank's memory, before all work that is launched later. The caller may change `data`
   when the function has returned. */
static tt_status tt__write_value(tt_program *p, int rank, int32_t id, const void *data, size_t bytes)
{
    const tt__backend *b = p->settings.kind->backend;
    tt__device *d = p->settings.group->device[rank];
    tt__staged *staged = &p->rank[rank].staged[id];
    const int32_t arrival = p->built.t->values[id].arrival;
    const int stream = arrival ? TT__IN_STREAM : TT__COMPUTE_STREAM;
    void *to = tt__resolve(p, rank, arrival ? arrival : id).data;
    if (!staged->buffer[0]) return memcpy(to, data, bytes), TT_OK;
    staged->now ^= 1;
    tt_status status = b->after(d, TT__HOST_STREAM, staged->copied[staged->now]);
    if (status == TT_OK && arrival) status = b->after(d, stream, p->rank[rank].taken);
    if (status == TT_OK) {
        memcpy(staged->buffer[staged->now], data, bytes);
        status = b->copy(d, stream, to, staged->buffer[staged->now], bytes);
    }
    if (status == TT_OK && b->mark(d, stream, &staged->copied[staged->now]) != TT_OK) status = b->wait(d);
    if (arrival) staged->arrived = bytes;
    return tt__device_status(p->ctx, p->settings.group, rank, status);
}

/* Copies the inputs that the host has written to tt__tape_value.arrival on a rank to the inputs themselves,
   where the run reads them. */
static tt_status tt__take_arrivals(tt_program *p, int rank)
{
    const tt__backend *b = p->settings.kind->backend;
    tt__device *d = p->settings.group->device[rank];
    tt__rank *r = &p->rank[rank];
    tt_status status = TT_OK;
    bool any = false;
    for (int32_t v = 1; v < p->built.t->n_values && status == TT_OK; v++) {
        const int32_t arrival = p->built.t->values[v].arrival;
        tt__staged *staged = &r->staged[v];
        if (!arrival || !staged->arrived) continue;
        status = b->after(d, TT__COMPUTE_STREAM, staged->copied[staged->now]);
        if (status == TT_OK)
            status = b->copy(d, TT__COMPUTE_STREAM, tt__resolve(p, rank, v).data,
                             tt__resolve(p, rank, arrival).data, staged->arrived);
        staged->arrived = 0;
        any = true;
    }
    if (any && status == TT_OK) status = b->mark(d, TT__COMPUTE_STREAM, &r->taken);
    return tt__device_status(p->ctx, p->settings.group, rank, status);
}

static void tt__mark_input(tt__rank *r, int32_t v, tt__input_state state)
{
    r->inputs_set += (state == TT__SET) - (r->input[v] == TT__SET);
    r->input[v] = (unsigned char)state;
}

/* Notes that bytes [from, from + bytes) of a rank's transient memory will be overwritten: inputs stored there
   become OVERWRITTEN in all programs of the arena but `reader` (NULL: in all). */
static void tt__overwrite(const tt__arena *a, const tt_program *reader, int rank, size_t from, size_t bytes)
{
    for (tt_program *q = a->programs; q; q = q->next) {
        tt__rank *r = &q->rank[rank];
        for (int32_t v = 1; v < q->built.t->n_values && q != reader && r->inputs_set; v++) {
            const tt__tape_value *x = &q->built.t->values[v];
            if (r->input[v] != TT__SET || x->place == TT__NO_PLACE || x->space != TT__DEVICE) continue;
            const bool apart = from >= x->place + tt__storage_bytes(x) || x->place >= from + bytes;
            if (!apart) tt__mark_input(r, v, TT__OVERWRITTEN);
        }
    }
}

/* Sets the number of rows of input v's axis. If another input of the axis is set with another number of rows,
   fails; but if v itself was set before, makes the other input UNSET instead. */
static tt_status tt__set_input_rows(tt_program *p, tt__rank *r, int32_t v, int64_t rows)
{
    const tt__tape_value *values = p->built.t->values, *x = &values[v];
    int64_t *axis = &r->axis_rows[x->shape.axis];
    const bool other = *axis != rows - x->shape.extra, recomputed = r->input[v] != TT__UNSET;
    for (int32_t k = 1; k < p->built.t->n_values && other; k++) {
        if (r->input[k] != TT__SET || k == v || values[k].shape.axis != x->shape.axis) continue;
        if (!recomputed)
            return tt__fail(p->ctx, TT_ERR_SHAPE, "tt_set: input '%s' is set with %lld rows, but '%s' was "
                            "set with %lld on the same axis '%s': all inputs of an axis need equally many "
                            "rows, and sequence starts one more", x->name, (long long)rows, values[k].name,
                            (long long)(*axis + values[k].shape.extra), p->built.t->axes[x->shape.axis].name);
        tt__mark_input(r, k, TT__UNSET);
    }
    *axis = rows - x->shape.extra;
    return TT_OK;
}

/* Sets input v on one rank. The arguments are checked already. */
static tt_status tt__set_input(tt_program *p, int rank, int32_t v, const void *data, int64_t rows)
{
    const tt__tape_value *x = &p->built.t->values[v];
    tt__rank *r = &p->rank[rank];
    tt_status status = x->shape.axis ? tt__set_input_rows(p, r, v, rows) : TT_OK;
    if (status != TT_OK) return status;
    tt__mark_input(r, v, TT__SET);
    if (x->place == TT__NO_PLACE) return TT_OK; /* no instruction reads it */
    p->arena->results_of = NULL; /* the input may overwrite an output */
    tt__overwrite(p->arena, p, rank, x->place, tt__storage_bytes(x));
    if (!tt__is_here(p, rank)) return TT_OK;
    const size_t row = (size_t)x->shape.cols * tt_dtype_bytes(x->shape.dtype);
    return tt__write_value(p, rank, v, data, (size_t)rows * row);
}

/* Returns where a pipeline keeps the inputs of its next micro-batch on a data rank. NULL: out of memory. */
static tt__queued *tt__queued_of(tt_program *p, int data_rank)
{
    const int at = (int)p->round * p->arena->data + data_rank;
    const size_t bytes = p->queued_at[p->n_recorded], rows = sizeof(int64_t) * (size_t)p->n_axes;
    while (p->n_queued <= at) {
        if (!TT__GROW(p->ctx, p->queued, p->n_queued, p->cap_queued)) return NULL;
        memset(&p->queued[p->n_queued++], 0, sizeof *p->queued);
    }
    tt__queued *f = &p->queued[at];
    if (!f->inputs) f->inputs = (char *)tt__alloc(p->ctx, bytes ? bytes : 1);
    if (!f->rows) f->rows = (int64_t *)tt__alloc(p->ctx, rows);
    return f->inputs && f->rows ? f : NULL;
}

/* Sets input v for the next micro-batch of a pipeline. The arguments are checked already. Copies the data,
   because a pipeline runs its micro-batches only at the end of the step or of tt_run. The ranks of the first
   stage note which inputs are set. */
static tt_status tt__feed_input(tt_program *p, int data_rank, int32_t v, const void *data, int64_t rows)
{
    const tt__tape_value *x = &p->built.t->values[v];
    tt__rank *r = &p->rank[tt__first_of(p, data_rank)];
    const tt__queued *f = tt__queued_of(p, data_rank);
    tt_status status = !f ? TT_ERR_MEMORY : x->shape.axis ? tt__set_input_rows(p, r, v, rows) : TT_OK;
    if (status != TT_OK) return status;
    tt__mark_input(r, v, TT__SET);
    if (!tt__reads_input(p, v) || !tt__has_data_rank(p, data_rank)) return TT_OK;
    memcpy(f->inputs + p->queued_at[v], data,
           (size_t)(rows * x->shape.cols) * tt_dtype_bytes(x->shape.dtype));
    return TT_OK;
}

static tt_status tt__check_data_rank(const tt_program *p, const char *function, int rank)
{
    if (rank >= 0 && rank < p->arena->data) return TT_OK;
    return tt__fail(p->ctx, TT_ERR_ARGUMENT,
                    "%s: data rank %d does not exist: the program has %d data rank%s, numbered from 0",
                    function, rank, p->arena->data, p->arena->data > 1 ? "s" : "");
}

static tt_status tt__set_on(tt_program *p, int rank, tt_value v, const void *data, int64_t rows)
{
    const tt_tape *t = p->built.t;
    tt_status status = tt_allocate(p);
    if (status == TT_OK) status = tt__check_data_rank(p, "tt_set_rank", rank);
    if (status != TT_OK) return status;
    const tt__tape_value *x = tt__has_value(t, v) ? &t->values[v.id] : NULL;
    if (!x || x->storage != TT__INPUT || x->base != v.id || x->persistent)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_set: %s%s%s", x ? "'" : "the value ",
                        x ? x->name : tt__why_no_value(t, v),
                        x ? "' is no input of this program: set only inputs (tt_input)" : "");
    if (!data && tt__has_data_rank(p, rank))
        return tt__fail(p->ctx, TT_ERR_ARGUMENT,
                        "tt_set: data is NULL for input '%s': pass a pointer to its rows", x->name);
    const bool all = x->shape.axis || rows == x->shape.rows;
    if (rows < 1 + x->shape.extra || rows > x->shape.rows || !all)
        return tt__fail(p->ctx, TT_ERR_SHAPE, "tt_set: got %lld rows for input '%s', which takes %s%lld%s",
                        (long long)rows, x->name, !x->shape.axis ? "" : x->shape.extra ? "2 to " : "1 to ",
                        (long long)x->shape.rows,
                        x->shape.extra ? ": one more than there are sequences" : "");
    if (p->stages > 1) return tt__feed_input(p, rank, v.id, data, rows);
    for (int k = 0; k < p->arena->tensor && status == TT_OK; k++)
        status = tt__set_input(p, tt__first_of(p, rank) + k, v.id, data, rows);
    return status;
}

/* Fails if the program has several data ranks, which `function` does not support. */
static tt_status tt__one_data_rank(const tt_program *p, const char *function)
{
    if (p->arena->data == 1) return TT_OK;
    return tt__fail(p->ctx, TT_ERR_ARGUMENT,
                    "%s is for programs with one data rank, but this program has %d: use %s_rank", function,
                    p->arena->data, function);
}

/* Keeps the error of a failed tt_set. The next run reports the error, in case the caller ignores the
   status. */
static tt_status tt__note_refused(tt_program *p, tt_status status)
{
    if (status != TT_OK && !p->refused[0]) memcpy(p->refused, p->ctx->error, sizeof p->refused);
    return status;
}

tt_status tt_set_rank(tt_program *p, int rank, tt_value v, const void *data, int64_t rows)
{
    return tt__note_refused(p, tt__set_on(p, rank, v, data, rows));
}

tt_status tt_set(tt_program *p, tt_value v, const void *data, int64_t rows)
{
    tt_status status = tt__one_data_rank(p, "tt_set");
    return tt__note_refused(p, status == TT_OK ? tt__set_on(p, 0, v, data, rows) : status);
}

static bool tt__is_in_parts(const tt__tape_value *v) { return v->part.unit || v->part.split != TT__WHOLE; }

/* Copies a parameter or a view of one to `to`, for tt_get, from the shards of all ranks. */
static tt_status tt__get_parameter(const tt_program *p, int32_t id, float *to, size_t capacity)
{
    const tt__tape_value *x = &p->built.t->values[id];
    const tt_param *param = p->ctx->params[x->param];
    const bool all = x->base == id;
    const int64_t rows = all ? 1 : x->shape.rows, cols = all ? param->size : x->shape.cols;
    tt_status status = TT_OK;
    if (capacity < (size_t)(rows * cols))
        return tt__fail(p->ctx, TT_ERR_SHAPE,
                        "tt_get: '%s' has %lld floats, but the buffer has room for %zu: pass a larger buffer",
                        x->name, (long long)(rows * cols), capacity);
    for (int64_t r = 0; r < rows && status == TT_OK; r++)
        status = tt__param_read(param, x->offset + r * x->ld, cols, to + r * cols);
    return status;
}

/* Returns the last stage of the pipeline that has value v. */
static tt_program *tt__stage_with(tt_program *p, int32_t v)
{
    for (int s = p->stages - 1; s > 0 && v > 0 && v < p->n_recorded; s--) {
        const tt_tape *t = p->stage[s]->built.t;
        const tt__tape_value *base = &t->values[t->values[v].base];
        if (base->persistent || base->place != TT__NO_PLACE) return p->stage[s];
    }
    return p;
}

tt_status tt_get_rank(tt_program *head, int rank, tt_value v, float *to, size_t capacity)
{
    tt_program *p = tt__stage_with(head, v.id);
    const tt_tape *t = p->built.t;
    tt__now now = tt__now_of(head);
    const tt__tape_value *x = tt__has_value(t, v) ? &t->values[v.id] : NULL;
    tt_status status = tt__check_data_rank(p, "tt_get_rank", rank);
    if (status != TT_OK) return status;
    if (!x) return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_get: the value %s", tt__why_no_value(t, v));
    if (!(x->keep || x->persistent || v.id == p->built.root))
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_get: value %d is neither an output nor the root of this "
                        "program: mark it with tt_output", (int)v.id);
    if ((status = tt_wait(head, NULL)) != TT_OK) return status;
    if (!p->arena->allocated || (!x->persistent && head->arena->results_of != head))
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_get: '%s' has no contents now: call tt_get after a run "
                        "of this program, before the next tt_set and before a run of another program of its "
                        "arena", x->name);
    if (!x->persistent && rank >= now.present)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_get: '%s' has no contents on data rank %d, because only "
                        "the first %d data ranks had a micro-batch in the last run", x->name, rank,
                        now.present);
    if (x->storage == TT__PARAMETER && tt__is_in_parts(&t->values[x->base]))
        return tt__get_parameter(p, v.id, to, capacity);
    const int of = tt__first_of(p, rank);
    if (head->stages > 1) now.round = head->last_round;
    const tt__mat m = tt__resolve_in(p, &now, of, v.id);
    const size_t n = (size_t)(m.rows * m.cols);
    if (!tt__is_float(m.dtype))
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "tt_get: '%s' holds %s, but tt_get reads only floats: get "
                        "another value",
                        x->name, tt_dtype_name(m.dtype));
    if (capacity < n)
        return tt__fail(p->ctx, TT_ERR_SHAPE,
                        "tt_get: '%s' has %zu floats, but the buffer has room for %zu: pass a larger buffer",
                        x->name, n, capacity);
    status = x->persistent ? tt__zero_states(head) : TT_OK;
    tt__memory row = {p->arena, of, t->values[x->base].space, m.dtype, NULL};
    const bool whole = m.ld == m.cols; /* one read, or one message of another process, gives all rows */
    const int64_t rows = whole ? n > 0 : m.rows, cols = whole ? (int64_t)n : m.cols;
    for (int64_t r = 0; r < rows && status == TT_OK; r++, to += cols) {
        row.data = m.data ? tt__at(&m, r) : NULL;
        status = tt__fetch_memory(&row, to, TT_F32, (size_t)cols);
    }
    return status;
}

tt_status tt_get(tt_program *p, tt_value v, float *to, size_t capacity)
{
    tt_status status = tt__one_data_rank(p, "tt_get");
    return status == TT_OK ? tt_get_rank(p, 0, v, to, capacity) : status;
}

static void tt__forget_inputs(tt_program *p)
{
    for (int r = tt__first_of(p, 0); r < tt__end_rank(p->arena); r++) {
        memset(p->rank[r].input, TT__UNSET, (size_t)p->built.t->n_values);
        for (int v = 0; v < p->built.t->n_values && p->rank[r].staged; v++) p->rank[r].staged[v].arrived = 0;
        p->rank[r].inputs_set = 0;
    }
}

/* Returns whether any input that instructions read has been set on a rank since the last run, even if it has
   been overwritten. */
static bool tt__has_inputs(const tt_program *p, int rank)
{
    for (int32_t v = 1; v < p->n_recorded; v++)
        if (p->rank[rank].input[v] != TT__UNSET && tt__reads_input(p, v)) return true;
    return false;
}

/* Fails unless all inputs that instructions of tape t read are set on a rank. */
static tt_status tt__rank_inputs(const tt_program *p, const tt_tape *t, int rank)
{
    const tt__rank *r = &p->rank[rank];
    char of[32] = "";
    const char *set = p->arena->data > 1 ? "tt_set_rank" : "tt_set";
    if (p->arena->data > 1) snprintf(of, sizeof of, " of data rank %d", tt__data_rank(p, rank));
    for (int k = 0; k < t->n_code; k++)
        for (int j = 0; j < TT__MAX_IN; j++) {
            const int32_t base = t->values[t->code[k].in[j]].base;
            if (t->values[base].storage != TT__INPUT || r->input[base] == TT__SET) continue;
            if (r->input[base] == TT__OVERWRITTEN)
                return tt__fail(p->ctx, TT_ERR_ARGUMENT, "input '%s'%s was set, but then an update or "
                                "another program of the same arena overwrote it: call %s for all inputs "
                                "right before the run", t->values[base].name, of, set);
            if (p->refused[0])
                return tt__fail(p->ctx, TT_ERR_ARGUMENT, "input '%s'%s was not set before this run: %s",
                                t->values[base].name, of, p->refused);
            return tt__fail(p->ctx, TT_ERR_ARGUMENT, "input '%s'%s was not set before this run: call %s for "
                            "each input before each run", t->values[base].name, of, set);
        }
    return TT_OK;
}

/* Counts the data ranks that have a micro-batch (p->present), which are the lowest data ranks. Fails unless
   all inputs of these data ranks are set. */
static tt_status tt__inputs_ready(tt_program *p)
{
    const int data = p->arena->data, before = p->present;
    tt_status status = TT_OK;
    for (p->present = data; p->present > 1; p->present--)
        if (tt__has_inputs(p, tt__first_of(p, p->present - 1))) break;
    for (int d = 0; d < p->present; d++)
        for (int s = 0; s < tt__stages(p) && status == TT_OK; s++)
            status = tt__rank_inputs(p, p->stage[s]->built.t, tt__first_of(p, d));
    if (status == TT_OK && p->round > 0 && p->present > before)
        status = tt__fail(p->ctx, TT_ERR_ARGUMENT, "data rank %d has a micro-batch, but had none in an "
                          "earlier round of this step: only the last round of a step may leave data ranks "
                          "out", before);
    p->refused[0] = 0;
    if (status != TT_OK) p->present = before;
    if (status != TT_OK) tt__forget_inputs(p); /* the next micro-batch may have other numbers of rows */
    return status;
}

/* For tests: fills storages with NaN on a rank, after the instruction that uses them last. */
static void tt__poison(tt_program *p, int rank, int instruction)
{
    const tt__arena *a = p->arena;
    for (int k = 0; k < p->built.n_boxes && instruction < p->built.t->n_code - 1; k++) {
        const tt__box *box = &p->built.box[k];
        if (box->merged != k || box->last != instruction) continue;
        if (p->built.t->values[box->value].saved) continue; /* other micro-batches need the value */
        char *host = p->rank[rank].host + p->built.host_persistent + box->place;
        if (box->space == TT__HOST && a->kind->host) memset(host, 0xff, box->bytes);
        /* Host memory of a device's program stays as it is: the host would have to wait for the device, and
           that wait would hide wrong orders of streams. */
        if (box->space == TT__HOST) continue;
        char *memory = a->memory[rank] + a->persistent + box->place;
        a->kind->backend->fill(a->group->device[rank], memory, 0xff, box->bytes);
    }
}

/* Returns the matrix of value `id`. If the value is an input or a view of one, the matrix is in memory that
   the host can read. Any other value is in the rank's memory, which the host can read only on the CPU. */
static tt__mat tt__on_host(const tt_program *p, int rank, int32_t id)
{
    const tt__tape_value *x = &p->built.t->values[id];
    const tt__staged *staged = &p->rank[rank].staged[x->base];
    tt__mat m = tt__resolve(p, rank, id);
    const tt__now *now = &p->rank[rank].now;
    const bool waits = tt__stages(p) > 1; /* the data is in tt__queued until the run */
    if (x->storage != TT__INPUT || (!waits && !staged->buffer[0])) return m;
    const int64_t own = tt__is_own_rows(p->built.t, id) ? tt__own_first(p, now, rank, id) : 0;
    const char *from = waits ? tt__queued_at(p, now->round, rank)->inputs + p->head->queued_at[x->base]
                             : staged->buffer[staged->now];
    m.data = (char *)(uintptr_t)from + (size_t)(x->offset + own) * tt_dtype_bytes(m.dtype);
    return m;
}

/* Sets the fields of *l that tell which rows and columns of divided operands and results a tensor rank has.
   On tensor ranks other than 0, removes operands that count once in a sum over the ranks (tt__instr.once). */
static void tt__set_tensor_rank(const tt_program *p, int rank, tt__launch *l)
{
    const tt__instr *i = l->instr;
    const int tensor = p->arena->tensor, me = rank % tensor;
    const tt__now *now = &p->rank[rank].now;
    int32_t split = 0;
    l->first_row = l->first_col = l->whole_rows = 0;
    for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT && !split; j++) {
        const int32_t id = j < TT__MAX_IN ? i->in[j] : i->out[j - TT__MAX_IN];
        if (p->built.t->values[id].part.split != TT__WHOLE) split = id;
    }
    const tt__tape_value *v = &p->built.t->values[split];
    const bool own = v->part.split == TT__ROWS && v->shape.axis; /* the number of rows is that of an axis */
    if (split) l->whole_rows = v->shape.rows * (v->part.split == TT__ROWS ? tensor : 1);
    if (own) l->whole_rows = tt__run_rows(p, now, rank)[p->built.t->axes[v->shape.axis].of];
    if (v->part.split == TT__COLS) l->first_col = me * v->shape.cols;
    else if (own) tt__axis_rows(p, now, rank, v->shape.axis, &l->first_row);
    else if (split) l->first_row = me * v->shape.rows;
    for (int j = 0; j < TT__MAX_IN && me > 0; j++) if (i->once >> j & 1) l->in[j].data = NULL;
}

/* Checks, before anything runs, that a rank's inputs have valid indices and sequence starts for the ops that
   read them. Also counts the FLOPs of the rank's micro-batch. arg: the program. */
static tt_status tt__check_inputs(void *arg, int rank)
{
    tt_program *head = (tt_program *)arg, *p = tt__stage_of(head, rank);
    tt__launch *l = &p->rank[rank].launches[0];
    tt_status status = TT_OK;
    const int end = tt__segment_first(p->built.t, TT__EACH_LAP);
    p->rank[rank].flops = 0;
    p->rank[rank].now = tt__now_of(head);
    if (tt__data_rank(p, rank) >= head->present) return TT_OK;
    memset(l, 0, sizeof *l);
    l->tape = p->built.t;
    for (int k = 0; k < end && status == TT_OK; k++) {
        l->instr = &p->built.t->code[k];
        for (int j = 0; j < TT__MAX_IN; j++) l->in[j] = tt__on_host(p, rank, l->instr->in[j]);
        for (int j = 0; j < TT__MAX_OUT; j++) l->out[j] = tt__resolve(p, rank, l->instr->out[j]);
        if (p->arena->tensor > 1) tt__set_tensor_rank(p, rank, l);
        const tt__rules *rules = tt__rules_of(l->instr);
        status = rules->check ? rules->check(l) : TT_OK;
        /* the products of updates do not count, here as at the end of a step */
        if (status == TT_OK && !l->instr->always) p->rank[rank].flops += tt__flops(l->instr, l->in);
    }
    return status;
}

/* Returns whether a run of `segment` must add to gradients of earlier micro-batches. */
static bool tt__adds_later(const tt_program *p, tt__segment segment)
{
    const int64_t done = segment == TT__EACH_LAP ? p->round - 1 : p->round;
    return segment != TT__EACH_STEP && done >= tt__slots(p);
}

/* Returns the entry of r->recordings for a run with this stretch and slot and with equal numbers of rows;
   NULL if there is none. Each use of an entry adds credit. A run without an entry takes a credit from the
   entry whose turn it is; an entry without credit then belongs to this run, and the run's next repetition
   finds the entry. So frequent runs keep their recordings, however many other runs there are. */
static tt__recording *tt__recording_of(tt_program *p, int rank, tt__segment segment, int first)
{
    tt__rank *r = &p->rank[rank];
    const size_t all = sizeof *r->axis_rows * (size_t)p->built.t->n_axes;
    const bool later = r->now.later;
    const int slot = segment == TT__EACH_MICRO ? tt__slot(p, r->now.round)
                                               : tt__slots_used(p, r->now.round, segment);
    for (int k = 0; k < TT__RECORDINGS; k++) {
        tt__recording *x = &r->recordings[k];
        if (!x->rows || x->segment != segment || x->first != first) continue;
        if (x->later != later || x->slot != slot) continue;
        if (segment == TT__EACH_MICRO && memcmp(x->rows, r->axis_rows, all) != 0) continue;
        x->credit = (int)tt__min(x->credit + TT__RECORDING_USED, TT__RECORDING_MAX);
        return x;
    }
    tt__recording *x = &r->recordings[r->next_recording];
    r->next_recording = (r->next_recording + 1) % TT__RECORDINGS;
    if (x->credit-- > 0) return NULL;
    if (x->made) p->settings.kind->backend->forget(p->settings.group->device[rank], x->made);
    if (!x->rows) x->rows = (int64_t *)tt__alloc(p->ctx, all);
    if (x->rows) memcpy(x->rows, r->axis_rows, all);
    x->made = NULL;
    x->segment = segment;
    x->first = first;
    x->later = later;
    x->slot = slot;
    x->credit = 1;
    return NULL;
}
