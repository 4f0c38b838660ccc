/* emu_control.h - functions by which a test sets up the CUDA emulator and asks for its counts. For C and C++.
   cuda_emu.h describes the emulator itself. */
#ifndef TT_EMU_CONTROL_H
#define TT_EMU_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rules by which the emulator chooses the next operation that runs. CUDA allows the order that each rule
   gives. */
typedef enum emu_scheduler {
    EMU_NEWEST,  /* the newest operation: consumers run before producers unless something orders them */
    EMU_UNIFORM, /* any operation, at random */
    EMU_PCT,   /* streams have random priorities that change now and then (Burckhardt et al., ASPLOS 2010) */
    EMU_LAZY,  /* nothing before the host waits; then only operations for whose end the host waits */
    EMU_EAGER, /* each operation at once and in order, as with CUDA_LAUNCH_BLOCKING=1 */
    EMU_SCHEDULERS
} emu_scheduler;

/* Resets the emulator and all its state. `peers`: 1, every device can reach every other; 0, none can. Without
   this call the first CUDA call reads the environment variables EMU_DEVICES (by default 1), EMU_MEMORY
   (256 MiB), EMU_PEERS (1) and EMU_SEED (0). */
void emu_configure(int devices, size_t bytes_per_device, int peers, uint64_t seed);

/* Sets the compute capability of a device, until the next emu_configure, which sets 9.0. */
void emu_set_capability(int device, int major, int minor);

/* Copies between any memories as a CUDA-aware MPI does: at once, without waiting for other streams. */
void emu_library_copy(void *to, const void *from, size_t n);

/* Sets whether kernels of a device and the host may use managed memory at the same time. emu_configure sets
   1. */
void emu_set_managed(int device, int concurrent);

/* Sets faults of the link from the memory of device `from` to device `to`, until the next emu_configure.
   `wrong` is a sum of bits. EMU_NO_ACCESS: there is no peer access. EMU_WRONG_COPIES: one byte is wrong in
   each KiB that a copy brings, if one of the devices has access to the other. EMU_WRONG_LOADS: one byte is
   wrong in each KiB that kernels load. */
enum { EMU_NO_ACCESS = 1, EMU_WRONG_COPIES = 2, EMU_WRONG_LOADS = 4 };
void emu_set_link(int from, int to, unsigned wrong);

/* Restarts the random numbers that choose all orders (operations, blocks, warps, threads). The scheduler
   becomes `seed % EMU_SCHEDULERS`. */
void emu_reseed(uint64_t seed);
void emu_set_scheduler(emu_scheduler s);

/* Makes the API calls number `nth` ... nth + count - 1 from now fail with the cudaError_t `cuda_error` (nth
   0: no call fails). Calls that release or synchronise do their work nevertheless, as CUDA's do when they
   return the error of earlier work. */
void emu_inject_fault(long nth, int cuda_error, long count);
/* Makes calls of the function `call` alone fail, until the next emu_inject_fault or emu_configure: calls
   number `nth` ... nth + count - 1 of that function from now. */
void emu_inject_fault_into(const char *call, long nth, int error, long count);
/* Makes cublasLtMatmul refuse the algorithms of `bits` (bit k for algorithm k) with `cublas_status`, although
   its heuristic offers them, until the next emu_configure. The emulator's algorithms are 1 to 4. */
void emu_refuse_algorithms(unsigned bits, int cublas_status);
/* Sets how many more microseconds of virtual time products take with each of the algorithms 1 to 4, and with
   an epilogue that does more than add a bias. The next emu_configure sets all to 0. */
void emu_set_product_times(const double us[4], double epilogue_us);
/* Counts launches of this kernel in emu_counts.watched. NULL counts none, as after emu_configure. */
void emu_watch(const char *kernel);
long emu_api_calls(void); /* returns the number of calls since emu_configure */

/* Returns how many allocations, streams, events, graphs and handles are alive; `text` (may be NULL) gets the
   number of each kind. */
int emu_live_objects(char *text, size_t size);
size_t emu_pinned_bytes(void); /* returns the bytes of cudaMallocHost that are not freed */

typedef struct emu_counts {
    long operations, kernels, blocks, threads, switches; /* what the emulator executed */
    long launches, graph_launches;                       /* what the caller requested */
    long copies, memsets, gemms;
    long uneven_gemms; /* cublasLtMatmul products of which some matrix has a number of rows (the matrices
                          are column-major) or a leading dimension that is no multiple of 8 */
    long gelus, gelu_slopes, bias_gradients, tf32,
        fp8; /* matrix products with the epilogue or the operands that the field names */
    long heuristics;                                     /* calls of cuBLASLt's heuristic */
    long by_algorithm[5];                                /* products of cuBLASLt, by the algorithm's number */
    long watched;                                        /* launches of emu_watch's kernel */
    long pageable_async; /* cudaMemcpyAsync from or to memory that is not pinned */
    long host_syncs;     /* waits of the host: synchronise calls and blocking copies */
    long event_syncs;    /* waits for an event, even for an event that has happened */
    long allocations;                                    /* calls that allocate or free memory */
    long advised, prefetched; /* bytes of managed memory. advised: advised to stay on a device; prefetched:
                                 prefetched so far */
    long prefetches;
} emu_counts;
emu_counts emu_get_counts(void);
void emu_reset_counts(void);

/* Returns "plain", "asan" or "trace". */
const char *emu_build(void);

#ifdef __cplusplus
}
#endif
#endif
