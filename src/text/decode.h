#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "vocabulary.h"
#include "bpe.h"

/* ---- decoding */

/* Parts of a text, one behind the other. */
typedef struct tt__parts {
    tt_context *ctx;
    char *text;
    size_t used, room;
    size_t *ends;
    int n, capacity;
    bool failed; /* out of memory */
} tt__parts;

static void tt__parts_add(tt__parts *p, const char *text, size_t bytes)
{
    if (p->failed || p->room - p->used >= bytes) {
        if (!p->failed && bytes) memcpy(p->text + p->used, text, bytes);
    } else {
        size_t room = bytes < SIZE_MAX / 4 && p->room < SIZE_MAX / 4 ? (p->room + bytes) * 2 : SIZE_MAX / 2;
        char *larger = (char *)tt__realloc(p->ctx, p->text, room);
        p->failed = !larger;
        if (!larger) return;
        p->text = larger;
        p->room = room;
        memcpy(p->text + p->used, text, bytes);
    }
    p->used += bytes;
}

static void tt__parts_end(tt__parts *p) /* ends the part at hand */
{
    p->failed |= !TT__GROW(p->ctx, p->ends, p->n, p->capacity);
    if (!p->failed) p->ends[p->n++] = p->used;
}

static void tt__parts_free(tt__parts *p)
{
    tt__free(p->ctx, p->text);
    tt__free(p->ctx, p->ends);
}

/* Adds a text, with U+FFFD for what is no UTF-8. */
static void tt__parts_valid(tt__parts *p, const char *text, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        const size_t from = at;
        const bool valid = tt__utf8_next(text, bytes, &at) != TT__INVALID;
        tt__parts_add(p, valid ? text + from : "\xEF\xBF\xBD", valid ? at - from : 3);
    }
}

static int tt__hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

static int tt__byte_token(const char *text, size_t bytes) /* what "<0x0A>" stands for; -1: nothing */
{
    if (bytes != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
    int high = tt__hex_digit(text[3]), low = tt__hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/* Adds the parts `bytes`, which are one byte each: a text, or where they are none U+FFFD for each. */
static void tt__parts_bytes(tt__parts *to, char *bytes, size_t *n)
{
    if (!*n) return;
    if (tt__utf8_invalid(bytes, *n) == *n) {
        tt__parts_add(to, bytes, *n);
        tt__parts_end(to);
    } else {
        for (size_t i = 0; i < *n; i++) {
            tt__parts_add(to, "\xEF\xBF\xBD", 3);
            tt__parts_end(to);
        }
    }
    *n = 0;
}

/* Replaces every `from` by a text that is no longer, in place. Returns the bytes. */
static size_t tt__shorten(char *text, size_t bytes, const char *from, const char *to)
{
    const size_t from_bytes = strlen(from), to_bytes = strlen(to);
    size_t n = 0;
    for (size_t at = 0; at < bytes;) {
        const bool here = bytes - at >= from_bytes && memcmp(text + at, from, from_bytes) == 0;
        if (here) memcpy(text + n, to, to_bytes);
        else text[n] = text[at];
        n += here ? to_bytes : 1;
        at += here ? from_bytes : 1;
    }
    return n;
}

/* A token that goes on is joined to the one before; others get a space in front, or are cleaned of it. */
static void tt__decode_piece(const tt__stage *s, const char *text, size_t bytes, bool first, tt__parts *to)
{
    static const char *const cleaned[][2] = {
        {" .", "."}, {" ?", "?"}, {" !", "!"}, {" ,", ","}, {" ' ", "'"}, {" n't", "n't"}, {" 'm", "'m"},
        {" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
    const size_t used = to->used;
    const bool goes_on = !first && bytes >= s->from_bytes && memcmp(text, s->from, s->from_bytes) == 0;
    if (!first && !goes_on) tt__parts_add(to, " ", 1);
    tt__parts_add(to, text + (goes_on ? s->from_bytes : 0), bytes - (goes_on ? s->from_bytes : 0));
    for (int i = 0; i < TT__COUNT(cleaned) && s->each && !to->failed && to->used > used; i++)
        to->used = used + tt__shorten(to->text + used, to->used - used, cleaned[i][0], cleaned[i][1]);
}

static void tt__decode_part(const tt__stage *s, const char *text, size_t bytes, bool first, tt__parts *to)
{
    size_t end = bytes, at = 0;
    switch (s->kind) {
    case TT__STAGE_REPLACE: case TT__STAGE_METASPACE:
        while (at < bytes) {
            const bool here = bytes - at >= s->from_bytes && memcmp(text + at, s->from, s->from_bytes) == 0;
            if (!here) tt__parts_add(to, text + at, 1);
            else if (!(first && s->prefix_first)) tt__parts_add(to, s->to, s->to_bytes);
            at += here ? s->from_bytes : 1;
        }
        break;
    case TT__STAGE_STRIP:
        for (int64_t i = 0; i < s->start && end - at >= s->from_bytes; i++, at += s->from_bytes)
            if (memcmp(text + at, s->from, s->from_bytes) != 0) break;
        for (int64_t i = 0; i < s->stop && end - at >= s->from_bytes; i++, end -= s->from_bytes)
            if (memcmp(text + end - s->from_bytes, s->from, s->from_bytes) != 0) break;
        tt__parts_add(to, text + at, end - at);
        break;
    case TT__STAGE_WORDPIECE: tt__decode_piece(s, text, bytes, first, to); break;
    default: tt__parts_add(to, text, bytes);
    }
    tt__parts_end(to);
}

/* Bytes that stand for characters become bytes again; a token that has other characters stays. */
static void tt__decode_bytes(const char *text, size_t bytes, tt__parts *to)
{
    const size_t used = to->used;
    for (size_t at = 0; at < bytes;) {
        const int byte = tt__char_byte(tt__utf8_next(text, bytes, &at));
        const char c = (char)byte;
        if (byte < 0) {
            to->used = used;
            tt__parts_add(to, text, bytes);
            return;
        }
        tt__parts_add(to, &c, 1);
    }
}

static void tt__decode_stage(const tt__stage *s, const tt__parts *from, tt__parts *to)
{
    char *run = NULL;
    size_t pending = 0;
    to->used = 0;
    to->n = 0;
    if (s->kind == TT__STAGE_BYTES || s->kind == TT__STAGE_FUSE) {
        tt__parts all = {to->ctx, NULL, 0, 0, NULL, 0, 0, false};
        for (int i = 0; i < from->n && s->kind == TT__STAGE_BYTES; i++) {
            const size_t start = i ? from->ends[i - 1] : 0;
            tt__decode_bytes(from->text + start, from->ends[i] - start, &all);
        }
        if (s->kind == TT__STAGE_BYTES && !all.failed) tt__parts_valid(to, all.text, all.used);
        if (s->kind == TT__STAGE_FUSE) tt__parts_add(to, from->text, from->used);
        tt__parts_end(to);
        to->failed |= all.failed;
        tt__parts_free(&all);
        return;
    }
    if (s->kind == TT__STAGE_BYTE_FALLBACK && !(run = (char *)tt__alloc(to->ctx, (size_t)from->n + 1)))
        to->failed = true;
    for (int i = 0; i < from->n && !to->failed; i++) {
        const size_t start = i ? from->ends[i - 1] : 0, bytes = from->ends[i] - start;
        const char *text = from->text + start;
        const int byte = run ? tt__byte_token(text, bytes) : -1;
        if (byte >= 0) { run[pending++] = (char)byte; continue; }
        if (run) tt__parts_bytes(to, run, &pending);
        tt__decode_part(s, text, bytes, i == 0, to);
    }
    if (run) tt__parts_bytes(to, run, &pending);
    tt__free(to->ctx, run);
}

/* The text of an id as decoders get it; NULL: it has none. */
static const char *tt__bpe_text(const tt_tokenizer *k, int32_t id, bool skip_special, size_t *bytes)
{
    const tt__bpe *b = k->bpe;
    if (id < 0 || id >= k->size) return NULL;
    const tt__added *a = b->added_of[id] < 0 ? NULL : &b->added[b->added_of[id]];
    if (a) return *bytes = a->bytes, skip_special && a->skipped ? NULL : a->text;
    *bytes = b->text[id].bytes;
    return b->text[id].bytes == TT__BPE_NONE ? NULL : b->texts + b->text[id].start;
}

/* Decodes into `p`. False: out of memory. */
static bool tt__bpe_decode(const tt_tokenizer *k, const int32_t *ids, int64_t n, bool skip_special,
                           tt__parts *p)
{
    const tt__bpe *b = k->bpe;
    tt__parts other = {b->ctx, NULL, 0, 0, NULL, 0, 0, false};
    for (int64_t i = 0; i < n; i++) {
        size_t bytes;
        const char *text = tt__bpe_text(k, ids[i], skip_special, &bytes);
        if (!text) continue;
        if (!b->decodes && p->n) tt__parts_add(p, " ", 1);
        tt__parts_add(p, text, bytes);
        tt__parts_end(p);
    }
    for (int i = 0; i < b->n_decoders && !p->failed; i++) {
        tt__decode_stage(&b->decoders[i], p, &other);
        const tt__parts swap = *p;
        *p = other;
        other = swap;
        p->failed |= other.failed;
    }
    tt__parts_free(&other);
    return !p->failed;
}
