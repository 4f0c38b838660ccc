/* tt_fit with validations within epochs, and runs that end early. */
#pragma once

typedef struct steered {
    rank_group *w;
    volatile int stop;
    int steps, stop_at;              /* steps: number so far; stop_at: number after which to stop, 0: never */
    int64_t every, patience;         /* tt_fit_options.validate_steps and patience */
    int64_t keep_states;
    bool own_source;                 /* validation reads the source of training */
    int validations, kept;
    double loss;                     /* loss of the last validation */
    int at[32];                      /* steps of all epochs before each validation */
    int64_t worse[32];
    const char *folder, *copy;       /* `keep` copies the run's files to `copy` in its call number copy_at */
    int copy_at;
} steered;

static tt_status steered_keep(void *user)
{
    steered *x = (steered *)user;
    if (++x->kept == x->copy_at) {
        copy_file(x->folder, x->copy, "state.safetensors");
        copy_file(x->folder, x->copy, "metrics.csv");
    }
    return TT_OK;
}

static void steered_report(void *user, const tt_fit_event *e)
{
    steered *x = (steered *)user;
    char line[256];
    CHECK(e->patience == x->patience);
    if (!e->validation) {
        if (++x->steps == x->stop_at) x->stop = 1;
        return;
    }
    x->loss = e->validation->loss;
    tt_fit_text(e, line, sizeof line);
    CHECK((strstr(line, " in a row that are no better") != NULL) == (e->worse > 0 && x->patience > 0));
    CHECK(e->best == (e->worse == 0) && x->validations < TEST_COUNT(x->at));
    x->at[x->validations] = (int)(7 * e->epoch + e->step);
    x->worse[x->validations++] = e->worse;
}

static tt_status steered_fit(steered *x, rank_group *w, const char *folder, bool resume, bool *finished)
{
    tt_fit_options o = tt_fit_options_default();
    x->w = w;
    x->stop = 0;
    o.epochs = 3;
    o.folder = x->folder = folder;
    o.resume = resume;
    o.validate_steps = x->every;
    o.patience = x->patience;
    o.keep_states = x->keep_states;
    o.stop = &x->stop;
    o.keep = steered_keep;
    o.report = steered_report;
    o.user = x;
    return tt_fit(w->r, tt_loader_source(w->l), tt_loader_source(x->own_source ? w->l : w->all), &o,
                  finished);
}

static bool same_folders(const char *a, const char *b)
{
    char x[1200], y[1200];
    int lines[2];
    char *m = metrics_of(a, &lines[0]), *n = metrics_of(b, &lines[1]);
    bool same = m && n && lines[0] == lines[1] && strcmp(m, n) == 0;
    free(m);
    free(n);
    snprintf(x, sizeof x, "%s/state.safetensors", a);
    snprintf(y, sizeof y, "%s/state.safetensors", b);
    same = same && same_files(x, y);
    snprintf(x, sizeof x, "%s/loss.svg", a);
    snprintf(y, sizeof y, "%s/loss.svg", b);
    return same && same_files(x, y);
}

/* Validations within epochs come after every third step and at the ends of epochs, and change no bit of the
   training. A run stopped after any step, or killed within `keep`, ends like a run without a stop. */
TEST(fit_validates_within_epochs)
{
    static const int at[] = {3, 6, 7, 9, 12, 14, 15, 18, 21};
    setup s = small();
    rank_group plain, whole;
    steered x;
    bool finished;
    char first[1024], copy[1024], parts[1024];
    s.schedule.kind = TT_WSD;
    s.schedule.total_steps = 21;
    s.schedule.decay_steps = 9;
    snprintf(first, sizeof first, "%s", test_path(test_folder(), "first"));
    snprintf(copy, sizeof copy, "%s", test_path(test_folder(), "copy"));
    CHECK(mkdir(copy, 0777) == 0);
    if (!open_world(&plain, &s) || !open_world(&whole, &s)) return;
    memset(&x, 0, sizeof x);
    CHECK(steered_fit(&x, &plain, NULL, false, &finished) == TT_OK && finished && x.validations == 3);
    memset(&x, 0, sizeof x);
    x.every = 3;
    x.copy = copy;
    x.copy_at = 2;
    CHECK(steered_fit(&x, &whole, first, false, &finished) == TT_OK && finished && x.steps == 21);
    CHECK(x.validations == TEST_COUNT(at) && memcmp(x.at, at, sizeof at) == 0 && x.kept >= 2);
    CHECK(same_worlds(&plain, &whole));
    for (int k = 0; k < 9; k++) {
        static const int stop_at[] = {2, 3, 4, 6, 7, 8, 9, 20};
        rank_group b, c;
        steered y;
        memset(&y, 0, sizeof y);
        y.every = 3;
        if (!open_world(&b, &s) || !open_world(&c, &s)) return;
        snprintf(parts, sizeof parts, "%s%d", test_path(test_folder(), "parts"), k);
        if (k < TEST_COUNT(stop_at)) {
            y.stop_at = stop_at[k];
            CHECK(steered_fit(&y, &b, parts, false, &finished) == TT_OK && !finished);
            CHECK(steered_fit(&y, &c, parts, true, &finished) == TT_OK && finished && y.steps == 21);
            CHECK(y.validations == TEST_COUNT(at) && memcmp(y.at, at, sizeof at) == 0);
        } else /* the run was killed in a call of keep, so it validates again */
            CHECK(steered_fit(&y, &c, copy, true, &finished) == TT_OK && finished && y.steps < 21);
        CHECK(same_worlds(&whole, &c) && same_folders(first, k < TEST_COUNT(stop_at) ? parts : copy));
        close_world(&b);
        close_world(&c);
    }
    close_world(&plain);
    close_world(&whole);
}

static bool has_kept(const char *folder, int step)
{
    char name[48];
    bool there = false;
    snprintf(name, sizeof name, "/state-%d.safetensors", step);
    char *path = (char *)calloc(1, strlen(folder) + sizeof name);
    sprintf(path, "%s%s", folder, name);
    FILE *f = fopen(path, "rb");
    there = f != NULL;
    if (f) fclose(f);
    free(path);
    return there;
}

/* A run keeps the states of its last validations, also when the run is resumed. A run that resumes from a
   kept state ends with the same bits. Files with other names and the states of later steps stay. */
TEST(fit_keeps_states)
{
    static const int at[] = {3, 6, 7, 9, 12, 14, 15, 18, 21};
    setup s = small();
    rank_group a, b, c;
    steered x, y;
    bool finished;
    char first[1024], second[1024];
    s.schedule.total_steps = 21;
    snprintf(first, sizeof first, "%s", test_path(test_folder(), "first"));
    snprintf(second, sizeof second, "%s", test_path(test_folder(), "second"));
    memset(&x, 0, sizeof x);
    memset(&y, 0, sizeof y);
    x.every = y.every = 3;
    x.keep_states = y.keep_states = 2;
    if (!open_world(&a, &s) || !open_world(&b, &s) || !open_world(&c, &s)) return;
    CHECK(steered_fit(&x, &a, first, false, &finished) == TT_OK && finished);
    for (int k = 0; k < TEST_COUNT(at); k++) CHECK(has_kept(first, at[k]) == (k >= TEST_COUNT(at) - 2));
    CHECK(same_files(test_path(first, "state-21.safetensors"), test_path(first, "state.safetensors")));
    y.stop_at = 13;
    CHECK(steered_fit(&y, &b, second, false, &finished) == TT_OK && !finished);
    CHECK(has_kept(second, 9) && has_kept(second, 12) && !has_kept(second, 7) && !has_kept(second, 13));
    copy_file(first, second, "state-21.safetensors"); /* of an abandoned run */
    test_write(test_path(second, "state-x.safetensors"), "", 0);
    test_write(test_path(second, "state-8.safetensors.txt"), "", 0);
    size_t n;
    char *bytes = test_read(test_path(second, "state-9.safetensors"), &n);
    test_write(test_path(second, "state.safetensors"), bytes, n);
    free(bytes);
    y.stop_at = y.steps + 9; /* the run takes steps 10 to 18 */
    CHECK(steered_fit(&y, &c, second, true, &finished) == TT_OK && !finished && tt_trainer_steps(c.r) == 18);
    CHECK(has_kept(second, 15) && has_kept(second, 14) && !has_kept(second, 12) && has_kept(second, 21));
    y.stop_at = 0;
    CHECK(steered_fit(&y, &c, second, true, &finished) == TT_OK && finished);
    CHECK(has_kept(second, 18) && has_kept(second, 21) && !has_kept(second, 15));
    CHECK(same_worlds(&a, &c) && same_folders(first, second));
    CHECK(same_files(test_path(first, "state-18.safetensors"), test_path(second, "state-18.safetensors")));
    bytes = test_read(test_path(second, "state-x.safetensors"), &n);
    CHECK(bytes != NULL);
    free(bytes);
    bytes = test_read(test_path(second, "state-8.safetensors.txt"), &n);
    CHECK(bytes != NULL);
    free(bytes);
    close_world(&a);
    close_world(&b);
    close_world(&c);
}

/* If validation reads the source of training, training continues in the source where it was. */
TEST(fit_validates_on_its_own_source)
{
    setup s = small();
    rank_group a, b;
    steered x;
    bool finished;
    if (!open_world(&a, &s) || !open_world(&b, &s)) return;
    memset(&x, 0, sizeof x);
    CHECK(steered_fit(&x, &a, NULL, false, &finished) == TT_OK && finished);
    memset(&x, 0, sizeof x);
    x.every = 2;
    x.own_source = true;
    CHECK(steered_fit(&x, &b, NULL, false, &finished) == TT_OK && finished && x.validations == 3 + 9);
    CHECK(same_worlds(&a, &b));
    close_world(&a);
    close_world(&b);
}

/* With a learning rate of 0 no validation is better than the first. */
TEST(fit_ends_early)
{
    setup s = small();
    rank_group w, v, u;
    steered x;
    bool finished;
    char folder[1024];
    tt_fit_options o = tt_fit_options_default();
    s.schedule.lr = 0;
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "early"));
    if (!open_world(&w, &s) || !open_world(&v, &s) || !open_world(&u, &s)) return;
    memset(&x, 0, sizeof x);
    x.every = 3;
    x.patience = 2;
    CHECK(steered_fit(&x, &w, folder, false, &finished) == TT_OK && finished && x.steps == 7);
    CHECK(x.validations == 3 && x.at[1] == 6 && x.at[2] == 7 && x.worse[0] == 0 && x.worse[2] == 2);
    CHECK(steered_fit(&x, &v, folder, true, &finished) == TT_OK && finished && x.steps == 7);
    x.patience = 4;
    CHECK(steered_fit(&x, &u, folder, true, &finished) == TT_OK && finished && x.steps == 12);
    CHECK(x.validations == 5 && x.at[4] == 12 && x.worse[4] == 4 && x.kept == 1);
    o.patience = 1;
    CHECK(tt_fit(u.r, tt_loader_source(u.l), NULL, &o, &finished) == TT_ERR_ARGUMENT && !finished);
    CHECK_ERROR(u.ctx, TT_ERR_ARGUMENT, "patience is 1, but `validation` is NULL");
    o.patience = 0;
    o.validate_steps = -1;
    CHECK(tt_fit(u.r, tt_loader_source(u.l), NULL, &o, &finished) == TT_ERR_ARGUMENT && !finished);
    tt_train_options t = train_options(&s, u.l);
    const tt_model model = tt_bert_model(&u.m);
    t.schedule.kind = TT_WSD_SQRT;
    t.schedule.decay_steps = t.schedule.total_steps;
    CHECK(!tt_trainer_new(v.ctx, &model, &t));
    CHECK_ERROR(v.ctx, TT_ERR_ARGUMENT, "decay_steps is 30, but with schedule wsd must be 1 to "
                "total_steps - warmup_steps, 27");
    CHECK_ERROR(u.ctx, TT_ERR_ARGUMENT, "validate_steps is -1, patience is 0 and keep_states is 0, but all "
                "must be at least 0");
    close_world(&w);
    close_world(&v);
    close_world(&u);
}

static float averaged_bias[2]; /* the classifier's bias in the last call of averaged_keep */
static tt_status averaged_keep(void *user)
{
    rank_group *w = ((steered *)user)->w;
    tt_fit_options o = tt_fit_options_default();
    CHECK(tt_fit(w->r, tt_loader_source(w->l), NULL, &o, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w->ctx, TT_ERR_ARGUMENT, "the trainer's parameters are their moving averages");
    return tt_param_get(w->m.classifier_b, averaged_bias);
}

/* Validations and `keep` use the moving averages; training and states are unchanged. */
TEST(fit_validates_moving_averages)
{
    setup s = small();
    rank_group plain, w, b, c;
    steered x, y;
    bool finished;
    char first[1024], parts[1024];
    float bias[2];
    tt_stats raw, average;
    tt_fit_options o = tt_fit_options_default();
    s.schedule.total_steps = 21;
    snprintf(first, sizeof first, "%s", test_path(test_folder(), "averages"));
    snprintf(parts, sizeof parts, "%s", test_path(test_folder(), "stopped"));
    if (!open_world(&plain, &s)) return;
    s.optimizer.ema_decay = 0.9f;
    if (!open_world(&w, &s) || !open_world(&b, &s) || !open_world(&c, &s)) return;
    memset(&x, 0, sizeof x);
    CHECK(steered_fit(&x, &plain, NULL, false, &finished) == TT_OK && finished);
    CHECK(tt_trainer_use_ema(plain.r, true) == TT_ERR_ARGUMENT);
    CHECK_ERROR(plain.ctx, TT_ERR_ARGUMENT, "tt_trainer_use_ema: the trainer has no moving averages");
    CHECK(tt_trainer_use_ema(w.r, true) == TT_OK && tt_trainer_use_ema(w.r, false) == TT_OK);
    memset(&x, 0, sizeof x);
    x.every = 2;
    CHECK(steered_fit(&x, &w, first, false, &finished) == TT_OK && finished);
    memset(&y, 0, sizeof y);
    y.every = 2;
    y.stop_at = 4;
    CHECK(steered_fit(&y, &b, parts, false, &finished) == TT_OK && !finished);
    CHECK(steered_fit(&y, &c, parts, true, &finished) == TT_OK && finished && same_folders(first, parts));
    CHECK(tt_param_get(plain.m.classifier_b, averaged_bias) == TT_OK &&
          tt_param_get(w.m.classifier_b, bias) == TT_OK && memcmp(bias, averaged_bias, sizeof bias) == 0);
    CHECK(tt_evaluate(w.r, tt_loader_source(w.all), &raw) == TT_OK && tt_trainer_use_ema(w.r, true) == TT_OK);
    CHECK(tt_evaluate(w.r, tt_loader_source(w.all), &average) == TT_OK && average.loss == x.loss &&
          raw.loss != x.loss);
    CHECK(tt_trainer_save(w.r, test_path(first, "x"), NULL) == TT_ERR_ARGUMENT);
    CHECK(tt_trainer_use_ema(w.r, false) == TT_OK && same_worlds(&w, &c));
    o.keep = averaged_keep;
    o.user = &x;
    CHECK(tt_fit(w.r, tt_loader_source(w.l), NULL, &o, &finished) == TT_OK && finished);
    CHECK(tt_param_get(w.m.classifier_b, bias) == TT_OK && memcmp(bias, averaged_bias, sizeof bias) != 0);
    CHECK(tt_trainer_use_ema(w.r, true) == TT_OK && tt_param_get(w.m.classifier_b, bias) == TT_OK &&
          memcmp(bias, averaged_bias, sizeof bias) == 0);
    close_world(&plain);
    close_world(&w);
    close_world(&b);
    close_world(&c);
}
