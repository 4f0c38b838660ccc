/* Ranks of several processes, which tests/check_mpi.py starts with mpirun. Each process also trains on as
   many ranks of its own: both trainings give the same bits.

       mpirun -n 2 mpi FOLDER LOCAL [TEST...]     LOCAL: ranks of a process; FOLDER: shared, for files */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sys/resource.h>
#define main ranks_of_one_process
#include "test_parallel.c"
#undef main
#include "trainer/embedder.h"

static int processes, me, local; /* me: number of this process; local: ranks of each process */

static setup net_setup(layout on, const char *precision, int groups, int per_leaf)
{
    setup s = setup_of(on, precision, groups, per_leaf);
    s.net = true;
    return s;
}

/* Returns "cpu*2" for two ranks, or "cuda*2" if TINYTRAIN_DEVICE says "cuda". */
static const char *ranks_text(int ranks)
{
    static char text[4][16];
    static int next;
    char *to = text[next++ % 4];
    const char *kind = getenv("TINYTRAIN_DEVICE") ? getenv("TINYTRAIN_DEVICE") : "cpu";
    snprintf(to, 16, ranks > 1 ? "%s*%d" : "%s", kind, ranks);
    return to;
}

/* Returns false for emulated GPUs, which run only some cases of each test because they are slow. */
static bool on_cpu(void) { return strncmp(ranks_text(1), "cpu", 3) == 0; }

/* A CUDA-aware MPI for emulated GPUs: messages use buffers of the emulation. A send copies the GPU's memory
   to its buffer; a receive copies its buffer to the GPU's memory as soon as the message has arrived. */
#ifdef TT_EMULATE
#include "emu_control.h"
static struct { char *data; void *to; size_t bytes; tt__request request; } in_flight[1024];

static tt__request *message(int k, size_t bytes, void *to)
{
    in_flight[k].data = (char *)malloc(bytes);
    in_flight[k].bytes = bytes;
    in_flight[k].to = to;
    if (!in_flight[k].data) abort();
    return &in_flight[k].request;
}

static int free_message(void)
{
    int k = 0;
    while (in_flight[k].data) if (++k == TEST_COUNT(in_flight)) abort();
    return k;
}

static const char *emulated_send(tt__net *n, int to, int tag, const void *data, size_t bytes, tt__request *r)
{
    const int k = free_message();
    tt__request *own = message(k, bytes, NULL);
    emu_library_copy(in_flight[k].data, data, bytes);
    const char *why = tt__mpi_transport.send(n, to, tag, in_flight[k].data, bytes, own);
    *r = *own;
    r->handle = (uint64_t)k;
    return why;
}

static const char *emulated_receive(tt__net *n, int from, int tag, void *data, size_t bytes, tt__request *r)
{
    const int k = free_message();
    tt__request *own = message(k, bytes, data);
    const char *why = tt__mpi_transport.receive(n, from, tag, in_flight[k].data, bytes, own);
    *r = *own;
    r->handle = (uint64_t)k;
    return why;
}

static const char *emulated_test(tt__net *n, tt__request *r)
{
    const int k = (int)r->handle;
    r->done = k == TEST_COUNT(in_flight); /* the message arrived earlier */
    if (r->done) return NULL;
    const char *why = tt__mpi_transport.test(n, &in_flight[k].request);
    r->done = in_flight[k].request.done;
    if (!r->done) return why;
    if (in_flight[k].to) emu_library_copy(in_flight[k].to, in_flight[k].data, in_flight[k].bytes);
    free(in_flight[k].data);
    in_flight[k].data = NULL;
    r->handle = TEST_COUNT(in_flight);
    return why;
}

static void emulate_mpi(tt_context *ctx)
{
    static tt__transport transport;
    if (!ctx->net || !ctx->net->cuda_aware) return;
    transport = tt__mpi_transport;
    transport.send = emulated_send;
    transport.receive = emulated_receive;
    transport.test = emulated_test;
    ctx->net->transport = &transport;
}
#else
static void emulate_mpi(tt_context *ctx) { (void)ctx; }
#endif

/* Trains on the ranks of all processes, and on as many ranks of this process, and compares the results. */
static void same_as_threads(setup s, const layout *how)
{
    outcome one, many;
    s.on = *how;
    s.net = false;
    s.on.device = ranks_text(processes * local);
    const bool trained = train(&s, &one);
    s.net = true;
    s.on.device = ranks_text(local);
    if (train(&s, &many) && trained) same_outcome(&s, &one, &many, true, __LINE__);
    free_outcome(&one);
    free_outcome(&many);
}

/* Returns the number of leaves: two for each data rank if `more` and the number of data ranks is a power of
   two, otherwise one for each data rank. */
static int leaves(int data, bool more) { return data & (data - 1) || !more ? data : 2 * data; }

TEST(processes_have_the_bits_of_one)
{
    static const layout how[] = {{NULL, 0, 0}, {NULL, 1, 0}, {NULL, 2, 0}, {NULL, 3, 0}, {NULL, 1, SERVER},
                                 {NULL, 1, MICROS}, {NULL, 0, SERVER | MICROS}};
    for (int k = 0; k < (on_cpu() ? TEST_COUNT(how) : 4); k++) {
        const int data = processes * local;
        setup s = setup_of(how[k], precisions[k % 5], leaves(data, k % 2), 1 + k % 3);
        s.sgd = k % 3 == 2;
        s.on_host = k % 3 == 1;
        s.poison = true;
        s.at_once = k == 1 && s.groups == data && s.per_leaf == 1;
        same_as_threads(s, &how[k]);
    }
}

TEST(tensor_ranks_of_processes)
{
    static const layout how[] = {{NULL, 0, 0}, {NULL, 1, 0}, {NULL, 3, 0}};
    const int ranks = processes * local;
    for (int k = 0; k < TEST_COUNT(how); k++)
        for (int tensor = 2; tensor <= 4; tensor += 2) {
            const bool left_out = !on_cpu() && (k + tensor / 2) % 2;
            if (left_out || ranks % tensor || (local % tensor && tensor % local)) continue;
            setup s = setup_of(how[k], precisions[k], leaves(ranks / tensor, k), 2);
            s.tensor = tensor;
            s.sequence = k % 2 == 1;
            s.poison = true;
            same_as_threads(s, &how[k]);
        }
    if (ranks % 2 || (local % 2 && 2 % local)) SKIP("two tensor ranks do not fit these processes");
}

/* Tests stages of a pipeline in several processes, with data ranks. Two processes share the table and a norm.
   The bits equal those of the stages in one process, which equal those of one stage (test_pipeline.c). */
TEST(stages_of_processes)
{
    static const layout on = {NULL, 1, 0};
    const int ranks = processes * local;
    for (int stages = 2; stages <= 3; stages++)
        for (int k = 0; k < 3; k++) {
            const int data = ranks / stages;
            if (ranks % stages || (local % data && data % local)) continue;
            setup s = setup_of(on, precisions[k], data, k == 1 ? 4 : 3);
            s.pipeline = stages;
            s.schedule = k == 1 ? "gpipe" : "1f1b";
            s.max = k == 1 ? 4 : 0;
            s.on.zero = k != 2;
            s.sgd = k == 2;
            s.on_host = k > 0;
            s.poison = true;
            same_as_threads(s, &s.on);
            if (k) continue;
            setup one = s;
            one.on.device = ranks_text(stages);
            s.on.device = ranks_text(local);
            s.net = true;
            evaluates(&one, &s);
        }
    if (ranks % 3 && ranks % 2) SKIP("two or three stages do not fit these processes");
}

TEST(gradients_and_evaluations_of_processes)
{
    static const layout how[] = {{NULL, 1, 0}, {NULL, 3, 0}, {NULL, 0, SERVER}};
    for (int k = on_cpu() ? 0 : 1; k < TEST_COUNT(how); k++) {
        setup one = setup_of(ones[sums_micros(how[k])], precisions[k], processes * local, 2), many = one;
        one.on.device = ranks_text(1);
        many.on = how[k];
        many.on.device = ranks_text(local);
        many.net = true;
        same_gradients(&one, &many);
        evaluates(&one, &many);
    }
}

/* A training that alternates, step by step, between several processes and one process equals an uninterrupted
   training bit for bit. */
TEST(states_of_processes_resume_anywhere)
{
    const int ranks = processes * local;
    for (int p = 0; p < 2; p++) {
        setup s = setup_of(ones[p], precisions[p], ranks, 2);
        s.on.device = ranks_text(1);
        outcome whole, o;
        const char *path = test_path(shared_folder, "resumed");
        memset(&o, 0, sizeof o);
        bool ok = train(&s, &whole);
        for (int k = 0; k < STEPS; k++) { /* continues after a failure, because the other processes wait at
                                             the barriers below */
            net n;
            s.net = k % 2 == 0;
            s.on.device = ranks_text(s.net ? local : k == 1 ? ranks : 1);
            s.on.zero = p ? 3 - k % 2 : k % 2;
            ok = open_net(&n, &s, false);
            if (k) ok = ok && FINE(&n, tt_program_load(n.p, path));
            if (k) CHECK(n.log.warnings == 0);
            MPI_Barrier(MPI_COMM_WORLD); /* all processes load the file before process 0 replaces the file */
            ok = ok && FINE(&n, run_step(&n, k, micros_of(&s, k)));
            o.stats[k] = n.stats;
            if (s.net || me == 0) ok = ok && FINE(&n, tt_program_save(n.p, path));
            MPI_Barrier(MPI_COMM_WORLD); /* the state is saved, maybe by process 0 alone */
            if (ok && k == STEPS - 1) {
                keep_end(&n, &o);
                same_outcome(&s, &whole, &o, true, __LINE__);
            }
            close_net(&n);
        }
        free_outcome(&o);
        free_outcome(&whole);
    }
}

/* In collectives, all processes together send at most 3% more bytes than necessary. Without ZeRO this bound
   holds for each process alone. With ZeRO the processes' shards differ in size, because the tensors have only
   a few chunks. */
TEST(bytes_of_processes)
{
    for (int zero = 0; zero < 3; zero++) {
        net n;
        setup s = net_setup((layout){ranks_text(local), zero, 0}, "32-true", processes * local, 1);
        if (!open_net(&n, &s, false)) return;
        const tt_plan plan = tt_program_plan(n.p);
        char text[4096];
        tt_plan_text(n.p, text, sizeof text);
        FINE(&n, run_step(&n, 0, s.groups));
        const tt__net *x = n.ctx->net;
        REQUIRE(x && x->processes == processes && x->me == me);
        CHECK((double)plan.sent_bytes == x->sent && fabs((double)plan.min_sent_bytes - x->min) <= 1);
        CHECK(strstr(text, "sent by this process in that step: ") != NULL);
        const double own[2] = {x->sent, x->min};
        double all[2];
        MPI_Allreduce(own, all, 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        CHECK(own[1] > 0);
        if ((local & (local - 1)) == 0) CHECK(all[0] >= all[1] && all[0] <= 1.03 * all[1]);
        if ((local & (local - 1)) == 0 && !zero) CHECK(own[0] <= 1.03 * own[1]);
        close_net(&n);
    }
}

/* Trains embeddings with the negatives of whole steps, which all data ranks share, in several processes and
   in one. The bits of the losses and of the gradients are equal. */
TEST(step_negatives_of_processes)
{
    const int data = processes * local;
    tt_stats stats[2][EMBED_STEPS + 1];
    float *gradients[2] = {NULL, NULL};
    const size_t bytes = sizeof(float) * EMBED_WIDTH * EMBED_WIDTH;
    memset(stats, 0, sizeof stats);
    for (int net = 0; net < 2; net++) {
        const embed_setup s = {false, true, 12, 2, data, 0.1f, "32-true", true};
        embed w;
        embed_device = ranks_text(net ? local : data);
        REQUIRE(setenv("TINYTRAIN_ALONE", net ? "0" : "1", 1) == 0 && (gradients[net] = malloc(bytes)));
        if (!embed_open(&w, &s)) return;
        CHECK((w.ctx->net != NULL) == net);
        for (int step = 0; step < EMBED_STEPS; step++) if (!embed_step(&w, &stats[net][step])) return;
        memcpy(gradients[net], w.gradient, bytes);
        CHECK(tt_evaluate(w.r, tt_loader_source(w.l), &stats[net][EMBED_STEPS]) == TT_OK);
        embed_close(&w);
    }
    for (int step = 0; step <= EMBED_STEPS; step++) {
        const tt_stats *x = &stats[0][step], *y = &stats[1][step];
        CHECK(x->loss == y->loss && x->targets == y->targets && x->correct == y->correct && x->targets > 0);
    }
    CHECK(memcmp(gradients[0], gradients[1], bytes) == 0);
    free(gradients[0]), free(gradients[1]);
}

static const test_case net_tests[] = {
    TEST_CASE(processes_have_the_bits_of_one),
    TEST_CASE(tensor_ranks_of_processes),
    TEST_CASE(stages_of_processes),
    TEST_CASE(gradients_and_evaluations_of_processes),
    TEST_CASE(states_of_processes_resume_anywhere),
    TEST_CASE(bytes_of_processes),
    TEST_CASE(step_negatives_of_processes),
};

/* ------------------------------------------------------------------------------------------------- faults */

/* A fault of the given kind in one process. at: milliseconds, bytes or launches until the fault happens, or
   the number of the step in which the fault happens. */
typedef struct event { const char *kind; int process, at; } event;

static bool is_kind(const event *e, const char *kind)
{
    return e->process == me && strcmp(e->kind, kind) == 0;
}

static void *signal_later(void *arg)
{
    const event *e = (const event *)arg;
    const struct timespec pause = {e->at / 1000, e->at % 1000 * 1000000L};
    nanosleep(&pause, NULL);
    kill(getpid(), is_kind(e, "kill") ? SIGKILL : SIGSTOP);
    return NULL;
}

/* Runs the micro-batches of a step and its update. If `bad`, this process's last micro-batch has an index
   beyond the table. */
static tt_status run_whole_step(net *n, const setup *s, int step, bool bad)
{
    tt_status status = TT_OK;
    const int micros = micros_of(s, 0);
    for (int m = 0; m < micros && status == TT_OK; m++) {
        micro_batch b = batch_of(step, m);
        if (bad) b.ids[b.rows - 1] = VOCAB + 7;
        status = set_batch(n, n->p, m % n->data, &b);
        if (status == TT_OK && m % n->data == n->data - 1) status = tt_micro_step(n->p, &n->stats);
    }
    return status == TT_OK ? tt_update(n->p, 0.01f, &n->stats) : status;
}

/* Trains until `steps` steps are done, from FOLDER/state on if that file exists. Saves the state after each
   step, and FOLDER/final at the end. */
static int train_until(int steps, event e)
{
    net n;
    const setup s = net_setup((layout){ranks_text(local), 1, 0}, "32-true", processes * local, 2);
    char state[1100], final[1100];
    struct stat there;
    pthread_t thread;
    snprintf(state, sizeof state, "%s/%s", shared_folder, is_kind(&e, "missing") ? "none" : "state");
    snprintf(final, sizeof final, "%s/final", shared_folder);
    const bool resumes = stat(state, &there) == 0 || is_kind(&e, "missing");
    if (!open_net(&n, &s, false)) return 2;
    MPI_Barrier(MPI_COMM_WORLD); /* all processes resume before process 0 saves */
    make_faulty(&n);
    const bool signals = is_kind(&e, "kill") || is_kind(&e, "stop");
    if (signals && pthread_create(&thread, NULL, signal_later, &e) != 0) return 2;
    if (is_kind(&e, "full")) {
        const struct rlimit max = {(rlim_t)e.at, (rlim_t)e.at};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &max);
    }
    if (is_kind(&e, "launch")) arm(me * local + local - 1, e.at, false);
    tt_status status = resumes ? tt_program_load(n.p, state) : TT_OK;
    for (int step = (int)tt_program_steps(n.p); step < steps && status == TT_OK; step++) {
        const bool now = step == e.at;
        if (now && is_kind(&e, "exit")) exit(4);
        if (now && is_kind(&e, "close")) {
            status = tt__fail(n.ctx, TT_ERR_FILE, "cannot open 'this'");
            break;
        }
        status = run_whole_step(&n, &s, step, now && is_kind(&e, "input"));
        if (status == TT_OK) status = tt_program_save(n.p, state);
    }
    if (status == TT_OK) status = tt_program_save(n.p, final);
    if (status != TT_OK) fprintf(stderr, "%d of %d: %s\n", me, processes, tt_error(n.ctx));
    tt_program_free(n.p);
    tt_tape_free(n.t);
    tt_close(n.ctx);
    return status == TT_OK ? 0 : 3;
}

/* Tries options or programs that differ between processes. Returns 3 if the library refuses them. */
static int differ(const char *what)
{
    net n;
    setup s = net_setup((layout){ranks_text(local), 1, 0}, "32-true", processes * local, 2);
    if (me == 1 && strcmp(what, "precision") == 0) s.precision = "bf16-mixed";
    if (me == 1 && strcmp(what, "zero") == 0) s.on.zero = 3;
    if (me == 1 && strcmp(what, "clip_norm") == 0) s.unclipped = true;
    if (me == 1 && strcmp(what, "tape") == 0) s.vocab--;
    if (me == 1 && strcmp(what, "isa") == 0) setenv("TINYTRAIN_ISA", "portable", 1);
    if (open_net(&n, &s, false)) return 0;
    fprintf(stderr, "%d of %d: %s\n", me, processes, n.ctx ? tt_error(n.ctx) : n.log.text);
    if (!n.ctx) return 3;
    tt_tape_free(n.t);
    tt_close(n.ctx);
    return 3;
}

/* Opens a context and closes it. Process 0 is stopped or ends before opening or before closing. With a kind
   that begins with "own", the program starts MPI itself before it opens the context. */
static int open_until(const char *kind)
{
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    int level;
    tt_context_options o = tt_context_options_default();
    me = atoi(rank ? rank : getenv("PMI_RANK") ? getenv("PMI_RANK") : "0");
    o.timeout = wait_seconds;
    o.threads = 1;
    if (strncmp(kind, "own", 3) == 0) MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    if (!me && strstr(kind, "stop_before")) raise(SIGSTOP);
    if (!me && strstr(kind, "kill_before")) raise(SIGKILL);
    if (!me && strstr(kind, "exit_before")) return 0;
    tt_context *ctx = tt_open(&o); /* the default logger prints the reason of a failure */
    if (!ctx) return 3;
    if (!me && strstr(kind, "stop_between")) raise(SIGSTOP);
    tt_close(ctx);
    if (strcmp(kind, "own_none") == 0) MPI_Finalize();
    return 0;
}

int main(int argc, char **argv)
{
    int level, status;
    (void)ranks_of_one_process;
    if (argc < 3) return 2;
    set_limits();
    tt__limit_tensor_least = 1; /* tensor ranks divide small layers too */
    shared_folder = argv[1];
    local = atoi(argv[2]);
    if (argc > 5 && strcmp(argv[3], "open") == 0) { /* arguments: FOLDER LOCAL open TIMEOUT KIND */
        wait_seconds = atof(argv[4]);
        return open_until(argv[5]);
    }
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_size(MPI_COMM_WORLD, &processes);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    /* Arguments: FOLDER LOCAL train STEPS TIMEOUT KIND PROCESS AT, or FOLDER LOCAL differ WHAT. */
    const bool trains = argc > 8 && strcmp(argv[3], "train") == 0;
    const bool differs = argc > 4 && strcmp(argv[3], "differ") == 0;
    if (trains || differs) {
        event e = {trains ? argv[6] : "none", trains ? atoi(argv[7]) : 0, trains ? atoi(argv[8]) : 0};
        if (trains) wait_seconds = atof(argv[5]);
        status = trains ? train_until(atoi(argv[4]), e) : differ(argv[4]);
        if (!status) MPI_Finalize(); /* after a failure MPI might wait for processes that are gone */
        return status;
    }
    char own[1100];
    context_opened = emulate_mpi;
    snprintf(own, sizeof own, "%s/process.%d", shared_folder, me);
    if (me && !freopen(own, "w", stdout)) return 2;
    argv[2] = argv[0];
    status = test_main(argc - 2, argv + 2, net_tests, TEST_COUNT(net_tests));
    int worst = 0;
    MPI_Allreduce(&status, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    MPI_Finalize();
    return worst;
}
