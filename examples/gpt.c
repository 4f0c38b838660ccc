/* Trains language models and generates text with them: GPT-2, LLaMA, Mistral, Qwen, Gemma 3, Pythia, Falcon.

   A small model of bytes from scratch, on examples/data/pride_and_prejudice.txt:
       make gpt
   A checkpoint, on texts of your own (a file, or a folder of *.txt):
       build/gpt --model gpt2/ --data texts/ --out tuned
   Low-rank adapters of a checkpoint, which are saved as a peft folder; its weights may have 4 bits:
       build/gpt --model gpt2/ --data texts/ --lora 8 --base-bits 4 --out adapter
   A checkpoint on conversations, by the chat template of its folder; then talk to it:
       build/gpt --model qwen/ --data chats.jsonl --whole --out talks && build/gpt --out talks --chat
   A checkpoint on pairs of answers, of which the first is preferred (DPO):
       build/gpt --model qwen/ --data pairs.jsonl --length 1024 --lr 1e-6 --out preferred
   Continue a text with a checkpoint, with the trained model, or with the trained adapters:
       build/gpt --model gpt2/ --generate "Once upon a time"
       build/gpt --out tuned --generate "Once upon a time" --temperature 0.7
       build/gpt --model gpt2/ --adapter adapter --generate "Once upon a time" */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"
#include "cli.h"
#include "lm.h"

static struct {
    cli_training run; /* the options of all programs that train */
    cli_lm lm;        /* the options of models and sampling */
    const char *separator, *generate;
    double held;
    bool across, chat, beta; /* beta: the command line has --beta */
} opt = {.run = {CLI_TRAINING_DEFAULT, .schedule = "cosine", .beta = 0.1}, .lm = LM_DEFAULT, .held = 0.05};

/* ----------------------------------------------------------------------------------------------- training */
typedef struct trained { const tt_lm *m; const tt_tokenizer *k; } trained;
static tt_token_stream *read_data(tt_context *ctx, const tt_tokenizer *k, const tt_lm *m);
static tt_status keep(void *user);
static void answer(const char *folder, const char *adapter, const char *text);

static int train(void)
{
    tt_context *ctx = begin_training(&opt.run, !opt.lm.lora && !opt.lm.adapter);
    tt_lm m;
    make_model(ctx, &m, &opt.lm, &opt.run);
    tt_tokenizer *k = open_tokenizer(ctx, opt.run.model, &m);
    tt_token_stream *s = read_data(ctx, k, &m), *held = NULL;
    const int64_t count = tt_token_stream_count(s), apart = (int64_t)(opt.held * (double)count);
    if (count - apart < 2)
        die("--held-out %g leaves %lld of %lld tokens to train on: set it to a smaller share, such as 0.05",
            opt.held, (long long)(count - apart), (long long)count);
    if (apart > 1 && !(held = tt_token_stream_split(s, apart)) && tt_error_code(ctx) != TT_ERR_ARGUMENT)
        die("%s", tt_error(ctx));
    if (apart > 0 && !held)
        printf("note: --held-out %g is fewer tokens than %s, so that nothing is held out to validate on: set "
               "--held-out higher\n", opt.held, apart < 2 ? "2"
               : tt_token_stream_pairs(s) ? "the last pair has" : "the last conversation has");
    tt_token_loader *l = windows_of(ctx, s, &opt.lm, &opt.run, opt.across, true), *validation = NULL;
    if (held) validation = windows_of(ctx, held, &opt.lm, &opt.run, opt.across, false);
    const tt_source *source = tt_token_loader_source(l), *other = tt_token_loader_source(validation);
    const bool pairs = tt_token_stream_pairs(s);
    if (opt.beta && !pairs)
        die("--beta is for pairs of answers, but '%s' has none: leave it out", opt.run.data);
    if (pairs && opt.run.dropout < 0) /* as trl, because the reference is computed without dropout */
        m.config.embedding_dropout = m.config.dropout = m.config.attention_dropout = 0;
    prune_lm(ctx, &m, &opt.run, source, pairs);
    const tt_model model = pairs ? tt_lm_preference_model(&m) : tt_lm_model(&m);
    tt_trainer *t = lm_trainer(ctx, &m, &opt.lm, &opt.run, &model, source, other);
    printf("%lld tokens to train on, %lld for validation; ", (long long)tt_token_stream_count(s),
           (long long)(held ? tt_token_stream_count(held) : 0));
    printf("%s of %.1f million parameters, %d threads, %s\n", opt.run.model ? opt.run.model : opt.lm.kind,
           1e-6 * (double)tt_program_plan(tt_trainer_program(t)).params, tt_threads(ctx), tt_isa(ctx));
    trained x = {&m, k};
    const int result = fit(ctx, t, source, other, &opt.run, keep, &x);
    /* prints bits per byte, which are comparable between tokenizers */
    if (opt.run.finished && !result && held) {
        const double bytes = (double)tt_token_stream_bytes(held);
        tt_stats of;
        if (opt.run.ema > 0) must(ctx, tt_trainer_use_ema(t, true));
        must(ctx, tt_evaluate(t, other, &of));
        if (pairs) printf("last epoch: loss %.4f, accuracy %.3f", of.loss, of.correct / of.targets);
        else printf("last epoch: perplexity %.3f", exp(of.loss));
        if (bytes > 0) printf(", %.3f bits per byte", of.loss / log(2) * of.targets / bytes);
        printf(" on %.0f held-out %s\n", of.targets, pairs ? "pairs" : "tokens");
    }
    const bool alone = tt_processes(ctx) == 1, adapts = opt.lm.lora || opt.lm.adapter;
    const char *ending = strrchr(opt.run.data, '.');
    tt_trainer_free(t), tt_token_loader_free(l), tt_token_loader_free(validation);
    tt_token_stream_free(held), tt_token_stream_free(s), tt_lm_free(&m), tt_tokenizer_free(k), tt_close(ctx);
    if (!opt.run.finished || result) return result;
    printf("saved: %s\n\n", opt.run.out);
    if (alone && !(ending && strcmp(ending, ".jsonl") == 0)) /* only a single process generates text */
        answer(adapts ? opt.run.model : opt.run.out, adapts ? opt.run.out : NULL,
               opt.run.model ? "" : "It is a truth ");
    return 0;
}

/* ------------------------------------------------------------------------------------------- continuation */
/* Continues a text, or answers standard input if `text` is NULL, with the model of a folder, in a new
   context. adapter: a peft folder, or NULL for none. */
static void answer(const char *folder, const char *adapter, const char *text)
{
    tt_context *ctx = open_context(opt.run.seed, opt.run.threads, opt.run.timeout);
    tt_lm m;
    if (tt_processes(ctx) > 1)
        die("--generate runs in one process, but there are %d: start it without mpirun", tt_processes(ctx));
    must(ctx, tt_lm_load(ctx, &m, folder));
    store_base(ctx, &m, &opt.lm, true);
    if (adapter) must(ctx, tt_lm_lora_load(&m, adapter));
    if (adapter && !m.stored && !chooses_base(&opt.lm))
        must(ctx, tt_lm_lora_merge(&m)); /* makes generation faster */
    tt_tokenizer *k = open_tokenizer(ctx, folder, &m);
    const tt_encoding prompt = {.text = text ? text : "", .bytes = text ? strlen(text) : 0, .special = true};
    const int64_t n = k ? tt_tokenizer_encode(k, &prompt) : (int64_t)prompt.bytes;
    if (n < 0) die("out of memory for the tokens of the text: free memory");
    const int64_t tokens = text ? (n > 1 ? n : 1) + opt.lm.tokens : chat_tokens(&opt.lm, &m);
    tt_generator *g = generator_of(ctx, &m, &opt.lm, &opt.run, tokens, text ? n : 0);
    const tt_sampling s = sampling_of(&opt.lm, opt.run.seed);
    handle_signals(true);
    if (text) continue_text(ctx, g, k, text, &s);
    else chat(ctx, g, k, &m, &s, tokens);
    tt_generator_free(g), tt_lm_free(&m), tt_tokenizer_free(k), tt_close(ctx);
}

/* --------------------------------------------------------------------------------------- data and folders */
static tt_token_stream *read_data(tt_context *ctx, const tt_tokenizer *k, const tt_lm *m)
{
    const char *ending = strrchr(opt.run.data, '.');
    tt_stream_options o = tt_stream_options_default();
    o.tokenizer = k;
    o.separator = opt.separator;
    o.all_tokens = opt.lm.all_tokens;
    o.vocab = m->config.vocab_size;
    o.end = k ? tt_tokenizer_special(k, TT_TOKEN_EOS) : BYTES - 1;
    if (o.end < 0 && m->n_stop) o.end = m->stop[0];
    if (!ending || strcmp(ending, ".bin") != 0)
        return (tt_token_stream *)made(ctx, tt_token_stream_read(ctx, opt.run.data, &o));
    return (tt_token_stream *)made(ctx, tt_token_stream_open(ctx, opt.run.data, 0, o.vocab, o.end));
}

/* Saves the adapters, or the model and its tokenizer, for transformers and for --generate. */
static tt_status keep(void *user)
{
    const trained *x = (const trained *)user;
    if (x->m->n_lora) return tt_lm_lora_save(x->m, opt.run.out);
    const tt_status status = tt_lm_save(x->m, opt.run.out);
    return status == TT_OK && x->k ? tt_tokenizer_save(x->k, opt.run.out) : status;
}

/* ------------------------------------------------------------------------------------------- command line */
static const cli_flag flags[] = {
    {"--data", "PATH", CLI_TEXT, &opt.run.data,
     .help = "text file, folder of *.txt, .jsonl file of conversations or of pairs of answers, or .bin file "
     "of token ids of 2 or 4 bytes, as nanoGPT and llm.c write (examples/data/pride_and_prejudice.txt)"},
    {"--beta", "X", CLI_NUMBER, &opt.run.beta, .help = "with pairs of answers: a higher value keeps the "
     "model nearer to the model of the start", .min = 1e-6, .max = 1e6, .given = &opt.beta},
    {"--separator", "LINE", CLI_TEXT, &opt.separator,
     .help = "a line that separates two documents of a text, such as '<|endoftext|>'; '' for empty lines "
     "(none: a file is one document)", .max = 1000},
    {"--across", "", CLI_SWITCH, &opt.across, .help = "attention reaches earlier documents of a window"},
    {"--model", "DIR", CLI_TEXT, &opt.run.model, .help = "Hugging Face folder to start from: config.json, "
     "model.safetensors or its shards, tokenizer.json (none: from scratch, on bytes)"},
    LM_MODEL_FLAGS(opt.lm),
    {"--batch", "N", CLI_INTEGER, &opt.run.batch, .help = "windows or pairs in a step (0: 8 with --model, "
     "else 2)", .max = 65536},
    {"--epochs", "N", CLI_INTEGER, &opt.run.epochs,
     .help = "passes over the texts (0: 1 with --model, else 2)", .max = 1e9},
    {"--held-out", "X", CLI_NUMBER, &opt.held, .help = "share of the tokens, at the end, to validate on",
     .max = 1},
    {"--lr", "X", CLI_NUMBER, &opt.run.lr,
     .help = "peak learning rate (0: 5e-5 with --model, else 1e-3)", .max = 1e9},
    CLI_PRUNE_FLAGS(opt.run),
    CLI_TRAINING_FLAGS(opt.run),
    {"--generate", "TEXT", CLI_TEXT, &opt.generate,
     .help = "continue TEXT with the model in --model, or else in --out"},
    {"--chat", "", CLI_SWITCH, &opt.chat,
     .help = "answer each line of standard input with the model in --model, or else in --out"},
    LM_SAMPLING_FLAGS(opt.lm),
};

int main(int argc, char **argv)
{
    cli_training *run = &opt.run;
    cli_parse(argc, argv, flags, CLI_COUNT(flags), "gpt",
              "Trains language models and continues texts with them.");
    check_lm(&opt.lm, run, opt.generate || opt.chat);
    if (!run->batch) run->batch = run->accumulate * (run->model ? 8 : 2);
    check_training(run);
    const bool trains = !opt.generate && !opt.chat;
    if (!trains && opt.generate && opt.chat) die("--generate and --chat exclude each other: leave one out");
    if (!run->data && trains) run->data = sample_data("pride_and_prejudice.txt");
    if (!run->epochs) run->epochs = run->model ? 1 : 2;
    if (run->lr == 0) run->lr = run->model ? 5e-5 : 1e-3;
    if (trains) return train();
    const char *folder = run->model ? run->model : run->out;
    if (!run->model && holds(folder, "adapter_config.json"))
        die("'%s' holds an adapter: name its model with --model, and the adapter with --adapter", folder);
    if (!run->model && !holds(folder, "config.json"))
        die("'%s' holds no trained model: name one with --model, or train first", folder);
    answer(folder, opt.lm.adapter, opt.generate);
    return 0;
}
