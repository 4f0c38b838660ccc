#pragma once
#include "../api/standard.h"
#include "../api/context.h"
#include "system.h"

/* --------------------------------------------------------------------------------------------------- text */

/* A text that grows in the caller's buffer. As with snprintf, `length` also counts bytes that did not fit. */
typedef struct tt__text_buffer { char *to; size_t capacity, length; } tt__text_buffer;

TT_PRINTF(2, 3)
static void tt__print(tt__text_buffer *text, const char *format, ...)
{
    va_list args;
    size_t room = text->length < text->capacity ? text->capacity - text->length : 0;
    va_start(args, format);
    int n = vsnprintf(room ? text->to + text->length : NULL, room, format, args);
    va_end(args);
    if (n > 0) text->length += (size_t)n;
}

/* Writes x with the fewest digits, 6 to 9, that read back as x, and with a decimal point in any locale. */
static const char *tt__shortest(float x, char to[32])
{
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(to, 32, "%.*g", digits, x);
        if (strtof(to, NULL) == x) break;
    }
    for (char *c = to; *c; c++) if (!strchr("+-0123456789e", *c)) *c = '.';
    return to;
}

/* Returns the end of the class, such as "[0-3a]", at the start of `pattern`; NULL if the class does not hold
   c. */
static const char *tt__match_class(const char *pattern, char c)
{
    const char *end = *pattern == '[' ? strchr(pattern, ']') : NULL;
    for (const char *p = pattern + 1; end && p < end; p++) {
        const bool range = p[1] == '-' && p + 2 < end;
        if (c >= *p && c <= (range ? p[2] : *p)) return end + 1;
        if (range) p += 2;
    }
    return NULL;
}

/* Returns whether `name` matches `pattern` ('*': any characters, '?': any character, '[0-3a]': 0..3 or a). */
static bool tt__match(const char *pattern, const char *name)
{
    const char *star = NULL, *retry = NULL, *after;
    while (*name) {
        if (*pattern == '*') { star = pattern++; retry = name; }
        else if (*pattern == '?' || *pattern == *name) { pattern++; name++; }
        else if ((after = tt__match_class(pattern, *name)) != NULL) { pattern = after; name++; }
        else if (star) { pattern = star + 1; name = ++retry; }
        else return false;
    }
    while (*pattern == '*') pattern++;
    return !*pattern;
}
