/* Includes examples/datasets.h with functions of the C library and of examples/system.h replaced by functions
   that can fail: among the calls of kind reader_faults.fail, call number reader_faults.at (from 1) fails. The
   kinds: 'm': allocates memory; 'o': opens a file; 'z': finds a file's size; 'r': reads; 'c': reads a file
   that was cut off, so the read ends early; 'l': opens a folder; 'n': reads the next name in a folder.
   Include test.h first. */
#ifndef TINYTRAIN_READERS_H
#define TINYTRAIN_READERS_H

#include "../examples/system.h"

static struct { char fail; long at, calls; } reader_faults;

static inline bool reader__fails(char kind)
{
    bool fails = reader_faults.fail == kind && ++reader_faults.calls == reader_faults.at;
    if (fails) errno = EIO;
    return fails;
}
static inline void *reader__malloc(size_t n) { return reader__fails('m') ? NULL : malloc(n); }
static inline void *reader__calloc(size_t n, size_t item)
{
    return reader__fails('m') ? NULL : calloc(n, item);
}
static inline void *reader__realloc(void *p, size_t n) { return reader__fails('m') ? NULL : realloc(p, n); }
static inline FILE *reader__open_file(const char *path, const char *mode)
{
    return reader__fails('o') ? NULL : open_file(path, mode);
}
static inline bool reader__find_file(const char *path, file_info *info)
{
    return !reader__fails('z') && find_file(path, info);
}
static inline size_t reader__fread(void *to, size_t size, size_t n, FILE *file)
{
    return reader__fails('c') || reader__fails('r') ? 0 : fread(to, size, n, file);
}
static inline int reader__ferror(FILE *file)
{
    return (reader_faults.fail == 'r' && reader_faults.calls == reader_faults.at) || ferror(file);
}
typedef struct reader__names {
    bool (*each)(void *arg, const char *name);
    void *arg;
    bool failed;
} reader__names;

static inline bool reader__name(void *arg, const char *name)
{
    reader__names *n = (reader__names *)arg;
    n->failed = reader__fails('n');
    return !n->failed && n->each(n->arg, name);
}
static inline bool reader__each_entry(const char *folder, bool (*each)(void *arg, const char *name),
                                      void *arg)
{
    reader__names names = {each, arg, false};
    if (reader__fails('l')) return false;
    const bool read = each_entry(folder, reader__name, &names);
    if (names.failed) errno = EIO;
    return read && !names.failed;
}

#define malloc(n) reader__malloc(n)
#define calloc(n, item) reader__calloc(n, item)
#define realloc(p, n) reader__realloc(p, n)
#define open_file(path, mode) reader__open_file(path, mode)
#define find_file(path, info) reader__find_file(path, info)
#define fread(to, size, n, file) reader__fread(to, size, n, file)
#undef ferror
#define ferror(file) reader__ferror(file)
#define each_entry(folder, each, arg) reader__each_entry(folder, each, arg)
#include "../examples/datasets.h"
#undef malloc
#undef calloc
#undef realloc
#undef open_file
#undef find_file
#undef fread
#undef ferror
#undef each_entry

/* Checks that the reader failed with an error that contains `part`. */
#define CHECK_WHY(failed, part) \
    do { \
        CHECK(failed); \
        CHECK(strstr(why, (part))); \
    } while (0)

#endif
