#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/utf8.h"

/* ---------------------------------------------------------------------------------------------- datasets */

/* A text or an image with its labels. */
typedef struct tt__example {
    const char *text, *pair;       /* pair: the second text of a pair; NULL: none */
    const char *negative;          /* TT_TASK_EMBED: a third text; NULL: none */
    size_t bytes, pair_bytes, negative_bytes; /* number of bytes of the texts */
    int64_t number;                /* number of the image in its source */
    int label;                     /* number of the class; 0 for other tasks than TT_TASK_CLASS */
    int n_words;                   /* number of words; while a table is read, number of labels */
    float *values;                 /* (tt__values_per_example) values of TT_TASK_LABELS and TT_TASK_SCORES, or
                                      the score of a pair of TT_TASK_EMBED; NULL: none */
    tt_word *words;                /* (n_words) words of TT_TASK_TAGS */
} tt__example;

struct tt_dataset {
    tt_context *ctx;
    tt_task task;
    bool pairs;              /* at least one text has a second text */
    bool negatives;          /* at least one text has a third text */
    tt__example *examples;
    int count, capacity;
    const char **classes;
    int n_classes;
    tt__chunk *chunks;       /* memory of texts, class names, values and words */
    tt__file_bytes file;     /* bytes of a CSV table: texts and labels, unquoted in place and ended by NULs */
    bool images;             /* the examples are images, not texts */
    tt_image_source source;  /* source of the images */
};

void tt_dataset_free(tt_dataset *d)
{
    if (!d) return;
    tt_context *ctx = d->ctx;
    tt__free(ctx, d->examples);
    tt__free(ctx, (void *)d->classes);
    tt__chunks_free(ctx, &d->chunks);
    if (d->file.bytes) tt__file_close(ctx, &d->file);
    tt__free(ctx, d);
}

int64_t tt_dataset_count(const tt_dataset *d) { return d->count; }

/* Returns the number of values of an example that has values. */
static size_t tt__values_per_example(const tt_dataset *d)
{
    return d->task == TT_TASK_EMBED ? 1 : (size_t)d->n_classes;
}

const char *tt_dataset_text(const tt_dataset *d, int64_t i, size_t *bytes)
{
    if (i < 0 || i >= d->count) { if (bytes) *bytes = 0; return NULL; }
    if (bytes) *bytes = d->images ? 0 : d->examples[i].bytes;
    return d->images ? "" : d->examples[i].text;
}

tt_task tt_dataset_task(const tt_dataset *d) { return d->task; }

const char *tt_dataset_pair(const tt_dataset *d, int64_t i, size_t *bytes)
{
    const tt__example *e = i >= 0 && i < d->count ? &d->examples[i] : NULL;
    if (bytes) *bytes = e && e->pair ? e->pair_bytes : 0;
    return e ? e->pair : NULL;
}

const char *tt_dataset_negative(const tt_dataset *d, int64_t i, size_t *bytes)
{
    const tt__example *e = i >= 0 && i < d->count ? &d->examples[i] : NULL;
    if (bytes) *bytes = e && e->negative ? e->negative_bytes : 0;
    return e ? e->negative : NULL;
}

int tt_dataset_label(const tt_dataset *d, int64_t i)
{
    return d->task == TT_TASK_CLASS && i >= 0 && i < d->count ? d->examples[i].label : -1;
}

const float *tt_dataset_values(const tt_dataset *d, int64_t i)
{
    return i >= 0 && i < d->count ? d->examples[i].values : NULL;
}

const tt_word *tt_dataset_words(const tt_dataset *d, int64_t i, int *n)
{
    const bool tags = d->task == TT_TASK_TAGS && i >= 0 && i < d->count;
    *n = tags ? d->examples[i].n_words : 0;
    return tags ? d->examples[i].words : NULL;
}

int tt_dataset_classes(const tt_dataset *d) { return d->n_classes; }
const char *tt_dataset_class_name(const tt_dataset *d, int class_index)
{
    return class_index >= 0 && class_index < d->n_classes ? d->classes[class_index] : NULL;
}

void tt_dataset_counts(const tt_dataset *d, int64_t *counts)
{
    for (int c = 0; c < d->n_classes; c++) counts[c] = 0;
    for (int i = 0; i < d->count; i++) {
        const tt__example *e = &d->examples[i];
        if (d->task == TT_TASK_CLASS) counts[e->label]++;
        for (int c = 0; c < d->n_classes && e->values; c++)
            counts[c] += d->task == TT_TASK_SCORES || e->values[c] > 0;
        for (int w = 0; w < e->n_words; w++)
            if (e->words[w].tag >= 0) counts[e->words[w].tag]++;
    }
}

tt_status tt_dataset_weights(const tt_dataset *d, float *weights)
{
    const int n = d->n_classes;
    int64_t *counts = (int64_t *)tt__calloc(d->ctx, sizeof *counts * (size_t)n), all = 0;
    if (!counts) return TT_ERR_MEMORY;
    tt_dataset_counts(d, counts);
    for (int c = 0; c < n; c++) all += counts[c];
    for (int c = 0; c < n; c++) {
        const double count = (double)counts[c], own = d->task == TT_TASK_LABELS ? (double)d->count - count
                                                                               : (double)all / n;
        weights[c] = counts[c] ? (float)(own / count) : 0;
        if (d->task == TT_TASK_SCORES || (d->task == TT_TASK_LABELS && !counts[c])) weights[c] = 1;
    }
    tt__free(d->ctx, counts);
    return TT_OK;
}

/* Renumbers the classes: class from[k] gets the number to[k], for each k below the number of classes. */
static tt_status tt__dataset_renumber(tt_dataset *d, const uint32_t *from, const uint32_t *to)
{
    const size_t n = (size_t)d->n_classes;
    int *number = (int *)tt__alloc(d->ctx, sizeof *number * n);
    const char **names = number ? (const char **)tt__alloc(d->ctx, sizeof *names * n) : NULL;
    float *row = names ? (float *)tt__alloc(d->ctx, sizeof *row * n) : NULL;
    for (size_t k = 0; k < n && row; k++) number[from[k]] = (int)to[k];
    for (size_t k = 0; k < n && row; k++) names[number[k]] = d->classes[k];
    for (tt__example *e = d->examples; row && e < d->examples + d->count; e++) {
        if (d->task == TT_TASK_CLASS) e->label = number[e->label];
        for (size_t k = 0; k < n && e->values; k++) row[number[k]] = e->values[k];
        if (e->values) memcpy(e->values, row, sizeof *row * n);
        for (int w = 0; w < e->n_words; w++)
            if (e->words[w].tag >= 0) e->words[w].tag = number[e->words[w].tag];
    }
    if (row) memcpy((void *)d->classes, (const void *)names, sizeof *names * n);
    tt__free(d->ctx, number);
    tt__free(d->ctx, (void *)names);
    tt__free(d->ctx, row);
    return row ? TT_OK : TT_ERR_MEMORY;
}

/* Returns dataset d if `status` is TT_OK; otherwise frees d and returns NULL. */
static tt_dataset *tt__dataset_end(tt_dataset *d, tt_status status)
{
    if (status == TT_OK) return d;
    tt_dataset_free(d);
    return NULL;
}

tt_status tt_text_begin(tt_context *ctx, const char *path, const char *text, size_t bytes, size_t *begin)
{
    static const struct { const char *mark; size_t bytes; const char *name; } marks[] = {
        {"\xFF\xFE\0\0", 4, "UTF-32"}, {"\0\0\xFE\xFF", 4, "UTF-32"}, {"\xFF\xFE", 2, "UTF-16"},
        {"\xFE\xFF", 2, "UTF-16"}};
    long long line = 1;
    for (int i = 0; i < TT__COUNT(marks); i++)
        if (bytes >= marks[i].bytes && memcmp(text, marks[i].mark, marks[i].bytes) == 0)
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s' begins with the byte order mark of %s, but must be "
                            "UTF-8: convert the file, for example with iconv -f %s -t UTF-8", path,
                            marks[i].name, marks[i].name);
    /* UTF-8 text has few control characters. In UTF-16 text of most scripts, every other byte is a control
       character. */
    const size_t looked = bytes < 4096 ? bytes : 4096;
    size_t control[2] = {0, 0}; /* number of control characters at even offsets; at odd offsets */
    for (size_t i = 0; i < looked; i++)
        control[i % 2] += (unsigned char)text[i] < ' ' && !(text[i] >= '\t' && text[i] <= '\r');
    if (8 * (control[0] + control[1]) > looked)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s': %zu of the first %zu bytes are control characters, so the "
                        "file is not text in UTF-8: if it is text in UTF-16, convert it, for example with "
                        "iconv -f UTF-16%s -t UTF-8", path, control[0] + control[1], looked,
                        control[0] > control[1] ? "BE" : "LE");
    const size_t invalid = tt__utf8_invalid(text, bytes);
    *begin = bytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
    if (invalid == bytes) return TT_OK;
    for (size_t i = 0; i < invalid; i++) line += text[i] == '\n';
    return tt__fail(ctx, TT_ERR_FORMAT, "'%s', line %lld, byte %zu: the byte 0x%02x is not valid UTF-8: if "
                    "the file is text in Latin-1, convert it, for example with iconv -f LATIN1 -t UTF-8",
                    path, line, invalid, (unsigned char)text[invalid]);
}

static tt__example *tt__dataset_add(tt_dataset *d, const char *path)
{
    if (!TT__GROW(d->ctx, d->examples, d->count, d->capacity))
        return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for the %d %s of '%s': free memory",
                        d->count + 1,
                        d->images ? "images" : "texts", path), (tt__example *)NULL;
    tt__example *e = &d->examples[d->count++];
    memset(e, 0, sizeof *e);
    return e;
}

/* Sets the dataset's classes to copies of n names. */
static tt_status tt__number_classes(tt_dataset *d, const char *const *names, int n)
{
    d->classes = (const char **)tt__alloc(d->ctx, (size_t)n * sizeof *d->classes);
    if (!d->classes) return TT_ERR_MEMORY;
    for (d->n_classes = 0; d->n_classes < n; d->n_classes++) {
        const char *name = names[d->n_classes];
        if (!name)
            return tt__fail(d->ctx, TT_ERR_ARGUMENT,
                            "the name of class %d of %d is NULL: give every class a name", d->n_classes, n);
        size_t valid = tt__utf8_invalid(name, strlen(name)); /* config.json lists the names in UTF-8 */
        if (name[valid])
            return tt__fail(d->ctx, TT_ERR_ARGUMENT, "the name of class %d of %d, '%.*s', is followed by the "
                            "byte 0x%02x, which is not valid UTF-8: rename the class", d->n_classes, n,
                            (int)tt__min((int64_t)valid, 200), name, (unsigned char)name[valid]);
        d->classes[d->n_classes] = tt__chunks_text(d->ctx, &d->chunks, name, strlen(name));
        if (!d->classes[d->n_classes])
            return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for the names of %d classes: free memory",
                            n);
    }
    return TT_OK;
}

/* Chooses n examples at random, from each class in proportion to its size. Examples that are missing because
   sizes are rounded down come from any class. The first n entries of `order` become the numbers of the chosen
   examples, in random order. */
static tt_status tt__dataset_choose(const tt_dataset *d, int64_t n, uint64_t key, uint32_t *order)
{
    const int classes = (int)tt__max(1, d->n_classes); /* without classes all labels are 0 */
    int64_t *quota = (int64_t *)tt__calloc(d->ctx, sizeof *quota * (size_t)classes), spare = n;
    if (!quota) return TT_ERR_MEMORY;
    for (int i = 0; i < d->count; i++) quota[d->examples[i].label]++;
    for (int c = 0; c < classes; c++) spare -= quota[c] = quota[c] * n / d->count;
    tt__shuffle(order, (uint32_t)d->count, key);
    for (int k = 0, chosen = 0; k < d->count; k++) {
        int label = d->examples[order[k]].label;
        if (quota[label] > 0) quota[label]--;
        else if (spare > 0) spare--;
        else continue;
        order[chosen++] = order[k];
    }
    tt__free(d->ctx, quota);
    return TT_OK;
}

/* ---- datasets of texts and images that the caller provides */

/* Creates an empty dataset with copies of the class names. Returns NULL after an error. */
static tt_dataset *tt__dataset_new(tt_context *ctx, tt_task task, const char *const *class_names, int classes)
{
    tt_dataset *d = (tt_dataset *)tt__calloc(ctx, sizeof *d);
    if (!d) return NULL;
    d->ctx = ctx;
    d->task = task;
    return tt__dataset_end(d, tt__number_classes(d, class_names, classes));
}

/* Copies the texts, the values and the words of an example into the dataset's memory. */
static tt_status tt__dataset_copy(tt_dataset *d, tt__example *e)
{
    const size_t values = e->values ? sizeof *e->values * tt__values_per_example(d) : 0;
    const size_t words = sizeof *e->words * (size_t)e->n_words;
    char *text = e->text ? tt__chunks_text(d->ctx, &d->chunks, e->text, e->bytes) : NULL;
    char *pair = e->pair ? tt__chunks_text(d->ctx, &d->chunks, e->pair, e->pair_bytes) : NULL;
    char *third = e->negative ? tt__chunks_text(d->ctx, &d->chunks, e->negative, e->negative_bytes) : NULL;
    void *copy = values ? tt__chunks_take(d->ctx, &d->chunks, values) : NULL;
    void *tags = words ? tt__chunks_take(d->ctx, &d->chunks, words) : NULL;
    if ((e->text && !text) || (e->pair && !pair) || (e->negative && !third) || (values && !copy) ||
        (words && !tags))
        return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for the %zu bytes of text %d: free memory",
                        e->bytes + e->pair_bytes + e->negative_bytes, d->count - 1);
    if (values) memcpy(copy, e->values, values);
    if (words) memcpy(tags, e->words, words);
    e->text = text;
    e->pair = pair;
    e->negative = third;
    e->values = (float *)copy;
    e->words = (tt_word *)tags;
    d->pairs |= pair != NULL;
    d->negatives |= third != NULL;
    return TT_OK;
}

/* Checks text number d->count of the caller: its labels, and whether its second and third text fit the
   task. */
static tt_status tt__dataset_check(const tt_dataset *d, const tt_text *text)
{
    const bool values = d->task == TT_TASK_LABELS || d->task == TT_TASK_SCORES;
    const size_t first = 0, *end = &first; /* end of the previous word */
    if ((!text->text && text->bytes) || (!text->words && text->n_words))
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: %s %d is NULL: pass a pointer, or the "
                        "size 0", text->words || !text->n_words ? "text" : "the list of words of text",
                        d->count);
    if (values && !text->values)
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: the values of text %d are NULL; expected "
                        "%d values", d->count, d->n_classes);
    for (int c = 0; c < d->n_classes && values; c++) {
        const float x = text->values[c];
        if (d->task == TT_TASK_SCORES ? !isfinite(x) : !(x >= 0 && x <= 1))
            return tt__fail(d->ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: value %d of text %d is %g; expected "
                            "%s", c, d->count, x,
                            d->task == TT_TASK_SCORES ? "a finite number" : "a number from 0 to 1");
    }
    if (d->task == TT_TASK_EMBED && (!text->pair || (d->count && d->negatives != (text->negative != NULL))))
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: text %d has no %s, but TT_TASK_EMBED "
                        "needs a pair for every text, and a negative for all texts or for none", d->count,
                        !text->pair ? "pair" : text->negative ? "negative before it" : "negative");
    const bool scored = d->task == TT_TASK_EMBED && text->values;
    if (scored && !isfinite(*text->values))
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: the score of pair %d is %g; expected a "
                        "finite number", d->count, *text->values);
    if (d->task == TT_TASK_EMBED && d->count && (d->examples[0].values != NULL) != scored)
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: pair %d has %s score, unlike pair 0: "
                        "give all pairs a score, or none", d->count, scored ? "a" : "no");
    if (d->task != TT_TASK_TAGS) return TT_OK;
    if (text->pair)
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: text %d has a second text, but "
                        "TT_TASK_TAGS reads one text: leave `pair` NULL", d->count);
    for (const tt_word *w = text->words; w < text->words + text->n_words; end = &w->end, w++)
        if (w->begin < *end || w->end <= w->begin || w->end > text->bytes || w->tag < -1 ||
            w->tag >= d->n_classes)
            return tt__fail(d->ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: word %d of text %d begins at byte "
                            "%zu and ends at %zu, with tag %d; expected a begin of at least %zu, an end "
                            "after it and at most %zu, and a tag from -1 (none) to %d",
                            (int)(w - text->words), d->count, w->begin, w->end, w->tag, *end, text->bytes,
                            d->n_classes - 1);
    return TT_OK;
}

/* Adds an example to the dataset: a copy of `text` or, if `text` is NULL, the next image of the source. */
static tt_status tt__dataset_put(tt_dataset *d, const char *of, const tt_text *text, int label)
{
    if (text && tt__dataset_check(d, text) != TT_OK) return d->ctx->status;
    if (d->task == TT_TASK_CLASS && (label < 0 || label >= d->n_classes))
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "%s: %s %d has label %d, but labels must be 0 to %d", of,
                        d->images ? "image" : "text", d->count, label, d->n_classes - 1);
    tt__example *e = tt__dataset_add(d, of);
    if (!e) return TT_ERR_MEMORY;
    e->number = d->count - 1;
    e->label = d->task == TT_TASK_CLASS ? label : 0;
    if (!text) return TT_OK;
    e->text = text->text ? text->text : "";
    e->bytes = text->bytes;
    e->pair = text->pair;
    e->pair_bytes = text->pair ? text->pair_bytes : 0;
    e->negative = d->task == TT_TASK_EMBED ? text->negative : NULL;
    e->negative_bytes = e->negative ? text->negative_bytes : 0;
    const bool values = d->task == TT_TASK_LABELS || d->task == TT_TASK_SCORES || d->task == TT_TASK_EMBED;
    e->values = values ? (float *)(uintptr_t)text->values : NULL;
    e->words = (tt_word *)(uintptr_t)text->words;
    e->n_words = d->task == TT_TASK_TAGS ? text->n_words : 0;
    return tt__dataset_copy(d, e);
}

static bool tt__is_task(tt_task task) { return (int)task >= TT_TASK_CLASS && task <= TT_TASK_MASKED_LM; }
/* Returns whether the examples of a task have neither labels nor classes. */
static bool tt__has_no_labels(tt_task task) { return task == TT_TASK_EMBED || task == TT_TASK_MASKED_LM; }

tt_dataset *tt_dataset_texts(tt_context *ctx, tt_task task, const tt_text *texts, int64_t count,
                             const char *const *class_names, int classes)
{
    const bool none = tt__has_no_labels(task);
    if (count < 1 || count > INT_MAX || !texts || !tt__is_task(task) ||
        !(none ? !classes : classes > 0 && class_names))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: there are %lld texts%s of %d classes%s, "
                        "task %d; expected at least one text, one of tt_task, and at least one class, or 0 "
                        "for TT_TASK_EMBED and TT_TASK_MASKED_LM",
                        (long long)count, texts ? "" : " (NULL)", classes, class_names ? "" : " (NULL)",
                        (int)task), (tt_dataset *)NULL;
    tt_dataset *d = tt__dataset_new(ctx, task, class_names, classes);
    tt_status status = d ? TT_OK : ctx->status;
    for (int64_t i = 0; i < count && status == TT_OK; i++)
        status = tt__dataset_put(d, "tt_dataset_texts", &texts[i], texts[i].label);
    return tt__dataset_end(d, status);
}

tt_dataset *tt_dataset_images(tt_context *ctx, const tt_image_source *source)
{
    if (source->count < 1 || source->count > INT_MAX || source->classes < 1 || !source->labels ||
        !source->class_names || !source->read)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_dataset_images: there are %lld images%s of %d classes%s%s; "
                        "expected at least one image and one class, with labels, class_names and read",
                        (long long)source->count, source->labels ? "" : " without labels", source->classes,
                        source->class_names ? "" : " without class_names",
                        source->read ? "" : " without read"), (tt_dataset *)NULL;
    tt_dataset *d = tt__dataset_new(ctx, TT_TASK_CLASS, source->class_names, source->classes);
    tt_status status = d ? TT_OK : ctx->status;
    if (d) {
        d->images = true;
        d->source = *source;
        d->source.labels = NULL; /* the caller may free labels and class_names now */
        d->source.class_names = NULL;
    }
    for (int64_t i = 0; i < source->count && status == TT_OK; i++)
        status = tt__dataset_put(d, "tt_dataset_images", NULL, source->labels[i]);
    return tt__dataset_end(d, status);
}
