/* Fuzzes a chat template and conversations. A rendering ends, its text has as many bytes as announced, and a
   stream of conversations has as many tokens as a loader hands out.

   Input: a byte of flags; then, with "%%" lines between them,
       the chat template and a file of conversations. */
#include "fuzz.h"

static const char tokenizer[] =
    "{\"added_tokens\": [{\"id\": 0, \"content\": \"</s>\", \"special\": true}], \"pre_tokenizer\": "
        "{\"type\": \"ByteLevel\", "
    "\"add_prefix_space\": false}, \"decoder\": {\"type\": \"ByteLevel\"}, \"model\": {\"type\": \"BPE\", "
        "\"vocab\": "
    "{\"</s>\": 0, \"a\": 1, \"b\": 2, \"c\": 3, \"ab\": 4}, \"merges\": [\"a b\"]}}";
static const char config[] = "{\"eos_token\": \"</s>\"}";

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    static const tt_message messages[] = {{"system", "b"}, {"user", " a\n"},
                                          {"assistant", "<think>c</think>abc"}};
    fuzz_input in = {bytes, n};
    const int flags = fuzz_byte(&in);
    const fuzz_input part = fuzz_part(&in);
    fuzz_remove_all();
    fuzz_write("k/tokenizer.json", tokenizer, sizeof tokenizer - 1);
    fuzz_write("k/tokenizer_config.json", config, sizeof config - 1);
    fuzz_write("k/chat_template.jinja", part.at, part.left);
    fuzz_write("chats.jsonl", in.at, in.left);
    tt_context *ctx = fuzz_open();
    tt_tokenizer *k = tt_tokenizer_load(ctx, "k");
    if (FUZZ_MUST(ctx, k != NULL)) {
        char some[64];
        const int from = flags % 3;
        const int64_t all = tt_tokenizer_chat(k, messages + from, 3 - from, flags & 4, some, sizeof some);
        if (fuzz_ok(ctx, all >= 0)) FUZZ_CHECK((int64_t)strlen(some) <= all && strlen(some) < sizeof some);
        tt_stream_options o = tt_stream_options_default();
        o.tokenizer = k;
        o.all_tokens = flags & 8;
        tt_token_stream *s = tt_token_stream_read(ctx, "chats.jsonl", &o);
        if (fuzz_ok(ctx, s != NULL)) {
            tt_token_loader_options loader = tt_token_loader_options_default();
            loader.batch = 2;
            loader.length = 1 + flags / 16 * 16;
            loader.whole = flags & 4;
            tt_token_loader *l = tt_token_loader_new(ctx, s, &loader);
            int64_t rows = 0;
            /* If `whole`, tt_token_loader_new may fail: perhaps no conversation has a token to learn within
               its window. */
            if (loader.whole ? fuzz_ok(ctx, l != NULL) : FUZZ_MUST(ctx, l != NULL)) {
                const tt_source *source = tt_token_loader_source(l);
                for (bool more = true; more;) {
                    tt_batch b;
                    memset(&b, 0, sizeof b);
                    if (!FUZZ_MUST(ctx, source->next(source->self, &b, &more) == TT_OK) || !more) break;
                    FUZZ_CHECK(b.rows <= source->max_tokens && b.seqs <= source->max_seqs);
                    FUZZ_CHECK(b.seq_start[b.seqs] == b.rows);
                    rows += b.rows;
                }
                FUZZ_CHECK(loader.whole ? rows <= tt_token_stream_count(s)
                           : rows == tt_token_stream_count(s) - 1);
            }
            tt_token_loader_free(l);
        }
        tt_token_stream_free(s);
    }
    tt_tokenizer_free(k);
    fuzz_close(ctx);
    return 0;
}
