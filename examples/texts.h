/* Reads labelled texts of a table, or IMDb's reviews, for the command line. A program includes this file
   once, after classifier.h. */
#ifndef EXAMPLES_TEXTS_H
#define EXAMPLES_TEXTS_H

#include "datasets.h"

typedef struct cli_table {
    const char *text_column, *label_column, *delimiter, *quote;
    bool is_table; /* false: the data are the folder aclImdb */
} cli_table;

#define TABLE_DEFAULT {"text", "label", NULL, "double", false}
#define TABLE_FLAGS(table) \
    {"--text-column", "NAME", CLI_TEXT, &(table).text_column, \
     .help = "a table's column of texts", .min = 1, .max = 1000}, \
    {"--label-column", "NAME", CLI_TEXT, &(table).label_column, \
     .help = "a table's column of labels", .min = 1, .max = 1000}, \
    {"--delimiter", "C", CLI_TEXT, &(table).delimiter, \
     .help = "what separates a table's columns, such as ';' or \\t (a comma in .csv, else a tab)", .min = 1, \
     .max = 2}, \
    {"--quote", "Q", CLI_CHOICE, &(table).quote, \
     .help = "double: double quotes enclose a table's fields; none: they are ordinary characters", \
     .choices = "double none"}

/* Checks the options, and sets is_table according to the data's name and type. */
static inline void check_table(cli_table *table, const char *data)
{
    struct stat s;
    if (table->delimiter && strcmp(table->delimiter, "\\t") == 0) table->delimiter = "\t";
    if (table->delimiter && table->delimiter[1])
        die("--delimiter must be one character, or \\t for a tab, not '%s'", table->delimiter);
    const char *ending = data ? strrchr(data, '.') : NULL;
    static const char *const endings[] = {".tsv", ".csv", ".jsonl", ".json"};
    bool known = false;
    for (int i = 0; i < 4 && ending; i++) known |= strcasecmp(ending, endings[i]) == 0;
    table->is_table = known || table->delimiter || (data && stat(data, &s) == 0 && !S_ISDIR(s.st_mode));
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
    o.delimiter = table->delimiter ? table->delimiter[0] : 0;
    o.unquoted = strcmp(table->quote, "none") == 0;
    if (table->is_table)
        return (tt_dataset *)made(ctx, tt_dataset_table(ctx, run->data, split, names, classes, &o));
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

#endif
