#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/utf8.h"

/* ---------------------------------------------------------------------------------------------- datasets */

/* A text or an image with its class. */
typedef struct tt__example {
    const char *text, *label_text; /* label_text: the label in a table, before classes are numbered */
    size_t bytes;                  /* number of bytes of the text */
    int64_t number;                /* number of the image in its source */
    int label;                     /* number of the class */
} tt__example;

struct tt_dataset {
    tt_context *ctx;
    tt__example *examples;
    int count, capacity;
    const char **classes;
    int n_classes;
    tt__chunk *chunks;       /* copies of the caller's texts and class names */
    tt__file_bytes file;     /* bytes of a table: texts and labels, unquoted in place and ended by NULs */
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

const char *tt_dataset_text(const tt_dataset *d, int64_t i, size_t *bytes)
{
    if (i < 0 || i >= d->count) { if (bytes) *bytes = 0; return NULL; }
    if (bytes) *bytes = d->images ? 0 : d->examples[i].bytes;
    return d->images ? "" : d->examples[i].text;
}

int tt_dataset_label(const tt_dataset *d, int64_t i)
{
    return i >= 0 && i < d->count ? d->examples[i].label : -1;
}

int tt_dataset_classes(const tt_dataset *d) { return d->n_classes; }
const char *tt_dataset_class_name(const tt_dataset *d, int class_index)
{
    return class_index >= 0 && class_index < d->n_classes ? d->classes[class_index] : NULL;
}

void tt_dataset_counts(const tt_dataset *d, int64_t *counts)
{
    for (int c = 0; c < d->n_classes; c++) counts[c] = 0;
    for (int i = 0; i < d->count; i++) counts[d->examples[i].label]++;
}

/* Renumbers the classes: class from[k] gets the number to[k], for each k below the number of classes. */
static tt_status tt__dataset_renumber(tt_dataset *d, const uint32_t *from, const uint32_t *to)
{
    const size_t n = (size_t)d->n_classes;
    int *number = (int *)tt__alloc(d->ctx, sizeof *number * n);
    const char **names = number ? (const char **)tt__alloc(d->ctx, sizeof *names * n) : NULL;
    for (size_t k = 0; k < n && names; k++) number[from[k]] = (int)to[k];
    for (size_t k = 0; k < n && names; k++) names[number[k]] = d->classes[k];
    for (int i = 0; i < d->count && names; i++) d->examples[i].label = number[d->examples[i].label];
    if (names) memcpy((void *)d->classes, (const void *)names, sizeof *names * n);
    tt__free(d->ctx, number);
    tt__free(d->ctx, (void *)names);
    return names ? TT_OK : TT_ERR_MEMORY;
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
    /* UTF-8 text has few control characters. In UTF-16 text of most scripts, every other byte is one. */
    const size_t looked = bytes < 4096 ? bytes : 4096;
    size_t control[2] = {0, 0}; /* numbers of control characters at even and at odd offsets */
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
        return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for the %d %s of '%s'", d->count + 1,
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
            return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for the names of %d classes", n);
    }
    return TT_OK;
}

/* Chooses n examples at random, from each class in proportion to its size. Those that are missing because of
   rounding come from any class, at random. Writes the numbers of all `count` examples to `order`: the first n
   entries are the chosen examples, shuffled. */
static tt_status tt__dataset_choose(const tt_dataset *d, int64_t n, uint64_t key, uint32_t *order)
{
    int64_t *quota = (int64_t *)tt__calloc(d->ctx, sizeof *quota * (size_t)d->n_classes), spare = n;
    if (!quota) return TT_ERR_MEMORY;
    for (int i = 0; i < d->count; i++) quota[d->examples[i].label]++;
    for (int c = 0; c < d->n_classes; c++) spare -= quota[c] = quota[c] * n / d->count;
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
static tt_dataset *tt__dataset_new(tt_context *ctx, const char *const *class_names, int classes)
{
    tt_dataset *d = (tt_dataset *)tt__calloc(ctx, sizeof *d);
    if (!d) return NULL;
    d->ctx = ctx;
    return tt__dataset_end(d, tt__number_classes(d, class_names, classes));
}

/* Adds an image, or a copy of a text. */
static tt_status tt__dataset_put(tt_dataset *d, const char *of, const tt_text *text, int label)
{
    if (text && !text->text && text->bytes)
        return tt__fail(d->ctx, TT_ERR_ARGUMENT,
                        "%s: text %d is NULL: pass a pointer to its bytes, or bytes = 0", of, d->count);
    char *copy = text ? tt__chunks_text(d->ctx, &d->chunks, text->text, text->bytes) : NULL;
    if (text && !copy)
        return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for the %zu bytes of text %d", text->bytes,
                        d->count);
    if (label < 0 || label >= d->n_classes)
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "%s: %s %d has label %d, but labels must be 0 to %d", of,
                        d->images ? "image" : "text", d->count, label, d->n_classes - 1);
    tt__example *e = tt__dataset_add(d, of);
    if (!e) return TT_ERR_MEMORY;
    e->number = d->count - 1;
    e->label = label;
    e->text = copy;
    e->bytes = text ? text->bytes : 0;
    return TT_OK;
}

tt_dataset *tt_dataset_texts(tt_context *ctx, const tt_text *texts, int64_t count,
                             const char *const *class_names, int classes)
{
    if (count < 1 || count > INT_MAX || !texts || classes < 1 || !class_names)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: there are %lld texts%s of %d classes%s; "
                        "expected at least one text and one class", (long long)count, texts ? "" : " (NULL)",
                        classes, class_names ? "" : " (NULL)"), (tt_dataset *)NULL;
    tt_dataset *d = tt__dataset_new(ctx, class_names, classes);
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
    tt_dataset *d = tt__dataset_new(ctx, source->class_names, source->classes);
    tt_status status = d ? TT_OK : ctx->status;
    if (d) {
        d->images = true;
        d->source = *source;
        d->source.labels = NULL; /* the caller may free labels and class_names after this call */
        d->source.class_names = NULL;
    }
    for (int64_t i = 0; i < source->count && status == TT_OK; i++)
        status = tt__dataset_put(d, "tt_dataset_images", NULL, source->labels[i]);
    return tt__dataset_end(d, status);
}
