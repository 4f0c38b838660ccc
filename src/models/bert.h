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

tt_value tt_bert_hidden(const tt_bert *m, tt_tape *t, const tt_inputs *in, tt_value *hidden)
{
    const tt_bert_config *c = &m->config;
    const int flags = tt__bert_of(c)->flags;
    const bool sparse = flags & TT__BERT_SPARSE && c->block_sparse;
    const size_t blocks = (size_t)tt__ceil_div(c->max_positions, tt__max(1, c->block_size));
    const size_t random = (size_t)c->random_blocks, lists_of = blocks * (size_t)c->heads * random;
    int32_t *lists = NULL;
    if (sparse) lists = (int32_t *)tt__alloc(m->ctx, (lists_of + blocks + 2 * random + 5) * sizeof *lists);
    if (sparse && !lists) {
        tt__tape_fail(t, TT_ERR_MEMORY, "out of memory for the lists of blocks");
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
    if (!tags) h = tt_gather_rows(t, h, masked ? in->masked : in->first); /* first: [CLS] of each sequence */
    if (masked) {
        h = tt_linear(t, h, m->transform_w, m->transform_b);
        h = k->flags & TT__BERT_OFFSET ? tt_gelu(t, h) : tt__activation_of(t, c->activation)(t, h);
        h = tt_layernorm(t, h, m->transform_norm_w, m->transform_norm_b, c->layer_norm_eps);
        h = tt_linear(t, h, m->word, m->word_b);
        tt_name(t, h, "logits");
        return h;
    }
    if (m->head_w) {
        if (k->flags & TT__BERT_DROP_HEAD) h = tt_dropout(t, h, c->classifier_dropout);
        h = tt_linear(t, h, m->head_w, m->head_b);
        h = (k->head ? k->head : tt__activation_of(t, c->activation))(t, h);
    }
    h = tt_linear(t, tt_dropout(t, h, dropout), m->classifier_w, m->classifier_b);
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
        if (!o->compile.train) *output = logits; /* else the logits never exist as a whole */
        return tt__classify(t, logits, in.targets, o);
    }
    *output = tt_bert_logits(m, t, &in);
    return tt__task_loss(t, m->config.task, *output, &in, o);
}

/* Sets the metrics of a model's task. TT_TASK_TAGS gets the metrics of entities if a class has a name that
   begins with "B-". */
static void tt__bert_metrics(const tt_bert *m, tt_metric to[TT_METRICS])
{
    bool entities = false;
    for (int c = 0; c < m->config.classes && m->class_names && !entities; c++)
        entities = strncmp(m->class_names[c], "B-", 2) == 0;
    switch (m->config.task) {
    case TT_TASK_CLASS: to[0] = tt_accuracy(), to[1] = tt_f1_macro(); break;
    case TT_TASK_LABELS: to[0] = tt_f1_micro(), to[1] = tt_f1_macro(), to[2] = tt_accuracy(); break;
    case TT_TASK_SCORES: to[0] = tt_pearson(), to[1] = tt_spearman(); break;
    case TT_TASK_TAGS:
        to[0] = entities ? tt_f1_entities() : tt_accuracy();
        to[1] = entities ? tt_accuracy() : tt_f1_macro();
        break;
    case TT_TASK_EMBED: to[0] = tt_accuracy(), to[1] = tt_recall_at_1(), to[2] = tt_recall_at_10(); break;
    case TT_TASK_MASKED_LM: to[0] = tt_accuracy(), to[1] = tt_perplexity(); break;
    }
}

tt_model tt_bert_model(const tt_bert *m)
{
    const tt_bert_config *c = &m->config;
    const int positions = c->max_positions - tt__bert_offset(c);
    const bool limit = c->task == TT_TASK_EMBED && c->max_length > 0 && c->max_length < positions;
    tt_model model = {m, tt__bert_record, {{NULL, NULL, false, NULL}}, c->classes, "tokens",
                      limit ? c->max_length : positions, false, c->task};
    tt__bert_metrics(m, model.metrics);
    return model;
}

/* Returns whether the class that "architectures" of config.json names matches a pattern. */
static bool tt__bert_is(const tt__json *j, const char *pattern)
{
    const int classes = tt__json_get(j, 0, "architectures");
    const bool any = classes >= 0 && j->nodes[classes].kind == TT__JSON_ARRAY && j->nodes[classes].count;
    const char *name = any ? tt__json_text(j, classes + 1) : NULL;
    return name && tt__match(pattern, name);
}

/* Reads the task from "architectures" and "problem_type" of config.json. c->classes has been read. */
static tt_status tt__bert_read_task(const tt__json *j, tt_bert_config *c)
{
    const char *type = NULL;
    if (tt__bert_is(j, "*ForTokenClassification")) return c->task = TT_TASK_TAGS, TT_OK;
    if (tt__bert_is(j, "*ForMaskedLM")) return c->task = TT_TASK_MASKED_LM, TT_OK;
    tt_status status = tt__json_read_string(j, 0, "problem_type", false, &type);
    if (status == TT_OK && !type && c->classes == 1) c->task = TT_TASK_SCORES;
    if (status != TT_OK || !type) return status;
    for (int k = 0; k < TT__COUNT(tt__problem_types); k++)
        if (strcmp(type, tt__problem_types[k]) == 0) {
            c->task = (tt_task)k;
            return TT_OK;
        }
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': problem_type is '%s'; only "
                    "'single_label_classification', 'multi_label_classification' and 'regression' are "
                    "supported", j->path, type);
}

static tt_status tt__bert_read_config(const tt__json *j, tt_bert_config *c)
{
    const char *type = NULL, *position = "absolute", *attention = "block_sparse";
    bool decoder = false;
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
                        "(MiniLM is a 'bert')", j->path, type, known);
    *c = tt_bert_config_default((tt_bert_kind)kind);
    const tt__bert_flags *k = tt__bert_of(c);
    const bool sparse = k->flags & TT__BERT_SPARSE;
    if (k->flags & TT__BERT_DROP_AS) c->classifier_dropout = -1;
    status = tt__config_read(j, &k->a, c);
    if (c->classifier_dropout < 0) c->classifier_dropout = c->dropout;
    if (status == TT_OK) status = tt__bert_read_task(j, c);
    if (status == TT_OK) status = tt__json_read_string(j, 0, "position_embedding_type", false, &position);
    if (status == TT_OK && sparse)
        status = tt__json_read_string(j, 0, "attention_type", false, &attention);
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "is_decoder", &decoder);
    for (int g = 0; g < 2 && k->flags & TT__BERT_SHARED && status == TT_OK; g++)
        status = tt__json_read_int(j, 0, g ? "inner_group_num" : "num_hidden_groups", false, 1, INT32_MAX,
                                   &groups[g]);
    if (status != TT_OK) return status;
    c->block_sparse = sparse && strcmp(attention, "block_sparse") == 0;
    if (strcmp(position, "absolute") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': position_embedding_type is '%s'; only "
                        "'absolute' is supported", j->path, position);
    if (!c->block_sparse && sparse && strcmp(attention, "original_full") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED,
                        "'%s': attention_type is '%s'; only 'block_sparse' and 'original_full' are supported",
                        j->path, attention);
    if (groups[0] != 1 || groups[1] != 1)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': num_hidden_groups is %lld and inner_group_num is "
                        "%lld, but only 1 and 1 are supported", j->path, (long long)groups[0],
                        (long long)groups[1]);
    if (decoder)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': is_decoder is true; only encoders are supported",
                        j->path);
    return TT_OK;
}

/* Fails if config.json says that the weight of a masked-language head is not the word embedding. */
static tt_status tt__bert_tied(const tt__json *j)
{
    bool tied = true;
    tt_status status = tt__json_read_bool(j, 0, "tie_word_embeddings", &tied);
    if (status != TT_OK || tied) return status;
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': tie_word_embeddings is false, but a model of "
                    "TT_TASK_MASKED_LM uses the word embedding as the weight of its logits", j->path);
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
    if (status == TT_OK && (says || tt__bert_is(&from.config, "*For*Classification"))) {
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
    if (status == TT_OK && !tt__bert_is(&from.config, "*For*Classification"))
        status = tt__embedder_read(ctx, folder, &config);
    if (status == TT_OK) status = tt__shards_open(ctx, folder, &from);
    if (status == TT_OK) {
        const tt__architecture *a = &tt__bert_of(&config)->a;
        const tt_task own = config.task;
        if (head) config.task = head->task;
        from.naming = a->naming;
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
    tt_status status = tt__model_save(m->ctx, a, m, &m->config, a->naming, 0, folder);
    return status == TT_OK ? tt__embedder_save(m->ctx, folder, &m->config) : status;
}
