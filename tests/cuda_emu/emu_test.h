// emu_test.h - the macros of tests/test.h, with equal output, for programs without tinytrain.h.
// The program's arguments are patterns ('*') of the tests to run.
#ifndef TT_EMU_TEST_H
#define TT_EMU_TEST_H
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "../test_main.h"

static inline bool test__equal(long a, long b, const char *file, int line, const char *text)
{
    char message[512];
    if (a != b) snprintf(message, sizeof message, "%s: %ld and %ld", text, a, b);
    return test__check(a == b, file, line, a != b ? message : text);
}
#define CHECK_EQUAL(a, b) test__equal((long)(a), (long)(b), __FILE__, __LINE__, #a " == " #b)
#define OK(call) CHECK_EQUAL(call, 0)

static inline int test_main(int argc, char **argv, const test_case *tests, int n)
{
    return test__main(argc, argv, tests, n);
}
#endif
