#pragma once
#include "../api/standard.h"
#include "../backend/ops.h"

/* ===========================================================================================================
   BASE                                                                                              src/base/
   Errors, logging, allocation, text, 16-bit floats, counter-based random numbers, threads, files. Uses
   only the C library and POSIX or, on Windows, the Windows API. All sections below may use this one.
   ======================================================================================================== */

#include <errno.h>
#include <fenv.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <pthread.h>
#include <sched.h>
#include <time.h>
#if defined(_WIN32)
#ifndef __GNUC__
#error "tinytrain: on Windows, compile with GCC (MinGW-w64) or clang: this compiler has no vectors"
#endif
#ifndef NOMINMAX
#define NOMINMAX 1 /* without macros called min and max */
#endif
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN 1
#endif
#include <malloc.h>
#include <windows.h>
#else
#include <dirent.h>
#include <fcntl.h>
#ifndef __wasi__ /* WebAssembly has no signals, and neither maps nor limits memory */
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#endif
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#ifdef TINYTRAIN_MPI
#define OMPI_SKIP_MPICXX 1 /* leaves out the C++ bindings of old MPI libraries, which cause warnings */
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif
#endif

#define TT__ALIGN 64 /* bytes; the alignment of every tensor: one cache line, one AVX-512 register */
#define TT__STR(x) #x
#define TT__XSTR(x) TT__STR(x)
#define TT__COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static int64_t tt__min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t tt__max(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t tt__ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static size_t tt__align_up(size_t n) { return tt__align_to(n, TT__ALIGN); }

/* Sets *to to a * b. Returns false if the product does not fit in a size_t. */
static bool tt__mul_size(size_t a, size_t b, size_t *to) { return !__builtin_mul_overflow(a, b, to); }

/* Returns the text of errno for errors of files. ESPIPE means that the file is a pipe or a device. */
static const char *tt__errno_text(void)
{
    return errno == ESPIPE ? "it is a pipe or a device; expected a regular file" : strerror(errno);
}
