#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../plan/place.h"
#include "../ranks/processes.h"
#include "../ranks/groups.h"
#include "memory.h"
#include "cpu.h"
#include "devices.h"
#include "coded.h"

/* --------------------------------------------------------------------------------------------- parameters */

#define TT__HASH_BEGIN 14695981039346656037u /* start value of the FNV-1a hash */
#define TT__HASH_PRIME 1099511628211u
static uint64_t tt__hash_on(uint64_t h, const void *bytes, size_t n)
{
    const unsigned char *b = (const unsigned char *)bytes;
    for (size_t i = 0; i < n; i++) h = (h ^ b[i]) * TT__HASH_PRIME;
    return h;
}
/* Continues a hash with the elements of a tensor, one step for each element, and returns it. item: bytes of
   an element, 2 or 4. */
static uint64_t tt__hash_elements(uint64_t hash, const void *from, size_t bytes, int64_t item)
{
    for (const char *at = (const char *)from, *end = at + bytes; at < end; at += item) {
        uint16_t half;
        uint32_t word;
        if (item == 2) memcpy(&half, at, sizeof half), word = half;
        else memcpy(&word, at, sizeof word);
        hash = (hash ^ word) * TT__HASH_PRIME;
    }
    return hash;
}
static uint64_t tt__hash(const char *text) { return tt__hash_on(TT__HASH_BEGIN, text, strlen(text)); }

/* Returns the entry of the hash table that holds a parameter's name, or the free entry where the name is to
   be put. */
static uint32_t *tt__param_slot(tt_context *ctx, const char *name)
{
    uint64_t hash = tt__hash(name);
    uint32_t *slots = ctx->param_slots, mask = ctx->n_param_slots - 1;
    uint32_t at = (uint32_t)(hash ^ hash >> 32) & mask;
    while (slots[at] && strcmp(ctx->params[slots[at] - 1]->name, name) != 0) at = (at + 1) & mask;
    return &slots[at];
}

/* Makes room in the hash table for one more name. At least half of the entries stay free. */
static bool tt__param_slots_grow(tt_context *ctx)
{
    uint32_t n = ctx->n_param_slots ? 2 * ctx->n_param_slots : 64;
    if ((uint32_t)ctx->n_params < ctx->n_param_slots / 2) return true;
    uint32_t *slots = (uint32_t *)tt__calloc(ctx, sizeof *slots * n);
    if (!slots) return false;
    tt__free(ctx, ctx->param_slots);
    ctx->param_slots = slots;
    ctx->n_param_slots = n;
    for (int k = 0; k < ctx->n_params; k++) *tt__param_slot(ctx, ctx->params[k]->name) = (uint32_t)k + 1;
    return true;
}

tt_param *tt_param_find(tt_context *ctx, const char *name)
{
    uint32_t found = ctx->n_params ? *tt__param_slot(ctx, name) : 0;
    if (found) ctx->unmade[0] = 0; /* the caller finds the existing parameter, so the error of a second
                                      tt_param_new for it no longer counts */
    return found ? ctx->params[found - 1] : NULL;
}

/* Checks the name and the dimensions of a new parameter. Returns its number of elements; 0 after tt__fail. */
static int64_t tt__new_param_size(tt_context *ctx, const char *name, int ndim, const int64_t *dims)
{
    int64_t size = 1;
    tt_status status = TT_OK;
    if (!name || !*name)
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "a parameter has no name (NULL or empty): give it one");
    else if (tt_param_find(ctx, name))
        status = tt__fail(ctx, TT_ERR_ARGUMENT,
                          "parameter '%s' exists already: give the new one another name", name);
    else if (ndim < 1 || ndim > 4)
        status = tt__fail(ctx, TT_ERR_SHAPE, "parameter '%s' has %d dimensions, but must have 1 to 4", name,
                          ndim);
    for (int k = 0; status == TT_OK && k < ndim; k++) {
        if (dims[k] < 1)
            status = tt__fail(ctx, TT_ERR_SHAPE,
                              "parameter '%s': dimension %d is %lld, but must be at least 1", name, k,
                              (long long)dims[k]);
        else if (dims[k] > TT__MAX_ELEMENTS / size)
            status = tt__fail(ctx, TT_ERR_SHAPE, "parameter '%s': dimension %d, %lld, makes 2^47 elements or "
                              "more, which is too many: make it smaller", name, k, (long long)dims[k]);
        else size *= dims[k];
    }
    return status == TT_OK ? size : 0;
}

tt_status tt_param_prefix(tt_context *ctx, const char *prefix)
{
    const size_t n = prefix ? strlen(prefix) : 0;
    if (n >= sizeof ctx->prefix)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "the prefix '%.80s' of parameters has %zu bytes, but may have "
                        "at most %zu: give a shorter one", prefix, n, sizeof ctx->prefix - 1);
    memcpy(ctx->prefix, n ? prefix : "", n + 1);
    return TT_OK;
}

/* Makes a parameter as tt_param_new does, but without the context's prefix. */
static tt_param *tt__param_make(tt_context *ctx, const char *name, int ndim, const int64_t *dims,
                                tt_init init)
{
    const int64_t size = tt__new_param_size(ctx, name, ndim, dims);
    tt_param *p = size ? (tt_param *)tt__calloc(ctx, sizeof *p) : NULL;
    if (p) p->name = tt__strdup(ctx, name);
    bool room = p && p->name && TT__GROW(ctx, ctx->params, ctx->n_params, ctx->cap_params) &&
                tt__param_slots_grow(ctx);
    if (!room) {
        if (p) tt__free(ctx, p->name);
        tt__free(ctx, p);
        if (!ctx->unmade[0]) memcpy(ctx->unmade, ctx->error, sizeof ctx->error);
        return NULL;
    }
    p->ctx = ctx;
    p->index = ctx->n_params;
    p->ndim = ndim;
    memcpy(p->dims, dims, sizeof *dims * (size_t)ndim);
    p->size = size;
    p->init = init;
    p->form = TT_F32;
    ctx->params[ctx->n_params++] = p;
    *tt__param_slot(ctx, name) = (uint32_t)ctx->n_params;
    return p;
}

tt_param *tt_param_new(tt_context *ctx, const char *name, int ndim, const int64_t *dims, tt_init init)
{
    if (!ctx->prefix[0] || !name || !*name) return tt__param_make(ctx, name, ndim, dims, init);
    const size_t n = strlen(ctx->prefix);
    char *whole = (char *)tt__alloc(ctx, n + strlen(name) + 1);
    tt_param *p = NULL;
    if (whole) memcpy(whole, ctx->prefix, n), strcpy(whole + n, name);
    if (whole) p = tt__param_make(ctx, whole, ndim, dims, init);
    else if (!ctx->unmade[0]) memcpy(ctx->unmade, ctx->error, sizeof ctx->error);
    tt__free(ctx, whole);
    return p;
}

static void tt__param_drop_source(tt_param *p)
{
    if (p->release) p->release(p->ctx, p->source);
    p->read = NULL;
    p->read_codes = NULL;
    p->release = NULL;
    p->source = NULL;
}

/* Removes all parameters except the first `count`; no tape may use them. The newest go first, so that the
   search for the name of a remaining parameter never meets an entry of the hash table that was freed. */
static void tt__params_undo(tt_context *ctx, int count)
{
    while (ctx->n_params > count) {
        tt_param *last = ctx->params[ctx->n_params - 1];
        *tt__param_slot(ctx, last->name) = 0;
        ctx->n_params--;
        tt__param_drop_source(last);
        tt__arena_release(ctx, last->owner);
        tt__arena_release(ctx, last->second_owner);
        tt__free(ctx, last->name);
        tt__free(ctx, last);
    }
}

int tt_param_count(const tt_context *ctx) { return ctx->n_params; }
tt_param *tt_param_at(const tt_context *ctx, int k)
{
    return k >= 0 && k < ctx->n_params ? ctx->params[k] : NULL;
}

const char *tt_param_name(const tt_param *p) { return p->name; }
int tt_param_ndim(const tt_param *p) { return p->ndim; }
const int64_t *tt_param_dims(const tt_param *p) { return p->dims; }
int64_t tt_param_size(const tt_param *p) { return p->size; }
bool tt_param_frozen(const tt_param *p) { return p->frozen; }

/* Marks a parameter, and its low-rank factors, as frozen or trainable. */
static void tt__param_mark_frozen(tt_param *p, bool frozen)
{
    p->frozen = frozen;
    if (p->low_a) p->low_a->frozen = p->low_b->frozen = frozen;
}

int tt_param_freeze(tt_context *ctx, const char *pattern, bool frozen)
{
    int n = 0;
    for (int k = 0; k < ctx->n_params; k++) {
        if (!tt__match(pattern, ctx->params[k]->name)) continue;
        tt__param_mark_frozen(ctx->params[k], frozen);
        n++;
    }
    return n;
}

tt_rounding tt_param_rounding(const tt_param *p) { return p->rounding; }

int tt_param_round(tt_context *ctx, const char *pattern, tt_rounding kind)
{
    int n = 0;
    for (int k = 0; k < ctx->n_params; k++) {
        tt_param *p = ctx->params[k];
        if (p->ndim != 2 || p->form != TT_F32 || p->factor || p->low_a) continue;
        if (!tt__match(pattern, p->name)) continue;
        p->rounding = kind;
        n++;
    }
    return n;
}

/* Returns the dtype of coded matrices of a format; TT_F32 if `format` is NULL; TT__INT4 + 1 if the format is
   unknown. Sets *block to the number of which the width of such a matrix must be a multiple. */
static tt_dtype tt__form_of(const char *format, int64_t *block)
{
    tt_dtype form = format ? TT__INT8 : TT_F32;
    while (format && form <= TT__INT4 && strcmp(format, tt_dtype_name(form)) != 0)
        form = (tt_dtype)(form + 1);
    *block = form == TT__NF4 ? (int64_t)TT__NF4_BLOCK : form == TT__INT4 ? TT__INT4_GROUP : 1;
    return form;
}

static const tt__placement *tt__param_placement(const tt_param *p)
{
    return tt__placement_in(p->owner, p->index);
}
static bool tt__has_memory(const tt_param *p) { return p->owner && p->owner->allocated; }

/* Returns whether `rank` belongs both to this process and to arena `a`; false if `a` is NULL. */
static bool tt__has_rank(const tt__arena *a, int rank)
{
    return a && rank >= tt__near_rank(a) && rank < tt__near_end(a);
}

/* Returns the address where a rank stores its shard of parameter p, whose arena is allocated; NULL if the
   rank belongs to another process. */
static char *tt__param_memory(const tt_param *p, int rank)
{
    tt__arena *a = tt__has_rank(p->second_owner, rank) ? p->second_owner : p->owner;
    const tt__placement *placement = tt__placement_in(a, p->index);
    if (!tt__is_local(a->group, rank)) return NULL;
    return (placement->space == TT__HOST ? a->host : a->memory)[rank] + placement->offset;
}

/* A tensor (rows, cols) that ranks store whole or in shards. */
typedef struct tt__stored {
    int64_t rows, cols;
    tt__part part;
    int data, tensor;   /* data ranks and tensor ranks */
    int first;          /* number of the first rank that stores a shard */
} tt__stored;

/* Returns how the ranks of an arena store a tensor with the shape of a parameter. */
static tt__stored tt__stored_of(const tt_param *p, const tt__part *part, const tt__arena *a)
{
    const int64_t rows = p->ndim > 1 ? p->dims[0] : 1;
    const tt__stored s = {rows, p->size / rows, *part, a->data, a->tensor, tt__first_rank(a)};
    return s;
}

static tt__stored tt__param_stored(const tt_param *p)
{
    return tt__stored_of(p, &tt__param_placement(p)->part, p->owner);
}

/* Returns how many elements of the tensor a rank stores. Sets *first to the number of the rank's first
   element, counted within the shard of its tensor rank. */
static int64_t tt__stored_shard(const tt__stored *s, int rank, int64_t *first)
{
    *first = 0;
    if (!s->part.unit) return s->rows * s->cols / (s->part.split ? s->tensor : 1);
    return tt__shard(s->part.of, s->part.unit, s->part.root, (rank - s->first) / s->tensor, s->data, first);
}

/* Returns the index, in the whole tensor, of a rank's element number `at`. Sets *n to the number of elements
   from there on that are contiguous both in the tensor and on the rank. */
static int64_t tt__stored_element(const tt__stored *s, int rank, int64_t at, int64_t *n)
{
    int64_t first, count = tt__stored_shard(s, rank, &first), tensor_rank = rank % s->tensor;
    const int64_t part_cols = s->cols / s->tensor, e = first + at;
    *n = count - at;
    if (s->part.split == TT__WHOLE) return e;
    if (s->part.split == TT__ROWS) return e + tensor_rank * (s->rows * s->cols / s->tensor);
    *n = tt__min(*n, part_cols - e % part_cols);
    return e / part_cols * s->cols + tensor_rank * part_cols + e % part_cols;
}

/* Finds the first rank that stores element e of the tensor. Sets *rank to that rank, and returns the index of
   the element on that rank. Sets *n to the number of elements from there on that are contiguous both in the
   tensor and on the rank. */
static int64_t tt__stored_at(const tt__stored *s, int64_t e, int *rank, int64_t *n)
{
    const int64_t each = s->rows * s->cols / s->tensor, part_cols = s->cols / s->tensor;
    int64_t at = e, tensor_rank = 0, first = 0, count = 0;
    *n = s->rows * s->cols - e;
    if (s->part.split == TT__ROWS) {
        tensor_rank = e / each;
        at = e % each;
        *n = each - at;
    } else if (s->part.split == TT__COLS) {
        tensor_rank = e % s->cols / part_cols;
        at = e / s->cols * part_cols + e % part_cols;
        *n = part_cols - e % part_cols;
    }
    for (int d = 0; d < s->data; d++) {
        *rank = s->first + d * s->tensor + (int)tensor_rank;
        count = tt__stored_shard(s, *rank, &first);
        if (at < first + count) break;
    }
    *n = tt__min(*n, first + count - at);
    return at - first;
}

/* Returns whether every process stores the whole tensor. */
static bool tt__is_everywhere(const tt__stored *s, const tt__arena *a)
{
    const tt__device_group *c = a->group;
    if (c->local == c->ranks) return true;
    return a->stages == 1 && !s->part.unit && (s->part.split == TT__WHOLE || c->local % s->tensor == 0);
}

/* Fails if an update has stopped half-way: parameters and states must then be loaded again. */
static tt_status tt__check_whole(tt_context *ctx, const tt__arena *a)
{
    if (!a->partly_updated) return TT_OK;
    if (a->group->ranks == 1)
        return tt__fail(ctx, TT_ERR_DEVICE, "an update stopped halfway, so some parameters have new values "
                        "and others do not: load the last state");
    return tt__fail(ctx, TT_ERR_DEVICE, "an update stopped on some ranks, so parameters may differ between "
                    "ranks: load the last state");
}

static uint64_t tt__init_key(const tt_param *p)
{
    return tt__stream_key(p->ctx->options.seed, TT__RANDOM_INIT, tt__hash(p->name), 0);
}

/* Writes elements [first, first + n) of parameter p to `to`, from p's source: a callback or an initialiser.
   `first` must be a multiple of 4. */
static tt_status tt__param_read_source(const tt_param *p, int64_t first, int64_t n, float *to)
{
    if (p->read_codes)
        return tt__read_coded(p->read_codes, p->source, p->form, p->dims[0], p->size / p->dims[0], first, n,
                              to);
    if (p->read) return p->read(p->source, first, n, to);
    tt__float_mode mode = tt__float_default();
    tt__init_values(p->init, tt__init_key(p), first, n, to);
    tt__float_restore(mode);
    return TT_OK;
}

/* Reads bytes of the coded matrix of parameter `from`, whose owner has memory. All processes must call the
   function. */
static tt_status tt__param_read_codes(void *from, size_t first, size_t n, void *to)
{
    const tt_param *p = (const tt_param *)from;
    const tt__stored stored = tt__param_stored(p);
    const int rank = tt__is_everywhere(&stored, p->owner) ? tt__near_rank(p->owner) : stored.first;
    char *memory = tt__param_memory(p, rank);
    const tt__memory x = {p->owner, rank, tt__param_placement(p)->space, TT_U8,
                          memory ? memory + first : NULL};
    tt_status status = tt__check_whole(p->ctx, p->owner);
    if (status != TT_OK) return status;
    return (memory && tt__is_everywhere(&stored, p->owner) ? tt__read_memory : tt__fetch_memory)(&x, to,
                                                                                             TT_U8, n);
}

/* Reads elements [first, first + n) of parameter p from its arena or, if that has no memory yet, from p's
   source. `first` must be a multiple of 4. */
static tt_status tt__param_read(const tt_param *p, int64_t first, int64_t n, float *to)
{
    if (!tt__has_memory(p)) return tt__param_read_source(p, first, n, to);
    tt_status status = tt__check_whole(p->ctx, p->owner);
    const tt__placement *placement = tt__param_placement(p);
    const tt__stored stored = tt__param_stored(p);
    const tt__device_group *c = p->owner->group;
    if (tt__is_coded(placement->dtype)) {
        union { const tt_param *p; void *from; } codes = {p};
        return status != TT_OK ? status : tt__read_coded(tt__param_read_codes, codes.from, placement->dtype,
                                                         stored.rows, stored.cols, first, n, to);
    }
    const bool everywhere = tt__is_everywhere(&stored, p->owner); /* each process reads from its own ranks */
    for (int64_t done = 0, m; done < n && status == TT_OK; done += m) {
        int rank;
        const int64_t at = tt__stored_at(&stored, first + done, &rank, &m);
        if (everywhere) rank += c->first;
        char *memory = tt__param_memory(p, rank);
        if (memory) memory += (size_t)at * tt_dtype_bytes(placement->dtype);
        const tt__memory x = {p->owner, rank, placement->space, placement->dtype, memory};
        m = tt__min(m, n - done);
        status = (everywhere ? tt__read_memory : tt__fetch_memory)(&x, to + done, TT_F32, (size_t)m);
    }
    return status;
}

/* Fails if parameter p is stored as f16 and a finite number of `values` would become infinite in f16. */
static tt_status tt__param_fits(const tt_param *p, const float *values, int64_t first, int64_t n)
{
    const bool narrow = tt__param_placement(p)->dtype == TT_F16;
    for (int64_t k = 0; k < n && narrow; k++)
        if (fabsf(values[k]) >= 65520 && isfinite(values[k]))
            return tt__fail(p->ctx, TT_ERR_ARGUMENT, "parameter '%s': element %lld is %g, but f16 holds at "
                            "most 65504: use precision 16-mixed or bf16-true", p->name,
                            (long long)(first + k), (double)values[k]);
    return TT_OK;
}

/* Reads elements [first, first + n) of parameter p in order to fill arena `a`. Reads from p's owner if `a` is
   the second owner, the owner has memory, and p's source is no longer needed; otherwise from p's source, a
   file or an initialiser. `first` must be a multiple of 4. */
static tt_status tt__param_read_for(const tt_param *p, const tt__arena *a, int64_t first, int64_t n,
                                    float *to)
{
    const bool other = a == p->second_owner && tt__has_memory(p) && !p->keeps_source;
    return other ? tt__param_read(p, first, n, to) : tt__param_read_source(p, first, n, to);
}

/* Fills the coded matrix of parameter p on a rank: from p's source or, as tt__param_read_for says, from p's
   owner, whose codes are copied. */
static tt_status tt__param_fill_codes(const tt_param *p, const tt__arena *a, const tt__memory *x)
{
    const size_t bytes = tt__matrix_bytes(p->form, p->dims[0], p->size / p->dims[0]);
    union { const tt_param *p; void *from; } codes = {p};
    if (a == p->second_owner && tt__has_memory(p) && !p->keeps_source)
        return tt__copy_codes(tt__param_read_codes, codes.from, bytes, x);
    if (p->read_codes) return tt__copy_codes(p->read_codes, p->source, bytes, x);
    return tt__write_coded(p, tt__param_read_source, NULL, x);
}

/* Fills a rank's shard of parameter p from p's source. Keeps the source for a second try, because filling
   another parameter may fail. shard: a buffer of TT__PIECE floats. Initialisers write directly to the rank's
   memory, if their numbers fit the dtype. */
static tt_status tt__param_fill(const tt_param *p, int rank, float *shard)
{
    char *memory = tt__param_memory(p, rank);
    const tt__arena *a = tt__has_rank(p->second_owner, rank) ? p->second_owner : p->owner;
    const tt__placement *placement = tt__placement_in(a, p->index);
    const tt__stored stored = tt__stored_of(p, &placement->part, a);
    const bool of_source = a == p->owner || !tt__has_memory(p) || p->keeps_source;
    /* Largest absolute value that p->init gives: normal numbers reach sqrt(-2 log(2^-25)) = 5.9 standard
       deviations. */
    const double max = fabs((double)p->init.scale) * (p->init.kind == TT_INIT_NORMAL ? 6 : 1);
    const bool fits = placement->dtype != TT_F16 || p->init.kind < TT_INIT_NORMAL || max < 65504;
    const tt__backend *b = a->kind->backend;
    tt_status status = TT_OK;
    tt__float_mode mode = tt__float_default();
    if (tt__is_coded(placement->dtype)) {
        const tt__memory x = {a, rank, placement->space, TT_U8, memory};
        status = tt__param_fill_codes(p, a, &x);
        tt__float_restore(mode);
        return status;
    }
    int64_t first, count = tt__stored_shard(&stored, rank, &first);
    for (int64_t at = 0, n; at < count && status == TT_OK; at += n) {
        const int64_t e = tt__stored_element(&stored, rank, at, &n), before = e % 4;
        char *to = memory + (size_t)at * tt_dtype_bytes(placement->dtype);
        if (!p->read && fits && !before && of_source) {
            status = b->init(a->group->device[rank], to, placement->dtype, e, n, p->init, tt__init_key(p));
            status = tt__device_status(p->ctx, a->group, rank, status);
            continue;
        }
        n = tt__min(TT__PIECE - before, n);
        status = tt__param_read_for(p, a, e - before, n + before, shard);
        if (status == TT_OK) status = tt__param_fits(p, shard + before, e, n);
        const tt__memory x = {a, rank, placement->space, placement->dtype, to};
        if (status == TT_OK) status = tt__write_memory(&x, shard + before, TT_F32, (size_t)n);
    }
    tt__float_restore(mode);
    return status;
}

static tt_status tt__read_copy(void *source, int64_t first, int64_t n, float *to)
{
    memcpy(to, (const float *)source + first, sizeof(float) * (size_t)n);
    return TT_OK;
}

/* Copies the values of parameter p, whose arena has memory, to the host's memory: floats, or tt__own_codes if
   p is a coded matrix. Returns NULL after an error. The caller frees the copy. */
static void *tt__param_copy(const tt_param *p, tt_status *status)
{
    const bool coded = tt__is_coded(p->form);
    const tt__own_codes head = {p->form, p->dims[0], p->size / p->dims[0]};
    const size_t codes = coded ? tt__matrix_bytes(head.dtype, head.rows, head.cols) : 0;
    const size_t bytes = coded ? sizeof head + codes : sizeof(float) * (size_t)p->size;
    union { const tt_param *p; void *from; } source = {p};
    void *copy = tt__alloc(p->ctx, bytes);
    *status = copy ? TT_OK : TT_ERR_MEMORY;
    if (copy && coded) *(tt__own_codes *)copy = head;
    if (copy && coded) *status = tt__param_read_codes(source.from, 0, codes, (tt__own_codes *)copy + 1);
    else if (copy) *status = tt_param_get(p, (float *)copy);
    if (*status == TT_OK) return copy;
    tt__free(p->ctx, copy);
    return NULL;
}

/* Moves the values of a parameter from its arena, whose programs have been freed, to the host's memory. A
   coded matrix keeps its codes, since to code its floats again could change them. If the arena has no memory
   yet, the parameter still has its source. */
static tt_status tt__param_leave(tt_param *p)
{
    tt__arena *const arena[] = {p->owner, p->second_owner};
    const bool moves = tt__has_memory(p), coded = tt__is_coded(p->form);
    tt_status status = TT_OK;
    void *copy = moves ? tt__param_copy(p, &status) : NULL;
    if (!p->owner || status != TT_OK) return status;
    for (int k = 0; k < 2; k++) {
        if (!arena[k]) continue;
        arena[k]->placement[p->index].offset = TT__NO_PLACE;
        tt__arena_release(p->ctx, arena[k]);
    }
    p->owner = p->second_owner = NULL;
    p->keeps_source = false;
    if (!moves) return TT_OK;
    tt__param_drop_source(p);
    p->read = coded ? tt__read_own_values : tt__read_copy;
    p->read_codes = coded ? tt__read_own_codes : NULL;
    p->release = tt__free;
    p->source = copy;
    return TT_OK;
}

static bool tt__is_used(const tt_param *p)
{
    return (p->owner && p->owner->programs) || (p->second_owner && p->second_owner->programs);
}

/* Moves all parameters that no program uses out of their arenas, so that a new program makes a new arena.
   Fails if a program uses parameter p, whose shape or place is about to change. */
static tt_status tt__params_leave(tt_context *ctx, const tt_param *p)
{
    tt_status status = TT_OK;
    if (tt__is_used(p))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "a program still uses parameter '%s': free the model's "
                        "programs and trainers first", p->name);
    for (int k = 0; k < ctx->n_params && status == TT_OK; k++)
        if (!tt__is_used(ctx->params[k])) status = tt__param_leave(ctx->params[k]);
    return status;
}

/* Fails if parameter p cannot be stored in a format. */
static tt_status tt__param_check_store(const tt_param *p, const char *format)
{
    tt_context *ctx = p->ctx;
    const int64_t rows = p->ndim > 1 ? p->dims[0] : 1, cols = p->size / rows;
    int64_t block;
    const tt_dtype form = tt__form_of(format, &block);
    if (form > TT__INT4)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_param_store: the format '%s' is unknown: use int8, nf4 or "
                        "int4", format);
    if (tt__is_used(p) || tt__has_memory(p))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_param_store: a program has the parameter '%s' already: "
                        "choose its format before tt_compile", p->name);
    if (format && (p->rounding || p->low_a || p->factor))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_param_store: parameter '%s' %s, which training changes: "
                        "store other weights", p->name, p->low_a ? "has low-rank factors" :
                        p->factor ? "is a factor of another weight" : "is rounded (tt_param_round)");
    if (format && p->ndim < 2)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_param_store: parameter '%s' is a vector, but %s is a "
                        "format of matrices: leave it as it is", p->name, format);
    if (cols % block)
        return tt__fail(ctx, TT_ERR_SHAPE, "tt_param_store: parameter '%s' has rows of %lld numbers, but %s "
                        "needs a multiple of %lld: store it as int8, or leave it as it is", p->name,
                        (long long)cols, format, (long long)block);
    return TT_OK;
}

tt_status tt_param_store(tt_param *p, const char *format)
{
    int64_t block;
    const tt_dtype form = tt__form_of(format, &block);
    tt_status status = tt__param_check_store(p, format);
    if (status != TT_OK) return status;
    for (int k = 0; k < p->ctx->n_params && p->owner; k++) { /* leaves arenas of programs that never ran */
        tt_param *q = p->ctx->params[k];
        if (!tt__is_used(q) && !tt__has_memory(q)) tt__param_leave(q);
    }
    if (form != p->form) p->read_codes = NULL; /* `read` gives the values of the file's codes */
    p->form = form;
    return TT_OK;
}

tt_status tt_param_set(tt_param *p, const float *values)
{
    if (p->low_a)
        return tt__fail(p->ctx, TT_ERR_ARGUMENT, "parameter '%s' has low-rank factors: set these", p->name);
    tt_status status = tt__has_memory(p) ? tt__param_fits(p, values, 0, p->size) : TT_OK;
    for (int k = 0; k < 2 && tt__has_memory(p); k++) {
        const tt__arena *a = k ? p->second_owner : p->owner;
        if (!a || !a->allocated) continue; /* when this arena is allocated, it is filled from the other one */
        const tt__placement *placement = tt__placement_in(a, p->index);
        const tt__stored stored = tt__stored_of(p, &placement->part, a);
        for (int rank = tt__first_rank(a); rank < tt__end_rank(a); rank++) {
            char *memory = tt__param_memory(p, rank);
            if (!memory) continue;
            if (tt__is_coded(placement->dtype) && status == TT_OK) {
                const tt__memory x = {a, rank, placement->space, TT_U8, memory};
                status = tt__write_coded(p, NULL, values, &x);
                continue;
            }
            int64_t first, count = tt__stored_shard(&stored, rank, &first);
            for (int64_t at = 0, n; at < count && status == TT_OK; at += n) {
                const int64_t e = tt__stored_element(&stored, rank, at, &n);
                char *to = memory + (size_t)at * tt_dtype_bytes(placement->dtype);
                const tt__memory x = {a, rank, placement->space, placement->dtype, to};
                status = tt__write_memory(&x, values + e, TT_F32, (size_t)n);
            }
        }
    }
    p->keeps_source = false; /* the source has old values */
    if (tt__has_memory(p)) return status;
    float *copy = (float *)tt__alloc(p->ctx, sizeof(float) * (size_t)p->size);
    if (!copy) return TT_ERR_MEMORY;
    memcpy(copy, values, sizeof(float) * (size_t)p->size);
    tt__param_drop_source(p);
    p->read = tt__read_copy;
    p->release = tt__free;
    p->source = copy;
    return TT_OK;
}

tt_status tt_param_get(const tt_param *p, float *values) { return tt__param_read(p, 0, p->size, values); }

void tt_close(tt_context *ctx)
{
    if (!ctx) return;
    tt__params_undo(ctx, 0);
    tt__net_close(ctx);
    for (tt__device_group *c; (c = ctx->device_groups) != NULL;) {
        ctx->device_groups = c->next;
        tt__device_group_free(ctx, c);
    }
    tt__free(ctx, ctx->params);
    tt__free(ctx, ctx->param_slots);
    tt__pool_free(ctx, ctx->cpu.pool);
    if (ctx->allocated)
        tt__log(ctx, TT_LOG_WARNING, "close",
                "%zu bytes are still allocated: free programs, tapes and trainers before the context",
                ctx->allocated);
    tt_allocator allocator = ctx->options.allocator;
    pthread_mutex_destroy(&ctx->mutex);
    allocator.release(allocator.user, ctx, sizeof *ctx);
}
