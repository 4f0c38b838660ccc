/* Steps of micro-batches, evaluation, prediction, the state of a run and its faults: tests of >>trainer. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

#include <sys/wait.h>

/* -------------------------------------------------------------------------------------------- a small run */

enum { TEXTS = 52, BATCH = 8 }; /* an epoch is seven steps, the last of four texts */

/* Texts of the words of tests/golden/vocab_uncased.txt, each class with words of its own, as a table; path
   valid for long. */
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
    bool accumulating;          /* the trainer's option                                                     */
    bool train;
    size_t memory_budget;
    const char *device;
    tt_parallel parallel;
    test_files *files;          /* hooks that fail; NULL: the default ones                                  */
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

typedef struct world {
    test_allocator a;
    tt_context *ctx;
    tt_tokenizer *k;
    tt_dataset *d;
    tt_loader *l, *all; /* shuffled; in the order of the dataset */
    tt_bert m;
    tt_trainer *r;
    tt_progress progress;
} world;

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

static bool open_world(world *w, const setup *s)
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
    tt_model model = tt_bert_classifier(&w->m);
    tt_train_options to = train_options(s, w->l);
    w->r = tt_trainer_new(w->ctx, &model, &to);
    if (!w->r) CHECK_ERROR(w->ctx, TT_OK, "a trainer");
    return w->r != NULL;
}

static void close_world(world *w)
{
    tt_trainer_free(w->r);
    tt_bert_free(&w->m);
    tt_loader_free(w->all);
    tt_loader_free(w->l);
    tt_dataset_free(w->d);
    tt_tokenizer_free(w->k);
    TEST_CLOSE(w->ctx, &w->a);
}

/* Trains n steps from where w->progress stands, over the ends of epochs. */
static tt_status train(world *w, int n, tt_stats *last)
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

/* All that a step changes: parameters, optimizer state, gradients that are gathered, the number of steps, the
   loss scale. To be freed. */
static char *snapshot(const world *w, size_t *bytes)
{
    tt_program *p = w->r->train;
    const int64_t numbers[4] = {p->run.step, (int64_t)p->results.scale.good_steps,
                                (int64_t)p->results.scale.skipped, (int64_t)p->results.scale.scale};
    char *copy = (char *)calloc(1, (p->arena->allocated ? p->arena->persistent : 0) + sizeof numbers);
    memcpy(copy, numbers, sizeof numbers);
    *bytes = sizeof numbers;
    CHECK(!p->arena->allocated || tt__zero_states(p) == TT_OK);
    for (int32_t v = 1; v < p->built.t->n_values && p->arena->allocated; v++) {
        const tt__value *x = &p->built.t->values[v];
        if (!x->persistent || x->base != v || x->storage == TT__STEP) continue;
        tt__mat m = tt__resolve(p, 0, v);
        memcpy(copy + *bytes, m.data, (size_t)(m.rows * m.ld) * tt_dtype_bytes(m.dtype));
        *bytes += (size_t)(m.rows * m.ld) * tt_dtype_bytes(m.dtype);
    }
    return copy;
}

static bool same_snapshots(char *a, size_t n, char *b, size_t m) /* frees both */
{
    bool same = n == m && memcmp(a, b, n) == 0;
    free(a);
    free(b);
    return same;
}

static bool same_worlds(const world *a, const world *b)
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

/* ----------------------------------------------------------------------------------------------- training */

TEST(loss_falls)
{
    setup s = small();
    world w;
    tt_stats before, after, last;
    s.threads = 2;
    s.schedule.total_steps = 60;
    if (!open_world(&w, &s)) return;
    CHECK(tt_evaluate(w.r, tt_loader_source(w.all), &before) == TT_OK && tt_trainer_steps(w.r) == 0);
    CHECK(train(&w, 56, &last) == TT_OK);
    CHECK(w.progress.epoch == 7 && w.progress.step == 7 && w.progress.targets == TEXTS);
    CHECK(tt_evaluate(w.r, tt_loader_source(w.all), &after) == TT_OK);
    CHECK(before.targets == TEXTS && after.targets == TEXTS && after.step == 56);
    CHECK(after.loss < 0.2 * before.loss && after.correct >= TEXTS - 1 && before.correct < TEXTS - 8);
    CHECK(last.flops > 0 && last.grad_norm > 0 && last.step == 56);
    close_world(&w);
}

TEST(schedule_and_steps)
{
    setup s = small();
    world w;
    if (!open_world(&w, &s)) return;
    CHECK(tt_trainer_lr(w.r) == 0); /* step 0 of a warm-up, as in transformers */
    CHECK(train(&w, 1, NULL) == TT_OK && tt_trainer_steps(w.r) == 1);
    CHECK_NEAR(tt_trainer_lr(w.r), 2e-3 / 3, 1e-9);
    CHECK(train(&w, 2, NULL) == TT_OK);
    CHECK_NEAR(tt_trainer_lr(w.r), 2e-3, 1e-9);
    CHECK(train(&w, 10, NULL) == TT_OK);
    CHECK_NEAR(tt_trainer_lr(w.r), 2e-3 * 0.5 * (1 + cos(3.14159265358979 * 10 / 27)), 1e-9);
    CHECK(tt_trainer_steps(w.r) == 13);
    close_world(&w);
}

TEST(options_refused_together)
{
    setup s = small();
    world w;
    if (!open_world(&w, &s)) return;
    tt_model model = tt_bert_classifier(&w.m);
    tt_train_options o = tt_train_options_default();
    size_t held = tt_allocated_bytes(w.ctx);
    CHECK(tt_trainer_new(w.ctx, &model, NULL) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT,
                "train options: total_steps must be set for a schedule that decays; max_seqs is 0: set it, "
                "for example from tt_loader_max_seqs");
    o.schedule.kind = TT_COSINE;
    o.schedule.lr = -1;
    o.schedule.min_lr = 2;
    o.schedule.warmup_steps = 9;
    o.schedule.total_steps = 5;
    o.max_seqs = 5;
    o.max_tokens = 4;
    o.label_smoothing = 1;
    o.compile.precision = "fp4";
    o.compile.residual = "f32";
    o.compile.optimizer.beta1 = 1;
    o.compile.optimizer.weight_decay = -2;
    o.compile.optimizer.clip_norm = NAN;
    model.record = NULL;
    CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
    static const char *const parts[] = {
        "train options: ",
        "lr -1 is not a finite number >= 0",
        "min_lr 2 is not in [0, lr]",
        "warmup_steps 9 exceeds total_steps 5",
        "max_tokens 4 is less than max_seqs 5",
        "the model has no function `record`",
        "label_smoothing 1 is not in [0, 1)",
        "precision 'fp4' is unknown: use 32-true, 16-mixed, 16-true, bf16-mixed or bf16-true",
        "beta1 1 is not in [0, 1)",
        "weight_decay -2 is negative",
        "clip_norm nan is negative"};
    for (int k = 0; k < TEST_COUNT(parts); k++) CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, parts[k]);
    o = train_options(&s, w.l);
    o.compile.precision = "16-mixed";
    o.compile.residual = "fp32";
    o.compile.loss_scale.interval = -1;
    model = tt_bert_classifier(&w.m);
    CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "train options: residual 'fp32' is unknown: use f32 or 16-bit");
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "; loss_scale: interval -1 is less than 1");
    o = train_options(&s, w.l);
    o.schedule.kind = (tt_schedule_kind)9;
    o.schedule.lr = INFINITY;
    o.schedule.warmup_steps = -1;
    o.compile.optimizer.kind = (tt_optimizer_kind)9;
    model = tt_bert_classifier(&w.m);
    CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT,
                "lr inf is not a finite number >= 0; schedule 9 is unknown; warmup_steps is -1; optimizer "
                "options: kind 9 is unknown");
    CHECK(tt_allocated_bytes(w.ctx) == held); /* nothing was left behind */
    o = train_options(&s, w.l);
    o.compile.optimizer.kind = TT_SGD;
    o.compile.optimizer.nesterov = true;
    CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "nesterov needs a momentum above 0");
    o = train_options(&s, w.l);
    tt_trainer *other = tt_trainer_new(w.ctx, &model, &o);
    CHECK(other != NULL);
    o.compile.share = tt_trainer_program(other);
    CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "train options: compile.share is set, and a trainer has an arena");
    tt_trainer_free(other);
    close_world(&w);
}

TEST(micro_batches_equal_one_batch) /* of 16, as 4 x 4, as 16 x 1, and cut by max_tokens */
{
    static const struct { int accumulate, max_tokens; } rows[] = {{1, 0}, {4, 0}, {16, 0}, {1, 60}, {3, 60}};
    world w[TEST_COUNT(rows)];
    tt_stats stats[TEST_COUNT(rows)];
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        setup s = small();
        s.dropout = 0; /* its masks depend on the micro-batch */
        s.batch = 16;
        s.accumulate = rows[k].accumulate;
        s.max_tokens = rows[k].max_tokens;
        /* Parameters move with the gradient; Adam would divide rounding by itself. */
        s.optimizer.kind = TT_SGD;
        s.schedule.kind = TT_CONSTANT;
        s.schedule.lr = 0.1f;
        s.schedule.warmup_steps = 0;
        s.optimizer.clip_norm = 0.5f;
        if (!open_world(&w[k], &s)) return;
        CHECK(tt_loader_max_seqs(w[k].l) == (int)tt__ceil_div(16, rows[k].accumulate));
        /* Over the end of an epoch of four steps, the last of four texts. */
        CHECK(train(&w[k], 5, &stats[k]) == TT_OK);
        CHECK(w[k].progress.epoch == 1 && w[k].progress.step == 1);
        CHECK(stats[k].targets == 16 && stats[k].correct == stats[0].correct && stats[k].step == 5);
        CHECK_NEAR(stats[k].loss, stats[0].loss, 1e-5);
        CHECK_NEAR(stats[k].grad_norm, stats[0].grad_norm, 1e-4 * stats[0].grad_norm);
        for (int p = 0; p < w[0].ctx->n_params; p++) {
            const tt_param *a = w[0].ctx->params[p], *b = w[k].ctx->params[p];
            const float *x = (const float *)(const void *)tt__param_memory(a, 0),
                        *y = (const float *)(const void *)tt__param_memory(b, 0);
            double worst = 0;
            for (int64_t i = 0; i < a->size; i++)
                if (worst == worst && !(fabs(x[i] - y[i]) <= worst)) worst = fabs(x[i] - y[i]);
            CHECK_NEAR(worst, 0, 1e-5);
        }
    }
    for (int k = 0; k < TEST_COUNT(rows); k++) close_world(&w[k]);
}

TEST(max_tokens_splits_steps)
{
    setup s = small();
    world w;
    tt_batch b;
    tt_stats stats;
    bool updated;
    int micro = 0, updates = 0, seqs = 0;
    s.batch = 16;
    s.max_tokens = 40;
    if (!open_world(&w, &s)) return;
    CHECK(tt_loader_max_tokens(w.l) == 40);
    while (tt_loader_next(w.l, &b)) {
        CHECK(b.rows <= 40);
        CHECK(tt_train_batch(w.r, &b, &stats, &updated) == TT_OK && updated == b.last_of_step);
        micro++;
        seqs += b.seqs;
        updates += updated;
        CHECK(tt_trainer_steps(w.r) == updates);
        if (!updated) { /* between the micro-batches of a step */
            CHECK(stats.grad_norm == 0);
            CHECK(tt_trainer_save(w.r, "/no/such/file", &w.progress) == TT_ERR_ARGUMENT);
            CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT,
                        "the state can be saved between steps, not between the micro-batches of one");
        }
    }
    CHECK(updates == 4 && seqs == TEXTS && micro > 12);
    close_world(&w);
}

/* A trainer that was planned for short texts is told of longer ones before it begins, not in the middle. */
TEST(loaders_that_do_not_fit)
{
    setup s = small();
    world w;
    tt_stats stats;
    bool finished = true;
    tt_loader_options lo = tt_loader_options_default();
    tt_fit_options o = tt_fit_options_default();
    if (!open_world(&w, &s)) return;
    lo.batch = BATCH;
    lo.threads = 0;
    lo.max_length = 5;
    tt_loader *brief = tt_loader_new(w.ctx, w.d, w.k, &lo);
    lo.max_length = lo.max_tokens = 24;
    tt_loader *split = tt_loader_new(w.ctx, w.d, w.k, &lo);
    tt_model model = tt_bert_classifier(&w.m);
    tt_train_options to = train_options(&s, brief);
    tt_trainer *r = tt_trainer_new(w.ctx, &model, &to);
    REQUIRE(brief && split && r && tt_loader_max_tokens(brief) < tt_loader_max_tokens(w.all));
    CHECK(tt_evaluate(r, tt_loader_source(w.all), &stats) == TT_ERR_SHAPE);
    CHECK_ERROR(w.ctx, TT_ERR_SHAPE, "micro-batches to evaluate have up to 8 sequences and ");
    CHECK(tt_fit(r, tt_loader_source(brief), tt_loader_source(w.all), &o, &finished) == TT_ERR_SHAPE &&
          !finished && tt_trainer_steps(r) == 0);
    CHECK_ERROR(w.ctx, TT_ERR_SHAPE, "micro-batches for validation have up to 8 sequences");
    CHECK(tt_fit(r, tt_loader_source(w.l), tt_loader_source(brief), &o, &finished) == TT_ERR_SHAPE &&
          tt_trainer_steps(r) == 0);
    CHECK_ERROR(w.ctx, TT_ERR_SHAPE, "max_tokens = 40: make it for the largest of all its sources");
    CHECK(tt_fit(w.r, tt_loader_source(split), tt_loader_source(w.all), &o, &finished) == TT_ERR_ARGUMENT &&
          tt_trainer_steps(w.r) == 0);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "make the trainer with accumulate = true");
    CHECK(tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(brief), &o, &finished) == TT_OK && finished);
    tt_trainer_free(r);
    tt_loader_free(split);
    tt_loader_free(brief);
    close_world(&w);
}

/* What the data says: names of classes, and the room that micro-batches need. */
TEST(names_and_room_from_the_data)
{
    setup s = small();
    world w;
    tt_train_options o = tt_train_options_default();
    if (!open_world(&w, &s)) return;
    CHECK(strcmp(w.m.class_names[1], "LABEL_1") == 0 && tt_bert_name_classes(&w.m, w.d) == TT_OK);
    CHECK(strcmp(w.m.class_names[0], "neg") == 0 && strcmp(w.m.class_names[1], "pos") == 0);
    const char *name = w.d->classes[1];
    char longer[65];
    memset(longer, 'x', sizeof longer);
    longer[64] = 0;
    w.d->classes[0] = "other", w.d->classes[1] = longer;
    CHECK(tt_bert_name_classes(&w.m, w.d) == TT_ERR_ARGUMENT && strcmp(w.m.class_names[0], "neg") == 0);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "xxx...' has more than 63 bytes");
    w.d->classes[0] = "neg", w.d->classes[1] = name;
    w.d->n_classes = 1;
    CHECK(tt_bert_name_classes(&w.m, w.d) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "the dataset has 1 classes, the model 2");
    w.d->n_classes = 2;

    tt_source train = *tt_loader_source(w.l), other = train;
    CHECK(tt_loader_source(NULL) == NULL && train.max_seqs == BATCH &&
          train.max_tokens == tt_loader_max_tokens(w.l));
    other.max_tokens++;
    other.max_seqs--;
    other.accumulates = true;
    tt_train_options_make_room(&o, &train, &other);
    CHECK(o.max_seqs == BATCH && o.max_tokens == train.max_tokens + 1 && !o.compile.accumulate);
    tt_train_options_make_room(&o, &other, NULL);
    CHECK(o.max_seqs == BATCH && o.max_tokens == train.max_tokens + 1 && o.compile.accumulate);
    close_world(&w);
}

TEST(steps_of_several_micro_batches_need_accumulate)
{
    setup s = small();
    world w;
    tt_batch b;
    bool updated = true;
    if (!open_world(&w, &s)) return;
    REQUIRE(tt_loader_next(w.l, &b));
    b.last_of_step = false;
    CHECK(tt_train_batch(w.r, &b, NULL, &updated) == TT_ERR_ARGUMENT && !updated);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT,
                "last_of_step is not set in the batch: a step of several micro-batches needs a trainer made "
                "with accumulate = true");
    CHECK(train(&w, 2, NULL) == TT_OK); /* of another size, and nothing is left of the first */
    close_world(&w);
}

/* Predictions need no labels, training does. What is not finite is an error that names the parameter. */
TEST(predictions_without_labels_and_of_nan)
{
    setup s = small();
    world w;
    tt_batch b;
    float with[2 * BATCH], without[2 * BATCH];
    if (!open_world(&w, &s)) return;
    REQUIRE(tt_allocate(w.r->train) == TT_OK);
    size_t untouched = 0;
    /* No more than parameters is touched before the first step. */
    for (int32_t v = 1, seen = 0; v < w.r->train->built.t->n_values && seen < 3; v++) {
        const tt__value *x = &w.r->train->built.t->values[v];
        const unsigned char *memory = (const unsigned char *)tt__resolve(w.r->train, 0, v).data;
        if (x->storage != TT__STATE || x->base != v) continue;
        seen++;
        for (size_t k = 0; k < tt__storage_bytes(x) &&
                           memory + k < (unsigned char *)w.r->train->arena->memory[0] + TEST_GARBAGE - 64;
             k++, untouched++)
            CHECK(memory[k] == 0xA5);
    }
    CHECK(untouched > 0);
    REQUIRE(tt_loader_next(w.all, &b));
    b.last_of_step = true;
    CHECK(tt_predict(w.r, &b, with) == TT_OK);
    b.labels = NULL;
    CHECK(tt_predict(w.r, &b, without) == TT_OK &&
          memcmp(with, without, sizeof(float) * 2 * (size_t)b.seqs) == 0);
    CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "the batch has no labels (NULL)");
    REQUIRE(tt_loader_seek(w.all, 0, 0) == TT_OK && tt_loader_next(w.all, &b));
    b.last_of_step = true;
    tt_param *last = w.ctx->params[w.ctx->n_params - 1];
    float *values = (float *)calloc((size_t)tt_param_size(last), sizeof *values);
    values[0] = NAN;
    CHECK(tt_param_set(last, values) == TT_OK);
    CHECK(tt_predict(w.r, &b, with) == TT_ERR_NUMERIC);
    CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "is not finite: parameter '");
    CHECK(strstr(tt_error(w.ctx), last->name) != NULL);
    CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_NUMERIC);
    CHECK(strstr(tt_error(w.ctx), last->name) != NULL);
    free(values);
    close_world(&w);
}

TEST(batches_that_do_not_fit)
{
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        setup s = small();
        world w, undisturbed;
        tt_batch b, good;
        float p[2 * BATCH];
        static int32_t zeros[2000], starts[200];
        s.accumulating = accumulate;
        if (!open_world(&w, &s) || !open_world(&undisturbed, &s)) return;
        for (int k = 0; k < 200; k++) starts[k] = k;
        REQUIRE(tt_loader_next(w.all, &good));
        b = good;
        b.seqs = 0;
        CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_ARGUMENT);
        CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "the batch is empty (0 sequences,");
        b.ids = b.positions = b.types = b.labels = zeros;
        b.seq_start = starts;
        b.seqs = b.rows = BATCH + 1; /* more sequences than max_seqs: found after the tokens were taken */
        CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_SHAPE);
        CHECK_ERROR(w.ctx, TT_ERR_SHAPE, "for input 'seq_start'");
        CHECK(tt_predict(w.r, &b, p) == TT_ERR_SHAPE);
        b.seqs = INT_MAX; /* whose starts are one more */
        CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_SHAPE);
        CHECK_ERROR(w.ctx, TT_ERR_SHAPE, " 2147483648 rows for input 'seq_start'");
        b.seqs = 1;
        b.rows = BATCH * 24 + 1;
        CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_SHAPE);
        CHECK_ERROR(w.ctx, TT_ERR_SHAPE, "for input 'ids'");
        b = good;
        b.labels = zeros;
        zeros[0] = 2; /* of classes 0 and 1 */
        CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_ARGUMENT);
        zeros[0] = 0;
        CHECK(tt_predict(w.r, &good, p) == TT_OK);
        CHECK(train(&w, 3, NULL) == TT_OK && train(&undisturbed, 3, NULL) == TT_OK);
        CHECK(same_worlds(&w, &undisturbed)); /* as if nothing had been */
        close_world(&w);
        close_world(&undisturbed);
    }
}

TEST(same_bits_for_any_number_of_threads)
{
    world w[3];
    for (int k = 0; k < 3; k++) {
        setup s = small();
        s.threads = 1 + k;
        s.precision = "bf16-true";
        if (!open_world(&w[k], &s)) return;
        CHECK(train(&w[k], 9, NULL) == TT_OK);
        CHECK(same_worlds(&w[0], &w[k]));
    }
    for (int k = 0; k < 3; k++) close_world(&w[k]);
}

/* ------------------------------------------------------------------------------ evaluation and prediction */

TEST(evaluation_changes_nothing)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};
    for (int k = 0; k < 10; k++) {
        setup s = small();
        world a, b;
        tt_stats first, second;
        tt_batch micro;
        s.precision = precisions[k % 5];
        s.accumulate = k < 5 ? 1 : 4;
        if (!open_world(&a, &s) || !open_world(&b, &s)) return;
        CHECK(tt_evaluate(a.r, tt_loader_source(a.all), &first) == TT_OK);
        CHECK(train(&a, 4, NULL) == TT_OK && train(&b, 4, NULL) == TT_OK);
        CHECK(tt_evaluate(a.r, tt_loader_source(a.all), &first) == TT_OK &&
              tt_evaluate(a.r, tt_loader_source(a.all), &second) == TT_OK);
        memset(&second, 0, sizeof second);
        CHECK(tt_loader_seek(a.all, 0, 0) == TT_OK);
        while (tt_loader_next(a.all, &micro)) CHECK(tt_evaluate_batch(a.r, &micro, &second) == TT_OK);
        CHECK(memcmp(&first, &second, sizeof first) == 0 && first.targets == TEXTS && first.grad_norm == 0 &&
              first.step == 4);
        CHECK(same_worlds(&a, &b));
        if (k >= 5) { /* also within a step */
            for (int i = 0; i < 4 && tt_loader_next(a.l, &micro); i++) {
                CHECK(tt_train_batch(a.r, &micro, NULL, NULL) == TT_OK);
                CHECK(tt_evaluate(a.r, tt_loader_source(a.all), &second) == TT_OK);
            }
            a.progress.step++;
            CHECK(train(&b, 1, NULL) == TT_OK && tt_trainer_steps(a.r) == 5);
        }
        CHECK(train(&a, 5, NULL) == TT_OK && train(&b, 5, NULL) == TT_OK);
        CHECK(same_worlds(&a, &b));
        close_world(&a);
        close_world(&b);
    }
}

TEST(evaluation_does_not_depend_on_the_batches)
{
    setup s = small(), other = small();
    world a, b;
    tt_stats x = {0}, y = {0};
    other.max_tokens = 30;
    if (!open_world(&a, &s) || !open_world(&b, &other)) return;
    CHECK(tt_evaluate(a.r, tt_loader_source(a.all), &x) == TT_OK &&
          tt_evaluate(b.r, tt_loader_source(b.all), &y) == TT_OK);
    CHECK_NEAR(x.loss, y.loss, 1e-6);
    CHECK(x.correct == y.correct && x.targets == y.targets);
    CHECK(tt_evaluate(a.r, tt_loader_source(a.l), &y) == TT_OK); /* a shuffled loader: the same texts */
    CHECK_NEAR(x.loss, y.loss, 1e-6);
    CHECK(x.correct == y.correct && x.targets == y.targets);
    close_world(&a);
    close_world(&b);
}

/* A linear classifier of eight rows, in micro-batches of any sizes. */
enum { LINEAR_ROWS = 8, LINEAR_CLASSES = 4 };

static tt_value linear_record(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    const int64_t rows = tt_axis(t, "sequences", o->max_seqs);
    tt_inputs in;
    memset(&in, 0, sizeof in);
    tt_value x = tt_input(t, "x", TT_F32, rows, 3);
    in.labels = tt_input(t, "labels", TT_I32, rows, 1);
    *output = tt_linear(t, x, (tt_param *)(uintptr_t)self, NULL);
    return tt__classify(t, *output, &in, o);
}

/* The whole step has PyTorch's loss and gradient: CrossEntropyLoss(weight, label_smoothing) of all rows, and
   two steps of SGD(lr=0.5). An evaluation has the loss without both. */
TEST(weights_and_smoothing_as_pytorchs)
{
    static const struct { bool weighted; float smoothing; double loss[2], w[12]; } of[] = {
        {false, 0, {1.3950207, 1.3535729},
         {-0.556213, -0.090495, 0.337935, -0.020798, 0.217820, -0.647685, 0.577939, -0.334858, -0.006728,
          -0.200928, 0.207532, 0.516478}},
        {false, 0.1f, {1.4101769, 1.3735828},
         {-0.554848, -0.101221, 0.323443, -0.013332, 0.225760, -0.631739, 0.567646, -0.330683, -0.011736,
          -0.199466, 0.206145, 0.520032}},
        {true, 0, {1.2334811, 1.1856371},
         {-0.594776, -0.103254, 0.278950, -0.056813, 0.213286, -0.708403, 0.694846, -0.356896, 0.092687,
          -0.243257, 0.246864, 0.536766}},
        {true, 0.1f, {1.3194181, 1.2806775},
         {-0.588614, -0.111479, 0.266871, -0.043731, 0.217993, -0.681807, 0.669806, -0.348197, 0.079394,
          -0.237461, 0.241683, 0.535542}},
        {true, 0.3f, {1.4912920, 1.4641317},
         {-0.576401, -0.127902, 0.242804, -0.017628, 0.227502, -0.628767, 0.619940, -0.330961, 0.052941,
          -0.225911, 0.231360, 0.533022}}};
    static const struct { const char *device; int rows[4]; } ways[] = {
        {"cpu", {8}}, {"cpu", {2, 2, 2, 2}}, {"cpu", {1, 4, 3}}, {"cpu*2", {3, 5}}, {"cpu*2", {4, 1, 2, 1}}};
    static const int32_t labels[] = {0, 0, 0, 0, 1, 1, 2, 0};
    static const float weights[] = {0.5f, 1.5f, 2.25f, 1};
    const int64_t dims[] = {LINEAR_CLASSES, 3};
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    float x[LINEAR_ROWS * 3], w[LINEAR_CLASSES * 3];
    for (int i = 0; i < LINEAR_ROWS * 3; i++) x[i] = (float)((i / 3 * 7 + i % 3 * 5) % 11 - 5) / 4;
    for (int n = 0; n < TEST_COUNT(of) * TEST_COUNT(ways); n++) {
        const int c = n / TEST_COUNT(ways), way = n % TEST_COUNT(ways);
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_param *p = tt_param_new(ctx, "w", 2, dims, zeros);
        const tt_model model = {p, linear_record, tt_accuracy(), LINEAR_CLASSES, NULL, 0, false};
        tt_train_options o = tt_train_options_default();
        tt_stats s;
        bool updated = false;
        o.schedule.kind = TT_CONSTANT;
        o.schedule.lr = 0.5f;
        o.compile.optimizer.kind = TT_SGD;
        o.compile.optimizer.weight_decay = o.compile.optimizer.momentum = o.compile.optimizer.clip_norm = 0;
        o.max_seqs = LINEAR_ROWS;
        o.compile.device = ways[way].device;
        o.compile.accumulate = true;
        o.label_smoothing = of[c].smoothing;
        if (of[c].weighted) o.class_weights = weights;
        tt_trainer *r = tt_trainer_new(ctx, &model, &o);
        REQUIRE(r != NULL);
        for (int i = 0; i < LINEAR_CLASSES * 3; i++) w[i] = (float)((i / 3 * 3 + i % 3 * 2) % 7 - 3) / 5;
        CHECK(tt_param_set(p, w) == TT_OK);
        for (int step = 0; step < 2; step++) {
            for (int micro = 0, at = 0; at < LINEAR_ROWS; micro++) {
                tt_batch b;
                const tt_array in = {"x", x + 3 * at, ways[way].rows[micro]};
                memset(&b, 0, sizeof b);
                b.seqs = ways[way].rows[micro];
                b.labels = labels + at;
                b.arrays = &in;
                b.n_arrays = 1;
                at += b.seqs;
                b.last_of_step = at == LINEAR_ROWS;
                CHECK(tt_train_batch(r, &b, &s, &updated) == TT_OK && updated == b.last_of_step);
            }
            CHECK_NEAR(s.loss, of[c].loss[step], 2e-6);
            CHECK_NEAR(s.targets, of[c].weighted ? 7.75 : 8, 1e-6); /* five of 0.5, two of 1.5, one of 2.25 */
        }
        CHECK(tt_param_get(p, w) == TT_OK);
        for (int i = 0; i < LINEAR_CLASSES * 3; i++) CHECK_NEAR(w[i], of[c].w[i], 2e-6);
        double plain = 0;
        for (int k = 0; k < LINEAR_ROWS; k++) {
            double sum = 0, own = 0;
            for (int i = 0; i < LINEAR_CLASSES; i++) {
                double z = 0;
                for (int j = 0; j < 3; j++) z += (double)x[3 * k + j] * (double)w[3 * i + j];
                sum += exp(z);
                if (i == labels[k]) own = z;
            }
            plain += (log(sum) - own) / LINEAR_ROWS;
        }
        tt_batch all;
        const tt_array in = {"x", x, LINEAR_ROWS};
        memset(&all, 0, sizeof all);
        memset(&s, 0, sizeof s);
        all.seqs = LINEAR_ROWS;
        all.labels = labels;
        all.arrays = &in;
        all.n_arrays = 1;
        CHECK(tt_evaluate_batch(r, &all, &s) == TT_OK && s.targets == LINEAR_ROWS);
        CHECK_NEAR(s.loss, plain, 1e-5);
        tt_trainer_free(r);
        TEST_CLOSE(ctx, &a);
    }
}

/* A classifier of texts takes them too; they are copied, and checked. */
TEST(class_weights_of_texts)
{
    setup s = small();
    world w;
    s.dropout = 0;
    if (!open_world(&w, &s)) return;
    float weights[2] = {0.25f, 3}, p[2 * BATCH];
    const tt_model model = tt_bert_classifier(&w.m);
    tt_train_options o = train_options(&s, w.l);
    tt_batch b;
    tt_stats stats;
    bool updated;
    double loss = 0, total = 0;
    tt_trainer_free(w.r);
    o.class_weights = weights;
    w.r = tt_trainer_new(w.ctx, &model, &o);
    REQUIRE(w.r != NULL);
    weights[0] = weights[1] = 100;
    REQUIRE(tt_loader_next(w.l, &b));
    CHECK(tt_predict(w.r, &b, p) == TT_OK);
    for (int k = 0; k < b.seqs; k++) {
        const double weight = b.labels[k] ? 3 : 0.25;
        loss -= weight * log(p[2 * k + b.labels[k]]);
        total += weight;
    }
    CHECK(tt_train_batch(w.r, &b, &stats, &updated) == TT_OK && updated);
    CHECK_NEAR(stats.loss, loss / total, 1e-5);
    CHECK_NEAR(stats.targets, total, 1e-6);
    weights[1] = -1;
    CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "the weight of class 1 is -1");
    weights[0] = weights[1] = 0;
    CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "the weights of all classes are 0");
    close_world(&w);
}

TEST(probabilities)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};
    for (int k = 0; k < 10; k++) {
        setup s = small();
        world w;
        tt_stats stats;
        tt_batch b;
        double hits = 0, loss = 0;
        s.precision = precisions[k % 5];
        if (!open_world(&w, &s)) return;
        CHECK(train(&w, 12, NULL) == TT_OK);
        if (k >= 5) { /* a trainer that only predicts, on parameters of this one */
            tt_train_options o = train_options(&s, w.l);
            tt_model model = tt_bert_classifier(&w.m);
            o.compile.train = false;
            tt_trainer *only = tt_trainer_new(w.ctx, &model, &o);
            REQUIRE(only != NULL);
            tt_trainer_free(w.r);
            w.r = only;
            CHECK(tt_trainer_steps(w.r) == 0);
            CHECK(tt_loader_seek(w.all, 0, 0) == TT_OK && tt_loader_next(w.all, &b));
            CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_ARGUMENT);
            CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT,
                        "this trainer was made with train = false: it evaluates and predicts only");
            CHECK(tt_trainer_save(w.r, "/no/such/file", &w.progress) == TT_ERR_ARGUMENT &&
                  tt_trainer_load(w.r, "/no/such/file", &w.progress) == TT_ERR_ARGUMENT);
        }
        CHECK(tt_evaluate(w.r, tt_loader_source(w.all), &stats) == TT_OK &&
              tt_loader_seek(w.all, 0, 0) == TT_OK);
        while (tt_loader_next(w.all, &b)) {
            float p[2 * BATCH];
            CHECK(tt_predict(w.r, &b, p) == TT_OK);
            for (int i = 0; i < b.seqs; i++) {
                CHECK_NEAR(p[2 * i] + p[2 * i + 1], 1, 1e-6);
                CHECK(p[2 * i] >= 0 && p[2 * i + 1] >= 0);
                hits += (p[2 * i + 1] > p[2 * i]) == (b.labels[i] == 1);
                loss -= log(p[2 * i + b.labels[i]]);
            }
        }
        CHECK(hits == stats.correct);
        CHECK_NEAR(loss / TEXTS, stats.loss, 1e-5);
        close_world(&w);
    }
}

/* ------------------------------------------------------------------------------------------------- memory */

TEST(planned_bytes_are_allocated_bytes)
{
    for (int k = 0; k < 10; k++) {
        setup s = small();
        world w;
        static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};
        s.precision = precisions[k % 5];
        s.accumulate = k < 5 ? 1 : 2;
        if (!open_world(&w, &s)) return;
        tt_plan plan = tt_program_plan(tt_trainer_program(w.r));
        size_t before = tt_allocated_bytes(w.ctx);
        CHECK(tt_allocate(w.r->train) == TT_OK);
        CHECK(tt_allocated_bytes(w.ctx) - before == plan.bytes + plan.host_bytes);
        CHECK(tt_allocate(w.r->eval) == TT_OK);
        CHECK(plan.persistent_bytes <= plan.lower_bound_bytes && plan.lower_bound_bytes <= plan.bytes);

        tt_batch b; /* a step and an evaluation take nothing more, not for a moment */
        REQUIRE(tt_loader_seek(w.all, 0, 0) == TT_OK && tt_loader_next(w.all, &b));
        b.last_of_step = true;
        long calls = w.a.calls;
        float p[2 * BATCH];
        for (int i = 0; i < 3; i++)
            CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_OK && tt_predict(w.r, &b, p) == TT_OK);
        CHECK(w.a.calls == calls);
        size_t arena = plan.bytes;
        close_world(&w);

        s.memory_budget = arena; /* exactly enough */
        if (!open_world(&w, &s)) return;
        tt_trainer_free(w.r);
        w.r = NULL;
        tt_model model = tt_bert_classifier(&w.m);
        tt_train_options o = train_options(&s, w.l);
        o.compile.memory_budget = arena - 1;
        CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
        char text[64];
        snprintf(text, sizeof text, "memory_budget is %zu", arena - 1);
        CHECK_ERROR(w.ctx, TT_ERR_BUDGET, text);
        close_world(&w);
    }
}

TEST(largest_micro_batches)
{
    enum { MOST = 24 };
    static const char *const devices[] = {"cpu", "cuda*2"};
    setup s = small();
    world w;
    if (!open_world(&w, &s)) return;
    tt_trainer_free(w.r);
    w.r = NULL;
    const tt_model model = tt_bert_classifier(&w.m);
    for (int k = 0; k < TEST_COUNT(devices); k++) {
        tt_train_options o = train_options(&s, w.l);
        size_t bytes[MOST + 1];
        o.compile.device = devices[k];
        for (int n = 1; n <= MOST; n++) {
            tt_train_options sized = o;
            sized.max_seqs = n;
            sized.max_tokens = 20 * n;
            tt_trainer *r = tt_trainer_new(w.ctx, &model, &sized);
            if (!CHECK(r != NULL)) return;
            bytes[n] = tt_program_plan(tt_trainer_program(r)).bytes;
            tt_trainer_free(r);
            /* On a GPU, without memory for the inputs of the next run. */
            sized.compile.memory_budget = bytes[n] - 1;
            r = tt_trainer_new(w.ctx, &model, &sized);
            if (!CHECK((r != NULL) == (k == 1))) return;
            if (r) bytes[n] = tt_program_plan(tt_trainer_program(r)).bytes;
            tt_trainer_free(r);
        }
        o.max_seqs = 3;
        o.max_tokens = 60;
        for (int n = 1; n < MOST; n += 3) {
            o.compile.memory_budget = bytes[n];
            int largest = n;
            while (largest < MOST && bytes[largest + 1] <= bytes[n]) largest++;
            CHECK(tt_largest_micro_batch(w.ctx, &model, &o, MOST) == largest);
            o.compile.memory_budget = bytes[n + 1] - 1;
            CHECK(tt_largest_micro_batch(w.ctx, &model, &o, n) == n);
        }
        o.compile.memory_budget = bytes[1] - 1;
        CHECK(tt_largest_micro_batch(w.ctx, &model, &o, MOST) == 0);
        CHECK_ERROR(w.ctx, TT_ERR_BUDGET, "the plan needs");
        o.compile.memory_budget = 0;
        CHECK(tt_largest_micro_batch(w.ctx, &model, &o, MOST) == 0);
        CHECK(k == 1 || strstr(tt_error(w.ctx), "depends on memory_budget, which is not set"));
        o.compile.memory_budget = bytes[1];
        o.compile.precision = "7-true";
        CHECK(tt_largest_micro_batch(w.ctx, &model, &o, MOST) == 0);
        CHECK(strstr(tt_error(w.ctx), "'7-true'"));
    }
    CHECK(tt_largest_micro_batch(w.ctx, &model, NULL, 0) == 0);
    close_world(&w);
}

TEST(planned_for_another_device)
{
    setup s = small();
    world w;
    tt_batch b;
    tt_stats stats;
    float p[2 * BATCH];
    if (!open_world(&w, &s)) return;
    REQUIRE(tt_loader_seek(w.all, 0, 0) == TT_OK && tt_loader_next(w.all, &b));
    tt_model model = tt_bert_classifier(&w.m);
    tt_train_options o = train_options(&s, w.l);
    o.compile.device = "cuda";
    tt_trainer *planned = tt_trainer_new(w.ctx, &model, &o);
    REQUIRE(planned != NULL);
    CHECK(strcmp(tt_program_plan(tt_trainer_program(planned)).device, "cuda") == 0 &&
          strcmp(tt_program_plan(tt_trainer_program(w.r)).device, "cpu") == 0);
    CHECK(tt_train_batch(planned, &b, &stats, NULL) == TT_ERR_UNSUPPORTED &&
          tt_predict(planned, &b, p) == TT_ERR_UNSUPPORTED);
    CHECK(tt_trainer_load(planned, "not-there", NULL) != TT_OK &&
          tt_trainer_save(planned, "never-written", NULL) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(w.ctx, TT_ERR_UNSUPPORTED, "compile for \"cpu\"");
    CHECK(tt_train_batch(w.r, &b, &stats, NULL) == TT_OK); /* beside it */
    tt_trainer_free(planned);
    CHECK(tt_train_batch(w.r, &b, &stats, NULL) == TT_OK);
    o.compile.device = "abacus";
    CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "train options: device 'abacus' is unknown: use cpu or cuda");
    o.compile.device = "cpu";
    o.compile.matmul = "tf16";
    CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "train options: matmul 'tf16' is unknown: use fp32, tf32 or fp8");
    close_world(&w);
}

TEST(allocation_failures) /* of the trainer, its steps, and its state's files */
{
    char path[1024];
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "state.safetensors"));
    long calls = 0;
    for (long n = 0; n <= calls; n++) {
        setup s = small();
        world w;
        tt_progress progress;
        s.layers = 1;
        s.accumulating = true;
        if (!open_world(&w, &s)) return;
        tt_trainer_free(w.r);
        tt_model model = tt_bert_classifier(&w.m);
        tt_train_options o = train_options(&s, w.l);
        tt_batch b;
        CHECK(tt_loader_seek(w.all, 0, 0) == TT_OK && tt_loader_next(w.all, &b));
        b.last_of_step = true;
        long before = w.a.calls;
        w.a.fail_at = n ? before + n : 0;
        tt_status status = (w.r = tt_trainer_new(w.ctx, &model, &o)) ? TT_OK : tt_error_code(w.ctx);
        if (status == TT_OK) status = tt_train_batch(w.r, &b, NULL, NULL);
        if (status == TT_OK) status = tt_trainer_save(w.r, path, &w.progress);
        if (status == TT_OK) status = tt_trainer_load(w.r, path, &progress);
        if (n == 0) {
            CHECK(status == TT_OK);
            calls = w.a.calls - before;
            CHECK(calls > 50);
        } else {
            CHECK(status == TT_ERR_MEMORY && w.a.failed);
            CHECK_ERROR(w.ctx, TT_ERR_MEMORY, "out of memory");
            if (w.r) CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_OK &&
                           tt_trainer_save(w.r, path, &w.progress) == TT_OK); /* memory is back */
        }
        close_world(&w);
    }
}

/* ---------------------------------------------------------------------------------------- save and resume */

/* N + M steps with all closed and opened in between, and N + M without: the same bits, and the same file. */
static void resume(const setup *s, const setup *again, int before, int after)
{
    char half[1024], whole[1024], resumed[1024], *folder = test_folder();
    world a, b, c;
    tt_progress read;
    snprintf(half, sizeof half, "%s", test_path(folder, "half.safetensors"));
    snprintf(whole, sizeof whole, "%s", test_path(folder, "whole.safetensors"));
    snprintf(resumed, sizeof resumed, "%s", test_path(folder, "resumed.safetensors"));
    if (!open_world(&a, s) || !open_world(&b, s)) return;
    CHECK(train(&a, before + after, NULL) == TT_OK && tt_trainer_save(a.r, whole, &a.progress) == TT_OK);
    CHECK(train(&b, before, NULL) == TT_OK);
    b.progress.best = 0.875;
    a.progress.best = 0.875;
    CHECK(tt_trainer_save(a.r, whole, &a.progress) == TT_OK &&
          tt_trainer_save(b.r, half, &b.progress) == TT_OK);
    tt_progress saved = b.progress;
    close_world(&b);

    if (!open_world(&c, again)) return;
    memset(&read, 0xA5, sizeof read);
    CHECK(tt_trainer_load(c.r, half, &read) == TT_OK &&
          tt_trainer_steps(c.r) == before - (int64_t)c.r->train->results.scale.skipped);
    CHECK(memcmp(&read, &saved, sizeof read) == 0);
    c.progress = read;
    CHECK(train(&c, after, NULL) == TT_OK);
    CHECK(same_worlds(&a, &c) && memcmp(&a.progress, &c.progress, sizeof a.progress) == 0);
    CHECK(tt_trainer_lr(a.r) == tt_trainer_lr(c.r));
    CHECK(tt_trainer_save(c.r, resumed, &c.progress) == TT_OK && same_files(whole, resumed));
    close_world(&a);
    close_world(&c);
}

TEST(resume_in_every_precision_with_every_optimizer)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};
    for (int k = 0; k < 25; k++) { /* in the middle of an epoch, and on into the next */
        setup s = small();
        s.precision = precisions[k % 5];
        s.optimizer.kind = k / 5 == 0 ? TT_ADAMW : k / 5 == 1 ? TT_ADAM : TT_SGD;
        s.optimizer.momentum = k / 5 >= 3 ? 0.9f : 0;
        s.optimizer.nesterov = k / 5 == 4;
        resume(&s, &s, 4, 5);
    }
}

/* From a scale that overflows, growing after every second good step: what was skipped, how often, and what
   comes next goes into the state. A skipped step ends like any other, but the learning rate stays. */
TEST(resume_with_loss_scaling)
{
    for (int k = 0; k < 8; k++) {
        setup s = small();
        world w;
        tt_stats stats = {0};
        s.precision = k % 2 ? "16-true" : "16-mixed";
        s.residual = k == 4 ? "16-bit" : NULL;
        s.accumulate = k >= 6 ? 3 : 1;
        s.loss_scale.init = 0x1p22f;
        s.loss_scale.growth = 8;
        s.loss_scale.interval = 2;
        resume(&s, &s, 2 + k, 9);
        if (!open_world(&w, &s)) return;
        int64_t last = 0, falls = 0, grown = 0;
        double scale = s.loss_scale.init;
        for (int step = 1; step <= 20; step++) {
            float lr = tt_trainer_lr(w.r);
            CHECK(train(&w, 1, &stats) == TT_OK && stats.step + stats.skipped == step &&
                  tt_trainer_steps(w.r) == stats.step);
            if (stats.skipped > last) {
                CHECK(stats.loss_scale == scale / 2 && stats.grad_norm == 0 && tt_trainer_lr(w.r) == lr);
                falls++;
            } else {
                CHECK((stats.loss_scale == scale || stats.loss_scale == 8 * scale) && stats.grad_norm > 0 &&
                      tt_trainer_lr(w.r) != lr);
                grown += stats.loss_scale > scale;
            }
            last = stats.skipped;
            scale = stats.loss_scale;
        }
        CHECK(falls >= 4 && grown >= 2);
        close_world(&w);
    }
}

TEST(resume_at_the_end_of_an_epoch_and_elsewhere)
{
    static const int rows[][2] = {{7, 7}, {0, 3}, {1, 1}, {6, 2}, {7, 1}, {13, 3}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        setup s = small();
        resume(&s, &s, rows[k][0], rows[k][1]);
    }
}

TEST(resume_with_micro_batches_and_other_threads)
{
    for (int k = 0; k < 3; k++) {
        setup s = small(), again;
        s.accumulate = k == 1 ? 1 : 3;
        s.max_tokens = k == 1 ? 40 : 0;
        s.precision = k == 2 ? "bf16-true" : "32-true";
        again = s;
        again.threads = 2;
        resume(&s, &again, 4, 5);
    }
}

TEST(resume_without_new_context) /* loading over a run that has gone on */
{
    setup s = small();
    world a;
    tt_progress p;
    size_t n, m;
    char path[1024];
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "state.safetensors"));
    if (!open_world(&a, &s)) return;
    CHECK(train(&a, 3, NULL) == TT_OK && tt_trainer_save(a.r, path, &a.progress) == TT_OK);
    CHECK(train(&a, 6, NULL) == TT_OK);
    char *first = snapshot(&a, &n);
    CHECK(tt_trainer_load(a.r, path, &p) == TT_OK && tt_trainer_steps(a.r) == 3);
    a.progress = p;
    CHECK(train(&a, 6, NULL) == TT_OK);
    char *second = snapshot(&a, &m);
    CHECK(same_snapshots(first, n, second, m));
    close_world(&a);
}

TEST(resume_with_frozen_parameters)
{
    setup s = small();
    world w[3];
    tt_progress p;
    char path[1024];
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "state.safetensors"));
    for (int k = 0; k < 3; k++) {
        if (!open_world(&w[k], &s)) return;
        tt_trainer_free(w[k].r);
        CHECK(tt_param_freeze(w[k].ctx, k < 2 ? "*embeddings*" : "*layer.0.*", true) > 0);
        tt_model model = tt_bert_classifier(&w[k].m);
        tt_train_options o = train_options(&s, w[k].l);
        w[k].r = tt_trainer_new(w[k].ctx, &model, &o);
        REQUIRE(w[k].r != NULL);
    }
    CHECK(train(&w[0], 3, NULL) == TT_OK && tt_trainer_save(w[0].r, path, &w[0].progress) == TT_OK &&
          train(&w[0], 3, NULL) == TT_OK);
    CHECK(tt_trainer_load(w[1].r, path, &w[1].progress) == TT_OK && train(&w[1], 3, NULL) == TT_OK);
    CHECK(same_worlds(&w[0], &w[1]));
    CHECK(tt_trainer_load(w[2].r, path, &p) == TT_ERR_FORMAT); /* others are trained */
    CHECK_ERROR(w[2].ctx, TT_ERR_FORMAT, "has no tensor 'distilbert.embeddings.");

    tt_safetensors *file = tt_safetensors_open(w[1].ctx, path); /* of frozen ones it has a hash each */
    const int hashes = file ? tt_safetensors_find(file, "tinytrain.frozen") : -1;
    tt_param *frozen = tt_param_find(w[1].ctx, "distilbert.embeddings.LayerNorm.bias");
    if (CHECK(hashes >= 0 && frozen)) {
        CHECK(tt_safetensors_find(file, tt_param_name(frozen)) < 0);
        CHECK(tt_safetensors_info(file, hashes)->dims[0] == 4);
        size_t n, m;
        float *values = test_values(frozen);
        char *before = snapshot(&w[1], &n);
        values[3] = nextafterf(values[3], 1);
        CHECK(tt_param_set(frozen, values) == TT_OK);
        CHECK(tt_trainer_load(w[1].r, path, &p) == TT_ERR_ARGUMENT);
        CHECK_ERROR(w[1].ctx, TT_ERR_ARGUMENT, "parameter 'distilbert.embeddings.LayerNorm.bias', which is "
                    "frozen, has other values");
        values[3] = nextafterf(values[3], -1);
        CHECK(tt_param_set(frozen, values) == TT_OK);
        char *after = snapshot(&w[1], &m);
        CHECK(same_snapshots(before, n, after, m)); /* nothing of the state was taken */
        free(values);
    }
    tt_safetensors_close(file);
    for (int k = 0; k < 3; k++) close_world(&w[k]);
}

/* ------------------------------------------------------------------------------------------------- faults */

/* Tries to load `path` and checks that it is refused and that neither the trainer nor the progress
   changes. */
static void refuse(world *w, const char *path, tt_status status, const char *part)
{
    size_t n, m;
    tt_progress p, before;
    memset(&p, 0x5A, sizeof p);
    before = p;
    char *x = snapshot(w, &n);
    size_t held = tt_allocated_bytes(w->ctx);
    CHECK(tt_trainer_load(w->r, path, &p) == status);
    CHECK_ERROR(w->ctx, status, part);
    CHECK_ERROR(w->ctx, status, path);
    char *y = snapshot(w, &m);
    CHECK(same_snapshots(x, n, y, m));
    CHECK(memcmp(&p, &before, sizeof p) == 0 && tt_allocated_bytes(w->ctx) == held);
}

TEST(states_of_other_runs)
{
    static const char *const what[] = {"seed",     "optimizer", "optimizer too", "no momentum",
                                       "momentum", "precision", "precision too", "mixed",
                                       "hidden",   "layers",    "fewer layers",  "classes",
                                       "f16"};
    static const char *const errors[] = {
        "was made with seed 8, this run has 7: open the context with the same seed",
        "was made with another optimizer",
        "was made with another optimizer",
        "tensors, this run has",
        "has no tensor 'momentum_buffer.",
        "was made with another precision than 'bf16-true'",
        "was made with another precision than '32-true'",
        "was made with another precision than 'bf16-mixed'",
        "the model or the precision differs",
        "tensors, this run has",
        "has no tensor 'distilbert.transformer.layer.2.",
        "'classifier.weight' is F32 of",
        "was made with another precision than '16-mixed'"};
    for (int k = 0; k < TEST_COUNT(what); k++) {
        setup s = small(), other;
        world w, v;
        char path[1024];
        size_t n, m;
        snprintf(path, sizeof path, "%s", test_path(test_folder(), "state.safetensors"));
        if (k == 3) s.optimizer.kind = TT_SGD;
        if (k == 4) { s.optimizer.kind = TT_SGD; s.optimizer.momentum = 0.9f; }
        if (k == 5) s.precision = "bf16-true";
        if (k == 7) s.precision = "bf16-mixed";
        if (k == 12) s.precision = "16-mixed";
        if (k == 10) s.layers = 3;
        other = s;
        if (k == 0) other.seed = 8;
        if (k == 1) other.optimizer.kind = TT_SGD;
        if (k == 2) other.optimizer.kind = TT_ADAM;
        if (k == 3) other.optimizer.momentum = 0.9f;
        if (k == 4) other.optimizer.momentum = 0;
        if (k == 5 || k == 7) other.precision = "32-true";
        if (k == 12) other.precision = "bf16-mixed";
        if (k == 6) other.precision = "bf16-true";
        if (k == 8) other.hidden = 30;
        if (k == 9) other.layers = 3;
        if (k == 10) other.layers = 2;
        if (!open_world(&w, &s) || !open_world(&v, &other)) return;
        if (k == 11) { /* a model of three classes */
            tt_bert_config c = v.m.config;
            test_allocator a;
            tt_context_options o = test_options(&a);
            o.seed = s.seed;
            tt_context *ctx = tt_open(&o);
            tt_bert three;
            c.classes = 3;
            c.activation = "gelu";
            CHECK(tt_bert_new(ctx, &three, &c) == TT_OK);
            tt_model model = tt_bert_classifier(&three);
            tt_train_options to = train_options(&s, v.l);
            tt_trainer *r = tt_trainer_new(ctx, &model, &to);
            REQUIRE(r != NULL);
            CHECK(tt_trainer_save(r, path, &v.progress) == TT_OK);
            tt_trainer_free(r);
            tt_bert_free(&three);
            TEST_CLOSE(ctx, &a);
        } else {
            CHECK(train(&v, 2, NULL) == TT_OK && tt_trainer_save(v.r, path, &v.progress) == TT_OK);
        }
        CHECK(train(&w, 2, NULL) == TT_OK);
        refuse(&w, path, k <= 2 || (k >= 5 && k <= 7) || k == 12 ? TT_ERR_ARGUMENT : TT_ERR_FORMAT,
               errors[k]);
        CHECK(train(&w, 1, NULL) == TT_OK); /* it goes on as if nothing had been */
        char *x = snapshot(&w, &n);
        world u;
        if (!open_world(&u, &s)) return;
        CHECK(train(&u, 3, NULL) == TT_OK);
        char *y = snapshot(&u, &m);
        CHECK(same_snapshots(x, n, y, m));
        close_world(&u);
        close_world(&w);
        close_world(&v);
    }
}

/* Copies a state file without tensor `drop`, with a further tensor `add`, with `flatten` as one dimension, or
   with element header_at (from 0; -1: none) of "tinytrain.run" changed. */
static void copy_state(const char *from, const char *to, const char *drop, const char *add,
                       const char *flatten, int header_at, int64_t header_value)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_safetensors *file = tt_safetensors_open(ctx, from);
    tt_tensor_info info[200];
    char *data[200];
    int n = 0;
    if (!CHECK(file != NULL)) exit(2);
    memset(info, 0, sizeof info);
    for (int k = 0; k < tt_safetensors_count(file); k++) {
        info[n] = *tt_safetensors_info(file, k);
        if (drop && strcmp(drop, info[n].name) == 0) continue;
        data[n] = test_tensor(file, k);
        if (flatten && strcmp(flatten, info[n].name) == 0) {
            info[n].dims[0] *= info[n].dims[1];
            info[n].ndim = 1;
        }
        if (header_at >= 0 && strcmp(info[n].name, "tinytrain.run") == 0)
            memcpy(data[n] + header_at * 8, &header_value, 8);
        n++;
    }
    if (add) {
        memset(&info[n], 0, sizeof info[n]);
        info[n].name = add;
        info[n].dtype = "I64";
        info[n].ndim = 1;
        info[n].dims[0] = 1;
        info[n].bytes = 8;
        data[n++] = (char *)calloc(1, 8);
    }
    tt_safetensors_writer *w = tt_safetensors_begin(ctx, to, info, n, NULL);
    for (int k = 0; k < n && w; k++) CHECK(tt_safetensors_write(w, data[k], info[k].bytes) == TT_OK);
    CHECK(w && tt_safetensors_end(w) == TT_OK);
    for (int k = 0; k < n; k++) free(data[k]);
    tt_safetensors_close(file);
    TEST_CLOSE(ctx, &a);
}

static char warned[512];
static void keep_warning(void *user, tt_log_level level, const char *id, const char *message)
{
    (void)user;
    if (level == TT_LOG_WARNING) snprintf(warned, sizeof warned, "%s: %s", id, message);
}

/* Options that a state can go on with, but not to the same bits. */
TEST(resume_warns_of_other_options)
{
    for (int k = 0; k < 9; k++) {
        setup s = small(), other;
        world w, v;
        char path[1024];
        snprintf(path, sizeof path, "%s", test_path(test_folder(), "state.safetensors"));
        if (k >= 6) s.precision = "16-mixed";
        s.loss_scale.init = 1024;
        other = s;
        if (k == 6) other.residual = "16-bit";
        if (k == 7) other.loss_scale.interval = 7;
        if (k == 8) other.loss_scale.init = 8; /* the state's scale goes on */
        if (k == 1) other.dropout = 0.2f;
        if (k == 2) other.optimizer.weight_decay = 0.3f;
        if (k == 3) other.max_tokens = s.max_tokens ? s.max_tokens * 2 : 64;
        if (k == 4) other.schedule.lr *= 2;
        if (k == 5) other.threads = 3;
        if (!open_world(&w, &s) || !open_world(&v, &other)) return;
        CHECK(train(&w, 2, NULL) == TT_OK && tt_trainer_save(w.r, path, &w.progress) == TT_OK);
        warned[0] = 0;
        v.ctx->options.logger.log = keep_warning;
        CHECK(tt_trainer_load(v.r, path, &v.progress) == TT_OK && tt_trainer_steps(v.r) == 2);
        CHECK(v.r->train->results.scale.scale == w.r->train->results.scale.scale);
        if (k == 0 || k == 5 || k == 8) CHECK(!warned[0]);
        else
            CHECK(strstr(warned, k == 4
                                     ? "with another schedule"
                                     : "other options of the model, the optimizer, the batches") != NULL);
        close_world(&w);
        close_world(&v);
    }
}

/* Other images for the model are another training: the pixels' means and deviations are options of it. */
TEST(resume_warns_of_other_pixel_means)
{
    for (int k = 0; k < 4; k++) {
        char path[1024];
        tt_progress progress;
        snprintf(path, sizeof path, "%s", test_path(test_folder(), "state.safetensors"));
        memset(&progress, 0, sizeof progress);
        for (int again = 0; again < 2; again++) {
            test_allocator a;
            tt_context *ctx = test_open(&a);
            tt_vit m;
            tt_vit_config c = tt_vit_config_default("Ti/8");
            tt_train_options o = tt_train_options_default();
            c.layers = 1, c.hidden_size = c.intermediate_size = 16, c.heads = 2, c.image_size = 16,
            c.classes = 2;
            if (again && k == 1) c.mean[1] = 0.25f;
            if (again && k == 2) c.std[2] = 0.25f;
            o.schedule.kind = TT_CONSTANT;
            o.max_seqs = 2;
            o.compile.recompute = again && k == 3 ? "blocks" : "none";
            CHECK(tt_vit_new(ctx, &m, &c) == TT_OK);
            tt_model model = tt_vit_classifier(&m);
            tt_trainer *r = tt_trainer_new(ctx, &model, &o);
            REQUIRE(r != NULL);
            warned[0] = 0;
            ctx->options.logger.log = keep_warning;
            if (!again) CHECK(tt_trainer_save(r, path, &progress) == TT_OK);
            else CHECK(tt_trainer_load(r, path, &progress) == TT_OK);
            CHECK((strstr(warned, "other options of the model") != NULL) == (again && (k == 1 || k == 2)));
            tt_trainer_free(r);
            tt_vit_free(&m);
            TEST_CLOSE(ctx, &a);
        }
    }
}

TEST(damaged_states)
{
    /* Before the first step nothing need be in memory. */
    for (int allocated = 1; allocated >= 0; allocated--) {
        setup s = small();
        world w;
        char path[1024], bad[1024], *folder = test_folder();
        size_t n;
        snprintf(path, sizeof path, "%s", test_path(folder, "state.safetensors"));
        snprintf(bad, sizeof bad, "%s", test_path(folder, "bad.safetensors"));
        if (!open_world(&w, &s)) return;
        CHECK(train(&w, 3, NULL) == TT_OK && tt_trainer_save(w.r, path, &w.progress) == TT_OK);
        if (!allocated) {
            close_world(&w);
            if (!open_world(&w, &s)) return;
            CHECK(tt_allocate(w.r->train) == TT_OK);
        } else {
            CHECK(train(&w, 2, NULL) == TT_OK);
        }
        char *bytes = test_read(path, &n);
        for (int k = 0; k < 12; k++) {
            const size_t keep[] = {0, 1, 7, 8, 9, 500, 3000, n / 4, n / 2, n - 4000, n - 2, n - 1};
            test_write(bad, bytes, keep[k]);
            refuse(&w, bad, TT_ERR_FORMAT, "bad.safetensors'");
        }
        bytes[20] ^= 0x10; /* in the header; the data has no checksum */
        test_write(bad, bytes, n);
        refuse(&w, bad, TT_ERR_FORMAT, "bad.safetensors'");
        free(bytes);
        remove(bad);
        refuse(&w, bad, TT_ERR_FILE, "cannot open '");

        copy_state(path, bad, NULL, "one.more", NULL, -1, 0);
        refuse(&w, bad, TT_ERR_FORMAT, "tensors, this run has");
        copy_state(path, bad, "exp_avg_sq.pre_classifier.bias", NULL, NULL, -1, 0);
        refuse(&w, bad, TT_ERR_FORMAT, "has no tensor 'exp_avg_sq.pre_classifier.bias'");
        copy_state(path, bad, "exp_avg_sq.pre_classifier.bias", "another", NULL, -1, 0);
        refuse(&w, bad, TT_ERR_FORMAT, "has no tensor 'exp_avg_sq.pre_classifier.bias'");
        copy_state(path, bad, "classifier.bias", NULL, NULL, -1, 0);
        refuse(&w, bad, TT_ERR_FORMAT, "has no tensor 'classifier.bias'");
        copy_state(path, bad, "tinytrain.run", NULL, NULL, -1, 0);
        refuse(&w, bad, TT_ERR_FORMAT,
               "has no tensor 'tinytrain.run': it is no state of this model and optimizer");
        copy_state(path, bad, "tinytrain.run", "tinytrain.run", NULL, -1, 0); /* of one element */
        refuse(&w, bad, TT_ERR_FORMAT, "is a state of version 0, this build reads 5");
        copy_state(path, bad, NULL, NULL, "exp_avg.classifier.weight", -1, 0);
        refuse(&w, bad, TT_ERR_FORMAT, "tensor 'exp_avg.classifier.weight' is F32 of");
        copy_state(path, bad, NULL, NULL, NULL, 0, 77); /* version */
        refuse(&w, bad, TT_ERR_FORMAT, "is a state of version 77, this build reads 5");
        copy_state(path, bad, NULL, NULL, NULL, 2, -5); /* steps */
        refuse(&w, bad, TT_ERR_FORMAT, "says that -5 steps were done");
        copy_state(path, bad, NULL, NULL, NULL, 2, INT64_MAX);
        refuse(&w, bad, TT_ERR_FORMAT, "says that 9223372036854775807 steps were done");
        for (int k = 0; k < 8; k++) { /* loss scale, good steps, skipped ones: numbers 5, 3 and 4 */
            const double scales[] = {3, 0.5, NAN, 0x1p41};
            int64_t values[] = {0, 0, 0, 0, -1, INT64_MAX, -2, INT64_MAX};
            memcpy(values, scales, sizeof scales);
            copy_state(path, bad, NULL, NULL, NULL, k < 4 ? 5 : k < 6 ? 3 : 4, values[k]);
            refuse(&w, bad, TT_ERR_FORMAT, "steps were skipped, and");
        }
        refuse(&w, TEST_GOLDEN("distilbert/model.safetensors"), TT_ERR_FORMAT,
               "has no tensor 'tinytrain.run'");
        refuse(&w, TEST_GOLDEN("distilbert/config.json"), TT_ERR_FORMAT, "config.json'");

        copy_state(path, bad, NULL, NULL, NULL, -1, 0); /* and the copy itself is good */
        CHECK(tt_trainer_load(w.r, bad, &w.progress) == TT_OK && tt_trainer_steps(w.r) == 3 &&
              w.progress.step == 3);
        close_world(&w);
    }
}

TEST(files_that_fail)
{
    static const struct { char op; const char *verb; } faults[] = {
        {'o', "cannot create '"}, {'w', "cannot write '"}, {'s', "cannot sync '"}, {'c', "cannot close '"},
        {'n', "cannot rename '"}};
    static const struct { char op; const char *verb; } reads[] = {
        {'o', "cannot open '"}, {'z', "cannot tell the size of '"}, {'r', "cannot read "}};
    setup s = small();
    test_files f;
    world w;
    char path[1024], *folder = test_folder(), temporary[1100];
    size_t n, m;
    s.files = &f;
    snprintf(path, sizeof path, "%s", test_path(folder, "state.safetensors"));
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (!open_world(&w, &s)) return;
    CHECK(train(&w, 2, NULL) == TT_OK && tt_trainer_save(w.r, path, &w.progress) == TT_OK);
    char *old = test_read(path, &n);
    CHECK(train(&w, 2, NULL) == TT_OK);
    for (int k = 0; k < TEST_COUNT(faults); k++)
        for (long at = 1;; at++) { /* the n-th call of that kind fails, until there is none */
            char *before = snapshot(&w, &m);
            size_t held = tt_allocated_bytes(w.ctx), l;
            f.fail = faults[k].op;
            f.at = at;
            f.calls = 0;
            tt_status status = tt_trainer_save(w.r, path, &w.progress);
            f.fail = 0;
            char *now = test_read(path, &l), *after, *left = test_read(temporary, &l);
            CHECK(left == NULL);
            free(left);
            if (status == TT_OK) { /* put the old file back for the next kind */
                CHECK(f.calls < f.at && at > 1);
                free(now);
                free(before);
                test_write(path, old, n);
                break;
            }
            CHECK(status == TT_ERR_FILE);
            CHECK_ERROR(w.ctx, TT_ERR_FILE, faults[k].verb);
            CHECK_ERROR(w.ctx, TT_ERR_FILE, "state.safetensors.tmp': injected");
            free(now);
            now = test_read(path, &l);
            CHECK(now && l == n && memcmp(now, old, n) == 0); /* the old file, whole */
            free(now);
            after = snapshot(&w, &l);
            CHECK(same_snapshots(before, m, after, l) && tt_allocated_bytes(w.ctx) == held);
        }
    for (int k = 0; k < TEST_COUNT(reads); k++) {
        char *before = snapshot(&w, &m);
        size_t l;
        tt_progress p;
        f.fail = reads[k].op;
        f.at = 1;
        f.calls = 0;
        CHECK(tt_trainer_load(w.r, path, &p) == TT_ERR_FILE);
        f.fail = 0;
        CHECK_ERROR(w.ctx, TT_ERR_FILE, reads[k].verb);
        CHECK_ERROR(w.ctx, TT_ERR_FILE, "state.safetensors': injected");
        char *after = snapshot(&w, &l);
        CHECK(same_snapshots(before, m, after, l));
    }
    CHECK(tt_trainer_load(w.r, path, &w.progress) == TT_OK && tt_trainer_steps(w.r) == 2);
    free(old);
    close_world(&w);
}

/* A token of no text, [MASK], gets a row of NaN: only batches that hold it are poisoned. */
static void poison(world *w, tt_batch *b, int32_t *ids)
{
    memcpy(ids, b->ids, sizeof *ids * (size_t)b->rows);
    ids[1] = tt_tokenizer_find(w->k, "[MASK]");
    b->ids = ids;
}

static void poison_row(world *w, bool nan)
{
    int64_t n = tt_param_size(w->m.word), hidden = w->m.config.hidden_size,
            row = tt_tokenizer_find(w->k, "[MASK]");
    float *x = (float *)malloc(sizeof(float) * (size_t)n);
    CHECK(tt_param_get(w->m.word, x) == TT_OK);
    for (int64_t k = 0; k < hidden; k++) x[row * hidden + k] = nan ? NAN : 0.0f;
    CHECK(tt_param_set(w->m.word, x) == TT_OK);
    free(x);
}

TEST(nan_in_a_step_loses_nothing)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};
    for (int k = 0; k < 10; k++) {
        setup s = small();
        world w, healthy;
        tt_batch b;
        tt_stats stats;
        int32_t ids[400];
        size_t n, m;
        bool updated = true;
        s.precision = precisions[k % 5];
        s.accumulate = k < 5 ? 1 : 4;
        if (!open_world(&w, &s) || !open_world(&healthy, &s)) return;
        poison_row(&w, true);
        poison_row(&healthy, true);
        CHECK(train(&w, 2, NULL) == TT_OK && train(&healthy, 2, NULL) == TT_OK);
        CHECK(same_worlds(&w, &healthy));
        for (int bad = 0; bad < s.accumulate; bad++) { /* which micro-batch of the step it is */
            char *before = snapshot(&w, &n);
            CHECK(tt_loader_seek(w.l, 0, 2) == TT_OK);
            for (int micro = 0; micro < s.accumulate; micro++) {
                REQUIRE(tt_loader_next(w.l, &b));
                if (micro == bad) poison(&w, &b, ids);
                tt_status status = tt_train_batch(w.r, &b, &stats, &updated);
                CHECK(!updated);
                if (micro < bad) CHECK(status == TT_OK);
                if (micro == bad) {
                    CHECK(status == TT_ERR_NUMERIC);
                    CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "step 2, micro-batch ");
                    CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "the loss 'loss' is not finite; nothing was updated");
                }
                if (micro > bad) {
                    CHECK(status == TT_ERR_ARGUMENT);
                    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT,
                                "an earlier micro-batch of this step failed: its others are refused, up to "
                                "the last, and nothing is updated");
                }
            }
            CHECK(b.last_of_step && tt_trainer_steps(w.r) == 2);
            char *after = snapshot(&w, &m);
            if (s.accumulate == 1) CHECK(n == m && memcmp(before, after, n) == 0);
            free(before);
            free(after);
        }
        CHECK(train(&w, 4, NULL) == TT_OK && train(&healthy, 4, NULL) == TT_OK); /* the step again, and on */
        CHECK(tt_trainer_steps(w.r) == 6);
        /* Adam's steps leave the row NaN: without it the bytes are alike even where NaNs are not */
        poison_row(&w, false);
        poison_row(&healthy, false);
        char path[1024], other[1024], *folder = test_folder();
        snprintf(path, sizeof path, "%s", test_path(folder, "a"));
        snprintf(other, sizeof other, "%s", test_path(folder, "b"));
        CHECK(tt_trainer_save(w.r, path, &w.progress) == TT_OK &&
              tt_trainer_save(healthy.r, other, &healthy.progress) == TT_OK);
        CHECK(same_files(path, other));
        close_world(&w);
        close_world(&healthy);
    }
}

TEST(a_gradient_that_is_not_finite_is_named)
{
    setup s = small();
    world w;
    size_t n, m;
    s.dropout = 0;
    if (!open_world(&w, &s)) return;
    CHECK(train(&w, 1, NULL) == TT_OK);
    float *x = (float *)malloc(sizeof(float) * (size_t)tt_param_size(w.m.classifier_w));
    /* The loss is huge, its gradient times these overflows a square. */
    for (int64_t k = 0; k < tt_param_size(w.m.classifier_w); k++) x[k] = (k % 2 ? 1 : -1) * 1e37f;
    CHECK(tt_param_set(w.m.classifier_w, x) == TT_OK);
    free(x);
    char *before = snapshot(&w, &n);
    CHECK(train(&w, 1, NULL) == TT_ERR_NUMERIC);
    CHECK(strstr(tt_error(w.ctx), "step 1: ") && strstr(tt_error(w.ctx), "nothing was updated"));
    if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("  %s\n", tt_error(w.ctx));
    char *after = snapshot(&w, &m);
    CHECK(same_snapshots(before, n, after, m));
    close_world(&w);
}

TEST(an_untrained_trainer_saves_and_loads)
{
    setup s = small();
    world a, b;
    char path[1024];
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "state.safetensors"));
    if (!open_world(&a, &s) || !open_world(&b, &s)) return;
    a.progress.best = -INFINITY;
    a.progress.loss_sum = 1.0 / 3;
    a.progress.targets = 1e300;
    a.progress.epoch = INT64_MAX;
    CHECK(tt_trainer_save(a.r, path, &a.progress) == TT_OK);
    CHECK(tt_trainer_load(b.r, path, &b.progress) == TT_OK && tt_trainer_steps(b.r) == 0);
    CHECK(memcmp(&a.progress, &b.progress, sizeof a.progress) == 0 && same_worlds(&a, &b));
    close_world(&a);
    close_world(&b);
}

/* ---------------------------------------------------------------------------------------------------- fit */

typedef struct fitting {
    world *w;
    /* Events so far; steps after which to stop, or to spoil a parameter. */
    int steps, validations, kept, stop_at, poison_at;
    bool stop_in_validation;
    volatile int stop;
    double best, best_loss;
    int ties;                    /* validations that were the best by their loss alone */
    int epochs;                  /* 0: three */
    int keep_fails_at;           /* this call of keep fails; 0: none */
    const char *folder, *copy;   /* keep's first call copies the run's files, to begin from there */
    test_files *files;           /* writing fails from the moment when the run is stopped */
    bool ranks;                  /* that compute faster together than the peak that was measured */
} fitting;

/* A file of a folder, if it is there, into another folder. */
static void copy_file(const char *from, const char *to, const char *name)
{
    char x[1200], y[1200];
    size_t n;
    snprintf(x, sizeof x, "%s/%s", from, name);
    snprintf(y, sizeof y, "%s/%s", to, name);
    char *bytes = test_read(x, &n);
    if (bytes) test_write(y, bytes, n);
    free(bytes);
}

static tt_status fit_keep(void *user)
{
    fitting *f = (fitting *)user;
    if (++f->kept == f->keep_fails_at) return tt__fail(f->w->ctx, TT_ERR_FILE, "keep: the disk is full");
    if (f->copy && f->kept == 1) {
        copy_file(f->folder, f->copy, "state.safetensors");
        copy_file(f->folder, f->copy, "metrics.csv");
    }
    return TT_OK;
}

static void fit_report(void *user, const tt_fit_event *e)
{
    fitting *f = (fitting *)user;
    CHECK(e->epochs == (f->epochs ? f->epochs : 3) && e->steps == 7 && e->epoch >= 0 &&
          e->epoch < e->epochs && e->step >= 1 && e->step <= 7 && strcmp(e->metric_name, "accuracy") == 0 &&
          e->metric >= 0 && e->metric <= 1);
    CHECK((e->loss > 0 || f->poison_at) && e->seconds_left >= 0 && strcmp(e->unit, "tokens") == 0 &&
          (e->validation || (e->per_second > 0 && (e->of_peak > 0 || f->ranks))));
    if (e->validation) {
        const double accuracy = e->validation->correct / TEXTS, loss = e->validation->loss;
        const bool tie = accuracy == f->best && loss < f->best_loss;
        CHECK(e->step == 7 && e->validation->targets == TEXTS && e->best == (accuracy > f->best || tie) &&
              e->metric == accuracy);
        if (e->best) f->best = accuracy, f->best_loss = loss;
        f->ties += tie;
        f->validations++;
        return;
    }
    f->steps++;
    if (f->stop_at && f->steps == f->stop_at) {
        f->stop = 1;
        if (f->files) f->files->fail = 'w', f->files->at = 1, f->files->calls = 0;
    }
    static const float nan[2] = {NAN, NAN};
    if (f->poison_at && f->steps == f->poison_at) CHECK(tt_param_set(f->w->m.classifier_b, nan) == TT_OK);
}

TEST(fit_in_a_line)
{
    tt_stats s;
    tt_fit_event e;
    char line[256], cut[8];
    memset(&e, 0, sizeof e);
    memset(&s, 0, sizeof s);
    e.epoch = 1, e.epochs = 6, e.step = 13, e.steps = 52;
    e.loss = 0.12345, e.metric_name = "accuracy", e.metric = 0.98765, e.unit = "tokens",
    e.per_second = 55692.3;
    e.of_peak = 0.287, e.seconds_left = 125;
    CHECK(tt_fit_text(&e, line, sizeof line) == strlen(line));
    CHECK(strcmp(line, "epoch 2/6 [#####...............] 13/52  loss 0.1235  accuracy 0.988  55692 tokens/s  "
                       "29% of peak  ETA 2:05") == 0);
    CHECK(tt_fit_text(&e, cut, sizeof cut) == strlen(line) && strcmp(cut, "epoch 2") == 0 &&
          tt_fit_text(&e, NULL, 0) == strlen(line));
    e.unit = "images", e.step = 52, e.seconds_left = 0;
    tt_fit_text(&e, line, sizeof line);
    CHECK(strcmp(line, "epoch 2/6 [####################] 52/52  loss 0.1235  accuracy 0.988  55692 images/s  "
                       "29% of peak  ETA 0:00") == 0);
    e.of_peak = 0;
    tt_fit_text(&e, line, sizeof line);
    CHECK(strcmp(line, "epoch 2/6 [####################] 52/52  loss 0.1235  accuracy 0.988  55692 images/s  "
                       "ETA 0:00") == 0);
    e.seconds_left = 1e300;
    tt_fit_text(&e, line, sizeof line);
    CHECK(strstr(line, "  ETA 16666666:40") != NULL);
    s.loss = 0.5, s.correct = 3, s.targets = 4;
    e.validation = &s, e.best = true, e.metric = 0.75;
    tt_fit_text(&e, line, sizeof line);
    CHECK(strcmp(line, "  validation: loss 0.5000, accuracy 0.7500, kept") == 0);
}

static tt_status fit(world *w, const char *folder, bool resume, fitting *f, bool *finished)
{
    tt_fit_options o = tt_fit_options_default();
    f->w = w;
    f->stop = 0;
    if (f->steps + f->validations == 0) f->best = -1;
    o.epochs = f->epochs ? f->epochs : 3;
    o.folder = f->folder = folder;
    o.resume = resume;
    o.stop = &f->stop;
    o.keep = fit_keep;
    o.report = fit_report;
    o.user = f;
    return tt_fit(w->r, tt_loader_source(w->l), tt_loader_source(w->all), &o, finished);
}

#define METRICS "step,epoch,split,loss,accuracy,lr,grad_norm,loss_scale,skipped,bytes"

/* metrics.csv without its last columns: 2 are time and speed, 3 the bytes of the arena too. To be freed. */
static char *metrics_without(int columns_at_end, const char *folder, int *lines)
{
    size_t n, kept = 0;
    char path[1200], *text;
    snprintf(path, sizeof path, "%s/metrics.csv", folder);
    text = test_read(path, &n);
    *lines = 0;
    for (char *line = text, *end; line && (end = strchr(line, '\n')) != NULL; line = end + 1) {
        char *last = end;
        for (int columns = columns_at_end; columns > 0 && last > line;) if (*--last == ',') columns--;
        memmove(text + kept, line, (size_t)(last - line));
        kept += (size_t)(last - line);
        ++*lines;
    }
    if (text) text[kept] = 0;
    return text;
}

static char *metrics_of(const char *folder, int *lines) { return metrics_without(2, folder, lines); }

/* After the 3rd, 7th and 10th step, also of several micro-batches: as if it had not been stopped. */
TEST(fit_stopped_and_resumed)
{
    for (int k = 0; k < 4; k++) {
        static const int stop_at[] = {3, 7, 10, 10};
        setup s = small();
        world a, b, c;
        fitting whole, parts;
        bool finished;
        char first[1024], second[1024], x[1200], y[1200];
        int lines[2];
        size_t bytes;
        memset(&whole, 0, sizeof whole);
        memset(&parts, 0, sizeof parts);
        if (k == 3) s.accumulate = 4;
        s.schedule.total_steps = 21;
        snprintf(first, sizeof first, "%s", test_path(test_folder(), "whole"));
        snprintf(second, sizeof second, "%s", test_path(test_folder(), "parts"));
        if (!open_world(&a, &s) || !open_world(&b, &s) || !open_world(&c, &s)) return;
        CHECK(fit(&a, first, false, &whole, &finished) == TT_OK && finished);
        CHECK(whole.steps == 21 && whole.validations == 3 && whole.kept >= 1 && whole.best > 0.5 &&
              tt_trainer_steps(a.r) == 21);
        parts.stop_at = stop_at[k];
        CHECK(fit(&b, second, false, &parts, &finished) == TT_OK && !finished &&
              tt_trainer_steps(b.r) == stop_at[k]);
        CHECK(fit(&c, second, true, &parts, &finished) == TT_OK && finished && tt_trainer_steps(c.r) == 21);
        CHECK(parts.steps == 21 && parts.validations == 3 && parts.kept == whole.kept &&
              parts.best == whole.best);
        CHECK(same_worlds(&a, &c));
        snprintf(x, sizeof x, "%s/state.safetensors", first);
        snprintf(y, sizeof y, "%s/state.safetensors", second);
        CHECK(same_files(x, y));
        char *m = metrics_of(first, &lines[0]), *n = metrics_of(second, &lines[1]);
        CHECK(lines[0] == 1 + 21 + 3 && lines[1] == lines[0] && strcmp(m, n) == 0 &&
              strncmp(m, METRICS "1,1,train,", sizeof METRICS + 9) == 0);
        free(m);
        free(n);
        snprintf(x, sizeof x, "%s/loss.svg", first);
        snprintf(y, sizeof y, "%s/loss.svg", second);
        CHECK(same_files(x, y));
        char *svg = test_read(x, &bytes);
        /* 690 pixels are 21 steps; epochs end after 7, 14 and 21 */
        CHECK(svg && strstr(svg, "</svg>\n") && strstr(svg, " d='M329 ") &&
              strstr(svg, " d='M2300 0v2320M4600 0v2320M6900 0v2320'/>"));
        int dots = 0;
        for (const char *at = svg ? strstr(svg, "stroke-width='65' d='") : NULL;
             at && at[21] && (at = strpbrk(at + 21, "M/")) != NULL && *at == 'M'; at -= 20)
            dots++;
        CHECK(dots == 3);
        free(svg);
        close_world(&a);
        close_world(&b);
        close_world(&c);
    }
}

TEST(fit_without_folder_or_validation)
{
    setup s = small();
    world w;
    fitting f;
    bool finished;
    tt_fit_options o = tt_fit_options_default();
    memset(&f, 0, sizeof f);
    if (!open_world(&w, &s)) return;
    CHECK(fit(&w, NULL, false, &f, &finished) == TT_OK && finished && f.steps == 21 && f.validations == 3);
    o.epochs = 2;
    o.keep = fit_keep;
    o.user = &f;
    f.kept = 0;
    CHECK(tt_fit(w.r, tt_loader_source(w.l), NULL, &o, NULL) == TT_OK && f.kept == 2 &&
          tt_trainer_steps(w.r) == 35);
    close_world(&w);
}

TEST(fit_refuses)
{
    setup s = small();
    world w, v;
    fitting f;
    bool finished = true;
    char folder[1024];
    tt_fit_options o = tt_fit_options_default();
    memset(&f, 0, sizeof f);
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    if (!open_world(&w, &s) || !open_world(&v, &s)) return;
    o.epochs = 0;
    CHECK(tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(w.all), &o, &finished) == TT_ERR_ARGUMENT &&
          !finished);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "tt_fit: epochs is 0");
    o.epochs = INT64_MAX; /* of seven steps each: more than can be counted */
    CHECK(tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(w.all), &o, &finished) == TT_ERR_ARGUMENT &&
          !finished);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "tt_fit: epochs is 9223372036854775807");
    o.epochs = 1;
    o.resume = true;
    CHECK(tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(w.all), &o, &finished) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "to resume, name the folder that holds the run");
    CHECK(fit(&w, folder, true, &f, &finished) == TT_ERR_FILE);
    CHECK_ERROR(w.ctx, TT_ERR_FILE, "cannot list the folder '");
    CHECK(access(folder, F_OK) != 0); /* and no folder was made for it */
    CHECK(fit(&w, test_folder(), true, &f, &finished) == TT_ERR_FILE);
    CHECK_ERROR(w.ctx, TT_ERR_FILE, "nothing to resume: '");
    CHECK(fit(&w, "/dev/null/run", false, &f, &finished) == TT_ERR_FILE);
    CHECK_ERROR(w.ctx, TT_ERR_FILE, "cannot make folder '/dev/null/run'");
    CHECK(fit(&w, folder, false, &f, &finished) == TT_OK && finished);
    CHECK(fit(&v, folder, false, &f, &finished) == TT_ERR_ARGUMENT && tt_trainer_steps(v.r) == 0);
    CHECK_ERROR(v.ctx, TT_ERR_ARGUMENT, "run' holds a run: resume it, or name another folder");
    o.folder = folder;
    CHECK(tt_fit(v.r, tt_loader_source(v.l), tt_loader_source(v.all), &o, &finished) == TT_ERR_ARGUMENT);
    CHECK_ERROR(v.ctx, TT_ERR_ARGUMENT, "has done 3 epochs and 0 steps, more than 1 epochs of 7 steps");
    w.progress.epoch = INT64_MAX; /* which nothing is multiplied with */
    CHECK(tt_trainer_save(w.r, test_path(folder, "state.safetensors"), &w.progress) == TT_OK);
    CHECK(tt_fit(v.r, tt_loader_source(v.l), tt_loader_source(v.all), &o, &finished) == TT_ERR_ARGUMENT);
    CHECK_ERROR(v.ctx, TT_ERR_ARGUMENT, "has done 9223372036854775807 epochs and 0 steps, more than 1 epoch");
    close_world(&w);
    close_world(&v);
}

/* As of a dataset that was split off before the other was numbered as the model is. */
TEST(fit_refuses_classes_of_another_order)
{
    setup s = small();
    world w, v;
    fitting f;
    bool finished;
    tt_fit_options o = tt_fit_options_default();
    memset(&f, 0, sizeof f);
    if (!open_world(&w, &s) || !open_world(&v, &s)) return;
    strcpy(v.m.class_names[0], "pos");
    strcpy(v.m.class_names[1], "neg");
    CHECK(tt_bert_name_classes(&v.m, v.d) == TT_OK);
    CHECK(tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(v.all), &o, &finished) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "class 0 to train on is 'neg', and for validation 'pos'");
    CHECK(tt_bert_name_classes(&v.m, w.d) == TT_OK);
    CHECK(tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(v.all), &o, &finished) == TT_OK && finished);
    close_world(&w);
    close_world(&v);
}

TEST(fit_resumes_on_the_same_data) /* other classes are refused, other labels or texts told of */
{
    setup s = small();
    world w, v;
    fitting f;
    bool finished;
    char folder[1024];
    tt_progress p;
    memset(&f, 0, sizeof f);
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    if (!open_world(&w, &s) || !open_world(&v, &s)) return;
    f.stop_at = 3;
    CHECK(fit(&w, folder, false, &f, &finished) == TT_OK && !finished);
    const char *class_name = v.d->classes[1];
    v.d->classes[1] = "good";
    f.stop_at = 5;
    CHECK(fit(&v, folder, true, &f, &finished) == TT_ERR_ARGUMENT && !finished);
    CHECK_ERROR(v.ctx, TT_ERR_ARGUMENT, "run' was trained on classes with other names");
    v.d->classes[1] = class_name;
    v.ctx->options.logger.log = keep_warning;
    warned[0] = 0;
    CHECK(fit(&v, folder, true, &f, &finished) == TT_OK && tt_trainer_steps(v.r) == 5 && !warned[0]);
    v.d->examples[40].label ^= 1;
    f.stop_at = 6;
    CHECK(fit(&v, folder, true, &f, &finished) == TT_OK && strstr(warned, "was trained on other data"));
    close_world(&v);

    static const double nothing[] = {NAN, -2, -INFINITY};
    for (int k = 0; k < 7; k++) { /* numbers that no run has */
        tt_progress bad = w.progress;
        double x = nothing[k % 3];
        *(k < 3 ? &bad.targets : k < 6 ? &bad.correct : &bad.best) = x;
        const char *path = test_path(folder, "bad");
        CHECK(tt_trainer_save(w.r, path, &bad) == TT_OK);
        CHECK(tt_trainer_load(w.r, path, &p) == TT_ERR_FORMAT);
        CHECK_ERROR(w.ctx, TT_ERR_FORMAT, "targets were right, and a metric of");
    }
    close_world(&w);
}

/* Weights that blow up in the second epoch: its steps are skipped up to the validation, which is not finite
   either. What is left is the state of the first epoch. */
TEST(fit_that_blows_up_keeps_the_last_good_state)
{
    setup s = small();
    world w, v;
    fitting f, rest;
    bool finished;
    test_log log;
    char folder[1024], path[1200];
    int lines;
    memset(&f, 0, sizeof f);
    memset(&rest, 0, sizeof rest);
    memset(&log, 0, sizeof log);
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    if (!open_world(&w, &s)) return;
    w.ctx->options.logger.log = test__keep_log;
    w.ctx->options.logger.user = &log;
    f.poison_at = 9;
    CHECK(fit(&w, folder, false, &f, &finished) == TT_ERR_NUMERIC && !finished &&
          tt_trainer_steps(w.r) == 9 && f.steps == 14 && f.validations == 1);
    CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "5 steps in a row updated nothing; the last: step 9");
    CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "parameter 'classifier.bias' has a number that is not finite; the "
                "state of step 7 is kept: resume it with a lower learning rate");
    CHECK(log.warnings == 1 && tt_trainer_saved_steps(w.r) == 7);
    snprintf(path, sizeof path, "%s/state.diverged.safetensors", folder);
    CHECK(access(path, F_OK) != 0);
    char *metrics = metrics_of(folder, &lines);
    CHECK(lines == 1 + 14 + 1 && metrics && strstr(metrics, "9,2,train,nan,nan,") &&
          strstr(metrics, ",0,1,5"));
    free(metrics);
    s.schedule.lr *= 0.5f;
    if (!open_world(&v, &s)) return;
    rest.steps = 7, rest.best = f.best, rest.best_loss = f.best_loss;
    CHECK(fit(&v, folder, true, &rest, &finished) == TT_OK && finished && tt_trainer_steps(v.r) == 21);
    close_world(&w);
    close_world(&v);
}

/* A run in three epochs that nothing disturbs, in `folder`, to compare with. */
static bool fit_undisturbed(world *w, const setup *s, const char *folder, fitting *f)
{
    bool finished;
    memset(f, 0, sizeof *f);
    return open_world(w, s) &&
           CHECK(fit(w, folder, false, f, &finished) == TT_OK && finished && f->kept >= 1);
}

/* The two folders hold the same state and, but for times, the same metrics: a line each of 21 steps
   and 3 validations. */
static void check_same_runs(const char *a, const char *b)
{
    char x[1200], y[1200];
    int lines[2];
    snprintf(x, sizeof x, "%s/state.safetensors", a);
    snprintf(y, sizeof y, "%s/state.safetensors", b);
    CHECK(same_files(x, y));
    char *m = metrics_of(a, &lines[0]), *n = metrics_of(b, &lines[1]);
    CHECK(lines[0] == 1 + 21 + 3 && lines[1] == lines[0] && m && n && strcmp(m, n) == 0);
    free(m);
    free(n);
}

TEST(fit_ties_of_accuracy_go_to_the_lower_loss)
{
    setup s = small();
    world w;
    fitting f;
    bool finished;
    memset(&f, 0, sizeof f);
    f.epochs = 8;
    s.dropout = 0;
    s.schedule.kind = TT_CONSTANT;
    s.schedule.lr = 4e-3f;
    if (!open_world(&w, &s)) return;
    CHECK(fit(&w, NULL, false, &f, &finished) == TT_OK && finished && f.validations == 8);
    CHECK(f.best == 1 && f.ties >= 2); /* all right from some epoch on, and the loss still falls */
    close_world(&w);
}

TEST(fit_keeps_again_where_keep_failed)
{
    setup s = small();
    world a, b, c;
    fitting whole, parts;
    bool finished;
    char first[1024], second[1024];
    s.schedule.total_steps = 21;
    snprintf(first, sizeof first, "%s", test_path(test_folder(), "whole"));
    snprintf(second, sizeof second, "%s", test_path(test_folder(), "parts"));
    if (!fit_undisturbed(&a, &s, first, &whole)) return;
    for (int at = 1; at <= whole.kept; at++) {
        memset(&parts, 0, sizeof parts);
        parts.keep_fails_at = at;
        if (!open_world(&b, &s) || !open_world(&c, &s)) return;
        CHECK(fit(&b, second, false, &parts, &finished) == TT_ERR_FILE && !finished && parts.kept == at);
        CHECK_ERROR(b.ctx, TT_ERR_FILE, "keep: the disk is full");
        CHECK(tt_trainer_saved_steps(b.r) == tt_trainer_steps(b.r));
        CHECK(fit(&c, second, true, &parts, &finished) == TT_OK && finished);
        CHECK(parts.kept == whole.kept + 1 && parts.best == whole.best && parts.best_loss == whole.best_loss);
        check_same_runs(first, second);
        test__remove(second);
        close_world(&b);
        close_world(&c);
    }
    close_world(&a);
}

/* A run that is killed while its first model is kept leaves a state, and the rest comes out the same. */
TEST(fit_killed_in_its_first_keep_goes_on)
{
    setup s = small();
    world a, b;
    fitting whole, rest;
    bool finished;
    char first[1024], second[1024];
    s.schedule.total_steps = 21;
    memset(&whole, 0, sizeof whole);
    memset(&rest, 0, sizeof rest);
    snprintf(first, sizeof first, "%s", test_path(test_folder(), "whole"));
    snprintf(second, sizeof second, "%s", test_folder());
    whole.copy = second;
    if (!open_world(&a, &s) || !open_world(&b, &s)) return;
    CHECK(fit(&a, first, false, &whole, &finished) == TT_OK && finished);
    CHECK(fit(&b, second, true, &rest, &finished) == TT_OK && finished);
    CHECK(rest.kept == whole.kept && rest.validations == 3 && rest.steps == 14 && same_worlds(&a, &b));
    check_same_runs(first, second);
    close_world(&a);
    close_world(&b);
}

/* What cannot be opened or listed is not absent: no run is begun over one that is there, and no
   metrics are dropped. */
TEST(fit_takes_no_unreadable_file_for_absent)
{
    static const struct { char op; bool resume; tt_status status; const char *error; } faults[] = {
        {'o', false, TT_ERR_ARGUMENT, "holds a run: resume it, or name another folder"},
        {'l', false, TT_ERR_FILE, "cannot list the folder '"},
        {'o', true, TT_ERR_FILE, "cannot open '"},
        {'l', true, TT_ERR_FILE, "cannot list the folder '"}};
    setup s = small();
    world w, v;
    fitting f;
    test_files files;
    bool finished;
    char folder[1024], path[1200];
    size_t n, m;
    memset(&f, 0, sizeof f);
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    snprintf(path, sizeof path, "%s/state.safetensors", folder);
    f.stop_at = 3;
    if (!open_world(&w, &s)) return;
    CHECK(fit(&w, folder, false, &f, &finished) == TT_OK && !finished);
    char *state = test_read(path, &n);
    s.files = &files;
    for (int k = 0; k < TEST_COUNT(faults); k++)
        for (int at = 1; at <= (faults[k].resume ? 2 : 1); at++) { /* resumed: the state, then the metrics */
            if (!open_world(&v, &s)) return;
            files.fail = faults[k].op, files.at = at, files.calls = 0;
            f.steps = 0;
            tt_status status = fit(&v, folder, faults[k].resume, &f, &finished);
            CHECK(status == faults[k].status && f.steps == 0);
            CHECK_ERROR(v.ctx, faults[k].status, faults[k].error);
            files.fail = 0;
            char *now = test_read(path, &m);
            CHECK(now && m == n && memcmp(now, state, n) == 0);
            free(now);
            close_world(&v);
        }
    free(state);
    close_world(&w);
}

static bool close_below(void *arg, const char *name) { (void)name; close(*(int *)arg); return true; }

TEST(a_folder_that_breaks_off_is_not_listed) /* its file descriptor is closed while names are read */
{
    const tt_files files = tt_context_options_default().files;
    char *folder = test_folder();
    int next = dup(0);
    REQUIRE(next >= 0 && close(next) == 0);
    test_write(test_path(folder, "a"), "", 0);
    CHECK(!files.list(files.user, folder, close_below, &next));
    CHECK(strcmp(files.reason(files.user), strerror(EBADF)) == 0);
}

TEST(fit_says_from_where_a_resumed_run_goes_on)
{
    setup s = small();
    world a, b, c;
    fitting whole, parts;
    test_files files;
    bool finished;
    char first[1024], second[1024];
    s.schedule.total_steps = 21;
    snprintf(first, sizeof first, "%s", test_path(test_folder(), "whole"));
    snprintf(second, sizeof second, "%s", test_path(test_folder(), "parts"));
    if (!fit_undisturbed(&a, &s, first, &whole) || !open_world(&c, &s)) return;
    CHECK(tt_trainer_saved_steps(a.r) == 21 && tt_trainer_saved_steps(c.r) == -1);
    s.files = &files;
    for (int stop_at = 4; stop_at <= 9; stop_at += 5) { /* before there is a state, and in the second epoch */
        memset(&parts, 0, sizeof parts);
        if (!open_world(&b, &s)) return;
        parts.stop_at = stop_at;
        parts.files = &files;
        CHECK(fit(&b, second, false, &parts, &finished) == TT_ERR_FILE && !finished &&
              tt_trainer_steps(b.r) == stop_at);
        CHECK_ERROR(b.ctx, TT_ERR_FILE, "cannot write '");
        CHECK(tt_trainer_saved_steps(b.r) == (stop_at == 4 ? -1 : 7));
        files.fail = 0;
        close_world(&b);
    }
    parts.stop_at = 0;
    CHECK(fit(&c, second, true, &parts, &finished) == TT_OK && finished && parts.steps == 9 + 14);
    CHECK(tt_trainer_saved_steps(c.r) == 21 && same_worlds(&a, &c));
    check_same_runs(first, second);
    close_world(&a);
    close_world(&c);
}

/* Field `column` of a line, as text valid until the next call. */
static const char *field_of(const char *line, int column)
{
    static char text[64];
    for (; column > 0; column--) line = strchr(line, ',') + 1;
    snprintf(text, sizeof text, "%.*s", (int)strcspn(line, ",\n"), line);
    return text;
}

TEST(fit_writes_metrics)
{
    for (int scaled = 0; scaled < 2; scaled++) {
        setup s = small();
        world w, v;
        fitting f;
        bool finished;
        char folder[1024], path[1200];
        size_t n;
        int lines = 0, skipped = 0, steps = 0;
        memset(&f, 0, sizeof f);
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
        snprintf(path, sizeof path, "%s/metrics.csv", folder);
        if (scaled) s.precision = "16-mixed", s.loss_scale.init = 0x1p40f; /* the first steps overflow */
        if (!open_world(&w, &s) || !open_world(&v, &s)) return;
        f.stop_at = 2;
        CHECK(fit(&w, folder, false, &f, &finished) == TT_OK && !finished);
        char *text = test_read(path, &n);
        REQUIRE(text && strncmp(text, METRICS ",seconds,tokens_per_second\n", sizeof METRICS + 26) == 0);
        /* Two steps that the state does not have, as a kill between the writing of two files leaves them. */
        FILE *more = fopen(path, "a");
        CHECK(more && fputs(strchr(text, '\n') + 1, more) >= 0 && fclose(more) == 0);
        free(text);
        CHECK(fit(&v, folder, true, &f, &finished) == TT_OK && finished && f.steps == 21);
        text = test_read(path, &n);
        REQUIRE(text != NULL);
        for (const char *line = strchr(text, '\n') + 1; *line; line = strchr(line, '\n') + 1, lines++) {
            bool validation = strcmp(field_of(line, 2), "validation") == 0;
            CHECK(atoi(field_of(line, 1)) == lines / 8 + 1 && validation == (lines % 8 == 7));
            CHECK(atof(field_of(line, 3)) > 0 && atof(field_of(line, 4)) >= 0 &&
                  atof(field_of(line, 4)) <= 1);
            CHECK((size_t)atoll(field_of(line, 9)) == tt_program_plan(v.r->train).bytes);
            CHECK(atof(field_of(line, 10)) > 0 && atof(field_of(line, 11)) > 0);
            for (int k = 5; k < 9; k++) CHECK(!*field_of(line, k) == validation);
            if (validation) continue;
            CHECK_NEAR(atof(field_of(line, 5)), tt_schedule_lr(&s.schedule, steps), 1e-9);
            if (atoi(field_of(line, 8)) == skipped) {
                CHECK(atof(field_of(line, 6)) > 0);
                steps++;
            } else {
                CHECK(atof(field_of(line, 6)) == 0);
                skipped++;
            }
            CHECK(atoi(field_of(line, 8)) == skipped && atoi(field_of(line, 0)) == steps);
            CHECK((float)atof(field_of(line, 7)) == (scaled ? ldexpf(1, 40 - skipped) : 1));
        }
        CHECK(lines == 24 && steps + skipped == 21 && (skipped > 2) == scaled &&
              steps == tt_trainer_steps(v.r));
        free(text);
        close_world(&w);
        close_world(&v);
    }
}

TEST(fit_refuses_metrics_with_other_columns)
{
    static const char old[] =
        "step,epoch,split,loss,accuracy,lr,tokens_per_second\n1,1,train,0.7,0.5,0.001,5000\n";
    setup s = small();
    world w, v;
    fitting f;
    bool finished;
    char folder[1024], path[1200], heading[160];
    int lines;
    tt_trainer images;
    tt__fit of_images;
    memset(&f, 0, sizeof f);
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    snprintf(path, sizeof path, "%s/metrics.csv", folder);
    f.stop_at = 3;
    if (!open_world(&w, &s) || !open_world(&v, &s)) return;
    CHECK(fit(&w, folder, false, &f, &finished) == TT_OK && !finished);
    test_write(path, old, sizeof old - 1);
    CHECK(fit(&v, folder, true, &f, &finished) == TT_ERR_FORMAT && f.steps == 3);
    CHECK_ERROR(v.ctx, TT_ERR_FORMAT, "metrics.csv' has other columns than this run writes, step,epoch,");
    CHECK_ERROR(v.ctx, TT_ERR_FORMAT, ",tokens_per_second: move it away");
    remove(path);
    CHECK(fit(&v, folder, true, &f, &finished) == TT_OK && finished && f.steps == 21);
    free(metrics_of(folder, &lines));
    CHECK(lines == 1 + 18 + 3);
    memset(&images, 0, sizeof images);
    memset(&of_images, 0, sizeof of_images);
    of_images.r = &images;
    of_images.metric = tt_accuracy();
    of_images.unit = "images";
    CHECK(tt__fit_heading(&of_images, heading) == strlen(heading) &&
          strcmp(heading, METRICS ",seconds,images_per_second\n") == 0);
    close_world(&w);
    close_world(&v);
}

/* Elements open and close in order, and no number is one that is none. */
static bool is_drawing(const char *svg)
{
    char open[16][16];
    int depth = 0;
    if (strstr(svg, "nan") || strstr(svg, "inf") || strncmp(svg, "<svg ", 5) != 0) return false;
    for (const char *at = svg; (at = strchr(at, '<')) != NULL;) {
        const char *end = strchr(at, '>');
        size_t n = strcspn(at + 1, " >");
        if (!end || n > 15) return false;
        if (at[1] == '/') {
            if (--depth < 0 || strlen(open[depth]) != n - 1 || strncmp(open[depth], at + 2, n - 1) != 0)
                return false;
        } else if (end[-1] != '/') {
            if (depth == 16) return false;
            snprintf(open[depth++], 16, "%.*s", (int)n, at + 1);
        }
        at = end;
    }
    return depth == 0;
}

/* Draws f; to be freed. */
static char *drawn(const tt__fit *f)
{
    tt__text text = {NULL, 0, 0};
    tt__fit_draw(&text, f);
    text.capacity = text.length + 1;
    text.to = (char *)malloc(text.capacity);
    text.length = 0;
    tt__fit_draw(&text, f);
    CHECK(text.length + 1 == text.capacity && is_drawing(text.to));
    for (const char *at = strstr(text.to, "scale("); (at = strpbrk(at, "MLHVhv<")) != NULL; at++) {
        if (*at == '<' || !strchr("-0123456789", at[1])) continue;
        char *next;
        long x = strtol(at + 1, &next, 10), y = *next == ' ' ? strtol(next, NULL, 10) : 0;
        CHECK(x >= -2320 && x <= 6900 && y >= -2320 && y <= 2 * 2320); /* near its panel */
    }
    return text.to;
}

static void add_point(tt__fit *f, int64_t step, int64_t epoch, bool validation, double loss, double accuracy,
                      double lr)
{
    tt__fit_point *p = &f->point[f->points++];
    p->step = step, p->epoch = epoch, p->validation = validation;
    p->value[TT__FIT_LOSS] = loss, p->value[TT__FIT_METRIC] = accuracy, p->value[TT__FIT_LR] = lr;
}

TEST(pictures_of_a_training)
{
    enum { STEPS = 100000 };
    static const char *const ticks[] = {"0",    "0.2", "0.4", "0.6", "0.8", "1", "0.02",
                                        "0.04", "1",   "2",   "3",   "4",   NULL};
    char label[32];
    tt__fit f;
    memset(&f, 0, sizeof f);
    f.metric = tt_accuracy();
    f.point = (tt__fit_point *)calloc(STEPS + 1000, sizeof *f.point);

    free(drawn(&f)); /* nothing at all */
    for (int k = 1; k <= 4; k++) add_point(&f, k, 1, false, 1, 0.25, 0.01 * k);
    add_point(&f, 4, 1, true, 0.5, 0.75, 0);
    char *svg = drawn(&f);
    for (int k = 0; ticks[k]; k++) {
        snprintf(label, sizeof label, ">%s</text>", ticks[k]);
        if (!CHECK(strstr(svg, label) != NULL)) printf("  no tick %s\n", ticks[k]);
    }
    /* 690 pixels are 4 steps, 232 a loss of 1, 124 an accuracy of 0.8, 72 a learning rate of 0.04: these are
       tenths of pixels. */
    CHECK(strstr(svg, "d='M1725 2320h0L3450 2320L5175 2320L6900 2320'") &&
          strstr(svg, "stroke-width='65' d='M6900 1160h0'"));
    CHECK(strstr(svg, "d='M1725 388h0L3450 388L5175 388L6900 388'") &&
          strstr(svg, "stroke-width='65' d='M6900 1163h0'"));
    CHECK(strstr(svg, "d='M1725 180h0L3450 360L5175 540L6900 720'") && strstr(svg, ">Loss</text>") &&
          strstr(svg, ">Accuracy</text>") && strstr(svg, ">Learning rate</text>"));
    CHECK(strstr(svg, ">step</text>") && strstr(svg, ">epoch</text>") && strstr(svg, ">validation</text>") &&
          strstr(svg, ">training, running mean</text>"));
    free(svg);

    /* A step alone; losses constant, huge, tiny, 0, far apart, NaN, with a spike, negative, alternating
       between huge and its negative; steps near 2^63, and steps in the wrong order. */
    for (int k = 0; k < 12; k++) {
        static const double losses[12] = {0.7, 2.302585, 3e38, 1e-44, 0, 1e-9, NAN, 0.7, -1, 3e38, 1e5, 0.7};
        f.points = 0;
        for (int step = 1; step <= (k ? 30 : 1); step++) {
            double factor = k == 5 ? pow(2, step) : k == 7 && step == 9 ? 1e38 : k == 9 && step % 2 ? -1 : 1;
            int64_t at = k == 10 ? step * (INT64_MAX / 64) : k == 11 ? 30 - step : step;
            double loss = losses[k] * factor, accuracy = k == 9 ? 1e38 : 1;
            add_point(&f, at, (step + 9) / 10, false, loss, accuracy, k == 4 ? 0 : 1e-3);
            if (k && step % 10 == 0) add_point(&f, at, step / 10, true, loss, -accuracy, 0);
        }
        svg = drawn(&f);
        CHECK((strstr(svg, "(logarithmic)") != NULL) == (k == 5 || k == 7));
        free(svg);
    }

    f.points = 0; /* many steps, and an epoch in each 200 */
    uint64_t random = 5;
    for (int step = 1; step <= STEPS; step++) {
        double loss = 0.2 + exp(-step / 20000.0) + (test_random(&random) % 1000) / 2000.0;
        add_point(&f, step, (step + 199) / 200, false, loss, 1 - loss / 2, 1e-3 * step / STEPS);
        if (step % 200 == 0) add_point(&f, step, step / 200, true, loss, 1 - loss / 2, 0);
    }
    svg = drawn(&f);
    CHECK(strlen(svg) < 110000 && strstr(svg, ">100000</text>") && strstr(svg, ">500</text>"));
    free(svg);
    free(f.point);
}

TEST(lines_of_metrics)
{
    static const struct { const char *line; bool good; double loss; } lines[] = {
                 {"7,2,train,0.5,0.75,0.001,1,1,0,9,0.1,5\n", true, 0.5},
                 {"7,2,validation,0.25,0.75,,,,,9,0.1,5\n", true, 0.25},
                 {"7,2,train,1e300,0.75,0.001,\n", true, NAN},
                 {"7,2,train,nan,0.75,0.001,\n", true, NAN},
                 {"7,2,train,-inf,0.75,0.001,\n", true, NAN},
                 {METRICS ",seconds,tokens_per_second\n", false, 0},
                 {"7,2,train,0.5,0.75,0.001\n", false, 0},
                 {"\n", false, 0},
                 {"7,0,train,0.5,0.75,0.001,\n", false, 0},
                 {"-7,1,train,0.5,0.75,0.001,\n", false, 0},
                 {"7,1,train,0.500000000000000000000000000000000000000000000,0.75,0.001,\n", false, 0}};
    for (int k = 0; k < TEST_COUNT(lines); k++) {
        tt__fit_point p;
        tt__fit f;
        f.metric = tt_accuracy();
        CHECK(tt__fit_read_line(&f, lines[k].line, strlen(lines[k].line), &p) == lines[k].good);
        if (!lines[k].good) continue;
        CHECK(p.step == 7 && p.epoch == 2 && p.validation == (k == 1) && p.value[TT__FIT_METRIC] == 0.75 &&
              p.value[TT__FIT_LR] == (k == 1 ? 0 : 0.001));
        CHECK(isnan(lines[k].loss) ? isnan(p.value[TT__FIT_LOSS]) : p.value[TT__FIT_LOSS] == lines[k].loss);
    }
}

TEST(fit_of_a_trainer_that_only_evaluates)
{
    setup s = small();
    world w;
    fitting f;
    bool finished = true;
    memset(&f, 0, sizeof f);
    s.train = false;
    if (!open_world(&w, &s)) return;
    CHECK(fit(&w, NULL, false, &f, &finished) == TT_ERR_ARGUMENT && !finished && f.steps == 0);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "this trainer was made with train = false");
    close_world(&w);
}

/* A model of one linear layer over the first token's embedding, whose bias has the name in `self`. */
static tt_value record_named(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    static const tt_init zeros = {TT_INIT_ZEROS, 0};
    const char *names[3] = {"table", "weight", (const char *)self};
    const int64_t dims[3][2] = {{50, 8}, {2, 8}, {2, 0}};
    tt_param *p[3];
    tt_inputs in = tt_text_inputs(t, o);
    for (int k = 0; k < 3; k++) p[k] = tt_param_new(t->ctx, names[k], k == 2 ? 1 : 2, dims[k], zeros);
    *output = tt_linear(t, tt_gather_rows(t, tt_embedding(t, in.ids, p[0]), in.first), p[1], p[2]);
    return tt_cross_entropy(t, *output, in.labels, NULL);
}

TEST(names_that_a_state_cannot_have)
{
    char longest[200], longer[200];
    const char *names[] = {
        longest,         longer,         "exp_avg.table", "exp_avg_sq.table", "momentum_buffer.table",
        "tinytrain.run", "__metadata__", "not \xff UTF-8"};
    memset(longest, 'n', sizeof longest);
    memset(longer, 'n', sizeof longer);
    longest[170] = longer[171] = 0;
    for (int k = 0; k < TEST_COUNT(names); k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_model model = {names[k], record_named, tt_accuracy(), 2, "tokens", 8, false};
        tt_train_options o = tt_train_options_default();
        tt_progress progress;
        memset(&progress, 0, sizeof progress);
        o.schedule.kind = TT_CONSTANT;
        o.max_seqs = 1;
        o.max_tokens = 8;
        tt_trainer *r = tt_trainer_new(ctx, &model, &o);
        CHECK((r != NULL) == (k == 0));
        if (!r) {
            char part[300];
            snprintf(part, sizeof part, "cannot be saved with the parameter '%s' of %zu bytes", names[k],
                     strlen(names[k]));
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, part);
        } else {
            const char *path = test_path(test_folder(), "state.safetensors");
            CHECK(tt_trainer_save(r, path, &progress) == TT_OK &&
                  tt_trainer_load(r, path, &progress) == TT_OK);
        }
        tt_trainer_free(r);
        TEST_CLOSE(ctx, &a);
    }
}

/* --------------------------------------------------------------------------- models and data of one's own */

enum { OWN_STEPS = 5, OWN_MICRO = 2, OWN_ROWS = 6, OWN_WORDS = 7, OWN_TOKENS = 12, OWN_EPOCHS = 3 };

/* Regression of a line through noise, with a weight for each example; or a language model of two sequences,
   each of which counts up. What a step has depends on its number and epoch. */
typedef struct own {
    test_allocator a;
    tt_context *ctx;
    bool language;
    tt_param *embedding, *position, *w, *b, *qkv[3];
    tt_trainer *r;
    tt_source source, validation;
    int64_t epoch, step;
    int micro;
    float x[OWN_ROWS * 3], y[OWN_ROWS], weight[OWN_ROWS];
    int32_t ids[OWN_TOKENS], positions[OWN_TOKENS], targets[OWN_TOKENS], start[3];
    tt_array arrays[3];
    uint64_t hash;
    volatile int stop;
    int steps, stop_at, kept;
    int64_t gives;              /* steps of an epoch */
    int64_t fails_at;           /* this step of epoch 1, in its second micro-batch, or seeking to it; -1 */
    bool within_steps, nothing; /* last_of_step is never set; epoch 1 has no step */
    tt_status keeps;            /* what own_keep returns */
    struct own *other;          /* after the first step this is to train in the same folder, and is refused */
    const char *folder;
    int aimless[2];             /* of epoch 1, steps from here to there have no target that counts */
    bool unvalidated;           /* tt_fit gets no validation */
    int blow_at[2];             /* after these of the reported steps, numbered from 1, "w" is set ... */
    float blow_to[2];           /* ... to these numbers */
    double metrics[OWN_EPOCHS], losses[OWN_EPOCHS];
    bool best[OWN_EPOCHS];
} own;

static tt_value own_record(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    const own *w = (const own *)self;
    if (!w->language) {
        int64_t rows = tt_axis(t, "examples", o->max_seqs);
        tt_value x = tt_input(t, "x", TT_F32, rows, 3), y = tt_input(t, "y", TT_F32, rows, 1);
        tt_value weight = tt_input(t, "weight", TT_F32, rows, 1);
        *output = tt_linear(t, tt_dropout(t, x, 0.1f), w->w, w->b);
        return tt_mean_squared_error(t, *output, y, weight);
    }
    int64_t rows = tt_axis(t, "tokens", o->max_tokens), seqs = tt_axis(t, "sequences", o->max_seqs);
    tt_value ids = tt_input(t, "ids", TT_I32, rows, 1), positions = tt_input(t, "positions", TT_I32, rows, 1);
    tt_value start = tt_seq_start(t, "seq_start", seqs), targets = tt_input(t, "targets", TT_I32, rows, 1),
             in[3];
    tt_attention_options attention = tt_attention_options_default(1);
    attention.causal = true;
    tt_value x = tt_add(t, tt_embedding(t, ids, w->embedding), tt_embedding(t, positions, w->position));
    for (int k = 0; k < 3; k++) in[k] = tt_linear(t, x, w->qkv[k], NULL);
    x = tt_add(t, x, tt_attention(t, in[0], in[1], in[2], start, &attention));
    *output = tt_linear(t, tt_dropout(t, x, 0.1f), w->embedding, NULL);
    return tt_cross_entropy(t, *output, targets, NULL);
}

static tt_status own_seek(void *self, int64_t epoch, int64_t step)
{
    own *w = (own *)self;
    w->epoch = epoch;
    w->step = step;
    w->micro = 0;
    return epoch == 1 && step && step == w->fails_at ? TT_ERR_UNSUPPORTED : TT_OK;
}

static tt_status own_next(void *self, tt_batch *b, bool *more)
{
    own *w = (own *)self;
    uint64_t random = (uint64_t)(w->epoch * 1000 + w->step * 10 + w->micro + 1);
    if (w->epoch == 1 && w->micro && w->step == w->fails_at) return TT_ERR_FORMAT;
    *more = w->step < w->gives && !(w->nothing && w->epoch == 1);
    if (!*more) return TT_OK;
    b->seqs = w->language ? 2 : OWN_ROWS - w->micro;
    if (w->language) {
        b->rows = OWN_TOKENS - w->micro;
        for (int k = 0, at = 0; k < b->rows; k++, at++) {
            if (k == OWN_TOKENS / 2) at = 0;
            w->ids[k] = at ? (w->ids[k - 1] + 1) % OWN_WORDS : (int32_t)(test_random(&random) % OWN_WORDS);
            w->targets[k] = (w->ids[k] + 1) % OWN_WORDS;
            w->positions[k] = at;
        }
        w->start[1] = OWN_TOKENS / 2, w->start[2] = b->rows;
        b->ids = w->ids, b->positions = w->positions, b->seq_start = w->start;
    }
    for (int k = 0; k < OWN_ROWS; k++) {
        for (int c = 0; c < 3; c++) w->x[3 * k + c] = (float)(test_random(&random) % 1000) / 500 - 1;
        w->y[k] = 2 * w->x[3 * k] - w->x[3 * k + 1] + 0.5f + (float)(test_random(&random) % 100) / 1000;
        w->weight[k] = k % 2 ? 0.5f : 1;
        if (w->epoch == 1 && w->step >= w->aimless[0] && w->step < w->aimless[1]) w->weight[k] = 0;
    }
    const tt_array arrays[] = {{"x", w->x, b->seqs}, {"y", w->y, b->seqs}, {"weight", w->weight, b->seqs}},
                   targets = {"targets", w->targets, b->rows};
    memcpy(w->arrays, arrays, sizeof arrays);
    if (w->language) w->arrays[0] = targets;
    b->arrays = w->arrays;
    b->n_arrays = w->language ? 1 : 3;
    b->last_of_step = ++w->micro == OWN_MICRO;
    if (b->last_of_step) w->step++, w->micro = 0;
    if (w->within_steps) b->last_of_step = false;
    return TT_OK;
}

static uint64_t own_hash(void *self) { return ((const own *)self)->hash; }
static double own_rmse(const tt_stats *s) { return sqrt(s->loss); }

static bool open_own(own *w, bool language, tt_metric metric)
{
    const int64_t e[] = {OWN_WORDS, 8}, p[] = {OWN_TOKENS, 8}, q[] = {8, 8}, l[] = {1, 3}, one = 1;
    const tt_init normal = {TT_INIT_NORMAL, 0.3f};
    memset(w, 0, sizeof *w);
    w->ctx = test_open(&w->a);
    w->language = language;
    w->hash = 7;
    w->gives = OWN_STEPS;
    w->fails_at = -1;
    w->embedding = tt_param_new(w->ctx, "embedding", 2, e, normal);
    w->position = tt_param_new(w->ctx, "position", 2, p, normal);
    w->qkv[0] = tt_param_new(w->ctx, "q", 2, q, normal);
    w->qkv[1] = tt_param_new(w->ctx, "k", 2, q, normal);
    w->qkv[2] = tt_param_new(w->ctx, "v", 2, q, normal);
    w->w = tt_param_new(w->ctx, "w", 2, l, normal);
    w->b = tt_param_new(w->ctx, "b", 1, &one, normal);
    tt_source s = {w, own_seek, own_next, OWN_STEPS, language ? 2 : OWN_ROWS, language ? OWN_TOKENS : 0, true,
                   own_hash, NULL, 0, NULL, NULL};
    w->source = s;
    w->validation = s;
    tt_model model = {w, own_record, metric, 0, language ? "tokens" : NULL, 0, false};
    tt_train_options o = tt_train_options_default();
    o.schedule.lr = 0.1f;
    o.schedule.total_steps = 2 * OWN_STEPS * OWN_EPOCHS;
    o.max_seqs = s.max_seqs;
    o.max_tokens = s.max_tokens;
    o.compile.accumulate = true;
    w->r = tt_trainer_new(w->ctx, &model, &o);
    if (!w->r) CHECK_ERROR(w->ctx, TT_OK, "a trainer");
    return w->r != NULL;
}

static void close_own(own *w)
{
    tt_trainer_free(w->r);
    TEST_CLOSE(w->ctx, &w->a);
}

static tt_status own_keep(void *user) { return ((own *)user)->kept++, ((own *)user)->keeps; }

static tt_status own_fit(own *w, const char *folder, bool resume, const char *best_by, bool *finished);

static void refuse_other(const own *w)
{
    char who[128];
    bool finished;
    snprintf(who, sizeof who, "run' is in use by another run (process %ld of ", (long)getpid());
    CHECK(own_fit(w->other, w->folder, false, NULL, &finished) == TT_ERR_FILE && !finished);
    CHECK_ERROR(w->other->ctx, TT_ERR_FILE, who);
    CHECK_ERROR(w->other->ctx, TT_ERR_FILE, " UTC): wait for its end, or name another folder");
}

static void own_report(void *user, const tt_fit_event *e)
{
    own *w = (own *)user;
    if (!e->validation) {
        w->stop = ++w->steps == w->stop_at;
        if (w->other && w->steps == 1) refuse_other(w);
        for (int k = 0; k < 2; k++) {
            const float to[] = {w->blow_to[k], 1, 1};
            if (w->steps == w->blow_at[k]) CHECK(tt_param_set(w->w, to) == TT_OK);
        }
        return;
    }
    w->metrics[e->epoch] = e->metric;
    w->losses[e->epoch] = e->validation->loss;
    w->best[e->epoch] = e->best;
}

static tt_status own_fit(own *w, const char *folder, bool resume, const char *best_by, bool *finished)
{
    tt_fit_options o = tt_fit_options_default();
    o.epochs = OWN_EPOCHS;
    o.folder = folder;
    o.resume = resume;
    o.best_by = best_by;
    o.stop = &w->stop;
    o.keep = own_keep;
    o.report = own_report;
    o.user = w;
    return tt_fit(w->r, &w->source, w->unvalidated ? NULL : &w->validation, &o, finished);
}

/* A regression and a language model: what tt_fit does for classifiers it does for them. */
TEST(fit_of_models_of_ones_own)
{
    for (int language = 0; language < 2; language++) {
        const tt_metric rmse = {"rmse", own_rmse, true}, metric = language ? tt_perplexity() : rmse;
        char first[1024], second[1024], x[1200], y[1200];
        int lines[2];
        size_t n;
        own a, b, c;
        tt_stats before, after;
        bool finished;
        snprintf(first, sizeof first, "%s", test_path(test_folder(), "whole"));
        snprintf(second, sizeof second, "%s", test_path(test_folder(), "parts"));
        if (!open_own(&a, language, metric) || !open_own(&b, language, metric)) return;
        if (!open_own(&c, language, metric)) return;
        CHECK(tt_evaluate(a.r, &a.validation, &before) == TT_OK);
        CHECK(before.targets == (language ? OWN_STEPS * (2.0 * OWN_TOKENS - 1) : OWN_STEPS * (4.5 + 4)));
        CHECK(own_fit(&a, first, false, NULL, &finished) == TT_OK && finished &&
              a.steps == OWN_STEPS * OWN_EPOCHS);
        CHECK(tt_evaluate(a.r, &a.validation, &after) == TT_OK && after.loss < 0.7 * before.loss);
        CHECK_NEAR(a.metrics[2], language ? exp(after.loss) : sqrt(after.loss), 0);
        b.stop_at = 7; /* in the middle of the second epoch */
        CHECK(own_fit(&b, second, false, NULL, &finished) == TT_OK && !finished &&
              tt_trainer_steps(b.r) == 7);
        CHECK(own_fit(&c, second, true, NULL, &finished) == TT_OK && finished && c.steps == a.steps - 7);
        snprintf(x, sizeof x, "%s/state.safetensors", first);
        snprintf(y, sizeof y, "%s/state.safetensors", second);
        CHECK(same_files(x, y));
        char *m = metrics_of(first, &lines[0]), *o = metrics_of(second, &lines[1]);
        CHECK(m && o && strcmp(m, o) == 0 && lines[0] == 1 + OWN_EPOCHS * (OWN_STEPS + 1));
        CHECK(m && strncmp(m, "step,epoch,split,loss,", 22) == 0);
        CHECK(m &&
              strncmp(m + 22, language ? "perplexity,lr,grad_norm," : "rmse,lr,", language ? 24 : 8) == 0);
        free(m);
        free(o);
        snprintf(x, sizeof x, "%s/metrics.csv", first);
        m = test_read(x, &n);
        CHECK(m && strstr(m, language ? ",seconds,tokens_per_second\n" : ",seconds,examples_per_second\n"));
        free(m);
        snprintf(x, sizeof x, "%s/loss.svg", first);
        m = test_read(x, &n);
        CHECK(m && strstr(m, language ? ">Perplexity</text>" : ">Rmse</text>") && strstr(m, "height='612'"));
        free(m);

        float got[OWN_TOKENS * OWN_WORDS], given[OWN_TOKENS * OWN_WORDS]; /* predictions need no targets */
        tt_batch batch;
        bool more;
        const size_t outputs = language ? OWN_TOKENS * OWN_WORDS : OWN_ROWS;
        memset(&batch, 0, sizeof batch);
        memset(got, 0, sizeof got);
        memset(given, 0, sizeof given);
        CHECK(own_seek(&a, 0, 0) == TT_OK && own_next(&a, &batch, &more) == TT_OK && more);
        CHECK(tt_forward(a.r, &batch, given, outputs) == TT_OK);
        batch.n_arrays = language ? 0 : 1;
        CHECK(tt_forward(a.r, &batch, got, outputs) == TT_OK && memcmp(got, given, sizeof got) == 0);
        CHECK(language || fabsf(got[0] - a.y[0]) < 1.5f);
        CHECK(tt_forward(a.r, &batch, got, outputs - 1) == TT_ERR_SHAPE);
        CHECK(tt_predict(a.r, &batch, got) == TT_ERR_ARGUMENT);
        CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "tt_predict needs a model with classes");
        CHECK(tt_train_batch(a.r, &batch, NULL, NULL) == TT_ERR_ARGUMENT);
        CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, language ? "the batch has no targets (NULL)" : "has no y (NULL)");
        batch.ids = NULL, batch.n_arrays = 0;
        CHECK(tt_forward(a.r, &batch, got, outputs) == TT_ERR_ARGUMENT);
        CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, language ? "the batch has no ids (NULL)" : "has no x (NULL)");
        close_own(&a);
        close_own(&b);
        close_own(&c);
    }
}

static int own_calls;
static double own_rising(const tt_stats *s) { return s->grad_norm > 0 ? 0 : ++own_calls; }
static double own_constant(const tt_stats *s) { return s->targets > 0; }

/* The best is told by the metric, whichever way is better, or by the loss; equal ones by the loss. */
TEST(best_by_metric_or_loss)
{
    static const struct { double (*of)(const tt_stats *s); bool lower; const char *best_by; } rows[] = {
        {own_rising, false, NULL}, {own_rising, true, NULL}, {own_rising, true, "loss"},
        {own_constant, false, NULL}, {own_constant, true, "rise"}, {NULL, false, NULL},
        {NULL, false, "loss"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        const tt_metric metric = {rows[k].of ? "rise" : NULL, rows[k].of, rows[k].lower};
        own w;
        bool finished;
        char *folder = test_folder(), path[1200];
        double least = INFINITY;
        int kept = 0, lines;
        size_t n;
        own_calls = 0;
        if (!open_own(&w, false, metric)) return;
        snprintf(path, sizeof path, "%s/run", folder);
        CHECK(own_fit(&w, path, false, rows[k].best_by, &finished) == TT_OK && finished);
        for (int e = 0; e < OWN_EPOCHS; e++) {
            const bool lower = w.losses[e] < least;
            CHECK(w.best[e] == (k == 0 || (k == 1 ? e == 0 : lower)));
            least = fmin(least, w.losses[e]);
            kept += w.best[e];
        }
        CHECK(w.kept == kept && w.losses[1] < w.losses[0]); /* not all the same */
        char *csv = metrics_of(path, &lines), *svg;
        CHECK(csv && lines == 1 + OWN_EPOCHS * (OWN_STEPS + 1) &&
              strstr(csv, metric.name ? "step,epoch,split,loss,rise,lr,"
                                      : "step,epoch,split,loss,lr,") == csv);
        free(csv);
        strcat(path, "/loss.svg");
        svg = test_read(path, &n);
        CHECK(svg && strstr(svg, metric.name ? "height='612'" : "height='444'"));
        CHECK(svg && (strstr(svg, ">Rise<") != NULL) == (metric.name != NULL));
        free(svg);
        close_own(&w);
    }
}

TEST(fit_of_ones_own_refuses)
{
    const tt_metric rmse = {"rmse", own_rmse, true};
    own w, v;
    bool finished = true;
    char folder[1024];
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    if (!open_own(&w, false, rmse) || !open_own(&v, false, rmse)) return;
    CHECK(own_fit(&w, NULL, false, "accuracy", &finished) == TT_ERR_ARGUMENT && !finished);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "best_by is 'accuracy', neither 'loss' nor the model's metric, rmse");
    w.stop_at = 6;
    CHECK(own_fit(&w, folder, false, NULL, &finished) == TT_OK && !finished);
    CHECK(own_fit(&v, folder, true, "loss", &finished) == TT_ERR_ARGUMENT && v.steps == 0);
    CHECK_ERROR(v.ctx, TT_ERR_ARGUMENT, "run' was told by its metric, not by its loss: resume with "
                "best_by as it was");
    v.ctx->options.logger.log = keep_warning;
    warned[0] = 0;
    v.hash = 8;
    v.stop_at = 1;
    CHECK(own_fit(&v, folder, true, NULL, &finished) == TT_OK && strstr(warned, "was trained on other data"));
    w.source.max_seqs++;
    CHECK(own_fit(&w, folder, true, NULL, &finished) == TT_ERR_SHAPE);

    tt_model model = {&w, own_record, {"a,b", own_rmse, false}, 0, NULL, 0, false};
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.max_seqs = 2;
    for (int k = 0; k < 6; k++) {
        if (k == 1) model.metric.name = "loss";
        if (k == 2) model.metric.name = "rmse", model.metric.of = NULL;
        if (k == 3) model.metric.name = NULL, model.unit = "a,b\nc";
        if (k == 4) model.unit = "units_of_thirty-two_characters__";
        if (k == 5) model.unit = NULL, model.classes = 3;
        CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
        CHECK_ERROR(w.ctx, k < 5 ? TT_ERR_ARGUMENT : TT_ERR_SHAPE,
                    k < 3   ? "the model's metric '"
                    : k < 5 ? "the model's unit '"
                            : "the model has 3 classes, and its output a width of 1");
    }
    close_own(&w);
    close_own(&v);
}

static int warnings;
static void count_warning(void *user, tt_log_level level, const char *id, const char *message)
{
    warnings += level == TT_LOG_WARNING;
    keep_warning(user, level, id, message);
}

/* Sources that do not give what they say, or fail without a sentence: the error names the place. */
TEST(fit_of_sources_that_break_their_promise)
{
    static const struct {
        tt_status status;
        int64_t gives, fails_at;
        bool within_steps, nothing;
        int steps; /* trained */
        const char *error;
    } rows[] = {
        {TT_ERR_ARGUMENT, OWN_STEPS, -1, true, false, 0, "epoch 1 of the source ends within a step, after 0 "
         "whole ones: the last micro-batch of a step must set last_of_step"},
        {TT_ERR_ARGUMENT, INT64_MAX, -1, false, false, 5, "epoch 1: the source gives a step 6, and has "
         "tt_source.steps = 5"},
        {TT_OK, OWN_STEPS - 1, -1, false, false, 12, "fit: epoch 1 of the source ends after 4 steps, and it "
         "has tt_source.steps = 5"},
        {TT_ERR_ARGUMENT, OWN_STEPS, -1, false, true, 5, "epoch 2 of the source has no step"},
        {TT_ERR_FORMAT, OWN_STEPS, 2, false, false, 7, "epoch 2, step 3: the source failed (TT_ERR_FORMAT)"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        const tt_metric none = {NULL, NULL, false};
        own w, v;
        bool finished = true;
        char folder[1024];
        tt_progress progress;
        tt_stats stats;
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
        if (!open_own(&w, false, none) || !open_own(&v, false, none)) return;
        tt_fit_options o = tt_fit_options_default();
        o.epochs = OWN_EPOCHS;
        o.folder = folder;
        w.ctx->options.logger.log = count_warning;
        w.gives = rows[k].gives;
        w.fails_at = rows[k].fails_at;
        w.within_steps = rows[k].within_steps;
        w.nothing = rows[k].nothing;
        warned[0] = 0;
        warnings = 0;
        tt__fail(w.ctx, TT_ERR_SHAPE, "an earlier failure");
        CHECK(tt_fit(w.r, &w.source, NULL, &o, &finished) == rows[k].status &&
              finished == (rows[k].status == TT_OK) && tt_trainer_steps(w.r) == rows[k].steps);
        if (rows[k].status) CHECK_ERROR(w.ctx, rows[k].status, rows[k].error);
        else CHECK(strcmp(warned, rows[k].error) == 0);
        CHECK(warnings == (rows[k].status == TT_OK));
        const char *state = test_path(folder, "state.safetensors");
        if (rows[k].steps && rows[k].status) /* the whole steps are saved */
            CHECK(tt_trainer_load(v.r, state, &progress) == TT_OK && tt_trainer_steps(v.r) == rows[k].steps);
        else CHECK(rows[k].steps || access(state, F_OK) != 0);
        if (k == 1) {
            CHECK(tt_evaluate(w.r, &w.source, &stats) == TT_ERR_ARGUMENT);
            CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "epoch 1: the source gives a step 6");
        }
        if (k == 4) { /* resumed, it cannot even seek there */
            v.fails_at = 2;
            o.resume = true;
            CHECK(tt_fit(v.r, &v.source, NULL, &o, &finished) == TT_ERR_UNSUPPORTED);
            CHECK_ERROR(v.ctx, TT_ERR_UNSUPPORTED, "epoch 2, step 3: the source failed (TT_ERR_UNSUPPORTED)");
        }
        close_own(&w);
        close_own(&v);
    }
}

/* One step without a target is skipped. Of a whole epoch of them training stops, and goes on behind them. */
TEST(fit_goes_on_behind_steps_without_a_target)
{
    const tt_metric none = {NULL, NULL, false};
    own w, v, u;
    tt_stats stats;
    bool finished;
    char folder[1024];
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    if (!open_own(&w, false, none) || !open_own(&v, false, none) || !open_own(&u, false, none)) return;
    w.ctx->options.logger.log = count_warning;
    warnings = 0;
    w.aimless[0] = 2, w.aimless[1] = 3;
    CHECK(own_fit(&w, NULL, false, NULL, &finished) == TT_OK && finished && tt_trainer_steps(w.r) == 14 &&
          w.steps == 15 && tt_trainer_wait(w.r, &stats) == TT_OK && stats.skipped == 1 && stats.step == 14);
    CHECK(warnings == 1 && strcmp(warned, "fit: step 7: no target counts (all are ignored or have weight 0); "
                                  "nothing was updated; it is skipped, as others like it will be") == 0);
    v.aimless[1] = u.aimless[1] = OWN_STEPS;
    v.ctx->options.logger.log = u.ctx->options.logger.log = count_warning;
    CHECK(own_fit(&v, folder, false, NULL, &finished) == TT_ERR_NUMERIC && !finished &&
          tt_trainer_steps(v.r) == 5 && v.steps == 10);
    CHECK_ERROR(v.ctx, TT_ERR_NUMERIC, "5 steps in a row updated nothing; the last: step 5: no target counts "
                "(all are ignored or have weight 0); nothing was updated");
    CHECK(own_fit(&u, folder, true, NULL, &finished) == TT_OK && finished && tt_trainer_steps(u.r) == 10 &&
          u.steps == 5 && tt_trainer_wait(u.r, &stats) == TT_OK && stats.skipped == 5);
    close_own(&w);
    close_own(&v);
    close_own(&u);
}

static bool in_folder(const char *folder, const char *name)
{
    return access(test_path(folder, name), F_OK) == 0;
}

/* An example makes the loss of an epoch's last step NaN. The loss has not diverged before, so the run goes on
   with one state, with a validation and without. If the loss has diverged before, the run fails. */
TEST(fit_goes_on_behind_a_bad_last_step)
{
    const tt_metric none = {NULL, NULL, false};
    for (int k = 0; k < 3; k++) { /* with a validation; without; without, and the loss has diverged before */
        own w;
        tt_stats stats;
        bool finished;
        char folder[1024];
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
        if (!open_own(&w, false, none)) return;
        w.ctx->options.logger.log = count_warning;
        warnings = 0;
        w.unvalidated = k > 0;
        w.blow_at[0] = k == 2 ? 2 : 4, w.blow_to[0] = k == 2 ? 1e4f : NAN;
        w.blow_at[1] = k == 2 ? 4 : 5, w.blow_to[1] = k == 2 ? NAN : 1;
        const tt_status status = own_fit(&w, folder, false, NULL, &finished);
        CHECK(status == (k == 2 ? TT_ERR_NUMERIC : TT_OK) && finished == (status == TT_OK));
        if (k < 2) {
            CHECK(w.steps == 15 && tt_trainer_wait(w.r, &stats) == TT_OK && stats.skipped == 1);
            CHECK(warnings == 1 && strstr(warned, "it is skipped, as others like it will be"));
            CHECK(in_folder(folder, "state.safetensors") && !in_folder(folder, "state.diverged.safetensors"));
        }
        if (k == 2) CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "1 step in a row updated nothing");
        close_own(&w);
    }
}

/* "w" is set to 1e3 after step 6, so that the loss is a thousand times as large: the state after the second
   epoch stands beside that of the first. One that is stopped goes on from it, bit for bit, and so does one
   whose loss has recovered, which keeps one state. At 3e38 nothing is finite any more, and that of the first
   epoch is left. */
TEST(fit_keeps_the_state_from_before_the_loss_diverged)
{
    const tt_metric none = {NULL, NULL, false};
    char whole[1100];
    for (int k = 0; k < 4; k++) {
        static const struct { int stop_at, then_at; float then_to; } rows[] = {
            {0, 0, 0}, {12, 0, 0}, {0, 10, 1}, {0, 11, 3e38f}};
        own w, v;
        bool finished;
        char folder[1024];
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
        if (!open_own(&w, false, none) || !open_own(&v, false, none)) return;
        w.ctx->options.logger.log = count_warning;
        warnings = 0;
        w.blow_at[0] = 6, w.blow_to[0] = 1e3f;
        w.blow_at[1] = rows[k].then_at, w.blow_to[1] = rows[k].then_to;
        w.stop_at = rows[k].stop_at;
        const tt_status status = own_fit(&w, folder, false, NULL, &finished);
        CHECK(status == (k == 3 ? TT_ERR_NUMERIC : TT_OK) && finished == (k == 0 || k == 2));
        CHECK(in_folder(folder, "state.safetensors"));
        CHECK(in_folder(folder, "state.diverged.safetensors") == (k < 2));
        if (k != 3)
            CHECK(strstr(warned, "the loss has diverged by step 10: its state is '") && warnings == 1);
        if (k == 0) snprintf(whole, sizeof whole, "%s", test_path(folder, "state.diverged.safetensors"));
        if (k == 1) {
            CHECK(own_fit(&v, folder, true, NULL, &finished) == TT_OK && finished && v.steps == 3);
            CHECK(same_files(whole, test_path(folder, "state.diverged.safetensors")));
        }
        if (k == 3) {
            CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "4 steps in a row updated nothing; the last: step 11");
            CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "parameter 'w' has numbers as large as 3e+38; the state of "
                        "step 5 is kept: resume it with a lower learning rate");
            CHECK(own_fit(&v, folder, true, NULL, &finished) == TT_OK && finished && v.steps == 10);
        }
        close_own(&w);
        close_own(&v);
    }
}

/* The state of a loss that has diverged is older than the other where a run was killed between writing that
   and removing this, or an older build went on: the run goes on from the newer. */
TEST(fit_goes_on_from_the_newer_of_two_states)
{
    const tt_metric none = {NULL, NULL, false};
    own w, v, u;
    bool finished;
    char folder[1024], state[1100], stale[1100];
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    snprintf(state, sizeof state, "%s/state.safetensors", folder);
    snprintf(stale, sizeof stale, "%s/state.diverged.safetensors", folder);
    if (!open_own(&w, false, none) || !open_own(&v, false, none) || !open_own(&u, false, none)) return;
    w.stop_at = 7;
    CHECK(own_fit(&w, folder, false, NULL, &finished) == TT_OK && !finished);
    REQUIRE(link(state, stale) == 0); /* as new as the other */
    CHECK(own_fit(&v, folder, true, NULL, &finished) == TT_OK && finished && v.steps == 8);
    REQUIRE(access(stale, F_OK) != 0 && tt_trainer_save(w.r, stale, NULL) == TT_OK);
    CHECK(own_fit(&u, folder, true, NULL, &finished) == TT_OK && finished && u.steps == 0);
    CHECK(access(stale, F_OK) != 0);
    close_own(&w);
    close_own(&v);
    close_own(&u);
}

/* A lower learning rate is no help to weights that are not finite before the first step. */
TEST(fit_of_bad_weights_names_no_learning_rate)
{
    const tt_metric none = {NULL, NULL, false};
    const float bad[3] = {NAN, NAN, NAN};
    own w;
    bool finished;
    if (!open_own(&w, false, none)) return;
    CHECK(tt_param_set(w.w, bad) == TT_OK);
    CHECK(own_fit(&w, test_path(test_folder(), "run"), false, NULL, &finished) == TT_ERR_NUMERIC);
    CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "'w' has a number that is not finite; no step has updated anything: "
                "the weights that it began with");
    close_own(&w);
}

/* By another context of this process, and by another process, until that is killed. */
TEST(fit_refuses_a_folder_that_another_run_uses)
{
    const tt_metric none = {NULL, NULL, false};
    const tt_files files = tt_context_options_default().files;
    own w, v;
    bool finished, held;
    int ready[2];
    char folder[1024], lock[1100], precious[1100], byte = 0;
    struct stat there;
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    snprintf(lock, sizeof lock, "%s/run.lock", folder);
    if (!open_own(&w, false, none) || !open_own(&v, false, none)) return;
    w.other = &v;
    w.folder = folder;
    w.stop_at = 2;
    CHECK(own_fit(&w, folder, false, NULL, &finished) == TT_OK && !finished && v.steps == 0);
    CHECK(!in_folder(folder, "run.lock"));
    REQUIRE(pipe(ready) == 0);
    const pid_t child = fork();
    if (child == 0) {
        if (!files.lock(files.user, lock, "process 1 of b, since 2001\n", &held)) _exit(1);
        if (write(ready[1], &byte, 1) != 1) _exit(1);
        for (;;) pause();
    }
    REQUIRE(child > 0 && read(ready[0], &byte, 1) == 1);
    CHECK(own_fit(&v, folder, true, NULL, &finished) == TT_ERR_FILE);
    CHECK_ERROR(v.ctx, TT_ERR_FILE, "run' is in use by another run (process 1 of b, since 2001): wait");
    kill(child, SIGKILL);
    CHECK(waitpid(child, NULL, 0) == child && in_folder(folder, "run.lock"));
    CHECK(own_fit(&v, folder, true, NULL, &finished) == TT_OK && finished && !in_folder(folder, "run.lock"));
    snprintf(precious, sizeof precious, "%s/precious", folder); /* a link is followed by no lock */
    REQUIRE(close(open(precious, O_CREAT | O_WRONLY, 0666)) == 0 && symlink(precious, lock) == 0);
    CHECK(!files.lock(files.user, lock, "text", &held) && !held);
    CHECK(stat(precious, &there) == 0 && there.st_size == 0);
    close(ready[0]), close(ready[1]);
    close_own(&w);
    close_own(&v);
}

static int64_t disk_space;
static int64_t space_of(void *user, const char *folder) { (void)user; (void)folder; return disk_space; }

/* Of a run whose state has three times the bytes of its parameters. */
TEST(fit_looks_for_room_on_the_disk)
{
    const tt_metric none = {NULL, NULL, false};
    own w;
    bool finished;
    char folder[1024];
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    if (!open_own(&w, false, none)) return;
    w.ctx->options.files.space = space_of;
    w.ctx->options.logger.log = count_warning;
    warnings = 0;
    disk_space = 2 * 3 * 4 * 4 - 1;
    CHECK(own_fit(&w, folder, false, NULL, &finished) == TT_ERR_FILE && !finished && w.steps == 0);
    CHECK_ERROR(w.ctx, TT_ERR_FILE, "run': the run needs 0.0 MB there for its states, of which two of 0.0");
    CHECK_ERROR(w.ctx, TT_ERR_FILE, "and the disk has room for 0.0 MB: free some, or name a folder on");
    CHECK(!in_folder(folder, "run.lock") && !in_folder(folder, "metrics.csv"));
    disk_space++;
    w.stop_at = 1;
    CHECK(own_fit(&w, folder, false, NULL, &finished) == TT_OK && w.steps == 1 && warnings == 1);
    CHECK(strstr(warned, "may not fit, as the disk has room for 0.0 MB") != NULL);
    w.steps = w.stop_at = w.stop = 0;
    disk_space = 3 * 4 * 4 + 4 * 4; /* one state is there, and there may be a model */
    CHECK(own_fit(&w, folder, true, NULL, &finished) == TT_OK && finished && warnings == 1);
    disk_space = 0;
    CHECK(own_fit(&w, folder, true, NULL, &finished) == TT_OK && finished); /* it writes no state */
    const tt_files files = tt_context_options_default().files;
    CHECK(files.space(files.user, folder) > 0);
    CHECK(files.space(files.user, "/proc") == -1 || access("/proc", F_OK) != 0); /* has no size, and says 0 */
    close_own(&w);
}

TEST(fit_refuses_sources_and_folders_before_it_trains)
{
    const tt_metric none = {NULL, NULL, false};
    test_files files;
    own w;
    bool finished;
    tt_stats stats;
    char *folder = test_folder();
    if (!open_own(&w, false, none)) return;
    for (int k = 0; k < 4; k++) {
        static const char *const errors[] = {"is NULL", "needs the functions `seek` and `next`",
                                             "needs the functions `seek` and `next`",
                                             "has tt_source.steps < 1"};
        char error[100];
        tt_source s = w.source, *p = k ? &s : NULL;
        if (k == 1) s.seek = NULL;
        if (k == 2) s.next = NULL;
        if (k == 3) s.steps = 0;
        CHECK(tt_fit(w.r, p, NULL, NULL, &finished) == TT_ERR_ARGUMENT && !finished);
        snprintf(error, sizeof error, "the source to train on %s", errors[k]);
        CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, error);
        CHECK(tt_evaluate(w.r, p, &stats) == TT_ERR_ARGUMENT);
        CHECK(!k || tt_fit(w.r, &w.source, p, NULL, &finished) == TT_ERR_ARGUMENT);
    }
    const int64_t gives = w.gives;
    w.gives = 0;
    CHECK(tt_evaluate(w.r, &w.source, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "the source to evaluate gives no target that counts");
    w.gives = gives;
    w.keeps = TT_ERR_BUDGET;
    tt__fail(w.ctx, TT_ERR_SHAPE, "an earlier failure");
    CHECK(own_fit(&w, NULL, false, NULL, &finished) == TT_ERR_BUDGET && w.kept == 1);
    CHECK_ERROR(w.ctx, TT_ERR_BUDGET, "epoch 1, step 5: keep failed (TT_ERR_BUDGET)");
    w.ctx->options.files = test_failing_files(&files, 'o', 1);
    w.steps = 0;
    CHECK(own_fit(&w, folder, false, NULL, &finished) == TT_ERR_FILE && w.steps == 0);
    CHECK_ERROR(w.ctx, TT_ERR_FILE, folder);
    close_own(&w);
}

static int64_t own_finite_from;
static double own_odd(const tt_stats *s) { return s->step >= own_finite_from ? 1 : NAN; }

static tt_status own_next_nan(void *self, tt_batch *b, bool *more)
{
    tt_status status = own_next(self, b, more);
    ((own *)self)->y[0] = NAN;
    return status;
}

/* A validation that is not finite is told of, and at the end that none was kept. */
TEST(fit_tells_of_validations_that_are_not_finite)
{
    static const struct { tt_metric metric; int64_t from; int kept; const char *warning; } rows[] = {
        {{"odd", own_odd, false}, INT64_MAX, 0, "fit: epoch 3: the validation's odd is not finite, as in all "
         "epochs before: none was kept"},
        {{"odd", own_odd, false}, OWN_EPOCHS * OWN_STEPS, 1,
         "fit: epoch 2: the validation's odd is not finite"},
        {{NULL, NULL, false}, 0, 0, "fit: epoch 3: the validation's loss is not finite, as in all epochs "
         "before: none was kept"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        own w;
        bool finished;
        if (!open_own(&w, false, rows[k].metric)) return;
        w.ctx->options.logger.log = count_warning;
        own_finite_from = rows[k].from;
        warnings = 0;
        if (!rows[k].metric.name) w.validation.next = own_next_nan;
        CHECK(own_fit(&w, NULL, false, NULL, &finished) == TT_OK && finished && w.kept == rows[k].kept);
        CHECK(warnings == OWN_EPOCHS - rows[k].kept && strcmp(warned, rows[k].warning) == 0);
        close_own(&w);
    }
}

/* --------------------------------------------------------------------------------------- programs by hand */

typedef struct byhand {
    test_allocator a;
    tt_context *ctx;
    tt_tape *t;
    tt_program *p;
    tt_value x, y, loss;
} byhand;

static bool open_byhand(byhand *h, int width, const tt_compile_options *o)
{
    const int64_t d1[] = {width, 4}, d2[] = {3, width}, n = width;
    const tt_init normal = {TT_INIT_NORMAL, 0.5f};
    memset(h, 0, sizeof *h);
    h->ctx = test_open(&h->a);
    tt_param *up = tt_param_new(h->ctx, "up", 2, d1, normal),
             *bias = tt_param_new(h->ctx, "bias", 1, &n, normal);
    tt_param *down = tt_param_new(h->ctx, "down", 2, d2, normal);
    h->t = tt_tape_new(h->ctx);
    h->x = tt_input(h->t, "x", TT_F32, 8, 4);
    h->y = tt_input(h->t, "y", TT_I32, 8, 1);
    tt_value hidden = tt_dropout(h->t, tt_gelu(h->t, tt_linear(h->t, h->x, up, bias)), 0.3f);
    h->loss = tt_cross_entropy(h->t, tt_linear(h->t, hidden, down, NULL), h->y, NULL);
    h->p = tt_compile(h->t, h->loss, o);
    if (!h->p) CHECK_ERROR(h->ctx, TT_OK, "a program");
    return h->p != NULL;
}

static void close_byhand(byhand *h)
{
    tt_program_free(h->p);
    tt_tape_free(h->t);
    TEST_CLOSE(h->ctx, &h->a);
}

/* Steps until so many are done, skipped ones counted; each on data of its own. */
static void byhand_steps(byhand *h, int from, int to, bool accumulate, tt_stats *s)
{
    for (int step = from; step < to; step++)
        for (int micro = 0; micro < 1 + 2 * accumulate; micro++) {
            uint64_t random = (uint64_t)(step * 10 + micro + 1);
            float x[8 * 4];
            int32_t y[8];
            for (int k = 0; k < 32; k++) x[k] = (float)(test_random(&random) % 1000) / 500 - 1;
            for (int k = 0; k < 8; k++) y[k] = (int32_t)(test_random(&random) % 3);
            CHECK(tt_set(h->p, h->x, x, 8) == TT_OK && tt_set(h->p, h->y, y, 8) == TT_OK);
            if (!accumulate) CHECK(tt_step(h->p, 0.01f, s) == TT_OK);
            else CHECK(tt_micro_step(h->p, s) == TT_OK && (micro < 2 || tt_update(h->p, 0.01f, s) == TT_OK));
        }
}

TEST(a_program_by_hand_is_saved_and_goes_on)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};
    for (int k = 0; k < 20; k++) {
        const bool accumulate = k / 5 % 2;
        char half[1024], whole[1024], resumed[1024];
        byhand a, b, c;
        tt_stats s, t;
        tt_compile_options o = tt_compile_options_default();
        o.precision = precisions[k % 5];
        o.accumulate = accumulate;
        o.optimizer.kind = k / 5 <= 1 ? TT_SGD : k / 5 == 2 ? TT_ADAM : TT_ADAMW;
        o.optimizer.momentum = k / 5 == 1 ? 0.9f : 0;
        o.optimizer.clip_norm = 1;
        o.loss_scale.init = 0x1p40f; /* of 16-bit floats: steps are skipped at first */
        o.loss_scale.interval = 2;
        snprintf(half, sizeof half, "%s", test_path(test_folder(), "half"));
        snprintf(whole, sizeof whole, "%s", test_path(test_folder(), "whole"));
        snprintf(resumed, sizeof resumed, "%s", test_path(test_folder(), "resumed"));
        if (!open_byhand(&a, 6, &o) || !open_byhand(&b, 6, &o) || !open_byhand(&c, 6, &o)) return;
        byhand_steps(&a, 0, 40, accumulate, &s);
        CHECK(tt_program_save(a.p, whole) == TT_OK && tt_program_steps(a.p) == s.step && s.step > 5);
        CHECK((s.skipped > 0) == (k % 5 >= 3));
        byhand_steps(&b, 0, 13, accumulate, &t);
        CHECK(tt_program_save(b.p, half) == TT_OK);
        CHECK(tt_program_load(c.p, half) == TT_OK && tt_program_steps(c.p) == t.step);
        byhand_steps(&c, 13, 40, accumulate, &t);
        CHECK(memcmp(&s, &t, sizeof s) == 0);
        CHECK(tt_program_save(c.p, resumed) == TT_OK && same_files(whole, resumed));
        close_byhand(&a);
        close_byhand(&b);
        close_byhand(&c);
    }
}

/* One parameter, the first, one in the middle or the last, or all of them. */
TEST(states_of_programs_that_train_one_parameter)
{
    char path[1024], again[1024];
    byhand a, b;
    tt_stats s;
    const tt_compile_options o = tt_compile_options_default();
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "one"));
    snprintf(again, sizeof again, "%s", test_path(test_folder(), "again"));
    static const char *const trained[] = {"up", "bias", "down", "*"};
    for (int k = 0; k < TEST_COUNT(trained); k++) {
        byhand *const both[2] = {&a, &b};
        for (int n = 0; n < 2; n++) {
            if (!open_byhand(both[n], 6, &o)) return;
            tt_program_free(both[n]->p);
            tt_param_freeze(both[n]->ctx, "*", true);
            tt_param_freeze(both[n]->ctx, trained[k], false);
            both[n]->p = tt_compile(both[n]->t, both[n]->loss, &o);
        }
        byhand_steps(&a, 0, 3, false, &s);
        CHECK(tt_program_save(a.p, path) == TT_OK && tt_program_load(b.p, path) == TT_OK);
        byhand_steps(&a, 3, 5, false, &s);
        byhand_steps(&b, 3, 5, false, &s);
        CHECK(tt_program_save(a.p, path) == TT_OK && tt_program_save(b.p, again) == TT_OK);
        CHECK(same_files(path, again));
        close_byhand(&a);
        close_byhand(&b);
    }
}

TEST(states_that_a_program_refuses)
{
    char path[1024], bad[1024], before[1024], after[1024], *bytes;
    byhand a, b;
    size_t n;
    tt_stats s;
    tt_compile_options o = tt_compile_options_default(), other;
    o.accumulate = true;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "state"));
    snprintf(bad, sizeof bad, "%s", test_path(test_folder(), "bad.safetensors"));
    snprintf(before, sizeof before, "%s", test_path(test_folder(), "before"));
    snprintf(after, sizeof after, "%s", test_path(test_folder(), "after"));
    if (!open_byhand(&a, 6, &o)) return;
    byhand_steps(&a, 0, 3, true, &s);
    CHECK(tt_program_save(a.p, path) == TT_OK);
    byhand_steps(&a, 3, 5, true, &s);
    CHECK(tt_program_save(a.p, before) == TT_OK);
    bytes = test_read(path, &n);
    for (int k = 0; k < 6; k++) { /* cut off */
        const size_t keep[] = {0, 7, 100, n / 2, n - 8, n - 1};
        test_write(bad, bytes, keep[k]);
        CHECK(tt_program_load(a.p, bad) == TT_ERR_FORMAT);
        CHECK_ERROR(a.ctx, TT_ERR_FORMAT, "bad.safetensors'");
    }
    free(bytes);
    for (int k = 0; k < 5; k++) {
        static const char *const errors[] = {
            "tensor 'up' is F32 of 112 bytes, this run has F32 of 96", "was made with another optimizer",
            "was made with another precision than '32-true'", "has no tensor 'up'", NULL};
        other = o;
        if (k == 1) other.optimizer.kind = TT_SGD;
        if (k == 2) other.precision = "bf16-true";
        if (k == 4) other.optimizer.beta1 = 0.5f; /* told of, and no more */
        if (!open_byhand(&b, k == 0 ? 7 : 6, &other)) return;
        if (k == 3) { /* others are trained */
            tt_program_free(b.p);
            tt_param_freeze(b.ctx, "up", true);
            b.p = tt_compile(b.t, b.loss, &other);
        }
        CHECK(tt_program_save(b.p, bad) == TT_OK);
        close_byhand(&b);
        if (k == 4) break;
        CHECK(tt_program_load(a.p, bad) != TT_OK);
        CHECK_ERROR(a.ctx, tt_error_code(a.ctx), errors[k]);
        CHECK_ERROR(a.ctx, tt_error_code(a.ctx), "bad.safetensors'");
        CHECK(tt_program_save(a.p, after) == TT_OK && same_files(before, after)); /* nothing has changed */
    }
    a.ctx->options.logger.log = keep_warning;
    warned[0] = 0;
    CHECK(tt_program_load(a.p, bad) == TT_OK &&
          strstr(warned, "bad.safetensors' was made with other options"));
    warned[0] = 0;
    CHECK(tt_program_load(a.p, path) == TT_OK && !warned[0] && tt_program_steps(a.p) == 3);

    float x[32] = {0};
    int32_t y[8] = {0};
    CHECK(tt_set(a.p, a.x, x, 8) == TT_OK && tt_set(a.p, a.y, y, 8) == TT_OK &&
          tt_micro_step(a.p, NULL) == TT_OK);
    CHECK(tt_program_save(a.p, after) == TT_ERR_ARGUMENT);
    CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "between steps, not between the micro-batches");
    CHECK(tt_program_load(a.p, path) == TT_OK); /* and then none is left */
    CHECK(tt_program_save(a.p, after) == TT_OK && same_files(path, after));
    close_byhand(&a);
    other = o;
    other.train = false;
    if (!open_byhand(&a, 6, &other)) return;
    CHECK(tt_program_save(a.p, after) == TT_ERR_ARGUMENT && tt_program_load(a.p, path) == TT_ERR_ARGUMENT);
    CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "this program does not train");
    close_byhand(&a);
}

/* A trainer's state goes on in a program of the same tape, not the other way round: there is no progress. */
TEST(a_trainers_state_in_a_program)
{
    char path[1024], again[1024];
    own w;
    tt_batch b;
    bool more;
    const tt_metric none = {NULL, NULL, false};
    tt_compile_options o = tt_compile_options_default();
    tt_train_options to = tt_train_options_default();
    tt_value output;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "state"));
    snprintf(again, sizeof again, "%s", test_path(test_folder(), "again"));
    if (!open_own(&w, false, none)) return;
    memset(&b, 0, sizeof b);
    for (int k = 0; k < 4; k++)
        CHECK(own_next(&w, &b, &more) == TT_OK && more && tt_train_batch(w.r, &b, NULL, NULL) == TT_OK);
    CHECK(tt_trainer_save(w.r, path, NULL) == TT_OK && tt_trainer_load(w.r, path, NULL) == TT_OK);
    to.max_seqs = OWN_ROWS;
    o.accumulate = true;
    o.optimizer = to.compile.optimizer;
    tt_tape *t = tt_tape_new(w.ctx);
    tt_program *p = tt_compile(t, own_record(&w, t, &to, &output), &o);
    REQUIRE(p != NULL);
    w.ctx->options.logger.log = keep_warning;
    warned[0] = 0;
    CHECK(tt_program_load(p, path) == TT_OK && tt_program_steps(p) == 2 && !warned[0]);
    CHECK(tt_program_save(p, again) == TT_OK && tt_trainer_load(w.r, again, NULL) == TT_ERR_FORMAT);
    CHECK_ERROR(w.ctx, TT_ERR_FORMAT, "has no tensor 'tinytrain.progress'");
    tt_program_free(p);
    tt_tape_free(t);
    close_own(&w);
}

/* -------------------------------------------------------------------------------------------------- ranks */

/* A run whose gradients are summed by a tree of so many leaves. */
static setup on_ranks(const char *device, int groups)
{
    setup s = small();
    s.schedule.total_steps = 21;
    s.device = device;
    s.parallel.groups = groups;
    return s;
}

/* Are the states and the metrics of two runs the same, but for the bytes of their arenas? */
static bool same_runs(const char *a, const char *b)
{
    char x[1200], y[1200];
    int lines[2];
    snprintf(x, sizeof x, "%s/state.safetensors", a);
    snprintf(y, sizeof y, "%s/state.safetensors", b);
    char *m = metrics_without(3, a, &lines[0]), *n = metrics_without(3, b, &lines[1]);
    const bool states = same_files(x, y), metrics = m && n && lines[0] > 1 && strcmp(m, n) == 0;
    free(m);
    free(n);
    return states && metrics;
}

/* What decides the bits of a training, and how ranks share it. */
static const struct {
    int groups, batch, accumulate, max_tokens;
    tt_parallel parallel;
    const char *precision;
} rank_rows[] = {
    {8, 8, 1, 0, {0, 1, 0, false, false, 8, false, 1, NULL, 0}, "32-true"},
    {4, 8, 1, 0, {0, 1, 1, false, false, 4, false, 1, NULL, 0}, "32-true"},
    {4, 8, 2, 0, {0, 1, 1, true, false, 4, false, 1, NULL, 0}, "bf16-mixed"},
    {8, 8, 1, 0, {0, 1, 1, false, false, 8, true, 1, NULL, 0}, "32-true"},
    {4, 8, 1, 25, {0, 1, 2, false, false, 4, false, 1, NULL, 0}, "16-mixed"},
    {2, 8, 3, 0, {0, 1, 2, false, false, 2, false, 1, NULL, 0}, "32-true"},
    {4, 8, 1, 0, {0, 1, 3, false, false, 4, false, 1, NULL, 0}, "32-true"},
    {8, 8, 1, 0, {0, 1, 3, false, false, 8, false, 1, NULL, 0}, "bf16-true"}};

/* One model trained on one rank and on several, dropout on, steps of uneven micro-batches, the last of an
   epoch short: the same bits in metrics and state. */
TEST(runs_on_any_number_of_ranks_are_the_same)
{
    static const char *const devices[] = {"cpu", "cpu*2", "cpu*4", "cpu*8"};
    for (int k = TEST_SWEEP > 1; k < TEST_COUNT(rank_rows); k += test_every(3)) {
        char folder[TEST_COUNT(devices)][1024];
        tt_stats stats[TEST_COUNT(devices)];
        int most = 0;
        while (1 << (most + 1) <= rank_rows[k].groups) most++;
        for (int n = 0; n <= most; n++) {
            if (TEST_SWEEP > 1 && n && n != 1 + (k + 2) % most) continue; /* by turns */
            setup s = on_ranks(devices[n], 0);
            world w;
            fitting f;
            bool finished;
            memset(&f, 0, sizeof f);
            f.ranks = true;
            s.parallel = rank_rows[k].parallel;
            s.batch = rank_rows[k].batch;
            s.accumulate = rank_rows[k].accumulate;
            s.max_tokens = rank_rows[k].max_tokens;
            s.precision = rank_rows[k].precision;
            s.hidden = 192, s.layers = 1, s.intermediate = 360; /* tensors that are divided into pieces */
            s.threads = 1 + n % 2;
            snprintf(folder[n], sizeof folder[n], "%s", test_path(test_folder(), devices[n]));
            if (!open_world(&w, &s)) return;
            CHECK(fit(&w, folder[n], false, &f, &finished) == TT_OK && finished);
            CHECK(f.steps == 21 && f.validations == 3);
            if (!finished) CHECK_ERROR(w.ctx, TT_OK, "a run");
            CHECK(tt_evaluate(w.r, tt_loader_source(w.all), &stats[n]) == TT_OK);
            if (n) CHECK(same_runs(folder[0], folder[n]));
            if (n) CHECK(memcmp(&stats[0], &stats[n], sizeof stats[n]) == 0);
            if (!CHECK(stats[n].targets == TEXTS)) printf("row %d, %s\n", k, devices[n]);
            close_world(&w);
        }
    }
}

/* Stopped on four ranks, resumed on two and then on eight, once within an epoch and once at its end. */
TEST(resume_on_another_number_of_ranks)
{
    static const struct { const char *device; int stop_at, zero; } parts[] = {
        {"cpu*4", 5, 1}, {"cpu*2", 14, 0}, {"cpu*8", 0, 1}};
    char whole[1024], resumed[1024];
    world w;
    fitting f;
    bool finished;
    setup s = on_ranks("cpu", 8);
    memset(&f, 0, sizeof f);
    snprintf(whole, sizeof whole, "%s", test_path(test_folder(), "whole"));
    snprintf(resumed, sizeof resumed, "%s", test_path(test_folder(), "resumed"));
    s.hidden = 192, s.layers = 1;
    if (!open_world(&w, &s)) return;
    CHECK(fit(&w, whole, false, &f, &finished) == TT_OK && finished);
    close_world(&w);
    memset(&f, 0, sizeof f);
    warnings = 0;
    for (int k = 0; k < TEST_COUNT(parts); k++) {
        s.device = parts[k].device;
        s.parallel.zero = parts[k].zero;
        f.stop_at = parts[k].stop_at;
        if (!open_world(&w, &s)) return;
        w.ctx->options.logger.log = count_warning;
        CHECK(fit(&w, resumed, k > 0, &f, &finished) == TT_OK && finished == !parts[k].stop_at);
        close_world(&w);
    }
    CHECK(f.steps == 21 && f.validations == 3 && same_runs(whole, resumed));
    CHECK(warnings == 0); /* a layout is none that the user need know of */
    s.parallel.groups = 4; /* and this changes bits */
    s.device = "cpu*2";
    if (!open_world(&w, &s)) return;
    w.ctx->options.logger.log = count_warning;
    CHECK(fit(&w, resumed, true, &f, &finished) == TT_OK && finished && warnings == 1 &&
          strstr(warned, "max_tokens, groups, ...") != NULL);
    close_world(&w);
}

/* What tt_train_batch says between rounds, what is refused there, and a step that fails in its second round:
   nothing of it is left. */
TEST(micro_batches_wait_for_their_round)
{
    setup s = on_ranks("cpu*2", 4);
    world a, b;
    tt_batch x;
    tt_stats stats, zero, before;
    float probabilities[2 * BATCH];
    bool updated = true;
    memset(&zero, 0, sizeof zero);
    if (!open_world(&a, &s) || !open_world(&b, &s)) return;
    REQUIRE(a.r->options.compile.accumulate && tt_loader_max_seqs(a.l) == 2);
    CHECK(train(&b, 3, NULL) == TT_OK);
    for (int micro = 0; micro < 4; micro++) {
        REQUIRE(tt_loader_next(a.l, &x));
        memset(&stats, 0x55, sizeof stats);
        CHECK(tt_train_batch(a.r, &x, &stats, &updated) == TT_OK && updated == (micro == 3));
        if (micro == 0) CHECK(memcmp(&stats, &zero, sizeof stats) == 0);
        if (micro == 1) CHECK(stats.targets == 4 && stats.loss > 0 && !stats.step && !stats.grad_norm);
        if (micro == 2) CHECK(memcmp(&stats, &before, sizeof stats) == 0);
        if (micro == 3) CHECK(stats.targets == 8 && stats.step == 1 && stats.grad_norm > 0);
        before = stats;
        if (micro == 3) break;
        CHECK(tt_trainer_save(a.r, "/no/such/file", NULL) == TT_ERR_ARGUMENT);
        CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "the state can be saved between steps");
        if (micro % 2) continue;
        CHECK(tt_evaluate(a.r, tt_loader_source(a.all), &stats) == TT_ERR_ARGUMENT);
        CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "1 of the 2 data ranks hold micro-batches of a step");
        CHECK(tt_evaluate_batch(a.r, &x, &stats) == TT_ERR_ARGUMENT &&
              tt_predict(a.r, &x, probabilities) == TT_ERR_ARGUMENT);
    }
    a.progress.step = 1;
    CHECK(tt_loader_seek(a.l, 0, 1) == TT_OK);
    int32_t ids[BATCH * 24];
    static const int bad_at[] = {0, 1, 2, 3};
    for (int k = 0; k < TEST_COUNT(bad_at); k++) { /* that one has a wrong id, or no labels */
        for (int micro = 0; micro < 4; micro++) {
            REQUIRE(tt_loader_next(a.l, &x));
            memcpy(ids, x.ids, sizeof *ids * (size_t)x.rows);
            const bool bad = micro == bad_at[k];
            if (bad && k % 2) ids[1] = 30000, x.ids = ids; /* shows when its round runs */
            if (bad && k % 2 == 0) x.labels = NULL;         /* shows at once */
            const tt_status status = tt_train_batch(a.r, &x, &stats, &updated);
            CHECK(!updated && (status == TT_OK) == (micro < bad_at[k]));
            if (bad && k % 2) CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "rank 1");
            if (bad && k % 2 == 0) CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "the batch has no labels");
            if (micro > bad_at[k])
                CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "an earlier micro-batch of this step failed");
        }
        CHECK(x.last_of_step && tt_trainer_steps(a.r) == 1 && tt_loader_seek(a.l, 0, 1) == TT_OK);
    }
    CHECK(tt_evaluate(a.r, tt_loader_source(a.all), &stats) == TT_OK); /* no micro-batch waits */
    CHECK(train(&a, 2, NULL) == TT_OK && same_worlds(&a, &b));
    close_world(&a);
    close_world(&b);
}

/* Without accumulate a step has one round: up to as many micro-batches as there are data ranks. */
TEST(a_step_of_one_round)
{
    setup s = on_ranks("cpu*4", 4);
    world a, b;
    tt_batch x;
    tt_stats stats;
    bool updated;
    if (!open_world(&a, &s)) return;
    s.accumulating = true;
    if (!open_world(&b, &s)) return;
    CHECK(!a.r->options.compile.accumulate && b.r->options.compile.accumulate && !tt_loader_accumulates(a.l));
    CHECK(train(&a, 7, NULL) == TT_OK && train(&b, 7, NULL) == TT_OK);
    CHECK(a.progress.targets == TEXTS && memcmp(&a.progress, &b.progress, sizeof a.progress) == 0);
    for (int p = 0; p < a.ctx->n_params; p++) {
        const tt_param *of[2] = {a.ctx->params[p], b.ctx->params[p]};
        float *values[2];
        for (int k = 0; k < 2; k++) {
            values[k] = (float *)malloc(sizeof(float) * (size_t)of[k]->size);
            CHECK(tt_param_get(of[k], values[k]) == TT_OK);
        }
        CHECK(memcmp(values[0], values[1], sizeof(float) * (size_t)of[0]->size) == 0);
        free(values[0]);
        free(values[1]);
    }
    REQUIRE(tt_loader_seek(a.l, 1, 0) == TT_OK);
    for (int micro = 0; micro < 6; micro++) { /* the fourth says that there are more, and fails their step */
        REQUIRE(tt_loader_next(a.l, &x));
        x.last_of_step = micro == 5;
        CHECK((tt_train_batch(a.r, &x, &stats, &updated) == TT_OK) == (micro < 3) && !updated);
        if (micro == 3)
            CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "a step of more micro-batches than the 4 data ranks needs a "
                        "trainer made with accumulate = true");
        if (micro > 3) CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "an earlier micro-batch of this step failed");
    }
    CHECK(tt_trainer_steps(a.r) == 7);
    a.progress.epoch = 1, a.progress.step = 0;
    CHECK(train(&a, 1, NULL) == TT_OK && tt_trainer_steps(a.r) == 8);
    close_world(&a);
    close_world(&b);
}

/* The matrix of predictions has those that tt_predict gives, on any number of ranks. */
TEST(predictions_of_each_class)
{
    static const char *const devices[] = {"cpu", "cpu*2", "cpu*3"};
    for (int n = 0; n < TEST_COUNT(devices); n++) {
        setup s = on_ranks(devices[n], 0);
        world w;
        tt_batch b;
        tt_stats stats, alone;
        int64_t counts[4], expected[4] = {0};
        if (!open_world(&w, &s)) return;
        CHECK(train(&w, 3, NULL) == TT_OK && tt_loader_seek(w.all, 0, 0) == TT_OK);
        while (tt_loader_next(w.all, &b)) {
            float p[2 * BATCH];
            CHECK(tt_predict(w.r, &b, p) == TT_OK);
            for (int i = 0; i < b.seqs; i++) expected[2 * b.labels[i] + (p[2 * i + 1] > p[2 * i])]++;
        }
        CHECK(tt_confusion(w.r, tt_loader_source(w.all), &stats, counts) == TT_OK);
        CHECK(memcmp(counts, expected, sizeof counts) == 0);
        CHECK((double)(counts[0] + counts[3]) == stats.correct && stats.targets == TEXTS);
        CHECK(tt_evaluate(w.r, tt_loader_source(w.all), &alone) == TT_OK);
        CHECK(memcmp(&alone, &stats, sizeof stats) == 0);
        CHECK(tt_confusion(w.r, tt_loader_source(w.all), NULL, counts) == TT_OK);
        CHECK(memcmp(counts, expected, sizeof counts) == 0);
        close_world(&w);
    }
}

/* Evaluations and predictions on several ranks have the bits of one. */
TEST(evaluation_on_any_number_of_ranks_is_the_same)
{
    static const char *const devices[] = {"cpu", "cpu*2", "cpu*3", "cpu*4", "cpu*8"};
    tt_stats first[2], stats[2];
    float p[2][2 * BATCH];
    for (int n = 0; n < TEST_COUNT(devices); n++) {
        setup s = on_ranks(devices[n], 0);
        world w;
        tt_batch b;
        bool more = false;
        s.train = n % 2;
        s.batch = 24; /* room for three texts, if divided by eight */
        s.threads = 1 + n % 3;
        if (!open_world(&w, &s)) return;
        tt_loader_options lo = tt_loader_options_default(); /* 18 micro-batches: rounds are short too */
        lo.batch = 3;
        lo.shuffle = false;
        lo.threads = 0;
        tt_loader *l = tt_loader_new(w.ctx, w.d, w.k, &lo);
        REQUIRE(l);
        CHECK(tt_evaluate(w.r, tt_loader_source(l), &stats[0]) == TT_OK && stats[0].targets == TEXTS);
        memset(&stats[1], 0, sizeof stats[1]); /* one by one */
        for (tt_loader_seek(l, 0, 0); tt_loader_next(l, &b); more = true) {
            if (!more) CHECK(tt_predict(w.r, &b, p[n > 0]) == TT_OK);
            CHECK(tt_evaluate_batch(w.r, &b, &stats[1]) == TT_OK);
        }
        CHECK(memcmp(&stats[0], &stats[1], sizeof stats[0]) == 0);
        if (!n) memcpy(first, stats, sizeof first);
        CHECK(memcmp(first, stats, sizeof first) == 0 && memcmp(p[0], p[n > 0], 6 * sizeof(float)) == 0);
        tt_loader_free(l);
        close_world(&w);
    }
}

/* A source that is not cut for the ranks leaves some without work: tt_fit says so, once. */
TEST(fit_tells_of_ranks_without_work)
{
    for (int k = 0; k < 2; k++) {
        setup s = on_ranks("cpu*4", 4);
        world w;
        fitting f;
        bool finished;
        tt_loader_options lo = tt_loader_options_default();
        memset(&f, 0, sizeof f);
        if (!open_world(&w, &s)) return;
        lo.batch = BATCH;
        lo.max_length = 24;
        if (k) lo.parallel.data = 4;
        tt_loader_free(w.l);
        w.l = tt_loader_new(w.ctx, w.d, w.k, &lo);
        REQUIRE(w.l);
        tt_train_options o = train_options(&s, w.l);
        tt_model model = tt_bert_classifier(&w.m);
        tt_trainer_free(w.r);
        w.r = tt_trainer_new(w.ctx, &model, &o);
        REQUIRE(w.r);
        w.ctx->options.logger.log = count_warning;
        warnings = 0;
        CHECK(fit(&w, NULL, false, &f, &finished) == TT_OK && finished && warnings == !k);
        if (!k)
            CHECK(strcmp(warned, "fit: the steps of the source have 1 micro-batch for 4 data ranks, so that "
                         "some have nothing to do: give the loader the trainer's tt_parallel") == 0);
        close_world(&w);
    }
}

static const test_case tests[] = {
    TEST_CASE(loss_falls), TEST_CASE(schedule_and_steps), TEST_CASE(options_refused_together),
    TEST_CASE(micro_batches_equal_one_batch), TEST_CASE(max_tokens_splits_steps),
    TEST_CASE(loaders_that_do_not_fit), TEST_CASE(names_and_room_from_the_data),
    TEST_CASE(steps_of_several_micro_batches_need_accumulate), TEST_CASE(batches_that_do_not_fit),
    TEST_CASE(same_bits_for_any_number_of_threads), TEST_CASE(evaluation_changes_nothing),
    TEST_CASE(weights_and_smoothing_as_pytorchs), TEST_CASE(class_weights_of_texts),
    TEST_CASE(evaluation_does_not_depend_on_the_batches), TEST_CASE(probabilities),
    TEST_CASE(predictions_of_each_class),
    TEST_CASE(planned_bytes_are_allocated_bytes), TEST_CASE(largest_micro_batches),
    TEST_CASE(planned_for_another_device),
    TEST_CASE(allocation_failures), TEST_CASE(resume_in_every_precision_with_every_optimizer),
    TEST_CASE(resume_with_loss_scaling), TEST_CASE(resume_at_the_end_of_an_epoch_and_elsewhere),
    TEST_CASE(resume_with_micro_batches_and_other_threads), TEST_CASE(resume_without_new_context),
    TEST_CASE(resume_with_frozen_parameters), TEST_CASE(states_of_other_runs),
    TEST_CASE(resume_warns_of_other_options), TEST_CASE(resume_warns_of_other_pixel_means),
    TEST_CASE(damaged_states), TEST_CASE(files_that_fail), TEST_CASE(predictions_without_labels_and_of_nan),
    TEST_CASE(nan_in_a_step_loses_nothing), TEST_CASE(a_gradient_that_is_not_finite_is_named),
    TEST_CASE(an_untrained_trainer_saves_and_loads), TEST_CASE(fit_in_a_line),
    TEST_CASE(fit_stopped_and_resumed), TEST_CASE(fit_without_folder_or_validation), TEST_CASE(fit_refuses),
    TEST_CASE(fit_resumes_on_the_same_data), TEST_CASE(fit_that_blows_up_keeps_the_last_good_state),
    TEST_CASE(fit_goes_on_behind_steps_without_a_target),
    TEST_CASE(fit_refuses_a_folder_that_another_run_uses), TEST_CASE(fit_looks_for_room_on_the_disk),
    TEST_CASE(fit_goes_on_behind_a_bad_last_step),
    TEST_CASE(fit_keeps_the_state_from_before_the_loss_diverged),
    TEST_CASE(fit_goes_on_from_the_newer_of_two_states),
    TEST_CASE(fit_of_bad_weights_names_no_learning_rate),
    TEST_CASE(fit_refuses_classes_of_another_order),
    TEST_CASE(fit_ties_of_accuracy_go_to_the_lower_loss), TEST_CASE(fit_keeps_again_where_keep_failed),
    TEST_CASE(fit_killed_in_its_first_keep_goes_on), TEST_CASE(fit_takes_no_unreadable_file_for_absent),
    TEST_CASE(a_folder_that_breaks_off_is_not_listed), TEST_CASE(fit_says_from_where_a_resumed_run_goes_on),
    TEST_CASE(fit_writes_metrics), TEST_CASE(fit_refuses_metrics_with_other_columns),
    TEST_CASE(pictures_of_a_training), TEST_CASE(lines_of_metrics),
    TEST_CASE(fit_of_a_trainer_that_only_evaluates), TEST_CASE(names_that_a_state_cannot_have),
    TEST_CASE(fit_of_models_of_ones_own), TEST_CASE(best_by_metric_or_loss),
    TEST_CASE(fit_of_ones_own_refuses), TEST_CASE(fit_of_sources_that_break_their_promise),
    TEST_CASE(fit_refuses_sources_and_folders_before_it_trains),
    TEST_CASE(fit_tells_of_validations_that_are_not_finite),
    TEST_CASE(a_program_by_hand_is_saved_and_goes_on),
    TEST_CASE(states_of_programs_that_train_one_parameter), TEST_CASE(states_that_a_program_refuses),
    TEST_CASE(a_trainers_state_in_a_program), TEST_CASE(runs_on_any_number_of_ranks_are_the_same),
    TEST_CASE(resume_on_another_number_of_ranks), TEST_CASE(micro_batches_wait_for_their_round),
    TEST_CASE(a_step_of_one_round), TEST_CASE(evaluation_on_any_number_of_ranks_is_the_same),
    TEST_CASE(fit_tells_of_ranks_without_work),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
