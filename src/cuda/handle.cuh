#pragma once
#include "../backend/backend.h"
#include "system.cuh"
#include "portability.cuh"

// ================================================================================================== device
// The state of an open CUDA device.

namespace { // holds all of tinytrain_cuda.cu except struct tt__device and the table of functions at its end

struct product_choice;
struct tuned_product;
struct product_trial;
struct collected_products;
struct group_arguments;

} // namespace

struct tt__device {
    int index;
    tt__stream stream;      // the compute stream; calls that are not launches use it, too
    cudaStream_t beside[TT__STREAMS]; // the other streams, by number; made at the first use
    cublasLtHandle_t lt;
    cudaDeviceProp properties;
    product_choice *choices; // hash table of TT__PRODUCT_CHOICES entries: cuBLASLt's choice for each product
    int choice_count;
    tuned_product *tuned;    // array of tuned_count products that were timed here or read by cuda_learn
    int tuned_count;
    product_trial *trial;    // trial of the product that is being timed; NULL: no product is being timed
    collected_products *collected; // list to which matmul adds products; NULL: matmul computes products
    group_arguments *arguments; // arguments of tensors that share a launch, see ops/optimizers/cuda.cuh
    bool waits;             // environment TINYTRAIN_CUDA_SYNC=1: wait after each op and record no graphs
    bool wgmma;             // attention uses warpgroups; never with environment TINYTRAIN_WGMMA=0
    bool lost;              // an error has ended all work on the device; `error` no longer changes
    char error[512];
    char peer[704];         // the sentence that cuda_peer returns
};
