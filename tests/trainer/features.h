/* Tests of features_once: the frozen part of a model is computed once for each example. */
#pragma once

/* Fills in the examples of a task from the texts of a dataset of classes. values: (TEXTS, 3); words: (TEXTS,
   24). */
static void texts_of_task(const tt_dataset *d, tt_task task, tt_text *to, float *values, tt_word *words)
{
    memset(to, 0, sizeof *to * TEXTS);
    for (int i = 0; i < TEXTS; i++) {
        tt_text *x = &to[i];
        x->text = tt_dataset_text(d, i, &x->bytes);
        x->label = tt_dataset_label(d, i);
        x->values = values + 3 * i;
        for (int c = 0; c < 3; c++)
            values[3 * i + c] = task == TT_TASK_LABELS ? (float)((x->label + i * c) % 2)
                                                       : 0.1f * (float)(x->label - c);
        if (task != TT_TASK_TAGS) continue;
        x->words = words + 24 * i;
        for (size_t at = 0; at < x->bytes && x->n_words < 24; at++) {
            const size_t n = strcspn(x->text + at, " ");
            const tt_word word = {at, at + n, n % 4 == 3 ? -1 : (int)(n % 3)};
            words[24 * i + x->n_words++] = word;
            at += n;
        }
    }
}

/* Makes a small run of a task whose parameters that match `frozen` are frozen. encoder_dropout: dropout of
   the encoder; s->dropout: of the head alone. */
static bool open_frozen(rank_group *w, const setup *s, tt_task task, float encoder_dropout,
                        const char *frozen, bool once)
{
    static const char *const names[] = {"a", "b", "c"};
    tt_text text[TEXTS];
    float values[TEXTS * 3];
    tt_word words[TEXTS * 24];
    memset(w, 0, sizeof *w);
    tt_context_options o = test_options(&w->a);
    o.seed = s->seed;
    o.threads = s->threads;
    w->ctx = tt_open(&o);
    w->k = tt_tokenizer_open(w->ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    tt_dataset *d = tt_dataset_table(w->ctx, texts(), NULL, NULL, 0, NULL);
    if (!CHECK(w->k && d)) return false;
    texts_of_task(d, task, text, values, words);
    w->d = tt_dataset_texts(w->ctx, task, text, TEXTS, names, task == TT_TASK_CLASS ? 2 : 3);
    tt_dataset_free(d);
    tt_loader_options lo = tt_loader_options_default();
    lo.batch = s->batch;
    lo.accumulate = s->accumulate;
    lo.max_length = 24;
    lo.max_tokens = s->max_tokens;
    lo.window = 3;
    lo.parallel = s->parallel;
    w->l = w->d ? tt_loader_new(w->ctx, w->d, w->k, &lo) : NULL;
    lo.shuffle = false;
    w->all = w->d ? tt_loader_new(w->ctx, w->d, w->k, &lo) : NULL;
    tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
    c.task = task;
    c.classes = task == TT_TASK_CLASS ? 2 : 3;
    c.vocab_size = tt_tokenizer_size(w->k);
    c.hidden_size = s->hidden, c.layers = s->layers, c.heads = 3, c.intermediate_size = s->intermediate;
    c.max_positions = 24;
    c.initializer_range = 0.2f;
    c.dropout = c.attention_dropout = encoder_dropout;
    c.classifier_dropout = s->dropout;
    if (!CHECK(w->l && w->all && tt_bert_new(w->ctx, &w->m, &c) == TT_OK)) return false;
    CHECK(tt_param_freeze(w->ctx, frozen, true) > 0);
    tt_model model = tt_bert_model(&w->m);
    tt_train_options to = train_options(s, w->l);
    to.features_once = once;
    to.label_smoothing = task == TT_TASK_CLASS ? 0.1f : 0;
    w->r = tt_trainer_new(w->ctx, &model, &to);
    if (!w->r) CHECK_ERROR(w->ctx, TT_OK, "a trainer");
    return w->r != NULL;
}

/* Receives the loss of each validation. */
static void frozen_report(void *user, const tt_fit_event *e)
{
    fitting *f = (fitting *)user;
    if (e->validation) f->best_loss = e->validation->loss, f->best = e->metric;
    else if (++f->steps == f->stop_at) f->stop = 1;
}

/* Trains `epochs` epochs. Sets *loss, unless it is NULL, to the loss of the last validation. */
static tt_status fit_frozen(rank_group *w, int epochs, double *loss, fitting *f)
{
    fitting own;
    bool finished = false;
    tt_fit_options o = tt_fit_options_default();
    memset(&own, 0, sizeof own);
    if (!f) f = &own;
    o.epochs = epochs;
    o.folder = f->folder;
    o.resume = f->kept;
    o.stop = &f->stop;
    o.report = frozen_report;
    o.user = f;
    tt_status status = tt_fit(w->r, tt_loader_source(w->l), tt_loader_source(w->all), &o, &finished);
    if (status == TT_OK) CHECK(finished == (f->stop == 0));
    if (loss) *loss = f->best_loss;
    return status;
}

/* Returns the largest absolute difference between two runs' parameters whose names match a pattern. */
static double apart(const rank_group *a, const rank_group *b, const char *pattern)
{
    double most = 0;
    for (int k = 0; k < a->ctx->n_params; k++) {
        const tt_param *p = a->ctx->params[k], *q = b->ctx->params[k];
        float *x = (float *)calloc((size_t)p->size, sizeof *x);
        float *y = (float *)calloc((size_t)p->size, sizeof *y);
        if (tt__match(pattern, p->name)) {
            CHECK(tt_param_get(p, x) == TT_OK && tt_param_get(q, y) == TT_OK);
            for (int64_t i = 0; i < p->size; i++) {
                const double d = fabs((double)x[i] - y[i]);
                if (!(d <= most)) most = d;
            }
        }
        free(x), free(y);
    }
    return most;
}

/* The head that is trained from features equals the head that is trained after a frozen encoder without
   dropout, for each task, in fp32 and bf16, with and without the head's dropout, in one micro-batch and in
   several. */
TEST(features_once_train_the_head_of_a_frozen_encoder)
{
    static const tt_task tasks[] = {TT_TASK_CLASS, TT_TASK_LABELS, TT_TASK_SCORES, TT_TASK_TAGS};
    for (int k = 0; k < 4 * TEST_COUNT(tasks); k++) {
        setup s = small();
        rank_group a, b, c;
        double x = 0, y = 0, z = 0;
        const bool half = k / 4 == 1, micros = k / 4 == 3;
        if (half) s.precision = "bf16-mixed";
        if (k / 4 == 2) s.precision = "bf16-true";
        if (micros) s.accumulate = 3;
        s.schedule.total_steps = 21;
        s.dropout = 0.25f;
        const tt_task task = tasks[k % 4];
        if (!open_frozen(&a, &s, task, 0, "distilbert.*", false) ||
            !open_frozen(&b, &s, task, 0, "distilbert.*", true)) return;
        CHECK(fit_frozen(&a, 3, &x, NULL) == TT_OK && fit_frozen(&b, 3, &y, NULL) == TT_OK);
        const double rounding = strcmp(s.precision, "32-true") == 0 ? 2e-6 : 4e-3;
        CHECK(apart(&a, &b, "distilbert.*") == 0);
        CHECK_NEAR(apart(&a, &b, "*classifier*"), 0, rounding);
        CHECK_NEAR(x, y, rounding);
        tt_stats of[2]; /* evaluations and predictions compute the whole model */
        CHECK(tt_evaluate(a.r, tt_loader_source(a.all), &of[0]) == TT_OK &&
              tt_evaluate(b.r, tt_loader_source(b.all), &of[1]) == TT_OK);
        CHECK_NEAR(of[0].loss, of[1].loss, rounding);
        CHECK_NEAR(of[1].loss, y, rounding);
        close_world(&a), close_world(&b);
        if (task == TT_TASK_TAGS) continue; /* in DistilBERT the head of tags has the encoder's dropout */
        /* the encoder has no dropout */
        s.dropout = 0;
        if (!open_frozen(&c, &s, task, 0.3f, "distilbert.*", true)) return;
        if (!open_frozen(&a, &s, task, 0, "distilbert.*", false)) return;
        CHECK(fit_frozen(&a, 3, &x, NULL) == TT_OK && fit_frozen(&c, 3, &z, NULL) == TT_OK);
        CHECK_NEAR(apart(&a, &c, "*classifier*"), 0, rounding);
        CHECK_NEAR(x, z, rounding);
        close_world(&a), close_world(&c);
    }
}

/* Features may be values within the encoder, may have a row for each token, and may be divided over any
   number of data ranks. */
TEST(features_once_of_the_first_layers_and_on_ranks)
{
    for (int k = 0; k < 6; k++) {
        setup s = small();
        rank_group a, b;
        double x = 0, y = 0;
        const bool layers = k % 2;
        const char *frozen = layers ? "distilbert.[et]*.layer.0.*" : "distilbert.*";
        s.dropout = 0;
        s.schedule.total_steps = 14;
        s.schedule.lr = 0.1f;
        s.optimizer.kind = TT_SGD; /* AdamW would magnify the rounding of small gradients */
        if (k / 2) s.device = k / 2 == 1 ? "cpu*2" : "cpu*3", s.parallel.groups = s.parallel.data = k / 2 + 1;
        if (k / 2) s.accumulating = true;
        if (!open_frozen(&a, &s, TT_TASK_CLASS, 0, frozen, false) ||
            !open_frozen(&b, &s, TT_TASK_CLASS, 0, frozen, false)) return;
        tt_trainer_free(a.r), tt_trainer_free(b.r);
        if (layers) CHECK(tt_param_freeze(a.ctx, "distilbert.embeddings.*", true) == 4 &&
                          tt_param_freeze(b.ctx, "distilbert.embeddings.*", true) == 4);
        tt_model of_a = tt_bert_model(&a.m), of_b = tt_bert_model(&b.m);
        tt_train_options o = train_options(&s, a.l);
        a.r = tt_trainer_new(a.ctx, &of_a, &o);
        o.features_once = true;
        b.r = tt_trainer_new(b.ctx, &of_b, &o);
        if (!CHECK(a.r && b.r)) return;
        CHECK(b.r->features->count == 1 && b.r->features->by_token[0] == layers &&
              b.r->features->width[0] == s.hidden);
        int64_t tokens = 0;
        for (int i = 0; i < TEXTS; i++) tokens += b.all->tokens[i].count;
        CHECK(tt_trainer_feature_bytes(a.r, tt_loader_source(a.l)) == 0 &&
              tt_trainer_feature_bytes(b.r, tt_loader_source(b.l)) ==
              sizeof(float) * (size_t)s.hidden * (size_t)(layers ? tokens : TEXTS));
        CHECK(fit_frozen(&a, 2, &x, NULL) == TT_OK && fit_frozen(&b, 2, &y, NULL) == TT_OK);
        CHECK_NEAR(apart(&a, &b, "*"), 0, 2e-6);
        CHECK_NEAR(x, y, 2e-6);
        close_world(&a), close_world(&b);
    }
}

/* A run that is stopped and resumed ends with the bits of a run without the interruption; so does a run on
   another number of threads. */
TEST(features_once_resumed)
{
    static const int stop_at[] = {3, 7, 10};
    for (int k = 0; k < TEST_COUNT(stop_at); k++) {
        setup s = small();
        rank_group a, b, c;
        fitting whole, parts;
        memset(&whole, 0, sizeof whole);
        memset(&parts, 0, sizeof parts);
        char first[1024], second[1024], x[1200], y[1200];
        s.schedule.total_steps = 21;
        snprintf(first, sizeof first, "%s", test_path(test_folder(), "whole"));
        snprintf(second, sizeof second, "%s", test_path(test_folder(), "parts"));
        whole.folder = first, parts.folder = second;
        if (!open_frozen(&a, &s, TT_TASK_TAGS, 0.1f, "distilbert.*", true)) return;
        s.threads = 3;
        if (!open_frozen(&b, &s, TT_TASK_TAGS, 0.1f, "distilbert.*", true) ||
            !open_frozen(&c, &s, TT_TASK_TAGS, 0.1f, "distilbert.*", true)) return;
        CHECK(fit_frozen(&a, 3, NULL, &whole) == TT_OK);
        parts.stop_at = stop_at[k];
        CHECK(fit_frozen(&b, 3, NULL, &parts) == TT_OK && tt_trainer_steps(b.r) == stop_at[k]);
        parts.stop = 0, parts.kept = 1; /* with `kept` 1, fit_frozen resumes the run */
        CHECK(fit_frozen(&c, 3, NULL, &parts) == TT_OK && tt_trainer_steps(c.r) == 21);
        CHECK(apart(&a, &c, "*") == 0);
        snprintf(x, sizeof x, "%s/state.safetensors", first);
        snprintf(y, sizeof y, "%s/state.safetensors", second);
        CHECK(same_files(x, y));
        close_world(&a), close_world(&b), close_world(&c);
    }
}

typedef struct counted_images { int reads, label[40]; uint8_t pixels[40][16 * 16 * 3]; } counted_images;

static const char *read_counted(void *user, int64_t index, tt_image *image)
{
    counted_images *c = (counted_images *)user;
    c->reads++;
    image->pixels = c->pixels[index];
    image->height = image->width = 16;
    image->channels = 3;
    return NULL;
}

/* With features each image is decoded once, however many epochs there are. */
TEST(features_once_of_images)
{
    static const char *const names[] = {"dark", "bright"};
    static counted_images of;
    double loss[2] = {0, 0}, weights[2][2 * 24];
    uint64_t random = 5;
    for (int i = 0; i < 40; i++) {
        of.label[i] = i % 2;
        for (int k = 0; k < 16 * 16 * 3; k++)
            of.pixels[i][k] = (uint8_t)(test_random(&random) % 150 + 50 * (uint64_t)(i % 2));
    }
    for (int once = 0; once < 2; once++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_vit m;
        tt_vit_config c = tt_vit_config_default("Ti/8");
        tt_image_source source;
        memset(&source, 0, sizeof source);
        source.count = 40, source.labels = of.label, source.class_names = names, source.classes = 2;
        source.read = read_counted, source.user = &of;
        c.image_size = 16, c.hidden_size = 24, c.layers = 2, c.heads = 3, c.intermediate_size = 32;
        c.classes = 2;
        tt_dataset *d = tt_dataset_images(ctx, &source), *held = d ? tt_dataset_split(d, 12) : NULL;
        if (!CHECK(held && tt_vit_new(ctx, &m, &c) == TT_OK)) return;
        CHECK(tt_param_freeze(ctx, "vit.*", true) > 0);
        tt_loader_options lo = tt_loader_options_default();
        tt_image_options io = tt_vit_image_options(&m);
        lo.batch = 6;
        lo.threads = 0; /* no image is decoded ahead */
        tt_loader *l = tt_image_loader_new(ctx, d, &io, &lo);
        lo.shuffle = false;
        tt_loader *v = tt_image_loader_new(ctx, held, &io, &lo);
        tt_model model = tt_vit_classifier(&m);
        tt_train_options o = tt_train_options_default();
        o.features_once = once;
        o.schedule.lr = 1e-2f;
        o.schedule.total_steps = 20;
        tt_train_options_make_room(&o, tt_loader_source(l), tt_loader_source(v));
        tt_trainer *t = tt_trainer_new(ctx, &model, &o);
        tt_fit_options f = tt_fit_options_default();
        fitting report;
        float w[2 * 24];
        memset(&report, 0, sizeof report);
        f.epochs = 4, f.report = frozen_report, f.user = &report;
        of.reads = 0;
        if (!CHECK(t != NULL)) return;
        CHECK(tt_fit(t, tt_loader_source(l), tt_loader_source(v), &f, NULL) == TT_OK);
        CHECK(of.reads == (once ? 40 : 4 * 40));
        loss[once] = report.best_loss;
        CHECK(tt_param_get(m.classifier_w, w) == TT_OK);
        for (int k = 0; k < 2 * 24; k++) weights[once][k] = w[k];
        tt_stats s; /* after the run the loaders give images again */
        CHECK(tt_evaluate(t, tt_loader_source(v), &s) == TT_OK && fabs(s.loss - loss[once]) < 1e-6);
        tt_batch b;
        CHECK(tt_loader_seek(l, 0, 0) == TT_OK && tt_loader_next(l, &b) && b.pixels);
        tt_trainer_free(t), tt_loader_free(l), tt_loader_free(v), tt_dataset_free(d), tt_dataset_free(held);
        tt_vit_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    CHECK_NEAR(loss[0], loss[1], 2e-6);
    for (int k = 0; k < 2 * 24; k++) CHECK_NEAR(weights[0][k], weights[1][k], 2e-6);
}

static tt_status next_without_index(void *self, tt_batch *b, bool *more)
{
    *more = tt_loader_next((tt_loader *)self, b);
    b->index = NULL;
    return TT_OK;
}

static tt_status next_with_one_index(void *self, tt_batch *b, bool *more)
{
    static const int64_t zeros[TEXTS];
    *more = tt_loader_next((tt_loader *)self, b);
    b->index = zeros;
    return TT_OK;
}

static int64_t passes; /* number of seeks of seek_to_others */

static tt_status seek_to_others(void *self, int64_t epoch, int64_t step)
{
    passes++;
    return tt_loader_seek((tt_loader *)self, epoch, step);
}

static tt_status next_of_others(void *self, tt_batch *b, bool *more) /* other indices in the second pass */
{
    static int64_t index[TEXTS];
    *more = tt_loader_next((tt_loader *)self, b);
    for (int s = 0; s < b->seqs; s++) index[s] = b->index[s] + (passes > 1 ? TEXTS : 0);
    b->index = index;
    return TT_OK;
}

/* A model whose `record` sets no output. self: the model of BERT. */
static tt_value record_without_output(const void *self, tt_tape *t, const tt_train_options *o,
                                      tt_value *output)
{
    const tt_model model = tt_bert_model((const tt_bert *)self);
    tt_value own = {0, 0};
    (void)output;
    return model.record(self, t, o, &own);
}

/* Features do not depend on the model's output: a model without an output is trained as without the
   option. */
TEST(features_once_without_output)
{
    float *weights[2] = {NULL, NULL};
    for (int once = 0; once < 2; once++) {
        setup s = small();
        rank_group w;
        s.schedule.total_steps = 14;
        if (!open_frozen(&w, &s, TT_TASK_CLASS, 0, "distilbert.*", false)) return;
        tt_trainer_free(w.r);
        tt_model model = tt_bert_model(&w.m);
        model.record = record_without_output;
        model.classes = 0;
        model.metrics[1].name = NULL;
        tt_train_options o = train_options(&s, w.l);
        o.features_once = once;
        w.r = tt_trainer_new(w.ctx, &model, &o);
        if (!CHECK(w.r && fit_frozen(&w, 2, NULL, NULL) == TT_OK)) printf("%s\n", tt_error(w.ctx));
        weights[once] = test_values(w.m.classifier_w);
        close_world(&w);
    }
    for (int k = 0; k < 2 * 24; k++) CHECK_NEAR(weights[0][k], weights[1][k], 2e-6);
    free(weights[0]);
    free(weights[1]);
}

TEST(features_once_refuses)
{
    setup s = small();
    rank_group w;
    tt_batch b;
    tt_fit_options f = tt_fit_options_default();
    if (!open_frozen(&w, &s, TT_TASK_CLASS, 0, "distilbert.*", true)) return;
    CHECK(tt_loader_seek(w.l, 0, 0) == TT_OK && tt_loader_next(w.l, &b));
    CHECK(tt_train_batch(w.r, &b, NULL, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "features_once is for tt_fit");
    tt_source without = *tt_loader_source(w.l);
    without.next = next_without_index;
    CHECK(tt_fit(w.r, &without, NULL, &f, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "features_once needs the index of each example");
    without.next = next_with_one_index;
    CHECK(tt_fit(w.r, &without, NULL, &f, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "the index 0 occurs twice in epoch 0 of a source");
    passes = 0;
    without.seek = seek_to_others;
    without.next = next_of_others;
    CHECK(tt_fit(w.r, &without, NULL, &f, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "the source gives other examples when epoch 0 is read again");
    tt_loader_options lo = tt_loader_options_default();
    lo.batch = s.batch, lo.max_length = 24, lo.drop_last = true;
    tt_loader *l = tt_loader_new(w.ctx, w.d, w.k, &lo);
    f.epochs = 3;
    CHECK(tt_fit(w.r, tt_loader_source(l), NULL, &f, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "was not in epoch 0 of its source");
    tt_loader_free(l);
    tt_trainer_free(w.r);
    tt_model model = tt_bert_model(&w.m);
    tt_train_options o = train_options(&s, w.l);
    o.features_once = true;
    CHECK(tt_param_freeze(w.ctx, "*", false) > 0);
    CHECK((w.r = tt_trainer_new(w.ctx, &model, &o)) == NULL);
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "computes nothing from inputs and frozen parameters alone");
    close_world(&w);
}

TEST(features_once_without_memory) /* each allocation of the trainer and its run fails in turn */
{
    long calls = 0;
    for (long n = 0; n <= calls; n += n < 40 ? 1 : TEST_SWEEP) {
        setup s = small();
        rank_group w;
        s.layers = 1;
        s.schedule.total_steps = 7;
        if (!open_frozen(&w, &s, TT_TASK_TAGS, 0.1f, "distilbert.*", true)) return;
        tt_trainer_free(w.r);
        tt_model model = tt_bert_model(&w.m);
        tt_train_options o = train_options(&s, w.l);
        o.features_once = true;
        const long before = w.a.calls;
        w.a.fail_at = n ? before + n : 0;
        w.r = tt_trainer_new(w.ctx, &model, &o);
        tt_status status = w.r ? fit_frozen(&w, 1, NULL, NULL) : tt_error_code(w.ctx);
        if (n) CHECK(status == TT_ERR_MEMORY && w.a.failed);
        else CHECK(status == TT_OK);
        if (!n) calls = w.a.calls - before;
        if (w.r && n) CHECK(fit_frozen(&w, 1, NULL, NULL) == TT_OK); /* allocations succeed again */
        close_world(&w);
    }
    CHECK(calls > 50);
}
