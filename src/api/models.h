#pragma once
#include "standard.h"
#include "context.h"
#include "tape.h"
#include "program.h"
#include "tokenizer.h"
#include "data.h"

/* ------------------------------------------------------------------------------------------------- models */

typedef struct tt_train_options tt_train_options;

/* The labels and the predictions of an evaluation, in the order of its source. A row is a sequence or, with
   TT_TASK_TAGS, a token. */
typedef struct tt_predictions {
    tt_context *ctx;         /* the context that gives memory to metrics */
    tt_task task;
    int classes;             /* number of classes, labels, scores or tags; of TT_TASK_EMBED the columns of an
                                embedding */
    int64_t rows, seqs;
    const int64_t *seq_start; /* (seqs + 1) the first row of each sequence */
    /* (rows) labels: with TT_TASK_CLASS and TT_TASK_TAGS the class of each row; with TT_TASK_EMBED the labels
       of tt_loader_options. A row whose label is not in 0..classes - 1 does not count. predicted: the class
       with the largest logit of each row, the first of several equal logits; with TT_TASK_EMBED NULL. */
    const int32_t *labels, *predicted;
    /* (rows, classes) values: with TT_TASK_LABELS 0 or 1 for each label, with TT_TASK_SCORES the scores; with
       TT_TASK_EMBED (rows): the score of each row's pair, NaN if the pair has none. outputs: with
       TT_TASK_LABELS logits, which predict a label if they are above 0; with TT_TASK_SCORES the predicted
       scores; with TT_TASK_EMBED the embeddings. */
    const float *values, *outputs;
    const char *const *class_names; /* (classes) the source's names; NULL: no names */
} tt_predictions;

/* A measure of a model's quality, computed from the sums or from the predictions of an evaluation. */
typedef struct tt_metric {
    const char *name; /* name in metrics.csv and texts: at most 31 letters, digits, _ and -. NULL: no
                         metric */
    double (*of)(const tt_stats *s); /* computes the metric from the sums of an evaluation; NULL:
                                        of_predictions computes it */
    bool lower_is_better;
    /* Set it to compute the metric from predictions, in evaluations alone. The function returns NaN if the
       metric is undefined. The model must have `classes`, and each process must have the labels of all data
       ranks. */
    double (*of_predictions)(const tt_predictions *p);
} tt_metric;
tt_metric tt_accuracy(void);   /* "accuracy": the share of targets predicted right (cross-entropy) */
tt_metric tt_perplexity(void); /* "perplexity": exp(loss). Lower is better */
tt_metric tt_margin(void);     /* "margin": the mean margin of tt_preference_loss */
/* "f1_macro": the mean of tt_f1_scores, which equals that of scikit-learn. "f1_micro": 2 * right / (2 * right
   + wrong + missed), with the sums of all classes; if each row has one class, this is the accuracy. */
tt_metric tt_f1_macro(void);
tt_metric tt_f1_micro(void);
/* "f1_entities": f1_micro of whole entities of TT_TASK_TAGS, as the default mode of seqeval counts them. A
   tag B-X begins an entity of type X, I-X continues the entity, other names are outside of entities. NaN if
   no tag has a name of this form. */
tt_metric tt_f1_entities(void);
/* "pearson" of TT_TASK_SCORES: the correlation of the scores with the predicted scores. "spearman": the
   correlation of their places in sorted order, where equal numbers share their mean place. With several
   scores, either metric is the mean of the scores' correlations. With TT_TASK_EMBED both compare the scores
   of pairs with the cosines of their embeddings, as EmbeddingSimilarityEvaluator of sentence-transformers.
   NaN if labels or predictions are constant, and if pairs have no scores. */
tt_metric tt_pearson(void);
tt_metric tt_spearman(void);
/* Metrics of TT_TASK_EMBED. "recall_at_1": the share of texts whose pair is the nearest, by cosine, of the
   pairs and negatives of the whole evaluation. "recall_at_10": the share of texts whose pair is among the 10
   nearest. Both are NaN if the pairs have scores, because texts of a pair may then differ in meaning. */
tt_metric tt_recall_at_1(void);
tt_metric tt_recall_at_10(void);
/* Computes F1 of each class, label or tag, f1 (classes): 2 * right / (2 * right + wrong + missed). wrong
   counts the rows that are wrongly predicted as the class, missed the rows of the class that are not
   predicted as the class. If right, wrong and missed are all 0, F1 of a class or tag is NaN and does not
   count in f1_macro, and F1 of a label is 0. */
void tt_f1_scores(const tt_predictions *p, double *f1);

enum { TT_METRICS = 5 }; /* max metrics of a model */

/* A model as a trainer sees it. */
typedef struct tt_model {
    const void *self; /* argument of record */
    /* Declares inputs and records the ops for a micro-batch of up to o->max_seqs sequences (or examples) and
       o->max_tokens tokens. Returns the loss (1, 1). The function may set *output to a value, which
       tt_forward then returns. An input's name is the name of the batch's array that has the input's data. */
    tt_value (*record)(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output);
    /* The metrics. By default the first metric decides which validation is best (tt_fit_options.best_by). A
       NULL name ends the list. */
    tt_metric metrics[TT_METRICS];
    int classes;      /* columns of the output's logits (for tt_predict): number of classes, labels, scores or
                         tags. 0: the output is not logits */
    /* unit of speeds, such as "tokens" or "images"; the allowed characters are those of a metric's name.
       NULL: "examples" */
    const char *unit;
    int max_length;   /* rows of the longest possible sequence; 0: the model has no sequences */
    bool same_length; /* all sequences have max_length rows, as images do: the trainer knows their positions
                         and starts, and batches may leave them out */
    tt_task task;     /* how tt_predict turns logits into predictions; default TT_TASK_CLASS */
} tt_model;

/* Inputs of BERT, ViT and decoders, for all sequences one after another. An image is a sequence: a class
   token, then its patches. */
typedef struct tt_inputs {
    tt_value positions; /* i32 (rows, 1): 0, 1, ... within each sequence */
    tt_value seq_start; /* i32 (seqs + 1, 1) */
    tt_value first;     /* i32 (seqs, 1): the first row of each sequence */
    tt_value last;      /* decoders that classify: i32 (seqs, 1), the last row of each sequence */
    tt_value ids;       /* text: i32 (rows, 1) */
    tt_value types;     /* text: i32 (rows, 1): token types, if the model has them */
    tt_value pixels;    /* images: u8 (seqs, image_bytes) */
    tt_value labels;    /* i32 (seqs, 1): the class of each sequence */
    tt_value targets;   /* language models: i32 (rows, 1), the token that follows; -100: no target.
                           TT_TASK_MASKED_LM: i32 (n, 1), the id of each masked token */
    tt_value masked;    /* TT_TASK_MASKED_LM: i32 (n, 1), the rows of the masked tokens */
} tt_inputs;
/* Declare the inputs of texts or images as a loader's batches have them. length: rows of an image. */
tt_inputs tt_text_inputs(tt_tape *t, const tt_train_options *o);
tt_inputs tt_image_inputs(tt_tape *t, const tt_train_options *o, int length, int64_t image_bytes);

/* BERT (Devlin et al. 2019), MiniLM (Wang et al. 2020), DistilBERT (Sanh et al. 2019), RoBERTa (Liu et al.
   2019), XLM-RoBERTa (Conneau et al. 2020), CamemBERT (Martin et al. 2020), ALBERT (Lan et al. 2020),
   BigBird (Zaheer et al. 2020) and ModernBERT (Warner et al. 2024) share one encoder. The task decides the
   head. Parameters have the names of transformers' ...ForSequenceClassification, for TT_TASK_TAGS of
   ...ForTokenClassification. With TT_TASK_EMBED there is no classifier, and files have the names of
   transformers' ...Model. With TT_TASK_MASKED_LM they have those of ...ForMaskedLM: the masked tokens pass a
   linear layer, an activation and a norm, and the logits of the vocabulary use the word embedding as their
   weight, with a bias. */
typedef enum tt_bert_kind {
    TT_BERT,
    TT_DISTILBERT, /* layers before the classifier: pre_classifier, ReLU. In BERT: pooler, tanh. With
                      TT_TASK_TAGS only ModernBERT has layers before the classifier */
    TT_ROBERTA,    /* positions start at pad_token + 1; one token type; head: classifier.dense, tanh */
    TT_BIG_BIRD,   /* head: classifier.dense, then `activation`. BigBird's pooler is kept but unused */
    TT_XLM_ROBERTA, TT_CAMEMBERT, /* RoBERTa with other vocabularies */
    TT_ALBERT,     /* all layers share one set of parameters, and embeddings have embedding_size columns;
                      head: pooler, tanh. A pipeline has at most two stages */
    TT_MODERN_BERT /* rotary positions, windows, norms before attention and MLP, an MLP with a gate; head:
                      dense, `activation`, norm, also with TT_TASK_TAGS. A file has one tensor each for Wqkv
                      and Wi, whose parts are separate parameters here */
} tt_bert_kind;
/* The way to make the embedding of a sequence from its last hidden states: their mean, or the first token's
   state. */
typedef enum tt_pooling { TT_POOL_MEAN, TT_POOL_CLS } tt_pooling;
typedef struct tt_bert_config {
    tt_bert_kind kind;
    tt_task task;             /* default TT_TASK_CLASS */
    int vocab_size, hidden_size, layers, heads, intermediate_size, max_positions;
    int head_size;            /* columns of a head; default 0: hidden_size / heads. Set in a model from which
                                 heads were removed (tt_bert_prune): then a divisor of hidden_size */
    int type_vocab_size;      /* number of token types; 0: none */
    int embedding_size;       /* ALBERT: columns of the embeddings. Default 128 */
    /* id of the padding token. Default 0 in BigBird, 1 in RoBERTa, XLM-RoBERTa and CamemBERT */
    int pad_token;
    bool pooler;              /* BERT: the classifier reads a dense layer + tanh of the first token. Default
                                 true */
    int classes;              /* number of classes, labels, scores or tags. Other tasks: 0 */
    tt_pooling pooling;       /* how tt_bert_embed makes the embedding of a text; in ModernBERT also what the
                                 classifier reads. Default TT_POOL_MEAN, in ModernBERT TT_POOL_CLS */
    bool normalize;           /* tt_bert_embed divides each embedding by its length. Default false */
    int max_length;           /* TT_TASK_EMBED: tokens of the longest text; 0: limited by
                                 max_positions alone. Default 0 */
    const char *activation;   /* "gelu", "gelu_new", "relu", "silu" */
    float layer_norm_eps, initializer_range;
    float dropout;            /* dropout of embeddings and residual branches */
    float attention_dropout;
    float classifier_dropout;
    /* Set it for BigBird to attend by blocks (attention_type "block_sparse"); default true. In a sequence of
       more than (5 + 2 * random_blocks) * block_size tokens, a token then attends, as in transformers, to the
       first and the last block, to its own block and its two neighbours, and in training to random_blocks
       random blocks. A seed (the layer's number) chooses the random blocks, as transformers does for
       max_positions tokens. Without training the first block replaces each random block. Block-sparse
       attention drops no attention weights. */
    bool block_sparse;        /* default true for BigBird, else false */
    int block_size, random_blocks;
    bool qkv_bias;            /* BigBird: queries, keys and values have biases. Default true. ModernBERT: also
                                 the attention's output. Default false */
    bool scale_embeddings;    /* BigBird: word embeddings are multiplied by sqrt(hidden_size). Default
                                 false */
    /* ModernBERT. Layers 0, full_every, 2 * full_every and so on see all tokens. In the other layers a token
       sees the tokens that are at most local_attention / 2 away. Layers with and without this window have
       different bases of rotary positions. All biases are false by default. */
    int full_every, local_attention; /* default 3 and 128 */
    float rotary_base, window_base;  /* base in layers without and with a window. Default 160000 and 10000 */
    bool mlp_bias, norm_bias, classifier_bias; /* classifier_bias: of the layer before the classifier */
    float embedding_dropout;         /* default 0 */
    /* ModernBERT: ids of special tokens, which the saved config.json names for other programs. Default 50281
       for bos and cls, 50282 for eos and sep */
    int bos_token, cls_token, eos_token, sep_token;
} tt_bert_config;
tt_bert_config tt_bert_config_default(tt_bert_kind kind); /* sizes of the base model, 2 classes */
typedef struct tt_head {
    tt_task task;
    int outputs; /* number of classes, labels, scores or tags; 0: the number in config.json */
} tt_head;

typedef struct tt_bert_layer { /* weights (out, in), biases (out), norms (hidden) */
    tt_param *q_w, *q_b, *k_w, *k_b, *v_w, *v_b;
    tt_param *attention_w, *attention_b, *attention_norm_w, *attention_norm_b;
    tt_param *up_w, *up_b, *down_w, *down_b, *output_norm_w, *output_norm_b;
    /* ModernBERT: the gate of the MLP. In ModernBERT, attention_norm and output_norm come before attention
       and MLP; layer 0 has no attention_norm */
    tt_param *gate_w, *gate_b;
} tt_bert_layer;

typedef struct tt_bert {
    tt_context *ctx;
    tt_bert_config config;
    char (*class_names)[64];                /* (classes) class names of config.json's id2label, UTF-8 */
    tt_param *word, *position, *type;       /* (vocab, hidden), (max_positions, hidden), (type_vocab,
                                               hidden); ALBERT: embedding_size instead of hidden */
    tt_param *norm_w, *norm_b;
    tt_param *mapping_w, *mapping_b;        /* ALBERT: the linear layer from embeddings to hidden states,
                                               (hidden, embedding_size), (hidden) */
    tt_bert_layer *layer;                   /* (layers); in ALBERT all have the same parameters */
    tt_param *head_w, *head_b;              /* pre_classifier or pooler (hidden, hidden), (hidden) */
    tt_param *classifier_w, *classifier_b;  /* (classes, hidden), (classes); NULL: no classes */
    tt_param *last_norm_w, *last_norm_b, *head_norm_w, *head_norm_b; /* ModernBERT: norms of the last hidden
                                               states, and between `head` and the classifier */
    tt_param *pooler_w, *pooler_b;          /* BigBird's pooler, which the logits do not depend on */
    tt_param *transform_w, *transform_b;    /* TT_TASK_MASKED_LM, else NULL: the layer before the logits,
                                               (hidden, hidden), (hidden); ALBERT: embedding_size rows */
    tt_param *transform_norm_w, *transform_norm_b; /* the norm after that layer */
    tt_param *word_b;                       /* the bias of the logits, (vocab) */
    bool new_head; /* whether the layers between the last hidden states and the logits begin with random
                      weights, at least in part */
} tt_bert;

/* Creates the parameters, initialised as in transformers: weights normal with deviation initializer_range,
   norms 1, biases 0. */
tt_status tt_bert_new(tt_context *ctx, tt_bert *m, const tt_bert_config *config);
/* Loads a Hugging Face folder: config.json and model.safetensors (tensor names with or without a prefix such
   as "bert."), or instead of it the files that model.safetensors.index.json names. Tensors stream into place
   when a program allocates its arena. classes 0: config.json gives the task and the number of classes; any
   other number: the task is TT_TASK_CLASS. The classifier and the layer before it start with random weights
   if the file lacks them, if the classifier has another size, or if the file's classifier is for tokens and
   the model's is for sequences. new_head is then true, and the logger gets a warning with their names. A
   missing or misshapen tensor of the body is an error, reported before anything of config.json's sizes is
   allocated.
   config.json gives the task as follows. If "architectures" names a class ...ForTokenClassification, the
   task is TT_TASK_TAGS. If it names a class ...ForMaskedLM, the task is TT_TASK_MASKED_LM. Otherwise
   "problem_type" gives the task. Without problem_type the task is TT_TASK_SCORES if there is one class, as in
   transformers, else TT_TASK_CLASS. A folder with the modules.json of sentence-transformers, whose
   "architectures" names no class ...Classification, has TT_TASK_EMBED; max_length, pooling and normalize are
   read from its files. */
tt_status tt_bert_load(tt_context *ctx, tt_bert *m, const char *folder, int classes);
/* Loads a folder as tt_bert_load does, for another task. head NULL: the task and the number of outputs that
   the folder's files give. */
tt_status tt_bert_load_head(tt_context *ctx, tt_bert *m, const char *folder, const tt_head *head);
/* Reads from a folder's config.json the task and the number of outputs of its classifier, without loading it.
   *head is TT_TASK_CLASS with 0 outputs if neither "architectures" nor "problem_type" says that the folder
   has a classifier. */
tt_status tt_bert_read_head(tt_context *ctx, const char *folder, tt_head *head);
/* Writes config.json and model.safetensors into a folder, which it creates if necessary. Each file is
   replaced atomically, and transformers can read both. With TT_TASK_EMBED the function also writes
   modules.json, sentence_bert_config.json, 1_Pooling/config.json and, if the config says normalize,
   2_Normalize/config.json: with the tokenizer's files, sentence-transformers can read the folder. If classes
   share a name, id2label has all of them and label2id the last. The function refuses class names that are
   not UTF-8, and a changed `config` that could not be loaded, before it writes anything. */
tt_status tt_bert_save(const tt_bert *m, const char *folder);
void tt_bert_free(tt_bert *m); /* the parameters stay with the context until it closes */

/* Makes a model and a dataset agree on the numbers of the classes (labels, scores or tags). The model and the
   dataset must have the same task and equally many classes, each with a name of at most 63 bytes. Call the
   function before a loader reads the dataset. If both have the same names, the model keeps its numbers and
   the dataset's labels change: call the function for each dataset, also for one that tt_dataset_split took
   out before. Otherwise the model takes the dataset's names, and the logger gets a warning if the classifier
   is from a checkpoint. */
tt_status tt_bert_name_classes(tt_bert *m, tt_dataset *d);
/* Records the encoder on a tape. Returns the last hidden states (rows, hidden). */
tt_value tt_bert_encode(const tt_bert *m, tt_tape *t, const tt_inputs *in);
/* Records the encoder, and sets hidden[0] to the input of the first layer and hidden[k] to the output of
   layer k, all (rows, hidden). hidden: array for layers + 1 values. Returns hidden[layers]. */
tt_value tt_bert_hidden(const tt_bert *m, tt_tape *t, const tt_inputs *in, tt_value *hidden);
/* Records the encoder and the head. Returns the logits (seqs, classes), for TT_TASK_TAGS (rows, classes). A
   model with TT_TASK_EMBED has no logits: the tape fails. With TT_TASK_MASKED_LM returns the logits of the
   rows `masked`, (n, vocab). */
tt_value tt_bert_logits(const tt_bert *m, tt_tape *t, const tt_inputs *in);
/* Records the encoder, and the embedding of each sequence according to the config's pooling and normalize.
   The model may have any task. Returns the embeddings (seqs, hidden) (Reimers, Gurevych, "Sentence-BERT",
   2019). */
tt_value tt_bert_embed(const tt_bert *m, tt_tape *t, const tt_inputs *in);
/* Returns the model for a trainer. The model's output is the logits, and its loss is that of the task: with
   TT_TASK_CLASS the mean cross-entropy of the classes in "labels", with TT_TASK_TAGS that of the tags in
   "tags", with TT_TASK_LABELS the mean sigmoid cross-entropy and with TT_TASK_SCORES the mean squared error
   of all numbers in "label_values". Accuracy is the share of sequences or, with TT_TASK_TAGS, of tokens that
   are predicted right; with TT_TASK_LABELS all labels of a sequence must be right. With TT_TASK_EMBED the
   output is the embeddings, and the loss is tt_contrastive_loss with train_options.temperature; a text is
   right if its pair is the nearest candidate of its micro-batch. With compile.train = false there is no loss.
   With TT_TASK_MASKED_LM the loss is the mean cross-entropy of the ids in "targets" over the rows in
   "masked"; the logits of these rows are the output if compile.train is false, else there is no output. m
   must stay valid. */
tt_model tt_bert_model(const tt_bert *m);
/* Records the contrastive loss of a micro-batch of pairs or triplets (InfoNCE: van den Oord et al.,
   "Representation learning with contrastive predictive coding", 2018): the cross-entropy of cosine(anchor,
   candidate) / temperature over all candidates, of which the anchor's pair is the right one. The other
   candidates are the negatives. embeddings: (seqs, width), one of each sequence. The function declares the
   inputs "anchors", "candidates" and "positives" of tt_loader_options. Returns the mean, (1, 1). */
tt_value tt_contrastive_loss(tt_tape *t, tt_value embeddings, const tt_train_options *o);

/* ViT (Dosovitskiy et al. 2021). Parameters have the names of transformers' ViTForImageClassification. */
typedef struct tt_vit_config {
    int image_size, patch_size, channels; /* images are square; channels 1..4 */
    int hidden_size, layers, heads, intermediate_size;
    int head_size;            /* as in tt_bert_config */
    int classes;
    bool qkv_bias;            /* default true */
    const char *activation;   /* "gelu", "gelu_new", "relu", "silu" */
    float layer_norm_eps, initializer_range;
    float dropout;            /* dropout of embeddings and residual branches. Default 0 */
    float attention_dropout;  /* default 0 */
    float mean[4], std[4];    /* mean and deviation of each channel; the model reads `(pixel / 255 - mean) /
                                 std`. Default 0.5 */
    /* Set `resize` if images should be resized to another height and width in pixels before they are cropped;
       default 0: image_size; -1: not resized. With resize_shortest only the shorter side gets that size, and
       the other keeps the proportion. The middle image_size pixels are then cropped; a smaller image is
       padded with zeros. */
    int resize;
    bool resize_shortest;
    tt_resample resample;     /* default TT_BILINEAR */
} tt_vit_config;
/* Returns the configuration of "Ti/16", "S/16", "B/16", "L/16", "H/14", or another patch size: 224 x 224
   pixels, 1000 classes. Any other name gives zeros, which tt_vit_new refuses. */
tt_vit_config tt_vit_config_default(const char *size);

typedef struct tt_vit_layer { /* weights (out, in), biases (out), norms (hidden) */
    tt_param *before_w, *before_b, *q_w, *q_b, *k_w, *k_b, *v_w, *v_b, *attention_w, *attention_b;
    tt_param *after_w, *after_b, *up_w, *up_b, *down_w, *down_b;
} tt_vit_layer;

typedef struct tt_vit {
    tt_context *ctx;
    tt_vit_config config;
    char (*class_names)[64];                /* (classes) class names of config.json's id2label, UTF-8 */
    /* tt_vit_save writes the names that torchvision gives tensors, because the loaded file had these names */
    bool torchvision;
    tt_param *patch_w, *patch_b;            /* (hidden, channels, patch, patch), (hidden) */
    tt_param *token, *position;             /* (hidden), (1 + patches, hidden) */
    tt_vit_layer *layer;
    tt_param *norm_w, *norm_b, *classifier_w, *classifier_b;
    bool new_head;                          /* whether the classifier begins with random weights, at least in
                                               part */
} tt_vit;

/* Creates the parameters, initialised as in transformers: weights normal with deviation initializer_range,
   norms 1, biases 0. */
tt_status tt_vit_new(tt_context *ctx, tt_vit *m, const tt_vit_config *config);
/* Loads a folder with model.safetensors, or with the files that model.safetensors.index.json names, or a
   single .safetensors file; config.json and preprocessor_config.json are read if the same folder has them.
   Tensors have the names of transformers (with or without "vit.") or of torchvision's vit_b_16 and so on.
   Without config.json the shapes of the tensors give the sizes (heads have 64 columns, in H/14 80).
   image_size 0 and classes 0 stand for the checkpoint's numbers. For another image_size, positions are
   interpolated (bicubic, as transformers does), and `resize` changes in proportion. A classifier that is
   missing or of another size starts with random weights, and the logger gets a warning. Every key of
   preprocessor_config.json that changes pixels is followed as transformers' ViTImageProcessorPil does, or
   refused by name: a size as height and width or shortest_edge, the four filters of tt_resample, do_resize,
   do_center_crop with a crop_size, image_mean, image_std, do_normalize. Streaming and errors are those of
   tt_bert_load. */
tt_status tt_vit_load(tt_context *ctx, tt_vit *m, const char *path, int image_size, int classes);
/* Writes model.safetensors, config.json and preprocessor_config.json into a folder, as tt_bert_save does. */
tt_status tt_vit_save(const tt_vit *m, const char *folder);
void tt_vit_free(tt_vit *m); /* the parameters stay with the context until it closes */

/* Returns the image options with which a loader or tt_image_prepare makes the model's input: those of its
   preprocessor_config.json, or a resize to image_size. */
tt_image_options tt_vit_image_options(const tt_vit *m);

tt_status tt_vit_name_classes(tt_vit *m, tt_dataset *d); /* does for a ViT what tt_bert_name_classes does for
                                                            a BERT */
tt_value tt_vit_encode(const tt_vit *m, tt_tape *t, const tt_inputs *in);
tt_value tt_vit_logits(const tt_vit *m, tt_tape *t, const tt_inputs *in);
tt_model tt_vit_classifier(const tt_vit *m); /* returns the model for a trainer, with cross-entropy as its
                                                loss */

/* Decoders: GPT-2 (Radford et al. 2019), LLaMA 1 to 3 (Touvron et al. 2023), Mistral, Qwen2, Qwen3, Gemma 3
   for text, GPT-NeoX and Pythia (Black et al. 2022), Falcon (Almazrouei et al. 2023). Parameters have the
   names of transformers' ...ForCausalLM or, with classes, of ...ForSequenceClassification: a linear layer
   without bias, `score`, reads the last hidden state of the last token of each text. Weights are (out, in) in
   memory, even if files have the transpose. The rows of a fused weight are all queries, then all keys, then
   all values, even if files order the rows by heads. */
typedef struct tt_lm_config {
    const char *kind;         /* model_type: "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3_text",
                                 "gpt_neox", "falcon" */
    int vocab_size, hidden_size, layers, heads;
    int key_heads;            /* number of heads of keys and of values, a divisor of `heads`. 0: as many as
                                 `heads`, as GPT-2 and GPT-NeoX need */
    int head_size;            /* default 0: hidden_size / heads; "qwen3" 128, "gemma3_text" 256 */
    int intermediate_size, max_positions;
    /* "mistral", "qwen2", "qwen3", "gemma3_text": number of keys that a token sees, of which its own is the
       last; 0: all keys */
    int window;
    int window_from;          /* the first layer with a window; earlier layers see all keys. Default 0 */
    int full_every;           /* "gemma3_text": every full_every-th layer sees all keys; 0: no layer does.
                                 Default 6 */
    bool tied;                /* the linear layer of the logits uses the token embedding as its weight */
    bool attention_bias;      /* the linear layers of attention have biases: "llama", "gpt_neox", "falcon" */
    bool mlp_bias;            /* the linear layers of the MLP have biases: "llama", "falcon" */
    bool parallel;            /* attention and MLP read the same x: "gpt_neox", "falcon" */
    bool two_norms;           /* "falcon" with `parallel`: attention and MLP each have a norm of their own */
    bool alibi;               /* "falcon": ALiBi instead of rotary positions; rounded as in transformers */
    const char *activation;   /* "gelu", "gelu_new", "relu", "silu" */
    float norm_eps, initializer_range;
    float embedding_dropout, dropout /* of residual branches */, attention_dropout;
    tt_rotary_options rotary; /* rotary positions of all kinds but "gpt2". `heads` is not read */
    /* "gemma3_text": base of rotary positions in layers with a window, where positions are not scaled.
       Default 10000 */
    float window_base;
    /* "gemma3_text": q k^T is divided by the square root of query_scalar. Default 256; 0: by that of
       head_size */
    int query_scalar;
    int end_token;            /* Set it in a new model that learns where documents end: the id that ends a
                                 document, eos_token_id of config.json; default -1: none. (For a loaded model
                                 see tt_lm.stop) */
    int classes;              /* Set it to the number of classes, labels or scores to make a classifier of
                                 texts; default 0: the model predicts the next token */
    tt_task task;             /* of a classifier: TT_TASK_CLASS (default), TT_TASK_LABELS, TT_TASK_SCORES */
} tt_lm_config;
/* Returns transformers' default configuration of a kind: "gpt2" is GPT-2 of 124 million parameters; key_heads
   is 0 except for "mistral" (8) and "falcon" (1). tt_lm_new refuses other kinds. */
tt_lm_config tt_lm_config_default(const char *kind);
/* Returns a configuration of a kind with the given sizes, for a small model from scratch. Heads share keys in
   the kind's proportion as far as possible; an MLP is 4 times as wide as the model (8/3 times if it has a
   gate); rotary positions rotate the fraction of each head's columns that is usual for the kind; embeddings
   are tied; there is neither a window nor dropout. heads, at least 1, divides hidden_size. Set vocab_size and
   max_positions yourself. */
tt_lm_config tt_lm_config_sized(const char *kind, int layers, int hidden_size, int heads);

typedef struct tt_lm_layer { /* weights (out, in), biases (out), norms (hidden); NULL: absent */
    tt_param *attention_norm_w, *attention_norm_b;
    tt_param *qkv_w, *qkv_b; /* (heads + 2 key_heads) * head_size rows; NULL: q_w to v_b are set */
    tt_param *q_w, *q_b, *k_w, *k_b, *v_w, *v_b;
    tt_param *q_norm_w, *k_norm_w; /* (head_size): norms of each head of queries and keys */
    tt_param *attention_w, *attention_b, *mlp_norm_w, *mlp_norm_b;
    tt_param *attention_out_norm_w, *mlp_out_norm_w; /* norms of what attention and MLP add to x */
    tt_param *gate_w, *gate_b, *up_w, *up_b, *down_w, *down_b;
} tt_lm_layer;

/* Low-rank adapters (Hu et al., "LoRA: low-rank adaptation of large language models", 2021), like peft's. */
typedef struct tt_lora_options {
    const char *targets; /* Set it to adapt other modules than peft does by default: patterns (as in
                            tt_param_freeze) of their names, or of the ends of the names after a dot,
                            separated by commas: "q_proj,v_proj"; default NULL: those of peft (c_attn for
                            "gpt2", query_key_value for "gpt_neox" and "falcon", else q_proj and v_proj) */
    int rank;            /* Set it higher if the adapters learn too little, and lower for smaller files;
                            default 8 */
    float alpha;         /* Set it, often to twice the rank, if another rank or recipe needs it: alpha / rank
                            is the factor of the adapter's output; default 8 */
    float dropout;       /* Set it, for example to 0.05, if the adapters overfit: the share of the adapter's
                            input that is dropped in training; default 0 */
} tt_lora_options;
tt_lora_options tt_lora_options_default(void);
typedef struct tt_lora { tt_param *weight, *a, *b; } tt_lora; /* an adapter adds b (out, rank) times a (rank,
                                                                 in) to weight (out, in) */

typedef struct tt_lm {
    tt_context *ctx;
    tt_lm_config config;
    tt_param *word, *position; /* (vocab, hidden), (max_positions, hidden) */
    tt_lm_layer *layer;
    tt_param *norm_w, *norm_b;
    /* weight of the linear layer of the logits, (vocab, hidden). NULL in a classifier, and NULL if
       config.tied is set: `word` is then the weight */
    tt_param *head;
    tt_param *score;           /* (classes, hidden); NULL: no classifier */
    char (*class_names)[64];   /* (classes), as in tt_bert */
    bool new_head;             /* whether `score` begins with random weights */
    size_t shard_bytes;        /* max bytes of a file that tt_lm_save writes; 0: no limit. Default 5e9 */
    int32_t *stop;             /* (n_stop) ids that end an answer, like tt_sampling.stop: eos_token_id of
                                  generation_config.json, or of config.json if that file is missing */
    int n_stop;
    char *generation;          /* text of generation_config.json, which tt_lm_save writes unchanged; NULL:
                                  none */
    struct tt__checkpoint *kept; /* config.json as loaded; NULL: no file was loaded. tt_lm_save copies from it
                                    the keys that `config` has no fields for. It also copies the keys for
                                    windows, rotary positions and Falcon's heads, if the corresponding fields
                                    of `config` still equal those of `read` */
    tt_lm_config read;         /* `config` as it was loaded; undefined if kept is NULL */
    tt_lora *lora;             /* (n_lora) adapters that tt_lm_lora made; the options of that call are in
                                  lora_options, except `targets`, which is not kept */
    int n_lora;
    tt_lora_options lora_options;
    const char *stored;        /* format of the linear layers' weights that tt_lm_store chose or that a folder
                                  in bitsandbytes' layout has; NULL: floats */
    size_t stored_bytes;       /* bytes of the weights in that format; 0: none */
    char *base;                /* model that the adapters belong to (base_model_name_or_path): the loaded
                                  folder, or the name in a loaded adapter; NULL: unknown */
} tt_lm;

/* Creates the parameters, initialised as in transformers: weights normal with deviation initializer_range,
   norms 1, biases 0. */
tt_status tt_lm_new(tt_context *ctx, tt_lm *m, const tt_lm_config *config);
/* Loads a Hugging Face folder: config.json, and model.safetensors, or model.safetensors.index.json and the
   files that the index names, which must be in the folder. The function refuses, by name, a key of
   config.json that asks for something unsupported (such as another rope_type), and a weight of the logits'
   linear layer that differs from the embedding although config.json ties the two. Weights in bitsandbytes'
   layout (int8; nf4 with double quantisation in blocks of 64) keep their codes, as tt_lm_store would store
   them; others of 4 bits become floats, with a warning. The function sets m->stop,
   from generation_config.json if the folder has that file. Tensors stream into place when a program allocates
   its arena. If "architectures" names a class ...ForSequenceClassification, the model is a classifier. */
tt_status tt_lm_load(tt_context *ctx, tt_lm *m, const char *folder);
/* Loads a folder as a classifier, whether or not it was saved as one, as tt_bert_load_head does. head NULL:
   as tt_lm_load. */
tt_status tt_lm_load_head(tt_context *ctx, tt_lm *m, const char *folder, const tt_head *head);
tt_status tt_lm_name_classes(tt_lm *m, tt_dataset *d); /* see tt_bert_name_classes */
/* Writes files that transformers reads into a folder, which the function creates if necessary: config.json,
   model.safetensors and, if the model was loaded with one, generation_config.json. A model of more than
   shard_bytes becomes several files of at most shard_bytes each, and their index. Each file is replaced as a
   whole. If a save of several files is interrupted, some are still the old model's, and tt_lm_load refuses
   the folder. The function refuses a folder that holds an adapter, because transformers would add the adapter
   to the model. The function removes files of an older save that have other names. */
tt_status tt_lm_save(const tt_lm *m, const char *folder);
void tt_lm_free(tt_lm *m); /* the parameters stay with the context until it closes */

/* Stores the weights of the blocks' linear layers in few bits, as the frozen base of adapters (Dettmers et
   al., "QLoRA", 2023) or to generate text faster, and freezes them; call it before programs are compiled.
   format: "int8", "nf4" or "int4", see tt_param_store; NULL: floats again, which can be trained again unless
   the model has adapters. The weights are coded while a program fills its arena, from the file, so that they
   never exist as floats. After an error no weight has changed. Embeddings, norms, biases and the layer of the
   logits stay as they are, and so do weights whose rows do not fit the format, with a warning. tt_lm_save
   writes "int8" and "nf4" in bitsandbytes' layout, and "int4" as floats. */
tt_status tt_lm_store(tt_lm *m, const char *format);
/* Gives modules an adapter; call it before programs are compiled. An adapter's factor B starts at 0, so the
   model's results do not change. From then on only adapters are trained: everything else is frozen. NULL
   options: defaults. */
tt_status tt_lm_lora(tt_lm *m, const tt_lora_options *o);
/* tt_lm_lora_save writes a peft folder: adapter_config.json and adapter_model.safetensors. tt_lm_lora_load
   reads such a folder into a model without adapters. tt_lm_lora_load refuses by name everything in the
   folder's config that tt_lora_options lacks (DoRA, PiSSA, biases, ranks of single modules). */
tt_status tt_lm_lora_save(const tt_lm *m, const char *folder);
tt_status tt_lm_lora_load(tt_lm *m, const char *folder);
/* Adds the adapters to the weights. tt_lm_save, which writes weights only, then saves the sums. The adapters'
   factors B become 0. To get the weights of before, load their folder again: a subtraction would restore them
   only up to rounding. Fails with TT_ERR_UNSUPPORTED, and changes nothing, if a weight that has an adapter is
   stored in few bits, is rounded or has low-rank factors. */
tt_status tt_lm_lora_merge(tt_lm *m);

/* Declares the inputs ids, positions (for "gpt2" below max_positions), seq_start and targets; only
   tt_lm_model reads targets. */
tt_inputs tt_lm_inputs(tt_tape *t, const tt_train_options *o);
tt_value tt_lm_hidden(const tt_lm *m, tt_tape *t, const tt_inputs *in); /* returns the output of the last
                                                                           norm, (rows, hidden) */
tt_value tt_lm_logits(const tt_lm *m, tt_tape *t, const tt_inputs *in); /* returns the logits (rows, vocab);
                                                                           of a classifier (seqs, classes) */
/* Returns the model for a trainer: its loss is the mean cross-entropy of the tokens that follow, in the
   batch's array "targets", i32 (rows, 1); -100: no target. A classifier has the loss, the metrics and the
   batches of tt_bert_model. m must stay valid. */
tt_model tt_lm_model(const tt_lm *m);
/* Returns the model for a trainer that trains on pairs of answers, from a token loader of a stream of pairs:
   its loss is tt_preference_loss, its metrics are tt_accuracy, the share of pairs whose margin is positive,
   and tt_margin, and its output is the difference of the log-probabilities of each pair, (pairs, 1). Set the
   dropouts of m->config to 0 first, as trl does. Not for classifiers. m must stay valid. */
tt_model tt_lm_preference_model(const tt_lm *m);
/* Records the loss of direct preference optimization (Rafailov et al., "Direct preference optimization: your
   language model is secretly a reward model", 2023): the mean over pairs of -log sigmoid(margin), where
   margin = o->beta * (difference - reference). *difference, (pairs, 1): the log-probability of the chosen
   answer minus that of the rejected answer, each the sum over the answer's tokens; reference: the same under
   the model as it was before training. logits: (n, vocab), one row for each token of an answer. The function
   declares the inputs "targets", i32 (n, 1): the tokens; "signs", f32 (n, 1): -1 for the tokens of a chosen
   answer and 1 for those of a rejected one; "pair_start", i32 (pairs + 1, 1): the first row of each pair;
   "reference.minus", f32 (pairs, 1): minus the reference; and "preferred", f32 (pairs, 1): ones. Returns the
   mean, (1, 1). Refuses o->label_smoothing. */
tt_value tt_preference_loss(tt_tape *t, tt_value logits, const tt_train_options *o, tt_value *difference);

/* ------------------------------------------------------------------------------------------------ pruning */

/* Importance of the units of a model: how much the loss depends on each. Heads that share a key head are one
   unit, and layers that share their parameters (ALBERT) are one layer. */
typedef struct tt_importance {
    tt_context *ctx;
    int layers, heads, neurons;
    double *layer, *head, *neuron; /* (layers), (layers, heads), (layers, neurons) */
} tt_importance;
/* Measure the importance of heads, neurons and layers, as Michel et al., "Are sixteen heads really better
   than one?", 2019: the sum over steps of |d loss / d mask|, where the mask is a factor of the outputs of a
   head or of a neuron, or of all that attention and MLP of a layer add to the hidden states. The functions
   run `steps` steps of epoch 0 of a source (fewer if the epoch is shorter) without dropout, and change no
   weight; but with precision bf16-true or 16-true the weights are rounded to 16 bits. The examples of a step
   count together, so use few, such as 16. o: device, precision and memory as for training; its optimizer,
   schedule and teacher are not used; NULL: defaults. For one process, and not for pipelines; weights must be
   floats (tt_param_store) without low-rank factors. Return NULL on error; free the result with
   tt_importance_free. */
tt_importance *tt_bert_importance(const tt_bert *m, const tt_source *source, int64_t steps,
                                  const tt_train_options *o);
tt_importance *tt_vit_importance(const tt_vit *m, const tt_source *source, int64_t steps,
                                 const tt_train_options *o);
tt_importance *tt_lm_importance(const tt_lm *m, const tt_source *source, int64_t steps,
                                const tt_train_options *o);
void tt_importance_free(tt_importance *x);

typedef struct tt_prune_options {
    int heads;        /* Set it to remove heads: the number of heads that each layer keeps, or of key heads,
                         each with its queries, if heads share them; default 0: all */
    int neurons;      /* Set it to remove neurons: the number that the MLP of each layer keeps, its
                         intermediate_size; default 0: all */
    int layers;       /* Set it to remove layers: the number of layers that stay; default 0: all */
    const int *which; /* Set it with `layers` to choose the layers yourself: their numbers, (layers), in
                         ascending order; default NULL: the most important ones */
} tt_prune_options;
tt_prune_options tt_prune_options_default(void);

/* Remove the least important units of each layer: the parameters become smaller, and with them plans, files
   and the time of a step. Each layer keeps other heads and neurons, but equally many. x NULL: the first units
   stay, for example to plan. Free the model's programs and trainers before. The functions fail with
   TT_ERR_ARGUMENT if a program is left or a number is out of range, if a weight is stored in few bits or has
   low-rank factors, and if a layer would take the place of one with another window; the model is then
   unchanged. GPT-2, GPT-NeoX and Falcon keep their heads (TT_ERR_UNSUPPORTED), because their files cannot say
   that heads are fewer. transformers loads what is saved: of decoders with fewer heads if these divide
   hidden_size; of ViT from version 5 on; of BERT and its kin heads are zeros in the file, which has the size
   of all heads, and from which tt_bert_load reads the heads that are left ("kept_heads" in config.json). */
tt_status tt_bert_prune(tt_bert *m, const tt_importance *x, const tt_prune_options *o);
tt_status tt_vit_prune(tt_vit *m, const tt_importance *x, const tt_prune_options *o);
tt_status tt_lm_prune(tt_lm *m, const tt_importance *x, const tt_prune_options *o);

/* --------------------------------------------------------------------------------------------- generation */

/* Continues texts with a model. Its program runs the tokens of up to max_seqs sequences at once and keeps the
   keys and values of earlier tokens in the planned arena. */
typedef struct tt_generator tt_generator;
typedef struct tt_generator_options {
    int max_seqs;        /* Set it higher to answer several prompts at a time; default 1 */
    int context;         /* Set it lower to save memory, and higher for long texts: the tokens of a prompt and
                            its answer together; default 0: the model's max_positions, at most 2048 */
    int max_tokens;      /* Set it higher to read long prompts faster, and lower to save memory: the tokens of
                            prompts that run at once, at least max_seqs; default 256 */
    /* Set its fields if the generator should run in another precision or on another device; default:
       tt_compile_options_default() with `train` false, which is required.
       `share`: to generate during a training, set it to the program that trains the model
       (tt_trainer_program). The generator then reads that program's parameters where they are stored, and has
       the same `parallel`, `memory`, `offload` and device. Make the generator before the first step. If the
       program has several ranks, data rank 0 generates; the other data ranks only send their shards of
       parameters to data rank 0 (zero 3). All tensor ranks and stages take part. If there are several
       processes, each calls tt_generate with the same arguments, and gets the same tokens. Without `share` a
       generator runs on one device and refuses a name of several (TT_ERR_UNSUPPORTED). */
    tt_compile_options compile;
} tt_generator_options;
tt_generator_options tt_generator_options_default(void);
/* Makes a generator. m must stay valid. Returns NULL on error. */
tt_generator *tt_generator_new(const tt_lm *m, const tt_generator_options *o);
void tt_generator_free(tt_generator *g);
const tt_program *tt_generator_program(const tt_generator *g); /* returns the program of a generator, for
                                                                  example for tt_program_plan */

typedef struct tt_sampling {
    int max_new;              /* Set it if answers should be longer or shorter: the largest number of tokens
                                 that are added to a sequence; default 128 */
    float temperature;        /* Set it below 1 for more likely and above 1 for more varied answers: logits
                                 are divided by it; 0: always the likeliest token; default 1 */
    /* Set it, for example to 50, if unlikely tokens spoil answers: each token is drawn from the top_k
       likeliest tokens; default 0: all */
    int top_k;
    float top_p;              /* Set it, for example to 0.9, if unlikely tokens spoil answers: each token is
                                 drawn from the fewest likeliest tokens whose probabilities sum up to at least
                                 top_p; default 1: all. In (0, 1] (Holtzman et al., "The curious case of
                                 neural text degeneration", 2020). top_p applies to the tokens that top_k
                                 leaves */
    float repetition_penalty; /* Set it above 1, for example to 1.1, if answers repeat themselves: tokens that
                                 already occurred become less likely; default 1. The penalty divides a
                                 positive logit and multiplies a negative logit (Keskar et al., "CTRL", 2019).
                                 Above 0 */
    uint64_t seed;            /* Set it to get another answer to the same prompt: the same seed gives the same
                                 tokens; default 0 */
    const int32_t *stop;      /* Set it if answers should end at certain tokens: n_stop tokens, each of which
                                 ends a sequence and is then its last token; default none */
    int n_stop;               /* Set it with `stop`: the number of tokens in `stop` */
    /* Set it to show answers while they grow: a function that receives each token as soon as the token is
       known; returning false ends the token's sequence; default NULL. */
    bool (*token)(void *user, int seq, int32_t id);
    void *user; /* argument of `token` */
} tt_sampling;
tt_sampling tt_sampling_default(void);

/* Continues `seqs` prompts, any number. ids: i32 (start[seqs]), all prompts one after another; prompt i has
   the ids [start[i], start[i + 1]), at least one and fewer than the context. out: i32 (seqs, max_new), the
   new tokens. count: (seqs), the number of new tokens of each sequence. A sequence ends with a token of
   `stop`, after max_new tokens, or when the context is full. Filters work in transformers' order: penalty,
   temperature, top_k, top_p. NULL sampling: defaults. The random numbers of a sequence do not depend on the
   other sequences, but products of few rows may round differently from products of many. */
tt_status tt_generate(tt_generator *g, const int32_t *ids, const int32_t *start, int seqs,
                      const tt_sampling *sampling, int32_t *out, int *count);
/* Continues a text. `put` receives the bytes that the answer adds to the text, as they come, in whole
   characters; returning false ends the answer. k: the model's tokenizer; NULL: tokens are bytes, and 256 ends
   a document. The function does not read `token` and `user` of `sampling` (NULL: defaults). tt_lm.stop and
   the token that ends a document end the answer as well. A text without tokens is continued as a new
   document. If a text spells out the token that k puts before texts, that token is not repeated, and the
   logger gets a warning. count, which may be NULL, receives the number of tokens of the answer. Returns
   TT_ERR_ARGUMENT if the text has no fewer tokens than the context; other errors are those of tt_generate. */
tt_status tt_generate_text(tt_generator *g, const tt_tokenizer *k, const char *text,
                           const tt_sampling *sampling,
                           bool (*put)(void *user, const char *text, size_t bytes), void *user, int *count);
