/* Tests of steps that do not wait for their results, and of graphs of steps. */
#pragma once

#ifdef TT_EMULATE
/* -------------------------------------------------------------------------------------------------- waits */

static emu_counts since(emu_counts before) /* returns the counts since `before` */
{
    emu_counts now = emu_get_counts();
    now.host_syncs -= before.host_syncs;
    now.pageable_async -= before.pageable_async;
    now.allocations -= before.allocations;
    now.graph_launches -= before.graph_launches;
    now.kernels -= before.kernels;
    return now;
}

/* Once every shape has occurred twice, the host waits once per step or micro-batch whose results are asked
   for, and otherwise only for events. No step allocates. */
TEST(a_step_waits_once_for_its_results)
{
    for (int accumulate = 0; accumulate < 2; accumulate++)
        for (int asked = 0; asked < 2; asked++) {
            trained t;
            tt_stats stats;
            emu_counts n;
            emu_configure(1, (size_t)64 << 20, 1, 4);
            if (!open_training(&t, "cuda", true, 0, accumulate)) { close_training(&t); return; }
            for (int k = 0; k < 4; k++) CHECK(one_step(&t, k, true, accumulate, &stats) == TT_OK);
            n = emu_get_counts();
            for (int k = 4; k < 8; k++)
                CHECK(one_step(&t, k, true, accumulate, asked ? &stats : NULL) == TT_OK);
            n = since(n);
            CHECK_NEAR((double)n.host_syncs, !asked ? 0 : accumulate ? 4 * 3 : 4, 0);
            /* Each micro-batch, the norm and the update have a graph. */
            CHECK_NEAR((double)n.graph_launches, accumulate ? 4 * 4 : 4 * 3, 0);
            CHECK(n.pageable_async == 0 && n.allocations == 0 && n.kernels > 0);
            close_training(&t);
        }
}
#endif

/* The host does not wait for micro-batches whose results are not asked for. The next inputs must not
   overwrite inputs that are still being copied: the bits equal those with a wait after each micro-batch, in
   every order that CUDA allows. */
TEST(micro_steps_that_do_not_wait_keep_their_inputs)
{
    for (int scheduler = 0; scheduler < SCHEDULERS; scheduler++) {
        float w[2][5 * 4];
        for (int asked = 0; asked < 2; asked++) {
            test_allocator a;
            small_net net;
            tt_stats stats;
            start(1, (size_t)16 << 20, 1);
            schedule(scheduler);
            tt_context *ctx = test_open(&a);
            bool ok = CHECK(small_open(ctx, &net, true) == TT_OK);
            /* Each step has five micro-batches, whose inputs are set twice. */
            for (int k = 0; k < 3 * 5 && ok; k++) {
                ok = CHECK(small_set(&net, 5, k + 7) == TT_OK && small_set(&net, USUAL_ROWS, k) == TT_OK);
                ok = ok && CHECK(tt_micro_step(net.p, asked ? &stats : NULL) == TT_OK);
                if (k % 5 == 4) ok = ok && CHECK(tt_update(net.p, 0.1f, NULL) == TT_OK);
            }
            CHECK(tt_param_get(net.w, w[asked]) == TT_OK);
            small_close(&net);
            TEST_CLOSE(ctx, &a);
        }
        CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0);
    }
}

/* Steps whose results are read one step later give the bits, statistics and counts of steps for which the
   host waits. Copies for the next step do not disturb a step in flight. */
TEST(steps_are_read_one_later)
{
    for (int scheduler = 0; scheduler < SCHEDULERS; scheduler++) {
        float w[2][5 * 4];
        tt_stats stats[2][6];
        for (int asked = 0; asked < 2; asked++) {
            test_allocator a;
            small_net net;
            start(1, (size_t)16 << 20, 7);
            schedule(scheduler);
            tt_context *ctx = test_open(&a);
            bool ok = CHECK(small_open(ctx, &net, false) == TT_OK);
            for (int k = 0; k < 6 && ok; k++) {
                ok = CHECK(small_set(&net, 5, k + 7) == TT_OK && small_set(&net, USUAL_ROWS, k) == TT_OK);
                ok = ok && CHECK(tt_step(net.p, 0.1f, asked ? &stats[1][k] : NULL) == TT_OK);
                CHECK(tt_program_steps(net.p) == k + 1 && net.p->unread.any == !asked);
                CHECK(net.p->reads == k + asked);
                if (!asked && k > 0) stats[0][k - 1] = net.p->done;
            }
            if (!asked) CHECK(tt_wait(net.p, &stats[0][5]) == TT_OK && !net.p->unread.any);
            CHECK(tt_param_get(net.w, w[asked]) == TT_OK);
            small_close(&net);
            TEST_CLOSE(ctx, &a);
        }
        CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0);
        for (int k = 0; k < 6; k++) {
            const tt_stats *x = &stats[0][k], *y = &stats[1][k];
            CHECK(x->loss == y->loss && x->targets == y->targets && x->correct == y->correct);
            CHECK(x->grad_norm == y->grad_norm && x->flops == y->flops && x->step == y->step);
        }
    }
}

/* If a loss is not finite, the call after its step returns the error and does nothing else. The message
   equals that of a step for which the host waits, and parameters are unchanged. */
TEST(errors_are_read_one_later)
{
    static const char *const after[] = {"at once", "a step", "tt_wait", "tt_get", "tt_program_save"};
    char sentence[1100] = "";
    float x[USUAL_ROWS * 4] = {NAN};
    for (int k = 0; k < TEST_COUNT(after); k++) {
        test_allocator a;
        small_net net;
        tt_stats stats;
        float before[5 * 4], w[5 * 4], out[USUAL_ROWS * 5];
        tt_status status = TT_OK;
        start(1, (size_t)16 << 20, 7);
        tt_context *ctx = test_open(&a);
        CHECK(small_open(ctx, &net, false) == TT_OK && small_step(&net, 0, NULL) == TT_OK);
        CHECK(tt_param_get(net.w, before) == TT_OK && small_set(&net, USUAL_ROWS, 0) == TT_OK);
        CHECK(tt_set(net.p, net.x, x, USUAL_ROWS) == TT_OK);
        status = tt_step(net.p, 0.1f, k ? NULL : &stats);
        CHECK(status == (k ? TT_OK : TT_ERR_NUMERIC));
        if (k == 1) status = small_step(&net, 1, &stats);
        if (k == 2) status = tt_wait(net.p, &stats);
        if (k == 3) status = tt_get(net.p, net.out, out, TEST_COUNT(out));
        if (k == 4) status = tt_program_save(net.p, test_path(test_folder(), "state.safetensors"));
        CHECK(status == TT_ERR_NUMERIC && tt_program_steps(net.p) == 1);
        if (k == 0) snprintf(sentence, sizeof sentence, "%s", tt_error(ctx));
        if (!CHECK(strcmp(tt_error(ctx), sentence) == 0)) printf("%s: %s\n", after[k], tt_error(ctx));
        CHECK(tt_param_get(net.w, w) == TT_OK && memcmp(w, before, sizeof w) == 0);
        CHECK(tt_wait(net.p, &stats) == TT_OK && stats.step == 1); /* the error was reported only once */
        CHECK(small_step(&net, 1, &stats) == TT_OK && stats.step == 2);
        small_close(&net);
        TEST_CLOSE(ctx, &a);
    }
}

/* A source of few steps. bad: the step, from 0, whose only target is ignored; -1: none. */
typedef struct few_steps { made_batch m; int next, bad; } few_steps;
enum { FEW_STEPS = 5 };

static tt_status few_seek(void *self, int64_t epoch, int64_t step)
{
    (void)epoch;
    ((few_steps *)self)->next = (int)step;
    return TT_OK;
}

static tt_status few_next(void *self, tt_batch *b, bool *more)
{
    few_steps *f = (few_steps *)self;
    *more = f->next < FEW_STEPS;
    if (!*more) return TT_OK;
    make_batch(&f->m, f->next, false, true);
    for (int k = 0; k < MAX_SEQS && f->next == f->bad; k++) f->m.labels[k] = -100;
    f->next++;
    *b = f->m.b;
    return TT_OK;
}

typedef struct reported { double loss[FEW_STEPS + 1]; int n; bool in_turn; } reported;

static void tell(void *user, const tt_fit_event *e)
{
    reported *t = (reported *)user;
    t->in_turn = t->in_turn && e->step == t->n + 1 && t->n <= FEW_STEPS;
    if (t->n <= FEW_STEPS) t->loss[t->n++] = e->loss;
}

/* tt_fit reports each step once and in order, with the same statistics as if the host waited for each step.
   tt_fit also reports a failing step, and continues afterwards. */
TEST(fit_counts_each_step)
{
    for (int bad = -1; bad < FEW_STEPS; bad += 2) {
        static few_steps f;
        trained t;
        tt_stats stats;
        reported to = {{0}, 0, true};
        double sum = 0, targets = 0;
        bool finished;
        char folder[1100];
        start(1, (size_t)64 << 20, 2);
        snprintf(folder, sizeof folder, "%s%d", test_path(test_folder(), "fit"), bad + 1);
        tt_source source;
        memset(&source, 0, sizeof source);
        source.self = &f;
        source.seek = few_seek;
        source.next = few_next;
        source.steps = FEW_STEPS;
        source.max_seqs = MAX_SEQS;
        source.max_tokens = MAX_ROWS;
        tt_fit_options o = tt_fit_options_default();
        o.folder = folder;
        o.report = tell;
        o.user = &to;
        f.bad = bad;
        const int good = FEW_STEPS - (bad >= 0);
        if (!CHECK(open_training(&t, "cuda", false, 0.1f, false))) { close_training(&t); return; }
        CHECK(tt_fit(t.trainer, &source, NULL, &o, &finished) == TT_OK && finished);
        CHECK(to.n == FEW_STEPS && to.in_turn && tt_trainer_steps(t.trainer) == good);
        CHECK(tt_trainer_saved_steps(t.trainer) == good);
        close_training(&t);
        if (!CHECK(open_training(&t, "cuda", false, 0.1f, false))) { close_training(&t); return; }
        for (int k = 0; k < FEW_STEPS; k++) {
            if (k != bad) {
                CHECK(one_step(&t, k, false, false, &stats) == TT_OK);
                sum += stats.loss * stats.targets;
                targets += stats.targets;
            }
            CHECK(to.loss[k] == (targets > 0 ? sum / targets : 0));
        }
        close_training(&t);
    }
}

#ifdef TT_EMULATE
/* Runs steps of `lengths` different lengths in turn, `rounds` times over. Returns the number of graphs
   launched. */
static long graphs_of_lengths(int lengths, int rounds)
{
    test_allocator a;
    small_net net;
    emu_configure(1, (size_t)16 << 20, 1, 4); /* seed 4: the emulator starts operations in order */
    tt_context *ctx = test_open(&a);
    bool ok = CHECK(small_open(ctx, &net, false) == TT_OK);
    emu_counts before = emu_get_counts();
    for (int k = 0; k < lengths * rounds && ok; k++)
        ok = CHECK(small_set(&net, 1 + k % lengths, k) == TT_OK && tt_step(net.p, 0.1f, NULL) == TT_OK);
    small_close(&net);
    TEST_CLOSE(ctx, &a);
    return since(before).graph_launches;
}

/* The norm and the update have one graph each for all lengths. Forward and backward have a graph for each
   length that occurs again. If there are more lengths than graphs, some lengths keep their graphs. */
TEST(lengths_that_are_met_again_are_replayed)
{
    CHECK_NEAR((double)graphs_of_lengths(9, 3), 2 * (3 * 9 - 1) + 2 * 9, 0);
    CHECK_NEAR((double)graphs_of_lengths(200, 1), 2 * (200 - 1), 0);
    CHECK(graphs_of_lengths(100, 5) > 2 * (5 * 100 - 1) + 3 * 100 / 4);
}

/* A step's results are read before its parameters are updated, so that the next step can be launched
   meanwhile. */
TEST(results_are_there_before_the_update)
{
    test_allocator a;
    small_net net;
    emu_configure(1, (size_t)16 << 20, 1, EMU_LAZY);
    tt_context *ctx = test_open(&a);
    bool ok = CHECK(small_open(ctx, &net, false) == TT_OK);
    for (int k = 0; k < 4 && ok; k++) {
        ok = CHECK(small_set(&net, USUAL_ROWS, k) == TT_OK && tt_step(net.p, 0.1f, NULL) == TT_OK);
        ok = ok && CHECK(tt__read_unread(net.p) == TT_OK);
        const long before = emu_get_counts().kernels;
        ok = ok && CHECK(net.p->settings.kind->backend->wait(net.p->settings.group->device[0]) == TT_OK);
        CHECK(emu_get_counts().kernels > before);
    }
    small_close(&net);
    TEST_CLOSE(ctx, &a);
}

static void count_log(void *user, tt_log_level level, const char *id, const char *message)
{
    *(int *)user += level == TT_LOG_WARNING && strcmp(id, "graph") == 0 &&
                      (strstr(message, "cudaError") || strstr(message, "TINYTRAIN_CUDA_SYNC"));
}

/* A device that cannot make graphs runs the instructions one by one, and logs one message. */
TEST(steps_go_on_without_graphs)
{
    static const char *const calls[] = {"cudaStreamBeginCapture", "cudaStreamEndCapture",
                                        "cudaGraphInstantiate"};
    small_result reference, result;
    memset(&reference, 0, sizeof reference);
    memset(&result, 0, sizeof result);
    for (int c = -1; c < TEST_COUNT(calls); c++) {
        test_allocator a;
        small_net net;
        int lines = 0;
        emu_configure(1, (size_t)16 << 20, 1, 1);
        tt_context_options o = test_options(&a);
        o.logger.user = &lines;
        o.logger.log = count_log;
        tt_context *ctx = tt_open(&o);
        if (c >= 0) emu_inject_fault_into(calls[c], 1, FAULT, 1L << 40);
        CHECK(small_run(ctx, &net, c < 0 ? &reference : &result) == TT_OK);
        CHECK(c < 0 || memcmp(&result, &reference, sizeof result) == 0);
        CHECK((emu_get_counts().graph_launches > 0) == (c < 0));
        CHECK_NEAR(lines, c >= 0, 0);
        small_close(&net);
        TEST_CLOSE(ctx, &a);
        check_nothing_left(c, 1);
    }
}

typedef struct kept_log { int lines; char text[1024]; } kept_log;

static void keep_log(void *user, tt_log_level level, const char *id, const char *message)
{
    kept_log *kept = (kept_log *)user;
    if (level != TT_LOG_WARNING || strcmp(id, "graph") != 0) return;
    kept->lines++;
    snprintf(kept->text, sizeof kept->text, "%s", message);
}

/* If a launch fails during capture, the program continues without graphs, and the warning has the launch's
   message, not the message of the end of the capture. If the device is lost, nothing continues: there is no
   warning, and the error has the launch's message. */
TEST(a_launch_that_fails_in_a_capture_is_named)
{
    for (int lost = 0; lost < 2; lost++) {
        test_allocator a;
        small_net net;
        tt_stats stats;
        kept_log kept = {0, ""};
        emu_configure(1, (size_t)16 << 20, 1, 1);
        tt_context_options o = test_options(&a);
        o.logger.user = &kept;
        o.logger.log = keep_log;
        tt_context *ctx = tt_open(&o);
        CHECK(small_open(ctx, &net, false) == TT_OK && small_step(&net, 0, &stats) == TT_OK);
        emu_inject_fault_into("a launch", 1, lost ? LOST : FAULT, 1);
        const tt_status status = small_step(&net, 1, &stats);
        const char *said = lost ? tt_error(ctx) : kept.text;
        CHECK(status == (lost ? TT_ERR_DEVICE : TT_OK) && kept.lines == !lost);
        if (!CHECK(strstr(said, "launch of embedding, whose result has 6 rows and 4 columns: ")))
            printf("'%s'\n", said);
        CHECK(!strstr(said, "end of a capture") && emu_get_counts().graph_launches == 0);
        CHECK(lost || small_step(&net, 2, &stats) == TT_OK);
        small_close(&net);
        TEST_CLOSE(ctx, &a);
    }
}
#else
TEST(a_launch_that_fails_in_a_capture_is_named) { NEEDS_EMULATOR; }
TEST(a_step_waits_once_for_its_results) { NEEDS_EMULATOR; }
TEST(lengths_that_are_met_again_are_replayed) { NEEDS_EMULATOR; }
TEST(results_are_there_before_the_update) { NEEDS_EMULATOR; }
TEST(steps_go_on_without_graphs) { NEEDS_EMULATOR; }
#endif
