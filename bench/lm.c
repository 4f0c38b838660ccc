/* Measures training steps and generation of a language model: GPT-2 of 124 million parameters with random
   weights, or the model of a Hugging Face folder (--model). A step takes --seqs windows of --length tokens,
   in the order of a file of 2-byte ids (--data), or of random ids; AdamW 1e-4, decay 0.01 on matrices, no
   clipping, no dropout. With --generate N the program instead generates N tokens after a prompt of --prompt
   tokens, for one sequence. --store FORMAT stores the weights of linear layers in few bits (tt_lm_store);
   --generate then also stores the layer of the logits in int8, unless its weight is the embedding.
   bench/lm.py compares this program with PyTorch, peft and llama.cpp. */

#include "bench.h"

static tt_token_stream *random_tokens(tt_context *ctx, int count, int vocab)
{
    char path[] = "/tmp/tinytrain_lm_XXXXXX";
    const int file = mkstemp(path);
    FILE *f = file < 0 ? NULL : fdopen(file, "wb");
    if (!f) bench_die("cannot make a temporary file: %s", strerror(errno));
    uint32_t state = 1;
    for (int k = 0; k < count; k++) {
        state = state * 1664525u + 1013904223u;
        const uint16_t id = (uint16_t)((state >> 8) % (uint32_t)vocab);
        if (fwrite(&id, 2, 1, f) != 1) bench_die("cannot write '%s': %s", path, strerror(errno));
    }
    if (fclose(f) != 0) bench_die("cannot write '%s': %s", path, strerror(errno));
    tt_token_stream *s = tt_token_stream_open(ctx, path, 2, vocab, -1);
    remove(path); /* the token stream still has the file open */
    return s;
}

static void generate(tt_context *ctx, const tt_lm *m, const tt_token_stream *s, int prompt, int tokens)
{
    tt_generator_options o = tt_generator_options_default();
    tt_sampling how = tt_sampling_default();
    o.context = prompt + tokens;
    o.compile.precision = bench.precision;
    how.temperature = 0;
    tt_generator *g = tt_generator_new(m, &o);
    int32_t *ids = (int32_t *)malloc(sizeof *ids * (size_t)(prompt + tokens)), start[2] = {0, prompt};
    int count;
    if (!g || !ids || tt_token_stream_get(s, 0, prompt, ids) != TT_OK) bench_die("%s", tt_error(ctx));
    double seconds[2];
    for (int round = 0; round < 4; round++) { /* the first two rounds warm up */
        how.max_new = round % 2 ? tokens : 1;
        const double begin = tt__seconds();
        const tt_status status = tt_generate(g, ids, start, 1, &how, ids + prompt, &count);
        if (status != TT_OK) bench_die("%s", tt_error(ctx));
        seconds[round % 2] = tt__seconds() - begin;
    }
    const double bytes = (double)tt_program_plan(tt_generator_program(g)).bytes;
    bench_row("prompt and one token", 1e3 * seconds[0], "ms", 0);
    bench_row("tokens a second, after the first", (tokens - 1) / (seconds[1] - seconds[0]), "tokens/s", 0);
    bench_row("planned memory", bytes / 1e6, "MB", 0);
    free(ids);
    tt_generator_free(g);
}

static void train(tt_context *ctx, const tt_lm *m, const tt_token_stream *s, int seqs, int length, int steps,
                  bool turns, const char *update, const char *recompute)
{
    tt_token_loader_options lo = tt_token_loader_options_default();
    lo.batch = seqs;
    lo.length = length;
    lo.across = true;
    lo.shuffle = false;
    tt_token_loader *l = tt_token_loader_new(ctx, s, &lo);
    const tt_source *source = tt_token_loader_source(l);
    if (!source) bench_die("%s", tt_error(ctx));
    tt_train_options o = tt_train_options_default();
    tt_train_options_make_room(&o, source, NULL);
    o.schedule.kind = TT_CONSTANT;
    o.schedule.lr = 1e-4f;
    o.compile.optimizer.clip_norm = 0;
    o.compile.precision = bench.precision;
    o.compile.update = update;
    o.compile.recompute = recompute;
    const tt_model model = tt_lm_model(m);
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    double *speeds = (double *)malloc(sizeof *speeds * (size_t)(steps + 1));
    const double peak = turns ? 0 : bench_peak(bench.precision, 0);
    if (!t || !speeds) bench_die("%s", tt_error(ctx));
    double flops = 0, seconds = 0;
    for (int step = 0; turns ? bench_turn() : step <= steps; step++) {
        tt_batch b;
        tt_stats stats;
        bool more = true, updated;
        memset(&b, 0, sizeof b);
        tt_status status = source->next(source->self, &b, &more);
        if (status == TT_OK && !more) { /* starts over from the first batch */
            status = source->seek(source->self, 0, 0);
            if (status == TT_OK) status = source->next(source->self, &b, &more);
        }
        const double begin = tt__seconds();
        if (status == TT_OK) status = tt_train_batch(t, &b, &stats, &updated);
        if (status != TT_OK) bench_die("%s", tt_error(ctx));
        const double now = tt__seconds() - begin;
        if (turns) {
            printf("{\"name\": \"step\", \"value\": %.9g, \"unit\": \"s\", \"loss\": %.9g}\n", now,
                   stats.loss);
            fflush(stdout);
        }
        if (!step || turns) continue; /* step 0 is not counted */
        speeds[step - 1] = b.rows / now;
        seconds += now;
        flops += stats.flops;
    }
    if (!turns) {
        qsort(speeds, (size_t)steps, sizeof *speeds, bench_ascending);
        bench_row("tokens a second, median step", speeds[steps / 2], "tokens/s", 0);
        bench_row("matmuls and attention, whole step, mean", flops / seconds / 1e9, "GFLOP/s", peak / 1e9);
    }
    bench_row("planned memory", (double)tt_program_plan(tt_trainer_program(t)).bytes / 1e6, "MB", 0);
    bench_row("peak resident memory", bench_resident_peak() / 1e6, "MB", 0);
    free(speeds);
    tt_trainer_free(t);
    tt_token_loader_free(l);
}

int main(int argc, char **argv)
{
    int seqs = 4, length = 256, steps = 5, layers = 0, tokens = 0, prompt = 16;
    const char *folder = NULL, *data = NULL, *update = "end", *recompute = "cheap", *format = NULL,
               *adapter = NULL;
    bool turns = false;
    const bench_flag flags[] = {
        {"--model", NULL, &folder, NULL, "DIR, a Hugging Face folder, instead of GPT-2 with random weights"},
        {"--data", NULL, &data, NULL, "FILE of token ids of 2 bytes each"},
        {"--seqs", &seqs, NULL, NULL, "windows in a step"},
        {"--length", &length, NULL, NULL, "tokens of a window"},
        {"--layers", &layers, NULL, NULL, "number of layers of GPT-2, if not 12"},
        {"--update", NULL, &update, NULL, "U: end or backward, see tt_compile_options.update"},
        {"--recompute", NULL, &recompute, NULL, "R: none, cheap, attention or blocks"},
        {"--steps", &steps, NULL, NULL, "measured steps, after one that is not measured"},
        {"--turns", NULL, NULL, &turns, "run and report a step for each line of standard input"},
        {"--generate", &tokens, NULL, NULL, "number of tokens to generate, instead of training"},
        {"--prompt", &prompt, NULL, NULL, "tokens of the prompt for --generate"},
        {"--store", NULL, &format, NULL, "FORMAT of linear layers: int8, nf4 or int4"},
        {"--adapter", NULL, &adapter, NULL, "DIR of a peft adapter, to be trained alone"},
    };
    tt_context *ctx = bench_open(argc, argv, flags, TT__COUNT(flags));
    tt_lm_config c = tt_lm_config_default("gpt2");
    tt_lm m;
    if (layers) c.layers = layers;
    const tt_status status = folder ? tt_lm_load(ctx, &m, folder) : tt_lm_new(ctx, &m, &c);
    if (status != TT_OK || (format && tt_lm_store(&m, format) != TT_OK)) bench_die("%s", tt_error(ctx));
    if (format && tokens && m.head && tt_param_store(m.head, "int8") != TT_OK) bench_die("%s", tt_error(ctx));
    if (adapter && tt_lm_lora_load(&m, adapter) != TT_OK) bench_die("%s", tt_error(ctx));
    m.config.embedding_dropout = m.config.dropout = m.config.attention_dropout = 0;
    const int count = tokens ? prompt + 1 : 8 * seqs * length + 1, vocab = m.config.vocab_size;
    tt_token_stream *s = data ? tt_token_stream_open(ctx, data, 2, vocab, -1)
                              : random_tokens(ctx, count, vocab);
    if (!s) bench_die("%s", tt_error(ctx));
    if (tokens) generate(ctx, &m, s, prompt, tokens);
    else train(ctx, &m, s, seqs, length, steps, turns, update, recompute);
    tt_token_stream_free(s);
    tt_lm_free(&m);
    bench_close();
    return 0;
}
