/* Code that the examples share: command-line options with --help, and errors; for programs that train, the
   folder of a run, signals that stop a run, and progress on a terminal. A program includes this file once,
   after tinytrain.h. */
#ifndef EXAMPLES_CLI_H
#define EXAMPLES_CLI_H

#include "system.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>

#define CLI_COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* ------------------------------------------------------------------------------------------------- errors */

static const char *cli_program = "program"; /* the program's name, from cli_parse */
static const char *cli_path = "";           /* argv[0] */
static char cli_process[96];                /* such as ", process 1 (host b)"; "" in a run of one process */

/* Ends the program with an error message. */
static inline void die(const char *format, ...)
{
    char why[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    fflush(stdout);
    fprintf(stderr, "%s%s: %s\n", cli_program, cli_process, why);
    exit(1);
}

/* Bytes that a rank uses beside the plan, on the CPU. --budget includes these bytes. */
static size_t beside_the_plan;

/* Writes the sum of `bytes` and of the memory beside the plan, in megabytes, rounded up. The library's errors
   use this function. */
static inline void write_megabytes(void *user, size_t bytes, char *to, size_t capacity)
{
    (void)user;
    snprintf(to, capacity, "%.1f MB", ceil((double)(bytes + beside_the_plan) / 1e5) / 10);
}

/* The flags that set fields of the library's options. The library's errors name these flags. */
static const tt_option_name flag_names[] = {
    {"accumulate", "--accumulate"}, {"batch", "--batch"}, {"beta", "--beta"}, {"clip_norm", "--clip"},
    {"device", "--device"}, {"ema_decay", "--ema"}, {"features_once", "--features-once"},
    {"hidden_weight", "--hidden-weight"}, {"label_smoothing", "--label-smoothing"},
    {"layer_decay", "--layer-decay"},
    {"matmul", "--matmul"}, {"memory", "--memory"}, {"memory_budget", "--budget"}, {"offload", "--offload"},
    {"parallel.data", "--data-ranks"}, {"parallel.groups", "--groups"}, {"parallel.micros", "--micros"},
    {"parallel.pipeline", "--pipeline"}, {"parallel.reduce_micros", "--reduce-micros"},
    {"parallel.schedule", "--stages"}, {"parallel.sequence", "--sequence"}, {"parallel.server", "--server"},
    {"parallel.tensor", "--tensor"}, {"parallel.zero", "--zero"}, {"precision", "--precision"},
    {"prune", "--prune"}, {"prune_by_movement", "--prune-by movement"}, {"recompute", "--recompute"},
    {"state_bits", "--state-bits"},
    {"step_seqs", "--negatives step"}, {"teacher_model", "--teacher"},
    {"temperature", "--temperature"}, {"tune", "--tune"}, {"update", "--update"}, {"weight_decay", "--decay"},
    {"across", "--across"}, {"all_tokens", "--all-tokens"}, {"length", "--length"},
    {"rows", "rows (a smaller --batch or a larger --accumulate)"}, {NULL, NULL}};
static const tt_wording as_flags = {flag_names, write_megabytes, NULL};

/* Returns p. If p is NULL, ends the program with the library's error or, if ctx is NULL, with "out of
   memory". */
static inline void *made(tt_context *ctx, void *p)
{
    if (!p) die("%s", ctx ? tt_error(ctx) : "out of memory: free memory");
    return p;
}

static inline void must(tt_context *ctx, tt_status status)
{
    if (status != TT_OK) die("%s", tt_error(ctx));
}

/* ------------------------------------------------------------------------------------------------ options */

/* The type of an option's value. `to` points to a const char * for TEXT and CHOICE, an int for INTEGER, a
   double for NUMBER, a size_t for BYTES, and a bool for SWITCH. */
typedef enum cli_type { CLI_TEXT, CLI_CHOICE, CLI_INTEGER, CLI_NUMBER, CLI_BYTES, CLI_SWITCH } cli_type;

typedef struct cli_flag {
    const char *name, *value; /* name: such as "--lr"; value: the name of its value in --help, such as "X" */
    cli_type type;
    void *to;                 /* the value; holds the default before cli_parse */
    const char *help;         /* text of --help, with the default added unless the text ends with ) or : */
    double min, max;          /* bounds of an INTEGER or NUMBER; if max > 0, also of a TEXT's length */
    const char *choices;      /* words of a CHOICE; or a word that sets an INTEGER to CLI_WORD */
    const char *words_of;     /* library option whose words a CHOICE accepts; NULL: `choices` has them */
    /* name of another flag: a word of this flag that is given to the other flag sets this flag (cli_meant);
       or NULL */
    const char *also;
    bool *given;              /* set to true if the command line has the option; or NULL */
} cli_flag;

enum { CLI_WORD = -1 };

/* Returns the columns of the terminal now, or 80 if they are unknown. */
static inline int cli_width(void)
{
    const int columns = terminal_columns();
    return columns >= 20 ? columns : 80;
}

/* Returns the index of a value in a list of words, or -1 if the list lacks the value. */
static inline int cli_index(const char *value, const char *words)
{
    size_t n = strlen(value);
    for (int k = 0; *words; k++) {
        size_t word = strcspn(words, " ");
        if (word == n && memcmp(words, value, n) == 0) return k;
        words += word + (words[word] == ' ');
    }
    return -1;
}

/* Returns the words of a CHOICE, with spaces between words. The result is valid until the next call. The word
   "custom" is left out, because a command line cannot name a function. */
static inline const char *cli_words(const cli_flag *f)
{
    static char words[256];
    size_t n = 0;
    const char *word;
    if (!f->words_of) return f->choices;
    for (int k = 0; (word = tt_option_word(f->words_of, k)) != NULL && n < sizeof words; k++)
        if (strcmp(word, "custom") != 0)
            n += (size_t)snprintf(words + n, sizeof words - n, "%s%s", n ? " " : "", word);
    return words;
}

/* Writes the list of words "a b c" as "a, b or c". */
static inline const char *cli_list(const char *words, char *to, size_t capacity)
{
    size_t n = 0;
    for (; *words && n + 8 < capacity; words++) {
        if (*words == ' ')
            n += (size_t)snprintf(to + n, capacity - n, "%s", strchr(words + 1, ' ') ? ", " : " or ");
        else to[n++] = *words;
    }
    to[n] = 0;
    return to;
}

/* Prints a text in lines of `width` columns, all but the first indented. at: the cursor's column. */
static inline void cli_wrap(const char *text, int at, int indent, int width)
{
    while (*text) {
        int word = (int)strcspn(text, " ");
        if (at > indent && at + 1 + word > width) {
            printf("\n%*s", indent, "");
            at = indent;
        }
        at += printf("%s%.*s", at > indent ? " " : "", word, text);
        text += word + (text[word] == ' ');
    }
    putchar('\n');
}

static inline void cli_default(const cli_flag *f, char *to, size_t capacity)
{
    to[0] = 0;
    if (strchr("):", f->help[strlen(f->help) - 1])) return;
    if (f->type == CLI_INTEGER) snprintf(to, capacity, " (%d)", *(int *)f->to);
    if (f->type == CLI_NUMBER) snprintf(to, capacity, " (%g)", *(double *)f->to);
    if (f->type == CLI_TEXT || f->type == CLI_CHOICE) {
        const char *text = *(const char **)f->to;
        snprintf(to, capacity, " (%s)", text ? text : "none");
    }
}

static inline void cli_help(const cli_flag *flags, int count, const char *about)
{
    enum { INDENT = 24 };
    int width = cli_width() < 110 ? cli_width() : 110;
    printf("usage: %s [options]\n\n", cli_program);
    cli_wrap(about, 0, 0, width);
    putchar('\n');
    cli_wrap("Options, as --name value or --name=value, with defaults in parentheses:", 0, 0, width);
    putchar('\n');
    for (int k = 0; k < count; k++) {
        const cli_flag *f = &flags[k];
        char text[1024], list[256], standard[128];
        int at = printf("  %s %s", f->name, f->value);
        if (at >= INDENT) printf("\n"), at = 0;
        printf("%*s", INDENT - at, "");
        cli_default(f, standard, sizeof standard);
        const bool lists = f->type == CLI_CHOICE, colon = f->help[strlen(f->help) - 1] == ':';
        snprintf(text, sizeof text, "%s%s%s%s%s%s%s", f->help, f->also ? " (" : "", f->also ? f->also : "",
                 f->also ? " means the same)" : "", !lists ? "" : colon ? " " : ": ",
                 lists ? cli_list(cli_words(f), list, sizeof list) : "", standard);
        cli_wrap(text, INDENT, INDENT, width);
    }
    printf("  -h, --help            this list\n");
    exit(fflush(stdout) != 0);
}

/* Returns the number of letters to insert, delete or replace to turn a into b (Levenshtein 1966). */
static inline int cli_distance(const char *a, const char *b)
{
    int row[64], n = (int)strlen(b);
    if (n > 63) return 64;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int above_left = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int replaced = above_left + (a[i - 1] != b[j - 1]),
                other = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            above_left = row[j];
            row[j] = replaced < other ? replaced : other;
        }
    }
    return row[n];
}

/* Ends the program because an argument is no option. The message names the option that is called
   by the argument in other programs, or the option with the most similar name. */
static inline void cli_unknown(const cli_flag *flags, int count, const char *argument)
{
    static const char *const known[][2] = {
        {"--learning-rate", "--lr"}, {"--num-train-epochs", "--epochs"}, {"--batch-size", "--batch"},
        {"--per-device-train-batch-size", "--batch"}, {"--gradient-accumulation-steps", "--accumulate"},
        {"--weight-decay", "--decay"}, {"--warmup-ratio", "--warmup"}, {"--lr-scheduler-type", "--schedule"},
        {"--max-grad-norm", "--clip"}, {"--output-dir", "--out"}, {"--model-name-or-path", "--model"},
        {"--max-seq-length", "--max-length"}, {"--image-size", "--size"}, {"--dataset", "--data"}};
    char given[64];
    const char *nearest = NULL, *bare = argument + strspn(argument, "-");
    int min = strlen(bare) > 3 ? 3 : 1; /* only an option with a smaller distance is suggested */
    snprintf(given, sizeof given, "--%.*s", (int)strcspn(bare, "="), bare);
    for (int k = 0; k < count; k++) {
        int distance = cli_distance(given, flags[k].name);
        if (strlen(given) > 4 && strncmp(given, flags[k].name, strlen(given)) == 0)
            distance = 0; /* `given` is the beginning of the option */
        if (distance < min) nearest = flags[k].name, min = distance;
    }
    for (char *c = given; *c; c++) if (*c == '_') *c = '-';
    for (int n = 0; n < CLI_COUNT(known); n++)
        for (int k = 0; k < count && strcmp(given, known[n][0]) == 0; k++)
            if (strcmp(flags[k].name, known[n][1]) == 0) nearest = flags[k].name;
    if (nearest) die("there is no option '%s'; did you mean %s? --help lists all options", argument, nearest);
    die("there is no option '%s'; --help lists all options", argument);
}

/* Reads a number of bytes, with or without a unit: 3GB, 500 MiB, 1.5e9. Returns false for other texts. */
static inline bool cli_bytes(const char *text, size_t *bytes)
{
    static const char *const units[] = {"", "B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"};
    static const double of[] = {1, 1, 1e3, 1e6, 1e9, 1e12, 0x1p10, 0x1p20, 0x1p30, 0x1p40};
    char *unit;
    double n = strtod(text, &unit);
    if (unit == text) return false;
    while (*unit == ' ') unit++;
    for (int k = 0; k < 10; k++) {
        if (strcasecmp(unit, units[k]) != 0 || !(n * of[k] >= 1 && n * of[k] < 0x1p62)) continue;
        *bytes = (size_t)(n * of[k]);
        return true;
    }
    return false;
}

/* Returns the option that `value`, given for option f, sets. This is an option whose field `also` names f and
   whose words have the value, or else f. */
static inline const cli_flag *cli_meant(const cli_flag *flags, int count, const cli_flag *f,
                                        const char *value)
{
    for (int k = 0; k < count; k++)
        if (flags[k].also && strcmp(flags[k].also, f->name) == 0 &&
            cli_index(value, cli_words(&flags[k])) >= 0)
            return &flags[k];
    return f;
}

/* Reads the first item NAME=NUMBER of a list with commas between its items, and moves *list past the item.
   Sets *name to the item, and *number to NUMBER, which is at least 0. Returns the length of NAME. If the item
   has another form, ends the program with an error. must: the beginning of this error, which names the option
   and the values that the option accepts beside a list. */
static inline int cli_pair(const char *must, const char **list, const char **name, double *number)
{
    const char *item = *list;
    const int length = (int)strcspn(item, ",");
    int n = length; /* NAME ends before the last '=' */
    char *end = NULL;
    while (n > 0 && item[--n] != '=') {}
    if (n) *number = strtod(item + n + 1, &end);
    if (!n || end == item + n + 1 || end != item + length || !(*number >= 0 && *number <= 1e9))
        die("%s a list such as NAME=2,NAME=0.5, not '%.*s'", must, length, item);
    *name = item;
    *list = item + length + (item[length] == ',');
    return n;
}

/* Sets an option to a value, or ends the program with an error if the value is invalid. */
static inline void cli_set(const cli_flag *f, const char *value)
{
    char *end, list[256];
    size_t length = strlen(value);
    errno = 0;
    switch (f->type) {
    case CLI_TEXT:
        if (f->max > 0 && (length < f->min || length > f->max))
            die("%s has %zu characters, but must have %.0f to %.0f", f->name, length, f->min, f->max);
        *(const char **)f->to = value;
        return;
    case CLI_CHOICE:
        if (cli_index(value, cli_words(f)) < 0)
            die("%s must be %s, not '%s'", f->name, cli_list(cli_words(f), list, sizeof list), value);
        *(const char **)f->to = value;
        return;
    case CLI_INTEGER: {
        long long n = strtoll(value, &end, 10);
        if (f->choices && strcmp(value, f->choices) == 0) {
            *(int *)f->to = CLI_WORD;
            return;
        }
        if (end == value || *end)
            die("%s must be a whole number%s%s, not '%s'", f->name, f->choices ? " or " : "",
                f->choices ? f->choices : "", value);
        if (errno || n < (long long)f->min || n > (long long)f->max)
            die("%s must be a number from %.0f to %.0f, not %s", f->name, f->min, f->max, value);
        *(int *)f->to = (int)n;
        return;
    }
    case CLI_NUMBER: {
        double x = strtod(value, &end);
        if (end == value || *end) die("%s must be a number, not '%s'", f->name, value);
        if (!(x >= f->min && x <= f->max))
            die("%s must be a number from %g to %g, not %s", f->name, f->min, f->max, value);
        *(double *)f->to = x;
        return;
    }
    case CLI_BYTES:
        if (!cli_bytes(value, (size_t *)f->to))
            die("%s must be a number of bytes, such as 3GB or 500MiB, not '%s'", f->name, value);
        return;
    case CLI_SWITCH: {
        int k = cli_index(value, "false no off 0 true yes on 1");
        if (k < 0) die("%s takes no value, =true or =false, not '%s'", f->name, value);
        *(bool *)f->to = k >= 4;
    }
    }
}

/* Sets the options that the arguments contain. about: a sentence on the program, for --help. */
static inline void cli_parse(int argc, char **argv, const cli_flag *flags, int count, const char *program,
                             const char *about)
{
    cli_program = program;
    system_begin(&argc, &argv);
    cli_path = argv[0];
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i], *value = strchr(argument, '=');
        size_t name = value ? (size_t)(value - argument) : strlen(argument);
        const cli_flag *f = NULL;
        if (strcmp(argument, "-h") == 0 || strcmp(argument, "--help") == 0) cli_help(flags, count, about);
        for (int k = 0; k < count; k++)
            if (strlen(flags[k].name) == name && memcmp(flags[k].name, argument, name) == 0) f = &flags[k];
        if (!f) cli_unknown(flags, count, argument);
        if (f->given) *f->given = true;
        if (value) cli_set(cli_meant(flags, count, f, value + 1), value + 1);
        else if (f->type == CLI_SWITCH) *(bool *)f->to = true;
        else if (i + 1 == argc) die("%s needs a value: %s %s", f->name, f->name, f->value);
        else if (strncmp(argv[i + 1], "--", 2) == 0)
            die("%s needs a value, and '%s' looks like an option; if it is the value, write %s=%s", f->name,
                argv[i + 1], f->name, argv[i + 1]);
        else {
            value = argv[++i];
            cli_set(cli_meant(flags, count, f, value), value);
        }
    }
}

/* -------------------------------------------------------------------------------------------------- files */

static inline char *join(const char *folder, const char *name) /* the caller frees the path */
{
    size_t bytes = strlen(folder) + strlen(name) + 2;
    char *path = (char *)made(NULL, malloc(bytes));
    snprintf(path, bytes, "%s/%s", folder, name);
    return path;
}

/* Returns whether a file or folder exists. Ends the program if that is unknown, because an existing file must
   not count as absent. */
static inline bool exists(const char *path)
{
    file_info found = {false, false, 0};
    if (find_file(path, &found)) return true;
    if (errno != ENOENT && errno != ENOTDIR)
        die("cannot find out whether '%s' exists: %s", path, strerror(errno));
    return false;
}

enum { CLI_NAME = 48 };

/* Returns the next text of an option: the option's value or, if that is "-", a line of standard input, which
   is valid until the next call. Returns NULL after the last text. name: the text's name for errors. */
static inline const char *next_text(const char *option, char name[CLI_NAME])
{
    static char *line;
    static size_t capacity;
    static int count;
    const bool lines = strcmp(option, "-") == 0;
    snprintf(name, CLI_NAME, lines ? "text %d of standard input" : "--predict", ++count);
    if (!lines) return count == 1 ? option : NULL;
    ssize_t n = getline(&line, &capacity, stdin);
    if (n < 0 && ferror(stdin)) die("cannot read standard input: %s", strerror(errno));
    for (ssize_t b = 0; b < n; b++) if (!line[b]) line[b] = ' ';
    while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r')) line[--n] = 0;
    return n < 0 ? NULL : line;
}

/* Returns the path of a file of examples/data: beside this source, or in the program's folder or a folder
   above. The caller frees the path. */
static inline char *sample_data(const char *name)
{
    char own[1024], from[1024], *in_data = join("examples/data", name);
    const char *slash = strrchr(__FILE__, '/');
    snprintf(own, sizeof own, "%.*s/data", slash ? (int)(slash - __FILE__) : 1, slash ? __FILE__ : ".");
    char *beside = join(own, name);
    if (exists(beside)) return free(in_data), beside;
    if (!program_path(own, sizeof own)) snprintf(own, sizeof own, "%s", cli_path);
    snprintf(from, sizeof from, "%s", own);
    for (char *end; (end = strrchr(own, '/')) != NULL;) {
        *end = 0;
        char *path = join(own, in_data);
        if (exists(path)) return free(in_data), free(beside), path;
        free(path);
    }
    die("there is no '%s', and no %s in a folder above '%s': use --data to name the data, and --model "
        "to start from a model", beside, in_data, from);
    return NULL;
}

static inline bool holds(const char *folder, const char *name) /* whether a folder has a file */
{
    char *path = join(folder, name);
    bool there = exists(path);
    free(path);
    return there;
}

/* Checks the folder of a run before training: refuses to overwrite a run or a model, to resume without a
   state, and to save a whole model beside an adapter. */
static inline void check_folder(const char *folder, bool resume, bool whole)
{
    bool state = holds(folder, "state.safetensors");
    if (resume && !state) die("nothing to --resume: '%s/state.safetensors' does not exist", folder);
    if (!resume && state)
        die("'%s' holds a run: continue it (--resume), or name another folder (--out)", folder);
    if (!resume && holds(folder, "model.safetensors"))
        die("'%s' holds a model, which training would replace: name another folder (--out)", folder);
    if (!resume && whole && holds(folder, "adapter_config.json"))
        die("'%s' holds an adapter, which transformers would add to the model that training saves there: "
            "name another folder (--out)", folder);
}

/* --------------------------------------------------------------------------------- training on a terminal */

/* The signal that asked training to stop; 0: no signal did. A second SIGINT or SIGTERM, which a person sends,
   ends the program at once. Other signals repeat without a person: a closed terminal may send SIGHUP twice, a
   pipe without a reader sends SIGPIPE with each line, and the limit of processor time sends SIGXCPU each
   second. Schedulers announce a job's end by SIGUSR1. */
static volatile sig_atomic_t stop_signal;
#ifndef _WIN32
static const int stop_signals[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGXCPU, SIGUSR1};
enum { CLI_OF_PERSONS = 2 };

static inline void ask_to_stop(int number)
{
    bool person = false;
    if (!stop_signal) stop_signal = number;
    for (int k = 0; k < CLI_OF_PERSONS; k++) person = person || number == stop_signals[k];
    for (int k = 0; k < CLI_OF_PERSONS && person; k++) signal(stop_signals[k], SIG_DFL);
}

/* Installs the handlers of signals or, if not `handle`, restores the old handlers. A signal that the parent
   process ignores, as nohup does with SIGHUP, remains ignored. */
static inline void handle_signals(bool handle)
{
    static struct sigaction before[CLI_COUNT(stop_signals)];
    struct sigaction stop;
    memset(&stop, 0, sizeof stop);
    stop.sa_handler = ask_to_stop;
    stop.sa_flags = SA_RESTART;
    for (int k = 0; k < CLI_COUNT(stop_signals); k++) {
        if (handle) sigaction(stop_signals[k], NULL, &before[k]);
        if (k >= CLI_OF_PERSONS && before[k].sa_handler == SIG_IGN) continue;
        sigaction(stop_signals[k], handle ? &stop : &before[k], NULL);
    }
    /* output to the closed pipe then fails without ending the program */
    if (!handle && stop_signal == SIGPIPE) signal(SIGPIPE, SIG_IGN);
}
#else
/* Handles Ctrl-C, Ctrl-Break and the end of the console. Windows calls this function in a thread of its own.
   Returns false at the second event, and Windows then ends the program: a second Ctrl-C ends the program at
   once. */
static inline BOOL WINAPI ask_to_stop(DWORD event)
{
    const bool first = !stop_signal;
    (void)event;
    stop_signal = SIGINT;
    return first;
}

static inline void handle_signals(bool handle) { SetConsoleCtrlHandler(ask_to_stop, handle); }
#endif

/* Prints progress, as a tt_fit_options.report: on a terminal one line that changes, else a line every ten
   seconds. */
static inline void show_progress(void *user, const tt_fit_event *e)
{
    static double shown;
    struct timespec t;
    char line[256];
    bool terminal = isatty(STDOUT_FILENO) != 0, last = e->step == e->steps || e->validation,
         rewrite = terminal && !e->validation;
    (void)user;
    clock_gettime(CLOCK_MONOTONIC, &t);
    double now = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    if (!last && now - shown < (terminal ? 0.1 : 10)) return;
    shown = now;
    tt_fit_text(e, line, terminal && cli_width() < (int)sizeof line ? (size_t)cli_width() : sizeof line);
    printf("%s%s%s%s", rewrite ? "\r" : "", line, rewrite ? "\033[K" : "", rewrite && !last ? "" : "\n");
    fflush(stdout);
}

/* Prints how tt_fit ended. Returns the program's exit status; after a signal, 128 + its number, as in
   shells. */
static inline int end_of_training(tt_context *ctx, const tt_trainer *t, tt_status status, bool finished)
{
    long long saved = (long long)tt_trainer_saved_steps(t);
    FILE *to = stop_signal == SIGPIPE ? stderr : stdout;
    fflush(stdout);
    if (status != TT_OK) fprintf(stderr, "\n%s: %s\n", cli_program, tt_error(ctx));
    if (!finished && status != TT_ERR_ARGUMENT && (status == TT_OK || tt_trainer_steps(t))) {
        fprintf(to, "\nstopped after step %lld", (long long)tt_trainer_steps(t));
        if (stop_signal == SIGPIPE) fprintf(to, ", because nobody reads standard output any more");
        if (stop_signal == SIGXCPU) fprintf(to, ", at the limit of processor time");
        if (status == TT_ERR_NUMERIC) fprintf(to, "\n"); /* the error message says what helps */
        else if (saved == tt_trainer_steps(t)) fprintf(to, "; --resume continues from there\n");
        else if (saved >= 0)
            fprintf(to, "; --resume continues from step %lld, the last that was saved\n", saved);
        else fprintf(to, "; no state was saved to resume from\n");
    }
    if (finished && stop_signal) fprintf(to, "all epochs are done; --resume continues with the test\n");
    return status != TT_OK ? 1 : stop_signal ? 128 + stop_signal : 0;
}

/* Prints the memory plan. Draws the plan as plan.svg in a folder, unless `folder` is NULL. */
static inline void show_plan(const tt_program *p, const char *folder)
{
    static char text[1 << 16];
    tt_plan_text(p, text, sizeof text);
    fputs(text, stdout);
    if (beside_the_plan)
        printf("  --budget also counts %.1f MB that are in use beside the plan\n",
               1e-6 * (double)beside_the_plan);
    if (!folder) return;
    char *path = join(folder, "plan.svg");
    FILE *f = make_folder(folder) ? open_file(path, "wb") : NULL;
    if (!f || tt_plan_svg(p, text, sizeof text) == 0 || fputs(text, f) < 0 || fclose(f) != 0)
        die("cannot write '%s': %s", path, strerror(errno));
    printf("drawn: %s\n", path);
    free(path);
}

/* ------------------------------------------------------------------------------------ models and trainers */

static inline tt_context *open_context(int seed, int threads, double timeout)
{
    tt_context_options o = tt_context_options_default();
    o.seed = (uint64_t)seed;
    o.threads = threads;
    o.timeout = timeout;
    o.wording = as_flags;
    tt_context *ctx = tt_open(&o);
    if (!ctx) exit(1); /* the logger has reported the error */
    char host[64] = "";
#ifndef _WIN32 /* several processes need MPI */
    gethostname(host, sizeof host - 1);
#endif
    if (tt_processes(ctx) > 1)
        snprintf(cli_process, sizeof cli_process, ", process %d (%s)", tt_process(ctx), host);
    if (tt_process(ctx) > 0 && !freopen(NO_OUTPUT, "w", stdout)) exit(1); /* only process 0 prints */
    return ctx;
}

/* Returns the number of a word among those that an option of the library accepts, or -1. */
static inline int word_number(const char *option, const char *word)
{
    int k = 0;
    while (tt_option_word(option, k) && strcmp(tt_option_word(option, k), word) != 0) k++;
    return tt_option_word(option, k) ? k : -1;
}

/* The options of every program that trains. */
typedef struct cli_training {
    const char *optimizer, *schedule, *precision, *matmul, *recompute, *offload, *update, *device, *freeze;
    const char *zero, *memory, *tune, *out, *lr_rules, *state_bits, *prune_steps, *prune_by;
    const char *data, *model; /* each program has its own flags for data, model, batch, epochs and lr */
    const char *best_by, *class_weights, *predict; /* of programs that train classifiers; or NULL */
    int validate_every, patience, keep_states;
    int seed, threads, batch, accumulate, epochs, train, test; /* train, test: of classifiers only */
    double timeout, lr, warmup, decay, layer_decay, ema, cooldown, clip, dropout, label_smoothing, prune;
    double temperature;        /* of the contrastive loss */
    double beta;               /* of the loss of pairs of answers; 0: the trainer's default */
    const char *negatives;     /* "micro" or "step"; NULL: the program trains no embeddings */
    const char *teacher;       /* folder of a classifier's teacher, or NULL */
    double teacher_weight, teacher_temperature, hidden_weight;
    bool given_weight, given_heat; /* the command line has --teacher-weight, --teacher-temperature */
    bool beside;               /* the teacher runs in each step, and not once before training */
    const tt_model *teacher_model; /* the loaded teacher, or NULL */
    tt_teacher *logits;        /* the teacher's logits if the teacher runs once, or NULL */
    int layers;                /* layers to keep of a classifier; 0: all */
    int rank;                  /* largest rank of the layers' weights; 0: any */
    double prune_heads, prune_neurons; /* shares to remove from each layer, below 1 */
    bool whole_words;          /* tt_loader_options.whole_words */
    int step_seqs;             /* tt_train_options.step_seqs */
    size_t budget;
    bool plan, resume, measure, features_once, gpu; /* gpu: `device` begins with "cuda" */
    bool largest, finished; /* largest: --batch max; finished: all epochs are done */
    tt_parallel parallel; /* how the ranks of `device` share the work */
    tt_costs costs;       /* with `measure`, the measured costs of `device` */
    float *weights;       /* weights for class_weights "balanced"; else NULL */
} cli_training;

/* Initial values of a cli_training, and the flags that set its fields. */
#define CLI_TRAINING_DEFAULT \
    .out = "run", .optimizer = "adamw", .state_bits = "32", .precision = "32-true", .matmul = "fp32", \
    .update = "end", .memory = "device", .tune = "off", .prune_by = "magnitude", .seed = 1, \
    .timeout = 600, .accumulate = 1, \
    .warmup = 0.1, .decay = 0.01, .layer_decay = 1, .cooldown = 0.2, .clip = 1, .dropout = -1, \
    .parallel = {0, 1, 1, false, false, 0, false, 1, "1f1b", 0}
#define CLI_TRAINING_FLAGS(run) \
    {"--accumulate", "N", CLI_INTEGER, &(run).accumulate, \
     .help = "micro-batches in a step, for each of --groups; a step of long texts may be divided into more", \
     .min = 1, .max = 65536}, \
    {"--warmup", "X", CLI_NUMBER, &(run).warmup, \
     .help = "share of the steps in which the learning rate rises, before --schedule", .max = 1}, \
    {"--schedule", "NAME", CLI_CHOICE, &(run).schedule, \
     .help = "how the learning rate changes after the warm-up", .words_of = "schedule"}, \
    {"--cooldown", "X", CLI_NUMBER, &(run).cooldown, \
     .help = "with --schedule wsd and wsd-sqrt: share of the steps, at the end of the run, in which the " \
     "learning rate falls", .max = 1}, \
    {"--optimizer", "NAME", CLI_CHOICE, &(run).optimizer, .help = "the optimizer", \
     .words_of = "optimizer"}, \
    {"--state-bits", "N", CLI_CHOICE, &(run).state_bits, .help = "bits of each number of the optimizer's " \
     "state; budget: as few as --budget needs", .choices = "32 16 8 budget"}, \
    {"--prune", "X", CLI_NUMBER, &(run).prune, .help = "share, below 1, of the weights of each matrix of " \
     "the layers that become 0 during training (0: none)", .max = 1}, \
    {"--prune-by", "NAME", CLI_CHOICE, &(run).prune_by, .help = "with --prune: magnitude prunes the " \
     "smallest weights, movement those that training moves towards 0", .choices = "magnitude movement"}, \
    {"--prune-steps", "A,B", CLI_TEXT, &(run).prune_steps, .help = "with --prune: the share rises from " \
     "step A to step B", .min = 1, .max = 40}, \
    {"--decay", "X", CLI_NUMBER, &(run).decay, \
     .help = "weight decay of all parameters but biases, norms and class tokens", .max = 1e9}, \
    {"--layer-decay", "X", CLI_NUMBER, &(run).layer_decay, .help = "factor on the learning rate from each " \
     "layer to the layer before, down to the embeddings; 0.65 to 0.95 is usual in fine-tuning", \
     .min = 0.01, .max = 1}, \
    {"--lr-rules", "LIST", CLI_TEXT, &(run).lr_rules, .help = "PATTERN=FACTOR,PATTERN=FACTOR: factors on " \
     "the learning rate of parameters whose names match; the first pattern that matches counts", .min = 1}, \
    {"--ema", "X", CLI_NUMBER, &(run).ema, .help = "decay, below 1, of moving averages of the weights, " \
     "which are then validated and saved; 0.999 is usual (0: no averages)", .max = 1}, \
    {"--clip", "X", CLI_NUMBER, &(run).clip, \
     .help = "gradients of a larger norm are scaled down to this norm (0: never)", .max = 1e9}, \
    {"--dropout", "X", CLI_NUMBER, &(run).dropout, \
     .help = "dropout everywhere, below 1 (-1: as the model's config says)", .min = -1, .max = 1}, \
    {"--label-smoothing", "X", CLI_NUMBER, &(run).label_smoothing, \
     .help = "share of each target, below 1, that is spread over all classes or tokens in training", \
     .max = 1}, \
    {"--freeze", "LIST", CLI_TEXT, &(run).freeze, \
     .help = "parameters to freeze: patterns of names with *, ? and [0-3], separated by commas; encoder: " \
     "all of a classifier but its last layers (classifier, pre_classifier, pooler)"}, \
    {"--precision", "P", CLI_CHOICE, &(run).precision, .help = "precision of weights and activations", \
     .words_of = "precision"}, \
    {"--matmul", "M", CLI_CHOICE, &(run).matmul, \
     .help = "how matrices are multiplied; on a GPU, tf32 multiplies fp32 matrices with 10 bits of " \
     "mantissa, and fp8 multiplies 16-bit matrices as 8-bit floats", .words_of = "matmul"}, \
    {"--recompute", "R", CLI_CHOICE, &(run).recompute, \
     .help = "what the backward recomputes to save memory (cheap; with --budget, budget):", \
     .words_of = "recompute"}, \
    {"--offload", "LIST", CLI_TEXT, &(run).offload, \
     .help = "what is kept in the host's memory while it is not used: a list of optimizer, gradients, " \
     "parameters and activations, separated by commas; none; or budget, as much as --budget needs (none; " \
     "on a GPU with --budget, budget)", .max = 100}, \
    {"--update", "U", CLI_CHOICE, &(run).update, .help = "when parameters are updated: at a step's end; " \
     "with --clip 0, in the backward, which saves memory; or at the end by the host's processor in its " \
     "memory, where the optimizer state stays", .words_of = "update"}, \
    {"--budget", "BYTES", CLI_BYTES, &(run).budget, \
     .help = "memory that training may use on each rank, such as 3GB or 500MiB. Recomputation, offload (on " \
     "a GPU) and sharding over ranks are chosen to fit, unless --recompute, --offload or --zero say " \
     "otherwise; a run that cannot fit is refused (no limit)"}, \
    {"--memory", "M", CLI_CHOICE, &(run).memory, \
     .help = "on a GPU: its own memory, or CUDA's unified memory, which only managed-oversubscribed lets " \
     "exceed the GPU's free memory", .words_of = "memory"}, \
    {"--tune", "T", CLI_TEXT, &(run).tune, \
     .help = "on a GPU: off, so that two runs give equal bits; on, to find the fastest matrix products " \
     "before the first step, in about a second, and keep them with the state in --out; or a file that " \
     "keeps them for other runs too", .min = 1, .max = 1000}, \
    {"--device", "KIND", CLI_TEXT, &(run).device, \
     .help = "cpu or cuda, or several ranks: cpu*4, cuda*8, cuda:0,2; --plan works without the device " \
     "(TINYTRAIN_DEVICE, else cpu)", .min = 1, .max = 1000}, \
    {"--data-ranks", "N", CLI_INTEGER, &(run).parallel.data, \
     .help = "ranks that divide a step's micro-batches (0: as many as --device leaves)", .max = 64}, \
    {"--tensor", "N", CLI_INTEGER, &(run).parallel.tensor, .help = "tensor ranks, which divide each layer", \
     .min = 1, .max = 64}, \
    {"--sequence", "", CLI_SWITCH, &(run).parallel.sequence, \
     .help = "with --tensor: tensor ranks divide the rows between the layers, too"}, \
    {"--pipeline", "N", CLI_INTEGER, &(run).parallel.pipeline, \
     .help = "pipeline stages: consecutive layers, each stage on ranks of its own", .min = 1, .max = 64}, \
    {"--stages", "NAME", CLI_CHOICE, &(run).parallel.schedule, \
     .help = "order of micro-batches in the pipeline; gpipe needs --micros and more memory", \
     .words_of = "parallel.schedule", .also = "--schedule"}, \
    {"--micros", "N", CLI_INTEGER, &(run).parallel.micros, .help = "with --pipeline: max micro-batches of " \
     "a step on a data rank, for which memory is reserved (0: any)", .max = 65536}, \
    {"--zero", "N", CLI_CHOICE, &(run).zero, \
     .help = "what --data-ranks shard: 0 nothing, 1 the optimizer state, 2 gradients too, 3 parameters " \
     "too; budget: as much as --budget needs (1; with --budget, budget):", .choices = "0 1 2 3 budget"}, \
    {"--server", "", CLI_SWITCH, &(run).parallel.server, \
     .help = "only rank 0 keeps the optimizer state and computes the updates"}, \
    {"--groups", "N", CLI_INTEGER, &(run).parallel.groups, \
     .help = "partial sums of a step's gradients; with an equal number, any --data-ranks give equal bits " \
     "(0: as many as --data-ranks)", .max = 64}, \
    {"--reduce-micros", "", CLI_SWITCH, &(run).parallel.reduce_micros, \
     .help = "sum gradients after each micro-batch, for the bits of --zero 2 and 3"}, \
    {"--timeout", "SECONDS", CLI_NUMBER, &(run).timeout, \
     .help = "time that a rank waits for another rank before all fail", .min = 0.1, .max = 1e6}, \
    {"--seed", "N", CLI_INTEGER, &(run).seed, .help = "seed of all random numbers", .max = 1e9}, \
    {"--measure", "", CLI_SWITCH, &(run).measure, \
     .help = "measure the device's speed first, in about a second: options with the value budget use it, " \
     "and the plan says how long a step takes"}, \
    {"--threads", "N", CLI_INTEGER, &(run).threads, .help = "threads (0: all cores)", .max = 256}, \
    {"--validate-every", "N", CLI_INTEGER, &(run).validate_every, \
     .help = "validate and save after each N steps as well (0: at the end of an epoch)", .max = 1e9}, \
    {"--patience", "N", CLI_INTEGER, &(run).patience, \
     .help = "end after N validations in a row that are no better (0: never)", .max = 1e9}, \
    {"--keep-states", "N", CLI_INTEGER, &(run).keep_states, \
     .help = "keep the states of the last N validations in --out, as state-STEP.safetensors; a run resumes " \
     "from one that is copied to state.safetensors (0: only the newest state)", .max = 1e9}, \
    {"--out", "DIR", CLI_TEXT, &(run).out, \
     .help = "new folder for the trained model, state, metrics.csv and loss.svg", .min = 1, .max = 1000}, \
    {"--plan", "", CLI_SWITCH, &(run).plan, \
     .help = "print how much memory training will need, draw it as plan.svg in --out, and exit"}, \
    {"--resume", "", CLI_SWITCH, &(run).resume, .help = "continue from the state in --out"}

/* The flags of programs that prune a model or replace its weights by factors before training. */
#define CLI_PRUNE_FLAGS(run) \
    {"--prune-heads", "X", CLI_NUMBER, &(run).prune_heads, .help = "remove this share, below 1, of the " \
     "attention heads of each layer before training: those on which the loss depends least", .max = 1}, \
    {"--prune-neurons", "X", CLI_NUMBER, &(run).prune_neurons, \
     .help = "remove this share, below 1, of the neurons of each layer's MLP before training", .max = 1}, \
    {"--rank", "N", CLI_INTEGER, &(run).rank, .help = "train two factors of rank N in place of each weight " \
     "of the layers for which they are smaller; their product is saved (0: whole weights)", .max = 1e6}

/* Checks the options. Sets options that the command line lacks and whose default depends on --budget. */
static inline void check_training(cli_training *run)
{
    const char *device = run->device ? run->device : getenv("TINYTRAIN_DEVICE");
    const bool apart = strcmp(run->memory, "device") == 0;
    const bool divides = run->parallel.pipeline == 1 && !run->parallel.server;
    if (!run->recompute) run->recompute = run->budget ? "budget" : "cheap";
    run->gpu = device && strncmp(device, "cuda", 4) == 0;
    run->largest = run->batch == CLI_WORD;
    if (!run->largest && run->accumulate > run->batch)
        die("--accumulate is %d, but must be at most --batch, %d", run->accumulate, run->batch);
    if (!run->offload && run->budget && run->gpu && apart) run->offload = "budget";
    if (!run->zero) run->zero = run->budget && divides ? "budget" : "1";
    if (run->dropout != -1 && !(run->dropout >= 0 && run->dropout < 1))
        die("--dropout is %g, but must be 0 or more and below 1, or -1", run->dropout);
    if (run->prune == 1) die("--prune is 1, but must be 0 or more and below 1");
    if (run->prune_heads == 1) die("--prune-heads is 1, but must be 0 or more and below 1");
    if (run->prune_neurons == 1) die("--prune-neurons is 1, but must be 0 or more and below 1");
    if ((run->prune > 0) != (run->prune_steps != NULL))
        die("--prune and --prune-steps belong together: set both, or leave both out");
    if (run->ema == 1) die("--ema is 1, but must be 0 or more and below 1");
    if (run->label_smoothing == 1) die("--label-smoothing is 1, but must be 0 or more and below 1");
}

/* Returns the rules of --lr-rules, or NULL if the option is not set. The first call reads the rules. */
static inline const tt_lr_rule *lr_rules_of(const cli_training *run)
{
    static tt_lr_rule rules[33];
    const char *name;
    double factor;
    int count = 0;
    for (const char *list = run->lr_rules; list && *list && !(count == 0 && rules[0].pattern); count++) {
        const int n = cli_pair("--lr-rules must be", &list, &name, &factor);
        char *pattern = (char *)made(NULL, calloc((size_t)n + 1, 1));
        if (count == CLI_COUNT(rules) - 1) die("--lr-rules has more than %d patterns: use fewer", count);
        memcpy(pattern, name, (size_t)n);
        rules[count].pattern = pattern;
        rules[count].scale = (float)factor;
    }
    return run->lr_rules ? rules : NULL;
}

/* Reads --prune-steps A,B. In a short schedule, weights are chosen at least 20 times. */
static inline void prune_steps_of(const char *text, tt_optimizer_options *o)
{
    char *end = NULL;
    o->prune_begin = strtoll(text, &end, 10);
    o->prune_end = *end == ',' ? strtoll(end + 1, &end, 10) : -1;
    if (*end || o->prune_begin < 0 || o->prune_begin >= o->prune_end)
        die("--prune-steps must be two steps A,B with 0 <= A < B, such as 100,800, but is '%s'", text);
    const int64_t every = (o->prune_end - o->prune_begin) / 20;
    if (every < o->prune_every) o->prune_every = every > 0 ? (int)every : 1;
}

static inline tt_compile_options compile_options(const cli_training *run)
{
    tt_compile_options o = tt_compile_options_default();
    o.optimizer.kind = (tt_optimizer_kind)word_number("optimizer", run->optimizer);
    const bool fits = strcmp(run->state_bits, "budget") == 0;
    o.optimizer.state_bits = fits ? TT_STATE_BITS_BUDGET : atoi(run->state_bits);
    o.optimizer.prune = (float)run->prune;
    o.optimizer.prune_by_movement = strcmp(run->prune_by, "movement") == 0;
    if (run->prune_steps) prune_steps_of(run->prune_steps, &o.optimizer);
    o.optimizer.nesterov = o.optimizer.kind == TT_MUON;
    o.optimizer.momentum = o.optimizer.nesterov ? 0.95f : 0;
    o.optimizer.weight_decay = (float)run->decay;
    o.optimizer.lr_rules = lr_rules_of(run);
    o.optimizer.layer_decay = (float)run->layer_decay;
    o.optimizer.ema_decay = (float)run->ema;
    o.optimizer.clip_norm = (float)run->clip;
    o.precision = run->precision;
    o.matmul = run->matmul;
    o.recompute = run->recompute;
    o.offload = run->offload;
    o.update = run->update;
    o.device = run->device;
    o.parallel = run->parallel;
    o.memory_budget = run->budget;
    o.memory = run->memory;
    o.tune = run->tune;
    return o;
}

/* Opens a context for training. If fields of run->parallel are 0, sets them according to the device. Ends the
   program if options contradict each other. */
static inline tt_context *open_training(cli_training *run)
{
    tt_context *ctx = open_context(run->seed, run->threads, run->timeout);
    run->parallel.zero = strcmp(run->zero, "budget") == 0 ? TT_ZERO_BUDGET : atoi(run->zero);
    tt_compile_options o = compile_options(run);
    must(ctx, tt_check_options(ctx, &o));
    run->parallel = o.parallel;
    if (run->measure && tt_processes(ctx) > 1)
        die("--measure is for one process, because each of several would measure and choose differently: "
            "leave it out");
    if (run->measure) must(ctx, tt_measure_costs(ctx, run->device, &run->costs));
    return ctx;
}

/* Checks the folder --out before training, and calls open_training. whole: the program will save a whole
   model in --out, not an adapter. */
static inline tt_context *begin_training(cli_training *run, bool whole)
{
    if (!run->plan) check_folder(run->out, run->resume, whole);
    return open_training(run);
}

enum { BESIDE_LATER = 2 << 20 }; /* bytes beside the plan that training still allocates */

/* Returns the options of a trainer. total_steps 0: the trainer only evaluates and predicts. */
static inline tt_train_options training_options(const cli_training *run, int64_t total_steps)
{
    tt_train_options o = tt_train_options_default();
    o.compile = compile_options(run);
    o.compile.train = total_steps > 0;
    o.schedule.kind = (tt_schedule_kind)word_number("schedule", run->schedule);
    o.schedule.lr = (float)run->lr;
    o.schedule.total_steps = total_steps;
    o.schedule.warmup_steps = (int64_t)(run->warmup * (double)total_steps);
    o.schedule.decay_steps = (int64_t)fmax(1, run->cooldown * (double)total_steps);
    /* Shortens a decay that would begin before the warm-up ends. */
    if (o.schedule.decay_steps > total_steps - o.schedule.warmup_steps)
        o.schedule.decay_steps = total_steps - o.schedule.warmup_steps;
    if (run->budget && !run->gpu) {
        const int ranks = run->parallel.data * run->parallel.tensor * run->parallel.pipeline;
        if (!beside_the_plan) /* measures once, so that all plans use one number */
            beside_the_plan = (resident_bytes() + BESIDE_LATER) / (size_t)(ranks > 0 ? ranks : 1);
        if (run->budget <= beside_the_plan)
            die("--budget is %zu bytes, but %.1f MB are in use beside a plan: raise it", run->budget,
                1e-6 * (double)beside_the_plan);
        o.compile.memory_budget = run->budget - beside_the_plan;
    }
    o.label_smoothing = (float)run->label_smoothing;
    if (o.compile.train) o.class_weights = run->weights;
    o.features_once = run->features_once;
    if (run->negatives) o.temperature = (float)run->temperature;
    if (run->beta > 0) o.beta = (float)run->beta;
    if (o.compile.train) o.step_seqs = run->step_seqs;
    if (run->measure) o.compile.costs = &run->costs;
    if (!run->teacher || !o.compile.train) return o;
    o.teacher = run->logits;
    o.teacher_model = run->logits ? NULL : run->teacher_model;
    o.teacher_weight = (float)run->teacher_weight;
    o.teacher_temperature = (float)run->teacher_temperature;
    o.hidden_weight = (float)run->hidden_weight;
    return o;
}

/* Sets the number of micro-batches of a step on a data rank; options that say "budget" are chosen for this
   number. In a pipeline, --micros sets the number instead. accumulate: micro-batches of each group. */
static inline void expect_micros(tt_train_options *o, int accumulate)
{
    const int micros = accumulate * o->compile.parallel.groups;
    if (o->compile.accumulate && o->compile.parallel.pipeline == 1)
        o->compile.parallel.micros = (micros + o->compile.parallel.data - 1) / o->compile.parallel.data;
}

/* Makes a trainer whose micro-batches can hold those of two sources. other may be NULL. train NULL: a
   micro-batch holds one example. epochs 0: the trainer only evaluates and predicts. Returns NULL on error. */
static inline tt_trainer *try_trainer(tt_context *ctx, const cli_training *run, const tt_model *model,
                                      const tt_source *train, const tt_source *other, int epochs)
{
    tt_train_options o = training_options(run, train ? train->steps * epochs : 0);
    o.max_seqs = 1;
    if (!model->same_length) o.max_tokens = train ? 1 : model->max_length;
    tt_train_options_make_room(&o, train, other);
    expect_micros(&o, run->accumulate);
    return tt_trainer_new(ctx, model, &o);
}

/* Makes a trainer as try_trainer does, but ends the program after an error. */
static inline tt_trainer *make_trainer(tt_context *ctx, const cli_training *run, const tt_model *model,
                                       const tt_source *train, const tt_source *other, int epochs)
{
    return (tt_trainer *)made(ctx, try_trainer(ctx, run, model, train, other, epochs));
}

/* Trains, saves, and shows progress; with --plan, only shows the plan. Returns the program's exit status.
   keep(user) saves the model. */
static inline int fit(tt_context *ctx, tt_trainer *t, const tt_source *train, const tt_source *validation,
                      cli_training *run, tt_status (*keep)(void *), void *user)
{
    tt_fit_options o = tt_fit_options_default();
    o.epochs = run->epochs;
    o.folder = run->out;
    o.resume = run->resume;
    o.stop = &stop_signal;
    o.best_by = run->best_by;
    o.validate_steps = run->validate_every;
    o.patience = run->patience;
    o.keep_states = run->keep_states;
    o.keep = keep;
    o.report = show_progress;
    o.user = user;
    show_plan(tt_trainer_program(t), run->plan ? run->out : NULL);
    if (run->features_once)
        printf("  --features-once computes %.1f MB of features before the first epoch, and keeps them in the "
               "host's memory, beside the plan\n",
               1e-6 * (double)(tt_trainer_feature_bytes(t, train) +
                               (validation ? tt_trainer_feature_bytes(t, validation) : 0)));
    if (run->plan) return 0;
    size_t model;
    const size_t state = tt_trainer_state_bytes(t, &model);
    const double disk = free_disk(exists(run->out) ? run->out : ".");
    printf("%d epoch%s of %lld steps; for '%s' two states of %.1f MB and a model of %.1f MB", run->epochs,
           run->epochs == 1 ? "" : "s", (long long)train->steps, run->out, 1e-6 * (double)state,
           1e-6 * (double)model);
    if (disk > 0) printf(", where the disk has %.1f GB", 1e-9 * disk);
    printf("\n");
    fflush(stdout);
    handle_signals(true);
    tt_status status = tt_fit(t, train, validation, &o, &run->finished);
    handle_signals(false);
    const int result = end_of_training(ctx, t, status, run->finished);
    tt_stats last;
    if (tt_trainer_wait(t, &last) == TT_OK && last.skipped && strncmp(run->precision, "16", 2) != 0)
        printf("note: %lld steps were skipped; '%s/metrics.csv' says which\n", (long long)last.skipped,
               run->out);
    if (run->finished && tt_trainer_steps(t) < 100)
        printf("note: %lld steps are few, so probabilities may still be close to chance: train for more "
               "--epochs, or with a higher --lr\n", (long long)tt_trainer_steps(t));
    if (status == TT_ERR_STATE && run->resume)
        fprintf(stderr, "%s: --resume continues the model that '%s' started with: give the same --model and "
                "the same options that shape or adapt it\n", cli_program, run->out);
    return result;
}

/* Freezes the parameters that a comma-separated list of patterns matches, or, for "encoder", all of a
   classifier but its head. */
static inline void freeze(tt_context *ctx, const char *list)
{
    char pattern[256];
    if (list && strcmp(list, "encoder") == 0) {
        int n = tt_param_freeze(ctx, "*", true);
        const int head = tt_param_freeze(ctx, "*classifier*", false);
        if (!head)
            die("--freeze encoder is for models with a classifier, but this model has none: give patterns of "
                "parameters' names instead");
        n -= head + tt_param_freeze(ctx, "*pooler*", false);
        printf("frozen: the encoder (%d parameters)\n", n);
        return;
    }
    while (list && *list) {
        int length = (int)strcspn(list, ",");
        snprintf(pattern, sizeof pattern, "%.*s", length, list);
        int n = length ? tt_param_freeze(ctx, pattern, true) : 0;
        if (length && !n)
            die("--freeze has the pattern '%s', but no parameter of the model has such a name: correct it",
                pattern);
        if (n) printf("frozen: %s (%d parameters)\n", pattern, n);
        list += length + (list[length] == ',');
    }
}

/* ------------------------------------------------------------------------------- pruning and low rank */

enum { PRUNE_STEPS = 64 }; /* steps from which the importance of heads and neurons is measured */

/* Returns how many heads and neurons remain of --prune-heads and --prune-neurons: at least one of each. */
static inline tt_prune_options prune_options(const cli_training *run, int heads, int neurons)
{
    tt_prune_options o = tt_prune_options_default();
    o.heads = heads - (int)(run->prune_heads * heads);
    o.neurons = neurons - (int)(run->prune_neurons * neurons);
    if (o.heads < 1) o.heads = 1;
    if (o.neurons < 1) o.neurons = 1;
    printf("pruning: %d of %d heads and %d of %d neurons of each layer remain\n", o.heads, heads,
           o.neurons, neurons);
    return o;
}

/* Replaces the weights of the model's layers by factors of --rank. */
static inline void factor(tt_context *ctx, const cli_training *run)
{
    int weights = 0, factors = 0;
    for (int k = 0, n = tt_param_count(ctx); k < n && run->rank; k++) {
        tt_param *p = tt_param_at(ctx, k);
        const char *name = tt_param_name(p), *end = strrchr(name, '.');
        /* GPT-2 and Falcon call their layers h.0, h.1 and so on */
        const bool named = strstr(name, "layer") || strncmp(name, "h.", 2) == 0 || strstr(name, ".h.");
        const bool of_layer = named && strncmp(name, "teacher.", 8) != 0;
        if (!of_layer || tt_param_ndim(p) != 2 || !end || strcmp(end, ".weight") != 0) continue;
        must(ctx, tt_param_low_rank(p, run->rank, 0));
        weights++, factors += tt_param_rank(p) > 0;
    }
    if (run->rank) printf("rank %d: %d of %d weights have factors\n", run->rank, factors, weights);
}

#endif
