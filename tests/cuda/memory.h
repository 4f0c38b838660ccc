/* Tests of host memory, of memory of several devices, and of managed memory. */
#pragma once

/* -------------------------------------------------------------------------------------- the host's memory */

/* gelu(x) goes to the host's memory and comes back, by instructions that the test writes itself. */
TEST(values_in_the_hosts_memory)
{
    test_allocator a;
    float x[160], y[160];
    start(1, (size_t)64 << 20, 5);
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_value in = tt_input(t, "x", TT_F32, 40, 4), h = tt_gelu(t, in);
    tt__shape shape = t->values[h.id].shape;
    int32_t away = tt__new_value(t, &shape, TT__TRANSIENT, "away"),
            back = tt__new_value(t, &shape, TT__TRANSIENT, "back");
    t->values[away].space = TT__HOST;
    const int32_t from[2] = {h.id, away}, to[2] = {away, back};
    for (int k = 0; k < 4; k++) {
        tt__instr *i = tt__append(t, k % 2 ? TT__OP_WAIT : TT__OP_COPY);
        i->stream = k % 2 ? 0 : 1;
        i->in[0] = k % 2 ? to[k / 2] : from[k / 2];
        if (k % 2) i->in[1] = from[k / 2];
        else i->out[0] = to[k / 2];
    }
    tt_value out = tt_scale(t, tt__handle(t, back), 2);
    tt_compile_options o = tt_compile_options_default();
    o.device = "cuda";
    o.train = false;
    tt_program *p = tt_compile(t, out, &o);
    REQUIRE(p != NULL);
    /* Host bytes: the value's 640 bytes rounded up to a multiple of 256, two copies of x, and the arena's
       buffer. */
    CHECK_NEAR((double)tt_program_plan(p).host_bytes, 768 + 2 * 640 + 65536, 0);
    CHECK(tt_program_plan(p).instructions == 6);
    for (int run = 0; run < 4; run++) { /* from the second run on, a graph is replayed */
        for (int k = 0; k < 160; k++) x[k] = (float)k / 40 - 2 + (float)run;
        CHECK(tt_set(p, in, x, 40) == TT_OK && tt_run(p, NULL) == TT_OK && tt_get(p, out, y, 160) == TT_OK);
        for (int k = 0; k < 160; k++)
            CHECK_NEAR(y[k], x[k] * (1 + erf(x[k] / sqrt(2))), 2e-6 * (1 + fabs(x[k])));
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

#ifdef TT_EMULATE
/* Plans count all pinned memory of programs: two copies of each input, values in the host's memory, and the
   arena's host parameters and buffer, which all programs of the arena share. */
TEST(pinned_memory_is_what_was_planned)
{
    for (int k = 0; k < 8; k++) {
        const int accumulate = k % 2;
        trained t;
        emu_configure(1, (size_t)64 << 20, 1, 1);
        offload = k / 2 % 2 ? everything : NULL;
        update = k < 4 ? NULL : "host";
        if (!open_training(&t, "cuda", accumulate, 0, accumulate)) { close_training(&t); return; }
        CHECK(emu_pinned_bytes() == 0 && tt_allocate(t.trainer->train) == TT_OK);
        const tt_plan train = tt_program_plan(t.trainer->train), eval = tt_program_plan(t.trainer->eval);
        CHECK_NEAR((double)emu_pinned_bytes(), (double)train.host_bytes, 0);
        CHECK(tt_allocate(t.trainer->eval) == TT_OK && t.trainer->eval->arena == t.trainer->train->arena);
        const size_t shared = TT__BOUNCE + t.trainer->train->arena->on_host;
        CHECK_NEAR((double)emu_pinned_bytes(), (double)(train.host_bytes + eval.host_bytes - shared), 0);
        CHECK((shared > TT__BOUNCE) == (offload != NULL));
        CHECK((train.transfer_bytes > 0) == (offload || update));
        close_training(&t);
        CHECK(emu_pinned_bytes() == 0);
    }
    offload = update = NULL;
}

/* ---------------------------------------------------------------------------------------- several devices */

/* Programs on two devices of a context give the results of each program alone on the first device, whichever
   way their steps alternate. */
TEST(programs_on_two_devices)
{
    enum { RUNS = 4, ROWS = 8, WIDTH = 16 };
    double loss[2][2][RUNS];
    float w[2][2][WIDTH];
    for (int both = 0; both < 2; both++) {
        test_allocator a;
        emu_configure(2, (size_t)64 << 20, 1, 6);
        tt_context *ctx = test_open(&a);
        tt_tape *t[2];
        tt_program *p[2] = {NULL, NULL};
        tt_value x[2], y[2], missing;
        for (int k = 0; k < 2; k++) {
            const int64_t dims[] = {1, WIDTH};
            const tt_init init = {TT_INIT_NORMAL, 1};
            tt_compile_options o = tt_compile_options_default();
            t[k] = tt_tape_new(ctx);
            x[k] = tt_input(t[k], "x", TT_F32, ROWS, WIDTH);
            y[k] = tt_input(t[k], "y", TT_F32, ROWS, 1);
            tt_param *param = tt_param_new(ctx, k ? "second" : "first", 2, dims, init);
            missing = tt_mean_squared_error(t[k], tt_linear(t[k], x[k], param, NULL), y[k],
                                            (tt_value){0});
            o.device = k && both ? "cuda:1" : "cuda:0";
            p[k] = tt_compile(t[k], missing, &o);
            REQUIRE(p[k] && tt_allocate(p[k]) == TT_OK && p[k]->arena->group->index[0] == (k && both));
        }
        CHECK((p[0]->arena->group == p[1]->arena->group) == !both);
        for (int run = 0; run < 2 * RUNS; run++) {
            const int k = run % 2;
            float data[ROWS * WIDTH], target[ROWS];
            tt_stats stats;
            for (int i = 0; i < ROWS * WIDTH; i++) data[i] = (float)sin(i + run / 2 + 10 * k);
            for (int i = 0; i < ROWS; i++) target[i] = (float)(i % 3);
            CHECK(tt_set(p[k], x[k], data, ROWS) == TT_OK && tt_set(p[k], y[k], target, ROWS) == TT_OK);
            CHECK(tt_step(p[k], 0.01f, &stats) == TT_OK);
            loss[both][k][run / 2] = stats.loss;
        }
        for (int k = 0; k < 2; k++)
            CHECK(tt_param_get(tt_param_find(ctx, k ? "second" : "first"), w[both][k]) == TT_OK);
        /* A parameter is stored on one device, so a second device is refused. An absent device is named. */
        tt_compile_options o = tt_compile_options_default();
        if (both) {
            o.device = "cuda:0";
            CHECK(!tt_compile(t[1], missing, &o));
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "an earlier program has put parameter 'second' on device "
                        "'cuda:1', but this program is for 'cuda': compile both for one device");
            CHECK(tt_device_text(ctx, "cuda:1", NULL, 0) == TT_OK &&
                  tt_device_text(ctx, "cuda:2", NULL, 0) == TT_ERR_DEVICE);
            CHECK_ERROR(ctx, TT_ERR_DEVICE, "device 'cuda:2' cannot be opened: device number 2 was "
                        "requested, but CUDA finds 2, numbered from 0");
        }
        for (int k = 0; k < 2; k++) {
            tt_program_free(p[k]);
            tt_tape_free(t[k]);
        }
        TEST_CLOSE(ctx, &a);
    }
    CHECK(memcmp(loss[0], loss[1], sizeof loss[0]) == 0 && memcmp(w[0], w[1], sizeof w[0]) == 0);
}
#endif

/* Intercepts a program's calls of CUDA, and models a device of `room` bytes that evicts the blocks used
   longest ago. */
typedef struct spy_device {
    tt__device_kind kind;
    const tt__arena *a;
    bool kept[1024], there[1024]; /* kept: for each block, whether the block is pinned to the device; there:
                                     for each block, whether the block is present on the device */
    bool waits[1024];             /* for each block: whether the block is prefetched and not used yet */
    long used[1024], now;
    size_t kept_bytes, waiting;
    long launches, faults, brought, most_waiting;
    bool prefetched;               /* a block was prefetched since the last batch ended */
    /* A batch of blocks is prefetched together, for one window of instructions. batch: number, from 1, of
       each block's last batch; batches: number of batches so far; arrived: number of batches for which
       computation has waited; turns: number of times that the stream of prefetches was told to wait for an
       event */
    long batch[1024], batches, arrived, turns;
    void *of_batch[TT__WINDOWS];               /* events at which the last batches end */
} spy_device;
static spy_device spy;
static tt__backend spied;

static size_t spy_blocks(const void *memory, size_t bytes, size_t *end)
{
    const size_t first = (size_t)((const char *)memory - spy.a->memory[0]), size = tt__arena_size(spy.a, 0);
    *end = first < size && bytes ? (first + bytes - 1) / TT__BLOCK + 1 : 0;
    return first / TT__BLOCK;
}

/* Uses a block: loads an absent block, and makes the block the most recently used. */
static void spy_use(size_t b)
{
    size_t bytes = 0, oldest = 0;
    spy.used[b] = ++spy.now;
    spy.there[b] = true;
    for (size_t k = 0; k < spy.a->paging->blocks; k++) {
        if (!spy.there[k] || spy.kept[k]) continue;
        if (!bytes || spy.used[k] < spy.used[oldest]) oldest = k;
        bytes += TT__BLOCK;
    }
    if (bytes <= spy.a->paging->room) return;
    spy.there[oldest] = false;
    spy.waiting -= spy.waits[oldest] ? TT__BLOCK : 0;
    spy.waits[oldest] = false;
}

static tt_status spy_keep(tt__device *d, void *memory, size_t bytes)
{
    size_t end;
    for (size_t b = spy_blocks(memory, bytes, &end); b < end && spy.a->paging; b++) {
        spy.kept[b] = spy.there[b] = true;
        spy.kept_bytes += TT__BLOCK;
    }
    return tt__cuda_backend.keep(d, memory, bytes);
}

static tt_status spy_prefetch(tt__device *d, int stream, void *memory, size_t bytes)
{
    size_t end;
    CHECK(stream == TT__IN_STREAM);
    spy.brought += (long)bytes;
    spy.prefetched = true;
    for (size_t b = spy_blocks(memory, bytes, &end); b < end; b++) {
        CHECK(!spy.kept[b]);
        spy.waiting += spy.waits[b] ? 0 : TT__BLOCK;
        spy.waits[b] = true;
        spy.batch[b] = spy.batches + 1;
        spy_use(b);
    }
    if ((long)spy.waiting > spy.most_waiting) spy.most_waiting = (long)spy.waiting;
    return tt__cuda_backend.prefetch(d, stream, memory, bytes);
}

/* Uses all blocks of an operand. An absent block counts as a fault if the launch computes. A copy between
   host and device may load absent blocks without a fault, because the copy does not wait for prefetches. */
static void spy_load(const tt__mat *m, bool computes)
{
    size_t end;
    if (!m->data || !m->rows) return;
    const size_t bytes = (size_t)((m->rows - 1) * m->ld + m->cols) * tt_dtype_bytes(m->dtype);
    for (size_t b = spy_blocks(m->data, bytes, &end); b < end; b++) {
        spy.faults += computes && (!spy.there[b] || spy.batch[b] > spy.arrived);
        spy.waiting -= spy.waits[b] ? TT__BLOCK : 0;
        spy.waits[b] = false;
        if (!spy.kept[b]) spy_use(b);
    }
}

static tt_status spy_mark(tt__device *d, int stream, void **event)
{
    const tt_status status = tt__cuda_backend.mark(d, stream, event);
    if (stream == TT__IN_STREAM && spy.prefetched) spy.of_batch[spy.batches++ % TT__WINDOWS] = *event;
    spy.prefetched = spy.prefetched && stream != TT__IN_STREAM;
    return status;
}

static tt_status spy_after(tt__device *d, int stream, void *event)
{
    spy.turns += stream == TT__IN_STREAM;
    for (long k = spy.batches; k > 0 && k > spy.batches - TT__WINDOWS && stream == TT__COMPUTE_STREAM; k--)
        if (spy.of_batch[(k - 1) % TT__WINDOWS] == event && k > spy.arrived) spy.arrived = k;
    return tt__cuda_backend.after(d, stream, event);
}

static tt_status spy_launch(const tt__launch *l, int n)
{
    for (int k = 0; k < n && spy.a->paging; k++) {
        const tt__mat workspace = {l[k].workspace, TT_U8, 1, (int64_t)l[k].instr->workspace, 0};
        const bool computes = l[k].instr->stream == TT__COMPUTE_STREAM;
        for (int j = 0; j < TT__MAX_IN; j++) spy_load(&l[k].in[j], computes);
        for (int j = 0; j < TT__MAX_OUT; j++) spy_load(&l[k].out[j], computes);
        if (workspace.cols) spy_load(&workspace, computes);
        spy.launches++;
    }
    return tt__cuda_backend.launch(l, n);
}

static void spy_on(tt_program *p)
{
    memset(&spy, 0, sizeof spy);
    spied = tt__cuda_backend;
    spied.keep = spy_keep;
    spied.prefetch = spy_prefetch;
    spied.launch = spy_launch;
    spied.mark = spy_mark;
    spied.after = spy_after;
    spy.kind = *p->settings.kind;
    spy.kind.backend = &spied;
    spy.a = p->arena;
    p->settings.kind = p->arena->kind = p->arena->group->kind = &spy.kind;
}

typedef struct deep_result {
    double loss[DEEP_STEPS];
    float w[DEEP_LAYERS][DEEP_WIDTH * DEEP_WIDTH];
} deep_result;

static void deep_run(const char *memory, size_t device, uint64_t seed, bool accumulate, deep_result *to)
{
    deep_net n;
    tt_stats stats;
    start(1, device, seed);
    memset(to, 0, sizeof *to);
    bool ok = CHECK(deep_open(&n, memory, accumulate) == TT_OK);
    if (ok) spy_on(n.p);
    for (int k = 0; k < DEEP_STEPS && ok; k++) {
        ok = CHECK(deep_step(&n, k, accumulate, &stats) == TT_OK);
        to->loss[k] = stats.loss;
    }
    if (!ok) printf("%s\n", tt_error(n.ctx));
    for (int k = 0; k < DEEP_LAYERS && ok; k++)
        CHECK(tt_param_get(n.ctx->params[2 * k], to->w[k]) == TT_OK);
    const tt__paging *g = ok ? n.p->arena->paging : NULL;
    CHECK((g != NULL) == (device == LITTLE));
    if (g) { /* kept and prefetched blocks fit, and are present when used */
        CHECK(tt_program_plan(n.p).bytes > device && g->room + spy.kept_bytes <= device);
        CHECK(spy.launches > 0 && spy.batches > 0 && spy.batches <= spy.turns);
        CHECK(offload ? spy.faults < spy.launches / 50 : spy.faults == 0); /* copies evict a few blocks */
        /* With offload the bound does not hold: copies bring blocks that no launch removes from `waiting`. */
        CHECK(offload || spy.most_waiting <= (long)(g->room / (TT__WINDOWS + 1) * TT__WINDOWS));
        CHECK_NEAR((double)g->prefetched, (double)spy.brought, 0);
    }
#ifdef TT_EMULATE
    const emu_counts counts = emu_get_counts();
    const size_t bytes = g ? spy.kept_bytes : ok && strcmp(memory, "device") ? tt_program_plan(n.p).bytes : 0;
    CHECK_NEAR((double)counts.advised, (double)bytes, 0);
    CHECK_NEAR((double)counts.prefetched, g ? (double)spy.brought : 0, 0);
    CHECK((counts.prefetches > 0) == (device == LITTLE));
    CHECK((counts.graph_launches > 0) == (device != LITTLE));
#endif
    deep_close(&n);
#ifdef TT_EMULATE
    check_nothing_left(0, 1);
#endif
}

/* Managed memory gives the bits of the device's own memory, also with offload. If everything fits, nothing is
   prefetched and steps are graphs. Otherwise blocks are prefetched before each instruction. */
TEST(managed_memory_gives_the_same_bits)
{
    static const struct { const char *memory; size_t device; const char *offload; } runs[] = {
        {"device", AMPLE, NULL}, {"managed", AMPLE, NULL}, {"managed-oversubscribed", AMPLE, NULL},
        {"managed-oversubscribed", LITTLE, NULL}, {"managed-oversubscribed", LITTLE, NULL},
        {"device", AMPLE, everything}, {"managed-oversubscribed", LITTLE, "optimizer"}};
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        static deep_result first, other;
        for (int k = 0; k < TEST_COUNT(runs); k++) {
#ifndef TT_EMULATE
            if (runs[k].device == LITTLE) continue;
#endif
            offload = runs[k].offload;
            deep_run(runs[k].memory, runs[k].device, (uint64_t)(accumulate * 5 + k), accumulate,
                     k ? &other : &first);
            offload = NULL;
            CHECK(!k || memcmp(&first, &other, sizeof first) == 0);
        }
        CHECK(first.loss[0] > 0 && fabs(first.loss[DEEP_STEPS - 1] - first.loss[0]) > 1e-4);
    }
}

#ifdef TT_EMULATE
/* Only "managed-oversubscribed" permits more managed memory than is free. */
TEST(managed_memory_that_does_not_fit_is_refused)
{
    for (int k = 0; k < 2; k++) {
        deep_net n;
        size_t available, total;
        char expected[128];
        emu_configure(1, LITTLE, 1, 1);
        CHECK(deep_open(&n, k ? "managed-oversubscribed" : "managed", false) == TT_OK);
        CHECK(tt_allocate(n.p) == (k ? TT_OK : TT_ERR_MEMORY));
        available = total = LITTLE;
        snprintf(expected, sizeof expected,
                 "the arena needs %zu bytes of managed memory, but only %zu of the device's %zu are free",
                 tt_program_plan(n.p).bytes, available, total);
        if (!k) CHECK_ERROR(n.ctx, TT_ERR_MEMORY, expected);
        if (!k) CHECK_ERROR(n.ctx, TT_ERR_MEMORY, "choose memory 'managed-oversubscribed'");
        deep_close(&n);
        check_nothing_left(k, 1);
    }
}

/* Devices and programs that do not support managed memory refuse the option with a message. */
TEST(managed_memory_that_is_not_there)
{
    static const struct { const char *memory, *device, *error; } cases[] = {
        {"managed", "cpu", "memory 'managed' needs device 'cuda', but the device is 'cpu'"},
        {"managed-oversubscribed", "cpu*2", "memory 'managed-oversubscribed' needs device 'cuda', but"},
        {"managed", "cuda*2", "memory 'managed' needs one rank, but device 'cuda*2' has 2: use memory "
         "'device'"},
        {"unified", "cuda", "memory 'unified' is unknown: use device, managed or managed-oversubscribed"}};
    deep_net n;
    emu_configure(2, AMPLE, 1, 1);
    emu_set_managed(0, 0);
    CHECK(deep_open(&n, "managed", false) == TT_OK && tt_allocate(n.p) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(n.ctx, TT_ERR_UNSUPPORTED, "device 'cuda': emulated device and the host cannot use managed "
                "memory at the same time");
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        tt_compile_options o = tt_compile_options_default();
        o.train = false;
        o.memory = cases[k].memory;
        o.device = cases[k].device;
        tt_program *p = tt_compile(n.t, n.x, &o);
        CHECK(!p);
        CHECK_ERROR(n.ctx, TT_ERR_UNSUPPORTED, cases[k].error);
        tt_program_free(p);
    }
    tt_compile_options o = tt_compile_options_default();
    o.train = false;
    o.device = "cuda";
    o.share = n.p;
    CHECK(!tt_compile(n.t, n.x, &o));
    CHECK_ERROR(n.ctx, TT_ERR_ARGUMENT, "`share` is a program with memory 'managed', but this one has memory "
                "'device': use one of them, or leave `share` NULL");
    deep_close(&n);
    check_nothing_left(0, 1);
}

/* Each call that managed memory needs fails once: the error names the call, and the next step succeeds. */
TEST(managed_memory_whose_calls_fail)
{
    static const struct { const char *call, *said; int nth; } cases[] = {
        {"cudaDeviceGetAttribute", "cudaDeviceGetAttribute", 1}, {"cudaMemGetInfo", "cudaMemGetInfo", 1},
        {"cudaMallocManaged", "cudaMallocManaged", 1}, {"cudaMemAdvise", "cudaMemAdvise", 1},
        {"cudaMemAdvise", "cudaMemAdvise", 2}, {"cudaMemPrefetchAsync", "cudaMemPrefetchAsync", 1},
        {"cudaMemPrefetchAsync", "cudaMemPrefetchAsync", 5}, {"cudaStreamCreate", "cudaStreamCreate", 2},
        {"cudaEventRecord", "cudaEventRecord", 4}, {"cudaEventRecord", "cudaEventRecord", 9},
        {"cudaStreamWaitEvent", "cudaStreamWaitEvent", 1}, {"cudaStreamWaitEvent", "cudaStreamWaitEvent", 4}};
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        deep_net n;
        tt_stats stats;
        emu_configure(1, LITTLE, 1, (uint64_t)k);
        CHECK(deep_open(&n, "managed-oversubscribed", false) == TT_OK);
        emu_inject_fault_into(cases[k].call, cases[k].nth, FAULT, 1);
        const tt_status status = deep_step(&n, 0, false, &stats);
        if (!CHECK(status == TT_ERR_DEVICE && names_the_fault(tt_error(n.ctx)) &&
                   strstr(tt_error(n.ctx), cases[k].said)))
            printf("%s %d: %s\n", cases[k].call, cases[k].nth, tt_error(n.ctx));
        CHECK(deep_step(&n, 1, false, &stats) == TT_OK && stats.loss > 0);
        deep_close(&n);
        check_nothing_left(k, 1);
    }
}
#else
TEST(programs_on_two_devices) { NEEDS_EMULATOR; }
TEST(pinned_memory_is_what_was_planned) { NEEDS_EMULATOR; }

TEST(managed_memory_that_does_not_fit_is_refused) { NEEDS_EMULATOR; }
TEST(managed_memory_that_is_not_there) { NEEDS_EMULATOR; }
TEST(managed_memory_whose_calls_fail) { NEEDS_EMULATOR; }
#endif
