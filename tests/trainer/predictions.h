/* Tests of metrics of predictions, and of the predictions that evaluations collect. */
#pragma once

/* Returns a number from 0 to 65535 that depends on both arguments alone, as in make_metrics.py. */
static int mixed(int64_t k, uint32_t salt)
{
    uint32_t x = (uint32_t)k * 2654435761u + salt * 40503u + 12345u;
    x = (x ^ (x >> 15)) * 2246822519u;
    return (int)(((x ^ (x >> 13)) >> 8) & 65535u);
}

enum { PREDICTED = 600 };
typedef struct predicted {
    tt_predictions p;
    int64_t seq_start[64];
    int32_t labels[PREDICTED], taken[PREDICTED];
    float values[PREDICTED], outputs[PREDICTED];
} predicted;

static void predict_begin(predicted *x, tt_context *ctx, tt_task task, int64_t rows, int classes)
{
    memset(x, 0, sizeof *x);
    x->p.ctx = ctx;
    x->p.task = task;
    x->p.classes = classes;
    x->p.rows = x->p.seqs = rows;
    x->p.seq_start = x->seq_start;
    x->p.labels = x->labels;
    x->p.predicted = x->taken;
    x->p.values = x->values;
    x->p.outputs = x->outputs;
}

static double metric_of(tt_metric m, const predicted *x) { return tt_metric_value(&m, NULL, &x->p); }

/* F1, of each class and as macro and micro mean, equals that of scikit-learn 1.9.1
   (tests/golden/make_metrics.py). */
TEST(f1_as_in_scikit_learn)
{
    static const struct { int rows, classes, absent; double macro, micro, f1[5]; } given[] = {
        {1, 2, 0, 1, 1, {1, NAN}},
        {57, 5, 0, 0.5763508463737297, 0.5789473684210527,
         {0.43478260869565216, 0.5454545454545454, 0.5263157894736842, 0.5925925925925926,
          0.782608695652174}},
        {57, 5, 1, 0.5463748894783378, 0.543859649122807,
         {0.4666666666666667, 0.6153846153846154, 0.41379310344827586, 0.6896551724137931, NAN}}};
    static const double labels[] = {0.8421052631578947, 0.9142857142857143, 0.4444444444444444, 0};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    predicted x;
    double f1[5];
    for (int n = 0; n < 2 * TEST_COUNT(given); n++) {
        const int k = n / 2, there = given[k].classes - given[k].absent;
        const bool tags = n % 2; /* if so, a row that does not count follows each row */
        predict_begin(&x, ctx, tags ? TT_TASK_TAGS : TT_TASK_CLASS, given[k].rows * (tags ? 2 : 1),
                      given[k].classes);
        for (int row = 0; row < given[k].rows; row++) {
            const int at = tags ? 2 * row : row, label = mixed(row, 1) % there;
            if (tags) x.labels[at + 1] = row % 2 ? -100 : given[k].classes;
            x.labels[at] = label;
            x.taken[at] = mixed(row, 2) % 2 ? label : mixed(row, 3) % there;
        }
        CHECK_NEAR(metric_of(tt_f1_macro(), &x), given[k].macro, 1e-12);
        CHECK_NEAR(metric_of(tt_f1_micro(), &x), given[k].micro, 1e-12);
        tt_f1_scores(&x.p, f1);
        for (int c = 0; c < given[k].classes; c++) {
            CHECK(isnan(f1[c]) == isnan(given[k].f1[c]));
            if (!isnan(f1[c])) CHECK_NEAR(f1[c], given[k].f1[c], 1e-12);
        }
        CHECK(isnan(metric_of(tt_pearson(), &x)) && isnan(metric_of(tt_f1_entities(), &x)));
    }
    predict_begin(&x, ctx, TT_TASK_LABELS, 41, 4);
    for (int k = 0; k < 41 * 4; k++) {
        const int c = k % 4;
        bool is = mixed(k, 4) % (2 + c) == 0 && c < 3;
        bool taken = mixed(k, 6) % 3 == 0 ? mixed(k, 5) % 2 == 0 : is;
        x.values[k] = is;
        x.outputs[k] = taken && c < 3 ? 0.1f : k % 3 ? -0.1f : 0;
    }
    CHECK_NEAR(metric_of(tt_f1_macro(), &x), 0.5502088554720133, 1e-12);
    CHECK_NEAR(metric_of(tt_f1_micro(), &x), 0.7912087912087912, 1e-12);
    tt_f1_scores(&x.p, f1);
    for (int c = 0; c < 4; c++) CHECK_NEAR(f1[c], labels[c], 1e-12);
    memset(x.values, 0, sizeof x.values);
    memset(x.outputs, 0, sizeof x.outputs);
    CHECK(metric_of(tt_f1_micro(), &x) == 0);
    x.p.task = TT_TASK_SCORES;
    CHECK(isnan(metric_of(tt_f1_micro(), &x)) && isnan(metric_of(tt_f1_macro(), &x)));
    TEST_CLOSE(ctx, &a);
}

/* Pearson's and Spearman's correlations equal those of scipy 1.17.1. */
TEST(correlations_as_in_scipy)
{
    static const double given[2][2] = {{0.07730344078773813, 0.05840050576892682},
                                       {0.04419985347243688, 0.037159164623400125}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    predicted x;
    for (int ties = 0; ties < 2; ties++) {
        const int of = ties ? 6 : 65536;
        predict_begin(&x, ctx, TT_TASK_SCORES, 37, 3);
        for (int k = 0; k < 37 * 3; k++) {
            x.values[k] = (float)(mixed(k, 7) % of) / 8;
            x.outputs[k] = x.values[k] / 4 + (float)(mixed(k, 8) % of) / 8 - 1000;
        }
        CHECK_NEAR(metric_of(tt_pearson(), &x), given[ties][0], 1e-12);
        CHECK_NEAR(metric_of(tt_spearman(), &x), given[ties][1], 1e-12);
    }
    memcpy(x.outputs, x.values, sizeof x.values);
    CHECK_NEAR(metric_of(tt_pearson(), &x), 1, 1e-12);
    for (int k = 0; k < 37 * 3; k++) x.outputs[k] = -expf(8 * x.values[k]);
    CHECK_NEAR(metric_of(tt_spearman(), &x), -1, 1e-12);
    CHECK(metric_of(tt_pearson(), &x) > -0.99);
    x.outputs[5] = INFINITY;
    CHECK(isnan(metric_of(tt_pearson(), &x)) && isnan(metric_of(tt_spearman(), &x)));
    for (int k = 0; k < 37; k++) x.outputs[3 * k + 2] = 7; /* one score is constant */
    CHECK(isnan(metric_of(tt_pearson(), &x)) && isnan(metric_of(tt_spearman(), &x)));
    x.p.rows = 0;
    CHECK(isnan(metric_of(tt_pearson(), &x)));
    TEST_CLOSE(ctx, &a);
}

/* The correlations of pairs' scores with the cosines of embeddings equal those of scipy 1.17.1, whose inputs
   are cosines of sentence-transformers 6.2.0 (pairwise_cos_sim, as in EmbeddingSimilarityEvaluator). The
   source has three micro-batches, each with texts, pairs and negatives. */
TEST(correlations_of_pairs)
{
    enum { PAIRS = 41, WIDTH = 5 };
    static const int ends[] = {20, 40, PAIRS};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    predicted x;
    float embeddings[3 * PAIRS * WIDTH];
    int row = 0;
    predict_begin(&x, ctx, TT_TASK_EMBED, 3 * PAIRS, WIDTH);
    x.p.outputs = embeddings;
    for (int micro = 0, first = 0; micro < 3; first = ends[micro++])
        for (int role = 0; role < 3; role++)
            for (int k = first; k < ends[micro]; k++, row++) {
                x.labels[row] = role;
                x.values[row] = (float)(mixed(k, 15) % 11) / 2;
                for (int c = 0; c < WIDTH; c++)
                    embeddings[row * WIDTH + c] =
                        (float)(mixed(k * WIDTH + c, 13u + (unsigned)role) / 65536.0 - 0.3);
            }
    CHECK_NEAR(metric_of(tt_pearson(), &x), -0.24835167926773052, 1e-9);
    CHECK_NEAR(metric_of(tt_spearman(), &x), -0.23510389274468244, 1e-12);
    CHECK(isnan(metric_of(tt_recall_at_1(), &x)) && isnan(metric_of(tt_recall_at_10(), &x)));
    x.labels[20] = x.labels[60 + 20] = 0; /* two texts without a pair */
    CHECK(isnan(metric_of(tt_spearman(), &x)));
    for (int k = 0; k < x.p.rows; k++) x.values[k] = NAN; /* pairs without scores */
    CHECK(isnan(metric_of(tt_pearson(), &x)) && isnan(metric_of(tt_spearman(), &x)));
    CHECK(!isnan(metric_of(tt_recall_at_1(), &x)));
    TEST_CLOSE(ctx, &a);
}

/* F1 of entities equals that of seqeval 1.2.2. */
TEST(entities_as_in_seqeval)
{
    static const char *const names[] = {"O", "B-a", "I-a", "B-b", "I-b", "E-a", "S-b"};
    static const char *const others[] = {"NOUN", "VERB", "B", "I", "-", "", "X-b"};
    static const double given[2] = {0.4, 0.7537993920972644};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    predicted x;
    for (int many = 0; many < 2; many++) {
        int row = 0, k = 0;
        predict_begin(&x, ctx, TT_TASK_TAGS, 0, 7);
        x.p.seqs = many ? 40 : 1;
        for (int s = 0; s < x.p.seqs; s++) {
            x.seq_start[s] = row;
            for (int i = 0, n = mixed(s, 9) % 12 + (many ? 0 : 5); i < n; i++, k++) {
                x.labels[row] = mixed(k, 10) % 7;
                x.taken[row] = mixed(k, 11) % 4 ? x.labels[row] : mixed(k, 12) % 7;
                row++;
                if (k % 3 == 0) x.taken[row] = k % 7, x.labels[row++] = -100; /* a word's second token */
            }
        }
        x.seq_start[x.p.seqs] = x.p.rows = row;
        REQUIRE(row <= PREDICTED);
        CHECK(isnan(metric_of(tt_f1_entities(), &x)));
        x.p.class_names = names;
        CHECK_NEAR(metric_of(tt_f1_entities(), &x), given[many], 1e-12);
        x.p.class_names = others;
        CHECK(isnan(metric_of(tt_f1_entities(), &x)));
    }
    TEST_CLOSE(ctx, &a);
}

/* ---------------------------------------------------------------------------------- collected predictions */

/* Opens a tiny model of a task, and a loader of 13 texts in their order. */
static bool open_task(rank_group *w, tt_task task, const char *device)
{
    enum { N = 13, CLASSES = 3 };
    static const char *const names[] = {"O", "B-a", "I-a"};
    tt_text text[N];
    float values[N][CLASSES];
    tt_word words[N][2];
    memset(w, 0, sizeof *w);
    memset(text, 0, sizeof text);
    w->ctx = test_open(&w->a);
    w->k = tt_tokenizer_open(w->ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    for (int k = 0; k < N; k++) {
        text[k].text = k % 3 ? "unhappy film" : "good or plot";
        text[k].bytes = strlen(text[k].text);
        text[k].label = k % CLASSES;
        text[k].values = values[k];
        for (int c = 0; c < CLASSES; c++)
            values[k][c] = task == TT_TASK_LABELS ? (float)((k >> c) & 1) : (float)k / 8 - (float)c;
        for (int i = 0; i < 2; i++) {
            const tt_word word = {(size_t)(i ? 8 : 0), (size_t)(i ? 12 : 4), i ? k % 4 - 1 : k % CLASSES};
            words[k][i] = word;
        }
        text[k].words = words[k];
        text[k].n_words = 2;
    }
    w->d = tt_dataset_texts(w->ctx, task, text, N, names, CLASSES);
    if (!w->d) fprintf(stderr, "%s\n", tt_error(w->ctx));
    tt_loader_options lo = tt_loader_options_default();
    lo.batch = 4;
    lo.max_length = 12;
    w->l = w->d ? tt_loader_new(w->ctx, w->d, w->k, &lo) : NULL;
    lo.shuffle = false;
    lo.batch = 2;
    w->all = w->d ? tt_loader_new(w->ctx, w->d, w->k, &lo) : NULL;
    tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
    c.task = task;
    c.classes = CLASSES;
    c.vocab_size = tt_tokenizer_size(w->k);
    c.hidden_size = c.intermediate_size = 12;
    c.layers = 1;
    c.heads = 3;
    c.max_positions = 12;
    c.initializer_range = 0.3f;
    if (!CHECK(w->l && w->all && tt_bert_new(w->ctx, &w->m, &c) == TT_OK)) return false;
    CHECK(tt_bert_name_classes(&w->m, w->d) == TT_OK);
    const tt_model model = tt_bert_model(&w->m);
    tt_train_options o = tt_train_options_default();
    o.schedule.lr = 2e-2f;
    o.schedule.total_steps = 20;
    o.compile.device = device;
    tt_train_options_make_room(&o, tt_loader_source(w->l), tt_loader_source(w->all));
    o.compile.accumulate = true;
    w->r = tt_trainer_new(w->ctx, &model, &o);
    if (!CHECK(w->r != NULL)) fprintf(stderr, "%s\n", tt_error(w->ctx));
    return w->r != NULL;
}

/* The collected rows are those of the batches, with the outputs of tt_forward, on any number of ranks. */
TEST(predictions_in_the_order_of_the_source)
{
    static const tt_task tasks[] = {TT_TASK_CLASS, TT_TASK_LABELS, TT_TASK_SCORES, TT_TASK_TAGS};
    static const char *const devices[] = {"cpu", "cpu*2", "cpu*3"};
    for (int n = 0; n < TEST_COUNT(tasks) * TEST_COUNT(devices); n++) {
        const tt_task task = tasks[n / TEST_COUNT(devices)];
        const bool tags = task == TT_TASK_TAGS, numbers = task == TT_TASK_LABELS || task == TT_TASK_SCORES;
        rank_group w;
        tt_batch b;
        tt_stats stats, alone;
        float logits[12 * 12 * 3];
        int64_t row = 0, seq = 0;
        bool same = true;
        if (!open_task(&w, task, devices[n % TEST_COUNT(devices)])) return;
        tt_predictions *p = tt_predictions_new(w.r, tt_loader_source(w.all), &stats);
        if (!CHECK(p != NULL)) fprintf(stderr, "%s\n", tt_error(w.ctx));
        REQUIRE(p);
        CHECK(p->task == task && p->classes == 3 && p->seqs == 13 && strcmp(p->class_names[2], "I-a") == 0);
        CHECK(tt_loader_seek(w.all, 0, 0) == TT_OK);
        while (tt_loader_next(w.all, &b)) {
            CHECK(tt_forward(w.r, &b, logits, TEST_COUNT(logits)) == TT_OK);
            for (int s = 0; s < b.seqs; s++)
                same = same && p->seq_start[seq++] == row + (tags ? b.seq_start[s] : s);
            for (int k = 0; k < (tags ? b.rows : b.seqs); k++, row++) {
                const float *x = logits + 3 * k;
                if (numbers) {
                    same = same && memcmp(p->outputs + 3 * row, x, 3 * sizeof *x) == 0 &&
                           memcmp(p->values + 3 * row, b.label_values + 3 * k, 3 * sizeof *x) == 0;
                    continue;
                }
                const int best = x[1] > x[0] ? (x[2] > x[1] ? 2 : 1) : x[2] > x[0] ? 2 : 0;
                same = same && p->predicted[row] == best &&
                       p->labels[row] == (tags ? b.tags[k] : b.labels[k]);
            }
        }
        CHECK(same && row == p->rows && seq == p->seqs && p->seq_start[seq] == row);
        CHECK(tt_evaluate(w.r, tt_loader_source(w.all), &alone) == TT_OK);
        CHECK(memcmp(&alone, &stats, sizeof stats) == 0);
        tt_predictions_free(p);
        close_world(&w);
    }
}

/* tt_fit writes a column for each metric, and chooses the best epoch by any of them. */
TEST(fit_by_metrics_of_predictions)
{
    static const struct { tt_task task; const char *best_by, *columns; int shown; } rows[] = {
        {TT_TASK_CLASS, "f1_macro", ",accuracy,f1_macro,lr,", 1},
        {TT_TASK_LABELS, NULL, ",f1_micro,f1_macro,accuracy,lr,", 0},
        {TT_TASK_SCORES, "spearman", ",pearson,spearman,lr,", 1},
        {TT_TASK_TAGS, NULL, ",f1_entities,accuracy,lr,", 0}};
    for (int n = 0; n < 2 * TEST_COUNT(rows); n++) {
        const int k = n / 2;
        rank_group w;
        own x; /* only for the fields that own_report writes */
        char *folder = test_folder(), path[1200];
        size_t size;
        bool finished;
        int epoch = 0;
        tt_fit_options o = tt_fit_options_default();
        memset(&x, 0, sizeof x);
        if (!open_task(&w, rows[k].task, n % 2 ? "cpu*2" : "cpu")) return;
        o.epochs = OWN_EPOCHS;
        o.folder = test_path(folder, "run");
        o.best_by = rows[k].best_by;
        o.report = own_report;
        o.user = &x;
        const tt_status status = tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(w.all), &o, &finished);
        if (!CHECK(status == TT_OK && finished)) fprintf(stderr, "%s\n", tt_error(w.ctx));
        snprintf(path, sizeof path, "%s/metrics.csv", test_path(folder, "run"));
        char *text = test_read(path, &size);
        REQUIRE(text && strstr(text, rows[k].columns));
        tt_stats stats;
        tt_predictions *p = tt_predictions_new(w.r, tt_loader_source(w.all), &stats);
        for (const char *line = strchr(text, '\n') + 1; *line; line = strchr(line, '\n') + 1) {
            const bool validation = strcmp(field_of(line, 2), "validation") == 0;
            for (int m = 0; m < TT_METRICS && w.r->model.metrics[m].name; m++) {
                const tt_metric *metric = &w.r->model.metrics[m];
                CHECK(!*field_of(line, 4 + m) == (!validation && !metric->of));
                if (!validation) continue;
                const double value = atof(field_of(line, 4 + m));
                if (m == rows[k].shown) CHECK((float)x.metrics[epoch] == (float)value || isnan(value));
                if (epoch == OWN_EPOCHS - 1) /* the parameters are still those of the last validation */
                    CHECK((float)tt_metric_value(metric, &stats, p) == (float)value);
            }
            epoch += validation;
        }
        CHECK(epoch == OWN_EPOCHS);
        tt_predictions_free(p);
        free(text);
        snprintf(path, sizeof path, "%s/loss.svg", test_path(folder, "run"));
        char *svg = test_read(path, &size);
        CHECK(svg && strstr(svg, "height='612'"));
        free(svg);
        close_world(&w);
    }
}
