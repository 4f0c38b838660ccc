#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../files/safetensors.h"

/* ===========================================================================================================
   MODELS                                                                                          src/models/
   Structs of named parameters and functions that record ops: BERT, ViT, decoders. Uses the public API, and
   files for checkpoints.
   ======================================================================================================== */

/* ---------------------------------------------------------------------------------- what architectures share
   Tables say where a model's struct has its parameters and its config's numbers, what files call them, and
   their shapes. Making, checking, loading and saving them is then the same for all. Names have two spellings:
   BERT's and DistilBERT's, or transformers' and torchvision's of ViT; each decoder has a table of its own. */

typedef struct tt__tensor_row {
    size_t offset;       /* of its tt_param * in the struct of the model or of a layer */
    const char *name[2]; /* in each spelling; a '.' at the beginning follows the prefix. NULL: it has none */
    const char *shape;   /* a letter for each dimension, whose size the architecture tells; '1' is 1. A model
                            lacks a tensor with a size of 0, and its parameter has no leading ones */
    char init;           /* 'n' normal, '1' ones, '0' zeros */
    char part;           /* spelling 1 packs three parameters into one tensor: which; 0: it does not */
    char head;           /* true: it starts anew where a checkpoint has none; 2: and no logits depend on it */
    char order;          /* 't': files have it transposed; 'g': rows by groups of heads, see tt__packing */
} tt__tensor_row;

typedef struct tt__config_row {
    const char *field, *key[2]; /* in the config's struct; in config.json in each spelling, NULL: not there */
    size_t offset;              /* in the config's struct */
    char kind;   /* an int: 'N' at least 1 and needed in config.json, 'n' at least 1, '0' at least 0; a float:
                    'p' in [0, 1), 'f' at least 0; 'b' a bool */
    char letter; /* in shapes; 0: none */
} tt__config_row;

typedef int64_t tt__sizes['Z' - 'A' + 1]; /* of the letters of shapes */

typedef struct tt__architecture {
    const char *name;            /* in messages */
    int spelling;                /* of config.json, and of the names of a new model's parameters */
    const char *class_name, *type;       /* of config.json: "architectures", "model_type" */
    const char *activation_key, *more;   /* the activation's key; keys and values that never change */
    const char *prefix[2];       /* of names of tensors, which files may lack; in each spelling */
    const char *layer_prefix[2]; /* of those in layers, with %d for the layer, after the prefix */
    const tt__tensor_row *model, *layer;
    const tt__config_row *config;
    int n_model, n_layer, n_config;
    size_t bytes, config_bytes, layer_bytes;                  /* of the structs */
    size_t config_at, activation_at, names_at, new_head_at, layers_at; /* in the model's struct; 0: none */
    size_t hidden, layers, heads, classes, activation, range; /* in the config's struct; 0: it has none */
    void (*sizes)(const void *config, tt__sizes size);        /* those that no row of the config tells */
    void (*check)(tt__text *all, const void *config);         /* adds what else is wrong; NULL: nothing */
    /* reads a tensor whose shape is not the parameter's in a way of its own and sets *done; NULL: none is */
    tt_status (*adapt)(const tt__tensor_row *row, tt_param *p, tt_safetensors *s, int index, bool *done);
    size_t image_size;          /* in the config's struct */
    void (*print)(tt__text *json, const void *self, const void *config); /* what else config.json has */
    const char *const *buffers; /* patterns of tensors in files that are no parameters; ends with NULL */
} tt__architecture;

/* The last fields but four of an architecture whose structs are X, X_config and X_layer. */
#define TT__STRUCTS(X) \
    sizeof(X), sizeof(X##_config), sizeof(X##_layer), offsetof(X, config), offsetof(X, activation), \
    offsetof(X, class_names), offsetof(X, new_head), offsetof(X, layer), \
    offsetof(X##_config, hidden_size), offsetof(X##_config, layers), offsetof(X##_config, heads), \
    offsetof(X##_config, classes), \
    offsetof(X##_config, activation), offsetof(X##_config, initializer_range)
/* Rows of a tensor, of a linear layer's or a norm's weight and bias, and of a config. */
#define TT__TENSOR(X, field, a, b, shape, init, head) {offsetof(X, field), {a, b}, shape, init, 0, head, 0}
#define TT__WEIGHT_BIAS(X, field, a, b, shape, rows, init, head) \
    TT__TENSOR(X, field##_w, a ".weight", b ".weight", shape, init, head), \
    TT__TENSOR(X, field##_b, a ".bias", b ".bias", rows, '0', head)
#define TT__CONFIG(X, field, kind, letter, a, b) {#field, {a, b}, offsetof(X##_config, field), kind, letter}

static int tt__int_field(const void *config, size_t offset)
{
    return *(const int *)(const void *)((const char *)config + offset);
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

/* A checkpoint that is read: its config.json and its files of tensors, opened, each of them once. */
typedef struct tt__checkpoint {
    char path[TT__PATH];   /* of config.json, for messages */
    tt__file_bytes text;   /* of config.json */
    tt__json config;       /* empty: there is none */
    tt_safetensors **file;
    int files, spelling;   /* of the tensors' names */
} tt__checkpoint;

/* The parameters of a model, or of one that is yet to be made. */
typedef struct tt__layout {
    tt_context *ctx;
    const tt__architecture *a;
    char *self, *layer_self; /* the model's struct, the first layer's; NULL: not made yet */
    int layers, spelling;
    const tt__checkpoint *from; /* NULL: no file is read */
    tt__sizes size;
} tt__layout;

/* In the spelling of the checkpoint, or the architecture's. */
static tt__layout tt__layout_of(tt_context *ctx, const tt__architecture *a, const void *self,
                                const void *config, const tt__checkpoint *from)
{
    tt__layout l;
    memset(&l, 0, sizeof l);
    l.ctx = ctx;
    l.a = a;
    l.self = (char *)(uintptr_t)self;
    l.layer_self = self ? (char *)tt__pointer_at(self, a->layers_at) : NULL;
    l.layers = tt__int_field(config, a->layers);
    l.spelling = from ? from->spelling : a->spelling;
    l.from = from;
    for (int k = 0; k < a->n_config; k++) {
        const tt__config_row *r = &a->config[k];
        if (r->letter) l.size[r->letter - 'A'] = tt__int_field(config, r->offset);
    }
    if (a->classes) l.size['C' - 'A'] = tt__int_field(config, a->classes);
    a->sizes(config, l.size);
    return l;
}

/* Parameter number k (the model's, then each layer's): its row and name; NULL behind the last. */
static const tt__tensor_row *tt__layout_row(const tt__layout *l, int k, char name[256])
{
    const tt__architecture *a = l->a;
    const int in_layers = k - a->n_model, layer = in_layers / a->n_layer, spelling = l->spelling;
    if (in_layers >= 0 && layer >= l->layers) return NULL;
    const tt__tensor_row *row = in_layers < 0 ? &a->model[k] : &a->layer[in_layers % a->n_layer];
    const char *plain = row->name[spelling] ? row->name[spelling] : "";
    int n = in_layers >= 0 || *plain == '.' ? snprintf(name, 256, "%s", a->prefix[spelling]) : 0;
    if (in_layers >= 0) n += snprintf(name + n, 256 - (size_t)n, a->layer_prefix[spelling], layer);
    snprintf(name + n, 256 - (size_t)n, "%s", plain + (*plain == '.'));
    return row;
}

/* Where the model's struct has parameter number k, which tt__layout_row knows. */
static tt_param **tt__layout_slot(const tt__layout *l, const tt__tensor_row *row, int k)
{
    const int in_layers = k - l->a->n_model;
    size_t layer = in_layers < 0 ? 0 : (size_t)(in_layers / l->a->n_layer) * l->a->layer_bytes;
    return (tt_param **)(void *)((in_layers < 0 ? l->self : l->layer_self) + layer + row->offset);
}

/* Which part of a tensor a parameter is, in the spelling that packs three; 0: all of it. */
static int tt__layout_part(const tt__layout *l, const tt__tensor_row *row)
{
    return l->spelling == 1 ? row->part : 0;
}

/* Fills in the dimensions of a parameter, with leading ones. Returns how many, 0 if the model lacks it. */
static int tt__row_dims(const tt__layout *l, const tt__tensor_row *row, int64_t dims[4])
{
    int n = 0;
    for (const char *s = row->shape; *s; s++) {
        dims[n] = *s == '1' ? 1 : l->size[*s - 'A'];
        if (dims[n++] == 0) return 0;
    }
    return n;
}

/* Where a file has the elements of a parameter (rows, width) of which it is not simply a copy.
   't': the file's tensor is (width, rows), as GPT-2's are. 'g': rows are those of heads of `size` rows; the
   parameter has all heads of queries, then of keys, then of values, the file `groups` groups of heads, each
   with its queries, its key and its value, as in GPT-NeoX and Falcon. */
typedef struct tt__packing {
    char kind; /* 0: a copy */
    int64_t rows, width, groups, size;
} tt__packing;

/* The row of the file that row r of a parameter is ('g'), or back. */
static int64_t tt__packing_row(const tt__packing *o, int64_t r, bool back)
{
    const int64_t heads = o->rows / o->size, queries = heads / o->groups - 2, head = r / o->size;
    int64_t group, at;
    if (back) {
        group = head / (queries + 2);
        at = head % (queries + 2);
        at = at < queries ? group * queries + at : o->groups * (queries + at - queries) + group;
    } else {
        const int64_t all = o->groups * queries; /* heads of queries */
        group = head < all ? head / queries : (head - all) % o->groups;
        at = group * (queries + 2) + (head < all ? head % queries : queries + (head - all) / o->groups);
    }
    return at * o->size + r % o->size;
}

/* How a file has the elements of that row's parameter. dims: the parameter's. */
static tt__packing tt__row_order(const tt__layout *l, const tt__tensor_row *row, int ndim,
                                 const int64_t *dims)
{
    tt__packing o = {row->order, dims[0], ndim > 1 ? dims[1] : 1, l->size['G' - 'A'], l->size['D' - 'A']};
    return o;
}

/* The dimensions that files give a tensor, as tt__row_dims. */
static int tt__file_dims(const tt__layout *l, const tt__tensor_row *row, int64_t dims[4])
{
    const int n = tt__row_dims(l, row, dims);
    const int64_t rows = dims[0];
    if (n != 2 || row->order != 't') return n;
    dims[0] = dims[1];
    dims[1] = rows;
    return n;
}

/* Creates the parameters. scale: the standard deviation of those that start at random */
static tt_status tt__layout_new(const tt__layout *l, float scale)
{
    const tt__tensor_row *row;
    char name[256];
    for (int k = 0; (row = tt__layout_row(l, k, name)) != NULL; k++) {
        int64_t dims[4];
        int n = row->name[l->spelling] ? tt__row_dims(l, row, dims) : 0, lead = (int)strspn(row->shape, "1");
        tt_init init = {row->init == '1' ? TT_INIT_ONES : TT_INIT_ZEROS, scale};
        if (row->init == 'n') init.kind = TT_INIT_NORMAL;
        if (!n) continue;
        tt_param *p = tt_param_new(l->ctx, name, n - lead, dims + lead, init);
        if (!p) return l->ctx->status;
        *tt__layout_slot(l, row, k) = p;
    }
    return TT_OK;
}
