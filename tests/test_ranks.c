/* Tests of ranks: waits for one another, and collectives compared with plain loops.

   One thread per member launches a collective, in the order of a run: barrier; each member sums or fetches
   its shard; barrier; each member copies the other members' shards; barrier. The test then compares every
   byte of every member's memory with the result of a plain loop, which sums by its own recursion and rounds
   each sum. The test also compares the sums with sums in float64. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

static uint32_t pick(uint64_t *state, uint32_t n) { return test_random(state) % n; }

/* ------------------------------------------------------------------------------------------------ threads */

typedef struct rank_thread {
    void (*run)(void *arg, int rank);
    void *arg;
    int rank;
    pthread_t handle;
} rank_thread;

static void *rank_main(void *arg)
{
    const rank_thread *r = (const rank_thread *)arg;
    r->run(r->arg, r->rank);
    return NULL;
}

/* Runs run(arg, rank) on a thread for each rank. Rank 0 runs on the calling thread, which may make checks. */
static void on_ranks(int ranks, void (*run)(void *arg, int rank), void *arg)
{
    rank_thread r[TT__RANKS];
    for (int k = 1; k < ranks; k++) {
        r[k].run = run;
        r[k].arg = arg;
        r[k].rank = k;
        if (pthread_create(&r[k].handle, NULL, rank_main, &r[k]) != 0) { perror("pthread_create"); exit(2); }
    }
    run(arg, 0);
    for (int k = 1; k < ranks; k++) pthread_join(r[k].handle, NULL);
}

/* ------------------------------------------------------------------------------------------------ meeting */

/* `data * tensor` ranks that pass barriers like the ranks of a program. */
typedef struct barrier {
    tt__rank_group *rank_group;
    int data, tensor, rounds;
    /* Rank at_fault fails after at_round barriers; -1: no rank fails. If `nap`, the rank sleeps before it
       fails, so that the other ranks already sleep in a barrier. */
    int at_fault, at_round;
    bool nap;
    int round[TT__RANKS];   /* not atomic, because a barrier makes a rank's writes visible to the others */
    int wrong[TT__RANKS], met[TT__RANKS];
} barrier;

static tt__members ranks_of(const barrier *m, int rank, tt__over over)
{
    const tt__members data = {rank % m->tensor, m->tensor, m->data},
                      tensor = {rank - rank % m->tensor, 1, m->tensor},
                      all = {0, 1, m->data * m->tensor};
    return over == TT__OVER_DATA ? data : over == TT__OVER_TENSOR ? tensor : all;
}

static void meet_and_look(barrier *m, int rank, tt__over over, int round)
{
    const tt__members members = ranks_of(m, rank, over);
    m->round[rank] = round;
    m->wrong[rank] += !tt__barrier(m->rank_group, rank, members);
    for (int k = 0; k < members.count; k++)
        m->wrong[rank] += m->round[members.first + k * members.stride] != round;
    /* This barrier lets all ranks read the numbers of this round before a rank writes the next number. */
    m->wrong[rank] += !tt__barrier(m->rank_group, rank, members);
}

static void meet_often(void *arg, int rank)
{
    barrier *m = (barrier *)arg;
    for (int k = 0; k < m->rounds; k++) meet_and_look(m, rank, TT__ALONE, k);
}

/* The tensor ranks of each data rank pass more barriers than those of the previous data rank. */
static void meet_along_axes(void *arg, int rank)
{
    barrier *m = (barrier *)arg;
    for (int k = 0; k < m->rounds; k++) {
        meet_and_look(m, rank, TT__OVER_DATA, 10 * k);
        for (int i = 0; i <= rank / m->tensor; i++) meet_and_look(m, rank, TT__OVER_TENSOR, 10 * k + i);
    }
}

static void meet_until_one_fails(void *arg, int rank)
{
    const struct timespec nap = {0, 2000000};
    barrier *m = (barrier *)arg;
    for (m->met[rank] = 0; m->met[rank] < m->rounds; m->met[rank]++) {
        if (rank == m->at_fault && m->met[rank] == m->at_round) {
            if (m->nap) nanosleep(&nap, NULL);
            tt__fail(m->rank_group->ctx, TT_ERR_NUMERIC, "rank %d is at fault", rank);
            tt__rank_group_fail(m->rank_group);
        }
        if (!tt__barrier(m->rank_group, rank, ranks_of(m, rank, TT__ALONE))) return;
    }
}

static barrier meeting_of(tt_context *ctx, int data, int tensor, int rounds)
{
    barrier m;
    memset(&m, 0, sizeof m);
    m.rank_group = tt__rank_group_new(ctx, data * tensor, 600);
    m.data = data;
    m.tensor = tensor;
    m.rounds = rounds;
    m.at_fault = -1;
    return m;
}

static bool all_met(const barrier *m)
{
    int wrong = 0;
    for (int k = 0; k < m->data * m->tensor; k++) wrong += m->wrong[k];
    return wrong == 0;
}

TEST(ranks_meet) /* runs more ranks than the machine has processors, too */
{
    static const int ranks[] = {1, 2, 3, 8, 64}, rounds[] = {100, 2000, 1000, 300, 30};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < TT__COUNT(ranks); k++) {
        barrier m = meeting_of(ctx, ranks[k], 1, rounds[k]);
        REQUIRE(m.rank_group);
        on_ranks(ranks[k], meet_often, &m);
        CHECK(all_met(&m));
        tt__rank_group_free(m.rank_group);
    }
    a.fail_at = a.calls + 1;
    CHECK(!tt__rank_group_new(ctx, 2, 600) && a.failed && tt_error_code(ctx) == TT_ERR_MEMORY);
    TEST_CLOSE(ctx, &a);
}

TEST(ranks_meet_along_each_axis)
{
    static const int data[] = {2, 3, 4, 1}, tensor[] = {2, 3, 1, 4};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < TT__COUNT(data); k++) {
        barrier m = meeting_of(ctx, data[k], tensor[k], 100);
        REQUIRE(m.rank_group);
        on_ranks(data[k] * tensor[k], meet_along_axes, &m);
        CHECK(all_met(&m));
        tt__rank_group_free(m.rank_group);
    }
    TEST_CLOSE(ctx, &a);
}

/* No rank waits for a rank that fails, whether the other ranks run or sleep. After a reset all ranks pass
   barriers again. */
TEST(a_rank_that_fails_ends_all_waits)
{
    static const int sizes[] = {2, 3, 8, 64};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int s = 0; s < TT__COUNT(sizes); s++) {
        barrier m = meeting_of(ctx, sizes[s], 1, 20);
        REQUIRE(m.rank_group);
        for (int k = 0; k < 8; k++) {
            char text[64];
            m.at_fault = k % 4 == 0 ? 0 : k % 4 == 1 ? sizes[s] - 1 : k % sizes[s];
            m.at_round = k / 4 * 7;
            m.nap = k % 2;
            on_ranks(sizes[s], meet_until_one_fails, &m);
            snprintf(text, sizeof text, "rank %d is at fault", m.at_fault);
            CHECK_ERROR(ctx, TT_ERR_NUMERIC, text);
            for (int r = 0; r < sizes[s]; r++) /* a rank that may still be leaving a barrier may have
                                                  counted one round less */
                CHECK(m.met[r] == m.at_round || (m.met[r] == m.at_round - 1 && r != m.at_fault));
            tt__rank_group_reset(m.rank_group);
            m.at_fault = -1;
            on_ranks(sizes[s], meet_until_one_fails, &m);
            for (int r = 0; r < sizes[s]; r++) CHECK(m.met[r] == m.rounds);
        }
        tt__rank_group_free(m.rank_group);
    }
    TEST_CLOSE(ctx, &a);
}

static void meet_but_the_last(void *arg, int rank)
{
    barrier *m = (barrier *)arg;
    if (rank < m->data - 1) m->met[rank] = tt__barrier(m->rank_group, rank, ranks_of(m, rank, TT__ALONE));
}

TEST(a_rank_that_does_not_come_is_named)
{
    static const int sizes[] = {2, 3, 8};
    static const double timeouts[] = {0.03, 0, 1.01}; /* seconds */
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int s = 0; s < TT__COUNT(sizes); s++) {
        char text[64];
        barrier m = meeting_of(ctx, sizes[s], 1, 0);
        REQUIRE(m.rank_group);
        for (int r = 0; r < sizes[s]; r++) m.met[r] = true;
        m.rank_group->timeout = timeouts[s];
        on_ranks(sizes[s], meet_but_the_last, &m);
        for (int r = 0; r < sizes[s] - 1; r++) CHECK(!m.met[r]);
        snprintf(text, sizeof text, "has waited %g s for rank ", timeouts[s]);
        CHECK_ERROR(ctx, TT_ERR_DEVICE, text);
        snprintf(text, sizeof text, "for rank %d, which has not arrived", sizes[s] - 1);
        if (timeouts[s] > 0) CHECK_ERROR(ctx, TT_ERR_DEVICE, text); /* with timeout 0 any rank may be late */
        tt__rank_group_free(m.rank_group);
    }
    TEST_CLOSE(ctx, &a);
}

/* ----------------------------------------------------------------------------------- several processes */

/* Simulates a network without messages. The 50th question whether a process has ended finds the end of
   process 1. */
static int looks;

static const char *no_message(tt__net *n, tt__request *r)
{
    (void)n;
    r->done = false;
    return NULL;
}

static const char *late_end(tt__net *n, int *from, void *data, size_t bytes)
{
    tt__end end;
    memset(&end, 0, sizeof end);
    snprintf(end.why, sizeof end.why, "this");
    (void)n;
    *from = ++looks == 50 ? 1 : -1;
    if (*from > 0) memcpy(data, &end, bytes);
    return NULL;
}

typedef struct waits { tt__net *net; tt_status status[2]; bool come[2]; } waits;

static void wait_for_message(void *arg, int rank)
{
    waits *w = (waits *)arg;
    tt__request r = {0, 1, false, false};
    const char *why;
    int late;
    w->come[rank] = tt__net_wait(w->net, NULL, &r, 1, &late, &why);
    w->status[rank] = tt__net_waited(w->net, "here", late, why);
}

/* Two ranks of a process each wait for a message while the other process ends. The rank that learns
   of the end must not write data that the other rank is reading. ThreadSanitizer checks this. */
TEST(ranks_wait_for_a_process_that_ends)
{
    static const tt__transport transport = {NULL, NULL, no_message, late_end, NULL};
    tt_context_options o = tt_context_options_default();
    o.threads = 1;
    o.timeout = 60; /* yet ranks wait at most 2 seconds for an ended process */
    tt_context *ctx = tt_open(&o);
    REQUIRE(ctx != NULL);
    tt__net *n = (tt__net *)calloc(1, sizeof *n);
    REQUIRE(n != NULL);
    waits w = {n, {TT_OK, TT_OK}, {true, true}};
    n->ctx = ctx;
    n->transport = &transport;
    n->processes = 2;
    n->ranks = 2;
    snprintf(n->host[1], sizeof n->host[1], "b");
    snprintf(n->last_message[1], sizeof n->last_message[1], "reduce 'x'");
    pthread_mutex_init(&n->mutex, NULL);
    looks = 0;
    on_ranks(2, wait_for_message, &w);
    CHECK(!w.come[0] && !w.come[1]);
    CHECK(w.status[0] == TT_ERR_DEVICE && w.status[1] == TT_ERR_DEVICE);
    CHECK_ERROR(ctx, TT_ERR_DEVICE,
                "here: one of the ranks 2 to 3, process 1 (b), has closed its context, after: this");
    pthread_mutex_lock(&n->mutex);
    n->has_ended[1] = false;
    pthread_mutex_unlock(&n->mutex);
    ctx->options.timeout = 0.01;
    wait_for_message(&w, 0);
    CHECK_ERROR(ctx, TT_ERR_DEVICE, "here: one of the ranks 2 to 3, process 1 (b), has not arrived within "
                "0.01 s; its last message came in reduce 'x'");
    pthread_mutex_destroy(&n->mutex);
    free(n);
    tt_close(ctx);
}

/* Messages may take as long as they need while some arrive: the other ranks wait for a rank that waits for
   messages, and do not call that rank late. */
typedef struct patience { tt__rank_group *rank_group; bool waits, met; } patience;

static void be_outside(void *arg, int rank)
{
    patience *x = (patience *)arg;
    const tt__members both = {0, 1, 2};
    if (rank && x->waits) __atomic_add_fetch(&x->rank_group->outside, 1, __ATOMIC_SEQ_CST);
    if (rank) usleep(600000);
    if (rank && x->waits) __atomic_sub_fetch(&x->rank_group->outside, 1, __ATOMIC_SEQ_CST);
    const bool met = tt__barrier(x->rank_group, rank, both);
    if (!rank) x->met = met;
}

TEST(ranks_let_others_wait_for_messages)
{
    tt_context *ctx = tt_open(NULL);
    REQUIRE(ctx != NULL);
    for (int waits = 0; waits < 2; waits++) {
        patience x = {tt__rank_group_new(ctx, 2, 0.15), waits == 1, false};
        REQUIRE(x.rank_group != NULL);
        tt__rank_group_note(x.rank_group, 0, "reduce", "d(w)");
        tt__rank_group_note(x.rank_group, 1, "linear", "y");
        on_ranks(2, be_outside, &x);
        CHECK(x.met == x.waits);
        tt__rank_group_free(x.rank_group);
    }
    CHECK_ERROR(ctx, TT_ERR_DEVICE, "rank 0 has waited 0.15 s for rank 1, which has not arrived at reduce "
                "'d(w)'; that rank is at linear 'y'");
    tt_close(ctx);
}

TEST(pieces_of_ranks_make_the_whole)
{
    static const int64_t elements[] = {0, 1, 2, 6, 7, 8, 4096, 4097, 12289, 1000003, TT__MAX_ELEMENTS},
                         units[] = {1, 7, 4096, (int64_t)1 << 40};
    static tt_tape tape;
    for (int e = 0; e < TT__COUNT(elements); e++)
        for (int u = 0; u < TT__COUNT(units); u++)
            for (int members = 1; members <= TT__RANKS; members++)
                for (int root = 0; root < 2; root++) {
                    int64_t sum = 0, max = 0;
                    for (int k = 0; k < members; k++) {
                        int64_t first, n = tt__shard(elements[e], units[u], root, k, members, &first);
                        bool whole_units = first == elements[e] || first % units[u] == 0;
                        CHECK(n >= 0 && first == sum && whole_units);
                        CHECK(!root || n == (k ? 0 : elements[e]));
                        sum += n;
                        max = tt__max(max, n);
                    }
                    CHECK(sum == elements[e]);
                    const tt__part part = {TT__WHOLE, root, units[u], elements[e]};
                    tape.data = members;
                    const int64_t room = tt__shard_shape(&tape, TT_F32, &part).cols;
                    CHECK(max <= room && room < max + units[u]);
                }
}

/* -------------------------------------------------------------------------------------------- collectives */

enum { MAX_MEMBERS = 64, GUARD = 64 /* bytes before and after each member's operands */ };

typedef struct collective {
    int op;
    tt_dtype dtype;
    tt__move move;
    bool add, in_place;
    int64_t elements, cols;     /* elements of the whole operand; columns in a row */
    int present, shift;         /* shift: elements by which operands are unaligned */
    uint64_t seed;              /* seed of the numbers */
} collective;

/* State shared by the members of a test. Each member has memory for its x (or all slots) and its y. */
typedef struct collective_test {
    tt_context *ctx;
    tt__rank_group *rank_group;
    const char *isa;
    int members, cases;
    int64_t max;               /* max elements of an operand */
    tt__cpu cpu[MAX_MEMBERS];
    char *memory[MAX_MEMBERS], *before[MAX_MEMBERS], *expected;
    tt__mat in[MAX_MEMBERS], out[MAX_MEMBERS];
    int ran[TT__OP_COUNT];
} collective_test;

static double get(const void *memory, tt_dtype dtype, int64_t k)
{
    switch (dtype) {
    case TT_F32: return (double)((const float *)memory)[k];
    case TT_BF16: return (double)tt__from_bf16(((const uint16_t *)memory)[k]);
    case TT_F16: return (double)tt__from_f16(((const uint16_t *)memory)[k]);
    default: return ((const double *)memory)[k];
    }
}

static void put(void *memory, tt_dtype dtype, int64_t k, double x)
{
    switch (dtype) {
    case TT_F32: ((float *)memory)[k] = (float)x; break;
    case TT_BF16: ((uint16_t *)memory)[k] = tt__to_bf16((float)x); break;
    case TT_F16: ((uint16_t *)memory)[k] = tt__to_f16((float)x); break;
    default: ((double *)memory)[k] = x; break;
    }
}

/* Returns the sum, maximum or minimum of two numbers, rounded to the dtype. */
static double two(const collective *c, double a, double b)
{
    const bool wide = c->dtype == TT__F64;
    double sum = wide ? a + b : (double)((float)a + (float)b);
    uint16_t half = c->dtype == TT_BF16 ? tt__to_bf16((float)sum) : tt__to_f16((float)sum);
    if (c->move.reduce != TT__SUM) {
        bool first = c->move.reduce == TT__MAX ? a > b : a < b;
        return a != a ? a : b != b ? b : first ? a : b;
    }
    if (wide || c->dtype == TT_F32) return sum;
    return (double)(c->dtype == TT_BF16 ? tt__from_bf16(half) : tt__from_f16(half));
}

/* Reduces x[from], ... by a tree with `span` leaves, a power of two; only the first n numbers exist. */
static double tree(const collective *c, const double *x, int from, int span, int n)
{
    if (span == 1) return x[from];
    double left = tree(c, x, from, span / 2, n);
    return from + span / 2 >= n ? left : two(c, left, tree(c, x, from + span / 2, span / 2, n));
}

/* Returns an element of the result from the members' x. y: the number that the result adds to, or NULL. */
static double reduced(const collective *c, const double *x, const double *y)
{
    double all = tree(c, x, 0, TT__RANKS, c->present);
    return y ? two(c, *y, all) : all;
}

/* Tells whether a sum of finite numbers is near the sum in float64, within the rounding of each addition. */
static bool near_sum(const collective *c, const double *x, const double *y, double got)
{
    const double unit = c->dtype == TT_BF16 ? 0x1p-8 : c->dtype == TT_F16 ? 0x1p-11
                      : c->dtype == TT_F32 ? 0x1p-24 : 0x1p-52;
    double sum = y ? *y : 0, magnitude = fabs(sum), levels = y ? 1 : 0;
    for (int k = 0; k < c->present; k++) {
        sum += x[k];
        magnitude += fabs(x[k]);
    }
    for (int s = 1; s < c->present; s *= 2) levels++;
    bool overflows = !(magnitude < (c->dtype == TT_F16 ? 65504.0 : 1e38));
    return c->move.reduce != TT__SUM || overflows || fabs(got - sum) <= 1.01 * levels * unit * magnitude;
}

/* Makes a random case, equal on all members. */
static collective drawn(const collective_test *t, int number)
{
    static const int ops[] = {TT__OP_ALL_REDUCE, TT__OP_REDUCE_SCATTER, TT__OP_ALL_GATHER, TT__OP_BROADCAST,
                              TT__OP_RECV, TT__OP_SUM_SLOTS};
    static const tt_dtype dtypes[] = {TT_F32, TT_BF16, TT_F16, TT__F64};
    static const int64_t sizes[] = {1, 2, 3, 5, 7, 16, 33, 64, 1000, 2049, 4097, 12301};
    static const int64_t units[] = {1, 1, 7, 4096};
    uint64_t s = (uint64_t)number * 977 + (uint64_t)t->members + 1;
    collective c;
    memset(&c, 0, sizeof c);
    for (int k = 0; k < 8; k++) test_random(&s);
    c.op = ops[number % TT__COUNT(ops)];
    c.dtype = dtypes[number / TT__COUNT(ops) % TT__COUNT(dtypes)];
    do c.elements = sizes[pick(&s, TT__COUNT(sizes))];
    while (c.elements > t->max);
    c.cols = c.elements % 3 == 0 && pick(&s, 2) ? c.elements / 3 : c.elements;
    c.move.unit = units[pick(&s, TT__COUNT(units))];
    c.move.reduce = (tt__reduce)(pick(&s, 2) ? 0 : pick(&s, 3));
    c.add = c.move.reduce == TT__SUM && pick(&s, 2);
    c.in_place = pick(&s, 2);
    c.move.root = pick(&s, 2);
    if (c.op == TT__OP_ALL_REDUCE) c.move.root = false;
    if (c.op == TT__OP_BROADCAST) c.move.root = true;
    c.move.over = c.op == TT__OP_SUM_SLOTS ? TT__OVER_SLOTS : TT__OVER_DATA;
    c.present = pick(&s, 3) ? t->members : (int)pick(&s, (uint32_t)t->members + 1);
    c.move.from = (int)pick(&s, (uint32_t)t->members);
    c.move.to = (c.move.from + 1) % t->members;
    c.shift = (int)pick(&s, 4);
    c.seed = (uint64_t)test_random(&s) + 1;
    return c;
}

static int64_t piece(const collective *c, const collective_test *t, int member, int64_t *first)
{
    return tt__shard(c->elements, c->move.unit, c->op == TT__OP_BROADCAST ? false : c->move.root, member,
                     t->members, first);
}

/* bytes_of returns the bytes of a member's memory: x (or all slots) and y, with guards around both. */
static size_t bytes_of_y(const collective *c) { return (size_t)(c->elements + 4) * tt_dtype_bytes(c->dtype); }
static size_t bytes_of(const collective *c, const collective_test *t)
{
    const int slots = c->op == TT__OP_SUM_SLOTS ? t->members : 1;
    return 3 * (size_t)GUARD + bytes_of_y(c) * (size_t)(slots + 1);
}

/* Returns the address of a member's x in its memory. In place, x is y, x is a shard of y, or y is a
   shard of x. */
static char *x_of(const collective *c, const collective_test *t, char *memory, int member)
{
    int64_t first;
    const bool inside = c->op == TT__OP_ALL_GATHER && c->in_place;
    piece(c, t, member, &first);
    const size_t at = inside ? bytes_of(c, t) - GUARD - bytes_of_y(c) : (size_t)GUARD;
    return memory + at + tt_dtype_bytes(c->dtype) * (size_t)(c->shift + (inside ? first : 0));
}

static char *y_of(const collective *c, const collective_test *t, char *memory, int member)
{
    const size_t size = tt_dtype_bytes(c->dtype);
    int64_t first;
    piece(c, t, member, &first);
    if (c->in_place && c->op == TT__OP_REDUCE_SCATTER)
        return x_of(c, t, memory, member) + size * (size_t)first;
    if (c->in_place && c->op != TT__OP_ALL_GATHER) return x_of(c, t, memory, member);
    return memory + bytes_of(c, t) - GUARD - bytes_of_y(c) + size * (size_t)c->shift;
}

/* Returns a random number. Numbers have many sizes, some cancel, and a few are not finite. */
static double drawn_number(const collective *c, uint64_t *s)
{
    const uint32_t kind = pick(s, 64);
    const double x = (double)test_uniform(s), wide = c->dtype == TT_F16 ? 8 : 30;
    if (kind == 0) return NAN;
    if (kind == 1) return x < 0 ? -INFINITY : INFINITY;
    if (kind == 2) return x < 0 ? -0.0 : 0.0;
    if (kind < 8) return x * (c->dtype == TT_F16 ? 6e4 : 3e38);
    return kind < 24 ? ldexp(x, (int)(wide * (double)test_uniform(s))) : x;
}

TEST_PLAIN static void fill_member(const collective *c, collective_test *t, int me)
{
    char *memory = t->memory[me];
    uint64_t s = c->seed * 64 + (uint64_t)me + 1;
    const int64_t slots = c->op == TT__OP_SUM_SLOTS ? t->members : 1;
    memset(memory, 0xA5, bytes_of(c, t));
    char *x = x_of(c, t, memory, me), *y = y_of(c, t, memory, me);
    const bool x_in_y = c->op == TT__OP_ALL_GATHER && c->in_place;
    for (int64_t k = 0; k < c->elements && !c->in_place; k++) put(y, c->dtype, k, drawn_number(c, &s));
    char *from = x_in_y ? y : x;
    for (int64_t k = 0; k < c->elements * slots; k++) put(from, c->dtype, k, drawn_number(c, &s));
    memcpy(t->before[me], memory, bytes_of(c, t));
    int64_t first, n = piece(c, t, me, &first);
    const tt__mat whole = {NULL, c->dtype, c->elements / c->cols, c->cols, c->cols},
                  part = {NULL, c->dtype, 1, n, n};
    t->in[me] = c->op == TT__OP_ALL_GATHER ? part : whole;
    t->out[me] = c->op == TT__OP_REDUCE_SCATTER ? part : whole;
    t->in[me].data = x;
    t->out[me].data = y;
}

/* Writes the expected memory of member `me` to t->expected. Returns whether the sums are near sums in
   float64. */
TEST_PLAIN static bool expect_member(const collective *c, const collective_test *t, int me)
{
    const bool slots = c->op == TT__OP_SUM_SLOTS;
    const bool sums = slots || c->op == TT__OP_ALL_REDUCE || c->op == TT__OP_REDUCE_SCATTER;
    double x[MAX_MEMBERS], y;
    /* operands before the collective; slots are those of `me` */
    const char *xs[MAX_MEMBERS], *ys[MAX_MEMBERS];
    int64_t first = 0, n = c->elements, begin = 0, count;
    int owner = 0; /* the member whose shard [begin, begin + count) has element e */
    bool near = true;
    char *to = y_of(c, t, t->expected, me);
    memcpy(t->expected, t->before[me], bytes_of(c, t));
    if ((sums && !c->present) || (c->op == TT__OP_RECV && me != c->move.to)) return true;
    for (int m = 0; m < t->members; m++) {
        xs[m] = x_of(c, t, t->before[slots ? me : m], slots ? me : m);
        if (slots) xs[m] += (size_t)(m * c->elements) * tt_dtype_bytes(c->dtype);
        ys[m] = y_of(c, t, t->before[m], m);
    }
    if (c->op == TT__OP_REDUCE_SCATTER) n = piece(c, t, me, &first);
    count = piece(c, t, owner, &begin);
    for (int64_t k = 0; k < n; k++) {
        const int64_t e = first + k;
        while (e >= begin + count) count = piece(c, t, ++owner, &begin);
        if (!sums) {
            const int from = c->op == TT__OP_BROADCAST ? 0 : c->op == TT__OP_RECV ? c->move.from : owner;
            y = get(xs[from], c->dtype, c->op == TT__OP_ALL_GATHER ? e - begin : e);
        } else {
            /* the member to whose y the sum is added */
            const int adds = c->op == TT__OP_ALL_REDUCE ? owner : me;
            const double was = get(ys[adds], c->dtype, k);
            for (int m = 0; m < c->present; m++) x[m] = get(xs[m], c->dtype, e);
            y = reduced(c, x, c->add ? &was : NULL);
            near &= near_sum(c, x, c->add ? &was : NULL, y);
        }
        put(to, c->dtype, k, y);
        /* a NaN may have any bits */
        const size_t at = (size_t)(to - t->expected) + (size_t)k * tt_dtype_bytes(c->dtype);
        if (y != y && get(t->memory[me] + at, c->dtype, 0) != get(t->memory[me] + at, c->dtype, 0))
            memcpy(t->expected + at, t->memory[me] + at, tt_dtype_bytes(c->dtype));
    }
    return near;
}

static void check_collective(const collective *c, collective_test *t, int number)
{
    for (int me = 0; me < t->members; me++) {
        char text[400];
        const bool near = expect_member(c, t, me),
                   same = memcmp(t->expected, t->memory[me], bytes_of(c, t)) == 0;
        snprintf(text, sizeof text, "%s, case %d: %s of %lld %s, unit %lld%s%s%s, reduce %d, member %d of "
                 "%d, %d present: %s", t->isa, number, tt__ops[c->op].name, (long long)c->elements,
                 tt_dtype_name(c->dtype), (long long)c->move.unit, c->move.root ? ", root" : "",
                 c->add ? ", adds" : "", c->in_place ? ", in place" : "", (int)c->move.reduce, me, t->members,
                 c->present, same ? "far from the sum in float64" : "other bytes");
        test__check(same && near, __FILE__, __LINE__, text);
    }
}

/* Launches one phase of an instruction as src/run/ does. */
static bool launched(const collective *c, const collective_test *t, int op, int me, int phase)
{
    tt__instr i = tt__new_instr(op);
    tt__mat slots[MAX_MEMBERS];
    char none[8];
    tt__launch l;
    memset(&l, 0, sizeof l);
    i.move = c->move;
    for (int k = 0; k < t->members; k++) {
        slots[k] = t->in[me];
        slots[k].data = (char *)t->in[me].data + (size_t)(k * c->elements) * tt_dtype_bytes(c->dtype);
    }
    l.device = (tt__device *)(void *)(uintptr_t)&t->cpu[me];
    l.instr = &i;
    l.in[0] = t->in[me];
    l.out[0] = t->out[me];
    l.add[0] = c->add;
    l.phase = phase;
    l.members = t->members;
    l.me = me;
    l.present = c->present;
    l.peer_in = c->op == TT__OP_SUM_SLOTS ? slots : t->in;
    l.peer_out = t->out;
    l.workspace = none;
    return tt__cpu_backend.launch(&l, 1) == TT_OK;
}

static void run_collectives(void *arg, int me)
{
    collective_test *t = (collective_test *)arg;
    const tt__members all = {0, 1, t->members};
    for (int number = 0; number < t->cases; number++) {
        const collective c = drawn(t, number);
        const tt__instr i = tt__new_instr(c.op);
        const int phases = tt__rules_of(&i)->phases;
        bool ok = true;
        fill_member(&c, t, me);
        ok &= tt__barrier(t->rank_group, me, all);
        if (c.op == TT__OP_SUM_SLOTS) ok &= launched(&c, t, c.op, me, 0);
        if (phases & TT__REDUCE_PHASE) ok &= launched(&c, t, c.op, me, TT__REDUCE_PHASE);
        ok &= tt__barrier(t->rank_group, me, all);
        if (c.op == TT__OP_RECV) ok &= launched(&c, t, TT__OP_SEND, me, TT__SPREAD_PHASE);
        if (phases & TT__SPREAD_PHASE) ok &= launched(&c, t, c.op, me, TT__SPREAD_PHASE);
        ok &= tt__barrier(t->rank_group, me, all);
        if (me == 0) {
            CHECK(ok);
            t->ran[c.op]++;
            check_collective(&c, t, number);
        }
        if (!tt__barrier(t->rank_group, me, all)) return;
    }
}

/* Opens a context with an instruction set, or returns NULL if the machine lacks the instruction set. */
static tt_context *open_isa(test_allocator *a, const char *isa)
{
    tt_context_options o = test_options(a);
    o.isa = isa;
    tt_context *ctx = tt_open(&o);
    if (ctx) ctx->options.isa = NULL;
    return ctx;
}

static void collectives(const char *isa)
{
    static const int members[] = {1, 2, 3, 4, 8, 7, 64}, cases[] = {280, 560, 560, 560, 560, 280, 56};
    static collective_test t;
    test_allocator a;
    tt_context *ctx = open_isa(&a, isa);
    if (!ctx) SKIP("this CPU does not have it");
    for (int k = 0; k < TT__COUNT(members); k++) {
        memset(&t, 0, sizeof t);
        t.ctx = ctx;
        t.isa = isa;
        t.members = members[k];
        t.cases = TEST_SWEEP > 1 && cases[k] > 140 ? 140 : cases[k];
        t.max = members[k] > 8 ? 100 : 12301;
        t.rank_group = tt__rank_group_new(ctx, t.members, 600);
        REQUIRE(t.rank_group);
        const size_t bytes = 3 * (size_t)GUARD + (size_t)((t.max + 4) * (t.members + 1)) * 8;
        t.expected = (char *)malloc(bytes);
        for (int m = 0; m < t.members; m++) {
            t.cpu[m] = ctx->cpu;
            t.cpu[m].pool = tt__pool_new(ctx, t.members < 4 ? 1 + m % 2 : 1);
            t.memory[m] = (char *)malloc(bytes);
            t.before[m] = (char *)malloc(bytes);
            REQUIRE(t.cpu[m].pool && t.memory[m] && t.before[m] && t.expected);
        }
        on_ranks(t.members, run_collectives, &t);
        for (int op = TT__OP_ALL_REDUCE; op <= TT__OP_SUM_SLOTS; op++)
            CHECK(t.ran[op] >= 8 || op == TT__OP_SEND); /* RECV runs SEND, too */
        for (int m = 0; m < t.members; m++) {
            tt__pool_free(ctx, t.cpu[m].pool);
            free(t.memory[m]);
            free(t.before[m]);
        }
        free(t.expected);
        tt__rank_group_free(t.rank_group);
    }
    TEST_CLOSE(ctx, &a);
}

TEST(ranks_portable) { collectives("portable"); }
TEST(ranks_avx2) { collectives("avx2"); }
TEST(ranks_avx512) { collectives("avx512"); }
TEST(ranks_neon) { collectives("neon"); }

/* ------------------------------------------------------------------------------------------------ squares */

/* Sums the squares of g by one op, and by gathering and folding the sums of the chunks of shards. Returns
   whether both sums are equal. */
static bool same_squares(tt_context *ctx, const tt__mat *g, int members, bool root, float *whole)
{
    enum { CHUNKS = 16 };
    double table[CHUNKS + 1], workspace[TT__CHUNK * TT__ROW_BUFFERS + CHUNKS];
    float folded = -1;
    const int64_t elements = g->rows * g->cols, chunks = tt__ceil_div(elements, TT__CHUNK);
    tt__instr i = tt__new_instr(TT__OP_SUM_SQUARES);
    tt__launch l;
    bool ok = chunks <= CHUNKS;
    memset(&l, 0, sizeof l);
    memset(table, 0xff, sizeof table); /* NaN */
    l.device = (tt__device *)(void *)&ctx->cpu;
    l.instr = &i;
    l.workspace = workspace;
    const tt__mat to = {whole, TT_F32, 1, 1, 1}, again = {&folded, TT_F32, 1, 1, 1},
                  all = {table, TT__F64, 1, chunks, chunks};
    l.in[0] = *g;
    l.out[0] = to;
    ok &= tt__cpu_backend.launch(&l, 1) == TT_OK;
    i.op = TT__OP_CHUNK_SQUARES;
    for (int k = members - 1; k >= 0; k--) {
        int64_t first, at, n = tt__shard(elements, TT__CHUNK, root, k, members, &first),
                           m = tt__shard(chunks, 1, root, k, members, &at);
        ok &= m == tt__ceil_div(n, TT__CHUNK) && (n == 0 || at == first / TT__CHUNK);
        const tt__mat part = {(char *)g->data + (size_t)first * tt_dtype_bytes(g->dtype), g->dtype, 1, n, n},
                      sums = {table + at, TT__F64, 1, m, m};
        l.in[0] = part;
        l.out[0] = sums;
        ok &= tt__cpu_backend.launch(&l, 1) == TT_OK;
    }
    i.op = TT__OP_FOLD_SQUARES;
    l.in[0] = all;
    l.out[0] = again;
    ok &= tt__cpu_backend.launch(&l, 1) == TT_OK;
    return ok && memcmp(whole, &folded, sizeof folded) == 0 && table[chunks] != table[chunks];
}

TEST(squares_of_pieces_of_ranks)
{
    enum { MAX = 50001 };
    static const char *const isa[] = {"portable", "avx2", "avx512", "neon"};
    static const int64_t sizes[] = {1, 4095, 4096, 4097, 12288, 20481, MAX};
    static const tt_dtype dtypes[] = {TT_F32, TT_BF16, TT_F16};
    static float g[MAX];
    for (int k = 0; k < TT__COUNT(isa); k++) {
        test_allocator a;
        tt_context *ctx = open_isa(&a, isa[k]);
        for (int c = 0; ctx && c < TT__COUNT(sizes) * TT__COUNT(dtypes) * 5; c++) {
            const int members = c % 5 == 4 ? 8 : c % 5 + 1;
            const tt_dtype dtype = dtypes[c / 5 % 3];
            const int64_t n = sizes[c / 15];
            uint64_t s = (uint64_t)c + 1;
            double sum = 0;
            float squares;
            for (int64_t e = 0; e < n; e++) {
                put(g, dtype, e, (double)test_uniform(&s));
                sum += get(g, dtype, e) * get(g, dtype, e);
            }
            const tt__mat m = {g, dtype, 1, n, n};
            for (int root = 0; root < 2; root++) CHECK(same_squares(ctx, &m, members, root, &squares));
            CHECK_NEAR(squares, sum, 1e-6 * sum);
        }
        if (ctx) TEST_CLOSE(ctx, &a);
    }
}

/* --------------------------------------------------------------------------------------------- rules, passes
   A tape has one collective from `in` to `out`. Each test makes one mistake. */

typedef struct one_collective {
    tt_context *ctx;
    tt_tape *t;
    tt__instr *i;
    tt__tape_value *in, *out;
    test_allocator a;
} one_collective;

enum { WHOLE_ROWS = 3, WHOLE_COLS = 7000, WHOLE = WHOLE_ROWS * WHOLE_COLS, DATA_RANKS = 4 };

static int32_t new_operand(tt_tape *t, tt_dtype dtype, int64_t rows, int64_t cols, const char *name)
{
    const tt__shape shape = {dtype, rows, cols, 0, 0};
    const int32_t v = tt__new_value(t, &shape, TT__STATE, "%s", name);
    t->values[v].persistent = true;
    return v;
}

/* Makes a data rank's shard of a tensor of WHOLE elements: a new value, or a view of `of`. */
static int32_t new_piece(tt_tape *t, int32_t of)
{
    const tt__part part = {TT__WHOLE, false, TT__CHUNK, WHOLE};
    const tt__shape shape = tt__shard_shape(t, TT_F32, &part);
    const int32_t v = of ? tt__new_view(t, of, &shape, 0, shape.cols, "piece")
                         : new_operand(t, TT_F32, 1, shape.cols, "piece");
    t->values[v].part = part;
    return v;
}

static bool one(one_collective *c, int op, bool in_place)
{
    c->ctx = test_open(&c->a);
    c->ctx->options.verify = true;
    c->t = tt_tape_new(c->ctx);
    c->t->data = DATA_RANKS;
    const bool scatters = op == TT__OP_REDUCE_SCATTER, gathers = op == TT__OP_ALL_GATHER;
    const int32_t whole = new_operand(c->t, TT_F32, WHOLE_ROWS, WHOLE_COLS, "whole");
    const int32_t other = in_place ? whole : new_operand(c->t, TT_F32, WHOLE_ROWS, WHOLE_COLS, "other");
    const int32_t part = scatters || gathers ? new_piece(c->t, in_place ? whole : 0) : 0;
    tt__instr *i = c->i = tt__append(c->t, op);
    i->move.over = op == TT__OP_SUM_SLOTS ? TT__OVER_SLOTS : TT__OVER_DATA;
    i->move.unit = TT__CHUNK;
    i->in[0] = gathers ? part : whole;
    i->out[0] = op == TT__OP_SEND ? 0 : scatters ? part : gathers ? whole : other;
    c->in = &c->t->values[i->in[0]];
    c->out = &c->t->values[i->out[0]];
    return tt_tape_status(c->t) == TT_OK && tt__verify(c->t, "test") == TT_OK;
}

static void close_one(one_collective *c)
{
    tt_tape_free(c->t);
    TEST_CLOSE(c->ctx, &c->a);
}

static void refused(one_collective *c, const char *text, int line)
{
    test__check(tt__verify(c->t, "test") == TT_ERR_INTERNAL, __FILE__, line, text);
    test__error(c->ctx, TT_ERR_INTERNAL, text, __FILE__, line);
    close_one(c);
}
#define REFUSED(text) refused(&c, (text), __LINE__)

TEST(operands_of_ranks)
{
    one_collective c;
    for (int op = TT__OP_ALL_REDUCE; op <= TT__OP_SUM_SLOTS; op++)
        for (int in_place = 0; in_place < 2; in_place++) {
            REQUIRE(one(&c, op, in_place));
            close_one(&c);
            if (op == TT__OP_SEND) continue;
            const bool sums = op != TT__OP_ALL_GATHER && op != TT__OP_BROADCAST && op != TT__OP_RECV;
            if (!in_place && one(&c, op, in_place)) {
                c.out->shape.dtype = TT_BF16;
                REFUSED("the dtype of the operand");
            }
            for (int k = 0; k < 2; k++) {
                REQUIRE(one(&c, op, in_place));
                tt__tape_value *x = k ? c.in : c.out;
                x->ld++;
                if (x->shape.rows > 1) REFUSED("a contiguous matrix");
                else if (CHECK(tt__verify(c.t, "test") == TT_OK)) close_one(&c);
            }
            REQUIRE(one(&c, op, in_place));
            c.in->shape.dtype = c.out->shape.dtype = TT_I32;
            if (sums) REFUSED("expected floats");
            else if (CHECK(tt__verify(c.t, "test") == TT_OK)) close_one(&c);
            REQUIRE(one(&c, op, in_place));
            c.in->shape.dtype = c.out->shape.dtype = TT__F64;
            if (CHECK(tt__verify(c.t, "test") == TT_OK)) close_one(&c);
            if (!sums) continue;
            REQUIRE(one(&c, op, in_place));
            c.i->move.reduce = TT__MAX;
            CHECK(tt__verify(c.t, "test") == TT_OK);
            c.i->add_later = 1;
            REFUSED("a result that is written, not added to, for a maximum or minimum");
        }
    static const int in_units[] = {TT__OP_ALL_REDUCE, TT__OP_REDUCE_SCATTER, TT__OP_ALL_GATHER,
                                   TT__OP_BROADCAST};
    for (int k = 0; k < TT__COUNT(in_units); k++) {
        REQUIRE(one(&c, in_units[k], false));
        c.i->move.unit = 0;
        REFUSED("the unit of its shards is not set");
    }
    for (int k = 0; k < 20; k++) { /* the shard or the shape differs from the instruction's */
        const bool gathers = k % 2;
        REQUIRE(one(&c, gathers ? TT__OP_ALL_GATHER : TT__OP_REDUCE_SCATTER, k / 2 % 2));
        tt__tape_value *x = gathers ? c.in : c.out;
        if (k / 4 == 0) x->part.of++;
        if (k / 4 == 1) x->part.unit--;
        if (k / 4 == 2) x->part.root = true;
        if (k / 4 == 3) x->shape.cols = --x->ld;
        if (k / 4 == 4) c.t->data = DATA_RANKS / 2;
        REFUSED(gathers ? "a shard of the result" : "a shard of the operand");
    }
}

TEST(rows_over_tensor_ranks) /* a rank has some of the rows, with all columns */
{
    static const int ops[] = {TT__OP_REDUCE_SCATTER, TT__OP_ALL_GATHER};
    for (int k = 0; k < 8; k++) {
        one_collective c;
        const bool gathers = k % 2;
        REQUIRE(one(&c, ops[k % 2], false));
        tt__tape_value *some = gathers ? c.in : c.out;
        c.i->move.over = TT__OVER_TENSOR;
        c.i->move.unit = WHOLE_COLS;
        memset(&some->part, 0, sizeof some->part);
        some->shape.rows = 1;
        some->shape.cols = some->ld = WHOLE_COLS;
        CHECK(tt__verify(c.t, "test") == TT_OK);
        if (k / 2 == 0) c.i->move.unit--;
        if (k / 2 == 1) some->shape.rows = WHOLE_ROWS + 1;
        if (k / 2 == 2) some->shape.cols = some->ld = WHOLE_COLS - 1;
        if (k / 2 == 3) c.i->move.over = TT__OVER_DATA; /* only the collective is over data */
        REFUSED(gathers ? "a shard of the result" : "a shard of the operand");
    }
}

TEST(squares_of_ranks_have_their_shapes)
{
    for (int k = 0; k < 5; k++) {
        one_collective c;
        REQUIRE(one(&c, TT__OP_BROADCAST, false));
        tt_tape *t = c.t;
        const int32_t g = new_piece(t, 0), chunks = new_operand(t, TT__F64, 1, 2, "chunks"),
                      all = new_operand(t, TT__F64, 1, 6, "all"), sum = new_operand(t, TT_F32, 1, 1, "sum");
        const int ops[] = {TT__OP_CHUNK_SQUARES, TT__OP_ALL_GATHER, TT__OP_FOLD_SQUARES};
        const int32_t in[] = {g, chunks, all}, out[] = {chunks, all, sum};
        t->values[chunks].part.unit = 1;
        t->values[chunks].part.of = 6;
        for (int j = 0; j < 3; j++) {
            tt__instr *i = tt__append(t, ops[j]);
            i->in[0] = in[j];
            i->out[0] = out[j];
            i->move.over = TT__OVER_DATA;
            i->move.unit = 1;
            t->values[out[j]].persistent = false; /* the result is first written here */
            t->values[out[j]].storage = TT__TRANSIENT;
        }
        CHECK(tt__verify(t, "test") == TT_OK);
        if (k == 0) t->values[chunks].shape.cols = t->values[chunks].ld = 3;
        if (k == 1) t->values[chunks].shape.dtype = TT_F32;
        if (k == 2) t->values[sum].shape.cols = 2;
        if (k == 3) t->code[3].in[0] = g;
        if (k == 4) t->values[g].shape.dtype = TT_I32;
        REFUSED(k == 0 || k == 2 ? "result has another shape than the op's rule gives" : k == 1 ?
                "result has the wrong dtype" : k == 3 ? "a row of f64" : "a float dtype");
    }
}

/* Collectives are never pruned, because another rank may read the result. */
TEST(collectives_of_ranks_are_not_pruned)
{
    for (int op = TT__OP_ALL_REDUCE; op < TT__OP_COUNT; op++) {
        one_collective c;
        const tt__instr like = tt__new_instr(op);
        REQUIRE(one(&c, TT__OP_BROADCAST, false));
        tt_tape *t = c.t;
        const tt_value x = tt_input(t, "x", TT_F32, 2, 8), y = tt_gelu(t, x);
        const int32_t z = tt_gelu(t, y).id;
        tt_gelu(t, x);
        c.i = tt__append(t, op);
        c.i->in[0] = y.id;
        c.i->out[0] = tt__ops[op].outputs ? z : 0;
        CHECK(tt__pass_prune(t, 0, true) == TT_OK);
        const bool stays = tt__rules_of(&like)->phases != 0;
        const int last = 2 + tt__ops[op].outputs; /* index of the op, after BROADCAST, the GELU that makes
                                                     y and, if the op has a result, the GELU that makes z */
        CHECK(t->n_code == (stays ? last + 1 : 1));
        if (stays) CHECK(t->code[last].op == op && t->code[1].out[0] == y.id);
        close_one(&c);
    }
}

/* -------------------------------------------------------------------------------------------------- plans
   The backend of a program counts the bytes that ranks load from other ranks. */

enum { VOCAB = 500, HIDDEN = 150, WIDE = 520, CLASSES = 141, ROWS = 6 };

typedef struct counted_program {
    test_allocator a;
    tt_context *ctx;
    tt_param *table, *up, *bias, *down, *norm_w, *norm_b, *head;
    tt_tape *t;
    tt_value ids, y;
    tt_program *p;
} counted_program;

static struct {
    const tt_program *p;
    tt__backend backend;    /* the CPU's backend, with functions that count */
    tt__device_kind kind;
    double loaded[TT__RANKS], allocated[TT__RANKS]; /* bytes loaded, bytes allocated */
} counting;

static int rank_of(const tt__device *d)
{
    const tt__device_group *c = counting.p->settings.group;
    int r = 0;
    while (c->device[r] != d) r++;
    return r;
}

/* Replaces the memory of a member's operands by new memory, filled with `byte` and returned. Operands that
   overlap keep their distance. */
static char *stand_in(tt__mat *x, tt__mat *y, int byte)
{
    const size_t item = tt_dtype_bytes(x->dtype), n = (size_t)(x->rows * x->cols) * item;
    const size_t m = (size_t)(y->rows * y->cols) * item, gap = 64;
    char *from = (char *)x->data, *to = (char *)y->data;
    const bool apart = !to || from + n <= to || to + m <= from;
    const size_t x_at = apart || from < to ? 0 : (size_t)(from - to);
    const size_t y_at = apart ? n + gap : from < to ? (size_t)(to - from) : 0;
    char *memory = (char *)malloc(n + m + 2 * gap);
    memset(memory, byte, n + m + 2 * gap);
    x->data = memory + x_at;
    if (to) y->data = memory + y_at;
    return memory;
}

/* Returns the bytes that a launch loads of member k's memory. Member k's memory is NaN and other memory is 0,
   so an element becomes NaN if it loads an element of k. */
static double loaded_from(const tt__launch *l, int k)
{
    tt__mat in[TT__RANKS], out[TT__RANKS];
    char *memory[TT__RANKS];
    tt__launch again = *l;
    double n = 0;
    for (int j = 0; j < l->members; j++) {
        in[j] = l->peer_in[j];
        out[j] = l->peer_out[j];
        memory[j] = stand_in(&in[j], &out[j], j == k ? 0xff : 0);
    }
    again.in[0] = in[l->me];
    again.out[0] = out[l->me];
    again.peer_in = in;
    again.peer_out = out;
    if (tt__cpu_backend.launch(&again, 1) != TT_OK) n = NAN;
    const tt__mat *y = &again.out[0];
    for (int64_t e = 0; y->data && e < y->rows * y->cols; e++) {
        const double x = get(y->data, y->dtype, e);
        n += x != x;
    }
    for (int j = 0; j < l->members; j++) free(memory[j]);
    return n * (double)tt_dtype_bytes(l->in[0].dtype);
}

static tt_status launch_and_count(const tt__launch *l, int n)
{
    for (int k = 0; k < n; k++)
        for (int j = 0; j < l[k].members && tt__is_collective(l[k].instr); j++)
            if (j != l[k].me) counting.loaded[rank_of(l[k].device)] += loaded_from(&l[k], j);
    return tt__cpu_backend.launch(l, n);
}

static void *allocate_and_count(tt__device *d, size_t bytes)
{
    counting.allocated[rank_of(d)] += (double)bytes;
    return tt__cpu_backend.allocate(d, bytes);
}

/* Returns the bytes that member `me` loads in all phases of a collective that reads and writes x. With a
   root, member 0 has all elements. */
static double loaded_by(tt_context *ctx, const tt__instr *i, int64_t elements, int me, int members)
{
    tt__mat in[TT__RANKS], out[TT__RANKS];
    float *memory = (float *)calloc((size_t)elements * (size_t)members, sizeof *memory);
    tt__launch l;
    double bytes = 0;
    memset(&l, 0, sizeof l);
    for (int k = 0; k < members; k++) {
        int64_t first, n = tt__shard(elements, i->move.unit, i->move.root, k, members, &first);
        float *x = memory + elements * k;
        const tt__mat whole = {x, TT_F32, 1, elements, elements}, piece = {x + first, TT_F32, 1, n, n};
        in[k] = i->op == TT__OP_ALL_GATHER ? piece : whole;
        out[k] = i->op == TT__OP_REDUCE_SCATTER ? piece : whole;
    }
    l.device = (tt__device *)(void *)&ctx->cpu;
    l.instr = i;
    l.in[0] = in[me];
    l.out[0] = out[me];
    l.peer_in = in;
    l.peer_out = out;
    l.members = l.present = members;
    l.me = me;
    for (l.phase = TT__REDUCE_PHASE; l.phase <= TT__SPREAD_PHASE; l.phase++)
        for (int k = 0; k < members && (tt__rules_of(i)->phases & l.phase); k++)
            if (k != me) bytes += loaded_from(&l, k);
    free(memory);
    return bytes;
}

/* Members load the bytes that the rules say, which are at least the minimum of the collective. */
TEST(loads_of_each_collective)
{
    static const int64_t elements[] = {1, 40, 4097, 12300}, units[] = {16, 4096};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int c = 0; c < 7 * 4 * 2 * 2; c++) {
        tt__instr i = tt__new_instr(TT__OP_ALL_REDUCE + c % 7);
        const int64_t n = elements[c / 7 % 4];
        i.move.over = TT__OVER_DATA;
        i.move.unit = units[c / 28 % 2];
        i.move.root = c / 56 && i.op != TT__OP_ALL_REDUCE;
        i.move.from = i.op == TT__OP_RECV;
        for (int members = 2; members < 6; members += 1 + members / 3) {
            double max = 0, min = 0;
            for (int me = 0; me < members; me++) {
                const tt__loads none = {0, 0}, loads = tt__rules_of(&i)->loads ?
                    tt__rules_of(&i)->loads(&i.move, n, me, members) : none;
                CHECK(4 * (double)loads.done == loaded_by(ctx, &i, n, me, members));
                max = fmax(max, (double)loads.done);
                min = fmax(min, loads.min);
            }
            CHECK(min <= max && (min > 0) == (max > 0));
        }
    }
    TEST_CLOSE(ctx, &a);
}

static tt_param *drawn_param(tt_context *ctx, const char *name, int64_t rows, int64_t cols)
{
    const int64_t dims[2] = {rows, cols};
    const tt_init init = {TT_INIT_NORMAL, 0.1f};
    return tt_param_new(ctx, name, cols ? 2 : 1, dims, init);
}

static bool open_counted(counted_program *c, const char *device, const char *precision, tt_parallel how)
{
    tt_compile_options o = tt_compile_options_default();
    c->ctx = test_open(&c->a);
    c->ctx->options.verify = true;
    c->table = drawn_param(c->ctx, "table", VOCAB, HIDDEN);
    c->up = drawn_param(c->ctx, "up", WIDE, HIDDEN);
    c->bias = drawn_param(c->ctx, "bias", WIDE, 0);
    c->down = drawn_param(c->ctx, "down", HIDDEN, WIDE);
    c->norm_w = drawn_param(c->ctx, "norm_w", HIDDEN, 0);
    c->norm_b = drawn_param(c->ctx, "norm_b", HIDDEN, 0);
    c->head = drawn_param(c->ctx, "head", CLASSES, HIDDEN);
    tt_tape *t = c->t = tt_tape_new(c->ctx);
    const int64_t rows = tt_axis(t, "rows", ROWS);
    c->ids = tt_input(t, "ids", TT_I32, rows, 1);
    c->y = tt_input(t, "y", TT_I32, rows, 1);
    const tt_value words = tt_embedding(t, c->ids, c->table);
    tt_value x = tt_linear(t, tt_gelu(t, tt_linear(t, words, c->up, c->bias)), c->down, NULL);
    x = tt_layernorm(t, tt_add(t, x, words), c->norm_w, c->norm_b, 1e-5f);
    x = tt_linear(t, x, c->head, NULL);
    o.device = device;
    o.precision = precision;
    o.parallel = how;
    o.accumulate = how.groups > 0 || how.reduce_micros;
    c->p = tt_compile(t, tt_cross_entropy(t, x, c->y, NULL), &o);
    return CHECK(c->p != NULL);
}

static void close_counted(counted_program *c)
{
    tt_program_free(c->p);
    tt_tape_free(c->t);
    TEST_CLOSE(c->ctx, &c->a);
}

/* Runs a step of one full micro-batch on each data rank, with the counting backend. */
static void step_counted(counted_program *c)
{
    int32_t ids[ROWS], y[ROWS];
    tt__device_group *group = c->p->settings.group;
    memset(&counting, 0, sizeof counting);
    counting.p = c->p;
    counting.backend = tt__cpu_backend;
    counting.backend.launch = launch_and_count;
    counting.backend.allocate = allocate_and_count;
    counting.kind = *group->kind;
    counting.kind.backend = &counting.backend;
    group->kind = c->p->settings.kind = c->p->arena->kind = &counting.kind;
    for (int r = 0; r < c->p->arena->data; r++) {
        for (int k = 0; k < ROWS; k++) {
            ids[k] = (97 * k + 31 * r) % VOCAB;
            y[k] = (13 * k + 7 * r) % CLASSES;
        }
        CHECK(tt_set_rank(c->p, r, c->ids, ids, ROWS) == TT_OK);
        CHECK(tt_set_rank(c->p, r, c->y, y, ROWS) == TT_OK);
    }
    if (!c->p->settings.options.accumulate) CHECK(tt_step(c->p, 0.01f, NULL) == TT_OK);
    else CHECK(tt_micro_step(c->p, NULL) == TT_OK && tt_update(c->p, 0.01f, NULL) == TT_OK);
}

static const struct {
    const char *device, *precision;
    tt_parallel how;
} layouts[] = {
    {"cpu*2", "32-true", {0, 1, 0, false, false, 0, false, 1, NULL, 0}},
    {"cpu*3", "32-true", {0, 1, 1, false, false, 0, false, 1, NULL, 0}},
    {"cpu*4", "32-true", {0, 1, 2, false, false, 0, false, 1, NULL, 0}},
    {"cpu*3", "32-true", {0, 1, 3, false, false, 0, false, 1, NULL, 0}},
    {"cpu*8", "32-true", {0, 1, 3, false, false, 0, false, 1, NULL, 0}},
    {"cpu*4", "32-true", {0, 1, 0, true, false, 0, false, 1, NULL, 0}},
    {"cpu*2", "32-true", {0, 1, 1, false, false, 8, false, 1, NULL, 0}}, /* some leaves have no micro-batch */
    {"cpu*2", "32-true", {0, 1, 2, false, false, 4, false, 1, NULL, 0}},
    {"cpu*4", "32-true", {0, 1, 0, false, false, 0, true, 1, NULL, 0}},
    {"cpu*4", "bf16-mixed", {0, 1, 1, false, false, 0, false, 1, NULL, 0}},
    {"cpu*4", "bf16-mixed", {0, 1, 3, false, false, 0, false, 1, NULL, 0}},
    {"cpu*2", "bf16-true", {0, 1, 2, false, false, 0, false, 1, NULL, 0}},
    {"cpu*2", "16-mixed", {0, 1, 3, false, false, 0, false, 1, NULL, 0}},
    {"cpu*2", "32-true", {0, 2, 1, false, false, 0, false, 1, NULL, 0}},
    {"cpu*4", "32-true", {0, 4, 1, false, true, 0, false, 1, NULL, 0}},
    {"cpu*4", "bf16-mixed", {0, 2, 3, false, false, 0, false, 1, NULL, 0}},
    {"cpu*4", "32-true", {0, 2, 1, false, true, 0, false, 1, NULL, 0}},
    {"cpu*4", "32-true", {0, 2, 1, true, false, 0, false, 1, NULL, 0}},
};

TEST(ranks_load_and_allocate_what_is_planned)
{
    for (int k = 0; k < TT__COUNT(layouts); k += test_every(3)) {
        counted_program c;
        double max = 0, min;
        if (!open_counted(&c, layouts[k].device, layouts[k].precision, layouts[k].how)) return;
        step_counted(&c);
        const tt_plan plan = tt_program_plan(c.p);
        CHECK(plan.ranks == plan.data * plan.tensor && plan.ranks == c.p->settings.group->ranks);
        for (int r = 0; r < plan.ranks; r++) {
            const double planned = tt__moved_by(c.p, r, &min);
            if (!CHECK(counting.loaded[r] == planned))
                printf("layout %d, rank %d: %.0f bytes planned, %.0f loaded\n", k, r, planned,
                       counting.loaded[r]);
            CHECK(counting.allocated[r] == (double)(r < plan.tensor ? plan.bytes : plan.min_bytes));
            max = fmax(max, counting.loaded[r]);
        }
        CHECK((double)plan.moved_bytes == max && max > 0);
        CHECK(layouts[k].how.server ? plan.min_bytes < plan.bytes : plan.min_bytes == plan.bytes);
        close_counted(&c);
    }
}

/* Returns the bytes that a strategy must move, from the sizes of parameters alone. */
static double least_of_strategy(const counted_program *c, const tt_parallel *how, int ranks, bool half,
                                bool half_weights)
{
    const tt_param *params[] = {c->table, c->up, c->bias, c->down, c->norm_w, c->norm_b, c->head};
    static const int reads[] = {1, 2, 0, 2, 0, 0, 0}; /* reads of shards by the forward and the backward */
    double bytes = 0;
    for (int k = 0; k < TT__COUNT(params); k++) {
        const double n = (double)tt_param_size(params[k]), item = half ? 2 : 4;
        const bool whole = how->zero == 0 || n < TT__PIECES_FROM;
        /* Mixed precision reads 16-bit copies of matrices, but f32 rows of an embedding table. */
        const double read = half_weights && params[k] != c->table ? 2 : item;
        bytes += n * (whole ? 2 * item : how->zero < 3 ? item + item : item + reads[k] * read);
    }
    return bytes * (ranks - 1) / ranks;
}

TEST(least_bytes_of_strategies)
{
    for (int zero = 0; zero < 4; zero++)
        for (int precision = 0; precision < 3; precision++) {
            static const char *const names[] = {"32-true", "bf16-mixed", "bf16-true"};
            tt_parallel how = tt_parallel_default();
            counted_program c;
            how.zero = zero;
            if (!open_counted(&c, "cuda*4", names[precision], how)) return;
            const tt_plan plan = tt_program_plan(c.p);
            const double min = least_of_strategy(&c, &how, 4, precision == 2, precision > 0);
            CHECK_NEAR(plan.min_moved_bytes, min, 1);
            CHECK((double)plan.moved_bytes <= 1.08 * min); /* shards of few chunks are uneven */
            CHECK(plan.moved_bytes >= plan.min_moved_bytes);
            close_counted(&c);
        }
    counted_program c;
    tt_parallel how = tt_parallel_default();
    how.zero = 0;
    how.server = true;
    if (!open_counted(&c, "cuda*4", "32-true", how)) return;
    const double gradients = 2 * least_of_strategy(&c, &how, 4, false, false);
    /* the server loads all gradients of 3 ranks */
    CHECK_NEAR(tt_program_plan(c.p).min_moved_bytes, gradients, 1);
    close_counted(&c);
}

static bool says(const counted_program *c, const char *text, const char *title)
{
    char plan[4096], picture[60000];
    return tt_plan_text(c->p, plan, sizeof plan) < sizeof plan && strstr(plan, text) &&
           tt_plan_svg(c->p, picture, sizeof picture) < sizeof picture && strstr(picture, title);
}

TEST(plans_name_their_ranks)
{
    static const struct { const char *device; tt_parallel how; const char *text, *title; } rows[] = {
        {"cuda", {0, 1, 1, false, false, 0, false, 1, NULL, 0}, "memory plan for cuda: ", " on cuda<"},
        {"cuda:1", {0, 1, 1, false, false, 4, false, 1, NULL, 0}, "memory plan for cuda: ", " on cuda<"},
        {"cuda:0,0", {0, 1, 2, false, false, 0, false, 1, NULL, 0},
         "memory plan for cuda:0,0 (data 2, zero 2): every rank ",
         " on cuda:0,0 (data 2, zero 2), every rank<"},
        {"cpu*4", {0, 1, 1, false, false, 8, false, 1, NULL, 0},
         "memory plan for cpu*4 (data 4, groups 8, zero 1): every rank ",
         " on cpu*4 (data 4, groups 8, zero 1), every rank<"},
        {"cuda*4", {0, 1, 0, true, false, 0, false, 1, NULL, 0},
         "memory plan for cuda*4 (data 4, server): the server ",
         " on cuda*4 (data 4, server), the server<"}};
    for (int k = 0; k < TT__COUNT(rows); k++) {
        counted_program c;
        char line[160];
        if (!open_counted(&c, rows[k].device, "32-true", rows[k].how)) return;
        const tt_plan plan = tt_program_plan(c.p);
        CHECK(says(&c, rows[k].text, rows[k].title));
        snprintf(line, sizeof line, "\n  moved per step and rank: %.1f MB between ranks (at least %.1f), "
                 "with one micro-batch on each\n", 1e-6 * (double)plan.moved_bytes,
                 1e-6 * (double)plan.min_moved_bytes);
        CHECK(says(&c, line, "") == (plan.ranks > 1) && (plan.moved_bytes > 0) == (plan.ranks > 1));
        const int digits = plan.bytes < 10000000 ? 3 : plan.bytes < 100000000 ? 2 : 1;
        snprintf(line, sizeof line, ">moved per step and rank %.*f MB (at least %.*f)<", digits,
                 1e-6 * (double)plan.moved_bytes, digits, 1e-6 * (double)plan.min_moved_bytes);
        CHECK(says(&c, "", line) == (plan.ranks > 1));
        snprintf(line, sizeof line, ", every other rank %.1f (", 1e-6 * (double)plan.min_bytes);
        CHECK(says(&c, line, "") == rows[k].how.server);
        close_counted(&c);
    }
}

/* --------------------------------------------------------------------------------------------------- main */

static const test_case tests[] = {
    TEST_CASE(ranks_meet),
    TEST_CASE(ranks_meet_along_each_axis),
    TEST_CASE(a_rank_that_fails_ends_all_waits),
    TEST_CASE(a_rank_that_does_not_come_is_named),
    TEST_CASE(ranks_wait_for_a_process_that_ends),
    TEST_CASE(ranks_let_others_wait_for_messages),
    TEST_CASE(pieces_of_ranks_make_the_whole),
    TEST_CASE(ranks_portable),
    TEST_CASE(ranks_avx2),
    TEST_CASE(ranks_avx512),
    TEST_CASE(ranks_neon),
    TEST_CASE(squares_of_pieces_of_ranks),
    TEST_CASE(operands_of_ranks),
    TEST_CASE(rows_over_tensor_ranks),
    TEST_CASE(squares_of_ranks_have_their_shapes),
    TEST_CASE(collectives_of_ranks_are_not_pruned),
    TEST_CASE(loads_of_each_collective),
    TEST_CASE(ranks_load_and_allocate_what_is_planned),
    TEST_CASE(least_bytes_of_strategies),
    TEST_CASE(plans_name_their_ranks),
};

int main(int argc, char **argv)
{
    tt__limit_tensor_least = 1; /* tensor ranks divide small layers, too */
    return test_main(argc, argv, tests, TEST_COUNT(tests));
}
