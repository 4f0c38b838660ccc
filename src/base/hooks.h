#pragma once
#include "../api/standard.h"
#include "../api/context.h"
#include "system.h"

/* ------------------------------------------------------------------------------------------ default hooks */

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" /* none of the hooks needs its `user` */

static void tt__default_log(void *user, tt_log_level level, const char *id, const char *message)
{
    static const char *const names[] = {"debug", "info", "warning", "error"};
    if (level >= TT_LOG_WARNING) fprintf(stderr, "tinytrain %s [%s]: %s\n", names[level], id, message);
}

static void *tt__default_allocate(void *user, size_t bytes, size_t alignment)
{
    void *p = NULL;
    if (bytes >= ((size_t)4 << 20)) alignment = (size_t)2 << 20;
    if (posix_memalign(&p, alignment, bytes) != 0) return NULL;
#ifdef MADV_HUGEPAGE
    if (bytes >= ((size_t)4 << 20)) madvise(p, bytes, MADV_HUGEPAGE); /* advice only: failure is no error */
#endif
    return p;
}

static void tt__default_release(void *user, void *memory, size_t bytes) { free(memory); }

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

static int64_t tt__posix_space(void *user, const char *folder)
{
    struct statvfs v;
    if (statvfs(folder, &v) != 0 || v.f_blocks == 0) return -1; /* f_blocks 0: the size is unknown */
    return (int64_t)fmin((double)v.f_bavail * (double)v.f_frsize, 0x1p62);
}

static const char *tt__posix_reason(void *user)
{
    return errno == ESPIPE ? "it is a pipe or a device; expected a regular file" : strerror(errno);
}
#pragma GCC diagnostic pop

static void tt__default_bytes(void *user, size_t bytes, char *to, size_t capacity)
{
    (void)user;
    snprintf(to, capacity, "%zu", bytes);
}

tt_context_options tt_context_options_default(void)
{
    tt_context_options o;
    memset(&o, 0, sizeof o);
    o.seed = 1;
    o.timeout = 600;
#ifndef NDEBUG
    o.verify = true;
#endif
    o.logger.log = tt__default_log;
    o.allocator.allocate = tt__default_allocate;
    o.allocator.release = tt__default_release;
    const tt_files posix = {
        tt__posix_open, tt__posix_size, tt__posix_read, tt__posix_write, tt__posix_sync, tt__posix_close,
        tt__posix_rename, tt__posix_remove, tt__posix_make_folder, tt__posix_list, tt__posix_reason, NULL,
        tt__posix_lock, tt__posix_space};
    o.files = posix;
    o.wording.bytes = tt__default_bytes;
    return o;
}
