#pragma once
#include "../base/base.h"
#include "dataset.h"
#include "labels.h"
#include "tables.h"
#include "rows.h"

/* ---- tables of all kinds */

tt_table_options tt_table_options_default(void)
{
    tt_table_options o = {NULL, NULL, "split", "text_pair", "negative", 0, false, TT_TASK_CLASS, ','};
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
                 "and \"test\", not '%.200s': add the column, or use one of the two", path, column, split);
    else if (d->count < 2)
        tt__fail(d->ctx, TT_ERR_FORMAT, "'%s' has one row and no column '%.100s', but one row cannot be "
                 "divided into \"train\" and \"test\": add rows", path, column);
    else
        held = tt_dataset_split(d, (d->count + 9) / 10);
    result = part == TT__SPLIT_TEST ? held : held ? d : NULL;
    tt_dataset_free(result == d ? held : d);
    return result;
}

/* Checks options, and sets the names of columns. */
static tt_status tt__table_check(tt__table *t, const tt_table_options *o)
{
    const bool tags = o->task == TT_TASK_TAGS, embed = o->task == TT_TASK_EMBED;
    const char *names[TT__COLUMNS] = {o->text_column ? o->text_column : tags ? "tokens" : "text",
                                      o->label_column ? o->label_column
                                      : tags ? "tags" : embed ? "score" : "label",
                                      o->split_column, o->pair_column, o->negative_column};
    bool good = true;
    t->needs[TT__COLUMN_TEXT] = true;
    t->needs[TT__COLUMN_PAIR] = embed;
    t->needs[TT__COLUMN_LABEL] = !tt__has_no_labels(o->task);
    t->columns = embed ? TT__COLUMNS : TT__COLUMN_NEGATIVE;
    for (int i = 0; i < TT__COLUMNS; i++) t->column[i] = names[i] ? names[i] : "NULL";
    for (int i = 0; i < t->columns; i++)
        for (int k = 0; k <= i; k++) good &= names[i] && (k == i || strcmp(t->column[i], t->column[k]) != 0);
    if (!good)
        return tt__fail(t->ctx, TT_ERR_ARGUMENT, "table options: the columns of text, label, split and pair "
                        "are '%.100s', '%.100s', '%.100s' and '%.100s'%s%.100s; expected different names",
                        t->column[0], t->column[1], t->column[2], t->column[3],
                        t->columns == TT__COLUMNS ? ", that of negatives is " : "",
                        t->columns == TT__COLUMNS ? t->column[TT__COLUMN_NEGATIVE] : "");
    if (o->delimiter && (strchr("\"\n\r", o->delimiter) || (unsigned char)o->delimiter >= 0x80))
        return tt__fail(t->ctx, TT_ERR_ARGUMENT,
                        "table options: the delimiter is the byte %d; expected an ASCII character that is "
                        "neither a quote nor the end of a line", (unsigned char)o->delimiter);
    if (!o->label_delimiter || (unsigned char)o->label_delimiter >= 0x80)
        return tt__fail(t->ctx, TT_ERR_ARGUMENT, "table options: the label_delimiter is the byte %d; "
                        "expected an ASCII character, such as a comma", (unsigned char)o->label_delimiter);
    if (!tt__is_task(o->task))
        return tt__fail(t->ctx, TT_ERR_ARGUMENT, "table options: task is %d; expected one of tt_task, %d to "
                        "%d", (int)o->task, TT_TASK_CLASS, TT_TASK_MASKED_LM);
    return TT_OK;
}

/* Returns whether a path ends with `ending`, in lower-case or in capitals. */
static bool tt__ends_in(const char *path, const char *ending)
{
    const size_t n = strlen(path), m = strlen(ending);
    bool same = n >= m;
    for (size_t i = 0; i < m && same; i++) {
        const char c = path[n - m + i];
        same = (c >= 'A' && c <= 'Z' ? c + 32 : c) == ending[i];
    }
    return same;
}

/* Opens a file and reads its rows that belong to part `split` into dataset d. */
static tt_status tt__table_file(tt_dataset *d, tt__table *t, const tt_table_options *o, const char *split)
{
    const bool lines = tt__ends_in(t->path, ".jsonl") || tt__ends_in(t->path, ".json");
    const bool plain = o->task == TT_TASK_MASKED_LM && tt__ends_in(t->path, ".txt");
    tt_status status = tt__file_open(d->ctx, t->path, &d->file);
    if (status != TT_OK) return status;
    t->text = d->file.bytes;
    t->bytes = d->file.size;
    t->separator = o->delimiter ? o->delimiter : tt__ends_in(t->path, ".csv") ? ',' : '\t';
    t->between = o->label_delimiter;
    t->unquoted = o->unquoted;
    status = tt_text_begin(d->ctx, t->path, t->text, t->bytes, &t->at);
    if (status == TT_OK && t->bytes && !memchr(t->text, '\n', t->bytes))
        for (size_t i = 0; i < t->bytes; i++)
            if (t->text[i] == '\r') t->text[i] = '\n';
    if (status == TT_OK)
        status = lines ? tt__read_json_rows(d, t, split) : plain ? tt__read_lines(d, t)
               : o->task == TT_TASK_TAGS ? tt__read_conll(d, t) : tt__table_read(d, t, split);
    const int part = split && t->splits ? tt__split_of(split) : TT__SPLIT_OTHER;
    if (status != TT_OK || d->count || (part && part != TT__SPLIT_TRAIN)) return status;
    const bool header = !lines && !plain && o->task != TT_TASK_TAGS;
    if (!split || !t->splits)
        return tt__fail(d->ctx, TT_ERR_FORMAT, "'%s' has %sno rows: add rows", t->path,
                        header ? "a header but " : "");
    return tt__fail(d->ctx, TT_ERR_FORMAT, "'%s' has no row whose split is '%.200s': add one, or choose "
                    "another split", t->path, split);
}

tt_dataset *tt_dataset_table(tt_context *ctx, const char *path, const char *split, const char *const *classes,
                             int n_classes, const tt_table_options *options)
{
    tt_table_options o = options ? *options : tt_table_options_default();
    uint32_t *order = NULL;
    tt__table t;
    memset(&t, 0, sizeof t);
    t.ctx = ctx;
    t.path = path;
    t.task = o.task;
    t.line = 1;
    if (tt__has_no_labels(o.task) && n_classes)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': %d classes are given, but %s has no classes: give NULL "
                        "and 0", path, n_classes, o.task == TT_TASK_EMBED ? "TT_TASK_EMBED" :
                        "TT_TASK_MASKED_LM"), (tt_dataset *)NULL;
    if ((classes != NULL) != (n_classes > 0) || n_classes < 0)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': %d classes are given%s; give at least one, or NULL and "
                        "0 to take the classes from the file", path, n_classes, classes ? "" : " as NULL"),
               (tt_dataset *)NULL;
    if (tt__table_check(&t, &o) != TT_OK) return NULL;
    tt_dataset *d = (tt_dataset *)tt__calloc(ctx, sizeof *d);
    if (!d) return NULL;
    d->ctx = ctx;
    d->task = o.task;
    tt_status status = classes ? tt__table_given(d, classes, n_classes, &order) : TT_OK;
    t.order = order;
    if (status == TT_OK) status = tt__table_file(d, &t, &o, split);
    if (status == TT_OK) status = tt__table_labels(d, &t);
    tt__free(ctx, order);
    tt__free(ctx, t.names);
    tt__free(ctx, t.values);
    if (status == TT_OK && split && !t.splits) return tt__table_divided(d, path, split, o.split_column);
    return tt__dataset_end(d, status);
}
