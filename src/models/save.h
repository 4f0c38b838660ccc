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

/* ---- saving to checkpoint files */

typedef struct tt__saved_param {
    const tt_param *p;
    tt__packing order;
    int tensor; /* index in tt__saved_files of the tensor that has the parameter */
} tt__saved_param;

/* Writes elements [first, first + n) of parameter p to w as dtype `as`. piece, converted: scratch memory for
   TT__PIECE floats each. */
static tt_status tt__save_elements(tt_safetensors_writer *w, const tt_param *p, int64_t first, int64_t n,
                                   tt_dtype as, float *piece, void *converted)
{
    tt_status status = TT_OK;
    for (const int64_t end = first + n; first < end && status == TT_OK; first += TT__PIECE) {
        const int64_t part = tt__min(TT__PIECE, end - first);
        status = tt__param_read(p, first, part, piece);
        if (status != TT_OK) break;
        tt__convert(converted, as, piece, TT_F32, (size_t)part);
        status = tt_safetensors_write(w, converted, (size_t)part * tt_dtype_bytes(as));
    }
    return status;
}

/* Writes the transpose of a parameter, with temporary memory for the whole parameter in fp32. */
static tt_status tt__save_transposed(tt_safetensors_writer *w, const tt__saved_param *x, tt_dtype as,
                                     float *piece, void *converted)
{
    tt_context *ctx = x->p->ctx;
    const tt__packing *o = &x->order;
    float *all = (float *)tt__alloc(ctx, sizeof *all * (size_t)x->p->size);
    tt_status status = all ? TT_OK : TT_ERR_MEMORY;
    for (int64_t first = 0; first < x->p->size && status == TT_OK; first += TT__PIECE)
        status = tt__param_read(x->p, first, tt__min(TT__PIECE, x->p->size - first), all + first);
    for (int64_t first = 0, n; first < x->p->size && status == TT_OK; first += n) {
        n = tt__min(TT__PIECE, x->p->size - first);
        for (int64_t k = 0; k < n; k++)
            piece[k] = all[(first + k) % o->rows * o->width + (first + k) / o->rows];
        tt__convert(converted, as, piece, TT_F32, (size_t)n);
        status = tt_safetensors_write(w, converted, (size_t)n * tt_dtype_bytes(as));
    }
    tt__free(ctx, all);
    return status;
}

/* Writes a parameter's elements in the order that files have (tt__packing). */
static tt_status tt__save_param(tt_safetensors_writer *w, const tt__saved_param *x, tt_dtype as, float *piece,
                                void *converted)
{
    const tt__packing *o = &x->order;
    tt_status status = TT_OK;
    if (!o->kind) return tt__save_elements(w, x->p, 0, x->p->size, as, piece, converted);
    if (o->kind == 't') return tt__save_transposed(w, x, as, piece, converted);
    for (int64_t r = 0; r < o->rows && status == TT_OK; r += o->size)
        status = tt__save_elements(w, x->p, tt__packing_row(o, r, true) * o->width, o->size * o->width, as,
                                   piece, converted);
    return status;
}

/* The tensors of a model to save, in one file or in several. Each file holds consecutive tensors. */
typedef struct tt__saved_files {
    tt_tensor_info *info;
    char (*names)[256];
    int *file;    /* for each tensor: number of its file */
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
static void tt__deal_out(tt__saved_files *f, tt_dtype dtype, size_t max)
{
    size_t held = 0;
    f->files = 1;
    f->bytes = 0;
    for (int k = 0; k < f->tensors; k++) {
        size_t bytes = tt_dtype_bytes(dtype);
        for (int d = 0; d < f->info[k].ndim; d++) bytes *= (size_t)f->info[k].dims[d];
        if (max && held && (held >= max || bytes > max - held)) {
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

/* The state of a search for a file of an earlier save. The name of the file has a number of files that is not
   `files`. */
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

/* Writes model.safetensors into a folder, which is created if it does not exist. If the tensors take more
   than `max` bytes (0: no limit), writes several files and an index. All tensors have the dtype of the first
   parameter, or fp32 if no program holds that parameter; sets *dtype to that dtype. */
static tt_status tt__layout_save(const tt__layout *l, const char *folder, size_t max, tt_dtype *dtype)
{
    tt_context *ctx = l->ctx;
    const tt__tensor_row *row;
    char path[TT__PATH], name[256];
    const size_t all = (size_t)(l->a->n_model + l->a->n_layer * l->layers);
    int params = 0;
    tt__saved_files f;
    memset(&f, 0, sizeof f);
    *dtype = TT_F32;
    bool adapter = false;
    tt_status status = tt__make_folder(ctx, folder);
    if (status == TT_OK) status = tt__folder_has(ctx, folder, "adapter_config.json", &adapter);
    if (adapter)
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' holds an adapter (adapter_config.json), which "
                          "transformers would add to the model that is to be saved there: name another "
                          "folder", folder);
    if (status != TT_OK) return status;
    f.info = (tt_tensor_info *)tt__calloc(ctx, sizeof *f.info * all);
    f.names = (char(*)[256])tt__alloc(ctx, sizeof *f.names * all);
    f.file = (int *)tt__alloc(ctx, sizeof *f.file * all);
    tt__saved_param *param = (tt__saved_param *)tt__alloc(ctx, sizeof *param * all);
    float *piece = (float *)tt__alloc(ctx, sizeof(float) * TT__PIECE * 2);
    if (!f.info || !f.names || !f.file || !param || !piece) status = TT_ERR_MEMORY;
    for (int k = 0; status == TT_OK && (row = tt__layout_row(l, k, name)) != NULL; k++) {
        const tt_param *p = *tt__layout_slot(l, row, k);
        const int part = tt__layout_part(l, row);
        int64_t dims[4] = {0};
        const int ndim = tt__row_dims(l, row, dims);
        if (!p || !ndim) continue;
        if (!params && p->owner) *dtype = tt__param_placement(p)->dtype;
        param[params].p = p;
        param[params].order = tt__row_order(l, row, ndim, dims);
        param[params++].tensor = f.tensors - (part > 1);
        if (part > 1) continue; /* stored in the tensor of the first part */
        const char *prefix = l->a->prefix[l->naming];
        const bool cut = l->bare && strncmp(name, prefix, strlen(prefix)) == 0;
        snprintf(f.names[f.tensors], sizeof name, "%s", name + (cut ? strlen(prefix) : 0));
        f.info[f.tensors].name = f.names[f.tensors];
        f.info[f.tensors].dtype = tt__dtypes[*dtype].safetensors;
        f.info[f.tensors].ndim = tt__file_dims(l, row, f.info[f.tensors].dims);
        if (part) f.info[f.tensors].dims[0] *= 3;
        f.tensors++;
    }
    if (status == TT_OK) tt__deal_out(&f, *dtype, max);
    else status = tt__agree(ctx, "saving a model", status, NULL, 0); /* tells other processes of the error */
    if (status == TT_OK && f.files > 1) status = tt__save_id(&f, param, params, piece);
    for (int k = 0; k < f.files && status == TT_OK; k++)
        status = tt__save_file(ctx, folder, &f, k, param, params, *dtype, piece);
    const char *index = "model.safetensors.index.json", *stale = f.files > 1 ? "model.safetensors" : index;
    if (status == TT_OK && f.files > 1) status = tt__save_printed(ctx, folder, index, tt__print_index, &f);
    if (status == TT_OK) status = tt__path_join(ctx, path, folder, stale); /* a file of an earlier save */
    if (status == TT_OK && tt_process(ctx) == 0) {
        ctx->options.files.remove(ctx->options.files.user, path);
        status = tt__remove_stale(ctx, folder, f.files);
    }
    void *const owned[] = {piece, param, f.file, f.names, f.info};
    tt__free_all(ctx, owned, TT__COUNT(owned));
    return status;
}
