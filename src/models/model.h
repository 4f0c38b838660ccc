#pragma once
#include "../base/base.h"
#include "../context/params.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../data/dataset.h"
#include "layout.h"
#include "load.h"
#include "save.h"
#include "config.h"

/* --------------------------------------------------------------------------- creating, loading and saving */

static void tt__model_free(const tt__architecture *a, void *self)
{
    tt_context *ctx = (tt_context *)tt__pointer_at(self, 0); /* the first field of each model's struct */
    if (ctx) {
        tt__free(ctx, tt__pointer_at(self, a->layers_at));
        if (a->classes) tt__free(ctx, tt__pointer_at(self, a->names_at));
    }
    memset(self, 0, a->bytes);
}

/* Creates a model from a config that has been checked. */
static tt_status tt__model_make(tt_context *ctx, const tt__architecture *a, void *self, const void *config)
{
    const int params = ctx->n_params, classes = tt__outputs(a, config);
    const int n_layers = tt__int_field(config, a->layers);
    const char *activation = tt__activation_row((const char *)tt__pointer_at(config, a->activation))->name;
    char *to = (char *)self;
    char(*names)[64] = classes ? (char(*)[64])tt__alloc(ctx, sizeof *names * (size_t)classes) : NULL;
    void *layers = tt__calloc(ctx, a->layer_bytes * (size_t)n_layers);
    tt_status status = (names || !classes) && layers ? TT_OK : TT_ERR_MEMORY;
    for (int k = 0; k < classes && names; k++) snprintf(names[k], sizeof names[k], "LABEL_%d", k);
    memset(self, 0, a->bytes);
    memcpy(to, &ctx, sizeof ctx);
    memcpy(to + a->config_at, config, a->config_bytes);
    memcpy(to + a->config_at + a->activation, &activation, sizeof activation); /* the caller may free its
                                                                                  string */
    if (a->classes) memcpy(to + a->names_at, &names, sizeof names);
    if (a->classes) to[a->new_head_at] = true;
    memcpy(to + a->layers_at, &layers, sizeof layers);
    tt__layout l = tt__layout_of(ctx, a, self, config, NULL);
    if (status == TT_OK) status = tt__layout_new(&l, tt__float_field(config, a->range));
    /* The layers from l.layers on share the parameters of the first layer. */
    for (int k = l.layers; k < n_layers && status == TT_OK; k++)
        memcpy((char *)layers + (size_t)k * a->layer_bytes, layers, a->layer_bytes);
    if (status == TT_OK) return TT_OK;
    tt__params_undo(ctx, params);
    tt__model_free(a, self);
    return status;
}

static tt_status tt__model_new(tt_context *ctx, const tt__architecture *a, void *self, const void *config)
{
    memset(self, 0, a->bytes);
    tt_status status = tt__config_check(ctx, a, config);
    return status == TT_OK ? tt__model_make(ctx, a, self, config) : status;
}

typedef union tt__any_config { tt_bert_config bert; tt_vit_config vit; tt_lm_config lm; } tt__any_config;

/* Returns the config of the files of a model: `config`, or a copy of it in *copy. */
static const void *tt__config_of_files(const tt__architecture *a, const void *config, tt__any_config *copy)
{
    if (!a->of_files) return config;
    memcpy(copy, config, a->config_bytes);
    a->of_files(copy);
    return copy;
}

/* Checks a checkpoint's config and tensors, and creates a model from them. classes, image_size: the caller's
   values; 0: the values of the config. */
static tt_status tt__model_load(const tt__architecture *a, void *self, void *config,
                                const tt__checkpoint *from, int classes, int image_size)
{
    tt_context *ctx = from->file[0]->ctx;
    const int params = ctx->n_params, own_classes = a->classes ? tt__int_field(config, a->classes) : 0;
    if (!classes) classes = own_classes;
    if (a->classes) *(int *)(void *)((char *)config + a->classes) = classes;
    tt_status status = tt__config_check(ctx, a, config);
    if (status != TT_OK) return status;
    tt__any_config in_files;
    tt__layout l = tt__layout_of(ctx, a, NULL, tt__config_of_files(a, config, &in_files), from);
    status = tt__layout_check(&l);
    /* The caller's size is set after the check of the tensors, which fit the size in the file's config. */
    if (status == TT_OK && image_size) {
        *(int *)(void *)((char *)config + a->image_size) = image_size;
        status = tt__config_check(ctx, a, config);
    }
    if (status == TT_OK) status = tt__model_make(ctx, a, self, config);
    if (status != TT_OK) return status;
    if (tt__outputs(a, config) && from->config.count && classes == own_classes && !from->other_head)
        status = tt__read_labels(&from->config, (char(*)[64])tt__pointer_at(self, a->names_at), classes);
    l = tt__layout_of(ctx, a, self, tt__config_of_files(a, config, &in_files), from);
    if (status == TT_OK) status = tt__layout_attach(&l);
    if (status == TT_OK) return TT_OK;
    tt__params_undo(ctx, params);
    tt__model_free(a, self);
    return status;
}

typedef struct tt__saved_model {
    const tt__architecture *a;
    const void *self, *config;
    tt_dtype dtype;
    const tt__layout *layout;
    bool *last;   /* (classes): whether each class is the last class with its name */
} tt__saved_model;

static void tt__print_config(tt__text_buffer *json, const void *arg)
{
    const tt__saved_model *s = (const tt__saved_model *)arg;
    const tt__architecture *a = s->a;
    const char *dtype = tt__dtypes[s->dtype].config;
    char number[32];
    tt__print(json, "{\n  \"architectures\": [\"%s%s\"],\n  \"model_type\": \"%s\",\n", a->class_name,
              tt__head_name(a, s->config), a->type);
    for (int k = 0; k < a->n_config; k++) {
        const tt__config_row *r = &a->config[k];
        const char *value = number, *key = r->key[a->naming];
        if (!key) continue;
        if (tt__is_int(r)) snprintf(number, 32, "%d", tt__int_field(s->config, r->offset));
        else if (r->kind != 'b') tt__shortest(tt__float_field(s->config, r->offset), number);
        else value = *((const bool *)s->config + r->offset) ? "true" : "false";
        tt__print(json, "  \"%s\": %s,\n", key, value);
    }
    tt__print(json, "  \"%s\": \"%s\",\n%s", a->activation_key,
              (const char *)tt__pointer_at(s->config, a->activation), a->more);
    if (a->print) a->print(json, s->self, s->config);
    tt__print_few_bits(json, s->layout);
    const int classes = tt__outputs(a, s->config);
    tt__print(json, "  \"dtype\": \"%s\"%s\n", dtype, classes ? "," : "\n}");
    if (!classes) return;
    tt__print_labels(json, (const char(*)[64])tt__pointer_at(s->self, a->names_at), classes, s->last);
}

/* Writes model.safetensors and config.json into a folder. naming: number of the tensors' naming. max: max
   bytes of a file; 0: no limit. config: the model's config, which the caller may have changed; the function
   checks the config before it writes anything. */
static tt_status tt__model_save(tt_context *ctx, const tt__architecture *a, const void *self,
                                const void *config, int naming, size_t max, const char *folder)
{
    tt__saved_model s = {a, self, config, TT_F32, NULL, NULL};
    tt__any_config in_files;
    tt_status status = tt__config_check(ctx, a, config);
    if (status != TT_OK) return status;
    s.config = config = tt__config_of_files(a, config, &in_files);
    tt__layout l = tt__layout_of(ctx, a, self, config, NULL);
    l.naming = naming;
    s.layout = &l;
    if (tt__outputs(a, config))
        status = tt__last_of_names(ctx, (const char(*)[64])tt__pointer_at(self, a->names_at),
                                   tt__outputs(a, config), &s.last);
    if (status == TT_OK) status = tt__layout_save(&l, folder, max, &s.dtype);
    if (status == TT_OK) status = tt__save_printed(ctx, folder, "config.json", tt__print_config, &s);
    tt__free(ctx, s.last);
    return status;
}

/* Prints the first 8 of n names in quotes, then the number of the other names. */
static void tt__list_names(tt__text_buffer *to, const char *const *names, int n)
{
    const int max = 8;
    for (int k = 0; k < n && k < max; k++) tt__print(to, "%s'%.40s'", k ? ", " : "", names[k]);
    if (n > max) tt__print(to, " and %d others", n - max);
}

/* Gives a model and a dataset the same names and numbers of classes, for tt_bert_name_classes and
   tt_vit_name_classes. If both have the same names, renumbers the dataset's classes as the model numbers
   them; otherwise gives the model the dataset's names. names: the model's class names, (classes, 64). kept:
   the model's classifier comes from a checkpoint, so the function warns when it replaces the names. */
static tt_status tt__name_classes(tt_context *ctx, tt_task task, char (*names)[64], int classes, bool kept,
                                  tt_dataset *d)
{
    static const char *const tasks[] = {"CLASS", "LABELS", "SCORES", "TAGS", "EMBED", "MASKED_LM"};
    if (d->task != task)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "the dataset's task is TT_TASK_%s, but the model's is "
                        "TT_TASK_%s: load the model for the dataset's task (tt_bert_load_head)",
                        tasks[d->task], tasks[task]);
    if (d->n_classes != classes)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "the dataset has %d classes, but the model has %d: load the "
                        "model for the dataset's number of classes", d->n_classes, classes);
    if (!classes) return TT_OK; /* TT_TASK_EMBED */
    for (int c = 0; c < classes; c++)
        if (strlen(d->classes[c]) >= sizeof *names)
            return tt__fail(ctx, TT_ERR_ARGUMENT, "the class '%.40s...' has more than 63 bytes: rename it",
                            d->classes[c]);
    const char **own = (const char **)tt__alloc(ctx, sizeof *own * (size_t)classes), *twice;
    for (int c = 0; c < classes && own; c++) own[c] = names[c];
    const tt__strings ours = {own, sizeof *own}, theirs = {d->classes, sizeof *d->classes};
    uint32_t *to = own ? tt__sort_strings(ctx, ours, classes, &twice) : NULL;
    uint32_t *from = to ? tt__sort_strings(ctx, theirs, classes, &twice) : NULL;
    tt_status status = from ? TT_OK : TT_ERR_MEMORY;
    bool same = true;
    for (int k = 0; k < classes && from && same; k++) same = strcmp(own[to[k]], d->classes[from[k]]) == 0;
    if (from && same) status = tt__dataset_renumber(d, from, to);
    if (from && !same && kept) {
        char text[1024];
        tt__text_buffer list = {text, sizeof text, 0};
        tt__list_names(&list, own, classes);
        tt__print(&list, "; those of the data are ");
        tt__list_names(&list, d->classes, classes);
        tt__log(ctx, TT_LOG_WARNING, "classes", "the model's classes are %s: each class of the model gets "
                "the name of the data's class with its number", text);
    }
    for (int c = 0; c < classes && from && !same; c++) strcpy(names[c], d->classes[c]);
    tt__free(ctx, from);
    tt__free(ctx, to);
    tt__free(ctx, (void *)own);
    return status;
}
