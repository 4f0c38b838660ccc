#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../context/params.h"
#include "../files/lists.h"
#include "layout.h"
#include "bert_layout.h"
#include "vit.h"
#include "lm_layout.h"

/* -------------------------------------------------------------------------------------------------- pruning
   Removes heads, neurons and layers from a model. The tables of the layout say which rows and columns of
   tensors belong to heads and to neurons. */

/* The units of a model that can be removed. Heads that share a key head are one unit, and all layers that
   share their parameters are one layer. */
typedef struct tt__units {
    tt_context *ctx;
    const tt__architecture *a;
    void *self;                   /* the model's struct */
    const char *of_heads, *of_neurons; /* letters of the layout for the columns of heads, and of neurons */
    int layers, heads, neurons;   /* layers; units of each layer */
    size_t out_w, out_b, down_w, down_b; /* offsets in the struct of a layer: the linear layers that read the
                                            heads and the neurons */
    bool (*alike)(const void *config, int layer, int other); /* whether a layer may take the other's place */
} tt__units;

static const void *tt__config_of(const tt__units *u) { return (const char *)u->self + u->a->config_at; }

static bool tt__bert_alike(const void *config, int layer, int other)
{
    const tt_bert_config *c = (const tt_bert_config *)config;
    if (!(tt__bert_of(c)->flags & TT__BERT_MODERN)) return true;
    return (layer % c->full_every == 0) == (other % c->full_every == 0) && (layer == 0) == (other == 0);
}

static bool tt__vit_alike(const void *config, int layer, int other)
{
    (void)config, (void)layer, (void)other;
    return true;
}

static bool tt__lm_alike(const void *config, int layer, int other)
{
    const tt_lm_config *c = (const tt_lm_config *)config;
    return tt__lm_has_window(c, layer) == tt__lm_has_window(c, other);
}

#define TT__UNITS_OF(LAYER) \
    offsetof(LAYER, attention_w), offsetof(LAYER, attention_b), offsetof(LAYER, down_w), \
    offsetof(LAYER, down_b)

static tt__units tt__bert_units(const tt_bert *m)
{
    const tt_bert_config *c = &m->config;
    const int layers = tt__bert_of(c)->flags & TT__BERT_SHARED ? 1 : c->layers;
    const tt__units u = {m->ctx, &tt__bert_of(c)->a, (void *)(uintptr_t)m, "DU", "IF", layers, c->heads,
                         c->intermediate_size, TT__UNITS_OF(tt_bert_layer), tt__bert_alike};
    return u;
}

static tt__units tt__vit_units(const tt_vit *m)
{
    const tt_vit_config *c = &m->config;
    const tt__units u = {m->ctx, &tt__vit_architecture, (void *)(uintptr_t)m, "AB", "I", c->layers, c->heads,
                         c->intermediate_size, TT__UNITS_OF(tt_vit_layer), tt__vit_alike};
    return u;
}

static tt__units tt__lm_units(const tt_lm *m)
{
    const tt_lm_config *c = &m->config;
    const tt__units u = {m->ctx, &tt__lm_kind_of(c->kind)->a, (void *)(uintptr_t)m, "AQKL", "IM", c->layers,
                         c->key_heads, c->intermediate_size, TT__UNITS_OF(tt_lm_layer), tt__lm_alike};
    return u;
}
#undef TT__UNITS_OF

void tt_importance_free(tt_importance *x)
{
    if (!x) return;
    tt__free(x->ctx, x->layer);
    tt__free(x->ctx, x->head);
    tt__free(x->ctx, x->neuron);
    tt__free(x->ctx, x);
}

tt_prune_options tt_prune_options_default(void)
{
    tt_prune_options o;
    memset(&o, 0, sizeof o);
    return o;
}

/* Writes the numbers of the `keep` most important of n units to `kept`, in ascending order. importance: (n),
   or NULL for the first units. If units are equally important, the first ones stay. */
static void tt__most_important(const double *importance, int n, int keep, int *kept)
{
    int found = 0;
    for (int k = 0; k < n; k++) {
        int before = 0; /* number of units that are more important than unit k */
        for (int i = 0; i < n && importance && before < keep; i++)
            before += importance[i] > importance[k] || (importance[i] == importance[k] && i < k);
        if (importance ? before < keep : k < keep) kept[found++] = k;
    }
}

/* Returns the numbers of the units that each layer keeps, (layers, keep), or NULL if all units stay or memory
   is missing. importance: (layers, n), or NULL. */
static int *tt__kept_units(const tt__units *u, const double *importance, int n, int keep)
{
    int *kept = keep < n ? (int *)tt__alloc(u->ctx, sizeof *kept * (size_t)u->layers * (size_t)keep) : NULL;
    for (int l = 0; l < u->layers && kept; l++)
        tt__most_important(importance ? importance + (int64_t)l * n : NULL, n, keep,
                           kept + (int64_t)l * keep);
    return kept;
}

/* The rows or the columns of a tensor that stay. */
typedef struct tt__kept_part {
    const int *kept; /* (units) numbers of the units that stay; NULL: all rows or columns stay */
    int64_t units, size; /* size: rows or columns of a unit; without `kept` 1, and units counts all */
} tt__kept_part;

static int64_t tt__kept_place(const tt__kept_part *k, int64_t at)
{
    return k->kept ? k->kept[at / k->size] * k->size + at % k->size : at;
}

/* The parameters of a model with their new shapes and values, which are set when all of them are known. */
typedef struct tt__pruned {
    tt_param **param;  /* (n) */
    float **values;    /* (n); NULL: the parameter stays as it is */
    int64_t (*dims)[2]; /* (n) the first two dimensions */
    int n, kept_heads, kept_neurons; /* kept_heads, kept_neurons: units of each layer that stay */
    int *heads, *neurons; /* (layers, kept_heads), (layers, kept_neurons) units that stay; NULL: all stay */
} tt__pruned;

/* Computes the shape and the values that parameter p of layer `layer` (-1: of no layer) has after pruning. */
static tt_status tt__prune_param(const tt__units *u, tt__pruned *x, const tt__tensor_row *row, tt_param *p,
                                 int layer)
{
    tt_context *ctx = u->ctx;
    tt__kept_part part[2];
    const int k = x->n++;
    x->param[k] = p;
    for (int d = 0; d < 2; d++) {
        const int64_t size = d < p->ndim ? p->dims[d] : 1;
        const char letter = d < p->ndim && layer >= 0 ? row->shape[d] : '1';
        const bool head = x->heads && strchr(u->of_heads, letter);
        const bool neuron = x->neurons && strchr(u->of_neurons, letter);
        const int of = head ? u->heads : neuron ? u->neurons : 1;
        const int *kept = head ? x->heads : neuron ? x->neurons : NULL;
        const int64_t units = head ? x->kept_heads : x->kept_neurons;
        const tt__kept_part some = {kept ? kept + layer * units : NULL, units, size / of};
        const tt__kept_part all = {NULL, size, 1};
        part[d] = kept ? some : all;
        x->dims[k][d] = part[d].units * part[d].size;
    }
    const int64_t rows = x->dims[k][0], cols = x->dims[k][1], width = p->ndim > 1 ? p->dims[1] : 1;
    if (!part[0].kept && !part[1].kept) return TT_OK;
    float *old = (float *)tt__alloc(ctx, sizeof *old * (size_t)p->size);
    float *now = x->values[k] = (float *)tt__alloc(ctx, sizeof *now * (size_t)(rows * cols));
    tt_status status = old && now ? tt_param_get(p, old) : TT_ERR_MEMORY;
    for (int64_t r = 0; r < rows && status == TT_OK; r++) {
        const float *from = old + tt__kept_place(&part[0], r) * width;
        for (int64_t c = 0; c < cols; c++) now[r * cols + c] = from[tt__kept_place(&part[1], c)];
    }
    tt__free(ctx, old);
    return status;
}

/* Gives a parameter, which is in no arena, its new shape and values. */
static void tt__prune_replace(tt_param *p, const int64_t dims[2], float *values)
{
    for (int d = 0; d < p->ndim; d++) p->dims[d] = dims[d];
    p->size = dims[0] * dims[1];
    tt__param_drop_source(p);
    p->read = tt__read_copy;
    p->release = tt__free;
    p->source = values;
}

static void tt__pruned_free(tt_context *ctx, tt__pruned *x)
{
    for (int k = 0; k < x->n; k++) tt__free(ctx, x->values[k]);
    void *const owned[] = {x->param, x->values, x->dims, x->heads, x->neurons};
    tt__free_all(ctx, owned, TT__COUNT(owned));
}

/* Computes the new shapes and values of all parameters of a model. */
static tt_status tt__prune_params(const tt__units *u, tt__pruned *x)
{
    const tt__layout l = tt__layout_of(u->ctx, u->a, u->self, tt__config_of(u), NULL);
    const tt__tensor_row *row;
    const size_t n = (size_t)(u->a->n_model + u->a->n_layer * u->layers);
    char name[256];
    tt_status status = TT_OK;
    x->param = (tt_param **)tt__calloc(u->ctx, sizeof *x->param * n);
    x->values = (float **)tt__calloc(u->ctx, sizeof *x->values * n);
    x->dims = (int64_t(*)[2])tt__calloc(u->ctx, sizeof *x->dims * n);
    if (!x->param || !x->values || !x->dims) return TT_ERR_MEMORY;
    for (int k = 0; status == TT_OK && (row = tt__layout_row(&l, k, name)) != NULL; k++) {
        tt_param *p = row->name[l.naming] ? *tt__layout_slot(&l, row, k) : NULL;
        const int layer = k < u->a->n_model ? -1 : (k - u->a->n_model) / u->a->n_layer;
        bool known = !p; /* several rows may have one field */
        for (int i = 0; i < x->n && !known; i++) known = x->param[i] == p;
        if (known) continue;
        if (p->low_a)
            return tt__fail(u->ctx, TT_ERR_ARGUMENT, "pruning: parameter '%s' has low-rank factors: prune "
                            "the model before it gets them", p->name);
        if (tt__is_coded(p->form))
            return tt__fail(u->ctx, TT_ERR_ARGUMENT, "pruning: parameter '%s' is stored in %s: prune the "
                            "model before it is stored in few bits", p->name, tt_dtype_name(p->form));
        status = tt__params_leave(u->ctx, p);
        if (status == TT_OK) status = tt__prune_param(u, x, row, p, layer);
    }
    return status;
}

/* Checks the options and the importance. layers: number of layers of the config. */
static tt_status tt__prune_check(const tt__units *u, const tt_importance *x, const tt_prune_options *o,
                                 int layers)
{
    char text[600] = "";
    tt__text_buffer all = {text, sizeof text, 0};
    if (x && (x->layers != u->layers || x->heads != u->heads || x->neurons != u->neurons))
        tt__print(&all, "; the importance is of %d layers of %d heads and %d neurons, but the model has %d "
                  "of %d and %d", x->layers, x->heads, x->neurons, u->layers, u->heads, u->neurons);
    if (o->heads < 0 || o->heads > u->heads)
        tt__print(&all, "; heads is %d, but must be 0 (all) to %d", o->heads, u->heads);
    if (o->neurons < 0 || o->neurons > u->neurons)
        tt__print(&all, "; neurons is %d, but must be 0 (all) to %d", o->neurons, u->neurons);
    if (o->layers < 0 || o->layers > layers)
        tt__print(&all, "; layers is %d, but must be 0 (all) to %d", o->layers, layers);
    if (o->layers && !o->which && u->layers != layers)
        tt__print(&all, "; layers that share their parameters are equally important: set `which`");
    for (int k = 0; k < o->layers && o->layers <= layers && o->which; k++)
        if (o->which[k] < (k ? o->which[k - 1] + 1 : 0) || o->which[k] >= layers)
            tt__print(&all, "; which[%d] is %d, but must be a layer, 0 to %d, after which[%d]", k,
                      o->which[k], layers - 1, k - 1);
    return all.length ? tt__fail(u->ctx, TT_ERR_ARGUMENT, "pruning: %s", text + 2) : TT_OK;
}

/* Moves the structs of the layers that stay to the front. Fails before that if a layer cannot take another
   layer's place. */
static tt_status tt__prune_layers(const tt__units *u, const tt_importance *x, const tt_prune_options *o,
                                  int layers, bool move)
{
    char *layer = (char *)tt__pointer_at(u->self, u->a->layers_at);
    int *kept = (int *)tt__alloc(u->ctx, sizeof *kept * (size_t)layers);
    tt_status status = kept ? TT_OK : TT_ERR_MEMORY;
    if (kept && o->which) memcpy(kept, o->which, sizeof *kept * (size_t)o->layers);
    else if (kept) tt__most_important(x ? x->layer : NULL, layers, o->layers, kept);
    for (int k = 0; k < o->layers && status == TT_OK; k++) {
        const size_t bytes = u->a->layer_bytes;
        if (!u->alike(tt__config_of(u), k, kept[k]))
            status = tt__fail(u->ctx, TT_ERR_ARGUMENT, "pruning: layer %d would become layer %d, but in this "
                              "model the two differ in their windows: choose other layers (`which`)",
                              kept[k], k);
        else if (move) memmove(layer + (size_t)k * bytes, layer + (size_t)kept[k] * bytes, bytes);
    }
    tt__free(u->ctx, kept);
    return status;
}

/* Removes units of a model. layers: the field of the model's config with the number of layers. */
static tt_status tt__prune(const tt__units *u, const tt_importance *importance, const tt_prune_options *o,
                           int *layers)
{
    tt__pruned x;
    memset(&x, 0, sizeof x);
    x.kept_heads = o->heads ? o->heads : u->heads;
    x.kept_neurons = o->neurons ? o->neurons : u->neurons;
    tt_status status = tt__prune_check(u, importance, o, *layers);
    if (status == TT_OK && o->layers) status = tt__prune_layers(u, importance, o, *layers, false);
    if (status != TT_OK) return status;
    x.heads = tt__kept_units(u, importance ? importance->head : NULL, u->heads, x.kept_heads);
    x.neurons = tt__kept_units(u, importance ? importance->neuron : NULL, u->neurons, x.kept_neurons);
    const bool lacks = (x.kept_heads < u->heads && !x.heads) || (x.kept_neurons < u->neurons && !x.neurons);
    status = lacks ? TT_ERR_MEMORY : tt__prune_params(u, &x);
    if (status == TT_OK && o->layers) status = tt__prune_layers(u, importance, o, *layers, true);
    if (status == TT_OK && o->layers) *layers = o->layers;
    for (int k = 0; k < x.n && status == TT_OK; k++) {
        if (x.values[k]) tt__prune_replace(x.param[k], x.dims[k], x.values[k]);
        x.values[k] = NULL;
    }
    tt__pruned_free(u->ctx, &x);
    return status;
}

/* Removes units of an encoder. The pointers are to fields of the model's config. */
static tt_status tt__prune_encoder(const tt__units *u, const tt_importance *x, const tt_prune_options *o,
                                   int hidden, int *layers, int *heads, int *head_size, int *neurons)
{
    const tt_status status = tt__prune(u, x, o, layers);
    if (status != TT_OK) return status;
    *head_size = tt__head_size(hidden, *heads, *head_size);
    if (o->heads) *heads = o->heads;
    if (o->neurons) *neurons = o->neurons;
    return TT_OK;
}

tt_status tt_bert_prune(tt_bert *m, const tt_importance *x, const tt_prune_options *o)
{
    const tt__units u = tt__bert_units(m);
    tt_bert_config *c = &m->config;
    return tt__prune_encoder(&u, x, o, c->hidden_size, &c->layers, &c->heads, &c->head_size,
                             &c->intermediate_size);
}

tt_status tt_vit_prune(tt_vit *m, const tt_importance *x, const tt_prune_options *o)
{
    const tt__units u = tt__vit_units(m);
    tt_vit_config *c = &m->config;
    return tt__prune_encoder(&u, x, o, c->hidden_size, &c->layers, &c->heads, &c->head_size,
                             &c->intermediate_size);
}

tt_status tt_lm_prune(tt_lm *m, const tt_importance *x, const tt_prune_options *o)
{
    const tt__units u = tt__lm_units(m);
    tt_lm_config *c = &m->config;
    const int sharing = c->heads / c->key_heads;
    if (m->n_lora)
        return tt__fail(m->ctx, TT_ERR_ARGUMENT, "pruning: the model has adapters: prune it before they are "
                        "added");
    if (o->heads && o->heads < c->key_heads && !(tt__lm_flags(c) & TT__LM_LLAMA))
        return tt__fail(m->ctx, TT_ERR_UNSUPPORTED, "pruning: a model of kind %s has heads * head_size = "
                        "hidden_size, so heads cannot be removed: remove neurons or layers", c->kind);
    tt_status status = tt__prune(&u, x, o, &c->layers);
    if (status != TT_OK) return status;
    if (o->heads) c->key_heads = o->heads;
    c->heads = c->key_heads * sharing;
    if (o->neurons) c->intermediate_size = o->neurons;
    return TT_OK;
}
