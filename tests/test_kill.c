/* A training that is killed, at each of its file operations and at random moments, and resumed: it ends as
   one that was never stopped, with the same bits of parameters, optimizer state, best model and metrics. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"
#include <sys/mman.h>
#include <sys/wait.h>

enum { EPOCHS = 3 };

/* A training that is ready to begin. Each run is a child process, which starts from this one's memory. */
typedef struct training {
    tt_context *ctx;
    tt_tokenizer *k;
    tt_dataset *d;
    tt_loader *train, *validation;
    tt_bert m;
    tt_trainer *t;
    bool validates;
    double save_seconds;
    char best[1024]; /* the folder of the model that is kept */
} training;

/* What a child says: how many operations it did, and which was the last; how often it kept a model; its error. */
typedef struct report {
    volatile long calls;
    volatile int kept;
    char operation, error[1024];
} report;

static report *shared;
static long kill_at;   /* the operation at which this process is killed, from 1; 0: none */
static bool kill_half; /* if that is a write, when half of it is done */
static tt_files real;

/* Counts a file operation, and kills this process before it where it is the one. */
static void count(char operation)
{
    if (!shared) return;
    shared->operation = operation;
    if (++shared->calls == kill_at && !(kill_half && operation == 'w')) raise(SIGKILL);
}

static void *kill_open(void *u, const char *path, char mode)
{
    count(mode == 'w' ? 'c' : 'o');
    return real.open(u, path, mode);
}
static bool kill_read(void *u, void *f, uint64_t at, void *to, size_t n)
{
    count('r');
    return real.read(u, f, at, to, n);
}
static bool kill_write(void *u, void *f, const void *from, size_t n)
{
    count('w');
    if (shared && shared->calls == kill_at) {
        real.write(u, f, from, n / 2);
        raise(SIGKILL);
    }
    return real.write(u, f, from, n);
}
static bool kill_sync(void *u, void *f) /* without the disk's time: what a killed process wrote is there */
{
    (void)u;
    (void)f;
    count('s');
    return true;
}
static bool kill_close(void *u, void *f)
{
    count('x');
    return real.close(u, f);
}
static bool kill_rename(void *u, const char *from, const char *to)
{
    count('n');
    return real.rename(u, from, to);
}
static bool kill_remove(void *u, const char *path)
{
    count('d');
    return real.remove(u, path);
}
static bool kill_make_folder(void *u, const char *path)
{
    count('m');
    return real.make_folder(u, path);
}
static bool kill_list(void *u, const char *path, bool (*each)(void *arg, const char *name), void *arg)
{
    count('l');
    return real.list(u, path, each, arg);
}

static bool open_training(training *r)
{
    static const char vocab[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\ngood\nbad\nfilm\nplot\n";
    static const char texts[] = "text,label\ngood film,pos\nbad film,neg\nplot good good,pos\nfilm bad,neg\n"
                                "bad plot bad,neg\nfilm good,pos\n";
    tt_context_options o = tt_context_options_default();
    char folder[1024];
    snprintf(folder, sizeof folder, "%s", test_folder());
    memset(r, 0, sizeof *r);
    o.threads = 1;
    o.logger.log = test__no_log;
    real = o.files;
    o.files.open = kill_open;
    o.files.read = kill_read;
    o.files.write = kill_write;
    o.files.sync = kill_sync;
    o.files.close = kill_close;
    o.files.rename = kill_rename;
    o.files.remove = kill_remove;
    o.files.make_folder = kill_make_folder;
    o.files.list = kill_list;
    o.files.map = NULL; /* so that reading is read() */
    r->ctx = tt_open(&o);
    const char *path = test_write(test_path(folder, "vocab.txt"), vocab, sizeof vocab - 1);
    r->k = tt_tokenizer_open(r->ctx, path, true);
    path = test_write(test_path(folder, "texts.csv"), texts, sizeof texts - 1);
    r->d = tt_dataset_table(r->ctx, path, NULL, NULL, 0);
    if (!CHECK(r->k && r->d)) return false;
    tt_loader_options lo = tt_loader_options_default();
    lo.batch = 2;
    lo.max_length = 8;
    lo.threads = 0;
    r->train = tt_loader_new(r->ctx, r->d, r->k, &lo);
    lo.shuffle = false;
    r->validation = tt_loader_new(r->ctx, r->d, r->k, &lo);
    tt_bert_config c = tt_bert_config_default(false);
    c.vocab_size = tt_tokenizer_size(r->k);
    c.hidden_size = c.intermediate_size = 4;
    c.layers = c.heads = 1;
    c.max_positions = 8;
    if (!CHECK(r->train && r->validation && tt_bert_new(r->ctx, &r->m, &c) == TT_OK)) return false;
    tt_model model = tt_bert_classifier(&r->m);
    tt_train_options to = tt_train_options_default();
    to.schedule.lr = 0.02f;
    to.schedule.total_steps = EPOCHS * 3;
    to.max_seqs = tt_loader_max_seqs(r->train);
    to.max_tokens = tt_loader_max_tokens(r->train);
    r->t = tt_trainer_new(r->ctx, &model, &to);
    if (!CHECK(r->t && tt_allocate(r->t->train) == TT_OK)) return false;
    tt_measured_peak(r->ctx); /* once, not in each child */
    return true;
}

static void close_training(training *r)
{
    tt_trainer_free(r->t);
    tt_bert_free(&r->m);
    tt_loader_free(r->train);
    tt_loader_free(r->validation);
    tt_dataset_free(r->d);
    tt_tokenizer_free(r->k);
    tt_close(r->ctx);
}

static tt_status keep(void *user)
{
    training *r = (training *)user;
    shared->kept++;
    return tt_bert_save(&r->m, r->best);
}

enum { ENDED, FAILED, KILLED };

/* Starts a run in a child, which dies before operation `at` (0: of none), or with `half` in the midst of it
   where it is a write. */
static pid_t begin(training *r, const char *folder, bool resume, long at, bool half)
{
    tt_fit_options o = tt_fit_options_default();
    bool finished = false;
    snprintf(r->best, sizeof r->best, "%.900s/best", folder);
    fflush(stdout);
    shared->calls = shared->kept = 0;
    shared->error[0] = 0;
    pid_t child = fork();
    if (child) return child;
    kill_at = at;
    kill_half = half;
    o.epochs = EPOCHS;
    o.folder = folder;
    o.resume = resume;
    o.save_seconds = r->save_seconds;
    o.keep = keep;
    o.user = r;
    tt_status status = tt_fit(r->t, r->train, r->validates ? r->validation : NULL, &o, &finished);
    if (status != TT_OK) snprintf(shared->error, sizeof shared->error, "%s", tt_error(r->ctx));
    _exit(status == TT_OK && finished ? ENDED : FAILED);
}

static int end(pid_t child)
{
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status)) return CHECK(WTERMSIG(status) == SIGKILL) ? KILLED : FAILED;
    return WEXITSTATUS(status);
}

/* Goes on to the end: resumes, and where that says that there is nothing to resume, begins. */
static bool go_on(training *r, const char *folder)
{
    if (end(begin(r, folder, true, 0, false)) == ENDED) return true;
    return end(begin(r, folder, false, 0, false)) == ENDED;
}

/* metrics.csv without its last two columns, the time and the speed; to be freed. */
static char *metrics_of(const char *folder, size_t *bytes)
{
    size_t kept = 0;
    char *text = test_read(test_path(folder, "metrics.csv"), bytes);
    for (char *line = text, *next; line && (next = strchr(line, '\n')) != NULL; line = next + 1) {
        char *last = next;
        for (int columns = 2; columns > 0 && last > line;)
            if (*--last == ',') columns--;
        memmove(text + kept, line, (size_t)(last - line));
        kept += (size_t)(last - line);
        text[kept++] = '\n';
    }
    *bytes = kept;
    return text;
}

static bool same_file(const char *a, const char *b, const char *name)
{
    size_t n, m;
    bool metrics = strcmp(name, "metrics.csv") == 0;
    char *x = metrics ? metrics_of(a, &n) : test_read(test_path(a, name), &n);
    char *y = metrics ? metrics_of(b, &m) : test_read(test_path(b, name), &m);
    bool same = x && y && n > 0 && n == m && memcmp(x, y, n) == 0;
    free(x);
    free(y);
    return same;
}

/* All files of two runs are equal; the name of the first that is not, or NULL. */
static const char *differs(const char *a, const char *b)
{
    static const char *const names[] = {"state.safetensors", "metrics.csv", "loss.svg",
                                        "best/model.safetensors", "best/config.json"};
    for (int k = 0; k < TEST_COUNT(names); k++)
        if (!same_file(a, b, names[k])) return names[k];
    return NULL;
}

static bool check_end(training *r, const char *whole, const char *folder, const char *what)
{
    char text[1280];
    bool on = go_on(r, folder);
    const char *other = on ? differs(whole, folder) : NULL;
    if (!on) snprintf(text, sizeof text, "%s: it goes on neither way: %s", what, shared->error);
    else if (other) snprintf(text, sizeof text, "%s: %s is another in the end", what, other);
    return test__check(on && !other, __FILE__, __LINE__, on && !other ? what : text);
}

/* Saves at every step and validates, or saves at the ends of epochs and keeps the model at each. */
static bool open_kind(training *r, int kind, char whole[1024])
{
    shared = NULL; /* operations count in children only */
    if (!open_training(r)) return false;
    shared = (report *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!CHECK(shared != MAP_FAILED)) return false;
    r->validates = kind == 0;
    r->save_seconds = kind == 0 ? 0 : 1e9;
    snprintf(whole, 1024, "%s", test_folder());
    return CHECK(end(begin(r, whole, false, 0, false)) == ENDED) && CHECK(shared->kept >= 1);
}

static void close_kind(training *r)
{
    munmap(shared, sizeof *shared);
    shared = NULL;
    close_training(r);
}

TEST(killed_at_each_file_operation)
{
    for (int kind = 0; kind < 2; kind++) {
        training r;
        char whole[1024], what[128];
        long operations, writes = 0;
        if (!open_kind(&r, kind, whole)) return;
        operations = shared->calls;
        CHECK(operations > (kind == 0 ? 100 : 50));
        for (int half = 0; half < 2; half++)
            for (long at = 1; at <= operations; at++) {
                char folder[1024];
                snprintf(folder, sizeof folder, "%s", test_folder());
                int how = end(begin(&r, folder, false, at, half != 0));
                char operation = shared->operation;
                if (half && operation != 'w') continue;
                writes += half;
                snprintf(what, sizeof what, "kind %d, killed %s operation %ld ('%c')", kind,
                         half ? "in" : "before", at, operation);
                if (!CHECK(how == KILLED) || !check_end(&r, whole, folder, what)) {
                    close_kind(&r);
                    return;
                }
                test__remove(folder);
            }
        CHECK(writes > 10);
        close_kind(&r);
    }
}

TEST(killed_at_random_moments) /* of which each run has one to three; at last nothing kills it */
{
    uint64_t seed = (uint64_t)time(NULL) * 2654435761u + (uint64_t)getpid(), random = seed;
    training r;
    char whole[1024], what[128];
    int killed = 0;
    if (!open_kind(&r, 0, whole)) return;
    double began = tt__seconds();
    CHECK(end(begin(&r, test_folder(), false, 0, false)) == ENDED);
    double seconds = tt__seconds() - began; /* of a whole run: the moments are in it, wherever they fall */
    long operations = shared->calls;
    for (int run = 0; run < 60; run++) {
        char folder[1024];
        snprintf(folder, sizeof folder, "%s", test_folder());
        bool resume = false;
        for (uint32_t times = 1 + test_random(&random) % 3; times; times--) {
            bool chosen = test_random(&random) % 2 == 0;
            long at = chosen ? 1 + test_random(&random) % operations : 0;
            useconds_t moment = (useconds_t)(seconds * 1e6 * (test_random(&random) % 1024) / 1024);
            pid_t child = begin(&r, folder, resume, at, test_random(&random) % 2 == 0);
            if (!chosen) {
                usleep(moment);
                if (child > 0) kill(child, SIGKILL);
            }
            int how = end(child);
            killed += how == KILLED;
            if (how == ENDED) break;
            if (how == FAILED) { /* nothing to resume, or only to resume */
                resume = !resume;
                continue;
            }
            resume = true;
        }
        snprintf(what, sizeof what, "seed %llu, run %d", (unsigned long long)seed, run);
        if (!check_end(&r, whole, folder, what)) break;
        test__remove(folder);
    }
    CHECK(killed >= 10);
    close_kind(&r);
}

static const test_case tests[] = {
    TEST_CASE(killed_at_each_file_operation),
    TEST_CASE(killed_at_random_moments),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
