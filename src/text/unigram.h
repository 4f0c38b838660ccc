#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "types.h"
#include "lookups.h"
#include "encoder.h"

/* ------------------------------------------------------------------------------------- tokenizer: Unigram */

/* An entry for each place between two bytes of a word, and for its start and end. A spelling is a sequence of
   tokens. score, from, id: the best spelling of the bytes before the place. to, next: the token that begins
   at the place in the best spelling of the whole word. */
typedef struct tt__naming {
    double score;
    int32_t from, id;      /* from, id: start and id of the last token of the spelling up to here;
                              from = -1: no spelling yet */
    int32_t to, next;      /* to, next: end and id of the token that begins here */
} tt__naming;

static void tt__naming_try(tt__naming *s, double score, size_t from, int32_t id)
{
    if (s->from >= 0 && !(score > s->score)) return; /* the first of equal scores wins */
    s->score = score;
    s->from = (int32_t)from;
    s->id = id;
}

/* Adds the ids of a run of unknown characters: the token that is the whole run. If the vocabulary lacks this
   token, adds the tokens of the run's bytes; if it lacks a byte's token too, adds one unknown token. */
static void tt__unigram_unknown(tt__encoder *e, const char *text, size_t bytes)
{
    const tt_tokenizer *k = e->k;
    const int id = tt__token_find(&k->vocab.by_word, text, bytes);
    bool fallback = k->model.byte_fallback && id < 0;
    for (size_t i = 0; i < bytes && fallback; i++) fallback = k->model.fallback[(uint8_t)text[i]] >= 0;
    if (!fallback) tt__encoder_id(e, id >= 0 ? id : k->model.unk, text, bytes);
    for (size_t i = 0; i < bytes && fallback; i++)
        tt__encoder_id(e, k->model.fallback[(uint8_t)text[i]], text, bytes);
}

/* Encodes a word with Unigram (Kudo 2018, section 3.2): finds the tokens with the largest sum of scores, by
   Viterbi's algorithm over the bytes of the word. If no token equals the current character, tries the unknown
   token too. */
static void tt__unigram_word(tt__encoder *e, const char *text, size_t bytes)
{
    const tt_tokenizer *k = e->k;
    tt__naming *best = bytes < INT32_MAX
                       ? (tt__naming *)tt__encoder_room(e, TT__HEAP, bytes + 1, sizeof *best) : NULL;
    if (!best) { e->failed = true; return; }
    for (size_t i = 0; i <= bytes; i++) best[i].from = -1;
    best[0].score = 0;
    for (size_t at = 0, next = 0; at < bytes; at = next) {
        const double score = best[at].score;
        int32_t node = 0;
        bool known = false;
        tt__utf8_next(text, bytes, &next);
        for (size_t i = at; i < bytes; i++) {
            node = tt__prefix_next(&k->model.prefixes, node, text[i]);
            if (node < 0) break;
            const int32_t id = k->model.prefixes.ids[node];
            if (id < 0) continue;
            tt__naming_try(&best[i + 1], k->model.scores[id] + score, at, id);
            known |= i + 1 == next;
        }
        if (!known) tt__naming_try(&best[next], k->model.unk_score + score, at, k->model.unk);
    }
    for (int32_t to = (int32_t)bytes; to > 0; to = best[to].from) {
        best[best[to].from].to = to;
        best[best[to].from].next = best[to].id;
    }
    for (size_t at = 0, to; at < bytes && !tt__encoder_done(e); at = to) {
        to = (size_t)best[at].to;
        if (best[at].next != k->model.unk) {
            tt__encoder_id(e, best[at].next, text + at, to - at);
            continue;
        }
        while (to < bytes && best[to].next == k->model.unk) to = (size_t)best[to].to;
        tt__unigram_unknown(e, text + at, to - at);
    }
}
