/* A training is killed at each of its file operations, and at random moments, and resumed: parameters,
   optimizer state, best model and metrics equal those of an undisturbed training bit for bit. Functions that
   read or write files also run while each allocation and each file operation fails once. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"
#include <sys/mman.h>
#include <sys/wait.h>

enum { EPOCHS = 3 };

/* A training that is ready to begin. Each run is a child process that inherits this process's memory. */
typedef struct training {
    tt_context *ctx;
    tt_tokenizer *k;
    tt_dataset *d;
    tt_loader *train, *validation;
    tt_bert m;
    tt_trainer *t;
    bool validates;
    double save_seconds;
    char best[1024]; /* folder of the kept model */
} training;

/* A child's report: number of file operations, number of kept models, last operation, error. */
typedef struct report {
    volatile long calls;
    volatile int kept;
    char operation, error[1024];
} report;

static report *shared;
static long kill_at;   /* number of the operation (from 1) before which this process is killed; 0: none */
static bool kill_half; /* if operation kill_at is a write, the process is killed in its middle */
static tt_files real;

/* Counts a file operation, and kills this process before operation number kill_at. */
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
/* Skips the wait for the disk: data that a killed process wrote can be read without a sync. */
static bool kill_sync(void *u, void *f)
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

/* Opens a training; `o` are the options of its context. */
static bool open_training(training *r, const tt_context_options *o)
{
    static const char vocab[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\ngood\nbad\nfilm\nplot\n";
    static const char texts[] = "text,label\ngood film,pos\nbad film,neg\nplot good good,pos\nfilm bad,neg\n"
                                "bad plot bad,neg\nfilm good,pos\n";
    char folder[1024];
    snprintf(folder, sizeof folder, "%s", test_folder());
    memset(r, 0, sizeof *r);
    r->ctx = tt_open(o);
    const char *path = test_write(test_path(folder, "vocab.txt"), vocab, sizeof vocab - 1);
    r->k = tt_tokenizer_open(r->ctx, path, true);
    path = test_write(test_path(folder, "texts.csv"), texts, sizeof texts - 1);
    r->d = tt_dataset_table(r->ctx, path, NULL, NULL, 0, NULL);
    if (!CHECK(r->k && r->d)) return false;
    tt_loader_options lo = tt_loader_options_default();
    lo.batch = 2;
    lo.max_length = 8;
    lo.threads = 0;
    r->train = tt_loader_new(r->ctx, r->d, r->k, &lo);
    lo.shuffle = false;
    r->validation = tt_loader_new(r->ctx, r->d, r->k, &lo);
    tt_bert_config c = tt_bert_config_default(TT_BERT);
    c.vocab_size = tt_tokenizer_size(r->k);
    c.hidden_size = c.intermediate_size = 4;
    c.layers = c.heads = 1;
    c.max_positions = 8;
    if (!CHECK(r->train && r->validation && tt_bert_new(r->ctx, &r->m, &c) == TT_OK)) return false;
    tt_model model = tt_bert_model(&r->m);
    tt_train_options to = tt_train_options_default();
    to.schedule.lr = 0.02f;
    to.schedule.total_steps = EPOCHS * 3;
    to.max_seqs = tt_loader_max_seqs(r->train);
    to.max_tokens = tt_loader_max_tokens(r->train);
    r->t = tt_trainer_new(r->ctx, &model, &to);
    if (!CHECK(r->t && tt_allocate(r->t->train) == TT_OK)) return false;
    tt_measured_peak(r->ctx); /* measures the peak of this machine here, so that the children inherit the
                                 result */
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

/* Starts a run in a child, which is killed before operation `at` (0: not killed), or, if `half` and the
   operation is a write, in the middle of the write. */
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
    o.keep_states = r->validates ? 2 : 0;
    o.keep = keep;
    o.user = r;
    tt_status status = tt_fit(r->t, tt_loader_source(r->train),
                              tt_loader_source(r->validates ? r->validation : NULL), &o, &finished);
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

/* Finishes a run: resumes it, or begins it if there is nothing to resume. Returns whether the run ended. */
static bool go_on(training *r, const char *folder)
{
    if (end(begin(r, folder, true, 0, false)) == ENDED) return true;
    return end(begin(r, folder, false, 0, false)) == ENDED;
}

/* Returns metrics.csv without its last two columns, time and speed. The caller frees it. */
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

/* Compares all files of two runs. Returns the name of the first file that differs, or NULL. */
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

/* Opens a training: kind 0 saves and validates at every step; kind 1 saves and keeps the model at the end of
   each epoch. */
static bool open_kind(training *r, int kind, char whole[1024])
{
    tt_context_options o = tt_context_options_default();
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
    shared = NULL; /* the parent counts no operations */
    if (!open_training(r, &o)) return false;
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
    /* The plain build kills the run at each file operation. Builds with sanitizers, which are slow, set
       TEST_SWEEP (test.h) and kill the run only at every third operation: sanitizers report nothing about
       a process that was killed, so more kills would find no more errors. */
    const long every = test_every(3);
    for (int kind = 0; kind < 2; kind++) {
        training r;
        char whole[1024], what[128];
        long operations, writes = 0;
        if (!open_kind(&r, kind, whole)) return;
        operations = shared->calls;
        CHECK(operations > (kind == 0 ? 100 : 50));
        for (int half = 0; half < 2; half++)
            for (long at = 1 + half; at <= operations; at += every) {
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
        CHECK(writes * every > 10);
        close_kind(&r);
    }
}

/* Each run is killed one to three times, and then runs to its end. */
TEST(killed_at_random_moments)
{
    uint64_t seed = (uint64_t)time(NULL) * 2654435761u + (uint64_t)getpid(), random = seed;
    training r;
    char whole[1024], what[128];
    int killed = 0;
    if (!open_kind(&r, 0, whole)) return;
    double began = tt__seconds();
    CHECK(end(begin(&r, test_folder(), false, 0, false)) == ENDED);
    double seconds = tt__seconds() - began; /* time of a whole run, within which the random moments fall */
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
            if (how == FAILED) { /* there is no state to resume, or a new run is refused because a state
                                    exists */
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

/* ----------------------------------------------------------------------------- each operation fails once */

typedef struct sweep {
    test_allocator a;
    test_files f;
    tt_context *ctx;
    training r;              /* a training in ctx, for the rows of the table below that train */
    char in[1024], out[1024]; /* folders: `in` holds the input files, which are made once; `out` takes
                                 the output, and is empty before each run */
    int steps;               /* number of steps that tt_fit has done */
    volatile int stop;       /* tells tt_fit to stop */
    int stop_at;             /* the step after which tt_fit stops; 0: none */
} sweep;

static bool sweep_bert(sweep *s)
{
    tt_bert m;
    bool ok = tt_bert_load(s->ctx, &m, test_path(s->in, "bert"), 0) == TT_OK;
    ok = ok && tt_bert_save(&m, s->out) == TT_OK;
    tt_bert_free(&m);
    return ok;
}

static bool sweep_vit(sweep *s)
{
    tt_vit m;
    /* loads with another image size */
    bool ok = tt_vit_load(s->ctx, &m, test_path(s->in, "vit"), 4, 0) == TT_OK;
    ok = ok && tt_vit_save(&m, s->out) == TT_OK;
    tt_vit_free(&m);
    return ok;
}

static bool sweep_tokenizer(sweep *s)
{
    tt_tokenizer *k = tt_tokenizer_load(s->ctx, s->in);
    bool ok = k && tt_tokenizer_save(k, s->out) == TT_OK;
    tt_tokenizer_free(k);
    return ok;
}

static bool sweep_table(sweep *s)
{
    tt_dataset *d = tt_dataset_table(s->ctx, test_path(s->in, "texts.csv"), "train", NULL, 0, NULL);
    tt_dataset *part = d ? tt_dataset_split(d, 2) : NULL;
    tt_dataset_free(part);
    tt_dataset_free(d);
    return part != NULL;
}

static bool sweep_safetensors(sweep *s)
{
    float x[4];
    tt_safetensors *t = tt_safetensors_open(s->ctx, test_path(test_path(s->in, "bert"), "model.safetensors"));
    bool ok = t && tt_safetensors_read_f32(t, 0, 0, 4, x) == TT_OK;
    tt_safetensors_close(t);
    return ok;
}

static bool sweep_trainer(sweep *s)
{
    tt_train_options o = s->r.t->options;
    tt_model model = tt_bert_model(&s->r.m);
    tt_trainer *t = tt_trainer_new(s->ctx, &model, &o);
    tt_trainer_free(t);
    return t != NULL;
}

static bool sweep_evaluation(sweep *s)
{
    tt_stats stats;
    float p[2];
    return tt_evaluate(s->r.t, tt_loader_source(s->r.validation), &stats) == TT_OK &&
           tt_predict_text(s->r.t, s->r.k, "good film", NULL, p) == TT_OK;
}

static tt_status sweep_keep(void *user)
{
    sweep *s = (sweep *)user;
    return tt_bert_save(&s->r.m, test_path(s->out, "best"));
}

static void sweep_report(void *user, const tt_fit_event *e)
{
    sweep *s = (sweep *)user;
    s->steps += !e->validation;
    s->stop = s->stop_at && s->steps == s->stop_at;
}

static bool sweep_train(sweep *s, bool resume)
{
    tt_fit_options o = tt_fit_options_default();
    bool finished;
    s->steps = s->stop = 0;
    o.epochs = 2;
    o.folder = s->out;
    o.resume = resume;
    o.keep = sweep_keep;
    o.report = sweep_report;
    o.stop = &s->stop;
    o.user = s;
    const tt_source *train = tt_loader_source(s->r.train), *validation = tt_loader_source(s->r.validation);
    return tt_fit(s->r.t, train, validation, &o, &finished) == TT_OK && finished == !s->stop_at;
}

static bool sweep_fit(sweep *s) { return sweep_train(s, false); }

/* Resumes a run that was stopped after its second step. */
static bool sweep_resume(sweep *s)
{
    static const char *const files[] = {"state.safetensors", "metrics.csv"};
    for (int k = 0; k < TEST_COUNT(files); k++) {
        size_t n;
        char *bytes = test_read(test_path(test_path(s->in, "run"), files[k]), &n);
        test_write(test_path(s->out, files[k]), bytes, n);
        free(bytes);
    }
    return sweep_train(s, true);
}

/* Resumes a run that failed: nothing that was saved is lost. */
static bool sweep_go_on(sweep *s)
{
    return sweep_train(s, access(test_path(s->out, "state.safetensors"), F_OK) == 0);
}

static bool sweep_open(sweep *s, bool trains)
{
    tt_context_options o = test_options(&s->a);
    o.files = test_failing_files(&s->f, 0, 0);
    if (!trains) return CHECK((s->ctx = tt_open(&o)) != NULL);
    bool ok = open_training(&s->r, &o);
    s->ctx = s->r.ctx;
    return ok && sweep_evaluation(s); /* evaluates once, as the first evaluation allocates memory */
}

static void sweep_close(sweep *s, bool trains)
{
    if (trains) {
        close_training(&s->r);
        CHECK(s->a.live == 0 && s->a.live_bytes == 0);
        pthread_mutex_destroy(&s->a.mutex);
    } else {
        TEST_CLOSE(s->ctx, &s->a);
    }
}

/* Writes the files that the rows of the table below read. */
static bool sweep_inputs(sweep *s)
{
    tt_bert bert;
    tt_vit vit;
    tt_bert_config bc = tt_bert_config_default(TT_DISTILBERT);
    tt_vit_config vc = tt_vit_config_default("Ti/16");
    static const char texts[] = "text,label\na,x\nb,y\nc,x\nd,y\n\"e, f\",x\ng,y\nh,x\n";
    memset(s, 0, sizeof *s);
    snprintf(s->in, sizeof s->in, "%s", test_folder());
    bc.vocab_size = bc.max_positions = 8;
    bc.hidden_size = bc.intermediate_size = vc.hidden_size = vc.intermediate_size = 4;
    bc.layers = bc.heads = vc.layers = vc.heads = 1;
    vc.image_size = 6;
    vc.patch_size = 2;
    vc.classes = 3;
    for (int k = 0; k < 2; k++) { /* each model has its own context, because both models have parameters of
                                     equal names */
        if (!sweep_open(s, false)) return false;
        if (k == 0) CHECK(tt_bert_new(s->ctx, &bert, &bc) == TT_OK);
        else CHECK(tt_vit_new(s->ctx, &vit, &vc) == TT_OK);
        if (k == 0) CHECK(tt_bert_save(&bert, test_path(s->in, "bert")) == TT_OK);
        else CHECK(tt_vit_save(&vit, test_path(s->in, "vit")) == TT_OK);
        if (k == 0) tt_bert_free(&bert);
        else tt_vit_free(&vit);
        sweep_close(s, false);
    }
    test_write(test_path(s->in, "texts.csv"), texts, sizeof texts - 1);
    if (!sweep_open(s, true)) return false;
    bool ok = CHECK(tt_tokenizer_save(s->r.k, s->in) == TT_OK);
    s->stop_at = 2;
    snprintf(s->out, sizeof s->out, "%s", test_path(s->in, "run"));
    ok = CHECK(sweep_train(s, false)) && ok;
    s->stop_at = 0;
    sweep_close(s, true);
    return ok;
}

static bool no_temporary_files(const char *folder)
{
    DIR *d = opendir(folder);
    bool none = true;
    for (struct dirent *e = d ? readdir(d) : NULL; e; e = readdir(d))
        none = none && !tt__match("*.tmp", e->d_name);
    if (d) closedir(d);
    return none;
}

TEST(each_allocation_and_file_operation_fails)
{
    static const struct {
        const char *name;
        /* run: an operation that may fail. again: must succeed after a failure; NULL: not called. */
        bool (*run)(sweep *s), (*again)(sweep *s);
        bool trains;
        int min; /* min number of failures */
    } rows[] = {{"bert", sweep_bert, NULL, false, 80},
                {"vit", sweep_vit, NULL, false, 80},
                {"tokenizer", sweep_tokenizer, sweep_tokenizer, false, 20},
                {"table", sweep_table, sweep_table, false, 8},
                {"safetensors", sweep_safetensors, sweep_safetensors, false, 6},
                {"trainer", sweep_trainer, sweep_trainer, true, 30},
                {"evaluation", sweep_evaluation, sweep_evaluation, true, 1},
                {"fit", sweep_fit, sweep_go_on, true, 60},
                {"resume", sweep_resume, sweep_go_on, true, 60}};
    static const char kinds[] = "aozrwscnl"; /* 'a': an allocation; other letters: operations of test_files */
    static sweep s;
    if (!sweep_inputs(&s)) return;
    for (int row = 0; row < TEST_COUNT(rows); row++) {
        bool trains = rows[row].trains, fine = true;
        int failures = 0;
        if (trains && !(sweep_open(&s, true) && tt_measured_peak(s.ctx) >= 0)) return;
        for (const char *kind = kinds; *kind && fine; kind++)
            for (long at = 1; fine; at++) {
                char text[256];
                snprintf(s.out, sizeof s.out, "%s", test_folder());
                if (!trains && !sweep_open(&s, false)) return;
                long live = s.a.live;
                size_t live_bytes = s.a.live_bytes;
                s.a.failed = false;
                s.a.fail_at = *kind == 'a' ? s.a.calls + at : 0;
                s.f.fail = *kind == 'a' ? 0 : *kind;
                s.f.at = at;
                s.f.calls = 0;
                bool ok = rows[row].run(&s);
                bool failed = *kind == 'a' ? s.a.failed : s.f.calls >= at;
                s.f.fail = 0;
                s.a.fail_at = 0;
                snprintf(text, sizeof text, "%s, %c %ld: %s, %s", rows[row].name, *kind, at,
                         failed ? "failed" : "did not fail", ok ? "went well" : "");
                bool ignored = ok && *kind == 'c'; /* a failed close of a file that was read is no error */
                fine = test__check(ok == !failed || ignored, __FILE__, __LINE__, text);
                if (!ok) {
                    tt_status status = *kind == 'a' ? TT_ERR_MEMORY : TT_ERR_FILE;
                    CHECK_ERROR(s.ctx, status, *kind == 'a' ? "memory" : "injected");
                    fine = fine && test__check(no_temporary_files(s.out), __FILE__, __LINE__, text);
                    failures++;
                    bool works = !rows[row].again || rows[row].again(&s);
                    if (!works)
                        snprintf(text, sizeof text, "%s, after %c %ld failed: %.180s", rows[row].name, *kind,
                                 at, tt_error(s.ctx));
                    fine = test__check(works, __FILE__, __LINE__, text) && fine;
                }
                if (trains) fine = CHECK(s.a.live == live && s.a.live_bytes == live_bytes) && fine;
                else sweep_close(&s, false);
                test__remove(s.out);
                if (!failed) break;
            }
        if (trains) sweep_close(&s, true);
        CHECK(failures >= rows[row].min || !fine);
    }
}

static const test_case tests[] = {
    TEST_CASE(killed_at_each_file_operation), TEST_CASE(killed_at_random_moments),
    TEST_CASE(each_allocation_and_file_operation_fails),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
