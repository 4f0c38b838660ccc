/* Times training steps of a transformer of GPT-2's shape (124 million parameters: 12 layers, width 768,
   vocabulary 50304, the head tied to the token embedding), built from ops, on random tokens with AdamW. If
   --peer names build/llmc (peers/llmc.c), the steps run in turn with llm.c's.

   Milliseconds are medians. FLOPs are those of matmuls and attention. The ratio is llm.c's median time over
   ours. */

#include "../bench.h"

#include <signal.h>
#include <sys/wait.h>

enum { LAYERS = 12, WIDTH = 768, HEADS = 12, VOCAB = 50257, TABLE = 50304, POSITIONS = 1024, MAX = 1000 };

static tt_value linear(tt_context *ctx, tt_tape *t, tt_value x, int layer, const char *name, int64_t n_in,
                       int64_t n_out, float scale)
{
    char w[64], b[64];
    snprintf(w, sizeof w, "h.%d.%s.weight", layer, name);
    snprintf(b, sizeof b, "h.%d.%s.bias", layer, name);
    return tt_linear(t, x, bench_param(ctx, w, n_out, n_in, scale), bench_param(ctx, b, 0, n_out, 0));
}

static tt_value layernorm(tt_context *ctx, tt_tape *t, tt_value x, int layer, const char *name)
{
    const int64_t width = WIDTH;
    const tt_init ones = {TT_INIT_ONES, 0};
    char w[64], b[64];
    snprintf(w, sizeof w, "h.%d.%s.weight", layer, name);
    snprintf(b, sizeof b, "h.%d.%s.bias", layer, name);
    tt_param *scale = tt_param_new(ctx, w, 1, &width, ones);
    if (!scale) bench_die("%s", tt_error(ctx));
    return tt_layernorm(t, x, scale, bench_param(ctx, b, 0, WIDTH, 0), 1e-5f);
}

/* The peer: a process that does one training step for each line that it reads. */
static FILE *to_peer, *from_peer;

static void start_peer(const char *program, int batch, int length, int threads)
{
    int in[2], out[2];
    char text[3][16];
    if (access(program, X_OK) != 0)
        bench_die("cannot run the peer '%s': %s; build it with make bench-peers LLMC=DIR", program,
                  strerror(errno));
    if (pipe(in) != 0 || pipe(out) != 0) bench_die("cannot make a pipe: %s", strerror(errno));
    snprintf(text[0], sizeof text[0], "%d", batch);
    snprintf(text[1], sizeof text[1], "%d", length);
    snprintf(text[2], sizeof text[2], "%d", threads);
    signal(SIGPIPE, SIG_IGN);
    pid_t child = fork();
    if (child < 0) bench_die("cannot start a process: %s", strerror(errno));
    if (child == 0) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        close(in[0]), close(in[1]), close(out[0]), close(out[1]);
        setenv("OMP_NUM_THREADS", text[2], 1);
        execl(program, program, text[0], text[1], (char *)NULL);
        _exit(127);
    }
    close(in[0]), close(out[1]);
    to_peer = fdopen(in[1], "w");
    from_peer = fdopen(out[0], "r");
    if (!to_peer || !from_peer) bench_die("cannot make a pipe: %s", strerror(errno));
}

static double peer_step(double *loss) /* milliseconds */
{
    char line[256];
    double ms;
    fputc('\n', to_peer);
    fflush(to_peer);
    while (fgets(line, sizeof line, from_peer))
        if (sscanf(line, "step %lf ms, loss %lf", &ms, loss) == 2) return ms;
    bench_die("the peer ended before the last step");
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, bench_ascending);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

int main(int argc, char **argv)
{
    int batch = 4, length = 64, steps = 5;
    const char *peer = NULL;
    const bench_flag flags[] = {
        {"--batch", &batch, NULL, NULL, "sequences in a step"},
        {"--length", &length, NULL, NULL, "tokens of a sequence, up to 1024"},
        {"--steps", &steps, NULL, NULL, "measured steps, after one that is not measured"},
        {"--peer", NULL, &peer, NULL, "PROGRAM, such as build/llmc, whose steps run in turn with these"}};
    tt_context *ctx = bench_open(argc, argv, flags, TT__COUNT(flags));
    if (length > POSITIONS)
        bench_die("--length is %d, but the model has only %d positions", length, POSITIONS);
    if (batch > 4096) bench_die("--batch is %d, but must be at most 4096", batch);
    if (steps > MAX) bench_die("--steps is %d, but must be at most %d", steps, MAX);
    if (peer) start_peer(peer, batch, length, tt_threads(ctx));

    int rows = batch * length;
    tt_tape *t = tt_tape_new(ctx);
    tt_value ids = tt_input(t, "ids", TT_I32, rows, 1), targets = tt_input(t, "targets", TT_I32, rows, 1);
    tt_value positions = tt_input(t, "positions", TT_I32, rows, 1),
             seq_start = tt_seq_start(t, "seq_start", batch);
    tt_param *table = bench_param(ctx, "wte", TABLE, WIDTH, 0.02f);
    tt_value x = tt_add(t, tt_embedding(t, ids, table),
                        tt_embedding(t, positions, bench_param(ctx, "wpe", POSITIONS, WIDTH, 0.02f)));
    tt_attention_options attention = tt_attention_options_default(HEADS);
    attention.causal = true;
    for (int k = 0; k < LAYERS; k++) {
        tt_value qkv = linear(ctx, t, layernorm(ctx, t, x, k, "ln_1"), k, "attn.c_attn", WIDTH, 3 * WIDTH,
                              0.02f),
                 part[3];
        for (int j = 0; j < 3; j++) part[j] = tt_slice(t, qkv, j * WIDTH, WIDTH);
        tt_value seen = tt_attention(t, part[0], part[1], part[2], seq_start, &attention);
        x = tt_add(t, x, linear(ctx, t, seen, k, "attn.c_proj", WIDTH, WIDTH, 0.02f));
        tt_value up = linear(ctx, t, layernorm(ctx, t, x, k, "ln_2"), k, "mlp.c_fc", WIDTH, 4 * WIDTH, 0.02f);
        x = tt_add(t, x, linear(ctx, t, tt_gelu_tanh(t, up), k, "mlp.c_proj", 4 * WIDTH, WIDTH, 0.02f));
    }
    tt_value loss = tt_cross_entropy(t, tt_linear(t, layernorm(ctx, t, x, LAYERS, "ln_f"), table, NULL),
                                     targets, NULL);
    tt_compile_options o = tt_compile_options_default();
    o.precision = bench.precision;
    o.optimizer.weight_decay = 0;
    tt_program *p = tt_compile(t, loss, &o);
    if (!p) bench_die("%s", tt_error(ctx));

    int32_t *data = (int32_t *)malloc((size_t)(2 * rows + 1 + batch + 1) * sizeof *data),
            *place = data + rows + 1, *starts = place + rows;
    uint32_t random = 1;
    if (!data) bench_die("out of memory");
    for (int r = 0; r <= rows; r++) {
        random = random * 1664525u + 1013904223u;
        data[r] = (int32_t)((random >> 8) % VOCAB);
    }
    for (int r = 0; r < rows; r++) place[r] = r % length;
    for (int s = 0; s <= batch; s++) starts[s] = s * length;

    double mine[MAX], theirs[MAX], peer_loss = 0, first_peer_loss = 0, first_loss = 0;
    tt_stats s;
    memset(&s, 0, sizeof s);
    for (int step = 0; step <= steps; step++) { /* step 0 warms up and is not counted */
        double begin = tt__seconds();
        bool ok = tt_set(p, ids, data, rows) == TT_OK && tt_set(p, targets, data + 1, rows) == TT_OK &&
                  tt_set(p, positions, place, rows) == TT_OK &&
                  tt_set(p, seq_start, starts, batch + 1) == TT_OK && tt_step(p, 1e-4f, &s) == TT_OK;
        if (!ok) bench_die("%s", tt_error(ctx));
        mine[step > 0 ? step - 1 : 0] = 1e3 * (tt__seconds() - begin);
        if (peer) theirs[step > 0 ? step - 1 : 0] = peer_step(&peer_loss);
        if (step == 0) first_loss = s.loss, first_peer_loss = peer_loss;
    }
    double ms = median(mine, steps), peer_ms = peer ? median(theirs, steps) : 0;
    char name[64];
    snprintf(name, sizeof name, "GPT-2 124M, %d x %d", batch, length);
    if (!bench.json) {
        printf("%s: loss %.4f, after %d steps %.4f", name, first_loss, steps, s.loss);
        if (peer) printf("; llm.c %.4f, %.4f; %.4g ms a step", first_peer_loss, peer_loss, peer_ms);
        printf("\n%-48s %10.4g ms\n", name, ms);
    }
    bench_peer_row(name, 1e3 * rows / ms, "tokens/s", 0, peer ? 1e3 * rows / peer_ms : 0);
    double speed = s.flops / ms / 1e6, peak = bench_peak(bench.precision, speed * 1e9) / 1e9;
    bench_peer_row(name, speed, "GFLOP/s", peak, peer ? s.flops / peer_ms / 1e6 : 0);
    if (peer) {
        fclose(to_peer);
        fclose(from_peer);
        wait(NULL);
    }
    tt_program_free(p);
    tt_tape_free(t);
    free(data);
    bench_close();
    return 0;
}
