#pragma once
#include "../base/base.h"
#include "../ops/linear/cpu_packing.h"
#include "../files/utf8.h"
#include "unicode.h"
#include "vocabulary.h"
#include "bpe.h"
#include "merges.h"
#include "unigram.h"

/* ---- splitters */

/* Where the run of characters ends from `at` on whose bits & mask are `value`; at most `most` of them. */
static size_t tt__bits_end(const uint8_t *bits, int mask, int value, const char *text, size_t bytes,
                           size_t at,
                           size_t most)
{
    for (size_t next; at < bytes && most; at = next, most--) {
        const uint8_t byte = (uint8_t)text[at];
        next = at + 1;
        const uint32_t c = byte < 0x80 ? byte : (next = at, tt__utf8_next(text, bytes, &next));
        if ((bits[c] & mask) != value) break;
    }
    return at;
}

static bool tt__is_line_end(char c) { return c == '\n' || c == '\r'; }

/* The bytes of a contraction behind its apostrophe; 0: there is none. U+017F is an s in another case. */
static size_t tt__contraction(const char *text, size_t bytes, bool any_case)
{
    const char other = any_case ? 0x20 : 0;
    const char a = (char)(bytes ? text[0] | (text[0] >= 'A' && text[0] <= 'Z' ? other : 0) : 0);
    const char b = (char)(bytes > 1 ? text[1] | (text[1] >= 'A' && text[1] <= 'Z' ? other : 0) : 0);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 1;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 2;
    return any_case && bytes > 1 && memcmp(text, "\xC5\xBF", 2) == 0 ? 2 : 0;
}

/* Where the match that begins at `at` ends; every character is in one. */
static size_t tt__pattern_end(const uint8_t *bits, const tt__pattern *p, const char *text, size_t bytes,
                              size_t at)
{
    const int kinds = TT__IS_LETTER | TT__IS_NUMBER | TT__IS_SPACE;
    size_t next = at, after = at, end;
    const uint32_t c = tt__utf8_next(text, bytes, &next);
    const int kind = bits[c] & kinds;
    int then = -1; /* what is behind c; -1: the end */
    if (c == '\'' && (end = tt__contraction(text + next, bytes - next, p->any_case)) > 0) return next + end;
    if (kind == TT__IS_LETTER) return tt__bits_end(bits, kinds, kind, text, bytes, next, SIZE_MAX);
    if (kind == TT__IS_NUMBER)
        return tt__bits_end(bits, kinds, kind, text, bytes, next,
                            p->digits ? (size_t)p->digits - 1 : SIZE_MAX);
    after = next;
    if (next < bytes) then = bits[tt__utf8_next(text, bytes, &after)] & kinds;
    const bool prefix = c == ' ' || (p->any_prefix && !(c == '\n' || c == '\r'));
    if (prefix && then == TT__IS_LETTER) return tt__bits_end(bits, kinds, then, text, bytes, next, SIZE_MAX);
    if (c == ' ' && then == TT__IS_NUMBER && !p->digits)
        return tt__bits_end(bits, kinds, then, text, bytes, next, SIZE_MAX);
    if (!kind || (c == ' ' && then == 0)) {
        end = tt__bits_end(bits, kinds, 0, text, bytes, next, SIZE_MAX);
        while (p->line_ends && end < bytes && tt__is_line_end(text[end])) end++;
        return end;
    }
    end = tt__bits_end(bits, TT__IS_SPACE, TT__IS_SPACE, text, bytes, next, SIZE_MAX);
    for (size_t last = end; p->line_ends && last > at; last--)
        if (tt__is_line_end(text[last - 1])) return last;
    if (end == bytes || end == next) return end;
    return tt__utf8_last(text, end);
}

static void tt__bpe_split(tt__encoder *e, int stage, const char *text, size_t bytes, bool first);

/* Is the part that begins at text + from the text's first? first: so could be one that begins with `text`. */
static bool tt__is_first(const tt__encoder *e, bool first, const char *text, size_t from)
{
    const size_t at = (size_t)((uintptr_t)text - (uintptr_t)e->origin);
    return first && (at < e->origin_bytes ? at + from < e->front : !from); /* or in a splitter's copy */
}

/* Runs of characters of a class, or each of them, and the runs between them. */
static void tt__bpe_split_class(tt__encoder *e, int stage, const char *text, size_t bytes, bool first)
{
    const tt__bpe *b = e->b;
    const tt__stage *s = &b->splitters[stage];
    const bool mapped = stage > b->mapped_at;
    const int mask = s->kind == TT__STAGE_DIGITS ? TT__IS_DIGIT : TT__IS_PUNCTUATION;
    size_t from = 0, at = 0;
    bool inside = false;
    while (at < bytes && !tt__encoder_done(e)) {
        const size_t start = at;
        const bool is = (b->bits[tt__bpe_char(mapped, text, bytes, &at)] & mask) != 0;
        if (start > from && (is != inside || (is && s->each))) {
            tt__bpe_split(e, stage + 1, text + from, start - from, tt__is_first(e, first, text, from));
            from = start;
        }
        inside = is;
    }
    if (!tt__encoder_done(e))
        tt__bpe_split(e, stage + 1, text + from, bytes - from, tt__is_first(e, first, text, from));
}

/* Words between white space. */
static void tt__bpe_split_white(tt__encoder *e, int stage, const char *text, size_t bytes, bool first)
{
    const uint8_t *bits = e->b->bits;
    for (size_t from = 0, at = 0; at < bytes && !tt__encoder_done(e); from = at) {
        from = tt__bits_end(bits, TT__IS_SPACE, TT__IS_SPACE, text, bytes, from, SIZE_MAX);
        at = tt__bits_end(bits, TT__IS_SPACE, 0, text, bytes, from, SIZE_MAX);
        tt__bpe_split(e, stage + 1, text + from, at - from, tt__is_first(e, first, text, from));
    }
}

static int tt__bpe_class_of(const tt__bpe *b, uint32_t c) /* a TT__CLASS_... */
{
    return c < TT__LOW ? b->low[c] : tt__class(b->unicode, c);
}

/* Words between white space, and each character of punctuation. */
static void tt__bpe_split_bert(tt__encoder *e, int stage, const char *text, size_t bytes, bool first)
{
    const tt__bpe *b = e->b;
    size_t from = 0;
    for (size_t at = 0; at <= bytes && !tt__encoder_done(e);) {
        const size_t start = at;
        const uint32_t c = at < bytes ? tt__utf8_next(text, bytes, &at) : (at++, (uint32_t)' ');
        const bool alone = tt__bpe_class_of(b, c) == TT__CLASS_PUNCTUATION;
        if (!alone && !(b->bits[c] & TT__IS_SPACE)) continue;
        tt__bpe_split(e, stage + 1, text + from, start - from, tt__is_first(e, first, text, from));
        if (alone && !tt__encoder_done(e))
            tt__bpe_split(e, stage + 1, text + start, at - start, tt__is_first(e, first, text, start));
        from = at;
    }
}

/* Three digits are a word. */
static void tt__bpe_split_triples(tt__encoder *e, int stage, const char *text, size_t bytes, bool first)
{
    size_t from = 0;
    for (size_t at = 0; at < bytes && !tt__encoder_done(e);) {
        size_t n = 0;
        while (n < 3 && at + n < bytes && text[at + n] >= '0' && text[at + n] <= '9') n++;
        if (n < 3) { at += n + 1; continue; }
        if (at > from)
            tt__bpe_split(e, stage + 1, text + from, at - from, tt__is_first(e, first, text, from));
        tt__bpe_split(e, stage + 1, text + at, 3, tt__is_first(e, first, text, at));
        from = at += 3;
    }
    if (from < bytes && !tt__encoder_done(e))
        tt__bpe_split(e, stage + 1, text + from, bytes - from, tt__is_first(e, first, text, from));
}

/* Replaces every `from` by `to`. Room for all is in `out`. Returns the bytes. */
static size_t tt__replace(const tt__stage *s, const char *text, size_t bytes, char *out)
{
    size_t n = 0;
    for (size_t at = 0; at < bytes;) {
        const bool here = bytes - at >= s->from_bytes && memcmp(text + at, s->from, s->from_bytes) == 0;
        if (here) memcpy(out + n, s->to, s->to_bytes);
        else out[n] = text[at];
        n += here ? s->to_bytes : 1;
        at += here ? s->from_bytes : 1;
    }
    return n;
}

/* The bytes that tt__replace needs at most; SIZE_MAX: too many. */
static size_t tt__replace_bytes(const tt__stage *s, size_t bytes)
{
    size_t room;
    if (s->to_bytes <= s->from_bytes) return bytes;
    return tt__mul_size(bytes / s->from_bytes + 1, s->to_bytes, &room) && room < SIZE_MAX / 2 - bytes
         ? room + bytes : SIZE_MAX;
}

static void tt__bpe_split_metaspace(tt__encoder *e, int stage, const char *text, size_t bytes, bool first)
{
    const tt__stage *s = &e->b->splitters[stage];
    const size_t room = tt__replace_bytes(s, bytes);
    char *out = room < SIZE_MAX - s->to_bytes
              ? (char *)tt__encoder_room(e, &e->stages[stage], room + s->to_bytes, 1) : NULL;
    if (!out) { e->failed = true; return; }
    size_t n = tt__replace(s, text, bytes, out + s->to_bytes), from = 0;
    char *begin = out + s->to_bytes;
    const bool marked = n >= s->to_bytes && memcmp(begin, s->to, s->to_bytes) == 0;
    if (!marked && (s->prefix_always || (s->prefix_first && first))) {
        begin = out;
        memcpy(begin, s->to, s->to_bytes);
        n += s->to_bytes;
    }
    for (size_t at = 1; s->splits && at + s->to_bytes <= n && !tt__encoder_done(e); at++) {
        if (memcmp(begin + at, s->to, s->to_bytes) != 0) continue;
        tt__bpe_split(e, stage + 1, begin + from, at - from, first && !from);
        from = at;
    }
    if (!tt__encoder_done(e)) tt__bpe_split(e, stage + 1, begin + from, n - from, first && !from);
}

/* Splits a text by the splitters from `stage` on. first: see tt__is_first. */
static void tt__bpe_split(tt__encoder *e, int stage, const char *text, size_t bytes, bool first)
{
    const tt__bpe *b = e->b;
    const tt__stage *s = &b->splitters[stage];
    if (!bytes) return;
    if (stage == b->n_splitters) {
        tt__bpe_words(e, text, bytes);
        return;
    }
    const tt__pattern *pattern = s->kind == TT__STAGE_REGEX ? &s->pattern : NULL;
    switch (s->kind) {
    case TT__STAGE_DIGITS: case TT__STAGE_PUNCTUATION:
        tt__bpe_split_class(e, stage, text, bytes, first);
        return;
    case TT__STAGE_TRIPLES: tt__bpe_split_triples(e, stage, text, bytes, first); return;
    case TT__STAGE_METASPACE: tt__bpe_split_metaspace(e, stage, text, bytes, first); return;
    case TT__STAGE_WHITE: tt__bpe_split_white(e, stage, text, bytes, first); return;
    case TT__STAGE_BERT: tt__bpe_split_bert(e, stage, text, bytes, first); return;
    default: break;
    }
    if (s->kind == TT__STAGE_BYTES) {
        if (s->prefix_space && text[0] != ' ') {
            char *out = (char *)tt__encoder_room(e, &e->stages[stage], bytes + 1, 1);
            if (!out) return;
            out[0] = ' ';
            memcpy(out + 1, text, bytes++);
            text = out;
        }
        if (s->splits) pattern = &tt__patterns[0].pattern;
    }
    for (size_t at = 0, end; at < bytes && !tt__encoder_done(e); at = end) {
        end = pattern ? tt__pattern_end(b->bits, pattern, text, bytes, at) : bytes;
        if (stage + 1 == b->n_splitters) tt__bpe_words(e, text + at, end - at);
        else tt__bpe_split(e, stage + 1, text + at, end - at, tt__is_first(e, first, text, at));
    }
}
