#pragma once
#include "../base/base.h"
#include "../context/params.h"
#include "../files/lists.h"
#include "dealer.h"
#include "stream.h"

/* ---- loading windows of a token stream */

/* A document of a stream: its first token and its number of tokens, at most the length of a window. */
typedef struct tt__document { int64_t first; int tokens; } tt__document;

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
    struct tt__document *documents; /* the windows of the option `whole` */
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
    void *const owned[] = {l->deal.order, l->ids, l->positions, l->targets, l->seq_start, l->window,
                           l->documents, l};
    tt__free_all(l->ctx, owned, TT__COUNT(owned));
}

/* The state of a sweep over all tokens, which computes the hash of the ids, the max number of documents in a
   window, where a part of a document counts as a document, and, with the option `whole`, the documents. */
typedef struct tt__window_survey {
    tt_token_loader *l;
    int64_t token;       /* number of tokens so far */
    /* at: number of tokens of the current window so far; here: number of documents that end in the current
       window so far; max: max number of documents in a window so far */
    int at, here, max;
    /* With the option `whole`: the first token of the current document; number of entries of l->documents,
       and the number that fits; max tokens of a window; number of documents with more tokens than a window;
       of those that are left out because no token of their window is learnt. */
    int64_t first;
    int documents, capacity, longest;
    int64_t cut, left_out;
} tt__window_survey;

/* Ends a document before token number x->token, with the option `whole`. Returns false if memory runs out. */
static bool tt__survey_end(tt__window_survey *x)
{
    tt_token_loader *l = x->l;
    const uint8_t *marks = l->s->store->marks ? l->s->store->marks + l->s->first + x->first : NULL;
    const int64_t tokens = x->token - x->first;
    const tt__document d = {x->first, (int)tt__min(tokens, l->o.length)};
    int learnt = 1;
    while (marks && learnt < d.tokens && !(marks[learnt] & TT__MARK_LEARNT)) learnt++;
    x->first = x->token;
    x->cut += tokens > l->o.length;
    x->left_out += marks && learnt >= d.tokens;
    if (marks && learnt >= d.tokens) return true;
    if (!TT__GROW(l->ctx, l->documents, x->documents, x->capacity)) return false;
    x->longest = (int)tt__max(x->longest, d.tokens);
    l->documents[x->documents++] = d;
    return true;
}

static tt_status tt__survey_windows(void *arg, const int32_t *ids, int64_t n)
{
    tt__window_survey *x = (tt__window_survey *)arg;
    tt_token_loader *l = x->l;
    const uint8_t *marks = l->s->store->marks;
    l->hash = tt__hash_on(l->hash, ids, sizeof *ids * (size_t)n);
    if (marks) l->hash = tt__hash_on(l->hash, marks + l->s->first + x->token, (size_t)n);
    for (int64_t k = 0; k < n; k++) {
        const bool ends = !l->o.across && tt__stream_ends(l->s, x->token, ids[k]);
        x->token++;
        if (ends && l->o.whole && !tt__survey_end(x)) return TT_ERR_MEMORY;
        if (x->at == l->o.length) x->at = x->here = 0;
        x->at++;
        x->here += ends;
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
    const bool whole = l->o.whole;
    const int64_t first = whole ? l->documents[w].first : w * l->o.length;
    const int64_t n = whole ? l->documents[w].tokens : tt__min(l->o.length, l->s->count - 1 - first);
    const uint8_t *marks = l->s->store->marks ? l->s->store->marks + l->s->first + first : NULL;
    tt_status status = tt_token_stream_get(l->s, first, whole ? n : n + 1, l->window);
    bool begins = true;
    for (int64_t k = 0, position = 0; k < n && status == TT_OK; k++, position++, (*rows)++) {
        const bool ends = whole ? k == n - 1 : !l->o.across && tt__stream_ends(l->s, first + k, l->window[k]);
        const bool learnt = !ends && (!marks || (marks[k + 1] & TT__MARK_LEARNT));
        if (begins) position = 0, l->seq_start[(*seqs)++] = *rows;
        l->ids[*rows] = l->window[k];
        l->positions[*rows] = (int32_t)position;
        l->targets[*rows] = learnt ? l->window[k + 1] : -100;
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
    if (o->whole && o->across)
        tt__print(&all, "; whole makes a window of each document, so that across has no meaning: clear one "
                  "of them");
    if (o->length > 0 && s->count / (o->whole ? 1 : o->length) >= INT32_MAX)
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
    tt__window_survey x;
    memset(&x, 0, sizeof x);
    x.l = l;
    x.max = 1;
    const int32_t end = o.across ? -1 : s->end;
    l->hash = tt__hash_on(TT__HASH_BEGIN, &o.length, sizeof o.length);
    l->hash = tt__hash_on(l->hash, &end, sizeof end);
    tt_status status = tt__stream_each(s, &x, tt__survey_windows);
    if (o.whole && status == TT_OK && x.first < s->count && !tt__survey_end(&x)) status = TT_ERR_MEMORY;
    if (o.whole && status == TT_OK && !x.documents)
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "token loader: '%s' has no document with a token to learn "
                          "among its "
                          "first %d: set a larger length", s->store->path, o.length);
    const int64_t windows = o.whole ? x.documents : tt__ceil_div(s->count - 1, o.length);
    const bool begun = status == TT_OK &&
                       tt__deal_begin(ctx, d, windows, o.batch, o.accumulate, &o.parallel);
    l->max_tokens = (int)tt__min((int64_t)d->max_seqs * (o.whole ? x.longest : o.length),
                                 o.whole ? s->count : s->count - 1);
    l->max_seqs = o.whole ? d->max_seqs : (int)tt__min((int64_t)d->max_seqs * x.max, l->max_tokens);
    if (x.cut && status == TT_OK)
        tt__log(ctx, TT_LOG_WARNING, "tokens", "'%s': %lld documents have more than %d tokens, and are cut: "
                "a larger "
                "length would keep them whole", s->store->path, (long long)x.cut, o.length);
    if (x.left_out && status == TT_OK)
        tt__log(ctx, TT_LOG_WARNING, "tokens", "'%s': %lld conversations are left out, because they have no "
                "token to "
                "learn among their first %d", s->store->path, (long long)x.left_out, o.length);
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
    tt__print(&text, "batch %d\naccumulate %d\ngroups %d\nlength %d\nshuffle %d\nacross %d\nwhole %d\n",
              l->o.batch, l->o.accumulate, l->deal.groups, l->o.length, l->o.shuffle, l->o.across,
                  l->o.whole);
}

const tt_source *tt_token_loader_source(tt_token_loader *l)
{
    if (!l) return NULL;
    const tt_source s = {l, tt__window_seek, tt__window_next, l->deal.steps, l->max_seqs, l->max_tokens,
                         l->deal.accumulates, tt__window_hash, NULL, 0, NULL, tt__window_describe, 0};
    l->source = s;
    return &l->source;
}
