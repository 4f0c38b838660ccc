/* Code that all examples with classifiers share: options, reports on classes, training and tests. A program
   includes this file once, after cli.h. */
#ifndef EXAMPLES_CLASSIFIER_H
#define EXAMPLES_CLASSIFIER_H

/* A program's model, and functions that training, tests and predictions need. */
typedef struct classifier {
    cli_training *run;
    const char *what;    /* the examples: "texts" or "images" */
    int epochs;          /* the default of --epochs */
    tt_model model;
    char (*names)[64];   /* names of the model's classes */
    void *self;          /* argument of the functions below */
    /* loader: makes a loader of a dataset; keep: saves the model in --out */
    tt_loader *(*loader)(tt_context *ctx, const void *self, const tt_dataset *d, bool train);
    tt_status (*keep)(void *self);
    /* removes what --prune-heads and --prune-neurons say, by importance for the source to train on */
    void (*prune)(tt_context *ctx, const cli_training *run, void *self, const tt_source *source);
} classifier;

/* ------------------------------------------------------------------------------------------------ options */

#define TASKS "class labels scores tags embed masked-words" /* in the order of tt_task */
static const char *const task_names[] = {"class", "labels", "scores", "tags", "embed", "masked-words"};

/* Default values and flags of programs that train classifiers, including the flags of all programs that
   train. what: "texts" or "images". epochs_, lr_: the default values, for --help. best_by_: the words of
   --best-by. */
#define CLI_CLASSIFIER_DEFAULT CLI_TRAINING_DEFAULT, .class_weights = "none", .teacher_weight = 0.5, \
    .teacher_temperature = 2
#define CLI_CLASSIFIER_FLAGS(run, what, epochs_, lr_, best_by_) \
    {"--train", "N", CLI_INTEGER, &(run).train, \
     .help = what " to train on (0: all but those for validation)", .max = 1e9}, \
    {"--test", "N", CLI_INTEGER, &(run).test, .help = what " to test on (0: all)", .max = 1e9}, \
    {"--epochs", "N", CLI_INTEGER, &(run).epochs, \
     .help = "passes over the training " what " (0: " epochs_ "; more, up to 20, if that is fewer than 200 " \
     "steps)", .max = 1e9}, \
    {"--lr", "X", CLI_NUMBER, &(run).lr, .help = "peak learning rate (0: " lr_ ")", .max = 1e9}, \
    {"--best-by", "WHAT", CLI_CHOICE, &(run).best_by, \
     .help = "the validation figure by which the best model is chosen and saved (the model's first metric)", \
     .choices = best_by_}, \
    {"--class-weights", "W", CLI_TEXT, &(run).class_weights, \
     .help = "weights of the classes, tags or labels in the loss. balanced: rare classes weigh more; " \
     "NAME=WEIGHT,NAME=WEIGHT: these weights, and 1 for other classes", .min = 1, \
     .max = 1e6}, \
    {"--features-once", "", CLI_SWITCH, &(run).features_once, \
     .help = "with --freeze: compute the output of the frozen part once for each example, before the first " \
     "step; the steps then compute only the rest"}, \
    {"--layers", "N", CLI_INTEGER, &(run).layers, \
     .help = "train a smaller model: N layers of the model, evenly chosen (0: all)", .max = 1000}, \
    CLI_PRUNE_FLAGS(run), \
    {"--teacher", "DIR", CLI_TEXT, &(run).teacher, .help = "learn from the logits of a trained model for " \
     "the same classes as well: distillation (none)", .min = 1, .max = 1000}, \
    {"--teacher-weight", "X", CLI_NUMBER, &(run).teacher_weight, \
     .help = "with --teacher: share of the teacher's logits in the loss; the labels have the rest", \
     .max = 1, .given = &(run).given_weight}, \
    {"--teacher-temperature", "X", CLI_NUMBER, &(run).teacher_temperature, \
     .help = "with --teacher: temperature of the probabilities; above 1 makes them less sure", .min = 0.01, \
     .max = 1e6, .given = &(run).given_heat}, \
    {"--hidden-weight", "X", CLI_NUMBER, &(run).hidden_weight, \
     .help = "with --teacher: weight of the error of the hidden states in the loss; if the weight is above " \
     "0, the teacher runs in each step", .max = 1e9}, \
    CLI_TRAINING_FLAGS(run)

/* Sets run->batch for --batch max: the micro-batches become as large as memory and the number of examples
   allow. tokens: number of tokens of the longest text; 0: all examples have equal
   length. */
static inline void choose_batch(tt_context *ctx, const classifier *x, int tokens, int64_t examples)
{
    cli_training *run = x->run;
    const int micros = run->accumulate * run->parallel.groups;
    const int max = (int)(examples < 65536 ? examples : 65536) / micros;
    tt_train_options o = training_options(run, 1);
    o.schedule.warmup_steps = 0;
    o.compile.accumulate = micros > run->parallel.data;
    expect_micros(&o, run->accumulate);
    o.max_seqs = 1;
    o.max_tokens = tokens;
    if (!max)
        die("--batch max: a step has %d micro-batches, more than there are examples: set --accumulate or "
            "--groups lower", micros);
    const int n = tt_largest_micro_batch(ctx, &x->model, &o, max);
    if (!n) die("--batch max: %s", tt_error(ctx));
    printf("--batch max: %d in a step, in micro-batches of %d%s\n", n * micros, n,
           n == max ? ", because there are no more examples" : "");
    run->batch = n * micros;
}

static inline tt_loader_options loader_options(const cli_training *run, bool train)
{
    tt_loader_options o = tt_loader_options_default();
    o.batch = run->batch;
    o.accumulate = run->accumulate;
    o.parallel = run->parallel;
    o.shuffle = train;
    o.whole_words = run->whole_words;
    return o;
}

/* --------------------------------------------------------------------------------------------------- data */

/* Reduces a dataset to n examples, an equal share of each class. n = 0: keeps all. split: "train", "test". */
static inline tt_dataset *keep_some(tt_context *ctx, const cli_training *run, tt_dataset *d,
                                    const char *split, int n, const char *what)
{
    const long long there = (long long)tt_dataset_count(d);
    if (n > there)
        die("--%s needs %d %s%s, but '%s' has only %lld to %s: ask for fewer", split, n, what,
            strcmp(split, "train") == 0 ? " with those for validation" : "", run->data, there, split);
    if (!n || n == there) return d;
    tt_dataset *part = (tt_dataset *)made(ctx, tt_dataset_split(d, n));
    tt_dataset_free(d);
    return part;
}

/* Returns the number of examples for --train plus a tenth for validation, or 0 if --train is 0 (all). */
static inline int with_held_out(const cli_training *run) { return run->train + (run->train + 9) / 10; }

/* Reduces *d to the examples to train on. Returns the examples to validate on: `held`, or, if `held` is
   empty, one of eleven examples of *d. */
static inline tt_dataset *hold_out(tt_context *ctx, const cli_training *run, tt_dataset **d,
                                   tt_dataset *held, const char *what)
{
    const bool apart = held && tt_dataset_count(held);
    const tt_task task = tt_dataset_task(*d);
    /* min number of classes, labels or scores */
    const int classes = task == TT_TASK_EMBED || task == TT_TASK_MASKED_LM   ? 0
                        : task == TT_TASK_LABELS || task == TT_TASK_SCORES ? 1
                                                                           : 2;
    if (tt_dataset_count(*d) < 2 || tt_dataset_classes(*d) < classes)
        die("'%s' has %lld %s and %d classes to train on, but must have at least 2 and %d: add examples",
            run->data, (long long)tt_dataset_count(*d), what, tt_dataset_classes(*d), classes);
    *d = keep_some(ctx, run, *d, "train", apart ? run->train : with_held_out(run), what);
    if (apart) return held;
    tt_dataset_free(held);
    return (tt_dataset *)made(ctx, tt_dataset_split(*d, (tt_dataset_count(*d) + 10) / 11));
}

/* ------------------------------------------------------------------------------------------------ classes */

/* Compares names, ignoring the spaces around them and the case of letters. */
static inline int by_plain_name(const void *x, const void *y)
{
    const char *a = *(const char *const *)x, *b = *(const char *const *)y;
    while (isspace((unsigned char)*a)) a++;
    while (isspace((unsigned char)*b)) b++;
    size_t n = strlen(a), m = strlen(b);
    while (n && isspace((unsigned char)a[n - 1])) n--;
    while (m && isspace((unsigned char)b[m - 1])) m--;
    const int order = strncasecmp(a, b, n < m ? n : m);
    return order ? order : (n > m) - (n < m);
}

static inline bool same_number(const char *a, const char *b) /* "1" and "1.0" are the same number */
{
    char *of_a, *of_b;
    const double x = strtod(a, &of_a), y = strtod(b, &of_b);
    return x == y && of_a > a && of_b > b && !*of_a && !*of_b;
}

/* Returns the names of a dataset's classes or, if d is NULL, of a model's. The caller frees the list. */
static inline const char **names_of(const tt_dataset *d, char (*names)[64], int classes)
{
    const char **name = (const char **)made(NULL, calloc((size_t)classes + 1, sizeof *name));
    for (int c = 0; c < classes; c++) name[c] = d ? tt_dataset_class_name(d, c) : names[c];
    return name;
}

/* Prints a line with the names of the classes, labels, scores or tags to train on. For classes and labels the
   line also has numbers of examples, for tags numbers of words. Prints notes about suspicious classes, such
   as two similar names. what: "texts" or "images". */
static inline void show_classes(const tt_dataset *d, const char *what)
{
    const int classes = tt_dataset_classes(d), shown = classes > 12 ? 10 : classes;
    if (!classes) return; /* with --task embed and masked-words there are no classes */
    const long long n = (long long)tt_dataset_count(d);
    int64_t *counts = (int64_t *)made(NULL, calloc((size_t)classes, sizeof *counts));
    const char **names = names_of(d, NULL, classes), *rarest = NULL;
    int largest = 0, rare = 0;
    tt_dataset_counts(d, counts);
    const tt_task task = tt_dataset_task(d);
    printf("%s:", task == TT_TASK_CLASS ? "classes" : task_names[task]);
    for (int c = 0; c < classes; c++) {
        if (c < shown) printf("%s %s", c ? "," : "", names[c]);
        if (c < shown && task != TT_TASK_SCORES) printf(": %lld", (long long)counts[c]);
        if (counts[c] > counts[largest]) largest = c;
        if (counts[c] < 2) rare++, rarest = names[c];
    }
    if (shown < classes) printf(" and %d others", classes - shown);
    printf("\n");
    const double share = (double)counts[largest] / (double)n;
    if (task != TT_TASK_CLASS) {
        free(counts), free((void *)names);
        return;
    }
    if (classes > 4 && 2 * (long long)classes > n)
        printf("note: there are %d classes for %lld %s: is this the column or folder of the labels?\n",
               classes, n, what);
    else if (rare == 1)
        printf("note: the class '%s' has at most one of the %s to train on, which is too few to learn from\n",
               rarest, what);
    else if (rare)
        printf("note: %d classes, such as '%s', have at most one of the %s to train on, which is too few to "
               "learn from\n", rare, rarest, what);
    if (share >= 0.95)
        printf("note: %.1f%% of the %s are '%s': a model that always gives this answer is right as often\n",
               100 * share, what, names[largest]);
    qsort((void *)names, (size_t)classes, sizeof *names, by_plain_name);
    for (int c = 1; c < classes; c++)
        if (by_plain_name(&names[c - 1], &names[c]) == 0 || same_number(names[c - 1], names[c]))
            printf("note: the classes '%s' and '%s' have similar names: are they one class?\n", names[c - 1],
                   names[c]);
    free(counts), free((void *)names);
}

/* Sets the weights of --class-weights for a dataset to train on (see tt_dataset_weights). */
static inline void weigh_classes(cli_training *run, const tt_dataset *d)
{
    const int classes = tt_dataset_classes(d);
    if (strcmp(run->class_weights, "none") == 0) return;
    if (tt_dataset_task(d) == TT_TASK_SCORES || !classes)
        die("--class-weights is for classes, but --task %s has none: leave it out",
            task_names[tt_dataset_task(d)]);
    run->weights = (float *)made(NULL, calloc((size_t)classes, sizeof *run->weights));
    if (strcmp(run->class_weights, "balanced") == 0) {
        if (tt_dataset_weights(d, run->weights) != TT_OK)
            die("out of memory for the weights of classes: free memory");
        return;
    }
    for (int c = 0; c < classes; c++) run->weights[c] = 1;
    double weight;
    for (const char *list = run->class_weights, *name; *list;) {
        const int n = cli_pair("--class-weights must be none, balanced or", &list, &name, &weight);
        int c = 0;
        while (c < classes && (strncmp(tt_dataset_class_name(d, c), name, (size_t)n) != 0 ||
                               tt_dataset_class_name(d, c)[n])) c++;
        if (c == classes)
            die("--class-weights names '%.*s', but must name classes of the data, such as '%s'", n, name,
                tt_dataset_class_name(d, 0));
        run->weights[c] = (float)weight;
    }
}

typedef struct cli_f1 { double f1; const char *name; } cli_f1;

static inline int by_f1(const void *x, const void *y)
{
    const cli_f1 *a = (const cli_f1 *)x, *b = (const cli_f1 *)y;
    return (a->f1 > b->f1) - (a->f1 < b->f1);
}

/* Prints F1 of each class, label or tag: of more than 12 classes, the 5 lowest. */
static inline void show_f1(const classifier *x, const tt_predictions *p)
{
    double *f1 = (double *)made(NULL, calloc((size_t)p->classes, sizeof *f1)), sum = 0;
    cli_f1 *of = (cli_f1 *)made(NULL, calloc((size_t)p->classes, sizeof *of));
    int there = 0;
    tt_f1_scores(p, f1);
    for (int c = 0; c < p->classes; c++) {
        if (isnan(f1[c])) continue; /* F1 of this class is undefined */
        of[there].name = x->names[c];
        sum += of[there++].f1 = f1[c];
    }
    const int shown = there > 12 ? 5 : there;
    if (there) printf("F1 is %.4f on average%s", sum / there, shown < there ? ", and at least " : "");
    if (shown < there) qsort(of, (size_t)there, sizeof *of, by_f1);
    for (int k = 0; k < shown; k++)
        printf("%s%s: %.4f", k || shown == there ? ", " : "", of[k].name, of[k].f1);
    if (there) printf("\n");
    free(f1), free(of);
}

/* Returns whether a metric compares predictions with scores. */
static inline bool correlates(const char *metric)
{
    return strcmp(metric, "pearson") == 0 || strcmp(metric, "spearman") == 0;
}

/* Evaluates a dataset, and prints the metrics of the model's task, the share of the largest class, and F1. */
static inline void test_classifier(tt_context *ctx, const classifier *x, const tt_dataset *d)
{
    const int n = x->model.classes;
    tt_loader *l = x->loader(ctx, x->self, d, false);
    tt_trainer *t = make_trainer(ctx, x->run, &x->model, tt_loader_source(l), NULL, 0);
    tt_stats s;
    tt_predictions *p = NULL; /* none of masked words */
    const bool embeds = x->model.task == TT_TASK_EMBED, scored = tt_dataset_values(d, 0) != NULL;
    const char *constant = NULL; /* the last correlation that is undefined */
    if (x->model.task == TT_TASK_MASKED_LM) must(ctx, tt_evaluate(t, tt_loader_source(l), &s));
    else p = (tt_predictions *)made(ctx, tt_predictions_new(t, tt_loader_source(l), &s));
    printf("best epoch: ");
    const char *between = "";
    for (int k = 0; k < TT_METRICS && x->model.metrics[k].name; k++) {
        const tt_metric *m = &x->model.metrics[k];
        const double value = tt_metric_value(m, &s, p);
        /* skips metrics that need targets: the loader of embeddings gives none */
        if (m->of && !s.targets) continue;
        if (embeds && scored != correlates(m->name)) continue;
        if (isnan(value)) printf("%s%s undefined", between, m->name);
        else printf("%s%s %.4f", between, m->name, value);
        if (isnan(value) && correlates(m->name)) constant = m->name;
        between = ", ";
    }
    if (s.targets) printf(", loss %.4f", s.loss);
    printf(" on %lld test %s\n", (long long)tt_dataset_count(d), x->what);
    if (constant)
        printf("note: %s is undefined if all scores, or all predictions, are one number\n", constant);
    if (x->model.task == TT_TASK_CLASS) {
        int64_t *counts = (int64_t *)made(NULL, calloc((size_t)n, sizeof *counts));
        int largest = 0;
        tt_dataset_counts(d, counts);
        for (int c = 1; c < n && c < tt_dataset_classes(d); c++)
            if (counts[c] > counts[largest]) largest = c;
        printf("the largest class, '%s', has %.4f of them; ", x->names[largest],
               (double)counts[largest] / (double)tt_dataset_count(d));
        free(counts);
    }
    if (x->model.classes && x->model.task != TT_TASK_SCORES) show_f1(x, p);
    tt_predictions_free(p), tt_trainer_free(t), tt_loader_free(l);
}

/* ------------------------------------------------------------------------------------------- distillation */

/* Keeps the layers of a model that --layers asks for: layer k is then layer k * layers / N of the model.
   layer: the structs of the layers, of `bytes` each. Returns the number of layers that remain. */
static inline int keep_layers(const cli_training *run, void *layer, size_t bytes, int layers)
{
    const int n = run->layers ? run->layers : layers;
    if (n > layers) die("--layers is %d, but the model has %d layers", n, layers);
    for (int k = 0; k < n; k++)
        memmove((char *)layer + (size_t)k * bytes, (char *)layer + (size_t)(k * layers / n) * bytes, bytes);
    return n;
}

/* Ends the program unless the classes that --teacher names are those of the data. A checkpoint whose classes
   have no names calls them LABEL_0, LABEL_1 and so on. */
static inline void check_teacher_names(const cli_training *run, char (*teacher)[64], const tt_dataset *d)
{
    const int n = tt_dataset_classes(d);
    char unnamed[32];
    bool named = false;
    for (int c = 0; c < n; c++) {
        snprintf(unnamed, sizeof unnamed, "LABEL_%d", c);
        named = named || strcmp(teacher[c], unnamed) != 0;
    }
    for (int c = 0, k; c < n && n > 1 && named; c++) {
        for (k = 0; k < n && strcmp(teacher[k], tt_dataset_class_name(d, c)) != 0;) k++;
        if (k == n)
            die("the data have the class '%s', but --teacher '%s' has other classes, such as '%s': name a "
                "teacher that was trained on the same classes", tt_dataset_class_name(d, c), run->teacher,
                teacher[c]);
    }
}

/* Ends the program unless the teacher's classes have the numbers of the model's classes. */
static inline void check_teacher(const cli_training *run, char (*teacher)[64], char (*names)[64], int classes)
{
    for (int c = 0; c < classes; c++)
        if (strcmp(teacher[c], names[c]) != 0)
            die("class %d is '%s' in --teacher '%s', but '%s' in the model: train the teacher on this data, "
                "or start both from one model", c, teacher[c], run->teacher, names[c]);
}

static inline tt_status no_batch(void *self, tt_batch *b, bool *more)
{
    (void)self, (void)b;
    *more = false;
    return TT_OK;
}

/* Computes the logits of --teacher for the texts or images to train on, unless the teacher runs in each
   step. With --plan computes none. longest: tokens of the longest text; 0: images. */
static inline void teach(tt_context *ctx, cli_training *run, const tt_source *source, int64_t examples,
                         int longest)
{
    const bool beside = run->beside || run->features_once || run->hidden_weight > 0 || tt_processes(ctx) > 1;
    const char *only = run->hidden_weight > 0 ? "--hidden-weight" : run->given_weight ? "--teacher-weight" :
                       run->given_heat ? "--teacher-temperature" : NULL;
    if (only && !run->teacher) die("%s needs a --teacher: name one, or leave %s out", only, only);
    if (!run->teacher) return;
    if (run->teacher_model->max_length && longest > run->teacher_model->max_length)
        die("the longest text has %d tokens, but --teacher '%s' reads at most %d: set --max-length to %d",
            longest, run->teacher, run->teacher_model->max_length, run->teacher_model->max_length);
    if (beside) {
        printf("the teacher runs beside the student, and its memory is part of the plan\n");
        return;
    }
    tt_source all = *source;
    if (run->plan) all.next = no_batch;
    tt_trainer *t = make_trainer(ctx, run, run->teacher_model, source, NULL, 0);
    run->logits = (tt_teacher *)made(ctx, tt_teacher_new(t, &all));
    tt_trainer_free(t);
    printf("the teacher runs once; its logits take %.1f MB of the host's memory\n",
           4e-6 * (double)examples * run->teacher_model->classes);
}

/* Returns the default number of epochs: `usual`, or up to 20 if `usual` epochs have fewer than 200 steps. */
static inline int enough_epochs(int64_t steps, int usual)
{
    const int64_t wanted = steps > 10 ? (200 + steps - 1) / steps : 20;
    return wanted > usual ? (int)wanted : usual;
}

/* Trains on a dataset, and validates on another one. Returns the program's exit status. */
static inline int train_classifier(tt_context *ctx, const classifier *x, const tt_dataset *d,
                                   const tt_dataset *held)
{
    cli_training *run = x->run;
    const long long train = (long long)tt_dataset_count(d), other = (long long)tt_dataset_count(held);
    tt_loader *l[2];
    int longest = 0;
    weigh_classes(run, d);
    if (tt_dataset_task(d) == TT_TASK_EMBED && run->largest)
        die("--batch max is not for --task embed, whose batch decides how many negatives a text has: set a "
            "number");
    if (tt_dataset_task(d) == TT_TASK_EMBED && tt_dataset_values(d, 0))
        die("'%s' has scores for the pairs to train on, which --task embed cannot use: leave the scores of "
            "rows for training empty, or name another column (--label-column)", run->data);
    const bool embeds = tt_dataset_task(held) == TT_TASK_EMBED, scored = tt_dataset_values(held, 0) != NULL;
    if (embeds && scored && !run->best_by) run->best_by = "spearman";
    const bool by_metric = run->best_by && strcmp(run->best_by, "loss") != 0;
    if (embeds && by_metric && scored != correlates(run->best_by))
        die("--best-by %s is undefined for pairs %s scores to validate on: leave it out", run->best_by,
            scored ? "with" : "without");
    const bool of_step = run->negatives && strcmp(run->negatives, "step") == 0;
    if (tt_dataset_task(d) == TT_TASK_EMBED && (of_step ? run->batch : run->batch / run->accumulate) < 2)
        die("--task embed needs at least 2 pairs in a micro-batch, because the other pairs are the wrong "
            "answers: set --batch higher, --accumulate lower, or --negatives step");
    const bool triplets = tt_dataset_negative(d, 0, NULL) || tt_dataset_negative(held, 0, NULL);
    if (of_step) run->step_seqs = run->batch * (triplets ? 3 : 2);
    /* begins with the smallest batch: the loaders that are made with it tell the length of the longest
       text */
    if (run->largest) run->batch = run->accumulate * run->parallel.groups;
    for (bool again = run->largest;; again = false) {
        for (int k = 0; k < 2; k++) {
            l[k] = x->loader(ctx, x->self, k ? held : d, k == 0);
            if (tt_loader_longest(l[k]) > longest) longest = tt_loader_longest(l[k]);
        }
        if (!again) break;
        tt_loader_free(l[0]), tt_loader_free(l[1]);
        choose_batch(ctx, x, longest, train);
    }
    const tt_source *source[2] = {tt_loader_source(l[0]), tt_loader_source(l[1])};
    if (!run->epochs) run->epochs = enough_epochs(source[0]->steps, x->epochs);
    if (run->prune_heads > 0 || run->prune_neurons > 0) x->prune(ctx, run, x->self, source[0]);
    factor(ctx, run);
    teach(ctx, run, source[0], train, longest);
    tt_trainer *t = make_trainer(ctx, run, &x->model, source[0], source[1], run->epochs);
    printf("%lld %s to train on, %lld for validation; ", train, x->what, other);
    printf("%s, %d threads, %s\n", run->model ? run->model : "from scratch", tt_threads(ctx), tt_isa(ctx));
    const long long cut = (long long)(tt_loader_cut(l[0]) + tt_loader_cut(l[1]));
    if (longest) printf("the longest has %d tokens; ", longest);
    if (cut) printf("%lld of %lld are cut (--max-length)\n", cut, train + other);
    else if (longest) printf("none is cut\n");
    show_classes(d, x->what);
    const int result = fit(ctx, t, source[0], source[1], run, x->keep, x->self);
    if (run->finished && !longest) printf("waited %.1f s for %s\n", tt_loader_waited(l[0]), x->what);
    tt_trainer_free(t), tt_loader_free(l[0]), tt_loader_free(l[1]);
    tt_teacher_free(run->logits);
    run->logits = NULL;
    free(run->weights);
    run->weights = NULL;
    return result;
}

/* Ends the program if --out has no trained model. */
static inline void check_trained(const cli_training *run)
{
    if (!holds(run->out, "model.safetensors"))
        die("'%s' holds no trained model: one is saved when the first epoch ends", run->out);
}

/* Makes a trainer that predicts one example at a time with the model in --out. Ends the program if new_head,
   which means that the model's classifier has random weights. */
static inline tt_trainer *predictor(tt_context *ctx, const classifier *x, bool new_head)
{
    if (x->model.task == TT_TASK_MASKED_LM)
        die("'%s' holds a model of masked words, which --predict cannot show", x->run->out);
    if (new_head)
        die("'%s' holds a model whose classifier is not trained, so it cannot --predict: train it first, "
            "with --model %s and another --out", x->run->out, x->run->out);
    return make_trainer(ctx, x->run, &x->model, NULL, NULL, 0);
}

/* Prints a line for the example called `name`: the prediction, a tab and the name. The prediction is the
   likeliest class, a tab and the class's probability; or the labels whose probabilities are above 0.5, or
   "none"; or the scores; or the numbers of the embedding. n: number of predictions. */
static inline void show_prediction(const classifier *x, const float *prediction, int n, const char *name)
{
    int best = 0, shown = 0;
    for (int c = 1; c < n; c++) if (prediction[c] > prediction[best]) best = c;
    if (x->model.task == TT_TASK_CLASS) printf("%s\t%.4f", x->names[best], prediction[best]);
    for (int c = 0; c < n && x->model.task == TT_TASK_LABELS; c++)
        if (prediction[c] > 0.5f) printf("%s%s %.4f", shown++ ? ", " : "", x->names[c], prediction[c]);
    if (x->model.task == TT_TASK_LABELS && !shown) printf("none");
    for (int c = 0; c < n && x->model.task == TT_TASK_SCORES; c++)
        printf("%s%.4f", c ? ", " : "", prediction[c]);
    for (int c = 0; c < n && x->model.task == TT_TASK_EMBED; c++)
        printf("%s%.6f", c ? " " : "", prediction[c]);
    printf("\t%s\n", name);
    if (fflush(stdout) != 0) die("cannot write the output: %s", strerror(errno));
}

#endif
