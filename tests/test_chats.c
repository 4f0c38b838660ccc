/* Tests of conversations: chat templates, and the tokens of answers. tests/golden/make_chats.py has made the
   expected hashes with transformers. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

enum { ROOM = 8192 };

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

static const struct { const char *name, *bpe, *config, *chats; } golden[] = {
    {"chatml", "qwen2", "{\"eos_token\": \"<|im_end|>\"}", NULL},
    {"qwen2", "qwen2", "{\"eos_token\": {\"content\": \"<|im_end|>\"}, \"bos_token\": null}", NULL},
    {"qwen3", "qwen2", "{\"eos_token\": \"<|im_end|>\"}", NULL},
    {"llama3", "llama3", "{\"bos_token\": \"<|begin_of_text|>\", \"eos_token\": \"<|eot_id|>\"}", NULL},
    {"mistral", "mistral", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}", NULL},
    {"gemma", "llama2", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}", NULL},
    {"zephyr", "llama2", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}", NULL},
    {"tools", "qwen2", "{\"eos_token\": \"<|im_end|>\"}", "tools"},
};

static void is_hash(const char *expected, const void *bytes, size_t n, const char *what, const char *name,
                    int line)
{
    char found[20], message[200];
    snprintf(found, sizeof found, "%016llx", (unsigned long long)tt__hash_on(TT__HASH_BEGIN, bytes, n));
    snprintf(message, sizeof message, "%s of conversation %d by %s", what, line, name);
    test__check(strcmp(found, expected) == 0, __FILE__, __LINE__, message);
}

/* Renders the conversation in a line of JSON, without and with the start of an answer, and compares the texts
   with hashes. Returns false if the template refuses the conversation. */
static bool has_texts(const tt_tokenizer *k, const char *line, size_t bytes, char hash[3][20],
                      const char *name,
                      int number)
{
    tt__json j;
    tt__chat c;
    tt__jinja_run r;
    bool ok = CHECK(tt__json_parse(&j, k->ctx, "line", 0, line, bytes) == TT_OK);
    const int list = tt__json_get(&j, 0, "messages");
    const int tools = tt__json_get(&j, 0, "tools");
    const tt__chat_messages m = {&j, list, j.nodes[list].count, NULL, tools < 0 ? NULL : &j, tools, 0};
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
    /* There is no reference: no message is an answer, or the template writes the last answer differently. */
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
    for (int g = 0; g < TEST_COUNT(golden); g++) {
        char path[64];
        snprintf(path, sizeof path, "chats/%s.jsonl", golden[g].chats ? golden[g].chats : "conversations");
        char *chats = test_read(TEST_GOLDEN(path), &bytes);
        REQUIRE(chats);
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
            CHECK(number == (golden[g].chats ? 101 : 201) && masks > 60);
        }
        if (f) fclose(f);
        free(source);
        free(chats);
        tt_tokenizer_free(k);
        TEST_CLOSE(ctx, &a);
    }
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
    {"{% macro f(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }};{% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(b=4, a"
     "='x') }}{{ f() }}{{ f(c=3) }}",
     "121;131;x4x;2;23;"},
    {"{% set x = 1 %}{% macro f() %}{{ x }}{{ i is defined }}{% set x = 5 %}{{ x }}{% endmacro %}{% fo"
     "r i in [1] %}{% set x = 7 %}{{ f() }}{% endfor %}{% set x = 2 %}{{ f() }}{{ x }}",
     "1False52False52"},
    {"{% macro t(n) %}{% if n %}({{ t(n - 1) }}{{ n }}){% endif %}{% endmacro %}{{ t(3) }}{{ t(2)|leng"
     "th }}{{ f is defined }}{{ t is defined }}",
     "(((1)2)3)6FalseTrue"},
    {"{% macro f(n) %}{% for i in range(n) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{"
     "% endmacro %}{% for i in range(4) %}{{ f(i) }},{% endfor %}{% set f = 1 %}{{ f }}",
     ",0,01,01,1"},
    {"{{ 1.5 }} {{ 7 / 2 }} {{ 4 / 2 }} {{ 1.5 + 1 }} {{ 2 * 0.1 }} {{ 0.1 + 0.2 }} {{ -1.5 }} {{ 1.0 "
     "== 1 }} {{ 0.5 < 1 }} {{ 1.5 is number }} {{ 1.5 is float }} {{ 1.5 is integer }} {{ not 0.0 }} "
     "{{ 100000000.0 * 100000000.0 }} {{ 1 / 10000 }} {{ 1 / 100000 }} {{ 1.5|tojson }} {{ 1.5 - 0.25 "
     "}} {{ 3.0 }} {{ 123456.789 }} {{ 1.0 / 3 }}",
     "1.5 3.5 2.0 2.5 0.2 0.30000000000000004 -1.5 True True True True False True 1e+16 0.0001 1e-05 1"
     ".5 1.25 3.0 123456.789 0.3333333333333333"},
    {"{{ {'b': [1, {'\303\244': []}], 'a': 1.5}|tojson(indent=2) }}{{ '\303\244\360\237\230\200\\n'|to"
     "json(ensure_ascii=True) }}{{ {}|tojson(indent=4) }}{{ [1]|tojson(true, 1) }}",
     "{\n  \"b\": [\n    1,\n    {\n      \"\303\244\": []\n    }\n  ],\n  \"a\": 1.5\n}\"\\u00e4\\ud8"
     "3d\\ude00\\n\"{}[\n 1\n]"},
    {"{{ ['a', \"b'c\", 'd\"e', \"f'\\\"\", 1, 1.5, none, true, {'k': ['\\n\\\\\303\244 \343\200\200"
     "\360\237\230\200']}, x, [], {}] }}{{ messages[1] }}{{ messages[1:2]|string }}",
     "['a', \"b'c\", 'd\"e', 'f\\'\"', 1, 1.5, None, True, {'k': ['\\n\\\\\303\244 \\u3000\360\237\230"
     "\200']}, Undefined, [], {}]{'role': 'user', 'content': 'H\303\244\303\237 \344\270\255\\n'}[{'ro"
     "le': 'user', 'content': 'H\303\244\303\237 \344\270\255\\n'}]"},
    {"{{ [3, 1]|map('string')|join('-') }}{{ messages|map(attribute='role')|join(',') }}{{ ['a', 'b']|"
     "reject('equalto', 'a')|join }}{{ [1, 2, 3]|select('odd')|list|tojson }}{{ [0, 1]|select|list }}{"
     "{ {'b': 1, 'A': 2, 'c': 3}|dictsort|tojson }}{{ 'x<'|safe }}{% for k, v in {'b': 1, 'a': 2}|dict"
     "sort %}{{ k }}{{ v }}{% endfor %}",
     "3-1system,user,assistantb[1, 3][1][[\"A\", 2], [\"b\", 1], [\"c\", 3]]x<a2b1"},
    {"{{ '\303\204\303\237\303\211'|lower }}{{ 'a' 'b' \"c\" }}{{ range(5, 0, -2)|list }}{{ range(0, 5"
     ", 2)|list }}{{ range(3, 1)|list }}{{ range(3, 1, -1)|list }}{{ messages|map(attribute='content')"
     "|map('trim')|list|length }}{{ 'x'|default(default_value='y') }}{{ ''|default('y', boolean=true) "
     "}}",
     "\303\244\303\237\303\251abc[5, 3, 1][0, 2, 4][][3, 2]3xy"},
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
    {"a\n{% call f() %}{% endcall %}", TT_ERR_UNSUPPORTED, "line 2 of the chat template: the tag 'call' is "
     "not supported here; expected if, for, set, macro"},
    {"{% macro f(x) %}{% endmacro %}\n{{ f(1, 2) }}", TT_ERR_FORMAT, "line 2 of the chat template: the macro "
     "f has no parameter for an argument"},
    {"{% macro f(x) %}{% endmacro %}{{ f(y=2) }}", TT_ERR_FORMAT, "f has no parameter for an argument y"},
    {"{% macro f(x) %}{% endmacro %}{{ f(1, x=2) }}", TT_ERR_FORMAT, "f has no parameter for an argument x"},
    {"{% macro f(1) %}{% endmacro %}", TT_ERR_FORMAT, "a parameter of the macro f is no name"},
    {"{% macro f(x) %}", TT_ERR_FORMAT, "has no end; expected endmacro"},
    {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", TT_ERR_UNSUPPORTED, "levels of nesting"},
    {"{% macro f() %}{% endmacro %}{{ f }}", TT_ERR_UNSUPPORTED, "printing a macro is not supported"},
    {"{% macro f() %}{% generation %}{% endgeneration %}{% endmacro %}{{ f() }}", TT_ERR_UNSUPPORTED,
     "a generation tag within a set or generation tag"},
    {"{{ 'a\316\243'|lower }}", TT_ERR_UNSUPPORTED, "the filter lower of a text is not supported"},
    {"{{ 1.5 // 2 }}", TT_ERR_FORMAT, "a number with a fraction // a number cannot be computed"},
    {"{{ [1]|map('round')|list }}", TT_ERR_UNSUPPORTED, "the filter round of a number"},
    {"{{ range(1, 2, 0) }}", TT_ERR_UNSUPPORTED, "the function range of undefined is not supported"},
    {"{% include 'x' %}", TT_ERR_UNSUPPORTED, "the tag 'include'"},
    {"{{ 1|round }}", TT_ERR_UNSUPPORTED, "the filter round of a number is not supported"},
    {"{{ 'x'|tojson(sort_keys=true) }}", TT_ERR_UNSUPPORTED, "the filter tojson with an argument sort_keys "
     "is not supported"},
    {"{{ 'x'|trim(1, 2) }}", TT_ERR_UNSUPPORTED, "the filter trim with 2 arguments is not supported"},
    {"{{ f('x', 1, 2, 3, 4) }}", TT_ERR_UNSUPPORTED, "the function f with five arguments is not supported"},
    {"{{ 1 is divisibleby(2) }}", TT_ERR_UNSUPPORTED, "the test divisibleby of a number is not supported"},
    {"\n\n{{ 'x'.format(1) }}", TT_ERR_UNSUPPORTED, "line 3 of the chat template: the method format of a "
     "text is not"},
    {"{{ strftime_now('%Y') }}", TT_ERR_UNSUPPORTED, "the function strftime_now is not supported"},
    {"{{ 1.5e3 }}", TT_ERR_UNSUPPORTED, "the number 1.5e"},
    {"{{ 12345678901 }}", TT_ERR_UNSUPPORTED, "at most 9 digits"},
    {"{{ '\\u0041' }}", TT_ERR_UNSUPPORTED, "the escape sequence \\u"},
    {"{{ '\303\244'|upper }}", TT_ERR_UNSUPPORTED, "the filter upper of a text with letters beyond ASCII"},
    {"{% macro f() %}{% endmacro %}{{ f.name }}", TT_ERR_UNSUPPORTED,
     "an attribute of a macro is not supported"},
    {"{{ 9223372036854775807 }}", TT_ERR_UNSUPPORTED, "the number 9223372036854775807 is not supported"},
    {"{{ (1, 2) }}", TT_ERR_UNSUPPORTED, "printing a tuple, a range or items"},
    {"{{ messages[0].items()|list }}", TT_ERR_UNSUPPORTED, "printing a tuple, a range or items"},
    {"{{ 1 < 2 < 3 }}", TT_ERR_UNSUPPORTED, "two comparisons of one value"},
    {"{{ 7 / 0 }}", TT_ERR_FORMAT, "a number / 0 cannot be computed"},
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
     "a generation tag within a set"},
    {"\377", TT_ERR_FORMAT, "in UTF-8"},
    {"{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", TT_ERR_UNSUPPORTED,
     "more than"},
    {"{% set n = namespace(x='0123456789') %}{% for a in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
     TT_ERR_UNSUPPORTED, "bytes"},
    {"{% set n = namespace(x=[]) %}{% for a in range(300) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x == n.x }}"
     "{{ n.x|tojson }}", TT_ERR_UNSUPPORTED, "a list is nested more than"},
};

TEST(templates_that_are_refused)
{
    test_allocator a;
    char deep[4096];
    for (int i = 0; i < TEST_COUNT(refused) + 3; i++) {
        const char *source = i < TEST_COUNT(refused) ? refused[i].source : deep;
        tt_context *ctx = test_open(&a);
        if (source == deep) { /* 300 nested parentheses, 300 nested ifs, or a chain of 300 operators */
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
        {"{% for m in messages %}{{ m.role }}:{{ m.content }}{% for t in tools or [] %}<{{ t.name }}>"
         "{% endfor %}{% endfor %}", "{\"messages\": [" MESSAGE("assistant", "x") "], "
         "\"tools\": \"[{\\\"name\\\": \\\"f\\\"}]\"}", "assistant:x<f>"},
        {"{% for m in messages %}{{ m.role }}:{{ m.content|default('none') }}{% for c in m.tool_calls or "
         "[] %}{{ c.function|tojson }}{% endfor %};{% endfor %}", "{\"messages\": [{\"role\": \"assistant\", "
         "\"content\": null, \"tool_calls\": [{\"function\": {\"x\": 1.5}}]}]}",
         "assistant:none{\"x\": 1.5};"},
        {plain, "{\"prompt\": \"ab\", \"completion\": \" cd\"}", " cd<|im_end|>"},
        {plain, "{\"prompt\": \"ab\", \"completion\": \"cd<|im_end|>\"}\r\n", "cd<|im_end|>"},
        {plain, "{\"prompt\": \"\", \"completion\": \"\"}\n{\"prompt\": \"x\", \"completion\": \"\"}",
         "<|im_end|><|im_end|>"},
        /* The template writes "<>" before the last answer alone. Training learns the "<>", too. */
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

/* Lines of pairs that are refused. */
#define PAIR_ROWS \
    {"{\"prompt\": \"\", \"chosen\": \"\"}", "line 1: \"rejected\" is missing; expected a string"}, \
    {"{\"rejected\": \"\"}", "line 1: \"chosen\" is missing; expected a string"}, \
    {"{\"chosen\": 1, \"rejected\": 2}", "\"chosen\" is a number; expected a string or a list of"}, \
    {"{\"chosen\": \"a\", \"rejected\": \"b\"}", "line 1: \"prompt\" is missing; expected a string"}, \
    {"{\"prompt\": \"\", \"chosen\": [" MESSAGE("user", "x") "], \"rejected\": [" MESSAGE("user", "y") "]}", \
     "\"prompt\" is a string; expected a list of messages, as \"chosen\" is"}, \
    {"{\"chosen\": [" MESSAGE("user", "x") "], \"rejected\": [" MESSAGE("user", "y") "]}", \
     "\"prompt\" is missing, and \"chosen\" and \"rejected\" begin with different messages"}, \
    {"{\"chosen\": [" MESSAGE("user", "x") "], \"rejected\": [" MESSAGE("user", "x") "]}", \
     "has no answer after the messages that both begin with"}, \
    {"{\"chosen\": [" MESSAGE("user", "x") "], \"rejected\": [1]}", \
     "message 1 of \"rejected\" is a number"}, \
    {CHAT("1", "2", "3", "4") "{\"prompt\": \"\", \"chosen\": \"a\", \"rejected\": \"b\"}", \
     "line 2: the line has a \"chosen\" or \"rejected\", but earlier lines have none"}, \
    {"{\"prompt\": \"\", \"chosen\": \"a\", \"rejected\": \"b\"}\n" CHAT("1", "2", "3", "4"), \
     "line 2: the line has no \"chosen\" or \"rejected\", but earlier lines have both"},

TEST(lines_that_are_refused)
{
    static const struct { const char *lines, *error; } rows[] = {
        {"[1]", "line 1: the line is an array; expected an object with \"messages\", with \"prompt\""},
        PAIR_ROWS
        {CHAT("1", "2", "3", "4") "\n{}", "line 3: the object has none of \"messages\""},
        {"{\"messages\": [], \"prompt\": \"\"}", "line 1: the object has several of"},
        {"{\"messages\": []}", "line 1: \"messages\" is empty; expected a list of one or more messages"},
        {"{\"conversations\": {}}", "line 1: \"conversations\" is an object; expected a list"},
        {"{\"messages\": [" MESSAGE("user", "x") ", 1]}", "line 1: message 2 of \"messages\" is a number"},
        {"{\"messages\": [{\"content\": \"\"}]}", "line 1: \"role\" of message 1 of \"messages\" is missing"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": null}]}",
         "line 1: \"content\" of message 1 of \"messages\" is null; expected a string"},
        {"{\"messages\": [" MESSAGE("user", "x") "]}", "line 1: the conversation has no answer to learn"},
        {"{\"messages\": [" MESSAGE("user", "x") "], \"tools\": {}}", "line 1: \"tools\" is an object; "
         "expected a list of tools"},
        {"{\"messages\": [" MESSAGE("user", "x") "], \"tools\": [{}, 1]}", "line 1: tool 2 of \"tools\" is a "
         "number; expected an object"},
        {"{\"messages\": [" MESSAGE("user", "x") "], \"tools\": \"[\"}", "line 1: \"tools\" is no JSON: "},
        {"{\"messages\": [" MESSAGE("user", "x") "], \"tools\": \"1\"}",
         "\"tools\" is a number; expected a list"},
        {"{\"messages\": [{\"role\": \"assistant\", \"content\": 1, \"tool_calls\": []}]}",
         "line 1: \"content\" of message 1 of \"messages\" is a number; expected a string"},
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
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "cannot split off 3 of 11 tokens: each part needs at least 2 tokens, "
                "and the last conversation, which is not cut, is longer");
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

/* Writes to `to` what a batch of pairs shows: the characters of each pair's answers, each after the character
   before it, with a sign. */
static void gives_pairs(const tt_source *source, const char *expected)
{
    char found[200] = "";
    tt_batch b;
    bool more = false;
    memset(&b, 0, sizeof b);
    if (!CHECK(source->next(source->self, &b, &more) == TT_OK && more && b.n_arrays == 6)) return;
    const int32_t *rows = (const int32_t *)b.arrays[0].data, *targets = (const int32_t *)b.arrays[1].data;
    const float *signs = (const float *)b.arrays[2].data, *ones = (const float *)b.arrays[5].data;
    const int32_t *start = (const int32_t *)b.arrays[3].data;
    const int64_t pairs = b.arrays[3].rows - 1;
    CHECK(b.seqs == 2 * pairs && b.arrays[4].rows == pairs && b.arrays[0].rows == start[pairs]);
    CHECK(b.arrays[1].rows == start[pairs] && b.arrays[2].rows == start[pairs]);
    for (int64_t p = 0; p < pairs; p++) {
        CHECK(ones[p] == 1 && b.index[2 * p] == b.index[2 * p + 1]);
        sprintf(found + strlen(found), "%d:", (int)b.index[2 * p]);
        for (int k = start[p]; k < start[p + 1]; k++) {
            const bool rejected = rows[k] >= b.seq_start[2 * p + 1];
            CHECK(signs[k] == (rejected ? 1 : -1) && rows[k] < b.seq_start[2 * p + 2]);
            sprintf(found + strlen(found), "%c%c%c", rejected ? '-' : '+', b.ids[rows[k]],
                    targets[k] == 256 ? '$' : targets[k]);
        }
    }
    if (!CHECK(strcmp(found, expected) == 0)) printf("  %s\n  %s\n", found, expected);
}

/* The answers of pairs, cut and left out as trl does, and split between pairs. */
TEST(pairs_of_answers)
{
    static const char lines[] = "{\"prompt\": \"ab\", \"chosen\": \"cd\", \"rejected\": \"e\"}\n"
        "{\"prompt\": \"fghi\", \"chosen\": \"\", \"rejected\": \"j\"}\n"
        "{\"prompt\": \"k\", \"chosen\": \"l\", \"rejected\": \"mnop\"}\n";
    test_allocator a;
    test_log log;
    char file[600];
    tt_context *ctx = test_open_logged(&a, &log);
    snprintf(file, sizeof file, "%s/pairs.jsonl", test_folder());
    tt_token_stream *s = tt_token_stream_read(ctx, test_write(file, lines, strlen(lines)), NULL);
    REQUIRE(s && tt_token_stream_pairs(s) && tt_token_stream_count(s) == 29);
    tt_token_loader_options o = tt_token_loader_options_default();
    o.batch = 2;
    o.shuffle = false;
    o.length = 8;
    tt_token_loader *l = tt_token_loader_new(ctx, s, &o);
    const tt_source *source = tt_token_loader_source(l);
    REQUIRE(l && source->steps == 2 && source->max_seqs == 4 && source->pairs == 3);
    gives_pairs(source, "0:+bc+cd+d$-be-e$1:+i$-ij-j$");
    gives_pairs(source, "2:+kl+l$-km-mn-no-op-p$");
    tt_token_loader_free(l);
    o.length = 4;
    l = tt_token_loader_new(ctx, s, &o);
    source = tt_token_loader_source(l);
    REQUIRE(l && source->steps == 1 && source->pairs == 2 && source->max_masked >= 9);
    gives_pairs(source, "0:+bc+cd-be-e$1:+kl+l$-km-mn-no");
    CHECK(strstr(log.text, "1 pairs are left out, because they have no token to learn among their first 4"));
    tt_token_loader_free(l);
    o.length = 1;
    CHECK(tt_token_loader_new(ctx, s, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "has no pair with a token to learn among its first 1: set a larger");
    o.length = 8;
    o.across = true;
    CHECK(tt_token_loader_new(ctx, s, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "a window is one pair of answers, so that across has no meaning");
    o.across = false;
    tt_token_stream *held = tt_token_stream_split(s, 15);
    CHECK(held && tt_token_stream_count(held) == 9 && tt_token_stream_count(s) == 20);
    l = tt_token_loader_new(ctx, held, &o);
    REQUIRE(l);
    gives_pairs(tt_token_loader_source(l), "0:+kl+l$-km-mn-no-op-p$");
    tt_token_loader_free(l);
    tt_token_stream_free(held);
    tt_token_stream_free(s);
    tt_stream_options so = tt_stream_options_default();
    so.all_tokens = true;
    CHECK(tt_token_stream_read(ctx, file, &so) == NULL);
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "line 1: all_tokens learns all tokens of conversations, but of pairs");
    TEST_CLOSE(ctx, &a);
}

#define QUESTION MESSAGE("system", "Hm") ", " MESSAGE("user", "x")

/* Messages with a prompt of their own, or with a common beginning, give the same tokens: all after the prompt
   with the start of an answer. */
TEST(pairs_of_messages)
{
    static const char *const lines[] = {
        "{\"prompt\": [" QUESTION "], \"chosen\": [" MESSAGE("assistant", "yes") "], \"rejected\": ["
        MESSAGE("assistant", "no") ", " MESSAGE("user", "no?") "]}",
        "{\"chosen\": [" QUESTION ", " MESSAGE("assistant", "yes") "], \"rejected\": [" QUESTION ", "
        MESSAGE("assistant", "no") ", " MESSAGE("user", "no?") "]}"};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_load(ctx, folder_of("qwen2", "{\"eos_token\": \"<|im_end|>\"}", plain,
                                                       strlen(plain)));
    REQUIRE(k);
    uint64_t hash[2] = {0, 1};
    for (int i = 0; i < 2; i++) {
        tt_token_stream *s = stream_of(k, lines[i], false);
        REQUIRE(s);
        const tt__token_store *store = s->store;
        hash[i] = tt__hash_on(TT__HASH_BEGIN, store->ids, (size_t)store->count * (size_t)store->width);
        hash[i] = tt__hash_on(hash[i], store->marks, (size_t)store->count);
        const tt_message prompt[] = {{"system", "Hm"}, {"user", "x"}, {"assistant", "yes"}};
        char text[400];
        int32_t ids[400];
        int64_t n[2];
        for (int whole = 0; whole < 2; whole++) {
            CHECK(tt_tokenizer_chat(k, prompt, 2 + whole, !whole, text, sizeof text) > 0);
            const tt_encoding e = {text, strlen(text), NULL, 0, false, 0, 400, ids, NULL, NULL};
            n[whole] = tt_tokenizer_encode(k, &e);
        }
        for (int64_t t = 0; t < n[1]; t++)
            CHECK(((store->marks[t] & TT__MARK_LEARNT) != 0) == (t >= n[0]) &&
                  ((store->marks[t] & TT__MARK_END) != 0) == (t == n[1] - 1));
        const int last = store->marks[store->count - 1];
        CHECK(n[0] < n[1] && last == (TT__MARK_LEARNT | TT__MARK_END | TT__MARK_PAIR));
        tt_token_stream_free(s);
    }
    CHECK(hash[0] == hash[1]);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

TEST(allocations_that_fail)
{
    static const char *const sources[] = {
        plain, "{% for m in messages %}{% generation %}{{ m.content|trim ~ loop.index }}{% endgeneration "
            "%}{% endfor %}"};
    static const char *const texts[] = {
        CHAT("1", "2", "3", "4") "{\"prompt\": \"ab\", \"completion\": \"cd\"}\n",
        "{\"prompt\": \"ab\", \"chosen\": \"cd\", \"rejected\": \"e\"}\n"
        "{\"chosen\": [" MESSAGE("user", "x") ", " MESSAGE("assistant", "y") "], \"rejected\": ["
        MESSAGE("user", "x") ", " MESSAGE("assistant", "z") "]}\n"};
    test_allocator a;
    char text[200];
    for (int i = 0; i < 4; i++) {
        tt_context *ctx = test_open(&a);
        tt_tokenizer *k = tt_tokenizer_load(ctx,
                                            folder_of("qwen2", "{\"eos_token\": \"<|im_end|>\"}",
                                                      sources[i % 2], strlen(sources[i % 2])));
        REQUIRE(k);
        tt_token_loader_options o = tt_token_loader_options_default();
        o.whole = true;
        for (long fail_at = 0, calls = 1; fail_at <= calls; fail_at++) {
            const long before = a.calls;
            a.fail_at = fail_at ? before + fail_at : 0;
            const int64_t n = tt_tokenizer_chat(k, messages, 3, true, text, sizeof text);
            tt_token_stream *s = n >= 0 ? stream_of(k, texts[i / 2], false) : NULL;
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
    TEST_CASE(pairs_of_answers),
    TEST_CASE(pairs_of_messages),
    TEST_CASE(allocations_that_fail),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
