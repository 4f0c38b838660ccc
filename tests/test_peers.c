/* Tests of devices that work together as the ranks of a program. Collectives give the CPU's bits, whether
   kernels load from other devices or data goes through the host. Other tests: which devices reach each other;
   missing waits; failing calls of CUDA. Runs on a GPU (TINYTRAIN_CUDA=1 make test), which then acts as all
   devices, or on the emulator, which most tests need. With TEST_SEEDS=24 in the environment, tests run with
   24 orders of the devices' work. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#ifndef TINYTRAIN_CUDA
#include <stdio.h>

int main(void) /* does not include the header, whose code takes a minute to compile */
{
    return puts("skip test_peers: this build is without TINYTRAIN_CUDA\n0 checks, 1 skipped: 0 passed, 0 "
                "failed") < 0;
}

#else
#define TT__OFFLOAD_TOGETHER ((size_t)8000) /* small, so that copies overlap with updates */
#define TT__PIECES_FROM 64 /* small tensors are divided over ranks, and go through the host in parts */
#define TT__UPDATE_FROM 64
#define TT__STAGE 8192
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"
#include "test_streams.h"
#include <sys/wait.h>
#ifdef TT_EMULATE
#include "emu_control.h"
#endif

static const tt__backend *const cuda = &tt__cuda_backend;

static uint32_t pick(uint64_t *state, uint32_t n) { return test_random(state) % n; }

static int seeds(int usual)
{
    const char *text = getenv("TEST_SEEDS");
    return text && atoi(text) > usual ? atoi(text) : usual;
}

/* ------------------------------------------------------------------------------------------------ devices */

enum {
    MAX = 8,            /* max devices of a group */
    JOB = 80 << 10,      /* largest number of bytes of a collective's operands */
    MEMORY = 8 * JOB,    /* bytes of memory of each member */
    PINNED = 6 << 10,    /* host bytes for a member's data that go through the host: so few that the data
                            go in several parts */
    MAX_JOBS = 7        /* max collectives of one call: more than fit into one launch on the emulator */
};

typedef struct group { /* devices that work together */
    test_allocator a;
    tt_context *ctx;
    int members, index[MAX];
    tt__device *device[MAX];
    char *memory[MAX];  /* memory of each device */
    char *cpu[MAX];     /* the results that the CPU computes */
    bool staged;         /* some device cannot reach another */
    double rate;         /* the lowest rate between two devices, bytes a second */
    void *pinned[2][MAX], *event[2][MAX]; /* two of each, used alternately */
    long syncs, parts, waits, left_out;     /* left_out: number of the wait that is skipped, from 1; 0:
                                               none */
    char pair[1024];     /* why the first pair of devices has no peer access */
    char why[1024];      /* error of the first function of a device that failed */
} group;

/* Stores the error of a failed function of member r, unless an earlier error is stored. */
static tt_status said(group *g, int r, tt_status status)
{
    if (status != TT_OK && !*g->why) snprintf(g->why, sizeof g->why, "%s", cuda->error(g->device[r]));
    return status;
}

static tt_status no_memory(group *g, int r, const void *memory)
{
    return memory ? TT_OK : said(g, r, TT_ERR_MEMORY);
}

/* Opens devices index[0], ..., with `memory` bytes each. The caller calls close_group even if this fails. */
static tt_status open_group(group *g, const int *index, int members, size_t memory)
{
    tt_status status = TT_OK;
    memset(g, 0, sizeof *g);
    g->ctx = test_open(&g->a);
    g->members = members;
    for (int r = 0; r < members && status == TT_OK; r++) {
        g->index[r] = index[r];
        g->cpu[r] = (char *)calloc(1, memory);
        g->device[r] = cuda->open(g->ctx, index[r], members, g->why, sizeof g->why);
        if (!g->device[r]) status = TT_ERR_DEVICE;
    }
    for (int k = 0; k < members * members && status == TT_OK; k++) {
        double rate;
        const char *why = cuda->peer(g->device[k / members], g->device[k % members], &rate);
        if (why && !*g->pair) snprintf(g->pair, sizeof g->pair, "%s", why);
        g->staged = g->staged || why;
        if (rate > 0 && !(g->rate <= rate && g->rate > 0)) g->rate = rate;
    }
    for (int r = 0; r < members && status == TT_OK; r++) {
        status = no_memory(g, r, g->memory[r] = (char *)cuda->allocate(g->device[r], memory));
        for (int k = 0; k < 2 && status == TT_OK && g->staged; k++)
            status = no_memory(g, r, g->pinned[k][r] = cuda->allocate_host(g->device[r], PINNED));
    }
    return status;
}

static void close_group(group *g)
{
    for (int r = 0; r < g->members; r++) /* memory is released after all members stop reading */
        if (g->device[r]) (void)cuda->wait(g->device[r]);
    for (int r = 0; r < g->members; r++) {
        for (int k = 0; k < 2; k++) {
            if (g->event[k][r]) cuda->release_event(g->device[r], g->event[k][r]);
            if (g->pinned[k][r]) cuda->release_host(g->device[r], g->pinned[k][r]);
        }
        if (g->memory[r]) cuda->release(g->device[r], g->memory[r]);
        if (g->device[r]) cuda->close(g->device[r]);
        free(g->cpu[r]);
    }
    TEST_CLOSE(g->ctx, &g->a);
}

/* Makes all members wait for the earlier work of all members. */
static tt_status sync_members(group *g)
{
    void **event = g->event[g->syncs++ % 2];
    tt_status status = TT_OK;
    for (int r = 0; r < g->members && status == TT_OK; r++)
        status = said(g, r, cuda->mark(g->device[r], TT__COMPUTE_STREAM, &event[r]));
    for (int k = 0; k < g->members * g->members && status == TT_OK; k++) {
        const int r = k / g->members, other = k % g->members;
        if (r == other || ++g->waits == g->left_out) continue;
        status = said(g, r, cuda->after(g->device[r], TT__COMPUTE_STREAM, event[other]));
    }
    return status;
}

/* -------------------------------------------------------------------------------------------- collectives */

typedef struct job { /* a collective, equal on all members */
    int op;
    tt_dtype dtype;
    tt__move move;
    bool add, in_place;
    int64_t elements;       /* elements of the whole operand */
    int present, slots;
    size_t x, y;            /* offsets of a member's operand and result, unless in place */
    size_t end;
} job;

static size_t item(const job *j) { return tt_dtype_bytes(j->dtype); }

/* Sets the operand and the result of member m, whose memory is `memory`. */
static void operands_of(const group *g, const job *j, int m, char *memory, tt__mat *in, tt__mat *out)
{
    int64_t first, n = tt__shard(j->elements, j->move.unit, j->move.root, m, g->members, &first);
    const tt__mat whole = {NULL, j->dtype, 1, j->elements, j->elements}, piece = {NULL, j->dtype, 1, n, n};
    *in = j->op == TT__OP_ALL_GATHER ? piece : whole;
    *out = j->op == TT__OP_REDUCE_SCATTER ? piece : whole;
    in->data = memory + j->x;
    out->data = memory + j->y;
    if (!j->in_place) return;
    out->data = in->data;
    if (j->op == TT__OP_REDUCE_SCATTER) out->data = memory + j->x + (size_t)first * item(j);
    if (j->op == TT__OP_ALL_GATHER) in->data = memory + j->x + (size_t)first * item(j);
}

typedef struct made_launch { tt__instr instr; tt__mat in[64], out[64]; } made_launch;

static void make_launch(const group *g, const job *j, int me, char *const *memory, made_launch *m,
                        tt__launch *l)
{
    memset(l, 0, sizeof *l);
    m->instr = tt__new_instr(j->op);
    m->instr.move = j->move;
    l->instr = &m->instr;
    l->device = g->device[me];
    operands_of(g, j, me, memory[me], &l->in[0], &l->out[0]);
    l->add[0] = j->add;
    l->members = j->slots ? j->slots : g->members;
    l->me = j->slots ? 0 : me;
    l->present = j->present;
    for (int k = 0; k < l->members; k++) {
        operands_of(g, j, k, memory[j->slots ? me : k], &m->in[k], &m->out[k]);
        if (j->slots) m->in[k].data = (char *)l->in[0].data + (size_t)(k * j->elements) * item(j);
    }
    l->peer_in = m->in;
    l->peer_out = m->out;
}

static int phases_of(const job *j)
{
    const tt__instr i = tt__new_instr(j->op);
    return tt__rules_of(&i)->phases;
}

static made_launch made[MAX][MAX_JOBS];

/* Tells whether a member runs the SEND that precedes a RECV: member move.from does. */
static bool sends(const job *j, int member)
{
    return j->op == TT__OP_RECV && member == j->move.from && j->move.from != j->move.to;
}

/* Launches one phase of n collectives on each member. */
static tt_status launch_phase(group *g, const job *j, int n, int phase)
{
    tt__launch l[MAX_JOBS];
    tt_status status = TT_OK;
    for (int r = 0; r < g->members && status == TT_OK; r++) {
        for (int k = 0; k < n; k++) {
            make_launch(g, &j[k], r, g->memory, &made[r][k], &l[k]);
            l[k].phase = phase;
            if (sends(&j[k], r)) made[r][k].instr.op = TT__OP_SEND;
        }
        if (j->op != TT__OP_RECV) status = said(g, r, cuda->launch(l, n));
        for (int k = 0; k < n && status == TT_OK && j->op == TT__OP_RECV; k++)
            status = said(g, r, cuda->launch(&l[k], 1));
    }
    return status;
}

/* Runs one phase of a collective through the host, part by part: each member copies the data that other
   members need, waits for all members, and loads the data that it needs itself. A buffer is free again after
   the wait of the next part, because all members have then loaded their data. */
static tt_status stage_phase(group *g, const job *j, int phase)
{
    tt_status status = TT_OK;
    bool more = true;
    for (int64_t from = 0, max = 0; more && status == TT_OK; from += max) {
        tt__launch l[MAX];
        void **pinned = g->pinned[g->parts++ % 2];
        max = (int64_t)(PINNED / item(j)) / g->members & ~(int64_t)7;
        for (int r = 0; r < g->members && status == TT_OK; r++) {
            bool others = more;
            make_launch(g, j, r, g->memory, &made[r][0], &l[r]);
            if (sends(j, r)) made[r][0].instr.op = TT__OP_SEND;
            l[r].phase = phase;
            l[r].staged = pinned;
            l[r].from = from;
            l[r].max = max;
            status = said(g, r, cuda->stage(&l[r], &more));
            CHECK(r == 0 || status != TT_OK || more == others);
        }
        if (status == TT_OK) status = sync_members(g);
        for (int r = 0; r < g->members && status == TT_OK; r++) status = said(g, r, cuda->launch(&l[r], 1));
    }
    return status;
}

/* Runs n collectives of one op as src/run/ does. */
static tt_status run_jobs(group *g, const job *j, int n)
{
    tt_status status = TT_OK;
    const int phases = phases_of(j);
    const bool direct = phases && !g->staged;
    if (!phases) return launch_phase(g, j, n, 0);
    if (direct) status = sync_members(g);
    for (int phase = TT__REDUCE_PHASE; phase <= TT__SPREAD_PHASE && status == TT_OK; phase++) {
        if (!(phases & phase)) continue;
        if (direct) status = launch_phase(g, j, n, phase);
        if (direct && status == TT_OK) status = sync_members(g);
        for (int k = 0; k < n && !direct && status == TT_OK; k++) status = stage_phase(g, &j[k], phase);
    }
    return status;
}

static void run_on_cpu(const group *g, const job *j)
{
    for (int phase = 0; phase <= TT__SPREAD_PHASE; phase++)
        for (int r = 0; r < g->members; r++) {
            tt__launch l;
            if (phase ? !(phases_of(j) & phase) : phases_of(j) != 0) continue;
            make_launch(g, j, r, g->cpu, &made[0][0], &l);
            l.device = (tt__device *)(void *)&g->ctx->cpu;
            l.phase = phase;
            CHECK(tt__cpu_backend.launch(&l, 1) == TT_OK);
        }
}

static void put(void *memory, tt_dtype dtype, int64_t k, float x)
{
    if (dtype == TT__F64) ((double *)memory)[k] = (double)x;
    else tt__convert((char *)memory + (size_t)k * tt_dtype_bytes(dtype), dtype, &x, TT_F32, 1);
}

/* Replaces each NaN by one pattern, because bits of NaNs differ between the CPU and a GPU. */
static void one_nan(char *memory, tt_dtype dtype, int64_t n)
{
    for (int64_t k = 0; k < n; k++) {
        float x = 0;
        if (dtype == TT__F64) x = (float)((double *)(void *)memory)[k];
        else tt__convert(&x, TT_F32, memory + (size_t)k * tt_dtype_bytes(dtype), dtype, 1);
        if (x != x) memset(memory + (size_t)k * tt_dtype_bytes(dtype), 0xff, tt_dtype_bytes(dtype));
    }
}

/* Makes job `number` of op at random; its operands begin at byte `at`. */
static job draw_job(const group *g, int op, int number, size_t at)
{
    static const tt_dtype dtypes[] = {TT_F32, TT_BF16, TT_F16, TT__F64};
    static const int64_t sizes[] = {1, 2, 5, 16, 33, 64, 1000, 2049, 4097, 9000}, units[] = {1, 1, 7, 4096};
    static const int slots[] = {1, 2, 3, 8, 9, 64};
    uint64_t s = (uint64_t)number * 977 + (uint64_t)(op * 64 + g->members) + 1;
    job j;
    memset(&j, 0, sizeof j);
    for (int k = 0; k < 8; k++) test_random(&s);
    j.op = op;
    j.dtype = dtypes[pick(&s, 4)];
    j.elements = sizes[pick(&s, TEST_COUNT(sizes))];
    j.move.over = TT__OVER_DATA;
    j.move.unit = units[pick(&s, 4)];
    j.move.reduce = (tt__reduce)(pick(&s, 2) ? 0 : pick(&s, 3));
    j.move.root = op == TT__OP_BROADCAST || (op != TT__OP_ALL_REDUCE && pick(&s, 2));
    j.move.from = (int)pick(&s, (uint32_t)g->members);
    j.move.to = (j.move.from + 1) % g->members;
    j.add = j.move.reduce == TT__SUM && pick(&s, 2);
    j.in_place = pick(&s, 2);
    j.present = pick(&s, 3) ? g->members : (int)pick(&s, (uint32_t)g->members + 1);
    if (op == TT__OP_BROADCAST) j.move.root = false; /* move.root says that one member has all data, but in
                                                        a broadcast each member has a shard */
    if (op == TT__OP_SUM_SLOTS) {
        j.slots = slots[pick(&s, TEST_COUNT(slots))];
        j.present = pick(&s, 3) ? j.slots : (int)pick(&s, (uint32_t)j.slots + 1);
        j.elements = tt__min(j.elements, (int64_t)(JOB / 2 / item(&j)) / j.slots);
    }
    const size_t bytes = (size_t)j.elements * item(&j);
    j.x = at + pick(&s, 4) * item(&j); /* not always aligned to a vector */
    j.y = tt__align_to(j.x + bytes * (size_t)(j.slots ? j.slots : 1) + 32, 16) + pick(&s, 4) * item(&j);
    j.end = tt__align_to(j.y + bytes + 32, 16);
    return j;
}

/* Fills the operands with numbers of many sizes. Some numbers cancel, and some are not finite. */
static void fill_job(const group *g, const job *j, uint64_t *s)
{
    for (int r = 0; r < g->members; r++)
        for (size_t k = 0; k < (j->end - j->x) / item(j); k++) {
            const uint32_t kind = pick(s, 64);
            float x = test_uniform(s);
            if (kind == 0) x = NAN;
            else if (kind == 1) x = INFINITY;
            else if (kind < 4) x = x < 0 ? -0.0f : 0.0f;
            else if (kind < 24) x = ldexpf(x, (int)(12 * test_uniform(s)));
            put(g->cpu[r] + j->x, j->dtype, (int64_t)k, x);
        }
}

/* Runs `jobs` collectives of op, in calls of one to MAX_JOBS, and compares all memory with the CPU's. */
static tt_status compare_op(group *g, int op, int jobs, uint64_t seed)
{
    job j[MAX_JOBS];
    uint64_t s = seed;
    tt_status status = TT_OK;
    char *got = (char *)malloc(MEMORY);
    for (int done = 0, n; done < jobs && status == TT_OK; done += n) {
        size_t end = 0;
        n = 1 + done % MAX_JOBS;
        memset(j, 0, sizeof j);
        for (int k = 0; k < n; k++) {
            j[k] = draw_job(g, op, done + k + (int)seed * jobs, end);
            end = j[k].end;
            fill_job(g, &j[k], &s);
        }
        CHECK(end <= MEMORY);
        for (int r = 0; r < g->members && status == TT_OK; r++) {
            status = said(g, r, cuda->copy(g->device[r], TT__COMPUTE_STREAM, g->memory[r], g->cpu[r], end));
            if (status == TT_OK) status = said(g, r, cuda->wait(g->device[r]));
        }
        if (status == TT_OK) status = run_jobs(g, j, n);
        for (int k = 0; k < n; k++) run_on_cpu(g, &j[k]);
        for (int r = 0; r < g->members && status == TT_OK; r++) {
            status = said(g, r, cuda->read(g->device[r], got, g->memory[r], end));
            for (int k = 0; k < n && status == TT_OK; k++) {
                const int64_t all = (int64_t)((j[k].end - j[k].x) / item(&j[k]));
                char text[256];
                one_nan(got + j[k].x, j[k].dtype, all);
                one_nan(g->cpu[r] + j[k].x, j[k].dtype, all);
                const bool same = memcmp(got + j[k].x, g->cpu[r] + j[k].x, j[k].end - j[k].x) == 0;
                snprintf(text, sizeof text, "%s, job %d of %d: %lld %s, unit %lld, member %d of %d, "
                         "%d present%s%s%s, reduce %d%s", tt__ops[op].name, done + k, n,
                         (long long)j[k].elements, tt_dtype_name(j[k].dtype), (long long)j[k].move.unit, r,
                         g->members, j[k].present, j[k].add ? ", adds" : "",
                         j[k].in_place ? ", in place" : "", j[k].move.root ? ", root" : "",
                         (int)j[k].move.reduce, g->staged ? ", staged" : "");
                test__check(same, __FILE__, __LINE__, text);
            }
        }
    }
    free(got);
    return status;
}

static const int ops[] = {TT__OP_ALL_REDUCE, TT__OP_REDUCE_SCATTER, TT__OP_ALL_GATHER, TT__OP_BROADCAST,
                          TT__OP_RECV, TT__OP_SUM_SLOTS};

/* Chooses the devices: all existing devices, or the first device for every member. */
static void choose(int index[MAX], int devices)
{
#ifndef TT_EMULATE
    devices = 1;
#endif
    for (int r = 0; r < MAX; r++) index[r] = r % devices;
}

/* Starts the emulator with `devices` devices. On a GPU, `devices` and `seed` have no effect. Without `peers`,
   an environment variable says that devices do not reach each other. */
static void start(int devices, bool peers, uint64_t seed)
{
#ifdef TT_EMULATE
    emu_configure(devices, (size_t)4 << 20, peers, seed);
#else
    (void)devices;
    (void)seed;
    if (peers) unsetenv("TINYTRAIN_PEERS");
    else setenv("TINYTRAIN_PEERS", "0", 1);
#endif
}

/* Tells whether this build of the emulator has checks. A build with checks takes several times as long, so it
   skips some runs that other builds test. */
static bool is_slow(void)
{
#ifdef TT_EMULATE
    return strcmp(emu_build(), "plain") != 0;
#else
    return false;
#endif
}

#ifdef TT_EMULATE
/* Tells whether runs with a missing wait are tried. In the plain build their results reveal the missing wait,
   in the trace build the emulator does. The build with AddressSanitizer only runs with all waits. */
static bool leaves_waits_out(void) { return strcmp(emu_build(), "asan") != 0; }
#endif

static void check_nothing_left(const char *what)
{
#ifdef TT_EMULATE
    char left[256], text[512];
    const bool none = emu_live_objects(left, sizeof left) == 0;
    snprintf(text, sizeof text, "%s: left on the devices: %s", what, none ? "nothing" : left);
    test__check(none, __FILE__, __LINE__, text);
#else
    (void)what;
#endif
}

static void compare_group(int members, int devices, bool peers, uint64_t seed)
{
    int index[MAX];
    group g;
    choose(index, devices);
    start(devices, peers, seed);
    tt_status status = open_group(&g, index, members, MEMORY);
    CHECK(g.staged == (members > 1 && !peers) && g.staged == (*g.pair != 0));
    for (int k = 0; k < TEST_COUNT(ops) && status == TT_OK; k++) status = compare_op(&g, ops[k], 17, seed);
    if (!test__check(status == TT_OK, __FILE__, __LINE__, g.why)) printf("%s\n", g.why);
    if (g.staged) CHECK(g.parts > 28 * TEST_COUNT(ops)); /* shards do not fit into one part */
    close_group(&g);
    unsetenv("TINYTRAIN_PEERS");
    check_nothing_left("collectives");
}

TEST(collectives_of_devices)
{
    static const int members[] = {1, 2, 3, 4, 8};
    for (int seed = 0; seed < seeds(1); seed++)
        for (int k = 0; k < 2 * TEST_COUNT(members); k++)
            compare_group(members[k / 2], members[k / 2], k % 2, (uint64_t)(seed * 10 + k));
}

/* Ranks that share a GPU share no stream. A second run sends their data through the host. */
TEST(ranks_on_one_device)
{
    for (int seed = 0; seed < seeds(2); seed++) {
        compare_group(2, 1, true, (uint64_t)seed);
        compare_group(4, 2, true, (uint64_t)seed);
        setenv("TINYTRAIN_PEERS", "0", 1);
        compare_group(2, 1, false, (uint64_t)seed);
    }
}

/* ------------------------------------------------------------------------------------------------ squares */

/* Computes sums of squares of the shards of several tensors, chunk by chunk, then sums all chunks. */
TEST(squares_of_pieces)
{
    enum { TENSORS = 7, CHUNKS = 5, N = CHUNKS * TT__CHUNK, MEMBERS = 3 };
    static const int64_t sizes[TENSORS] = {1, 4095, 4096, 4097, 12288, N - 5, 30};
    static const tt_dtype dtypes[] = {TT_F32, TT_BF16, TT_F16};
    static char g[TENSORS][N * sizeof(float)];
    double exact[TENSORS][CHUNKS], table[TENSORS][CHUNKS];
    float folded[TENSORS];
    const int index[MAX] = {0};
    const size_t at_table = sizeof g, at_folded = at_table + sizeof table;
    group d;
    uint64_t s = 7;
    start(1, true, 3);
    REQUIRE(open_group(&d, index, 1, MEMORY) == TT_OK);
    CHECK(at_folded + sizeof folded <= MEMORY);
    memset(exact, 0, sizeof exact);
    for (int k = 0; k < TENSORS; k++)
        for (int64_t e = 0; e < N; e++) {
            float x = test_uniform(&s);
            put(g[k], dtypes[k % 3], e, x);
            tt__convert(&x, TT_F32, g[k] + (size_t)e * tt_dtype_bytes(dtypes[k % 3]), dtypes[k % 3], 1);
            if (e < sizes[k]) exact[k][e / TT__CHUNK] += (double)x * (double)x;
        }
    CHECK(cuda->copy(d.device[0], TT__COMPUTE_STREAM, d.memory[0], g, sizeof g) == TT_OK &&
          cuda->wait(d.device[0]) == TT_OK &&
          cuda->fill(d.device[0], d.memory[0] + at_table, 0xff, sizeof table) == TT_OK);
    /* Each phase but the last runs on one member's shards. The last phase sums all chunks. */
    for (int phase = 0; phase < MEMBERS + 1; phase++) {
        tt__instr i = tt__new_instr(phase < MEMBERS ? TT__OP_CHUNK_SQUARES : TT__OP_FOLD_SQUARES);
        tt__launch l[TENSORS];
        memset(l, 0, sizeof l);
        for (int k = 0; k < TENSORS; k++) {
            int64_t first, n = tt__shard(sizes[k], TT__CHUNK, false, phase % MEMBERS, MEMBERS, &first);
            const int64_t chunks = tt__ceil_div(phase < MEMBERS ? n : sizes[k], TT__CHUNK);
            const int64_t at = phase < MEMBERS ? first / TT__CHUNK : 0;
            char *memory = d.memory[0] + (size_t)k * sizeof g[0];
            char *to = d.memory[0] + at_table + (size_t)(k * CHUNKS + at) * sizeof(double);
            memory += (size_t)first * tt_dtype_bytes(dtypes[k % 3]);
            const tt__mat x = {memory, dtypes[k % 3], 1, n, n}, sums = {to, TT__F64, 1, chunks, chunks},
                          sum = {d.memory[0] + at_folded + (size_t)k * sizeof(float), TT_F32, 1, 1, 1};
            l[k].device = d.device[0];
            l[k].instr = &i;
            l[k].in[0] = phase < MEMBERS ? x : sums;
            l[k].out[0] = phase < MEMBERS ? sums : sum;
        }
        CHECK(cuda->launch(l, TENSORS) == TT_OK);
    }
    CHECK(cuda->read(d.device[0], table, d.memory[0] + at_table, sizeof table) == TT_OK &&
          cuda->read(d.device[0], folded, d.memory[0] + at_folded, sizeof folded) == TT_OK);
    for (int k = 0; k < TENSORS; k++) {
        double sum = 0;
        for (int64_t c = 0; c < CHUNKS; c++) {
            if (c * TT__CHUNK < sizes[k]) CHECK_NEAR(table[k][c], exact[k][c], 1e-6 * exact[k][c]);
            else CHECK(table[k][c] != table[k][c]); /* NaN: not written */
            sum += c * TT__CHUNK < sizes[k] ? table[k][c] : 0;
        }
        CHECK_NEAR(folded[k], sum, 1e-7 * sum);
    }
    close_group(&d);
}

/* ----------------------------------------------------------------------------------------------- programs
   Trainings on the ranks of a program, whose collectives src/run/ issues. */

enum { NET_IN = 70, NET_HIDDEN = 130, NET_OUT = 5, NET_ROWS = 6, NET_STEPS = 3 };

/* The work of a training. `micros`: micro-batches of each step. `groups`: number of leaves. `rows`: rows of a
   micro-batch; 0: micro-batches have different numbers of rows. `update`: NULL, or the option `update` for
   steps of one round without clipping. */
typedef struct net_work { int micros[NET_STEPS], groups, rows; const char *update; } net_work;
static const net_work usual = {{11, 11, 0}, 8, 0, NULL}, *work = &usual;

typedef struct net { /* results of a training */
    double loss, norm;
    float w[NET_IN * NET_HIDDEN + NET_HIDDEN + NET_HIDDEN * NET_OUT];
} net;

/* left_out: the device that skips its waits for other devices' events. Devices count from 1, in the order in
   which they first wait; 0: no device skips waits. left_wait: the choice of waits that leave_waits_out
   removes; -1: none. */
static int left_out, left_wait = -1;
static void **hosts_event;
static tt__backend fewer_waits;
static tt__device_kind fewer;

static tt_status after_some(tt__device *d, int stream, void *event)
{
    static tt__device *known[MAX];
    int r = 0;
    while (known[r] && known[r] != d) r++;
    known[r] = d;
    if (hosts_event && stream == TT__HOST_STREAM && event == *hosts_event) return TT_OK;
    return stream == TT__COMPUTE_STREAM && r + 1 == left_out ? TT_OK : cuda->after(d, stream, event);
}

static void leave_out(tt_program *p)
{
    fewer_waits = *cuda;
    fewer_waits.after = after_some;
    fewer = *p->settings.kind;
    fewer.backend = &fewer_waits;
    p->settings.kind = p->settings.group->kind = p->arena->kind = &fewer;
}

static char net_error[1024];
/* Removes waits of the updates in the host's memory. These updates run in `groups` groups of instructions. A
   left_wait below `groups` is the number of a group: removes the waits for the group's copies to the host. A
   left_wait of `groups` removes the last waits for copies back to the device, and `groups + 1` removes the
   host's own wait. Copies of one stream end in order, so a single missing wait would change nothing. Returns
   the number of choices. */
static int leave_waits_out(tt_program *p)
{
    const tt_tape *t = p->built.t;
    tt__rank *r = &p->rank[0];
    int groups = 0;
    for (int k = tt__segment_first(t, TT__EACH_STEP); k < t->n_code; k++)
        groups += t->code[k].on_host && !t->code[k].with_next;
    for (int k = tt__segment_first(t, TT__EACH_STEP), group = 0; k < t->n_code; k++) {
        group += t->code[k].on_host && !t->code[k].with_next;
        if (!tt__is(&t->code[k], TT__WAITS)) continue;
        const bool back = t->values[t->code[k].in[0]].space == TT__DEVICE;
        if (left_wait == (back ? groups : group)) p->built.t->code[k].in[0] = 0;
    }
    p->built.in_flight += 16;
    tt__free(p->ctx, r->started);
    r->started = (tt__started *)tt__calloc(p->ctx, sizeof *r->started * (size_t)p->built.in_flight);
    hosts_event = left_wait > groups ? &p->settings.group->event[0] : NULL;
    if (hosts_event) leave_out(p);
    return groups + 2;
}

static const char *offload, *update; /* options of the programs */
static int net_waits; /* number of waits that leave_waits_out can remove from the last program */
static size_t net_copied_bytes; /* bytes that the last program's plan copies */

/* Returns the device names to use. On a GPU, ranks with separate devices become ranks that share the GPU. */
static const char *ranks_here(const char *device)
{
#ifndef TT_EMULATE
    static const char *const shared[][2] = {{"cuda*2", "cuda:0,0"}, {"cuda:1,0", "cuda:0,0"},
                                            {"cuda*4", "cuda:0,0,0,0"}, {"cuda*8", "cuda:0,0,0,0,0,0,0,0"}};
    for (int k = 0; k < TEST_COUNT(shared); k++) if (strcmp(device, shared[k][0]) == 0) return shared[k][1];
#endif
    return device;
}

/* Trains the steps of *work on the ranks of a device. Returns TT_OK or an error, whose text is in
   net_error. */
static tt_status train_net(net *to, const char *device, int zero, bool server, const char *precision)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    const int64_t first[] = {NET_HIDDEN, NET_IN}, bias[] = {NET_HIDDEN}, second[] = {NET_OUT, NET_HIDDEN};
    const tt_init normal = {TT_INIT_NORMAL, 0.2f};
    tt_param *w[] = {tt_param_new(ctx, "first", 2, first, normal), tt_param_new(ctx, "bias", 1, bias, normal),
                     tt_param_new(ctx, "second", 2, second, normal)};
    tt_tape *t = tt_tape_new(ctx);
    tt_compile_options o = tt_compile_options_default();
    tt_stats stats;
    memset(to, 0, sizeof *to);
    memset(&stats, 0, sizeof stats);
    const int64_t rows = tt_axis(t, "rows", NET_ROWS);
    tt_value x = tt_input(t, "x", TT_F32, rows, NET_IN), y = tt_input(t, "y", TT_I32, rows, 1);
    tt_value h = tt_dropout(t, tt_gelu(t, tt_linear(t, x, w[0], w[1])), 0.1f);
    /* the net has too few blocks to offload "activations" by itself, so the test marks this value */
    if (offload && strcmp(offload, "activations") == 0) tt_offload(t, h);
    tt_value loss = tt_cross_entropy(t, tt_linear(t, h, w[2], NULL), y, NULL);
    o.device = ranks_here(device);
    o.accumulate = !work->update;
    o.update = update ? update : work->update;
    o.precision = precision;
    o.optimizer.clip_norm = work->update ? 0 : 0.5f;
    o.parallel.groups = work->groups;
    o.parallel.zero = zero;
    o.parallel.server = server;
    o.offload = offload;
    tt_program *p = tt_compile(t, loss, &o);
    tt_status status = p ? TT_OK : tt_error_code(ctx);
    net_copied_bytes = p ? tt_program_plan(p).transfer_bytes : 0;
    if (p && left_out) leave_out(p);
    if (p && update && p->settings.group->ranks == 1) net_waits = leave_waits_out(p);
    for (int m = 0, step = 0, in_step = 0; step < NET_STEPS && work->micros[step] && status == TT_OK; m++) {
        const int data = p->arena->data, n = work->rows ? work->rows : 1 + m * 7 % NET_ROWS;
        const bool last = in_step == work->micros[step] - 1;
        float xs[NET_ROWS * NET_IN];
        int32_t ys[NET_ROWS];
        for (int k = 0; k < n * NET_IN; k++) xs[k] = (float)((k * 37 + m * 11) % 101) / 50 - 1;
        for (int k = 0; k < n; k++) ys[k] = (k + m) % NET_OUT;
        status = tt_set_rank(p, in_step % data, x, xs, n);
        if (status == TT_OK) status = tt_set_rank(p, in_step % data, y, ys, n);
        const bool round = last || in_step % data == data - 1;
        if (status == TT_OK && round && work->update) status = tt_step(p, 0.01f, &stats);
        else if (status == TT_OK && round) status = tt_micro_step(p, NULL);
        if (status == TT_OK && last && !work->update) status = tt_update(p, 0.01f, &stats);
        in_step = last ? 0 : in_step + 1;
        step += last;
    }
    to->loss = stats.loss;
    to->norm = stats.grad_norm;
    float *at = to->w;
    for (int k = 0; k < TEST_COUNT(w) && status == TT_OK; at += w[k++]->size) status = tt_param_get(w[k], at);
    CHECK(status == TT_OK || tt_error_code(ctx) == status);
    snprintf(net_error, sizeof net_error, "%s", status == TT_OK ? "" : tt_error(ctx));
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
    return status;
}

/* Ranks that share a device train with the bits of one rank, whether kernels load from the other rank's
   memory or data goes through the host. */
TEST(ranks_of_one_device_train_alike)
{
    static const char *const precisions[] = {"32-true", "bf16-mixed", "16-mixed", "bf16-true"};
    static const char *const devices[] = {"cuda:0,0", "cuda:0,0,0,0"};
    static net one, got;
    for (int k = 0; k < 2 * TEST_COUNT(precisions); k++) {
        const int max = k % 2 ? 3 : 1; /* ZeRO 3 sums in each micro-batch, and so does its reference */
        const char *precision = precisions[k / 2];
        if (is_slow() && k / 2 != 1) continue;
        start(1, true, (uint64_t)k);
        REQUIRE(train_net(&one, "cuda", max, false, precision) == TT_OK);
        for (int d = 0; d < 2 * TEST_COUNT(devices); d++) {
            const int zero = max - (d + k / 2) % 2;
            char text[256];
            start(1, d < 2, (uint64_t)(8 * k + d));
            if (d >= 2) setenv("TINYTRAIN_PEERS", "0", 1);
            const tt_status status = train_net(&got, devices[d % 2], zero, false, precision);
            snprintf(text, sizeof text, "%s, %s, zero %d%s", devices[d % 2], precision, zero,
                     d < 2 ? "" : ", through the host");
            test__check(status == TT_OK && memcmp(&got, &one, sizeof got) == 0, __FILE__, __LINE__, text);
            unsetenv("TINYTRAIN_PEERS");
            check_nothing_left(text);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ streams */

/* A program whose copies overlap with its computation. */
typedef struct beside { test_allocator a; tt_context *ctx; streams s; } beside;

/* Makes and runs the program, as CUDA graphs if `records`. without: number of the wait that is removed; -1:
   none. The caller calls close_beside even if this fails. */
static tt_status run_beside(beside *b, bool records, int without, float to[STREAM_RUNS][STREAM_NUMBERS])
{
    b->ctx = test_open(&b->a);
    if (!streams_compile(&b->s, b->ctx, "cuda")) return tt_error_code(b->ctx);
    b->s.p->rank[0].never_records = !records;
    b->s.p->poison = true;
    if (without >= 0 && !streams_drop(&b->s, without)) return TT_ERR_MEMORY;
    return streams_run(&b->s, to);
}

static void close_beside(beside *b)
{
    streams_free(&b->s);
    TEST_CLOSE(b->ctx, &b->a);
}

/* Copies that overlap with computation give equal bits in every order of the work, launched singly or as CUDA
   graphs. */
TEST(copies_beside_computation)
{
    static float expected[STREAM_RUNS][STREAM_NUMBERS], got[STREAM_RUNS][STREAM_NUMBERS];
    for (int k = 0; k < 2 * seeds(5); k++) {
        beside b;
        start(1, true, (uint64_t)(k / 2));
        CHECK(run_beside(&b, k % 2, -1, k ? got : expected) == TT_OK);
        CHECK(k == 0 || memcmp(got, expected, sizeof got) == 0);
        const tt__rank *r = &b.s.p->rank[0];
        CHECK(!r->why[0] && (r->recordings[0].made != NULL) == (k % 2 == 1));
        close_beside(&b);
        check_nothing_left("streams");
    }
}

#ifdef TT_EMULATE

/* Tells whether a missing wait between streams is noticed. Runs in a child process, which the emulator may
   end. */
static bool is_noticed_beside(int wait, uint64_t seed, float expected[STREAM_RUNS][STREAM_NUMBERS])
{
    static float got[STREAM_RUNS][STREAM_NUMBERS];
    int status = 0;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        beside b;
        if (!freopen("/dev/null", "w", stderr)) _exit(2);
        start(1, true, seed);
        const bool ok = run_beside(&b, false, wait, got) == TT_OK;
        _exit(ok && memcmp(got, expected, sizeof got) == 0 ? 0 : 3);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return false;
    return WEXITSTATUS(status) == 86 || WEXITSTATUS(status) == 3;
}

TEST(each_wait_between_streams_is_needed)
{
    static float expected[STREAM_RUNS][STREAM_NUMBERS];
    int tried = 0;
    beside b;
    start(1, true, EMU_EAGER);
    CHECK(run_beside(&b, false, -1, expected) == TT_OK);
    close_beside(&b);
    for (int wait = 0; wait < 2 * STREAM_BLOCKS && leaves_waits_out(); wait++) {
        char text[128];
        int seed = 0;
        while (seed < 24 && !is_noticed_beside(wait, (uint64_t)seed, expected)) seed++;
        tried += seed + 1;
        snprintf(text, sizeof text, "wait %d between streams can be left out", wait);
        test__check(seed < 24, __FILE__, __LINE__, text);
    }
    if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("%d waits, %d runs\n", 2 * STREAM_BLOCKS, tried);
}

/* Call n of CUDA fails, alone or with all later calls: the run reports the error, and nothing is leaked. */
TEST(any_call_beside_computation_may_fail)
{
    for (int lasting = 0; lasting < 2; lasting++) {
        long n = 1, failed = 0, runs = 0;
        for (bool reached = true; reached; n += 1 + n / (is_slow() ? 4 : 15), runs++) {
            static float got[STREAM_RUNS][STREAM_NUMBERS];
            beside b;
            char text[1400];
            start(1, true, (uint64_t)n);
            emu_inject_fault(n, lasting ? 719 : 999, lasting ? 1L << 40 : 1);
            const tt_status status = run_beside(&b, true, -1, got);
            reached = emu_api_calls() >= n;
            failed += status != TT_OK;
            snprintf(text, sizeof text, "call %ld fails%s: %s: %s", n, lasting ? ", and all after it" : "",
                     tt_status_name(status), tt_error(b.ctx));
            test__check(status == TT_OK || strstr(text, "device 'cuda"), __FILE__, __LINE__, text);
            close_beside(&b);
            check_nothing_left(text);
        }
        CHECK(n > 100 && failed > runs / 3);
    }
}

/* ---------------------------------------------------------------------------------------------- the probe */

/* Devices test whether they reach one another, and report why not. */
TEST(pairs_of_devices_are_tried)
{
    static const struct { unsigned wrong; const char *peers, *expected; } links[] = {
        {0, NULL, NULL},
        {0, "1", NULL},
        {EMU_NO_ACCESS, NULL,
         "device pair 0 -> 1 has no peer access: copies between them go through the host ("},
        {EMU_WRONG_COPIES, NULL,
         "device pair 0 -> 1 reports peer access, but copies wrong bytes: copies between them go through "
         "the host ("},
        {EMU_WRONG_LOADS, NULL,
         "device pair 0 -> 1 reports peer access, but loads wrong bytes: copies between them go through the "
         "host ("},
        {EMU_WRONG_COPIES | EMU_WRONG_LOADS, NULL,
         "device pair 0 -> 1 reports peer access, but copies wrong bytes: copies between them go through "
         "the host ("},
        {0, "0", "device pair 0 -> 1 is not tried, because TINYTRAIN_PEERS is 0: copies between them go "
         "through the host ("}};
    for (int k = 0; k < TEST_COUNT(links) * seeds(2); k++) {
        const int link = k % TEST_COUNT(links);
        char error[256] = "";
        tt__device *d[3];
        test_allocator a;
        emu_configure(2, (size_t)1 << 20, 1, (uint64_t)k);
        tt_context *ctx = test_open(&a);
        if (links[link].peers) setenv("TINYTRAIN_PEERS", links[link].peers, 1);
        emu_set_link(0, 1, links[link].wrong);
        for (int r = 0; r < 3; r++) { /* d[2] opens the second device again */
            d[r] = cuda->open(ctx, r ? 1 : 0, 3, error, sizeof error);
            REQUIRE(d[r]);
        }
        for (int other = 1; other < 3; other++) {
            double rate = -1, back = -1, same = -1;
            const char *why = cuda->peer(d[other], d[0], &rate);
            const size_t n = links[link].expected ? strlen(links[link].expected) : 0;
            CHECK(n ? why && strncmp(why, links[link].expected, n) == 0 && strstr(why, " GB/s)") : !why);
            CHECK(rate > 0);
            const bool all = links[link].peers && strcmp(links[link].peers, "0") == 0;
            why = cuda->peer(d[0], d[other], &back); /* the direction from d[other] to d[0] works */
            CHECK(all ? why && strncmp(why, "device pair 1 -> 0 is not tried", 31) == 0 : !why);
            CHECK(back > 0);
            why = cuda->peer(d[1], d[2], &same); /* two handles of one device work */
            CHECK(all ? why && strncmp(why, "device pair 1 -> 1 is not tried", 31) == 0 : !why);
            CHECK(all ? same > 0 : same == 0);
            CHECK(!cuda->peer(d[1], d[1], &same) && same == 0);
        }
        for (int r = 0; r < 3; r++) cuda->close(d[r]);
        TEST_CLOSE(ctx, &a);
        unsetenv("TINYTRAIN_PEERS");
        check_nothing_left(links[link].expected ? links[link].expected : "a link");
    }
}

/* If one pair brings wrong bytes in any way, all data goes through the host, and sums are right. */
TEST(a_pair_that_brings_wrong_bytes_is_avoided)
{
    static const unsigned wrong[] = {EMU_NO_ACCESS, EMU_WRONG_COPIES, EMU_WRONG_LOADS};
    int index[MAX];
    choose(index, MAX);
    for (int k = 0; k < TEST_COUNT(wrong); k++) {
        group g;
        start(4, true, (uint64_t)k);
        emu_set_link(3, 1, wrong[k]);
        tt_status status = open_group(&g, index, 4, MEMORY);
        CHECK(status == TT_OK && g.staged && strstr(g.pair, "device pair 3 -> 1 "));
        for (int op = 0; op < TEST_COUNT(ops) && status == TT_OK; op++)
            status = compare_op(&g, ops[op], 4, 1);
        if (!test__check(status == TT_OK, __FILE__, __LINE__, g.why)) printf("%s\n", g.why);
        close_group(&g);
        check_nothing_left("a wrong pair");
    }
}

/* -------------------------------------------------------------------------------------------------- waits */

/* A small model of a program: two rounds of sums, scattered sums and gathers, without a wait of the host in
   between. The vectors are written before and overwritten after each collective. */
enum { WAIT_MEMBERS = 3, NUMBERS = 2160, ROUNDS = 2 };
static const size_t at_x = 0, at_piece = NUMBERS * sizeof(float), at_log = 2 * NUMBERS * sizeof(float);

static tt_status copy_on(group *g, int r, size_t to, size_t from)
{
    tt__instr i = tt__new_instr(TT__OP_COPY);
    tt__launch l;
    memset(&l, 0, sizeof l);
    const tt__mat x = {g->memory[r] + from, TT_F32, 1, NUMBERS, NUMBERS},
                  y = {g->memory[r] + to, TT_F32, 1, NUMBERS, NUMBERS};
    l.device = g->device[r];
    l.instr = &i;
    l.in[0] = x;
    l.out[0] = y;
    return said(g, r, cuda->launch(&l, 1));
}

/* Fills `at`, the operand of a sum or of a gather, with numbers of the round and rank. */
static tt_status fill_all(group *g, size_t at, int round)
{
    tt_status status = TT_OK;
    for (int r = 0; r < g->members && status == TT_OK; r++)
        status = said(g, r, cuda->fill(g->device[r], g->memory[r] + at, 0x31 + 2 * r + round,
                                       NUMBERS * sizeof(float)));
    return status;
}

/* Runs the rounds. *first_round: number of waits in the first round. */
static tt_status run_rounds(group *g, int rounds, long *first_round)
{
    static const int what[] = {TT__OP_ALL_REDUCE, TT__OP_REDUCE_SCATTER, TT__OP_ALL_GATHER};
    tt_status status = TT_OK;
    for (int round = 0; round < rounds && status == TT_OK; round++) {
        for (int k = 0; k < TEST_COUNT(what) && status == TT_OK; k++) {
            const size_t to = at_log + (size_t)(round * TEST_COUNT(what) + k) * NUMBERS * sizeof(float);
            const bool in_place = what[k] == TT__OP_ALL_REDUCE, gathers = what[k] == TT__OP_ALL_GATHER;
            job j;
            memset(&j, 0, sizeof j);
            j.op = what[k];
            j.dtype = TT_F32;
            j.move.over = TT__OVER_DATA;
            j.move.unit = 1;
            j.in_place = in_place;
            j.elements = NUMBERS;
            j.present = g->members;
            j.x = gathers ? at_piece : at_x;
            j.y = gathers ? at_x : at_piece;
            status = fill_all(g, gathers ? at_piece : at_x, 5 * round + k);
            if (status == TT_OK && k == 0) status = fill_all(g, at_piece, 5 * round + 3);
            if (status == TT_OK) status = run_jobs(g, &j, 1);
            for (int r = 0; r < g->members && status == TT_OK; r++)
                status = copy_on(g, r, to, in_place || gathers ? at_x : at_piece);
            /* overwrites data that other members have just read */
            if (status == TT_OK) status = fill_all(g, gathers ? at_piece : at_x, 5 * round + 4);
        }
        if (round == 0) *first_round = g->waits;
    }
    return status;
}

enum { LOGGED = ROUNDS * 3 * NUMBERS * sizeof(float), WAIT_MEMORY = 2 * NUMBERS * sizeof(float) + LOGGED };

/* Runs the rounds on new devices and reads the results to `got`. The caller calls close_group. */
static tt_status run_group(group *g, int members, int rounds, long left_out, long *first_round, char *got)
{
    int index[MAX];
    choose(index, MAX);
    tt_status status = open_group(g, index, members, WAIT_MEMORY);
    g->left_out = left_out;
    if (status == TT_OK) status = run_rounds(g, rounds, first_round);
    for (int r = 0; r < members && status == TT_OK; r++)
        status = said(g, r, cuda->read(g->device[r], got + r * LOGGED, g->memory[r] + at_log,
                                       (size_t)(LOGGED / ROUNDS * rounds)));
    return status;
}

static tt_status run_without(long wait, bool peers, uint64_t seed, long *waits, char *got)
{
    group g;
    start(WAIT_MEMBERS, peers, seed);
    const tt_status status = run_group(&g, WAIT_MEMBERS, ROUNDS, wait, waits, got);
    close_group(&g);
    return status;
}

/* Tells whether a run without one wait is noticed, by its result or, in the trace build, by the emulator.
   Runs in a child process, as the emulator ends it. */
static bool is_noticed(long wait, bool peers, uint64_t seed, const char *expected)
{
    static char got[WAIT_MEMBERS * LOGGED];
    long waits;
    int status = 0;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(2);
        const bool ok = run_without(wait, peers, seed, &waits, got) == TT_OK;
        _exit(ok && memcmp(got, expected, sizeof got) == 0 ? 0 : 3);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return false;
    return WEXITSTATUS(status) == 86 || WEXITSTATUS(status) == 3;
}

static void each_wait(bool peers)
{
    static char expected[WAIT_MEMBERS * LOGGED], got[WAIT_MEMBERS * LOGGED];
    enum { SEEDS = 100 };
    long waits = 0, tried = 0;
    CHECK(run_without(0, peers, EMU_EAGER, &waits, expected) == TT_OK && waits > 30);
    for (int seed = 0; seed < seeds(10); seed++) /* with all waits, all orders of work give equal bits */
        CHECK(run_without(0, peers, (uint64_t)seed, &waits, got) == TT_OK &&
              memcmp(got, expected, sizeof got) == 0);
    for (long wait = 1; wait <= waits && leaves_waits_out(); wait++) {
        char text[128];
        int seed = 0;
        while (seed < SEEDS && !is_noticed(wait, peers, (uint64_t)seed, expected)) seed++;
        tried += seed + 1;
        snprintf(text, sizeof text, "wait %ld of %ld, %s, can be left out", wait, waits,
                 peers ? "with peers" : "through the host");
        test__check(seed < SEEDS, __FILE__, __LINE__, text);
    }
    if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("%ld waits, %ld runs\n", waits, tried);
}

TEST(each_wait_is_needed) { each_wait(true); }
TEST(each_wait_is_needed_through_the_host) { each_wait(false); }

/* ------------------------------------------------------------------------------------------------- faults */

enum { FAULT = 999 /* cudaErrorUnknown */, LOST = 719 /* cudaErrorLaunchFailure: all later calls fail */ };

/* For each n, call n of CUDA fails, alone or with all later calls, while devices are opened, tested, used and
   closed. A run that fails says why; a run that succeeds, through the host if necessary, has the right
   numbers. */
static void sweep(bool peers, long count)
{
    enum { MEMBERS = 2 };
    static char expected[MEMBERS * LOGGED], got[MEMBERS * LOGGED];
    long waits, n = 0, failed = 0;
    for (bool reached = true; reached; n++) { /* n = 0: no call fails */
        group g;
        char text[1400];
        start(MEMBERS, peers, (uint64_t)n);
        if (n) emu_inject_fault(n, count == 1 ? FAULT : LOST, count);
        tt_status status = run_group(&g, MEMBERS, 1, 0, &waits, n ? got : expected);
        reached = n == 0 || emu_api_calls() >= n;
        failed += status != TT_OK;
        const bool right = status == TT_OK && (n == 0 || memcmp(got, expected, sizeof got) == 0),
                   said_why = strstr(g.why, "unknown error") || strstr(g.why, "a kernel failed") ||
                              strstr(g.why, "cublasLtCreate");
        close_group(&g);
        snprintf(text, sizeof text, "call %ld fails%s: %s: %s", n, count == 1 ? "" : ", and all after it",
                 tt_status_name(status), g.why);
        test__check(status == TT_OK ? right : said_why, __FILE__, __LINE__, text);
        emu_inject_fault(0, 0, 0);
        check_nothing_left(text);
    }
    CHECK(n > 200 && failed > n / 3);
    if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("%ld calls, %ld failures\n", n - 1, failed);
}

TEST(any_call_may_fail)
{
    for (int k = 0; k < 4; k++) sweep(k % 2, k / 2 ? 1L << 40 : 1);
}

#endif

/* ------------------------------------------------------------------------------------------------ threads */

typedef struct threads { /* members with a thread each, like ranks */
    group *g;
    tt__rank_group *rank_group;
    job jobs[24];
    int n;
    tt_status status[MAX];
} threads;

/* Makes member `me` wait for the earlier work of all members; each member has a thread. */
static tt_status sync_member(threads *c, int me, long *syncs)
{
    group *g = c->g;
    const tt__members all = {0, 1, g->members};
    void **event = g->event[(*syncs)++ % 2];
    tt_status status = cuda->mark(g->device[me], TT__COMPUTE_STREAM, &event[me]);
    if (!tt__barrier(c->rank_group, me, all)) return TT_ERR_DEVICE;
    for (int r = 0; r < g->members && status == TT_OK; r++)
        if (r != me) status = cuda->after(g->device[me], TT__COMPUTE_STREAM, event[r]);
    return status;
}

static void *thread_main(void *arg)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static int next;
    threads *c = (threads *)arg;
    group *g = c->g;
    long syncs = 0, parts = 0;
    pthread_mutex_lock(&mutex);
    const int me = next;
    next = (next + 1) % g->members;
    pthread_mutex_unlock(&mutex);
    tt_status status = TT_OK;
    for (int k = 0; k < c->n && status == TT_OK; k++) {
        const job *j = &c->jobs[k];
        made_launch m;
        tt__launch l;
        make_launch(g, j, me, g->memory, &m, &l);
        if (sends(j, me)) m.instr.op = TT__OP_SEND;
        if (!phases_of(j)) status = cuda->launch(&l, 1);
        else if (!g->staged) status = sync_member(c, me, &syncs);
        for (l.phase = TT__REDUCE_PHASE; l.phase <= TT__SPREAD_PHASE && status == TT_OK; l.phase++) {
            bool more = true;
            if (!(phases_of(j) & l.phase)) continue;
            if (!g->staged) {
                status = cuda->launch(&l, 1);
                if (status == TT_OK) status = sync_member(c, me, &syncs);
                continue;
            }
            l.max = (int64_t)(PINNED / item(j)) / g->members & ~(int64_t)7;
            for (l.from = 0; more && status == TT_OK; l.from += l.max) {
                l.staged = g->pinned[parts++ % 2];
                status = cuda->stage(&l, &more);
                if (status == TT_OK) status = sync_member(c, me, &syncs);
                if (status == TT_OK) status = cuda->launch(&l, 1);
            }
        }
    }
    if (status == TT_OK) status = cuda->wait(g->device[me]);
    if (status != TT_OK) tt__rank_group_fail(c->rank_group);
    c->status[me] = status;
    return NULL;
}

/* Each member has a thread. The threads meet at barriers to enqueue work, and wait for the end of the work
   only after all jobs. The results have equal bits. */
TEST(a_thread_for_each_device)
{
    for (int k = 0; k < 4 * seeds(1); k++) {
        static char got[MEMORY];
        const int members = k % 4 < 2 ? 2 : 4;
        int index[MAX];
        group g;
        threads c;
        pthread_t thread[MAX];
        uint64_t s = (uint64_t)k + 1;
        memset(&c, 0, sizeof c);
        choose(index, MAX);
        start(members, k % 2, (uint64_t)k);
        REQUIRE(open_group(&g, index, members, MEMORY) == TT_OK);
        c.g = &g;
        c.rank_group = tt__rank_group_new(g.ctx, members, 600);
        size_t end = 0;
        for (int op = 0; op < TEST_COUNT(ops) && c.rank_group; op++, c.n++) {
            c.jobs[c.n] = draw_job(&g, ops[op], k + 7, end);
            end = c.jobs[c.n].end;
            fill_job(&g, &c.jobs[c.n], &s);
        }
        for (int r = 0; r < members; r++)
            CHECK(cuda->copy(g.device[r], TT__COMPUTE_STREAM, g.memory[r], g.cpu[r], end) == TT_OK &&
                  cuda->wait(g.device[r]) == TT_OK);
        for (int r = 0; r < members; r++)
            CHECK(pthread_create(&thread[r], NULL, thread_main, &c) == 0);
        for (int r = 0; r < members; r++) pthread_join(thread[r], NULL);
        for (int n = 0; n < c.n; n++) run_on_cpu(&g, &c.jobs[n]);
        for (int r = 0; r < members; r++) {
            CHECK(c.status[r] == TT_OK && cuda->read(g.device[r], got, g.memory[r], end) == TT_OK);
            for (int n = 0; n < c.n; n++) {
                const job *j = &c.jobs[n];
                const int64_t all = (int64_t)((j->end - j->x) / item(j));
                one_nan(got + j->x, j->dtype, all);
                one_nan(g.cpu[r] + j->x, j->dtype, all);
                CHECK(memcmp(got + j->x, g.cpu[r] + j->x, j->end - j->x) == 0);
            }
        }
        tt__rank_group_free(c.rank_group);
        close_group(&g);
        check_nothing_left("threads");
    }
}

/* On 1, 2, 4 and 8 devices, with peer access, without it, and with a pair of devices that copies wrong bytes,
   all orders of the devices give equal bits, which equal the CPU's numbers up to rounding. */
TEST(programs_train_alike_on_any_ranks)
{
    static const char *const precisions[] = {"32-true", "bf16-true"};
    static const char *const devices[] = {"cuda", "cuda*2", "cuda*4", "cuda*8", "cuda:1,0", "cuda:0,0"};
    static const char *const offloads[] = {NULL, "optimizer,gradients,parameters", "optimizer",
                                           "gradients,parameters"};
    static net cpu, one, got;
    for (int k = 0; k < 4; k++) { /* k / 2: the precision; k % 2: sums in each micro-batch, not per step */
        const bool micros = k % 2 == 1;
        REQUIRE(train_net(&cpu, "cpu", micros ? 2 : 1, false, precisions[k / 2]) == TT_OK);
        start(8, true, 0);
        REQUIRE(train_net(&one, "cuda", micros ? 2 : 1, false, precisions[k / 2]) == TT_OK);
        const double bound = k / 2 ? 0.05 : 1e-4;
        CHECK_NEAR(one.loss, cpu.loss, bound * cpu.loss);
        CHECK_NEAR(one.norm, cpu.norm, bound * cpu.norm);
        for (int e = 0; e < TEST_COUNT(one.w); e++) CHECK_NEAR(one.w[e], cpu.w[e], k / 2 ? 0.03 : 2e-5);
        for (int seed = 0; seed < seeds(1); seed++)
            for (int d = 0; d < TEST_COUNT(devices); d++)
                for (int links = 0; links < 3; links++) {
                    /* a slow build takes every third case */
                    if (is_slow() && (d + links + k + seed) % 3) continue;
                    const int zero = micros ? 2 + (d + seed) % 2 : (d + seed) % 2;
                    const bool server = !micros && (d + seed) % 3 == 2;
                    char text[256];
                    start(8, links != 1, (uint64_t)seed);
#ifdef TT_EMULATE
                    if (links == 2) emu_set_link(1, 0, EMU_WRONG_LOADS);
#else
                    if (links == 2) continue;
#endif
                    offload = offloads[(d + links + k) % TEST_COUNT(offloads)];
                    const tt_status status = train_net(&got, devices[d], zero, server, precisions[k / 2]);
                    snprintf(text, sizeof text, "%s, %s, zero %d%s, links %d, offload %s, seed %d",
                             devices[d], precisions[k / 2], zero, server ? ", server" : "", links,
                             offload ? offload : "none", seed);
                    offload = NULL;
                    test__check(status == TT_OK && memcmp(&got, &one, sizeof got) == 0, __FILE__, __LINE__,
                                text);
                }
    }
}

/* The first two steps have three micro-batches, so rank 1 has no micro-batch in their second round. The third
   step has four. Although a device replays only runs with a micro-batch, rank 1 gives the right bits in the
   third step. A rank without a micro-batch offloads no activations. */
TEST(a_rank_that_sat_out_comes_back)
{
    static net one, got;
    static const net_work sits_out = {{3, 3, 4}, 2, NET_ROWS, NULL};
    work = &sits_out;
    start(8, true, 0);
    REQUIRE(train_net(&one, "cuda", 1, false, "32-true") == TT_OK);
    for (int k = 0; k < 4; k++) {
        start(8, true, 1);
        offload = k < 2 ? NULL : "activations";
        CHECK(train_net(&got, "cuda*2", k % 2, false, "32-true") == TT_OK);
        CHECK(memcmp(&got, &one, sizeof got) == 0);
        CHECK((net_copied_bytes > 0) == (offload != NULL));
        offload = NULL;
    }
    work = &usual;
}

/* Updates in the backward give the bits of updates at the end, in every order of the devices' work. Runs on
   one device, which replays micro-batches with their updates, and on four devices. One of the four devices
   has no micro-batch. */
TEST(updates_in_the_backward)
{
    static net end, got;
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true"};
    static const struct { const char *device; net_work how[2]; int zeros; } on[] = {
        {"cuda", {{{1, 1, 1}, 1, NET_ROWS, "end"}, {{1, 1, 1}, 1, NET_ROWS, "backward"}}, 1},
        {"cuda*4", {{{4, 4, 3}, 4, 0, "end"}, {{4, 4, 3}, 4, 0, "backward"}}, 4}};
    for (int k = 0; k < TEST_COUNT(on) * TEST_COUNT(precisions); k++) {
        const int d = k % TEST_COUNT(on);
        const char *precision = precisions[k / TEST_COUNT(on)];
        work = &on[d].how[0];
        start(4, true, 0);
        CHECK(train_net(&end, on[d].device, 1, false, precision) == TT_OK);
        work = &on[d].how[1];
        for (int run = 0; run < on[d].zeros * seeds(1); run++) {
            char text[128];
            start(4, run % 2 == 0, (uint64_t)run + 1);
            const tt_status status = train_net(&got, on[d].device, run % 4, false, precision);
            snprintf(text, sizeof text, "%s, %s, zero %d", on[d].device, precision, run % 4);
            test__check(status == TT_OK && memcmp(&got, &end, sizeof got) == 0, __FILE__, __LINE__, text);
#ifdef TT_EMULATE
            if (d == 0) CHECK(emu_get_counts().graph_launches > 0);
#endif
        }
    }
    work = &usual;
}

/* Updates in the host's memory give equal bits on any ranks, in every order of the devices' work and with any
   offloaded tensors. The numbers equal the CPU's up to rounding. */
TEST(updates_in_the_hosts_memory)
{
    static net cpu, one, got;
    static const char *const precisions[] = {"32-true", "bf16-mixed", "bf16-true", "16-mixed"};
    static const char *const devices[] = {"cuda", "cuda*2", "cuda*4", "cuda:0,0"};
    static const char *const offloads[] = {NULL, "gradients", "parameters", "optimizer,gradients,parameters"};
    for (int k = 0; k < TEST_COUNT(precisions); k++) {
        const bool micros = k % 2 == 1;
        const double bound = k == 2 ? 0.05 : k ? 0.02 : 1e-4;
        REQUIRE(train_net(&cpu, "cpu", micros ? 2 : 1, false, precisions[k]) == TT_OK);
        update = "host";
        start(4, true, 0);
        REQUIRE(train_net(&one, "cuda", micros ? 2 : 1, false, precisions[k]) == TT_OK);
        CHECK_NEAR(one.loss, cpu.loss, bound * cpu.loss);
        CHECK_NEAR(one.norm, cpu.norm, bound * cpu.norm);
        for (int e = 0; e < TEST_COUNT(one.w); e++) CHECK_NEAR(one.w[e], cpu.w[e], k ? 0.03 : 2e-5);
        for (int run = 0; run < TEST_COUNT(devices) * seeds(1); run++) {
            const int d = run % TEST_COUNT(devices), zero = (micros ? 2 : 0) + (run + k / 2) % 2;
            const bool server = !micros && d == 2;
            char text[1400];
            if (is_slow() && (run + k) % 2) continue;
            start(4, run % 3 != 2, (uint64_t)run + 1);
            offload = offloads[(run + k) % TEST_COUNT(offloads)];
            const tt_status status = train_net(&got, devices[d], zero, server, precisions[k]);
            snprintf(text, sizeof text, "%s, %s, zero %d%s, offload %s, run %d: %s", devices[d],
                     precisions[k], zero, server ? ", server" : "", offload ? offload : "none", run,
                     net_error);
            offload = NULL;
            test__check(status == TT_OK && memcmp(&got, &one, sizeof got) == 0, __FILE__, __LINE__, text);
        }
        update = NULL;
    }
}

#ifdef TT_EMULATE
/* Tells whether a missing wait of an update in the host's memory is noticed. Runs in a child process, which
   the emulator may end. */
static bool update_is_noticed(int wait, uint64_t seed, const net *expected)
{
    static net got;
    int status = 0;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(2);
        left_wait = wait;
        start(1, true, seed);
        const bool ok = train_net(&got, "cuda", 1, false, "32-true") == TT_OK;
        _exit(ok && memcmp(&got, expected, sizeof got) == 0 ? 0 : 3);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return false;
    return WEXITSTATUS(status) == 86 || WEXITSTATUS(status) == 3;
}

TEST(each_wait_of_updates_in_the_hosts_memory_is_needed)
{
    static net expected;
    update = "host";
    start(1, true, 0);
    CHECK(train_net(&expected, "cuda", 1, false, "32-true") == TT_OK && net_waits == 4);
    for (int wait = 0; wait < 4 && leaves_waits_out(); wait++) {
        char text[128];
        int seed = 0;
        while (seed < 24 && !update_is_noticed(wait, (uint64_t)seed, &expected)) seed++;
        snprintf(text, sizeof text, "waits of an update, number %d, can be left out", wait);
        test__check(seed < 24, __FILE__, __LINE__, text);
    }
    update = NULL;
}

/* Tells whether a training reveals that a rank skips its waits for other ranks. Runs in a child process, as
   the emulator may end it. */
static bool is_missed(int rank, int zero, bool peers, uint64_t seed, const net *expected)
{
    static net got;
    int status = 0;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(2);
        left_out = rank + 1;
        start(2, peers, seed);
        const bool ok = train_net(&got, "cuda*2", zero, false, "32-true") == TT_OK;
        _exit(ok && memcmp(&got, expected, sizeof got) == 0 ? 0 : 3);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return false;
    return WEXITSTATUS(status) == 86 || WEXITSTATUS(status) == 3;
}

TEST(waits_between_ranks_are_missed)
{
    static net expected[2];
    for (int k = 0; k < 8; k++) { /* odd k: rank 1; k 2, 3, 6, 7: sums in each micro-batch; k < 4: peers */
        const int rank = k % 2, zero = k / 2 % 2 ? 3 : 1;
        const bool peers = k < 4;
        int seed = 0;
        char text[128];
        start(2, peers, 0);
        net *right = &expected[zero > 1];
        if (k < 4 && rank == 0) CHECK(train_net(right, "cuda*2", zero, false, "32-true") == TT_OK);
        while (seed < 20 && !is_missed(rank, zero, peers, (uint64_t)seed, right)) seed++;
        snprintf(text, sizeof text, "the waits of rank %d, zero %d, can be left out", rank, zero);
        test__check(seed < 20, __FILE__, __LINE__, text);
    }
}

/* Call n of CUDA fails, on any thread, alone or with all later calls: all ranks return one error, and nothing
   is leaked. */
static void sweep_program(int zero, bool peers, long count)
{
    static net got;
    long n = 1, failed = 0, runs = 0;
    for (bool reached = true; reached; n += 1 + n / (is_slow() ? 2 : 10), runs++) {
        char text[1400];
        start(2, peers, (uint64_t)n);
        emu_inject_fault(n, count == 1 ? FAULT : LOST, count);
        const tt_status status = train_net(&got, "cuda*2", zero, false, "bf16-mixed");
        reached = emu_api_calls() >= n;
        failed += status != TT_OK;
        const bool named = strstr(net_error, "device 'cuda") &&
                           (strstr(net_error, "unknown error") || strstr(net_error, "a kernel failed") ||
                            strstr(net_error, "cublasLtCreate") || strstr(net_error, "cuBLASLt"));
        snprintf(text, sizeof text, "call %ld fails%s: %s: %s", n, count == 1 ? "" : ", and all after it",
                 tt_status_name(status), net_error);
        test__check(status == TT_OK || named, __FILE__, __LINE__, text);
        check_nothing_left(text);
    }
    CHECK(failed > runs / 3);
    if (getenv("TINYTRAIN_TEST_VERBOSE")) printf("%ld calls, %ld runs, %ld failures\n", n, runs, failed);
}

TEST(any_call_of_a_program_may_fail)
{
    const bool all = strcmp(emu_build(), "plain") == 0, trace = strcmp(emu_build(), "trace") == 0;
    for (int k = 0; k < 4; k++) /* each slow build runs half of the sweeps */
        if (all || trace == (k == 0 || k == 3)) sweep_program(k == 0 ? 3 : k, k % 2, k / 2 ? 1L << 40 : 1);
}

#else

#define NEEDS_EMULATOR SKIP("only the emulator has several devices, and calls that fail")
TEST(pairs_of_devices_are_tried) { NEEDS_EMULATOR; }
TEST(a_pair_that_brings_wrong_bytes_is_avoided) { NEEDS_EMULATOR; }
TEST(each_wait_is_needed) { NEEDS_EMULATOR; }
TEST(each_wait_is_needed_through_the_host) { NEEDS_EMULATOR; }
TEST(any_call_may_fail) { NEEDS_EMULATOR; }
TEST(any_call_of_a_program_may_fail) { NEEDS_EMULATOR; }
TEST(each_wait_of_updates_in_the_hosts_memory_is_needed) { NEEDS_EMULATOR; }
TEST(waits_between_ranks_are_missed) { NEEDS_EMULATOR; }
TEST(each_wait_between_streams_is_needed) { NEEDS_EMULATOR; }
TEST(any_call_beside_computation_may_fail) { NEEDS_EMULATOR; }

#endif

static const test_case tests[] = {
    TEST_CASE(collectives_of_devices), TEST_CASE(ranks_on_one_device), TEST_CASE(squares_of_pieces),
    TEST_CASE(pairs_of_devices_are_tried), TEST_CASE(a_pair_that_brings_wrong_bytes_is_avoided),
    TEST_CASE(each_wait_is_needed), TEST_CASE(each_wait_is_needed_through_the_host),
    TEST_CASE(any_call_may_fail), TEST_CASE(a_thread_for_each_device),
    TEST_CASE(ranks_of_one_device_train_alike), TEST_CASE(any_call_of_a_program_may_fail),
    TEST_CASE(programs_train_alike_on_any_ranks), TEST_CASE(a_rank_that_sat_out_comes_back),
    TEST_CASE(updates_in_the_backward), TEST_CASE(updates_in_the_hosts_memory),
    TEST_CASE(each_wait_of_updates_in_the_hosts_memory_is_needed),
    TEST_CASE(waits_between_ranks_are_missed),
    TEST_CASE(copies_beside_computation), TEST_CASE(each_wait_between_streams_is_needed),
    TEST_CASE(any_call_beside_computation_may_fail),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }

#endif
