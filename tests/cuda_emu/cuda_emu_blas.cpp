// cuda_emu_blas.cpp - cuBLAS and cuBLASLt as plain loops: column-major, sums in float, each call one
// operation of its stream.
//
// The emulator checks everything that the libraries demand: sizes of attributes, leading dimensions,
// alignment, workspaces, combinations of types (cuBLAS documentation, cublasLtMatmul() and "Tensor Core
// Usage"). The emulator makes the worst of everything that the libraries leave open: the workspace is garbage
// before, during and after the call. An output that the call does not read is garbage until the call ends.
#include "emu_internal.h"
#include <algorithm>
#include <set>

struct emu_cublas { int device; cudaStream_t stream; void *workspace; size_t workspace_bytes; bool tf32; };
struct emu_cublas_lt { int device; };
struct emu_lt_layout { cudaDataType type; uint64_t rows, cols; int64_t ld; int32_t batch; int64_t stride; };
// alignment: A, B, C and D begin at multiples of these numbers of bytes.
struct emu_lt_preference { uint64_t workspace = 0; uint32_t alignment[4] = {256, 256, 256, 256}; };
struct emu_lt_matmul {
    cublasComputeType_t compute;
    int32_t transpose_a = 0, transpose_b = 0, pointer_mode = 0, bias_type = -1, aux_type = -1, sms = 0;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    int8_t fast_accumulation = 0;
    void *bias = nullptr, *aux = nullptr;
    int64_t aux_ld = 0, aux_stride = 0, bias_stride = 0;
    const float *scale_a = nullptr, *scale_b = nullptr, *scale_c = nullptr, *scale_d = nullptr;
    float *largest_d = nullptr;
};

static std::set<void *> handles; // all live objects, of any type

template <class T> static cublasStatus_t made(T **out, T *object)
{
    handles.insert(object);
    emu_count_object(1);
    *out = object;
    return CUBLAS_STATUS_SUCCESS;
}
template <class T> static cublasStatus_t destroyed(T *object, cudaError_t fault)
{
    if (!handles.erase(object)) return CUBLAS_STATUS_NOT_INITIALIZED;
    emu_count_object(-1);
    delete object;
    return fault ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}
static bool dead(const void *object) { return !handles.count(const_cast<void *>(object)); }

#define EMU_BLAS(name, status) \
    std::lock_guard<std::recursive_mutex> lock(emu_lock); \
    if (emu_enter(name)) return status
#define EMU_BLAS_RELEASE(name) \
    std::lock_guard<std::recursive_mutex> lock(emu_lock); \
    const cudaError_t fault = emu_enter(name)

// ===================================================================================== numbers
static size_t size_of(cudaDataType t)
{
    return t == CUDA_R_32F ? 4 : t == CUDA_R_16F || t == CUDA_R_16BF ? 2 : 1;
}
static bool known(cudaDataType t)
{
    return t == CUDA_R_32F || t == CUDA_R_16F || t == CUDA_R_16BF || t == CUDA_R_8F_E4M3 ||
           t == CUDA_R_8F_E5M2;
}
static bool is_fp8(cudaDataType t) { return t == CUDA_R_8F_E4M3 || t == CUDA_R_8F_E5M2; }

static float load(const void *p, cudaDataType t, int64_t i)
{
    switch (t) {
    case CUDA_R_32F: return ((const float *)p)[i];
    case CUDA_R_16F: return __half2float(((const __half *)p)[i]);
    case CUDA_R_16BF: return __bfloat162float(((const __nv_bfloat16 *)p)[i]);
    case CUDA_R_8F_E4M3: return (float)((const __nv_fp8_e4m3 *)p)[i];
    case CUDA_R_8F_E5M2: return (float)((const __nv_fp8_e5m2 *)p)[i];
    }
    return NAN;
}
static void store(void *p, cudaDataType t, int64_t i, float v)
{
    switch (t) {
    case CUDA_R_32F: ((float *)p)[i] = v; break;
    case CUDA_R_16F: ((__half *)p)[i] = __float2half_rn(v); break;
    case CUDA_R_16BF: ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(v); break;
    case CUDA_R_8F_E4M3: ((__nv_fp8_e4m3 *)p)[i] = __nv_fp8_e4m3(v); break;
    case CUDA_R_8F_E5M2: ((__nv_fp8_e5m2 *)p)[i] = __nv_fp8_e5m2(v); break;
    }
}

// cuBLASLt's GELU is the tanh approximation (documentation of cublasLtEpilogue_t).
static float gelu(float x) { return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
static float gelu_slope(float x)
{
    float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}

// ===================================================================================== one product
struct matrix { const void *p; cudaDataType type; int64_t ld; };
struct product { // `D = epilogue(alpha op(A) op(B) + beta C)`, with D (m, n)
    bool transpose_a, transpose_b, tf32;
    int64_t m, n, k;
    float alpha, beta;
    matrix a, b, c, d;
    uint32_t epilogue;
    void *bias, *aux;
    cudaDataType bias_type, aux_type;
    int64_t aux_ld;
    const float *scale_a, *scale_b, *scale_c, *scale_d;
    float *largest_d;
    uint64_t algorithm; // the algorithm of cuBLASLt; 0: cuBLAS
    bool fast_accumulation; // sums of fp8 are less exact
    bool has(uint32_t bits) const { return epilogue == bits; }
    bool adds_bias() const
    {
        return has(CUBLASLT_EPILOGUE_BIAS) || has(CUBLASLT_EPILOGUE_GELU_BIAS) ||
               has(CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
    }
    bool writes_aux() const
    { return has(CUBLASLT_EPILOGUE_GELU_AUX) || has(CUBLASLT_EPILOGUE_GELU_AUX_BIAS); }
    bool reads_aux() const { return has(CUBLASLT_EPILOGUE_DGELU) || has(CUBLASLT_EPILOGUE_DGELU_BGRAD); }
    bool applies_gelu() const
    { return has(CUBLASLT_EPILOGUE_GELU) || has(CUBLASLT_EPILOGUE_GELU_BIAS) || writes_aux(); }
    int64_t bias_gradient() const // returns the length of the bias gradient; 0: it is absent
    {
        return has(CUBLASLT_EPILOGUE_DGELU_BGRAD) || has(CUBLASLT_EPILOGUE_BGRADA) ? m
               : has(CUBLASLT_EPILOGUE_BGRADB) ? n
               : 0;
    }
};

static void touch_matrix(const matrix &x, int64_t rows, int64_t cols, emu_access access)
{
    for (int64_t j = 0; j < cols; j++)
        emu_touch((const char *)x.p + (size_t)(j * x.ld) * size_of(x.type), (size_t)rows * size_of(x.type),
                  access);
}
static bool leaves_allocation(const matrix &x, int64_t rows, int64_t cols)
{
    return emu_device_of(x.p) < 0 || emu_bad_range(x.p, (size_t)((cols - 1) * x.ld + rows) * size_of(x.type));
}

static void check_ranges(const product &g) // cuBLAS cannot check sizes, so the caller must be right
{
    const char *wrong = nullptr;
    if (leaves_allocation(g.a, g.transpose_a ? g.k : g.m, g.transpose_a ? g.m : g.k)) wrong = "A";
    if (leaves_allocation(g.b, g.transpose_b ? g.n : g.k, g.transpose_b ? g.k : g.n)) wrong = "B";
    if (g.beta != 0 && leaves_allocation(g.c, g.m, g.n)) wrong = "C";
    if (leaves_allocation(g.d, g.m, g.n)) wrong = "D";
    if ((g.writes_aux() || g.reads_aux()) && leaves_allocation({g.aux, g.aux_type, g.aux_ld}, g.m, g.n))
        wrong = "the auxiliary matrix";
    int64_t bias = g.adds_bias() ? g.m : g.bias_gradient();
    if (bias && leaves_allocation({g.bias, g.bias_type, bias}, bias, 1)) wrong = "the bias";
    if (wrong)
        emu_fatal("matrix product (m %ld, n %ld, k %ld): %s is not within one live allocation", (long)g.m,
                  (long)g.n, (long)g.k, wrong);
}

// ------------------------------------------------------------------------------------- sums of fp8 products
// Returns the exponent of x, but at least `smallest`: the exponent of subnormal numbers.
static int exponent_from(double x, int smallest) { return x == 0 ? smallest : std::max(ilogb(x), smallest); }
static int least_exponent(cudaDataType t) { return t == CUDA_R_8F_E5M2 ? -14 : -6; }

// Does one instruction of Hopper's tensor cores, which adds n products of fp8 (at most 32) to `sum`. The
// exponent of a product is the sum of its factors' exponents. All terms are shifted to the largest exponent
// and cut 13 bits after the point, and the new sum is cut there, too (DeepSeek-V3, arXiv 2412.19437, section
// 3.3.2; MMA-Sim, arXiv 2511.10909).
static float add_fp8_products(const float *a, const float *b, int64_t n, float sum, const product &g)
{
    const int bits = 13;
    int exponent = exponent_from(sum, -126);
    for (int64_t l = 0; l < n; l++)
        if (a[l] != 0 && b[l] != 0)
            exponent = std::max(exponent, exponent_from(a[l], least_exponent(g.a.type)) +
                                              exponent_from(b[l], least_exponent(g.b.type)));
    const double unit = ldexp(1, exponent - bits);
    double units = trunc(sum / unit);
    for (int64_t l = 0; l < n; l++) units += trunc((double)a[l] * b[l] / unit); // NaN and infinity are kept
    const double exact = units * unit;
    if (exact == 0 || !std::isfinite(exact)) return (float)exact;
    const double last = ldexp(1, exponent_from(exact, -126) - bits);
    return (float)(trunc(exact / last) * last);
}

// Without fast accumulation, the sums of each FP8_AT_ONCE products are added up in f32.
static float fp8_sum(const float *a, const float *b, const product &g)
{
    enum { INSTRUCTION = 32, FP8_AT_ONCE = 128 };
    float total = 0, sum = 0;
    for (int64_t l = 0; l < g.k; l += INSTRUCTION) {
        if (!g.fast_accumulation && l % FP8_AT_ONCE == 0) {
            total += sum;
            sum = 0;
        }
        sum = add_fp8_products(a + l, b + l, std::min<int64_t>(INSTRUCTION, g.k - l), sum, g);
    }
    return total + sum;
}

static float scale_at(const float *p)
{
    if (!p) return 1;
    emu_touch(p, sizeof *p, EMU_READS);
    return *p;
}

// Returns the sum of k products in the order of an algorithm: 1 and 4, from the first product; 2, from the
// last; 3, in two halves.
static float sum_of(const float *a, const float *b, int64_t k, uint64_t algorithm)
{
    float s = 0, second = 0;
    if (algorithm == 2) {
        for (int64_t l = k - 1; l >= 0; l--) s += a[l] * b[l];
        return s;
    }
    const int64_t half = algorithm == 3 ? k / 2 : k;
    for (int64_t l = 0; l < half; l++) s += a[l] * b[l];
    for (int64_t l = half; l < k; l++) second += a[l] * b[l];
    return half < k ? s + second : s;
}

static void compute(const product &g)
{
    check_ranges(g);
    touch_matrix(g.a, g.transpose_a ? g.k : g.m, g.transpose_a ? g.m : g.k, EMU_READS);
    touch_matrix(g.b, g.transpose_b ? g.n : g.k, g.transpose_b ? g.k : g.n, EMU_READS);
    if (g.beta != 0) touch_matrix(g.c, g.m, g.n, EMU_READS); // beta 0: C is not read, and may be NaN
    matrix aux = {g.aux, g.aux_type, g.aux_ld};
    if (g.reads_aux()) touch_matrix(aux, g.m, g.n, EMU_READS);
    if (g.adds_bias()) emu_touch(g.bias, (size_t)g.m * size_of(g.bias_type), EMU_READS);
    float scale = g.alpha * scale_at(g.scale_a) * scale_at(g.scale_b), scale_c = g.beta * scale_at(g.scale_c),
          scale_d = scale_at(g.scale_d);
    float largest = 0;
    auto input = [&](const matrix &x, int64_t i) {
        float v = load(x.p, x.type, i);
        return g.tf32 && x.type == CUDA_R_32F ? __uint_as_float(tt__tf32(v)) : v;
    };
    // a has the rows of op(A) one after another, b the columns of op(B).
    std::vector<float> a((size_t)(g.m * g.k)), b((size_t)(g.k * g.n)), d((size_t)(g.m * g.n));
    for (int64_t i = 0; i < g.m; i++) {
        for (int64_t l = 0; l < g.k; l++)
            a[(size_t)(i * g.k + l)] = input(g.a, g.transpose_a ? l + i * g.a.ld : i + l * g.a.ld);
    }
    for (int64_t j = 0; j < g.n; j++) {
        for (int64_t l = 0; l < g.k; l++)
            b[(size_t)(j * g.k + l)] = input(g.b, g.transpose_b ? j + l * g.b.ld : l + j * g.b.ld);
    }
    for (int64_t j = 0; j < g.n; j++) {
        for (int64_t i = 0; i < g.m; i++) {
            const float *row = &a[(size_t)(i * g.k)], *column = &b[(size_t)(j * g.k)];
            float s = is_fp8(g.a.type) ? fp8_sum(row, column, g) : sum_of(row, column, g.k, g.algorithm);
            s *= scale;
            if (g.beta != 0) s += scale_c * load(g.c.p, g.c.type, i + j * g.c.ld);
            if (g.adds_bias()) s += load(g.bias, g.bias_type, i);
            if (g.writes_aux()) store(g.aux, g.aux_type, i + j * g.aux_ld, s);
            if (g.applies_gelu()) s = gelu(s);
            if (g.reads_aux()) s *= gelu_slope(load(g.aux, g.aux_type, i + j * g.aux_ld));
            d[(size_t)(i + j * g.m)] = s;
            largest = fmaxf(largest, fabsf(s));
        }
    }
    if (g.writes_aux()) touch_matrix(aux, g.m, g.n, EMU_WRITES);
    touch_matrix(g.d, g.m, g.n, EMU_WRITES);
    for (int64_t j = 0; j < g.n; j++) {
        for (int64_t i = 0; i < g.m; i++)
            store(const_cast<void *>(g.d.p), g.d.type, i + j * g.d.ld, scale_d * d[(size_t)(i + j * g.m)]);
    }
    if (g.largest_d) {
        emu_touch(g.largest_d, sizeof(float), EMU_WRITES);
        *g.largest_d = largest;
    }
    int64_t n = g.bias_gradient();
    if (!n) return;
    emu_touch(g.bias, (size_t)n * size_of(g.bias_type), EMU_WRITES);
    for (int64_t i = 0; i < n; i++) {
        float s = 0;
        if (g.has(CUBLASLT_EPILOGUE_DGELU_BGRAD))
            for (int64_t j = 0; j < g.n; j++) s += d[(size_t)(i + j * g.m)];
        if (g.has(CUBLASLT_EPILOGUE_BGRADA)) for (int64_t l = 0; l < g.k; l++) s += a[(size_t)(i * g.k + l)];
        if (g.has(CUBLASLT_EPILOGUE_BGRADB)) for (int64_t l = 0; l < g.k; l++) s += b[(size_t)(i * g.k + l)];
        store(g.bias, g.bias_type, i, s);
    }
}

// In the first half of the work, fills the output with garbage if the product does not read it.
static void spoil_output(const product &g)
{
    check_ranges(g);
    if (g.beta != 0) return;
    for (int64_t j = 0; j < g.n; j++) {
        char *column = (char *)const_cast<void *>(g.d.p) + (size_t)(j * g.d.ld) * size_of(g.d.type);
        emu_touch(column, (size_t)g.m * size_of(g.d.type), EMU_WRITES);
        memset(column, 0xff, (size_t)g.m * size_of(g.d.type));
    }
}

static cublasStatus_t submit(cudaStream_t s, const char *name, std::vector<product> products, void *workspace,
                             size_t workspace_bytes)
{
    for (auto &g : products) {
        if (g.m < 0 || g.n < 0 || g.k <= 0 || g.a.ld < std::max<int64_t>(1, g.transpose_a ? g.k : g.m) ||
            g.c.ld < std::max<int64_t>(1, g.m) || g.b.ld < std::max<int64_t>(1, g.transpose_b ? g.n : g.k) ||
            g.d.ld < std::max<int64_t>(1, g.m)) {
            return CUBLAS_STATUS_INVALID_VALUE;
        }
    }
    if (products.empty() || !products[0].m || !products[0].n) return CUBLAS_STATUS_SUCCESS;
    bool outside = emu_device_of(workspace) < 0 || emu_bad_range(workspace, workspace_bytes);
    if (workspace_bytes && outside) emu_fatal("%s: the workspace is not device memory of that size", name);
    emu_work work;
    work.kind = EMU_GEMM;
    work.name = name;
    work.devices = 1u << emu_stream_device(s);
    work.least_parts = work.most_parts = 2;
    work.body = [=](int part, int parts) {
        const unsigned char mine = (unsigned char)(emu_current_op->number * 37 + 11);
        if (workspace_bytes) emu_touch(workspace, workspace_bytes, EMU_WRITES);
        if (part == 0) {
            if (workspace_bytes) memset(workspace, mine, workspace_bytes);
            if (parts > 1) for (auto &g : products) spoil_output(g);
        }
        if (part < parts - 1) return;
        for (size_t i = 0; i < workspace_bytes; i++) {
            if (((unsigned char *)workspace)[i] != mine)
                emu_fatal(
                    "the workspace of this matrix product changed while it ran: do two streams share it?");
        }
        for (auto &g : products) compute(g);
    };
    if (products[0].algorithm) {
        const product &g = products[0];
        const bool plain = g.has(CUBLASLT_EPILOGUE_DEFAULT) || g.has(CUBLASLT_EPILOGUE_BIAS);
        work.us = emu_product_us[g.algorithm - 1] + (plain ? 0 : emu_epilogue_us);
        emu_stats.by_algorithm[products[0].algorithm]++;
    }
    emu_stats.gemms++;
    emu_stats.gelus += products[0].applies_gelu();
    emu_stats.gelu_slopes += products[0].reads_aux();
    emu_stats.bias_gradients += products[0].bias_gradient() > 0;
    emu_stats.tf32 += products[0].tf32;
    emu_stats.fp8 += is_fp8(products[0].a.type);
    return emu_enqueue(s, std::move(work)) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

// ===================================================================================== cuBLAS
#define EMU_STATUS_NAME(s) case s: return #s;
const char *cublasGetStatusName(cublasStatus_t s)
{
    switch (s) {
        EMU_STATUS_NAME(CUBLAS_STATUS_SUCCESS)
        EMU_STATUS_NAME(CUBLAS_STATUS_NOT_INITIALIZED)
        EMU_STATUS_NAME(CUBLAS_STATUS_ALLOC_FAILED)
        EMU_STATUS_NAME(CUBLAS_STATUS_INVALID_VALUE)
        EMU_STATUS_NAME(CUBLAS_STATUS_ARCH_MISMATCH)
        EMU_STATUS_NAME(CUBLAS_STATUS_EXECUTION_FAILED)
        EMU_STATUS_NAME(CUBLAS_STATUS_INTERNAL_ERROR)
        EMU_STATUS_NAME(CUBLAS_STATUS_NOT_SUPPORTED)
    }
    return "unknown cuBLAS status";
}
const char *cublasGetStatusString(cublasStatus_t s) { return cublasGetStatusName(s); }

cublasStatus_t cublasCreate(cublasHandle_t *h)
{
    EMU_BLAS("cublasCreate", CUBLAS_STATUS_ALLOC_FAILED);
    return made(h, new emu_cublas{emu_current_device(), nullptr, nullptr, 0, false});
}
cublasStatus_t cublasDestroy(cublasHandle_t h)
{
    EMU_BLAS_RELEASE("cublasDestroy");
    return destroyed(h, fault);
}
cublasStatus_t cublasGetVersion(cublasHandle_t, int *version)
{
    *version = 130000;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t s)
{
    EMU_BLAS("cublasSetStream", CUBLAS_STATUS_EXECUTION_FAILED);
    if (dead(h)) return CUBLAS_STATUS_NOT_INITIALIZED;
    h->stream = s;
    h->workspace = nullptr; // cuBLAS uses its own workspace again
    h->workspace_bytes = 0;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace(cublasHandle_t h, void *workspace, size_t n)
{
    EMU_BLAS("cublasSetWorkspace", CUBLAS_STATUS_EXECUTION_FAILED);
    if (dead(h)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if ((uintptr_t)workspace % 256) return CUBLAS_STATUS_INVALID_VALUE;
    h->workspace = workspace;
    h->workspace_bytes = n;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t m)
{
    EMU_BLAS("cublasSetMathMode", CUBLAS_STATUS_EXECUTION_FAILED);
    if (dead(h)) return CUBLAS_STATUS_NOT_INITIALIZED;
    h->tf32 = m == CUBLAS_TF32_TENSOR_OP_MATH;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode(cublasHandle_t h, cublasPointerMode_t m)
{
    EMU_BLAS("cublasSetPointerMode", CUBLAS_STATUS_EXECUTION_FAILED);
    if (dead(h)) return CUBLAS_STATUS_NOT_INITIALIZED;
    // Only alpha and beta on the host are supported.
    return m == CUBLAS_POINTER_MODE_HOST ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                                          int n, int k, const void *alpha, const void *a, cudaDataType a_type,
                                          int lda, long long stride_a, const void *b, cudaDataType b_type,
                                          int ldb, long long stride_b, const void *beta, void *c,
                                          cudaDataType c_type, int ldc, long long stride_c, int batch,
                                          cublasComputeType_t compute_type, cublasGemmAlgo_t)
{
    EMU_BLAS("cublasGemmStridedBatchedEx", CUBLAS_STATUS_EXECUTION_FAILED);
    if (dead(h)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (batch < 0 || !alpha || !beta || emu_stream_device(h->stream) < 0) return CUBLAS_STATUS_INVALID_VALUE;
    // A handle works only on its device.
    if (emu_current_device() != h->device || emu_stream_device(h->stream) != h->device)
        return CUBLAS_STATUS_EXECUTION_FAILED;
    if (a_type != b_type || is_fp8(a_type) || is_fp8(c_type) || !known(a_type) || !known(c_type))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (c_type != a_type && c_type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    bool tf32 = (h->tf32 && compute_type == CUBLAS_COMPUTE_32F) ||
                compute_type == CUBLAS_COMPUTE_32F_FAST_TF32;
    std::vector<product> products;
    for (int i = 0; i < batch; i++) {
        product g = product();
        char *out = (char *)c + (long long)size_of(c_type) * stride_c * i;
        g.transpose_a = ta == CUBLAS_OP_T;
        g.transpose_b = tb == CUBLAS_OP_T;
        g.tf32 = tf32;
        g.m = m;
        g.n = n;
        g.k = k;
        g.alpha = *(const float *)alpha;
        g.beta = *(const float *)beta;
        g.a = {(const char *)a + (long long)size_of(a_type) * stride_a * i, a_type, lda};
        g.b = {(const char *)b + (long long)size_of(b_type) * stride_b * i, b_type, ldb};
        g.c = g.d = {out, c_type, ldc};
        g.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
        products.push_back(g);
    }
    return submit(h->stream, "cublasGemm", products, h->workspace, h->workspace_bytes);
}
cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType a_type, int lda, const void *b,
                            cudaDataType b_type, int ldb, const void *beta, void *c, cudaDataType c_type,
                            int ldc, cublasComputeType_t compute_type, cublasGemmAlgo_t algo)
{
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta,
                                      c, c_type, ldc, 0, 1, compute_type, algo);
}

// ===================================================================================== cuBLASLt: descriptors
size_t cublasLtGetVersion() { return 130000; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t *h)
{
    EMU_BLAS("cublasLtCreate", CUBLAS_STATUS_ALLOC_FAILED);
    return made(h, new emu_cublas_lt{emu_current_device()});
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h)
{
    EMU_BLAS_RELEASE("cublasLtDestroy");
    return destroyed(h, fault);
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute_type,
                                        cudaDataType scale)
{
    EMU_BLAS("cublasLtMatmulDescCreate", CUBLAS_STATUS_ALLOC_FAILED);
    if (scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    emu_lt_matmul *desc = new emu_lt_matmul();
    desc->compute = compute_type;
    return made(d, desc);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d)
{
    EMU_BLAS_RELEASE("cublasLtMatmulDescDestroy");
    return destroyed(d, fault);
}
// Sets an attribute. A value of the wrong size is refused.
template <class T> static cublasStatus_t set(T &to, const void *value, size_t n)
{
    if (!value || n != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy((void *)&to, value, n);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a,
                                              const void *value, size_t n)
{
    EMU_BLAS("cublasLtMatmulDescSetAttribute", CUBLAS_STATUS_INVALID_VALUE);
    if (dead(d)) return CUBLAS_STATUS_INVALID_VALUE;
    switch (a) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: return set(d->compute, value, n);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE: return set(d->pointer_mode, value, n);
    case CUBLASLT_MATMUL_DESC_TRANSA: return set(d->transpose_a, value, n);
    case CUBLASLT_MATMUL_DESC_TRANSB: return set(d->transpose_b, value, n);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return set(d->epilogue, value, n);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return set(d->bias, value, n);
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: return set(d->bias_stride, value, n);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return set(d->bias_type, value, n);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return set(d->aux, value, n);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return set(d->aux_ld, value, n);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: return set(d->aux_stride, value, n);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return set(d->aux_type, value, n);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET: return set(d->sms, value, n);
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM: return set(d->fast_accumulation, value, n);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return set(d->scale_a, value, n);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return set(d->scale_b, value, n);
    case CUBLASLT_MATMUL_DESC_C_SCALE_POINTER: return set(d->scale_c, value, n);
    case CUBLASLT_MATMUL_DESC_D_SCALE_POINTER: return set(d->scale_d, value, n);
    case CUBLASLT_MATMUL_DESC_AMAX_D_POINTER: return set(d->largest_d, value, n);
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld)
{
    EMU_BLAS("cublasLtMatrixLayoutCreate", CUBLAS_STATUS_ALLOC_FAILED);
    if (!known(type)) return CUBLAS_STATUS_INVALID_VALUE;
    return made(l, new emu_lt_layout{type, rows, cols, ld, 1, 0});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l)
{
    EMU_BLAS_RELEASE("cublasLtMatrixLayoutDestroy");
    return destroyed(l, fault);
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a,
                                                const void *value, size_t n)
{
    EMU_BLAS("cublasLtMatrixLayoutSetAttribute", CUBLAS_STATUS_INVALID_VALUE);
    int32_t order = 0;
    if (dead(l)) return CUBLAS_STATUS_INVALID_VALUE;
    switch (a) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE: return set(l->type, value, n);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
        return set(order, value, n) || order != 0 ? CUBLAS_STATUS_NOT_SUPPORTED
                                                  : CUBLAS_STATUS_SUCCESS; // column-major
    case CUBLASLT_MATRIX_LAYOUT_ROWS: return set(l->rows, value, n);
    case CUBLASLT_MATRIX_LAYOUT_COLS: return set(l->cols, value, n);
    case CUBLASLT_MATRIX_LAYOUT_LD: return set(l->ld, value, n);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return set(l->batch, value, n);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return set(l->stride, value, n);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    EMU_BLAS("cublasLtMatmulPreferenceCreate", CUBLAS_STATUS_ALLOC_FAILED);
    return made(p, new emu_lt_preference());
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p)
{
    EMU_BLAS_RELEASE("cublasLtMatmulPreferenceDestroy");
    return destroyed(p, fault);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t a, const void *value,
                                                    size_t n)
{
    EMU_BLAS("cublasLtMatmulPreferenceSetAttribute", CUBLAS_STATUS_INVALID_VALUE);
    if (dead(p)) return CUBLAS_STATUS_INVALID_VALUE;
    if (a == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) return set(p->workspace, value, n);
    return set(p->alignment[a - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, n);
}

// ===================================================================================== cuBLASLt: matmul
// The content of cublasLtMatmulAlgo_t::data. alignment 0: the alignment of an element.
struct algorithm { uint64_t id, workspace, alignment; };
static const algorithm algorithms[] = {{1, 256 << 10, 16}, {2, 4 << 10, 16}, {3, 0, 16}, {4, 0, 0}};

static size_t alignment_of(uint64_t bytes) { return bytes ? (size_t)(bytes & (~bytes + 1)) : 256; }
// Returns the alignment of a matrix's columns and of a batch's matrices, if the first matrix is aligned
// enough.
static size_t alignment_of(const emu_lt_layout &l)
{
    size_t a = alignment_of((uint64_t)l.ld * size_of(l.type));
    return l.batch > 1 ? std::min(a, alignment_of((uint64_t)l.stride * size_of(l.type))) : a;
}

static bool epilogue_known(uint32_t e)
{
    static const uint32_t all[] = {CUBLASLT_EPILOGUE_DEFAULT,  CUBLASLT_EPILOGUE_BIAS,
                                   CUBLASLT_EPILOGUE_GELU,     CUBLASLT_EPILOGUE_GELU_BIAS,
                                   CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                                   CUBLASLT_EPILOGUE_DGELU,    CUBLASLT_EPILOGUE_DGELU_BGRAD,
                                   CUBLASLT_EPILOGUE_BGRADA,   CUBLASLT_EPILOGUE_BGRADB};
    return std::find(std::begin(all), std::end(all), e) != std::end(all);
}

static cudaDataType bias_type_of(const emu_lt_matmul &d, cudaDataType of_a, cudaDataType of_out)
{
    if (d.bias_type >= 0) return (cudaDataType)d.bias_type;
    return is_fp8(of_out) || (is_fp8(of_a) && of_out == CUDA_R_32F) ? CUDA_R_16BF : of_out;
}
static bool has_bias(uint32_t epilogue)
{
    product g = product();
    g.epilogue = epilogue;
    return g.adds_bias() || epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD || epilogue >= CUBLASLT_EPILOGUE_BGRADA;
}

// Checks the conditions of every algorithm: shapes, types, operands of the epilogue.
static cublasStatus_t supported(const emu_lt_matmul &d, const emu_lt_layout &a, const emu_lt_layout &b,
                                const emu_lt_layout &c, const emu_lt_layout &out)
{
    uint64_t m = d.transpose_a ? a.cols : a.rows, k = d.transpose_a ? a.rows : a.cols;
    uint64_t n = d.transpose_b ? b.rows : b.cols, also_k = d.transpose_b ? b.cols : b.rows;
    bool shapes = k == also_k && m == out.rows && n == out.cols && c.rows == out.rows && c.cols == out.cols &&
                  m && n && k;
    bool batches = out.batch >= 1 && a.batch == out.batch && b.batch == out.batch && c.batch == out.batch;
    bool lds = a.ld >= (int64_t)a.rows && b.ld >= (int64_t)b.rows && c.ld >= (int64_t)c.rows &&
               out.ld >= (int64_t)out.rows;
    if (!shapes || !batches || !lds || d.pointer_mode != 0 || !epilogue_known(d.epilogue))
        return CUBLAS_STATUS_INVALID_VALUE;
    bool computes = d.compute == CUBLAS_COMPUTE_32F || d.compute == CUBLAS_COMPUTE_32F_FAST_TF32 ||
                    d.compute == CUBLAS_COMPUTE_32F_PEDANTIC;
    if (!computes) return CUBLAS_STATUS_NOT_SUPPORTED;
    product g = product();
    g.epilogue = d.epilogue;
    cudaDataType bias_type = bias_type_of(d, a.type, out.type);
    bool aux = g.writes_aux() || g.reads_aux();
    bool bias = has_bias(d.epilogue);
    // BGRADA and BGRADB sum A or B over k. An H200 with cuBLASLt 13.1 refuses the operand to sum if k is the
    // operand's contiguous dimension in memory.
    if ((d.epilogue == CUBLASLT_EPILOGUE_BGRADA && d.transpose_a) ||
        (d.epilogue == CUBLASLT_EPILOGUE_BGRADB && !d.transpose_b))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (is_fp8(a.type) || is_fp8(b.type)) { // see cublasLtMatmul(), "To use FP8 kernels"
        if (!is_fp8(a.type) || !is_fp8(b.type) || (a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2))
            return CUBLAS_STATUS_NOT_SUPPORTED;
        if (!d.transpose_a || d.transpose_b || d.compute != CUBLAS_COMPUTE_32F)
            return CUBLAS_STATUS_NOT_SUPPORTED;
        if (k % 16 || out.rows * size_of(out.type) % 16) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (is_fp8(c.type) || (!is_fp8(out.type) && c.type != out.type))
            return CUBLAS_STATUS_NOT_SUPPORTED;
        if (d.epilogue == CUBLASLT_EPILOGUE_BGRADA || d.epilogue == CUBLASLT_EPILOGUE_BGRADB)
            return CUBLAS_STATUS_NOT_SUPPORTED;
        if (bias && bias_type == CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    } else {
        if (a.type != b.type || c.type != out.type || is_fp8(out.type)) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (out.type != a.type && out.type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (d.scale_a || d.scale_b || d.scale_c || d.scale_d || d.largest_d)
            return CUBLAS_STATUS_NOT_SUPPORTED;
        if (bias && bias_type != out.type && bias_type != a.type) return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (!is_fp8(out.type) && (d.scale_d || d.largest_d)) return CUBLAS_STATUS_NOT_SUPPORTED;
    bool aux_fits = d.aux && (uintptr_t)d.aux % 16 == 0 && d.aux_ld % 8 == 0 &&
                    d.aux_ld >= (int64_t)out.rows && d.aux_stride % 8 == 0;
    if (aux && !aux_fits) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (bias && (!d.bias || (uintptr_t)d.bias % size_of(bias_type))) return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

static size_t least_alignment(const algorithm &x, const emu_lt_layout &l)
{
    return x.alignment ? (size_t)x.alignment : size_of(l.type);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
                                              cublasLtMatmulPreference_t p, int wanted,
                                              cublasLtMatmulHeuristicResult_t *results, int *found)
{
    EMU_BLAS("cublasLtMatmulAlgoGetHeuristic", CUBLAS_STATUS_INTERNAL_ERROR);
    emu_stats.heuristics++;
    *found = 0;
    if (dead(h)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (dead(d) || dead(a) || dead(b) || dead(c) || dead(out) || dead(p) || wanted < 1)
        return CUBLAS_STATUS_INVALID_VALUE;
    cublasStatus_t status = supported(*d, *a, *b, *c, *out);
    if (status) return status;
    const emu_lt_layout *layouts[4] = {a, b, c, out};
    for (auto &x : algorithms) {
        bool fits = x.workspace <= p->workspace && *found < wanted && !(is_fp8(a->type) && !x.alignment);
        for (int i = 0; i < 4; i++)
            fits = fits && least_alignment(x, *layouts[i]) <=
                               std::min<size_t>(alignment_of(*layouts[i]), p->alignment[i]);
        if (!fits) continue;
        cublasLtMatmulHeuristicResult_t &r = results[(*found)++];
        r = cublasLtMatmulHeuristicResult_t();
        memcpy(r.algo.data, &x, sizeof x);
        r.workspaceSize = (size_t)x.workspace;
        r.wavesCount = (float)x.id;
    }
    return *found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

// Checks that an algorithm exists and can do the product. The call has no pointers, so only the layouts limit
// the alignments.
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                       cublasLtMatrixLayout_t out, const cublasLtMatmulAlgo_t *algo,
                                       cublasLtMatmulHeuristicResult_t *result)
{
    EMU_BLAS("cublasLtMatmulAlgoCheck", CUBLAS_STATUS_INTERNAL_ERROR);
    if (dead(h)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (dead(d) || dead(a) || dead(b) || dead(c) || dead(out) || !algo || !result)
        return CUBLAS_STATUS_INVALID_VALUE;
    cublasStatus_t status = supported(*d, *a, *b, *c, *out);
    if (status) return status;
    for (auto &x : algorithms) {
        if (memcmp(&x, algo->data, sizeof x) != 0) continue;
        for (auto l : {a, b, c, out})
            if (alignment_of(*l) < least_alignment(x, *l)) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (is_fp8(a->type) && !x.alignment) return CUBLAS_STATUS_NOT_SUPPORTED;
        *result = cublasLtMatmulHeuristicResult_t();
        result->algo = *algo;
        result->workspaceSize = (size_t)x.workspace;
        return CUBLAS_STATUS_SUCCESS;
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                              const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *out,
                              cublasLtMatrixLayout_t out_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t workspace_bytes, cudaStream_t s)
{
    EMU_BLAS("cublasLtMatmul", CUBLAS_STATUS_EXECUTION_FAILED);
    if (dead(h)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (dead(d) || dead(a_layout) || dead(b_layout) || dead(c_layout) || dead(out_layout))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!alpha || !beta || !a || !b || !c || !out) return CUBLAS_STATUS_INVALID_VALUE;
    if (emu_current_device() != h->device) return CUBLAS_STATUS_INVALID_VALUE;
    if (emu_stream_device(s) != h->device) return CUBLAS_STATUS_EXECUTION_FAILED;
    cublasStatus_t status = supported(*d, *a_layout, *b_layout, *c_layout, *out_layout);
    if (status) return status;
    // The heuristic does not check the following conditions, on an H200 with cuBLASLt 13.1 either.
    if (d->bias && !has_bias(d->epilogue)) return CUBLAS_STATUS_INVALID_VALUE;
    for (const float *scale : {d->scale_a, d->scale_b, d->scale_c, d->scale_d})
        if ((uintptr_t)scale % 16) return CUBLAS_STATUS_NOT_SUPPORTED;
    const emu_lt_layout *layouts[4] = {a_layout, b_layout, c_layout, out_layout};
    const void *pointers[4] = {a, b, c, out};
    algorithm chosen = {0, 0, 0};
    for (auto &x : algorithms) { // the requested algorithm, or the first that fits
        bool fits = x.workspace <= workspace_bytes && (uintptr_t)workspace % 16 == 0 &&
                    !(is_fp8(a_layout->type) && !x.alignment);
        for (int i = 0; i < 4; i++) {
            size_t smallest = least_alignment(x, *layouts[i]);
            fits = fits && (uintptr_t)pointers[i] % smallest == 0 && alignment_of(*layouts[i]) >= smallest;
        }
        if (algo ? algo->data[0] == x.id : fits) {
            if (!fits)
                return x.workspace > workspace_bytes ? CUBLAS_STATUS_INVALID_VALUE
                                                     : CUBLAS_STATUS_NOT_SUPPORTED;
            chosen = x;
            break;
        }
    }
    if (emu_refused >> chosen.id & 1) return (cublasStatus_t)emu_refused_status;
    if (!chosen.id) return algo ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_NOT_SUPPORTED;
    std::vector<product> products;
    // Matrices are column-major, so `rows` is the size along memory.
    for (const emu_lt_layout *of : {a_layout, b_layout, out_layout}) {
        if (of->rows % 8 == 0 && of->ld % 8 == 0) continue;
        emu_stats.uneven_gemms++;
        break;
    }
    for (int i = 0; i < out_layout->batch; i++) {
        auto at = [&](const void *p, const emu_lt_layout &l) {
            return matrix{(const char *)p + (int64_t)size_of(l.type) * l.stride * i, l.type, l.ld};
        };
        product g = product();
        g.algorithm = chosen.id;
        g.transpose_a = d->transpose_a != 0;
        g.transpose_b = d->transpose_b != 0;
        g.tf32 = d->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
        g.m = (int64_t)out_layout->rows;
        g.n = (int64_t)out_layout->cols;
        g.k = (int64_t)(d->transpose_a ? a_layout->rows : a_layout->cols);
        g.alpha = *(const float *)alpha;
        g.beta = *(const float *)beta;
        g.a = at(a, *a_layout);
        g.b = at(b, *b_layout);
        g.c = at(c, *c_layout);
        g.d = at(out, *out_layout);
        g.epilogue = d->epilogue;
        g.bias_type = bias_type_of(*d, a_layout->type, out_layout->type);
        g.aux_type = d->aux_type < 0 ? (is_fp8(out_layout->type) ? CUDA_R_16BF : out_layout->type)
                                     : (cudaDataType)d->aux_type;
        g.bias = (char *)d->bias + (int64_t)size_of(g.bias_type) * d->bias_stride * i;
        g.aux = (char *)d->aux + (int64_t)size_of(g.aux_type) * d->aux_stride * i;
        g.aux_ld = d->aux_ld;
        g.scale_a = d->scale_a;
        g.scale_b = d->scale_b;
        g.scale_c = d->scale_c;
        g.scale_d = d->scale_d;
        g.largest_d = d->largest_d;
        g.fast_accumulation = d->fast_accumulation != 0;
        products.push_back(g);
    }
    return submit(s, "cublasLtMatmul", products, workspace, (size_t)chosen.workspace);
}
