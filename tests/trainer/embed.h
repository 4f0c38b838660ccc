/* Training of embeddings by the contrastive loss, with the negatives of a micro-batch or of a step. */
#pragma once

enum { EMBED_PAIRS = 23, EMBED_WIDTH = 24, EMBED_STEPS = 3 };

/* A small encoder and pairs or triplets of texts to train it on. */
typedef struct embed {
    test_allocator a;
    tt_context *ctx;
    tt_tokenizer *k;
    tt_dataset *d;
    tt_loader *l;
    tt_bert m;
    tt_trainer *r;
    float *gradient;      /* of the first layer's query weights in the last step */
} embed;

typedef struct embed_setup {
    bool triplets, cached;   /* cached: sets step_seqs */
    int batch, accumulate, data;
    float dropout;
    const char *precision;
    bool shuffle;
} embed_setup;

/* Records a failed check and prints the message, unless `ok`. Returns ok. */
TT_PRINTF(2, 3)
static bool embed_check(bool ok, const char *format, ...)
{
    va_list args;
    if (CHECK(ok)) return true;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
    return false;
}

static tt_dataset *embed_texts(tt_context *ctx, bool triplets)
{
    static const char *const words[] = {"good", "great", "love",  "happy", "best",  "cafe",  "bad",
                                        "worst", "never", "noir",  "film",  "movie", "plot",  "story",
                                        "acting", "watched", "play"};
    static char text[EMBED_PAIRS][3][120];
    tt_text pairs[EMBED_PAIRS];
    uint64_t random = 99;
    memset(pairs, 0, sizeof pairs);
    for (int k = 0; k < EMBED_PAIRS; k++) {
        for (int part = 0; part < 3; part++) {
            const int n = 1 + (int)(test_random(&random) % 9);
            text[k][part][0] = 0;
            for (int w = 0; w < n; w++) {
                const char *word = words[w ? test_random(&random) % 17 : (unsigned)(k + part / 2 * 5) % 17];
                snprintf(text[k][part] + strlen(text[k][part]), 20, "%s ", word);
            }
        }
        pairs[k].text = text[k][0];
        pairs[k].bytes = strlen(text[k][0]);
        pairs[k].pair = text[k][1];
        pairs[k].pair_bytes = strlen(text[k][1]);
        pairs[k].negative = triplets ? text[k][2] : NULL;
        pairs[k].negative_bytes = strlen(text[k][2]);
    }
    return tt_dataset_texts(ctx, TT_TASK_EMBED, pairs, EMBED_PAIRS, NULL, 0);
}

static tt_status embed_gradient(void *user, tt_program *p, int64_t step)
{
    embed *w = (embed *)user;
    (void)step;
    return tt_get_gradient(p, w->m.layer[0].q_w, w->gradient);
}

static bool embed_open(embed *w, const embed_setup *s)
{
    memset(w, 0, sizeof *w);
    tt_context_options o = test_options(&w->a);
    o.threads = s->data;
    o.seed = 5;
    w->ctx = tt_open(&o);
    w->k = tt_tokenizer_open(w->ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    w->d = embed_texts(w->ctx, s->triplets);
    if (!CHECK(w->k && w->d)) return false;
    tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
    c.task = TT_TASK_EMBED;
    c.classes = 0;
    c.vocab_size = tt_tokenizer_size(w->k);
    c.layers = 2;
    c.hidden_size = EMBED_WIDTH;
    c.heads = 3;
    c.intermediate_size = 40;
    c.max_positions = 16;
    c.initializer_range = 0.3f; /* so that the embeddings differ */
    c.dropout = c.attention_dropout = s->dropout;
    tt_loader_options lo = tt_loader_options_default();
    lo.batch = s->batch;
    lo.accumulate = s->accumulate;
    lo.max_length = 16;
    lo.shuffle = s->shuffle;
    lo.parallel = tt_parallel_default();
    lo.parallel.data = lo.parallel.groups = s->data;
    w->l = tt_loader_new(w->ctx, w->d, w->k, &lo);
    if (!CHECK(w->l && tt_bert_new(w->ctx, &w->m, &c) == TT_OK)) return false;
    w->gradient = (float *)calloc(EMBED_WIDTH * EMBED_WIDTH, sizeof *w->gradient);
    const tt_model model = tt_bert_model(&w->m);
    tt_train_options t = tt_train_options_default();
    tt_train_options_make_room(&t, tt_loader_source(w->l), NULL);
    t.compile.precision = s->precision;
    t.compile.device = s->data > 1 ? "cpu*2" : "cpu";
    t.compile.parallel.data = t.compile.parallel.groups = s->data;
    t.compile.before_update = embed_gradient;
    t.compile.user = w;
    t.compile.optimizer.kind = TT_SGD;
    t.compile.optimizer.clip_norm = 0;
    t.schedule.kind = TT_CONSTANT;
    t.schedule.lr = strcmp(s->precision, "32-true") == 0 ? 0.02f : 0; /* 0: rounding does not add up */
    if (s->cached) t.step_seqs = (s->triplets ? 3 : 2) * s->batch;
    w->r = tt_trainer_new(w->ctx, &model, &t);
    return embed_check(w->r != NULL, "%s", tt_error(w->ctx));
}

static void embed_close(embed *w)
{
    free(w->gradient);
    tt_trainer_free(w->r);
    tt_loader_free(w->l);
    tt_bert_free(&w->m);
    tt_dataset_free(w->d);
    tt_tokenizer_free(w->k);
    TEST_CLOSE(w->ctx, &w->a);
}

/* Trains a step. Writes the statistics of its last micro-batch to *stats. */
static bool embed_step(embed *w, tt_stats *stats)
{
    tt_batch b;
    bool updated = false;
    while (!updated) {
        const bool more = tt_loader_next(w->l, &b) ||
                          (tt_loader_seek(w->l, 1, 0) == TT_OK && tt_loader_next(w->l, &b));
        const bool ok = more && tt_train_batch(w->r, &b, stats, &updated) == TT_OK;
        if (!embed_check(ok, "%s", tt_error(w->ctx))) return false;
    }
    return true;
}

static double embed_cosine(const float *x, const float *y)
{
    double xx = 0, yy = 0, xy = 0;
    for (int k = 0; k < EMBED_WIDTH; k++) {
        xx += (double)x[k] * x[k];
        yy += (double)y[k] * y[k];
        xy += (double)x[k] * y[k];
    }
    return xy / sqrt(xx * yy);
}

/* The loss and the accuracy of a micro-batch, and recall of the whole dataset, equal those of loops in
   float64 over the embeddings. */
TEST(contrastive_loss_by_loops)
{
    for (int parts = 2; parts < 4; parts++) {
        embed_setup s = {parts == 3, false, 6, 1, 1, 0, "32-true", false};
        embed w;
        tt_batch b;
        tt_stats stats;
        if (!embed_open(&w, &s) || !CHECK(tt_loader_next(w.l, &b))) return;
        CHECK(b.seqs == 6 * parts && b.n_arrays == 3 && b.last_of_step && tt_loader_max_seqs(w.l) == b.seqs);
        for (int k = 0; k < b.seqs; k++) CHECK(b.labels[k] == k / 6 && b.index[k] == k % 6);
        float *x = (float *)calloc((size_t)b.seqs * EMBED_WIDTH, sizeof *x);
        CHECK(tt_predict(w.r, &b, x) == TT_OK);
        double loss = 0, right = 0;
        for (int k = 0; k < 6; k++) {
            double sum = 0, largest = -2;
            const double own = embed_cosine(x + k * EMBED_WIDTH, x + (6 + k) * EMBED_WIDTH);
            for (int c = 6; c < b.seqs; c++) {
                const double other = embed_cosine(x + k * EMBED_WIDTH, x + c * EMBED_WIDTH);
                sum += exp(other / 0.05);
                largest = other > largest ? other : largest;
            }
            loss += (log(sum) - own / 0.05) / 6;
            right += own == largest;
        }
        memset(&stats, 0, sizeof stats);
        CHECK(tt_evaluate_batch(w.r, &b, &stats) == TT_OK);
        embed_check(fabs(stats.loss - loss) <= 1e-5 * loss, "the loss is %g, expected %g", stats.loss, loss);
        CHECK(stats.targets == 6 && stats.correct == right);
        bool updated;
        CHECK(tt_train_batch(w.r, &b, &stats, &updated) == TT_OK && updated);
        embed_check(fabs(stats.loss - loss) <= 1e-5 * loss, "the loss of training is %g, expected %g",
                    stats.loss, loss);
        free(x);

        tt_predictions *p = tt_predictions_new(w.r, tt_loader_source(w.l), NULL);
        if (!CHECK(p && p->rows == EMBED_PAIRS * parts && p->classes == EMBED_WIDTH)) return;
        int hits[2] = {0, 0};
        for (int64_t i = 0; i < p->rows; i++) {
            int64_t own = -1, anchors = 0, pairs = 0;
            double nearer = 0; /* an equal candidate counts half */
            if (p->labels[i]) continue;
            for (int64_t c = 0; c < i; c++) anchors += p->labels[c] == 0;
            for (int64_t c = 0; c < p->rows && own < 0; c++)
                if (p->labels[c] == 1 && pairs++ == anchors) own = c;
            for (int64_t c = 0; c < p->rows; c++) {
                const float *of_text = p->outputs + i * EMBED_WIDTH, *other = p->outputs + c * EMBED_WIDTH;
                const double more = embed_cosine(of_text, other) -
                                    embed_cosine(of_text, p->outputs + own * EMBED_WIDTH);
                if (p->labels[c] && c != own) nearer += more > 1e-6 ? 1 : more < -1e-6 ? 0 : 0.5;
            }
            hits[0] += nearer < 1;
            hits[1] += nearer < 10;
        }
        const tt_metric of[2] = {tt_recall_at_1(), tt_recall_at_10()};
        for (int k = 0; k < 2; k++) {
            const double value = tt_metric_value(&of[k], NULL, p), expected = (double)hits[k] / EMBED_PAIRS;
            embed_check(fabs(value - expected) <= 1e-12, "%s is %g, expected %g", of[k].name, value,
                        expected);
        }
        tt_predictions_free(p);
        embed_close(&w);
    }
}

/* With step_seqs, micro-batches have the gradients of one micro-batch of the whole step; so do micro-batches
   of two data ranks. With dropout, a step of one micro-batch has the gradients of a step without step_seqs,
   as both have the same dropout. */
TEST(step_negatives_have_the_gradients_of_one_micro_batch)
{
    static const embed_setup whole[] = {
        {false, false, 12, 1, 1, 0, "32-true", true}, {true, false, 12, 1, 1, 0, "32-true", true},
        {false, false, 12, 1, 1, 0, "32-true", true}, {true, false, 7, 1, 1, 0.2f, "32-true", true},
        {false, false, 12, 1, 1, 0, "bf16-mixed", true}};
    static const embed_setup parts[] = {
        {false, true, 12, 4, 1, 0, "32-true", true},  {true, true, 12, 5, 1, 0, "32-true", true},
        {false, true, 12, 2, 2, 0, "32-true", true},  {true, true, 7, 1, 1, 0.2f, "32-true", true},
        {false, true, 12, 3, 1, 0, "bf16-mixed", true}};
    for (int k = 0; k < TEST_COUNT(whole); k++) {
        const double tolerance = strcmp(whole[k].precision, "32-true") == 0 ? 1e-5 : 0.03;
        embed a, b;
        tt_stats x, y;
        if (!embed_open(&a, &whole[k]) || !embed_open(&b, &parts[k])) return;
        for (int step = 0; step < EMBED_STEPS; step++) { /* the second step has fewer pairs */
            if (!embed_step(&a, &x) || !embed_step(&b, &y)) return;
            double largest = 0, difference = 0;
            for (int e = 0; e < EMBED_WIDTH * EMBED_WIDTH; e++) {
                largest = fmax(largest, fabs((double)a.gradient[e]));
                difference = fmax(difference, fabs((double)a.gradient[e] - b.gradient[e]));
            }
            embed_check(difference <= tolerance * largest && largest > 0,
                   "case %d, step %d: gradients differ by %g of %g", k, step, difference, largest);
            embed_check(fabs(x.loss - y.loss) <= tolerance * x.loss && x.targets == y.targets,
                   "case %d, step %d: the loss is %g of %g pairs, expected %g of %g", k, step, y.loss,
                   y.targets, x.loss, x.targets);
            CHECK(y.step == step + 1 && (tolerance > 1e-3 || x.correct == y.correct));
        }
        embed_close(&a);
        embed_close(&b);
    }
}

/* A run with step_seqs that is saved and resumed has the bits of an uninterrupted run, also after a step that
   was not complete; an evaluation between micro-batches changes nothing. */
TEST(step_negatives_resume)
{
    const embed_setup s = {false, true, 6, 3, 1, 0.1f, "32-true", true};
    const char *state = test_path(test_folder(), "embed.safetensors");
    embed whole, part, rest;
    tt_stats x, y;
    tt_batch b;
    bool updated;
    if (!embed_open(&whole, &s) || !embed_open(&part, &s) || !embed_open(&rest, &s)) return;
    for (int step = 0; step < 4; step++) if (!embed_step(&whole, &x)) return;
    for (int step = 0; step < 2; step++) if (!embed_step(&part, &y)) return;
    CHECK(tt_trainer_save(part.r, state, NULL) == TT_OK && tt_trainer_load(rest.r, state, NULL) == TT_OK);
    CHECK(tt_loader_seek(rest.l, 0, 2) == TT_OK && tt_loader_next(rest.l, &b) && !b.last_of_step);
    CHECK(tt_train_batch(rest.r, &b, &y, &updated) == TT_OK && !updated && y.targets == 0);
    CHECK(tt_evaluate_batch(rest.r, &b, &y) == TT_OK && y.targets == 2);
    CHECK(tt_trainer_load(rest.r, state, NULL) == TT_OK && tt_loader_seek(rest.l, 0, 2) == TT_OK);
    for (int step = 2; step < 4; step++) if (!embed_step(&rest, &y)) return;
    CHECK(x.loss == y.loss && x.step == 4 && y.step == 4);
    CHECK(memcmp(whole.gradient, rest.gradient, sizeof(float) * EMBED_WIDTH * EMBED_WIDTH) == 0);
    embed_close(&whole);
    embed_close(&part);
    embed_close(&rest);
}

/* Options that contradict each other, and steps and batches that do not fit, are refused by name; the trainer
   then trains as before. */
TEST(step_negatives_refuse)
{
    const embed_setup s = {false, true, 6, 3, 1, 0, "32-true", true};
    embed w;
    tt_stats stats;
    tt_batch b;
    bool updated;
    if (!embed_open(&w, &s)) return;
    const tt_model model = tt_bert_model(&w.m);
    tt_train_options o = tt_train_options_default();
    tt_train_options_make_room(&o, tt_loader_source(w.l), NULL);
    o.schedule.kind = TT_CONSTANT;
    static const struct { int seqs; float temperature; const char *precision, *error; } rows[] = {
        {-1, 0.05f, "32-true", "step_seqs is -1, but must be 0 unless"},
        {12, 0, "32-true", "temperature = 0; expected a finite number above 0"},
        {12, NAN, "32-true", "temperature = nan"},
        {12, 0.05f, "16-mixed", "step_seqs excludes loss scaling: use precision 'bf16-mixed'"}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        o.step_seqs = rows[k].seqs;
        o.temperature = rows[k].temperature;
        o.compile.precision = rows[k].precision;
        CHECK(!tt_trainer_new(w.ctx, &model, &o));
        CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, rows[k].error);
    }
    o.temperature = 0.05f;
    o.compile.precision = "32-true";
    o.step_seqs = 0;
    o.features_once = true;
    CHECK(!tt_trainer_new(w.ctx, &model, &o));
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "features_once excludes the task of embeddings");
    o.features_once = false;
    o.step_seqs = 10;
    o.label_smoothing = 0.1f;
    CHECK(!tt_trainer_new(w.ctx, &model, &o));
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "label_smoothing is 0.1, but embeddings have no classes to smooth");
    o.label_smoothing = 0;
    tt_trainer *small_step = tt_trainer_new(w.ctx, &model, &o);
    REQUIRE(small_step);
    for (int k = 0; k < 2; k++)
        CHECK(tt_loader_next(w.l, &b) && tt_train_batch(small_step, &b, &stats, &updated) == TT_OK);
    CHECK(tt_loader_next(w.l, &b) && tt_train_batch(small_step, &b, &stats, &updated) == TT_ERR_SHAPE);
    CHECK_ERROR(w.ctx, TT_ERR_SHAPE, "the step has more than step_seqs = 10 sequences");
    CHECK(tt_loader_seek(w.l, 0, 0) == TT_OK && tt_loader_next(w.l, &b));
    b.n_arrays = 2; /* without "positives" */
    CHECK(tt_train_batch(small_step, &b, &stats, &updated) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "the batch has 0 rows of \"positives\"");
    tt_trainer_free(small_step);
    CHECK(tt_loader_seek(w.l, 0, 0) == TT_OK && embed_step(&w, &stats) && stats.targets == 6);
    embed_close(&w);
}

TEST(step_negatives_out_of_memory) /* allocations of the trainer and of its steps fail in turn */
{
    const embed_setup s = {true, false, 3, 2, 1, 0, "32-true", false};
    long calls = 0;
    for (long n = 0; n <= calls; n++) {
        embed w;
        tt_batch b = {.last_of_step = true};
        if (!embed_open(&w, &s)) return;
        const tt_model model = tt_bert_model(&w.m);
        tt_train_options o = tt_train_options_default();
        tt_train_options_make_room(&o, tt_loader_source(w.l), NULL);
        o.schedule.kind = TT_CONSTANT;
        o.step_seqs = 9;
        tt_trainer_free(w.r);
        const long before = w.a.calls;
        w.a.fail_at = n ? before + n : 0;
        tt_status status = (w.r = tt_trainer_new(w.ctx, &model, &o)) ? TT_OK : tt_error_code(w.ctx);
        for (int k = 0; k < 2 && status == TT_OK; k++)
            status = tt_loader_next(w.l, &b) ? tt_train_batch(w.r, &b, NULL, NULL) : TT_ERR_MEMORY;
        if (n == 0) calls = w.a.calls - before;
        CHECK(n ? status == TT_ERR_MEMORY && w.a.failed : status == TT_OK && calls > 50);
        if (n) CHECK_ERROR(w.ctx, TT_ERR_MEMORY, "out of memory");
        tt_stats stats;
        /* Memory is back. The rest of a failed step is refused. */
        if (w.r && n && !b.last_of_step)
            CHECK(tt_loader_next(w.l, &b) && tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_ARGUMENT);
        if (w.r) CHECK(tt_loader_seek(w.l, 0, 0) == TT_OK && embed_step(&w, &stats));
        embed_close(&w);
    }
}
