#pragma once
#include "../base/base.h"
#include "../context/params.h"
#include "../files/lists.h"
#include "dealer.h"
#include "stream.h"

/* ---- loading windows of a token stream */

struct tt_token_loader {
    tt_context *ctx;
    const tt_token_stream *s;
    tt_token_loader_options o;
    tt__dealer deal;               /* a dealer whose examples are windows */
    int max_seqs, max_tokens;      /* max number of sequences, and of tokens, of a micro-batch */
    int micro;                     /* number of micro-batches of the step that were handed out */
    /* Sizes of the arrays: ids, positions, targets: max_tokens; seq_start: max_seqs + 1; window: length +
       1. */
    int32_t *ids, *positions, *targets, *seq_start, *window;
    uint64_t hash;
    tt_array array;
    tt_source source;
};

tt_token_loader_options tt_token_loader_options_default(void)
{
    tt_token_loader_options o;
    memset(&o, 0, sizeof o);
    o.batch = 16;
    o.accumulate = 1;
    o.length = 256;
    o.shuffle = true;
    o.parallel = tt_parallel_default();
    return o;
}

void tt_token_loader_free(tt_token_loader *l)
{
    if (!l) return;
    void *const owned[] = {l->deal.order, l->ids, l->positions, l->targets, l->seq_start, l->window, l};
    tt__free_all(l->ctx, owned, TT__COUNT(owned));
}

/* The state of a sweep over all tokens, which computes the hash of the ids and the max number of documents in
   a window, where a part of a document counts as a document. */
typedef struct tt__window_survey {
    int32_t end; /* the token that ends a document, or -1 if documents have no such token */
    /* length: number of tokens of a window; at: number of tokens of the current window so far; here: number
       of documents that end in the current window so far; max: max number of documents in a window so far */
    int length, at, here, max;
    uint64_t hash;
} tt__window_survey;

static tt_status tt__survey_windows(void *arg, const int32_t *ids, int64_t n)
{
    tt__window_survey *x = (tt__window_survey *)arg;
    x->hash = tt__hash_on(x->hash, ids, sizeof *ids * (size_t)n);
    for (int64_t k = 0; k < n; k++) {
        if (x->at == x->length) x->at = x->here = 0;
        x->at++;
        x->here += ids[k] == x->end;
        x->max = (int)tt__max(x->max, x->here + 1);
    }
    return TT_OK;
}

static tt_status tt__window_seek(void *self, int64_t epoch, int64_t step)
{
    tt_token_loader *l = (tt_token_loader *)self;
    tt_status status = tt__deal_seek(l->ctx, &l->deal, epoch, step);
    if (status == TT_OK) l->micro = 0;
    return status;
}

/* Appends window w to the micro-batch, which has *rows tokens and *seqs sequences so far, and updates both
   numbers. */
static tt_status tt__window_add(tt_token_loader *l, int64_t w, int *rows, int *seqs)
{
    const int64_t first = w * l->o.length, n = tt__min(l->o.length, l->s->count - 1 - first);
    tt_status status = tt_token_stream_get(l->s, first, n + 1, l->window);
    bool begins = true;
    for (int64_t k = 0, position = 0; k < n && status == TT_OK; k++, position++, (*rows)++) {
        const bool ends = !l->o.across && l->window[k] == l->s->end;
        if (begins) position = 0, l->seq_start[(*seqs)++] = *rows;
        l->ids[*rows] = l->window[k];
        l->positions[*rows] = (int32_t)position;
        l->targets[*rows] = ends ? -100 : l->window[k + 1];
        begins = ends;
    }
    return status;
}

static tt_status tt__window_next(void *self, tt_batch *b, bool *more)
{
    tt_token_loader *l = (tt_token_loader *)self;
    tt__dealer *d = &l->deal;
    const int64_t first = d->step * d->batch, n = tt__min(d->batch, d->count - first);
    int rows = 0, seqs = 0;
    *more = d->step < d->steps;
    if (!*more) return TT_OK;
    const int micros = tt__deal_micros(d, n);
    for (int64_t k = n * l->micro / micros; k < n * (l->micro + 1) / micros; k++) {
        tt_status status = tt__window_add(l, d->order[first + k], &rows, &seqs);
        if (status != TT_OK) return status;
    }
    l->seq_start[seqs] = rows;
    b->rows = rows;
    b->seqs = seqs;
    b->ids = l->ids;
    b->positions = l->positions;
    b->seq_start = l->seq_start;
    l->array.input = "targets";
    l->array.data = l->targets;
    l->array.rows = rows;
    b->arrays = &l->array;
    b->n_arrays = 1;
    b->last_of_step = ++l->micro == micros;
    if (b->last_of_step) d->step++, l->micro = 0;
    return TT_OK;
}

static uint64_t tt__window_hash(void *self) { return ((const tt_token_loader *)self)->hash; }

static tt_status tt__window_check(tt_context *ctx, const tt_token_stream *s, const tt_token_loader_options *o)
{
    char text[800] = "";
    tt__text_buffer all = {text, sizeof text, 0};
    if (o->length < 1) tt__print(&all, "; length is %d, but must be at least 1", o->length);
    if (tt__deal_check(&all, o->batch, o->accumulate, &o->parallel) && o->length > 0 &&
        tt__ceil_div(o->batch, o->accumulate * tt__deal_groups(&o->parallel)) > INT32_MAX / 4 / o->length)
        tt__print(&all, "; batch %d of windows of length %d is too large: a micro-batch must have less than "
                  "2^29 tokens", o->batch, o->length);
    if (o->length > 0 && s->count / o->length >= INT32_MAX)
        tt__print(&all, "; %lld tokens make 2^31 windows of length %d or more, which is too many: use a "
                  "larger length", (long long)s->count, o->length);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "token loader: %s", text + 2) : TT_OK;
}

tt_token_loader *tt_token_loader_new(tt_context *ctx, const tt_token_stream *s,
                                     const tt_token_loader_options *options)
{
    const tt_token_loader_options o = options ? *options : tt_token_loader_options_default();
    if (tt__window_check(ctx, s, &o) != TT_OK) return NULL;
    tt_token_loader *l = (tt_token_loader *)tt__calloc(ctx, sizeof *l);
    if (!l) return NULL;
    l->ctx = ctx;
    l->s = s;
    l->o = o;
    tt__dealer *d = &l->deal;
    d->of = "token loader";
    d->shuffle = o.shuffle;
    const bool begun = tt__deal_begin(ctx, d, tt__ceil_div(s->count - 1, o.length), o.batch, o.accumulate,
                                      &o.parallel);
    l->max_tokens = (int)tt__min((int64_t)d->max_seqs * o.length, s->count - 1);
    tt__window_survey x = {o.across ? -1 : s->end, o.length, 0, 0, 1, TT__HASH_BEGIN};
    x.hash = tt__hash_on(x.hash, &x.length, sizeof x.length);
    x.hash = tt__hash_on(x.hash, &x.end, sizeof x.end);
    const tt_status status = tt__stream_each(s, &x, tt__survey_windows);
    l->hash = x.hash;
    l->max_seqs = (int)tt__min((int64_t)d->max_seqs * x.max, l->max_tokens);
    const size_t rows = (size_t)l->max_tokens, seqs = (size_t)l->max_seqs;
    if (status == TT_OK && begun &&
        (l->ids = (int32_t *)tt__alloc(ctx, sizeof *l->ids * rows)) &&
        (l->positions = (int32_t *)tt__alloc(ctx, sizeof *l->ids * rows)) &&
        (l->targets = (int32_t *)tt__alloc(ctx, sizeof *l->ids * rows)) &&
        (l->seq_start = (int32_t *)tt__alloc(ctx, sizeof *l->ids * (seqs + 1))) &&
        (l->window = (int32_t *)tt__alloc(ctx, sizeof *l->ids * ((size_t)o.length + 1))) &&
        tt__window_seek(l, 0, 0) == TT_OK)
        return l;
    tt_token_loader_free(l);
    return NULL;
}

static void tt__window_describe(void *self, char *to, size_t capacity)
{
    const tt_token_loader *l = (const tt_token_loader *)self;
    tt__text_buffer text = {to, capacity, 0};
    tt__print(&text, "batch %d\naccumulate %d\ngroups %d\nlength %d\nshuffle %d\nacross %d\n", l->o.batch,
              l->o.accumulate, l->deal.groups, l->o.length, l->o.shuffle, l->o.across);
}

const tt_source *tt_token_loader_source(tt_token_loader *l)
{
    if (!l) return NULL;
    const tt_source s = {l, tt__window_seek, tt__window_next, l->deal.steps, l->max_seqs, l->max_tokens,
                         l->deal.accumulates, tt__window_hash, NULL, 0, NULL, tt__window_describe, 0};
    l->source = s;
    return &l->source;
}
