#pragma once
#include "../base/base.h"
#include "../files/json.h"
#include "dataset.h"
#include "labels.h"

/* ---- tables: comma- or tab-separated files with a header */

typedef struct tt__field { char *text; size_t bytes; bool last; } tt__field;

/* Returns a separator's name for messages, such as "tabs". name: memory for the name. */
static const char *tt__table_separator(char separator, char name[24])
{
    if (separator == ',' || separator == '\t') return separator == ',' ? "commas" : "tabs";
    snprintf(name, 24, "the character '%c'", separator);
    return name;
}

/* Returns the first character of a text that commonly separates columns, or 0 if the text has none. */
static char tt__table_other_separator(const char *text, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (text[i] && strchr(",\t;|", text[i])) return text[i];
    return 0;
}

static tt_status tt__table_after_quote(const tt__table *t, char found)
{
    char separator[24];
    if (tt__table_other_separator(&found, 1))
        return tt__fail(t->ctx, TT_ERR_FORMAT, "'%s', line %lld: there is text after a closing quote; if "
                        "columns are separated by %s, set delimiter (--delimiter)", t->path, t->line,
                        tt__table_separator(found, separator));
    return tt__fail(t->ctx, TT_ERR_FORMAT, "'%s', line %lld: there is text after a closing quote; write a "
                    "quote within a quoted field twice, or, if quotes are ordinary characters, set unquoted "
                    "(--quote none)", t->path, t->line);
}

/* Reads the field at t->at, unquotes it in place, and moves t->at past the separator or newline that ends the
   field (RFC 4180, except that a quote inside an unquoted field is an ordinary character). */
static tt_status tt__table_field(tt__table *t, tt__field *field)
{
    char *text = t->text, *end;
    if (t->at < t->bytes && text[t->at] == '"' && !t->unquoted) {
        long long opened = t->line;
        field->text = end = text + ++t->at;
        for (;;) {
            if (t->at == t->bytes)
                return tt__fail(t->ctx, TT_ERR_FORMAT, "'%s', line %lld: the quoted field that starts here "
                                "is not closed before the end of the file; if quotes are ordinary "
                                "characters, set unquoted (--quote none)", t->path, opened);
            char c = text[t->at++];
            if (c == '"') {
                if (t->at == t->bytes || text[t->at] != '"') break;
                t->at++;
            }
            if (c == '\n') t->line++;
            *end++ = c;
        }
        if (t->at + 1 < t->bytes && text[t->at] == '\r' && text[t->at + 1] == '\n') t->at++;
        if (t->at < t->bytes && text[t->at] != t->separator && text[t->at] != '\n')
            return tt__table_after_quote(t, text[t->at]);
    } else {
        field->text = text + t->at;
        while (t->at < t->bytes && text[t->at] != t->separator && text[t->at] != '\n') t->at++;
        end = text + t->at;
        if (t->at < t->bytes && text[t->at] == '\n' && end > field->text && end[-1] == '\r') end--;
    }
    field->last = t->at == t->bytes || text[t->at] == '\n';
    field->bytes = (size_t)(end - field->text);
    if (t->at < t->bytes) {
        if (text[t->at] == '\n') t->line++;
        t->at++;
    }
    *end = 0; /* overwrites the separator, quote or newline, or the final NUL */
    return TT_OK;
}

/* Skips empty lines and moves to the next row of the table. Returns false at the end of the file. */
static bool tt__table_row(tt__table *t)
{
    for (; t->at < t->bytes; t->at++) {
        char c = t->text[t->at];
        if (c == '\r' && t->at + 1 < t->bytes && t->text[t->at + 1] == '\n') continue;
        if (c != '\n') break;
        t->line++;
    }
    t->row_line = t->line;
    return t->at < t->bytes;
}

static bool tt__field_is(const tt__field *f, const char *text)
{
    return strlen(text) == f->bytes && memcmp(text, f->text, f->bytes) == 0;
}

static tt_status tt__table_header(tt__table *t, int column[TT__COLUMNS], int *columns)
{
    tt__field field = {NULL, 0, false};
    char there[512] = "", separator[24], others[24];
    tt__text_buffer list = {there, sizeof there, 0};
    for (int i = 0; i < TT__COLUMNS; i++) column[i] = -1;
    if (!tt__table_row(t))
        return tt__fail(t->ctx, TT_ERR_FORMAT,
                        "'%s' is empty; expected a header with the columns %.100s and %.100s", t->path,
                        t->column[TT__COLUMN_TEXT],
                        t->column[t->needs[TT__COLUMN_LABEL] ? TT__COLUMN_LABEL : TT__COLUMN_PAIR]);
    for (*columns = 0; !field.last; ++*columns) {
        tt_status status = tt__table_field(t, &field);
        if (status != TT_OK) return status;
        tt__print(&list, "%s'%.100s'", *columns ? ", " : "", field.text);
        for (int i = 0; i < t->columns; i++) {
            if (!tt__field_is(&field, t->column[i])) continue;
            if (column[i] >= 0)
                return tt__row_fail(t, "two columns are named '%.200s': rename one of them", t->column[i]);
            column[i] = *columns;
        }
        if (*columns == INT_MAX - 1)
            return tt__row_fail(t, "the line has 2^31 columns or more, which is too many");
    }
    const char other = *columns == 1 ? tt__table_other_separator(there, strlen(there)) : 0;
    for (int i = 0; i < t->columns; i++)
        if (column[i] < 0 && t->needs[i])
            return tt__fail(t->ctx, TT_ERR_FORMAT, "'%.300s', line %lld: none of the header's %d columns, "
                            "separated by %s, is named '%.100s'; they are %.300s%s%s%s%s", t->path,
                            t->row_line, *columns, tt__table_separator(t->separator, separator), t->column[i],
                            there, strlen(there) > 300 ? "..." : "",
                            other ? "; if columns are separated by " : "",
                            other ? tt__table_separator(other, others) : "",
                            other ? ", set delimiter (--delimiter)" : "");
    return TT_OK;
}

/* The part of the data to which a row's split column assigns the row. */
enum { TT__SPLIT_OTHER, TT__SPLIT_TRAIN, TT__SPLIT_VALIDATION, TT__SPLIT_TEST };

static int tt__split_of(const char *name)
{
    static const char *const validation[] = {"validation", "valid", "val", "dev"};
    for (int i = 0; i < TT__COUNT(validation); i++)
        if (strcmp(name, validation[i]) == 0) return TT__SPLIT_VALIDATION;
    if (strcmp(name, "train") == 0) return TT__SPLIT_TRAIN;
    return strcmp(name, "test") == 0 ? TT__SPLIT_TEST : TT__SPLIT_OTHER;
}

/* Sets *keep to whether a row with `part` in its split column is in part `split` (NULL: all rows are). */
static tt_status tt__table_part(const tt__table *t, const char *part, size_t bytes, const char *split,
                                bool *keep)
{
    const int wanted = split ? tt__split_of(split) : TT__SPLIT_OTHER;
    const int is = wanted && strlen(part) == bytes ? tt__split_of(part) : TT__SPLIT_OTHER;
    const tt__field field = {(char *)(uintptr_t)part, bytes, false};
    *keep = !split || (wanted ? is == wanted : tt__field_is(&field, split));
    if (!wanted || is) return TT_OK;
    return tt__row_fail(t, "the %.100s is '%.100s'; expected train, validation (or valid, val, dev) or test",
                        t->column[TT__COLUMN_SPLIT], part);
}

/* Returns whether a text is a number such as -1, .5 or 2e-3 that a float holds, and sets *value to it. */
static bool tt__is_score(const char *text, float *value)
{
    const char *digits = "0123456789", *c = text + (*text == '-' || *text == '+'), *from = c;
    c += strspn(c, digits);
    size_t n = (size_t)(c - from);
    if (*c == '.') n += strspn(c + 1, digits), c += 1 + strspn(c + 1, digits);
    if (n && (*c == 'e' || *c == 'E')) {
        from = c + 1 + (c[1] == '-' || c[1] == '+');
        c = from + strspn(from, digits);
        if (c == from) return false;
    }
    if (!n || *c || c - text > TT__JSON_NUMBER) return false;
    const double x = tt__json_double(text, (size_t)(c - text));
    *value = fabs(x) <= FLT_MAX ? (float)x : 0;
    return fabs(x) <= FLT_MAX;
}

/* Reads one label of a field: the class, or one of several labels or scores. */
static tt_status tt__table_label(const tt_dataset *d, tt__table *t, tt__example *e, const char *label)
{
    float score = 0;
    if (!*label)
        return tt__row_fail(t, "%s is empty: write one, or remove the row", t->task == TT_TASK_CLASS ?
                            "the label" : "a label");
    if (t->task != TT_TASK_SCORES) return tt__table_name(d, t, e, label);
    if (tt__is_score(label, &score)) return tt__table_value(t, score);
    return tt__row_fail(t, "the score '%.200s' is not a number that a float holds, such as 2.5", label);
}

/* Reads the label of a row. The field, which ends with a NUL, is cut in place into labels or scores. */
static tt_status tt__table_field_labels(const tt_dataset *d, tt__table *t, tt__example *e,
                                        const tt__field *field)
{
    const int first = t->n_values;
    char *at = field->text, *end = at + field->bytes;
    bool more = t->task != TT_TASK_LABELS || field->bytes;
    tt_status status = TT_OK;
    if (strlen(at) != field->bytes)
        return tt__row_fail(t, "the label contains a NUL byte: remove it");
    if (t->task == TT_TASK_CLASS) return tt__table_label(d, t, e, at);
    while (more && status == TT_OK) {
        char *stop = strchr(at, t->between), *last = stop ? stop : end;
        more = stop != NULL;
        while (at < last && *at == ' ') at++;
        while (last > at && last[-1] == ' ') last--;
        *last = 0;
        status = tt__table_label(d, t, e, at);
        if (more) at = stop + 1;
    }
    return status == TT_OK ? tt__table_row_end(d, t, first) : status;
}

/* Reads the score of a pair of TT_TASK_EMBED. An empty field has no score. */
static tt_status tt__table_field_score(const tt_dataset *d, tt__table *t, const tt__field *field)
{
    float score = 0;
    if (!field->bytes) return tt__table_score(d, t, NULL);
    if (strlen(field->text) != field->bytes || !tt__is_score(field->text, &score))
        return tt__row_fail(t, "the score '%.200s' is not a number that a float holds, such as 2.5; if this "
                            "column has no scores, set label_column (--label-column) to another name",
                            field->text);
    return tt__table_score(d, t, &score);
}

/* Reads the table's rows that belong to part `split` (NULL: all rows) into dataset d. */
static tt_status tt__table_read(tt_dataset *d, tt__table *t, const char *split)
{
    tt_context *ctx = d->ctx;
    int column[TT__COLUMNS], columns = 0;
    char separator[24];
    tt_status status = tt__table_header(t, column, &columns);
    t->splits = column[TT__COLUMN_SPLIT] >= 0;
    while (status == TT_OK && tt__table_row(t)) {
        tt__field fields[TT__COLUMNS], field = {NULL, 0, false};
        int n = 0;
        bool keep = true;
        memset(fields, 0, sizeof fields);
        do {
            status = tt__table_field(t, &field);
            for (int i = 0; i < TT__COLUMNS; i++)
                if (column[i] == n) fields[i] = field;
            if (n < INT_MAX) n++;
        } while (status == TT_OK && !field.last);
        if (status != TT_OK) break;
        if (n != columns)
            return tt__row_fail(t, "the row has %d columns, but the header has %d: put fields that contain "
                                "%s or newlines in double quotes", n, columns,
                                tt__table_separator(t->separator, separator));
        const tt__field *part = &fields[TT__COLUMN_SPLIT];
        if (t->splits) status = tt__table_part(t, part->text, part->bytes, split, &keep);
        if (status != TT_OK || !keep) continue;
        tt__example *e = tt__dataset_add(d, t->path);
        if (!e) return ctx->status;
        e->text = fields[TT__COLUMN_TEXT].text;
        e->bytes = fields[TT__COLUMN_TEXT].bytes;
        e->pair = fields[TT__COLUMN_PAIR].text;
        e->pair_bytes = fields[TT__COLUMN_PAIR].bytes;
        d->pairs |= e->pair != NULL;
        if (!tt__has_no_labels(t->task)) {
            status = tt__table_field_labels(d, t, e, &fields[TT__COLUMN_LABEL]);
            continue;
        }
        if (t->task != TT_TASK_EMBED) continue;
        status = tt__table_field_score(d, t, &fields[TT__COLUMN_LABEL]);
        e->negative = fields[TT__COLUMN_NEGATIVE].text;
        e->negative_bytes = fields[TT__COLUMN_NEGATIVE].bytes;
        d->negatives |= e->negative != NULL;
    }
    return status;
}
