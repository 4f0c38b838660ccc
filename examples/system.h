/* Functions of the operating system for the examples: of POSIX and, in the second half, of Windows. On
   Windows the C library takes paths in the code page of the machine; these functions take paths in UTF-8, as
   tinytrain does. */
#ifndef EXAMPLES_SYSTEM_H
#define EXAMPLES_SYSTEM_H

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* The kind of an entry of a file system: a regular file of `bytes` bytes, a folder, or, if neither is set,
   another kind. */
typedef struct file_info { bool is_file, is_folder; unsigned long long bytes; } file_info;

#ifndef _WIN32
#include <dirent.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>

#define NO_OUTPUT "/dev/null"

/* Prepares standard output, so that a log has all lines even if the program is killed. A write beyond the
   limit of a file's size then fails with an error, and does not end the program. */
static inline void system_begin(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    signal(SIGXFSZ, SIG_IGN);
}

/* Returns the columns of the terminal now, or 0 if they are unknown. A window's size may change. */
static inline int terminal_columns(void)
{
    struct winsize w;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 ? w.ws_col : 0;
}

/* Returns the resident bytes of this process (/proc/self/statm), or 0 if the number is unknown. */
static inline size_t resident_bytes(void)
{
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%*u %llu", &pages) != 1) pages = 0;
    if (f) fclose(f);
    return (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* Writes the path of this program's file to `to`. Returns false if the system does not tell the path. */
static inline bool program_path(char *to, size_t capacity)
{
    const ssize_t n = readlink("/proc/self/exe", to, capacity - 1); /* Linux */
    if (n > 0) to[n] = 0;
    return n > 0;
}

/* Returns how many bytes can still be written to a folder, or 0 if the number is unknown. */
static inline double free_disk(const char *folder)
{
    struct statvfs disk;
    return statvfs(folder, &disk) == 0 && disk.f_blocks ? (double)disk.f_bavail * (double)disk.f_frsize : 0;
}

static inline FILE *open_file(const char *path, const char *mode) { return fopen(path, mode); }

/* Finds the kind of the entry at a path. Returns false and sets errno on failure. */
static inline bool find_file(const char *path, file_info *to)
{
    struct stat s;
    if (stat(path, &s) != 0) return false;
    to->is_file = S_ISREG(s.st_mode);
    to->is_folder = S_ISDIR(s.st_mode);
    to->bytes = (unsigned long long)s.st_size;
    return true;
}

static inline bool make_folder(const char *path) { return mkdir(path, 0777) == 0 || errno == EEXIST; }

/* Calls `each` with the name of every entry of a folder until `each` returns false. Returns false and sets
   errno if the folder cannot be read. */
static inline bool each_entry(const char *folder, bool (*each)(void *arg, const char *name), void *arg)
{
    DIR *d = opendir(folder);
    int error = 0;
    if (!d) return false;
    for (struct dirent *e;;) {
        errno = 0; /* readdir sets errno only on an error, not at the end */
        if (!(e = readdir(d))) { error = errno; break; }
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && !each(arg, e->d_name)) break;
    }
    closedir(d);
    errno = error;
    return error == 0;
}

#else
#include <direct.h>
#include <fcntl.h>
#include <io.h>
#define WIN32_LEAN_AND_MEAN 1
#define NOMINMAX 1
#include <windows.h>
#include <psapi.h>
#include <shellapi.h>
#include <wchar.h>

#define NO_OUTPUT "NUL"
enum { SIGPIPE = -1, SIGXCPU = -2 }; /* signals that Windows never sends */

enum { WIDE_PATH = 4200 };

/* Converts a path to UTF-16. A path of 248 or more units becomes absolute and gets the prefix `\\?\`, without
   which Windows refuses long paths. The result is "" if the path is invalid. */
static inline const wchar_t *wide_path(const char *path, wchar_t to[WIDE_PATH])
{
    wchar_t given[WIDE_PATH];
    to[0] = 0;
    if (!MultiByteToWideChar(CP_UTF8, 0, path, -1, given, WIDE_PATH)) return to;
    const DWORD n = GetFullPathNameW(given, WIDE_PATH - 4, to + 4, NULL);
    if (!n || n >= WIDE_PATH - 4) { to[0] = 0; return to; }
    const bool plain = n < 248 || (to[4] == '\\' && to[5] == '\\'); /* short, a share, or prefixed */
    if (plain) return wmemmove(to, to + 4, n + 1);
    return wmemcpy(to, L"\\\\?\\", 4);
}

static inline FILE *open_file(const char *path, const char *mode)
{
    wchar_t wide[WIDE_PATH], wide_mode[16];
    MultiByteToWideChar(CP_UTF8, 0, mode, -1, wide_mode, 16);
    return _wfopen(wide_path(path, wide), wide_mode);
}

static inline bool find_file(const char *path, file_info *to)
{
    wchar_t wide[WIDE_PATH];
    WIN32_FILE_ATTRIBUTE_DATA s; /* _wstat64 refuses the prefix of long paths */
    if (!GetFileAttributesExW(wide_path(path, wide), GetFileExInfoStandard, &s)) {
        errno = GetLastError() == ERROR_ACCESS_DENIED ? EACCES : ENOENT;
        return false;
    }
    to->is_folder = (s.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY) != 0;
    to->is_file = !to->is_folder && !(s.dwFileAttributes & FILE_ATTRIBUTE_DEVICE);
    to->bytes = (unsigned long long)s.nFileSizeHigh << 32 | s.nFileSizeLow;
    return true;
}

/* Converts the arguments to UTF-8, and turns off the conversion of line ends in standard input and output. */
static inline void system_begin(int *argc, char ***argv)
{
    int count = 0;
    wchar_t **given = CommandLineToArgvW(GetCommandLineW(), &count);
    char **own = (char **)calloc((size_t)count + 1, sizeof *own);
    for (int k = 0; own && given && k < count; k++) {
        const int bytes = WideCharToMultiByte(CP_UTF8, 0, given[k], -1, NULL, 0, NULL, NULL);
        own[k] = (char *)malloc((size_t)bytes);
        if (!own[k] || !WideCharToMultiByte(CP_UTF8, 0, given[k], -1, own[k], bytes, NULL, NULL)) exit(1);
    }
    if (own && given) *argc = count, *argv = own;
    SetConsoleOutputCP(CP_UTF8);
    _setmode(0, _O_BINARY);
    _setmode(1, _O_BINARY);
}

static inline int terminal_columns(void)
{
    CONSOLE_SCREEN_BUFFER_INFO now;
    return GetConsoleScreenBufferInfo(GetStdHandle(STD_OUTPUT_HANDLE), &now)
               ? now.srWindow.Right - now.srWindow.Left + 1 : 0;
}

static inline size_t resident_bytes(void)
{
    PROCESS_MEMORY_COUNTERS now;
    return K32GetProcessMemoryInfo(GetCurrentProcess(), &now, sizeof now) ? now.WorkingSetSize : 0;
}

static inline bool program_path(char *to, size_t capacity)
{
    wchar_t wide[WIDE_PATH];
    const DWORD n = GetModuleFileNameW(NULL, wide, WIDE_PATH);
    if (!n || n == WIDE_PATH || !WideCharToMultiByte(CP_UTF8, 0, wide, -1, to, (int)capacity, NULL, NULL))
        return false;
    for (char *c = to; *c; c++) if (*c == '\\') *c = '/';
    return true;
}

static inline double free_disk(const char *folder)
{
    wchar_t wide[WIDE_PATH];
    ULARGE_INTEGER own;
    return GetDiskFreeSpaceExW(wide_path(folder, wide), &own, NULL, NULL) ? (double)own.QuadPart : 0;
}

static inline bool make_folder(const char *path)
{
    wchar_t wide[WIDE_PATH];
    return _wmkdir(wide_path(path, wide)) == 0 || errno == EEXIST;
}

static inline bool each_entry(const char *folder, bool (*each)(void *arg, const char *name), void *arg)
{
    wchar_t wide[WIDE_PATH];
    struct _wfinddata64_t entry;
    char name[3 * MAX_PATH + 1]; /* a unit of UTF-16 has at most 3 bytes in UTF-8 */
    wide_path(folder, wide);
    if (!wide[0] || wcslen(wide) + 3 > WIDE_PATH) { errno = ENOENT; return false; }
    const intptr_t list = _wfindfirst64(wcscat(wide, L"\\*"), &entry);
    if (list == -1) return false;
    do {
        if (wcscmp(entry.name, L".") == 0 || wcscmp(entry.name, L"..") == 0) continue;
        if (!WideCharToMultiByte(CP_UTF8, 0, entry.name, -1, name, sizeof name, NULL, NULL)) continue;
        if (!each(arg, name)) { errno = ENOENT; break; }
    } while (_wfindnext64(list, &entry) == 0);
    const bool whole = errno == ENOENT; /* there are no more entries */
    _findclose(list);
    return whole;
}

/* Reads a line, with its end, into *line, which grows. Returns the number of bytes, or -1 at the end. */
static inline ssize_t getline(char **line, size_t *capacity, FILE *f)
{
    size_t n = 0;
    for (int c; (c = getc(f)) != EOF;) {
        if (n + 2 > *capacity) {
            char *larger = (char *)realloc(*line, *capacity = *capacity ? 2 * *capacity : 128);
            if (!larger) return -1;
            *line = larger;
        }
        (*line)[n++] = (char)c;
        (*line)[n] = 0;
        if (c == '\n') break;
    }
    return n ? (ssize_t)n : -1;
}
#endif

#endif
