#pragma once
#include "../base/base.h"
#include "code_points.h"
#include "../files/utf8.h"
#include "types.h"

/* ---- bytes as characters (GPT-2): bytes that print in Latin-1 stay; other bytes become U+0100 to U+0143 */

static bool tt__byte_prints(uint32_t b)
{
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xFF && b != 0xAD);
}

static uint32_t tt__byte_char(uint32_t b)
{
    return tt__byte_prints(b) ? b : 0x100 + (b <= 0x20 ? b : b <= 0xA0 ? b - 0x7F + 33 : 67);
}

static int tt__char_byte(uint32_t c) /* returns the byte for which GPT-2's character c stands, or -1 if c
                                        stands for none */
{
    if (c < 0x100) return tt__byte_prints(c) ? (int)c : -1;
    if (c > 0x143) return -1;
    c -= 0x100;
    return (int)(c < 33 ? c : c < 67 ? c - 33 + 0x7F : 0xAD);
}

/* ---- texts */

/* Returns the length of the run of ASCII letters at the start of 8 bytes. */
static inline size_t tt__ascii_letters(const char *text)
{
    const uint64_t ones = 0x0101010101010101u;
    uint64_t all;
    memcpy(&all, text, 8);
    const uint64_t lower = (all | 0x20 * ones) & 0x7F * ones;
    /* In `below`, bit 7 of a byte is set if the letter is below 'a'; in `above`, if the letter is above
       'z'. */
    const uint64_t below = ~(lower + (0x80 - 'a') * ones), above = lower + (0x7F - 'z') * ones;
    const uint64_t others = (below | above | all) & 0x80 * ones;
    return others ? (size_t)__builtin_ctzll(others) >> 3 : 8;
}

/* Returns the end of the run of characters from `at` on that satisfy `(bits[c] & mask) == value`. */
static inline size_t tt__bits_end(const uint8_t *bits, int mask, int value, const char *text, size_t bytes,
                                  size_t at)
{
    const bool letters = (bits[0x61] & mask) == value; /* if 'a' passes the test, all ASCII letters do */
    for (size_t n = 8; letters && n == 8 && bytes - at >= 8; at += n) n = tt__ascii_letters(text + at);
    for (size_t next;; at = next) {
        while (at < bytes && (uint8_t)text[at] < 0x80 && (bits[(uint8_t)text[at]] & mask) == value) at++;
        next = at;
        if (at == bytes || (uint8_t)text[at] < 0x80) return at;
        if ((bits[tt__utf8_next(text, bytes, &next)] & mask) != value) return at;
    }
}

/* Returns where the white space at the end of text[from .. end) begins; `end` if the text has none there. */
static size_t tt__white_begin(const uint8_t *bits, const char *text, size_t from, size_t end)
{
    while (end > from) {
        const size_t last = tt__utf8_last(text, end);
        size_t next = last;
        if (!(bits[tt__utf8_next(text, end, &next)] & TT__IS_SPACE)) break;
        end = last;
    }
    return end;
}

static bool tt__is_ascii(const char *text, size_t bytes)
{
    uint64_t all = 0, word;
    for (; bytes >= 8; bytes -= 8, text += 8) {
        memcpy(&word, text, 8);
        all |= word;
    }
    for (size_t i = 0; i < bytes; i++) all |= (uint8_t)text[i];
    return !(all & 0x8080808080808080u);
}

/* ---- lookups */

/* Returns the first 8 bytes of a text as a number; a shorter text is padded with zeros. readable: number of
   bytes at `text` that may be read. */
static inline uint64_t tt__token_head(const char *text, size_t bytes, size_t readable)
{
    uint64_t head = 0;
    if (readable >= 8) {
        memcpy(&head, text, 8);
        return bytes < 8 ? head & ((UINT64_C(1) << 8 * bytes) - 1) : head;
    }
    for (size_t i = 0; i < bytes; i++) head |= (uint64_t)(uint8_t)text[i] << 8 * i;
    return head;
}

/* Returns the entry of a hash table that holds a text, or the free entry where the text belongs. */
static inline tt__bucket *tt__token_slot(const tt__ids_by_text *t, const char *text, size_t bytes,
                                         uint64_t head)
{
    uint64_t hash = (0x9E3779B97F4A7C15u ^ bytes ^ head) * 0xFF51AFD7ED558CCDu, word;
    for (size_t i = 8; i < bytes; i += 8) {
        memcpy(&word, text + (i < bytes - 8 ? i : bytes - 8), 8); /* the last two reads may overlap */
        hash = (hash ^ hash >> 32 ^ word) * 0xFF51AFD7ED558CCDu;
    }
    for (uint32_t at = (uint32_t)(hash >> 32 ^ hash) & t->mask;; at = (at + 1) & t->mask) {
        tt__bucket *slot = &t->slots[at];
        if (slot->head == head && slot->bytes == bytes &&
            (bytes <= 8 || memcmp(t->base + t->slices[slot->id].start + 8, text + 8, bytes - 8) == 0))
            return slot;
        if (slot->id < 0) return slot;
    }
}

static int tt__token_find(const tt__ids_by_text *t, const char *text, size_t bytes) /* the id or -1 */
{
    return tt__token_slot(t, text, bytes, tt__token_head(text, bytes, bytes))->id;
}

/* Returns the id of the token with this text, in the vocabulary or among the added tokens. Returns -1 if no
   token has this text. */
static int tt__any_token(const tt_tokenizer *k, const char *text, size_t bytes)
{
    const int id = tt__token_find(&k->vocab.by_text, text, bytes);
    return id >= 0 ? id : tt__token_find(&k->vocab.by_added, text, bytes);
}

/* Returns the index in t->edges of an edge, or of the free entry where the edge belongs. key: the edge's
   `parent << 8 | byte`. */
static size_t tt__prefix_slot(const tt__prefixes *t, uint64_t key)
{
    size_t at = (size_t)(key * 0x9E3779B97F4A7C15u >> t->shift);
    while (t->edges[at] != UINT64_MAX && t->edges[at] >> 28 != key) at = (at + 1) & (t->slots - 1);
    return at;
}

static int32_t tt__prefix_next(const tt__prefixes *t, int32_t node, char byte) /* the child node, or -1 */
{
    const uint64_t edge = t->edges[tt__prefix_slot(t, (uint64_t)node << 8 | (uint8_t)byte)];
    return edge == UINT64_MAX ? -1 : (int32_t)(edge & 0xFFFFFFF);
}
