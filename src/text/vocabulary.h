#pragma once
#include "../base/base.h"
#include "../ops/linear/cpu_packing.h"
#include "../files/lists.h"
#include "../files/utf8.h"
#include "../files/json.h"
#include "unicode.h"

/* --------------------------------------------------------------------------------------------- tokenizer */

/* As the Rust package `tokenizers` does it; tests/golden/compare_tokens.py compares the two. A word is looked
   up whole, then by ever shorter starts; the hashes of all starts come from one pass over its bytes (FNV-1a).
   Pieces that continue a word ("##ing") have the same table and another seed. */
#define TT__WORD_CHARS 100 /* a longer word is [UNK] */
#define TT__WORD_BYTES (TT__WORD_CHARS * 4)
#define TT__WORD_SEED 2166136261u
#define TT__PIECE_SEED 3735928559u
#define TT__LOW 0x3000 /* alphabets, punctuation, jamo */
#define TT__VOCAB_BYTES ((size_t)1 << 28) /* a larger vocab.txt is refused; offsets into it have 32 bits */

static uint32_t tt__hash_byte(uint32_t hash, unsigned char byte) { return (hash ^ byte) * 16777619u; }

/* A text that spells out one of these has that token there. The first three must be in the vocabulary. */
static const char *const tt__special_tokens[] = {"[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"};
enum { TT__UNK, TT__CLS, TT__SEP };

/* In the file, without ##. */
typedef struct tt__wordpiece { uint32_t start, bytes; bool continues; } tt__wordpiece;
typedef struct tt__bucket { uint32_t hash; int32_t id; } tt__bucket;              /* id -1: free */

typedef struct tt__bpe tt__bpe; /* a tokenizer of a tokenizer.json: byte-pair or Unigram */
enum { TT__AROUND = 16 };       /* ids that stand before or behind those of a text, at most */

struct tt_tokenizer {
    tt_context *ctx;
    tt__bpe *bpe;             /* NULL: words and pieces of them, as the following */
    int32_t before[TT__AROUND], behind[TT__AROUND]; /* ids around those of a text */
    int n_before, n_behind;
    int32_t roles[TT_TOKEN_COUNT]; /* by tt_special_token; -1: none */
    tt__unicode *unicode;
    tt__file_bytes file;      /* vocab.txt with a NUL behind each token */
    tt__wordpiece *pieces;      /* by id */
    tt__bucket *slots;        /* open addressing, at most half full */
    uint32_t mask;
    int size, capacity, longest;
    int special[TT__COUNT(tt__special_tokens)]; /* ids; -1: absent */
    bool lowercase;
    uint8_t classes[256];     /* a TT__CLASS_..., or a letter or digit, folded; 0: "[", or beyond ASCII */
    uint8_t low[TT__LOW];     /* TT__CLASS_... of the code points that most words have */
    int32_t punctuation[128]; /* id of the words that are one ASCII punctuation character */
};

/* The slot that holds the piece, or the free one where it belongs. */
static uint32_t tt__vocab_slot(const tt_tokenizer *k, const char *text, uint32_t bytes, bool continues,
                               uint32_t hash)
{
    uint32_t at = (hash ^ hash >> 15) & k->mask;
    for (; k->slots[at].id >= 0; at = (at + 1) & k->mask) {
        if (k->slots[at].hash != hash) continue;
        const tt__wordpiece *piece = &k->pieces[k->slots[at].id];
        if (piece->bytes == bytes && piece->continues == continues &&
            memcmp(k->file.bytes + piece->start, text, bytes) == 0)
            break;
    }
    return at;
}

static uint32_t tt__vocab_hash(const char *text, size_t bytes, bool continues)
{
    uint32_t hash = continues ? TT__PIECE_SEED : TT__WORD_SEED;
    for (size_t i = 0; i < bytes; i++) hash = tt__hash_byte(hash, (unsigned char)text[i]);
    return hash;
}

static int tt__vocab_find(const tt_tokenizer *k, const char *token)
{
    size_t bytes = strlen(token);
    bool continues = bytes > 2 && token[0] == '#' && token[1] == '#';
    if (continues) { token += 2; bytes -= 2; }
    if (bytes > TT__VOCAB_BYTES) return -1;
    return k->slots[tt__vocab_slot(k, token, (uint32_t)bytes, continues, tt__vocab_hash(token, bytes,
        continues))].id;
}

static tt_status tt__vocab_read(tt_tokenizer *k, const char *path)
{
    tt_context *ctx = k->ctx;
    tt_status status = tt__file_open(ctx, path, &k->file);
    if (status != TT_OK) return status;
    char *text = k->file.bytes;
    if (k->file.size > TT__VOCAB_BYTES)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' has %zu bytes; a vocabulary of at most %zu is read", path,
                        k->file.size, TT__VOCAB_BYTES);
    for (size_t at = 0; at < k->file.size;) {
        const char *newline = (const char *)memchr(text + at, '\n', k->file.size - at);
        size_t start = at, end = newline ? (size_t)(newline - text) : k->file.size;
        at = end + 1;
        size_t invalid = tt__utf8_invalid(text + start, end - start);
        if (invalid < end - start || memchr(text + start, 0, end - start))
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s', line %d: the token is not UTF-8 text; a vocabulary "
                            "has one token a line", path, k->size + 1);
        while (end > start) { /* `tokenizers` drops white space from a line's end, as from "\r\r\n" */
            size_t last = tt__utf8_last(text, end), next = last;
            uint32_t c = tt__utf8_next(text, end, &next);
            bool white = (c >= 9 && c <= 13) || c == 0x85 || tt__class(k->unicode, c) == TT__CLASS_SPACE;
            if (!white) break;
            end = last;
        }
        text[end] = 0;
        if (!TT__GROW(ctx, k->pieces, k->size, k->capacity))
            return tt__fail(ctx, TT_ERR_MEMORY, "out of memory for the %d tokens of '%s'", k->size + 1, path);
        tt__wordpiece *piece = &k->pieces[k->size++];
        piece->continues = end - start > 2 && text[start] == '#' && text[start + 1] == '#';
        piece->start = (uint32_t)(start + (piece->continues ? 2 : 0));
        piece->bytes = (uint32_t)(end - piece->start);
    }
    size_t slots = 64;
    while (slots < (size_t)k->size * 2) slots *= 2;
    k->mask = (uint32_t)(slots - 1);
    k->slots = (tt__bucket *)tt__alloc(ctx, slots * sizeof *k->slots);
    if (!k->slots) return TT_ERR_MEMORY;
    memset(k->slots, 0xFF, slots * sizeof *k->slots);
    /* a token that is there twice has the id of the last, as in transformers */
    for (int id = 0; id < k->size; id++) {
        const tt__wordpiece *piece = &k->pieces[id];
        const char *token = text + piece->start;
        uint32_t hash = tt__vocab_hash(token, piece->bytes, piece->continues);
        tt__bucket *slot = &k->slots[tt__vocab_slot(k, token, piece->bytes, piece->continues, hash)];
        slot->hash = hash;
        slot->id = id;
        if (piece->bytes <= TT__WORD_BYTES) k->longest = (int)tt__max(k->longest, (int64_t)piece->bytes);
    }
    for (int i = 0; i < TT__COUNT(tt__special_tokens); i++) {
        k->special[i] = tt__vocab_find(k, tt__special_tokens[i]);
        if (i <= TT__SEP && k->special[i] < 0)
            return tt__fail(ctx, TT_ERR_FORMAT, "'%s' has no %s among its %d tokens: is it the vocab.txt of "
                            "a BERT, one token a line?", path, tt__special_tokens[i], k->size);
    }
    return TT_OK;
}

tt_tokenizer *tt_tokenizer_open(tt_context *ctx, const char *vocab_path, bool lowercase)
{
    tt_tokenizer *k = (tt_tokenizer *)tt__calloc(ctx, sizeof *k);
    if (!k) return NULL;
    k->ctx = ctx;
    k->lowercase = lowercase;
    k->unicode = tt__unicode_new(ctx);
    if (!k->unicode || tt__vocab_read(k, vocab_path) != TT_OK) {
        tt_tokenizer_free(k);
        return NULL;
    }
    for (uint32_t c = 0; c < 128; c++) {
        char one[2] = {(char)c, 0};
        bool upper = c >= 'A' && c <= 'Z';
        k->classes[c] = (uint8_t)tt__class(k->unicode, c);
        if (k->classes[c] == TT__CLASS_LETTER) k->classes[c] = (uint8_t)(upper && lowercase ? c + 32 : c);
        int id = c ? tt__vocab_find(k, one) : -1;
        k->punctuation[c] = id < 0 ? k->special[TT__UNK] : id;
    }
    for (uint32_t c = 0; c < TT__LOW; c++) k->low[c] = (uint8_t)tt__class(k->unicode, c);
    k->classes[(int)'['] = TT__CLASS_LETTER; /* it may begin a special token */
    static const int roles[TT__COUNT(tt__special_tokens)] = {TT_TOKEN_UNK, TT_TOKEN_CLS, TT_TOKEN_SEP,
                                                             TT_TOKEN_PAD, TT_TOKEN_MASK};
    for (int i = 0; i < TT_TOKEN_COUNT; i++) k->roles[i] = -1;
    for (int i = 0; i < TT__COUNT(roles); i++) k->roles[roles[i]] = k->special[i];
    k->before[0] = k->special[TT__CLS];
    k->behind[0] = k->special[TT__SEP];
    k->n_before = k->n_behind = 1;
    return k;
}

/* Opens a file of a folder, if it is there; else j->count is 0. path: the file's, which j keeps. j is to be
   freed in any case. */
static tt_status tt__json_open_if_there(tt__json *j, tt_context *ctx, char path[TT__PATH], const char *folder,
                                        const char *file)
{
    bool there = false;
    memset(j, 0, sizeof *j);
    tt_status status = tt__path_join(ctx, path, folder, file);
    if (status == TT_OK) status = tt__folder_has(ctx, folder, file, &there);
    return status == TT_OK && there ? tt__json_open(j, ctx, path) : status;
}

/* What of tokenizer_config.json changes ids. */
static tt_status tt__tokenizer_config(const tt__json *j, bool *lowercase)
{
    tt_status status = TT_OK;
    bool accents = true, cjk = true, basic = true, split_special = false;
    const struct { const char *key; bool *to; } members[] = {
        {"do_lower_case", lowercase}, {"strip_accents", &accents}, {"tokenize_chinese_chars", &cjk},
        {"do_basic_tokenize", &basic}, {"split_special_tokens", &split_special}};
    if (j->nodes[0].kind != TT__JSON_OBJECT)
        return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s' is %s; expected a JSON object", j->path,
                        tt__json_kind_name(j, 0));
    for (int k = 0; k < TT__COUNT(members) && status == TT_OK; k++) {
        status = tt__json_read_bool(j, 0, members[k].key, members[k].to);
        if (k == 0) accents = *lowercase; /* strip_accents follows do_lower_case when it is null */
    }
    const char *unsupported = accents != *lowercase ? "\"strip_accents\" is not as do_lower_case"
                            : !cjk                  ? "\"tokenize_chinese_chars\" is false"
                            : !basic                ? "\"do_basic_tokenize\" is false"
                            : split_special         ? "\"split_special_tokens\" is true" : NULL;
    if (status != TT_OK || !unsupported) return status;
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': %s, which this tokenizer does not do", j->path,
                    unsupported);
}
