#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "bert_layout.h"

/* ------------------------------------------------------------------------ folders of sentence-transformers
   The files that a folder has beside those of transformers: modules.json lists the modules, 1_Pooling has the
   pooling, 2_Normalize says that embeddings have length 1, and sentence_bert_config.json has the max number
   of tokens. Folders of version 6 have that number in tokenizer_config.json, as model_max_length. */

/* Keys of 1_Pooling/config.json up to version 5 of sentence-transformers, and values of "pooling_mode" in
   later versions. The first two are in the order of tt_pooling. */
static const struct { const char *key, *mode; } tt__poolings[] = {
    {"pooling_mode_mean_tokens", "mean"},
    {"pooling_mode_cls_token", "cls"},
    {"pooling_mode_max_tokens", "max"},
    {"pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"},
    {"pooling_mode_weightedmean_tokens", "weightedmean"},
    {"pooling_mode_lasttoken", "lasttoken"},
};

/* Reads the pooling from a module's config.json. */
static tt_status tt__pooling_read(const tt__json *j, tt_pooling *pooling)
{
    const char *mode = NULL;
    int number = -1;
    tt_status status = tt__json_read_string(j, 0, "pooling_mode", false, &mode);
    for (int k = 0; k < TT__COUNT(tt__poolings) && status == TT_OK; k++) {
        bool set = false;
        if (!mode) status = tt__json_read_bool(j, 0, tt__poolings[k].key, &set);
        if (mode ? strcmp(mode, tt__poolings[k].mode) != 0 : !set) continue;
        if (number >= 0)
            return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s' has the poolings '%s' and '%s', but only one "
                            "of 'mean' and 'cls' is supported: use another model", j->path,
                            tt__poolings[number].mode, tt__poolings[k].mode);
        number = k;
    }
    if (status != TT_OK) return status;
    if (number > TT_POOL_CLS || number < 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': the pooling is '%s', but only 'mean' and 'cls' "
                        "are supported: use another model", j->path, number < 0 ? mode ? mode : "none"
                        : tt__poolings[number].mode);
    *pooling = (tt_pooling)number;
    return TT_OK;
}

/* Reads a module that modules.json lists in node `module` of j. */
static tt_status tt__module_read(const tt__json *j, int module, const char *folder, tt_bert_config *c)
{
    const char *type = NULL, *path = "";
    char of_module[TT__PATH], file[TT__PATH];
    tt__json own;
    memset(&own, 0, sizeof own);
    tt_status status = tt__json_read_string(j, module, "type", true, &type);
    if (status == TT_OK) status = tt__json_read_string(j, module, "path", false, &path);
    if (status != TT_OK) return status;
    const char *dot = strrchr(type, '.'), *name = dot ? dot + 1 : type;
    if (strcmp(name, "Transformer") == 0 && *path)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': the encoder is in the folder '%s': move its files "
                        "to '%s', and set this module's path to \"\"", j->path, path, folder);
    if (strcmp(name, "Transformer") == 0 || strcmp(name, "Dropout") == 0) return TT_OK;
    if (strcmp(name, "Normalize") == 0) c->normalize = true;
    if (strcmp(name, "Normalize") == 0) return TT_OK;
    if (strcmp(name, "Pooling") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': the module is '%s', but only Transformer, "
                        "Pooling, Dropout and Normalize are supported: use another model", j->path, type);
    if (*path == '/' || strpbrk(path, "\\:") || strstr(path, ".."))
        return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s': the module's path is '%s', but must be that of a "
                        "folder in '%s', such as 1_Pooling", j->path, path, folder);
    status = tt__path_join(j->ctx, of_module, folder, path);
    if (status == TT_OK) status = tt__path_join(j->ctx, file, of_module, "config.json");
    if (status == TT_OK) status = tt__json_open(&own, j->ctx, file);
    if (status == TT_OK) status = tt__pooling_read(&own, &c->pooling);
    tt__json_free(&own);
    return status;
}

/* Sets *length to the max number of tokens that a file of the folder has as `key`. Leaves *length unchanged
   if the folder lacks the file, or the file lacks the key. */
static tt_status tt__length_read(tt_context *ctx, const char *folder, const char *file, const char *key,
                                 double *length)
{
    char path[TT__PATH];
    bool there = false;
    tt__json j;
    memset(&j, 0, sizeof j);
    tt_status status = tt__folder_has(ctx, folder, file, &there);
    if (status != TT_OK || !there) return status;
    status = tt__path_join(ctx, path, folder, file);
    if (status == TT_OK) status = tt__json_open(&j, ctx, path);
    const int node = status == TT_OK ? tt__json_member(&j, 0, key, false, 1 << TT__JSON_NUMBER_KIND,
                                                       "a number of at least 1", &status) : -1;
    if (node >= 0 && !(j.nodes[node].number >= 1))
        status = tt__json_wrong(&j, key, node, NULL, "a number of at least 1");
    else if (node >= 0) *length = j.nodes[node].number;
    tt__json_free(&j);
    return status;
}

/* If a folder has modules.json, sets the task to TT_TASK_EMBED, and pooling, normalize and max_length to what
   the folder's files say. */
static tt_status tt__embedder_read(tt_context *ctx, const char *folder, tt_bert_config *c)
{
    char path[TT__PATH];
    bool listed = false;
    double length = 0, other = 0;
    tt__json j;
    memset(&j, 0, sizeof j);
    tt_status status = tt__folder_has(ctx, folder, "modules.json", &listed);
    if (status != TT_OK || !listed) return status;
    c->task = TT_TASK_EMBED;
    status = tt__path_join(ctx, path, folder, "modules.json");
    if (status == TT_OK) status = tt__json_open(&j, ctx, path);
    const bool list = status == TT_OK && j.count && j.nodes[0].kind == TT__JSON_ARRAY;
    if (status == TT_OK && !list)
        status = tt__fail(ctx, TT_ERR_FORMAT, "'%s' is not a JSON array of modules: copy it from the model's "
                          "origin again", path);
    for (int k = 0, at = 1; list && k < j.nodes[0].count && status == TT_OK; k++, at = j.nodes[at].after)
        status = tt__module_read(&j, at, folder, c);
    tt__json_free(&j);
    if (status == TT_OK)
        status = tt__length_read(ctx, folder, "sentence_bert_config.json", "max_seq_length", &length);
    if (status == TT_OK && !(length > 0))
        status = tt__length_read(ctx, folder, "tokenizer_config.json", "model_max_length", &other);
    /* transformers writes 1e30 as model_max_length for no limit */
    if (other > 0 && other < c->max_positions - tt__bert_offset(c)) length = other;
    c->max_length = (int)fmin(length, INT_MAX);
    return status;
}

static void tt__print_modules(tt__text_buffer *json, const void *config)
{
    static const char *const modules[] = {"Transformer", "Pooling", "Normalize"};
    const int count = ((const tt_bert_config *)config)->normalize ? 3 : 2;
    tt__print(json, "[\n");
    for (int k = 0; k < count; k++) {
        tt__print(json, "  {\"idx\": %d, \"name\": \"%d\", \"path\": \"", k, k);
        if (k) tt__print(json, "%d_%s", k, modules[k]);
        tt__print(json, "\", \"type\": \"sentence_transformers.models.%s\"}%s\n", modules[k],
                  k + 1 < count ? "," : "");
    }
    tt__print(json, "]\n");
}

static void tt__print_pooling(tt__text_buffer *json, const void *config)
{
    const tt_bert_config *c = (const tt_bert_config *)config;
    tt__print(json, "{\n  \"word_embedding_dimension\": %d", c->hidden_size);
    for (int k = 0; k < TT__COUNT(tt__poolings); k++)
        tt__print(json, ",\n  \"%s\": %s", tt__poolings[k].key, k == (int)c->pooling ? "true" : "false");
    tt__print(json, "\n}\n");
}

static void tt__print_normalize(tt__text_buffer *json, const void *config)
{
    (void)config;
    tt__print(json, "{}\n");
}

static void tt__print_length(tt__text_buffer *json, const void *config)
{
    const tt_bert_config *c = (const tt_bert_config *)config;
    tt__print(json, "{\n  \"max_seq_length\": %d,\n  \"do_lower_case\": false\n}\n",
              c->max_length ? c->max_length : c->max_positions - tt__bert_offset(c));
}

/* Writes the files of sentence-transformers if the task is TT_TASK_EMBED. */
static tt_status tt__embedder_save(tt_context *ctx, const char *folder, const tt_bert_config *c)
{
    static const struct {
        const char *folder, *file;
        void (*print)(tt__text_buffer *json, const void *config);
    } files[] = {
        {"", "sentence_bert_config.json", tt__print_length},
        {"1_Pooling", "config.json", tt__print_pooling},
        {"2_Normalize", "config.json", tt__print_normalize},
        {"", "modules.json", tt__print_modules},
    };
    char path[TT__PATH];
    tt_status status = TT_OK;
    for (int k = 0; c->task == TT_TASK_EMBED && k < TT__COUNT(files) && status == TT_OK; k++) {
        if (files[k].print == tt__print_normalize && !c->normalize) continue;
        status = tt__path_join(ctx, path, folder, files[k].folder);
        if (status == TT_OK && *files[k].folder) status = tt__make_folder(ctx, path);
        if (status == TT_OK) status = tt__save_printed(ctx, path, files[k].file, files[k].print, c);
    }
    return status;
}
