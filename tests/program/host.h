/* Tests of the host: options of a context, costs, threads, float modes, available memory. */
#pragma once

/* ------------------------------------------------------------------------------------------------ context */

TEST(context_options)
{
    tt_context_options o = tt_context_options_default();
    captured c;
    CHECK(o.threads == 0 && o.seed == 1 && o.isa == NULL && o.logger.log && o.allocator.allocate &&
          o.allocator.release && o.files.open);
    static const int bad[] = {-1, 257, INT_MAX, INT_MIN};
    o.logger.log = capture;
    o.logger.user = &c;
    for (int k = 0; k < TEST_COUNT(bad); k++) {
        char text[64];
        memset(&c, 0, sizeof c);
        o.threads = bad[k];
        CHECK(tt_open(&o) == NULL);
        snprintf(text, sizeof text, "threads is %d, but must be 0 (all) to 256", bad[k]);
        CHECK(c.count == 1 && c.level == TT_LOG_ERROR && strcmp(c.id, "open") == 0 &&
              strcmp(c.message, text) == 0);
    }
    static const double no_time[] = {0, -1, NAN};
    o.threads = 2;
    for (int k = 0; k < TEST_COUNT(no_time); k++) {
        memset(&c, 0, sizeof c);
        o.timeout = no_time[k];
        CHECK(tt_open(&o) == NULL);
        CHECK(c.count == 1 && strstr(c.message, "seconds, but must be above 0"));
    }
    o.timeout = 1;
    o.isa = "sse9";
    memset(&c, 0, sizeof c);
    CHECK(tt_open(&o) == NULL);
    CHECK(c.count == 1 && strstr(c.message, "'sse9'") && strstr(c.message, "portable, avx2, avx512 or neon"));
    static const char *const isas[] = {"portable", "avx2", "avx512", "neon"};
    for (int k = 0; k < 4; k++) {
        o.isa = isas[k];
        tt_context *ctx = tt_open(&o);
        CHECK(ctx != NULL || k > 0); /* a CPU may lack the instruction set */
        if (ctx)
            CHECK(strcmp(tt_isa(ctx), isas[k]) == 0 && tt_threads(ctx) == 2 && *tt_error(ctx) == 0 &&
                  tt_error_code(ctx) == TT_OK);
        tt_close(ctx);
    }
    o.isa = "portable";
    static const char *const bf16s[] = {"fast", "dot", "tiles", "convert"};
    for (int k = 0; k < 4; k++) {
        o.bf16 = bf16s[k];
        memset(&c, 0, sizeof c);
        tt_context *ctx = tt_open(&o);
        CHECK((ctx != NULL) == (k == 3)); /* portable kernels can only convert bf16 */
        CHECK(k == 3 || (c.count == 1 && strstr(c.message, bf16s[k]) && strstr(c.message, "convert") &&
                         strstr(c.message, "portable")));
        tt_close(ctx);
    }
    o.isa = o.bf16 = NULL;
    setenv("TINYTRAIN_ISA", "portable", 1);
    tt_context *ctx = tt_open(&o);
    CHECK(ctx && strcmp(tt_isa(ctx), "portable") == 0);
    tt_close(ctx);
    setenv("TINYTRAIN_ISA", "", 1);
    ctx = tt_open(&o);
    CHECK(ctx != NULL);
    tt_close(ctx);
    unsetenv("TINYTRAIN_ISA");
    ctx = tt_open(NULL);
    CHECK(ctx && tt_threads(ctx) >= 1 && tt_threads(ctx) <= 256);
    tt_close(ctx);
    tt_close(NULL);
    CHECK(strstr(tt_error(NULL), "tt_open failed") && tt_error_code(NULL) == TT_ERR_ARGUMENT);
    CHECK(strcmp(tt_status_name(TT_ERR_BUDGET), "TT_ERR_BUDGET") == 0 &&
          strcmp(tt_status_name((tt_status)99), "unknown status") == 0);
}

TEST(measured_peak_is_plausible)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    double peak = tt_measured_peak(ctx);
    CHECK(peak > 1e8 && peak < 1e13);
    CHECK(tt_measured_peak(ctx) == peak);
    TEST_CLOSE(ctx, &a);
}

TEST(costs_of_this_machine)
{
    static const char *const devices[] = {NULL, "cpu", "cpu*2"};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const tt_costs usual = tt_costs_default();
    tt_costs costs = usual;
    CHECK(tt__check_costs(ctx, &usual) == TT_OK);
    for (int k = 0; k < TEST_COUNT(devices); k++) {
        CHECK(tt_measure_costs(ctx, devices[k], &costs) == TT_OK);
        CHECK(tt__check_costs(ctx, &costs) == TT_OK);
        CHECK(costs.product_f32 != usual.product_f32 && costs.product_16 != usual.product_16);
        CHECK(costs.attention_f32 != usual.attention_f32 && costs.attention_16 != usual.attention_16);
        CHECK(costs.rows_f32 != usual.rows_f32 && costs.rows_16 != usual.rows_16);
        CHECK(costs.update_f32 != usual.update_f32 && costs.update_16 != usual.update_16);
        CHECK(costs.update_host != usual.update_host);
        CHECK(costs.memory != usual.memory && costs.launch != usual.launch);
        CHECK(costs.to_host != usual.to_host && costs.from_host != usual.from_host);
        /* only devices[2] has several ranks, between which costs are measured */
        CHECK((costs.between_ranks != usual.between_ranks) == (k == 2));
        CHECK((costs.barrier != usual.barrier) == (k == 2));
    }
    CHECK(ctx->n_params == 0 && !ctx->profile); /* measuring leaves no parameters and no profile */
    const tt_costs before = costs;
    CHECK(tt_measure_costs(ctx, "tpu", &costs) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "device 'tpu' is unknown");
    CHECK(tt_measure_costs(ctx, "cpu:1", &costs) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "device 'cpu:1' does not exist");
    CHECK(tt_measure_costs(ctx, "cuda:15", &costs) != TT_OK);
    CHECK(strstr(tt_error(ctx), "device 'cuda"));
    for (long n = 1; n < 1200; n = 4 * n + 1) { /* allocation n fails */
        a.fail_at = a.calls + n;
        const tt_status status = tt_measure_costs(ctx, NULL, &costs);
        CHECK(status == TT_OK || status == TT_ERR_MEMORY);
        if (status != TT_OK) CHECK(memcmp(&costs, &before, sizeof costs) == 0);
        a.fail_at = 0;
        costs = before;
    }
    TEST_CLOSE(ctx, &a);
}

typedef struct counting { int *hits; int threads; bool wrong; } counting;

static void count_task(void *arg, int64_t task, int thread)
{
    counting *c = (counting *)arg;
    __atomic_fetch_add(&c->hits[task], 1, __ATOMIC_RELAXED);
    if (thread < 0 || thread >= c->threads) __atomic_store_n(&c->wrong, true, __ATOMIC_RELAXED);
}

TEST(pool_runs_each_task_once)
{
    static int hits[1000];
    for (int threads = 1; threads <= 8; threads++) {
        test_allocator a;
        tt_context_options o = test_options(&a);
        counting c = {hits, threads, false};
        bool once = true;
        o.threads = threads;
        tt_context *ctx = tt_open(&o);
        REQUIRE(ctx != NULL && tt_threads(ctx) == threads);
        for (int round = 0; round < 60; round++) {
            int n = round % 3 == 0 ? round % 5 : round * 16; /* n: number of tasks, sometimes 0 or fewer
                                                                than threads */
            memset(hits, 0, sizeof hits);
            tt__run_tasks(ctx->cpu.pool, n, count_task, &c);
            for (int k = 0; k < 1000; k++) once &= hits[k] == (k < n);
        }
        CHECK(once && !c.wrong);
        TEST_CLOSE(ctx, &a);
    }
}

#ifndef _WIN32 /* Windows sends no signals */
static volatile sig_atomic_t handled;
static void handle(int number) { (void)number; handled++; }

/* Sets is[0] if this thread blocks signals to the process, and is[1] if it lets through the signals that its
   own instructions raise. */
static void *masked(void *arg)
{
    bool *is = (bool *)arg;
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    is[0] = sigismember(&mask, SIGUSR1) == 1 && sigismember(&mask, SIGINT) == 1 &&
            sigismember(&mask, SIGCHLD) == 1;
    is[1] = sigismember(&mask, SIGSEGV) == 0 && sigismember(&mask, SIGFPE) == 0;
    return NULL;
}

/* A signal that the host's thread blocks stays pending, because workers take no signals. */
TEST(threads_leave_signals_to_the_host)
{
    test_allocator a;
    tt_context_options o = test_options(&a);
    struct sigaction action, before;
    struct timespec moment = {0, 50000000};
    sigset_t set, mask, now, pending;
    pthread_t thread;
    bool is[2] = {false, false};
    int number = 0;
    o.threads = 4;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    memset(&action, 0, sizeof action);
    action.sa_handler = handle;
    sigaction(SIGUSR1, &action, &before);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    tt_context *ctx = tt_open(&o);
    REQUIRE(ctx != NULL && tt__thread_start(&thread, masked, is));
    pthread_join(thread, NULL);
    CHECK(is[0] && is[1]);
    pthread_sigmask(SIG_SETMASK, NULL, &now);
    /* The caller's mask is unchanged. */
    CHECK(sigismember(&now, SIGUSR1) == 0 && sigismember(&now, SIGINT) == 0);
    pthread_sigmask(SIG_BLOCK, &set, &mask);
    handled = 0;
    CHECK(kill(getpid(), SIGUSR1) == 0);
    nanosleep(&moment, NULL); /* time in which a worker could take the signal */
    sigpending(&pending);
    if (CHECK(handled == 0 && sigismember(&pending, SIGUSR1) == 1))
        CHECK(sigwait(&set, &number) == 0 && number == SIGUSR1);
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    sigaction(SIGUSR1, &before, NULL);
    TEST_CLOSE(ctx, &a);
}
#else
TEST(threads_leave_signals_to_the_host) { SKIP("Windows has no signals of POSIX"); }
#endif

#if defined(__x86_64__) || defined(__aarch64__)
/* Returns a mode that flushes subnormals to 0, as another library's -ffast-math does, and rounds up. */
static tt__float_mode odd_mode(void)
{
#if defined(__x86_64__)
    return 0x1f80 | 0x8000 | 0x40 | 0x4000;
#else
    return 1 << 24 | 1 << 22;
#endif
}

/* Trains two steps on subnormal rows of a table. Copies the parameters to `table` and checks that the
   caller's mode is unchanged. */
static void steps_in_mode(int threads, bool odd_when_opened, bool odd_later, float *table)
{
    enum { ROWS = 300, WIDTH = 40 };
    const tt__float_mode odd = odd_mode(), plain = tt__float_default();
    test_allocator a;
    tt_context_options o = test_options(&a);
    tt_compile_options c = tt_compile_options_default();
    static float zero[ROWS * WIDTH];
    int32_t id[ROWS];
    volatile float small = 1e-39f;
    o.threads = threads;
    c.optimizer.kind = TT_SGD;
    for (int r = 0; r < ROWS; r++) id[r] = r;
    tt__float_restore(odd_when_opened ? odd : plain);
    tt_context *ctx = tt_open(&o);
    tt__float_default();
    tt__float_restore(odd_later ? odd : plain);
    tt_param *w = param2(ctx, "table", ROWS, WIDTH, init_of(TT_INIT_NORMAL, 1e-39f));
    tt_param *b = param1(ctx, "bias", WIDTH, init_of(TT_INIT_NORMAL, 1));
    tt_tape *t = tt_tape_new(ctx);
    tt_value ids = tt_input(t, "ids", TT_I32, ROWS, 1), target = tt_input(t, "target", TT_F32, ROWS, WIDTH),
             none = {0};
    tt_value y = tt_scale(t, tt_embedding(t, ids, w), 0.3f), loss = tt_mean_squared_error(t, y, target, none);
    tt_value normal = tt_embedding(t, ids, param2(ctx, "normal", ROWS, WIDTH, init_of(TT_INIT_NORMAL, 1)));
    tt_value other = tt_mean_squared_error(
        t, tt_linear(t, normal, param2(ctx, "w", WIDTH, WIDTH, init_of(TT_INIT_NORMAL, 1)), b), target, none);
    tt_program *p = tt_compile(t, tt_add(t, loss, other), &c);
    CHECK(p != NULL);
    for (int k = 0; k < 2 && p; k++)
        CHECK(tt_set(p, ids, id, ROWS) == TT_OK && tt_set(p, target, zero, ROWS) == TT_OK &&
              tt_step(p, 0.1f, NULL) == TT_OK);
    if (odd_later) CHECK(small * 0.5f == 0); /* the caller's float mode has not changed */
    CHECK(p && tt_param_get(w, table) == TT_OK && tt_param_get(b, table + ROWS * WIDTH) == TT_OK);
    tt__float_default();
    CHECK(small * 0.5f > 0);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}
#endif

TEST(callers_float_mode_changes_no_bit)
{
#if defined(__x86_64__) || defined(__aarch64__)
    enum { N = 301 * 40 };
    static float expected[N], got[N];
    int subnormal = 0;
    steps_in_mode(1, false, false, expected);
    for (int k = 0; k < N; k++) subnormal += expected[k] != 0 && fabsf(expected[k]) < FLT_MIN;
    CHECK(subnormal > N / 2);
    for (int k = 0; k < 8; k++) {
        steps_in_mode(k / 4 + 1, k & 1, k & 2, got);
        CHECK(memcmp(got, expected, sizeof got) == 0);
    }
#else
    SKIP("the floating-point mode of this CPU is not known here");
#endif
}

TEST(the_cpu_described)
{
    test_allocator a;
    char text[2048], small[20], wanted[64];
    tt_context *ctx = test_open(&a);
    REQUIRE(ctx != NULL);
    CHECK(tt_device_text(ctx, "cpu", text, sizeof text) == TT_OK);
    snprintf(wanted, sizeof wanted, "instruction set: %s, the best of portable", tt_isa(ctx));
    CHECK(getenv("TINYTRAIN_ISA") || strstr(text, wanted));
    CHECK(strstr(text, "\nthreads: 1, as the options say") && strlen(text) + 1 < sizeof text);
#if defined(__linux__)
    CHECK(strstr(text, "; the affinity mask allows ") && strstr(text, "\nmemory: ") &&
          strtod(strstr(text, "\nmemory: ") + 9, NULL) > 0.1);
#endif
    CHECK(tt_device_text(ctx, "cpu", small, sizeof small) == TT_OK && strlen(small) == sizeof small - 1 &&
          strncmp(small, text, sizeof small - 1) == 0);
    CHECK(tt_device_text(ctx, "cpu", NULL, 0) == TT_OK);
    setenv("TINYTRAIN_DEVICE", "abacus", 1); /* a device of NULL then means "abacus" */
    CHECK(tt_device_text(ctx, NULL, text, sizeof text) == TT_ERR_UNSUPPORTED && !*text);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "device 'abacus' is unknown: use cpu or cuda");
    unsetenv("TINYTRAIN_DEVICE");
#ifndef TINYTRAIN_CUDA
    CHECK(tt_device_text(ctx, "cuda", text, sizeof text) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "define TINYTRAIN_CUDA");
#endif
    TEST_CLOSE(ctx, &a);
    setenv("TINYTRAIN_ISA", "portable", 1);
    ctx = test_open(&a);
    unsetenv("TINYTRAIN_ISA");
    REQUIRE(ctx != NULL);
    setenv("TINYTRAIN_ISA", "portable", 1);
    CHECK(tt_device_text(ctx, "cpu", text, sizeof text) == TT_OK &&
          strstr(text, "instruction set: portable, as requested, of portable"));
    unsetenv("TINYTRAIN_ISA");
    TEST_CLOSE(ctx, &a);
}

/* Reads CPU quotas of control groups (cgroups) from files below a folder. The files are those of version 1,
   of version 2, or of a mixture. */
TEST(quotas_of_control_groups)
{
    static const struct { const char *cgroup, *file[3], *content[3]; double quota; } cases[] = {
        {"0::/\n", {"cpu.max"}, {"150000 100000\n"}, 1.5},
        {"0::/\n", {"cpu.max"}, {"max 100000\n"}, HUGE_VAL},
        {"0::/\n", {"cpu.max"}, {"0 100000\n"}, HUGE_VAL},
        {"0::/a/b\n", {"cpu.max", "a/cpu.max", "a/b/cpu.max"}, {"max 100000\n", "200000 100000\n",
         "300000 100000\n"}, 2},
        {"0::/a/b\n", {"cpu.max", "a/cpu.max", "a/b/cpu.max"}, {"400000 100000\n", "max 100000\n",
         "30000 10000\n"}, 3},
        /* These files belong to other groups than the process's group, so there is no quota. */
        {"0::/a\n", {"a/b/cpu.max", "ab/cpu.max"}, {"100000 100000\n", "100000 100000\n"}, HUGE_VAL},
        {"0::/host/path\n", {"cpu.max"}, {"250000 100000"}, 2.5}, /* a container sees only the top group */
        {"4:memory:/x\n3:cpu,cpuacct:/docker/1\n", {"cpu,cpuacct/docker/1/cpu.cfs_quota_us",
         "cpu,cpuacct/docker/1/cpu.cfs_period_us", "cpu,cpuacct/docker/cpu.cfs_quota_us"}, {"50000\n",
         "100000\n", "-1\n"}, 0.5},
        {"3:cpuacct,cpu:/x\n", {"cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"}, {"300000\n", "100000\n"},
         3},
        {"1:cpu:/\n", {"cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"}, {"-1\n", "100000\n"}, HUGE_VAL},
        {"1:cpuacct:/\n2:cpuset:/\n", {"cpuacct/cpu.cfs_quota_us", "cpuacct/cpu.cfs_period_us"}, {"100000\n",
         "100000\n"}, HUGE_VAL},
        {"1:cpu:/a\n0::/b\n", {"cpu/a/cpu.cfs_quota_us", "cpu/a/cpu.cfs_period_us", "unified/b/cpu.max"}, {
         "300000\n", "100000\n", "220000 100000"}, 2.2},
        {"nonsense\n:\n::\n1:cpu\n", {"cpu.max"}, {"100000 100000\n"}, 1},
        {"", {"cpu.max"}, {"100000 100000\n"}, HUGE_VAL},};
#if defined(__linux__)
    CHECK(tt__cgroup_quota(test_folder()) == HUGE_VAL); /* the folder has no /proc */
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        char root[512], path[1024];
        snprintf(root, sizeof root, "%s", test_folder());
        for (int j = -1; j < 3; j++) {
            const char *file = j < 0 ? "cgroup" : cases[k].file[j],
                       *content = j < 0 ? cases[k].cgroup : cases[k].content[j];
            if (!file) continue;
            snprintf(path, sizeof path, "%s/%s/%s", root, j < 0 ? "proc/self" : "sys/fs/cgroup", file);
            for (char *c = path + strlen(root) + 1; *c; c++) {
                if (*c != '/') continue;
                *c = 0;
                mkdir(path, 0777);
                *c = '/';
            }
            test_write(path, content, strlen(content));
        }
        CHECK(tt__cgroup_quota(root) == cases[k].quota);
    }
#else
    (void)cases;
    SKIP("control groups are Linux's");
#endif
}

#if defined(__linux__)
/* Writes a file below root, and makes the folders on its path. */
static void write_below(const char *root, const char *file, const char *content)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", root, file);
    for (char *c = path + strlen(root) + 1; *c; c++) {
        if (*c != '/') continue;
        *c = 0;
        mkdir(path, 0777);
        *c = '/';
    }
    test_write(path, content, strlen(content));
}
#endif

TEST(memory_of_control_groups)
{
#define MACHINE "MemTotal: 1000000 kB\nMemFree: 9 kB\nMemAvailable: 500000 kB\nSwapFree: 0 kB\n"
    static const struct { const char *cgroup, *file[6], *content[6]; double bytes, limit; } cases[] = {
        {"0::/\n", {"memory.max"}, {"max\n"}, 512e6, 1024e6},
        {"0::/a/b\n", {"a/b/memory.max", "a/b/memory.current", "a/b/memory.stat", "a/memory.max",
         "a/memory.current"}, {"100000000\n", "60000000\n", "anon 5\ninactive_anon 7\nfile 9\n"
         "inactive_file 10000000\nactive_file 5000000\n", "max\n", "70000000\n"}, 55e6, 100e6},
        {"0::/a/b\n", {"a/b/memory.max", "a/b/memory.current", "a/memory.max", "a/memory.current"},
         {"100000000\n", "20000000\n", "70000000\n", "65000000\n"}, 5e6, 70e6},
        {"0::/a\n", {"a/memory.max", "a/memory.current"}, {"100\n", "200\n"}, 0, 100},
        {"4:memory:/x/y\n3:cpu:/z\n", {"memory/x/y/memory.limit_in_bytes", "memory/x/y/memory.usage_in_bytes",
         "memory/x/y/memory.stat", "memory/x/memory.limit_in_bytes", "memory/x/memory.usage_in_bytes"},
         {"60000000\n", "30000000\n", "inactive_file 1\nactive_file 2\ntotal_inactive_file 8000000\n"
         "total_active_file 2000000\n", "9223372036854771712\n", "30000000\n"}, 40e6, 60e6},
        {"4:memory:/x\n", {"memory/x/memory.limit_in_bytes", "memory/x/memory.usage_in_bytes",
         "memory/x/memory.memsw.limit_in_bytes", "proc/meminfo"}, {"60000000\n", "10000000\n", "61000000\n",
         MACHINE "SwapFree: 3 kB\n"}, 50e6, 60e6},
        {"0::/x\n", {"x/memory.max", "x/memory.current", "x/memory.swap.max", "x/memory.swap.current",
         "proc/meminfo"}, {"60000000\n", "10000000\n", "3000000\n", "1000000\n",
         "MemTotal: 1000000 kB\nMemAvailable: 100000 kB\nSwapFree: 90000 kB\n"}, 52e6, 60e6},
        {"", {"memory.max"}, {"5\n"}, 512e6, 1024e6}};
#if defined(__linux__)
    CHECK(tt__memory_room(test_folder()).bytes == HUGE_VAL); /* the folder has no /proc */
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        char root[512], file[600];
        snprintf(root, sizeof root, "%s", test_folder());
        write_below(root, "proc/meminfo", MACHINE);
        write_below(root, "proc/self/cgroup", cases[k].cgroup);
        for (int j = 0; j < 6 && cases[k].file[j]; j++) {
            const bool proc = strncmp(cases[k].file[j], "proc", 4) == 0;
            snprintf(file, sizeof file, "%s%s", proc ? "" : "sys/fs/cgroup/", cases[k].file[j]);
            write_below(root, file, cases[k].content[j]);
        }
        const tt__room room = tt__memory_room(root);
        if (!CHECK(room.bytes == cases[k].bytes && room.limit == cases[k].limit))
            fprintf(stderr, "case %d: %g of %g\n", k, room.bytes, room.limit);
    }
#else
    (void)cases;
    SKIP("control groups are Linux's");
#endif
}

#if defined(__linux__)
/* Compiles and allocates a program with a parameter of 256 MB, its gradient and its optimizer's state, in a
   process whose limit is 100 MB more than it uses. Returns whether the plan is refused. */
static bool large_plan_is_refused(void)
{
    tt_context_options o = tt_context_options_default();
    o.threads = 1;
    o.logger.log = test__no_log;
    tt_context *ctx = tt_open(&o);
    tt_tape *t = ctx ? tt_tape_new(ctx) : NULL;
    if (!t) return false;
    tt_param *w = param2(ctx, "w", 8000, 8000, init_of(TT_INIT_ZEROS, 0));
    enum { FEW = 4 };
    tt_value x = tt_input(t, "x", TT_F32, FEW, 8000), y = tt_input(t, "y", TT_I32, FEW, 1);
    tt_compile_options c = tt_compile_options_default();
    tt_program *p = tt_compile(t, tt_cross_entropy(t, tt_linear(t, x, w, NULL), y, NULL), &c);
    const double pages = tt__number_in("/proc/self", "statm", "");
    struct rlimit limit = {0, 0};
    limit.rlim_cur = limit.rlim_max = (rlim_t)(pages * (double)sysconf(_SC_PAGESIZE)) + 100000000;
    if (!p || setrlimit(RLIMIT_AS, &limit) != 0) return false;
    return tt_allocate(p) == TT_ERR_MEMORY && strncmp(tt_error(ctx), "the plan needs 10", 16) == 0 &&
           strstr(tt_error(ctx), " MB of this machine's memory, but only ") &&
           strstr(tt_error(ctx), "(ulimit -v allows ");
}
#endif

TEST(plans_above_the_memory_are_refused)
{
#if defined(__linux__)
    int status = 1;
    if (TEST_SANITIZED) SKIP("sanitizers want all addresses");
    const pid_t child = fork();
    if (child == 0) _exit(!large_plan_is_refused());
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
#else
    SKIP("the limit is found on Linux alone");
#endif
}
