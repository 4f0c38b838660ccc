/* A small test framework. A test program has TINYTRAIN_IMPLEMENTATION, tinytrain.h, then this file:

       TEST(adds) { CHECK(1 + 1 == 2); }
       static const test_case tests[] = {TEST_CASE(adds)};
       int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }

   test_main prints one line per test, `ok name`, `FAILED name: file:line: text` or `skip name: why`, then
   `N passed, N failed`. Arguments are patterns ('*', '?') for the names of tests to run. Checks must run on
   the main thread. */
#ifndef TINYTRAIN_TEST_H
#define TINYTRAIN_TEST_H

#include "test_main.h"

static struct {
    char folder[512]; /* "" until test_folder() is called */
    int folders;
} test__files_made;

static inline bool test__error(tt_context *ctx, tt_status status, const char *part, const char *file,
                               int line)
{
    char message[2048];
    bool ok = tt_error_code(ctx) == status && strstr(tt_error(ctx), part) != NULL;
    if (!ok)
        snprintf(message, sizeof message, "expected %s with \"%s\", found %s: %s", tt_status_name(status),
                 part, tt_status_name(tt_error_code(ctx)), tt_error(ctx));
    return test__check(ok, file, line, ok ? part : message);
}

/* Checks that the context's last error has the code `status` and contains `part`. */
#define CHECK_ERROR(ctx, status, part) test__error((ctx), (status), (part), __FILE__, __LINE__)

/* Attribute of a function whose loops take most of a test's time. Sanitizers and coverage skip the function,
   and gcc always optimizes it. */
#if __has_attribute(no_profile_instrument_function) && __has_attribute(optimize)
#define TEST_PLAIN \
    __attribute__((no_sanitize("address", "undefined", "thread"), no_profile_instrument_function, \
                   optimize(2)))
#else
#define TEST_PLAIN __attribute__((no_sanitize("address", "undefined", "thread")))
#endif

/* TEST_SWEEP=N, on the compiler's command line: a test that sweeps over many combinations takes every N-th
   combination (1, the default: all). .ci/run sets N for builds that take about ten times as long (sanitizers,
   coverage, an emulated CPU), as another build checks all combinations. */
#ifndef TEST_SWEEP
#define TEST_SWEEP 1
#endif

/* Returns the stride of a sweep over few combinations: TEST_SWEEP, but at most `max`. */
static inline int test_every(int max) { return TEST_SWEEP < max ? TEST_SWEEP : max; }

#ifdef __has_feature /* clang has __has_feature, gcc defines macros */
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TEST_SANITIZED true
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED true
#endif
#ifndef TEST_SANITIZED
#define TEST_SANITIZED false
#endif

/* --------------------------------------------------------------------------------------------- allocation */

#define TEST_GARBAGE ((size_t)1 << 20) /* max bytes of an allocation that are filled */

/* A thread-safe allocator that counts, fills new memory with garbage, and returns NULL at call number fail_at
   (from 1; 0: never). */
typedef struct test_allocator {
    pthread_mutex_t mutex;
    long calls, fail_at, live;
    size_t live_bytes, peak_bytes;
    bool failed;
} test_allocator;

static inline void *test__allocate(void *user, size_t bytes, size_t alignment)
{
    test_allocator *a = (test_allocator *)user;
    void *memory = NULL;
    pthread_mutex_lock(&a->mutex);
    if (++a->calls == a->fail_at) a->failed = true;
    else if ((memory = tt__system_allocate(bytes, alignment, false)) != NULL) {
        memset(memory, 0xA5, bytes < TEST_GARBAGE ? bytes : TEST_GARBAGE);
        a->live++;
        a->live_bytes += bytes;
        if (a->live_bytes > a->peak_bytes) a->peak_bytes = a->live_bytes;
    }
    pthread_mutex_unlock(&a->mutex);
    return memory;
}

static inline void test__release(void *user, void *memory, size_t bytes)
{
    test_allocator *a = (test_allocator *)user;
    pthread_mutex_lock(&a->mutex);
    a->live--;
    a->live_bytes -= bytes;
    pthread_mutex_unlock(&a->mutex);
    tt__system_release(memory);
}

static inline void test__no_log(void *user, tt_log_level level, const char *id, const char *message)
{
    (void)user;
    (void)level;
    (void)id;
    (void)message;
}

/* Returns options with the counting allocator `a`, one thread and no log. */
static inline tt_context_options test_options(test_allocator *a)
{
    tt_context_options o = tt_context_options_default();
    memset(a, 0, sizeof *a);
    pthread_mutex_init(&a->mutex, NULL);
    o.threads = 1;
    o.logger.log = test__no_log;
    o.allocator.allocate = test__allocate;
    o.allocator.release = test__release;
    o.allocator.user = a;
    return o;
}

static inline tt_context *test_open(test_allocator *a)
{
    tt_context_options o = test_options(a);
    return tt_open(&o);
}

/* The log messages of a context, each with a newline, and counts of infos and warnings. */
typedef struct test_log { int infos, warnings; char text[4096]; } test_log;

static inline void test__keep_log(void *user, tt_log_level level, const char *id, const char *message)
{
    test_log *log = (test_log *)user;
    size_t used = strlen(log->text);
    (void)id;
    log->infos += level == TT_LOG_INFO;
    log->warnings += level == TT_LOG_WARNING;
    snprintf(log->text + used, sizeof log->text - used, "%s\n", message);
}

static inline tt_context *test_open_logged(test_allocator *a, test_log *log)
{
    tt_context_options o = test_options(a);
    memset(log, 0, sizeof *log);
    o.logger.log = test__keep_log;
    o.logger.user = log;
    return tt_open(&o);
}

static inline void test__close(tt_context *ctx, test_allocator *a, const char *file, int line)
{
    char message[128];
    tt_close(ctx);
    snprintf(message, sizeof message, "%ld blocks, %zu bytes leaked", a->live, a->live_bytes);
    test__check(a->live == 0 && a->live_bytes == 0, file, line, message);
    pthread_mutex_destroy(&a->mutex);
}

/* Closes the context and checks that no memory leaked. */
#define TEST_CLOSE(ctx, allocator) test__close((ctx), (allocator), __FILE__, __LINE__)

/* -------------------------------------------------------------------------------------------------- files */

static inline void test__remove(const char *path) /* removes a file, or a folder with its contents */
{
    DIR *folder = opendir(path);
    char inner[1200];
    if (folder) {
        for (struct dirent *e = readdir(folder); e; e = readdir(folder)) {
            if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
            snprintf(inner, sizeof inner, "%.900s/%s", path, e->d_name);
            test__remove(inner);
        }
        closedir(folder);
    }
    remove(path);
}

/* Returns a buffer for a path. There are eight buffers, used in turn: the path that test_folder, test_path or
   test__golden returns is valid during the next seven calls of these functions. */
static inline char *test__buffer(void)
{
    static char buffers[8][1024];
    static int next;
    return buffers[next++ % 8];
}

/* Makes an empty folder below $TMPDIR or /tmp. The end of the program removes the folder. */
static inline char *test_folder(void)
{
    char *path = test__buffer();
    const char *root = getenv("TMPDIR");
    if (!test__files_made.folder[0]) {
        snprintf(test__files_made.folder, sizeof test__files_made.folder, "%.400s/tinytrain_test_XXXXXX",
                 root && *root ? root : "/tmp");
        if (!mkdtemp(test__files_made.folder)) { perror(test__files_made.folder); exit(2); }
    }
    snprintf(path, 1024, "%s/%d", test__files_made.folder, test__files_made.folders++);
    if (mkdir(path, 0777) != 0) { perror(path); exit(2); }
    return path;
}

static inline char *test_path(const char *folder, const char *name)
{
    char *path = test__buffer();
    size_t n = strlen(folder), m = strlen(name);
    if (n + m + 2 > 1024) { fprintf(stderr, "path too long: %s\n", folder); exit(2); }
    memcpy(path, folder, n);
    path[n] = '/';
    memcpy(path + n + 1, name, m + 1);
    return path;
}

static inline const char *test_write(const char *path, const void *bytes, size_t n) /* returns path */
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f) != 0) { perror(path); exit(2); }
    return path;
}

/* Returns the bytes of a file and a 0 byte, which the caller frees, or NULL after an error. */
static inline char *test_read(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    char *bytes = NULL;
    *n = 0;
    if (!f) return NULL;
    if (fseek(f, 0, SEEK_END) == 0) {
        long size = ftell(f);
        rewind(f);
        bytes = (char *)malloc((size_t)size + 1);
        if (bytes) { *n = fread(bytes, 1, (size_t)size, f); bytes[*n] = 0; }
    }
    fclose(f);
    return bytes;
}

/* Returns the path of tests/golden/NAME, a file beside this header. */
#define TEST_GOLDEN(name) test__golden(name)
static inline char *test__golden(const char *name)
{
    char *path = test__buffer();
    const char *slash = strrchr(__FILE__, '/');
    snprintf(path, 1024, "%.*sgolden/%s", slash ? (int)(slash - __FILE__) + 1 : 0, __FILE__, name);
    return path;
}

/* Returns the bytes of tensor k, which the caller frees. */
static inline char *test_tensor(const tt_safetensors *s, int k)
{
    size_t n = tt_safetensors_info(s, k)->bytes;
    char *bytes = (char *)malloc(n + 1);
    if (bytes &&
        !test__check(tt_safetensors_read(s, k, 0, n, bytes) == TT_OK, __FILE__, __LINE__, "a tensor is read"))
        memset(bytes, 0, n);
    return bytes;
}

/* The default file hooks, except that operation `fail` ('o'pen, si'z'e, 'r'ead, 'w'rite, 's'ync, 'c'lose,
   re'n'ame, 'l'ist) fails at call number `at` (from 1), with the reason "injected". */
typedef struct test_files { tt_files real; char fail; long at, calls; } test_files;

static inline bool test__inject(void *user, char op)
{
    test_files *f = (test_files *)user;
    return f->fail == op && ++f->calls == f->at;
}
static inline void *test__file_open(void *u, const char *path, char mode)
{
    return test__inject(u, 'o') ? NULL
                                : ((test_files *)u)->real.open(((test_files *)u)->real.user, path, mode);
}
static inline int64_t test__file_size(void *u, void *f)
{
    return test__inject(u, 'z') ? -1 : ((test_files *)u)->real.size(((test_files *)u)->real.user, f);
}
static inline bool test__file_read(void *u, void *f, uint64_t at, void *to, size_t n)
{
    return !test__inject(u, 'r') && ((test_files *)u)->real.read(((test_files *)u)->real.user, f, at, to, n);
}
static inline bool test__file_write(void *u, void *f, const void *from, size_t n)
{
    return !test__inject(u, 'w') && ((test_files *)u)->real.write(((test_files *)u)->real.user, f, from, n);
}
static inline bool test__file_sync(void *u, void *f)
{
    return !test__inject(u, 's') && ((test_files *)u)->real.sync(((test_files *)u)->real.user, f);
}
static inline bool test__file_close(void *u, void *f)
{
    bool ok = ((test_files *)u)->real.close(((test_files *)u)->real.user, f);
    return !test__inject(u, 'c') && ok;
}
static inline bool test__file_rename(void *u, const char *from, const char *to)
{
    return !test__inject(u, 'n') && ((test_files *)u)->real.rename(((test_files *)u)->real.user, from, to);
}
static inline bool test__file_list(void *u, const char *path, bool (*each)(void *arg, const char *name),
                                   void *arg)
{
    return !test__inject(u, 'l') &&
           ((test_files *)u)->real.list(((test_files *)u)->real.user, path, each, arg);
}
static inline const char *test__file_reason(void *u) { (void)u; return "injected"; }

static inline tt_files test_failing_files(test_files *f, char fail, long at)
{
    tt_files files;
    f->real = files = tt_context_options_default().files;
    f->fail = fail;
    f->at = at;
    f->calls = 0;
    files.open = test__file_open;
    files.size = test__file_size;
    files.read = test__file_read;
    files.write = test__file_write;
    files.sync = test__file_sync;
    files.close = test__file_close;
    files.rename = test__file_rename;
    files.list = test__file_list;
    files.reason = test__file_reason;
    files.user = f;
    return files;
}

/* --------------------------------------------------------------------------------------------------- main */

TEST_PLAIN static inline uint32_t test_random(uint64_t *state) /* xorshift64* */
{
    *state ^= *state >> 12; *state ^= *state << 25; *state ^= *state >> 27;
    return (uint32_t)((*state * 2685821657736338717ull) >> 32);
}

static inline float test_uniform(uint64_t *state) /* [-1, 1) */
{
    return (float)(test_random(state) >> 8) * 0x1p-23f - 1;
}

/* Returns a parameter's values, which the caller frees. */
static inline float *test_values(const tt_param *p)
{
    float *x = (float *)malloc(sizeof(float) * (size_t)tt_param_size(p));
    CHECK(tt_param_get(p, x) == TT_OK);
    return x;
}

static inline int test_main(int argc, char **argv, const test_case *tests, int n)
{
    int status = test__main(argc, argv, tests, n);
    if (test__files_made.folder[0]) test__remove(test__files_made.folder);
    return status;
}

#endif
