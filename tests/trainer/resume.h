/* Tests of states: runs that resume as without a stop, states of other runs, damaged states, NaN. */
#pragma once

/* ---------------------------------------------------------------------------------------- save and resume */

/* Trains `before + after` steps without a stop, and again with all objects closed and reopened after `before`
   steps. Parameters and files are equal bit for bit. */
static void resume(const setup *s, const setup *again, int before, int after)
{
    char half[1024], whole[1024], resumed[1024], *folder = test_folder();
    rank_group a, b, c;
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
    for (int k = 0; k < 25; k++) { /* trains from the middle of an epoch into the next */
        setup s = small();
        s.precision = precisions[k % 5];
        s.optimizer.kind = k / 5 == 0 ? TT_ADAMW : k / 5 == 1 ? TT_ADAM : TT_SGD;
        s.optimizer.momentum = k / 5 >= 3 ? 0.9f : 0;
        s.optimizer.nesterov = k / 5 == 4;
        resume(&s, &s, 4, 5);
    }
    for (int k = 0; k < 12; k++) {
        static const tt_optimizer_kind kinds[] = {TT_ADAMW, TT_LION, TT_SGD, TT_MUON};
        setup s = small();
        s.precision = precisions[k % 5];
        s.optimizer.kind = k < 10 ? kinds[k % 4] : TT_ADAFACTOR;
        s.optimizer.momentum = 0.9f;
        s.optimizer.state_bits = k < 4 ? 8 : k < 7 ? 16 : 32;
        s.optimizer.prune = k % 3 == 0 ? 0.6f : 0;
        s.optimizer.prune_end = 7;
        s.optimizer.prune_every = 2;
        s.optimizer.prune_by_movement = k % 6 == 0;
        resume(&s, &s, 4, 5);
    }
}

/* The loss scale begins so large that steps overflow, and grows after every second good step. The state holds
   the scale, the number of good steps and the number of skipped steps. A skipped step ends like other steps,
   but does not change the learning rate. */
TEST(resume_with_loss_scaling)
{
    for (int k = 0; k < 8; k++) {
        setup s = small();
        rank_group w;
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

TEST(resume_without_new_context) /* loads a state while the run is further on */
{
    setup s = small();
    rank_group a;
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
    rank_group w[3];
    tt_progress p;
    char path[1024];
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "state.safetensors"));
    for (int k = 0; k < 3; k++) {
        if (!open_world(&w[k], &s)) return;
        tt_trainer_free(w[k].r);
        CHECK(tt_param_freeze(w[k].ctx, k < 2 ? "*embeddings*" : "*layer.0.*", true) > 0);
        tt_model model = tt_bert_model(&w[k].m);
        tt_train_options o = train_options(&s, w[k].l);
        w[k].r = tt_trainer_new(w[k].ctx, &model, &o);
        REQUIRE(w[k].r != NULL);
    }
    CHECK(train(&w[0], 3, NULL) == TT_OK && tt_trainer_save(w[0].r, path, &w[0].progress) == TT_OK &&
          train(&w[0], 3, NULL) == TT_OK);
    CHECK(tt_trainer_load(w[1].r, path, &w[1].progress) == TT_OK && train(&w[1], 3, NULL) == TT_OK);
    CHECK(same_worlds(&w[0], &w[1]));
    CHECK(tt_trainer_load(w[2].r, path, &p) == TT_ERR_STATE); /* w[2] trains another set of parameters */
    CHECK_ERROR(w[2].ctx, TT_ERR_STATE, "has no tensor 'distilbert.embeddings.");

    /* the state has a hash of each frozen parameter */
    tt_safetensors *file = tt_safetensors_open(w[1].ctx, path);
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
        CHECK_ERROR(w[1].ctx, TT_ERR_ARGUMENT,
                    "the frozen parameter 'distilbert.embeddings.LayerNorm.bias' has other values");
        values[3] = nextafterf(values[3], -1);
        CHECK(tt_param_set(frozen, values) == TT_OK);
        char *after = snapshot(&w[1], &m);
        CHECK(same_snapshots(before, n, after, m)); /* the failed call loaded nothing of the state */
        free(values);
    }
    tt_safetensors_close(file);
    for (int k = 0; k < 3; k++) close_world(&w[k]);
}

/* ------------------------------------------------------------------------------------------------- faults */

/* Tries to load `path` and checks that the load is refused and changes neither trainer nor progress. */
static void refuse(rank_group *w, const char *path, tt_status status, const char *part)
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
                                       "f16",      "state bits"};
    static const char *const errors[] = {
        "was made with seed 8, but this run has 7: open the context with the same seed",
        "was made with another optimizer",
        "was made with another optimizer",
        "tensors, but this run has",
        "has no tensor 'momentum_buffer.",
        "was made with another precision than 'bf16-true'",
        "was made with another precision than '32-true'",
        "was made with another precision than 'bf16-mixed'",
        "resume with the same model and precision",
        "tensors, but this run has",
        "has no tensor 'distilbert.transformer.layer.2.",
        "'classifier.weight' is F32 of",
        "was made with another precision than '16-mixed'",
        "is U8 of 576 bytes, but this run has F32 of 2304, or another shape: resume with the same model"};
    for (int k = 0; k < TEST_COUNT(what); k++) {
        setup s = small(), other;
        rank_group w, v;
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
        if (k == 13) other.optimizer.state_bits = 8;
        if (!open_world(&w, &s) || !open_world(&v, &other)) return;
        if (k == 11) { /* a model of three classes */
            tt_bert_config c = v.m.config;
            test_allocator a;
            tt_context_options o = test_options(&a);
            o.seed = s.seed;
            tt_context *ctx = tt_open(&o);
            tt_bert three;
            c.classes = 3;
            CHECK(tt_bert_new(ctx, &three, &c) == TT_OK);
            tt_model model = tt_bert_model(&three);
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
        refuse(&w, path, k <= 2 || (k >= 5 && k <= 7) || k == 12 ? TT_ERR_ARGUMENT : TT_ERR_STATE,
               errors[k]);
        CHECK(train(&w, 1, NULL) == TT_OK); /* the refused state changed nothing */
        char *x = snapshot(&w, &n);
        rank_group u;
        if (!open_world(&u, &s)) return;
        CHECK(train(&u, 3, NULL) == TT_OK);
        char *y = snapshot(&u, &m);
        CHECK(same_snapshots(x, n, y, m));
        close_world(&u);
        close_world(&w);
        close_world(&v);
    }
}

/* Copies a state file without tensor `drop`, with an additional tensor `add`, with tensor `flatten` in one
   dimension, or with a changed element header_at (from 0; -1: none) of "tinytrain.run". */
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

/* A run that resumes with other values of some options, such as dropout, logs a warning, and then has other
   bits than a run without a stop. */
TEST(resume_warns_of_other_options)
{
    for (int k = 0; k < 9; k++) {
        setup s = small(), other;
        rank_group w, v;
        char path[1024];
        snprintf(path, sizeof path, "%s", test_path(test_folder(), "state.safetensors"));
        if (k >= 6) s.precision = "16-mixed";
        s.loss_scale.init = 1024;
        other = s;
        if (k == 6) other.residual = "16-bit";
        if (k == 7) other.loss_scale.interval = 7;
        if (k == 8) other.loss_scale.init = 8; /* the state's scale is used */
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

/* Means and deviations of pixels are options of a state, because they change the training. */
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
    /* allocated 0: a new trainer, before its first step, refuses the damaged states. */
    for (int allocated = 1; allocated >= 0; allocated--) {
        setup s = small();
        rank_group w;
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
        bytes[20] ^= 0x10; /* changes the header; the data has no checksum */
        test_write(bad, bytes, n);
        refuse(&w, bad, TT_ERR_STATE, "bad.safetensors'");
        free(bytes);
        remove(bad);
        refuse(&w, bad, TT_ERR_FILE, "cannot open '");

        copy_state(path, bad, NULL, "one.more", NULL, -1, 0);
        refuse(&w, bad, TT_ERR_STATE, "tensors, but this run has");
        copy_state(path, bad, "exp_avg_sq.pre_classifier.bias", NULL, NULL, -1, 0);
        refuse(&w, bad, TT_ERR_STATE, "has no tensor 'exp_avg_sq.pre_classifier.bias'");
        copy_state(path, bad, "exp_avg_sq.pre_classifier.bias", "another", NULL, -1, 0);
        refuse(&w, bad, TT_ERR_STATE, "has no tensor 'exp_avg_sq.pre_classifier.bias'");
        copy_state(path, bad, "classifier.bias", NULL, NULL, -1, 0);
        refuse(&w, bad, TT_ERR_STATE, "has no tensor 'classifier.bias'");
        copy_state(path, bad, "tinytrain.run", NULL, NULL, -1, 0);
        refuse(&w, bad, TT_ERR_STATE,
               "has no tensor 'tinytrain.run': it is the state of another model or optimizer");
        /* tinytrain.run has one element */
        copy_state(path, bad, "tinytrain.run", "tinytrain.run", NULL, -1, 0);
        refuse(&w, bad, TT_ERR_FORMAT, "is a state of version 0, but this build reads version 6");
        copy_state(path, bad, NULL, NULL, "exp_avg.classifier.weight", -1, 0);
        refuse(&w, bad, TT_ERR_STATE, "tensor 'exp_avg.classifier.weight' is F32 of");
        copy_state(path, bad, NULL, NULL, NULL, 0, 77); /* element 0: version */
        refuse(&w, bad, TT_ERR_FORMAT, "is a state of version 77, but this build reads version 6");
        copy_state(path, bad, NULL, NULL, NULL, 2, -5); /* element 2: number of steps */
        refuse(&w, bad, TT_ERR_FORMAT, "says that -5 steps were done");
        copy_state(path, bad, NULL, NULL, NULL, 2, INT64_MAX);
        refuse(&w, bad, TT_ERR_FORMAT, "says that 9223372036854775807 steps were done");
        for (int k = 0; k < 8; k++) { /* element 5: loss scale; 3: good steps; 4: skipped steps */
            const double scales[] = {3, 0.5, NAN, 0x1p41};
            int64_t values[] = {0, 0, 0, 0, -1, INT64_MAX, -2, INT64_MAX};
            memcpy(values, scales, sizeof scales);
            copy_state(path, bad, NULL, NULL, NULL, k < 4 ? 5 : k < 6 ? 3 : 4, values[k]);
            refuse(&w, bad, TT_ERR_FORMAT, "steps were skipped, and");
        }
        refuse(&w, TEST_GOLDEN("distilbert/model.safetensors"), TT_ERR_STATE,
               "has no tensor 'tinytrain.run'");
        refuse(&w, TEST_GOLDEN("distilbert/config.json"), TT_ERR_FORMAT, "config.json'");

        copy_state(path, bad, NULL, NULL, NULL, -1, 0); /* the unchanged copy can be loaded */
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
        {'o', "cannot open '"}, {'z', "cannot get the size of '"}, {'r', "cannot read "}};
    setup s = small();
    test_files f;
    rank_group w;
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
        /* Call number `at` of this kind fails, until `at` exceeds the number of calls. */
        for (long at = 1;; at++) {
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
            if (status == TT_OK) { /* restores the old file for the next kind */
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
            CHECK(now && l == n && memcmp(now, old, n) == 0); /* the old file is whole */
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

/* The token [MASK], which no text has, gets a row of NaN: only batches with this token are poisoned. */
static void poison(rank_group *w, tt_batch *b, int32_t *ids)
{
    memcpy(ids, b->ids, sizeof *ids * (size_t)b->rows);
    ids[1] = tt_tokenizer_find(w->k, "[MASK]");
    b->ids = ids;
}

static void poison_row(rank_group *w, bool nan)
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
        rank_group w, healthy;
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
        for (int bad = 0; bad < s.accumulate; bad++) { /* number of the bad micro-batch in the step */
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
                    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "an earlier micro-batch of this step failed: the "
                                "rest of the step is refused, and nothing is updated");
                }
            }
            CHECK(b.last_of_step && tt_trainer_steps(w.r) == 2);
            char *after = snapshot(&w, &m);
            if (s.accumulate == 1) CHECK(n == m && memcmp(before, after, n) == 0);
            free(before);
            free(after);
        }
        /* The failed step is repeated, and the run goes on. */
        CHECK(train(&w, 4, NULL) == TT_OK && train(&healthy, 4, NULL) == TT_OK);
        CHECK(tt_trainer_steps(w.r) == 6);
        /* Adam's steps keep the row NaN, and NaNs can differ in their bits. With the row replaced, the files
           are equal. */
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
    rank_group w;
    size_t n, m;
    s.dropout = 0;
    if (!open_world(&w, &s)) return;
    CHECK(train(&w, 1, NULL) == TT_OK);
    float *x = (float *)malloc(sizeof(float) * (size_t)tt_param_size(w.m.classifier_w));
    /* With these weights the loss is huge, and the squares of the gradients of earlier layers overflow. */
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
    rank_group a, b;
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
