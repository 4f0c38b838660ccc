#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../text/types.h"
#include "../text/encode.h"
#include "resize.h"
#include "dataset.h"

/* ------------------------------------------------------------------------------------------------ loader */

tt_loader_options tt_loader_options_default(void)
{
    tt_loader_options o = {16, 1, 512, 0, true, 50, false, 1, 0.15f, false,
                           {0, 1, 1, false, false, 0, false}};
    return o;
}

/* Values for argument b of tt__stream_key, which gives the random key of a loader's shuffle; argument a is
   the epoch. The shuffle of a window's steps has b = TT__SHUFFLE_STEPS + number of the window. */
enum { TT__SHUFFLE_TEXTS = 0, TT__SHUFFLE_STEPS = 1 };
/* Value for argument a of tt__stream_key in tt_dataset_split; argument b is the number of examples. */
#define TT__SHUFFLE_SPLIT (UINT64_MAX - 1)
#define TT__LOADER_THREADS 64              /* max threads of a loader */

/* ---- the dealer chooses the examples of a step, which are texts, images or windows of tokens, and the
   number of micro-batches */

typedef struct tt__dealer {
    const char *of;                /* name of the loader in messages */
    int batch, max_seqs;           /* batch: number of examples of a step; max_seqs: max number of examples of
                                      a micro-batch */
    int groups, data;              /* values of tt_parallel.groups and tt_parallel.data */
    bool shuffle, accumulates;     /* accumulates: a step may have more micro-batches than `data` */
    int64_t count, used, steps;    /* count: number of all examples; used, steps: number of examples and of
                                      steps in an epoch */
    int64_t epoch, step;           /* epoch and step of the next micro-batch */
    uint32_t *order;               /* the numbers of all `count` examples, in the epoch's order */
} tt__dealer;

static int tt__deal_groups(const tt_parallel *p) { return p->groups ? p->groups : (int)tt__max(1, p->data); }

/* Checks options and appends a message for each mistake to `all`. Returns whether the options are valid. */
static bool tt__deal_check(tt__text_buffer *all, int batch, int accumulate, const tt_parallel *p)
{
    const int groups = tt__deal_groups(p), data = p->data;
    const size_t before = all->length;
    if (batch < 1 || accumulate < 1 || accumulate > batch)
        tt__print(all, "; {batch = %d} and {accumulate = %d}; expected 1 <= {accumulate} <= {batch}", batch,
                  accumulate);
    else if (groups < 1 || data < 0 || (data && groups % data))
        tt__print(all, "; {parallel.groups = %d} and {parallel.data = %d}; expected the trainer's "
                  "tt_parallel after tt_check_options", p->groups, data);
    else if (groups > batch / accumulate)
        tt__print(all, "; a step of {batch = %d} has fewer sequences than micro-batches, {accumulate = %d} "
                  "for each of %d groups: set {batch} to at least %lld", batch, accumulate, groups,
                  (long long)groups * accumulate);
    return all->length == before;
}

/* Returns the number of micro-batches of a step of n examples. The number is a multiple of d->groups if n is
   large enough. A step of texts gets more micro-batches if its tokens do not fit. */
static int tt__deal_micros(const tt__dealer *d, int64_t n)
{
    return (int)tt__min(n, d->groups * tt__ceil_div(n, (int64_t)d->groups * d->max_seqs));
}

/* Initialises a dealer of `count` examples, except its step, which tt__deal_seek sets. Returns false if
   memory runs out. */
static bool tt__deal_begin(tt_context *ctx, tt__dealer *d, int64_t count, int batch, int accumulate,
                           const tt_parallel *p)
{
    d->batch = batch;
    d->groups = tt__deal_groups(p);
    d->data = (int)tt__max(1, p->data);
    d->max_seqs = (int)tt__min(tt__ceil_div(batch, accumulate * d->groups), count);
    d->count = d->used = count;
    d->steps = tt__ceil_div(count, batch);
    d->accumulates = tt__deal_micros(d, tt__min(batch, count)) > d->data;
    d->epoch = -1;
    return (d->order = (uint32_t *)tt__alloc(ctx, sizeof *d->order * (size_t)count)) != NULL;
}

/* Moves the dealer to a step of an epoch. The order of an epoch's examples depends on the seed and the epoch
   alone. After an error the dealer has not moved. */
static tt_status tt__deal_seek(tt_context *ctx, tt__dealer *d, int64_t epoch, int64_t step)
{
    if (epoch < 0 || step < 0 || step > d->steps)
        return tt__fail(ctx, TT_ERR_ARGUMENT,
                        "%s: step %lld of epoch %lld does not exist: an epoch has steps 0 to %lld", d->of,
                        (long long)step, (long long)epoch, (long long)d->steps - 1);
    const uint32_t n = epoch != d->epoch ? (uint32_t)d->count : 0;
    for (uint32_t k = 0; k < n && !d->shuffle; k++) d->order[k] = k;
    if (n && d->shuffle)
        tt__shuffle(d->order, n, tt__stream_key(ctx->options.seed, TT__RANDOM_SHUFFLE, (uint64_t)epoch,
                                                TT__SHUFFLE_TEXTS));
    d->epoch = epoch;
    d->step = step;
    return TT_OK;
}

/* The tokens of a sequence. A sequence is a text or a pair of texts; with TT_TASK_EMBED, one text of a pair
   or triplet. ids: uint16_t, or int32_t if the vocabulary has more than 65,536 tokens; types: NULL if all are
   0; tags: for TT_TASK_TAGS, as in tt_batch. */
typedef struct tt__tokens {
    const void *ids;
    const uint8_t *types;
    const int32_t *tags;
    int count;
} tt__tokens;

typedef struct tt__loader_thread {
    struct tt_loader *loader;
    pthread_t handle;
    tt__resampler resampler;
} tt__loader_thread;

typedef struct tt__ring_slot {     /* one micro-batch of images in the loader's ring */
    uint8_t *pixels;
    int done;                      /* number of images that are ready or have failed */
    int failed;                    /* place of the first image that failed; max_seqs: none failed */
    bool left_out;                 /* the micro-batch is for another process, so its images are not made */
    tt_status status;              /* error of the image at place `failed` */
    char why[256];                 /* reason of the error, for the message */
} tt__ring_slot;

struct tt_loader {
    tt_context *ctx;
    const tt_dataset *d;           /* a dataset of texts or, if d->images, of images */
    tt_loader_options o;
    tt__dealer deal;
    int max_tokens, in_step;       /* in_step: examples of the current step that were handed out */
    tt_status status;              /* status of the last tt_loader_next */
    int32_t *labels;
    int64_t *index;
    tt_source source;
    pthread_mutex_t mutex;         /* guards `failed` and the fields that the comment about images below
                                      lists; while texts are tokenized, also `chunks`, `longest`, `cut` and
                                      `empty` */
    bool failed;

    /* ---- fields for texts, all of which are tokenized when the loader is created */
    const tt_tokenizer *k;
    bool wide;                     /* ids need more than 16 bits */
    bool typed;                    /* token types may differ from 0 */
    bool sort;                     /* sort the texts of each window by length, and shuffle the window's steps;
                                      a window is consecutive steps */
    int parts;                     /* number of sequences of an example: with TT_TASK_EMBED 2 or 3, else 1 */
    tt__tokens *tokens;            /* (count, parts) the tokens of each example */
    tt__chunk *chunks;             /* memory of the ids */
    int32_t *scratch;              /* max_length ids and types for each thread, while texts are tokenized */
    tt_span *spans;                /* TT_TASK_TAGS: max_length spans for each thread */
    int longest;                   /* number of tokens of the longest text before it is cut */
    int64_t cut;                   /* number of texts cut to max_length */
    int64_t empty;                 /* the first text without a token; -1: none */
    /* A window is `window_steps` consecutive steps whose texts are sorted together. window_at: the window
       whose texts and order of steps are in `sorted` and `step_order`; -1: none. */
    int64_t window_at, window_steps;
    uint32_t *sorted, *step_order;
    int micro;                     /* micro-batches of the current step that were handed out */
    /* dealt: texts of the current step, one micro-batch after another; ends: the end of each micro-batch in
       `dealt`. The other arrays are scratch memory. by_length: the places of the step's texts, longest text
       first. micro_of: the micro-batch of the text at each place. filled: the number of tokens of each
       micro-batch. All arrays have `batch` entries. */
    uint32_t *dealt, *by_length;
    int *ends, *micro_of, *filled;
    int32_t *ids, *positions, *types, *seq_start;
    int32_t *tags;                 /* tags of the micro-batch, for TT_TASK_TAGS */
    float *label_values;           /* values of the micro-batch, of examples that have values */
    int32_t *roles;                /* TT_TASK_EMBED: the numbers 0, 1, 2, ..., to which `arrays` point */
    tt_array arrays[3];            /* TT_TASK_EMBED: "anchors", "candidates" and "positives";
                                      TT_TASK_MASKED_LM: "masked" and "targets" */
    /* Fields for TT_TASK_MASKED_LM. mask_kinds: the kind of each token of the vocabulary. mask_words,
       mask_chosen: scratch memory for a text's words, and for whether each of its tokens is chosen. masked,
       targets: the data of the arrays, n_masked rows of at most max_masked. */
    uint8_t *mask_kinds, *mask_chosen;
    struct tt__mask_word *mask_words;
    int32_t *masked, *targets;
    int n_masked, max_masked;

    /* ---- fields for images. Threads make the images of micro-batches `base` to `base + slots - 1`, while
       the trainer reads micro-batch `base`. The mutex guards stop, cursor, base, busy, the fields of `ring`
       except the pixels, and the dealer's order, which changes only while no thread is busy. */
    tt_image_options image;
    size_t image_bytes;            /* bytes of an image after resizing and cropping */
    pthread_cond_t work, ready;
    bool stop;
    int64_t cursor;                /* place in the epoch's order of the next image to make */
    tt__loader_thread threads[TT__LOADER_THREADS];
    int started;                   /* number of threads that run */
    int slots;                     /* number of micro-batches that `ring` holds */
    tt__ring_slot *ring;           /* ring[m % slots] holds micro-batch m of the epoch */
    /* deal_data: number of data ranks; 0: unknown, so the images for all ranks are made. This process needs
       the images of the data ranks [deal_first, deal_end). */
    int deal_data, deal_first, deal_end;
    /* deal_by_step: a micro-batch goes to a rank by its number in the step, not in the epoch; dealt_anew: a
       field deal_... has changed since the ring's images were made */
    bool deal_by_step, dealt_anew;
    int64_t base;
    int busy;                      /* number of threads that are making an image */
    double waited;                 /* seconds for which the trainer has waited for images */
};

#define TT__TEXTS_AT_ONCE 64 /* number of texts that one task of the thread pool tokenizes */

/* Returns whether a token that comes from the bytes `span` belongs to a word: `span` overlaps the word, or
   the token is white space directly before the word, such as a mark of SentencePiece that is a token of its
   own. */
static bool tt__token_of_word(const tt__example *e, const tt_span *span, const tt_word *word)
{
    if (span->end > word->begin) return span->begin < word->end;
    for (size_t i = span->begin; i < span->end; i++)
        if ((unsigned char)e->text[i] > ' ') return false;
    return span->end == word->begin;
}

/* Sets the tags of n tokens: the first token of a word has the word's tag, all others have -100. spans: for
   each token in [first, end), the bytes of the text that the token comes from. */
static void tt__loader_tags(const tt__example *e, const tt_span *spans, int first, int end, int n,
                            int32_t *tags)
{
    int word = 0;
    for (int i = 0; i < n; i++) {
        tags[i] = -100;
        if (i < first || i >= end) continue;
        while (word < e->n_words && e->words[word].end <= spans[i].begin) word++;
        if (word == e->n_words || !tt__token_of_word(e, &spans[i], &e->words[word])) continue;
        if (e->words[word].tag >= 0) tags[i] = e->words[word].tag;
        /* The word's other tokens get -100. */
        while (i + 1 < n && i + 1 < end && spans[i + 1].begin < e->words[word].end) tags[++i] = -100;
        word++;
    }
}

/* Returns the options with which sequence `number` of a loader is encoded. The caller adds the pointers to
   memory for the result. */
static tt_encoding tt__loader_encoding(const tt_loader *l, int64_t number)
{
    const tt__example *e = &l->d->examples[number / l->parts];
    tt_encoding o = {e->text, e->bytes, e->pair, e->pair_bytes, true, l->o.max_length, l->o.max_length, NULL,
                     NULL, NULL};
    if (l->parts == 1) return o;
    const char *const text[] = {e->text, e->pair, e->negative};
    const size_t bytes[] = {e->bytes, e->pair_bytes, e->negative_bytes};
    o.text = text[number % l->parts];
    o.bytes = bytes[number % l->parts];
    o.pair = NULL;
    o.pair_bytes = 0;
    return o;
}

/* A task of a thread pool (tt__run_tasks): tokenizes TT__TEXTS_AT_ONCE consecutive sequences. */
static void tt__loader_task(void *arg, int64_t task, int thread)
{
    tt_loader *l = (tt_loader *)arg;
    int32_t *from = l->scratch + (size_t)thread * 2 * (size_t)l->o.max_length;
    int32_t *types = from + l->o.max_length;
    tt_span *spans = l->spans ? l->spans + (size_t)thread * (size_t)l->o.max_length : NULL;
    const int64_t count = (int64_t)l->d->count * l->parts;
    int64_t first = task * TT__TEXTS_AT_ONCE, end = tt__min(count, first + TT__TEXTS_AT_ONCE);
    for (int64_t text = first; text < end; text++) {
        const tt__example *e = &l->d->examples[text / l->parts];
        tt_encoding o = tt__loader_encoding(l, text);
        o.ids = from;
        o.types = types;
        o.spans = spans;
        const tt__encoded made = tt__encode_texts(l->k, &o, true);
        const int n = (int)made.n;
        const size_t bytes = (size_t)tt__max(n, 0) * (l->wide ? 4 : 2), typed = l->typed ? (size_t)n : 0;
        const size_t tags = spans ? (size_t)tt__max(n, 0) * sizeof(int32_t) : 0; /* bytes of the n tags */
        pthread_mutex_lock(&l->mutex);
        char *all = n < 0 ? NULL : (char *)tt__chunks_take(l->ctx, &l->chunks, tags + bytes + typed);
        l->failed |= !all;
        if (n == 0 && (l->empty < 0 || text < l->empty)) l->empty = text;
        l->longest = (int)tt__max(l->longest, tt__min(made.whole, INT_MAX));
        l->cut += made.whole > n;
        pthread_mutex_unlock(&l->mutex);
        if (!all) return;
        char *ids = all + tags;
        const tt__around *around = l->k->finish.one.around;
        if (spans)
            tt__loader_tags(e, spans, around[0].n, n - around[1].n, n, (int32_t *)(void *)all);
        if (l->wide) memcpy(ids, from, bytes);
        else for (int i = 0; i < n; i++) ((uint16_t *)(void *)ids)[i] = (uint16_t)from[i];
        for (int i = 0; i < n && l->typed; i++) ids[bytes + (size_t)i] = (char)types[i];
        l->tokens[text].ids = ids;
        l->tokens[text].tags = spans ? (const int32_t *)(const void *)all : NULL;
        l->tokens[text].types = l->typed ? (const uint8_t *)ids + bytes : NULL;
        l->tokens[text].count = n;
    }
}

/* Returns the number of tokens of an example, in all its `parts` sequences. */
static int tt__example_tokens(const tt__tokens *tokens, int parts, uint32_t example)
{
    int64_t n = 0;
    for (int part = 0; part < parts; part++) n += tokens[(int64_t)example * parts + part].count;
    return (int)tt__min(n, INT32_MAX);
}

/* The argument of tt__place_longer, which compares two places (indices) of a list of examples. The example at
   a place has the number texts[place] or, if `texts` is NULL, the number `place`. */
typedef struct tt__step_texts {
    const tt__tokens *tokens;
    int parts;
    const uint32_t *texts;
} tt__step_texts;

/* Returns whether place a comes before place b in the order from the longest text to the shortest. Texts of
   equal length keep their shuffled order: after cutting, many texts have the max length. In the order of a
   table, which often lists one class after another, all texts of a step might have one class. */
static bool tt__place_longer(const void *arg, uint32_t a, uint32_t b)
{
    const tt__step_texts *s = (const tt__step_texts *)arg;
    const int x = tt__example_tokens(s->tokens, s->parts, s->texts ? s->texts[a] : a);
    const int y = tt__example_tokens(s->tokens, s->parts, s->texts ? s->texts[b] : b);
    return x != y ? x > y : a < b;
}

/* Tokenizes all texts, and sets max_seqs, max_tokens and accumulates by the lengths of the texts. */
static bool tt__loader_tokenize(tt_loader *l)
{
    tt_context *ctx = l->ctx;
    size_t count = (size_t)l->d->count, all_tokens, scratch, spans;
    if (!tt__mul_size((size_t)l->o.max_length, (size_t)ctx->cpu.pool->threads * 2 * sizeof *l->scratch,
                     &scratch))
        scratch = SIZE_MAX;
    if (!tt__mul_size(scratch, sizeof *l->spans / (2 * sizeof *l->scratch), &spans)) spans = SIZE_MAX;
    if (!tt__mul_size(count, (size_t)l->parts * sizeof *l->tokens, &all_tokens)) all_tokens = SIZE_MAX;
    if (!(l->tokens = (tt__tokens *)tt__calloc(ctx, all_tokens)) ||
        !(l->scratch = (int32_t *)tt__alloc(ctx, scratch)) ||
        (l->d->task == TT_TASK_TAGS && !(l->spans = (tt_span *)tt__alloc(ctx, spans))))
        return false;
    const int64_t sequences = (int64_t)l->d->count * l->parts;
    tt__run_tasks(ctx->cpu.pool, tt__ceil_div(sequences, TT__TEXTS_AT_ONCE), tt__loader_task, l);
    tt__free(ctx, l->scratch);
    tt__free(ctx, l->spans);
    l->scratch = NULL;
    l->spans = NULL;
    if (l->failed)
        return tt__fail(ctx, TT_ERR_MEMORY, "loader: out of memory for the tokens of %d texts: free memory",
                        l->d->count),
            false;
    if (l->empty >= 0)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "loader: text %lld has no tokens: leave it out of the dataset",
                        (long long)l->empty / l->parts), false;

    /* A micro-batch has at most as many tokens as the max_seqs longest texts have together. */
    int64_t room = l->o.max_tokens ? l->o.max_tokens : INT32_MAX, micro = 0;
    const tt__step_texts all = {l->tokens, l->parts, NULL};
    const int64_t max = tt__min(l->o.batch, l->d->count);
    for (uint32_t i = 0; i < (uint32_t)count; i++) l->deal.order[i] = i;
    tt__sort_indices(l->deal.order, count, tt__place_longer, &all);
    /* Few texts have less than two tokens. More than room / 2 texts would therefore hardly ever fit into a
       micro-batch. */
    l->deal.max_seqs = (int)tt__min(l->deal.max_seqs, tt__max(1, room / (2 * l->parts)));
    for (int64_t i = 0; i < tt__min(l->deal.max_seqs, max); i++)
        micro += tt__example_tokens(l->tokens, l->parts, l->deal.order[i]);
    l->max_tokens = (int)tt__min(room, micro);
    l->deal.accumulates = micro > room || tt__deal_micros(&l->deal, max) > l->deal.data;
    return true;
}

/* Sets the fields that batches of texts and batches of images both have. After the last batch of a step,
   moves the loader to the next step. */
static bool tt__loader_give(tt_loader *l, tt_batch *batch, int seqs, bool last_of_step)
{
    batch->seqs = seqs;
    batch->labels = l->labels;
    batch->label_values = l->label_values;
    batch->values = l->label_values ? (int)tt__values_per_example(l->d) : 0;
    batch->index = l->index;
    batch->last_of_step = last_of_step;
    if (last_of_step) l->deal.step++, l->in_step = l->micro = 0;
    return true;
}

/* ---- dividing a step of texts into micro-batches: sets l->dealt and l->ends */

/* Divides a step of n texts if `groups` is 1: each micro-batch takes the next texts until it is full. */
static void tt__loader_fill(tt_loader *l, const uint32_t *texts, int n)
{
    int micro = 0, seqs = 0, tokens = 0;
    for (int i = 0; i < n; i++) {
        const int more = tt__example_tokens(l->tokens, l->parts, texts[i]);
        const bool full = seqs == l->deal.max_seqs || more > l->max_tokens - tokens;
        if (full) l->ends[micro++] = i, seqs = tokens = 0;
        l->dealt[i] = texts[i];
        seqs++;
        tokens += more;
    }
    l->ends[micro] = n;
}

/* Distributes n texts over `micros` micro-batches: from the longest on, each text goes to the micro-batch
   with the fewest tokens that has room for a text (Graham, "Bounds on multiprocessing timing anomalies",
   1969). Sets l->ends[k] to the number of texts of micro-batch k. Returns false if a micro-batch would have
   more than max_tokens tokens. */
static bool tt__loader_deal(tt_loader *l, const uint32_t *texts, int n, int micros)
{
    memset(l->ends, 0, sizeof *l->ends * (size_t)micros);
    memset(l->filled, 0, sizeof *l->filled * (size_t)micros);
    for (int i = 0; i < n; i++) {
        const uint32_t place = l->by_length[i];
        int to = -1;
        for (int k = 0; k < micros; k++)
            if (l->ends[k] < l->deal.max_seqs && (to < 0 || l->filled[k] < l->filled[to])) to = k;
        const int more = tt__example_tokens(l->tokens, l->parts, texts[place]);
        if (more > l->max_tokens - l->filled[to]) return false;
        l->filled[to] += more;
        l->ends[to]++;
        l->micro_of[place] = to;
    }
    return true;
}

/* Divides a step of n texts into micro-batches. The texts of a micro-batch keep their order. */
static void tt__loader_cut_step(tt_loader *l, const uint32_t *texts, int n)
{
    const tt__step_texts step = {l->tokens, l->parts, texts};
    int micros = tt__deal_micros(&l->deal, n), from = 0;
    if (l->deal.groups == 1) {
        tt__loader_fill(l, texts, n);
        return;
    }
    for (int i = 0; i < n; i++) l->by_length[i] = (uint32_t)i;
    tt__sort_indices(l->by_length, (size_t)n, tt__place_longer, &step);
    while (!tt__loader_deal(l, texts, n, micros)) micros = (int)tt__min(n, micros + l->deal.groups);
    for (int k = 0; k < micros; k++) { /* ends[k] becomes the place of the next text of micro-batch k */
        const int seqs = l->ends[k];
        l->ends[k] = from;
        from += seqs;
    }
    for (int i = 0; i < n; i++) l->dealt[l->ends[l->micro_of[i]]++] = texts[i];
}
