/* Tests of states of programs that the caller steps without a trainer. */
#pragma once

/* --------------------------------------------------------------------------------------- programs by hand */

typedef struct byhand {
    test_allocator a;
    tt_context *ctx;
    tt_tape *t;
    tt_program *p;
    tt_value x, y, loss;
} byhand;

static bool open_byhand(byhand *h, int width, const tt_compile_options *o)
{
    const int64_t d1[] = {width, 4}, d2[] = {3, width}, n = width;
    const tt_init normal = {TT_INIT_NORMAL, 0.5f};
    memset(h, 0, sizeof *h);
    h->ctx = test_open(&h->a);
    tt_param *up = tt_param_new(h->ctx, "up", 2, d1, normal),
             *bias = tt_param_new(h->ctx, "bias", 1, &n, normal);
    tt_param *down = tt_param_new(h->ctx, "down", 2, d2, normal);
    h->t = tt_tape_new(h->ctx);
    h->x = tt_input(h->t, "x", TT_F32, 8, 4);
    h->y = tt_input(h->t, "y", TT_I32, 8, 1);
    tt_value hidden = tt_dropout(h->t, tt_gelu(h->t, tt_linear(h->t, h->x, up, bias)), 0.3f);
    h->loss = tt_cross_entropy(h->t, tt_linear(h->t, hidden, down, NULL), h->y, NULL);
    h->p = tt_compile(h->t, h->loss, o);
    if (!h->p) CHECK_ERROR(h->ctx, TT_OK, "a program");
    return h->p != NULL;
}

static void close_byhand(byhand *h)
{
    tt_program_free(h->p);
    tt_tape_free(h->t);
    TEST_CLOSE(h->ctx, &h->a);
}

/* Runs steps `from` to `to` - 1, skipped steps included. A step's data depends on its number. */
static void byhand_steps(byhand *h, int from, int to, bool accumulate, tt_stats *s)
{
    for (int step = from; step < to; step++)
        for (int micro = 0; micro < 1 + 2 * accumulate; micro++) {
            uint64_t random = (uint64_t)(step * 10 + micro + 1);
            float x[8 * 4];
            int32_t y[8];
            for (int k = 0; k < 32; k++) x[k] = (float)(test_random(&random) % 1000) / 500 - 1;
            for (int k = 0; k < 8; k++) y[k] = (int32_t)(test_random(&random) % 3);
            CHECK(tt_set(h->p, h->x, x, 8) == TT_OK && tt_set(h->p, h->y, y, 8) == TT_OK);
            if (!accumulate) CHECK(tt_step(h->p, 0.01f, s) == TT_OK);
            else CHECK(tt_micro_step(h->p, s) == TT_OK && (micro < 2 || tt_update(h->p, 0.01f, s) == TT_OK));
        }
}

TEST(a_program_by_hand_is_saved_and_goes_on)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};
    for (int k = 0; k < 20; k++) {
        const bool accumulate = k / 5 % 2;
        char half[1024], whole[1024], resumed[1024];
        byhand a, b, c;
        tt_stats s, t;
        tt_compile_options o = tt_compile_options_default();
        o.precision = precisions[k % 5];
        o.accumulate = accumulate;
        o.optimizer.kind = k / 5 <= 1 ? TT_SGD : k / 5 == 2 ? TT_ADAM : TT_ADAMW;
        o.optimizer.momentum = k / 5 == 1 ? 0.9f : 0;
        o.optimizer.clip_norm = 1;
        o.loss_scale.init = 0x1p40f; /* with 16-bit floats the first steps are skipped */
        o.loss_scale.interval = 2;
        snprintf(half, sizeof half, "%s", test_path(test_folder(), "half"));
        snprintf(whole, sizeof whole, "%s", test_path(test_folder(), "whole"));
        snprintf(resumed, sizeof resumed, "%s", test_path(test_folder(), "resumed"));
        if (!open_byhand(&a, 6, &o) || !open_byhand(&b, 6, &o) || !open_byhand(&c, 6, &o)) return;
        byhand_steps(&a, 0, 40, accumulate, &s);
        CHECK(tt_program_save(a.p, whole) == TT_OK && tt_program_steps(a.p) == s.step && s.step > 5);
        CHECK((s.skipped > 0) == (k % 5 >= 3));
        byhand_steps(&b, 0, 13, accumulate, &t);
        CHECK(tt_program_save(b.p, half) == TT_OK);
        CHECK(tt_program_load(c.p, half) == TT_OK && tt_program_steps(c.p) == t.step);
        byhand_steps(&c, 13, 40, accumulate, &t);
        CHECK(memcmp(&s, &t, sizeof s) == 0);
        CHECK(tt_program_save(c.p, resumed) == TT_OK && same_files(whole, resumed));
        close_byhand(&a);
        close_byhand(&b);
        close_byhand(&c);
    }
}

/* Programs train one parameter (first, middle or last) or all parameters. */
TEST(states_of_programs_that_train_one_parameter)
{
    char path[1024], again[1024];
    byhand a, b;
    tt_stats s;
    const tt_compile_options o = tt_compile_options_default();
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "one"));
    snprintf(again, sizeof again, "%s", test_path(test_folder(), "again"));
    static const char *const trained[] = {"up", "bias", "down", "*"};
    for (int k = 0; k < TEST_COUNT(trained); k++) {
        byhand *const both[2] = {&a, &b};
        for (int n = 0; n < 2; n++) {
            if (!open_byhand(both[n], 6, &o)) return;
            tt_program_free(both[n]->p);
            tt_param_freeze(both[n]->ctx, "*", true);
            tt_param_freeze(both[n]->ctx, trained[k], false);
            both[n]->p = tt_compile(both[n]->t, both[n]->loss, &o);
        }
        byhand_steps(&a, 0, 3, false, &s);
        CHECK(tt_program_save(a.p, path) == TT_OK && tt_program_load(b.p, path) == TT_OK);
        byhand_steps(&a, 3, 5, false, &s);
        byhand_steps(&b, 3, 5, false, &s);
        CHECK(tt_program_save(a.p, path) == TT_OK && tt_program_save(b.p, again) == TT_OK);
        CHECK(same_files(path, again));
        close_byhand(&a);
        close_byhand(&b);
    }
}

TEST(states_that_a_program_refuses)
{
    char path[1024], bad[1024], before[1024], after[1024], *bytes;
    byhand a, b;
    size_t n;
    tt_stats s;
    tt_compile_options o = tt_compile_options_default(), other;
    o.accumulate = true;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "state"));
    snprintf(bad, sizeof bad, "%s", test_path(test_folder(), "bad.safetensors"));
    snprintf(before, sizeof before, "%s", test_path(test_folder(), "before"));
    snprintf(after, sizeof after, "%s", test_path(test_folder(), "after"));
    if (!open_byhand(&a, 6, &o)) return;
    byhand_steps(&a, 0, 3, true, &s);
    CHECK(tt_program_save(a.p, path) == TT_OK);
    byhand_steps(&a, 3, 5, true, &s);
    CHECK(tt_program_save(a.p, before) == TT_OK);
    bytes = test_read(path, &n);
    for (int k = 0; k < 6; k++) { /* the state's file is cut off */
        const size_t keep[] = {0, 7, 100, n / 2, n - 8, n - 1};
        test_write(bad, bytes, keep[k]);
        CHECK(tt_program_load(a.p, bad) == TT_ERR_FORMAT);
        CHECK_ERROR(a.ctx, TT_ERR_FORMAT, "bad.safetensors'");
    }
    free(bytes);
    for (int k = 0; k < 5; k++) {
        static const char *const errors[] = {
            "tensor 'up' is F32 of 112 bytes, but this run has F32 of 96", "was made with another optimizer",
            "was made with another precision than '32-true'", "has no tensor 'up'", NULL};
        other = o;
        if (k == 1) other.optimizer.kind = TT_SGD;
        if (k == 2) other.precision = "bf16-true";
        if (k == 4) other.optimizer.beta1 = 0.5f; /* only logs a warning */
        if (!open_byhand(&b, k == 0 ? 7 : 6, &other)) return;
        if (k == 3) { /* this program trains other parameters */
            tt_program_free(b.p);
            tt_param_freeze(b.ctx, "up", true);
            b.p = tt_compile(b.t, b.loss, &other);
        }
        CHECK(tt_program_save(b.p, bad) == TT_OK);
        close_byhand(&b);
        if (k == 4) break;
        CHECK(tt_program_load(a.p, bad) != TT_OK);
        CHECK_ERROR(a.ctx, k % 3 ? TT_ERR_ARGUMENT : TT_ERR_STATE, errors[k]);
        CHECK_ERROR(a.ctx, tt_error_code(a.ctx), "bad.safetensors'");
        CHECK(tt_program_save(a.p, after) == TT_OK && same_files(before, after)); /* nothing has changed */
    }
    a.ctx->options.logger.log = keep_warning;
    warned[0] = 0;
    CHECK(tt_program_load(a.p, bad) == TT_OK &&
          strstr(warned, "bad.safetensors' was made with other options"));
    warned[0] = 0;
    CHECK(tt_program_load(a.p, path) == TT_OK && !warned[0] && tt_program_steps(a.p) == 3);

    float x[32] = {0};
    int32_t y[8] = {0};
    CHECK(tt_set(a.p, a.x, x, 8) == TT_OK && tt_set(a.p, a.y, y, 8) == TT_OK &&
          tt_micro_step(a.p, NULL) == TT_OK);
    CHECK(tt_program_save(a.p, after) == TT_ERR_ARGUMENT);
    CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "between steps, but not between the micro-batches");
    CHECK(tt_program_load(a.p, path) == TT_OK); /* the load forgets the micro-batch that ran */
    CHECK(tt_program_save(a.p, after) == TT_OK && same_files(path, after));
    close_byhand(&a);
    other = o;
    other.train = false;
    if (!open_byhand(&a, 6, &other)) return;
    CHECK(tt_program_save(a.p, after) == TT_ERR_ARGUMENT && tt_program_load(a.p, path) == TT_ERR_ARGUMENT);
    CHECK_ERROR(a.ctx, TT_ERR_ARGUMENT, "this program does not train");
    close_byhand(&a);
}

/* A program of the same tape can load a trainer's state. A trainer refuses a program's state, because the
   state has no progress. */
TEST(a_trainers_state_in_a_program)
{
    char path[1024], again[1024];
    own w;
    tt_batch b;
    bool more;
    const tt_metric none = {NULL, NULL, false, NULL};
    tt_compile_options o = tt_compile_options_default();
    tt_train_options to = tt_train_options_default();
    tt_value output;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "state"));
    snprintf(again, sizeof again, "%s", test_path(test_folder(), "again"));
    if (!open_own(&w, false, none)) return;
    memset(&b, 0, sizeof b);
    for (int k = 0; k < 4; k++)
        CHECK(own_next(&w, &b, &more) == TT_OK && more && tt_train_batch(w.r, &b, NULL, NULL) == TT_OK);
    CHECK(tt_trainer_save(w.r, path, NULL) == TT_OK && tt_trainer_load(w.r, path, NULL) == TT_OK);
    to.max_seqs = OWN_ROWS;
    o.accumulate = true;
    o.optimizer = to.compile.optimizer;
    tt_tape *t = tt_tape_new(w.ctx);
    tt_program *p = tt_compile(t, own_record(&w, t, &to, &output), &o);
    REQUIRE(p != NULL);
    w.ctx->options.logger.log = keep_warning;
    warned[0] = 0;
    CHECK(tt_program_load(p, path) == TT_OK && tt_program_steps(p) == 2 && !warned[0]);
    CHECK(tt_program_save(p, again) == TT_OK && tt_trainer_load(w.r, again, NULL) == TT_ERR_STATE);
    CHECK_ERROR(w.ctx, TT_ERR_STATE, "has no tensor 'tinytrain.progress'");
    tt_program_free(p);
    tt_tape_free(t);
    close_own(&w);
}
