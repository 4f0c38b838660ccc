#pragma once
#include "../base/base.h"
#include "code_points.h"
#include "../files/utf8.h"
#include "types.h"
#include "lookups.h"
#include "encoder.h"
#include "normalize.h"

/* ----------------------------------------------------------------------------------- tokenizer: splitters */

static bool tt__is_line_end(char c) { return c == '\n' || c == '\r'; }

/* Returns the number of bytes at `text` that form an English contraction with the apostrophe directly before
   `text` ('s, 'll, ...). Returns 0 if there is no contraction. any_case: also accepts capitals and U+017F,
   which is a form of "s". */
static size_t tt__contraction(const char *text, size_t bytes, bool any_case)
{
    const char other = any_case ? 0x20 : 0;
    const char a = (char)(bytes ? text[0] | (text[0] >= 'A' && text[0] <= 'Z' ? other : 0) : 0);
    const char b = (char)(bytes > 1 ? text[1] | (text[1] >= 'A' && text[1] <= 'Z' ? other : 0) : 0);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 1;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 2;
    return any_case && bytes > 1 && memcmp(text, "\xC5\xBF", 2) == 0 ? 2 : 0;
}

/* Returns the end of the match of pattern *p that begins at `at`. The pattern matches at every character. */
static size_t tt__pattern_end(const uint8_t *bits, const tt__pattern *p, const char *text, size_t bytes,
                              size_t at)
{
    const int kinds = TT__IS_LETTER | TT__IS_NUMBER | TT__IS_SPACE;
    size_t next = at, after, end;
    const uint32_t c = tt__utf8_next(text, bytes, &next);
    const int kind = bits[c] & kinds;
    int then = -1; /* class of the character after c; -1: end of text */
    after = next;
    if (c == '\'' && (end = tt__contraction(text + next, bytes - next, p->any_case)) > 0) return next + end;
    if (kind == TT__IS_LETTER) return tt__bits_end(bits, kinds, kind, text, bytes, next);
    if (kind == TT__IS_NUMBER && !p->digits) return tt__bits_end(bits, kinds, kind, text, bytes, next);
    if (kind == TT__IS_NUMBER) {
        for (int n = 1; n < p->digits && next < bytes; n++, next = after)
            if ((bits[tt__utf8_next(text, bytes, &after)] & kinds) != kind) break;
        return next;
    }
    if (next < bytes) then = bits[tt__utf8_next(text, bytes, &after)] & kinds;
    const bool prefix = c == ' ' || (p->any_prefix && !(c == '\n' || c == '\r'));
    if (prefix && then == TT__IS_LETTER) return tt__bits_end(bits, kinds, then, text, bytes, next);
    if (c == ' ' && then == TT__IS_NUMBER && !p->digits)
        return tt__bits_end(bits, kinds, then, text, bytes, next);
    if (!kind || (c == ' ' && then == 0)) {
        end = tt__bits_end(bits, kinds, 0, text, bytes, next);
        while (p->line_ends && end < bytes && tt__is_line_end(text[end])) end++;
        return end;
    }
    end = tt__bits_end(bits, TT__IS_SPACE, TT__IS_SPACE, text, bytes, next);
    for (size_t last = end; p->line_ends && last > at; last--)
        if (tt__is_line_end(text[last - 1])) return last;
    if (end == bytes || end == next) return end;
    return tt__utf8_last(text, end);
}

static bool tt__are_digits(const char *text, size_t bytes, size_t at) /* returns whether three digits are at
                                                                         `at` */
{
    size_t n = 0;
    while (n < 3 && at + n < bytes && text[at + n] >= '0' && text[at + n] <= '9') n++;
    return n == 3;
}

/* Returns the end of the part of a text that splitter number `step` makes from index `at` on. */
static size_t tt__shard_end(const tt_tokenizer *k, int step, const char *text, size_t bytes, size_t at)
{
    static const tt__pattern gpt2 = {false, false, false, 0};
    const tt__text_step *s = &k->split.all[step];
    const uint8_t *bits = k->unicode->bits;
    const bool mapped = step > k->mapped_at;
    size_t next = at;
    switch (s->kind) {
    case TT__STEP_DIGITS: case TT__STEP_PUNCTUATION: {
        const int mask = s->kind == TT__STEP_DIGITS ? TT__IS_DIGIT : TT__IS_PUNCTUATION;
        const int is = bits[tt__next_char(mapped, text, bytes, &next)] & mask;
        for (size_t end = next; next < bytes && !(is && s->each); next = end)
            if ((bits[tt__next_char(mapped, text, bytes, &end)] & mask) != is) break;
        return next;
    }
    case TT__STEP_TRIPLES: /* each three digits are a word */
        if (tt__are_digits(text, bytes, at)) return at + 3;
        while (next < bytes && !tt__are_digits(text, bytes, next)) next++;
        return next;
    case TT__STEP_METASPACE:
        for (next++; s->splits && next + s->to_bytes <= bytes; next++)
            if (memcmp(text + next, s->to, s->to_bytes) == 0) return next;
        return bytes;
    case TT__STEP_BYTES: return s->splits ? tt__pattern_end(bits, &gpt2, text, bytes, at) : bytes;
    default: return tt__pattern_end(bits, &s->pattern, text, bytes, at);
    }
}

/* Returns whether the part that begins at `text + from` is the first part of the whole text. first: whether
   a part that begins at `text` may be the first. */
static bool tt__is_first(const tt__encoder *e, bool first, const char *text, size_t from)
{
    const size_t at = (size_t)((uintptr_t)text - (uintptr_t)e->origin);
    return first && (at < e->origin_bytes ? at + from < e->front : !from); /* a text outside of e->origin is a
                                                                              splitter's copy */
}

static void tt__split_text(tt__encoder *e, int step, const char *text, size_t bytes, bool first);

/* Cuts a text at white space and, in BERT's splitter, also before and after punctuation. Passes the resulting
   words to the splitters from number `step` on. */
static void tt__split_white(tt__encoder *e, int step, const char *text, size_t bytes, bool first)
{
    const tt_tokenizer *k = e->k;
    const uint8_t *bits = k->unicode->bits;
    const int ends = TT__IS_SPACE |
                     (k->split.all[step - 1].kind == TT__STEP_BERT ? TT__IS_PUNCTUATION : 0);
    for (size_t at = 0, end = 0; at < bytes && !tt__encoder_done(e); at = end) {
        const uint8_t c = (uint8_t)text[at];
        const int kind = bits[c < 0x80 ? end++, c : tt__utf8_next(text, bytes, &end)] & ends;
        if (kind & TT__IS_SPACE) continue;
        if (!kind) end = tt__bits_end(bits, ends, 0, text, bytes, end);
        if (step == k->split.n) e->word(e, text + at, end - at);
        else tt__split_text(e, step, text + at, end - at, tt__is_first(e, first, text, at));
    }
}

/* Cuts a text into words with the splitters from `step` on. first: a part that begins at `text` may be the
   first part of the whole text. */
static void tt__split_text(tt__encoder *e, int step, const char *text, size_t bytes, bool first)
{
    const tt_tokenizer *k = e->k;
    const tt__text_step *s = &k->split.all[step];
    if (!bytes) return;
    if (step == k->split.n) {
        e->word(e, text, bytes);
        return;
    }
    if (s->kind == TT__STEP_WHITE || s->kind == TT__STEP_BERT) {
        tt__split_white(e, step + 1, text, bytes, first);
        return;
    }
    const bool metaspace = s->kind == TT__STEP_METASPACE;
    const bool marked = *text == ' ' ||
                        (metaspace && bytes >= s->to_bytes && memcmp(text, s->to, s->to_bytes) == 0);
    const bool prefix = s->prefix_space || s->prefix_always || (s->prefix_first && first);
    const char *const layer = e->layer;
    const tt_span *const map = e->map;
    if (metaspace || (prefix && !marked)) {
        tt__rewrite w = tt__rewrite_begin(e, TT__SPLIT_TEXT + step, text, bytes, e->spans != NULL);
        const size_t front = e->front;
        size_t from = 0;
        if (prefix && !marked)
            from = tt__rewrite_prepend(&w, metaspace ? s->to : " ", metaspace ? s->to_bytes : 1);
        if (metaspace) tt__rewrite_replaced(&w, s, text + from, bytes - from);
        else tt__rewrite_part(&w, text + from, bytes - from, NULL, 0);
        text = tt__rewrite_end(&w, &bytes);
        e->front = front;
    }
    for (size_t at = 0, end; at < bytes && !tt__encoder_done(e); at = end) {
        end = tt__shard_end(k, step, text, bytes, at);
        if (step + 1 == k->split.n) e->word(e, text + at, end - at);
        else tt__split_text(e, step + 1, text + at, end - at, tt__is_first(e, first, text, at));
    }
    e->layer = layer;
    e->map = map;
}
