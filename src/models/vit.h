#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../context/params.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../files/safetensors.h"
#include "../text/folders.h"
#include "../data/resize.h"
#include "../data/dataset.h"
#include "layout.h"
#include "load.h"
#include "config.h"
#include "model.h"
#include "checkpoint.h"
#include "classifier.h"

/* ---------------------------------------------------------------------------------------------------- ViT */

#define TT__MAX_PATCH 16384 /* max side of a patch in pixels; products of sizes then do not overflow */

tt_vit_config tt_vit_config_default(const char *size)
{
    static const struct { const char *name; int hidden, layers, heads; } sizes[] = {
        {"Ti", 192, 12, 3}, {"S", 384, 12, 6}, {"B", 768, 12, 12}, {"L", 1024, 24, 16}, {"H", 1280, 32, 16}};
    tt_vit_config c;
    memset(&c, 0, sizeof c);
    c.image_size = 224;
    c.channels = 3;
    c.classes = 1000;
    c.activation = "gelu";
    c.layer_norm_eps = 1e-12f;
    c.initializer_range = 0.02f;
    c.qkv_bias = true;
    for (int k = 0; k < 4; k++) c.mean[k] = c.std[k] = 0.5f;
    c.resample = TT_BILINEAR;
    char letters[3];
    int patch = 0, end = 0;
    bool named = size && sscanf(size, "%2[^/]/%5d%n", letters, &patch, &end) == 2 && !size[end];
    for (int k = 0; k < TT__COUNT(sizes) && named && patch >= 1 && patch <= TT__MAX_PATCH; k++) {
        if (strcmp(sizes[k].name, letters) != 0) continue;
        c.hidden_size = sizes[k].hidden;
        c.layers = sizes[k].layers;
        c.heads = sizes[k].heads;
        c.intermediate_size = 4 * c.hidden_size;
        c.patch_size = patch;
    }
    return c;
}

static int tt__vit_tokens(const tt_vit_config *c)
{
    const int grid = c->image_size / c->patch_size;
    return grid * grid + 1;
}

/* Sets the sizes that the letters in the tables' shapes stand for: H hidden, I intermediate, D channels, P
   patch, N tokens, C classes; A columns of all heads; B: size of the biases of queries, keys and values (A or
   0). */
static void tt__vit_sizes(const void *config, tt__sizes size)
{
    const tt_vit_config *c = (const tt_vit_config *)config;
    size['N' - 'A'] = tt__vit_tokens(c);
    size['A' - 'A'] = (int64_t)c->heads * tt__head_size(c->hidden_size, c->heads, c->head_size);
    size['B' - 'A'] = c->qkv_bias ? size['A' - 'A'] : 0;
}

static void tt__vit_check(tt__text_buffer *all, const void *config)
{
    const tt_vit_config *c = (const tt_vit_config *)config;
    tt__check_heads(all, c->hidden_size, c->heads, c->head_size);
    if (c->patch_size > 0 && c->image_size % c->patch_size)
        tt__print(all, "; image_size is %d, but must be a multiple of patch_size, %d", c->image_size,
                  c->patch_size);
    if (c->image_size > 16384) tt__print(all, "; image_size is %d, but must be at most 16384", c->image_size);
    if (c->channels > 4) tt__print(all, "; channels is %d, but must be at most 4", c->channels);
    for (int k = 0; k < c->channels && k < 4; k++)
        if (!isfinite(c->mean[k]) || !(c->std[k] >= FLT_MIN) || !isfinite(c->std[k]))
            tt__print(all,
                      "; mean is %g and std is %g for channel %d, but both must be finite and std above 0",
                      c->mean[k], c->std[k], k);
    if (c->resize < -1 || c->resize > TT__IMAGE_SIDE || (c->resize_shortest && c->resize < 1))
        tt__print(all, "; resize is %d%s, but must be %d to %d", c->resize,
                  c->resize_shortest ? " with resize_shortest" : "", c->resize_shortest ? 1 : -1,
                  TT__IMAGE_SIDE);
    if ((int)c->resample < TT_NEAREST || c->resample > TT_BICUBIC)
        tt__print(all, "; resample is %d, but must be one of tt_resample", (int)c->resample);
}

/* Computes the weights of four neighbouring pixels for a point that lies x in [0, 1) pixels after the second
   pixel (Keys 1981, with a = -3/4). */
static void tt__cubic_weights(float x, float w[4])
{
    const float a = -0.75f;
    for (int k = 0; k < 4; k++) {
        float d = fabsf((float)(k - 1) - x);
        w[k] = d <= 1 ? ((a + 2) * d - (a + 3)) * d * d + 1 : ((a * d - 5 * a) * d + 8 * a) * d - 4 * a;
    }
}

/* Interpolates position embeddings, from a square grid with `from` patches on a side to a square grid with
   `to` patches on a side. The method is that of transformers: bicubic, with pixel centres aligned and
   edges repeated. Copies the class token's embedding. Shapes: `old` (1 + from^2, n), `now` (1 + to^2, n). */
static void tt__interpolate_positions(const float *old, int from, float *now, int to, int64_t n)
{
    memcpy(now, old, sizeof *now * (size_t)n);
    for (int at = 0; at < to * to; at++) {
        const int y = at / to, x = at % to;
        float sy = ((float)y + 0.5f) * (float)from / (float)to - 0.5f, wy[4];
        float sx = ((float)x + 0.5f) * (float)from / (float)to - 0.5f, wx[4];
        float *sum = now + (1 + (int64_t)at) * n;
        tt__cubic_weights(sy - floorf(sy), wy);
        tt__cubic_weights(sx - floorf(sx), wx);
        memset(sum, 0, sizeof *sum * (size_t)n);
        for (int k = 0; k < 16; k++) {
            int64_t row = tt__max(0, tt__min(from - 1, (int)floorf(sy) + k / 4 - 1));
            int64_t column = tt__max(0, tt__min(from - 1, (int)floorf(sx) + k % 4 - 1));
            const float *p = old + (1 + row * from + column) * n, w = wy[k / 4] * wx[k % 4];
            for (int64_t c = 0; c < n; c++) sum[c] += w * p[c];
        }
    }
}

static int tt__square_root(int64_t n) /* returns 0 if n is not a square */
{
    int64_t root = n > 0 && n <= INT32_MAX ? (int64_t)(sqrt((double)n) + 0.5) : 0;
    return root * root == n ? (int)root : 0;
}

/* Interpolates the position embeddings of a checkpoint whose images have another size than the model's. */
static tt_status tt__vit_adapt(const tt__tensor_row *row, tt_param *p, tt_safetensors *s, int index,
                               bool *done)
{
    const tt_tensor_info *info = tt_safetensors_info(s, index);
    const bool fits = info->ndim == 3 && info->dims[0] == 1 && info->dims[2] == p->dims[1];
    if (strcmp(row->shape, "1NH") != 0 || !fits || info->dims[1] == p->dims[0]) return TT_OK;
    int from = tt__square_root(info->dims[1] - 1), to = tt__square_root(p->dims[0] - 1);
    int64_t n = info->dims[1] * info->dims[2];
    if (!from) return TT_OK;
    float *old = (float *)tt__alloc(p->ctx, sizeof *old * (size_t)n);
    float *now = (float *)tt__alloc(p->ctx, sizeof *now * (size_t)p->size);
    tt_status status = old && now ? tt_safetensors_read_f32(s, index, 0, n, old) : TT_ERR_MEMORY;
    if (status == TT_OK) {
        tt__interpolate_positions(old, from, now, to, p->dims[1]);
        tt__param_drop_source(p);
        p->read = tt__read_copy;
        p->release = tt__free;
        p->source = now;
        *done = true;
        tt__log(p->ctx, TT_LOG_INFO, "checkpoint", "'%s': positions of %d x %d patches are interpolated to "
                "%d x %d", s->path, from, from, to, to);
    }
    if (!*done) tt__free(p->ctx, now);
    tt__free(p->ctx, old);
    return status;
}

static const tt__tensor_row tt__vit_tensors[] = {
#define T(field, a, b, shape) TT__TENSOR(tt_vit, field, a, b, shape, 'n', false)
#define W(...) TT__WEIGHT_BIAS(tt_vit, __VA_ARGS__)
    T(token, ".embeddings.cls_token", "class_token", "11H"),
    T(position, ".embeddings.position_embeddings", "encoder.pos_embedding", "1NH"),
    W(patch, ".embeddings.patch_embeddings.projection", "conv_proj", "HDPP", "H", 'n', false),
    W(norm, ".layernorm", "encoder.ln", "H", "H", '1', false),
    W(classifier, "classifier", "heads.head", "CH", "C", 'n', true),
#undef T
#undef W
};
static const tt__tensor_row tt__vit_layer_tensors[] = { /* parts of a packed tensor are consecutive */
#define W(...) TT__WEIGHT_BIAS(tt_vit_layer, __VA_ARGS__, false)
#define P(field, name, packed, shape, init, part) \
    {offsetof(tt_vit_layer, field), {"attention.attention." name, "self_attention.in_proj_" packed}, shape, \
     init, part, false}
    W(before, "layernorm_before", "ln_1", "H", "H", '1'),
    P(q_w, "query.weight", "weight", "AH", 'n', 1),
    P(k_w, "key.weight", "weight", "AH", 'n', 2),
    P(v_w, "value.weight", "weight", "AH", 'n', 3),
    P(q_b, "query.bias", "bias", "B", '0', 1),
    P(k_b, "key.bias", "bias", "B", '0', 2),
    P(v_b, "value.bias", "bias", "B", '0', 3),
    W(attention, "attention.output.dense", "self_attention.out_proj", "HA", "H", 'n'),
    W(after, "layernorm_after", "ln_2", "H", "H", '1'),
    W(up, "intermediate.dense", "mlp.0", "IH", "I", 'n'),
    W(down, "output.dense", "mlp.3", "HI", "H", 'n'),
#undef W
#undef P
};
static const tt__config_row tt__vit_rows[] = {
#define C(field, kind, letter, key) TT__CONFIG(tt_vit, field, kind, letter, key, NULL)
    C(image_size, 'n', 0, "image_size"),
    C(patch_size, 'n', 'P', "patch_size"),
    C(channels, 'n', 'D', "num_channels"),
    C(hidden_size, 'N', 'H', "hidden_size"),
    C(layers, 'N', 0, "num_hidden_layers"),
    C(heads, 'N', 0, "num_attention_heads"),
    C(intermediate_size, 'N', 'I', "intermediate_size"),
    C(layer_norm_eps, 'f', 0, "layer_norm_eps"),
    C(initializer_range, 'f', 0, "initializer_range"),
    C(dropout, 'p', 0, "hidden_dropout_prob"),
    C(attention_dropout, 'p', 0, "attention_probs_dropout_prob"),
    C(qkv_bias, 'b', 0, "qkv_bias"),
#undef C
};

/* Prints the size of a head, which transformers reads from version 5 on, if heads were removed. */
static void tt__vit_print(tt__text_buffer *json, const void *self, const void *config)
{
    const tt_vit_config *c = (const tt_vit_config *)config;
    (void)self;
    if (c->head_size && c->head_size * c->heads != c->hidden_size)
        tt__print(json, "  \"head_dim\": %d,\n", c->head_size);
}

/* The architecture of ViT. Naming 1 of the tensors is torchvision's; config.json always has transformers'
   naming. */
static const tt__architecture tt__vit_architecture = {
    "ViT", 0, "ViTForImageClassification", "vit", "hidden_act", "", {"vit.", ""},
    {"encoder.layer.%d.", "encoder.layers.encoder_layer_%d."}, tt__vit_tensors, tt__vit_layer_tensors,
    tt__vit_rows, TT__COUNT(tt__vit_tensors), TT__COUNT(tt__vit_layer_tensors), TT__COUNT(tt__vit_rows),
    TT__STRUCTS(tt_vit), tt__vit_sizes, tt__vit_check, tt__vit_adapt,
    offsetof(tt_vit_config, image_size), tt__vit_print, NULL, NULL, NULL};

tt_status tt_vit_new(tt_context *ctx, tt_vit *m, const tt_vit_config *config)
{
    return tt__model_new(ctx, &tt__vit_architecture, m, config);
}

void tt_vit_free(tt_vit *m) { tt__model_free(&tt__vit_architecture, m); }

tt_status tt_vit_name_classes(tt_vit *m, tt_dataset *d)
{
    return tt__name_classes(m->ctx, TT_TASK_CLASS, m->class_names, m->config.classes, !m->new_head, d);
}

tt_value tt_vit_encode(const tt_vit *m, tt_tape *t, const tt_inputs *in)
{
    const tt_vit_config *c = &m->config;
    const int side = c->image_size;
    tt_attention_options attention = tt_attention_options_default(c->heads);
    tt_patch_options patches = tt_patch_options_default(side, side, c->channels, c->patch_size);
    attention.dropout = c->attention_dropout;
    attention.max_length = tt__vit_tokens(c);
    memcpy(patches.mean, c->mean, sizeof patches.mean);
    memcpy(patches.std, c->std, sizeof patches.std);
    tt_value x = tt_patches(t, in->pixels, in->positions, in->seq_start, &patches);
    tt_name(t, x, "patches"); /* (rows, channels * patch * patch) */
    x = tt_set_rows(t, tt_linear(t, x, m->patch_w, m->patch_b), in->first, m->token); /* (rows, hidden) */
    x = tt_dropout(t, tt_add(t, x, tt_embedding(t, in->positions, m->position)), c->dropout);
    tt_name(t, x, "embeddings");
    for (int k = 0; k < c->layers; k++) {
        const tt_vit_layer *l = &m->layer[k];
        tt_value h = tt_layernorm(t, x, l->before_w, l->before_b, c->layer_norm_eps);
        tt_name(t, h, "layer.%d.norm_before", k);
        tt_value q = tt_linear(t, h, l->q_w, l->q_b), key = tt_linear(t, h, l->k_w, l->k_b);
        tt_value v = tt_linear(t, h, l->v_w, l->v_b);
        tt_name(t, q, "layer.%d.query", k);
        tt_name(t, key, "layer.%d.key", k);
        tt_name(t, v, "layer.%d.value", k);
        h = tt_attention(t, q, key, v, in->seq_start, &attention);
        tt_name(t, h, "layer.%d.attention", k);
        x = tt_add(t, tt_dropout(t, tt_linear(t, h, l->attention_w, l->attention_b), c->dropout), x);
        tt_name(t, x, "layer.%d.attention_residual", k);
        h = tt_layernorm(t, x, l->after_w, l->after_b, c->layer_norm_eps);
        tt_name(t, h, "layer.%d.norm_after", k);
        h = tt_linear(t, h, l->up_w, l->up_b); /* (rows, intermediate) */
        tt_name(t, h, "layer.%d.intermediate", k);
        h = tt__activation_of(t, c->activation)(t, h);
        tt_name(t, h, "layer.%d.activation", k);
        x = tt_add(t, tt_dropout(t, tt_linear(t, h, l->down_w, l->down_b), c->dropout), x);
        tt_name(t, x, "layer.%d", k);
        tt_block_end(t, x);
    }
    x = tt_layernorm(t, x, m->norm_w, m->norm_b, c->layer_norm_eps);
    tt_name(t, x, "norm");
    return x;
}

tt_value tt_vit_logits(const tt_vit *m, tt_tape *t, const tt_inputs *in)
{
    tt_value token = tt_gather_rows(t, tt_vit_encode(m, t, in), in->first); /* (seqs, hidden) */
    tt_value logits = tt_linear(t, token, m->classifier_w, m->classifier_b);
    tt_name(t, logits, "logits");
    return logits;
}

static tt_value tt__vit_record(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    const tt_vit *m = (const tt_vit *)self;
    const tt_vit_config *c = &m->config;
    const int64_t bytes = (int64_t)c->image_size * c->image_size * c->channels;
    tt_inputs in = tt_image_inputs(t, o, tt__vit_tokens(c), bytes);
    *output = tt_vit_logits(m, t, &in);
    return tt__classify(t, *output, in.labels, o);
}

tt_image_options tt_vit_image_options(const tt_vit *m)
{
    const tt_vit_config *c = &m->config;
    tt_image_options o = tt_image_options_default(c->image_size, c->image_size);
    o.channels = c->channels;
    o.resample = c->resample;
    if (c->resize) o.pad = c->image_size; /* images of any size are then large enough for the crop */
    if (c->resize_shortest) o.resize_shortest = c->resize;
    else if (c->resize >= 0) o.resize_height = o.resize_width = c->resize ? c->resize : c->image_size;
    return o;
}

tt_model tt_vit_classifier(const tt_vit *m)
{
    const tt_vit_config *c = &m->config;
    tt_model model = {m, tt__vit_record, {tt_accuracy(), tt_f1_macro()}, c->classes, "images",
                      tt__vit_tokens(c), true, TT_TASK_CLASS};
    return model;
}

static tt_status tt__vit_read_config(const tt__json *j, tt_vit_config *c)
{
    const char *type = NULL;
    tt_status status = tt__json_read_string(j, 0, "model_type", true, &type);
    if (status != TT_OK) return status;
    if (strcmp(type, "vit") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': model_type is '%s'; this loader reads 'vit'",
                        j->path, type);
    *c = tt_vit_config_default("B/16");
    int64_t head = 0;
    c->classes = 2; /* transformers' default */
    status = tt__config_read(j, &tt__vit_architecture, c);
    if (status == TT_OK) status = tt__json_read_int(j, 0, "head_dim", false, 1, c->hidden_size, &head);
    c->head_size = (int)head;
    return status;
}

/* Returns dimension k of tensor `name`, or 0 if the tensor or the dimension does not exist. */
static int tt__tensor_size(const tt__checkpoint *s, const char *name, int k)
{
    const tt_tensor_info *info = NULL;
    for (int f = 0; f < s->files && !info; f++)
        info = tt_safetensors_info(s->file[f], tt__find_tensor(s->file[f], name, "vit."));
    return info && k < info->ndim && info->dims[k] <= INT32_MAX / 4 ? (int)info->dims[k] : 0;
}

/* Infers a config from the shapes of a checkpoint's tensors, if config.json is missing. */
static tt_status tt__vit_infer_config(const tt__checkpoint *s, tt_vit_config *config)
{
    const int naming = s->naming;
    static const char *const position[] = {"vit.embeddings.position_embeddings", "encoder.pos_embedding"};
    static const char *const patch[] = {"vit.embeddings.patch_embeddings.projection.weight",
                                        "conv_proj.weight"};
    static const char *const up[] = {"vit.encoder.layer.%d.intermediate.dense.weight",
                                     "encoder.layers.encoder_layer_%d.mlp.0.weight"};
    static const char *const head[] = {"classifier.weight", "heads.head.weight"};
    char name[128];
    *config = tt_vit_config_default("B/16");
    config->hidden_size = tt__tensor_size(s, position[naming], 2);
    config->patch_size = tt__tensor_size(s, patch[naming], 2);
    config->channels = tt__tensor_size(s, patch[naming], 1);
    if (config->patch_size > TT__MAX_PATCH)
        return tt__fail(s->file[0]->ctx, TT_ERR_FORMAT,
                        "'%s': patches have a side of %d pixels, but must have at most %d", s->file[0]->path,
                        config->patch_size, TT__MAX_PATCH);
    config->image_size = tt__square_root(tt__tensor_size(s, position[naming], 1) - 1) * config->patch_size;
    int head_size = config->hidden_size == 1280 ? 80 : 64; /* 80 in ViT-H, 64 in ViT-Ti, -S, -B and -L */
    config->heads = config->hidden_size / head_size;
    if (naming == 1) { /* torchvision's models were trained with these values */
        static const float mean[] = {0.485f, 0.456f, 0.406f}, std[] = {0.229f, 0.224f, 0.225f};
        memcpy(config->mean, mean, sizeof mean);
        memcpy(config->std, std, sizeof std);
        config->layer_norm_eps = 1e-6f;
    }
    for (config->layers = 0; config->layers < 1000; config->layers++) {
        snprintf(name, sizeof name, up[naming], config->layers);
        int size = tt__tensor_size(s, name, 0);
        if (!size) break;
        config->intermediate_size = size;
    }
    int classes = tt__tensor_size(s, head[naming], 0);
    if (classes) config->classes = classes;
    if (config->hidden_size % head_size)
        return tt__fail(s->file[0]->ctx, TT_ERR_FORMAT, "'%s': the number of heads cannot be derived from "
                        "the width %d: put a config.json beside the file", s->file[0]->path,
                        config->hidden_size);
    if (config->hidden_size && config->patch_size && config->image_size && config->layers) return TT_OK;
    return tt__fail(s->file[0]->ctx, TT_ERR_FORMAT,
                    "'%s' is not a ViT: '%s', '%s' or the first layer is missing or has another shape",
                    s->file[0]->path, position[naming], patch[naming]);
}

/* Reads a size from preprocessor_config.json: a number, an object with equal "height" and "width" or, if
   `shortest` is not NULL, an object with "shortest_edge". If the file lacks the key, *size is unchanged. */
static tt_status tt__vit_read_size(const tt__json *j, const char *key, int *size, bool *shortest)
{
    static const char *const keys[] = {"height", "width", "shortest_edge", "longest_edge", "max_height",
                                       "max_width"};
    int64_t n[6] = {0, 0, 0, 0, 0, 0};
    tt_status status = TT_OK;
    const int node = tt__json_get(j, 0, key);
    if (node < 0 || j->nodes[node].kind == TT__JSON_NULL) return TT_OK;
    const bool object = j->nodes[node].kind == TT__JSON_OBJECT;
    if (!object) status = tt__json_read_int(j, 0, key, true, 1, TT__IMAGE_SIDE, &n[0]), n[1] = n[0];
    for (int k = 0; k < TT__COUNT(keys) && object && status == TT_OK; k++)
        status = tt__json_read_int(j, node, keys[k], false, 1, TT__IMAGE_SIDE, &n[k]);
    if (status != TT_OK) return status;
    const bool square = n[0] && n[0] == n[1] && !n[2], short_side = shortest && n[2] && !n[0] && !n[1];
    if (n[3] || n[4] || n[5] || (!square && !short_side))
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED,
                        "'%s', byte %zu: \"%s\" has neither a \"height\" and \"width\" that are equal%s",
                        j->path, j->base + j->nodes[node].offset, key,
                        shortest ? " nor a \"shortest_edge\" alone: other sizes are not supported" :
                        ": other sizes are not supported");
    *size = (int)(square ? n[0] : n[2]);
    if (shortest) *shortest = short_side;
    return TT_OK;
}

/* Reads from preprocessor_config.json how images are resized and cropped to the model's size; missing keys
   have transformers' defaults. image_size: the size that the caller wants, or 0. */
static tt_status tt__vit_read_resizing(const tt__json *j, int image_size, tt_vit_config *c)
{
    const char *type = NULL;
    bool resizes = true, crops, pads = false;
    int size = c->image_size, crop = size;
    int64_t resample;
    tt_status status = tt__json_read_string(j, 0, "image_processor_type", false, &type);
    if (status == TT_OK && !type)
        status = tt__json_read_string(j, 0, "feature_extractor_type", false, &type);
    const bool deit = type && strncmp(type, "DeiT", 4) == 0;
    if (status == TT_OK && type && !deit && strncmp(type, "ViTImage", 8) != 0 &&
        strncmp(type, "ViTFeature", 10) != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': the image processor is '%s'; only "
                        "ViTImageProcessor and DeiTImageProcessor are supported: use another model", j->path,
                        type);
    if (deit) size = 256, crop = 224;
    crops = deit;
    resample = deit ? TT_BICUBIC : TT_BILINEAR;
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "do_resize", &resizes);
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "do_center_crop", &crops);
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "do_pad", &pads);
    if (status == TT_OK)
        status = tt__json_read_int(j, 0, "resample", false, TT_NEAREST, TT_BICUBIC, &resample);
    if (status == TT_OK && resizes) status = tt__vit_read_size(j, "size", &size, &c->resize_shortest);
    if (status == TT_OK && crops) status = tt__vit_read_size(j, "crop_size", &crop, NULL);
    if (status != TT_OK) return status;
    if (pads)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': \"do_pad\" is true, which is not supported: use "
                        "another model", j->path);
    if (c->resize_shortest && !crops)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': \"shortest_edge\" without \"do_center_crop\" "
                        "leaves images that are not square: set \"do_center_crop\" to true", j->path);
    const int model = c->image_size, side = crops ? crop : resizes ? size : model;
    if (!image_size && side != model)
        return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s': images are resized to %d x %d pixels, but "
                        "\"image_size\" of config.json is %d: correct one of them, or set an image size",
                        j->path, side, side, model);
    c->resample = (tt_resample)resample;
    c->resize = !resizes ? -1 : !crops || (size == crop && !c->resize_shortest) ? 0 : size;
    if (c->resize > 0 && image_size) /* scales `resize`, so that the crop keeps its share of the image */
        c->resize = (int)tt__min(TT__IMAGE_SIDE, ((int64_t)size * image_size + crop / 2) / crop);
    return TT_OK;
}

/* Reads preprocessor_config.json. image_size: the size that the caller wants, or 0. */
static tt_status tt__vit_read_preprocessor(const tt__json *j, int image_size, tt_vit_config *c)
{
    if (c->channels < 1 || c->channels > 4) return TT_OK; /* config->mean has room for 4; tt__vit_check
                                                             refuses other numbers of channels */
    bool rescales = true, normalizes = true;
    float factor = 1.0f / 255;
    tt_status status = tt__vit_read_resizing(j, image_size, c);
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "do_rescale", &rescales);
    if (status == TT_OK)
        status = tt__json_read_float(j, 0, "rescale_factor", -FLT_MAX, INFINITY, &factor);
    if (status == TT_OK) status = tt__json_read_bool(j, 0, "do_normalize", &normalizes);
    if (status == TT_OK && (!rescales || !(fabsf(factor * 255 - 1) < 1e-6f)))
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': pixels are divided by 255, but this file has "
                        "another \"rescale_factor\" or none, which is not supported: use another model",
                        j->path);
    for (int k = 0; k < c->channels && !normalizes; k++) c->mean[k] = 0, c->std[k] = 1;
    for (int side = 0; side < 2 && normalizes && status == TT_OK; side++) {
        const char *key = side ? "image_std" : "image_mean";
        int list = tt__json_get(j, 0, key);
        if (list < 0) continue;
        if (j->nodes[list].kind != TT__JSON_ARRAY || j->nodes[list].count != c->channels)
            return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s': '%s' must be a list of %d numbers", j->path, key,
                            c->channels);
        const float min = side ? FLT_MIN : -FLT_MAX; /* image_std is a divisor and must be above 0 */
        float *to = side ? c->std : c->mean;
        for (int k = 0, node = list + 1; k < c->channels && status == TT_OK; k++, node = j->nodes[node].after)
            status = tt__json_float_at(j, key, node, min, INFINITY, &to[k]);
    }
    return status;
}

tt_status tt_vit_load(tt_context *ctx, tt_vit *m, const char *path, int image_size, int classes)
{
    char folder[TT__PATH], beside[TT__PATH];
    tt__json preprocessor;
    tt_vit_config config;
    bool is_file = tt__match("*.safetensors", path);
    tt__checkpoint s;
    const char *slash = is_file ? strrchr(path, '/') : NULL;
    memset(m, 0, sizeof *m);
    memset(&s, 0, sizeof s);
    memset(&preprocessor, 0, sizeof preprocessor);
    tt_status status = tt__path_join(ctx, beside, path, "model.safetensors"); /* checks the path's length */
    if (status != TT_OK) return status;
    strcpy(folder, !is_file || slash ? path : ".");
    if (slash) folder[slash - path + 1] = 0;
    status = is_file ? tt__shards_one(ctx, path, &s) : tt__shards_open(ctx, folder, &s);
    for (int k = 0; k < s.files && !s.naming; k++)
        s.naming = tt_safetensors_find(s.file[k], "class_token") >= 0 ||
                     tt_safetensors_find(s.file[k], "conv_proj.weight") >= 0;
    if (status == TT_OK) status = tt__json_open_if_there(&s.config, ctx, s.path, folder, "config.json");
    if (status == TT_OK)
        status = s.config.count ? tt__vit_read_config(&s.config, &config) : tt__vit_infer_config(&s, &config);
    if (status == TT_OK)
        status = tt__json_open_if_there(&preprocessor, ctx, beside, folder, "preprocessor_config.json");
    if (status == TT_OK && preprocessor.count)
        status = tt__vit_read_preprocessor(&preprocessor, image_size, &config);
    if (status == TT_OK) status = tt__model_load(&tt__vit_architecture, m, &config, &s, classes, image_size);
    if (status == TT_OK) m->torchvision = s.naming == 1;
    tt__json_free(&preprocessor);
    tt__checkpoint_close(ctx, &s);
    return status;
}

static void tt__vit_print_preprocessor(tt__text_buffer *json, const void *arg)
{
    const tt_vit_config *c = (const tt_vit_config *)arg;
    char number[32];
    const int size = c->resize > 0 ? c->resize : c->image_size;
    tt__print(json, "{\n  \"image_processor_type\": \"%s\",\n  \"do_resize\": %s,\n  \"size\": {",
              c->resize ? "DeiTImageProcessor" : "ViTImageProcessor", c->resize < 0 ? "false" : "true");
    if (c->resize_shortest) tt__print(json, "\"shortest_edge\": %d", size);
    else tt__print(json, "\"height\": %d, \"width\": %d", size, size);
    tt__print(json, "},\n  \"resample\": %d,\n", (int)c->resample);
    if (c->resize) /* the image processor is then DeiT's, the only one that crops in transformers 4 */
        tt__print(json, "  \"do_center_crop\": true,\n"
                  "  \"crop_size\": {\"height\": %d, \"width\": %d},\n", c->image_size, c->image_size);
    tt__print(json, "  \"do_rescale\": true,\n  \"rescale_factor\": 0.00392156862745098,\n"
              "  \"do_normalize\": true");
    for (int side = 0; side < 2; side++) {
        tt__print(json, ",\n  \"%s\": [", side ? "image_std" : "image_mean");
        for (int k = 0; k < c->channels; k++)
            tt__print(json, "%s%s", k ? ", " : "", tt__shortest((side ? c->std : c->mean)[k], number));
        tt__print(json, "]");
    }
    tt__print(json, "\n}\n");
}

tt_status tt_vit_save(const tt_vit *m, const char *folder)
{
    if (m->torchvision && !m->config.qkv_bias)
        return tt__fail(m->ctx, TT_ERR_UNSUPPORTED, "this model has no biases of q, k and v, but "
                        "torchvision's ViT needs them: set torchvision to false");
    const tt_vit_config *c = &m->config;
    if (m->torchvision && c->head_size && c->head_size * c->heads != c->hidden_size)
        return tt__fail(m->ctx, TT_ERR_UNSUPPORTED, "heads were removed from this model, but torchvision's "
                        "ViT needs all of them: set torchvision to false");
    tt_status status = tt__model_save(m->ctx, &tt__vit_architecture, m, &m->config, m->torchvision, 0,
                                      folder);
    if (status != TT_OK) return status;
    return tt__save_printed(m->ctx, folder, "preprocessor_config.json", tt__vit_print_preprocessor,
                            &m->config);
}
