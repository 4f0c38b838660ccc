#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "types.h"
#include "lookups.h"
#include "encoder.h"

/* ----------------------------------------------------------------------------------- tokenizer: WordPiece */

/* Returns the id of the longest token of t with which a text begins, and sets *taken to the token's number of
   bytes. Returns -1 if the text begins with no token of t. */
static int tt__wordpiece_next(const tt__encoder *e, const tt__ids_by_text *t, const char *text, size_t bytes,
                              size_t *taken)
{
    const uint64_t head = tt__part_head(e, text, bytes);
    int id = -1;
    size_t n = bytes < t->longest ? bytes : t->longest;
    for (; n && id < 0; n -= id < 0)
        id = tt__token_slot(t, text, n, n < 8 ? head & ((UINT64_C(1) << 8 * n) - 1) : head)->id;
    *taken = n;
    return id;
}

/* Adds the tokens of a word by WordPiece (Devlin et al. 2019): the longest token with which the word begins,
   then the longest with which the remaining text begins, and so on. If no token fits, adds only the unknown
   token. The function is not inlined: otherwise tt__wordpiece_word would save registers for every word. */
static __attribute__((noinline)) void tt__wordpiece_pieces(tt__encoder *e, const char *text, size_t bytes)
{
    const tt_tokenizer *k = e->k;
    const int64_t before = e->count;
    int64_t chars = 0;
    size_t at = 0, taken;
    if (bytes > (uint64_t)k->model.word_chars)
        for (; at < bytes && chars <= k->model.word_chars; chars++) tt__utf8_next(text, bytes, &at);
    bool known = chars <= k->model.word_chars;
    for (at = 0; at < bytes && known; at += taken) {
        const int id = tt__wordpiece_next(e, at ? &k->model.rest : &k->vocab.by_word, text + at, bytes - at,
                                          &taken);
        known = id >= 0;
        if (known) tt__encoder_id(e, id, text + at, taken);
    }
    if (known) return;
    e->count = before;
    tt__encoder_id(e, k->model.unk, text, bytes);
}

static void tt__wordpiece_word(tt__encoder *e, const char *text, size_t bytes)
{
    const tt__vocab *v = &e->k->vocab;
    int id = -1; /* the whole word is tried first: most words are one token */
    if (bytes <= 8 && bytes <= (uint64_t)e->k->model.word_chars)
        id = tt__token_slot(&v->by_word, text, bytes, tt__part_head(e, text, bytes))->id;
    if (id >= 0) tt__encoder_id(e, id, text, bytes);
    else tt__wordpiece_pieces(e, text, bytes);
}
