/* A small model of texts for tests, its trainer, and comparisons of two runs. */
#pragma once

/* -------------------------------------------------------------------------------------------- a small run */

enum { TEXTS = 52, BATCH = 8 }; /* an epoch has seven steps, the last with four texts */

/* Writes a table of texts from the words of tests/golden/vocab_uncased.txt, some of which only one class
   uses. The returned path stays valid. */
static const char *texts(void)
{
    static char path[1024];
    static const char *const own[2][6] = {
        {"bad", "worst", "never", "unhappy", "noir", "ending"},
        {"good", "great", "love", "happy", "best", "cafe"}};
    static const char *const common[] = {"the",  "film",  "movie",  "was",     "is",   "and",  "of",
                                         "plot", "story", "acting", "watched", "2023", "play", "director"};
    uint64_t random = 12345;
    if (path[0]) return path;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "texts.csv"));
    FILE *f = fopen(path, "w");
    if (!f) { perror(path); exit(2); }
    fprintf(f, "text,label\n");
    for (int k = 0; k < TEXTS; k++) {
        int words = 2 + (int)(test_random(&random) % 17);
        for (int w = 0; w < words; w++) {
            bool telling = w == 0 || test_random(&random) % 3 == 0;
            fprintf(f, "%s%s", w ? " " : "",
                    telling ? own[k % 2][test_random(&random) % 6] : common[test_random(&random) % 14]);
        }
        fprintf(f, ",%s\n", k % 2 ? "pos" : "neg");
    }
    fclose(f);
    return path;
}

typedef struct setup {
    uint64_t seed;
    int threads, hidden, layers, intermediate;
    float dropout;
    const char *precision, *residual;
    tt_loss_scale loss_scale;
    tt_optimizer_options optimizer;
    tt_schedule schedule;
    int batch, accumulate, max_tokens;
    bool accumulating;          /* sets o.compile.accumulate, also for one micro-batch */
    bool train;
    size_t memory_budget;
    const char *device;
    tt_parallel parallel;
    test_files *files;          /* file hooks that fail; NULL: the default hooks */
} setup;

static setup small(void)
{
    setup s;
    memset(&s, 0, sizeof s);
    s.seed = 7;
    s.threads = 1;
    s.hidden = 24;
    s.layers = 2;
    s.intermediate = 40;
    s.parallel = tt_parallel_default();
    s.dropout = 0.1f;
    s.precision = "32-true";
    s.loss_scale = tt_loss_scale_default();
    s.loss_scale.init = 256; /* no step is skipped */
    s.optimizer = tt_train_options_default().compile.optimizer;
    s.schedule.kind = TT_COSINE;
    s.schedule.lr = 2e-3f;
    s.schedule.warmup_steps = 3;
    s.schedule.total_steps = 30;
    s.batch = BATCH;
    s.accumulate = 1;
    s.train = true;
    return s;
}

typedef struct rank_group {
    test_allocator a;
    tt_context *ctx;
    tt_tokenizer *k;
    tt_dataset *d;
    tt_loader *l, *all; /* l: shuffled; all: in the order of the dataset */
    tt_bert m;
    tt_trainer *r;
    tt_progress progress;
} rank_group;

static tt_train_options train_options(const setup *s, const tt_loader *l)
{
    tt_train_options o = tt_train_options_default();
    o.compile.train = s->train;
    o.schedule = s->schedule;
    o.compile.optimizer = s->optimizer;
    o.compile.precision = s->precision;
    o.compile.residual = s->residual;
    o.compile.loss_scale = s->loss_scale;
    o.max_seqs = tt_loader_max_seqs(l);
    o.max_tokens = tt_loader_max_tokens(l);
    o.compile.accumulate = s->accumulating || s->accumulate > 1 || s->max_tokens;
    o.compile.device = s->device;
    o.compile.parallel = s->parallel;
    if (s->parallel.groups) o.compile.accumulate = s->accumulating || tt_loader_accumulates(l);
    o.compile.memory_budget = s->memory_budget;
    return o;
}

static bool open_world(rank_group *w, const setup *s)
{
    memset(w, 0, sizeof *w);
    tt_context_options o = test_options(&w->a);
    o.seed = s->seed;
    o.threads = s->threads;
    if (s->files) o.files = test_failing_files(s->files, 0, 0);
    w->ctx = tt_open(&o);
    w->k = tt_tokenizer_open(w->ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    w->d = tt_dataset_table(w->ctx, texts(), NULL, NULL, 0, NULL);
    if (!CHECK(w->k && w->d)) return false;
    tt_loader_options lo = tt_loader_options_default();
    lo.batch = s->batch;
    lo.accumulate = s->accumulate;
    lo.max_length = 24;
    lo.max_tokens = s->max_tokens;
    lo.window = 3;
    tt_compile_options co = tt_compile_options_default();
    co.device = s->device;
    co.parallel = s->parallel;
    if (!CHECK(tt_check_options(w->ctx, &co) == TT_OK)) return false;
    lo.parallel = co.parallel;
    w->l = tt_loader_new(w->ctx, w->d, w->k, &lo);
    lo.shuffle = false;
    lo.threads = 0;
    w->all = tt_loader_new(w->ctx, w->d, w->k, &lo);
    if (!CHECK(w->l && w->all)) return false;
    tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
    c.vocab_size = tt_tokenizer_size(w->k);
    c.hidden_size = s->hidden;
    c.layers = s->layers;
    c.heads = 3;
    c.intermediate_size = s->intermediate;
    c.max_positions = 24;
    c.initializer_range = 0.2f;
    c.dropout = c.attention_dropout = c.classifier_dropout = s->dropout;
    if (!CHECK(tt_bert_new(w->ctx, &w->m, &c) == TT_OK)) return false;
    tt_model model = tt_bert_model(&w->m);
    tt_train_options to = train_options(s, w->l);
    w->r = tt_trainer_new(w->ctx, &model, &to);
    if (!w->r) CHECK_ERROR(w->ctx, TT_OK, "a trainer");
    return w->r != NULL;
}

static void close_world(rank_group *w)
{
    tt_trainer_free(w->r);
    tt_bert_free(&w->m);
    tt_loader_free(w->all);
    tt_loader_free(w->l);
    tt_dataset_free(w->d);
    tt_tokenizer_free(w->k);
    TEST_CLOSE(w->ctx, &w->a);
}

/* Trains n steps from w->progress on, across the ends of epochs. */
static tt_status train(rank_group *w, int n, tt_stats *last)
{
    tt_batch b;
    tt_stats stats;
    bool updated;
    tt_status status = tt_loader_seek(w->l, w->progress.epoch, w->progress.step);
    while (n > 0 && status == TT_OK) {
        if (!tt_loader_next(w->l, &b)) {
            if (tt_error_code(w->ctx) != TT_OK) return tt_error_code(w->ctx);
            w->progress.epoch++;
            w->progress.step = 0;
            w->progress.loss_sum = w->progress.targets = w->progress.correct = 0;
            status = tt_loader_seek(w->l, w->progress.epoch, 0);
            continue;
        }
        status = tt_train_batch(w->r, &b, &stats, &updated);
        if (status != TT_OK || !updated) continue;
        w->progress.step++;
        w->progress.loss_sum += stats.loss * stats.targets;
        w->progress.targets += stats.targets;
        w->progress.correct += stats.correct;
        if (last) *last = stats;
        n--;
    }
    return status;
}

/* Copies everything that a step changes: parameters, optimizer state, accumulated gradients, the number of
   steps, the loss scale. The caller frees the copy. */
static char *snapshot(const rank_group *w, size_t *bytes)
{
    tt_program *p = w->r->train;
    const int64_t numbers[4] = {p->run.step, (int64_t)p->results.scale.good_steps,
                                (int64_t)p->results.scale.skipped, (int64_t)p->results.scale.scale};
    char *copy = (char *)calloc(1, (p->arena->allocated ? p->arena->persistent : 0) + sizeof numbers);
    memcpy(copy, numbers, sizeof numbers);
    *bytes = sizeof numbers;
    CHECK(!p->arena->allocated || tt__zero_states(p) == TT_OK);
    for (int32_t v = 1; v < p->built.t->n_values && p->arena->allocated; v++) {
        const tt__tape_value *x = &p->built.t->values[v];
        if (!x->persistent || x->base != v || x->storage == TT__STEP) continue;
        tt__mat m = tt__resolve(p, 0, v);
        memcpy(copy + *bytes, m.data, (size_t)(m.rows * m.ld) * tt_dtype_bytes(m.dtype));
        *bytes += (size_t)(m.rows * m.ld) * tt_dtype_bytes(m.dtype);
    }
    return copy;
}

static bool same_snapshots(char *a, size_t n, char *b, size_t m) /* compares two snapshots and frees both */
{
    bool same = n == m && memcmp(a, b, n) == 0;
    free(a);
    free(b);
    return same;
}

static bool same_worlds(const rank_group *a, const rank_group *b)
{
    size_t n, m;
    char *x = snapshot(a, &n), *y = snapshot(b, &m);
    return same_snapshots(x, n, y, m);
}

static bool same_files(const char *a, const char *b)
{
    size_t n, m;
    char *x = test_read(a, &n), *y = test_read(b, &m);
    return x && y ? same_snapshots(x, n, y, m) : (free(x), free(y), false);
}
