#pragma once
#include "../../base/base.h"
#include "../../tape/tape.h"
#include "../../tape/record.h"
#include "../record.h"
#include "../shapes.h"
#include "../layouts.h"
#include "../scratch.h"

/* -------------------------------------------------------------------------------------------- gather_rows */

static bool tt__shape_GATHER_ROWS(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_shape(&out[0], tt__in(t, i, 0)->dtype, tt__in(t, i, 1), tt__in(t, i, 0)->cols);
    return tt__float_in(t, i, 0) && tt__index_in(t, i, 1);
}

tt_value tt_gather_rows(tt_tape *t, tt_value x, tt_value index)
{
    return tt__record(t, tt__new_instr(TT__OP_GATHER_ROWS), "vv", x, index);
}

/* Fails unless each number in operand 1 is the number of a row of operand 0. */
static tt_status tt__check_rows(const tt__launch *l)
{
    const char *what = tt__is(l->instr, TT__GATHERS) ? "rows to gather from" : "rows to set";
    return tt__check_indices(l, 1, l->in[0].rows, NULL, what);
}

static const tt__rules tt__rules_GATHER_ROWS = {tt__shape_GATHER_ROWS, tt__layout_by_columns,
    {NULL, "g1", "0", TT__OP_GATHER_ROWS_BACKWARD}, NULL, NULL, tt__check_rows};

static bool tt__shape_by_index(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    tt__set_shape(&out[0], TT_F32, &t->values[i->out[0]].shape, tt__in(t, i, 0)->cols);
    return tt__float_in(t, i, 0) && tt__index_in(t, i, 1);
}

static const tt__rules tt__rules_GATHER_ROWS_BACKWARD = {tt__shape_by_index, tt__layout_by_columns, {NULL},
    NULL, tt__sort_bytes};

/* ---------------------------------------------------------------------------------------------- mean_pool */

static bool tt__shape_MEAN_POOL(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    if (!tt__shape_GATHER_ROWS(t, i, out)) return false;
    if (out[0].axis && !out[0].extra) return tt__bad(t, i, 1, "sequence starts, from tt_seq_start");
    if (out[0].axis) out[0].extra = 0;
    out[0].rows--;
    return out[0].rows >= 1 || tt__bad(t, i, 1, "sequence starts of at least one sequence");
}

tt_value tt_mean_pool(tt_tape *t, tt_value x, tt_value seq_start)
{
    return tt__record(t, tt__new_instr(TT__OP_MEAN_POOL), "vv", x, seq_start);
}

tt_value tt_sum_pool(tt_tape *t, tt_value x, tt_value seq_start)
{
    tt__instr i = tt__new_instr(TT__OP_MEAN_POOL);
    i.attr.sums = true;
    return tt__record(t, i, "vv", x, seq_start);
}

static tt_status tt__check_MEAN_POOL(const tt__launch *l) { return tt__check_starts(l, 1, l->in[0].rows); }

static const tt__rules tt__rules_MEAN_POOL = {tt__shape_MEAN_POOL, tt__layout_by_columns,
    {NULL, "g1", "0", TT__OP_MEAN_POOL_BACKWARD}, NULL, NULL, tt__check_MEAN_POOL};
static const tt__rules tt__rules_MEAN_POOL_BACKWARD = {tt__shape_by_index, tt__layout_by_columns};

/* ----------------------------------------------------------------------------------------------- set_rows */

static bool tt__shape_SET_ROWS(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = *tt__in(t, i, 0);
    return tt__float_in(t, i, 0) && tt__index_in(t, i, 1) && tt__fixed_in(t, i, 2, 1, out[0].cols);
}

tt_value tt_set_rows(tt_tape *t, tt_value x, tt_value index, tt_param *row)
{
    return tt__record(t, tt__new_instr(TT__OP_SET_ROWS), "vvp", x, index, row);
}

static const tt__rules tt__rules_SET_ROWS = {tt__shape_SET_ROWS, NULL,
    {NULL, "g1", "02", TT__OP_SET_ROWS_BACKWARD}, NULL, NULL, tt__check_rows};

/* --------------------------------------------------------------------------------------------- store_rows
   Instructions read and write a cache in the order in which they were recorded. Training a model that has a
   cache fails, because no gradient can flow back through rows that an earlier run stored. */

tt_value tt_cache(tt_tape *t, const char *name, int64_t rows, int64_t width)
{
    if (t->status != TT_OK) return tt__handle(t, 0);
    if (rows < 1 || width < 1) {
        tt__tape_fail(t, TT_ERR_SHAPE, "cache '%s' has %lld rows of width %lld, but both must be at least 1",
                      name, (long long)rows, (long long)width);
        return tt__handle(t, 0);
    }
    const tt__shape shape = {TT_F32, rows, width, 0, 0};
    const int32_t id = tt__new_value(t, &shape, TT__CACHE, "%s", name);
    if (id) t->values[id].persistent = true;
    return tt__handle(t, id);
}

static bool tt__shape_STORE_ROWS(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = t->values[i->out[0]].shape;
    return tt__index_in(t, i, 1) && tt__shape_in(t, i, 0, tt__in(t, i, 1), out[0].cols);
}

tt_value tt_store_rows(tt_tape *t, tt_value cache, tt_value x, tt_value index)
{
    tt__shape shape[TT__MAX_OUT];
    tt__instr i = tt__new_instr(TT__OP_STORE_ROWS);
    if (!tt__on_tape(t, "store_rows", 0, cache) || !tt__on_tape(t, "store_rows", 1, x) ||
        !tt__on_tape(t, "store_rows", 2, index)) return tt__handle(t, 0);
    const tt__tape_value *c = &t->values[cache.id];
    if (c->storage != TT__CACHE || c->base != cache.id) {
        tt__tape_fail(t, TT_ERR_ARGUMENT,
                      "store_rows: '%s' is not a cache: store rows in a value of tt_cache", c->name);
        return tt__handle(t, 0);
    }
    i.in[0] = x.id;
    i.in[1] = index.id;
    i.out[0] = cache.id;
    if (!tt__shape_of(t, &i, shape)) return tt__handle(t, 0);
    tt__instr *to = tt__append(t, i.op);
    if (!to) return tt__handle(t, 0);
    i.random = to->random;
    *to = i;
    return cache;
}

static tt_status tt__check_STORE_ROWS(const tt__launch *l)
{
    return tt__check_indices(l, 1, l->out[0].rows, NULL, "rows to store");
}

static const tt__rules tt__rules_STORE_ROWS = {tt__shape_STORE_ROWS, NULL, {NULL}, NULL, NULL,
    tt__check_STORE_ROWS};

static bool tt__shape_SET_ROWS_BACKWARD(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    out[0] = *tt__in(t, i, 0);
    tt__set_fixed(&out[1], TT_F32, 1, out[0].cols);
    return tt__float_in(t, i, 0) && tt__index_in(t, i, 1);
}

/* Returns the bytes of scratch on a CPU: a mark for each row, and rows for the threads. */
static size_t tt__cpu_SET_ROWS_BACKWARD(int threads, const tt_tape *t, const tt__instr *i)
{
    return tt__align_up((size_t)tt__in(t, i, 0)->rows) + tt__widen_bytes(threads, t, i);
}

static const tt__rules tt__rules_SET_ROWS_BACKWARD = {tt__shape_SET_ROWS_BACKWARD, NULL, {NULL},
    tt__cpu_SET_ROWS_BACKWARD};

/* ------------------------------------------------------------------------------------------------ patches */

tt_patch_options tt_patch_options_default(int height, int width, int channels, int patch)
{
    tt_patch_options o;
    memset(&o, 0, sizeof o);
    o.height = height;
    o.width = width;
    o.channels = channels;
    o.patch = patch;
    for (int c = 0; c < 4; c++) o.mean[c] = o.std[c] = 0.5f;
    return o;
}

static bool tt__shape_PATCHES(tt_tape *t, const tt__instr *i, tt__shape *out)
{
    const tt__shape *pixels = tt__in(t, i, 0), *starts = tt__in(t, i, 2);
    const tt_patch_options *o = &i->attr.image;
    bool image = o->height >= 1 && o->width >= 1 && o->channels >= 1 && o->channels <= 4;
    if (!image || o->patch < 1 || o->height % o->patch || o->width % o->patch)
        return tt__tape_fail(t, TT_ERR_ARGUMENT, "patches: images of %d x %d pixels and %d channels cannot "
                             "be cut into patches of %d x %d: use 1 to 4 channels, and sides that are "
                             "multiples of a patch's", o->width, o->height, o->channels, o->patch, o->patch);
    for (int c = 0; c < o->channels; c++)
        if (!isfinite(o->mean[c]) || !(o->std[c] > 0))
            return tt__tape_fail(t, TT_ERR_ARGUMENT, "patches: mean is %g and std is %g for channel %d, but "
                                 "mean must be finite, and std above 0", o->mean[c], o->std[c], c);
    int64_t size = (int64_t)o->height * o->width * o->channels;
    if (pixels->dtype != TT_U8 || pixels->cols != size)
        return tt__bad(t, i, 0, "u8 of width %lld (height * width * channels)", (long long)size);
    if (!tt__index_in(t, i, 1) || !tt__index_in(t, i, 2)) return false;
    if (starts->axis != pixels->axis || starts->rows != pixels->rows + 1)
        return tt__bad(t, i, 2, "one row more than there are images");
    tt__set_shape(&out[0], TT_F32, tt__in(t, i, 1), (int64_t)o->channels * o->patch * o->patch);
    return true;
}

tt_value tt_patches(tt_tape *t, tt_value pixels, tt_value positions, tt_value seq_start,
                    const tt_patch_options *o)
{
    tt__instr i = tt__new_instr(TT__OP_PATCHES);
    i.attr.image = *o;
    return tt__record(t, i, "vvv", pixels, positions, seq_start);
}

static tt_status tt__check_PATCHES(const tt__launch *l)
{
    const tt_patch_options *o = &l->instr->attr.image;
    int64_t patches = (int64_t)(o->height / o->patch) * (o->width / o->patch);
    tt_status status = tt__check_starts(l, 2, l->out[0].rows);
    if (status != TT_OK) return status;
    return tt__check_indices(l, 1, patches + 1, NULL, "0 or the number of a patch");
}

static size_t tt__cpu_PATCHES(int threads, const tt_tape *t, const tt__instr *i)
{
    return tt__buffer_bytes(threads, t->values[i->out[0]].shape.cols);
}

static const tt__rules tt__rules_PATCHES = {tt__shape_PATCHES, NULL, {NULL}, tt__cpu_PATCHES, NULL,
    tt__check_PATCHES};
