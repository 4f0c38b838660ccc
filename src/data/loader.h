#pragma once
#include "../base/base.h"
#include "../context/params.h"
#include "../files/lists.h"
#include "../text/encode.h"
#include "resize.h"
#include "dataset.h"
#include "dealer.h"
#include "images.h"
#include "masks.h"

/* --------------------------------------------------------------------------------------------------- loaders
   The public functions of loaders, for texts and for images, and a loader's tt_source. dealer.h chooses the
   examples of each step. */

void tt_loader_free(tt_loader *l)
{
    if (!l) return;
    tt_context *ctx = l->ctx;
    pthread_mutex_lock(&l->mutex);
    l->stop = true;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->mutex);
    for (int i = 0; i < l->started; i++) pthread_join(l->threads[i].handle, NULL);
    pthread_cond_destroy(&l->ready);
    pthread_cond_destroy(&l->work);
    pthread_mutex_destroy(&l->mutex);
    for (int i = 0; i < TT__LOADER_THREADS; i++) tt__resampler_free(ctx, &l->threads[i].resampler);
    for (int i = 0; l->ring && i < l->slots; i++) tt__free(ctx, l->ring[i].pixels);
    tt__chunks_free(ctx, &l->chunks);
    void *const owned[] = {l->ring, l->deal.order, l->scratch, l->tokens, l->sorted, l->step_order, l->dealt,
                           l->by_length, l->ends, l->micro_of, l->filled, l->ids, l->positions, l->types,
                           l->seq_start, l->labels, l->label_values, l->tags, l->roles, l->spans, l->index,
                           l->mask_kinds, l->mask_chosen, l->mask_words, l->masked, l->targets, l};
    tt__free_all(ctx, owned, TT__COUNT(owned));
}

/* Returns the number of sequences of each example. */
static int tt__dataset_parts(const tt_dataset *d)
{
    return d->task != TT_TASK_EMBED ? 1 : d->negatives ? 3 : 2;
}

static tt_status tt__loader_check(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k,
                                  const tt_loader_options *o)
{
    char text[1024] = "";
    tt__text_buffer all = {text, sizeof text, 0};
    const bool deals = tt__deal_check(&all, o->batch, o->accumulate, &o->parallel), texts = !d->images;
    const bool pairs = d->pairs && d->task != TT_TASK_EMBED;
    const int parts = tt__dataset_parts(d);
    const int64_t max = deals ? tt__ceil_div(o->batch, o->accumulate * tt__deal_groups(&o->parallel)) : 0;
    if (!d->count) tt__print(&all, "; the dataset is empty: give it at least one example");
    if (o->threads < 0 || o->threads > TT__LOADER_THREADS)
        tt__print(&all, "; threads is %d, but must be 0 to %d", o->threads, TT__LOADER_THREADS);
    if (o->drop_last && d->count < o->batch)
        tt__print(&all, "; drop_last leaves out all steps, because %d %s are fewer than batch, %d: set batch "
                  "lower or drop_last = false", d->count, texts ? "texts" : "images", o->batch);
    if (texts && o->max_length < 2)
        tt__print(&all, "; max_length is %d, but must be at least 2, for [CLS] and [SEP]", o->max_length);
    else if (texts && o->max_tokens != 0 && o->max_tokens / parts < o->max_length)
        tt__print(&all,
                  "; max_tokens is %d, but must be 0 or at least %smax_length, %d, so that every %s fits",
                  o->max_tokens, parts == 1 ? "" : parts == 2 ? "2 * " : "3 * ", o->max_length,
                  parts == 1 ? "text" : parts == 2 ? "pair" : "triplet");
    else if (texts && max > INT32_MAX / o->max_length / parts && !o->max_tokens)
        tt__print(&all, "; batch %d of max_length %d has more than 2^31 tokens: set max_tokens", o->batch,
                  o->max_length);
    if (texts && pairs && !k->finish.pairs)
        tt__print(&all, "; the dataset has pairs of texts, but the tokenizer's post_processor does not say "
                  "how to join the texts: add a \"pair\" with $A and then $B to its TemplateProcessing");
    else if (texts && pairs && o->max_length >= 2 && o->max_length < tt__ids_around(k, true))
        tt__print(&all, "; max_length is %d, but must be at least %d for pairs of texts, with the tokens "
                  "around the texts", o->max_length, tt__ids_around(k, true));
    if (d->task == TT_TASK_MASKED_LM && !(o->mask_rate > 0 && o->mask_rate < 1))
        tt__print(&all, "; mask_rate is %g, but must be above 0 and below 1", o->mask_rate);
    if (d->task == TT_TASK_MASKED_LM && tt_tokenizer_special(k, TT_TOKEN_MASK) < 0)
        tt__print(&all, "; the tokenizer has no token that masks others, which TT_TASK_MASKED_LM needs: set "
                  "\"mask_token\" in tokenizer_config.json");
    if (texts && o->window < 0)
        tt__print(&all, "; window is %d, but must be 0 (no sorting) or a number of batches", o->window);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "loader: %s", text + 2) : TT_OK;
}

static bool tt__loader_allocate(tt_loader *l) /* allocates the memory of a loader of texts */
{
    tt_context *ctx = l->ctx;
    if (!tt__loader_tokenize(l)) return false;
    size_t seqs = (size_t)l->deal.max_seqs * (size_t)l->parts, rows = (size_t)l->max_tokens;
    size_t window_texts = (size_t)tt__min(l->d->count, l->window_steps * l->o.batch);
    size_t step_texts = (size_t)tt__min(l->d->count, l->o.batch), values = 0;
    const bool valued = l->d->examples[0].values != NULL;
    if (!tt__mul_size(seqs * sizeof *l->label_values, tt__values_per_example(l->d), &values))
        values = SIZE_MAX;
    if (l->d->task == TT_TASK_MASKED_LM && !tt__mask_allocate(l)) return false;
    if (l->d->task == TT_TASK_TAGS && !(l->tags = (int32_t *)tt__alloc(ctx, rows * 4))) return false;
    if (l->parts > 1 && !(l->roles = (int32_t *)tt__alloc(ctx, seqs * 4))) return false;
    for (size_t k = 0; k < seqs && l->roles; k++) l->roles[k] = (int32_t)k;
    if (valued && !(l->label_values = (float *)tt__alloc(ctx, values))) return false;
    return (l->sorted = (uint32_t *)tt__alloc(ctx, window_texts * 4)) &&
           (l->step_order = (uint32_t *)tt__alloc(ctx, (size_t)l->window_steps * 4)) &&
           (l->dealt = (uint32_t *)tt__alloc(ctx, step_texts * 4)) &&
           (l->by_length = (uint32_t *)tt__alloc(ctx, step_texts * 4)) &&
           (l->ends = (int *)tt__alloc(ctx, step_texts * sizeof(int))) &&
           (l->micro_of = (int *)tt__alloc(ctx, step_texts * sizeof(int))) &&
           (l->filled = (int *)tt__alloc(ctx, step_texts * sizeof(int))) &&
           (l->ids = (int32_t *)tt__alloc(ctx, rows * 4)) &&
           (l->positions = (int32_t *)tt__alloc(ctx, rows * 4)) &&
           (l->types = (int32_t *)tt__calloc(ctx, rows * 4)) &&
           (l->seq_start = (int32_t *)tt__alloc(ctx, (seqs + 1) * 4));
}

static bool tt__image_allocate(tt_loader *l) /* allocates the memory of a loader of images */
{
    const tt_image_options *o = &l->image;
    size_t bytes;
    l->image_bytes = (size_t)o->height * (size_t)o->width * (size_t)o->channels;
    if (!tt__mul_size(l->image_bytes, (size_t)l->deal.max_seqs, &bytes))
        return tt__fail(l->ctx, TT_ERR_ARGUMENT, "loader: %d images of %d x %d pixels are more than memory "
                        "can hold: set batch lower", l->deal.max_seqs, o->height, o->width), false;
    /* The ring has room for the micro-batch that the trainer reads, for one micro-batch per data rank (the
       next round), and for two images of each thread. */
    l->slots = l->o.threads ? 1 + l->deal.data + (int)tt__ceil_div(2 * l->o.threads, l->deal.max_seqs) : 1;
    if (!(l->ring = (tt__ring_slot *)tt__calloc(l->ctx, (size_t)l->slots * sizeof *l->ring))) return false;
    for (int i = 0; i < l->slots; i++)
        if (!(l->ring[i].pixels = (uint8_t *)tt__alloc(l->ctx, bytes))) return false;
    return true;
}

/* Creates a loader of texts, with tokenizer k and image = NULL, or of images, with options `image` and k =
   NULL. The loader is at the first step, and its threads run. */
static tt_loader *tt__loader_make(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k,
                                  const tt_image_options *image, const tt_loader_options *options)
{
    tt_loader_options o = options ? *options : tt_loader_options_default();
    if (!d || (!k && !image)) { /* the context's error says why the dataset or the tokenizer is NULL */
        char why[TT__ERROR];
        memcpy(why, ctx->error, sizeof why);
        tt__fail(ctx, TT_ERR_ARGUMENT, "loader: the %s is NULL%s%.900s", !d ? "dataset" : "tokenizer", why[0]
                 ? ": " : ": make it first", why);
        return NULL;
    }
    if (tt__loader_check(ctx, d, k, &o) != TT_OK) return NULL;
    tt_loader *l = (tt_loader *)tt__calloc(ctx, sizeof *l);
    if (!l) return NULL;
    pthread_mutex_init(&l->mutex, NULL);
    pthread_cond_init(&l->work, NULL);
    pthread_cond_init(&l->ready, NULL);
    l->ctx = ctx;
    l->d = d;
    l->k = k;
    l->o = o;
    if (image) l->image = *image;
    l->deal.of = "loader";
    l->deal.shuffle = o.shuffle;
    bool ok = tt__deal_begin(ctx, &l->deal, d->count, o.batch, o.accumulate, &o.parallel);
    if (o.drop_last) l->deal.used = (l->deal.steps = d->count / o.batch) * o.batch;
    l->wide = k && k->size > 65536;
    l->parts = tt__dataset_parts(d);
    l->typed = k && tt__has_types(k, d->pairs && l->parts == 1);
    l->sort = k && o.shuffle && o.window > 1;
    l->window_steps = l->sort ? tt__min(o.window, l->deal.steps) : 1;
    l->window_at = l->empty = -1;
    size_t seqs = (size_t)l->deal.max_seqs * (size_t)l->parts;
    ok = ok && (l->labels = (int32_t *)tt__alloc(ctx, seqs * 4)) &&
        (l->index = (int64_t *)tt__alloc(ctx, seqs * sizeof *l->index)) &&
        (image ? tt__image_allocate(l) : tt__loader_allocate(l)) && tt_loader_seek(l, 0, 0) == TT_OK;
    for (int i = 0; i < TT__LOADER_THREADS; i++) l->threads[i].loader = l;
    while (ok && image && l->started < o.threads) {
        tt__loader_thread *thread = &l->threads[l->started];
        ok = tt__thread_start(&thread->handle, tt__image_main, thread);
        if (ok) l->started++;
        else
            tt__fail(ctx, TT_ERR_MEMORY, "loader: cannot start thread %d of %d: set threads lower",
                     l->started + 1, o.threads);
    }
    if (ok) return l;
    tt_loader_free(l);
    return NULL;
}

tt_loader *tt_loader_new(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k,
                         const tt_loader_options *options)
{
    if (!d->images) return tt__loader_make(ctx, d, k, NULL, options);
    tt__fail(ctx, TT_ERR_ARGUMENT, "tt_loader_new: the dataset holds images: use tt_image_loader_new");
    return NULL;
}

tt_image_options tt_image_options_default(int height, int width)
{
    tt_image_options o = {height, width, 3, 0, 0, 0, TT_BILINEAR, 0, false, false};
    return o;
}

static tt_status tt__image_options_check(tt_context *ctx, const tt_image_options *o)
{
    if (!tt__side(o->height) || !tt__side(o->width) || o->channels < 1 || o->channels > 4)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "image options: the height is %d, the width %d and channels "
                        "%d; expected sides of 1 to %d and 1 to 4 channels", o->height, o->width, o->channels,
                        TT__IMAGE_SIDE);
    if ((o->resize_height || o->resize_width) && (!tt__side(o->resize_height) || !tt__side(o->resize_width)))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "image options: resize_height is %d and resize_width %d; "
                        "expected both 0, or both 1 to %d", o->resize_height, o->resize_width,
                        TT__IMAGE_SIDE);
    if (o->resize_shortest && (!tt__side(o->resize_shortest) || o->resize_height))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "image options: resize_shortest is %d and resize_height %d; "
                        "expected one of them 0, the other 0 to %d", o->resize_shortest, o->resize_height,
                        TT__IMAGE_SIDE);
    if ((int)o->resample < TT_NEAREST || o->resample > TT_BICUBIC)
        return tt__fail(ctx, TT_ERR_ARGUMENT,
                        "image options: resample is %d, but must be one of tt_resample, %d to %d",
                        (int)o->resample, TT_NEAREST, TT_BICUBIC);
    if (o->pad < 0 || o->pad > TT__IMAGE_SIDE)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "image options: pad is %d, but must be 0 to %d", o->pad,
                        TT__IMAGE_SIDE);
    return TT_OK;
}

/* Checks the options for images, as far as possible before an image was read. */
static tt_status tt__image_check(tt_context *ctx, const tt_dataset *d, const tt_image_options *o)
{
    char why[256];
    if (!o)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_image_loader_new: the image options are NULL: set at least "
                        "their height and width");
    if (!d->images)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_image_loader_new: the dataset holds texts: use "
                        "tt_loader_new");
    if (tt__image_options_check(ctx, o) != TT_OK) return ctx->status;
    int height = o->resize_height ? o->resize_height : d->source.height;
    int width = o->resize_width ? o->resize_width : d->source.width, channels = d->source.channels;
    if ((height && !(tt__image_resized(o, &height, &width, why) && tt__image_fits(o, height, width, why))) ||
        (channels && !tt__image_channels(o, channels, why)))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "image options: %s", why);
    return TT_OK;
}

tt_status tt_image_prepare(tt_context *ctx, const tt_image *image, const tt_image_options *options,
                           uint8_t *to)
{
    tt__resampler r;
    char why[256];
    if (!image || !options || !to)
        return tt__fail(ctx, TT_ERR_ARGUMENT,
                        "tt_image_prepare: the image, its options or the output is NULL: pass all three");
    tt_image_options o = *options;
    if (tt__image_options_check(ctx, &o) != TT_OK) return ctx->status;
    o.random_crop = o.flip = false;
    memset(&r, 0, sizeof r);
    tt__float_mode mode = tt__float_default();
    tt_status status = tt__image_transform(ctx, &r, &o, image, 0, to, why);
    tt__float_restore(mode);
    tt__resampler_free(ctx, &r);
    return status == TT_OK ? TT_OK : tt__fail(ctx, status, "tt_image_prepare: %s", why);
}

tt_loader *tt_image_loader_new(tt_context *ctx, const tt_dataset *d, const tt_image_options *image,
                               const tt_loader_options *options)
{
    return tt__image_check(ctx, d, image) == TT_OK ? tt__loader_make(ctx, d, NULL, image, options) : NULL;
}

int64_t tt_loader_steps(const tt_loader *l) { return l->deal.steps; }
int tt_loader_max_seqs(const tt_loader *l) { return l->deal.max_seqs * l->parts; }
int tt_loader_max_tokens(const tt_loader *l) { return l->max_tokens; }
bool tt_loader_accumulates(const tt_loader *l) { return l->deal.accumulates; }
int tt_loader_longest(const tt_loader *l) { return l->longest; }
int64_t tt_loader_cut(const tt_loader *l) { return l->cut; }
double tt_loader_waited(const tt_loader *l) { return l->waited; }
tt_status tt_loader_status(const tt_loader *l) { return l->status; }

static tt_status tt__loader_source_seek(void *self, int64_t epoch, int64_t step)
{
    return tt_loader_seek((tt_loader *)self, epoch, step);
}

static tt_status tt__loader_source_next(void *self, tt_batch *batch, bool *more)
{
    tt_loader *l = (tt_loader *)self;
    *more = tt_loader_next(l, batch);
    return l->status;
}

/* Returns a hash of the labels of a loader's examples and, for texts, of their tokens. Options of masks count
   unless they are the defaults. */
static uint64_t tt__loader_source_hash(void *self)
{
    const tt_loader *l = (const tt_loader *)self;
    uint64_t hash = TT__HASH_BEGIN;
    for (int i = 0; i < l->d->count; i++) {
        hash = tt__hash_on(hash, &l->d->examples[i].label, sizeof l->d->examples[i].label);
        for (int part = 0; part < l->parts && l->tokens; part++) { /* images have no tokens */
            const tt__tokens *x = &l->tokens[(int64_t)i * l->parts + part];
            hash = tt__hash_on(hash, &x->count, sizeof x->count);
            hash = tt__hash_on(hash, x->ids, (size_t)x->count * (l->wide ? 4 : 2));
            if (l->typed) hash = tt__hash_on(hash, x->types, (size_t)x->count);
            if (l->tags) hash = tt__hash_on(hash, x->tags, sizeof(int32_t) * (size_t)x->count);
        }
        if (l->label_values)
            hash = tt__hash_on(hash, l->d->examples[i].values, sizeof(float) * tt__values_per_example(l->d));
    }
    const tt_loader_options plain = tt_loader_options_default();
    if (!l->max_masked) return hash;
    if (l->o.whole_words) hash = tt__hash_on(hash, &l->o.whole_words, sizeof l->o.whole_words);
    if (!(l->o.mask_rate == plain.mask_rate))
        hash = tt__hash_on(hash, &l->o.mask_rate, sizeof l->o.mask_rate);
    return hash;
}

static void tt__loader_source_describe(void *self, char *to, size_t capacity)
{
    const tt_loader *l = (const tt_loader *)self;
    const tt_loader_options *o = &l->o;
    const tt_image_options *i = &l->image;
    tt__text_buffer text = {to, capacity, 0};
    tt__print(&text, "%d %s\nbatch %d\naccumulate %d\ngroups %d\nshuffle %d\ndrop_last %d\n",
              (int)l->d->count, l->d->images ? "images" : "texts", o->batch, o->accumulate, l->deal.groups,
              o->shuffle, o->drop_last);
    if (!l->d->images)
        tt__print(&text, "max_length %d\nmax_tokens %d\nwindow %d\n", o->max_length, o->max_tokens,
                  o->window);
    else
        tt__print(&text, "height %d\nwidth %d\nchannels %d\nresize_height %d\nresize_width %d\npad %d\n"
                  "random_crop %d\nflip %d\n", i->height, i->width, i->channels, i->resize_height,
                  i->resize_width, i->pad, i->random_crop, i->flip);
    if (l->d->task != TT_TASK_CLASS) tt__print(&text, "task %d\n", (int)l->d->task);
    if (l->d->pairs) tt__print(&text, "pairs 1\n");
    if (l->max_masked) tt__print(&text, "mask_rate %g\nwhole_words %d\n", o->mask_rate, o->whole_words);
    if (i->resize_shortest) tt__print(&text, "resize_shortest %d\n", i->resize_shortest);
    if (i->resample != TT_BILINEAR) tt__print(&text, "resample %d\n", (int)i->resample);
}

/* Tells the loader for which of the `data` data ranks this process needs images: for the ranks [first, end).
   Threads make no images for other ranks. by_step: a micro-batch goes to a rank by its number in the step,
   not in the epoch. */
static void tt__loader_source_deal(void *self, int data, int first, int end, bool by_step)
{
    tt_loader *l = (tt_loader *)self;
    pthread_mutex_lock(&l->mutex);
    l->dealt_anew |= data != l->deal_data || first != l->deal_first || end != l->deal_end ||
                     by_step != l->deal_by_step;
    l->deal_data = data;
    l->deal_first = first;
    l->deal_end = end;
    l->deal_by_step = by_step;
    pthread_mutex_unlock(&l->mutex);
}

const tt_source *tt_loader_source(tt_loader *l)
{
    if (!l) return NULL;
    tt_source s = {l, tt__loader_source_seek, tt__loader_source_next, l->deal.steps, tt_loader_max_seqs(l),
                   l->max_tokens, l->deal.accumulates, tt__loader_source_hash, l->d->classes,
                   l->d->n_classes, tt__loader_source_deal, tt__loader_source_describe, l->max_masked,
                   NULL, 0};
    l->source = s;
    return &l->source;
}

tt_status tt_loader_seek(tt_loader *l, int64_t epoch, int64_t step)
{
    pthread_mutex_lock(&l->mutex);
    const int64_t cursor = l->cursor;
    const bool there = epoch == l->deal.epoch && step == l->deal.step && !l->in_step;
    if (l->d->images && there && !l->failed && !l->dealt_anew) return pthread_mutex_unlock(&l->mutex), TT_OK;
    l->cursor = l->deal.used; /* the end of the epoch, so that no thread begins another image */
    while (l->busy) pthread_cond_wait(&l->ready, &l->mutex);
    if (epoch != l->deal.epoch) l->window_at = -1;
    tt_status status = tt__deal_seek(l->ctx, &l->deal, epoch, step);
    if (status == TT_OK) {
        l->in_step = l->micro = 0;
        l->cursor = tt__min(step * l->o.batch, l->deal.used);
        l->failed = l->dealt_anew = false;
        for (int i = 0; i < l->slots; i++) tt__image_empty(l, &l->ring[i]);
        l->base = step * tt__deal_micros(&l->deal, l->o.batch);
    } else {
        l->cursor = cursor;
    }
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->mutex);
    return status;
}

/* Collects the texts of a window, which is a number of consecutive steps. If l->sort, sorts the texts by
   length, so that the texts of a step have similar lengths, and shuffles the window's steps. An incomplete
   last step remains the last of its epoch. */
static void tt__loader_window(tt_loader *l, int64_t window)
{
    int64_t first = window * l->window_steps * l->o.batch;
    int64_t n = tt__min(l->window_steps * l->o.batch, l->deal.used - first);
    const tt__step_texts shuffled = {l->tokens, l->parts, l->deal.order + first};
    for (int64_t i = 0; i < n; i++) l->sorted[i] = l->sort ? (uint32_t)i : l->deal.order[first + i];
    if (l->sort) {
        uint64_t key = tt__stream_key(l->ctx->options.seed, TT__RANDOM_SHUFFLE, (uint64_t)l->deal.epoch,
                                      TT__SHUFFLE_STEPS + (uint64_t)window);
        tt__sort_indices(l->sorted, (size_t)n, tt__place_longer, &shuffled);
        for (int64_t i = 0; i < n; i++) l->sorted[i] = l->deal.order[first + l->sorted[i]];
        tt__shuffle(l->step_order, (uint32_t)(n / l->o.batch), key);
        if (n % l->o.batch) l->step_order[n / l->o.batch] = (uint32_t)(n / l->o.batch);
    } else {
        l->step_order[0] = 0;
    }
    l->window_at = window;
}

/* Sets the arrays of a micro-batch of pairs or triplets: the numbers of the sequences that are anchors, the
   numbers of all other sequences (the candidates), and for each anchor the number of its positive
   candidate. */
static void tt__loader_roles(tt_loader *l, int examples, tt_batch *batch)
{
    if (l->parts == 1) return;
    const tt_array arrays[] = {{"anchors", l->roles, examples},
                               {"candidates", l->roles + examples, (int64_t)examples * (l->parts - 1)},
                               {"positives", l->roles, examples}};
    memcpy(l->arrays, arrays, sizeof arrays);
    batch->arrays = l->arrays;
    batch->n_arrays = TT__COUNT(arrays);
}

bool tt_loader_next(tt_loader *l, tt_batch *batch)
{
    memset(batch, 0, sizeof *batch);
    l->status = TT_OK;
    if (l->deal.step >= l->deal.steps) return false;
    if (l->d->images) return tt__image_next(l, batch);
    int64_t window = l->deal.step / l->window_steps;
    if (window != l->window_at) tt__loader_window(l, window);

    int64_t from = (window * l->window_steps + l->step_order[l->deal.step % l->window_steps]) * l->o.batch;
    int in_step = (int)tt__min(l->o.batch, l->deal.used - from), rows = 0, seqs = 0;
    const uint32_t *texts = l->sorted + (from - window * l->window_steps * l->o.batch);
    if (!l->micro) tt__loader_cut_step(l, texts, in_step);
    const int first = l->in_step, end = l->ends[l->micro++], examples = end - first;
    l->n_masked = 0;
    for (; seqs < examples * l->parts; seqs++) {
        const uint32_t text = l->dealt[first + seqs % examples];
        const tt__tokens *tokens = &l->tokens[(int64_t)text * l->parts + seqs / examples];
        l->seq_start[seqs] = rows;
        l->labels[seqs] = l->parts > 1 ? seqs / examples : tt_dataset_label(l->d, text);
        l->index[seqs] = text;
        if (l->label_values)
            memcpy(l->label_values + (size_t)seqs * tt__values_per_example(l->d), l->d->examples[text].values,
                   sizeof *l->label_values * tt__values_per_example(l->d));
        for (int i = 0; i < tokens->count; i++, rows++) {
            l->ids[rows] = l->wide ? ((const int32_t *)tokens->ids)[i] : ((const uint16_t *)tokens->ids)[i];
            l->positions[rows] = i;
            if (l->typed) l->types[rows] = tokens->types[i];
            if (l->tags) l->tags[rows] = tokens->tags[i];
        }
        if (l->max_masked) tt__mask_text(l, text, rows - tokens->count, tokens->count);
    }
    l->in_step = end;
    tt__loader_roles(l, examples, batch);
    if (l->max_masked) tt__mask_arrays(l, batch);
    l->seq_start[seqs] = rows;
    batch->rows = rows;
    batch->ids = l->ids;
    batch->positions = l->positions;
    batch->types = l->types;
    batch->tags = l->tags;
    batch->seq_start = l->seq_start;
    return tt__loader_give(l, batch, seqs, l->in_step == in_step);
}
