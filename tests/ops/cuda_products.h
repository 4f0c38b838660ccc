/* Tests of products on CUDA: epilogues, products of one operand, TF32; tensors that share launches. */
#pragma once

#ifdef TINYTRAIN_CUDA
#ifdef TT_EMULATE
/* Counts the calls of cuBLASLt in a micro-batch of `gelu(second(act(first(gelu(x)))))` and its backward. The
   loss reads a scaled copy, since an operand of a loss is never 16-bit. */
static bool count_products(int act(int), int width, bool biases, const precision_case *precision,
                           emu_counts *got)
{
    static const op_case c = {"products", TT__OP_LINEAR, NULL};
    static const size_set size = {"products", 2, 8, 24, 2, 2, {5, 1, 7}, NULL, false};
    tt_compile_options o = tt_compile_options_default();
    net n;
    net_open(&n, &c, &size, "cuda", AS_PARAM, false, precision->half != TT_F32);
    int x = gelu(V(ROWS, g->d)), first = linear(x, W(width, g->d), biases ? B(width) : 0);
    int loss = loss_of(scale(gelu(linear(act(first), W(g->d, width), biases ? B(g->d) : 0)), 2), false);
    g->train = o.accumulate = true;
    compile_in(&o, "cuda", precision);
    tt_program *p = tt_compile(g->tape, g->nodes[loss].t, &o);
    bool ok = p && set_inputs(p);
    emu_reset_counts();
    ok = report(ok && tt_micro_step(p, NULL) == TT_OK, "%s", tt_error(g->ctx));
    *got = emu_get_counts();
    tt_program_free(p);
    net_close();
    return ok;
}

enum { ANY_NUMBER = -1 };

/* Checks how many products and epilogues run. tunes: products are tuned; a first run writes the timings to a
   file, so that the counted run times nothing. */
static void check_products(bool tunes, int act(int), int width, bool biases, const precision_case *precision,
                           int products, int gelus, int slopes, int bias_gradients)
{
    char path[1100];
    emu_counts got;
    snprintf(path, sizeof path, "%s", test_path(test_folder(), "products.txt"));
    snprintf(where, sizeof where, "width %d, %s biases, %s%s", width, biases ? "with" : "without",
             precision->name, tunes ? ", tuned" : "");
    remove(path);
    if (tunes) tuned = path;
    bool ok = !tunes || count_products(act, width, biases, precision, &got);
    if (ok && count_products(act, width, biases, precision, &got))
        report(got.gemms == products && got.gelus == gelus && got.bias_gradients == bias_gradients &&
                   (slopes == ANY_NUMBER || got.gelu_slopes == slopes),
               "of %ld products, %ld have GELU, %ld its derivative, %ld a bias gradient; expected of %d %d, "
               "%d, %d",
               got.gemms, got.gelus, got.gelu_slopes, got.bias_gradients, products, gelus, slopes,
               bias_gradients);
    remove(path);
    tuned = NULL;
}

static int twice(int x) { return scale(x, 2); }
#endif

/* The epilogues are used where they fit, and only there. GELU by tanh, not by erf, needs rows of a multiple
   of 8 elements. If timing finds an epilogue fastest, as on the emulator, the epilogue also computes GELU's
   derivative and the bias gradient, if the bias has the dtype of the result and no other kernel sums dy. The
   emulator counts the epilogues. The results with epilogues are right, also in micro-batches that add to
   gradients. */
TEST(cuda_epilogues)
{
    for (int k = 0; k < PRECISIONS; k++) {
        const precision_case *precision = &precisions[k];
#ifdef TT_EMULATE
        /* A bias gradient of another dtype has its own kernels, which may also compute GELU's derivative. */
        const bool mixed = strstr(precision->name, "mixed") != NULL;
        check_products(true, gelu_tanh, 24, true, precision, 6, 1, mixed ? ANY_NUMBER : 1, !mixed);
        check_products(true, gelu_tanh, 24, false, precision, 6, 1, 1, 0);
        check_products(true, twice, 24, true, precision, 6, 0, 0, 1);
        check_products(false, gelu_tanh, 24, true, precision, 6, 1, 0, 0);
        /* Width 23 is no multiple of 8, so each of the six products is split into three of at most 5 rows
           (TT__CUDA_LOSS_CHUNK). */
        check_products(false, gelu_tanh, 23, true, precision, 18, 0, 0, 0);
        check_products(false, gelu, 24, true, precision, 6, 0, 0, 0);
#endif
        for (int c = 0; c < CASE_COUNT; c++)
            for (int s = 0; s < SIZES; s++) {
                if (strcmp(sizes[s].name, "octets") != 0 || !tt__match(sizes[s].only, cases[c].name))
                    continue;
                tuned = strncmp(cases[c].name, "linear", 6) == 0 ? "on" : NULL;
                reference_case(&cases[c], &sizes[s], "cuda", precision, AS_INPUT, true);
                reference_case(&cases[c], &sizes[s], "cuda", precision, AS_GATHERED, true);
                gradient_case(c, s, "cuda", precision, AS_PARAM);
                gradient_case(c, s, "cuda", precision, AS_GATHERED);
                tuned = NULL;
            }
    }
}
#else
TEST(cuda_epilogues) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif

#ifdef TINYTRAIN_CUDA
enum { SHARED_LAYERS = 6, SHARED_WIDTH = 40 };

/* Trains a chain of linear layers with biases for two steps. Writes the parameters and returns the number of
   launches of the second update. alone: every instruction has its own launch. */
static long train_chain(const char *device, tt_optimizer_kind kind, const char *precision, int bits,
                        bool alone, float *to)
{
    test_allocator a;
    tt_context_options co = test_options(&a);
#ifdef TT_EMULATE
    emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
    co.seed = 11;
    tt_context *ctx = tt_open(&co);
    tt_tape *t = tt_tape_new(ctx);
    tt_param *params[2 * SHARED_LAYERS];
    int64_t dims[2] = {SHARED_WIDTH, SHARED_WIDTH};
    tt_init normal = {TT_INIT_NORMAL, 0.2f};
    tt_value x = tt_input(t, "x", TT_F32, 5, SHARED_WIDTH), y = tt_input(t, "y", TT_F32, 5, SHARED_WIDTH),
             h = x;
    tt_value no_weights = {0};
    float values[5 * SHARED_WIDTH];
    long launches = 0;
    uint64_t s = 1;
    for (int k = 0; k < 2 * SHARED_LAYERS; k++) {
        char name[16];
        snprintf(name, sizeof name, "layer.%d", k);
        params[k] = tt_param_new(ctx, name, k % 2 ? 1 : 2, dims, normal);
        if (k % 2) h = tt_linear(t, h, params[k - 1], params[k]);
    }
    tt_value loss = tt_mean_squared_error(t, h, y, no_weights);
    for (int k = 0; k < 5 * SHARED_WIDTH; k++) values[k] = (float)(test_random(&s) % 1000) / 500 - 1;
    tt_compile_options o = tt_compile_options_default();
    o.device = device;
    o.precision = precision;
    o.accumulate = true;
    o.optimizer.kind = kind;
    o.optimizer.momentum = 0.9f;
    o.optimizer.nesterov = true;
    o.optimizer.state_bits = bits;
    tt_program *p = tt_compile(t, loss, &o);
    if (CHECK(p != NULL)) {
        for (int k = 0; k < p->built.t->n_code && alone; k++) p->built.t->code[k].with_next = false;
        for (int step = 0; step < 2; step++) {
            CHECK(tt_set(p, x, values, 5) == TT_OK && tt_set(p, y, values, 5) == TT_OK &&
                  tt_micro_step(p, NULL) == TT_OK);
#ifdef TT_EMULATE
            emu_reset_counts();
#endif
            CHECK(tt_update(p, 0.01f, NULL) == TT_OK);
#ifdef TT_EMULATE
            launches = emu_get_counts().launches;
#endif
        }
        for (int k = 0; k < 2 * SHARED_LAYERS; k++)
            CHECK(tt_param_get(params[k], to + k * SHARED_WIDTH * SHARED_WIDTH) == TT_OK);
    }
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return launches;
}

enum { JOINED_D = 64, JOINED_ROWS = 11, JOINED_PARAMS = 8 };

typedef struct joined_case {
    const char *precision, *update;
    int key_heads;  /* heads of k and v; q has 4 heads */
    bool biases, accumulate;
    const char *recompute;
} joined_case;

/* Trains an attention layer, in which q, k and v are products of one operand, for two steps. Writes the
   parameters and returns the number of products of the second step's last forward and backward. alone: every
   product has its own launch. */
static long train_attention(const joined_case *c, bool alone, float *to)
{
    static const char *const names[JOINED_PARAMS] = {"q.w", "q.b", "k.w", "k.b",
                                                     "v.w", "v.b", "in.w", "in.b"};
    static const int32_t starts[4] = {0, 4, 5, JOINED_ROWS};
    const int64_t d = JOINED_D, narrow = d / 4 * c->key_heads, out[4] = {d, narrow, narrow, d};
    const tt_init normal = {TT_INIT_NORMAL, 0.2f};
    const tt_value none = {0};
    test_allocator a;
    tt_context_options co = test_options(&a);
    tt_param *params[JOINED_PARAMS] = {NULL};
    float values[2][JOINED_ROWS * JOINED_D], before[JOINED_D * JOINED_D] = {0};
    long products = 0;
    uint64_t s = 1;
#ifdef TT_EMULATE
    emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
    co.seed = 11;
    tt_context *ctx = tt_open(&co);
    ctx->options.verify = true;
    tt_tape *t = tt_tape_new(ctx);
    const int64_t rows = tt_axis(t, "rows", JOINED_ROWS + 3), seqs = tt_axis(t, "seqs", 3);
    const tt_value x = tt_input(t, "x", TT_F32, rows, d), y = tt_input(t, "y", TT_F32, rows, d);
    const tt_value start = tt_seq_start(t, "starts", seqs);
    for (int k = 0; k < JOINED_PARAMS; k++) {
        const int64_t dims[2] = {out[k / 2], d};
        if (k % 2 == 0 || c->biases) params[k] = tt_param_new(ctx, names[k], k % 2 ? 1 : 2, dims, normal);
    }
    const tt_attention_options attention = tt_attention_options_default(4);
    const tt_value h = tt_linear(t, x, params[6], params[7]), of = tt_gelu(t, h);
    tt_value qkv[3];
    for (int k = 0; k < 3; k++) qkv[k] = tt_linear(t, of, params[2 * k], params[2 * k + 1]);
    const tt_value attended = tt_attention(t, qkv[0], qkv[1], qkv[2], start, &attention);
    const tt_value loss = tt_mean_squared_error(t, tt_add(t, attended, h), y, none);
    for (int k = 0; k < 2 * JOINED_ROWS * JOINED_D; k++)
        values[k / (JOINED_ROWS * JOINED_D)][k % (JOINED_ROWS * JOINED_D)] =
            (float)(test_random(&s) % 1000) / 500 - 1;
    tt_compile_options o = tt_compile_options_default();
    o.device = "cuda";
    o.precision = c->precision;
    o.accumulate = c->accumulate;
    o.update = c->update;
    o.recompute = c->recompute;
    o.loss_scale.init = 16;
    o.optimizer.kind = TT_SGD; /* SGD's updates differ no more than gradients do */
    tt_program *p = tt_compile(t, loss, &o);
    if (!CHECK(p != NULL)) printf("%s\n", tt_error(ctx));
    for (int k = 0; p && k < p->built.t->n_code && alone; k++) p->built.t->code[k].with_next = false;
    if (p) p->poison = true;
    for (int step = 0; step < 2 && p; step++) {
        for (int micro = 0; micro <= c->accumulate; micro++) {
            /* Each micro-batch has fewer rows than the axis' capacity, and the second has still fewer. */
            const int64_t n = micro ? 4 : JOINED_ROWS;
            CHECK(tt_set(p, x, values[0], n) == TT_OK && tt_set(p, y, values[1], n) == TT_OK &&
                  tt_set(p, start, starts, micro ? 2 : 4) == TT_OK);
#ifdef TT_EMULATE
            emu_reset_counts();
#endif
            if (c->accumulate) CHECK(tt_micro_step(p, NULL) == TT_OK);
        }
        if (step == 0) CHECK(tt_param_get(params[0], before) == TT_OK);
        if (c->accumulate) CHECK(tt_update(p, 0.1f, NULL) == TT_OK);
        else if (!CHECK(tt_step(p, 0.1f, NULL) == TT_OK)) printf("%s\n", tt_error(ctx));
#ifdef TT_EMULATE
        products = emu_get_counts().gemms;
#endif
    }
    for (int k = 0; k < JOINED_PARAMS && p; k++)
        if (params[k]) CHECK(tt_param_get(params[k], to + k * JOINED_D * JOINED_D) == TT_OK);
    CHECK(memcmp(before, to, sizeof before) != 0);
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return products;
}

/* Three products of one operand become one, forward and backward, and keep their bits on the emulator. */
TEST(cuda_products_of_one_x)
{
    enum { N = JOINED_PARAMS * JOINED_D * JOINED_D };
    static const joined_case c[] = {
        {"32-true", "end", 4, true, false, "cheap"}, {"bf16-mixed", "end", 4, true, false, "cheap"},
        {"bf16-true", "end", 4, true, false, "none"}, {"16-true", "end", 4, true, false, "cheap"},
        {"bf16-true", "backward", 4, true, false, "cheap"}, {"bf16-true", "end", 4, true, true, "cheap"},
        {"bf16-mixed", "end", 2, true, true, "cheap"}, {"16-mixed", "end", 1, false, false, "none"},
        {"bf16-true", "backward", 2, false, false, "attention"}, {"32-true", "end", 1, false, true, "cheap"}};
    float *one = (float *)calloc(N, sizeof(float)), *all = (float *)calloc(N, sizeof(float));
    for (int k = 0; k < TEST_COUNT(c); k++) {
        memset(one, 0, N * sizeof(float));
        memset(all, 0, N * sizeof(float));
        const long alone = train_attention(&c[k], true, one), together = train_attention(&c[k], false, all);
        bool close = true;
#ifdef TT_EMULATE
        const double max = 0;
#else
        const double max = 0.03;
#endif
        for (int e = 0; e < N; e++) close = close && fabs((double)one[e] - (double)all[e]) <= max;
        CHECK(close);
#ifdef TT_EMULATE
        /* Four linear layers have a forward product and a weight gradient each; three have a gradient of
           x. */
        CHECK(alone == 4 + 4 + 3 && together == alone - 2 - 2);
        if (together != alone - 4) printf("case %d: %ld products, of %ld\n", k, together, alone);
#else
        (void)alone; (void)together;
#endif
    }
    free(one);
    free(all);
}

/* Norms and updates of many parameters share launches, and keep their bits. */
TEST(cuda_tensors_share_launches)
{
    enum { N = 2 * SHARED_LAYERS * SHARED_WIDTH * SHARED_WIDTH };
    static const char *const names[] = {"32-true", "bf16-mixed", "bf16-true", "16-true"};
    float *one = (float *)calloc(N, sizeof(float)), *all = (float *)calloc(N, sizeof(float)),
          *start = (float *)calloc(N, sizeof(float));
    for (int k = 0; k < 16; k++) {
        const int bits = k < 8 ? 32 : 8;
        const tt_optimizer_kind kind = k % 2 == 0 ? TT_ADAMW : bits == 8 ? TT_LION : TT_SGD;
        long alone = train_chain("cuda", kind, names[k % 8 / 2], bits, true, one),
             together = train_chain("cuda", kind, names[k % 8 / 2], bits, false, all);
        CHECK(memcmp(one, all, N * sizeof(float)) == 0 && memcmp(one, start, N * sizeof(float)) != 0);
/* There are 12 parameters, and a launch takes up to 5 together. Each launch of an update has two launches for
   the sum of squares before it. Clipping and next_loss_scale add a launch each. A launch of updates in which
   states have 8 bits takes up to 3 parameters, here matrices with such states and biases without. */
#ifdef TT_EMULATE
        const int scales = k % 8 / 2 == 3;
        CHECK(alone == 12 * 3 + 1 + scales && together == 3 * 2 + (bits == 8 ? 4 : 3) + 1 + scales);
#else
        (void)alone; (void)together;
#endif
    }
    /* Muon's products of matrices are instructions of their own. Adafactor's update is several launches. */
    for (int kind = 0; kind < 2; kind++) {
        train_chain("cpu", kind ? TT_ADAFACTOR : TT_MUON, "32-true", 32, false, one);
        train_chain("cuda", kind ? TT_ADAFACTOR : TT_MUON, "32-true", 32, false, all);
        double apart = 0;
        for (int k = 0; k < N; k++) if (!(fabs(one[k] - all[k]) <= apart)) apart = fabs(one[k] - all[k]);
        report(apart <= 1e-5 && memcmp(one, start, N * sizeof(float)) != 0, "kind %d differs by %g", kind,
               apart);
    }
    free(one);
    free(all);
    free(start);
}
#else
TEST(cuda_products_of_one_x) { SKIP("this build is without TINYTRAIN_CUDA"); }
TEST(cuda_tensors_share_launches) { SKIP("this build is without TINYTRAIN_CUDA"); }
#endif

/* Runs a linear layer (33, 70) -> (33, 50) on a device. Returns the emulator's count of products in TF32. */
static long run_linear_layer(const char *device, const char *matmul, float *y)
{
    enum { ROWS_ = 33, IN_ = 70, OUT_ = 50 };
    test_allocator a;
    tt_context_options co = test_options(&a);
#ifdef TT_EMULATE
    emu_configure(1, (size_t)64 << 20, 1, 3);
#endif
    co.seed = 5;
    tt_context *ctx = tt_open(&co);
    tt_tape *t = tt_tape_new(ctx);
    int64_t dims[2] = {OUT_, IN_};
    tt_init normal = {TT_INIT_NORMAL, 1};
    float x[ROWS_ * IN_];
    uint64_t s = 1;
    long tf32 = 0;
    for (int k = 0; k < ROWS_ * IN_; k++) x[k] = (float)(test_random(&s) % 100003) / 50000 - 1;
    tt_value in = tt_input(t, "x", TT_F32, ROWS_, IN_),
             out = tt_linear(t, in, tt_param_new(ctx, "w", 2, dims, normal), NULL);
    tt_compile_options o = tt_compile_options_default();
    CHECK(strcmp(o.matmul, "fp32") == 0);
    o.train = false;
    o.device = device;
    o.matmul = matmul;
    tt_program *p = tt_compile(t, out, &o);
    if (CHECK(p != NULL))
        CHECK(tt_set(p, in, x, ROWS_) == TT_OK && tt_run(p, NULL) == TT_OK &&
              tt_get(p, out, y, ROWS_ * OUT_) == TT_OK);
#ifdef TT_EMULATE
    tf32 = emu_get_counts().tf32;
#endif
    tt_program_free(p);
    o.matmul = "tf16";
    CHECK(tt_compile(t, out, &o) == NULL);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "matmul 'tf16' is unknown: use fp32, tf32 or fp8");
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return tf32;
}

/* Products of fp32 matrices in TF32 differ from products in fp32 by the rounding of the operands to 11 bits:
   2^-11 of each term, which is at most 4. On the CPU both settings give the same bits. */
TEST(matmul_in_tf32)
{
    enum { N = 33 * 50 };
    static float exact[N], rounded[N], none[N];
    run_linear_layer("cpu", "fp32", exact);
    run_linear_layer("cpu", "tf32", rounded);
    run_linear_layer("cpu", NULL, none);
    CHECK(memcmp(exact, rounded, sizeof exact) == 0 && memcmp(exact, none, sizeof exact) == 0);
#ifdef TINYTRAIN_CUDA
    static float fp32[N];
    int other = 0, far = 0, far_fp32 = 0;
    double squares = 0, all = 0;
    long without = run_linear_layer("cuda", "fp32", fp32), with = run_linear_layer("cuda", "tf32", rounded);
    for (int k = 0; k < N; k++) {
        double error = fabs((double)rounded[k] - exact[k]);
        other += rounded[k] != fp32[k];
        far += !(error <= 70 * 4 * 0x1p-11);
        far_fp32 += !(fabs((double)fp32[k] - exact[k]) <= 70 * 4 * 0x1p-23);
        squares += error * error;
        all += (double)exact[k] * exact[k];
    }
    CHECK(other > N / 2 && far == 0 && far_fp32 == 0);
    /* Each operand is rounded by at most 2^-11 of its size. The mean square of such a rounding is a third of
       `(2^-11)^2`. */
    CHECK(squares > all * 0x1p-26 && squares < all * 0x1p-20);
#ifdef TT_EMULATE
    CHECK(without == 0 && with > 0);
#else
    (void)without; (void)with;
#endif
#endif
}
