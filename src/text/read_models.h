#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/utf8.h"
#include "../files/json.h"
#include "types.h"
#include "lookups.h"
#include "bpe.h"
#include "read.h"
#include "vocabulary.h"

/* ----------------------------------------------------------------------- tokenizer: reading of the models */

/* Returns the value of the JSON number at `at` as the JSON reader of the package `tokenizers` computes it:
   takes as many digits as fit into a 64-bit integer, and multiplies this integer by a power of ten. The
   result is not always the nearest double. The last bit of the result may decide how a word is divided into
   tokens. */
static double tt__unigram_score(const char *at)
{
    const bool negative = *at == '-';
    uint64_t digits = 0;
    int64_t exponent = 0, written = 0;
    bool point = false, full = false;
    char power[8];
    for (at += negative; (*at >= '0' && *at <= '9') || *at == '.'; at++) {
        const uint64_t digit = (uint64_t)(*at - '0');
        if (*at == '.') { point = true; continue; }
        full |= digits > (UINT64_MAX - digit) / 10;
        if (!full) digits = digits * 10 + digit;
        exponent += full ? !point : -(int64_t)point;
    }
    if (*at == 'e' || *at == 'E') {
        const bool below = *++at == '-';
        for (at += below || *at == '+'; *at >= '0' && *at <= '9' && written < 100000; at++)
            written = written * 10 + *at - '0';
        exponent += below ? -written : written;
    }
    double score = (double)digits;
    for (; exponent < -308 && score != 0; exponent += 308) score /= 1e308;
    if (exponent > 308 && score != 0) return HUGE_VAL;
    if (score != 0) {
        snprintf(power, sizeof power, "1e%d", (int)(exponent < 0 ? -exponent : exponent));
        if (exponent >= 0) score *= strtod(power, NULL);
        else score /= strtod(power, NULL);
    }
    return negative ? -score : score;
}

/* Reads the scores of Unigram's vocabulary. text: the text from which j was parsed. */
static tt_status tt__read_scores(tt_tokenizer *k, const tt__json *j, const char *text, int model)
{
    const int node = tt__json_get(j, model, "vocab");
    tt__token_model *m = &k->model;
    int id = 0;
    double min = HUGE_VAL;
    if (m->unk >= k->vocab.own)
        return tt__fail(k->ctx, TT_ERR_FORMAT,
                        "'%s': \"unk_id\" is %d, but must be below the vocabulary's %d tokens", j->path,
                        m->unk, k->vocab.own);
    m->scores = (double *)tt__alloc(k->ctx, (size_t)k->vocab.own * sizeof *m->scores);
    if (!m->scores) return TT_ERR_MEMORY;
    for (int child = node + 1; child < j->nodes[node].after; child = j->nodes[child].after, id++) {
        const tt__json_node *number = &j->nodes[j->nodes[child + 1].after];
        m->scores[id] = tt__unigram_score(text + number->offset);
        if (!isfinite(m->scores[id]))
            return tt__fail(k->ctx, TT_ERR_FORMAT, "'%s', byte %zu: the score of token %d is too large for a "
                            "double", j->path, j->base + number->offset, id);
        min = m->scores[id] < min ? m->scores[id] : min;
    }
    m->unk_score = min - 10; /* the penalty of SentencePiece (Kudo and Richardson 2018) */
    return TT_OK;
}

typedef struct tt__bpe_merging { /* path, offset, count: where the current merge is, for errors; joined:
                                    memory of `room` bytes for a joined text */
    const char *path;
    size_t offset, count;
    char *joined;
    size_t room;
} tt__bpe_merging;

/* Makes room for `count` merges. */
static tt_status tt__bpe_merges_begin(tt_tokenizer *k, size_t count, tt__bpe_merging *m)
{
    size_t slots = 64;
    int bits = 6;
    while (slots < 2 * count) slots *= 2, bits++;
    k->model.merge_shift = 64 - bits;
    k->model.merge_mask = slots - 1;
    m->count = 0;
    m->room = k->vocab.by_text.longest;
    m->joined = (char *)tt__chunks_take(k->ctx, &k->chunks, m->room + 1);
    k->model.merges = (tt__bpe_rule *)tt__alloc(k->ctx, slots * sizeof *k->model.merges);
    if (!m->joined || !k->model.merges)
        return tt__fail(k->ctx, TT_ERR_MEMORY, "out of memory for the %zu merges of '%s': free memory", count,
                        m->path);
    for (size_t i = 0; i < slots; i++) {
        const tt__bpe_rule none = {UINT64_MAX, UINT32_MAX, -1};
        k->model.merges[i] = none;
    }
    return TT_OK;
}

/* Adds the next merge: tokens `left` and `right` become the token that has their texts joined. */
static tt_status tt__bpe_merge_add(tt_tokenizer *k, tt__bpe_merging *m, const char *left, size_t left_bytes,
                                   const char *right, size_t right_bytes)
{
    const int l = tt__token_find(&k->vocab.by_text, left, left_bytes);
    const int r = tt__token_find(&k->vocab.by_text, right, right_bytes);
    int id = -1;
    if (l >= 0 && r >= 0 && left_bytes + right_bytes <= m->room) {
        memcpy(m->joined, left, left_bytes);
        memcpy(m->joined + left_bytes, right, right_bytes);
        id = tt__token_find(&k->vocab.by_text, m->joined, left_bytes + right_bytes);
    }
    if (id < 0)
        return tt__fail(k->ctx, TT_ERR_FORMAT, "'%s', byte %zu: merge %zu joins '%.100s' and '%.100s', but "
                        "the vocabulary lacks %s: take vocabulary and merges from one tokenizer", m->path,
                        m->offset, m->count, left, right, l >= 0 && r >= 0 ? "the result" : "one of them");
    tt__bpe_rule *to = &k->model.merges[tt__bpe_merge(k, l, r) - k->model.merges];
    to->pair = (uint64_t)(uint32_t)l << 32 | (uint32_t)r;
    to->rank = (uint32_t)m->count++;
    to->id = id;
    /* If a run of U+2581 begins inside a merge's result, words cannot be cut where such runs begin. */
    for (size_t i = 1; k->model.cuts && i + 3 <= left_bytes + right_bytes; i++)
        if (memcmp(m->joined + i, "\xE2\x96\x81", 3) == 0 &&
            (i < 3 || memcmp(m->joined + i - 3, "\xE2\x96\x81", 3) != 0)) k->model.cuts = false;
    return TT_OK;
}

/* Reads merges: [["a", "b"], ...], or ["a b", ...] in older files. */
static tt_status tt__read_merges(tt_tokenizer *k, const tt__json *j, int model)
{
    tt_status status;
    tt__bpe_merging m = {j->path, 0, 0, NULL, 0};
    int list = tt__json_member(j, model, "merges", true, 1 << TT__JSON_ARRAY, "an array", &status);
    if (status == TT_OK) status = tt__bpe_merges_begin(k, (size_t)j->nodes[list].count, &m);
    if (status != TT_OK) return status;
    for (int child = list + 1; child < j->nodes[list].after; child = j->nodes[child].after) {
        const tt__json_node *at = &j->nodes[child];
        size_t left_bytes = 0, right_bytes = 0;
        const char *left = tt__json_bytes(j, child, &left_bytes), *right = NULL;
        m.offset = j->base + at->offset;
        if (left) {
            char *space = (char *)memchr(left, ' ', left_bytes);
            if (space) {
                right = space + 1;
                right_bytes = left_bytes - (size_t)(right - left);
                left_bytes = (size_t)(space - left);
                *space = 0; /* ends the string `left`, for error messages */
            }
            if (space && memchr(right, ' ', right_bytes)) right = NULL;
        } else if (at->kind == TT__JSON_ARRAY && at->count == 2) {
            left = tt__json_bytes(j, child + 1, &left_bytes);
            right = tt__json_bytes(j, j->nodes[child + 1].after, &right_bytes);
        }
        if (!left || !right)
            return tt__fail(k->ctx, TT_ERR_FORMAT, "'%s', byte %zu: merge %zu is %s; expected two tokens",
                            j->path, m.offset, m.count, tt__json_kind_name(j, child));
        status = tt__bpe_merge_add(k, &m, left, left_bytes, right, right_bytes);
        if (status != TT_OK) return status;
    }
    return TT_OK;
}

/* Reads merges.txt: a merge "a b" on each line. Skips lines that begin with "#version". */
static tt_status tt__read_merges_txt(tt_tokenizer *k, const char *path, const tt__file_bytes *file)
{
    tt__bpe_merging m = {path, 0, 0, NULL, 0};
    char *text = tt__chunks_text(k->ctx, &k->chunks, file->bytes, file->size);
    size_t lines = 1;
    for (size_t i = 0; i < file->size; i++) lines += file->bytes[i] == '\n';
    if (!text || lines > INT32_MAX / 2)
        return tt__fail(k->ctx, TT_ERR_MEMORY, "out of memory for the merges of '%s': free memory", path);
    tt_status status = tt__bpe_merges_begin(k, lines, &m);
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
            return tt__fail(k->ctx, TT_ERR_FORMAT, "'%s', byte %zu: merge %zu is not two tokens with a space "
                            "between them", path, m.offset, m.count);
        *space = 0;
        status = tt__bpe_merge_add(k, &m, line, (size_t)(space - line), space + 1,
                                   (size_t)(line + n - space - 1));
    }
    return status;
}

/* Reads the options of a model that affect ids, except its vocabulary and merges. */
static tt_status tt__read_model(tt_tokenizer *k, const tt__json *j, int model, const char **unk)
{
    tt__token_model *m = &k->model;
    const char *type = "BPE", *prefix = "", *suffix = "";
    float dropout = 0;
    int64_t id = 0;
    *unk = NULL;
    if (model < 0 || j->nodes[model].kind != TT__JSON_OBJECT)
        return tt__fail(j->ctx, TT_ERR_FORMAT, "'%s' has no object \"model\", which is required: copy the "
                        "file again", j->path);
    tt_status status = tt__json_read_string(j, model, "type", false, &type);
    if (status != TT_OK) return status;
    if (strcmp(type, "Unigram") == 0) {
        m->kind = TT__MODEL_UNIGRAM;
        status = tt__json_read_int(j, model, "unk_id", true, 0, TT__IDS_LIMIT - 1, &id);
        m->unk = (int)id;
        return status == TT_OK ? tt__json_read_bool(j, model, "byte_fallback", &m->byte_fallback) : status;
    }
    /* Older files of DistilBERT have no "type". */
    const bool untyped = tt__json_get(j, model, "type") < 0;
    const bool wordpiece = untyped ? tt__json_get(j, model, "max_input_chars_per_word") >= 0
                                   : strcmp(type, "WordPiece") == 0;
    m->kind = wordpiece ? TT__MODEL_WORDPIECE : TT__MODEL_BPE;
    if (!wordpiece && strcmp(type, "BPE") != 0)
        return tt__unsupported(j, model, "model", type, "BPE, Unigram or WordPiece");
    status = tt__json_read_string(j, model, "unk_token", false, unk);
    if (status == TT_OK) status = tt__json_read_string(j, model, "continuing_subword_prefix", false, &prefix);
    if (status == TT_OK && wordpiece) {
        m->word_chars = 100; /* the default of package `tokenizers` */
        if (!*unk) *unk = "[UNK]";
        if (tt__json_get(j, model, "continuing_subword_prefix") < 0) prefix = "##";
        status = tt__keep_text(k, j, prefix, strlen(prefix), &m->piece);
        if (status != TT_OK) return status;
        return tt__json_read_int(j, model, "max_input_chars_per_word", false, 0, INT32_MAX, &m->word_chars);
    }
    if (status == TT_OK) status = tt__json_read_string(j, model, "end_of_word_suffix", false, &suffix);
    if (status == TT_OK) status = tt__json_read_float(j, model, "dropout", 0, 2, &dropout);
    if (status == TT_OK) status = tt__json_read_bool(j, model, "fuse_unk", &m->fuse_unk);
    if (status == TT_OK) status = tt__json_read_bool(j, model, "byte_fallback", &m->byte_fallback);
    if (status == TT_OK) status = tt__json_read_bool(j, model, "ignore_merges", &m->ignore_merges);
    if (status == TT_OK && *prefix)
        return tt__unsupported(j, model, "continuing_subword_prefix", prefix, "none");
    if (status == TT_OK && *suffix) return tt__unsupported(j, model, "end_of_word_suffix", suffix, "none");
    if (status == TT_OK && dropout > 0)
        return tt__unsupported(j, model, "\"dropout\"", "above 0", "null or 0");
    return status;
}

/* Prepares what a model needs from its vocabulary. unk: the text of the unknown token, or NULL. */
static tt_status tt__finish_model(tt_tokenizer *k, const tt__recipe *r, int model, const char *unk)
{
    tt__token_model *m = &k->model;
    int missing = 0, unmapped = 0;
    const bool mapped = k->mapped_at < k->split.n;
    for (uint32_t c = 0; c < 256; c++) {
        char text[8];
        const size_t n = (size_t)tt__utf8_put(tt__byte_char(c), text);
        m->bytes[c] = mapped ? tt__token_find(&k->vocab.by_text, text, n) : -1;
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)c);
        m->fallback[c] = tt__token_find(&k->vocab.by_text, text, 6);
        missing += m->fallback[c] < 0;
        unmapped += m->bytes[c] < 0;
    }
    if (m->kind != TT__MODEL_UNIGRAM) m->unk = unk ? tt__token_find(&k->vocab.by_text, unk, strlen(unk)) : -1;
    if (m->kind == TT__MODEL_WORDPIECE && m->unk < 0)
        return tt__fail(k->ctx, TT_ERR_FORMAT, "'%s': the \"unk_token\" '%.200s' is not in the vocabulary",
                        r->j->path, unk);
    if (m->kind == TT__MODEL_WORDPIECE) return tt__rest_of_vocab(k);
    if (m->kind == TT__MODEL_UNIGRAM) {
        const tt_status status = tt__prefixes_of_vocab(k);
        return status == TT_OK ? tt__read_scores(k, r->j, r->text, model) : status;
    }
    const bool fallback = m->byte_fallback && !missing;
    if (m->unk < 0 && !fallback && (!mapped || unmapped))
        tt__log(k->ctx, TT_LOG_WARNING, "tokenizer",
                "'%s' has no tokens for some characters: these are left out of texts", r->j->path);
    m->cuts = !mapped && fallback && !m->ignore_merges;
    return r->merges ? tt__read_merges_txt(k, r->path, r->merges) : tt__read_merges(k, r->j, model);
}
