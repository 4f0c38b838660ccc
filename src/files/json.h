#pragma once
#include "../base/base.h"
#include "lists.h"
#include "utf8.h"

/* -------------------------------------------------------------------------------------------------- JSON */

/* This parser reads JSON as in RFC 8259. The parser refuses duplicate keys, unpaired surrogates, numbers that
   a double cannot hold, and nesting deeper than TT__JSON_DEPTH; the RFC leaves the decision to the parser.
   The parser skips a leading byte order mark. */
#define TT__JSON_DEPTH 64
#define TT__JSON_NUMBER 512 /* max characters of a number in a text */

typedef enum tt__json_kind {
    TT__JSON_NULL, TT__JSON_FALSE, TT__JSON_TRUE, TT__JSON_NUMBER_KIND, TT__JSON_STRING, TT__JSON_ARRAY,
    TT__JSON_OBJECT
} tt__json_kind;

/* A value of a JSON text. Nodes are stored in the order of the text: the first child of `nodes[i]` is
   `nodes[i + 1]`, and the next sibling of `nodes[i]` is `nodes[nodes[i].after]`. */
typedef struct tt__json_node {
    uint8_t kind;
    bool exact;              /* the number is an integer that `integer` holds */
    int32_t count;           /* number of an array's or object's members, or of a string's bytes */
    int32_t after;           /* index of the node that follows this node and all its members */
    uint32_t offset;         /* offset of the value's first byte in the text */
    uint32_t key, key_bytes; /* a member's key: offset in `pool`; number of bytes without the NUL */
    double number;   /* a number's value; in a safetensors header, the index of a member's tensor, or -1 */
    int64_t integer; /* an integer's value; a string's offset in `pool`; index of an object's first member in
                        `sorted` */
} tt__json_node;

typedef struct tt__json {
    tt_context *ctx;
    const char *path;        /* path of the file, for errors */
    const char *text;
    size_t bytes, at;
    size_t base;             /* offset of the text in its file, for errors */
    long long line;          /* number of the text's line in its file, for errors; 0: errors name no line */
    tt__json_node *nodes;
    int count, capacity;
    uint32_t *sorted;        /* indices of the members of each object, sorted by key */
    int n_sorted, cap_sorted;
    char *pool;              /* all strings with escapes decoded, each followed by a NUL */
    size_t used;
} tt__json;

static void tt__json_free(tt__json *j)
{
    tt__free(j->ctx, j->nodes);
    tt__free(j->ctx, j->sorted);
    tt__free(j->ctx, j->pool);
    memset(j, 0, sizeof *j);
}

TT_PRINTF(3, 4)
static bool tt__json_fail(const tt__json *j, size_t offset, const char *format, ...)
{
    char what[512], line[40] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (j->line) snprintf(line, sizeof line, ", line %lld", j->line);
    tt__fail(j->ctx, TT_ERR_FORMAT, "'%s'%s, byte %zu: not valid JSON: %s", j->path, line, j->base + offset,
             what);
    return false;
}

/* Returns the next character of the text; 0 at the end. */
static char tt__json_peek(const tt__json *j) { return j->at < j->bytes ? j->text[j->at] : 0; }

/* Fails with a message that names `offset`, what was expected there and what was found. */
static bool tt__json_expected(const tt__json *j, size_t offset, const char *expected)
{
    char found[32];
    unsigned char c = (unsigned char)tt__json_peek(j);
    if (j->at >= j->bytes) snprintf(found, sizeof found, "the end of the text");
    else if (c > 0x20 && c < 0x7F) snprintf(found, sizeof found, "'%c'", c);
    else snprintf(found, sizeof found, "byte 0x%02x", c);
    return tt__json_fail(j, offset, "%s, found %s", expected, found);
}

static bool tt__json_take(tt__json *j, char c) /* if c is next, moves past it and returns true */
{
    if (tt__json_peek(j) != c) return false;
    j->at++;
    return true;
}

static void tt__json_skip_space(tt__json *j)
{
    for (char c = tt__json_peek(j); c == ' ' || c == '\n' || c == '\r' || c == '\t'; c = tt__json_peek(j))
        j->at++;
}

static int tt__json_push(tt__json *j, tt__json_kind kind, size_t offset) /* returns the new node's index, or
                                                                            -1 after an error */
{
    if (!TT__GROW(j->ctx, j->nodes, j->count, j->capacity)) {
        tt__fail(j->ctx, TT_ERR_MEMORY, "out of memory for the %d values of '%s': free memory", j->count + 1,
                 j->path);
        return -1;
    }
    tt__json_node *node = &j->nodes[j->count];
    memset(node, 0, sizeof *node);
    node->kind = (uint8_t)kind;
    node->offset = (uint32_t)offset;
    node->after = j->count + 1;
    return j->count++;
}

static bool tt__json_hex4(tt__json *j, uint32_t *value) /* reads the digits of \uXXXX */
{
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    *value = 0;
    for (int i = 0; i < 4; i++, j->at++) {
        char c = tt__json_peek(j);
        const char *digit = c ? strchr(digits, c) : NULL;
        if (!digit) return tt__json_expected(j, j->at, "\\u needs four hexadecimal digits");
        *value = *value << 4 | ((uint32_t)(digit - digits) & 15);
    }
    return true;
}

static bool tt__json_escape(tt__json *j) /* appends the character of an escape sequence to the pool */
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    size_t from = j->at++;
    char c = tt__json_peek(j);
    const char *simple = c ? strchr(names, c) : NULL;
    if (simple) {
        j->pool[j->used++] = values[simple - names];
        j->at++;
        return true;
    }
    if (c != 'u')
        return tt__json_expected(j, from, "a backslash must be followed by one of \" \\ / b f n r t u");
    uint32_t code, low;
    j->at++;
    if (!tt__json_hex4(j, &code)) return false;
    if (code >= 0xDC00 && code <= 0xDFFF)
        return tt__json_fail(j, from, "\\u%04x is the second half of a surrogate pair without the first",
                             code);
    if (code >= 0xD800 && code <= 0xDBFF) {
        if (!tt__json_take(j, '\\') || !tt__json_take(j, 'u'))
            return tt__json_fail(j, from, "\\u%04x is the first half of a surrogate pair without the second",
                                 code);
        if (!tt__json_hex4(j, &low)) return false;
        if (low < 0xDC00 || low > 0xDFFF)
            return tt__json_fail(j, from, "\\u%04x\\u%04x is not a valid surrogate pair", code, low);
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    j->used += (size_t)tt__utf8_put(code, j->pool + j->used);
    return true;
}

/* Reads a string, from its opening quote on, decodes it and appends it to the pool. The pool, as large as the
   text, cannot overflow: a decoded string with its NUL is shorter than the string with its quotes. */
static bool tt__json_string(tt__json *j, uint32_t *start, uint32_t *bytes)
{
    size_t opened = j->at++;
    *start = (uint32_t)j->used;
    while (j->at < j->bytes && j->text[j->at] != '"') {
        unsigned char c = (unsigned char)j->text[j->at];
        if (c == '\\') {
            if (!tt__json_escape(j)) return false;
        } else if (c < 0x20) {
            return tt__json_fail(j, j->at, "a string contains the control character 0x%02x, which must be "
                                 "written \\u%04x", c, c);
        } else {
            size_t from = j->at;
            if (tt__utf8_next(j->text, j->bytes, &j->at) == TT__INVALID)
                return tt__json_fail(j, from, "byte 0x%02x is not valid UTF-8", c);
            memcpy(j->pool + j->used, j->text + from, j->at - from);
            j->used += j->at - from;
        }
    }
    if (j->at >= j->bytes)
        return tt__json_fail(j, opened, "the string that starts here has no closing quote");
    j->at++;
    *bytes = (uint32_t)(j->used - *start);
    j->pool[j->used++] = 0;
    return true;
}

/* Returns the value of a number as strtod computes it, but with "." as the decimal point in any locale. */
static double tt__json_double(const char *number, size_t n)
{
    char copy[TT__JSON_NUMBER + 1], *point, *end;
    memcpy(copy, number, n);
    copy[n] = 0;
    double value = strtod(copy, &end);
    if (*end && (point = strchr(copy, '.')) != NULL) {
        *point = localeconv()->decimal_point[0];
        value = strtod(copy, &end);
    }
    return value;
}

static bool tt__json_digit(const tt__json *j) { return tt__json_peek(j) >= '0' && tt__json_peek(j) <= '9'; }

static bool tt__json_digits(tt__json *j, const char *expected) /* reads one or more digits */
{
    if (!tt__json_digit(j)) return tt__json_expected(j, j->at, expected);
    while (tt__json_digit(j)) j->at++;
    return true;
}

static bool tt__json_number(tt__json *j)
{
    size_t from = j->at;
    bool negative = tt__json_take(j, '-'), integer = true, fits = true;
    uint64_t magnitude = 0, limit = (uint64_t)INT64_MAX + (negative ? 1 : 0);
    if (!tt__json_digit(j)) return tt__json_expected(j, j->at, "expected a digit");
    if (tt__json_take(j, '0') && tt__json_digit(j))
        return tt__json_fail(j, from, "a number begins with a superfluous zero: remove it");
    for (; tt__json_digit(j); j->at++) {
        uint64_t digit = (uint64_t)(j->text[j->at] - '0');
        if (magnitude > (limit - digit) / 10) fits = false;
        else magnitude = magnitude * 10 + digit;
    }
    if (tt__json_take(j, '.')) {
        integer = false;
        if (!tt__json_digits(j, "expected a digit after the decimal point")) return false;
    }
    if (tt__json_take(j, 'e') || tt__json_take(j, 'E')) {
        integer = false;
        if (!tt__json_take(j, '+')) tt__json_take(j, '-');
        if (!tt__json_digits(j, "expected a digit in the exponent")) return false;
    }
    size_t length = j->at - from;
    if (length > TT__JSON_NUMBER)
        return tt__json_fail(j, from, "a number has %zu characters, but at most %d are possible", length,
                             TT__JSON_NUMBER);
    int self = tt__json_push(j, TT__JSON_NUMBER_KIND, from);
    if (self < 0) return false;
    tt__json_node *node = &j->nodes[self];
    node->exact = integer && fits;
    if (node->exact)
        node->integer = !negative ? (int64_t)magnitude : magnitude ? -(int64_t)(magnitude - 1) - 1 : 0;
    node->number = tt__json_double(j->text + from, length);
    return isfinite(node->number) || tt__json_fail(j, from, "a number is too large for a double");
}

static int tt__json_compare_keys(const tt__json *j, uint32_t a, uint32_t b)
{
    const tt__json_node *x = &j->nodes[a], *y = &j->nodes[b];
    return tt__compare_bytes(j->pool + x->key, x->key_bytes, j->pool + y->key, y->key_bytes);
}

static bool tt__json_less(const void *arg, uint32_t a, uint32_t b)
{
    int order = tt__json_compare_keys((const tt__json *)arg, a, b);
    return order ? order < 0 : a < b;
}

/* Sorts the members of an object by key, after the object was read to its end. Fails if two members have the
   same key. */
static bool tt__json_index(tt__json *j, int object)
{
    int from = j->n_sorted, member = object + 1;
    j->nodes[object].integer = from;
    for (int i = 0; i < j->nodes[object].count; i++) {
        if (!TT__GROW(j->ctx, j->sorted, j->n_sorted, j->cap_sorted))
            return tt__fail(j->ctx, TT_ERR_MEMORY, "out of memory for the %d keys of '%s': free memory",
                            j->n_sorted + 1, j->path), false;
        j->sorted[j->n_sorted++] = (uint32_t)member;
        member = j->nodes[member].after;
    }
    if (j->n_sorted - from < 2) return true;
    tt__sort_indices(j->sorted + from, (size_t)(j->n_sorted - from), tt__json_less, j);
    for (int i = from + 1; i < j->n_sorted; i++) {
        const tt__json_node *node = &j->nodes[j->sorted[i]];
        if (tt__json_compare_keys(j, j->sorted[i - 1], j->sorted[i]) == 0)
            return tt__json_fail(j, node->offset, "the key \"%.200s\" is twice in one object, and this is "
                                 "its second value: remove one", j->pool + node->key);
    }
    return true;
}

static bool tt__json_value(tt__json *j, int depth)
{
    static const char *const words[] = {"null", "false", "true"}; /* in the order of enum tt__json_kind */
    char c = tt__json_peek(j), close = c == '{' ? '}' : ']';
    bool object = c == '{';
    if (c == '-' || tt__json_digit(j)) return tt__json_number(j);
    for (int k = 0; k < TT__COUNT(words); k++) {
        size_t n = strlen(words[k]);
        if (c != words[k][0]) continue;
        if (j->bytes - j->at < n || memcmp(j->text + j->at, words[k], n) != 0)
            return tt__json_fail(j, j->at,
                                 "expected a value: an object, array, string, number, true, false or null");
        j->at += n;
        return tt__json_push(j, (tt__json_kind)k, j->at - n) >= 0;
    }
    if (c == '"') {
        uint32_t start, bytes;
        int self = tt__json_push(j, TT__JSON_STRING, j->at);
        if (self < 0 || !tt__json_string(j, &start, &bytes)) return false;
        j->nodes[self].integer = start;
        j->nodes[self].count = (int32_t)bytes;
        return true;
    }
    if (c != '{' && c != '[') return tt__json_expected(j, j->at, "expected a value");
    if (depth == TT__JSON_DEPTH)
        return tt__json_fail(j, j->at,
                             "arrays and objects are nested more than %d deep, which is not supported",
                             TT__JSON_DEPTH);

    int self = tt__json_push(j, object ? TT__JSON_OBJECT : TT__JSON_ARRAY, j->at++);
    if (self < 0) return false;
    tt__json_skip_space(j);
    for (bool more = tt__json_peek(j) != close; more;) {
        uint32_t key = 0, key_bytes = 0;
        if (object) {
            if (tt__json_peek(j) != '"')
                return tt__json_expected(j, j->at, "expected a key in double quotes");
            if (!tt__json_string(j, &key, &key_bytes)) return false;
            tt__json_skip_space(j);
            if (!tt__json_take(j, ':')) return tt__json_expected(j, j->at, "expected ':' after a key");
            tt__json_skip_space(j);
        }
        int child = j->count;
        if (!tt__json_value(j, depth + 1)) return false;
        j->nodes[child].key = key;
        j->nodes[child].key_bytes = key_bytes;
        j->nodes[self].count++;
        tt__json_skip_space(j);
        more = tt__json_take(j, ',');
        if (more) tt__json_skip_space(j);
        else if (tt__json_peek(j) != close)
            return tt__json_expected(j, j->at, object ? "expected ',' or '}'" : "expected ',' or ']'");
    }
    j->at++;
    j->nodes[self].after = j->count;
    return !object || tt__json_index(j, self);
}

/* Parses a text that is one JSON value, which becomes node 0. The text must live only until the function
   returns; path and context must live as long as j. base: offset of the text in its file; line: the text's
   line in its file, or 0; both are for errors. The caller frees j even after an error. */
static tt_status tt__json_parse_line(tt__json *j, tt_context *ctx, const char *path, long long line,
                                     size_t base, const char *text, size_t bytes)
{
    memset(j, 0, sizeof *j);
    j->ctx = ctx;
    j->path = path;
    j->line = line;
    j->text = text;
    j->bytes = bytes;
    j->base = base;
    if (bytes > INT32_MAX / 2)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' has %zu bytes of JSON, but at most %d are possible", path,
                        bytes, INT32_MAX / 2);
    j->pool = (char *)tt__alloc(ctx, bytes + 1);
    if (!j->pool) return TT_ERR_MEMORY;
    if (bytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) j->at = 3;
    tt__json_skip_space(j);
    if (!tt__json_value(j, 0)) return ctx->status;
    tt__json_skip_space(j);
    if (j->at < bytes)
        return tt__json_expected(j, j->at, "expected the end of the text after the value"), ctx->status;
    j->text = NULL;
    return TT_OK;
}

static tt_status tt__json_parse(tt__json *j, tt_context *ctx, const char *path, size_t base, const char *text,
                                size_t bytes)
{
    return tt__json_parse_line(j, ctx, path, 0, base, text, bytes);
}

static tt_status tt__json_open(tt__json *j, tt_context *ctx, const char *path)
{
    tt__file_bytes file;
    memset(j, 0, sizeof *j);
    tt_status status = tt__file_open(ctx, path, &file);
    if (status == TT_OK) status = tt__json_parse(j, ctx, path, 0, file.bytes, file.size);
    tt__file_close(ctx, &file);
    return status;
}

/* Returns the node of member `key` of an object. Returns -1 if the object has no such member, or if the node
   is no object. */
static int tt__json_get(const tt__json *j, int object, const char *key)
{
    if (object < 0 || j->nodes[object].kind != TT__JSON_OBJECT || !j->nodes[object].count) return -1;
    const uint32_t *members = j->sorted + j->nodes[object].integer;
    size_t low = 0, high = (size_t)j->nodes[object].count, bytes = strlen(key);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const tt__json_node *node = &j->nodes[members[middle]];
        int order = tt__compare_bytes(j->pool + node->key, node->key_bytes, key, bytes);
        if (order == 0) return (int)members[middle];
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return -1;
}

/* Returns the text of a string node. Returns NULL if the node is not a string, or if the string holds a
   NUL. */
static const char *tt__json_text(const tt__json *j, int node)
{
    if (node < 0 || j->nodes[node].kind != TT__JSON_STRING) return NULL;
    const char *text = j->pool + j->nodes[node].integer;
    return strlen(text) == (size_t)j->nodes[node].count ? text : NULL;
}

static const char *tt__json_kind_name(const tt__json *j, int node)
{
    static const char *const names[] = {"null", "false", "true", "a number", "a string", "an array",
                                        "an object"};
    return names[j->nodes[node].kind];
}

/* Fails because member `key`, at `node`, is not as expected. found: a description of the member's value;
   NULL: the message names the kind of the value. */
static tt_status tt__json_wrong(const tt__json *j, const char *key, int node, const char *found,
                                const char *expected)
{
    return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s', byte %zu: \"%s\" is %s; expected %s", j->path,
                    j->base + j->nodes[node].offset, key, found ? found : tt__json_kind_name(j, node),
                    expected);
}

/* The functions tt__json_read_... read a member of a configuration. All leave *value unchanged if the key is
   absent or null, which is an error if the key is `required`. A value of another kind or out of range is an
   error that names file, key and byte.

   tt__json_member returns the node of a member, whose kind must be one of `kinds` (bits 1 << TT__JSON_...);
   -1 if the member is absent or null, and after an error. */
static int tt__json_member(const tt__json *j, int object, const char *key, bool required, int kinds,
                           const char *expected, tt_status *status)
{
    int node = tt__json_get(j, object, key);
    *status = TT_OK;
    if (node >= 0 && kinds >> j->nodes[node].kind & 1) return node;
    if (node >= 0 && j->nodes[node].kind != TT__JSON_NULL)
        *status = tt__json_wrong(j, key, node, NULL, expected);
    else if (required)
        *status = tt__fail(j->ctx, TT_ERR_FORMAT, "'%s' has no \"%s\", which is required: add it", j->path,
                           key);
    return -1;
}

static tt_status tt__json_read_int(const tt__json *j, int object, const char *key, bool required, int64_t min,
                                   int64_t max, int64_t *value)
{
    tt_status status;
    char expected[96], found[32];
    snprintf(expected, sizeof expected, "an integer from %lld to %lld", (long long)min, (long long)max);
    int node = tt__json_member(j, object, key, required, 1 << TT__JSON_NUMBER_KIND, expected, &status);
    if (node < 0) return status;
    const tt__json_node *at = &j->nodes[node];
    if (at->exact && at->integer >= min && at->integer <= max) return *value = at->integer, TT_OK;
    snprintf(found, sizeof found, "%lld", (long long)at->integer);
    return tt__json_wrong(j, key, node, at->exact ? found : NULL, expected);
}

/* Reads the number at `node` as a float. Fails unless the number is in [min, below). */
static tt_status tt__json_float_at(const tt__json *j, const char *key, int node, float min, float below,
                                   float *value)
{
    if (j->nodes[node].kind != TT__JSON_NUMBER_KIND) return tt__json_wrong(j, key, node, NULL, "a number");
    double x = j->nodes[node].number;
    if (fabs(x) <= FLT_MAX && (float)x >= min && (float)x < below) return *value = (float)x, TT_OK;
    char found[32], expected[96];
    int n = snprintf(expected, sizeof expected, "a number that a float holds, of at least %g", min);
    if (isfinite(below)) snprintf(expected + n, sizeof expected - (size_t)n, " and below %g", below);
    snprintf(found, sizeof found, "%g", x);
    return tt__json_wrong(j, key, node, found, expected);
}

static tt_status tt__json_read_float(const tt__json *j, int object, const char *key, float min, float below,
                                     float *value)
{
    tt_status status;
    int node = tt__json_member(j, object, key, false, 1 << TT__JSON_NUMBER_KIND, "a number", &status);
    return node < 0 ? status : tt__json_float_at(j, key, node, min, below, value);
}

static tt_status tt__json_read_bool(const tt__json *j, int object, const char *key, bool *value)
{
    const int kinds = 1 << TT__JSON_TRUE | 1 << TT__JSON_FALSE;
    tt_status status;
    int node = tt__json_member(j, object, key, false, kinds, "true or false", &status);
    if (node >= 0) *value = j->nodes[node].kind == TT__JSON_TRUE;
    return status;
}

static tt_status tt__json_read_string(const tt__json *j, int object, const char *key, bool required,
                                      const char **value) /* *value lives as long as j */
{
    static const char expected[] = "a string without U+0000";
    tt_status status;
    int node = tt__json_member(j, object, key, required, 1 << TT__JSON_STRING, expected, &status);
    if (node < 0) return status;
    if (!tt__json_text(j, node)) return tt__json_wrong(j, key, node, NULL, expected);
    *value = tt__json_text(j, node);
    return TT_OK;
}

static void tt__json_quote(tt__text_buffer *text, const char *string)
{
    tt__print(text, "\"");
    while (*string) {
        int plain = 0;
        while ((unsigned char)string[plain] >= 0x20 && string[plain] != '"' && string[plain] != '\\' &&
               plain < INT_MAX)
            plain++;
        if (plain) tt__print(text, "%.*s", plain, string);
        else tt__print(text, *string == '"' || *string == '\\' ? "\\%c" : "\\u%04x", *string);
        string += plain ? plain : 1;
    }
    tt__print(text, "\"");
}

static tt_status tt__write_bytes(tt_context *ctx, const char *path, const char *bytes, size_t n)
{
    tt__writer *w = (tt__writer *)tt__alloc(ctx, sizeof *w);
    if (!w) return TT_ERR_MEMORY;
    if (tt__writer_begin(w, ctx, path) == TT_OK) tt__write(w, bytes, n);
    tt_status status = tt__writer_end(w);
    tt__free(ctx, w);
    return status;
}

static tt_status tt__write_text(tt_context *ctx, const char *path, const char *text)
{
    return tt__write_bytes(ctx, path, text, strlen(text));
}

/* Writes the text that `print` prints to a file of a folder. */
static tt_status tt__save_printed(tt_context *ctx, const char *folder, const char *file,
                                  void (*print)(tt__text_buffer *to, const void *arg), const void *arg)
{
    char path[TT__PATH];
    tt__text_buffer text = {NULL, 0, 0};
    tt_status status = tt__path_join(ctx, path, folder, file);
    if (status != TT_OK) return status;
    print(&text, arg); /* text.to is NULL: only counts the bytes */
    text.capacity = text.length + 1;
    text.length = 0;
    text.to = (char *)tt__alloc(ctx, text.capacity);
    if (!text.to) return TT_ERR_MEMORY;
    print(&text, arg);
    status = tt__write_text(ctx, path, text.to);
    tt__free(ctx, text.to);
    return status;
}

static tt_status tt__make_folder(tt_context *ctx, const char *folder)
{
    const tt_files *files = &ctx->options.files;
    if (files->make_folder(files->user, folder)) return TT_OK;
    return tt__fail(ctx, TT_ERR_FILE, "cannot make folder '%s': %s", folder, files->reason(files->user));
}
