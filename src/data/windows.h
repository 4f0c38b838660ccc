#pragma once
#include "../base/base.h"
#include "../context/params.h"
#include "../files/lists.h"
#include "dealer.h"
#include "stream.h"

/* ---- loading windows of a token stream */

/* A document of a stream: its first token and its number of tokens, at most the length of a window. */
typedef struct tt__document { int64_t first; int tokens; } tt__document;

/* Name of an input: the reference of each pair with the opposite sign, (pairs, 1). */
#define TT__REFERENCE_MINUS "reference.minus"
enum { TT__PAIR_ARRAYS = 6 }; /* number of the arrays of a batch of pairs */

/* The arrays of a loader of pairs. A window is then a pair: two documents of the stream, of which the first
   has the chosen answer. */
typedef struct tt__pair_arrays {
    int max_answers, n;     /* n: tokens of answers in the micro-batch, at most max_answers */
    int32_t *rows, *start;  /* rows (max_answers): the row before each token of an answer; start (pairs + 1):
                               the first of `rows` of each pair */
    float *signs;           /* (max_answers): -1 for the chosen answer, 1 for the rejected one */
    float *minus, *ones;    /* (pairs) of the micro-batch: the reference with the opposite sign; ones */
    int64_t *index;         /* (max_seqs): the number of each sequence's pair */
    float *reference;       /* (all pairs): see tt_source */
} tt__pair_arrays;

struct tt_token_loader {
    tt_context *ctx;
    const tt_token_stream *s;
    tt_token_loader_options o;
    tt__dealer deal;               /* a dealer whose examples are windows */
    int max_seqs, max_tokens;      /* max number of sequences, and of tokens, of a micro-batch */
    int micro;                     /* number of micro-batches of the step that were handed out */
    /* Array sizes: max_tokens for ids, positions and targets; max_seqs + 1 for seq_start; length + 1 for
       window. */
    int32_t *ids, *positions, *targets, *seq_start, *window;
    tt__pair_arrays pairs;         /* all 0 unless the stream has pairs */
    struct tt__document *documents; /* with the option `whole`: the documents, each of which is a window */
    uint64_t hash;
    tt_array array[TT__PAIR_ARRAYS];
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
                           l->documents, l->pairs.rows, l->pairs.start, l->pairs.signs, l->pairs.minus,
                           l->pairs.ones, l->pairs.index, l->pairs.reference, l};
    tt__free_all(l->ctx, owned, TT__COUNT(owned));
}

/* The state of a sweep over all tokens. The sweep computes the hash of the ids and the max number of
   documents in a window, where a part of a document counts as a document. With the option `whole`, it also
   lists the documents. */
typedef struct tt__window_survey {
    tt_token_loader *l;
    int64_t token;       /* number of tokens so far */
    /* at: number of tokens of the current window so far; here: number of documents that end in the current
       window so far; max: max number of documents in a window so far */
    int at, here, max;
    /* For the option `whole`. first: the first token of the current document. documents, capacity: number of
       entries of l->documents, and for how many there is memory. longest: max tokens of a window. cut: number
       of documents with more tokens than a window. left_out: number of windows left out, because one of
       their documents has no token that is learnt. */
    int64_t first;
    int documents, capacity, longest;
    int64_t cut, left_out;
    bool second;         /* the current document has the rejected answer of a pair */
    /* tokens, learnt, skips: numbers of the tokens of the current window, which a pair's two documents share,
       of its learnt tokens, and of its documents without one. most: max number of learnt tokens of a
       window. */
    int tokens, learnt, skips, most;
} tt__window_survey;

/* With the option `whole`: ends the current document before token number x->token, and adds it to
   l->documents unless none of its tokens is learnt. Returns false if memory runs out. */
static bool tt__survey_end(tt__window_survey *x)
{
    tt_token_loader *l = x->l;
    const uint8_t *marks = l->s->store->marks ? l->s->store->marks + l->s->first + x->first : NULL;
    const int64_t tokens = x->token - x->first;
    const tt__document d = {x->first, (int)tt__min(tokens, l->o.length)};
    const bool pairs = l->s->store->paired, second = x->second;
    int learnt = 0;
    for (int k = 1; k < d.tokens && marks; k++) learnt += (marks[k] & TT__MARK_LEARNT) != 0;
    x->first = x->token;
    x->second = pairs && !second;
    x->cut += tokens > l->o.length;
    if (!second) x->tokens = x->learnt = x->skips = 0;
    x->tokens += d.tokens;
    x->learnt += learnt;
    x->skips += marks && !learnt;
    if (!TT__GROW(l->ctx, l->documents, x->documents, x->capacity)) return false;
    l->documents[x->documents++] = d;
    if (x->second) return true; /* the window ends with the next document */
    if (x->skips) {
        x->documents -= 1 + pairs;
        x->left_out++;
        return true;
    }
    x->longest = (int)tt__max(x->longest, x->tokens);
    x->most = (int)tt__max(x->most, x->learnt);
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

/* Appends the token of row `row` to the answers of the current pair, if the token is learnt. */
static void tt__pair_learn(tt_token_loader *l, int row, bool rejected, int32_t target)
{
    tt__pair_arrays *p = &l->pairs;
    if (target < 0) return;
    p->rows[p->n] = row;
    p->signs[p->n] = rejected ? 1.0f : -1.0f;
    l->targets[p->n++] = target;
}

/* Appends window w to the micro-batch, which has *rows tokens and *seqs sequences so far, and updates both
   numbers. With pairs, a window here is one of the documents. */
static tt_status tt__window_add(tt_token_loader *l, int64_t w, int *rows, int *seqs)
{
    const bool pairs = l->s->store->paired;
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
        const int32_t target = learnt ? l->window[k + 1] : -100;
        if (pairs) tt__pair_learn(l, *rows, w % 2, target);
        else l->targets[*rows] = target;
        begins = ends;
    }
    return status;
}

/* Appends the documents of pair w to the micro-batch. */
static tt_status tt__pair_add(tt_token_loader *l, int64_t w, int *rows, int *seqs)
{
    tt__pair_arrays *p = &l->pairs;
    const int pair = *seqs / 2;
    p->index[*seqs] = p->index[*seqs + 1] = w;
    p->minus[pair] = -p->reference[w];
    tt_status status = tt__window_add(l, 2 * w, rows, seqs);
    if (status == TT_OK) status = tt__window_add(l, 2 * w + 1, rows, seqs);
    p->start[pair + 1] = p->n;
    return status;
}

/* Sets the arrays of a micro-batch of pairs. */
static void tt__pair_batch(tt_token_loader *l, tt_batch *b)
{
    const tt__pair_arrays *p = &l->pairs;
    const int64_t pairs = b->seqs / 2;
    const tt_array arrays[TT__PAIR_ARRAYS] = {{"answers", p->rows, p->n}, {"targets", l->targets, p->n},
        {"signs", p->signs, p->n}, {"pair_start", p->start, pairs + 1},
        {TT__REFERENCE_MINUS, p->minus, pairs}, {"preferred", p->ones, pairs}};
    memcpy(l->array, arrays, sizeof arrays);
    b->index = p->index;
    b->n_arrays = TT__PAIR_ARRAYS;
}

static tt_status tt__window_next(void *self, tt_batch *b, bool *more)
{
    const bool pairs = ((const tt_token_loader *)self)->s->store->paired;
    tt_token_loader *l = (tt_token_loader *)self;
    tt__dealer *d = &l->deal;
    const int64_t first = d->step * d->batch, n = tt__min(d->batch, d->count - first);
    int rows = 0, seqs = 0;
    *more = d->step < d->steps;
    if (!*more) return TT_OK;
    const int micros = tt__deal_micros(d, n);
    l->pairs.n = 0;
    for (int64_t k = n * l->micro / micros; k < n * (l->micro + 1) / micros; k++) {
        const int64_t w = d->order[first + k];
        tt_status status = pairs ? tt__pair_add(l, w, &rows, &seqs) : tt__window_add(l, w, &rows, &seqs);
        if (status != TT_OK) return status;
    }
    l->seq_start[seqs] = rows;
    b->rows = rows;
    b->seqs = seqs;
    b->ids = l->ids;
    b->positions = l->positions;
    b->seq_start = l->seq_start;
    l->array[0].input = "targets";
    l->array[0].data = l->targets;
    l->array[0].rows = rows;
    b->arrays = l->array;
    b->n_arrays = 1;
    if (pairs) tt__pair_batch(l, b);
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
    if (s->store->paired && o->across)
        tt__print(&all, "; a window is one pair of answers, so that {across} has no meaning: leave it out");
    else if (o->whole && o->across)
        tt__print(&all, "; whole makes a window of each document, so that {across} has no meaning: clear one "
                  "of them");
    if (o->length > 0 && s->count / (o->whole ? 1 : o->length) >= INT32_MAX)
        tt__print(&all, "; %lld tokens make 2^31 windows of length %d or more, which is too many: use a "
                  "larger length", (long long)s->count, o->length);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "token loader: %s", text + 2) : TT_OK;
}

/* Allocates the arrays of a loader of pairs, whose dealer is set. answers: max number of tokens of the
   answers of a pair. */
static bool tt__pair_allocate(tt_token_loader *l, int answers)
{
    tt__pair_arrays *p = &l->pairs;
    tt_context *ctx = l->ctx;
    const size_t pairs = (size_t)l->deal.max_seqs, all = (size_t)l->deal.count;
    p->max_answers = (int)tt__min((int64_t)l->deal.max_seqs * answers, l->max_tokens);
    const size_t n = (size_t)p->max_answers;
    if (!(p->rows = (int32_t *)tt__alloc(ctx, sizeof *p->rows * n)) ||
        !(p->start = (int32_t *)tt__calloc(ctx, sizeof *p->start * (pairs + 1))) ||
        !(p->signs = (float *)tt__alloc(ctx, sizeof *p->signs * n)) ||
        !(p->minus = (float *)tt__alloc(ctx, sizeof *p->minus * pairs)) ||
        !(p->ones = (float *)tt__alloc(ctx, sizeof *p->ones * pairs)) ||
        !(p->index = (int64_t *)tt__alloc(ctx, sizeof *p->index * 2 * pairs)) ||
        !(p->reference = (float *)tt__alloc(ctx, sizeof *p->reference * all))) return false;
    for (size_t k = 0; k < pairs; k++) p->ones[k] = 1;
    for (size_t k = 0; k < all; k++) p->reference[k] = NAN;
    return true;
}

tt_token_loader *tt_token_loader_new(tt_context *ctx, const tt_token_stream *s,
                                     const tt_token_loader_options *options)
{
    tt_token_loader_options o = options ? *options : tt_token_loader_options_default();
    const bool pairs = s->store->paired;
    o.whole = o.whole || pairs;
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
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "token loader: '%s' has no %s with a token to learn "
                          "among its first %d: set a larger {length}", s->store->path,
                          pairs ? "pair" : "document", o.length);
    const int64_t windows = o.whole ? x.documents / (1 + pairs) : tt__ceil_div(s->count - 1, o.length);
    const bool begun = status == TT_OK &&
                       tt__deal_begin(ctx, d, windows, o.batch, o.accumulate, &o.parallel);
    l->max_tokens = (int)tt__min((int64_t)d->max_seqs * (o.whole ? x.longest : o.length),
                                 o.whole ? s->count : s->count - 1);
    l->max_seqs = o.whole ? d->max_seqs * (1 + pairs)
                          : (int)tt__min((int64_t)d->max_seqs * x.max, l->max_tokens);
    if (x.cut && status == TT_OK)
        tt__log(ctx, TT_LOG_WARNING, "tokens", "'%s': %lld documents have more than %d tokens, and are cut: "
                "a larger "
                "length would keep them whole", s->store->path, (long long)x.cut, o.length);
    if (x.left_out && status == TT_OK)
        tt__log(ctx, TT_LOG_WARNING, "tokens", "'%s': %lld %s are left out, because they have no token to "
                "learn among their first %d", s->store->path, (long long)x.left_out,
                pairs ? "pairs" : "conversations", o.length);
    const size_t rows = (size_t)l->max_tokens, seqs = (size_t)l->max_seqs;
    if (status == TT_OK && begun && (!pairs || tt__pair_allocate(l, x.most)) &&
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
                         l->deal.accumulates, tt__window_hash, NULL, 0, NULL, tt__window_describe,
                         l->pairs.max_answers, l->pairs.reference, l->pairs.reference ? l->deal.count : 0};
    l->source = s;
    return &l->source;
}
