#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../context/params.h"
#include "../files/lists.h"
#include "../files/utf8.h"
#include "../files/json.h"
#include "../files/safetensors.h"
#include "layout.h"
#include "lm_layout.h"
#include "lm_config.h"
#include "lm.h"

/* ------------------------------------------------------------- weights in few bits, and low-rank adapters
   An adapter adds `scale * x * A^T * B^T` to the output of a module (peft's word for a linear layer),
   where x is the module's input. Only A (rank, in) and B (out, rank) are trained. In files, the rows of B
   have the order that the rows of the module's weight have in files. */

tt_lora_options tt_lora_options_default(void)
{
    tt_lora_options o;
    memset(&o, 0, sizeof o);
    o.rank = 8;
    o.alpha = 8;
    return o;
}

/* Records a linear layer, x * w^T + b, plus the output of w's adapter if w has one. Shapes: x (rows, in),
   result (rows, out). */
static tt_value tt__lm_linear(const tt_lm *m, tt_tape *t, tt_value x, tt_param *w, tt_param *b)
{
    tt_value y = tt_linear(t, x, w, b);
    for (int k = 0; k < m->n_lora; k++) {
        const tt_lora *l = &m->lora[k];
        if (l->weight != w) continue;
        tt_value h = tt_linear(t, tt_dropout(t, x, m->lora_options.dropout), l->a, NULL); /* (rows, rank) */
        h = tt_scale(t, h, m->lora_options.alpha / (float)m->lora_options.rank);
        y = tt_add(t, tt_linear(t, h, l->b, NULL), y);
    }
    return y;
}

/* Returns the weight of module number k. The modules, which are linear layers, are numbered from 0 in the
   order of the layout. Returns NULL if the model has at most k modules. Sets `name` to the module's name and
   *order to the order of the weight's rows in files. */
static tt_param *tt__lm_module(const tt_lm *m, int k, char name[256], tt__packing *order)
{
    const tt__architecture *a = &tt__lm_kind_of(m->config.kind)->a;
    const tt__layout l = tt__layout_of(m->ctx, a, m, &m->config, NULL);
    const tt__tensor_row *row;
    for (int n = a->n_model; (row = tt__layout_row(&l, n, name)) != NULL; n++) {
        int64_t dims[4];
        const int ndim = tt__row_dims(&l, row, dims);
        tt_param *p = ndim == 2 ? *tt__layout_slot(&l, row, n) : NULL;
        if (!p || k--) continue;
        *order = tt__row_order(&l, row, ndim, dims);
        name[strlen(name) - strlen(".weight")] = 0;
        return p;
    }
    return NULL;
}

tt_status tt_lm_store(tt_lm *m, const char *format)
{
    char name[256], first[256] = "";
    tt__packing order;
    tt_param *p;
    int stored = 0, kept = 0;
    int64_t block;
    double floats = 0;
    const tt_dtype form = tt__form_of(format, &block);
    tt_status status = TT_OK;
    for (int k = 0; status == TT_OK && (p = tt__lm_module(m, k, name, &order)) != NULL; k++)
        if (form > TT__INT4 || p->dims[1] % block == 0) status = tt__param_check_store(p, format);
    if (status != TT_OK) return status;
    for (int k = 0; (p = tt__lm_module(m, k, name, &order)) != NULL; k++) {
        if (p->dims[1] % block) {
            if (!kept++) memcpy(first, name, sizeof first);
            continue;
        }
        if (format || (tt__is_coded(p->form) && !m->n_lora)) tt__param_mark_frozen(p, format != NULL);
        tt_param_store(p, format);
        stored++;
        floats += (double)p->size * sizeof(float);
    }
    tt__lm_note_stored(m, &tt__lm_kind_of(m->config.kind)->a);
    if (kept)
        tt__log(m->ctx, TT_LOG_WARNING, "store", "%d of %d weights of linear layers stay floats, because "
                "their rows do not fit %s; the first is that of '%s'", kept, kept + stored, format, first);
    if (format && m->stored)
        tt__log(m->ctx, TT_LOG_INFO, "store", "%d weights of linear layers are stored in %s: %.1f MB, in "
                "fp32 %.1f MB", stored, format, (double)m->stored_bytes / 1e6, floats / 1e6);
    return TT_OK;
}

/* Sets the shapes of A (rank, in) and B (out, rank) for a weight (out, in). */
static void tt__lora_dims(const tt_param *weight, int rank, int64_t a[2], int64_t b[2])
{
    a[0] = b[1] = rank;
    a[1] = tt_param_dims(weight)[1];
    b[0] = tt_param_dims(weight)[0];
}

/* Adds an adapter with new parameters to a module. B starts at 0, so the module's output does not change. */
static tt_status tt__lora_add(tt_lm *m, tt_param *weight, const char *module, int rank)
{
    char name[300];
    int64_t a[2], b[2];
    tt__lora_dims(weight, rank, a, b);
    const tt_init zeros = {TT_INIT_ZEROS, 0}, uniform = {TT_INIT_UNIFORM, 1 / sqrtf((float)a[1])};
    tt_lora *l = &m->lora[m->n_lora];
    snprintf(name, sizeof name, "%s.lora_A.weight", module);
    l->weight = weight;
    l->a = tt_param_new(m->ctx, name, 2, a, uniform);
    snprintf(name, sizeof name, "%s.lora_B.weight", module);
    l->b = l->a ? tt_param_new(m->ctx, name, 2, b, zeros) : NULL;
    if (!l->b) return m->ctx->status;
    l->a->factor = l->b->factor = true;
    m->n_lora++;
    return TT_OK;
}

/* Checks the options and allocates memory for an adapter of each module. Fails if the model has adapters. */
static tt_status tt__lora_begin(tt_lm *m, const tt_lora_options *o)
{
    char name[256], text[400] = "";
    tt__packing order;
    tt__text_buffer all = {text, sizeof text, 0};
    if (m->lora)
        return tt__fail(m->ctx, TT_ERR_ARGUMENT, "the model already has adapters: add adapters only once");
    if (m->score)
        return tt__fail(m->ctx, TT_ERR_UNSUPPORTED, "the model is a classifier, which cannot have adapters: "
                        "train the model itself, with some parameters frozen (tt_param_freeze)");
    if (o->rank < 1) tt__print(&all, "; rank is %d, but must be above 0", o->rank);
    if (!(o->alpha > 0 && o->alpha < INFINITY))
        tt__print(&all, "; alpha is %g, but must be finite and above 0", o->alpha);
    if (!(o->dropout >= 0 && o->dropout < 1))
        tt__print(&all, "; dropout is %g, but must be in [0, 1)", o->dropout);
    if (all.length) return tt__fail(m->ctx, TT_ERR_ARGUMENT, "adapters: %s", text + 2);
    int modules = 0;
    while (tt__lm_module(m, modules, name, &order)) modules++;
    m->lora = (tt_lora *)tt__calloc(m->ctx, sizeof *m->lora * (size_t)(modules + 1));
    m->lora_options = *o;
    m->lora_options.targets = NULL;
    return m->lora ? TT_OK : TT_ERR_MEMORY;
}

/* Returns whether one of the comma-separated patterns matches the module's name, or the end of the name after
   a dot. */
static bool tt__lora_targets(const char *patterns, const char *module)
{
    char pattern[256];
    for (size_t n; *patterns; patterns += n + (patterns[n] == ',')) {
        n = strcspn(patterns, ",");
        snprintf(pattern, sizeof pattern, "%.*s", (int)tt__min((int64_t)n, 250), patterns);
        if (!n) continue;
        if (tt__match(pattern, module)) return true;
        snprintf(pattern, sizeof pattern, "*.%.*s", (int)tt__min((int64_t)n, 250), patterns);
        if (tt__match(pattern, module)) return true;
    }
    return false;
}

/* Fails if the list of patterns is empty or has a pattern that matches no module. */
static tt_status tt__lora_check_targets(const tt_lm *m, const char *patterns)
{
    char one[256], name[256];
    tt__packing order;
    bool any = false;
    for (size_t n; *patterns; patterns += n + (patterns[n] == ',')) {
        n = strcspn(patterns, ",");
        snprintf(one, sizeof one, "%.*s", (int)tt__min((int64_t)n, 250), patterns);
        bool found = !n;
        for (int k = 0; !found && tt__lm_module(m, k, name, &order); k++) found = tt__lora_targets(one, name);
        any = any || n;
        if (!found) break;
    }
    if (!*patterns && any) return TT_OK;
    tt__lm_module(m, 0, name, &order);
    return tt__fail(m->ctx, TT_ERR_ARGUMENT, "adapters: no module that can have an adapter has a name that "
                    "matches '%s'; the first such module is '%s'", any ? one : "", name);
}

/* Removes the adapters if `status` is an error, and returns `status`. The context keeps the parameters that
   were already created. */
static tt_status tt__lora_drop(tt_lm *m, tt_status status)
{
    if (status == TT_OK) return status;
    tt__free(m->ctx, m->lora);
    m->lora = NULL;
    m->n_lora = 0;
    return status;
}

/* Freezes all parameters of the model except the adapters', so that training changes only the adapters. */
static void tt__lora_freeze(tt_lm *m)
{
    const tt__architecture *a = &tt__lm_kind_of(m->config.kind)->a;
    const tt__layout l = tt__layout_of(m->ctx, a, m, &m->config, NULL);
    const tt__tensor_row *row;
    char name[256];
    for (int k = 0; (row = tt__layout_row(&l, k, name)) != NULL; k++) {
        tt_param *p = *tt__layout_slot(&l, row, k);
        if (p) tt__param_mark_frozen(p, true);
    }
}

tt_status tt_lm_lora(tt_lm *m, const tt_lora_options *options)
{
    const tt_lora_options o = options ? *options : tt_lora_options_default();
    const char *targets = o.targets ? o.targets : tt__lm_kind_of(m->config.kind)->adapted;
    char name[256];
    tt__packing order;
    tt_param *weight;
    tt_status status = o.targets ? tt__lora_check_targets(m, o.targets) : TT_OK;
    if (status == TT_OK) status = tt__lora_begin(m, &o);
    if (status != TT_OK) return status;
    for (int k = 0; status == TT_OK && (weight = tt__lm_module(m, k, name, &order)) != NULL; k++)
        if (tt__lora_targets(targets, name))
            status = tt__lora_add(m, weight, name, o.rank);
    if (status == TT_OK) tt__lora_freeze(m);
    return tt__lora_drop(m, status);
}

/* Copies the rows of B (out, rank) from the model's order into the file's order or, if `back`, from the
   file's order into the model's. */
static void tt__lora_rows(const tt__packing *order, int rank, const float *from, float *to, bool back)
{
    const size_t bytes = sizeof *from * (size_t)rank;
    for (int64_t r = 0; r < order->rows; r++) {
        const int64_t other = order->kind == 'g' ? tt__packing_row(order, r, false) : r; /* the file's row */
        memcpy(to + (back ? r : other) * rank, from + (back ? other : r) * rank, bytes);
    }
}

static void tt__lora_print(tt__text_buffer *json, const void *arg)
{
    const tt_lm *m = (const tt_lm *)arg;
    const tt_lora_options *o = &m->lora_options;
    char a[32], b[32], name[256];
    tt__packing order = {0, 0, 0, 0, 0};
    tt__lm_module(m, 0, name, &order);
    tt__print(json, "{\n  \"peft_type\": \"LORA\",\n  \"task_type\": \"CAUSAL_LM\",\n"
              "  \"base_model_name_or_path\": ");
    if (m->base && tt__is_utf8(m->base)) tt__json_quote(json, m->base);
    else tt__print(json, "null");
    tt__print(json, ",\n  \"inference_mode\": true,\n  \"bias\": \"none\",\n  \"r\": %d,\n"
              "  \"lora_alpha\": %s,\n  \"lora_dropout\": %s,\n  \"fan_in_fan_out\": %s,\n"
              "  \"target_modules\": [\n", o->rank, tt__shortest(o->alpha, a),
              tt__shortest(o->dropout, b), order.kind == 't' ? "true" : "false");
    for (int k = 0; k < m->n_lora; k++) {
        const char *weight = tt_param_name(m->lora[k].weight);
        tt__print(json, "    \"%.*s\"%s\n", (int)(strlen(weight) - strlen(".weight")), weight,
                  k + 1 < m->n_lora ? "," : "");
    }
    tt__print(json, "  ]\n}\n");
}

/* Writes A and B of all adapters to one file. info, names: scratch memory for 2 * m->n_lora entries. */
static tt_status tt__lora_write(const tt_lm *m, const char *path, tt_tensor_info *info, char (*names)[300])
{
    static const char *const metadata[] = {"format", "pt", NULL};
    for (int k = 0; k < 2 * m->n_lora; k++) {
        const tt_param *p = k % 2 ? m->lora[k / 2].b : m->lora[k / 2].a;
        snprintf(names[k], sizeof *names, "base_model.model.%.270s", tt_param_name(p));
        info[k].name = names[k];
        info[k].dtype = "F32";
        info[k].ndim = 2;
        memcpy(info[k].dims, tt_param_dims(p), 2 * sizeof *info[k].dims);
    }
    tt_safetensors_writer *w = tt_safetensors_begin(m->ctx, path, info, 2 * m->n_lora, metadata);
    tt_status status = w ? TT_OK : m->ctx->status;
    for (int k = 0; k < 2 * m->n_lora && status == TT_OK; k++) {
        const tt_lora *l = &m->lora[k / 2];
        const tt_param *p = k % 2 ? l->b : l->a;
        const size_t bytes = sizeof(float) * (size_t)p->size;
        float *values = (float *)tt__alloc(m->ctx, bytes), *rows = (float *)tt__alloc(m->ctx, bytes);
        tt__packing order;
        char name[256];
        status = values && rows ? tt_param_get(p, values) : TT_ERR_MEMORY;
        for (int n = 0; status == TT_OK && tt__lm_module(m, n, name, &order) != l->weight;) n++;
        if (status == TT_OK && k % 2) tt__lora_rows(&order, m->lora_options.rank, values, rows, false);
        if (status == TT_OK) status = tt_safetensors_write(w, k % 2 ? rows : values, bytes);
        tt__free(m->ctx, values);
        tt__free(m->ctx, rows);
    }
    return tt__safetensors_finish(w, status);
}

tt_status tt_lm_lora_save(const tt_lm *m, const char *folder)
{
    char path[TT__PATH];
    if (!m->n_lora)
        return tt__fail(m->ctx, TT_ERR_ARGUMENT,
                        "tt_lm_lora_save: the model has no adapters to save: call tt_lm_lora first");
    tt_status status = tt__make_folder(m->ctx, folder);
    if (status == TT_OK) status = tt__path_join(m->ctx, path, folder, "adapter_model.safetensors");
    if (status != TT_OK) return status;
    const size_t n = 2 * (size_t)m->n_lora;
    tt_tensor_info *info = (tt_tensor_info *)tt__calloc(m->ctx, sizeof *info * n);
    char (*names)[300] = (char(*)[300])tt__alloc(m->ctx, sizeof *names * n);
    status = info && names ? tt__lora_write(m, path, info, names) : TT_ERR_MEMORY;
    if (status == TT_OK) status = tt__save_printed(m->ctx, folder, "adapter_config.json", tt__lora_print, m);
    tt__free(m->ctx, names);
    tt__free(m->ctx, info);
    return status;
}

/* Reads adapter_config.json into *o, and fails if the file has settings that this library does not support.
   If the file has the name of the base model, sets *base to the name, which lives as long as j. */
static tt_status tt__lora_read_config(const tt__json *j, tt_lora_options *o, const char **base)
{
    static const char *const none[] = {"use_dora", "use_rslora", "lora_bias", "use_qalora"};
    static const char *const empty[] = {"rank_pattern", "alpha_pattern", "modules_to_save",
                                        "layers_to_transform", "trainable_token_indices",
                                        "target_parameters", "layer_replication", "use_bdlora", "kasa_config",
                                        "velora_config", "monteclora_config", "alora_invocation_tokens"};
    const char *type = "", *bias = "none", *begun = "gaussian";
    const int from = tt__json_get(j, 0, "init_lora_weights");
    int64_t rank = 8;
    o->alpha = 8;
    tt_status status = tt__json_read_string(j, 0, "peft_type", true, &type);
    if (status == TT_OK && strcmp(type, "LORA") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': peft_type is '%s'; only LORA is supported: use "
                        "another adapter", j->path, type);
    if (status == TT_OK) status = tt__json_read_int(j, 0, "r", false, 1, INT32_MAX / 4, &rank);
    if (status == TT_OK) status = tt__json_read_float(j, 0, "lora_alpha", 0, INFINITY, &o->alpha);
    if (status == TT_OK) status = tt__json_read_float(j, 0, "lora_dropout", 0, 1, &o->dropout);
    if (status == TT_OK) status = tt__json_read_string(j, 0, "bias", false, &bias);
    if (status == TT_OK && strcmp(bias, "none") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': bias is '%s'; only none is supported: use another "
                        "adapter", j->path, bias);
    if (status == TT_OK && from >= 0 && j->nodes[from].kind == TT__JSON_STRING)
        status = tt__json_read_string(j, 0, "init_lora_weights", false, &begun);
    if (status == TT_OK && strcmp(begun, "gaussian") != 0 && strcmp(begun, "orthogonal") != 0)
        return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': init_lora_weights is '%s', which may change the "
                        "model's own weights; only true, false, gaussian and orthogonal are supported: use "
                        "another adapter", j->path, begun);
    for (int k = 0; k < TT__COUNT(none) && status == TT_OK; k++) status = tt__lm_refuse(j, none[k], false);
    for (int k = 0; k < TT__COUNT(empty) && status == TT_OK; k++) {
        const int at = tt__json_get(j, 0, empty[k]);
        const tt__json_node *n = at >= 0 ? &j->nodes[at] : NULL;
        const bool list = n && (n->kind == TT__JSON_ARRAY || n->kind == TT__JSON_OBJECT);
        if (n && (list ? n->count > 0 : n->kind > TT__JSON_FALSE))
            return tt__fail(j->ctx, TT_ERR_UNSUPPORTED,
                            "'%s': %s is set, but not supported: train the adapter without it", j->path,
                            empty[k]);
    }
    o->rank = (int)rank;
    return status != TT_OK ? status : tt__json_read_string(j, 0, "base_model_name_or_path", false, base);
}

/* Reads tensor A (k = 0) or B (k = 1) of a module's adapter from a file into parameter p. */
static tt_status tt__lora_read(const tt_safetensors *s, const char *module, int k, tt_param *p,
                               const tt__packing *order, int rank)
{
    char name[300];
    snprintf(name, sizeof name, "base_model.model.%.256s.lora_%c.weight", module, 'A' + k);
    const int at = tt_safetensors_find(s, name);
    if (at < 0)
        return tt__fail(s->ctx, TT_ERR_FORMAT, "'%s' has no tensor '%s', which adapter_config.json requires: "
                        "copy both files from one adapter", s->path, name);
    const tt_tensor_info *info = tt_safetensors_info(s, at);
    if (info->ndim != 2 || memcmp(info->dims, p->dims, 2 * sizeof *p->dims) != 0)
        return tt__fail(s->ctx, TT_ERR_SHAPE, "'%s': tensor '%s' has another shape than (%lld, %lld), which "
                        "the model and r of adapter_config.json require: load the adapter's own model",
                        s->path, name, (long long)p->dims[0], (long long)p->dims[1]);
    float *values = (float *)tt__alloc(s->ctx, sizeof *values * (size_t)p->size * 2);
    float *rows = values ? values + p->size : NULL;
    tt_status status = values ? tt_safetensors_read_f32(s, at, 0, p->size, values) : TT_ERR_MEMORY;
    if (status == TT_OK && k) tt__lora_rows(order, rank, values, rows, true);
    if (status == TT_OK) status = tt_param_set(p, k ? rows : values);
    tt__free(s->ctx, values);
    return status;
}

/* Adds an adapter to each module whose tensor A is in the file, and reads its A and B. Fails if a tensor of
   the file belongs to no module. */
static tt_status tt__lora_read_all(tt_lm *m, const tt_safetensors *s)
{
    char name[256], a[300];
    tt__packing order;
    tt_param *weight;
    tt_status status = TT_OK;
    for (int k = 0; status == TT_OK && (weight = tt__lm_module(m, k, name, &order)) != NULL; k++) {
        snprintf(a, sizeof a, "base_model.model.%.256s.lora_A.weight", name);
        if (tt_safetensors_find(s, a) < 0) continue;
        status = tt__lora_add(m, weight, name, m->lora_options.rank);
        const tt_lora *l = &m->lora[m->n_lora - (status == TT_OK)];
        for (int i = 0; i < 2 && status == TT_OK; i++)
            status = tt__lora_read(s, name, i, i ? l->b : l->a, &order, m->lora_options.rank);
    }
    for (int k = 0; k < tt_safetensors_count(s) && status == TT_OK; k++) {
        const char *tensor = tt_safetensors_info(s, k)->name;
        bool known = false;
        for (int n = 0; n < 2 * m->n_lora && !known; n++) {
            const tt_lora *l = &m->lora[n / 2];
            snprintf(a, sizeof a, "base_model.model.%.270s", tt_param_name(n % 2 ? l->b : l->a));
            known = strcmp(a, tensor) == 0;
        }
        if (!known)
            status = tt__fail(m->ctx, TT_ERR_UNSUPPORTED, "'%s': tensor '%.200s' does not belong to a module "
                              "of this model (%s) that can have an adapter: load the adapter's own model",
                              s->path, tensor, m->config.kind);
    }
    return status;
}

tt_status tt_lm_lora_load(tt_lm *m, const char *folder)
{
    char path[TT__PATH], *base = NULL;
    const char *said = NULL;
    tt__json j;
    tt_lora_options o = tt_lora_options_default();
    tt_safetensors *s = NULL;
    memset(&j, 0, sizeof j);
    tt_status status = tt__path_join(m->ctx, path, folder, "adapter_config.json");
    if (status == TT_OK) status = tt__json_open(&j, m->ctx, path);
    if (status == TT_OK) status = tt__lora_read_config(&j, &o, &said);
    if (status == TT_OK && said && !(base = tt__strdup(m->ctx, said))) status = TT_ERR_MEMORY;
    tt__json_free(&j);
    if (status == TT_OK) status = tt__path_join(m->ctx, path, folder, "adapter_model.safetensors");
    if (status == TT_OK && !(s = tt_safetensors_open(m->ctx, path))) status = m->ctx->status;
    if (status == TT_OK && (status = tt__lora_begin(m, &o)) == TT_OK) {
        status = tt__lora_read_all(m, s);
        if (status == TT_OK) tt__lora_freeze(m);
        tt__lora_drop(m, status);
    }
    if (status == TT_OK && base) {
        tt__free(m->ctx, m->base);
        m->base = base;
    } else {
        tt__free(m->ctx, base);
    }
    tt_safetensors_close(s);
    return status;
}

/* Fails if the weight of an adapter cannot take the sum. */
static tt_status tt__lora_check_merge(const tt_lm *m)
{
    for (int k = 0; k < m->n_lora; k++) {
        const tt_param *w = m->lora[k].weight;
        if (tt__is_coded(w->form))
            return tt__fail(m->ctx, TT_ERR_UNSUPPORTED, "tt_lm_lora_merge: parameter '%s' is stored in %s, "
                            "which would round the sum: keep the adapters beside the model, or load the "
                            "model in floats and merge there", w->name, tt_dtype_name(w->form));
        if (w->rounding != TT_ROUND_NONE)
            return tt__fail(m->ctx, TT_ERR_UNSUPPORTED, "tt_lm_lora_merge: parameter '%s' is rounded, which "
                            "would round the sum: keep the adapters beside the model, or end the rounding "
                            "(tt_param_round with TT_ROUND_NONE)", w->name);
        if (w->low_a)
            return tt__fail(m->ctx, TT_ERR_UNSUPPORTED, "tt_lm_lora_merge: parameter '%s' has low-rank "
                            "factors, which cannot hold the sum: keep the adapters beside the model, or save "
                            "the model, load it and merge there", w->name);
    }
    return TT_OK;
}

tt_status tt_lm_lora_merge(tt_lm *m)
{
    const int rank = m->lora_options.rank;
    tt_status status = tt__lora_check_merge(m);
    for (int k = 0; k < m->n_lora && status == TT_OK; k++) {
        const tt_lora *l = &m->lora[k];
        const int64_t out = l->weight->dims[0], in = l->weight->dims[1];
        const size_t count = (size_t)(out * in + rank * (in + out));
        float *w = (float *)tt__alloc(m->ctx, sizeof *w * count), *a = w + out * in, *b = a + rank * in;
        status = w ? tt_param_get(l->weight, w) : TT_ERR_MEMORY;
        if (status == TT_OK) status = tt_param_get(l->a, a);
        if (status == TT_OK) status = tt_param_get(l->b, b);
        const float scale = m->lora_options.alpha / (float)rank;
        for (int64_t r = 0; r < out && status == TT_OK; r++)
            for (int i = 0; i < rank; i++) {
                const float factor = scale * b[r * rank + i];
                for (int64_t c = 0; c < in; c++) w[r * in + c] += factor * a[i * in + c];
            }
        if (status == TT_OK) status = tt_param_set(l->weight, w);
        if (status == TT_OK) memset(b, 0, sizeof *b * (size_t)(out * rank));
        if (status == TT_OK) status = tt_param_set(l->b, b);
        tt__free(m->ctx, w);
    }
    return status;
}
