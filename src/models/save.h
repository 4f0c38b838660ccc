#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ranks/processes.h"
#include "../context/cpu.h"
#include "../context/params.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../files/safetensors.h"
#include "layout.h"
#include "few_bits.h"
#include "bitsandbytes.h"

/* ---- saving to checkpoint files */

/* A parameter to save, and the form in which it is saved. */
typedef struct tt__saved_param {
    const tt_param *p;   /* NULL: the model has no such parameter */
    tt__packing order;
    tt_dtype form;       /* dtype of the coded matrix that is saved; TT_F32: none is saved */
    bool rounded;        /* products read the parameter rounded, so its rounded numbers are saved */
    bool packed;         /* the rounded parameter is saved packed (few_bits.h) */
    const float *values; /* the values to save as floats; NULL: read from the parameter */
    int tensor;          /* index in tt__saved_files of the first tensor that has the parameter */
} tt__saved_param;

/* Returns how parameter k of a model is saved. row: its row of the layout. form: the format of the model's
   coded matrices (tt__bnb_form). Codes and packed weights are only in layers and, packed, in linear layers
   that a model always has; a part of a tensor and a padded tensor have floats. Embeddings are not rounded,
   because programs look up the numbers of the parameter itself. Embeddings are the model's matrices whose
   shapes begin with the letters V (tokens), P (positions) and T (types), and ViT's positions (1). */
static tt__saved_param tt__saved_as(const tt__layout *l, const tt__tensor_row *row, int k, tt_dtype form)
{
    int64_t dims[4] = {0};
    const int ndim = tt__row_dims(l, row, dims);
    const tt_param *p = *tt__layout_slot(l, row, k);
    const bool in_layer = k >= l->a->n_model;
    tt__saved_param x;
    memset(&x, 0, sizeof x);
    if (!p || !ndim) return x;
    x.p = p;
    x.order = tt__row_order(l, row, ndim, dims);
    if (tt__is_padded(p, &x.order)) x.order.kind = 'p';
    const bool whole = ndim == 2 && x.order.kind != 'p' && !tt__layout_part(l, row).of;
    if (whole && in_layer) x.form = tt__bnb_saved(p, form, &x.order);
    x.rounded = p->rounding != TT_ROUND_NONE && (in_layer || !strchr("VPT1", row->shape[0]));
    x.packed = x.rounded && whole && !x.order.kind && !row->head;
    return x;
}

/* Reads elements [first, first + n) of a parameter to `to`. first: a multiple of 4. */
static tt_status tt__saved_values(const tt__saved_param *x, int64_t first, int64_t n, float *to)
{
    if (!x->values) return tt__param_read(x->p, first, n, to);
    memcpy(to, x->values + first, sizeof *to * (size_t)n);
    return TT_OK;
}

/* Writes elements [first, first + n) of a parameter to w as dtype `as`. piece, converted: scratch memory for
   TT__PIECE floats each. */
static tt_status tt__save_elements(tt_safetensors_writer *w, const tt__saved_param *x, int64_t first,
                                   int64_t n, tt_dtype as, float *piece, void *converted)
{
    tt_status status = TT_OK;
    for (const int64_t end = first + n; first < end && status == TT_OK; first += TT__PIECE) {
        const int64_t part = tt__min(TT__PIECE, end - first);
        status = tt__saved_values(x, first, part, piece);
        if (status != TT_OK) break;
        tt__convert(converted, as, piece, TT_F32, (size_t)part);
        status = tt_safetensors_write(w, converted, (size_t)part * tt_dtype_bytes(as));
    }
    return status;
}

/* Writes the transpose of a parameter (order 't'), or a parameter and the zeros that pad it (order 'p'), with
   temporary memory for the whole parameter in fp32. */
static tt_status tt__save_moved(tt_safetensors_writer *w, const tt__saved_param *x, tt_dtype as, float *piece,
                                void *converted)
{
    tt_context *ctx = x->p->ctx;
    const tt__packing *o = &x->order;
    float *all = (float *)tt__alloc(ctx, sizeof *all * (size_t)x->p->size);
    tt_status status = all ? TT_OK : TT_ERR_MEMORY;
    for (int64_t first = 0; first < x->p->size && status == TT_OK; first += TT__PIECE)
        status = tt__saved_values(x, first, tt__min(TT__PIECE, x->p->size - first), all + first);
    const int64_t rows = x->p->dims[0], width = x->p->ndim > 1 ? x->p->dims[1] : 1, size = o->rows * o->width;
    for (int64_t first = 0, n; first < size && status == TT_OK; first += n) {
        n = tt__min(TT__PIECE, size - first);
        for (int64_t k = 0; k < n; k++) {
            const int64_t at = first + k, r = at / o->width, c = at % o->width;
            if (o->kind == 't') piece[k] = all[at % o->rows * o->width + at / o->rows];
            else piece[k] = r < rows && c < width ? all[r * width + c] : 0;
        }
        tt__convert(converted, as, piece, TT_F32, (size_t)n);
        status = tt_safetensors_write(w, converted, (size_t)n * tt_dtype_bytes(as));
    }
    tt__free(ctx, all);
    return status;
}

/* Writes a parameter's elements as floats, in the order that files have (tt__packing). */
static tt_status tt__save_floats(tt_safetensors_writer *w, const tt__saved_param *x, tt_dtype as,
                                 float *piece, void *converted)
{
    const tt__packing *o = &x->order;
    tt_status status = TT_OK;
    if (!o->kind) return tt__save_elements(w, x, 0, x->p->size, as, piece, converted);
    if (o->kind == 't' || o->kind == 'p') return tt__save_moved(w, x, as, piece, converted);
    for (int64_t r = 0; r < o->rows && status == TT_OK; r += o->size)
        status = tt__save_elements(w, x, tt__packing_row(o, r, true) * o->width, o->size * o->width, as,
                                   piece, converted);
    return status;
}

/* Sets `values`, memory for tt_param.size numbers and p->dims[0] more, to the numbers for which the codes of
   a coded parameter stand, or the roundings of a rounded one. */
static tt_status tt__coded_values(const tt__saved_param *x, float *values)
{
    const tt_param *p = x->p;
    if (x->rounded) {
        tt_status status = tt__read_rounded(p, values, values + p->size);
        for (int64_t k = 0; k < p->size && status == TT_OK; k++)
            values[k] *= values[p->size + k / p->dims[1]];
        return status;
    }
    const int64_t cols = p->size / p->dims[0];
    uint8_t *codes = (uint8_t *)tt__alloc(p->ctx, tt__matrix_bytes(p->form, p->dims[0], cols));
    tt_status status = codes ? tt__bnb_codes_of(p, codes) : TT_ERR_MEMORY;
    if (status == TT_OK) {
        const tt__codes c = tt__codes_at(codes, p->form, p->dims[0], cols);
        tt__widen_codes(values, &c, 0, p->size);
    }
    tt__free(p->ctx, codes);
    return status;
}

/* Writes a parameter: its codes, or its elements as floats. A coded parameter that no program has in memory
   is coded first, so that the floats are those that its codes stand for. A rounded parameter that files have
   in another order, or as a part of a tensor, is written as its rounded numbers. */
static tt_status tt__save_param(tt_safetensors_writer *w, const tt__saved_param *x, tt_dtype as, float *piece,
                                void *converted)
{
    const tt_param *p = x->p;
    if (tt__is_coded(x->form)) return tt__bnb_write(w, p, &x->order);
    if (x->packed) return tt__save_packed(w, p);
    const bool codes = tt__is_coded(p->form) && !tt__has_memory(p) && !p->read_codes;
    if (!codes && !x->rounded) return tt__save_floats(w, x, as, piece, converted);
    tt__saved_param own = *x;
    float *values = (float *)tt__alloc(p->ctx, sizeof *values * (size_t)(p->size + p->dims[0]));
    tt_status status = values ? tt__coded_values(x, values) : TT_ERR_MEMORY;
    own.values = values;
    if (status == TT_OK) status = tt__save_floats(w, &own, as, piece, converted);
    tt__free(p->ctx, values);
    return status;
}

/* The tensors of a model to save, in one file or in several. Each file holds consecutive tensors. */
typedef struct tt__saved_files {
    tt_tensor_info *info;
    char (*names)[256];
    int *file;    /* for each tensor: number of its file; before tt__deal_out: whether the tensor must be in
                     the file of the tensor before it */
    int tensors, files;
    size_t bytes; /* bytes of all tensors */
    char id[17];  /* tells which files belong to one save; "" for a single file */
} tt__saved_files;

static const char tt__save_key[] = "tinytrain.save"; /* key of the id in the metadata of each file */

static void tt__saved_file_name(const tt__saved_files *f, int k, char name[64])
{
    if (f->files == 1) snprintf(name, 64, "model.safetensors");
    else snprintf(name, 64, "model-%05d-of-%05d.safetensors", k + 1, f->files);
}

static void tt__print_index(tt__text_buffer *json, const void *arg)
{
    const tt__saved_files *f = (const tt__saved_files *)arg;
    char name[64];
    tt__print(json, "{\n  \"metadata\": {\"total_size\": %zu},\n  \"weight_map\": {\n", f->bytes);
    for (int k = 0; k < f->tensors; k++) {
        tt__saved_file_name(f, f->file[k], name);
        tt__print(json, "    \"%s\": \"%s\"%s\n", f->names[k], name, k + 1 < f->tensors ? "," : "");
    }
    tt__print(json, "  }\n}\n");
}

/* Assigns the tensors to files of at most `max` bytes (0: one file for all). A larger tensor gets its own
   file. */
static void tt__deal_out(tt__saved_files *f, size_t max)
{
    size_t held = 0;
    f->files = 1;
    f->bytes = 0;
    for (int k = 0; k < f->tensors; k++) {
        size_t bytes = 0;
        tt__safetensors_size(&f->info[k], tt__safetensors_type(f->info[k].dtype), &bytes);
        if (max && held && !f->file[k] && (held >= max || bytes > max - held)) {
            f->files++;
            held = 0;
        }
        held += bytes;
        f->bytes += bytes;
        f->file[k] = f->files - 1;
    }
}

/* Sets the id of a save in several files. A save replaces the files of an older save one by one; if it is
   interrupted, the ids show which files are old. The id is a hash of the first numbers of each parameter, so
   that the same model gives the same files. */
static tt_status tt__save_id(tt__saved_files *f, const tt__saved_param *param, int params, float *piece)
{
    enum { SOME = 1024 };
    uint64_t hash = tt__hash_on(TT__HASH_BEGIN, &f->bytes, sizeof f->bytes);
    tt_status status = TT_OK;
    for (int k = 0; k < params && status == TT_OK; k++) {
        const int64_t n = tt__min(SOME, param[k].p->size);
        status = tt__param_read(param[k].p, 0, n, piece);
        if (status == TT_OK) hash = tt__hash_on(hash, piece, sizeof *piece * (size_t)n);
    }
    status = tt__net_fail(param[0].p->ctx, status); /* other processes may wait to send their shards */
    snprintf(f->id, sizeof f->id, "%016llx", (unsigned long long)hash);
    return status;
}

/* Writes file number `file` of a model into a folder. All processes call the function together. */
static tt_status tt__save_file(tt_context *ctx, const char *folder, const tt__saved_files *f, int file,
                               const tt__saved_param *param, int params, tt_dtype dtype, float *piece)
{
    const char *const metadata[] = {"format", "pt", f->files > 1 ? tt__save_key : NULL, f->id, NULL};
    char path[TT__PATH], name[64];
    int first = 0, n = 0;
    tt_safetensors_writer *w = NULL;
    while (first < f->tensors && f->file[first] < file) first++;
    while (first + n < f->tensors && f->file[first + n] == file) n++;
    tt__saved_file_name(f, file, name);
    tt_status status = tt__path_join(ctx, path, folder, name);
    if (status == TT_OK && !(w = tt_safetensors_begin(ctx, path, f->info + first, n, metadata)))
        status = ctx->status;
    status = tt__agree(ctx, "saving a model", status, NULL, 0);
    const bool began = status == TT_OK;
    for (int k = 0; k < params && status == TT_OK; k++)
        if (f->file[param[k].tensor] == file)
            status = tt__save_param(w, &param[k], dtype, piece, piece + TT__PIECE);
    if (began) status = tt__net_fail(ctx, status); /* other processes may wait to send their shards */
    status = tt__safetensors_finish(w, status);
    return tt__agree(ctx, "the end of saving a model", status, NULL, 0);
}

/* The state of a search for a file of an earlier save. A file is from an earlier save if its name, such as
   "model-00001-of-00003.safetensors", has a number of files other than `files`. */
typedef struct tt__stale_files { int files; char name[64]; } tt__stale_files;

static bool tt__find_stale(void *arg, const char *name)
{
    tt__stale_files *s = (tt__stale_files *)arg;
    int number = 0, of = 0, end = 0;
    const bool ours = strlen(name) == strlen("model-00001-of-00002.safetensors") &&
                      sscanf(name, "model-%5d-of-%5d.safetensors%n", &number, &of, &end) == 2 && !name[end];
    if (!ours || of == s->files) return true;
    snprintf(s->name, sizeof s->name, "%s", name);
    return false;
}

/* Removes from a folder the files of earlier saves that consist of several files. files: number of files of
   this save. */
static tt_status tt__remove_stale(tt_context *ctx, const char *folder, int files)
{
    char path[TT__PATH];
    const tt_files *hooks = &ctx->options.files;
    for (;;) {
        tt__stale_files stale = {files, ""};
        if (!hooks->list(hooks->user, folder, tt__find_stale, &stale))
            return tt__fail(ctx, TT_ERR_FILE, "cannot list the folder '%s': %s", folder,
                            hooks->reason(hooks->user));
        tt_status status = stale.name[0] ? tt__path_join(ctx, path, folder, stale.name) : TT_OK;
        if (status != TT_OK || !stale.name[0] || !hooks->remove(hooks->user, path)) return status;
    }
}

/* Prints a JSON list of the modules whose weights are saved as floats: linear layers that the model could not
   code, embeddings, and the layer of the logits, also if its weight is the embedding. form: the format of
   coded matrices; TT_F32: packed weights are those in few bits. */
static void tt__print_modules_of_floats(tt__text_buffer *json, const tt__layout *l, tt_dtype form)
{
    static const char *const heads[] = {"lm_head", "embed_out"};
    const tt__tensor_row *row;
    char name[256];
    bool few[2] = {false, false}; /* whether each head is in few bits */
    for (int list = 0; list < 2; list++) {
        for (int k = 0; k < 2 && list; k++)
            if (!few[k]) tt__print(json, "%s\"%s\"", k && !few[0] ? ", " : "[", heads[k]);
        for (int k = 0; (row = tt__layout_row(l, k, name)) != NULL; k++) {
            const tt__saved_param x = tt__saved_as(l, row, k, form);
            if (!x.p || x.p->ndim != 2 || !tt__match("*.weight", name)) continue;
            const bool in_few = tt__is_coded(form) ? tt__is_coded(x.form) : x.packed;
            int head = 0;
            name[strlen(name) - strlen(".weight")] = 0;
            while (head < 2 && strcmp(name, heads[head]) != 0) head++;
            if (head < 2 && in_few) few[head] = true;
            if (list && head == 2 && !in_few) tt__print(json, ", \"%s\"", name);
        }
    }
    tt__print(json, "]");
}

/* Prints "quantization_config" of config.json, by which transformers reads weights in bitsandbytes' layout,
   or ternary weights if all packed weights are ternary and packed in whole bytes. A model that has coded
   matrices has no second one for its packed weights. */
static void tt__print_few_bits(tt__text_buffer *json, const tt__layout *l)
{
    const tt__tensor_row *row;
    const tt_dtype form = tt__bnb_form(l);
    char name[256];
    int packed = 0, others = 0;
    for (int k = 0; (row = tt__layout_row(l, k, name)) != NULL; k++) {
        const tt__saved_param x = tt__saved_as(l, row, k, form);
        const bool fits = x.packed && x.p->rounding == TT_ROUND_TERNARY && x.p->dims[0] % 4 == 0;
        packed += fits;
        others += x.packed && !fits;
    }
    if (!tt__is_coded(form) && (!packed || others)) return;
    tt__print(json, "  \"quantization_config\": {\"quant_method\": ");
    if (form == TT__INT8)
        tt__print(json, "\"bitsandbytes\", \"load_in_8bit\": true, \"load_in_4bit\": false, "
                  "\"llm_int8_threshold\": 6.0,\n    \"llm_int8_skip_modules\": ");
    else if (form == TT__NF4)
        tt__print(json, "\"bitsandbytes\", \"load_in_8bit\": false, \"load_in_4bit\": true, "
                  "\"bnb_4bit_quant_type\": \"nf4\", \"bnb_4bit_use_double_quant\": true, "
                  "\"bnb_4bit_compute_dtype\": \"float32\", \"bnb_4bit_quant_storage\": \"uint8\",\n"
                  "    \"llm_int8_skip_modules\": ");
    else
        tt__print(json, "\"bitnet\", \"modules_to_not_convert\": ");
    tt__print_modules_of_floats(json, l, form);
    tt__print(json, "},\n");
}

/* Makes the last tensor of f, whose name is `name`, packed, and adds the tensor of its scales. */
static void tt__add_packed(tt__saved_files *f, const tt_param *p, const char *name)
{
    tt_tensor_info *weight = &f->info[f->tensors - 1], *scale = weight + 1;
    weight->dtype = tt__packed_dims(p->rounding, p->dims[0], p->dims[1], weight, scale);
    snprintf(f->names[f->tensors], sizeof *f->names, "%.240s_scale", name);
    f->file[f->tensors] = 1;
    scale->name = f->names[f->tensors++];
    scale->dtype = tt__dtypes[TT_F32].safetensors;
}

/* Writes model.safetensors into a folder, which is created if it does not exist. If the tensors take more
   than `max` bytes (0: no limit), writes several files and an index. All tensors have the dtype of the first
   parameter, or fp32 if no program holds that parameter; sets *dtype to that dtype. */
static tt_status tt__layout_save(const tt__layout *l, const char *folder, size_t max, tt_dtype *dtype)
{
    tt_context *ctx = l->ctx;
    const tt__tensor_row *row;
    char path[TT__PATH], name[256];
    const size_t all = (size_t)(l->a->n_model + l->a->n_layer * l->layers) * TT__BNB_TENSORS;
    int params = 0;
    tt__saved_files f;
    memset(&f, 0, sizeof f);
    *dtype = TT_F32;
    bool adapter = false;
    const tt_dtype form = tt__bnb_form(l);
    tt_status status = tt__make_folder(ctx, folder);
    if (status == TT_OK) status = tt__folder_has(ctx, folder, "adapter_config.json", &adapter);
    if (adapter)
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' holds an adapter (adapter_config.json), which "
                          "transformers would add to the model that is to be saved there: name another "
                          "folder", folder);
    if (status != TT_OK) return status;
    f.info = (tt_tensor_info *)tt__calloc(ctx, sizeof *f.info * all);
    f.names = (char(*)[256])tt__alloc(ctx, sizeof *f.names * all);
    f.file = (int *)tt__calloc(ctx, sizeof *f.file * all);
    tt__saved_param *param = (tt__saved_param *)tt__alloc(ctx, sizeof *param * all);
    float *piece = (float *)tt__alloc(ctx, sizeof(float) * TT__PIECE * 2);
    if (!f.info || !f.names || !f.file || !param || !piece) status = TT_ERR_MEMORY;
    for (int k = 0; status == TT_OK && (row = tt__layout_row(l, k, name)) != NULL; k++) {
        const tt__part_of part = tt__layout_part(l, row);
        const char *prefix = l->a->prefix[l->naming];
        const bool cut = l->bare && strncmp(name, prefix, strlen(prefix)) == 0;
        tt__saved_param *x = &param[params];
        *x = tt__saved_as(l, row, k, form);
        const tt_param *p = x->p;
        if (!p) continue;
        if (!params++ && p->owner) *dtype = tt__param_placement(p)->dtype;
        x->tensor = f.tensors - (part.number > 1);
        if (part.number > 1) continue; /* stored in the tensor of the first part */
        if (tt__is_coded(x->form)) {
            const int n = tt__bnb_infos(p, name + (cut ? strlen(prefix) : 0), f.info + f.tensors,
                                        f.names + f.tensors);
            for (int i = 1; i < n; i++) f.file[f.tensors + i] = 1;
            f.tensors += n;
            continue;
        }
        snprintf(f.names[f.tensors], sizeof name, "%s", name + (cut ? strlen(prefix) : 0));
        f.info[f.tensors].name = f.names[f.tensors];
        f.info[f.tensors].dtype = tt__dtypes[*dtype].safetensors;
        f.info[f.tensors].ndim = tt__file_dims(l, row, f.info[f.tensors].dims);
        if (part.of) f.info[f.tensors].dims[0] *= part.of;
        f.tensors++;
        if (x->packed) tt__add_packed(&f, p, name + (cut ? strlen(prefix) : 0));
    }
    if (status == TT_OK) tt__deal_out(&f, max);
    else status = tt__agree(ctx, "saving a model", status, NULL, 0); /* tells other processes of the error */
    if (status == TT_OK && f.files > 1) status = tt__save_id(&f, param, params, piece);
    for (int k = 0; k < f.files && status == TT_OK; k++)
        status = tt__save_file(ctx, folder, &f, k, param, params, *dtype, piece);
    const char *index = "model.safetensors.index.json", *stale = f.files > 1 ? "model.safetensors" : index;
    if (status == TT_OK && f.files > 1) status = tt__save_printed(ctx, folder, index, tt__print_index, &f);
    if (status == TT_OK) status = tt__path_join(ctx, path, folder, stale); /* path of a file that an earlier
                                                                              save may have left */
    if (status == TT_OK && tt_process(ctx) == 0) {
        ctx->options.files.remove(ctx->options.files.user, path);
        status = tt__remove_stale(ctx, folder, f.files);
    }
    void *const owned[] = {piece, param, f.file, f.names, f.info};
    tt__free_all(ctx, owned, TT__COUNT(owned));
    return status;
}
