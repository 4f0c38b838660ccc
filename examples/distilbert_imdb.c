/* Trains DistilBERT, BERT or MiniLM to tell good film reviews from bad ones.

       make demo                                       a small DistilBERT from scratch, on examples/data/reviews.tsv
       build/distilbert_imdb --data aclImdb --model distilbert-base-uncased/       the real thing
       build/distilbert_imdb --out build/demo --predict "a film to remember"       classify with what was trained */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"

#include <signal.h>
#include <strings.h>

/* --------------------------------------------------------------------------------------------------- options */
static struct {
    const char *data, *model, *precision, *matmul, *device, *out, *predict;
    char *freeze;
    int64_t train, test, epochs, batch, accumulate, max_tokens, seed, threads;
    double lr, warmup, dropout;
    bool plan, resume, help;
} opt = {"examples/data/reviews.tsv", NULL, "32-true", "fp32", NULL, "run", NULL, NULL, 0, 0, 0, 16, 1, 0, 1, 0, 0, 0.1, -1, false, false, false};

typedef struct flag { const char *name, *what; char type; void *to; const char *help; } flag; /* type: s, i, f, b */
static const flag flags[] = {
    {"--data", "PATH", 's', &opt.data, "aclImdb folder, or a .tsv/.csv with columns text, label and maybe split (examples/data/reviews.tsv)"},
    {"--model", "DIR", 's', &opt.model, "Hugging Face folder to start from: config.json, model.safetensors, vocab.txt (none: from scratch)"},
    {"--train", "N", 'i', &opt.train, "reviews to train on (0: all but those for validation)"},
    {"--test", "N", 'i', &opt.test, "reviews to test on (0: all)"},
    {"--epochs", "N", 'i', &opt.epochs, "passes over the training reviews (0: 2 with --model, else 6)"},
    {"--lr", "X", 'f', &opt.lr, "peak learning rate (0: 5e-5 with --model, else 5e-4)"},
    {"--warmup", "X", 'f', &opt.warmup, "share of the steps in which the learning rate rises, before it falls linearly (0.1)"},
    {"--batch", "N", 'i', &opt.batch, "reviews in a step (16)"},
    {"--accumulate", "N", 'i', &opt.accumulate, "micro-batches in a step, at least (1)"},
    {"--max-tokens", "N", 'i', &opt.max_tokens, "tokens in a micro-batch; it is filled up to this (0: 8192 with --model, else 2048)"},
    {"--precision", "P", 's', &opt.precision, "32-true, 16-mixed, 16-true, bf16-mixed or bf16-true (32-true)"},
    {"--matmul", "M", 's', &opt.matmul, "fp32; on a GPU also tf32, fp32 matrices rounded to 11 bits, and fp8, 16-bit matrices rounded to 4 or 3 (fp32)"},
    {"--device", "KIND", 's', &opt.device, "cpu or cuda; --plan is for either (TINYTRAIN_DEVICE, else cpu)"},
    {"--dropout", "X", 'f', &opt.dropout, "dropout everywhere, in [0, 1) (-1: as the model's config says)"},
    {"--freeze", "LIST", 's', &opt.freeze, "parameters to keep as they are: name patterns separated by commas, * and ? (none)"},
    {"--seed", "N", 'i', &opt.seed, "of initialisation, shuffling and dropout (1)"},
    {"--threads", "N", 'i', &opt.threads, "threads (0: all cores)"},
    {"--out", "DIR", 's', &opt.out, "new folder for the trained model, state, metrics.csv and loss.svg (run)"},
    {"--plan", "", 'b', &opt.plan, "say how much memory training will need, draw it as plan.svg in --out, and end"},
    {"--resume", "", 'b', &opt.resume, "go on from the state in --out"},
    {"--predict", "TEXT", 's', &opt.predict, "classify TEXT, or with - each line of standard input, with the model in --out"},
    {"--help", "", 'b', &opt.help, "this list"},
};
enum { FLAGS = sizeof flags / sizeof flags[0] };

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fflush(stdout), fputs("distilbert_imdb: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    exit(1);
}

/* What a call of the library made, or the end of the program with its error. */
static void *made(tt_context *ctx, void *p)
{
    if (!p) die("%s", ctx ? tt_error(ctx) : "no memory");
    return p;
}

static void must(tt_context *ctx, tt_status status) { if (status != TT_OK) die("%s", tt_error(ctx)); }

static void parse_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const flag *f = NULL;
        char *end = NULL;
        for (int k = 0; k < FLAGS; k++) if (strcmp(argv[i], flags[k].name) == 0) f = &flags[k];
        if (!f) die("unknown option '%s'; --help lists them", argv[i]);
        if (f->type == 'b') { *(bool *)f->to = true; continue; }
        if (++i == argc) die("%s needs a value: %s", f->name, f->what);
        errno = 0;
        if (f->type == 's') *(char **)f->to = argv[i];
        if (f->type == 'i') *(int64_t *)f->to = strtoll(argv[i], &end, 10);
        if (f->type == 'f') *(double *)f->to = strtod(argv[i], &end);
        if (f->type != 's' && (end == argv[i] || *end || errno)) die("%s takes a number, not '%s'", f->name, argv[i]);
        if (f->type == 'i' && (*(int64_t *)f->to < 0 || *(int64_t *)f->to > 1000000000)) die("%s %s is out of range", f->name, argv[i]);
    }
    if (!opt.help) return;
    printf("usage: distilbert_imdb [options]\n\n");
    for (int k = 0; k < FLAGS; k++) printf("  %-13s %-5s %s\n", flags[k].name, flags[k].what, flags[k].help);
    exit(fflush(stdout) != 0);
}

/* ------------------------------------------------------------------------------------------------------ data */
static bool ends_with(const char *path, const char *end) { return strlen(path) >= strlen(end) && strcasecmp(path + strlen(path) - strlen(end), end) == 0; }
static bool is_table(const char *path) { return ends_with(path, ".tsv") || ends_with(path, ".csv"); }

/* "train" (n of them, and a tenth more for validation) or "test" (n); n 0: all. m: the model whose classes they have, or NULL. */
static tt_dataset *read_reviews(tt_context *ctx, const char *split, int64_t n, const tt_bert *m)
{
    const char **classes = (const char **)made(NULL, calloc(m ? (size_t)m->config.classes : 1, sizeof *classes));
    if (strcmp(split, "train") == 0 && n) n += (n + 9) / 10;
    for (int c = 0; m && c < m->config.classes; c++) classes[c] = m->class_names[c];
    tt_dataset *d = (tt_dataset *)made(ctx, is_table(opt.data) ? tt_dataset_table(ctx, opt.data, split, m ? classes : NULL, m ? m->config.classes : 0) : tt_dataset_imdb(ctx, opt.data, split, n + n % 2));
    free((void *)(uintptr_t)classes);
    if (n > tt_dataset_count(d)) die("--%s %lld needs %lld reviews%s; '%s' has %lld to %s", split, (long long)(m ? opt.test : opt.train), (long long)n, m ? "" : " with those for validation", opt.data, (long long)tt_dataset_count(d), split);
    if (!n || n == tt_dataset_count(d)) return d;
    tt_dataset *part = (tt_dataset *)made(ctx, tt_dataset_split(d, n));
    tt_dataset_free(d);
    return part;
}

static tt_loader *loader_of(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k, int max_length, bool train)
{
    tt_loader_options o = tt_loader_options_default();
    o.batch = (int)opt.batch;
    o.accumulate = (int)opt.accumulate;
    o.max_length = max_length, o.max_tokens = (int)opt.max_tokens;
    o.shuffle = train;
    if (opt.plan) o.threads = 0; /* nothing will be read */
    return (tt_loader *)made(ctx, tt_loader_new(ctx, d, k, &o));
}

/* ----------------------------------------------------------------------------------------- model and trainer */
/* The start of training: a checkpoint, or a small DistilBERT with random weights. */
static void make_model(tt_context *ctx, tt_bert *m, const tt_tokenizer *k, const tt_dataset *d)
{
    if (opt.model) {
        must(ctx, tt_bert_load(ctx, m, opt.model, tt_dataset_classes(d)));
        if (m->config.vocab_size < tt_tokenizer_size(k)) die("vocab.txt has %d tokens, the model %d", tt_tokenizer_size(k), m->config.vocab_size);
        if (m->config.vocab_size > tt_tokenizer_size(k)) printf("note: vocab.txt has %d tokens, the model %d: are they of one folder?\n", tt_tokenizer_size(k), m->config.vocab_size);
    } else {
        tt_bert_config c = tt_bert_config_default(true);
        c.vocab_size = tt_tokenizer_size(k);
        c.layers = 2, c.hidden_size = 128, c.heads = 4, c.intermediate_size = 256;
        c.classes = tt_dataset_classes(d);
        if (is_table(opt.data)) c.max_positions = 128;
        must(ctx, tt_bert_new(ctx, m, &c));
    }
    for (int c = 0; c < m->config.classes; c++)
        if (snprintf(m->class_names[c], sizeof m->class_names[c], "%s", tt_dataset_class_name(d, c)) > 63) die("the label '%.40s...' has more than 63 bytes", m->class_names[c]);
    if (opt.dropout >= 0) m->config.dropout = m->config.attention_dropout = m->config.classifier_dropout = (float)opt.dropout;
    for (char *pattern = opt.freeze ? strtok(opt.freeze, ",") : NULL; pattern; pattern = strtok(NULL, ",")) {
        int n = tt_param_freeze(ctx, pattern, true);
        if (!n) die("--freeze: no parameter is called '%s'", pattern);
        printf("frozen: %s (%d parameters)\n", pattern, n);
    }
}

/* For the micro-batches of two loaders, of one where the other is NULL, or of one text. total_steps 0: only to evaluate and predict. */
static tt_trainer *make_trainer(tt_context *ctx, const tt_bert *m, const tt_loader *l, const tt_loader *other, int64_t total_steps)
{
    tt_model model = tt_bert_classifier(m);
    tt_train_options o = tt_train_options_default();
    o.train = total_steps > 0;
    o.schedule.lr = (float)opt.lr;
    o.schedule.total_steps = total_steps;
    o.schedule.warmup_steps = (int64_t)(opt.warmup * (double)total_steps);
    o.precision = opt.precision;
    o.matmul = opt.matmul;
    o.device = opt.device;
    o.max_seqs = l ? tt_loader_max_seqs(l) : 1;
    o.max_tokens = l ? tt_loader_max_tokens(l) : m->config.max_positions;
    if (other && tt_loader_max_seqs(other) > o.max_seqs) o.max_seqs = tt_loader_max_seqs(other);
    if (other && tt_loader_max_tokens(other) > o.max_tokens) o.max_tokens = tt_loader_max_tokens(other);
    o.accumulate = l && tt_loader_accumulates(l);
    return (tt_trainer *)made(ctx, tt_trainer_new(ctx, &model, &o));
}

/* --------------------------------------------------------------------------------------------------- training */
static volatile sig_atomic_t stop_asked;
static void ask_to_stop(int signal_number) { stop_asked = 1, signal(signal_number, SIG_DFL); } /* a second one ends the program */
static double now(void) { struct timespec t; return clock_gettime(CLOCK_MONOTONIC, &t), (double)t.tv_sec + 1e-9 * (double)t.tv_nsec; }
static bool exists(const char *path) { struct stat s; return stat(path, &s) == 0; }
static char plan_path[1100], state_path[1100], model_path[1100]; /* in opt.out */

typedef struct run { const tt_bert *m; const tt_tokenizer *k; double shown; bool terminal; } run;

static tt_status keep(void *user) /* as transformers and --predict load it */
{
    run *r = (run *)user;
    tt_status status = tt_bert_save(r->m, opt.out);
    return status == TT_OK ? tt_tokenizer_save(r->k, opt.out) : status;
}

/* One line, rewritten on a terminal; elsewhere a plain line every so often. */
static void report(void *user, const tt_fit_event *e)
{
    run *r = (run *)user;
    char line[256];
    bool last = e->step == e->steps, rewrite = r->terminal && !e->validation;
    if (!last && now() - r->shown < (r->terminal ? 0.1 : 10)) return;
    r->shown = now();
    tt_fit_text(e, line, sizeof line);
    printf("%s%s%s", rewrite ? "\r" : "", line, rewrite && !last ? "   " : "\n");
    fflush(stdout);
}

static tt_tokenizer *open_tokenizer(tt_context *ctx, const char *folder)
{
    return (tt_tokenizer *)made(ctx, folder ? tt_tokenizer_load(ctx, folder) : tt_tokenizer_open(ctx, "examples/data/vocab.txt", true));
}

static tt_context *open_context(void)
{
    tt_context_options o = tt_context_options_default();
    o.seed = (uint64_t)opt.seed;
    o.threads = (int)opt.threads;
    tt_context *ctx = tt_open(&o);
    if (!ctx) exit(1); /* the log says why */
    return ctx;
}

/* Tests the best epoch's model as a user would: from its folder, in a context of its own. */
static void test(void)
{
    tt_context *ctx = open_context();
    tt_tokenizer *k = open_tokenizer(ctx, opt.out);
    tt_bert m;
    tt_stats s;
    must(ctx, tt_bert_load(ctx, &m, opt.out, 0));
    tt_dataset *d = read_reviews(ctx, "test", opt.test, &m);
    tt_loader *l = loader_of(ctx, d, k, m.config.max_positions, false);
    tt_trainer *t = make_trainer(ctx, &m, l, NULL, 0);
    must(ctx, tt_evaluate(t, l, &s));
    printf("best epoch: accuracy %.4f, loss %.4f on %.0f test reviews\nsaved: %s\n", s.correct / s.targets, s.loss, s.targets, opt.out);
    tt_trainer_free(t), tt_loader_free(l), tt_bert_free(&m), tt_dataset_free(d), tt_tokenizer_free(k), tt_close(ctx);
}

static bool train(void) /* false: stopped by an error */
{
    if (opt.resume && !opt.plan && !exists(state_path)) die("nothing to --resume: '%s' is not there", state_path);
    if (!opt.resume && !opt.plan && (exists(state_path) || exists(model_path))) die("'%s' holds a run or a model: --resume goes on with a run, another --out keeps it", opt.out);
    tt_context *ctx = open_context();
    tt_tokenizer *k = open_tokenizer(ctx, opt.model);
    tt_dataset *d = read_reviews(ctx, "train", opt.train, NULL);
    if (tt_dataset_count(d) < 2 || tt_dataset_classes(d) < 2) die("'%s' has %lld reviews of %d classes to train on; two are the least", opt.data, (long long)tt_dataset_count(d), tt_dataset_classes(d));
    tt_dataset *held = (tt_dataset *)made(ctx, tt_dataset_split(d, (tt_dataset_count(d) + 10) / 11)); /* one for validation, ten to train on */
    tt_bert m;
    bool finished;
    static char plan[1 << 16];
    make_model(ctx, &m, k, d);
    if (!opt.plan) tt_dataset_free(read_reviews(ctx, "test", opt.test, &m)); /* so that what is wrong with it shows now */
    tt_loader *l = loader_of(ctx, d, k, m.config.max_positions, true), *validation = loader_of(ctx, held, k, m.config.max_positions, false);
    tt_trainer *t = make_trainer(ctx, &m, l, validation, tt_loader_steps(l) * opt.epochs);
    printf("%lld reviews to train on, %lld for validation; %s, %d threads, %s\n", (long long)tt_dataset_count(d), (long long)tt_dataset_count(held),
           opt.model ? opt.model : "from scratch", tt_threads(ctx), tt_isa(ctx));
    tt_plan_text(tt_trainer_program(t), plan, sizeof plan);
    fputs(plan, stdout);
    if (opt.plan) {
        FILE *f = mkdir(opt.out, 0777) == 0 || errno == EEXIST ? fopen(plan_path, "w") : NULL;
        if (!f || tt_plan_svg(tt_trainer_program(t), plan, sizeof plan) == 0 || fputs(plan, f) < 0 || fclose(f) != 0) die("cannot write '%s': %s", plan_path, strerror(errno));
        exit(fflush(stdout) != 0);
    }
    run r = {&m, k, 0, isatty(1) != 0};
    tt_fit_options o = tt_fit_options_default();
    o.epochs = opt.epochs;
    o.folder = opt.out;
    o.resume = opt.resume;
    o.stop = &stop_asked;
    o.keep = keep;
    o.report = report;
    o.user = &r;
    signal(SIGINT, ask_to_stop), signal(SIGTERM, ask_to_stop);
    tt_status status = tt_fit(t, l, validation, &o, &finished);
    if (status != TT_OK) fflush(stdout), fprintf(stderr, "\ndistilbert_imdb: %s\n", tt_error(ctx));
    if (!finished && (status == TT_OK || tt_trainer_steps(t))) printf("\nstopped after step %lld%s\n", (long long)tt_trainer_steps(t), tt_trainer_steps(t) ? "; --resume goes on from there" : "");
    tt_trainer_free(t), tt_loader_free(l), tt_loader_free(validation);
    tt_bert_free(&m), tt_dataset_free(d), tt_dataset_free(held), tt_tokenizer_free(k), tt_close(ctx);
    signal(SIGINT, SIG_DFL), signal(SIGTERM, SIG_DFL);
    if (finished) test();
    return status == TT_OK;
}

/* ------------------------------------------------------------------------------------------------- prediction */
static void predict(void)
{
    if (!exists(model_path)) die("'%s' holds no trained model: one is saved when the first epoch ends", opt.out);
    tt_context *ctx = open_context();
    tt_tokenizer *k = open_tokenizer(ctx, opt.out);
    tt_bert m;
    must(ctx, tt_bert_load(ctx, &m, opt.out, 0));
    tt_trainer *t = make_trainer(ctx, &m, NULL, NULL, 0);
    char *line = NULL;
    size_t capacity = 0;
    float *probability = (float *)made(NULL, calloc((size_t)m.config.classes, sizeof *probability));
    bool lines = strcmp(opt.predict, "-") == 0;
    for (ssize_t n = 0; !lines || (n = getline(&line, &capacity, stdin)) >= 0;) {
        const char *text = lines ? line : opt.predict;
        int best = 0;
        for (ssize_t b = 0; b < n; b++) if (!line[b]) line[b] = ' ';
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r')) line[--n] = 0;
        must(ctx, tt_predict_text(t, k, text, probability));
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
    parse_options(argc, argv);
    if (!*opt.out || strlen(opt.out) > 1000) die("--out needs the name of a folder");
    snprintf(plan_path, sizeof plan_path, "%s/plan.svg", opt.out);
    snprintf(state_path, sizeof state_path, "%s/state.safetensors", opt.out);
    snprintf(model_path, sizeof model_path, "%s/model.safetensors", opt.out);
    if (opt.predict) return predict(), 0;
    if (!opt.epochs) opt.epochs = opt.model ? 2 : 6;
    if (opt.lr == 0) opt.lr = opt.model ? 5e-5 : 5e-4;
    if (!opt.max_tokens) opt.max_tokens = opt.model || !is_table(opt.data) ? 8192 : 2048;
    if (opt.batch < 1 || opt.batch > 65536) die("--batch must be in 1..65536");
    if (!(opt.lr >= 0 && opt.lr < 1e9 && opt.warmup >= 0 && opt.warmup <= 1)) die("--lr must be a number >= 0, --warmup in [0, 1]");
    if (!(opt.dropout == -1 || (opt.dropout >= 0 && opt.dropout < 1))) die("--dropout must be in [0, 1), or -1");
    return train() ? 0 : 1;
}
