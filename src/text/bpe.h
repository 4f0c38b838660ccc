#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "types.h"
#include "lookups.h"
#include "encoder.h"

/* -------------------------------------------------------------------------- tokenizer: byte-pair encoding */

/* Byte-pair encoding (Sennrich et al. 2016) merges pairs of symbols of a word, in the order of the list of
   merges. Most words are the text of one token. When such a word first occurs, all its merges are made, and
   tt__token_model.whole notes whether the result is that token: the word's later occurrences need no merges.
   */
/* Max bytes of a word whose next merge is found by a scan of all its pairs of symbols. */
enum { TT__BPE_SHORT = 64 };

/* Returns the merge of symbols `left` and `right`. If no merge exists, the result's `pair` is UINT64_MAX. */
static const tt__bpe_rule *tt__bpe_merge(const tt_tokenizer *k, int32_t left, int32_t right)
{
    const tt__token_model *m = &k->model;
    const uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint64_t at = pair * 0x9E3779B97F4A7C15u >> m->merge_shift;
    while (m->merges[at].pair != pair && m->merges[at].pair != UINT64_MAX) at = (at + 1) & m->merge_mask;
    return &m->merges[at];
}

/* The symbols of a word. bytes: the number of bytes of the word that each symbol stands for; NULL: not
   wanted. */
typedef struct tt__bpe_symbols { int32_t *ids, *bytes; size_t n; } tt__bpe_symbols;

static void tt__bpe_put(tt__bpe_symbols *s, int32_t id, size_t bytes)
{
    if (s->bytes) s->bytes[s->n] = (int32_t)bytes;
    s->ids[s->n++] = id;
}

/* Adds the symbols of one character, which takes `of` bytes of the word. The symbols are the character's
   token or, without one, the tokens of its bytes. If the vocabulary also lacks a token of a byte, the
   character is unknown: adds `of` to *unknown, but no symbol, as following unknown characters may share one
   unknown token. */
static void tt__bpe_symbol(const tt_tokenizer *k, uint32_t c, size_t of, tt__bpe_symbols *s, size_t *unknown)
{
    char text[4];
    size_t bytes = (size_t)tt__utf8_put(c, text), missing = 0;
    int id = -1;
    if (k->mapped_at == k->split.n) id = tt__token_find(&k->vocab.by_word, text, bytes);
    else if (tt__char_byte(c) >= 0) id = k->model.bytes[tt__char_byte(c)];
    if (id >= 0) {
        if (*unknown) tt__bpe_put(s, k->model.unk, *unknown);
        *unknown = 0;
        tt__bpe_put(s, id, of);
        return;
    }
    for (size_t i = 0; i < bytes; i++) missing += k->model.fallback[(uint8_t)text[i]] < 0;
    if (k->model.byte_fallback && !missing) {
        for (size_t i = 0; i < bytes; i++) tt__bpe_put(s, k->model.fallback[(uint8_t)text[i]], 1);
    } else if (k->model.unk >= 0) {
        if (*unknown && !k->model.fuse_unk) tt__bpe_put(s, k->model.unk, *unknown), *unknown = 0;
        *unknown += of;
    }
}

/* Divides a word into symbols, at most `2 * bytes + 1`. */
static void tt__bpe_split(const tt_tokenizer *k, const char *text, size_t bytes, tt__bpe_symbols *s)
{
    const bool mapped = k->mapped_at < k->split.n;
    size_t unknown = 0;
    s->n = 0;
    for (size_t at = 0, from = 0; at < bytes; from = at) {
        int32_t id = mapped && !unknown ? k->model.bytes[(uint8_t)text[at]] : -1;
        if (id >= 0) {
            tt__bpe_put(s, id, 1);
            at++;
        } else {
            const uint32_t c = tt__next_char(mapped, text, bytes, &at);
            tt__bpe_symbol(k, c, at - from, s, &unknown);
        }
    }
    if (unknown) tt__bpe_put(s, k->model.unk, unknown);
}

/* Merges the symbols of a short word in place. */
static void tt__bpe_merge_short(const tt_tokenizer *k, tt__bpe_symbols *s)
{
    const tt__bpe_rule *merges[2 * TT__BPE_SHORT + 1];
    int32_t *symbols = s->ids;
    size_t n = s->n;
    for (size_t i = 0; i + 1 < n; i++) merges[i] = tt__bpe_merge(k, symbols[i], symbols[i + 1]);
    while (n > 1) {
        uint32_t best = UINT32_MAX; /* pairs that have no merge have this rank */
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++)
            if (merges[i]->rank < best) best = merges[i]->rank, at = i;
        if (best == UINT32_MAX) break;
        symbols[at] = merges[at]->id;
        n--;
        if (s->bytes) {
            s->bytes[at] += s->bytes[at + 1];
            memmove(s->bytes + at + 1, s->bytes + at + 2, (n - at - 1) * sizeof *s->bytes);
        }
        for (size_t i = at + 1; i < n; i++) {
            symbols[i] = symbols[i + 1];
            merges[i - 1] = merges[i];
        }
        if (at + 1 < n) merges[at] = tt__bpe_merge(k, symbols[at], symbols[at + 1]);
        if (at > 0) merges[at - 1] = tt__bpe_merge(k, symbols[at - 1], symbols[at]);
    }
    s->n = n;
}

/* A symbol of a word, in a linked list. id -1: the symbol was merged into the one before. */
typedef struct tt__bpe_link { int32_t id, before, after; } tt__bpe_link;
/* A possible merge of the symbol at index `at` with the next symbol. id: the resulting symbol. */
typedef struct tt__bpe_pair { uint32_t rank; int32_t at, id; } tt__bpe_pair;

static bool tt__bpe_earlier(const tt__bpe_pair *a, const tt__bpe_pair *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void tt__bpe_push(const tt_tokenizer *k, tt__bpe_pair *heap, size_t *n, const tt__bpe_link *links,
                         int32_t at)
{
    if (at < 0 || links[at].after < 0) return;
    const tt__bpe_rule *m = tt__bpe_merge(k, links[at].id, links[links[at].after].id);
    if (m->pair == UINT64_MAX) return;
    const tt__bpe_pair pair = {m->rank, at, m->id};
    size_t to = (*n)++;
    for (; to && tt__bpe_earlier(&pair, &heap[(to - 1) / 2]); to = (to - 1) / 2)
        heap[to] = heap[(to - 1) / 2];
    heap[to] = pair;
}

static tt__bpe_pair tt__bpe_pop(tt__bpe_pair *heap, size_t *n)
{
    const tt__bpe_pair top = heap[0], last = heap[--*n];
    size_t to = 0;
    for (size_t child = 1; child < *n; child = 2 * to + 1) {
        if (child + 1 < *n && tt__bpe_earlier(&heap[child + 1], &heap[child])) child++;
        if (!tt__bpe_earlier(&heap[child], &last)) break;
        heap[to] = heap[child];
        to = child;
    }
    heap[to] = last;
    return top;
}

/* Merges the n symbols of a word of any length in place, in time O(n log n). */
static void tt__bpe_merge_long(tt__encoder *e, tt__bpe_symbols *s)
{
    const tt_tokenizer *k = e->k;
    int32_t *symbols = s->ids;
    const size_t n = s->n;
    size_t pairs = 0;
    s->n = 0;
    if (n > INT32_MAX / 2) { e->failed = true; return; }
    tt__bpe_link *links = (tt__bpe_link *)tt__encoder_room(e, TT__POINTS, n, sizeof *links);
    /* The heap gets at most `3 * n` pairs: one for each symbol, and two for each merge. */
    tt__bpe_pair *heap = (tt__bpe_pair *)tt__encoder_room(e, TT__HEAP, 3 * n, sizeof *heap);
    if (e->failed) return;
    for (size_t i = 0; i < n; i++) {
        const tt__bpe_link link = {symbols[i], (int32_t)i - 1, i + 1 < n ? (int32_t)i + 1 : -1};
        links[i] = link;
    }
    for (size_t i = 0; i + 1 < n; i++) tt__bpe_push(k, heap, &pairs, links, (int32_t)i);
    while (pairs) {
        const tt__bpe_pair top = tt__bpe_pop(heap, &pairs);
        tt__bpe_link *first = &links[top.at];
        if (first->id < 0 || first->after < 0) continue;
        tt__bpe_link *second = &links[first->after];
        const tt__bpe_rule *m = tt__bpe_merge(k, first->id, second->id);
        if (m->pair == UINT64_MAX || m->id != top.id) continue; /* an earlier merge changed the pair */
        if (s->bytes) s->bytes[top.at] += s->bytes[first->after];
        first->id = top.id;
        first->after = second->after;
        second->id = -1;
        if (first->after >= 0) links[first->after].before = top.at;
        tt__bpe_push(k, heap, &pairs, links, first->before);
        tt__bpe_push(k, heap, &pairs, links, top.at);
    }
    for (size_t i = 0; i < n; i++)
        if (links[i].id >= 0) tt__bpe_put(s, links[i].id, s->bytes ? (size_t)s->bytes[i] : 0);
}

/* Adds the ids of a word or of a part of it. No run of U+2581, which stands for a space, begins inside the
   part. Moves e->at by the bytes of all symbols. An unknown character without a symbol counts no bytes, as in
   the package `tokenizers`. */
static void tt__bpe_part(tt__encoder *e, const char *text, size_t bytes)
{
    const tt_tokenizer *k = e->k;
    const tt__token_model *m = &k->model;
    int32_t few[2][2 * TT__BPE_SHORT + 1];
    tt__bpe_symbols s = {few[0], e->spans ? few[1] : NULL, 0};
    const int id = tt__word_token(e, text, bytes);
    if (id >= 0 && (m->ignore_merges || __atomic_load_n(&m->whole[id], __ATOMIC_RELAXED) == 1)) {
        tt__encoder_id(e, id, e->at, bytes);
        e->at += bytes;
        return;
    }
    if (bytes > TT__BPE_SHORT) {
        const size_t max = 2 * bytes + 1;
        s.ids = (int32_t *)tt__encoder_room(e, TT__SYMBOLS, max, 8);
        if (!s.ids) return;
        s.bytes = e->spans ? s.ids + max : NULL;
    }
    tt__bpe_split(k, text, bytes, &s);
    if (bytes > TT__BPE_SHORT) tt__bpe_merge_long(e, &s);
    else tt__bpe_merge_short(k, &s);
    if (id >= 0 && !e->failed)
        __atomic_store_n(&m->whole[id], (uint8_t)(s.n == 1 && s.ids[0] == id ? 1 : 2), __ATOMIC_RELAXED);
    for (size_t i = 0; i < s.n; i++) {
        const size_t of = s.bytes ? (size_t)s.bytes[i] : 0;
        tt__encoder_id(e, s.ids[i], e->at, of);
        e->at += of;
    }
}

static void tt__bpe_word(tt__encoder *e, const char *text, size_t bytes)
{
    size_t from = 0;
    bool mark = true;
    e->at = text;
    for (size_t at = 0; e->k->model.cuts && at + 2 < bytes && !tt__encoder_done(e);) {
        const bool here = memcmp(text + at, "\xE2\x96\x81", 3) == 0;
        if (here && !mark) {
            tt__bpe_part(e, text + from, at - from);
            from = at;
        }
        mark = here;
        at += here ? 3 : 1;
    }
    if (!tt__encoder_done(e)) tt__bpe_part(e, text + from, bytes - from);
}
