#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "vocabulary.h"
#include "bpe.h"
#include "merges.h"

/* ---- Unigram */

static size_t tt__prefix_slot(const tt__prefixes *t, uint64_t key) /* key: parent << 8 | byte */
{
    size_t at = (size_t)(key * 0x9E3779B97F4A7C15u >> t->shift);
    while (t->edges[at] != UINT64_MAX && t->edges[at] >> 28 != key) at = (at + 1) & (t->slots - 1);
    return at;
}

static int32_t tt__prefix_next(const tt__prefixes *t, int32_t node, char byte) /* -1: no token goes on so */
{
    const uint64_t edge = t->edges[tt__prefix_slot(t, (uint64_t)node << 8 | (uint8_t)byte)];
    return edge == UINT64_MAX ? -1 : (int32_t)(edge & 0xFFFFFFF);
}

/* The best way to spell a word up to a byte, and from it on. */
typedef struct tt__spelling {
    double score;
    int32_t from, id;      /* the last token: where it begins; -1: there is no way yet */
    int32_t to, next;      /* the next token of the best way through the word: where it ends */
} tt__spelling;

static void tt__spelling_try(tt__spelling *s, double score, size_t from, int32_t id)
{
    if (s->from >= 0 && !(score > s->score)) return; /* of two with the same score the first stays */
    s->score = score;
    s->from = (int32_t)from;
    s->id = id;
}

/* The ids of characters that no token spells: a token that is all of them, else their bytes, else one id. */
static void tt__unigram_unknown(tt__encoder *e, const char *text, size_t bytes)
{
    const tt__bpe *b = e->b;
    const int id = tt__bpe_find(&b->by_word, text, bytes);
    bool fallback = b->byte_fallback && id < 0;
    for (size_t i = 0; i < bytes && fallback; i++) fallback = b->fallback[(uint8_t)text[i]] >= 0;
    if (!fallback) tt__encoder_id(e, id >= 0 ? id : b->unk);
    for (size_t i = 0; i < bytes && fallback; i++) tt__encoder_id(e, b->fallback[(uint8_t)text[i]]);
}

/* Unigram (Kudo 2018, section 3.2): the tokens whose scores have the largest sum, by the algorithm of Viterbi
   over the bytes of a word. Where no token is the character at hand, an unknown one is tried too. */
static void tt__unigram_word(tt__encoder *e, const char *text, size_t bytes)
{
    const tt__bpe *b = e->b;
    tt__spelling *best = bytes < INT32_MAX
                       ? (tt__spelling *)tt__encoder_room(e, &e->heap, bytes + 1, sizeof *best) : NULL;
    if (!best) { e->failed = true; return; }
    for (size_t i = 0; i <= bytes; i++) best[i].from = -1;
    best[0].score = 0;
    for (size_t at = 0, next = 0; at < bytes; at = next) {
        const double score = best[at].score;
        int32_t node = 0;
        bool known = false;
        tt__utf8_next(text, bytes, &next);
        for (size_t i = at; i < bytes; i++) {
            node = tt__prefix_next(&b->prefixes, node, text[i]);
            if (node < 0) break;
            const int32_t id = b->prefixes.ids[node];
            if (id < 0) continue;
            tt__spelling_try(&best[i + 1], b->scores[id] + score, at, id);
            known |= i + 1 == next;
        }
        if (!known) tt__spelling_try(&best[next], b->unk_score + score, at, b->unk);
    }
    for (int32_t to = (int32_t)bytes; to > 0; to = best[to].from) {
        best[best[to].from].to = to;
        best[best[to].from].next = best[to].id;
    }
    for (size_t at = 0, to; at < bytes && !tt__encoder_done(e); at = to) {
        to = (size_t)best[at].to;
        if (best[at].next != b->unk) {
            tt__encoder_id(e, best[at].next);
            continue;
        }
        while (to < bytes && best[to].next == b->unk) to = (size_t)best[to].to;
        tt__unigram_unknown(e, text + at, to - at);
    }
}

/* WordPiece: the longest token that a word begins with, the longest that goes on behind it, and so on. */
static void tt__bpe_pieces(tt__encoder *e, const char *text, size_t bytes)
{
    const tt__bpe *b = e->b;
    const int64_t before = e->count;
    const size_t front = b->piece_bytes;
    int64_t chars = 0;
    for (size_t at = 0; at < bytes && chars <= b->word_chars; chars++) tt__utf8_next(text, bytes, &at);
    char *rest = chars <= b->word_chars ? (char *)tt__encoder_room(e, &e->heap, front + bytes, 1) : NULL;
    bool known = rest != NULL;
    if (known && front) memcpy(rest, b->piece, front);
    for (size_t at = 0, end; at < bytes && known; at = end) {
        const size_t skip = at ? front : 0, most = b->longest > skip ? b->longest - skip : 0;
        const size_t left = bytes - at < most ? bytes - at : most;
        const char *from = at ? rest : text;
        int id = -1;
        if (at) memcpy(rest + front, text + at, left);
        for (end = at + left; end > at; end--) {
            if (end < bytes && ((uint8_t)text[end] & 0xC0) == 0x80) continue; /* within a character */
            id = tt__bpe_find(&b->by_word, from, skip + end - at);
            if (id >= 0) break;
        }
        known = id >= 0;
        if (known) tt__encoder_id(e, id);
    }
    if (known || e->failed) return;
    e->count = before;
    tt__encoder_id(e, b->unk);
}

static void tt__bpe_word(tt__encoder *e, const char *text, size_t bytes)
{
    const tt__bpe *b = e->b;
    if (b->wordpiece) {
        tt__bpe_pieces(e, text, bytes);
        return;
    }
    if (b->unigram) {
        tt__unigram_word(e, text, bytes);
        return;
    }
    int32_t few[2 * TT__BPE_SHORT + 1], *symbols = few;
    const int id = bytes <= b->longest ? tt__bpe_find(&b->by_word, text, bytes) : -1;
    if (id >= 0 && (b->ignore_merges || __atomic_load_n(&b->whole[id], __ATOMIC_RELAXED) == 1)) {
        tt__encoder_id(e, id);
        return;
    }
    if (bytes > TT__BPE_SHORT) symbols = (int32_t *)tt__encoder_room(e, &e->symbols, 2 * bytes + 1, 4);
    if (!symbols) return;
    size_t n = tt__bpe_symbols(b, text, bytes, symbols);
    n = bytes > TT__BPE_SHORT ? tt__bpe_merge_long(e, symbols, n) : tt__bpe_merge_short(b, symbols, n);
    if (id >= 0 && !e->failed)
        __atomic_store_n(&b->whole[id], (uint8_t)(n == 1 && symbols[0] == id ? 1 : 2), __ATOMIC_RELAXED);
    for (size_t i = 0; i < n; i++) tt__encoder_id(e, symbols[i]);
}

/* Words that no splitter made. */
static void tt__bpe_words(tt__encoder *e, const char *text, size_t bytes)
{
    size_t from = 0;
    bool mark = true;
    for (size_t at = 0; e->b->cuts && at + 2 < bytes && !tt__encoder_done(e);) {
        const bool here = memcmp(text + at, "\xE2\x96\x81", 3) == 0;
        if (here && !mark) {
            tt__bpe_word(e, text + from, at - from);
            from = at;
        }
        mark = here;
        at += here ? 3 : 1;
    }
    if (!tt__encoder_done(e)) tt__bpe_word(e, text + from, bytes - from);
}
