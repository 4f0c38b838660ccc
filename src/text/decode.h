#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "types.h"
#include "lookups.h"

/* --------------------------------------------------------------------------- tokenizer: from ids to texts */

/* The parts of a text, stored one after another. ends: the end of each part in `text`. */
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
    if (!p->failed && p->room - p->used < bytes) {
        size_t room = bytes < SIZE_MAX / 4 && p->room < SIZE_MAX / 4 ? (p->room + bytes) * 2 : SIZE_MAX / 2;
        char *larger = (char *)tt__realloc(p->ctx, p->text, room);
        p->failed = !larger;
        if (larger) p->text = larger, p->room = room;
    }
    if (!p->failed && bytes) memcpy(p->text + p->used, text, bytes);
    p->used += bytes;
}

static void tt__parts_end(tt__parts *p) /* ends the current part */
{
    p->failed |= !TT__GROW(p->ctx, p->ends, p->n, p->capacity);
    if (!p->failed) p->ends[p->n++] = p->used;
}

static void tt__parts_free(tt__parts *p)
{
    tt__free(p->ctx, p->text);
    tt__free(p->ctx, p->ends);
}

/* Adds a text to the current part, with U+FFFD in place of each byte that is not UTF-8. */
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

/* Returns the byte for which a token such as "<0x0A>" stands. Returns -1 if `text` is not such a token. */
static int tt__byte_token(const char *text, size_t bytes)
{
    if (bytes != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
    int high = tt__hex_digit(text[3]), low = tt__hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/* Adds the *n bytes of a run of single-byte tokens, and sets *n to 0. If the bytes are UTF-8, they become one
   part; otherwise each byte becomes a part with U+FFFD. */
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

/* Replaces every occurrence of `from` in a text by `to`, in place. `to` must not be longer than `from`.
   Returns the new number of bytes of the text. */
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

/* Adds the text of a WordPiece token. A token that continues a word is joined to the previous token. All
   other tokens except the first get a space before their text; `cleanup` removes some spaces. */
static void tt__decode_piece(const tt__text_step *s, const char *text, size_t bytes, bool first,
                             tt__parts *to)
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

static void tt__decode_part(const tt__text_step *s, const char *text, size_t bytes, bool first, tt__parts *to)
{
    size_t end = bytes, at = 0;
    switch (s->kind) {
    case TT__STEP_REPLACE: case TT__STEP_METASPACE:
        while (at < bytes) {
            const bool here = bytes - at >= s->from_bytes && memcmp(text + at, s->from, s->from_bytes) == 0;
            if (!here) tt__parts_add(to, text + at, 1);
            else if (!(first && s->prefix_first)) tt__parts_add(to, s->to, s->to_bytes);
            at += here ? s->from_bytes : 1;
        }
        break;
    case TT__STEP_STRIP:
        for (int64_t i = 0; i < s->start && end - at >= s->from_bytes; i++, at += s->from_bytes)
            if (memcmp(text + at, s->from, s->from_bytes) != 0) break;
        for (int64_t i = 0; i < s->stop && end - at >= s->from_bytes; i++, end -= s->from_bytes)
            if (memcmp(text + end - s->from_bytes, s->from, s->from_bytes) != 0) break;
        tt__parts_add(to, text + at, end - at);
        break;
    case TT__STEP_WORDPIECE: tt__decode_piece(s, text, bytes, first, to); break;
    default: tt__parts_add(to, text, bytes);
    }
    tt__parts_end(to);
}

/* Adds the text of a token of byte-level encoding: the bytes that its characters stand for. If a character
   stands for no byte, adds the token's text unchanged. */
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

static void tt__decode_step(const tt__text_step *s, const tt__parts *from, tt__parts *to)
{
    char *run = NULL;
    size_t pending = 0;
    to->used = 0;
    to->n = 0;
    if (s->kind == TT__STEP_BYTES || s->kind == TT__STEP_FUSE) {
        tt__parts all = {to->ctx, NULL, 0, 0, NULL, 0, 0, false};
        for (int i = 0; i < from->n && s->kind == TT__STEP_BYTES; i++) {
            const size_t start = i ? from->ends[i - 1] : 0;
            tt__decode_bytes(from->text + start, from->ends[i] - start, &all);
        }
        if (s->kind == TT__STEP_BYTES && !all.failed) tt__parts_valid(to, all.text, all.used);
        if (s->kind == TT__STEP_FUSE) tt__parts_add(to, from->text, from->used);
        tt__parts_end(to);
        to->failed |= all.failed;
        tt__parts_free(&all);
        return;
    }
    if (s->kind == TT__STEP_BYTE_FALLBACK && !(run = (char *)tt__alloc(to->ctx, (size_t)from->n + 1)))
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

/* Returns the text of an id, as the first decoder step reads the text. Returns NULL if the id has no text. */
static const char *tt__id_text(const tt_tokenizer *k, int32_t id, bool skip_special, size_t *bytes)
{
    if (id < 0 || id >= k->size) return NULL;
    const tt__added *a = k->added_of[id] < 0 ? NULL : &k->added[k->added_of[id]];
    if (a) return *bytes = a->bytes, skip_special && a->skipped ? NULL : a->text;
    *bytes = k->vocab.text[id].bytes;
    return k->vocab.text[id].bytes == TT__NO_TOKEN ? NULL : k->vocab.texts + k->vocab.text[id].start;
}

static tt__parts tt__decode(const tt_tokenizer *k, const int32_t *ids, int64_t n, bool skip_special)
{
    tt__parts p = {k->ctx, NULL, 0, 0, NULL, 0, 0, false}, other = p;
    for (int64_t i = 0; i < n; i++) {
        size_t bytes;
        const char *text = tt__id_text(k, ids[i], skip_special, &bytes);
        if (!text) continue;
        if (!k->finish.decodes && p.n) tt__parts_add(&p, " ", 1);
        tt__parts_add(&p, text, bytes);
        tt__parts_end(&p);
    }
    for (int i = 0; i < k->finish.decode.n && !p.failed; i++) {
        tt__decode_step(&k->finish.decode.all[i], &p, &other);
        const tt__parts swap = p;
        p = other;
        other = swap;
        p.failed |= other.failed;
    }
    tt__parts_free(&other);
    return p;
}

int64_t tt_tokenizer_decode(const tt_tokenizer *k, const int32_t *ids, int64_t n, bool skip_special, char *to,
                            size_t capacity)
{
    tt__parts p = tt__decode(k, ids, n, skip_special);
    const size_t kept = capacity ? (size_t)tt__min((int64_t)p.used, (int64_t)capacity - 1) : 0;
    const int64_t bytes = p.failed ? -1 : (int64_t)p.used;
    if (bytes > 0 && kept) memcpy(to, p.text, kept);
    if (capacity) to[bytes > 0 ? kept : 0] = 0;
    tt__parts_free(&p);
    return bytes;
}

/* A decoder of ids that arrive one after another. The text of an id depends on earlier ids: only the first
   word has no space before it, and an earlier id may have begun a character. New ids are therefore decoded
   together with a context: some earlier ids, whose text has been returned already. */
struct tt_decode_stream {
    const tt_tokenizer *k;
    bool skip_special;
    bool bytes;         /* a token may end inside a character */
    bool runs;          /* runs of single-byte tokens are possible */
    bool whole;         /* a decoder step needs the whole text: no text is final before the end */
    int32_t *ids;       /* ids of the context, then ids whose text is not final yet */
    int n, capacity;
    int context;        /* number of ids of the context */
    size_t given;       /* bytes of the text of `ids` returned so far */
    tt__parts text;     /* the text returned last, which the caller may still be reading */
};

/* TT__STREAM_IDS: max number of ids that a stream keeps. TT__STREAM_CONTEXT: number of last ids that remain
   when a longer list is cut. */
enum { TT__STREAM_IDS = 64, TT__STREAM_CONTEXT = 8 };

tt_decode_stream *tt_decode_stream_new(const tt_tokenizer *k, bool skip_special)
{
    tt_decode_stream *s = (tt_decode_stream *)tt__calloc(k->ctx, sizeof *s);
    if (!s) return NULL;
    s->k = k;
    s->skip_special = skip_special;
    bool fused = false; /* whether a step joins all parts into one */
    for (int i = 0; i < k->finish.decode.n; i++) {
        const tt__text_step *d = &k->finish.decode.all[i];
        size_t at = 0;
        if (d->kind == TT__STEP_REPLACE) tt__utf8_next(d->from, d->from_bytes, &at);
        s->whole |= fused && (at < d->from_bytes ? d->kind == TT__STEP_REPLACE
                              : d->kind == TT__STEP_BYTES || d->kind == TT__STEP_BYTE_FALLBACK);
        s->bytes |= d->kind == TT__STEP_BYTES;
        s->runs |= d->kind == TT__STEP_BYTE_FALLBACK;
        fused |= d->kind == TT__STEP_BYTES || d->kind == TT__STEP_FUSE;
    }
    return s;
}

void tt_decode_stream_free(tt_decode_stream *s)
{
    if (!s) return;
    tt__parts_free(&s->text);
    tt__free(s->k->ctx, s->ids);
    tt__free(s->k->ctx, s);
}

/* Removes ids whose text has been returned from s->ids, but keeps some of them as context of the next ids.
   Removes no id if the remaining ids would have no text. clean: the text of all ids has been returned.
   Returns false if memory runs out. */
static bool tt__stream_cut(tt_decode_stream *s, bool clean)
{
    const int from = clean ? s->context
                   : s->bytes && s->n > TT__STREAM_IDS ? s->n - TT__STREAM_CONTEXT : 0;
    if (!clean && !from) return true;
    tt__parts rest = tt__decode(s->k, s->ids + from, s->n - from, s->skip_special);
    if (rest.used && !rest.failed) {
        s->n -= from;
        memmove(s->ids, s->ids + from, sizeof *s->ids * (size_t)s->n);
        s->context = clean ? s->n : 0;
        s->given = rest.used - (clean ? 0 : 3);
    }
    tt__parts_free(&rest);
    return !rest.failed;
}

static const char *tt__stream_text(tt_decode_stream *s, bool end, size_t *bytes)
{
    tt__parts *p = &s->text;
    tt__parts_free(p);
    *p = tt__decode(s->k, s->ids, s->n, s->skip_special);
    if (p->failed) return NULL;
    const bool open = s->bytes && p->used >= 3 && memcmp(p->text + p->used - 3, "\xEF\xBF\xBD", 3) == 0;
    const size_t certain = p->used - (open && !end ? 3 : 0), from = s->given;
    *bytes = certain > from ? certain - from : 0;
    s->given += *bytes;
    if (!end && !tt__stream_cut(s, !open)) return NULL;
    return *bytes ? p->text + from : "";
}

const char *tt_decode_stream_put(tt_decode_stream *s, const int32_t *ids, int64_t n, size_t *bytes)
{
    const char *text = NULL;
    size_t length = 0;
    *bytes = 0;
    for (int64_t i = 0; i < n; i++) {
        text = tt__id_text(s->k, ids[i], s->skip_special, &length);
        if (!text) continue;
        if (!TT__GROW(s->k->ctx, s->ids, s->n, s->capacity)) return NULL;
        s->ids[s->n++] = ids[i];
    }
    if (s->runs && s->n) text = tt__id_text(s->k, s->ids[s->n - 1], s->skip_special, &length);
    if (!s->n || s->whole || (s->runs && tt__byte_token(text, length) >= 0)) return "";
    return tt__stream_text(s, false, bytes);
}

const char *tt_decode_stream_end(tt_decode_stream *s, size_t *bytes)
{
    const char *text = tt__stream_text(s, true, bytes);
    s->n = s->context = 0;
    s->given = 0;
    return text;
}

int tt_tokenizer_size(const tt_tokenizer *k) { return k->size; }

const char *tt_tokenizer_token(const tt_tokenizer *k, int id)
{
    const bool there = id >= 0 && id < k->size && k->vocab.text[id].bytes != TT__NO_TOKEN;
    return there ? k->vocab.texts + k->vocab.text[id].start : NULL;
}

int tt_tokenizer_find(const tt_tokenizer *k, const char *token)
{
    return tt__any_token(k, token, strlen(token));
}

int tt_tokenizer_special(const tt_tokenizer *k, tt_special_token token)
{
    return (unsigned)token < TT_TOKEN_COUNT ? k->finish.roles[token] : -1;
}
