/* Options of programs for language models, and functions that make a model from the options. A program
   includes this file once, after cli.h. */
#ifndef EXAMPLES_LM_H
#define EXAMPLES_LM_H

typedef struct cli_lm {
    const char *kind, *weights, *lora_targets, *adapter, *base_bits;
    int layers, hidden, heads, length, lora, tokens, top_k;
    double lora_alpha, temperature, top_p, penalty;
    bool shaped, layered; /* the command line has --kind, --hidden or --heads; --layers */
    bool whole, all_tokens;
} cli_lm;

#define LM_DEFAULT \
    {.kind = "llama", .weights = "none", .layers = 4, .hidden = 160, .heads = 5, \
     .tokens = 400, .temperature = 0.5, .top_p = 1, .penalty = 1}
#define LM_MODEL_FLAGS(lm) \
    {"--kind", "NAME", CLI_CHOICE, &(lm).kind, .help = "without --model: the architecture", \
     .choices = "gpt2 llama mistral qwen2 qwen3 gemma3_text gpt_neox falcon", .given = &(lm).shaped}, \
    {"--layers", "N", CLI_INTEGER, &(lm).layers, \
     .help = "number of layers; with --model: train a smaller model, N layers of the model, evenly chosen " \
     "(4; with --model, all)", .min = 1, .max = 1000, .given = &(lm).layered}, \
    {"--hidden", "N", CLI_INTEGER, &(lm).hidden, .help = "without --model: width of a layer", .min = 1, \
     .max = 65536, .given = &(lm).shaped}, \
    {"--heads", "N", CLI_INTEGER, &(lm).heads, \
     .help = "without --model: heads; --hidden must be a multiple of them", .min = 1, .max = 4096, \
     .given = &(lm).shaped}, \
    {"--weights", "NAME", CLI_CHOICE, &(lm).weights, .help = "train the matrices of the layers in few " \
     "bits, in which they are also saved", .choices = "none int8 ternary binary"}, \
    {"--lora", "N", CLI_INTEGER, &(lm).lora, \
     .help = "with --model: train only adapters of rank N, and save them as a peft folder (0: train the " \
     "model)", .max = 65536}, \
    {"--lora-targets", "LIST", CLI_TEXT, &(lm).lora_targets, \
     .help = "with --lora: modules that get adapters: patterns of names with *, ? and [0-3], separated by " \
     "commas (peft's choice, such as q_proj,v_proj)", .min = 1, .max = 1000}, \
    {"--lora-alpha", "X", CLI_NUMBER, &(lm).lora_alpha, \
     .help = "with --lora N: adapters are scaled by X / N (0: twice N)", .max = 1e9}, \
    {"--adapter", "DIR", CLI_TEXT, &(lm).adapter, \
     .help = "with --model: a peft folder, whose adapter the model gets before training or --generate"}, \
    {"--base-bits", "N", CLI_CHOICE, &(lm).base_bits, .choices = "8 4 int4 budget", \
     .help = "with --lora, --adapter, --generate or --chat: keep the weights of the model's linear layers " \
     "in int8 (8), NF4 (4) or groups of 4-bit integers (int4); budget: in floats, else 8, else 4, the " \
     "first that fits --budget:"}, \
    {"--length", "N", CLI_INTEGER, &(lm).length, .help = "tokens of a window (0: 256, or as many as the " \
     "model has positions if fewer); with --chat, of a conversation (0: 4096, or as many)", .max = 1e6}, \
    {"--whole", "", CLI_SWITCH, &(lm).whole, \
     .help = "a window is one document or conversation, cut to --length"}, \
    {"--all-tokens", "", CLI_SWITCH, &(lm).all_tokens, \
     .help = "learn all tokens of conversations, not only the answers"}
#define LM_SAMPLING_FLAGS(lm) \
    {"--tokens", "N", CLI_INTEGER, &(lm).tokens, .help = "largest number of tokens of the answer", .min = 1, \
     .max = 1e6}, \
    {"--temperature", "X", CLI_NUMBER, &(lm).temperature, \
     .help = "temperature of sampling; 0: always take the likeliest token", .max = 1e6}, \
    {"--top-k", "N", CLI_INTEGER, &(lm).top_k, .help = "sample from the N likeliest tokens (0: all)", \
     .max = 1e9}, \
    {"--top-p", "X", CLI_NUMBER, &(lm).top_p, \
     .help = "sample from the fewest tokens whose probabilities sum to X", .max = 1}, \
    {"--penalty", "X", CLI_NUMBER, &(lm).penalty, \
     .help = "above 1: makes tokens that already occurred less likely", .max = 1e6}

static inline bool chooses_base(const cli_lm *lm) /* --base-bits budget */
{
    return lm->base_bits && strcmp(lm->base_bits, "budget") == 0;
}

/* Checks the options. generates: the program generates text and does not train. */
static inline void check_lm(cli_lm *lm, const cli_training *run, bool generates)
{
    const bool prunes = run->prune_heads > 0 || run->prune_neurons > 0, smaller = prunes || run->rank;
    if (lm->shaped && (run->model || generates))
        die("--kind, --hidden and --heads shape a new model, but --%s %s: leave them out",
            run->model ? "model" : "generate", run->model ? "has its own shape" : "uses a trained one");
    if ((lm->layered || smaller) && generates)
        die("--layers, --prune-heads, --prune-neurons and --rank shape a model to train, but --generate uses "
            "a trained one: leave them out");
    if ((lm->lora || lm->adapter) && (lm->layered || smaller))
        die("--lora and --adapter save an adapter alone, but --layers, --prune-heads, --prune-neurons and "
            "--rank change the model below it: train the smaller model first, and name it with --model");
    if (run->rank && strcmp(lm->weights, "none") != 0)
        die("--weights %s rounds matrices of the layers, which --rank replaces by factors: leave one out",
            lm->weights);
    if (generates && (run->data || run->resume))
        die("--generate trains nothing, nor does --chat: leave out --data and --resume");
    if (lm->hidden % lm->heads)
        die("--hidden is %d, but must be a multiple of --heads, %d", lm->hidden, lm->heads);
    if (!(lm->top_p > 0)) die("--top-p is %g, but must be above 0 and at most 1 (all tokens)", lm->top_p);
    if (!(lm->penalty > 0)) die("--penalty is %g, but must be above 0 (1: none)", lm->penalty);
    if ((lm->lora || lm->adapter) && !run->model)
        die("--lora and --adapter adapt a model: name it with --model");
    if (lm->lora && generates)
        die("--lora makes adapters to train, but --generate trains nothing: leave one out, or name trained "
            "adapters with --adapter");
    if (lm->lora && lm->adapter)
        die("--lora makes new adapters, but --adapter names trained ones: leave one out");
    if ((lm->lora || lm->adapter) && strcmp(lm->weights, "none") != 0)
        die("--weights %s trains the matrices of the layers, which --lora and --adapter keep: leave one out",
            lm->weights);
    if ((lm->lora_targets || lm->lora_alpha > 0) && !lm->lora)
        die("--lora-targets and --lora-alpha are for new adapters: set their rank with --lora N");
    if (lm->lora_alpha == 0) lm->lora_alpha = 2 * lm->lora;
    if (chooses_base(lm) && !run->budget)
        die("--base-bits budget chooses for a --budget, but there is none: set --budget");
    if (lm->base_bits && !lm->lora && !lm->adapter && !generates)
        die("--base-bits %s freezes the model's weights: train adapters with --lora N", lm->base_bits);
}

/* Stores the weights of the model's linear layers in `bits`, a value of --base-bits; NULL: leaves them as
   they are. generates: the layer of the logits gets 8 bits, unless its weight is the embedding. */
static inline void store_in(tt_context *ctx, tt_lm *m, const char *bits, bool generates)
{
    if (!bits) return;
    must(ctx, tt_lm_store(m, strcmp(bits, "8") == 0 ? "int8" : strcmp(bits, "4") == 0 ? "nf4" : bits));
    if (generates && m->head) must(ctx, tt_param_store(m->head, "int8"));
}

/* Stores the weights as --base-bits says, unless that is budget. */
static inline void store_base(tt_context *ctx, tt_lm *m, const cli_lm *lm, bool generates)
{
    if (!chooses_base(lm)) store_in(ctx, m, lm->base_bits, generates);
    else if (m->stored)
        die("--base-bits budget chooses for weights in floats, but the model's are in %s: leave it out",
            m->stored);
    else if (tt_processes(ctx) > 1)
        die("--base-bits budget is for one process, because each of several would choose: name the bits");
}

/* Makes a plan, with plan(user), on the model in floats, in 8 bits and in 4 bits, and prints the first that
   fits --budget. The weights are not read. plan(user) returns NULL on error. */
static inline void *choose_base(tt_context *ctx, tt_lm *m, bool generates, void *(*plan)(void *user),
                                void *user)
{
    static const struct { const char *bits, *cost; } all[] = {
        {NULL, "floats"},
        {"8", "8 bits (int8), which move a weight by 1% of the weights' deviation"},
        {"4", "4 bits (nf4), which move a weight by 9% of the weights' deviation"}};
    void *made_plan = NULL;
    int k = 0;
    for (; k < CLI_COUNT(all) && !made_plan; k++) {
        store_in(ctx, m, all[k].bits, generates);
        made_plan = plan(user);
        if (!made_plan && tt_error_code(ctx) != TT_ERR_BUDGET) die("%s", tt_error(ctx));
    }
    if (!made_plan) die("--base-bits budget: even 4 bits do not fit: %s", tt_error(ctx));
    printf("--base-bits budget: linear layers in %s", all[k - 1].cost);
    if (k > 1)
        printf("; %s did not fit. They take %.1f MB", k == 2 ? "floats" : "8 bits",
               (double)m->stored_bytes / 1e6);
    if (k > 1 && !generates) printf("; to --resume, set --base-bits %s", all[k - 1].bits);
    printf("\n");
    return made_plan;
}

/* The arguments of a plan that choose_base makes. */
typedef struct lm_plan {
    tt_context *ctx;
    const cli_training *run;
    const tt_model *model;
    const tt_source *train, *other;
    const tt_lm *m;
    const tt_generator_options *o;
} lm_plan;

static inline void *plan_trainer(void *user)
{
    const lm_plan *p = (const lm_plan *)user;
    return try_trainer(p->ctx, p->run, p->model, p->train, p->other, p->run->epochs);
}

static inline void *plan_generator(void *user)
{
    const lm_plan *p = (const lm_plan *)user;
    return tt_generator_new(p->m, p->o);
}

/* Makes the trainer of a model, and chooses the base of its adapters if --base-bits is budget. */
static inline tt_trainer *lm_trainer(tt_context *ctx, tt_lm *m, const cli_lm *lm, const cli_training *run,
                                     const tt_model *model, const tt_source *train, const tt_source *other)
{
    lm_plan p = {ctx, run, model, train, other, m, NULL};
    return (tt_trainer *)(chooses_base(lm) ? choose_base(ctx, m, false, plan_trainer, &p)
                                           : made(ctx, plan_trainer(&p)));
}

enum { BYTES = 257 }; /* vocabulary of a model of bytes: 256 bytes, and the end of a document */

/* Opens the tokenizer of a folder. Returns NULL for a model of bytes, which needs no tokenizer. */
static inline tt_tokenizer *open_tokenizer(tt_context *ctx, const char *folder, const tt_lm *m)
{
    const bool bytes = m->config.vocab_size == BYTES && !(folder && holds(folder, "tokenizer.json"));
    return bytes ? NULL : (tt_tokenizer *)made(ctx, tt_tokenizer_load(ctx, folder));
}

/* Rounds the matrices of the layers to few bits. A layer's parameters have its number in their names. */
static inline void round_layers(tt_context *ctx, const char *kind)
{
    static const struct { const char *name; tt_rounding kind; } all[] = {
        {"int8", TT_ROUND_INT8}, {"ternary", TT_ROUND_TERNARY}, {"binary", TT_ROUND_BINARY}};
    for (int k = 0; k < CLI_COUNT(all); k++)
        if (strcmp(kind, all[k].name) == 0)
            printf("%d matrices of the layers train in few bits: %s\n",
                   tt_param_round(ctx, "*.[0-9]*.weight", all[k].kind), kind);
}

/* Keeps n layers of a model: layer k is then layer k * layers / n of the model. */
static inline void keep_lm_layers(tt_context *ctx, tt_lm *m, int n)
{
    int which[1000]; /* as many as --layers accepts */
    tt_prune_options o = tt_prune_options_default();
    if (n > m->config.layers) die("--layers is %d, but the model has %d layers", n, m->config.layers);
    for (int k = 0; k < n; k++) which[k] = k * m->config.layers / n;
    o.layers = n;
    o.which = which;
    must(ctx, tt_lm_prune(m, NULL, &o));
}

/* Removes heads and neurons from the model, by importance for the source to train on, and replaces weights by
   factors. Query heads that share a key head count as one head. pairs: the source has pairs of answers. */
static inline void prune_lm(tt_context *ctx, tt_lm *m, const cli_training *run, const tt_source *source,
                            bool pairs)
{
    if (run->prune_heads > 0 || run->prune_neurons > 0) {
        const tt_train_options train = training_options(run, 1);
        const tt_prune_options o = prune_options(run, m->config.key_heads, m->config.intermediate_size);
        tt_importance *x = NULL; /* a plan needs the sizes alone */
        if (pairs)
            die("--prune-heads and --prune-neurons measure on texts, but '%s' has pairs of answers: prune "
                "with texts first", run->data);
        if (!run->plan) x = (tt_importance *)made(ctx, tt_lm_importance(m, source, PRUNE_STEPS, &train));
        must(ctx, tt_lm_prune(m, x, &o));
        tt_importance_free(x);
    }
    factor(ctx, run);
}

/* Makes the model to train: a checkpoint, or a small model with random weights. */
static inline void make_model(tt_context *ctx, tt_lm *m, cli_lm *lm, const cli_training *run)
{
    const float rate = (float)run->dropout;
    if (run->model) {
        must(ctx, tt_lm_load(ctx, m, run->model));
        if (lm->layered) keep_lm_layers(ctx, m, lm->layers);
    } else {
        tt_lm_config c = tt_lm_config_sized(lm->kind, lm->layers, lm->hidden, lm->heads);
        c.vocab_size = BYTES;
        c.end_token = BYTES - 1;
        c.max_positions = lm->length ? lm->length : 256;
        must(ctx, tt_lm_new(ctx, m, &c));
    }
    store_base(ctx, m, lm, false);
    if (m->stored && !lm->lora && !lm->adapter)
        die("the weights in '%s' are in %s, which cannot be trained: train adapters with --lora N",
            run->model, m->stored);
    if (m->stored) printf("linear layers: %.1f MB in %s\n", (double)m->stored_bytes / 1e6, m->stored);
    if (lm->adapter) must(ctx, tt_lm_lora_load(m, lm->adapter));
    if (lm->lora) {
        tt_lora_options o = tt_lora_options_default();
        o.targets = lm->lora_targets;
        o.rank = lm->lora;
        o.alpha = (float)lm->lora_alpha;
        must(ctx, tt_lm_lora(m, &o));
    }
    if (rate >= 0) m->config.embedding_dropout = m->config.dropout = m->config.attention_dropout = rate;
    if (!lm->length) lm->length = m->config.max_positions < 256 ? m->config.max_positions : 256;
    if (lm->length > m->config.max_positions)
        die("--length is %d, but must be at most %d, the model's positions", lm->length,
            m->config.max_positions);
    freeze(ctx, run->freeze);
    if (strcmp(lm->weights, "none") != 0) round_layers(ctx, lm->weights);
}

static inline tt_sampling sampling_of(const cli_lm *lm, int seed)
{
    tt_sampling s = tt_sampling_default();
    s.max_new = lm->tokens;
    s.temperature = (float)lm->temperature;
    s.top_k = lm->top_k;
    s.top_p = (float)lm->top_p;
    s.repetition_penalty = (float)lm->penalty;
    s.seed = (uint64_t)seed;
    return s;
}

static inline tt_token_loader *windows_of(tt_context *ctx, const tt_token_stream *s, const cli_lm *lm,
                                          const cli_training *run, bool across, bool train)
{
    tt_token_loader_options o = tt_token_loader_options_default();
    o.batch = run->batch;
    o.accumulate = run->accumulate;
    o.length = lm->length;
    o.across = across;
    o.whole = lm->whole;
    o.shuffle = train;
    o.parallel = run->parallel;
    return (tt_token_loader *)made(ctx, tt_token_loader_new(ctx, s, &o));
}

/* Makes a generator for at most `tokens` tokens, on the first device of --device, and chooses the model's
   bits if --base-bits is budget. n: tokens of the prompt. */
static inline tt_generator *generator_of(tt_context *ctx, tt_lm *m, const cli_lm *lm, const cli_training *run,
                                         int64_t tokens, int64_t n)
{
    tt_generator_options o = tt_generator_options_default();
    const char *all = run->device ? run->device : "";
    char device[64];
    snprintf(device, sizeof device, "%.*s", (int)strcspn(all, "*,"), all);
    if (*all) o.compile.device = device;
    o.compile.precision = run->precision;
    o.compile.memory_budget = run->budget;
    o.context = (int)(tokens < m->config.max_positions ? tokens : m->config.max_positions);
    if (n >= o.context)
        die("--generate: the text has %lld tokens, but must have fewer than the model's %d positions",
            (long long)n, o.context);
    lm_plan p = {ctx, run, NULL, NULL, NULL, m, &o};
    return (tt_generator *)(chooses_base(lm) ? choose_base(ctx, m, true, plan_generator, &p)
                                             : made(ctx, plan_generator(&p)));
}

static inline bool show_text(void *user, const char *text, size_t bytes)
{
    (void)user;
    fwrite(text, 1, bytes, stdout);
    return fflush(stdout) == 0 && !stop_signal;
}

static inline void continue_text(tt_context *ctx, tt_generator *g, const tt_tokenizer *k, const char *text,
                                 const tt_sampling *s)
{
    int count;
    struct timespec t[2];
    show_text(NULL, text, strlen(text));
    clock_gettime(CLOCK_MONOTONIC, &t[0]);
    const tt_status status = tt_generate_text(g, k, text, s, show_text, NULL, &count);
    clock_gettime(CLOCK_MONOTONIC, &t[1]);
    handle_signals(false);
    printf("\n");
    must(ctx, status);
    const double seconds = (double)(t[1].tv_sec - t[0].tv_sec) + 1e-9 * (double)(t[1].tv_nsec - t[0].tv_nsec);
    if (isatty(STDERR_FILENO)) fprintf(stderr, "[%d tokens, %.1f a second]\n", count, count / seconds);
}

/* ---- conversations */
enum { CHAT_MESSAGES = 1000, CHAT_LINE = 65536 };

/* Returns the max number of tokens of a conversation. */
static inline int chat_tokens(const cli_lm *lm, const tt_lm *m)
{
    const int tokens = lm->length ? lm->length : 4096;
    return tokens < m->config.max_positions ? tokens : m->config.max_positions;
}

static inline bool show_token(void *stream, int seq, int32_t id)
{
    size_t bytes;
    const char *text = tt_decode_stream_put((tt_decode_stream *)stream, &id, 1, &bytes);
    (void)seq;
    return text && show_text(NULL, text, bytes);
}

/* Returns the ids of the text of a conversation, followed by the start of an answer, and sets *count to their
   number. The caller frees the ids. */
static inline int32_t *chat_prompt(tt_context *ctx, const tt_tokenizer *k, const tt_message *messages, int n,
                                   int64_t *count)
{
    const int64_t bytes = tt_tokenizer_chat(k, messages, n, true, NULL, 0);
    if (bytes < 0) die("%s", tt_error(ctx));
    char *text = (char *)malloc((size_t)bytes + 1);
    if (!text) die("out of memory for the conversation: free memory");
    tt_tokenizer_chat(k, messages, n, true, text, (size_t)bytes + 1);
    tt_encoding e = {.text = text, .bytes = (size_t)bytes};
    e.room = tt_tokenizer_encode(k, &e);
    e.ids = e.room < 0 ? NULL : (int32_t *)malloc(sizeof *e.ids * (size_t)(e.room + 1));
    if (!e.ids) die("out of memory for the conversation: free memory");
    *count = tt_tokenizer_encode(k, &e);
    free(text);
    return e.ids;
}

/* Answers each line of standard input, until its end. tokens: the largest number of tokens that the generator
   can hold. */
static inline void chat(tt_context *ctx, tt_generator *g, const tt_tokenizer *k, const tt_lm *m,
                        const tt_sampling *s,
                        int64_t tokens)
{
    static tt_message messages[CHAT_MESSAGES];
    static char line[CHAT_LINE];
    int32_t *out = (int32_t *)malloc(sizeof *out * (size_t)s->max_new), *stop = NULL;
    tt_sampling own = *s;
    int n = 0;
    if (!k)
        die("--chat needs a chat template, but the model's tokens are bytes: name a model with a tokenizer");
    if (!out || !(stop = (int32_t *)malloc(sizeof *stop * (size_t)(m->n_stop + 1))))
        die("out of memory for the conversation: free memory");
    for (int i = 0; i < m->n_stop; i++) stop[i] = m->stop[i];
    /* in most chat templates this token ends an answer */
    stop[m->n_stop] = tt_tokenizer_special(k, TT_TOKEN_EOS);
    own.stop = stop;
    own.n_stop = m->n_stop + (stop[m->n_stop] >= 0);
    own.token = show_token;
    for (bool asks = isatty(STDIN_FILENO); n + 2 <= CHAT_MESSAGES && !stop_signal; n++) {
        if (asks) show_text(NULL, "> ", 2);
        size_t bytes;
        if (!fgets(line, sizeof line, stdin)) break;
        line[strcspn(line, "\r\n")] = 0;
        if (tt_text_begin(ctx, "standard input", line, strlen(line), &bytes) != TT_OK) {
            fprintf(stderr, "note: a line is left out: %s\n", tt_error(ctx));
            n--;
            continue;
        }
        messages[n].role = "user";
        if (!(messages[n++].content = strdup(line))) die("out of memory for the conversation: free memory");
        int64_t count;
        int32_t *ids = chat_prompt(ctx, k, messages, n, &count);
        if (count >= tokens)
            die("the conversation has %lld tokens, but must have fewer than %lld%s: %sbegin anew",
                (long long)count, (long long)tokens,
                tokens < m->config.max_positions ? "" : ", the model's positions",
                tokens < m->config.max_positions ? "set --length to more, or " : "");
        const int32_t start[2] = {0, (int32_t)count};
        int given;
        own.user = tt_decode_stream_new(k, true);
        must(ctx, tt_generate(g, ids, start, 1, &own, out, &given));
        const char *last = tt_decode_stream_end((tt_decode_stream *)own.user, &bytes);
        if (last) show_text(NULL, last, bytes);
        tt_decode_stream_free((tt_decode_stream *)own.user);
        show_text(NULL, "\n", 1);
        const int64_t length = tt_tokenizer_decode(k, out, given, true, NULL, 0);
        char *text = length < 0 ? NULL : (char *)malloc((size_t)length + 1);
        if (!text) die("out of memory for the conversation: free memory");
        tt_tokenizer_decode(k, out, given, true, text, (size_t)length + 1);
        messages[n].role = "assistant";
        messages[n].content = text;
        free(ids);
    }
    while (n--) free((char *)(uintptr_t)messages[n].content);
    free(out), free(stop);
    handle_signals(false);
}

#endif
