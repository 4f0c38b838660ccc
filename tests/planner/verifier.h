/* Tests that the verifier finds damage of tapes and plans. */
#pragma once

/* ------------------------------------------------------------------------------------------------- damage
   Builds a small program through the private API, and breaks one thing at a time. */

typedef struct damaged {
    tt_context *ctx;
    tt_tape *t;
    tt_value x, h, y, target, loss;
    test_allocator a;
} damaged;

static bool intact(damaged *d) /* builds x -> linear -> gelu -> mean squared error */
{
    d->ctx = test_open(&d->a);
    if (!d->ctx) return false;
    d->ctx->options.verify = true;
    d->t = tt_tape_new(d->ctx);
    d->x = tt_input(d->t, "x", TT_F32, 6, 4);
    d->target = tt_input(d->t, "target", TT_F32, 6, 4);
    d->h = tt_linear(d->t, d->x, matrix(d->ctx, "w", 4, 4), vector(d->ctx, "b", 4, TT_INIT_ZEROS));
    d->y = tt_gelu(d->t, d->h);
    d->loss = tt_mean_squared_error(d->t, d->y, d->target, tt__handle(d->t, 0));
    return tt_tape_status(d->t) == TT_OK && tt__verify(d->t, "test") == TT_OK;
}

static void expect_damage(damaged *d, const char *text, const char *file, int line)
{
    test__check(tt__verify(d->t, "test") == TT_ERR_INTERNAL, file, line, text);
    test__error(d->ctx, TT_ERR_INTERNAL, "after pass 'test'", file, line);
    test__error(d->ctx, TT_ERR_INTERNAL, text, file, line);
    tt_tape_free(d->t);
    test__close(d->ctx, &d->a, file, line);
}
#define EXPECT_DAMAGE(d, text) expect_damage((d), (text), __FILE__, __LINE__)

TEST(verifier_finds_damage)
{
    damaged d;
    tt__instr swap;

    REQUIRE(intact(&d)); /* moves gelu before its linear */
    swap = d.t->code[0]; d.t->code[0] = d.t->code[1]; d.t->code[1] = swap;
    EXPECT_DAMAGE(&d, "reads a value that nothing has written: 'linear.0'");

    REQUIRE(intact(&d)); /* removes the linear */
    tt__index(d.t);
    tt__drop(d.t, 0);
    CHECK(tt__settle(d.t, d.t->n_code) == TT_OK);
    EXPECT_DAMAGE(&d, "instruction 0 (gelu): reads a value that nothing has written: 'linear.0'");

    REQUIRE(intact(&d)); /* gelu writes linear's result */
    d.t->code[1].in[0] = d.x.id;
    d.t->code[1].out[0] = d.h.id;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): writes a value a second time: 'linear.0'");

    REQUIRE(intact(&d));
    d.t->values[d.y.id].shape.cols = 5;
    EXPECT_DAMAGE(&d, "result has another shape than the op's rule gives: 'gelu.1' f32 (6, 5)");

    REQUIRE(intact(&d));
    d.t->values[d.y.id].shape.rows = 7;
    EXPECT_DAMAGE(&d, "result has another shape than the op's rule gives: 'gelu.1' f32 (7, 4)");

    REQUIRE(intact(&d));
    d.t->code[0].segment = TT__EACH_STEP;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): follows an instruction of a later segment");

    REQUIRE(intact(&d)); /* the target has the wrong width, which the op's rule reports */
    d.t->values[d.target.id].shape.cols = 3;
    EXPECT_DAMAGE(&d, "mean_squared_error: operand 1 is 'target' f32 (6, 3), expected (6, 4)");

    REQUIRE(intact(&d));
    d.t->values[d.y.id].shape.dtype = TT_I32;
    EXPECT_DAMAGE(&d, "result has the wrong dtype: 'gelu.1' i32");

    REQUIRE(intact(&d)); /* statistics must be f32 */
    d.t->values[d.loss.id].shape.dtype = TT_BF16;
    EXPECT_DAMAGE(&d, "result has the wrong dtype: 'mean_squared_error.2' bf16");

    REQUIRE(intact(&d));
    d.t->code[1].add = 1;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): adds to a value that nothing has written: 'gelu.1'");

    REQUIRE(intact(&d));
    d.t->code[1].out[0] = d.target.id;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): overwrites: 'target'");

    REQUIRE(intact(&d)); /* the result y becomes a parameter */
    d.t->values[d.y.id].storage = TT__PARAMETER;
    d.t->values[d.y.id].param = 0;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): overwrites: 'gelu.1'");

    REQUIRE(intact(&d));
    d.t->code[0].in[3] = d.t->n_values;
    EXPECT_DAMAGE(&d, "instruction 0 (linear): operand is no value");

    REQUIRE(intact(&d));
    d.t->code[1].in[1] = d.x.id;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): operand is no value");

    REQUIRE(intact(&d));
    d.t->code[1].out[0] = d.t->n_values + 3;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): result is no value");

    REQUIRE(intact(&d));
    d.t->code[1].out[1] = d.h.id;
    EXPECT_DAMAGE(&d, "instruction 1 (gelu): writes an output that the op does not have: 'linear.0'");

    REQUIRE(intact(&d)); /* with verify off nothing is checked */
    d.t->code[1].add = 1;
    d.ctx->options.verify = false;
    CHECK(tt__verify(d.t, "test") == TT_OK);
    tt_tape_free(d.t);
    TEST_CLOSE(d.ctx, &d.a);
}

static tt__box box_of(int first, int last, size_t bytes, size_t place)
{
    tt__box b;
    memset(&b, 0, sizeof b);
    b.first = first;
    b.last = last;
    b.bytes = bytes;
    b.place = place;
    return b;
}

TEST(verifier_finds_bad_places)
{
    damaged d;
    tt__box box[3];
    REQUIRE(intact(&d));
    box[0] = box_of(0, 3, 128, 0);
    box[1] = box_of(2, 5, 64, 128);
    box[2] = box_of(4, 6, 64, 0);
    for (int k = 0; k < 3; k++) box[k].merged = k;
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_OK);
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 191) == TT_ERR_INTERNAL);
    CHECK_ERROR(d.ctx, TT_ERR_INTERNAL, "storage 1 of 64 bytes at 128 leaves its region of 191");
    box[2].place = 192;
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_ERR_INTERNAL);
    CHECK_ERROR(d.ctx, TT_ERR_INTERNAL, "storage 2 of 64 bytes at 192 leaves its region of 192");
    box[2].place = 96; /* a place that is not aligned */
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 1024) == TT_ERR_INTERNAL);
    box[2].place = 128;
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_ERR_INTERNAL);
    CHECK_ERROR(d.ctx, TT_ERR_INTERNAL, "storages 2 and 1 overlap while both are in use");
    box[2].place = 64; /* overlaps box 0, which is dead by then */
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_OK);
    box[2].first = 3;
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_ERR_INTERNAL);
    box[2].merged = 0; /* box 2 may take the place of box 0: the verifier accepts it */
    box[2].place = 0;
    CHECK(tt__verify_places(d.t, box, 3, TT__DEVICE, 192) == TT_OK);
    tt_tape_free(d.t);
    TEST_CLOSE(d.ctx, &d.a);
}

/* -------------------------------------------------------------------------------- streams, spaces and groups
   The test builds the tapes itself. */

/* The value `h = gelu(x)` is copied to the host's memory while `u = gelu(x)` is computed, and is copied back
   while `u2 = gelu(u)` is computed. */
typedef struct offload { damaged d; int32_t h, a, u, b, u2, y; } offload;
enum { COPY_OUT = 1, MEANWHILE, WAIT_OUT, COPY_IN, AFTER, WAIT_IN, SUM };

static void by_hand(tt_tape *t, int op, int stream, int32_t in0, int32_t in1, int32_t out)
{
    tt__instr *i = tt__append(t, op);
    i->stream = stream;
    i->in[0] = in0;
    i->in[1] = in1;
    i->out[0] = out;
}

static int32_t copy_of(tt_tape *t, int32_t v, tt__space space, const char *name)
{
    tt__shape shape = t->values[v].shape;
    int32_t id = tt__new_value(t, &shape, TT__TRANSIENT, "%s", name);
    t->values[id].space = space;
    return id;
}

static int32_t gelu(tt_tape *t, int32_t x, const char *name)
{
    tt_value y = tt_gelu(t, tt__handle(t, x));
    tt_name(t, y, "%s", name);
    return y.id;
}

static bool offloaded(offload *o)
{
    damaged *d = &o->d;
    d->ctx = test_open(&d->a);
    if (!d->ctx) return false;
    d->ctx->options.verify = true;
    tt_tape *t = d->t = tt_tape_new(d->ctx);
    d->x = tt_input(t, "x", TT_F32, 40, 4);
    o->h = gelu(t, d->x.id, "h");
    o->a = copy_of(t, o->h, TT__HOST, "a");
    o->b = copy_of(t, o->h, TT__DEVICE, "b");
    by_hand(t, TT__OP_COPY, 1, o->h, 0, o->a);
    o->u = gelu(t, d->x.id, "u");
    by_hand(t, TT__OP_WAIT, 0, o->a, o->h, 0);
    by_hand(t, TT__OP_COPY, 2, o->a, 0, o->b);
    o->u2 = gelu(t, o->u, "u2");
    by_hand(t, TT__OP_WAIT, 0, o->b, o->a, 0);
    o->y = tt_add(t, tt__handle(t, o->b), tt__handle(t, o->u2)).id;
    return tt_tape_status(t) == TT_OK && t->n_code == SUM + 1 && tt__verify(t, "test") == TT_OK;
}

TEST(verifier_finds_what_is_not_waited_for)
{
    offload o;
    tt__instr swap, *code;

    REQUIRE(offloaded(&o)); /* b is used before the wait */
    code = o.d.t->code;
    swap = code[WAIT_IN]; code[WAIT_IN] = code[SUM]; code[SUM] = swap;
    EXPECT_DAMAGE(&o.d, "instruction 6 (add): is not waited for before it is read: 'b'");

    REQUIRE(offloaded(&o)); /* changes the operand of a copy during the copy */
    o.d.t->code[MEANWHILE].out[0] = o.h;
    o.d.t->code[MEANWHILE].add = 1;
    EXPECT_DAMAGE(&o.d, "instruction 2 (gelu): is not waited for before it is written: 'h'");

    REQUIRE(offloaded(&o)); /* writes the result of a copy during the copy */
    o.d.t->code[AFTER].out[0] = o.b;
    o.d.t->code[AFTER].add = 1;
    EXPECT_DAMAGE(&o.d, "instruction 5 (gelu): is not waited for before it is written: 'b'");

    REQUIRE(offloaded(&o)); /* removes the wait for b */
    o.d.t->code[SUM].in[0] = o.u;
    o.d.t->code[WAIT_IN] = o.d.t->code[SUM];
    o.d.t->n_code--;
    EXPECT_DAMAGE(&o.d, "instruction 4 (copy): is never waited for: 'b'");

    REQUIRE(offloaded(&o)); /* waits for b twice */
    by_hand(o.d.t, TT__OP_WAIT, 0, o.b, o.a, 0);
    EXPECT_DAMAGE(&o.d, "instruction 8 (wait): waits for a value that is not in flight: 'b'");

    REQUIRE(offloaded(&o)); /* a wait that does not keep the copy's operand */
    o.d.t->code[WAIT_OUT].in[1] = 0;
    EXPECT_DAMAGE(&o.d, "instruction 3 (wait): does not keep all operands of the instruction that it waits "
                  "for: 'a'");

    REQUIRE(offloaded(&o));
    o.d.t->code[WAIT_OUT].in[0] = o.h;
    EXPECT_DAMAGE(&o.d, "instruction 3 (wait): waits for a value that is not in flight: 'h'");

    REQUIRE(offloaded(&o)); /* micro-batches would start the copy often, and updates wait once */
    for (int k = WAIT_IN; k <= SUM; k++) o.d.t->code[k].segment = TT__EACH_STEP;
    EXPECT_DAMAGE(&o.d, "instruction 6 (wait): waits in another segment or stream: 'b'");

    REQUIRE(offloaded(&o)); /* kernels cannot access the host's memory */
    o.d.t->code[SUM].in[1] = o.a;
    EXPECT_DAMAGE(&o.d, "instruction 7 (add): cannot read the host's memory: 'a'");

    REQUIRE(offloaded(&o));
    o.d.t->values[o.u2].space = TT__HOST;
    EXPECT_DAMAGE(&o.d, "instruction 5 (gelu): cannot write the host's memory: 'u2'");

    REQUIRE(offloaded(&o)); /* u2 may be in the host's memory if the device uses that memory */
    o.d.t->values[o.u2].space = TT__HOST;
    o.d.t->host = true;
    CHECK(tt__verify(o.d.t, "test") == TT_OK);
    tt_tape_free(o.d.t);
    TEST_CLOSE(o.d.ctx, &o.d.a);
}

TEST(verifier_finds_bad_groups)
{
    offload o;

    REQUIRE(offloaded(&o));
    o.d.t->code[AFTER].with_next = true;
    EXPECT_DAMAGE(&o.d, "instruction 5 (gelu): runs together with an instruction of another op");

    REQUIRE(offloaded(&o)); /* u runs together with u2, which reads u */
    o.d.t->code[WAIT_OUT] = o.d.t->code[COPY_OUT];
    o.d.t->code[COPY_OUT] = o.d.t->code[MEANWHILE];
    o.d.t->code[MEANWHILE] = o.d.t->code[AFTER];
    o.d.t->code[COPY_OUT].with_next = true;
    EXPECT_DAMAGE(&o.d, "instruction 2 (gelu): reads a value that an instruction of its group writes: 'u'");
}
