/* Tests of compiling and running: pure builds, options and misuse, numbers that are not finite. */
#pragma once

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
        const tt__tape_value *x = &s->values[v], *y = &t->values[v];
        same = x->place == y->place && x->shape.rows == y->shape.rows && x->shape.dtype == y->shape.dtype &&
               strcmp(x->name, y->name) == 0;
    }
    for (int k = 0; same && k < a->n_boxes; k++)
        same = a->box[k].place == b->box[k].place && a->box[k].bytes == b->box[k].bytes &&
               a->box[k].value == b->box[k].value;
    return same;
}

/* tt__build depends only on its arguments and changes nothing, so that many choices can be tried. */
TEST(builds_are_pure)
{
    enum { CHOICES = 8 };
    test_allocator a;
    model m;
    tt_context *ctx = test_open(&a);
    REQUIRE(model_params(ctx) && model_record(ctx, &m));
    /* `program` has an arena, which must not change */
    tt_program *program = model_compile(&m, false, "32-true", false);
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
        tt__tape_value *was = (tt__tape_value *)malloc(values);
        memcpy(was, m.t->values, values);
        for (int k = 0; k < 30; k++) {
            const int number = k * 7 % CHOICES;
            tt__choice choice = {(tt__recompute_policy)(number % 4), number < 4 ? 0u : 15u, 1, false,
                                 number % 3,
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

        long calls = a.calls, failed = 0; /* each allocation fails once */
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
        CHECK(ctx->params[k]->owner == program->arena && !tt__has_memory(ctx->params[k]));
    tt_program_free(program);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* One message lists all errors of the options. */
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
                                       ("optimizer options: beta1 is 2, but must be in [0, 1); eps is -1, "
                                        "but must be at least 0"),
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
        {"cuda:64", "device 'cuda:64': expected nothing after 'cuda', or ':' and numbers from 0 to 63 "
         "separated by commas, or '*' and a number of at most 64", TT_ERR_ARGUMENT, 0},
        {"cuda:", "numbers from 0 to 63", TT_ERR_ARGUMENT, 0}, {"cuda:x", "numbers", TT_ERR_ARGUMENT, 0},
        {"cuda:1x", "numbers", TT_ERR_ARGUMENT, 0}, {"cuda:-1", "numbers", TT_ERR_ARGUMENT, 0},
        {"cuda:1,", "numbers", TT_ERR_ARGUMENT, 0}, {"cuda:,1", "numbers", TT_ERR_ARGUMENT, 0},
        {"cuda*", "at most 64", TT_ERR_ARGUMENT, 0}, {"cuda*0", "at most 64", TT_ERR_ARGUMENT, 0},
        {"cuda*65", "at most 64", TT_ERR_ARGUMENT, 0}, {"cuda*2x", "at most 64", TT_ERR_ARGUMENT, 0},
        {"cuda:99999999999999999999", "numbers", TT_ERR_ARGUMENT, 0},
        {"cpu:1", "device 'cpu:1' does not exist: the CPU is one device, cpu", TT_ERR_ARGUMENT, 0},
        {"cpu:0,0", "cpu*2 is two ranks", TT_ERR_ARGUMENT, 0}, {"cpu*4", NULL, TT_OK, 0},
        {"cuda*8", NULL, TT_OK, 0}, {"cuda:3,2", NULL, TT_OK, 3}, {"cuda:0,0", NULL, TT_OK, 0},
        {"cpux", "device 'cpux' is unknown: use cpu or cuda", TT_ERR_UNSUPPORTED, 0},
        {"gpu:1", "device 'gpu:1' is unknown: use cpu or cuda", TT_ERR_UNSUPPORTED, 0}};
    for (int k = 0; k < TEST_COUNT(cases); k++) {
        c.device = cases[k].name;
        tt_program *p = tt_compile(m.t, m.loss, &c);
        test__check((p != NULL) == !cases[k].says, __FILE__, __LINE__, cases[k].name);
        if (cases[k].says) CHECK_ERROR(ctx, cases[k].status, cases[k].says);
        if (p) CHECK(p->settings.group->index[0] == cases[k].index && p->arena->group == p->settings.group);
        tt_program_free(p);
        if (cases[k].says) CHECK(tt_device_text(ctx, cases[k].name, NULL, 0) == cases[k].status);
    }
    c.device = "cuda:1"; /* an arena is on one device */
    tt_program *other = tt_compile(m.t, m.loss, &c);
    REQUIRE(other != NULL);
    c.device = "cuda";
    c.share = other;
    CHECK(!tt_compile(m.t, m.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "`share` is a program for device 'cuda:1', but this one is for 'cuda'");
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
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "which is not allocated: call tt_allocate for that program first, or "
                "compile this one with `share`");
    CHECK(tt_get(train, m.loss, got, 64) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "has no contents now: call tt_get after a run");
    REQUIRE(tt_allocate(train) == TT_OK);
    CHECK(tt_get(train, m.loss, got, 64) == TT_ERR_ARGUMENT);

    CHECK(tt_run(train, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "tt_run: this program trains: use tt_step, or compile with train = false");
    CHECK(tt_step(eval, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "compiled with train = false: use tt_run");
    CHECK(tt_micro_step(train, &stats) == TT_ERR_ARGUMENT &&
          tt_update(train, 0.1f, &stats) == TT_ERR_ARGUMENT && tt_micro_step(eval, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "tt_micro_step needs a program compiled with train = true and accumulate = true");
    CHECK(tt_update(acc, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tt_update: no micro-batch was run in this step");
    CHECK(tt_get_gradient(acc, tt_param_find(ctx, "head.bias"), got) == TT_ERR_ARGUMENT &&
          tt_get_gradient(train, tt_param_find(ctx, "head.bias"), got) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "tt_get_gradient: gradients exist only between tt_micro_step and tt_update");

    CHECK(tt_step(train, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "was not set before this run: call tt_set");
    CHECK(model_set(&m, train, 0) == TT_OK && tt_step(train, 0.1f, &stats) == TT_OK && stats.step == 1);
    CHECK(tt_step(train, 0.1f, &stats) == TT_ERR_ARGUMENT); /* inputs were not set again */
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "input 'ids' was not set");
    CHECK(tt_set(train, m.ids, ids, 4) == TT_OK && tt_step(train, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "input 'starts' was not set");

    CHECK(tt_set(train, m.ids, ids, ROWS + 1) == TT_ERR_SHAPE);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "17 rows for input 'ids', which takes 1 to 16");
    CHECK(tt_set(train, m.ids, ids, 0) == TT_ERR_SHAPE && tt_set(train, m.ids, ids, -1) == TT_ERR_SHAPE);
    CHECK(tt_set(train, m.starts, ids, 3) == TT_OK && tt_set(train, m.labels, ids, 3) == TT_ERR_SHAPE);
    /* Input 'starts' has one row more than axis 'seqs'. */
    CHECK_ERROR(ctx, TT_ERR_SHAPE,
                "input 'labels' is set with 3 rows, but 'starts' was set with 3 on the same axis 'seqs'");
    CHECK(tt_set(train, m.labels, ids, 2) == TT_OK && tt_set(train, m.starts, ids, 1) == TT_ERR_SHAPE);
    /* An input may be set again with another number of rows. Other inputs on the same axis must then be set
       again, too. */
    CHECK(tt_set(train, m.starts, ids, 4) == TT_OK);
    CHECK(tt_set(train, m.ids, ids, 4) == TT_OK && tt_step(train, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "input 'labels' was not set");
    CHECK(tt_set(train, m.loss, ids, 1) == TT_ERR_ARGUMENT &&
          tt_set(train, tt__handle(m.t, 0), ids, 1) == TT_ERR_ARGUMENT &&
          tt_set(train, tt__handle(m.t, 99999), ids, 1) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tt_set: the value is not a value of this tape");

    CHECK(tt_get(train, m.logits, got, 64) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "is neither an output nor the root of this program: mark it with tt_output");
    CHECK(tt_get(train, tt__handle(m.t, -1), got, 64) == TT_ERR_ARGUMENT &&
          tt_get(train, tt__handle(m.t, 1 << 30), got, 64) == TT_ERR_ARGUMENT);
    CHECK(tt_get(train, m.loss, got, 1) == TT_ERR_ARGUMENT); /* an input was set after the run */
    /* The failed step forgets which inputs were set. */
    CHECK(tt_set(train, m.labels, ids, 2) == TT_OK && tt_step(train, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK(model_set(&m, train, 1) == TT_OK && tt_step(train, 0.1f, &stats) == TT_OK &&
          tt_get(train, m.loss, got, 1) == TT_OK);
    CHECK_NEAR(got[0], stats.loss, 1e-6);
    CHECK(tt_get(train, m.loss, got, 0) == TT_ERR_SHAPE);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "has 1 floats, but the buffer has room for 0");

    /* Refused learning rates update nothing. */
    float before[WIDTH * CLASSES], after[WIDTH * CLASSES];
    static const float rates[] = {-1, NAN, INFINITY, -INFINITY};
    tt_param_get(tt_param_find(ctx, "head.weight"), before);
    for (int k = 0; k < TEST_COUNT(rates); k++) {
        CHECK(model_set(&m, train, 1) == TT_OK && tt_step(train, rates[k], &stats) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "but must be a finite number of at least 0");
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

/* A value or an axis of one tape is refused by another tape that has a value or axis of that number. */
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
        default: tt_linear(t, there, w, NULL); /* a tape of another context */
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

/* The name of an axis, and a value whose rows the axis counts, give the same axis. */
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
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "axis 'sequences' has capacity 8, but this tape has an axis of that name with capacity 16");
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* If a status or a NULL was ignored, the failure that follows names the first reason. */
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
    /* `optional` 0: an op needs the parameter. 1: the parameter is a linear layer's bias, which may be
       NULL. */
    for (int optional = 0; optional < 2; optional++) {
        tt_tape *t = tt_tape_new(ctx);
        const tt_value x = tt_input(t, "x", TT_F32, 5, 3);
        tt_param *again = tt_param_new(ctx, "layer.b", 1, one, ones);
        tt_param_new(ctx, "empty", 1, none, ones); /* fails later for another reason */
        if (optional) tt_linear(t, x, w, again);
        else tt_layernorm(t, x, again, b, 1e-5f);
        CHECK(tt_tape_status(t) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "is NULL: parameter 'layer.b' exists already");
        tt_tape_free(t);
    }
    CHECK(!tt_param_new(ctx, "layer.b", 1, one, ones));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "exists already"); /* the caller has now read this message */

    tt_tape *t = tt_tape_new(ctx);
    const int64_t rows = tt_axis(t, "rows", 5);
    const tt_value x = tt_input(t, "x", TT_F32, rows, 3), y = tt_input(t, "y", TT_F32, rows, 3);
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, tt_linear(t, x, w, NULL), y, (tt_value){0}), NULL);
    REQUIRE(p != NULL);
    tt_set(p, x, data, 6);
    tt_set(p, y, NULL, 5);
    CHECK(tt_step(p, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "input 'x' was not set before this run: tt_set: got 6 rows for input "
                "'x', which takes 1 to 5");
    tt_set(p, x, data, 4);
    tt_set(p, y, data, 3);
    CHECK(tt_step(p, 0.1f, &stats) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "input 'y' was not set before this run: tt_set: input 'y' is set "
                "with 3 rows, but 'x' was set with 4 on the same axis 'rows'");
    CHECK(tt_step(p, 0.1f, &stats) == TT_ERR_ARGUMENT); /* the error of a tt_set counts for one run */
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "input 'x' was not set before this run: call tt_set for each input before each run");
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
                "precision 'int4' is unknown: use 32-true, bf16-mixed, bf16-true, 16-mixed or 16-true");
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
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "parallel.server keeps whole gradients and parameters");
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

    model n; /* c.share and parameters of another context */
    REQUIRE(model_record(second, &n));
    tt_program *other = model_compile(&n, true, "32-true", false);
    c = tt_compile_options_default();
    c.share = other;
    CHECK(!tt_compile(m.t, m.loss, &c));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "`share` is a program of another context: use one context, or leave `share` NULL");
    tt_tape *t = tt_tape_new(ctx);
    tt_embedding(t, tt_input(t, "ids", TT_I32, 3, 1), tt_param_find(second, "embed.weight"));
    CHECK(tt_tape_status(t) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "parameter 'embed.weight' belongs to another context");
    CHECK(!tt_compile(t, tt__handle(t, 1), NULL)); /* sticky: repeats the first message */
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "parameter 'embed.weight' belongs to another context");
    tt_tape_free(t);

    tt_program *first = model_compile(&m, true, "bf16-mixed", false); /* a parameter cannot have two dtypes */
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
    /* The program was never allocated, so the parameters may get another dtype. */
    first = model_compile(&m, true, "bf16-true", false);
    CHECK(first != NULL);
    tt_program_free(first);

    t = tt_tape_new(ctx); /* a tape whose root is the sum of two losses */
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
                "accumulate cannot count the targets of 2 losses before the first backward: give each loss "
                "the number of its targets in a step by tt_loss_total (0 of them have one)");
    tt_value scalar = tt_linear(t,
                                tt_reshape(t, tt_param_value(t, tt_param_find(ctx, "norm.bias")), 1, WIDTH),
                                param2(ctx, "scalar", 1, WIDTH, init_of(TT_INIT_ONES, 0)), NULL);
    c.accumulate = false;
    CHECK(!tt_compile(t, scalar, &c)); /* shape (1, 1), but no loss op that counts targets */
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "no loss");
    tt_tape_free(t);

    tt_program_free(other);
    tt_tape_free(n.t);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
    TEST_CLOSE(second, &b);
}

/* A dropout that is off may be the root. Inputs may be the root, unread, or an output. */
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
    p = tt_compile(t, in, &c); /* the program has no instructions */
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

/* Two programs share parameters. If the first program, which holds the parameters, is freed before it was
   allocated, the second program is refused. Compiled again, the second program runs. */
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
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "was freed before it was allocated: compile this program again");
    tt_program_free(second);
    second = model_compile(&m, false, "32-true", false);
    CHECK(second && model_set(&m, second, 0) == TT_OK && tt_run(second, &stats) == TT_OK &&
          isfinite(stats.loss));
    tt_program_free(second);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* The error names a loss or gradient that is not finite, and nothing changes. */
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

/* The sum of a loss of the product `a x` and a loss of the product `b y`. The gradient of b may overflow
   while the gradient of a does not. */
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

/* Returns whether p still has the values `was`. Copies the values of p to `was`. */
static bool is_still(const tt_param *p, float was[2])
{
    float now[2];
    tt_param_get(p, now);
    const bool same = memcmp(was, now, sizeof now) == 0;
    memcpy(was, now, sizeof now);
    return same;
}

/* With updates in the backward, a parameter whose gradient overflows keeps its values, while other parameters
   are updated. A loss that is not finite changes nothing. Loading an earlier state repairs the parameters. */
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
                "overflows; this parameter was not updated, but with update 'backward' others may have been: "
                "load the last state");
    CHECK(!is_still(m.a, was_a) && is_still(m.b, was_b) && tt_program_steps(p) == 1);
    CHECK(tt_program_load(p, path) == TT_OK && step_two(&m, p, 2, 2) == TT_OK && tt_program_steps(p) == 2);
    CHECK(is_still(m.a, right_a) && is_still(m.b, right_b));
    remove(path);
    tt_program_free(p);
    tt_tape_free(m.t);
    TEST_CLOSE(ctx, &a);
}

/* Errors name options as tt_context_options.wording says, and text in braces that is no option stays. */
TEST(options_are_named_as_the_caller_says)
{
    static const tt_option_name names[] = {{"update", "--update"}, {"clip_norm", "--100%"},
                                           {"parallel.server", "--server"}, {"tune", "--tune"}, {NULL, NULL}};
    static const tt_option_name unknown[] = {{"update", "--update"}, {"updates", "--updates"}, {NULL, NULL}};
    test_allocator a;
    tt_context_options co = test_options(&a);
    co.wording.names = names;
    tt_context *ctx = tt_open(&co);
    REQUIRE(ctx != NULL);
    tt_compile_options c = tt_compile_options_default();
    c.update = "backward";
    c.optimizer.clip_norm = 0.5f;
    c.parallel.server = c.parallel.sequence = true;
    c.tune = "";
    CHECK(tt_check_options(ctx, &c) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "--tune is ''");
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "; --update backward does not go with --100% 0.5, as the norm of all "
                "gradients is known at the step's end only, nor with --server: use --update end; "
                "parallel.sequence needs parallel.tensor 2 or more");
    c = tt_compile_options_default();
    c.precision = "{updates {";
    CHECK(tt_check_options(ctx, &c) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "precision '{updates {' is unknown");
    TEST_CLOSE(ctx, &a);
    co.wording.names = unknown;
    co.logger.log = NULL;
    CHECK(!tt_open(&co));
    CHECK(a.live == 0);
}

/* tt_option_word lists exactly the words that tt_check_options accepts. */
TEST(words_of_options)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int words = 0;
    for (int k = 0; tt_option_word("precision", k); k++)
        for (int j = 0; tt_option_word("recompute", j); j++) {
            tt_compile_options c = tt_compile_options_default();
            c.precision = tt_option_word("precision", k);
            c.recompute = tt_option_word("recompute", j);
            c.memory_budget = 1;
            CHECK(tt_check_options(ctx, &c) == TT_OK);
            words++;
        }
    CHECK(words == 25);
    for (int k = 0; tt_option_word("update", k); k++) {
        tt_compile_options c = tt_compile_options_default();
        c.update = tt_option_word("update", k);
        CHECK(tt_check_options(ctx, &c) == TT_OK);
    }
    CHECK(strcmp(tt_option_word("optimizer", TT_ADAMW), "adamw") == 0);
    CHECK(strcmp(tt_option_word("schedule", TT_COSINE), "cosine") == 0);
    CHECK(strcmp(tt_option_word("parallel.schedule", 1), "gpipe") == 0);
    CHECK(!tt_option_word("schedule", 5) && !tt_option_word("schedule", -1) && !tt_option_word("lr", 0));
    TEST_CLOSE(ctx, &a);
}

/* One message refuses options that need all gradients at once, except in a program that does not train. */
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
