/* Trains language models and continues texts with them: GPT-2, LLaMA, Mistral, Qwen2, Pythia, Falcon.

   A small model of bytes from scratch, on examples/data/pride_and_prejudice.txt:
       make gpt
   A checkpoint, on texts of your own (a file, or a folder of *.txt):
       build/gpt --model gpt2/ --data texts/ --out tuned
   The same with low-rank adapters, which are saved as a peft folder:
       build/gpt --model gpt2/ --data texts/ --lora 8 --out adapter
   Continue a text with a checkpoint, or with what was trained:
       build/gpt --model gpt2/ --generate "Once upon a time"
       build/gpt --out tuned --generate "Once upon a time" --temperature 0.7
       build/gpt --model gpt2/ --adapter adapter --generate "Once upon a time" */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"
#include "cli.h"

/* ------------------------------------------------------------------------------------------------ options */
static struct {
    const char *data, *separator, *model, *kind, *lora_targets, *adapter, *generate;
    int layers, hidden, heads, length, batch, accumulate, epochs, lora, tokens, top_k;
    double lora_alpha, held, temperature, top_p, penalty;
    bool across, shaped; /* shaped: one of --kind to --heads was given */
    cli_training run;
} opt = {.kind = "llama", .layers = 4, .hidden = 160, .heads = 5, .accumulate = 1, .held = 0.05,
         .tokens = 400, .temperature = 0.5, .top_p = 1, .penalty = 1,
         .run = {CLI_TRAINING_DEFAULT, .schedule = "cosine"}};

static const cli_flag flags[] = {
    {"--data", "PATH", CLI_TEXT, &opt.data, .help = "text file, folder of *.txt, or .bin file of token ids, "
     "as nanoGPT's or llm.c's, of 2 or 4 bytes (examples/data/pride_and_prejudice.txt)"},
    {"--separator", "LINE", CLI_TEXT, &opt.separator, .help = "a line that parts two documents of a text, as "
     "'<|endoftext|>'; '' for empty lines (none: a file is one document)", .most = 1000},
    {"--across", "", CLI_SWITCH, &opt.across,
     .help = "tokens see the documents before theirs in a window"},
    {"--model", "DIR", CLI_TEXT, &opt.model, .help = "Hugging Face folder to start from: config.json, "
     "model.safetensors or its shards, tokenizer.json (none: from scratch, on bytes)"},
    {"--kind", "NAME", CLI_CHOICE, &opt.kind, .help = "without --model: the architecture",
     .choices = "gpt2 llama mistral qwen2 gpt_neox falcon", .given = &opt.shaped},
    {"--layers", "N", CLI_INTEGER, &opt.layers, .help = "... its layers", .least = 1, .most = 1000,
     .given = &opt.shaped},
    {"--hidden", "N", CLI_INTEGER, &opt.hidden, .help = "... its width", .least = 1, .most = 65536,
     .given = &opt.shaped},
    {"--heads", "N", CLI_INTEGER, &opt.heads, .help = "... heads, of which --hidden is a multiple",
     .least = 1, .most = 4096, .given = &opt.shaped},
    {"--lora", "N", CLI_INTEGER, &opt.lora, .help = "with --model: train adapters of rank N alone, and save "
     "these as a peft folder (0: train the model)", .most = 65536},
    {"--lora-targets", "LIST", CLI_TEXT, &opt.lora_targets, .help = "... of modules of these names, with "
     "commas between, *, ? and [0-3] (peft's choice, as q_proj,v_proj)", .least = 1, .most = 1000},
    {"--lora-alpha", "X", CLI_NUMBER, &opt.lora_alpha,
     .help = "... scaled by X / N (0: twice --lora)", .most = 1e9},
    {"--adapter", "DIR", CLI_TEXT, &opt.adapter,
     .help = "with --model: a peft folder that it gets before training or --generate"},
    {"--length", "N", CLI_INTEGER, &opt.length, .help = "tokens of a window (0: 256, or as many as the model "
     "has positions if fewer)", .most = 1e6},
    {"--batch", "N", CLI_INTEGER, &opt.batch, .help = "windows in a step (0: 8 with --model, "
     "else 2)", .most = 65536},
    {"--accumulate", "N", CLI_INTEGER, &opt.accumulate,
     .help = "micro-batches in a step, for each of --groups", .least = 1, .most = 65536},
    {"--epochs", "N", CLI_INTEGER, &opt.epochs,
     .help = "passes over the texts (0: 1 with --model, else 2)", .most = 1e9},
    {"--held-out", "X", CLI_NUMBER, &opt.held, .help = "share of the tokens, the last, to validate on",
     .most = 1},
    {"--lr", "X", CLI_NUMBER, &opt.run.lr,
     .help = "peak learning rate (0: 5e-5 with --model, else 1e-3)", .most = 1e9},
    CLI_TRAINING_FLAGS(opt.run),
    {"--generate", "TEXT", CLI_TEXT, &opt.generate,
     .help = "continue TEXT with the model in --model, or else in --out"},
    {"--tokens", "N", CLI_INTEGER, &opt.tokens, .help = "most tokens of the answer", .least = 1, .most = 1e6},
    {"--temperature", "X", CLI_NUMBER, &opt.temperature,
     .help = "of sampling; 0: always the likeliest token", .most = 1e6},
    {"--top-k", "N", CLI_INTEGER, &opt.top_k, .help = "sample from the likeliest N (0: all)", .most = 1e9},
    {"--top-p", "X", CLI_NUMBER, &opt.top_p,
     .help = "... and from the fewest whose probabilities are X together", .most = 1},
    {"--penalty", "X", CLI_NUMBER, &opt.penalty,
     .help = "makes tokens that were there before less likely, above 1", .most = 1e6},
};

static void read_options(int argc, char **argv)
{
    cli_parse(argc, argv, flags, CLI_COUNT(flags), "gpt",
              "Trains language models and continues texts with them.");
    if (opt.shaped && (opt.model || opt.generate))
        die("--kind, --layers, --hidden and --heads make a new model, and --%s %s: leave them out",
            opt.model ? "model" : "generate", opt.model ? "has one" : "uses one");
    if (opt.generate && (opt.data || opt.run.resume))
        die("--generate trains nothing: leave out --data and --resume");
    if (!opt.batch) opt.batch = opt.accumulate * (opt.model ? 8 : 2);
    if (opt.accumulate > opt.batch) die("--accumulate %d is more than --batch %d", opt.accumulate, opt.batch);
    if (opt.hidden % opt.heads) die("--hidden %d is not a multiple of --heads %d", opt.hidden, opt.heads);
    const bool turns = strcmp(opt.kind, "gpt2") != 0 && strcmp(opt.kind, "gpt_neox") != 0;
    if (!opt.model && turns && opt.hidden / opt.heads % 2)
        die("--hidden %d and --heads %d make heads of %d columns: --kind %s turns them in pairs, so choose "
            "an even number", opt.hidden, opt.heads, opt.hidden / opt.heads, opt.kind);
    if (!(opt.top_p > 0)) die("--top-p %g: expected a number above 0, up to 1 (all tokens)", opt.top_p);
    if (!(opt.penalty > 0)) die("--penalty %g: expected a number above 0 (1: none)", opt.penalty);
    if ((opt.lora || opt.adapter) && !opt.model) die("--lora and --adapter adapt a --model: name one");
    if (opt.lora && opt.generate)
        die("--lora makes adapters to train, and --generate trains nothing: leave one out, or name trained "
            "ones by --adapter");
    if (opt.lora && opt.adapter) die("--lora makes new adapters, and --adapter has some: choose one");
    if ((opt.lora_targets || opt.lora_alpha > 0) && !opt.lora)
        die("--lora-targets and --lora-alpha are of new adapters: give them a rank by --lora N");
    if (opt.lora_alpha == 0) opt.lora_alpha = 2 * opt.lora;
    check_training(&opt.run);
    if (!opt.data && !opt.generate) opt.data = sample_data(argv[0], "pride_and_prejudice.txt");
    if (!opt.epochs) opt.epochs = opt.model ? 1 : 2;
    if (opt.run.lr == 0) opt.run.lr = opt.model ? 5e-5 : 1e-3;
}

/* ----------------------------------------------------------------------------------------- data and model */
enum { BYTES = 257 }; /* tokens of a model of bytes: these, and what ends a document */

/* The tokenizer of a folder; NULL: its model is one of bytes, whose folder has none. */
static tt_tokenizer *open_tokenizer(tt_context *ctx, const char *folder, const tt_lm *m)
{
    const bool bytes = m->config.vocab_size == BYTES && !holds(folder, "tokenizer.json");
    return bytes ? NULL : (tt_tokenizer *)made(ctx, tt_tokenizer_load(ctx, folder));
}

/* The token that ends a document; -1: there is none. */
static int document_end(const tt_tokenizer *k, const tt_lm *m)
{
    const int end = k ? tt_tokenizer_special(k, TT_TOKEN_EOS) : BYTES - 1;
    return end < 0 && m->n_stop ? m->stop[0] : end;
}

static tt_token_stream *read_data(tt_context *ctx, const tt_tokenizer *k, const tt_lm *m)
{
    const char *ending = strrchr(opt.data, '.');
    tt_stream_options o = tt_stream_options_default();
    o.tokenizer = k;
    o.separator = opt.separator;
    o.vocab = m->config.vocab_size;
    o.end = document_end(k, m);
    if (!ending || strcmp(ending, ".bin") != 0)
        return (tt_token_stream *)made(ctx, tt_token_stream_read(ctx, opt.data, &o));
    return (tt_token_stream *)made(ctx, tt_token_stream_open(ctx, opt.data, 0, o.vocab, o.end));
}

/* The start of training: a checkpoint, or a small model with random weights. */
static void make_model(tt_context *ctx, tt_lm *m)
{
    if (opt.model) {
        must(ctx, tt_lm_load(ctx, m, opt.model));
    } else {
        tt_lm_config c = tt_lm_config_default(opt.kind);
        /* heads that share keys, as far as these can */
        const int each = c.key_heads ? c.heads / c.key_heads : 1;
        c.vocab_size = BYTES;
        c.end_token = BYTES - 1;
        c.layers = opt.layers, c.hidden_size = opt.hidden, c.heads = opt.heads;
        c.key_heads = c.heads % each ? c.heads : c.heads / each;
        c.intermediate_size = opt.hidden * (strcmp(c.activation, "silu") == 0 ? 8 : 12) / 3;
        c.rotary.size = c.rotary.size * 4 < 128 ? c.hidden_size / c.heads / 8 * 2 : 0;
        c.max_positions = opt.length ? opt.length : 256;
        c.window = 0;
        c.tied = true;
        c.embedding_dropout = c.dropout = c.attention_dropout = 0;
        must(ctx, tt_lm_new(ctx, m, &c));
    }
    if (opt.adapter) must(ctx, tt_lm_lora_load(m, opt.adapter));
    if (opt.lora) {
        tt_lora_options o = tt_lora_options_default();
        o.targets = opt.lora_targets;
        o.rank = opt.lora;
        o.alpha = (float)opt.lora_alpha;
        must(ctx, tt_lm_lora(m, &o));
    }
    const float rate = (float)opt.run.dropout;
    if (rate >= 0) m->config.embedding_dropout = m->config.dropout = m->config.attention_dropout = rate;
    if (!opt.length) opt.length = m->config.max_positions < 256 ? m->config.max_positions : 256;
    if (opt.length > m->config.max_positions)
        die("--length %d: the model has positions for %d", opt.length, m->config.max_positions);
    freeze(ctx, opt.run.freeze);
}

static tt_token_loader *loader_of(tt_context *ctx, const tt_token_stream *s, bool train)
{
    tt_token_loader_options o = tt_token_loader_options_default();
    o.batch = opt.batch;
    o.accumulate = opt.accumulate;
    o.length = opt.length;
    o.across = opt.across;
    o.shuffle = train;
    o.parallel = opt.run.parallel;
    return (tt_token_loader *)made(ctx, tt_token_loader_new(ctx, s, &o));
}

/* ------------------------------------------------------------------------------------------- continuation */

/* Prints tokens as they come, as they are decoded behind the text that they continue. */
typedef struct printer {
    tt_decode_stream *text; /* NULL: tokens are bytes */
    const char *known;      /* what is still to come out of it of the text that is continued */
} printer;

static void print_text(printer *p, const char *text, size_t bytes)
{
    if (!text) die("out of memory");
    size_t known = 0;
    while (known < bytes && p->known[known] && text[known] == p->known[known]) known++;
    const bool other = known < bytes && p->known[known]; /* bytes that end the known text may be another with
                                                            those behind: from that character on */
    while (other && known && (text[known] & 0xc0) == 0x80) known--;
    p->known = other ? "" : p->known + known;
    fwrite(text + known, 1, bytes - known, stdout);
}

static bool show_token(void *user, int seq, int32_t id)
{
    printer *p = (printer *)user;
    size_t bytes;
    (void)seq;
    if (!p->text && id < 256) putchar(id);
    if (p->text) {
        const char *text = tt_decode_stream_put(p->text, &id, 1, &bytes);
        print_text(p, text, bytes);
    }
    return fflush(stdout) == 0 && !stop_signal;
}

/* Continues a text with the model of a folder, and an adapter or NULL, in a context of its own. */
static void continue_text(const char *folder, const char *adapter, const char *text)
{
    tt_context *ctx = open_context(opt.run.seed, opt.run.threads, opt.run.timeout);
    tt_lm m;
    if (tt_processes(ctx) > 1)
        die("--generate runs in one process, and there are %d: start it without mpirun", tt_processes(ctx));
    must(ctx, tt_lm_load(ctx, &m, folder));
    if (adapter) {
        must(ctx, tt_lm_lora_load(&m, adapter));
        must(ctx, tt_lm_lora_merge(&m)); /* which is faster */
    }
    tt_tokenizer *k = open_tokenizer(ctx, folder, &m);
    const int64_t bytes = (int64_t)strlen(text), room = bytes + 64;
    int32_t *ids = (int32_t *)made(NULL, malloc(sizeof *ids * (size_t)room));
    int64_t n = bytes;
    if (k) n = tt_tokenizer_encode(k, text, (size_t)bytes, true, ids, room);
    else for (int64_t i = 0; i < bytes; i++) ids[i] = (uint8_t)text[i];
    int32_t first; /* of what the tokenizer puts around a text */
    if (k && n > 1 && ids[0] == ids[1] && tt_tokenizer_encode(k, "", 0, true, &first, 1) && first == ids[0]) {
        fprintf(stderr, "note: --generate spells out '%s', which is put in front of a text: it has it once\n",
                tt_tokenizer_token(k, first));
        memmove(ids, ids + 1, sizeof *ids * (size_t)--n);
    }
    const int end = document_end(k, &m);
    int32_t *stop = (int32_t *)made(NULL, malloc(sizeof *stop * (size_t)(m.n_stop + 1)));
    for (int i = 0; i < m.n_stop; i++) stop[i] = m.stop[i];
    stop[m.n_stop] = end;
    if (n < 0) die("out of memory");
    if (n > room) die("--generate: a text of %lld bytes has %lld tokens", (long long)bytes, (long long)n);
    if (n == 0) ids[n++] = end < 0 ? 0 : end; /* as at the beginning of a document */

    tt_generator_options o = tt_generator_options_default();
    char device[64]; /* the first, which is enough */
    if (opt.run.device) {
        snprintf(device, sizeof device, "%.*s", (int)strcspn(opt.run.device, "*,"), opt.run.device);
        o.compile.device = device;
    }
    o.compile.precision = opt.run.precision;
    o.compile.memory_budget = opt.run.budget;
    const int64_t most = n + opt.tokens;
    o.context = (int)(most < m.config.max_positions ? most : m.config.max_positions);
    if (n >= o.context)
        die("--generate: the text has %lld tokens, and the model %d positions", (long long)n, o.context);
    tt_generator *g = (tt_generator *)made(ctx, tt_generator_new(&m, &o));
    tt_sampling s = tt_sampling_default();
    printer p = {NULL, ""};
    char *known = NULL;
    size_t rest = 0; /* bytes that come first, or last */
    if (k) {
        const int64_t length = tt_tokenizer_decode(k, ids, n, true, NULL, 0);
        if (length < 0) die("out of memory");
        known = (char *)made(NULL, malloc((size_t)length + 1));
        tt_tokenizer_decode(k, ids, n, true, known, (size_t)length + 1);
        p.text = (tt_decode_stream *)made(ctx, tt_decode_stream_new(k, true));
        if (!tt_decode_stream_put(p.text, ids, n, &rest)) die("out of memory");
        p.known = known + rest;
    }
    s.max_new = opt.tokens;
    s.temperature = (float)opt.temperature;
    s.top_k = opt.top_k;
    s.top_p = (float)opt.top_p;
    s.repetition_penalty = (float)opt.penalty;
    s.seed = (uint64_t)opt.run.seed;
    s.stop = stop;
    s.n_stop = m.n_stop + (end >= 0);
    s.token = show_token;
    s.user = &p;
    const int32_t start[2] = {0, (int32_t)n};
    int count;
    struct timespec t[2];
    int32_t *out = (int32_t *)made(NULL, malloc(sizeof *out * (size_t)opt.tokens));
    printf("%s", text);
    fflush(stdout);
    handle_signals(true);
    clock_gettime(CLOCK_MONOTONIC, &t[0]);
    tt_status status = tt_generate(g, ids, start, 1, &s, out, &count);
    clock_gettime(CLOCK_MONOTONIC, &t[1]);
    handle_signals(false);
    if (status != TT_OK) putchar('\n'); /* so that the error has a line of its own */
    must(ctx, status);
    if (k) {
        const char *last = tt_decode_stream_end(p.text, &rest);
        print_text(&p, last, rest);
    }
    const double seconds = (double)(t[1].tv_sec - t[0].tv_sec) + 1e-9 * (double)(t[1].tv_nsec - t[0].tv_nsec);
    printf("\n");
    if (isatty(STDERR_FILENO)) fprintf(stderr, "[%d tokens, %.1f a second]\n", count, count / seconds);
    free(ids), free(out), free(stop), free(known), tt_decode_stream_free(p.text);
    tt_generator_free(g), tt_lm_free(&m), tt_tokenizer_free(k), tt_close(ctx);
}

/* ----------------------------------------------------------------------------------------------- training */
typedef struct run { const tt_lm *m; const tt_tokenizer *k; } run;

static tt_status keep(void *user) /* as transformers and --generate load it */
{
    run *r = (run *)user;
    if (r->m->n_lora) return tt_lm_lora_save(r->m, opt.run.out);
    tt_status status = tt_lm_save(r->m, opt.run.out);
    return status == TT_OK && r->k ? tt_tokenizer_save(r->k, opt.run.out) : status;
}

/* Perplexity of the held-out tokens, and bits per byte, which compare models with other tokenizers. */
static void test(tt_context *ctx, tt_trainer *t, const tt_source *source, const tt_token_stream *held)
{
    tt_stats s;
    must(ctx, tt_evaluate(t, source, &s));
    const double bytes = (double)tt_token_stream_bytes(held);
    printf("last epoch: perplexity %.3f", exp(s.loss));
    if (bytes > 0) printf(", %.3f bits per byte", s.loss / log(2) * s.targets / bytes);
    printf(" on %.0f held-out tokens\n", s.targets);
}

static int train(void)
{
    if (!opt.run.plan) check_folder(opt.run.out, opt.run.resume, !opt.lora && !opt.adapter);
    tt_context *ctx = open_training(&opt.run);
    tt_lm m;
    make_model(ctx, &m);
    tt_tokenizer *k = opt.model ? open_tokenizer(ctx, opt.model, &m) : NULL;
    tt_token_stream *s = read_data(ctx, k, &m), *held = NULL;
    const int64_t count = tt_token_stream_count(s), apart = (int64_t)(opt.held * (double)count);
    if (count - apart < 2)
        die("--held-out %g leaves %lld of %lld tokens to train on: it is the share to validate on, as 0.05",
            opt.held, (long long)(count - apart), (long long)count);
    if (apart > 1) held = (tt_token_stream *)made(ctx, tt_token_stream_split(s, apart));
    tt_token_loader *l = loader_of(ctx, s, true), *validation = held ? loader_of(ctx, held, false) : NULL;
    const tt_source *source = tt_token_loader_source(l), *other = tt_token_loader_source(validation);

    tt_model model = tt_lm_model(&m);
    tt_train_options o = training_options(&opt.run, source->steps * opt.epochs);
    o.max_seqs = o.max_tokens = 1;
    tt_train_options_make_room(&o, source, other);
    expect_micros(&o, opt.accumulate);
    tt_trainer *t = (tt_trainer *)made(ctx, tt_trainer_new(ctx, &model, &o));
    printf("%lld tokens to train on, %lld for validation; ", (long long)tt_token_stream_count(s),
           held ? (long long)tt_token_stream_count(held) : 0LL);
    printf("%s of %.1f million parameters, %d threads, %s\n", opt.model ? opt.model : opt.kind,
           1e-6 * (double)tt_program_plan(tt_trainer_program(t)).params, tt_threads(ctx), tt_isa(ctx));
    show_plan(tt_trainer_program(t), opt.run.plan ? opt.run.out : NULL);

    run r = {&m, k};
    bool finished = false;
    int result = 0;
    if (!opt.run.plan) result = fit(t, ctx, source, other, &opt.run, opt.epochs, keep, &r, &finished);
    if (finished && !result && held) test(ctx, t, other, held);
    const bool alone = tt_processes(ctx) == 1;
    tt_trainer_free(t), tt_token_loader_free(l), tt_token_loader_free(validation);
    tt_token_stream_free(held), tt_token_stream_free(s);
    tt_lm_free(&m), tt_tokenizer_free(k), tt_close(ctx);
    if (finished && !result) {
        printf("saved: %s\n\n", opt.run.out);
        if (!alone) return result; /* a text is continued by one process */
        const bool adapts = opt.lora || opt.adapter;
        continue_text(adapts ? opt.model : opt.run.out, adapts ? opt.run.out : NULL,
                      opt.model ? "" : "It is a truth ");
    }
    return result;
}

int main(int argc, char **argv)
{
    read_options(argc, argv);
    if (!opt.generate) return train();
    if (!opt.model && holds(opt.run.out, "adapter_config.json"))
        die("'%s' holds an adapter: name its model by --model, and it by --adapter", opt.run.out);
    if (!opt.model && !holds(opt.run.out, "config.json"))
        die("'%s' holds no trained model: --model names one, or train", opt.run.out);
    continue_text(opt.model ? opt.model : opt.run.out, opt.adapter, opt.generate);
    return 0;
}
