#pragma once
#include "../backend/backend.h"
#include "system.cuh"

namespace {

// ============================================================================================ kernels of ops

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
    MAX_SET_ROWS = 1 << 27,   // SET_ROWS and its backward: max rows; the workspace has a bit for each row
    MAX_SUM_COLUMNS = 1 << 20 // max columns of ops whose partial column sums are in the resident workspace
};

// Returns the kernels of op number OP. Without a TT__RUN_BY(OP, ...) CUDA has no kernel for the op.
template <int OP> op_kernels kernels_of() { return {}; }

// Says by which function an op runs, and optionally the max numbers of rows and columns. Write the TT__RUN_BY
// of an op below that function.
#define TT__RUN_BY(OP, ...) \
    template <> op_kernels kernels_of<TT__OP_##OP>() { return {__VA_ARGS__}; }

} // namespace
