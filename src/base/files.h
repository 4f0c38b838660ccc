#pragma once
#include "../api/standard.h"
#include "../api/context.h"
#include "system.h"
#include "context.h"
#include "memory.h"

/* -------------------------------------------------------------------------------------------- whole files */

/* Opens a file for reading and sets *size to its bytes. */
static tt_status tt__file_begin(tt_context *ctx, const char *path, void **file, size_t *size)
{
    const tt_files *files = &ctx->options.files;
    *file = files->open(files->user, path, 'r');
    if (!*file) return tt__fail(ctx, TT_ERR_FILE, "cannot open '%s': %s", path, files->reason(files->user));
    int64_t bytes = files->size(files->user, *file);
    *size = (size_t)bytes;
    if (bytes >= 0) return TT_OK;
    tt__fail(ctx, TT_ERR_FILE, "cannot get the size of '%s': %s", path, files->reason(files->user));
    files->close(files->user, *file);
    *file = NULL;
    return TT_ERR_FILE;
}

/* Reads the n bytes at `offset` of an open file. The caller has checked that the file had these bytes when it
   was opened, so a file that ends earlier has been cut off since. */
static tt_status tt__file_read(tt_context *ctx, const char *path, void *file, uint64_t offset, void *to,
                               size_t n)
{
    const tt_files *files = &ctx->options.files;
    char reason[256];
    if (!n || files->read(files->user, file, offset, to, n)) return TT_OK;
    snprintf(reason, sizeof reason, "%s", files->reason(files->user));
    int64_t size = files->size(files->user, file);
    if (size >= 0 && (uint64_t)size < offset + n)
        return tt__fail(ctx, TT_ERR_FILE, "'%s', byte %lld: the file ends here, but was longer when it was "
                        "opened: do not change files that a run reads", path, (long long)size);
    return tt__fail(ctx, TT_ERR_FILE, "cannot read %zu bytes of '%s': %s", n, path, reason);
}

typedef struct tt__name_search { const char *name; bool found; } tt__name_search;

static bool tt__name_is(void *arg, const char *name)
{
    tt__name_search *search = (tt__name_search *)arg;
    search->found = strcmp(name, search->name) == 0;
    return !search->found;
}

/* Sets *found to whether a folder holds a file called `name`. Lists the folder instead of opening the file: a
   file that cannot be opened (no permission, too many open files, failing disk) counts as present. */
static tt_status tt__folder_has(tt_context *ctx, const char *folder, const char *name, bool *found)
{
    const tt_files *files = &ctx->options.files;
    tt__name_search search = {name, false};
    bool listed = files->list(files->user, folder, tt__name_is, &search);
    *found = listed && search.found;
    if (listed) return TT_OK;
    return tt__fail(ctx, TT_ERR_FILE, "cannot list the folder '%s': %s", folder, files->reason(files->user));
}

/* The bytes of a file in memory, followed by a NUL. */
typedef struct tt__file_bytes { char *bytes; size_t size; } tt__file_bytes;

static void tt__file_close(tt_context *ctx, tt__file_bytes *f)
{
    tt__free(ctx, f->bytes);
    memset(f, 0, sizeof *f);
}

static tt_status tt__file_open(tt_context *ctx, const char *path, tt__file_bytes *out)
{
    const tt_files *files = &ctx->options.files;
    void *file;
    memset(out, 0, sizeof *out);
    tt_status status = tt__file_begin(ctx, path, &file, &out->size);
    if (status != TT_OK) return status;
    out->bytes = (char *)tt__alloc(ctx, out->size + 1);
    status = out->bytes ? tt__file_read(ctx, path, file, 0, out->bytes, out->size) : TT_ERR_MEMORY;
    if (status != TT_OK) tt__file_close(ctx, out);
    else out->bytes[out->size] = 0;
    files->close(files->user, file);
    return status;
}

/* A file that is written under a temporary name. tt__writer_end syncs the file and renames it into place, so
   that readers find either the old file or the whole new one. After the first failure the writer writes
   nothing more, and tt__writer_end removes the temporary file. In a process that writes no files
   (tt_context.writes_nothing), `file` is NULL and the writer writes nothing. */
typedef struct tt__writer {
    tt_context *ctx;
    void *file;
    tt_status status;
    size_t used;
    char path[1024], temporary[1040];
    char buffer[16384];
} tt__writer;

static void tt__writer_fail(tt__writer *w, const char *what)
{
    const tt_files *files = &w->ctx->options.files;
    if (w->status != TT_OK) return;
    const char *reason = files->reason(files->user);
    w->status = tt__fail(w->ctx, TT_ERR_FILE, "cannot %s '%s': %s", what, w->temporary, reason);
}

static tt_status tt__writer_begin(tt__writer *w, tt_context *ctx, const char *path)
{
    const tt_files *files = &ctx->options.files;
    memset(w, 0, offsetof(tt__writer, path));
    w->ctx = ctx;
    if (strlen(path) >= sizeof w->path)
        return w->status = tt__fail(ctx, TT_ERR_ARGUMENT, "the path '%.60s...' has %zu bytes, but at most "
                                    "%zu are possible: use a shorter path", path, strlen(path),
                                    sizeof w->path - 1);
    snprintf(w->path, sizeof w->path, "%s", path);
    snprintf(w->temporary, sizeof w->temporary, "%s.tmp", path);
    if (ctx->writes_nothing) return TT_OK;
    w->file = files->open(files->user, w->temporary, 'w');
    if (!w->file) tt__writer_fail(w, "create");
    return w->status;
}

static void tt__writer_put(tt__writer *w, const void *data, size_t n)
{
    const tt_files *files = &w->ctx->options.files;
    if (w->status != TT_OK || !n || !w->file) return; /* `file` is NULL: this process writes no files */
    if (!files->write(files->user, w->file, data, n)) tt__writer_fail(w, "write");
}

static void tt__writer_flush(tt__writer *w)
{
    tt__writer_put(w, w->buffer, w->used);
    w->used = 0;
}

static void tt__write(tt__writer *w, const void *data, size_t n)
{
    if (w->status != TT_OK) return;
    if (w->used + n > sizeof w->buffer) tt__writer_flush(w);
    if (n >= sizeof w->buffer) { tt__writer_put(w, data, n); return; }
    memcpy(w->buffer + w->used, data, n);
    w->used += n;
}

static tt_status tt__writer_end(tt__writer *w)
{
    const tt_files *files = &w->ctx->options.files;
    if (!w->file) return w->status;
    tt__writer_flush(w);
    if (w->status == TT_OK && !files->sync(files->user, w->file)) tt__writer_fail(w, "sync");
    if (!files->close(files->user, w->file)) tt__writer_fail(w, "close");
    w->file = NULL;
    bool renames = w->status == TT_OK;
    if (renames && !files->rename(files->user, w->temporary, w->path)) tt__writer_fail(w, "rename");
    if (w->status != TT_OK) files->remove(files->user, w->temporary);
    return w->status;
}

/* Returns whether heapsort puts item a before item b. The function must define a strict total order. Heapsort
   needs no memory and takes n log n steps for any input. */
typedef bool (*tt__less)(const void *arg, uint32_t a, uint32_t b);

static void tt__sift_down(uint32_t *items, size_t root, size_t n, tt__less less, const void *arg)
{
    uint32_t item = items[root];
    for (size_t child = 2 * root + 1; child < n; child = 2 * root + 1) {
        if (child + 1 < n && less(arg, items[child], items[child + 1])) child++;
        if (!less(arg, item, items[child])) break;
        items[root] = items[child];
        root = child;
    }
    items[root] = item;
}

static void tt__sort_indices(uint32_t *items, size_t n, tt__less less, const void *arg)
{
    for (size_t i = n / 2; i-- > 0;) tt__sift_down(items, i, n, less, arg);
    while (n > 1) {
        uint32_t largest = items[0];
        items[0] = items[--n];
        items[n] = largest;
        tt__sift_down(items, 0, n, less, arg);
    }
}
