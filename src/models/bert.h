#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../files/json.h"
#include "../data/dataset.h"
#include "layout.h"
#include "config.h"
#include "model.h"
#include "checkpoint.h"
#include "classifier.h"
#include "bert_layout.h"
#include "big_bird.h"
#include "embedder.h"

/* ----------------------------------------------------------------------------------- BERT and its variants
   Records a BERT model on a tape, and loads and saves a model's folder. */

/* Records the sum of the embeddings of tokens, positions and types, which the norm then reads. The result has
   the shape (rows, hidden), in ALBERT (rows, embedding_size). */
static tt_value tt__bert_embeddings(const tt_bert *m, tt_tape *t, const tt_inputs *in)
{
    const tt_bert_config *c = &m->config;
    const int flags = tt__bert_of(c)->flags, offset = tt__bert_offset(c);
    /* Keep the order of the next two calls: the random numbers of updates depend on it. */
    tt_value places = tt_embedding_offset(t, in->positions, m->position, offset);
    tt_value words = tt_embedding(t, in->ids, m->word);
    if (flags & TT__BERT_SPARSE && c->scale_embeddings)
        words = tt_scale(t, words, sqrtf((float)c->hidden_size));
    tt_value x = tt_add(t, words, places);
    if (m->type && flags & TT__BERT_OFFSET && c->type_vocab_size == 1)
        return tt_add(t, x, tt_param_value(t, m->type));
    return m->type ? tt_add(t, x, tt_embedding(t, in->types, m->type)) : x;
}

/* Returns the options of a layer's attention. lists: NULL for full attention; for BigBird, memory for the
   lists of random blocks, (heads, blocks, random_blocks), and then scratch memory for `blocks` numbers. */
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

/* Records ModernBERT for tt_bert_hidden. */
static tt_value tt__modern_hidden(const tt_bert *m, tt_tape *t, const tt_inputs *in, tt_value *hidden)
{
    const tt_bert_config *c = &m->config;
    const float eps = c->layer_norm_eps;
    tt_value x = tt_layernorm(t, tt_embedding(t, in->ids, m->word), m->norm_w, m->norm_b, eps);
    x = tt_dropout(t, x, c->embedding_dropout);
    tt_name(t, x, "embeddings");
    if (hidden) hidden[0] = x;
    for (int k = 0; k < c->layers; k++) {
        const tt_bert_layer *l = &m->layer[k];
        const bool full = k % c->full_every == 0;
        tt_rotary_options r = tt_rotary_options_default(c->heads);
        tt_attention_options a = tt_attention_options_default(c->heads);
        r.base = full ? c->rotary_base : c->window_base;
        a.window = full ? 0 : c->local_attention / 2 + 1;
        a.dropout = c->attention_dropout;
        a.max_length = c->max_positions;
        tt_value h = x;
        if (l->attention_norm_w) h = tt_layernorm(t, x, l->attention_norm_w, l->attention_norm_b, eps);
        tt_value q = tt_linear(t, h, l->q_w, l->q_b), key = tt_linear(t, h, l->k_w, l->k_b);
        tt_value v = tt_linear(t, h, l->v_w, l->v_b);
        q = tt_rotary(t, q, in->positions, &r);
        key = tt_rotary(t, key, in->positions, &r);
        h = tt_attention(t, q, key, v, in->seq_start, &a);
        tt_name(t, h, "layer.%d.attention", k);
        h = tt_dropout(t, tt_linear(t, h, l->attention_w, l->attention_b), c->attention_dropout);
        x = tt_add(t, h, x);
        h = tt_layernorm(t, x, l->output_norm_w, l->output_norm_b, eps);
        tt_value gate = tt_linear(t, h, l->gate_w, l->gate_b), up = tt_linear(t, h, l->up_w, l->up_b);
        h = tt_mul(t, tt__activation_of(t, c->activation)(t, gate), up); /* (rows, intermediate) */
        tt_name(t, h, "layer.%d.intermediate", k);
        x = tt_add(t, tt_linear(t, tt_dropout(t, h, c->dropout), l->down_w, l->down_b), x);
        tt_block_end(t, x);
        tt_name(t, x, "layer.%d", k);
        if (hidden) hidden[k + 1] = x;
    }
    x = tt_layernorm(t, x, m->last_norm_w, m->last_norm_b, eps);
    if (hidden) hidden[c->layers] = x; /* transformers, too, returns the last hidden states after the norm */
    return x;
}

tt_value tt_bert_hidden(const tt_bert *m, tt_tape *t, const tt_inputs *in, tt_value *hidden)
{
    const tt_bert_config *c = &m->config;
    const int flags = tt__bert_of(c)->flags;
    const bool sparse = flags & TT__BERT_SPARSE && c->block_sparse;
    const size_t blocks = (size_t)tt__ceil_div(c->max_positions, tt__max(1, c->block_size));
    const size_t random = (size_t)c->random_blocks, lists_of = blocks * (size_t)c->heads * random;
    int32_t *lists = NULL;
    if (flags & TT__BERT_MODERN) return tt__modern_hidden(m, t, in, hidden);
    if (sparse) lists = (int32_t *)tt__alloc(m->ctx, (lists_of + blocks + 2 * random + 5) * sizeof *lists);
    if (sparse && !lists) {
        tt__tape_fail(t, TT_ERR_MEMORY, "out of memory for the lists of blocks: free memory");
        return tt__handle(t, 0);
    }
    /* The values of a layer, except h, have the shape (rows, hidden). */
    tt_value x = tt__bert_embeddings(m, t, in);
    if (flags & TT__BERT_DROP_SUM) x = tt_dropout(t, x, c->dropout);
    x = tt_layernorm(t, x, m->norm_w, m->norm_b, c->layer_norm_eps);
    if (!(flags & TT__BERT_DROP_SUM)) x = tt_dropout(t, x, c->dropout);
    if (m->mapping_w) x = tt_linear(t, x, m->mapping_w, m->mapping_b);
    tt_name(t, x, "embeddings");
    if (hidden) hidden[0] = x;
    for (int k = 0; k < c->layers; k++) {
        const tt_bert_layer *l = &m->layer[k];
        tt_value q = tt_linear(t, x, l->q_w, l->q_b), key = tt_linear(t, x, l->k_w, l->k_b);
        tt_value v = tt_linear(t, x, l->v_w, l->v_b);
        const tt_attention_options attention = tt__bert_attention(c, k, lists);
        tt_value o = tt_attention(t, q, key, v, in->seq_start, &attention);
        tt_name(t, o, "layer.%d.attention", k);
        o = tt_linear(t, o, l->attention_w, l->attention_b);
        if (flags & TT__BERT_DROP_OUT) o = tt_dropout(t, o, c->dropout);
        x = tt_layernorm(t, tt_add(t, o, x), l->attention_norm_w, l->attention_norm_b, c->layer_norm_eps);
        tt_name(t, x, "layer.%d.attention_norm", k);
        tt_value h = tt_linear(t, x, l->up_w, l->up_b); /* (rows, intermediate) */
        h = tt__activation_of(t, c->activation)(t, h);
        tt_name(t, h, "layer.%d.intermediate", k);
        h = tt_linear(t, h, l->down_w, l->down_b);
        if (!(flags & TT__BERT_SHARED)) h = tt_dropout(t, h, c->dropout);
        x = tt_add(t, h, x);
        tt_block_end(t, x); /* before the norm, because the norm's backward reads x */
        x = tt_layernorm(t, x, l->output_norm_w, l->output_norm_b, c->layer_norm_eps);
        tt_name(t, x, "layer.%d", k);
        if (hidden) hidden[k + 1] = x;
    }
    tt__free(m->ctx, lists);
    return x;
}

tt_value tt_bert_encode(const tt_bert *m, tt_tape *t, const tt_inputs *in)
{
    return tt_bert_hidden(m, t, in, NULL);
}

tt_value tt_bert_logits(const tt_bert *m, tt_tape *t, const tt_inputs *in)
{
    const tt_bert_config *c = &m->config;
    const tt__bert_flags *k = tt__bert_of(c);
    const bool tags = c->task == TT_TASK_TAGS;
    const bool masked = c->task == TT_TASK_MASKED_LM;
    const float dropout = tags && k->flags & TT__BERT_DROP_TAGS ? c->dropout : c->classifier_dropout;
    if (c->task == TT_TASK_EMBED)
        tt__tape_fail(t, TT_ERR_ARGUMENT, "tt_bert_logits: the model's task is TT_TASK_EMBED, so it has no "
                      "classifier: record tt_bert_embed, or load the folder with another task");
    tt_value h = tt_bert_encode(m, t, in);
    const bool mean = k->flags & TT__BERT_MODERN && c->pooling == TT_POOL_MEAN;
    if (mean && !tags && !masked) h = tt_mean_pool(t, h, in->seq_start);
    else if (!tags) h = tt_gather_rows(t, h, masked ? in->masked : in->first); /* first: [CLS] of each text */
    if (m->transform_w) { /* before the logits of masked tokens */
        h = tt_linear(t, h, m->transform_w, m->transform_b);
        h = k->flags & TT__BERT_OFFSET ? tt_gelu(t, h) : tt__activation_of(t, c->activation)(t, h);
        h = tt_layernorm(t, h, m->transform_norm_w, m->transform_norm_b, c->layer_norm_eps);
    }
    if (m->head_w) {
        if (k->flags & TT__BERT_DROP_HEAD) h = tt_dropout(t, h, c->classifier_dropout);
        h = tt_linear(t, h, m->head_w, m->head_b);
        h = (k->head ? k->head : tt__activation_of(t, c->activation))(t, h);
        if (m->head_norm_w) h = tt_layernorm(t, h, m->head_norm_w, m->head_norm_b, c->layer_norm_eps);
    }
    if (masked) h = tt_linear(t, h, m->word, m->word_b);
    else h = tt_linear(t, tt_dropout(t, h, dropout), m->classifier_w, m->classifier_b);
    tt_name(t, h, "logits");
    return h;
}

tt_value tt_bert_embed(const tt_bert *m, tt_tape *t, const tt_inputs *in)
{
    tt_value h = tt_bert_encode(m, t, in);
    if (m->config.pooling == TT_POOL_CLS) h = tt_gather_rows(t, h, in->first);
    else h = tt_mean_pool(t, h, in->seq_start);
    if (m->config.normalize) h = tt_normalize(t, h, 1e-12f); /* eps of torch.nn.functional.normalize */
    tt_name(t, h, "embedding");
    return h;
}

static tt_value tt__bert_record(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    const tt_bert *m = (const tt_bert *)self;
    tt_inputs in = tt_text_inputs(t, o);
    if (m->config.task == TT_TASK_EMBED) {
        *output = tt_bert_embed(m, t, &in);
        return o->compile.train ? tt_contrastive_loss(t, *output, o) : *output;
    }
    if (m->config.task == TT_TASK_MASKED_LM) {
        const int64_t rows = tt_axis(t, "masked", o->max_masked ? o->max_masked : o->max_tokens);
        in.masked = tt_input(t, "masked", TT_I32, rows, 1);
        in.targets = tt_input(t, "targets", TT_I32, rows, 1);
        const tt_value logits = tt_bert_logits(m, t, &in);
        if (!o->compile.train) *output = logits; /* in training, the loss computes the logits piece by piece,
                                                    so no value has them all */
        return tt__classify(t, logits, in.targets, o);
    }
    *output = tt_bert_logits(m, t, &in);
    return tt__task_loss(t, m->config.task, *output, &in, o);
}

tt_model tt_bert_model(const tt_bert *m)
{
    const tt_bert_config *c = &m->config;
    const int positions = c->max_positions - tt__bert_offset(c);
    const bool limit = c->task == TT_TASK_EMBED && c->max_length > 0 && c->max_length < positions;
    tt_model model = {m, tt__bert_record, {{NULL, NULL, false, NULL}}, c->classes, "tokens",
                      limit ? c->max_length : positions, false, c->task};
    tt__task_metrics(c->task, m->class_names, c->classes, model.metrics);
    return model;
}

/* Reads the members of ModernBERT's config.json that no table row describes: which layers have windows,
   rotary bases in the form of transformers 5, and what the classifier reads. */
static tt_status tt__modern_read(const tt__json *j, tt_bert_config *c)
{
    const char *pooling = "cls", *act = c->activation;
    int every = 0;
    tt_status status = tt__json_read_string(j, 0, "classifier_pooling", false, &pooling);
    if (status == TT_OK) status = tt__json_read_string(j, 0, "classifier_activation", false, &act);
    const int types = tt__json_get(j, 0, "layer_types"), both = tt__json_get(j, 0, "rope_parameters");
    const bool listed = types >= 0 && j->nodes[types].kind == TT__JSON_ARRAY;
    for (int k = 0, at = types + 1; listed && k < j->nodes[types].count && status == TT_OK; k++) {
        bool slides;
        status = tt__read_layer_type(j, at, &slides);
        if (k && !slides && !every) every = k;
        if (status == TT_OK && slides != (every ? k % every != 0 : k > 0))
            return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': layer_types: layer %d breaks the pattern of "
                            "full attention in layer 0 and in each n-th layer from there on; only a pattern "
                            "that repeats is supported: use another model", j->path, k);
        at = j->nodes[at].after;
    }
    if (listed) c->full_every = every ? every : c->layers;
    for (int k = 0; k < 2 && both >= 0 && j->nodes[both].kind == TT__JSON_OBJECT && status == TT_OK; k++) {
        const char *key = k ? "sliding_attention" : "full_attention", *type = "default";
        const int at = tt__json_get(j, both, key);
        if (at < 0 || j->nodes[at].kind != TT__JSON_OBJECT) continue;
        status = tt__json_read_float(j, at, "rope_theta", 1, INFINITY, k ? &c->window_base : &c->rotary_base);
        if (status == TT_OK) status = tt__json_read_string(j, at, "rope_type", false, &type);
        if (status == TT_OK && strcmp(type, "default") != 0)
            return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': rope_type of %s is '%s'; only default is "
                            "supported: use another model", j->path, key, type);
    }
    if (status != TT_OK) return status;
    c->pooling = strcmp(pooling, "mean") == 0 ? TT_POOL_MEAN : TT_POOL_CLS;
    if (c->pooling == TT_POOL_CLS && strcmp(pooling, "cls") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': classifier_pooling is '%s'; only cls and mean are "
                        "supported: use another model", j->path, pooling);
    if (strcmp(act, c->activation) != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': classifier_activation is '%s' and "
                        "hidden_activation '%s', but only equal ones are supported: use another model",
                        j->path, act, c->activation);
    return TT_OK;
}

static tt_status tt__bert_read_config(const tt__json *j, tt_bert_config *c)
{
    const char *type = NULL, *position = "absolute", *attention = "block_sparse";
    bool decoder = false;
    int64_t kept = 0;
    int64_t groups[2] = {1, 1}; /* ALBERT: number of groups that share layers; layers per group */
    tt_status status = tt__json_read_string(j, 0, "model_type", true, &type);
    if (status != TT_OK) return status;
    int kind = 0;
    char known[256];
    tt__text_buffer all = {known, sizeof known, 0};
    for (; kind < TT__COUNT(tt__bert_flags_of) && strcmp(type, tt__bert_flags_of[kind].a.type) != 0; kind++)
        tt__print(&all, "%s'%s'", kind == TT_BERT ? "" : ", ", tt__bert_flags_of[kind].a.type);
    if (kind == TT__COUNT(tt__bert_flags_of))
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': model_type is '%s'; this loader reads %s "
                        "(MiniLM is a 'bert'); tt_lm_load_head makes a classifier of a decoder, such as "
                        "gpt2 or llama", j->path, type, known);
    *c = tt_bert_config_default((tt_bert_kind)kind);
    const tt__bert_flags *k = tt__bert_of(c);
    const bool sparse = k->flags & TT__BERT_SPARSE;
    if (k->flags & TT__BERT_DROP_AS) c->classifier_dropout = -1;
    status = tt__config_read(j, &k->a, c);
    if (status == TT_OK && k->flags & TT__BERT_MODERN) status = tt__modern_read(j, c);
    if (c->classifier_dropout < 0) c->classifier_dropout = c->dropout;
    if (status == TT_OK) status = tt__read_task(j, c->classes, &c->task);
    if (status == TT_OK) status = tt__json_read_string(j, 0, "position_embedding_type", false, &position);
    if (status == TT_OK && sparse)
        status = tt__json_read_string(j, 0, "attention_type", false, &attention);
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "is_decoder", &decoder);
    if (status == TT_OK) status = tt__json_read_int(j, 0, "kept_heads", false, 1, c->heads, &kept);
    for (int g = 0; g < 2 && k->flags & TT__BERT_SHARED && status == TT_OK; g++)
        status = tt__json_read_int(j, 0, g ? "inner_group_num" : "num_hidden_groups", false, 1, INT32_MAX,
                                   &groups[g]);
    if (status != TT_OK) return status;
    if (kept && kept < c->heads && c->hidden_size % c->heads == 0) {
        c->head_size = c->hidden_size / c->heads;
        c->heads = (int)kept;
    }
    c->block_sparse = sparse && strcmp(attention, "block_sparse") == 0;
    if (strcmp(position, "absolute") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': position_embedding_type is '%s'; only 'absolute' "
                        "is supported: use another model", j->path, position);
    if (!c->block_sparse && sparse && strcmp(attention, "original_full") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': attention_type is '%s'; only 'block_sparse' and "
                        "'original_full' are supported: use another model", j->path, attention);
    if (groups[0] != 1 || groups[1] != 1)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': num_hidden_groups is %lld and inner_group_num is "
                        "%lld, but only 1 and 1 are supported: use another model", j->path,
                        (long long)groups[0], (long long)groups[1]);
    if (decoder)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': is_decoder is true; only encoders are supported: "
                        "use another model", j->path);
    return TT_OK;
}

/* Fails if config.json says that the weight of a masked-language head is not the word embedding, or that
   ModernBERT's head has no bias. */
static tt_status tt__bert_tied(const tt__json *j)
{
    bool tied = true, bias = true;
    tt_status status = tt__json_read_bool(j, 0, "tie_word_embeddings", &tied);
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "decoder_bias", &bias);
    if (status == TT_OK && !bias)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': decoder_bias is false, but the logits of a model "
                        "of TT_TASK_MASKED_LM have a bias: use another model", j->path);
    if (status != TT_OK || tied) return status;
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': tie_word_embeddings is false, but a model of "
                    "TT_TASK_MASKED_LM uses the word embedding as the weight of its logits: choose another "
                    "task, or another model", j->path);
}

tt_status tt_bert_read_head(tt_context *ctx, const char *folder, tt_head *head)
{
    tt_bert_config config;
    tt__checkpoint from;
    memset(head, 0, sizeof *head);
    tt_status status = tt__checkpoint_open(ctx, folder, &from);
    if (status == TT_OK) status = tt__bert_read_config(&from.config, &config);
    const int type = status == TT_OK ? tt__json_get(&from.config, 0, "problem_type") : -1;
    const bool says = type >= 0 && from.config.nodes[type].kind == TT__JSON_STRING;
    if (status == TT_OK && (says || tt__is_class(&from.config, "*For*Classification"))) {
        head->task = config.task;
        head->outputs = config.classes;
    }
    tt__checkpoint_close(ctx, &from);
    return status;
}

tt_status tt_bert_load_head(tt_context *ctx, tt_bert *m, const char *folder, const tt_head *head)
{
    tt_bert_config config;
    tt__checkpoint from;
    memset(m, 0, sizeof *m);
    tt_status status = tt__checkpoint_open(ctx, folder, &from);
    if (status == TT_OK) status = tt__bert_read_config(&from.config, &config);
    /* A classifier may have been saved into a folder of sentence-transformers, whose other files then do not
       count. */
    if (status == TT_OK && !tt__is_class(&from.config, "*For*Classification"))
        status = tt__embedder_read(ctx, folder, &config);
    if (status == TT_OK) status = tt__shards_open(ctx, folder, &from);
    if (status == TT_OK) {
        const tt__architecture *a = &tt__bert_of(&config)->a;
        const tt_task own = config.task;
        if (head) config.task = head->task;
        from.naming = tt__bert_naming(&config);
        from.other_head = (own == TT_TASK_TAGS) != (config.task == TT_TASK_TAGS);
        if (tt__has_no_labels(config.task)) config.classes = 0;
        if (config.task == TT_TASK_MASKED_LM) status = tt__bert_tied(&from.config);
        if (status == TT_OK)
            status = tt__model_load(a, m, &config, &from, head ? head->outputs : 0, 0);
    }
    tt__checkpoint_close(ctx, &from);
    return status;
}

tt_status tt_bert_load(tt_context *ctx, tt_bert *m, const char *folder, int classes)
{
    const tt_head head = {TT_TASK_CLASS, classes};
    return tt_bert_load_head(ctx, m, folder, classes ? &head : NULL);
}

tt_status tt_bert_save(const tt_bert *m, const char *folder)
{
    const tt__architecture *a = &tt__bert_of(&m->config)->a;
    tt_status status = tt__model_save(m->ctx, a, m, &m->config, tt__bert_naming(&m->config), 0, folder);
    return status == TT_OK ? tt__embedder_save(m->ctx, folder, &m->config) : status;
}
