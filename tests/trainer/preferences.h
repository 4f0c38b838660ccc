/* Training on pairs of answers (direct preference optimization). */
#pragma once

enum { PAIRS = 4, ANSWERS = 13, PAIR_WIDTH = 5, PAIR_TOKENS = 7, PAIR_LINES = 22, PAIR_STEPS = 5 };

static const int32_t pair_starts[PAIRS + 1] = {0, 2, 6, 9, ANSWERS};

/* Computes the loss of pairs in double precision, and its gradient for w (tokens, width). x: (answers,
   width), whose products with the rows of w are the logits. Returns the loss, and sets *right and *margins to
   the sums over the pairs. */
static double loss_of_pairs(const float *x, const float *w, const int32_t *target, const float *sign,
                            const float *minus, double beta, double *gradient, double *right, double *margins)
{
    double p[ANSWERS][PAIR_TOKENS], loss = 0;
    memset(gradient, 0, sizeof *gradient * PAIR_TOKENS * PAIR_WIDTH);
    *right = *margins = 0;
    for (int k = 0; k < PAIRS; k++) {
        double difference = minus[k];
        for (int r = pair_starts[k]; r < pair_starts[k + 1]; r++) {
            double sum = 0;
            for (int c = 0; c < PAIR_TOKENS; c++) {
                p[r][c] = 0;
                for (int d = 0; d < PAIR_WIDTH; d++)
                    p[r][c] += (double)x[r * PAIR_WIDTH + d] * w[c * PAIR_WIDTH + d];
                p[r][c] = exp(p[r][c]);
                sum += p[r][c];
            }
            for (int c = 0; c < PAIR_TOKENS; c++) p[r][c] /= sum;
            if (target[r] >= 0) difference -= sign[r] * log(p[r][target[r]]);
        }
        const double margin = beta * difference, slope = -beta / (1 + exp(margin)) / PAIRS;
        loss += log1p(exp(-margin)) / PAIRS;
        *margins += margin;
        *right += margin > 0;
        for (int r = pair_starts[k]; r < pair_starts[k + 1]; r++)
            for (int c = 0; c < PAIR_TOKENS && target[r] >= 0; c++)
                for (int d = 0; d < PAIR_WIDTH; d++)
                    gradient[c * PAIR_WIDTH + d] += slope * sign[r] * (p[r][c] - (c == target[r])) *
                                                    x[r * PAIR_WIDTH + d];
    }
    return loss;
}

/* Loss, counts and gradient equal those of loops in double precision, in one step and in micro-batches. */
TEST(preferences_as_in_loops_of_doubles)
{
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        float x[ANSWERS * PAIR_WIDTH], w[PAIR_TOKENS * PAIR_WIDTH], sign[ANSWERS], minus[PAIRS], ones[PAIRS];
        float gradient[PAIR_TOKENS * PAIR_WIDTH];
        double expected[PAIR_TOKENS * PAIR_WIDTH], right, margins;
        int32_t target[ANSWERS];
        uint64_t random = 5;
        for (int k = 0; k < TEST_COUNT(x); k++) x[k] = (float)(test_random(&random) % 201) / 50 - 2;
        for (int k = 0; k < TEST_COUNT(w); k++) w[k] = (float)(test_random(&random) % 201) / 80 - 1.2f;
        for (int r = 0; r < ANSWERS; r++) {
            target[r] = r == 4 ? -100 : (int32_t)(test_random(&random) % PAIR_TOKENS);
            sign[r] = test_random(&random) % 2 ? 1.0f : -1.0f;
        }
        for (int k = 0; k < PAIRS; k++) minus[k] = (float)(test_random(&random) % 100) / 30 - 1, ones[k] = 1;
        tt_train_options o = tt_train_options_default();
        o.max_seqs = 2 * PAIRS + 6;
        o.beta = 0.3f;
        tt_tape *t = tt_tape_new(ctx);
        const int64_t shape[] = {PAIR_TOKENS, PAIR_WIDTH}, rows = tt_axis(t, "answers", ANSWERS + 4);
        tt_param *weight = tt_param_new(ctx, "w", 2, shape, (tt_init){TT_INIT_ZEROS, 0});
        const tt_value in = tt_input(t, "x", TT_F32, rows, PAIR_WIDTH);
        tt_value difference;
        const tt_value loss = tt_preference_loss(t, tt_linear(t, in, weight, NULL), &o, &difference);
        tt_compile_options c = tt_compile_options_default();
        c.keep_gradients = true;
        c.accumulate = accumulate;
        tt_program *p = tt_compile(t, loss, &c);
        if (!CHECK(p != NULL)) fprintf(stderr, "%s\n", tt_error(ctx));
        REQUIRE(p);
        const tt_array arrays[] = {{"x", x, ANSWERS}, {"targets", target, ANSWERS}, {"signs", sign, ANSWERS},
            {"pair_start", pair_starts, PAIRS + 1}, {"reference.minus", minus, PAIRS},
            {"preferred", ones, PAIRS}};
        tt_input_info info[8];
        const int n = tt_program_inputs(p, info, TEST_COUNT(info));
        CHECK(n == TEST_COUNT(arrays) && tt_param_set(weight, w) == TT_OK);
        tt_stats stats;
        for (int micro = 0; micro < 1 + accumulate; micro++) {
            for (int k = 0; k < n; k++)
                for (int j = 0; j < TEST_COUNT(arrays); j++)
                    if (strcmp(info[k].name, arrays[j].input) == 0)
                        CHECK(tt_set(p, info[k].value, arrays[j].data, arrays[j].rows) == TT_OK);
            CHECK((accumulate ? tt_micro_step(p, &stats) : tt_step(p, 0, &stats)) == TT_OK);
        }
        CHECK(tt_get_gradient(p, weight, gradient) == TT_OK);
        const double found = loss_of_pairs(x, w, target, sign, minus, o.beta, expected, &right, &margins);
        const double micros = 1 + accumulate;
        CHECK(fabs(stats.loss - found) <= 1e-6 && stats.targets == micros * PAIRS);
        CHECK(stats.correct == micros * right && right > 0 && right < PAIRS);
        CHECK(fabs(stats.margin - micros * margins) <= 1e-5);
        for (int k = 0; k < TEST_COUNT(gradient); k++) CHECK(fabs(gradient[k] - expected[k]) <= 1e-6);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

typedef struct preferring {
    test_allocator a;
    tt_context *ctx;
    tt_lm m;
    tt_token_stream *s, *held;
    tt_token_loader *l, *validation;
    tt_trainer *r;
} preferring;

/* Writes pairs whose chosen answers say "yes" and whose rejected ones say "no". The returned path stays
   valid. */
static const char *pair_lines(void)
{
    static char path[1024];
    if (path[0]) return path;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "pairs.jsonl"));
    FILE *f = fopen(path, "w");
    if (!f) { perror(path); exit(2); }
    for (int k = 0; k < PAIR_LINES; k++)
        fprintf(f, "{\"prompt\": \"%d + %d?\", \"chosen\": \" yes%.*s\", \"rejected\": \" no, %d\"}\n", k,
                k * 7, k % 4, "!!!", k);
    fclose(f);
    return path;
}

static bool open_pairs(preferring *w, const char *device, int accumulate, int length, int lora)
{
    memset(w, 0, sizeof *w);
    w->ctx = test_open(&w->a);
    tt_lm_config c = tt_lm_config_sized("llama", 2, 24, 3);
    tt_token_loader_options lo = tt_token_loader_options_default();
    tt_train_options o = tt_train_options_default();
    tt_lora_options lora_options = tt_lora_options_default();
    c.vocab_size = 257;
    c.max_positions = 64;
    lora_options.rank = lora;
    if (tt_lm_new(w->ctx, &w->m, &c) != TT_OK) return false;
    if (lora && tt_lm_lora(&w->m, &lora_options) != TT_OK) return false;
    w->s = tt_token_stream_read(w->ctx, pair_lines(), NULL);
    w->held = w->s ? tt_token_stream_split(w->s, 140) : NULL;
    lo.batch = 4;
    lo.accumulate = accumulate;
    lo.length = length;
    lo.parallel.groups = 2;
    lo.parallel.data = strcmp(device, "cpu") == 0 ? 1 : 2;
    w->l = w->held ? tt_token_loader_new(w->ctx, w->s, &lo) : NULL;
    w->validation = w->l ? tt_token_loader_new(w->ctx, w->held, &lo) : NULL;
    if (!w->validation) return false;
    const tt_source *source = tt_token_loader_source(w->l), *other = tt_token_loader_source(w->validation);
    const tt_model model = tt_lm_preference_model(&w->m);
    tt_train_options_make_room(&o, source, other);
    CHECK(o.max_seqs % 2 == 0 && o.max_masked > 0 && o.max_masked < o.max_tokens);
    o.schedule.lr = lora ? 2e-2f : 3e-3f;
    o.schedule.total_steps = 8 * PAIR_STEPS;
    o.compile.device = device;
    o.compile.parallel.groups = 2;
    o.compile.accumulate = true;
    w->r = tt_trainer_new(w->ctx, &model, &o);
    return w->r != NULL;
}

static void close_pairs(preferring *w)
{
    tt_trainer_free(w->r);
    tt_lm_free(&w->m);
    tt_token_loader_free(w->l);
    tt_token_loader_free(w->validation);
    tt_token_stream_free(w->held);
    tt_token_stream_free(w->s);
    TEST_CLOSE(w->ctx, &w->a);
}

/* Trains 8 epochs in a folder. stop_at: the step after which the run stops; 0: none. */
typedef struct pair_stop { volatile int stop; int64_t at, steps; double first; } pair_stop;

static void count_pairs(void *user, const tt_fit_event *e)
{
    pair_stop *x = (pair_stop *)user;
    char line[200];
    if (e->validation) return;
    CHECK(e->margins);
    tt_fit_text(e, line, sizeof line);
    CHECK(strstr(line, "  accuracy ") && strstr(line, "  margin "));
    if (!x->steps++) x->first = e->loss;
    if (x->steps == x->at) x->stop = 1;
}

static tt_status fit_pairs(preferring *w, const char *folder, bool resume, pair_stop *x, bool *finished)
{
    tt_fit_options f = tt_fit_options_default();
    f.epochs = 8;
    f.folder = folder;
    f.resume = resume;
    f.stop = &x->stop;
    f.report = count_pairs;
    f.user = x;
    const tt_source *other = tt_token_loader_source(w->validation);
    return tt_fit(w->r, tt_token_loader_source(w->l), other, &f, finished);
}

/* Training makes the chosen answers likelier: accuracy and margin rise. Runs of one and of two ranks, and a
   run that stops and resumes, have the same bits. */
TEST(preferences_are_learned)
{
    char folder[3][1024], path[1100];
    for (int k = 0; k < 3; k++) {
        preferring w;
        tt_stats stats;
        bool finished = false;
        pair_stop x = {0, k == 2 ? 7 : 0, 0, 0};
        snprintf(folder[k], sizeof folder[k], "%s", test_path(test_folder(), "run"));
        REQUIRE(open_pairs(&w, k == 1 ? "cpu*2" : "cpu", 1, 40, 0));
        CHECK(tt_evaluate(w.r, tt_token_loader_source(w.validation), &stats) == TT_ERR_ARGUMENT);
        CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "of the batch has no reference: call tt_trainer_reference");
        CHECK(fit_pairs(&w, folder[k], false, &x, &finished) == TT_OK && finished == (k < 2));
        CHECK(x.first > 0.693146 && x.first < 0.693148); /* log 2: the model equals its reference */
        if (k == 2) {
            close_pairs(&w);
            REQUIRE(open_pairs(&w, "cpu", 1, 40, 0));
            x.at = x.stop = 0;
            CHECK(fit_pairs(&w, folder[k], true, &x, &finished) == TT_OK && finished);
        }
        CHECK(tt_evaluate(w.r, tt_token_loader_source(w.validation), &stats) == TT_OK);
        CHECK(stats.correct == stats.targets && stats.targets >= 2 && stats.margin > stats.targets);
        if (getenv("TINYTRAIN_TEST_VERBOSE"))
            printf("  validation: loss %.4f, margin %.3f\n", stats.loss, stats.margin / stats.targets);
        close_pairs(&w);
        CHECK(!k || same_runs(folder[0], folder[k]));
    }
    size_t n;
    snprintf(path, sizeof path, "%s/metrics.csv", folder[0]);
    char *csv = test_read(path, &n);
    CHECK(csv && strncmp(csv, "step,epoch,split,loss,accuracy,margin,lr", 40) == 0);
    free(csv);
}

/* With adapters, whose factors B begin with zeros, the reference is the model itself. */
TEST(preferences_with_adapters)
{
    preferring w;
    tt_stats stats;
    bool finished = false;
    pair_stop x = {0, 0, 0, 0};
    REQUIRE(open_pairs(&w, "cpu", 2, 40, 4));
    CHECK(fit_pairs(&w, NULL, false, &x, &finished) == TT_OK && finished);
    CHECK(x.first > 0.693146 && x.first < 0.693148);
    CHECK(tt_evaluate(w.r, tt_token_loader_source(w.validation), &stats) == TT_OK);
    if (getenv("TINYTRAIN_TEST_VERBOSE"))
        printf("  loss %.4f, %g of %g pairs\n", stats.loss, stats.correct, stats.targets);
    CHECK(stats.correct == stats.targets && stats.loss < 0.6);
    close_pairs(&w);
}

/* Allocates the parameters, as tt_fit does before it reads a reference, and changes one of them. */
static void change_a_weight(preferring *w)
{
    tt_param *p = tt_param_at(w->ctx, 1);
    float *values = test_values(p);
    values[0] += 1;
    CHECK(tt_allocate(w->r->train) == TT_OK && tt_param_set(p, values) == TT_OK);
    free(values);
}

/* A state belongs to the model that computed the reference, also if the file of the reference is gone. */
TEST(states_of_another_reference)
{
    char path[1100], folder[1024];
    preferring w;
    bool finished = false;
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    for (int k = 0; k < 3; k++) { /* 0: begins and stops; 1: another model; 2: the same model */
        pair_stop x = {0, k ? 0 : 7, 0, 0};
        REQUIRE(open_pairs(&w, "cpu", 1, 40, 0));
        if (k == 1) change_a_weight(&w);
        for (int f = 0; f < 2 && k; f++) {
            snprintf(path, sizeof path, "%s/reference%s.safetensors", folder, f ? ".validation" : "");
            CHECK((remove(path) == 0) == (k == 1)); /* the refused run writes no file */
        }
        CHECK((fit_pairs(&w, folder, k > 0, &x, &finished) == TT_OK) == (k != 1) && finished == (k == 2));
        if (k == 1) CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "a run whose reference is that of another model");
        close_pairs(&w);
    }
}

/* A file of another length, of another model or with a wrong byte is refused. */
TEST(references_that_are_refused)
{
    char path[1100], folder[1024];
    preferring w;
    size_t n;
    snprintf(folder, sizeof folder, "%s", test_folder());
    snprintf(path, sizeof path, "%s/r.safetensors", folder);
    REQUIRE(open_pairs(&w, "cpu", 1, 40, 0));
    const tt_source *source = tt_token_loader_source(w.l);
    CHECK(tt_trainer_reference(w.r, source, folder, "r.safetensors") == TT_OK);
    for (int64_t k = 0; k < source->pairs; k++) CHECK(isfinite(source->reference[k]));
    float *first = (float *)calloc((size_t)source->pairs, sizeof *first);
    REQUIRE(first);
    memcpy(first, source->reference, sizeof *first * (size_t)source->pairs);
    close_pairs(&w);
    char *bytes = test_read(path, &n);
    REQUIRE(bytes);
    for (int k = 0; k < 6; k++) {
        static const char *const errors[] = {"", "pairs that were cut to another length",
            "is that of another model", "the reference is damaged", "r.safetensors",
            "is that of another model"};
        static const tt_status codes[] = {TT_OK, TT_ERR_ARGUMENT, TT_ERR_ARGUMENT, TT_ERR_FORMAT,
                                          TT_ERR_FORMAT, TT_ERR_ARGUMENT};
        REQUIRE(open_pairs(&w, "cpu", 1, k == 1 ? 12 : 40, k == 2 ? 2 : 0));
        source = tt_token_loader_source(w.l);
        if (k == 5) { /* a model with the same names and other weights */
            bytes[n - 40] ^= 1;
            change_a_weight(&w);
        }
        if (k == 3) bytes[n - 40] ^= 1;
        if (k >= 3) test_write(path, bytes, k == 4 ? n / 2 : n); /* 3: a wrong byte; 4: half of the file */
        const tt_status status = tt_trainer_reference(w.r, source, folder, "r.safetensors");
        CHECK(status == codes[k]);
        if (k) CHECK(strstr(tt_error(w.ctx), errors[k]) && strstr(tt_error(w.ctx), path));
        else CHECK(memcmp(first, source->reference, sizeof *first * (size_t)source->pairs) == 0);
        close_pairs(&w);
    }
    free(first);
    free(bytes);
}

/* Computing, writing and reading the reference fails cleanly wherever memory runs out. */
TEST(references_without_memory)
{
    char path[1100], folder[1024];
    preferring w;
    snprintf(folder, sizeof folder, "%s", test_folder());
    snprintf(path, sizeof path, "%s/r.safetensors", folder);
    REQUIRE(open_pairs(&w, "cpu", 1, 40, 0));
    const tt_source *source = tt_token_loader_source(w.l);
    for (int reads = 0; reads < 2; reads++) {
        tt_status status = TT_ERR_MEMORY;
        for (long fail_at = 1; status != TT_OK && fail_at < 1000; fail_at++) {
            for (int64_t k = 0; k < source->pairs; k++) source->reference[k] = NAN;
            if (!reads) remove(path);
            w.a.fail_at = w.a.calls + fail_at;
            status = tt_trainer_reference(w.r, source, folder, "r.safetensors");
            w.a.fail_at = 0;
            CHECK(status == TT_OK || (status == TT_ERR_MEMORY && *tt_error(w.ctx)));
        }
        CHECK(status == TT_OK);
        for (int64_t k = 0; k < source->pairs; k++) CHECK(isfinite(source->reference[k]));
    }
    close_pairs(&w);
}

/* Returns how many instructions of a program compute logits of answers, some rows at a time. */
static int chunked_losses(const tt_program *p)
{
    int n = 0;
    for (int k = 0; k < p->built.t->n_code; k++) n += p->built.t->code[k].op == TT__OP_LINEAR_TOKEN_LOSSES;
    return n;
}

/* With a large vocabulary the logits never exist as a whole: training computes them twice, some rows at a
   time. */
TEST(logits_of_answers_are_not_stored)
{
    enum { ROWS = 640, VOCABULARY = 30000 };
    for (int lora = 0; lora < 2; lora++) {
        test_allocator a;
        tt_lm m;
        tt_context *ctx = test_open(&a);
        tt_lm_config c = tt_lm_config_sized("llama", 1, 24, 3);
        tt_train_options o = tt_train_options_default();
        c.vocab_size = VOCABULARY;
        REQUIRE(tt_lm_new(ctx, &m, &c) == TT_OK && (!lora || tt_lm_lora(&m, NULL) == TT_OK));
        o.max_seqs = 16;
        o.max_tokens = 2 * ROWS;
        o.max_masked = ROWS;
        o.schedule.total_steps = 1;
        const tt_model model = tt_lm_preference_model(&m);
        tt_trainer *r = tt_trainer_new(ctx, &model, &o);
        if (!CHECK(r != NULL)) fprintf(stderr, "%s\n", tt_error(ctx));
        REQUIRE(r);
        CHECK(chunked_losses(r->train) == 2 && chunked_losses(r->eval) == 1);
        tt_trainer_free(r);
        o.label_smoothing = 0.1f;
        CHECK(!tt_trainer_new(ctx, &model, &o));
        CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "label_smoothing is 0.1, but pairs of answers have none");
        o.label_smoothing = 0;
        o.beta = 0;
        CHECK(!tt_trainer_new(ctx, &model, &o));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "beta = 0; expected a finite number above 0");
        o.beta = 0.1f;
        o.features_once = true;
        CHECK(!tt_trainer_new(ctx, &model, &o));
        CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "features_once excludes pairs of answers");
        tt_lm_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}
