#pragma once
#include "../../backend/backend.h"
#include "../../cuda/system.cuh"
#include "../../cuda/portability.cuh"
#include "../../cuda/device.cuh"
#include "../optimizers/cuda.cuh"
#include "cuda.cuh"

namespace {

// ---- trials that find out which devices can load from each other's memory

#ifndef TT__PROBE_BYTES // tests make TT__PROBE_BYTES smaller
#define TT__PROBE_BYTES ((size_t)16 << 20)
#endif

__device__ __forceinline__ uint4 probe_words(int64_t i)
{
    const uint32_t u = (uint32_t)i * 4;
    return make_uint4(u * 2654435761u, (u + 1) * 2654435761u, (u + 2) * 2654435761u, (u + 3) * 2654435761u);
}

__global__ void __launch_bounds__(256) fill_probe(uint4 *to, int64_t n)
{
    tt__begin_kernel();
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < n; i += gridDim.x * (int64_t)256)
        to[i] = probe_words(i);
}

// Adds to *wrong the number of the n vectors at p that differ from the vectors of fill_probe.
__global__ void __launch_bounds__(256) check_probe(const uint4 *p, int64_t n, unsigned *wrong)
{
    tt__begin_kernel();
    unsigned count = 0;
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < n; i += gridDim.x * (int64_t)256) {
        const uint4 found = p[i], expected = probe_words(i);
        count += found.x != expected.x || found.y != expected.y || found.z != expected.z ||
            found.w != expected.w;
    }
    if (count) atomicAdd(wrong, count);
}

// A trial with two devices: kernels of d load bytes from the memory of `from`.
struct peer_probe {
    tt__device *d, *from;
    // Buffers of TT__PROBE_BYTES. source: in the memory of `from`; target: in d's memory; pinned: in the
    // host's memory, or NULL.
    void *source, *target, *pinned;
    unsigned *wrong;                // number of 16-byte vectors with wrong bytes; in d's memory
    enum { WORDS = TT__PROBE_BYTES / 16, BLOCKS = WORDS < 65536 ? 2 : 256 };
};

tt_status open_probe(peer_probe *p)
{
    tt__device *d = p->d, *from = p->from;
    if (!(p->source = cuda_allocate(from, TT__PROBE_BYTES))) return fail(d, TT_ERR_DEVICE, "%s", from->error);
    if (!(p->target = cuda_allocate(d, TT__PROBE_BYTES)) ||
        !(p->wrong = (unsigned *)cuda_allocate(d, sizeof *p->wrong)))
        return TT_ERR_DEVICE;
    if (!use(from) ||
        check(from, TT__LAUNCH(fill_probe, p->BLOCKS, 256, 0, from->stream, (uint4 *)p->source, p->WORDS),
              "launch of a probe") != TT_OK || cuda_wait(from) != TT_OK)
        return fail(d, TT_ERR_DEVICE, "%s", from->error);
    const bool made = make_arguments(d) && make_arguments(from);
    return made ? TT_OK : fail(d, TT_ERR_MEMORY, "out of memory: free memory");
}

void close_probe(peer_probe *p)
{
    if (p->source || p->target) { // waits, because the other device may still use memory that is released
        cuda_wait(p->from);
        cuda_wait(p->d);
    }
    if (p->pinned) cuda_release_host(p->from, p->pinned);
    if (p->source) cuda_release(p->from, p->source);
    if (p->target) cuda_release(p->d, p->target);
    if (p->wrong) cuda_release(p->d, p->wrong);
}

// Sets *wrong to the number of 16-byte vectors of the probe at `at` that kernels of d load with wrong bytes.
tt_status count_wrong(peer_probe *p, const void *at, unsigned *wrong)
{
    tt__device *d = p->d;
    tt_status status = cuda_fill(d, p->wrong, 0, sizeof *p->wrong);
    if (status == TT_OK)
        status = check(d, TT__LAUNCH(check_probe, p->BLOCKS, 256, 0, d->stream, (const uint4 *)at, p->WORDS,
                                     p->wrong), "launch of a probe");
    return status == TT_OK ? cuda_read(d, wrong, p->wrong, sizeof *wrong) : status;
}

// Times a copy of TT__PROBE_BYTES on d, by the kernel that collectives use (by_kernel) or by cudaMemcpyAsync.
// Adds the milliseconds to *ms.
tt_status time_copy(tt__device *d, void *to, const void *from, bool by_kernel, double *ms)
{
    cudaEvent_t event[2] = {NULL, NULL};
    float took = 0;
    tt_status status = use(d) ? TT_OK : TT_ERR_DEVICE;
    for (int k = 0; k < 2 && status == TT_OK; k++)
        status = check(d, cudaEventCreateWithFlags(&event[k], cudaEventDefault), "cudaEventCreate");
    for (int k = 0; k < 2 && status == TT_OK; k++) {
        move_batch b = {d->stream, &d->arguments->sums, &d->arguments->copies, 0, 0, false};
        b.copies->count = 0;
        if (k && by_kernel) {
            cudaError_t e = add_copy(&b, to, from, TT__PROBE_BYTES);
            status = check(d, e == cudaSuccess ? launch_copies(&b) : e, "launch of a probe");
        } else if (k) {
            status = check(d, cudaMemcpyAsync(to, from, TT__PROBE_BYTES, cudaMemcpyDefault, d->stream),
                           "copy of a probe");
        }
        if (status == TT_OK) status = check(d, cudaEventRecord(event[k], d->stream), "cudaEventRecord");
    }
    if (status == TT_OK) status = cuda_wait(d);
    if (status == TT_OK)
        status = check(d, cudaEventElapsedTime(&took, event[0], event[1]), "cudaEventElapsedTime");
    for (int k = 0; k < 2; k++) if (event[k]) cudaEventDestroy(event[k]);
    *ms += took;
    return status;
}

// Tests whether copies and loads by peer access get the right bytes. If not, sets *wrong to a message. Adds
// the milliseconds of a copy to *ms.
tt_status try_access(peer_probe *p, const char **wrong, double *ms)
{
    tt__device *d = p->d;
    const int from = p->from->index;
    unsigned copied = 0, loaded = 0;
    if (!use(d)) return TT_ERR_DEVICE;
    const cudaError_t e = cudaDeviceEnablePeerAccess(from, 0);
    const bool before = e == cudaErrorPeerAccessAlreadyEnabled;
    if (before) cudaGetLastError();
    tt_status status = before ? TT_OK : check(d, e, "cudaDeviceEnablePeerAccess");
    if (status != TT_OK) return status;
    status = check(d, cudaMemcpyPeerAsync(p->target, d->index, p->source, from, TT__PROBE_BYTES, d->stream),
                   "copy of a probe");
    if (status == TT_OK) status = count_wrong(p, p->target, &copied);
    if (status == TT_OK) status = count_wrong(p, p->source, &loaded);
    if (status == TT_OK) status = time_copy(d, p->target, p->source, true, ms);
    if (copied || loaded) *wrong = copied ? "copies wrong bytes" : "loads wrong bytes";
    if ((status != TT_OK || *wrong) && !before && use(d)) cudaDeviceDisablePeerAccess(from);
    return status;
}

// Times a copy through the host's memory, and adds the milliseconds to *ms.
tt_status time_staged(peer_probe *p, double *ms)
{
    if (!(p->pinned = cuda_allocate_host(p->from, TT__PROBE_BYTES)) ||
        time_copy(p->from, p->pinned, p->source, false, ms) != TT_OK)
        return fail(p->d, TT_ERR_DEVICE, "%s", p->from->error);
    return time_copy(p->d, p->target, p->pinned, true, ms);
}

const char *cuda_peer(tt__device *d, tt__device *from, double *rate)
{
    const char *peers = getenv("TINYTRAIN_PEERS"), *wrong = NULL;
    const bool forced = peers && strcmp(peers, "0") == 0;
    peer_probe p = {d, from, NULL, NULL, NULL, NULL};
    double ms = 0;
    int can = 0;
    *rate = 0;
    if (d == from || (d->index == from->index && !forced)) return NULL;
    tt_status status = open_probe(&p);
    if (status == TT_OK && !forced)
        status = check(d, cudaDeviceCanAccessPeer(&can, d->index, from->index), "cudaDeviceCanAccessPeer");
    if (status == TT_OK && can) status = try_access(&p, &wrong, &ms);
    const bool reached = status == TT_OK && can && !wrong;
    if (!reached) ms = 0;
    if (status == TT_OK && !reached) status = time_staged(&p, &ms);
    close_probe(&p);
    if (status == TT_OK && ms > 0) *rate = 1e3 * (double)TT__PROBE_BYTES / ms;
    if (reached) return NULL;
    char measured[64] = "";
    if (*rate > 0) snprintf(measured, sizeof measured, " (%.1f GB/s)", 1e-9 * *rate);
    snprintf(d->peer, sizeof d->peer,
             "device pair %d -> %d %s%s%s: copies between them go through the host%s", from->index, d->index,
             status != TT_OK ? "could not be tried, " : forced ? "is not tried, because TINYTRAIN_PEERS is 0"
             : wrong ? "reports peer access, but " : "has no peer access", status != TT_OK ? d->error : "",
             status == TT_OK && wrong ? wrong : "", measured);
    return d->peer;
}

} // namespace
