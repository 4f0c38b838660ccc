#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "types.h"
#include "lookups.h"
#include "decode.h"
#include "read.h"
#include "vocabulary.h"
#include "build.h"
#include "vocab_txt.h"

/* ------------------------------------------------------------------------------------- tokenizer: folders */

/* Opens and parses a JSON file of a folder; if the file does not exist, sets j->count to 0. Writes the file's
   path to `path`, which must live as long as j. The caller frees j even after an error. */
static tt_status tt__json_open_if_there(tt__json *j, tt_context *ctx, char path[TT__PATH], const char *folder,
                                        const char *file)
{
    bool there = false;
    memset(j, 0, sizeof *j);
    tt_status status = tt__path_join(ctx, path, folder, file);
    if (status == TT_OK) status = tt__folder_has(ctx, folder, file, &there);
    return status == TT_OK && there ? tt__json_open(j, ctx, path) : status;
}

/* Reads a file of the folder, if it exists, and keeps its bytes for tt_tokenizer_save. Returns NULL if the
   file does not exist or after an error. */
static const tt__file_bytes *tt__keep_file(tt_tokenizer *k, const char *folder, const char *name,
                                           char path[TT__PATH], tt_status *status)
{
    bool there = false;
    tt__kept_file *kept = &k->kept[k->n_kept];
    *status = tt__path_join(k->ctx, path, folder, name);
    if (*status == TT_OK) *status = tt__folder_has(k->ctx, folder, name, &there);
    if (*status != TT_OK || !there) return NULL;
    kept->name = name;
    *status = tt__file_open(k->ctx, path, &kept->file);
    if (*status != TT_OK) return NULL;
    k->n_kept++;
    return &kept->file;
}

/* Reads a JSON file of the folder, if it exists, keeps its bytes for tt_tokenizer_save, and parses it into j.
   Returns NULL if the file does not exist or after an error. */
static const tt__file_bytes *tt__keep_json(tt_tokenizer *k, const char *folder, const char *name,
                                           char path[TT__PATH], tt__json *j, tt_status *status)
{
    const tt__file_bytes *file = *status == TT_OK ? tt__keep_file(k, folder, name, path, status) : NULL;
    if (file) *status = tt__json_parse(j, k->ctx, path, 0, file->bytes, file->size);
    return file;
}

static const char *const tt__role_names[TT_TOKEN_COUNT] = {"unk_token", "bos_token", "eos_token", "pad_token",
                                                           "cls_token", "sep_token", "mask_token"};

/* Sets the token of each role (such as "bos_token") that JSON file j names and no earlier file has named. A
   token is given as a text or as an object with "content". */
static void tt__read_roles(tt_tokenizer *k, const tt__json *j)
{
    for (int role = 0; role < TT_TOKEN_COUNT; role++) {
        int node = tt__json_get(j, 0, tt__role_names[role]);
        size_t bytes;
        if (node >= 0 && j->nodes[node].kind == TT__JSON_OBJECT) node = tt__json_get(j, node, "content");
        const char *text = tt__json_bytes(j, node, &bytes);
        if (text && k->finish.roles[role] < 0)
            k->finish.roles[role] = tt__any_token(k, text, bytes);
    }
}

/* Sets the token of each role that config.json gives as an id ("bos_token_id" and so on). The id is a number
   or the first number of a list. */
static void tt__read_role_ids(tt_tokenizer *k, const tt__json *j)
{
    for (int role = 0; role < TT_TOKEN_COUNT; role++) {
        char key[24];
        snprintf(key, sizeof key, "%s_id", tt__role_names[role]);
        int node = tt__json_get(j, 0, key);
        if (node >= 0 && j->nodes[node].kind == TT__JSON_ARRAY && j->nodes[node].count) node++;
        if (node < 0 || k->finish.roles[role] >= 0 || j->nodes[node].kind != TT__JSON_NUMBER_KIND) continue;
        const int64_t id = j->nodes[node].exact ? j->nodes[node].integer : -1;
        if (id >= 0 && id < k->size && k->vocab.text[id].bytes != TT__NO_TOKEN)
            k->finish.roles[role] = (int32_t)id;
    }
}

/* Returns whether ordinary texts may contain token `id`: the token is not an added token, and is not spelled
   like "</s>" or "[SEP]". */
static bool tt__is_ordinary(const tt_tokenizer *k, int32_t id)
{
    if (id < 0 || k->added_of[id] >= 0 || !k->vocab.text[id].bytes) return false;
    const char *text = tt_tokenizer_token(k, id), first = text[0], last = text[k->vocab.text[id].bytes - 1];
    return !(first == '<' && last == '>') && !(first == '[' && last == ']');
}

/* The tokenizer classes of transformers that obey "add_prefix_space" of tokenizer_config.json. json: the
   tokenizer.json, without vocabulary, of folders that only have vocab.json and merges.txt; NULL: such folders
   are not read. Added tokens that the vocabulary lacks are left out. "added_tokens_decoder" of
   tokenizer_config.json may add more tokens. */
static const struct { const char *name, *model_type, *json; } tt__classes[] = {
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
    {"GPTNeoXTokenizer", "gpt_neox", NULL},
};

/* The pipeline (normalizer, splitter, decoder) that LlamaTokenizer of transformers 5 uses instead of the
   pipeline in tokenizer.json. */
static const char tt__llama_way[] =
    "{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\\u2581\",\"split\":false},"
    "\"decoder\":{\"type\":\"Sequence\",\"decoders\":["
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\"\\u2581\"},\"content\":\" \"},"
    "{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},"
    "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]},"
    "\"model\":{\"type\":\"BPE\",\"fuse_unk\":true,\"byte_fallback\":true}}";

/* Returns the string member `key` of JSON file j. Returns NULL if the file or the member is missing. */
static const char *tt__folder_text(const tt__json *j, const char *key)
{
    return j->count && j->nodes[0].kind == TT__JSON_OBJECT ? tt__json_text(j, tt__json_get(j, 0, key)) : NULL;
}

/* Returns whether `name` is the class `which`, or its name in transformers 4, `which` with "Fast"
   appended. */
static bool tt__class_is(const char *name, const char *which)
{
    const size_t n = strlen(which);
    return name && strncmp(name, which, n) == 0 && (!name[n] || strcmp(name + n, "Fast") == 0);
}

/* Returns the row of tt__classes with this class name or, if `name` is NULL, with this model type. Returns -1
   if there is no such row. */
static int tt__class_of(const char *name, const char *type)
{
    for (int i = 0; i < TT__COUNT(tt__classes); i++)
        if (name ? tt__class_is(name, tt__classes[i].name)
                 : type && strcmp(type, tt__classes[i].model_type) == 0) return i;
    return -1;
}

static tt__first_word tt__first_word_of(const tt__json *config, const tt__json *model,
                                        const tt__file_bytes *file)
{
    const char *name = tt__folder_text(config, "tokenizer_class");
    const char *type = tt__folder_text(model, "model_type");
    if (!name) name = tt__folder_text(model, "tokenizer_class");
    if (type && strcmp(type, "mistral") == 0) return TT__FIRST_FILE;
    if (type && strcmp(type, "qwen2") == 0) return TT__FIRST_BYTES;
    if (tt__class_is(name, "LlamaTokenizer"))
        return strstr(file->bytes, "\"ByteLevel\"") ? TT__FIRST_FILE : TT__FIRST_LLAMA;
    return tt__class_of(name, type) >= 0 ? TT__FIRST_BYTES : TT__FIRST_FILE;
}

/* Returns the field `json` of the row of tt__classes that the folder's tokenizer_config.json or config.json
   names; either file may be empty. Returns NULL after tt__fail if no row fits. */
static const char *tt__class_json(tt_context *ctx, const char *folder, const tt__json *config,
                                  const tt__json *model)
{
    const char *name = tt__folder_text(config, "tokenizer_class");
    const char *type = tt__folder_text(model, "model_type");
    const int kind = tt__class_of(name, type ? type : "gpt2");
    if (kind >= 0 && tt__classes[kind].json) return tt__classes[kind].json;
    tt__fail(ctx, TT_ERR_UNSUPPORTED, "'%s' has no tokenizer.json, and vocab.json with merges.txt cannot be "
             "read for the class '%.200s'; expected GPT2Tokenizer, RobertaTokenizer or Qwen2Tokenizer",
             folder, name ? name : type);
    return NULL;
}

/* Fails because a folder has no tokenizer that can be read. */
static tt_status tt__no_tokenizer(tt_context *ctx, const char *folder)
{
    static const char *const names[] = {"tokenizer.model", "spiece.model", "sentencepiece.bpe.model"};
    for (int i = 0; i < TT__COUNT(names); i++) {
        bool there = false;
        const tt_status status = tt__folder_has(ctx, folder, names[i], &there);
        if (status != TT_OK) return status;
        if (there)
            return tt__fail(ctx, TT_ERR_UNSUPPORTED, "'%s' has its tokenizer only as %s, which is not "
                            "supported: convert it to tokenizer.json with transformers "
                            "(AutoTokenizer.from_pretrained, then save_pretrained)", folder, names[i]);
    }
    return tt__fail(ctx, TT_ERR_FILE, "'%s' has no tokenizer: copy the tokenizer.json of the model there, or "
                    "its vocab.txt, or its vocab.json and merges.txt", folder);
}

/* The parsed files of a tokenizer's folder, which are empty if missing, and their paths. */
typedef struct tt__tokenizer_folder {
    const char *folder;
    tt__json json, config, map, vocab, model, way;
    char json_path[TT__PATH], config_path[TT__PATH], map_path[TT__PATH], vocab_path[TT__PATH];
    char model_path[TT__PATH], merges_path[TT__PATH];
} tt__tokenizer_folder;

/* Builds the tokenizer that a tokenizer.json describes. */
static tt_status tt__load_json(tt_tokenizer *k, tt__tokenizer_folder *f, const tt__file_bytes *file)
{
    const tt__first_word first = tt__first_word_of(&f->config, &f->model, file);
    const bool llama = first == TT__FIRST_LLAMA;
    const tt__recipe r = {&f->json, file->bytes, llama ? &f->way : NULL, first, NULL, NULL, NULL, NULL,
                          &f->config};
    const tt_status status = llama ? tt__json_parse(&f->way, k->ctx, f->json_path, 0, tt__llama_way,
                                                    strlen(tt__llama_way)) : TT_OK;
    return status == TT_OK ? tt__build_tokenizer(k, &r) : status;
}

/* Builds the tokenizer of a folder that has vocab.json and merges.txt. */
static tt_status tt__load_merges(tt_tokenizer *k, tt__tokenizer_folder *f)
{
    tt_status status = TT_OK;
    const tt__file_bytes *merges = NULL;
    const tt__file_bytes *vocab = tt__keep_file(k, f->folder, "vocab.json", f->vocab_path, &status);
    if (vocab) merges = tt__keep_file(k, f->folder, "merges.txt", f->merges_path, &status);
    if (status == TT_OK && !merges) status = tt__no_tokenizer(k->ctx, f->folder);
    if (status != TT_OK) return status;
    const char *json = tt__class_json(k->ctx, f->folder, &f->config, &f->model);
    if (!json) return k->ctx->status;
    const tt__recipe r = {&f->json, json, NULL, TT__FIRST_BYTES, &f->vocab, NULL, merges, f->merges_path,
                          &f->config};
    status = tt__json_parse(&f->vocab, k->ctx, f->vocab_path, 0, vocab->bytes, vocab->size);
    if (status == TT_OK) status = tt__json_parse(&f->json, k->ctx, f->vocab_path, 0, json, strlen(json));
    return status == TT_OK ? tt__build_tokenizer(k, &r) : status;
}

/* Sets the token of each role (tt_special_token). */
static void tt__load_roles(tt_tokenizer *k, const tt__tokenizer_folder *f)
{
    int32_t *eos = &k->finish.roles[TT_TOKEN_EOS];
    if (f->config.count) tt__read_roles(k, &f->config);
    if (f->map.count) tt__read_roles(k, &f->map);
    if (k->model.kind == TT__MODEL_WORDPIECE) tt__roles_of_bert(k);
    const bool reported = *eos >= 0; /* a tokenizer file names the end token */
    if (f->model.count) tt__read_role_ids(k, &f->model);
    const int32_t own = tt_tokenizer_find(k, "<|endoftext|>"), end = *eos;
    const bool ordinary = !reported && tt__is_ordinary(k, end);
    if (end < 0 || (ordinary && own >= 0)) *eos = own;
    if (ordinary)
        tt__log(k->ctx, TT_LOG_WARNING, "tokenizer",
                "'%s': eos_token_id is %d, '%.60s', which also occurs in ordinary texts: %s", f->model_path,
                end, tt_tokenizer_token(k, end),
                own < 0 ? "texts end wherever it occurs; set \"eos_token\" in tokenizer_config.json" :
                "documents end with '<|endoftext|>' instead");
}

/* Loads a folder that has a tokenizer.json, or a vocab.json and a merges.txt. */
static tt_status tt__load_folder(tt_tokenizer *k, tt__tokenizer_folder *f)
{
    tt_status status = TT_OK;
    bool split_special = false;
    char path[TT__PATH];
    tt__keep_json(k, f->folder, "tokenizer_config.json", f->config_path, &f->config, &status);
    tt__keep_json(k, f->folder, "special_tokens_map.json", f->map_path, &f->map, &status);
    if (status == TT_OK)
        status = tt__json_open_if_there(&f->model, k->ctx, f->model_path, f->folder, "config.json");
    if (status == TT_OK) tt__keep_file(k, f->folder, "chat_template.jinja", path, &status);
    const tt__file_bytes *file =
        tt__keep_json(k, f->folder, "tokenizer.json", f->json_path, &f->json, &status);
    if (status == TT_OK) status = file ? tt__load_json(k, f, file) : tt__load_merges(k, f);
    if (status != TT_OK) return status;
    tt__load_roles(k, f);
    if (f->config.count) status = tt__json_read_bool(&f->config, 0, "split_special_tokens", &split_special);
    if (!split_special) return status;
    return tt__fail(k->ctx, TT_ERR_UNSUPPORTED, "'%s': \"split_special_tokens\" is true, which is not "
                    "supported: use another model", f->config_path);
}

tt_tokenizer *tt_tokenizer_load(tt_context *ctx, const char *folder)
{
    char vocab[TT__PATH], config[TT__PATH];
    bool lowercase = true, words = false;
    tt__json j;
    tt_status status = tt__folder_has(ctx, folder, "vocab.txt", &words);
    if (status != TT_OK) return NULL;
    if (words) {
        status = tt__json_open_if_there(&j, ctx, config, folder, "tokenizer_config.json");
        if (status == TT_OK && j.count) status = tt__tokenizer_config(&j, &lowercase);
        if (status == TT_OK) status = tt__path_join(ctx, vocab, folder, "vocab.txt");
        tt__json_free(&j);
        return status == TT_OK ? tt_tokenizer_open(ctx, vocab, lowercase) : NULL;
    }
    tt__tokenizer_folder *f = (tt__tokenizer_folder *)tt__calloc(ctx, sizeof *f);
    tt_tokenizer *k = f ? tt__tokenizer_new(ctx) : NULL;
    if (k) {
        tt__json *const all[] = {&f->json, &f->config, &f->map, &f->vocab, &f->model, &f->way};
        f->folder = folder;
        status = tt__load_folder(k, f);
        for (int i = 0; i < TT__COUNT(all); i++) {
            all[i]->ctx = ctx; /* tt__json_free reads ctx even of an unopened file */
            tt__json_free(all[i]);
        }
    }
    tt__free(ctx, f);
    if (status == TT_OK) return k;
    tt_tokenizer_free(k);
    return NULL;
}
