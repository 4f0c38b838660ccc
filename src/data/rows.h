#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "dataset.h"
#include "labels.h"
#include "tables.h"

/* ---- files of examples that are not tables: lines of JSON, and words with tags in the format of CoNLL */

/* Fails because column `column` of a line of JSON differs from what was expected. node: the column's value;
   -1: the column is missing. */
static tt_status tt__row_wrong(const tt__table *t, const tt__json *j, int node, int column,
                               const char *expected)
{
    char there[300] = "";
    tt__text_buffer list = {there, sizeof there, 0};
    if (node >= 0)
        return tt__row_fail(t, "\"%.100s\" is %s; expected %s", t->column[column],
                            tt__json_kind_name(j, node), expected);
    for (int child = 1; child < j->nodes[0].after; child = j->nodes[child].after)
        tt__print(&list, "%s\"%.100s\"", child > 1 ? ", " : "", j->pool + j->nodes[child].key);
    const char *more = list.length >= sizeof there ? "..." : "";
    return tt__row_fail(t, "the object has no \"%.100s\", but %s%s; expected %s: set the column's name "
                        "(tt_table_options; --text-column, --label-column, --pair-column)", t->column[column],
                        *there ? there : "no members", more, expected);
}

/* Copies the text of a string of a line of JSON, into *text and *bytes. Returns false if memory runs out. */
static bool tt__row_text(tt_dataset *d, const tt__json *j, int node, const char **text, size_t *bytes)
{
    *bytes = (size_t)j->nodes[node].count;
    *text = tt__chunks_text(d->ctx, &d->chunks, j->pool + j->nodes[node].integer, *bytes);
    return *text != NULL;
}

/* Returns a copy of a label or tag of a line of JSON: the text of a string, or the digits of a number as the
   line writes the number; "" for the tag -100. Returns NULL after an error. */
static const char *tt__row_name(tt_dataset *d, const tt__table *t, const tt__json *j, const char *line,
                                int node)
{
    const tt__json_node *at = &j->nodes[node];
    const char *text = line + at->offset, *name;
    size_t bytes = strspn(text, "+-.0123456789eE");
    if (at->kind != TT__JSON_NUMBER_KIND && !tt__json_text(j, node))
        return tt__row_wrong(t, j, node, TT__COLUMN_LABEL, "a string without U+0000, or a number"),
               (const char *)NULL;
    if (at->kind == TT__JSON_STRING) text = tt__json_text(j, node), bytes = (size_t)at->count;
    else if (t->task == TT_TASK_TAGS && at->exact && at->integer == -100) bytes = 0;
    else if (!bytes) return NULL;
    if (at->kind == TT__JSON_STRING && !bytes)
        return tt__row_fail(t, "%s is empty: write one, or %s", t->task == TT_TASK_CLASS ? "the label" :
                            t->task == TT_TASK_TAGS ? "a tag" : "a label",
                            t->task == TT_TASK_TAGS ? "-100 if the word has none" : "remove the row"),
               (const char *)NULL;
    name = tt__chunks_text(d->ctx, &d->chunks, text, bytes);
    if (!name) tt__fail(t->ctx, TT_ERR_MEMORY, "out of memory for the labels of '%s': free memory", t->path);
    return name;
}

/* Reads the list of words of a line of JSON, and the list of their tags. The example's text consists of the
   words with a space between them. */
static tt_status tt__row_words(tt_dataset *d, tt__table *t, const tt__json *j, const char *line, int words,
                               int tags, tt__example *e)
{
    static const char list[] = "a list: the task of tags reads a list of words and a list of tags";
    if (words < 0 || j->nodes[words].kind != TT__JSON_ARRAY)
        return tt__row_wrong(t, j, words, TT__COLUMN_TEXT, list);
    if (tags < 0 || j->nodes[tags].kind != TT__JSON_ARRAY)
        return tt__row_wrong(t, j, tags, TT__COLUMN_LABEL, list);
    const int n = j->nodes[words].count;
    if (n != j->nodes[tags].count)
        return tt__row_fail(t, "the row has %d words, but %d tags; expected a tag for each word", n,
                            j->nodes[tags].count);
    size_t bytes = 0, at = 0;
    for (int w = words + 1, number = 1; w < j->nodes[words].after; w = j->nodes[w].after, number++) {
        if (j->nodes[w].kind != TT__JSON_STRING)
            return tt__row_fail(t, "item %d of \"%.100s\" is %s; expected a string", number,
                                t->column[TT__COLUMN_TEXT], tt__json_kind_name(j, w));
        if (!j->nodes[w].count)
            return tt__row_fail(t, "a word is empty: remove the word and its tag");
        bytes += (size_t)j->nodes[w].count + 1;
    }
    char *text = (char *)tt__chunks_take(d->ctx, &d->chunks, bytes ? bytes : 1);
    e->words = (tt_word *)tt__chunks_take(d->ctx, &d->chunks, sizeof *e->words * (size_t)(n ? n : 1));
    if (!text || !e->words)
        return tt__fail(t->ctx, TT_ERR_MEMORY, "out of memory for the words of '%s': free memory", t->path);
    for (int w = words + 1, k = 0; k < n; w = j->nodes[w].after, k++) {
        e->words[k].begin = at;
        memcpy(text + at, j->pool + j->nodes[w].integer, (size_t)j->nodes[w].count);
        e->words[k].end = at += (size_t)j->nodes[w].count;
        text[at++] = ' ';
    }
    e->text = text;
    e->bytes = at ? at - 1 : 0;
    text[e->bytes] = 0;
    for (int tag = tags + 1; tag < j->nodes[tags].after; tag = j->nodes[tag].after) {
        const char *name = tt__row_name(d, t, j, line, tag);
        if (!name || tt__table_name(d, t, e, name) != TT_OK) return t->ctx->status;
    }
    return TT_OK;
}

/* Reads an element of the list in a label column: the name of a class, 0 or 1 for a class, or a score. */
static tt_status tt__row_label(tt_dataset *d, tt__table *t, const tt__json *j, const char *line, int node,
                               tt__example *e)
{
    const tt__json_node *at = &j->nodes[node];
    const bool truth = at->kind == TT__JSON_TRUE || at->kind == TT__JSON_FALSE;
    const double x = truth ? at->kind == TT__JSON_TRUE : at->number;
    const bool number = at->kind == TT__JSON_NUMBER_KIND;
    if (t->task == TT_TASK_SCORES && (!number || !(fabs(x) <= FLT_MAX)))
        return tt__row_wrong(t, j, node, TT__COLUMN_LABEL, "a score (a number that a float holds), or a "
                             "list of scores");
    if (t->task == TT_TASK_SCORES) return tt__table_value(t, (float)x);
    if (number && x != 0 && x != 1)
        return tt__row_fail(t, "the label contains the number %g; expected 0 or 1 for each class, or the "
                            "names of labels in quotes", x);
    if (number || truth) return tt__table_value(t, (float)x);
    if (at->kind != TT__JSON_STRING)
        return tt__row_wrong(t, j, node, TT__COLUMN_LABEL, "a list of names, or of 0 and 1 for each class");
    const char *name = tt__row_name(d, t, j, line, node);
    return name ? tt__table_name(d, t, e, name) : t->ctx->status;
}

static tt_status tt__row_labels(tt_dataset *d, tt__table *t, const tt__json *j, const char *line, int node,
                                tt__example *e)
{
    const int first = t->n_values;
    const bool list = node >= 0 && j->nodes[node].kind == TT__JSON_ARRAY;
    tt_status status = TT_OK;
    if (node < 0 || (!list && t->task == TT_TASK_LABELS))
        return tt__row_wrong(t, j, node, TT__COLUMN_LABEL,
                             t->task == TT_TASK_CLASS ? "a string or a number"
                             : t->task == TT_TASK_LABELS ? "a list of labels" : "a score or scores");
    if (t->task == TT_TASK_CLASS) {
        const char *name = tt__row_name(d, t, j, line, node);
        return name ? tt__table_name(d, t, e, name) : t->ctx->status;
    }
    if (!list) status = tt__row_label(d, t, j, line, node, e);
    for (int child = node + 1; list && child < j->nodes[node].after && status == TT_OK;
         child = j->nodes[child].after)
        status = tt__row_label(d, t, j, line, child, e);
    return status == TT_OK ? tt__table_row_end(d, t, first) : status;
}

/* Reads the score of a pair of TT_TASK_EMBED. node: -1: the line has none. */
static tt_status tt__row_score(const tt_dataset *d, tt__table *t, const tt__json *j, int node)
{
    if (node < 0 || j->nodes[node].kind == TT__JSON_NULL) return tt__table_score(d, t, NULL);
    const double x = j->nodes[node].number;
    if (j->nodes[node].kind != TT__JSON_NUMBER_KIND || !(fabs(x) <= FLT_MAX))
        return tt__row_wrong(t, j, node, TT__COLUMN_LABEL, "a score (a number that a float holds)");
    const float score = (float)x;
    return tt__table_score(d, t, &score);
}

/* Adds the example of a line of JSON to the dataset if it belongs to part `split` (NULL: all lines). */
static tt_status tt__json_row(tt_dataset *d, tt__table *t, const tt__json *j, const char *line,
                              const char *split)
{
    int at[TT__COLUMNS];
    bool keep = true;
    tt_status status = TT_OK;
    if (j->nodes[0].kind != TT__JSON_OBJECT)
        return tt__row_fail(t, "the line is %s; expected an object with the columns as members: write an "
                            "object on each line, as jq -c '.[]' does of a list", tt__json_kind_name(j, 0));
    for (int i = 0; i < t->columns; i++) {
        at[i] = tt__json_get(j, 0, t->column[i]);
        if (i >= TT__COLUMN_SPLIT && at[i] >= 0 && j->nodes[at[i]].kind == TT__JSON_NULL) at[i] = -1;
        if (i >= TT__COLUMN_SPLIT && at[i] >= 0 && j->nodes[at[i]].kind != TT__JSON_STRING)
            return tt__row_wrong(t, j, at[i], i, "a string");
    }
    const int part = at[TT__COLUMN_SPLIT];
    if (!t->first_line) t->first_line = t->row_line, t->splits = part >= 0;
    if (split && t->splits != (part >= 0))
        return tt__row_fail(t, "the row has %s \"%.100s\", unlike line %lld: write it in all rows or in none",
                            part < 0 ? "no" : "a", t->column[TT__COLUMN_SPLIT], t->first_line);
    if (part >= 0)
        status = tt__table_part(t, j->pool + j->nodes[part].integer, (size_t)j->nodes[part].count, split,
                                &keep);
    if (status != TT_OK || !keep) return status;
    tt__example *e = tt__dataset_add(d, t->path);
    if (!e) return t->ctx->status;
    if (t->task == TT_TASK_TAGS)
        return tt__row_words(d, t, j, line, at[TT__COLUMN_TEXT], at[TT__COLUMN_LABEL], e);
    const bool embed = t->task == TT_TASK_EMBED;
    const int columns[] = {TT__COLUMN_TEXT, TT__COLUMN_PAIR, TT__COLUMN_NEGATIVE};
    const char **const texts[] = {&e->text, &e->pair, &e->negative};
    size_t *const bytes[] = {&e->bytes, &e->pair_bytes, &e->negative_bytes};
    for (int i = 0; i < (embed ? 3 : 2); i++) {
        const int node = at[columns[i]];
        if (node < 0 && !t->needs[columns[i]]) continue;
        if (node < 0 || j->nodes[node].kind != TT__JSON_STRING)
            return tt__row_wrong(t, j, node, columns[i], "a string");
        if (!tt__row_text(d, j, node, texts[i], bytes[i]))
            return tt__fail(t->ctx, TT_ERR_MEMORY, "out of memory for the %d texts of '%s': free memory",
                            d->count, t->path);
    }
    d->pairs |= e->pair != NULL;
    if (embed && d->count > 1 && d->negatives != (e->negative != NULL))
        return tt__row_fail(t, "the row has %s \"%.100s\", unlike the rows before: write it in all rows or "
                            "in none", e->negative ? "a" : "no", t->column[TT__COLUMN_NEGATIVE]);
    d->negatives |= e->negative != NULL;
    if (embed) return tt__row_score(d, t, j, at[TT__COLUMN_LABEL]);
    if (tt__has_no_labels(t->task)) return TT_OK;
    return tt__row_labels(d, t, j, line, at[TT__COLUMN_LABEL], e);
}

/* Reads a file whose lines are JSON objects, and closes the file: the dataset has copies of the texts. */
static tt_status tt__read_json_rows(tt_dataset *d, tt__table *t, const char *split)
{
    tt_status status = TT_OK;
    while (status == TT_OK && tt__table_row(t)) {
        const char *line = t->text + t->at, *end = (const char *)memchr(line, '\n', t->bytes - t->at);
        const size_t bytes = end ? (size_t)(end - line) : t->bytes - t->at;
        tt__json j;
        status = tt__json_parse_line(&j, d->ctx, t->path, t->line, t->at, line, bytes);
        if (status == TT_OK) status = tt__json_row(d, t, &j, line, split);
        tt__json_free(&j);
        t->at += bytes;
    }
    tt__file_close(d->ctx, &d->file);
    memset(&d->file, 0, sizeof d->file);
    return status;
}

/* Reads a text file: each line that is not empty is an example. */
static tt_status tt__read_lines(tt_dataset *d, tt__table *t)
{
    while (tt__table_row(t)) {
        char *line = t->text + t->at, *stop = (char *)memchr(line, '\n', t->bytes - t->at);
        char *end = stop ? stop : t->text + t->bytes;
        t->at = (size_t)(end - t->text);
        while (end > line && (end[-1] == ' ' || end[-1] == '\t' || end[-1] == '\r')) end--;
        if (end == line) continue;
        tt__example *e = tt__dataset_add(d, t->path);
        if (!e) return t->ctx->status;
        e->text = line;
        e->bytes = (size_t)(end - line);
        if (stop) t->at++, t->line++;
        *end = 0; /* overwrites white space, the newline, or the final NUL */
    }
    return TT_OK;
}

/* A sentence while its lines are read from a file in the format of CoNLL. The sentence's text overwrites the
   lines in the memory of the file. */
typedef struct tt__sentence { char *text; size_t bytes; tt_word *words; int n, capacity; } tt__sentence;

/* Adds the sentence to the dataset, and begins another one. */
static tt_status tt__sentence_end(tt_dataset *d, const tt__table *t, tt__sentence *s)
{
    if (!s->n) return TT_OK;
    tt__example *e = &d->examples[d->count - 1]; /* the example that tt__conll_line has added */
    const size_t bytes = sizeof *e->words * (size_t)s->n;
    if (!(e->words = (tt_word *)tt__chunks_take(d->ctx, &d->chunks, bytes)))
        return tt__fail(t->ctx, TT_ERR_MEMORY, "out of memory for the words of '%s': free memory", t->path);
    memcpy(e->words, s->words, bytes);
    e->text = s->text;
    e->bytes = s->bytes;
    s->text[s->bytes] = 0;
    s->n = 0;
    return TT_OK;
}

/* Adds the word and the tag of a line, the bytes [line, end), to the sentence. */
static tt_status tt__conll_line(tt_dataset *d, tt__table *t, tt__sentence *s, char *line, const char *end)
{
    const char *word_end = line, *tag = end;
    while (word_end < end && *word_end != ' ' && *word_end != '\t') word_end++;
    while (tag > word_end && tag[-1] != ' ' && tag[-1] != '\t') tag--;
    if (word_end == end || word_end == line)
        return tt__row_fail(t, "'%.*s' is %s; expected a word, columns that are not read, and a tag, with "
                            "spaces or tabs between them", (int)tt__min(end - line, 200), line,
                            word_end == line ? "no word at the line's start" : "one column");
    const char *name = tt__chunks_text(d->ctx, &d->chunks, tag, (size_t)(end - tag));
    if (!name || !TT__GROW(d->ctx, s->words, s->n, s->capacity))
        return tt__fail(t->ctx, TT_ERR_MEMORY, "out of memory for the tags of '%s': free memory", t->path);
    if (strlen(name) != (size_t)(end - tag))
        return tt__row_fail(t, "the tag contains a NUL byte: remove it");
    if (!s->n && !tt__dataset_add(d, t->path)) return t->ctx->status;
    if (!s->n) s->text = line, s->bytes = 0;
    else s->text[s->bytes++] = ' ';
    const size_t bytes = (size_t)(word_end - line);
    memmove(s->text + s->bytes, line, bytes);
    s->words[s->n].begin = s->bytes;
    s->words[s->n++].end = s->bytes += bytes;
    return tt__table_name(d, t, &d->examples[d->count - 1], name);
}

/* Returns whether a line [line, end) at the start of a sentence is a comment: "# key = value", "# newdoc" or
   "# newpar", with or without more, as in CoNLL-U, or "# id ..." with "key=value", as in MultiCoNER. */
static bool tt__conll_comment(const char *line, const char *end)
{
    static const char *const begins[] = {"# newdoc", "# newpar"};
    if (end - line < 2 || line[0] != '#' || line[1] != ' ') return false;
    for (int k = 0; k < TT__COUNT(begins); k++) {
        const size_t n = strlen(begins[k]);
        if ((size_t)(end - line) >= n && memcmp(line, begins[k], n) == 0) return true;
    }
    return memchr(line, '=', (size_t)(end - line)) != NULL;
}

/* Reads a file in the format of CoNLL: a word, perhaps other columns, and a tag on each line; an empty line
   after each sentence. */
static tt_status tt__read_conll(tt_dataset *d, tt__table *t)
{
    static const char document[] = "-DOCSTART-";
    tt__sentence s = {NULL, 0, NULL, 0, 0};
    tt_status status = TT_OK;
    for (; t->at < t->bytes && status == TT_OK; t->line++) {
        char *line = t->text + t->at, *stop = (char *)memchr(line, '\n', t->bytes - t->at);
        char *end = stop ? stop : t->text + t->bytes;
        t->at = (size_t)(end - t->text) + (stop != NULL);
        t->row_line = t->line;
        while (end > line && (end[-1] == ' ' || end[-1] == '\t' || end[-1] == '\r')) end--;
        if (!s.n && tt__conll_comment(line, end)) continue;
        if ((size_t)(end - line) >= sizeof document - 1 && memcmp(line, document, sizeof document - 1) == 0) {
            status = tt__sentence_end(d, t, &s); /* a document also ends the sentence before it */
            continue;
        }
        status = end == line ? tt__sentence_end(d, t, &s) : tt__conll_line(d, t, &s, line, end);
    }
    if (status == TT_OK) status = tt__sentence_end(d, t, &s);
    tt__free(d->ctx, s.words);
    return status;
}
