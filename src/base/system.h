#pragma once
#include "../api/standard.h"
#include "../backend/ops.h"

/* ===========================================================================================================
   BASE                                                                                              src/base/
   Errors, logging, allocation, text, 16-bit floats, counter-based random numbers, threads, files. Uses the C
   library and POSIX only. All sections below may use this one.
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

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#include <time.h>
#include <unistd.h>
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
