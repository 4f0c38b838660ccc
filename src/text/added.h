#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "types.h"
#include "lookups.h"
#include "encoder.h"
#include "normalize.h"
#include "read.h"
#include "vocabulary.h"

/* -------------------------------------------------------------------------------- tokenizer: added tokens */

/* Reads an added token from the JSON object at `node`, which has "content" and may have "id"; without "id",
   the token gets the argument `id`. If several added tokens have the same text, the last
   counts. */
static tt_status tt__read_added(tt_tokenizer *k, const tt__json *j, int node, int id)
{
    tt__added a;
    memset(&a, 0, sizeof a);
    a.id = id;
    tt_status status = tt__read_text(k, j, node, "content", &a.text, &a.bytes);
    int number = tt__json_get(j, node, "id");
    if (status == TT_OK && number >= 0) status = tt__read_id(j, number, "an added token", &id), a.id = id;
    if (status == TT_OK) status = tt__json_read_bool(j, node, "special", &a.special);
    a.normalized = !a.special;
    if (status == TT_OK) status = tt__json_read_bool(j, node, "normalized", &a.normalized);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "single_word", &a.single_word);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "lstrip", &a.lstrip);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "rstrip", &a.rstrip);
    if (status != TT_OK) return status;
    if (a.bytes > TT__ADDED_BYTES)
        return tt__fail(k->ctx, TT_ERR_FORMAT,
                        "'%s', byte %zu: an added token has %zu bytes, but at most %d are possible", j->path,
                        j->base + j->nodes[node].offset, a.bytes, TT__ADDED_BYTES);
    if (!TT__GROW(k->ctx, k->added, k->n_added, k->cap_added)) return TT_ERR_MEMORY;
    k->added[k->n_added++] = a;
    return TT_OK;
}

static tt_status tt__read_added_list(tt_tokenizer *k, const tt__json *j, int list)
{
    tt_status status = TT_OK;
    if (list < 0 || j->nodes[list].kind == TT__JSON_NULL) return TT_OK;
    if (j->nodes[list].kind != TT__JSON_ARRAY)
        return tt__json_wrong(j, "added_tokens", list, NULL, "an array");
    for (int child = list + 1; child < j->nodes[list].after && status == TT_OK; child = j->nodes[child].after)
        status = tt__read_added(k, j, child, -1);
    return status;
}

/* Normalizes the text of an added token, because the token is searched for in normalized texts. */
static tt_status tt__normalize_added(tt_tokenizer *k, tt__added *a, const char *path)
{
    tt__encoder e;
    tt__encoder_init(&e, k);
    size_t bytes = a->bytes;
    const char *text = tt__normalize_text(&e, a->text, &bytes);
    const bool same = !e.failed && bytes == a->bytes && memcmp(text, a->text, bytes) == 0;
    const char *copy = same ? a->text : e.failed ? NULL : tt__chunks_text(k->ctx, &k->chunks, text, bytes);
    tt__encoder_free(&e);
    if (!copy)
        return tt__fail(k->ctx, TT_ERR_MEMORY, "out of memory for the tokens of '%s': free memory", path);
    a->skipped &= same;
    a->text = copy;
    a->bytes = bytes;
    return TT_OK;
}

/* Gives the added tokens their ids, and fills the tables in which added tokens are looked up. */
static tt_status tt__place_added(tt_tokenizer *k, const char *path)
{
    tt__vocab *v = &k->vocab;
    tt_status status = TT_OK;
    for (int i = 0; i < k->n_added; i++) {
        tt__added *a = &k->added[i];
        const int there = tt__any_token(k, a->text, a->bytes);
        if (a->id < 0) a->id = there;
        if (a->id < 0) continue; /* a default token that the vocabulary lacks */
        if (there >= 0 ? there != a->id : v->text[a->id].bytes != TT__NO_TOKEN)
            return tt__fail(k->ctx, TT_ERR_FORMAT, "'%s': the added token '%.200s' has the id %d, %s", path,
                            a->text, a->id, there >= 0 ? "but another id in the vocabulary: correct one of "
                            "them" : "which another token has too: give it another id");
        if (there < 0) {
            const tt__text_slice slice = {(uint32_t)v->used, (uint32_t)a->bytes};
            memcpy(v->texts + v->used, a->text, a->bytes + 1);
            v->used += a->bytes + 1;
            v->text[a->id] = slice;
            tt__token_put(&v->by_added, a->id);
        }
        k->added_of[a->id] = i;
    }
    for (int i = 0; i < k->n_added && status == TT_OK; i++) {
        tt__added *a = &k->added[i];
        if (a->id < 0 || k->added_of[a->id] != i) continue;
        a->skipped = a->special;
        if (a->normalized && k->normalize.n) status = tt__normalize_added(k, a, path);
        if (status != TT_OK || !a->bytes) continue; /* normalization has removed the token's whole text */
        tt__added_tree *t = &k->trees[a->normalized];
        const uint8_t byte = (uint8_t)a->text[0];
        t->first = t->prefixes.count && t->first != byte ? -1 : byte;
        t->begins[byte] = true;
        status = tt__prefixes_add(k->ctx, &t->prefixes, a->text, a->bytes, i);
    }
    return status;
}
