/* Training on masked words. */
#pragma once

typedef struct masked {
    test_allocator a;
    tt_context *ctx;
    tt_tokenizer *k;
    tt_dataset *d;
    tt_loader *l;
    tt_bert m;
} masked;

static bool masked_open(masked *w, const char *device, float mask_rate)
{
    memset(w, 0, sizeof *w);
    tt_context_options o = test_options(&w->a);
    tt_table_options table = tt_table_options_default();
    tt_loader_options lo = tt_loader_options_default();
    o.seed = 3;
    o.threads = 2;
    w->ctx = tt_open(&o);
    table.task = TT_TASK_MASKED_LM;
    w->k = tt_tokenizer_open(w->ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    w->d = tt_dataset_table(w->ctx, texts(), NULL, NULL, 0, &table);
    lo.batch = BATCH;
    lo.max_length = 24;
    lo.mask_rate = mask_rate;
    lo.parallel.groups = 2;
    lo.parallel.data = strcmp(device, "cpu") == 0 ? 1 : 2;
    lo.accumulate = 1;
    w->l = tt_loader_new(w->ctx, w->d, w->k, &lo);
    tt_bert_config c = tt_bert_config_default(TT_BERT);
    c.task = TT_TASK_MASKED_LM;
    c.vocab_size = w->k ? tt_tokenizer_size(w->k) : 0;
    c.hidden_size = 24, c.layers = 2, c.heads = 3, c.intermediate_size = 40, c.max_positions = 24;
    if (CHECK(w->l && tt_bert_new(w->ctx, &w->m, &c) == TT_OK)) return true;
    fprintf(stderr, "%s\n", tt_error(w->ctx));
    return false;
}

static void masked_close(masked *w)
{
    tt_bert_free(&w->m);
    tt_loader_free(w->l);
    tt_dataset_free(w->d);
    tt_tokenizer_free(w->k);
    TEST_CLOSE(w->ctx, &w->a);
}

static tt_trainer *masked_trainer(masked *w, const char *device, int max_masked)
{
    const tt_model model = tt_bert_model(&w->m);
    tt_train_options o = tt_train_options_default();
    tt_train_options_make_room(&o, tt_loader_source(w->l), NULL);
    CHECK(o.max_masked == tt_loader_source(w->l)->max_masked && o.max_masked < o.max_tokens / 2);
    o.max_masked = max_masked >= 0 ? max_masked : o.max_masked;
    o.schedule.lr = 5e-3f;
    o.schedule.total_steps = 12 * tt_loader_steps(w->l);
    o.compile.device = device;
    o.compile.parallel.groups = 2;
    o.compile.accumulate = true;
    tt_trainer *r = tt_trainer_new(w->ctx, &model, &o);
    if (!CHECK(r != NULL)) fprintf(stderr, "%s\n", tt_error(w->ctx));
    return r;
}

/* The loss falls well below that of guessing, and has the same bits on one and two ranks. */
TEST(masked_words_are_learned)
{
    double first = 0, last[2] = {0, 0};
    for (int ranks = 1; ranks <= 2; ranks++) {
        const char *device = ranks == 1 ? "cpu" : "cpu*2";
        masked w;
        tt_stats stats;
        bool finished = false;
        tt_fit_options f = tt_fit_options_default();
        if (!masked_open(&w, device, 0.15f)) return;
        tt_trainer *r = masked_trainer(&w, device, -1);
        REQUIRE(r);
        f.epochs = 12;
        CHECK(tt_evaluate(r, tt_loader_source(w.l), &stats) == TT_OK);
        first = stats.loss;
        CHECK(tt_fit(r, tt_loader_source(w.l), tt_loader_source(w.l), &f, &finished) == TT_OK && finished);
        CHECK(tt_evaluate(r, tt_loader_source(w.l), &stats) == TT_OK);
        last[ranks - 1] = stats.loss;
        CHECK(stats.targets >= TEXTS && stats.correct > 0);
        tt_trainer_free(r);
        masked_close(&w);
    }
    if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("  loss %.4f, after 12 epochs %.4f\n", first, last[0]);
    CHECK(first > 4 && last[0] < 0.7 * first && last[0] == last[1]);
}

/* A smaller max_masked makes a smaller plan. A source with more masked tokens is refused. */
TEST(room_for_masked_words)
{
    masked w, more;
    tt_stats stats;
    if (!masked_open(&w, "cpu", 0.15f) || !masked_open(&more, "cpu", 0.6f)) return;
    tt_trainer *all = masked_trainer(&w, "cpu", 0);
    const size_t large = tt_program_plan(tt_trainer_program(all)).bytes;
    tt_trainer_free(all);
    tt_trainer *r = masked_trainer(&w, "cpu", -1);
    CHECK(tt_program_plan(tt_trainer_program(r)).bytes < large);
    CHECK(tt_evaluate(r, tt_loader_source(more.l), &stats) == TT_ERR_SHAPE);
    CHECK_ERROR(w.ctx, TT_ERR_SHAPE, "masked tokens, but the trainer has max_masked = ");
    tt_trainer_free(r);
    tt_train_options o = tt_train_options_default();
    o.schedule.total_steps = 1;
    o.max_seqs = o.max_tokens = 8;
    o.max_masked = -1;
    const tt_model model = tt_bert_model(&w.m);
    CHECK(!tt_trainer_new(w.ctx, &model, &o));
    CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "max_masked is -1, but must be 0 (max_tokens) or more");
    masked_close(&more);
    masked_close(&w);
}
