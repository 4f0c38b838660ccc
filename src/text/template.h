#pragma once
#include "../base/base.h"
#include "../files/json.h"
#include "parts.h"
#include "lookups.h"
#include "read.h"

/* ---- ids around a text */

static tt_status tt__add_around(const tt_tokenizer *k, const tt__json *j, int node, int32_t *ids, int *n,
                                int id,
                                bool front)
{
    if (id >= k->size || k->vocab.text[id].bytes == TT__NO_TOKEN)
        return tt__fail(j->ctx, TT_ERR_FORMAT,
                        "'%s', byte %zu: the post_processor adds the id %d, which no token "
                        "has", j->path, j->base + j->nodes[node].offset, id);
    if (*n == TT__AROUND)
        return tt__unsupported(j, node, "post_processor", "that begins here", "at most 16 ids on each side");
    if (front) memmove(ids + 1, ids, (size_t)*n * sizeof *ids);
    ids[front ? 0 : *n] = id;
    (*n)++;
    return TT_OK;
}

/* {"single": [{"SpecialToken": {"id": name}}, {"Sequence": {"id": "A"}}, ...], "special_tokens": {name:
   {"ids": [...]}}} */
static tt_status tt__read_template(tt_tokenizer *k, const tt__json *j, int node)
{
    tt_status status;
    int list = tt__json_member(j, node, "single", true, 1 << TT__JSON_ARRAY, "an array", &status);
    int sequences = 0;
    int32_t before[TT__AROUND], behind[TT__AROUND];
    int n_before = 0, n_behind = 0;
    for (int child = list + 1; list >= 0 && child < j->nodes[list].after && status == TT_OK;
         child = j->nodes[child].after) {
        const char *name = tt__json_text(j, tt__json_get(j, tt__json_get(j, child, "SpecialToken"), "id"));
        if (tt__json_get(j, child, "Sequence") >= 0) sequences++;
        else if (!name) return tt__json_wrong(j, "single", child, NULL, "SpecialToken or Sequence");
        else {
            int token = tt__json_get(j, tt__json_get(j, node, "special_tokens"), name);
            int ids = tt__json_get(j, token, "ids"), id;
            if (ids < 0 || j->nodes[ids].kind != TT__JSON_ARRAY)
                return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s', byte %zu: \"special_tokens\" has no \"ids\" of "
                                "'%.200s'", j->path, j->base + j->nodes[child].offset, name);
            for (int at = ids + 1; at < j->nodes[ids].after && status == TT_OK; at = j->nodes[at].after) {
                status = tt__read_id(j, at, name, &id);
                if (status == TT_OK && !sequences)
                    status = tt__add_around(k, j, child, before, &n_before, id, false);
                else if (status == TT_OK) status = tt__add_around(k, j, child, behind, &n_behind, id, false);
            }
        }
    }
    if (status == TT_OK && sequences != 1)
        return tt__unsupported(j, node, "TemplateProcessing", "that begins here",
                               "one Sequence in \"single\"");
    while (n_before && status == TT_OK)
        status = tt__add_around(k, j, node, k->finish.before, &k->finish.n_before, before[--n_before], true);
    for (int i = 0; i < n_behind && status == TT_OK; i++)
        status = tt__add_around(k, j, node, k->finish.behind, &k->finish.n_behind, behind[i], false);
    return status;
}

/* The token of "cls" or "sep", [text, id], around a text. An id that is null is looked up. */
static tt_status tt__read_roberta(tt_tokenizer *k, const tt__json *j, int node, const char *key)
{
    int pair = tt__json_get(j, node, key), id = -1;
    const char *text = pair >= 0 && j->nodes[pair].kind == TT__JSON_ARRAY && j->nodes[pair].count == 2
                     ? tt__json_text(j, pair + 1) : NULL;
    if (!text)
        return tt__fail(j->ctx, TT_ERR_FORMAT,
                        "'%s', byte %zu: the post_processor needs \"%s\", a token and its "
                        "id", j->path, j->base + j->nodes[node].offset, key);
    tt_status status = TT_OK;
    if (j->nodes[pair + 2].kind != TT__JSON_NULL) status = tt__read_id(j, pair + 2, text, &id);
    else if ((id = tt__any_token(k, text, strlen(text))) < 0)
        status = tt__fail(j->ctx, TT_ERR_FORMAT, "'%s' has no token '%.200s'", j->path, text);
    if (status != TT_OK) return status;
    if (strcmp(key, "cls") == 0)
        return tt__add_around(k, j, node, k->finish.before, &k->finish.n_before, id, true);
    return tt__add_around(k, j, node, k->finish.behind, &k->finish.n_behind, id, false);
}

static tt_status tt__read_processor(tt_tokenizer *k, const tt__json *j, int node)
{
    tt_status status;
    if (node < 0 || j->nodes[node].kind == TT__JSON_NULL) return TT_OK;
    const char *type = tt__component_type(j, node, "post_processor");
    if (!type) return j->ctx->status;
    if (strcmp(type, "ByteLevel") == 0) return TT_OK; /* of offsets */
    if (strcmp(type, "TemplateProcessing") == 0) return tt__read_template(k, j, node);
    if (strcmp(type, "RobertaProcessing") == 0 || strcmp(type, "BertProcessing") == 0) {
        status = tt__read_roberta(k, j, node, "cls");
        return status == TT_OK ? tt__read_roberta(k, j, node, "sep") : status;
    }
    if (strcmp(type, "Sequence") != 0)
        return tt__unsupported(j, node, "post_processor", type, "Sequence, ByteLevel, TemplateProcessing, "
                               "RobertaProcessing or BertProcessing");
    int list = tt__json_member(j, node, "processors", true, 1 << TT__JSON_ARRAY, "an array", &status);
    for (int child = list + 1; list >= 0 && child < j->nodes[list].after && status == TT_OK;
         child = j->nodes[child].after)
        status = tt__read_processor(k, j, child);
    return status;
}
