#pragma once
#include "../base/base.h"
#include "../files/json.h"
#include "types.h"
#include "vocabulary.h"
#include "build.h"

/* ----------------------------------------------------------------------------------- tokenizer: vocab.txt */

tt_tokenizer *tt_tokenizer_open(tt_context *ctx, const char *vocab_path, bool lowercase)
{
    static const char format[] =
        "{\"added_tokens\":[{\"content\":\"[UNK]\",\"special\":true},"
        "{\"content\":\"[CLS]\",\"special\":true},"
        "{\"content\":\"[SEP]\",\"special\":true},{\"content\":\"[PAD]\",\"special\":true},"
        "{\"content\":\"[MASK]\",\"special\":true}],"
        "\"normalizer\":{\"type\":\"BertNormalizer\",\"lowercase\":%s},"
        "\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"},"
        "\"decoder\":{\"type\":\"WordPiece\",\"prefix\":\"##\"},"
        "\"post_processor\":{\"type\":\"BertProcessing\",\"cls\":[\"[CLS]\",null],\"sep\":[\"[SEP]\",null]},"
        "\"model\":{\"type\":\"WordPiece\"}}";
    char text[sizeof format + 8];
    tt__file_bytes file;
    tt__json j;
    tt_tokenizer *k = tt__tokenizer_new(ctx);
    if (!k) return NULL;
    memset(&file, 0, sizeof file);
    memset(&j, 0, sizeof j);
    j.ctx = ctx; /* tt__json_free reads j.ctx even after an error */
    snprintf(text, sizeof text, format, lowercase ? "true" : "false");
    tt_status status = tt__file_open(ctx, vocab_path, &file);
    if (status == TT_OK && file.size > TT__VOCAB_BYTES)
        status = tt__fail(ctx, TT_ERR_FORMAT, "'%s' has %zu bytes, but must have at most %zu: is it a "
                          "vocab.txt?", vocab_path, file.size, TT__VOCAB_BYTES);
    if (status == TT_OK) status = tt__json_parse(&j, ctx, vocab_path, 0, text, strlen(text));
    tt__recipe r;
    memset(&r, 0, sizeof r);
    r.j = &j;
    r.lines = &file;
    r.path = vocab_path;
    if (status == TT_OK) status = tt__build_tokenizer(k, &r);
    tt__json_free(&j);
    tt__file_close(ctx, &file);
    k->lowercase = lowercase;
    if (status == TT_OK) {
        tt__roles_of_bert(k);
        return k;
    }
    tt_tokenizer_free(k);
    return NULL;
}

/* Reads the members of tokenizer_config.json that affect ids. */
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
        if (k == 0) accents = *lowercase; /* strip_accents: null means the value of do_lower_case */
    }
    const char *unsupported = accents != *lowercase ? "\"strip_accents\" differs from do_lower_case"
                            : !cjk                  ? "\"tokenize_chinese_chars\" is false"
                            : !basic                ? "\"do_basic_tokenize\" is false"
                            : split_special         ? "\"split_special_tokens\" is true" : NULL;
    if (status != TT_OK || !unsupported) return status;
    return tt__fail(j->ctx, TT_ERR_UNSUPPORTED, "'%s': %s, which tinytrain does not support: use a model "
                    "whose tokenizer has the default of BERT there", j->path, unsupported);
}
