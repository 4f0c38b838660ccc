#pragma once
#include "../base/base.h"
#include "../files/json.h"
#include "layout.h"
#include "config.h"
#include "lm_layout.h"

/* ------------------------------------------------------------------------ config.json of a language model */

/* x as Python writes floats: of the fewest digits that read back as it, and with a point. */
static void tt__print_double(tt__text *to, double x)
{
    char text[40];
    const int least = fabs(x) >= 1 && fabs(x) < 1e15 ? (int)log10(fabs(x)) + 1 : 1; /* no exponent */
    for (int digits = least; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (strtod(text, NULL) == x) break;
    }
    for (char *c = text; *c; c++) if (!strchr("+-0123456789e", *c)) *c = '.';
    tt__print(to, "%s%s", text, strpbrk(text, ".e") ? "" : ".0");
}

/* Writes the value of a node of parsed JSON. */
static void tt__print_node(tt__text *to, const tt__json *j, int node)
{
    const tt__json_node *n = &j->nodes[node];
    const bool object = n->kind == TT__JSON_OBJECT;
    static const char *const words[] = {"null", "false", "true"};
    if (n->kind <= TT__JSON_TRUE) tt__print(to, "%s", words[n->kind]);
    else if (n->kind == TT__JSON_NUMBER_KIND && n->exact) tt__print(to, "%lld", (long long)n->integer);
    else if (n->kind == TT__JSON_NUMBER_KIND) tt__print_double(to, n->number);
    else if (n->kind == TT__JSON_STRING) tt__json_quote(to, j->pool + n->integer);
    else {
        tt__print(to, object ? "{" : "[");
        for (int k = 0, at = node + 1; k < n->count; k++, at = j->nodes[at].after) {
            if (k) tt__print(to, ", ");
            if (object) tt__json_quote(to, j->pool + j->nodes[at].key), tt__print(to, ": ");
            tt__print_node(to, j, at);
        }
        tt__print(to, object ? "}" : "]");
    }
}

/* Who writes a member of config.json? */
typedef enum tt__lm_writer {
    TT__LM_KEPT,  /* what it said is written again */
    TT__LM_SHAPE, /* so it is while the model has that shape, else tt__lm_print says the new one */
    TT__LM_OWN    /* tt_lm_save by itself */
} tt__lm_writer;

static tt__lm_writer tt__lm_writer_of(const tt__architecture *a, const char *key)
{
    static const char *const own[] = {
        "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "quantization_config"};
    static const char *const shape[] = {
        "rope_theta", "rope_scaling", "rope_parameters", "rotary_pct", "rotary_emb_base",
        "original_max_position_embeddings", "partial_rotary_factor", "sliding_window", "use_sliding_window",
        "max_window_layers", "layer_types", "alibi", "multi_query", "new_decoder_architecture",
        "num_kv_heads", "num_ln_in_parallel_attn"};
    for (int k = 0; k < TT__COUNT(own); k++) if (strcmp(key, own[k]) == 0) return TT__LM_OWN;
    for (int k = 0; k < a->n_config; k++) if (strcmp(key, a->config[k].key[0]) == 0) return TT__LM_OWN;
    for (int k = 0; k < TT__COUNT(shape); k++) if (strcmp(key, shape[k]) == 0) return TT__LM_SHAPE;
    return strcmp(key, a->activation_key[0]) == 0 ? TT__LM_OWN : TT__LM_KEPT;
}

/* The members of config.json with that writer, as lines of their own; to be freed. */
static tt_status tt__lm_keep(const tt__json *j, const tt__architecture *a, tt__lm_writer writer, char **kept)
{
    tt__text text = {NULL, 0, 0};
    for (int round = 0; round < 2; round++) {
        for (int k = 0, at = 1; k < j->nodes[0].count; k++, at = j->nodes[at].after) {
            const char *key = j->pool + j->nodes[at].key;
            if (tt__lm_writer_of(a, key) != writer) continue;
            tt__print(&text, "  ");
            tt__json_quote(&text, key);
            tt__print(&text, ": ");
            tt__print_node(&text, j, at);
            tt__print(&text, ",\n");
        }
        if (round) break;
        text.capacity = text.length + 1; /* now its length is known */
        text.length = 0;
        text.to = *kept = (char *)tt__alloc(j->ctx, text.capacity);
        if (!text.to) return TT_ERR_MEMORY;
        *text.to = 0;
    }
    return TT_OK;
}

/* What a file may not ask for: the key must be absent, null or have this value. */
static tt_status tt__lm_refuse(const tt__json *j, const char *key, bool only)
{
    bool value = only;
    tt_status status = tt__json_read_bool(j, 0, key, &value);
    if (status != TT_OK || value == only) return status;
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': %s is %s; only %s is supported", j->path, key,
                    value ? "true" : "false", only ? "true" : "false");
}

/* The columns of each head that turn. Of GPT-NeoX's a share may: of the object `at`, or else rotary_pct. The
   others turn all: what they say of a share transformers ignores where positions are not scaled, and computes
   nothing with where they are. */
static tt_status tt__lm_read_columns(const tt__json *j, int at, bool scaled, tt_lm_config *c)
{
    const bool neox = tt__lm_is(c, "gpt_neox");
    const char *const keys[] = {neox ? "rotary_pct" : "partial_rotary_factor", "partial_rotary_factor"};
    double share = neox ? 0.25 : 1; /* as a double, which transformers multiplies too */
    c->rotary.size = c->head_size;
    if (!neox && (!scaled || c->alibi)) return TT_OK;
    for (int k = 0; k < (at < 0 ? 1 : 2); k++) {
        const int node = tt__json_get(j, k ? at : 0, keys[k]);
        float in_range;
        if (node < 0 || j->nodes[node].kind == TT__JSON_NULL) continue;
        tt_status status = tt__json_float_at(j, keys[k], node, 0, 1.0001f, &in_range);
        if (status != TT_OK) return status;
        share = j->nodes[node].number;
    }
    c->rotary.size = (int)(c->head_size * share);
    if (c->rotary.size == 0 || (!neox && c->rotary.size != c->head_size))
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': a share of %g of the columns of a head of %d "
                        "would turn; %s", j->path, share, c->head_size,
                        neox ? "at least one must" : "only gpt_neox may have another than 1");
    return TT_OK;
}

/* The frequencies of rotary positions: rope_parameters of transformers 5, or what older versions have, which
   has the last word where both are there. */
static tt_status tt__lm_read_rotary(const tt__json *j, const tt__architecture *a, tt_lm_config *c)
{
    tt_rotary_options *r = &c->rotary;
    const char *type = "default", *name = "rope_scaling";
    float original = 0;
    int at = tt__json_get(j, 0, name);
    const bool empty = at < 0 || j->nodes[at].kind == TT__JSON_NULL ||
                       (j->nodes[at].kind == TT__JSON_OBJECT && !j->nodes[at].count);
    if (empty) at = tt__json_get(j, 0, name = "rope_parameters");
    if (at >= 0 && j->nodes[at].kind == TT__JSON_NULL) at = -1;
    if (at >= 0 && j->nodes[at].kind != TT__JSON_OBJECT)
        return tt__json_wrong(j, name, at, NULL, "an object");
    *r = tt_rotary_options_default(c->heads);
    tt_status status = tt__json_read_float(j, 0, tt__lm_is(c, "gpt_neox") ? "rotary_emb_base" : "rope_theta",
                                           1, INFINITY, &r->base);
    if (status == TT_OK && at >= 0) status = tt__json_read_float(j, at, "rope_theta", 1, INFINITY, &r->base);
    if (status == TT_OK && at >= 0) status = tt__json_read_string(j, at, "type", false, &type);
    if (status == TT_OK && at >= 0) status = tt__json_read_string(j, at, "rope_type", false, &type);
    const bool scaled = status == TT_OK && strcmp(type, "default") != 0;
    if (status == TT_OK) status = tt__lm_read_columns(j, at, scaled, c);
    if (status != TT_OK || !scaled) return status;
    static const struct { const char *type; tt_rotary_scaling scaling; const char *low, *high; } all[] = {
        {"linear", TT_ROTARY_LINEAR, NULL, NULL},
        {"llama3", TT_ROTARY_LLAMA3, "low_freq_factor", "high_freq_factor"},
        {"yarn", TT_ROTARY_YARN, "beta_slow", "beta_fast"}};
    for (int k = 0; k < TT__COUNT(all); k++) {
        if (strcmp(type, all[k].type) != 0) continue;
        original = (float)c->max_positions;
        r->scaling = all[k].scaling;
        status = tt__json_read_float(j, at, "factor", 1, INFINITY, &r->factor);
        /* transformers 5 lets that of the file itself have the last word */
        for (int own = 0; own < 2 && status == TT_OK && all[k].low; own++)
            status = tt__json_read_float(j, own ? 0 : at, "original_max_position_embeddings", 1, 1e9f,
                                         &original);
        r->original = (int)original;
        if (status == TT_OK && all[k].low)
            status = tt__json_read_float(j, at, all[k].low, 0, INFINITY, &r->low);
        if (status == TT_OK && all[k].low)
            status = tt__json_read_float(j, at, all[k].high, 0, INFINITY, &r->high);
        if (status == TT_OK && r->scaling == TT_ROTARY_YARN)
            status = tt__json_read_float(j, at, "attention_factor", 0, INFINITY, &r->magnitude);
        break;
    }
    static const char *const unknown[] = {"mscale", "mscale_all_dim", "truncate"};
    for (int k = 0; k < TT__COUNT(unknown) && status == TT_OK; k++) {
        const int node = tt__json_get(j, at, unknown[k]);
        if (node >= 0 && j->nodes[node].kind != TT__JSON_NULL && j->nodes[node].kind != TT__JSON_TRUE)
            return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': %s of %s is not supported", j->path,
                            unknown[k], a->name);
    }
    if (status == TT_OK && r->scaling == TT_ROTARY_PLAIN)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': rope_type is '%s'; there are default, linear, "
                        "llama3, yarn", j->path, type);
    return status;
}

/* What the rows of Falcon's config do not say. */
static tt_status tt__lm_read_falcon(const tt__json *j, tt_lm_config *c)
{
    bool wide = false, one = true; /* new_decoder_architecture; multi_query */
    int64_t key_heads = c->heads, norms = 0;
    tt_status status = tt__json_read_bool(j, 0, "new_decoder_architecture", &wide);
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

/* Mistral's and Qwen2's sliding window: of all layers, or from one on. */
static tt_status tt__lm_read_window(const tt__json *j, tt_lm_config *c)
{
    const bool qwen = tt__lm_is(c, "qwen2");
    bool used = !qwen;
    int64_t window = tt__json_get(j, 0, "sliding_window") < 0 ? 4096 : 0, from = qwen ? 28 : 0;
    tt_status status = tt__json_read_int(j, 0, "sliding_window", false, 1, INT32_MAX / 4, &window);
    if (status == TT_OK && qwen) status = tt__json_read_bool(j, 0, "use_sliding_window", &used);
    if (status == TT_OK && qwen)
        status = tt__json_read_int(j, 0, "max_window_layers", false, 0, INT32_MAX / 4, &from);
    if (status != TT_OK) return status;
    const int types = qwen && used && window ? tt__json_get(j, 0, "layer_types") : -1;
    if (types >= 0 && j->nodes[types].kind == TT__JSON_ARRAY) { /* it has the last word */
        from = 0;
        for (int k = 0, at = types + 1; k < j->nodes[types].count; k++, at = j->nodes[at].after) {
            const char *type = tt__json_text(j, at);
            const bool slides = type && strcmp(type, "sliding_attention") == 0;
            if (!slides && (!type || strcmp(type, "full_attention") != 0))
                return tt__json_wrong(j, "layer_types", at, type, "full_attention or sliding_attention");
            if (!slides && from < k)
                return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': layer_types: layer %d sees all tokens "
                                "after one with a window; only the first layers may", j->path, k);
            from += !slides;
        }
    }
    c->window = used && from < c->layers ? (int)window : 0;
    c->window_from = c->window ? (int)from : 0;
    return TT_OK;
}

static tt_status tt__lm_read_config(const tt__json *j, tt_lm_config *c, const tt__architecture **a)
{
    const char *kind = NULL;
    tt_status status = tt__json_read_string(j, 0, "model_type", true, &kind);
    if (status != TT_OK) return status;
    *a = tt__lm_kind(kind);
    if (!*a)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': model_type is '%s'; this loader reads gpt2, "
                        "llama, mistral, qwen2, gpt_neox and falcon", j->path, kind);
    *c = tt_lm_config_default(kind);
    if (tt__lm_is(c, "falcon")) c->key_heads = 0;
    c->intermediate_size = tt__lm_gated(c) || tt__lm_is(c, "gpt_neox") ? c->intermediate_size : 0;
    c->attention_bias = tt__lm_is(c, "gpt_neox") || tt__lm_is(c, "gpt2");
    /* names of older versions, which the rows' replace */
    if (tt__lm_is(c, "falcon")) {
        int64_t layers = c->layers, heads = c->heads;
        status = tt__json_read_int(j, 0, "n_layer", false, 1, INT32_MAX / 4, &layers);
        if (status == TT_OK) status = tt__json_read_int(j, 0, "n_head", false, 1, INT32_MAX / 4, &heads);
        c->layers = (int)layers;
        c->heads = (int)heads;
    }
    if (status == TT_OK) status = tt__config_read(j, *a, 0, c);
    if (status != TT_OK) return status;
    if (!c->intermediate_size) c->intermediate_size = 4 * c->hidden_size;
    if (!tt__lm_complete(j->ctx, c)) return j->ctx->status;
    if (tt__lm_is(c, "falcon")) status = tt__lm_read_falcon(j, c);
    if (tt__lm_is(c, "qwen2")) c->attention_bias = false; /* always of q, k and v, never of the output */
    if (status == TT_OK && (tt__lm_is(c, "mistral") || tt__lm_is(c, "qwen2")))
        status = tt__lm_read_window(j, c);
    static const struct { const char *key; bool only; } refused[] = {
        {"scale_attn_weights", true}, {"scale_attn_by_inverse_layer_idx", false},
        {"add_cross_attention", false}, {"is_encoder_decoder", false}};
    for (int k = 0; k < TT__COUNT(refused) && status == TT_OK; k++)
        status = tt__lm_refuse(j, refused[k].key, refused[k].only);
    if (status == TT_OK && !tt__lm_is(c, "gpt2")) status = tt__lm_read_rotary(j, *a, c);
    return status;
}

static void tt__lm_check(tt__text *all, const void *config)
{
    const tt_lm_config *c = (const tt_lm_config *)config;
    const bool fused = tt__lm_is(c, "gpt2") || tt__lm_is(c, "gpt_neox");
    if (c->key_heads < 1) tt__print(all, "; key_heads is %d", c->key_heads);
    else if (c->heads % c->key_heads)
        tt__print(all, "; %d heads are not a multiple of %d key heads", c->heads, c->key_heads);
    if (fused && c->key_heads != c->heads) tt__print(all, "; %s has as many key heads as heads", c->kind);
    if (c->head_size < 1)
        tt__print(all, "; hidden_size %d is not a multiple of %d heads", c->hidden_size, c->heads);
    else if (!tt__lm_gated(c) && (int64_t)c->head_size * c->heads != c->hidden_size)
        tt__print(all, "; %d heads of %d are not hidden_size %d", c->heads, c->head_size, c->hidden_size);
    if (c->head_size > 1 << 16)
        tt__print(all, "; head_size %d, at most %d are supported", c->head_size, 1 << 16);
    const bool turns = !tt__lm_is(c, "gpt2") && !c->alibi, odd = c->rotary.size % 2 != 0;
    if (turns && odd && c->rotary.scaling == TT_ROTARY_YARN) /* transformers computes nothing there either */
        tt__print(all, "; rotary positions of %d columns, which must be even with yarn", c->rotary.size);
    else if (turns && (c->rotary.size < 0 || c->rotary.size + odd > c->head_size))
        tt__print(all, "; rotary positions of %d columns of a head of %d", c->rotary.size, c->head_size);
    else if (turns && !tt__lm_is(c, "gpt_neox") && c->rotary.size && c->rotary.size != c->head_size)
        tt__print(all, "; rotary.size is %d, and all %d columns of a head of %s turn", c->rotary.size,
                  c->head_size, c->kind);
    if (c->window < 0) tt__print(all, "; window is %d", c->window);
    if (c->window_from < 0 || (c->window_from && !tt__lm_is(c, "qwen2")))
        tt__print(all, "; window_from is %d", c->window_from);
    if (c->two_norms && !c->parallel) tt__print(all, "; two_norms without parallel");
    if (tt__lm_is(c, "falcon") && !c->parallel && c->key_heads != 1 && c->key_heads != c->heads)
        tt__print(all, "; falcon with %d key heads is parallel", c->key_heads);
}

/* The share of a head's columns that turn, so that its product with head_size, as a double, is not below
   size: 58 / 200 is 0.29, of which 200 are 57.99999999999999. */
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

/* Does the model have the windows, rotary positions and heads that it had when it was read? */
static bool tt__lm_has_shape(const tt_lm_config *c, const tt_lm_config *read)
{
    return strcmp(c->kind, read->kind) == 0 && c->layers == read->layers && c->heads == read->heads &&
           c->key_heads == read->key_heads && c->head_size == read->head_size && c->window == read->window &&
           c->window_from == read->window_from && c->parallel == read->parallel &&
           c->two_norms == read->two_norms && c->alibi == read->alibi &&
           memcmp(&c->rotary, &read->rotary, sizeof c->rotary) == 0;
}

/* Is there a member of that name among lines of config.json? */
static bool tt__lm_said(const char *lines, const char *key)
{
    char begins[64];
    const int n = snprintf(begins, sizeof begins, "  \"%s\":", key);
    for (const char *line = lines; line && *line; line = strchr(line, '\n'), line += line != NULL)
        if (strncmp(line, begins, (size_t)n) == 0) return true;
    return false;
}

/* The members that tell rotary positions, but those that `said` has. transformers 5 reads rope_parameters,
   older versions the others, for which a base is 10,000 where they find none. */
static void tt__lm_print_rotary(tt__text *json, const tt_lm_config *c, const char *said)
{
    static const char *const types[] = {"default", "linear", "llama3", "yarn"};
    const tt_rotary_options *r = &c->rotary;
    char a[32], b[32], share[32];
    if (tt__lm_is(c, "gpt2") || c->alibi) return;
    tt__lm_share(c, share);
    if (tt__lm_is(c, "gpt_neox") && !tt__lm_said(said, "rotary_emb_base"))
        tt__print(json, "  \"rotary_emb_base\": %s,\n", tt__json_float(r->base, a));
    if (tt__lm_is(c, "gpt_neox") && !tt__lm_said(said, "rotary_pct"))
        tt__print(json, "  \"rotary_pct\": %s,\n", share);
    if (!tt__lm_said(said, "rope_theta"))
        tt__print(json, "  \"rope_theta\": %s,\n", tt__json_float(r->base, a));
    for (int k = 0; k < 2; k++) {
        const char *key = k ? "rope_parameters" : "rope_scaling";
        if ((k == 0 && r->scaling == TT_ROTARY_PLAIN) || tt__lm_said(said, key)) continue;
        tt__print(json, "  \"%s\": {\"rope_type\": \"%s\", \"rope_theta\": %s, \"partial_rotary_factor\": %s",
                  key, types[r->scaling], tt__json_float(r->base, a), share);
        if (r->scaling != TT_ROTARY_PLAIN)
            tt__print(json, ", \"factor\": %s", tt__json_float(r->factor, a));
        if (r->scaling == TT_ROTARY_LLAMA3 || r->scaling == TT_ROTARY_YARN) {
            const bool llama = r->scaling == TT_ROTARY_LLAMA3, usual = r->low == 0 && r->high == 0;
            tt__print(json, ", \"original_max_position_embeddings\": %d, \"%s\": %s, \"%s\": %s", r->original,
                      llama ? "low_freq_factor" : "beta_slow", tt__json_float(usual ? 1 : r->low, a),
                      llama ? "high_freq_factor" : "beta_fast",
                      tt__json_float(usual ? (llama ? 4 : 32) : r->high, b));
        }
        if (r->scaling == TT_ROTARY_YARN && r->magnitude > 0)
            tt__print(json, ", \"attention_factor\": %s", tt__json_float(r->magnitude, a));
        tt__print(json, "},\n");
    }
}

/* The members of config.json that are no rows of the config. */
static void tt__lm_print(tt__text *json, const void *self, const void *config)
{
    const tt_lm_config *c = (const tt_lm_config *)config;
    const tt_lm *m = (const tt_lm *)self;
    if (m->kept) {
        tt__print(json, "%s", m->kept);
    } else { /* a new model's, as transformers has defaults of its own for each kind */
        char end[16] = "null";
        if (c->end_token >= 0) snprintf(end, sizeof end, "%d", c->end_token);
        tt__print(json, "  \"bos_token_id\": null,\n  \"eos_token_id\": %s,\n  \"pad_token_id\": null,\n",
                  end);
    }
    if (m->read_shape && tt__lm_has_shape(c, &m->read)) {
        tt__print(json, "%s", m->read_shape);
        tt__lm_print_rotary(json, c, m->read_shape);
        return;
    }
    if (tt__lm_is(c, "falcon")) {
        const bool wide = c->two_norms || (c->key_heads != 1 && c->key_heads != c->heads);
        tt__print(json, "  \"alibi\": %s,\n  \"new_decoder_architecture\": %s,\n"
                  "  \"multi_query\": %s,\n  \"num_kv_heads\": %d,\n  \"num_ln_in_parallel_attn\": %s,\n",
                  c->alibi ? "true" : "false", wide ? "true" : "false",
                  c->key_heads == 1 ? "true" : "false", c->key_heads,
                  !wide ? "null" : c->two_norms ? "2" : "1");
    }
    if (tt__lm_is(c, "qwen2"))
        tt__print(json, "  \"use_sliding_window\": %s,\n  \"max_window_layers\": %d,\n",
                  c->window ? "true" : "false", c->window ? c->window_from : c->layers);
    if (c->window) tt__print(json, "  \"sliding_window\": %d,\n", c->window);
    else if (tt__lm_gated(c)) tt__print(json, "  \"sliding_window\": null,\n");
    tt__lm_print_rotary(json, c, "");
}
