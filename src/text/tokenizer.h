#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/utf8.h"
#include "../files/json.h"
#include "vocabulary.h"
#include "wordpiece.h"
#include "bpe.h"
#include "added.h"
#include "decode.h"
#include "folders.h"

/* ---- both kinds of tokenizer */

tt_tokenizer *tt_tokenizer_load(tt_context *ctx, const char *folder)
{
    char vocab[TT__PATH], config[TT__PATH];
    bool lowercase = true, words = false;
    tt__json j;
    tt_status status = tt__folder_has(ctx, folder, "vocab.txt", &words);
    if (status != TT_OK) return NULL;
    if (!words) {
        tt_tokenizer *k = (tt_tokenizer *)tt__calloc(ctx, sizeof *k);
        if (!k) return NULL;
        k->ctx = ctx;
        if (tt__bpe_load(k, folder) == TT_OK) return k;
        tt_tokenizer_free(k);
        return NULL;
    }
    status = tt__json_open_if_there(&j, ctx, config, folder, "tokenizer_config.json");
    if (status == TT_OK && j.count) status = tt__tokenizer_config(&j, &lowercase);
    if (status == TT_OK) status = tt__path_join(ctx, vocab, folder, "vocab.txt");
    tt__json_free(&j);
    return status == TT_OK ? tt_tokenizer_open(ctx, vocab, lowercase) : NULL;
}

void tt_tokenizer_free(tt_tokenizer *k)
{
    if (!k) return;
    tt__bpe_free(k->bpe);
    void *const owned[] = {k->file.bytes, k->unicode, k->pieces, k->slots, k};
    tt__free_all(k->ctx, owned, TT__COUNT(owned));
}

int tt_tokenizer_size(const tt_tokenizer *k) { return k->size; }

const char *tt_tokenizer_token(const tt_tokenizer *k, int id)
{
    if (id < 0 || id >= k->size) return NULL;
    if (!k->bpe) return k->file.bytes + k->pieces[id].start - (k->pieces[id].continues ? 2 : 0);
    return k->bpe->text[id].bytes == TT__BPE_NONE ? NULL : k->bpe->texts + k->bpe->text[id].start;
}

int tt_tokenizer_find(const tt_tokenizer *k, const char *token)
{
    return k->bpe ? tt__bpe_find(&k->bpe->by_text, token, strlen(token)) : tt__vocab_find(k, token);
}

int tt_tokenizer_special(const tt_tokenizer *k, tt_special_token token)
{
    return (unsigned)token < TT_TOKEN_COUNT ? k->roles[token] : -1;
}

/* The ids of a text without those around it, of which `room` are kept. Returns how many there are: of those
   beyond room, all if `whole`, else some. -1: out of memory. */
static int64_t tt__encode(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int64_t room,
                          bool whole)
{
    if (k->bpe) return tt__bpe_encode(k->bpe, text, bytes, ids, room, whole);
    return tt__wordpieces(k, text, bytes, ids, (int)tt__min(room, INT_MAX), whole);
}

/* tt_tokenize, which reads on to the end of a text that is longer if `whole`, and returns how many ids it
   has: of those beyond max_tokens, all if `whole`, else some. */
static int tt__tokenize(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int max_tokens,
                        bool whole)
{
    const int around = k->n_before + k->n_behind, room = max_tokens - around;
    if (room < 0) return 0;
    const int64_t n = tt__encode(k, text, bytes, ids + k->n_before, room, whole), kept = tt__min(n, room);
    if (n < 0) return -1;
    for (int i = 0; i < k->n_before; i++) ids[i] = k->before[i];
    for (int i = 0; i < k->n_behind; i++) ids[k->n_before + kept + i] = k->behind[i];
    return (int)tt__min(n + around, INT_MAX);
}

int tt_tokenize(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int max_tokens)
{
    return (int)tt__min(tt__tokenize(k, text, bytes, ids, max_tokens, false), max_tokens);
}

int64_t tt_tokenizer_encode(const tt_tokenizer *k, const char *text, size_t bytes, bool special, int32_t *ids,
                            int64_t room)
{
    int64_t count = 0;
    for (int i = 0; special && i < k->n_before; i++, count++)
        if (count < room) ids[count] = k->before[i];
    const int64_t left = tt__max(0, room - count);
    const int64_t n = tt__encode(k, text, bytes, left ? ids + count : NULL, left, true);
    if (n < 0) return -1;
    count += n;
    for (int i = 0; special && i < k->n_behind; i++, count++)
        if (count < room) ids[count] = k->behind[i];
    return count;
}

static bool tt__word_has_text(const tt_tokenizer *k, int32_t id, bool skip_special)
{
    bool special = false;
    for (int role = 0; role < TT_TOKEN_COUNT; role++) special |= k->roles[role] == id;
    return id >= 0 && id < k->size && !(special && skip_special);
}

/* Words, with a space before each that continues no other, and before no . ? ! or , */
static void tt__words_decode(const tt_tokenizer *k, const int32_t *ids, int64_t n, bool skip_special,
                             tt__parts *p)
{
    for (int64_t i = 0; i < n; i++) {
        if (!tt__word_has_text(k, ids[i], skip_special)) continue;
        const tt__wordpiece *piece = &k->pieces[ids[i]];
        const char *text = k->file.bytes + piece->start;
        const bool joined = piece->continues || (piece->bytes && strchr(".?!,", text[0]));
        if (p->n && !joined) tt__parts_add(p, " ", 1);
        if (!p->n && piece->continues) tt__parts_add(p, "##", 2);
        tt__parts_add(p, text, piece->bytes);
        tt__parts_end(p);
    }
}

static tt__parts tt__decode(const tt_tokenizer *k, const int32_t *ids, int64_t n, bool skip_special)
{
    tt__parts p = {k->ctx, NULL, 0, 0, NULL, 0, 0, false};
    if (k->bpe) tt__bpe_decode(k, ids, n, skip_special, &p);
    else tt__words_decode(k, ids, n, skip_special, &p);
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

/* What a text begins with depends on what is decoded before it (a first word has no space before it, a
   character may have begun), so new ids are decoded behind some that are decoded already: a context. */
struct tt_decode_stream {
    const tt_tokenizer *k;
    bool skip_special;
    bool bytes;         /* tokens may end inside of a character */
    bool runs;          /* of tokens for single bytes */
    bool whole;         /* decoders look at the whole text: nothing is certain before its end */
    int32_t *ids;       /* the context, and those behind it whose text is not certain yet */
    int n, capacity;
    int context;        /* ids that it has */
    size_t given;       /* bytes of the text of `ids` that were returned */
    tt__parts text;     /* which the caller may be reading */
};

enum { TT__STREAM_IDS = 64, TT__STREAM_CONTEXT = 8 }; /* more than this many are cut to the last of them */

tt_decode_stream *tt_decode_stream_new(const tt_tokenizer *k, bool skip_special)
{
    tt_decode_stream *s = (tt_decode_stream *)tt__calloc(k->ctx, sizeof *s);
    if (!s) return NULL;
    s->k = k;
    s->skip_special = skip_special;
    bool fused = false; /* do decoders see the text in one? */
    for (int i = 0; k->bpe && i < k->bpe->n_decoders; i++) {
        const tt__stage *d = &k->bpe->decoders[i];
        size_t at = 0;
        if (d->kind == TT__STAGE_REPLACE) tt__utf8_next(d->from, d->from_bytes, &at);
        s->whole |= fused && (at < d->from_bytes ? d->kind == TT__STAGE_REPLACE
                              : d->kind == TT__STAGE_BYTES || d->kind == TT__STAGE_BYTE_FALLBACK);
        s->bytes |= d->kind == TT__STAGE_BYTES;
        s->runs |= d->kind == TT__STAGE_BYTE_FALLBACK;
        fused |= d->kind == TT__STAGE_BYTES || d->kind == TT__STAGE_FUSE;
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

/* Leaves ids away whose text is given, but for a context with a text. clean: all of it is given. */
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
        if (s->k->bpe) text = tt__bpe_text(s->k, ids[i], s->skip_special, &length);
        if (s->k->bpe ? !text : !tt__word_has_text(s->k, ids[i], s->skip_special)) continue;
        if (!TT__GROW(s->k->ctx, s->ids, s->n, s->capacity)) return NULL;
        s->ids[s->n++] = ids[i];
    }
    if (s->runs && s->n) text = tt__bpe_text(s->k, s->ids[s->n - 1], s->skip_special, &length);
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
