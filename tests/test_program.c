/* Context, parameters, budget, optimizers and misuse: what tt_open, tt_param_*, tt_compile and the runs
   promise. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TT__PIECES_FROM 1 /* what is small goes to the host's memory, too */
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

#include <sys/wait.h>

static tt_init init_of(tt_init_kind kind, float scale)
{
    tt_init init;
    init.kind = kind;
    init.scale = scale;
    return init;
}

static tt_param *param1(tt_context *ctx, const char *name, int64_t n, tt_init init)
{
    return tt_param_new(ctx, name, 1, &n, init);
}

static tt_param *param2(tt_context *ctx, const char *name, int64_t rows, int64_t cols, tt_init init)
{
    int64_t dims[2] = {rows, cols};
    return tt_param_new(ctx, name, 2, dims, init);
}

/* ---- a logger that remembers ---- */

typedef struct captured { int count; tt_log_level level; char id[64], message[512]; } captured;

static void capture(void *user, tt_log_level level, const char *id, const char *message)
{
    captured *c = (captured *)user;
    c->count++;
    c->level = level;
    snprintf(c->id, sizeof c->id, "%s", id);
    snprintf(c->message, sizeof c->message, "%s", message);
}

/* ---- a small classifier: embedding, attention, two linears ---- */

enum { ROWS = 16, SEQS = 3, VOCAB = 9, WIDTH = 8, CLASSES = 3 };

typedef struct model {
    tt_tape *t;
    tt_value ids, starts, labels, logits, loss;
} model;

static bool model_params(tt_context *ctx)
{
    static const char *const names[] = {"embed.weight", "layer.0.weight", "layer.0.bias",
                                        "norm.weight",  "norm.bias",      "layer.1.weight",
                                        "layer.1.bias", "head.weight",    "head.bias"};
    static const int64_t dims[][2] = {
        {VOCAB, WIDTH}, {3 * WIDTH, WIDTH}, {3 * WIDTH, 0}, {WIDTH, 0}, {WIDTH, 0}, {WIDTH, WIDTH},
        {WIDTH, 0}, {CLASSES, WIDTH}, {CLASSES, 0}};
    for (int k = 0; k < TEST_COUNT(names); k++) {
        bool bias = strstr(names[k], "bias") != NULL, norm = strstr(names[k], "norm") != NULL;
        tt_init init = init_of(bias ? TT_INIT_ZEROS : norm ? TT_INIT_ONES : TT_INIT_NORMAL, 0.3f);
        if (!tt_param_find(ctx, names[k]) && !tt_param_new(ctx, names[k], dims[k][1] ? 2 : 1, dims[k], init))
            return false;
    }
    return true;
}

static bool model_record(tt_context *ctx, model *m)
{
#define P(name) tt_param_find(ctx, name)
    tt_tape *t = m->t = tt_tape_new(ctx);
    if (!t) return false;
    int64_t rows = tt_axis(t, "tokens", ROWS), seqs = tt_axis(t, "seqs", SEQS);
    tt_attention_options o = tt_attention_options_default(2);
    o.dropout = 0.1f;
    m->ids = tt_input(t, "ids", TT_I32, rows, 1);
    m->starts = tt_seq_start(t, "starts", seqs);
    m->labels = tt_input(t, "labels", TT_I32, seqs, 1);
    tt_value x = tt_embedding(t, m->ids, P("embed.weight")),
             qkv = tt_linear(t, x, P("layer.0.weight"), P("layer.0.bias"));
    tt_value y = tt_attention(t, tt_slice(t, qkv, 0, WIDTH), tt_slice(t, qkv, WIDTH, WIDTH),
                              tt_slice(t, qkv, 2 * WIDTH, WIDTH), m->starts, &o);
    y = tt_layernorm(t, tt_add(t, x, y), P("norm.weight"), P("norm.bias"), 1e-5f);
    y = tt_dropout(t, tt_gelu(t, tt_linear(t, y, P("layer.1.weight"), P("layer.1.bias"))), 0.1f);
    m->logits = tt_linear(t, tt_mean_pool(t, y, m->starts), P("head.weight"), P("head.bias"));
    m->loss = tt_cross_entropy(t, m->logits, m->labels, NULL);
    return tt_tape_status(t) == TT_OK;
#undef P
}

static tt_status model_set(const model *m, tt_program *p, int batch)
{
    int32_t ids[ROWS], labels[SEQS], starts[SEQS + 1] = {0, 3 + batch % 3, 9, 12 + batch % 5};
    for (int k = 0; k < ROWS; k++) ids[k] = (k * 5 + batch) % VOCAB;
    for (int k = 0; k < SEQS; k++) labels[k] = (ids[starts[k]] + k) % CLASSES;
    tt_status status = tt_set(p, m->ids, ids, starts[SEQS]);
    if (status == TT_OK) status = tt_set(p, m->starts, starts, SEQS + 1);
    if (status == TT_OK) status = tt_set(p, m->labels, labels, SEQS);
    return status;
}

static tt_program *model_compile(const model *m, bool train, const char *precision, bool accumulate)
{
    tt_compile_options c = tt_compile_options_default();
    c.train = train;
    c.precision = precision;
    c.accumulate = accumulate;
    return tt_compile(m->t, m->loss, &c);
}

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
        snprintf(text, sizeof text, "threads = %d is not in 0..256", bad[k]);
        CHECK(c.count == 1 && c.level == TT_LOG_ERROR && strcmp(c.id, "open") == 0 &&
              strcmp(c.message, text) == 0);
    }
    static const double no_time[] = {0, -1, NAN};
    o.threads = 2;
    for (int k = 0; k < TEST_COUNT(no_time); k++) {
        memset(&c, 0, sizeof c);
        o.timeout = no_time[k];
        CHECK(tt_open(&o) == NULL);
        CHECK(c.count == 1 && strstr(c.message, "seconds is not above 0"));
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
        CHECK(ctx != NULL || k > 0); /* a CPU may not have it */
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
        CHECK((ctx != NULL) == (k == 3)); /* portable kernels have no dot products, and no tiles */
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
        CHECK((costs.between_ranks != usual.between_ranks) == (k == 2)); /* one rank has no others */
        CHECK((costs.meeting != usual.meeting) == (k == 2));
    }
    CHECK(ctx->n_params == 0 && !ctx->profile); /* it leaves nothing behind */
    const tt_costs before = costs;
    CHECK(tt_measure_costs(ctx, "tpu", &costs) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "device 'tpu' is unknown");
    CHECK(tt_measure_costs(ctx, "cpu:1", &costs) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "device 'cpu:1' is not there");
    CHECK(tt_measure_costs(ctx, "cuda:15", &costs) != TT_OK);
    CHECK(strstr(tt_error(ctx), "device 'cuda"));
    for (long n = 1; n < 1200; n = 4 * n + 1) { /* without memory */
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
            int n = round % 3 == 0 ? round % 5 : round * 16; /* also fewer tasks than threads, and none */
            memset(hits, 0, sizeof hits);
            tt__parallel(ctx->cpu.pool, n, count_task, &c);
            for (int k = 0; k < 1000; k++) once &= hits[k] == (k < n);
        }
        CHECK(once && !c.wrong);
        TEST_CLOSE(ctx, &a);
    }
}

static volatile sig_atomic_t handled;
static void handle(int number) { (void)number; handled++; }

/* [0]: signals of the process are kept from this thread; [1]: those of its own instructions are not */
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

/* A signal that the host's thread holds back stays there: no worker takes it. */
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
    /* The caller's mask is as it was. */
    CHECK(sigismember(&now, SIGUSR1) == 0 && sigismember(&now, SIGINT) == 0);
    pthread_sigmask(SIG_BLOCK, &set, &mask);
    handled = 0;
    CHECK(kill(getpid(), SIGUSR1) == 0);
    nanosleep(&moment, NULL); /* for a worker that would take it */
    sigpending(&pending);
    if (CHECK(handled == 0 && sigismember(&pending, SIGUSR1) == 1))
        CHECK(sigwait(&set, &number) == 0 && number == SIGUSR1);
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    sigaction(SIGUSR1, &before, NULL);
    TEST_CLOSE(ctx, &a);
}

#if defined(__x86_64__) || defined(__aarch64__)
/* Subnormals to 0, as -ffast-math of another library sets it, and rounding up. */
static tt__float_mode odd_mode(void)
{
#if defined(__x86_64__)
    return 0x1f80 | 0x8000 | 0x40 | 0x4000;
#else
    return 1 << 24 | 1 << 22;
#endif
}

/* Two steps on subnormal rows of a table: parameters after them, and whether the caller's mode survived. */
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
    if (odd_later) CHECK(small * 0.5f == 0); /* the mode is still the caller's */
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

/* Quotas of control groups, of both versions and their mixture, as trees of files below a folder. */
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
    setenv("TINYTRAIN_DEVICE", "abacus", 1); /* what NULL then means */
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
          strstr(text, "instruction set: portable, which was asked for, of portable"));
    unsetenv("TINYTRAIN_ISA");
    TEST_CLOSE(ctx, &a);
}

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
        /* not on the way */
        {"0::/a\n", {"a/b/cpu.max", "ab/cpu.max"}, {"100000 100000\n", "100000 100000\n"}, HUGE_VAL},
        {"0::/host/path\n", {"cpu.max"}, {"250000 100000"}, 2.5}, /* a container: only the top is there */
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
    CHECK(tt__cgroup_quota(test_folder()) == HUGE_VAL); /* no /proc */
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

/* Writes a file below root, with the folders on its way. */
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
    CHECK(tt__memory_room(test_folder()).bytes == HUGE_VAL); /* no /proc */
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
   process that may take 100 MB more than it has; true if that is refused as it should be. */
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
           strstr(tt_error(ctx), " MB of this machine's memory, and ") &&
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

/* Runs the scenario with allocation number fail_at failing; the stage that fails is tried again. Returns its
   loss; *failed: whether an allocation failed. */
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
    CHECK(failures == (s.a.failed ? 1 : 0)); /* none is swallowed */
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
        /* Trying again after the failure gives what it would have given. */
        CHECK(run_scenario(n, &failed) == expected);
        if (!failed) break;
        REQUIRE(n < 5000);
    }
    CHECK(n > 60);
}

/* ---- things left behind, and silence ---- */

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
          strstr(log.message, "bytes are still held"));
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
    CHECK(strcmp(text, "tinytrain error [open]: threads = -1 is not in 0..256\n") == 0);
}

/* --------------------------------------------------------------------------------------------- parameters */

static void moments(const float *x, int64_t n, double *mean, double *deviation, double *most)
{
    double sum = 0, squares = 0;
    *most = 0;
    for (int64_t k = 0; k < n; k++) {
        sum += x[k];
        squares += (double)x[k] * x[k];
        if (fabs(x[k]) > *most) *most = fabs(x[k]);
    }
    *mean = sum / (double)n;
    *deviation = sqrt(squares / (double)n - *mean * *mean);
}

TEST(initial_values)
{
    enum { N = 100003 };
    float *first = (float *)malloc(N * sizeof(float)), *other = (float *)malloc(N * sizeof(float));
    double mean, deviation, most;
    /* 0: before allocation; 1, 2: allocated, 1 and 3 threads; 3: bf16; 4: another seed; 5: name; 6: f16 */
    for (int run = 0; run < 7; run++) {
        test_allocator a;
        tt_context_options o = test_options(&a);
        tt_compile_options c = tt_compile_options_default();
        o.threads = run == 2 ? 3 : 1;
        o.seed = run == 4 ? 2 : 1;
        tt_context *ctx = tt_open(&o);
        tt_param *normal = param1(ctx, run == 5 ? "other" : "normal", N, init_of(TT_INIT_NORMAL, 0.02f)),
                 *flat = param1(ctx, "uniform", N, init_of(TT_INIT_UNIFORM, 0.5f));
        tt_param *ones = param1(ctx, "ones", 7, init_of(TT_INIT_ONES, 0)),
                 *zeros = param1(ctx, "zeros", 7, init_of(TT_INIT_ZEROS, 0));
        tt_tape *t = tt_tape_new(ctx);
        tt_value sum = tt_add(t, tt_param_value(t, normal), tt_param_value(t, flat)),
                 small = tt_add(t, tt_param_value(t, ones), tt_param_value(t, zeros));
        tt_output(t, small);
        c.train = false;
        c.precision = run == 3 ? "bf16-true" : run == 6 ? "16-true" : "32-true";
        tt_program *p = tt_compile(t, sum, &c);
        REQUIRE(p != NULL);
        if (run > 0)
            CHECK(tt_allocate(p) == TT_OK && normal->holder->allocated &&
                  tt__param_home(normal)->dtype == (run == 3 ? TT_BF16
                                                    : run == 6 ? TT_F16
                                                    : TT_F32));
        CHECK(tt_param_get(normal, run ? other : first) == TT_OK);
        if (run == 0) {
            moments(first, N, &mean, &deviation, &most);
            CHECK_NEAR(mean, 0, 0.02 * 4 / sqrt((double)N)); /* four standard errors */
            CHECK_NEAR(deviation, 0.02, 0.02 * 4 / sqrt(2.0 * (double)N));
            CHECK(most > 0.02 * 3.5 && most < 0.02 * 6);
        } else if (run < 4) {
            bool same = true;
            for (int k = 0; k < N; k++)
                same &= other[k] == (run == 3 ? tt__from_bf16(tt__to_bf16(first[k])) : first[k]);
            CHECK(same);
        } else {
            int equal = 0;
            for (int k = 0; k < N; k++) equal += other[k] == first[k];
            CHECK(equal < 100);
        }
        CHECK(tt_param_get(flat, other) == TT_OK);
        moments(other, N, &mean, &deviation, &most);
        CHECK_NEAR(mean, 0, 0.5 / sqrt(3.0) * 4 / sqrt((double)N));
        CHECK_NEAR(deviation, 0.5 / sqrt(3.0), 0.002);
        CHECK(most <= 0.5 && most > 0.499);
        CHECK(tt_param_get(ones, other) == TT_OK && other[0] == 1 && other[6] == 1);
        CHECK(tt_param_get(zeros, other) == TT_OK && other[0] == 0 && other[6] == 0);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
    free(first);
    free(other);
}

/* Initial values that f16 cannot hold are refused, however many there are before them; those just below are
   not. */
TEST(initial_values_too_large_for_f16)
{
    static const struct { tt_init_kind kind; float scale; bool fits; } cases[] = {
        {TT_INIT_UNIFORM, 65000, true}, {TT_INIT_UNIFORM, 70000, false}, {TT_INIT_NORMAL, 10000, true},
        {TT_INIT_NORMAL, -20000, false}};
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_param *p = param1(ctx, "p", 100003, init_of(cases[k].kind, cases[k].scale));
        tt_tape *t = tt_tape_new(ctx);
        tt_compile_options c = tt_compile_options_default();
        c.train = false;
        c.precision = "16-true";
        tt_program *program = tt_compile(t, tt_scale(t, tt_param_value(t, p), 1), &c);
        REQUIRE(program != NULL);
        CHECK(tt_allocate(program) == (cases[k].fits ? TT_OK : TT_ERR_ARGUMENT));
        if (!cases[k].fits) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "more than f16 can hold (65504)");
        tt_program_free(program);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(parameters_are_made_found_set_and_read)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int64_t dims[4] = {2, 3, 4, 5};
    tt_init z = init_of(TT_INIT_ZEROS, 0);
    tt_param *p = tt_param_new(ctx, "conv.weight", 4, dims, z);
    REQUIRE(p != NULL);
    CHECK(tt_param_size(p) == 120 && tt_param_ndim(p) == 4 && tt_param_dims(p)[3] == 5 &&
          strcmp(tt_param_name(p), "conv.weight") == 0);
    CHECK(tt_param_find(ctx, "conv.weight") == p && !tt_param_find(ctx, "conv") && !tt_param_frozen(p));
    CHECK(!tt_param_new(ctx, "conv.weight", 1, dims, z));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "parameter 'conv.weight' exists already");
    CHECK(!tt_param_new(ctx, "", 1, dims, z) && !tt_param_new(ctx, NULL, 1, dims, z));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "needs a name");
    CHECK(!tt_param_new(ctx, "x", 0, dims, z));
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "'x' has 0 dimensions, not 1 to 4");
    CHECK(!tt_param_new(ctx, "x", 5, dims, z));
    dims[1] = 0;
    CHECK(!tt_param_new(ctx, "x", 2, dims, z));
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "'x': dimension 1 is 0");
    dims[0] = dims[1] = 1000000000;
    CHECK(!tt_param_new(ctx, "x", 2, dims, z));
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "'x': with dimension 1, 1000000000, it has 2^47 elements or more");
    CHECK(!tt_param_find(ctx, "x"));

    size_t before = tt_allocated_bytes(ctx); /* a large parameter takes no memory yet */
    tt_param *w = param2(ctx, "w", 30000, 30000, z);
    CHECK(w && tt_allocated_bytes(ctx) - before < 2000);
    float values[15], got[15];
    tt_param *v = param2(ctx, "v", 3, 5, init_of(TT_INIT_ONES, 0));
    for (int k = 0; k < 15; k++) values[k] = (float)k / 7;
    CHECK(tt_param_get(v, got) == TT_OK && got[14] == 1);
    CHECK(tt_param_set(v, values) == TT_OK && tt_param_get(v, got) == TT_OK &&
          memcmp(values, got, sizeof got) == 0);
    values[0] = 9;
    CHECK(tt_param_set(v, values) == TT_OK && tt_param_get(v, got) == TT_OK && got[0] == 9);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options c = tt_compile_options_default();
    c.train = false;
    tt_value root = tt_scale(t, tt_param_value(t, v), 2);
    tt_program *program = tt_compile(t, root, &c);
    REQUIRE(program && tt_allocate(program) == TT_OK);
    CHECK(tt_param_get(v, got) == TT_OK && memcmp(values, got, sizeof got) == 0);
    CHECK(v->source == NULL); /* the copy is gone */
    values[1] = -3;
    CHECK(tt_param_set(v, values) == TT_OK && tt_param_get(v, got) == TT_OK && got[1] == -3);
    CHECK(tt_run(program, NULL) == TT_OK && tt_get(program, root, got, 15) == TT_OK && got[0] == 18 &&
          got[1] == -6);
    tt_program_free(program); /* values stay */
    CHECK(tt_param_get(v, got) == TT_OK && got[1] == -3);
    program = tt_compile(t, root, &c);
    CHECK(program && tt_run(program, NULL) == TT_OK && tt_get(program, root, got, 15) == TT_OK &&
          got[0] == 18);
    tt_program_free(program);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* A source that fails once leaves all parameters as they were, those that were filled before it too. */
static bool source_fails;

static tt_status failing_read(void *source, int64_t first, int64_t n, float *to)
{
    if (source_fails) return tt__fail((tt_context *)source, TT_ERR_FILE, "the disk is gone");
    for (int64_t k = 0; k < n; k++) to[k] = (float)(first + k);
    return TT_OK;
}

TEST(a_failed_source_can_be_tried_again)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    tt_param *v = param1(ctx, "v", 5, init_of(TT_INIT_ZEROS, 0)),
             *w = param1(ctx, "w", 5, init_of(TT_INIT_ZEROS, 0));
    float values[5] = {1, 2, 3, 4, 5}, got[5];
    tt_param_set(v, values);
    w->read = failing_read;
    w->source = ctx;
    tt_tape *t = tt_tape_new(ctx);
    tt_value sum = tt_add(t, tt_param_value(t, v), tt_param_value(t, w));
    c.train = false;
    tt_program *p = tt_compile(t, sum, &c);
    REQUIRE(p != NULL);
    source_fails = true;
    size_t before = tt_allocated_bytes(ctx);
    CHECK(tt_allocate(p) == TT_ERR_FILE);
    CHECK_ERROR(ctx, TT_ERR_FILE, "the disk is gone");
    CHECK(tt_allocated_bytes(ctx) == before);
    CHECK(tt_param_get(v, got) == TT_OK && memcmp(values, got, sizeof got) == 0);
    source_fails = false;
    CHECK(tt_run(p, NULL) == TT_OK && tt_get(p, sum, got, 5) == TT_OK && got[0] == 1 && got[4] == 9);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* ----------------------------------------------------------------------------------------------- freezing */

/* Instructions of op whose line mentions name. */
static int count_lines(const char *text, const char *op, const char *name)
{
    int n = 0;
    char line[1024];
    for (; *text; text += strcspn(text, "\n"), text += *text == '\n') {
        snprintf(line, sizeof line, "%.*s", (int)strcspn(text, "\n"), text);
        size_t length = strlen(op);
        n += strncmp(line + 5, op, length) == 0 && line[5 + length] == ' ' && strstr(line, name) != NULL;
    }
    return n;
}

TEST(frozen_parameters_cost_nothing)
{
    /* Features only, the last layers, all. */
    static const char *const lists[][4] = {
        {"head.*", NULL}, {"layer.1.*", "head.*", NULL}, {"*", NULL}, {"*.bias", "head.weigh?", NULL}};
    test_allocator a;
    for (int k = 0; k < TEST_COUNT(lists); k++) {
        model m;
        char text[32768];
        float before[512], after[512];
        tt_context *ctx = test_open(&a);
        /* Frozen after recording: what counts is tt_compile. */
        REQUIRE(model_params(ctx) && model_record(ctx, &m));
        CHECK(tt_param_freeze(ctx, "*", true) == 9);
        int trainable = 0;
        size_t all = 0, trained = 0;
        for (int j = 0; lists[k][j]; j++) CHECK(tt_param_freeze(ctx, lists[k][j], false) > 0);
        for (int j = 0; j < ctx->n_params; j++) {
            size_t bytes = tt__align_up((size_t)ctx->params[j]->size * 4);
            all += bytes;
            if (!tt_param_frozen(ctx->params[j])) { trainable++; trained += bytes; }
        }
        tt_program *p = model_compile(&m, true, "32-true", true);
        REQUIRE(p != NULL);
        tt_param_freeze(ctx, "*", k == 1); /* programs that are compiled already do not change */
        tt_plan plan = tt_program_plan(p);
        CHECK(plan.persistent_bytes == all + 3 * trained); /* two of AdamW, one accumulated gradient */
        CHECK(plan.at_peak[TT_MEM_GRADIENTS] == trained && plan.at_peak[TT_MEM_OPTIMIZER] == 2 * trained &&
              plan.at_peak[TT_MEM_PARAMETERS] == all);
        CHECK(tt_program_text(p, text, sizeof text) < sizeof text);
        CHECK(count_lines(text, "adam", "") == trainable &&
              count_lines(text, "sum_squares", "") == trainable);
        CHECK(count_lines(text, "adam", "'head.weight'") == 1 &&
              count_lines(text, "adam", "'embed.weight'") == (k == 2));
        CHECK(count_lines(text, "linear_dw", "") == (k == 0 ? 1 : k == 1 ? 2 : 3));
        CHECK(count_lines(text, "linear_dw", "d(layer.0.weight)") == (k == 2));
        CHECK(count_lines(text, "linear_dx", "") == (k == 0 ? 0 : k == 1 ? 1 : k == 2 ? 3 : 2));
        CHECK(count_lines(text, "attention_backward", "") == (k >= 2) &&
              count_lines(text, "embedding_backward", "") == (k == 2));
        CHECK(count_lines(text, "layernorm_backward", "") == (k >= 2) && count_lines(text, "gelu", "") == 0);
        CHECK(count_lines(text, "layernorm_backward", "d(norm.weight)") == (k == 2));
        CHECK(model_set(&m, p, 1) == TT_OK && tt_micro_step(p, NULL) == TT_OK);
        for (int j = 0; j < ctx->n_params; j++) {
            tt_param *w = ctx->params[j];
            bool frozen = strcmp(w->name, "embed.weight") == 0 ? k != 2
                          : strcmp(w->name, "head.weight") == 0 ? false
                          : strcmp(w->name, "layer.1.weight") == 0 ? k == 0 || k == 3
                          : true;
            if (strcmp(w->name, "embed.weight") && strcmp(w->name, "head.weight") &&
                strcmp(w->name, "layer.1.weight"))
                continue;
            CHECK((tt_get_gradient(p, w, before) == TT_OK) == !frozen);
            if (frozen)
                CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                            "has no gradient in this program: it is frozen or not used");
            tt_param_get(w, before);
            if (strcmp(w->name, "head.weight")) continue;
            CHECK(tt_update(p, 0.01f, NULL) == TT_OK);
            tt_param_get(w, after);
            CHECK(memcmp(before, after, (size_t)w->size * 4) != 0);
        }
        tt_program_free(p);
        tt_tape_free(m.t);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(frozen_parameters_keep_their_bits)
{
    test_allocator a;
    model m;
    float before[256], after[256];
    tt_context *ctx = test_open(&a);
    REQUIRE(model_params(ctx));
    CHECK(tt_param_freeze(ctx, "layer.?.weight", true) == 2 && tt_param_freeze(ctx, "nothing*", true) == 0);
    CHECK(tt_param_frozen(tt_param_find(ctx, "layer.0.weight")) &&
          !tt_param_frozen(tt_param_find(ctx, "layer.0.bias")));
    REQUIRE(model_record(ctx, &m));
    tt_program *p = model_compile(&m, true, "32-true", false);
    REQUIRE(p && tt_allocate(p) == TT_OK);
    for (int j = 0; j < ctx->n_params; j++) {
        tt_param *w = ctx->params[j];
        tt_param_get(w, before);
        CHECK(model_set(&m, p, j) == TT_OK && tt_step(p, 0.01f, NULL) == TT_OK);
        tt_param_get(w, after);
        CHECK((memcmp(before, after, (size_t)w->size * 4) == 0) == tt_param_frozen(w));
    }
    tt_program_free(p);
    tt_param_freeze(ctx, "*", true);
    CHECK(!model_compile(&m, true, "32-true", false));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "nothing to train: no trainable parameter lies behind the loss");
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------------------- budget */

/* Many logits are never stored whole, which changes no result, unless somebody else reads them. */
TEST(logits_of_a_large_vocabulary)
{
    enum { MOST = 600, D = 8, V = 8192 };
    static const int rows[] = {MOST, 257, 256, 5};
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true"};
    static float x[MOST * D], grads[2][4][V * D];
    static int32_t y[MOST];
    static char text[32768];
    test_allocator a;
    uint64_t state = 5;
    for (int k = 0; k < MOST * D; k++) x[k] = test_uniform(&state);
    for (int k = 0; k < MOST; k++) y[k] = k % 7 == 3 ? -100 : (int32_t)(test_random(&state) % V);
    for (int k = 0; k < 9; k++) {
        if (k % test_every(2)) continue;
        bool train = k % 3 < 2, accumulate = k % 3 == 1;
        const char *precision = precisions[k / 3];
        tt_context *ctx = test_open(&a);
        tt_param *w[4] = {param2(ctx, "a", D, D, init_of(TT_INIT_NORMAL, 1)),
                          param1(ctx, "a.bias", D, init_of(TT_INIT_NORMAL, 1)),
                          param2(ctx, "w", V, D, init_of(TT_INIT_NORMAL, 0.5f)),
                          param1(ctx, "w.bias", V, init_of(TT_INIT_NORMAL, 0.5f))};
        size_t peak[2];
        tt_stats stats[2][4];
        for (int whole = 0; whole < 2; whole++) {
            tt_compile_options o = tt_compile_options_default();
            tt_tape *t = tt_tape_new(ctx);
            int64_t axis = tt_axis(t, "rows", MOST);
            tt_value in = tt_input(t, "x", TT_F32, axis, D), labels = tt_input(t, "y", TT_I32, axis, 1);
            tt_value logits = tt_linear(t, tt_gelu(t, tt_linear(t, in, w[0], w[1])), w[2], w[3]),
                     loss = tt_cross_entropy(t, logits, labels, NULL);
            if (whole) tt_output(t, logits);
            o.train = train;
            o.accumulate = accumulate;
            o.precision = precision;
            tt_program *p = tt_compile(t, loss, &o);
            REQUIRE(p != NULL);
            tt_plan plan = tt_program_plan(p);
            peak[whole] = plan.bytes - plan.persistent_bytes;
            tt_program_text(p, text, sizeof text);
            /* bf16 gradients do not add chunk by chunk */
            CHECK(count_lines(text, "linear_cross_entropy", "") == (!whole && (!train || k / 3 < 2)));
            /* X needs no gradient. */
            CHECK(plan.flops == 2.0 * MOST * D * (D * (train ? 2 : 1) + V * (train ? 3.0 : 1.0)));
            for (int r = 0; r < TEST_COUNT(rows); r++) {
                CHECK(tt_set(p, in, x, rows[r]) == TT_OK && tt_set(p, labels, y, rows[r]) == TT_OK);
                CHECK((accumulate ? tt_micro_step(p, NULL)
                       : train ? tt_step(p, 0, &stats[whole][r])
                       : tt_run(p, &stats[whole][r])) == TT_OK);
                if (accumulate && r == 0)
                    for (int j = 0; j < 4; j++) CHECK(tt_get_gradient(p, w[j], grads[whole][j]) == TT_OK);
                if (accumulate) CHECK(tt_update(p, 0, &stats[whole][r]) == TT_OK);
            }
            tt_program_free(p);
            tt_tape_free(t);
        }
        double rounding = strcmp(precision, "32-true") == 0 ? 2e-6 : 0x1p-7;
        for (int r = 0; r < TEST_COUNT(rows); r++) {
            CHECK_NEAR(stats[0][r].loss, stats[1][r].loss, 1e-6 * stats[1][r].loss);
            CHECK(stats[0][r].targets == stats[1][r].targets && stats[0][r].correct == stats[1][r].correct);
            if (train)
                CHECK_NEAR(stats[0][r].grad_norm, stats[1][r].grad_norm, rounding * stats[1][r].grad_norm);
        }
        for (int j = 0; j < 4 && accumulate; j++) {
            int64_t n = tt_param_size(w[j]);
            double most = 0;
            for (int64_t i = 0; i < n; i++) most = fabs(grads[1][j][i]) > most ? fabs(grads[1][j][i]) : most;
            CHECK(most > 0);
            for (int64_t i = 0; i < n; i++) CHECK_NEAR(grads[0][j][i], grads[1][j][i], rounding * most);
        }
        if (k / 3 < 2) CHECK(peak[0] < MOST * V * 4 && peak[1] > MOST * V * 4);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(memory_budget)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"};
    for (int k = 0; k < 10; k++) {
        test_allocator a;
        model m;
        tt_context *ctx = test_open(&a);
        tt_compile_options c = tt_compile_options_default();
        REQUIRE(model_params(ctx) && model_record(ctx, &m));
        c.precision = precisions[k % 5];
        c.train = k < 5;
        c.memory_budget = 100;
        size_t before = tt_allocated_bytes(ctx);
        CHECK(!tt_compile(m.t, m.loss, &c));
        CHECK_ERROR(ctx, TT_ERR_BUDGET, "memory_budget is 100");
        CHECK(tt_allocated_bytes(ctx) == before);
        const char *number = strstr(tt_error(ctx), "the plan needs ");
        REQUIRE(number != NULL);
        size_t smallest = (size_t)strtoull(number + strlen("the plan needs "), NULL, 10);
        c.memory_budget = smallest - 1;
        CHECK(!tt_compile(m.t, m.loss, &c));
        c.memory_budget = smallest;
        tt_program *p = tt_compile(m.t, m.loss, &c);
        REQUIRE(p != NULL);
        CHECK(tt_program_plan(p).bytes == smallest);
        before = tt_allocated_bytes(ctx);
        CHECK(tt_allocate(p) == TT_OK && tt_allocated_bytes(ctx) - before <= smallest + 2 * TT__ALIGN);
        tt_program_free(p);
        tt_tape_free(m.t);
        TEST_CLOSE(ctx, &a);
    }
}

/* --------------------------------------------------------------------------- programs that share an arena */

/* Bytes of a program's inputs, one after another. Returns how many. */
static size_t input_bytes(const tt_program *p, unsigned char *to)
{
    size_t n = 0;
    for (int32_t v = 1; v < p->built.t->n_values; v++) {
        const tt__value *x = &p->built.t->values[v];
        if (x->storage != TT__INPUT || x->base != v || x->place == TT__NO_PLACE) continue;
        tt__mat m = tt__resolve(p, 0, v);
        const size_t bytes = (size_t)(m.rows * m.cols) * tt_dtype_bytes(m.dtype);
        memcpy(to + n, m.data, bytes);
        n += bytes;
    }
    return n;
}

/* Inputs that another program of the arena has overwritten are never trained on, and no others are
   refused. */
TEST(inputs_overwritten_by_another_program)
{
    enum { MOST = 4096 };
    test_allocator a;
    model m;
    tt_stats stats;
    unsigned char was[MOST], is[MOST];
    int refused = 0, kept = 0;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    tt_value small_input = tt_input(m.t, "small", TT_F32, 1, 2), small = tt_scale(m.t, small_input, 2);
    tt_program *train = model_compile(&m, true, "32-true", true);
    REQUIRE(train != NULL);
    c.share = train;
    c.train = false;
    tt_program *eval = tt_compile(m.t, m.loss, &c), *tiny = tt_compile(m.t, small, &c);
    REQUIRE(eval && tiny && tt_allocate(eval) == TT_OK);
    float two[2] = {1, 2};
    for (int k = 0; k < 8; k++) { /* what comes between the inputs and the run that needs them */
        const bool other = k & 1, runs = k & 2, little = k & 4;
        REQUIRE(model_set(&m, train, 2 * k) == TT_OK);
        const size_t n = input_bytes(train, was);
        REQUIRE(n <= MOST);
        if (other && little) CHECK(tt_set(tiny, small_input, two, 1) == TT_OK);
        if (other && !little) CHECK(model_set(&m, eval, 2 * k + 1) == TT_OK);
        if (other && runs) CHECK(tt_run(little ? tiny : eval, &stats) == TT_OK);
        const bool same = input_bytes(train, is) == n && memcmp(was, is, n) == 0;
        const tt_status status = tt_micro_step(train, &stats);
        if (!same)
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "or by another program of the same arena");
        CHECK(same || (status == TT_ERR_ARGUMENT && strstr(tt_error(ctx), "input '")));
        if (!other) CHECK(same && status == TT_OK);
        if (status == TT_OK) kept++;
        else refused++;
        if (status == TT_OK) CHECK(tt_update(train, 0.01f, &stats) == TT_OK);
    }
    CHECK(refused > 0 && kept > 0);

    /* an update overwrites the inputs of an evaluation too */
    CHECK(model_set(&m, train, 0) == TT_OK && tt_micro_step(train, NULL) == TT_OK &&
          model_set(&m, eval, 1) == TT_OK);
    const size_t n = input_bytes(eval, was);
    CHECK(tt_update(train, 0.01f, NULL) == TT_OK);
    const bool same = input_bytes(eval, is) == n && memcmp(was, is, n) == 0;
    const tt_status status = tt_run(eval, &stats);
    CHECK(same || status == TT_ERR_ARGUMENT);
    CHECK(model_set(&m, eval, 1) == TT_OK && tt_run(eval, &stats) == TT_OK); /* set again, they are there */
    tt_program_free(eval);
    CHECK(model_set(&m, train, 1) == TT_OK && tt_set(tiny, small_input, two, 1) == TT_OK);
    tt_program_free(train);
    CHECK(tt_run(tiny, &stats) == TT_OK);
    tt_program_free(tiny);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* The loss of a second micro-batch whose inputs were set before the update or after it; NAN if it was
   refused. */
static double loss_after_update(bool before, int hidden, int rows)
{
    test_allocator a;
    tt_stats stats = {0};
    static float xs[4096 * 4], ys[4096 * 4];
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, rows, 4), y = tt_input(t, "y", TT_F32, rows, 4);
    tt_value h = tt_linear(t, x, param2(ctx, "up", hidden, 4, init_of(TT_INIT_NORMAL, 0.1f)), NULL);
    h = tt_linear(t, tt_gelu(t, h), param2(ctx, "down", 4, hidden, init_of(TT_INIT_NORMAL, 0.1f)), NULL);
    tt_compile_options o = tt_compile_options_default();
    o.accumulate = true;
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, h, y, tt__handle(t, 0)), &o);
    for (int k = 0; k < rows * 4; k++) xs[k] = sinf((float)k), ys[k] = cosf((float)k);
    for (int micro = 0; micro < 2 && p; micro++) {
        const bool set = !micro || !before;
        if (set) CHECK(tt_set(p, x, xs, rows) == TT_OK && tt_set(p, y, ys, rows) == TT_OK);
        const tt_status status = tt_micro_step(p, &stats);
        if (status != TT_OK) stats.loss = NAN;
        if (status != TT_OK) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "set, and then overwritten by an update");
        if (!micro && before) CHECK(tt_set(p, x, xs, rows) == TT_OK && tt_set(p, y, ys, rows) == TT_OK);
        if (!micro) CHECK(tt_update(p, 1e-3f, NULL) == TT_OK);
    }
    CHECK(p != NULL);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return stats.loss;
}

/* An update may take the place of inputs that were set before it: then they are refused, never trained on. */
TEST(inputs_overwritten_by_an_update)
{
    int kept = 0, refused = 0;
    for (int hidden = 1; hidden <= 64; hidden *= 8)
        for (int rows = 1; rows <= 4096; rows *= 8) {
            const double after = loss_after_update(false, hidden, rows);
            const double loss = loss_after_update(true, hidden, rows);
            CHECK(isfinite(after) && (isnan(loss) || loss == after));
            kept += !isnan(loss);
            refused += isnan(loss);
        }
    CHECK(kept > 0 && refused > 0);
}

/* An output that another program's update has overwritten is not given. */
TEST(outputs_overwritten_by_another_programs_update)
{
    enum { MANY = 4096, IN = 2, OUT = 3 };
    test_allocator a;
    static float xs[MANY * IN], ys[4 * OUT], was[MANY * OUT], is[MANY * OUT];
    int kept = 0, refused = 0;
    for (int rows = 1; rows <= MANY; rows *= 4) {
        tt_context *ctx = test_open(&a);
        tt_compile_options o = tt_compile_options_default();
        tt_param *w = param2(ctx, "w", OUT, IN, init_of(TT_INIT_NORMAL, 1));
        tt_tape *t = tt_tape_new(ctx), *u = tt_tape_new(ctx);
        tt_value x = tt_input(t, "x", TT_F32, 4, IN), y = tt_input(t, "y", TT_F32, 4, OUT);
        tt_value loss = tt_mean_squared_error(t, tt_linear(t, x, w, NULL), y, tt__handle(t, 0));
        tt_value many = tt_input(u, "many", TT_F32, rows, IN), out = tt_linear(u, many, w, NULL);
        o.accumulate = true;
        tt_program *p = tt_compile(t, loss, &o);
        REQUIRE(p != NULL);
        o.accumulate = o.train = false;
        o.share = p;
        tt_program *q = tt_compile(u, out, &o);
        REQUIRE(q != NULL);
        for (int k = 0; k < MANY * IN; k++) xs[k] = sinf((float)k);
        CHECK(tt_set(p, x, xs, 4) == TT_OK && tt_set(p, y, ys, 4) == TT_OK);
        CHECK(tt_micro_step(p, NULL) == TT_OK);
        CHECK(tt_set(q, many, xs, rows) == TT_OK && tt_run(q, NULL) == TT_OK);
        CHECK(tt_get(q, out, was, MANY * OUT) == TT_OK && tt_update(p, 0, NULL) == TT_OK);
        const tt_status status = tt_get(q, out, is, MANY * OUT);
        if (status != TT_OK) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "has no contents");
        else CHECK(memcmp(was, is, sizeof(float) * (size_t)rows * OUT) == 0);
        kept += status == TT_OK;
        refused += status != TT_OK;
        tt_program_free(p);
        tt_program_free(q);
        tt_tape_free(t);
        tt_tape_free(u);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(refused > 0 && kept == 0); /* whether the update took its place is not asked */
}

/* Nothing of the caller's options is read once tt_compile has returned. */
TEST(options_are_the_callers_again)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options o = tt_compile_options_default();
    tt_value x = tt_input(t, "x", TT_F32, 4, 2);
    tt_value h = tt_linear(t, x, param2(ctx, "w", 3, 2, init_of(TT_INIT_NORMAL, 1)), NULL);
    char *precision = strdup("32-true"), *device = strdup("cpu"), *recompute = strdup("cheap");
    char *update = strdup("backward");
    o.train = false;
    tt_program *first = tt_compile(t, h, &o);
    o.precision = precision;
    o.device = device;
    o.recompute = recompute;
    o.update = update;
    tt_program *second = tt_compile(t, h, &o);
    REQUIRE(first && second && precision && device && recompute && update);
    memset(precision, '?', strlen(precision));
    free(precision);
    free(device);
    free(recompute);
    free(update);
    tt_program_free(first); /* and with it the parameter's memory, which was never allocated */
    o = tt_compile_options_default();
    o.train = false;
    o.precision = "bf16-true";
    tt_program *third = tt_compile(t, h, &o);
    REQUIRE(third != NULL);
    CHECK(tt_allocate(third) == TT_OK && tt_allocate(second) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "precision '32-true' needs parameter 'w' as f32");
    tt_program_free(second);
    tt_program_free(third);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* A program that does not fit into an arena that is allocated is refused, whatever its budget; one that fits
   joins. */
TEST(sharing_an_allocated_arena)
{
    test_allocator a;
    model m;
    tt_stats stats;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    c.train = false;
    tt_program *eval = tt_compile(m.t, m.loss, &c);
    REQUIRE(eval && tt_allocate(eval) == TT_OK);
    const size_t held = tt_allocated_bytes(ctx), bytes = tt_program_plan(eval).bytes;
    c.share = eval;
    for (int train = 0; train < 2; train++)
        for (int budget = 0; budget < 2; budget++) {
            c.train = train;
            c.memory_budget = budget ? bytes : 0;
            tt_program *p = tt_compile(m.t, m.loss, &c);
            CHECK((p != NULL) == !train);
            if (train) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the arena of `share` is allocated already");
            if (train) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "compile it before tt_allocate or the first tt_set");
            if (p) CHECK(p->arena == eval->arena && tt_program_plan(p).bytes == bytes);
            if (p) CHECK(model_set(&m, p, 1) == TT_OK && tt_run(p, &stats) == TT_OK);
            if (p) CHECK(tt_program_plan(eval).bytes == bytes && a.live_bytes >= held);
            tt_program_free(p);
            CHECK(tt_allocated_bytes(ctx) == held);
        }
    tt_program_free(eval);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* A program that makes a shared arena larger than the budget of another in it is refused. */
TEST(budget_of_a_shared_arena)
{
    test_allocator a;
    model m;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    c.train = false;
    tt_program *eval = tt_compile(m.t, m.loss, &c);
    REQUIRE(eval != NULL);
    c.memory_budget = tt_program_plan(eval).bytes;
    tt_program_free(eval);
    eval = tt_compile(m.t, m.loss, &c);
    REQUIRE(eval != NULL);
    const size_t before = tt_allocated_bytes(ctx);
    c.train = true;
    c.share = eval;
    for (int k = 0; k < 2; k++) {
        c.memory_budget = k ? (size_t)1 << 40 : 0;
        CHECK(!tt_compile(m.t, m.loss, &c));
        CHECK_ERROR(ctx, TT_ERR_BUDGET, "for a program that this one shares an arena with");
        CHECK(tt_allocated_bytes(ctx) == before && tt_program_plan(eval).bytes == eval->arena->budget);
    }
    tt_program_free(eval);
    c.share = NULL;
    c.memory_budget = 0;
    tt_program *train = tt_compile(m.t, m.loss, &c);
    REQUIRE(train != NULL);
    c.memory_budget = tt_program_plan(train).bytes;
    tt_program_free(train);
    train = tt_compile(m.t, m.loss, &c);
    c.train = false;
    c.share = train;
    c.memory_budget = 0;
    eval = tt_compile(m.t, m.loss, &c); /* no larger than the training */
    CHECK(train && eval && eval->arena == train->arena);
    tt_program_free(train);
    tt_program_free(eval);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* Parameters are counted in the plan of the program whose arena has them, and in no other. */
TEST(plans_count_what_their_arena_holds)
{
    test_allocator a;
    model m;
    tt_context *ctx = test_open(&a);
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    tt_program *holder = model_compile(&m, true, "32-true", false),
               *other = model_compile(&m, false, "32-true", false);
    REQUIRE(holder && other && holder->arena != other->arena);
    const tt_plan plans[2] = {tt_program_plan(holder), tt_program_plan(other)};
    for (int k = 0; k < 2; k++) {
        size_t live = 0;
        for (int c = 0; c < TT_MEM_CATEGORIES; c++) live += plans[k].at_peak[c];
        CHECK(live == plans[k].lower_bound_bytes && (plans[k].at_peak[TT_MEM_PARAMETERS] > 0) == (k == 0));
    }
    const size_t before = tt_allocated_bytes(ctx);
    CHECK(tt_allocate(holder) == TT_OK && tt_allocate(other) == TT_OK);
    CHECK(tt_allocated_bytes(ctx) - before ==
          plans[0].bytes + plans[0].host_bytes + plans[1].bytes + plans[1].host_bytes);
    tt_program_free(holder);
    tt_program_free(other);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* Parameters move to an arena of other dtypes, while a program that takes them for what they were waits to
   run. */
TEST(parameters_held_as_another_dtype)
{
    test_allocator a;
    model m;
    tt_context *ctx = test_open(&a);
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    tt_program *first = model_compile(&m, true, "bf16-true", false),
               *second = model_compile(&m, false, "bf16-true", false);
    REQUIRE(first && second);
    tt_program_free(first); /* never allocated */
    first = model_compile(&m, true, "32-true", false);
    REQUIRE(first && tt_allocate(first) == TT_OK);
    CHECK(tt_allocate(second) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "precision 'bf16-true' needs parameter 'embed.weight' as bf16, but an earlier program holds "
                "it as f32");
    tt_program_free(first);
    tt_program_free(second);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* -------------------------------------------------------------------------------------------------- build */

static bool same_built(const tt__built *a, const tt__built *b)
{
    const tt_tape *s = a->t, *t = b->t;
    bool same = s->n_values == t->n_values && s->n_code == t->n_code && a->n_boxes == b->n_boxes &&
                a->root == b->root;
    same = same && a->transient == b->transient && a->bound == b->bound && a->peak_at == b->peak_at &&
           a->recorded == b->recorded;
    for (int k = 0; same && k < s->n_code; k++) {
        const tt__instr *i = &s->code[k], *j = &t->code[k];
        same = i->op == j->op && memcmp(i->in, j->in, sizeof i->in) == 0 &&
               memcmp(i->out, j->out, sizeof i->out) == 0 && i->workspace == j->workspace &&
               i->workspace_place == j->workspace_place && i->random == j->random;
    }
    for (int32_t v = 1; same && v < s->n_values; v++) {
        const tt__value *x = &s->values[v], *y = &t->values[v];
        same = x->place == y->place && x->shape.rows == y->shape.rows && x->shape.dtype == y->shape.dtype &&
               strcmp(x->name, y->name) == 0;
    }
    for (int k = 0; same && k < a->n_boxes; k++)
        same = a->box[k].place == b->box[k].place && a->box[k].bytes == b->box[k].bytes &&
               a->box[k].value == b->box[k].value;
    return same;
}

/* build depends on its arguments alone and changes nothing: any number of choices can be tried. */
TEST(builds_are_pure)
{
    enum { CHOICES = 8 };
    test_allocator a;
    model m;
    tt_context *ctx = test_open(&a);
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    tt_program *program = model_compile(&m, false, "32-true", false); /* whose arena must stay as it is */
    REQUIRE(program != NULL);
    const tt__arena arena = *program->arena;
    for (int precision = 0; precision < 2; precision++) {
        tt_compile_options o = tt_compile_options_default();
        tt__settings s;
        tt__built kept[CHOICES];
        o.precision = precision ? "bf16-mixed" : "32-true";
        o.accumulate = precision;
        REQUIRE(tt__parse_settings(ctx, &o, &s) == TT_OK);
        const size_t before = tt_allocated_bytes(ctx), values = sizeof *m.t->values * (size_t)m.t->n_values;
        tt__value *was = (tt__value *)malloc(values);
        memcpy(was, m.t->values, values);
        for (int k = 0; k < 30; k++) {
            const int number = k * 7 % CHOICES;
            tt__choice choice = {(tt__recompute)(number % 4), number < 4 ? 0u : 15u, 1, false, number % 3,
                                 INT_MAX, NULL, 0, 1, false, number % 3};
            tt__built b;
            REQUIRE(tt__build(m.t, m.loss.id, &s, &choice, &b) == TT_OK);
            if (k < CHOICES) { kept[number] = b; continue; }
            for (int other = 0; other < CHOICES; other++) {
                const bool alike = same_built(&b, &kept[other]);
                CHECK(other == number ? alike : !alike || kept[other].t->n_code == b.t->n_code);
            }
            tt__built_free(ctx, &b);
        }
        CHECK(!same_built(&kept[0], &kept[1]) && kept[TT__RECOMPUTE_BLOCKS].t->n_code >= kept[0].t->n_code &&
              kept[4].t->n_code > kept[0].t->n_code);
        for (int k = 0; k < CHOICES; k++) tt__built_free(ctx, &kept[k]);
        CHECK(tt_allocated_bytes(ctx) == before && memcmp(was, m.t->values, values) == 0);
        free(was);

        long calls = a.calls, failed = 0; /* each allocation fails in turn */
        tt__choice choice = {TT__RECOMPUTE_CHEAP, precision ? 15u : 0u, 1, !precision,
                             precision ? 2 : 0, INT_MAX, NULL, 0, 1, false, 0};
        tt__built b;
        REQUIRE(tt__build(m.t, m.loss.id, &s, &choice, &b) == TT_OK);
        tt__built_free(ctx, &b);
        calls = a.calls - calls;
        for (long k = 1; k <= calls; k++) {
            a.fail_at = a.calls + k;
            CHECK(tt__build(m.t, m.loss.id, &s, &choice, &b) == TT_ERR_MEMORY);
            CHECK(!b.t && !b.box && tt_allocated_bytes(ctx) == before);
            failed++;
        }
        a.fail_at = 0;
        CHECK(failed == calls && calls > 5);
    }
    CHECK(memcmp(&arena, program->arena, sizeof arena) == 0);
    for (int k = 0; k < ctx->n_params; k++)
        CHECK(ctx->params[k]->holder == program->arena && !tt__has_memory(ctx->params[k]));
    tt_program_free(program);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* All that is wrong with the options is in one message. */
TEST(options_are_checked_together)
{
    test_allocator a;
    model m;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    static const char *const says[] = {"precision 'int4' is unknown", "matmul 'int8' is unknown",
                                       "recompute 'most' is unknown", "offload 'model' is unknown",
                                       "update 'now' is unknown",
                                       "optimizer options: beta1 2 is not in [0, 1); eps -1 is negative",
                                       "device 'abacus' is unknown"};
    c.precision = "int4";
    c.matmul = "int8";
    c.recompute = "most";
    c.offload = "parameters,model";
    c.update = "now";
    c.optimizer.beta1 = 2;
    c.optimizer.eps = -1;
    c.device = "abacus";
    CHECK(!tt_compile(m.t, m.loss, &c));
    for (int k = 0; k < TEST_COUNT(says); k++) CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, says[k]);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

TEST(names_of_devices)
{
    test_allocator a;
    model m;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    static const struct { const char *name, *says; tt_status status; int index; } cases[] = {
        {"cpu", NULL, TT_OK, 0}, {"cpu:0", NULL, TT_OK, 0}, {"cuda", NULL, TT_OK, 0},
        {"cuda:0", NULL, TT_OK, 0},
        {"cuda:1", NULL, TT_OK, 1}, {"cuda:63", NULL, TT_OK, 63}, {"cuda*1", NULL, TT_OK, 0},
        {"cuda:64", "device 'cuda:64': after 'cuda' comes nothing, ':' and numbers from 0 to 63 with commas "
         "between them, or '*' and how many, at most 64", TT_ERR_ARGUMENT, 0},
        {"cuda:", "numbers from 0 to 63", TT_ERR_ARGUMENT, 0}, {"cuda:x", "numbers", TT_ERR_ARGUMENT, 0},
        {"cuda:1x", "numbers", TT_ERR_ARGUMENT, 0}, {"cuda:-1", "numbers", TT_ERR_ARGUMENT, 0},
        {"cuda:1,", "numbers", TT_ERR_ARGUMENT, 0}, {"cuda:,1", "numbers", TT_ERR_ARGUMENT, 0},
        {"cuda*", "at most 64", TT_ERR_ARGUMENT, 0}, {"cuda*0", "at most 64", TT_ERR_ARGUMENT, 0},
        {"cuda*65", "at most 64", TT_ERR_ARGUMENT, 0}, {"cuda*2x", "at most 64", TT_ERR_ARGUMENT, 0},
        {"cuda:99999999999999999999", "numbers", TT_ERR_ARGUMENT, 0},
        {"cpu:1", "device 'cpu:1' is not there: the CPU is one device, cpu", TT_ERR_ARGUMENT, 0},
        {"cpu:0,0", "cpu*2 is two ranks", TT_ERR_ARGUMENT, 0}, {"cpu*4", NULL, TT_OK, 0},
        {"cuda*8", NULL, TT_OK, 0}, {"cuda:3,2", NULL, TT_OK, 3}, {"cuda:0,0", NULL, TT_OK, 0},
        {"cpux", "device 'cpux' is unknown: use cpu or cuda", TT_ERR_UNSUPPORTED, 0},
        {"gpu:1", "device 'gpu:1' is unknown: use cpu or cuda", TT_ERR_UNSUPPORTED, 0}};
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        c.device = cases[k].name;
        tt_program *p = tt_compile(m.t, m.loss, &c);
        test__check((p != NULL) == !cases[k].says, __FILE__, __LINE__, cases[k].name);
        if (cases[k].says) CHECK_ERROR(ctx, cases[k].status, cases[k].says);
        if (p) CHECK(p->settings.crew->index[0] == cases[k].index && p->arena->crew == p->settings.crew);
        tt_program_free(p);
        if (cases[k].says) CHECK(tt_device_text(ctx, cases[k].name, NULL, 0) == cases[k].status);
    }
    c.device = "cuda:1"; /* an arena is on one device */
    tt_program *other = tt_compile(m.t, m.loss, &c);
    REQUIRE(other != NULL);
    c.device = "cuda";
    c.share = other;
    CHECK(!tt_compile(m.t, m.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "`share` is a program for device 'cuda:1', and this one is for 'cuda'");
    tt_program_free(other);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------------------- misuse */

TEST(misuse_of_runs)
{
    test_allocator a;
    model m;
    tt_stats stats;
    float got[64];
    int32_t ids[ROWS] = {0};
    tt_context *ctx = test_open(&a);
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    tt_program *train = model_compile(&m, true, "32-true", false),
               *eval = model_compile(&m, false, "32-true", false),
               *acc = model_compile(&m, true, "32-true", true);
    REQUIRE(train && eval && acc);
    CHECK(tt_set(eval, m.ids, ids, 1) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "lives in a program that is not allocated: allocate that one first, or compile with `share`");
    CHECK(tt_get(train, m.loss, got, 64) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "has no contents: get it after a run");
    REQUIRE(tt_allocate(train) == TT_OK);
    CHECK(tt_get(train, m.loss, got, 64) == TT_ERR_ARGUMENT);

    CHECK(tt_run(train, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "tt_run: this program trains: use tt_step, or compile with train = false");
    CHECK(tt_step(eval, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "compiled with train = false: use tt_run");
    CHECK(tt_micro_step(train, &stats) == TT_ERR_ARGUMENT &&
          tt_update(train, 0.1f, &stats) == TT_ERR_ARGUMENT && tt_micro_step(eval, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tt_micro_step needs a program compiled with train and accumulate");
    CHECK(tt_update(acc, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tt_update: no micro-batch was run in this step");
    CHECK(tt_get_gradient(acc, tt_param_find(ctx, "head.bias"), got) == TT_ERR_ARGUMENT &&
          tt_get_gradient(train, tt_param_find(ctx, "head.bias"), got) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "tt_get_gradient: gradients are kept between tt_micro_step and tt_update");

    CHECK(tt_step(train, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "was not set before this run: tt_set it each time");
    CHECK(model_set(&m, train, 0) == TT_OK && tt_step(train, 0.1f, &stats) == TT_OK && stats.step == 1);
    CHECK(tt_step(train, 0.1f, &stats) == TT_ERR_ARGUMENT); /* not set again */
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "input 'ids' was not set");
    CHECK(tt_set(train, m.ids, ids, 4) == TT_OK && tt_step(train, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "input 'starts' was not set");

    CHECK(tt_set(train, m.ids, ids, ROWS + 1) == TT_ERR_SHAPE);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "17 rows for input 'ids', which takes 1 to 16");
    CHECK(tt_set(train, m.ids, ids, 0) == TT_ERR_SHAPE && tt_set(train, m.ids, ids, -1) == TT_ERR_SHAPE);
    CHECK(tt_set(train, m.starts, ids, 3) == TT_OK && tt_set(train, m.labels, ids, 3) == TT_ERR_SHAPE);
    /* Starts has one more. */
    CHECK_ERROR(ctx, TT_ERR_SHAPE,
                "input 'labels' has 3 rows, but 'starts' was set with 3 on the same axis 'seqs'");
    CHECK(tt_set(train, m.labels, ids, 2) == TT_OK && tt_set(train, m.starts, ids, 1) == TT_ERR_SHAPE);
    /* An input that is set again may have other rows; the rest of its axis must follow. */
    CHECK(tt_set(train, m.starts, ids, 4) == TT_OK);
    CHECK(tt_set(train, m.ids, ids, 4) == TT_OK && tt_step(train, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "input 'labels' was not set");
    CHECK(tt_set(train, m.loss, ids, 1) == TT_ERR_ARGUMENT &&
          tt_set(train, tt__handle(m.t, 0), ids, 1) == TT_ERR_ARGUMENT &&
          tt_set(train, tt__handle(m.t, 99999), ids, 1) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "is no input of this program");

    CHECK(tt_get(train, m.logits, got, 64) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "is neither an output nor the root of this program: mark it with tt_output");
    CHECK(tt_get(train, tt__handle(m.t, -1), got, 64) == TT_ERR_ARGUMENT &&
          tt_get(train, tt__handle(m.t, 1 << 30), got, 64) == TT_ERR_ARGUMENT);
    CHECK(tt_get(train, m.loss, got, 1) == TT_ERR_ARGUMENT); /* an input was set since the run */
    /* Forgets what was set. */
    CHECK(tt_set(train, m.labels, ids, 2) == TT_OK && tt_step(train, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK(model_set(&m, train, 1) == TT_OK && tt_step(train, 0.1f, &stats) == TT_OK &&
          tt_get(train, m.loss, got, 1) == TT_OK);
    CHECK_NEAR(got[0], stats.loss, 1e-6);
    CHECK(tt_get(train, m.loss, got, 0) == TT_ERR_SHAPE);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "has 1 floats, the buffer 0");

    /* Learning rates that are refused update nothing. */
    float before[WIDTH * CLASSES], after[WIDTH * CLASSES];
    static const float rates[] = {-1, NAN, INFINITY, -INFINITY};
    tt_param_get(tt_param_find(ctx, "head.weight"), before);
    for (int k = 0; k < TEST_COUNT(rates); k++) {
        CHECK(model_set(&m, train, 1) == TT_OK && tt_step(train, rates[k], &stats) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "is not a finite number >= 0");
        tt_param_get(tt_param_find(ctx, "head.weight"), after);
        CHECK(memcmp(before, after, sizeof before) == 0);
    }
    CHECK(model_set(&m, train, 1) == TT_OK && tt_step(train, 0, &stats) == TT_OK && stats.step == 3);
    tt_param_get(tt_param_find(ctx, "head.weight"), after);
    CHECK(memcmp(before, after, sizeof before) == 0);
    tt_program_free(train);
    tt_program_free(eval);
    tt_program_free(acc);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* Of two tapes with values and axes of the same numbers, none is taken for one of the other. */
TEST(values_of_other_tapes)
{
    const int64_t dims[2] = {3, 3};
    test_allocator a, b;
    tt_context *ctx = test_open(&a), *second = test_open(&b);
    for (int k = 0; k < 9; k++) {
        tt_tape *t = tt_tape_new(ctx), *other = tt_tape_new(k == 8 ? second : ctx);
        tt_param *w = tt_param_find(ctx, "w");
        if (!w) w = tt_param_new(ctx, "w", 2, dims, (tt_init){TT_INIT_ONES, 0});
        const int64_t rows = tt_axis(t, "rows", 4), rows_there = tt_axis(other, "rows", 4);
        const tt_value x = tt_input(t, "x", TT_F32, rows, 3),
                       there = tt_input(other, "x", TT_F32, rows_there, 3);
        const tt_value y = tt_linear(t, x, w, NULL), loss = tt_mean_squared_error(t, y, x, (tt_value){0});
        float data[12] = {0};
        tt_program *p = NULL;
        CHECK(x.id == there.id && rows != rows_there);
        switch (k) {
        case 0: tt_linear(t, there, w, NULL); break;
        case 1: tt_add(t, y, there); break;
        case 2: tt_slice(t, there, 0, 1); break;
        case 3: tt_output(t, there); break;
        case 4: tt_input(t, "z", TT_F32, rows_there, 2); break;
        case 5: tt_reshape(t, y, rows_there, 3); break;
        case 6: CHECK(!tt_compile(t, there, NULL)); break;
        case 7:
            p = tt_compile(t, loss, NULL);
            REQUIRE(p != NULL);
            CHECK(tt_set(p, there, data, 4) == TT_ERR_ARGUMENT);
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "of another tape");
            CHECK(tt_get(p, there, data, 12) == TT_ERR_ARGUMENT);
            break;
        default: tt_linear(t, there, w, NULL); /* of another context */
        }
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "of another tape");
        CHECK(tt_value_rows(t, there) == 0 && tt_value_width(t, there) == 0 && tt_value_axis(t, there) == 0);
        tt_program_free(p);
        tt_tape_free(other);
        tt_tape_free(t);
    }
    TEST_CLOSE(second, &b);
    TEST_CLOSE(ctx, &a);
}

/* An axis that is asked for by its name, or by a value whose rows it is, is the same. */
TEST(axes_of_one_name)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    const int64_t rows = tt_axis(t, "sequences", 16);
    const tt_value x = tt_input(t, "x", TT_F32, rows, 2), fixed = tt_input(t, "fixed", TT_F32, 5, 2);
    const tt_value by_name = tt_input(t, "by name", TT_F32, tt_axis(t, "sequences", 16), 2);
    const tt_value by_value = tt_input(t, "by value", TT_F32, tt_value_axis(t, x), 2);
    CHECK(tt_axis(t, "sequences", 16) == rows && tt_value_axis(t, x) == rows && tt_value_axis(t, fixed) == 5);
    CHECK(tt_axis(t, "tokens", 16) != rows);
    const tt_value sum = tt_add(t, tt_add(t, x, by_name), by_value);
    CHECK(tt_tape_status(t) == TT_OK && tt_value_axis(t, sum) == rows);
    const tt_value starts = tt_seq_start(t, "starts", rows);
    CHECK(tt_value_rows(t, starts) == 17 && tt_value_axis(t, starts) != rows);
    CHECK(tt_value_rows(t, tt_input(t, "more starts", TT_I32, tt_value_axis(t, starts), 1)) == 17);
    CHECK(tt_axis(t, "sequences", 8) == 0);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "axis 'sequences': capacity 8, and this tape has an axis of that name "
                                      "with capacity 16");
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* Where a status or a NULL was not looked at, what fails because of it names the first reason. */
TEST(first_reasons_are_kept)
{
    const int64_t dims[2] = {3, 3}, one[1] = {3}, none[1] = {0};
    const tt_init ones = {TT_INIT_ONES, 0};
    test_allocator a;
    tt_stats stats;
    float data[15] = {0};
    tt_context *ctx = test_open(&a);
    CHECK(tt_param_count(ctx) == 0 && tt_param_at(ctx, 0) == NULL);
    tt_param *w = tt_param_new(ctx, "layer.w", 2, dims, ones);
    tt_param *b = tt_param_new(ctx, "layer.b", 1, one, ones);
    CHECK(tt_param_count(ctx) == 2 && tt_param_at(ctx, 0) == w && tt_param_at(ctx, 1) == b);
    CHECK(tt_param_at(ctx, 2) == NULL && tt_param_at(ctx, -1) == NULL);
    for (int optional = 0; optional < 2; optional++) { /* a linear layer has its bias, or the program none */
        tt_tape *t = tt_tape_new(ctx);
        const tt_value x = tt_input(t, "x", TT_F32, 5, 3);
        tt_param *again = tt_param_new(ctx, "layer.b", 1, one, ones);
        tt_param_new(ctx, "empty", 1, none, ones); /* a later failure */
        if (optional) tt_linear(t, x, w, again);
        else tt_layernorm(t, x, again, b, 1e-5f);
        CHECK(tt_tape_status(t) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "is NULL: parameter 'layer.b' exists already");
        tt_tape_free(t);
    }
    CHECK(!tt_param_new(ctx, "layer.b", 1, one, ones));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "exists already"); /* which the caller knows from now on */

    tt_tape *t = tt_tape_new(ctx);
    const int64_t rows = tt_axis(t, "rows", 5);
    const tt_value x = tt_input(t, "x", TT_F32, rows, 3), y = tt_input(t, "y", TT_F32, rows, 3);
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, tt_linear(t, x, w, NULL), y, (tt_value){0}), NULL);
    REQUIRE(p != NULL);
    tt_set(p, x, data, 6);
    tt_set(p, y, NULL, 5);
    CHECK(tt_step(p, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "input 'x' was not set before this run: tt_set: 6 rows for input 'x', "
                                      "which takes 1 to 5");
    tt_set(p, x, data, 4);
    tt_set(p, y, data, 3);
    CHECK(tt_step(p, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "input 'y' was not set before this run: tt_set: input 'y' has 3 rows, "
                                      "but 'x' was set with 4 on the same axis 'rows'");
    CHECK(tt_step(p, 0.1f, &stats) == TT_ERR_ARGUMENT); /* a reason is for one run */
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "input 'x' was not set before this run: tt_set it each time");
    CHECK(tt_set(p, x, data, 4) == TT_OK && tt_set(p, y, data, 4) == TT_OK);
    CHECK(tt_step(p, 0.1f, &stats) == TT_OK);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

TEST(misuse_of_compile)
{
    test_allocator a, b;
    model m;
    tt_context *ctx = test_open(&a), *second = test_open(&b);
    tt_compile_options c = tt_compile_options_default();
    REQUIRE(model_params(ctx) && model_record(ctx, &m) && model_params(second));
    CHECK(!tt_compile(m.t, m.logits, &c));
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "the loss must be a (1, 1) result of an op, not 'linear");
    CHECK(!tt_compile(m.t, m.ids, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "nothing to train");
    CHECK(!tt_compile(m.t, tt__handle(m.t, 0), &c) && !tt_compile(m.t, tt__handle(m.t, 12345), &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tt_compile: the root is not a value of this tape");
    c.precision = "int4";
    CHECK(!tt_compile(m.t, m.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED,
                "precision 'int4' is unknown: use 32-true, 16-mixed, 16-true, bf16-mixed or bf16-true");
    c.precision = "32-true";
    c.recompute = "most";
    CHECK(!tt_compile(m.t, m.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "recompute 'most' is unknown: use none, cheap, attention, blocks or "
                                         "budget");
    c.recompute = "budget";
    CHECK(!tt_compile(m.t, m.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "recompute 'budget' chooses what fits memory_budget, which is not set");
    c.recompute = "cheap";
    c.offload = "budget";
    CHECK(!tt_compile(m.t, m.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "offload 'budget' chooses what fits memory_budget, which is not set");
    c.offload = "budget,optimizer";
    CHECK(!tt_compile(m.t, m.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "offload 'budget' is unknown: use none or budget alone");
    c.offload = NULL;
    c.parallel.zero = TT_ZERO_BUDGET;
    CHECK(!tt_compile(m.t, m.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "zero 'budget' chooses what fits memory_budget, which is not set");
    c.memory_budget = (size_t)1 << 40;
    c.parallel.server = true;
    CHECK(!tt_compile(m.t, m.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "a parameter server keeps whole gradients and parameters");
    c.parallel = tt_parallel_default();
    c.memory_budget = 0;
    c.recompute = "budget";
    static const struct { void (*mark)(tt_tape *, tt_value); const char *name; } marks[] = {
        {tt_block_end, "tt_block_end"}, {tt_keep, "tt_keep"}, {tt_recompute, "tt_recompute"}};
    for (int k = 0; k < TEST_COUNT(marks); k++) {
        char text[64];
        tt_tape *marked = tt_tape_new(ctx);
        marks[k].mark(marked, tt__handle(marked, k ? -k : 7));
        CHECK(!tt_compile(marked, tt__handle(marked, 1), NULL));
        snprintf(text, sizeof text, "%s: the value is not a value of this tape", marks[k].name);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, text);
        tt_tape_free(marked);
    }

    model n; /* share and parameters across contexts */
    REQUIRE(model_record(second, &n));
    tt_program *other = model_compile(&n, true, "32-true", false);
    c = tt_compile_options_default();
    c.share = other;
    CHECK(!tt_compile(m.t, m.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "`share` belongs to another context");
    tt_tape *t = tt_tape_new(ctx);
    tt_embedding(t, tt_input(t, "ids", TT_I32, 3, 1), tt_param_find(second, "embed.weight"));
    CHECK(tt_tape_status(t) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "parameter 'embed.weight' belongs to another context");
    CHECK(!tt_compile(t, tt__handle(t, 1), NULL)); /* sticky: with the first sentence */
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "parameter 'embed.weight' belongs to another context");
    tt_tape_free(t);

    tt_program *first = model_compile(&m, true, "bf16-mixed", false); /* one parameter, two dtypes */
    CHECK(first && !model_compile(&m, true, "bf16-true", false));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "precision 'bf16-true' needs parameter 'embed.weight' as bf16, but an earlier program holds "
                "it as f32");
    size_t bytes = tt_program_plan(first).bytes;
    c = tt_compile_options_default();
    c.precision = "bf16-true";
    c.share = first;
    CHECK(!tt_compile(m.t, m.loss, &c) && tt_program_plan(first).bytes == bytes);
    tt_program_free(first);
    /* It was never allocated, so the choice is free again. */
    first = model_compile(&m, true, "bf16-true", false);
    CHECK(first != NULL);
    tt_program_free(first);

    t = tt_tape_new(ctx); /* two losses */
    tt_value x = tt_input(t, "x", TT_F32, 4, WIDTH), y = tt_input(t, "y", TT_F32, 4, WIDTH);
    tt_value h = tt_linear(t, x, tt_param_find(ctx, "layer.1.weight"), NULL);
    tt_value both = tt_add(t, tt_mean_squared_error(t, h, y, tt__handle(t, 0)),
                           tt_mean_squared_error(t, h, x, tt__handle(t, 0)));
    c = tt_compile_options_default();
    tt_program *p = tt_compile(t, both, &c);
    CHECK(p != NULL);
    tt_program_free(p);
    c.accumulate = true;
    CHECK(!tt_compile(t, both, &c));
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED,
                "accumulate divides by the targets of one loss, but the program has 2");
    tt_value scalar = tt_linear(t,
                                tt_reshape(t, tt_param_value(t, tt_param_find(ctx, "norm.bias")), 1, WIDTH),
                                param2(ctx, "scalar", 1, WIDTH, init_of(TT_INIT_ONES, 0)), NULL);
    c.accumulate = false;
    CHECK(!tt_compile(t, scalar, &c)); /* (1, 1), but no loss op: nothing counts its targets */
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "no loss");
    tt_tape_free(t);

    tt_program_free(other);
    tt_tape_free(n.t);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
    TEST_CLOSE(second, &b);
}

/* A dropout that is off may be the root; inputs may be the root, unread, or an output. */
TEST(odd_roots_and_unread_inputs)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    float x[8], got[8];
    int32_t big[4096];
    tt_stats stats;
    for (int k = 0; k < 8; k++) x[k] = (float)k;
    memset(big, 0x11, sizeof big);
    tt_compile_options c = tt_compile_options_default();
    tt_tape *t = tt_tape_new(ctx);
    tt_value in = tt_input(t, "x", TT_F32, 2, 4), unread = tt_input(t, "unread", TT_I32, 4096, 1),
             target = tt_input(t, "target", TT_F32, 2, 4);
    tt_value y = tt_linear(t, in, param2(ctx, "w", 4, 4, init_of(TT_INIT_NORMAL, 1)), NULL);
    tt_value loss = tt_dropout(t, tt_mean_squared_error(t, y, target, tt__handle(t, 0)), 0);
    tt_output(t, in);
    tt_program *p = tt_compile(t, loss, &c);
    if (CHECK(p != NULL)) {
        CHECK(tt_set(p, in, x, 2) == TT_OK && tt_set(p, target, x, 2) == TT_OK &&
              tt_set(p, unread, big, 4096) == TT_OK);
        CHECK(tt_step(p, 0.01f, &stats) == TT_OK && stats.grad_norm > 0);
        CHECK(tt_get(p, loss, got, 8) == TT_OK);
        CHECK_NEAR(got[0], stats.loss, 1e-6);
        CHECK(tt_get(p, in, got, 8) == TT_OK && memcmp(x, got, sizeof x) == 0);
    }
    tt_program_free(p);
    c.train = false;
    p = tt_compile(t, in, &c); /* no instructions at all */
    if (CHECK(p != NULL)) {
        CHECK(tt_set(p, unread, big, 4096) == TT_OK && tt_set(p, in, x, 2) == TT_OK &&
              tt_set(p, target, big, 2) == TT_OK && tt_run(p, &stats) == TT_OK);
        CHECK(tt_get(p, in, got, 8) == TT_OK && memcmp(x, got, sizeof x) == 0);
        CHECK(tt_program_plan(p).instructions == 0 && tt_plan_text(p, NULL, 0) > 0);
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* The program that holds the parameters is freed before it was allocated. */
TEST(parameters_of_a_freed_program)
{
    test_allocator a;
    model m;
    tt_stats stats;
    tt_context *ctx = test_open(&a);
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    tt_program *first = model_compile(&m, true, "32-true", false),
               *second = model_compile(&m, false, "32-true", false);
    REQUIRE(first && second);
    tt_program_free(first);
    CHECK(model_set(&m, second, 0) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "was freed before it was allocated: compile this one again");
    tt_program_free(second);
    second = model_compile(&m, false, "32-true", false);
    CHECK(second && model_set(&m, second, 0) == TT_OK && tt_run(second, &stats) == TT_OK &&
          isfinite(stats.loss));
    tt_program_free(second);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* A loss or gradient that is not finite is named and changes nothing. */
TEST(numbers_that_are_not_finite)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    static const float inputs[4][4] = {
        {NAN, 2, 3, 4}, {1, 2, 3, 4}, {1e15f, 2, 3, 4}, {1, 2, 3, 4}}, all_weights[4][2] = {{1, 1}, {0, 0},
        {1, 1}, {1, 1}};
    static const char *const messages[4] = {"the loss 'scale",
                                            "no target counts (all are ignored or have weight 0)",
                                            "the gradient of 'w' is not finite",
                                            "the sum of squares of the gradient of 'w' overflows"};
    float target[4] = {0, 0, 0, 0}, before[4], after[4];
    tt_param *w = param2(ctx, "w", 2, 2, init_of(TT_INIT_NORMAL, 1));
    tt_tape *t = tt_tape_new(ctx);
    tt_value in = tt_input(t, "x", TT_F32, 2, 2), goal = tt_input(t, "target", TT_F32, 2, 2),
             weights = tt_input(t, "weights", TT_F32, 2, 1);
    tt_value loss = tt_scale(t, tt_mean_squared_error(t, tt_linear(t, in, w, NULL), goal, weights), 1e30f);
    tt_program *p = tt_compile(t, loss, &c);
    REQUIRE(p != NULL);
    tt_param_get(w, before);
    for (int k = 0; k < 4; k++) {
        CHECK(tt_set(p, in, inputs[k], 2) == TT_OK && tt_set(p, goal, target, 2) == TT_OK &&
              tt_set(p, weights, all_weights[k], 2) == TT_OK);
        CHECK(tt_step(p, 0.1f, NULL) == TT_ERR_NUMERIC);
        CHECK_ERROR(ctx, TT_ERR_NUMERIC, messages[k]);
        CHECK_ERROR(ctx, TT_ERR_NUMERIC, "nothing was updated");
        tt_param_get(w, after);
        CHECK(memcmp(before, after, sizeof before) == 0 && p->run.step == 0);
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* The sum of two losses, of a x and of b y: b's gradient may overflow where a's does not. */
typedef struct two_losses { tt_param *a, *b; tt_tape *t; tt_value x, y, target, loss; } two_losses;

static two_losses record_two(tt_context *ctx)
{
    const tt_value none = {0};
    two_losses m;
    m.a = param2(ctx, "a", 1, 2, init_of(TT_INIT_NORMAL, 1));
    m.b = param2(ctx, "b", 1, 2, init_of(TT_INIT_ZEROS, 0));
    m.t = tt_tape_new(ctx);
    m.x = tt_input(m.t, "x", TT_F32, 2, 2);
    m.y = tt_input(m.t, "y", TT_F32, 2, 2);
    m.target = tt_input(m.t, "target", TT_F32, 2, 1);
    const tt_value first = tt_mean_squared_error(m.t, tt_linear(m.t, m.x, m.a, NULL), m.target, none);
    const tt_value second = tt_mean_squared_error(m.t, tt_linear(m.t, m.y, m.b, NULL), m.target, none);
    m.loss = tt_add(m.t, first, second);
    return m;
}

static tt_status step_two(const two_losses *m, tt_program *p, float x, float y)
{
    const float xs[4] = {x, 1, 1, 1}, ys[4] = {y, 1, 1, 1}, target[2] = {1, 2};
    tt_status status = tt_set(p, m->x, xs, 2);
    if (status == TT_OK) status = tt_set(p, m->y, ys, 2);
    if (status == TT_OK) status = tt_set(p, m->target, target, 2);
    return status == TT_OK ? tt_step(p, 0.1f, NULL) : status;
}

/* Has p the values that it had? These become the ones that it has. */
static bool is_still(const tt_param *p, float was[2])
{
    float now[2];
    tt_param_get(p, now);
    const bool same = memcmp(was, now, sizeof now) == 0;
    memcpy(was, now, sizeof now);
    return same;
}

/* Where parameters are updated in the backward, a gradient that overflows leaves its parameter as it was, and
   no other; a loss that is not finite leaves all. A state that was saved before makes up for it. */
TEST(numbers_that_are_not_finite_in_an_early_update)
{
    test_allocator a;
    const char *path = test_path(test_folder(), "state");
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    float was_a[2], was_b[2], right_a[2], right_b[2];
    const two_losses m = record_two(ctx);
    c.update = "backward";
    tt_program *p = tt_compile(m.t, m.loss, &c);
    REQUIRE(p && step_two(&m, p, 1, 1) == TT_OK && tt_program_save(p, path) == TT_OK);
    CHECK(step_two(&m, p, 2, 2) == TT_OK);
    is_still(m.a, right_a);
    is_still(m.b, right_b);
    CHECK(tt_program_load(p, path) == TT_OK);
    is_still(m.a, was_a);
    is_still(m.b, was_b);
    CHECK(step_two(&m, p, NAN, 1) == TT_ERR_NUMERIC);
    CHECK_ERROR(ctx, TT_ERR_NUMERIC, "is not finite; nothing was updated");
    CHECK(is_still(m.a, was_a) && is_still(m.b, was_b) && tt_program_steps(p) == 1);
    const float of_small_loss[2] = {0, 3};
    CHECK(tt_param_set(m.b, of_small_loss) == TT_OK && !is_still(m.b, was_b));
    CHECK(step_two(&m, p, 1, 1e30f) == TT_ERR_NUMERIC); /* the loss is small, as b's first weight is 0 */
    CHECK_ERROR(ctx, TT_ERR_NUMERIC, "the gradient of 'b' is not finite, or the sum of its squares "
                "overflows; it was not updated, but with update 'backward' others may have been: load the "
                "last state");
    CHECK(!is_still(m.a, was_a) && is_still(m.b, was_b) && tt_program_steps(p) == 1);
    CHECK(tt_program_load(p, path) == TT_OK && step_two(&m, p, 2, 2) == TT_OK && tt_program_steps(p) == 2);
    CHECK(is_still(m.a, right_a) && is_still(m.b, right_b));
    remove(path);
    tt_program_free(p);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* What needs all gradients at once is refused in one sentence, but where a program does not train. */
TEST(early_updates_that_are_refused)
{
    static const char *const says[] = {
        "update 'backward' does not go with accumulate, as gradients are final at the step's end only: use "
        "update 'end'",
        "update 'backward' does not go with clip_norm 1, as the norm of all gradients is known at the step's "
        "end only: use update 'end'",
        "update 'backward' does not go with precision '16-mixed', as loss scaling skips whole steps: use "
        "update 'end'",
        "update 'backward' does not go with precision '16-true', as loss scaling",
        "update 'backward' does not go with parallel.server: use update 'end'",
        "does not go with accumulate, as gradients are final at the step's end only, nor with clip_norm 0.5"};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const two_losses m = record_two(ctx);
    for (int k = 0; k <= TEST_COUNT(says); k++) {
        tt_compile_options c = tt_compile_options_default();
        c.update = "backward";
        c.accumulate = k == 0 || k == 5;
        c.optimizer.clip_norm = k == 1 ? 1 : k == 5 ? 0.5f : 0;
        if (k == 2 || k == 3) c.precision = k == 2 ? "16-mixed" : "16-true";
        c.parallel.server = k == 4;
        tt_program *p = tt_compile(m.t, m.loss, &c);
        CHECK((p != NULL) == (k == TEST_COUNT(says)));
        if (!p) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, says[k]);
        tt_program_free(p);
        c.train = false;
        p = tt_compile(m.t, m.loss, &c);
        CHECK(p != NULL);
        tt_program_free(p);
    }
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

static const test_case tests[] = {
    TEST_CASE(context_options), TEST_CASE(measured_peak_is_plausible), TEST_CASE(costs_of_this_machine),
    TEST_CASE(pool_runs_each_task_once),
    TEST_CASE(contexts_in_parallel), TEST_CASE(threads_leave_signals_to_the_host),
    TEST_CASE(callers_float_mode_changes_no_bit), TEST_CASE(the_cpu_described),
    TEST_CASE(quotas_of_control_groups), TEST_CASE(memory_of_control_groups),
    TEST_CASE(plans_above_the_memory_are_refused), TEST_CASE(every_allocation_may_fail),
    TEST_CASE(closing_with_things_left_warns), TEST_CASE(nothing_is_printed_but_by_the_logger),
    TEST_CASE(initial_values), TEST_CASE(initial_values_too_large_for_f16),
    TEST_CASE(parameters_are_made_found_set_and_read), TEST_CASE(a_failed_source_can_be_tried_again),
    TEST_CASE(frozen_parameters_cost_nothing), TEST_CASE(frozen_parameters_keep_their_bits),
    TEST_CASE(logits_of_a_large_vocabulary), TEST_CASE(inputs_overwritten_by_another_program),
    TEST_CASE(inputs_overwritten_by_an_update), TEST_CASE(outputs_overwritten_by_another_programs_update),
    TEST_CASE(options_are_the_callers_again),
    TEST_CASE(sharing_an_allocated_arena), TEST_CASE(budget_of_a_shared_arena),
    TEST_CASE(plans_count_what_their_arena_holds), TEST_CASE(parameters_held_as_another_dtype),
    TEST_CASE(builds_are_pure), TEST_CASE(options_are_checked_together), TEST_CASE(names_of_devices),
    TEST_CASE(memory_budget), TEST_CASE(misuse_of_runs), TEST_CASE(misuse_of_compile),
    TEST_CASE(values_of_other_tapes), TEST_CASE(axes_of_one_name), TEST_CASE(first_reasons_are_kept),
    TEST_CASE(odd_roots_and_unread_inputs), TEST_CASE(parameters_of_a_freed_program),
    TEST_CASE(numbers_that_are_not_finite), TEST_CASE(numbers_that_are_not_finite_in_an_early_update),
    TEST_CASE(early_updates_that_are_refused),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
