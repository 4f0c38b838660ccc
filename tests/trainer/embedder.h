/* A small encoder of embeddings and its training data, for tests in one process and in several. */
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

static const char *embed_device; /* NULL: as many ranks of the CPU as embed_setup.data says */

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
    t.compile.device = embed_device ? embed_device : s->data > 1 ? "cpu*2" : "cpu";
    t.compile.parallel.data = t.compile.parallel.groups = s->data;
    t.compile.before_update = embed_gradient;
    t.compile.user = w;
    t.compile.optimizer.kind = TT_SGD;
    t.compile.optimizer.clip_norm = 0;
    t.schedule.kind = TT_CONSTANT;
    t.schedule.lr = strcmp(s->precision, "32-true") == 0 ? 0.02f : 0; /* 0: rounding errors do not grow */
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
