/* Reads labelled texts of a table, or IMDb's reviews, for the command line. A program includes this file
   once, after classifier.h. */
#ifndef EXAMPLES_TEXTS_H
#define EXAMPLES_TEXTS_H

#include "datasets.h"

typedef struct cli_table {
    const char *task, *text_column, *pair_column, *label_column, *delimiter, *label_delimiter, *quote;
    bool is_table; /* false: the data are the folder aclImdb */
    /* Whether the command line has --temperature, --negatives, --pair-column, --label-delimiter, --delimiter,
       --quote and --whole-words, in this order. */
    bool given[7];
} cli_table;

#define TABLE_DEFAULT {NULL, NULL, NULL, NULL, NULL, ",", "double", false, {false}}
#define TABLE_FLAGS(table, run) \
    {"--task", "TASK", CLI_CHOICE, &(table).task, .help = "what a text has: a class, any number of labels, " \
     "scores, tags of its words, a second text of similar meaning, or words to mask and predict; --predict " \
     "takes the task from --out (the task of --model, or class):", .choices = TASKS}, \
    {"--temperature", "X", CLI_NUMBER, &(run).temperature, \
     .help = "--task embed: the cosines of embeddings are divided by X (0.05)", .max = 1e9, \
     .given = &(table).given[0]}, \
    {"--negatives", "OF", CLI_CHOICE, &(run).negatives, \
     .help = "--task embed: a text has the other pairs of its micro-batch as negatives, or those of the " \
     "whole step", .choices = "micro step", .given = &(table).given[1]}, \
    {"--whole-words", "", CLI_SWITCH, &(run).whole_words, \
     .help = "--task masked-words: mask all tokens of a word or none", .given = &(table).given[6]}, \
    {"--text-column", "NAME", CLI_TEXT, &(table).text_column, \
     .help = "a table's column of texts (text; tokens with --task tags)", .min = 1, .max = 1000}, \
    {"--pair-column", "NAME", CLI_TEXT, &(table).pair_column, \
     .help = "a table's column of second texts (text_pair, which --task embed requires); " \
     "with --predict, a tab divides the two texts", .min = 1, .max = 1000, .given = &(table).given[2]}, \
    {"--label-column", "NAME", CLI_TEXT, &(table).label_column, \
     .help = "a table's column of labels (label; tags with --task tags; with --task embed " \
     "score: the similarity of pairs for validation and test)", .min = 1, .max = 1000}, \
    {"--label-delimiter", "C", CLI_TEXT, &(table).label_delimiter, \
     .help = "the character between the labels or scores in one field", .min = 1, .max = 1, \
     .given = &(table).given[3]}, \
    {"--delimiter", "C", CLI_TEXT, &(table).delimiter, \
     .help = "what separates a table's columns, such as ';' or \\t (a comma in .csv, else a tab)", .min = 1, \
     .max = 2, .given = &(table).given[4]}, \
    {"--quote", "Q", CLI_CHOICE, &(table).quote, \
     .help = "double: double quotes enclose a table's fields; none: they are ordinary characters", \
     .choices = "double none", .given = &(table).given[5]}

/* Words of --best-by. */
#define BEST_BY "accuracy f1_macro f1_micro f1_entities pearson spearman recall_at_1 recall_at_10 " \
    "perplexity loss"

/* Returns the path of the sample data of --task. */
static inline char *sample_of(const cli_table *table)
{
    static const char *const samples[] = {"reviews.tsv", "requests.tsv", "stays.tsv", "visits.conll",
                                          "questions.tsv", "reviews.tsv"};
    return sample_data(samples[cli_index(table->task, TASKS)]);
}

/* If the command line has no --task, sets the task to the task of the model to start from, or to "class". */
static inline void choose_task(tt_context *ctx, const cli_training *run, cli_table *table)
{
    tt_head head = {TT_TASK_CLASS, 0};
    if (run->model) must(ctx, tt_bert_read_head(ctx, run->model, &head));
    const char *of_model = task_names[head.task];
    if (table->task && head.outputs && strcmp(table->task, of_model) != 0)
        printf("note: --task is %s, but '%s' holds a model for --task %s\n", table->task, run->model,
               of_model);
    if (!table->task && head.task != TT_TASK_CLASS)
        printf("--task is %s, as '%s' says\n", of_model, run->model);
    if (!table->task) table->task = of_model;
}

/* Ends the program if the command line has a flag that has no effect on the task or on the data. */
static inline void check_effects(const cli_training *run, const cli_table *table)
{
    static const struct { const char *flag, *tasks; bool fields; } rows[] = { /* fields: of .csv and .tsv */
        {"--temperature", "embed", false}, {"--negatives", "embed", false},
        {"--pair-column", "class labels scores embed", false}, {"--label-delimiter", "labels scores", true},
        {"--delimiter", TASKS, true}, {"--quote", TASKS, true}, {"--whole-words", "masked-words", false}};
    const char *ending = strrchr(run->data, '.');
    const bool lines = ending && (strcasecmp(ending, ".jsonl") == 0 || strcasecmp(ending, ".json") == 0);
    const bool words = !lines && strcmp(table->task, "tags") == 0;
    char list[64];
    for (int k = 0; k < CLI_COUNT(rows); k++) {
        if (table->given[k] && cli_index(table->task, rows[k].tasks) < 0)
            die("%s has no effect with --task %s: it is for --task %s", rows[k].flag, table->task,
                cli_list(rows[k].tasks, list, sizeof list));
        if (table->given[k] && rows[k].fields && (lines || words))
            die("%s has no effect on '%s', which is in %s: leave it out", rows[k].flag, run->data,
                lines ? "lines of JSON" : "the format of CoNLL");
    }
}

/* Sets the task. Without --data, chooses the sample of the task. Checks the options of tables, and sets
   is_table according to the data's name and type. */
static inline void check_table(tt_context *ctx, cli_training *run, cli_table *table)
{
    choose_task(ctx, run, table);
    if (!run->data) run->data = sample_of(table);
    check_effects(run, table);
    const char *data = run->data;
    file_info found = {false, false, 0};
    if (table->delimiter && strcmp(table->delimiter, "\\t") == 0) table->delimiter = "\t";
    if (table->delimiter && table->delimiter[1])
        die("--delimiter must be one character, or \\t for a tab, not '%s'", table->delimiter);
    const char *ending = strrchr(data, '.');
    static const char *const endings[] = {".tsv", ".csv", ".jsonl", ".json"};
    bool known = false;
    for (int i = 0; i < 4 && ending; i++) known |= strcasecmp(ending, endings[i]) == 0;
    const tt_task task = (tt_task)cli_index(table->task, TASKS);
    table->is_table = known || table->delimiter || (find_file(data, &found) && !found.is_folder);
    if (!table->is_table && task != TT_TASK_CLASS)
        die("--task %s needs a table; '%s' is a folder of reviews with classes: name a table in --data",
            table->task, data);
}

/* Ends the program if a folder's tokenizer does not belong to its model. Models may have some rows more than
   the tokenizer has tokens, so that the number of rows is a multiple of 8, 64 or 128. A vocab.txt that lacks
   other tokens was cut off; a tokenizer.json that was cut off is no JSON. */
static inline void check_vocabulary(const char *folder, int tokens, int rows)
{
    const bool words = holds(folder, "vocab.txt") && !holds(folder, "tokenizer.json");
    if (rows < tokens)
        die("the tokenizer of '%s' has %d tokens, but the model only %d: take both from one folder", folder,
            tokens, rows);
    if (words && rows > tokens && (rows % 8 || rows - tokens >= 128))
        die("'%s/vocab.txt' has %d tokens, but the model %d, so that the file is cut off or of another "
            "model: take both from one folder", folder, tokens, rows);
    if (rows > tokens)
        fprintf(stderr, "note: the tokenizer of '%s' has %d tokens, the model %d: do they belong together?\n",
                folder, tokens, rows);
}

/* Returns whether the last step of an epoch over `pairs` pairs is left out, because a micro-batch of the step
   would have a single pair, which has no negatives; then prints a note. */
static inline bool drops_last(const cli_training *run, int64_t pairs)
{
    const bool of_step = run->negatives && strcmp(run->negatives, "step") == 0;
    const int64_t last = pairs % run->batch, least = of_step ? 2 : 2 * run->accumulate * run->parallel.groups;
    if (pairs < run->batch || !last || last >= least) return false;
    printf("note: each epoch leaves out %lld of %lld pairs, which would be a last step with too few pairs to "
           "be negatives\n", (long long)last, (long long)pairs);
    return true;
}

/* Reads a part of the data. split: "train", "validation" or "test". names: the names of the classes; NULL:
   not known. max: number of reviews of aclImdb to read; 0: all. */
static inline tt_dataset *read_split(tt_context *ctx, const cli_training *run, const cli_table *table,
                                     const char *split, const char **names, int classes, int max)
{
    tt_table_options o = tt_table_options_default();
    char why[DATASET_WHY];
    o.text_column = table->text_column;
    o.label_column = table->label_column;
    if (table->pair_column) o.pair_column = table->pair_column;
    o.label_delimiter = table->label_delimiter[0];
    o.task = (tt_task)cli_index(table->task, TASKS);
    o.delimiter = table->delimiter ? table->delimiter[0] : 0;
    o.unquoted = strcmp(table->quote, "none") == 0;
    if (table->is_table) {
        tt_dataset *d = (tt_dataset *)made(ctx, tt_dataset_table(ctx, run->data, split,
                                                                 classes ? names : NULL, classes, &o));
        int64_t row = 0;
        while (row < tt_dataset_count(d) && !tt_dataset_pair(d, row, NULL)) row++;
        if (table->pair_column && row && row == tt_dataset_count(d))
            die("'%s' has no second texts in a column '%s': correct --pair-column", run->data,
                table->pair_column);
        return d;
    }
    tt_dataset *d = imdb_open(ctx, run->data, split, max + max % 2, why);
    if (!d) die("%s", why);
    return d;
}

/* Returns the texts to train on, and sets *held to the texts to validate on: the validation rows of a table,
   or else one text of eleven. */
static inline tt_dataset *read_training(tt_context *ctx, const cli_training *run, const cli_table *table,
                                        tt_dataset **held)
{
    tt_dataset *d = read_split(ctx, run, table, "train", NULL, 0, with_held_out(run)), *rows = NULL;
    const int classes = tt_dataset_classes(d);
    const char **names = names_of(d, NULL, classes);
    if (table->is_table) rows = read_split(ctx, run, table, "validation", names, classes, 0);
    *held = hold_out(ctx, run, &d, rows, "texts");
    free((void *)names);
    return d;
}

/* Reads the texts to test a model on. names: the names of the model's classes. */
static inline tt_dataset *read_test(tt_context *ctx, const cli_training *run, const cli_table *table,
                                    char (*names)[64], int classes)
{
    const char **name = names_of(NULL, names, classes);
    tt_dataset *d = read_split(ctx, run, table, "test", name, classes, run->test);
    free((void *)name);
    return keep_some(ctx, run, d, "test", run->test, "texts");
}

static tt_bert text_teacher; /* the model of --teacher, or zeros */

/* Ends the program unless the tokenizer of --teacher has the tokens of the model's tokenizer k. */
static inline void check_teacher_tokens(tt_context *ctx, const cli_training *run, const tt_tokenizer *k)
{
    tt_tokenizer *other = (tt_tokenizer *)made(ctx, tt_tokenizer_load(ctx, run->teacher));
    const int n = tt_tokenizer_size(k), of_teacher = tt_tokenizer_size(other);
    if (n != of_teacher)
        die("the tokenizer of --teacher '%s' has %d tokens, but that of the model %d: both need the same "
            "tokenizer", run->teacher, of_teacher, n);
    for (int id = 0; id < n; id++) {
        const char *a = tt_tokenizer_token(other, id), *b = tt_tokenizer_token(k, id);
        if (!a || !b ? a != b : strcmp(a, b) != 0)
            die("token %d of --teacher '%s' is '%s', but of the model '%s': both need the same tokenizer", id,
                run->teacher, a ? a : "", b ? b : "");
    }
    tt_tokenizer_free(other);
}

/* Loads --teacher, and makes teacher, model and datasets agree on the classes. Keeps the layers of --layers,
   and sets --dropout and --freeze. k: the model's tokenizer. */
static inline void prepare_model(tt_context *ctx, cli_training *run, const tt_tokenizer *k, tt_bert *m,
                                 tt_dataset *d, tt_dataset *held)
{
    static tt_model model;
    const float rate = (float)run->dropout;
    if (run->teacher) {
        const tt_head head = {tt_dataset_task(d), tt_dataset_classes(d)};
        must(ctx, tt_param_prefix(ctx, "teacher."));
        must(ctx, tt_bert_load_head(ctx, &text_teacher, run->teacher, &head));
        must(ctx, tt_param_prefix(ctx, NULL));
        if (text_teacher.new_head)
            die("--teacher '%s' has no trained classifier for the task: train it for the task first",
                run->teacher);
        check_teacher_tokens(ctx, run, k);
        check_teacher_names(run, text_teacher.class_names, d);
        must(ctx, tt_bert_name_classes(&text_teacher, d));
        model = tt_bert_model(&text_teacher);
        run->teacher_model = &model;
    }
    must(ctx, tt_bert_name_classes(m, d));
    must(ctx, tt_bert_name_classes(m, held));
    if (run->teacher) check_teacher(run, text_teacher.class_names, m->class_names, m->config.classes);
    m->config.layers = keep_layers(run, m->layer, sizeof *m->layer, m->config.layers);
    if (rate >= 0) m->config.dropout = m->config.attention_dropout = m->config.classifier_dropout = rate;
    freeze(ctx, run->freeze);
}

/* Removes heads and neurons from the model at the beginning of *self. */
static inline void prune_texts(tt_context *ctx, const cli_training *run, void *self, const tt_source *source)
{
    tt_bert *m = (tt_bert *)self;
    const tt_train_options train = training_options(run, 1);
    const tt_prune_options o = prune_options(run, m->config.heads, m->config.intermediate_size);
    tt_importance *x = NULL; /* a plan needs the sizes alone */
    if (!run->plan) x = (tt_importance *)made(ctx, tt_bert_importance(m, source, PRUNE_STEPS, &train));
    must(ctx, tt_bert_prune(m, x, &o));
    tt_importance_free(x);
}

/* Predicts a text's tags, and prints each word with its tag. Spaces divide the words. */
static inline void show_tags(tt_context *ctx, const classifier *x, tt_trainer *t, const char *text)
{
    const int n = x->model.classes;
    tt_text one;
    tt_batch b;
    size_t count = 0;
    memset(&one, 0, sizeof one);
    one.text = text;
    one.bytes = strlen(text);
    /* Gives each word its own number as a tag. The loader copies the tag to the first token of the word. So
       the code below knows the word of each token. */
    tt_word *words = (tt_word *)made(NULL, calloc(one.bytes + 1, sizeof *words));
    for (const char *at = text + strspn(text, " "); *at; at += strspn(at, " "), count++) {
        words[count].begin = (size_t)(at - text);
        words[count].tag = (int)count;
        at += strcspn(at, " ");
        words[count].end = (size_t)(at - text);
    }
    one.words = words;
    one.n_words = (int)count;
    const int tags = count ? (int)count : 1;
    const char **names = (const char **)made(NULL, calloc((size_t)tags, sizeof *names));
    for (int w = 0; w < tags; w++) names[w] = "word";
    tt_dataset *d = (tt_dataset *)made(ctx, tt_dataset_texts(ctx, TT_TASK_TAGS, &one, 1, names, tags));
    tt_loader *l = x->loader(ctx, x->self, d, false);
    if (!tt_loader_next(l, &b)) die("%s", tt_error(ctx));
    float *p = (float *)made(NULL, calloc((size_t)b.rows * (size_t)n + 1, sizeof *p));
    must(ctx, tt_predict(t, &b, p));
    size_t shown = 0; /* number of the last word that was shown, plus 1 */
    bool any = false;
    for (int row = 0; row < b.rows; row++) {
        const float *of = p + (size_t)row * (size_t)n;
        int best = 0;
        if (b.tags[row] < 0) continue; /* not the first token of a word */
        for (int c = 1; c < n; c++) if (of[c] > of[best]) best = c;
        const tt_word *word = &words[b.tags[row]]; /* words without tokens are left out */
        printf("%s%.*s/%s", any ? " " : "", (int)(word->end - word->begin), text + word->begin,
               x->names[best]);
        shown = (size_t)b.tags[row] + 1;
        any = true;
    }
    printf("\n");
    if (shown < count && tt_loader_cut(l))
        printf("note: the last %zu words are cut (--max-length)\n", count - shown);
    free(p), free(words), free((void *)names), tt_loader_free(l), tt_dataset_free(d);
}

/* Predicts a text, and prints the prediction. pairs: a tab divides the text from its second text.
   predictions: array for n numbers, one for each class, label, score or column of an embedding. */
static inline void show_text(tt_context *ctx, const classifier *x, tt_trainer *t, const tt_tokenizer *k,
                             const char *text, bool pairs, float *predictions, int n)
{
    const char *tab = pairs ? strchr(text, '\t') : NULL;
    if (x->model.task == TT_TASK_TAGS) {
        show_tags(ctx, x, t, text);
        return;
    }
    char *first = (char *)made(NULL, calloc(strlen(text) + 1, 1));
    memcpy(first, text, tab ? (size_t)(tab - text) : strlen(text));
    must(ctx, tt_predict_text(t, k, first, tab ? tab + 1 : NULL, predictions));
    show_prediction(x, predictions, n, text);
    free(first);
}

#endif
