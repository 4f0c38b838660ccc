#pragma once
#include "../base/base.h"
#include "resize.h"
#include "dataset.h"
#include "dealer.h"

/* ---- loading images */

/* Returns the number, in the epoch, of the micro-batch of the image at place `at` of the epoch's order. Sets
   *first to the place of the micro-batch's first image and *seqs to its number of images. */
static int64_t tt__image_micro(const tt_loader *l, int64_t at, int64_t *first, int *seqs)
{
    const tt__dealer *d = &l->deal;
    const int64_t step = at / d->batch, from = step * d->batch, n = tt__min(d->batch, d->used - from);
    const int64_t micros = tt__deal_micros(d, n), whole = tt__deal_micros(d, d->batch);
    int64_t within, end;
    if (d->groups == 1) { /* only a step's last micro-batch has fewer than max_seqs images */
        within = (at - from) / d->max_seqs;
        *first = from + within * d->max_seqs;
        end = tt__min(from + n, *first + d->max_seqs);
    } else {
        within = ((at - from + 1) * micros - 1) / n;
        *first = from + within * n / micros;
        end = from + (within + 1) * n / micros;
    }
    *seqs = (int)(end - *first);
    return step * whole + within;
}

/* Replaces *height and *width, the size of an image, by the size to which the options resize the image. If a
   side would be longer than TT__IMAGE_SIDE, returns false and writes the reason to `why`. */
static bool tt__image_resized(const tt_image_options *o, int *height, int *width, char why[256])
{
    const int shorter = (int)tt__min(*height, *width), longer = (int)tt__max(*height, *width);
    const int64_t resized = (int64_t)o->resize_shortest * longer / shorter;
    if (resized > TT__IMAGE_SIDE) {
        snprintf(why, 256, "%d x %d pixels resized to a shorter side of %d get a longer side of %lld, but at "
                 "most %d are possible: set resize_height and resize_width", *height, *width,
                 o->resize_shortest, (long long)resized, TT__IMAGE_SIDE);
        return false;
    }
    const bool upright = *height >= *width;
    if (o->resize_height) *height = o->resize_height, *width = o->resize_width;
    if (o->resize_shortest) *height = (int)resized, *width = o->resize_shortest;
    if (o->resize_shortest && !upright) *height = o->resize_shortest, *width = (int)resized;
    return true;
}

/* Returns whether a resized and padded image is large enough for the crop that the options demand; if not,
   writes the reason to `why`. height, width: the size of the resized image before padding. */
static bool tt__image_fits(const tt_image_options *o, int height, int width, char why[256])
{
    if (o->height <= height + 2 * o->pad && o->width <= width + 2 * o->pad) return true;
    snprintf(why, 256, "%d x %d pixels cannot be cropped out of %d x %d pixels with a pad of %d on each "
             "side: set resize_height and resize_width, or a larger pad", o->height, o->width, height, width,
             o->pad);
    return false;
}

static bool tt__image_channels(const tt_image_options *o, int channels, char why[256])
{
    if (channels == o->channels || (o->channels == 3 && (channels == 1 || channels == 4))) return true;
    snprintf(why, 256, "%d channels cannot be converted to %d: set channels of the image options (channels = "
             "3 reads images of 1, 3 and 4)", channels, o->channels);
    return false;
}

/* Returns the pixel at which a crop begins along an axis; a negative pixel is in the padding. size: number of
   pixels of the axis without padding; wanted: number of pixels of the crop; random: any number, for a random
   crop. */
static int tt__crop_at(const tt_image_options *o, uint32_t random, int size, int wanted)
{
    int spare = size + 2 * o->pad - wanted;
    return (o->random_crop ? (int)((uint64_t)random * ((unsigned)spare + 1) >> 32) : spare / 2) - o->pad;
}

/* Resizes, pads, crops and flips an image by the options and writes it to `to` (height, width, channels).
   key: the key of the random numbers. After an error, `why` has the reason. */
static tt_status tt__image_transform(tt_context *ctx, tt__resampler *r, const tt_image_options *o,
                                     const tt_image *image, uint64_t key, uint8_t *to, char why[256])
{
    const uint32_t zero[4] = {0, 0, 0, 0};
    uint32_t u[4];
    if (!tt__image_valid(image)) {
        snprintf(why, 256, "the image has %d x %d pixels%s and %d channels; expected sides of 1 to %d pixels "
                 "and 1 to 4 channels", image->height, image->width, image->pixels ? "" : " (NULL)",
                 image->channels, TT__IMAGE_SIDE);
        return TT_ERR_ARGUMENT;
    }
    int height = image->height, width = image->width;
    if (!tt__image_channels(o, image->channels, why) || !tt__image_resized(o, &height, &width, why) ||
        !tt__image_fits(o, height, width, why))
        return TT_ERR_ARGUMENT;
    tt__philox(zero, key, u);
    int top = tt__crop_at(o, u[0], height, o->height), left = tt__crop_at(o, u[1], width, o->width);

    /* w: the part of the crop that is not padding */
    tt__window w = {(int)tt__max(top, 0), (int)tt__max(left, 0), 0, 0, o->flip && u[2] >> 31};
    w.height = (int)tt__min(top + o->height, height) - w.top;
    w.width = (int)tt__min(left + o->width, width) - w.left;
    size_t pitch = (size_t)o->width * (size_t)o->channels;
    if (w.height < o->height || w.width < o->width) memset(to, 0, (size_t)o->height * pitch);
    if (w.height < 1 || w.width < 1) return TT_OK; /* the whole crop is padding */
    int x = w.mirror ? left + o->width - w.left - w.width : w.left - left;
    to += (size_t)(w.top - top) * pitch + (size_t)x * (size_t)o->channels;
    if (tt__resample_image(ctx, r, image, height, width, o->resample, o->channels, &w, to, pitch))
        return TT_OK;
    snprintf(why, 256, "out of memory to resize %d x %d pixels to %d x %d: free memory", image->height,
             image->width, height, width);
    return TT_ERR_MEMORY;
}

/* Makes the image at place l->cursor of the epoch's order. The caller holds the mutex; the function releases
   the mutex while it reads and transforms the image. */
static void tt__image_make(tt_loader *l, tt__loader_thread *thread)
{
    const tt_image_source *source = &l->d->source;
    int64_t first, at = l->cursor++;
    int seqs;
    uint32_t index = l->deal.order[at];
    const int64_t micro = tt__image_micro(l, at, &first, &seqs);
    tt__ring_slot *slot = &l->ring[micro % l->slots];
    const int64_t of_step = micro % tt__deal_micros(&l->deal, l->o.batch);
    const int rank = (int)((l->deal_by_step ? of_step : micro) % tt__max(1, l->deal_data));
    slot->left_out = l->deal_data > 0 && (rank < l->deal_first || rank >= l->deal_end);
    if (slot->left_out) { /* another process uses this micro-batch, so its images are not made */
        slot->done++;
        pthread_cond_signal(&l->ready);
        return;
    }
    uint64_t key = tt__stream_key(l->ctx->options.seed, TT__RANDOM_IMAGE, (uint64_t)l->deal.epoch, index);
    l->busy++;
    pthread_mutex_unlock(&l->mutex);

    const tt__example *e = &l->d->examples[index];
    tt_image image = {NULL, 0, 0, 0};
    tt_status status = TT_ERR_FILE;
    char why[256] = "";
    const char *failed = source->read(source->user, e->number, &image);
    if (failed) snprintf(why, sizeof why, "%s", failed);
    else {
        tt__float_mode mode = tt__float_default();
        status = tt__image_transform(l->ctx, &thread->resampler, &l->image, &image, key,
                                     slot->pixels + (size_t)(at - first) * l->image_bytes, why);
        tt__float_restore(mode);
        if (source->release) source->release(source->user, &image);
    }

    pthread_mutex_lock(&l->mutex);
    if (status != TT_OK && at - first < slot->failed) {
        slot->failed = (int)(at - first);
        slot->status = status;
        strcpy(slot->why, why);
        l->failed = true;
    }
    slot->done++;
    l->busy--;
    pthread_cond_signal(&l->ready);
}

static void *tt__image_main(void *arg)
{
    tt__loader_thread *thread = (tt__loader_thread *)arg;
    tt_loader *l = thread->loader;
    int64_t first;
    int seqs;
    pthread_mutex_lock(&l->mutex);
    while (!l->stop) {
        if (l->cursor < l->deal.used && tt__image_micro(l, l->cursor, &first, &seqs) < l->base + l->slots)
            tt__image_make(l, thread);
        else pthread_cond_wait(&l->work, &l->mutex);
    }
    pthread_mutex_unlock(&l->mutex);
    return NULL;
}

static void tt__image_empty(tt_loader *l, tt__ring_slot *slot)
{
    slot->done = 0;
    slot->failed = l->deal.max_seqs;
}

/* Waits until all images of the next micro-batch are ready, and hands the micro-batch out. */
static bool tt__image_next(tt_loader *l, tt_batch *batch)
{
    int64_t first, micro;
    int seqs;
    pthread_mutex_lock(&l->mutex);
    micro = tt__image_micro(l, l->deal.step * l->o.batch + l->in_step, &first, &seqs);
    if (micro > l->base) { /* the trainer no longer needs the previous micro-batch */
        tt__image_empty(l, &l->ring[l->base++ % l->slots]);
        pthread_cond_broadcast(&l->work);
    }
    tt__ring_slot *slot = &l->ring[micro % l->slots];
    if (slot->done < seqs) {
        double start = tt__seconds();
        while (slot->done < seqs) {
            if (l->started) pthread_cond_wait(&l->ready, &l->mutex);
            else tt__image_make(l, &l->threads[0]);
        }
        l->waited += tt__seconds() - start;
    }
    pthread_mutex_unlock(&l->mutex);
    if (slot->failed < seqs) {
        const tt_image_source *source = &l->d->source;
        long long number = l->d->examples[l->deal.order[first + slot->failed]].number;
        const char *name = source->name ? source->name(source->user, number) : NULL;
        l->status = name ? tt__fail(l->ctx, slot->status, "loader: image '%.500s': %s", name, slot->why)
                         : tt__fail(l->ctx, slot->status, "loader: image %lld: %s", number, slot->why);
        return false;
    }
    for (int i = 0; i < seqs; i++) {
        l->index[i] = l->deal.order[first + i];
        l->labels[i] = l->d->examples[l->index[i]].label;
    }
    batch->pixels = slot->left_out ? NULL : slot->pixels;
    batch->image_bytes = (int64_t)l->image_bytes;
    l->in_step += seqs;
    return tt__loader_give(l, batch, seqs, l->in_step == l->o.batch || first + seqs == l->deal.used);
}
