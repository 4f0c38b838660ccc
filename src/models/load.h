#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../context/params.h"
#include "../files/safetensors.h"
#include "layout.h"

/* ---- loading from checkpoint files: all parameters of a file share the open file */

enum { TT__BAND = 256 }; /* rows of a transposed parameter that are read together */

/* The source of a parameter: a tensor of a file, or a part of one. */
typedef struct tt__checkpoint_tensor {
    tt_safetensors *file;
    int index;         /* index of the tensor in the file */
    int64_t first;     /* index of the tensor's element at which the parameter begins */
    tt__packing order;
    float *band;       /* for order 't': the rows that were read last, (band_rows, width); NULL: none */
    int64_t band_row, band_rows; /* first row and number of rows of `band` */
} tt__checkpoint_tensor;

/* Reads the rows of a transposed parameter around row r into t->band: TT__BAND rows from a multiple of
   TT__BAND on, fewer at the end. */
static tt_status tt__checkpoint_band(tt__checkpoint_tensor *t, int64_t r)
{
    tt_context *ctx = t->file->ctx;
    const tt__packing *o = &t->order;
    const int64_t row = r / TT__BAND * TT__BAND, rows = tt__min(TT__BAND, o->rows - row);
    float column[TT__BAND];
    tt_status status = TT_OK;
    if (!t->band) t->band = (float *)tt__alloc(ctx, sizeof(float) * TT__BAND * (size_t)o->width);
    if (!t->band) return TT_ERR_MEMORY;
    t->band_rows = 0;
    for (int64_t c = 0; c < o->width && status == TT_OK; c++) {
        status = tt_safetensors_read_f32(t->file, t->index, c * o->rows + row, rows, column);
        for (int64_t k = 0; k < rows && status == TT_OK; k++) t->band[k * o->width + c] = column[k];
    }
    if (status != TT_OK) return status;
    t->band_row = row;
    t->band_rows = rows;
    return TT_OK;
}

static tt_status tt__checkpoint_read(void *source, int64_t first, int64_t n, float *to)
{
    tt__checkpoint_tensor *t = (tt__checkpoint_tensor *)source;
    const tt__packing *o = &t->order;
    tt_status status = TT_OK;
    if (!o->kind) return tt_safetensors_read_f32(t->file, t->index, t->first + first, n, to);
    for (int64_t part; n > 0 && status == TT_OK; first += part, to += part, n -= part) {
        const int64_t r = first / o->width, c = first % o->width;
        part = tt__min(n, o->width - c);
        if (o->kind == 'g') {
            part = tt__min(n, (o->size - r % o->size) * o->width - c); /* elements to the end of the head */
            status = tt_safetensors_read_f32(t->file, t->index, tt__packing_row(o, r, false) * o->width + c,
                                             part, to);
            continue;
        }
        if (r < t->band_row || r >= t->band_row + t->band_rows) status = tt__checkpoint_band(t, r);
        if (status == TT_OK)
            memcpy(to, t->band + (r - t->band_row) * o->width + c, sizeof *to * (size_t)part);
        if (r + 1 < o->rows || c + part < o->width) continue;
        tt__free(t->file->ctx, t->band); /* the whole parameter has been read */
        t->band = NULL;
        t->band_rows = 0;
    }
    return status;
}

static void tt__checkpoint_drop(tt_context *ctx, void *source)
{
    tt__checkpoint_tensor *t = (tt__checkpoint_tensor *)source;
    tt_safetensors_close(t->file);
    tt__free(ctx, t->band);
    tt__free(ctx, t);
}

/* Fails if the shape of tensor `index` of file s is not `dims` or, for a part of a packed tensor, is not
   `dims` with three times as many rows. */
static tt_status tt__tensor_fits(const tt_safetensors *s, int index, int ndim, const int64_t *dims, int part,
                                 const char *param)
{
    const tt_tensor_info *info = &s->infos[index];
    const int64_t rows = ndim ? dims[0] * (part ? 3 : 1) : 0;
    bool same = info->ndim == ndim;
    for (int k = 0; k < ndim && same; k++) same = info->dims[k] == (k ? dims[k] : rows);
    if (same) return TT_OK;
    char text[256];
    tt__text_buffer shapes = {text, sizeof text, 0};
    tt__print(&shapes, "(");
    for (int k = 0; k < info->ndim; k++) tt__print(&shapes, k ? ", %lld" : "%lld", (long long)info->dims[k]);
    tt__print(&shapes, "), expected (");
    for (int k = 0; k < ndim; k++) tt__print(&shapes, k ? ", %lld" : "%lld", (long long)(k ? dims[k] : rows));
    return tt__fail(s->ctx, TT_ERR_SHAPE, "'%s': tensor '%s' has shape %s) for parameter '%s'", s->path,
                    info->name, text, param);
}

/* Makes a tensor the source of parameter p: tensor `index` of file s. dims: the shape that p demands of the
   tensor (see tt__tensor_fits). part: 1 to 3 if p is only that third of the tensor; 0 if p is the whole
   tensor. order: the order of the file's elements, or NULL if it is the order of p. */
static tt_status tt__param_from_file(tt_param *p, tt_safetensors *s, int index, int ndim, const int64_t *dims,
                                     int part, const tt__packing *order)
{
    const tt_tensor_info *info = &s->infos[index];
    tt_status status = tt__tensor_fits(s, index, ndim, dims, part, p->name);
    if (status != TT_OK) return status;
    if (tt__safetensors_type(info->dtype) > TT__ST_F64)
        return tt__fail(p->ctx, TT_ERR_FORMAT,
                        "'%s': tensor '%s' has dtype %s, but parameters must be F32, BF16, F16 or F64",
                        s->path, info->name, info->dtype);
    tt__checkpoint_tensor *t = (tt__checkpoint_tensor *)tt__calloc(p->ctx, sizeof *t);
    if (!t) return TT_ERR_MEMORY;
    if (order) t->order = *order;
    t->file = s;
    t->index = index;
    t->first = part ? (part - 1) * p->size : 0;
    s->shared++;
    tt__param_drop_source(p);
    p->source = t;
    p->read = tt__checkpoint_read;
    p->release = tt__checkpoint_drop;
    return TT_OK;
}

/* Returns the index of the tensor `name`, also without its prefix or under the name of older versions, or -1
   if the file has no such tensor. */
static int tt__find_tensor(const tt_safetensors *s, const char *name, const char *prefix)
{
    static const char *const old[][2] = {{"LayerNorm.weight", "LayerNorm.gamma"},
                                         {"LayerNorm.bias", "LayerNorm.beta"},
                                         {"mlp.0.", "mlp.linear_1."},
                                         {"mlp.3.", "mlp.linear_2."}};
    char other[256];
    const char *plain = strncmp(name, prefix, strlen(prefix)) == 0 ? name + strlen(prefix) : name;
    int index = tt_safetensors_find(s, name);
    if (index < 0) index = tt_safetensors_find(s, plain);
    for (int k = 0; k < 2 * TT__COUNT(old) && index < 0; k++) {
        const char *from = k % 2 ? name : plain, *now = old[k / 2][0], *at = strstr(from, now);
        if (!at) continue;
        snprintf(other, sizeof other, "%.*s%s%s", (int)(at - from), from, old[k / 2][1], at + strlen(now));
        index = tt_safetensors_find(s, other);
    }
    return index;
}

/* Returns the file of the checkpoint that has the tensor `name`, and sets *index to the tensor's index in
   that file. Returns NULL if no file has the tensor. */
static tt_safetensors *tt__layout_find(const tt__layout *l, const char *name, int *index)
{
    for (int k = 0; k < l->from->files; k++) {
        *index = tt__find_tensor(l->from->file[k], name, l->a->prefix[l->naming]);
        if (*index >= 0) return l->from->file[k];
    }
    return NULL;
}

/* Returns whether tensor `info`, a classifier (its shape begins with the letter C, K or N), does not fit the
   model: it is for another task or another number of classes. The model's classifier then keeps its random
   initial values. */
static bool tt__starts_anew(const tt__layout *l, const tt__tensor_row *row, const tt_tensor_info *info,
                            const int64_t *dims)
{
    return row->head && strchr("CKN", row->shape[0]) && (l->from->other_head || info->dims[0] != dims[0]);
}

/* Fails because tensor k, `name`, is missing. If its layer has no tensor at all, the message says how many
   layers the checkpoint has. */
static tt_status tt__layout_lacks(const tt__layout *l, int k, const char *name)
{
    const tt__architecture *a = l->a;
    const int layer = k < a->n_model ? 0 : (k - a->n_model) / a->n_layer;
    char other[256];
    int index;
    bool any = layer == 0; /* whether the checkpoint has any tensor of the layer */
    for (int i = 0; i < a->n_layer && !any; i++) {
        const tt__tensor_row *row = tt__layout_row(l, a->n_model + layer * a->n_layer + i, other);
        any = row->name[l->naming] && tt__layout_find(l, other, &index);
    }
    if (any)
        return tt__fail(l->ctx, TT_ERR_FORMAT, "'%s' has no tensor '%s', which config.json or, without a "
                        "config.json, the other tensors require", l->from->file[0]->path, name);
    return tt__fail(l->ctx, TT_ERR_FORMAT,
                    "'%s' has no tensor '%s': it has %d layers, but config.json says %d",
                    l->from->file[0]->path, name, layer, l->layers);
}

/* Fails unless the checkpoint has each tensor of the layout with the right shape. Called before memory for
   the tensors is allocated. */
static tt_status tt__layout_check(const tt__layout *l)
{
    const tt__tensor_row *row;
    char name[256];
    for (int k = 0; (row = tt__layout_row(l, k, name)) != NULL; k++) {
        int64_t dims[4];
        int ndim = tt__file_dims(l, row, dims), index = -1;
        if (!ndim || !row->name[l->naming]) continue;
        tt_safetensors *file = tt__layout_find(l, name, &index);
        tt_status status = TT_OK;
        if (file && !tt__starts_anew(l, row, &file->infos[index], dims))
            status = tt__tensor_fits(file, index, ndim, dims, tt__layout_part(l, row), name);
        if (!file && !row->head) status = tt__layout_lacks(l, k, name);
        if (status != TT_OK) return status;
    }
    return TT_OK;
}

/* Returns whether a tensor of a file is not a parameter, but a buffer or a copy that the model does not
   need. */
static bool tt__is_buffer(const tt__layout *l, const char *name)
{
    for (const char *const *pattern = l->a->buffers; pattern && *pattern; pattern++)
        if (tt__match(*pattern, name)) return true;
    if (!l->size['X' - 'A'] && (tt__match("*lm_head.weight", name) || tt__match("*embed_out.weight", name)))
        return true; /* a copy of the tied embedding */
    return tt__match("*embeddings.position_ids", name);
}

/* Makes the checkpoint, which was checked, the source of the model's parameters. Warns if the checkpoint
   lacks a head, which then keeps its random initial values. */
static tt_status tt__layout_attach(const tt__layout *l)
{
    char text[2][1024];
    /* Lists of names: of tensors that the files lack; of tensors with another number of classes. */
    tt__text_buffer anew[2] = {{text[0], sizeof text[0], 0}, {text[1], sizeof text[1], 0}};
    int64_t classes = 0; /* number of the file's classes, if not the model's */
    bool new_head = false;
    const tt__tensor_row *row;
    tt_safetensors *const *files = l->from->file;
    const char *path = files[0]->path;
    char name[256];
    int unused = 0;
    for (int k = 0; k < l->from->files; k++) unused += files[k]->count;
    for (int k = 0; (row = tt__layout_row(l, k, name)) != NULL; k++) {
        int64_t dims[4] = {0};
        int ndim = tt__row_dims(l, row, dims), part = tt__layout_part(l, row), index = -1;
        const tt__packing order = tt__row_order(l, row, ndim, dims);
        bool done = false;
        tt_param *p = *tt__layout_slot(l, row, k);
        if (!p || !ndim) continue;
        tt__file_dims(l, row, dims);
        tt_safetensors *file = tt__layout_find(l, name, &index);
        const tt_tensor_info *info = file ? &file->infos[index] : NULL;
        if (info) unused -= part < 2; /* the three parts of a packed tensor count once */
        const bool of_others = info && tt__starts_anew(l, row, info, dims);
        if (!info || of_others) {
            tt__print(&anew[of_others], "%s'%s'", anew[of_others].length ? ", " : "", name);
            if (of_others) classes = info->dims[0];
            new_head |= row->head != 2;
            continue;
        }
        tt_status status = l->a->adapt ? l->a->adapt(row, p, file, index, &done) : TT_OK;
        if (status == TT_OK && !done) status = tt__param_from_file(p, file, index, ndim, dims, part, &order);
        if (status != TT_OK) return status;
    }
    if (l->a->new_head_at) l->self[l->a->new_head_at] = new_head;
    if (anew[0].length)
        tt__log(l->ctx, TT_LOG_WARNING, "checkpoint",
                "'%s' has no %s: these start with new values, which must be trained", path, text[0]);
    if (anew[1].length && l->from->other_head)
        tt__log(l->ctx, TT_LOG_WARNING, "checkpoint", "'%s' has a classifier for another task: %s start with "
                "new values, which must be trained", path, text[1]);
    else if (anew[1].length)
        tt__log(l->ctx, TT_LOG_WARNING, "checkpoint", "'%s' has %lld classes, but %lld are requested: %s "
                "start with new values, which must be trained", path, (long long)classes,
                (long long)tt__int_field(l->self + l->a->config_at, l->a->classes), text[1]);
    for (int f = 0; f < l->from->files; f++)
        for (int k = 0; k < files[f]->count && unused > 0; k++)
            unused -= tt__is_buffer(l, files[f]->infos[k].name);
    if (unused > 0)
        tt__log(l->ctx, TT_LOG_WARNING, "checkpoint",
                "'%s': %d tensors are not part of this model and were ignored", path, unused);
    return TT_OK;
}
