#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../passes/offload.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../compile/program.h"
#include "../files/lists.h"
#include "../text/encode.h"
#include "lm_tape.h"

/* --------------------------------------------------------------------------------------------- generation
   A slot holds one sequence: a tt__continued has its tokens, the program's caches have their keys and values.
   A run of the program reads one token of each slot, or several tokens of a prompt that is not read to its
   end, and computes the logits after the last token of each slot. When the sequence of a slot ends, the slot
   gets the next prompt. */

typedef struct tt__continued {
    int seq;        /* number of the sequence; -1: no sequence */
    int length;     /* number of tokens of the prompt and of the answer so far together */
    int fed;        /* number of tokens that the program has read in earlier runs */
    int take;       /* number of tokens that the program reads in this run */
    int32_t *token; /* the tokens; memory for `context` tokens of the generator */
    uint8_t *seen;  /* for each token of the vocabulary, a bit: whether the sequence has that token */
} tt__continued;

struct tt_generator {
    tt_context *ctx;
    const tt_lm *m;
    int max_seqs, context, max_tokens, vocab;
    tt_program *program;
    tt_value ids, positions, at, start, last, logits;
    /* Shapes of the arrays are in parentheses. */
    tt__continued *slot;                     /* (max_seqs): the sequences in work */
    int32_t *row_id, *row_position, *row_at; /* (max_tokens): data of the inputs ids, positions and at */
    int32_t *starts, *picked, *picked_slot;  /* starts, picked: data of the inputs start and last;
                                                picked_slot: for each row of logits, the index in `slot` of
                                                the row's sequence. Each: (max_seqs + 1) */
    float *scores;                           /* (max_seqs, vocab): logits */
    int32_t *order;                          /* (vocab): scratch memory for a heap of tokens */
};

tt_generator_options tt_generator_options_default(void)
{
    tt_generator_options o;
    memset(&o, 0, sizeof o);
    o.max_seqs = 1;
    o.max_tokens = 256;
    o.compile = tt_compile_options_default();
    o.compile.train = false;
    return o;
}

tt_sampling tt_sampling_default(void)
{
    tt_sampling s;
    memset(&s, 0, sizeof s);
    s.max_new = 128;
    s.temperature = s.top_p = s.repetition_penalty = 1;
    return s;
}

void tt_generator_free(tt_generator *g)
{
    if (!g) return;
    tt_program_free(g->program);
    for (int k = 0; k < g->max_seqs && g->slot; k++) {
        tt__free(g->ctx, g->slot[k].token);
        tt__free(g->ctx, g->slot[k].seen);
    }
    void *const owned[] = {g->slot, g->row_id, g->row_position, g->row_at, g->starts, g->picked,
                           g->picked_slot, g->scores, g->order, g};
    tt__free_all(g->ctx, owned, TT__COUNT(owned));
}

static tt_status tt__generator_allocate(tt_generator *g)
{
    const size_t seqs = (size_t)g->max_seqs + 1, rows = (size_t)g->max_tokens, vocab = (size_t)g->vocab;
    int32_t **const arrays[] = {&g->row_id, &g->row_position, &g->row_at, &g->starts, &g->picked,
                                &g->picked_slot, &g->order};
    const size_t counts[] = {rows, rows, rows, seqs, seqs, seqs, vocab};
    g->slot = (tt__continued *)tt__calloc(g->ctx, sizeof *g->slot * seqs);
    g->scores = (float *)tt__alloc(g->ctx, sizeof(float) * vocab * (size_t)g->max_seqs);
    if (!g->slot || !g->scores) return TT_ERR_MEMORY;
    for (int k = 0; k < TT__COUNT(arrays); k++)
        if (!(*arrays[k] = (int32_t *)tt__alloc(g->ctx, sizeof(int32_t) * counts[k]))) return TT_ERR_MEMORY;
    for (int k = 0; k < g->max_seqs; k++) {
        g->slot[k].token = (int32_t *)tt__alloc(g->ctx, sizeof(int32_t) * (size_t)g->context);
        g->slot[k].seen = (uint8_t *)tt__alloc(g->ctx, vocab / 8 + 1);
        if (!g->slot[k].token || !g->slot[k].seen) return TT_ERR_MEMORY;
    }
    for (int k = 0; k <= g->max_seqs; k++) g->starts[k] = k * g->context;
    return TT_OK;
}

/* Records and compiles the generator's program. */
static tt_status tt__generator_compile(tt_generator *g, const tt_generator_options *o)
{
    tt_tape *t = tt_tape_new(g->ctx);
    if (!t) return TT_ERR_MEMORY;
    tt_inputs in;
    tt__lm_cache cache;
    char device[sizeof ((tt__device_group *)0)->name] = "";
    memset(&in, 0, sizeof in);
    const int64_t rows = tt_axis(t, "tokens", g->max_tokens), seqs = tt_axis(t, "sequences", g->max_seqs);
    g->ids = in.ids = tt_input(t, "ids", TT_I32, rows, 1);
    g->positions = in.positions = tt_input(t, "positions", TT_I32, rows, 1);
    g->at = cache.at = tt_input(t, "at", TT_I32, rows, 1);
    g->start = cache.start = tt_seq_start(t, "start", g->max_seqs);
    g->last = tt_input(t, "last", TT_I32, seqs, 1);
    cache.rows = (int64_t)g->max_seqs * g->context;
    tt_value x = tt__lm_hidden_states(g->m, t, &in, &cache);
    g->logits = tt__lm_head(g->m, t, tt_gather_rows(t, x, g->last));
    if (g->logits.id) t->values[g->logits.id].pinned_f32 = true;
    tt_compile_options c = o->compile;
    const tt_program *share = c.share;
    if (share) { /* the parameters keep the placement that the program `share` gave them */
        const char *name = share->settings.group->name;
        c.parallel = share->settings.options.parallel;
        c.parallel.schedule = NULL;
        c.memory = tt__memory_names[share->settings.memory];
        snprintf(device, sizeof device, "%.*s", (int)strcspn(name, " "), name); /* "cpu*8" of the name "cpu*8
                                                                                   in 4 processes" */
        if (!c.device) c.device = device;
        if (share->chosen.offload & TT__OUT_PARAMETERS) c.offload = "parameters";
    }
    g->program = tt_compile(t, g->logits, &c);
    tt_tape_free(t);
    if (!g->program) return g->ctx->status;
    const tt_plan plan = tt_program_plan(g->program);
    if (plan.ranks == 1 || share) return TT_OK;
    return tt__fail(g->ctx, TT_ERR_UNSUPPORTED, "a generator without `share` runs on one rank, but its "
                    "device option has %d: name one device, such as \"cpu\" or \"cuda:0\"", plan.ranks);
}

tt_generator *tt_generator_new(const tt_lm *m, const tt_generator_options *o)
{
    const tt_generator_options defaults = tt_generator_options_default();
    const tt_lm_config *c = &m->config;
    if (!o) o = &defaults;
    const int context = o->context ? o->context : (int)tt__min(c->max_positions, 2048);
    char text[800] = "";
    tt__text_buffer all = {text, sizeof text, 0};
    if (m->score) tt__print(&all, "; the model is a classifier, which predicts no tokens: use tt_lm_load");
    if (o->compile.train)
        tt__print(&all, "; compile.train is true, but a generator does not train: set it to false");
    if (o->max_seqs < 1) tt__print(&all, "; max_seqs is %d, but must be at least 1", o->max_seqs);
    if (context < 2) tt__print(&all, "; the context is %d tokens, but must be at least 2", context);
    if (m->position && context > c->max_positions)
        tt__print(&all, "; the context is %d tokens, but must be at most %d, the model's positions", context,
                  c->max_positions);
    if (o->max_tokens < o->max_seqs)
        tt__print(&all, "; max_tokens is %d, but must be at least max_seqs, %d", o->max_tokens, o->max_seqs);
    if ((int64_t)o->max_seqs * context > INT32_MAX)
        tt__print(&all, "; max_seqs, %d, of %d tokens each are 2^31 tokens or more, which is too many: set "
                  "max_seqs lower", o->max_seqs, context);
    if (all.length) {
        tt__fail(m->ctx, TT_ERR_ARGUMENT, "tt_generator_new: %s", text + 2);
        return NULL;
    }
    tt_generator *g = (tt_generator *)tt__calloc(m->ctx, sizeof *g);
    if (!g) return NULL;
    g->ctx = m->ctx;
    g->m = m;
    g->max_seqs = o->max_seqs;
    g->context = context;
    g->max_tokens = o->max_tokens;
    g->vocab = c->vocab_size;
    tt_status status = tt__generator_allocate(g);
    if (status == TT_OK) status = tt__generator_compile(g, o);
    if (status == TT_OK) return g;
    tt_generator_free(g);
    return NULL;
}

const tt_program *tt_generator_program(const tt_generator *g) { return g->program; }

/* Returns whether token a ranks before token b: a has the higher score or, if the scores are equal, the lower
   id. */
static bool tt__likelier(const float *x, int32_t a, int32_t b)
{
    return x[a] > x[b] || (x[a] == x[b] && a < b);
}

/* Moves the token at index `at` down to its place in a heap of n tokens, the likeliest on top. x: scores. */
static void tt__sift(int32_t *heap, int n, int at, const float *x)
{
    for (int child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && tt__likelier(x, heap[child + 1], heap[child])) child++;
        if (!tt__likelier(x, heap[child], heap[at])) return;
        const int32_t above = heap[at];
        heap[at] = heap[child];
        heap[child] = above;
    }
}

/* Returns the random number in (0, 1) for token `position` of sequence `seq`. */
static double tt__token_number(uint64_t seed, int seq, int position)
{
    const uint64_t key = tt__stream_key(seed, TT__RANDOM_TOKEN, (uint64_t)seq, (uint64_t)position);
    return ((double)(key >> 11) + 0.5) * 0x1p-53;
}

/* Draws a token at random according to the scores and the sampling options. x (vocab): scores, which may be
   overwritten. u: random number in (0, 1). order (vocab): scratch memory. */
static int32_t tt__draw_token(float *x, int vocab, const tt_sampling *s, double u, int32_t *order)
{
    int32_t best = 0;
    for (int32_t v = 1; v < vocab; v++) if (tt__likelier(x, v, best)) best = v;
    if (s->temperature == 0) return best;
    const float max = x[best], slope = 1 / s->temperature;
    const bool all = s->top_p >= 1 && (s->top_k == 0 || s->top_k >= vocab);
    double sum = 0;
    for (int v = 0; v < vocab; v++) {
        const float weight = expf((x[v] - max) * slope);
        if (all || s->top_k == 0) sum += weight;
        if (all) x[v] = weight; /* without `all`, x keeps the scores, which the heap compares, because
                                   different scores may round to one weight */
    }
    if (all) {
        double left = u * sum;
        int32_t last = best;
        for (int32_t v = 0; v < vocab; v++) {
            if (!(x[v] > 0)) continue;
            last = v;
            if ((left -= x[v]) < 0) return v;
        }
        return last; /* only reached if `left` was rounded up */
    }
    /* Tokens leave the heap from the likeliest on, and fill `order` from its end: the likeliest is last. */
    const int max_kept = s->top_k ? (int)tt__min(s->top_k, vocab) : vocab;
    int kept = 0;
    double held = 0;
    for (int v = 0; v < vocab; v++) order[v] = v;
    for (int v = vocab / 2 - 1; v >= 0; v--) tt__sift(order, vocab, v, x);
    while (kept < max_kept && (s->top_k || held < s->top_p * sum || !kept)) {
        const int32_t v = order[0];
        kept++;
        order[0] = order[vocab - kept];
        order[vocab - kept] = v;
        tt__sift(order, vocab - kept, 0, x);
        held += expf((x[v] - max) * slope);
    }
    if (s->top_k) { /* keeps the fewest of the top_k tokens whose weights reach top_p */
        const double enough = s->top_p * held;
        int k = 0;
        for (held = 0; k < kept && (held < enough || !k); k++)
            held += expf((x[order[vocab - 1 - k]] - max) * slope);
        kept = k;
    }
    double left = u * held;
    for (int k = 0; k < kept; k++)
        if ((left -= expf((x[order[vocab - 1 - k]] - max) * slope)) < 0) return order[vocab - 1 - k];
    return order[vocab - kept];
}

static tt_status tt__check_sampling(tt_context *ctx, const tt_sampling *s)
{
    char text[800] = "";
    tt__text_buffer all = {text, sizeof text, 0};
    if (s->max_new < 1) tt__print(&all, "; max_new is %d, but must be at least 1", s->max_new);
    if (!(s->temperature >= 0 && s->temperature < INFINITY))
        tt__print(&all, "; temperature is %g, but must be finite and at least 0", s->temperature);
    if (s->top_k < 0) tt__print(&all, "; top_k is %d, but must be at least 0", s->top_k);
    if (!(s->top_p > 0 && s->top_p <= 1)) tt__print(&all, "; top_p is %g, but must be in (0, 1]", s->top_p);
    if (!(s->repetition_penalty > 0 && s->repetition_penalty < INFINITY))
        tt__print(&all, "; repetition_penalty is %g, but must be finite and above 0", s->repetition_penalty);
    if (s->n_stop < 0 || (s->n_stop && !s->stop))
        tt__print(&all, "; n_stop is %d, but must be the number of tokens in `stop`", s->n_stop);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "tt_generate: %s", text + 2) : TT_OK;
}

static tt_status tt__check_prompts(const tt_generator *g, const int32_t *ids, const int32_t *start, int seqs)
{
    for (int s = 0; s < seqs; s++) {
        const int n = start[s + 1] - start[s];
        if (n < 1 || n >= g->context)
            return tt__fail(g->ctx, TT_ERR_ARGUMENT, "tt_generate: prompt %d has %d tokens, but must have at "
                            "least 1 and fewer than the context of %d", s, n, g->context);
        for (int32_t r = start[s]; r < start[s + 1]; r++)
            if (ids[r] < 0 || ids[r] >= g->vocab)
                return tt__fail(g->ctx, TT_ERR_ARGUMENT,
                                "tt_generate: prompt %d, token %d: the id is %d, but must be 0 to %d", s,
                                (int)(r - start[s]), (int)ids[r], g->vocab - 1);
    }
    return TT_OK;
}

static void tt__continue_with(tt__continued *slot, int32_t id)
{
    slot->token[slot->length++] = id;
    slot->seen[id >> 3] |= (uint8_t)(1 << (id & 7));
}

/* Runs the program on one token of each sequence in work and on further tokens of unread prompts, at most
   max_tokens tokens in total. Sets *picked to the number of sequences whose tokens have all been read; row k
   of the scores belongs to the sequence slot[picked_slot[k]]. */
static tt_status tt__generator_run(tt_generator *g, int *picked)
{
    int rows = 0, left = g->max_tokens;
    for (int k = 0; k < g->max_seqs; k++) left -= g->slot[k].seq >= 0;
    *picked = 0;
    for (int k = 0; k < g->max_seqs; k++) {
        tt__continued *slot = &g->slot[k];
        if (slot->seq < 0) continue;
        const int more = (int)tt__min(left, slot->length - slot->fed - 1);
        slot->take = 1 + more;
        left -= more;
        for (int n = 0; n < slot->take; n++, rows++) {
            g->row_position[rows] = slot->fed + n;
            g->row_id[rows] = slot->token[slot->fed + n];
            g->row_at[rows] = k * g->context + slot->fed + n;
        }
        if (slot->fed + slot->take < slot->length) continue;
        g->picked[*picked] = rows - 1;
        g->picked_slot[(*picked)++] = k;
    }
    const struct { tt_value v; const int32_t *data; int64_t rows; } inputs[] = {
        {g->ids, g->row_id, rows}, {g->positions, g->row_position, rows}, {g->at, g->row_at, rows},
        {g->start, g->starts, g->max_seqs + 1}, {g->last, g->picked, *picked}};
    const bool none = *picked == 0; /* at least one row of logits must be computed: row 0, which is unused */
    tt_status status = TT_OK;
    if (none) g->picked[0] = 0;
    for (int k = 0; k < TT__COUNT(inputs) && status == TT_OK; k++)
        status = tt_set_rank(g->program, 0, inputs[k].v, inputs[k].data,
                             k == 4 && none ? 1 : inputs[k].rows);
    if (status == TT_OK) status = tt_run(g->program, NULL);
    if (status == TT_OK && !none)
        status = tt_get_rank(g->program, 0, g->logits, g->scores, (size_t)*picked * (size_t)g->vocab);
    for (int k = 0; k < g->max_seqs && status == TT_OK; k++)
        if (g->slot[k].seq >= 0) g->slot[k].fed += g->slot[k].take;
    return status;
}

/* Sets *id to a token, drawn at random, that follows the tokens of a sequence. x (vocab): the scores, which
   are overwritten. */
static tt_status tt__next_token(tt_generator *g, const tt__continued *slot, const tt_sampling *s, float *x,
                                int32_t *id)
{
    for (int v = 0; v < g->vocab; v++) {
        if (!(x[v] > -INFINITY && x[v] < INFINITY)) {
            for (int k = 0; k < g->program->stages; k++) /* so that the next run clears the caches */
                g->program->stage[k]->zeroed = false;
            return tt__fail(g->ctx, TT_ERR_NUMERIC, "tt_generate: sequence %d: after token %d the score of "
                            "token %d is not finite: check the model's weights", slot->seq, slot->length, v);
        }
        if (s->repetition_penalty != 1 && slot->seen[v >> 3] >> (v & 7) & 1)
            x[v] = x[v] > 0 ? x[v] / s->repetition_penalty : x[v] * s->repetition_penalty;
    }
    *id = tt__draw_token(x, g->vocab, s, tt__token_number(s->seed, slot->seq, slot->length), g->order);
    return TT_OK;
}

tt_status tt_generate(tt_generator *g, const int32_t *ids, const int32_t *start, int seqs,
                      const tt_sampling *sampling, int32_t *out, int *count)
{
    const tt_sampling defaults = tt_sampling_default(), *s = sampling ? sampling : &defaults;
    int next = 0, active = 0, picked = 0;
    tt_status status = tt__check_sampling(g->ctx, s);
    if (status == TT_OK) status = tt__check_prompts(g, ids, start, seqs);
    for (int k = 0; k < g->max_seqs; k++) g->slot[k].seq = -1;
    for (int k = 0; k < seqs; k++) count[k] = 0;
    while (status == TT_OK && (next < seqs || active)) {
        for (int k = 0; k < g->max_seqs && next < seqs; k++) {
            tt__continued *slot = &g->slot[k];
            if (slot->seq >= 0) continue;
            slot->seq = next++;
            slot->length = slot->fed = 0;
            memset(slot->seen, 0, (size_t)g->vocab / 8 + 1);
            for (int32_t r = start[slot->seq]; r < start[slot->seq + 1]; r++) tt__continue_with(slot, ids[r]);
            active++;
        }
        status = tt__generator_run(g, &picked);
        for (int k = 0; k < picked && status == TT_OK; k++) {
            tt__continued *slot = &g->slot[g->picked_slot[k]];
            const int seq = slot->seq;
            int32_t id = 0;
            status = tt__next_token(g, slot, s, g->scores + (size_t)k * (size_t)g->vocab, &id);
            if (status != TT_OK) break;
            tt__continue_with(slot, id);
            out[(size_t)seq * (size_t)s->max_new + (size_t)count[seq]++] = id;
            bool ends = count[seq] == s->max_new || slot->length == g->context;
            for (int i = 0; i < s->n_stop; i++) ends = ends || s->stop[i] == id;
            if (s->token && !s->token(s->user, seq, id)) ends = true;
            if (!ends) continue;
            slot->seq = -1;
            active--;
        }
    }
    return status;
}

/* The state of decoding an answer and passing its text, without the prompt's text, to `put`. */
typedef struct tt__answer {
    tt_decode_stream *stream; /* NULL: tokens are bytes */
    char *text;               /* the prompt's text */
    const char *known;        /* the end of the prompt's text that the stream has not returned yet */
    bool (*put)(void *user, const char *text, size_t bytes);
    void *user;
    bool no_memory;
} tt__answer;

static bool tt__answer_text(tt__answer *w, const char *text, size_t bytes)
{
    size_t known = 0;
    w->no_memory = w->no_memory || !text;
    if (!text) return false;
    while (known < bytes && w->known[known] && text[known] == w->known[known]) known++;
    const bool other = known < bytes && w->known[known]; /* the prompt's last bytes and the answer's first
                                                            bytes form one character, which is passed whole */
    while (other && known && (text[known] & 0xc0) == 0x80) known--;
    w->known = other ? "" : w->known + known;
    return known == bytes || w->put(w->user, text + known, bytes - known);
}

static bool tt__answer_token(void *user, int seq, int32_t id)
{
    tt__answer *w = (tt__answer *)user;
    const char byte = (char)id;
    size_t bytes = 0;
    (void)seq;
    if (!w->stream) return id >= 256 || w->put(w->user, &byte, 1);
    const char *text = tt_decode_stream_put(w->stream, &id, 1, &bytes);
    return tt__answer_text(w, text, bytes);
}

/* Writes at most `room` tokens of a prompt's text to ids. Returns the number of tokens of the whole text; -1
   if memory runs out. end: the token to write if the text has no tokens; negative: token 0. */
static int64_t tt__prompt(tt_generator *g, const tt_tokenizer *k, const char *text, int32_t end, int32_t *ids,
                          int64_t room)
{
    const size_t bytes = strlen(text);
    int64_t n = (int64_t)bytes;
    int32_t first; /* the first special token that the tokenizer puts around a text */
    if (k) n = tt__encode_ids(k, text, bytes, true, ids, room);
    else for (int64_t i = 0; i < n && i < room; i++) ids[i] = (uint8_t)text[i];
    if (k && n > 1 && ids[0] == ids[1] && tt__encode_ids(k, "", 0, true, &first, 1) && first == ids[0]) {
        tt__log(g->ctx, TT_LOG_WARNING, "generate", "the text spells out '%s', which the generator adds "
                "before each text: it is not added to this text again", tt_tokenizer_token(k, first));
        n--;
        memmove(ids, ids + 1, sizeof *ids * (size_t)tt__min(n, room - 1));
    }
    if (n == 0) ids[n++] = end < 0 ? 0 : end;
    return n;
}

/* Prepares w to pass on the answer to a prompt of n tokens. Returns false if memory runs out. */
static bool tt__answer_begin(tt__answer *w, tt_context *ctx, const tt_tokenizer *k, const int32_t *ids,
                             int64_t n)
{
    size_t done; /* bytes of the prompt's text that the stream returns now */
    const int64_t length = tt_tokenizer_decode(k, ids, n, true, NULL, 0);
    w->text = length < 0 ? NULL : (char *)tt__alloc(ctx, (size_t)length + 1);
    w->stream = w->text ? tt_decode_stream_new(k, true) : NULL;
    if (!w->stream || !tt_decode_stream_put(w->stream, ids, n, &done)) return false;
    tt_tokenizer_decode(k, ids, n, true, w->text, (size_t)length + 1);
    w->known = w->text + done;
    return true;
}

tt_status tt_generate_text(tt_generator *g, const tt_tokenizer *k, const char *text,
                           const tt_sampling *sampling,
                           bool (*put)(void *user, const char *text, size_t bytes), void *user, int *count)
{
    tt_sampling s = sampling ? *sampling : tt_sampling_default();
    tt__answer w = {NULL, NULL, "", put, user, false};
    const tt_lm *m = g->m;
    const int of_tokenizer = k ? tt_tokenizer_special(k, TT_TOKEN_EOS) : 256;
    const int end = of_tokenizer < 0 && m->n_stop ? m->stop[0] : of_tokenizer, n_own = m->n_stop + (end >= 0);
    tt_status status = tt__check_sampling(g->ctx, &s);
    if (status != TT_OK) return status;
    const size_t room = (size_t)g->context + 1, max = (size_t)s.max_new, stops = (size_t)(s.n_stop + n_own);
    int given = 0;
    int32_t *ids = (int32_t *)tt__alloc(g->ctx, sizeof *ids * (room + max + stops));
    if (!ids) return TT_ERR_MEMORY;
    int32_t *out = ids + room, *stop = out + max;
    for (int i = 0; i < s.n_stop; i++) stop[i] = s.stop[i];
    for (int i = 0; i < m->n_stop; i++) stop[s.n_stop + i] = m->stop[i];
    if (end >= 0) stop[s.n_stop + m->n_stop] = end;
    s.stop = stop;
    s.n_stop += n_own;
    s.token = tt__answer_token;
    s.user = &w;
    const int64_t n = tt__prompt(g, k, text, end, ids, (int64_t)room);
    const int32_t start[2] = {0, (int32_t)n};
    if (n >= g->context)
        status = tt__fail(g->ctx, TT_ERR_ARGUMENT,
                          "the text has %lld tokens, but must have fewer than the generator's context of %d",
                          (long long)n, g->context);
    else if (n < 0 || (k && !tt__answer_begin(&w, g->ctx, k, ids, n))) w.no_memory = true;
    else status = tt_generate(g, ids, start, 1, &s, out, &given);
    if (status == TT_OK && w.stream && !w.no_memory) {
        size_t bytes;
        const char *last = tt_decode_stream_end(w.stream, &bytes);
        tt__answer_text(&w, last, bytes);
    }
    if (w.no_memory)
        status = tt__fail(g->ctx, TT_ERR_MEMORY, "out of memory for the tokens of a text: free memory");
    tt_decode_stream_free(w.stream);
    if (count) *count = given;
    tt__free(g->ctx, w.text);
    tt__free(g->ctx, ids);
    return status;
}
