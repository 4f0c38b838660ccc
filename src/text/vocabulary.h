#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "../files/json.h"
#include "types.h"
#include "lookups.h"
#include "read.h"

/* ---------------------------------------------------------------------------------- tokenizer: vocabulary */

/* The ways in which AutoTokenizer of transformers 5 decides whether a text's first word gets a space before
   it: as tokenizer.json says (FILE), as "add_prefix_space" of tokenizer_config.json says (BYTES), or by the
   pipeline tt__llama_way (LLAMA). */
typedef enum tt__first_word { TT__FIRST_FILE, TT__FIRST_BYTES, TT__FIRST_LLAMA } tt__first_word;

/* Allocates a hash table from texts to ids, with room for `size` ids. */
static bool tt__token_table(tt_context *ctx, tt__ids_by_text *t, const char *base,
                          const tt__text_slice *slices, size_t size)
{
    size_t slots = 64;
    while (slots < size * 2) slots *= 2;
    t->base = base;
    t->slices = slices;
    t->mask = (uint32_t)(slots - 1);
    t->slots = (tt__bucket *)tt__alloc(ctx, slots * sizeof *t->slots);
    if (t->slots) memset(t->slots, 0xFF, slots * sizeof *t->slots);
    return t->slots != NULL;
}

static void tt__token_put(tt__ids_by_text *t, int id)
{
    const char *text = t->base + t->slices[id].start;
    const uint32_t bytes = t->slices[id].bytes - t->skipped;
    const tt__bucket bucket = {tt__token_head(text, bytes, bytes), bytes, id};
    *tt__token_slot(t, text, bytes, bucket.head) = bucket;
    t->longest = bytes > t->longest ? bytes : t->longest;
}

typedef struct tt__recipe { /* the files from which a tokenizer is built */
    const tt__json *j;            /* tokenizer.json, or a substitute without a vocabulary */
    const char *text;             /* the text that was parsed into j */
    const tt__json *way;          /* source of normalizer, splitter and decoder; NULL: `j` is the source */
    tt__first_word first;
    const tt__json *vocab;        /* vocab.json; NULL: the vocabulary is in `j` or in `lines` */
    const tt__file_bytes *lines;  /* vocab.txt; NULL: no such file */
    const tt__file_bytes *merges; /* merges.txt; NULL: the merges are in `j` */
    const char *path;             /* path of vocab.txt or merges.txt */
    const tt__json *config;       /* tokenizer_config.json; NULL or empty: no such file */
} tt__recipe;

typedef struct tt__vocab_reader {
    const tt__recipe *r;
    const tt__json *j;
    int node, child, place;       /* node: the node of the vocabulary; child: the node of the next token;
                                     place: the number of the next token */
    size_t at, offset;            /* at: offset of the next line; offset: offset of the last token in JSON */
} tt__vocab_reader;

/* Reads the next line of vocab.txt, a token without the white space at its end. */
static tt_status tt__next_line(tt_tokenizer *k, tt__vocab_reader *v, const char **token, size_t *bytes)
{
    const char *text = v->r->lines->bytes + v->at;
    const size_t left = v->r->lines->size - v->at;
    const char *newline = (const char *)memchr(text, '\n', left);
    const size_t end = newline ? (size_t)(newline - text) : left;
    v->at += end + 1;
    if ((!tt__is_ascii(text, end) && tt__utf8_invalid(text, end) < end) || memchr(text, 0, end))
        return tt__fail(k->ctx, TT_ERR_FORMAT,
                        "'%s', line %d: the token is not UTF-8 text; expected one token a line", v->r->path,
                        v->place + 1);
    *token = text; /* `tokenizers` too drops white space at a line's end, as in "\r\r\n" */
    *bytes = tt__white_begin(k->unicode->bits, text, 0, end);
    return TT_OK;
}

/* Reads the next token of a vocabulary and its id: a member of {token: id, ...}; or a line, or an element
   [token, score], whose index is the id. Sets *token to NULL after the last token. */
static tt_status tt__read_token(tt_tokenizer *k, tt__vocab_reader *v, const char **token, size_t *bytes,
                                int *id)
{
    const tt__json *j = v->j;
    const int child = v->child;
    *token = NULL;
    *id = v->place;
    if (v->r->lines ? v->at >= v->r->lines->size : child >= j->nodes[v->node].after) return TT_OK;
    if (v->r->lines) {
        const tt_status status = tt__next_line(k, v, token, bytes);
        v->place++;
        return status;
    }
    const tt__json_node *at = &j->nodes[child];
    v->child = at->after;
    v->offset = j->base + at->offset;
    if (k->model.kind != TT__MODEL_UNIGRAM) {
        *token = j->pool + at->key;
        *bytes = at->key_bytes;
        return tt__read_id(j, child, "a token of the vocabulary", id);
    }
    const bool pair = at->kind == TT__JSON_ARRAY && at->count == 2;
    *token = pair ? tt__json_bytes(j, child + 1, bytes) : NULL;
    if (v->place++ < TT__IDS_LIMIT && *token &&
        j->nodes[j->nodes[child + 1].after].kind == TT__JSON_NUMBER_KIND) return TT_OK;
    return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s', byte %zu: token %d of the vocabulary is %s; expected "
                    "at most %d tokens, each an array of a text and its score", j->path,
                    j->base + at->offset, *id, tt__json_kind_name(j, child), TT__IDS_LIMIT);
}

/* Writes the bytes for which a token of byte-level encoding stands, and returns their number. Returns
   TT__NO_TOKEN if the token does not stand for bytes. */
static uint32_t tt__token_bytes(const char *token, size_t n, char *to)
{
    uint32_t made = 0;
    for (size_t at = 0; at < n; made++) {
        const int byte = tt__char_byte(tt__utf8_next(token, n, &at));
        if (byte < 0) return TT__NO_TOKEN;
        to[made] = (char)byte;
    }
    return made;
}

/* Allocates the memory of a vocabulary of `count` tokens and `bytes` bytes, with ids below k->size. */
static bool tt__vocab_room(tt_tokenizer *k, size_t count, size_t bytes)
{
    tt__vocab *v = &k->vocab;
    const size_t ids = (size_t)tt__max(k->size, 1);
    const bool mapped = k->mapped_at < k->split.n;
    v->texts = (char *)tt__alloc(k->ctx, bytes + 1);
    v->words = mapped ? (char *)tt__alloc(k->ctx, bytes + 1) : v->texts;
    v->text = (tt__text_slice *)tt__alloc(k->ctx, ids * sizeof *v->text);
    v->word = mapped ? (tt__text_slice *)tt__alloc(k->ctx, ids * sizeof *v->word) : v->text;
    k->model.whole = (uint8_t *)tt__calloc(k->ctx, ids);
    k->added_of = (int32_t *)tt__alloc(k->ctx, ids * 4);
    if (!v->texts || !v->words || !v->text || !v->word || !k->model.whole || !k->added_of ||
        !tt__token_table(k->ctx, &v->by_text, v->texts, v->text, count) ||
        !tt__token_table(k->ctx, &v->by_added, v->texts, v->text, (size_t)k->n_added) ||
        (mapped && !tt__token_table(k->ctx, &v->by_word, v->words, v->word, count)))
        return false;
    memset(v->text, 0xFF, ids * sizeof *v->text);
    memset(v->word, 0xFF, ids * sizeof *v->word);
    memset(k->added_of, 0xFF, ids * 4);
    return true;
}

/* Reads the vocabulary, and makes room for the added tokens. */
static tt_status tt__read_vocab(tt_tokenizer *k, const tt__recipe *r, const tt__json *j, int node)
{
    const tt__vocab_reader begin = {r, j, node, node + 1, 0, 0, 0};
    tt__vocab_reader reader = begin;
    tt__vocab *v = &k->vocab;
    size_t bytes = 0, count = 0, n = 0;
    const char *key;
    int id;
    tt_status status = tt__read_token(k, &reader, &key, &n, &id);
    for (; key && status == TT_OK; status = tt__read_token(k, &reader, &key, &n, &id), count++) {
        v->own = (int)tt__max(v->own, id + 1);
        bytes += n + 1;
    }
    if (status != TT_OK) return status;
    k->size = v->own;
    for (int i = 0; i < k->n_added; i++) {
        k->size = (int)tt__max(k->size, k->added[i].id + 1);
        bytes += k->added[i].bytes + 1;
    }
    if (!tt__vocab_room(k, count, bytes)) return TT_ERR_MEMORY;
    const bool mapped = v->words != v->texts;
    reader = begin;
    for (; (status = tt__read_token(k, &reader, &key, &n, &id)) == TT_OK && key; v->used += n + 1) {
        const tt__text_slice slice = {(uint32_t)v->used, (uint32_t)n};
        if (v->text[id].bytes != TT__NO_TOKEN)
            return tt__fail(k->ctx, TT_ERR_FORMAT, "'%s', byte %zu: two tokens of the vocabulary have the id "
                            "%d: give each token an id of its own", j->path, reader.offset, id);
        memcpy(v->texts + v->used, key, n);
        v->texts[v->used + n] = 0;
        v->text[id] = slice; /* of tokens with equal text, the last counts */
        tt__token_put(&v->by_text, id);
        if (!mapped) continue;
        v->word[id].start = slice.start;
        v->word[id].bytes = tt__token_bytes(key, n, v->words + v->used);
        if (v->word[id].bytes != TT__NO_TOKEN) tt__token_put(&v->by_word, id);
    }
    if (!mapped) v->by_word = v->by_text;
    return status;
}

static bool tt__prefixes_grow(tt_context *ctx, tt__prefixes *t) /* doubles the slots for edges */
{
    const size_t slots = t->slots ? 2 * t->slots : 1024;
    uint64_t *old = t->edges;
    uint64_t *edges = (uint64_t *)tt__alloc(ctx, slots * sizeof *edges);
    if (!edges) return false;
    memset(edges, 0xFF, slots * sizeof *edges);
    const size_t before = t->slots;
    t->edges = edges;
    t->shift = t->slots ? t->shift - 1 : 64 - 10;
    t->slots = slots;
    for (size_t i = 0; i < before; i++)
        if (old[i] != UINT64_MAX) t->edges[tt__prefix_slot(t, old[i] >> 28)] = old[i];
    tt__free(ctx, old);
    return true;
}

static tt_status tt__prefixes_add(tt_context *ctx, tt__prefixes *t, const char *text, size_t bytes,
                                  int32_t id)
{
    int32_t node = 0;
    for (size_t i = 0; i <= bytes; i++) {
        const int32_t parent = node;
        if (!t->count || (i && (node = tt__prefix_next(t, parent, text[i - 1])) < 0)) {
            if (t->count == (1 << 28) - 1) /* an edge to a later node could be UINT64_MAX, a free entry */
                return tt__fail(ctx, TT_ERR_UNSUPPORTED, "the vocabulary is too large: its tokens have more "
                                "than %d different beginnings: use another tokenizer", t->count);
            if (!TT__GROW(ctx, t->ids, t->count, t->capacity) ||
                (t->slots < 2 * ((size_t)t->count + 1) && !tt__prefixes_grow(ctx, t))) return TT_ERR_MEMORY;
            node = t->count++;
            t->ids[node] = -1;
            const uint64_t key = (uint64_t)parent << 8 | (uint8_t)(i ? text[i - 1] : 0);
            if (i) t->edges[tt__prefix_slot(t, key)] = key << 28 | (uint64_t)node;
        }
    }
    if (bytes) t->ids[node] = id; /* of tokens with equal text, the last counts */
    return TT_OK;
}

/* Fills the hash table of the WordPiece tokens that continue a word. */
static tt_status tt__rest_of_vocab(tt_tokenizer *k)
{
    tt__ids_by_text *t = &k->model.rest;
    const uint32_t piece = (uint32_t)strlen(k->model.piece);
    for (int turn = 0, count = 0; turn < 2; turn++) { /* turn 0 counts the tokens, turn 1 adds them to t */
        if (turn && !tt__token_table(k->ctx, t, k->vocab.texts + piece, k->vocab.text, (size_t)count))
            return TT_ERR_MEMORY;
        t->skipped = piece;
        for (int id = 0; id < k->vocab.own; id++) {
            const tt__text_slice *text = &k->vocab.text[id];
            if (text->bytes == TT__NO_TOKEN || text->bytes <= piece ||
                memcmp(k->vocab.texts + text->start, k->model.piece, piece) != 0) continue;
            count++;
            if (turn) tt__token_put(t, id);
        }
    }
    return TT_OK;
}

/* Makes the prefix tree of all tokens of the vocabulary. */
static tt_status tt__prefixes_of_vocab(tt_tokenizer *k)
{
    tt_status status = tt__prefixes_add(k->ctx, &k->model.prefixes, "", 0, -1); /* the root */
    for (int id = 0; id < k->vocab.own && status == TT_OK; id++) {
        const tt__text_slice *text = &k->vocab.text[id];
        const char *from = k->vocab.texts + text->start;
        if (text->bytes != TT__NO_TOKEN)
            status = tt__prefixes_add(k->ctx, &k->model.prefixes, from, text->bytes, id);
    }
    return status;
}
