#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/utf8.h"
#include "../files/json.h"
#include "types.h"

/* ------------------------------------------------------------------------------ tokenizer: tokenizer.json */

/* Returns the characters of a JSON string, which may contain a NUL. Sets *bytes to their number. Returns NULL
   if the node is not a string. */
static const char *tt__json_bytes(const tt__json *j, int node, size_t *bytes)
{
    if (node < 0 || j->nodes[node].kind != TT__JSON_STRING) return NULL;
    *bytes = (size_t)j->nodes[node].count;
    return j->pool + j->nodes[node].integer;
}

/* Copies a text into memory that lives as long as tokenizer k. */
static tt_status tt__keep_text(tt_tokenizer *k, const tt__json *j, const char *from, size_t bytes,
                               const char **text)
{
    *text = tt__chunks_text(k->ctx, &k->chunks, from, bytes);
    return *text ? TT_OK : tt__fail(k->ctx, TT_ERR_MEMORY, "out of memory for the texts of '%s': free memory",
                                    j->path);
}

/* Reads member `key` of a JSON object, a string of at least one character, and copies the string into memory
   that lives as long as tokenizer k. */
static tt_status tt__read_text(tt_tokenizer *k, const tt__json *j, int object, const char *key,
                               const char **text, size_t *bytes)
{
    tt_status status;
    const char expected[] = "a string of at least one character";
    int node = tt__json_member(j, object, key, true, 1 << TT__JSON_STRING, expected, &status);
    if (node < 0) return status;
    const char *from = tt__json_bytes(j, node, bytes);
    return *bytes ? tt__keep_text(k, j, from, *bytes, text) : tt__json_wrong(j, key, node, "\"\"", expected);
}

static tt_status tt__unsupported(const tt__json *j, int node, const char *what, const char *name,
                                 const char *known)
{
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s', byte %zu: the %s %.200s is not supported; expected "
                    "%s: use a model with another tokenizer", j->path, j->base + j->nodes[node].offset, what,
                    name, known);
}

typedef struct tt__step_name { const char *type; tt__step_kind kind; } tt__step_name;

/* Adds to `steps` the step whose type has the name `type`. Returns NULL after an error: `names` lacks the
   type, or there are too many steps. */
static tt__text_step *tt__read_step(const tt__json *j, int node, const char *what, const char *type,
                               const tt__step_name *names, int n, const char *known, tt__step_list *steps)
{
    int at = 0;
    while (at < n && strcmp(type, names[at].type) != 0) at++;
    if (at == n) tt__unsupported(j, node, what, type, known);
    else if (steps->n == TT__STEP_LIMIT)
        tt__unsupported(j, node, "step", "that begins here", "at most 16 steps of a kind");
    if (at == n || steps->n == TT__STEP_LIMIT) return NULL;
    tt__text_step *s = &steps->all[steps->n++];
    memset(s, 0, sizeof *s);
    s->kind = names[at].kind;
    return s;
}

typedef tt_status (*tt__reader)(tt_tokenizer *k, const tt__json *j, int node);

/* Reads the components of a Sequence from its array `key`, in order, by function `read`. */
static tt_status tt__read_sequence(tt_tokenizer *k, const tt__json *j, int node, const char *key,
                                  tt__reader read)
{
    tt_status status;
    int list = tt__json_member(j, node, key, true, 1 << TT__JSON_ARRAY, "an array", &status);
    for (int i = 0, child = list + 1; list >= 0 && i < j->nodes[list].count && status == TT_OK; i++) {
        status = read(k, j, child);
        child = j->nodes[child].after;
    }
    return status;
}

/* Returns the "type" of a component; NULL if the component is null. If the component is a Sequence, reads the
   Sequence's components, in the array `key`, by function `read`, and returns NULL. Returns NULL after an
   error, too. */
static const char *tt__read_type(tt_tokenizer *k, const tt__json *j, int node, const char *what,
                                 const char *key, tt__reader read, tt_status *status)
{
    const char *type = tt__json_text(j, tt__json_get(j, node, "type"));
    *status = TT_OK;
    if (j->nodes[node].kind == TT__JSON_NULL) return NULL;
    if (type && strcmp(type, "Sequence") != 0) return type;
    *status = type ? tt__read_sequence(k, j, node, key, read)
            : tt__fail(j->ctx, TT_ERR_FORMAT, "'%s', byte %zu: the %s is %s without a \"type\"; expected an "
                       "object that has one", j->path, j->base + j->nodes[node].offset, what,
                       tt__json_kind_name(j, node));
    return NULL;
}

/* Reads a Replace normalizer, {"pattern": {"String": from}, "content": to}. A known regular expression may
   take the place of {"String": from}. */
static tt_status tt__read_replace(tt_tokenizer *k, const tt__json *j, int node, tt__text_step *s)
{
    static const char expected[] = "{\"String\": ...}, or the \"Regex\" \" {2,}\" or \"\\n\"";
    tt_status status;
    int pattern = tt__json_member(j, node, "pattern", true, 1 << TT__JSON_OBJECT, expected, &status);
    if (pattern < 0) return status;
    const char *regex = tt__json_text(j, tt__json_get(j, pattern, "Regex"));
    const bool spaces = regex && strcmp(regex, " {2,}") == 0;
    if (spaces || (regex && (strcmp(regex, "\\n") == 0 || strcmp(regex, "\n") == 0))) {
        s->kind = spaces ? TT__STEP_SPACES : TT__STEP_REPLACE;
        s->from = spaces ? "  " : "\n";
        s->from_bytes = strlen(s->from);
    } else if (tt__json_get(j, pattern, "String") < 0) {
        return tt__unsupported(j, pattern, "pattern of a Replace,", regex ? regex : "none,", expected);
    } else {
        status = tt__read_text(k, j, pattern, "String", &s->from, &s->from_bytes);
    }
    const char *to = tt__json_bytes(j, tt__json_get(j, node, "content"), &s->to_bytes);
    if (status != TT_OK) return status;
    if (to) return tt__keep_text(k, j, to, s->to_bytes, &s->to);
    return tt__fail(k->ctx, TT_ERR_FORMAT, "'%s', byte %zu: a Replace has no \"content\"; expected a string",
                    j->path, j->base + j->nodes[node].offset);
}

/* Returns the value of a base-64 digit (RFC 4648). Returns -1 if c is not a digit. */
static int tt__base64_digit(char c)
{
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Reads {"precompiled_charsmap": ...}. The string encodes in base 64: the trie's number of bytes, the trie,
   and the replacing texts, each of which ends with a NUL. */
static tt_status tt__read_precompiled(tt_tokenizer *k, const tt__json *j, int node, tt__text_step *s)
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
    uint8_t *all = (uint8_t *)tt__chunks_take(k->ctx, &k->chunks, n / 4 * 3 + 4);
    if (!all)
        return tt__fail(k->ctx, TT_ERR_MEMORY, "out of memory for the texts of '%s': free memory", j->path);
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
                              "the normalization rules as SentencePiece compiles them: if the file is "
                              "damaged, copy it from the model's origin again");
    all[bytes] = 0;
    s->from = (const char *)all + 4;
    s->from_bytes = trie;
    s->to = s->from + trie;
    s->to_bytes = bytes - 4 - trie;
    if (tt__utf8_invalid(s->to, s->to_bytes) < s->to_bytes)
        return tt__json_wrong(j, key, member, "a list with texts that are not UTF-8", "UTF-8");
    return TT_OK;
}

/* Reads the options of BERT's normalizer: "clean_text", "handle_chinese_chars", "lowercase" and
   "strip_accents" (null: the value of "lowercase"). */
static tt_status tt__read_bert(tt_tokenizer *k, const tt__json *j, int node)
{
    bool clean = true, cjk = true, lower = true, accents = true;
    tt_status status = tt__json_read_bool(j, node, "clean_text", &clean);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "handle_chinese_chars", &cjk);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "lowercase", &lower);
    accents = lower;
    if (status == TT_OK) status = tt__json_read_bool(j, node, "strip_accents", &accents);
    const struct { bool asked; tt__step_name name; } steps[] = {
        {clean, {"", TT__STEP_CLEAN}}, {cjk, {"", TT__STEP_CJK}}, {accents, {"", TT__STEP_NFD}},
        {accents, {"", TT__STEP_NONSPACING}}, {lower, {"", TT__STEP_LOWER}}};
    for (int i = 0; i < TT__COUNT(steps) && status == TT_OK; i++)
        if (steps[i].asked && !tt__read_step(j, node, "", "", &steps[i].name, 1, "", &k->normalize))
            status = TT_ERR_UNSUPPORTED;
    return status;
}

static tt_status tt__read_normalizer(tt_tokenizer *k, const tt__json *j, int node)
{
    static const tt__step_name names[] = {
        {"NFC", TT__STEP_NFC}, {"Prepend", TT__STEP_PREPEND}, {"Replace", TT__STEP_REPLACE},
        {"Strip", TT__STEP_TRIM}, {"Precompiled", TT__STEP_PRECOMPILED}, {"NFD", TT__STEP_NFD},
        {"NFKD", TT__STEP_NFKD}, {"StripAccents", TT__STEP_ACCENTS}, {"Lowercase", TT__STEP_LOWER}};
    tt_status status;
    const char *type = tt__read_type(k, j, node, "normalizer", "normalizers", tt__read_normalizer, &status);
    if (!type) return status;
    if (strcmp(type, "BertNormalizer") == 0) return tt__read_bert(k, j, node);
    tt__text_step *s = tt__read_step(j, node, "normalizer", type, names, TT__COUNT(names),
                                "Sequence, NFC, NFD, NFKD, StripAccents, Lowercase, Prepend, Replace, "
                                "Strip, Precompiled or BertNormalizer", &k->normalize);
    if (!s) return j->ctx->status;
    if (s->kind == TT__STEP_PREPEND) return tt__read_text(k, j, node, "prepend", &s->to, &s->to_bytes);
    if (s->kind == TT__STEP_REPLACE) return tt__read_replace(k, j, node, s);
    if (s->kind == TT__STEP_PRECOMPILED) return tt__read_precompiled(k, j, node, s);
    if (s->kind != TT__STEP_TRIM) return TT_OK;
    status = tt__json_read_bool(j, node, "strip_left", &s->left);
    return status == TT_OK ? tt__json_read_bool(j, node, "strip_right", &s->right) : status;
}

/* The regular expressions that splitters support, each with its step and options. */
static const struct { const char *regex; tt__step_name name; tt__pattern pattern; } tt__patterns[] = {
    {"[0-9][0-9][0-9]", {"", TT__STEP_TRIPLES}, {false, false, false, 0}}, /* Falcon */
    {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     {"", TT__STEP_REGEX}, {false, false, false, 0}}, /* GPT-2 */
    {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
     "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     {"", TT__STEP_REGEX}, {true, true, true, 3}}, /* LLaMA 3 */
    {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
     "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", {"", TT__STEP_REGEX}, {true, true, true, 1}}, /* Qwen2 */
    {"'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|"
     "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+",
     {"", TT__STEP_REGEX}, {true, true, true, 3}}, /* cl100k */
    {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}|"
     " ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+",
     {"", TT__STEP_REGEX}, {true, true, true, 3}},
};
static tt_status tt__read_split(tt_tokenizer *k, const tt__json *j, int node)
{
    tt_status status;
    const char *behavior = "", *regex = NULL;
    bool invert = false;
    int known = 0;
    int pattern = tt__json_member(j, node, "pattern", true, 1 << TT__JSON_OBJECT, "{\"Regex\": ...}",
                                  &status);
    if (status == TT_OK) status = tt__json_read_string(j, node, "behavior", true, &behavior);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "invert", &invert);
    if (status != TT_OK) return status;
    regex = tt__json_text(j, tt__json_get(j, pattern, "Regex"));
    const char *string = tt__json_text(j, tt__json_get(j, pattern, "String"));
    const tt__text_step *last = k->normalize.n ? &k->normalize.all[k->normalize.n - 1] : NULL;
    const bool no_spaces = last && last->kind == TT__STEP_REPLACE && last->from_bytes == 1 &&
                           *last->from == ' ' && !memchr(last->to, ' ', last->to_bytes);
    if (string && strcmp(string, " ") == 0 && no_spaces) return TT_OK; /* Gemma's Split: a normalizer has
                                                                          replaced the spaces, so nothing is
                                                                          split */
    while (known < TT__COUNT(tt__patterns) && !(regex && strcmp(regex, tt__patterns[known].regex) == 0))
        known++;
    if (known == TT__COUNT(tt__patterns))
        return tt__unsupported(j, pattern, "pattern of a Split,", regex ? regex : "a String,",
                               "the regular expression of GPT-2, LLaMA 3, Qwen2, cl100k or Falcon");
    const tt__step_name *name = &tt__patterns[known].name;
    const bool isolated = strcmp(behavior, "Isolated") == 0, removed = strcmp(behavior, "Removed") == 0;
    const bool whole = name->kind == TT__STEP_REGEX; /* every character of a text is in some match */
    if (whole ? !isolated && !(removed && invert) : !isolated || invert)
        return tt__unsupported(j, node, "behavior of a Split,", behavior,
                               "Isolated, or Removed with \"invert\"");
    tt__text_step *s = tt__read_step(j, node, "", "", name, 1, "", &k->split);
    if (!s) return TT_ERR_UNSUPPORTED;
    s->pattern = tt__patterns[known].pattern;
    if (whole && k->mapped_at < k->split.n - 1)
        return tt__unsupported(j, node, "place of a Split,", "after ByteLevel,", "a Split before ByteLevel");
    return TT_OK;
}

/* Reads "replacement" and "prepend_scheme" of a Metaspace splitter; older files have "add_prefix_space"
   instead of "prepend_scheme". */
static tt_status tt__read_metaspace(tt_tokenizer *k, const tt__json *j, int node, const char **mark,
                                    size_t *bytes, const char **scheme)
{
    bool prefix = true;
    size_t at = 0;
    *scheme = "always";
    tt_status status = tt__read_text(k, j, node, "replacement", mark, bytes);
    if (status == TT_OK) status = tt__json_read_string(j, node, "prepend_scheme", false, scheme);
    if (status == TT_OK) status = tt__json_read_bool(j, node, "add_prefix_space", &prefix);
    if (status != TT_OK) return status;
    if (tt__utf8_next(*mark, *bytes, &at) == TT__INVALID || at != *bytes)
        return tt__unsupported(j, node, "replacement", *mark, "one character");
    if (!prefix) *scheme = "never";
    if (strcmp(*scheme, "always") != 0 && strcmp(*scheme, "first") != 0 && strcmp(*scheme, "never") != 0)
        return tt__unsupported(j, node, "prepend_scheme", *scheme, "always, first or never");
    return TT_OK;
}

static tt_status tt__read_splitter(tt_tokenizer *k, const tt__json *j, int node)
{
    static const tt__step_name names[] = {
        {"ByteLevel", TT__STEP_BYTES}, {"Metaspace", TT__STEP_METASPACE}, {"Digits", TT__STEP_DIGITS},
        {"Punctuation", TT__STEP_PUNCTUATION}, {"WhitespaceSplit", TT__STEP_WHITE},
        {"BertPreTokenizer", TT__STEP_BERT}};
    tt_status status;
    const char *behavior = "Isolated", *scheme;
    const char *type = tt__read_type(k, j, node, "pre_tokenizer", "pretokenizers", tt__read_splitter,
                                     &status);
    if (!type) return status;
    if (strcmp(type, "Split") == 0) return tt__read_split(k, j, node);
    tt__text_step *s = tt__read_step(j, node, "pre_tokenizer", type, names, TT__COUNT(names),
                                "Sequence, ByteLevel, Split, Digits, Punctuation, WhitespaceSplit, "
                                "Metaspace or BertPreTokenizer", &k->split);
    if (!s) return j->ctx->status;
    const int place = k->split.n - 1;
    const bool of_classes = s->kind == TT__STEP_DIGITS || s->kind == TT__STEP_PUNCTUATION;
    if (s->kind == TT__STEP_BYTES && k->model.kind != TT__MODEL_BPE)
        return tt__unsupported(j, node, "pre_tokenizer", type, "one that does not map bytes");
    if (!of_classes && k->mapped_at < place)
        return tt__unsupported(j, node, "pre_tokenizer", type, "none after ByteLevel");
    s->splits = true;
    switch (s->kind) {
    case TT__STEP_BYTES:
        k->mapped_at = place;
        status = tt__json_read_bool(j, node, "add_prefix_space", &s->prefix_space);
        return status == TT_OK ? tt__json_read_bool(j, node, "use_regex", &s->splits) : status;
    case TT__STEP_DIGITS: return tt__json_read_bool(j, node, "individual_digits", &s->each);
    case TT__STEP_PUNCTUATION:
        status = tt__json_read_string(j, node, "behavior", false, &behavior);
        s->each = strcmp(behavior, "Isolated") == 0;
        if (status == TT_OK && !s->each && strcmp(behavior, "Contiguous") != 0)
            return tt__unsupported(j, node, "behavior of Punctuation,", behavior, "Isolated or Contiguous");
        return status;
    case TT__STEP_METASPACE:
        for (int i = 0; i < place; i++)
            if (k->split.all[i].kind == TT__STEP_METASPACE)
                return tt__unsupported(j, node, "pre_tokenizer", "Metaspace after Metaspace",
                                       "only one Metaspace");
        status = tt__read_metaspace(k, j, node, &s->to, &s->to_bytes, &scheme);
        if (status == TT_OK) status = tt__json_read_bool(j, node, "split", &s->splits);
        if (status != TT_OK) return status;
        s->prefix_always = strcmp(scheme, "always") == 0;
        s->prefix_first = strcmp(scheme, "first") == 0;
        s->from = " ";
        s->from_bytes = 1;
        return TT_OK;
    default: return TT_OK;
    }
}

static tt_status tt__read_decoder(tt_tokenizer *k, const tt__json *j, int node)
{
    static const tt__step_name names[] = {
        {"ByteLevel", TT__STEP_BYTES}, {"Replace", TT__STEP_REPLACE}, {"Fuse", TT__STEP_FUSE},
        {"ByteFallback", TT__STEP_BYTE_FALLBACK}, {"Strip", TT__STEP_STRIP},
        {"Metaspace", TT__STEP_METASPACE}, {"WordPiece", TT__STEP_WORDPIECE}};
    tt_status status;
    const char *scheme;
    size_t at = 0;
    k->finish.decodes |= j->nodes[node].kind != TT__JSON_NULL;
    const char *type = tt__read_type(k, j, node, "decoder", "decoders", tt__read_decoder, &status);
    if (!type) return status;
    tt__text_step *s = tt__read_step(j, node, "decoder", type, names, TT__COUNT(names),
                                "Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace or "
                                "WordPiece", &k->finish.decode);
    if (!s) return j->ctx->status;
    switch (s->kind) {
    case TT__STEP_REPLACE: return tt__read_replace(k, j, node, s);
    case TT__STEP_METASPACE:
        status = tt__read_metaspace(k, j, node, &s->from, &s->from_bytes, &scheme);
        if (status != TT_OK) return status;
        s->prefix_first = strcmp(scheme, "never") != 0;
        s->to = " ";
        s->to_bytes = 1;
        return TT_OK;
    case TT__STEP_WORDPIECE:
        s->each = true;
        status = tt__read_text(k, j, node, "prefix", &s->from, &s->from_bytes);
        return status == TT_OK ? tt__json_read_bool(j, node, "cleanup", &s->each) : status;
    case TT__STEP_STRIP:
        status = tt__read_text(k, j, node, "content", &s->from, &s->from_bytes);
        if (status == TT_OK) status = tt__json_read_int(j, node, "start", true, 0, INT32_MAX, &s->start);
        if (status == TT_OK) status = tt__json_read_int(j, node, "stop", true, 0, INT32_MAX, &s->stop);
        if (status != TT_OK) return status;
        if (tt__utf8_next(s->from, s->from_bytes, &at) == TT__INVALID || at != s->from_bytes)
            return tt__unsupported(j, node, "content of a Strip,", s->from, "one character");
        return TT_OK;
    default: return TT_OK;
    }
}

/* Reads the id at `node`. Fails unless the id is in 0..TT__IDS_LIMIT - 1. what: the token, for messages. */
static tt_status tt__read_id(const tt__json *j, int node, const char *what, int *id)
{
    const tt__json_node *at = &j->nodes[node];
    const bool integer = at->kind == TT__JSON_NUMBER_KIND && at->exact;
    *id = 0;
    if (integer && at->integer >= 0 && at->integer < TT__IDS_LIMIT) return *id = (int)at->integer, TT_OK;
    return tt__fail(j->ctx, TT_ERR_FORMAT,
                    "'%s', byte %zu: the id of %s is %s; expected an integer from 0 to %d", j->path,
                    j->base + at->offset, what, integer ? "out of range" : tt__json_kind_name(j, node),
                    TT__IDS_LIMIT - 1);
}
