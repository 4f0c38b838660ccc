/* Includes examples/datasets.h with functions of the C library replaced by functions that can fail: among the
   calls of kind reader_faults.fail, call number reader_faults.at (from 1) fails. The kinds: 'm': allocates
   memory; 'o': opens a file; 'z': finds a file's size; 'r': reads; 'c': reads a file that was cut off, so the
   read ends early; 'l': opens a folder; 'n': reads the next name in a folder. Include test.h first. */
#ifndef TINYTRAIN_READERS_H
#define TINYTRAIN_READERS_H

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
static inline FILE *reader__fopen(const char *path, const char *mode)
{
    return reader__fails('o') ? NULL : fopen(path, mode);
}
static inline int reader__stat(const char *path, struct stat *info)
{
    return reader__fails('z') ? -1 : stat(path, info);
}
static inline size_t reader__fread(void *to, size_t size, size_t n, FILE *file)
{
    return reader__fails('c') || reader__fails('r') ? 0 : fread(to, size, n, file);
}
static inline int reader__ferror(FILE *file)
{
    return (reader_faults.fail == 'r' && reader_faults.calls == reader_faults.at) || ferror(file);
}
static inline DIR *reader__opendir(const char *path) { return reader__fails('l') ? NULL : opendir(path); }
static inline struct dirent *reader__readdir(DIR *folder)
{
    return reader__fails('n') ? NULL : readdir(folder);
}

#define malloc(n) reader__malloc(n)
#define calloc(n, item) reader__calloc(n, item)
#define realloc(p, n) reader__realloc(p, n)
#define fopen(path, mode) reader__fopen(path, mode)
#define stat(path, info) reader__stat(path, info)
#define fread(to, size, n, file) reader__fread(to, size, n, file)
#undef ferror
#define ferror(file) reader__ferror(file)
#define opendir(path) reader__opendir(path)
#define readdir(folder) reader__readdir(folder)
#include "../examples/datasets.h"
#undef malloc
#undef calloc
#undef realloc
#undef fopen
#undef stat
#undef fread
#undef ferror
#undef opendir
#undef readdir

/* Checks that the reader failed with an error that contains `part`. */
#define CHECK_WHY(failed, part) \
    do { \
        CHECK(failed); \
        CHECK(strstr(why, (part))); \
    } while (0)

#endif
