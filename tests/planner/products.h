/* Tests of products that are joined or padded, and of launches that are joined. */
#pragma once

/* Counts the products whose dtypes cuBLASLt does not accept together: 16-bit operands must have one dtype,
   and the result must have that dtype or f32 (documentation of cublasLtMatmul). *products: all products. */
static int products_for_the_fallback(const tt_tape *t, int *products)
{
    int found = 0;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const bool head = i->op == TT__OP_LINEAR_CROSS_ENTROPY;
        if ((!tt__is(i, TT__PRODUCT) || !i->out[0]) && !head) continue;
        const tt_dtype a = t->values[i->in[0]].shape.dtype, b = t->values[i->in[head ? 3 : 1]].shape.dtype;
        const tt_dtype y = t->values[i->out[0]].shape.dtype;
        const bool fits = a == b && (y == TT_F32 || y == a);
        if (!fits)
            printf("  %s of %s, %s and %s: %s\n", tt__instr_name(i), tt_dtype_name(a), tt_dtype_name(b),
                   t->values[i->in[0]].name, t->values[i->out[0]].name);
        found += !fits;
        ++*products;
    }
    return found;
}

/* On CUDA, in every precision, cuBLASLt accepts all products of a model: the fallback kernel is some fifty
   times slower on an H200. A language model's loss is computed in chunks. In each of two layers, kernels
   before the products also sum the columns for three bias gradients: of the projection and of the
   feed-forward layers. In 16-bit precisions these kernels also sum the columns for the biases of q, k and v.
   BERT's head has one more such sum. */
TEST(products_of_models_suit_cublaslt)
{
    static const char *const kinds[] = {"vit", "bert", "distilbert", "gpt2", "llama"};
    static const int column_sums[] = {6, 7, 7, 6, 0};
    for (int m = 0; m < TEST_COUNT(kinds); m++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_vit v;
        tt_bert b;
        tt_lm l;
        tt_model model;
        tt_vit_config of_vit = tt_vit_config_default("L/16");
        tt_bert_config of_bert = tt_bert_config_default(m == 2 ? TT_DISTILBERT : TT_BERT);
        tt_lm_config of_lm = tt_lm_config_default(m == 3 ? "gpt2" : "llama");
        of_vit.layers = of_bert.layers = of_lm.layers = 2;
        if (m == 0) {
            REQUIRE(tt_vit_new(ctx, &v, &of_vit) == TT_OK);
            model = tt_vit_classifier(&v);
        } else if (m < 3) {
            REQUIRE(tt_bert_new(ctx, &b, &of_bert) == TT_OK);
            model = tt_bert_model(&b);
        } else {
            CHECK(m != 3 || of_lm.vocab_size == 50257); /* 50257 is odd */
            REQUIRE(tt_lm_new(ctx, &l, &of_lm) == TT_OK);
            model = tt_lm_model(&l);
        }
        for (int k = 0; k < 2 * PRECISIONS; k++) {
            const tt_compile_options c = options_of(&precisions[k % PRECISIONS]);
            tt_train_options o = tt_train_options_default();
            int products = 0, heads = 0, zeros = 0, sums = 0;
            o.schedule.kind = TT_CONSTANT;
            o.compile.device = "cuda";
            o.compile.precision = c.precision;
            o.compile.residual = c.residual;
            o.compile.accumulate = k >= PRECISIONS;
            o.max_seqs = 8;
            o.max_tokens = m ? 8 * 512 : 0;
            tt_trainer *r = tt_trainer_new(ctx, &model, &o);
            REQUIRE(r != NULL);
            const tt_tape *t = tt_trainer_program(r)->built.t;
            CHECK(products_for_the_fallback(t, &products) == 0);
            for (int j = 0; j < t->n_code; j++) {
                heads += t->code[j].op == TT__OP_LINEAR_CROSS_ENTROPY;
                for (int o = 0; o < tt__summed(&t->code[j]); o++)
                    sums += tt__column_sums(&t->code[j], o) != 0;
                zeros += t->code[j].op == TT__OP_FILL && t->values[t->code[j].out[0]].shape.rows > 1;
            }
            CHECK(m != 3 || zeros == 0); /* attention's backward writes all of d(qkv) */
            const bool half = strcmp(c.precision, "32-true") != 0;
            CHECK(sums == column_sums[m] + (half && m < 4 ? 2 * 3 : 0));
            if (!CHECK(products >= 2 * 3 * 4 && heads == (m > 2)))
                printf("  %s, %s: %d products, %d heads\n", kinds[m], c.precision, products, heads);
            tt_trainer_free(r);
        }
        if (m == 0) tt_vit_free(&v);
        else if (m < 3) tt_bert_free(&b);
        else tt_lm_free(&l);
        TEST_CLOSE(ctx, &a);
    }
}

/* Tells whether the matrices that have the same role (such as weight or result) in products first..last are
   stored one after another. */
static bool parts_are_behind(const tt_program *p, int first, int last, int role)
{
    const tt_tape *t = p->built.t;
    const bool below = tt__lies_below(&t->code[first], role);
    for (int k = first; k < last; k++) {
        const int32_t ids[2] = {tt__in_role(&t->code[k], role), tt__in_role(&t->code[k + 1], role)};
        tt__mat m[2];
        for (int e = 0; e < 2 && ids[0]; e++) {
            const tt__tape_value *v = &t->values[ids[e]], *base = &t->values[v->base];
            const size_t bytes = tt_dtype_bytes(v->shape.dtype), offset = (size_t)v->offset * bytes;
            const tt__placement *placement = v->storage == TT__PARAMETER ? tt__placement_in(p->arena,
                                                                                            v->param) : NULL;
            m[e] = tt__at_capacity(t, ids[e]);
            m[e].data = (char *)(uintptr_t)(4096 + (placement ? placement->offset : base->place + offset));
        }
        if (ids[0] && !tt__lies_after(&m[0], &m[1], below)) return false;
    }
    return true;
}

/* Returns the number of groups of `size` products of an op that run together, or -1 if some group's matrices
   are not adjacent. */
static int joined_products(const tt_program *p, int op, int size)
{
    const tt_tape *t = p->built.t;
    int groups = 0;
    for (int k = 0, end; k < t->n_code; k = end + 1) {
        for (end = k; t->code[end].with_next; end++) {}
        if (t->code[k].op != op || end == k) continue;
        groups += end - k + 1 == size;
        for (int role = 0; role < TT__ROLES; role++) {
            if (role == tt__shared_role(&t->code[k])) {
                for (int m = k; m <= end; m++)
                    if (tt__in_role(&t->code[m], role) != tt__in_role(&t->code[k], role)) return -1;
            } else if (!parts_are_behind(p, k, end, role)) {
                return -1;
            }
        }
    }
    return groups;
}

/* Tells whether the persistent storages on the device do not overlap. alone: the storages must also fill the
   arena's persistent bytes. */
static bool persistent_lie_apart(const tt_program *p, bool alone)
{
    const tt_tape *t = p->built.t;
    size_t first[2], bytes[2], all = p->settings.kind->resident;
    for (int32_t v = 1; v < t->n_values; v++) {
        if (!t->values[v].persistent || t->values[v].base != v || t->values[v].space != TT__DEVICE) continue;
        all += tt__arena_bytes(t, &t->values[v]);
        for (int32_t w = 1; w <= v; w++) {
            const tt__tape_value *of[2] = {&t->values[v], &t->values[w]};
            if (!of[1]->persistent || of[1]->base != w || of[1]->space != TT__DEVICE) continue;
            for (int e = 0; e < 2; e++) {
                const bool parameter = of[e]->storage == TT__PARAMETER;
                first[e] = parameter ? p->arena->placement[of[e]->param].offset : of[e]->place;
                bytes[e] = tt__storage_bytes(of[e]);
            }
            if (first[0] < p->settings.kind->resident) return false;
            if (first[0] + bytes[0] > p->arena->persistent) return false;
            if (v != w && first[0] < first[1] + bytes[1] && first[1] < first[0] + bytes[0]) return false;
        }
    }
    return !alone || all == p->arena->persistent;
}

/* On a GPU the products of q, k and v are one product, and so are the products of their weights' gradients,
   without more memory: the matrices are adjacent. In the last layer, with one query row per sequence, only k
   and v are joined. Recomputed blocks join products, too. No products are joined on a CPU, over ranks, with
   `groups`, with a budget or offload, or with biases that do not fill whole 64 bytes, the unit of storage. */
TEST(products_of_one_x)
{
    static const shape whole = {"BERT", 3, 192, 3, 256, 3, 50, 2, false},
                       odd = {"BERT", 3, 216, 3, 256, 3, 50, 2, false};
    static const struct {
        const char *device, *precision, *update, *recompute;
        bool accumulate;
        int forward, weights; /* expected groups of three products: in the forward, of the weights'
                                 gradients */
    } c[] = {{"cuda", "bf16-true", "end", "cheap", false, 2, 2},
             {"cuda", "bf16-mixed", "end", "none", false, 2, 2},
             {"cuda", "32-true", "end", "cheap", false, 2, 2},
             {"cuda", "16-true", "end", "attention", false, 2, 2},
             {"cuda", "bf16-true", "backward", "cheap", false, 2, 2},
             {"cuda", "bf16-mixed", "end", "cheap", true, 2, 2},
             {"cuda", "bf16-true", "end", "none", true, 2, 2},
             {"cuda", "bf16-true", "end", "blocks", false, 3, 2},
             {"cuda*2", "bf16-true", "end", "cheap", false, 0, 0},
             {"cpu", "bf16-true", "end", "cheap", false, 0, 0},
             {"cuda", "bf16-true", "end", "cheap", true, 0, 2}}; /* this row runs the shape `odd` */
    for (int k = 0; k < TEST_COUNT(c); k++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        tt_value logits, loss;
        tt_compile_options o = tt_compile_options_default();
        ctx->options.verify = true;
        loss = encoder(t, k == TEST_COUNT(c) - 1 ? &odd : &whole, &logits);
        o.device = c[k].device;
        o.precision = c[k].precision;
        o.update = c[k].update;
        o.recompute = c[k].recompute;
        o.accumulate = c[k].accumulate;
        for (int i = 0; i < t->n_code && !strcmp(o.recompute, "blocks"); i++) {
            const char *name = t->code[i].op == TT__OP_LAYERNORM ? t->values[t->code[i].in[1]].name : "";
            if (strstr(name, "norm2")) tt_block_end(t, tt__handle(t, t->code[i].out[0]));
        }
        tt_program *p = tt_compile(t, loss, &o);
        if (!CHECK(p != NULL)) printf("%s\n", tt_error(ctx));
        REQUIRE(p != NULL);
        CHECK(persistent_lie_apart(p, true));
        const int forward = joined_products(p, TT__OP_LINEAR, 3);
        const int weights = joined_products(p, TT__OP_LINEAR_DW, 3);
        const int pairs = joined_products(p, TT__OP_LINEAR, 2) + joined_products(p, TT__OP_LINEAR_DW, 2);
        const bool right = forward == c[k].forward && weights == c[k].weights;
        if (!CHECK(right && pairs == (forward > 0) + (weights > 0)))
            printf("case %d: %d and %d groups, %d of two\n", k, forward, weights, pairs);
        tt_program_free(p);
        o.accumulate = true;
        for (int way = 0; k == 0 && way < 3; way++) { /* with groups, with offload, with a budget */
            o.parallel.groups = way == 0 ? 2 : 0;
            o.offload = way == 1 ? "optimizer" : NULL;
            o.memory_budget = way == 2 ? (size_t)1 << 40 : 0;
            if (!CHECK((p = tt_compile(t, loss, &o)) != NULL)) continue;
            CHECK(joined_products(p, TT__OP_LINEAR, 3) == 0 && joined_products(p, TT__OP_LINEAR_DW, 3) == 0);
            tt_program_free(p);
        }
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* If an earlier program has placed q, a later program does not join the products of q, k and v. */
TEST(products_of_programs_that_share)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_program *p[2] = {NULL, NULL};
    tt_tape *t[2];
    tt_compile_options o = tt_compile_options_default();
    o.device = "cuda";
    ctx->options.verify = true;
    for (int k = 0; k < 2; k++) {
        t[k] = tt_tape_new(ctx);
        const tt_value x = tt_input(t[k], "x", TT_F32, 32, 64), none = {0};
        const tt_attention_options heads = tt_attention_options_default(2);
        const tt_value q = tt_linear(t[k], x, matrix(ctx, "q", 64, 64), NULL);
        tt_value y = q;
        if (k) {
            const tt_value keys = tt_linear(t[k], x, matrix(ctx, "k", 64, 64), NULL);
            const tt_value values = tt_linear(t[k], x, matrix(ctx, "v", 64, 64), NULL);
            y = tt_attention(t[k], q, keys, values, tt_seq_start(t[k], "starts", 1), &heads);
        }
        o.accumulate = true;
        p[k] = tt_compile(t[k], tt_mean_squared_error(t[k], y, x, none), &o);
        REQUIRE(p[k] != NULL);
        o.share = p[0];
        CHECK(persistent_lie_apart(p[k], k == 0));
    }
    CHECK(joined_products(p[1], TT__OP_LINEAR, 3) == -1 && joined_products(p[1], TT__OP_LINEAR_DW, 3) == 1);
    for (int k = 0; k < 2; k++) tt_program_free(p[k]);
    for (int k = 0; k < 2; k++) tt_tape_free(t[k]);
    TEST_CLOSE(ctx, &a);
}

/* Records products `a = x w1` and `b = x w2`, and runs the pass that joins products. `between` 0: nothing is
   in between, and the products are joined. 1: an instruction in between reads a, so b moves up to a. 2: the
   instruction makes w2, so a moves down to b. 3: the instruction does both, so both products stay. 4 and 5:
   the products are not joined. In case 4 an op may work in place on a result; in case 5 a result is an
   output. */
TEST(products_that_meet)
{
    for (int between = 0; between < 6; between++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        const tt__shape square = {TT_F32, 16, 16, 0, 0};
        ctx->options.verify = true;
        t->alignment = 256;
        const int32_t x = tt_input(t, "x", TT_F32, 16, 16).id;
        const int32_t source = tt_input(t, "source", TT_F32, 16, 16).id;
        const int32_t w1 = tt__new_value(t, &square, TT__TRANSIENT, "w1");
        const int32_t w2 = tt__new_value(t, &square, TT__TRANSIENT, "w2");
        const int32_t y1 = tt__new_value(t, &square, TT__TRANSIENT, "a");
        const int32_t y2 = tt__new_value(t, &square, TT__TRANSIENT, "b");
        const int32_t apart = tt__new_value(t, &square, TT__TRANSIENT, "apart");
        const bool makes = between == 2 || between == 3;
        by_hand(t, TT__OP_ADD_ROW, 0, source, tt_input(t, "row", TT_F32, 1, 16).id, w1);
        if (!makes) by_hand(t, TT__OP_MUL, 0, source, source, w2);
        by_hand(t, TT__OP_LINEAR, 0, x, w1, y1);
        if (between == 1) by_hand(t, TT__OP_MUL, 0, y1, source, apart);
        if (makes) by_hand(t, TT__OP_MUL, 0, between == 3 ? y1 : source, source, w2);
        by_hand(t, TT__OP_LINEAR, 0, x, w2, y2);
        /* A last reader that is a sum can work in place; a product cannot. */
        if (between == 4) by_hand(t, TT__OP_ADD, 0, y1, y2, apart);
        const int32_t sum = tt__new_value(t, &square, TT__TRANSIENT, "sum");
        if (between != 4) by_hand(t, TT__OP_LINEAR, 0, y1, y2, sum);
        if (between == 5) tt_output(t, tt__handle(t, y1));
        by_hand(t, TT__OP_MUL, 0, source, source, tt__new_value(t, &square, TT__TRANSIENT, "last"));
        const int32_t root = between == 4 ? apart : sum;
        REQUIRE(tt__verify(t, "test") == TT_OK);
        const int n = t->n_code;
        CHECK(tt__pass_join(t, root) == TT_OK && tt__verify(t, "join") == TT_OK && t->n_code == n);
        int pairs = 0;
        for (int k = 0; k < n; k++) {
            if (!t->code[k].with_next) continue;
            const tt__tape_value *first = &t->values[t->code[k].out[0]];
            const tt__tape_value *second = &t->values[t->code[k + 1].out[0]];
            const tt__tape_value *above = &t->values[w1], *below = &t->values[w2];
            pairs++;
            CHECK(t->code[k].out[0] == y1 && t->code[k + 1].out[0] == y2);
            CHECK(first->base == second->base && first->base != y1 && first->offset == 0);
            CHECK(first->ld == 32 && second->ld == 32 && second->offset == 16);
            CHECK(above->base == below->base && above->ld == 16 && below->offset == 16 * 16);
            CHECK(t->values[first->base].shape.cols == 32 && t->values[above->base].shape.rows == 32);
        }
        if (!CHECK(pairs == (between < 3))) printf("case %d: %d pairs\n", between, pairs);
        if (pairs) CHECK(t->code[between == 2 ? 2 : 3].out[0] == (between == 2 ? y1 : y2));
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

enum { SAME_X = 36 }; /* number of reasons why two products of one operand are not joined */

/* Records two products of one operand, and reason number `way` why the products are not joined. */
static bool may_not_join(tt_context *ctx, int way, int *pairs)
{
    tt_tape *t = tt_tape_new(ctx);
    const tt__shape square = {TT_F32, 16, 16, 0, 0}, half = {TT_BF16, 16, 16, 0, 0};
    const tt__shape narrow = {TT_F32, 16, 2, 0, 0}, of_narrow = {TT_F32, 2, 16, 0, 0};
    t->alignment = 256;
    const int32_t x = tt_input(t, "x", TT_F32, 16, 16).id, other = tt_input(t, "other", TT_F32, 16, 16).id;
    int32_t w[2], y[2], u;
    for (int k = 0; k < 2; k++) {
        const bool thin = way == 1 + k; /* weight 0 or weight 1 is narrow */
        w[k] = tt__new_value(t, thin ? &of_narrow : &square, TT__TRANSIENT, "w%d", k);
        y[k] = tt__new_value(t, thin ? &narrow : k && way == 3 ? &half : &square, TT__TRANSIENT, "y%d", k);
        if (way == 4 && k) t->values[w[k]].storage = TT__GRADIENT;
        if (way == (k ? 5 : 34)) t->values[w[k]].persistent = true;
        by_hand(t, TT__OP_MUL, 0, other, other, w[k]);
    }
    if (way == 6) { /* the weight could be made in place of an operand */
        u = tt__new_value(t, &square, TT__TRANSIENT, "u");
        t->code[t->n_code - 1].out[0] = u;
        by_hand(t, TT__OP_ACTIVATION, 0, u, 0, w[1]);
        t->code[t->n_code - 1].attr.act = TT__ACT_GELU;
    }
    by_hand(t, TT__OP_LINEAR, 0, x, w[0], y[0]);
    by_hand(t, TT__OP_LINEAR, 0, way == 7 ? other : x, way == 8 ? w[0] : w[1], y[1]);
    tt__instr *a = &t->code[t->n_code - 2], *b = &t->code[t->n_code - 1];
    if (way == 35) b->in[1] = y[0];
    if (way == 9) b->in[3] = other;
    if (way == 10) b->in[2] = tt_input(t, "bias", TT_F32, 1, 16).id;
    if (way == 11) t->values[x].shape.dtype = TT__E4M3;
    if (way == 12) t->values[w[1]].shape.dtype = TT__E4M3;
    if (way == 13) b->attr.act = TT__ACT_GELU;
    if (way == 14) a->attr.act = TT__ACT_GELU;
    if (way == 15) b->attr.narrow = TT_BF16;
    if (way == 16) b->add = 1;
    if (way == 17) b->add_later = 1;
    if (way == 18) b->segment = TT__EACH_LAP;
    if (way == 19) b->stage = 1;
    if (way == 20) b->recomputed = true;
    if (way == 21) b->always = true;
    if (way == 22) b->later = true;
    if (way == 23) b->slot = 1;
    if (way == 24) b->once = 1;
    for (int k = 0; way == 25 && k < 40; k++) /* these ops make y1 live long */
        by_hand(t, TT__OP_MUL, 0, other, other, tt__new_value(t, &square, TT__TRANSIENT, "meanwhile"));
    u = tt__new_value(t, &square, TT__TRANSIENT, "last");
    if (way == 26) by_hand(t, TT__OP_MUL, 0, other, y[1], u); /* u could be made in place of y1 */
    if (way == 27) { /* a copy on another stream */
        t->values[u].space = TT__HOST;
        by_hand(t, TT__OP_COPY, 0, y[1], 0, u);
    }
    if (way == 28) tt_output(t, tt__handle(t, y[1]));
    if (way == 29) tt_block_end(t, tt__handle(t, y[1]));
    if (way == 30) tt_slice(t, tt__handle(t, y[1]), 0, 8);
    if (way == 31) t->values[y[1]].slots = 2;
    if (way == 32) t->values[y[1]].saved = true;
    if (way == 33) t->values[y[1]].space = TT__HOST;
    if (way != 26 && way != 27) by_hand(t, TT__OP_LINEAR, 0, other, y[1], u);
    by_hand(t, TT__OP_MUL, 0, other, other, tt__new_value(t, &square, TT__TRANSIENT, "end"));
    if (way == 25) { /* y0 is read right after both products, y1 at the end */
        tt__instr reads = tt__new_instr(TT__OP_LINEAR);
        reads.in[0] = other;
        reads.in[1] = y[0];
        reads.out[0] = tt__new_value(t, &square, TT__TRANSIENT, "soon");
        for (int k = 0; k < t->n_code; k++) {
            if (t->code[k].out[0] != y[1]) continue;
            by_hand(t, TT__OP_LINEAR, 0, 0, 0, 0);
            tt__move_instr(t, t->n_code - 1, k + 1);
            t->code[k + 1] = reads;
            break;
        }
    }
    const bool ok = tt__pass_join(t, u) == TT_OK;
    *pairs = 0;
    for (int k = 0; k < t->n_code; k++) *pairs += t->code[k].with_next;
    tt_tape_free(t);
    return ok;
}

TEST(products_that_do_not_join)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    int pairs;
    for (int way = 0; way < SAME_X; way++)
        if (!CHECK(may_not_join(ctx, way, &pairs) && pairs == (way == 0)))
            printf("way %d: %d pairs\n", way, pairs);
    TEST_CLOSE(ctx, &a);
}

/* c 0: three products of one operand, the third of which cannot be moved to the first two. c 1: a pair of
   products inside another pair that moves down. c 2: a pair whose weights were made in reverse order. */
TEST(products_among_others)
{
    for (int c = 0; c < 3; c++) {
        test_allocator a;
        tt_context *ctx = test_open(&a);
        tt_tape *t = tt_tape_new(ctx);
        const tt__shape square = {TT_F32, 16, 16, 0, 0};
        int32_t v[13];
        t->alignment = 256;
        for (int k = 0; k < 2; k++) v[k] = tt_input(t, k ? "x2" : "x", TT_F32, 16, 16).id;
        for (int k = 2; k < 13; k++) v[k] = tt__new_value(t, &square, TT__TRANSIENT, "v%d", k);
        const int32_t x = v[0], x2 = v[1], *w = v + 2, *y = v + 6; /* v[10] to v[12] are other results */
        const int32_t x3 = tt_input(t, "x3", TT_F32, 16, 16).id;
        for (int k = 0; k < 4; k++)
            if (c < 2 ? k != 2 : k < 2) by_hand(t, TT__OP_MUL, 0, x, x2, w[c == 2 ? 1 - k : k]);
        by_hand(t, TT__OP_LINEAR, 0, x, w[c == 2], y[0]);
        if (c == 0) {
            by_hand(t, TT__OP_LINEAR, 0, x, w[1], y[1]);
            by_hand(t, TT__OP_MUL, 0, y[1], x2, v[10]);
            by_hand(t, TT__OP_MUL, 0, x, x2, w[2]);
            by_hand(t, TT__OP_LINEAR, 0, x, w[2], y[2]);
            by_hand(t, TT__OP_MUL, 0, y[0], x2, v[11]);
        } else if (c == 1) {
            by_hand(t, TT__OP_LINEAR, 0, x2, w[1], y[1]);
            by_hand(t, TT__OP_MUL, 0, x, x2, w[2]);
            by_hand(t, TT__OP_LINEAR, 0, x, w[2], y[2]);
            by_hand(t, TT__OP_LINEAR, 0, x2, w[3], y[3]);
        } else {
            by_hand(t, TT__OP_LINEAR, 0, x, w[0], y[1]);
        }
        for (int k = 0; k < 4; k++) /* ops that cannot work in place read all results at the end */
            if (c == 1 || k < 3 - (c == 2))
                by_hand(t, TT__OP_LINEAR, 0, x3, y[k], tt__new_value(t, &square, TT__TRANSIENT, "end"));
        for (int k = 0; k < 4; k++)
            by_hand(t, TT__OP_MUL, 0, x, x2, tt__new_value(t, &square, TT__TRANSIENT, "last"));
        ctx->options.verify = true;
        REQUIRE(tt__verify(t, "test") == TT_OK);
        CHECK(tt__pass_join(t, v[12]) == TT_OK && tt__verify(t, "join") == TT_OK);
        int32_t of[8][2];
        int pairs = 0;
        for (int k = 0; k < t->n_code; k++) {
            if (!t->code[k].with_next || pairs == 8) continue;
            for (int e = 0; e < 2; e++) of[pairs][e] = t->code[k + e].out[0];
            pairs++;
        }
        if (c == 0) CHECK(pairs >= 1 && of[0][0] == y[0] && of[0][1] == y[1]);
        if (c == 1) CHECK(pairs >= 2 && of[0][0] == y[1] && of[0][1] == y[3] && of[1][0] == y[0]);
        if (c == 2) CHECK(pairs >= 1 && of[0][0] == y[1] && of[0][1] == y[0]);
        for (int k = 0; k < pairs && c == 0; k++) CHECK(of[k][0] != y[2] && of[k][1] != y[2]);
        tt_tape_free(t);
        TEST_CLOSE(ctx, &a);
    }
}

/* Launches whose matrices are adjacent become one launch. Other launches remain, in their order. */
TEST(launches_that_become_one)
{
    enum { ROWS = 3, D = 4, N = 5 };
    static float x[ROWS * D], w[N * D * D], b[N * D], y[ROWS * N * D], dw[N * D * D];
    for (int c = 0; c < 14; c++) {
        tt__launch l[N];
        tt__instr i = tt__new_instr(c % 2 ? TT__OP_LINEAR_DW : TT__OP_LINEAR);
        const bool sums = i.op == TT__OP_LINEAR_DW;
        /* The difference of launch 2. `odd` 1: another x; 2: a weight stored elsewhere; 3: no bias; 4: fewer
           rows; 5: another dtype; 6: a larger row stride. */
        const int odd = c / 2;
        memset(l, 0, sizeof l);
        for (int k = 0; k < N; k++) {
            const tt__mat of_x = {k == 2 && odd == 1 ? x + D : x, TT_F32, ROWS, D, D};
            const tt__mat of_b = {b + k * D, TT_F32, 1, D, D};
            tt__mat of_y = {y + k * D, TT_F32, ROWS, D, N * D};
            tt__mat of_w = {(sums ? dw : w) + k * D * D, TT_F32, D, D, D};
            const bool without = k == 2 && odd == 3;
            if (k == 2 && odd == 2) of_w.data = x;
            if (k == 2 && odd == 4) of_y.rows--;
            if (k == 2 && odd == 5) of_y.dtype = TT_I32;
            if (k == 2 && odd == 6) of_y.ld++;
            l[k].instr = &i;
            l[k].in[0] = sums ? of_y : of_x;
            l[k].in[1] = sums ? of_x : of_w;
            l[k].out[0] = sums ? of_w : of_y;
            if (!without) *(sums ? &l[k].out[1] : &l[k].in[2]) = of_b;
        }
        const int left = tt__join_launches(l, N);
        CHECK(left == (odd ? 3 : 1));
        for (int k = 0; k < left; k++) {
            /* Without an odd launch, all launches become one. Otherwise launches 0 and 1 become one, launch 2
               stays, and launches 3 and 4 become one. */
            const int many = !odd ? N : k == 1 ? 1 : 2, at = odd && k ? k + 1 : 0;
            const tt__mat *of_y = sums ? &l[k].in[0] : &l[k].out[0];
            const tt__mat *of_w = sums ? &l[k].out[0] : &l[k].in[1];
            const tt__mat *of_b = sums ? &l[k].out[1] : &l[k].in[2];
            const tt__mat *of_x = sums ? &l[k].in[1] : &l[k].in[0];
            CHECK(of_y->data == y + at * D && of_y->cols == many * D);
            CHECK(of_y->rows == ROWS - (odd == 4 && k == 1));
            CHECK(of_w->rows == many * D && of_w->cols == D && of_x->rows == ROWS && of_x->cols == D);
            CHECK((odd == 3 && k == 1) || (of_b->data == b + at * D && of_b->cols == many * D));
        }
    }
}
