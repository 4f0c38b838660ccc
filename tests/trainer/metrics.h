/* Tests of the metrics that tt_fit writes, and of their pictures. */
#pragma once

/* Returns field `column` (from 0) of a line as text that is valid until the next call. */
static const char *field_of(const char *line, int column)
{
    static char text[64];
    for (; column > 0; column--) line = strchr(line, ',') + 1;
    snprintf(text, sizeof text, "%.*s", (int)strcspn(line, ",\n"), line);
    return text;
}

TEST(fit_writes_metrics)
{
    for (int scaled = 0; scaled < 2; scaled++) {
        setup s = small();
        rank_group w, v;
        fitting f;
        bool finished;
        char folder[1024], path[1200];
        size_t n;
        int lines = 0, skipped = 0, steps = 0;
        memset(&f, 0, sizeof f);
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
        snprintf(path, sizeof path, "%s/metrics.csv", folder);
        if (scaled) s.precision = "16-mixed", s.loss_scale.init = 0x1p40f; /* the first steps overflow */
        if (!open_world(&w, &s) || !open_world(&v, &s)) return;
        f.stop_at = 2;
        CHECK(fit(&w, folder, false, &f, &finished) == TT_OK && !finished);
        char *text = test_read(path, &n);
        REQUIRE(text && strncmp(text, METRICS ",seconds,tokens_per_second\n", sizeof METRICS + 26) == 0);
        /* Appends two steps that the state lacks, as after a kill between the writes of state and metrics. */
        FILE *more = fopen(path, "a");
        CHECK(more && fputs(strchr(text, '\n') + 1, more) >= 0 && fclose(more) == 0);
        free(text);
        CHECK(fit(&v, folder, true, &f, &finished) == TT_OK && finished && f.steps == 21);
        text = test_read(path, &n);
        REQUIRE(text != NULL);
        for (const char *line = strchr(text, '\n') + 1; *line; line = strchr(line, '\n') + 1, lines++) {
            bool validation = strcmp(field_of(line, 2), "validation") == 0;
            CHECK(atoi(field_of(line, 1)) == lines / 8 + 1 && validation == (lines % 8 == 7));
            CHECK(atof(field_of(line, 3)) > 0 && atof(field_of(line, 4)) >= 0 &&
                  atof(field_of(line, 4)) <= 1);
            CHECK(!*field_of(line, 5) == !validation && atof(field_of(line, 5)) <= 1);
            CHECK((size_t)atoll(field_of(line, 10)) == tt_program_plan(v.r->train).bytes);
            CHECK(atof(field_of(line, 11)) > 0 && atof(field_of(line, 12)) > 0);
            for (int k = 6; k < 10; k++) CHECK(!*field_of(line, k) == validation);
            if (validation) continue;
            CHECK_NEAR(atof(field_of(line, 6)), tt_schedule_lr(&s.schedule, steps), 1e-9);
            if (atoi(field_of(line, 9)) == skipped) {
                CHECK(atof(field_of(line, 7)) > 0);
                steps++;
            } else {
                CHECK(atof(field_of(line, 7)) == 0);
                skipped++;
            }
            CHECK(atoi(field_of(line, 9)) == skipped && atoi(field_of(line, 0)) == steps);
            CHECK((float)atof(field_of(line, 8)) == (scaled ? ldexpf(1, 40 - skipped) : 1));
        }
        CHECK(lines == 24 && steps + skipped == 21 && (skipped > 2) == scaled &&
              steps == tt_trainer_steps(v.r));
        free(text);
        close_world(&w);
        close_world(&v);
    }
}

TEST(fit_refuses_metrics_with_other_columns)
{
    static const char old[] =
        "step,epoch,split,loss,accuracy,lr,words_per_second\n1,1,train,0.7,0.5,0.001,5000\n";
    setup s = small();
    rank_group w, v;
    fitting f;
    bool finished;
    char folder[1024], path[1200], heading[TT__FIT_HEADING];
    int lines;
    tt_trainer images;
    tt__fit_run of_images;
    memset(&f, 0, sizeof f);
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    snprintf(path, sizeof path, "%s/metrics.csv", folder);
    f.stop_at = 3;
    if (!open_world(&w, &s) || !open_world(&v, &s)) return;
    CHECK(fit(&w, folder, false, &f, &finished) == TT_OK && !finished);
    test_write(path, old, sizeof old - 1);
    CHECK(fit(&v, folder, true, &f, &finished) == TT_ERR_FORMAT && f.steps == 3);
    CHECK_ERROR(v.ctx, TT_ERR_FORMAT,
                "metrics.csv' has other columns than this run, which writes step,epoch,");
    CHECK_ERROR(v.ctx, TT_ERR_FORMAT, ",tokens_per_second: move the file away");
    static const char *const others[] = {
        "epoch,split,loss\n", "", "\n", "step,epoch,split,loss,loss\n", "step,epoch,split,loss,\n",
        "step,epoch,split,loss,a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z,A,B,C,D,E\n"};
    for (int k = 0; k < TEST_COUNT(others); k++) {
        test_write(path, others[k], strlen(others[k]));
        CHECK(fit(&v, folder, true, &f, &finished) == TT_ERR_FORMAT && f.steps == 3);
    }
    remove(path);
    CHECK(fit(&v, folder, true, &f, &finished) == TT_OK && finished && f.steps == 21);
    free(metrics_of(folder, &lines));
    CHECK(lines == 1 + 18 + 3);
    memset(&images, 0, sizeof images);
    memset(&of_images, 0, sizeof of_images);
    of_images.r = &images;
    images.model.metrics[0] = tt_accuracy();
    images.model.metrics[1] = tt_f1_macro();
    of_images.n_metrics = 2;
    of_images.unit = "images";
    CHECK(tt__fit_heading(&of_images, heading) == strlen(heading) &&
          strcmp(heading, METRICS ",seconds,images_per_second\n") == 0);
    close_world(&w);
    close_world(&v);
}

/* A run goes on with the metrics.csv of an older version, which lacks columns or has them in another order:
   earlier lines keep their values, and have empty fields for the columns that the file lacks. */
TEST(fit_goes_on_with_metrics_that_lack_columns)
{
    setup s = small();
    rank_group w, v;
    fitting f;
    bool finished;
    char folder[1024], path[1200], old[4096] = "step,epoch,split,accuracy,loss,tokens_per_second,lr\n";
    int lines;
    size_t n;
    memset(&f, 0, sizeof f);
    snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "run"));
    snprintf(path, sizeof path, "%s/metrics.csv", folder);
    f.stop_at = 10;
    if (!open_world(&w, &s) || !open_world(&v, &s)) return;
    CHECK(fit(&w, folder, false, &f, &finished) == TT_OK && !finished);
    char *text = test_read(path, &n), *line = text ? strchr(text, '\n') + 1 : NULL, first[200] = "";
    for (int k = 0; line && *line; line = strchr(line, '\n') + 1, k++) {
        char step[16], epoch[16], split[16], loss[32], accuracy[32], lr[32];
        const char *rest = line;
        char *const to[] = {step, epoch, split, loss, accuracy, NULL, lr};
        for (int c = 0; c < 7; c++) { /* c = 5 is f1_macro */
            const int length = (int)strcspn(rest, ",");
            if (to[c]) sprintf(to[c], "%.*s", length, rest);
            rest += length + 1;
        }
        if (!k) snprintf(first, sizeof first, "\n%s,%s,%s,%s,%s,,%s,,,,,,777\n", step, epoch, split, loss,
                         accuracy, lr);
        sprintf(old + strlen(old), "%s,%s,%s,%s,%s,777,%s\n", step, epoch, split, accuracy, loss, lr);
    }
    free(text);
    strcat(old, "11,2,train,0.5\n"); /* a line that breaks off */
    test_write(path, old, strlen(old));
    test_log log;
    memset(&log, 0, sizeof log);
    v.ctx->options.logger.log = test__keep_log;
    v.ctx->options.logger.user = &log;
    CHECK(fit(&v, folder, true, &f, &finished) == TT_OK && finished && f.steps == 21);
    CHECK(log.warnings == 1 && strstr(log.text, "' has no column 'seconds', which this run writes: the "
                                      "earlier lines have an empty field there"));
    text = test_read(path, &n);
    CHECK(text && strncmp(text, METRICS ",seconds,", sizeof METRICS + 8) == 0 && strstr(text, first) &&
          strstr(text, "\n7,1,validation,") && strstr(text, "\n21,3,validation,"));
    free(text);
    free(metrics_of(folder, &lines));
    CHECK(lines == 1 + 21 + 3);
    close_world(&w);
    close_world(&v);
}

/* Returns whether the elements open and close in order and no number is NaN or infinite. */
static bool is_drawing(const char *svg)
{
    char open[16][16];
    int depth = 0;
    if (strstr(svg, "nan") || strstr(svg, "inf") || strncmp(svg, "<svg ", 5) != 0) return false;
    for (const char *at = svg; (at = strchr(at, '<')) != NULL;) {
        const char *end = strchr(at, '>');
        size_t n = strcspn(at + 1, " >");
        if (!end || n > 15) return false;
        if (at[1] == '/') {
            if (--depth < 0 || strlen(open[depth]) != n - 1 || strncmp(open[depth], at + 2, n - 1) != 0)
                return false;
        } else if (end[-1] != '/') {
            if (depth == 16) return false;
            snprintf(open[depth++], 16, "%.*s", (int)n, at + 1);
        }
        at = end;
    }
    return depth == 0;
}

/* Draws the run f. The caller frees the picture. */
static char *drawn(const tt__fit_run *f)
{
    tt__text_buffer text = {NULL, 0, 0};
    tt__fit_draw(&text, f);
    text.capacity = text.length + 1;
    text.to = (char *)malloc(text.capacity);
    text.length = 0;
    tt__fit_draw(&text, f);
    CHECK(text.length + 1 == text.capacity && is_drawing(text.to));
    for (const char *at = strstr(text.to, "scale("); (at = strpbrk(at, "MLHVhv<")) != NULL; at++) {
        if (*at == '<' || !strchr("-0123456789", at[1])) continue;
        char *next;
        long x = strtol(at + 1, &next, 10), y = *next == ' ' ? strtol(next, NULL, 10) : 0;
        CHECK(x >= -2320 && x <= 6900 && y >= -2320 && y <= 2 * 2320); /* points are near their diagram */
    }
    return text.to;
}

static void add_point(tt__fit_run *f, int64_t step, int64_t epoch, bool validation, double loss,
                      double accuracy,
                      double lr)
{
    tt__fit_point *p = &f->point[f->points++];
    p->step = step, p->epoch = epoch, p->validation = validation;
    p->value[TT__FIT_LOSS] = loss, p->value[TT__FIT_METRIC] = accuracy, p->value[TT__FIT_LR] = lr;
}

TEST(pictures_of_a_training)
{
    enum { STEPS = 100000 };
    static const char *const ticks[] = {"0",    "0.2", "0.4", "0.6", "0.8", "1", "0.02",
                                        "0.04", "1",   "2",   "3",   "4",   NULL};
    char label[32];
    tt__fit_run f;
    memset(&f, 0, sizeof f);
    f.metric = tt_accuracy();
    f.point = (tt__fit_point *)calloc(STEPS + 1000, sizeof *f.point);

    free(drawn(&f)); /* a picture without points */
    for (int k = 1; k <= 4; k++) add_point(&f, k, 1, false, 1, 0.25, 0.01 * k);
    add_point(&f, 4, 1, true, 0.5, 0.75, 0);
    char *svg = drawn(&f);
    for (int k = 0; ticks[k]; k++) {
        snprintf(label, sizeof label, ">%s</text>", ticks[k]);
        if (!CHECK(strstr(svg, label) != NULL)) printf("  no tick %s\n", ticks[k]);
    }
    /* In pixels, 4 steps are 690 wide, a loss of 1 is 232 high, an accuracy of 0.8 is 124 high, and a
       learning rate of 0.04 is 72 high. The numbers below are tenths of pixels. */
    CHECK(strstr(svg, "d='M1725 2320h0L3450 2320L5175 2320L6900 2320'") &&
          strstr(svg, "stroke-width='65' d='M6900 1160h0'"));
    CHECK(strstr(svg, "d='M1725 388h0L3450 388L5175 388L6900 388'") &&
          strstr(svg, "stroke-width='65' d='M6900 1163h0'"));
    CHECK(strstr(svg, "d='M1725 180h0L3450 360L5175 540L6900 720'") && strstr(svg, ">Loss</text>") &&
          strstr(svg, ">Accuracy</text>") && strstr(svg, ">Learning rate</text>"));
    CHECK(strstr(svg, ">step</text>") && strstr(svg, ">epoch</text>") && strstr(svg, ">validation</text>") &&
          strstr(svg, ">training, running mean</text>"));
    free(svg);

    /* Draws one step alone; losses that are constant, huge, tiny, 0, far apart, NaN, with a spike, negative,
       or huge with alternating signs; and steps whose numbers are near 2^63 or decrease. */
    for (int k = 0; k < 12; k++) {
        static const double losses[12] = {0.7, 2.302585, 3e38, 1e-44, 0, 1e-9, NAN, 0.7, -1, 3e38, 1e5, 0.7};
        f.points = 0;
        for (int step = 1; step <= (k ? 30 : 1); step++) {
            double factor = k == 5 ? pow(2, step) : k == 7 && step == 9 ? 1e38 : k == 9 && step % 2 ? -1 : 1;
            int64_t at = k == 10 ? step * (INT64_MAX / 64) : k == 11 ? 30 - step : step;
            double loss = losses[k] * factor, accuracy = k == 9 ? 1e38 : 1;
            add_point(&f, at, (step + 9) / 10, false, loss, accuracy, k == 4 ? 0 : 1e-3);
            if (k && step % 10 == 0) add_point(&f, at, step / 10, true, loss, -accuracy, 0);
        }
        svg = drawn(&f);
        CHECK((strstr(svg, "(logarithmic)") != NULL) == (k == 5 || k == 7));
        free(svg);
    }

    f.points = 0; /* many steps, and an epoch every 200 */
    uint64_t random = 5;
    for (int step = 1; step <= STEPS; step++) {
        double loss = 0.2 + exp(-step / 20000.0) + (test_random(&random) % 1000) / 2000.0;
        add_point(&f, step, (step + 199) / 200, false, loss, 1 - loss / 2, 1e-3 * step / STEPS);
        if (step % 200 == 0) add_point(&f, step, step / 200, true, loss, 1 - loss / 2, 0);
    }
    svg = drawn(&f);
    CHECK(strlen(svg) < 110000 && strstr(svg, ">100000</text>") && strstr(svg, ">500</text>"));
    free(svg);
    free(f.point);
}

TEST(lines_of_metrics)
{
    static const struct { const char *line; bool good; double loss; } lines[] = {
                 {"7,2,train,0.5,0.75,0.001,1,1,0,9,0.1,5\n", true, 0.5},
                 {"7,2,validation,0.25,0.75,,,,,9,0.1,5\n", true, 0.25},
                 {"7,2,train,1e300,0.75,0.001,\n", true, NAN},
                 {"7,2,train,nan,0.75,0.001,\n", true, NAN},
                 {"7,2,train,-inf,0.75,0.001,\n", true, NAN},
                 {METRICS ",seconds,tokens_per_second\n", false, 0},
                 {"7,2,train,0.5,0.75,0.001\n", false, 0},
                 {"\n", false, 0},
                 {"7,0,train,0.5,0.75,0.001,\n", false, 0},
                 {"-7,1,train,0.5,0.75,0.001,\n", false, 0},
                 {"7,1,train,0.500000000000000000000000000000000000000000000,0.75,0.001,\n", false, 0}};
    for (int k = 0; k < TEST_COUNT(lines); k++) {
        tt__fit_point p;
        tt__fit_run f;
        memset(&f, 0, sizeof f);
        f.n_metrics = 1;
        CHECK(tt__fit_read_line(&f, lines[k].line, strlen(lines[k].line), &p) == lines[k].good);
        if (!lines[k].good) continue;
        CHECK(p.step == 7 && p.epoch == 2 && p.validation == (k == 1) && p.value[TT__FIT_METRIC] == 0.75 &&
              p.value[TT__FIT_LR] == (k == 1 ? 0 : 0.001));
        CHECK(isnan(lines[k].loss) ? isnan(p.value[TT__FIT_LOSS]) : p.value[TT__FIT_LOSS] == lines[k].loss);
    }
}
