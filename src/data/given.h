#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "dataset.h"

/* ---- texts and images of the caller */

/* A dataset of the named classes; NULL: an error. */
static tt_dataset *tt__dataset_new(tt_context *ctx, const char *const *class_names, int classes)
{
    tt_dataset *d = (tt_dataset *)tt__calloc(ctx, sizeof *d);
    if (!d) return NULL;
    d->ctx = ctx;
    return tt__dataset_end(d, tt__dataset_classes(d, class_names, classes));
}

/* Adds an image, or a copy of a text. */
static tt_status tt__dataset_put(tt_dataset *d, const char *of, const tt_text *text, int label)
{
    if (text && !text->text && text->bytes)
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "%s: text %d is NULL", of, d->count);
    char *copy = text ? tt__chunks_text(d->ctx, &d->chunks, text->text, text->bytes) : NULL;
    if (text && !copy)
        return tt__fail(d->ctx, TT_ERR_MEMORY, "out of memory for the %zu bytes of text %d", text->bytes,
                        d->count);
    if (label < 0 || label >= d->n_classes)
        return tt__fail(d->ctx, TT_ERR_ARGUMENT, "%s: %s %d has label %d; labels go from 0 to %d", of,
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
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: %lld texts%s of %d classes%s; expected at "
                        "least one text and one class", (long long)count, texts ? "" : " (NULL)", classes,
                        class_names ? "" : " (NULL)"), (tt_dataset *)NULL;
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
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_dataset_images: %lld images%s of %d classes%s%s; expected "
                        "at least one image and one class, and labels, class_names and read",
                        (long long)source->count, source->labels ? "" : " without labels", source->classes,
                        source->class_names ? "" : " without class_names",
                        source->read ? "" : " without read"), (tt_dataset *)NULL;
    tt_dataset *d = tt__dataset_new(ctx, source->class_names, source->classes);
    tt_status status = d ? TT_OK : ctx->status;
    if (d) {
        d->images = true;
        d->source = *source;
        d->source.labels = NULL; /* the caller may free them now */
        d->source.class_names = NULL;
    }
    for (int64_t i = 0; i < source->count && status == TT_OK; i++)
        status = tt__dataset_put(d, "tt_dataset_images", NULL, source->labels[i]);
    return tt__dataset_end(d, status);
}
