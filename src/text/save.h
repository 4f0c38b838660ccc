#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "types.h"

/* ---- a tokenizer saved as a Hugging Face folder */

static void tt__print_vocab(tt__text_buffer *to, const void *tokenizer)
{
    const tt_tokenizer *k = (const tt_tokenizer *)tokenizer;
    for (int id = 0; id < k->size; id++) tt__print(to, "%s\n", tt_tokenizer_token(k, id));
}

static void tt__print_tokenizer_config(tt__text_buffer *to, const void *tokenizer)
{
    tt__print(to, "{\"tokenizer_class\": \"BertTokenizer\", \"do_lower_case\": %s}\n",
              ((const tt_tokenizer *)tokenizer)->lowercase ? "true" : "false");
}

static tt_status tt__save_kept(const tt_tokenizer *k, const char *folder)
{
    char path[TT__PATH];
    tt_status status = TT_OK;
    for (int i = 0; i < k->n_kept && status == TT_OK; i++) {
        const tt__kept_file *kept = &k->kept[i];
        status = tt__path_join(k->ctx, path, folder, kept->name);
        if (status == TT_OK) status = tt__write_bytes(k->ctx, path, kept->file.bytes, kept->file.size);
    }
    return status;
}

tt_status tt_tokenizer_save(const tt_tokenizer *k, const char *folder)
{
    tt_status status = tt__make_folder(k->ctx, folder);
    if (status == TT_OK && k->n_kept) return tt__save_kept(k, folder);
    if (status == TT_OK) status = tt__save_printed(k->ctx, folder, "vocab.txt", tt__print_vocab, k);
    if (status != TT_OK) return status;
    return tt__save_printed(k->ctx, folder, "tokenizer_config.json", tt__print_tokenizer_config, k);
}
