#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../context/params.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../files/safetensors.h"
#include "layout.h"
#include "model.h"
#include "checkpoint.h"
#include "lm_layout.h"
#include "lm_config.h"

/* -------------------------------------------------------- creating, loading and saving a language model */

tt_status tt_lm_new(tt_context *ctx, tt_lm *m, const tt_lm_config *config)
{
    tt_lm_config c = *config;
    memset(m, 0, sizeof *m);
    const tt__architecture *a = tt__lm_complete(ctx, &c);
    if (a && (c.end_token < -1 || c.end_token >= c.vocab_size))
        return tt__fail(ctx, TT_ERR_ARGUMENT,
                        "language model: end_token is %d; expected a token below %d, or -1 for none",
                        c.end_token, c.vocab_size);
    tt_status status = a ? tt__model_new(ctx, a, m, &c) : ctx->status;
    if (status == TT_OK) m->shard_bytes = (size_t)5000000000u;
    return status;
}

void tt_lm_free(tt_lm *m)
{
    if (!m->ctx) return;
    if (m->kept) tt__checkpoint_close(m->ctx, m->kept);
    void *const owned[] = {m->stop, m->generation, m->kept, m->base, m->lora};
    tt__free_all(m->ctx, owned, TT__COUNT(owned));
    tt__model_free(&tt__lm_kinds[0].a, m); /* the structs of all kinds are equal */
}

/* Fails if config.json ties the weight of the last matrix product to the embedding, but a file has a
   different weight for the product, which transformers would use. */
static tt_status tt__lm_check_tied(const tt_lm *m, const tt__checkpoint *s)
{
    static const char *const names[] = {"lm_head.weight", "embed_out.weight"};
    enum { AT_ONCE = 4096 };
    const tt_param *word = m->word;
    float head[AT_ONCE], tied[AT_ONCE];
    for (int k = 0; k < 2 * s->files && m->config.tied && !m->config.classes; k++) {
        const tt_safetensors *file = s->file[k / 2];
        const int at = tt_safetensors_find(file, names[k % 2]);
        const tt_tensor_info *info = at >= 0 ? tt_safetensors_info(file, at) : NULL;
        if (!info) continue;
        bool same = info->ndim == 2 && memcmp(info->dims, word->dims, 2 * sizeof *word->dims) == 0;
        for (int64_t first = 0; first < word->size && same; first += AT_ONCE) {
            const int64_t n = word->size - first < AT_ONCE ? word->size - first : AT_ONCE + 0;
            tt_status status = tt_safetensors_read_f32(file, at, first, n, head);
            if (status == TT_OK) status = word->read(word->source, first, n, tied);
            if (status != TT_OK) return status;
            same = memcmp(head, tied, (size_t)n * sizeof *head) == 0;
        }
        if (!same)
            return tt__fail(m->ctx, TT_ERR_UNSUPPORTED, "'%s': '%s' differs from '%s', although config.json "
                            "ties them: set \"tie_word_embeddings\" to false there, or remove the first "
                            "tensor from the file", file->path, names[k % 2], word->name);
    }
    return TT_OK;
}

/* Reads "eos_token_id", a number or a list of numbers, and keeps the ids below `vocab`. The caller frees
   *ids. */
static tt_status tt__lm_read_stop(const tt__json *j, int vocab, int32_t **ids, int *n)
{
    const int node = tt__json_get(j, 0, "eos_token_id");
    const tt__json_node *at = node < 0 ? NULL : &j->nodes[node];
    const bool list = at && at->kind == TT__JSON_ARRAY;
    const int64_t count = list ? at->count : at && at->kind != TT__JSON_NULL;
    *n = 0;
    *ids = (int32_t *)tt__alloc(j->ctx, sizeof **ids * (size_t)(count + 1));
    if (!*ids) return TT_ERR_MEMORY;
    for (int64_t k = 0; k < count; k++) {
        const tt__json_node *id = at + k + list;
        if (id->kind != TT__JSON_NUMBER_KIND || !id->exact)
            return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s': \"eos_token_id\" must be an id, a list of ids or "
                            "null", j->path);
        if (id->integer >= 0 && id->integer < vocab) (*ids)[(*n)++] = (int32_t)id->integer;
    }
    return TT_OK;
}

/* Reads generation_config.json, if the folder has that file. Reads the ids of the tokens that end an answer
   from that file or, if the folder lacks the file, from config.json. */
static tt_status tt__lm_read_generation(tt_lm *m, const tt__json *config, const char *folder)
{
    char path[TT__PATH];
    bool there = false;
    tt__json j;
    tt__file_bytes file;
    memset(&j, 0, sizeof j);
    j.ctx = m->ctx;
    memset(&file, 0, sizeof file);
    tt_status status = tt__path_join(m->ctx, path, folder, "generation_config.json");
    if (status == TT_OK) status = tt__folder_has(m->ctx, folder, "generation_config.json", &there);
    if (status == TT_OK && there) status = tt__file_open(m->ctx, path, &file);
    if (status == TT_OK && there) status = tt__json_parse(&j, m->ctx, path, 0, file.bytes, file.size);
    if (status == TT_OK && there && j.nodes[0].kind != TT__JSON_OBJECT)
        status = tt__fail(m->ctx, TT_ERR_FORMAT, "'%s' is %s; expected a JSON object", path,
                          tt__json_kind_name(&j, 0));
    if (status == TT_OK)
        status = tt__lm_read_stop(there ? &j : config, m->config.vocab_size, &m->stop, &m->n_stop);
    m->generation = file.bytes;
    tt__json_free(&j);
    return status;
}

/* Sets m->stored and m->stored_bytes from the formats of the parameters. a: the architecture of m. */
static void tt__lm_note_stored(tt_lm *m, const tt__architecture *a)
{
    const tt__layout l = tt__layout_of(m->ctx, a, m, &m->config, NULL);
    const tt__tensor_row *row;
    char name[256];
    m->stored = NULL;
    m->stored_bytes = 0;
    for (int k = 0; (row = tt__layout_row(&l, k, name)) != NULL; k++) {
        const tt_param *p = *tt__layout_slot(&l, row, k);
        if (!p || !tt__is_coded(p->form)) continue;
        m->stored = tt_dtype_name(p->form);
        m->stored_bytes += tt__matrix_bytes(p->form, p->dims[0], p->dims[1]);
    }
}

tt_status tt_lm_load_head(tt_context *ctx, tt_lm *m, const char *folder, const tt_head *head)
{
    tt_lm_config config;
    int classes = 0;
    const tt__architecture *a = NULL;
    const int params = ctx->n_params;
    memset(m, 0, sizeof *m);
    tt__checkpoint *s = (tt__checkpoint *)tt__alloc(ctx, sizeof *s);
    if (!s) return TT_ERR_MEMORY;
    tt_status status = tt__checkpoint_open(ctx, folder, s);
    if (status == TT_OK) status = tt__lm_read_config(&s->config, &config, &a, &classes);
    if (status == TT_OK) status = tt__shards_open(ctx, folder, s);
    if (head) config.task = head->task;
    if (head) config.classes = classes;
    if (status == TT_OK) status = tt__model_load(a, m, &config, s, head ? head->outputs : 0, 0);
    if (status != TT_OK) {
        tt__checkpoint_close(ctx, s);
        tt__free(ctx, s);
        return status;
    }
    m->shard_bytes = (size_t)5000000000u;
    m->kept = s;
    m->read = m->config;
    tt__lm_note_stored(m, a);
    status = (m->base = tt__strdup(ctx, folder)) ? tt__lm_check_tied(m, s) : TT_ERR_MEMORY;
    if (status == TT_OK) status = tt__lm_read_generation(m, &s->config, folder);
    tt__shards_close(ctx, s);
    if (status == TT_OK) return TT_OK;
    tt__params_undo(ctx, params);
    tt_lm_free(m);
    return status;
}

tt_status tt_lm_load(tt_context *ctx, tt_lm *m, const char *folder)
{
    return tt_lm_load_head(ctx, m, folder, NULL);
}

tt_status tt_lm_name_classes(tt_lm *m, tt_dataset *d)
{
    if (m->config.classes)
        return tt__name_classes(m->ctx, m->config.task, m->class_names, m->config.classes, !m->new_head, d);
    return tt__fail(m->ctx, TT_ERR_ARGUMENT, "the model predicts tokens and has no classes: load its folder "
                    "with tt_lm_load_head");
}

tt_status tt_lm_save(const tt_lm *m, const char *folder)
{
    tt_lm_config config = m->config;
    char path[TT__PATH];
    const tt__architecture *a = tt__lm_complete(m->ctx, &config);
    tt_status status = a ? tt__model_save(m->ctx, a, m, &config, 0, m->shard_bytes, folder)
                         : m->ctx->status;
    if (status != TT_OK || !m->generation) return status;
    status = tt__path_join(m->ctx, path, folder, "generation_config.json");
    return status == TT_OK ? tt__write_text(m->ctx, path, m->generation) : status;
}
