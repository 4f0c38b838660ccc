#pragma once
#include "../api/standard.h"
#include "../api/context.h"
#include "system.h"
#include "context.h"

/* --------------------------------------------------------------------------------------------- allocation */

/* The head of each block. The head holds the block's size, so that the caller need not know the size to
   release the block. */
typedef union tt__block { size_t bytes; char pad[TT__ALIGN]; } tt__block;

/* Returns memory that is not zeroed; NULL on failure. A failure sets no error, so background threads use this
   function. */
static void *tt__try_alloc(tt_context *ctx, size_t bytes)
{
    const tt_allocator *a = &ctx->options.allocator;
    size_t total = bytes + sizeof(tt__block);
    tt__block *block = NULL;
    pthread_mutex_lock(&ctx->mutex);
    if (total > bytes) block = (tt__block *)a->allocate(a->user, total, TT__ALIGN);
    if (block) {
        block->bytes = total;
        ctx->allocated += bytes;
    }
    pthread_mutex_unlock(&ctx->mutex);
    return block ? block + 1 : NULL;
}

/* Returns memory that is not zeroed; NULL on failure, which sets the error. */
static void *tt__alloc(tt_context *ctx, size_t bytes)
{
    void *p = tt__try_alloc(ctx, bytes);
    if (!p)
        tt__fail(ctx, TT_ERR_MEMORY, "out of memory: the allocator returned NULL for %zu bytes: free memory",
                 bytes);
    return p;
}

static void *tt__calloc(tt_context *ctx, size_t bytes)
{
    void *p = tt__alloc(ctx, bytes);
    return p ? memset(p, 0, bytes) : NULL;
}

static void tt__free(tt_context *ctx, void *memory)
{
    if (!memory) return;
    tt__block *block = (tt__block *)memory - 1;
    pthread_mutex_lock(&ctx->mutex);
    ctx->allocated -= block->bytes - sizeof *block;
    ctx->options.allocator.release(ctx->options.allocator.user, block, block->bytes);
    pthread_mutex_unlock(&ctx->mutex);
}

/* Copies `memory` into a new block of `bytes` bytes and frees `memory`. On failure returns NULL and keeps
   `memory`. */
static void *tt__realloc(tt_context *ctx, void *memory, size_t bytes)
{
    void *bigger = tt__alloc(ctx, bytes);
    if (bigger && memory) {
        size_t old = ((tt__block *)memory - 1)->bytes - sizeof(tt__block);
        memcpy(bigger, memory, old < bytes ? old : bytes);
        tt__free(ctx, memory);
    }
    return bigger;
}

/* Grows `array`, which has `count` entries, so that another entry fits. The result is false when out of
   memory. */
#define TT__GROW(ctx, array, count, capacity) \
    ((count) < (capacity) || tt__grow((ctx), (void **)&(array), sizeof *(array), &(capacity)))

static bool tt__grow(tt_context *ctx, void **array, size_t item, int *capacity)
{
    size_t bytes;
    int larger = *capacity ? *capacity * 2 : 16;
    if (larger < *capacity || !tt__mul_size(item, (size_t)larger, &bytes)) {
        tt__fail(ctx, TT_ERR_MEMORY, "out of memory for more than %d entries of %zu bytes in a list: free "
                 "memory", *capacity, item);
        return false;
    }
    void *p = tt__realloc(ctx, *array, bytes);
    if (!p) return false;
    *array = p;
    *capacity = larger;
    return true;
}

static char *tt__strdup(tt_context *ctx, const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = (char *)tt__alloc(ctx, n);
    return copy ? (char *)memcpy(copy, text, n) : NULL;
}
