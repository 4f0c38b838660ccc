/* Tests of evaluation, class weights, smoothing, probabilities, planned memory, largest micro-batch. */
#pragma once

TEST(same_bits_for_any_number_of_threads)
{
    rank_group w[3];
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
        rank_group a, b;
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
        if (k >= 5) { /* evaluates within a step, too */
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
    rank_group a, b;
    tt_stats x = {0}, y = {0};
    other.max_tokens = 30;
    if (!open_world(&a, &s) || !open_world(&b, &other)) return;
    CHECK(tt_evaluate(a.r, tt_loader_source(a.all), &x) == TT_OK &&
          tt_evaluate(b.r, tt_loader_source(b.all), &y) == TT_OK);
    CHECK_NEAR(x.loss, y.loss, 1e-6);
    CHECK(x.correct == y.correct && x.targets == y.targets);
    CHECK(tt_evaluate(a.r, tt_loader_source(a.l), &y) == TT_OK); /* a shuffled loader gives all texts, too */
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
    tt_value x = tt_input(t, "x", TT_F32, rows, 3), labels = tt_input(t, "labels", TT_I32, rows, 1);
    *output = tt_linear(t, x, (tt_param *)(uintptr_t)self, NULL);
    return tt__classify(t, *output, labels, o);
}

/* The loss and gradient of a whole step equal PyTorch's: CrossEntropyLoss(weight, label_smoothing) over all
   rows, and two steps of SGD(lr=0.5). An evaluation computes the loss without weights and smoothing. */
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
        const tt_model model = {p, linear_record, {tt_accuracy()}, LINEAR_CLASSES, NULL, 0, false,
                                TT_TASK_CLASS};
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
            /* Weights of the targets: five of 0.5, two of 1.5, one of 2.25. */
            CHECK_NEAR(s.targets, of[c].weighted ? 7.75 : 8, 1e-6);
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

/* A classifier of texts takes class weights, which the trainer copies and checks. */
TEST(class_weights_of_texts)
{
    setup s = small();
    rank_group w;
    s.dropout = 0;
    if (!open_world(&w, &s)) return;
    float weights[2] = {0.25f, 3}, p[2 * BATCH];
    const tt_model model = tt_bert_model(&w.m);
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
        rank_group w;
        tt_stats stats;
        tt_batch b;
        double hits = 0, loss = 0;
        s.precision = precisions[k % 5];
        if (!open_world(&w, &s)) return;
        CHECK(train(&w, 12, NULL) == TT_OK);
        /* Makes a trainer that only predicts, with the parameters of w.r. */
        if (k >= 5) {
            tt_train_options o = train_options(&s, w.l);
            tt_model model = tt_bert_model(&w.m);
            o.compile.train = false;
            tt_trainer *only = tt_trainer_new(w.ctx, &model, &o);
            REQUIRE(only != NULL);
            tt_trainer_free(w.r);
            w.r = only;
            CHECK(tt_trainer_steps(w.r) == 0);
            CHECK(tt_loader_seek(w.all, 0, 0) == TT_OK && tt_loader_next(w.all, &b));
            CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_ARGUMENT);
            CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT,
                        "this trainer was made with train = false, so it only evaluates and predicts");
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
    for (int k = 0; k < 15; k++) {
        setup s = small();
        rank_group w;
        static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};
        s.precision = precisions[k % 5];
        s.accumulate = k < 5 ? 1 : 2;
        s.optimizer.state_bits = k < 10 || k == 14 ? 32 : k % 2 ? 8 : 16;
        if (k > 11) s.optimizer.kind = k == 14 ? TT_ADAFACTOR : TT_MUON;
        s.optimizer.momentum = 0.95f;
        if (!open_world(&w, &s)) return;
        tt_plan plan = tt_program_plan(tt_trainer_program(w.r));
        size_t before = tt_allocated_bytes(w.ctx);
        CHECK(tt_allocate(w.r->train) == TT_OK);
        CHECK(tt_allocated_bytes(w.ctx) - before == plan.bytes + plan.host_bytes);
        CHECK(tt_allocate(w.r->eval) == TT_OK);
        CHECK(plan.persistent_bytes <= plan.lower_bound_bytes && plan.lower_bound_bytes <= plan.bytes);

        tt_batch b; /* a step and an evaluation allocate nothing, not even briefly */
        REQUIRE(tt_loader_seek(w.all, 0, 0) == TT_OK && tt_loader_next(w.all, &b));
        b.last_of_step = true;
        long calls = w.a.calls;
        float p[2 * BATCH];
        for (int i = 0; i < 3; i++)
            CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_OK && tt_predict(w.r, &b, p) == TT_OK);
        CHECK(w.a.calls == calls);
        size_t arena = plan.bytes;
        close_world(&w);

        s.memory_budget = arena; /* exactly the bytes that the arena needs */
        if (!open_world(&w, &s)) return;
        tt_trainer_free(w.r);
        w.r = NULL;
        tt_model model = tt_bert_model(&w.m);
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
    enum { MAX = 24 };
    static const char *const devices[] = {"cpu", "cuda*2"};
    setup s = small();
    rank_group w;
    if (!open_world(&w, &s)) return;
    tt_trainer_free(w.r);
    w.r = NULL;
    const tt_model model = tt_bert_model(&w.m);
    for (int k = 0; k < TEST_COUNT(devices); k++) {
        tt_train_options o = train_options(&s, w.l);
        size_t bytes[MAX + 1];
        o.compile.device = devices[k];
        for (int n = 1; n <= MAX; n++) {
            tt_train_options sized = o;
            sized.max_seqs = n;
            sized.max_tokens = 20 * n;
            tt_trainer *r = tt_trainer_new(w.ctx, &model, &sized);
            if (!CHECK(r != NULL)) return;
            bytes[n] = tt_program_plan(tt_trainer_program(r)).bytes;
            tt_trainer_free(r);
            /* With one byte less, a program of GPUs does without memory for the inputs of the next run. */
            sized.compile.memory_budget = bytes[n] - 1;
            r = tt_trainer_new(w.ctx, &model, &sized);
            if (!CHECK((r != NULL) == (k == 1))) return;
            if (r) bytes[n] = tt_program_plan(tt_trainer_program(r)).bytes;
            tt_trainer_free(r);
        }
        o.max_seqs = 3;
        o.max_tokens = 60;
        for (int n = 1; n < MAX; n += 3) {
            o.compile.memory_budget = bytes[n];
            int largest = n;
            while (largest < MAX && bytes[largest + 1] <= bytes[n]) largest++;
            CHECK(tt_largest_micro_batch(w.ctx, &model, &o, MAX) == largest);
            o.compile.memory_budget = bytes[n + 1] - 1;
            CHECK(tt_largest_micro_batch(w.ctx, &model, &o, n) == n);
        }
        o.compile.memory_budget = bytes[1] - 1;
        CHECK(tt_largest_micro_batch(w.ctx, &model, &o, MAX) == 0);
        CHECK_ERROR(w.ctx, TT_ERR_BUDGET, "the plan needs");
        o.compile.memory_budget = 0;
        CHECK(tt_largest_micro_batch(w.ctx, &model, &o, MAX) == 0);
        CHECK(k == 1 || strstr(tt_error(w.ctx), "depends on memory_budget, which is not set"));
        o.compile.memory_budget = bytes[1];
        o.compile.precision = "7-true";
        CHECK(tt_largest_micro_batch(w.ctx, &model, &o, MAX) == 0);
        CHECK(strstr(tt_error(w.ctx), "'7-true'"));
    }
    CHECK(tt_largest_micro_batch(w.ctx, &model, NULL, 0) == 0);
    close_world(&w);
}

TEST(planned_for_another_device)
{
    setup s = small();
    rank_group w;
    tt_batch b;
    tt_stats stats;
    float p[2 * BATCH];
    if (!open_world(&w, &s)) return;
    REQUIRE(tt_loader_seek(w.all, 0, 0) == TT_OK && tt_loader_next(w.all, &b));
    tt_model model = tt_bert_model(&w.m);
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
    CHECK(tt_train_batch(w.r, &b, &stats, NULL) == TT_OK); /* `planned` does not disturb w.r */
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

TEST(allocation_failures) /* allocations of the trainer, its steps and its state's files fail */
{
    char path[1024];
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "state.safetensors"));
    long calls = 0;
    for (long n = 0; n <= calls; n++) {
        setup s = small();
        rank_group w;
        tt_progress progress;
        s.layers = 1;
        s.accumulating = true;
        if (!open_world(&w, &s)) return;
        tt_trainer_free(w.r);
        tt_model model = tt_bert_model(&w.m);
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
                           tt_trainer_save(w.r, path, &w.progress) == TT_OK); /* allocations succeed again */
        }
        close_world(&w);
    }
}
