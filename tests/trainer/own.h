/* Tests of tt_fit with the user's own models and sources. */
#pragma once

/* --------------------------------------------------------------------------- the user's models and data */

enum { OWN_STEPS = 5, OWN_MICRO = 2, OWN_ROWS = 6, OWN_WORDS = 7, OWN_TOKENS = 12, OWN_EPOCHS = 3 };

/* If `language`, a language model of two sequences that both count up; otherwise a regression of a line
   through noise, with a weight for each example. The numbers of the step and of the epoch decide the data. */
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
    int64_t gives;              /* number of steps of an epoch */
    int64_t fails_at;           /* step of epoch 1 whose second micro-batch, or the seek to that step, fails;
                                   -1: none */
    bool within_steps, nothing; /* within_steps: last_of_step is never set; nothing: epoch 1 has no steps */
    tt_status keeps;            /* result of own_keep */
    struct own *other;          /* a second run, which tries to train in this folder after the first step and
                                   is refused */
    const char *folder;
    int aimless[2];             /* range of steps of epoch 1 that have no target that counts */
    bool unvalidated;           /* tt_fit gets no validation */
    int blow_at[2];             /* reported steps (from 1) after which "w" is set */
    float blow_to[2];           /* numbers to which "w" is set */
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
                   own_hash, NULL, 0, NULL, NULL, 0, NULL, 0};
    w->source = s;
    w->validation = s;
    tt_model model = {w, own_record, {metric}, 0, language ? "tokens" : NULL, 0, false, TT_TASK_CLASS};
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

/* tt_fit trains a regression and a language model of the caller: runs that are stopped and resumed have equal
   bits, and metrics, pictures and predictions are right. */
TEST(fit_of_models_of_ones_own)
{
    for (int language = 0; language < 2; language++) {
        const tt_metric rmse = {"rmse", own_rmse, true, NULL}, metric = language ? tt_perplexity() : rmse;
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
        b.stop_at = 7; /* stops in the middle of the second epoch */
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

/* The metric or the loss decides which epoch is best. The model says whether a larger or a smaller metric is
   better. The loss decides between equal metrics. */
TEST(best_by_metric_or_loss)
{
    static const struct { double (*of)(const tt_stats *s); bool lower; const char *best_by; } rows[] = {
        {own_rising, false, NULL}, {own_rising, true, NULL}, {own_rising, true, "loss"},
        {own_constant, false, NULL}, {own_constant, true, "rise"}, {NULL, false, NULL},
        {NULL, false, "loss"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        const tt_metric metric = {rows[k].of ? "rise" : NULL, rows[k].of, rows[k].lower, NULL};
        own w;
        bool finished;
        char *folder = test_folder(), path[1200];
        double min = INFINITY;
        int kept = 0, lines;
        size_t n;
        own_calls = 0;
        if (!open_own(&w, false, metric)) return;
        snprintf(path, sizeof path, "%s/run", folder);
        CHECK(own_fit(&w, path, false, rows[k].best_by, &finished) == TT_OK && finished);
        for (int e = 0; e < OWN_EPOCHS; e++) {
            const bool lower = w.losses[e] < min;
            CHECK(w.best[e] == (k == 0 || (k == 1 ? e == 0 : lower)));
            min = fmin(min, w.losses[e]);
            kept += w.best[e];
        }
        CHECK(w.kept == kept && w.losses[1] < w.losses[0]); /* the losses differ */
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
    const tt_metric rmse = {"rmse", own_rmse, true, NULL};
    own w, v;
    bool finished = true;
    char folder[1024];
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    if (!open_own(&w, false, rmse) || !open_own(&v, false, rmse)) return;
    CHECK(own_fit(&w, NULL, false, "accuracy", &finished) == TT_ERR_ARGUMENT && !finished);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "best_by is 'accuracy', and the model has only 'loss' or 'rmse'");
    w.stop_at = 6;
    CHECK(own_fit(&w, folder, false, NULL, &finished) == TT_OK && !finished);
    CHECK(own_fit(&v, folder, true, "loss", &finished) == TT_ERR_ARGUMENT && v.steps == 0);
    CHECK_ERROR(v.ctx, TT_ERR_ARGUMENT,
                "run' was chosen by its rmse, not by its loss: resume with the same best_by");
    v.ctx->options.logger.log = keep_warning;
    warned[0] = 0;
    v.hash = 8;
    v.stop_at = 1;
    CHECK(own_fit(&v, folder, true, NULL, &finished) == TT_OK && strstr(warned, "was trained on other data"));
    w.source.max_seqs++;
    CHECK(own_fit(&w, folder, true, NULL, &finished) == TT_ERR_SHAPE);

    tt_model model = {&w, own_record, {{"a,b", own_rmse, false, NULL}}, 0, NULL, 0, false, TT_TASK_CLASS};
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.max_seqs = 2;
    for (int k = 0; k < 6; k++) {
        if (k == 1) model.metrics[0].name = "loss";
        if (k == 2) model.metrics[0].name = "rmse", model.metrics[0].of = NULL;
        if (k == 3) model.metrics[0].name = NULL, model.unit = "a,b\nc";
        if (k == 4) model.unit = "units_of_thirty-two_characters__";
        if (k == 5) model.unit = NULL, model.classes = 3;
        CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
        CHECK_ERROR(w.ctx, k < 5 ? TT_ERR_ARGUMENT : TT_ERR_SHAPE,
                    k < 3 ? "the model's metric '" : k < 5 ? "the model's unit is '" : "the model has 3 "
                    "classes, but its output has a width of 1: make them equal");
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

/* If a source gives other steps than announced, or fails without a message, the error names the epoch and the
   step. */
TEST(fit_of_sources_that_break_their_promise)
{
    static const struct {
        tt_status status;
        int64_t gives, fails_at;
        bool within_steps, nothing;
        int steps; /* steps that were trained */
        const char *error;
    } rows[] = {
        {TT_ERR_ARGUMENT, OWN_STEPS, -1, true, false, 0, "epoch 1 of the source ends within a step, after 0 "
         "whole steps: the last micro-batch of a step must set last_of_step"},
        {TT_ERR_ARGUMENT, INT64_MAX, -1, false, false, 5,
         "epoch 1: the source gives a step 6, but tt_source.steps is 5: count the steps of an epoch"},
        {TT_OK, OWN_STEPS - 1, -1, false, false, 12, "fit: epoch 1 of the source ends after 4 steps, but "
         "tt_source.steps is 5: count the steps of an epoch"},
        {TT_ERR_ARGUMENT, OWN_STEPS, -1, false, true, 5, "epoch 2 of the source has no step"},
        {TT_ERR_FORMAT, OWN_STEPS, 2, false, false, 7, "epoch 2, step 3: the source failed (TT_ERR_FORMAT)"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        const tt_metric none = {NULL, NULL, false, NULL};
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
        if (rows[k].steps && rows[k].status) /* the state has all whole steps */
            CHECK(tt_trainer_load(v.r, state, &progress) == TT_OK && tt_trainer_steps(v.r) == rows[k].steps);
        else CHECK(rows[k].steps || access(state, F_OK) != 0);
        if (k == 1) {
            CHECK(tt_evaluate(w.r, &w.source, &stats) == TT_ERR_ARGUMENT);
            CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "epoch 1: the source gives a step 6");
        }
        if (k == 4) { /* in the resumed run even the seek fails */
            v.fails_at = 2;
            o.resume = true;
            CHECK(tt_fit(v.r, &v.source, NULL, &o, &finished) == TT_ERR_UNSUPPORTED);
            CHECK_ERROR(v.ctx, TT_ERR_UNSUPPORTED, "epoch 2, step 3: the source failed (TT_ERR_UNSUPPORTED)");
        }
        close_own(&w);
        close_own(&v);
    }
}

/* One step without a target is skipped. Training stops after a whole epoch without targets, and a resumed run
   continues with the next epoch. */
TEST(fit_goes_on_behind_steps_without_a_target)
{
    const tt_metric none = {NULL, NULL, false, NULL};
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
    CHECK(warnings == 1 && strcmp(warned, "fit: step 7: no target counts (all are ignored or have weight 0), "
                                  "so nothing was updated: check the labels; the step is skipped, and later "
                                  "ones like it without a warning") == 0);
    v.aimless[1] = u.aimless[1] = OWN_STEPS;
    v.ctx->options.logger.log = u.ctx->options.logger.log = count_warning;
    CHECK(own_fit(&v, folder, false, NULL, &finished) == TT_ERR_NUMERIC && !finished &&
          tt_trainer_steps(v.r) == 5 && v.steps == 10);
    CHECK_ERROR(v.ctx, TT_ERR_NUMERIC, "5 steps in a row updated nothing; the last: step 5: no target counts "
                "(all are ignored or have weight 0), so nothing was updated: check the labels");
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

/* One example makes the loss of an epoch's last step NaN. If the loss was good before, the run continues and
   keeps one state, with and without a validation. If the loss had already diverged, the run fails. */
TEST(fit_goes_on_behind_a_bad_last_step)
{
    const tt_metric none = {NULL, NULL, false, NULL};
    /* k 0: with a validation; 1: without; 2: without, and the loss has diverged before. */
    for (int k = 0; k < 3; k++) {
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
            CHECK(warnings == 1 && strstr(warned,
                                          "the step is skipped, and later ones like it without a warning"));
            CHECK(in_folder(folder, "state.safetensors") && !in_folder(folder, "state.diverged.safetensors"));
        }
        if (k == 2) CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "1 step in a row updated nothing");
        close_own(&w);
    }
}

/* "w" is set to 1e3 after step 6, so that the loss grows a thousandfold. The state after the second epoch is
   then saved beside the state of the first epoch. A stopped run resumes from the newer state, bit for bit. If
   the loss recovers, the run keeps one state. With "w" at 3e38 nothing is finite any more, and the state of
   the first epoch is kept. */
TEST(fit_keeps_the_state_from_before_the_loss_diverged)
{
    const tt_metric none = {NULL, NULL, false, NULL};
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
            CHECK(strstr(warned,
                         "the loss has diverged by step 10: its state is saved in '") && warnings == 1);
        if (k == 0) snprintf(whole, sizeof whole, "%s", test_path(folder, "state.diverged.safetensors"));
        if (k == 1) {
            CHECK(own_fit(&v, folder, true, NULL, &finished) == TT_OK && finished && v.steps == 3);
            CHECK(same_files(whole, test_path(folder, "state.diverged.safetensors")));
        }
        if (k == 3) {
            CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "4 steps in a row updated nothing; the last: step 11");
            CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "parameter 'w' has values as large as 3e+38; the state of "
                        "step 5 is saved: resume it with a lower learning rate");
            CHECK(own_fit(&v, folder, true, NULL, &finished) == TT_OK && finished && v.steps == 10);
        }
        close_own(&w);
        close_own(&v);
    }
}

/* state.diverged.safetensors can be older than state.safetensors: after a kill between the write of
   state.safetensors and the removal of state.diverged.safetensors, or after a run of an older build. A
   resumed run takes the newer file. */
TEST(fit_goes_on_from_the_newer_of_two_states)
{
    const tt_metric none = {NULL, NULL, false, NULL};
    own w, v, u;
    bool finished;
    char folder[1024], state[1100], stale[1100];
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    snprintf(state, sizeof state, "%s/state.safetensors", folder);
    snprintf(stale, sizeof stale, "%s/state.diverged.safetensors", folder);
    if (!open_own(&w, false, none) || !open_own(&v, false, none) || !open_own(&u, false, none)) return;
    w.stop_at = 7;
    CHECK(own_fit(&w, folder, false, NULL, &finished) == TT_OK && !finished);
    REQUIRE(link(state, stale) == 0); /* both names of the state have the same age */
    CHECK(own_fit(&v, folder, true, NULL, &finished) == TT_OK && finished && v.steps == 8);
    REQUIRE(access(stale, F_OK) != 0 && tt_trainer_save(w.r, stale, NULL) == TT_OK);
    CHECK(own_fit(&u, folder, true, NULL, &finished) == TT_OK && finished && u.steps == 0);
    CHECK(access(stale, F_OK) != 0);
    close_own(&w);
    close_own(&v);
    close_own(&u);
}

/* If weights are not finite before the first step, the error does not mention the learning rate. */
TEST(fit_of_bad_weights_names_no_learning_rate)
{
    const tt_metric none = {NULL, NULL, false, NULL};
    const float bad[3] = {NAN, NAN, NAN};
    own w;
    bool finished;
    if (!open_own(&w, false, none)) return;
    CHECK(tt_param_set(w.w, bad) == TT_OK);
    CHECK(own_fit(&w, test_path(test_folder(), "run"), false, NULL, &finished) == TT_ERR_NUMERIC);
    CHECK_ERROR(w.ctx, TT_ERR_NUMERIC,
                "'w' has a value that is not finite; no step has updated anything, so the initial weights");
    close_own(&w);
}

#ifndef _WIN32
/* A folder is refused while another context of this process uses it, and while another process uses it, until
   the other process is killed. */
TEST(fit_refuses_a_folder_that_another_run_uses)
{
    const tt_metric none = {NULL, NULL, false, NULL};
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
    /* A lock does not follow a symbolic link. */
    snprintf(precious, sizeof precious, "%s/precious", folder);
    REQUIRE(close(open(precious, O_CREAT | O_WRONLY, 0666)) == 0 && symlink(precious, lock) == 0);
    CHECK(!files.lock(files.user, lock, "text", &held) && !held);
    CHECK(stat(precious, &there) == 0 && there.st_size == 0);
    close(ready[0]), close(ready[1]);
    close_own(&w);
    close_own(&v);
}
#else
TEST(fit_refuses_a_folder_that_another_run_uses) { SKIP("Windows has no fork"); }
#endif

static int64_t disk_space;
static int64_t space_of(void *user, const char *folder) { (void)user; (void)folder; return disk_space; }

/* The state of this run has three times as many bytes as its parameters. */
TEST(fit_looks_for_room_on_the_disk)
{
    const tt_metric none = {NULL, NULL, false, NULL};
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
    CHECK_ERROR(w.ctx, TT_ERR_FILE, "run': the run needs 0.0 MB there for its states (two of 0.0");
    CHECK_ERROR(w.ctx, TT_ERR_FILE, "but the disk has room for 0.0 MB: free some, or name a folder on");
    CHECK(!in_folder(folder, "run.lock") && !in_folder(folder, "metrics.csv"));
    disk_space++;
    w.stop_at = 1;
    CHECK(own_fit(&w, folder, false, NULL, &finished) == TT_OK && w.steps == 1 && warnings == 1);
    CHECK(strstr(warned, "may not fit on the disk, which has room for 0.0 MB") != NULL);
    w.steps = w.stop_at = w.stop = 0;
    /* One state exists, so the run needs room for one more state, and for a model. */
    disk_space = 3 * 4 * 4 + 4 * 4;
    CHECK(own_fit(&w, folder, true, NULL, &finished) == TT_OK && finished && warnings == 1);
    disk_space = 0;
    CHECK(own_fit(&w, folder, true, NULL, &finished) == TT_OK && finished); /* this run writes no state */
    const tt_files files = tt_context_options_default().files;
    CHECK(files.space(files.user, folder) > 0);
#ifndef _WIN32 /* /proc reports a size of 0, which tells nothing: `space` returns -1 */
    CHECK(files.space(files.user, "/proc") == -1 || access("/proc", F_OK) != 0);
#endif
    close_own(&w);
}

TEST(fit_refuses_sources_and_folders_before_it_trains)
{
    const tt_metric none = {NULL, NULL, false, NULL};
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

/* The run warns of each validation that is not finite. If a metric is undefined, the loss decides whether the
   model is kept. If the loss is not finite either, the run warns at the end that no model was kept. */
TEST(fit_tells_of_validations_that_are_not_finite)
{
    static const struct { tt_metric metric; int64_t from; int kept; const char *warning; } rows[] = {
        {{"odd", own_odd, false, NULL}, INT64_MAX, OWN_EPOCHS,
         "fit: epoch 3: the validation's odd is not finite, so the loss is compared"},
        {{"odd", own_odd, false, NULL}, OWN_EPOCHS * OWN_STEPS, OWN_EPOCHS,
         "fit: epoch 2: the validation's odd is not finite, so the loss is compared"},
        {{NULL, NULL, false, NULL}, 0, 0,
         "fit: epoch 3: the validation's loss is not finite, as in all epochs "
         "before, so no best model was saved"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        own w;
        bool finished;
        if (!open_own(&w, false, rows[k].metric)) return;
        w.ctx->options.logger.log = count_warning;
        own_finite_from = rows[k].from;
        warnings = 0;
        if (!rows[k].metric.name) w.validation.next = own_next_nan;
        CHECK(own_fit(&w, NULL, false, NULL, &finished) == TT_OK && finished && w.kept == rows[k].kept);
        const bool later = rows[k].from < INT64_MAX && rows[k].from > 0; /* the metric of epoch 3 is finite */
        CHECK(warnings == OWN_EPOCHS - later && strcmp(warned, rows[k].warning) == 0);
        close_own(&w);
    }
}
