/* Measures the megabytes of text a second that one thread tokenizes: the reviews of examples/data, repeated.
   Must run in the repository's root. */

#include "bench.h"

int main(int argc, char **argv)
{
    tt_context *ctx = bench_open(argc, argv, NULL, 0);
    tt_dataset *d = tt_dataset_table(ctx, "examples/data/reviews.tsv", NULL, NULL, 0, NULL);
    tt_tokenizer *k = d ? tt_tokenizer_open(ctx, "examples/data/vocab.txt", true) : NULL;
    double best = 0, seconds = 0;
    size_t bytes = 0;
    int64_t tokens = 0;
    if (!k) bench_die("%s", tt_error(ctx));
    for (int round = 0; round < 5 || seconds < 1; round++) {
        double begin = tt__seconds();
        bytes = 0;
        tokens = 0;
        for (int64_t i = 0; i < tt_dataset_count(d); i++) {
            int32_t ids[512];
            size_t n;
            const char *text = tt_dataset_text(d, i, &n);
            tokens += tt_tokenize(k, text, n, ids, 512);
            bytes += n;
        }
        double took = tt__seconds() - begin;
        seconds += took;
        if (best == 0 || took < best) best = took;
    }
    bench_row("tokenize, one thread", (double)bytes / best / 1e6, "MB/s", 0);
    bench_row("tokenize, one thread, tokens", (double)tokens / best, "tokens/s", 0);
    tt_tokenizer_free(k);
    tt_dataset_free(d);
    bench_close();
    return 0;
}
