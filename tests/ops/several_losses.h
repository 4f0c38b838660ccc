/* Several losses in one program. Each loss is divided by its own number of targets in the whole step, or by
   their total weight. */
#pragma once

enum { SEVERAL_MICROS = 3, SEVERAL_ROWS = 9, SEVERAL_D = 5, SEVERAL_C = 7 };
#define SEVERAL_PARTS {0.75, -0.25, 0.5}

/* A micro-batch: inputs x, targets of the three losses, and weights of the rows, which two losses share. */
typedef struct several_batch {
    int rows;
    float x[SEVERAL_ROWS * SEVERAL_D], z[SEVERAL_ROWS * SEVERAL_C], labels[SEVERAL_ROWS * SEVERAL_C];
    float weights[SEVERAL_ROWS];
    int32_t classes[SEVERAL_ROWS];
} several_batch;

/* The expected totals, loss and gradient of a step of all micro-batches. */
typedef struct several_expected { double total[3], loss, grad[SEVERAL_C * SEVERAL_D]; } several_expected;

static void several_batches(several_batch *b)
{
    uint64_t random = 11;
    for (int m = 0; m < SEVERAL_MICROS; m++) {
        b[m].rows = SEVERAL_ROWS - 2 * m;
        for (int k = 0; k < SEVERAL_ROWS * SEVERAL_C; k++) {
            if (k < SEVERAL_ROWS * SEVERAL_D)
                b[m].x[k] = (float)((int)(test_random(&random) % 65) - 32) / 16;
            b[m].z[k] = (float)((int)(test_random(&random) % 65) - 32) / 16;
            b[m].labels[k] = (float)(test_random(&random) % 2);
        }
        for (int r = 0; r < SEVERAL_ROWS; r++) { /* a loss skips rows of weight 0, or rows without a class */
            b[m].weights[r] = (float)(test_random(&random) % 4) / 4;
            b[m].classes[r] = (r + m) % 3 ? (int32_t)(test_random(&random) % SEVERAL_C) : -100;
        }
    }
}

/* Computes the loss and the gradient by plain loops. */
TEST_PLAIN static void several_reference(const several_batch *b, const float *w, several_expected *e)
{
    const double part[3] = SEVERAL_PARTS;
    memset(e, 0, sizeof *e);
    for (int m = 0; m < SEVERAL_MICROS; m++)
        for (int r = 0; r < b[m].rows; r++) {
            e->total[0] += b[m].classes[r] >= 0;
            e->total[1] += b[m].weights[r];
            e->total[2] += 1;
        }
    for (int m = 0; m < SEVERAL_MICROS; m++)
        for (int r = 0; r < b[m].rows; r++) {
            double y[SEVERAL_C], sum = 0, dy;
            const int class_ = b[m].classes[r];
            for (int c = 0; c < SEVERAL_C; c++) {
                y[c] = 0;
                for (int d = 0; d < SEVERAL_D; d++)
                    y[c] += (double)b[m].x[r * SEVERAL_D + d] * w[c * SEVERAL_D + d];
                sum += exp(y[c]);
            }
            if (class_ >= 0) e->loss += part[0] * (log(sum) - y[class_]) / e->total[0];
            for (int c = 0; c < SEVERAL_C; c++) {
                const double z = b[m].z[r * SEVERAL_C + c], label = b[m].labels[r * SEVERAL_C + c];
                const double share = 1 / (1 + exp(-y[c]));
                const double scale[3] = {class_ >= 0 ? part[0] / e->total[0] : 0,
                                         part[1] * b[m].weights[r] / SEVERAL_C / e->total[1],
                                         part[2] / SEVERAL_C / e->total[2]};
                e->loss += scale[1] * (y[c] - z) * (y[c] - z);
                e->loss -= scale[2] * (label * log(share) + (1 - label) * log(1 - share));
                dy = scale[0] * (exp(y[c]) / sum - (c == class_)) + 2 * scale[1] * (y[c] - z) +
                     scale[2] * (share - label);
                for (int d = 0; d < SEVERAL_D; d++)
                    e->grad[c * SEVERAL_D + d] += dy * b[m].x[r * SEVERAL_D + d];
            }
        }
}

typedef struct several_values { tt_value x, classes, z, weights, labels, total[3], root; } several_values;

static several_values several_record(tt_tape *t, tt_param *w)
{
    static const char *const names[3] = {"total0", "total1", "total2"};
    const double part[3] = SEVERAL_PARTS;
    const int64_t rows = tt_axis(t, "rows", SEVERAL_ROWS);
    tt_value loss[3];
    several_values v;
    v.x = tt_input(t, "x", TT_F32, rows, SEVERAL_D);
    v.classes = tt_input(t, "classes", TT_I32, rows, 1);
    v.z = tt_input(t, "z", TT_F32, rows, SEVERAL_C);
    v.weights = tt_input(t, "weights", TT_F32, rows, 1);
    v.labels = tt_input(t, "labels", TT_F32, rows, SEVERAL_C);
    const tt_value y = tt_linear(t, v.x, w, NULL);
    loss[0] = tt_cross_entropy(t, y, v.classes, NULL);
    loss[1] = tt_mean_squared_error(t, y, v.z, v.weights);
    loss[2] = tt_sigmoid_cross_entropy(t, y, v.labels, NULL);
    for (int k = 0; k < 3; k++) {
        v.total[k] = tt_input(t, names[k], TT_F32, 1, 1);
        tt_loss_total(t, loss[k], v.total[k]);
        loss[k] = tt_scale(t, loss[k], (float)part[k]);
    }
    v.root = tt_add(t, tt_add(t, loss[0], loss[1]), loss[2]);
    return v;
}

static bool several_set(tt_program *p, int rank, const several_values *v, const several_batch *b,
                        const several_expected *e)
{
    bool ok = tt_set_rank(p, rank, v->x, b->x, b->rows) == TT_OK &&
              tt_set_rank(p, rank, v->classes, b->classes, b->rows) == TT_OK &&
              tt_set_rank(p, rank, v->z, b->z, b->rows) == TT_OK &&
              tt_set_rank(p, rank, v->weights, b->weights, b->rows) == TT_OK &&
              tt_set_rank(p, rank, v->labels, b->labels, b->rows) == TT_OK;
    for (int k = 0; k < 3; k++) {
        const float total = (float)e->total[k];
        ok = ok && tt_set_rank(p, rank, v->total[k], &total, 1) == TT_OK;
    }
    return ok;
}

/* Runs a step of all micro-batches, and compares loss, gradient, norm and update with the reference. */
static void several_case(const char *isa, const char *device, int ranks, bool accumulate,
                         const char *precision, double tolerance)
{
    static several_batch b[SEVERAL_MICROS];
    enum { SIZE = SEVERAL_C * SEVERAL_D };
    const int64_t dims[2] = {SEVERAL_C, SEVERAL_D};
    const tt_init normal = {TT_INIT_NORMAL, 0.5f};
    float w[SIZE], got[SIZE], part;
    double loss = 0, norm = 0, max = 0;
    test_allocator a;
    several_expected e;
    tt_stats stats;
    tt_context_options co = test_options(&a);
    tt_context *ctx = open_isa(co, isa);
    tt_param *param = tt_param_new(ctx, "w", 2, dims, normal);
    tt_tape *t = tt_tape_new(ctx);
    const several_values v = several_record(t, param);
    tt_compile_options o = tt_compile_options_default();
    o.device = device;
    o.precision = precision;
    o.accumulate = accumulate;
    o.optimizer.kind = TT_SGD;
    o.optimizer.weight_decay = 0;
    o.loss_scale.init = 1024;
    snprintf(where, sizeof where, "%s, %s, %s%s", isa, device, precision, accumulate ? ", accumulate" : "");
    several_batches(b);
    tt_program *p = tt_compile(t, v.root, &o);
    bool ok = report(p != NULL && tt_allocate(p) == TT_OK && tt_param_get(param, w) == TT_OK, "%s",
                     tt_error(ctx));
    if (ok) several_reference(b, w, &e);
    for (int m = 0; m < SEVERAL_MICROS && ok; m++) {
        ok = several_set(p, m % ranks, &v, &b[m], &e);
        if (!accumulate || (m % ranks != ranks - 1 && m < SEVERAL_MICROS - 1)) continue;
        ok = ok && tt_micro_step(p, NULL) == TT_OK;
        for (int rank = 0; rank <= m % ranks && ok; rank++) {
            ok = tt_get_rank(p, rank, v.root, &part, 1) == TT_OK;
            loss += part;
        }
    }
    for (int k = 0; k < SIZE && ok; k++) {
        norm += e.grad[k] * e.grad[k];
        max = fmax(max, fabs(e.grad[k]));
    }
    if (ok && accumulate) {
        ok = tt_get_gradient(p, param, got) == TT_OK;
        report(fabs(loss - e.loss) <= tolerance * fabs(e.loss), "the loss is %.9g, expected %.9g", loss,
               e.loss);
        if (ok) all_near("gradient", got, e.grad, SIZE, tolerance * max);
    }
    ok = ok && (accumulate ? tt_update(p, 1, &stats) : tt_step(p, 1, &stats)) == TT_OK &&
         tt_param_get(param, got) == TT_OK;
    report(ok, "%s", tt_error(ctx));
    for (int k = 0; k < SIZE && ok; k++) got[k] = w[k] - got[k];
    if (ok) all_near("update", got, e.grad, SIZE, tolerance * max);
    if (ok) report(fabs(stats.grad_norm - sqrt(norm)) <= tolerance * sqrt(norm), "the norm is %.9g, expected "
                   "%.9g", stats.grad_norm, sqrt(norm));
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

TEST(several_losses)
{
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon", "cuda"};
    for (int k = 0; k < TEST_COUNT(isa); k++) {
        const char *device = is_cuda(isa[k]) ? "cuda" : "cpu";
        if (!has_isa(isa[k])) continue;
        several_case(isa[k], device, 1, true, "32-true", 3e-6);
        several_case(isa[k], device, 1, true, "16-mixed", 4e-3);
        several_case(isa[k], device, 1, true, "bf16-mixed", 3e-2);
        if (is_cuda(isa[k])) continue;
        several_case(isa[k], "cpu*2", 2, true, "32-true", 3e-6);
        several_case(isa[k], "cpu*4", 4, true, "32-true", 3e-6);
        several_case(isa[k], "cpu*3", 3, false, "32-true", 3e-6);
    }
}

/* A row counts as predicted right, with its weight, if all labels of the row are predicted right. */
TEST(sigmoid_cross_entropy_counts)
{
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon", "cuda"};
    enum { ROWS_ = 5, LABELS = 3 };
    static const float logits[ROWS_ * LABELS] = {2, -1, 0.5f,  1, 1, 1,  -3, 0, -1,  4, 4, -4,  1, -2, 3};
    static const float labels[ROWS_ * LABELS] = {1, 0, 1,      1, 0, 1,  0, 0, 0,    1, 1, 0,   1, 0, 0.5f};
    static const float weights[ROWS_] = {0.5f, 4, 2, 0, 8};
    for (int k = 0; k < TEST_COUNT(isa); k++) {
        if (!has_isa(isa[k])) continue;
        test_allocator a;
        tt_context_options co = test_options(&a);
        tt_context *ctx = open_isa(co, isa[k]);
        tt_tape *t = tt_tape_new(ctx);
        tt_value x = tt_input(t, "x", TT_F32, ROWS_, LABELS), y = tt_input(t, "y", TT_F32, ROWS_, LABELS);
        tt_sigmoid_cross_entropy_options loss = tt_sigmoid_cross_entropy_options_default();
        tt_compile_options o = tt_compile_options_default();
        tt_stats stats;
        loss.weights = tt_input(t, "weights", TT_F32, ROWS_, 1);
        o.device = is_cuda(isa[k]) ? "cuda" : "cpu";
        o.train = false;
        tt_program *p = tt_compile(t, tt_sigmoid_cross_entropy(t, x, y, &loss), &o);
        snprintf(where, sizeof where, "%s", isa[k]);
        const bool ok = p && tt_set(p, x, logits, ROWS_) == TT_OK && tt_set(p, y, labels, ROWS_) == TT_OK &&
                        tt_set(p, loss.weights, weights, ROWS_) == TT_OK && tt_run(p, &stats) == TT_OK;
        if (report(ok, "%s", tt_error(ctx)))
            report(stats.targets == 14.5 && stats.correct == 2.5, "%g of %g are right, expected 2.5 of 14.5",
                   stats.correct, stats.targets);
        tt_program_free(p);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}
