#pragma once
#include "../base/base.h"
#include "../data/dataset.h"
#include "layout.h"
#include "config.h"
#include "model.h"

/* --------------------------------------------------------------------------------------------------- BERT */

/* Sets the sizes that the letters in the tables' shapes stand for. H: hidden; I: intermediate; V: vocab; P:
   positions; T: types; E: embedding size, which is the hidden size unless the kind is ALBERT. Q, R, B, M and
   S stand for the hidden size under a condition, otherwise for 0. Q: a layer precedes the classifier; R:
   RoBERTa without a classifier; B: BigBird; M: ALBERT; S: ModernBERT's attention has biases. D: columns of
   all heads; U: as D, if queries, keys and values have biases, otherwise 0. C, K and N stand for the number
   of classes: C of any classifier, K of a classifier of sequences, N of a classifier of tokens. For
   TT_TASK_MASKED_LM, L stands for the embedding size and W for the vocabulary; in BigBird J and Y replace L
   and W. For other tasks the four are 0. Letters of ModernBERT alone are explained where they are set. */
static void tt__bert_sizes(const void *config, tt__sizes size);
static void tt__bert_check(tt__text_buffer *all, const void *config);
static void tt__bert_print(tt__text_buffer *json, const void *self, const void *config);
static const char *tt__bert_head(const void *config);
static void tt__bert_of_files(void *config);

/* Naming 1 of tensors is DistilBERT's; naming 0 is the naming of the other variants. */
#define T(field, name, shape, init, head) TT__TENSOR(tt_bert, field, name, name, shape, init, head)
#define W(...) TT__WEIGHT_BIAS(tt_bert, __VA_ARGS__)
#define TT__BERT_EMBEDDINGS \
    T(word, ".embeddings.word_embeddings.weight", "VE", 'n', false), \
    T(position, ".embeddings.position_embeddings.weight", "PE", 'n', false), \
    T(type, ".embeddings.token_type_embeddings.weight", "TE", 'n', false), \
    W(norm, ".embeddings.LayerNorm", ".embeddings.LayerNorm", "E", "E", '1', false)
/* The head of TT_TASK_MASKED_LM: names of its layer, its norm and its bias. */
#define TT__BERT_MASKED(dense, norm, bias, size, sizes, vocab) \
    W(transform, dense, dense, sizes, size, 'n', true), \
    W(transform_norm, norm, norm, size, size, '1', true), \
    T(word_b, bias, vocab, '0', true)
static const tt__tensor_row tt__bert_tensors[] = {
    TT__BERT_EMBEDDINGS,
    W(head, ".pooler.dense", "pre_classifier", "QH", "Q", 'n', true),
    W(classifier, "classifier", "classifier", "CH", "C", 'n', true),
    W(transform, "cls.predictions.transform.dense", "vocab_transform", "LH", "L", 'n', true),
    W(transform_norm, "cls.predictions.transform.LayerNorm", "vocab_layer_norm", "L", "L", '1', true),
    TT__TENSOR(tt_bert, word_b, "cls.predictions.bias", "vocab_projector.bias", "W", '0', true),
};
static const tt__tensor_row tt__albert_tensors[] = {
    TT__BERT_EMBEDDINGS,
    W(mapping, ".encoder.embedding_hidden_mapping_in", ".encoder.embedding_hidden_mapping_in", "ME", "M", 'n',
      false),
    W(head, ".pooler", ".pooler", "QH", "Q", 'n', true),
    W(classifier, "classifier", "classifier", "CH", "C", 'n', true),
    TT__BERT_MASKED("predictions.dense", "predictions.LayerNorm", "predictions.bias", "L", "LH", "W"),
};
static const tt__tensor_row tt__roberta_tensors[] = { /* tensors of RoBERTa and its kin, and of BigBird */
    TT__BERT_EMBEDDINGS,
    T(pooler_w, ".pooler.weight", "BB", 'n', 2),
    T(pooler_b, ".pooler.bias", "B", '0', 2),
    W(head, ".pooler.dense", ".pooler.dense", "RH", "R", 'n', 2),
    W(head, "classifier.dense", "classifier.dense", "QH", "Q", 'n', true),
    W(classifier, "classifier.out_proj", "classifier.out_proj", "KH", "K", 'n', true),
    W(classifier, "classifier", "classifier", "NH", "N", 'n', true),
    TT__BERT_MASKED("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "L", "LH", "W"),
    TT__BERT_MASKED("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm",
                    "cls.predictions.bias", "J", "JH", "Y"),
};
#undef TT__BERT_MASKED
#undef TT__BERT_EMBEDDINGS
#undef T
#undef W
static const tt__tensor_row tt__bert_layer_tensors[] = {
#define W(...) TT__WEIGHT_BIAS(tt_bert_layer, __VA_ARGS__, false)
    W(q, "attention.self.query", "attention.q_lin", "DH", "U", 'n'),
    W(k, "attention.self.key", "attention.k_lin", "DH", "U", 'n'),
    W(v, "attention.self.value", "attention.v_lin", "DH", "U", 'n'),
    W(attention, "attention.output.dense", "attention.out_lin", "HD", "H", 'n'),
    W(attention_norm, "attention.output.LayerNorm", "sa_layer_norm", "H", "H", '1'),
    W(up, "intermediate.dense", "ffn.lin1", "IH", "I", 'n'),
    W(down, "output.dense", "ffn.lin2", "HI", "H", 'n'),
    W(output_norm, "output.LayerNorm", "output_layer_norm", "H", "H", '1'),
#undef W
};
static const tt__tensor_row tt__albert_layer_tensors[] = { /* tensors of an ALBERT layer have the same name in
                                                              both namings */
#define W(field, name, ...) TT__WEIGHT_BIAS(tt_bert_layer, field, name, name, __VA_ARGS__, false)
    W(q, "attention.query", "DH", "U", 'n'),
    W(k, "attention.key", "DH", "U", 'n'),
    W(v, "attention.value", "DH", "U", 'n'),
    W(attention, "attention.dense", "HD", "H", 'n'),
    W(attention_norm, "attention.LayerNorm", "H", "H", '1'),
    W(up, "ffn", "IH", "I", 'n'),
    W(down, "ffn_output", "HI", "H", 'n'),
    W(output_norm, "full_layer_layer_norm", "H", "H", '1'),
#undef W
};
/* ModernBERT. Naming 1 is that of files, in which Wqkv and Wi are packed; naming 0 names the parameters. */
#define T(field, name, shape, init, head) TT__TENSOR(tt_bert, field, name, name, shape, init, head)
static const tt__tensor_row tt__modern_tensors[] = {
    T(word, ".embeddings.tok_embeddings.weight", "VH", 'n', false),
    T(norm_w, ".embeddings.norm.weight", "H", '1', false),
    T(norm_b, ".embeddings.norm.bias", "A", '0', false),
    T(last_norm_w, ".final_norm.weight", "H", '1', false),
    T(last_norm_b, ".final_norm.bias", "A", '0', false),
    T(head_w, "head.dense.weight", "JH", 'n', true),
    T(head_b, "head.dense.bias", "L", '0', true),
    T(head_norm_w, "head.norm.weight", "J", '1', true),
    T(head_norm_b, "head.norm.bias", "O", '0', true),
    T(classifier_w, "classifier.weight", "CH", 'n', true),
    T(classifier_b, "classifier.bias", "C", '0', true),
    T(word_b, "decoder.bias", "W", '0', true),
};
#undef T
#define T(field, name, file, shape, init, part, order) \
    {offsetof(tt_bert_layer, field), {name, file}, shape, init, part, false, order}
#define W(field, name, file, shape, rows, part) \
    T(field##_w, name ".weight", file ".weight", shape, 'n', part, 0), \
    T(field##_b, name ".bias", file ".bias", rows, '0', part, 0)
static const tt__tensor_row tt__modern_layer_tensors[] = {
    T(attention_norm_w, "attn_norm.weight", "attn_norm.weight", "H", '1', 0, 'l'),
    T(attention_norm_b, "attn_norm.bias", "attn_norm.bias", "A", '0', 0, 'l'),
    T(q_w, "attn.Wq.weight", "attn.Wqkv.weight", "DH", 'n', 1, 0),
    T(k_w, "attn.Wk.weight", "attn.Wqkv.weight", "DH", 'n', 2, 0),
    T(v_w, "attn.Wv.weight", "attn.Wqkv.weight", "DH", 'n', 3, 0),
    T(q_b, "attn.Wq.bias", "attn.Wqkv.bias", "U", '0', 1, 0),
    T(k_b, "attn.Wk.bias", "attn.Wqkv.bias", "U", '0', 2, 0),
    T(v_b, "attn.Wv.bias", "attn.Wqkv.bias", "U", '0', 3, 0),
    W(attention, "attn.Wo", "attn.Wo", "HD", "S", 0),
    T(output_norm_w, "mlp_norm.weight", "mlp_norm.weight", "H", '1', 0, 0),
    T(output_norm_b, "mlp_norm.bias", "mlp_norm.bias", "A", '0', 0, 0),
    T(gate_w, "mlp.Wg.weight", "mlp.Wi.weight", "IH", 'n', 4, 0),
    T(up_w, "mlp.Wu.weight", "mlp.Wi.weight", "IH", 'n', 5, 0),
    T(gate_b, "mlp.Wg.bias", "mlp.Wi.bias", "F", '0', 4, 0),
    T(up_b, "mlp.Wu.bias", "mlp.Wi.bias", "F", '0', 5, 0),
    W(down, "mlp.Wo", "mlp.Wo", "HI", "G", 0),
};
#undef T
#undef W

#define C(...) TT__CONFIG(tt_bert, __VA_ARGS__)
#define TT__BERT_SIZES \
    C(vocab_size, 'N', 'V', "vocab_size", "vocab_size"), \
    C(hidden_size, 'N', 'H', "hidden_size", "dim"), \
    C(layers, 'N', 0, "num_hidden_layers", "n_layers"), \
    C(heads, 'N', 0, "num_attention_heads", "n_heads"), \
    C(intermediate_size, 'N', 'I', "intermediate_size", "hidden_dim"), \
    C(max_positions, 'N', 'P', "max_position_embeddings", "max_position_embeddings"), \
    C(type_vocab_size, '0', 'T', "type_vocab_size", NULL), \
    C(layer_norm_eps, 'f', 0, "layer_norm_eps", NULL), \
    C(initializer_range, 'f', 0, "initializer_range", "initializer_range"), \
    C(dropout, 'p', 0, "hidden_dropout_prob", "dropout"), \
    C(attention_dropout, 'p', 0, "attention_probs_dropout_prob", "attention_dropout")
/* The fields of config.json: BERT and DistilBERT use the first 12 rows, RoBERTa and its kin the first 13,
   BigBird all rows. ALBERT and ModernBERT have tables of their own. */
static const tt__config_row tt__bert_rows[] = {
    TT__BERT_SIZES,
    C(classifier_dropout, 'p', 0, "classifier_dropout", "seq_classif_dropout"),
    C(pad_token, '0', 0, "pad_token_id", NULL),
    C(block_size, 'n', 0, "block_size", NULL),
    C(random_blocks, '0', 0, "num_random_blocks", NULL),
    C(qkv_bias, 'b', 0, "use_bias", NULL),
    C(scale_embeddings, 'b', 0, "rescale_embeddings", NULL),
};
static const tt__config_row tt__albert_rows[] = {
    TT__BERT_SIZES,
    C(classifier_dropout, 'p', 0, "classifier_dropout_prob", NULL),
    C(embedding_size, 'n', 'E', "embedding_size", NULL),
};
#undef TT__BERT_SIZES
#undef C
#define C(field, kind, letter, key) TT__CONFIG(tt_bert, field, kind, letter, key, key)
static const tt__config_row tt__modern_rows[] = {
    C(vocab_size, 'N', 'V', "vocab_size"), C(hidden_size, 'N', 'H', "hidden_size"),
    C(layers, 'N', 0, "num_hidden_layers"), C(heads, 'N', 0, "num_attention_heads"),
    C(intermediate_size, 'N', 'I', "intermediate_size"), C(max_positions, 'N', 0, "max_position_embeddings"),
    C(layer_norm_eps, 'f', 0, "norm_eps"), C(initializer_range, 'f', 0, "initializer_range"),
    C(dropout, 'p', 0, "mlp_dropout"), C(attention_dropout, 'p', 0, "attention_dropout"),
    C(embedding_dropout, 'p', 0, "embedding_dropout"), C(classifier_dropout, 'p', 0, "classifier_dropout"),
    C(pad_token, '0', 0, "pad_token_id"), C(qkv_bias, 'b', 0, "attention_bias"),
    C(mlp_bias, 'b', 0, "mlp_bias"), C(norm_bias, 'b', 0, "norm_bias"),
    C(classifier_bias, 'b', 0, "classifier_bias"), C(local_attention, 'n', 0, "local_attention"),
    C(full_every, 'n', 0, "global_attn_every_n_layers"), C(rotary_base, 'f', 0, "global_rope_theta"),
    C(window_base, 'f', 0, "local_rope_theta"), C(bos_token, '0', 0, "bos_token_id"),
    C(cls_token, '0', 0, "cls_token_id"), C(eos_token, '0', 0, "eos_token_id"),
    C(sep_token, '0', 0, "sep_token_id"),
};
#undef C

/* Flags for each BERT variant. */
enum {
    TT__BERT_HEAD = 1,       /* a linear layer precedes the classifier; without this flag, only if `pooler` is
                                set */
    TT__BERT_OFFSET = 2,     /* positions start at pad_token + 1 */
    TT__BERT_SPARSE = 4,     /* the options block_sparse, qkv_bias and scale_embeddings apply */
    TT__BERT_DROP_SUM = 8,   /* dropout of the embeddings comes before their norm, not after it */
    TT__BERT_DROP_OUT = 16,  /* the attention's output has dropout */
    TT__BERT_DROP_HEAD = 32, /* the input of the layer before the classifier has dropout */
    TT__BERT_DROP_AS = 64,   /* classifier_dropout defaults to `dropout` if config.json lacks it */
    TT__BERT_DROP_TAGS = 128, /* the classifier of tokens has `dropout` instead of classifier_dropout */
    TT__BERT_SHARED = 256,   /* layers share their parameters, embeddings have embedding_size columns, and
                                the MLP has no dropout */
    TT__BERT_MODERN = 512    /* tt__modern_hidden records the layers, and files have naming 1 */
};
/* A BERT variant: its architecture (names and tables), its flags, and the defaults of its base model. */
typedef struct tt__bert_flags {
    tt__architecture a;
    int flags;
    tt_value (*head)(tt_tape *, tt_value); /* activation before the classifier; NULL: as in layers */
    int vocab, positions, types, pad, layers;
    const char *activation;
    float eps, dropout, classifier_dropout; /* dropout: of hidden states and of attention weights */
} tt__bert_flags;

#define TT__BERT_FILES(table, layer, config, rows, name, naming, class_name, type, act, more, before, \
                       layers) \
    {name, naming, class_name, type, act, more, {before, before}, {layers ".", layers "."}, \
     tt__##table##_tensors, tt__##layer##_tensors, tt__##config##_rows, TT__COUNT(tt__##table##_tensors), \
     TT__COUNT(tt__##layer##_tensors), rows, TT__STRUCTS(tt_bert), tt__bert_sizes, tt__bert_check, NULL, 0, \
     tt__bert_print, NULL, tt__bert_head, tt__bert_of_files}
#define TT__ROBERTA_FILES(name, class_name, type) \
    TT__BERT_FILES(roberta, bert_layer, bert, 13, name, 0, class_name, type, "hidden_act", \
                   "  \"position_embedding_type\": \"absolute\",\n  \"bos_token_id\": 0,\n" \
                   "  \"eos_token_id\": 2,\n", "roberta.", "encoder.layer.%d"), \
    TT__BERT_HEAD | TT__BERT_OFFSET | TT__BERT_DROP_OUT | TT__BERT_DROP_HEAD | TT__BERT_DROP_AS, tt_tanh

static const tt__bert_flags tt__bert_flags_of[] = { /* in the order of tt_bert_kind */
    {TT__BERT_FILES(bert, bert_layer, bert, 12, "BERT", 0, "Bert", "bert",
                    "hidden_act",
                    "  \"position_embedding_type\": \"absolute\",\n  \"pad_token_id\": 0,\n", "bert.",
                    "encoder.layer.%d"),
     TT__BERT_DROP_OUT | TT__BERT_DROP_AS, tt_tanh, 30522, 512, 2, 0, 12, "gelu", 1e-12f, 0.1f, 0.1f},
    {TT__BERT_FILES(bert, bert_layer, bert, 12, "DistilBERT", 1, "DistilBert",
                    "distilbert", "activation",
                    "  \"sinusoidal_pos_embds\": false,\n  \"tie_weights_\": true,\n  \"qa_dropout\": 0.1,\n"
                    "  \"pad_token_id\": 0,\n", "distilbert.", "transformer.layer.%d"),
     TT__BERT_HEAD | TT__BERT_DROP_TAGS, tt_relu, 30522, 512, 0, 0, 6, "gelu", 1e-12f, 0.1f, 0.2f},
    {TT__ROBERTA_FILES("RoBERTa", "Roberta", "roberta"), 50265, 514, 1, 1, 12,
     "gelu", 1e-5f, 0.1f, 0.1f},
    {TT__BERT_FILES(roberta, bert_layer, bert, TT__COUNT(tt__bert_rows), "BigBird", 0,
                    "BigBird", "big_bird", "hidden_act",
                    "  \"bos_token_id\": 1,\n  \"eos_token_id\": 2,\n  \"sep_token_id\": 66,\n", "bert.",
                    "encoder.layer.%d"),
     TT__BERT_HEAD | TT__BERT_SPARSE | TT__BERT_DROP_SUM | TT__BERT_DROP_OUT | TT__BERT_DROP_HEAD |
     TT__BERT_DROP_AS, NULL, 50358, 4096, 2, 0, 12, "gelu_new", 1e-12f, 0.1f, 0.1f},
    {TT__ROBERTA_FILES("XLM-RoBERTa", "XLMRoberta", "xlm-roberta"), 250002, 514, 1, 1,
     12, "gelu", 1e-5f, 0.1f, 0.1f},
    {TT__ROBERTA_FILES("CamemBERT", "Camembert", "camembert"), 32005, 514, 1, 1, 12,
     "gelu", 1e-5f, 0.1f, 0.1f},
    {TT__BERT_FILES(albert, albert_layer, albert, TT__COUNT(tt__albert_rows), "ALBERT", 0,
                    "Albert", "albert", "hidden_act",
                    "  \"position_embedding_type\": \"absolute\",\n  \"num_hidden_groups\": 1,\n"
                    "  \"inner_group_num\": 1,\n  \"pad_token_id\": 0,\n  \"bos_token_id\": 2,\n"
                    "  \"eos_token_id\": 3,\n", "albert.", "encoder.albert_layer_groups.0.albert_layers.0"),
     TT__BERT_SHARED | TT__BERT_DROP_OUT, tt_tanh, 30000, 512, 2, 0, 12, "gelu_new", 1e-12f, 0, 0.1f},
    {TT__BERT_FILES(modern, modern_layer, modern, TT__COUNT(tt__modern_rows), "ModernBERT", 0, "ModernBert",
                    "modernbert", "hidden_activation", "", "model.", "layers.%d"),
     TT__BERT_HEAD | TT__BERT_MODERN, NULL, 50368, 8192, 0, 50283, 22, "gelu", 1e-5f, 0, 0},
};

static const tt__bert_flags *tt__bert_of(const tt_bert_config *c)
{
    const bool known = (int)c->kind > 0 && (int)c->kind < TT__COUNT(tt__bert_flags_of);
    return &tt__bert_flags_of[known ? c->kind : TT_BERT];
}

/* Returns the number of the naming of tensors in files. */
static int tt__bert_naming(const tt_bert_config *c)
{
    const tt__bert_flags *k = tt__bert_of(c);
    return k->flags & TT__BERT_MODERN ? 1 : k->a.naming;
}

/* Returns the row of the position embedding that belongs to the first token of a sequence. */
static int tt__bert_offset(const tt_bert_config *c)
{
    return tt__bert_of(c)->flags & TT__BERT_OFFSET ? c->pad_token + 1 : 0;
}

tt_bert_config tt_bert_config_default(tt_bert_kind kind)
{
    tt_bert_config c;
    memset(&c, 0, sizeof c);
    c.kind = kind;
    const tt__bert_flags *k = tt__bert_of(&c);
    c.vocab_size = k->vocab;
    c.hidden_size = 768;
    c.layers = k->layers;
    c.heads = 12;
    c.intermediate_size = 3072;
    c.max_positions = k->positions;
    c.type_vocab_size = k->types;
    c.embedding_size = k->flags & TT__BERT_SHARED ? 128 : 0;
    c.pad_token = k->pad;
    c.pooler = !(k->flags & TT__BERT_HEAD);
    c.classes = 2;
    c.activation = k->activation;
    c.layer_norm_eps = k->eps;
    c.initializer_range = 0.02f;
    c.dropout = k->dropout;
    c.attention_dropout = k->dropout;
    c.classifier_dropout = k->classifier_dropout;
    c.block_sparse = (k->flags & TT__BERT_SPARSE) != 0;
    c.block_size = 64;
    c.random_blocks = 3;
    c.qkv_bias = !(k->flags & TT__BERT_MODERN);
    if (!(k->flags & TT__BERT_MODERN)) return c;
    c.intermediate_size = 1152;
    c.pooling = TT_POOL_CLS;
    c.full_every = 3;
    c.local_attention = 128;
    c.rotary_base = 160000;
    c.window_base = 10000;
    c.bos_token = c.cls_token = 50281;
    c.eos_token = c.sep_token = 50282;
    return c;
}

static void tt__bert_sizes(const void *config, tt__sizes size)
{
    const tt_bert_config *c = (const tt_bert_config *)config;
    const int flags = tt__bert_of(c)->flags;
    /* In transformers BertModel and RobertaModel have a pooler, which embeddings do not use. */
    const bool embeds = c->task == TT_TASK_EMBED, masked = c->task == TT_TASK_MASKED_LM;
    const bool sparse = flags & TT__BERT_SPARSE, dense = flags & TT__BERT_HEAD ? !embeds : c->pooler;
    size['Q' - 'A'] = dense && c->task != TT_TASK_TAGS && !masked ? c->hidden_size : 0;
    size['R' - 'A'] = flags & TT__BERT_OFFSET && embeds ? c->hidden_size : 0;
    size[(c->task == TT_TASK_TAGS ? 'N' : 'K') - 'A'] = size['C' - 'A'];
    size['E' - 'A'] = flags & TT__BERT_SHARED ? c->embedding_size : c->hidden_size;
    size['M' - 'A'] = flags & TT__BERT_SHARED ? c->hidden_size : 0;
    size['B' - 'A'] = sparse ? c->hidden_size : 0;
    size['D' - 'A'] = (int64_t)c->heads * tt__head_size(c->hidden_size, c->heads, c->head_size);
    size['U' - 'A'] = !(flags & (TT__BERT_SPARSE | TT__BERT_MODERN)) || c->qkv_bias ? size['D' - 'A'] : 0;
    size['S' - 'A'] = flags & TT__BERT_MODERN && c->qkv_bias ? c->hidden_size : 0;
    size[(sparse ? 'Y' : 'W') - 'A'] = masked ? c->vocab_size : 0;
    if (!(flags & TT__BERT_MODERN)) {
        size[(sparse ? 'J' : 'L') - 'A'] = masked ? size['E' - 'A'] : 0;
        return;
    }
    size['A' - 'A'] = c->norm_bias ? c->hidden_size : 0;
    size['F' - 'A'] = c->mlp_bias ? c->intermediate_size : 0;
    size['G' - 'A'] = c->mlp_bias ? c->hidden_size : 0;
    size['J' - 'A'] = embeds ? 0 : c->hidden_size; /* the layer before the classifier or the decoder, and its
                                                      norm */
    size['L' - 'A'] = c->classifier_bias ? size['J' - 'A'] : 0;
    size['O' - 'A'] = c->norm_bias ? size['J' - 'A'] : 0;
}

static void tt__bert_check(tt__text_buffer *all, const void *config)
{
    const tt_bert_config *c = (const tt_bert_config *)config;
    const int flags = tt__bert_of(c)->flags;
    const double listed = (double)c->heads * c->random_blocks * c->max_positions /
                          (double)tt__max(1, c->block_size);
    tt__check_heads(all, c->hidden_size, c->heads, c->head_size);
    if ((unsigned)c->task > TT_TASK_MASKED_LM)
        tt__print(all, "; task is %d, but must be one of tt_task", (int)c->task);
    if ((unsigned)c->pooling > TT_POOL_CLS)
        tt__print(all, "; pooling is %d, but must be one of tt_pooling", (int)c->pooling);
    if (c->max_length < 0) tt__print(all, "; max_length is %d, but must be at least 0", c->max_length);
    if (flags & TT__BERT_OFFSET && c->max_positions <= c->pad_token + 1)
        tt__print(all,
                  "; max_positions must be above pad_token + 1, but pad_token is %d and max_positions is %d",
                  c->pad_token, c->max_positions);
    for (int k = 0; k < 2 && flags & TT__BERT_MODERN; k++) {
        const float base = k ? c->window_base : c->rotary_base;
        if (!(base > 1 && isfinite(base)))
            tt__print(all, "; %s is %g, but must be finite and above 1", k ? "window_base" : "rotary_base",
                      base);
    }
    if (!(flags & TT__BERT_SPARSE)) return;
    if ((c->max_positions - 1) / tt__max(1, c->block_size) > UINT16_MAX)
        tt__print(all, "; max_positions is %d, but must be at most 65536 times block_size, %d",
                  c->max_positions, c->block_size);
    if (listed > 1 << 20)
        tt__print(all, "; random_blocks is %d, which is too many: set it lower", c->random_blocks);
    if ((2.0 * c->random_blocks + 5) * c->block_size > 1 << 30)
        tt__print(all, "; block_size is %d, which is too large: set it lower", c->block_size);
}

static void tt__bert_print(tt__text_buffer *json, const void *self, const void *config)
{
    const tt_bert_config *c = (const tt_bert_config *)config;
    const int heads = ((const tt_bert *)self)->config.heads; /* c is the config of the files */
    if (heads != c->heads) tt__print(json, "  \"kept_heads\": %d,\n", heads);
    if (c->task <= TT_TASK_SCORES)
        tt__print(json, "  \"problem_type\": \"%s\",\n", tt__problem_types[c->task]);
    if (tt__bert_of(c)->flags & TT__BERT_MODERN)
        tt__print(json, "  \"classifier_pooling\": \"%s\",\n  \"classifier_activation\": \"%s\",\n",
                  c->pooling == TT_POOL_CLS ? "cls" : "mean", c->activation);
    if (tt__bert_of(c)->flags & TT__BERT_SPARSE)
        tt__print(json, "  \"attention_type\": \"%s\",\n",
                  c->block_sparse ? "block_sparse" : "original_full");
}

/* Turns a config into the config of the model's files, in which the heads that were removed are zeros,
   because transformers computes the size of a head from the number of heads. */
static void tt__bert_of_files(void *config)
{
    tt_bert_config *c = (tt_bert_config *)config;
    c->heads = c->hidden_size / tt__head_size(c->hidden_size, c->heads, c->head_size);
    c->head_size = 0;
}

/* Returns the end of a class name of transformers, such as "Model" in "BertModel". */
static const char *tt__bert_head(const void *config)
{
    const tt_task task = ((const tt_bert_config *)config)->task;
    return task == TT_TASK_TAGS        ? "ForTokenClassification"
           : task == TT_TASK_EMBED     ? "Model"
           : task == TT_TASK_MASKED_LM ? "ForMaskedLM"
                                       : "ForSequenceClassification";
}

tt_status tt_bert_new(tt_context *ctx, tt_bert *m, const tt_bert_config *config)
{
    tt_bert_config c = *config;
    if (tt__has_no_labels(c.task)) c.classes = 0;
    return tt__model_new(ctx, &tt__bert_of(config)->a, m, &c);
}

void tt_bert_free(tt_bert *m) { tt__model_free(&tt__bert_of(&m->config)->a, m); }

tt_status tt_bert_name_classes(tt_bert *m, tt_dataset *d)
{
    return tt__name_classes(m->ctx, m->config.task, m->class_names, m->config.classes, !m->new_head, d);
}
