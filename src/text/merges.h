#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "vocabulary.h"
#include "wordpiece.h"
#include "bpe.h"

/* ---- a text's way to ids */

typedef struct tt__encoder {
    const tt__bpe *b;
    int32_t *ids;
    int64_t count, room;   /* ids so far, of which `room` are kept */
    bool whole;            /* count all ids; else some of those beyond room */
    bool failed;           /* out of memory */
    const char *origin;    /* the text at hand, normalized, of so many bytes */
    size_t origin_bytes;
    size_t front;          /* so many bytes at its front stand for its first character before that: a part of
                              a splitter's that begins with one of them is the text's first */
    tt__buffer clean, normal[2], points, spare, stages[TT__BPE_STAGES], symbols, heap;
} tt__encoder;

static void tt__encoder_id(tt__encoder *e, int32_t id)
{
    if (e->count < e->room) e->ids[e->count] = id;
    e->count++;
}

static bool tt__encoder_done(const tt__encoder *e) { return e->failed || (!e->whole && e->count >= e->room); }

static void *tt__encoder_room(tt__encoder *e, tt__buffer *buffer, size_t n, size_t item)
{
    void *memory = tt__buffer_get(e->b->ctx, buffer, n ? n : 1, item);
    e->failed |= !memory;
    return memory;
}

/* The next character, of bytes that stand for one each if `mapped`. */
static uint32_t tt__bpe_char(bool mapped, const char *text, size_t bytes, size_t *at)
{
    return mapped ? tt__byte_char((uint8_t)text[(*at)++]) : tt__utf8_next(text, bytes, at);
}

/* The symbols of one character: its token, else those of its bytes, else an unknown one, which waits in
   *unknown for more of its kind. Returns how many are added. */
static size_t tt__bpe_symbol(const tt__bpe *b, uint32_t c, int32_t *to, bool *unknown)
{
    char text[4];
    size_t n = 0, bytes = (size_t)tt__utf8_put(c, text), missing = 0;
    int id = -1;
    if (b->mapped_at == b->n_splitters) id = tt__bpe_find(&b->by_word, text, bytes);
    else if (tt__char_byte(c) >= 0) id = b->bytes[tt__char_byte(c)];
    if (id >= 0) {
        if (*unknown) to[n++] = b->unk;
        *unknown = false;
        to[n++] = id;
        return n;
    }
    for (size_t i = 0; i < bytes; i++) missing += b->fallback[(uint8_t)text[i]] < 0;
    if (b->byte_fallback && !missing) {
        for (size_t i = 0; i < bytes; i++) to[n++] = b->fallback[(uint8_t)text[i]];
    } else if (b->unk >= 0) {
        if (*unknown && !b->fuse_unk) to[n++] = b->unk;
        *unknown = true;
    }
    return n;
}

/* The symbols of a word: at most 2 for each byte, and one. */
static size_t tt__bpe_symbols(const tt__bpe *b, const char *text, size_t bytes, int32_t *to)
{
    const bool mapped = b->mapped_at < b->n_splitters;
    bool unknown = false;
    size_t n = 0;
    for (size_t at = 0; at < bytes;) {
        int32_t id = mapped && !unknown ? b->bytes[(uint8_t)text[at]] : -1;
        if (id >= 0) to[n++] = id, at++;
        else n += tt__bpe_symbol(b, tt__bpe_char(mapped, text, bytes, &at), to + n, &unknown);
    }
    if (unknown) to[n++] = b->unk;
    return n;
}

/* Merges the symbols of a short word in place. Returns how many are left. */
static size_t tt__bpe_merge_short(const tt__bpe *b, int32_t *symbols, size_t n)
{
    const tt__bpe_rule *merges[2 * TT__BPE_SHORT + 1];
    for (size_t i = 0; i + 1 < n; i++) merges[i] = tt__bpe_merge(b, symbols[i], symbols[i + 1]);
    while (n > 1) {
        uint32_t best = UINT32_MAX; /* the rank where there is no merge */
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
        if (at + 1 < n) merges[at] = tt__bpe_merge(b, symbols[at], symbols[at + 1]);
        if (at > 0) merges[at - 1] = tt__bpe_merge(b, symbols[at - 1], symbols[at]);
    }
    return n;
}

typedef struct tt__bpe_link { int32_t id, before, after; } tt__bpe_link;      /* id -1: merged into another */
typedef struct tt__bpe_pair { uint32_t rank; int32_t at, id; } tt__bpe_pair;  /* in a heap */

static bool tt__bpe_earlier(const tt__bpe_pair *a, const tt__bpe_pair *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void tt__bpe_push(const tt__bpe *b, tt__bpe_pair *heap, size_t *n, const tt__bpe_link *links,
                         int32_t at)
{
    if (at < 0 || links[at].after < 0) return;
    const tt__bpe_rule *m = tt__bpe_merge(b, links[at].id, links[links[at].after].id);
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

/* The same of a word of any length, in n log n. */
static size_t tt__bpe_merge_long(tt__encoder *e, int32_t *symbols, size_t n)
{
    const tt__bpe *b = e->b;
    size_t pairs = 0, left = 0;
    if (n > INT32_MAX / 2) { e->failed = true; return 0; }
    tt__bpe_link *links = (tt__bpe_link *)tt__encoder_room(e, &e->points, n, sizeof *links);
    /* each symbol begins a pair, and each merge makes two */
    tt__bpe_pair *heap = (tt__bpe_pair *)tt__encoder_room(e, &e->heap, 3 * n, sizeof *heap);
    if (e->failed) return 0;
    for (size_t i = 0; i < n; i++) {
        const tt__bpe_link link = {symbols[i], (int32_t)i - 1, i + 1 < n ? (int32_t)i + 1 : -1};
        links[i] = link;
    }
    for (size_t i = 0; i + 1 < n; i++) tt__bpe_push(b, heap, &pairs, links, (int32_t)i);
    while (pairs) {
        const tt__bpe_pair top = tt__bpe_pop(heap, &pairs);
        tt__bpe_link *first = &links[top.at];
        if (first->id < 0 || first->after < 0) continue;
        tt__bpe_link *second = &links[first->after];
        const tt__bpe_rule *m = tt__bpe_merge(b, first->id, second->id);
        if (m->pair == UINT64_MAX || m->id != top.id) continue; /* one of the two is another by now */
        first->id = top.id;
        first->after = second->after;
        second->id = -1;
        if (first->after >= 0) links[first->after].before = top.at;
        tt__bpe_push(b, heap, &pairs, links, first->before);
        tt__bpe_push(b, heap, &pairs, links, top.at);
    }
    for (size_t i = 0; i < n; i++)
        if (links[i].id >= 0) symbols[left++] = links[i].id;
    return left;
}
