/* Tests of conversations: chat templates, and the tokens of answers. tests/golden/make_chats.py has made the
   expected hashes with transformers. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

enum { ROOM = 4096 };

/* Makes a folder with a tokenizer of tests/golden/bpe, a tokenizer_config.json, and a chat template (NULL:
   none). */
static const char *folder_of(const char *bpe, const char *config, const char *template_text, size_t bytes)
{
    const char *folder = test_folder();
    size_t n;
    char from[600];
    snprintf(from, sizeof from, "tests/golden/bpe/%s/tokenizer.json", bpe);
    char *json = test_read(from, &n);
    if (!CHECK(json != NULL)) return folder;
    test_write(test_path(folder, "tokenizer.json"), json, n);
    test_write(test_path(folder, "tokenizer_config.json"), config, strlen(config));
    if (template_text) test_write(test_path(folder, "chat_template.jinja"), template_text, bytes);
    free(json);
    return folder;
}

static const struct { const char *name, *bpe, *config; } golden[] = {
    {"chatml", "qwen2", "{\"eos_token\": \"<|im_end|>\"}"},
    {"qwen2", "qwen2", "{\"eos_token\": {\"content\": \"<|im_end|>\"}, \"bos_token\": null}"},
    {"qwen3", "qwen2", "{\"eos_token\": \"<|im_end|>\"}"},
    {"llama3", "llama3", "{\"bos_token\": \"<|begin_of_text|>\", \"eos_token\": \"<|eot_id|>\"}"},
    {"mistral", "mistral", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}"},
    {"gemma", "llama2", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}"},
    {"zephyr", "llama2", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}"},
};

static void is_hash(const char *expected, const void *bytes, size_t n, const char *what, const char *name, int line)
{
    char found[20], message[200];
    snprintf(found, sizeof found, "%016llx", (unsigned long long)tt__hash_on(TT__HASH_BEGIN, bytes, n));
    snprintf(message, sizeof message, "%s of conversation %d by %s", what, line, name);
    test__check(strcmp(found, expected) == 0, __FILE__, __LINE__, message);
}

/* Compares the texts of a line of JSON, without and with the start of an answer, with hashes. Returns false if
   the template refuses the conversation. */
static bool has_texts(const tt_tokenizer *k, const char *line, size_t bytes, char hash[3][20], const char *name,
                      int number)
{
    tt__json j;
    tt__chat c;
    tt__jinja_run r;
    bool ok = CHECK(tt__json_parse(&j, k->ctx, "line", 0, line, bytes) == TT_OK);
    const int list = tt__json_get(&j, 0, "messages");
    const tt__chat_messages m = {&j, list, j.nodes[list].count, NULL};
    ok = ok && CHECK(tt__chat_open(&c, k) == TT_OK);
    for (int prompt = 0; prompt < 2 && ok; prompt++) {
        ok = tt__chat_render(&c, &r, &m, m.n, prompt) == TT_OK;
        test__check(ok == (*hash[0] != '-'), __FILE__, __LINE__, ok ? name : tt_error(k->ctx));
        if (!ok) CHECK_ERROR(k->ctx, TT_ERR_FORMAT, "the template refuses the conversation: ");
        else is_hash(hash[prompt], r.out, r.n, prompt ? "prompt" : "text", name, number);
        tt__jinja_end(&r);
    }
    tt__chat_close(&c);
    tt__json_free(&j);
    return ok;
}

/* Compares the tokens of a conversation, and which of them are learnt, with a hash. */
static void has_answers(const tt_tokenizer *k, const char *line, size_t bytes, const char *hash, const char *name,
                        int number)
{
    static const char path[] = "chats.jsonl";
    static char tokens[5 * ROOM];
    char file[600];
    snprintf(file, sizeof file, "%s/%s", test__files_made.folder, path);
    tt_stream_options o = tt_stream_options_default();
    o.tokenizer = k;
    tt_token_stream *s = tt_token_stream_read(k->ctx, test_write(file, line, bytes), &o);
    if (!s && *hash == '-') { /* no message is an answer, or the template writes the last answer differently */
        CHECK(strstr(tt_error(k->ctx), "line 1: ") != NULL);
        return;
    }
    test__check(s != NULL, __FILE__, __LINE__, tt_error(k->ctx));
    const int64_t n = s ? tt_token_stream_count(s) : 0;
    for (int64_t i = 0; i < n && i < ROOM; i++) {
        int32_t id;
        CHECK(tt_token_stream_get(s, i, 1, &id) == TT_OK);
        memcpy(tokens + 5 * i, &id, 4);
        tokens[5 * i + 4] = s->store->marks[i] & TT__MARK_LEARNT;
        CHECK(((s->store->marks[i] & TT__MARK_END) != 0) == (i == n - 1));
    }
    if (*hash != '-') is_hash(hash, tokens, 5 * (size_t)n, "tokens", name, number);
    tt_token_stream_free(s);
}

TEST(as_transformers)
{
    size_t bytes, n;
    char *chats = test_read(TEST_GOLDEN("chats/conversations.jsonl"), &bytes);
    REQUIRE(chats);
    for (int g = 0; g < TEST_COUNT(golden); g++) {
        char path[64];
        test_allocator a;
        tt_context *ctx = test_open(&a);
        snprintf(path, sizeof path, "chats/%s.jinja", golden[g].name);
        char *source = test_read(TEST_GOLDEN(path), &n);
        tt_tokenizer *k = tt_tokenizer_load(ctx, folder_of(golden[g].bpe, golden[g].config, source, n));
        snprintf(path, sizeof path, "chats/%s.txt", golden[g].name);
        FILE *f = fopen(TEST_GOLDEN(path), "r");
        if (CHECK(k && f)) {
            char hash[3][20], *line = chats;
            int number = 1, masks = 0;
            for (; fscanf(f, "%19s %19s %19s", hash[0], hash[1], hash[2]) == 3; number++) {
                char *end = strchr(line, '\n');
                if (!CHECK(end != NULL)) break;
                const size_t length = (size_t)(end - line);
                if (has_texts(k, line, length, hash, golden[g].name, number))
                    has_answers(k, line, length, hash[2], golden[g].name, number);
                masks += *hash[2] != '-';
                line = end + 1;
            }
            CHECK(number == 201 && masks > 60);
        }
        if (f) fclose(f);
        free(source);
        tt_tokenizer_free(k);
        TEST_CLOSE(ctx, &a);
    }
    free(chats);
}

static const test_case tests[] = {
    TEST_CASE(as_transformers),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
