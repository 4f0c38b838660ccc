/* Times training steps of llm.c's CPU program. bench/peers/gpt2_step.c runs them in turn with its own:

       make build/llmc LLMC=dir        builds it from a checkout of github.com/karpathy/llm.c
       build/llmc BATCH LENGTH         a step for each line of standard input; prints milliseconds and loss

   train_gpt2.c is included unchanged, but without `main`. The code of llm.c reads a checkpoint from a
   temporary file, with GPT-2's 124 million parameters at random, and trains on random tokens. AdamW 1e-4
   without decay, as in `main` of train_gpt2.c. */

#define _GNU_SOURCE
#define TESTING
#include <train_gpt2.c> /* included as a system header, so that it causes no warnings */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t next(uint32_t *random) { return *random = *random * 1664525u + 1013904223u; }

/* Writes a checkpoint: a header, then the 16 tensors. The weights of norms are 1, and all biases are 0.
   Matrices are uniform with a standard deviation of 0.02. */
static void write_checkpoint(const char *path, GPT2Config c)
{
    int header[256] = {20240326,     3,           c.max_seq_len, c.vocab_size,
                       c.num_layers, c.num_heads, c.channels,    c.padded_vocab_size};
    size_t sizes[NUM_PARAMETER_TENSORS], largest = 0;
    uint32_t random = 1;
    FILE *f = fopenCheck(path, "wb");
    int ok = fwrite(header, sizeof header, 1, f) == 1;
    fill_in_parameter_sizes(sizes, c);
    for (int k = 0; k < NUM_PARAMETER_TENSORS; k++) if (sizes[k] > largest) largest = sizes[k];
    float *x = (float *)mallocCheck(largest * sizeof *x);
    for (int k = 0; k < NUM_PARAMETER_TENSORS; k++) {
        int norm = k == 2 || k == 8 || k == 14,
            matrix = k == 0 || k == 1 || k == 4 || k == 6 || k == 10 || k == 12;
        for (size_t i = 0; i < sizes[k]; i++)
            x[i] = norm ? 1.0f : matrix ? 0.0693f * ((float)(next(&random) >> 8) * 0x1p-24f - 0.5f) : 0.0f;
        ok = ok && fwrite(x, sizeof *x, sizes[k], f) == sizes[k];
    }
    free(x);
    fcloseCheck(f);
    if (!ok) fprintf(stderr, "llmc: cannot write '%s'\n", path), exit(1);
}

int main(int argc, char **argv)
{
    GPT2Config config = {1024, 50257, 50304, 12, 12, 768};
    int batch = argc == 3 ? atoi(argv[1]) : 0, length = argc == 3 ? atoi(argv[2]) : 0, c;
    const char *folder = getenv("TMPDIR");
    char path[4096];
    uint32_t random = 1;
    GPT2 model;
    if (batch < 1 || length < 1 || length > config.max_seq_len)
        return fprintf(stderr, "usage: llmc BATCH LENGTH (of 1 to 1024)\n"), 2;
    snprintf(path, sizeof path, "%s/llmc.XXXXXX", folder ? folder : "/tmp");
    int file = mkstemp(path);
    if (file < 0) return fprintf(stderr, "llmc: cannot make a file in '%s'\n", folder ? folder : "/tmp"), 1;
    close(file);
    write_checkpoint(path, config);
    gpt2_build_from_checkpoint(&model, path);
    remove(path);
    int n = batch * length, *tokens = (int *)mallocCheck((size_t)(n + 1) * sizeof *tokens);
    for (int i = 0; i <= n; i++) tokens[i] = (int)((next(&random) >> 8) % (uint32_t)config.vocab_size);
    for (int step = 1; (c = getchar()) != EOF;) {
        if (c != '\n') continue;
        double begin = now();
        gpt2_forward(&model, tokens, tokens + 1, (size_t)batch, (size_t)length);
        gpt2_zero_grad(&model);
        gpt2_backward(&model);
        gpt2_update(&model, 1e-4f, 0.9f, 0.999f, 1e-8f, 0.0f, step++);
        printf("step %.6g ms, loss %.6g\n", 1e3 * (now() - begin), model.mean_loss);
        fflush(stdout);
    }
    gpt2_free(&model);
    free(tokens);
    return 0;
}
