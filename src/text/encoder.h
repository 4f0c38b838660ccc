#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "code_points.h"
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

enum { /* buffers of an encoder. Normalizers write to NORMAL_TEXT and NORMAL_TEXT + 1 in turn, splitter
          number k writes to SPLIT_TEXT + k */
    TT__CLEAN_TEXT, TT__NORMAL_TEXT, TT__SPLIT_TEXT = TT__NORMAL_TEXT + 2,
    TT__POINTS = TT__SPLIT_TEXT + TT__STEP_LIMIT, TT__SYMBOLS, TT__HEAP, TT__BUFFERS
};

typedef struct tt__encoder tt__encoder;
struct tt__encoder {
    const tt_tokenizer *k;
    void (*word)(tt__encoder *e, const char *text, size_t bytes); /* adds the ids of a word */
    int32_t *ids;          /* NULL: ids are not stored */
    tt_span *spans;        /* the bytes that each id comes from in the text; NULL: not wanted */
    int64_t count, room;   /* count: number of ids so far; room: max number of ids and spans to store */
    bool whole;            /* count the ids of the whole text; else stop after `room` ids */
    bool failed;           /* out of memory */
    bool ascii;            /* the whole text is ASCII */
    const char *origin;    /* the current text after normalization, of origin_bytes bytes */
    size_t origin_bytes;
    size_t front;          /* number of bytes at the start of `origin` that came from the first character of
                              the text before normalization. A part that begins with one of these bytes is
                              the first part of the text */
    /* The fields from here to `at` are used if spans are wanted. whole_text: the text before all changes;
       layer: the text that normalizers and splitters have made of whole_text so far; map: the span of each
       byte of `layer` in `whole_text`, or NULL if `layer` is the same text as `whole_text`. */
    const char *whole_text, *layer;
    size_t whole_bytes;
    const tt_span *map;
    tt__buffer maps[(int)TT__SPLIT_TEXT + (int)TT__STEP_LIMIT]; /* memory of `map` for each buffer of text */
    const char *at;        /* byte-pair encoding: the end of the part of the word whose symbols have been
                              added */
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
    for (int i = 0; i < TT__COUNT(e->maps) && e->spans; i++) tt__free(e->k->ctx, e->maps[i].memory);
}

/* Returns the span, in the whole text, of the character from which the byte *at comes. at: an address in
   e->layer. */
static tt_span tt__encoder_span(const tt__encoder *e, const char *at)
{
    const size_t i = (size_t)(at - e->layer);
    tt_span span = {i, i};
    if (e->map) return e->map[i];
    while (span.begin && i - span.begin < 3 && ((uint8_t)e->whole_text[span.begin] & 0xC0) == 0x80)
        span.begin--;
    span.end = span.begin;
    tt__utf8_next(e->whole_text, e->whole_bytes, &span.end);
    if (span.end <= i) span.begin = i, span.end = i + 1; /* a byte that belongs to no character */
    return span;
}

/* Returns whether the character at text[*at] counts as white space when spans are trimmed: white space, or
   U+0120, which stands for a space in byte-level encoding. Moves *at past the character. */
static bool tt__is_trimmed(const tt__encoder *e, const char *text, size_t bytes, size_t *at)
{
    const uint32_t c = tt__utf8_next(text, bytes, at);
    return c == 0x120 || (c != TT__INVALID && (e->k->unicode->bits[c] & TT__IS_SPACE));
}

/* Leaves white space at the ends of the token `text` out of its span, as process_offsets of the package
   `tokenizers` does. prefix: the space at the start of the whole text may be an added prefix. */
static void tt__encoder_trim(const tt__encoder *e, const char *text, size_t bytes, bool prefix, tt_span *span)
{
    size_t leading = 0, trailing = 0, from, walked, end = span->end;
    for (size_t at = 0; at < bytes && tt__is_trimmed(e, text, bytes, &at);) leading++;
    for (size_t at = bytes; at; at = from, trailing++) {
        size_t next = from = tt__utf8_last(text, at);
        if (!tt__is_trimmed(e, text, bytes, &next)) break;
    }
    if (leading == 1 && prefix && (!e->count || !span->begin)) leading = 0;
    for (; leading && span->begin < span->end; leading--)
        tt__utf8_next(e->whole_text, e->whole_bytes, &span->begin);
    for (walked = 0; walked < trailing && end; walked++)
        while (--end && ((uint8_t)e->whole_text[end] & 0xC0) == 0x80) {}
    if (walked == trailing) span->end = end > span->begin ? end : span->begin;
}

/* Adds the span of a token. text: the bytes of e->layer that the token stands for. added: whether the token
   is an added token. If spans are trimmed, the span leaves out the white space at the ends of the token's
   text. This text is `text` for an added token, and otherwise the token's text in the vocabulary. */
static void tt__encoder_add_span(tt__encoder *e, int32_t id, const char *text, size_t bytes, bool added)
{
    const tt__finisher *f = &e->k->finish;
    const tt__text_slice *token = &e->k->vocab.text[id];
    tt_span *to = &e->spans[e->count];
    *to = tt__encoder_span(e, text);
    if (!bytes) to->end = to->begin;
    else if (bytes > 1) to->end = tt__encoder_span(e, text + bytes - 1).end;
    for (int i = 0; i < f->trims; i++)
        tt__encoder_trim(e, added ? text : e->k->vocab.texts + token->start, added ? bytes : token->bytes,
                         f->trims_prefix[i], to);
}

/* Adds an id. text: the bytes of e->layer that the id stands for. */
static inline void tt__encoder_id(tt__encoder *e, int32_t id, const char *text, size_t bytes)
{
    if (e->count < e->room && e->ids) e->ids[e->count] = id;
    if (e->count < e->room && e->spans) tt__encoder_add_span(e, id, text, bytes, false);
    e->count++;
}

static bool tt__encoder_done(const tt__encoder *e) { return e->failed || (!e->whole && e->count >= e->room); }

static void *tt__encoder_room(tt__encoder *e, int buffer, size_t n, size_t item)
{
    void *memory = tt__buffer_get(e->k->ctx, &e->buffers[buffer], n ? n : 1, item);
    e->failed |= !memory;
    return memory;
}

/* Returns the first 8 bytes of a part of the encoder's text as a number; a shorter part is padded with
   zeros. */
static inline uint64_t tt__part_head(const tt__encoder *e, const char *text, size_t bytes)
{
    const size_t at = (size_t)((uintptr_t)text - (uintptr_t)e->origin);
    return tt__token_head(text, bytes, at < e->origin_bytes ? e->origin_bytes - at : bytes);
}

/* Returns the id of the token that stands for the word `text`, or -1 if no token does. */
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
