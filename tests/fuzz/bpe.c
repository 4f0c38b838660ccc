/* Fuzzes a byte-pair tokenizer and a text. Ids are in range, a smaller buffer gets the first ids, ids decode
   to UTF-8, and a saved tokenizer loads unchanged.

   Input: a byte of flags; then, with "%%" lines between them, tokenizer.json (flags & 1: vocab.json and
   merges.txt), tokenizer_config.json (empty: no such file) and the text. */
#include "fuzz.h"

enum { MAX_TOKENS = 512 };

/* Encodes one text without cutting it. If `room` is MAX_TOKENS, also checks the spans of the tokens. */
static int64_t encode(const tt_tokenizer *k, const char *text, size_t bytes, bool special, int32_t *ids,
                      int64_t room)
{
    static tt_span spans[MAX_TOKENS];
    const tt_encoding e = {.text = text, .bytes = bytes, .special = special, .room = room, .ids = ids,
                           .spans = room == MAX_TOKENS ? spans : NULL};
    const int64_t n = tt_tokenizer_encode(k, &e);
    for (int64_t i = 0; i < n && i < room && e.spans; i++)
        FUZZ_CHECK(spans[i].begin <= spans[i].end && spans[i].end <= bytes);
    return n;
}

static const char *const files[] = {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"};

static const char *in_folder(const char *folder, int file)
{
    static char path[64];
    snprintf(path, sizeof path, "%s/%s", folder, files[file]);
    return path;
}

/* Returns whether the text consists of whole characters: the first byte says how many bytes, and no character
   is a surrogate or above U+10FFFF. */
static bool is_utf8(const char *text, int64_t n)
{
    for (int64_t at = 0, more; at < n; at += more + 1) {
        const uint8_t *c = (const uint8_t *)text + at;
        more = c[0] < 0x80 ? 0 : c[0] < 0xC2 ? n : c[0] < 0xE0 ? 1 : c[0] < 0xF0 ? 2 : c[0] < 0xF5 ? 3 : n;
        if (at + more >= n) return false;
        for (int k = 1; k <= more; k++) if (c[k] >> 6 != 2) return false;
        const int two = more > 1 ? c[0] << 8 | c[1] : 0; /* checks the limits of the second byte */
        if ((two >> 8 == 0xE0 && two < 0xE0A0) || (two >> 8 == 0xED && two > 0xED9F)) return false;
        if ((two >> 8 == 0xF0 && two < 0xF090) || (two >> 8 == 0xF4 && two > 0xF48F)) return false;
    }
    return true;
}

static void decodes(const tt_tokenizer *k, const int32_t *ids, int64_t n, bool skip_special)
{
    const int64_t bytes = tt_tokenizer_decode(k, ids, n, skip_special, NULL, 0);
    if (bytes < 0) {
        FUZZ_CHECK(fuzz_refused);
        return;
    }
    char *all = (char *)malloc((size_t)bytes + 1), *some = (char *)malloc((size_t)bytes / 2 + 1);
    FUZZ_CHECK(all && some);
    FUZZ_CHECK(tt_tokenizer_decode(k, ids, n, skip_special, all, (size_t)bytes + 1) == bytes);
    FUZZ_CHECK(all[bytes] == 0 && is_utf8(all, bytes));
    FUZZ_CHECK(tt_tokenizer_decode(k, ids, n, skip_special, some, (size_t)bytes / 2 + 1) == bytes);
    FUZZ_CHECK(memcmp(all, some, strlen(some)) == 0);
    tt_decode_stream *s = tt_decode_stream_new(k, skip_special);
    size_t at = 0, more = 0;
    for (int64_t i = 0; i <= n && s; i++) { /* decodes the ids one at a time */
        const char *text = i < n ? tt_decode_stream_put(s, ids + i, 1, &more)
                         : tt_decode_stream_end(s, &more);
        if (!text) break;
        FUZZ_CHECK(at + more <= (size_t)bytes && memcmp(all + at, text, more) == 0);
        at += more;
        FUZZ_CHECK(i < n || at == (size_t)bytes);
    }
    tt_decode_stream_free(s);
    free(all);
    free(some);
}

/* Writes the ids of a text to *ids. Returns the number of ids, at most MAX_TOKENS, or -1 without memory. */
static int64_t encodes(const tt_tokenizer *k, const char *text, size_t bytes, bool special, int64_t room,
                       int32_t *ids)
{
    static int32_t other[MAX_TOKENS];
    const int64_t count = encode(k, text, bytes, special, ids, MAX_TOKENS);
    const int64_t here = count < MAX_TOKENS ? count : MAX_TOKENS;
    FUZZ_CHECK(count >= 0 || fuzz_refused);
    for (int64_t i = 0; i < here; i++) FUZZ_CHECK(ids[i] >= 0 && ids[i] < tt_tokenizer_size(k));
    for (int64_t i = 0; i < here; i++) FUZZ_CHECK(tt_tokenizer_token(k, ids[i]) != NULL);
    const int64_t again = encode(k, text, bytes, special, other, room);
    FUZZ_CHECK(fuzz_refused || again == count);
    const int64_t both = again < 0 || count < 0 ? 0 : here < room ? here : room;
    FUZZ_CHECK(memcmp(ids, other, sizeof *ids * (size_t)both) == 0);
    return here;
}

static void same_tokenizer(const tt_tokenizer *a, const tt_tokenizer *b, const char *text, size_t bytes)
{
    static int32_t ids[2][MAX_TOKENS];
    FUZZ_CHECK(tt_tokenizer_size(a) == tt_tokenizer_size(b));
    for (int k = 0; k < TT_TOKEN_COUNT; k++) {
        const tt_special_token role = (tt_special_token)k;
        FUZZ_CHECK(tt_tokenizer_special(a, role) == tt_tokenizer_special(b, role));
    }
    const int64_t n = encodes(a, text, bytes, true, MAX_TOKENS, ids[0]);
    if (n < 0) return;
    const int64_t m = encodes(b, text, bytes, true, MAX_TOKENS, ids[1]);
    FUZZ_CHECK(m < 0 || (m == n && memcmp(ids[0], ids[1], sizeof **ids * (size_t)n) == 0));
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    static int32_t ids[MAX_TOKENS], other[MAX_TOKENS];
    fuzz_input in = {bytes, n};
    int flags = fuzz_byte(&in);
    fuzz_remove_all();
    for (int k = 0; k < 4; k++) {
        if ((flags & 1) ? k == 0 : k == 1 || k == 2) continue;
        fuzz_input part = fuzz_part(&in);
        if (k < 3 || part.left) fuzz_write(in_folder("k", k), part.at, part.left);
    }
    bool nul = false; /* a token may contain a NUL, which ends its text */
    for (size_t i = 0; i + 5 <= n; i++) nul = nul || memcmp(bytes + i, "u0000", 5) == 0;
    tt_context *ctx = fuzz_open();
    tt_tokenizer *k = tt_tokenizer_load(ctx, "k");
    if (fuzz_ok(ctx, k != NULL)) {
        const int size = tt_tokenizer_size(k), room = flags / 2 % 16;
        FUZZ_CHECK(size > 0 && tt_tokenizer_token(k, size - 1) != NULL && !tt_tokenizer_token(k, size));
        for (int i = 0; i < size; i++) {
            const char *token = tt_tokenizer_token(k, i);
            const int found = token ? tt_tokenizer_find(k, token) : 0;
            FUZZ_CHECK((found >= 0 || nul) && found < size);
            FUZZ_CHECK(!token || found < 0 || strcmp(tt_tokenizer_token(k, found), token) == 0);
        }
        /* a copy of exactly the text's size, so that tools notice a read beyond it */
        char *exact = (char *)malloc(in.left ? in.left : 1);
        FUZZ_CHECK(exact);
        if (in.left) memcpy(exact, in.at, in.left);
        const int64_t bare = encodes(k, exact, in.left, false, room, ids);
        if (bare >= 0) decodes(k, ids, bare, false);
        const int64_t count = encodes(k, exact, in.left, true, room, ids);
        if (count >= 0) decodes(k, ids, count, flags & 32);
        const int cut = tt_tokenize(k, exact, in.left, other, MAX_TOKENS);
        FUZZ_CHECK(cut <= MAX_TOKENS && (cut >= 0 || fuzz_refused));
        if (count >= 0 && count < MAX_TOKENS && cut >= 0)
            FUZZ_CHECK(cut == count && memcmp(ids, other, sizeof *ids * (size_t)count) == 0);
        FUZZ_CHECK(tt_tokenize(k, exact, in.left, other, room) <= room);

        if (FUZZ_MUST(ctx, tt_tokenizer_save(k, "a") == TT_OK)) {
            for (int f = 0; f < 4; f++) {
                char saved[64];
                snprintf(saved, sizeof saved, "a/%s", files[f]);
                FUZZ_CHECK(!fuzz_find(in_folder("k", f)) == !fuzz_find(saved));
                FUZZ_CHECK(!fuzz_find(saved) || fuzz_same_files(in_folder("k", f), saved));
            }
            tt_tokenizer *saved = tt_tokenizer_load(ctx, "a");
            if (FUZZ_MUST(ctx, saved != NULL)) same_tokenizer(k, saved, exact, in.left);
            tt_tokenizer_free(saved);
        }
        free(exact);
        tt_tokenizer_free(k);
    }
    fuzz_close(ctx);
    return 0;
}
