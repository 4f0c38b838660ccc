#pragma once
#include "../base/base.h"
#include "../files/json.h"
#include "layout.h"
#include "config.h"
#include "lm_layout.h"

/* ------------------------------------------------------------------------ config.json of a language model */

/* Prints the value of a member of a JSON object on one line. from: the value in a text that was parsed
   without an error. */
static void tt__print_member(tt__text_buffer *to, const char *from)
{
    bool quoted = false;
    for (int depth = 0; quoted || depth || (*from != ',' && *from != '}'); from++) {
        if (!quoted && strchr(" \t\r\n", *from)) continue;
        tt__print(to, !quoted && (*from == ',' || *from == ':') ? "%c " : "%c", *from);
        if (*from == '"') quoted = !quoted;
        else if (!quoted) depth += (*from == '[' || *from == '{') - (*from == ']' || *from == '}');
        else if (*from == '\\') tt__print(to, "%c", *++from);
    }
}

/* The source of the value of a member of config.json when a model is saved. */
typedef enum tt__lm_writer {
    TT__LM_KEPT,  /* copied from the config.json that was loaded */
    TT__LM_SHAPE, /* copied if tt__lm_has_shape is true; otherwise tt__lm_print writes the new value */
    TT__LM_OWN    /* written from the model, never copied */
} tt__lm_writer;

static tt__lm_writer tt__lm_writer_of(const tt__architecture *a, const char *key)
{
    static const char *const own[] = {
        "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "quantization_config"};
    static const char *const shape[] = {
        "rope_theta", "rope_scaling", "rope_parameters", "rotary_pct", "rotary_emb_base",
        "original_max_position_embeddings", "partial_rotary_factor", "sliding_window", "use_sliding_window",
        "max_window_layers", "layer_types", "sliding_window_pattern", "_sliding_window_pattern",
        "rope_local_base_freq", "alibi", "multi_query", "new_decoder_architecture",
        "num_kv_heads", "num_ln_in_parallel_attn"};
    for (int k = 0; k < TT__COUNT(own); k++) if (strcmp(key, own[k]) == 0) return TT__LM_OWN;
    for (int k = 0; k < a->n_config; k++) if (strcmp(key, a->config[k].key[0]) == 0) return TT__LM_OWN;
    for (int k = 0; k < TT__COUNT(shape); k++) if (strcmp(key, shape[k]) == 0) return TT__LM_SHAPE;
    return strcmp(key, a->activation_key) == 0 ? TT__LM_OWN : TT__LM_KEPT;
}

/* Fails if the boolean member `key` of a file is not `only`; the member may be absent or null. */
static tt_status tt__lm_refuse(const tt__json *j, const char *key, bool only)
{
    bool value = only;
    tt_status status = tt__json_read_bool(j, 0, key, &value);
    if (status != TT_OK || value == only) return status;
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': %s is %s; only %s is supported: use another model",
                    j->path, key, value ? "true" : "false", only ? "true" : "false");
}

/* Reads how many columns of each head the rotary positions turn. A decoder with a share_key (GPT-NeoX) may
   turn a share of the columns, given by JSON object `at` or by the member share_key. All other decoders turn
   all columns. If their config.json gives a share below 1, transformers ignores the share when the positions
   are not scaled, and this function fails when they are scaled. */
static tt_status tt__lm_read_columns(const tt__json *j, int at, bool scaled, tt_lm_config *c)
{
    const tt__lm_kind *kind = tt__lm_kind_of(c->kind);
    const bool shared = kind->share_key != NULL;
    const char *const keys[] = {shared ? kind->share_key : "partial_rotary_factor", "partial_rotary_factor"};
    double share = kind->turns; /* a double, because transformers multiplies the columns by a double */
    c->rotary.size = c->head_size;
    if (!shared && (!scaled || c->alibi)) return TT_OK;
    for (int k = 0; k < (at < 0 ? 1 : 2); k++) {
        const int node = tt__json_get(j, k ? at : 0, keys[k]);
        float in_range;
        if (node < 0 || j->nodes[node].kind == TT__JSON_NULL) continue;
        tt_status status = tt__json_float_at(j, keys[k], node, 0, 1.0001f, &in_range);
        if (status != TT_OK) return status;
        share = j->nodes[node].number;
    }
    c->rotary.size = (int)(c->head_size * share);
    if (c->rotary.size == 0 || (!shared && c->rotary.size != c->head_size))
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED,
                        "'%s': rotary positions would turn a share of %g of the %d columns of a head; %s",
                        j->path, share, c->head_size,
                        shared ? "at least one column must turn" : "only gpt_neox may have a share other "
                        "than 1");
    return TT_OK;
}

/* Reads the bases of Gemma's rotary positions: one base for layers without a window, another for layers with
   a window. rope_parameters has an object for each of the two kinds of layers. If `parameters`, *at is the
   node of rope_parameters and not of rope_scaling; then *at becomes the node of the object for layers without
   a window. */
static tt_status tt__lm_read_bases(const tt__json *j, tt_lm_config *c, bool parameters, int *at)
{
    const int both = tt__json_get(j, 0, "rope_parameters");
    const bool object = both >= 0 && j->nodes[both].kind == TT__JSON_OBJECT;
    const int full = object ? tt__json_get(j, both, "full_attention") : -1;
    const int local = object ? tt__json_get(j, both, "sliding_attention") : -1;
    const char *type = "default";
    tt_status status = tt__json_read_float(j, 0, "rope_local_base_freq", 1, INFINITY, &c->window_base);
    if (full >= 0 && j->nodes[full].kind != TT__JSON_OBJECT)
        return tt__json_wrong(j, "full_attention", full, NULL, "an object");
    if (local >= 0 && j->nodes[local].kind != TT__JSON_OBJECT)
        return tt__json_wrong(j, "sliding_attention", local, NULL, "an object");
    if (status == TT_OK && full >= 0)
        status = tt__json_read_float(j, full, "rope_theta", 1, INFINITY, &c->rotary.base);
    if (status == TT_OK && local >= 0)
        status = tt__json_read_float(j, local, "rope_theta", 1, INFINITY, &c->window_base);
    if (status == TT_OK && local >= 0) status = tt__json_read_string(j, local, "rope_type", false, &type);
    if (status == TT_OK && strcmp(type, "default") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': rope_type of sliding_attention is '%s'; only "
                        "default is supported: use another model", j->path, type);
    if (parameters) *at = full;
    return status;
}

/* Reads the frequencies of rotary positions from rope_scaling, the key of older versions of transformers, or,
   if this key is absent or empty, from rope_parameters, the key of transformers 5. */
static tt_status tt__lm_read_rotary(const tt__json *j, tt_lm_config *c)
{
    tt_rotary_options *r = &c->rotary;
    const char *type = "default", *name = "rope_scaling";
    int at = tt__json_get(j, 0, name);
    const bool empty = at < 0 || j->nodes[at].kind == TT__JSON_NULL ||
                       (j->nodes[at].kind == TT__JSON_OBJECT && !j->nodes[at].count);
    if (empty) at = tt__json_get(j, 0, name = "rope_parameters");
    if (at >= 0 && j->nodes[at].kind == TT__JSON_NULL) at = -1;
    if (at >= 0 && j->nodes[at].kind != TT__JSON_OBJECT)
        return tt__json_wrong(j, name, at, NULL, "an object");
    const float base = r->base;
    *r = tt_rotary_options_default(c->heads);
    r->base = base;
    tt_status status = tt__json_read_float(j, 0, tt__lm_kind_of(c->kind)->base_key, 1, INFINITY, &r->base);
    if (status == TT_OK && tt__lm_flags(c) & TT__LM_GEMMA) status = tt__lm_read_bases(j, c, empty, &at);
    if (status == TT_OK && at >= 0) status = tt__json_read_float(j, at, "rope_theta", 1, INFINITY, &r->base);
    if (status == TT_OK && at >= 0) status = tt__json_read_string(j, at, "type", false, &type);
    if (status == TT_OK && at >= 0) status = tt__json_read_string(j, at, "rope_type", false, &type);
    const bool scaled = status == TT_OK && strcmp(type, "default") != 0;
    if (status == TT_OK) status = tt__lm_read_columns(j, at, scaled, c);
    if (status != TT_OK || !scaled) return status;
    static const struct { const char *type, *low, *high; } all[] = { /* in the order of tt_rotary_scaling */
        {"", NULL, NULL}, {"linear", NULL, NULL}, {"llama3", "low_freq_factor", "high_freq_factor"},
        {"yarn", "beta_slow", "beta_fast"}};
    int kind = TT__COUNT(all) - 1;
    while (kind > TT_ROTARY_PLAIN && strcmp(type, all[kind].type) != 0) kind--;
    r->scaling = (tt_rotary_scaling)kind;
    float original = (float)c->max_positions;
    const struct { const char *key; int at; float min, below, *to; } numbers[] = {
        {"factor", at, 1, INFINITY, &r->factor},
        {"original_max_position_embeddings", at, 1, 1e9f, &original},
        {"original_max_position_embeddings", 0, 1, 1e9f, &original}, /* the outermost object's member comes
                                                                        last and wins, as in transformers 5 */
        {all[kind].low, at, 0, INFINITY, &r->low}, {all[kind].high, at, 0, INFINITY, &r->high},
        {"attention_factor", at, 0, INFINITY, &r->magnitude}};
    const int n = kind == TT_ROTARY_PLAIN ? 0 : kind == TT_ROTARY_YARN ? 6 : all[kind].low ? 5 : 1;
    for (int k = 0; k < n && status == TT_OK; k++)
        status = tt__json_read_float(j, numbers[k].at, numbers[k].key, numbers[k].min, numbers[k].below,
                                     numbers[k].to);
    if (n) r->original = (int)original;
    static const char *const unknown[] = {"mscale", "mscale_all_dim", "truncate"};
    for (int k = 0; k < TT__COUNT(unknown) && status == TT_OK; k++) {
        const int node = tt__json_get(j, at, unknown[k]);
        if (node >= 0 && j->nodes[node].kind != TT__JSON_NULL && j->nodes[node].kind != TT__JSON_TRUE)
            return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': \"%s\" of the rotary positions is set, which "
                            "is not supported for %s: use another model", j->path, unknown[k], c->kind);
    }
    if (status == TT_OK && r->scaling == TT_ROTARY_PLAIN)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': rope_type is '%s'; only default, linear, llama3 "
                        "and yarn are supported: use another model", j->path, type);
    return status;
}

/* Reads the members of Falcon's config that no table row describes: n_layer and n_head, older names that the
   table's names override, and the numbers of key heads and norms. */
static tt_status tt__lm_read_falcon(const tt__json *j, tt_lm_config *c)
{
    bool wide = false, one = true; /* values of the keys new_decoder_architecture and multi_query */
    static const char *const names[2][2] = {{"n_layer", "num_hidden_layers"},
                                            {"n_head", "num_attention_heads"}};
    int64_t n[] = {c->layers, c->heads}, norms = 0;
    tt_status status = TT_OK;
    for (int k = 0; k < 4 && status == TT_OK; k++)
        status = tt__json_read_int(j, 0, names[k / 2][k % 2], false, 1, INT32_MAX / 4, &n[k / 2]);
    c->layers = (int)n[0];
    c->heads = (int)n[1];
    int64_t key_heads = c->heads;
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "new_decoder_architecture", &wide);
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "multi_query", &one);
    if (status == TT_OK)
        status = tt__json_read_int(j, 0, "num_kv_heads", false, 1, INT32_MAX / 4, &key_heads);
    if (status == TT_OK) status = tt__json_read_int(j, 0, "num_ln_in_parallel_attn", false, 1, 2, &norms);
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "alibi", &c->alibi);
    if (status == TT_OK && wide) status = tt__lm_refuse(j, "parallel_attn", true);
    c->key_heads = wide ? (int)key_heads : one ? 1 : c->heads;
    c->two_norms = wide && norms != 1;
    return status;
}

/* Reads which layers of Gemma have no window: every full_every-th layer. layer_types overrides the other
   keys. */
static tt_status tt__lm_read_pattern(const tt__json *j, tt_lm_config *c)
{
    int64_t every = c->full_every;
    static const char *const keys[] = {"_sliding_window_pattern", "sliding_window_pattern"};
    tt_status status = TT_OK;
    for (int k = 0; k < 2 && status == TT_OK; k++)
        status = tt__json_read_int(j, 0, keys[k], false, 1, INT32_MAX / 4, &every);
    const int types = tt__json_get(j, 0, "layer_types");
    const bool listed = types >= 0 && j->nodes[types].kind == TT__JSON_ARRAY;
    if (listed) every = 0;
    for (int k = 0, at = types + 1; listed && k < j->nodes[types].count && status == TT_OK; k++) {
        bool slides;
        status = tt__read_layer_type(j, at, &slides);
        if (status == TT_OK && !slides && !every) every = k + 1;
        if (status == TT_OK && slides != (!every || (k + 1) % every != 0))
            return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': layer_types: layer %d breaks the pattern of "
                            "the layers before, in which every %lld%s layer has full attention; only a "
                            "pattern that repeats is supported: use another model", j->path, k,
                            (long long)every, every == 2 ? "nd" : every == 3 ? "rd" : "th");
        at = j->nodes[at].after;
    }
    c->full_every = every > c->layers ? 0 : (int)every;
    return status;
}

/* Reads the size of the sliding window, which Mistral has in all layers, Qwen2 and Qwen3 have from some layer
   on, and Gemma has in the layers of a pattern. */
static tt_status tt__lm_read_window(const tt__json *j, tt_lm_config *c)
{
    const bool layers = tt__lm_flags(c) & TT__LM_WINDOW_FROM, pattern = tt__lm_flags(c) & TT__LM_GEMMA;
    bool used = !layers;
    int64_t window = tt__json_get(j, 0, "sliding_window") < 0 ? 4096 : 0, from = layers ? 28 : 0;
    tt_status status = tt__json_read_int(j, 0, "sliding_window", false, 1, INT32_MAX / 4, &window);
    if (status == TT_OK && layers) status = tt__json_read_bool(j, 0, "use_sliding_window", &used);
    if (status == TT_OK && layers)
        status = tt__json_read_int(j, 0, "max_window_layers", false, 0, INT32_MAX / 4, &from);
    if (status == TT_OK && pattern) status = tt__lm_read_pattern(j, c);
    const int types = layers && used && window ? tt__json_get(j, 0, "layer_types") : -1;
    if (status != TT_OK) return status;
    if (types >= 0 && j->nodes[types].kind == TT__JSON_ARRAY) { /* layer_types overrides max_window_layers */
        from = 0;
        for (int k = 0, at = types + 1; k < j->nodes[types].count; k++, at = j->nodes[at].after) {
            bool slides;
            status = tt__read_layer_type(j, at, &slides);
            if (status != TT_OK) return status;
            if (!slides && from < k)
                return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': layer_types: layer %d has full attention "
                                "after a layer with sliding attention; only the first layers may have full "
                                "attention", j->path, k);
            from += !slides;
        }
    }
    c->window = used && from < c->layers ? (int)window : 0;
    c->window_from = c->window ? (int)from : 0;
    return TT_OK;
}

/* Reads the config.json of a model. *classes receives the number of classes, even if the model is no
   classifier. */
static tt_status tt__lm_read_config(const tt__json *j, tt_lm_config *c, const tt__architecture **a,
                                    int *classes)
{
    const char *kind = NULL;
    tt_status status = tt__json_read_string(j, 0, "model_type", true, &kind);
    if (status != TT_OK) return status;
    const tt__lm_kind *k = tt__lm_kind_of(kind);
    char names[256];
    if (!k)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': model_type is '%s'; this loader reads %s", j->path,
                        kind, tt__lm_names(names));
    *a = &k->a;
    *c = tt_lm_config_default(kind);
    *classes = c->classes = 2; /* the default of transformers */
    if (k->flags & TT__LM_MLP_4) c->intermediate_size = 0;
    status = tt__config_read(j, *a, c);
    *classes = c->classes;
    if (!tt__is_class(j, "*ForSequenceClassification")) c->classes = 0;
    if (status == TT_OK && c->classes) status = tt__read_task(j, c->classes, &c->task);
    if (status == TT_OK && k->flags & TT__LM_FALCON) status = tt__lm_read_falcon(j, c);
    if (status != TT_OK) return status;
    if (!c->intermediate_size) c->intermediate_size = 4 * c->hidden_size;
    tt__lm_complete(j->ctx, c);
    if (k->flags & TT__LM_QKV_BIAS) c->attention_bias = false;
    if (k->flags & TT__LM_WINDOW) status = tt__lm_read_window(j, c);
    static const struct { const char *key; bool only; } refused[] = {
        {"scale_attn_weights", true}, {"scale_attn_by_inverse_layer_idx", false},
        {"add_cross_attention", false}, {"is_encoder_decoder", false},
        {"use_bidirectional_attention", false}};
    for (int i = 0; i < TT__COUNT(refused) && status == TT_OK; i++)
        status = tt__lm_refuse(j, refused[i].key, refused[i].only);
    static const char *const softcaps[] = {"attn_logit_softcapping", "final_logit_softcapping"};
    for (int i = 0; i < TT__COUNT(softcaps) && status == TT_OK; i++) {
        const int cap = tt__json_get(j, 0, softcaps[i]);
        if (cap >= 0 && j->nodes[cap].kind != TT__JSON_NULL)
            return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': %s is set; only null is supported: use "
                            "another model", j->path, softcaps[i]);
    }
    if (status == TT_OK && !(k->flags & TT__LM_POSITIONS)) status = tt__lm_read_rotary(j, c);
    return status;
}

static void tt__lm_check(tt__text_buffer *all, const void *config)
{
    const tt_lm_config *c = (const tt_lm_config *)config;
    const tt__lm_kind *k = tt__lm_kind_of(c->kind);
    if (c->key_heads < 1) tt__print(all, "; key_heads is %d, but must be at least 1", c->key_heads);
    else if (c->heads % c->key_heads)
        tt__print(all, "; heads is %d, but must be a multiple of key_heads, %d", c->heads, c->key_heads);
    if (k->flags & TT__LM_EQUAL_HEADS && c->key_heads != c->heads)
        tt__print(all, "; key_heads is %d, but must equal heads, %d, in a model of kind %s", c->key_heads,
                  c->heads, c->kind);
    if (c->head_size < 1)
        tt__print(all, "; hidden_size is %d, but must be a multiple of heads, %d", c->hidden_size, c->heads);
    else if (!(k->flags & TT__LM_LLAMA) && (int64_t)c->head_size * c->heads != c->hidden_size)
        tt__print(all, "; heads, %d, times head_size, %d, is not hidden_size, %d", c->heads, c->head_size,
                  c->hidden_size);
    if (c->head_size > 1 << 16)
        tt__print(all, "; head_size is %d, but at most %d is supported", c->head_size, 1 << 16);
    const bool turns = !(k->flags & TT__LM_POSITIONS) && !c->alibi, odd = c->rotary.size % 2 != 0;
    if (turns && odd && c->rotary.scaling == TT_ROTARY_YARN) /* transformers' yarn fails with an odd size */
        tt__print(all, "; rotary.size is %d, but must be even with yarn", c->rotary.size);
    else if (turns && (c->rotary.size < 0 || c->rotary.size + odd > c->head_size))
        tt__print(all, "; rotary.size is %d, but must be 0 to the columns of a head, %d", c->rotary.size,
                  c->head_size);
    else if (turns && !k->share_key && c->rotary.size && c->rotary.size != c->head_size)
        tt__print(all,
                  "; rotary.size is %d, but must be 0 or %d, all columns of a head, in a model of kind %s",
                  c->rotary.size, c->head_size, c->kind);
    if (c->window < 0) tt__print(all, "; window is %d, but must be at least 0", c->window);
    if (c->window_from < 0 || (c->window_from && !(k->flags & TT__LM_WINDOW_FROM)))
        tt__print(all, "; window_from is %d, but must be at least 0, and 0 in kinds without full attention "
                  "in the first layers", c->window_from);
    if (c->full_every < 0) tt__print(all, "; full_every is %d, but must be at least 0", c->full_every);
    if (c->full_every > 0 && !(k->flags & TT__LM_GEMMA))
        tt__print(all, "; full_every is %d, but must be 0 in a model of kind %s", c->full_every, c->kind);
    if (!(c->window_base >= 0 && isfinite(c->window_base)))
        tt__print(all, "; window_base is %g, but must be a finite number of at least 0", c->window_base);
    if ((unsigned)c->task > TT_TASK_SCORES)
        tt__print(all, "; task is %d, but must be TT_TASK_CLASS, TT_TASK_LABELS or TT_TASK_SCORES",
                  (int)c->task);
    if (c->two_norms && !c->parallel) tt__print(all, "; two_norms needs parallel = true");
    if (k->flags & TT__LM_FALCON && !c->parallel && c->key_heads != 1 && c->key_heads != c->heads)
        tt__print(all, "; a model of kind %s with %d key heads needs parallel = true", c->kind, c->key_heads);
}

/* Prints the share of a head's columns that rotary positions turn. A reader multiplies the share by head_size
   in double precision and truncates the product to an integer. The share has enough digits that this integer
   is `size`. For example, 58 / 200 is 0.29, but 0.29 * 200 is 57.99999999999999. */
static const char *tt__lm_share(const tt_lm_config *c, char to[32])
{
    const int size = c->rotary.size ? c->rotary.size : c->head_size;
    for (int digits = 6; digits <= 18; digits++) {
        snprintf(to, 32, "%.*g", digits > 17 ? 17 : digits, (size + (digits > 17 ? 0.5 : 0)) / c->head_size);
        if ((int)(c->head_size * strtod(to, NULL)) == size) break;
    }
    for (char *p = to; *p; p++) if (!strchr("+-0123456789e", *p)) *p = '.';
    return to;
}

/* Returns whether config c has the same kind, windows, rotary positions and heads as *read, the config that
   was loaded. */
static bool tt__lm_has_shape(const tt_lm_config *c, const tt_lm_config *read)
{
    return strcmp(c->kind, read->kind) == 0 && c->layers == read->layers && c->heads == read->heads &&
           c->key_heads == read->key_heads && c->head_size == read->head_size && c->window == read->window &&
           c->window_from == read->window_from && c->parallel == read->parallel &&
           c->two_norms == read->two_norms && c->alibi == read->alibi &&
           c->full_every == read->full_every && c->window_base == read->window_base &&
           memcmp(&c->rotary, &read->rotary, sizeof c->rotary) == 0;
}

/* Returns whether `key` is a member of config.json that is written from the model if the model is a
   classifier. */
static bool tt__lm_is_of_classes(const char *key)
{
    static const char *const keys[] = {"id2label", "label2id", "num_labels", "problem_type"};
    for (int k = 0; k < TT__COUNT(keys); k++) if (strcmp(key, keys[k]) == 0) return true;
    return false;
}

static bool tt__lm_said(const tt__json *j, const char *key) { return j && tt__json_get(j, 0, key) >= 0; }

/* Prints the members of config.json for rotary positions, except members that `said` has (NULL: all members
   are printed). transformers 5 reads rope_parameters. Older versions read all members but rope_parameters,
   and use base 10,000 if the member for the base is missing. */
static void tt__lm_print_rotary(tt__text_buffer *json, const tt_lm_config *c, const tt__json *said)
{
    static const char *const types[] = {"default", "linear", "llama3", "yarn"};
    const tt_rotary_options *r = &c->rotary;
    char a[32], b[32], share[32];
    const tt__lm_kind *kind = tt__lm_kind_of(c->kind);
    if (kind->flags & TT__LM_POSITIONS || c->alibi) return;
    tt__lm_share(c, share);
    if (kind->share_key && !tt__lm_said(said, kind->share_key))
        tt__print(json, "  \"%s\": %s,\n", kind->share_key, share);
    const char *const bases[] = {kind->base_key, "rope_theta"}; /* the two may be equal */
    for (int k = strcmp(bases[0], bases[1]) == 0; k < 2; k++)
        if (!tt__lm_said(said, bases[k]))
            tt__print(json, "  \"%s\": %s,\n", bases[k], tt__shortest(r->base, a));
    const bool both = kind->flags & TT__LM_GEMMA; /* rope_parameters has an object for each kind of layers */
    if (both && !tt__lm_said(said, "rope_local_base_freq"))
        tt__print(json, "  \"rope_local_base_freq\": %s,\n", tt__shortest(c->window_base, a));
    for (int k = 0; k < 2; k++) {
        const char *key = k ? "rope_parameters" : "rope_scaling";
        if ((k == 0 && r->scaling == TT_ROTARY_PLAIN) || tt__lm_said(said, key)) continue;
        tt__print(json, "  \"%s\": {", key);
        if (k && both)
            tt__print(json, "\"sliding_attention\": {\"rope_type\": \"default\", \"rope_theta\": %s}, "
                      "\"full_attention\": {", tt__shortest(c->window_base, a));
        tt__print(json, "\"rope_type\": \"%s\", \"rope_theta\": %s, \"partial_rotary_factor\": %s",
                  types[r->scaling], tt__shortest(r->base, a), share);
        if (r->scaling != TT_ROTARY_PLAIN)
            tt__print(json, ", \"factor\": %s", tt__shortest(r->factor, a));
        if (r->scaling == TT_ROTARY_LLAMA3 || r->scaling == TT_ROTARY_YARN) {
            const bool llama = r->scaling == TT_ROTARY_LLAMA3, usual = r->low == 0 && r->high == 0;
            tt__print(json, ", \"original_max_position_embeddings\": %d, \"%s\": %s, \"%s\": %s", r->original,
                      llama ? "low_freq_factor" : "beta_slow", tt__shortest(usual ? 1 : r->low, a),
                      llama ? "high_freq_factor" : "beta_fast",
                      tt__shortest(usual ? (llama ? 4 : 32) : r->high, b));
        }
        if (r->scaling == TT_ROTARY_YARN && r->magnitude > 0)
            tt__print(json, ", \"attention_factor\": %s", tt__shortest(r->magnitude, a));
        tt__print(json, k && both ? "}},\n" : "},\n");
    }
}

/* Prints the members of config.json that the config's table lacks. */
static void tt__lm_print(tt__text_buffer *json, const void *self, const void *config)
{
    const tt_lm_config *c = (const tt_lm_config *)config;
    const tt_lm *m = (const tt_lm *)self;
    const tt__json *j = m->kept ? &m->kept->config : NULL;
    const bool as_read = j && tt__lm_has_shape(c, &m->read);
    for (int k = 0, at = 1; j && k < j->nodes[0].count; k++, at = j->nodes[at].after) {
        const char *key = j->pool + j->nodes[at].key;
        const tt__lm_writer writer = tt__lm_writer_of(&tt__lm_kind_of(m->read.kind)->a, key);
        if (writer == TT__LM_OWN || (writer == TT__LM_SHAPE && !as_read)) continue;
        if (c->classes && tt__lm_is_of_classes(key)) continue;
        tt__print(json, "  ");
        tt__json_quote(json, key);
        tt__print(json, ": ");
        tt__print_member(json, m->kept->text.bytes + j->nodes[at].offset);
        tt__print(json, ",\n");
    }
    if (!j) { /* a new model: without these keys transformers would use the kind's default tokens */
        char end[16] = "null";
        if (c->end_token >= 0) snprintf(end, sizeof end, "%d", c->end_token);
        tt__print(json, "  \"bos_token_id\": null,\n  \"eos_token_id\": %s,\n  \"pad_token_id\": null,\n",
                  end);
    }
    if (c->classes) tt__print(json, "  \"problem_type\": \"%s\",\n", tt__problem_types[c->task]);
    tt__lm_print_rotary(json, c, as_read ? j : NULL);
    if (as_read) return;
    const int flags = tt__lm_flags(c);
    if (flags & TT__LM_FALCON) {
        const bool wide = c->two_norms || (c->key_heads != 1 && c->key_heads != c->heads);
        tt__print(json, "  \"alibi\": %s,\n  \"new_decoder_architecture\": %s,\n"
                  "  \"multi_query\": %s,\n  \"num_kv_heads\": %d,\n  \"num_ln_in_parallel_attn\": %s,\n",
                  c->alibi ? "true" : "false", wide ? "true" : "false",
                  c->key_heads == 1 ? "true" : "false", c->key_heads,
                  !wide ? "null" : c->two_norms ? "2" : "1");
    }
    if (flags & TT__LM_WINDOW_FROM)
        tt__print(json, "  \"use_sliding_window\": %s,\n  \"max_window_layers\": %d,\n",
                  c->window ? "true" : "false", c->window ? c->window_from : c->layers);
    if (flags & TT__LM_GEMMA)
        tt__print(json, "  \"sliding_window_pattern\": %d,\n", c->full_every ? c->full_every : c->layers + 1);
    if (c->window) tt__print(json, "  \"sliding_window\": %d,\n", c->window);
    else if (flags & TT__LM_LLAMA) tt__print(json, "  \"sliding_window\": null,\n");
}
