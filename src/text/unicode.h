#pragma once
#include "../base/base.h"
#include "code_points.h"

/* ----------------------------------------------------------------------------------------- tables of Unicode
   Case, composition and classes of characters, unpacked from code_points.h. */

/* Reads a number at *at and moves *at past the number. The last digit of a number is one of 60 characters;
   the other digits, in base 30, use 30 other characters. */
static uint32_t tt__unicode_number(const char **at)
{
    for (uint32_t n = 0;;) {
        char c = *(*at)++;
        uint32_t digit = (uint32_t)(c - '#' - (c > '?') - (c > '\\'));
        if (digit < 60) return n * 60 + digit;
        n = n * 30 + digit - 60 + 1;
    }
}

/* Reads a number that may be negative, and returns its sum with `before`. */
static uint32_t tt__unicode_from(uint32_t before, const char **at)
{
    uint32_t n = tt__unicode_number(at);
    return before + ((n >> 1) ^ (0u - (n & 1)));
}

/* Sets the bits of each code point in `to` from `rows` runs of code points. A row is two numbers: the
   distance of the run's first code point from the end of the previous run, and
   `(last - first) << shift | bits`. texts: one or more strings, which are read one after another. */
static void tt__unicode_bits(uint8_t *to, int rows, int shift, const char *const *texts)
{
    const char *at = *texts;
    for (uint32_t c = 0; rows; rows--) {
        if (!*at) at = *++texts;
        c += tt__unicode_number(&at);
        if (!*at) at = *++texts;
        const uint32_t more = tt__unicode_number(&at);
        memset(to + c, (int)(more & ((1u << shift) - 1)), (more >> shift) + 1);
        c += (more >> shift) + 1;
    }
}

static bool tt__pair_less(const void *arg, uint32_t x, uint32_t y)
{
    const tt__unicode *u = (const tt__unicode *)arg;
    const uint32_t *a = u->pairs[x], *b = u->pairs[y];
    return a[1] != b[1] ? a[1] < b[1] : a[2] < b[2];
}

static void tt__unicode_compat(tt__unicode *u)
{
    const char *at = tt__compat_text[0];
    uint32_t c = 0, a = 0, b;
    for (uint32_t k = 0, text = 0, count = 0; k < TT__COMPAT_ROWS; k++) {
        if (!*at) at = tt__compat_text[++text];
        const uint32_t more = tt__unicode_number(&at), n = more % 18 + 1, distance = more / 18 + 1;
        c += distance;
        u->compat[k][0] = c << 11;
        u->compat[k][1] = count << 5 | n;
        b = a + distance;
        for (uint32_t i = 0; i < n; i++) {
            if (!*at) at = tt__compat_text[++text];
            u->compat_points[count++] = b = tt__unicode_from(b, &at);
            if (!i) a = b;
        }
    }
}

static tt__unicode *tt__unicode_new(tt_context *ctx) /* the caller frees the result */
{
    static const char *const bert = tt__bert_text;
    tt__unicode *u = (tt__unicode *)tt__calloc(ctx, sizeof *u);
    if (!u) return NULL;
    tt__unicode_bits(u->bits, TT__LETTER_ROWS, 8, tt__letter_text);
    tt__unicode_bits(u->bert, TT__BERT_ROWS, 2, &bert);
    const char *at = tt__mark_text;
    uint32_t c = 0, a = 0, b = 0, to = 0;
    for (int k = 0; k < TT__MARK_ROWS; k++) {
        c += tt__unicode_number(&at);
        const uint32_t more = tt__unicode_number(&at);
        u->marks[k][0] = c << 11 | more >> 6;
        u->marks[k][1] = more & 63;
        c += (more >> 6) + 1;
    }
    at = tt__pair_text;
    c = 0;
    for (uint32_t k = 0, composed = 0; k < TT__PAIR_ROWS; k++) {
        const uint32_t distance = tt__unicode_number(&at);
        c += distance >> 1;
        u->pairs[k][0] = c << 11 | (distance & 1);
        u->pairs[k][1] = a = tt__unicode_from(a, &at);
        u->pairs[k][2] = b = tt__unicode_from(b, &at);
        if (distance & 1) u->by_pair[composed++] = k;
    }
    tt__sort_indices(u->by_pair, TT__COMPOSED_PAIRS, tt__pair_less, u);
    at = tt__cjk_text;
    for (int k = 0; k < TT__CJK_POINTS; k++) u->cjk[k] = to = tt__unicode_from(to, &at);
    at = tt__grapheme_text;
    c = 0;
    for (int k = 0; k < TT__GRAPHEME_ROWS; k++) {
        c += tt__unicode_number(&at);
        const uint32_t more = tt__unicode_number(&at);
        u->graphemes[k][0] = c << 11;
        c += more >> 4;
        u->graphemes[k][1] = c++ << 4 | (more & 15);
    }
    at = tt__lower_text;
    c = to = 0;
    for (int k = 0; k < TT__LOWER_RUNS; k++) {
        const uint32_t distance = tt__unicode_number(&at);
        c += distance;
        u->lower[k][0] = c << 11 | tt__unicode_number(&at);
        u->lower[k][1] = to = tt__unicode_from(to + distance, &at);
    }
    tt__unicode_compat(u);
    return u;
}

/* Returns how many rows of a sorted table begin with a code point that is at most c. A row has `columns`
   numbers, of which the first is the row's code point, shifted left by 11 bits. */
static int tt__rows_to(const uint32_t *table, int rows, int columns, uint32_t c)
{
    int low = 0, high = rows;
    while (low < high) {
        int middle = (low + high) / 2;
        if (table[middle * columns] >> 11 <= c) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Returns whether BERT's tokenizer makes code point c a word of its own, as a Chinese character. The range
   U+2B820..U+2B91F is missing because the reference, the Rust package `tokenizers`, has a typing error. */
static bool tt__is_cjk(uint32_t c)
{
    return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) || (c >= 0xF900 && c <= 0xFAFF) ||
           (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B81F) ||
           (c >= 0x2B920 && c <= 0x2CEAF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

static int tt__grapheme_class(const tt__unicode *u, uint32_t c)
{
    if ((c >= 0x1100 && c < 0x1160) || (c >= 0xA960 && c < 0xA97D)) return TT__GRAPHEME_L;
    if ((c >= 0x1160 && c < 0x11A8) || (c >= 0xD7B0 && c < 0xD7C7)) return TT__GRAPHEME_V;
    if ((c >= 0x11A8 && c < 0x1200) || (c >= 0xD7CB && c < 0xD7FC)) return TT__GRAPHEME_T;
    if (c >= 0xAC00 && c < 0xD7A4) return (c - 0xAC00) % 28 ? TT__GRAPHEME_LVT : TT__GRAPHEME_LV;
    const int row = tt__rows_to(&u->graphemes[0][0], TT__GRAPHEME_ROWS, 2, c) - 1;
    if (row < 0 || c > u->graphemes[row][1] >> 4) return TT__GRAPHEME_OTHER;
    return (int)(u->graphemes[row][1] & 15);
}

/* Returns the rank of the combining class of code point c; higher classes have higher ranks. Returns 0 if c
   is a starter, not a mark. */
static uint32_t tt__mark_rank(const tt__unicode *u, uint32_t c)
{
    int row = c < 0x300 ? -1 : tt__rows_to(&u->marks[0][0], TT__MARK_ROWS, 2, c) - 1;
    return row >= 0 && c - (u->marks[row][0] >> 11) <= (u->marks[row][0] & 0x7FF) ? u->marks[row][1] : 0;
}

/* Writes the lower case of a code point. Returns the number of code points: 1, or 2 for U+0130. */
static size_t tt__lower_case(const tt__unicode *u, uint32_t c, uint32_t out[2])
{
    out[0] = c;
    if (c == 0x130) return out[0] = 'i', out[1] = 0x307, 2;
    /* The run that contains c is one of the last runs that begin at or before c. */
    const int row = tt__rows_to(&u->lower[0][0], TT__LOWER_RUNS, 2, c) - 1;
    for (int k = row; k >= 0 && k >= row - TT__LOWER_LOOK_BACK; k--) {
        const uint32_t run = u->lower[k][0], offset = c - (run >> 11);
        const uint32_t stride = (run & 7) / 3 + 1, step = (run & 7) % 3;
        if (offset <= (run >> 3 & 255) && offset % stride == 0)
            return out[0] = u->lower[k][1] + offset / stride * step, 1;
    }
    return 1;
}

/* Decomposes a code point; if `compat`, also by compatibility (NFKD). Hangul is decomposed by arithmetic
   (Unicode Standard, section 3.12). Returns how many code points result: 1 to 18, without `compat` 1 to 4. */
enum { TT__DECOMPOSED = 18 };
static size_t tt__decompose(const tt__unicode *u, uint32_t c, bool compat, uint32_t out[TT__DECOMPOSED])
{
    size_t n = 0;
    uint32_t last[4]; /* the second parts of pairs, in reverse order */
    int taken = 0;
    const int at = compat && c >= 0xA0 ? tt__rows_to(&u->compat[0][0], TT__COMPAT_ROWS, 2, c) - 1 : -1;
    if (at >= 0 && u->compat[at][0] >> 11 == c) {
        n = u->compat[at][1] & 31;
        memcpy(out, u->compat_points + (u->compat[at][1] >> 5), n * sizeof *out);
        return n;
    }
    while (c >= 0xC0) {
        uint32_t cjk = c >= 0xF900 && c <= 0xFAFF ? u->cjk[c - 0xF900]
                     : c >= 0x2F800 && c <= 0x2FA1F ? u->cjk[c - 0x2F800 + 512] : c;
        if (cjk != c) { c = cjk; break; }
        if (c >= 0xAC00 && c <= 0xD7A3) {
            uint32_t s = c - 0xAC00;
            if (s % 28) last[taken++] = 0x11A7 + s % 28;
            last[taken++] = 0x1161 + s % 588 / 28;
            c = 0x1100 + s / 588;
            break;
        }
        int row = tt__rows_to(&u->pairs[0][0], TT__PAIR_ROWS, 3, c) - 1;
        if (row < 0 || u->pairs[row][0] >> 11 != c) break;
        if (u->pairs[row][2]) last[taken++] = u->pairs[row][2];
        c = u->pairs[row][1];
    }
    out[n++] = c;
    while (taken) out[n++] = last[--taken];
    return n;
}

/* Returns the composition of two code points. Returns 0 if a and b do not compose. */
static uint32_t tt__compose(const tt__unicode *u, uint32_t a, uint32_t b)
{
    if (a - 0x1100 < 19 && b - 0x1161 < 21) return 0xAC00 + ((a - 0x1100) * 21 + b - 0x1161) * 28;
    if (a - 0xAC00 < 11172 && (a - 0xAC00) % 28 == 0 && b - 0x11A8 < 27) return a + b - 0x11A7;
    size_t low = 0, high = TT__COMPOSED_PAIRS;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const uint32_t *pair = u->pairs[u->by_pair[middle]];
        if (pair[1] == a && pair[2] == b) return pair[0] >> 11;
        if (pair[1] < a || (pair[1] == a && pair[2] < b)) low = middle + 1;
        else high = middle;
    }
    return 0;
}
