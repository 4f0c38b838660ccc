#pragma once
#include "../base/base.h"
#include "unicode.h"
#include "../files/json.h"
#include "types.h"
#include "normalize.h"
#include "decode.h"
#include "read.h"
#include "template.h"
#include "vocabulary.h"
#include "read_models.h"
#include "added.h"

/* ------------------------------------------------------------------------------------ tokenizer: building */

/* Returns whether tokenizer_config.json says "add_prefix_space". */
static bool tt__prefix_given(const tt__json *config)
{
    const int node = config->count ? tt__json_get(config, 0, "add_prefix_space") : -1;
    return node >= 0 && config->nodes[node].kind != TT__JSON_NULL;
}

/* Applies "add_prefix_space" of tokenizer_config.json and, for LlamaTokenizer, "legacy" of the same file. */
static tt_status tt__read_prefixes(tt_tokenizer *k, tt__first_word first, const tt__json *config)
{
    const bool llama = first == TT__FIRST_LLAMA;
    bool prefix = llama, legacy = false;
    tt_status status = TT_OK;
    if (config->count) status = tt__json_read_bool(config, 0, "add_prefix_space", &prefix);
    if (config->count && status == TT_OK) status = tt__json_read_bool(config, 0, "legacy", &legacy);
    const bool given = tt__prefix_given(config);
    for (int i = 0; i < k->split.n; i++) {
        tt__text_step *s = &k->split.all[i];
        if (s->kind == TT__STEP_BYTES && first == TT__FIRST_BYTES && given) s->prefix_space = prefix;
        if (!llama) continue;
        s->prefix_always = prefix && legacy; /* puts U+2581 before each part of the text between added
                                                tokens */
        s->prefix_first = prefix && !legacy;
    }
    if (llama && !prefix) k->finish.decode.n--; /* removes the step that strips the prefix */
    return status;
}

/* Reads the added tokens of tokenizer_config.json: {id: {"content": ...}, ...}. */
static tt_status tt__read_added_decoder(tt_tokenizer *k, const tt__json *config)
{
    const int list = config->count ? tt__json_get(config, 0, "added_tokens_decoder") : -1;
    tt_status status = TT_OK;
    if (list < 0 || config->nodes[list].kind != TT__JSON_OBJECT) return TT_OK;
    for (int child = list + 1; child < config->nodes[list].after && status == TT_OK;
         child = config->nodes[child].after) {
        char *end;
        const char *key = config->pool + config->nodes[child].key;
        const long id = strtol(key, &end, 10);
        if (*end || end == key || id < 0 || id >= TT__IDS_LIMIT)
            return tt__unsupported(config, child, "id", key, "numbers as keys of added_tokens_decoder");
        status = tt__read_added(k, config, child, (int)id);
    }
    return status;
}

/* BERT's special tokens. In a text, the spelling of a special token becomes that token. A vocab.txt must have
   the first three tokens. */
static const struct { const char *text; tt_special_token role; } tt__bert_tokens[] = {
    {"[UNK]", TT_TOKEN_UNK}, {"[CLS]", TT_TOKEN_CLS}, {"[SEP]", TT_TOKEN_SEP}, {"[PAD]", TT_TOKEN_PAD},
    {"[MASK]", TT_TOKEN_MASK}};

static void tt__roles_of_bert(tt_tokenizer *k)
{
    for (int i = 0; i < TT__COUNT(tt__bert_tokens); i++) {
        int32_t *role = &k->finish.roles[tt__bert_tokens[i].role];
        if (*role < 0) *role = tt_tokenizer_find(k, tt__bert_tokens[i].text);
    }
}

static tt_status tt__build_tokenizer(tt_tokenizer *k, const tt__recipe *recipe)
{
    tt__recipe r = *recipe;
    const tt__json *j = r.j;
    const char *unk;
    if (j->nodes[0].kind != TT__JSON_OBJECT)
        return tt__fail(k->ctx, TT_ERR_FORMAT, "'%s' is %s; expected a JSON object", j->path,
                        tt__json_kind_name(j, 0));
    const int model = tt__json_get(j, 0, "model");
    tt_status status = tt__read_model(k, j, model, &unk);
    if (r.way && k->model.kind != TT__MODEL_BPE) /* tt__llama_way is for byte-pair encoding only */
        r.way = NULL, r.first = TT__FIRST_FILE;
    if (r.way && status == TT_OK) status = tt__read_model(k, r.way, tt__json_get(r.way, 0, "model"), &unk);
    const tt__json *way = r.way ? r.way : j;
    const struct { const tt__json *from; const char *key; tt__reader read; } parts[] = {
        {way, "normalizer", tt__read_normalizer}, {way, "pre_tokenizer", tt__read_splitter},
        {way, "decoder", tt__read_decoder}, {j, "added_tokens", tt__read_added_list}};
    k->mapped_at = INT_MAX;
    for (int i = 0; i < TT__COUNT(parts) && status == TT_OK; i++) {
        const int node = tt__json_get(parts[i].from, 0, parts[i].key);
        if (node >= 0) status = parts[i].read(k, parts[i].from, node);
    }
    k->mapped_at = (int)tt__min(k->mapped_at, k->split.n);
    tt__normalize_ascii_by(k);
    if (status == TT_OK && r.vocab) status = tt__read_added_decoder(k, r.config);
    if (status == TT_OK && r.first != TT__FIRST_FILE) status = tt__read_prefixes(k, r.first, r.config);
    if (status != TT_OK) return status;
    const tt__json *from = r.vocab ? r.vocab : j;
    const int node = r.vocab ? 0 : tt__json_get(j, model, "vocab");
    const bool unigram = k->model.kind == TT__MODEL_UNIGRAM;
    const tt__json_kind kind = unigram ? TT__JSON_ARRAY : TT__JSON_OBJECT;
    if (!r.lines && (node < 0 || from->nodes[node].kind != kind || !from->nodes[node].count))
        return tt__fail(k->ctx, TT_ERR_FORMAT, "'%s' has no vocabulary; expected an %s", from->path,
                        unigram ? "array of tokens and their scores" : "object of tokens and their ids");
    status = tt__read_vocab(k, &r, from, node);
    for (int i = 0; r.lines && i <= 2 && status == TT_OK; i++)
        if (tt_tokenizer_find(k, tt__bert_tokens[i].text) < 0)
            return tt__fail(k->ctx, TT_ERR_FORMAT, "'%s' has no %s among its %d tokens: is it the vocab.txt "
                            "of a BERT, one token a line?", r.path, tt__bert_tokens[i].text, k->size);
    if (status == TT_OK) status = tt__finish_model(k, &r, model, unk);
    if (status == TT_OK) status = tt__place_added(k, j->path);
    if (status == TT_OK) status = tt__read_processor(k, j, tt__json_get(j, 0, "post_processor"));
    const bool reported = r.first == TT__FIRST_BYTES && (r.vocab || tt__prefix_given(r.config));
    for (int i = 0; reported && i < k->split.n; i++) /* spans are trimmed as prefix_space of the ByteLevel
                                                        splitter says */
        for (int t = 0; t < k->finish.trims && k->split.all[i].kind == TT__STEP_BYTES; t++)
            k->finish.trims_prefix[t] = k->split.all[i].prefix_space;
    return status;
}

static tt_tokenizer *tt__tokenizer_new(tt_context *ctx)
{
    tt_tokenizer *k = (tt_tokenizer *)tt__calloc(ctx, sizeof *k);
    if (!k) return NULL;
    k->ctx = ctx;
    for (int role = 0; role < TT_TOKEN_COUNT; role++) k->finish.roles[role] = -1;
    k->finish.pairs = true;
    k->finish.two.types[1] = 1;
    if ((k->unicode = tt__unicode_new(ctx))) return k;
    tt_tokenizer_free(k);
    return NULL;
}
