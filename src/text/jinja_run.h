#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../files/utf8.h"
#include "code_points.h"
#include "unicode.h"
#include "jinja.h"

/* ---- from nodes to a text */

typedef enum tt__jinja_type {
    TT__VALUE_UNDEFINED, TT__VALUE_NONE, TT__VALUE_BOOL, TT__VALUE_INTEGER, TT__VALUE_TEXT, TT__VALUE_LIST,
    TT__VALUE_DICT, TT__VALUE_NAMESPACE, TT__VALUE_REAL, TT__VALUE_MACRO,
    TT__VALUE_OTHER /* a number of a message that neither an int64_t nor a fraction below 2^63 holds */
} tt__jinja_type;

typedef struct tt__jinja_value {
    tt__jinja_type type;
    int64_t n;                         /* by the type: a number; bytes of a text; number of members; the node
                                          of a macro */
    double real;                       /* a number with a fraction */
    bool unlisted;                     /* a list that Python prints unlike lists: a tuple, a range, a view of
                                          a dictionary, or what filters give item by item */
    const char *text;
    struct tt__jinja_member *members;  /* the n members of a list or a dictionary */
    struct tt__jinja_scope *scope;     /* the attributes of a namespace; the scope that defines a macro */
} tt__jinja_value;

/* A member of a dictionary or of a list. Members of a list have no key. */
typedef struct tt__jinja_member {
    const char *key;
    int64_t key_bytes;
    tt__jinja_value value;
} tt__jinja_member;

typedef struct tt__jinja_variable {
    const char *name;
    int64_t bytes;
    tt__jinja_value value;
    struct tt__jinja_variable *next;
} tt__jinja_variable;

/* The variables of a scope. A variable of an outer scope is visible unless `variables` has a variable of the
   same name. */
typedef struct tt__jinja_scope {
    tt__jinja_variable *variables;
    struct tt__jinja_scope *outer;
} tt__jinja_scope;

/* A rendering of a template. */
typedef struct tt__jinja_run {
    tt__jinja *j;
    tt__chunk *chunks;       /* memory of values */
    size_t used;             /* bytes of values */
    int64_t steps;           /* steps that are left */
    int depth;               /* levels of nesting */
    int captures;            /* number of set blocks, generation blocks and macros around the statement */
    int leaving;             /* the statement that leaves the loop, TT__JINJA_BREAK or _CONTINUE; 0: none */
    tt__jinja_scope *scope;
    char *out;               /* the text so far */
    size_t n, capacity;
    tt_span *spans;          /* (n_spans): bytes of `out` that blocks {% generation %} wrote */
    int n_spans, cap_spans;
} tt__jinja_run;

static void tt__jinja_end(tt__jinja_run *r)
{
    tt__chunks_free(r->j->ctx, &r->chunks);
    tt__free(r->j->ctx, r->out);
    tt__free(r->j->ctx, r->spans);
}

static tt__jinja_value tt__jinja_make(tt__jinja_type type, int64_t n)
{
    tt__jinja_value v;
    memset(&v, 0, sizeof v);
    v.type = type;
    v.n = n;
    return v;
}

static tt__jinja_value tt__jinja_text(const char *text, int64_t n)
{
    tt__jinja_value v = tt__jinja_make(TT__VALUE_TEXT, n);
    v.text = text;
    return v;
}

/* Returns memory for values, zeroed and followed by a NUL; NULL after an error. */
static void *tt__jinja_take(tt__jinja_run *r, int64_t bytes)
{
    tt__jinja *j = r->j;
    const size_t n = (size_t)bytes + 1;
    const bool fits = !j->failed && n <= TT__JINJA_MEMORY - r->used;
    void *memory = fits ? tt__chunks_take(j->ctx, &r->chunks, n) : NULL;
    if (memory) {
        r->used += n;
        return memset(memory, 0, n);
    }
    if (!j->failed && n > TT__JINJA_MEMORY - r->used)
        tt__jinja_fail(j, TT_ERR_UNSUPPORTED, 1, "the values need more than %zu bytes: shorten them",
                       TT__JINJA_MEMORY);
    else if (!j->failed) tt__jinja_fail(j, TT_ERR_MEMORY, 1, "out of memory for its values: free memory");
    return NULL;
}

/* Counts n steps. Returns false after an error, and if no steps are left. */
static bool tt__jinja_steps(tt__jinja_run *r, const tt__jinja_node *at, int64_t n)
{
    r->steps -= n;
    if (r->steps < 0)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at ? at->line : 1, "the template takes more than %d steps: "
                       "does a loop run too often?", TT__JINJA_STEPS);
    return !r->j->failed;
}

/* Returns a list or a dictionary of n undefined members; UNDEFINED after an error. */
static tt__jinja_value tt__jinja_members(tt__jinja_run *r, tt__jinja_type type, int64_t n)
{
    tt__jinja_value v = tt__jinja_make(type, n);
    if (!tt__jinja_steps(r, NULL, n) ||
        !(v.members = (tt__jinja_member *)tt__jinja_take(r, n * (int64_t)sizeof *v.members)))
        return tt__jinja_make(TT__VALUE_UNDEFINED, 0);
    return v;
}

static tt__jinja_variable *tt__jinja_find(tt__jinja_run *r, const tt__jinja_scope *scope, const char *name,
                                          int64_t bytes)
{
    for (tt__jinja_variable *v = scope->variables; v && tt__jinja_steps(r, NULL, 1); v = v->next)
        if (v->bytes == bytes && memcmp(v->name, name, (size_t)bytes) == 0) return v;
    return NULL;
}

static void tt__jinja_assign(tt__jinja_run *r, tt__jinja_scope *scope, const char *name, int64_t bytes,
                             tt__jinja_value value)
{
    tt__jinja_variable *v = tt__jinja_find(r, scope, name, bytes);
    if (!v) {
        if (!(v = (tt__jinja_variable *)tt__jinja_take(r, sizeof *v))) return;
        v->name = name;
        v->bytes = bytes;
        v->next = scope->variables;
        scope->variables = v;
    }
    v->value = value;
}

static void tt__jinja_define(tt__jinja_run *r, const char *name, tt__jinja_value value)
{
    tt__jinja_assign(r, r->scope, name, (int64_t)strlen(name), value);
}

/* Prepares a rendering, with no variable. Returns false if memory runs out. */
static bool tt__jinja_begin(tt__jinja_run *r, tt__jinja *j)
{
    memset(r, 0, sizeof *r);
    r->j = j;
    j->failed = false;
    r->steps = TT__JINJA_STEPS;
    r->scope = (tt__jinja_scope *)tt__jinja_take(r, sizeof *r->scope);
    return r->scope != NULL;
}

static const char *tt__jinja_type_name(tt__jinja_value v)
{
    static const char *const names[] = {"undefined", "none", "a boolean", "a number", "a text", "a list",
                                        "a dictionary", "a namespace", "a number with a fraction", "a macro",
                                        "a number beyond 2^63"};
    return names[v.type];
}

static bool tt__jinja_is_text(tt__jinja_value v, const char *word)
{
    return v.type == TT__VALUE_TEXT && tt__jinja_same(v.text, v.n, word);
}

static bool tt__jinja_true(tt__jinja_value v)
{
    return v.n != 0 || v.type == TT__VALUE_NAMESPACE || v.type == TT__VALUE_OTHER || v.real != 0;
}

static bool tt__jinja_number(tt__jinja_value v)
{
    return v.type == TT__VALUE_BOOL || v.type == TT__VALUE_INTEGER;
}

/* Returns whether both values are numbers and at least one has a fraction. Sets x to the numbers. */
static bool tt__jinja_reals(tt__jinja_value a, tt__jinja_value b, double x[2])
{
    const bool real[2] = {a.type == TT__VALUE_REAL, b.type == TT__VALUE_REAL};
    x[0] = real[0] ? a.real : (double)a.n;
    x[1] = real[1] ? b.real : (double)b.n;
    return (real[0] || real[1]) && (real[0] || tt__jinja_number(a)) && (real[1] || tt__jinja_number(b));
}

static tt__jinja_value tt__jinja_to_text(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value v);

static bool tt__jinja_equal(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value a, tt__jinja_value b,
                            int depth)
{
    double reals[2];
    if (tt__jinja_number(a) && tt__jinja_number(b)) return a.n == b.n;
    if (tt__jinja_reals(a, b, reals)) return reals[0] == reals[1];
    if (a.type != b.type || a.n != b.n) return false;
    if (depth == TT__JINJA_DEPTH)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "a list is nested more than %d deep: flatten it",
                       TT__JINJA_DEPTH);
    if (!tt__jinja_steps(r, at, a.type == TT__VALUE_TEXT ? a.n / 64 : 1)) return false;
    if (a.type == TT__VALUE_TEXT) return memcmp(a.text, b.text, (size_t)a.n) == 0;
    for (int64_t i = 0, k; a.members && i < a.n; i++) {
        const tt__jinja_member *x = &a.members[i];
        for (k = x->key ? 0 : i; x->key && k < b.n; k++)
            if (tt__jinja_steps(r, at, 1) && b.members[k].key_bytes == x->key_bytes &&
                memcmp(b.members[k].key, x->key, (size_t)x->key_bytes) == 0) break;
        if (k == b.n || !tt__jinja_equal(r, at, x->value, b.members[k].value, depth + 1)) return false;
    }
    return a.type < TT__VALUE_NAMESPACE || (a.type == TT__VALUE_NAMESPACE && a.scope == b.scope);
}

/* Writes a finite number as Python's repr does: with the fewest digits that read back as the number. */
static int tt__jinja_real(double x, char to[48])
{
    char digits[40];
    int n = 0, exponent = 0;
    for (int precision = 0; precision < 17; precision++) {
        snprintf(digits, sizeof digits, "%.*e", precision, fabs(x));
        for (char *c = digits; *c; c++) if (!strchr("+-0123456789e", *c)) *c = '.'; /* in any locale */
        if (tt__json_double(digits, strlen(digits)) == fabs(x)) break;
    }
    const char *e = strchr(digits, 'e');
    exponent = atoi(e + 1);
    char only[20]; /* the digits without a point */
    for (const char *c = digits; c < e; c++) if (*c != '.') only[n++] = *c;
    tt__text_buffer text = {to, 48, 0};
    if (signbit(x)) tt__print(&text, "-");
    if (exponent < -4 || exponent >= 16)
        tt__print(&text, "%c%s%.*se%c%02d", only[0], n > 1 ? "." : "", n - 1, only + 1,
                  exponent < 0 ? '-' : '+', abs(exponent));
    else if (exponent < 0)
        tt__print(&text, "0.%.*s%.*s", -exponent - 1, "000", n, only);
    else
        for (int k = 0; k < tt__max(n, exponent + 2); k++)
            tt__print(&text, "%s%c", k == exponent + 1 ? "." : "", k < n ? only[k] : '0');
    return (int)text.length;
}

static bool tt__jinja_write(tt__jinja_run *r, const char *text, int64_t n);
static tt__jinja_value tt__jinja_taken_back(tt__jinja_run *r, size_t from);

/* Writes a text in quotes, with the escapes of Python's repr. */
static void tt__jinja_repr_text(tt__jinja_run *r, const tt__jinja_node *at, const char *text, int64_t n)
{
    static const char names[] = "\\nrt", values[] = "\\\n\r\t";
    const bool doubled = memchr(text, '\'', (size_t)n) && !memchr(text, '"', (size_t)n);
    const char quote = doubled ? '"' : '\'';
    const tt__unicode *u = r->j->unicode;
    char escape[16];
    tt__jinja_write(r, &quote, 1);
    for (size_t from = 0, to = 0; from < (size_t)n && !r->j->failed; from = to) {
        const uint32_t c = tt__utf8_next(text, (size_t)n, &to);
        const char *found = c < 0x80 ? (const char *)memchr(values, (int)c, sizeof values - 1) : NULL;
        const bool ascii = c >= ' ' && c < 0x7F, wide = c > 0x7F;
        const bool hidden = wide && u && u->bert[c] == TT__BERT_DROP && c != 0xFFFD;
        const bool shown = ascii || (wide && u && !hidden && !tt__jinja_space(c));
        if (wide && !u)
            tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "printing a list with letters beyond ASCII is "
                           "not supported without a tokenizer");
        if (found) snprintf(escape, sizeof escape, "\\%c", names[found - values]);
        else if (c == (uint8_t)quote) snprintf(escape, sizeof escape, "\\%c", quote);
        else if (shown) escape[0] = 0;
        else
            snprintf(escape, sizeof escape, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x",
                     (unsigned)c);
        if (escape[0]) tt__jinja_write(r, escape, (int64_t)strlen(escape));
        else tt__jinja_write(r, text + from, (int64_t)(to - from));
    }
    tt__jinja_write(r, &quote, 1);
}

/* Writes what Python's repr gives for a value. */
static void tt__jinja_repr(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value v, int depth)
{
    const bool list = v.type == TT__VALUE_LIST;
    if (depth == TT__JINJA_DEPTH)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "a list is nested more than %d levels deep: "
                       "simplify the template", TT__JINJA_DEPTH);
    if (v.unlisted)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "printing a tuple, a range or items that no "
                       "filter `list` has collected is not supported: add `| list`");
    if (!tt__jinja_steps(r, at, 1 + (v.type == TT__VALUE_TEXT ? v.n / 64 : 0))) return;
    if (v.type == TT__VALUE_TEXT) tt__jinja_repr_text(r, at, v.text, v.n);
    else if (!list && v.type != TT__VALUE_DICT) {
        if (v.type == TT__VALUE_UNDEFINED) v = tt__jinja_text("Undefined", 9);
        v = tt__jinja_to_text(r, at, v);
        tt__jinja_write(r, v.text, v.n);
    } else {
        tt__jinja_write(r, list ? "[" : "{", 1);
        for (int64_t i = 0; i < v.n && !r->j->failed; i++) {
            if (i) tt__jinja_write(r, ", ", 2);
            if (!list) tt__jinja_repr_text(r, at, v.members[i].key, v.members[i].key_bytes);
            if (!list) tt__jinja_write(r, ": ", 2);
            tt__jinja_repr(r, at, v.members[i].value, depth + 1);
        }
        tt__jinja_write(r, list ? "]" : "}", 1);
    }
}

/* Returns the text that Jinja prints for a value. */
static tt__jinja_value tt__jinja_to_text(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value v)
{
    if (v.type == TT__VALUE_TEXT) return v;
    if (v.type == TT__VALUE_UNDEFINED) return tt__jinja_text("", 0);
    if (v.type == TT__VALUE_NONE) return tt__jinja_text("None", 4);
    if (v.type == TT__VALUE_BOOL) return v.n ? tt__jinja_text("True", 4) : tt__jinja_text("False", 5);
    const size_t from = r->n;
    if (v.type == TT__VALUE_LIST || v.type == TT__VALUE_DICT) {
        tt__jinja_repr(r, at, v, 0);
        return tt__jinja_taken_back(r, from);
    }
    const bool integer = v.type == TT__VALUE_INTEGER;
    char *to = integer || v.type == TT__VALUE_REAL ? (char *)tt__jinja_take(r, 48) : NULL;
    if (to) return tt__jinja_text(to, integer ? snprintf(to, 48, "%lld", (long long)v.n)
                                              : tt__jinja_real(v.real, to));
    tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "printing %s is not supported; expected a text",
                   tt__jinja_type_name(v));
    return tt__jinja_text("", 0);
}

/* Appends n bytes to r->out: the output, or a value that tt__jinja_taken_back removes from the output later.
   Returns false after an error. */
static bool tt__jinja_write(tt__jinja_run *r, const char *text, int64_t n)
{
    const size_t needed = r->n + (size_t)n;
    if (r->j->failed) return false;
    if (needed > TT__JINJA_MEMORY)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, 1, "a text of more than %zu bytes is not supported",
                       TT__JINJA_MEMORY);
    if (!r->j->failed && needed + 1 > r->capacity) {
        char *more = (char *)tt__realloc(r->j->ctx, r->out, 2 * needed + 64);
        r->j->failed = !more;
        if (more) r->out = more, r->capacity = 2 * needed + 64;
    }
    if (r->j->failed) return false;
    if (n) memcpy(r->out + r->n, text, (size_t)n);
    r->out[r->n = needed] = 0;
    return true;
}

/* Removes all but the first `from` bytes of the output, and returns the removed text as a value. */
static tt__jinja_value tt__jinja_taken_back(tt__jinja_run *r, size_t from)
{
    const int64_t n = (int64_t)(r->n - from);
    char *text = r->j->failed ? NULL : (char *)tt__jinja_take(r, n);
    if (text && n) memcpy(text, r->out + from, (size_t)n);
    r->n = from;
    return tt__jinja_text(text ? text : "", text ? n : 0);
}

/* The format in which tojson writes values, as json.dumps does. ascii: other characters become \u and four
   digits. indent: spaces of a level of nesting, whose items have lines of their own; -1: all on one line. */
typedef struct tt__jinja_json_style { bool ascii; int64_t indent; } tt__jinja_json_style;

static void tt__jinja_json_text(tt__jinja_run *r, const char *text, int64_t n, bool ascii)
{
    static const char names[] = "\"\\nrtbf", values[] = "\"\\\n\r\t\b\f";
    char escape[16];
    tt__jinja_write(r, "\"", 1);
    for (size_t at = 0, from = 0, next; !r->j->failed; at = next) {
        const size_t here = at;
        next = at;
        const uint32_t c = at < (size_t)n ? tt__utf8_next(text, (size_t)n, &next) : 0;
        const char *found = c < 0x80 ? (const char *)memchr(values, (int)c, sizeof values - 1) : NULL;
        if (here < (size_t)n && !found && c >= 0x20 && (c < 0x80 || !ascii)) continue;
        tt__jinja_write(r, text + from, (int64_t)(here - from));
        from = next;
        if (here == (size_t)n) break;
        if (found) snprintf(escape, sizeof escape, "\\%c", names[found - values]);
        else if (c < 0x10000) snprintf(escape, sizeof escape, "\\u%04x", (unsigned)c);
        else
            snprintf(escape, sizeof escape, "\\u%04x\\u%04x", (unsigned)(0xD800 + ((c - 0x10000) >> 10)),
                     (unsigned)(0xDC00 + (c & 0x3FF)));
        tt__jinja_write(r, escape, (int64_t)strlen(escape));
    }
    tt__jinja_write(r, "\"", 1);
}

/* Begins a line of JSON at a level of nesting, if values have lines of their own. */
static void tt__jinja_json_line(tt__jinja_run *r, const tt__jinja_json_style *style, int depth)
{
    if (style->indent >= 0) tt__jinja_write(r, "\n", 1);
    for (int64_t k = 0; k < style->indent * depth && !r->j->failed; k++) tt__jinja_write(r, " ", 1);
}

static void tt__jinja_json(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value v,
                           const tt__jinja_json_style *style, int depth)
{
    const bool list = v.type == TT__VALUE_LIST, dict = v.type == TT__VALUE_DICT, lines = style->indent >= 0;
    if (depth == TT__JINJA_DEPTH)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "a list is nested more than %d deep: flatten it",
                       TT__JINJA_DEPTH);
    if (!tt__jinja_steps(r, at, 1 + (v.type == TT__VALUE_TEXT ? v.n / 64 : 0))) return;
    if (v.type == TT__VALUE_NONE) tt__jinja_write(r, "null", 4);
    else if (v.type == TT__VALUE_BOOL) tt__jinja_write(r, v.n ? "true" : "false", v.n ? 4 : 5);
    else if (v.type == TT__VALUE_TEXT) tt__jinja_json_text(r, v.text, v.n, style->ascii);
    else if (list || dict) {
        tt__jinja_write(r, list ? "[" : "{", 1);
        for (int64_t i = 0; i < v.n && !r->j->failed; i++) {
            if (i) tt__jinja_write(r, ", ", lines ? 1 : 2);
            tt__jinja_json_line(r, style, depth + 1);
            if (dict) {
                tt__jinja_json_text(r, v.members[i].key, v.members[i].key_bytes, style->ascii);
                tt__jinja_write(r, ": ", 2);
            }
            tt__jinja_json(r, at, v.members[i].value, style, depth + 1);
        }
        if (v.n) tt__jinja_json_line(r, style, depth);
        tt__jinja_write(r, list ? "]" : "}", 1);
    } else {
        if (v.type != TT__VALUE_INTEGER && v.type != TT__VALUE_REAL)
            tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "tojson of %s is not supported",
                           tt__jinja_type_name(v));
        v = tt__jinja_to_text(r, at, v);
        tt__jinja_write(r, v.text, v.n);
    }
}

/* Returns a member of a dictionary or an attribute of a namespace, or UNDEFINED. */
static tt__jinja_value tt__jinja_get(tt__jinja_run *r, tt__jinja_value v, const char *key, int64_t bytes)
{
    if (v.type == TT__VALUE_NAMESPACE) {
        const tt__jinja_variable *found = tt__jinja_find(r, v.scope, key, bytes);
        if (found) return found->value;
    }
    for (int64_t i = 0; v.type == TT__VALUE_DICT && i < v.n && tt__jinja_steps(r, NULL, 1); i++)
        if (v.members[i].key_bytes == bytes && memcmp(v.members[i].key, key, (size_t)bytes) == 0)
            return v.members[i].value;
    return tt__jinja_make(TT__VALUE_UNDEFINED, 0);
}

/* Returns the items of a value as a list: a list's members, a dictionary's keys, a text's characters. */
static tt__jinja_value tt__jinja_list(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value v)
{
    if (v.type == TT__VALUE_LIST) return v;
    if (v.type == TT__VALUE_UNDEFINED) return tt__jinja_members(r, TT__VALUE_LIST, 0);
    if (v.type != TT__VALUE_DICT && v.type != TT__VALUE_TEXT) {
        tt__jinja_fail(r->j, TT_ERR_FORMAT, at->line, "%s has no items; expected a list, dictionary or text",
                       tt__jinja_type_name(v));
        return tt__jinja_make(TT__VALUE_UNDEFINED, 0);
    }
    tt__jinja_value list = tt__jinja_members(r, TT__VALUE_LIST, v.n); /* a text has at most n characters */
    int64_t n = 0;
    for (size_t from = 0, to = 0; list.members && v.type == TT__VALUE_TEXT && from < (size_t)v.n; from = to) {
        tt__utf8_next(v.text, (size_t)v.n, &to);
        list.members[n++].value = tt__jinja_text(v.text + from, (int64_t)(to - from));
    }
    for (; list.members && v.type == TT__VALUE_DICT && n < v.n; n++)
        list.members[n].value = tt__jinja_text(v.members[n].key, v.members[n].key_bytes);
    list.n = n;
    return list;
}

/* Returns the texts of a list, with a separator between them. */
static tt__jinja_value tt__jinja_join(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value list,
                                      tt__jinja_value separator)
{
    const size_t from = r->n;
    list = tt__jinja_list(r, at, list);
    separator = tt__jinja_to_text(r, at, separator);
    for (int64_t i = 0; i < list.n && tt__jinja_steps(r, at, 1 + separator.n / 64); i++) {
        const tt__jinja_value text = tt__jinja_to_text(r, at, list.members[i].value);
        if (i) tt__jinja_write(r, separator.text, separator.n);
        tt__jinja_write(r, text.text, text.n);
    }
    return tt__jinja_taken_back(r, from);
}

/* Returns value[from:to:step] of a text or a list, as Python does; each bound may be undefined. */
static tt__jinja_value tt__jinja_slice(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value v,
                                       const tt__jinja_value bounds[3])
{
    const tt__jinja_value list = tt__jinja_list(r, at, v);
    int64_t bound[3] = {0, 0, 1}, n = 0;
    const bool has_step = bounds[2].type > TT__VALUE_NONE;
    if (has_step) bound[2] = tt__max(-list.n - 1, tt__min(bounds[2].n, list.n + 1));
    const bool back = bound[2] < 0;
    for (int k = 0; k < 3; k++)
        if (bounds[k].type > TT__VALUE_NONE && bounds[k].type != TT__VALUE_INTEGER)
            tt__jinja_fail(r->j, TT_ERR_FORMAT, at->line, "a bound of a slice is %s; expected an integer",
                           tt__jinja_type_name(bounds[k]));
    if (!bound[2])
        tt__jinja_fail(r->j, TT_ERR_FORMAT, at->line, "the step of a slice is 0; expected another");
    for (int k = 0; k < 2; k++) {
        bound[k] = bounds[k].n < 0 ? bounds[k].n + list.n : bounds[k].n;
        bound[k] = tt__max(back ? -1 : 0, tt__min(bound[k], back ? list.n - 1 : list.n));
        if (bounds[k].type <= TT__VALUE_NONE)
            bound[k] = back == !k ? (back ? list.n - 1 : list.n) : back ? -1 : 0;
    }
    tt__jinja_value part = tt__jinja_members(r, TT__VALUE_LIST, list.n);
    for (int64_t i = bound[0]; !r->j->failed && (back ? i > bound[1] : i < bound[1]); i += bound[2])
        part.members[n++] = list.members[i];
    part.n = n;
    part.unlisted = v.unlisted;
    return v.type == TT__VALUE_TEXT ? tt__jinja_join(r, at, part, tt__jinja_text("", 0)) : part;
}

static tt__jinja_value tt__jinja_index(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value v,
                                       tt__jinja_value index)
{
    const tt__jinja_value undefined = tt__jinja_make(TT__VALUE_UNDEFINED, 0);
    if (v.type == TT__VALUE_UNDEFINED)
        tt__jinja_fail(r->j, TT_ERR_FORMAT, at->line, "an undefined value has no attribute or item%s%.*s",
                       index.type == TT__VALUE_TEXT ? " " : "",
                       index.type == TT__VALUE_TEXT ? (int)tt__min(index.n, 60) : 0, index.text ? index.text
                           : "");
    if (v.type == TT__VALUE_MACRO)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "an attribute of a macro is not supported: do "
                       "without it");
    if (index.type == TT__VALUE_TEXT) return tt__jinja_get(r, v, index.text, index.n);
    if (index.type != TT__VALUE_INTEGER || (v.type != TT__VALUE_LIST && v.type != TT__VALUE_TEXT))
        return undefined;
    const tt__jinja_value list = tt__jinja_list(r, at, v);
    const int64_t i = index.n < 0 ? index.n + list.n : index.n;
    return i >= 0 && i < list.n ? list.members[i].value : undefined;
}

static tt__jinja_value tt__jinja_eval(tt__jinja_run *r, int node);

/* A filter, a method, a test or a function, called with a value and up to four arguments. */
typedef struct tt__jinja_call {
    const tt__jinja_node *at;
    const char *what;          /* "filter" and so on, for errors */
    tt__jinja_value on, argument[4];
    int n;                     /* number of arguments; an argument that is left out counts if a later one is
                                  given */
} tt__jinja_call;

/* Returns the place of the argument that has a name; -1: there is none. */
static int tt__jinja_place(const tt__jinja_call *c, const tt__jinja_node *name)
{
    static const struct { const char *call, *argument; int place; } names[] = {
        {"tojson", "ensure_ascii", 0}, {"tojson", "indent", 1}, {"default", "default_value", 0},
        {"default", "boolean", 1}, {"d", "boolean", 1}, {"map", "attribute", 1}, {"join", "d", 0},
        {"trim", "chars", 0}, {"split", "sep", 0}, {"split", "maxsplit", 1}};
    for (int k = 0; k < TT__COUNT(names); k++)
        if (tt__jinja_same(c->at->text, c->at->n, names[k].call) &&
            tt__jinja_same(name->text, name->n, names[k].argument)) return names[k].place;
    return -1;
}

/* Evaluates the arguments of a call, a chain of nodes. */
static void tt__jinja_arguments(tt__jinja_run *r, tt__jinja_call *c, int chain)
{
    for (; chain && !r->j->failed; chain = r->j->nodes[chain].next) {
        const tt__jinja_node *node = &r->j->nodes[chain];
        const bool named = node->kind == TT__JINJA_KEYWORD;
        const int place = named ? tt__jinja_place(c, node) : c->n;
        if (place < 0 || place == TT__COUNT(c->argument))
            tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, node->line, "the %s %.*s with %s%.*s is not supported: "
                           "do without it", c->what, (int)tt__min(c->at->n, 60), c->at->text,
                           named ? "an argument " : "five arguments",
                           named ? (int)tt__min(node->n, 60) : 0, named ? node->text : "");
        else c->argument[place] = tt__jinja_eval(r, named ? node->part[0] : chain);
        c->n = (int)tt__max(c->n, place + 1);
    }
}

/* Returns whether the call has this name. More than `max` arguments are then an error. */
static bool tt__jinja_calls(tt__jinja_run *r, const tt__jinja_call *c, const char *name, int max)
{
    if (!tt__jinja_same(c->at->text, c->at->n, name)) return false;
    if (c->n > max)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, c->at->line, "the %s %s with %d arguments is not supported: "
                       "do without it", c->what, name, c->n);
    return true;
}

static tt__jinja_value tt__jinja_refuse(tt__jinja_run *r, const tt__jinja_call *c)
{
    tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, c->at->line, "the %s %.*s of %s is not supported: do without it",
                   c->what, (int)tt__min(c->at->n, 60), c->at->text, tt__jinja_type_name(c->on));
    return tt__jinja_make(TT__VALUE_UNDEFINED, 0);
}

static tt__jinja_value tt__jinja_refuse_letters(tt__jinja_run *r, const tt__jinja_call *c)
{
    tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, c->at->line, "the %s %.*s of a text with letters beyond ASCII "
                   "is not supported: do without it", c->what, (int)tt__min(c->at->n, 60), c->at->text);
    return tt__jinja_make(TT__VALUE_UNDEFINED, 0);
}

/* Returns a text in small letters, as Python's lower. A capital sigma is refused, because Python writes it
   differently at the end of a word. */
static tt__jinja_value tt__jinja_lower(tt__jinja_run *r, const tt__jinja_call *c, tt__jinja_value text)
{
    const size_t from = r->n;
    if (!tt__jinja_steps(r, c->at, text.n / 64)) return text;
    for (size_t at = 0; at < (size_t)text.n && !r->j->failed;) {
        uint32_t to[2];
        const uint32_t point = tt__utf8_next(text.text, (size_t)text.n, &at);
        if (point == 0x3A3) return tt__jinja_refuse(r, c);
        const size_t n = tt__lower_case(r->j->unicode, point, to);
        for (size_t k = 0; k < n; k++) {
            char bytes[4];
            tt__jinja_write(r, bytes, (int64_t)tt__utf8_put(to[k], bytes));
        }
    }
    return tt__jinja_taken_back(r, from);
}

/* Returns a text with its letters changed. to: 'U': all to capitals; 'L': all to small letters; 'C': the
   first character to a capital, the others to small letters. Refuses capitals of other than ASCII letters. */
static tt__jinja_value tt__jinja_case(tt__jinja_run *r, const tt__jinja_call *c, tt__jinja_value text,
                                      char to)
{
    char *copy = (char *)tt__jinja_take(r, text.n);
    for (int64_t i = 0; copy && i < text.n; i++) {
        const char letter = text.text[i];
        const bool up = to == 'U' || (to == 'C' && !i);
        if ((uint8_t)letter > 0x7F)
            return to == 'L' && r->j->unicode ? tt__jinja_lower(r, c, text) : tt__jinja_refuse_letters(r, c);
        copy[i] = letter;
        if (up && letter >= 'a' && letter <= 'z') copy[i] = (char)(letter - 32);
        if (!up && letter >= 'A' && letter <= 'Z') copy[i] = (char)(letter + 32);
    }
    return tt__jinja_text(copy ? copy : "", copy ? text.n : 0);
}

/* Returns the first index, from `from` on, at which `in` has the text `what`; -1: none. */
static int64_t tt__jinja_search(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value in, int64_t from,
                                tt__jinja_value what)
{
    for (int64_t first = from; from + what.n <= in.n; from++) {
        const bool counts = what.n >= 64 || (from - first) % 64 == 0;
        if (counts && !tt__jinja_steps(r, at, 1 + what.n / 64)) break;
        if (memcmp(in.text + from, what.text, (size_t)what.n) == 0) return from;
    }
    return -1;
}

/* Splits a text at each separator or, without a separator, at white space; at most `max` times (-1: no
   limit). */
static tt__jinja_value tt__jinja_split(tt__jinja_run *r, const tt__jinja_call *c, int64_t max)
{
    const tt__jinja_value text = c->on, separator = c->argument[0];
    const bool white = separator.type <= TT__VALUE_NONE;
    tt__jinja_value list = tt__jinja_make(TT__VALUE_LIST, 0);
    if (!white && (separator.type != TT__VALUE_TEXT || !separator.n)) return tt__jinja_refuse(r, c);
    for (int pass = 0; pass < 2 && !r->j->failed; pass++) { /* the first pass counts the parts */
        int64_t n = 0, from = 0;
        if (pass) list = tt__jinja_members(r, TT__VALUE_LIST, list.n);
        while (!r->j->failed) {
            if (white) from += (int64_t)tt__jinja_left(text.text + from, (size_t)(text.n - from), NULL, 0);
            if (white && from == text.n) break;
            int64_t to = text.n, next = -1;
            if (n != max && !white && (next = tt__jinja_search(r, c->at, text, from, separator)) >= 0)
                to = next;
            if (n != max && white) {
                size_t end = (size_t)from, after = (size_t)from;
                while (end < (size_t)text.n &&
                       !tt__jinja_space(tt__utf8_next(text.text, (size_t)text.n, &after))) end = after;
                next = to = (int64_t)end;
            }
            if (pass) list.members[n].value = tt__jinja_text(text.text + from, to - from);
            n++;
            if (next < 0) break;
            from = next + (white ? 0 : separator.n);
        }
        list.n = n;
    }
    return list;
}

static tt__jinja_value tt__jinja_replace(tt__jinja_run *r, const tt__jinja_call *c, tt__jinja_value text)
{
    const tt__jinja_value from = c->argument[0], to = c->argument[1];
    const size_t begin = r->n;
    if (c->n != 2 || from.type != TT__VALUE_TEXT || to.type != TT__VALUE_TEXT || !from.n)
        return tt__jinja_refuse(r, c);
    for (int64_t at = 0, next; !r->j->failed; at = next + from.n) {
        next = tt__jinja_search(r, c->at, text, at, from);
        tt__jinja_write(r, text.text + at, (next < 0 ? text.n : next) - at);
        if (next < 0) break;
        tt__jinja_write(r, to.text, to.n);
    }
    return tt__jinja_taken_back(r, begin);
}

/* Removes characters from the start of a text (`left`), from its end (`right`), or from both: the characters
   that the first argument has or, without an argument, white space. */
static tt__jinja_value tt__jinja_strip(tt__jinja_run *r, const tt__jinja_call *c, tt__jinja_value text,
                                       bool left, bool right)
{
    const tt__jinja_value set = c->argument[0];
    if (set.type > TT__VALUE_NONE && set.type != TT__VALUE_TEXT) return tt__jinja_refuse(r, c);
    if (!tt__jinja_steps(r, c->at, (1 + text.n / 64) * (1 + set.n / 8))) return text;
    const size_t n = right ? tt__jinja_right(text.text, (size_t)text.n, set.text, (size_t)set.n)
        : (size_t)text.n;
    const size_t from = left ? tt__jinja_left(text.text, n, set.text, (size_t)set.n) : 0;
    return tt__jinja_text(text.text + from, (int64_t)(n - from));
}

static bool tt__jinja_contains(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value what,
                               tt__jinja_value in)
{
    if (in.type == TT__VALUE_TEXT && what.type == TT__VALUE_TEXT)
        return tt__jinja_search(r, at, in, 0, what) >= 0;
    if (in.type == TT__VALUE_TEXT || (in.type == TT__VALUE_DICT && what.type != TT__VALUE_TEXT))
        tt__jinja_fail(r->j, TT_ERR_FORMAT, at->line, "%s is sought in %s; expected a text",
                       tt__jinja_type_name(what), tt__jinja_type_name(in));
    const tt__jinja_value list = tt__jinja_list(r, at, in);
    for (int64_t i = 0; i < list.n && tt__jinja_steps(r, at, 1); i++)
        if (tt__jinja_equal(r, at, list.members[i].value, what, 0)) return true;
    return false;
}

static bool tt__jinja_test(tt__jinja_run *r, const tt__jinja_call *c)
{
    const tt__jinja_type type = c->on.type;
    const bool iterable = type == TT__VALUE_TEXT || type == TT__VALUE_LIST || type == TT__VALUE_DICT;
    const struct { const char *name; bool is; } tests[] = {
        {"defined", type != TT__VALUE_UNDEFINED}, {"undefined", type == TT__VALUE_UNDEFINED},
        {"none", type == TT__VALUE_NONE}, {"string", type == TT__VALUE_TEXT},
            {"boolean", type == TT__VALUE_BOOL},
        {"true", type == TT__VALUE_BOOL && c->on.n}, {"false", type == TT__VALUE_BOOL && !c->on.n},
        {"integer", type == TT__VALUE_INTEGER},
            {"number", tt__jinja_number(c->on) || type == TT__VALUE_REAL || type == TT__VALUE_OTHER},
        {"float", type == TT__VALUE_REAL},
        {"mapping", type == TT__VALUE_DICT}, {"sequence", iterable || type == TT__VALUE_UNDEFINED},
        {"iterable", iterable || type == TT__VALUE_UNDEFINED}};
    for (int k = 0; k < TT__COUNT(tests); k++)
        if (tt__jinja_calls(r, c, tests[k].name, 0)) return tests[k].is;
    if (tt__jinja_number(c->on)) {
        if (tt__jinja_calls(r, c, "odd", 0)) return c->on.n % 2 != 0;
        if (tt__jinja_calls(r, c, "even", 0)) return c->on.n % 2 == 0;
    }
    static const char *const same[] = {"equalto", "eq", "sameas"};
    for (int k = 0; k < TT__COUNT(same); k++)
        if (c->n == 1 && tt__jinja_calls(r, c, same[k], 1))
            return tt__jinja_equal(r, c->at, c->on, c->argument[0], 0) &&
                (k < 2 || type == c->argument[0].type);
    if (c->n == 1 && tt__jinja_calls(r, c, "ne", 1))
        return !tt__jinja_equal(r, c->at, c->on, c->argument[0], 0);
    if (c->n == 1 && tt__jinja_calls(r, c, "in", 1))
        return tt__jinja_contains(r, c->at, c->on, c->argument[0]);
    tt__jinja_refuse(r, c);
    return false;
}

/* The filters selectattr and rejectattr. Arguments: the name of an attribute, the name of a test, the
   argument of the test. The filters select and reject have no attribute. */
static tt__jinja_value tt__jinja_select(tt__jinja_run *r, const tt__jinja_call *c, bool attribute,
                                        bool wanted)
{
    const tt__jinja_value list = tt__jinja_list(r, c->at, c->on), name = c->argument[0],
        test = c->argument[attribute], value = c->argument[attribute + 1];
    const bool tests = c->n > attribute, compares = c->n > attribute + 1;
    tt__jinja_value kept = tt__jinja_members(r, TT__VALUE_LIST, list.n);
    int64_t n = 0;
    if ((attribute && name.type != TT__VALUE_TEXT) || (tests && test.type != TT__VALUE_TEXT))
        return tt__jinja_refuse(r, c);
    tt__jinja_node at = *c->at;
    at.text = test.text;
    at.n = test.n;
    for (int64_t i = 0; i < list.n && !r->j->failed; i++) {
        const tt__jinja_value item = list.members[i].value;
        tt__jinja_call one = {&at, "test", attribute ? tt__jinja_index(r, c->at, item, name) : item, {value},
                              compares};
        if ((tests ? tt__jinja_test(r, &one) : tt__jinja_true(one.on)) == wanted)
            kept.members[n++] = list.members[i];
    }
    kept.n = n;
    kept.unlisted = true;
    return kept;
}

/* Returns a dictionary's keys and values as a list of pairs; which: 0: keys, 1: values, 2: both. */
static tt__jinja_value tt__jinja_dict_items(tt__jinja_run *r, tt__jinja_value dict, int which)
{
    tt__jinja_value list = tt__jinja_members(r, TT__VALUE_LIST, dict.n);
    for (int64_t i = 0; i < dict.n && list.members && !r->j->failed; i++) {
        const tt__jinja_value key = tt__jinja_text(dict.members[i].key, dict.members[i].key_bytes);
        list.members[i].value = which ? dict.members[i].value : key;
        if (which < 2) continue;
        tt__jinja_value pair = tt__jinja_members(r, TT__VALUE_LIST, 2);
        if (!pair.members) break;
        pair.members[0].value = key;
        pair.members[1].value = dict.members[i].value;
        pair.unlisted = true;
        list.members[i].value = pair;
    }
    list.unlisted = true;
    return list;
}

/* Returns the items of a dictionary, sorted by key; the order of letters does not depend on their case. */
static tt__jinja_value tt__jinja_dictsort(tt__jinja_run *r, const tt__jinja_call *c)
{
    tt__jinja_value list = tt__jinja_dict_items(r, c->on, 2);
    tt__jinja_value keys = tt__jinja_members(r, TT__VALUE_LIST, list.n);
    for (int64_t i = 0; i < list.n && !r->j->failed; i++) {
        const tt__jinja_value item = list.members[i].value;
        const tt__jinja_value key = tt__jinja_case(r, c, item.members[0].value, 'L');
        int64_t to = i;
        for (; to && tt__jinja_steps(r, c->at, 1); to--) {
            const tt__jinja_value before = keys.members[to - 1].value;
            if (tt__compare_bytes(before.text, (size_t)before.n, key.text, (size_t)key.n) <= 0) break;
            keys.members[to].value = before;
            list.members[to].value = list.members[to - 1].value;
        }
        if (r->j->failed) break;
        keys.members[to].value = key;
        list.members[to].value = item;
    }
    list.unlisted = false;
    return list;
}

static tt__jinja_value tt__jinja_filter(tt__jinja_run *r, const tt__jinja_call *c);

/* The filter map: (name of a filter), or (left out, name of an attribute). */
static tt__jinja_value tt__jinja_map(tt__jinja_run *r, const tt__jinja_call *c)
{
    const tt__jinja_value list = tt__jinja_list(r, c->at, c->on), filter = c->argument[0];
    tt__jinja_value mapped = tt__jinja_members(r, TT__VALUE_LIST, list.n);
    tt__jinja_node at = *c->at;
    const tt__jinja_value name = c->n == 1 ? filter : c->argument[1];
    if (name.type != TT__VALUE_TEXT || (c->n == 2 && filter.type)) return tt__jinja_refuse(r, c);
    at.text = name.text;
    at.n = name.n;
    if (++r->depth > TT__JINJA_DEPTH)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at.line, "more than %d levels of nesting are not supported",
                       TT__JINJA_DEPTH);
    for (int64_t i = 0; i < list.n && mapped.members && tt__jinja_steps(r, c->at, 1); i++) {
        const tt__jinja_call one = {&at, "filter", list.members[i].value, {name}, 0};
        mapped.members[i].value = c->n == 2 ? tt__jinja_index(r, c->at, one.on, name)
                                            : tt__jinja_filter(r, &one);
    }
    r->depth--;
    mapped.unlisted = true;
    return mapped;
}

static tt__jinja_value tt__jinja_filter(tt__jinja_run *r, const tt__jinja_call *c)
{
    const tt__jinja_type type = c->on.type;
    const size_t from = r->n;
    if (tt__jinja_calls(r, c, "trim", 1))
        return tt__jinja_strip(r, c, tt__jinja_to_text(r, c->at, c->on), true, true);
    if ((tt__jinja_calls(r, c, "length", 0) || tt__jinja_calls(r, c, "count", 0))) {
        int64_t n = type == TT__VALUE_TEXT ? 0 : tt__jinja_list(r, c->at, c->on).n;
        if (type == TT__VALUE_TEXT && tt__jinja_steps(r, c->at, c->on.n / 64)) /* counts characters */
            for (int64_t i = 0; i < c->on.n; i++) n += ((uint8_t)c->on.text[i] & 0xC0) != 0x80;
        return tt__jinja_make(TT__VALUE_INTEGER, n);
    }
    if (tt__jinja_calls(r, c, "tojson", 2)) {
        const tt__jinja_value indent = c->argument[1];
        if (indent.type > TT__VALUE_NONE && (indent.type != TT__VALUE_INTEGER || indent.n < 0))
            return tt__jinja_refuse(r, c);
        const tt__jinja_json_style style = {tt__jinja_true(c->argument[0]),
                                            indent.type > TT__VALUE_NONE ? tt__min(indent.n, 100) : -1};
        tt__jinja_json(r, c->at, c->on, &style, 0);
        return tt__jinja_taken_back(r, from);
    }
    if (tt__jinja_calls(r, c, "safe", 0)) return c->on; /* nothing is escaped */
    if (tt__jinja_calls(r, c, "default", 2) || tt__jinja_calls(r, c, "d", 2)) {
        const bool replaced = !type || (tt__jinja_true(c->argument[1]) && !tt__jinja_true(c->on));
        return !replaced ? c->on : c->n ? c->argument[0] : tt__jinja_text("", 0);
    }
    if (tt__jinja_calls(r, c, "string", 0)) return tt__jinja_to_text(r, c->at, c->on);
    if (tt__jinja_calls(r, c, "list", 0)) {
        tt__jinja_value list = tt__jinja_list(r, c->at, c->on);
        list.unlisted = false;
        return list;
    }
    if (tt__jinja_calls(r, c, "join", 1)) return tt__jinja_join(r, c->at, c->on, c->argument[0]);
    if (tt__jinja_calls(r, c, "first", 0) || tt__jinja_calls(r, c, "last", 0)) {
        const tt__jinja_value list = tt__jinja_list(r, c->at, c->on);
        if (!list.n) return tt__jinja_make(TT__VALUE_UNDEFINED, 0);
        return list.members[*c->at->text == 'f' ? 0 : list.n - 1].value;
    }
    if (tt__jinja_calls(r, c, "selectattr", 3)) return tt__jinja_select(r, c, true, true);
    if (tt__jinja_calls(r, c, "rejectattr", 3)) return tt__jinja_select(r, c, true, false);
    if (tt__jinja_calls(r, c, "select", 2)) return tt__jinja_select(r, c, false, true);
    if (tt__jinja_calls(r, c, "reject", 2)) return tt__jinja_select(r, c, false, false);
    if (c->n && tt__jinja_calls(r, c, "map", 2)) return tt__jinja_map(r, c);
    if (type == TT__VALUE_DICT && tt__jinja_calls(r, c, "items", 0)) return tt__jinja_dict_items(r, c->on, 2);
    if (type == TT__VALUE_DICT && tt__jinja_calls(r, c, "dictsort", 0)) return tt__jinja_dictsort(r, c);
    if (type == TT__VALUE_TEXT && tt__jinja_calls(r, c, "replace", 2)) return tt__jinja_replace(r, c, c->on);
    static const struct { const char *name; char to; } cases[] = {
        {"upper", 'U'}, {"lower", 'L'}, {"capitalize", 'C'}};
    for (int k = 0; k < TT__COUNT(cases); k++)
        if (tt__jinja_calls(r, c, cases[k].name, 0))
            return tt__jinja_case(r, c, tt__jinja_to_text(r, c->at, c->on), cases[k].to);
    return tt__jinja_refuse(r, c);
}

/* Calls a method of a text or a dictionary. */
static tt__jinja_value tt__jinja_method(tt__jinja_run *r, const tt__jinja_call *c)
{
    const tt__jinja_value text = c->on, other = c->argument[0];
    if (text.type == TT__VALUE_DICT) {
        if (tt__jinja_calls(r, c, "items", 0)) return tt__jinja_dict_items(r, text, 2);
        if (tt__jinja_calls(r, c, "keys", 0)) return tt__jinja_dict_items(r, text, 0);
        if (tt__jinja_calls(r, c, "values", 0)) return tt__jinja_dict_items(r, text, 1);
        if (other.type == TT__VALUE_TEXT && tt__jinja_calls(r, c, "get", 2)) {
            const tt__jinja_value found = tt__jinja_get(r, text, other.text, other.n);
            return found.type ? found : c->n > 1 ? c->argument[1] : tt__jinja_make(TT__VALUE_NONE, 0);
        }
    }
    if (text.type != TT__VALUE_TEXT) return tt__jinja_refuse(r, c);
    if (tt__jinja_calls(r, c, "strip", 1)) return tt__jinja_strip(r, c, text, true, true);
    if (tt__jinja_calls(r, c, "lstrip", 1)) return tt__jinja_strip(r, c, text, true, false);
    if (tt__jinja_calls(r, c, "rstrip", 1)) return tt__jinja_strip(r, c, text, false, true);
    if (tt__jinja_calls(r, c, "upper", 0)) return tt__jinja_case(r, c, text, 'U');
    if (tt__jinja_calls(r, c, "lower", 0)) return tt__jinja_case(r, c, text, 'L');
    if (tt__jinja_calls(r, c, "capitalize", 0)) return tt__jinja_case(r, c, text, 'C');
    if (tt__jinja_calls(r, c, "replace", 2)) return tt__jinja_replace(r, c, text);
    if (tt__jinja_calls(r, c, "join", 1)) return tt__jinja_join(r, c->at, other, text);
    if (tt__jinja_calls(r, c, "split", 2))
        return tt__jinja_split(r, c, c->argument[1].type == TT__VALUE_INTEGER ? c->argument[1].n : -1);
    const bool begins = tt__jinja_calls(r, c, "startswith", 1), ends = tt__jinja_calls(r, c, "endswith", 1);
    if ((!begins && !ends) || other.type != TT__VALUE_TEXT) return tt__jinja_refuse(r, c);
    const bool fits = text.n >= other.n && tt__jinja_steps(r, c->at, other.n / 64);
    const char *part = fits && ends ? text.text + text.n - other.n : text.text;
    return tt__jinja_make(TT__VALUE_BOOL, fits && memcmp(part, other.text, (size_t)other.n) == 0);
}

static void tt__jinja_run_body(tt__jinja_run *r, int chain);

/* Runs a macro with arguments, a chain of nodes, and returns the text that its body writes. The body sees the
   variables of the scope in which the macro is defined, not those of the call. */
static tt__jinja_value tt__jinja_run_macro(tt__jinja_run *r, const tt__jinja_call *c, tt__jinja_value macro,
                                           int chain)
{
    const tt__jinja_node *at = &r->j->nodes[macro.n];
    tt__jinja_scope *caller = r->scope, *own = (tt__jinja_scope *)tt__jinja_take(r, sizeof *own);
    int next = at->part[0];
    if (!own) return tt__jinja_make(TT__VALUE_UNDEFINED, 0);
    own->outer = macro.scope;
    for (; chain && !r->j->failed; chain = r->j->nodes[chain].next) {
        const tt__jinja_node *node = &r->j->nodes[chain];
        const bool named = node->kind == TT__JINJA_KEYWORD;
        int to = named ? at->part[0] : next;
        while (named && to && !(r->j->nodes[to].n == node->n &&
                                memcmp(r->j->nodes[to].text, node->text, (size_t)node->n) == 0))
            to = r->j->nodes[to].next;
        const tt__jinja_node *parameter = &r->j->nodes[to];
        if (!to || tt__jinja_find(r, own, parameter->text, parameter->n))
            tt__jinja_fail(r->j, TT_ERR_FORMAT, c->at->line, "the macro %.*s has no parameter for an argument"
                           "%s%.*s", (int)tt__min(at->n, 60), at->text, named ? " " : "",
                           named ? (int)tt__min(node->n, 60) : 0, named ? node->text : "");
        else tt__jinja_assign(r, own, parameter->text, parameter->n,
                              tt__jinja_eval(r, named ? node->part[0] : chain));
        if (!named) next = r->j->nodes[next].next;
    }
    r->scope = own;
    for (int p = at->part[0]; p && !r->j->failed; p = r->j->nodes[p].next) {
        const tt__jinja_node *parameter = &r->j->nodes[p];
        const tt__jinja_value none = tt__jinja_make(TT__VALUE_UNDEFINED, 0);
        if (!tt__jinja_find(r, own, parameter->text, parameter->n))
            tt__jinja_assign(r, own, parameter->text, parameter->n,
                             parameter->part[0] ? tt__jinja_eval(r, parameter->part[0]) : none);
    }
    const size_t from = r->n;
    r->captures++;
    tt__jinja_run_body(r, at->part[1]);
    r->captures--;
    r->leaving = 0;
    r->scope = caller;
    return tt__jinja_taken_back(r, from);
}

static tt__jinja_value tt__jinja_variable_of(tt__jinja_run *r, const tt__jinja_node *at);

/* Calls a macro, or a function of Jinja's or of transformers'. */
static tt__jinja_value tt__jinja_function(tt__jinja_run *r, tt__jinja_call *c, int chain)
{
    const tt__jinja_value macro = tt__jinja_variable_of(r, c->at);
    if (macro.type == TT__VALUE_MACRO) return tt__jinja_run_macro(r, c, macro, chain);
    if (tt__jinja_calls(r, c, "namespace", 0)) {
        tt__jinja_value space = tt__jinja_make(TT__VALUE_NAMESPACE, 0);
        space.scope = (tt__jinja_scope *)tt__jinja_take(r, sizeof *space.scope);
        for (; chain && !r->j->failed; chain = r->j->nodes[chain].next) {
            const tt__jinja_node node = r->j->nodes[chain];
            if (node.kind != TT__JINJA_KEYWORD)
                tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, node.line,
                               "namespace with a dictionary is not supported");
            else tt__jinja_assign(r, space.scope, node.text, node.n, tt__jinja_eval(r, node.part[0]));
        }
        return space;
    }
    tt__jinja_arguments(r, c, chain);
    if (c->n == 1 && tt__jinja_calls(r, c, "raise_exception", 1)) {
        const tt__jinja_value text = tt__jinja_to_text(r, c->at, c->argument[0]);
        tt__jinja_fail(r->j, TT_ERR_FORMAT, c->at->line, "the template refuses the conversation: %.*s",
                       (int)tt__min(text.n, 400), text.text);
        return text;
    }
    if (c->n && tt__jinja_calls(r, c, "range", 3)) {
        const int64_t from = c->n > 1 ? c->argument[0].n : 0, to = c->argument[c->n > 1].n;
        const int64_t step = c->n > 2 ? c->argument[2].n : 1, way = step < 0 ? from - to : to - from;
        bool fit = step != 0;
        for (int k = 0; k < c->n; k++)
            fit = fit && tt__jinja_number(c->argument[k]) && c->argument[k].n > INT32_MIN &&
                  c->argument[k].n < INT32_MAX;
        if (!fit) return tt__jinja_refuse(r, c);
        const int64_t n = way > 0 ? tt__ceil_div(way, step < 0 ? -step : step) : 0;
        tt__jinja_value list = tt__jinja_members(r, TT__VALUE_LIST, n);
        for (int64_t i = 0; list.members && i < list.n; i++)
            list.members[i].value = tt__jinja_make(TT__VALUE_INTEGER, from + i * step);
        list.unlisted = true;
        return list;
    }
    tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, c->at->line, "the function %.*s is not supported: do without it",
                   (int)tt__min(c->at->n, 60), c->at->text);
    return tt__jinja_make(TT__VALUE_UNDEFINED, 0);
}

static tt__jinja_value tt__jinja_apply(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value a,
                                       tt__jinja_value b)
{
    const char *op = tt__jinja_ops[at->op / 8][at->op % 8];
    double x[2];
    const bool reals = tt__jinja_reals(a, b, x), integers = tt__jinja_number(a) && tt__jinja_number(b);
    const bool numbers = reals || integers;
    const size_t from = r->n;
    int64_t sign = reals ? (x[0] > x[1]) - (x[0] < x[1]) : numbers ? (a.n > b.n) - (a.n < b.n) : 0;
    if (at->op / 8 == TT__JINJA_COMPARISONS) {
        if (*op == 'i') return tt__jinja_make(TT__VALUE_BOOL, tt__jinja_contains(r, at, a, b));
        if (op[1] == '=' && (*op == '=' || *op == '!'))
            return tt__jinja_make(TT__VALUE_BOOL, tt__jinja_equal(r, at, a, b, 0) == (*op == '='));
        if (!numbers && (a.type != TT__VALUE_TEXT || b.type != TT__VALUE_TEXT))
            tt__jinja_fail(r->j, TT_ERR_FORMAT, at->line, "%s cannot be compared with %s by %s",
                           tt__jinja_type_name(a), tt__jinja_type_name(b), op);
        else if (!numbers && tt__jinja_steps(r, at, tt__min(a.n, b.n) / 64))
            sign = tt__compare_bytes(a.text, (size_t)a.n, b.text, (size_t)b.n);
        const bool less = sign < 0, more = sign > 0;
        return tt__jinja_make(TT__VALUE_BOOL, (*op == '<' ? less : more) || (op[1] && !sign));
    }
    if (*op == '~' || (*op == '+' && a.type == TT__VALUE_TEXT && b.type == TT__VALUE_TEXT)) {
        a = tt__jinja_to_text(r, at, a);
        b = tt__jinja_to_text(r, at, b);
        tt__jinja_write(r, a.text, a.n);
        tt__jinja_write(r, b.text, b.n);
        return tt__jinja_taken_back(r, from);
    }
    if (*op == '+' && a.type == TT__VALUE_LIST && b.type == TT__VALUE_LIST) {
        tt__jinja_value list = tt__jinja_members(r, TT__VALUE_LIST, a.n + b.n);
        for (int64_t i = 0; list.members && i < list.n; i++)
            list.members[i] = i < a.n ? a.members[i] : b.members[i - a.n];
        list.unlisted = a.unlisted;
        return list;
    }
    const int64_t limit = (int64_t)1 << 31;
    const bool divides = *op == '/' && !op[1] && numbers && x[1] != 0;
    tt__jinja_value real = tt__jinja_make(TT__VALUE_REAL, 0);
    if (divides || (reals && strchr("+-*", *op))) {
        real.real = *op == '/' ? x[0] / x[1] : *op == '+' ? x[0] + x[1] : *op == '-' ? x[0] - x[1]
                                                                            : x[0] * x[1];
        if (isfinite(real.real)) return real;
    }
    const bool fit = integers && a.n < limit && a.n > -limit && b.n < limit && b.n > -limit;
    if (!fit || (strchr("/%", *op) && !b.n)) {
        tt__jinja_fail(r->j, TT_ERR_FORMAT, at->line, "%s %s %s cannot be computed", tt__jinja_type_name(a),
                       op, fit ? "0" : tt__jinja_type_name(b));
        return a;
    }
    if (strchr("/%", *op)) { /* Python rounds quotients down */
        const int64_t rest = (a.n % b.n + b.n) % b.n;
        return tt__jinja_make(TT__VALUE_INTEGER, *op == '%' ? rest : (a.n - rest) / b.n);
    }
    return tt__jinja_make(TT__VALUE_INTEGER, *op == '+' ? a.n + b.n : *op == '-' ? a.n - b.n : a.n * b.n);
}

/* Evaluates a list or a dictionary that the template writes out, such as [1, x]. */
static tt__jinja_value tt__jinja_literal(tt__jinja_run *r, const tt__jinja_node *at)
{
    const bool dict = at->kind == TT__JINJA_DICT;
    int64_t n = 0;
    for (int item = at->part[0]; item; item = r->j->nodes[item].next) n++;
    tt__jinja_value v = tt__jinja_members(r, dict ? TT__VALUE_DICT : TT__VALUE_LIST, n);
    n = 0;
    for (int item = at->part[0]; item && !r->j->failed; item = r->j->nodes[item].next) {
        const int first = r->j->nodes[item].part[0];
        const tt__jinja_value key = dict ? tt__jinja_eval(r, first) : tt__jinja_text("", 0);
        if (key.type != TT__VALUE_TEXT)
            tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "a key of a dictionary is %s; expected a text",
                           tt__jinja_type_name(key));
        const tt__jinja_value value = tt__jinja_eval(r, dict ? r->j->nodes[item].part[1] : item);
        if (r->j->failed) break;
        v.members[n].key = dict ? key.text : NULL;
        v.members[n].key_bytes = key.n;
        v.members[n++].value = value;
    }
    v.unlisted = at->op;
    return v;
}

static tt__jinja_value tt__jinja_called(tt__jinja_run *r, const tt__jinja_node *at)
{
    const tt__jinja_node *callee = at->kind == TT__JINJA_CALL ? &r->j->nodes[at->part[0]] : at;
    tt__jinja_call c;
    memset(&c, 0, sizeof c);
    c.at = callee;
    c.what = at->kind == TT__JINJA_FILTER ? "filter" : at->kind == TT__JINJA_TEST ? "test" : "method";
    if (at->kind == TT__JINJA_CALL && callee->kind == TT__JINJA_NAME) {
        c.what = "function";
        return tt__jinja_function(r, &c, at->part[1]);
    }
    if (callee->kind != TT__JINJA_ATTRIBUTE && at->kind == TT__JINJA_CALL)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "a call without the name of a function or method "
                       "is not supported");
    c.on = tt__jinja_eval(r, callee->part[0]);
    tt__jinja_arguments(r, &c, at->part[1]);
    if (r->j->failed) return c.on;
    if (at->kind == TT__JINJA_TEST) return tt__jinja_make(TT__VALUE_BOOL, tt__jinja_test(r, &c));
    return at->kind == TT__JINJA_FILTER ? tt__jinja_filter(r, &c) : tt__jinja_method(r, &c);
}

static tt__jinja_value tt__jinja_variable_of(tt__jinja_run *r, const tt__jinja_node *at)
{
    for (const tt__jinja_scope *s = r->scope; s; s = s->outer) {
        const tt__jinja_variable *v = tt__jinja_find(r, s, at->text, at->n);
        if (v) return v->value;
    }
    return tt__jinja_make(TT__VALUE_UNDEFINED, 0);
}

static tt__jinja_value tt__jinja_value_of(tt__jinja_run *r, const tt__jinja_node *at)
{
    const tt__jinja_value undefined = tt__jinja_make(TT__VALUE_UNDEFINED, 0);
    tt__jinja_value a, bounds[3];
    switch (at->kind) {
    case TT__JINJA_TEXT: return tt__jinja_text(at->text, at->n);
    case TT__JINJA_INTEGER: return tt__jinja_make(TT__VALUE_INTEGER, at->n);
    case TT__JINJA_REAL:
        a = tt__jinja_make(TT__VALUE_REAL, 0);
        a.real = tt__json_double(at->text, (size_t)at->n);
        return a;
    case TT__JINJA_BOOL: return tt__jinja_make(TT__VALUE_BOOL, at->n);
    case TT__JINJA_NONE: return tt__jinja_make(TT__VALUE_NONE, 0);
    case TT__JINJA_NAME: return tt__jinja_variable_of(r, at);
    case TT__JINJA_LIST:
    case TT__JINJA_DICT: return tt__jinja_literal(r, at);
    case TT__JINJA_CALL:
    case TT__JINJA_FILTER:
    case TT__JINJA_TEST: return tt__jinja_called(r, at);
    default: break;
    }
    a = tt__jinja_eval(r, at->part[0]);
    if (r->j->failed) return a;
    switch (at->kind) {
    case TT__JINJA_ATTRIBUTE: return tt__jinja_index(r, at, a, tt__jinja_text(at->text, at->n));
    case TT__JINJA_INDEX: return tt__jinja_index(r, at, a, tt__jinja_eval(r, at->part[1]));
    case TT__JINJA_SLICE:
        for (int k = 0; k < 3; k++)
            bounds[k] = at->part[1 + k] ? tt__jinja_eval(r, at->part[1 + k]) : undefined;
        return tt__jinja_slice(r, at, a, bounds);
    case TT__JINJA_NOT: return tt__jinja_make(TT__VALUE_BOOL, !tt__jinja_true(a));
    case TT__JINJA_NEGATIVE:
        a.real = -a.real;
        if (a.type == TT__VALUE_REAL) return a;
        if (!tt__jinja_number(a))
            tt__jinja_fail(r->j, TT_ERR_FORMAT, at->line, "a minus precedes %s; expected a number",
                           tt__jinja_type_name(a));
        return tt__jinja_make(TT__VALUE_INTEGER, r->j->failed ? 0 : -a.n);
    case TT__JINJA_CHOICE:
        if (tt__jinja_true(a)) return tt__jinja_eval(r, at->part[1]);
        return at->part[2] ? tt__jinja_eval(r, at->part[2]) : undefined;
    default: break;
    }
    /* `or` with a true value and `and` with a false value have that value. */
    if (at->op < 16 && tt__jinja_true(a) == (at->op < 8)) return a;
    const tt__jinja_value b = tt__jinja_eval(r, at->part[1]);
    return at->op < 16 || r->j->failed ? b : tt__jinja_apply(r, at, a, b);
}

static tt__jinja_value tt__jinja_eval(tt__jinja_run *r, int node)
{
    const tt__jinja_node *at = &r->j->nodes[node];
    tt__jinja_value v = tt__jinja_make(TT__VALUE_UNDEFINED, 0);
    if (++r->depth > TT__JINJA_DEPTH)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "more than %d levels of nesting are not supported",
                       TT__JINJA_DEPTH);
    if (tt__jinja_steps(r, at, 1)) v = tt__jinja_value_of(r, at);
    r->depth--;
    return v;
}

/* Defines the variable `loop` for item i of a list. */
static void tt__jinja_loop(tt__jinja_run *r, tt__jinja_value list, int64_t i)
{
    const tt__jinja_value undefined = tt__jinja_make(TT__VALUE_UNDEFINED, 0);
    const struct { const char *name; tt__jinja_type type; int64_t n; } numbers[] = {
        {"index", TT__VALUE_INTEGER, i + 1}, {"index0", TT__VALUE_INTEGER, i},
            {"first", TT__VALUE_BOOL, i == 0},
        {"last", TT__VALUE_BOOL, i + 1 == list.n}, {"length", TT__VALUE_INTEGER, list.n},
        {"revindex", TT__VALUE_INTEGER, list.n - i}, {"revindex0", TT__VALUE_INTEGER, list.n - i - 1},
        {"previtem", TT__VALUE_UNDEFINED, -1}, {"nextitem", TT__VALUE_UNDEFINED, 1}};
    tt__jinja_value loop = tt__jinja_members(r, TT__VALUE_DICT, TT__COUNT(numbers));
    for (int k = 0; k < TT__COUNT(numbers) && loop.members; k++) {
        const int64_t other = i + numbers[k].n;
        loop.members[k].key = numbers[k].name;
        loop.members[k].key_bytes = (int64_t)strlen(numbers[k].name);
        loop.members[k].value = numbers[k].type ? tt__jinja_make(numbers[k].type, numbers[k].n)
                              : other >= 0 && other < list.n ? list.members[other].value : undefined;
    }
    tt__jinja_define(r, "loop", loop);
}

/* Opens a scope and assigns an item to the variables of a loop. Returns false after an error. */
static bool tt__jinja_bind(tt__jinja_run *r, const tt__jinja_node *at, tt__jinja_value item)
{
    const tt__jinja_node *first = &r->j->nodes[at->part[4]], *second = &r->j->nodes[first->next];
    tt__jinja_scope *scope = (tt__jinja_scope *)tt__jinja_take(r, sizeof *scope);
    if (!scope) return false;
    scope->outer = r->scope;
    r->scope = scope;
    if (first->next && (item.type != TT__VALUE_LIST || item.n != 2))
        tt__jinja_fail(r->j, TT_ERR_FORMAT, at->line, "the loop has two variables, but an item is %s; "
                       "expected a list of two", tt__jinja_type_name(item));
    if (r->j->failed) return false;
    tt__jinja_assign(r, scope, first->text, first->n, first->next ? item.members[0].value : item);
    if (first->next) tt__jinja_assign(r, scope, second->text, second->n, item.members[1].value);
    return !r->j->failed;
}

static void tt__jinja_run_for(tt__jinja_run *r, const tt__jinja_node *at)
{
    tt__jinja_scope *outer = r->scope;
    tt__jinja_value list = tt__jinja_eval(r, at->part[0]);
    if (!r->j->failed) list = tt__jinja_list(r, at, list);
    if (at->part[3] && !r->j->failed) {
        tt__jinja_value kept = tt__jinja_members(r, TT__VALUE_LIST, list.n);
        int64_t n = 0;
        for (int64_t i = 0; i < list.n && !r->j->failed; i++) {
            const bool bound = tt__jinja_bind(r, at, list.members[i].value);
            if (bound && tt__jinja_true(tt__jinja_eval(r, at->part[3])))
                kept.members[n++] = list.members[i];
            r->scope = outer;
        }
        kept.n = n;
        list = kept;
    }
    for (int64_t i = 0; i < list.n && !r->j->failed && r->leaving != TT__JINJA_BREAK; i++) {
        r->leaving = 0;
        if (tt__jinja_bind(r, at, list.members[i].value)) tt__jinja_loop(r, list, i);
        tt__jinja_run_body(r, at->part[1]);
        r->scope = outer;
    }
    r->leaving = 0;
    if (!list.n && !r->j->failed) tt__jinja_run_body(r, at->part[2]);
}

/* Runs a block {% set %} or {% generation %}. Variables that the block sets end with the block. */
static void tt__jinja_run_block(tt__jinja_run *r, const tt__jinja_node *at)
{
    tt__jinja_scope *outer = r->scope, *scope = (tt__jinja_scope *)tt__jinja_take(r, sizeof *scope);
    const size_t from = r->n;
    const bool set = at->kind == TT__JINJA_SET_BLOCK;
    if (!scope) return;
    if (!set && r->captures)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, at->line, "a generation tag within a set or generation tag "
                       "is not supported: move the tag out of the block");
    scope->outer = outer;
    r->scope = scope;
    r->captures++;
    tt__jinja_run_body(r, at->part[1]);
    r->captures--;
    r->scope = outer;
    if (set) tt__jinja_assign(r, outer, at->text, at->n, tt__jinja_taken_back(r, from));
    else if (!TT__GROW(r->j->ctx, r->spans, r->n_spans, r->cap_spans)) r->j->failed = true;
    else r->spans[r->n_spans].begin = from, r->spans[r->n_spans++].end = r->n;
}

static void tt__jinja_run_set(tt__jinja_run *r, const tt__jinja_node *at)
{
    const tt__jinja_value value = tt__jinja_eval(r, at->part[0]);
    const tt__jinja_node *attribute = &r->j->nodes[at->part[1]];
    const tt__jinja_value space = at->part[1] ? tt__jinja_variable_of(r, at) : value;
    if (!at->part[1]) tt__jinja_assign(r, r->scope, at->text, at->n, value);
    else if (space.type != TT__VALUE_NAMESPACE)
        tt__jinja_fail(r->j, TT_ERR_FORMAT, at->line, "an attribute of %s cannot be set; expected a "
                       "namespace",
                       tt__jinja_type_name(space));
    else tt__jinja_assign(r, space.scope, attribute->text, attribute->n, value);
}

static void tt__jinja_run_body(tt__jinja_run *r, int chain)
{
    if (++r->depth > TT__JINJA_DEPTH && chain)
        tt__jinja_fail(r->j, TT_ERR_UNSUPPORTED, r->j->nodes[chain].line,
                       "more than %d levels of nesting are not supported", TT__JINJA_DEPTH);
    for (int node = chain; node && !r->leaving && !r->j->failed; node = r->j->nodes[node].next) {
        const tt__jinja_node *at = &r->j->nodes[node];
        tt__jinja_value v;
        if (!tt__jinja_steps(r, at, 1)) break;
        switch (at->kind) {
        case TT__JINJA_RAW: tt__jinja_write(r, at->text, at->n); break;
        case TT__JINJA_PRINT:
            v = tt__jinja_eval(r, at->part[0]);
            if (!r->j->failed) v = tt__jinja_to_text(r, at, v);
            if (!r->j->failed) tt__jinja_write(r, v.text, v.n);
            break;
        case TT__JINJA_IF:
            v = tt__jinja_eval(r, at->part[0]);
            if (!r->j->failed) tt__jinja_run_body(r, at->part[tt__jinja_true(v) ? 1 : 2]);
            break;
        case TT__JINJA_FOR: tt__jinja_run_for(r, at); break;
        case TT__JINJA_SET: tt__jinja_run_set(r, at); break;
        case TT__JINJA_MACRO:
            v = tt__jinja_make(TT__VALUE_MACRO, node);
            v.scope = r->scope;
            tt__jinja_assign(r, r->scope, at->text, at->n, v);
            break;
        case TT__JINJA_BREAK:
        case TT__JINJA_CONTINUE: r->leaving = at->kind; break;
        default: tt__jinja_run_block(r, at); break;
        }
    }
    r->depth--;
}

/* Renders the template into r->out. */
static tt_status tt__jinja_render(tt__jinja_run *r)
{
    if (tt__jinja_write(r, "", 0)) tt__jinja_run_body(r, r->j->first);
    return r->j->failed ? r->j->ctx->status : TT_OK;
}
