#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/utf8.h"
#include "../files/json.h"
#include "vocabulary.h"
#include "wordpiece.h"
#include "bpe.h"
#include "merges.h"
#include "unigram.h"
#include "normalize.h"
#include "read.h"

/* ---- the vocabulary */

/* Room for `size` ids in a table. */
static bool tt__bpe_table(tt_context *ctx, tt__ids_by_text *t, const char *base, const tt__slice *slices,
                          size_t size)
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

static void tt__bpe_put(tt__ids_by_text *t, int id)
{
    const char *text = t->base + t->slices[id].start;
    const uint32_t hash = tt__bpe_hash(text, t->slices[id].bytes);
    tt__bucket *slot = tt__bpe_slot(t, text, t->slices[id].bytes, hash);
    slot->hash = hash;
    slot->id = id;
}

/* The id at `node`, in range. */
static tt_status tt__bpe_id(const tt__json *j, int node, const char *what, int *id)
{
    const tt__json_node *at = &j->nodes[node];
    const bool integer = at->kind == TT__JSON_NUMBER_KIND && at->exact;
    if (integer && at->integer >= 0 && at->integer < TT__BPE_IDS) return *id = (int)at->integer, TT_OK;
    return tt__fail(j->ctx, TT_ERR_FORMAT,
                    "'%s', byte %zu: the id of %s is %s; expected an integer from 0 to %d", j->path,
                    j->base + at->offset, what, integer ? "out of range" : tt__json_kind_name(j, node),
                    TT__BPE_IDS - 1);
}

/* The token of a vocabulary at `child`, whose id its place gives in [[token, score], ...], or that is a
   member of {token: id, ...}. */
static tt_status tt__bpe_entry(const tt__bpe *b, const tt__json *j, int child, int place, const char **token,
                               size_t *bytes, int *id)
{
    const tt__json_node *at = &j->nodes[child];
    if (!b->unigram) {
        *token = j->pool + at->key;
        *bytes = at->key_bytes;
        return tt__bpe_id(j, child, "a token of the vocabulary", id);
    }
    const bool pair = at->kind == TT__JSON_ARRAY && at->count == 2;
    *token = pair ? tt__json_bytes(j, child + 1, bytes) : NULL;
    *id = place;
    if (place == TT__BPE_IDS || !*token || j->nodes[j->nodes[child + 1].after].kind != TT__JSON_NUMBER_KIND)
        return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s', byte %zu: token %d of the vocabulary is %s; expected "
                        "at most %d tokens, each an array of a text and its score", j->path,
                        j->base + at->offset, place, tt__json_kind_name(j, child), TT__BPE_IDS);
    return TT_OK;
}

/* Reads {token: id, ...}, or of Unigram [[token, score], ...], and makes room for added tokens of ids below
   `more`, of `added_bytes` with their NULs. */
static tt_status tt__bpe_vocab(tt_tokenizer *k, const tt__json *j, int node, int more, size_t added_bytes)
{
    tt__bpe *b = k->bpe;
    tt_context *ctx = b->ctx;
    size_t bytes = 0, used = 0, count = 0;
    int size = 0, id, place = 0;
    const char *key;
    size_t n;
    if (node < 0 || j->nodes[node].kind != (b->unigram ? TT__JSON_ARRAY : TT__JSON_OBJECT) ||
        !j->nodes[node].count)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' has no vocabulary: expected an %s", j->path,
                        b->unigram ? "array of tokens and their scores" : "object of tokens and their ids");
    for (int child = node + 1; child < j->nodes[node].after; child = j->nodes[child].after) {
        tt_status status = tt__bpe_entry(b, j, child, place++, &key, &n, &id);
        if (status != TT_OK) return status;
        size = (int)tt__max(size, id + 1);
        bytes += n + 1;
        count++;
    }
    b->vocab = size;
    k->size = (int)tt__max(size, more);
    const size_t ids = (size_t)k->size;
    bytes += added_bytes;
    if (!(b->texts = (char *)tt__alloc(ctx, bytes)) || !(b->words_text = (char *)tt__alloc(ctx, bytes)) ||
        !(b->text = (tt__slice *)tt__alloc(ctx, ids * sizeof *b->text)) ||
        !(b->word = (tt__slice *)tt__alloc(ctx, ids * sizeof *b->word)) ||
        !(b->whole = (uint8_t *)tt__calloc(ctx, (size_t)size)) ||
        !(b->added_of = (int32_t *)tt__alloc(ctx, ids * 4)) ||
        !tt__bpe_table(ctx, &b->by_text, b->texts, b->text, count + (size_t)b->n_added) ||
        !tt__bpe_table(ctx, &b->by_word, b->words_text, b->word, count))
        return TT_ERR_MEMORY;
    memset(b->text, 0xFF, ids * sizeof *b->text);
    memset(b->word, 0xFF, ids * sizeof *b->word);
    memset(b->added_of, 0xFF, ids * 4);
    const bool mapped = b->mapped_at < b->n_splitters;
    place = 0;
    for (int child = node + 1; child < j->nodes[node].after; child = j->nodes[child].after) {
        tt_status status = tt__bpe_entry(b, j, child, place++, &key, &n, &id);
        if (status != TT_OK) return status;
        tt__slice slice = {(uint32_t)used, (uint32_t)n};
        if (b->text[id].bytes != TT__BPE_NONE)
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s', byte %zu: two tokens of the vocabulary have the id %d",
                            j->path, j->base + j->nodes[child].offset, id);
        memcpy(b->texts + used, key, n + 1);
        b->text[id] = slice;
        tt__bpe_put(&b->by_text, id);
        size_t at = 0, to = used;
        for (int byte = 0; mapped && at < n && byte >= 0;) {
            byte = tt__char_byte(tt__utf8_next(key, n, &at));
            if (byte < 0) slice.bytes = TT__BPE_NONE; /* no text has it */
            else b->words_text[to++] = (char)byte;
        }
        if (!mapped) memcpy(b->words_text + used, key, n);
        else if (slice.bytes != TT__BPE_NONE) slice.bytes = (uint32_t)(to - used);
        b->word[id] = slice;
        if (slice.bytes != TT__BPE_NONE) {
            tt__bpe_put(&b->by_word, id);
            b->longest = (uint32_t)tt__max(b->longest, slice.bytes);
        }
        used += n + 1;
    }
    for (uint32_t c = 0; c < 256; c++) {
        char text[8];
        n = (size_t)tt__utf8_put(tt__byte_char(c), text);
        b->bytes[c] = mapped ? tt__bpe_find(&b->by_text, text, n) : -1;
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)c);
        b->fallback[c] = tt__bpe_find(&b->by_text, text, 6);
    }
    return TT_OK;
}

/* A number as the JSON reader of `tokenizers` takes it: its digits as an integer, of as many as 64 bits hold,
   by a power of ten. That is not always the nearest double, and which of two spellings is better may hang on
   the last bit. `at`: a number of valid JSON. */
static double tt__unigram_score(const char *at)
{
    const bool negative = *at == '-';
    uint64_t digits = 0;
    int64_t exponent = 0, written = 0;
    bool point = false, full = false;
    char power[8];
    for (at += negative; (*at >= '0' && *at <= '9') || *at == '.'; at++) {
        const uint64_t digit = (uint64_t)(*at - '0');
        if (*at == '.') { point = true; continue; }
        full |= digits > (UINT64_MAX - digit) / 10;
        if (!full) digits = digits * 10 + digit;
        exponent += full ? !point : -(int64_t)point;
    }
    if (*at == 'e' || *at == 'E') {
        const bool below = *++at == '-';
        for (at += below || *at == '+'; *at >= '0' && *at <= '9' && written < 100000; at++)
            written = written * 10 + *at - '0';
        exponent += below ? -written : written;
    }
    double score = (double)digits;
    for (; exponent < -308 && score != 0; exponent += 308) score /= 1e308;
    if (exponent > 308 && score != 0) return HUGE_VAL;
    if (score != 0) {
        snprintf(power, sizeof power, "1e%d", (int)(exponent < 0 ? -exponent : exponent));
        if (exponent >= 0) score *= strtod(power, NULL);
        else score /= strtod(power, NULL);
    }
    return negative ? -score : score;
}

static bool tt__prefixes_grow(tt_context *ctx, tt__prefixes *t) /* room for twice as many edges */
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
            if (t->count == (1 << 28) - 1) /* the last one is an edge that is free */
                return tt__fail(ctx, TT_ERR_UNSUPPORTED, "a vocabulary of more than %d starts of tokens",
                                t->count);
            if (!TT__GROW(ctx, t->ids, t->count, t->capacity) ||
                (t->slots < 2 * ((size_t)t->count + 1) && !tt__prefixes_grow(ctx, t))) return TT_ERR_MEMORY;
            node = t->count++;
            t->ids[node] = -1;
            const uint64_t key = (uint64_t)parent << 8 | (uint8_t)(i ? text[i - 1] : 0);
            if (i) t->edges[tt__prefix_slot(t, key)] = key << 28 | (uint64_t)node;
        }
    }
    if (bytes) t->ids[node] = id; /* of two tokens with the same text the last counts */
    return TT_OK;
}

/* The scores of a vocabulary that has been read from `text`, and the tree of its tokens. */
static tt_status tt__unigram_scores(tt__bpe *b, const tt__json *j, const char *text, int model)
{
    const int node = tt__json_get(j, model, "vocab");
    int id = 0;
    double least = HUGE_VAL;
    if (b->unk >= b->vocab)
        return tt__fail(b->ctx, TT_ERR_FORMAT, "'%s': \"unk_id\" is %d, and the vocabulary has %d tokens",
                        j->path, b->unk, b->vocab);
    b->scores = (double *)tt__alloc(b->ctx, (size_t)b->vocab * sizeof *b->scores);
    if (!b->scores) return TT_ERR_MEMORY;
    for (int child = node + 1; child < j->nodes[node].after; child = j->nodes[child].after, id++) {
        const tt__json_node *number = &j->nodes[j->nodes[child + 1].after];
        b->scores[id] = tt__unigram_score(text + number->offset);
        if (!isfinite(b->scores[id]))
            return tt__fail(b->ctx, TT_ERR_FORMAT, "'%s', byte %zu: the score of token %d is too large for a "
                            "double", j->path, j->base + number->offset, id);
        least = b->scores[id] < least ? b->scores[id] : least;
        tt_status status = tt__prefixes_add(b->ctx, &b->prefixes, b->texts + b->text[id].start,
                                            b->text[id].bytes, id);
        if (status != TT_OK) return status;
    }
    b->unk_score = least - 10; /* Kudo's and Richardson's SentencePiece has this penalty */
    return TT_OK;
}

typedef struct tt__bpe_merging { /* what a merge is read from, for errors, and room for what it makes */
    const char *path;
    size_t offset, count;
    char *joined;
    size_t room;
} tt__bpe_merging;

/* Room for so many merges. */
static tt_status tt__bpe_merges_begin(tt__bpe *b, size_t count, tt__bpe_merging *m)
{
    size_t slots = 64;
    int bits = 6;
    while (slots < 2 * count) slots *= 2, bits++;
    b->merge_shift = 64 - bits;
    b->merge_mask = slots - 1;
    m->count = 0;
    m->room = 0;
    for (int id = 0; id < b->vocab; id++)
        if (b->text[id].bytes != TT__BPE_NONE) m->room = (size_t)tt__max((int64_t)m->room, b->text[id].bytes);
    m->joined = (char *)tt__chunks_take(b->ctx, &b->chunks, m->room + 1);
    b->merges = (tt__bpe_rule *)tt__alloc(b->ctx, slots * sizeof *b->merges);
    if (!m->joined || !b->merges)
        return tt__fail(b->ctx, TT_ERR_MEMORY, "out of memory for the %zu merges of '%s'", count, m->path);
    for (size_t i = 0; i < slots; i++) {
        const tt__bpe_rule none = {UINT64_MAX, UINT32_MAX, -1};
        b->merges[i] = none;
    }
    return TT_OK;
}

/* The next merge, of two tokens into one that the vocabulary has. */
static tt_status tt__bpe_merge_add(tt__bpe *b, tt__bpe_merging *m, const char *left, size_t left_bytes,
                                   const char *right, size_t right_bytes)
{
    const int l = tt__bpe_find(&b->by_text, left, left_bytes);
    const int r = tt__bpe_find(&b->by_text, right, right_bytes);
    int id = -1;
    if (l >= 0 && r >= 0 && left_bytes + right_bytes <= m->room) {
        memcpy(m->joined, left, left_bytes);
        memcpy(m->joined + left_bytes, right, right_bytes);
        id = tt__bpe_find(&b->by_text, m->joined, left_bytes + right_bytes);
    }
    if (id < 0)
        return tt__fail(b->ctx, TT_ERR_FORMAT, "'%s', byte %zu: merge %zu is of '%.100s' and '%.100s'%s",
                        m->path,
                        m->offset, m->count, left, right, l >= 0 && r >= 0
                        ? ", and the vocabulary has not what these make" : ", which are not both tokens");
    tt__bpe_rule *to = &b->merges[tt__bpe_merge(b, l, r) - b->merges];
    to->pair = (uint64_t)(uint32_t)l << 32 | (uint32_t)r;
    to->rank = (uint32_t)m->count++;
    to->id = id;
    /* Is the start of a run of U+2581 in what it makes? */
    for (size_t i = 1; b->cuts && i + 3 <= left_bytes + right_bytes; i++)
        if (memcmp(m->joined + i, "\xE2\x96\x81", 3) == 0 &&
            (i < 3 || memcmp(m->joined + i - 3, "\xE2\x96\x81", 3) != 0)) b->cuts = false;
    return TT_OK;
}

/* [["a", "b"], ...], or ["a b", ...] of older files */
static tt_status tt__bpe_read_merges(tt__bpe *b, const tt__json *j, int model)
{
    tt_status status;
    tt__bpe_merging m = {j->path, 0, 0, NULL, 0};
    int list = tt__json_member(j, model, "merges", true, 1 << TT__JSON_ARRAY, "an array", &status);
    if (status == TT_OK) status = tt__bpe_merges_begin(b, (size_t)j->nodes[list].count, &m);
    if (status != TT_OK) return status;
    for (int child = list + 1; child < j->nodes[list].after; child = j->nodes[child].after) {
        const tt__json_node *at = &j->nodes[child];
        size_t left_bytes = 0, right_bytes = 0;
        const char *left = tt__json_bytes(j, child, &left_bytes), *right = NULL;
        m.offset = j->base + at->offset;
        if (left) {
            char *space = (char *)memchr(left, ' ', left_bytes);
            if (space) {
                right = space + 1;
                right_bytes = left_bytes - (size_t)(right - left);
                left_bytes = (size_t)(space - left);
                *space = 0; /* for errors */
            }
            if (space && memchr(right, ' ', right_bytes)) right = NULL;
        } else if (at->kind == TT__JSON_ARRAY && at->count == 2) {
            left = tt__json_bytes(j, child + 1, &left_bytes);
            right = tt__json_bytes(j, j->nodes[child + 1].after, &right_bytes);
        }
        if (!left || !right)
            return tt__fail(b->ctx, TT_ERR_FORMAT, "'%s', byte %zu: merge %zu is %s; expected two tokens",
                            j->path,
                            m.offset, m.count, tt__json_kind_name(j, child));
        status = tt__bpe_merge_add(b, &m, left, left_bytes, right, right_bytes);
        if (status != TT_OK) return status;
    }
    return TT_OK;
}

static tt_status tt__bpe_read_wordpiece(tt__bpe *b, const tt__json *j, int model, const char *prefix,
                                        const char **unk)
{
    b->word_chars = 100; /* as `tokenizers` has them where a file says nothing */
    if (!*unk) *unk = "[UNK]";
    if (tt__json_get(j, model, "continuing_subword_prefix") < 0) prefix = "##";
    b->piece_bytes = strlen(prefix);
    b->piece = tt__chunks_text(b->ctx, &b->chunks, prefix, b->piece_bytes);
    if (!b->piece) return tt__fail(b->ctx, TT_ERR_MEMORY, "out of memory for the texts of '%s'", j->path);
    return tt__json_read_int(j, model, "max_input_chars_per_word", false, 0, INT32_MAX, &b->word_chars);
}

/* What decides ids beside vocabulary and merges. */
static tt_status tt__bpe_read_model(tt__bpe *b, const tt__json *j, int model, const char **unk)
{
    tt_status status = TT_OK;
    const char *type = "BPE", *prefix = "", *suffix = "";
    float dropout = 0;
    *unk = NULL;
    if (model < 0 || j->nodes[model].kind != TT__JSON_OBJECT)
        return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s' has no \"model\", an object", j->path);
    status = tt__json_read_string(j, model, "type", false, &type);
    b->unigram = status == TT_OK && strcmp(type, "Unigram") == 0;
    if (b->unigram) {
        int64_t id = 0;
        status = tt__json_read_int(j, model, "unk_id", true, 0, TT__BPE_IDS - 1, &id);
        b->unk = (int)id;
        return status == TT_OK ? tt__json_read_bool(j, model, "byte_fallback", &b->byte_fallback) : status;
    }
    /* older files of DistilBERT have no "type" */
    const bool untyped = tt__json_get(j, model, "type") < 0;
    b->wordpiece = untyped ? tt__json_get(j, model, "max_input_chars_per_word") >= 0
                 : status == TT_OK && strcmp(type, "WordPiece") == 0;
    if (status == TT_OK && !b->wordpiece && strcmp(type, "BPE") != 0)
        return tt__bpe_unknown(j, model, "model", type, "BPE, Unigram or WordPiece");
    if (status == TT_OK) status = tt__json_read_string(j, model, "unk_token", false, unk);
    if (status == TT_OK) status = tt__json_read_string(j, model, "continuing_subword_prefix", false, &prefix);
    if (status == TT_OK && b->wordpiece) return tt__bpe_read_wordpiece(b, j, model, prefix, unk);
    if (status == TT_OK) status = tt__json_read_string(j, model, "end_of_word_suffix", false, &suffix);
    if (status == TT_OK) status = tt__json_read_float(j, model, "dropout", 0, 2, &dropout);
    if (status == TT_OK) status = tt__json_read_bool(j, model, "fuse_unk", &b->fuse_unk);
    if (status == TT_OK) status = tt__json_read_bool(j, model, "byte_fallback", &b->byte_fallback);
    if (status == TT_OK) status = tt__json_read_bool(j, model, "ignore_merges", &b->ignore_merges);
    if (status == TT_OK && *prefix)
        return tt__bpe_unknown(j, model, "continuing_subword_prefix", prefix, "none");
    if (status == TT_OK && *suffix) return tt__bpe_unknown(j, model, "end_of_word_suffix", suffix, "none");
    if (status == TT_OK && dropout > 0)
        return tt__bpe_unknown(j, model, "\"dropout\"", "above 0", "null or 0");
    return status;
}

/* ---- added tokens */

/* Notes an added token, an object with "content" and perhaps "id"; `id`: the id, if the object has none. Of
   two of the same text the later counts. */
static tt_status tt__bpe_read_added(tt__bpe *b, const tt__json *j, int node, int id)
{
    tt__added a;
    memset(&a, 0, sizeof a);
    a.id = id;
    tt_status status = tt__bpe_string(b, j, node, "content", &a.text, &a.bytes);
    int number = tt__json_get(j, node, "id");
    if (status == TT_OK && number >= 0) status = tt__bpe_id(j, number, "an added token", &id), a.id = id;
    if (status == TT_OK) status = tt__json_read_bool(j, node, "special", &a.special);
    a.normalized = !a.special;
    if (status == TT_OK) status = tt__json_read_bool(j, node, "normalized", &a.normalized);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "single_word", &a.single_word);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "lstrip", &a.lstrip);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "rstrip", &a.rstrip);
    if (status != TT_OK) return status;
    if (a.bytes > TT__BPE_TOKEN_BYTES)
        return tt__fail(b->ctx, TT_ERR_FORMAT,
                        "'%s', byte %zu: an added token of %zu bytes; at most %d are read",
                        j->path, j->base + j->nodes[node].offset, a.bytes, TT__BPE_TOKEN_BYTES);
    if (!TT__GROW(b->ctx, b->added, b->n_added, b->cap_added)) return TT_ERR_MEMORY;
    b->added[b->n_added++] = a;
    return TT_OK;
}

static tt_status tt__bpe_read_added_list(tt__bpe *b, const tt__json *j, int list)
{
    tt_status status = TT_OK;
    if (list < 0 || j->nodes[list].kind == TT__JSON_NULL) return TT_OK;
    if (j->nodes[list].kind != TT__JSON_ARRAY)
        return tt__json_wrong(j, "added_tokens", list, NULL, "an array");
    for (int child = list + 1; child < j->nodes[list].after && status == TT_OK; child = j->nodes[child].after)
        status = tt__bpe_read_added(b, j, child, -1);
    return status;
}

static tt_status tt__trie_add(tt_context *ctx, tt__trie *t, const char *text, size_t bytes, int32_t added)
{
    int32_t parent = -1, *link = &t->root[(uint8_t)text[0]];
    for (size_t i = 0; i < bytes; i++) {
        int32_t node = i ? t->nodes[parent].child : t->root[(uint8_t)text[0]];
        while (i && node >= 0 && t->nodes[node].byte != (uint8_t)text[i]) node = t->nodes[node].sibling;
        if (node < 0) {
            if (!TT__GROW(ctx, t->nodes, t->count, t->capacity)) return TT_ERR_MEMORY;
            node = t->count++;
            link = i ? &t->nodes[parent].child : &t->root[(uint8_t)text[0]];
            const tt__trie_node fresh = {-1, i ? *link : -1, -1, (uint8_t)text[i]};
            t->nodes[node] = fresh;
            *link = node;
        }
        parent = node;
    }
    t->nodes[parent].added = added;
    return TT_OK;
}

/* Gives the added tokens their ids and makes what they are found by. */
static tt_status tt__bpe_place_added(tt_tokenizer *k, const char *path)
{
    tt__bpe *b = k->bpe;
    size_t used = 0;
    for (int id = 0; id < b->vocab; id++)
        if (b->text[id].bytes != TT__BPE_NONE)
            used = (size_t)tt__max((int64_t)used, (int64_t)b->text[id].start + b->text[id].bytes + 1);
    for (int i = 0; i < b->n_added; i++) {
        tt__added *a = &b->added[i];
        const int there = tt__bpe_find(&b->by_text, a->text, a->bytes);
        if (a->id < 0) a->id = there;
        if (a->id < 0) continue; /* a default that this vocabulary has not */
        if (there >= 0 ? there != a->id : b->text[a->id].bytes != TT__BPE_NONE)
            return tt__fail(b->ctx, TT_ERR_FORMAT, "'%s': the added token '%.200s' has the id %d, which %s",
                            path,
                            a->text, a->id,
                            there >= 0 ? "is another than the vocabulary's" : "another token has");
        if (there < 0) {
            const tt__slice slice = {(uint32_t)used, (uint32_t)a->bytes};
            memcpy(b->texts + used, a->text, a->bytes + 1);
            used += a->bytes + 1;
            b->text[a->id] = slice;
            tt__bpe_put(&b->by_text, a->id);
        }
        b->added_of[a->id] = i;
    }
    memset(b->tries[0].root, 0xFF, sizeof b->tries[0].root);
    memset(b->tries[1].root, 0xFF, sizeof b->tries[1].root);
    for (int i = 0; i < b->n_added; i++) {
        tt__added *a = &b->added[i];
        if (a->id < 0 || b->added_of[a->id] != i) continue;
        a->skipped = a->special;
        if (a->normalized && b->n_normalizers) {
            tt__encoder e;
            memset(&e, 0, sizeof e);
            e.b = b;
            size_t bytes = a->bytes;
            const char *text = tt__bpe_normalize(&e, a->text, &bytes);
            const bool same = !e.failed && bytes == a->bytes && memcmp(text, a->text, bytes) == 0;
            const char *copy = same ? a->text : NULL;
            if (!same && !e.failed) copy = tt__chunks_text(b->ctx, &b->chunks, text, bytes);
            tt__buffer *const buffers[] = {&e.normal[0], &e.normal[1], &e.points, &e.spare};
            for (int n = 0; n < TT__COUNT(buffers); n++) tt__free(b->ctx, buffers[n]->memory);
            if (!copy) return tt__fail(b->ctx, TT_ERR_MEMORY, "out of memory for the tokens of '%s'", path);
            a->skipped &= same;
            a->text = copy;
            a->bytes = bytes;
        }
        if (!a->bytes) continue; /* a normalizer removes all of it */
        tt_status status = tt__trie_add(b->ctx, &b->tries[a->normalized], a->text, a->bytes, i);
        if (status != TT_OK) return status;
    }
    return TT_OK;
}
