#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ranks/processes.h"
#include "../ranks/groups.h"
#include "memory.h"
#include "cpu.h"
#include "devices.h"

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

tt_param *tt_param_new(tt_context *ctx, const char *name, int ndim, const int64_t *dims, tt_init init)
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
    ctx->params[ctx->n_params++] = p;
    *tt__param_slot(ctx, name) = (uint32_t)ctx->n_params;
    return p;
}

static void tt__param_drop_source(tt_param *p)
{
    if (p->release) p->release(p->ctx, p->source);
    p->read = NULL;
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

int tt_param_freeze(tt_context *ctx, const char *pattern, bool frozen)
{
    int n = 0;
    for (int k = 0; k < ctx->n_params; k++) {
        if (!tt__match(pattern, ctx->params[k]->name)) continue;
        ctx->params[k]->frozen = frozen;
        n++;
    }
    return n;
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

/* Finds the first rank that stores element e of the tensor. Sets *rank to that rank and returns the index of
   the element on it. Sets *n to the number of elements from there on that are contiguous both in the tensor
   and on the rank. */
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
    if (p->read) return p->read(p->source, first, n, to);
    tt__float_mode mode = tt__float_default();
    tt__init_values(p->init, tt__init_key(p), first, n, to);
    tt__float_restore(mode);
    return TT_OK;
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

tt_status tt_param_set(tt_param *p, const float *values)
{
    tt_status status = tt__has_memory(p) ? tt__param_fits(p, values, 0, p->size) : TT_OK;
    for (int k = 0; k < 2 && tt__has_memory(p); k++) {
        const tt__arena *a = k ? p->second_owner : p->owner;
        if (!a || !a->allocated) continue; /* when this arena is allocated, it is filled from the other one */
        const tt__placement *placement = tt__placement_in(a, p->index);
        const tt__stored stored = tt__stored_of(p, &placement->part, a);
        for (int rank = tt__first_rank(a); rank < tt__end_rank(a); rank++) {
            char *memory = tt__param_memory(p, rank);
            if (!memory) continue;
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
