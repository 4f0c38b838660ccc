/* Trains DistilBERT, BERT or MiniLM to tell good film reviews from bad ones.

       make demo                                       a small DistilBERT from scratch, on examples/data/reviews.tsv
       build/distilbert_imdb --data aclImdb --model distilbert-base-uncased/       the real thing
       build/distilbert_imdb --out run --predict "a film to remember"              classify with what was trained

   One file, in order: options, data, model and trainer, the epochs, prediction. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"

#include <signal.h>

/* --------------------------------------------------------------------------------------------------- options */

static struct {
    const char *data, *model, *precision, *freeze, *out, *predict;
    int64_t train, test, epochs, batch, accumulate, max_tokens, seed, threads;
    double lr, warmup, dropout;
    bool resume, help;
} opt = {"examples/data/reviews.tsv", NULL, "32-true", "", "run", NULL, 0, 0, 0, 16, 1, 0, 1, 0, 0, 0.1, -1, false, false};

typedef struct flag { const char *name, *what; char type; void *to; const char *help; } flag; /* type: s, i, f, b */

static const flag flags[] = {
    {"--data", "PATH", 's', &opt.data, "aclImdb folder, or a .tsv/.csv with columns text, label[, split] (examples/data/reviews.tsv)"},
    {"--model", "DIR", 's', &opt.model, "Hugging Face folder to start from: config.json, model.safetensors, vocab.txt (none: from scratch)"},
    {"--train", "N", 'i', &opt.train, "reviews to train on (0: all but those for validation)"},
    {"--test", "N", 'i', &opt.test, "reviews to test on (0: all)"},
    {"--epochs", "N", 'i', &opt.epochs, "passes over the training reviews (0: 2 with --model, else 10)"},
    {"--lr", "X", 'f', &opt.lr, "peak learning rate (0: 5e-5 with --model, else 1e-3)"},
    {"--warmup", "X", 'f', &opt.warmup, "share of the steps in which the learning rate rises, before it falls linearly (0.1)"},
    {"--batch", "N", 'i', &opt.batch, "reviews in a step (16)"},
    {"--accumulate", "N", 'i', &opt.accumulate, "micro-batches in a step, at least (1)"},
    {"--max-tokens", "N", 'i', &opt.max_tokens, "tokens in a micro-batch; it is filled up to this (0: 8192 with --model, else 2048)"},
    {"--precision", "P", 's', &opt.precision, "32-true, bf16-mixed or bf16-true (32-true)"},
    {"--dropout", "X", 'f', &opt.dropout, "dropout everywhere, in [0, 1) (-1: as the model's config says)"},
    {"--freeze", "LIST", 's', &opt.freeze, "parameters to keep as they are: name patterns separated by commas, * and ? (none)"},
    {"--seed", "N", 'i', &opt.seed, "of initialisation, shuffling and dropout (1)"},
    {"--threads", "N", 'i', &opt.threads, "threads (0: all cores)"},
    {"--out", "DIR", 's', &opt.out, "folder for the trained model, state, metrics.csv and loss.svg (run)"},
    {"--resume", "", 'b', &opt.resume, "go on from the state in --out"},
    {"--predict", "TEXT", 's', &opt.predict, "classify TEXT, or with - each line of standard input, with the model in --out"},
    {"--help", "", 'b', &opt.help, "this list"},
};

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("distilbert_imdb: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static void parse_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const flag *f = NULL;
        char *end = NULL;
        for (int k = 0; k < TT__COUNT(flags); k++) if (strcmp(argv[i], flags[k].name) == 0) f = &flags[k];
        if (!f) die("unknown option '%s'; --help lists them", argv[i]);
        if (f->type == 'b') { *(bool *)f->to = true; continue; }
        if (++i == argc) die("%s needs a value: %s", f->name, f->what);
        errno = 0;
        if (f->type == 's') *(const char **)f->to = argv[i];
        if (f->type == 'i') *(int64_t *)f->to = strtoll(argv[i], &end, 10);
        if (f->type == 'f') *(double *)f->to = strtod(argv[i], &end);
        if (f->type != 's' && (end == argv[i] || *end || errno)) die("%s takes a number, not '%s'", f->name, argv[i]);
        if (f->type == 'i' && (*(int64_t *)f->to < 0 || *(int64_t *)f->to > 1000000000)) die("%s %s is out of range", f->name, argv[i]);
    }
    if (!opt.help) return;
    printf("usage: distilbert_imdb [options]\n\n");
    for (int k = 0; k < TT__COUNT(flags); k++) printf("  %-13s %-5s %s\n", flags[k].name, flags[k].what, flags[k].help);
    exit(0);
}

/* ------------------------------------------------------------------------------------------------------ data */

static bool is_table(const char *path)
{
    size_t n = strlen(path);
    return n > 4 && (strcmp(path + n - 4, ".tsv") == 0 || strcmp(path + n - 4, ".csv") == 0);
}

/* "train" or "test"; n reviews, 0: all. */
static tt_dataset *read_reviews(tt_context *ctx, const char *split, int64_t n)
{
    tt_dataset *d = is_table(opt.data) ? tt_dataset_table(ctx, opt.data, split, NULL, 0) : tt_dataset_imdb(ctx, opt.data, split, n + n % 2);
    if (!d) die("%s", tt_error(ctx));
    if (n > tt_dataset_count(d)) die("%lld reviews are asked for, '%s' has %lld for '%s'", (long long)n, opt.data, (long long)tt_dataset_count(d), split);
    if (!n || n == tt_dataset_count(d)) return d;
    tt_dataset *part = tt_dataset_split(d, n);
    if (!part) die("%s", tt_error(ctx));
    tt_dataset_free(d);
    return part;
}

static tt_loader *loader_of(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k, int max_length, bool train)
{
    tt_loader_options o = tt_loader_options_default();
    o.batch = (int)opt.batch;
    o.accumulate = train ? (int)opt.accumulate : 1;
    o.max_length = max_length;
    o.max_tokens = (int)opt.max_tokens;
    o.shuffle = train;
    tt_loader *l = tt_loader_new(ctx, d, k, &o);
    if (!l) die("%s", tt_error(ctx));
    return l;
}

/* ----------------------------------------------------------------------------------------- model and trainer */

/* The start of training: a checkpoint, or a small DistilBERT with random weights. */
static void make_model(tt_context *ctx, tt_bert *m, const tt_tokenizer *k, const tt_dataset *d)
{
    char list[1024];
    if (opt.model) {
        if (tt_bert_load(ctx, m, opt.model, tt_dataset_classes(d)) != TT_OK) die("%s", tt_error(ctx));
        if (m->config.vocab_size < tt_tokenizer_size(k)) die("vocab.txt has %d tokens, the model %d", tt_tokenizer_size(k), m->config.vocab_size);
    } else {
        tt_bert_config c = tt_bert_config_default(true);
        c.vocab_size = tt_tokenizer_size(k);
        c.hidden_size = 128;
        c.layers = 2;
        c.heads = 4;
        c.intermediate_size = 256;
        c.classes = tt_dataset_classes(d);
        if (is_table(opt.data)) c.max_positions = 128;
        if (tt_bert_new(ctx, m, &c) != TT_OK) die("%s", tt_error(ctx));
    }
    for (int c = 0; c < m->config.classes; c++) snprintf(m->class_names[c], sizeof m->class_names[c], "%s", tt_dataset_class_name(d, c));
    if (opt.dropout >= 0) m->config.dropout = m->config.attention_dropout = m->config.classifier_dropout = (float)opt.dropout;
    if (strlen(opt.freeze) >= sizeof list) die("--freeze is too long");
    snprintf(list, sizeof list, "%s", opt.freeze);
    for (char *pattern = strtok(list, ","); pattern; pattern = strtok(NULL, ",")) {
        int n = tt_param_freeze(ctx, pattern, true);
        if (!n) die("--freeze '%s' matches no parameter", pattern);
        printf("frozen: %s (%d parameters)\n", pattern, n);
    }
}

static tt_trainer *make_trainer(tt_context *ctx, const tt_bert *m, const tt_loader *l, int64_t total_steps)
{
    tt_model model = tt_bert_classifier(m);
    tt_train_options o = tt_train_options_default();
    o.schedule.lr = (float)opt.lr;
    o.schedule.total_steps = total_steps;
    o.schedule.warmup_steps = (int64_t)(opt.warmup * (double)total_steps);
    o.precision = opt.precision;
    o.max_seqs = (int)opt.batch;
    o.max_tokens = tt_loader_max_tokens(l);
    o.accumulate = tt_loader_max_seqs(l) < opt.batch || opt.batch * m->config.max_positions > o.max_tokens;
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) die("%s", tt_error(ctx));
    return t;
}


static void save_model(tt_context *ctx, const tt_bert *m, const tt_tokenizer *k) /* as transformers and --predict load it */
{
    if (tt_bert_save(m, opt.out) != TT_OK || tt_tokenizer_save(k, opt.out) != TT_OK) die("%s", tt_error(ctx));
}

/* --------------------------------------------------------------------------------------------------- progress */

static volatile sig_atomic_t stop_asked;
static void ask_to_stop(int signal_number) { (void)signal_number; stop_asked = 1; }

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static const char *out_path(const char *name)
{
    static char path[2][1100];
    static int turn;
    turn = !turn;
    snprintf(path[turn], sizeof path[turn], "%s/%s", opt.out, name);
    return path[turn];
}

/* metrics.csv: a line for each step, and one for each validation. A resumed run keeps the lines up to its step. */
static FILE *open_metrics(int64_t steps_done)
{
    const char *path = out_path("metrics.csv"), *old_path = out_path("metrics.csv.old");
    char line[256];
    FILE *old = steps_done && rename(path, old_path) == 0 ? fopen(old_path, "r") : NULL, *f = fopen(path, "w");
    if (!f) die("cannot write '%s': %s", path, strerror(errno));
    fprintf(f, "step,epoch,split,loss,accuracy,lr,tokens_per_second\n");
    while (old && fgets(line, sizeof line, old))
        if (line[0] >= '0' && line[0] <= '9' && atoll(line) <= steps_done) fputs(line, f);
    if (old) fclose(old);
    if (steps_done) remove(old_path);
    return f;
}

/* loss.svg from metrics.csv: the training loss smoothed over 1/50 of the run, and the validation losses. */
static void draw_loss(void)
{
    FILE *f = fopen(out_path("metrics.csv"), "r"), *svg = fopen(out_path("loss.svg"), "w");
    char line[256], split[16];
    double step, epoch, loss, last = 1, most = 0, mean = 0, weight = 0;
    if (!f || !svg) die("cannot draw '%s': %s", out_path("loss.svg"), strerror(errno));
    for (int pass = 0; pass < 3; pass++) { /* the ranges; the line; the dots */
        double keep = exp(-50 / (last > 50 ? last : 50));
        rewind(f);
        if (pass == 1) {
            fprintf(svg, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 640 360' font-family='sans-serif' font-size='12'>\n"
                         "<rect width='640' height='360' fill='white'/><path d='M50 20V320H620' fill='none' stroke='#444'/>\n"
                         "<text x='335' y='350' text-anchor='middle'>step (0 to %.0f)</text><text x='44' y='324' text-anchor='end'>0</text>\n"
                         "<text x='44' y='30' text-anchor='end'>%.2g</text><text x='60' y='34' fill='#1f77b4'>training loss</text>"
                         "<text x='150' y='34' fill='#d62728'>validation loss</text>\n<polyline fill='none' stroke='#1f77b4' stroke-width='1.5' points='", last, most);
        }
        while (fgets(line, sizeof line, f)) {
            if (sscanf(line, "%lf,%lf,%15[a-z],%lf", &step, &epoch, split, &loss) != 4) continue;
            bool train = strcmp(split, "train") == 0;
            if (step > last) last = step;
            if (pass == 0 && loss > most) most = loss;
            if (pass == 1 && train) {
                mean = keep * mean + (1 - keep) * loss;
                weight = keep * weight + 1 - keep;
                fprintf(svg, "%.1f,%.1f ", 50 + 570 * step / last, 320 - 290 * mean / weight / most);
            }
            if (pass == 2 && !train) fprintf(svg, "<circle r='3.5' fill='#d62728' cx='%.1f' cy='%.1f'/>\n", 50 + 570 * step / last, 320 - 290 * loss / most);
        }
        if (pass == 1) fprintf(svg, "'/>\n");
    }
    fprintf(svg, "</svg>\n");
    fclose(f);
    fclose(svg);
}

typedef struct meter { double start, shown, tokens, flops, peak; int64_t first_step; bool terminal; } meter;

/* One line, rewritten on a terminal; elsewhere a plain line every so often. */
static void show(meter *m, const tt_progress *p, int64_t steps, int64_t done, int64_t total)
{
    double t = now(), seconds = t - m->start, left = done > m->first_step ? seconds / (double)(done - m->first_step) * (double)(total - done) : 0;
    bool last = p->step == steps;
    char bar[21];
    if (!last && t - m->shown < (m->terminal ? 0.1 : 10)) return;
    m->shown = t;
    for (int k = 0; k < 20; k++) bar[k] = (int64_t)k * steps < p->step * 20 ? '#' : '.';
    bar[20] = 0;
    printf("%sepoch %lld/%lld [%s] %lld/%lld  loss %.4f  accuracy %.3f  %.0f tokens/s  %.0f%% of peak  ETA %d:%02d%s", m->terminal ? "\r" : "",
           (long long)p->epoch + 1, (long long)opt.epochs, bar, (long long)p->step, (long long)steps, p->loss_sum / p->targets, p->correct / p->targets,
           m->tokens / seconds, 100 * m->flops / seconds / m->peak, (int)left / 60, (int)left % 60, m->terminal ? (last ? "\n" : "   ") : "\n");
    fflush(stdout);
}

/* ------------------------------------------------------------------------------------------------- the epochs */

/* One epoch from p->step on; false when it was interrupted. */
static bool train_epoch(tt_context *ctx, tt_trainer *t, tt_loader *l, tt_progress *p, meter *m, FILE *metrics)
{
    int64_t steps = tt_loader_steps(l), total = steps * opt.epochs;
    tt_batch b;
    tt_stats s;
    bool updated;
    double step_start = now(), step_tokens = 0;
    if (tt_loader_seek(l, p->epoch, p->step) != TT_OK) die("%s", tt_error(ctx));
    while (tt_loader_next(l, &b)) {
        float lr = tt_trainer_lr(t);
        tt_status status = tt_train_batch(t, &b, &s, &updated);
        if (status != TT_OK) {
            fprintf(stderr, "\ndistilbert_imdb: %s\n", tt_error(ctx));
            return false;
        }
        m->tokens += b.rows;
        step_tokens += b.rows;
        if (!updated) continue;
        m->flops += s.flops;
        p->step++;
        p->loss_sum += s.loss * s.targets;
        p->targets += s.targets;
        p->correct += s.correct;
        fprintf(metrics, "%lld,%lld,train,%.9g,%.4f,%.6g,%.0f\n", (long long)s.step, (long long)p->epoch + 1, s.loss, s.correct / s.targets, lr, step_tokens / (now() - step_start));
        step_start = now();
        step_tokens = 0;
        show(m, p, steps, p->epoch * steps + p->step, total);
        if (stop_asked) return p->step == steps;
    }
    if (tt_error_code(ctx) != TT_OK) die("%s", tt_error(ctx));
    return true;
}

static double test(tt_context *ctx, const tt_tokenizer *k, const char *what) /* the model in opt.out on the test reviews */
{
    tt_bert m;
    tt_stats s;
    tt_dataset *d = read_reviews(ctx, "test", opt.test);
    if (tt_bert_load(ctx, &m, opt.out, 0) != TT_OK) die("%s", tt_error(ctx));
    tt_loader *l = loader_of(ctx, d, k, m.config.max_positions, false);
    tt_trainer *t = make_trainer(ctx, &m, l, 1);
    if (tt_evaluate(t, l, &s) != TT_OK) die("%s", tt_error(ctx));
    printf("%s: accuracy %.4f, loss %.4f on %.0f test reviews\n", what, s.correct / s.targets, s.loss, s.targets);
    tt_trainer_free(t);
    tt_loader_free(l);
    tt_bert_free(&m);
    tt_dataset_free(d);
    return s.correct / s.targets;
}

static tt_tokenizer *open_tokenizer(tt_context *ctx, const char *folder)
{
    tt_tokenizer *k = folder ? tt_tokenizer_load(ctx, folder) : tt_tokenizer_open(ctx, "examples/data/vocab.txt", true);
    if (!k) die("%s", tt_error(ctx));
    return k;
}

static tt_context *open_context(void)
{
    tt_context_options o = tt_context_options_default();
    o.seed = (uint64_t)opt.seed;
    o.threads = (int)opt.threads;
    tt_context *ctx = tt_open(&o);
    if (!ctx) die("cannot start");
    return ctx;
}

static void train(void)
{
    tt_context *ctx = open_context();
    tt_tokenizer *k = open_tokenizer(ctx, opt.model);
    tt_dataset *d = read_reviews(ctx, "train", opt.train ? opt.train + (opt.train + 9) / 10 : 0);
    tt_dataset *held = tt_dataset_split(d, tt_dataset_count(d) / 11); /* one for validation, ten to train on */
    tt_progress p;
    tt_bert m;
    tt_stats s;
    char plan[2048];
    memset(&p, 0, sizeof p);
    if (!held) die("%s", tt_error(ctx));
    make_model(ctx, &m, k, d);
    tt_loader *l = loader_of(ctx, d, k, m.config.max_positions, true), *validation = loader_of(ctx, held, k, m.config.max_positions, false);
    tt_trainer *t = make_trainer(ctx, &m, l, tt_loader_steps(l) * opt.epochs);
    if (!ctx->options.files.make_folder(NULL, opt.out)) die("cannot make folder '%s': %s", opt.out, strerror(errno));
    printf("%lld reviews to train on, %lld for validation; %s, %d threads, %s\n", (long long)tt_dataset_count(d), (long long)tt_dataset_count(held),
           opt.model ? opt.model : "from scratch", tt_threads(ctx), tt_isa(ctx));
    tt_plan_text(tt_trainer_program(t), plan, sizeof plan);
    fputs(plan, stdout);
    if (opt.resume && tt_trainer_load(t, out_path("state.safetensors"), &p) != TT_OK) die("%s", tt_error(ctx));
    if (opt.resume) printf("resumed after step %lld\n", (long long)tt_trainer_steps(t));
    FILE *metrics = open_metrics(tt_trainer_steps(t));
    meter meter = {now(), 0, 0, 0, tt_measured_peak(ctx), tt_trainer_steps(t), isatty(1) != 0};
    bool whole = true;
    signal(SIGINT, ask_to_stop);
    signal(SIGTERM, ask_to_stop);
    while (p.epoch < opt.epochs && !stop_asked) {
        whole = train_epoch(ctx, t, l, &p, &meter, metrics);
        if (!whole) break;
        double paused = now();
        if (tt_evaluate(t, validation, &s) != TT_OK) die("%s", tt_error(ctx));
        printf("  validation: loss %.4f, accuracy %.4f%s\n", s.loss, s.correct / s.targets, s.correct / s.targets > p.best ? ", kept" : "");
        fprintf(metrics, "%lld,%lld,validation,%.9g,%.4f,,\n", (long long)s.step, (long long)p.epoch + 1, s.loss, s.correct / s.targets);
        if (s.correct / s.targets > p.best) {
            p.best = s.correct / s.targets;
            save_model(ctx, &m, k);
        }
        p.epoch++;
        p.step = 0;
        p.loss_sum = p.targets = p.correct = 0;
        if (tt_trainer_save(t, out_path("state.safetensors"), &p) != TT_OK) die("%s", tt_error(ctx));
        meter.start += now() - paused;
    }
    if (!whole && tt_trainer_save(t, out_path("state.safetensors"), &p) != TT_OK) die("%s", tt_error(ctx));
    fclose(metrics);
    draw_loss();
    bool finished = p.epoch == opt.epochs;
    if (!finished) printf("\nstopped after step %lld; --resume goes on from there\n", (long long)tt_trainer_steps(t));
    tt_trainer_free(t);
    tt_loader_free(l);
    tt_loader_free(validation);
    tt_bert_free(&m);
    tt_dataset_free(d);
    tt_dataset_free(held);
    tt_tokenizer_free(k);
    tt_close(ctx);
    if (!finished) return;
    ctx = open_context(); /* the best epoch's model is in the folder: test that one, as a user would load it */
    k = open_tokenizer(ctx, opt.out);
    test(ctx, k, "best epoch");
    printf("saved: %s (model, vocab.txt, metrics.csv, loss.svg)\n", opt.out);
    tt_tokenizer_free(k);
    tt_close(ctx);
}

/* ------------------------------------------------------------------------------------------------- prediction */

static void classify(tt_trainer *t, const tt_bert *m, const tt_tokenizer *k, const char *text)
{
    static int32_t ids[512], positions[512], types[512];
    int32_t start[2] = {0, 0}, label = 0;
    float probability[64];
    tt_batch b;
    int best = 0;
    memset(&b, 0, sizeof b);
    b.seqs = 1;
    b.rows = start[1] = tt_tokenize(k, text, strlen(text), ids, (int)tt__min(512, m->config.max_positions));
    for (int r = 0; r < b.rows; r++) positions[r] = r;
    b.ids = ids;
    b.positions = positions;
    b.types = types;
    b.seq_start = start;
    b.labels = &label;
    if (tt_predict(t, &b, probability) != TT_OK) die("%s", tt_error(m->ctx));
    for (int c = 1; c < m->config.classes; c++) if (probability[c] > probability[best]) best = c;
    printf("%s\t%.4f\t%s\n", m->class_names[best], probability[best], text);
    fflush(stdout);
}

static void predict(void)
{
    tt_context *ctx = open_context();
    tt_tokenizer *k = open_tokenizer(ctx, opt.out);
    tt_bert m;
    char *line = NULL;
    size_t capacity = 0;
    if (tt_bert_load(ctx, &m, opt.out, 0) != TT_OK) die("%s", tt_error(ctx));
    tt_model model = tt_bert_classifier(&m);
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.max_seqs = 1;
    o.max_tokens = (int)tt__min(512, m.config.max_positions);
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) die("%s", tt_error(ctx));
    if (strcmp(opt.predict, "-") != 0) classify(t, &m, k, opt.predict);
    else
        for (ssize_t n; (n = getline(&line, &capacity, stdin)) >= 0;) {
            while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r')) line[--n] = 0;
            classify(t, &m, k, line);
        }
    free(line);
    tt_trainer_free(t);
    tt_bert_free(&m);
    tt_tokenizer_free(k);
    tt_close(ctx);
}

int main(int argc, char **argv)
{
    parse_options(argc, argv);
    if (opt.predict) {
        predict();
        return 0;
    }
    if (!opt.epochs) opt.epochs = opt.model ? 2 : 10;
    if (opt.lr == 0) opt.lr = opt.model ? 5e-5 : 1e-3;
    if (!opt.max_tokens) opt.max_tokens = opt.model || !is_table(opt.data) ? 8192 : 2048;
    if (opt.batch < 1) die("--batch must be at least 1");
    train();
    return 0;
}
