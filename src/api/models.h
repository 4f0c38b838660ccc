#pragma once
#include "standard.h"
#include "context.h"
#include "tape.h"
#include "program.h"
#include "tokenizer.h"
#include "data.h"

/* ------------------------------------------------------------------------------------------------- models */

typedef struct tt_train_options tt_train_options;

/* How good a model is, told from what an evaluation has added up. */
typedef struct tt_metric {
    const char *name; /* in metrics.csv and texts: at most 31 letters, digits, _ and -. NULL: none */
    double (*of)(const tt_stats *s);
    bool lower_is_better;
} tt_metric;
tt_metric tt_accuracy(void);   /* "accuracy": the share of targets predicted right (cross-entropy) */
tt_metric tt_perplexity(void); /* "perplexity": exp(loss). Lower is better */

/* What a trainer trains. */
typedef struct tt_model {
    const void *self; /* for record */
    /* Declares inputs and records what becomes of a micro-batch of up to o->max_seqs sequences (or examples)
       and o->max_tokens tokens. Returns the loss (1, 1); *output, where it is set, is what tt_forward gives.
       The names of the inputs are those of a batch's arrays. */
    tt_value (*record)(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output);
    tt_metric metric;
    int classes;      /* the output has a logit for each of so many, for tt_predict. 0: something else */
    const char *unit; /* what is counted a second: "tokens", "images"; as a metric's name. NULL: "examples" */
    int max_length;   /* rows of the longest sequence that there may be; 0: it has no sequences */
    bool same_length; /* all sequences have max_length rows, as images do: the trainer knows their positions
                         and starts, and batches need not have them */
} tt_model;

/* What BERT and ViT read, of all sequences one after another. An image is one: a class token, its patches. */
typedef struct tt_inputs {
    tt_value positions; /* i32 (rows, 1): 0, 1, ... within each sequence */
    tt_value seq_start; /* i32 (seqs + 1, 1) */
    tt_value first;     /* i32 (seqs, 1): the first row of each sequence */
    tt_value ids;       /* text: i32 (rows, 1) */
    tt_value types;     /* text: i32 (rows, 1): token types, or none */
    tt_value pixels;    /* images: u8 (seqs, image_bytes) */
    tt_value labels;    /* i32 (seqs, 1): the class of each sequence */
    tt_value targets;   /* language models: i32 (rows, 1), the token that follows; -100: none */
} tt_inputs;
/* Declare these inputs, as the batches of a loader have them. length: rows of an image. */
tt_inputs tt_text_inputs(tt_tape *t, const tt_train_options *o);
tt_inputs tt_image_inputs(tt_tape *t, const tt_train_options *o, int length, int64_t image_bytes);

/* BERT (Devlin et al. 2019), MiniLM (Wang et al. 2020), DistilBERT (Sanh et al. 2019), RoBERTa (Liu et al.
   2019) and BigBird (Zaheer et al. 2020): one encoder. Parameters carry the names of transformers'
   ...ForSequenceClassification. */
typedef enum tt_bert_kind {
    TT_BERT,
    TT_DISTILBERT, /* head: pre_classifier, ReLU; BERT's: pooler, tanh */
    TT_ROBERTA,    /* positions from pad_token + 1 on, no token types; head: classifier.dense, tanh */
    TT_BIG_BIRD    /* head: classifier.dense, `activation`. Its pooler is kept and not used */
} tt_bert_kind;
typedef struct tt_bert_config {
    tt_bert_kind kind;
    int vocab_size, hidden_size, layers, heads, intermediate_size, max_positions;
    int type_vocab_size;      /* 0: no token types */
    int pad_token;            /* RoBERTa, BigBird. Default 1; 0 */
    bool pooler;              /* BERT: dense + tanh on the first token before the classifier. Default true */
    int classes;
    const char *activation;   /* "gelu", "gelu_new", "relu", "silu" */
    float layer_norm_eps, initializer_range;
    float dropout;            /* of embeddings and residual branches */
    float attention_dropout;
    float classifier_dropout;
    /* BigBird: attention by blocks (attention_type "block_sparse"), where sequences of more than (5 + 2
       random_blocks) block_size tokens see, as in transformers, the first and the last block, three around a
       block, and in training random_blocks that a seed (the layer's number) chooses, those that transformers
       chooses for max_positions tokens; without training, in place of these as often the first. No weights of
       attention are then dropped. */
    bool block_sparse;        /* default true */
    int block_size, random_blocks;
    bool qkv_bias;            /* BigBird. Default true */
    bool scale_embeddings;    /* BigBird: words are multiplied with sqrt(hidden_size). Default false */
} tt_bert_config;
tt_bert_config tt_bert_config_default(tt_bert_kind kind); /* the base model's sizes, 2 classes */

typedef struct tt_bert_layer { /* weights (out, in), biases (out), norms (hidden) */
    tt_param *q_w, *q_b, *k_w, *k_b, *v_w, *v_b;
    tt_param *attention_w, *attention_b, *attention_norm_w, *attention_norm_b;
    tt_param *up_w, *up_b, *down_w, *down_b, *output_norm_w, *output_norm_b;
} tt_bert_layer;

typedef struct tt_bert {
    tt_context *ctx;
    tt_bert_config config;
    /* what `config` and config.json's id2label say: (classes), UTF-8 */
    char activation[32], (*class_names)[64];
    tt_param *word, *position, *type;       /* (vocab, max_positions and type_vocab, hidden) */
    tt_param *norm_w, *norm_b;
    tt_bert_layer *layer;
    tt_param *head_w, *head_b;              /* pre_classifier or pooler (hidden, hidden), (hidden) */
    tt_param *classifier_w, *classifier_b;  /* (classes, hidden), (classes) */
    tt_param *pooler_w, *pooler_b;          /* BigBird's, which the logits do not depend on */
    bool new_head; /* what makes logits of the hidden states begins with random weights, at least in part */
} tt_bert;

/* Creates the parameters, which begin as in transformers (normal, initializer_range; norms 1, biases 0). */
tt_status tt_bert_new(tt_context *ctx, tt_bert *m, const tt_bert_config *config);
/* From a Hugging Face folder: config.json and model.safetensors (with or without the prefix, as "bert."), or
   the files that model.safetensors.index.json names in place of that. Tensors stream into place when a
   program is allocated. classes 0: as config.json says. When the file has no classifier or one of another
   size, or not the layer before it, these start anew: new_head is true, and the logger is warned with their
   names. A missing or misshapen tensor of the body is an error, before anything of the sizes in config.json
   is made. */
tt_status tt_bert_load(tt_context *ctx, tt_bert *m, const char *folder, int classes);
/* Writes config.json and model.safetensors into a folder (made if need be), each atomically, as transformers
   reads them. Of classes that share a name, all are in id2label, the last in label2id. Class names that are
   not UTF-8, and a changed `config` that could not be loaded, are refused before anything is written. */
tt_status tt_bert_save(const tt_bert *m, const char *folder);
void tt_bert_free(tt_bert *m); /* the parameters stay with the context until it closes */

/* Makes a model and a dataset of as many classes, with names of at most 63 bytes, agree on what the classes'
   numbers mean, before a loader reads the dataset. Where both have the same names, the model keeps its
   numbers and the dataset's labels become these: call it for each dataset, also for one that was split off
   before. Else the model takes the dataset's names, and the logger is warned if its classifier is that of a
   checkpoint. */
tt_status tt_bert_name_classes(tt_bert *m, tt_dataset *d);
/* Recorded on a tape: the last hidden states (rows, hidden), and the logits (seqs, classes). */
tt_value tt_bert_encode(const tt_bert *m, tt_tape *t, const tt_inputs *in);
tt_value tt_bert_logits(const tt_bert *m, tt_tape *t, const tt_inputs *in);
/* As a trainer sees it: the mean cross-entropy of the classes that "labels" tell. m must stay. */
tt_model tt_bert_classifier(const tt_bert *m);

/* ViT (Dosovitskiy et al. 2021). Parameters carry the names of transformers' ViTForImageClassification. */
typedef struct tt_vit_config {
    int image_size, patch_size, channels; /* images are square; channels 1..4 */
    int hidden_size, layers, heads, intermediate_size;
    int classes;
    bool qkv_bias;            /* default true */
    const char *activation;   /* as BERT's */
    float layer_norm_eps, initializer_range;
    float dropout;            /* of embeddings and residual branches. Default 0 */
    float attention_dropout;  /* default 0 */
    float mean[4], std[4];    /* of each channel; the model sees (pixel / 255 - mean) / std. Default 0.5 */
    /* Images are resized to `resize` pixels in height and width (or only the shorter side, and the other
       keeps the proportion), and of these the middle image_size are cropped; what is smaller gets zeros
       around it. Default 0: resized to image_size; -1: not resized */
    int resize;
    bool resize_shortest;
    tt_resample resample;     /* default TT_BILINEAR */
} tt_vit_config;
/* "Ti/16", "S/16", "B/16", "L/16", "H/14", or another patch: 224 x 224, 1000 classes. Else 0: refused. */
tt_vit_config tt_vit_config_default(const char *size);

typedef struct tt_vit_layer { /* weights (out, in), biases (out), norms (hidden) */
    tt_param *before_w, *before_b, *q_w, *q_b, *k_w, *k_b, *v_w, *v_b, *attention_w, *attention_b;
    tt_param *after_w, *after_b, *up_w, *up_b, *down_w, *down_b;
} tt_vit_layer;

typedef struct tt_vit {
    tt_context *ctx;
    tt_vit_config config;
    /* what `config` and config.json's id2label say: (classes), UTF-8 */
    char activation[32], (*class_names)[64];
    bool torchvision;                       /* names are spelled as by torchvision, as in the loaded file */
    tt_param *patch_w, *patch_b;            /* (hidden, channels, patch, patch), (hidden) */
    tt_param *token, *position;             /* (hidden), (1 + patches, hidden) */
    tt_vit_layer *layer;
    tt_param *norm_w, *norm_b, *classifier_w, *classifier_b;
    bool new_head;                          /* the classifier begins with random weights, at least in part */
} tt_vit;

/* As tt_bert_new. */
tt_status tt_vit_new(tt_context *ctx, tt_vit *m, const tt_vit_config *config);
/* path: a folder with model.safetensors, or with the files that model.safetensors.index.json names in place
   of that, or a .safetensors file; config.json and preprocessor_config.json are read if they are in that
   folder. The names of tensors are those of transformers (with or without "vit.") or
   torchvision's vit_b_16 and so on. Without config.json the shapes of the tensors tell the sizes (with heads
   of 64 columns, in H/14 of 80). image_size, classes 0: as the checkpoint's. For another image_size than the
   checkpoint's, positions are interpolated (bicubic, as transformers does), and `resize` changes in
   proportion; a classifier that is missing or of another size starts anew, and the logger is warned. Of
   preprocessor_config.json all that changes pixels is done as transformers' ViTImageProcessorPil does it, or
   refused by name: a size as height and width or shortest_edge, the four filters of tt_resample, do_resize,
   do_center_crop with a crop_size, image_mean, image_std, do_normalize. Else as tt_bert_load. */
tt_status tt_vit_load(tt_context *ctx, tt_vit *m, const char *path, int image_size, int classes);
/* Writes model.safetensors, config.json and preprocessor_config.json into a folder, as tt_bert_save. */
tt_status tt_vit_save(const tt_vit *m, const char *folder);
void tt_vit_free(tt_vit *m); /* the parameters stay with the context until it closes */

/* Returns the image options, for a loader or tt_image_prepare, by which images become the model's input: as
   its preprocessor_config.json says, or resized to image_size. */
tt_image_options tt_vit_image_options(const tt_vit *m);

tt_status tt_vit_name_classes(tt_vit *m, tt_dataset *d); /* these three are as BERT's */
tt_value tt_vit_encode(const tt_vit *m, tt_tape *t, const tt_inputs *in);
tt_value tt_vit_logits(const tt_vit *m, tt_tape *t, const tt_inputs *in);
tt_model tt_vit_classifier(const tt_vit *m); /* as tt_bert_classifier */

/* Decoders: GPT-2 (Radford et al. 2019), LLaMA 1 to 3 (Touvron et al. 2023), Mistral, Qwen2, GPT-NeoX and
   Pythia (Black et al. 2022), Falcon (Almazrouei et al. 2023). Parameters carry the names of transformers'
   ...ForCausalLM. Weights are (out, in) here, also where files have them transposed; rows of fused ones are
   all queries, all keys, all values, also where files have them by heads. */
typedef struct tt_lm_config {
    const char *kind;         /* model_type: "gpt2", "llama", "mistral", "qwen2", "gpt_neox", "falcon" */
    int vocab_size, hidden_size, layers, heads;
    int key_heads;            /* of keys and values; divides heads. 0: as many; so of GPT-2, GPT-NeoX */
    int head_size;            /* default 0: hidden_size / heads */
    int intermediate_size, max_positions;
    int window;               /* "mistral", "qwen2": keys that a token sees, its own the last; 0: all */
    int window_from;          /* the first layer with a window: those before see all. Default 0 */
    bool tied;                /* the last product's weight is the embedding of tokens */
    bool attention_bias;      /* products of the attention have biases: "llama", "gpt_neox", "falcon" */
    bool mlp_bias;            /* so have those of the MLP: "llama", "falcon" */
    bool parallel;            /* attention and MLP read the same x: "gpt_neox", "falcon" */
    bool two_norms;           /* "falcon" with parallel: each through a norm of its own */
    bool alibi;               /* "falcon": instead of rotary positions; rounded as transformers does */
    const char *activation;   /* as BERT's */
    float norm_eps, initializer_range;
    float embedding_dropout, dropout /* of residual branches */, attention_dropout;
    tt_rotary_options rotary; /* all but "gpt2": rotary positions. `heads` is not read */
    int end_token;            /* of a new model: the id that ends a document, eos_token_id of config.json.
                                 Default -1: none. (Of a loaded one see tt_lm.stop) */
} tt_lm_config;
/* transformers' default of that kind: "gpt2" is GPT-2 of 124 million parameters; key_heads is 0 but of
   "mistral" (8) and "falcon" (1). tt_lm_new refuses other kinds. */
tt_lm_config tt_lm_config_default(const char *kind);
/* The same with other sizes, for a small model from scratch: heads share keys as the kind's do, as far as
   they can, an MLP is 4 times as wide as the model (8/3 where it has a gate), and as large a share of a head
   turns; tied, with neither a window nor dropout. heads, at least 1, divides hidden_size. Set vocab_size and
   max_positions. */
tt_lm_config tt_lm_config_sized(const char *kind, int layers, int hidden_size, int heads);

typedef struct tt_lm_layer { /* weights (out, in), biases (out), norms (hidden); NULL: there is none */
    tt_param *attention_norm_w, *attention_norm_b;
    tt_param *qkv_w, *qkv_b; /* (heads + 2 key_heads) * head_size rows; or else the next six */
    tt_param *q_w, *q_b, *k_w, *k_b, *v_w, *v_b;
    tt_param *attention_w, *attention_b, *mlp_norm_w, *mlp_norm_b;
    tt_param *gate_w, *gate_b, *up_w, *up_b, *down_w, *down_b;
} tt_lm_layer;

/* Low-rank adapters (Hu et al., "LoRA: low-rank adaptation of large language models", 2021), as peft's. */
typedef struct tt_lora_options {
    const char *targets; /* modules that get one: patterns (as tt_param_freeze's) of their names, or of the
                            ends of these behind a dot, with commas between: "q_proj,v_proj". Default NULL:
                            peft's choice, q_proj and v_proj, c_attn of "gpt2", query_key_value */
    int rank;            /* default 8 */
    float alpha;         /* what is added is scaled by alpha / rank. Default 8 */
    float dropout;       /* of what the adapter reads, in training. Default 0 */
} tt_lora_options;
tt_lora_options tt_lora_options_default(void);
typedef struct tt_lora { tt_param *weight, *a, *b; } tt_lora; /* (out, in) gets b (out, rank) a (rank, in) */

typedef struct tt_lm {
    tt_context *ctx;
    tt_lm_config config;
    char activation[32];
    tt_param *word, *position; /* (vocab, hidden), (max_positions, hidden) */
    tt_lm_layer *layer;
    tt_param *norm_w, *norm_b;
    tt_param *head;            /* (vocab, hidden); NULL: tied */
    size_t shard_bytes;        /* of files that tt_lm_save writes, at most; 0: any number. Default 5e9 */
    int32_t *stop;             /* (n_stop) eos_token_id of generation_config.json, or of config.json where
                                  that file is missing: ids that end an answer, as tt_sampling.stop */
    int n_stop;
    char *generation;          /* generation_config.json, which tt_lm_save writes again; NULL: none */
    struct tt__checkpoint *kept; /* config.json as it was read: tt_lm_save writes again what `config` does not
                                    say, and how it says windows, rotary positions and Falcon's heads ... */
    tt_lm_config read;         /* ... while `config` has those of this, as it was loaded. kept NULL: none */
    tt_lora *lora;             /* (n_lora), by tt_lm_lora; with lora_options, whose targets are not kept */
    int n_lora;
    tt_lora_options lora_options;
    char *base;                /* whose adapters these are (base_model_name_or_path): the folder that was
                                  loaded, or what a loaded adapter says; NULL: not known */
} tt_lm;

/* As tt_bert_new. */
tt_status tt_lm_new(tt_context *ctx, tt_lm *m, const tt_lm_config *config);
/* From a Hugging Face folder: config.json, and model.safetensors, or model.safetensors.index.json and the
   files that it names, which must lie in the folder. A key of config.json that asks for what is not there
   (as another rope_type) is refused by name, and so is a last product's weight that it ties to another. Of
   generation_config.json, if it is there, `stop` is read. Tensors stream into place when a program is
   allocated. */
tt_status tt_lm_load(tt_context *ctx, tt_lm *m, const char *folder);
/* Writes config.json, model.safetensors and, where the model came with one, generation_config.json into a
   folder (made if need be), as transformers reads them; above shard_bytes, files of at most so much and their
   index. Each file is replaced as a whole. Where a save of several was cut off, some are of the model before,
   which tt_lm_load refuses. So is a folder that holds an adapter, which transformers would add to the model.
   Files of an older save that had more of them are removed. */
tt_status tt_lm_save(const tt_lm *m, const char *folder);
void tt_lm_free(tt_lm *m); /* the parameters stay with the context until it closes */

/* Gives modules an adapter, before programs are compiled. B starts at 0: the model computes what it did. Only
   adapters are trained from then on: all else is frozen. NULL options: defaults. */
tt_status tt_lm_lora(tt_lm *m, const tt_lora_options *o);
/* Writes a peft folder: adapter_config.json and adapter_model.safetensors; and reads one into a model without
   adapters. What its config asks for besides (DoRA, PiSSA, biases, ranks of single modules) is refused by
   name. */
tt_status tt_lm_lora_save(const tt_lm *m, const char *folder);
tt_status tt_lm_lora_load(tt_lm *m, const char *folder);
/* Adds the adapters to the weights, for tt_lm_save, which writes these alone; B is 0 again. */
tt_status tt_lm_lora_merge(tt_lm *m);

/* ids, positions (of "gpt2" below max_positions) and seq_start are read, and by tt_lm_model targets. */
tt_inputs tt_lm_inputs(tt_tape *t, const tt_train_options *o);
tt_value tt_lm_hidden(const tt_lm *m, tt_tape *t, const tt_inputs *in); /* normed: (rows, hidden) */
tt_value tt_lm_logits(const tt_lm *m, tt_tape *t, const tt_inputs *in); /* (rows, vocab) */
/* As a trainer sees it: the mean cross-entropy of the tokens that follow, which the batch's array "targets"
   tells, i32 (rows, 1); -100: none. m must stay. */
tt_model tt_lm_model(const tt_lm *m);

/* --------------------------------------------------------------------------------------------- generation */

/* A model that continues texts: a program that runs tokens of up to max_seqs sequences at once and keeps the
   keys and values of those before in the planned arena. */
typedef struct tt_generator tt_generator;
typedef struct tt_generator_options {
    int max_seqs;        /* sequences at a time. Default 1 */
    int context;         /* tokens of a prompt and its answer, at most. Default 0: the model's max_positions,
                            or 2048 where it has more */
    int max_tokens;      /* tokens of prompts that run at once, at least max_seqs. Default 256 */
    /* How its program is made. Default: tt_compile_options_default(), but `train` false, which it must be.
       `share`: a program that trains the model, whose parameters the generator then uses where they lie
       (tt_trainer_program), with that program's `parallel`, `memory` and offloaded parameters, and on its
       device; make the generator before the first step. Of several ranks the first
       data rank generates: the other data ranks only give it their shards of parameters (zero 3); all tensor
       ranks and stages take part. Of several processes each calls tt_generate with the same arguments, and
       gets the same tokens. Without `share`, a generator runs on one device, and a name of several is refused
       (TT_ERR_UNSUPPORTED). To answer more at a time, let max_seqs be larger. */
    tt_compile_options compile;
} tt_generator_options;
tt_generator_options tt_generator_options_default(void);
/* NULL after an error. m must stay. */
tt_generator *tt_generator_new(const tt_lm *m, const tt_generator_options *o);
void tt_generator_free(tt_generator *g);
const tt_program *tt_generator_program(const tt_generator *g); /* for its plan */

typedef struct tt_sampling {
    int max_new;              /* tokens that are added to a sequence, at most. Default 128 */
    float temperature;        /* divides logits. 0: the likeliest token, always. Default 1 */
    int top_k;                /* only the likeliest k tokens. Default 0: all */
    float top_p;              /* ... and of these the fewest whose probabilities sum up to it, in (0, 1]
                                 (Holtzman et al., "The curious case of neural text degeneration", 2020).
                                 Default 1 */
    float repetition_penalty; /* divides a positive, multiplies a negative logit of a token that was there
                                 before (Keskar et al., "CTRL", 2019). Above 0. Default 1 */
    uint64_t seed;            /* the same seed, the same tokens. Default 0 */
    const int32_t *stop;      /* tokens that end a sequence, itself the last; n_stop of them. Default none */
    int n_stop;
    /* Called with each token, as soon as it is known; false ends its sequence. NULL (default): none. */
    bool (*token)(void *user, int seq, int32_t id);
    void *user;
} tt_sampling;
tt_sampling tt_sampling_default(void);

/* Continues `seqs` prompts, any number: ids i32 (start[seqs]) of all one after another, each with at least
   one token and fewer than the context. out i32 (seqs, max_new): the new tokens; count (seqs): how many. A
   sequence ends with a token of `stop`, with max_new or when the context is full. Filters work in the order
   of transformers: penalty, temperature, top_k, top_p. NULL sampling: defaults. The random numbers of a
   sequence are the same whatever others are there; but products of few rows may round otherwise than those of
   many. */
tt_status tt_generate(tt_generator *g, const int32_t *ids, const int32_t *start, int seqs,
                      const tt_sampling *sampling, int32_t *out, int *count);
/* Continues a text: put gets what the answer adds to it, as it comes, in whole characters; false ends the
   answer. k: the model's tokenizer; NULL: tokens are bytes, and 256 ends a document. Of `sampling` (NULL:
   defaults) `token` and `user` are not read; tt_lm.stop and what ends a document end the answer, too. A text
   without a token is continued as a new document; one that spells out the token which k puts in front of
   texts has it once, and the logger is warned. count, which may be NULL: tokens of the answer.
   TT_ERR_ARGUMENT: the text has no fewer tokens than the context; else the errors of tt_generate. */
tt_status tt_generate_text(tt_generator *g, const tt_tokenizer *k, const char *text,
                           const tt_sampling *sampling,
                           bool (*put)(void *user, const char *text, size_t bytes), void *user, int *count);
