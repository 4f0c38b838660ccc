/* Tests of runs on several ranks. */
#pragma once

/* -------------------------------------------------------------------------------------------------- ranks */

/* Returns a setup whose gradients are summed by a tree of `groups` leaves. */
static setup on_ranks(const char *device, int groups)
{
    setup s = small();
    s.schedule.total_steps = 21;
    s.device = device;
    s.parallel.groups = groups;
    return s;
}

/* Returns whether two runs have equal states, and equal metrics except for the bytes of arenas. */
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

/* The options that decide the bits of a training, and how ranks share it. */
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

/* Trains one model on one rank and on several, with dropout, with steps of uneven micro-batches, and with a
   short last step in each epoch. Metrics and state are equal bit for bit. */
TEST(runs_on_any_number_of_ranks_are_the_same)
{
    static const char *const devices[] = {"cpu", "cpu*2", "cpu*4", "cpu*8"};
    for (int k = TEST_SWEEP > 1; k < TEST_COUNT(rank_rows); k += test_every(3)) {
        char folder[TEST_COUNT(devices)][1024];
        tt_stats stats[TEST_COUNT(devices)];
        int max = 0;
        while (1 << (max + 1) <= rank_rows[k].groups) max++;
        for (int n = 0; n <= max; n++) {
            /* A thinned sweep takes one number of ranks for each row, in turn. */
            if (TEST_SWEEP > 1 && n && n != 1 + (k + 2) % max) continue;
            setup s = on_ranks(devices[n], 0);
            rank_group w;
            fitting f;
            bool finished;
            memset(&f, 0, sizeof f);
            f.ranks = true;
            s.parallel = rank_rows[k].parallel;
            s.batch = rank_rows[k].batch;
            s.accumulate = rank_rows[k].accumulate;
            s.max_tokens = rank_rows[k].max_tokens;
            s.precision = rank_rows[k].precision;
            s.hidden = 192, s.layers = 1, s.intermediate = 360; /* large enough to be divided into shards */
            s.threads = 1 + n % 2;
            snprintf(folder[n], sizeof folder[n], "%s", test_path(test_folder(), "run"));
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

/* A run on four ranks stops within an epoch, continues on two ranks to an epoch's end, then on eight. */
TEST(resume_on_another_number_of_ranks)
{
    static const struct { const char *device; int stop_at, zero; } parts[] = {
        {"cpu*4", 5, 1}, {"cpu*2", 14, 0}, {"cpu*8", 0, 1}};
    char whole[1024], resumed[1024];
    rank_group w;
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
    CHECK(warnings == 0); /* no warning: the user need not know of a new layout */
    s.parallel.groups = 4; /* another number of groups changes bits */
    s.device = "cpu*2";
    if (!open_world(&w, &s)) return;
    w.ctx->options.logger.log = count_warning;
    CHECK(fit(&w, resumed, true, &f, &finished) == TT_OK && finished && warnings == 1 &&
          strstr(warned, "max_tokens, groups, ...") != NULL);
    close_world(&w);
}

/* Checks the results of tt_train_batch between rounds, and the calls that are refused between rounds. A step
   that fails in its second round changes nothing. */
TEST(micro_batches_wait_for_their_round)
{
    setup s = on_ranks("cpu*2", 4);
    rank_group a, b;
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
        CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "a state can be saved between steps");
        if (micro % 2) continue;
        CHECK(tt_evaluate(a.r, tt_loader_source(a.all), &stats) == TT_ERR_ARGUMENT);
        CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "only 1 of the 2 data ranks have a micro-batch");
        CHECK(tt_evaluate_batch(a.r, &x, &stats) == TT_ERR_ARGUMENT &&
              tt_predict(a.r, &x, probabilities) == TT_ERR_ARGUMENT);
    }
    a.progress.step = 1;
    CHECK(tt_loader_seek(a.l, 0, 1) == TT_OK);
    int32_t ids[BATCH * 24];
    static const int bad_at[] = {0, 1, 2, 3};
    for (int k = 0; k < TEST_COUNT(bad_at); k++) { /* micro-batch bad_at[k] has a wrong id, or no labels */
        for (int micro = 0; micro < 4; micro++) {
            REQUIRE(tt_loader_next(a.l, &x));
            memcpy(ids, x.ids, sizeof *ids * (size_t)x.rows);
            const bool bad = micro == bad_at[k];
            if (bad && k % 2) ids[1] = 30000, x.ids = ids; /* fails only when the round runs */
            if (bad && k % 2 == 0) x.labels = NULL;         /* the call fails at once */
            const tt_status status = tt_train_batch(a.r, &x, &stats, &updated);
            CHECK(!updated && (status == TT_OK) == (micro < bad_at[k]));
            if (bad && k % 2) CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "rank 1");
            if (bad && k % 2 == 0) CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "the batch has no labels");
            if (micro > bad_at[k])
                CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "an earlier micro-batch of this step failed");
        }
        CHECK(x.last_of_step && tt_trainer_steps(a.r) == 1 && tt_loader_seek(a.l, 0, 1) == TT_OK);
    }
    CHECK(tt_evaluate(a.r, tt_loader_source(a.all), &stats) == TT_OK); /* no micro-batch is waiting */
    CHECK(train(&a, 2, NULL) == TT_OK && same_worlds(&a, &b));
    close_world(&a);
    close_world(&b);
}

/* Without accumulate a step is one round of at most one micro-batch per data rank. */
TEST(a_step_of_one_round)
{
    setup s = on_ranks("cpu*4", 4);
    rank_group a, b;
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
    /* Four data ranks take four micro-batches. The fourth does not end the step, and so fails the step. */
    for (int micro = 0; micro < 6; micro++) {
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

/* The matrix of predictions counts what tt_predict returns, on any number of ranks. */
TEST(predictions_of_each_class)
{
    static const char *const devices[] = {"cpu", "cpu*2", "cpu*3"};
    for (int n = 0; n < TEST_COUNT(devices); n++) {
        setup s = on_ranks(devices[n], 0);
        rank_group w;
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

/* Evaluations and predictions on several ranks equal those on one rank bit for bit. */
TEST(evaluation_on_any_number_of_ranks_is_the_same)
{
    static const char *const devices[] = {"cpu", "cpu*2", "cpu*3", "cpu*4", "cpu*8"};
    tt_stats first[2], stats[2];
    float p[2][2 * BATCH];
    for (int n = 0; n < TEST_COUNT(devices); n++) {
        setup s = on_ranks(devices[n], 0);
        rank_group w;
        tt_batch b;
        bool more = false;
        s.train = n % 2;
        s.batch = 24; /* each of eight ranks has room for three texts */
        s.threads = 1 + n % 3;
        if (!open_world(&w, &s)) return;
        tt_loader_options lo = tt_loader_options_default(); /* 18 micro-batches: some rounds are short */
        lo.batch = 3;
        lo.shuffle = false;
        lo.threads = 0;
        tt_loader *l = tt_loader_new(w.ctx, w.d, w.k, &lo);
        REQUIRE(l);
        CHECK(tt_evaluate(w.r, tt_loader_source(l), &stats[0]) == TT_OK && stats[0].targets == TEXTS);
        memset(&stats[1], 0, sizeof stats[1]); /* evaluates the batches one by one */
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

/* A source that is not divided for the ranks leaves some ranks without work, and tt_fit logs one warning. */
TEST(fit_tells_of_ranks_without_work)
{
    for (int k = 0; k < 2; k++) {
        setup s = on_ranks("cpu*4", 4);
        rank_group w;
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
        tt_model model = tt_bert_model(&w.m);
        tt_trainer_free(w.r);
        w.r = tt_trainer_new(w.ctx, &model, &o);
        REQUIRE(w.r);
        w.ctx->options.logger.log = count_warning;
        warnings = 0;
        CHECK(fit(&w, NULL, false, &f, &finished) == TT_OK && finished && warnings == !k);
        if (!k)
            CHECK(strcmp(warned, "fit: the steps of the source have 1 micro-batch for 4 data ranks, so some "
                         "data ranks have nothing to do: give the loader the trainer's tt_parallel") == 0);
        close_world(&w);
    }
}
