#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/device.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "cuda_products.cuh"

namespace {

// ------------------------------------------------------------------------------------------ tuned products
// Timing finds the fastest way to make a product (tt_compile_options.tune). Each round times all ways, with
// all algorithms that cuBLASLt offers, one after another, so that a change of the clock rates affects all of
// them; the median of the rounds counts. The operands are separate copies with random numbers, because zeros
// need less power and would give higher clock rates than training has. Several sets of operands, together
// twice the size of the L2 cache, are used in turn, so that the cache holds no operand from earlier runs.

enum { TUNE_ROUNDS = 7, TUNE_SETS = 16, TUNE_CANDIDATES = LT_WAYS * LT_OFFERS };

// An operand of a product. bytes: from its first to its last element; at: offset of its copy in a set.
struct tuned_operand { const void *data; size_t bytes; tt_dtype dtype; size_t at; };

// Calls each(pointer, bytes, dtype) for all operands of a product that are present.
template <class F> void each_operand(product *g, F each)
{
    const auto matrix = [&](const void **data, tt_dtype dtype, int64_t elements) {
        if (*data) each(data, (size_t)elements * tt_dtype_bytes(dtype), dtype);
    };
    matrix(&g->a, g->a_type, (g->m - 1) * g->a_row + (g->k - 1) * g->a_col + 1);
    matrix(&g->b, g->b_type, (g->k - 1) * g->b_row + (g->n - 1) * g->b_col + 1);
    for (tt__mat *m : {&g->c, &g->pre, &g->saved, &g->residual, &g->sums})
        matrix((const void **)&m->data, m->dtype, (m->rows - 1) * m->ld + m->cols);
    matrix(&g->bias, g->bias_type, g->n);
    matrix((const void **)&g->unscale_a, TT_F32, 1);
    matrix((const void **)&g->unscale_b, TT_F32, 1);
}

// Fills an operand with random numbers in (-1, 1). Both kinds of fp8 get numbers of E4M3, whose bits, read as
// E5M2, are never a NaN.
__global__ void __launch_bounds__(256) random_operand(void *to, tt_dtype dtype, int64_t n, uint32_t seed)
{
    tt__begin_kernel();
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < n; i += (int64_t)gridDim.x * 256) {
        // A hash of i and the seed: Knuth, TAOCP 3, 6.4, and then MurmurHash3's final mix.
        uint32_t u = (uint32_t)i * 2654435761u ^ seed;
        u = (u ^ u >> 16) * 0x85ebca6bu;
        u = (u ^ u >> 13) * 0xc2b2ae35u;
        const float v = (float)(int32_t)(u ^ u >> 16) * 0x1p-31f;
        if (dtype == TT__E4M3 || dtype == TT__E5M2)
            ((unsigned char *)to)[i] = (unsigned char)__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
        else store_any(to, dtype, i, v);
    }
}

// Memory for timing a product: `sets` copies of all its operands.
struct tuning_sets {
    tuned_operand operand[10];
    int operands, sets;
    size_t bytes;    // bytes of one set
    char *memory;    // NULL: not enough memory

    tuning_sets(const tt__device *d, const product &g) : operands(0), sets(0), bytes(0), memory(NULL)
    {
        product of = g;
        each_operand(&of, [&](const void **data, size_t n, tt_dtype dtype) {
            tuned_operand *x = find(*data); // a result may have the memory of an operand
            if (!x) *(x = &operand[operands++]) = {*data, 0, dtype, 0};
            x->bytes = max(x->bytes, n);
        });
        for (int k = 0; k < operands; k++) { // a copy has the address of its operand, modulo 256
            operand[k].at = bytes + (uintptr_t)operand[k].data % TT__CUDA_ALIGN;
            bytes = tt__align_to(operand[k].at + operand[k].bytes, TT__CUDA_ALIGN);
        }
        const size_t fills = (2 * (size_t)d->properties.l2CacheSize + bytes - 1) / bytes;
        sets = (int)max((size_t)1, min(fills, (size_t)TUNE_SETS));
        if (cudaMalloc(&memory, bytes * (size_t)sets) == cudaSuccess) return;
        cudaGetLastError();
        memory = NULL;
    }
    tuning_sets(const tuning_sets &) = delete;
    tuning_sets &operator=(const tuning_sets &) = delete;
    ~tuning_sets() { cudaFree(memory); }

    tuned_operand *find(const void *data)
    {
        for (int k = 0; k < operands; k++) if (operand[k].data == data) return &operand[k];
        return NULL;
    }
    // Returns the product g with the operands of set number `set`.
    product of(const product &g, int set)
    {
        product there = g;
        each_operand(&there, [&](const void **data, size_t, tt_dtype) {
            *data = memory + bytes * (size_t)(set % sets) + find(*data)->at;
        });
        return there;
    }
    cudaError_t fill(tt__device *d) const
    {
        cudaError_t e = cudaSuccess;
        for (int k = 0; k < operands * sets && e == cudaSuccess; k++) {
            const tuned_operand &x = operand[k % operands];
            const int64_t n = (int64_t)(x.bytes / tt_dtype_bytes(x.dtype));
            e = TT__LAUNCH(random_operand, grid_for(n, 2048, 2048), 256, 0, d->stream,
                           memory + bytes * (size_t)(k / operands) + x.at, x.dtype, n, (uint32_t)k * 40503u);
        }
        return e;
    }
};

// A candidate: a way, the number of one of the way's algorithms, and the times that the product took with it.
struct tuning_candidate {
    int way, offer;
    cudaEvent_t begin, end;
    float ms[TUNE_ROUNDS], median;
};

// Makes the product g in the way and with the algorithm of candidate c.
cudaError_t make_candidate(const tt__launch *l, const product &g, const tuning_candidate &c, bool *done)
{
    matmul_form f;
    l->device->trial->way = c.way;
    l->device->trial->offer = c.offer;
    const cudaError_t e = form_of(l, &g, &f);
    return e == cudaSuccess ? matmul_by(l, f, c.way, done) : e;
}

// Lists the candidates that cuBLASLt does not refuse, and makes the product once with each.
cudaError_t list_candidates(const tt__launch *l, const product &g, tuning_candidate *c, int *count)
{
    cudaError_t e = cudaSuccess;
    for (int way = 0; way < LT_WAYS; way++) {
        for (int offer = 0; offer < l->device->trial->of[way].count && e == cudaSuccess; offer++) {
            tuning_candidate *x = &c[*count];
            bool done = false;
            memset(x, 0, sizeof *x);
            x->way = way;
            x->offer = offer;
            e = make_candidate(l, g, *x, &done);
            if (e == cudaSuccess && done) e = cudaEventCreate(&x->begin);
            if (e == cudaSuccess && done) e = cudaEventCreate(&x->end);
            *count += done;
        }
    }
    return e;
}

// Times all candidates once. Fills the operands first: this replaces the contents of the L2 cache, and the
// host meanwhile queues the launches, so that no candidate waits for the host.
cudaError_t time_round(const tt__launch *l, const product &g, tuning_sets *sets, tuning_candidate *c,
                       int count, int round)
{
    tt__device *d = l->device;
    cudaError_t e = sets->fill(d);
    for (int k = 0; k < count && e == cudaSuccess; k++) {
        const product there = sets->of(g, k);
        bool done;
        e = cudaEventRecord(c[k].begin, d->stream);
        if (e == cudaSuccess) e = make_candidate(l, there, c[k], &done);
        if (e == cudaSuccess) e = cudaEventRecord(c[k].end, d->stream);
    }
    if (e == cudaSuccess) e = cudaStreamSynchronize(d->stream);
    for (int k = 0; k < count && e == cudaSuccess; k++)
        e = cudaEventElapsedTime(&c[k].ms[round], c[k].begin, c[k].end);
    return e;
}

void sort(float *x, int n)
{
    for (int k = 1; k < n; k++)
        for (int j = k; j > 0 && x[j] < x[j - 1]; j--) {
            const float less = x[j];
            x[j] = x[j - 1];
            x[j - 1] = less;
        }
}

bool add_tuned(tt__device *d, const tuned_product &x)
{
    tuned_product *more = (tuned_product *)realloc(d->tuned, (size_t)(d->tuned_count + 1) * sizeof *more);
    if (!more) return false;
    d->tuned = more;
    more[d->tuned_count++] = x;
    return true;
}

// Times the candidates of a product and adds the best one to the tuned entries. The best is the candidate
// offered first among those within 1% of the fastest, because timing is no more exact than 1%. Sets *untimed
// to whether memory for the operands was lacking.
cudaError_t time_product(const tt__launch *l, const product &g, bool *untimed)
{
    tt__device *d = l->device;
    tuning_candidate c[TUNE_CANDIDATES];
    tuning_sets sets(d, g);
    int count = 0;
    *untimed = !sets.memory;
    if (*untimed) return cudaSuccess;
    cudaError_t e = sets.fill(d);
    if (e == cudaSuccess) e = list_candidates(l, sets.of(g, 0), c, &count);
    for (int r = 0; r < TUNE_ROUNDS && e == cudaSuccess && count > 1; r++)
        e = time_round(l, g, &sets, c, count, r);
    cudaStreamSynchronize(d->stream); // waits before `sets` frees the memory
    const tuning_candidate *best = NULL;
    for (int k = 0; k < count; k++) {
        for (cudaEvent_t event : {c[k].begin, c[k].end}) if (event) cudaEventDestroy(event);
        sort(c[k].ms, TUNE_ROUNDS);
        c[k].median = c[k].ms[TUNE_ROUNDS / 2];
        if (!best || c[k].median < best->median) best = &c[k];
    }
    for (int k = count - 1; k >= 0; k--) if (c[k].median <= 1.01f * best->median) best = &c[k];
    for (int way = 0; way < LT_WAYS && e == cudaSuccess && best && way <= best->way; way++) {
        const way_trial &of = d->trial->of[way];
        if (!of.asked || of.known) continue;
        tuned_product x;
        memset(&x, 0, sizeof x);
        x.key = of.key;
        x.possible = way == best->way;
        if (x.possible) x.algo = of.algo[best->offer];
        x.met = true;
        if (!add_tuned(d, x)) e = cudaErrorMemoryAllocation;
    }
    return e;
}

// Marks the tuned entries of the product as met by the device's programs. If there are no entries and `times`
// is true, times the product.
cudaError_t tune_product(const tt__launch *l, const product &g, bool times, bool *untimed)
{
    tt__device *d = l->device;
    product_trial trial = {};
    matmul_form f;
    bool known = false, unknown = false, done;
    d->trial = &trial;
    trial.asks = true;
    cudaError_t e = form_of(l, &g, &f);
    for (int way = 0; way < LT_WAYS && e == cudaSuccess && !known; way++) {
        trial.way = way;
        e = matmul_by(l, f, way, &done);
        if (!trial.of[way].asked) continue;
        if (trial.of[way].known) trial.of[way].known->met = true;
        else unknown = true;
        // If true, programs make the product in this way and need no entries for later ways.
        known = !unknown && trial.of[way].known->possible;
    }
    trial.asks = false;
    if (e == cudaSuccess && unknown && times) e = time_product(l, g, untimed);
    d->trial = NULL;
    return e;
}

// Adds to `to` the products that a launch would make. The stream is captured meanwhile, so that no kernel of
// the launch runs.
cudaError_t collect_products(const tt__launch *l, cudaError_t (*run)(const tt__launch *l),
                             collected_products *to)
{
    tt__device *d = l->device;
    cudaGraph_t graph = NULL;
    cudaError_t e = cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal);
    if (e != cudaSuccess) return e;
    d->collected = to;
    e = run(l);
    d->collected = NULL;
    const cudaError_t ended = cudaStreamEndCapture(d->stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    return e != cudaSuccess ? e : ended;
}

void forget_choices(tt__device *d)
{
    if (d->choices) memset(d->choices, 0, TT__PRODUCT_CHOICES * sizeof *d->choices);
    d->choice_count = 0;
}

// ---- tuned entries as text: a title, a line about the device, a line for each tuned product, a last line

void append(text_buffer *text, const char *format, ...) TT_PRINTF(2, 3);
// Appends text as printf does; text->length also counts what does not fit.
void append(text_buffer *text, const char *format, ...)
{
    va_list args;
    const size_t room = text->length < text->capacity ? text->capacity - text->length : 0;
    va_start(args, format);
    const int n = vsnprintf(room ? text->to + text->length : NULL, room, format, args);
    va_end(args);
    if (n > 0) text->length += (size_t)n;
}

#define TT__TUNED_TITLE "tinytrain: the fastest products, version 1"

// Writes the line of a file of tuned products that names the device. The meaning of an algorithm's 64 bytes
// depends only on the version of cuBLASLt, but the choice of the fastest algorithm depends on the device.
void tuned_device(const tt__device *d, char to[512])
{
    snprintf(to, 512, "%s, compute capability %d.%d, %d multiprocessors, cuBLASLt %llu, workspace %llu",
             d->properties.name, d->properties.major, d->properties.minor, d->properties.multiProcessorCount,
             (unsigned long long)cublasLtGetVersion(), (unsigned long long)resident_workspace::LT_BYTES);
}

enum { TUNED_NUMBERS = 23 };
typedef char algorithm_is_64_bytes[sizeof(cublasLtMatmulAlgo_t) == 64 ? 1 : -1];

// Sets n to the fields of a key, in the order in which a line of the text has them.
void numbers_of(const product_key &k, int64_t (&n)[TUNED_NUMBERS])
{
    const int64_t all[TUNED_NUMBERS] = {
        k.m, k.n, k.k, k.lda, k.ldb, k.ldc, k.ldd, k.ld_aux, k.a_type, k.b_type, k.to_type, k.epilogue,
        k.alignment[0], k.alignment[1], k.alignment[2], k.alignment[3], k.alignment[4], k.alignment[5],
        k.a_plain, k.b_plain, k.adds, k.tf32, k.sums_rows};
    memcpy(n, all, sizeof n);
}

// Sets a key from numbers of the text; returns false if no key can have these numbers.
bool key_from(const int64_t (&n)[TUNED_NUMBERS], product_key *k)
{
    int64_t again[TUNED_NUMBERS];
    memset(k, 0, sizeof *k);
    k->m = n[0]; k->n = n[1]; k->k = n[2]; k->lda = n[3]; k->ldb = n[4]; k->ldc = n[5]; k->ldd = n[6];
    k->ld_aux = n[7]; k->a_type = (int)n[8]; k->b_type = (int)n[9]; k->to_type = (int)n[10];
    k->epilogue = (int)n[11];
    for (int j = 0; j < 6; j++) k->alignment[j] = (uint16_t)n[12 + j];
    k->a_plain = n[18] != 0; k->b_plain = n[19] != 0; k->adds = n[20] != 0; k->tf32 = n[21] != 0;
    k->sums_rows = n[22] != 0;
    k->tuned = true;
    numbers_of(*k, again);
    return memcmp(n, again, sizeof n) == 0 && k->m > 0 && k->n > 0 && k->k > 0;
}

size_t cuda_tuned_text(tt__device *d, char *to, size_t capacity)
{
    text_buffer text = {to, capacity, 0};
    char device[512];
    tuned_device(d, device);
    append(&text, TT__TUNED_TITLE "\n%s\n", device);
    for (int j = 0; j < d->tuned_count; j++) {
        const tuned_product &x = d->tuned[j];
        int64_t n[TUNED_NUMBERS];
        uint64_t words[8];
        numbers_of(x.key, n);
        memcpy(words, &x.algo, sizeof words);
        for (int64_t number : n) append(&text, "%lld ", (long long)number);
        if (!x.possible) append(&text, "slower\n");
        for (int k = 0; k < 8 && x.possible; k++)
            append(&text, "%016llx%s", (unsigned long long)words[k], k < 7 ? " " : "\n");
    }
    append(&text, "%d products\n", d->tuned_count);
    return text.length;
}

// Reads a tuned entry from a line of the text without its newline. Returns NULL, or a message that says what
// is wrong with the line.
const char *read_tuned(const char *line, tuned_product *x)
{
    int64_t n[TUNED_NUMBERS];
    uint64_t words[8];
    const char *at = line;
    memset(x, 0, sizeof *x);
    for (int k = 0; k < TUNED_NUMBERS; k++) {
        char *end;
        errno = 0;
        n[k] = strtoll(at, &end, 10);
        if (*at < '0' || *at > '9' || errno || *end != ' ') return "it does not begin with 23 numbers";
        at = end + 1;
    }
    if (!key_from(n, &x->key)) return "its numbers describe no matrix product";
    if (strcmp(at, "slower") == 0) return NULL;
    for (int k = 0; k < 8; k++) {
        const bool hex = strspn(at, "0123456789abcdef") == 16;
        if (!hex || at[16] != (k < 7 ? ' ' : 0))
            return "it ends neither with 'slower' nor with 8 numbers of 16 hexadecimal digits";
        words[k] = strtoull(at, NULL, 16);
        at += 17;
    }
    memcpy(&x->algo, words, sizeof words);
    x->possible = true;
    return NULL;
}

// Reads a text of tuned entries: does the work of tt__backend.learn.
tt_status cuda_learn(tt__device *d, const char *text, int *line)
{
    char device[512], now[1024];
    tuned_product *const before = d->tuned;
    const int count_before = d->tuned_count;
    const char *wrong = NULL;
    bool ended = false;
    tt_status status = TT_OK;
    tuned_device(d, device);
    d->tuned = NULL;
    d->tuned_count = 0;
    *line = 0;
    for (const char *at = text; !wrong && status == TT_OK && !ended;) {
        const size_t length = strcspn(at, "\n");
        tuned_product x;
        ++*line;
        if (length >= sizeof now || !at[length]) {
            wrong = !at[length] ? "it is cut off" : "it is too long";
            break;
        }
        memcpy(now, at, length);
        now[length] = 0;
        at += length + 1;
        char last[64];
        snprintf(last, sizeof last, "%d products", d->tuned_count);
        if (*line == 1 && strcmp(now, TT__TUNED_TITLE) != 0) wrong = "it is not '" TT__TUNED_TITLE "'";
        else if (*line == 2 && strcmp(now, device) != 0)
            status = fail(d, TT_ERR_UNSUPPORTED,
                          "it was made on '%.200s', but this device is '%.200s': name another file", now,
                          device);
        else if (*line > 2 && strcmp(now, last) == 0) {
            ended = true;
            if (*at) wrong = "there is text after the last line";
        } else if (*line > 2) {
            wrong = read_tuned(now, &x);
            if (!wrong && tuned_of(d, x.key)) wrong = "an earlier line has the same product";
            if (!wrong && !add_tuned(d, x)) status = fail(d, TT_ERR_MEMORY, "out of memory: free memory");
        }
    }
    if (wrong) status = fail(d, TT_ERR_FORMAT, "%s: the file is damaged; remove it, or use another", wrong);
    free(status == TT_OK ? before : d->tuned);
    if (status == TT_OK) {
        forget_choices(d);
        return TT_OK;
    }
    d->tuned = before;
    d->tuned_count = count_before;
    return status;
}

} // namespace
