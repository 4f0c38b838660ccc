#pragma once
#include "../api/standard.h"
#include "../api/context.h"
#include "system.h"

/* ----------------------------------------------------------------------------------------------- Windows
   Memory, threads, files and facts of the machine on Windows. on_posix.h has the same functions for other
   systems. Paths are UTF-8. Errors of files become values of errno, so that messages are those of other
   systems. */
#ifdef _WIN32

/* Returns memory that is not zeroed; NULL on failure. Huge pages need a privilege that users rarely have, so
   `huge` is ignored. */
static void *tt__system_allocate(size_t bytes, size_t alignment, bool huge)
{
    (void)huge;
    return _aligned_malloc(bytes, alignment);
}

static void tt__system_release(void *memory) { _aligned_free(memory); }

/* Starts a thread. Returns false on failure. */
static bool tt__thread_start(pthread_t *handle, void *(*run)(void *), void *arg)
{
    return pthread_create(handle, NULL, run, arg) == 0;
}

/* Returns the number of processors that the system has switched on. */
static int tt__online_cpus(void) { return (int)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS); }

/* Returns the number of processors that this process may use: those of its affinity mask. The mask has the
   processors of one group of at most 64; it is 0 if the process has threads in several groups. */
static int tt__affinity_cpus(void)
{
    DWORD_PTR own = 0, all = 0;
    return GetProcessAffinityMask(GetCurrentProcess(), &own, &all) ? __builtin_popcountll(own) : 0;
}

/* Writes the name of this machine to `to`, "" if the name is unknown or longer than `capacity` - 1. */
static void tt__machine_name(char *to, size_t capacity)
{
    DWORD room = (DWORD)capacity;
    if (!GetComputerNameA(to, &room)) *to = 0;
}

/* Returns the process ID. */
static long tt__process_number(void) { return (long)GetCurrentProcessId(); }

static bool tt__utc(time_t seconds, struct tm *to) { return gmtime_s(to, &seconds) == 0; }

/* Sets errno for the thread's last error of Windows. Returns false. */
static bool tt__windows_failed(void)
{
    static const struct { DWORD error; int number; } known[] = {
        {ERROR_FILE_NOT_FOUND, ENOENT}, {ERROR_PATH_NOT_FOUND, ENOENT}, {ERROR_INVALID_NAME, ENOENT},
        {ERROR_BAD_NETPATH, ENOENT}, {ERROR_TOO_MANY_OPEN_FILES, EMFILE}, {ERROR_ACCESS_DENIED, EACCES},
        {ERROR_SHARING_VIOLATION, EBUSY}, {ERROR_LOCK_VIOLATION, EBUSY}, {ERROR_WRITE_PROTECT, EROFS},
        {ERROR_NOT_ENOUGH_MEMORY, ENOMEM}, {ERROR_OUTOFMEMORY, ENOMEM}, {ERROR_DISK_FULL, ENOSPC},
        {ERROR_HANDLE_DISK_FULL, ENOSPC}, {ERROR_HANDLE_EOF, EIO},
        {ERROR_FILE_EXISTS, EEXIST}, {ERROR_ALREADY_EXISTS, EEXIST}, {ERROR_DIR_NOT_EMPTY, ENOTEMPTY},
        {ERROR_DIRECTORY, ENOTDIR}, {ERROR_FILENAME_EXCED_RANGE, ENAMETOOLONG},
        {ERROR_NO_UNICODE_TRANSLATION, EILSEQ}, {ERROR_NOT_SAME_DEVICE, EXDEV},
        {ERROR_BROKEN_PIPE, EPIPE}};
    const DWORD error = GetLastError();
    errno = EIO;
    for (int k = 0; k < TT__COUNT(known); k++)
        if (known[k].error == error) errno = known[k].number;
    return false;
}

enum { TT__WIDE = 4200 }; /* max UTF-16 units of a path that tt__wide writes, with its prefix and NUL */

/* Converts a path from UTF-8 to UTF-16 and makes the path absolute. A path of more than MAX_PATH units gets
   the prefix `\\?\` or `\\?\UNC\`, without which Windows refuses it ("Maximum Path Length Limitation",
   learn.microsoft.com). Returns false, with errno, on failure. */
static bool tt__wide(const char *path, wchar_t to[TT__WIDE])
{
    wchar_t given[TT__WIDE], whole[TT__WIDE];
    if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, given, TT__WIDE)) {
        if (GetLastError() == ERROR_INSUFFICIENT_BUFFER) SetLastError(ERROR_FILENAME_EXCED_RANGE);
        return tt__windows_failed();
    }
    const DWORD n = GetFullPathNameW(given, TT__WIDE, whole, NULL);
    if (n == 0) return tt__windows_failed();
    if (n >= TT__WIDE - 8) { errno = ENAMETOOLONG; return false; }
    const bool special = wcsncmp(whole, L"\\\\?\\", 4) == 0 || wcsncmp(whole, L"\\\\.\\", 4) == 0;
    const bool share = wcsncmp(whole, L"\\\\", 2) == 0;
    if (n < MAX_PATH - 12 || special) { /* the limit of folders is 12 units below that of files */
        wcscpy(to, whole);
        return true;
    }
    wcscpy(to, share ? L"\\\\?\\UNC" : L"\\\\?\\");
    wcscat(to, share ? whole + 1 : whole);
    return true;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" /* none of the functions of tt_files needs its `user` */

/* Other handles of an open file may read, write, rename and remove the file, as on other systems. */
#define TT__SHARE (FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE)

/* Opens a file; mode is 'r' or 'w'. Shares the file, so that other processes may read, rename and remove the
   file while it is open, as on other systems. Returns NULL and sets errno on failure. */
static void *tt__windows_open(void *user, const char *path, char mode)
{
    const bool writes = mode == 'w';
    wchar_t wide[TT__WIDE];
    if (!tt__wide(path, wide)) return NULL;
    const DWORD kind = GetFileAttributesW(wide);
    if (kind != INVALID_FILE_ATTRIBUTES && (kind & FILE_ATTRIBUTE_DIRECTORY)) { errno = EISDIR; return NULL; }
    HANDLE file = CreateFileW(wide, writes ? GENERIC_WRITE : GENERIC_READ, TT__SHARE, NULL,
                              writes ? CREATE_ALWAYS : OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL);
    if (file == INVALID_HANDLE_VALUE) { tt__windows_failed(); return NULL; }
    if (!writes && GetFileType(file) != FILE_TYPE_DISK) {
        CloseHandle(file);
        errno = ESPIPE;
        return NULL;
    }
    return file;
}

static int64_t tt__windows_size(void *user, void *file)
{
    LARGE_INTEGER size;
    if (GetFileSizeEx((HANDLE)file, &size)) return size.QuadPart;
    tt__windows_failed();
    return -1;
}

enum { TT__PORTION = 1 << 30 }; /* max bytes that one call of ReadFile or WriteFile moves */

static bool tt__windows_read(void *user, void *file, uint64_t offset, void *to, size_t n)
{
    for (size_t done = 0; done < n;) {
        const size_t left = n - done;
        DWORD got = 0;
        OVERLAPPED at;
        memset(&at, 0, sizeof at);
        at.Offset = (DWORD)((offset + done) & 0xffffffff);
        at.OffsetHigh = (DWORD)((offset + done) >> 32);
        if (!ReadFile((HANDLE)file, (char *)to + done, (DWORD)(left < TT__PORTION ? left : TT__PORTION), &got,
                      &at))
            return tt__windows_failed();
        if (!got) { errno = EIO; return false; }
        done += got;
    }
    return true;
}

static bool tt__windows_write(void *user, void *file, const void *from, size_t n)
{
    for (size_t done = 0; done < n;) {
        const size_t left = n - done;
        DWORD put = 0;
        if (!WriteFile((HANDLE)file, (const char *)from + done,
                       (DWORD)(left < TT__PORTION ? left : TT__PORTION), &put, NULL))
            return tt__windows_failed();
        if (!put) { errno = EIO; return false; }
        done += put;
    }
    return true;
}

static bool tt__windows_sync(void *user, void *file)
{
    return FlushFileBuffers((HANDLE)file) || tt__windows_failed();
}

static bool tt__windows_close(void *user, void *file)
{
    return CloseHandle((HANDLE)file) || tt__windows_failed();
}

/* The argument of SetFileInformationByHandle that renames a file: FILE_RENAME_INFO with its field `Flags`,
   which older headers lack. */
typedef struct tt__windows_name {
    DWORD flags;
    HANDLE root;
    DWORD bytes; /* bytes of `name` without its NUL */
    wchar_t name[TT__WIDE];
} tt__windows_name;

/* Renames a file over another one that is open, which MoveFileEx refuses. The flags 3 are
   FILE_RENAME_FLAG_REPLACE_IF_EXISTS and FILE_RENAME_FLAG_POSIX_SEMANTICS, and the class 22 is
   FileRenameInfoEx, both of Windows 10. Programs that have opened the old file go on reading the old file, as
   on other systems. */
static bool tt__windows_rename_over(const wchar_t *from, const wchar_t *to)
{
    tt__windows_name info;
    memset(&info, 0, offsetof(tt__windows_name, name));
    info.flags = 3;
    info.bytes = (DWORD)(wcslen(to) * sizeof *to);
    wcscpy(info.name, to);
    HANDLE file = CreateFileW(from, DELETE | SYNCHRONIZE, TT__SHARE, NULL, OPEN_EXISTING,
                              FILE_ATTRIBUTE_NORMAL, NULL);
    if (file == INVALID_HANDLE_VALUE) return false;
    const bool renamed = SetFileInformationByHandle(file, (FILE_INFO_BY_HANDLE_CLASS)22, &info, sizeof info);
    const DWORD error = GetLastError();
    CloseHandle(file);
    SetLastError(error);
    return renamed;
}

/* Renames a file over another one that is open, where tt__windows_rename_over fails (before Windows 10, and
   on Wine 8): moves the old file aside, and removes the old file when the new one is in its place. A process
   that is killed in between leaves the old file under the name PATH.old. */
static bool tt__windows_rename_aside(const wchar_t *from, const wchar_t *to)
{
    wchar_t aside[TT__WIDE + 4];
    wcscpy(aside, to);
    wcscat(aside, L".old");
    if (!MoveFileExW(to, aside, MOVEFILE_REPLACE_EXISTING)) return false;
    const bool renamed = MoveFileExW(from, to, MOVEFILE_WRITE_THROUGH);
    if (renamed) DeleteFileW(aside);
    else MoveFileExW(aside, to, 0);
    return renamed;
}

static bool tt__windows_rename(void *user, const char *from, const char *to)
{
    wchar_t wide_from[TT__WIDE], wide_to[TT__WIDE];
    if (!tt__wide(from, wide_from) || !tt__wide(to, wide_to)) return false;
    if (MoveFileExW(wide_from, wide_to, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) return true;
    const DWORD error = GetLastError();
    if (error == ERROR_ACCESS_DENIED && (tt__windows_rename_over(wide_from, wide_to) ||
                                         tt__windows_rename_aside(wide_from, wide_to))) return true;
    SetLastError(error);
    return tt__windows_failed();
}

static bool tt__windows_remove(void *user, const char *path)
{
    wchar_t wide[TT__WIDE];
    if (!tt__wide(path, wide)) return false;
    const DWORD kind = GetFileAttributesW(wide);
    const bool folder = kind != INVALID_FILE_ATTRIBUTES && (kind & FILE_ATTRIBUTE_DIRECTORY);
    return (folder ? RemoveDirectoryW(wide) : DeleteFileW(wide)) || tt__windows_failed();
}

static bool tt__windows_make_folder(void *user, const char *path)
{
    wchar_t wide[TT__WIDE];
    if (!tt__wide(path, wide)) return false;
    if (CreateDirectoryW(wide, NULL)) return true;
    const DWORD kind = GetLastError() == ERROR_ALREADY_EXISTS ? GetFileAttributesW(wide) : 0;
    if (kind != INVALID_FILE_ATTRIBUTES && (kind & FILE_ATTRIBUTE_DIRECTORY)) return true;
    return tt__windows_failed();
}

static bool tt__windows_list(void *user, const char *path, bool (*each)(void *arg, const char *name),
                             void *arg)
{
    wchar_t wide[TT__WIDE];
    WIN32_FIND_DATAW entry;
    char name[3 * MAX_PATH + 1]; /* a unit of UTF-16 has at most 3 bytes in UTF-8 */
    if (!tt__wide(path, wide)) return false;
    const size_t n = wcslen(wide);
    if (n + 3 > TT__WIDE) { errno = ENAMETOOLONG; return false; }
    wcscpy(wide + n, n && (wide[n - 1] == '\\' || wide[n - 1] == '/') ? L"*" : L"\\*");
    HANDLE folder = FindFirstFileW(wide, &entry);
    if (folder == INVALID_HANDLE_VALUE) return tt__windows_failed();
    do {
        if (wcscmp(entry.cFileName, L".") == 0 || wcscmp(entry.cFileName, L"..") == 0) continue;
        if (!WideCharToMultiByte(CP_UTF8, 0, entry.cFileName, -1, name, sizeof name, NULL, NULL)) continue;
        if (!each(arg, name)) { SetLastError(ERROR_NO_MORE_FILES); break; }
    } while (FindNextFileW(folder, &entry));
    const bool whole = GetLastError() == ERROR_NO_MORE_FILES;
    if (!whole) tt__windows_failed();
    FindClose(folder);
    return whole;
}

/* Locks the file `path` by opening it so that no other call can open it for writing, and writes `text` to the
   file. Other processes may read and remove the file. The system drops the lock when the process ends. */
static void *tt__windows_lock(void *user, const char *path, const char *text, bool *held)
{
    wchar_t wide[TT__WIDE];
    *held = false;
    if (!tt__wide(path, wide)) return NULL;
    HANDLE file = CreateFileW(wide, GENERIC_WRITE, FILE_SHARE_READ | FILE_SHARE_DELETE, NULL, CREATE_ALWAYS,
                              FILE_ATTRIBUTE_NORMAL, NULL);
    if (file == INVALID_HANDLE_VALUE) {
        *held = GetLastError() == ERROR_SHARING_VIOLATION;
        tt__windows_failed();
        return NULL;
    }
    /* Only people read the text, so failing to write it (disk full) does not fail the lock. */
    if (!tt__windows_write(user, file, text, strlen(text))) errno = 0;
    return file;
}

static int64_t tt__windows_space(void *user, const char *folder)
{
    wchar_t wide[TT__WIDE];
    ULARGE_INTEGER own;
    if (!tt__wide(folder, wide) || !GetDiskFreeSpaceExW(wide, &own, NULL, NULL)) return -1;
    return (int64_t)fmin((double)own.QuadPart, 0x1p62);
}

static const char *tt__windows_reason(void *user) { return tt__errno_text(); }
#pragma GCC diagnostic pop

static const tt_files tt__system_files = {
    tt__windows_open, tt__windows_size, tt__windows_read, tt__windows_write, tt__windows_sync,
    tt__windows_close, tt__windows_rename, tt__windows_remove, tt__windows_make_folder, tt__windows_list,
    tt__windows_reason, NULL, tt__windows_lock, tt__windows_space};
#endif
