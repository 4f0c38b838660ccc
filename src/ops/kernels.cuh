#pragma once
#include "../backend/backend.h"
#include "../cuda/system.cuh"
#include "../cuda/device.cuh"
#include "elementwise/cuda.cuh"
#include "rows/cuda.cuh"
#include "norm/cuda.cuh"
#include "embedding/cuda.cuh"
#include "losses/cuda.cuh"
#include "optimizers/cuda.cuh"
#include "collectives/cuda.cuh"
#include "attention/cuda.cuh"
#include "linear/cuda_products.cuh"
#include "linear/cuda_tuned.cuh"
#include "linear/cuda.cuh"
#include "fp8/cuda.cuh"

namespace {

// ======================================================================================= table of kernels

typedef cudaError_t (*run_fn)(const tt__launch *l);
typedef cudaError_t (*run_together_fn)(const tt__launch *l, int n); // runs n launches with few kernels

// The function that runs an op, `run` or `together` (if both are NULL, CUDA has no kernel for the op), and
// the max numbers of rows and columns of the op's operands (0: any number).
struct op_kernels {
    run_fn run;
    run_together_fn together;
    int64_t max_rows, max_cols;
    op_kernels() : run(NULL), together(NULL), max_rows(0), max_cols(0) {}
    op_kernels(run_fn f, int64_t rows = 0, int64_t cols = 0) : op_kernels()
    {
        run = f;
        max_rows = rows;
        max_cols = cols;
    }
    op_kernels(run_together_fn f) : op_kernels() { together = f; }
};
enum {
    MOST_SET_ROWS = 1 << 27,   // the resident workspace has a bit for each row
    MOST_SUM_COLUMNS = 1 << 20 // the resident workspace has partial sums of all columns
};

op_kernels kernels_of(int op)
{
    switch (op) {
    case TT__OP_SCALE: case TT__OP_CAST: return run_scale;
    case TT__OP_ADD: return run_two<op_add>;
    case TT__OP_ADD_ROW: return run_two<op_add_row>;
    case TT__OP_SUM_ROWS: return run_sum_rows;
    case TT__OP_MUL: return run_two<op_mul>;
    case TT__OP_SWIGLU: return run_swiglu;
    case TT__OP_SWIGLU_BACKWARD: return run_swiglu_backward;
    case TT__OP_ROTARY: return run_rotary;
    case TT__OP_FILL: return run_fill;
    case TT__OP_ACTIVATION: return run_activation;
    case TT__OP_ACTIVATION_BACKWARD: return run_activation_backward;
    case TT__OP_DROPOUT: return run_dropout;
    case TT__OP_LAYERNORM: case TT__OP_RMSNORM: return run_layernorm;
    case TT__OP_LAYERNORM_BACKWARD: case TT__OP_RMSNORM_BACKWARD:
        return {run_layernorm_backward, 0, MOST_SUM_COLUMNS};
    case TT__OP_EMBEDDING: case TT__OP_GATHER_ROWS: return run_gather;
    case TT__OP_EMBEDDING_BACKWARD: case TT__OP_GATHER_ROWS_BACKWARD:
        return {run_table_backward, 0, MOST_SUM_COLUMNS};
    case TT__OP_MEAN_POOL: return run_mean_pool;
    case TT__OP_MEAN_POOL_BACKWARD: return run_mean_pool_backward;
    case TT__OP_SET_ROWS: return {run_set_rows, MOST_SET_ROWS};
    case TT__OP_STORE_ROWS: return run_store_rows;
    case TT__OP_SET_ROWS_BACKWARD: return {run_set_rows_backward, MOST_SET_ROWS, MOST_SUM_COLUMNS};
    case TT__OP_PATCHES: return run_patches;
    case TT__OP_CROSS_ENTROPY: return run_cross_entropy;
    case TT__OP_SOFT_CROSS_ENTROPY: return run_soft_cross_entropy;
    case TT__OP_SOFT_CROSS_ENTROPY_BACKWARD: return run_soft_cross_entropy_backward;
    case TT__OP_MEAN_SQUARED_ERROR: return run_mean_squared_error;
    case TT__OP_CROSS_ENTROPY_BACKWARD: return run_cross_entropy_backward;
    case TT__OP_MEAN_SQUARED_ERROR_BACKWARD: return run_mean_squared_error_backward;
    case TT__OP_LINEAR_CROSS_ENTROPY: return run_linear_cross_entropy;
    case TT__OP_SUM_SQUARES: case TT__OP_CHUNK_SQUARES: case TT__OP_FOLD_SQUARES: return run_squares;
    case TT__OP_ADD_COUNTS: return run_add_counts;
    case TT__OP_MEAN_LOSS: return run_mean_loss;
    case TT__OP_CLIP: return run_clip;
    case TT__OP_LOSS_SCALE: return run_loss_scale;
    case TT__OP_SGD: return run_update<false>;
    case TT__OP_ADAM: return run_update<true>;
    case TT__OP_COPY: return run_copy;
    case TT__OP_WAIT: case TT__OP_SEND: return run_nothing; // the RECV after a SEND fetches SEND's operand
    case TT__OP_ALL_REDUCE: case TT__OP_REDUCE_SCATTER: case TT__OP_ALL_GATHER: case TT__OP_BROADCAST:
    case TT__OP_RECV: case TT__OP_SUM_SLOTS: return run_move;
    case TT__OP_LINEAR: return run_linear;
    case TT__OP_LINEAR_DX: return run_linear_dx;
    case TT__OP_LINEAR_DW: return run_linear_dw;
    case TT__OP_QUANTIZE: return run_quantize;
    case TT__OP_FP8_HISTORY: return run_fp8_history;
    case TT__OP_ATTENTION: return run_attention;
    case TT__OP_ATTENTION_BACKWARD: return run_attention_backward;
    default: return {};
    }
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
    if (!kernels.run && !kernels.together) return "the CUDA backend has no kernel for it";
    int major = 9, minor = 0; // the compute capability that is assumed if there is no device
    if (tt__is_fp8(l->in[0].dtype)) {
        if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) != cudaSuccess ||
            cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index) != cudaSuccess)
            (void)cudaGetLastError(); // without a device, programs can still be planned
        if (major * 10 + minor < 89) return "matmul 'fp8' needs a GPU of compute capability 8.9 or more";
    }
    for (const tt__mat &m : l->in) {
        if (kernels.max_cols && m.cols > kernels.max_cols)
            return "the CUDA backend's kernel for it takes at most 2^20 columns";
        if (kernels.max_rows && m.rows > kernels.max_rows)
            return "the CUDA backend's kernel for it takes at most 2^27 rows";
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
