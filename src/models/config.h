#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../files/lists.h"
#include "../files/utf8.h"
#include "../files/json.h"
#include "layout.h"

/* -------------------------------------------------------------------------------------------- config.json */

/* Sets (*last)[k] to whether class k is the last class with its name. Two classes may share a name, such as
   "crane" in ImageNet; label2id then has the number of the last such class, as in transformers. names:
   (classes, 64). Returns TT_ERR_ARGUMENT if a name is not UTF-8. The caller frees *last. */
static tt_status tt__last_of_names(tt_context *ctx, const char (*names)[64], int classes, bool **last)
{
    const char **name = (const char **)tt__alloc(ctx, sizeof *name * (size_t)classes), *twice;
    uint32_t *order = NULL;
    tt_status status = name ? TT_OK : TT_ERR_MEMORY;
    for (int k = 0; k < classes && status == TT_OK; k++) {
        name[k] = names[k];
        if (!memchr(name[k], 0, sizeof names[k]) || !tt__is_utf8(name[k]))
            status = tt__fail(ctx, TT_ERR_ARGUMENT,
                              "class_names[%d] must be a string of at most 63 bytes of UTF-8", k);
    }
    tt__strings all = {name, sizeof *name};
    *last = status == TT_OK ? (bool *)tt__calloc(ctx, sizeof **last * (size_t)classes) : NULL;
    if (*last) order = tt__sort_strings(ctx, all, classes, &twice);
    for (int k = 0; k < classes && order; k++)
        (*last)[order[k]] = k + 1 == classes || strcmp(name[order[k]], name[order[k + 1]]) != 0;
    if (status == TT_OK && !order) status = TT_ERR_MEMORY;
    tt__free(ctx, (void *)(uintptr_t)name);
    tt__free(ctx, order);
    return status;
}

static void tt__print_labels(tt__text_buffer *json, const char (*names)[64], int classes, const bool *last)
{
    const char *comma = "";
    tt__print(json, "  \"id2label\": {");
    for (int k = 0; k < classes; k++) {
        tt__print(json, "%s\"%d\": ", k ? ", " : "", k);
        tt__json_quote(json, names[k]);
    }
    tt__print(json, "},\n  \"label2id\": {");
    for (int k = 0; k < classes; k++) {
        if (!last[k]) continue;
        tt__print(json, "%s", comma);
        comma = ", ";
        tt__json_quote(json, names[k]);
        tt__print(json, ": %d", k);
    }
    tt__print(json, "}\n}\n");
}

enum { TT__MAX_CLASSES = 100000, TT__MAX_LAYERS = 1000000 }; /* so that an int can count all tensors */

/* Returns the node of "id2label"; -1 if the file lacks classes there. transformers reads {} as no classes. */
static int tt__labels_node(const tt__json *j)
{
    const int node = tt__json_get(j, 0, "id2label");
    return node >= 0 && j->nodes[node].kind == TT__JSON_OBJECT && j->nodes[node].count ? node : -1;
}

/* Reads the number of classes from "id2label" or, without it, from "num_labels". Without both, *classes is
   unchanged. */
static tt_status tt__read_classes(const tt__json *j, int *classes)
{
    const int labels = tt__labels_node(j);
    int64_t n = *classes;
    tt_status status = TT_OK;
    if (labels >= 0) n = j->nodes[labels].count;
    else status = tt__json_read_int(j, 0, "num_labels", false, 1, TT__MAX_CLASSES, &n);
    if (status == TT_OK && (n < 1 || n > TT__MAX_CLASSES))
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': id2label has %lld classes, but must have 1 to %d",
                        j->path, (long long)n, TT__MAX_CLASSES);
    *classes = (int)n;
    return status;
}

/* Reads the names of classes, (classes, 64), from "id2label", if the file has that key. Names of more than 63
   bytes are cut between two characters. */
static tt_status tt__read_labels(const tt__json *j, char (*names)[64], int classes)
{
    const int labels = tt__labels_node(j);
    if (labels < 0) return TT_OK;
    for (int k = 0; k < classes; k++) {
        char key[16];
        const char *label = NULL;
        snprintf(key, sizeof key, "%d", k);
        tt_status status = tt__json_read_string(j, labels, key, true, &label);
        if (status != TT_OK) return status;
        snprintf(names[k], sizeof names[k], "%s", label);
        names[k][tt__utf8_invalid(names[k], strlen(names[k]))] = 0;
    }
    return TT_OK;
}

/* Values of "problem_type" in config.json, in the order of tt_task. */
static const char *const tt__problem_types[] = {"single_label_classification", "multi_label_classification",
                                                "regression"};

/* Returns whether the class that "architectures" of config.json names matches a pattern. */
static bool tt__is_class(const tt__json *j, const char *pattern)
{
    const int classes = tt__json_get(j, 0, "architectures");
    const bool any = classes >= 0 && j->nodes[classes].kind == TT__JSON_ARRAY && j->nodes[classes].count;
    const char *name = any ? tt__json_text(j, classes + 1) : NULL;
    return name && tt__match(pattern, name);
}

/* Reads the task from "architectures" and "problem_type" of config.json. If the two do not say the task,
   *task is unchanged, or TT_TASK_SCORES if there is one class. classes: number of classes. */
static tt_status tt__read_task(const tt__json *j, int classes, tt_task *task)
{
    const char *type = NULL;
    if (tt__is_class(j, "*ForTokenClassification")) return *task = TT_TASK_TAGS, TT_OK;
    if (tt__is_class(j, "*ForMaskedLM")) return *task = TT_TASK_MASKED_LM, TT_OK;
    tt_status status = tt__json_read_string(j, 0, "problem_type", false, &type);
    if (status == TT_OK && !type && classes == 1) *task = TT_TASK_SCORES;
    if (status != TT_OK || !type) return status;
    for (int k = 0; k < TT__COUNT(tt__problem_types); k++)
        if (strcmp(type, tt__problem_types[k]) == 0) {
            *task = (tt_task)k;
            return TT_OK;
        }
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': problem_type is '%s'; only "
                    "'single_label_classification', 'multi_label_classification' and 'regression' are "
                    "supported: use another model", j->path, type);
}

/* Reads an entry of layer_types. *slides receives whether the layer has a window. */
static tt_status tt__read_layer_type(const tt__json *j, int at, bool *slides)
{
    const char *type = tt__json_text(j, at);
    *slides = type && strcmp(type, "sliding_attention") == 0;
    if (*slides || (type && strcmp(type, "full_attention") == 0)) return TT_OK;
    return tt__json_wrong(j, "layer_types", at, type, "full_attention or sliding_attention");
}

static bool tt__is_int(const tt__config_row *r) { return r->kind == 'N' || r->kind == 'n' || r->kind == '0'; }

/* Reads the fields of a config that the architecture's rows describe, and the number of classes. The config's
   pointer to the activation's name points into j. */
static tt_status tt__config_read(const tt__json *j, const tt__architecture *a, void *config)
{
    const char *act = NULL;
    tt_status status = TT_OK;
    for (int k = 0; k < a->n_config && status == TT_OK; k++) {
        const tt__config_row *r = &a->config[k];
        const char *key = r->key[a->naming];
        char *to = (char *)config + r->offset;
        if (!key) continue;
        if (tt__is_int(r)) {
            const bool needed = r->kind == 'N';
            int64_t x = tt__int_field(config, r->offset);
            status = tt__json_read_int(j, 0, key, needed, needed, INT32_MAX / 4, &x);
            *(int *)(void *)to = (int)x;
        } else if (r->kind == 'b') {
            status = tt__json_read_bool(j, 0, key, (bool *)(void *)to);
        } else {
            status = tt__json_read_float(j, 0, key, 0, r->kind == 'p' ? 1 : INFINITY, (float *)(void *)to);
        }
    }
    if (status == TT_OK) status = tt__json_read_string(j, 0, a->activation_key, false, &act);
    if (status != TT_OK) return status;
    if (act) memcpy((char *)config + a->activation, &act, sizeof act);
    const int quantized = tt__json_get(j, 0, "quantization_config");
    const int method = tt__json_get(j, quantized, "quant_method");
    const char *word = method >= 0 ? tt__json_text(j, method) : NULL;
    const bool ternary = word && strcmp(word, "bitnet") == 0; /* see src/models/few_bits.h */
    const bool known = ternary || (word && strcmp(word, "bitsandbytes") == 0);
    const int layer = ternary ? tt__json_get(j, quantized, "linear_class") : -1;
    if (layer >= 0 && strcmp(tt__json_text(j, layer) ? tt__json_text(j, layer) : "", "bitlinear") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': \"quantization_config\" has another "
                        "\"linear_class\" than bitlinear: convert the model to it", j->path);
    if (quantized >= 0 && !known && j->nodes[quantized].kind != TT__JSON_NULL)
        tt__log(j->ctx, TT_LOG_WARNING, "checkpoint", "'%s': \"quantization_config\" is ignored, because its "
                "quant_method is not bitsandbytes or bitnet: the weights are read as they are in the file, "
                "and saved without it", j->path);
    return !a->classes ? TT_OK : tt__read_classes(j, (int *)(void *)((char *)config + a->classes));
}

/* The activations that a config may name. */
static const struct tt__activation_name {
    const char *name;
    tt_value (*record)(tt_tape *t, tt_value x);
} tt__activations[] = {{"gelu", tt_gelu}, {"gelu_new", tt_gelu_tanh}, {"gelu_pytorch_tanh", tt_gelu_tanh},
                       {"relu", tt_relu}, {"silu", tt_silu}, {"swish", tt_silu}};
#define TT__UNKNOWN_ACTIVATION "activation '%s' is unknown: use gelu, gelu_new, relu or silu"

/* Returns the row of the activation `name`, or NULL if no activation has that name. */
static const struct tt__activation_name *tt__activation_row(const char *name)
{
    for (int k = 0; k < TT__COUNT(tt__activations) && name; k++)
        if (strcmp(name, tt__activations[k].name) == 0) return &tt__activations[k];
    return NULL;
}

/* Returns the function that records the activation `name`. Fails the tape if no activation has that name. */
static tt_value (*tt__activation_of(tt_tape *t, const char *name))(tt_tape *, tt_value)
{
    const struct tt__activation_name *row = tt__activation_row(name);
    if (!row) tt__tape_fail(t, TT_ERR_ARGUMENT, TT__UNKNOWN_ACTIVATION, name ? name : "(null)");
    return row ? row->record : tt_relu;
}

/* Appends to `all` the mistakes in the heads of an encoder's config. */
static void tt__check_heads(tt__text_buffer *all, int hidden, int heads, int head_size)
{
    if (head_size < 0) tt__print(all, "; head_size is %d, but must be at least 0", head_size);
    else if (head_size && (hidden % head_size || heads > hidden / head_size))
        tt__print(all, "; head_size is %d, but must be 0, or a divisor of hidden_size, %d, that has room "
                  "for %d heads",
                  head_size, hidden, heads);
    else if (!head_size && heads > 0 && hidden % heads)
        tt__print(all, "; hidden_size is %d, but must be a multiple of heads, %d", hidden, heads);
}

/* Checks a config, and fails with one message about all its mistakes. */
static tt_status tt__config_check(tt_context *ctx, const tt__architecture *a, const void *config)
{
    char text[1024];
    tt__text_buffer all = {text, sizeof text, 0};
    const int layers = tt__int_field(config, a->layers);
    const int classes = tt__classifies(a, config) ? tt__int_field(config, a->classes) : 1;
    const char *activation = (const char *)tt__pointer_at(config, a->activation);
    for (int k = 0; k < a->n_config; k++) {
        const tt__config_row *r = &a->config[k];
        if (tt__is_int(r) && tt__int_field(config, r->offset) < (r->kind != '0'))
            tt__print(&all, "; %s is %d, but must be at least %d", r->field, tt__int_field(config, r->offset),
                      r->kind != '0');
    }
    if (classes < 1) tt__print(&all, "; classes is %d, but must be at least 1", classes);
    if (classes > TT__MAX_CLASSES)
        tt__print(&all, "; classes is %d, but at most %d are supported", classes, TT__MAX_CLASSES);
    if (a->check) a->check(&all, config);
    if (layers > TT__MAX_LAYERS)
        tt__print(&all, "; layers is %d, but at most %d are supported", layers, TT__MAX_LAYERS);
    for (int k = 0; k < a->n_config; k++) {
        const tt__config_row *r = &a->config[k];
        const float x = r->kind == 'p' || r->kind == 'f' ? tt__float_field(config, r->offset) : 0;
        if (r->kind == 'p' && !(x >= 0 && x < 1))
            tt__print(&all, "; %s is %g, but must be in [0, 1)", r->field, x);
        if (r->kind == 'f' && !(x >= 0 && isfinite(x)))
            tt__print(&all, "; %s is %g, but must be a finite number of at least 0", r->field, x);
    }
    if (!tt__activation_row(activation))
        tt__print(&all, "; " TT__UNKNOWN_ACTIVATION, activation ? activation : "(null)");
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "%s config: %s", a->name, text + 2) : TT_OK;
}
