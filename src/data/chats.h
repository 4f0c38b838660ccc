#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../text/read.h"
#include "../text/encode.h"
#include "../text/jinja_run.h"
#include "../text/chat.h"
#include "stream.h"

/* ---- streams of conversations */

/* The state of reading a file of conversations, whose lines are added to the stream `s`. */
typedef struct tt__chat_reader {
    tt_token_stream *s;
    const char *path;
    long long line;
    bool all;            /* all tokens count in the loss, not only the answers */
    bool opened;         /* `chat` has been opened with the tokenizer's template */
    tt__chat chat;
    int64_t *room;       /* number of ids for which the store of `s` has memory */
    int32_t *ids;        /* (capacity): the tokens of a text */
    tt_span *spans;      /* (capacity): for each token, the bytes that the token comes from */
    int64_t capacity;
} tt__chat_reader;

/* Fails with an error that names the file and the current line; `format` is the reason. */
TT_PRINTF(2, 3)
static tt_status tt__chat_fail(const tt__chat_reader *f, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const tt_status status = tt__line_fail(f->s->ctx, f->path, f->line, format, args);
    va_end(args);
    return status;
}

/* Fails with the context's error, which comes from the template, and adds the file and the line before it. */
static tt_status tt__chat_named(const tt__chat_reader *f, tt_status status)
{
    char what[TT__ERROR];
    if (status == TT_ERR_MEMORY) return status;
    snprintf(what, sizeof what, "%s", tt_error(f->s->ctx));
    return tt__fail(f->s->ctx, status, "'%s', line %lld: %s", f->path, f->line, what);
}

/* Grows the arrays of f so that they hold n tokens. */
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
    /* Nearly every token stands for at least one byte, so 16 more than `bytes` ids are nearly always
       enough. */
    tt_status status = tt__chat_room(f, (int64_t)bytes + 16);
    for (int turn = 0; turn < 2 && status == TT_OK; turn++) {
        *n = (int64_t)bytes;
        const tt_encoding e = {text, bytes, NULL, 0, false, 0, f->capacity, f->ids, NULL, f->spans};
        if (f->s->tokenizer) *n = tt_tokenizer_encode(f->s->tokenizer, &e);
        else for (size_t k = 0; k < bytes; k++) f->ids[k] = (uint8_t)text[k];
        if (*n < 0)
            return tt__fail(f->s->ctx, TT_ERR_MEMORY, "out of memory for the tokens of '%s': free memory",
                            f->path);
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

/* Adds a document of a prompt and its completion, without marks of learnt tokens. Sets *first to the index
   in the stream of the text's first token, and *same to the number of leading tokens that the text shares
   with the prompt alone. */
static tt_status tt__chat_joined(tt__chat_reader *f, const char *prompt, size_t n_prompt,
                                 const char *completion, size_t bytes, int64_t *first, int64_t *same)
{
    tt_token_stream *s = f->s;
    int64_t n = 0, alone = 0;
    *first = *same = 0;
    tt_status status = tt__chat_tokens(f, prompt, n_prompt, &alone);
    if (status != TT_OK) return status;
    int32_t *ids = (int32_t *)tt__alloc(s->ctx, sizeof *ids * (size_t)(alone + 1) + n_prompt + bytes);
    if (!ids) return TT_ERR_MEMORY;
    char *text = (char *)(ids + alone + 1);
    memcpy(ids, f->ids, sizeof *ids * (size_t)alone);
    memcpy(text, prompt, n_prompt);
    memcpy(text + n_prompt, completion, bytes);
    status = tt__chat_tokens(f, text, n_prompt + bytes, &n);
    while (status == TT_OK && *same < n && *same < alone && ids[*same] == f->ids[*same]) ++*same;
    tt__free(s->ctx, ids);
    if (status == TT_OK && !tt__stream_grow(s, s->fronts + n + 1, f->room)) status = TT_ERR_MEMORY;
    const bool ended = n && tt__added_text(s->tokenizer, s->end) && f->ids[n - 1] == s->end;
    const int32_t *before = s->fronts ? s->tokenizer->finish.one.around[0].ids : NULL;
    const bool begun = n >= s->fronts && before &&
        memcmp(f->ids, before, sizeof *before * (size_t)s->fronts) == 0;
    for (int k = 0; k < s->fronts && status == TT_OK && !begun; k++)
        status = tt__chat_push(f, before[k], false);
    *first = s->store->count;
    for (int64_t k = 0; k < n && status == TT_OK; k++) status = tt__chat_push(f, f->ids[k], false);
    if (status == TT_OK && !ended) status = tt__chat_push(f, s->end, false);
    if (status == TT_OK) s->store->marks[s->store->count - 1] |= TT__MARK_END;
    return status;
}

/* Adds the tokens of a prompt and of its completion; only the completion is learnt. */
static tt_status tt__chat_pair(tt__chat_reader *f, const tt__json *j, int prompt, int completion)
{
    size_t bytes[2] = {0, 0};
    const char *texts[] = {tt__json_bytes(j, prompt, &bytes[0]), tt__json_bytes(j, completion, &bytes[1])};
    tt__token_store *store = f->s->store;
    int64_t first, same;
    if (!texts[0])
        return tt__chat_fail(f, "\"prompt\" is %s; expected a string", tt__json_kind_name(j, prompt));
    if (!texts[1])
        return tt__chat_fail(f, "\"completion\" is %s; expected a string",
                             completion < 0 ? "missing" : tt__json_kind_name(j, completion));
    tt_status status = tt__chat_joined(f, texts[0], bytes[0], texts[1], bytes[1], &first, &same);
    for (int64_t at = first + same; at < store->count && status == TT_OK; at++)
        store->marks[at] |= TT__MARK_LEARNT;
    return status;
}

/* Checks that the array `list` of a line has one or more messages, each with a role and a content. */
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
            const bool none = member < 0 || j->nodes[member].kind == TT__JSON_NULL;
            if (content && none && tt__json_get(j, node, "tool_calls") >= 0) continue;
            if (content && member >= 0 && j->nodes[member].kind == TT__JSON_ARRAY) continue; /* parts */
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
    if (n_prompt < 0)
        tt__fail(f->s->ctx, TT_ERR_MEMORY, "out of memory for the tokens of '%s': free memory", f->path);
    tt__free(f->s->ctx, ids);
    return n_prompt < 0 ? -1 : same;
}

/* Adds the tokens of a rendered conversation. A token is learnt (counts in the loss) if its bytes overlap a
   block {% generation %}. In a template without this tag, a token is learnt if it begins before an answer's
   end and is not a token of the prompt before the answer. */
static tt_status tt__chat_add(tt__chat_reader *f, tt__jinja_run *r)
{
    const bool blocks = f->chat.jinja.generates;
    tt_token_stream *s = f->s;
    int64_t n = 0, learnt = 0;
    int answer = 0;
    tt_status status = tt__chat_tokens(f, r->out, r->n, &n);
    if (status == TT_OK && !n)
        return tt__chat_fail(f, "the chat template writes no text for the conversation: remove the line, or "
                             "correct the template");
    if (status == TT_OK && !tt__stream_grow(s, n, f->room)) status = TT_ERR_MEMORY;
    /* from here on, `begin` is the index of a token and no longer of a byte */
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
                             "\"assistant\"; rename the roles \"human\" and \"gpt\" to \"user\" and "
                             "\"assistant\"");
    if (status == TT_OK) s->store->marks[s->store->count - 1] |= TT__MARK_END;
    return status;
}

/* Finds the tools of a line: an array of objects, or a text with such an array as JSON, which `parsed`
   holds. */
static tt_status tt__chat_tools(const tt__chat_reader *f, const tt__json *j, int node, tt__json *parsed,
                                tt__chat_messages *m)
{
    size_t bytes;
    const char *text = node >= 0 ? tt__json_bytes(j, node, &bytes) : NULL;
    if (node < 0 || j->nodes[node].kind == TT__JSON_NULL) return TT_OK;
    m->tools = text ? parsed : j;
    m->tools_node = text ? 0 : node;
    const tt_status status = text ? tt__json_parse_line(parsed, f->s->ctx, f->path, f->line, 0, text, bytes)
                                  : TT_OK;
    if (status == TT_ERR_MEMORY) return status;
    if (status != TT_OK) return tt__chat_fail(f, "\"tools\" is no JSON: %s", tt_error(f->s->ctx));
    const tt__json_node *nodes = m->tools->nodes;
    if (nodes[m->tools_node].kind != TT__JSON_ARRAY)
        return tt__chat_fail(f, "\"tools\" is %s; expected a list of tools",
                             tt__json_kind_name(m->tools, m->tools_node));
    const int end = nodes[m->tools_node].after;
    for (int tool = m->tools_node + 1, i = 1; tool < end; tool = nodes[tool].after, i++)
        if (nodes[tool].kind != TT__JSON_OBJECT)
            return tt__chat_fail(f, "tool %d of \"tools\" is %s; expected an object", i,
                                 tt__json_kind_name(m->tools, tool));
    return TT_OK;
}

/* Opens the template for the messages of member `key`, unless an earlier line has opened it. */
static tt_status tt__chat_begin(tt__chat_reader *f, const char *key)
{
    const bool opened = f->opened;
    if (!f->s->tokenizer)
        return tt__chat_fail(f, "\"%s\" needs the chat template of a tokenizer, but the tokens are bytes: "
                             "write strings instead, \"prompt\" and \"%s\"", key,
                             f->s->store->paired ? "chosen" : "completion");
    f->opened = true;
    return opened ? TT_OK : tt__chat_open(&f->chat, f->s->tokenizer);
}

static tt_status tt__chat_messages_of(tt__chat_reader *f, const tt__json *j, int list, const char *key,
                                      tt__json *parsed)
{
    tt__chat_messages m = {j, list, j->nodes[list].count, NULL, NULL, 0, 0};
    tt__jinja_run r;
    tt_status status = tt__chat_check(f, j, list, key);
    if (status == TT_OK) status = tt__chat_tools(f, j, tt__json_get(j, 0, "tools"), parsed, &m);
    if (status == TT_OK) status = tt__chat_begin(f, key);
    if (status != TT_OK) return status;
    memset(&r, 0, sizeof r);
    r.j = &f->chat.jinja;
    status = f->all ? tt__chat_render(&f->chat, &r, &m, m.n, false) : tt__chat_answers(&f->chat, &r, &m);
    status = status == TT_OK ? tt__chat_add(f, &r) : tt__chat_named(f, status);
    tt__jinja_end(&r);
    return status;
}

/* ---- pairs of answers, of which the first is preferred */

static const char *const tt__pair_keys[] = {"chosen", "rejected"};

/* Returns whether two values of a JSON text are equal, with the members of objects in the same order. */
static bool tt__chat_equal(const tt__json *j, int a, int b)
{
    const int n = j->nodes[a].after - a;
    if (j->nodes[b].after - b != n) return false;
    for (int k = 0; k < n; k++) {
        const tt__json_node *x = &j->nodes[a + k], *y = &j->nodes[b + k];
        const bool text = x->kind == TT__JSON_STRING;
        if (x->kind != y->kind || x->count != y->count || (k && x->key_bytes != y->key_bytes)) return false;
        if (k && memcmp(j->pool + x->key, j->pool + y->key, x->key_bytes) != 0) return false;
        if (text && memcmp(j->pool + x->integer, j->pool + y->integer, (size_t)x->count) != 0) return false;
        if (x->kind == TT__JSON_NUMBER_KIND && !(x->number == y->number)) return false;
    }
    return true;
}

/* Returns the number of messages with which two lists begin alike. */
static int tt__chat_common(const tt__json *j, int a, int b)
{
    const int end[] = {j->nodes[a].after, j->nodes[b].after};
    int n = 0, x = a + 1, y = b + 1;
    while (x < end[0] && y < end[1] && tt__chat_equal(j, x, y)) {
        n++;
        x = j->nodes[x].after;
        y = j->nodes[y].after;
    }
    return n;
}

/* Adds a conversation that the template writes, as a document without marks of learnt tokens. m: the messages
   of the prompt and the answer, of which the first n are the prompt. Sets *first and *same as tt__chat_joined
   does. */
static tt_status tt__chat_answered(tt__chat_reader *f, const tt__chat_messages *m, int n, int64_t *first,
                                   int64_t *same)
{
    tt__jinja_run prompt, whole;
    int64_t tokens = 0;
    tt_token_stream *s = f->s;
    memset(&whole, 0, sizeof whole);
    whole.j = &f->chat.jinja;
    tt_status status = tt__chat_render(&f->chat, &prompt, m, n, true);
    if (status == TT_OK) status = tt__chat_render(&f->chat, &whole, m, m->n, false);
    if (status != TT_OK) status = tt__chat_named(f, status);
    if (status == TT_OK) status = tt__chat_tokens(f, whole.out, whole.n, &tokens);
    *first = s->store->count;
    *same = status == TT_OK && tokens ? tt__chat_same(f, tokens, prompt.out, prompt.n) : 0;
    if (*same < 0 || (status == TT_OK && !tt__stream_grow(s, tokens, f->room))) status = TT_ERR_MEMORY;
    for (int64_t k = 0; k < tokens && status == TT_OK; k++) status = tt__chat_push(f, f->ids[k], false);
    if (status == TT_OK && tokens) s->store->marks[s->store->count - 1] |= TT__MARK_END;
    tt__jinja_end(&prompt);
    tt__jinja_end(&whole);
    return status;
}

/* Fails unless the members of a pair fit together: strings, or lists of messages that differ. Sets *n to the
   number of messages of the prompt. prompt: node of "prompt"; -1: the conversations begin with the prompt. */
static tt_status tt__chat_check_pair(tt__chat_reader *f, const tt__json *j, int prompt, const int *sides,
                                     int *n)
{
    const bool list = sides[0] >= 0 && j->nodes[sides[0]].kind == TT__JSON_ARRAY;
    const int kind = list ? TT__JSON_ARRAY : TT__JSON_STRING;
    const char *what = list ? "a list of messages" : "a string";
    tt_status status = TT_OK;
    for (int k = 0; k < 3; k++) {
        const int node = k < 2 ? sides[k] : prompt;
        if ((k == 2 && list && node < 0) || (node >= 0 && (int)j->nodes[node].kind == kind)) continue;
        return tt__chat_fail(f, "\"%s\" is %s; expected %s%s", k < 2 ? tt__pair_keys[k] : "prompt",
                             node < 0 ? "missing" : tt__json_kind_name(j, node),
                             k || list || node < 0 ? what : "a string or a list of messages",
                             k && list ? ", as \"chosen\" is" : "");
    }
    if (!list) return TT_OK;
    for (int k = 0; k < 2 && status == TT_OK; k++) status = tt__chat_check(f, j, sides[k], tt__pair_keys[k]);
    if (status == TT_OK && prompt >= 0) status = tt__chat_check(f, j, prompt, "prompt");
    if (status != TT_OK) return status;
    *n = prompt >= 0 ? j->nodes[prompt].count : tt__chat_common(j, sides[0], sides[1]);
    if (!*n)
        return tt__chat_fail(f, "\"prompt\" is missing, and \"chosen\" and \"rejected\" begin with different "
                             "messages; expected a prompt, or conversations that begin with one");
    if (prompt < 0 && (*n == j->nodes[sides[0]].count || *n == j->nodes[sides[1]].count))
        return tt__chat_fail(f, "\"chosen\" or \"rejected\" has no answer after the messages that both begin "
                             "with; expected conversations that end with different answers");
    return tt__chat_begin(f, "chosen");
}

/* Adds a pair: a document of the prompt with the chosen answer, and one with the rejected answer. As in trl,
   the answers begin at the first token at which one of the two differs from the prompt alone. */
static tt_status tt__chat_preference(tt__chat_reader *f, const tt__json *j, int prompt, const int *sides,
                                     tt__json *parsed)
{
    tt__token_store *store = f->s->store;
    tt__chat_messages m = {j, 0, 0, NULL, NULL, 0, 0};
    int n = 0;
    int64_t first[2], same[2], end[2];
    tt_status status = tt__chat_check_pair(f, j, prompt, sides, &n);
    if (status == TT_OK) status = tt__chat_tools(f, j, tt__json_get(j, 0, "tools"), parsed, &m);
    for (int k = 0; k < 2 && status == TT_OK; k++) {
        const tt__json_node *side = &j->nodes[sides[k]];
        if (side->kind == TT__JSON_ARRAY) {
            m.n = prompt >= 0 ? n + side->count : side->count;
            m.node = prompt >= 0 ? prompt : sides[k];
            m.more = prompt >= 0 ? sides[k] : 0;
            status = tt__chat_answered(f, &m, n, &first[k], &same[k]);
        } else {
            size_t bytes[2] = {0, 0};
            const char *before = tt__json_bytes(j, prompt, &bytes[0]);
            const char *answer = tt__json_bytes(j, sides[k], &bytes[1]);
            status = tt__chat_joined(f, before, bytes[0], answer, bytes[1], &first[k], &same[k]);
        }
        end[k] = store->count;
        if (status == TT_OK && first[k] + same[k] >= end[k])
            return tt__chat_fail(f, "\"%s\" has no token after the prompt; expected an answer",
                                 tt__pair_keys[k]);
    }
    for (int k = 0; k < 2 && status == TT_OK; k++)
        for (int64_t at = first[k] + tt__min(same[0], same[1]); at < end[k]; at++)
            store->marks[at] |= TT__MARK_LEARNT;
    if (status == TT_OK) store->marks[store->count - 1] |= TT__MARK_PAIR;
    return status;
}

static tt_status tt__chat_line(tt__chat_reader *f, const tt__json *j)
{
    static const char *const keys[] = {"messages", "conversations", "prompt"};
    int node[3], sides[2];
    tt__json tools;
    if (j->nodes[0].kind != TT__JSON_OBJECT)
        return tt__chat_fail(f, "the line is %s; expected an object with \"messages\", with \"prompt\" and "
                             "\"completion\", or with \"chosen\" and \"rejected\"", tt__json_kind_name(j, 0));
    for (int k = 0; k < 3; k++) node[k] = tt__json_get(j, 0, keys[k]);
    for (int k = 0; k < 2; k++) sides[k] = tt__json_get(j, 0, tt__pair_keys[k]);
    const bool pair = sides[0] >= 0 || sides[1] >= 0, begins = !f->s->store->count;
    if (!begins && pair != f->s->store->paired)
        return tt__chat_fail(f, "the line has %s \"chosen\" or \"rejected\", but earlier lines have %s: a "
                             "file has either pairs of answers or conversations", pair ? "a" : "no",
                             pair ? "none" : "both");
    if (pair && f->all)
        return tt__chat_fail(f, "{all_tokens} learns all tokens of conversations, but of pairs only the "
                             "answers count: leave it out");
    f->s->store->paired = pair;
    memset(&tools, 0, sizeof tools);
    tools.ctx = f->s->ctx;
    if (pair) {
        const tt_status status = tt__chat_preference(f, j, node[2], sides, &tools);
        tt__json_free(&tools);
        return status;
    }
    if ((node[0] >= 0) + (node[1] >= 0) + (node[2] >= 0) != 1)
        return tt__chat_fail(f, "the object has %s of \"messages\", \"conversations\" and \"prompt\"; "
                             "expected one of "
                             "them", node[0] < 0 && node[1] < 0 && node[2] < 0 ? "none" : "several");
    if (node[2] >= 0) return tt__chat_pair(f, j, node[2], tt__json_get(j, 0, "completion"));
    const int which = node[0] < 0;
    const tt_status status = tt__chat_messages_of(f, j, node[which], keys[which], &tools);
    tt__json_free(&tools);
    return status;
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
