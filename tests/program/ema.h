/* Moving averages of parameters. */
#pragma once

enum { EMA_PARAMS = 9, EMA_STEPS = 6, EMA_MAX = 3 * WIDTH * WIDTH };

typedef struct averaged {
    test_allocator a;
    tt_context *ctx;
    model m;
    tt_program *p;
    double average[EMA_PARAMS][EMA_MAX];
    float now[EMA_PARAMS][EMA_MAX];
} averaged;

static bool averaged_open(averaged *x, const tt_compile_options *o)
{
    memset(x, 0, sizeof *x);
    x->ctx = test_open(&x->a);
    return CHECK(model_params(x->ctx) && model_record(x->ctx, &x->m)) &&
           CHECK((x->p = tt_compile(x->m.t, x->m.loss, o)) != NULL);
}

static void averaged_close(averaged *x)
{
    tt_program_free(x->p);
    tt_tape_free(x->m.t);
    TEST_CLOSE(x->ctx, &x->a);
}

static void averaged_read(averaged *x)
{
    for (int k = 0; k < EMA_PARAMS; k++) CHECK(tt_param_get(tt_param_at(x->ctx, k), x->now[k]) == TT_OK);
}

/* Runs a step on all data ranks, and adds the parameters to the averages in float64. */
static void averaged_step(averaged *x, int step, double decay)
{
    for (int rank = 0; rank < x->p->arena->data; rank++) {
        int32_t ids[ROWS], labels[SEQS], starts[SEQS + 1] = {0, 4, 9, 13};
        for (int k = 0; k < ROWS; k++) ids[k] = (k * 5 + step + 3 * rank) % VOCAB;
        for (int k = 0; k < SEQS; k++) labels[k] = (ids[starts[k]] + k) % CLASSES;
        CHECK(tt_set_rank(x->p, rank, x->m.ids, ids, starts[SEQS]) == TT_OK &&
              tt_set_rank(x->p, rank, x->m.starts, starts, SEQS + 1) == TT_OK &&
              tt_set_rank(x->p, rank, x->m.labels, labels, SEQS) == TT_OK);
    }
    CHECK(tt_step(x->p, 0.02f, NULL) == TT_OK);
    averaged_read(x);
    for (int k = 0; k < EMA_PARAMS; k++)
        for (int i = 0; i < tt_param_size(tt_param_at(x->ctx, k)); i++)
            x->average[k][i] = step ? x->average[k][i] + (1 - decay) * (x->now[k][i] - x->average[k][i])
                                    : x->now[k][i];
}

/* Swaps parameters and averages, and returns the largest error of the averages. Swaps them back, and checks
   that the parameters have their old bits. */
static double averaged_error(averaged *x)
{
    static float before[EMA_PARAMS][EMA_MAX];
    double wrong = 0;
    averaged_read(x);
    memcpy(before, x->now, sizeof before);
    CHECK(tt__swap_averages(x->p) == TT_OK);
    averaged_read(x);
    for (int k = 0; k < EMA_PARAMS; k++)
        for (int i = 0; i < tt_param_size(tt_param_at(x->ctx, k)); i++) {
            const double difference = fabs(x->now[k][i] - x->average[k][i]);
            if (!(difference <= wrong) && !isnan(wrong)) wrong = difference;
        }
    CHECK(tt__swap_averages(x->p) == TT_OK);
    averaged_read(x);
    CHECK(memcmp(before, x->now, sizeof before) == 0);
    return wrong;
}

/* The averages equal those of a float64 loop, wherever they are stored. They change no bit of the training,
   and are saved and loaded. */
TEST(moving_averages)
{
    static const struct {
        const char *device, *precision, *offload, *update;
        int zero;
        tt_optimizer_kind kind;
    } rows[] = {
        {"cpu", "32-true", NULL, "end", 1, TT_ADAMW}, {"cpu", "bf16-mixed", NULL, "end", 1, TT_SGD},
        {"cpu", "32-true", "optimizer,parameters", "end", 1, TT_SGD},
        {"cpu", "32-true", NULL, "backward", 1, TT_ADAMW}, {"cpu", "32-true", NULL, "host", 1, TT_ADAMW},
        {"cpu*2", "32-true", NULL, "end", 0, TT_ADAMW}, {"cpu*2", "16-mixed", NULL, "end", 1, TT_ADAMW},
        {"cpu*2", "32-true", NULL, "end", 2, TT_ADAMW},
        {"cpu*2", "32-true", "optimizer", "end", 3, TT_ADAMW}};
    static averaged plain, x, y;
    const double decay = 0.75;
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        const char *path = test_path(test_folder(), "averaged.safetensors");
        tt_compile_options o = tt_compile_options_default();
        o.device = rows[k].device;
        o.precision = rows[k].precision;
        o.offload = rows[k].offload;
        o.update = rows[k].update;
        o.parallel.zero = rows[k].zero;
        o.optimizer.kind = rows[k].kind;
        o.loss_scale.init = 64;
        if (!averaged_open(&plain, &o)) return;
        o.optimizer.ema_decay = (float)decay;
        if (!averaged_open(&x, &o) || !averaged_open(&y, &o)) return;
        for (int step = 0; step < EMA_STEPS; step++) {
            averaged_step(&plain, step, decay);
            averaged_step(&x, step, decay);
            CHECK(averaged_error(&x) <= 1e-6);
        }
        CHECK(memcmp(plain.now, x.now, sizeof x.now) == 0);
        CHECK(memcmp(&plain.average, &x.average, sizeof x.average) == 0);
        CHECK(tt_program_save(x.p, path) == TT_OK && tt_program_load(y.p, path) == TT_OK);
        memcpy(y.average, x.average, sizeof x.average);
        averaged_step(&y, EMA_STEPS, decay);
        CHECK(averaged_error(&y) <= 1e-6);
        CHECK(tt_program_load(plain.p, path) == TT_ERR_STATE);
        averaged_close(&plain);
        averaged_close(&x);
        averaged_close(&y);
    }
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options o = tt_compile_options_default();
    o.precision = "bf16-true";
    o.optimizer.ema_decay = 0.5f;
    CHECK(tt_check_options(ctx, &o) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "ema_decay needs fp32 weights, but precision "
                "'bf16-true' has 16-bit weights");
    o.optimizer.ema_decay = 1;
    CHECK(tt_check_options(ctx, &o) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "ema_decay 1 is not in [0, 1)");
    TEST_CLOSE(ctx, &a);
}
