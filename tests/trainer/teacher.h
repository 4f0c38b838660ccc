/* Distillation: the loss that trains with a teacher, its gradients, and what is refused. */
#pragma once

enum { TAUGHT = 11, TAUGHT_WIDTH = 5, TAUGHT_CLASSES = 4, TAUGHT_MICRO = 4 };

/* A linear model of examples in memory, its teacher, and the source of both. */
typedef struct taught {
    test_allocator a;
    tt_context *ctx;
    tt_task task;
    tt_param *w, *w_teacher;
    float x[TAUGHT][TAUGHT_WIDTH], values[TAUGHT][TAUGHT_CLASSES];
    int32_t labels[TAUGHT];
    float weights[2][TAUGHT_CLASSES * TAUGHT_WIDTH]; /* of the model; of the teacher */
    float gradient[TAUGHT_CLASSES * TAUGHT_WIDTH];   /* of the last step */
    int64_t index[TAUGHT];
    float batch_x[TAUGHT][TAUGHT_WIDTH], batch_values[TAUGHT][TAUGHT_CLASSES];
    int32_t batch_labels[TAUGHT];
    int at, micro, count;  /* next example; `micro`, `count`: examples of a micro-batch, of the source */
    tt_array array;
    tt_source source;
} taught;

static tt_status taught_seek(void *self, int64_t epoch, int64_t step)
{
    taught *t = (taught *)self;
    (void)epoch;
    t->at = step ? t->count : 0;
    return TT_OK;
}

/* Gives the examples from the last to the first, so that an example's place in a batch is not its index. */
static tt_status taught_next(void *self, tt_batch *b, bool *more)
{
    taught *t = (taught *)self;
    const int n = t->count - t->at < t->micro ? t->count - t->at : t->micro;
    *more = n > 0;
    if (!n) return TT_OK;
    for (int s = 0; s < n; s++) {
        const int k = t->count - 1 - t->at - s;
        memcpy(t->batch_x[s], t->x[k], sizeof t->x[k]);
        memcpy(t->batch_values[s], t->values[k], sizeof t->values[k]);
        t->batch_labels[s] = t->labels[k];
        t->index[s] = 3 * k; /* indices may have gaps */
    }
    t->array.input = "x";
    t->array.data = t->batch_x;
    t->array.rows = n;
    b->arrays = &t->array;
    b->n_arrays = 1;
    b->seqs = n;
    b->labels = t->batch_labels;
    b->label_values = t->batch_values[0];
    b->values = TAUGHT_CLASSES;
    b->index = t->index;
    t->at += n;
    b->last_of_step = t->at == t->count;
    return TT_OK;
}

static tt_value taught_model(const taught *t, tt_param *w, tt_tape *tape, const tt_train_options *o,
                             tt_value *output)
{
    const int64_t rows = tt_axis(tape, "examples", o->max_seqs);
    tt_value none = {0, 0}, x = tt_input(tape, "x", TT_F32, rows, TAUGHT_WIDTH);
    *output = tt_linear(tape, x, w, NULL);
    if (t->task == TT_TASK_CLASS) {
        tt_cross_entropy_options c = tt_cross_entropy_options_default();
        if (o->class_weights) c.class_weights = tt_input(tape, "class_weights", TT_F32, 1, TAUGHT_CLASSES);
        return tt_cross_entropy(tape, *output, tt_input(tape, "labels", TT_I32, rows, 1), &c);
    }
    tt_value values = tt_input(tape, "label_values", TT_F32, rows, TAUGHT_CLASSES);
    if (t->task == TT_TASK_LABELS) return tt_sigmoid_cross_entropy(tape, *output, values, NULL);
    return tt_mean_squared_error(tape, *output, values, none);
}

static tt_value taught_student(const void *self, tt_tape *tape, const tt_train_options *o, tt_value *output)
{
    return taught_model((const taught *)self, ((const taught *)self)->w, tape, o, output);
}

static tt_value taught_teacher(const void *self, tt_tape *tape, const tt_train_options *o, tt_value *output)
{
    return taught_model((const taught *)self, ((const taught *)self)->w_teacher, tape, o, output);
}

static tt_status taught_gradient(void *user, tt_program *p, int64_t step)
{
    taught *t = (taught *)user;
    (void)step;
    return tt_get_gradient(p, t->w, t->gradient);
}

static void taught_open(taught *t, tt_task task, int threads)
{
    const int64_t dims[2] = {TAUGHT_CLASSES, TAUGHT_WIDTH};
    const tt_init init = {TT_INIT_NORMAL, 1};
    uint64_t random = 17;
    memset(t, 0, sizeof *t);
    tt_context_options o = test_options(&t->a);
    o.threads = threads;
    t->ctx = tt_open(&o);
    t->task = task;
    t->w = tt_param_new(t->ctx, "w", 2, dims, init);
    t->w_teacher = tt_param_new(t->ctx, "w_teacher", 2, dims, init);
    for (int k = 0; k < TAUGHT; k++) {
        for (int d = 0; d < TAUGHT_WIDTH; d++) t->x[k][d] = (float)(test_random(&random) % 2000) / 1000 - 1;
        t->labels[k] = (int32_t)(test_random(&random) % TAUGHT_CLASSES);
        for (int c = 0; c < TAUGHT_CLASSES; c++) t->values[k][c] = (float)(test_random(&random) % 2);
    }
    if (task == TT_TASK_CLASS) t->labels[4] = -100; /* an example without a label does not count */
    t->count = TAUGHT;
    t->micro = TAUGHT_MICRO;
    t->source.self = t;
    t->source.seek = taught_seek;
    t->source.next = taught_next;
    t->source.steps = 1;
    t->source.max_seqs = TAUGHT;
}

static tt_model taught_tt_model(const taught *t, bool teacher)
{
    const tt_model m = {t, teacher ? taught_teacher : taught_student, {{NULL, NULL, false, NULL}},
                        TAUGHT_CLASSES, NULL, 0, false, t->task};
    return m;
}

/* Gives more examples than the teacher's trainer has room for. */
static tt_status taught_next_of_many(void *self, tt_batch *b, bool *more)
{
    static int64_t index[4 * TAUGHT];
    const tt_status status = taught_next(self, b, more);
    b->seqs = 4 * TAUGHT;
    b->index = index;
    return status;
}

/* Makes the teacher from its model, whose trainer is freed before the student's trainer is made. */
static tt_teacher *taught_make_teacher(taught *t, const char *device)
{
    const tt_model m = taught_tt_model(t, true);
    tt_train_options o = tt_train_options_default();
    tt_source many = t->source;
    o.compile.train = false;
    o.compile.device = device;
    o.max_seqs = TAUGHT;
    tt_trainer *r = tt_trainer_new(t->ctx, &m, &o);
    many.next = taught_next_of_many;
    if (r) CHECK(!tt_teacher_new(r, &many));
    CHECK_ERROR(t->ctx, TT_ERR_SHAPE, "but the teacher's trainer has max_seqs = ");
    tt_teacher *k = r ? tt_teacher_new(r, &t->source) : NULL;
    if (!CHECK(k != NULL)) fprintf(stderr, "%s\n", tt_error(t->ctx));
    if (r) CHECK(tt_param_get(t->w_teacher, t->weights[1]) == TT_OK);
    tt_trainer_free(r);
    return k;
}

/* Computes the logits of an example with a model's weights. */
static void taught_logits(const taught *t, const double *w, int k, double *z)
{
    for (int c = 0; c < TAUGHT_CLASSES; c++) {
        z[c] = 0;
        for (int d = 0; d < TAUGHT_WIDTH; d++) z[c] += w[c * TAUGHT_WIDTH + d] * t->x[k][d];
    }
}

static double taught_log_softmax(const double *z, double heat, int c)
{
    double sum = 0;
    for (int k = 0; k < TAUGHT_CLASSES; k++) sum += exp((z[k] - z[c]) / heat);
    return -log(sum);
}

static double taught_softplus(double x) { return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x)); }

/* Computes the loss in doubles from weights w (classes, width). With TT_TASK_CLASS the teacher's term is
   `T^2 * KLDivLoss(log_softmax(z / T), softmax(teacher / T))` of PyTorch with reduction "batchmean", where T
   is `heat`. This term differs from the cross-entropy by the teacher's entropy, a constant. *hard receives
   the loss without the teacher. */
static double taught_loss(const taught *t, const double *w, const float *class_weights, double share,
                          double heat, double *hard)
{
    double own = 0, soft = 0, total = 0, teacher[TAUGHT_CLASSES * TAUGHT_WIDTH];
    for (int i = 0; i < TAUGHT_CLASSES * TAUGHT_WIDTH; i++) teacher[i] = t->weights[1][i];
    for (int k = 0; k < TAUGHT; k++) {
        double z[TAUGHT_CLASSES], q[TAUGHT_CLASSES], weight = 1;
        taught_logits(t, w, k, z);
        taught_logits(t, teacher, k, q);
        if (t->task == TT_TASK_CLASS) {
            if (t->labels[k] < 0) continue;
            if (class_weights) weight = class_weights[t->labels[k]];
            own -= weight * taught_log_softmax(z, 1, t->labels[k]);
        }
        total += weight;
        for (int c = 0; c < TAUGHT_CLASSES; c++) {
            const double y = t->values[k][c], d = z[c] - y, e = z[c] - q[c];
            if (t->task == TT_TASK_CLASS) {
                const double log_q = taught_log_softmax(q, heat, c);
                soft += weight * heat * heat * exp(log_q) * (log_q - taught_log_softmax(z, heat, c));
            } else if (t->task == TT_TASK_LABELS) {
                const double p = 1 / (1 + exp(-q[c] / heat));
                own += (taught_softplus(z[c]) - y * z[c]) / TAUGHT_CLASSES;
                soft += heat * heat * (taught_softplus(z[c] / heat) - p * z[c] / heat) / TAUGHT_CLASSES;
            } else {
                own += d * d / TAUGHT_CLASSES;
                soft += e * e / TAUGHT_CLASSES;
            }
        }
    }
    *hard = own / total;
    return ((1 - share) * own + share * soft) / total;
}

/* The loops above give the losses of PyTorch 2.15, computed by CrossEntropyLoss, BCEWithLogitsLoss, MSELoss
   and KLDivLoss in float64. */
TEST(teacher_as_in_pytorch)
{
    static const struct { tt_task task; double share, heat, loss; } rows[] = {
        {TT_TASK_CLASS, 0.4, 2.5, 1.9639070611960883}, {TT_TASK_LABELS, 0.3, 3, 2.4520507056605387},
        {TT_TASK_SCORES, 0.6, 1, 2.0207741477272725}};
    static taught t;
    memset(&t, 0, sizeof t);
    double w[TAUGHT_CLASSES * TAUGHT_WIDTH], hard;
    for (int k = 0; k < TAUGHT; k++) {
        for (int d = 0; d < TAUGHT_WIDTH; d++) t.x[k][d] = (float)((k * 5 + d * 3) % 7 - 3) / 4;
        for (int c = 0; c < TAUGHT_CLASSES; c++) t.values[k][c] = (float)((k + c) % 2);
        t.labels[k] = k % TAUGHT_CLASSES;
    }
    for (int i = 0; i < TAUGHT_CLASSES * TAUGHT_WIDTH; i++) {
        w[i] = (i * 7 % 11 - 5) / 4.0;
        t.weights[1][i] = (float)(i * 5 % 13 - 6) / 4;
    }
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        t.task = rows[k].task;
        CHECK_NEAR(taught_loss(&t, w, NULL, rows[k].share, rows[k].heat, &hard), rows[k].loss, 1e-14);
    }
}

/* Gradients equal finite differences of the loss in doubles, in one micro-batch, in several and on several
   ranks; statistics and evaluations show the loss without the teacher. */
TEST(teacher_as_in_loops_of_doubles)
{
    static const float class_weights[TAUGHT_CLASSES] = {1, 0.5f, 2, 3};
    static const struct { tt_task task; float share, heat; bool weighted; } rows[] = {
        {TT_TASK_CLASS, 0.4f, 2.5f, false}, {TT_TASK_CLASS, 1, 1, false},
        {TT_TASK_CLASS, 0, 2, false},       {TT_TASK_CLASS, 0.7f, 4, true},
        {TT_TASK_LABELS, 0.3f, 3, false},   {TT_TASK_SCORES, 0.6f, 2, false}};
    double worst = 0;
    for (int k = 0; k < TEST_COUNT(rows) * 3; k++) {
        const int row = k / 3, way = k % 3; /* way 0: one micro-batch; 1: three; 2: three, on two ranks */
        static taught t;
        taught_open(&t, rows[row].task, way == 2 ? 2 : 1);
        const char *device = way == 2 ? "cpu*2" : "cpu";
        tt_teacher *teacher = taught_make_teacher(&t, device);
        const tt_model m = taught_tt_model(&t, false);
        tt_train_options o = tt_train_options_default();
        o.teacher = teacher;
        o.teacher_weight = rows[row].share;
        o.teacher_temperature = rows[row].heat;
        o.class_weights = rows[row].weighted ? class_weights : NULL;
        o.schedule.kind = TT_CONSTANT;
        o.schedule.lr = 0;
        o.max_seqs = TAUGHT;
        o.compile.device = device;
        o.compile.accumulate = way > 0;
        o.compile.optimizer.clip_norm = 0;
        o.compile.optimizer.weight_decay = 0;
        o.compile.before_update = taught_gradient;
        o.compile.user = &t;
        t.micro = way ? TAUGHT_MICRO : TAUGHT;
        tt_trainer *r = tt_trainer_new(t.ctx, &m, &o);
        if (!CHECK(teacher && r)) fprintf(stderr, "%s\n", tt_error(t.ctx));
        REQUIRE(teacher && r);
        tt_stats stats, eval;
        bool updated = false, more = true;
        CHECK(taught_seek(&t, 0, 0) == TT_OK);
        while (!updated && more) {
            tt_batch b;
            memset(&b, 0, sizeof b);
            CHECK(taught_next(&t, &b, &more) == TT_OK);
            if (more && !CHECK(tt_train_batch(r, &b, &stats, &updated) == TT_OK)) {
                fprintf(stderr, "%s\n", tt_error(t.ctx));
                break;
            }
        }
        CHECK(updated && tt_param_get(t.w, t.weights[0]) == TT_OK);
        CHECK(tt_evaluate(r, &t.source, &eval) == TT_OK);
        double w[TAUGHT_CLASSES * TAUGHT_WIDTH], hard, unweighted;
        for (int i = 0; i < TAUGHT_CLASSES * TAUGHT_WIDTH; i++) w[i] = t.weights[0][i];
        const double share = o.teacher_weight, heat = o.teacher_temperature;
        taught_loss(&t, w, o.class_weights, share, heat, &hard);
        taught_loss(&t, w, NULL, 0, 1, &unweighted);
        CHECK_NEAR(stats.loss, hard, 1e-6 * hard);
        CHECK_NEAR(eval.loss, unweighted, 1e-6 * unweighted);
        CHECK(eval.targets == (t.task == TT_TASK_CLASS ? TAUGHT - 1 : TAUGHT));
        for (int i = 0; i < TAUGHT_CLASSES * TAUGHT_WIDTH; i++) {
            const double x = w[i], h = 1e-5;
            w[i] = x + h;
            const double up = taught_loss(&t, w, o.class_weights, share, heat, &hard);
            w[i] = x - h;
            const double down = taught_loss(&t, w, o.class_weights, share, heat, &hard);
            w[i] = x;
            const double error = fabs(t.gradient[i] - (up - down) / (2 * h));
            worst = error <= worst ? worst : error;
        }
        tt_trainer_free(r);
        tt_teacher_free(teacher);
        TEST_CLOSE(t.ctx, &t.a);
    }
    if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("  gradients within %.1e\n", worst);
    CHECK_NEAR(worst, 0, 2e-6);
}

/* Options and batches that do not fit a teacher are refused by name, and no memory leaks. */
TEST(teachers_that_are_refused)
{
    static taught t;
    taught_open(&t, TT_TASK_CLASS, 1);
    tt_teacher *teacher = taught_make_teacher(&t, "cpu");
    tt_model m = taught_tt_model(&t, false);
    tt_train_options o = tt_train_options_default();
    o.schedule.total_steps = 10;
    o.max_seqs = TAUGHT;
    o.teacher = teacher;
    o.teacher_weight = 1.5f;
    o.teacher_temperature = 0;
    CHECK(!tt_trainer_new(t.ctx, &m, &o));
    CHECK_ERROR(t.ctx, TT_ERR_ARGUMENT, "teacher_weight is 1.5, but must be 0 to 1; teacher_temperature is "
                "0, but");
    o.teacher_weight = 0.5f;
    o.teacher_temperature = 2;
    m.classes--;
    CHECK(!tt_trainer_new(t.ctx, &m, &o));
    CHECK_ERROR(t.ctx, TT_ERR_ARGUMENT, "the teacher's logits have 4 columns, for task 0 of tt_task, but the "
                "model's have 3, for task 0");
    m.classes++;
    m.task = TT_TASK_LABELS;
    CHECK(!tt_trainer_new(t.ctx, &m, &o));
    CHECK_ERROR(t.ctx, TT_ERR_ARGUMENT, "but the model's have 4, for task 1: both must be equal");
    m.task = TT_TASK_CLASS;
    tt_trainer *r = tt_trainer_new(t.ctx, &m, &o);
    REQUIRE(r);
    tt_batch b;
    tt_stats stats;
    bool more;
    memset(&b, 0, sizeof b);
    t.micro = TAUGHT;
    CHECK(taught_seek(&t, 0, 0) == TT_OK && taught_next(&t, &b, &more) == TT_OK);
    t.index[2] = 1; /* no example has the index 1 */
    CHECK(tt_train_batch(r, &b, &stats, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(t.ctx, TT_ERR_ARGUMENT, "the teacher has not seen the example with index 1: make it");
    b.index = NULL;
    CHECK(tt_train_batch(r, &b, &stats, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(t.ctx, TT_ERR_ARGUMENT, "a teacher needs the index of each example in the dataset, but "
                "example 0");
    b.index = t.index;
    t.index[2] = 0;
    CHECK(tt_train_batch(r, &b, &stats, NULL) == TT_OK);
    /* A state belongs to one teacher, also if the logits are computed once. */
    char path[1024];
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "logits.safetensors"));
    CHECK(tt_trainer_save(r, path, NULL) == TT_OK && tt_trainer_load(r, path, NULL) == TT_OK);
    t.weights[1][3] += 1;
    CHECK(tt_param_set(t.w_teacher, t.weights[1]) == TT_OK);
    tt_teacher *second = taught_make_teacher(&t, "cpu");
    o.teacher = second;
    tt_trainer *other = tt_trainer_new(t.ctx, &m, &o);
    REQUIRE(other);
    CHECK(tt_trainer_load(other, path, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(t.ctx, TT_ERR_ARGUMENT, "a run with the logits of another teacher: give the teacher");
    tt_trainer_free(other);
    tt_teacher_free(second);
    /* Each allocation of a teacher fails in turn. The first teacher allocates what the trainer keeps. */
    tt_teacher_free(tt_teacher_new(r, &t.source));
    const size_t before = tt_allocated_bytes(t.ctx);
    bool done = false;
    int n = 1;
    for (; !done && n < 30; n++) {
        t.a.failed = false;
        t.a.fail_at = t.a.calls + n;
        tt_teacher *k = tt_teacher_new(r, &t.source);
        done = k && !t.a.failed;
        if (!k) CHECK_ERROR(t.ctx, TT_ERR_MEMORY, "memory");
        tt_teacher_free(k);
        CHECK(tt_allocated_bytes(t.ctx) == before);
    }
    t.a.fail_at = 0;
    CHECK(done && n > 4);
    tt_trainer_free(r);
    tt_teacher_free(teacher);
    tt_teacher_free(NULL);
    TEST_CLOSE(t.ctx, &t.a);
}

/* A teacher teaches a head that is trained from features as it teaches the head after a frozen encoder. */
TEST(teacher_of_a_head_by_features)
{
    setup s = small();
    rank_group w[2];
    tt_teacher *teacher[2];
    s.dropout = 0;
    for (int once = 0; once < 2; once++) {
        rank_group *x = &w[once];
        if (!open_frozen(x, &s, TT_TASK_LABELS, 0, "distilbert.*", once)) return;
        teacher[once] = tt_teacher_new(x->r, tt_loader_source(x->all)); /* the model before training */
        REQUIRE(teacher[once]);
        tt_trainer_free(x->r);
        const tt_model model = tt_bert_model(&x->m);
        tt_train_options o = train_options(&s, x->l);
        o.features_once = once;
        o.teacher = teacher[once];
        o.teacher_weight = 0.9f;
        x->r = tt_trainer_new(x->ctx, &model, &o);
        REQUIRE(x->r);
        if (!CHECK(fit_frozen(x, 2, NULL, NULL) == TT_OK)) fprintf(stderr, "%s\n", tt_error(x->ctx));
    }
    CHECK_NEAR(apart(&w[0], &w[1], "*"), 0, 1e-5);
    for (int once = 0; once < 2; once++) {
        tt_teacher_free(teacher[once]);
        close_world(&w[once]);
    }
}
