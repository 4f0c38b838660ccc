/* What a test says to the CUDA emulator, and what it may ask. C and C++. The emulator itself is described in
   cuda_emu.h. */
#ifndef TT_EMU_CONTROL_H
#define TT_EMU_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Which of the operations that may run does run next. Every one of these orders is legal for CUDA. */
typedef enum emu_scheduler {
    EMU_NEWEST,  /* the youngest: consumers before producers that nothing orders */
    EMU_UNIFORM, /* any */
    EMU_PCT,   /* streams have random priorities that change now and then (Burckhardt et al., ASPLOS 2010) */
    EMU_LAZY,  /* nothing before the host waits for it, and then only what that needs */
    EMU_EAGER, /* at once and in order, like CUDA_LAUNCH_BLOCKING=1 */
    EMU_SCHEDULERS
} emu_scheduler;

/* Starts afresh: everything that the emulator held is gone. `peers`: 1, every device can reach every other;
   0, none can. Without this call the first CUDA call takes EMU_DEVICES (1), EMU_MEMORY (256 MiB), EMU_PEERS
   (1) and EMU_SEED (0). */
void emu_configure(int devices, size_t bytes_per_device, int peers, uint64_t seed);

/* The compute capability of a device, until the next emu_configure, which makes it 9.0. */
void emu_set_capability(int device, int major, int minor);

/* Copies between any memory as another library does, a CUDA-aware MPI: at once, after no other stream. */
void emu_library_copy(void *to, const void *from, size_t n);

/* Whether kernels of a device and the host may use managed memory at the same time: 1 after emu_configure. */
void emu_set_managed(int device, int concurrent);

/* What is wrong on the way from the memory of device `from` to device `to`, until the next emu_configure: no
   peer access; or a byte in each KiB that arrives wrong, by copies (where one has access to the other), or by
   kernels' loads. */
enum { EMU_NO_ACCESS = 1, EMU_WRONG_COPIES = 2, EMU_WRONG_LOADS = 4 };
void emu_set_link(int from, int to, unsigned wrong);

/* Restarts the random numbers behind all orders (operations, blocks, warps, threads). The scheduler becomes
   seed % EMU_SCHEDULERS. */
void emu_reseed(uint64_t seed);
void emu_set_scheduler(emu_scheduler s);

/* API calls number `nth` ... nth + count - 1 from now fail with this cudaError_t (nth 0: none). Releases,
   synchronisations included, do their work all the same, as calls of CUDA that return the error of earlier
   work do. */
void emu_inject_fault(long nth, int cuda_error, long count);
/* The same, of the calls of this function alone, until the next emu_inject_fault or emu_configure. */
void emu_inject_fault_into(const char *call, long nth, int error, long count);
/* cublasLtMatmul refuses the algorithms of these bits (number k: bit k) with this status, though its
   heuristic offers them, until the next emu_configure. The emulator has numbers 1 to 4. */
void emu_refuse_algorithms(unsigned bits, int cublas_status);
/* How many microseconds of virtual time products take more: with each of the algorithms 1 to 4, and with an
   epilogue that does more than to add a bias. Until the next emu_configure, which makes all of them 0. */
void emu_set_product_times(const double us[4], double epilogue_us);
/* Counts launches of this kernel, by its name, in emu_counts.watched. NULL, and emu_configure: of none. */
void emu_watch(const char *kernel);
long emu_api_calls(void); /* since emu_configure */

/* How many allocations, streams, events, graphs and handles are alive; `text` (may be NULL) gets their
   kinds. */
int emu_live_objects(char *text, size_t size);
size_t emu_pinned_bytes(void); /* of the host's memory, that cudaMallocHost gave and nobody has freed */

typedef struct emu_counts {
    long operations, kernels, blocks, threads, switches; /* what has run */
    long launches, graph_launches;                       /* what was asked for */
    long copies, memsets, gemms;
    long uneven_gemms; /* those of cublasLtMatmul with a size along memory, or a leading dimension, that is
                          not a multiple of 8 */
    long gelus, gelu_slopes, bias_gradients, tf32,
        fp8; /* of the matrix products, those with such an epilogue or operands */
    long heuristics;                                     /* questions to cuBLASLt's heuristic */
    long by_algorithm[5];                                /* products of cuBLASLt, by the algorithm's number */
    long watched;                                        /* launches of the kernel of emu_watch */
    long pageable_async; /* cudaMemcpyAsync from or to memory that is not pinned */
    long host_syncs;     /* waits of the host: synchronise calls and blocking copies */
    long event_syncs;    /* those for an event, which may long have happened */
    long allocations;                                    /* cudaMalloc, cudaFree and those of pinned memory */
    long advised, prefetched; /* bytes of managed memory that are to stay on a device; that were prefetched */
    long prefetches;
} emu_counts;
emu_counts emu_get_counts(void);
void emu_reset_counts(void);

/* "plain", "asan" or "trace" */
const char *emu_build(void);

#ifdef __cplusplus
}
#endif
#endif
