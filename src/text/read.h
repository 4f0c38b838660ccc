#pragma once
#include "../base/base.h"
#include "../ops/linear/cpu_packing.h"
#include "../files/lists.h"
#include "../files/utf8.h"
#include "../files/json.h"
#include "unicode.h"
#include "vocabulary.h"
#include "bpe.h"

/* ---- reading tokenizer.json */

/* A string of JSON, which may hold a NUL; NULL for another kind. */
static const char *tt__json_bytes(const tt__json *j, int node, size_t *bytes)
{
    if (node < 0 || j->nodes[node].kind != TT__JSON_STRING) return NULL;
    *bytes = (size_t)j->nodes[node].count;
    return j->pool + j->nodes[node].integer;
}

/* The string `key` of an object, of at least one character; kept as long as b. */
static tt_status tt__bpe_string(tt__bpe *b, const tt__json *j, int object, const char *key, const char **text,
                                size_t *bytes)
{
    tt_status status;
    const char expected[] = "a string of at least one character";
    int node = tt__json_member(j, object, key, true, 1 << TT__JSON_STRING, expected, &status);
    if (node < 0) return status;
    const char *from = tt__json_bytes(j, node, bytes);
    if (!*bytes) return tt__json_wrong(j, key, node, "\"\"", expected);
    *text = tt__chunks_text(b->ctx, &b->chunks, from, *bytes);
    return *text ? TT_OK : tt__fail(b->ctx, TT_ERR_MEMORY, "out of memory for the texts of '%s'", j->path);
}

/* The "type" of a component of a tokenizer; NULL and an error where it has none. */
static const char *tt__bpe_type(const tt__json *j, int node, const char *what)
{
    const char *type = tt__json_text(j, tt__json_get(j, node, "type"));
    if (!type)
        tt__fail(j->ctx, TT_ERR_FORMAT, "'%s', byte %zu: the %s is %s without a \"type\"; expected an object "
                 "that has one", j->path, j->base + j->nodes[node].offset, what, tt__json_kind_name(j, node));
    return type;
}

static tt_status tt__bpe_unknown(const tt__json *j, int node, const char *what, const char *name,
                                 const char *known)
{
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s', byte %zu: the %s %.200s is not supported; expected %s",
                    j->path, j->base + j->nodes[node].offset, what, name, known);
}

static tt__stage *tt__bpe_stage(const tt__json *j, int node, tt__stage *stages, int *n, tt__stage_kind kind)
{
    if (*n == TT__BPE_STAGES) {
        tt__bpe_unknown(j, node, "step", "that begins here", "at most 16 steps of a kind");
        return NULL;
    }
    tt__stage *s = &stages[(*n)++];
    memset(s, 0, sizeof *s);
    s->kind = kind;
    return s;
}

typedef tt_status (*tt__bpe_reader)(tt__bpe *b, const tt__json *j, int node);

/* Reads the members of a Sequence, the array `key`, one after the other. */
static tt_status tt__bpe_sequence(tt__bpe *b, const tt__json *j, int node, const char *key,
                                  tt__bpe_reader read)
{
    tt_status status;
    int list = tt__json_member(j, node, key, true, 1 << TT__JSON_ARRAY, "an array", &status);
    for (int i = 0, child = list + 1; list >= 0 && i < j->nodes[list].count && status == TT_OK; i++) {
        status = read(b, j, child);
        child = j->nodes[child].after;
    }
    return status;
}

/* {"pattern": {"String": from}, "content": to}, or a regular expression instead of a String */
static tt_status tt__bpe_replace(tt__bpe *b, const tt__json *j, int node, tt__stage *s)
{
    static const char expected[] = "{\"String\": ...}, or the \"Regex\" \" {2,}\" or \"\\n\"";
    tt_status status;
    const char *to = NULL;
    int pattern = tt__json_member(j, node, "pattern", true, 1 << TT__JSON_OBJECT, expected, &status);
    if (pattern < 0) return status;
    const char *regex = tt__json_text(j, tt__json_get(j, pattern, "Regex"));
    const bool spaces = regex && strcmp(regex, " {2,}") == 0;
    if (spaces || (regex && (strcmp(regex, "\\n") == 0 || strcmp(regex, "\n") == 0))) {
        s->kind = spaces ? TT__STAGE_SPACES : TT__STAGE_REPLACE;
        s->from = spaces ? "  " : "\n";
        s->from_bytes = strlen(s->from);
    } else if (tt__json_get(j, pattern, "String") < 0) {
        return tt__bpe_unknown(j, pattern, "pattern of a Replace,", regex ? regex : "none,", expected);
    } else {
        status = tt__bpe_string(b, j, pattern, "String", &s->from, &s->from_bytes);
    }
    int content = tt__json_get(j, node, "content");
    if (status != TT_OK) return status;
    if (!(to = tt__json_bytes(j, content, &s->to_bytes)))
        return tt__fail(b->ctx, TT_ERR_FORMAT, "'%s', byte %zu: a Replace needs \"content\", a string",
                        j->path,
                        j->base + j->nodes[node].offset);
    s->to = tt__chunks_text(b->ctx, &b->chunks, to, s->to_bytes);
    return s->to ? TT_OK : tt__fail(b->ctx, TT_ERR_MEMORY, "out of memory for the texts of '%s'", j->path);
}

/* A digit of base 64 (RFC 4648); -1: none. */
static int tt__base64_digit(char c)
{
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* {"precompiled_charsmap": base 64 of the bytes of a trie, that trie, and texts with a NUL behind each} */
static tt_status tt__bpe_precompiled(tt__bpe *b, const tt__json *j, int node, tt__stage *s)
{
    static const char key[] = "precompiled_charsmap";
    tt_status status;
    const char *digits = NULL;
    size_t n = 0, bytes = 0;
    uint32_t trie = 0, held = 0;
    int bits = 0;
    bool valid = true;
    const int member = tt__json_member(j, node, key, true, 1 << TT__JSON_STRING, "a string", &status);
    if (member < 0) return status;
    digits = tt__json_bytes(j, member, &n);
    uint8_t *all = (uint8_t *)tt__chunks_take(b->ctx, &b->chunks, n / 4 * 3 + 4);
    if (!all) return tt__fail(b->ctx, TT_ERR_MEMORY, "out of memory for the texts of '%s'", j->path);
    for (int end = 0; end < 2 && n && digits[n - 1] == '='; end++) n--;
    for (size_t i = 0; i < n && valid; i++) {
        const int digit = tt__base64_digit(digits[i]);
        valid = digit >= 0;
        held = held << 6 | (uint32_t)(digit & 63);
        bits += 6;
        if (bits >= 8) all[bytes++] = (uint8_t)(held >> (bits -= 8));
    }
    if (valid && bytes >= 4) memcpy(&trie, all, 4);
    if (!valid || trie < 4 || trie % 4 || trie > bytes - 4)
        return tt__json_wrong(j, key, member, valid ? "not a trie with its size before it" : "not in base 64",
                              "what SentencePiece compiles from the rules of a normalization");
    all[bytes] = 0;
    s->from = (const char *)all + 4;
    s->from_bytes = trie;
    s->to = s->from + trie;
    s->to_bytes = bytes - 4 - trie;
    if (tt__utf8_invalid(s->to, s->to_bytes) < s->to_bytes)
        return tt__json_wrong(j, key, member, "of texts that are not UTF-8", "UTF-8");
    return TT_OK;
}

/* What classes of characters there are for BERT's stages. */
static tt_status tt__bpe_classes_of_bert(tt__bpe *b)
{
    if (b->low) return TT_OK;
    b->unicode = tt__unicode_new(b->ctx);
    b->low = b->unicode ? (uint8_t *)tt__alloc(b->ctx, TT__LOW) : NULL;
    for (uint32_t c = 0; c < TT__LOW && b->low; c++) b->low[c] = (uint8_t)tt__class(b->unicode, c);
    return b->low ? TT_OK : TT_ERR_MEMORY;
}

/* "clean_text", "handle_chinese_chars", "lowercase", "strip_accents" (null: as "lowercase") */
static tt_status tt__bpe_read_bert(tt__bpe *b, const tt__json *j, int node)
{
    bool clean = true, cjk = true, lower = true, accents = true;
    tt_status status = tt__json_read_bool(j, node, "clean_text", &clean);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "handle_chinese_chars", &cjk);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "lowercase", &lower);
    accents = lower;
    if (status == TT_OK) status = tt__json_read_bool(j, node, "strip_accents", &accents);
    if (status == TT_OK) status = tt__bpe_classes_of_bert(b);
    if (status != TT_OK) return status;
    const struct { bool asked; tt__stage_kind kind; } steps[] = {
        {clean, TT__STAGE_CLEAN}, {cjk, TT__STAGE_CJK}, {accents, TT__STAGE_NFD},
        {accents, TT__STAGE_NONSPACING}, {lower, TT__STAGE_LOWER}};
    for (int i = 0; i < TT__COUNT(steps); i++)
        if (steps[i].asked && !tt__bpe_stage(j, node, b->normalizers, &b->n_normalizers, steps[i].kind))
            return TT_ERR_UNSUPPORTED;
    return TT_OK;
}

static tt_status tt__bpe_read_normalizer(tt__bpe *b, const tt__json *j, int node)
{
    static const struct { const char *type; tt__stage_kind kind; } kinds[] = {
        {"NFC", TT__STAGE_NFC}, {"Prepend", TT__STAGE_PREPEND}, {"Replace", TT__STAGE_REPLACE},
        {"Strip", TT__STAGE_TRIM}, {"Precompiled", TT__STAGE_PRECOMPILED}, {"NFD", TT__STAGE_NFD},
        {"NFKD", TT__STAGE_NFKD}, {"StripAccents", TT__STAGE_ACCENTS}, {"Lowercase", TT__STAGE_LOWER}};
    int known = -1;
    tt_status status = TT_OK;
    if (j->nodes[node].kind == TT__JSON_NULL) return TT_OK;
    const char *type = tt__bpe_type(j, node, "normalizer");
    if (!type) return j->ctx->status;
    if (strcmp(type, "Sequence") == 0)
        return tt__bpe_sequence(b, j, node, "normalizers", tt__bpe_read_normalizer);
    if (strcmp(type, "BertNormalizer") == 0) return tt__bpe_read_bert(b, j, node);
    for (int i = 0; i < TT__COUNT(kinds); i++)
        if (strcmp(type, kinds[i].type) == 0) known = i;
    if (known < 0)
        return tt__bpe_unknown(j, node, "normalizer", type,
                               "Sequence, NFC, NFD, NFKD, StripAccents, Lowercase, Prepend, Replace, Strip, "
                               "Precompiled or BertNormalizer");
    tt__stage *s = tt__bpe_stage(j, node, b->normalizers, &b->n_normalizers, kinds[known].kind);
    if (!s) return TT_ERR_UNSUPPORTED;
    switch (s->kind) {
    case TT__STAGE_PREPEND: return tt__bpe_string(b, j, node, "prepend", &s->to, &s->to_bytes);
    case TT__STAGE_REPLACE: return tt__bpe_replace(b, j, node, s);
    case TT__STAGE_PRECOMPILED: return tt__bpe_precompiled(b, j, node, s);
    case TT__STAGE_TRIM:
        status = tt__json_read_bool(j, node, "strip_left", &s->left);
        return status == TT_OK ? tt__json_read_bool(j, node, "strip_right", &s->right) : status;
    default: return TT_OK;
    }
}

static tt_status tt__bpe_read_split(tt__bpe *b, const tt__json *j, int node)
{
    tt_status status;
    const char *behavior = "", *regex = NULL;
    bool invert = false;
    int pattern = tt__json_member(j, node, "pattern", true, 1 << TT__JSON_OBJECT, "{\"Regex\": ...}",
                                  &status);
    if (status == TT_OK) status = tt__json_read_string(j, node, "behavior", true, &behavior);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "invert", &invert);
    if (status != TT_OK) return status;
    regex = tt__json_text(j, tt__json_get(j, pattern, "Regex"));
    const bool triples = regex && strcmp(regex, tt__three_digits) == 0;
    const bool isolated = strcmp(behavior, "Isolated") == 0, removed = strcmp(behavior, "Removed") == 0;
    int known = -1;
    for (int i = 0; regex && i < TT__COUNT(tt__patterns); i++)
        if (strcmp(regex, tt__patterns[i].regex) == 0) known = i;
    if (known < 0 && !triples)
        return tt__bpe_unknown(j, pattern, "pattern of a Split,", regex ? regex : "a String,",
                               "the regular expression of GPT-2, LLaMA 3, Qwen2, cl100k or Falcon");
    /* The long patterns match every character: what lies between matches is nothing. */
    if (triples ? !isolated || invert : !isolated && !(removed && invert))
        return tt__bpe_unknown(j, node, "behavior of a Split,", behavior,
                               "Isolated, or Removed with \"invert\"");
    tt__stage *s = tt__bpe_stage(j, node, b->splitters, &b->n_splitters,
                                 triples ? TT__STAGE_TRIPLES : TT__STAGE_REGEX);
    if (!s) return TT_ERR_UNSUPPORTED;
    if (known >= 0) s->pattern = tt__patterns[known].pattern;
    if (known >= 0 && b->mapped_at < b->n_splitters - 1)
        return tt__bpe_unknown(j, node, "place of a Split,", "behind ByteLevel,", "it before ByteLevel");
    return TT_OK;
}

/* "replacement" and "prepend_scheme" of a Metaspace, or "add_prefix_space" of older files */
static tt_status tt__bpe_metaspace(tt__bpe *b, const tt__json *j, int node, const char **mark, size_t *bytes,
                                   const char **scheme)
{
    bool prefix = true;
    size_t at = 0;
    *scheme = "always";
    tt_status status = tt__bpe_string(b, j, node, "replacement", mark, bytes);
    if (status == TT_OK) status = tt__json_read_string(j, node, "prepend_scheme", false, scheme);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "add_prefix_space", &prefix);
    if (status != TT_OK) return status;
    if (tt__utf8_next(*mark, *bytes, &at) == TT__INVALID || at != *bytes)
        return tt__bpe_unknown(j, node, "replacement", *mark, "one character");
    if (!prefix) *scheme = "never";
    if (strcmp(*scheme, "always") != 0 && strcmp(*scheme, "first") != 0 && strcmp(*scheme, "never") != 0)
        return tt__bpe_unknown(j, node, "prepend_scheme", *scheme, "always, first or never");
    return TT_OK;
}

static tt_status tt__bpe_read_splitter(tt__bpe *b, const tt__json *j, int node)
{
    tt_status status = TT_OK;
    tt__stage *s;
    const char *behavior = "Isolated", *scheme;
    if (j->nodes[node].kind == TT__JSON_NULL) return TT_OK;
    const char *type = tt__bpe_type(j, node, "pre_tokenizer");
    if (!type) return j->ctx->status;
    if (strcmp(type, "Sequence") == 0)
        return tt__bpe_sequence(b, j, node, "pretokenizers", tt__bpe_read_splitter);
    if (strcmp(type, "Split") == 0) return tt__bpe_read_split(b, j, node);
    const bool bytes = strcmp(type, "ByteLevel") == 0, metaspace = strcmp(type, "Metaspace") == 0;
    const bool digits = strcmp(type, "Digits") == 0, punctuation = strcmp(type, "Punctuation") == 0;
    const bool white = strcmp(type, "WhitespaceSplit") == 0, bert = strcmp(type, "BertPreTokenizer") == 0;
    if (!bytes && !metaspace && !digits && !punctuation && !white && !bert)
        return tt__bpe_unknown(j, node, "pre_tokenizer", type, "Sequence, ByteLevel, Split, Digits, "
                               "Punctuation, WhitespaceSplit, Metaspace or BertPreTokenizer");
    if (bytes && (b->unigram || b->wordpiece))
        return tt__bpe_unknown(j, node, "pre_tokenizer", type, "none that maps bytes");
    if ((bytes || metaspace || white || bert) && b->mapped_at < b->n_splitters)
        return tt__bpe_unknown(j, node, "pre_tokenizer", type, "no other one behind ByteLevel");
    for (int i = 0; i < b->n_splitters && metaspace; i++)
        if (b->splitters[i].kind == TT__STAGE_METASPACE)
            return tt__bpe_unknown(j, node, "pre_tokenizer", "Metaspace behind Metaspace", "one of them");
    const int place = b->n_splitters;
    s = tt__bpe_stage(j, node, b->splitters, &b->n_splitters,
                      bytes ? TT__STAGE_BYTES : metaspace ? TT__STAGE_METASPACE
                      : digits ? TT__STAGE_DIGITS : white ? TT__STAGE_WHITE
                      : bert ? TT__STAGE_BERT : TT__STAGE_PUNCTUATION);
    if (!s) return TT_ERR_UNSUPPORTED;
    if (bytes) b->mapped_at = place;
    s->splits = true;
    if (bytes) {
        status = tt__json_read_bool(j, node, "add_prefix_space", &s->prefix_space);
        if (status == TT_OK) status = tt__json_read_bool(j, node, "use_regex", &s->splits);
    } else if (digits) {
        status = tt__json_read_bool(j, node, "individual_digits", &s->each);
    } else if (white || bert) {
        return bert ? tt__bpe_classes_of_bert(b) : TT_OK;
    } else if (punctuation) {
        status = tt__json_read_string(j, node, "behavior", false, &behavior);
        s->each = strcmp(behavior, "Isolated") == 0;
        if (status == TT_OK && !s->each && strcmp(behavior, "Contiguous") != 0)
            return tt__bpe_unknown(j, node, "behavior of Punctuation,", behavior, "Isolated or Contiguous");
    } else {
        status = tt__bpe_metaspace(b, j, node, &s->to, &s->to_bytes, &scheme);
        if (status == TT_OK) status = tt__json_read_bool(j, node, "split", &s->splits);
        if (status != TT_OK) return status;
        s->prefix_always = strcmp(scheme, "always") == 0;
        s->prefix_first = strcmp(scheme, "first") == 0;
        s->from = " ";
        s->from_bytes = 1;
    }
    return status;
}

static tt_status tt__bpe_read_decoder(tt__bpe *b, const tt__json *j, int node)
{
    static const struct { const char *type; tt__stage_kind kind; } kinds[] = {
        {"ByteLevel", TT__STAGE_BYTES}, {"Replace", TT__STAGE_REPLACE}, {"Fuse", TT__STAGE_FUSE},
        {"ByteFallback", TT__STAGE_BYTE_FALLBACK}, {"Strip", TT__STAGE_STRIP},
        {"Metaspace", TT__STAGE_METASPACE}, {"WordPiece", TT__STAGE_WORDPIECE}};
    const char *scheme;
    int known = -1;
    size_t at = 0;
    if (j->nodes[node].kind == TT__JSON_NULL) return TT_OK;
    const char *type = tt__bpe_type(j, node, "decoder");
    if (!type) return j->ctx->status;
    b->decodes = true;
    if (strcmp(type, "Sequence") == 0)
        return tt__bpe_sequence(b, j, node, "decoders", tt__bpe_read_decoder);
    for (int i = 0; i < TT__COUNT(kinds); i++)
        if (strcmp(type, kinds[i].type) == 0) known = i;
    if (known < 0)
        return tt__bpe_unknown(j, node, "decoder", type,
                               "Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace or "
                               "WordPiece");
    tt__stage *s = tt__bpe_stage(j, node, b->decoders, &b->n_decoders, kinds[known].kind);
    if (!s) return TT_ERR_UNSUPPORTED;
    if (s->kind == TT__STAGE_REPLACE) return tt__bpe_replace(b, j, node, s);
    if (s->kind == TT__STAGE_METASPACE) {
        tt_status status = tt__bpe_metaspace(b, j, node, &s->from, &s->from_bytes, &scheme);
        if (status != TT_OK) return status;
        s->prefix_first = strcmp(scheme, "never") != 0;
        s->to = " ";
        s->to_bytes = 1;
    } else if (s->kind == TT__STAGE_WORDPIECE) {
        s->each = true;
        tt_status status = tt__bpe_string(b, j, node, "prefix", &s->from, &s->from_bytes);
        return status == TT_OK ? tt__json_read_bool(j, node, "cleanup", &s->each) : status;
    } else if (s->kind == TT__STAGE_STRIP) {
        tt_status status = tt__bpe_string(b, j, node, "content", &s->from, &s->from_bytes);
        if (status == TT_OK) status = tt__json_read_int(j, node, "start", true, 0, INT32_MAX, &s->start);
        if (status == TT_OK) status = tt__json_read_int(j, node, "stop", true, 0, INT32_MAX, &s->stop);
        if (status != TT_OK) return status;
        if (tt__utf8_next(s->from, s->from_bytes, &at) == TT__INVALID || at != s->from_bytes)
            return tt__bpe_unknown(j, node, "content of a Strip,", s->from, "one character");
    }
    return TT_OK;
}
