#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "dataset.h"

/* ---- tables: the labels of rows, and their classes */

typedef struct tt__label_name { const char *name; int number; } tt__label_name;

/* The columns that are read from a table. */
enum { TT__COLUMN_TEXT, TT__COLUMN_LABEL, TT__COLUMN_SPLIT, TT__COLUMN_PAIR, TT__COLUMN_NEGATIVE,
       TT__COLUMNS };

/* A file of rows: a table, lines of JSON, or words with tags. */
typedef struct tt__table {
    tt_context *ctx;
    const char *path;
    char *text;
    size_t bytes, at;
    long long line, row_line; /* line numbers of `at` and of the row's start; a row may span lines */
    const char *column[TT__COLUMNS]; /* names of the `columns` columns that the task reads */
    int columns;
    char separator;
    char between;             /* character that separates the labels in a field */
    bool unquoted;            /* quotes are ordinary characters */
    bool splits;              /* the table has a split column */
    long long first_line;     /* line of the first row of JSON; 0: no row was read */
    tt_task task;
    bool needs[TT__COLUMNS];  /* whether each column must be there */
    const uint32_t *order;    /* the caller's classes sorted by name; NULL: labels become the classes */
    tt__label_name *names;    /* labels of all rows, one row after another; example i has n_words of them */
    int n_names, cap_names;
    float *values;            /* values of all rows, `width` for each */
    int n_values, cap_values, width;
} tt__table;

/* Fails with an error that names the row that is being read. */
TT_PRINTF(2, 3)
static tt_status tt__row_fail(const tt__table *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const tt_status status = tt__line_fail(t->ctx, t->path, t->row_line, format, args);
    va_end(args);
    return status;
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

/* Adds the label `name` to example e or, for TT_TASK_TAGS, gives the next word of e the tag `name`; "" means
   that the word has no tag. The string must live as long as the dataset. */
static tt_status tt__table_name(const tt_dataset *d, tt__table *t, tt__example *e, const char *name)
{
    const int number = t->order && *name ? tt__find_class(d, t->order, name) : -1;
    if (t->order && *name && number < 0)
        return tt__row_fail(t, "the %s '%.200s' is not one of the %d given classes, whose first is '%.200s': "
                            "give this class too, or correct the row", t->task == TT_TASK_TAGS ? "tag" :
                            "label", name, d->n_classes, d->classes[0]);
    if (!TT__GROW(t->ctx, t->names, t->n_names, t->cap_names)) return t->ctx->status;
    t->names[t->n_names].name = name;
    t->names[t->n_names++].number = number;
    e->n_words++;
    return TT_OK;
}

static tt_status tt__table_value(tt__table *t, float x)
{
    if (!TT__GROW(t->ctx, t->values, t->n_values, t->cap_values)) return t->ctx->status;
    t->values[t->n_values++] = x;
    return TT_OK;
}

/* Checks the number of values of the dataset's last row, whose values begin at index `first`. If the caller
   has named classes, the first row must have a value for each class. Every later row must have as many values
   as the rows before. */
static tt_status tt__table_row_end(const tt_dataset *d, tt__table *t, int first)
{
    const int n = t->n_values - first, width = t->width ? t->width : t->order ? d->n_classes : n;
    if (!n && !t->width && t->task == TT_TASK_LABELS) return TT_OK; /* labels are names in this file */
    if (n && t->task == TT_TASK_LABELS && (t->n_names || (d->count > 1 && !t->width)))
        return tt__row_fail(t, "the label has %d numbers, but other labels of this file are names: write "
                            "names in all rows, or 0 or 1 for each class in all rows", n);
    if (!n && !t->width)
        return tt__row_fail(t, "the label is an empty list; expected a score or scores");
    if (n != width)
        return tt__row_fail(t, "the label has %d number%s; expected %d, as many as %s", n, n == 1 ? "" : "s",
                            width, t->order ? "classes are given" : "the rows before have");
    t->width = width;
    return TT_OK;
}

/* Keeps the score of a pair of TT_TASK_EMBED, the dataset's last row, or notes that the pair has none (NULL).
   The rows before must be alike. */
static tt_status tt__table_score(const tt_dataset *d, tt__table *t, const float *score)
{
    if (d->count > 1 && (t->n_values > 0) != (score != NULL))
        return tt__row_fail(t, "the row has %s \"%.100s\", unlike the rows before: write it in all rows or "
                            "in none", score ? "a" : "no", t->column[TT__COLUMN_LABEL]);
    return score ? tt__table_value(t, *score) : TT_OK;
}

/* Makes a class for each distinct label. Numbers the classes in the byte order of the labels or, if all
   labels are numbers, in the order of their values. */
static tt_status tt__table_classes(tt_dataset *d, tt__table *t)
{
    const char *twice, *last = "";
    const tt__strings names = {t->n_names ? &t->names->name : &last, sizeof *t->names};
    uint32_t *order = tt__sort_strings(d->ctx, names, t->n_names, &twice);
    for (int i = 0; i < t->n_names && order; i++) { /* numbers classes in byte order; "" gets the number -1 */
        tt__label_name *at = &t->names[order[i]];
        d->n_classes += strcmp(last, at->name) != 0;
        at->number = d->n_classes - 1;
        last = at->name;
    }
    tt__free(d->ctx, order);
    if (!order) return TT_ERR_MEMORY;
    if (!d->n_classes)
        return tt__fail(d->ctx, TT_ERR_FORMAT, "'%s': no %s: add %s, or give the names of the classes",
                        t->path, t->task == TT_TASK_TAGS ? "word has a tag" : "row has a label",
                        t->task == TT_TASK_TAGS ? "tags" : "labels");
    if (!(d->classes = (const char **)tt__alloc(d->ctx, (size_t)d->n_classes * sizeof *d->classes)))
        return TT_ERR_MEMORY;
    for (int i = 0; i < t->n_names; i++)
        if (t->names[i].number >= 0) d->classes[t->names[i].number] = t->names[i].name;
    tt_sort_class_names(d->classes, d->n_classes);
    const tt__strings classes = {d->classes, sizeof *d->classes};
    if (!(order = tt__sort_strings(d->ctx, classes, d->n_classes, &twice))) return TT_ERR_MEMORY;
    for (int i = 0; i < t->n_names; i++)
        if (t->names[i].number >= 0) t->names[i].number = (int)order[t->names[i].number];
    tt__free(d->ctx, order);
    return TT_OK;
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

/* Names the classes of a file that has values and no names: LABEL_0, LABEL_1, ..., as transformers does. */
static tt_status tt__table_unnamed(tt_dataset *d, int n)
{
    char name[24];
    d->classes = (const char **)tt__alloc(d->ctx, sizeof *d->classes * (size_t)n);
    if (!d->classes) return TT_ERR_MEMORY;
    for (; d->n_classes < n; d->n_classes++) {
        snprintf(name, sizeof name, "LABEL_%d", d->n_classes);
        d->classes[d->n_classes] = tt__chunks_text(d->ctx, &d->chunks, name, strlen(name));
        if (!d->classes[d->n_classes])
            return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for the names of %d classes: free memory",
                            n);
    }
    return TT_OK;
}

/* Sets the examples' labels: the number of the class, the values, or the tags of the words. */
static tt_status tt__table_set(tt_dataset *d, const tt__table *t)
{
    const size_t n = tt__values_per_example(d);
    const tt__label_name *name = t->names;
    const bool values = t->task == TT_TASK_LABELS || t->task == TT_TASK_SCORES || t->n_values;
    size_t bytes = 0;
    float *to = NULL;
    if (values && (!tt__mul_size(n * sizeof *to, (size_t)d->count, &bytes) ||
                   !(to = (float *)tt__chunks_take(d->ctx, &d->chunks, bytes))))
        return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for %zu values of each of the %d rows of '%s': "
                        "free memory", n, d->count, t->path);
    if (t->n_values) memcpy(to, t->values, bytes);
    else if (values) memset(to, 0, bytes);
    for (tt__example *e = d->examples; e < d->examples + d->count; e++) {
        for (int k = 0; k < e->n_words; k++, name++) {
            if (t->task == TT_TASK_CLASS) e->label = name->number;
            else if (values) to[name->number] = 1;
            else e->words[k].tag = name->number;
        }
        e->values = to;
        if (values) to += n;
        if (t->task != TT_TASK_TAGS) e->n_words = 0;
    }
    return TT_OK;
}

/* Ends a dataset whose rows were read: determines its classes, and sets the labels of its examples. */
static tt_status tt__table_labels(tt_dataset *d, tt__table *t)
{
    tt_status status = TT_OK;
    if (!d->count || (tt__has_no_labels(t->task) && !t->n_values)) return TT_OK;
    if (t->task == TT_TASK_EMBED) return tt__table_set(d, t);
    if (!t->order) status = t->width ? tt__table_unnamed(d, t->width) : tt__table_classes(d, t);
    return status == TT_OK ? tt__table_set(d, t) : status;
}
