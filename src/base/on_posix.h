#pragma once
#include "../api/standard.h"
#include "../api/context.h"
#include "system.h"

/* ------------------------------------------------------------------------------------------------- POSIX
   Memory, threads, files and facts of the machine on Linux, macOS and other POSIX systems. on_windows.h has
   the same functions for Windows. */
#ifndef _WIN32

/* Returns memory that is not zeroed; NULL on failure. huge: asks for huge pages, which the system may refuse.
   */
static void *tt__system_allocate(size_t bytes, size_t alignment, bool huge)
{
    void *p = NULL;
    if (posix_memalign(&p, alignment, bytes) != 0) return NULL;
#ifdef MADV_HUGEPAGE
    if (huge) madvise(p, bytes, MADV_HUGEPAGE); /* advice only: failure is no error */
#else
    (void)huge;
#endif
    return p;
}

static void tt__system_release(void *memory) { free(memory); }

/* Bytes of a thread's stack, the default of glibc. The defaults of musl, 128 KB, and of macOS, 512 KB, are
   too little for kernels and for the caller's own ops. */
enum { TT__STACK = 8 << 20 };

/* Starts a thread that takes no signals sent to the process: those signals go to the host program's threads.
   Signals that a machine instruction raises (SIGSEGV and others) go to the thread of that instruction and are
   not blocked, so that the host program's handlers still work. Returns false on failure. */
static bool tt__thread_start(pthread_t *handle, void *(*run)(void *), void *arg)
{
#ifdef __wasi__ /* has no signals */
    return pthread_create(handle, NULL, run, arg) == 0;
#else
    static const int raised[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    sigset_t max, before;
    sigfillset(&max);
    for (int k = 0; k < TT__COUNT(raised); k++) sigdelset(&max, raised[k]);
    pthread_sigmask(SIG_BLOCK, &max, &before);
    pthread_attr_t attr;
    int failed = pthread_attr_init(&attr);
    if (!failed) {
        failed = pthread_attr_setstacksize(&attr, TT__STACK);
        if (!failed) failed = pthread_create(handle, &attr, run, arg);
        pthread_attr_destroy(&attr);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed == 0;
#endif
}

/* Returns the number of processors that the system has switched on. */
static int tt__online_cpus(void) { return (int)sysconf(_SC_NPROCESSORS_ONLN); }

/* Writes the name of this machine to `to`, "" if the name is unknown or longer than `capacity` - 1. */
static void tt__machine_name(char *to, size_t capacity)
{
    if (gethostname(to, capacity - 1) != 0) *to = 0;
    to[capacity - 1] = 0;
}

/* Returns the number by which the system knows this process. */
static long tt__process_number(void)
{
#ifdef __wasi__
    return 1;
#else
    return (long)getpid();
#endif
}

static bool tt__utc(time_t seconds, struct tm *to) { return gmtime_r(&seconds, to) != NULL; }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" /* none of the functions of tt_files needs its `user` */

/* Returns the file descriptor of a handle. A handle is a descriptor plus one, so that NULL means failure. */
static int tt__fd(void *file) { return (int)(intptr_t)file - 1; }

static void *tt__posix_open(void *user, const char *path, char mode)
{
    /* Without O_NONBLOCK, opening a pipe that nobody writes to would wait. Regular files ignore the flag. */
    int flags = mode == 'w' ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY | O_NONBLOCK;
    int fd = open(path, flags | O_CLOEXEC, 0666);
    struct stat info;
    if (fd >= 0 && mode == 'r' && fstat(fd, &info) == 0 && !S_ISREG(info.st_mode)) {
        close(fd);
        errno = S_ISDIR(info.st_mode) ? EISDIR : ESPIPE;
        return NULL;
    }
    return (void *)(intptr_t)(fd + 1);
}

static int64_t tt__posix_size(void *user, void *file)
{
    struct stat info;
    return fstat(tt__fd(file), &info) == 0 ? (int64_t)info.st_size : -1;
}

static bool tt__posix_read(void *user, void *file, uint64_t offset, void *to, size_t n)
{
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(tt__fd(file), (char *)to + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) { if (got == 0) errno = EIO; return false; }
        done += (size_t)got;
    }
    return true;
}

static bool tt__posix_write(void *user, void *file, const void *from, size_t n)
{
    for (size_t done = 0; done < n;) {
        ssize_t put = write(tt__fd(file), (const char *)from + done, n - done);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        done += (size_t)put;
    }
    return true;
}

static bool tt__posix_sync(void *user, void *file) { return fsync(tt__fd(file)) == 0 || errno == EINVAL; }
static bool tt__posix_close(void *user, void *file) { return close(tt__fd(file)) == 0; }
static bool tt__posix_rename(void *user, const char *from, const char *to) { return rename(from, to) == 0; }
static bool tt__posix_remove(void *user, const char *path) { return remove(path) == 0; }

static bool tt__posix_make_folder(void *user, const char *path)
{
    struct stat info;
    if (mkdir(path, 0777) == 0) return true;
    return errno == EEXIST && stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

static bool tt__posix_list(void *user, const char *path, bool (*each)(void *arg, const char *name), void *arg)
{
    DIR *folder = opendir(path);
    int error = 0;
    if (!folder) return false;
    for (struct dirent *entry;;) {
        errno = 0; /* so that errno tells whether readdir failed or the folder has no more entries */
        if (!(entry = readdir(folder))) { error = errno; break; }
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (!each(arg, entry->d_name)) break;
    }
    closedir(folder);
    errno = error;
    return error == 0;
}

#ifdef __wasi__ /* has no locks of files */
#define TT__POSIX_LOCK NULL
#else
#define TT__POSIX_LOCK tt__posix_lock
/* Locks the file `path` with flock, and writes `text` to the file. The system drops the lock when the process
   ends in any way. If the previous holder removes the file between open and flock, the locked file no longer
   has the name `path`. The loop then tries again with a new file. */
static void *tt__posix_lock(void *user, const char *path, const char *text, bool *held)
{
    *held = false;
    for (int k = 0; k < 100; k++) {
        struct stat own, named;
        const int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (fd < 0) return NULL;
        const bool locked = flock(fd, LOCK_EX | LOCK_NB) == 0;
        *held = !locked && errno == EWOULDBLOCK;
        const bool same = locked && fstat(fd, &own) == 0 && stat(path, &named) == 0 &&
                          own.st_dev == named.st_dev && own.st_ino == named.st_ino;
        void *file = (void *)(intptr_t)(fd + 1);
        /* Only people read the text, so failing to write it (disk full) does not fail the lock. */
        if (same && (ftruncate(fd, 0) != 0 || !tt__posix_write(user, file, text, strlen(text)))) errno = 0;
        if (same) return file;
        close(fd);
        if (!locked) return NULL;
    }
    return NULL;
}
#endif

static int64_t tt__posix_space(void *user, const char *folder)
{
    struct statvfs v;
    if (statvfs(folder, &v) != 0 || v.f_blocks == 0) return -1; /* f_blocks 0: the size is unknown */
    return (int64_t)fmin((double)v.f_bavail * (double)v.f_frsize, 0x1p62);
}

static const char *tt__posix_reason(void *user) { return tt__errno_text(); }
#pragma GCC diagnostic pop

static const tt_files tt__system_files = {
    tt__posix_open, tt__posix_size, tt__posix_read, tt__posix_write, tt__posix_sync, tt__posix_close,
    tt__posix_rename, tt__posix_remove, tt__posix_make_folder, tt__posix_list, tt__posix_reason, NULL,
    TT__POSIX_LOCK, tt__posix_space};
#endif
