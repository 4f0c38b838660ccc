// tinytrain_cuda.cu - tinytrain's backend for NVIDIA GPUs.
//
//     nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -c tinytrain_cuda.cu
//     cc -O2 -DTINYTRAIN_CUDA program.c tinytrain_cuda.o -lcublasLt -lcudart -lstdc++ -lm -lpthread
//
// A program that is compiled with device = "cuda" runs here. Tape, passes and plan are those of the CPU; only
// the kernels differ.
//
// Folders, in this order: cuda/ (portability, devices, numbers, sums and elementwise work on groups of
// columns), then ops/ (kernels of elementwise ops, rows, embedding, losses, norms, optimizers, collectives,
// attention, matrix products and fp8, and the table of kernels).
//
// All kernels obey these rules. Sums are computed in f32 or f64, in a fixed order and without atomics on
// floats, so that every run has the same bits. Kernels read everything that changes from step to step (seed,
// step, learning rate, loss scale) from values on the device, never from arguments, so that a captured step
// can be replayed. No block waits for another block. Random numbers are those of the CPU backend.
#include "cuda/system.cuh"

#ifndef TT__PORTABILITY_ONLY // the emulator's tests include only this part of the file
#define TINYTRAIN_BACKEND
#include "tinytrain.h"
#endif

#include "cuda/portability.cuh"

#ifndef TT__PORTABILITY_ONLY

#include "cuda/handle.cuh"
#include "cuda/device.cuh"
#include "cuda/numbers.cuh"
#include "cuda/groups.cuh"
#include "cuda/kernels.cuh"
#include "ops/elementwise/cuda.cuh"
#include "ops/casts/cuda.cuh"
#include "ops/rows/cuda.cuh"
#include "ops/embedding/cuda.cuh"
#include "ops/losses/cuda.cuh"
#include "ops/norm/cuda.cuh"
#include "ops/optimizers/cuda.cuh"
#include "ops/optimizers/cuda_prune.cuh"
#include "ops/collectives/cuda.cuh"
#include "ops/collectives/cuda_peers.cuh"
#include "ops/attention/cuda_shared.cuh"
#include "ops/attention/cuda_f32.cuh"
#include "ops/attention/cuda_cores.cuh"
#include "ops/attention/cuda_forward_wide.cuh"
#include "ops/attention/cuda_backward.cuh"
#include "ops/attention/cuda_backward_wide.cuh"
#include "ops/attention/cuda.cuh"
#include "ops/linear/cuda_products.cuh"
#include "ops/linear/cuda_coded.cuh"
#include "ops/linear/cuda_tuned.cuh"
#include "ops/linear/cuda.cuh"
#include "ops/fp8/cuda.cuh"
#include "ops/kernels.cuh"

extern "C" const tt__backend tt__cuda_backend = {
    cuda_open, cuda_close, cuda_error, cuda_allocate, cuda_release, cuda_allocate_managed, cuda_keep,
        cuda_prefetch, cuda_allocate_host, cuda_release_host, cuda_copy, cuda_fill, cuda_init, cuda_read,
        cuda_wait, cuda_mark, cuda_after, cuda_release_event, cuda_launch, cuda_capture, cuda_captured,
        cuda_replay, cuda_forget, cuda_refuses, cuda_describe, cuda_peer, cuda_stage, cuda_available,
        cuda_tune, cuda_tuned_text, cuda_learn, };

#endif // TT__PORTABILITY_ONLY
