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

/* Writes the symbols of one character, and returns their number. The symbols are the character's token or, if
   the vocabulary lacks this token, the tokens of its bytes. If the vocabulary lacks these tokens too, sets
   *unknown and writes nothing, because the unknown characters that follow may share one unknown token. */
static size_t tt__bpe_symbol(const tt_tokenizer *k, uint32_t c, int32_t *to, bool *unknown)
{
    char text[4];
    size_t n = 0, bytes = (size_t)tt__utf8_put(c, text), missing = 0;
    int id = -1;
    if (k->mapped_at == k->split.n) id = tt__token_find(&k->vocab.by_word, text, bytes);
    else if (tt__char_byte(c) >= 0) id = k->model.bytes[tt__char_byte(c)];
    if (id >= 0) {
        if (*unknown) to[n++] = k->model.unk;
        *unknown = false;
        to[n++] = id;
        return n;
    }
    for (size_t i = 0; i < bytes; i++) missing += k->model.fallback[(uint8_t)text[i]] < 0;
    if (k->model.byte_fallback && !missing) {
        for (size_t i = 0; i < bytes; i++) to[n++] = k->model.fallback[(uint8_t)text[i]];
    } else if (k->model.unk >= 0) {
        if (*unknown && !k->model.fuse_unk) to[n++] = k->model.unk;
        *unknown = true;
    }
    return n;
}

/* Writes the symbols of a word, at most 2 * bytes + 1. Returns their number. */
static size_t tt__bpe_symbols(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *to)
{
    const bool mapped = k->mapped_at < k->split.n;
    bool unknown = false;
    size_t n = 0;
    for (size_t at = 0; at < bytes;) {
        int32_t id = mapped && !unknown ? k->model.bytes[(uint8_t)text[at]] : -1;
        if (id >= 0) to[n++] = id, at++;
        else n += tt__bpe_symbol(k, tt__next_char(mapped, text, bytes, &at), to + n, &unknown);
    }
    if (unknown) to[n++] = k->model.unk;
    return n;
}

/* Merges the symbols of a short word in place. Returns how many symbols are left. */
static size_t tt__bpe_merge_short(const tt_tokenizer *k, int32_t *symbols, size_t n)
{
    const tt__bpe_rule *merges[2 * TT__BPE_SHORT + 1];
    for (size_t i = 0; i + 1 < n; i++) merges[i] = tt__bpe_merge(k, symbols[i], symbols[i + 1]);
    while (n > 1) {
        uint32_t best = UINT32_MAX; /* the rank of a pair that has no merge */
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++)
            if (merges[i]->rank < best) best = merges[i]->rank, at = i;
        if (best == UINT32_MAX) break;
        symbols[at] = merges[at]->id;
        n--;
        for (size_t i = at + 1; i < n; i++) {
            symbols[i] = symbols[i + 1];
            merges[i - 1] = merges[i];
        }
        if (at + 1 < n) merges[at] = tt__bpe_merge(k, symbols[at], symbols[at + 1]);
        if (at > 0) merges[at - 1] = tt__bpe_merge(k, symbols[at - 1], symbols[at]);
    }
    return n;
}

typedef struct tt__bpe_link { int32_t id, before, after; } tt__bpe_link;      /* id -1: symbol was merged */
typedef struct tt__bpe_pair { uint32_t rank; int32_t at, id; } tt__bpe_pair;  /* a possible merge */

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

/* Merges the n symbols of a word of any length in place, in time O(n log n). Returns how many symbols are
   left. */
static size_t tt__bpe_merge_long(tt__encoder *e, int32_t *symbols, size_t n)
{
    const tt_tokenizer *k = e->k;
    size_t pairs = 0, left = 0;
    if (n > INT32_MAX / 2) { e->failed = true; return 0; }
    tt__bpe_link *links = (tt__bpe_link *)tt__encoder_room(e, TT__POINTS, n, sizeof *links);
    /* The heap gets at most 3 n pairs: one for each symbol, and two for each merge. */
    tt__bpe_pair *heap = (tt__bpe_pair *)tt__encoder_room(e, TT__HEAP, 3 * n, sizeof *heap);
    if (e->failed) return 0;
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
        first->id = top.id;
        first->after = second->after;
        second->id = -1;
        if (first->after >= 0) links[first->after].before = top.at;
        tt__bpe_push(k, heap, &pairs, links, first->before);
        tt__bpe_push(k, heap, &pairs, links, top.at);
    }
    for (size_t i = 0; i < n; i++)
        if (links[i].id >= 0) symbols[left++] = links[i].id;
    return left;
}

/* Adds the ids of a word, or of a part of a word inside which no run of U+2581 begins. */
static void tt__bpe_part(tt__encoder *e, const char *text, size_t bytes)
{
    const tt_tokenizer *k = e->k;
    const tt__token_model *m = &k->model;
    int32_t few[2 * TT__BPE_SHORT + 1], *symbols = few;
    const int id = tt__word_token(e, text, bytes);
    if (id >= 0 && (m->ignore_merges || __atomic_load_n(&m->whole[id], __ATOMIC_RELAXED) == 1)) {
        tt__encoder_id(e, id);
        return;
    }
    if (bytes > TT__BPE_SHORT) symbols = (int32_t *)tt__encoder_room(e, TT__SYMBOLS, 2 * bytes + 1, 4);
    if (!symbols) return;
    size_t n = tt__bpe_symbols(k, text, bytes, symbols);
    n = bytes > TT__BPE_SHORT ? tt__bpe_merge_long(e, symbols, n) : tt__bpe_merge_short(k, symbols, n);
    if (id >= 0 && !e->failed)
        __atomic_store_n(&m->whole[id], (uint8_t)(n == 1 && symbols[0] == id ? 1 : 2), __ATOMIC_RELAXED);
    for (size_t i = 0; i < n; i++) tt__encoder_id(e, symbols[i]);
}

static void tt__bpe_word(tt__encoder *e, const char *text, size_t bytes)
{
    size_t from = 0;
    bool mark = true;
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
