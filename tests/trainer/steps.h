/* Tests of steps: schedules, micro-batches, max_tokens, refused options, batches that do not fit. */
#pragma once

/* ----------------------------------------------------------------------------------------------- training */

TEST(loss_falls)
{
    setup s = small();
    rank_group w;
    tt_stats before, after, last;
    s.threads = 2;
    s.schedule.total_steps = 90;
    if (!open_world(&w, &s)) return;
    CHECK(tt_evaluate(w.r, tt_loader_source(w.all), &before) == TT_OK && tt_trainer_steps(w.r) == 0);
    CHECK(train(&w, 84, &last) == TT_OK);
    CHECK(w.progress.epoch == 11 && w.progress.step == 7 && w.progress.targets == TEXTS);
    CHECK(tt_evaluate(w.r, tt_loader_source(w.all), &after) == TT_OK);
    CHECK(before.targets == TEXTS && after.targets == TEXTS && after.step == 84);
    CHECK(after.loss < 0.2 * before.loss && after.correct >= TEXTS - 1 && before.correct < TEXTS - 8);
    CHECK(last.flops > 0 && last.grad_norm > 0 && last.step == 84);
    close_world(&w);
}

TEST(schedule_and_steps)
{
    setup s = small();
    rank_group w;
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
    rank_group w;
    if (!open_world(&w, &s)) return;
    tt_model model = tt_bert_model(&w.m);
    tt_train_options o = tt_train_options_default();
    size_t held = tt_allocated_bytes(w.ctx);
    CHECK(tt_trainer_new(w.ctx, &model, NULL) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "train options: total_steps must be set for a schedule that decays; "
                "max_seqs is 0, but must be at least 1: set it, for example from tt_loader_max_seqs");
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
        "lr is -1, but must be a finite number of at least 0",
        "min_lr is 2, but must be 0 to lr",
        "warmup_steps is 9, but must be at most total_steps, 5",
        "max_tokens is 4, but must be at least max_seqs, 5",
        "the model has no function `record`",
        "label_smoothing is 1, but must be in [0, 1)",
        "precision 'fp4' is unknown: use 32-true, bf16-mixed, bf16-true, 16-mixed or 16-true",
        "beta1 is 1, but must be in [0, 1)",
        "weight_decay -2 is negative",
        "clip_norm nan is negative"};
    for (int k = 0; k < TEST_COUNT(parts); k++) CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, parts[k]);
    o = train_options(&s, w.l);
    o.compile.precision = "16-mixed";
    o.compile.residual = "fp32";
    o.compile.loss_scale.interval = -1;
    model = tt_bert_model(&w.m);
    CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "train options: residual 'fp32' is unknown: use 16-bit or f32");
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "; loss_scale: interval is -1, but must be at least 1");
    o = train_options(&s, w.l);
    o.schedule.kind = (tt_schedule_kind)9;
    o.schedule.lr = INFINITY;
    o.schedule.warmup_steps = -1;
    o.compile.optimizer.kind = (tt_optimizer_kind)9;
    model = tt_bert_model(&w.m);
    CHECK(tt_trainer_new(w.ctx, &model, &o) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "lr is inf, but must be a finite number of at least 0; the "
                "schedule's kind is 9, but must be one of tt_schedule_kind; warmup_steps is -1, but must be "
                "at least 0; optimizer options: kind is 9, but must be");
    CHECK(tt_allocated_bytes(w.ctx) == held); /* nothing leaked */
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
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "train options: compile.share is set, but a trainer needs an arena");
    tt_trainer_free(other);
    close_world(&w);
}

TEST(micro_batches_equal_one_batch) /* a batch of 16 as 4 x 4, as 16 x 1, and cut by max_tokens */
{
    static const struct { int accumulate, max_tokens; } rows[] = {{1, 0}, {4, 0}, {16, 0}, {1, 60}, {3, 60}};
    rank_group w[TEST_COUNT(rows)];
    tt_stats stats[TEST_COUNT(rows)];
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        setup s = small();
        s.dropout = 0; /* dropout's masks depend on the micro-batch */
        s.batch = 16;
        s.accumulate = rows[k].accumulate;
        s.max_tokens = rows[k].max_tokens;
        /* With SGD, parameters move with the gradient; Adam would divide rounding errors by themselves. */
        s.optimizer.kind = TT_SGD;
        s.schedule.kind = TT_CONSTANT;
        s.schedule.lr = 0.1f;
        s.schedule.warmup_steps = 0;
        s.optimizer.clip_norm = 0.5f;
        if (!open_world(&w[k], &s)) return;
        CHECK(tt_loader_max_seqs(w[k].l) == (int)tt__ceil_div(16, rows[k].accumulate));
        /* Five steps cross the end of an epoch of four steps, whose last step has four texts. */
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
    rank_group w;
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
                        "a state can be saved between steps, but not between the micro-batches");
        }
    }
    CHECK(updates == 4 && seqs == TEXTS && micro > 12);
    close_world(&w);
}

/* A trainer planned for short texts reports longer texts before training begins, not in the middle. */
TEST(loaders_that_do_not_fit)
{
    setup s = small();
    rank_group w;
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
    tt_model model = tt_bert_model(&w.m);
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
    CHECK_ERROR(w.ctx, TT_ERR_SHAPE, "max_tokens = 40: make the trainer for the largest of its sources");
    CHECK(tt_fit(w.r, tt_loader_source(split), tt_loader_source(w.all), &o, &finished) == TT_ERR_ARGUMENT &&
          tt_trainer_steps(w.r) == 0);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "make the trainer with accumulate = true");
    CHECK(tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(brief), &o, &finished) == TT_OK && finished);
    tt_trainer_free(r);
    tt_loader_free(split);
    tt_loader_free(brief);
    close_world(&w);
}

/* A dataset gives the names of the classes. The sources of training and of validation give max_seqs,
   max_tokens and accumulate of a trainer's options. */
TEST(names_and_room_from_the_data)
{
    setup s = small();
    rank_group w;
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
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "the dataset has 1 classes, but the model has 2: load the model for "
                "the dataset's number of classes");
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
    rank_group w;
    tt_batch b;
    bool updated = true;
    if (!open_world(&w, &s)) return;
    REQUIRE(tt_loader_next(w.l, &b));
    b.last_of_step = false;
    CHECK(tt_train_batch(w.r, &b, NULL, &updated) == TT_ERR_ARGUMENT && !updated);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT,
                "last_of_step is not set in the batch: a step of several micro-batches needs a trainer made "
                "with accumulate = true");
    /* Steps of another size still run: nothing is left of the refused batch. */
    CHECK(train(&w, 2, NULL) == TT_OK);
    close_world(&w);
}

/* Predictions need no labels; training needs labels. A value that is not finite is an error that names the
   parameter. */
TEST(predictions_without_labels_and_of_nan)
{
    setup s = small();
    rank_group w;
    tt_batch b;
    float with[2 * BATCH], without[2 * BATCH];
    if (!open_world(&w, &s)) return;
    REQUIRE(tt_allocate(w.r->train) == TT_OK);
    size_t untouched = 0;
    /* Before the first step the optimizer state still has the bytes 0xA5 with which the test's allocator
       fills new memory. */
    for (int32_t v = 1, seen = 0; v < w.r->train->built.t->n_values && seen < 3; v++) {
        const tt__tape_value *x = &w.r->train->built.t->values[v];
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
        rank_group w, undisturbed;
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
        /* More sequences than max_seqs are found only after the tokens were copied. */
        b.seqs = b.rows = BATCH + 1;
        CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_SHAPE);
        CHECK_ERROR(w.ctx, TT_ERR_SHAPE, "for input 'seq_start'");
        CHECK(tt_predict(w.r, &b, p) == TT_ERR_SHAPE);
        b.seqs = INT_MAX; /* seq_start needs one row more than sequences */
        CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_SHAPE);
        CHECK_ERROR(w.ctx, TT_ERR_SHAPE, " 2147483648 rows for input 'seq_start'");
        b.seqs = 1;
        b.rows = BATCH * 24 + 1;
        CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_SHAPE);
        CHECK_ERROR(w.ctx, TT_ERR_SHAPE, "for input 'ids'");
        b = good;
        b.labels = zeros;
        zeros[0] = 2; /* there are only the classes 0 and 1 */
        CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_ARGUMENT);
        zeros[0] = 0;
        CHECK(tt_predict(w.r, &good, p) == TT_OK);
        CHECK(train(&w, 3, NULL) == TT_OK && train(&undisturbed, 3, NULL) == TT_OK);
        CHECK(same_worlds(&w, &undisturbed)); /* the refused batches changed nothing */
        close_world(&w);
        close_world(&undisturbed);
    }
}
