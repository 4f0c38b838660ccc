/* Trains an encoder (DistilBERT, BERT, MiniLM, RoBERTa, XLM-RoBERTa, CamemBERT, ALBERT, ModernBERT or
   BigBird) for a task: classes, several labels or scores of texts or of pairs of texts, tags of words,
   embeddings of texts, or masked words. The texts are film reviews, or a table of your own.

   A small DistilBERT from scratch, on examples/data/reviews.tsv:
       make demo
   A pretrained model, on IMDb's reviews or on a table of your own:
       build/distilbert_imdb --data aclImdb --model distilbert-base-uncased/
       build/distilbert_imdb --data mine.csv --text-column body --label-column kind --model MiniLM/
   On two ranks of the CPU, each with half of the threads and half of AdamW's state:
       build/distilbert_imdb --device cpu*2
   A student of three layers that learns from a trained model, whose folder is teacher/:
       build/distilbert_imdb --data aclImdb --model teacher/ --layers 3 --teacher teacher/ --out student
   Classify a text with the trained model:
       build/distilbert_imdb --out build/demo --predict "a film to remember" */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"
#include "cli.h"
#include "classifier.h"
#include "texts.h"

static struct {
    cli_training run; /* the options of all programs that train */
    cli_table table;  /* options of tables */
    int max_length, max_tokens;
} opt = {.run = {CLI_CLASSIFIER_DEFAULT, .schedule = "linear", .batch = 16, .temperature = 0.05,
                 .negatives = "micro"}, .table = TABLE_DEFAULT};

typedef struct text_model { tt_bert m; tt_tokenizer *k; } text_model; /* prune_texts needs m first */

static tt_tokenizer *open_tokenizer(tt_context *ctx);
static void make_model(tt_context *ctx, text_model *x, tt_dataset *d, tt_dataset *held);
static classifier classifier_of(text_model *x);
static void test(void);
static void unload(tt_context *ctx, text_model *x);

static int train(void)
{
    tt_context *ctx = begin_training(&opt.run, true);
    check_table(ctx, &opt.run, &opt.table);
    text_model x;
    x.k = open_tokenizer(ctx);
    tt_dataset *held, *d = read_training(ctx, &opt.run, &opt.table, &held);
    make_model(ctx, &x, d, held);
    const classifier c = classifier_of(&x);
    /* Reads the test data before training, so that an error in the data shows up before training. */
    tt_dataset *later = opt.run.plan ? NULL : read_test(ctx, &opt.run, &opt.table, c.names, c.model.classes);
    if (later && !tt_dataset_count(later))
        printf("note: '%s' has no rows to test on, so the test is left out\n", opt.run.data);
    const int result = train_classifier(ctx, &c, d, held);
    tt_dataset_free(later), tt_dataset_free(d), tt_dataset_free(held), unload(ctx, &x);
    if (opt.run.finished && !result) test();
    return result;
}

/* ----------------------------------------------------------------------------------- tokenizer and loader */
/* Opens the tokenizer of --model, or of the sample data. */
static tt_tokenizer *open_tokenizer(tt_context *ctx)
{
    char *sample = opt.run.model ? NULL : sample_data("vocab.txt");
    tt_tokenizer *k = sample ? tt_tokenizer_open(ctx, sample, true) : tt_tokenizer_load(ctx, opt.run.model);
    free(sample);
    return (tt_tokenizer *)made(ctx, k);
}

static tt_loader *loader_of(tt_context *ctx, const void *self, const tt_dataset *d, bool train)
{
    const text_model *x = (const text_model *)self;
    tt_loader_options o = loader_options(&opt.run, train);
    o.max_length = opt.max_length ? opt.max_length : tt_bert_model(&x->m).max_length;
    if (o.max_length > x->m.config.max_positions)
        die("--max-length is %d, but must be at most %d, the model's positions", o.max_length,
            x->m.config.max_positions);
    o.max_tokens = opt.max_tokens ? opt.max_tokens : opt.run.model || !opt.table.is_table ? 8192 : 2048;
    if (opt.max_tokens && o.max_tokens < o.max_length)
        die("--max-tokens is %d, but must be at least --max-length, %d", o.max_tokens, o.max_length);
    if (o.max_tokens < o.max_length) o.max_tokens = o.max_length;
    if (opt.run.largest || (!opt.max_tokens && tt_dataset_task(d) == TT_TASK_EMBED)) o.max_tokens = 0;
    if (train && tt_dataset_task(d) == TT_TASK_EMBED) o.drop_last = drops_last(&opt.run, tt_dataset_count(d));
    return (tt_loader *)made(ctx, tt_loader_new(ctx, d, x->k, &o));
}

/* -------------------------------------------------------------------------------------------------- model */
/* Makes the model to train: a checkpoint, or a small DistilBERT with random weights. */
static void make_model(tt_context *ctx, text_model *x, tt_dataset *d, tt_dataset *held)
{
    tt_bert *m = &x->m;
    const int tokens = tt_tokenizer_size(x->k);
    if (opt.run.model) {
        const tt_head head = {tt_dataset_task(d), tt_dataset_classes(d)};
        must(ctx, tt_bert_load_head(ctx, m, opt.run.model, &head));
        check_vocabulary(opt.run.model, tokens, m->config.vocab_size);
    } else {
        tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
        c.vocab_size = tokens;
        c.layers = 2, c.hidden_size = 128, c.heads = 4, c.intermediate_size = 256;
        c.task = tt_dataset_task(d), c.classes = tt_dataset_classes(d);
        if (opt.table.is_table) c.max_positions = opt.max_length > 128 ? opt.max_length : 128;
        must(ctx, tt_bert_new(ctx, m, &c));
    }
    prepare_model(ctx, &opt.run, x->k, m, d, held);
}

/* Saves the model and the tokenizer for transformers and for --predict. */
static tt_status keep(void *self)
{
    const text_model *x = (const text_model *)self;
    const tt_status status = tt_bert_save(&x->m, opt.run.out);
    return status == TT_OK ? tt_tokenizer_save(x->k, opt.run.out) : status;
}

static classifier classifier_of(text_model *x)
{
    const classifier c = {&opt.run, "texts", opt.run.model ? 2 : 6, tt_bert_model(&x->m),
                          x->m.class_names, x, loader_of, keep, prune_texts};
    return c;
}

/* --------------------------------------------------------------------------------- testing and prediction */
/* Loads the trained model as a user would: from the folder --out, in a new context. */
static tt_context *load(text_model *x)
{
    tt_context *ctx = open_training(&opt.run);
    x->k = (tt_tokenizer *)made(ctx, tt_tokenizer_load(ctx, opt.run.out));
    must(ctx, tt_bert_load(ctx, &x->m, opt.run.out, 0));
    check_vocabulary(opt.run.out, tt_tokenizer_size(x->k), x->m.config.vocab_size);
    return ctx;
}

static void unload(tt_context *ctx, text_model *x)
{
    tt_bert_free(&text_teacher), tt_bert_free(&x->m), tt_tokenizer_free(x->k), tt_close(ctx);
}

static void test(void)
{
    text_model x;
    tt_context *ctx = load(&x);
    const classifier c = classifier_of(&x);
    tt_dataset *d = read_test(ctx, &opt.run, &opt.table, c.names, c.model.classes);
    if (tt_dataset_count(d)) test_classifier(ctx, &c, d);
    printf("saved: %s\n", opt.run.out);
    tt_dataset_free(d), unload(ctx, &x);
}

static int predict(void)
{
    check_trained(&opt.run);
    text_model x;
    tt_context *ctx = load(&x);
    const classifier c = classifier_of(&x);
    tt_trainer *t = predictor(ctx, &c, x.m.new_head);
    const int n = c.model.classes ? c.model.classes : x.m.config.hidden_size;
    float *prediction = (float *)made(NULL, calloc((size_t)n, sizeof *prediction));
    char name[CLI_NAME];
    size_t begin;
    for (const char *text; (text = next_text(opt.run.predict, name)) != NULL;) {
        must(ctx, tt_text_begin(ctx, name, text, strlen(text), &begin));
        show_text(ctx, &c, t, x.k, text + begin, opt.table.pair_column != NULL, prediction, n);
    }
    free(prediction), tt_trainer_free(t), unload(ctx, &x);
    return 0;
}

/* ------------------------------------------------------------------------------------------- command line */
static const cli_flag flags[] = {
    {"--data", "PATH", CLI_TEXT, &opt.run.data,
     .help = "aclImdb folder, or a table (.csv, .tsv, .jsonl; with --task tags also CoNLL) with a column of "
     "texts, a column of labels and, optionally, a column split with train, validation or test (a sample of "
     "examples/data)"},
    TABLE_FLAGS(opt.table, opt.run),
    {"--model", "DIR", CLI_TEXT, &opt.run.model, .help = "Hugging Face folder to start from: config.json, "
     "model.safetensors, vocab.txt or tokenizer.json (none: from scratch)"},
    {"--batch", "N", CLI_INTEGER, &opt.run.batch,
     .help = "texts in a step; max: as many of the longest texts as --budget or, without it, a GPU's memory "
     "allows (16)", .min = 1, .max = 65536, .choices = "max"},
    {"--max-length", "N", CLI_INTEGER, &opt.max_length,
     .help = "tokens of a text; longer ones are cut (0: as many as the model has positions)", .max = 1e6},
    {"--max-tokens", "N", CLI_INTEGER, &opt.max_tokens,
     .help = "most tokens in a micro-batch (0: 8192 with --model, else 2048)", .max = 1e9},
    CLI_CLASSIFIER_FLAGS(opt.run, "texts", "2 with --model, else 6", "5e-5 with --model, else 5e-4",
                         BEST_BY),
    {"--predict", "TEXT", CLI_TEXT, &opt.run.predict,
     .help = "predict TEXT, or with - each line of standard input, with the model in --out"},
};

int main(int argc, char **argv)
{
    cli_parse(argc, argv, flags, CLI_COUNT(flags), "distilbert_imdb",
              "Trains DistilBERT and its kin for classes, labels, scores, tags, embeddings or masked words.");
    check_training(&opt.run);
    if (opt.run.largest && opt.max_tokens)
        die("--max-tokens cannot be combined with --batch max, which chooses it: leave one out");
    if (opt.max_length == 1) die("--max-length is 1, but must be at least 2: each text has [CLS] and [SEP]");
    if (opt.run.lr == 0) opt.run.lr = opt.run.model ? 5e-5 : 5e-4;
    return opt.run.predict ? predict() : train();
}
