#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../context/params.h"
#include "../files/safetensors.h"
#include "layout.h"
#include "few_bits.h"
#include "bitsandbytes.h"

/* ---- loading from checkpoint files: all parameters of a file share the open file */

enum { TT__BAND = 256 }; /* rows of a transposed parameter that are read together */

/* The source of a parameter: a tensor of a file, or a part of a tensor. */
typedef struct tt__checkpoint_tensor {
    tt_safetensors *file;
    int index;         /* index of the tensor in the file */
    int64_t first;     /* index of the tensor's element at which the parameter begins */
    int64_t width;     /* for order 'p': number of columns of the parameter */
    tt__packing order;
    tt_rounding packed; /* how a tensor in few bits is packed; scale: index of its scales */
    int scale;
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
    if (t->packed)
        return tt__packed_read(t->file, t->index, t->scale, t->packed, o->rows, o->width, first, n, to);
    if (!o->kind) return tt_safetensors_read_f32(t->file, t->index, t->first + first, n, to);
    for (int64_t part; n > 0 && status == TT_OK; first += part, to += part, n -= part) {
        const int64_t width = o->kind == 'p' ? t->width : o->width, r = first / width, c = first % width;
        part = tt__min(n, width - c);
        if (o->kind == 'p') {
            status = tt_safetensors_read_f32(t->file, t->index, t->first + r * o->width + c, part, to);
            continue;
        }
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

/* Fails if tensor `index` of file s has neither the shape of tt__tensor_fits nor the packed form of that
   shape, or if the packed form's scales are no finite floats. */
static tt_status tt__weight_fits(const tt_safetensors *s, int index, int ndim, const int64_t *dims,
                                 tt__part_of part, const char *param)
{
    int scale;
    const tt_rounding packed = ndim == 2 && !part.of ? tt__packed_as(s, index, dims[0], dims[1], &scale)
                                                     : TT_ROUND_NONE;
    if (packed) return tt__check_scales(s, scale, s->infos[index].name, packed);
    return tt__tensor_fits(s, index, ndim, dims, part, param);
}

/* Makes a tensor the source of parameter p: tensor `index` of file s. dims: the shape that p demands of the
   tensor (see tt__weight_fits). part: the part of the tensor that p is. order: the order of the file's
   elements, or NULL if it is the order of p. */
static tt_status tt__param_from_file(tt_param *p, tt_safetensors *s, int index, int ndim, const int64_t *dims,
                                     tt__part_of part, const tt__packing *order)
{
    const tt_tensor_info *info = &s->infos[index];
    tt_status status = tt__weight_fits(s, index, ndim, dims, part, p->name);
    if (status != TT_OK) return status;
    int scale = -1;
    const bool few = order && !order->kind && ndim == 2 && !part.of;
    const tt_rounding packed = few ? tt__packed_as(s, index, dims[0], dims[1], &scale) : TT_ROUND_NONE;
    if (!packed && tt__safetensors_type(info->dtype) > TT__ST_F64)
        return tt__fail(p->ctx, TT_ERR_FORMAT,
                        "'%s': tensor '%s' has dtype %s, but parameters must be F32, BF16, F16 or F64",
                        s->path, info->name, info->dtype);
    tt__checkpoint_tensor *t = (tt__checkpoint_tensor *)tt__calloc(p->ctx, sizeof *t);
    if (!t) return TT_ERR_MEMORY;
    if (order) t->order = *order;
    t->packed = packed;
    t->scale = scale;
    t->file = s;
    t->index = index;
    t->width = p->ndim > 1 ? p->dims[1] : 1;
    const int64_t whole = t->order.kind == 'p' ? t->order.rows * t->order.width : p->size;
    t->first = part.of ? (part.number - 1) * whole : 0;
    s->shared++;
    tt__param_drop_source(p);
    p->source = t;
    p->read = tt__checkpoint_read;
    p->release = tt__checkpoint_drop;
    return TT_OK;
}

/* Returns the index of the tensor `name`; -1 if the file has no such tensor. The file may lack the name's
   prefix, or have the name of older versions. */
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
                        "config.json, the other tensors require: copy the model's files again",
                        l->from->file[0]->path, name);
    return tt__fail(l->ctx, TT_ERR_FORMAT, "'%s' has no tensor '%s': it has %d layers, but config.json says "
                    "%d: correct config.json", l->from->file[0]->path, name, layer, l->layers);
}

/* Opens the quantised weight whose codes are tensor `index` of a file, and checks the weight's tensors. */
static tt_status tt__layout_open_bnb(const tt__layout *l, const tt__tensor_row *row, tt_safetensors *file,
                                     int index, tt__bnb *b)
{
    int64_t dims[4] = {0};
    const int ndim = tt__row_dims(l, row, dims);
    const tt__packing order = tt__row_order(l, row, ndim, dims);
    if (ndim == 2 && !tt__layout_part(l, row).of)
        return tt__bnb_open(b, file, index, dims[0], dims[1], &order);
    return tt__fail(l->ctx, TT_ERR_UNSUPPORTED, "'%s': tensor '%s' has dtype %s, but only the weights of "
                    "linear layers may be quantised: save the model again with other modules", file->path,
                    file->infos[index].name, file->infos[index].dtype);
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
        if (file && tt__is_bnb(file, index)) {
            tt__bnb quantised;
            status = tt__layout_open_bnb(l, row, file, index, &quantised);
        } else if (file && !tt__starts_anew(l, row, &file->infos[index], dims)) {
            status = tt__weight_fits(file, index, ndim, dims, tt__layout_part(l, row), name);
        }
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

/* Counts of a checkpoint's quantised weights. */
typedef struct tt__quantised {
    int tensors;     /* number of tensors of the weight that was attached last */
    int coded;       /* number of weights that keep their codes, as `dtype` */
    int floats;      /* number of weights that become floats; `first` is the name of the first */
    tt_dtype dtype;
    char first[200];
} tt__quantised;

static tt_status tt__layout_attach_bnb(const tt__layout *l, const tt__tensor_row *row, tt_param *p,
                                       tt_safetensors *file, int index, bool linear, tt__quantised *few)
{
    tt__bnb b;
    tt_status status = tt__layout_open_bnb(l, row, file, index, &b);
    if (status == TT_OK && p->size != b.rows * b.width)
        status = tt__fail(l->ctx, TT_ERR_UNSUPPORTED, "'%s': tensor '%s' is quantised, but config.json says "
                          "that heads were removed (\"kept_heads\"): such models must have floats",
                          file->path, file->infos[index].name);
    if (status == TT_OK) status = tt__param_from_bnb(p, &b, linear);
    if (status != TT_OK) return status;
    few->tensors = b.tensors;
    if (tt__is_coded(p->form)) few->dtype = p->form;
    else if (!few->floats) snprintf(few->first, sizeof few->first, "%.190s", tt_param_name(p));
    *(tt__is_coded(p->form) ? &few->coded : &few->floats) += 1;
    return TT_OK;
}

static void tt__quantised_say(const tt__layout *l, const char *path, const tt__quantised *few)
{
    if (few->coded)
        tt__log(l->ctx, TT_LOG_INFO, "checkpoint", "'%s': %d weights stay in %s, as in the file, and are "
                "frozen", path, few->coded, tt_dtype_name(few->dtype));
    if (few->floats)
        tt__log(l->ctx, TT_LOG_WARNING, "checkpoint", "'%s': %d quantised weights, the first of which is "
                "'%s', become floats, because only the layers' int8, and their nf4 in blocks of 64 with "
                "double quantisation, are kept as they are", path, few->floats, few->first);
}

/* Makes the checkpoint, which was checked, the source of the model's parameters. Warns if the checkpoint
   lacks a head, which then keeps its random initial values. */
static tt_status tt__layout_attach(const tt__layout *l)
{
    char text[2][1024];
    /* anew[0]: names of tensors that the files lack; anew[1]: names of tensors with another number of
       classes */
    tt__text_buffer anew[2] = {{text[0], sizeof text[0], 0}, {text[1], sizeof text[1], 0}};
    int64_t classes = 0; /* number of the file's classes, if not the model's */
    bool new_head = false;
    const tt__tensor_row *row;
    tt_safetensors *const *files = l->from->file;
    const char *path = files[0]->path;
    char name[256];
    int unused = 0;
    tt__quantised few = {0, 0, 0, TT_F32, ""};
    for (int k = 0; k < l->from->files; k++) unused += files[k]->count;
    for (int k = 0; (row = tt__layout_row(l, k, name)) != NULL; k++) {
        int64_t dims[4] = {0};
        int ndim = tt__row_dims(l, row, dims), index = -1;
        const tt__part_of part = tt__layout_part(l, row);
        tt__packing order = tt__row_order(l, row, ndim, dims);
        bool done = false;
        tt_param *p = *tt__layout_slot(l, row, k);
        if (!p || !ndim) continue;
        if (tt__is_padded(p, &order)) order.kind = 'p';
        tt__file_dims(l, row, dims);
        tt_safetensors *file = tt__layout_find(l, name, &index);
        const tt_tensor_info *info = file ? &file->infos[index] : NULL;
        if (info) unused -= part.number < 2; /* the parts of a packed tensor count once */
        int scale;
        if (info && ndim == 2 && tt__packed_as(file, index, dims[0], dims[1], &scale)) unused--;
        const bool of_others = info && tt__starts_anew(l, row, info, dims);
        if (!info || of_others) {
            tt__print(&anew[of_others], "%s'%s'", anew[of_others].length ? ", " : "", name);
            if (of_others) classes = info->dims[0];
            new_head |= row->head != 2;
            continue;
        }
        tt_status status = TT_OK;
        if (tt__is_bnb(file, index)) {
            status = tt__layout_attach_bnb(l, row, p, file, index, k >= l->a->n_model, &few);
            unused -= few.tensors - 1;
            done = true;
        }
        if (status == TT_OK && l->a->adapt && !done) status = l->a->adapt(row, p, file, index, &done);
        if (status == TT_OK && !done) status = tt__param_from_file(p, file, index, ndim, dims, part, &order);
        if (status != TT_OK) return status;
    }
    if (l->a->new_head_at) l->self[l->a->new_head_at] = new_head;
    tt__quantised_say(l, path, &few);
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
