/* Training of embeddings by the contrastive loss, with the negatives of a micro-batch or of a step. */
#pragma once
#include "embedder.h"

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

/* Pairs with scores are evaluated but not trained on: every sequence of a batch has the score of its pair,
   and the correlations are those of plain loops over the embeddings. */
TEST(pairs_with_scores)
{
    const embed_setup s = {false, false, 6, 1, 1, 0, "32-true", false};
    tt_text pairs[EMBED_PAIRS];
    float scores[EMBED_PAIRS];
    embed w;
    tt_batch b;
    tt_stats stats;
    bool updated, finished = false;
    if (!embed_open(&w, &s)) return;
    memset(pairs, 0, sizeof pairs);
    for (int k = 0; k < EMBED_PAIRS; k++) {
        scores[k] = (float)(k * 7 % 5);
        pairs[k].text = tt_dataset_text(w.d, k, &pairs[k].bytes);
        pairs[k].pair = tt_dataset_pair(w.d, k, &pairs[k].pair_bytes);
        pairs[k].values = &scores[k];
    }
    tt_dataset *d = tt_dataset_texts(w.ctx, TT_TASK_EMBED, pairs, EMBED_PAIRS, NULL, 0);
    tt_loader_options o = tt_loader_options_default();
    o.batch = 6;
    o.max_length = 16;
    o.shuffle = false;
    tt_loader *l = tt_loader_new(w.ctx, d, w.k, &o);
    REQUIRE(l && tt_loader_next(l, &b));
    for (int k = 0; k < b.seqs; k++) CHECK(b.values == 1 && b.label_values[k] == scores[k % 6]);
    CHECK(tt_train_batch(w.r, &b, &stats, &updated) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "the batch has pairs with scores, but the contrastive loss trains");
    tt_predictions *p = tt_predictions_new(w.r, tt_loader_source(l), &stats);
    REQUIRE(p);
    double x[EMBED_PAIRS], y[EMBED_PAIRS], mean[2] = {0, 0}, xx = 0, yy = 0, xy = 0;
    for (int k = 0, row = 0; k < EMBED_PAIRS; k++, row++) {
        const int micro = k - k % 6 + 6 > EMBED_PAIRS ? EMBED_PAIRS % 6 : 6; /* pairs of the micro-batch */
        if (k && k % 6 == 0) row += 6; /* the pairs of the last micro-batch */
        x[k] = scores[k];
        y[k] = embed_cosine(p->outputs + row * EMBED_WIDTH, p->outputs + (row + micro) * EMBED_WIDTH);
        mean[0] += x[k] / EMBED_PAIRS;
        mean[1] += y[k] / EMBED_PAIRS;
    }
    for (int k = 0; k < EMBED_PAIRS; k++) {
        xx += (x[k] - mean[0]) * (x[k] - mean[0]);
        yy += (y[k] - mean[1]) * (y[k] - mean[1]);
        xy += (x[k] - mean[0]) * (y[k] - mean[1]);
    }
    const tt_metric pearson = tt_pearson(), spearman = tt_spearman();
    CHECK_NEAR(tt_metric_value(&pearson, NULL, p), xy / sqrt(xx * yy), 1e-12);
    CHECK(fabs(tt_metric_value(&spearman, NULL, p)) <= 1);
    tt_predictions_free(p);
    tt_fit_options f = tt_fit_options_default();
    f.best_by = "spearman";
    const tt_status status = tt_fit(w.r, tt_loader_source(w.l), tt_loader_source(l), &f, &finished);
    embed_check(status == TT_OK && finished, "%s", tt_error(w.ctx));
    tt_loader_free(l);
    tt_dataset_free(d);
    embed_close(&w);
}

/* With step_seqs, micro-batches have the gradients of one micro-batch of the whole step, and so have an
   evaluation's losses; so do micro-batches of two data ranks. With dropout, a step of one micro-batch has the
   gradients of a step without step_seqs, as both have the same dropout. */
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
        CHECK(tt_evaluate(a.r, tt_loader_source(a.l), &x) == TT_OK);
        CHECK(tt_evaluate(b.r, tt_loader_source(b.l), &y) == TT_OK);
        embed_check(fabs(x.loss - y.loss) <= tolerance * x.loss && y.targets == EMBED_PAIRS,
                    "case %d: the loss of the evaluation is %g of %g pairs, expected %g of %g", k, y.loss,
                    y.targets, x.loss, x.targets);
        CHECK(x.targets == y.targets && (tolerance > 1e-3 || x.correct == y.correct) && x.step == y.step);
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
    CHECK(tt_evaluate(rest.r, tt_loader_source(rest.l), &y) == TT_ERR_ARGUMENT);
    CHECK_ERROR(rest.ctx, TT_ERR_ARGUMENT, "step_seqs: 1 micro-batches wait for the end of their step");
    CHECK(tt_trainer_load(rest.r, state, NULL) == TT_OK && tt_loader_seek(rest.l, 0, 2) == TT_OK);
    for (int step = 2; step < 4; step++) {
        CHECK(tt_evaluate(rest.r, tt_loader_source(whole.l), &y) == TT_OK && y.targets == EMBED_PAIRS);
        if (!embed_step(&rest, &y)) return;
    }
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
        /* Allocations succeed again. The remaining micro-batches of a failed step are refused. */
        if (w.r && n && !b.last_of_step)
            CHECK(tt_loader_next(w.l, &b) && tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_ARGUMENT);
        if (w.r) CHECK(tt_loader_seek(w.l, 0, 0) == TT_OK && embed_step(&w, &stats));
        embed_close(&w);
    }
}
