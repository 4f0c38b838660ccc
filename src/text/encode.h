#pragma once
#include "../base/base.h"
#include "code_points.h"
#include "../files/utf8.h"
#include "types.h"
#include "lookups.h"
#include "encoder.h"
#include "normalize.h"
#include "split.h"
#include "wordpiece.h"
#include "bpe.h"
#include "unigram.h"

/* --------------------------------------------------------------------------- tokenizer: from texts to ids */

static bool tt__is_word_at(const tt_tokenizer *k, const char *text, size_t bytes, size_t at)
{
    return at < bytes && (k->unicode->bits[tt__utf8_next(text, bytes, &at)] & TT__IS_WORD);
}

/* Finds the added tokens in a text, adds their ids, and encodes the parts between them. tree: 0 before, 1
   after normalization. first: the text is the first part of the whole text. */
static void tt__cut_text(tt__encoder *e, int tree, const char *text, size_t bytes, bool first);

static void tt__cut_between(tt__encoder *e, int tree, const char *text, size_t bytes, bool first)
{
    if (tree == 1) {
        tt__split_text(e, 0, text, bytes, first);
        return;
    }
    text = e->origin = tt__normalize(e, text, &bytes);
    e->origin_bytes = bytes;
    if (!e->failed) tt__cut_text(e, 1, text, bytes, first);
}

static void tt__cut_text(tt__encoder *e, int tree, const char *text, size_t bytes, bool first)
{
    const tt_tokenizer *k = e->k;
    const tt__added_tree *t = &k->trees[tree];
    const uint8_t *bits = k->unicode->bits;
    size_t from = 0, white_to = 0; /* white_to: end of the white space after the last token */
    for (size_t at = 0; t->prefixes.count && at < bytes && !tt__encoder_done(e);) {
        const char *next = t->first < 0 ? text + at : (const char *)memchr(text + at, t->first, bytes - at);
        if (!next) break;
        at = (size_t)(next - text);
        size_t start = at, stop = at, i = at;
        int32_t found = -1, node = t->begins[(uint8_t)text[at]] ? 0 : -1;
        while (node >= 0 && i < bytes && (node = tt__prefix_next(&t->prefixes, node, text[i++])) >= 0)
            if (t->prefixes.ids[node] >= 0) found = t->prefixes.ids[node], stop = i;
        if (found < 0) { at++; continue; }
        const tt__added *a = &k->added[found];
        at = stop;
        if (a->single_word && ((start && tt__is_word_at(k, text, start, tt__utf8_last(text, start))) ||
                               tt__is_word_at(k, text, bytes, stop)))
            continue;
        if (a->lstrip) start = tt__white_begin(bits, text, from, start);
        if (a->rstrip && stop >= white_to)
            white_to = tt__bits_end(bits, TT__IS_SPACE, TT__IS_SPACE, text, bytes, stop);
        if (a->rstrip) stop = white_to;
        const bool starts = tree ? tt__is_first(e, first, text, from) : first && !from;
        if (from < start) tt__cut_between(e, tree, text + from, start - from, starts);
        if (!e->failed) tt__encoder_id(e, a->id);
        from = stop;
    }
    const bool starts = tree ? tt__is_first(e, first, text, from) : first && !from;
    if (from < bytes && !tt__encoder_done(e)) tt__cut_between(e, tree, text + from, bytes - from, starts);
}

/* Encodes a text, without the ids that the post-processor adds. Stores the first `room` ids. Returns the
   number of ids. Unless `whole`, encoding and counting may end after `room` ids. -1: out of memory. */
static int64_t tt__encode(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int64_t room,
                          bool whole)
{
    static void (*const words[])(tt__encoder *, const char *, size_t) = {tt__bpe_word, tt__unigram_word,
                                                                        tt__wordpiece_word};
    tt__encoder e;
    tt__encoder_init(&e, k);
    e.word = words[k->model.kind];
    e.ids = ids;
    e.room = room;
    e.whole = whole;
    e.ascii = tt__is_ascii(text, bytes);
    const size_t valid = e.ascii ? bytes : tt__utf8_invalid(text, bytes);
    if (valid < bytes) { /* replaces invalid bytes by U+FFFD */
        tt__rewrite w = tt__rewrite_begin(&e, TT__CLEAN_TEXT, text, bytes, false);
        tt__rewrite_put(&w, text, valid, 0);
        for (size_t at = valid; at < bytes;) {
            const uint32_t c = tt__utf8_next(text, bytes, &at);
            tt__rewrite_point(&w, c == TT__INVALID ? 0xFFFD : c, 0);
        }
        text = tt__rewrite_end(&w, &bytes);
    }
    if (bytes && !e.failed) tt__cut_text(&e, 0, text, bytes, true);
    tt__encoder_free(&e);
    return e.failed ? -1 : e.count;
}

/* Does the work of tt_tokenize. Returns the number of ids of the text. Unless `whole`, encoding and counting
   may end after max_tokens ids. -1: out of memory. */
static int tt__tokenize_text(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids,
                             int max_tokens, bool whole)
{
    const int around = k->finish.before.n + k->finish.after.n, room = max_tokens - around;
    if (room < 0) return 0;
    const int64_t n = tt__encode(k, text, bytes, ids + k->finish.before.n, room, whole);
    const int64_t kept = tt__min(n, room);
    if (n < 0) return -1;
    for (int i = 0; i < k->finish.before.n; i++) ids[i] = k->finish.before.ids[i];
    for (int i = 0; i < k->finish.after.n; i++) ids[k->finish.before.n + kept + i] = k->finish.after.ids[i];
    return (int)tt__min(n + around, INT_MAX);
}

int tt_tokenize(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int max_tokens)
{
    return (int)tt__min(tt__tokenize_text(k, text, bytes, ids, max_tokens, false), max_tokens);
}

int64_t tt_tokenizer_encode(const tt_tokenizer *k, const char *text, size_t bytes, bool special, int32_t *ids,
                            int64_t room)
{
    int64_t count = 0;
    for (int i = 0; special && i < k->finish.before.n; i++, count++)
        if (count < room) ids[count] = k->finish.before.ids[i];
    const int64_t left = tt__max(0, room - count);
    const int64_t n = tt__encode(k, text, bytes, left ? ids + count : NULL, left, true);
    if (n < 0) return -1;
    count += n;
    for (int i = 0; special && i < k->finish.after.n; i++, count++)
        if (count < room) ids[count] = k->finish.after.ids[i];
    return count;
}
