#pragma once
#include "../base/base.h"
#include "../files/json.h"
#include "types.h"
#include "lookups.h"
#include "read.h"

/* ---- ids around texts */

/* Inserts an id with a token type at index `at` of a list of ids that are put around texts. */
static tt_status tt__add_around(const tt_tokenizer *k, const tt__json *j, int node, tt__around *to, int at,
                                int id, int type)
{
    if (id >= k->size || k->vocab.text[id].bytes == TT__NO_TOKEN)
        return tt__fail(j->ctx, TT_ERR_FORMAT,
                        "'%s', byte %zu: the post_processor adds the id %d, but no token has this id",
                        j->path, j->base + j->nodes[node].offset, id);
    if (to->n == TT__AROUND)
        return tt__unsupported(j, node, "post_processor", "that begins here", "at most 16 ids on each side");
    memmove(to->ids + at + 1, to->ids + at, (size_t)(to->n - at) * sizeof *to->ids);
    memmove(to->types + at + 1, to->types + at, (size_t)(to->n++ - at) * sizeof *to->types);
    to->ids[at] = id;
    to->types[at] = type;
    return TT_OK;
}

/* Reads a list of a template, [{"SpecialToken": {"id": name, "type_id": n}}, {"Sequence": {"id": "A",
   "type_id": n}}, ...]: sets the types of the texts "A" and "B" and adds the ids around them to `to`. Writes
   the letters of the texts, in their order, and a NUL to `order`, which has space for `room` characters. */
static tt_status tt__read_pieces(const tt_tokenizer *k, const tt__json *j, int node, int list,
                                 tt__template *to, char *order, int room)
{
    tt_status status = TT_OK;
    int texts = 0, before = 0; /* before: number of ids before the first text */
    for (int child = list + 1; child < j->nodes[list].after && status == TT_OK;
         child = j->nodes[child].after) {
        const int text = tt__json_get(j, child, "Sequence"), token = tt__json_get(j, child, "SpecialToken");
        const char *name = tt__json_text(j, tt__json_get(j, token, "id")), *letter;
        int64_t type = 0;
        if (text < 0 && !name)
            return tt__json_wrong(j, "single", child, NULL, "SpecialToken or Sequence");
        status = tt__json_read_int(j, text < 0 ? token : text, "type_id", false, 0, UINT8_MAX, &type);
        if (text >= 0) {
            letter = tt__json_text(j, tt__json_get(j, text, "id"));
            if (texts < 2) to->types[texts] = (int32_t)type;
            if (texts < room - 1) order[texts++] = letter ? *letter : 'A';
            continue;
        }
        const int tokens = tt__json_get(j, tt__json_get(j, node, "special_tokens"), name);
        const int ids = tt__json_get(j, tokens, "ids");
        if (ids < 0 || j->nodes[ids].kind != TT__JSON_ARRAY)
            return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s', byte %zu: \"special_tokens\" has no \"ids\" of "
                            "'%.200s'; expected a list of ids", j->path,
                            j->base + j->nodes[child].offset, name);
        tt__around *around = &to->around[tt__min(texts, 2)];
        for (int at = ids + 1, id; at < j->nodes[ids].after && status == TT_OK; at = j->nodes[at].after) {
            status = tt__read_id(j, at, name, &id);
            if (status == TT_OK)
                status = tt__add_around(k, j, child, around, texts ? around->n : before++, id, (int)type);
        }
    }
    order[texts] = 0;
    return status;
}

/* Reads a post-processor of type TemplateProcessing: {"single": [...], "pair": [...], "special_tokens":
   {name: {"ids": [...]}}}; see tt__read_pieces. */
static tt_status tt__read_template(tt_tokenizer *k, const tt__json *j, int node)
{
    tt_status status;
    char order[4];
    int list = tt__json_member(j, node, "single", true, 1 << TT__JSON_ARRAY, "an array", &status);
    if (status == TT_OK) status = tt__read_pieces(k, j, node, list, &k->finish.one, order, TT__COUNT(order));
    if (status == TT_OK && strlen(order) != 1)
        return tt__unsupported(j, node, "TemplateProcessing", "that begins here",
                               "one Sequence in \"single\"");
    if (status == TT_OK)
        list = tt__json_member(j, node, "pair", false, 1 << TT__JSON_ARRAY, "an array", &status);
    if (status == TT_OK && list >= 0)
        status = tt__read_pieces(k, j, node, list, &k->finish.two, order, TT__COUNT(order));
    k->finish.pairs &= list >= 0 && strcmp(order, "AB") == 0;
    return status;
}

/* Reads member "cls" or "sep", which is [text, id], into *id. If the id is null, looks up the token's
   text. */
static tt_status tt__read_cls(tt_tokenizer *k, const tt__json *j, int node, const char *key, int *id)
{
    int pair = tt__json_get(j, node, key);
    const char *text = pair >= 0 && j->nodes[pair].kind == TT__JSON_ARRAY && j->nodes[pair].count == 2
                     ? tt__json_text(j, pair + 1) : NULL;
    if (!text)
        return tt__fail(j->ctx, TT_ERR_FORMAT,
                        "'%s', byte %zu: the post_processor has no \"%s\"; expected a token and its id",
                        j->path, j->base + j->nodes[node].offset, key);
    if (j->nodes[pair + 2].kind != TT__JSON_NULL) return tt__read_id(j, pair + 2, text, id);
    if ((*id = tt__any_token(k, text, strlen(text))) >= 0) return TT_OK;
    return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s' has no token '%.200s', which the post_processor adds",
                    j->path, text);
}

/* Reads a post-processor of type BertProcessing, [CLS] A [SEP] B [SEP] with type 1 from B on, or
   RobertaProcessing, <s> A </s></s> B </s> without types. */
static tt_status tt__read_bert_processing(tt_tokenizer *k, const tt__json *j, int node, bool roberta)
{
    tt__template *one = &k->finish.one, *two = &k->finish.two;
    const int second = !roberta;
    int cls = 0, sep = 0;
    tt_status status = tt__read_cls(k, j, node, "cls", &cls);
    if (status == TT_OK) status = tt__read_cls(k, j, node, "sep", &sep);
    const struct { tt__around *to; int id, at, type; } ids[] = {
        {&one->around[0], cls, 0, 0}, {&one->around[1], sep, one->around[1].n, 0},
        {&two->around[0], cls, 0, 0}, {&two->around[1], sep, 0, 0}, {&two->around[2], sep, 0, second},
        {&two->around[1], sep, 0, 0}}; /* the last row is only for RoBERTa */
    for (int i = 0; i < TT__COUNT(ids) - second && status == TT_OK; i++)
        status = tt__add_around(k, j, node, ids[i].to, ids[i].at, ids[i].id, ids[i].type);
    two->types[1] = second;
    return status;
}

/* Reads whether a post-processor ByteLevel or RobertaProcessing leaves white space out of spans. */
static tt_status tt__read_trim(tt_tokenizer *k, const tt__json *j, int node)
{
    bool trim = true, prefix = true;
    tt_status status = tt__json_read_bool(j, node, "trim_offsets", &trim);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "add_prefix_space", &prefix);
    if (status != TT_OK || !trim) return status;
    if (k->finish.trims == TT__STEP_LIMIT)
        return tt__unsupported(j, node, "post_processor", "with trim_offsets", "at most 16 of them");
    k->finish.trims_prefix[k->finish.trims++] = prefix;
    return TT_OK;
}

static tt_status tt__read_processor(tt_tokenizer *k, const tt__json *j, int node)
{
    tt_status status = TT_OK;
    const char *type = node < 0 ? NULL : tt__read_type(k, j, node, "post_processor", "processors",
                                                       tt__read_processor, &status);
    if (!type) return status;
    const bool bytes = strcmp(type, "ByteLevel") == 0;
    if (bytes || strcmp(type, "RobertaProcessing") == 0) status = tt__read_trim(k, j, node);
    if (bytes || status != TT_OK) return status; /* ByteLevel adds no ids */
    if (k->finish.templates++) k->finish.pairs = false; /* a pair has no defined result with two templates */
    if (strcmp(type, "TemplateProcessing") == 0) return tt__read_template(k, j, node);
    const bool roberta = strcmp(type, "RobertaProcessing") == 0;
    if (roberta || strcmp(type, "BertProcessing") == 0) return tt__read_bert_processing(k, j, node, roberta);
    return tt__unsupported(j, node, "post_processor", type, "Sequence, ByteLevel, TemplateProcessing, "
                           "RobertaProcessing or BertProcessing");
}
