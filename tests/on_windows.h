/* POSIX functions that the tests use, for Windows. test_main.h includes this file there. Paths are ASCII. */
#ifndef TINYTRAIN_TEST_ON_WINDOWS_H
#define TINYTRAIN_TEST_ON_WINDOWS_H

#define WIN32_LEAN_AND_MEAN 1
#define NOMINMAX 1
#include <windows.h>
#undef near /* words of 16-bit compilers and marks of parameters, which windows.h defines as nothing */
#undef far
#undef IN
#undef OUT
#undef TEXT
#include <dirent.h>
#include <direct.h>
#include <fcntl.h>
#include <io.h>
#include <unistd.h>

#define mkdir(path, mode) _mkdir(path)

static inline double windows_cpu_seconds(void)
{
    FILETIME begin, end, kernel, user;
    if (!GetProcessTimes(GetCurrentProcess(), &begin, &end, &kernel, &user)) return 0;
    return 1e-7 * (429.4967296e7 * (kernel.dwHighDateTime + user.dwHighDateTime) +
                   kernel.dwLowDateTime + user.dwLowDateTime);
}

static inline int setenv(const char *name, const char *value, int overwrite)
{
    (void)overwrite;
    return _putenv_s(name, value);
}

static inline int link(const char *from, const char *to) { return CreateHardLinkA(to, from, NULL) ? 0 : -1; }

static inline int unsetenv(const char *name) { return _putenv_s(name, ""); }

static inline char *mkdtemp(char *path) /* replaces the last six characters, XXXXXX */
{
    for (unsigned long k = 0, pid = GetCurrentProcessId(); k < 1000; k++) {
        snprintf(path + strlen(path) - 6, 7, "%06lx", (pid * 1000 + k) & 0xffffff);
        if (_mkdir(path) == 0) return path;
    }
    return NULL;
}

#endif
