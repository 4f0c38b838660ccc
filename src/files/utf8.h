#pragma once
#include "../base/base.h"

/* ------------------------------------------------------------------------------------------------- UTF-8 */

#define TT__INVALID 0xFFFFFFFFu

/* Returns the code point at text[*at] and moves *at past it. Returns TT__INVALID for bytes that are not UTF-8
   (overlong forms, surrogates, incomplete sequences). In that case, moves *at past the bytes that could begin
   a valid sequence, at least one byte, as the Unicode Standard, section 3.9, recommends. */
static uint32_t tt__utf8_next(const char *text, size_t bytes, size_t *at)
{
    const unsigned char *p = (const unsigned char *)text;
    uint32_t c = p[(*at)++], low = 0x80, high = 0xBF; /* bounds of the next byte */
    int more = c < 0xE0 ? 1 : c < 0xF0 ? 2 : 3;
    if (c < 0x80) return c;
    if (c < 0xC2 || c > 0xF4) return TT__INVALID;
    if (c == 0xE0) low = 0xA0;
    if (c == 0xED) high = 0x9F;
    if (c == 0xF0) low = 0x90;
    if (c == 0xF4) high = 0x8F;
    for (c &= 0x3Fu >> more; more; more--) {
        if (*at == bytes || p[*at] < low || p[*at] > high) return TT__INVALID;
        c = c << 6 | (p[(*at)++] & 0x3Fu);
        low = 0x80;
        high = 0xBF;
    }
    return c;
}

static int tt__utf8_put(uint32_t c, char to[4]) /* writes c in UTF-8 and returns the number of bytes */
{
    int more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    to[0] = (char)(more ? (0xFF00u >> (more + 1) & 0xFF) | c >> 6 * more : c);
    for (int k = 1; k <= more; k++) to[k] = (char)(0x80 | (c >> 6 * (more - k) & 0x3F));
    return more + 1;
}

/* Returns the offset of the last character of a UTF-8 text, which must not be empty. */
static size_t tt__utf8_last(const char *text, size_t bytes)
{
    do {
        bytes--;
    } while (((unsigned char)text[bytes] & 0xC0) == 0x80);
    return bytes;
}

/* Returns the offset of the first byte of a text that is not UTF-8; `bytes` if the whole text is UTF-8. */
static size_t tt__utf8_invalid(const char *text, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        size_t from = at;
        if (tt__utf8_next(text, bytes, &at) == TT__INVALID) return from;
    }
    return bytes;
}

static bool tt__is_utf8(const char *text) { return !text[tt__utf8_invalid(text, strlen(text))]; }
