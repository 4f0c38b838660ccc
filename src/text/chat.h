#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "../files/json.h"
#include "types.h"
#include "read.h"
#include "folders.h"
#include "jinja.h"
#include "jinja_run.h"

/* ------------------------------------------------------------------------------------------ conversations */

/* A tokenizer's chat template, and its special tokens under the names that templates read. */
typedef struct tt__chat {
    tt__jinja jinja;
    tt__json config, map;      /* tokenizer_config.json and special_tokens_map.json; empty if missing */
} tt__chat;

/* The messages of a conversation: one or two arrays of a line of JSON or, if `json` is NULL, an array of the
   caller. */
typedef struct tt__chat_messages {
    const tt__json *json;
    int node, n;               /* node: the node of the array; n: number of messages, in both arrays
                                  together */
    const tt_message *messages;
    const tt__json *tools;     /* JSON with the array of tools; NULL: no tools */
    int tools_node;            /* node of that array in `tools` */
    int more;                  /* node of the array whose messages follow; 0: there is one array */
} tt__chat_messages;

static void tt__chat_close(tt__chat *c)
{
    tt__json_free(&c->config);
    tt__json_free(&c->map);
    tt__jinja_free(&c->jinja);
}

static const tt__kept_file *tt__chat_kept(const tt_tokenizer *k, const char *name)
{
    for (int i = 0; i < k->n_kept; i++) if (strcmp(k->kept[i].name, name) == 0) return &k->kept[i];
    return NULL;
}

/* Returns the node of the template in tokenizer_config.json: a string or, in a list of templates, the
   template named "default". -1: none. */
static int tt__chat_node(const tt__json *j)
{
    const int node = j->count ? tt__json_get(j, 0, "chat_template") : -1;
    if (node < 0 || j->nodes[node].kind != TT__JSON_ARRAY) return node;
    for (int item = node + 1; item < j->nodes[node].after; item = j->nodes[item].after) {
        const char *name = tt__json_text(j, tt__json_get(j, item, "name"));
        if (name && strcmp(name, "default") == 0) return tt__json_get(j, item, "template");
    }
    return -1;
}

/* Parses the chat template of a tokenizer's folder: chat_template.jinja or, without that file, a member of
   tokenizer_config.json. The caller closes c even after an error. */
static tt_status tt__chat_open(tt__chat *c, const tt_tokenizer *k)
{
    const tt__kept_file *files[] = {tt__chat_kept(k, "tokenizer_config.json"),
                                    tt__chat_kept(k, "special_tokens_map.json")};
    const tt__kept_file *own = tt__chat_kept(k, "chat_template.jinja");
    tt__json *const to[] = {&c->config, &c->map};
    tt_status status = TT_OK;
    memset(c, 0, sizeof *c);
    c->jinja.ctx = c->config.ctx = c->map.ctx = k->ctx;
    c->jinja.unicode = k->unicode;
    for (int i = 0; i < 2 && status == TT_OK; i++)
        if (files[i])
            status = tt__json_parse(to[i], k->ctx, files[i]->name, 0, files[i]->file.bytes,
                                    files[i]->file.size);
    if (status != TT_OK) return status;
    if (own) return tt__jinja_parse(&c->jinja, k->ctx, own->name, own->file.bytes, own->file.size);
    size_t bytes;
    const char *text = tt__json_bytes(&c->config, tt__chat_node(&c->config), &bytes);
    if (text) return tt__jinja_parse(&c->jinja, k->ctx, files[0]->name, text, bytes);
    return tt__fail(k->ctx, TT_ERR_ARGUMENT, "the tokenizer has no chat template: save one in its folder as "
                    "chat_template.jinja");
}

/* Converts a value of JSON to a value of a template. If `message`, members of an object that are null are
   left out, as transformers does. */
static tt__jinja_value tt__chat_value(tt__jinja_run *r, const tt__json *j, int node, bool message)
{
    const tt__json_node *at = &j->nodes[node];
    const bool object = at->kind == TT__JSON_OBJECT;
    if (at->kind == TT__JSON_NULL) return tt__jinja_make(TT__VALUE_NONE, 0);
    if (at->kind == TT__JSON_TRUE || at->kind == TT__JSON_FALSE)
        return tt__jinja_make(TT__VALUE_BOOL, at->kind == TT__JSON_TRUE);
    if (at->kind == TT__JSON_STRING) return tt__jinja_text(j->pool + at->integer, at->count);
    if (at->kind == TT__JSON_NUMBER_KIND) {
        tt__jinja_value x = tt__jinja_make(TT__VALUE_REAL, 0);
        x.real = at->number;
        if (!at->exact) return fabs(x.real) < 0x1p63 ? x : tt__jinja_make(TT__VALUE_OTHER, 1);
        return tt__jinja_make(TT__VALUE_INTEGER, at->integer);
    }
    tt__jinja_value v = tt__jinja_members(r, object ? TT__VALUE_DICT : TT__VALUE_LIST, at->count);
    int64_t n = 0;
    for (int child = node + 1; child < at->after && v.members; child = j->nodes[child].after) {
        if (message && j->nodes[child].kind == TT__JSON_NULL) continue;
        v.members[n].key = object ? j->pool + j->nodes[child].key : NULL;
        v.members[n].key_bytes = j->nodes[child].key_bytes;
        v.members[n++].value = tt__chat_value(r, j, child, false);
    }
    v.n = v.members ? n : 0;
    return v;
}

/* Returns the node of a message's role or, if `content`, of its content. -1: none. */
static int tt__chat_member(const tt__json *j, int message, bool content)
{
    const int node = tt__json_get(j, message, content ? "content" : "role");
    return node >= 0 ? node : tt__json_get(j, message, content ? "value" : "from");
}

/* Returns the role of message i. */
static tt__jinja_value tt__chat_role(const tt__chat_messages *m, int i)
{
    if (!m->json) return tt__jinja_text(m->messages[i].role, (int64_t)strlen(m->messages[i].role));
    int node = m->node + 1;
    while (i--) node = m->json->nodes[node].after;
    const tt__json_node *role = &m->json->nodes[tt__chat_member(m->json, node, false)];
    return tt__jinja_text(m->json->pool + role->integer, role->count);
}

/* Returns a message whose thoughts have all names that templates read, as transformers passes them: a new
   member "thinking" comes first, a new member "reasoning_content" last. */
static tt__jinja_value tt__chat_thoughts(tt__jinja_run *r, tt__jinja_value message)
{
    static const char *const keys[] = {"reasoning_content", "thinking", "reasoning"};
    tt__jinja_value thoughts = tt__jinja_make(TT__VALUE_UNDEFINED, 0), own = thoughts;
    for (int k = 0; k < TT__COUNT(keys) && !thoughts.type; k++)
        thoughts = tt__jinja_get(r, message, keys[k], (int64_t)strlen(keys[k]));
    if (!thoughts.type) return message;
    tt__jinja_value more = tt__jinja_members(r, TT__VALUE_DICT, message.n + 2);
    int64_t n = 0;
    for (int k = 1; k >= 0 && more.members; k--) {
        const int64_t bytes = (int64_t)strlen(keys[k]);
        own = tt__jinja_get(r, message, keys[k], bytes);
        const tt__jinja_member added = {keys[k], bytes, k && own.type ? own : thoughts};
        int64_t at = n;
        for (int64_t i = 0; i < n; i++)
            if (tt__jinja_same(more.members[i].key, more.members[i].key_bytes, keys[k])) at = i;
        more.members[at] = added;
        n = tt__max(n, at + 1);
        for (int64_t i = 0; k && i < message.n; i++)
            if (!tt__jinja_same(message.members[i].key, message.members[i].key_bytes, keys[k]))
                more.members[n++] = message.members[i];
    }
    more.n = more.members ? n : 0;
    return more;
}

/* Returns the first n messages as a list of dictionaries. */
static tt__jinja_value tt__chat_list(tt__jinja_run *r, const tt__chat_messages *m, int n)
{
    static const char *const keys[] = {"role", "content"};
    tt__jinja_value list = tt__jinja_members(r, TT__VALUE_LIST, n);
    for (int i = 0, node = m->node + 1; i < n && list.members; i++) {
        if (m->more && node == m->json->nodes[m->node].after) node = m->more + 1;
        tt__jinja_value one = m->json ? tt__chat_value(r, m->json, node, true)
                            : tt__jinja_members(r, TT__VALUE_DICT, 2);
        for (int k = 0; k < 2 && one.members; k++) {
            const char *text = m->json ? NULL : k ? m->messages[i].content : m->messages[i].role;
            const char *old = k ? "value" : "from";
            if (text) one.members[k].value = tt__jinja_text(text, (int64_t)strlen(text));
            for (int64_t at = text ? k : 0; at < one.n; at++)
                if (text || tt__jinja_same(one.members[at].key, one.members[at].key_bytes, old)) {
                    one.members[at].key = keys[k];
                    one.members[at].key_bytes = (int64_t)strlen(keys[k]);
                    break;
                }
        }
        list.members[i].value = m->json && one.members ? tt__chat_thoughts(r, one) : one;
        if (m->json) node = m->json->nodes[node].after;
    }
    return list;
}

/* Renders the first n messages into r, which the caller ends even after an error. prompt: adds the start of
   an answer at the end. */
static tt_status tt__chat_render(tt__chat *c, tt__jinja_run *r, const tt__chat_messages *m, int n,
                                 bool prompt)
{
    const tt__json *const files[] = {&c->config, &c->map};
    if (!tt__jinja_begin(r, &c->jinja)) return c->jinja.ctx->status;
    for (int role = 0; role < TT_TOKEN_COUNT; role++)
        for (int i = 0; i < 2; i++) {
            int node = files[i]->count ? tt__json_get(files[i], 0, tt__role_names[role]) : -1;
            size_t bytes;
            if (node >= 0 && files[i]->nodes[node].kind == TT__JSON_OBJECT)
                node = tt__json_get(files[i], node, "content");
            const char *text = tt__json_bytes(files[i], node, &bytes);
            if (!text) continue;
            tt__jinja_define(r, tt__role_names[role], tt__jinja_text(text, (int64_t)bytes));
            break;
        }
    tt__jinja_define(r, "messages", tt__chat_list(r, m, n));
    tt__jinja_define(r, "tools", m->tools ? tt__chat_value(r, m->tools, m->tools_node, false)
                                           : tt__jinja_make(TT__VALUE_NONE, 0));
    tt__jinja_define(r, "documents", tt__jinja_make(TT__VALUE_NONE, 0));
    tt__jinja_define(r, "add_generation_prompt", tt__jinja_make(TT__VALUE_BOOL, prompt));
    return c->jinja.failed ? c->jinja.ctx->status : tt__jinja_render(r);
}

/* Finds the answer of message i in `whole`, the rendering of all messages of m, and adds the answer's bytes
   to whole->spans. The answer begins where the rendering of the messages before it, as a prompt, ends. The
   rendering that ends with message i gives the answer's text. Some templates write the start of the last
   answer differently (such as Qwen3's thoughts): then the answer is the longest end of that text that `whole`
   has at the answer's beginning. */
static tt_status tt__chat_answer(tt__chat *c, const tt__chat_messages *m, tt__jinja_run *whole, int i)
{
    tt__jinja_run prompt, last;
    tt_status status = tt__chat_render(c, &prompt, m, i, true);
    memset(&last, 0, sizeof last);
    last.j = &c->jinja;
    if (status == TT_OK) status = tt__chat_render(c, &last, m, i + 1, false);
    const size_t begin = prompt.n;
    bool found = status == TT_OK && begin <= whole->n && begin <= last.n &&
                 memcmp(prompt.out, whole->out, begin) == 0 && memcmp(prompt.out, last.out, begin) == 0;
    const size_t length = found ? last.n - begin : 0;
    size_t n = found ? (size_t)tt__min((int64_t)length, (int64_t)(whole->n - begin)) : 0;
    while (n && memcmp(whole->out + begin, last.out + last.n - n, n) != 0) n--;
    found = found && (n || !length);
    if (status == TT_OK && !found)
        status = tt__fail(c->jinja.ctx, TT_ERR_UNSUPPORTED, "the chat template writes message %d, an answer, "
                          "or the messages before it, differently if other messages follow, so that the "
                          "answer cannot be told from the prompt: put {%% generation %%} and {%% "
                          "endgeneration %%} around answers in the template", i + 1);
    if (status == TT_OK && !TT__GROW(c->jinja.ctx, whole->spans, whole->n_spans, whole->cap_spans))
        status = TT_ERR_MEMORY;
    if (status == TT_OK) {
        whole->spans[whole->n_spans].begin = begin;
        whole->spans[whole->n_spans++].end = begin + n;
    }
    tt__jinja_end(&prompt);
    tt__jinja_end(&last);
    return status;
}

/* Renders a conversation, and finds the bytes of its answers, r->spans: the blocks {% generation %} or, in a
   template without this tag, the messages of the role "assistant". */
static tt_status tt__chat_answers(tt__chat *c, tt__jinja_run *r, const tt__chat_messages *m)
{
    tt_status status = tt__chat_render(c, r, m, m->n, false);
    for (int i = 0; i < m->n && status == TT_OK && !c->jinja.generates; i++)
        if (tt__jinja_is_text(tt__chat_role(m, i), "assistant")) status = tt__chat_answer(c, m, r, i);
    return status;
}

int64_t tt_tokenizer_chat(const tt_tokenizer *k, const tt_message *messages, int n, bool prompt, char *to,
                          size_t capacity)
{
    const tt__chat_messages m = {NULL, 0, n, messages, NULL, 0, 0};
    tt__chat c;
    tt__jinja_run r;
    int64_t bytes = -1;
    for (int i = 0; i < n; i++)
        if (!messages[i].role || !messages[i].content || !tt__is_utf8(messages[i].role) ||
            !tt__is_utf8(messages[i].content))
            return tt__fail(k->ctx, TT_ERR_ARGUMENT, "tt_tokenizer_chat: the role or the content of message "
                            "%d is NULL or not UTF-8", i + 1), (int64_t)-1;
    tt_status status = tt__chat_open(&c, k);
    if (status == TT_OK) {
        status = tt__chat_render(&c, &r, &m, n, prompt);
        if (status == TT_OK) {
            bytes = (int64_t)r.n;
            const size_t fits = capacity ? (size_t)tt__min((int64_t)capacity - 1, bytes) : 0;
            if (fits) memcpy(to, r.out, fits);
            if (capacity) to[fits] = 0;
        }
        tt__jinja_end(&r);
    }
    tt__chat_close(&c);
    return bytes;
}
