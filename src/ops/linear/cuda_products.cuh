#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/device.cuh"
#include "../../cuda/numbers.cuh"
#include "../../cuda/groups.cuh"
#include "../elementwise/cuda.cuh"
#include "../losses/cuda.cuh"

namespace {

// ================================================================================================== matmuls
// cuBLASLt makes the products. Its epilogues finish the sums where they fit; otherwise kernels of our own
// sweep over the result. If cuBLASLt has no algorithm (operands of different dtypes), a kernel of our own
// makes the product. A linear layer computes y (rows, out) from x (rows, in) and w (out, in).

// A product C = A B of A (m, k) and B (k, n). Element (i, j) of A is a[i * a_row + j * a_col], element (i, j)
// of B is b[i * b_row + j * b_col]. These steps finish a sum v, element (i, j) of A B:
//     v += bias[j];  pre[i, j] = v;  v = act(v)      or, with `saved`: v *= act'(saved[i, j])
//     C[i, j] = v + residual[i, j] + (accumulate ? C[i, j] : 0)
struct product {
    int64_t m, n, k;
    const void *a, *b;
    tt_dtype a_type, b_type;
    int64_t a_row, a_col, b_row, b_col;
    tt__mat c, pre, saved, residual; // a matrix without data is absent
    tt__mat sums;                    // gets the column sums of C (with `saved`) or row sums of A (sums_rows)
    const void *bias;
    tt_dtype bias_type;
    int act;
    bool accumulate, add_sums;
    bool sums_rows;        // whether k is the number of rows of the batch; otherwise m is
    // If not NULL, A and B are fp8, and A must be multiplied by *unscale_a, B by *unscale_b.
    const float *unscale_a, *unscale_b;
};

// Returns element i of an operand as a float. FP8: the dtype is TT__E4M3 or TT__E5M2, unknown to load_any.
template <bool FP8> __device__ __forceinline__ float factor(const void *p, tt_dtype dtype, int64_t i)
{
    if (!FP8) return load_any(p, dtype, i);
    const unsigned char *q = (const unsigned char *)p + i;
    return dtype == TT__E5M2 ? (float)*(const __nv_fp8_e5m2 *)q : (float)*(const __nv_fp8_e4m3 *)q;
}

__device__ __forceinline__ void finish_element(const product &g, int64_t i, int64_t j, float v)
{
    if (g.bias) v += load_any(g.bias, g.bias_type, j);
    if (g.saved.data) {
        v *= activation_slope(g.act, element(g.saved, i, j));
    } else if (g.act) {
        if (g.pre.data) {
            store_any(g.pre.data, g.pre.dtype, i * g.pre.ld + j, v);
            v = element(g.pre, i, j); // rounded to the number that the backward will read
        }
        v = activate(g.act, v);
    }
    if (g.residual.data) v += element(g.residual, i, j);
    if (g.accumulate) v += element(g.c, i, j);
    store_any(g.c.data, g.c.dtype, i * g.c.ld + j, v);
}

// Makes a product by tiles of 64 x 64 elements of C: 256 threads have 4 x 4 sums each and add 16 products to
// each sum at a time. The kernel serves small or rare products for which cuBLASLt has no algorithm.
template <bool FP8> __global__ void __launch_bounds__(256) any_matmul(product g)
{
    tt__begin_kernel();
    TT__SHARED(float, a, [16][68]);
    TT__SHARED(float, b, [16][68]);
    const int64_t tiles = (g.n + 63) / 64, i0 = (int64_t)blockIdx.x / tiles * 64;
    const int64_t j0 = (int64_t)blockIdx.x % tiles * 64;
    const int t = threadIdx.x, ti = t / 16 * 4, tj = t % 16 * 4;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < g.k; k0 += 16) {
        for (int e = t; e < 1024; e += 256) {
            // Neighbouring threads copy neighbouring elements.
            int ka = g.a_col == 1 ? e % 16 : e / 64, ia = g.a_col == 1 ? e / 16 : e % 64;
            int kb = g.b_col == 1 ? e / 64 : e % 16, jb = g.b_col == 1 ? e % 64 : e / 16;
            a[ka][ia] = i0 + ia < g.m && k0 + ka < g.k
                ? factor<FP8>(g.a, g.a_type, (i0 + ia) * g.a_row + (k0 + ka) * g.a_col) : 0.0f;
            b[kb][jb] = j0 + jb < g.n && k0 + kb < g.k
                ? factor<FP8>(g.b, g.b_type, (k0 + kb) * g.b_row + (j0 + jb) * g.b_col) : 0.0f;
        }
        __syncthreads();
        TT__UNROLL for (int k = 0; k < 16; k++) {
            float x[4], y[4];
            TT__UNROLL for (int r = 0; r < 4; r++) { x[r] = a[k][ti + r]; y[r] = b[k][tj + r]; }
            TT__UNROLL for (int r = 0; r < 4; r++) {
                TT__UNROLL for (int c = 0; c < 4; c++) sum[r][c] += x[r] * y[c];
            }
        }
        __syncthreads();
    }
    const float unscale = FP8 ? *g.unscale_a * *g.unscale_b : 1;
    for (int r = 0; r < 4; r++) {
        for (int c = 0; c < 4; c++) {
            if (i0 + ti + r < g.m && j0 + tj + c < g.n)
                finish_element(g, i0 + ti + r, j0 + tj + c, FP8 ? sum[r][c] * unscale : sum[r][c]);
        }
    }
}

__global__ void cast_bias(void *to, tt_dtype to_type, const void *from, tt_dtype from_type, int64_t n)
{
    tt__begin_kernel();
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n) store_any(to, to_type, i, load_any(from, from_type, i));
}


cudaDataType_t lt_type(tt_dtype t)
{
    return t == TT_BF16 ? CUDA_R_16BF : t == TT_F16 ? CUDA_R_16F
        : t == TT__E4M3 ? CUDA_R_8F_E4M3 : t == TT__E5M2 ? CUDA_R_8F_E5M2 : CUDA_R_32F;
}

// An epilogue of cuBLASLt. `bias` is added, or gets the sum of each row of A (BGRADB) or of each column of
// the result (DGELU_BGRAD). For other kinds, `bias` must be NULL: given a pointer that the kind does not use,
// cublasLtMatmul returns CUBLAS_STATUS_INVALID_VALUE, even with algorithms that
// cublasLtMatmulAlgoGetHeuristic offers and cublasLtMatmulAlgoCheck accepts (seen in cuBLASLt 13.1). `aux`,
// the operand of GELU, is written or read.
struct lt_epilogue { cublasLtEpilogue_t kind; const void *bias; tt__mat aux; };

// A product in the form for cuBLASLt: to = A B + addend with an epilogue, where A and B are those of g. In
// cuBLASLt's column-major view this is C^T = B^T A^T.
struct lt_product {
    const product *g;
    const tt__mat *to, *addend; // addend may be NULL
    const lt_epilogue *more;
    bool tf32;

    bool a_plain() const { return g->a_col == 1; } // whether A is row-major
    bool b_plain() const { return g->b_col == 1; }
    int64_t a_ld() const { return a_plain() ? g->a_row : g->a_col; }
    int64_t b_ld() const { return b_plain() ? g->b_row : g->b_col; }
    int64_t c_ld() const { return addend ? addend->ld : to->ld; }
    const void *c() const { return addend ? addend->data : to->data; }
};

// All numbers on which cuBLASLt's choice of an algorithm depends.
struct product_key {
    int64_t m, n, k, lda, ldb, ldc, ldd, ld_aux;
    int a_type, b_type, to_type, epilogue;
    uint16_t alignment[6]; // bytes to which B, A, C, the result, bias and aux are aligned
    bool a_plain, b_plain, adds, tf32, sums_rows, exact;
    bool tuned; // whether the program was compiled with `tune`
};

struct product_choice { product_key key; cublasLtMatmulAlgo_t algo; bool used, possible; };

uint16_t alignment_of(const void *p)
{
    uint16_t k = 4;
    while (k < 256 && (uintptr_t)p % (2 * k) == 0) k *= 2;
    return (uintptr_t)p % 4 ? 2 : k;
}

// Returns the number of rows for which an algorithm is chosen: `rows` if `exact`, otherwise the next multiple
// of 128 if there are more than 128 rows. The rounded number makes as many tiles as `rows`. Batches of texts
// differ in their number of rows; with multiples of 128, they seldom need a new choice. The number must not
// depend on earlier products, because the bits of a product may depend on its algorithm.
int64_t rows_to_choose_for(int64_t rows, bool exact)
{
    return exact || rows <= 128 ? rows : (rows + 127) / 128 * 128;
}

product_key key_of(const lt_product &p, bool exact, bool tuned)
{
    product_key key;
    memset(&key, 0, sizeof key); // clears the padding, too, because memcmp compares keys
    key.m = p.g->sums_rows ? p.g->m : rows_to_choose_for(p.g->m, exact);
    key.n = p.g->n;
    key.k = p.g->sums_rows ? rows_to_choose_for(p.g->k, exact) : p.g->k;
    key.lda = p.a_ld(); key.ldb = p.b_ld(); key.ldc = p.c_ld(); key.ldd = p.to->ld;
    // If the rows of the batch run along memory, as in fp8, lda and ldb limit the number of rows.
    if (p.g->sums_rows && p.a_plain()) key.k = min(key.k, min(key.lda, key.ldb));
    key.ld_aux = p.more->aux.data ? p.more->aux.ld : 0;
    key.a_type = lt_type(p.g->a_type); key.b_type = lt_type(p.g->b_type); key.to_type = lt_type(p.to->dtype);
    key.epilogue = p.more->kind;
    const void *const operands[6] = {p.g->b, p.g->a, p.c(), p.to->data, p.more->bias, p.more->aux.data};
    for (int k = 0; k < 6; k++) key.alignment[k] = alignment_of(operands[k]);
    key.a_plain = p.a_plain(); key.b_plain = p.b_plain(); key.adds = p.addend != NULL; key.tf32 = p.tf32;
    key.sums_rows = p.g->sums_rows; key.exact = exact; key.tuned = tuned;
    return key;
}

// Returns the entry of `key` in the device's table of choices, or a free entry. Empties the table once three
// quarters of its entries are in use. Returns NULL when out of memory.
product_choice *choice_of(tt__device *d, const product_key &key)
{
    if (!d->choices) d->choices = (product_choice *)calloc(TT__PRODUCT_CHOICES, sizeof *d->choices);
    if (!d->choices) return NULL;
    uint64_t hash = 1469598103934665603u; // FNV-1a
    for (size_t k = 0; k < sizeof key; k++) hash = (hash ^ ((const unsigned char *)&key)[k]) * 1099511628211u;
    for (;; hash++) {
        product_choice *choice = &d->choices[hash % TT__PRODUCT_CHOICES];
        if (choice->used && memcmp(&choice->key, &key, sizeof key) == 0) return choice;
        if (choice->used) continue;
        if (++d->choice_count > TT__PRODUCT_CHOICES * 3 / 4) {
            memset(d->choices, 0, TT__PRODUCT_CHOICES * sizeof *d->choices);
            d->choice_count = 1;
        }
        choice->key = key;
        return choice;
    }
}

// cuBLASLt's description of a product whose A is (m, k).
struct lt_description {
    cublasLtMatmulDesc_t desc = NULL;
    cublasLtMatrixLayout_t a = NULL, b = NULL, c = NULL, to = NULL;
    cublasStatus_t status;

    lt_description(const lt_product &p, int64_t m, int64_t k)
    {
        const product &g = *p.g;
        const lt_epilogue &more = *p.more;
        status = cublasLtMatmulDescCreate(&desc, p.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                          CUDA_R_32F);
        set(CUBLASLT_MATMUL_DESC_TRANSA, p.b_plain() ? CUBLAS_OP_N : CUBLAS_OP_T);
        set(CUBLASLT_MATMUL_DESC_TRANSB, p.a_plain() ? CUBLAS_OP_N : CUBLAS_OP_T);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, more.kind);
        if (more.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, more.bias);
        if (g.unscale_a) {
            set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, g.unscale_b);
            set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, g.unscale_a);
            // Hopper sums fp8 products in 14 bits. Without fast accumulation, cuBLASLt adds these sums to
            // f32 sums at intervals. Products of gradients, which are E5M2, need the f32 sums more than
            // products of values; Transformer Engine makes the same choice.
            set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)(g.a_type != TT__E5M2));
            // cuBLASLt accepts no other dtype of bias for fp8 operands.
            const cudaDataType bias_type = p.to->dtype == TT_F16 ? CUDA_R_16F : CUDA_R_16BF;
            if (more.bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type);
        }
        if (more.aux.data) {
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, more.aux.data);
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, more.aux.ld);
        }
        lay_out(&b, lt_type(g.b_type), p.b_plain(), k, g.n, p.b_ld());
        lay_out(&a, lt_type(g.a_type), p.a_plain(), m, k, p.a_ld());
        lay_out(&c, lt_type(p.to->dtype), true, m, g.n, p.c_ld());
        lay_out(&to, lt_type(p.to->dtype), true, m, g.n, p.to->ld);
    }
    lt_description(const lt_description &) = delete;
    lt_description &operator=(const lt_description &) = delete;
    ~lt_description()
    {
        for (cublasLtMatrixLayout_t layout : {a, b, c, to}) if (layout) cublasLtMatrixLayoutDestroy(layout);
        if (desc) cublasLtMatmulDescDestroy(desc);
    }

    template <class T> void set(cublasLtMatmulDescAttributes_t name, const T &value)
    {
        if (status == CUBLAS_STATUS_SUCCESS)
            status = cublasLtMatmulDescSetAttribute(desc, name, &value, sizeof value);
    }
    void lay_out(cublasLtMatrixLayout_t *layout, cudaDataType type, bool plain, int64_t rows, int64_t cols,
                 int64_t ld)
    {
        if (status != CUBLAS_STATUS_SUCCESS) return;
        status = cublasLtMatrixLayoutCreate(layout, type, (uint64_t)(plain ? cols : rows),
                                            (uint64_t)(plain ? rows : cols), ld);
    }
};

constexpr int LT_OFFERS = 8; // max algorithms per product: cuBLASLt 13.1 never offers more than 8

// Writes to `found` the algorithms, at most `largest`, that cuBLASLt's heuristic offers for the key, the
// fastest first, and sets *count to their number.
cublasStatus_t lt_ask(tt__device *d, const lt_product &p, const product_key &key, int largest,
                      cublasLtMatmulHeuristicResult_t (&found)[LT_OFFERS], int *count)
{
    static const cublasLtMatmulPreferenceAttributes_t names[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const lt_description of(p, key.m, key.k);
    const size_t workspace = resident_workspace::LT_BYTES;
    cublasLtMatmulPreference_t preference = NULL;
    cublasStatus_t s = of.status;
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t name, const auto &value) {
        if (s == CUBLAS_STATUS_SUCCESS)
            s = cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof value);
    };
    *count = 0;
    if (s == CUBLAS_STATUS_SUCCESS) s = cublasLtMatmulPreferenceCreate(&preference);
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    for (int k = 0; k < 4; k++) set(names[k], (uint32_t)key.alignment[k]);
    if (s == CUBLAS_STATUS_SUCCESS) {
        const cublasStatus_t none = cublasLtMatmulAlgoGetHeuristic(d->lt, of.desc, of.b, of.a, of.c, of.to,
                                                                   preference, largest, found, count);
        if (none != CUBLAS_STATUS_SUCCESS || found[0].state != CUBLAS_STATUS_SUCCESS) *count = 0;
    }
    if (preference) cublasLtMatmulPreferenceDestroy(preference);
    return s;
}

// Returns whether cuBLASLt can use `algo` for a product of the key's sizes with the resident workspace.
bool lt_has(tt__device *d, const lt_product &p, const product_key &key, const cublasLtMatmulAlgo_t &algo)
{
    const lt_description of(p, key.m, key.k);
    cublasLtMatmulHeuristicResult_t found;
    return of.status == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatmulAlgoCheck(d->lt, of.desc, of.b, of.a, of.c, of.to, &algo, &found) ==
            CUBLAS_STATUS_SUCCESS &&
        found.workspaceSize <= resident_workspace::LT_BYTES;
}

enum lt_outcome { LT_DONE, LT_REFUSED, LT_NOT_OFFERED };

// The result of timing a kind of product, measured or read from a text. possible: the algorithm `algo` of
// cuBLASLt is the fastest way; otherwise a way that is tried later is faster. met: the device's programs
// have a product whose key, at the product's max number of rows, is this key.
struct tuned_product { product_key key; cublasLtMatmulAlgo_t algo; bool possible, met; };

tuned_product *tuned_of(tt__device *d, const product_key &key)
{
    for (int k = 0; k < d->tuned_count; k++)
        if (memcmp(&d->tuned[k].key, &key, sizeof key) == 0) return &d->tuned[k];
    return NULL;
}

// Returns the tuned entry that fits the key in all but the number of rows: the entry with the key's number of
// rows, else with the next larger number, else with the largest; NULL if no entry fits. Only entries with
// `met` count, so the result does not depend on the products that ran before.
const tuned_product *nearest_tuned(tt__device *d, const product_key &key)
{
    const tuned_product *nearest = NULL;
    const auto rows_of = [](const product_key &x) { return x.sums_rows ? x.k : x.m; };
    const int64_t rows = rows_of(key);
    for (int k = 0; k < d->tuned_count; k++) {
        const tuned_product *x = &d->tuned[k];
        product_key same = x->key;
        (same.sums_rows ? same.k : same.m) = rows;
        if (!x->met || memcmp(&same, &key, sizeof key) != 0) continue;
        const int64_t best = nearest ? rows_of(nearest->key) : 0, now = rows_of(x->key);
        if (!nearest || (best < rows ? now > best : now >= rows && now < best)) nearest = x;
    }
    return nearest;
}

// Ways to make a product, in the order in which they are tried.
enum product_way {
    LT_WITH_SUMS,   // cuBLASLt also sums the columns of the result, or the rows of A
    LT_WITH_GELU,   // cuBLASLt also applies GELU or its slope; kernels of our own compute the sums
    LT_ALONE,       // cuBLASLt adds a bias at most; kernels of our own do the rest
    LT_WAYS
};

// The trial of one way to make a product. `algo` has the algorithms to be timed: all that cuBLASLt offers or,
// if a tuned entry is known, only the algorithm of the entry.
struct way_trial {
    bool asked;     // whether lt_try has run in this way, as it does if the way suits the product
    product_key key;
    tuned_product *known;
    cublasLtMatmulAlgo_t algo[LT_OFFERS];
    int count;
};

struct product_trial {
    way_trial of[LT_WAYS];
    int way, offer; // numbers of the way, and of its algorithm, that lt_run runs now
    bool asks;      // whether lt_run only finds the offered algorithms and makes no product
};

cublasStatus_t lt_make(const tt__launch *l, const lt_product &p, const lt_description &of,
                       const cublasLtMatmulAlgo_t *algo)
{
    const float one = 1, zero = 0;
    return cublasLtMatmul(l->device->lt, of.desc, &one, p.g->b, of.b, p.g->a, of.a, p.addend ? &one : &zero,
                          p.c(), of.c, p.to->data, of.to, algo, resident_of(l)->product.lt,
                          resident_workspace::LT_BYTES, l->device->stream);
}

// Returns whether cublasLtMatmul's status means that cuBLASLt cannot use the algorithm for the product.
bool lt_refuses(cublasStatus_t s)
{
    return s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_INVALID_VALUE;
}

// Does the work of lt_run while a product is timed: finds the algorithms for the trial's way, if they are not
// known yet, and makes the product with the trial's algorithm.
cublasStatus_t lt_try(const tt__launch *l, const lt_product &p, lt_outcome *outcome)
{
    tt__device *d = l->device;
    way_trial &way = d->trial->of[d->trial->way];
    cublasLtMatmulHeuristicResult_t found[LT_OFFERS];
    *outcome = LT_NOT_OFFERED;
    if (!way.asked) {
        way.asked = true;
        way.key = key_of(p, false, true);
        way.known = tuned_of(d, way.key);
        cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
        if (!way.known) s = lt_ask(d, p, way.key, LT_OFFERS, found, &way.count);
        else way.count = way.known->possible && lt_has(d, p, way.key, way.known->algo);
        for (int k = 0; k < way.count; k++) way.algo[k] = way.known ? way.known->algo : found[k].algo;
        if (s != CUBLAS_STATUS_SUCCESS) return s;
    }
    if (d->trial->asks || d->trial->offer >= way.count) return CUBLAS_STATUS_SUCCESS;
    const lt_description of(p, p.g->m, p.g->k);
    const cublasStatus_t s = of.status != CUBLAS_STATUS_SUCCESS ? of.status
        : lt_make(l, p, of, &way.algo[d->trial->offer]);
    *outcome = lt_refuses(s) ? LT_REFUSED : LT_DONE;
    return lt_refuses(s) ? CUBLAS_STATUS_SUCCESS : s;
}

// Returns whether a product that was not timed uses this epilogue. Times on an H200 with GPT-2's sizes,
// 16,384 rows of 3,072 and 768 columns: the slope of GELU and column sums take 439 us with the epilogue;
// without, the product takes 108 us and a kernel of our own 75 us. Sums of A's rows take 154 us with the
// epilogue; without, 112 us and 25 us. GELU takes 155 us with the epilogue; without, 114 us and 50 us. The
// times of kernels of our own are computed from their memory traffic. Only the epilogue of GELU is therefore
// faster.
bool is_usual(cublasLtEpilogue_t kind)
{
    return kind != CUBLASLT_EPILOGUE_DGELU && kind != CUBLASLT_EPILOGUE_DGELU_BGRAD &&
        kind != CUBLASLT_EPILOGUE_BGRADB;
}

// Makes the product with the algorithm chosen for its key. If none was chosen yet, chooses the tuned
// algorithm or the first offered algorithm that cuBLASLt does not refuse.
cublasStatus_t lt_run(const tt__launch *l, const lt_product &p, bool exact, lt_outcome *outcome)
{
    tt__device *d = l->device;
    if (d->trial) return lt_try(l, p, outcome);
    const product_key key = key_of(p, exact, l->tuned);
    cublasLtMatmulHeuristicResult_t found[LT_OFFERS];
    product_choice *choice = choice_of(d, key);
    if (!choice) return CUBLAS_STATUS_ALLOC_FAILED;
    *outcome = LT_NOT_OFFERED;
    if (choice->used && !choice->possible) return CUBLAS_STATUS_SUCCESS;
    // If the tuned entry has another number of rows, only its `possible` is used, not its algorithm. On an
    // H200, with 3,072 rows of 3,072 inputs, the fastest algorithm for 6,144 rows took 39 us, the algorithm
    // offered first 27 us.
    const tuned_product *tuned = choice->used || exact || !l->tuned ? NULL : nearest_tuned(d, key);
    const bool same = tuned && memcmp(&tuned->key, &key, sizeof key) == 0;
    int count = 1;
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (choice->used) found[0].algo = choice->algo;
    else if (tuned ? !tuned->possible : !is_usual(p.more->kind)) count = 0;
    else if (same && lt_has(d, p, key, tuned->algo)) found[0].algo = tuned->algo;
    else s = lt_ask(d, p, key, exact ? LT_OFFERS : 1, found, &count);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    const lt_description of(p, p.g->m, p.g->k);
    if (of.status != CUBLAS_STATUS_SUCCESS) return of.status;
    if (count) {
        *outcome = LT_REFUSED;
        choice->algo = found[0].algo;
    }
    for (int k = 0; k < count && *outcome == LT_REFUSED; k++) {
        s = lt_make(l, p, of, &found[k].algo);
        if (lt_refuses(s)) continue; // cuBLASLt refuses some algorithms that its heuristic offers
        if (s != CUBLAS_STATUS_SUCCESS) return s;
        choice->algo = found[k].algo;
        *outcome = LT_DONE;
    }
    choice->used = true;
    choice->possible = exact ? *outcome == LT_DONE : count > 0;
    return CUBLAS_STATUS_SUCCESS;
}

// Makes to = A B + addend (NULL: no addend) with an epilogue by cuBLASLt. Sets *done to false where cuBLASLt
// has no algorithm.
cudaError_t lt_matmul(const tt__launch *l, const product *g, const tt__mat *to,
                      const tt__mat *addend, const lt_epilogue *more, bool *done)
{
    const lt_product p = {g, to, addend, more, l->tf32 && g->a_type == TT_F32};
    lt_outcome outcome = LT_NOT_OFFERED;
    *done = false;
    const bool alike = g->a_type == g->b_type && (to->dtype == TT_F32 || to->dtype == g->a_type);
    if (!(alike || g->unscale_a) || !g->k) return cudaSuccess;
    cublasStatus_t s = lt_run(l, p, false, &outcome);
    if (s == CUBLAS_STATUS_SUCCESS && outcome == LT_REFUSED && !l->device->trial)
        s = lt_run(l, p, true, &outcome);
    *done = outcome == LT_DONE;
    if (s == CUBLAS_STATUS_SUCCESS) return cudaSuccess;
    const cudaError_t cause = cudaPeekAtLastError();
    if (ends_all(cause)) return cause;
    fail(l->device, TT_ERR_DEVICE, "cuBLASLt failed with status %d in a product of %lld x %lld x %lld: "
         "update CUDA and the driver", (int)s, (long long)g->m, (long long)g->n, (long long)g->k);
    return cudaErrorUnknown;
}

// Returns whether cuBLASLt's GELU, the tanh approximation (github.com/pytorch/pytorch/pull/104061), can be
// used. The operand of GELU must have the dtype of the result, and its rows must be a multiple of 8 elements
// apart (cublasLt.h, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD).
bool lt_gelu(const product *g, const tt__mat *aux)
{
    if (g->act != TT__ACT_GELU_TANH || g->accumulate || g->residual.data) return false;
    return !aux->data || (aux->dtype == g->c.dtype && aux->ld % 8 == 0 && (uintptr_t)aux->data % 16 == 0);
}

// Makes a product with an epilogue that also computes sums, and writes the sums to `sums` or, if `add`, adds
// them to `sums`. cuBLASLt writes sums in the dtype of the result and cannot add, so sums to be added go
// through a buffer.
cudaError_t lt_sums(const tt__launch *l, const product *g, const tt__mat *to, const tt__mat *addend,
                    lt_epilogue more, const tt__mat *sums, bool add, bool *done)
{
    float *apart = resident_of(l)->product.bias;
    *done = false;
    if (sums->dtype != to->dtype) return cudaSuccess;
    if (add && (sums->dtype != TT_F32 || (size_t)sums->cols * 4 > resident_workspace::BIAS_BYTES))
        return cudaSuccess;
    more.bias = add ? apart : sums->data;
    const cudaError_t e = lt_matmul(l, g, to, addend, &more, done);
    if (e != cudaSuccess || !*done || !add) return e;
    return run_finish_sums(l->device, apart, 1, sums->cols, sums, true);
}

// operand_a and operand_b return A and B of a product as matrices with contiguous rows: the matrix itself or
// its transpose.
tt__mat operand_a(const product *g)
{
    return g->sums_rows ? tt__mat{(void *)g->a, g->a_type, g->k, g->m, g->a_col}
                        : tt__mat{(void *)g->a, g->a_type, g->m, g->k, g->a_row};
}
tt__mat operand_b(const product *g)
{
    return g->b_col == 1 ? tt__mat{(void *)g->b, g->b_type, g->k, g->n, g->b_row}
                         : tt__mat{(void *)g->b, g->b_type, g->n, g->k, g->b_col};
}

// Computes g->sums, the column sums of C or the row sums of A, by kernels of our own.
cudaError_t sum_apart(const tt__launch *l, const product *g)
{
    const tt__mat a = operand_a(g);
    return run_column_sums(l, g->sums_rows ? &a : &g->c, &g->sums, g->add_sums);
}

// Returns whether cuBLASLt can make the product fast without copies: the operands are fp8, or tt__cuda_even
// is true of A, B and C.
bool is_even(const product *g)
{
    const tt__mat a = operand_a(g), b = operand_b(g);
    return g->unscale_a || (tt__cuda_even(&a) && tt__cuda_even(&b) && tt__cuda_even(&g->c));
}

// Finishes the f32 sums in `sum`, the matrix A B, by the steps of struct product, and stores them in g.c.
__global__ void __launch_bounds__(256) finish_elements(product g, tt__mat sum)
{
    tt__begin_kernel();
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x, r = i / g.n, c = i % g.n;
    if (r < g.m) finish_element(g, r, c, ((const float *)sum.data)[r * sum.ld + c]);
}

// Makes a product whose operands cuBLASLt cannot read fast (is_even returns false), from padded copies of
// the operands. The copies are at the end of the workspace (tt__cuda_padded_bytes) and have at most
// TT__CUDA_LOSS_CHUNK rows of activations at a time. Sets *done to false where the workspace has no room or
// cuBLASLt has no algorithm.
cudaError_t padded_matmul(const tt__launch *l, const product *g, bool *done)
{
    tt__device *d = l->device;
    const int64_t rows = g->sums_rows ? g->k : g->m, largest = min(rows, (int64_t)TT__CUDA_LOSS_CHUNK);
    const auto up = [](int64_t n) { return (n + 7) / 8 * 8; };
    const int64_t m = g->sums_rows ? up(g->m) : largest, n = up(g->n), k = g->sums_rows ? largest : up(g->k);
    product p = *g;
    p.a_row = g->sums_rows ? 1 : k; p.a_col = g->sums_rows ? m : 1;
    p.b_row = g->b_col == 1 ? n : 1; p.b_col = g->b_col == 1 ? 1 : k;
    const size_t of_a = tt__align_to((size_t)(m * k) * tt_dtype_bytes(g->a_type), TT__CUDA_ALIGN);
    const size_t of_b = tt__align_to((size_t)(n * k) * tt_dtype_bytes(g->b_type), TT__CUDA_ALIGN);
    const size_t of_c = tt__align_to((size_t)(m * n) * sizeof(float), TT__CUDA_ALIGN);
    char *at = (char *)l->workspace + l->instr->workspace;
    *done = false;
    if (g->a_type != g->b_type || !g->k || of_a + of_b + of_c > l->instr->workspace) return cudaSuccess;
    p.c = {at -= of_c, TT_F32, m, n, n};
    p.b = at -= of_b;
    p.a = at -= of_a;
    p.bias = NULL;
    p.act = 0;
    p.accumulate = false;
    p.pre = p.saved = p.residual = p.sums = no_operand;
    cudaError_t e = cudaSuccess;
    for (int64_t r = 0; r < rows && e == cudaSuccess; r += largest) {
        product part = *g; // the product of rows [r, r + some)
        const int64_t some = min(largest, rows - r);
        const tt__mat a = operand_a(g), b = operand_b(g), a_rows = rows_of(&a, r, some);
        const tt__mat b_rows = g->sums_rows ? rows_of(&b, r, some) : b;
        p.m = g->sums_rows ? m : some; p.n = n; p.k = g->sums_rows ? some : k;
        p.c.rows = p.m;
        const tt__mat to_a = operand_a(&p), to_b = operand_b(&p);
        e = run_copy_padded(d, a_rows, to_a);
        if (e == cudaSuccess && (g->sums_rows || r == 0)) e = run_copy_padded(d, b_rows, to_b);
        const lt_epilogue none = {CUBLASLT_EPILOGUE_DEFAULT, NULL, no_operand};
        if (e == cudaSuccess) e = lt_matmul(l, &p, &p.c, g->sums_rows && r > 0 ? &p.c : NULL, &none, done);
        if (e != cudaSuccess || !*done) return e;
        if (g->sums_rows && r + some < rows) continue;
        if (!g->sums_rows) {
            part.m = some;
            for (tt__mat *y : {&part.c, &part.pre, &part.saved, &part.residual}) *y = rows_of(y, r, some);
        }
        e = TT__LAUNCH(finish_elements, blocks_for(part.m * part.n, 256), 256, 0, d->stream, part, p.c);
    }
    return e == cudaSuccess && g->sums.data ? sum_apart(l, g) : e;
}

// A product prepared for matmul_by.
struct matmul_form {
    const product *g;
    tt__mat to;             // destination of the product plus its bias
    const tt__mat *addend, *aux;
    lt_epilogue plain;      // an epilogue that adds the bias, or does nothing
    // fits: cuBLASLt can make the product; gelu: cuBLASLt can also apply GELU or its slope.
    bool fits, gelu;
    // passes: an activation follows the sum and the bias; later: `residual` is added by a kernel afterwards.
    bool passes, later;
};

// Sets *f for the product g. Converts the bias if cuBLASLt needs it in another dtype.
cudaError_t form_of(const tt__launch *l, const product *g, matmul_form *f)
{
    f->g = g;
    f->passes = g->act != 0 || g->saved.data;
    f->to = f->passes && g->pre.data ? g->pre : g->c;
    // cuBLASLt cannot add a 16-bit residual to an f32 result, so a kernel adds the residual afterwards.
    f->later = !f->passes && !g->accumulate && g->residual.data && g->residual.dtype != f->to.dtype &&
        f->to.dtype == TT_F32;
    f->addend = !f->passes && g->accumulate ? &g->c
        : !f->passes && g->residual.data && !f->later ? &g->residual : NULL;
    f->aux = g->saved.data ? &g->saved : &g->pre;
    f->plain = {g->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT, g->bias, no_operand};
    f->fits = is_even(g) && !(g->accumulate && (f->passes || g->residual.data)) &&
        !(f->passes && g->residual.data) && !(f->addend && f->addend->dtype != f->to.dtype);
    const bool fp8 = f->fits && g->unscale_a && g->k > 0;
    // The dtype that a bias needs for cuBLASLt.
    const tt_dtype bias_type = !fp8 || f->to.dtype != TT_F32 ? f->to.dtype : TT_BF16;
    cudaError_t e = cudaSuccess;
    if (f->fits && g->bias && g->bias_type != bias_type) {
        if ((size_t)g->n * tt_dtype_bytes(bias_type) <= resident_workspace::BIAS_BYTES) {
            void *copy = resident_of(l)->product.bias;
            e = TT__LAUNCH(cast_bias, blocks_for(g->n, 256), 256, 0, l->device->stream, copy, bias_type,
                           g->bias, g->bias_type, g->n);
            f->plain.bias = copy;
        } else {
            f->fits = false;
        }
    }
    f->gelu = f->fits && !fp8 && lt_gelu(g, f->aux);
    return e;
}

// Makes a product in one of the ways. Sets *done to false where cuBLASLt cannot; in the way LT_ALONE, a
// kernel of our own then makes the product, except while the product is timed.
cudaError_t matmul_by(const tt__launch *l, const matmul_form &f, int way, bool *done)
{
    tt__device *d = l->device;
    const product *g = f.g;
    cudaError_t e = cudaSuccess;
    *done = false;
    if (way == LT_WITH_SUMS) {
        if (!g->sums.data || !f.fits || g->unscale_a) return cudaSuccess;
        if (g->sums_rows)
            return lt_sums(l, g, &f.to, f.addend, {CUBLASLT_EPILOGUE_BGRADB, NULL, no_operand}, &g->sums,
                           g->add_sums, done);
        if (!f.gelu) return cudaSuccess;
        return lt_sums(l, g, &g->c, NULL, {CUBLASLT_EPILOGUE_DGELU_BGRAD, NULL, *f.aux}, &g->sums,
                       g->add_sums, done);
    }
    if (way == LT_WITH_GELU) {
        if (!f.gelu) return cudaSuccess;
        lt_epilogue more = {CUBLASLT_EPILOGUE_DGELU, f.plain.bias, *f.aux};
        if (!g->saved.data && g->bias)
            more.kind = f.aux->data ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_BIAS;
        else if (!g->saved.data)
            more.kind = f.aux->data ? CUBLASLT_EPILOGUE_GELU_AUX : CUBLASLT_EPILOGUE_GELU;
        e = lt_matmul(l, g, &g->c, NULL, &more, done);
        return e == cudaSuccess && *done && g->sums.data ? sum_apart(l, g) : e;
    }
    if (f.fits) e = lt_matmul(l, g, &f.to, f.addend, &f.plain, done);
    if (e != cudaSuccess || (!*done && d->trial)) return e;
    if (!*done) {
        const int64_t tiles = (g->m + 63) / 64 * ((g->n + 63) / 64);
        *done = true;
        e = g->unscale_a ? TT__LAUNCH((any_matmul<true>), (unsigned)tiles, 256, 0, d->stream, *g)
                         : TT__LAUNCH((any_matmul<false>), (unsigned)tiles, 256, 0, d->stream, *g);
        return e == cudaSuccess && g->sums.data ? sum_apart(l, g) : e;
    }
    if (f.later) return run_groups(d, g->residual, no_operand, f.to, true, false, op_scale{1.0f});
    if (g->saved.data) return run_slope(l, g->act, f.to, g->saved, g->c, false, g->sums, g->add_sums);
    if (g->act) return run_act(d, g->act, f.to, g->c, false);
    return g->sums_rows && g->sums.data ? sum_apart(l, g) : cudaSuccess;
}

// A list of the products that a launch would make.
struct collected_products { product *list; int count, capacity; };

cudaError_t collect(collected_products *to, const product *g)
{
    if (to->count == to->capacity) {
        const int capacity = 2 * to->capacity + 4;
        product *more = (product *)realloc(to->list, (size_t)capacity * sizeof *more);
        if (!more) return cudaErrorMemoryAllocation;
        to->list = more;
        to->capacity = capacity;
    }
    to->list[to->count++] = *g;
    return cudaSuccess;
}

cudaError_t matmul(const tt__launch *l, const product *g)
{
    matmul_form f;
    bool done = false;
    if (g->m <= 0 || g->n <= 0) return cudaSuccess;
    if (l->device->collected) return is_even(g) ? collect(l->device->collected, g) : cudaSuccess;
    cudaError_t e = is_even(g) ? cudaSuccess : padded_matmul(l, g, &done);
    if (e != cudaSuccess || done) return e;
    e = form_of(l, g, &f);
    for (int way = 0; way < LT_WAYS && e == cudaSuccess && !done; way++) e = matmul_by(l, f, way, &done);
    return e;
}

} // namespace
