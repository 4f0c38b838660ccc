#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../text/vocabulary.h"
#include "../text/tokenizer.h"
#include "resize.h"
#include "dataset.h"

/* ------------------------------------------------------------------------------------------------ loader */

tt_loader_options tt_loader_options_default(void)
{
    tt_loader_options o = {16, 1, 512, 0, true, 50, false, 1, {0, 1, 1, false, false, 0, false}};
    return o;
}

/* b of tt__stream_key, of a loader; with a = epoch. b = 1 + window for the steps */
enum { TT__SHUFFLE_TEXTS = 0, TT__SHUFFLE_STEPS = 1 };
#define TT__SHUFFLE_SPLIT (UINT64_MAX - 1) /* a of tt__stream_key, of tt_dataset_split; with b = examples */
#define TT__LOADER_THREADS 64

/* ids: uint16_t, or int32_t for a large vocabulary */
typedef struct tt__tokens { const void *ids; int count; } tt__tokens;

typedef struct tt__loader_thread {
    struct tt_loader *loader;
    pthread_t handle;
    tt__resampler resampler;
} tt__loader_thread;

typedef struct tt__ring_slot {     /* of a micro-batch of images */
    uint8_t *pixels;
    int done;                      /* images that are made, or failed */
    int failed;                    /* the first that failed; max_seqs: none */
    bool left_out;                 /* it is for another process, and has no pixels */
    tt_status status;              /* of that */
    char why[256];
} tt__ring_slot;

/* Texts are tokenized when the loader is made. Images are made anew in each epoch, micro-batches `base` to
   `base` + slots - 1 ahead of the trainer, which reads `base`. */
struct tt_loader {
    tt_context *ctx;
    const tt_dataset *d;
    const tt_tokenizer *k;
    tt_loader_options o;
    int groups, data;              /* that each step is dealt out to; data ranks */
    int max_seqs, max_tokens;
    bool wide;                     /* ids need more than 16 bits */
    bool sort;                     /* windows are sorted, and their steps shuffled */
    int64_t texts, steps;          /* of an epoch */

    tt__tokens *tokens;            /* (count) */
    tt__chunk *chunks;             /* where their ids are kept */
    int32_t *scratch;              /* (the context's threads, max_length) while texts are tokenized */
    int longest;                   /* tokens of a text before it is cut */
    int64_t cut;                   /* texts */
    int64_t empty;                 /* the first text without a token; -1: none */
    bool accumulates;

    pthread_mutex_t mutex;         /* guards the following four, a slot but its pixels, and, while texts are
                                      tokenized, chunks, longest and cut */
    pthread_cond_t work, ready;
    int64_t cursor;                /* in `order`: the next image to make */
    bool stop, failed;
    uint32_t *order;               /* (count) this epoch's; changes under the mutex */
    tt__loader_thread threads[TT__LOADER_THREADS];
    int started;

    tt_image_options image;
    size_t image_bytes;            /* of a result */
    int slots;
    tt__ring_slot *ring;           /* micro-batch m of the epoch is in slot m % slots; NULL: texts */
    int deal_data, deal_first, deal_end; /* data ranks, and which of them want their images ... */
    bool deal_by_step, dealt_anew; /* ... which are dealt out so; not to the images that there are */
    int64_t base;                  /* with `busy` guarded by the mutex, as `epoch` when a thread is busy */
    int busy;                      /* threads that make an image */

    int64_t epoch, step;           /* the consumer's from here on */
    /* the window that `sorted` and `step_order` hold; steps of every window */
    int64_t window_at, window_steps;
    uint32_t *sorted, *step_order;
    int in_step;                   /* sequences of the step that were handed out */
    int micro;                     /* micro-batches of the step that were handed out, of texts */
    /* The texts of the step at hand by micro-batch, and where each of these ends there. While they are dealt
       out: their places in the step, longest first, the micro-batch of each place, the tokens of each micro-
       batch. All are (batch). */
    uint32_t *dealt, *by_length;
    int *ends, *micro_of, *filled;
    tt_status status;              /* of the last tt_loader_next */
    double waited;
    int32_t *ids, *positions, *types, *seq_start, *labels;
    int64_t *index;
    tt_source source;
};

/* Into how many micro-batches n sequences are cut, if tokens leave it at that: equally many for each group,
   as far as there are sequences. */
static int64_t tt__loader_micros(const tt_loader *l, int64_t n)
{
    return tt__min(n, l->groups * tt__ceil_div(n, (int64_t)l->groups * l->max_seqs));
}

#define TT__TEXTS_AT_ONCE 64 /* of a task */

/* Tokenizes some texts. */
static void tt__loader_task(void *arg, int64_t task, int thread)
{
    tt_loader *l = (tt_loader *)arg;
    int32_t *from = l->scratch + (size_t)thread * (size_t)l->o.max_length;
    int64_t first = task * TT__TEXTS_AT_ONCE, end = tt__min(l->d->count, first + TT__TEXTS_AT_ONCE);
    for (int64_t text = first; text < end; text++) {
        const tt__example *e = &l->d->examples[text];
        int whole = tt__tokenize(l->k, e->text, e->bytes, from, l->o.max_length, true);
        int n = (int)tt__min(whole, l->o.max_length);
        pthread_mutex_lock(&l->mutex);
        void *ids = n < 0 ? NULL : tt__chunks_take(l->ctx, &l->chunks, (size_t)n * (l->wide ? 4 : 2));
        l->failed |= !ids;
        if (n == 0 && (l->empty < 0 || text < l->empty)) l->empty = text;
        l->longest = (int)tt__max(l->longest, whole);
        l->cut += whole > n;
        pthread_mutex_unlock(&l->mutex);
        if (!ids) return;
        if (l->wide) memcpy(ids, from, (size_t)n * 4);
        else for (int i = 0; i < n; i++) ((uint16_t *)ids)[i] = (uint16_t)from[i];
        l->tokens[text].ids = ids;
        l->tokens[text].count = n;
    }
}

/* Places of texts in an order: texts[place], or where `texts` is NULL, the place itself. */
typedef struct tt__step_texts { const tt__tokens *tokens; const uint32_t *texts; } tt__step_texts;

/* Texts of the same length keep their order, which the shuffle gave them: many are cut to the same length,
   and a table often lists class after class, so that the table's order would fill whole steps with one class.
   */
static bool tt__place_longer(const void *arg, uint32_t a, uint32_t b)
{
    const tt__step_texts *s = (const tt__step_texts *)arg;
    const int x = s->tokens[s->texts ? s->texts[a] : a].count;
    const int y = s->tokens[s->texts ? s->texts[b] : b].count;
    return x != y ? x > y : a < b;
}

/* Tokenizes all texts, and sets what their lengths decide. */
static bool tt__loader_tokenize(tt_loader *l)
{
    tt_context *ctx = l->ctx;
    size_t count = (size_t)l->d->count, scratch;
    if (!tt__mul_size((size_t)l->o.max_length, (size_t)ctx->cpu.pool->threads * sizeof *l->scratch, &scratch))
        scratch = SIZE_MAX;
    if (!(l->tokens = (tt__tokens *)tt__calloc(ctx, count * sizeof *l->tokens)) ||
        !(l->scratch = (int32_t *)tt__alloc(ctx, scratch)))
        return false;
    tt__parallel(ctx->cpu.pool, tt__ceil_div(l->d->count, TT__TEXTS_AT_ONCE), tt__loader_task, l);
    tt__free(ctx, l->scratch);
    l->scratch = NULL;
    if (l->failed)
        return tt__fail(ctx, TT_ERR_MEMORY, "loader: out of memory for the tokens of %d texts", l->d->count),
            false;
    if (l->empty >= 0)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "loader: text %lld has no tokens: leave it out of the dataset",
                        (long long)l->empty), false;

    /* A micro-batch needs no more than the longest texts do; nor does a step. */
    int64_t room = l->o.max_tokens ? l->o.max_tokens : INT32_MAX, micro = 0;
    const tt__step_texts all = {l->tokens, NULL};
    const int64_t most = tt__min(l->o.batch, l->d->count);
    for (uint32_t i = 0; i < (uint32_t)count; i++) l->order[i] = i;
    tt__sort_indices(l->order, count, tt__place_longer, &all);
    l->max_seqs = (int)tt__min(l->max_seqs, room / 2); /* most texts have two tokens at least */
    for (int64_t i = 0; i < tt__min(l->max_seqs, most); i++) micro += l->tokens[l->order[i]].count;
    l->max_tokens = (int)tt__min(room, micro);
    l->accumulates = micro > room || tt__loader_micros(l, most) > l->data;
    return true;
}

/* Gives a batch what texts and images share, and goes on to the next step behind the last batch of one. */
static bool tt__loader_give(tt_loader *l, tt_batch *batch, int seqs, bool last_of_step)
{
    batch->seqs = seqs;
    batch->labels = l->labels;
    batch->index = l->index;
    batch->last_of_step = last_of_step;
    if (last_of_step) l->step++, l->in_step = l->micro = 0;
    return true;
}

/* ---- the micro-batches of a step of texts: l->dealt and l->ends */

/* One group: each micro-batch takes texts in their order until it is full. */
static void tt__loader_fill(tt_loader *l, const uint32_t *texts, int n)
{
    int micro = 0, seqs = 0, tokens = 0;
    for (int i = 0; i < n; i++) {
        const int more = l->tokens[texts[i]].count;
        if (seqs == l->max_seqs || more > l->max_tokens - tokens) l->ends[micro++] = i, seqs = tokens = 0;
        l->dealt[i] = texts[i];
        seqs++;
        tokens += more;
    }
    l->ends[micro] = n;
}

/* Gives each text, longest first, to the micro-batch that has fewest tokens and room for one more (Graham,
   "Bounds on multiprocessing timing anomalies", 1969). Counts the texts of each in l->ends. False: one would
   have more than max_tokens. */
static bool tt__loader_deal(tt_loader *l, const uint32_t *texts, int n, int micros)
{
    memset(l->ends, 0, sizeof *l->ends * (size_t)micros);
    memset(l->filled, 0, sizeof *l->filled * (size_t)micros);
    for (int i = 0; i < n; i++) {
        const uint32_t place = l->by_length[i];
        int to = -1;
        for (int k = 0; k < micros; k++)
            if (l->ends[k] < l->max_seqs && (to < 0 || l->filled[k] < l->filled[to])) to = k;
        l->filled[to] += l->tokens[texts[place]].count;
        if (l->filled[to] > l->max_tokens) return false;
        l->ends[to]++;
        l->micro_of[place] = to;
    }
    return true;
}

/* Cuts a step of n texts; those of a micro-batch keep their order. */
static void tt__loader_cut_step(tt_loader *l, const uint32_t *texts, int n)
{
    const tt__step_texts step = {l->tokens, texts};
    int micros = (int)tt__loader_micros(l, n), from = 0;
    if (l->groups == 1) {
        tt__loader_fill(l, texts, n);
        return;
    }
    for (int i = 0; i < n; i++) l->by_length[i] = (uint32_t)i;
    tt__sort_indices(l->by_length, (size_t)n, tt__place_longer, &step);
    while (!tt__loader_deal(l, texts, n, micros)) micros = (int)tt__min(n, micros + l->groups);
    for (int k = 0; k < micros; k++) { /* from now on where the next text of each goes */
        const int seqs = l->ends[k];
        l->ends[k] = from;
        from += seqs;
    }
    for (int i = 0; i < n; i++) l->dealt[l->ends[l->micro_of[i]]++] = texts[i];
}
