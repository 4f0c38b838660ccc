/* Distillation with the teacher's model beside the student: hidden states, their gradients, and what is
   refused. */
#pragma once

enum { HID_SEQS = 7, HID_TOKENS = 21, HID_IN = 3, HID_CLASSES = 3, HID_LAYERS = 4, HID_WIDTH = 5 };

/* A model of layers of tokens whose mean is classified, and its weights in doubles: the matrix of the input
   (width, HID_IN), of each layer (width, width), and of the classifier (HID_CLASSES, width). */
typedef struct hid_model {
    tt_param *param[HID_LAYERS + 2];
    double w[HID_LAYERS + 2][HID_WIDTH * HID_WIDTH];
    int layers, width;
    bool unnamed;   /* the outputs of layers get no names */
    tt_task task;
} hid_model;

typedef struct hid {
    test_allocator a;
    tt_context *ctx;
    hid_model m[2]; /* the student; the teacher */
    tt_param *projection;
    double p[HID_WIDTH * HID_WIDTH];
    float gradient[HID_LAYERS + 3][HID_WIDTH * HID_WIDTH], x[HID_TOKENS][HID_IN];
    float values[HID_SEQS][HID_CLASSES];
    int32_t start[HID_SEQS + 1], labels[HID_SEQS];
} hid;

static tt_value hid_record(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    const hid_model *m = (const hid_model *)self;
    const int64_t rows = tt_axis(t, "tokens", o->max_tokens), seqs = tt_axis(t, "sequences", o->max_seqs);
    tt_value none = {0, 0}, x = tt_input(t, "x", TT_F32, rows, HID_IN);
    tt_value start = tt_seq_start(t, "seq_start", seqs);
    if (m->layers == HID_LAYERS) tt_input(t, "positions", TT_I32, rows, 1); /* only the teacher declares it */
    x = tt_tanh(t, tt_linear(t, x, m->param[0], NULL));
    for (int k = 0; k < m->layers; k++) {
        x = tt_dropout(t, tt_tanh(t, tt_linear(t, x, m->param[k + 1], NULL)),
                       m->layers == HID_LAYERS ? 0.5f : 0); /* the teacher runs without its dropout */
        if (!m->unnamed) tt_name(t, x, "layer.%d", k);
    }
    *output = tt_linear(t, tt_mean_pool(t, x, start), m->param[m->layers + 1], NULL);
    if (m->task == TT_TASK_CLASS) {
        tt_cross_entropy_options c = tt_cross_entropy_options_default();
        if (o->class_weights) c.class_weights = tt_input(t, "class_weights", TT_F32, 1, HID_CLASSES);
        return tt_cross_entropy(t, *output, tt_input(t, "labels", TT_I32, seqs, 1), &c);
    }
    tt_value values = tt_input(t, "label_values", TT_F32, seqs, HID_CLASSES);
    if (m->task == TT_TASK_LABELS) return tt_sigmoid_cross_entropy(t, *output, values, NULL);
    return tt_mean_squared_error(t, *output, values, none);
}

static void hid_make(hid *h, hid_model *m, int layers, int width, tt_task task)
{
    const tt_init init = {TT_INIT_NORMAL, 0.7f};
    m->layers = layers;
    m->width = width;
    m->task = task;
    for (int k = 0; k < layers + 2; k++) {
        char name[16];
        const int64_t dims[2] = {k > layers ? HID_CLASSES : width, k ? width : HID_IN};
        snprintf(name, sizeof name, "w%d", k);
        m->param[k] = tt_param_new(h->ctx, name, 2, dims, init);
    }
}

/* Opens a context with a student of 2 layers of 4 or 5 columns, and its teacher of 4 layers of 5 columns. */
static void hid_open(hid *h, tt_task task, int width, int threads)
{
    uint64_t random = 5;
    memset(h, 0, sizeof *h);
    tt_context_options o = test_options(&h->a);
    o.threads = threads;
    h->ctx = tt_open(&o);
    hid_make(h, &h->m[0], 2, width, task);
    CHECK(tt_param_prefix(h->ctx, "teacher.") == TT_OK);
    hid_make(h, &h->m[1], HID_LAYERS, HID_WIDTH, task);
    CHECK(tt_param_prefix(h->ctx, NULL) == TT_OK);
    CHECK(tt_param_find(h->ctx, "w3") == h->m[0].param[3] && tt_param_find(h->ctx, "teacher.w5"));
    for (int k = 0; k < HID_SEQS; k++) h->start[k + 1] = h->start[k] + 1 + k % 5;
    CHECK(h->start[HID_SEQS] <= HID_TOKENS);
    for (int k = 0; k < HID_TOKENS; k++)
        for (int d = 0; d < HID_IN; d++) h->x[k][d] = (float)(test_random(&random) % 2000) / 1000 - 1;
    for (int k = 0; k < HID_SEQS; k++) {
        h->labels[k] = (int32_t)(test_random(&random) % HID_CLASSES);
        for (int c = 0; c < HID_CLASSES; c++) h->values[k][c] = (float)(test_random(&random) % 2);
    }
    if (task == TT_TASK_CLASS) h->labels[3] = -100; /* an example without a label does not count */
}

static tt_model hid_tt_model(const hid_model *m)
{
    const tt_model model = {m, hid_record, {{NULL, NULL, false, NULL}}, HID_CLASSES, NULL, 5, false, m->task};
    return model;
}

static tt_train_options hid_options(const tt_model *teacher)
{
    tt_train_options o = tt_train_options_default();
    o.teacher_model = teacher;
    o.teacher_weight = 0.3f;
    o.teacher_temperature = 1.5f;
    o.hidden_weight = 0.7f;
    o.schedule.kind = TT_CONSTANT;
    o.schedule.lr = 0;
    o.max_seqs = HID_SEQS;
    o.max_tokens = HID_TOKENS;
    o.compile.optimizer.clip_norm = 0;
    o.compile.optimizer.weight_decay = 0;
    return o;
}

/* Trains a step whose micro-batches have up to `micro` examples. */
static tt_status hid_step(const hid *h, tt_trainer *r, int micro, tt_stats *stats)
{
    static const int32_t positions[HID_TOKENS] = {0};
    tt_status status = TT_OK;
    for (int first = 0; first < HID_SEQS && status == TT_OK; first += micro) {
        const int n = HID_SEQS - first < micro ? HID_SEQS - first : micro;
        int32_t start[HID_SEQS + 1];
        tt_batch b;
        memset(&b, 0, sizeof b);
        for (int s = 0; s <= n; s++) start[s] = h->start[first + s] - h->start[first];
        const tt_array x = {"x", h->x[h->start[first]], start[n]};
        b.arrays = &x;
        b.n_arrays = 1;
        b.seqs = n;
        b.rows = start[n];
        b.seq_start = start;
        b.positions = positions;
        b.labels = h->labels + first;
        b.label_values = h->values[first];
        b.values = HID_CLASSES;
        b.last_of_step = first + micro >= HID_SEQS;
        status = tt_train_batch(r, &b, stats, NULL);
    }
    return status;
}

static tt_status hid_gradients(void *user, tt_program *p, int64_t step)
{
    hid *h = (hid *)user;
    tt_status status = TT_OK;
    (void)step;
    for (int k = 0; k < 5 && status == TT_OK; k++) {
        tt_param *of = k < 4 ? h->m[0].param[k] : h->projection;
        if (of) status = tt_get_gradient(p, of, h->gradient[k]);
    }
    return status;
}

/* Computes the hidden states of an example's tokens, (layers, tokens, width), and its logits. */
static void hid_forward(const hid *h, const hid_model *m, int s, double *hidden, double *logits)
{
    const int n = h->start[s + 1] - h->start[s], width = m->width;
    double mean[HID_WIDTH] = {0};
    for (int i = 0; i < n; i++) {
        double from[HID_WIDTH] = {0}, to[HID_WIDTH];
        for (int d = 0; d < HID_IN; d++) from[d] = h->x[h->start[s] + i][d];
        for (int k = 0; k <= m->layers; k++) {
            const int columns = k ? width : HID_IN;
            for (int r = 0; r < width; r++) {
                double sum = 0;
                for (int d = 0; d < columns; d++) sum += m->w[k][r * columns + d] * from[d];
                to[r] = tanh(sum);
                if (k) hidden[((k - 1) * n + i) * width + r] = to[r];
            }
            memcpy(from, to, sizeof from);
        }
        for (int r = 0; r < width; r++) mean[r] += from[r] / n;
    }
    for (int c = 0; c < HID_CLASSES; c++) {
        logits[c] = 0;
        for (int r = 0; r < width; r++) logits[c] += m->w[m->layers + 1][c * width + r] * mean[r];
    }
}

/* Computes the mean squared error of a layer of an example. */
static double hid_error(const hid *h, int n, const double *x, const double *y)
{
    const int width = h->m[0].width;
    double sum = 0;
    for (int i = 0; i < n; i++)
        for (int r = 0; r < HID_WIDTH; r++) {
            double own = 0;
            for (int d = 0; d < width && h->projection; d++) own += h->p[r * width + d] * x[i * width + d];
            if (!h->projection) own = x[i * width + r];
            sum += (own - y[i * HID_WIDTH + r]) * (own - y[i * HID_WIDTH + r]);
        }
    return sum / (n * HID_WIDTH);
}

static double hid_log_softmax(const double *z, double heat, int c)
{
    double sum = 0;
    for (int k = 0; k < HID_CLASSES; k++) sum += exp((z[k] - z[c]) / heat);
    return -log(sum);
}

/* Computes the loss that trains, in doubles. layers: tt_train_options.hidden_layers of both layers. */
static double hid_loss(const hid *h, const tt_train_options *o, const int *layers)
{
    const double heat = o->teacher_temperature, share = o->teacher_weight;
    double sum = 0, total = 0;
    for (int s = 0; s < HID_SEQS; s++) {
        double hidden[2][HID_LAYERS * 5 * HID_WIDTH], z[HID_CLASSES], q[HID_CLASSES], own = 0, soft = 0;
        double weight = 1, error = 0;
        int pairs = 0;
        const int n = h->start[s + 1] - h->start[s];
        hid_forward(h, &h->m[0], s, hidden[0], z);
        hid_forward(h, &h->m[1], s, hidden[1], q);
        if (h->m[0].task == TT_TASK_CLASS) {
            if (h->labels[s] < 0) continue;
            weight = o->class_weights ? o->class_weights[h->labels[s]] : 1;
            own = -hid_log_softmax(z, 1, h->labels[s]);
        }
        for (int c = 0; c < HID_CLASSES; c++) {
            const double y = h->values[s][c], p = 1 / (1 + exp(-q[c] / heat));
            if (h->m[0].task == TT_TASK_CLASS)
                soft -= heat * heat * exp(hid_log_softmax(q, heat, c)) * hid_log_softmax(z, heat, c);
            else if (h->m[0].task == TT_TASK_LABELS)
                own += (log1p(exp(z[c])) - y * z[c]) / HID_CLASSES,
                soft += heat * heat * (log1p(exp(z[c] / heat)) - p * z[c] / heat) / HID_CLASSES;
            else
                own += (z[c] - y) * (z[c] - y) / HID_CLASSES,
                soft += (z[c] - q[c]) * (z[c] - q[c]) / HID_CLASSES;
        }
        for (int k = 0; k < 2; k++) {
            if (layers[k] < 0) continue;
            error += hid_error(h, n, hidden[0] + k * n * h->m[0].width,
                               hidden[1] + layers[k] * n * HID_WIDTH);
            pairs++;
        }
        total += weight;
        sum += weight * ((1 - share) * own + share * soft + o->hidden_weight * error / pairs);
    }
    return sum / total;
}

static void hid_weights(double *to, tt_param *p)
{
    float *values = test_values(p);
    for (int64_t i = 0; i < tt_param_size(p); i++) to[i] = values[i];
    free(values);
}

/* Gradients of the student and of the projection equal finite differences of the loss in doubles: of widths
   that differ and of equal ones, in one micro-batch, in three, and on two ranks. */
TEST(hidden_states_as_in_loops_of_doubles)
{
    static const float class_weights[HID_CLASSES] = {1, 0.5f, 2};
    static const int even[2] = {1, 3}, own[2] = {-1, 2};
    static const struct { tt_task task; int width; const int *layers; bool weighted; } rows[] = {
        {TT_TASK_CLASS, 4, NULL, false}, {TT_TASK_CLASS, 5, own, true},
        {TT_TASK_LABELS, 5, NULL, false}, {TT_TASK_SCORES, 4, own, false}};
    double worst = 0;
    for (int k = 0; k < TEST_COUNT(rows) * 3; k++) {
        const int row = k / 3, way = k % 3;
        static hid h;
        hid_open(&h, rows[row].task, rows[row].width, way == 2 ? 2 : 1);
        const tt_model m = hid_tt_model(&h.m[0]), teacher = hid_tt_model(&h.m[1]);
        tt_train_options o = hid_options(&teacher);
        o.hidden_layers = rows[row].layers;
        o.class_weights = rows[row].weighted ? class_weights : NULL;
        o.compile.device = way == 2 ? "cpu*2" : "cpu";
        o.compile.accumulate = way > 0;
        o.compile.before_update = hid_gradients;
        o.compile.user = &h;
        tt_trainer *r = tt_trainer_new(h.ctx, &m, &o);
        if (!CHECK(r != NULL)) fprintf(stderr, "%s\n", tt_error(h.ctx));
        REQUIRE(r);
        h.projection = tt_param_find(h.ctx, "hidden_projection.weight");
        CHECK((h.projection != NULL) == (rows[row].width != HID_WIDTH));
        tt_stats stats;
        if (!CHECK(hid_step(&h, r, way ? 3 : HID_SEQS, &stats) == TT_OK))
            fprintf(stderr, "%s\n", tt_error(h.ctx));
        for (int j = 0; j < 4; j++) hid_weights(h.m[0].w[j], h.m[0].param[j]);
        for (int j = 0; j < HID_LAYERS + 2; j++) hid_weights(h.m[1].w[j], h.m[1].param[j]);
        if (h.projection) hid_weights(h.p, h.projection);
        const int *layers = rows[row].layers ? rows[row].layers : even;
        for (int j = 0; j < (h.projection ? 5 : 4); j++) {
            double *w = j < 4 ? h.m[0].w[j] : h.p;
            const int64_t n = tt_param_size(j < 4 ? h.m[0].param[j] : h.projection);
            for (int64_t i = 0; i < n; i++) {
                const double x = w[i], step = 1e-5;
                w[i] = x + step;
                const double up = hid_loss(&h, &o, layers);
                w[i] = x - step;
                const double down = hid_loss(&h, &o, layers);
                w[i] = x;
                const double error = fabs(h.gradient[j][i] - (up - down) / (2 * step));
                worst = error <= worst ? worst : error;
            }
        }
        CHECK(tt_param_frozen(h.m[1].param[0]) && !tt_param_frozen(h.m[0].param[0]));
        tt_trainer_free(r);
        TEST_CLOSE(h.ctx, &h.a);
    }
    if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("  gradients within %.1e\n", worst);
    CHECK_NEAR(worst, 0, 2e-6);
}

/* Options that do not fit the teacher's model are refused by name. */
TEST(hidden_states_that_are_refused)
{
    static const int wrong[2] = {0, 4}, none[2] = {-1, -1};
    static hid h;
    hid_open(&h, TT_TASK_CLASS, 4, 1);
    tt_model m = hid_tt_model(&h.m[0]), teacher = hid_tt_model(&h.m[1]);
    tt_train_options o = hid_options(NULL);
    CHECK(!tt_trainer_new(h.ctx, &m, &o));
    CHECK_ERROR(h.ctx, TT_ERR_ARGUMENT, "hidden_weight is 0.7, but must be a finite number of at least 0, "
                "and 0 without teacher_model");
    o.teacher_model = &teacher;
    o.hidden_layers = wrong;
    CHECK(!tt_trainer_new(h.ctx, &m, &o));
    CHECK_ERROR(h.ctx, TT_ERR_ARGUMENT, "hidden_layers[1] is 4, but the teacher has the layers 0 to 3");
    o.hidden_layers = none;
    CHECK(!tt_trainer_new(h.ctx, &m, &o));
    CHECK_ERROR(h.ctx, TT_ERR_ARGUMENT, "hidden_layers has no layer of the teacher");
    o.hidden_layers = NULL;
    h.m[0].unnamed = true;
    CHECK(!tt_trainer_new(h.ctx, &m, &o));
    CHECK_ERROR(h.ctx, TT_ERR_ARGUMENT, "hidden_weight needs hidden states of teacher and student, but the "
                "student has none");
    h.m[0].unnamed = false;
    o.teacher_model = &m;
    CHECK(!tt_trainer_new(h.ctx, &m, &o));
    CHECK_ERROR(h.ctx, TT_ERR_ARGUMENT, "the teacher and the student share the parameter 'w0'");
    CHECK(!tt_param_frozen(h.m[0].param[0]));
    o.teacher_model = &teacher;
    teacher.classes = 2;
    CHECK(!tt_trainer_new(h.ctx, &m, &o));
    CHECK_ERROR(h.ctx, TT_ERR_ARGUMENT, "the teacher's logits have 2 columns, for task 0");
    teacher.classes = HID_CLASSES;
    teacher.same_length = true;
    CHECK(!tt_trainer_new(h.ctx, &m, &o));
    CHECK_ERROR(h.ctx, TT_ERR_ARGUMENT, "the examples of teacher_model have 5 rows and those of the model 5");
    teacher.same_length = false;
    char long_prefix[70] = "";
    memset(long_prefix, 'x', 64);
    CHECK(tt_param_prefix(h.ctx, long_prefix) == TT_ERR_ARGUMENT);
    CHECK_ERROR(h.ctx, TT_ERR_ARGUMENT, "has 64 bytes, but may have at most 63");
    /* Each allocation of a trainer fails in turn. The first trainer makes the projection. */
    tt_trainer_free(tt_trainer_new(h.ctx, &m, &o));
    const size_t before = tt_allocated_bytes(h.ctx);
    bool done = false;
    int n = 1;
    for (; !done && n < 2000; n++) {
        h.a.failed = false;
        h.a.fail_at = h.a.calls + n;
        tt_trainer *r = tt_trainer_new(h.ctx, &m, &o);
        done = r && !h.a.failed;
        if (!r) CHECK_ERROR(h.ctx, TT_ERR_MEMORY, "memory");
        tt_trainer_free(r);
        CHECK(tt_allocated_bytes(h.ctx) == before);
    }
    h.a.fail_at = 0;
    CHECK(done && n > 20);
    /* A projection of another shape belongs to an earlier trainer. */
    TEST_CLOSE(h.ctx, &h.a);
    hid_open(&h, TT_TASK_CLASS, 4, 1);
    const int64_t dims[2] = {2, 2};
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    CHECK(tt_param_new(h.ctx, "hidden_projection.weight", 2, dims, zeros) != NULL);
    CHECK(!tt_trainer_new(h.ctx, &m, &o));
    CHECK_ERROR(h.ctx, TT_ERR_SHAPE, "has another shape than (5, 4)");
    TEST_CLOSE(h.ctx, &h.a);
}

/* Opens a small run of texts whose student, with dropout, learns from a wider and deeper teacher. */
static bool open_taught(rank_group *w, const setup *s, tt_bert *teacher, tt_model *model)
{
    if (!open_world(w, s)) return false;
    tt_trainer_free(w->r);
    tt_bert_config c = w->m.config;
    c.hidden_size = 36;
    c.layers = 4;
    CHECK(tt_param_prefix(w->ctx, "teacher.") == TT_OK);
    if (!CHECK(tt_bert_new(w->ctx, teacher, &c) == TT_OK)) return false;
    CHECK(tt_param_prefix(w->ctx, "") == TT_OK);
    *model = tt_bert_model(teacher);
    const tt_model m = tt_bert_model(&w->m);
    tt_train_options o = train_options(s, w->l);
    o.teacher_model = model;
    o.hidden_weight = 1;
    w->r = tt_trainer_new(w->ctx, &m, &o);
    if (!w->r) CHECK_ERROR(w->ctx, TT_OK, "a trainer");
    return w->r != NULL;
}

static void close_taught(rank_group *w, tt_bert *teacher)
{
    tt_bert_free(teacher);
    close_world(w);
}

/* A run with a teacher beside the student resumes with the same bits, on any number of threads; the plan has
   the bytes that the run allocates; a state belongs to one teacher. */
TEST(hidden_states_resume)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true"};
    for (int k = 0; k < TEST_COUNT(precisions); k++) {
        setup s = small();
        rank_group w[2];
        tt_bert teacher[2];
        tt_model model[2];
        char path[1024];
        s.precision = precisions[k];
        s.accumulate = k ? 2 : 1;
        snprintf(path, sizeof path, "%s", test_path(test_folder(), "taught.safetensors"));
        for (int i = 0; i < 2; i++) {
            s.threads = 1 + 2 * i;
            if (!open_taught(&w[i], &s, &teacher[i], &model[i])) return;
        }
        const tt_plan plan = tt_program_plan(tt_trainer_program(w[0].r));
        const size_t before = tt_allocated_bytes(w[0].ctx);
        CHECK(tt_allocate(w[0].r->train) == TT_OK);
        CHECK(tt_allocated_bytes(w[0].ctx) - before == plan.bytes + plan.host_bytes);
        CHECK(train(&w[0], 3, NULL) == TT_OK && tt_trainer_save(w[0].r, path, &w[0].progress) == TT_OK &&
              train(&w[0], 3, NULL) == TT_OK);
        CHECK(tt_trainer_load(w[1].r, path, &w[1].progress) == TT_OK && train(&w[1], 3, NULL) == TT_OK);
        CHECK(same_worlds(&w[0], &w[1]));
        float *values = test_values(teacher[1].classifier_b);
        values[1] += 1;
        CHECK(tt_param_set(teacher[1].classifier_b, values) == TT_OK);
        CHECK(tt_trainer_load(w[1].r, path, &w[1].progress) == TT_ERR_ARGUMENT);
        CHECK_ERROR(w[1].ctx, TT_ERR_ARGUMENT, "the frozen parameter 'teacher.classifier.bias' has other");
        free(values);
        for (int i = 0; i < 2; i++) close_taught(&w[i], &teacher[i]);
    }
}

/* A teacher that has fewer tokens or positions than the texts is refused by name: beside the student, with
   features_once, and as a source of logits. */
TEST(teachers_of_other_tokens)
{
    for (int k = 0; k < 6; k++) {
        const bool positions = k % 2, once = k / 2 == 1, logits = k / 2 == 2;
        setup s = small();
        rank_group w;
        tt_bert teacher;
        REQUIRE(open_frozen(&w, &s, TT_TASK_CLASS, 0, "distilbert.embeddings.*", false));
        tt_bert_config c = w.m.config;
        if (positions) c.max_positions = c.max_length = 5;
        else c.vocab_size = 10;
        CHECK(tt_param_prefix(w.ctx, "teacher.") == TT_OK && tt_bert_new(w.ctx, &teacher, &c) == TT_OK);
        CHECK(tt_param_prefix(w.ctx, NULL) == TT_OK);
        tt_trainer_free(w.r);
        const tt_model model = tt_bert_model(&teacher), student = tt_bert_model(&w.m);
        tt_train_options o = train_options(&s, w.l);
        if (logits) {
            o.compile.train = false;
            w.r = tt_trainer_new(w.ctx, &model, &o);
            REQUIRE(w.r);
            CHECK(!tt_teacher_new(w.r, tt_loader_source(w.all)));
            CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, "tt_teacher_new: the teacher cannot read a batch of the "
                        "source (embedding: '");
        } else {
            o.teacher_model = &model;
            o.hidden_weight = 1;
            o.features_once = once;
            w.r = tt_trainer_new(w.ctx, &student, &o);
            REQUIRE(w.r);
            CHECK(fit_frozen(&w, 1, NULL, NULL) == TT_ERR_ARGUMENT);
            CHECK_ERROR(w.ctx, TT_ERR_ARGUMENT, positions ? "but teacher_model reads at most 5: cut the" :
                        "but teacher_model has only the tokens 0 to 9: teacher and student need the same");
        }
        close_taught(&w, &teacher);
    }
}

/* With features_once the teacher's results, computed once, train as the teacher beside the student does, and
   also on two ranks. */
TEST(hidden_states_computed_once)
{
    setup s = small();
    rank_group w[2];
    tt_bert teacher[2];
    tt_model model[2];
    double loss[2];
    s.dropout = 0;
    s.optimizer.kind = TT_SGD; /* Adam would enlarge rounding where gradients are nearly 0 */
    s.schedule.lr = 0.05f;
    for (int once = 0; once < 2; once++) {
        rank_group *x = &w[once];
        s.device = once ? "cpu*2" : "cpu";
        s.parallel.groups = 2;
        s.accumulate = 1;
        if (!open_taught(x, &s, &teacher[once], &model[once])) return;
        tt_trainer_free(x->r);
        const tt_model m = tt_bert_model(&x->m);
        tt_train_options o = train_options(&s, x->l);
        o.teacher_model = &model[once];
        o.hidden_weight = 1;
        o.features_once = once;
        x->r = tt_trainer_new(x->ctx, &m, &o);
        REQUIRE(x->r);
        if (once) CHECK(tt_trainer_feature_bytes(x->r, tt_loader_source(x->all)) > 2 * 36 * 4 * TEXTS);
        if (!CHECK(fit_frozen(x, 2, &loss[once], NULL) == TT_OK)) fprintf(stderr, "%s\n", tt_error(x->ctx));
    }
    CHECK_NEAR(apart(&w[0], &w[1], "*"), 0, 1e-5);
    CHECK_NEAR(loss[0], loss[1], 1e-5);
    for (int once = 0; once < 2; once++) close_taught(&w[once], &teacher[once]);
}
