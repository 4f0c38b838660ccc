// gpu.cu - measures a GPU for the benchmarks: the sustained rate of cuBLASLt's products of large matrices,
// the sustained rate of copies within the GPU's memory, and the memory in use. The matrices have no zeros,
// because zeros are multiplied faster. The GPU is the first one, which tinytrain uses, too. A function that
// measures a rate returns the rate, or returns 0 and writes the reason to `error`.
#include <cuda_runtime.h>
#include <cublasLt.h>
#include <stdio.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <vector>

enum { ERROR_BYTES = 256, CANDIDATES = 8 };
static const size_t WORKSPACE = (size_t)32 << 20;

static double seconds_now()
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static bool failed(cudaError_t e, const char *what, char *error)
{
    if (e == cudaSuccess) return false;
    cudaGetLastError();
    snprintf(error, ERROR_BYTES, "%s: %s", what, cudaGetErrorString(e));
    return true;
}

// Returns the mean seconds of f(), which starts work on stream 0, over at least `seconds` after a warm-up of
// seconds / 4. Returns 0 if f() fails.
template <class F> static double sustained(double seconds, F f)
{
    long runs = 1;
    double all = 0, done = 0;
    for (const double began = seconds_now();;) {
        const double begin = seconds_now();
        for (long k = 0; k < runs; k++) if (!f()) return 0;
        if (cudaStreamSynchronize(0) != cudaSuccess) return 0;
        const double used = seconds_now() - begin;
        if (begin - began >= seconds / 4) { all += used; done += (double)runs; }
        if (done > 0 && all >= seconds) return all / done;
        if (used < 0.05 * seconds) runs *= 2; // until the time to start and wait is negligible
    }
}

// Fills device memory with numbers of magnitude 1/16 to 1 and of either sign, of a type with `mantissa` bits
// of mantissa.
static cudaError_t fill(void *memory, size_t bytes, int element, int mantissa)
{
    std::vector<uint32_t> pattern(((size_t)1 << 18) + 1); // an odd length, so that rows of a matrix differ
    // `one` is the exponent field of the number 1.
    const uint32_t half = element == 2 ? 0xffff : 0xffffffffu, one = mantissa == 10 ? 15 : 127;
    uint64_t random = 1;
    for (uint32_t &word : pattern) {
        word = 0;
        for (int k = 0; k < 4 / element; k++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            const uint32_t r = (uint32_t)(random >> 32), sign = r >> 31, exponent = one - 1 - (r >> 29 & 3),
                           rest = (uint32_t)(random >> 16) & ((1u << mantissa) - 1);
            word |= (half & (sign << (8 * element - 1) | exponent << mantissa | rest)) << (16 * k);
        }
    }
    cudaError_t e = cudaSuccess;
    for (size_t done = 0; done < bytes && e == cudaSuccess; done += pattern.size() * 4) {
        const size_t piece = bytes - done < pattern.size() * 4 ? bytes - done : pattern.size() * 4;
        e = cudaMemcpy((char *)memory + done, pattern.data(), piece, cudaMemcpyHostToDevice);
    }
    return e;
}

extern "C" size_t bench_gpu_used(void) // returns the bytes in use by all processes
{
    size_t available = 0, total = 0;
    if (cudaSetDevice(0) != cudaSuccess || cudaMemGetInfo(&available, &total) != cudaSuccess) return 0;
    return total - available;
}

// bench_gpu_event returns an event that notes the time, for tt__backend.mark. bench_gpu_between waits for the
// second event and returns the seconds between the two; less than 0 after an error.
extern "C" void *bench_gpu_event(void)
{
    cudaEvent_t e = NULL;
    return cudaSetDevice(0) == cudaSuccess && cudaEventCreate(&e) == cudaSuccess ? (void *)e : NULL;
}
extern "C" double bench_gpu_between(void *from, void *to)
{
    float ms = 0;
    if (cudaEventSynchronize((cudaEvent_t)to) != cudaSuccess) return -1;
    return cudaEventElapsedTime(&ms, (cudaEvent_t)from, (cudaEvent_t)to) == cudaSuccess ? 1e-3 * ms : -1;
}

// Returns the bytes per second, counting each byte read and each byte written.
extern "C" double bench_gpu_copy(size_t bytes, double seconds, char *error)
{
    char *memory = NULL;
    double each = 0;
    if (failed(cudaSetDevice(0), "cudaSetDevice", error) ||
        failed(cudaMalloc((void **)&memory, 2 * bytes), "memory to copy", error))
        return 0;
    cudaError_t e = fill(memory, bytes, 4, 23);
    if (e == cudaSuccess)
        each = sustained(seconds, [&] {
            e = cudaMemcpyAsync(memory + bytes, memory, bytes, cudaMemcpyDeviceToDevice, 0);
            return e == cudaSuccess;
        });
    failed(e == cudaSuccess && each == 0 ? cudaGetLastError() : e, "a copy", error);
    cudaFree(memory);
    return each > 0 ? 2 * (double)bytes / each : 0;
}

// Returns the FLOP/s of products of n x n matrices with sums in fp32. type: "fp32", "tf32" (fp32 in memory),
// "fp16" or "bf16".
extern "C" double bench_gpu_product(const char *type, int n, double seconds, char *error)
{
    const bool bf16 = strcmp(type, "bf16") == 0, fp16 = strcmp(type, "fp16") == 0;
    const cudaDataType dtype = bf16 ? CUDA_R_16BF : fp16 ? CUDA_R_16F : CUDA_R_32F;
    const cublasComputeType_t compute = strcmp(type, "tf32") == 0 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                  : CUBLAS_COMPUTE_32F;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const int element = bf16 || fp16 ? 2 : 4;
    const size_t matrix = (size_t)n * (size_t)n * (size_t)element;
    const float one = 1, zero = 0;
    cublasLtHandle_t lt = NULL;
    cublasLtMatmulDesc_t desc = NULL;
    cublasLtMatrixLayout_t layout = NULL;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    char *memory = NULL; // holds a, b, their product and the workspace
    int count = 0;
    double best = 0;

    if (failed(cudaSetDevice(0), "cudaSetDevice", error) ||
        failed(cudaMalloc((void **)&memory, 3 * matrix + WORKSPACE), "memory of a product", error))
        return 0;
    cudaError_t e = fill(memory, 2 * matrix, element, bf16 ? 7 : fp16 ? 10 : 23);
    cublasStatus_t s = cublasLtCreate(&lt);
    if (s == CUBLAS_STATUS_SUCCESS) s = cublasLtMatmulDescCreate(&desc, compute, CUDA_R_32F);
    // a is transposed, as in a linear layer.
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatrixLayoutCreate(&layout, dtype, (uint64_t)n, (uint64_t)n, n);
    if (s == CUBLAS_STATUS_SUCCESS) s = cublasLtMatmulPreferenceCreate(&preference);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                 &WORKSPACE, sizeof WORKSPACE);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulAlgoGetHeuristic(lt, desc, layout, layout, layout, layout, preference, CANDIDATES,
                                           found, &count);
    // Round 0 times each algorithm for `seconds / 20`. Round 1 times the fastest algorithm for `seconds`.
    for (int round = 0, fastest = 0; round < 2 && s == CUBLAS_STATUS_SUCCESS && e == cudaSuccess; round++) {
        double smallest = 0;
        for (int k = round ? fastest : 0; k < (round ? fastest + 1 : count); k++) {
            const double each = sustained(round ? seconds : seconds / 20, [&] {
                return cublasLtMatmul(lt, desc, &one, memory, layout, memory + matrix, layout, &zero,
                                      memory + 2 * matrix, layout, memory + 2 * matrix, layout,
                                      &found[k].algo, memory + 3 * matrix, WORKSPACE,
                                      0) == CUBLAS_STATUS_SUCCESS;
            });
            if (each > 0 && (smallest == 0 || each < smallest)) { smallest = each; fastest = k; }
        }
        best = smallest;
    }
    if (best == 0 && !failed(e == cudaSuccess ? cudaGetLastError() : e, "a product", error))
        snprintf(error, ERROR_BYTES, "cuBLASLt's products of %s, %d x %d: status %d, %d ways to do them",
                 type, n, n, (int)s, count);
    if (preference) cublasLtMatmulPreferenceDestroy(preference);
    if (layout) cublasLtMatrixLayoutDestroy(layout);
    if (desc) cublasLtMatmulDescDestroy(desc);
    if (lt) cublasLtDestroy(lt);
    cudaFree(memory);
    return best > 0 ? 2.0 * n * n * n / best : 0;
}
