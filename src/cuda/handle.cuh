#pragma once
#include "../backend/backend.h"
#include "system.cuh"
#include "portability.cuh"

// ================================================================================================== device
// Memory, copies, and what a program keeps on the device.

namespace { // all but the table at the end

struct product_choice;
struct tuned_product;
struct product_trial;
struct collected_products;
struct group_arguments;

} // namespace

struct tt__device {
    int index;
    tt__stream stream;      // of computation, and of all that is no launch
    cudaStream_t beside[TT__STREAMS]; // the others, by their numbers, from the first use on
    cublasLtHandle_t lt;
    cudaDeviceProp properties;
    product_choice *choices; // TT__PRODUCT_CHOICES of them, see cuda_products.cuh
    int choice_count;
    tuned_product *tuned;    // tuned_count of them: what was timed or learnt
    int tuned_count;
    product_trial *trial;    // of the product that is timed; NULL: none is
    collected_products *collected; // where matmul puts products that it is not to make; NULL: it makes them
    group_arguments *arguments; // of tensors that share a launch, see ops/optimizers/cuda.cuh
    bool waits;             // after each op, and records nothing: environment TINYTRAIN_CUDA_SYNC=1
    bool wgmma;             // attention by warpgroups; environment TINYTRAIN_WGMMA=0: never
    bool lost;              // an error has ended all work on the device, and `error` stays what it is
    char error[512];
    char peer[704];         // cuda_peer's sentence
};
