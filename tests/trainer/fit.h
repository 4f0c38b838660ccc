/* Tests of tt_fit: a run in a folder, stopped, resumed, killed and refused. */
#pragma once

/* ---------------------------------------------------------------------------------------------------- fit */

typedef struct fitting {
    rank_group *w;
    /* Numbers of events so far; stop_at: the step after which to stop; poison_at: the step after which a
       parameter becomes NaN. */
    int steps, validations, kept, stop_at, poison_at;
    bool stop_in_validation;
    volatile int stop;
    double best, best_loss;
    int ties;                    /* validations that were best by the loss alone */
    int epochs;                  /* number of epochs; 0: three */
    int keep_fails_at;           /* number of the call of keep that fails; 0: none */
    const char *folder, *copy;   /* keep's first call copies the run's files from `folder` to `copy` */
    test_files *files;           /* files to which writing fails once the run is stopped */
    bool ranks;                  /* the run has several ranks, which may compute faster than the
                                    measured peak speed: then of_peak is 0 */
} fitting;

/* Copies the file `name` from one folder to another, if the file exists. */
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
    static const char *const narrow[] = {
        "epoch 2/6 [#.....] 13/52  loss 0.1235  accuracy 0.988  55692 tokens/s  29% of peak  ETA 2:05",
        "epoch 2/6 13/52  loss 0.1235  accuracy 0.988  55692 tokens/s  29% of peak  ETA 2:05",
        "epoch 2/6 13/52  loss 0.1235  accuracy 0.988  ETA 2:05", "epoch 2/6 13/52  ETA 2:05"};
    for (int k = 0; k < TEST_COUNT(narrow); k++) {
        char fits[128];
        CHECK(tt_fit_text(&e, fits, strlen(narrow[k]) + (k == 1 ? 4 : 1)) == strlen(line));
        if (strcmp(fits, narrow[k]) != 0) { printf("%s\n", fits); CHECK(!"so wide"); }
    }
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

static tt_status fit(rank_group *w, const char *folder, bool resume, fitting *f, bool *finished)
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

#define METRICS "step,epoch,split,loss,accuracy,f1_macro,lr,grad_norm,loss_scale,skipped,bytes"

/* Returns metrics.csv without its last columns_at_end columns; the last three columns are the bytes of the
   arena, time and speed. *lines: number of lines. The caller frees the text. */
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

/* A run that stops after the 3rd, 7th or 10th step and resumes ends like a run without a stop, also if a step
   has several micro-batches. */
TEST(fit_stopped_and_resumed)
{
    for (int k = 0; k < 4; k++) {
        static const int stop_at[] = {3, 7, 10, 10};
        setup s = small();
        rank_group a, b, c;
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
        /* 690 pixels show 21 steps; epochs end after steps 7, 14 and 21. */
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
    rank_group w;
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
    rank_group w, v;
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
    o.epochs = INT64_MAX; /* with seven steps each, the total overflows */
    CHECK(tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(w.all), &o, &finished) == TT_ERR_ARGUMENT &&
          !finished);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "tt_fit: epochs is 9223372036854775807");
    o.epochs = 1;
    o.resume = true;
    CHECK(tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(w.all), &o, &finished) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "resume is set, but folder is not");
    CHECK(fit(&w, folder, true, &f, &finished) == TT_ERR_FILE);
    CHECK_ERROR(w.ctx, TT_ERR_FILE, "cannot list the folder '");
    CHECK(access(folder, F_OK) != 0); /* the run made no folder */
    CHECK(fit(&w, test_folder(), true, &f, &finished) == TT_ERR_FILE);
    CHECK_ERROR(w.ctx, TT_ERR_FILE, "nothing to resume: '");
    CHECK(fit(&w, "/dev/null/run", false, &f, &finished) == TT_ERR_FILE);
    CHECK_ERROR(w.ctx, TT_ERR_FILE, "cannot make folder '/dev/null/run'");
    CHECK(fit(&w, folder, false, &f, &finished) == TT_OK && finished);
    CHECK(fit(&v, folder, false, &f, &finished) == TT_ERR_ARGUMENT && tt_trainer_steps(v.r) == 0);
    CHECK_ERROR(v.ctx, TT_ERR_ARGUMENT, "run' holds a run: resume it, or name another folder");
    o.folder = folder;
    CHECK(tt_fit(v.r, tt_loader_source(v.l), tt_loader_source(v.all), &o, &finished) == TT_ERR_ARGUMENT);
    CHECK_ERROR(v.ctx, TT_ERR_ARGUMENT,
                "has done 3 epochs and 0 steps, but this run has only 1 epochs of 7 steps");
    w.progress.epoch = INT64_MAX; /* times the steps of an epoch, this number would overflow */
    CHECK(tt_trainer_save(w.r, test_path(folder, "state.safetensors"), &w.progress) == TT_OK);
    CHECK(tt_fit(v.r, tt_loader_source(v.l), tt_loader_source(v.all), &o, &finished) == TT_ERR_ARGUMENT);
    CHECK_ERROR(v.ctx, TT_ERR_ARGUMENT,
                "has done 9223372036854775807 epochs and 0 steps, but this run has only 1 epoch");
    close_world(&w);
    close_world(&v);
}

/* The classes of the training and the validation data are in different orders: the validation dataset was
   split off before the training dataset's classes were numbered like the model's. */
TEST(fit_refuses_classes_of_another_order)
{
    setup s = small();
    rank_group w, v;
    fitting f;
    bool finished;
    tt_fit_options o = tt_fit_options_default();
    memset(&f, 0, sizeof f);
    if (!open_world(&w, &s) || !open_world(&v, &s)) return;
    strcpy(v.m.class_names[0], "pos");
    strcpy(v.m.class_names[1], "neg");
    CHECK(tt_bert_name_classes(&v.m, v.d) == TT_OK);
    CHECK(tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(v.all), &o, &finished) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT,
                "class 0 is 'neg' in the training data, but 'pos' in the validation data");
    CHECK(tt_bert_name_classes(&v.m, w.d) == TT_OK);
    CHECK(tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(v.all), &o, &finished) == TT_OK && finished);
    close_world(&w);
    close_world(&v);
}

TEST(fit_resumes_on_the_same_data) /* tt_fit refuses other classes, and warns of other labels and texts */
{
    setup s = small();
    rank_group w, v;
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
    for (int k = 0; k < 7; k++) { /* values that no run can have */
        tt_progress bad = w.progress;
        double x = nothing[k % 3];
        *(k < 3 ? &bad.targets : k < 6 ? &bad.correct : &bad.best) = x;
        const char *path = test_path(folder, "bad");
        CHECK(tt_trainer_save(w.r, path, &bad) == TT_OK);
        CHECK(tt_trainer_load(w.r, path, &p) == TT_ERR_FORMAT);
        CHECK_ERROR(w.ctx, TT_ERR_FORMAT, "targets were right and the best metric was");
    }
    close_world(&w);
}

/* A parameter becomes NaN in the second epoch. All steps are skipped up to the validation, whose loss is not
   finite either. The state of the first epoch is kept. */
TEST(fit_that_blows_up_keeps_the_last_good_state)
{
    setup s = small();
    rank_group w, v;
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
    CHECK_ERROR(w.ctx, TT_ERR_NUMERIC, "parameter 'classifier.bias' has a value that is not finite; the "
                "state of step 7 is saved: resume it with a lower learning rate");
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

/* Trains three undisturbed epochs in `folder`, for comparison. */
static bool fit_undisturbed(rank_group *w, const setup *s, const char *folder, fitting *f)
{
    bool finished;
    memset(f, 0, sizeof *f);
    return open_world(w, s) &&
           CHECK(fit(w, folder, false, f, &finished) == TT_OK && finished && f->kept >= 1);
}

/* Checks that both folders hold equal states and, except for times, equal metrics, with one line for each of
   21 steps and 3 validations. */
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
    rank_group w;
    fitting f;
    bool finished;
    memset(&f, 0, sizeof f);
    f.epochs = 8;
    s.dropout = 0;
    s.schedule.kind = TT_CONSTANT;
    s.schedule.lr = 4e-3f;
    if (!open_world(&w, &s)) return;
    CHECK(fit(&w, NULL, false, &f, &finished) == TT_OK && finished && f.validations == 8);
    /* From some epoch on all predictions are right, and the loss still falls. */
    CHECK(f.best == 1 && f.ties >= 2);
    close_world(&w);
}

TEST(fit_keeps_again_where_keep_failed)
{
    setup s = small();
    rank_group a, b, c;
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

/* A run killed while its first model is kept leaves a state. The resumed run ends like a whole run. */
TEST(fit_killed_in_its_first_keep_goes_on)
{
    setup s = small();
    rank_group a, b;
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

/* A file that cannot be opened or listed does not count as absent, so that no new run overwrites an existing
   run, and no metrics are lost. */
TEST(fit_takes_no_unreadable_file_for_absent)
{
    static const struct { char op; bool resume; tt_status status; const char *error; } faults[] = {
        {'o', false, TT_ERR_ARGUMENT, "holds a run: resume it, or name another folder"},
        {'l', false, TT_ERR_FILE, "cannot list the folder '"},
        {'o', true, TT_ERR_FILE, "cannot open '"},
        {'l', true, TT_ERR_FILE, "cannot list the folder '"}};
    setup s = small();
    rank_group w, v;
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
        /* Call 1 reads the state, call 2 (of a resumed run) the metrics. */
        for (int at = 1; at <= (faults[k].resume ? 2 : 1); at++) {
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

#ifndef _WIN32
static bool close_below(void *arg, const char *name) { (void)name; close(*(int *)arg); return true; }

TEST(a_folder_that_breaks_off_is_not_listed) /* closes the folder's descriptor while names are read */
{
    const tt_files files = tt_context_options_default().files;
    char *folder = test_folder();
    int next = dup(0);
    REQUIRE(next >= 0 && close(next) == 0);
    test_write(test_path(folder, "a"), "", 0);
    CHECK(!files.list(files.user, folder, close_below, &next));
    CHECK(strcmp(files.reason(files.user), strerror(EBADF)) == 0);
}
#else
TEST(a_folder_that_breaks_off_is_not_listed) { SKIP("Windows lists folders without descriptors"); }
#endif

TEST(fit_says_from_where_a_resumed_run_goes_on)
{
    setup s = small();
    rank_group a, b, c;
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
    /* Step 4: before the first state; step 9: in the second epoch. */
    for (int stop_at = 4; stop_at <= 9; stop_at += 5) {
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

TEST(fit_of_a_trainer_that_only_evaluates)
{
    setup s = small();
    rank_group w;
    fitting f;
    bool finished = true;
    memset(&f, 0, sizeof f);
    s.train = false;
    if (!open_world(&w, &s)) return;
    CHECK(fit(&w, NULL, false, &f, &finished) == TT_ERR_ARGUMENT && !finished && f.steps == 0);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "this trainer was made with train = false");
    close_world(&w);
}

/* A model with one linear layer over the first token's embedding; `self` names the layer's bias. */
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
        tt_model model = {names[k], record_named, {tt_accuracy()}, 2, "tokens", 8, false, TT_TASK_CLASS};
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
            snprintf(part, sizeof part, "cannot be saved with the parameter '%s', whose name has %zu bytes",
                     names[k], strlen(names[k]));
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
