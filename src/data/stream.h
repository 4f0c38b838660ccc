#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../text/types.h"
#include "../text/encode.h"

/* ------------------------------------------------------------------------------------------ token streams */

/* The token ids that a stream shares with the streams that were split off from it. */
typedef struct tt__token_store {
    int users;          /* number of streams that use the store */
    int width;          /* bytes of an id, 2 or 4 */
    int64_t count;
    void *ids;          /* `count` ids; NULL: the ids are in `file`, from byte `skip` on */
    bool marked;        /* the stream consists of conversations */
    bool paired;        /* the conversations are pairs: one with the chosen answer, one with the rejected */
    uint8_t *marks;     /* of conversations: for each id, bits TT__MARK_... */
    void *file;         /* the open file; NULL: the ids are in memory */
    uint64_t skip;      /* bytes of the file's header, which the ids follow */
    char path[TT__PATH];
} tt__token_store;

struct tt_token_stream {
    tt_context *ctx;
    const tt_tokenizer *tokenizer;
    tt__token_store *store;
    int64_t first, count;
    int vocab, end;
    int fronts;         /* number of special ids that the tokenizer puts before each document */
    int64_t spelled[2]; /* spelled[0]: number of documents whose text begins with the spelling of the special
                           ids; spelled[1]: number of documents whose text ends with the spelling of token
                           `end` */
    bool texts;         /* the stream was built from texts: tokens stand for known texts or bytes */
};

enum { TT__BYTE_END = 256, TT__TOKENS_AT_ONCE = 16384 };
/* LEARNT: the token is a target; END: the token is the last token of a conversation; PAIR: the token is the
   last token of a pair of conversations. */
enum { TT__MARK_LEARNT = 1, TT__MARK_END = 2, TT__MARK_PAIR = 4 };

/* Returns whether token `at` of a stream, which has this id, ends a document. */
static bool tt__stream_ends(const tt_token_stream *s, int64_t at, int32_t id)
{
    const uint8_t *marks = s->store->marks;
    return marks ? (marks[s->first + at] & TT__MARK_END) != 0 : id == s->end;
}

tt_stream_options tt_stream_options_default(void)
{
    const tt_stream_options o = {NULL, -1, 0, false, NULL, false};
    return o;
}

void tt_token_stream_free(tt_token_stream *s)
{
    if (!s) return;
    tt_context *ctx = s->ctx;
    tt__token_store *store = s->store;
    if (store && --store->users == 0) {
        if (store->file) ctx->options.files.close(ctx->options.files.user, store->file);
        tt__free(ctx, store->ids);
        tt__free(ctx, store->marks);
        tt__free(ctx, store);
    }
    tt__free(ctx, s);
}

static tt_token_stream *tt__stream_new(tt_context *ctx, const char *path)
{
    tt_token_stream *s = (tt_token_stream *)tt__calloc(ctx, sizeof *s);
    if (!s) return NULL;
    s->ctx = ctx;
    s->end = -1;
    if (!(s->store = (tt__token_store *)tt__calloc(ctx, sizeof *s->store))) {
        tt_token_stream_free(s);
        return NULL;
    }
    s->store->users = 1;
    snprintf(s->store->path, sizeof s->store->path, "%s", path);
    return s;
}

/* Grows the stream's store so that it can hold n more ids. *room: number of ids for which the store has
   memory. Returns false if memory runs out. */
static bool tt__stream_grow(tt_token_stream *s, int64_t n, int64_t *room)
{
    tt__token_store *store = s->store;
    if (store->count + n <= *room) return true;
    const int64_t more = tt__max(store->count + n, *room + *room / 2);
    void *ids = tt__alloc(s->ctx, (size_t)more * (size_t)store->width);
    if (!ids) return false;
    if (store->count) memcpy(ids, store->ids, (size_t)store->count * (size_t)store->width);
    tt__free(s->ctx, store->ids);
    store->ids = ids;
    if (store->marked) {
        uint8_t *marks = (uint8_t *)tt__realloc(s->ctx, store->marks, (size_t)more);
        if (!marks) return false;
        store->marks = marks;
    }
    *room = more;
    return true;
}

static void tt__stream_push(tt__token_store *store, int32_t id)
{
    if (store->width == 2) ((uint16_t *)store->ids)[store->count++] = (uint16_t)id;
    else ((uint32_t *)store->ids)[store->count++] = (uint32_t)id;
}

/* Returns the text of an added token, whose spelling documents may contain; NULL if `id` is no added
   token. */
static const char *tt__added_text(const tt_tokenizer *k, int id)
{
    return k && id >= 0 && id < k->size && k->added_of[id] >= 0 ? tt_tokenizer_token(k, id) : NULL;
}

/* Returns the bytes of white space at the start of a document whose text goes on with the spelling of the
   first special token; 0 if the text does not. */
static size_t tt__stream_before_begin(const tt_token_stream *s, const char *text, size_t bytes)
{
    const tt_tokenizer *k = s->tokenizer;
    const char *begin = s->fronts ? tt__added_text(k, k->finish.one.around[0].ids[0]) : NULL;
    const size_t length = begin ? strlen(begin) : 0;
    size_t skip = 0;
    while (skip < bytes && text[skip] && strchr(" \t\r\n", text[skip])) skip++;
    return length && bytes - skip >= length && memcmp(text + skip, begin, length) == 0 ? skip : 0;
}

/* Returns the number of bytes of a document without the white space at its end, if the text before that white
   space ends with the spelling of the end token. Otherwise returns `bytes`. */
static size_t tt__stream_spelled_end(const tt_token_stream *s, const char *text, size_t bytes)
{
    const char *end = tt__added_text(s->tokenizer, s->end);
    const size_t length = end ? strlen(end) : 0;
    size_t kept = bytes;
    while (kept && text[kept - 1] && strchr(" \t\r\n", text[kept - 1])) kept--;
    return length && kept >= length && memcmp(text + kept - length, end, length) == 0 ? kept : bytes;
}

/* Adds a document to a stream: first its special tokens, then the tokens of its text, then the end token.
   *scratch: memory for *capacity ids, which the function grows if necessary. *room: number of ids for which
   the store has memory. */
static tt_status tt__stream_add(tt_token_stream *s, const char *text, size_t bytes, int64_t *room,
                                int32_t **scratch, int64_t *capacity)
{
    int64_t n = (int64_t)bytes;
    if (s->tokenizer) {
        const size_t skip = tt__stream_before_begin(s, text, bytes);
        text += skip;
        n = (int64_t)(bytes = tt__stream_spelled_end(s, text, bytes - skip));
        if (*capacity < n + 16) { /* nearly always enough: nearly every token stands for at least one byte */
            tt__free(s->ctx, *scratch);
            *capacity = 0;
            *scratch = (int32_t *)tt__alloc(s->ctx, sizeof **scratch * (size_t)(n + 16));
            if (!*scratch) return TT_ERR_MEMORY;
            *capacity = n + 16;
        }
        n = tt__encode_ids(s->tokenizer, text, bytes, false, *scratch, *capacity);
        if (n > *capacity) {
            tt__free(s->ctx, *scratch);
            *capacity = 0;
            *scratch = (int32_t *)tt__alloc(s->ctx, sizeof **scratch * (size_t)n);
            if (!*scratch) return TT_ERR_MEMORY;
            n = tt__encode_ids(s->tokenizer, text, bytes, false, *scratch, *capacity = n);
        }
        if (n < 0)
            return tt__fail(s->ctx, TT_ERR_MEMORY, "out of memory for the tokens of '%s': free memory",
                            s->store->path);
    }
    if (!tt__stream_grow(s, s->fronts + n + 1, room)) return TT_ERR_MEMORY;
    const size_t front = sizeof **scratch * (size_t)s->fronts;
    const int32_t *before = s->fronts ? s->tokenizer->finish.one.around[0].ids : NULL;
    const bool begun = s->fronts && n >= s->fronts && memcmp(*scratch, before, front) == 0;
    const bool ended = n && tt__added_text(s->tokenizer, s->end) && (*scratch)[n - 1] == s->end;
    s->spelled[0] += begun;
    s->spelled[1] += ended;
    for (int k = 0; k < s->fronts && !begun; k++) tt__stream_push(s->store, before[k]);
    for (int64_t k = 0; k < n; k++) {
        const int32_t id = s->tokenizer ? (*scratch)[k] : (uint8_t)text[k];
        if (id >= s->vocab)
            return tt__fail(s->ctx, TT_ERR_FORMAT, "'%s' has the token %d%s%.60s%s, but the model has only "
                            "%d tokens: use the model's tokenizer", s->store->path, id,
                            s->tokenizer ? " ('" : "",
                            s->tokenizer ? tt_tokenizer_token(s->tokenizer, id) : "",
                            s->tokenizer ? "')" : "", s->vocab);
        tt__stream_push(s->store, id);
    }
    if (!ended) tt__stream_push(s->store, s->end);
    return TT_OK;
}

/* Returns the end of the document that begins at `text`, and sets *next to the start of the next document.
   separator: the line between documents; NULL: the whole text is one document. */
static const char *tt__document_end(const char *text, const char *end, const char *separator,
                                    const char **next)
{
    const size_t length = separator ? strlen(separator) : 0;
    *next = end;
    for (const char *line = text, *after; separator && line < end; line = after) {
        const char *stop = (const char *)memchr(line, '\n', (size_t)(end - line));
        after = stop ? stop + 1 : end;
        size_t n = (size_t)((stop ? stop : end) - line);
        if (n && line[n - 1] == '\r') n--;
        if (n != length || memcmp(line, separator, length) != 0) continue;
        *next = after;
        return line;
    }
    return end;
}

/* Adds the documents of a text to a stream, except documents that are only white space. path: the name of the
   text in messages, or NULL. If `path` is not NULL, the text must be UTF-8; otherwise the text may have any
   bytes. */
static tt_status tt__stream_add_text(tt_token_stream *s, const char *path, const char *text, size_t bytes,
                                     const char *separator, int64_t *room)
{
    const char *const end = text + bytes, *next;
    int32_t *scratch = NULL;
    int64_t capacity = 0;
    size_t begin = 0;
    tt_status status = path ? tt_text_begin(s->ctx, path, text, bytes, &begin) : TT_OK;
    for (text += begin; text < end && status == TT_OK; text = next) {
        const char *stop = tt__document_end(text, end, separator, &next), *c = text;
        while (c < stop && strchr(" \t\r\n", *c) && *c) c++;
        if (c < stop) status = tt__stream_add(s, text, (size_t)(stop - text), room, &scratch, &capacity);
    }
    tt__free(s->ctx, scratch);
    return status;
}

/* Creates an empty stream in memory. path: name of the stream for messages. Returns NULL after an error. */
static tt_token_stream *tt__stream_begin(tt_context *ctx, const char *path, const tt_stream_options *o)
{
    tt_token_stream *s = tt__stream_new(ctx, path);
    if (!s) return NULL;
    s->tokenizer = o->tokenizer;
    s->texts = true;
    s->vocab = o->vocab ? o->vocab : o->tokenizer ? tt_tokenizer_size(o->tokenizer) : TT__BYTE_END + 1;
    s->fronts = o->tokenizer && !o->bare ? o->tokenizer->finish.one.around[0].n : 0;
    const int usual = o->tokenizer ? tt_tokenizer_special(o->tokenizer, TT_TOKEN_EOS) : TT__BYTE_END;
    s->end = o->end >= 0 ? o->end : usual;
    s->store->width = s->vocab > 65536 ? 4 : 2;
    if (s->end >= 0 && s->end < s->vocab) return s;
    if (s->end < 0)
        tt__fail(ctx, TT_ERR_ARGUMENT, "token stream of '%s': the tokenizer has no token that ends a "
                 "document: set tt_stream_options.end, or \"eos_token\" in tokenizer_config.json", path);
    else
        tt__fail(ctx, TT_ERR_ARGUMENT,
                 "token stream of '%s': end is %d, but must be below the vocabulary's size, %d", path, s->end,
                 s->vocab);
    tt_token_stream_free(s);
    return NULL;
}

/* Returns stream s if `status` is TT_OK and s has two or more tokens; otherwise frees s and returns NULL.
   Warns if documents spell out the special tokens that the stream adds. */
static tt_token_stream *tt__stream_done(tt_token_stream *s, tt_status status)
{
    s->count = s->store->count;
    for (int at = 0; at < 2 && status == TT_OK; at++)
        if (s->spelled[at])
            tt__log(s->ctx, TT_LOG_WARNING, "tokens", "'%s': %lld document%s out '%.60s', which the stream "
                    "adds %s each document: it is not added to these again", s->store->path,
                    (long long)s->spelled[at], s->spelled[at] == 1 ? " spells" : "s spell",
                    tt_tokenizer_token(s->tokenizer, at ? s->end : s->tokenizer->finish.one.around[0].ids[0]),
                    at ? "after" : "before");
    if (status == TT_OK && s->count < 2)
        status = tt__fail(s->ctx, TT_ERR_FORMAT, "token stream of '%s': the stream has fewer than 2 tokens, "
                          "which is too few to train on: name a longer text", s->store->path);
    if (status == TT_OK) return s;
    tt_token_stream_free(s);
    return NULL;
}

tt_token_stream *tt_token_stream_text(tt_context *ctx, const char *text, size_t bytes,
                                      const tt_stream_options *o)
{
    const tt_stream_options defaults = tt_stream_options_default();
    int64_t room = 0;
    if (!o) o = &defaults;
    tt_token_stream *s = tt__stream_begin(ctx, "a text", o);
    if (!s) return NULL;
    const char *path = s->tokenizer ? s->store->path : NULL;
    return tt__stream_done(s, tt__stream_add_text(s, path, text, bytes, o->separator, &room));
}

/* Adds the conversations of a text, which are lines of JSON, to a stream. */
static tt_status tt__stream_add_chats(tt_token_stream *s, const char *path, char *text, size_t bytes,
                                      const tt_stream_options *o, int64_t *room);

typedef struct tt__names { tt_context *ctx; char (*name)[256]; int n, capacity; bool failed; } tt__names;

static bool tt__names_add(void *arg, const char *name)
{
    tt__names *x = (tt__names *)arg;
    const size_t n = strlen(name);
    if (n < 5 || n >= sizeof *x->name || strcmp(name + n - 4, ".txt") != 0) return true;
    x->failed = !TT__GROW(x->ctx, x->name, x->n, x->capacity);
    if (!x->failed) memcpy(x->name[x->n++], name, n + 1);
    return !x->failed;
}

static int tt__by_name(const void *a, const void *b) { return strcmp((const char *)a, (const char *)b); }

tt_token_stream *tt_token_stream_read(tt_context *ctx, const char *path, const tt_stream_options *o)
{
    const tt_files *files = &ctx->options.files;
    const tt_stream_options defaults = tt_stream_options_default();
    char full[TT__PATH];
    int64_t room = 0;
    tt__file_bytes text;
    tt_status status = TT_OK;
    tt__names names;
    memset(&names, 0, sizeof names);
    names.ctx = ctx;
    if (!o) o = &defaults;
    tt_token_stream *s = tt__stream_begin(ctx, path, o);
    if (!s) return NULL;
    const char *ending = strrchr(path, '.');
    s->store->marked = ending && strcmp(ending, ".jsonl") == 0;
    s->texts = !s->store->marked;
    const bool folder = files->list(files->user, path, tt__names_add, &names) && !names.failed;
    if (names.failed) status = TT_ERR_MEMORY;
    else if (folder && !names.n)
        status = tt__fail(ctx, TT_ERR_FILE, "folder '%s' has no file *.txt: name a folder with texts", path);
    else if (folder) qsort(names.name, (size_t)names.n, sizeof *names.name, tt__by_name);
    for (int k = 0; k < (folder ? names.n : 1) && status == TT_OK; k++) {
        if (folder) status = tt__path_join(ctx, full, path, names.name[k]);
        const char *file = folder ? full : path;
        if (status == TT_OK) status = tt__file_open(ctx, file, &text);
        if (status != TT_OK) break;
        status = s->store->marked ? tt__stream_add_chats(s, file, text.bytes, text.size, o, &room)
               : tt__stream_add_text(s, file, text.bytes, text.size, o->separator, &room);
        tt__file_close(ctx, &text);
    }
    tt__free(ctx, names.name);
    return tt__stream_done(s, status);
}

/* Files of llm.c (dev/data/data_common.py) have a header of 256 i32 numbers: the number TT__LLMC_HALVES or
   TT__LLMC_WORDS, the version, the number of ids, ... */
#define TT__LLMC_HALVES 20240520 /* the file has ids of 2 bytes */
#define TT__LLMC_WORDS 20240801  /* the file has ids of 4 bytes */

/* Guesses the width in bytes of the ids in a file without a header, from the first ids and the size of the
   vocabulary, `vocab`. bytes: size of the file. Fails if ids seem to have 8 bytes. */
static tt_status tt__ids_width(const tt__token_store *store, tt_context *ctx, size_t bytes, int vocab,
                               int *width)
{
    uint16_t half[1024] = {0}, any[4] = {0}; /* any[k]: OR of 16-bit word k of all groups of 8 bytes */
    const size_t all = bytes - (size_t)store->skip, n = all / 4;
    const int pairs = n < 512 ? (int)n : 512;
    tt_status status = tt__file_read(ctx, store->path, store->file, (size_t)store->skip, half,
                                     4 * (size_t)pairs);
    for (int k = 0; k < 2 * pairs; k++) any[k % 4] |= half[k];
    const bool low = any[0] || any[2], high = any[1] || any[3];
    *width = vocab > 65536 || (low && !high && all % 4 == 0) ? 4 : 2;
    const bool eights = any[0] && !any[2] && !any[3] && all % 8 == 0;
    if (status != TT_OK || !eights || pairs < 16) return status; /* few ids may look like int64 by chance */
    return tt__fail(ctx, TT_ERR_FORMAT, "'%s' seems to have ids of 8 bytes (int64), because every second "
                    "group of 4 bytes is 0, but ids must have 2 or 4 bytes: convert them, for example with "
                    "NumPy's astype('uint32').tofile(...)", store->path);
}

tt_token_stream *tt_token_stream_open(tt_context *ctx, const char *path, int width, int vocab, int end)
{
    size_t bytes = 0;
    int32_t header[3] = {0, 0, 0};
    tt_token_stream *s = tt__stream_new(ctx, path);
    if (!s) return NULL;
    tt__token_store *store = s->store;
    tt_status status = TT_OK;
    if ((width != 0 && width != 2 && width != 4) || vocab < 1 || end >= vocab || end < -1)
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "token stream of '%s': ids have %d bytes, vocab is %d and "
                          "end %d; expected 2 or 4 bytes, and an end below vocab, or -1 for none", path,
                          width, vocab, end);
    if (status == TT_OK) status = tt__file_begin(ctx, path, &store->file, &bytes);
    if (status == TT_OK && bytes >= 1024)
        status = tt__file_read(ctx, path, store->file, 0, header, sizeof header);
    const int reported = header[0] == TT__LLMC_HALVES ? 2 : header[0] == TT__LLMC_WORDS ? 4 : 0;
    if (reported) store->skip = 1024;
    if (status == TT_OK && !width && reported) width = reported;
    if (status == TT_OK && !width) status = tt__ids_width(store, ctx, bytes, vocab, &width);
    if (status == TT_OK && reported && reported != width)
        status = tt__fail(ctx, TT_ERR_FORMAT, "'%s': its header says that ids have %d bytes, not %d: name "
                          "the right number of bytes", path, reported, width);
    if (status == TT_OK && (bytes - store->skip) % (size_t)width != 0)
        status = tt__fail(ctx, TT_ERR_FORMAT, "'%s': %zu bytes are not a multiple of the %d bytes of an id: "
                          "the file may be cut off, or its ids have another size", path,
                          bytes - (size_t)store->skip, width);
    store->width = width;
    store->count = (int64_t)(bytes - store->skip) / (width == 4 ? 4 : 2);
    if (status == TT_OK && store->skip && header[2] != store->count)
        status = tt__fail(ctx, TT_ERR_FORMAT, "'%s': its header says that there are %d ids, but the file has "
                          "%lld: it may be cut off", path, (int)header[2], (long long)store->count);
    s->vocab = vocab;
    s->end = end;
    return tt__stream_done(s, status);
}

tt_token_stream *tt_token_stream_split(tt_token_stream *s, int64_t n)
{
    const uint8_t *marks = s->store->marks;
    const int end = s->store->paired ? TT__MARK_PAIR : TT__MARK_END;
    const int64_t asked = n;
    while (marks && n > 1 && n < s->count && !(marks[s->first + s->count - n - 1] & end)) n--;
    if (n < 2 || n > s->count - 2) {
        tt__fail(s->ctx, TT_ERR_ARGUMENT, "tt_token_stream_split: cannot split off %lld of %lld tokens: each "
                 "part needs at least 2 tokens%s", (long long)asked, (long long)s->count,
                 !marks ? "" : s->store->paired ? ", and the last pair, which is not cut, is longer"
                                                : ", and the last conversation, which is not cut, is longer");
        return NULL;
    }
    tt_token_stream *part = (tt_token_stream *)tt__alloc(s->ctx, sizeof *part);
    if (!part) return NULL;
    *part = *s;
    part->store->users++;
    s->count -= n;
    part->first += s->count;
    part->count = n;
    return part;
}

int64_t tt_token_stream_count(const tt_token_stream *s) { return s->count; }
bool tt_token_stream_pairs(const tt_token_stream *s) { return s->store->paired; }
int tt_token_stream_vocab(const tt_token_stream *s) { return s->vocab; }

tt_status tt_token_stream_get(const tt_token_stream *s, int64_t first, int64_t n, int32_t *to)
{
    const tt__token_store *store = s->store;
    const size_t width = (size_t)store->width;
    if (first < 0 || n < 0 || first > s->count - n)
        return tt__fail(s->ctx, TT_ERR_ARGUMENT,
                        "tokens %lld to %lld are not all in the stream, which has %lld tokens",
                        (long long)first, (long long)(first + n), (long long)s->count);
    const uint64_t at = (uint64_t)(s->first + first) * width;
    const char *from = store->ids ? (const char *)store->ids + at : NULL;
    if (!store->ids) { /* reads 2-byte ids into the second half of `to`, then widens them in place */
        char *raw = (char *)to + (size_t)n * (4 - width);
        tt_status status = tt__file_read(s->ctx, store->path, store->file, store->skip + at, raw,
                                         (size_t)n * width);
        if (status != TT_OK) return status;
        from = raw;
    }
    for (int64_t k = 0; k < n; k++) {
        uint16_t half;
        uint32_t whole;
        if (width == 2) memcpy(&half, from + 2 * k, 2), whole = half;
        else memcpy(&whole, from + 4 * k, 4);
        if (whole >= (uint32_t)s->vocab)
            return tt__fail(s->ctx, TT_ERR_FORMAT, "'%s', token %lld: the id is %u, but must be below vocab, "
                            "%d: set vocab to that of the tokenizer that made the file", store->path,
                            (long long)(s->first + first + k), (unsigned)whole, s->vocab);
        to[k] = (int32_t)whole;
    }
    return TT_OK;
}

/* Calls `each` for all tokens of a stream in order, with at most TT__TOKENS_AT_ONCE tokens in each call. */
static tt_status tt__stream_each(const tt_token_stream *s, void *arg,
                                 tt_status (*each)(void *arg, const int32_t *ids, int64_t n))
{
    int32_t *ids = (int32_t *)tt__alloc(s->ctx, sizeof *ids * TT__TOKENS_AT_ONCE);
    tt_status status = ids ? TT_OK : TT_ERR_MEMORY;
    for (int64_t first = 0, n; first < s->count && status == TT_OK; first += n) {
        n = tt__min(TT__TOKENS_AT_ONCE, s->count - first);
        status = tt_token_stream_get(s, first, n, ids);
        if (status == TT_OK) status = each(arg, ids, n);
    }
    tt__free(s->ctx, ids);
    return status;
}

typedef struct tt__stream_writer { tt__writer w; bool wide; } tt__stream_writer;

static tt_status tt__stream_write_some(void *arg, const int32_t *ids, int64_t n)
{
    tt__stream_writer *x = (tt__stream_writer *)arg;
    for (int64_t k = 0; k < n; k++) {
        const uint16_t half = (uint16_t)ids[k];
        if (x->wide) tt__writer_put(&x->w, &ids[k], 4);
        else tt__writer_put(&x->w, &half, 2);
    }
    return x->w.status;
}

tt_status tt_token_stream_write(const tt_token_stream *s, const char *path)
{
    if (s->store->marks)
        return tt__fail(s->ctx, TT_ERR_UNSUPPORTED, "cannot write conversations to '%s': a file of ids does "
                        "not say which tokens are answers: keep the conversations as they are", path);
    tt__stream_writer *x = (tt__stream_writer *)tt__alloc(s->ctx, sizeof *x);
    if (!x) return TT_ERR_MEMORY;
    x->wide = s->vocab > 65536;
    tt_status status = tt__writer_begin(&x->w, s->ctx, path);
    if (status == TT_OK) {
        status = tt__stream_each(s, x, tt__stream_write_some);
        if (status != TT_OK && x->w.status == TT_OK) x->w.status = status;
        status = tt__writer_end(&x->w);
    }
    tt__free(s->ctx, x);
    return status;
}

/* The state of a count of the bytes of a stream's text. document: the tokens of the current document. Only
   whole documents are decoded, because a tokenizer may decode the first token of a text differently. */
typedef struct tt__stream_bytes {
    const tt_token_stream *s;
    int32_t *document;
    int n, capacity;
    int64_t bytes;
} tt__stream_bytes;

static tt_status tt__stream_count_bytes(void *arg, const int32_t *ids, int64_t n)
{
    tt__stream_bytes *x = (tt__stream_bytes *)arg;
    const tt_token_stream *s = x->s;
    for (int64_t k = 0; k < n; k++) {
        if (!s->tokenizer) { x->bytes += ids[k] != s->end; continue; }
        if (ids[k] != s->end) {
            if (!TT__GROW(s->ctx, x->document, x->n, x->capacity)) return TT_ERR_MEMORY;
            x->document[x->n++] = ids[k];
            continue;
        }
        const int32_t *from = x->document;
        const size_t front = sizeof *from * (size_t)s->fronts;
        /* A stream may begin within a document, which then lacks the special tokens at its start. */
        if (front && x->n >= s->fronts && memcmp(from, s->tokenizer->finish.one.around[0].ids, front) == 0)
            from += s->fronts;
        const int64_t n_text = x->n - (from - x->document);
        const int64_t bytes = tt_tokenizer_decode(s->tokenizer, from, n_text, false, NULL, 0);
        if (bytes < 0)
            return tt__fail(s->ctx, TT_ERR_MEMORY, "out of memory for a document's text: free memory");
        x->bytes += bytes;
        x->n = 0;
    }
    return TT_OK;
}

int64_t tt_token_stream_bytes(const tt_token_stream *s)
{
    tt__stream_bytes x;
    memset(&x, 0, sizeof x);
    x.s = s;
    if (!s->texts) return 0;
    tt_status status = tt__stream_each(s, &x, tt__stream_count_bytes);
    const int32_t end = s->end;
    if (status == TT_OK && x.n) status = tt__stream_count_bytes(&x, &end, 1); /* ends the last document */
    tt__free(s->ctx, x.document);
    return status == TT_OK ? x.bytes : -1;
}
