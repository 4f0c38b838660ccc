#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "layout.h"
#include "save.h"

/* ----------------------------------------------------------------------------------------------- checkpoints
   Opens the config.json of a folder, and its tensors in model.safetensors or in the files that
   model.safetensors.index.json names. */

/* Opens and parses the config.json of a folder. The caller closes c with tt__checkpoint_close, even after an
   error. */
static tt_status tt__checkpoint_open(tt_context *ctx, const char *folder, tt__checkpoint *c)
{
    memset(c, 0, sizeof *c);
    tt_status status = tt__path_join(ctx, c->path, folder, "config.json");
    if (status == TT_OK) status = tt__file_open(ctx, c->path, &c->text);
    if (status == TT_OK) status = tt__json_parse(&c->config, ctx, c->path, 0, c->text.bytes, c->text.size);
    return status;
}

static void tt__shards_close(tt_context *ctx, tt__checkpoint *c)
{
    for (int k = 0; k < c->files; k++) tt_safetensors_close(c->file[k]);
    tt__free(ctx, c->file);
    c->file = NULL;
    c->files = 0;
}

static void tt__checkpoint_close(tt_context *ctx, tt__checkpoint *c)
{
    tt__json_free(&c->config);
    tt__file_close(ctx, &c->text);
    tt__shards_close(ctx, c);
}

/* Opens, once, each file that "weight_map" of model.safetensors.index.json names. Fails if the files are from
   different saves. */
static tt_status tt__shards_of_index(tt_context *ctx, const char *folder, tt__checkpoint *s)
{
    char path[TT__PATH];
    tt__json j;
    memset(&j, 0, sizeof j);
    tt_status status = tt__path_join(ctx, path, folder, "model.safetensors.index.json");
    if (status == TT_OK) status = tt__json_open(&j, ctx, path);
    const int map = status == TT_OK ? tt__json_get(&j, 0, "weight_map") : -1;
    if (status == TT_OK && (map < 0 || j.nodes[map].kind != TT__JSON_OBJECT || !j.nodes[map].count))
        status = tt__fail(ctx, TT_ERR_FORMAT,
                          "'%s' has no \"weight_map\", which names the file of each tensor: copy the file "
                          "from the model's origin again", path);
    const int n = status == TT_OK ? j.nodes[map].count : 0;
    const char **name = (const char **)tt__alloc(ctx, sizeof *name * (size_t)(n + 1));
    if (status == TT_OK) s->file = (tt_safetensors **)tt__alloc(ctx, sizeof *s->file * (size_t)n);
    if (status == TT_OK && (!name || !s->file)) status = TT_ERR_MEMORY;
    int named = 0;
    for (int k = 0, at = map + 1; k < n && status == TT_OK; k++, at = j.nodes[at].after) {
        const char *file = tt__json_text(&j, at);
        bool known = false;
        for (int i = named - 1; i >= 0 && file && !known; i--) known = strcmp(name[i], file) == 0;
        if (known) continue;
        if (!file || !*file || strpbrk(file, "/\\:") || *file == '.')
            status = tt__json_wrong(&j, j.pool + j.nodes[at].key, at, file,
                                    "the name of a file in this folder");
        else name[named++] = file;
    }
    for (int k = 0; k < named && status == TT_OK; k++) {
        status = tt__path_join(ctx, path, folder, name[k]);
        if (status == TT_OK && !(s->file[s->files] = tt_safetensors_open(ctx, path))) status = ctx->status;
        if (status == TT_OK) s->files++;
    }
    for (int k = 1; k < s->files && status == TT_OK; k++) {
        const char *one = tt_safetensors_metadata(s->file[0], tt__save_key);
        const char *other = tt_safetensors_metadata(s->file[k], tt__save_key);
        if (strcmp(one ? one : "", other ? other : "") != 0)
            status = tt__fail(ctx, TT_ERR_FORMAT, "'%s' and '%s' belong to different models, probably "
                              "because a save over an older model was interrupted: save the model again, or "
                              "copy it from elsewhere", s->file[0]->path, s->file[k]->path);
    }
    tt__free(ctx, (void *)(uintptr_t)name);
    tt__json_free(&j);
    return status;
}

static tt_status tt__shards_one(tt_context *ctx, const char *path, tt__checkpoint *s)
{
    if (!(s->file = (tt_safetensors **)tt__alloc(ctx, sizeof *s->file))) return TT_ERR_MEMORY;
    if (!(s->file[0] = tt_safetensors_open(ctx, path))) return ctx->status;
    s->files = 1;
    return TT_OK;
}

/* Opens the files of a folder's tensors: model.safetensors or, if that file does not exist, the files that
   the index names. */
static tt_status tt__shards_open(tt_context *ctx, const char *folder, tt__checkpoint *s)
{
    char path[TT__PATH];
    bool one = false, index = false;
    tt_status status = tt__folder_has(ctx, folder, "model.safetensors", &one);
    if (status == TT_OK && !one) status = tt__folder_has(ctx, folder, "model.safetensors.index.json", &index);
    if (status != TT_OK) return status;
    if (index) return tt__shards_of_index(ctx, folder, s);
    if (!one) {
        bool pickled = false;
        status = tt__folder_has(ctx, folder, "pytorch_model.bin", &pickled);
        if (status == TT_OK && pickled)
            status = tt__fail(ctx, TT_ERR_FILE, "'%s' has pytorch_model.bin and no model.safetensors; this "
                              "Python line writes one: import torch, safetensors.torch as s; "
                              "w = torch.load('pytorch_model.bin', map_location='cpu', weights_only=True); "
                              "s.save_file({k: v.contiguous().clone() for k, v in w.items()}, "
                              "'model.safetensors', {'format': 'pt'})", folder);
        if (status != TT_OK) return status;
    }
    status = tt__path_join(ctx, path, folder, "model.safetensors");
    return status == TT_OK ? tt__shards_one(ctx, path, s) : status;
}
