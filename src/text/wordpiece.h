#pragma once
#include "../base/base.h"
#include "../ops/linear/cpu_packing.h"
#include "../files/utf8.h"
#include "unicode.h"
#include "vocabulary.h"

typedef struct tt__word {     /* the word that is being read, and the ids so far */
    const tt_tokenizer *k;
    int32_t *ids;
    int count, limit;
    int chars, bytes;         /* chars TT__WORD_CHARS + 1: too long, the rest is not kept */
    int barrier;              /* no mark moves before this byte: a starter was dropped there */
    uint32_t hash[TT__WORD_BYTES]; /* of the first i + 1 bytes */
    char text[TT__WORD_BYTES];
} tt__word;

static void tt__word_id(tt__word *w, int id)
{
    if (w->count < w->limit) w->ids[w->count] = id;
    if (w->count < INT_MAX) w->count++;
}

static void tt__word_end(tt__word *w)
{
    const tt_tokenizer *k = w->k;
    int n = w->bytes, at = 0, first = w->count;
    if (!w->chars) return;
    if (w->chars > TT__WORD_CHARS) at = -1;
    /* to the end even when there is room for no more ids: a word without a match is one [UNK] */
    while (at >= 0 && at < n) {
        int end = (int)tt__min(n, at + (int64_t)k->longest), id = -1;
        if (at > 0) {
            uint32_t hash = TT__PIECE_SEED;
            for (int i = at; i < end; i++) w->hash[i] = hash = tt__hash_byte(hash, (unsigned char)w->text[i]);
        }
        for (; end > at; end--) {
            if (end < n && ((unsigned char)w->text[end] & 0xC0) == 0x80) continue; /* within a character */
            id = k->slots[tt__vocab_slot(k, w->text + at, (uint32_t)(end - at), at > 0, w->hash[end - 1])].id;
            if (id >= 0) break;
        }
        if (id >= 0) tt__word_id(w, id);
        at = id >= 0 ? end : -1;
    }
    if (at < 0) {
        w->count = first;
        tt__word_id(w, k->special[TT__UNK]);
    }
    w->chars = w->bytes = w->barrier = 0;
}

static void tt__word_add(tt__word *w, uint32_t c)
{
    if (w->chars >= TT__WORD_CHARS) { w->chars = TT__WORD_CHARS + 1; return; }
    uint32_t hash = w->bytes ? w->hash[w->bytes - 1] : TT__WORD_SEED;
    int end = w->bytes + tt__utf8_put(c, w->text + w->bytes);
    for (int i = w->bytes; i < end; i++) w->hash[i] = hash = tt__hash_byte(hash, (unsigned char)w->text[i]);
    w->bytes = end;
    w->chars++;
}

/* The class of a code point, which `low` tells faster for most. */
static int tt__word_class(const tt__word *w, uint32_t c)
{
    return c < TT__LOW ? w->k->low[c] : tt__class(w->k->unicode, c);
}

/* Adds a mark of uncased text where NFD puts it: before the marks of higher classes that the word ends in. */
static void tt__word_mark(tt__word *w, uint32_t mark, int mark_class)
{
    uint32_t moved[TT__WORD_CHARS];
    int n = 0;
    while (w->bytes > w->barrier && w->chars <= TT__WORD_CHARS) {
        size_t last = tt__utf8_last(w->text, (size_t)w->bytes), next = last;
        uint32_t c = tt__utf8_next(w->text, (size_t)w->bytes, &next);
        if (tt__class(w->k->unicode, c) <= mark_class) break;
        moved[n++] = c;
        w->bytes = (int)last;
        w->chars--;
    }
    tt__word_add(w, mark);
    while (n) tt__word_add(w, moved[--n]);
}

/* Adds a character beyond ASCII, in the reference's order: clean, split CJK, strip accents and lower-case,
   split punctuation. */
static void tt__word_other(tt__word *w, uint32_t c)
{
    uint32_t folded[3] = {c, 0, 0};
    int n = 1, first_class = c == TT__INVALID ? (int)TT__CLASS_DROP : tt__word_class(w, c);
    bool cjk = tt__is_cjk(c), uncased = w->k->lowercase;
    if (first_class == TT__CLASS_DROP) return;
    if (first_class == TT__CLASS_SPACE || cjk) tt__word_end(w);
    if (first_class == TT__CLASS_SPACE) return;
    if (uncased && (first_class == TT__CLASS_ACCENT || first_class == TT__CLASS_STARTER_ACCENT)) {
        if (first_class == TT__CLASS_STARTER_ACCENT) w->barrier = w->bytes;
        return;
    }
    if (uncased) n = tt__fold(w->k->unicode, c, folded);
    for (int i = 0; i < n; i++) {
        int folded_class = folded[i] == c ? first_class : tt__word_class(w, folded[i]);
        bool alone = folded_class == TT__CLASS_PUNCTUATION;
        if (alone) tt__word_end(w);
        if (uncased && folded_class >= TT__CLASS_MARK) tt__word_mark(w, folded[i], folded_class);
        else tt__word_add(w, folded[i]);
        if (alone) tt__word_end(w);
    }
    if (cjk) tt__word_end(w);
}

/* Adds the special token that a text begins with, or else its first character, "[". Returns its bytes. */
static size_t tt__word_bracket(tt__word *w, const char *text, size_t bytes)
{
    const tt_tokenizer *k = w->k;
    tt__word_end(w);
    for (int i = 0; i < TT__COUNT(tt__special_tokens); i++) {
        size_t n = strlen(tt__special_tokens[i]);
        if (k->special[i] < 0 || n > bytes || memcmp(text, tt__special_tokens[i], n) != 0) continue;
        tt__word_id(w, k->special[i]);
        return n;
    }
    tt__word_id(w, k->punctuation[(int)'[']);
    return 1;
}

/* The ids of a text, of which `room` are kept. Returns how many there are: of those beyond room, all if
   `whole`, else some. */
static int tt__wordpieces(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int room,
                          bool whole)
{
    tt__word w;
    w.k = k;
    w.ids = ids;
    w.count = w.chars = w.bytes = w.barrier = 0;
    w.limit = room;
    for (size_t at = 0; at < bytes && (whole || w.count < w.limit);) {
        unsigned char byte = (unsigned char)text[at];
        uint8_t c = k->classes[byte];
        if (c > TT__CLASS_PUNCTUATION) { /* a run of ASCII letters and digits: most of a text */
            uint32_t hash = w.bytes ? w.hash[w.bytes - 1] : TT__WORD_SEED;
            for (; c > TT__CLASS_PUNCTUATION && w.chars < TT__WORD_CHARS;
                 c = at < bytes ? k->classes[(unsigned char)text[at]] : (uint8_t)TT__CLASS_LETTER) {
                hash = tt__hash_byte(hash, c);
                w.hash[w.bytes] = hash;
                w.text[w.bytes++] = (char)c;
                w.chars++;
                at++;
            }
            if (c > TT__CLASS_PUNCTUATION) { w.chars = TT__WORD_CHARS + 1; at++; }
        } else if (c != TT__CLASS_LETTER) {
            at++;
            if (c == TT__CLASS_DROP) continue;
            tt__word_end(&w);
            if (c == TT__CLASS_PUNCTUATION) tt__word_id(&w, k->punctuation[byte]);
        } else if (byte == '[') {
            at += tt__word_bracket(&w, text + at, bytes - at);
        } else {
            tt__word_other(&w, tt__utf8_next(text, bytes, &at));
        }
    }
    tt__word_end(&w);
    return w.count;
}

typedef struct tt__buffer { void *memory; size_t bytes; } tt__buffer;

/* Room for n items of which the contents do not matter. NULL leaves no error: loader threads use it. */
static void *tt__buffer_get(tt_context *ctx, tt__buffer *b, size_t n, size_t item)
{
    size_t bytes;
    if (!tt__mul_size(n, item, &bytes)) return NULL;
    if (bytes > b->bytes || !b->memory) {
        tt__free(ctx, b->memory);
        b->memory = tt__try_alloc(ctx, bytes);
        b->bytes = bytes;
    }
    return b->memory;
}
