/* Trains DistilBERT, BERT or MiniLM to tell classes of text apart: good film reviews from bad ones, or
   those of a table of your own.

   A small DistilBERT from scratch, on examples/data/reviews.tsv:
       make demo
   The real thing:
       build/distilbert_imdb --data aclImdb --model distilbert-base-uncased/
       build/distilbert_imdb --data mine.csv --text-column body --label-column kind --model MiniLM/
   On two ranks of the CPU, each with half of the threads and half of AdamW's state:
       build/distilbert_imdb --device cpu*2
   Classify with what was trained:
       build/distilbert_imdb --out build/demo --predict "a film to remember" */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"
#include "cli.h"
#include "datasets.h"

/* ------------------------------------------------------------------------------------------------ options */
static struct {
    const char *data, *text_column, *label_column, *delimiter, *quote, *model, *predict;
    int train, test, epochs, batch, accumulate, max_length, max_tokens;
    bool largest; /* --batch max */
    cli_training run;
} opt = {.text_column = "text", .label_column = "label", .quote = "double", .batch = 16, .accumulate = 1,
         .run = {CLI_CLASSIFIER_DEFAULT, .schedule = "linear"}};

static const cli_flag flags[] = {
    {"--data", "PATH", CLI_TEXT, &opt.data,
     .help = "aclImdb folder, or a table (.csv, .tsv) with a column of texts, one of labels, and maybe "
     "one called split, with train, validation or test in each row (examples/data/reviews.tsv)"},
    {"--text-column", "NAME", CLI_TEXT, &opt.text_column,
     .help = "a table's column of texts", .least = 1, .most = 1000},
    {"--label-column", "NAME", CLI_TEXT, &opt.label_column,
     .help = "a table's column of labels", .least = 1, .most = 1000},
    {"--delimiter", "C", CLI_TEXT, &opt.delimiter, .help = "what divides a table's columns, such as ';' or "
     "\\t (a comma in .csv, else a tab)", .least = 1, .most = 2},
    {"--quote", "Q", CLI_CHOICE, &opt.quote, .help = "whether double quotes enclose a table's fields, or are "
     "characters like others", .choices = "double none"},
    {"--model", "DIR", CLI_TEXT, &opt.model, .help = "Hugging Face folder to start from: config.json, "
     "model.safetensors, vocab.txt or tokenizer.json (none: from scratch)"},
    {"--train", "N", CLI_INTEGER, &opt.train,
     .help = "texts to train on (0: all but those for validation)", .most = 1e9},
    {"--test", "N", CLI_INTEGER, &opt.test, .help = "texts to test on (0: all)", .most = 1e9},
    {"--epochs", "N", CLI_INTEGER, &opt.epochs,
     .help = "passes over the training texts (0: 2 with --model, else 6; more, up to 20, if these were fewer "
     "than 200 steps)", .most = 1e9},
    {"--batch", "N", CLI_INTEGER, &opt.batch, .help = "texts in a step; max: as many as --budget, or else a "
     "GPU's memory, allows if all are as long as the longest (16)", .least = 1, .most = 65536,
     .choices = "max"},
    {"--accumulate", "N", CLI_INTEGER, &opt.accumulate,
     .help = "micro-batches in a step, at least, for each of --groups", .least = 1, .most = 65536},
    {"--max-length", "N", CLI_INTEGER, &opt.max_length,
     .help = "tokens of a text; longer ones are cut (0: as many as the model has positions)", .most = 1e6},
    {"--max-tokens", "N", CLI_INTEGER, &opt.max_tokens, .help = "tokens in a micro-batch; it is filled up to "
     "this (0: 8192 with --model, else 2048)", .most = 1e9},
    {"--lr", "X", CLI_NUMBER, &opt.run.lr,
     .help = "peak learning rate (0: 5e-5 with --model, else 5e-4)", .most = 1e9},
    CLI_CLASSIFIER_FLAGS(opt.run),
    {"--predict", "TEXT", CLI_TEXT, &opt.predict,
     .help = "classify TEXT, or with - each line of standard input, with the model in --out"},
};

static void read_options(int argc, char **argv)
{
    cli_parse(argc, argv, flags, CLI_COUNT(flags), "distilbert_imdb",
              "Trains DistilBERT, BERT or MiniLM to tell classes of text apart.");
    if (opt.batch != CLI_WORD && opt.accumulate > opt.batch)
        die("--accumulate %d is more than --batch %d", opt.accumulate, opt.batch);
    opt.largest = opt.batch == CLI_WORD;
    if (opt.largest && opt.max_tokens) die("--max-tokens does not go with --batch max, which chooses them");
    if (opt.max_length == 1) die("--max-length is at least 2: each text has [CLS] and [SEP]");
    check_training(&opt.run);
    bool tab = opt.delimiter && strcmp(opt.delimiter, "\\t") == 0;
    if (tab) opt.delimiter = "\t";
    if (opt.delimiter && opt.delimiter[1])
        die("--delimiter is one character, or \\t for a tab, not '%s'", opt.delimiter);
    if (!opt.data && !opt.predict) opt.data = sample_data(argv[0], "reviews.tsv");
    if (opt.run.lr == 0) opt.run.lr = opt.model ? 5e-5 : 5e-4;
}

/* --------------------------------------------------------------------------------------------------- data */
static bool is_table(void)
{
    const char *ending = strrchr(opt.data, '.');
    bool known = ending && (strcasecmp(ending, ".tsv") == 0 || strcasecmp(ending, ".csv") == 0);
    struct stat s;
    return known || opt.delimiter || (stat(opt.data, &s) == 0 && !S_ISDIR(s.st_mode));
}

/* "train", "validation" or "test". classes: their names, if they are known. most: how many reviews of
   aclImdb are needed; 0: all. */
static tt_dataset *read_split(tt_context *ctx, const char *split, const char *const *classes, int n_classes,
                              int most)
{
    tt_table_options o = tt_table_options_default();
    o.text_column = opt.text_column;
    o.label_column = opt.label_column;
    o.delimiter = opt.delimiter ? opt.delimiter[0] : 0;
    o.unquoted = strcmp(opt.quote, "none") == 0;
    if (is_table())
        return (tt_dataset *)made(ctx, tt_dataset_table(ctx, opt.data, split, classes, n_classes, &o));
    char why[DATASET_WHY];
    tt_dataset *d = imdb_open(ctx, opt.data, split, most + most % 2, why);
    if (!d) die("%s", why);
    return d;
}

/* Leaves n texts of a dataset, of each class its share; n 0: all. */
static tt_dataset *keep_some(tt_context *ctx, tt_dataset *d, const char *flag, int n)
{
    long long there = (long long)tt_dataset_count(d);
    if (n > there)
        die("%s needs %d texts, with those for validation; '%s' has %lld", flag, n, opt.data, there);
    if (!n || n == there) return d;
    tt_dataset *part = (tt_dataset *)made(ctx, tt_dataset_split(d, n));
    tt_dataset_free(d);
    return part;
}

/* The rows of a table that say so are for validation, and else one text of eleven. */
static void read_training(tt_context *ctx, tt_dataset **train, tt_dataset **validation)
{
    int more = opt.train ? opt.train + (opt.train + 9) / 10 : 0;
    tt_dataset *d = read_split(ctx, "train", NULL, 0, more), *held = NULL;
    int classes = tt_dataset_classes(d);
    const char **name = (const char **)made(NULL, calloc((size_t)classes + 1, sizeof *name));
    for (int c = 0; c < classes; c++) name[c] = tt_dataset_class_name(d, c);
    if (tt_dataset_count(d) < 2 || classes < 2)
        die("'%s' has %lld texts of %d classes to train on; two are the least", opt.data,
            (long long)tt_dataset_count(d), classes);
    if (is_table()) held = read_split(ctx, "validation", name, classes, 0);
    free((void *)name);
    if (held && tt_dataset_count(held)) {
        *train = keep_some(ctx, d, "--train", opt.train);
        *validation = held;
        return;
    }
    tt_dataset_free(held);
    *train = keep_some(ctx, d, "--train", more);
    *validation = (tt_dataset *)made(ctx, tt_dataset_split(*train, (tt_dataset_count(*train) + 10) / 11));
}

static tt_dataset *read_test(tt_context *ctx, const tt_bert *m)
{
    const char **name = (const char **)made(NULL, calloc((size_t)m->config.classes, sizeof *name));
    for (int c = 0; c < m->config.classes; c++) name[c] = m->class_names[c];
    tt_dataset *d = read_split(ctx, "test", name, m->config.classes, opt.test);
    free((void *)name);
    return keep_some(ctx, d, "--test", opt.test);
}

static tt_loader *loader_of(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k, const tt_bert *m,
                            bool train)
{
    tt_loader_options o = tt_loader_options_default();
    o.batch = opt.batch;
    o.accumulate = opt.accumulate;
    o.parallel = opt.run.parallel;
    o.max_length = opt.max_length ? opt.max_length : m->config.max_positions;
    if (o.max_length > m->config.max_positions)
        die("--max-length %d: the model has positions for %d", o.max_length, m->config.max_positions);
    o.max_tokens = opt.max_tokens ? opt.max_tokens : opt.model || !is_table() ? 8192 : 2048;
    if (o.max_tokens < o.max_length) {
        if (opt.max_tokens)
            die("--max-tokens %d is less than a text may have: set --max-length, now %d, lower", o.max_tokens,
                o.max_length);
        o.max_tokens = o.max_length;
    }
    if (opt.largest) o.max_tokens = 0;
    o.shuffle = train;
    return (tt_loader *)made(ctx, tt_loader_new(ctx, d, k, &o));
}

/* -------------------------------------------------------------------------------------- model and trainer */
static tt_tokenizer *open_tokenizer(tt_context *ctx, const char *folder, const char *program)
{
    if (folder) return (tt_tokenizer *)made(ctx, tt_tokenizer_load(ctx, folder));
    char *vocabulary = sample_data(program, "vocab.txt");
    tt_tokenizer *k = (tt_tokenizer *)made(ctx, tt_tokenizer_open(ctx, vocabulary, true));
    free(vocabulary);
    return k;
}

/* The start of training: a checkpoint, or a small DistilBERT with random weights. */
static void make_model(tt_context *ctx, tt_bert *m, const tt_tokenizer *k, tt_dataset *d, tt_dataset *held)
{
    int tokens = tt_tokenizer_size(k);
    if (opt.model) {
        must(ctx, tt_bert_load(ctx, m, opt.model, tt_dataset_classes(d)));
        int own = m->config.vocab_size;
        if (own < tokens) die("vocab.txt has %d tokens, the model %d", tokens, own);
        if (own > tokens)
            printf("note: vocab.txt has %d tokens, the model %d: are they of one folder?\n", tokens, own);
    } else {
        tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
        c.vocab_size = tokens;
        c.layers = 2, c.hidden_size = 128, c.heads = 4, c.intermediate_size = 256;
        c.classes = tt_dataset_classes(d);
        if (is_table()) c.max_positions = opt.max_length > 128 ? opt.max_length : 128;
        must(ctx, tt_bert_new(ctx, m, &c));
    }
    must(ctx, tt_bert_name_classes(m, d));
    must(ctx, tt_bert_name_classes(m, held));
    float rate = (float)opt.run.dropout;
    if (rate >= 0) m->config.dropout = m->config.attention_dropout = m->config.classifier_dropout = rate;
    freeze(ctx, opt.run.freeze);
}

/* For the micro-batches of two loaders, of one where the other is NULL, or of one text. total_steps 0: only
   to evaluate and predict. */
static tt_trainer *make_trainer(tt_context *ctx, const tt_bert *m, tt_loader *l, tt_loader *other,
                                int64_t total_steps)
{
    tt_model model = tt_bert_classifier(m);
    tt_train_options o = training_options(&opt.run, total_steps);
    o.max_seqs = 1;
    o.max_tokens = l ? 1 : m->config.max_positions;
    tt_train_options_make_room(&o, tt_loader_source(l), tt_loader_source(other));
    expect_micros(&o, opt.accumulate);
    return (tt_trainer *)made(ctx, tt_trainer_new(ctx, &model, &o));
}

/* ----------------------------------------------------------------------------------------------- training */
typedef struct run { const tt_bert *m; const tt_tokenizer *k; } run;

static tt_status keep(void *user) /* as transformers and --predict load it */
{
    run *r = (run *)user;
    tt_status status = tt_bert_save(r->m, opt.run.out);
    return status == TT_OK ? tt_tokenizer_save(r->k, opt.run.out) : status;
}

/* --batch max: by the longest text, which loaders of any batch tell. */
static void choose_batch(tt_context *ctx, const tt_bert *m, const tt_tokenizer *k, const tt_dataset *d,
                         const tt_dataset *held)
{
    const tt_dataset *both[] = {d, held};
    const tt_model model = tt_bert_classifier(m);
    int longest = 0;
    opt.batch = opt.accumulate * opt.run.parallel.groups;
    for (int n = 0; n < 2; n++) {
        tt_loader *l = loader_of(ctx, both[n], k, m, false);
        longest = tt_loader_longest(l) > longest ? tt_loader_longest(l) : longest;
        tt_loader_free(l);
    }
    opt.batch = largest_step(ctx, &model, &opt.run, opt.accumulate, longest, tt_dataset_count(d));
}

/* What will be trained on, and how long its texts are. */
static void describe(tt_context *ctx, const tt_loader *l, const tt_dataset *d, const tt_loader *validation,
                     const tt_dataset *held)
{
    int longest = tt_loader_longest(l) > tt_loader_longest(validation) ? tt_loader_longest(l)
                                                                       : tt_loader_longest(validation);
    long long train = (long long)tt_dataset_count(d), other = (long long)tt_dataset_count(held);
    long long cut = (long long)(tt_loader_cut(l) + tt_loader_cut(validation));
    printf("%lld texts to train on, %lld for validation; ", train, other);
    printf("%s, %d threads, %s\n", opt.model ? opt.model : "from scratch", tt_threads(ctx), tt_isa(ctx));
    printf("the longest has %d tokens; ", longest);
    if (cut) printf("%lld of %lld are cut (--max-length)\n", cut, train + other);
    else printf("none is cut\n");
    show_classes(d, "texts");
}

/* Tests the best epoch's model as a user would: from its folder, in a context of its own. */
static void test(void)
{
    tt_context *ctx = open_training(&opt.run);
    tt_tokenizer *k = open_tokenizer(ctx, opt.run.out, NULL);
    tt_bert m;
    must(ctx, tt_bert_load(ctx, &m, opt.run.out, 0));
    tt_dataset *d = read_test(ctx, &m);
    if (tt_dataset_count(d)) {
        tt_loader *l = loader_of(ctx, d, k, &m, false);
        tt_trainer *t = make_trainer(ctx, &m, l, NULL, 0);
        show_test(ctx, t, tt_loader_source(l), m.class_names, m.config.classes, "texts");
        tt_trainer_free(t), tt_loader_free(l);
    }
    printf("saved: %s\n", opt.run.out);
    tt_bert_free(&m), tt_dataset_free(d), tt_tokenizer_free(k), tt_close(ctx);
}

static int train(const char *program)
{
    if (!opt.run.plan) check_folder(opt.run.out, opt.run.resume, true);
    tt_context *ctx = open_training(&opt.run);
    tt_tokenizer *k = open_tokenizer(ctx, opt.model, program);
    tt_dataset *d, *held;
    tt_bert m;
    read_training(ctx, &d, &held);
    make_model(ctx, &m, k, d, held);
    weigh_classes(&opt.run, d);
    if (!opt.run.plan) { /* so that what is wrong with the test shows now */
        tt_dataset *later = read_test(ctx, &m);
        if (!tt_dataset_count(later)) printf("note: '%s' has no rows to test on\n", opt.data);
        tt_dataset_free(later);
    }
    if (opt.largest) choose_batch(ctx, &m, k, d, held);
    tt_loader *l = loader_of(ctx, d, k, &m, true), *validation = loader_of(ctx, held, k, &m, false);
    if (!opt.epochs) opt.epochs = enough_epochs(tt_loader_steps(l), opt.model ? 2 : 6);
    tt_trainer *t = make_trainer(ctx, &m, l, validation, tt_loader_steps(l) * opt.epochs);
    describe(ctx, l, d, validation, held);
    show_plan(tt_trainer_program(t), opt.run.plan ? opt.run.out : NULL);

    run r = {&m, k};
    bool finished = false;
    int result = 0;
    if (!opt.run.plan)
        result = fit(t, ctx, tt_loader_source(l), tt_loader_source(validation), &opt.run, opt.epochs, keep,
                     &r, &finished);
    tt_trainer_free(t), tt_loader_free(l), tt_loader_free(validation);
    tt_bert_free(&m), tt_dataset_free(d), tt_dataset_free(held), tt_tokenizer_free(k), tt_close(ctx);
    free(opt.run.weights);
    if (finished && !result) test();
    return result;
}

/* --------------------------------------------------------------------------------------------- prediction */
static void predict(void)
{
    char *line = NULL;
    if (!holds(opt.run.out, "model.safetensors"))
        die("'%s' holds no trained model: one is saved when the first epoch ends", opt.run.out);
    tt_context *ctx = open_training(&opt.run);
    tt_tokenizer *k = open_tokenizer(ctx, opt.run.out, NULL);
    tt_bert m;
    must(ctx, tt_bert_load(ctx, &m, opt.run.out, 0));
    must_be_trained(opt.run.out, m.new_head);
    tt_trainer *t = make_trainer(ctx, &m, NULL, NULL, 0);
    size_t capacity = 0;
    float *probability = (float *)made(NULL, calloc((size_t)m.config.classes, sizeof *probability));
    bool lines = strcmp(opt.predict, "-") == 0;
    int count = 0;
    for (ssize_t n = 0; !lines || (n = getline(&line, &capacity, stdin)) >= 0;) {
        const char *text = lines ? line : opt.predict;
        int best = 0;
        for (ssize_t b = 0; b < n; b++) if (!line[b]) line[b] = ' ';
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r')) line[--n] = 0;
        char name[48];
        size_t begin;
        snprintf(name, sizeof name, lines ? "text %d of standard input" : "--predict", ++count);
        must(ctx, tt_text_begin(ctx, name, text, strlen(text), &begin));
        must(ctx, tt_predict_text(t, k, text + begin, probability));
        for (int c = 1; c < m.config.classes; c++) if (probability[c] > probability[best]) best = c;
        printf("%s\t%.4f\t%s\n", m.class_names[best], probability[best], text);
        if (fflush(stdout) != 0) die("cannot write the output: %s", strerror(errno));
        if (!lines) break;
    }
    if (lines && ferror(stdin)) die("cannot read standard input: %s", strerror(errno));
    free(line), free(probability);
    tt_trainer_free(t), tt_bert_free(&m), tt_tokenizer_free(k), tt_close(ctx);
}

int main(int argc, char **argv)
{
    read_options(argc, argv);
    if (!opt.predict) return train(argv[0]);
    predict();
    return 0;
}
