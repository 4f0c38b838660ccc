#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../passes/precision.h"
#include "../ranks/processes.h"
#include "../context/memory.h"
#include "../context/devices.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "../run/ranks.h"
#include "../run/inputs.h"
#include "../run/tune.h"
#include "../run/state.h"
#include "../files/safetensors.h"
#include "trainer.h"

/* -------------------------------------------------------------------------------------------------- state
   Saves and loads the state of a run: parameters, optimizer states, and a trainer's progress. */

/* A state that is being written or read. The first tensor of its file is the header, the last is the
   trainer's progress. */
typedef struct tt__state {
    tt_program *p;
    const char *path;
    tt__kept *kept;       /* `count` + `frozen` entries */
    tt_tensor_info *info; /* header, `count` values, fp8 history, hashes of frozen values, progress */
    int count, frozen, tensors;
    tt__state_header header;
    tt_safetensors *file; /* the file being read */
    char *piece;          /* buffer of `room` bytes, the size of a message between processes */
    size_t room;
    char *products;       /* text to write, which tells how the devices compute matrix products; NULL:
                             products were not timed */
} tt__state;

static void tt__state_close(tt__state *s)
{
    tt__free(s->p->ctx, s->kept);
    tt__free(s->p->ctx, s->info);
    tt__free(s->p->ctx, s->piece);
    tt__free(s->p->ctx, s->products);
    tt_safetensors_close(s->file);
}

static const char tt__other_key[] = "tinytrain.other_model"; /* a key, too: see tt__other_model */
static const char tt__products_key[] = "tinytrain.products"; /* key in the metadata of a state */

/* Makes the devices compute matrix products in the way that the state tells. Warns if the
   devices cannot, because sums may then be rounded differently. */
static tt_status tt__state_products(const tt__state *s)
{
    tt_program *p = s->p;
    char from[1100];
    const char *text = tt_safetensors_metadata(s->file, tt__products_key);
    const bool can = p->tunes && p->settings.kind->backend->learn;
    if (!p->settings.kind->backend->learn || (!text && (!can || !s->header.step))) return TT_OK;
    snprintf(from, sizeof from, "'%s', %s", s->path, tt__products_key);
    tt_status status = text && can ? tt__learn_on_ranks(p, text, from) : TT_OK;
    const bool foreign = status == TT_ERR_UNSUPPORTED;
    if (foreign) status = TT_OK;
    if (status != TT_OK) return status;
    if (text && can && !foreign) {
        p->arena->learnt = true;
        p->arena->tuned = false; /* the next run then computes products as the state says */
        tt__forget_recordings(p);
        return TT_OK;
    }
    tt__log(p->ctx, TT_LOG_WARNING, "resume", "'%s' comes from a run %s: this run continues, and differs by "
            "rounding from a run without interruption", s->path,
            foreign ? "whose products were timed on another kind of device or with another cuBLASLt" : text ?
            "with tune, but this run has none" : "without tune, but this run has it");
    return TT_OK;
}

static void tt__state_integers(tt_tensor_info *info, const char *name, size_t bytes)
{
    info->name = name;
    info->dtype = "I64";
    info->ndim = 1;
    info->bytes = bytes;
    info->dims[0] = (int64_t)bytes / 8;
}

/* Lists the tensors of a program's state. more: bytes of the tensor "tinytrain.progress"; 0: no such tensor.
   The caller closes s with tt__state_close, even after an error. */
static tt_status tt__state_list(tt__state *s, tt_program *p, const char *path, size_t more)
{
    tt_context *ctx = p->ctx;
    memset(s, 0, sizeof *s);
    s->p = p;
    s->path = path;
    if (!p->settings.options.train)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "this program does not train, so it has no state to save or "
                        "load: compile it with train = true");
    if (!(s->kept = tt__kept_of(p, &s->count, &s->frozen))) return ctx->status;
    s->info = (tt_tensor_info *)tt__calloc(ctx, sizeof *s->info * (size_t)(s->count + 4));
    s->room = ctx->net ? (size_t)1 << 20 : 16384;
    s->piece = (char *)tt__alloc(ctx, s->room);
    tt_status status = s->info && s->piece ? tt_allocate(p) : TT_ERR_MEMORY;
    if (status == TT_OK) status = tt__zero_states(p);
    if (status != TT_OK) return status;
    const tt_tape *t = p->built.t;
    s->tensors = 1 + s->count + (t->fp8_history != 0) + (s->frozen > 0) + (more > 0);
    tt__state_integers(&s->info[0], "tinytrain.run", sizeof s->header);
    for (int k = 0; k < s->count; k++) {
        const tt_program *stage = p->stage[s->kept[k].stage];
        const tt__tape_value *x = &stage->built.t->values[s->kept[k].value];
        const tt__stored stored = tt__kept_stored(ctx, x, stage->arena);
        const tt_param *param = ctx->params[x->param];
        tt_tensor_info *info = &s->info[k + 1];
        info->name = s->kept[k].name;
        info->dtype = x->shape.dtype == TT_U8 ? "U8" : tt__dtypes[x->shape.dtype].safetensors;
        info->ndim = x->row_state ? 1 + (stored.rows > 1) : param->ndim;
        memcpy(info->dims, param->dims, sizeof param->dims);
        if (x->row_state) info->dims[0] = stored.rows > 1 ? stored.rows : stored.cols;
        if (x->row_state) info->dims[1] = stored.cols;
        info->bytes = tt__matrix_bytes(x->shape.dtype, stored.rows, stored.cols);
    }
    if (t->fp8_history) {
        tt_tensor_info *info = &s->info[s->count + 1];
        info->name = "tinytrain.fp8";
        info->dtype = tt__dtypes[TT_F32].safetensors;
        info->ndim = 2;
        info->dims[0] = t->values[t->fp8_history].shape.rows;
        info->dims[1] = t->values[t->fp8_history].shape.cols;
        info->bytes = (size_t)(info->dims[0] * info->dims[1]) * sizeof(float);
    }
    if (s->frozen)
        tt__state_integers(&s->info[s->tensors - 1 - (more > 0)], "tinytrain.frozen",
                           sizeof(uint64_t) * (size_t)s->frozen);
    if (more) tt__state_integers(&s->info[s->tensors - 1], "tinytrain.progress", more);
    return TT_OK;
}

/* Copies the rows of the fp8 history that a stage uses: from the first rank of the stage to `history` or, if
   `write`, from `history` to each rank of the stage. All ranks of a stage have equal rows. */
static tt_status tt__stage_fp8(const tt__state *s, int stage, bool write, float *history)
{
    const tt_program *p = s->p->stage[stage];
    const tt_tape *t = p->built.t;
    const tt__arena *a = p->arena;
    const int first = tt__first_rank(a);
    const size_t bytes = (1 + TT__FP8_STEPS) * sizeof(float);
    tt_status status = TT_OK;
    for (int k = 0; k < t->n_code && status == TT_OK; k++) {
        const int32_t known = t->code[k].in[1];
        if (t->values[known].base != t->fp8_history) continue;
        float *to = history + t->values[known].offset;
        for (int r = tt__near_rank(a); r < tt__near_end(a) && status == TT_OK; r++) {
            const tt__memory x = {a, r, TT__DEVICE, TT_U8, tt__resolve(p, r, known).data};
            if (write) status = tt__write_memory(&x, to, TT_U8, bytes);
            else if (r == first) status = tt__read_memory(&x, to, TT_U8, bytes);
        }
        if (!write && status == TT_OK) status = tt__net_to_first(a->group, first, to, bytes);
    }
    return status;
}

/* Writes the fp8 history to a file or, if w is NULL, reads it from the file. If the file has no fp8 history,
   sets the history to zeros. */
static tt_status tt__state_move_fp8(const tt__state *s, tt_safetensors_writer *w)
{
    const tt_tensor_info *info = &s->info[s->count + 1];
    if (!s->p->built.t->fp8_history) return TT_OK;
    float *history = (float *)tt__calloc(s->p->ctx, info->bytes);
    const int tensor = w ? -1 : tt_safetensors_find(s->file, info->name);
    tt_status status = history ? TT_OK : TT_ERR_MEMORY;
    if (tensor >= 0 && history) status = tt_safetensors_read(s->file, tensor, 0, info->bytes, history);
    for (int k = 0; k < s->p->stages && status == TT_OK; k++) status = tt__stage_fp8(s, k, !w, history);
    if (w && status == TT_OK) status = tt_safetensors_write(w, history, info->bytes);
    tt__free(s->p->ctx, history);
    return status;
}

/* Adds the bytes of coded matrix k, a frozen parameter of program p, to *hash, by two at a time. */
static tt_status tt__state_hash_codes(const tt__state *s, int k, const tt_program *p, uint64_t *hash)
{
    const tt__tape_value *x = &p->built.t->values[s->kept[k].value];
    tt_param *param = p->ctx->params[x->param];
    const size_t size = tt__matrix_bytes(x->shape.dtype, x->shape.rows, x->shape.cols);
    tt_status status = TT_OK;
    for (size_t at = 0, n; at < size && status == TT_OK; at += n) {
        n = size - at < s->room ? size - at : s->room;
        status = tt__param_read_codes(param, at, n, s->piece);
        if (n % 2) s->piece[n] = 0;
        if (status == TT_OK) *hash = tt__hash_elements(*hash, s->piece, (n + 1) / 2 * 2, 2);
    }
    return status;
}

/* Collects a tensor of the state from its ranks, and writes it to a file or, if w is NULL, adds it to *hash.
   Only process 0 gets the whole hash. */
static tt_status tt__state_write(const tt__state *s, int k, tt_safetensors_writer *w, uint64_t *hash)
{
    const tt_program *p = s->p->stage[s->kept[k].stage];
    const tt__tape_value *x = &p->built.t->values[s->kept[k].value];
    const tt__stored stored = tt__kept_stored(p->ctx, x, p->arena);
    const int64_t size = stored.rows * stored.cols, item = (int64_t)tt_dtype_bytes(x->shape.dtype);
    tt_status status = TT_OK;
    if (tt__is_coded(x->shape.dtype)) return tt__state_hash_codes(s, k, p, hash);
    for (int64_t e = 0, n; e < size && status == TT_OK; e += n) {
        int rank;
        const int64_t at = tt__stored_at(&stored, e, &rank, &n);
        char *from = (char *)tt__resolve(p, rank, s->kept[k].value).data;
        n = tt__min(n, (int64_t)s->room / item);
        const size_t bytes = (size_t)(n * item);
        const tt__memory memory = {p->arena, rank, x->space, TT_U8, from ? from + at * item : NULL};
        if (from) status = tt__read_memory(&memory, s->piece, TT_U8, bytes);
        if (status == TT_OK) status = tt__net_to_first(p->arena->group, rank, s->piece, bytes);
        if (status == TT_OK && w) status = tt_safetensors_write(w, s->piece, bytes);
        if (status == TT_OK && !w) *hash = tt__hash_elements(*hash, s->piece, bytes, item);
    }
    return status;
}

/* Writes the hashes of frozen parameters to a file or, if w is NULL, compares them with the hashes in the
   file. */
static tt_status tt__state_frozen(const tt__state *s, tt_safetensors_writer *w)
{
    tt_context *ctx = s->p->ctx;
    const size_t bytes = sizeof(uint64_t) * (size_t)s->frozen;
    uint64_t *hash = (uint64_t *)tt__alloc(ctx, bytes + 1), *read = (uint64_t *)tt__alloc(ctx, bytes + 1);
    const int tensor = w ? -1 : tt_safetensors_find(s->file, "tinytrain.frozen");
    tt_status status = hash && read ? TT_OK : TT_ERR_MEMORY;
    for (int k = 0; k < s->frozen && status == TT_OK; k++) {
        hash[k] = TT__HASH_BEGIN;
        status = tt__state_write(s, s->count + k, NULL, &hash[k]);
    }
    if (!w) status = tt__net_fail(ctx, status); /* other processes may wait for this process's shards */
    if (status == TT_OK && s->frozen)
        status = w ? tt_safetensors_write(w, hash, bytes)
                   : tt_safetensors_read(s->file, tensor, 0, bytes, read);
    for (int k = 0; k < s->frozen && !w && status == TT_OK && tt_process(ctx) == 0; k++)
        if (hash[k] != read[k])
            status = tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' comes from a run in which the frozen parameter "
                              "'%s' has other values: resume with the model that the run started from",
                              s->path, s->kept[s->count + k].name);
    tt__free(ctx, hash);
    tt__free(ctx, read);
    return status;
}

/* Reads a rank's shard of tensor k of the state from the file. p: the program of a stage; v: the value of p
   that gets the shard. */
static tt_status tt__state_read(const tt__state *s, int k, const tt_program *p, int32_t v, int rank)
{
    const tt__tape_value *x = &p->built.t->values[v];
    const tt__stored stored = tt__kept_stored(p->ctx, x, p->arena);
    const int64_t item = (int64_t)tt_dtype_bytes(x->shape.dtype);
    const int tensor = tt_safetensors_find(s->file, s->kept[k].name);
    char *to = (char *)tt__resolve(p, rank, v).data;
    tt_status status = TT_OK;
    int64_t first, count = tt__stored_shard(&stored, rank, &first);
    for (int64_t at = 0, n; at < count && status == TT_OK; at += n) {
        const int64_t e = tt__stored_element(&stored, rank, at, &n);
        n = tt__min(n, (int64_t)s->room / item);
        const size_t bytes = (size_t)(n * item);
        status = tt_safetensors_read(s->file, tensor, (size_t)(e * item), bytes, s->piece);
        const tt__memory memory = {p->arena, rank, x->space, TT_U8, to + at * item};
        if (status == TT_OK) status = tt__write_memory(&memory, s->piece, TT_U8, bytes);
    }
    return status;
}

/* Writes the tensors of a state to a file or, if w is NULL, reads them from the open file. */
static tt_status tt__state_move(const tt__state *s, tt_safetensors_writer *w)
{
    tt_status status = TT_OK;
    for (int k = 0; k < s->count && status == TT_OK; k++) {
        if (w) status = tt__state_write(s, k, w, NULL);
        for (int stage = 0; stage < s->p->stages && !w; stage++) {
            const tt_program *p = s->p->stage[stage];
            const int32_t v = tt__kept_in(s->p, stage, &s->kept[k]);
            for (int r = tt__near_rank(p->arena); v && r < tt__near_end(p->arena) && status == TT_OK; r++)
                status = tt__state_read(s, k, p, v, r);
        }
    }
    if (status == TT_OK) status = tt__state_move_fp8(s, w);
    return status == TT_OK && w ? tt__state_frozen(s, w) : status;
}

static tt_status tt__not_between_steps(tt_context *ctx)
{
    return tt__fail(ctx, TT_ERR_ARGUMENT, "a state can be saved between steps, but not between the "
                    "micro-batches of a step: save it after the update");
}

/* Writes a program's state to a file, with `more` bytes of a trainer's progress. other: a text of the
   metadata about another model (see tt__other_model), or NULL. */
static tt_status tt__state_save(tt_program *p, const char *path, const void *progress, size_t more,
                                const char *other)
{
    tt__state s;
    tt_safetensors_writer *w = NULL;
    tt_status status = tt_wait(p, NULL);
    const tt__state_header h = tt__state_header_of(p);
    if (status != TT_OK) return status;
    status = tt__state_list(&s, p, path, more);
    if (status == TT_OK) status = tt__check_whole(p->ctx, p->arena);
    if (status == TT_OK && tt__within_step(p)) status = tt__not_between_steps(p->ctx);
    const bool chosen = p->tunes && (p->arena->tuned || p->arena->learnt);
    if (status == TT_OK && chosen && !(s.products = tt__tuned_text(p, p->settings.group->first)))
        status = TT_ERR_MEMORY;
    const char *metadata[5] = {NULL, NULL, NULL, NULL, NULL};
    int n = 0;
    if (other) metadata[n++] = tt__other_key, metadata[n++] = other;
    if (s.products) metadata[n++] = tt__products_key, metadata[n++] = s.products;
    if (status == TT_OK) w = tt_safetensors_begin(p->ctx, path, s.info, s.tensors, metadata);
    if (status == TT_OK) status = w ? tt_safetensors_write(w, &h, sizeof h) : p->ctx->status;
    status = tt__agree(p->ctx, "saving a state", status, NULL, 0);
    if (status == TT_OK) {
        status = tt__state_move(&s, w);
        status = tt__net_fail(p->ctx, status); /* other processes may wait to send their shards */
    }
    if (status == TT_OK && more) status = tt_safetensors_write(w, progress, more);
    status = tt__safetensors_finish(w, status);
    status = tt__agree(p->ctx, "the end of saving a state", status, NULL, 0);
    tt__state_close(&s);
    return status;
}

/* Reads from a state's file how many steps its run has done. */
static tt_status tt__state_steps(tt_context *ctx, const char *path, int64_t *steps)
{
    tt__state_header h;
    tt_safetensors *file = tt_safetensors_open(ctx, path);
    const int k = file ? tt_safetensors_find(file, "tinytrain.run") : -1;
    tt_status status = file ? TT_OK : ctx->status;
    if (k >= 0 && tt_safetensors_info(file, k)->bytes == sizeof h)
        status = tt_safetensors_read(file, k, 0, sizeof h, &h);
    else if (file) status = tt__fail(ctx, TT_ERR_FORMAT, "'%s' is not the state of a run: name a "
                                       "state.safetensors that a run has saved", path);
    if (status == TT_OK) *steps = h.step;
    tt_safetensors_close(file);
    return status;
}

/* Checks that the file has a tensor with the expected name, dtype and shape. */
static tt_status tt__state_has(const tt__state *s, const tt_tensor_info *expected)
{
    int k = tt_safetensors_find(s->file, expected->name);
    if (k < 0)
        return tt__fail(s->p->ctx, TT_ERR_STATE,
                        "'%s' has no tensor '%s': it is the state of another model or optimizer, so resume "
                        "with those that made it", s->path, expected->name);
    const tt_tensor_info *found = tt_safetensors_info(s->file, k);
    bool same = found->ndim == expected->ndim && strcmp(found->dtype, expected->dtype) == 0;
    for (int d = 0; d < expected->ndim && same; d++) same = found->dims[d] == expected->dims[d];
    if (same) return TT_OK;
    return tt__fail(s->p->ctx, TT_ERR_STATE, "'%s': tensor '%s' is %s of %zu bytes, but this run has %s of "
                    "%zu, or another shape: resume with the same model and precision, equal {state_bits} "
                    "and, if these are 8, equal {parallel.tensor}", s->path,
                    expected->name, found->dtype, found->bytes, expected->dtype, expected->bytes);
}

/* Reads the header and checks that the state fits this program. */
static tt_status tt__state_check_header(tt__state *s)
{
    tt_context *ctx = s->p->ctx;
    tt__state_header *h = &s->header;
    const tt__state_header own = tt__state_header_of(s->p);
    const int at = tt_safetensors_find(s->file, s->info[0].name);
    int64_t version = TT__STATE_VERSION;
    tt_status status = TT_OK;
    if (at >= 0 && tt_safetensors_info(s->file, at)->bytes >= sizeof version)
        status = tt_safetensors_read(s->file, at, 0, sizeof version, &version);
    if (version != TT__STATE_VERSION) /* checked first: headers of other versions differ in size */
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' is a state of version %lld, but this build reads version "
                        "%d: resume with the tinytrain.h that wrote the state", s->path, (long long)version,
                        TT__STATE_VERSION);
    if (status == TT_OK) status = tt__state_has(s, &s->info[0]);
    if (status == TT_OK) status = tt_safetensors_read(s->file, at, 0, sizeof *h, h);
    if (status != TT_OK) return status;
    const bool scales = tt__is_power_of_two(h->loss_scale, 1, TT__LOSS_SCALE_MOST);
    if (h->step < 0 || h->step > TT__MAX_STEPS)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' says that %lld steps were done, which is impossible: "
                        "resume from a copy", s->path, (long long)h->step);
    if (!scales || h->good_steps < 0 || h->good_steps > TT__MAX_STEPS || h->skipped < 0 ||
        h->skipped > TT__MAX_STEPS)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' says that %lld steps were skipped, and %lld done with loss "
                        "scale %g, which is impossible: resume from a copy", s->path, (long long)h->skipped,
                        (long long)h->good_steps, h->loss_scale);
    if (h->seed != own.seed)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s' was made with seed %llu, but this run has %llu: open the "
                        "context with the same seed", s->path, (unsigned long long)h->seed,
                        (unsigned long long)own.seed);
    if (h->optimizer != own.optimizer)
        return tt__fail(ctx, TT_ERR_ARGUMENT,
                        "'%s' was made with another optimizer: resume with the same optimizer", s->path);
    if (h->precision != own.precision)
        return tt__fail(ctx, TT_ERR_ARGUMENT,
                        "'%s' was made with another precision than '%s': resume with the same precision",
                        s->path, tt__precision_names[own.precision]);
    return TT_OK;
}

/* Opens a state and checks that it fits the program. tt__state_take then loads the state. */
static tt_status tt__state_open(tt__state *s, tt_program *p, const char *path, size_t more)
{
    tt_safetensors *file = tt_safetensors_open(p->ctx, path);
    memset(s, 0, sizeof *s);
    s->p = p;
    if (!file) return p->ctx->status;
    tt_status status = tt__state_list(s, p, path, more);
    s->file = file;
    if (status == TT_OK) status = tt__state_check_header(s);
    const bool own = p->built.t->fp8_history != 0, has = tt_safetensors_find(file, "tinytrain.fp8") >= 0;
    for (int k = 1; k < s->tensors && status == TT_OK; k++)
        if (has || !own || k != s->count + 1) status = tt__state_has(s, &s->info[k]);
    if (status != TT_OK) return status;
    /* A program may load a trainer's state, whose progress it then ignores, and a state with or without an
       fp8 history. */
    int found = tt_safetensors_count(file) - (!more && tt_safetensors_find(file, "tinytrain.progress") >= 0);
    if (found - has == s->tensors - own) return TT_OK;
    return tt__fail(p->ctx, TT_ERR_STATE,
                    "'%s' has %d tensors, but this run has %d: train and freeze the same parameters", path,
                    found, s->tensors);
}

/* Fails unless all processes have opened a state, with equal headers. */
static tt_status tt__state_agree(tt__state *s, tt_status status)
{
    tt_context *ctx = s->p->ctx;
    status = tt__agree(ctx, "loading a state", status, &s->header, sizeof s->header);
    for (int k = 1; k < tt_processes(ctx) && status == TT_OK; k++) {
        const tt__state_header *a = (const tt__state_header *)tt__noted(ctx, 0, NULL);
        const tt__state_header *b = (const tt__state_header *)tt__noted(ctx, k, NULL);
        char name[96];
        if (memcmp(a, b, sizeof *a) == 0) continue;
        status = tt__fail(ctx, TT_ERR_FILE, "'%s' of %s is another state than that of process 0, after %lld "
                          "steps instead of %lld: give all processes the same state", s->path,
                          tt__process_name(ctx->net, k, name), (long long)b->step, (long long)a->step);
    }
    return status;
}

static tt_status tt__state_take(tt__state *s)
{
    const tt__state_header *h = &s->header;
    tt_program *p = s->p;
    tt_status status = tt__state_frozen(s, NULL);
    if (status == TT_OK) status = tt__state_products(s);
    status = tt__agree(p->ctx, "the frozen parameters of a state", status, NULL, 0);
    if (status != TT_OK) return status;
    status = tt__agree(p->ctx, "the end of loading a state", tt__state_move(s, NULL), NULL, 0);
    if (status != TT_OK) return status;
    p->run.step = h->step;
    p->unread.any = false;
    p->round = 0; /* the next micro-batch begins a step */
    p->arena->partly_updated = false;
    p->results.scale.scale = h->loss_scale;
    p->results.scale.good_steps = (double)h->good_steps;
    p->results.scale.skipped = (double)h->skipped;
    p->scale_set = false;
    if (tt__state_header_of(p).program != h->program)
        tt__log(s->p->ctx, TT_LOG_WARNING, "resume", "'%s' was made with other options of the model, the "
                "optimizer, the batches or the sums (dropout, weight decay, rounding, max_tokens, groups, "
                "...): this run continues with the new ones, and differs from a run without interruption",
                s->path);
    return TT_OK;
}

tt_status tt_program_save(tt_program *p, const char *path) { return tt__state_save(p, path, NULL, 0, NULL); }

tt_status tt_program_load(tt_program *p, const char *path)
{
    tt__state s;
    tt_status status = tt__state_agree(&s, tt__state_open(&s, p, path, 0));
    if (status == TT_OK) status = tt__state_take(&s);
    tt__state_close(&s);
    return status;
}

typedef struct tt__state_progress { /* the I64 tensor "tinytrain.progress"; fields have 8 bytes */
    tt_progress progress;
    int64_t schedule, warmup_steps, total_steps, decay_steps; /* schedule: a tt_schedule_kind; -1: the
                                                                 caller's function lr_at */
    double lr, min_lr;
} tt__state_progress;

static tt__state_progress tt__state_progress_of(const tt_progress *p, const tt_schedule *s)
{
    tt__state_progress h = {*p, (int64_t)s->kind, s->warmup_steps, s->total_steps, s->decay_steps, s->lr,
                            s->min_lr};
    const tt__state_progress by_function = {*p, -1, 0, 0, 0, 0, 0};
    return s->lr_at ? by_function : h;
}

/* Writes to `text` which other model gave the run its numbers: the teacher's logits, or the reference of
   pairs of answers. Returns false if there is no such model. */
static bool tt__other_model(const tt_trainer *r, char text[40])
{
    const tt_teacher *teacher = r->options.teacher;
    const uint64_t hash = teacher ? teacher->model : r->reference;
    snprintf(text, 40, "%s %016llx", teacher ? "teacher" : "reference", (unsigned long long)hash);
    return hash != 0;
}

/* Fails if the state belongs to a run with another teacher, or with the reference of another model. States of
   earlier versions do not say so. */
static tt_status tt__state_same_other(const tt_trainer *r, const tt_safetensors *file, const char *path)
{
    char text[40];
    const char *found = tt_safetensors_metadata(file, tt__other_key);
    if (!found || !tt__other_model(r, text) || strcmp(found, text) == 0) return TT_OK;
    return tt__fail(r->ctx, TT_ERR_ARGUMENT, "'%s' belongs to a run %s: give the %s with which the run began",
                    path, r->options.teacher ? "with the logits of another teacher" :
                    "whose reference is that of another model", r->options.teacher ? "teacher" : "model");
}

tt_status tt_trainer_save(tt_trainer *r, const char *path, const tt_progress *progress)
{
    tt_progress none;
    char other[40];
    tt_status status = tt__must_train(r);
    if (status != TT_OK) return status;
    if (r->staged) return tt__not_between_steps(r->ctx);
    memset(&none, 0, sizeof none);
    const tt__state_progress h = tt__state_progress_of(progress ? progress : &none, &r->options.schedule);
    status = tt__state_save(r->train, path, &h, sizeof h, tt__other_model(r, other) ? other : NULL);
    if (status == TT_OK) r->saved_steps = tt_trainer_steps(r);
    return status;
}

/* Reads a trainer's progress from a state. *to is unchanged after an error. */
static tt_status tt__state_read_progress(const tt__state *s, const tt_schedule *schedule, tt_progress *to)
{
    tt__state_progress h;
    const int at = tt_safetensors_find(s->file, "tinytrain.progress");
    tt_status status = tt_safetensors_read(s->file, at, 0, sizeof h, &h);
    if (status != TT_OK) return status;
    const tt_progress *p = &h.progress;
    if (!(p->targets >= 0 && p->correct >= 0 && p->best >= -INFINITY)) /* NaN fails too */
        return tt__fail(s->p->ctx, TT_ERR_FORMAT, "'%s' says that %g of %g targets were right and the best "
                        "metric was %g, which is impossible: the file is damaged; resume from a copy, or "
                        "start again", s->path, p->correct, p->targets, p->best);
    const tt__state_progress now = tt__state_progress_of(p, schedule);
    if (memcmp(&now, &h, sizeof h) != 0)
        tt__log(s->p->ctx, TT_LOG_WARNING, "resume", "'%s' was made with another schedule (learning rate %g, "
                "%lld steps, now %g, %lld): this run continues with the new one, and differs from a run "
                "without interruption", s->path, h.lr, (long long)h.total_steps, (double)schedule->lr,
                (long long)schedule->total_steps);
    *to = *p;
    return TT_OK;
}

tt_status tt_trainer_load(tt_trainer *r, const char *path, tt_progress *progress)
{
    tt__state s;
    tt_progress read;
    tt_status status = tt__must_train(r);
    if (status != TT_OK) return status;
    status = tt__state_open(&s, r->train, path, sizeof(tt__state_progress));
    if (status == TT_OK) status = tt__state_same_other(r, s.file, path);
    if (status == TT_OK) status = tt__state_read_progress(&s, &r->options.schedule, &read);
    status = tt__state_agree(&s, status);
    if (status == TT_OK) status = tt__state_take(&s);
    if (status == TT_OK) {
        if (progress) *progress = read;
        r->saved_steps = tt_trainer_steps(r);
        r->step_failed = false;
        tt__trainer_discard_step(r);
    }
    tt__state_close(&s);
    return status;
}
