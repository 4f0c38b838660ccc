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

/* Adds the id of an added token. text: the bytes that spell the token, with the white space that the token
   takes in; a part of e->layer. */
static void tt__encoder_added(tt__encoder *e, int32_t id, const char *text, size_t bytes)
{
    if (e->count < e->room && e->ids) e->ids[e->count] = id;
    if (e->count < e->room && e->spans) tt__encoder_add_span(e, id, text, bytes, true);
    e->count++;
}

/* Finds the added tokens in a text, adds their ids, and encodes the parts between them. tree: 1 if the text
   is normalized, 0 if not. first: the text is the first part of the whole text. */
static void tt__cut_text(tt__encoder *e, int tree, const char *text, size_t bytes, bool first);

static void tt__cut_between(tt__encoder *e, int tree, const char *text, size_t bytes, bool first)
{
    if (tree == 1) {
        tt__split_text(e, 0, text, bytes, first);
        return;
    }
    const char *const layer = e->layer;
    const tt_span *const map = e->map;
    text = e->origin = tt__normalize_text(e, text, &bytes);
    e->origin_bytes = bytes;
    if (!e->failed) tt__cut_text(e, 1, text, bytes, first);
    e->layer = layer;
    e->map = map;
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
        if (!e->failed) tt__encoder_added(e, a->id, text + start, stop - start);
        from = stop;
    }
    const bool starts = tree ? tt__is_first(e, first, text, from) : first && !from;
    if (from < bytes && !tt__encoder_done(e)) tt__cut_between(e, tree, text + from, bytes - from, starts);
}

/* Encodes a text, without the ids that the post-processor adds. Stores the first `room` ids and spans; ids or
   spans may be NULL. Returns the number of ids, or -1 if memory runs out. Unless `whole`, encoding and
   counting may end after `room` ids. */
static int64_t tt__encode(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, tt_span *spans,
                          int64_t room, bool whole)
{
    static void (*const words[])(tt__encoder *, const char *, size_t) = {tt__bpe_word, tt__unigram_word,
                                                                        tt__wordpiece_word};
    tt__encoder e;
    tt__encoder_init(&e, k);
    e.word = words[k->model.kind];
    e.ids = ids;
    e.spans = spans;
    e.whole_text = e.layer = text;
    e.whole_bytes = bytes;
    e.room = room;
    e.whole = whole;
    e.ascii = tt__is_ascii(text, bytes);
    const size_t valid = e.ascii ? bytes : tt__utf8_invalid(text, bytes);
    if (valid < bytes) { /* replaces invalid bytes by U+FFFD */
        tt__rewrite w = tt__rewrite_begin(&e, TT__CLEAN_TEXT, text, bytes, spans != NULL);
        tt__rewrite_part(&w, text, valid, NULL, 0);
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

/* The result of tt__encode_texts. n: number of ids; whole: number of ids before texts were cut. n and whole
   are -1 when out of memory. */
typedef struct tt__encoded { int64_t n, whole; } tt__encoded;

/* Returns the number of ids that are put around a text or, if `pair`, around a pair of texts. */
static int tt__ids_around(const tt_tokenizer *k, bool pair)
{
    const tt__template *t = pair ? &k->finish.two : &k->finish.one;
    return t->around[0].n + t->around[1].n + t->around[2].n;
}

/* Returns whether an id of a text or, if `pairs`, of a pair of texts may have a token type other than 0. */
static bool tt__has_types(const tt_tokenizer *k, bool pairs)
{
    const tt__template *const templates[] = {&k->finish.one, &k->finish.two};
    int32_t types = 0;
    for (int n = 0; n < 1 + pairs; n++) {
        types |= templates[n]->types[0] | (n ? templates[n]->types[1] : 0);
        for (int part = 0; part < 3; part++)
            for (int i = 0; i < templates[n]->around[part].n; i++)
                types |= templates[n]->around[part].types[i];
    }
    return types != 0;
}

/* Writes ids that are put around texts, from index `at` on. */
static void tt__encode_around(const tt_encoding *o, const tt__around *around, int64_t at)
{
    for (int i = 0; i < around->n && at + i < o->room; i++) {
        if (o->ids) o->ids[at + i] = around->ids[i];
        if (o->types) o->types[at + i] = around->types[i];
        if (o->spans) o->spans[at + i].begin = o->spans[at + i].end = 0;
    }
}

/* Encodes the first or, if `second`, the second text. Writes at most `max` ids from index `at` on. Returns
   the number of ids; unless `whole`, encoding may end after `max` ids. */
static int64_t tt__encode_part(const tt_tokenizer *k, const tt_encoding *o, int second, int64_t at,
                               int64_t max, bool whole)
{
    const char *text = second ? o->pair : o->text;
    const size_t bytes = second ? o->pair_bytes : o->bytes;
    const int64_t room = at < o->room ? tt__min(max, o->room - at) : 0;
    const int32_t type = (o->pair ? &k->finish.two : &k->finish.one)->types[second];
    const int64_t n = tt__encode(k, text, bytes, o->ids && room ? o->ids + at : NULL,
                                 o->spans && room ? o->spans + at : NULL, room, whole || room < max);
    for (int64_t i = 0; i < tt__min(n, room) && o->types; i++) o->types[at + i] = type;
    return n;
}

/* Sets how many of the n[0] and n[1] ids of a pair are kept so that `max` remain, as truncation
   "longest_first" of the package `tokenizers` does. */
static void tt__encode_cut(const int64_t n[2], int64_t max, int64_t kept[2])
{
    const int longer = n[0] > n[1] ? 0 : 1, other = 1 - longer;
    kept[0] = n[0];
    kept[1] = n[1];
    if (n[0] + n[1] <= max) return;
    kept[longer] = tt__max(n[other], max - n[other]);
    if (kept[longer] + n[other] <= max) return;
    kept[other] = max / 2;
    kept[longer] = max - max / 2;
}

/* Encodes a text or a pair of texts for tt_tokenizer_encode. Unless `whole`, encoding and counting of one
   text may end after max_tokens ids. */
static tt__encoded tt__encode_texts(const tt_tokenizer *k, const tt_encoding *o, bool whole)
{
    static const tt__around none[3] = {{{0}, {0}, 0}};
    const tt__template *t = o->pair ? &k->finish.two : &k->finish.one;
    const tt__around *around = o->special ? t->around : none;
    const int used = o->special ? tt__ids_around(k, o->pair != NULL) : 0;
    const int64_t max = o->max_tokens ? o->max_tokens - used : INT64_MAX;
    int64_t n[2] = {0, 0}, kept[2] = {0, 0}, from = around[0].n, second;
    tt__encoded failed = {-1, -1}, empty = {0, 0}, done;
    if (o->pair && !k->finish.pairs) return failed;
    if (max < 0) return empty;
    n[0] = tt__encode_part(k, o, 0, from, max, whole || o->pair);
    if (n[0] < 0) return failed;
    kept[0] = tt__min(n[0], max);
    second = from + kept[0] + around[1].n;
    if (o->pair) {
        n[1] = tt__encode_part(k, o, 1, second, max, true);
        if (n[1] < 0) return failed;
        tt__encode_cut(n, max, kept);
        const int64_t to = from + kept[0] + around[1].n;
        if (to != second && tt__encode_part(k, o, 1, to, kept[1], false) < 0) return failed;
        second = to;
    }
    tt__encode_around(o, &around[0], 0);
    tt__encode_around(o, &around[1], second - around[1].n);
    tt__encode_around(o, &around[2], second + kept[1]);
    done.n = second + kept[1] + around[2].n;
    done.whole = done.n + n[0] - kept[0] + n[1] - kept[1];
    return done;
}

int64_t tt_tokenizer_encode(const tt_tokenizer *k, const tt_encoding *e)
{
    return tt__encode_texts(k, e, e->max_tokens == 0).n;
}

bool tt_tokenizer_pairs(const tt_tokenizer *k) { return k->finish.pairs; }

int tt_tokenize(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int max_tokens)
{
    const tt_encoding o = {text, bytes, NULL, 0, true, max_tokens, max_tokens, ids, NULL, NULL};
    return max_tokens > 0 ? (int)tt__encode_texts(k, &o, false).n : 0;
}

/* Writes the first `room` ids of a whole text into ids. If `special`, includes the tokens that are put around
   a text. Returns the number of ids of the text, or -1 if memory runs out. */
static int64_t tt__encode_ids(const tt_tokenizer *k, const char *text, size_t bytes, bool special,
                              int32_t *ids, int64_t room)
{
    const tt_encoding o = {text, bytes, NULL, 0, special, 0, room, ids, NULL, NULL};
    return tt__encode_texts(k, &o, true).n;
}
