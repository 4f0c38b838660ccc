#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "unicode.h"
#include "vocabulary.h"
#include "bpe.h"
#include "read.h"
#include "read_vocabulary.h"
#include "around.h"

/* ---- folders */

/* Reads a file of the folder, if it is there, and keeps it for tt_tokenizer_save. NULL: not there, or an
   error. */
static const tt__file_bytes *tt__bpe_keep(tt__bpe *b, const char *folder, const char *name,
                                          char path[TT__PATH],
                                          tt_status *status)
{
    bool there = false;
    tt__kept_file *kept = &b->kept[b->n_kept];
    *status = tt__path_join(b->ctx, path, folder, name);
    if (*status == TT_OK) *status = tt__folder_has(b->ctx, folder, name, &there);
    if (*status != TT_OK || !there) return NULL;
    kept->name = name;
    *status = tt__file_open(b->ctx, path, &kept->file);
    if (*status != TT_OK) return NULL;
    b->n_kept++;
    return &kept->file;
}

/* A line "a b" a merge, but for the first, "#version: ...". */
static tt_status tt__bpe_merges_text(tt__bpe *b, const char *path, const tt__file_bytes *file)
{
    tt__bpe_merging m = {path, 0, 0, NULL, 0};
    char *text = tt__chunks_text(b->ctx, &b->chunks, file->bytes, file->size);
    size_t lines = 1;
    for (size_t i = 0; i < file->size; i++) lines += file->bytes[i] == '\n';
    if (!text || lines > INT32_MAX / 2)
        return tt__fail(b->ctx, TT_ERR_MEMORY, "out of memory for the merges of '%s'", path);
    tt_status status = tt__bpe_merges_begin(b, lines, &m);
    for (size_t at = 0; at < file->size && status == TT_OK;) {
        char *line = text + at, *newline = (char *)memchr(line, '\n', file->size - at);
        size_t n = newline ? (size_t)(newline - line) : file->size - at;
        m.offset = at;
        at += n + 1;
        if (n && line[n - 1] == '\r') n--;
        line[n] = 0;
        if (n >= 8 && memcmp(line, "#version", 8) == 0) continue;
        char *space = (char *)memchr(line, ' ', n);
        if (!space || memchr(space + 1, ' ', (size_t)(line + n - space - 1)))
            return tt__fail(b->ctx, TT_ERR_FORMAT, "'%s', byte %zu: merge %zu is not two tokens with a space "
                            "between them", path, m.offset, m.count);
        *space = 0;
        status = tt__bpe_merge_add(b, &m, line, (size_t)(space - line), space + 1,
                                   (size_t)(line + n - space - 1));
    }
    return status;
}

static const char *const tt__role_names[TT_TOKEN_COUNT] = {"unk_token", "bos_token", "eos_token", "pad_token",
                                                           "cls_token", "sep_token", "mask_token"};

/* Which token each role has, where a JSON object of the folder says so: a text, or an object with one. */
static void tt__bpe_roles(tt_tokenizer *k, const tt__json *j)
{
    for (int role = 0; role < TT_TOKEN_COUNT; role++) {
        int node = tt__json_get(j, 0, tt__role_names[role]);
        size_t bytes;
        if (node >= 0 && j->nodes[node].kind == TT__JSON_OBJECT) node = tt__json_get(j, node, "content");
        const char *text = tt__json_bytes(j, node, &bytes);
        if (text && k->roles[role] < 0) k->roles[role] = tt__bpe_find(&k->bpe->by_text, text, bytes);
    }
}

/* config.json's bos_token_id and so on: a number, or a list of which the first counts. */
static void tt__bpe_role_ids(tt_tokenizer *k, const tt__json *j)
{
    for (int role = 0; role < TT_TOKEN_COUNT; role++) {
        char key[24];
        snprintf(key, sizeof key, "%s_id", tt__role_names[role]);
        int node = tt__json_get(j, 0, key);
        if (node >= 0 && j->nodes[node].kind == TT__JSON_ARRAY && j->nodes[node].count) node++;
        if (node < 0 || k->roles[role] >= 0 || j->nodes[node].kind != TT__JSON_NUMBER_KIND) continue;
        const int64_t id = j->nodes[node].exact ? j->nodes[node].integer : -1;
        if (id >= 0 && id < k->size && k->bpe->text[id].bytes != TT__BPE_NONE) k->roles[role] = (int32_t)id;
    }
}

/* Is that token one of ordinary texts: neither an added one nor called as "</s>" or "[SEP]" are? */
static bool tt__bpe_is_ordinary(const tt_tokenizer *k, int32_t id)
{
    if (id < 0 || k->bpe->added_of[id] >= 0 || !k->bpe->text[id].bytes) return false;
    const char *text = tt_tokenizer_token(k, id), first = text[0], last = text[k->bpe->text[id].bytes - 1];
    return !(first == '<' && last == '>') && !(first == '[' && last == ']');
}

/* What a vocab.json and a merges.txt leave to the class of the tokenizer. Tokens that a vocabulary has not
   are left out; "added_tokens_decoder" of tokenizer_config.json has more. */
static const struct { const char *name, *model_type, *json; } tt__bpe_classes[] = {
    {"GPT2Tokenizer", "gpt2",
     "{\"added_tokens\":[{\"content\":\"<|endoftext|>\",\"special\":true}],"
     "\"pre_tokenizer\":{\"type\":\"ByteLevel\"},\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{}}"},
    {"RobertaTokenizer", "roberta",
     "{\"added_tokens\":[{\"content\":\"<s>\",\"special\":true},{\"content\":\"<pad>\",\"special\":true},"
     "{\"content\":\"</s>\",\"special\":true},{\"content\":\"<unk>\",\"special\":true},"
     "{\"content\":\"<mask>\",\"special\":true,\"lstrip\":true}],"
     "\"pre_tokenizer\":{\"type\":\"ByteLevel\"},\"decoder\":{\"type\":\"ByteLevel\"},"
     "\"post_processor\":{\"type\":\"RobertaProcessing\",\"cls\":[\"<s>\",null],\"sep\":[\"</s>\",null]},"
     "\"model\":{}}"},
    {"Qwen2Tokenizer", "qwen2",
     "{\"added_tokens\":[{\"content\":\"<|endoftext|>\",\"special\":true}],\"normalizer\":{\"type\":\"NFC\"},"
     "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"
     "\"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}|"
     " ?[^\\\\s\\\\p{L}\\\\p{N}]+"
     "[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"Isolated\"},"
     "{\"type\":\"ByteLevel\",\"use_regex\":false}]},\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{}}"},
};

/* How LlamaTokenizer of transformers 5 marks words, whatever the pipeline of the tokenizer.json. */
static const char tt__bpe_llama[] =
    "{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\\u2581\",\"split\":false},"
    "\"decoder\":{\"type\":\"Sequence\",\"decoders\":["
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\"\\u2581\"},\"content\":\" \"},"
    "{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},"
    "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]},"
    "\"model\":{\"type\":\"BPE\",\"fuse_unk\":true,\"byte_fallback\":true}}";

/* The text of a member of a file of a folder, which may not be there (empty); NULL: there is none. */
static const char *tt__folder_text(const tt__json *j, const char *key)
{
    return j->count && j->nodes[0].kind == TT__JSON_OBJECT ? tt__json_text(j, tt__json_get(j, 0, key)) : NULL;
}

/* Is that the name of the class, or of its twin of transformers 4? */
static bool tt__bpe_class_is(const char *name, const char *which)
{
    const size_t n = strlen(which);
    return name && strncmp(name, which, n) == 0 && (!name[n] || strcmp(name + n, "Fast") == 0);
}

/* How AutoTokenizer of transformers 5 marks the first word where there is a tokenizer.json: as that says, or
   as "add_prefix_space" of tokenizer_config.json says, or as tt__bpe_llama. */
typedef enum tt__bpe_way { TT__WAY_FILE, TT__WAY_BYTES, TT__WAY_LLAMA } tt__bpe_way;

static tt__bpe_way tt__bpe_way_of(const tt__json *config, const tt__json *model, const tt__file_bytes *file)
{
    static const struct { const char *name, *model_type; } bytes[] = {
        {"GPT2Tokenizer", "gpt2"}, {"RobertaTokenizer", "roberta"}, {"Qwen2Tokenizer", "qwen2"},
        {"GPTNeoXTokenizer", "gpt_neox"}};
    const char *name = tt__folder_text(config, "tokenizer_class");
    const char *type = tt__folder_text(model, "model_type");
    if (!name) name = tt__folder_text(model, "tokenizer_class");
    if (type && strcmp(type, "mistral") == 0) return TT__WAY_FILE;
    if (type && strcmp(type, "qwen2") == 0) return TT__WAY_BYTES;
    if (tt__bpe_class_is(name, "LlamaTokenizer"))
        return strstr(file->bytes, "\"ByteLevel\"") ? TT__WAY_FILE : TT__WAY_LLAMA;
    for (int i = 0; i < TT__COUNT(bytes); i++)
        if (name ? tt__bpe_class_is(name, bytes[i].name) : type && strcmp(type, bytes[i].model_type) == 0)
            return TT__WAY_BYTES;
    return TT__WAY_FILE;
}

/* Which of tt__bpe_classes a folder's tokenizer_config.json or config.json (either may be empty) names. */
static int tt__bpe_class(tt_context *ctx, const char *folder, const tt__json *config, const tt__json *model)
{
    const char *name = tt__folder_text(config, "tokenizer_class");
    const char *type = tt__folder_text(model, "model_type");
    for (int i = 0; i < TT__COUNT(tt__bpe_classes); i++)
        if (name ? tt__bpe_class_is(name, tt__bpe_classes[i].name)
                 : !type || strcmp(type, tt__bpe_classes[i].model_type) == 0)
            return i;
    tt__fail(ctx, TT_ERR_UNSUPPORTED,
             "'%s' has no tokenizer.json, and of vocab.json with merges.txt the class "
             "'%.200s' is not supported; expected GPT2Tokenizer, RobertaTokenizer or Qwen2Tokenizer", folder,
             name ? name : type);
    return -1;
}

/* "add_prefix_space", and of LlamaTokenizer "legacy", of tokenizer_config.json. */
static tt_status tt__bpe_prefixes(tt__bpe *b, tt__bpe_way kind, const tt__json *config)
{
    bool prefix = kind == TT__WAY_LLAMA, legacy = false;
    tt_status status = TT_OK;
    if (config->count) status = tt__json_read_bool(config, 0, "add_prefix_space", &prefix);
    if (config->count && status == TT_OK) status = tt__json_read_bool(config, 0, "legacy", &legacy);
    const int node = config->count ? tt__json_get(config, 0, "add_prefix_space") : -1;
    const bool given = node >= 0 && config->nodes[node].kind != TT__JSON_NULL;
    for (int i = 0; i < b->n_splitters; i++) {
        tt__stage *s = &b->splitters[i];
        if (s->kind == TT__STAGE_BYTES && kind == TT__WAY_BYTES && given) s->prefix_space = prefix;
        if (kind != TT__WAY_LLAMA) continue;
        s->prefix_always = prefix && legacy; /* of each part between added tokens, or of the first alone */
        s->prefix_first = prefix && !legacy;
    }
    if (kind == TT__WAY_LLAMA && !prefix) b->n_decoders--; /* which strips it */
    return status;
}

/* The tokenizer that `j` describes. text: what j was parsed from; way: what has the pipeline in its place, or
   NULL; vocab: of vocab.json, NULL: in j; merges: those of merges.txt, or NULL; config:
   tokenizer_config.json, or empty. */
static tt_status tt__bpe_build(tt_tokenizer *k, const tt__json *j, const char *text, const tt__json *way,
                               tt__bpe_way kind, const tt__json *vocab, const tt__file_bytes *merges,
                               const char *merges_path, const tt__json *config)
{
    tt__bpe *b = k->bpe;
    const char *unk;
    int size = 0, missing = 0, unmapped = 0;
    size_t added_bytes = 0;
    if (j->nodes[0].kind != TT__JSON_OBJECT)
        return tt__fail(b->ctx, TT_ERR_FORMAT, "'%s' is %s; expected a JSON object", j->path,
                        tt__json_kind_name(j, 0));
    const int model = tt__json_get(j, 0, "model");
    tt_status status = tt__bpe_read_model(b, j, model, &unk);
    if (way && (b->unigram || b->wordpiece)) way = NULL, kind = TT__WAY_FILE; /* that class has neither */
    if (way && status == TT_OK) status = tt__bpe_read_model(b, way, tt__json_get(way, 0, "model"), &unk);
    const struct { const tt__json *from; const char *key; tt__bpe_reader read; } parts[] = {
        {way ? way : j, "normalizer", tt__bpe_read_normalizer},
        {way ? way : j, "pre_tokenizer", tt__bpe_read_splitter},
        {way ? way : j, "decoder", tt__bpe_read_decoder}, {j, "added_tokens", tt__bpe_read_added_list}};
    b->mapped_at = INT_MAX;
    for (int i = 0; i < TT__COUNT(parts) && status == TT_OK; i++) {
        const int node = tt__json_get(parts[i].from, 0, parts[i].key);
        if (node >= 0) status = parts[i].read(b, parts[i].from, node);
    }
    b->mapped_at = (int)tt__min(b->mapped_at, b->n_splitters);
    if (vocab) { /* what the configuration adds */
        int list = config->count ? tt__json_get(config, 0, "added_tokens_decoder") : -1;
        if (list >= 0 && j->nodes[0].kind == TT__JSON_OBJECT && config->nodes[list].kind == TT__JSON_OBJECT)
            for (int child = list + 1; child < config->nodes[list].after && status == TT_OK;
                 child = config->nodes[child].after) {
                char *end;
                const char *key = config->pool + config->nodes[child].key;
                const long id = strtol(key, &end, 10);
                if (*end || end == key || id < 0 || id >= TT__BPE_IDS)
                    return tt__bpe_unknown(config, child, "id", key,
                                           "numbers as keys of added_tokens_decoder");
                status = tt__bpe_read_added(b, config, child, (int)id);
            }
    }
    if (status == TT_OK && kind != TT__WAY_FILE) status = tt__bpe_prefixes(b, kind, config);
    if (status != TT_OK) return status;
    for (int i = 0; i < b->n_added; i++) {
        size = (int)tt__max(size, b->added[i].id + 1);
        added_bytes += b->added[i].bytes + 1;
    }
    status = vocab ? tt__bpe_vocab(k, vocab, 0, size, added_bytes)
                   : tt__bpe_vocab(k, j, tt__json_get(j, model, "vocab"), size, added_bytes);
    if (status != TT_OK) return status;
    if (b->unigram) {
        status = tt__unigram_scores(b, j, text, model);
        if (status == TT_OK) status = tt__bpe_place_added(k, j->path);
        if (status == TT_OK) status = tt__bpe_read_processor(k, j, tt__json_get(j, 0, "post_processor"));
        return status;
    }
    b->unk = unk ? tt__bpe_find(&b->by_text, unk, strlen(unk)) : -1;
    if (b->wordpiece && b->unk < 0)
        return tt__fail(b->ctx, TT_ERR_FORMAT, "'%s': the vocabulary has no '%.200s', the \"unk_token\"",
                        j->path, unk);
    for (int i = 0; i < 256; i++) missing += b->fallback[i] < 0, unmapped += b->bytes[i] < 0;
    const bool bytes = b->mapped_at < b->n_splitters, fallback = b->byte_fallback && !missing;
    if (b->unk < 0 && !fallback && (!bytes || unmapped))
        tt__log(b->ctx, TT_LOG_WARNING, "tokenizer",
                "'%s' has tokens for some characters only, and none for the "
                "others: these are left out of texts", j->path);
    b->cuts = !bytes && fallback && !b->ignore_merges;
    if (merges) status = tt__bpe_merges_text(b, merges_path, merges);
    else if (!b->wordpiece) status = tt__bpe_read_merges(b, j, model);
    if (status == TT_OK) status = tt__bpe_place_added(k, j->path);
    if (status == TT_OK) status = tt__bpe_read_processor(k, j, tt__json_get(j, 0, "post_processor"));
    return status;
}

/* The error of a folder without a tokenizer. */
static tt_status tt__bpe_absent(tt_context *ctx, const char *folder)
{
    static const char *const names[] = {"tokenizer.model", "spiece.model", "sentencepiece.bpe.model"};
    for (int i = 0; i < TT__COUNT(names); i++) {
        bool there = false;
        const tt_status status = tt__folder_has(ctx, folder, names[i], &there);
        if (status != TT_OK) return status;
        if (there)
            return tt__fail(ctx, TT_ERR_UNSUPPORTED, "'%s' has a tokenizer as %s only, which is not read: "
                            "transformers makes a tokenizer.json of it, by AutoTokenizer.from_pretrained and "
                            "save_pretrained", folder, names[i]);
    }
    return tt__fail(ctx, TT_ERR_FILE, "'%s' has no tokenizer: copy the tokenizer.json of the model there, or "
                    "its vocab.txt, or its vocab.json and merges.txt", folder);
}

/* Loads a folder that has a tokenizer.json, or a vocab.json and a merges.txt. */
static tt_status tt__bpe_load(tt_tokenizer *k, const char *folder)
{
    tt_context *ctx = k->ctx;
    tt__bpe *b = k->bpe = (tt__bpe *)tt__calloc(ctx, sizeof *b);
    char config_path[TT__PATH], map_path[TT__PATH], path[TT__PATH], vocab_path[TT__PATH];
    char model_path[TT__PATH];
    tt__json j, config, map, vocab, model, way;
    tt__json *const all[] = {&j, &config, &map, &vocab, &model, &way};
    tt_status status = TT_ERR_MEMORY;
    const tt__file_bytes *file = NULL, *vocab_file;
    for (int i = 0; i < TT__COUNT(all); i++) memset(all[i], 0, sizeof *all[i]);
    for (int role = 0; role < TT_TOKEN_COUNT; role++) k->roles[role] = -1;
    if (!b) return status;
    b->ctx = ctx;
    if (!(b->letters = tt__letters_new(ctx))) return status;
    b->bits = tt__letters_bits(b->letters);
    file = tt__bpe_keep(b, folder, "tokenizer_config.json", config_path, &status);
    if (file) status = tt__json_parse(&config, ctx, config_path, 0, file->bytes, file->size);
    if (status == TT_OK) file = tt__bpe_keep(b, folder, "special_tokens_map.json", map_path, &status);
    if (status == TT_OK && file) status = tt__json_parse(&map, ctx, map_path, 0, file->bytes, file->size);
    if (status == TT_OK) status = tt__json_open_if_there(&model, ctx, model_path, folder, "config.json");
    if (status == TT_OK) tt__bpe_keep(b, folder, "chat_template.jinja", path, &status);
    if (status == TT_OK) file = tt__bpe_keep(b, folder, "tokenizer.json", path, &status);
    if (status == TT_OK && file) {
        status = tt__json_parse(&j, ctx, path, 0, file->bytes, file->size);
        const tt__bpe_way kind = tt__bpe_way_of(&config, &model, file);
        const bool llama = kind == TT__WAY_LLAMA;
        if (status == TT_OK && llama)
            status = tt__json_parse(&way, ctx, path, 0, tt__bpe_llama, strlen(tt__bpe_llama));
        if (status == TT_OK)
            status = tt__bpe_build(k, &j, file->bytes, llama ? &way : NULL, kind, NULL, NULL, NULL, &config);
    } else if (status == TT_OK) {
        vocab_file = tt__bpe_keep(b, folder, "vocab.json", vocab_path, &status);
        if (vocab_file) file = tt__bpe_keep(b, folder, "merges.txt", path, &status);
        if (status == TT_OK && (!vocab_file || !file)) status = tt__bpe_absent(ctx, folder);
        const int kind = status == TT_OK ? tt__bpe_class(ctx, folder, &config, &model) : -1;
        if (status == TT_OK && kind < 0) status = ctx->status;
        if (status == TT_OK) status = tt__json_parse(&vocab, ctx, vocab_path, 0, vocab_file->bytes,
                                                     vocab_file->size);
        if (status == TT_OK) status = tt__json_parse(&j, ctx, vocab_path, 0, tt__bpe_classes[kind].json,
                                                     strlen(tt__bpe_classes[kind].json));
        if (status == TT_OK)
            status = tt__bpe_build(k, &j, tt__bpe_classes[kind].json, NULL, TT__WAY_BYTES, &vocab, file, path,
                                   &config);
    }
    if (status == TT_OK) {
        if (config.count) tt__bpe_roles(k, &config);
        if (map.count) tt__bpe_roles(k, &map);
        static const int berts[] = {TT_TOKEN_UNK, TT_TOKEN_CLS, TT_TOKEN_SEP, TT_TOKEN_PAD, TT_TOKEN_MASK};
        for (int i = 0; i < TT__COUNT(berts) && b->wordpiece; i++)
            if (k->roles[berts[i]] < 0)
                k->roles[berts[i]] = tt_tokenizer_find(k, tt__special_tokens[i]);
        const bool told = k->roles[TT_TOKEN_EOS] >= 0; /* by a file of the tokenizer's own */
        if (model.count) tt__bpe_role_ids(k, &model);
        const int32_t own = tt__bpe_find(&b->by_text, "<|endoftext|>", 13), end = k->roles[TT_TOKEN_EOS];
        const bool ordinary = !told && tt__bpe_is_ordinary(k, end);
        if (end < 0 || (ordinary && own >= 0)) k->roles[TT_TOKEN_EOS] = own;
        if (ordinary)
            tt__log(ctx, TT_LOG_WARNING, "tokenizer", "'%s' has the eos_token_id %d, '%.60s', which ordinary "
                    "texts have too: %s", model_path, end, tt_tokenizer_token(k, end),
                    own < 0 ? "it ends them where it stands; name an \"eos_token\" in tokenizer_config.json"
                            : "documents end with '<|endoftext|>' instead");
    }
    bool split_special = false;
    if (status == TT_OK && config.count)
        status = tt__json_read_bool(&config, 0, "split_special_tokens", &split_special);
    if (split_special)
        status = tt__fail(ctx, TT_ERR_UNSUPPORTED,
                          "'%s': \"split_special_tokens\" is true, which this tokenizer "
                          "does not do", config_path);
    for (int i = 0; i < TT__COUNT(all); i++) {
        all[i]->ctx = ctx; /* also of what was not opened */
        tt__json_free(all[i]);
    }
    return status;
}
