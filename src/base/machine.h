#pragma once
#include "../api/standard.h"
#include "system.h"
#include "on_posix.h"
#include "on_windows.h"

/* ---------------------------------------------------------------------------------------------------- limits
   The CPUs and the memory that this process may use under control groups, ulimit and affinity. */

/* Memory that the process may still allocate. bytes: the bytes that the tightest limit leaves. limit: the
   tightest limit in bytes. of: the name of the tightest limit, for messages. group_limit: the smallest limit
   of the control groups in bytes. swap: bytes of free swap space. */
typedef struct tt__room { double bytes, limit, group_limit, swap; const char *of; } tt__room;

#if defined(__linux__) || defined(_WIN32)
#define TT__KNOWS_ROOM /* tt__memory_room exists */
static void tt__room_of(tt__room *m, double bytes, double limit, const char *of)
{
    if (!(bytes < m->bytes)) return;
    m->bytes = fmax(bytes, 0);
    m->limit = limit;
    m->of = of;
}
#endif

#if defined(__linux__)
/* Returns the quota of a control group in CPUs (cgroup version 2: cpu.max; version 1: cpu.cfs_*_us); HUGE_VAL
   if the group has no limit. */
static double tt__quota_in(const char *folder)
{
    static const char *const names[] = {"cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"};
    double value[4] = {0, 0, 0, 0}, quota = HUGE_VAL;
    char path[8192];
    for (int k = 0; k < 3; k++) {
        const int at = k + (k > 0); /* cpu.max holds two numbers, quota and period: value[0] and value[1] */
        if (snprintf(path, sizeof path, "%s/%s", folder, names[k]) >= (int)sizeof path) continue;
        FILE *f = fopen(path, "r");
        if (!f) continue;
        int read = fscanf(f, k == 0 ? "%lf %lf" : "%lf", &value[at], &value[1]);
        if (read < 1) value[at] = 0; /* the file holds the word "max": there is no quota */
        fclose(f);
    }
    for (int k = 0; k < 4; k += 2)
        if (value[k] > 0 && value[k + 1] > 0) quota = fmin(quota, value[k] / value[k + 1]);
    return quota;
}

/* Calls each() with the folder of each control group of this process that limits `controller` ("cpu" or
   "memory"), and with the folders of the group's parents. All paths begin with `root`, "" except in tests. In
   a container /proc may name folders of the host; each() takes a missing folder as no limit. */
static void tt__each_group(const char *root, const char *controller,
                           void (*each)(const char *folder, void *arg), void *arg)
{
    char line[4096], folder[8192];
    const size_t length = strlen(controller);
    if (snprintf(folder, sizeof folder, "%s/proc/self/cgroup", root) >= (int)sizeof folder) return;
    FILE *f = fopen(folder, "r");
    if (!f) return;
    while (fgets(line, sizeof line, f)) { /* a line is `number:controllers:/path`, in version 2
                                             `number::/path` */
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(++controllers, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        bool second = !*controllers, has = false;
        for (const char *c = controllers; *c; c += strcspn(c, ","), c += *c == ',')
            has = has || (strcspn(c, ",") == length && strncmp(c, controller, length) == 0);
        if (!second && !has) continue;
        const char *below[2] = {second ? "" : controllers, second ? "unified" : controller};
        const int places = strcmp(below[0], below[1]) == 0 ? 1 : 2;
        for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
            *end = 0;
            for (int k = 0; k < places; k++) {
                int n = snprintf(folder, sizeof folder, "%s/sys/fs/cgroup/%s%s", root, below[k], group);
                if (n < (int)sizeof folder) each(folder, arg);
            }
        }
    }
    fclose(f);
}

static void tt__min_quota(const char *folder, void *arg)
{
    double *quota = (double *)arg;
    *quota = fmin(*quota, tt__quota_in(folder));
}

/* Returns the smallest quota of the process's control groups, in CPUs. */
static double tt__cgroup_quota(const char *root)
{
    double quota = HUGE_VAL;
    tt__each_group(root, "cpu", tt__min_quota, &quota);
    return quota;
}

/* Returns the number after `key` in the first line of folder/file that begins with `key`; -1 if no line
   begins with `key` and a number. */
static double tt__number_in(const char *folder, const char *file, const char *key)
{
    char path[8192], line[256], *end;
    double n = -1;
    if (snprintf(path, sizeof path, "%s/%s", folder, file) >= (int)sizeof path) return -1;
    FILE *f = fopen(path, "r");
    if (!f) return -1;
    while (n < 0 && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, strlen(key)) != 0) continue;
        const char *from = line + strlen(key);
        const double x = strtod(from, &end);
        if (end > from) n = x;
    }
    fclose(f);
    return n;
}

/* Lowers the tt__room `arg` to the bytes that a control group still leaves. The group counts cached files as
   used, but the kernel frees them on demand, so they count as available here. */
static void tt__group_room(const char *folder, void *arg)
{
    static const struct { const char *limit, *used, *inactive, *active, *swap_limit, *swap_used; } names[] = {
        {"memory.max", "memory.current", "inactive_file ", "active_file ", "memory.swap.max",
         "memory.swap.current"},
        {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ", "total_active_file ",
         "memory.memsw.limit_in_bytes", "memory.limit_in_bytes"}};
    tt__room *m = (tt__room *)arg;
    for (int k = 0; k < 2; k++) {
        const double limit = tt__number_in(folder, names[k].limit, "");
        if (limit < 0) continue;
        const double used = tt__number_in(folder, names[k].used, ""),
                     cached = fmax(tt__number_in(folder, "memory.stat", names[k].inactive), 0) +
                              fmax(tt__number_in(folder, "memory.stat", names[k].active), 0),
                     swap_limit = tt__number_in(folder, names[k].swap_limit, ""),
                     swap = swap_limit < 0 ? m->swap
                                           : swap_limit - tt__number_in(folder, names[k].swap_used, "");
        m->group_limit = fmin(m->group_limit, limit);
        tt__room_of(m, limit - fmax(used - cached, 0) + fmax(fmin(swap, m->swap), 0), limit,
                    "a control group allows");
    }
}

/* Returns the memory that the process may still allocate. The limits are the machine's free or file-caching
   memory and swap space, the control groups and, if root is "", RLIMIT_AS. Unknown limits are ignored. */
static tt__room tt__memory_room(const char *root)
{
    tt__room m = {HUGE_VAL, HUGE_VAL, HUGE_VAL, 0, ""};
    char folder[4096];
    struct rlimit addresses;
    if (snprintf(folder, sizeof folder, "%s/proc", root) >= (int)sizeof folder) return m;
    m.swap = 1024 * fmax(tt__number_in(folder, "meminfo", "SwapFree:"), 0);
    const double available = tt__number_in(folder, "meminfo", "MemAvailable:");
    if (available >= 0)
        tt__room_of(&m, 1024 * available + m.swap, 1024 * tt__number_in(folder, "meminfo", "MemTotal:"),
                    "the machine has");
    tt__each_group(root, "memory", tt__group_room, &m);
    const double pages = tt__number_in(folder, "self/statm", "");
    if (!*root && pages >= 0 && getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY)
        tt__room_of(&m, (double)addresses.rlim_cur - pages * (double)sysconf(_SC_PAGESIZE),
                    (double)addresses.rlim_cur, "ulimit -v allows");
    return m;
}

/* Returns the number of CPUs in the affinity mask of the calling thread; 0 if the kernel doesn't say. The C
   library's cpu_set_t needs _GNU_SOURCE, which may come too late here, and holds only 1,024 CPUs. */
static int tt__affinity_cpus(void)
{
    unsigned long mask[8192 / 8 / sizeof(long)]; /* 8192 bits: Linux's maximum of CPUs (NR_CPUS, x86) */
    long bytes = syscall(SYS_sched_getaffinity, 0, sizeof mask, mask);
    int n = 0;
    for (long k = 0; k < bytes / (long)sizeof *mask; k++) n += __builtin_popcountl(mask[k]);
    return n;
}
#elif defined(_WIN32)
/* Returns the memory that the process may still allocate. The limits are the memory that Windows has free
   with the page file, and the job object of the process. `root` is for tests on Linux. */
static tt__room tt__memory_room(const char *root)
{
    tt__room m = {HUGE_VAL, HUGE_VAL, HUGE_VAL, 0, ""};
    MEMORYSTATUSEX now;
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION job;
    (void)root;
    memset(&now, 0, sizeof now);
    now.dwLength = sizeof now;
    if (GlobalMemoryStatusEx(&now)) {
        const double available = (double)(now.ullAvailPhys < now.ullAvailPageFile ? now.ullAvailPhys
                                                                                  : now.ullAvailPageFile);
        m.swap = (double)now.ullAvailPageFile - available;
        tt__room_of(&m, (double)now.ullAvailPageFile, (double)now.ullTotalPhys, "the machine has");
    }
    if (QueryInformationJobObject(NULL, JobObjectExtendedLimitInformation, &job, sizeof job, NULL)) {
        const DWORD flags = job.BasicLimitInformation.LimitFlags;
        if (flags & JOB_OBJECT_LIMIT_JOB_MEMORY) m.group_limit = (double)job.JobMemoryLimit;
        if (flags & JOB_OBJECT_LIMIT_PROCESS_MEMORY)
            m.group_limit = fmin(m.group_limit, (double)job.ProcessMemoryLimit);
        tt__room_of(&m, m.group_limit, m.group_limit, "a job object allows");
    }
    return m;
}
#endif

/* Returns the number of CPUs, 1 to 256, that the calling thread and the threads that it starts may use: the
   CPUs of its affinity mask, but not more than the control groups' quota. */
static int tt__usable_cpus(void)
{
    long n = tt__online_cpus();
#if defined(TT__KNOWS_ROOM)
    int mask = tt__affinity_cpus();
    if (mask) n = mask;
#endif
#if defined(__linux__)
    double quota = tt__cgroup_quota("");
    if (quota < (double)n) n = (long)ceil(quota);
#endif
    return (int)tt__max(1, tt__min(n, 256));
}
