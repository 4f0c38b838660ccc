/* Tests of updates in the backward and in the host's memory, and of offloaded values. */
#pragma once

/* An update in the backward frees a gradient's memory. With a small batch, only some layers' gradients exist
   at the peak. The bytes planned are the bytes allocated, and only the norm is left for the end of the
   step. */
TEST(gradients_updated_in_the_backward)
{
    /* Bounds in GB for a ViT-L/16 in bf16 with 16 images: the min with updates at the end, the max with
       updates in the backward. */
    static const struct { tt_optimizer_kind kind; double min, max; } expected[] = {
        {TT_ADAM, 2.45, 2.13}, {TT_SGD, 1.25, 0.92}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_vit v;
    tt_vit_config vc = tt_vit_config_default("L/16");
    vc.classes = 10;
    REQUIRE(tt_vit_new(ctx, &v, &vc) == TT_OK);
    const tt_model model = tt_vit_classifier(&v);
    tt__limit_update_from = 65536;
    for (int k = 0; k < 2 * TEST_COUNT(expected); k++) {
        tt_train_options o = tt_train_options_default();
        o.schedule.kind = TT_CONSTANT;
        o.compile.optimizer.kind = expected[k / 2].kind;
        o.compile.optimizer.clip_norm = 0;
        o.compile.precision = "bf16-true";
        o.compile.recompute = "blocks";
        o.compile.device = "cuda";
        o.max_seqs = 16;
        o.compile.update = k % 2 ? "backward" : "end";
        tt_trainer *t = tt_trainer_new(ctx, &model, &o);
        REQUIRE(t != NULL);
        const double bytes = (double)tt_program_plan(tt_trainer_program(t)).bytes / 1e9;
        if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("  %s: %.3f GB\n", o.compile.update, bytes);
        CHECK(k % 2 ? bytes <= expected[k / 2].max : bytes >= expected[k / 2].min);
        const tt_tape *tape = tt_trainer_program(t)->built.t;
        CHECK(!(k % 2) || tape->n_code - tt__segment_first(tape, TT__EACH_STEP) == 1);
        tt_trainer_free(t);
    }
    tt_vit_free(&v);
    TEST_CLOSE(ctx, &a);
}

/* The backward of `a * a` with `a = gelu(x W)` reads a. If a is marked, a is in the host's memory between the
   forward and the backward, and is not recomputed. A value of another tape cannot be marked. */
TEST(marked_values_go_to_the_hosts_memory)
{
    static char text[20000];
    float x[40 * 4] = {1, -2, 3};
    const tt_value none = {0};
    for (int marked = 0; marked < 3; marked++) { /* marks 0: nothing; 1: the activation; 2: the parameter */
        test_allocator a;
        const int64_t dims[2] = {4, 4};
        tt_context *ctx = test_open(&a);
        tt_param *w = tt_param_new(ctx, "w", 2, dims, normal_init(1));
        tt_tape *t = tt_tape_new(ctx);
        tt_value in = tt_input(t, "x", TT_F32, 40, 4), h = tt_gelu(t, tt_linear(t, in, w, NULL));
        tt_name(t, h, "marked");
        tt_value loss = tt_mean_squared_error(t, tt_mul(t, h, h), in, none);
        if (marked == 1) tt_offload(t, h);
        if (marked == 2) tt_offload(t, tt_param_value(t, w));
        tt_program *p = tt_compile(t, loss, NULL);
        REQUIRE(p != NULL);
        const tt_plan plan = tt_program_plan(p);
        const size_t activation = 40 * 4 * 4, parameter = 4 * 4 * 4;
        /* A parameter is fetched for the forward and for the update, and copied back after the update. */
        CHECK(plan.transfer_bytes == (marked == 1 ? 2 * activation : marked == 2 ? 3 * parameter : 0));
        CHECK((plan.host_bytes > activation) == (marked == 1) || marked == 2);
        tt_program_text(p, text, sizeof text);
        CHECK((strstr(text, "copy") != NULL) == (marked > 0));
        /* The forward's GELU is a part of the matrix product, so "gelu" is that of the recomputation. */
        CHECK((strstr(text, " gelu  ") != NULL) == (marked != 1));
        CHECK(tt_set(p, in, x, 40) == TT_OK && tt_step(p, 0.1f, NULL) == TT_OK);
        tt_program_free(p);
        tt_offload(t, tt__handle(t, 99));
        CHECK(tt_tape_status(t) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tt_offload: the value is not a value of this tape");
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Plans a step of ViT-L/16 in bf16, Adam, on 64 images in micro-batches, with offload. */
TEST(vit_l16_with_the_host)
{
    static const struct { const char *offload; int images; size_t max; } rows[] = {
        {"optimizer,gradients,activations", 16, 850000000u},
        {"optimizer,gradients,activations", 8, 850000000u},
        {"optimizer,gradients,activations,parameters", 8, 240000000u}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_vit v;
    tt_vit_config c = tt_vit_config_default("L/16");
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.compile.precision = "bf16-true";
    o.compile.recompute = "blocks";
    o.compile.device = "cuda";
    o.compile.accumulate = true;
    tt__limit_pieces_from = 65536;
    tt__limit_offload_together = 32L << 20;
    REQUIRE(tt_vit_new(ctx, &v, &c) == TT_OK);
    const tt_model model = tt_vit_classifier(&v);
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        o.compile.offload = rows[k].offload;
        o.max_seqs = rows[k].images;
        o.compile.memory_budget = rows[k].max; /* without a budget, more copies would overlap with
                                                  computation and need more memory */
        tt_trainer *t = tt_trainer_new(ctx, &model, &o);
        if (CHECK(t != NULL)) CHECK(tt_program_plan(tt_trainer_program(t)).bytes <= rows[k].max);
        tt_trainer_free(t);
    }
    tt__limit_pieces_from = 1;
    tt__limit_offload_together = 4096;
    tt_vit_free(&v);
    TEST_CLOSE(ctx, &a);
}

/* Copies to the host are made by one stream in their order, and each wait is for the oldest copy in
   flight. */
TEST(copies_out_are_waited_for_in_their_order)
{
    const int64_t dims[2] = {64, 64};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options o = tt_compile_options_default();
    tt_tape *t = tt_tape_new(ctx);
    const tt_value none = {0}, x = tt_input(t, "x", TT_F32, 4096, 64);
    tt_value h = x;
    for (int k = 0; k < 6; k++) {
        char name[32];
        snprintf(name, sizeof name, "w%d", k);
        tt_param *w = tt_param_new(ctx, name, 2, dims, normal_init(1));
        h = tt_gelu(t, tt_linear(t, h, w, NULL));
    }
    o.optimizer.kind = TT_ADAM;
    o.device = "cuda";
    o.offload = "optimizer";
    o.update = "backward";
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, h, x, none), &o);
    if (!p) printf("%s\n", tt_error(ctx));
    REQUIRE(p != NULL);
    const tt_tape *made = p->built.t;
    int32_t in_flight[64];
    int n = 0, first = 0;
    for (int k = 0; k < made->n_code && n < TEST_COUNT(in_flight); k++) {
        const tt__instr *i = &made->code[k];
        if (i->stream == TT__OUT_STREAM) in_flight[n++] = i->out[0];
        if (!tt__is(i, TT__WAITS) || made->values[i->in[0]].space != TT__HOST) continue;
        CHECK(first < n && i->in[0] == in_flight[first]);
        first++;
    }
    CHECK(n == 12 && first == n); /* Adam's m and v of each parameter */
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* A perceptron. `together` lets updates at the end of a step run together for two parameters. */
enum { DEEP = 6, WIDE = 32, FEW = 40 };
typedef struct perceptron { test_allocator a; tt_context *ctx; tt_tape *t; tt_value x, loss; } perceptron;

static bool perceptron_new(perceptron *n)
{
    const int64_t dims[2] = {WIDE, WIDE};
    const tt_value none = {0};
    n->ctx = test_open(&n->a);
    n->ctx->options.verify = true;
    n->ctx->apart = true;
    n->t = tt_tape_new(n->ctx);
    n->x = tt_input(n->t, "x", TT_F32, FEW, WIDE);
    tt_value h = n->x;
    for (int k = 0; k < DEEP; k++) {
        char name[32];
        snprintf(name, sizeof name, "w%d", k);
        h = tt_gelu(n->t, tt_linear(n->t, h, tt_param_new(n->ctx, name, 2, dims, normal_init(0.2f)), NULL));
    }
    n->loss = tt_mean_squared_error(n->t, h, n->x, none);
    return tt_tape_status(n->t) == TT_OK;
}

static void perceptron_free(perceptron *n)
{
    tt_tape_free(n->t);
    TEST_CLOSE(n->ctx, &n->a);
}

/* Trains and writes the parameters. without: the number of a wait that is left out, or -1. Returns the number
   of waits. */
static int perceptron_run(const tt_compile_options *o, bool late, int without, float to[DEEP][WIDE * WIDE])
{
    float x[FEW * WIDE];
    perceptron n;
    int waits = 0;
    if (!CHECK(perceptron_new(&n))) return 0;
    n.ctx->late = late;
    tt_program *p = tt_compile(n.t, n.loss, o);
    if (!CHECK(p != NULL)) printf("%s\n", tt_error(n.ctx));
    for (int k = 0; p && k < p->built.t->n_code; k++) {
        if (p->built.t->code[k].op != TT__OP_WAIT || waits++ != without) continue;
        p->built.t->code[k].in[0] = 0;
        p->built.in_flight++;
        tt__free(n.ctx, p->rank[0].started);
        p->rank[0].started = (tt__started *)tt__calloc(n.ctx, sizeof(tt__started) *
                                                              (size_t)p->built.in_flight);
    }
    const size_t before = tt_allocated_bytes(n.ctx);
    if (p) p->poison = true;
    if (p && CHECK(tt_allocate(p) == TT_OK)) {
        const tt_plan plan = tt_program_plan(p);
        CHECK(tt_allocated_bytes(n.ctx) - before == plan.bytes + plan.host_bytes);
    }
    for (int step = 0; step < 3 && p; step++) {
        for (int k = 0; k < FEW * WIDE; k++) x[k] = (float)((k * 37 + step * 11) % 101) / 25 - 2;
        CHECK(tt_set(p, n.x, x, FEW) == TT_OK && (tt_step(p, 0.1f, NULL) == TT_OK || without >= 0));
    }
    for (int k = 0; k < DEEP; k++) tt_param_get(n.ctx->params[k], to[k]);
    tt_program_free(p);
    perceptron_free(&n);
    return waits;
}

/* Updates in the host's memory give the bits of updates on the device, with all optimizers and any offloaded
   tensors, within the planned bytes. Each missing wait changes the result. */
TEST(updates_in_the_hosts_memory)
{
    static float expected[DEEP][WIDE * WIDE], got[DEEP][WIDE * WIDE];
    static const char *const lists[] = {NULL, "optimizer", "gradients", "optimizer,parameters",
                                        "gradients,parameters"};
    tt__limit_offload_together = 5 * WIDE * WIDE * 4; /* groups of two parameters and their gradients */
    for (int k = 0; k < 2 * TEST_COUNT(lists); k++) {
        tt_compile_options o = tt_compile_options_default();
        o.optimizer.kind = k == 8 ? TT_ADAFACTOR : k % 4 < 2 ? TT_SGD : k % 4 == 2 ? TT_ADAM : TT_ADAMW;
        o.optimizer.momentum = k % 4 == 1 ? 0.9f : 0;
        o.optimizer.clip_norm = k % 3 ? 0.5f : 0;
        perceptron_run(&o, false, -1, expected);
        o.update = "host";
        o.offload = lists[k % TEST_COUNT(lists)];
        const int waits = perceptron_run(&o, true, -1, got);
        CHECK(waits > DEEP && memcmp(got, expected, sizeof got) == 0);
        perceptron_run(&o, false, -1, got);
        CHECK(memcmp(got, expected, sizeof got) == 0);
        for (int without = 0; without < waits && k < TEST_COUNT(lists); without++) {
            perceptron_run(&o, true, without, got);
            CHECK(memcmp(got, expected, sizeof got) != 0);
        }
    }
    tt__limit_offload_together = 4096;
}

/* Checks the bytes that updates in the host's memory free on the device, copy, and need on the host. The
   host's memory holds the group that is updated, two groups that are being copied to the host, and parameters
   that are being copied back. Only the copies of the first group to the host and of the last group back take
   time that no other work hides. */
TEST(plans_of_updates_in_the_hosts_memory)
{
    static char text[40000];
    const size_t each = WIDE * WIDE * 4, group = 4 * each + 256;
    static const struct { const char *update, *offload; size_t moved, taken, there; } rows[] = {
        {"end", NULL, 0, 0, 0},
        {"end", "optimizer", 4 * DEEP, 2, 2},
        {"host", NULL, 3 * DEEP, 2, 2},
        {"host", "gradients", 4 * DEEP, 2, 3}, /* the norm needs the gradients on the device */
        {"host", "parameters", 3 * DEEP - 1, 3, 3}}; /* forward and backward fetch the parameters */
    tt_costs slow = tt_costs_default();
    slow.update_host = 1e8;
    slow.launch = 0;
    tt__limit_offload_together = 5 * (long)each;
    for (int on_cpu = 0; on_cpu < 2; on_cpu++) {
        tt_plan plan[TEST_COUNT(rows)];
        for (int k = 0; k < TEST_COUNT(rows); k++) {
            perceptron n;
            tt_compile_options o = tt_compile_options_default();
            REQUIRE(perceptron_new(&n));
            o.device = on_cpu ? "cpu" : "cuda";
            o.optimizer.clip_norm = 1;
            o.costs = &slow;
            o.update = rows[k].update;
            o.offload = rows[k].offload;
            tt_program *p = tt_compile(n.t, n.loss, &o);
            REQUIRE(p != NULL);
            plan[k] = tt_program_plan(p);
            size_t on_host = 0, norms = 0, scratch = 0;
            for (int j = 0; j < p->built.t->n_code; j++) {
                const tt__instr *i = &p->built.t->code[j];
                on_host += i->on_host;
                if (i->on_host) scratch = i->workspace; /* each update has equal scratch */
                norms += i->stream && i->in[0] == p->built.t->clipped;
            }
            CHECK(on_host == (strcmp(rows[k].update, "host") == 0 ? DEEP : 0));
            CHECK((norms > 0) == (on_host && !on_cpu));
            if (k == 2 && !on_cpu) /* the case in which copies overlap with computation */
                CHECK(plan[k].exposed_seconds < 6.5 * (double)each / slow.to_host);
            CHECK_NEAR((double)plan[k].transfer_bytes, (double)(rows[k].moved * each + norms * 8), 0);
            CHECK(plan[k].persistent_bytes + rows[k].taken * DEEP * each == plan[0].persistent_bytes);
            const size_t there = plan[k].host_bytes - plan[0].host_bytes;
            const size_t min = rows[k].there * DEEP * each;
            CHECK(there >= min && there <= min + (on_host ? 4 * group + scratch : 0));
            tt_program_text(p, text, sizeof text);
            CHECK((strstr(text, "adam on the host ") != NULL) == (on_host > 0));
            tt_program_free(p);
            perceptron_free(&n);
        }
    }
    tt__limit_offload_together = 4096;
}

/* No choice includes an update in the host's memory, but if nothing fits, the error tells how much the update
   would save: for one large offloaded matrix, the bytes of its state on the device during the update. */
TEST(updates_in_the_hosts_memory_are_advised)
{
    const int64_t dims[2] = {1024, 1024};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    ctx->apart = true;
    tt_compile_options o = tt_compile_options_default();
    const tt_value none = {0};
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, 4, 1024);
    tt_value loss = tt_mean_squared_error(
        t, tt_linear(t, x, tt_param_new(ctx, "w", 2, dims, normal_init(1)), NULL), x, none);
    char text[128];
    size_t bytes[2];
    o.optimizer.clip_norm = 1; /* rules out an update in the backward */
    o.offload = "optimizer,gradients,parameters";
    for (int k = 0; k < 2; k++) {
        o.update = k ? "host" : "end";
        tt_program *p = tt_compile(t, loss, &o);
        REQUIRE(p != NULL);
        bytes[k] = tt_program_plan(p).bytes;
        tt_program_free(p);
    }
    CHECK(bytes[1] + 2 * 1024 * 1024 * 4 <= bytes[0]);
    o.update = "end";
    o.offload = "budget";
    o.memory_budget = bytes[1];
    CHECK(!tt_compile(t, loss, &o));
    CHECK_ERROR(ctx, TT_ERR_BUDGET, "; if more may change, update \"host\" ");
    snprintf(text, sizeof text, ", then offload \"parameters\" %zu, which fits", bytes[1]);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, text);
    o.memory_budget = bytes[1] - 1;
    CHECK(!tt_compile(t, loss, &o));
    snprintf(text, sizeof text, "; the smallest possible is %zu with recompute \"cheap\", ", bytes[1]);
    CHECK_ERROR(ctx, TT_ERR_BUDGET, text);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* Returns the number of a program's instructions that recompute. op >= 0: only instructions of that op. */
static int copies_of(tt_tape *t, tt_value loss, const char *recompute, int op)
{
    tt_compile_options c = tt_compile_options_default();
    int n = 0;
    c.recompute = recompute;
    tt_program *p = tt_compile(t, loss, &c);
    CHECK(p != NULL);
    for (int k = 0; p && k < p->built.t->n_code; k++)
        n += p->built.t->code[k].recomputed && (op < 0 || p->built.t->code[k].op == op);
    tt_program_free(p);
    return n;
}

TEST(marks_of_values) /* marks apply with any options */
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    const tt_value none = {0};
    tt_value x = tt_input(t, "x", TT_F32, 8, 16), y = tt_input(t, "y", TT_F32, 8, 16);
    tt_value h = tt_linear(t, x, matrix(ctx, "up", 32, 16), NULL), g = tt_gelu(t, h);
    tt_value down = tt_linear(t, g, matrix(ctx, "down", 16, 32), NULL), z = tt_tanh(t, down);
    tt_value loss = tt_mean_squared_error(t, tt_linear(t, z, matrix(ctx, "out", 16, 16), NULL), y, none);
    CHECK(copies_of(t, loss, "none", -1) == 0);
    CHECK(copies_of(t, loss, "cheap", TT__OP_ACTIVATION) == 1); /* tanh's backward reads tanh's result */
    tt_keep(t, g);
    CHECK(copies_of(t, loss, "cheap", -1) == 0 && copies_of(t, loss, "blocks", -1) == 0);
    tt_recompute(t, g); /* tt_recompute overrides the earlier mark */
    CHECK(copies_of(t, loss, "none", -1) == 1 && copies_of(t, loss, "none", TT__OP_ACTIVATION) == 1);
    tt_recompute(t, h); /* g and h are both recomputed */
    CHECK(copies_of(t, loss, "none", -1) == 1 && copies_of(t, loss, "cheap", TT__OP_LINEAR) == 1);
    tt_keep(t, h);
    tt_keep(t, g);
    tt_recompute(t, z); /* z is the operand of `down`, not read by the backward */
    CHECK(copies_of(t, loss, "cheap", TT__OP_LINEAR) == 1 && copies_of(t, loss, "cheap", -1) <= 2);
    tt_block_end(t, z); /* z ends a block and is stored, whatever its mark */
    tt_recompute(t, x); /* inputs are always stored */
    CHECK(copies_of(t, loss, "none", -1) == 0 && copies_of(t, loss, "blocks", -1) == 0);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}
