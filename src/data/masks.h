#pragma once
#include "../base/base.h"
#include "../text/types.h"
#include "dealer.h"

/* ------------------------------------------------------------------------------------------- masked tokens
   Chooses the tokens that a model of TT_TASK_MASKED_LM predicts, and masks them (Devlin et al., "BERT:
   pre-training of deep bidirectional transformers", 2019, section 3.1). */

/* The kind of a token of the vocabulary. */
enum {
    TT__MASK_BEGINS,    /* the token begins a word, or is a word */
    TT__MASK_CONTINUES, /* the token continues a word after another token */
    TT__MASK_NEVER      /* the token is special, or stands for no text: the token is never chosen */
};

/* Returns whether a token of the vocabulary continues a word. WordPiece marks such tokens; other models mark
   tokens that begin with white space instead, by U+2581 or, in byte-level encoding, by characters that stand
   for the bytes 0 to 32. */
static bool tt__mask_continues(const tt_tokenizer *k, const char *token)
{
    const unsigned char *c = (const unsigned char *)token;
    if (k->model.kind == TT__MODEL_WORDPIECE)
        return *k->model.piece && strncmp(token, k->model.piece, strlen(k->model.piece)) == 0;
    const bool mark = c[0] == 0xE2 && c[1] == 0x96 && c[2] == 0x81;
    const bool white = c[0] <= ' ' || (c[0] == 0xC4 && c[1] >= 0x80 && c[1] <= 0xA0); /* U+0100 to U+0120 */
    return !mark && !white;
}

/* Returns the kind of each token of the vocabulary, which the caller frees. Returns NULL if memory runs
   out. */
static uint8_t *tt__mask_kinds(tt_context *ctx, const tt_tokenizer *k)
{
    uint8_t *kinds = (uint8_t *)tt__alloc(ctx, (size_t)k->size);
    for (int id = 0; id < k->size && kinds; id++) {
        const char *token = tt_tokenizer_token(k, id);
        const int added = k->added_of[id];
        const bool special = added >= 0 && k->added[added].special;
        kinds[id] = !token || special ? TT__MASK_NEVER
                    : tt__mask_continues(k, token) ? TT__MASK_CONTINUES : TT__MASK_BEGINS;
    }
    for (int role = 0; role < TT_TOKEN_COUNT && kinds; role++) {
        const int id = tt_tokenizer_special(k, (tt_special_token)role);
        if (id >= 0) kinds[id] = TT__MASK_NEVER;
    }
    return kinds;
}

/* A word of a text, or with whole_words = false a token: the places [begin, end) of the text's tokens. Words
   are chosen in the order of `draw`. */
typedef struct tt__mask_word { uint32_t draw; int begin, end; } tt__mask_word;

static int tt__mask_order(const void *a, const void *b)
{
    const tt__mask_word *x = (const tt__mask_word *)a, *y = (const tt__mask_word *)b;
    return x->draw != y->draw ? (x->draw > y->draw) - (x->draw < y->draw) : x->begin - y->begin;
}

/* Sets u to the random numbers of a place of a text: u[0] orders words, u[1] decides what becomes of a chosen
   token, u[2] and u[3] choose a token of the vocabulary. */
static void tt__mask_draw(uint64_t key, int place, uint32_t u[4])
{
    const uint32_t counter[4] = {(uint32_t)place, 0, 0, 0};
    tt__philox(counter, key, u);
}

/* Lists the words of a text in random order in l->mask_words. ids: (n) the text's tokens. Returns the number
   of words, and sets *tokens to the number of their tokens. */
static int tt__mask_words(const tt_loader *l, uint64_t key, const int32_t *ids, int n, int *tokens)
{
    tt__mask_word *words = l->mask_words;
    int count = 0;
    *tokens = 0;
    for (int i = 0; i < n; i++) {
        uint32_t u[4];
        const int kind = l->mask_kinds[ids[i]];
        if (kind == TT__MASK_NEVER) continue;
        ++*tokens;
        if (l->o.whole_words && kind == TT__MASK_CONTINUES && count && words[count - 1].end == i) {
            words[count - 1].end = i + 1;
            continue;
        }
        tt__mask_draw(key, i, u);
        words[count].draw = u[0];
        words[count].begin = i;
        words[count++].end = i + 1;
    }
    qsort(words, (size_t)count, sizeof *words, tt__mask_order);
    return count;
}

/* Masks tokens of the text with index `text`, whose n tokens begin at row `first` of the micro-batch. */
static void tt__mask_text(tt_loader *l, uint32_t text, int first, int n)
{
    int32_t *ids = l->ids + first;
    const uint64_t key = tt__stream_key(l->ctx->options.seed, TT__RANDOM_MASK, (uint64_t)l->deal.epoch, text);
    const int32_t mask = tt_tokenizer_special(l->k, TT_TOKEN_MASK);
    int tokens, taken = 0;
    const int count = tt__mask_words(l, key, ids, n, &tokens);
    const int want = (int)tt__max(1, (int64_t)((double)l->o.mask_rate * tokens + 0.5));
    for (int i = 0; i < n; i++) l->mask_chosen[i] = 0;
    for (int w = 0; w < count; w++) {
        const tt__mask_word *word = &l->mask_words[w];
        if (word->end - word->begin > want - taken) continue;
        for (int i = word->begin; i < word->end; i++) l->mask_chosen[i] = 1;
        taken += word->end - word->begin;
    }
    for (int i = 0; i < n; i++) {
        uint32_t u[4];
        if (!l->mask_chosen[i]) continue;
        tt__mask_draw(key, i, u);
        const float share = tt__uniform(u[1]);
        l->masked[l->n_masked] = first + i;
        l->targets[l->n_masked++] = ids[i];
        if (share < 0.8f) ids[i] = mask;
        else if (share < 0.9f) ids[i] = (int32_t)(((uint64_t)u[3] << 32 | u[2]) % (uint64_t)l->k->size);
    }
}

/* Sets the arrays "masked" and "targets" of a micro-batch. */
static void tt__mask_arrays(tt_loader *l, tt_batch *batch)
{
    if (!l->n_masked) {
        l->masked[l->n_masked] = 0;
        l->targets[l->n_masked++] = -100;
    }
    const tt_array arrays[] = {{"masked", l->masked, l->n_masked}, {"targets", l->targets, l->n_masked}};
    memcpy(l->arrays, arrays, sizeof arrays);
    batch->arrays = l->arrays;
    batch->n_arrays = TT__COUNT(arrays);
}

/* Allocates the memory of a loader that masks tokens, whose max_tokens and max_seqs are set. In a text of n
   tokens, at most `mask_rate * n + 1` tokens are chosen. */
static bool tt__mask_allocate(tt_loader *l)
{
    const size_t length = (size_t)l->o.max_length;
    const int64_t most = (int64_t)((double)l->o.mask_rate * l->max_tokens) + l->deal.max_seqs;
    l->max_masked = (int)tt__min(most, l->max_tokens);
    return (l->mask_kinds = tt__mask_kinds(l->ctx, l->k)) &&
           (l->mask_words = (tt__mask_word *)tt__alloc(l->ctx, length * sizeof *l->mask_words)) &&
           (l->mask_chosen = (uint8_t *)tt__alloc(l->ctx, length)) &&
           (l->masked = (int32_t *)tt__alloc(l->ctx, (size_t)l->max_masked * 4)) &&
           (l->targets = (int32_t *)tt__alloc(l->ctx, (size_t)l->max_masked * 4));
}
