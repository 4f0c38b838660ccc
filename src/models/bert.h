#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../files/safetensors.h"
#include "save.h"
#include "config.h"
#include "model.h"
#include "classifier.h"
#include "bert_layout.h"
#include "big_bird.h"

/* The sum of what a token, its place and its type embed as, before its norm. All are (rows, hidden). */
static tt_value tt__bert_embed(const tt_bert *m, tt_tape *t, const tt_inputs *in)
{
    const tt_bert_config *c = &m->config;
    const int offset = c->kind == TT_ROBERTA ? c->pad_token + 1 : 0;
    /* The order of these two decides the random numbers of the updates. */
    tt_value places = tt_embedding_offset(t, in->positions, m->position, offset);
    tt_value words = tt_embedding(t, in->ids, m->word);
    if (c->kind == TT_BIG_BIRD && c->scale_embeddings)
        words = tt_scale(t, words, sqrtf((float)c->hidden_size));
    tt_value x = tt_add(t, words, places);
    if (m->type && c->kind == TT_ROBERTA) return tt_add(t, x, tt_param_value(t, m->type));
    return m->type ? tt_add(t, x, tt_embedding(t, in->types, m->type)) : x;
}

/* Attention of a layer. lists: room for those of BigBird, (heads, blocks, random_blocks) and blocks more. */
static tt_attention_options tt__bert_attention(const tt_bert_config *c, int layer, int32_t *lists)
{
    tt_attention_options o = tt_attention_options_default(c->heads);
    o.dropout = c->attention_dropout;
    o.max_length = c->max_positions;
    if (!lists) return o;
    o.dropout = 0;
    o.block = c->block_size;
    o.dense = (5 + 2 * c->random_blocks) * c->block_size;
    o.listed = c->random_blocks;
    o.list_rows = (int)tt__ceil_div(c->max_positions, c->block_size);
    o.lists = lists;
    o.lists_for_training = true;
    tt__big_bird_lists(lists, c->heads, o.list_rows, o.listed, o.block, (uint32_t)layer,
                       lists + (size_t)o.heads * (size_t)o.list_rows * (size_t)o.listed);
    return o;
}

tt_value tt_bert_encode(const tt_bert *m, tt_tape *t, const tt_inputs *in)
{
    const tt_bert_config *c = &m->config;
    const bool sparse = c->kind == TT_BIG_BIRD && c->block_sparse;
    const size_t blocks = (size_t)tt__ceil_div(c->max_positions, tt__max(1, c->block_size));
    const size_t random = (size_t)c->random_blocks, lists_of = blocks * (size_t)c->heads * random;
    int32_t *lists = NULL;
    if (sparse) lists = (int32_t *)tt__alloc(m->ctx, (lists_of + blocks + 2 * random + 5) * sizeof *lists);
    if (sparse && !lists) {
        tt__tape_fail(t, TT_ERR_MEMORY, "no memory for the lists of blocks");
        return tt__handle(t, 0);
    }
    /* All but h is (rows, hidden). */
    tt_value x = tt__bert_embed(m, t, in);
    if (c->kind == TT_BIG_BIRD) x = tt_dropout(t, x, c->dropout);
    x = tt_layernorm(t, x, m->norm_w, m->norm_b, c->layer_norm_eps);
    if (c->kind != TT_BIG_BIRD) x = tt_dropout(t, x, c->dropout);
    tt_name(t, x, "embeddings");
    for (int k = 0; k < c->layers; k++) {
        const tt_bert_layer *l = &m->layer[k];
        tt_value q = tt_linear(t, x, l->q_w, l->q_b), key = tt_linear(t, x, l->k_w, l->k_b);
        tt_value v = tt_linear(t, x, l->v_w, l->v_b);
        const tt_attention_options attention = tt__bert_attention(c, k, lists);
        tt_value o = tt_attention(t, q, key, v, in->seq_start, &attention);
        tt_name(t, o, "layer.%d.attention", k);
        o = tt_linear(t, o, l->attention_w, l->attention_b);
        if (c->kind != TT_DISTILBERT) o = tt_dropout(t, o, c->dropout); /* DistilBERT has none here */
        x = tt_layernorm(t, tt_add(t, o, x), l->attention_norm_w, l->attention_norm_b, c->layer_norm_eps);
        tt_name(t, x, "layer.%d.attention_norm", k);
        tt_value h = tt_linear(t, x, l->up_w, l->up_b); /* (rows, intermediate) */
        h = tt__activation_of(m->activation)(t, h);
        tt_name(t, h, "layer.%d.intermediate", k);
        h = tt_dropout(t, tt_linear(t, h, l->down_w, l->down_b), c->dropout);
        x = tt_add(t, h, x);
        tt_block_end(t, x); /* not the norm, whose backward reads this */
        x = tt_layernorm(t, x, l->output_norm_w, l->output_norm_b, c->layer_norm_eps);
        tt_name(t, x, "layer.%d", k);
    }
    tt__free(m->ctx, lists);
    return x;
}

tt_value tt_bert_logits(const tt_bert *m, tt_tape *t, const tt_inputs *in)
{
    tt_value h = tt_gather_rows(t, tt_bert_encode(m, t, in), in->first); /* (seqs, hidden): [CLS] */
    const tt_bert_kind kind = m->config.kind;
    if (kind >= TT_ROBERTA) h = tt_dropout(t, h, m->config.classifier_dropout);
    if (m->head_w) {
        h = tt_linear(t, h, m->head_w, m->head_b);
        h = kind == TT_DISTILBERT ? tt_relu(t, h)
            : kind == TT_BIG_BIRD ? tt__activation_of(m->activation)(t, h) : tt_tanh(t, h);
    }
    h = tt_linear(t, tt_dropout(t, h, m->config.classifier_dropout), m->classifier_w, m->classifier_b);
    tt_name(t, h, "logits");
    return h;
}

static tt_value tt__bert_record(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    tt_inputs in = tt_text_inputs(t, o);
    *output = tt_bert_logits((const tt_bert *)self, t, &in);
    return tt__classify(t, *output, &in, o);
}

tt_model tt_bert_classifier(const tt_bert *m)
{
    const tt_bert_config *c = &m->config;
    const int length = c->max_positions - (c->kind == TT_ROBERTA ? c->pad_token + 1 : 0);
    tt_model model = {m, tt__bert_record, tt_accuracy(), c->classes, "tokens", length, false};
    return model;
}

static tt_status tt__bert_read_config(const tt__json *j, tt_bert_config *c)
{
    const char *type = NULL, *position = "absolute", *attention = "block_sparse";
    bool decoder = false;
    tt_status status = tt__json_read_string(j, 0, "model_type", true, &type);
    if (status != TT_OK) return status;
    int kind = 0;
    while (kind <= TT_BIG_BIRD &&
           strcmp(type, tt__bert_of((tt_bert_kind)kind)->type[tt__bert_spelling((tt_bert_kind)kind)]) != 0)
        kind++;
    if (kind > TT_BIG_BIRD)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': model_type is '%s'; this loader reads 'bert' "
                        "(BERT, MiniLM), 'distilbert', 'roberta' and 'big_bird'", j->path, type);
    *c = tt_bert_config_default((tt_bert_kind)kind);
    if (kind != TT_DISTILBERT) c->classifier_dropout = -1; /* where there is none, it is as `dropout` */
    status = tt__config_read(j, tt__bert_of(c->kind), tt__bert_spelling(c->kind), c);
    if (c->classifier_dropout < 0) c->classifier_dropout = c->dropout;
    if (status == TT_OK) status = tt__json_read_string(j, 0, "position_embedding_type", false, &position);
    if (status == TT_OK && kind == TT_BIG_BIRD)
        status = tt__json_read_string(j, 0, "attention_type", false, &attention);
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "is_decoder", &decoder);
    if (status != TT_OK) return status;
    c->block_sparse = kind == TT_BIG_BIRD && strcmp(attention, "block_sparse") == 0;
    if (strcmp(position, "absolute") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': position_embedding_type is '%s'; only "
                        "'absolute' is supported", j->path, position);
    if (!c->block_sparse && kind == TT_BIG_BIRD && strcmp(attention, "original_full") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': attention_type is '%s'; 'block_sparse' and "
                        "'original_full' are supported", j->path, attention);
    if (decoder)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': is_decoder is true; only encoders are supported",
                        j->path);
    return TT_OK;
}

/* The files of a checkpoint, opened; each named once by an index. */
typedef struct tt__shards {
    tt_safetensors **file;
    int files;
} tt__shards;

static void tt__shards_close(tt_context *ctx, tt__shards *s)
{
    for (int k = 0; k < s->files; k++) tt_safetensors_close(s->file[k]);
    tt__free(ctx, s->file);
}

/* Opens the files that weight_map of model.safetensors.index.json names. */
static tt_status tt__shards_of_index(tt_context *ctx, const char *folder, tt__shards *s)
{
    char path[TT__PATH];
    tt__json j;
    memset(&j, 0, sizeof j);
    tt_status status = tt__path_join(ctx, path, folder, "model.safetensors.index.json");
    if (status == TT_OK) status = tt__json_open(&j, ctx, path);
    const int map = status == TT_OK ? tt__json_get(&j, 0, "weight_map") : -1;
    if (status == TT_OK && (map < 0 || j.nodes[map].kind != TT__JSON_OBJECT || !j.nodes[map].count))
        status = tt__fail(ctx, TT_ERR_FORMAT, "'%s' has no \"weight_map\", which says what file has what "
                          "tensor", path);
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
            status = tt__fail(ctx, TT_ERR_FORMAT, "'%s' and '%s' are not of the same model: a save over an "
                              "older one was cut off; save it again, or take a copy", s->file[0]->path,
                              s->file[k]->path);
    }
    tt__free(ctx, (void *)(uintptr_t)name);
    tt__json_free(&j);
    return status;
}

static tt_status tt__shards_one(tt_context *ctx, const char *path, tt__shards *s)
{
    if (!(s->file = (tt_safetensors **)tt__alloc(ctx, sizeof *s->file))) return TT_ERR_MEMORY;
    if (!(s->file[0] = tt_safetensors_open(ctx, path))) return ctx->status;
    s->files = 1;
    return TT_OK;
}

static tt_status tt__shards_open(tt_context *ctx, const char *folder, tt__shards *s)
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

tt_status tt_bert_load(tt_context *ctx, tt_bert *m, const char *folder, int classes)
{
    char path[TT__PATH];
    tt__json j;
    tt_bert_config config;
    tt__shards s = {NULL, 0};
    memset(m, 0, sizeof *m);
    memset(&j, 0, sizeof j);
    tt_status status = tt__path_join(ctx, path, folder, "config.json");
    if (status == TT_OK) status = tt__json_open(&j, ctx, path);
    if (status == TT_OK) status = tt__bert_read_config(&j, &config);
    if (status == TT_OK) status = tt__shards_open(ctx, folder, &s);
    if (status == TT_OK)
        status = tt__model_load(tt__bert_of(config.kind), m, &config, classes, 0, &j,
                                tt__bert_spelling(config.kind), tt__bert_spelling(config.kind), s.file,
                                s.files);
    tt__json_free(&j);
    tt__shards_close(ctx, &s);
    return status;
}

tt_status tt_bert_save(const tt_bert *m, const char *folder)
{
    tt_bert_config config = m->config;
    config.activation = m->activation;
    const int spelling = tt__bert_spelling(config.kind);
    return tt__model_save(m->ctx, tt__bert_of(config.kind), m, &config, spelling, spelling, 0, folder);
}
