/* Tests of contexts in parallel, allocations that fail, closing, messages. */
#pragma once

typedef struct job { pthread_t handle; double loss[6]; bool ok; } job;

static void *train_alone(void *arg)
{
    job *j = (job *)arg;
    test_allocator a;
    tt_context_options o = test_options(&a);
    model m;
    o.threads = 2;
    tt_context *ctx = tt_open(&o);
    tt_program *p = ctx && model_params(ctx) && model_record(ctx, &m)
                        ? model_compile(&m, true, "32-true", false)
                        : NULL;
    j->ok = p != NULL;
    for (int k = 0; k < 6 && j->ok; k++) {
        tt_stats stats;
        j->ok = model_set(&m, p, k) == TT_OK && tt_step(p, 0.01f, &stats) == TT_OK;
        j->loss[k] = stats.loss;
    }
    tt_program_free(p);
    if (ctx) tt_tape_free(m.t);
    tt_close(ctx);
    j->ok &= a.live == 0;
    return NULL;
}

TEST(contexts_in_parallel)
{
    job jobs[2], alone;
    train_alone(&alone);
    CHECK(alone.ok && alone.loss[5] < alone.loss[0]);
    for (int k = 0; k < 2; k++) REQUIRE(pthread_create(&jobs[k].handle, NULL, train_alone, &jobs[k]) == 0);
    for (int k = 0; k < 2; k++) pthread_join(jobs[k].handle, NULL);
    for (int k = 0; k < 2; k++) CHECK(jobs[k].ok && memcmp(jobs[k].loss, alone.loss, sizeof alone.loss) == 0);
}

/* ---- every allocation fails once ---- */

typedef struct scenario {
    test_allocator a;
    tt_context *ctx;
    model m;
    tt_program *train, *eval;
    tt_stats stats;
    float embedding[VOCAB * WIDTH];
} scenario;

static bool scenario_stage(scenario *s, int stage)
{
    switch (stage) {
    case 0: return model_params(s->ctx);
    case 1: return tt_param_set(tt_param_find(s->ctx, "embed.weight"), s->embedding) == TT_OK;
    case 2: {
        bool ok = model_record(s->ctx, &s->m);
        if (!ok) { tt_tape_free(s->m.t); s->m.t = NULL; }
        return ok;
    }
    case 3: return (s->train = model_compile(&s->m, true, "bf16-mixed", true)) != NULL;
    case 4: {
        tt_compile_options c = tt_compile_options_default();
        c.train = false;
        c.share = s->train;
        c.precision = "bf16-mixed";
        return (s->eval = tt_compile(s->m.t, s->m.loss, &c)) != NULL;
    }
    case 5: return tt_allocate(s->train) == TT_OK;
    case 6: return model_set(&s->m, s->train, 1) == TT_OK;
    case 7: return tt_micro_step(s->train, NULL) == TT_OK;
    case 8: return tt_update(s->train, 0.1f, NULL) == TT_OK;
    case 9: return model_set(&s->m, s->eval, 2) == TT_OK;
    case 10: return tt_run(s->eval, &s->stats) == TT_OK;
    default: return false;
    }
}

/* Runs the scenario while allocation number fail_at fails, and repeats the stage that fails. Returns the
   scenario's loss. *failed: whether an allocation failed. */
static double run_scenario(long fail_at, bool *failed)
{
    scenario s;
    captured log;
    uint64_t state = 3;
    int failures = 0;
    memset(&s, 0, sizeof s);
    memset(&log, 0, sizeof log);
    tt_context_options o = test_options(&s.a);
    s.a.fail_at = fail_at;
    o.verify = true;
    o.threads = 2;
    o.logger.log = capture;
    o.logger.user = &log;
    for (int k = 0; k < VOCAB * WIDTH; k++) s.embedding[k] = test_uniform(&state);
    s.ctx = tt_open(&o);
    if (!s.ctx) {
        CHECK(s.a.failed && log.level == TT_LOG_ERROR && strstr(log.message, "allocator returned NULL"));
        CHECK(s.a.live == 0);
        failures++;
        s.ctx = tt_open(&o);
    }
    for (int stage = 0; stage <= 10; stage++) {
        if (scenario_stage(&s, stage)) continue;
        failures++;
        CHECK_ERROR(s.ctx, TT_ERR_MEMORY, "out of memory");
        if (!CHECK(s.a.failed && scenario_stage(&s, stage))) break;
    }
    *failed = s.a.failed;
    CHECK(failures == (s.a.failed ? 1 : 0)); /* each failure is reported */
    tt_program_free(s.train);
    tt_program_free(s.eval);
    tt_tape_free(s.m.t);
    TEST_CLOSE(s.ctx, &s.a);
    return s.stats.loss;
}

TEST(every_allocation_may_fail)
{
    bool failed;
    double expected = run_scenario(0, &failed);
    CHECK(!failed && isfinite(expected) && expected > 0);
    long n = 1;
    for (;; n++) {
        /* A second try after the failure gives the result of a run without failure. */
        CHECK(run_scenario(n, &failed) == expected);
        if (!failed) break;
        REQUIRE(n < 5000);
    }
    CHECK(n > 60);
}

/* ---- memory that is left after closing; calls that print nothing ---- */

static void *left[4096];

static void *remember(void *user, size_t bytes, size_t alignment)
{
    void *memory = test__allocate(user, bytes, alignment);
    for (int k = 0; memory; k++) if (!left[k]) { left[k] = memory; break; }
    return memory;
}

static void forget(void *user, void *memory, size_t bytes)
{
    for (int k = 0; k < TEST_COUNT(left); k++) if (left[k] == memory) left[k] = NULL;
    test__release(user, memory, bytes);
}

TEST(closing_with_things_left_warns)
{
    test_allocator a;
    captured log;
    tt_context_options o = test_options(&a);
    model m;
    memset(&log, 0, sizeof log);
    o.logger.log = capture;
    o.logger.user = &log;
    o.allocator.allocate = remember;
    o.allocator.release = forget;
    tt_context *ctx = tt_open(&o);
    REQUIRE(ctx && model_params(ctx) && model_record(ctx, &m));
    tt_program *p = model_compile(&m, true, "32-true", false);
    REQUIRE(p && tt_allocate(p) == TT_OK && log.count == 0);
    tt_close(ctx);
    CHECK(log.count == 1 && log.level == TT_LOG_WARNING && strcmp(log.id, "close") == 0 &&
          strstr(log.message, "bytes are still allocated"));
    CHECK(a.live > 0);
    for (int k = 0; k < TEST_COUNT(left); k++) { free(left[k]); left[k] = NULL; }
}

static int redirect(int fd, FILE *to)
{
    int saved = dup(fd);
    fflush(stdout);
    fflush(stderr);
    dup2(fileno(to), fd);
    return saved;
}

static void restore(int fd, int saved)
{
    fflush(stdout);
    fflush(stderr);
    dup2(saved, fd);
    close(saved);
}

TEST(nothing_is_printed_but_by_the_logger)
{
    FILE *file = tmpfile();
    char text[512];
    REQUIRE(file != NULL);
    int out = redirect(1, file), err = redirect(2, file);
    {
        test_allocator a;
        model m;
        tt_stats stats;
        tt_context *ctx = test_open(&a);
        tt_context_options bad = test_options(&a);
        bad.threads = -1;
        tt_open(&bad);
        model_params(ctx);
        model_record(ctx, &m);
        tt_program *p = model_compile(&m, true, "bf16-true", false);
        tt_run(p, NULL);
        tt_step(p, 1, &stats);
        model_set(&m, p, 1);
        tt_step(p, 1, &stats);
        tt_param_new(ctx, "embed.weight", 9, NULL, init_of(TT_INIT_ONES, 1));
        tt_plan_text(p, text, sizeof text);
        tt_program_text(p, text, sizeof text);
        tt_program_free(p);
        tt_tape_free(m.t);
        tt_close(ctx);
    }
    fflush(stdout);
    fflush(stderr);
    long silent = ftell(file);
    fseek(file, 0, SEEK_END);
    silent = ftell(file);
    tt_context_options o = tt_context_options_default(); /* the default logger writes to stderr */
    o.threads = -1;
    tt_open(&o);
    restore(1, out);
    restore(2, err);
    rewind(file);
    size_t n = fread(text, 1, sizeof text - 1, file);
    text[n] = 0;
    fclose(file);
    CHECK(silent == 0);
    CHECK(strcmp(text, "tinytrain error [open]: threads is -1, but must be 0 (all) to 256\n") == 0);
}
