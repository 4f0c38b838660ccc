/* Fuzzes a vocabulary and a text. Ids are in range, sequences begin and end with the right tokens, a cut text
   has the requested length, and a saved tokenizer loads unchanged.

   Input: a byte of flags; then, with "%%" lines between them, vocab.txt, tokenizer_config.json (empty: no
   such file) and the text. */
#include "fuzz.h"

enum { MAX_TOKENS = 512 };

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    static int32_t ids[MAX_TOKENS], other[MAX_TOKENS];
    fuzz_input in = {bytes, n};
    int flags = fuzz_byte(&in);
    fuzz_input vocab = fuzz_part(&in), config = fuzz_part(&in), text = in;
    fuzz_remove_all();
    fuzz_write("k/vocab.txt", vocab.at, vocab.left);
    if (config.left) fuzz_write("k/tokenizer_config.json", config.at, config.left);

    tt_context *ctx = fuzz_open();
    tt_tokenizer *k =
        flags & 1 ? tt_tokenizer_load(ctx, "k") : tt_tokenizer_open(ctx, "k/vocab.txt", (flags & 2) != 0);
    if (fuzz_ok(ctx, k != NULL)) {
        int size = tt_tokenizer_size(k), cls = tt_tokenizer_find(k, "[CLS]"),
            sep = tt_tokenizer_find(k, "[SEP]");
        FUZZ_CHECK(cls >= 0 && cls < size && sep >= 0 && sep < size);
        for (int i = 0; i < size; i++) {
            const char *token = tt_tokenizer_token(k, i);
            int found = tt_tokenizer_find(k, token);
            FUZZ_CHECK(found >= 0 && found < size && strcmp(tt_tokenizer_token(k, found), token) == 0);
        }
        /* a copy of exactly the text's size, so that tools notice a read beyond it */
        char *exact = (char *)malloc(text.left ? text.left : 1);
        FUZZ_CHECK(exact);
        if (text.left) memcpy(exact, text.at, text.left);
        int count = tt_tokenize(k, exact, text.left, ids, MAX_TOKENS), some = 2 + flags / 4 % 16;
        FUZZ_CHECK(count >= 2 && count <= MAX_TOKENS && ids[0] == cls && ids[count - 1] == sep);
        for (int i = 0; i < count; i++) FUZZ_CHECK(ids[i] >= 0 && ids[i] < size);
        int cut = tt_tokenize(k, exact, text.left, other, some);
        FUZZ_CHECK(cut == (count < some ? count : some) && other[cut - 1] == sep);
        FUZZ_CHECK(memcmp(ids, other, sizeof *ids * (size_t)(cut - 1)) == 0);

        if (FUZZ_MUST(ctx, tt_tokenizer_save(k, "a") == TT_OK)) {
            tt_tokenizer *saved = tt_tokenizer_load(ctx, "a");
            if (FUZZ_MUST(ctx, saved != NULL)) {
                FUZZ_CHECK(tt_tokenizer_size(saved) == size);
                for (int i = 0; i < size; i++)
                    FUZZ_CHECK(strcmp(tt_tokenizer_token(saved, i), tt_tokenizer_token(k, i)) == 0);
                int again = tt_tokenize(saved, exact, text.left, other, MAX_TOKENS);
                FUZZ_CHECK(again == count && memcmp(ids, other, sizeof *ids * (size_t)count) == 0);
                if (FUZZ_MUST(ctx, tt_tokenizer_save(saved, "b") == TT_OK))
                    FUZZ_CHECK(fuzz_same_files("a/vocab.txt", "b/vocab.txt") &&
                               fuzz_same_files("a/tokenizer_config.json", "b/tokenizer_config.json"));
            }
            tt_tokenizer_free(saved);
        }
        free(exact);
        tt_tokenizer_free(k);
    }
    fuzz_close(ctx);
    return 0;
}
