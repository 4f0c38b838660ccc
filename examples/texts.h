/* Reads labelled texts of a table, or IMDb's reviews, for the command line. A program includes this file
   once, after classifier.h. */
#ifndef EXAMPLES_TEXTS_H
#define EXAMPLES_TEXTS_H

#include "datasets.h"

typedef struct cli_table {
    const char *task, *text_column, *pair_column, *label_column, *delimiter, *label_delimiter, *quote;
    bool is_table; /* false: the data are the folder aclImdb */
} cli_table;

#define TABLE_DEFAULT {NULL, NULL, NULL, NULL, NULL, ",", "double", false}
#define TABLE_FLAGS(table, run) \
    {"--task", "TASK", CLI_CHOICE, &(table).task, .help = "what a text has: a class, any number of labels, " \
     "scores, tags of its words, or a second text of similar meaning; --predict takes the task from --out " \
     "(as --model says, else class):", .choices = TASKS}, \
    {"--temperature", "X", CLI_NUMBER, &(run).temperature, \
     .help = "--task embed: the cosines of embeddings are divided by X (0.05)", .max = 1e9}, \
    {"--negatives", "OF", CLI_CHOICE, &(run).negatives, \
     .help = "--task embed: a text has the other pairs of its micro-batch as negatives, or those of the " \
     "whole step", .choices = "micro step"}, \
    {"--text-column", "NAME", CLI_TEXT, &(table).text_column, \
     .help = "a table's column of texts (text; tokens with --task tags)", .min = 1, .max = 1000}, \
    {"--pair-column", "NAME", CLI_TEXT, &(table).pair_column, \
     .help = "a table's column of second texts (text_pair, which --task embed requires); " \
     "with --predict, a tab divides the two texts", .min = 1, .max = 1000}, \
    {"--label-column", "NAME", CLI_TEXT, &(table).label_column, \
     .help = "a table's column of labels (label; tags with --task tags)", .min = 1, .max = 1000}, \
    {"--label-delimiter", "C", CLI_TEXT, &(table).label_delimiter, \
     .help = "the character between the labels or scores in one field", .min = 1, .max = 1}, \
    {"--delimiter", "C", CLI_TEXT, &(table).delimiter, \
     .help = "what separates a table's columns, such as ';' or \\t (a comma in .csv, else a tab)", .min = 1, \
     .max = 2}, \
    {"--quote", "Q", CLI_CHOICE, &(table).quote, \
     .help = "double: double quotes enclose a table's fields; none: they are ordinary characters", \
     .choices = "double none"}

/* Words of --best-by. */
#define BEST_BY "accuracy f1_macro f1_micro f1_entities pearson spearman recall_at_1 recall_at_10 loss"

/* Returns the path of the sample data of --task. */
static inline char *sample_of(const cli_table *table)
{
    static const char *const samples[] = {"reviews.tsv", "requests.tsv", "stays.tsv", "visits.conll",
                                          "questions.tsv"};
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

/* Sets the task. Without --data, chooses the sample of the task. Checks the options of tables, and sets
   is_table according to the data's name and type. */
static inline void check_table(tt_context *ctx, cli_training *run, cli_table *table)
{
    choose_task(ctx, run, table);
    if (!run->data) run->data = sample_of(table);
    const char *data = run->data;
    struct stat s;
    if (table->delimiter && strcmp(table->delimiter, "\\t") == 0) table->delimiter = "\t";
    if (table->delimiter && table->delimiter[1])
        die("--delimiter must be one character, or \\t for a tab, not '%s'", table->delimiter);
    const char *ending = strrchr(data, '.');
    static const char *const endings[] = {".tsv", ".csv", ".jsonl", ".json"};
    bool known = false;
    for (int i = 0; i < 4 && ending; i++) known |= strcasecmp(ending, endings[i]) == 0;
    const tt_task task = (tt_task)cli_index(table->task, TASKS);
    table->is_table = known || table->delimiter || (stat(data, &s) == 0 && !S_ISDIR(s.st_mode));
    if (!table->is_table && task != TT_TASK_CLASS)
        die("--task %s needs a table; '%s' is a folder of reviews with classes", table->task, data);
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
            die("'%s' has no second texts in a column '%s' (--pair-column)", run->data, table->pair_column);
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
    /* Gives each word its number as its tag. The loader copies the tag to the word's first token, which tells
       below to which word the token belongs. */
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
   predictions: room for n numbers, one for each class, label, score or column of an embedding. */
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
