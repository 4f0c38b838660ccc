#pragma once
#include "../backend/backend.h"
#include "../cuda/system.cuh"
#include "../cuda/device.cuh"
#include "../cuda/kernels.cuh"
#include "elementwise/cuda.cuh"
#include "casts/cuda.cuh"
#include "rows/cuda.cuh"
#include "embedding/cuda.cuh"
#include "losses/cuda.cuh"
#include "norm/cuda.cuh"
#include "optimizers/cuda.cuh"
#include "optimizers/cuda_prune.cuh"
#include "collectives/cuda.cuh"
#include "attention/cuda.cuh"
#include "linear/cuda_products.cuh"
#include "linear/cuda_tuned.cuh"
#include "linear/cuda.cuh"
#include "fp8/cuda.cuh"

namespace {

// ======================================================================================= table of kernels

op_kernels kernels_of(int op)
{
#define TT__KERNELS(OP, name, inputs, outputs, flags) kernels_of<TT__OP_##OP>(),
    static const op_kernels table[] = {TT__OPS(TT__KERNELS)};
#undef TT__KERNELS
    return table[op];
}

const char *name_of(int op)
{
#define TT__OP_NAME(OP, name, inputs, outputs, flags) name,
    static const char *const names[] = {TT__OPS(TT__OP_NAME)};
#undef TT__OP_NAME
    return names[op];
}

const char *cuda_refuses(int index, const tt__launch *l)
{
    const op_kernels kernels = kernels_of(l->instr->op);
    if (!kernels.run && !kernels.together) return "CUDA has no kernel for it; the CPU has (device 'cpu')";
    int major = 9, minor = 0; // the compute capability that is assumed if there is no device
    if (tt__is_fp8(l->in[0].dtype)) {
        if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) != cudaSuccess ||
            cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index) != cudaSuccess)
            (void)cudaGetLastError(); // without a device, programs can still be planned
        if (major * 10 + minor < 89) return "matmul 'fp8' needs a GPU of compute capability 8.9 or more";
    }
    for (const tt__mat &m : l->in) {
        if (kernels.max_cols && m.cols > kernels.max_cols)
            return "the CUDA backend's kernel for it takes at most 2^20 columns: make the width smaller";
        if (kernels.max_rows && m.rows > kernels.max_rows)
            return "the CUDA backend's kernel for it takes at most 2^27 rows: make the batch smaller";
    }
    return NULL;
}

cudaError_t run_all(const tt__launch *l, int n)
{
    const op_kernels kernels = kernels_of(l->instr->op);
    cudaError_t e = cudaSuccess;
    if (kernels.together) return kernels.together(l, n);
    if (n == 2 && l[1].instr->op != l->instr->op) return run_with_dropout(l);
    for (int k = 0; k < n && e == cudaSuccess; k++) e = kernels.run(&l[k]);
    return e;
}

// Implements tt__backend.tune.
tt_status cuda_tune(const tt__launch *l, int n, bool times, int *untimed)
{
    tt__device *d = l->device;
    const op_kernels kernels = kernels_of(l->instr->op);
    const int tuned = d->tuned_count;
    cudaError_t e = cudaSuccess;
    if (!use(d)) return TT_ERR_DEVICE;
    d->error[0] = 0;
    for (int k = 0; k < n && e == cudaSuccess && kernels.run; k++) {
        collected_products found = {};
        e = collect_products(&l[k], kernels.run, &found);
        for (int j = 0; j < found.count && e == cudaSuccess; j++) {
            bool short_of_memory = false;
            e = tune_product(&l[k], found.list[j], times, &short_of_memory);
            *untimed += short_of_memory;
        }
        free(found.list);
    }
    if (d->tuned_count != tuned) forget_choices(d);
    if (e == cudaSuccess) return TT_OK;
    return d->error[0] ? TT_ERR_DEVICE : check(d, e, "timing of products");
}

tt_status cuda_launch(const tt__launch *l, int n)
{
    tt__device *d = l->device;
    char what[128];
    if (!use(d) || !stream_of(l)) return TT_ERR_DEVICE;
    d->error[0] = 0;
    cudaError_t e = run_all(l, n);
    const bool launched = e == cudaSuccess;
    if (launched && d->waits) e = cudaStreamSynchronize(stream_of(l));
    if (e == cudaSuccess) return TT_OK;
    if (d->error[0]) return TT_ERR_DEVICE; // the op has set a more precise error
    snprintf(what, sizeof what, "%s of %s, whose result has %lld rows and %lld columns",
             launched ? "run" : "launch", name_of(l->instr->op), (long long)l->out[0].rows,
             (long long)l->out[0].cols);
    return check(d, e, what);
}

} // namespace
