/* Measures GFLOP/s of a linear layer's products in other libraries. bench/pytorch.py gemm runs in turn with
   build/gemm:

       build/gemm_openblas ROWS IN OUT SECONDS [bf16]      OpenBLAS; no bf16
       build/gemm_onednn ROWS IN OUT SECONDS [bf16]        oneDNN 3, its matmul primitive
       build/gemm_onednn --version

   Prints a line for each of forward, dX and dW: the product's name, and the GFLOP/s of the fastest run in
   SECONDS. Status 2: the library lacks products of the dtype on this CPU. OMP_NUM_THREADS in the environment
   sets the threads. Matrices are row-major, as in training. No matrix is reordered beforehand, because the
   weights, too, change in each step. `make bench-programs` builds each program where it finds the library. */

#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* c (m, n) = a (m, k) times b (k, n). a_turned: a is stored as (k, m); b_turned: b is stored as (n, k). bf16:
   all three matrices are in bf16. */
typedef struct product { const char *name; int m, n, k, a_turned, b_turned, bf16; void *a, *b, *c; } product;

#ifdef PEER_OPENBLAS
#include <cblas.h>

static void version(void) { puts(openblas_get_config()); }

static int prepare(const product *p) { return !p->bf16; }

static void multiply(const product *p)
{
    cblas_sgemm(CblasRowMajor, p->a_turned ? CblasTrans : CblasNoTrans,
                p->b_turned ? CblasTrans : CblasNoTrans, p->m, p->n, p->k, 1, (const float *)p->a,
                p->a_turned ? p->m : p->k, (const float *)p->b, p->b_turned ? p->k : p->n, 0, (float *)p->c,
                p->n);
}
#else
#include <dnnl.h>
#if DNNL_VERSION_MAJOR < 3
#error oneDNN 3 or later
#endif

static dnnl_engine_t engine;
static dnnl_stream_t stream;
static dnnl_primitive_t matmul;
static dnnl_exec_arg_t operands[3];

static void version(void)
{
    printf("oneDNN %d.%d.%d\n", dnnl_version()->major, dnnl_version()->minor, dnnl_version()->patch);
}

/* Gives operand number `at` of the product to oneDNN: its description and its memory. Returns the
   description, or NULL if oneDNN refuses. */
static dnnl_memory_desc_t matrix(int at, int argument, int rows, int cols, int turned, int bf16, void *data)
{
    const dnnl_dims_t dims = {rows, cols}, steps = {turned ? 1 : cols, turned ? rows : 1};
    dnnl_memory_desc_t d;
    if (dnnl_memory_desc_create_with_strides(&d, 2, dims, bf16 ? dnnl_bf16 : dnnl_f32, steps) != dnnl_success)
        return NULL;
    operands[at].arg = argument;
    return dnnl_memory_create(&operands[at].memory, d, engine, data) == dnnl_success ? d : NULL;
}

static int prepare(const product *p) /* makes the oneDNN primitive of a product, which is kept until the
                                        process ends */
{
    dnnl_primitive_desc_t d;
    if (!engine && (dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success ||
                    dnnl_stream_create(&stream, engine, dnnl_stream_default_flags) != dnnl_success))
        return 0;
    dnnl_memory_desc_t a = matrix(0, DNNL_ARG_SRC, p->m, p->k, p->a_turned, p->bf16, p->a),
                       b = matrix(1, DNNL_ARG_WEIGHTS, p->k, p->n, p->b_turned, p->bf16, p->b);
    dnnl_memory_desc_t c = matrix(2, DNNL_ARG_DST, p->m, p->n, 0, p->bf16, p->c);
    return a && b && c &&
           dnnl_matmul_primitive_desc_create(&d, engine, a, b, NULL, c, NULL) == dnnl_success &&
           dnnl_primitive_create(&matmul, d) == dnnl_success;
}

static void multiply(const product *p)
{
    (void)p;
    if (dnnl_primitive_execute(matmul, stream, 3, operands) != dnnl_success ||
        dnnl_stream_wait(stream) != dnnl_success) {
        fprintf(stderr, "gemm_onednn: oneDNN could not compute a product\n");
        exit(1);
    }
}
#endif

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double element(const void *x, int bf16, size_t at)
{
    uint32_t bits;
    float f;
    if (!bf16) return (double)((const float *)x)[at];
    bits = (uint32_t)((const uint16_t *)x)[at] << 16;
    memcpy(&f, &bits, sizeof f);
    return (double)f;
}

/* Returns a new array of n random numbers in [1, 2) or (-2, -1], in fp32 or bf16. A bf16 number is the upper
   half of an fp32 number. */
static void *numbers(size_t n, int bf16)
{
    uint32_t random = 1;
    float *x = (float *)malloc(n * sizeof *x);
    if (!x) { fprintf(stderr, "gemm peer: out of memory\n"); exit(1); }
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        random = random * 1664525u + 1013904223u;
        bits = 0x3f800000u | random >> 9 | (random & 0x80000000u);
        if (bf16) ((uint16_t *)x)[i] = (uint16_t)(bits >> 16);
        else memcpy(x + i, &bits, sizeof bits);
    }
    return x;
}

int main(int argc, char **argv)
{
    int rows = argc > 4 ? atoi(argv[1]) : 0, in = argc > 4 ? atoi(argv[2]) : 0,
        out = argc > 4 ? atoi(argv[3]) : 0;
    int bf16 = argc == 6 && strcmp(argv[5], "bf16") == 0;
    double least = argc > 4 ? atof(argv[4]) : 0;
    if (argc == 2 && strcmp(argv[1], "--version") == 0) { version(); return 0; }
    if (argc < 5 || argc > 6 || (argc == 6 && !bf16) || rows < 1 || in < 1 || out < 1) {
        fprintf(stderr, "usage: %s ROWS IN OUT SECONDS [bf16]\n", argv[0]);
        return 1;
    }
    void *x = numbers((size_t)rows * (size_t)in, bf16), *w = numbers((size_t)out * (size_t)in, bf16),
         *dy = numbers((size_t)rows * (size_t)out, bf16);
    size_t widest = (size_t)(in > out ? in : out);
    void *c = numbers(widest * ((size_t)rows > widest ? (size_t)rows : widest), bf16);
    const product products[] = {
        {"forward", rows, out, in, 0, 1, bf16, x, w, c}, {"dX", rows, in, out, 0, 0, bf16, dy, w, c},
        {"dW", out, in, rows, 1, 0, bf16, dy, x, c}};
    for (int k = 0; k < 3; k++) {
        const product *p = &products[k];
        double best = 0, end, sum = 0, size = 0;
        if (!prepare(p)) {
            fprintf(stderr, "%s: %s has no products of %s on this CPU\n", argv[0], p->name,
                    bf16 ? "bf16" : "fp32");
            return 2;
        }
        multiply(p);
        for (int i = 0; i < p->k; i++) { /* checks the last element of the product */
            size_t a = p->a_turned ? (size_t)(i + 1) * (size_t)p->m - 1
                                   : (size_t)(p->m - 1) * (size_t)p->k + (size_t)i;
            size_t b = p->b_turned ? (size_t)(p->n - 1) * (size_t)p->k + (size_t)i
                                   : (size_t)(i + 1) * (size_t)p->n - 1;
            double term = element(p->a, bf16, a) * element(p->b, bf16, b);
            sum += term, size += fabs(term);
        }
        if (!(fabs(element(c, bf16, (size_t)p->m * (size_t)p->n - 1) - sum) <=
              1e-5 * size + (bf16 ? fabs(sum) / 128 : 0))) {
            fprintf(stderr, "%s: %s computes wrong products\n", argv[0], p->name);
            return 1;
        }
        end = now() + least;
        do {
            double begin = now(), seconds;
            multiply(p);
            seconds = now() - begin;
            if (best <= 0 || seconds < best) best = seconds;
        } while (now() < end);
        printf("%s %.6g\n", p->name, 2e-9 * p->m * p->n * p->k / best);
    }
    return 0;
}
