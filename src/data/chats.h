#pragma once
#include "../base/base.h"
#include "../files/json.h"
#include "../text/read.h"
#include "../text/encode.h"
#include "../text/jinja_run.h"
#include "../text/chat.h"
#include "stream.h"

/* ---- streams of conversations */

/* A file of conversations while its lines are added to a stream. */
typedef struct tt__chat_reader {
    tt_token_stream *s;
    const char *path;
    long long line;
    bool all;            /* all tokens are learnt */
    bool opened;         /* `chat` has the tokenizer's template */
    tt__chat chat;
    int64_t *room;       /* see tt__stream_grow */
    int32_t *ids;        /* (capacity): the tokens of a text */
    tt_span *spans;      /* (capacity): the bytes that each of them comes from */
    int64_t capacity;
} tt__chat_reader;

/* Fails because of a line; `format` says why. */
TT_PRINTF(2, 3)
static tt_status tt__chat_fail(const tt__chat_reader *f, const char *format, ...)
{
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return tt__fail(f->s->ctx, TT_ERR_FORMAT, "'%s', line %lld: %s", f->path, f->line, what);
}

/* Repeats an error of the template, with the line before it. */
static tt_status tt__chat_named(const tt__chat_reader *f, tt_status status)
{
    char what[TT__ERROR];
    if (status == TT_ERR_MEMORY) return status;
    snprintf(what, sizeof what, "%s", tt_error(f->s->ctx));
    return tt__fail(f->s->ctx, status, "'%s', line %lld: %s", f->path, f->line, what);
}

/* Makes room for n tokens in the arrays of f. */
static tt_status tt__chat_room(tt__chat_reader *f, int64_t n)
{
    tt_context *ctx = f->s->ctx;
    if (n <= f->capacity) return TT_OK;
    tt__free(ctx, f->ids);
    tt__free(ctx, f->spans);
    f->capacity = 0;
    f->spans = NULL;
    if (!(f->ids = (int32_t *)tt__alloc(ctx, sizeof *f->ids * (size_t)n)) ||
        !(f->spans = (tt_span *)tt__alloc(ctx, sizeof *f->spans * (size_t)n))) return TT_ERR_MEMORY;
    f->capacity = n;
    return TT_OK;
}

/* Tokenizes a text into f->ids and f->spans, without special tokens around the text. Sets *n to the number of
   tokens. */
static tt_status tt__chat_tokens(tt__chat_reader *f, const char *text, size_t bytes, int64_t *n)
{
    /* nearly every token stands for at least one byte */
    tt_status status = tt__chat_room(f, (int64_t)bytes + 16);
    for (int turn = 0; turn < 2 && status == TT_OK; turn++) {
        *n = (int64_t)bytes;
        const tt_encoding e = {text, bytes, NULL, 0, false, 0, f->capacity, f->ids, NULL, f->spans};
        if (f->s->tokenizer) *n = tt_tokenizer_encode(f->s->tokenizer, &e);
        else for (size_t k = 0; k < bytes; k++) f->ids[k] = (uint8_t)text[k];
        if (*n < 0)
            return tt__fail(f->s->ctx, TT_ERR_MEMORY, "out of memory for the tokens of '%s'", f->path);
        if (*n <= f->capacity) break;
        status = tt__chat_room(f, *n);
    }
    return status;
}

/* Adds a token to the stream, which has room for it. */
static tt_status tt__chat_push(tt__chat_reader *f, int32_t id, bool learnt)
{
    tt_token_stream *s = f->s;
    if (id >= s->vocab)
        return tt__chat_fail(f, "the token %d ('%.60s') occurs, but the model has only %d tokens: use the "
                             "model's tokenizer", id, tt_tokenizer_token(s->tokenizer, id), s->vocab);
    s->store->marks[s->store->count] = learnt || f->all ? TT__MARK_LEARNT : 0;
    tt__stream_push(s->store, id);
    return TT_OK;
}

/* Adds a prompt and its completion. */
static tt_status tt__chat_pair(tt__chat_reader *f, const tt__json *j, int prompt, int completion)
{
    tt_token_stream *s = f->s;
    size_t first = 0, second = 0;
    const char *texts[] = {tt__json_bytes(j, prompt, &first), tt__json_bytes(j, completion, &second)};
    int64_t n = 0, n_prompt = 0, same = 0;
    if (!texts[0])
        return tt__chat_fail(f, "\"prompt\" is %s; expected a string", tt__json_kind_name(j, prompt));
    if (!texts[1])
        return tt__chat_fail(f, "\"completion\" is %s; expected a string",
                             completion < 0 ? "missing" : tt__json_kind_name(j, completion));
    tt_status status = tt__chat_tokens(f, texts[0], first, &n_prompt);
    if (status != TT_OK) return status;
    int32_t *alone = (int32_t *)tt__alloc(s->ctx, sizeof *alone * (size_t)(n_prompt + 1) + first + second);
    if (!alone) return TT_ERR_MEMORY;
    char *text = (char *)(alone + n_prompt + 1);
    memcpy(alone, f->ids, sizeof *alone * (size_t)n_prompt);
    memcpy(text, texts[0], first);
    memcpy(text + first, texts[1], second);
    status = tt__chat_tokens(f, text, first + second, &n);
    while (status == TT_OK && same < n && same < n_prompt && alone[same] == f->ids[same]) same++;
    tt__free(s->ctx, alone);
    if (status == TT_OK && !tt__stream_grow(s, s->fronts + n + 1, f->room)) status = TT_ERR_MEMORY;
    const bool ended = n && tt__added_text(s->tokenizer, s->end) && f->ids[n - 1] == s->end;
    const int32_t *before = s->fronts ? s->tokenizer->finish.one.around[0].ids : NULL;
    const bool begun = n >= s->fronts && before &&
        memcmp(f->ids, before, sizeof *before * (size_t)s->fronts) == 0;
    for (int k = 0; k < s->fronts && status == TT_OK && !begun; k++)
        status = tt__chat_push(f, before[k], false);
    for (int64_t k = 0; k < n && status == TT_OK; k++) status = tt__chat_push(f, f->ids[k], k >= same);
    if (status == TT_OK && !ended) status = tt__chat_push(f, s->end, true);
    if (status == TT_OK) s->store->marks[s->store->count - 1] |= TT__MARK_END;
    return status;
}

/* Checks the messages of a line, an array. */
static tt_status tt__chat_check(const tt__chat_reader *f, const tt__json *j, int list, const char *key)
{
    int i = 1, node = list + 1;
    if (j->nodes[list].kind != TT__JSON_ARRAY || !j->nodes[list].count)
        return tt__chat_fail(f, "\"%s\" is %s; expected a list of one or more messages", key,
                             j->nodes[list].kind == TT__JSON_ARRAY ? "empty" : tt__json_kind_name(j, list));
    for (; node < j->nodes[list].after; node = j->nodes[node].after, i++) {
        if (j->nodes[node].kind != TT__JSON_OBJECT)
            return tt__chat_fail(f, "message %d of \"%s\" is %s; expected an object with \"role\" and "
                                 "\"content\"", i,
                                 key, tt__json_kind_name(j, node));
        for (int content = 0; content < 2; content++) {
            const int member = tt__chat_member(j, node, content);
            if (member < 0 || j->nodes[member].kind != TT__JSON_STRING)
                return tt__chat_fail(f, "\"%s\" of message %d of \"%s\" is %s; expected a string",
                                     content ? "content" : "role", i, key,
                                     member < 0 ? "missing" : tt__json_kind_name(j, member));
        }
    }
    return TT_OK;
}

/* Returns how many of the n tokens in f->ids are also the first tokens of a prompt; -1 after an error. */
static int64_t tt__chat_same(tt__chat_reader *f, int64_t n, const char *prompt, size_t bytes)
{
    int32_t *ids = (int32_t *)tt__alloc(f->s->ctx, sizeof *ids * (size_t)n);
    const tt_encoding e = {prompt, bytes, NULL, 0, false, 0, n, ids, NULL, NULL};
    const int64_t n_prompt = ids ? tt_tokenizer_encode(f->s->tokenizer, &e) : -1;
    int64_t same = 0;
    while (same < n && same < n_prompt && ids[same] == f->ids[same]) same++;
    if (n_prompt < 0) tt__fail(f->s->ctx, TT_ERR_MEMORY, "out of memory for the tokens of '%s'", f->path);
    tt__free(f->s->ctx, ids);
    return n_prompt < 0 ? -1 : same;
}

/* Adds the tokens of a rendered conversation. A token is learnt if its bytes overlap a block
   {% generation %}. In a template without this tag, a token is learnt if it begins before an answer's end and
   is not a token of the prompt before the answer. */
static tt_status tt__chat_add(tt__chat_reader *f, tt__jinja_run *r)
{
    const bool blocks = f->chat.jinja.generates;
    tt_token_stream *s = f->s;
    int64_t n = 0, learnt = 0;
    int answer = 0;
    tt_status status = tt__chat_tokens(f, r->out, r->n, &n);
    if (status == TT_OK && !n)
        return tt__chat_fail(f, "the chat template writes no text for the conversation");
    if (status == TT_OK && !tt__stream_grow(s, n, f->room)) status = TT_ERR_MEMORY;
    /* `begin` becomes a number of tokens */
    for (int i = 0; i < r->n_spans && status == TT_OK && !blocks; i++) {
        const int64_t same = tt__chat_same(f, n, r->out, r->spans[i].begin);
        if (same < 0) status = TT_ERR_MEMORY;
        r->spans[i].begin = (size_t)same;
    }
    for (int64_t k = 0; k < n && status == TT_OK; k++) {
        while (answer < r->n_spans && f->spans[k].begin >= r->spans[answer].end) answer++;
        const size_t end = blocks ? f->spans[k].end : (size_t)k + 1;
        const bool is = answer < r->n_spans && end > r->spans[answer].begin;
        learnt += is || f->all;
        status = tt__chat_push(f, f->ids[k], is);
    }
    if (status == TT_OK && !learnt)
        return tt__chat_fail(f, "the conversation has no answer to learn: expected a message of the role "
                             "\"assistant\"");
    if (status == TT_OK) s->store->marks[s->store->count - 1] |= TT__MARK_END;
    return status;
}

static tt_status tt__chat_messages_of(tt__chat_reader *f, const tt__json *j, int list, const char *key)
{
    const tt__chat_messages m = {j, list, j->nodes[list].count, NULL};
    tt__jinja_run r;
    tt_status status = tt__chat_check(f, j, list, key);
    if (status != TT_OK) return status;
    if (!f->s->tokenizer)
        return tt__chat_fail(f, "\"%s\" needs the chat template of a tokenizer, but the tokens are bytes: "
                             "write \"prompt\" and \"completion\" instead", key);
    if (!f->opened) {
        f->opened = true;
        if ((status = tt__chat_open(&f->chat, f->s->tokenizer)) != TT_OK) return status;
    }
    memset(&r, 0, sizeof r);
    r.j = &f->chat.jinja;
    status = f->all ? tt__chat_render(&f->chat, &r, &m, m.n, false) : tt__chat_answers(&f->chat, &r, &m);
    status = status == TT_OK ? tt__chat_add(f, &r) : tt__chat_named(f, status);
    tt__jinja_end(&r);
    return status;
}

static tt_status tt__chat_line(tt__chat_reader *f, const tt__json *j)
{
    static const char *const keys[] = {"messages", "conversations", "prompt", "tools"};
    int node[4];
    if (j->nodes[0].kind != TT__JSON_OBJECT)
        return tt__chat_fail(f, "the line is %s; expected an object with \"messages\", or with "
                             "\"prompt\" and \"completion\"", tt__json_kind_name(j, 0));
    for (int k = 0; k < 4; k++) node[k] = tt__json_get(j, 0, keys[k]);
    if (node[3] >= 0 && j->nodes[node[3]].kind != TT__JSON_NULL)
        return tt__chat_fail(f, "\"tools\" is not supported: remove it, or write the tools into a system "
                             "message");
    if ((node[0] >= 0) + (node[1] >= 0) + (node[2] >= 0) != 1)
        return tt__chat_fail(f, "the object has %s of \"messages\", \"conversations\" and \"prompt\"; "
                             "expected one of "
                             "them", node[0] < 0 && node[1] < 0 && node[2] < 0 ? "none" : "several");
    if (node[2] >= 0) return tt__chat_pair(f, j, node[2], tt__json_get(j, 0, "completion"));
    const int which = node[0] < 0;
    return tt__chat_messages_of(f, j, node[which], keys[which]);
}

static tt_status tt__stream_add_chats(tt_token_stream *s, const char *path, char *text, size_t bytes,
                                      const tt_stream_options *o, int64_t *room)
{
    tt__chat_reader f;
    size_t at = 0;
    memset(&f, 0, sizeof f);
    f.s = s;
    f.path = path;
    f.all = o->all_tokens;
    f.room = room;
    tt_status status = tt_text_begin(s->ctx, path, text, bytes, &at);
    while (at < bytes && status == TT_OK) {
        const char *end = (const char *)memchr(text + at, '\n', bytes - at);
        const size_t n = end ? (size_t)(end - text) - at : bytes - at;
        tt__json j;
        f.line++;
        if (strspn(text + at, " \t\r") < n) {
            status = tt__json_parse_line(&j, s->ctx, path, f.line, at, text + at, n);
            if (status == TT_OK) status = tt__chat_line(&f, &j);
            tt__json_free(&j);
        }
        at += n + 1;
    }
    if (f.opened) tt__chat_close(&f.chat);
    tt__free(s->ctx, f.ids);
    tt__free(s->ctx, f.spans);
    return status;
}
