#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "parts.h"
#include "lookups.h"
#include "encoder.h"

/* ----------------------------------------------------------------------------------- tokenizer: WordPiece */

/* Devlin et al. 2019: the longest token that a word begins with, the longest that goes on behind it, and so
   on; one unknown token where that ends before the word does. */
static void tt__wordpiece_pieces(tt__encoder *e, const char *text, size_t bytes)
{
    const tt__model *m = &e->k->model;
    const int64_t before = e->count;
    int64_t chars = 0;
    const bool counts = bytes > (uint64_t)m->word_chars;
    for (size_t at = 0; counts && at < bytes && chars <= m->word_chars; chars++)
        tt__utf8_next(text, bytes, &at);
    bool known = chars <= m->word_chars;
    for (size_t at = 0, end = 0; at < bytes && known; at = end) {
        int32_t node = at ? m->piece_node : 0, id = -1;
        for (size_t i = at; i < bytes && node >= 0; i++) {
            node = tt__prefix_next(&m->prefixes, node, text[i]);
            if (node >= 0 && m->prefixes.ids[node] >= 0) id = m->prefixes.ids[node], end = i + 1;
        }
        known = id >= 0;
        if (known) tt__encoder_id(e, id);
    }
    if (known) return;
    e->count = before;
    tt__encoder_id(e, m->unk);
}

static void tt__wordpiece_word(tt__encoder *e, const char *text, size_t bytes)
{
    const bool few = bytes <= (uint64_t)e->k->model.word_chars;
    const int id = few ? tt__word_token(e, text, bytes) : -1; /* most words are one token */
    if (id >= 0) tt__encoder_id(e, id);
    else tt__wordpiece_pieces(e, text, bytes);
}
