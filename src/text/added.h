#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "unicode.h"
#include "vocabulary.h"
#include "wordpiece.h"
#include "bpe.h"
#include "merges.h"
#include "split.h"
#include "normalize.h"

/* ---- added tokens */

static bool tt__bpe_word_at(const tt__bpe *b, const char *text, size_t bytes, size_t at)
{
    return at < bytes && (b->bits[tt__utf8_next(text, bytes, &at)] & TT__IS_WORD);
}

/* Cuts a text at the added tokens of a trie: 0 before normalization, 1 after it. */
static void tt__bpe_cut(tt__encoder *e, int trie, const char *text, size_t bytes, bool first);

static void tt__bpe_between(tt__encoder *e, int trie, const char *text, size_t bytes, bool first)
{
    if (trie == 1) {
        tt__bpe_split(e, 0, text, bytes, first);
        return;
    }
    text = e->origin = tt__bpe_normalize(e, text, &bytes);
    e->origin_bytes = bytes;
    if (!e->failed) tt__bpe_cut(e, 1, text, bytes, first);
}

static void tt__bpe_cut(tt__encoder *e, int trie, const char *text, size_t bytes, bool first)
{
    const tt__bpe *b = e->b;
    const tt__trie *t = &b->tries[trie];
    size_t from = 0, white_to = 0; /* what is before white_to, and behind a token, is white space */
    for (size_t at = 0; t->count && at < bytes && !tt__encoder_done(e);) {
        size_t start = at, stop = at, i = at;
        int32_t found = -1;
        for (int32_t node = t->root[(uint8_t)text[at]]; node >= 0;) {
            if (t->nodes[node].added >= 0) found = t->nodes[node].added, stop = i + 1;
            if (++i == bytes) break;
            for (node = t->nodes[node].child; node >= 0 && t->nodes[node].byte != (uint8_t)text[i];)
                node = t->nodes[node].sibling;
        }
        if (found < 0) { at++; continue; }
        const tt__added *a = &b->added[found];
        at = stop;
        if (a->single_word &&
            ((start && tt__bpe_word_at(b, text, start, tt__utf8_last(text, start))) ||
             tt__bpe_word_at(b, text, bytes, stop)))
            continue;
        while (a->lstrip && start > from) {
            const size_t last = tt__utf8_last(text, start);
            size_t next = last;
            if (!(b->bits[tt__utf8_next(text, start, &next)] & TT__IS_SPACE)) break;
            start = last;
        }
        if (a->rstrip && stop >= white_to)
            white_to = tt__bits_end(b->bits, TT__IS_SPACE, TT__IS_SPACE, text, bytes, stop, SIZE_MAX);
        if (a->rstrip) stop = white_to;
        const bool starts = trie ? tt__is_first(e, first, text, from) : first && !from;
        if (from < start) tt__bpe_between(e, trie, text + from, start - from, starts);
        if (!e->failed) tt__encoder_id(e, a->id);
        from = stop;
    }
    const bool starts = trie ? tt__is_first(e, first, text, from) : first && !from;
    if (from < bytes && !tt__encoder_done(e)) tt__bpe_between(e, trie, text + from, bytes - from, starts);
}

/* The ids of a text without those around it: `room` are kept. Returns how many there are, all if `whole`; -1:
   out of memory. */
static int64_t tt__bpe_encode(const tt__bpe *b, const char *text, size_t bytes, int32_t *ids, int64_t room,
                              bool whole)
{
    tt__encoder e;
    memset(&e, 0, sizeof e);
    e.b = b;
    e.ids = ids;
    e.room = room;
    e.whole = whole;
    size_t invalid = tt__utf8_invalid(text, bytes);
    if (invalid < bytes) {
        char *out = bytes < SIZE_MAX / 3 ? (char *)tt__encoder_room(&e, &e.clean, 3 * bytes, 1) : NULL;
        size_t n = invalid;
        if (!out) return -1;
        memcpy(out, text, invalid);
        for (size_t at = invalid; at < bytes;) {
            const uint32_t c = tt__utf8_next(text, bytes, &at);
            n += (size_t)tt__utf8_put(c == TT__INVALID ? 0xFFFD : c, out + n);
        }
        text = out;
        bytes = n;
    }
    if (bytes) tt__bpe_cut(&e, 0, text, bytes, true);
    tt__buffer *const buffers[] = {&e.clean, &e.normal[0], &e.normal[1], &e.points, &e.spare, &e.symbols,
                                   &e.heap};
    for (int i = 0; i < TT__COUNT(buffers); i++) tt__free(b->ctx, buffers[i]->memory);
    for (int i = 0; i < TT__BPE_STAGES; i++) tt__free(b->ctx, e.stages[i].memory);
    return e.failed ? -1 : e.count;
}
