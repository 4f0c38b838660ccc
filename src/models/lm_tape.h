#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/elementwise/rules.h"
#include "classifier.h"
#include "lm_layout.h"
#include "adapters.h"

/* -------------------------------------------------------------------------------- a language model's tape */

/* Declares the inputs of texts: tt_lm_inputs without targets. */
static tt_inputs tt__lm_text_inputs(tt_tape *t, const tt_train_options *o)
{
    tt_inputs in;
    memset(&in, 0, sizeof in);
    int64_t rows = tt_axis(t, "tokens", o->max_tokens), seqs = tt_axis(t, "sequences", o->max_seqs);
    in.positions = tt_input(t, "positions", TT_I32, rows, 1);
    in.ids = tt_input(t, "ids", TT_I32, rows, 1);
    in.seq_start = tt_seq_start(t, "seq_start", seqs);
    return in;
}

tt_inputs tt_lm_inputs(tt_tape *t, const tt_train_options *o)
{
    tt_inputs in = tt__lm_text_inputs(t, o);
    in.targets = tt_input(t, "targets", TT_I32, tt_axis(t, "tokens", o->max_tokens), 1);
    return in;
}

/* The caches of a program that generates. Caches hold the keys and values of `rows` tokens, in slots of equal
   length, one slot for each sequence. `at`, i32 (tokens, 1), gives the cache row of each token of a run.
   `start`, i32 (slots + 1, 1), gives the first row of each slot. A token attends to the rows of its slot up
   to its own row, so unwritten rows and rows of an earlier sequence have no effect. */
typedef struct tt__lm_cache { tt_value at, start; int64_t rows; } tt__lm_cache;

/* Records a LayerNorm, or an RMSNorm if there is no bias. */
static tt_value tt__lm_norm(const tt_lm *m, tt_tape *t, tt_value x, tt_param *w, tt_param *b)
{
    const tt_lm_config *c = &m->config;
    const float offset = tt__lm_flags(c) & TT__LM_GEMMA ? 1.0f : 0.0f;
    return b ? tt_layernorm(t, x, w, b, c->norm_eps) : tt_rmsnorm_offset(t, x, w, offset, c->norm_eps);
}

/* Records the attention of layer k. h: the normalised input, (rows, hidden). The result has the shape
   (rows, heads * head_size). */
static tt_value tt__lm_attend(const tt_lm *m, tt_tape *t, const tt_inputs *in, const tt__lm_cache *cache,
                              int k, tt_value h)
{
    const tt_lm_config *c = &m->config;
    const tt_lm_layer *l = &m->layer[k];
    const int64_t queries = (int64_t)c->heads * c->head_size, keys = (int64_t)c->key_heads * c->head_size;
    tt_value q, key, v;
    if (l->qkv_w) {
        tt_value all = tt__lm_linear(m, t, h, l->qkv_w, l->qkv_b);
        q = tt_slice(t, all, 0, queries);
        key = tt_slice(t, all, queries, keys);
        v = tt_slice(t, all, queries + keys, keys);
    } else {
        q = tt__lm_linear(m, t, h, l->q_w, l->q_b);
        key = tt__lm_linear(m, t, h, l->k_w, l->k_b);
        v = tt__lm_linear(m, t, h, l->v_w, l->v_b);
    }
    const bool windowed = tt__lm_has_window(c, k);
    if (l->q_norm_w) q = tt__lm_norm(m, t, q, l->q_norm_w, NULL);
    if (l->k_norm_w) key = tt__lm_norm(m, t, key, l->k_norm_w, NULL);
    if (!m->position && !c->alibi) {
        tt_rotary_options r = c->rotary;
        if (windowed && c->window_base > 0) {
            r.base = c->window_base;
            r.scaling = TT_ROTARY_PLAIN;
        }
        r.heads = c->heads;
        q = tt_rotary(t, q, in->positions, &r);
        r.heads = c->key_heads;
        key = tt_rotary(t, key, in->positions, &r);
    }
    tt_attention_options o = tt_attention_options_default(c->heads);
    o.causal = true;
    o.dropout = c->attention_dropout;
    o.window = windowed ? c->window : 0;
    if (c->query_scalar) o.scale = 1 / sqrtf((float)c->query_scalar);
    if (c->alibi) o.alibi = 1 / sqrtf((float)c->head_size);
    o.alibi_rounded = c->alibi;
    if (!cache) {
        if (m->position) o.max_length = c->max_positions;
        return tt_attention(t, q, key, v, in->seq_start, &o);
    }
    char name[40];
    snprintf(name, sizeof name, "keys.%d", k);
    key = tt_store_rows(t, tt_cache(t, name, cache->rows, keys), key, cache->at);
    snprintf(name, sizeof name, "values.%d", k);
    v = tt_store_rows(t, tt_cache(t, name, cache->rows, keys), v, cache->at);
    return tt_attention_rows(t, q, key, v, cache->start, cache->at, &o);
}

static tt_value tt__lm_hidden_states(const tt_lm *m, tt_tape *t, const tt_inputs *in,
                                     const tt__lm_cache *cache)
{
    const tt_lm_config *c = &m->config;
    tt_value (*const act)(tt_tape *, tt_value) = tt__activation_of(t, c->activation);
    tt_value x = tt_embedding(t, in->ids, m->word);
    if (tt__lm_flags(c) & TT__LM_GEMMA) x = tt__scale_as_weights(t, x, sqrtf((float)c->hidden_size));
    if (m->position) x = tt_add(t, x, tt_embedding(t, in->positions, m->position));
    x = tt_dropout(t, x, c->embedding_dropout);
    tt_name(t, x, "embeddings");
    for (int k = 0; k < c->layers; k++) {
        const tt_lm_layer *l = &m->layer[k];
        tt_value h = tt__lm_norm(m, t, x, l->attention_norm_w, l->attention_norm_b);
        tt_value o = tt__lm_attend(m, t, in, cache, k, h);
        tt_name(t, o, "layer.%d.attention", k);
        o = tt__lm_linear(m, t, o, l->attention_w, l->attention_b);
        if (l->attention_out_norm_w) o = tt__lm_norm(m, t, o, l->attention_out_norm_w, NULL);
        o = tt_dropout(t, o, c->dropout);
        tt_value sum = tt_add(t, o, x);
        if (l->mlp_norm_w) h = tt__lm_norm(m, t, c->parallel ? x : sum, l->mlp_norm_w, l->mlp_norm_b);
        tt_value up = tt__lm_linear(m, t, h, l->up_w, l->up_b); /* (rows, intermediate) */
        if (l->gate_w) {
            tt_value gate = tt__lm_linear(m, t, h, l->gate_w, l->gate_b);
            h = act == tt_silu ? tt_swiglu(t, gate, up) : tt_mul(t, act(t, gate), up);
        } else {
            h = act(t, up);
        }
        tt_name(t, h, "layer.%d.intermediate", k);
        h = tt__lm_linear(m, t, h, l->down_w, l->down_b);
        if (l->mlp_out_norm_w) h = tt__lm_norm(m, t, h, l->mlp_out_norm_w, NULL);
        x = tt_add(t, tt_dropout(t, h, c->dropout), sum);
        tt_block_end(t, x);
        tt_name(t, x, "layer.%d", k);
    }
    return tt__lm_norm(m, t, x, m->norm_w, m->norm_b);
}

tt_value tt_lm_hidden(const tt_lm *m, tt_tape *t, const tt_inputs *in)
{
    return tt__lm_hidden_states(m, t, in, NULL);
}

/* Records the logits, (rows, vocab), from the output of the last layer, hidden (rows, hidden). */
static tt_value tt__lm_head(const tt_lm *m, tt_tape *t, tt_value hidden)
{
    tt_value logits = tt_linear(t, hidden, m->head ? m->head : m->word, NULL);
    tt_name(t, logits, "logits");
    return logits;
}

tt_value tt_lm_logits(const tt_lm *m, tt_tape *t, const tt_inputs *in)
{
    tt_value h = tt_lm_hidden(m, t, in);
    if (!m->score) return tt__lm_head(m, t, h);
    h = tt_linear(t, tt_gather_rows(t, h, in->last), m->score, NULL); /* (seqs, classes) */
    tt_name(t, h, "logits");
    return h;
}

static tt_value tt__lm_record(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    const tt_lm *m = (const tt_lm *)self;
    tt_cross_entropy_options c = tt_cross_entropy_options_default();
    tt_inputs in = m->score ? tt_text_inputs(t, o) : tt_lm_inputs(t, o);
    if (m->score) {
        in.last = tt_input(t, "last", TT_I32, tt_axis(t, "sequences", o->max_seqs), 1);
        *output = tt_lm_logits(m, t, &in);
        return tt__task_loss(t, m->config.task, *output, &in, o);
    }
    c.label_smoothing = o->label_smoothing;
    *output = tt_lm_logits(m, t, &in);
    tt_value loss = tt_cross_entropy(t, *output, in.targets, &c);
    tt_name(t, loss, "loss");
    return loss;
}

tt_model tt_lm_model(const tt_lm *m)
{
    const tt_lm_config *c = &m->config;
    tt_model model = {m, tt__lm_record, {tt_perplexity()}, c->classes, "tokens", c->max_positions, false,
                      c->task};
    if (c->classes) tt__task_metrics(c->task, m->class_names, c->classes, model.metrics);
    return model;
}
