#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../files/utf8.h"
#include "code_points.h"

/* ----------------------------------------------------------------- chat templates: a part of Jinja

   Chat templates are programs in Jinja (https://jinja.palletsprojects.com/templates). This interpreter has
   what the templates of decoders use, with the settings of transformers: trim_blocks, lstrip_blocks, the tag
   `generation`, break and continue. The interpreter refuses anything else, by name and line. A construct in a
   branch that does not run is only parsed. Templates are not trusted: depth, steps and memory are bounded. */

enum {
    TT__JINJA_DEPTH = 200,      /* max depth of nested statements, expressions and lists */
    TT__JINJA_STEPS = 20000000  /* max steps of a rendering */
};
#define TT__JINJA_MEMORY ((size_t)1 << 28) /* max bytes of the values of a rendering */

typedef enum tt__jinja_kind {
    TT__JINJA_NOTHING,
    /* Statements. The comments list the parts of a node in parentheses, in order. */
    TT__JINJA_RAW, TT__JINJA_PRINT, /* text; (value) */
    TT__JINJA_IF, TT__JINJA_FOR,    /* (condition, body, else); (list, body, else, condition, targets) */
    TT__JINJA_SET, TT__JINJA_SET_BLOCK, TT__JINJA_GENERATION, /* (value, attribute); (0, body); (0, body) */
    TT__JINJA_BREAK, TT__JINJA_CONTINUE,
    TT__JINJA_MACRO,                /* (parameters, body); a parameter is a NAME, with a default a KEYWORD */
    /* Expressions. Lists of arguments are chains. */
    TT__JINJA_TEXT, TT__JINJA_INTEGER, TT__JINJA_REAL, TT__JINJA_BOOL, TT__JINJA_NONE, TT__JINJA_NAME,
    TT__JINJA_LIST, TT__JINJA_DICT, TT__JINJA_PAIR,     /* (items); (pairs); (key, value) */
    TT__JINJA_ATTRIBUTE, TT__JINJA_INDEX,               /* (value); (value, index) */
    TT__JINJA_SLICE, TT__JINJA_CALL,                    /* (value, from, to, step); (callee, arguments) */
    TT__JINJA_KEYWORD,                                  /* (value) */
    TT__JINJA_FILTER, TT__JINJA_TEST,                   /* (value, arguments) */
    TT__JINJA_BINARY, TT__JINJA_NOT, TT__JINJA_NEGATIVE, /* (left, right); (value); (value) */
    TT__JINJA_CHOICE                                     /* (condition, then, else) */
} tt__jinja_kind;

/* A node of a template. Indices of nodes are above 0; 0: none. */
typedef struct tt__jinja_node {
    uint8_t kind, op;  /* op: of BINARY, an index into tt__jinja_ops; of LIST, 1 for a tuple */
    int line, part[5];
    int next;          /* the next node of a chain: statements, items or arguments */
    const char *text;  /* a text, or the name of a variable, an attribute, a filter, a test or an argument */
    int64_t n;         /* number of bytes of `text`; of an integer or a boolean: its value */
} tt__jinja_node;

typedef struct tt__jinja {
    tt_context *ctx;
    const char *path;         /* path of the template's file, for errors */
    char *text;               /* the source, with line ends "\n" */
    size_t bytes, at;
    size_t counted;           /* `line` is the line of the byte at `counted` */
    int line, depth, brackets;
    bool failed;
    bool line_starts;         /* the current text begins at the start of a line */
    char tag;                 /* the current tag: '%', '{' or '#'; 0: the template has ended */
    char token;               /* kind of the current token: 'N' name, 'T' text, 'I' integer, 'R' number with a
                                 fraction, 'O' operator, 'E' end of the tag */
    const char *token_text;
    int64_t token_n;          /* number of bytes of token_text; of an integer: its value */
    tt__jinja_node *nodes;
    int count, capacity, first;
    bool generates;           /* the template has the tag `generation` */
    const tt__unicode *unicode; /* the tokenizer's tables; NULL: letters beyond ASCII are neither changed nor
                                   printed */
    tt__chunk *chunks;        /* memory of the texts of string tokens */
} tt__jinja;

static void tt__jinja_free(tt__jinja *j)
{
    tt__chunks_free(j->ctx, &j->chunks);
    tt__free(j->ctx, j->nodes);
    tt__free(j->ctx, j->text);
}

TT_PRINTF(4, 5)
static void tt__jinja_fail(tt__jinja *j, tt_status status, int line, const char *format, ...)
{
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (!j->failed) tt__fail(j->ctx, status, "'%s', line %d of the chat template: %s", j->path, line, what);
    j->failed = true;
    j->token = 'E';
    j->tag = 0;
}

/* Returns whether Python regards c as white space. */
static bool tt__jinja_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

/* Returns whether c is in the text `set`; without a set, whether c is white space. */
static bool tt__jinja_in_set(uint32_t c, const char *set, size_t n)
{
    bool found = !set && tt__jinja_space(c);
    for (size_t at = 0; set && at < n && !found;) found = tt__utf8_next(set, n, &at) == c;
    return found;
}

/* Returns the number of bytes at the start of a text whose characters are in a set (see
   tt__jinja_in_set). */
static size_t tt__jinja_left(const char *text, size_t bytes, const char *set, size_t n)
{
    size_t at = 0, next = 0;
    while (at < bytes && tt__jinja_in_set(tt__utf8_next(text, bytes, &next), set, n)) at = next;
    return at;
}

/* Returns the number of bytes of a text without the characters at its end that are in a set. */
static size_t tt__jinja_right(const char *text, size_t bytes, const char *set, size_t n)
{
    while (bytes) {
        const size_t last = tt__utf8_last(text, bytes);
        size_t at = last;
        if (!tt__jinja_in_set(tt__utf8_next(text, bytes, &at), set, n)) break;
        bytes = last;
    }
    return bytes;
}

/* ---- from a template to nodes */

static int tt__jinja_line(tt__jinja *j)
{
    for (; j->counted < j->at; j->counted++) j->line += j->text[j->counted] == '\n';
    return j->line;
}

/* Adds a node with the current token's line. Returns the node's index; 0 after an error: callers may still
   write to node 0. */
static int tt__jinja_add(tt__jinja *j, tt__jinja_kind kind, const char *text, int64_t n)
{
    if (j->failed) return 0;
    if (!TT__GROW(j->ctx, j->nodes, j->count, j->capacity)) {
        j->failed = true;
        j->token = 'E';
        j->tag = 0;
        return 0;
    }
    tt__jinja_node *node = &j->nodes[j->count];
    memset(node, 0, sizeof *node);
    node->kind = (uint8_t)kind;
    node->line = tt__jinja_line(j);
    node->text = text;
    node->n = n;
    return j->count++;
}

/* Moves past the end of a tag, which is `length` bytes long, and past the white space that the tag removes
   from the text after it. sign: '-', '+' or neither, before the tag's end. */
static void tt__jinja_after_tag(tt__jinja *j, char sign, size_t length)
{
    j->at += length;
    if (sign == '-') j->at += tt__jinja_left(j->text + j->at, j->bytes - j->at, NULL, 0);
    else if (sign != '+' && j->tag != '{' && j->at < j->bytes && j->text[j->at] == '\n') j->at++;
    j->line_starts = j->text[j->at - 1] == '\n';
}

/* Moves past the text before the next tag, past comments, and past the tag's start. Sets j->tag. Returns a
   node for the text, or 0 if there is no text. A comment ends the text. */
static int tt__jinja_raw(tt__jinja *j)
{
    const size_t from = j->at;
    size_t to = from;
    while (to + 1 < j->bytes && !(j->text[to] == '{' && memchr("{%#", j->text[to + 1], 3))) to++;
    const bool found = to + 1 < j->bytes;
    if (!found) to = j->bytes;
    const char sign = found && to + 2 < j->bytes ? j->text[to + 2] : 0;
    size_t end = to;
    j->tag = found ? j->text[to + 1] : 0;
    if (found && sign == '-') {
        end = from + tt__jinja_right(j->text + from, to - from, NULL, 0);
    } else if (found && sign != '+' && j->tag != '{') {
        size_t line = to;
        while (line > from && j->text[line - 1] != '\n') line--;
        const bool blank = line + tt__jinja_left(j->text + line, to - line, NULL, 0) == to;
        if ((line > from || j->line_starts) && blank) end = line;
    }
    const int node = end > from ? tt__jinja_add(j, TT__JINJA_RAW, j->text + from, (int64_t)(end - from)) : 0;
    j->at = found ? to + 2 + (sign == '-' || sign == '+') : to;
    j->brackets = 0;
    if (j->tag != '#') return node;
    for (to = j->at; to + 1 < j->bytes && !(j->text[to] == '#' && j->text[to + 1] == '}');) to++;
    if (to + 1 >= j->bytes) {
        tt__jinja_fail(j, TT_ERR_FORMAT, tt__jinja_line(j), "the comment has no end: write #}");
        return 0;
    }
    const char before = to > j->at ? j->text[to - 1] : 0;
    j->at = to;
    tt__jinja_after_tag(j, before, 2);
    return node;
}

/* Reads a string token, from its quote on, and decodes its escapes. */
static void tt__jinja_string(tt__jinja *j)
{
    static const char names[] = "\\'\"abfnrtv", values[] = "\\'\"\a\b\f\n\r\t\v";
    const char quote = j->text[j->at];
    size_t end = j->at + 1, n = 0;
    while (end < j->bytes && j->text[end] != quote) end += j->text[end] == '\\' ? 2 : 1;
    char *to = end < j->bytes ? (char *)tt__chunks_take(j->ctx, &j->chunks, end - j->at) : NULL;
    if (end >= j->bytes)
        tt__jinja_fail(j, TT_ERR_FORMAT, tt__jinja_line(j), "a string has no closing quote");
    else if (!to)
        tt__jinja_fail(j, TT_ERR_MEMORY, tt__jinja_line(j), "out of memory for a string: free memory");
    for (size_t at = j->at + 1; to && at < end;) {
        const char c = j->text[at++];
        const char *name = c == '\\' ? (const char *)memchr(names, j->text[at], sizeof names - 1) : NULL;
        if (c == '\\' && !name && memchr("xuUN01234567", j->text[at], 12)) {
            tt__jinja_fail(j, TT_ERR_UNSUPPORTED, tt__jinja_line(j),
                           "the escape sequence \\%c of a string is not supported: write the character "
                           "itself", j->text[at]);
            return;
        }
        if (name) to[n++] = values[name - names], at++;
        else if (c == '\\' && j->text[at] == '\n') at++; /* the line goes on */
        else to[n++] = c;
    }
    j->token = to ? 'T' : 'E';
    j->token_text = to;
    j->token_n = (int64_t)n;
    j->at = end + 1;
}

static bool tt__jinja_letter(char c) { return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
static bool tt__jinja_digit(char c) { return c >= '0' && c <= '9'; }

/* Moves to the next token of a tag. */
static void tt__jinja_next(tt__jinja *j)
{
    static const char *const operators[] = {"==", "!=", "<=", ">=", "//", "**", "+", "-", "*", "/", "%", "~",
                                            "<", ">", "=", "(", ")", "[", "]", "{", "}", ".", ",", ":", "|"};
    if (j->failed) return;
    j->at += tt__jinja_left(j->text + j->at, j->bytes - j->at, NULL, 0);
    const char *text = j->text + j->at, close = j->tag == '{' ? '}' : '%';
    const size_t left = j->bytes - j->at;
    const bool sign = left > 2 && (*text == '-' || (*text == '+' && close == '%'));
    if (!j->brackets && left > (size_t)sign + 1 && text[sign] == close && text[sign + 1] == '}') {
        j->token = 'E';
        tt__jinja_after_tag(j, sign ? *text : 0, (size_t)sign + 2);
        return;
    }
    size_t n = 0;
    j->token_text = text;
    if (left && (*text == '"' || *text == '\'')) {
        tt__jinja_string(j);
        return;
    }
    if (left && tt__jinja_letter(*text)) {
        while (tt__jinja_letter(text[n]) || tt__jinja_digit(text[n])) n++;
        j->token = 'N';
    } else if (left && tt__jinja_digit(*text)) {
        int64_t x = 0;
        for (; tt__jinja_digit(text[n]) && n < 10; n++) x = 10 * x + (text[n] - '0');
        if (n < 10 && text[n] == '.' && tt__jinja_digit(text[n + 1])) {
            while (tt__jinja_digit(text[++n])) continue;
            j->token = 'R';
            j->token_n = (int64_t)n;
            j->at += n;
            if (n > TT__JSON_NUMBER || strchr("_eE", text[n]))
                tt__jinja_fail(j, TT_ERR_UNSUPPORTED, tt__jinja_line(j), "the number %.*s is not supported; "
                               "expected digits, a point and digits", (int)tt__min((int64_t)n + 1, 60), text);
            return;
        }
        if (n == 10 || text[n] == '_') {
            while (tt__jinja_digit(text[n]) || text[n] == '_') n++;
            tt__jinja_fail(j, TT_ERR_UNSUPPORTED, tt__jinja_line(j), "the number %.*s is not supported; "
                           "expected an integer of at most 9 digits", (int)tt__min((int64_t)n, 60), text);
        }
        j->token = j->failed ? 'E' : 'I';
        j->at += n;
        j->token_n = x;
        return;
    } else {
        int k = 0;
        while (k < TT__COUNT(operators) && strncmp(text, operators[k], strlen(operators[k])) != 0) k++;
        if (k == TT__COUNT(operators)) {
            tt__jinja_fail(j, TT_ERR_FORMAT, tt__jinja_line(j), left ? "the byte 0x%02x begins no word and "
                           "no operator: remove it" : "the last tag of the template has no end: write %%} or "
                           "}}", (uint8_t)*text);
            return;
        }
        n = strlen(operators[k]);
        j->token = 'O';
        j->brackets += strchr("([{", *text) ? 1 : strchr(")]}", *text) && j->brackets ? -1 : 0;
    }
    j->token_n = (int64_t)n;
    j->at += n;
}

static bool tt__jinja_same(const char *text, int64_t n, const char *word)
{
    return n == (int64_t)strlen(word) && memcmp(text, word, (size_t)n) == 0;
}

/* Returns whether the current token is this word or operator. */
static bool tt__jinja_is(const tt__jinja *j, const char *word)
{
    return (j->token == 'N' || j->token == 'O') && tt__jinja_same(j->token_text, j->token_n, word);
}

static bool tt__jinja_accept(tt__jinja *j, const char *word)
{
    const bool is = tt__jinja_is(j, word);
    if (is) tt__jinja_next(j);
    return is;
}

static void tt__jinja_unexpected(tt__jinja *j, const char *expected)
{
    const bool text = j->token != 'E' && j->token != 'I' && j->token != 'R';
    tt__jinja_fail(j, TT_ERR_FORMAT, tt__jinja_line(j), "found %s%.*s%s; expected %s", text ? "'" : "",
                   text ? (int)tt__min(j->token_n, 60) : 0, text ? j->token_text : "",
                   text ? "'" : j->token != 'E' ? "a number" : "the end of the tag", expected);
}

static void tt__jinja_need(tt__jinja *j, const char *word)
{
    if (!tt__jinja_accept(j, word)) tt__jinja_unexpected(j, word);
}

/* Makes a node whose text is the current token, and moves to the next token. Fails if the current token is
   not a name. expected: what the error message says was expected. */
static int tt__jinja_named(tt__jinja *j, tt__jinja_kind kind, const char *expected)
{
    if (j->token != 'N') {
        tt__jinja_unexpected(j, expected);
        return 0;
    }
    const int node = tt__jinja_add(j, kind, j->token_text, j->token_n);
    tt__jinja_next(j);
    return node;
}

static void tt__jinja_end_tag(tt__jinja *j)
{
    if (j->token != 'E') tt__jinja_unexpected(j, "the end of the tag");
}

/* Counts a level of nesting. Returns false if there are too many. */
static bool tt__jinja_deeper(tt__jinja *j)
{
    if (++j->depth > TT__JINJA_DEPTH)
        tt__jinja_fail(j, TT_ERR_UNSUPPORTED, tt__jinja_line(j), "more than %d levels of nesting are not "
                       "supported", TT__JINJA_DEPTH);
    return !j->failed;
}

static int tt__jinja_expression(tt__jinja *j);

/* Parses what follows an opening bracket up to `close`: items with commas between them. kind: PAIR for a
   dictionary, KEYWORD for arguments, which may have names, else LIST. Returns the first node of the chain. */
static int tt__jinja_items(tt__jinja *j, tt__jinja_kind kind, const char *close)
{
    int first = 0, last = 0;
    while (!j->failed && !tt__jinja_accept(j, close)) {
        const char *after = j->text + j->at + tt__jinja_left(j->text + j->at, j->bytes - j->at, NULL, 0);
        const bool named = kind == TT__JINJA_KEYWORD && j->token == 'N' && after[0] == '=' && after[1] != '=';
        int item = named ? tt__jinja_named(j, kind, "a name") : 0;
        if (named) tt__jinja_need(j, "=");
        const int value = tt__jinja_expression(j);
        if (kind == TT__JINJA_PAIR) {
            item = tt__jinja_add(j, kind, NULL, 0);
            j->nodes[item].part[0] = value;
            tt__jinja_need(j, ":");
            const int second = tt__jinja_expression(j);
            j->nodes[item].part[1] = second;
        } else if (named) j->nodes[item].part[0] = value;
        else item = value;
        if (last) j->nodes[last].next = item;
        else first = item;
        last = item;
        if (!tt__jinja_is(j, close)) tt__jinja_need(j, ",");
    }
    return j->failed ? 0 : first;
}

/* Adds the current token, a string, to the text of a node. */
static void tt__jinja_lengthen(tt__jinja *j, int node)
{
    const int64_t first = j->nodes[node].n, n = first + j->token_n;
    char *text = (char *)tt__chunks_take(j->ctx, &j->chunks, (size_t)n + 1);
    if (!text) tt__jinja_fail(j, TT_ERR_MEMORY, tt__jinja_line(j), "out of memory for a string");
    if (!text) return;
    if (first) memcpy(text, j->nodes[node].text, (size_t)first);
    if (j->token_n) memcpy(text + first, j->token_text, (size_t)j->token_n);
    j->nodes[node].text = text;
    j->nodes[node].n = n;
    tt__jinja_next(j);
}

static int tt__jinja_primary(tt__jinja *j)
{
    static const struct { const char *name; uint8_t kind, n; } words[] = {
        {"true", TT__JINJA_BOOL, 1}, {"True", TT__JINJA_BOOL, 1}, {"false", TT__JINJA_BOOL, 0},
        {"False", TT__JINJA_BOOL, 0}, {"none", TT__JINJA_NONE, 0}, {"None", TT__JINJA_NONE, 0}};
    int node = 0;
    for (int k = 0; k < TT__COUNT(words); k++)
        if (tt__jinja_accept(j, words[k].name))
            return tt__jinja_add(j, (tt__jinja_kind)words[k].kind, NULL, words[k].n);
    if (j->token == 'N') return tt__jinja_named(j, TT__JINJA_NAME, "");
    if (strchr("TIR", j->token)) {
        const bool text = j->token == 'T';
        node = tt__jinja_add(j, text ? TT__JINJA_TEXT : j->token == 'I' ? TT__JINJA_INTEGER : TT__JINJA_REAL,
                             j->token_text, j->token_n);
        tt__jinja_next(j);
        while (text && j->token == 'T') tt__jinja_lengthen(j, node); /* adjacent strings are one string */
    } else if (tt__jinja_accept(j, "(")) {
        const bool empty = tt__jinja_is(j, ")");
        node = empty ? 0 : tt__jinja_expression(j);
        if (!empty && tt__jinja_accept(j, ")")) return node;
        if (!empty) tt__jinja_need(j, ",");
        const int more = tt__jinja_items(j, TT__JINJA_LIST, ")"),
            list = tt__jinja_add(j, TT__JINJA_LIST, NULL, 0);
        j->nodes[node].next = more;
        j->nodes[list].part[0] = empty ? more : node;
        j->nodes[list].op = 1;
        node = list;
    } else if (tt__jinja_is(j, "[") || tt__jinja_is(j, "{")) {
        const bool list = *j->token_text == '[';
        tt__jinja_next(j);
        const int items = tt__jinja_items(j, list ? TT__JINJA_LIST : TT__JINJA_PAIR, list ? "]" : "}");
        node = tt__jinja_add(j, list ? TT__JINJA_LIST : TT__JINJA_DICT, NULL, 0);
        j->nodes[node].part[0] = items;
    } else tt__jinja_unexpected(j, "a value");
    return node;
}

/* Adds a node whose first part is the node `value`. */
static int tt__jinja_around(tt__jinja *j, tt__jinja_kind kind, int value)
{
    const int node = tt__jinja_add(j, kind, NULL, 0);
    j->nodes[node].part[0] = value;
    return node;
}

/* Parses "[...]" after a value: an index or a slice. */
static int tt__jinja_subscript(tt__jinja *j, int value)
{
    int part[4] = {value, 0, 0, 0}, n = 1;
    for (; n < 4; n++) {
        if (!tt__jinja_is(j, ":") && !tt__jinja_is(j, "]")) part[n] = tt__jinja_expression(j);
        if (!tt__jinja_accept(j, ":")) break;
    }
    if (n == 1 && !part[1]) tt__jinja_unexpected(j, "an index");
    tt__jinja_need(j, "]");
    const int node = tt__jinja_around(j, n == 1 ? TT__JINJA_INDEX : TT__JINJA_SLICE, value);
    memcpy(j->nodes[node].part, part, sizeof part);
    return node;
}

/* Parses what follows a value: attributes, indices, calls and, if `filters`, filters and tests. */
static int tt__jinja_postfix(tt__jinja *j, int node, bool filters)
{
    while (!j->failed) {
        const int value = node;
        if (tt__jinja_accept(j, ".")) {
            node = tt__jinja_named(j, TT__JINJA_ATTRIBUTE, "the name of an attribute");
            j->nodes[node].part[0] = value;
        } else if (tt__jinja_accept(j, "[")) {
            node = tt__jinja_subscript(j, value);
        } else if (tt__jinja_accept(j, "(")) {
            const int arguments = tt__jinja_items(j, TT__JINJA_KEYWORD, ")");
            node = tt__jinja_around(j, TT__JINJA_CALL, value);
            j->nodes[node].part[1] = arguments;
        } else if (filters && tt__jinja_accept(j, "|")) {
            node = tt__jinja_named(j, TT__JINJA_FILTER, "the name of a filter");
            j->nodes[node].part[0] = value;
            const int arguments = tt__jinja_accept(j, "(") ? tt__jinja_items(j, TT__JINJA_KEYWORD, ")") : 0;
            j->nodes[node].part[1] = arguments;
        } else if (filters && tt__jinja_accept(j, "is")) {
            const bool negated = tt__jinja_accept(j, "not");
            const int test = node = tt__jinja_named(j, TT__JINJA_TEST, "the name of a test");
            const bool value_follows = j->token == 'T' || j->token == 'I' || tt__jinja_is(j, "[");
            j->nodes[test].part[0] = value;
            const int arguments = tt__jinja_accept(j, "(") ? tt__jinja_items(j, TT__JINJA_KEYWORD, ")")
                                : value_follows ? tt__jinja_postfix(j, tt__jinja_primary(j), false) : 0;
            j->nodes[test].part[1] = arguments;
            if (negated) node = tt__jinja_around(j, TT__JINJA_NOT, test);
        } else break;
    }
    return node;
}

static int tt__jinja_unary(tt__jinja *j, bool filters)
{
    int node = 0;
    if (tt__jinja_deeper(j)) {
        const bool minus = tt__jinja_accept(j, "-");
        node = minus ? tt__jinja_unary(j, false) : tt__jinja_primary(j);
        if (minus) node = tt__jinja_around(j, TT__JINJA_NEGATIVE, node);
        node = tt__jinja_postfix(j, node, filters);
    }
    j->depth--;
    return node;
}

/* The binary operators by precedence: of two operators, the operator in the later row binds more tightly. */
static const char *const tt__jinja_ops[][8] = {{"or"}, {"and"}, {""},
                                               {"==", "!=", "<=", ">=", "<", ">", "in"},
                                               {"+", "-"}, {"~"}, {"*", "//", "%", "/"}};
enum { TT__JINJA_NOT_ROW = 2, TT__JINJA_COMPARISONS = 3 };

/* Parses an expression whose binary operators are in row `level` of tt__jinja_ops or in a later row, which
   binds more tightly. */
static int tt__jinja_binary(tt__jinja *j, int level)
{
    if (level == TT__COUNT(tt__jinja_ops)) return tt__jinja_unary(j, true);
    if (level == TT__JINJA_NOT_ROW && tt__jinja_is(j, "not")) {
        int node = 0;
        if (tt__jinja_deeper(j) && tt__jinja_accept(j, "not"))
            node = tt__jinja_around(j, TT__JINJA_NOT, tt__jinja_binary(j, level));
        j->depth--;
        return node;
    }
    int left = tt__jinja_binary(j, level + 1);
    for (int compared = 0; level != TT__JINJA_NOT_ROW && !j->failed; compared++) {
        const bool negated = level == TT__JINJA_COMPARISONS && tt__jinja_accept(j, "not");
        int op = 0;
        while (op < 8 && tt__jinja_ops[level][op] && !tt__jinja_is(j, tt__jinja_ops[level][op])) op++;
        const bool found = op < 8 && tt__jinja_ops[level][op];
        if (negated && !tt__jinja_is(j, "in")) tt__jinja_unexpected(j, "in");
        if (!found) break;
        if (compared && level == TT__JINJA_COMPARISONS)
            tt__jinja_fail(j, TT_ERR_UNSUPPORTED, tt__jinja_line(j), "two comparisons of one value are not "
                           "supported: write `and` between them");
        tt__jinja_next(j);
        const int right = tt__jinja_binary(j, level + 1);
        left = tt__jinja_around(j, TT__JINJA_BINARY, left);
        j->nodes[left].part[1] = right;
        j->nodes[left].op = (uint8_t)(8 * level + op);
        if (negated) left = tt__jinja_around(j, TT__JINJA_NOT, left);
    }
    return left;
}

static int tt__jinja_expression(tt__jinja *j)
{
    int node = 0;
    if (tt__jinja_deeper(j)) node = tt__jinja_binary(j, 0);
    while (tt__jinja_accept(j, "if")) {
        const int condition = tt__jinja_binary(j, 0),
            choice = tt__jinja_around(j, TT__JINJA_CHOICE, condition);
        const int other = tt__jinja_accept(j, "else") ? tt__jinja_expression(j) : 0;
        j->nodes[choice].part[1] = node;
        j->nodes[choice].part[2] = other;
        node = choice;
    }
    j->depth--;
    return node;
}

/* Parses statements up to a tag whose name is in `ends`, names separated by spaces, and takes that name as
   the current token. If `ends` is empty, parses up to the template's end. Returns the first node of the
   chain. */
static int tt__jinja_body(tt__jinja *j, const char *ends);

static int tt__jinja_if(tt__jinja *j)
{
    const int condition = tt__jinja_expression(j), node = tt__jinja_around(j, TT__JINJA_IF, condition);
    int other = 0;
    tt__jinja_end_tag(j);
    const int body = tt__jinja_body(j, "elif else endif");
    if (tt__jinja_accept(j, "elif")) {
        if (tt__jinja_deeper(j)) other = tt__jinja_if(j);
        j->depth--;
    } else {
        if (tt__jinja_accept(j, "else")) {
            tt__jinja_end_tag(j);
            other = tt__jinja_body(j, "endif");
        }
        tt__jinja_need(j, "endif");
    }
    j->nodes[node].part[1] = body;
    j->nodes[node].part[2] = other;
    return node;
}

static int tt__jinja_for(tt__jinja *j)
{
    const int node = tt__jinja_add(j, TT__JINJA_FOR, NULL, 0);
    const int first = tt__jinja_named(j, TT__JINJA_NAME, "the name of a variable");
    const int second = tt__jinja_accept(j, ",") ? tt__jinja_named(j, TT__JINJA_NAME, "a variable") : 0;
    int part[5] = {0, 0, 0, 0, first};
    j->nodes[first].next = second;
    tt__jinja_need(j, "in");
    part[0] = tt__jinja_binary(j, 0);
    part[3] = tt__jinja_accept(j, "if") ? tt__jinja_expression(j) : 0;
    tt__jinja_end_tag(j);
    part[1] = tt__jinja_body(j, "else endfor");
    if (tt__jinja_accept(j, "else")) {
        tt__jinja_end_tag(j);
        part[2] = tt__jinja_body(j, "endfor");
    }
    tt__jinja_need(j, "endfor");
    memcpy(j->nodes[node].part, part, sizeof part);
    return node;
}

static int tt__jinja_set(tt__jinja *j)
{
    const int node = tt__jinja_named(j, TT__JINJA_SET, "the name of a variable");
    const int attribute = tt__jinja_accept(j, ".") ? tt__jinja_named(j, TT__JINJA_NAME, "an attribute") : 0;
    if (attribute || j->token != 'E') {
        tt__jinja_need(j, "=");
        const int value = tt__jinja_expression(j);
        j->nodes[node].part[0] = value;
        j->nodes[node].part[1] = attribute;
    } else {
        const int body = tt__jinja_body(j, "endset");
        tt__jinja_need(j, "endset");
        j->nodes[node].kind = TT__JINJA_SET_BLOCK;
        j->nodes[node].part[1] = body;
    }
    return node;
}

/* Parses a macro, from its name on. */
static int tt__jinja_macro(tt__jinja *j)
{
    const int node = tt__jinja_named(j, TT__JINJA_MACRO, "the name of a macro");
    tt__jinja_need(j, "(");
    const int parameters = tt__jinja_items(j, TT__JINJA_KEYWORD, ")");
    for (int at = parameters; at; at = j->nodes[at].next)
        if (j->nodes[at].kind != TT__JINJA_NAME && j->nodes[at].kind != TT__JINJA_KEYWORD)
            tt__jinja_fail(j, TT_ERR_FORMAT, j->nodes[at].line, "a parameter of the macro %.*s is no name",
                           (int)tt__min(j->nodes[node].n, 60), j->nodes[node].text);
    tt__jinja_end_tag(j);
    const int body = tt__jinja_body(j, "endmacro");
    tt__jinja_need(j, "endmacro");
    j->nodes[node].part[0] = parameters;
    j->nodes[node].part[1] = body;
    return node;
}

/* Parses the tag whose name is the current token. */
static int tt__jinja_statement(tt__jinja *j)
{
    int node = 0;
    if (tt__jinja_accept(j, "if")) node = tt__jinja_if(j);
    else if (tt__jinja_accept(j, "for")) node = tt__jinja_for(j);
    else if (tt__jinja_accept(j, "set")) node = tt__jinja_set(j);
    else if (tt__jinja_accept(j, "macro")) node = tt__jinja_macro(j);
    else if (tt__jinja_accept(j, "break")) node = tt__jinja_add(j, TT__JINJA_BREAK, NULL, 0);
    else if (tt__jinja_accept(j, "continue")) node = tt__jinja_add(j, TT__JINJA_CONTINUE, NULL, 0);
    else if (tt__jinja_accept(j, "generation")) {
        node = tt__jinja_add(j, TT__JINJA_GENERATION, NULL, 0);
        tt__jinja_end_tag(j);
        const int body = tt__jinja_body(j, "endgeneration");
        j->nodes[node].part[1] = body;
        j->generates = true;
        tt__jinja_need(j, "endgeneration");
    } else if (j->token == 'N')
        tt__jinja_fail(j, TT_ERR_UNSUPPORTED, tt__jinja_line(j),
                       "the tag '%.*s' is not supported here; expected if, for, set, macro, generation, "
                       "break or continue", (int)tt__min(j->token_n, 60),
                           j->token_text);
    else tt__jinja_unexpected(j, "the name of a tag");
    tt__jinja_end_tag(j);
    return node;
}

static int tt__jinja_body(tt__jinja *j, const char *ends)
{
    const int line = tt__jinja_line(j);
    int first = 0, last = 0;
    bool ended = !tt__jinja_deeper(j);
    while (!ended && !j->failed) {
        int node = tt__jinja_raw(j);
        for (int turn = 0; turn < 2 && !ended; turn++) { /* first the text, then the tag after the text */
            if (turn && j->tag == '{') {
                tt__jinja_next(j);
                node = tt__jinja_around(j, TT__JINJA_PRINT, tt__jinja_expression(j));
                tt__jinja_end_tag(j);
            } else if (turn && j->tag == '%') {
                tt__jinja_next(j);
                const char *end = ends;
                for (size_t n; *end && !ended; end += n + (end[n] == ' ')) {
                    n = strcspn(end, " ");
                    ended = j->token == 'N' && (size_t)j->token_n == n && memcmp(end, j->token_text, n) == 0;
                }
                node = ended ? 0 : tt__jinja_statement(j);
            } else if (turn) node = 0;
            if (turn && !j->tag && !j->failed) {
                ended = true;
                if (*ends)
                    tt__jinja_fail(j, TT_ERR_FORMAT, line, "the tag that ends here has no end; expected %s",
                                   ends);
            }
            if (!node) continue;
            if (last) j->nodes[last].next = node;
            else first = node;
            last = node;
        }
    }
    j->depth--;
    return first;
}

/* Parses a template, `bytes` bytes of UTF-8. The caller has set j->unicode, which like path must live as long
   as j. The caller frees j even after an error. */
static tt_status tt__jinja_parse(tt__jinja *j, tt_context *ctx, const char *path, const char *text,
                                 size_t bytes)
{
    const tt__unicode *unicode = j->unicode;
    memset(j, 0, sizeof *j);
    j->ctx = ctx;
    j->unicode = unicode;
    j->path = path;
    j->line = 1;
    j->line_starts = true;
    if (bytes > INT32_MAX / 4 || tt__utf8_invalid(text, bytes) < bytes)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s': the chat template has %zu bytes; expected at most %d, in "
                        "UTF-8",
                        path, bytes, INT32_MAX / 4);
    if (!(j->text = (char *)tt__alloc(ctx, bytes + 4))) return TT_ERR_MEMORY;
    for (size_t at = 0; at < bytes; at++) {
        const bool cr = text[at] == '\r';
        j->text[j->bytes++] = cr ? '\n' : text[at];
        at += cr && at + 1 < bytes && text[at + 1] == '\n';
    }
    j->bytes -= j->bytes && j->text[j->bytes - 1] == '\n'; /* Jinja drops one line end at a template's end */
    memset(j->text + j->bytes, 0, 4); /* the lexer reads up to 2 bytes beyond the text */
    tt__jinja_add(j, TT__JINJA_NOTHING, NULL, 0);
    j->first = tt__jinja_body(j, "");
    return j->failed ? ctx->status : TT_OK;
}
