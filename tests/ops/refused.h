/* Tests of errors: wrong operands, and batches with bad indices or with numbers that are not finite. */
#pragma once

/* A kernel that maps rows refuses operands of other widths than its result. No model can record such
   operands, so the test makes the launch itself. */
TEST(rows_of_other_widths_are_not_mapped)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tape *t = tt_tape_new(ctx);
    tt__instr i = tt__new_instr(TT__OP_ADD);
    tt__launch l;
    float x[8] = {0};
    memset(&l, 0, sizeof l);
    l.tape = t;
    l.instr = &i;
    for (int k = 0; k < 2; k++) l.in[k].data = x, l.in[k].rows = 1, l.in[k].cols = l.in[k].ld = 8;
    l.out[0] = l.in[0];
    CHECK(tt__same_widths(&l, 0, 2) == TT_OK);
    l.in[1].cols = 4;
    CHECK(tt__same_widths(&l, 0, 1) == TT_OK && tt__same_widths(&l, 0, 2) == TT_ERR_INTERNAL);
    CHECK_ERROR(ctx, TT_ERR_INTERNAL, "add: operand 1 has 4 columns, but the result has 8");
    l.in[1].data = NULL; /* the operand is absent */
    CHECK(tt__same_widths(&l, 0, 2) == TT_OK);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

/* ---------------------------------------------------------------------------------------------- bad input */

static tt_value rotary_of(tt_tape *t, tt_value x, tt_value positions, int heads, int size, float base,
                          float factor)
{
    tt_rotary_options o = tt_rotary_options_default(heads);
    o.size = size;
    o.base = base;
    o.scaling = TT_ROTARY_LINEAR;
    o.factor = factor;
    return tt_rotary(t, x, positions, &o);
}

/* X(name, status, two parts that the message must have, call). x (rows<=8, 6), y (rows<=8, 5), z (4, 6) f32;
   i (rows<=8, 1), pairs (rows<=8, 2), few (4, 1) i32; s: sequence starts; w (5, 6), w7 (5, 7), v (6), v5 (5)
   parameters. */
#define REFUSED(X) \
    X(linear_width, TT_ERR_SHAPE, "linear", "w7", tt_linear(t, x, w7, NULL)) \
    X(linear_bias, TT_ERR_SHAPE, "linear", "'v'", tt_linear(t, x, w, v)) \
    X(linear_dtype, TT_ERR_SHAPE, "linear", "'i'", tt_linear(t, i, w, NULL)) \
    X(linear_no_weight, TT_ERR_ARGUMENT, "linear", "NULL", tt_linear(t, x, NULL, NULL)) \
    X(linear_no_value, TT_ERR_ARGUMENT, "linear", "operand 0", tt_linear(t, tt__handle(t, 999), w, NULL)) \
    X(matmul_width, TT_ERR_SHAPE, "matmul", "'y'", tt_matmul(t, x, y, NULL)) \
    X(matmul_untransposed, TT_ERR_SHAPE, "matmul", "(6, cols)", tt_matmul(t, x, z, &plain)) \
    X(matmul_dtype, TT_ERR_SHAPE, "matmul", "'pairs'", tt_matmul(t, x, pairs, NULL)) \
    X(matmul_beyond, TT_ERR_ARGUMENT, "matmul", "beyond is -inf", tt_matmul(t, x, x, &endless)) \
    X(embedding_offset, TT_ERR_ARGUMENT, "embedding", "offset is 5, but must be 0 to 4", \
        tt_embedding_offset(t, i, w, 5)) \
    X(embedding_dtype, TT_ERR_SHAPE, "embedding", "'x'", tt_embedding(t, x, w)) \
    X(embedding_width, TT_ERR_SHAPE, "embedding", "'pairs'", tt_embedding(t, pairs, w)) \
    X(embedding_part, TT_ERR_SHAPE, "embedding", "'pairs'", tt_embedding(t, tt_slice(t, pairs, 1, 1), w)) \
    X(layernorm_weight, TT_ERR_SHAPE, "layernorm", "'v5'", tt_layernorm(t, x, v5, NULL, 1e-5f)) \
    X(layernorm_bias, TT_ERR_SHAPE, "layernorm", "'v5'", tt_layernorm(t, x, v, v5, 1e-5f)) \
    X(layernorm_dtype, TT_ERR_SHAPE, "layernorm", "'i'", tt_layernorm(t, i, v, v, 1e-5f)) \
    X(layernorm_eps, TT_ERR_ARGUMENT, "layernorm", "eps", tt_layernorm(t, x, v, v, -1)) \
    X(layernorm_eps_nan, TT_ERR_ARGUMENT, "layernorm", "eps", tt_layernorm(t, x, v, v, NAN)) \
    X(rmsnorm_heads, TT_ERR_SHAPE, "rmsnorm", "'v5' f32 (1, 5), expected (1, 6)", \
      tt_rmsnorm(t, x, v5, 1e-5f)) \
    X(rmsnorm_offset, TT_ERR_ARGUMENT, "rmsnorm", "offset of the weights is inf, but must be finite", \
      tt_rmsnorm_offset(t, x, v, INFINITY, 1e-5f)) \
    X(gelu_dtype, TT_ERR_SHAPE, "gelu", "'i'", tt_gelu(t, i)) \
    X(gelu_tanh_dtype, TT_ERR_SHAPE, "gelu_tanh", "'i'", tt_gelu_tanh(t, i)) \
    X(relu_dtype, TT_ERR_SHAPE, "relu", "'i'", tt_relu(t, i)) \
    X(tanh_dtype, TT_ERR_SHAPE, "tanh", "'i'", tt_tanh(t, i)) \
    X(sigmoid_dtype, TT_ERR_SHAPE, "sigmoid", "'i'", tt_sigmoid(t, i)) \
    X(softmax_dtype, TT_ERR_SHAPE, "softmax", "'i'", tt_softmax(t, i)) \
    X(normalize_dtype, TT_ERR_SHAPE, "normalize", "'i'", tt_normalize(t, i, 1e-12f)) \
    X(normalize_eps, TT_ERR_ARGUMENT, "normalize", "eps is 0, but must be above 0", tt_normalize(t, x, 0)) \
    X(normalize_eps_nan, TT_ERR_ARGUMENT, "normalize", "must be above 0", tt_normalize(t, x, NAN)) \
    X(sigmoid_targets_shape, TT_ERR_SHAPE, "sigmoid_cross_entropy", "'y'", \
      tt_sigmoid_cross_entropy(t, x, y, NULL)) \
    X(sigmoid_weights, TT_ERR_SHAPE, "sigmoid_cross_entropy", "(rows<=8, 1)", \
      tt_sigmoid_cross_entropy(t, x, x, &by_label)) \
    X(sigmoid_positive_weights, TT_ERR_SHAPE, "sigmoid_cross_entropy", "(1, 6)", \
      tt_sigmoid_cross_entropy(t, x, x, &by_row)) \
    X(loss_total_of_value, TT_ERR_ARGUMENT, "loss_total", "'x' is not the result of a loss", \
      (tt_loss_total(t, x, one), tt__handle(t, 0))) \
    X(loss_total_shape, TT_ERR_SHAPE, "mean_squared_error", "(1, 1)", \
      (tt_loss_total(t, tt_mean_squared_error(t, x, x, tt__handle(t, 0)), z), tt__handle(t, 0))) \
    X(silu_dtype, TT_ERR_SHAPE, "silu", "'i'", tt_silu(t, i)) \
    X(soft_targets_shape, TT_ERR_SHAPE, "soft_cross_entropy", "'y'", \
      tt_soft_cross_entropy(t, x, y, tt__handle(t, 0))) \
    X(swiglu_shape, TT_ERR_SHAPE, "swiglu", "'y'", tt_swiglu(t, x, y)) \
    X(add_width, TT_ERR_SHAPE, "add", "'y'", tt_add(t, x, y)) \
    X(add_rows, TT_ERR_SHAPE, "add", "'z'", tt_add(t, x, z)) \
    X(add_dtype, TT_ERR_SHAPE, "add", "'i'", tt_add(t, i, i)) \
    X(mul_rows, TT_ERR_SHAPE, "mul", "'z'", tt_mul(t, x, z)) \
    X(mul_smaller, TT_ERR_SHAPE, "mul", "'x'", tt_mul(t, one, x)) \
    X(scale_dtype, TT_ERR_SHAPE, "scale", "'i'", tt_scale(t, i, 2)) \
    X(rotary_heads, TT_ERR_SHAPE, "rotary", "multiple of heads, 4", rotary_of(t, x, i, 4, 2, 10000, 1)) \
    X(rotary_no_heads, TT_ERR_SHAPE, "rotary", "multiple of heads, 0", rotary_of(t, x, i, 0, 2, 10000, 1)) \
    X(rotary_odd, TT_ERR_SHAPE, "rotary", "size is 3 in", rotary_of(t, x, i, 2, 3, 10000, 1)) \
    X(rotary_too_many, TT_ERR_SHAPE, "rotary", "size is 514 in", rotary_of(t, x, i, 1, 514, 10000, 1)) \
    X(rotary_base, TT_ERR_ARGUMENT, "rotary", "base is 1", rotary_of(t, x, i, 1, 2, 1, 1)) \
    X(rotary_base_nan, TT_ERR_ARGUMENT, "rotary", "nan", rotary_of(t, x, i, 1, 2, NAN, 1)) \
    X(rotary_factor, TT_ERR_ARGUMENT, "rotary", "factor is 0.5", rotary_of(t, x, i, 1, 2, 10000, 0.5f)) \
    X(rotary_positions, TT_ERR_SHAPE, "rotary", "i32", rotary_of(t, x, x, 1, 2, 10000, 1)) \
    X(rotary_no_positions, TT_ERR_ARGUMENT, "rotary", "operand 1", \
        rotary_of(t, x, tt__handle(t, 0), 1, 2, 10000, 1)) \
    X(rotary_dtype, TT_ERR_SHAPE, "rotary", "'i'", rotary_of(t, i, i, 1, 2, 10000, 1)) \
    X(dropout_dtype, TT_ERR_SHAPE, "dropout", "'i'", tt_dropout(t, i, 0.1f)) \
    X(dropout_one, TT_ERR_ARGUMENT, "dropout", "below 65535/65536", tt_dropout(t, x, 1)) \
    X(dropout_nan, TT_ERR_ARGUMENT, "dropout", "below 65535/65536", tt_dropout(t, x, NAN)) \
    X(attention_keys, TT_ERR_SHAPE, "attention", "'y'", tt_attention(t, x, y, x, s, &two)) \
    X(attention_values, TT_ERR_SHAPE, "attention", "'z'", tt_attention(t, x, x, z, s, &two)) \
    X(attention_overlap, TT_ERR_SHAPE, "attention", "slices that overlap", \
        tt_attention(t, tt_slice(t, x, 0, 4), tt_slice(t, x, 2, 4), tt_slice(t, x, 0, 4), s, &two)) \
    X(attention_key_heads, TT_ERR_SHAPE, "attention", "(rows<=8, 6)", \
        tt_attention(t, x, tt_slice(t, x, 0, 4), tt_slice(t, x, 0, 4), s, &three)) \
    X(attention_value_heads, TT_ERR_SHAPE, "attention", "(rows<=8, 3)", \
        tt_attention(t, x, tt_slice(t, x, 0, 3), x, s, &two)) \
    X(attention_key_overlap, TT_ERR_SHAPE, "attention", "slices that overlap", \
        tt_attention(t, x, tt_slice(t, x, 0, 3), tt_slice(t, x, 3, 3), s, &two)) \
    X(attention_starts, TT_ERR_SHAPE, "attention", "'y'", tt_attention(t, x, x, x, y, &two)) \
    X(attention_heads, TT_ERR_SHAPE, "attention", "of heads, 4", tt_attention(t, x, x, x, s, &four)) \
    X(attention_no_heads, TT_ERR_SHAPE, "attention", "of heads, 0", tt_attention(t, x, x, x, s, &none)) \
    X(attention_dropout, TT_ERR_ARGUMENT, "attention", "dropout is 0.997, but must be 0 to 255/256", \
        tt_attention(t, x, x, x, s, &dropped)) \
    X(attention_window, TT_ERR_ARGUMENT, "attention", "window -1 must be at least 1", \
        tt_attention(t, x, x, x, s, &windowed)) \
    X(attention_max_length, TT_ERR_ARGUMENT, "attention", "max_length -2 must be at least 1", \
        tt_attention(t, x, x, x, s, &below)) \
    X(attention_alibi, TT_ERR_ARGUMENT, "attention", "must be finite", \
        tt_attention(t, x, x, x, s, &steep)) \
    X(attention_alibi_rounded, TT_ERR_ARGUMENT, "attention", "alibi_rounded needs causal = true", \
        tt_attention(t, x, x, x, s, &rounded)) \
    X(attention_blocks, TT_ERR_ARGUMENT, "attention", "cannot be combined with causal rows", \
        tt_attention(t, x, x, x, s, &blocked)) \
    X(attention_no_lists, TT_ERR_ARGUMENT, "attention", "`lists` is NULL", \
        tt_attention(t, x, x, x, s, &unlisted)) \
    X(attention_lists, TT_ERR_ARGUMENT, "attention", "have block 65536 at entry 0", \
        tt_attention(t, x, x, x, s, &misplaced)) \
    X(gather_index, TT_ERR_SHAPE, "gather_rows", "'y'", tt_gather_rows(t, x, y)) \
    X(gather_part, TT_ERR_SHAPE, "gather_rows", "'pairs'", tt_gather_rows(t, x, tt_slice(t, pairs, 0, 1))) \
    X(gather_dtype, TT_ERR_SHAPE, "gather_rows", "'i'", tt_gather_rows(t, i, i)) \
    X(mean_pool_starts, TT_ERR_SHAPE, "mean_pool", "'y'", tt_mean_pool(t, x, y)) \
    X(mean_pool_index, TT_ERR_SHAPE, "mean_pool", "'i'", tt_mean_pool(t, x, i)) \
    X(mean_pool_dtype, TT_ERR_SHAPE, "mean_pool", "'i'", tt_mean_pool(t, i, s)) \
    X(slice_outside, TT_ERR_SHAPE, "slice", "'x'", tt_slice(t, x, 3, 4)) \
    X(slice_negative, TT_ERR_SHAPE, "slice", "'x'", tt_slice(t, x, -1, 2)) \
    X(slice_empty, TT_ERR_SHAPE, "slice", "'x'", tt_slice(t, x, 2, 0)) \
    X(slice_overflow, TT_ERR_SHAPE, "slice", "'x'", tt_slice(t, x, 2, INT64_MAX)) \
    X(reshape_elements, TT_ERR_SHAPE, "reshape", "'z'", tt_reshape(t, z, 5, 5)) \
    X(reshape_axis, TT_ERR_SHAPE, "reshape", "'x'", tt_reshape(t, x, 16, 3)) \
    X(reshape_of_slice, TT_ERR_SHAPE, "reshape", "'z'", tt_reshape(t, tt_slice(t, z, 0, 2), 2, 4)) \
    X(sum_pool_starts, TT_ERR_SHAPE, "mean_pool", "'y'", tt_sum_pool(t, x, y)) \
    X(token_losses_rows, TT_ERR_SHAPE, "token_losses", "'few'", tt_token_losses(t, x, few)) \
    X(token_losses_targets, TT_ERR_SHAPE, "token_losses", "'y'", tt_token_losses(t, x, y)) \
    X(token_losses_logits, TT_ERR_SHAPE, "token_losses", "'i'", tt_token_losses(t, i, i)) \
    X(cross_entropy_rows, TT_ERR_SHAPE, "cross_entropy", "'few'", tt_cross_entropy(t, x, few, NULL)) \
    X(cross_entropy_targets, TT_ERR_SHAPE, "cross_entropy", "'y'", tt_cross_entropy(t, x, y, NULL)) \
    X(cross_entropy_logits, TT_ERR_SHAPE, "cross_entropy", "'i'", tt_cross_entropy(t, i, i, NULL)) \
    X(cross_entropy_weights, TT_ERR_SHAPE, "cross_entropy", "'y'", tt_cross_entropy(t, x, i, &weighted)) \
    X(cross_entropy_class_weights, TT_ERR_SHAPE, "cross_entropy", "'z'", \
        tt_cross_entropy(t, x, i, &classes)) \
    X(cross_entropy_both_weights, TT_ERR_ARGUMENT, "weights of rows", "are both given", \
        tt_cross_entropy(t, x, i, &both)) \
    X(cross_entropy_smoothing, TT_ERR_ARGUMENT, "cross_entropy", "smoothing", \
        tt_cross_entropy(t, x, i, &smooth)) \
    X(squared_error_shape, TT_ERR_SHAPE, "mean_squared_error", "'y'", \
        tt_mean_squared_error(t, x, y, tt__handle(t, 0))) \
    X(squared_error_dtype, TT_ERR_SHAPE, "mean_squared_error", "'i'", \
        tt_mean_squared_error(t, x, i, tt__handle(t, 0))) \
    X(squared_error_weights, TT_ERR_SHAPE, "mean_squared_error", "'z'", tt_mean_squared_error(t, x, x, z))

enum {
#define REFUSED_ENUM(name, status, part1, part2, call) REFUSED_##name,
    REFUSED(REFUSED_ENUM)
    REFUSED_COUNT
};

TEST(ops_refuse_wrong_operands)
{
    static const struct { const char *name, *part[2]; tt_status status; } rows[] = {
#define REFUSED_ROW(name, status, part1, part2, call) {#name, {part1, part2}, status},
        REFUSED(REFUSED_ROW)
    };
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int64_t dims[3] = {5, 6, 7}, wide[2] = {5, 7};
    tt_init zeros = {TT_INIT_ZEROS, 0};
    tt_param *w = tt_param_new(ctx, "w", 2, dims, zeros), *w7 = tt_param_new(ctx, "w7", 2, wide, zeros);
    tt_param *v = tt_param_new(ctx, "v", 1, &dims[1], zeros), *v5 = tt_param_new(ctx, "v5", 1, dims, zeros);
    tt_attention_options two = tt_attention_options_default(2), four = tt_attention_options_default(4),
                         three = tt_attention_options_default(3), none = tt_attention_options_default(0),
                         dropped = two, windowed = two, steep = two, blocked = two, below = two,
                         unlisted = two, misplaced = two, rounded = two;
    const int32_t far = 65536;
    dropped.dropout = 0.997f;
    windowed.window = -1;
    below.max_length = -2;
    steep.alibi = INFINITY;
    rounded.alibi = 1;
    rounded.alibi_rounded = true;
    blocked.block = 2;
    blocked.causal = true;
    unlisted.block = unlisted.listed = unlisted.list_rows = 1;
    misplaced.heads = misplaced.block = misplaced.listed = misplaced.list_rows = 1;
    misplaced.lists = &far;
    for (int k = 0; k < REFUSED_COUNT; k++) {
        tt_tape *t = tt_tape_new(ctx);
        int64_t axis = tt_axis(t, "rows", 8), seqs = tt_axis(t, "seqs", 3);
        tt_value x = tt_input(t, "x", TT_F32, axis, 6), y = tt_input(t, "y", TT_F32, axis, 5),
                 z = tt_input(t, "z", TT_F32, 4, 6), result = {0};
        tt_value i = tt_input(t, "i", TT_I32, axis, 1), pairs = tt_input(t, "pairs", TT_I32, axis, 2),
                 few = tt_input(t, "few", TT_I32, 4, 1);
        tt_value s = tt_seq_start(t, "s", seqs);
        tt_cross_entropy_options weighted = tt_cross_entropy_options_default(), smooth = weighted,
                                 classes = weighted, both = weighted;
        const tt_value one = tt_input(t, "one", TT_F32, 1, 1);
        tt_matmul_options plain = tt_matmul_options_default(), endless = plain;
        plain.untransposed = true;
        endless.beyond = -INFINITY;
        tt_sigmoid_cross_entropy_options by_row = tt_sigmoid_cross_entropy_options_default(),
                                         by_label = by_row;
        by_label.weights = by_row.positive_weights = y;
        weighted.weights = both.weights = y;
        classes.class_weights = both.class_weights = z;
        smooth.label_smoothing = 1;
        CHECK(tt_tape_status(t) == TT_OK);
        switch (k) {
#define REFUSED_CASE(name, status, part1, part2, call) case REFUSED_##name: result = call; break;
            REFUSED(REFUSED_CASE)
        default: break;
        }
        snprintf(where, sizeof where, "%s", rows[k].name);
        report(tt_tape_status(t) == rows[k].status && result.id == 0, "status %s, expected %s: %s",
               tt_status_name(tt_tape_status(t)), tt_status_name(rows[k].status), tt_error(ctx));
        for (int j = 0; j < 2; j++)
            report(strstr(t->error, rows[k].part[j]) != NULL, "the message has no \"%s\": %s",
                   rows[k].part[j], t->error);
        report(tt_compile(t, x, NULL) == NULL && tt_error_code(ctx) == rows[k].status &&
                   strcmp(tt_error(ctx), t->error) == 0,
               "tt_compile must repeat the error: %s", tt_error(ctx));
        tt_tape_free(t);
    }
    TEST_CLOSE(ctx, &a);
}

/* A batch to refuse. The model makes a good step, refuses the batch that `spoil` breaks, and makes a second
   good step. The parameters then have the same bits as after the two good steps without the refused batch. */
typedef struct spoiled { const char *name, *part[2]; tt_status status; void (*spoil)(batch *b); } spoiled;

static void spoil_id(batch *b) { b->ids[2] = MODEL_VOCAB; }
static void spoil_id_negative(batch *b) { b->ids[3] = -1; }
static void spoil_label(batch *b) { b->labels[1] = MODEL_CLASSES; }
static void spoil_label_negative(batch *b) { b->labels[1] = -2; }
static void spoil_first_start(batch *b) { b->start[0] = 1; }
static void spoil_empty_sequence(batch *b) { b->start[2] = b->start[1]; }
static void spoil_order(batch *b) { b->start[1] = b->rows + 100; }
static void spoil_length(batch *b) { for (int s = 1; s < b->seqs; s++) b->start[s] = b->rows - b->seqs + s; }
static void spoil_last_start(batch *b) { b->start[b->seqs]++; }
static void spoil_all_ignored(batch *b) { for (int s = 0; s < b->seqs; s++) b->labels[s] = -100; }

TEST(bad_batches_change_nothing)
{
    static const spoiled bad[] = {
        {"id", {"'ids' has 40 in row 2", "0 to 39"}, TT_ERR_ARGUMENT, spoil_id},
        {"negative id", {"'ids' has -1 in row 3", "0 to 39"}, TT_ERR_ARGUMENT, spoil_id_negative},
        {"label", {"'labels' has 4 in row 1", "0 to 3"}, TT_ERR_ARGUMENT, spoil_label},
        {"negative label", {"'labels' has -2 in row 1", "classes"}, TT_ERR_ARGUMENT, spoil_label_negative},
        {"first start", {"'seq_start' begins with 1", "attention"}, TT_ERR_ARGUMENT, spoil_first_start},
        {"empty sequence", {"'seq_start' has", "at least one row"}, TT_ERR_ARGUMENT, spoil_empty_sequence},
        {"order", {"'seq_start' has", "at least one row"}, TT_ERR_ARGUMENT, spoil_order},
        {"long sequence", {"'seq_start' has a sequence of ", "max_length is 40"}, TT_ERR_ARGUMENT,
         spoil_length},
        {"last start", {"'seq_start' ends with", "rows"}, TT_ERR_ARGUMENT, spoil_last_start},
        {"all ignored", {"no target counts", "nothing was updated"}, TT_ERR_NUMERIC, spoil_all_ignored},
    };
    float *good[2] = {NULL, NULL}; /* parameters after the two good steps */
    size_t n;
    for (int k = -1; k < (int)(sizeof bad / sizeof bad[0]); k++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            model m;
            tt_compile_options o = tt_compile_options_default();
            batch b = make_batch(6, 20, 1), spoiled_batch = b, second = make_batch(7, 20, 2);
            o.accumulate = accumulate;
            model_open(&m, 2, 0.1f);
            tt_program *p = tt_compile(m.t, m.loss, &o);
            REQUIRE(p != NULL);
            CHECK(model_set(&m, p, &b) &&
                  (accumulate ? tt_micro_step(p, NULL) == TT_OK && tt_update(p, 0.01f, NULL) == TT_OK
                              : tt_step(p, 0.01f, NULL) == TT_OK));
            if (k >= 0) {
                float *before = all_params(m.ctx, &n);
                snprintf(where, sizeof where, "%s%s", bad[k].name, accumulate ? ", accumulating" : "");
                bad[k].spoil(&spoiled_batch);
                CHECK(model_set(&m, p, &spoiled_batch));
                tt_status status = accumulate ? tt_micro_step(p, NULL) : tt_step(p, 0.01f, NULL);
                if (accumulate && bad[k].status == TT_ERR_NUMERIC &&
                    report(status == TT_OK, "a micro-batch may be without targets, a step may not: %s",
                           tt_error(m.ctx))) {
                    float grad[MODEL_CLASSES * MODEL_WIDTH];
                    const tt_param *classes = tt_param_find(m.ctx, "layer.0.classes");
                    CHECK(tt_get_gradient(p, classes, grad) == TT_ERR_NUMERIC);
                    CHECK_ERROR(m.ctx, TT_ERR_NUMERIC, "no target counted");
                    status = tt_update(p, 0.01f, NULL);
                }
                report(status == bad[k].status && tt_error_code(m.ctx) == status, "status %s",
                       tt_status_name(status));
                for (int j = 0; j < 2; j++)
                    report(strstr(tt_error(m.ctx), bad[k].part[j]) != NULL, "the message has no \"%s\": %s",
                           bad[k].part[j], tt_error(m.ctx));
                float *after = all_params(m.ctx, &n);
                report(same_params(before, after, n), "parameters changed");
                free(before);
                free(after);
            }
            CHECK(model_set(&m, p, &second) &&
                  (accumulate ? tt_micro_step(p, NULL) == TT_OK && tt_update(p, 0.01f, NULL) == TT_OK
                              : tt_step(p, 0.01f, NULL) == TT_OK));
            float *now = all_params(m.ctx, &n);
            if (!good[accumulate]) good[accumulate] = now;
            else { report(same_params(good[accumulate], now, n), "training went on differently"); free(now); }
            tt_program_free(p);
            model_close(&m);
        }
    free(good[0]);
    free(good[1]);
}

/* NaN and overflow fail the step with the tensor's name, and leave parameters and optimizer unchanged. */
TEST(numbers_that_are_not_finite)
{
    static const struct { const char *name, *part; float value; int batch_at; } bad[] = {
        {"nothing", "", 1, -1},
        {"NaN", "the loss 'the loss' is not finite", NAN, 1},
        {"infinity", "the loss 'the loss' is not finite", INFINITY, 1},
        {"gradient", "the gradient of 'w' is not finite", 3e38f, 1},
    };
    float good[2][15];
    for (int k = 0; k < 4; k++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            test_allocator a;
            tt_context *ctx = test_open(&a);
            int64_t dims[2] = {3, 5};
            float x[20], y[12], before[15], after[15];
            tt_init zeros = {TT_INIT_ZEROS, 0};
            tt_param *w = tt_param_new(ctx, "w", 2, dims, zeros);
            tt_tape *t = tt_tape_new(ctx);
            tt_value in = tt_input(t, "x", TT_F32, 4, 5), target = tt_input(t, "y", TT_F32, 4, 3);
            tt_value loss = tt_mean_squared_error(t, tt_linear(t, in, w, NULL), target, tt__handle(t, 0));
            tt_compile_options o = tt_compile_options_default();
            tt_name(t, loss, "the loss");
            o.accumulate = accumulate;
            tt_program *p = tt_compile(t, loss, &o);
            REQUIRE(p != NULL);
            for (int step = 0; step < 3; step++) {
                bool spoil = step == 1;
                if (spoil && k == 0) continue;
                for (int e = 0; e < 20; e++) x[e] = (float)((e * 7 + step) % 5 - 2);
                for (int e = 0; e < 12; e++) y[e] = (float)((e * 5 + step) % 7 - 3) * (spoil ? 100.0f : 1.0f);
                if (spoil) { x[7] = bad[k].value; memset(after, 0, sizeof after); }
                /* Zero weights keep the loss finite. */
                if (spoil && k == 3) tt_param_get(w, before), tt_param_set(w, after);
                else tt_param_get(w, before);
                CHECK(tt_set(p, in, x, 4) == TT_OK && tt_set(p, target, y, 4) == TT_OK);
                tt_status status = accumulate ? tt_micro_step(p, NULL) : tt_step(p, 0.1f, NULL);
                if (accumulate && status == TT_OK) status = tt_update(p, 0.1f, NULL);
                if (spoil) {
                    CHECK(status == TT_ERR_NUMERIC);
                    CHECK_ERROR(ctx, TT_ERR_NUMERIC, bad[k].part);
                    if (k == 3) {
                        float now[15];
                        tt_param_get(w, now);
                        CHECK(same_params(now, after, 15));
                        tt_param_set(w, before);
                    } else {
                        tt_param_get(w, after);
                        CHECK(same_params(before, after, 15));
                    }
                } else CHECK(status == TT_OK);
            }
            tt_param_get(w, after);
            if (k == 0) memcpy(good[accumulate], after, sizeof after);
            else CHECK(same_params(good[accumulate], after, 15));
            tt_program_free(p);
            tt_tape_free(t);
            TEST_CLOSE(ctx, &a);
        }
}

/* A failed micro-batch in the middle of a step ends the step without an update and does not affect the next
   step. */
TEST(failed_micro_batch_ends_the_step)
{
    model m;
    tt_compile_options o = tt_compile_options_default();
    batch b = make_batch(6, 20, 1), broken = b;
    size_t n;
    o.accumulate = true;
    spoil_label(&broken);
    model_open(&m, 1, 0);
    tt_program *p = tt_compile(m.t, m.loss, &o);
    REQUIRE(p != NULL);
    CHECK(tt_update(p, 0.01f, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(m.ctx, TT_ERR_ARGUMENT, "no micro-batch");
    CHECK(model_set(&m, p, &b) && tt_micro_step(p, NULL) == TT_OK);
    float *before = all_params(m.ctx, &n);
    CHECK(model_set(&m, p, &broken) && tt_micro_step(p, NULL) == TT_ERR_ARGUMENT);
    CHECK(model_set(&m, p, &b) && tt_micro_step(p, NULL) == TT_ERR_NUMERIC);
    CHECK(tt_update(p, 0.01f, NULL) == TT_ERR_NUMERIC);
    float *after = all_params(m.ctx, &n);
    CHECK(same_params(before, after, n));
    free(after);
    CHECK(model_set(&m, p, &b) && tt_micro_step(p, NULL) == TT_OK && tt_update(p, 0.01f, NULL) == TT_OK);
    after = all_params(m.ctx, &n);
    tt_program_free(p);
    model_close(&m);
    model_open(&m, 1, 0); /* takes the step after the failed step in a new context, for comparison */
    p = tt_compile(m.t, m.loss, &o);
    CHECK(p && model_set(&m, p, &b) && tt_micro_step(p, NULL) == TT_OK && tt_update(p, 0.01f, NULL) == TT_OK);
    free(before);
    before = all_params(m.ctx, &n);
    CHECK(same_params(before, after, n));
    free(before);
    free(after);
    tt_program_free(p);
    model_close(&m);
}
