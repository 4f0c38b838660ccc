/* Tests of the loader: batches, micro-batches, groups, capacity. */
#pragma once

/* ------------------------------------------------------------------------------------------------- loader */

static tt_dataset *words(tt_context *ctx, int n) /* text i has i * 37 % 29 words, perhaps 0 */
{
    size_t capacity = (size_t)n * 100 + 100, used = 0;
    char *text = (char *)malloc(capacity);
    used += (size_t)snprintf(text, capacity, "text\tlabel\n");
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < i * 37 % 29; k++)
            used += (size_t)snprintf(text + used, capacity - used, "%c ", 'a' + (i + k) % 26);
        used += (size_t)snprintf(text + used, capacity - used, "\tc%d\n", i % 3);
    }
    tt_dataset *d = table(ctx, "words.tsv", text, used, NULL, NULL, 0);
    free(text);
    return d;
}

typedef struct epoch_log { int micro, steps, seqs; int64_t *index; int *step_of; int *micro_of; } epoch_log;

static void log_free(epoch_log *log) { free(log->index); free(log->step_of); free(log->micro_of); }

/* Reads to the end of the epoch and checks every batch. */
static epoch_log read_epoch(tt_loader *l, const tt_dataset *d, const tt_tokenizer *k,
                            const tt_loader_options *o, int64_t epoch, int64_t step)
{
    epoch_log log = {0, 0, 0, NULL, NULL, NULL};
    tt_batch b;
    size_t n = (size_t)tt_dataset_count(d);
    int32_t want[600];
    log.index = (int64_t *)calloc(n, sizeof *log.index);
    log.step_of = (int *)calloc(n, sizeof *log.step_of);
    log.micro_of = (int *)calloc(n, sizeof *log.micro_of);
    CHECK(tt_loader_seek(l, epoch, step) == TT_OK);
    while (tt_loader_next(l, &b)) {
        CHECK(b.seqs >= 1 && b.seqs <= tt_loader_max_seqs(l) && b.rows <= tt_loader_max_tokens(l) &&
              b.seq_start[0] == 0 && b.seq_start[b.seqs] == b.rows);
        for (int i = 0; i < b.seqs; i++) {
            size_t bytes;
            const char *text = tt_dataset_text(d, b.index[i], &bytes);
            int length = tt_tokenize(k, text, bytes, want, o->max_length), from = b.seq_start[i];
            /* The batch holds the complete text, without padding. */
            CHECK(b.seq_start[i + 1] - from == length && memcmp(b.ids + from, want, (size_t)length * 4) == 0);
            for (int p = 0; p < length; p++) CHECK(b.positions[from + p] == p && b.types[from + p] == 0);
            CHECK(b.labels[i] == tt_dataset_label(d, b.index[i]));
            if (!CHECK((size_t)log.seqs < n)) return log;
            log.index[log.seqs] = b.index[i];
            log.step_of[log.seqs] = log.steps;
            log.micro_of[log.seqs++] = log.micro;
        }
        log.micro++;
        log.steps += b.last_of_step;
    }
    CHECK(tt_loader_status(l) == TT_OK && !tt_loader_next(l, &b));
    return log;
}

TEST(loader_batches)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    enum { N = 103 };
    tt_dataset *d = words(ctx, N);
    REQUIRE(k && d);
    /* columns: batch, accumulate, max_length, max_tokens, window, drop_last */
    static const int configurations[][6] = {
        {16, 1, 512, 0, 50, 0}, {16, 4, 12, 0, 3, 0}, {16, 3, 20, 25, 2, 1}, {1, 1, 30, 0, 7, 0},
        {7, 7, 9, 0, 0, 1}, {200, 1, 64, 0, 50, 0}, {5, 1, 10, 10, 1, 0}, {103, 2, 40, 100, 4, 1},
        {8, 1, 2, 0, 2, 0}};
    for (int c = 0; c < TEST_COUNT(configurations); c++) {
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            tt_loader_options o = tt_loader_options_default();
            epoch_log first = {0, 0, 0, NULL, NULL, NULL};
            o.batch = configurations[c][0];
            o.accumulate = configurations[c][1];
            o.max_length = configurations[c][2];
            o.max_tokens = configurations[c][3];
            o.window = configurations[c][4];
            o.drop_last = configurations[c][5] != 0;
            o.shuffle = shuffle != 0;
            for (int threads = 0; threads < 5; threads++) {
                o.threads = threads;
                tt_loader *l = tt_loader_new(ctx, d, k, &o);
                REQUIRE(l);
                int expected = o.drop_last ? N / o.batch : (N + o.batch - 1) / o.batch,
                    used = o.drop_last ? N / o.batch * o.batch : N, seen[N] = {0};
                CHECK(tt_loader_steps(l) == expected);
                epoch_log e = read_epoch(l, d, k, &o, 0, 0);
                CHECK(e.steps == expected && e.seqs == used);
                for (int i = 0; i < e.seqs; i++) {
                    CHECK(!seen[e.index[i]]++);
                    CHECK(e.step_of[i] == i / o.batch); /* each step has `batch` texts, except the last */
                    if (!shuffle) CHECK(e.index[i] == i);
                    /* A shuffled loader whose `window` exceeds 1 puts longer texts first within a step. */
                    if (i && shuffle && o.window > 1 && e.step_of[i] == e.step_of[i - 1]) {
                        size_t n0, n1;
                        const char *t0 = tt_dataset_text(d, e.index[i - 1], &n0),
                                   *t1 = tt_dataset_text(d, e.index[i], &n1);
                        int32_t ids[600];
                        int l0 = tt_tokenize(k, t0, n0, ids, o.max_length),
                            l1 = tt_tokenize(k, t1, n1, ids, o.max_length);
                        CHECK(l0 >= l1);
                    }
                }
                if (threads == 0) { first = e; }
                else { /* results are equal for any number of threads */
                    CHECK(first.seqs == e.seqs && first.micro == e.micro &&
                          memcmp(first.index, e.index, (size_t)e.seqs * sizeof *e.index) == 0 &&
                          memcmp(first.micro_of, e.micro_of, (size_t)e.seqs * sizeof(int)) == 0);
                    log_free(&e);
                }
                epoch_log second = read_epoch(l, d, k, &o, 1, 0), again = read_epoch(l, d, k, &o, 0, 0);
                CHECK(again.micro == first.micro &&
                      memcmp(first.index, again.index, (size_t)first.seqs * sizeof *first.index) == 0);
                if (shuffle && o.batch < 100)
                    CHECK(memcmp(first.index, second.index, (size_t)first.seqs * sizeof *first.index) != 0);
                log_free(&again);
                /* after a seek to a step, the loader gives the texts from that step on, in the same order */
                for (int step = expected; step >= 0; step -= 2) {
                    epoch_log rest = read_epoch(l, d, k, &o, 1, step);
                    int skip = step * o.batch < second.seqs ? step * o.batch : second.seqs;
                    CHECK(rest.seqs == second.seqs - skip && rest.steps == expected - step);
                    const size_t bytes = (size_t)rest.seqs * sizeof *rest.index;
                    CHECK(memcmp(rest.index, second.index + skip, bytes) == 0);
                    log_free(&rest);
                }
                log_free(&second);
                CHECK(tt_loader_waited(l) >= 0);
                tt_loader_free(l);
            }
            log_free(&first);
        }
    }
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* The table lists all texts of the first class, then all texts of the second, and all texts are cut to one
   length. Each step has texts of both classes. By chance, the 16 texts of a step would all have one class
   with probability 2^-15. */
TEST(loader_mixes_texts_of_the_same_length)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    enum { N = 640, BATCH = 16 };
    static char text[N * 64];
    size_t used = (size_t)snprintf(text, sizeof text, "text\tlabel\n");
    for (int i = 0; i < N; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "a b c d e f %c %c\t%s\n", 'a' + i % 26,
                                 'a' + i / 26 % 26, i < N / 2 ? "first" : "second");
    tt_dataset *d = table(ctx, "by_class.tsv", text, used, NULL, NULL, 0);
    tt_loader_options o = tt_loader_options_default();
    o.batch = BATCH;
    o.max_length = 6;
    REQUIRE(k && d);
    tt_loader *l = tt_loader_new(ctx, d, k, &o);
    REQUIRE(l);
    for (int epoch = 0; epoch < 3; epoch++) {
        epoch_log e = read_epoch(l, d, k, &o, epoch, 0);
        int of_second[N / BATCH] = {0};
        CHECK(e.seqs == N && e.steps == N / BATCH);
        for (int i = 0; i < e.seqs; i++) of_second[e.step_of[i]] += e.index[i] >= N / 2;
        for (int step = 0; step < N / BATCH; step++) CHECK(of_second[step] > 0 && of_second[step] < BATCH);
        log_free(&e);
    }
    tt_loader_free(l);
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* Each micro-batch has as many texts or tokens as it may have, or is the last of its step. Loaders with other
   seeds give the texts in another order, and `window` does not sort the steps of an epoch by length. */
TEST(loader_micro_batches)
{
    test_allocator a, b;
    tt_context *ctx = test_open(&a);
    tt_context_options other = test_options(&b);
    other.seed = 2;
    tt_context *ctx2 = tt_open(&other);
    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    tt_dataset *d = words(ctx, 200);
    tt_loader_options o = tt_loader_options_default();
    tt_batch x, y;
    REQUIRE(k && d);
    o.batch = 20; o.accumulate = 3; o.max_length = 31; o.max_tokens = 100; o.window = 4;
    tt_loader *l = tt_loader_new(ctx, d, k, &o), *m = tt_loader_new(ctx2, d, k, &o);
    REQUIRE(l && m);
    CHECK(tt_loader_max_seqs(l) == 7 && tt_loader_max_tokens(l) == 100);
    int differ = 0, more = 1, full_tokens = 0, longer = 0, longest = 0, first = 1, steps = 0;
    while (more) {
        bool got = tt_loader_next(l, &x), got2 = tt_loader_next(m, &y);
        if (got && got2 && x.seqs && y.seqs) differ += x.index[0] != y.index[0];
        /* Texts get shorter within a step. With one more text as long as its last text, the micro-batch would
           exceed max_tokens, 100. */
        if (got && !x.last_of_step && x.seqs < 7) {
            full_tokens++;
            CHECK(x.rows + (x.seq_start[x.seqs] - x.seq_start[x.seqs - 1]) > 100);
        }
        /* `window` 4 sorts the texts of four steps together. The four steps then come in random order, so
           some step has a longer first text than the step before. */
        if (got && first && ++steps % 4 != 1) longer += x.seq_start[1] > longest;
        if (got && first) longest = x.seq_start[1];
        first = got && x.last_of_step;
        more = got;
    }
    CHECK(differ > 5 && full_tokens > 3 && longer > 0);
    tt_loader_free(l);
    tt_loader_free(m);

    static const struct {
        int batch, accumulate, length, tokens, window, threads;
        const char *error;
    } bad[] = {{0, 1, 9, 0, 1, 1, "batch = 0"},
               {4, 0, 9, 0, 1, 1, "accumulate = 0"},
               {4, 5, 9, 0, 1, 1, "1 <= accumulate <= batch"},
               {4, 1, 1, 0, 1, 1, "max_length is 1"},
               {4, 1, 9, 8, 1, 1, "max_tokens is 8"},
               {4, 1, 9, -1, 1, 1, "max_tokens is -1"},
               {4, 1, 9, 0, -1, 1, "window is -1"},
               {4, 1, 9, 0, 1, -1, "threads is -1"},
               {4, 1, 9, 0, 1, 65, "threads is 65"},
               {1 << 30, 1, 512, 0, 1, 1, "set max_tokens"}};
    for (int i = 0; i < TEST_COUNT(bad); i++) {
        o.batch = bad[i].batch;
        o.accumulate = bad[i].accumulate;
        o.max_length = bad[i].length;
        o.max_tokens = bad[i].tokens;
        o.window = bad[i].window;
        o.threads = bad[i].threads;
        CHECK(!tt_loader_new(ctx, d, k, &o));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, bad[i].error);
    }
    o = tt_loader_options_default();
    o.batch = 201;
    o.drop_last = true;
    CHECK(!tt_loader_new(ctx, d, k, &o));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "200 texts are fewer than batch");
    l = tt_loader_new(ctx, d, k, NULL);
    REQUIRE(l);
    CHECK(tt_loader_seek(l, 0, 14) == TT_ERR_ARGUMENT && tt_loader_seek(l, -1, 0) == TT_ERR_ARGUMENT &&
          tt_loader_seek(l, 0, -1) == TT_ERR_ARGUMENT && tt_loader_seek(l, 0, 13) == TT_OK);
    CHECK(!tt_loader_next(l, &x) && tt_loader_status(l) == TT_OK);
    tt_loader_free(l);
    for (int i = 0; i < 30; i++) { /* frees loaders while their threads work */
        o = tt_loader_options_default();
        o.threads = 1 + i % 4;
        l = tt_loader_new(ctx, d, k, &o);
        REQUIRE(l);
        if (i % 3) CHECK(tt_loader_seek(l, i, i % 13) == TT_OK);
        if (i % 2) CHECK(tt_loader_next(l, &x));
        tt_loader_free(l);
    }
    tt_loader_free(NULL);
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx2, &b);
    TEST_CLOSE(ctx, &a);
}

/* The loader divides a step over `groups`. The micro-batches of a step are equal for any number of data
   ranks, and no text is lost. Each group gets equally many micro-batches, with similar numbers of tokens. If
   a step is too short for that, each of its micro-batches has one text. */
TEST(loader_deals_out_to_groups)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    enum { N = 213 };
    tt_dataset *d = words(ctx, N);
    static const struct { int batch, accumulate, tokens, groups; bool shuffle; } c[] = {
        {16, 1, 0, 2, true}, {16, 1, 0, 4, true}, {16, 1, 0, 4, false}, {16, 2, 0, 4, true},
        {16, 2, 0, 8, true}, {17, 3, 0, 3, true}, {32, 1, 0, 8, true}, {32, 3, 0, 8, true},
        {24, 1, 60, 4, true}, {24, 2, 40, 4, false}, {300, 5, 0, 4, true}, {300, 1, 100, 8, true},
        {8, 1, 30, 8, true}};
    REQUIRE(k && d);
    for (int i = 0; i < TEST_COUNT(c); i++) {
        epoch_log first = {0, 0, 0, NULL, NULL, NULL}, plain = first;
        tt_loader_options o = tt_loader_options_default();
        o.batch = c[i].batch, o.accumulate = c[i].accumulate, o.max_tokens = c[i].tokens;
        o.max_length = 30, o.shuffle = c[i].shuffle, o.window = 4;
        tt_loader *l = tt_loader_new(ctx, d, k, &o);
        REQUIRE(l);
        plain = read_epoch(l, d, k, &o, 1, 0);
        tt_loader_free(l);
        const int groups = o.parallel.groups = c[i].groups;
        const int seqs = (o.batch + o.accumulate * groups - 1) / (o.accumulate * groups);
        for (int data = 0; data <= groups; data++) { /* data 0: one rank */
            if (data && groups % data) continue;
            o.parallel.data = data;
            l = tt_loader_new(ctx, d, k, &o);
            REQUIRE(l);
            CHECK(tt_loader_max_seqs(l) <= seqs && (c[i].tokens || tt_loader_max_seqs(l) == seqs));
            epoch_log e = read_epoch(l, d, k, &o, 1, 0);
            if (!data) first = e;
            const size_t micros = (size_t)e.seqs * sizeof(int);
            CHECK(e.seqs == N && e.micro == first.micro && memcmp(e.micro_of, first.micro_of, micros) == 0 &&
                  memcmp(e.index, first.index, N * sizeof *e.index) == 0);
            epoch_log rest = read_epoch(l, d, k, &o, 1, e.steps / 2);
            const int skip = e.steps / 2 * o.batch;
            CHECK(rest.seqs == N - skip &&
                  memcmp(rest.index, e.index + skip, (size_t)rest.seqs * sizeof *e.index) == 0);
            log_free(&rest);
            int max = 0, more = 0;
            /* `all`: the number of tokens. `largest`: the number of tokens if each micro-batch were as long
               as the longest micro-batch of its step, for which all ranks wait. Steps whose micro-batches
               have one text each do not count. */
            double largest = 0, all = 0;
            for (int at = 0; at < N;) {
                bool in[N] = {false};
                int n = 0, parts = 0, tokens[N] = {0}, peak = 0;
                for (; at + n < N && e.step_of[at + n] == e.step_of[at]; n++) in[e.index[at + n]] = true;
                for (int q = at; q < at + n; q++) {
                    const int m = e.micro_of[q] - e.micro_of[at];
                    size_t bytes;
                    int32_t ids[30];
                    const char *text = tt_dataset_text(d, e.index[q], &bytes);
                    /* The step has the same texts with and without groups. */
                    CHECK(in[plain.index[q]] && plain.step_of[q] == e.step_of[q]);
                    tokens[m] += tt_tokenize(k, text, bytes, ids, 30);
                    peak = tokens[m] > peak ? tokens[m] : peak;
                    parts = m + 1;
                }
                const int whole = groups * ((n + groups * seqs - 1) / (groups * seqs));
                CHECK(parts == n || (parts % groups == 0 && parts >= whole));
                if (!c[i].tokens) CHECK(parts == (whole < n ? whole : n));
                for (int m = 0; m < parts && parts < n; m++) all += tokens[m];
                if (parts < n) largest += (double)peak * parts;
                max = parts > max ? parts : max;
                more += parts > (data ? data : 1);
                at += n;
            }
            CHECK(tt_loader_accumulates(l) || !more);
            if (!c[i].tokens) CHECK(tt_loader_accumulates(l) == (more > 0));
            if (all > 0 && c[i].shuffle) CHECK(largest <= 1.12 * all);
            tt_loader_free(l);
            if (data) log_free(&e);
        }
        log_free(&first);
        log_free(&plain);
    }
    static const struct { int batch, accumulate, groups, data; const char *error; } bad[] = {
        {16, 1, -1, 0, "parallel.groups = -1"}, {16, 1, 4, 3, "parallel.groups = 4 and parallel.data = 3"},
        {16, 1, 0, -2, "parallel.data = -2"}, {16, 3, 8, 8, "accumulate = 3 for each of 8 groups: set batch "
        "to at least 24"}, {4, 1, 0, 8, "batch = 4 has fewer sequences than micro-batches"}};
    for (int i = 0; i < TEST_COUNT(bad); i++) {
        tt_loader_options o = tt_loader_options_default();
        o.batch = bad[i].batch, o.accumulate = bad[i].accumulate;
        o.parallel.groups = bad[i].groups, o.parallel.data = bad[i].data;
        CHECK(!tt_loader_new(ctx, d, k, &o));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, bad[i].error);
    }
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}

/* A trainer needs memory for the actual texts, not for texts of max_length. */
TEST(loader_capacity_is_that_of_the_texts)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    enum { N = 300 };
    tt_dataset *d = words(ctx, N);
    static const struct { int batch, accumulate, length, tokens; bool shuffle; } c[] = {
        {16, 1, 512, 0, true}, {16, 1, 512, 0, false}, {16, 4, 512, 0, true}, {16, 1, 20, 0, true},
        {500, 1, 512, 0, true}, {16, 1, 512, 600, true}, {16, 1, 512, 512, true}, {16, 1, 20, 100, true},
        {1, 1, 512, 0, true}, {16, 1, 30, 480, true}};
    REQUIRE(k && d);
    for (int i = 0; i < TEST_COUNT(c); i++) {
        int32_t ids[600];
        int length[N], longest = 0, cut = 0, micro = 0, step = 0, parts = 0, max = 0;
        tt_loader_options o = tt_loader_options_default();
        tt_batch b;
        o.batch = c[i].batch, o.accumulate = c[i].accumulate, o.max_length = c[i].length;
        o.max_tokens = c[i].tokens, o.shuffle = c[i].shuffle;
        tt_loader *l = tt_loader_new(ctx, d, k, &o);
        REQUIRE(l);
        for (int t = 0; t < N; t++) {
            size_t n;
            const char *text = tt_dataset_text(d, t, &n);
            int whole = tt_tokenize(k, text, n, ids, 600);
            longest = whole > longest ? whole : longest;
            cut += whole > c[i].length;
            length[t] = whole < c[i].length ? whole : c[i].length;
            for (int s = t; s && length[s] > length[s - 1]; s--) { /* longest first */
                int other = length[s];
                length[s] = length[s - 1];
                length[s - 1] = other;
            }
        }
        int seqs = (c[i].batch + c[i].accumulate - 1) / c[i].accumulate;
        for (int t = 0; t < N && t < c[i].batch; t++) {
            step += length[t];
            micro += t < seqs ? length[t] : 0;
        }
        CHECK(tt_loader_longest(l) == longest && longest == 30);
        CHECK(tt_loader_cut(l) == cut && (cut > 0) == (c[i].length < 30));
        CHECK(tt_loader_max_tokens(l) == (c[i].tokens && c[i].tokens < micro ? c[i].tokens : micro));
        CHECK(tt_loader_accumulates(l) == (c[i].accumulate > 1 || step > tt_loader_max_tokens(l)));
        for (int epoch = 0; epoch < 20; epoch++) {
            CHECK(tt_loader_seek(l, epoch, 0) == TT_OK);
            while (tt_loader_next(l, &b)) {
                CHECK(b.rows <= tt_loader_max_tokens(l) && b.seqs <= tt_loader_max_seqs(l));
                max = b.rows > max ? b.rows : max;
                parts += !b.last_of_step;
            }
        }
        /* The largest micro-batch almost fills the planned capacity. */
        if (c[i].shuffle && !c[i].tokens) CHECK(max > tt_loader_max_tokens(l) * 9 / 10);
        if (!tt_loader_accumulates(l)) CHECK(parts == 0);
        tt_loader_free(l);
    }
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    TEST_CLOSE(ctx, &a);
}
