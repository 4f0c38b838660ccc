/* Tests of the timed algorithms of products, which files store and ranks share. */
#pragma once

#ifdef TT_EMULATE
/* ----------------------------------------------------------------------------------------------- products */

/* Compares results with a tolerance, since a fault may change the kernel of a product. */
static bool same_results(const small_result *a, const small_result *b)
{
    bool same = true;
    for (int k = 0; k < 4; k++) same &= fabs(a->loss[k] - b->loss[k]) <= 1e-6;
    for (int k = 0; k < TEST_COUNT(a->w); k++) same &= fabsf(a->w[k] - b->w[k]) <= 1e-5f;
    /* The last step has 4 rows. */
    for (int k = 0; k < 4 * 5; k++) same &= fabsf(a->out[k] - b->out[k]) <= 1e-5f;
    return same;
}

/* If cublasLtMatmul refuses an algorithm that its heuristic offered, another offered algorithm or the
   fallback kernel makes the product. */
TEST(products_that_cublaslt_refuses)
{
    enum { NOT_SUPPORTED = 15, INVALID_VALUE = 7, ALL = 0x1e };
    static const struct { unsigned algorithms; int status; } refused[] = {
        {0, 0}, {2, NOT_SUPPORTED}, {2, INVALID_VALUE}, {ALL & ~16u, NOT_SUPPORTED}, {ALL, NOT_SUPPORTED}};
    small_result reference, result;
    long gemms = 0;
    memset(&reference, 0, sizeof reference);
    for (int c = 0; c < TEST_COUNT(refused); c++) {
        test_allocator a;
        small_net net;
        emu_configure(1, (size_t)16 << 20, 1, 4);
        emu_refuse_algorithms(refused[c].algorithms, refused[c].status);
        tt_context *ctx = test_open(&a);
        memset(&result, 0, sizeof result);
        if (!CHECK(small_run(ctx, &net, &result) == TT_OK)) printf("%s\n", tt_error(ctx));
        if (c == 0) reference = result;
        if (c == 0) gemms = emu_get_counts().gemms;
        CHECK(gemms > 0 && emu_get_counts().gemms == (refused[c].algorithms == ALL ? 0 : gemms));
        CHECK(same_results(&result, &reference));
        small_close(&net);
        TEST_CLOSE(ctx, &a);
    }
}

/* In a training step of each model in each precision, no product needs the fallback kernel, by the emulator's
   copy of cuBLASLt's rules. Language models compute their loss in chunks. */
TEST(no_product_of_a_model_needs_that_kernel)
{
    static const struct { const char *name, *residual; } precisions[] = {
        {"32-true", NULL}, {"bf16-mixed", NULL}, {"bf16-true", NULL}, {"16-mixed", NULL}, {"16-true", NULL},
        {"bf16-mixed", "f32"}, {"16-mixed", "16-bit"}};
    loss_chunk = loss_whole = 1;
    for (int c = 0; c < 4 * TEST_COUNT(precisions); c++) {
        const int kind = c % 4;
        const bool text = kind != 1;
        trained t;
        tt_lm l;
        made_batch b;
        tt_model model;
        int32_t targets[MAX_ROWS];
        tt_array array = {"targets", targets, 0};
        tt_train_options o = tt_train_options_default();
        tt_lm_config config = tt_lm_config_default(kind == 2 ? "gpt2" : "llama");
        config.vocab_size = VOCAB + 1; /* odd, as in GPT-2 */
        config.hidden_size = 24;
        config.heads = config.key_heads = 3;
        config.layers = 2;
        config.intermediate_size = 40;
        config.max_positions = 20;
        config.rotary.size = kind == 3 ? 8 : 0;
        emu_configure(1, (size_t)16 << 20, 1, (uint64_t)c);
        emu_watch("(any_matmul<false>)");
        precision = precisions[c / 4].name;
        residual = precisions[c / 4].residual;
        make_batch(&b, 0, !text, true);
        memset(&l, 0, sizeof l);
        if (kind < 2) {
            if (!open_training(&t, "cuda", !text, 0, false)) { close_training(&t); break; }
        } else {
            memset(&t, 0, sizeof t);
            t.ctx = test_open(&t.a);
            if (!CHECK(tt_lm_new(t.ctx, &l, &config) == TT_OK)) printf("%s\n", tt_error(t.ctx));
            model = tt_lm_model(&l);
            o.schedule.kind = TT_CONSTANT;
            o.compile.device = "cuda";
            o.compile.precision = precision;
            o.compile.residual = residual;
            o.compile.loss_scale.init = 16;
            o.compile.tune = "on"; /* also times the products of the loss */
            o.max_seqs = MAX_SEQS;
            o.max_tokens = MAX_ROWS;
            t.trainer = tt_trainer_new(t.ctx, &model, &o);
            for (int k = 0; k < MAX_ROWS; k++) targets[k] = b.ids[k];
            array.rows = b.b.rows;
            b.b.arrays = &array;
            b.b.n_arrays = 1;
        }
        if (!CHECK(t.trainer && tt_train_batch(t.trainer, &b.b, NULL, NULL) == TT_OK))
            printf("%s\n", tt_error(t.ctx));
        const emu_counts counts = emu_get_counts();
        if (!CHECK(counts.watched == 0 && counts.gemms >= 3 * 8))
            printf("%s, kind %d: %ld of %ld\n", precision, kind, counts.watched, counts.gemms);
        tt_trainer_free(t.trainer);
        t.trainer = NULL;
        if (kind > 1) tt_lm_free(&l);
        close_training(&t);
    }
    precision = residual = NULL;
    loss_chunk = 256;
    loss_whole = 16 << 20;
}

/* The heuristic is asked once for each shape. Shapes of more than 128 rows share the answer for the next
   multiple of 128. */
TEST(algorithms_are_chosen_once)
{
    enum { WIDTH = 8 }; /* even: a product of few rows needs no padded copies */
    static const int64_t dims[2] = {WIDTH, WIDTH};
    static float data[SMALL_ROWS * WIDTH];
    const tt_init normal = {TT_INIT_NORMAL, 0.5f};
    test_allocator a;
    emu_configure(1, (size_t)16 << 20, 1, 4);
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options o = tt_compile_options_default();
    const int64_t rows = tt_axis(t, "rows", SMALL_ROWS);
    const tt_value x = tt_input(t, "x", TT_F32, rows, WIDTH), y = tt_input(t, "y", TT_F32, rows, WIDTH);
    const tt_value h = tt_gelu(t, tt_linear(t, x, tt_param_new(ctx, "first", 2, dims, normal), NULL));
    const tt_value out = tt_linear(t, h, tt_param_new(ctx, "second", 2, dims, normal), NULL);
    o.device = "cuda";
    tt_program *p = tt_compile(t, tt_mean_squared_error(t, out, y, tt__handle(t, 0)), &o);
    bool ok = CHECK(p != NULL);
    long first = 0;
    for (int k = 0; k < SMALL_ROWS * WIDTH; k++) data[k] = (float)(k * 7 % 11) / 11 - 0.4f;
    for (int k = 0; k < 2 * SMALL_ROWS && ok; k++) {
        const int n = 1 + k % SMALL_ROWS;
        ok = CHECK(tt_set(p, x, data, n) == TT_OK && tt_set(p, y, data, n) == TT_OK &&
                   tt_step(p, 0.1f, NULL) == TT_OK);
        if (k == SMALL_ROWS - 1) first = emu_get_counts().heuristics;
    }
    const long shapes = 128 + 1, products = first / shapes;
    CHECK(products >= 3 && first == products * shapes);
    CHECK_NEAR((double)emu_get_counts().heuristics, (double)first, 0);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* ---- tt_compile_options.tune: a net whose products have a bias, GELU, its slope and sums of columns */

enum { TUNED_ROWS = 400, TUNED_IN = 16, TUNED_HIDDEN = 24, TUNED_STEPS = 6 };
enum { TUNED_WEIGHTS = 2 * TUNED_IN * TUNED_HIDDEN + TUNED_HIDDEN + TUNED_IN };

/* Microseconds of cuBLASLt's algorithms 1 to 4, all alike. The emulator cuts work into random slices, which
   adds less than 1%. */
static const double alike[4] = {1000, 1000, 1000, 1000};

typedef struct tuned_run {
    const char *device, *tune;
    int fastest;              /* the fastest of cuBLASLt's algorithms 1 to 4; 0: all are equal */
    double epilogue_us;       /* microseconds that GELU, its slope or sums add to a product */
    size_t memory;            /* bytes of a device's memory; 0: 64 MiB */
    /* steps [from, to); the run writes the state file `state`, and loads it first if from > 0 */
    int from, to;
    const char *state;
    bool accumulate;
    bool erf;                 /* GELU by erf, for which products have no epilogue */
    tt_status status;         /* expected status */
    const char *error;        /* part of the expected error message */
    unsigned refused;         /* bits of algorithms refused after the first step */
    long fault, faults;       /* from the first step on, `faults` calls fail, beginning with call `fault` */
    /* Results */
    float w[TUNED_WEIGHTS];
    double loss[TUNED_STEPS];
    emu_counts first, later;  /* counts of the first step, which times products, and of the later steps */
    char log[256];            /* the last line of the log */
    bool fault_met;
} tuned_run;

static void tuned_log(void *user, tt_log_level level, const char *id, const char *text)
{
    tuned_run *r = (tuned_run *)user;
    (void)id;
    if (level >= TT_LOG_INFO) snprintf(r->log, sizeof r->log, "%s", text);
}

static tt_status tuned_step(tuned_run *r, tt_program *p, tt_value x, tt_value y, int step)
{
    /* steps of 390 and 400 rows are timed as 512 rows */
    static const int rows[TUNED_STEPS] = {400, 400, 390, 130, 400, 400};
    static float xs[TUNED_ROWS * TUNED_IN], ys[TUNED_ROWS * TUNED_IN];
    const int n = rows[step], ranks = p->arena->data, micros = r->accumulate ? 4 : 1;
    tt_stats stats;
    tt_status status = TT_OK;
    for (int m = 0; m < micros && status == TT_OK; m++) { /* micro-batch m goes to rank m % ranks */
        for (int e = 0; e < n * TUNED_IN; e++) xs[e] = (float)((e * 37 + step * 11 + m * 5) % 101) / 50 - 1;
        for (int e = 0; e < n * TUNED_IN; e++) ys[e] = xs[(e * 7 + 3) % (n * TUNED_IN)];
        status = tt_set_rank(p, m % ranks, x, xs, n);
        if (status == TT_OK) status = tt_set_rank(p, m % ranks, y, ys, n);
        if (status == TT_OK && r->accumulate && m % ranks == ranks - 1) status = tt_micro_step(p, NULL);
    }
    if (status == TT_OK) status = r->accumulate ? tt_update(p, 0.02f, &stats) : tt_step(p, 0.02f, &stats);
    r->loss[step] = status == TT_OK ? stats.loss : 0;
    return status;
}

static bool run_tuned(tuned_run *r)
{
    test_allocator a;
    tt_context_options options = test_options(&a);
    tt_compile_options o = tt_compile_options_default();
    const int64_t up[2] = {TUNED_HIDDEN, TUNED_IN}, down[2] = {TUNED_IN, TUNED_HIDDEN};
    const tt_init normal = {TT_INIT_NORMAL, 0.3f}, zeros = {TT_INIT_ZEROS, 0};
    double us[4];
    char left[256];
    emu_configure(2, r->memory ? r->memory : (size_t)64 << 20, 1, 5);
    memcpy(us, alike, sizeof us);
    if (r->fastest) us[r->fastest - 1] = 500;
    emu_set_product_times(us, r->epilogue_us);
    options.logger.user = r;
    options.logger.log = tuned_log;
    r->log[0] = 0;
    tt_context *ctx = tt_open(&options);
    tt_tape *t = tt_tape_new(ctx);
    const int64_t rows = tt_axis(t, "rows", TUNED_ROWS);
    const tt_value x = tt_input(t, "x", TT_F32, rows, TUNED_IN), y = tt_input(t, "y", TT_F32, rows, TUNED_IN);
    tt_value h = tt_linear(t, x, tt_param_new(ctx, "up", 2, up, normal),
                           tt_param_new(ctx, "up_bias", 1, up, zeros));
    h = tt_linear(t, r->erf ? tt_gelu(t, h) : tt_gelu_tanh(t, h), tt_param_new(ctx, "down", 2, down, normal),
                  tt_param_new(ctx, "down_bias", 1, down, zeros));
    const tt_value loss = tt_mean_squared_error(t, h, y, tt__handle(t, 0));
    o.device = r->device ? r->device : "cuda";
    o.tune = r->tune;
    o.accumulate = r->accumulate;
    o.parallel.groups = r->accumulate ? 2 : 0;
    o.parallel.zero = 0;
    tt_program *p = tt_compile(t, loss, &o);
    tt_status status = p ? TT_OK : tt_error_code(ctx);
    if (p && r->from) status = tt_program_load(p, r->state);
    emu_reset_counts();
    const long calls = emu_api_calls();
    if (r->fault) emu_inject_fault(r->fault, r->faults == 1 ? FAULT : LOST, r->faults);
    for (int k = r->from; k < r->to && status == TT_OK; k++) {
        status = tuned_step(r, p, x, y, k);
        if (status != TT_OK && r->fault) {
            const bool reported = (status == TT_ERR_DEVICE || status == TT_ERR_MEMORY) &&
                              names_the_fault(tt_error(ctx));
            if (!reported) fault_failed(r->fault, r->faults, tt_status_name(status), tt_error(ctx));
            if (r->faults > 1) break;
            status = tuned_step(r, p, x, y, k); /* the step after the fault succeeds */
        }
        if (k == r->from) {
            r->first = emu_get_counts();
            emu_reset_counts();
            if (r->refused) emu_refuse_algorithms(r->refused, 15);
        }
    }
    r->later = emu_get_counts();
    if (status == TT_OK && r->state) status = tt_program_save(p, r->state);
    float *w = r->w;
    for (int k = 0; k < ctx->n_params && status == TT_OK; k++) {
        status = tt_param_get(ctx->params[k], w);
        w += tt_param_size(ctx->params[k]);
    }
    r->fault_met = r->fault && emu_api_calls() >= calls + r->fault;
    const bool ok = (r->faults > 1 || status == r->status) && (!r->error || strstr(tt_error(ctx), r->error));
    if (!ok) printf("%s, not %s: %s\n", tt_status_name(status), tt_status_name(r->status), tt_error(ctx));
    CHECK(ok && (status != TT_OK || w == r->w + TUNED_WEIGHTS));
    for (int d = 1; d < (p ? p->settings.group->ranks : 0) && status == TT_OK && r->tune; d++) {
        /* all devices have the same text */
        char *first = tt__tuned_text(p, 0), *other = tt__tuned_text(p, d);
        if (!CHECK(first && other && strcmp(first, other) == 0 && strstr(first, " products")))
            printf("%s\n%s", first, other);
        tt__free(ctx, first);
        tt__free(ctx, other);
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    CHECK(emu_live_objects(left, sizeof left) == 0);
    return ok;
}

static bool same_bits(const tuned_run *a, const tuned_run *b)
{
    return memcmp(a->w, b->w, sizeof a->w) == 0 && memcmp(a->loss, b->loss, sizeof a->loss) == 0;
}

/* Products of about the largest number of rows are timed, and the fastest algorithm makes them, even if it
   sums in another order than the first offered algorithm. Among equally fast algorithms the first offered is
   used. */
TEST(the_fastest_algorithm_is_taken)
{
    static tuned_run off, run[5];
    off.to = TUNED_STEPS;
    off.erf = true;
    run_tuned(&off);
    CHECK(off.first.by_algorithm[1] == off.first.gemms && off.later.by_algorithm[1] == off.later.gemms);
    CHECK(off.first.gemms >= 5);
    for (int k = 0; k < 5; k++) {
        run[k].tune = "on";
        run[k].erf = true;
        run[k].epilogue_us = 5000; /* so that every run uses separate kernels for epilogues */
        run[k].fastest = k;
        run[k].to = TUNED_STEPS;
        run_tuned(&run[k]);
        CHECK(run[k].first.gemms > 20 * off.first.gemms && run[k].later.gemms == off.later.gemms);
        const emu_counts *n = &run[k].later;
        /* products of 130 rows are not timed, so these use the first offered algorithm */
        CHECK(n->by_algorithm[k ? k : 1] == n->gemms - (k > 1 ? off.first.gemms : 0));
        CHECK(k < 2 || n->by_algorithm[1] == off.first.gemms);
        /* only algorithms 2 and 3 sum in another order; timing changes no bit */
        CHECK(same_bits(&run[k], &off) == (k != 2 && k != 3));
        CHECK(fabs(run[k].loss[5] - off.loss[5]) <= 0.02 * off.loss[5]);
    }
    CHECK(off.loss[5] < 0.9 * off.loss[0]);
}

/* GELU, its slope and the sums for a bias are part of a product only where that is faster than a separate
   kernel. Without timing only GELU is part of a product. */
TEST(epilogues_are_taken_where_they_pay)
{
    static tuned_run run[2], off;
    off.to = 1;
    run_tuned(&off);
    CHECK(off.first.gelus > 0 && off.first.gelu_slopes == 0 && off.first.bias_gradients == 0);
    for (int slow = 0; slow < 2; slow++) {
        run[slow].tune = "on";
        run[slow].epilogue_us = slow ? 500 : 0;
        run[slow].to = TUNED_STEPS;
        run_tuned(&run[slow]);
        const emu_counts *n = &run[slow].later;
        CHECK((n->gelus > 0) == !slow && (n->gelu_slopes > 0) == !slow && (n->bias_gradients > 0) == !slow);
    }
    CHECK(run[0].later.gemms == run[1].later.gemms);
    CHECK(fabs(run[0].loss[5] - run[1].loss[5]) <= 0.02 * run[0].loss[5]);
}

/* A run that resumes from a state has the bits of an uninterrupted run, although timing would now choose
   other algorithms, because the resumed run does not time. */
TEST(resumed_runs_keep_their_algorithms)
{
    static tuned_run whole, part, rest, other, without;
    const char *state = test_path(test_folder(), "tuned.safetensors");
    char path[1100];
    snprintf(path, sizeof path, "%s", state);
    whole.tune = part.tune = rest.tune = other.tune = "on";
    whole.fastest = part.fastest = 3;
    rest.fastest = other.fastest = 2;
    whole.epilogue_us = part.epilogue_us = 500;
    whole.to = rest.to = other.to = TUNED_STEPS;
    part.to = rest.from = 2;
    part.state = rest.state = path;
    run_tuned(&whole);
    run_tuned(&other);
    CHECK(!same_bits(&whole, &other)); /* if these bits were equal, the other checks would prove nothing */
    run_tuned(&part);
    run_tuned(&rest);
    memcpy(rest.loss, part.loss, sizeof *rest.loss * (size_t)part.to);
    CHECK(same_bits(&whole, &rest));
    CHECK(rest.first.by_algorithm[3] == rest.first.gemms && rest.first.gelus == 0);
    const long resumed = rest.first.gemms;
    /* The state of the resumed run has the algorithms, too. */
    rest.from = 5;
    run_tuned(&rest);
    CHECK(rest.first.by_algorithm[3] == rest.first.gemms);
    /* A run without `tune` resumes with other algorithms, and logs a message. */
    without.from = 2;
    without.to = 3;
    without.state = path;
    run_tuned(&without);
    CHECK(without.first.by_algorithm[1] == without.first.gemms && without.first.gemms == resumed);
    CHECK(strstr(without.log, "comes from a run with tune, but this run has none"));
    rest.from = 2;
    rest.to = 3;
    run_tuned(&rest); /* resumes from the state of the run without `tune` */
    CHECK(strstr(rest.log, "timed")); /* the run has timed, because the state has no algorithms */
    remove(path);
}

/* The file that `tune` names stores the chosen algorithms. A later program does not time stored products
   again, and adds new products to the file. */
TEST(a_file_keeps_what_was_timed)
{
    static tuned_run first, second, more, again;
    char path[1100];
    long size[3];
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "tuned.txt"));
    remove(path);
    first.tune = second.tune = more.tune = again.tune = path;
    first.to = second.to = again.to = TUNED_STEPS;
    more.to = 2;
    first.fastest = 3;
    second.fastest = more.fastest = again.fastest = 2;
    more.accumulate = true; /* products add to the gradients of earlier micro-batches */
    tuned_run *const runs[] = {&first, &second, &more, &again};
    for (int k = 0; k < 4; k++) {
        run_tuned(runs[k]);
        FILE *f = fopen(path, "rb");
        CHECK(f && fseek(f, 0, SEEK_END) == 0);
        if (k != 2) size[k == 3 ? 2 : k] = f ? ftell(f) : 0;
        if (f) fclose(f);
        if (k == 1) CHECK(size[0] > 1000 && size[0] == size[1]);
    }
    CHECK(size[2] > size[0]);
    /* The bits are equal although the run `more` has added products to the file. */
    CHECK(same_bits(&first, &second) && same_bits(&first, &again));
    CHECK(second.first.by_algorithm[3] == second.first.gemms && strcmp(second.log, "") == 0);
    CHECK(more.first.by_algorithm[2] > 0);
    remove(path);
}

static char *read_text(const char *path, size_t *n)
{
    static char text[1 << 16];
    FILE *f = fopen(path, "rb");
    *n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    text[*n] = 0;
    if (f) fclose(f);
    return text;
}

static void write_text(const char *path, const char *text, size_t n)
{
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(text, 1, n, f) == n);
    if (f) fclose(f);
}

/* Damaged files are refused before anything is timed: files cut off anywhere, of another device, or with
   wrong lines. The error names the file and the line, and the file is unchanged. */
TEST(a_file_that_is_damaged_is_refused)
{
    static const struct { const char *find, *with, *error; tt_status status; } wrong[] = {
        {"tinytrain: the", "tinytrain: a", ", line 1: it is not '", TT_ERR_FORMAT},
        {"version 1", "version 2", ", line 1: it is not '", TT_ERR_FORMAT},
        {"cuBLASLt ", "cuBLASLt 9", ", line 2: it was made on '", TT_ERR_UNSUPPORTED},
        {"multiprocessors", "of another make", ", line 2: it was made on '", TT_ERR_UNSUPPORTED},
        {" 1 0 0 0 ", " 1 2 0 0 ", ": its numbers describe no matrix product", TT_ERR_FORMAT},
        {" 256 256 256 ", " 256 99999256 256 ", ": its numbers describe no matrix product", TT_ERR_FORMAT},
        {" 256 256 256 ", " 256 256  256 ", ": it does not begin with 23 numbers", TT_ERR_FORMAT},
        {" 256 256 256 ", " 256 -256 256 ", ": it does not begin with 23 numbers", TT_ERR_FORMAT},
        {" 256 256 256 ", " 256 99999999999999999999 256 ", ": it does not begin with 23 ", TT_ERR_FORMAT},
        {"0000000000000000\n", "000000000000000\n", ": it ends neither with 'slower' nor", TT_ERR_FORMAT},
        {"0000000000000000\n", "000000000000000x\n", ": it ends neither with 'slower' nor", TT_ERR_FORMAT},
        {"0000000000000000\n", "slow\n", ": it ends neither with 'slower' nor", TT_ERR_FORMAT},
        {"0000000000000000\n", "\n", ": it ends neither with 'slower' nor", TT_ERR_FORMAT},
        {" products\n", " products\n\n", ": there is text after the last line", TT_ERR_FORMAT},
        {" products\n", " product\n", ": it does not begin with 23 numbers", TT_ERR_FORMAT}};
    static tuned_run good, bad;
    char path[1100], named[1200];
    size_t n, now;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "tuned.txt"));
    remove(path);
    good.tune = bad.tune = path;
    good.to = bad.to = 1;
    if (!run_tuned(&good)) return;
    char *whole = strdup(read_text(path, &n)), *text = (char *)malloc(2 * n + 4096);
    if (!CHECK(whole && text && n > 500)) { free(whole); free(text); return; }
    for (int k = 0; k < TEST_COUNT(wrong); k++) {
        char *at = strstr(whole, wrong[k].find);
        if (!CHECK(at != NULL)) { printf("no '%s' in\n%s", wrong[k].find, whole); continue; }
        const int length = sprintf(text, "%.*s%s%s", (int)(at - whole), whole, wrong[k].with,
                                   at + strlen(wrong[k].find));
        write_text(path, text, (size_t)length);
        snprintf(named, sizeof named, "%s'%s", k < 4 ? "tune: " : "", k < 4 ? path : "");
        bad.status = wrong[k].status;
        bad.error = wrong[k].error;
        if (!run_tuned(&bad)) printf("case %d\n", k);
        CHECK(memcmp(read_text(path, &now), text, (size_t)length) == 0 && now == (size_t)length);
        CHECK(bad.first.by_algorithm[1] == 0); /* no product has run */
    }
    /* Writes the last product's line into the file twice. */
    char *end = strrchr(whole, '\n');
    while (end > whole && end[-1] != '\n') end--; /* moves to the beginning of the last line */
    char *line = end - 1;
    while (line > whole && line[-1] != '\n') line--;
    sprintf(text, "%.*s%.*s%s", (int)(end - whole), whole, (int)(end - line), line, end);
    write_text(path, text, strlen(text));
    bad.status = TT_ERR_FORMAT;
    bad.error = ": an earlier line has the same product";
    run_tuned(&bad);
    bad.error = path;
    for (size_t cut = 0; cut < n; cut += cut + 40 < n ? 31 : 1) {
        write_text(path, whole, cut);
        if (!run_tuned(&bad)) { printf("cut off at %zu\n", cut); break; }
    }
    write_text(path, whole, n);
    text[0] = 0;
    bad.status = TT_OK;
    bad.error = NULL;
    run_tuned(&bad);
    CHECK(memcmp(bad.w, good.w, sizeof good.w) == 0);
    /* The folder does not exist. */
    bad.tune = "nowhere/at/all/tuned.txt";
    bad.status = TT_ERR_FILE;
    bad.error = "nowhere/at/all";
    run_tuned(&bad);
    bad.tune = "";
    bad.status = TT_ERR_ARGUMENT;
    bad.error = "tune is '', but must be off, on";
    run_tuned(&bad);
    remove(path);
    free(whole);
    free(text);
}

/* If cuBLASLt does not have an algorithm of a file, or cublasLtMatmul refuses the algorithm, the product uses
   an algorithm that the heuristic offers. */
TEST(tuned_algorithms_that_are_refused_give_way)
{
    static tuned_run off, refused, unknown;
    char path[1100];
    size_t n;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "tuned.txt"));
    remove(path);
    off.to = refused.to = TUNED_STEPS;
    unknown.to = 1;
    run_tuned(&off);
    refused.tune = unknown.tune = path;
    refused.fastest = unknown.fastest = 2;
    refused.refused = 1 << 2;
    run_tuned(&refused);
    CHECK(refused.first.by_algorithm[2] > 0);
    CHECK(refused.later.by_algorithm[2] == 0 && refused.later.by_algorithm[1] > 0);
    for (int k = 0; k < TUNED_STEPS; k++) CHECK(fabs(refused.loss[k] - off.loss[k]) <= 0.02 * off.loss[k]);
    char *text = read_text(path, &n);
    int changed = 0;
    for (char *at; (at = strstr(text, " 0000000000000002 ")) != NULL; changed++) at[16] = 'e';
    CHECK(changed > 3);
    write_text(path, text, n);
    run_tuned(&unknown);
    CHECK(unknown.first.by_algorithm[1] == unknown.first.gemms);
    CHECK(unknown.loss[0] == off.loss[0]);
    remove(path);
}

/* Without memory for timing, products are made as without `tune`, with the same bits, and the logger gets a
   warning. The planned bytes are enough. */
TEST(tuning_without_memory_does_without)
{
    static tuned_run off, on;
    off.to = on.to = 3;
    off.memory = on.memory = (size_t)1 << 20;
    on.tune = "on";
    on.fastest = 2;
    run_tuned(&off);
    run_tuned(&on);
    CHECK(same_bits(&off, &on) && on.first.gemms == off.first.gemms);
    if (!CHECK(strstr(on.log,
                      "products were not timed, because the device has no memory left"))) puts(on.log);
}

/* All ranks use the same algorithm for a product, so that two ranks have the bits of one rank. */
TEST(ranks_share_what_was_timed)
{
    static tuned_run one, two, same;
    one.tune = two.tune = same.tune = "on";
    one.fastest = two.fastest = same.fastest = 3;
    one.accumulate = two.accumulate = same.accumulate = true;
    one.to = two.to = same.to = 3;
    two.device = "cuda*2";
    same.device = "cuda:0,0";
    run_tuned(&one);
    run_tuned(&two);
    run_tuned(&same);
    CHECK(one.later.by_algorithm[3] == one.later.gemms && two.later.by_algorithm[3] == two.later.gemms);
    CHECK(memcmp(one.w, two.w, sizeof one.w) == 0 && memcmp(one.w, same.w, sizeof one.w) == 0);
    CHECK(two.first.gemms < one.first.gemms * 3 / 2); /* the second rank times nothing */
}
#else
TEST(products_that_cublaslt_refuses) { NEEDS_EMULATOR; }
TEST(no_product_of_a_model_needs_that_kernel) { NEEDS_EMULATOR; }
TEST(algorithms_are_chosen_once) { NEEDS_EMULATOR; }

TEST(the_fastest_algorithm_is_taken) { NEEDS_EMULATOR; }
TEST(epilogues_are_taken_where_they_pay) { NEEDS_EMULATOR; }
TEST(resumed_runs_keep_their_algorithms) { NEEDS_EMULATOR; }
TEST(a_file_keeps_what_was_timed) { NEEDS_EMULATOR; }
TEST(a_file_that_is_damaged_is_refused) { NEEDS_EMULATOR; }
TEST(tuned_algorithms_that_are_refused_give_way) { NEEDS_EMULATOR; }
TEST(tuning_without_memory_does_without) { NEEDS_EMULATOR; }
TEST(ranks_share_what_was_timed) { NEEDS_EMULATOR; }
#endif
