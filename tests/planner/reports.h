/* Tests of reports and pictures of a plan. */
#pragma once

/* ------------------------------------------------------------------------------------------------ reports */

/* Tells whether some value of that name is written before the peak and read after the peak. Looks at the
   instructions, not at the planner's boxes. */
static bool lives_at_peak(const tt_program *p, const char *name, int peak)
{
    const tt_tape *t = p->built.t;
    for (int32_t v = 1; v < t->n_values; v++) {
        int first = t->values[v].storage == TT__INPUT ? 0 : INT_MAX,
            last = t->values[v].keep || v == t->values[p->built.root].base ? INT_MAX : -1;
        if (t->values[v].base != v || strcmp(t->values[v].name, name) != 0) continue;
        if (t->values[v].persistent) return true;
        for (int k = t->n_code - 1; k >= 0; k--)
            for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
                int32_t id = j < TT__MAX_IN ? t->code[k].in[j] : t->code[k].out[j - TT__MAX_IN];
                if (!id || t->values[id].base != v) continue;
                if (k > last) last = k;
                if (j >= TT__MAX_IN && k < first) first = k;
            }
        if (first <= peak && peak <= last) return true;
    }
    return false;
}

/* Checks a plan's values: they come largest first, are alive at the peak, and their bytes sum to the plan's
   bytes at the peak. An array for fewer values gets the first values. */
static void check_values(const tt_program *p)
{
    tt_plan plan = tt_program_plan(p);
    size_t at_peak[TT_MEM_CATEGORIES] = {0}, all = 0;
    int n = tt_plan_values(p, NULL, 0);
    tt_plan_value *v = (tt_plan_value *)calloc((size_t)n + 1, sizeof *v),
                  *some = (tt_plan_value *)calloc((size_t)n + 1, sizeof *some);
    CHECK(tt_plan_values(p, v, n) == n && v[n].name == NULL);
    for (int k = 0; k < n; k++) {
        CHECK(v[k].bytes > 0 && (k == 0 || v[k].bytes <= v[k - 1].bytes));
        CHECK(v[k].first >= 0 && v[k].first <= plan.peak_instruction && plan.peak_instruction <= v[k].last &&
              v[k].last < (plan.instructions ? plan.instructions : 1));
        test__check(v[k].category == TT_MEM_WORKSPACE || lives_at_peak(p, v[k].name, plan.peak_instruction),
                    __FILE__, __LINE__, v[k].name);
        at_peak[v[k].category] += v[k].bytes;
        all += v[k].bytes;
    }
    CHECK(memcmp(at_peak, plan.at_peak, sizeof at_peak) == 0);
    CHECK(all == plan.lower_bound_bytes);
    for (int part = 0; part <= n; part += 1 + n / 7) {
        memset(some, 0, sizeof *some * (size_t)(n + 1));
        CHECK(tt_plan_values(p, some, part) == n && memcmp(some, v, sizeof *v * (size_t)part) == 0 &&
              some[part].name == NULL);
    }
    free(v);
    free(some);
}

/* Reads the height of each layer of the picture at `points` places. Heights count from the picture's bottom,
   in the picture's unit. The heights of an absent layer are -1. Returns the arena's height. */
static int read_picture(const char *svg, int points, int *heights)
{
    static const char *const layers[] = {"parameters", "optimizer",   "gradients",
                                         "inputs",     "activations", "workspace"};
    const char *dashed = strstr(svg, "stroke-dasharray='60 40' d='M0 ");
    for (int c = 0; c < 6; c++) {
        char title[64];
        int *to = heights + c * points, x = 0, height = 0;
        snprintf(title, sizeof title, "'><title>%s</title></path>", layers[c]);
        const char *end = strstr(svg, title), *at = end;
        for (int k = 0; k < points; k++) to[k] = -1;
        if (!end) continue;
        while (at > svg && *at != 'M') at--;
        at += strlen("M0 0");
        for (int k = 0; k < points; k++) { /* follows the path: up or down at x, then right */
            while ((*at == 'v' || *at == 'h') &&
                   (int)((int64_t)6000 * k / points) >= x + (*at == 'h' ? atoi(at + 1) : 0)) {
                if (*at == 'v') height += atoi(at + 1);
                else x += atoi(at + 1);
                at += 1 + strspn(at + 1, "-0123456789");
            }
            to[k] = height;
        }
        CHECK(strncmp(at, "H6000V0z'>", 10) == 0);
    }
    return dashed ? atoi(dashed + strlen("stroke-dasharray='60 40' d='M0 ")) : -1;
}

/* Compares layers, arena and peak of the picture with sums over the program's storages. */
static void check_picture(const tt_program *p, const char *svg)
{
    static const tt_category layers[] = {TT_MEM_PARAMETERS, TT_MEM_OPTIMIZER,   TT_MEM_GRADIENTS,
                                         TT_MEM_INPUTS,     TT_MEM_ACTIVATIONS, TT_MEM_WORKSPACE};
    tt_plan plan = tt_program_plan(p);
    int n = plan.instructions, points = n < 600 ? n : 600, highest = 0;
    int *heights = (int *)malloc(sizeof(int) * 6 * (size_t)points);
    int arena = read_picture(svg, points, heights);
    double unit = (double)plan.bytes / arena, drawn[6] = {0}, summed[6] = {0};
    CHECK(arena > 2000);
    for (int k = 0; k < points; k++) {
        double from_below = 0;
        int below = 0;
        for (int c = 0; c < 6; c++) {
            double bytes = 0;
            int height = heights[c * points + k] >= 0 ? heights[c * points + k] : below;
            if (layers[c] == TT_MEM_WORKSPACE) bytes = (double)p->settings.kind->resident;
            for (int32_t v = 1; v < p->built.t->n_values; v++)
                if (p->built.t->values[v].persistent && p->built.t->values[v].base == v &&
                    p->built.t->values[v].space == TT__DEVICE && tt__category_of(p->built.t, v) == layers[c])
                    bytes += (double)tt__arena_bytes(p->built.t, &p->built.t->values[v]);
            for (int b = 0; b < p->built.n_boxes; b++)
                if (p->built.box[b].merged == b && p->built.box[b].space == TT__DEVICE &&
                    p->built.box[b].first <= k && k <= p->built.box[b].last &&
                    tt__category_of(p->built.t, p->built.box[b].value) == layers[c])
                    bytes += (double)p->built.box[b].bytes;
            from_below += bytes;
            /* both the height and the unit are rounded */
            if (points == n) CHECK(fabs(height - from_below / unit) <= 1.5);
            drawn[c] += height - below;
            summed[c] += bytes;
            below = height;
        }
        if (below > highest) highest = below;
    }
    if (points == n)
        for (int c = 0; c < 6; c++)
            CHECK(fabs(drawn[c] - summed[c] / unit) <= 2.0 * points &&
                  (drawn[c] > 0) >= (summed[c] / unit > points));
    CHECK(fabs(highest - (double)plan.lower_bound_bytes / unit) <= 1.5);
    free(heights);
}

typedef size_t (*report)(const tt_program *p, char *to, size_t capacity);

/* Writes a report to buffers of many sizes. Checks that each buffer gets the beginning of the whole report
   and a 0 byte, and that nothing is written beyond a buffer. Returns the whole report, which the caller
   frees. */
static char *check_report(const tt_program *p, report write, size_t every)
{
    size_t length = write(p, NULL, 0);
    char *all = (char *)malloc(length + 1), *part = (char *)malloc(length + 8);
    CHECK(length > 0 && write(p, all, length + 1) == length && strlen(all) == length);
    for (size_t capacity = 0; capacity <= length + 3;
         capacity += capacity < 400 || capacity + 50 > length ? 1 : every) {
        memset(part, '#', length + 8);
        CHECK(write(p, part, capacity) == length && part[capacity] == '#');
        if (capacity)
            CHECK(strncmp(part, all, capacity - 1) == 0 &&
                  strlen(part) == (capacity - 1 < length ? capacity - 1 : length));
    }
    free(part);
    return all;
}

TEST(reports)
{
    static const net_options with_all = {true, true};
    for (uint64_t seed = 0; seed < 12; seed++) {
        test_allocator a;
        net n;
        tt_context *ctx = test_open(&a);
        tt_compile_options c = tt_compile_options_default();
        c.device = seed % 2 ? "cuda" : "cpu";
        c.precision = precisions[seed % 3].name;
        c.accumulate = seed % 5 == 4;
        c.recompute = seed % 4 < 2 ? "blocks" : "cheap";
        c.offload = seed % 3 ? offloads[seed % TEST_COUNT(offloads)] : NULL;
        c.train = seed % 6 != 5;
        REQUIRE(random_net(ctx, seed, with_all, &n));
        tt_name(n.t, n.x, "<x> & \"\x80\"");
        tt_program *p = tt_compile(n.t, n.loss, &c);
        if (!p) {
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "nothing to train");
            tt_tape_free(n.t);
            TEST_CLOSE(ctx, &a);
            continue;
        }
        long live = a.live;
        check_values(p);
        char *text = check_report(p, tt_plan_text, 50), *svg = check_report(p, tt_plan_svg, 500), line[64];
        snprintf(line, sizeof line, "memory plan for %s: %.1f MB (", c.device,
                 (double)tt_program_plan(p).bytes / 1e6);
        CHECK(strncmp(text, line, strlen(line)) == 0 && strstr(text, "largest:"));
        const bool copies = tt_program_plan(p).transfer_bytes > 0;
        /* a model without blocks offloads no activations */
        const bool moves = c.offload && strcmp(c.offload, "activations") != 0;
        CHECK(copies == moves && copies == (strstr(text, "on the host: ") != NULL));
        CHECK(copies == (strstr(svg, " copied per step") != NULL));
        check_picture(p, svg);
        CHECK(strncmp(svg, "<svg ", 5) == 0 && strstr(svg, "</svg>\n") && !strstr(svg, "<x>") &&
              !strchr(svg, '\x80'));
        CHECK(a.live == live);
        free(text);
        free(svg);
        tt_program_free(p);
        tt_tape_free(n.t);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(reports_of_a_deep_network)
{
    static const shape vit = {"ViT", 24, 64, 4, 256, 2, 50, 10, true};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt_value logits, loss = encoder(t, &vit, &logits);
    tt_compile_options c = tt_compile_options_default();
    c.recompute = "none";
    tt_program *p = tt_compile(t, loss, &c);
    REQUIRE(p != NULL);
    check_values(p);
    char *text = check_report(p, tt_plan_text, 500), *svg = check_report(p, tt_plan_svg, 5000);
    CHECK(tt_program_plan(p).instructions > 600);
    check_picture(p, svg);
    CHECK(strlen(svg) < 60000 && strlen(text) < 2048);
    CHECK(strstr(text, "24 x layer.*.up.weight (parameters)\n") &&
          strstr(text, "24 x m(layer.*.up.weight) (optimizer)\n"));
    /* these values are the operands of GELU; the operand of the 24th layer has fewer rows */
    CHECK(strstr(text, "23 x linear.* (activations)\n"));
    free(text);
    free(svg);

    /* without memory the text is shorter, and the picture is absent */
    size_t length = tt_plan_text(p, NULL, 0);
    a.fail_at = a.calls + 1;
    CHECK(tt_plan_text(p, NULL, 0) < length && a.failed);
    a.fail_at = a.calls + 1;
    CHECK(tt_plan_svg(p, NULL, 0) == 0);
    CHECK_ERROR(ctx, TT_ERR_MEMORY, "out of memory");
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

TEST(names_of_what_works_in_place) /* a storage is named after its value at the peak */
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_compile_options c = tt_compile_options_default();
    tt_plan_value v[8];
    int found = 0;
    c.train = false;
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, 640, 48), r = tt_relu(t, x), h = tt_tanh(t, r),
             large = tt_linear(t, h, matrix(ctx, "w", 480, 48), NULL);
    tt_value small = tt_slice(t, large, 7, 48), end = tt_gelu(t, tt_scale(t, small, 2));
    tt_name(t, r, "relu");
    tt_name(t, h, "tanh");
    tt_name(t, large, "large");
    tt_program *p = tt_compile(t, end, &c);
    REQUIRE(p != NULL);
    check_values(p);
    int n = tt_plan_values(p, v, 8);
    REQUIRE(n <= 8 && strcmp(tt_program_plan(p).peak_name, "linear large") == 0);
    for (int k = 0; k < n; k++) {
        CHECK(strcmp(v[k].name, "x") != 0 && strcmp(v[k].name, "relu") != 0);
        found += strcmp(v[k].name, "tanh") == 0 || strcmp(v[k].name, "w") == 0 ||
                 (strcmp(v[k].name, "large") == 0 && k == 0);
    }
    CHECK(found == 3);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}
