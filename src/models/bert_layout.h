#pragma once
#include "../base/base.h"
#include "../data/dataset.h"
#include "layout.h"
#include "model.h"

/* --------------------------------------------------------------------------------------------------- BERT */

tt_bert_config tt_bert_config_default(tt_bert_kind kind)
{
    const bool distil = kind == TT_DISTILBERT, roberta = kind == TT_ROBERTA, big_bird = kind == TT_BIG_BIRD;
    tt_bert_config c;
    memset(&c, 0, sizeof c);
    c.kind = kind;
    c.vocab_size = roberta ? 50265 : big_bird ? 50358 : 30522;
    c.hidden_size = 768;
    c.layers = distil ? 6 : 12;
    c.heads = 12;
    c.intermediate_size = 3072;
    c.max_positions = roberta ? 514 : big_bird ? 4096 : 512;
    c.type_vocab_size = distil ? 0 : roberta ? 1 : 2;
    c.pad_token = roberta;
    c.pooler = kind == TT_BERT;
    c.classes = 2;
    c.activation = big_bird ? "gelu_new" : "gelu";
    c.layer_norm_eps = roberta ? 1e-5f : 1e-12f;
    c.initializer_range = 0.02f;
    c.dropout = 0.1f;
    c.attention_dropout = 0.1f;
    c.classifier_dropout = distil ? 0.2f : 0.1f;
    c.block_sparse = big_bird;
    c.block_size = 64;
    c.random_blocks = 3;
    c.qkv_bias = true;
    return c;
}

/* H hidden, I intermediate, V vocab, P positions, T types, C classes. Hidden: Q where there is a head, B in
   BigBird, U where queries, keys and values have biases. */
static void tt__bert_sizes(const void *config, tt__sizes size)
{
    const tt_bert_config *c = (const tt_bert_config *)config;
    size['Q' - 'A'] = c->kind != TT_BERT || c->pooler ? c->hidden_size : 0;
    size['B' - 'A'] = c->kind == TT_BIG_BIRD ? c->hidden_size : 0;
    size['U' - 'A'] = c->kind != TT_BIG_BIRD || c->qkv_bias ? c->hidden_size : 0;
}

static const tt__tensor_row tt__bert_tensors[] = {
#define T(field, bert, distil, shape) TT__TENSOR(tt_bert, field, bert, distil, shape, 'n', false)
#define W(...) TT__WEIGHT_BIAS(tt_bert, __VA_ARGS__)
    T(word, ".embeddings.word_embeddings.weight", ".embeddings.word_embeddings.weight", "VH"),
    T(position, ".embeddings.position_embeddings.weight", ".embeddings.position_embeddings.weight", "PH"),
    T(type, ".embeddings.token_type_embeddings.weight", NULL, "TH"),
    W(norm, ".embeddings.LayerNorm", ".embeddings.LayerNorm", "H", "H", '1', false),
    W(head, ".pooler.dense", "pre_classifier", "QH", "Q", 'n', true),
    W(classifier, "classifier", "classifier", "CH", "C", 'n', true),
#undef T
#undef W
};
#define TT__BERT_LAYER(W) \
    W(q, "attention.self.query", "attention.q_lin", "HH", "U", 'n'), \
    W(k, "attention.self.key", "attention.k_lin", "HH", "U", 'n'), \
    W(v, "attention.self.value", "attention.v_lin", "HH", "U", 'n'), \
    W(attention, "attention.output.dense", "attention.out_lin", "HH", "H", 'n'), \
    W(attention_norm, "attention.output.LayerNorm", "sa_layer_norm", "H", "H", '1'), \
    W(up, "intermediate.dense", "ffn.lin1", "IH", "I", 'n'), \
    W(down, "output.dense", "ffn.lin2", "HI", "H", 'n'), \
    W(output_norm, "output.LayerNorm", "output_layer_norm", "H", "H", '1')
#define TT__BERT_ROW(field, bert, distil, ...) \
    TT__WEIGHT_BIAS(tt_bert_layer, field, bert, distil, __VA_ARGS__, false)
static const tt__tensor_row tt__bert_layer_tensors[] = {TT__BERT_LAYER(TT__BERT_ROW)};
#undef TT__BERT_ROW
/* RoBERTa and BigBird */
#define TT__BERT_ROW(field, bert, distil, ...) \
    TT__WEIGHT_BIAS(tt_bert_layer, field, bert, bert, __VA_ARGS__, false)
static const tt__tensor_row tt__roberta_layer_tensors[] = {TT__BERT_LAYER(TT__BERT_ROW)};
#undef TT__BERT_ROW
#undef TT__BERT_LAYER
static const tt__tensor_row tt__roberta_tensors[] = {
#define T(field, roberta, big_bird, shape, init, head) \
    TT__TENSOR(tt_bert, field, roberta, big_bird, shape, init, head)
#define W(...) TT__WEIGHT_BIAS(tt_bert, __VA_ARGS__)
    T(word, ".embeddings.word_embeddings.weight", ".embeddings.word_embeddings.weight", "VH", 'n', false),
    T(position, ".embeddings.position_embeddings.weight", ".embeddings.position_embeddings.weight", "PH",
      'n', false),
    T(type, ".embeddings.token_type_embeddings.weight", ".embeddings.token_type_embeddings.weight", "TH",
      'n', false),
    W(norm, ".embeddings.LayerNorm", ".embeddings.LayerNorm", "H", "H", '1', false),
    T(pooler_w, NULL, ".pooler.weight", "BB", 'n', 2),
    T(pooler_b, NULL, ".pooler.bias", "B", '0', 2),
    W(head, "classifier.dense", "classifier.dense", "QH", "Q", 'n', true),
    W(classifier, "classifier.out_proj", "classifier.out_proj", "CH", "C", 'n', true),
#undef T
#undef W
};
static const tt__config_row tt__bert_rows[] = {
#define C(...) TT__CONFIG(tt_bert, __VA_ARGS__)
    C(vocab_size, 'N', 'V', "vocab_size", "vocab_size"),
    C(hidden_size, 'N', 'H', "hidden_size", "dim"),
    C(layers, 'N', 0, "num_hidden_layers", "n_layers"),
    C(heads, 'N', 0, "num_attention_heads", "n_heads"),
    C(intermediate_size, 'N', 'I', "intermediate_size", "hidden_dim"),
    C(max_positions, 'N', 'P', "max_position_embeddings", "max_position_embeddings"),
    C(type_vocab_size, '0', 'T', "type_vocab_size", NULL),
    C(layer_norm_eps, 'f', 0, "layer_norm_eps", NULL),
    C(initializer_range, 'f', 0, "initializer_range", "initializer_range"),
    C(dropout, 'p', 0, "hidden_dropout_prob", "dropout"),
    C(attention_dropout, 'p', 0, "attention_probs_dropout_prob", "attention_dropout"),
    C(classifier_dropout, 'p', 0, "classifier_dropout", "seq_classif_dropout"),
#undef C
};
static const tt__config_row tt__roberta_rows[] = {
#define C(field, kind, letter, key) TT__CONFIG(tt_bert, field, kind, letter, key, key)
#define B(field, kind, key) TT__CONFIG(tt_bert, field, kind, 0, NULL, key) /* BigBird's */
    C(vocab_size, 'N', 'V', "vocab_size"),
    C(hidden_size, 'N', 'H', "hidden_size"),
    C(layers, 'N', 0, "num_hidden_layers"),
    C(heads, 'N', 0, "num_attention_heads"),
    C(intermediate_size, 'N', 'I', "intermediate_size"),
    C(max_positions, 'N', 'P', "max_position_embeddings"),
    C(type_vocab_size, '0', 'T', "type_vocab_size"),
    C(pad_token, '0', 0, "pad_token_id"),
    C(layer_norm_eps, 'f', 0, "layer_norm_eps"),
    C(initializer_range, 'f', 0, "initializer_range"),
    C(dropout, 'p', 0, "hidden_dropout_prob"),
    C(attention_dropout, 'p', 0, "attention_probs_dropout_prob"),
    C(classifier_dropout, 'p', 0, "classifier_dropout"),
    B(block_size, 'n', "block_size"),
    B(random_blocks, '0', "num_random_blocks"),
    B(qkv_bias, 'b', "use_bias"),
    B(scale_embeddings, 'b', "rescale_embeddings"),
#undef B
#undef C
};

/* Spelling 1 is DistilBERT's. */
static const tt__architecture tt__bert = {
    "BERT", {"BertForSequenceClassification", "DistilBertForSequenceClassification"}, {"bert", "distilbert"},
    {"hidden_act", "activation"},
    {"  \"position_embedding_type\": \"absolute\",\n  \"pad_token_id\": 0,\n",
     "  \"sinusoidal_pos_embds\": false,\n  \"tie_weights_\": true,\n  \"qa_dropout\": 0.1,\n"
     "  \"pad_token_id\": 0,\n"},
    {"bert.", "distilbert."}, {"encoder.layer.%d.", "transformer.layer.%d."},
    tt__bert_tensors, tt__bert_layer_tensors, tt__bert_rows, TT__COUNT(tt__bert_tensors),
    TT__COUNT(tt__bert_layer_tensors), TT__COUNT(tt__bert_rows), TT__STRUCTS(tt_bert), tt__bert_sizes,
    NULL, NULL, 0, NULL, NULL};

static void tt__roberta_check(tt__text *all, const void *config)
{
    const tt_bert_config *c = (const tt_bert_config *)config;
    const double listed = (double)c->heads * c->random_blocks * c->max_positions /
                          (double)tt__max(1, c->block_size);
    if (c->kind == TT_ROBERTA && c->max_positions <= c->pad_token + 1)
        tt__print(all, "; pad_token %d leaves none of %d max_positions", c->pad_token, c->max_positions);
    if (c->kind == TT_ROBERTA && c->type_vocab_size > 1)
        tt__print(all, "; type_vocab_size is %d, of which only 1 is supported", c->type_vocab_size);
    if (c->kind == TT_BIG_BIRD && (c->max_positions - 1) / tt__max(1, c->block_size) > UINT16_MAX)
        tt__print(all, "; max_positions are more than 65536 blocks of %d", c->block_size);
    if (c->kind == TT_BIG_BIRD && listed > 1 << 20) tt__print(all, "; random_blocks is %d", c->random_blocks);
    if (c->kind == TT_BIG_BIRD && (2.0 * c->random_blocks + 5) * c->block_size > 1 << 30)
        tt__print(all, "; block_size is %d", c->block_size);
}

static void tt__roberta_print(tt__text *json, const void *self, const void *config)
{
    const tt_bert_config *c = (const tt_bert_config *)config;
    (void)self;
    if (c->kind == TT_BIG_BIRD)
        tt__print(json, "  \"attention_type\": \"%s\",\n",
                  c->block_sparse ? "block_sparse" : "original_full");
}

/* Spelling 1 is BigBird's. */
static const tt__architecture tt__roberta = {
    "RoBERTa or BigBird", {"RobertaForSequenceClassification", "BigBirdForSequenceClassification"},
    {"roberta", "big_bird"}, {"hidden_act", "hidden_act"},
    {"  \"position_embedding_type\": \"absolute\",\n  \"bos_token_id\": 0,\n  \"eos_token_id\": 2,\n",
     "  \"bos_token_id\": 1,\n  \"eos_token_id\": 2,\n  \"sep_token_id\": 66,\n"},
    {"roberta.", "bert."}, {"encoder.layer.%d.", "encoder.layer.%d."},
    tt__roberta_tensors, tt__roberta_layer_tensors, tt__roberta_rows, TT__COUNT(tt__roberta_tensors),
    TT__COUNT(tt__roberta_layer_tensors), TT__COUNT(tt__roberta_rows), TT__STRUCTS(tt_bert), tt__bert_sizes,
    tt__roberta_check, NULL, 0, tt__roberta_print, NULL};

/* A kind's architecture, and which of its spellings. */
static const tt__architecture *tt__bert_of(tt_bert_kind kind)
{
    return kind >= TT_ROBERTA ? &tt__roberta : &tt__bert;
}
static int tt__bert_spelling(tt_bert_kind kind) { return kind == TT_DISTILBERT || kind == TT_BIG_BIRD; }

tt_status tt_bert_new(tt_context *ctx, tt_bert *m, const tt_bert_config *config)
{
    return tt__model_new(ctx, tt__bert_of(config->kind), m, config, tt__bert_spelling(config->kind));
}

void tt_bert_free(tt_bert *m) { tt__model_free(tt__bert_of(m->config.kind), m); }

tt_status tt_bert_name_classes(tt_bert *m, tt_dataset *d)
{
    return tt__name_classes(m->ctx, m->class_names, m->config.classes, !m->new_head, d);
}
