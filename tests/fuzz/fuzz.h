/* fuzz.h - code that the fuzz targets share: files in memory, a context with an allocation limit, checks, and
   functions that split the input into parts.

   A target is one file in this folder with LLVMFuzzerTestOneInput (https://llvm.org/docs/LibFuzzer.html). It
   uses the public API only and is linked with fuzz.c, one build of the implementation that all targets share:
   `make fuzz`. A target must not crash. It checks that files that load can be saved and load again unchanged,
   and that an error has a text. */
#ifndef TINYTRAIN_FUZZ_H
#define TINYTRAIN_FUZZ_H

#include "tinytrain.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Stops the program, which libFuzzer reports as a crash with this input. */
#define FUZZ_CHECK(cond) \
    do { \
        if (!(cond)) { \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #cond); \
            abort(); \
        } \
    } while (0)

/* -------------------------------------------------------------------------------------------------- input */

typedef struct fuzz_input {
    const uint8_t *at;
    size_t left;
} fuzz_input;

static inline int fuzz_byte(fuzz_input *in) /* returns 0 at the end of the input */
{
    if (!in->left) return 0;
    in->left--;
    return *in->at++;
}

static inline int fuzz_number(fuzz_input *in) /* returns 0 to 65535 */
{
    int high = fuzz_byte(in);
    return high << 8 | fuzz_byte(in);
}

/* Returns the bytes up to the next "\n%%\n", or to the end, and moves to the byte after that. */
static inline fuzz_input fuzz_part(fuzz_input *in)
{
    fuzz_input part = *in;
    for (size_t k = 0; k + 4 <= in->left; k++)
        if (memcmp(in->at + k, "\n%%\n", 4) == 0) {
            part.left = k;
            in->at += k + 4;
            in->left -= k + 4;
            return part;
        }
    in->at += in->left;
    in->left = 0;
    return part;
}

/* -------------------------------------------------------------------------------------------------- files */

enum { FUZZ_FILES = 16 };
typedef struct fuzz_file {
    char path[64];
    uint8_t *bytes;
    size_t n, room;
    bool there;
} fuzz_file;
static fuzz_file fuzz_files[FUZZ_FILES];

static inline fuzz_file *fuzz_find(const char *path)
{
    for (int k = 0; k < FUZZ_FILES; k++)
        if (fuzz_files[k].there && strcmp(fuzz_files[k].path, path) == 0) return &fuzz_files[k];
    return NULL;
}

static inline void fuzz_append(fuzz_file *f, const void *bytes, size_t n)
{
    if (f->n + n > f->room) {
        f->room = 2 * (f->n + n);
        f->bytes = (uint8_t *)realloc(f->bytes, f->room);
        FUZZ_CHECK(f->bytes);
    }
    if (n) memcpy(f->bytes + f->n, bytes, n);
    f->n += n;
}

/* Creates or empties a file. */
static inline fuzz_file *fuzz_create(const char *path)
{
    fuzz_file *f = fuzz_find(path);
    for (int k = 0; k < FUZZ_FILES && !f; k++)
        if (!fuzz_files[k].there) f = &fuzz_files[k];
    FUZZ_CHECK(f && strlen(path) < sizeof f->path);
    memcpy(f->path, path, strlen(path) + 1);
    f->there = true;
    f->n = 0;
    return f;
}

static inline void fuzz_write(const char *path, const void *bytes, size_t n)
{
    fuzz_append(fuzz_create(path), bytes, n);
}

static inline void fuzz_remove_all(void)
{
    for (int k = 0; k < FUZZ_FILES; k++) fuzz_files[k].there = false;
}

static inline bool fuzz_same_files(const char *a, const char *b)
{
    const fuzz_file *x = fuzz_find(a), *y = fuzz_find(b);
    return x && y && x->n == y->n && (!x->n || memcmp(x->bytes, y->bytes, x->n) == 0);
}

static inline void *fuzz__open(void *user, const char *path, char mode)
{
    (void)user;
    return mode == 'w' ? fuzz_create(path) : fuzz_find(path);
}
static inline int64_t fuzz__size(void *user, void *file)
{
    (void)user;
    return (int64_t)((fuzz_file *)file)->n;
}
static inline bool fuzz__read(void *user, void *file, uint64_t offset, void *to, size_t n)
{
    const fuzz_file *f = (const fuzz_file *)file;
    (void)user;
    if (offset > f->n || n > f->n - offset) return false;
    if (n) memcpy(to, f->bytes + offset, n);
    return true;
}
static inline bool fuzz__write(void *user, void *file, const void *from, size_t n)
{
    (void)user;
    fuzz_append((fuzz_file *)file, from, n);
    return true;
}
static inline bool fuzz__sync(void *user, void *file)
{
    (void)user;
    (void)file;
    return true;
}
static inline bool fuzz__rename(void *user, const char *from, const char *to)
{
    fuzz_file *f = fuzz_find(from), *old = fuzz_find(to);
    (void)user;
    if (!f || strlen(to) >= sizeof f->path) return false;
    if (old) old->there = false;
    memcpy(f->path, to, strlen(to) + 1);
    return true;
}
static inline bool fuzz__remove(void *user, const char *path)
{
    fuzz_file *f = fuzz_find(path);
    (void)user;
    if (f) f->there = false;
    return f != NULL;
}
static inline bool fuzz__make_folder(void *user, const char *path)
{
    (void)user;
    return !fuzz_find(path);
}
static inline bool fuzz__list(void *user, const char *path, bool (*each)(void *arg, const char *name),
                              void *arg)
{
    size_t n = strlen(path);
    (void)user;
    if (fuzz_find(path)) return false;
    while (n && path[n - 1] == '/') n--;
    for (int k = 0; k < FUZZ_FILES; k++) {
        const fuzz_file *f = &fuzz_files[k];
        if (f->there && strncmp(f->path, path, n) == 0 && f->path[n] == '/' && !each(arg, f->path + n + 1))
            return true;
    }
    return true;
}
static inline const char *fuzz__reason(void *user)
{
    (void)user;
    return "there is no such file in memory";
}

/* ------------------------------------------------------------------------------------------------ context */

enum {
    FUZZ_MEMORY = 64 << 20
}; /* FUZZ_MEMORY: bytes that a context may allocate, so that an allocation of unlimited size fails. */

static size_t fuzz_allocated;
static bool fuzz_refused; /* an allocation was refused since fuzz_open */
static int fuzz_contexts; /* number of open contexts */

static inline void *fuzz__allocate(void *user, size_t bytes, size_t alignment)
{
    void *memory = NULL;
    (void)user;
    if (bytes > FUZZ_MEMORY - fuzz_allocated || posix_memalign(&memory, alignment, bytes) != 0) {
        fuzz_refused = true;
        return NULL;
    }
    memset(memory, 0xA5, bytes < 65536 ? bytes : 65536);
    fuzz_allocated += bytes;
    return memory;
}
static inline void fuzz__release(void *user, void *memory, size_t bytes)
{
    (void)user;
    fuzz_allocated -= bytes;
    free(memory);
}

static inline void fuzz__log(void *user, tt_log_level level, const char *id, const char *message)
{
    (void)user;
    (void)level;
    FUZZ_CHECK(*id && *message);
}

/* Opens a context that uses only the calling thread, and whose files are fuzz_files. */
static inline tt_context *fuzz_open(void)
{
    tt_context_options o = tt_context_options_default();
    o.threads = 1;
    o.logger.log = fuzz__log;
    o.allocator.allocate = fuzz__allocate;
    o.allocator.release = fuzz__release;
    o.files.open = fuzz__open;
    o.files.size = fuzz__size;
    o.files.read = fuzz__read;
    o.files.write = fuzz__write;
    o.files.sync = fuzz__sync;
    o.files.close = fuzz__sync;
    o.files.rename = fuzz__rename;
    o.files.remove = fuzz__remove;
    o.files.make_folder = fuzz__make_folder;
    o.files.list = fuzz__list;
    o.files.reason = fuzz__reason;
    fuzz_refused = false;
    tt_context *ctx = tt_open(&o);
    FUZZ_CHECK(ctx);
    fuzz_contexts++;
    return ctx;
}

static inline void fuzz_close(tt_context *ctx)
{
    tt_close(ctx);
    FUZZ_CHECK(--fuzz_contexts > 0 || fuzz_allocated == 0);
}

/* Returns `ok`, which says whether a call on ctx succeeded. After a failure the context must have an error
   with a text, and the error must not be TT_ERR_INTERNAL. With FUZZ_GOOD in the environment, which
   `make fuzz` sets for seeds named good_*, no call may fail. */
static inline bool fuzz_ok(tt_context *ctx, bool ok)
{
    if (ok) return true;
    FUZZ_CHECK(tt_error_code(ctx) != TT_OK && tt_error_code(ctx) != TT_ERR_INTERNAL && *tt_error(ctx));
    FUZZ_CHECK(tt_error_code(ctx) != TT_ERR_MEMORY || fuzz_refused);
    if (getenv("FUZZ_GOOD")) {
        fprintf(stderr, "a good seed is refused: %s\n", tt_error(ctx));
        abort();
    }
    return false;
}

/* Returns `ok`, which says whether a call on ctx succeeded. The call must succeed because an earlier call
   succeeded. Stops the program if `ok` is false, unless an allocation was refused. */
static inline bool fuzz_must(tt_context *ctx, bool ok, const char *what)
{
    if (ok) return true;
    if (fuzz_ok(ctx, false) || (tt_error_code(ctx) == TT_ERR_MEMORY && fuzz_refused)) return false;
    fprintf(stderr, "fails: %s: %s\n", what, tt_error(ctx));
    abort();
}
#define FUZZ_MUST(ctx, ok) fuzz_must((ctx), (ok), #ok)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);
size_t LLVMFuzzerMutate(uint8_t *bytes, size_t n, size_t max);
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t n, size_t max, unsigned seed);
int LLVMFuzzerInitialize(int *argc, char ***argv);

#endif
