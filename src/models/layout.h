#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../files/safetensors.h"

/* ===========================================================================================================
   MODELS                                                                                          src/models/
   BERT, ViT and decoders (language models). A model is a struct of named parameters, with functions that
   record ops. This code uses the public API, and files/ to read and write checkpoints.
   ======================================================================================================== */

/* ----------------------------------------------------------------------------------- tables of architectures
   A table lists a model's parameters and the numbers of its config: the offset in the struct, the name in
   files, and the shape. With these tables one code makes, checks, loads and saves all architectures. A file
   follows one of two namings: BERT's or DistilBERT's; for ViT, transformers' or torchvision's. Each kind of
   decoder has its own table, with one naming. */

typedef struct tt__tensor_row {
    size_t offset;       /* offset of the tt_param * in the struct of the model or of a layer */
    const char *name[2]; /* name in each naming; a leading '.' stands for the prefix. NULL: no name */
    const char *shape;   /* a letter for each dimension, see tt__sizes; the digit '1' stands for 1. The model
                            lacks a tensor with a dimension of 0. The parameter drops leading dimensions of
                            1 */
    char init;           /* 'n' normal, '1' ones, '0' zeros */
    char part;           /* in naming 1, the part of a packed tensor that the parameter is: 1 to 3 are thirds,
                            4 and 5 are halves; 0: the tensor is not packed */
    char head;           /* 0: files must have the tensor. 1 and 2: the tensor belongs to a head and keeps its
                            random initial values if files lack it; 2: no logits depend on it */
    char order;          /* order of the elements in files, see tt__packing; 'l': the order of the parameter,
                            and the first layer lacks the tensor */
} tt__tensor_row;

/* A packed tensor has `of` parts; a parameter is part number `number`, from 1 on. of 0: it is not packed. */
typedef struct tt__part_of { int number, of; } tt__part_of;

typedef struct tt__config_row {
    const char *field, *key[2]; /* name in the config's struct; key of config.json in each naming, or NULL */
    size_t offset;              /* offset of the field in the config's struct */
    char kind;   /* 'N': an int of at least 1 that config.json must have; 'n': an int of at least 1; '0': an
                    int of at least 0; 'p': a float in [0, 1); 'f': a float of at least 0; 'b': a bool */
    char letter; /* letter that stands for this number in shapes; 0: none */
} tt__config_row;

typedef int64_t tt__sizes['Z' - 'A' + 1]; /* size for which each letter of shapes stands */

typedef struct tt__architecture {
    const char *name;            /* name of the architecture in messages */
    int naming;                /* index of the naming for config.json and a new model's parameters */
    const char *class_name, *type;       /* values of "architectures" and "model_type" in config.json */
    const char *activation_key, *more;   /* activation_key: key of the activation in config.json; more:
                                            members of config.json that are equal in all models */
    const char *prefix[2];       /* prefix of tensor names in each naming; files may lack the prefix */
    const char *layer_prefix[2]; /* prefix of a layer's tensors after `prefix`; %d is the layer's number.
                                    Without %d all layers share one layer's parameters */
    const tt__tensor_row *model, *layer; /* n_model rows for the model, n_layer rows for each layer */
    const tt__config_row *config;        /* n_config rows */
    int n_model, n_layer, n_config;
    size_t bytes, config_bytes, layer_bytes; /* bytes of the structs of a model, its config and a layer */
    size_t config_at, names_at, new_head_at, layers_at; /* offsets of fields in the model's struct; 0: no
                                                           such field */
    size_t hidden, layers, classes, activation, range; /* offsets of fields in the config's struct; 0:
                                                                 no such field */
    void (*sizes)(const void *config, tt__sizes size);        /* sets the sizes that no config row gives */
    /* Appends to `all` the mistakes in a config that the table rows do not show. NULL: the table rows show
       all mistakes. */
    void (*check)(tt__text_buffer *all, const void *config);
    /* Reads a tensor whose shape differs from the parameter's, if the model can adapt the tensor, and sets
       *done. NULL: the architecture adapts no tensor. */
    tt_status (*adapt)(const tt__tensor_row *row, tt_param *p, tt_safetensors *s, int index, bool *done);
    size_t image_size;          /* offset of the field in the config's struct; 0: no such field */
    /* Prints the members of config.json that no table row describes. NULL: the table rows describe all
       members. */
    void (*print)(tt__text_buffer *json, const void *self, const void *config);
    const char *const *buffers; /* name patterns of tensors that are no parameters, ended by NULL; NULL: there
                                   are none */
    /* Returns the end of the class name in "architectures", which follows class_name. If the end does not
       contain "Classification", the model has no classifier. If the end is "Model", tensors' names in files
       have no prefix. NULL: class_name is the whole name. */
    const char *(*head)(const void *config);
    /* Turns a config into that of the model's files, which may have more heads than the model: heads that
       were removed are zeros there. NULL: files have the model's config. */
    void (*of_files)(void *config);
} tt__architecture;

/* Initialises the fields `bytes` to `range` of an architecture with the structs X, X_config and X_layer. */
#define TT__STRUCTS(X) \
    sizeof(X), sizeof(X##_config), sizeof(X##_layer), offsetof(X, config), \
    offsetof(X, class_names), offsetof(X, new_head), offsetof(X, layer), \
    offsetof(X##_config, hidden_size), offsetof(X##_config, layers), \
    offsetof(X##_config, classes), \
    offsetof(X##_config, activation), offsetof(X##_config, initializer_range)
/* Macros for table rows: for a tensor; for the weight and the bias of a linear layer or a norm; for a field
   of a config. a: name or key in naming 0; b: in naming 1. */
#define TT__TENSOR(X, field, a, b, shape, init, head) {offsetof(X, field), {a, b}, shape, init, 0, head, 0}
#define TT__WEIGHT_BIAS(X, field, a, b, shape, rows, init, head) \
    TT__TENSOR(X, field##_w, a ".weight", b ".weight", shape, init, head), \
    TT__TENSOR(X, field##_b, a ".bias", b ".bias", rows, '0', head)
#define TT__CONFIG(X, field, kind, letter, a, b) {#field, {a, b}, offsetof(X##_config, field), kind, letter}

static int tt__int_field(const void *config, size_t offset)
{
    return *(const int *)(const void *)((const char *)config + offset);
}

/* Returns the number of columns of a head. head_size: the config's field; 0: the heads share the hidden
   size. */
static int tt__head_size(int hidden, int heads, int head_size)
{
    return head_size > 0 ? head_size : heads > 0 ? hidden / heads : 0;
}

static float tt__float_field(const void *config, size_t offset)
{
    return *(const float *)(const void *)((const char *)config + offset);
}

static void *tt__pointer_at(const void *self, size_t offset)
{
    void *p;
    memcpy(&p, (const char *)self + offset, sizeof p);
    return p;
}

/* Returns the end of the class's name in config.json, after class_name, such as "ForTokenClassification". */
static const char *tt__head_name(const tt__architecture *a, const void *config)
{
    return a->head ? a->head(config) : "";
}

static bool tt__classifies(const tt__architecture *a, const void *config)
{
    return a->classes && (!a->head || strstr(a->head(config), "Classification"));
}

/* Returns the number of outputs of a model's classifier; 0: the model has no classifier. */
static int tt__outputs(const tt__architecture *a, const void *config)
{
    return tt__classifies(a, config) ? tt__int_field(config, a->classes) : 0;
}

/* A checkpoint that is being read: its config.json and its open files of tensors. */
typedef struct tt__checkpoint {
    char path[TT__PATH];   /* path of config.json, for messages */
    tt__file_bytes text;   /* text of config.json */
    tt__json config;       /* config.json as parsed; empty: no such file */
    tt_safetensors **file; /* the `files` open files of tensors */
    int files, naming;   /* naming: number of the naming of the tensors */
    bool other_head;       /* the checkpoint's classifier is for another task: the model gets a new one */
} tt__checkpoint;

/* Description of the parameters of a model that exists or will be made. */
typedef struct tt__layout {
    tt_context *ctx;
    const tt__architecture *a;
    char *self, *layer_self; /* structs of the model and of its first layer; NULL: not made yet */
    int layers;              /* number of layers with parameters: 1 if all layers share them */
    int naming;            /* number of the naming of the tensors */
    bool bare;               /* names in saved files have no prefix */
    const tt__checkpoint *from; /* the checkpoint to read; NULL: none */
    tt__sizes size;
} tt__layout;

/* Returns the layout of a model, in the naming of checkpoint `from` or, if `from` is NULL, of the
   architecture. */
static tt__layout tt__layout_of(tt_context *ctx, const tt__architecture *a, const void *self,
                                const void *config, const tt__checkpoint *from)
{
    tt__layout l;
    memset(&l, 0, sizeof l);
    l.ctx = ctx;
    l.a = a;
    l.self = (char *)(uintptr_t)self;
    l.layer_self = self ? (char *)tt__pointer_at(self, a->layers_at) : NULL;
    l.naming = from ? from->naming : a->naming;
    l.layers = strstr(a->layer_prefix[l.naming], "%d") ? tt__int_field(config, a->layers) : 1;
    l.from = from;
    for (int k = 0; k < a->n_config; k++) {
        const tt__config_row *r = &a->config[k];
        if (r->letter) l.size[r->letter - 'A'] = tt__int_field(config, r->offset);
    }
    l.bare = strcmp(tt__head_name(a, config), "Model") == 0;
    l.size['C' - 'A'] = tt__outputs(a, config);
    a->sizes(config, l.size);
    return l;
}

/* Returns the table row of parameter k, and sets `name` to the parameter's name. Returns NULL if k is past
   the last parameter. The model's own parameters come first, then those of each layer. */
static const tt__tensor_row *tt__layout_row(const tt__layout *l, int k, char name[256])
{
    const tt__architecture *a = l->a;
    const int in_layers = k - a->n_model, layer = in_layers / a->n_layer, naming = l->naming;
    if (in_layers >= 0 && layer >= l->layers) return NULL;
    const tt__tensor_row *row = in_layers < 0 ? &a->model[k] : &a->layer[in_layers % a->n_layer];
    static const tt__tensor_row none = {0, {NULL, NULL}, "Z", '0', 0, false, 0}; /* the size of Z is 0, so the
                                                                                    model lacks the tensor */
    if (in_layers >= 0 && layer == 0 && row->order == 'l') row = &none;
    const char *plain = row->name[naming] ? row->name[naming] : "";
    int n = in_layers >= 0 || *plain == '.' ? snprintf(name, 256, "%s", a->prefix[naming]) : 0;
    if (in_layers >= 0) n += snprintf(name + n, 256 - (size_t)n, a->layer_prefix[naming], layer);
    snprintf(name + n, 256 - (size_t)n, "%s", plain + (*plain == '.'));
    return row;
}

/* Returns the address, in the structs of the model, of the pointer to parameter k. row: the result of
   tt__layout_row for k. */
static tt_param **tt__layout_slot(const tt__layout *l, const tt__tensor_row *row, int k)
{
    const int in_layers = k - l->a->n_model;
    size_t layer = in_layers < 0 ? 0 : (size_t)(in_layers / l->a->n_layer) * l->a->layer_bytes;
    return (tt_param **)(void *)((in_layers < 0 ? l->self : l->layer_self) + layer + row->offset);
}

/* Returns which part of a packed tensor a parameter is. */
static tt__part_of tt__layout_part(const tt__layout *l, const tt__tensor_row *row)
{
    const int part = l->naming == 1 ? row->part : 0;
    const tt__part_of of = {part > 3 ? part - 3 : part, part > 3 ? 2 : part ? 3 : 0};
    return of;
}

/* Sets dims to the dimensions of a parameter, including leading dimensions of 1. Returns the number of
   dimensions; 0 if the model has no such parameter. */
static int tt__row_dims(const tt__layout *l, const tt__tensor_row *row, int64_t dims[4])
{
    int n = 0;
    for (const char *s = row->shape; *s; s++) {
        dims[n] = *s == '1' ? 1 : l->size[*s - 'A'];
        if (dims[n++] == 0) return 0;
    }
    return n;
}

/* The order of the elements of a parameter (rows, width) in a file, by `kind`. 0: the parameter's order.
   't': the file has the transpose, (width, rows), as in GPT-2.
   'g': a head has `size` rows. The parameter has the heads of all queries, then of all keys, then of all
   values. The file has `groups` groups of heads, and in each group its queries, its key and its value, as in
   GPT-NeoX and Falcon.
   'p': the file's tensor is padded. `rows` and `width` are those of the file, whose first rows and columns
   are the parameter's; all others are zeros. */
typedef struct tt__packing {
    char kind;
    int64_t rows, width, groups, size;
} tt__packing;

/* Returns the row of the file's tensor, in order 'g', that has row r of the parameter. With `back`, returns
   the row of the parameter that has row r of the file's tensor. */
static int64_t tt__packing_row(const tt__packing *o, int64_t r, bool back)
{
    const int64_t heads = o->rows / o->size, queries = heads / o->groups - 2, head = r / o->size;
    int64_t group, at;
    if (back) {
        group = head / (queries + 2);
        at = head % (queries + 2);
        at = at < queries ? group * queries + at : o->groups * (queries + at - queries) + group;
    } else {
        const int64_t all = o->groups * queries; /* number of query heads */
        group = head < all ? head / queries : (head - all) % o->groups;
        at = group * (queries + 2) + (head < all ? head % queries : queries + (head - all) / o->groups);
    }
    return at * o->size + r % o->size;
}

/* Returns the order of a parameter's elements in files. dims: the parameter's dimensions. */
static tt__packing tt__row_order(const tt__layout *l, const tt__tensor_row *row, int ndim,
                                 const int64_t *dims)
{
    tt__packing o = {row->order, dims[0], ndim > 1 ? dims[1] : 1, l->size['G' - 'A'], l->size['D' - 'A']};
    if (o.kind == 'l') o.kind = 0;
    return o;
}

/* Returns whether a parameter has fewer rows or columns than its tensor in files, which has the order `o`. */
static bool tt__is_padded(const tt_param *p, const tt__packing *o)
{
    return !o->kind && p->size < o->rows * o->width && p->ndim < 3;
}

/* Sets dims to the dimensions that a parameter's tensor has in files. Returns the number of dimensions; 0 if
   the model has no such parameter. */
static int tt__file_dims(const tt__layout *l, const tt__tensor_row *row, int64_t dims[4])
{
    const int n = tt__row_dims(l, row, dims);
    const int64_t rows = dims[0];
    if (n != 2 || row->order != 't') return n;
    dims[0] = dims[1];
    dims[1] = rows;
    return n;
}

/* Creates the parameters of a model. scale: standard deviation of random initial values. */
static tt_status tt__layout_new(const tt__layout *l, float scale)
{
    const tt__tensor_row *row;
    char name[256];
    for (int k = 0; (row = tt__layout_row(l, k, name)) != NULL; k++) {
        int64_t dims[4];
        int n = row->name[l->naming] ? tt__row_dims(l, row, dims) : 0, lead = (int)strspn(row->shape, "1");
        tt_init init = {row->init == '1' ? TT_INIT_ONES : TT_INIT_ZEROS, scale};
        if (row->init == 'n') init.kind = TT_INIT_NORMAL;
        if (!n) continue;
        tt_param *p = tt_param_new(l->ctx, name, n - lead, dims + lead, init);
        if (!p) return l->ctx->status;
        *tt__layout_slot(l, row, k) = p;
    }
    return TT_OK;
}

/* Fails if the shape of tensor `index` of file s is not `dims` or, for a part of a packed tensor, is not
   `dims` with the rows of all parts. */
static tt_status tt__tensor_fits(const tt_safetensors *s, int index, int ndim, const int64_t *dims,
                                 tt__part_of part, const char *param)
{
    const tt_tensor_info *info = &s->infos[index];
    const int64_t rows = ndim ? dims[0] * (part.of ? part.of : 1) : 0;
    bool same = info->ndim == ndim;
    for (int k = 0; k < ndim && same; k++) same = info->dims[k] == (k ? dims[k] : rows);
    if (same) return TT_OK;
    char text[256];
    tt__text_buffer shapes = {text, sizeof text, 0};
    tt__print(&shapes, "(");
    for (int k = 0; k < info->ndim; k++) tt__print(&shapes, k ? ", %lld" : "%lld", (long long)info->dims[k]);
    tt__print(&shapes, "), expected (");
    for (int k = 0; k < ndim; k++) tt__print(&shapes, k ? ", %lld" : "%lld", (long long)(k ? dims[k] : rows));
    return tt__fail(s->ctx, TT_ERR_SHAPE, "'%s': tensor '%s' has shape %s) for parameter '%s': is the "
                    "config.json that of this file?", s->path, info->name, text, param);
}
