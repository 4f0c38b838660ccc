#pragma once
#include "../base/base.h"
#include "layout.h"

/* ----------------------------------------------------------------------------------------------- decoders
   A table for each architecture gives the names that the tensors of tt_lm and the numbers of tt_lm_config
   have in files. A model's layers compute according to the tensors that the model has. */

/* Flags for each kind of decoder. */
enum {
    TT__LM_POSITIONS = 1,     /* positions are learned, not rotary */
    TT__LM_EQUAL_HEADS = 2,   /* key_heads must equal heads */
    TT__LM_LLAMA = 4,         /* heads have any size; saved files have sliding_window, maybe null */
    TT__LM_MLP_4 = 8,         /* intermediate_size defaults to 4 * hidden_size if config.json lacks it */
    TT__LM_QKV_BIAS = 16,     /* queries, keys and values always have biases, attention's output never */
    TT__LM_ONE_BIAS = 32,     /* the MLP has biases if the attention has biases */
    TT__LM_WINDOW = 64,       /* config.json may have a sliding_window */
    TT__LM_WINDOW_FROM = 128, /* config.json may say from which layer on the window applies */
    TT__LM_FALCON = 256,      /* multi_query and other keys give the numbers of key heads and norms */
    TT__LM_HEAD_NORMS = 512,  /* queries and keys have a norm in each head */
    TT__LM_GEMMA = 1024       /* norms multiply by 1 + w, embeddings are scaled, and windows have a pattern */
};
static int tt__lm_flags(const tt_lm_config *c);

static const char *tt__lm_head_name(const void *config);
static void tt__lm_check(tt__text_buffer *all, const void *config);
static void tt__lm_print(tt__text_buffer *json, const void *self, const void *config);

/* Sets the sizes that the letters in the tables' shapes stand for. H: hidden; I: intermediate; V: vocab; P:
   positions; X: vocab of an untied head; D: head size; G: number of key heads. Columns: A: of all queries; K:
   of all keys; S: of all queries, keys and values together. Biases, 0 if the model lacks them: Q: of queries;
   L: of keys or of values; T: of queries, keys and values together; B: of the attention's output; M and N: of
   the MLP. Norms, 0 if the model lacks them: E, F and O: Falcon's norms; U: norms of heads. */
static void tt__lm_sizes(const void *config, tt__sizes size)
{
    const tt_lm_config *c = (const tt_lm_config *)config;
    const bool bias = c->attention_bias || tt__lm_flags(c) & TT__LM_QKV_BIAS;
#define S(letter) size[letter - 'A']
    S('X') = c->tied || c->classes ? 0 : c->vocab_size;
    S('D') = c->head_size;
    S('G') = c->key_heads;
    S('A') = (int64_t)c->heads * c->head_size;
    S('K') = (int64_t)c->key_heads * c->head_size;
    S('S') = S('A') + 2 * S('K');
    S('Q') = bias ? S('A') : 0;
    S('L') = bias ? S('K') : 0;
    S('T') = c->attention_bias ? S('S') : 0;
    S('B') = c->attention_bias ? S('H') : 0;
    S('M') = c->mlp_bias ? c->intermediate_size : 0;
    S('N') = c->mlp_bias ? S('H') : 0;
    S('E') = c->parallel && c->two_norms ? S('H') : 0; /* size of the norms ln_attn and ln_mlp */
    S('F') = S('E') ? 0 : S('H');                      /* size of the norm input_layernorm */
    S('O') = c->parallel ? 0 : S('H');                 /* size of the norm post_attention_layernorm */
    S('U') = tt__lm_flags(c) & TT__LM_HEAD_NORMS ? S('D') : 0;
#undef S
}

/* Macros for table rows with a single naming: for a tensor; for the weight and the bias of a linear layer;
   for the weight and the bias of a norm. */
#define TT__LM(X, field, name, shape, init, order) \
    {offsetof(X, field), {name, NULL}, shape, init, 0, false, order}
#define TT__LM_LINEAR(field, name, shape, rows, weight_order, bias_order) \
    TT__LM(tt_lm_layer, field##_w, name ".weight", shape, 'n', weight_order), \
    TT__LM(tt_lm_layer, field##_b, name ".bias", rows, '0', bias_order)
#define TT__LM_NORM(X, field, name, shape) \
    TT__LM(X, field##_w, name ".weight", shape, '1', 0), TT__LM(X, field##_b, name ".bias", shape, '0', 0)

/* The row of a classifier's last layer. */
#define TT__LM_SCORE {offsetof(tt_lm, score), {"score.weight", NULL}, "CH", 'n', 0, true, 0}

static const tt__tensor_row tt__gpt2_tensors[] = {
    TT__LM(tt_lm, word, ".wte.weight", "VH", 'n', 0),
    TT__LM(tt_lm, position, ".wpe.weight", "PH", 'n', 0),
    TT__LM_NORM(tt_lm, norm, ".ln_f", "H"),
    TT__LM(tt_lm, head, "lm_head.weight", "XH", 'n', 0),
    TT__LM_SCORE,
};
static const tt__tensor_row tt__gpt2_layer[] = {
    TT__LM_NORM(tt_lm_layer, attention_norm, "ln_1", "H"),
    TT__LM_LINEAR(qkv, "attn.c_attn", "SH", "S", 't', 0),
    TT__LM_LINEAR(attention, "attn.c_proj", "HA", "H", 't', 0),
    TT__LM_NORM(tt_lm_layer, mlp_norm, "ln_2", "H"),
    TT__LM_LINEAR(up, "mlp.c_fc", "IH", "I", 't', 0),
    TT__LM_LINEAR(down, "mlp.c_proj", "HI", "H", 't', 0),
};
static const tt__tensor_row tt__llama_tensors[] = {
    TT__LM(tt_lm, word, ".embed_tokens.weight", "VH", 'n', 0),
    TT__LM(tt_lm, norm_w, ".norm.weight", "H", '1', 0),
    TT__LM(tt_lm, head, "lm_head.weight", "XH", 'n', 0),
    TT__LM_SCORE,
};
/* Rows of a layer of LLaMA and its kin: attention and the norms in front, and the MLP. norm: initial value of
   the norms' weights. */
#define TT__LM_ATTENTION(norm) \
    TT__LM(tt_lm_layer, attention_norm_w, "input_layernorm.weight", "H", norm, 0), \
    TT__LM_LINEAR(q, "self_attn.q_proj", "AH", "Q", 0, 0), \
    TT__LM(tt_lm_layer, q_norm_w, "self_attn.q_norm.weight", "U", norm, 0), \
    TT__LM_LINEAR(k, "self_attn.k_proj", "KH", "L", 0, 0), \
    TT__LM(tt_lm_layer, k_norm_w, "self_attn.k_norm.weight", "U", norm, 0), \
    TT__LM_LINEAR(v, "self_attn.v_proj", "KH", "L", 0, 0), \
    TT__LM_LINEAR(attention, "self_attn.o_proj", "HA", "B", 0, 0)
#define TT__LM_MLP \
    TT__LM_LINEAR(gate, "mlp.gate_proj", "IH", "M", 0, 0), \
    TT__LM_LINEAR(up, "mlp.up_proj", "IH", "M", 0, 0), \
    TT__LM_LINEAR(down, "mlp.down_proj", "HI", "N", 0, 0)
static const tt__tensor_row tt__llama_layer[] = {
    TT__LM_ATTENTION('1'),
    TT__LM(tt_lm_layer, mlp_norm_w, "post_attention_layernorm.weight", "H", '1', 0),
    TT__LM_MLP,
};
static const tt__tensor_row tt__gemma_tensors[] = {
    TT__LM(tt_lm, word, ".embed_tokens.weight", "VH", 'n', 0),
    TT__LM(tt_lm, norm_w, ".norm.weight", "H", '0', 0),
    TT__LM(tt_lm, head, "lm_head.weight", "XH", 'n', 0),
    TT__LM_SCORE,
};
static const tt__tensor_row tt__gemma_layer[] = {
    TT__LM_ATTENTION('0'),
    TT__LM(tt_lm_layer, attention_out_norm_w, "post_attention_layernorm.weight", "H", '0', 0),
    TT__LM(tt_lm_layer, mlp_norm_w, "pre_feedforward_layernorm.weight", "H", '0', 0),
    TT__LM_MLP,
    TT__LM(tt_lm_layer, mlp_out_norm_w, "post_feedforward_layernorm.weight", "H", '0', 0),
};
#undef TT__LM_ATTENTION
#undef TT__LM_MLP
static const tt__tensor_row tt__neox_tensors[] = {
    TT__LM(tt_lm, word, ".embed_in.weight", "VH", 'n', 0),
    TT__LM_NORM(tt_lm, norm, ".final_layer_norm", "H"),
    TT__LM(tt_lm, head, "embed_out.weight", "XH", 'n', 0),
    TT__LM_SCORE,
};
static const tt__tensor_row tt__neox_layer[] = {
    TT__LM_NORM(tt_lm_layer, attention_norm, "input_layernorm", "H"),
    TT__LM_LINEAR(qkv, "attention.query_key_value", "SH", "T", 'g', 'g'),
    TT__LM_LINEAR(attention, "attention.dense", "HA", "B", 0, 0),
    TT__LM_NORM(tt_lm_layer, mlp_norm, "post_attention_layernorm", "H"),
    TT__LM_LINEAR(up, "mlp.dense_h_to_4h", "IH", "I", 0, 0),
    TT__LM_LINEAR(down, "mlp.dense_4h_to_h", "HI", "H", 0, 0),
};
static const tt__tensor_row tt__falcon_tensors[] = {
    TT__LM(tt_lm, word, ".word_embeddings.weight", "VH", 'n', 0),
    TT__LM_NORM(tt_lm, norm, ".ln_f", "H"),
    TT__LM(tt_lm, head, "lm_head.weight", "XH", 'n', 0),
    TT__LM_SCORE,
};
static const tt__tensor_row tt__falcon_layer[] = { /* several rows may have one field; a model has the tensors
                                                      of at most one of them */
    TT__LM_NORM(tt_lm_layer, attention_norm, "ln_attn", "E"),
    TT__LM_NORM(tt_lm_layer, attention_norm, "input_layernorm", "F"),
    TT__LM_LINEAR(qkv, "self_attention.query_key_value", "SH", "T", 'g', 'g'),
    TT__LM_LINEAR(attention, "self_attention.dense", "HA", "B", 0, 0),
    TT__LM_NORM(tt_lm_layer, mlp_norm, "ln_mlp", "E"),
    TT__LM_NORM(tt_lm_layer, mlp_norm, "post_attention_layernorm", "O"),
    TT__LM_LINEAR(up, "mlp.dense_h_to_4h", "IH", "M", 0, 0),
    TT__LM_LINEAR(down, "mlp.dense_4h_to_h", "HI", "N", 0, 0),
};

#define C(field, kind, letter, key) TT__CONFIG(tt_lm, field, kind, letter, key, NULL)
static const tt__config_row tt__gpt2_rows[] = {
    C(vocab_size, 'n', 'V', "vocab_size"), C(hidden_size, 'n', 'H', "n_embd"), C(layers, 'n', 0, "n_layer"),
    C(heads, 'n', 0, "n_head"), C(intermediate_size, 'n', 'I', "n_inner"),
    C(max_positions, 'n', 'P', "n_positions"), C(norm_eps, 'f', 0, "layer_norm_epsilon"),
    C(initializer_range, 'f', 0, "initializer_range"), C(embedding_dropout, 'p', 0, "embd_pdrop"),
    C(dropout, 'p', 0, "resid_pdrop"), C(attention_dropout, 'p', 0, "attn_pdrop"),
    C(tied, 'b', 0, "tie_word_embeddings"),
};
#define TT__LM_ROWS(intermediate, eps) \
    C(vocab_size, 'n', 'V', "vocab_size"), C(hidden_size, 'n', 'H', "hidden_size"), \
    C(layers, 'n', 0, "num_hidden_layers"), C(heads, 'n', 0, "num_attention_heads"), \
    C(intermediate_size, 'n', 'I', intermediate), C(max_positions, 'n', 0, "max_position_embeddings"), \
    C(norm_eps, 'f', 0, eps), C(initializer_range, 'f', 0, "initializer_range"), \
    C(attention_dropout, 'p', 0, "attention_dropout"), C(tied, 'b', 0, "tie_word_embeddings")
static const tt__config_row tt__llama_rows[] = {
    TT__LM_ROWS("intermediate_size", "rms_norm_eps"), C(key_heads, 'n', 0, "num_key_value_heads"),
    C(head_size, 'n', 0, "head_dim"), C(attention_bias, 'b', 0, "attention_bias"),
    C(mlp_bias, 'b', 0, "mlp_bias"),
};
static const tt__config_row tt__gemma_rows[] = {
    TT__LM_ROWS("intermediate_size", "rms_norm_eps"), C(key_heads, 'n', 0, "num_key_value_heads"),
    C(head_size, 'n', 0, "head_dim"), C(attention_bias, 'b', 0, "attention_bias"),
    C(query_scalar, 'n', 0, "query_pre_attn_scalar"),
};
static const tt__config_row tt__neox_rows[] = {
    TT__LM_ROWS("intermediate_size", "layer_norm_eps"), C(dropout, 'p', 0, "hidden_dropout"),
    C(attention_bias, 'b', 0, "attention_bias"), C(parallel, 'b', 0, "use_parallel_residual"),
};
static const tt__config_row tt__falcon_rows[] = {
    TT__LM_ROWS("ffn_hidden_size", "layer_norm_epsilon"), C(dropout, 'p', 0, "hidden_dropout"),
    C(attention_bias, 'b', 0, "bias"), C(parallel, 'b', 0, "parallel_attn"),
};
#undef TT__LM_ROWS
#undef C

static const char *const tt__lm_buffers[] = {
    "*.attn.bias", "*.attn.masked_bias", "*.attention.bias", "*.attention.masked_bias",
    "*rotary_emb.inv_freq", NULL};

/* A kind of decoder: its architecture (names and tables), its flags, config.json's keys for the base and the
   share of rotary positions, the modules that get adapters by default, and transformers' default values. */
typedef struct tt__lm_kind {
    tt__architecture a;
    int flags;
    const char *base_key, *share_key, *adapted;
    int vocab, hidden, layers, heads, key_heads, head /* head_size */, intermediate, positions, window;
    const char *activation;
    float eps, dropout, turns;
    bool tied, bias, parallel;
} tt__lm_kind;

#define TT__LM_FILES(what, type, class_name, act, before, in_layer) { \
    type, 0, class_name, type, act, "", {before, NULL}, {in_layer "%d.", NULL}, \
    tt__##what##_tensors, tt__##what##_layer, tt__##what##_rows, TT__COUNT(tt__##what##_tensors), \
    TT__COUNT(tt__##what##_layer), TT__COUNT(tt__##what##_rows), sizeof(tt_lm), sizeof(tt_lm_config), \
    sizeof(tt_lm_layer), offsetof(tt_lm, config), offsetof(tt_lm, class_names), offsetof(tt_lm, new_head), \
    offsetof(tt_lm, layer), \
    offsetof(tt_lm_config, hidden_size), offsetof(tt_lm_config, layers), offsetof(tt_lm_config, classes), \
    offsetof(tt_lm_config, activation), offsetof(tt_lm_config, initializer_range), tt__lm_sizes, \
    tt__lm_check, NULL, 0, tt__lm_print, tt__lm_buffers, tt__lm_head_name, NULL}

static const tt__lm_kind tt__lm_kinds[] = {
    {TT__LM_FILES(gpt2, "gpt2", "GPT2", "activation_function", "transformer.", "h."),
     TT__LM_POSITIONS | TT__LM_EQUAL_HEADS | TT__LM_MLP_4, NULL, NULL, "c_attn",
     50257, 768, 12, 12, 12, 0, 3072, 1024, 0, "gelu_new", 1e-5f, 0.1f, 1, true, true, false},
    {TT__LM_FILES(llama, "llama", "Llama", "hidden_act", "model.", "layers."),
     TT__LM_LLAMA, "rope_theta", NULL, "q_proj,v_proj",
     32000, 4096, 32, 32, 32, 0, 11008, 2048, 0, "silu", 1e-6f, 0, 1, false, false, false},
    {TT__LM_FILES(llama, "mistral", "Mistral", "hidden_act", "model.", "layers."),
     TT__LM_LLAMA | TT__LM_WINDOW, "rope_theta", NULL, "q_proj,v_proj",
     32000, 4096, 32, 32, 8, 0, 14336, 131072, 4096, "silu", 1e-6f, 0, 1, false, false, false},
    {TT__LM_FILES(llama, "qwen2", "Qwen2", "hidden_act", "model.", "layers."),
     TT__LM_LLAMA | TT__LM_QKV_BIAS | TT__LM_WINDOW | TT__LM_WINDOW_FROM, "rope_theta", NULL, "q_proj,v_proj",
     151936, 4096, 32, 32, 32, 0, 22016, 32768, 0, "silu", 1e-6f, 0, 1, false, false, false},
    {TT__LM_FILES(llama, "qwen3", "Qwen3", "hidden_act", "model.", "layers."),
     TT__LM_LLAMA | TT__LM_HEAD_NORMS | TT__LM_WINDOW | TT__LM_WINDOW_FROM, "rope_theta", NULL,
     "q_proj,v_proj",
     151936, 4096, 32, 32, 32, 128, 22016, 32768, 0, "silu", 1e-6f, 0, 1, false, false, false},
    {TT__LM_FILES(gemma, "gemma3_text", "Gemma3", "hidden_activation", "model.", "layers."),
     TT__LM_LLAMA | TT__LM_HEAD_NORMS | TT__LM_WINDOW | TT__LM_GEMMA, "rope_theta", NULL, "q_proj,v_proj",
     262208, 2304, 26, 8, 4, 256, 9216, 131072, 4096, "gelu_pytorch_tanh", 1e-6f, 0, 1, true, false, false},
    {TT__LM_FILES(neox, "gpt_neox", "GPTNeoX", "hidden_act", "gpt_neox.", "layers."),
     TT__LM_EQUAL_HEADS, "rotary_emb_base", "rotary_pct", "query_key_value",
     50432, 6144, 44, 64, 64, 0, 24576, 2048, 0, "gelu", 1e-5f, 0, 0.25f, false, true, true},
    {TT__LM_FILES(falcon, "falcon", "Falcon", "activation", "transformer.", "h."),
     TT__LM_MLP_4 | TT__LM_ONE_BIAS | TT__LM_FALCON, "rope_theta", NULL, "query_key_value",
     65024, 4544, 32, 71, 1, 0, 18176, 2048, 0, "gelu", 1e-5f, 0, 1, true, false, true},
};

static const tt__lm_kind *tt__lm_kind_of(const char *kind)
{
    for (int k = 0; k < TT__COUNT(tt__lm_kinds); k++)
        if (kind && strcmp(tt__lm_kinds[k].a.name, kind) == 0) return &tt__lm_kinds[k];
    return NULL;
}

static int tt__lm_flags(const tt_lm_config *c) { return tt__lm_kind_of(c->kind)->flags; }

/* Returns the end of a class name of transformers, such as "ForCausalLM" in "LlamaForCausalLM". */
static const char *tt__lm_head_name(const void *config)
{
    const tt_lm_config *c = (const tt_lm_config *)config;
    const int flags = tt__lm_flags(c);
    if (c->classes) return &"TextForSequenceClassification"[flags & TT__LM_GEMMA ? 0 : 4];
    return flags & TT__LM_POSITIONS ? "LMHeadModel" : "ForCausalLM";
}

tt_lm_config tt_lm_config_default(const char *kind)
{
    const tt__lm_kind *k = tt__lm_kind_of(kind);
    tt_lm_config c;
    memset(&c, 0, sizeof c);
    c.kind = kind;
    c.end_token = -1;
    if (!k) return c;
    c.kind = k->a.name;
    c.vocab_size = k->vocab;
    c.hidden_size = k->hidden;
    c.layers = k->layers;
    c.heads = k->heads;
    c.key_heads = k->key_heads == k->heads ? 0 : k->key_heads;
    c.intermediate_size = k->intermediate;
    c.max_positions = k->positions;
    c.window = k->window;
    c.activation = k->activation;
    c.norm_eps = k->eps;
    c.embedding_dropout = c.dropout = c.attention_dropout = k->dropout;
    c.tied = k->tied;
    c.attention_bias = k->bias;
    c.parallel = k->parallel;
    c.initializer_range = 0.02f;
    c.rotary = tt_rotary_options_default(c.heads);
    c.head_size = k->head;
    c.rotary.size = (int)(k->turns * (float)(k->head ? k->head : c.hidden_size / c.heads));
    if (!(k->flags & TT__LM_GEMMA)) return c;
    c.full_every = 6;
    c.rotary.base = 1e6f;
    c.window_base = 1e4f;
    c.query_scalar = 256;
    return c;
}

tt_lm_config tt_lm_config_sized(const char *kind, int layers, int hidden_size, int heads)
{
    tt_lm_config c = tt_lm_config_default(kind);
    const tt__lm_kind *k = tt__lm_kind_of(kind);
    const int head = heads > 0 ? hidden_size / heads : 0, sharing = c.key_heads ? c.heads / c.key_heads : 1;
    const bool gate = k && k->flags & TT__LM_LLAMA, turns_whole = k && k->turns == 1;
    c.layers = layers;
    c.hidden_size = hidden_size;
    c.heads = heads;
    c.key_heads = heads % sharing ? heads : heads / sharing;
    c.head_size = c.query_scalar = 0;
    c.intermediate_size = gate ? 8 * hidden_size / 3 : 4 * hidden_size;
    c.rotary.size = turns_whole ? 0 : head / 8 * 2; /* about a quarter of the columns, an even number */
    c.window = 0;
    c.tied = true;
    c.embedding_dropout = c.dropout = c.attention_dropout = 0;
    return c;
}

/* Returns whether layer k sees only the keys of a window. The rotary positions of layers with a window may
   have another base. */
static bool tt__lm_has_window(const tt_lm_config *c, int k)
{
    return k >= c->window_from && !(c->full_every && (k + 1) % c->full_every == 0);
}

/* Prints the names of all kinds, with commas between. */
static const char *tt__lm_names(char to[256])
{
    tt__text_buffer all = {to, 256, 0};
    for (int k = 0; k < TT__COUNT(tt__lm_kinds); k++)
        tt__print(&all, "%s%s", k ? ", " : "", tt__lm_kinds[k].a.name);
    return to;
}

/* Replaces fields of a config that the caller left at 0. Returns the config's architecture, or NULL after
   tt__fail if the kind is unknown. */
static const tt__architecture *tt__lm_complete(tt_context *ctx, tt_lm_config *c)
{
    const tt__lm_kind *k = tt__lm_kind_of(c->kind);
    char names[256];
    if (!k) {
        tt__fail(ctx, TT_ERR_UNSUPPORTED, "language model: kind '%s' is unknown: use %s",
                 c->kind ? c->kind : "(null)", tt__lm_names(names));
        return NULL;
    }
    c->kind = k->a.name;
    if (!c->key_heads) c->key_heads = c->heads;
    if (!c->head_size && c->heads > 0 && c->hidden_size % c->heads == 0)
        c->head_size = c->hidden_size / c->heads;
    if (c->full_every > c->layers) c->full_every = 0;
    if (k->flags & TT__LM_GEMMA && !c->query_scalar) c->query_scalar = c->head_size;
    if (k->flags & TT__LM_ONE_BIAS) c->mlp_bias = c->attention_bias;
    return &k->a;
}
