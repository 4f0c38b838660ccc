#pragma once
#include "../base/base.h"
#include "../files/json.h"
#include "types.h"
#include "lookups.h"
#include "read.h"

/* ---- ids around a text */

/* Inserts an id at index `at` of a list of ids that are put before or after each text. */
static tt_status tt__add_around(const tt_tokenizer *k, const tt__json *j, int node, tt__around *to, int at,
                                int id)
{
    if (id >= k->size || k->vocab.text[id].bytes == TT__NO_TOKEN)
        return tt__fail(j->ctx, TT_ERR_FORMAT,
                        "'%s', byte %zu: the post_processor adds the id %d, but no token has this id",
                        j->path, j->base + j->nodes[node].offset, id);
    if (to->n == TT__AROUND)
        return tt__unsupported(j, node, "post_processor", "that begins here", "at most 16 ids on each side");
    memmove(to->ids + at + 1, to->ids + at, (size_t)(to->n++ - at) * sizeof *to->ids);
    to->ids[at] = id;
    return TT_OK;
}

/* Reads the template of a post-processor: {"single": [{"SpecialToken": {"id": name}}, {"Sequence": {"id":
   "A"}}, ...], "special_tokens": {name: {"ids": [...]}}}. */
static tt_status tt__read_template(tt_tokenizer *k, const tt__json *j, int node)
{
    tt_status status;
    int list = tt__json_member(j, node, "single", true, 1 << TT__JSON_ARRAY, "an array", &status);
    int sequences = 0, before = 0; /* number of ids before the text */
    tt__finisher *finish = &k->finish;
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
                                "'%.200s'; expected a list of ids", j->path, j->base + j->nodes[child].offset,
                                name);
            for (int at = ids + 1; at < j->nodes[ids].after && status == TT_OK; at = j->nodes[at].after) {
                status = tt__read_id(j, at, name, &id);
                if (status == TT_OK)
                    status = sequences
                           ? tt__add_around(k, j, child, &finish->after, finish->after.n, id)
                           : tt__add_around(k, j, child, &finish->before, before++, id);
            }
        }
    }
    if (status == TT_OK && sequences != 1)
        return tt__unsupported(j, node, "TemplateProcessing", "that begins here",
                               "one Sequence in \"single\"");
    return status;
}

/* Reads member "cls" or "sep", which is [text, id], and notes the token to put before or after each text. If
   the id is null, looks up the token's text. */
static tt_status tt__read_roberta(tt_tokenizer *k, const tt__json *j, int node, const char *key)
{
    int pair = tt__json_get(j, node, key), id = -1;
    const char *text = pair >= 0 && j->nodes[pair].kind == TT__JSON_ARRAY && j->nodes[pair].count == 2
                     ? tt__json_text(j, pair + 1) : NULL;
    if (!text)
        return tt__fail(j->ctx, TT_ERR_FORMAT,
                        "'%s', byte %zu: the post_processor has no \"%s\"; expected a token and its id",
                        j->path, j->base + j->nodes[node].offset, key);
    tt_status status = TT_OK;
    if (j->nodes[pair + 2].kind != TT__JSON_NULL) status = tt__read_id(j, pair + 2, text, &id);
    else if ((id = tt__any_token(k, text, strlen(text))) < 0)
        status = tt__fail(j->ctx, TT_ERR_FORMAT, "'%s' has no token '%.200s', which the post_processor adds",
                          j->path, text);
    if (status != TT_OK) return status;
    if (strcmp(key, "cls") == 0)
        return tt__add_around(k, j, node, &k->finish.before, 0, id);
    return tt__add_around(k, j, node, &k->finish.after, k->finish.after.n, id);
}

static tt_status tt__read_processor(tt_tokenizer *k, const tt__json *j, int node)
{
    tt_status status = TT_OK;
    const char *type = node < 0 ? NULL : tt__read_type(k, j, node, "post_processor", "processors",
                                                       tt__read_processor, &status);
    if (!type || strcmp(type, "ByteLevel") == 0) return status; /* adds no ids */
    if (strcmp(type, "TemplateProcessing") == 0) return tt__read_template(k, j, node);
    if (strcmp(type, "RobertaProcessing") != 0 && strcmp(type, "BertProcessing") != 0)
        return tt__unsupported(j, node, "post_processor", type, "Sequence, ByteLevel, TemplateProcessing, "
                               "RobertaProcessing or BertProcessing");
    status = tt__read_roberta(k, j, node, "cls");
    return status == TT_OK ? tt__read_roberta(k, j, node, "sep") : status;
}
