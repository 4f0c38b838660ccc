#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "dataset.h"

/* ---- tables: comma- or tab-separated files with a header */

typedef struct tt__table {
    tt_context *ctx;
    const char *path;
    char *text;
    size_t bytes, at;
    long long line, row_line; /* line numbers of `at` and of the row's start: fields may have newlines */
    const char *column[3];    /* names of columns, indexed by TT__COLUMN_TEXT and so on */
    char separator;
    bool unquoted;            /* quotes are ordinary characters */
    bool splits;              /* the table has a split column */
} tt__table;

typedef struct tt__field { char *text; size_t bytes; bool last; } tt__field;

/* Returns a name of a separator for messages, such as "tabs". name: memory for the name. */
static const char *tt__table_separator(char separator, char name[24])
{
    if (separator == ',' || separator == '\t') return separator == ',' ? "commas" : "tabs";
    snprintf(name, 24, "the character '%c'", separator);
    return name;
}

/* Returns the first character of a text that is a common separator of columns; 0 if the text has none. */
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
    *end = 0; /* overwrites a character that was read, or the final NUL */
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

enum { TT__COLUMN_TEXT, TT__COLUMN_LABEL, TT__COLUMN_SPLIT, TT__COLUMNS };

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
                        t->column[TT__COLUMN_TEXT], t->column[TT__COLUMN_LABEL]);
    for (*columns = 0; !field.last; ++*columns) {
        tt_status status = tt__table_field(t, &field);
        if (status != TT_OK) return status;
        tt__print(&list, "%s'%.100s'", *columns ? ", " : "", field.text);
        for (int i = 0; i < TT__COLUMNS; i++) {
            if (!tt__field_is(&field, t->column[i])) continue;
            if (column[i] >= 0)
                return tt__fail(t->ctx, TT_ERR_FORMAT,
                                "'%s', line %lld: two columns are named '%.200s': rename one of them",
                                t->path, t->row_line, t->column[i]);
            column[i] = *columns;
        }
        if (*columns == INT_MAX - 1)
            return tt__fail(t->ctx, TT_ERR_FORMAT,
                            "'%s', line %lld: the line has 2^31 columns or more, which is too many", t->path,
                            t->row_line);
    }
    const char other = *columns == 1 ? tt__table_other_separator(there, strlen(there)) : 0;
    for (int i = 0; i < TT__COLUMNS; i++)
        if (column[i] < 0 && i != TT__COLUMN_SPLIT)
            return tt__fail(t->ctx, TT_ERR_FORMAT, "'%.300s', line %lld: none of the header's %d columns, "
                            "separated by %s, is named '%.100s'; they are %.300s%s%s%s%s", t->path,
                            t->row_line, *columns, tt__table_separator(t->separator, separator), t->column[i],
                            there, strlen(there) > 300 ? "..." : "",
                            other ? "; if columns are separated by " : "",
                            other ? tt__table_separator(other, others) : "",
                            other ? ", set delimiter (--delimiter)" : "");
    return TT_OK;
}

/* The part of the data to which a row belongs, as named in its split column. */
enum { TT__SPLIT_OTHER, TT__SPLIT_TRAIN, TT__SPLIT_VALIDATION, TT__SPLIT_TEST };

static int tt__split_of(const char *name)
{
    static const char *const validation[] = {"validation", "valid", "val", "dev"};
    for (int i = 0; i < TT__COUNT(validation); i++)
        if (strcmp(name, validation[i]) == 0) return TT__SPLIT_VALIDATION;
    if (strcmp(name, "train") == 0) return TT__SPLIT_TRAIN;
    return strcmp(name, "test") == 0 ? TT__SPLIT_TEST : TT__SPLIT_OTHER;
}

/* Returns the number of the class with name `label`, or -1 if no class has that name. order: the classes
   sorted by name, from tt__table_given. */
static int tt__find_class(const tt_dataset *d, const uint32_t *order, const char *label)
{
    for (int low = 0, high = d->n_classes; low < high;) {
        int middle = low + (high - low) / 2, compared = strcmp(d->classes[order[middle]], label);
        if (compared == 0) return (int)order[middle];
        if (compared < 0) low = middle + 1;
        else high = middle;
    }
    return -1;
}

/* Reads the table's rows that belong to part `split` (NULL: all rows) into dataset d. order: the caller's
   classes sorted by name, from tt__table_given; NULL if the labels in the table become the classes. */
static tt_status tt__table_read(tt_dataset *d, tt__table *t, const char *split, const uint32_t *order)
{
    tt_context *ctx = d->ctx;
    int column[TT__COLUMNS], columns = 0;
    char separator[24];
    tt_status status = tt__table_header(t, column, &columns);
    t->splits = column[TT__COLUMN_SPLIT] >= 0;
    if (!t->splits) split = NULL;
    int wanted = split ? tt__split_of(split) : TT__SPLIT_OTHER;
    while (status == TT_OK && tt__table_row(t)) {
        tt__field fields[TT__COLUMNS], field = {NULL, 0, false};
        int n = 0;
        memset(fields, 0, sizeof fields);
        do {
            status = tt__table_field(t, &field);
            for (int i = 0; i < TT__COLUMNS; i++)
                if (column[i] == n) fields[i] = field;
            if (n < INT_MAX) n++;
        } while (status == TT_OK && !field.last);
        if (status != TT_OK) break;
        if (n != columns)
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s', line %lld: the row has %d columns, but the header has "
                            "%d: put fields that contain %s or newlines in double quotes", t->path,
                            t->row_line, n, columns, tt__table_separator(t->separator, separator));
        const tt__field *label = &fields[TT__COLUMN_LABEL], *part = &fields[TT__COLUMN_SPLIT];
        int is = wanted && strlen(part->text) == part->bytes ? tt__split_of(part->text) : TT__SPLIT_OTHER;
        if (wanted && !is)
            return tt__fail(ctx, TT_ERR_FORMAT,
                            "'%s', line %lld: the %.100s is '%.100s'; expected train, validation (or "
                            "valid, val, dev) or test", t->path, t->row_line, t->column[TT__COLUMN_SPLIT],
                            part->text);
        if (wanted ? is != wanted : split && !tt__field_is(part, split)) continue;
        if (!label->bytes)
            return tt__fail(ctx, TT_ERR_FORMAT,
                            "'%s', line %lld: the label is empty: write one, or remove the row", t->path,
                            t->row_line);
        if (strlen(label->text) != label->bytes)
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s', line %lld: the label contains a NUL byte: remove it",
                            t->path, t->row_line);
        tt__example *e = tt__dataset_add(d, t->path);
        if (!e) return ctx->status;
        e->text = fields[TT__COLUMN_TEXT].text;
        e->bytes = fields[TT__COLUMN_TEXT].bytes;
        e->label_text = label->text;
        if (!order) continue;
        e->label = tt__find_class(d, order, label->text);
        if (e->label < 0)
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s', line %lld: the label '%.200s' is not one of the %d "
                            "given classes, whose first is '%.200s': give this class too, or correct the "
                            "label", t->path, t->row_line, label->text, d->n_classes, d->classes[0]);
    }
    if (status != TT_OK || d->count || (wanted && wanted != TT__SPLIT_TRAIN)) return status;
    if (!split) return tt__fail(ctx, TT_ERR_FORMAT, "'%s' has a header but no rows: add rows", t->path);
    return tt__fail(ctx, TT_ERR_FORMAT,
                    "'%s' has no row whose split is '%.200s': add one, or choose another split", t->path,
                    split);
}

/* Returns whether a class name is a number such as -1 or 2.5, and sets *value to it. */
static bool tt__is_number(const char *name, double *value)
{
    const char *digits = "0123456789", *c = name + (*name == '-' || *name == '+'), *whole = c;
    c += strspn(c, digits);
    if (c == whole) return false;
    if (*c == '.') c += 1 + strspn(c + 1, digits);
    if (*c || c - name > TT__JSON_NUMBER) return false;
    *value = tt__json_double(name, (size_t)(c - name));
    return true;
}

static bool tt__less_number(const void *arg, uint32_t a, uint32_t b)
{
    const double *values = (const double *)arg;
    return values[a] != values[b] ? values[a] < values[b] : a < b;
}

static int tt__by_class_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int tt__by_class_number(const void *a, const void *b)
{
    double x = 0, y = 0;
    tt__is_number(*(const char *const *)a, &x);
    tt__is_number(*(const char *const *)b, &y);
    return x != y ? (x > y) - (x < y) : tt__by_class_name(a, b);
}

void tt_sort_class_names(const char **names, int n)
{
    double x;
    bool all = true;
    for (int k = 0; k < n; k++) all = all && tt__is_number(names[k], &x);
    if (n > 0) qsort((void *)names, (size_t)n, sizeof *names, all ? tt__by_class_number : tt__by_class_name);
}

/* Renumbers classes in the order of their values if all their names are numbers. Before, the classes are in
   the byte order of their names. */
static tt_status tt__table_numbers(tt_dataset *d)
{
    const size_t n = (size_t)d->n_classes;
    double *values = (double *)tt__alloc(d->ctx, sizeof *values * n);
    uint32_t *order = values ? (uint32_t *)tt__alloc(d->ctx, sizeof *order * 2 * n) : NULL;
    tt_status status = order ? TT_OK : TT_ERR_MEMORY;
    bool all = order != NULL;
    for (uint32_t k = 0; k < n && all; k++) {
        all = tt__is_number(d->classes[k], &values[k]);
        order[k] = order[n + k] = k;
    }
    if (all) {
        tt__sort_indices(order, n, tt__less_number, values);
        status = tt__dataset_renumber(d, order, order + n);
    }
    tt__free(d->ctx, order);
    tt__free(d->ctx, values);
    return status;
}

/* Makes a class for each distinct label. Numbers the classes in the byte order of the labels or, if all
   labels are numbers, in the order of their values. */
static tt_status tt__table_classes(tt_dataset *d)
{
    if (!d->count) return TT_OK;
    tt__strings labels = {&d->examples->label_text, sizeof *d->examples};
    const char *twice, *last = NULL;
    uint32_t *order = tt__sort_strings(d->ctx, labels, d->count, &twice);
    for (int i = 0; order && i < d->count; i++) {
        tt__example *e = &d->examples[order[i]];
        d->n_classes += !last || strcmp(last, e->label_text) != 0;
        e->label = d->n_classes - 1;
        last = e->label_text;
    }
    if (order) d->classes = (const char **)tt__alloc(d->ctx, (size_t)d->n_classes * sizeof *d->classes);
    for (int i = 0; d->classes && i < d->count; i++)
        d->classes[d->examples[i].label] = d->examples[i].label_text;
    tt__free(d->ctx, order);
    return d->classes ? tt__table_numbers(d) : TT_ERR_MEMORY;
}

/* Copies the caller's class names into the dataset. Sets *order to the numbers of the classes sorted by name,
   for tt__find_class; the caller frees *order. */
static tt_status tt__table_given(tt_dataset *d, const char *const *classes, int n, uint32_t **order)
{
    const char *twice;
    tt_status status = tt__number_classes(d, classes, n);
    if (status != TT_OK) return status;
    tt__strings names = {d->classes, sizeof *d->classes};
    if (!(*order = tt__sort_strings(d->ctx, names, n, &twice))) return TT_ERR_MEMORY;
    if (!twice) return TT_OK;
    return tt__fail(d->ctx, TT_ERR_ARGUMENT, "the class '%.200s' is given twice: give each class once",
                    twice);
}

tt_table_options tt_table_options_default(void)
{
    tt_table_options o = {"text", "label", "split", 0, false};
    return o;
}

/* Divides the rows of a table that has no split column: a random tenth of the rows is "test", all others are
   "train", and "validation" is empty. Returns the part named `split`. Frees d unless d is the result. */
static tt_dataset *tt__table_divided(tt_dataset *d, const char *path, const char *split, const char *column)
{
    int part = tt__split_of(split);
    tt_dataset *held = NULL, *result;
    if (part == TT__SPLIT_VALIDATION) return d->count = 0, d;
    if (!part)
        tt__fail(d->ctx, TT_ERR_ARGUMENT, "'%s' has no column '%.100s', so it has only the splits \"train\" "
                 "and \"test\", not '%.200s'", path, column, split);
    else if (d->count < 2)
        tt__fail(d->ctx, TT_ERR_FORMAT, "'%s' has one row and no column '%.100s': one row cannot be divided "
                 "into \"train\" and \"test\"", path, column);
    else
        held = tt_dataset_split(d, (d->count + 9) / 10);
    result = part == TT__SPLIT_TEST ? held : held ? d : NULL;
    tt_dataset_free(result == d ? held : d);
    return result;
}

tt_dataset *tt_dataset_table(tt_context *ctx, const char *path, const char *split, const char *const *classes,
                             int n_classes, const tt_table_options *options)
{
    tt_table_options o = options ? *options : tt_table_options_default();
    uint32_t *order = NULL;
    bool splits = false; /* the table has a split column */
    if ((classes != NULL) != (n_classes > 0) || n_classes < 0)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': %d classes are given%s; give at least one, or NULL and "
                        "0 to take the classes from the file", path, n_classes, classes ? "" : " as NULL"),
               (tt_dataset *)NULL;
    const char *text = o.text_column ? o.text_column : "NULL";
    const char *label = o.label_column ? o.label_column : "NULL";
    const char *part = o.split_column ? o.split_column : "NULL";
    bool named = o.text_column && o.label_column && o.split_column;
    if (!named || strcmp(text, label) == 0 || strcmp(text, part) == 0 || strcmp(label, part) == 0)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "table options: the columns of text, label and split are "
                        "'%.100s', '%.100s' and '%.100s'; expected three different names", text, label,
                        part), (tt_dataset *)NULL;
    if (o.delimiter && (strchr("\"\n\r", o.delimiter) || (unsigned char)o.delimiter >= 0x80))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "table options: the delimiter is the byte %d; expected an "
                        "ASCII character that is neither a quote nor the end of a line",
                        (unsigned char)o.delimiter),
               (tt_dataset *)NULL;
    tt_dataset *d = (tt_dataset *)tt__calloc(ctx, sizeof *d);
    if (!d) return NULL;
    d->ctx = ctx;
    tt_status status = classes ? tt__table_given(d, classes, n_classes, &order) : TT_OK;
    if (status == TT_OK) status = tt__file_open(ctx, path, &d->file);
    if (status == TT_OK) {
        const bool csv = tt__match("*.csv", path) || tt__match("*.CSV", path);
        const char between = o.delimiter ? o.delimiter : csv ? ',' : '\t';
        tt__table t = {ctx, path, d->file.bytes, d->file.size, 0, 1, 1, {text, label, part}, between,
                       o.unquoted, false};
        status = tt_text_begin(ctx, path, t.text, t.bytes, &t.at);
        if (status == TT_OK && t.bytes && !memchr(t.text, '\n', t.bytes))
            for (size_t i = 0; i < t.bytes; i++)
                if (t.text[i] == '\r') t.text[i] = '\n';
        if (status == TT_OK) status = tt__table_read(d, &t, split, order);
        splits = t.splits;
    }
    if (status == TT_OK && !classes) status = tt__table_classes(d);
    tt__free(ctx, order);
    if (status == TT_OK && split && !splits) return tt__table_divided(d, path, split, o.split_column);
    return tt__dataset_end(d, status);
}
