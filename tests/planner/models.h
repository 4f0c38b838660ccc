/* Tests of plans of real architectures, and of plans for another device. */
#pragma once

/* ---------------------------------------------------------------------------- plans of real architectures */

typedef struct shape {
    const char *name;
    int layers, width, heads, mlp, seqs, length, classes;
    bool pre_norm;
} shape;

static tt_param *layer_param(tt_context *ctx, int layer, const char *what, int64_t rows, int64_t cols)
{
    char name[128];
    snprintf(name, sizeof name, "layer.%d.%s", layer, what);
    return cols ? matrix(ctx, name, rows, cols) : vector(ctx, name, rows, TT_INIT_ZEROS);
}

static tt_value encoder_norm(tt_tape *t, int layer, const char *what, tt_value x, int64_t d)
{
    char name[96];
    snprintf(name, sizeof name, "%s.weight", what);
    tt_param *w = layer_param(t->ctx, layer, name, d, 0);
    snprintf(name, sizeof name, "%s.bias", what);
    return tt_layernorm(t, x, w, layer_param(t->ctx, layer, name, d, 0), 1e-6f);
}

static tt_value encoder_linear(tt_tape *t, int layer, const char *what, tt_value x, int64_t out)
{
    char name[96];
    snprintf(name, sizeof name, "%s.weight", what);
    tt_param *w = layer_param(t->ctx, layer, name, out, t->values[x.id].shape.cols);
    snprintf(name, sizeof name, "%s.bias", what);
    return tt_linear(t, x, w, layer_param(t->ctx, layer, name, out, 0));
}

/* Records a post-norm encoder with token embeddings (DistilBERT) or a pre-norm encoder with patches (ViT). */
static tt_value encoder(tt_tape *t, const shape *e, tt_value *logits)
{
    int64_t rows = tt_axis(t, "tokens", (int64_t)e->seqs * e->length), seqs = tt_axis(t, "seqs", e->seqs),
            d = e->width;
    tt_value starts = tt_seq_start(t, "seq_start", seqs), x;
    tt_value positions = tt_embedding(t, tt_input(t, "positions", TT_I32, rows, 1),
                                      matrix(t->ctx, "positions", e->length, d));
    if (e->pre_norm) x = encoder_linear(t, -1, "patches", tt_input(t, "pixels", TT_F32, rows, 768), d);
    else x = tt_embedding(t, tt_input(t, "ids", TT_I32, rows, 1), matrix(t->ctx, "words", 30522, d));
    x = tt_add(t, x, positions);
    if (!e->pre_norm) x = encoder_norm(t, -1, "norm", x, d);
    x = tt_dropout(t, x, 0.1f);
    for (int k = 0; k < e->layers; k++) {
        tt_attention_options o = tt_attention_options_default(e->heads);
        if (!e->pre_norm) o.dropout = 0.1f;
        tt_value h = e->pre_norm ? encoder_norm(t, k, "norm1", x, d) : x;
        h = tt_attention(t, encoder_linear(t, k, "q", h, d), encoder_linear(t, k, "k", h, d),
                         encoder_linear(t, k, "v", h, d), starts, &o);
        x = tt_add(t, encoder_linear(t, k, "out", h, d), x);
        if (!e->pre_norm) x = encoder_norm(t, k, "norm1", x, d);
        h = e->pre_norm ? encoder_norm(t, k, "norm2", x, d) : x;
        h = encoder_linear(t, k, "down", tt_gelu(t, encoder_linear(t, k, "up", h, e->mlp)), d);
        x = tt_add(t, tt_dropout(t, h, 0.1f), x);
        if (!e->pre_norm) x = encoder_norm(t, k, "norm2", x, d);
    }
    if (e->pre_norm) x = encoder_norm(t, -1, "norm", x, d);
    x = tt_gather_rows(t, x, tt_input(t, "first", TT_I32, seqs, 1));
    *logits = encoder_linear(t, -1, "classifier", x, e->classes);
    return tt_cross_entropy(t, *logits, tt_input(t, "labels", TT_I32, seqs, 1), NULL);
}

/* Checks the f32 values of 16-bit precisions. Only `sums` values of the residual stream and the
   gradients of these values may be f32, apart from statistics and values that do not have all rows. The
   stream has three values at its beginning and two in each layer. The last layer does not count, as it
   computes only [CLS]. */
static void check_f32_values(const tt_program *p, int64_t rows, int sums)
{
    const tt_tape *t = p->built.t;
    int found = 0, stray = 0;
    if (p->settings.precision.kind == TT__32_TRUE) return;
    tt__index(p->built.t);
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__tape_value *x = &t->values[v];
        if (x->storage != TT__TRANSIENT || x->base != v || x->shape.rows != rows ||
            x->shape.dtype != TT_F32 || x->pinned_f32 || tt__producer(t, v) < 0)
            continue;
        const tt__instr *i = &t->code[tt__producer(t, v)];
        bool gradient = i->backward && !i->recomputed;
        if (i->recomputed) continue;
        if (!gradient) found++;
        bool of_sum = false;
        for (int32_t k = 1; k < t->n_values && gradient; k++)
            of_sum |= t->values[k].grad == v && t->values[k].residual;
        stray += gradient ? !of_sum : !x->residual;
    }
    CHECK(stray == 0);
    CHECK(found == sums);
}

TEST(plans_of_real_architectures)
{
    static const shape shapes[] = {{"DistilBERT-base, 12 x 512 tokens", 6, 768, 12, 3072, 12, 512, 2, false},
                                   {"ViT-L/16, 64 x 197 tokens", 24, 1024, 16, 4096, 64, 197, 1000, true},
                                   {"ViT-S/16, 3 x 197 tokens", 12, 384, 6, 1536, 3, 197, 10, true}};
    char what[256];
    for (int m = 0; m < TEST_COUNT(shapes); m++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_value logits, loss = encoder(t, &shapes[m], &logits);
        /* Programs: training in all precisions, also with accumulation; evaluation of the loss; the logits
           alone. */
        enum { KINDS_OF_PROGRAMS = PRECISIONS + 6 };
        size_t trained[PRECISIONS] = {0};
        for (int k = 0; k < 2 * KINDS_OF_PROGRAMS; k++) {
            int kind = k % KINDS_OF_PROGRAMS;
            tt_compile_options c = options_of(&precisions[kind % PRECISIONS]);
            bool logits_only = kind == KINDS_OF_PROGRAMS - 1;
            c.device = k < KINDS_OF_PROGRAMS ? "cpu" : "cuda";
            c.train = kind <= PRECISIONS;
            c.accumulate = kind == PRECISIONS;
            tt_program *p = tt_compile(t, logits_only ? logits : loss, &c);
            REQUIRE(p != NULL);
            tt_plan plan = tt_program_plan(p);
            double ratio = (double)(plan.bytes - plan.persistent_bytes) /
                           (double)(plan.lower_bound_bytes - plan.persistent_bytes);
            snprintf(what, sizeof what, "%s, %s, %s, %s: transient %.1f MB is %.4f of its bound",
                     shapes[m].name, c.device, c.precision,
                     c.accumulate ? "accumulate"
                     : c.train ? "train"
                     : logits_only ? "logits"
                     : "eval",
                     (double)(plan.bytes - plan.persistent_bytes) / 1e6, ratio);
            if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("  %s (%d instructions)\n", what, plan.instructions);
            test__check(ratio >= 1 && ratio <= 1.02, __FILE__, __LINE__, what);
            CHECK(tt_allocated_bytes(ctx) < ((size_t)8 << 20)); /* nothing of the plan is allocated */
            size_t live = 0, params = 0;
            for (int c2 = 0; c2 < TT_MEM_CATEGORIES; c2++) live += plan.at_peak[c2];
            CHECK(live == plan.lower_bound_bytes);
            for (int i = 0; i < ctx->n_params; i++)
                params += tt__align_to((size_t)ctx->params[i]->size *
                                           (strstr(c.precision, "16-true") ? 2 : 4),
                                       p->settings.kind->alignment);
            CHECK(plan.at_peak[TT_MEM_PARAMETERS] <= params && plan.at_peak[TT_MEM_PARAMETERS] > params / 2);
            CHECK(plan.at_peak[TT_MEM_OPTIMIZER] == (c.train ? 2 * plan.at_peak[TT_MEM_PARAMETERS] : 0));
            CHECK(plan.peak_instruction >= 0 && plan.peak_instruction < plan.instructions &&
                  plan.peak_name[0]);
            if (k < PRECISIONS) trained[k] = plan.bytes - plan.persistent_bytes;
            if (logits_only) CHECK(plan.bytes - plan.persistent_bytes < trained[1] / 2);
            if (c.train)
                check_f32_values(p, (int64_t)shapes[m].seqs * shapes[m].length,
                                 kind % PRECISIONS == 3 || kind % PRECISIONS == 5 ? 2 * shapes[m].layers + 1
                                                                                  : 0);
            tt_program_free(p);
        }
        /* bf16 halves the activations; bf16-true halves the gradients, too */
        CHECK(trained[1] < trained[0] && trained[2] < trained[1]);
        /* f16 needs as much as bf16 */
        CHECK(trained[6] == trained[1] && trained[4] == trained[2] && trained[5] == trained[3]);
        /* trained[3] has an f32 residual stream, whose sums take 2 bytes more per number than in trained[1]:
           two sums per layer that the norms keep, except in the last layer, and one or two gradients. */
        size_t sum = (size_t)shapes[m].seqs * (size_t)shapes[m].length * (size_t)shapes[m].width * 2;
        /* The smallest model's peak is in the update. */
        CHECK(m == 2 || trained[3] >= trained[1] + (size_t)(2 * shapes[m].layers - 2) * sum);
        CHECK(trained[3] <= trained[1] + (size_t)(2 * shapes[m].layers) * sum);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* --------------------------------------------------------------------------------------- kinds of devices */

/* Returns the bytes of the padded copies of a product's x, w and y, of up to 2,048 rows each. Matrices whose
   row length is a multiple of 8 are not copied. */
static size_t operand_copies(const tt_program *p, int32_t x, int32_t w, int32_t y, int32_t result)
{
    const int32_t of[3] = {x, w, y};
    size_t bytes = 0;
    bool even = result != 0;
    for (int k = 0; k < 3; k++) {
        const tt__tape_value *v = &p->built.t->values[of[k]];
        const size_t cols = ((size_t)v->shape.cols + 7) / 8 * 8, rows = (size_t)v->shape.rows;
        const size_t item = of[k] == result ? 4 : tt_dtype_bytes(v->shape.dtype);
        bytes += ((k == 1 ? (rows + 7) / 8 * 8 : rows) * cols * item + 255) / 256 * 256;
        even = even && v->shape.cols % 8 == 0 && v->ld % 8 == 0;
    }
    return result == 0 || even ? 0 : bytes;
}

TEST(plans_for_another_device)
{
    static const shape vit = {"ViT", 2, 128, 4, 512, 3, 197, 10, true},
                       bert = {"DistilBERT", 2, 128, 4, 512, 3, 100, 2, false};
    for (int k = 0; k < 8; k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        const shape *e = k % 2 ? &vit : &bert;
        tt_tape *t = tt_tape_new(ctx);
        tt_value logits, loss = encoder(t, e, &logits);
        tt_compile_options c = tt_compile_options_default();
        size_t rows = (size_t)(e->seqs * e->length), resident = ((size_t)32 << 20) - 4096, attention = 0,
               embedding = 0, seen = 0, kept = 0;
        c.device = "cuda";
        c.precision = precisions[k % 3].name;
        c.accumulate = k >= 4;
        tt_program *p = tt_compile(t, loss, &c);
        REQUIRE(p != NULL);
        tt_plan plan = tt_program_plan(p);
        for (int i = 0; i < plan.instructions; i++) {
            const tt__instr *in = &p->built.t->code[i];
            /* The attention of the last layer has one query per sequence. */
            size_t q = in->op == TT__OP_ATTENTION_BACKWARD ? (size_t)p->built.t->values[in->in[1]].shape.rows
                                                           : 0;
            /* Listed queries need workspace for their order: starts and two numbers per row. */
            bool listed = q ? in->in[7] != 0 : in->op == TT__OP_ATTENTION && in->in[4];
            size_t wanted = q || listed ? (q * (size_t)e->heads * 4 + 255) / 256 * 256 +
                                              (listed ? ((size_t)(3 * e->seqs + 1) * 4 + 255) / 256 * 256 : 0)
                            : in->op == TT__OP_EMBEDDING_BACKWARD ? (rows * 4 + 255) / 256 * 256 * 4
                            : in->op == TT__OP_GATHER_ROWS_BACKWARD
                                ? ((size_t)e->seqs * 4 + 255) / 256 * 256 * 4
                                : 0;
            /* Bits of dropout (512 bytes for 64 x 64) are kept for 16-bit q, and only if they take no more
               bytes than q. */
            const tt__shape *of_q = &p->built.t->values[in->in[1]].shape;
            const size_t bits = (rows / 64 + (size_t)e->seqs) * ((rows + 63) / 64) * (size_t)e->heads * 512;
            if (q == rows && of_q->dtype != TT_F32 && in->attr.dropout > 0 &&
                bits <= rows * (size_t)of_q->cols * 2) {
                wanted += bits;
                kept++;
            }
            /* Products with the heads' 10 or 2 classes need copies of both operands, padded to multiples of
               8, and an f32 result. */
            const int32_t *in_of = in->in, y = in->out[0];
            if (in->op == TT__OP_LINEAR) wanted = operand_copies(p, in_of[0], in_of[1], y, y);
            if (in->op == TT__OP_LINEAR_DX) wanted = operand_copies(p, y, in_of[1], in_of[0], y);
            if (in->op == TT__OP_LINEAR_DW) wanted = operand_copies(p, in_of[1], y, in_of[0], y);
            CHECK(in->workspace == wanted && in->workspace_place % 256 == 0);
            CHECK(!q || q == rows || q == (size_t)e->seqs);
            attention += in->op == TT__OP_ATTENTION_BACKWARD && q == rows;
            embedding += in->op == TT__OP_EMBEDDING_BACKWARD;
        }
        /* The attention of the last layer reads one query per sequence, so it does not count here. */
        CHECK(attention == 1 && embedding == (e->pre_norm ? 1 : 2));
        CHECK(kept == (size_t)(e == &bert && k % 3 != 0));
        for (int32_t v = 1; v < p->built.t->n_values; v++) {
            const tt__tape_value *x = &p->built.t->values[v];
            if (x->base != v || x->place == TT__NO_PLACE) continue;
            CHECK(x->place % 256 == 0);
            if (!x->persistent) continue;
            CHECK(x->place >= resident && x->place + tt__storage_bytes(x) <= plan.persistent_bytes);
            seen += (tt__storage_bytes(x) + 255) / 256 * 256;
        }
        CHECK(strcmp(plan.device, "cuda") == 0 && plan.persistent_bytes == seen + resident);
        CHECK(plan.at_peak[TT_MEM_WORKSPACE] >= resident);
        CHECK(plan.init_bytes == plan.at_peak[TT_MEM_PARAMETERS] + resident + 65536);
        for (int i = 0; i < ctx->n_params; i++) CHECK(ctx->params[i]->owner == NULL);

        /* an evaluation in the same arena adds nothing; an evaluation in another arena has separate
           parameters and workspace */
        c.train = false;
        c.share = p;
        tt_program *eval = tt_compile(t, loss, &c);
        REQUIRE(eval != NULL);
        CHECK(eval->arena == p->arena && tt_program_plan(p).bytes == plan.bytes &&
              tt_program_plan(eval).bytes == plan.bytes);
        c.share = eval; /* `eval` can be shared even after the program whose arena it shares is freed */
        tt_program_free(p);
        tt_program *again = tt_compile(t, loss, &c);
        CHECK(again && tt_program_plan(again).bytes == plan.bytes);
        c.share = NULL;
        tt_program *alone = tt_compile(t, loss, &c);
        REQUIRE(alone != NULL);
        plan = tt_program_plan(alone);
        CHECK(plan.persistent_bytes == resident + plan.at_peak[TT_MEM_PARAMETERS] &&
              plan.at_peak[TT_MEM_PARAMETERS] == tt_program_plan(eval).at_peak[TT_MEM_PARAMETERS]);

        /* programs that are only planned cannot run */
        int32_t labels[3] = {0, 0, 0};
        CHECK(tt_allocate(alone) == TT_ERR_UNSUPPORTED);
        CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "plans programs for device 'cuda', but cannot run them");
        CHECK(tt_set(eval, tt__handle(t, loss.id - 1), labels, 3) == TT_ERR_UNSUPPORTED &&
              tt_run(alone, NULL) == TT_ERR_UNSUPPORTED);

        /* another kind of device or another precision cannot share an arena */
        c.share = alone;
        c.precision = precisions[(k + 1) % 3].name;
        p = tt_compile(t, loss, &c);
        CHECK((p == NULL) == (k % 3 != 0)); /* 32-true and bf16-mixed both store parameters in f32 */
        tt_program_free(p);
        if (k % 3) CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "but an earlier program holds it as");
        c.device = "cpu";
        CHECK(tt_compile(t, loss, &c) == NULL);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                    "`share` is a program for device 'cuda', but this one is for 'cpu'");
        c.device = "abacus";
        CHECK(tt_compile(t, loss, &c) == NULL);
        CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "device 'abacus' is unknown: use cpu or cuda");
        tt_program_free(alone);
        tt_program_free(again);
        tt_program_free(eval);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}
