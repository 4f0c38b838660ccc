/* Tests of lost devices, and of ops and calls that fail. */
#pragma once

#ifdef TT_EMULATE
/* After an error that ends all work on a device, every call fails with the first message, even if CUDA has
   cleared the error. */
TEST(a_lost_device_says_so)
{
    static const int errors[] = {700, 719, 716};
    for (int k = 0; k < TEST_COUNT(errors); k++) {
        test_allocator a;
        small_net net;
        tt_stats stats;
        float w[5 * 4];
        char first[1024];
        emu_configure(1, (size_t)16 << 20, 1, 1);
        tt_context *ctx = test_open(&a);
        CHECK(small_open(ctx, &net, false) == TT_OK && small_step(&net, 0, &stats) == TT_OK);
        emu_inject_fault_into("cudaStreamSynchronize", 1, errors[k], 1);
        CHECK(small_step(&net, 1, &stats) == TT_ERR_DEVICE);
        snprintf(first, sizeof first, "%s", tt_error(ctx));
        CHECK(strstr(first, "in which CUDA can do nothing more") &&
              strstr(first, "TINYTRAIN_CUDA_SYNC"));
        CHECK(small_step(&net, 2, &stats) == TT_ERR_DEVICE && strcmp(tt_error(ctx), first) == 0);
        CHECK(tt_param_get(net.w, w) == TT_ERR_DEVICE && strcmp(tt_error(ctx), first) == 0);
        CHECK(tt_param_set(net.w, w) == TT_ERR_DEVICE && strcmp(tt_error(ctx), first) == 0);
        small_close(&net);
        TEST_CLOSE(ctx, &a);
        check_nothing_left(k, 1);
    }
}

/* With TINYTRAIN_CUDA_SYNC=1 the host waits for each op, so that an error names the op that caused it. */
TEST(an_op_that_fails_is_named)
{
    static const char *const ops[] = {"run of embedding, whose result has 6 rows and 4 columns",
                                      "run of add, ", "run of layernorm, "};
    setenv("TINYTRAIN_CUDA_SYNC", "1", 1);
    for (int k = 0; k < TEST_COUNT(ops); k++) {
        test_allocator a;
        small_net net;
        tt_stats stats;
        int lines = 0;
        emu_configure(1, (size_t)16 << 20, 1, 1);
        tt_context_options o = test_options(&a);
        o.logger.user = &lines;
        o.logger.log = count_log;
        tt_context *ctx = tt_open(&o);
        CHECK(small_open(ctx, &net, false) == TT_OK && small_step(&net, 0, &stats) == TT_OK &&
              small_step(&net, 1, &stats) == TT_OK);
        CHECK(emu_get_counts().graph_launches == 0 && lines == 1);
        CHECK(small_set(&net, USUAL_ROWS, 0) == TT_OK);
        emu_inject_fault_into("cudaStreamSynchronize", k + 1, 700, 1);
        CHECK(tt_step(net.p, 0.1f, &stats) == TT_ERR_DEVICE);
        CHECK_ERROR(ctx, TT_ERR_DEVICE, ops[k]);
        small_close(&net);
        TEST_CLOSE(ctx, &a);
    }
    unsetenv("TINYTRAIN_CUDA_SYNC");
}

/* Runs the small program once for each of its calls of CUDA, from opening to closing. In run n, call n fails:
   alone, or with all later calls. A run that fails says why, and a run that succeeds has the right results.
   After a single failure the program continues. */
static void sweep(long count)
{
    small_result reference;
    long tolerated = 0, n = 0;
    for (bool reached = true; reached; n++) { /* n = 0: no call fails */
        test_allocator a;
        small_net net;
        small_result result;
        tt_stats stats;
        memset(&net, 0, sizeof net);
        memset(&result, 0, sizeof result);
        emu_configure(1, (size_t)16 << 20, 1, (uint64_t)n);
        tt_context *ctx = test_open(&a);
        if (n) emu_inject_fault(n, count == 1 ? FAULT : LOST, count);
        tt_status status = small_run(ctx, &net, &result);
        if (n == 0) reference = result;
        if (status == TT_OK) {
            tolerated += n > 0 && emu_api_calls() >= n; /* later calls belong to closing */
            if (!same_results(&result, &reference)) fault_failed(n, count, "TT_OK", "and wrong results");
        } else if ((status != TT_ERR_DEVICE && status != TT_ERR_MEMORY) || tt_error_code(ctx) != status ||
                   !names_the_fault(tt_error(ctx))) {
            fault_failed(n, count, tt_status_name(status), tt_error(ctx));
        } else if (count == 1 && (small_step(&net, 0, &stats) != TT_OK || !(stats.loss > 0))) {
            fault_failed(n, count, "the next step", tt_error(ctx));
        }
        small_close(&net);
        TEST_CLOSE(ctx, &a);
        reached = n == 0 || emu_api_calls() >= n;
        check_nothing_left(n, count);
    }
    CHECK(n > 200 && tolerated < n / 2); /* most calls that fail end the run */
}

TEST(any_call_may_fail_once) /* the call may also be a copy between host and device */
{
    offload = everything;
    sweep(1);
    offload = NULL;
}

TEST(any_call_may_fail_for_ever)
{
    update = "host";
    reads_later = true;
    sweep(1L << 40);
    reads_later = false;
    update = NULL;
}

/* Any call may fail while products are timed. The step then fails with a message or has the right results.
   The next step succeeds, and nothing is leaked. */
TEST(any_call_may_fail_while_tuning)
{
    for (int endless = 0; endless < 2; endless++) {
        static tuned_run r;
        long n = 1;
        r.tune = "on";
        r.to = 1;
        r.faults = endless ? 1L << 40 : 1;
        /* skips calls, because most repeat earlier calls */
        for (r.fault_met = true; r.fault_met; n += endless ? 501 : 151) {
            r.fault = n;
            run_tuned(&r);
        }
        CHECK(n > 1500);
    }
}

/* Any call may fail while a trainer's state and its model are saved and loaded: the call fails with a
   message. A failed save leaves no state file. */
TEST(any_call_may_fail_while_saving)
{
    char state[1100], folder[1100];
    snprintf(state, sizeof state, "%s", test_path(test_folder(), "state.safetensors"));
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "model"));
    for (int endless = 0; endless < 2; endless++) {
        const long count = endless ? 1L << 40 : 1;
        long n = 0;
        /* Tries only some calls, because reading and writing all parameters makes many equal calls. */
        for (bool reached = true; reached; n += n < 6 ? 1 : 29) {
            trained t;
            tt_progress progress;
            memset(&progress, 0, sizeof progress);
            emu_configure(1, (size_t)16 << 20, 1, (uint64_t)n);
            if (!open_training(&t, "cuda", false, 0, false)) { close_training(&t); return; }
            CHECK(tt_allocate(t.trainer->train) == TT_OK);
            const long calls = emu_api_calls();
            if (n) emu_inject_fault(n, endless ? LOST : FAULT, count);
            tt_status status = tt_trainer_save(t.trainer, state, &progress);
            const bool saved = status == TT_OK;
            CHECK(saved == (access(state, F_OK) == 0));
            if (saved) status = tt_bert_save(&t.text, folder);
            if (status == TT_OK) status = tt_trainer_load(t.trainer, state, &progress);
            const bool failed = n > 0 && emu_api_calls() >= calls + n;
            if (status != TT_OK && (status != TT_ERR_DEVICE || !names_the_fault(tt_error(t.ctx))))
                fault_failed(n, count, tt_status_name(status), tt_error(t.ctx));
            CHECK(status != TT_OK || !failed || !endless);
            remove(state);
            close_training(&t);
            reached = n == 0 || emu_api_calls() >= calls + n;
            check_nothing_left(n, count);
        }
        CHECK(n > 300);
    }
}
#else
TEST(a_lost_device_says_so) { NEEDS_EMULATOR; }
TEST(an_op_that_fails_is_named) { NEEDS_EMULATOR; }
TEST(any_call_may_fail_once) { NEEDS_EMULATOR; }
TEST(any_call_may_fail_for_ever) { NEEDS_EMULATOR; }
TEST(any_call_may_fail_while_saving) { NEEDS_EMULATOR; }

TEST(any_call_may_fail_while_tuning) { NEEDS_EMULATOR; }
#endif
