#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "types.h"
#include "lookups.h"

/* ---- the state of a text that is being encoded */

typedef struct tt__buffer { void *memory; size_t bytes; } tt__buffer;

/* Returns a buffer's memory with room for n items of `item` bytes, with any contents. Returns NULL when out
   of memory, without an error in the context, because loader threads call this function. */
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

enum { /* buffers of an encoder: normalizers take two NORMAL_TEXT in turn, splitter k takes SPLIT_TEXT + k */
    TT__CLEAN_TEXT, TT__NORMAL_TEXT, TT__SPLIT_TEXT = TT__NORMAL_TEXT + 2,
    TT__POINTS = TT__SPLIT_TEXT + TT__STEP_LIMIT, TT__SYMBOLS, TT__HEAP, TT__BUFFERS
};

typedef struct tt__encoder tt__encoder;
struct tt__encoder {
    const tt_tokenizer *k;
    void (*word)(tt__encoder *e, const char *text, size_t bytes); /* adds the ids of a word */
    int32_t *ids;
    int64_t count, room;   /* number of ids so far; max number of ids to store */
    bool whole;            /* whether to count the ids of the whole text, or to stop after `room` ids */
    bool failed;           /* out of memory */
    bool ascii;            /* the whole text is ASCII */
    const char *origin;    /* the current text after normalization, of origin_bytes bytes */
    size_t origin_bytes;
    size_t front;          /* number of bytes at the start of `origin` that came from the first character
                              before normalization. A part that begins with one of these bytes is the first
                              part of the text */
    tt__buffer buffers[TT__BUFFERS];
    char few[TT__SPLIT_TEXT][TT__FEW]; /* memory of the first buffers as long as texts are short */
};

static void tt__encoder_init(tt__encoder *e, const tt_tokenizer *k)
{
    memset(e, 0, offsetof(tt__encoder, few));
    e->k = k;
}

static void tt__encoder_free(tt__encoder *e)
{
    for (int i = 0; i < TT__COUNT(e->buffers); i++)
        if (e->buffers[i].memory) tt__free(e->k->ctx, e->buffers[i].memory);
}

static void tt__encoder_id(tt__encoder *e, int32_t id)
{
    if (e->count < e->room) e->ids[e->count] = id;
    e->count++;
}

static bool tt__encoder_done(const tt__encoder *e) { return e->failed || (!e->whole && e->count >= e->room); }

static void *tt__encoder_room(tt__encoder *e, int buffer, size_t n, size_t item)
{
    void *memory = tt__buffer_get(e->k->ctx, &e->buffers[buffer], n ? n : 1, item);
    e->failed |= !memory;
    return memory;
}

/* Returns the first 8 bytes of a part of the encoder's text, as tt__token_head does. */
static inline uint64_t tt__part_head(const tt__encoder *e, const char *text, size_t bytes)
{
    const size_t at = (size_t)((uintptr_t)text - (uintptr_t)e->origin);
    return tt__token_head(text, bytes, at < e->origin_bytes ? e->origin_bytes - at : bytes);
}

/* Returns the id of the token that stands for the word `text`; -1: none. */
static inline int tt__word_token(const tt__encoder *e, const char *text, size_t bytes)
{
    const tt__ids_by_text *t = &e->k->vocab.by_word;
    return bytes > t->longest ? -1 : tt__token_slot(t, text, bytes, tt__part_head(e, text, bytes))->id;
}

/* Returns the character at *at and moves *at past it. mapped: each byte stands for one character (see
   tt__byte_char); otherwise the text is UTF-8. */
static uint32_t tt__next_char(bool mapped, const char *text, size_t bytes, size_t *at)
{
    return mapped ? tt__byte_char((uint8_t)text[(*at)++]) : tt__utf8_next(text, bytes, at);
}
