/* Fuzzes a safetensors file. A file that opens is sound, can be read whole, and does not change if it is
   written and read again. */
#include "fuzz.h"

static char *bytes_of(const tt_safetensors *s, int k) /* returns the bytes, which the caller frees */
{
    size_t n = tt_safetensors_info(s, k)->bytes;
    char *bytes = (char *)malloc(n ? n : 1);
    FUZZ_CHECK(bytes && tt_safetensors_read(s, k, 0, n, bytes) == TT_OK);
    return bytes;
}

static void check_same(const tt_safetensors *a, const tt_safetensors *b)
{
    FUZZ_CHECK(tt_safetensors_count(a) == tt_safetensors_count(b));
    for (int i = 0; i < tt_safetensors_count(a); i++) {
        const tt_tensor_info *x = tt_safetensors_info(a, i);
        int k = tt_safetensors_find(b, x->name);
        FUZZ_CHECK(k >= 0);
        const tt_tensor_info *y = tt_safetensors_info(b, k);
        FUZZ_CHECK(strcmp(x->dtype, y->dtype) == 0 && x->ndim == y->ndim && x->bytes == y->bytes);
        for (int d = 0; d < x->ndim; d++) FUZZ_CHECK(x->dims[d] == y->dims[d]);
        char *mine = bytes_of(a, i), *theirs = bytes_of(b, k);
        FUZZ_CHECK(memcmp(mine, theirs, x->bytes) == 0);
        free(mine);
        free(theirs);
    }
}

static void write_again(tt_context *ctx, const tt_safetensors *s)
{
    int count = tt_safetensors_count(s);
    const char *format = tt_safetensors_metadata(s, "format"),
               *metadata[] = {"format", format ? format : "", NULL};
    tt_tensor_info *infos = (tt_tensor_info *)malloc(sizeof *infos * (size_t)(count + 1));
    FUZZ_CHECK(infos);
    for (int i = 0; i < count; i++) infos[i] = *tt_safetensors_info(s, i);
    tt_safetensors_writer *w = tt_safetensors_begin(ctx, "out.safetensors", infos, count, metadata);
    free(infos);
    if (!FUZZ_MUST(ctx, w != NULL)) return;
    bool ok = true;
    for (int i = 0; i < count && ok; i++) {
        char *tensor = bytes_of(s, i);
        ok = tt_safetensors_write(w, tensor, tt_safetensors_info(s, i)->bytes) == TT_OK;
        free(tensor);
    }
    bool ended = tt_safetensors_end(w) == TT_OK;
    if (!FUZZ_MUST(ctx, ok && ended)) return;
    tt_safetensors *again = tt_safetensors_open(ctx, "out.safetensors");
    if (!FUZZ_MUST(ctx, again != NULL)) return;
    check_same(s, again);
    const char *kept = tt_safetensors_metadata(again, "format");
    FUZZ_CHECK(kept && strcmp(kept, metadata[1]) == 0);
    tt_safetensors_close(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    tt_context *ctx = fuzz_open();
    fuzz_remove_all();
    fuzz_write("in.safetensors", bytes, n);
    tt_safetensors *s = tt_safetensors_open(ctx, "in.safetensors");
    if (fuzz_ok(ctx, s != NULL)) {
        size_t data = 0;
        for (int i = 0; i < tt_safetensors_count(s); i++) {
            const tt_tensor_info *info = tt_safetensors_info(s, i);
            int64_t size = 1, some;
            float f[16];
            int32_t w[16];
            FUZZ_CHECK(tt_safetensors_find(s, info->name) == i && info->ndim >= 0 && info->ndim <= 8);
            for (int d = 0; d < info->ndim; d++)
                size *= info->dims[d]; /* no overflow, since the reader has multiplied the dimensions too */
            some = size < 16 ? size : 16;
            data += info->bytes;
            FUZZ_CHECK(info->bytes <= n);
            if (tt_safetensors_read_f32(s, i, size - some, some, f) != TT_OK) FUZZ_CHECK(*tt_error(ctx));
            if (tt_safetensors_read_i32(s, i, size - some, some, w) != TT_OK) FUZZ_CHECK(*tt_error(ctx));
            FUZZ_CHECK(tt_safetensors_read_f32(s, i, size, 1, f) != TT_OK &&
                       tt_safetensors_read_i32(s, i, size, 1, w) != TT_OK);
        }
        FUZZ_CHECK(data + 8 <= n);
        write_again(ctx, s);
        tt_safetensors_close(s);
    }
    fuzz_close(ctx);
    return 0;
}

/* Mutates a file. Then, in three of four cases, sets the header's length, so that the header ends with the
   last closing brace before the first NUL. */
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t n, size_t max, unsigned seed)
{
    n = LLVMFuzzerMutate(bytes, n, max);
    if (n < 10 || seed % 4 == 0) return n;
    uint64_t header = 0;
    for (size_t k = 8; k < n && bytes[k]; k++)
        if (bytes[k] == '}') header = k - 7;
    if (header) memcpy(bytes, &header, 8);
    return n;
}
