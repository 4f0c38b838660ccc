/* The common part of tests/test.h and tests/cuda_emu/emu_test.h: checks, and a loop over the tests that
   prints the lines which tests/run.sh counts. C99 and C++; needs bool, <math.h>, <stdio.h> and <string.h>.
   With TEST_CPU in the environment, each test's line ends with the test's CPU seconds. With TEST_PART=3/16,
   this process is the third of 16 that share the tests: it runs every 16th test and, in each
   TEST_CASE_IN_PARTS, the cases for which test_takes() is true. */
#ifndef TINYTRAIN_TEST_MAIN_H
#define TINYTRAIN_TEST_MAIN_H

#include <stdlib.h>
#ifdef _WIN32
#include "on_windows.h"
#else
#include <sys/resource.h>
#endif

#define TEST(name) static void name(void)
#define TEST_CASE(name) {#name, name, false}
#define TEST_CASE_IN_PARTS(name) {#name, name, true}
#define TEST_COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

typedef struct test_case { const char *name; void (*run)(void); bool in_parts; } test_case;

static struct {
    long checks, failed_checks;
    char failure[4096], skipped[256]; /* failure: text of the test's first failed check; skipped: why the
                                         test was skipped */
} test__state;

static inline bool test__check(bool ok, const char *file, int line, const char *text)
{
    test__state.checks++;
    if (ok) return true;
    if (!test__state.failed_checks++)
        snprintf(test__state.failure, sizeof test__state.failure, "%s:%d: %s", file, line, text);
    return false;
}

static inline bool test__near(double a, double b, double tolerance, const char *file, int line,
                              const char *text)
{
    char message[512];
    double error = fabs(a - b);
    bool wrong = !(error <= tolerance); /* NaN fails */
    if (wrong)
        snprintf(message, sizeof message, "%s: %.9g and %.9g differ by %.3g, tolerance %.3g", text, a, b,
                 error, tolerance);
    return test__check(!wrong, file, line, wrong ? message : text);
}

#define CHECK(cond) test__check((cond), __FILE__, __LINE__, #cond)
#define CHECK_NEAR(a, b, tolerance) \
    test__near((double)(a), (double)(b), (double)(tolerance), __FILE__, __LINE__, #a " ~ " #b)
/* Returns from the test (a void function) if the check fails. Checks conditions that the rest of the test
   needs. */
#define REQUIRE(cond) do { if (!CHECK(cond)) return; } while (0)
#define SKIP(why) \
    do { \
        snprintf(test__state.skipped, sizeof test__state.skipped, "%s", (why)); \
        return; \
    } while (0)

static inline bool test__match(const char *pattern, const char *name)
{
    if (*pattern == '*') return test__match(pattern + 1, name) || (*name && test__match(pattern, name + 1));
    if (!*pattern || !*name) return *pattern == *name;
    return (*pattern == '?' || *pattern == *name) && test__match(pattern + 1, name + 1);
}

/* Returns whether this process takes case `number` of a test, or test `number` of the program. */
static inline bool test_takes(int number)
{
    const char *text = getenv("TEST_PART");
    int part = 1, parts = 1;
    if (!text || !*text) return true;
    if (sscanf(text, "%d/%d", &part, &parts) != 2 || part < 1 || part > parts) {
        fprintf(stderr, "TEST_PART is '%s', not such as 3/16\n", text);
        exit(2);
    }
    return number % parts == part - 1;
}

static inline double test__cpu(void) /* seconds of all threads and of ended children */
{
    double seconds = 0;
#ifdef _WIN32
    seconds = windows_cpu_seconds();
#else
    for (int k = 0; k < 2; k++) {
        struct rusage use;
        if (getrusage(k ? RUSAGE_CHILDREN : RUSAGE_SELF, &use) != 0) continue;
        seconds += (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
                   1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
    }
#endif
    return seconds;
}

static inline int test__main(int argc, char **argv, const test_case *tests, int n)
{
#ifdef _WIN32
    _setmode(1, _O_BINARY); /* lines end as run.sh expects */
#endif
    const char *timed = getenv("TEST_CPU");
    int passed = 0, failed = 0, skipped = 0, whole = 0;
    for (int i = 0; i < n; i++) {
        bool wanted = argc < 2;
        for (int k = 1; k < argc; k++) wanted = wanted || test__match(argv[k], tests[i].name);
        if (!wanted || (!tests[i].in_parts && !test_takes(whole++))) continue;
        test__state.failed_checks = 0;
        test__state.skipped[0] = 0;
        double begin = test__cpu();
        tests[i].run();
        if (test__state.failed_checks) {
            printf("FAILED %s: %s\n", tests[i].name, test__state.failure);
            failed++;
        } else if (test__state.skipped[0]) {
            printf("skip %s: %s\n", tests[i].name, test__state.skipped);
            skipped++;
        } else {
            printf("ok %s", tests[i].name);
            if (timed && *timed) printf(" (%.2f s)", test__cpu() - begin);
            printf("\n");
            passed++;
        }
        fflush(stdout);
    }
    printf("%ld checks, %d skipped: %d passed, %d failed\n", test__state.checks, skipped, passed, failed);
    return failed ? 1 : 0;
}

#endif
