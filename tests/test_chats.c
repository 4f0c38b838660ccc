/* Tests of conversations: chat templates, and the tokens of answers. tests/golden/make_chats.py has made the
   expected hashes with transformers. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

enum { ROOM = 4096 };

/* Makes a folder with a tokenizer of tests/golden/bpe, a tokenizer_config.json, and a chat template (NULL:
   none). */
static const char *folder_of(const char *bpe, const char *config, const char *template_text, size_t bytes)
{
    const char *folder = test_folder();
    size_t n;
    char from[600];
    snprintf(from, sizeof from, "tests/golden/bpe/%s/tokenizer.json", bpe);
    char *json = test_read(from, &n);
    if (!CHECK(json != NULL)) return folder;
    test_write(test_path(folder, "tokenizer.json"), json, n);
    test_write(test_path(folder, "tokenizer_config.json"), config, strlen(config));
    if (template_text) test_write(test_path(folder, "chat_template.jinja"), template_text, bytes);
    free(json);
    return folder;
}

static const struct { const char *name, *bpe, *config; } golden[] = {
    {"chatml", "qwen2", "{\"eos_token\": \"<|im_end|>\"}"},
    {"qwen2", "qwen2", "{\"eos_token\": {\"content\": \"<|im_end|>\"}, \"bos_token\": null}"},
    {"qwen3", "qwen2", "{\"eos_token\": \"<|im_end|>\"}"},
    {"llama3", "llama3", "{\"bos_token\": \"<|begin_of_text|>\", \"eos_token\": \"<|eot_id|>\"}"},
    {"mistral", "mistral", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}"},
    {"gemma", "llama2", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}"},
    {"zephyr", "llama2", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}"},
};

static void is_hash(const char *expected, const void *bytes, size_t n, const char *what, const char *name,
                    int line)
{
    char found[20], message[200];
    snprintf(found, sizeof found, "%016llx", (unsigned long long)tt__hash_on(TT__HASH_BEGIN, bytes, n));
    snprintf(message, sizeof message, "%s of conversation %d by %s", what, line, name);
    test__check(strcmp(found, expected) == 0, __FILE__, __LINE__, message);
}

/* Compares the texts of a line of JSON, without and with the start of an answer, with hashes. Returns false
   if the template refuses the conversation. */
static bool has_texts(const tt_tokenizer *k, const char *line, size_t bytes, char hash[3][20],
                      const char *name,
                      int number)
{
    tt__json j;
    tt__chat c;
    tt__jinja_run r;
    bool ok = CHECK(tt__json_parse(&j, k->ctx, "line", 0, line, bytes) == TT_OK);
    const int list = tt__json_get(&j, 0, "messages");
    const tt__chat_messages m = {&j, list, j.nodes[list].count, NULL};
    ok = ok && CHECK(tt__chat_open(&c, k) == TT_OK);
    for (int prompt = 0; prompt < 2 && ok; prompt++) {
        ok = tt__chat_render(&c, &r, &m, m.n, prompt) == TT_OK;
        test__check(ok == (*hash[0] != '-'), __FILE__, __LINE__, ok ? name : tt_error(k->ctx));
        if (!ok) CHECK_ERROR(k->ctx, TT_ERR_FORMAT, "the template refuses the conversation: ");
        else is_hash(hash[prompt], r.out, r.n, prompt ? "prompt" : "text", name, number);
        tt__jinja_end(&r);
    }
    tt__chat_close(&c);
    tt__json_free(&j);
    return ok;
}

/* Compares the tokens of a conversation, and which of them are learnt, with a hash. */
static void has_answers(const tt_tokenizer *k, const char *line, size_t bytes, const char *hash,
                        const char *name,
                        int number)
{
    static const char path[] = "chats.jsonl";
    static char tokens[5 * ROOM];
    char file[600];
    snprintf(file, sizeof file, "%s/%s", test__files_made.folder, path);
    tt_stream_options o = tt_stream_options_default();
    o.tokenizer = k;
    tt_token_stream *s = tt_token_stream_read(k->ctx, test_write(file, line, bytes), &o);
    /* no message is an answer, or the template writes the last answer differently */
    if (!s && *hash == '-') {
        CHECK(strstr(tt_error(k->ctx), "line 1: ") != NULL);
        return;
    }
    test__check(s != NULL, __FILE__, __LINE__, tt_error(k->ctx));
    const int64_t n = s ? tt_token_stream_count(s) : 0;
    for (int64_t i = 0; i < n && i < ROOM; i++) {
        int32_t id;
        CHECK(tt_token_stream_get(s, i, 1, &id) == TT_OK);
        memcpy(tokens + 5 * i, &id, 4);
        tokens[5 * i + 4] = s->store->marks[i] & TT__MARK_LEARNT;
        CHECK(((s->store->marks[i] & TT__MARK_END) != 0) == (i == n - 1));
    }
    if (*hash != '-') is_hash(hash, tokens, 5 * (size_t)n, "tokens", name, number);
    tt_token_stream_free(s);
}

TEST(as_transformers)
{
    size_t bytes, n;
    char *chats = test_read(TEST_GOLDEN("chats/conversations.jsonl"), &bytes);
    REQUIRE(chats);
    for (int g = 0; g < TEST_COUNT(golden); g++) {
        char path[64];
        test_allocator a;
        tt_context *ctx = test_open(&a);
        snprintf(path, sizeof path, "chats/%s.jinja", golden[g].name);
        char *source = test_read(TEST_GOLDEN(path), &n);
        tt_tokenizer *k = tt_tokenizer_load(ctx, folder_of(golden[g].bpe, golden[g].config, source, n));
        snprintf(path, sizeof path, "chats/%s.txt", golden[g].name);
        FILE *f = fopen(TEST_GOLDEN(path), "r");
        if (CHECK(k && f)) {
            char hash[3][20], *line = chats;
            int number = 1, masks = 0;
            for (; fscanf(f, "%19s %19s %19s", hash[0], hash[1], hash[2]) == 3; number++) {
                char *end = strchr(line, '\n');
                if (!CHECK(end != NULL)) break;
                const size_t length = (size_t)(end - line);
                if (has_texts(k, line, length, hash, golden[g].name, number))
                    has_answers(k, line, length, hash[2], golden[g].name, number);
                masks += *hash[2] != '-';
                line = end + 1;
            }
            CHECK(number == 201 && masks > 60);
        }
        if (f) fclose(f);
        free(source);
        tt_tokenizer_free(k);
        TEST_CLOSE(ctx, &a);
    }
    free(chats);
}

/* Small templates, and what Jinja 3.1.6 with the settings of transformers 5.24.0 makes of `messages` with the
   start of an answer. */
static const tt_message messages[] = {
    {"system", " Be brief. "}, {"user", "H\303\244\303\237 \344\270\255\n"},
    {"assistant", "<think>\nx\n</think>\n\nyes"}};
static const struct { const char *source, *text; } language[] = {
    {"a{%  if true %}b{% endif %}c\n",
     "abc"},
    {"  {% if 1 %}\n  x\n  {% endif %}\ny\n\n",
     "  x\ny\n"},
    {"  {%+ if 1 %}\n  x {%- endif +%}\n z {# note #}\nw {#- n -#}  v",
     "    x\n z wv"},
    {"{{ 'a' -}}   b  {{- 'c' }}\n\nd {{ 1 }}\n",
     "abc\n\nd 1"},
    {"\302\240 {%- set x = 1 %}\n\343\200\200{{ x }}",
     "\343\200\2001"},
    {"{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.l"
     "ength }}{{ loop.revindex0 }}{{ loop.previtem.role if loop.previtem is defined }}|{% endfor %}",
     "10TrueFalse32|21FalseFalse31system|32FalseTrue30user|"},
    {"{% for m in messages if m.role != 'user' %}{{ m.role }}{{ loop.last }};{% else %}none{% endfor %"
     "}{% for x in [] %}x{% else %}none{% endfor %}",
     "systemFalse;assistantTrue;none"},
    {"{% for a, b in {'x': 1, 'y': [2]}.items() %}{{ a }}={{ b|tojson }},{% endfor %}{% for k in {'p':"
     " 1} %}{{ k }}{% endfor %}{% for c in '\303\244b' %}<{{ c }}>{% endfor %}",
     "x=1,y=[2],p<\303\244><b>"},
    {"{% for i in range(6) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endi"
     "f %}{{ i }}{% endfor %}{% for i in range(2, 4) %}{{ i }}{% endfor %}",
     "02323"},
    {"{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}{% if true %}{%"
     " set x = 9 %}{% endif %}{{ x }}",
     "2319"},
    {"{% set n = namespace(a=1, b='s') %}{% for i in [1, 2] %}{% set n.a = n.a + i %}{% set n.c = i %}"
     "{% endfor %}{{ n.a }}{{ n.b }}{{ n.c }}{{ n.d is defined }}",
     "4s2False"},
    {"{% set t %}in {{ messages|length }}{% endset %}[{{ t }}]",
     "[in 3]"},
    {"{{ messages[1].content[0:2] }}|{{ messages[1]['content'][::-1] }}|{{ 'abcdef'[1:-1:2] }}|{{ 'abc"
     "'[-1] }}|{{ 'abc'[7] is defined }}|{{ messages[::-1][0].role }}|{{ messages[1:]|length }}|{{ [1,"
     "2,3,4][-3:-1]|tojson }}|{{ [1,2,3][:1:-1]|tojson }}",
     "H\303\244|\n\344\270\255 \303\237\303\244H|bd|c|False|assistant|2|[2, 3]|[3]"},
    {"{{ messages[0].content|trim }}|{{ messages[0].content.strip() }}|{{ '  x'.lstrip() }}|{{ 'xyx'.s"
     "trip('x') }}|{{ 'a-b-c'.split('-')|tojson }}|{{ ' a  b '.split()|tojson }}|{{ 'a-b-c'.split('-',"
     " 1)[-1] }}|{{ 'a b c'.split(none, 1)|tojson }}",
     "Be brief.|Be brief.|x|y|[\"a\", \"b\", \"c\"]|[\"a\", \"b\"]|b-c|[\"a\", \"b c\"]"},
    {"{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }}{{ 'Ab'.upper() }}{{ 'Ab'|lower }}{"
     "{ 'aBC'|capitalize }}{{ 'aXbX'.replace('X', '-') }}{{ 'ab'.startswith('a') }}{{ 'ab'.endswith('a"
     "') }}",
     "yesABabAbca-b-TrueFalse"},
    {"{{ 7 % 3 }}{{ -7 % 3 }}{{ -7 // 2 }}{{ 2 * 3 + 1 }}{{ 2 * (3 + 1) }}{{ - 2 + 5 }}{{ 1 ~ 2 ~ 'x' "
     "}}{{ 'a' + 'b' }}{{ ([1] + [2])|tojson }}",
     "12-478312xab[1, 2]"},
    {"{{ true and 'x' }}{{ '' or 'y' }}{{ not '' }}{{ none or false }}{{ 1 < 2 }}{{ 'a' < 'b' }}{{ 2 >"
     "= 3 }}{{ 'a' in 'cab' }}{{ 'z' not in ['z'] }}{{ 'role' in messages[0] }}{{ 1 == true }}{{ '1' ="
     "= 1 }}",
     "xyTrueFalseTrueTrueFalseTrueFalseTrueTrueFalse"},
    {"{{ x is defined }}{{ x is not defined }}{{ none is none }}{{ 'a' is string }}{{ messages is iter"
     "able }}{{ messages[0] is mapping }}{{ 3 is number }}{{ true is boolean }}{{ false is false }}{{ "
     "x is undefined }}{{ 3 is odd }}{{ 4 is even }}{{ 'a' is equalto 'a' }}{{ 1 is not none and 2 }}",
     "FalseTrueTrueTrueTrueTrueTrueTrueTrueTrueTrueTrueTrue2"},
    {"{{ x|default('d') }}{{ ''|default('e', true) }}{{ none|default('f') }}{{ x }}{{ none }}{{ [1,2]|"
     "join('-') }}{{ ['a','b']|first }}{{ ['a','b']|last }}{{ 12|string + '!' }}{{ messages|selectattr"
     "('role', 'equalto', 'user')|list|length }}{{ messages|rejectattr('role', 'equalto', 'user')|list"
     "|length }}{{ messages|selectattr('none')|list|length }}",
     "deNoneNone1-2ab12!120"},
    {"{{ {'a': \"q\\\"\\n\\t\\\\\303\251<\", 'b': [true, none, 3, {}]}|tojson }}",
     "{\"a\": \"q\\\"\\n\\t\\\\\303\251<\", \"b\": [true, null, 3, {}]}"},
    {"{{ ('x', 'y')[1] }}{{ (1,)|length }}{{ ()|length }}{{ 'yes' if messages else 'no' }}{{ 'no' if n"
     "ot messages }}{{ 'a' if false else 'b' if false else 'c' }}",
     "y10yesc"},
    {"{{ messages[0].get('role') }}{{ messages[0].get('x') }}{{ messages[0].get('x', 'y') }}{{ message"
     "s[0].keys()|list|tojson }}{{ messages[0].tool_calls is defined }}{{ not messages[0].tool_calls }"
     "}",
     "systemNoney[\"role\", \"content\"]FalseTrue"},
    {"{% if messages[0].role == 'x' %}1{% elif messages[0].role == 'system' %}2{% else %}3{% endif %}{"
     "% if false %}{% elif false %}4{% else %}5{% endif %}",
     "25"},
    {"{{ \"it's\" }}{{ 'a\\\nb' }}{{ 'tab\\tq\\q' }}{{ tools is none }}{{ add_generation_prompt }}{{ b"
     "os_token is defined }}",
     "it'sabtab\tq\\qTrueTrueFalse"},
    {"x\r\ny\rz\r\n",
     "x\ny\nz"},
    {"",
     ""},
};

TEST(language_of_templates)
{
    test_allocator a;
    char text[512];
    for (int i = 0; i < TEST_COUNT(language); i++) {
        tt_context *ctx = test_open(&a);
        const char *source = language[i].source, *expected = language[i].text;
        tt_tokenizer *k = tt_tokenizer_load(ctx, folder_of("qwen2", "{}", source, strlen(source)));
        REQUIRE(k);
        const int64_t n = tt_tokenizer_chat(k, messages, 3, true, text, sizeof text);
        test__check(n == (int64_t)strlen(expected) && strcmp(text, expected) == 0, __FILE__, __LINE__,
                    n < 0 ? tt_error(ctx) : source);
        CHECK(n < 3 || (tt_tokenizer_chat(k, messages, 3, true, text, 3) == n && strlen(text) == 2 &&
                        memcmp(text, expected, 2) == 0));
        CHECK(tt_tokenizer_chat(k, messages, 3, true, NULL, 0) == n);
        tt_tokenizer_free(k);
        TEST_CLOSE(ctx, &a);
    }
}

static const struct { const char *source; tt_status status; const char *error; } refused[] = {
    {"a\n{% macro f(x) %}{% endmacro %}", TT_ERR_UNSUPPORTED, "line 2 of the chat template: the tag 'macro' "
     "is not "
     "supported here; expected if, for"},
    {"{% include 'x' %}", TT_ERR_UNSUPPORTED, "the tag 'include'"},
    {"{{ 1|round }}", TT_ERR_UNSUPPORTED, "the filter round of a number is not supported"},
    {"{{ 'x'|tojson(indent=4) }}", TT_ERR_UNSUPPORTED, "the filter tojson with an argument indent is not "
     "supported"},
    {"{{ 'x'|trim(1, 2) }}", TT_ERR_UNSUPPORTED, "the filter trim with 2 arguments is not supported"},
    {"{{ f('x', 1, 2, 3) }}", TT_ERR_UNSUPPORTED, "the function f with four arguments is not supported"},
    {"{{ 1 is divisibleby(2) }}", TT_ERR_UNSUPPORTED, "the test divisibleby of a number is not supported"},
    {"\n\n{{ 'x'.format(1) }}", TT_ERR_UNSUPPORTED, "line 3 of the chat template: the method format of a "
     "text is not"},
    {"{{ strftime_now('%Y') }}", TT_ERR_UNSUPPORTED, "the function strftime_now is not supported"},
    {"{{ 1.5 }}", TT_ERR_UNSUPPORTED, "the number 1.5"},
    {"{{ 12345678901 }}", TT_ERR_UNSUPPORTED, "at most 9 digits"},
    {"{{ '\\u0041' }}", TT_ERR_UNSUPPORTED, "the escape sequence \\u"},
    {"{{ '\303\244'|upper }}", TT_ERR_UNSUPPORTED, "the filter upper of a text"},
    {"{{ messages }}", TT_ERR_UNSUPPORTED, "printing a list is not supported"},
    {"{{ 1 < 2 < 3 }}", TT_ERR_UNSUPPORTED, "two comparisons of one value"},
    {"{{ 7 / 2 }}", TT_ERR_FORMAT, "found '/'; expected the end of the tag"},
    {"{{ 'x' % 2 }}", TT_ERR_FORMAT, "a text % a number cannot be computed"},
    {"{{ 1 % 0 }}", TT_ERR_FORMAT, "a number % 0 cannot be computed"},
    {"{{ 'a' + 1 }}", TT_ERR_FORMAT, "a text + a number cannot be computed"},
    {"{{ x.y }}", TT_ERR_FORMAT, "an undefined value has no attribute or item y"},
    {"{{ 'a' < 1 }}", TT_ERR_FORMAT, "a text cannot be compared with a number by <"},
    {"{{ [1][::0] }}", TT_ERR_FORMAT, "the step of a slice is 0"},
    {"{% for a, b in [1] %}{% endfor %}", TT_ERR_FORMAT, "the loop has two variables, but an item is a "
     "number"},
    {"{% for a in 1 %}{% endfor %}", TT_ERR_FORMAT, "a number has no items"},
    {"{% set messages.x = 1 %}", TT_ERR_FORMAT, "an attribute of a list cannot be set"},
    {"{{ raise_exception('no ' + messages[0].role) }}", TT_ERR_FORMAT,
     "the template refuses the conversation: no sys"},
    {"{% if x %}", TT_ERR_FORMAT, "expected elif else endif"},
    {"{% endif %}", TT_ERR_UNSUPPORTED, "the tag 'endif' is not supported here"},
    {"{{ 'x }}", TT_ERR_FORMAT, "a string has no closing quote"},
    {"{{ x", TT_ERR_FORMAT, "has no end"},
    {"{# x", TT_ERR_FORMAT, "the comment has no end"},
    {"{{ }}", TT_ERR_FORMAT, "found the end of the tag; expected a value"},
    {"{{ x ? }}", TT_ERR_FORMAT, "the byte 0x3f begins no word and no operator"},
    {"{% set x %}{% generation %}{% endgeneration %}{% endset %}", TT_ERR_UNSUPPORTED,
     "generation within set"},
    {"\377", TT_ERR_FORMAT, "in UTF-8"},
    {"{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", TT_ERR_UNSUPPORTED,
     "more than"},
    {"{% set n = namespace(x='0123456789') %}{% for a in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
     TT_ERR_UNSUPPORTED, "bytes"},
    {"{% set n = namespace(x=[]) %}{% for a in range(300) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x == n.x }}"
     "{{ n.x|tojson }}", TT_ERR_UNSUPPORTED, "a list is nested too deeply"},
};

TEST(templates_that_are_refused)
{
    test_allocator a;
    char deep[4096];
    for (int i = 0; i < TEST_COUNT(refused) + 3; i++) {
        const char *source = i < TEST_COUNT(refused) ? refused[i].source : deep;
        tt_context *ctx = test_open(&a);
        if (source == deep) { /* levels of nesting in the source; a chain of operators */
            const char *part = i == TEST_COUNT(refused) ? "(" : i == TEST_COUNT(refused) + 1 ? "{% if 1 %}"
                : "+1";
            snprintf(deep, sizeof deep, i == TEST_COUNT(refused) + 1 ? "" : "{{ 1 ");
            if (*part == '(') snprintf(deep, sizeof deep, "{{ ");
            for (int n = 0; n < 300; n++) strcat(deep, part);
        }
        if (source == deep && i == TEST_COUNT(refused) + 2) strcat(deep, " }}");
        tt_tokenizer *k = tt_tokenizer_load(ctx, folder_of("qwen2", "{}", source, strlen(source)));
        REQUIRE(k);
        CHECK(tt_tokenizer_chat(k, messages, 3, false, NULL, 0) == -1);
        if (source == deep) CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "levels of nesting");
        else CHECK_ERROR(ctx, refused[i].status, refused[i].error);
        tt_tokenizer_free(k);
        TEST_CLOSE(ctx, &a);
    }
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_load(ctx, folder_of("qwen2",
                                                       "{\"chat_template\": [{\"name\": \"tool_use\", "
                                        "\"template\": \"x\"}]}", NULL, 0));
    CHECK(k && tt_tokenizer_chat(k, messages, 3, false, NULL, 0) == -1);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the tokenizer has no chat template: save one in its folder");
    tt_tokenizer_free(k);
    k = tt_tokenizer_load(ctx, folder_of("qwen2", "{\"chat_template\": [{\"name\": \"default\", "
                                         "\"template\": \"{{ "
                                         "messages[0].content }}\"}]}", NULL, 0));
    const tt_message wrong[] = {{"user", "\377"}, {NULL, ""}};
    CHECK(k && tt_tokenizer_chat(k, messages, 1, false, NULL, 0) == 11);
    for (int i = 0; i < 2; i++) CHECK(k && tt_tokenizer_chat(k, wrong + i, 1, false, NULL, 0) == -1);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the role or the content of message 1 is NULL or not UTF-8");
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* A template without the tag `generation`, which writes {role}content; */
static const char plain[] = "{% for m in messages %}{{ '{' + m.role + '}' + m.content + ';' }}{% endfor %}"
                            "{% if add_generation_prompt %}{{ '{assistant}' }}{% endif %}";

static tt_token_stream *stream_of(const tt_tokenizer *k, const char *lines, bool all)
{
    char file[600];
    tt_stream_options o = tt_stream_options_default();
    o.tokenizer = k;
    o.all_tokens = all;
    snprintf(file, sizeof file, "%s/lines.jsonl", test__files_made.folder);
    return tt_token_stream_read(k->ctx, test_write(file, lines, strlen(lines)), &o);
}

/* Returns the text of the tokens of a stream that are learnt. */
static const char *learnt(const tt_tokenizer *k, const tt_token_stream *s)
{
    static char text[ROOM];
    int32_t ids[ROOM], id;
    int64_t n = 0;
    text[0] = 0;
    for (int64_t i = 0; s && i < tt_token_stream_count(s); i++) {
        CHECK(tt_token_stream_get(s, i, 1, &id) == TT_OK);
        if (s->store->marks[s->first + i] & TT__MARK_LEARNT) ids[n++] = id;
    }
    CHECK(tt_tokenizer_decode(k, ids, n, false, text, sizeof text) >= 0);
    return text;
}

#define MESSAGE(role, content) "{\"role\": \"" role "\", \"content\": \"" content "\"}"
#define CHAT(a, b, c, d) \
    "{\"messages\": [" MESSAGE("user", a) ", " MESSAGE("assistant", b) ", " MESSAGE("user", c) ", " \
    MESSAGE("assistant", d) "], \"id\": 0.5}\n"

TEST(answers_are_learnt)
{
    static const char ends_differ[] = "{% for m in messages %}{{ m.role + ':' + m.content }}{% if loop.last "
        "%}{{ '|' }}"
                                      "{% endif %}{% endfor %}";
    static const struct { const char *source, *lines, *learnt; } rows[] = {
        {plain, CHAT("1", "2", "3", "4"), "2;4;"},
        {plain, "\n \r\n" CHAT("a", "b\\n", "c", "d") CHAT("1", "2", "3", "4"), "b\n;d;2;4;"},
        {plain, "{\"conversations\": [{\"from\": \"user\", \"value\": \"1\"}, {\"from\": \"assistant\", "
         "\"value\": \"2\"}]}", "2;"},
        {plain, "{\"messages\": [" MESSAGE("assistant", "x") "], \"tools\": null}", "x;"},
        {plain, "{\"prompt\": \"ab\", \"completion\": \" cd\"}", " cd<|im_end|>"},
        {plain, "{\"prompt\": \"ab\", \"completion\": \"cd<|im_end|>\"}\r\n", "cd<|im_end|>"},
        {plain, "{\"prompt\": \"\", \"completion\": \"\"}\n{\"prompt\": \"x\", \"completion\": \"\"}",
         "<|im_end|><|im_end|>"},
        /* The template writes the last answer differently: it drops what precedes the others. */
        {"{% for m in messages %}{{ '{' + m.role + '}' + ('<>' if loop.last and m.role == 'assistant' else "
         "'') + m.content + ';' }}"
         "{% endfor %}{% if add_generation_prompt %}{{ '{assistant}' }}{% endif %}",
         CHAT("1", "2", "3", "4"), "2;<>4;"},
        {"{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
         CHAT("1", "2", "3", "4"), "1234"},
    };
    test_allocator a;
    for (int i = 0; i < TEST_COUNT(rows); i++) {
        tt_context *ctx = test_open(&a);
        tt_tokenizer *k = tt_tokenizer_load(ctx,
                                            folder_of("qwen2", "{\"eos_token\": \"<|im_end|>\"}",
                                                      rows[i].source,
                                                           strlen(rows[i].source)));
        REQUIRE(k);
        tt_token_stream *s = stream_of(k, rows[i].lines, false);
        test__check(s && strcmp(learnt(k, s), rows[i].learnt) == 0, __FILE__, __LINE__,
                    s ? learnt(k, s) : tt_error(ctx));
        CHECK(!s || tt_token_stream_bytes(s) == 0);
        CHECK(!s || tt_token_stream_write(s, "x") == TT_ERR_UNSUPPORTED);
        tt_token_stream_free(s);
        if (!i) {
            s = stream_of(k, CHAT("1", "2", "3", "4"), true);
            CHECK(strcmp(learnt(k, s), "{user}1;{assistant}2;{user}3;{assistant}4;") == 0);
            tt_token_stream_free(s);
        }
        tt_tokenizer_free(k);
        TEST_CLOSE(ctx, &a);
    }
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_load(ctx, folder_of("qwen2", "{\"eos_token\": \"<|im_end|>\"}",
                                                       ends_differ,
                                                       strlen(ends_differ)));
    CHECK(k && !stream_of(k, CHAT("1", "2", "3", "4"), false));
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "line 1: the chat template writes message 2, an answer");
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

TEST(lines_that_are_refused)
{
    static const struct { const char *lines, *error; } rows[] = {
        {"[1]", "line 1: the line is an array; expected an object with \"messages\", or with \"prompt\""},
        {CHAT("1", "2", "3", "4") "\n{}", "line 3: the object has none of \"messages\""},
        {"{\"messages\": [], \"prompt\": \"\"}", "line 1: the object has several of"},
        {"{\"messages\": []}", "line 1: \"messages\" is empty; expected a list of one or more messages"},
        {"{\"conversations\": {}}", "line 1: \"conversations\" is an object; expected a list"},
        {"{\"messages\": [" MESSAGE("user", "x") ", 1]}", "line 1: message 2 of \"messages\" is a number"},
        {"{\"messages\": [{\"content\": \"\"}]}", "line 1: \"role\" of message 1 of \"messages\" is missing"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": null}]}",
         "line 1: \"content\" of message 1 of \"messages\" is null; expected a string"},
        {"{\"messages\": [" MESSAGE("user", "x") "]}", "line 1: the conversation has no answer to learn"},
        {"{\"messages\": [" MESSAGE("user", "x") "], \"tools\": []}", "line 1: \"tools\" is not supported"},
        {"{\"prompt\": 1, \"completion\": \"\"}", "line 1: \"prompt\" is a number; expected a string"},
        {"{\"prompt\": \"\"}", "line 1: \"completion\" is missing; expected a string"},
        {"{\"prompt\": \"\", \"completion\": []}", "line 1: \"completion\" is an array; expected a string"},
        {"\n{\"prompt\": \"\", \"completion\": \"}", "line 2, byte 30: not valid JSON"},
        {"", "the stream has fewer than 2 tokens"},
        {"\377\376{\0", "UTF-16"},
    };
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_load(ctx, folder_of("qwen2", "{\"eos_token\": \"<|im_end|>\"}", plain,
                                                       strlen(plain)));
    REQUIRE(k);
    for (int i = 0; i < TEST_COUNT(rows); i++) {
        CHECK(stream_of(k, rows[i].lines, false) == NULL);
        CHECK_ERROR(ctx, TT_ERR_FORMAT, rows[i].error);
    }
    tt_stream_options o = tt_stream_options_default();
    char file[600];
    snprintf(file, sizeof file, "%s/lines.jsonl", test__files_made.folder);
    test_write(file, CHAT("1", "2", "3", "4"), strlen(CHAT("1", "2", "3", "4")));
    CHECK(tt_token_stream_read(ctx, file, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "line 1: \"messages\" needs the chat template of a tokenizer, but the "
                "tokens are");
    o.tokenizer = k;
    o.vocab = 50;
    o.end = 0;
    CHECK(tt_token_stream_read(ctx, file, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "but the model has only 50 tokens: use the model's tokenizer");
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* Checks the ids and targets of the next micro-batch, written as text; '.' is the target -100, '|' the start
   of a sequence. */
static void gives(const tt_source *source, const char *expected)
{
    char found[512] = "";
    tt_batch b;
    bool more;
    memset(&b, 0, sizeof b);
    if (!CHECK(source->next(source->self, &b, &more) == TT_OK && more)) return;
    const int32_t *targets = (const int32_t *)b.arrays[0].data;
    for (int i = 0, seq = 0; i < b.rows; i++) {
        const bool starts = seq < b.seqs && b.seq_start[seq] == i;
        seq += starts;
        CHECK(b.ids[i] == 256 || b.ids[i] < 128);
        CHECK(!starts || b.positions[i] == 0);
        snprintf(found + strlen(found), 8, "%s%c%c", starts ? "|" : "", b.ids[i] == 256 ? '$'
                 : (char)b.ids[i],
                 targets[i] == -100 ? '.' : targets[i] == 256 ? '$' : (char)targets[i]);
    }
    test__check(strcmp(found, expected) == 0, __FILE__, __LINE__, found);
}

/* A message of 2 MB with 100,000 lines fits the limits of steps and memory. */
TEST(long_messages)
{
    static const char source[] =
        "{% for m in messages %}{{ m.content.split('\n')|length }},{{ m.content|length }},"
        "{{ m.content.split()[-1] }},{{ m.content.replace('e', '')|length }}{% endfor %}";
    enum { LINES = 100000, BYTES = 20 * LINES };
    test_allocator a;
    char text[100];
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_load(ctx, folder_of("qwen2", "{}", source, strlen(source)));
    char *content = (char *)malloc(BYTES + 1);
    REQUIRE(k && content);
    for (int i = 0; i < LINES; i++) memcpy(content + 20 * i, "one line of 20 byte\n", 20);
    content[BYTES] = 0;
    const tt_message message = {"user", content};
    CHECK(tt_tokenizer_chat(k, &message, 1, true, text, sizeof text) > 0);
    test__check(strcmp(text, "100001,2000000,byte,1700000") == 0, __FILE__, __LINE__, text);
    free(content);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

TEST(windows_of_conversations)
{
    static const char lines[] = "{\"prompt\": \"ab\", \"completion\": \"cd\"}\n{\"prompt\": \"e\", "
        "\"completion\": "
                                "\"\"}\n{\"prompt\": \"fg\", \"completion\": \"h\"}\n";
    test_allocator a;
    test_log log;
    char file[600];
    tt_context *ctx = test_open_logged(&a, &log);
    snprintf(file, sizeof file, "%s/bytes.jsonl", test_folder());
    tt_token_stream *s = tt_token_stream_read(ctx, test_write(file, lines, strlen(lines)), NULL);
    REQUIRE(s && tt_token_stream_count(s) == 11);
    tt_token_loader_options o = tt_token_loader_options_default();
    o.batch = 2;
    o.shuffle = false;
    o.length = 4;
    tt_token_loader *l = tt_token_loader_new(ctx, s, &o);
    const tt_source *source = tt_token_loader_source(l);
    CHECK(l && source->steps == 2 && source->max_tokens == 8);
    gives(source, "|a.bccdd$|$.|e$$.|f.");
    gives(source, "|ghh$");
    const uint64_t hash = source->hash(source->self);
    tt_token_loader_free(l);
    o.whole = true;
    l = tt_token_loader_new(ctx, s, &o);
    source = tt_token_loader_source(l);
    CHECK(l && source->steps == 2 && source->max_tokens == 8 && source->max_seqs == 2);
    CHECK(source->hash(source->self) == hash);
    gives(source, "|a.bccdd.|e$$.");
    gives(source, "|f.ghh$$.");
    CHECK(strstr(log.text, "1 documents have more than 4 tokens, and are cut"));
    tt_token_loader_free(l);
    o.length = 2;
    l = tt_token_loader_new(ctx, s, &o);
    CHECK(l && tt_token_loader_source(l)->steps == 1);
    if (l) gives(tt_token_loader_source(l), "|e$$.");
    CHECK(strstr(log.text, "2 conversations are left out, because they have no token to learn among their "
                 "first 2"));
    tt_token_loader_free(l);
    o.length = 1;
    CHECK(tt_token_loader_new(ctx, s, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "has no document with a token to learn among its first 1: set a larger "
                "length");
    o.length = 4;
    o.across = true;
    CHECK(tt_token_loader_new(ctx, s, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "whole makes a window of each document, so that across has no meaning");
    o.across = false;

    CHECK(tt_token_stream_split(s, 3) == NULL); /* the last conversation has 4 tokens */
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "of conversations, which stay whole, the last one is longer");
    tt_token_stream *held = tt_token_stream_split(s, 5);
    CHECK(held && tt_token_stream_count(held) == 4 && tt_token_stream_count(s) == 7);
    l = tt_token_loader_new(ctx, held, &o);
    CHECK(l && tt_token_loader_source(l)->hash(l) != hash);
    gives(tt_token_loader_source(l), "|f.ghh$$.");
    tt_token_loader_free(l);
    tt_token_stream_free(held);
    tt_token_stream_free(s);

    s = tt_token_stream_text(ctx, "ab\n\nc\n", 6, &(tt_stream_options){.end = -1, .separator = ""});
    l = s ? tt_token_loader_new(ctx, s, &o) : NULL;
    CHECK(l != NULL);
    if (l) gives(tt_token_loader_source(l), "|abb\n\n$$.|c\n\n$$.");
    tt_token_loader_free(l);
    tt_token_stream_free(s);
    TEST_CLOSE(ctx, &a);
}

TEST(allocations_that_fail)
{
    static const char *const sources[] = {
        plain, "{% for m in messages %}{% generation %}{{ m.content|trim ~ loop.index }}{% endgeneration "
            "%}{% endfor %}"};
    static const char lines[] = CHAT("1", "2", "3", "4") "{\"prompt\": \"ab\", \"completion\": \"cd\"}\n";
    test_allocator a;
    char text[200];
    for (int i = 0; i < 2; i++) {
        tt_context *ctx = test_open(&a);
        tt_tokenizer *k = tt_tokenizer_load(ctx,
                                            folder_of("qwen2", "{\"eos_token\": \"<|im_end|>\"}", sources[i],
                                                           strlen(sources[i])));
        REQUIRE(k);
        tt_token_loader_options o = tt_token_loader_options_default();
        o.whole = true;
        for (long fail_at = 0, calls = 1; fail_at <= calls; fail_at++) {
            const long before = a.calls;
            a.fail_at = fail_at ? before + fail_at : 0;
            const int64_t n = tt_tokenizer_chat(k, messages, 3, true, text, sizeof text);
            tt_token_stream *s = n >= 0 ? stream_of(k, lines, false) : NULL;
            tt_token_loader *l = s ? tt_token_loader_new(ctx, s, &o) : NULL;
            if (fail_at) CHECK(!l && tt_error_code(ctx) == TT_ERR_MEMORY && *tt_error(ctx));
            else CHECK(l != NULL), calls = a.calls - before;
            a.fail_at = 0;
            tt_token_loader_free(l);
            tt_token_stream_free(s);
        }
        tt_tokenizer_free(k);
        TEST_CLOSE(ctx, &a);
    }
}

static const test_case tests[] = {
    TEST_CASE(as_transformers),
    TEST_CASE(language_of_templates),
    TEST_CASE(templates_that_are_refused),
    TEST_CASE(answers_are_learnt),
    TEST_CASE(lines_that_are_refused),
    TEST_CASE(long_messages),
    TEST_CASE(windows_of_conversations),
    TEST_CASE(allocations_that_fail),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
