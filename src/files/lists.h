#pragma once
#include "../base/base.h"

/* ===========================================================================================================
   FILES                                                                                            src/files/
   Lists of strings, UTF-8, JSON and safetensors. Uses base.

   Files are not trusted. Every number from a file is checked before use, and no input makes a loop take more
   than n log n steps.
   ======================================================================================================== */

#include <locale.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tinytrain copies the little-endian numbers of files as they are: this machine is big-endian"
#endif

/* Compares two strings byte by byte and returns a result like strcmp. The strings may contain NULs. */
static int tt__compare_bytes(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    return order ? order : (a_bytes > b_bytes) - (a_bytes < b_bytes);
}

/* Fails because of a line of a file; `format` and `args` say why. */
static tt_status tt__line_fail(tt_context *ctx, const char *path, long long line, const char *format,
                               va_list args)
{
    char what[800];
    vsnprintf(what, sizeof what, format, args);
    return tt__fail(ctx, TT_ERR_FORMAT, "'%s', line %lld: %s", path, line, what);
}

/* An array of strings, whose pointers are `stride` bytes apart, as in an array of structs. */
typedef struct tt__strings { const char *const *first; size_t stride; } tt__strings;

static const char *tt__string_at(const tt__strings *s, uint32_t i)
{
    return *(const char *const *)(const void *)((const char *)s->first + i * s->stride);
}

static bool tt__less_string(const void *arg, uint32_t a, uint32_t b)
{
    const tt__strings *s = (const tt__strings *)arg;
    int order = strcmp(tt__string_at(s, a), tt__string_at(s, b));
    return order ? order < 0 : a < b;
}

/* Sorts n strings by their bytes, and returns their indices 0..n - 1 in the sorted order, in memory that the
   caller frees. Returns NULL, after tt__fail, if out of memory. Sets *twice to a string that occurs more than
   once, or to NULL. */
static uint32_t *tt__sort_strings(tt_context *ctx, tt__strings s, int n, const char **twice)
{
    uint32_t *order = (uint32_t *)tt__alloc(ctx, (size_t)n * sizeof *order);
    *twice = NULL;
    for (int i = 0; order && i < n; i++) order[i] = (uint32_t)i;
    if (order) tt__sort_indices(order, (size_t)n, tt__less_string, &s);
    for (int i = 1; order && i < n && !*twice; i++) {
        const char *name = tt__string_at(&s, order[i]);
        if (strcmp(tt__string_at(&s, order[i - 1]), name) == 0) *twice = name;
    }
    return order;
}

/* A list of chunks of memory for many small allocations that are released together. Unlike tt__alloc,
   tt__chunks_take sets no error when memory runs out, because background threads call tt__chunks_take; the
   caller's thread sets the error later. */
typedef struct tt__chunk { struct tt__chunk *next; size_t used, capacity; } tt__chunk;

static void *tt__chunks_take(tt_context *ctx, tt__chunk **chunks, size_t bytes)
{
    const size_t min = (size_t)1 << 18;
    tt__chunk *chunk = *chunks;
    size_t padded = (bytes + 7) & ~(size_t)7;
    if (padded < bytes) return NULL;
    if (!chunk || chunk->capacity - chunk->used < padded) {
        size_t capacity = padded > min ? padded : min;
        if (capacity > SIZE_MAX - sizeof *chunk) return NULL;
        if (!(chunk = (tt__chunk *)tt__try_alloc(ctx, sizeof *chunk + capacity))) return NULL;
        chunk->capacity = capacity;
        chunk->used = 0;
        chunk->next = *chunks;
        *chunks = chunk;
    }
    chunk->used += padded;
    return (char *)(chunk + 1) + chunk->used - padded;
}

/* Copies a text into the chunks and adds a NUL. Returns the copy; NULL if memory runs out. */
static char *tt__chunks_text(tt_context *ctx, tt__chunk **chunks, const char *text, size_t bytes)
{
    char *copy = bytes < SIZE_MAX ? (char *)tt__chunks_take(ctx, chunks, bytes + 1) : NULL;
    if (copy && bytes) memcpy(copy, text, bytes);
    if (copy) copy[bytes] = 0;
    return copy;
}

static void tt__chunks_free(tt_context *ctx, tt__chunk **chunks)
{
    for (tt__chunk *chunk; (chunk = *chunks) != NULL; tt__free(ctx, chunk)) *chunks = chunk->next;
}

static void tt__free_all(tt_context *ctx, void *const *memory, int n)
{
    for (int i = 0; i < n; i++) tt__free(ctx, memory[i]);
}

#define TT__PATH 1024

/* Writes folder/name to `path`, with one slash between them. */
static tt_status tt__path_join(tt_context *ctx, char path[TT__PATH], const char *folder, const char *name)
{
    size_t n = strlen(folder);
    int length = snprintf(path, TT__PATH, "%s%s%s", folder, n && folder[n - 1] == '/' ? "" : "/", name);
    if (length >= 0 && length < TT__PATH) return TT_OK;
    return tt__fail(ctx, TT_ERR_ARGUMENT,
                    "the path '%.200s...' and '%.200s' together have more than %d bytes: use a shorter path",
                    folder, name, TT__PATH - 1);
}
