// death.cu - wrong programs, and the report that each must cause in each build. A child process runs each
// program for some seeds. The emulator ends the process with status 86 and a message, the sanitizers with
// other messages. "wrong result" means that no tool reports, but poison and adversarial orders make a test
// see a wrong result.
#define SAMPLE_WITHOUT_TESTS
#include "sample.cu"
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <string>

#ifdef __clang__ // no optimiser may see through a planted bug
#define OPAQUE __attribute__((optnone, noinline))
#else
#define OPAQUE __attribute__((noinline, noclone))
#endif
static volatile int zero; // 0, which the compiler does not know

static float *device_floats(size_t n, bool defined = true)
{
    float *p = nullptr;
    cudaMalloc(&p, n * sizeof(float));
    if (defined) cudaMemset(p, 0, n * sizeof(float));
    cudaDeviceSynchronize();
    return p;
}
static std::vector<float> host_floats(const float *p, size_t n)
{
    std::vector<float> h(n);
    cudaMemcpy(h.data(), p, n * sizeof(float), cudaMemcpyDeviceToHost);
    return h;
}
template <class F> static int differs(const float *p, int n, F expected) // waits for the device first
{
    std::vector<float> h = host_floats(p, (size_t)n);
    for (int i = 0; i < n; i++) if (!(h[(size_t)i] == expected(i))) return 1;
    return 0;
}
static cudaStream_t new_stream()
{
    cudaStream_t s = nullptr;
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    return s;
}
static int done() { return cudaDeviceSynchronize() != cudaSuccess; }

// ================================================================================ kernels in a chain
__global__ void filled(float *out)
{
    tt__begin_kernel();
    out[threadIdx.x] = 1;
}
__global__ void half_begun(float *out)
{
    if (threadIdx.x < 16) tt__begin_kernel();
    out[threadIdx.x] = 2;
}
__global__ void begun_late(float *out)
{
    const float x = out[threadIdx.x]; // a read before `filled` may have written the number
    tt__begin_kernel();
    out[threadIdx.x] = x;
}
static int chain(void (*second)(float *))
{
    float *out = device_floats(32);
    const tt__stream s = {new_stream(), true};
    TT__LAUNCH(filled, 1, 32, 0, s, out);
    TT__LAUNCH(second, 1, 32, 0, s, out);
    return done();
}
static int chained_without_wait() { return chain(half_begun); }
static int chained_that_reads_before() { return chain(begun_late); }

// ===================================================================================== within a block
__global__ void shifted(float *out) // each thread reads its neighbour's number without a barrier
{
    TT__SHARED(float, s, [128]);
    int t = threadIdx.x;
    s[t] = (float)t;
    out[t] = s[(t + 1) % 128];
}
static int missing_syncthreads()
{
    float *out = device_floats(128);
    TT__LAUNCH(shifted, 1, 128, 0, 0, out);
    return differs(out, 128, [](int i) { return (float)((i + 1) % 128); });
}
__global__ void reused(float *out)
{
    TT__SHARED(float, s, [64]);
    int t = threadIdx.x;
    s[t] = (float)t;
    __syncthreads();
    float v = s[63 - t];
    s[t] = -1; // other threads may not have read s[t] yet
    out[t] = v;
}
static int write_after_read()
{
    float *out = device_floats(64);
    TT__LAUNCH(reused, 1, 64, 0, 0, out);
    return differs(out, 64, [](int i) { return (float)(63 - i); });
}
__global__ void shuffled(float *out)
{
    TT__SHARED(float, s, [32]);
    int t = threadIdx.x;
    s[t] = (float)t;
    float v = __shfl_xor_sync(~0u, 0.f, 1); // a shuffle orders no memory
    out[t] = s[t ^ 1] + v;
}
static int missing_syncwarp()
{
    float *out = device_floats(32);
    TT__LAUNCH(shuffled, 1, 32, 0, 0, out);
    return differs(out, 32, [](int i) { return (float)(i ^ 1); });
}
__global__ void half_a_barrier() { if (threadIdx.x < 32) __syncthreads(); }
static int exit_before_barrier()
{
    TT__LAUNCH(half_a_barrier, 2, 64, 0, 0);
    return done();
}
__global__ void two_barriers()
{
    if (threadIdx.x < 32) __syncthreads();
    else __syncthreads(); // a second barrier, on another line
}
static int barrier_in_branches()
{
    TT__LAUNCH(two_barriers, 2, 64, 0, 0);
    return done();
}
__global__ void half_a_shuffle(float *out)
{
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(~0u, 1.f, 1);
}
static int shuffle_in_a_branch()
{
    float *out = device_floats(32);
    TT__LAUNCH(half_a_shuffle, 1, 32, 0, 0, out);
    return done();
}
__global__ void hole(float *out)
{
    TT__SHARED(float, s, [64]);
    if (threadIdx.x < 63) s[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
static int shared_never_written()
{
    float *out = device_floats(64);
    TT__LAUNCH(hole, 1, 64, 0, 0, out);
    return differs(out, 64, [](int) { return 1.f; });
}
__global__ void past_the_end(float *out, int n)
{
    TT__SHARED(float, s, [64]);
    TT__SHARED(float, q, [64]);
    s[threadIdx.x] = 1;
    q[threadIdx.x] = 2;
    __syncthreads();
    if (threadIdx.x == 0) s[n] = 3;
    __syncthreads();
    out[threadIdx.x] = q[threadIdx.x] + s[threadIdx.x];
}
static int shared_out_of_bounds()
{
    float *out = device_floats(64);
    TT__LAUNCH(past_the_end, 1, 64, 0, 0, out, 64);
    return differs(out, 64, [](int) { return 3.f; });
}
__global__ void large(float *out)
{
    TT__SHARED(float, s, [8192]);
    TT__DYN_SHARED(float, d);
    for (int i = threadIdx.x; i < 8192; i += 32) s[i] = 0;
    d[threadIdx.x] = 1;
    out[threadIdx.x] = s[threadIdx.x] + d[threadIdx.x];
}
static int shared_sum_too_large() // 32 KiB static and 20 KiB dynamic shared memory
{
    float *out = device_floats(32);
    TT__LAUNCH(large, 1, 32, 20 * 1024, 0, out);
    return done();
}

// ===================================================================================== cp.async and ldmatrix
__global__ void not_awaited(float *out, const float *a)
{
    TT__SHARED(float, s, [128]);
    int t = threadIdx.x;
    tt__cp_async_16(&s[t * 4], a + t * 4);
    tt__cp_async_commit();
    __syncthreads();
    out[t] = s[t];
    tt__cp_async_wait<0>();
}
static int cp_async_read_before_wait()
{
    float *out = device_floats(32), *a = device_floats(128);
    TT__LAUNCH(not_awaited, 1, 32, 0, 0, out, a);
    return differs(out, 32, [](int) { return 0.f; });
}
__global__ void not_shared(float *out, const float *a)
{
    TT__SHARED(float, s, [128]);
    int t = threadIdx.x;
    tt__cp_async_16(&s[t * 4], a + t * 4);
    tt__cp_async_commit();
    tt__cp_async_wait<0>(); // waits only for the thread's own copies
    out[t] = s[127 - t];
}
static int cp_async_without_barrier()
{
    float *out = device_floats(32), *a = device_floats(128);
    TT__LAUNCH(not_shared, 1, 32, 0, 0, out, a);
    return differs(out, 32, [](int) { return 0.f; });
}
__global__ void forgotten(const float *a)
{
    TT__SHARED(float, s, [128]);
    tt__cp_async_16(&s[threadIdx.x * 4], a + threadIdx.x * 4);
    tt__cp_async_commit();
}
static int cp_async_never_awaited()
{
    float *a = device_floats(128);
    TT__LAUNCH(forgotten, 1, 32, 0, 0, a);
    return done();
}
__global__ void stage_reused(float *out, const float *a)
{
    TT__SHARED(float, s, [128]);
    int t = threadIdx.x;
    s[t] = s[t + 32] = s[t + 64] = s[t + 96] = (float)t;
    __syncthreads();
    float v = s[127 - t];
    tt__cp_async_16(&s[t * 4], a + t * 4); // other threads may still read the bytes that the copy overwrites
    tt__cp_async_commit();
    tt__cp_async_wait<0>();
    out[t] = v;
}
static int cp_async_into_a_live_stage()
{
    float *out = device_floats(32), *a = device_floats(128);
    TT__LAUNCH(stage_reused, 1, 32, 0, 0, out, a);
    return differs(out, 32, [](int i) { return (float)(31 - i); });
}
__global__ void loads_too_early(uint32_t *out)
{
    TT__SHARED(uint16_t, s, [8][8]);
    uint32_t r;
    for (int i = threadIdx.x; i < 64; i += 64) s[i / 8][i % 8] = (uint16_t)i;
    if (threadIdx.x < 64) s[threadIdx.x / 8][threadIdx.x % 8] = (uint16_t)threadIdx.x;
    tt__ldmatrix_x1(r, s[threadIdx.x % 8]);
    out[threadIdx.x] = r;
}
static int ldmatrix_without_barrier()
{
    uint32_t *out = (uint32_t *)device_floats(64);
    std::vector<uint32_t> h(64);
    TT__LAUNCH(loads_too_early, 1, 64, 0, 0, out);
    cudaMemcpy(h.data(), out, 256, cudaMemcpyDeviceToHost);
    for (uint32_t t = 0; t < 64; t++) if (h[t] != ((t % 32 * 2 + 1) << 16 | t % 32 * 2)) return 1;
    return 0;
}
__global__ void loads_misaligned(uint32_t *out)
{
    TT__SHARED(uint16_t, s, [128]);
    uint32_t r;
    for (int i = threadIdx.x; i < 128; i += 32) s[i] = 0;
    __syncwarp();
    tt__ldmatrix_x1(r, s + threadIdx.x % 8 * 12);
    out[threadIdx.x] = r;
}
static int ldmatrix_misaligned()
{
    uint32_t *out = (uint32_t *)device_floats(32);
    TT__LAUNCH(loads_misaligned, 1, 32, 0, 0, out);
    return done();
}

// ===================================================================================== warpgroups
enum wgmma_mistake { NO_PUBLISH, NO_BARRIER, NO_FENCE, NO_WAIT, OVERWRITTEN, NO_COMMIT, APART, STORED };
__global__ void multiplies(float *out, const float *a, int mistake)
{
    TT__DYN_SHARED(bf16, tile);
    float d[1][8][4];
    const int t = threadIdx.x;
    for (int i = 0; i < 4; i++) tt__cp_async_16(tile + (t + 128 * i) * 8, a + (t + 128 * i) * 4);
    tt__cp_async_commit();
    tt__cp_async_wait<0>();
    if (mistake != NO_PUBLISH) tt__wgmma_publish();
    if (mistake != NO_BARRIER) __syncthreads();
    if (mistake == STORED) { // a store after the fence
        for (int i = t; i < 4096; i += 128) tile[i] = __float2bfloat16(-__bfloat162float(tile[i]));
        __syncthreads();
    }
    if (mistake == APART && t < 32) return;
    if (mistake != NO_FENCE) tt__wgmma_fence();
    tt__wgmma_rows<bf16>(d[0], tt__wgmma_matrix(tile), tt__wgmma_matrix(tile), false);
    if (mistake != NO_COMMIT) tt__wgmma_commit();
    if (mistake == OVERWRITTEN) for (int i = t; i < 4096; i += 128) tile[i] = __float2bfloat16(2.0f);
    if (mistake == NO_WAIT) out[t] = d[0][0][0];
    tt__wgmma_wait<0>();
    tt__wgmma_done(d[0]);
    if (mistake != NO_WAIT) out[t] = d[0][0][0];
}
static int multiply_with(int mistake)
{
    float *out = device_floats(128), *a = device_floats(2048);
    std::vector<uint16_t> ones(4096, 0x3f80); // 1 in bf16
    cudaMemcpy(a, ones.data(), 8192, cudaMemcpyHostToDevice);
    TT__LAUNCH(multiplies, 1, 128, 8192, 0, out, a, mistake);
    return differs(out, 128, [](int) { return 16.f; });
}
static int wgmma_not_published() { return multiply_with(NO_PUBLISH); }
static int wgmma_without_barrier() { return multiply_with(NO_BARRIER); }
static int wgmma_without_fence() { return multiply_with(NO_FENCE); }
static int wgmma_used_before_wait() { return multiply_with(NO_WAIT); }
static int wgmma_of_overwritten_rows() { return multiply_with(OVERWRITTEN); }
static int wgmma_never_committed() { return multiply_with(NO_COMMIT); }
static int wgmma_by_some_warps() { return multiply_with(APART); }
static int wgmma_of_stores_not_published() { return multiply_with(STORED); }

// ===================================================================================== barriers of phases
enum phase_mistake { NO_INIT, NO_SYNC, NO_PHASE_WAIT, NO_USED_WAIT, TOO_MANY, TOO_FEW, BEFORE_PUBLISH };
__global__ void passes_tiles(float *out, const float *a, int mistake)
{
    TT__DYN_SHARED(bf16, tile);
    TT__SHARED(uint64_t, there, );
    TT__SHARED(uint64_t, used, );
    const int t = threadIdx.x;
    float sum = 0, d[8][4];
    if (t == 0 && mistake != NO_INIT) {
        tt__phases_init(&there, mistake == TOO_FEW ? 129 : 128);
        tt__phases_init(&used, mistake == TOO_MANY ? 64 : 128);
    }
    if (mistake != NO_SYNC) __syncthreads();
    if (t < 128) {
        for (int k = 0; k < 3; k++) {
            if (k > 0 && mistake != NO_USED_WAIT) tt__phases_wait(&used, (k & 1) ^ 1);
            for (int i = 0; i < 4; i++) tt__cp_async_16(tile + (t + 128 * i) * 8, a + (t + 128 * i) * 4);
            tt__phases_arrive_with_copies(&there);
        }
        tt__cp_async_wait<0>();
        return;
    }
    for (int k = 0; k < 3; k++) {
        if (mistake != NO_PHASE_WAIT) tt__phases_wait(&there, k & 1);
        if (mistake != BEFORE_PUBLISH) tt__wgmma_publish();
        tt__wgmma_fence();
        tt__wgmma_rows<bf16>(d, tt__wgmma_matrix(tile), tt__wgmma_matrix(tile), false);
        tt__wgmma_commit();
        tt__wgmma_wait<0>();
        tt__wgmma_done(d);
        tt__phases_arrive(&used);
        sum += d[0][0];
    }
    out[t - 128] = sum;
}
static int pass_with(int mistake)
{
    float *out = device_floats(128), *a = device_floats(2048);
    std::vector<uint16_t> ones(4096, 0x3f80); // 1 in bf16
    cudaMemcpy(a, ones.data(), 8192, cudaMemcpyHostToDevice);
    TT__LAUNCH(passes_tiles, 1, 256, 8192, 0, out, a, mistake);
    return differs(out, 128, [](int) { return 48.f; });
}
static int phases_never_initialised() { return pass_with(NO_INIT); }
static int phases_initialised_too_late() { return pass_with(NO_SYNC); }
static int phase_not_awaited() { return pass_with(NO_PHASE_WAIT); }
static int phase_of_use_not_awaited() { return pass_with(NO_USED_WAIT); }
static int phases_of_too_few_arrivals() { return pass_with(TOO_FEW); }
static int phases_of_too_many_arrivals() { return pass_with(TOO_MANY); }
static int wgmma_of_copies_not_published() { return pass_with(BEFORE_PUBLISH); }

// ===================================================================================== device memory
__global__ void ones(float *out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) out[i] = 1;
}
static int write_out_of_bounds()
{
    float *out = device_floats(100);
    TT__LAUNCH(ones, 2, 64, 0, 0, out, 100);
    return done();
}
__global__ void copy_some(float *out, const float *a, int n)
{
    out[threadIdx.x] = (int)threadIdx.x <= n ? a[threadIdx.x] : 0;
}
static int read_out_of_bounds()
{
    float *out = device_floats(64), *a = device_floats(50);
    TT__LAUNCH(copy_some, 1, 64, 0, 0, out, a, 50);
    return differs(out, 64, [](int) { return 0.f; });
}
static int page_out_of_bounds() // accesses unallocated memory within the device's huge page
{
    float *out = device_floats(64);
    TT__LAUNCH(add, 1, 1, 0, 0, out + (1 << 12), out, 1);
    return done();
}
static int far_out_of_bounds()
{
    float *out = device_floats(64);
    TT__LAUNCH(add, 1, 1, 0, 0, out + (1 << 24), out, 1);
    return done();
}
static int memory_never_written()
{
    float *out = device_floats(64), *a = device_floats(64, false);
    TT__LAUNCH(copy_some, 1, 64, 0, 0, out, a, 64);
    return differs(out, 64, [](int) { return 0.f; });
}
static int use_after_free()
{
    float *out = device_floats(64);
    cudaFree(out);
    TT__LAUNCH(ones, 1, 64, 0, 0, out, 63);
    return done();
}
static int double_free()
{
    float *out = device_floats(64);
    cudaFree(out);
    cudaFree(out);
    return 0;
}
static int peer_access_not_enabled()
{
    float *a = device_floats(64);
    cudaSetDevice(1);
    float *b = device_floats(64);
    TT__LAUNCH(add, 1, 64, 0, 0, b, a, 64);
    return done();
}
static int host_reads_device_memory()
{
    volatile float *a = device_floats(64);
    return a[3] != 0;
}
static int kernel_reads_host_memory()
{
    float *out = device_floats(64);
    std::vector<float> h(64, 1.0f);
    // A CPU has one address space, so the result looks right.
    TT__LAUNCH(copy_some, 1, 64, 0, 0, out, h.data(), 64);
    return differs(out, 64, [](int) { return 1.f; });
}
__global__ void one_number(float *out) { if (threadIdx.x == 0) out[0] = (float)blockIdx.x; }
static int blocks_write_one_address()
{
    float *out = device_floats(1);
    TT__LAUNCH(one_number, 3, 32, 0, 0, out);
    return differs(out, 1, [](int) { return 2.f; });
}
__global__ void reset_and_add(float *out)
{
    if (threadIdx.x == 0) out[0] = 0;
    atomicAdd(out, 1.f);
}
static int plain_and_atomic()
{
    float *out = device_floats(1);
    TT__LAUNCH(reset_and_add, 1, 64, 0, 0, out);
    return differs(out, 1, [](int) { return 64.f; });
}
// Breaks rule 4 of cuda_emu.h: the last block to arrive does the reduction.
__global__ void last_block(float *out, float *part, unsigned *count)
{
    if (threadIdx.x) return;
    part[blockIdx.x] = 1;
    __threadfence();
    if (atomicAdd(count, 1u) != gridDim.x - 1) return;
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x; i++) sum += part[i];
    *out = sum;
}
static int last_block_reduces()
{
    float *out = device_floats(1), *part = device_floats(8);
    TT__LAUNCH(last_block, 8, 32, 0, 0, out, part, (unsigned *)device_floats(1));
    return done();
}
__global__ void misaligned(float *out, int by)
{
    float4 v = *(const float4 *)(out + by);
    out[0] = v.x;
}
static int misaligned_vector()
{
    float *out = device_floats(64);
    TT__LAUNCH(misaligned, 1, 1, 0, 0, out, 1 + zero);
    return done();
}
__global__ void squared(float *out, int n)
{
    int i = (int)threadIdx.x + n;
    out[(i * i) & 1] = 1;
}
static int signed_overflow()
{
    float *out = device_floats(64);
    TT__LAUNCH(squared, 1, 1, 0, 0, out, 1 << 20);
    return done();
}
OPAQUE static void recurse(float *out, int depth)
{
    volatile float x[64];
    x[depth & 63] = out[0];
    if (depth < 1000000) recurse(out, depth + 1);
    out[1] = x[depth & 63];
}
__global__ void deep(float *out) { recurse(out, zero); }
static int stack_overflow()
{
    float *out = device_floats(64);
    TT__LAUNCH(deep, 1, 1, 0, 0, out);
    return done();
}
__global__ void waits_for_ever(const float *a)
{
    while (*(volatile const float *)a == 0) {}
}
static int spin()
{
    float *a = device_floats(64);
    TT__LAUNCH(waits_for_ever, 1, 1, 0, 0, a);
    return done();
}

// ===================================================================================== order of operations
static int consumer(cudaEvent_t e) // the consumer runs on another stream than the producer
{
    const int n = 4096;
    float *a = device_floats(n), *b = device_floats(n);
    cudaStream_t s = new_stream(), t = new_stream();
    TT__LAUNCH(fill, 4, 64, 0, s, a, n, 0, 1);
    if (e) cudaStreamWaitEvent(t, e, 0);
    cudaMemcpyAsync(b, a, n * sizeof(float), cudaMemcpyDeviceToDevice, t);
    cudaStreamSynchronize(s);
    cudaStreamSynchronize(t);
    return differs(b, n, [](int i) { return (float)((i * 7 + 5) % 101); });
}
static int missing_event() { return consumer(nullptr); }
static int event_never_recorded()
{
    cudaEvent_t e;
    cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
    return consumer(e);
}
static int missing_join_in_graph()
{
    const int n = 512;
    float *a = device_floats(n), *b = device_floats(n);
    cudaStream_t s = new_stream(), t = new_stream();
    cudaEvent_t fork, join;
    cudaGraph_t g = nullptr;
    cudaGraphExec_t x = nullptr;
    cudaEventCreateWithFlags(&fork, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&join, cudaEventDisableTiming);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    cudaEventRecord(fork, s);
    cudaStreamWaitEvent(t, fork, 0);
    TT__LAUNCH(fill, 2, 64, 0, t, b, n, 0, 0);
    cudaEventRecord(join, t);
    TT__LAUNCH(add, 2, 64, 0, s, a, b, n); // the launch comes before the join
    cudaStreamWaitEvent(s, join, 0);
    cudaStreamEndCapture(s, &g);
    cudaGraphInstantiate(&x, g, 0);
    cudaGraphLaunch(x, s);
    cudaStreamSynchronize(s);
    return differs(a, n, [](int i) { return (float)(i * 7 % 101); });
}
static int pinned_source_overwritten()
{
    const int n = 64;
    float *a = device_floats(n), *p;
    cudaMallocHost(&p, n * sizeof(float));
    cudaStream_t s = new_stream();
    for (int i = 0; i < n; i++) p[i] = 1;
    cudaMemcpyAsync(a, p, n * sizeof(float), cudaMemcpyHostToDevice, s);
    for (int i = 0; i < n; i++) p[i] = 2;
    cudaStreamSynchronize(s);
    return differs(a, n, [](int) { return 1.f; });
}
static int pinned_result_read_early()
{
    const int n = 64;
    float *a = device_floats(n), *p;
    int bad = 0;
    cudaMallocHost(&p, n * sizeof(float));
    cudaStream_t s = new_stream();
    cudaMemcpyAsync(p, a, n * sizeof(float), cudaMemcpyDeviceToHost, s);
    for (int i = 0; i < n; i++) bad |= !(p[i] == 0);
    cudaStreamSynchronize(s);
    return bad;
}
// The host uses managed memory that a running kernel may use.
static int managed_during_a_kernel()
{
    const int n = 64;
    float *a;
    cudaMallocManaged(&a, n * sizeof(float));
    cudaStream_t s = new_stream();
    a[0] = 1; // allowed: no operation is in flight
    TT__LAUNCH(fill, 2, 64, 0, s, a, n, 0, 0);
    a[n - 1] = 1;
    cudaStreamSynchronize(s);
    return differs(a, n, [](int i) { return (float)(i * 7 % 101); });
}
static int workspace_of_two_streams()
{
    const int n = 16;
    const float one = 1, nothing = 0;
    float *a = device_floats(256), *b = device_floats(256), *c[2] = {device_floats(256), device_floats(256)},
          *workspace = device_floats(64);
    cublasHandle_t h;
    cublasCreate(&h);
    for (int i = 0; i < 2; i++) {
        cublasSetStream(h, new_stream());
        cublasSetWorkspace(h, workspace, 256);
        cublasGemmEx(h, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, a, CUDA_R_32F, n, b, CUDA_R_32F, n, &nothing,
                     c[i], CUDA_R_32F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    }
    return done();
}
static int product_out_of_bounds()
{
    const float one = 1, nothing = 0;
    float *a = device_floats(255), *b = device_floats(256), *c = device_floats(256);
    cublasHandle_t h;
    cublasCreate(&h);
    cublasGemmEx(h, CUBLAS_OP_N, CUBLAS_OP_N, 16, 16, 16, &one, a, CUDA_R_32F, 16, b, CUDA_R_32F, 16,
                 &nothing, c, CUDA_R_32F, 16, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return done();
}
// cudaFree waits for its own device, but not for a peer that writes to the freed memory
static int freed_under_a_peers_copy()
{
    float *a = device_floats(4096);
    cudaSetDevice(1);
    float *b = device_floats(4096);
    cudaStream_t s = new_stream();
    cudaMemcpyPeerAsync(a, 0, b, 1, 4096 * sizeof(float), s);
    cudaSetDevice(0);
    cudaFree(a);
    cudaSetDevice(1);
    return cudaStreamSynchronize(s) != cudaSuccess;
}
// A kernel loads from pinned memory to which another device copies, before the kernel or, if `late`, after
// the kernel. Nothing orders the copy and the kernel.
static int pinned_between_devices(bool late)
{
    enum { N = 64 };
    float *pinned, *a = device_floats(N);
    cudaStream_t s = new_stream();
    cudaHostAlloc(&pinned, N * sizeof(float), cudaHostAllocPortable);
    memset(pinned, 0, N * sizeof(float));
    if (!late) TT__LAUNCH(ones, 1, N, 0, s, a, N - 1);
    if (!late) cudaMemcpyAsync(pinned, a, N * sizeof(float), cudaMemcpyDeviceToHost, s);
    cudaSetDevice(1);
    float *b = device_floats(N);
    cudaStream_t t = new_stream();
    TT__LAUNCH(copy_some, 1, N, 0, t, b, pinned, N);
    cudaSetDevice(0);
    if (late) TT__LAUNCH(ones, 1, N, 0, s, a, N - 1);
    if (late) cudaMemcpyAsync(pinned, a, N * sizeof(float), cudaMemcpyDeviceToHost, s);
    cudaStreamSynchronize(s);
    cudaSetDevice(1);
    cudaStreamSynchronize(t);
    return differs(b, N, [late](int) { return late ? 0.f : 1.f; });
}
static int pinned_loaded_early() { return pinned_between_devices(false); }
static int pinned_overwritten_early() { return pinned_between_devices(true); }
static void calls_cuda(void *) { cudaDeviceSynchronize(); }
static int cuda_call_in_host_function()
{
    cudaLaunchHostFunc(new_stream(), calls_cuda, nullptr);
    return done();
}

// ===================================================================================== the table
// The expected message in each build: a part of its text, or several parts with | between them. After a ~
// only some seeds must produce the message; otherwise all seeds must. nullptr: nothing is promised.
struct death { const char *name; int (*run)(); const char *plain, *asan, *trace; };
#define DEATH(name, plain, asan, trace) {#name, name, plain, asan, trace}
static const death deaths[] = {
    DEATH(chained_without_wait, "never waited for the kernel before", "never waited for the kernel before",
          "before tt__begin_kernel"),
    DEATH(chained_that_reads_before, nullptr, nullptr, "before tt__begin_kernel"),
    DEATH(missing_syncthreads, "~wrong result", "~wrong result",
          "RACE between threads: read at death.cu|was never written"),
    DEATH(write_after_read, "~wrong result", "~wrong result", "RACE between threads"),
    DEATH(missing_syncwarp, nullptr, nullptr, "RACE between threads: read at death.cu|was never written"),
    DEATH(exit_before_barrier, "divergence: no thread", "divergence: no thread", "divergence: no thread"),
    DEATH(barrier_in_branches, "divergent __syncthreads", "divergent __syncthreads",
          "divergent __syncthreads"),
    DEATH(shuffle_in_a_branch, "a shuffle at death.cu", "a shuffle at death.cu", "a shuffle at death.cu"),
    DEATH(shared_never_written, "wrong result", "wrong result",
          "was never written: byte 252 of shared memory 's'"),
    DEATH(shared_out_of_bounds, nullptr, "index 64 out of bounds|use-after-poison",
          "shared memory out of bounds: write of 4 bytes at death.cu"),
    DEATH(shared_sum_too_large, "more than 48 KiB", "more than 48 KiB", "more than 48 KiB"),
    DEATH(cp_async_read_before_wait, "wrong result", "wrong result", "was never written"),
    DEATH(cp_async_without_barrier, "~wrong result", "~wrong result",
          "RACE between threads|was never written"),
    DEATH(cp_async_never_awaited, "never waited for", "never waited for", "never waited for"),
    DEATH(cp_async_into_a_live_stage, "~wrong result", "~wrong result", "RACE between threads"),
    DEATH(ldmatrix_without_barrier, "~wrong result", "~wrong result",
          "RACE between threads: read at|was never written"),
    DEATH(ldmatrix_misaligned, "not aligned to 16 bytes", "not aligned to 16 bytes",
          "not aligned to 16 bytes"),
    DEATH(wgmma_not_published, "no tt__wgmma_publish", "no tt__wgmma_publish", "no tt__wgmma_publish"),
    DEATH(wgmma_without_barrier, "~wrong result|no tt__wgmma_publish", "~wrong result|no tt__wgmma_publish",
          "RACE between threads|was never written|no tt__wgmma_publish"),
    DEATH(wgmma_without_fence, "without a tt__wgmma_fence", "without a tt__wgmma_fence",
          "without a tt__wgmma_fence"),
    DEATH(wgmma_used_before_wait, "wrong result", "wrong result", "wrong result"),
    DEATH(wgmma_of_overwritten_rows, "~wrong result|no tt__wgmma_publish",
          "~wrong result|no tt__wgmma_publish", "RACE between threads|~wrong result|no tt__wgmma_publish"),
    DEATH(wgmma_never_committed, "never waited for", "never waited for", "never waited for"),
    DEATH(wgmma_by_some_warps, "warps of a group made", "warps of a group made", "warps of a group made"),
    DEATH(wgmma_of_stores_not_published, "no tt__wgmma_publish", "no tt__wgmma_publish",
          "no tt__wgmma_publish"),
    DEATH(phases_never_initialised, "never initialised", "never initialised", "never initialised"),
    DEATH(phases_initialised_too_late, "never initialised|no __syncthreads behind",
          "never initialised|no __syncthreads behind", "never initialised|no __syncthreads behind"),
    DEATH(phase_not_awaited, "wrong result|no tt__wgmma_publish|no thread of the block can run",
          "wrong result|no tt__wgmma_publish|no thread of the block can run",
          "wrong result|no tt__wgmma_publish|no thread of the block can run|was never written|RACE"),
    DEATH(phase_of_use_not_awaited, "~wrong result|no tt__wgmma_publish|no thread of the block can run",
          "~wrong result|no tt__wgmma_publish|no thread of the block can run",
          "~wrong result|no tt__wgmma_publish|RACE between threads|no thread of the block can run"),
    DEATH(phases_of_too_few_arrivals, "no thread of the block can run", "no thread of the block can run",
          "no thread of the block can run"),
    DEATH(phases_of_too_many_arrivals, "~wrong result|no tt__wgmma_publish|no thread of the block can run",
          "~wrong result|no tt__wgmma_publish|no thread of the block can run",
          "~wrong result|no tt__wgmma_publish|RACE between threads|no thread of the block can run"),
    DEATH(wgmma_of_copies_not_published, "no tt__wgmma_publish", "no tt__wgmma_publish",
          "no tt__wgmma_publish"),
    DEATH(write_out_of_bounds, "write out of bounds of allocation 0", "use-after-poison", "OUT OF BOUNDS"),
    DEATH(read_out_of_bounds, "wrong result", "use-after-poison", "OUT OF BOUNDS"),
    DEATH(page_out_of_bounds, "far beyond", "far beyond", "far beyond"),
    DEATH(far_out_of_bounds, "far beyond", "far beyond", "far beyond"),
    DEATH(memory_never_written, "wrong result", "wrong result", "was never written"),
    DEATH(use_after_free, nullptr, "use-after-poison", "FREED"),
    DEATH(double_free, "freed already", "freed already", "freed already"),
    DEATH(peer_access_not_enabled, "peer access", "peer access", "peer access"),
    DEATH(host_reads_device_memory, "HOST code", "HOST code", "HOST code"),
    DEATH(kernel_reads_host_memory, nullptr, nullptr, "memory of the host that is not pinned"),
    DEATH(blocks_write_one_address, "~wrong result", "~wrong result", "RACE between blocks"),
    DEATH(plain_and_atomic, "~wrong result", "~wrong result", "RACE between threads"),
    DEATH(last_block_reduces, nullptr, nullptr, "RACE between blocks"),
#ifdef __clang__ // clang's sanitizer does not check copies of whole structures
    DEATH(misaligned_vector, nullptr, nullptr, nullptr),
#else
    DEATH(misaligned_vector, nullptr, "misaligned address", nullptr),
#endif
    DEATH(signed_overflow, nullptr, "signed integer overflow", nullptr),
    DEATH(stack_overflow, "stack is full", "emu error: illegal access", "stack is full"),
    DEATH(spin, "endless loop", "endless loop", "endless loop"),
    DEATH(missing_event, "~wrong result", "~wrong result", "RACE between operations"),
    DEATH(event_never_recorded, "~wrong result", "~wrong result", "RACE between operations"),
    DEATH(missing_join_in_graph, "~wrong result", "~wrong result", "RACE between operations"),
    DEATH(pinned_source_overwritten, "~wrong result", "~wrong result",
          "RACE of the host with the device: write at death.cu"),
    DEATH(pinned_result_read_early, "~wrong result", "~wrong result",
          "RACE of the host with the device: read at death.cu"),
    DEATH(managed_during_a_kernel, "managed memory, and has not waited for operation fill",
          "managed memory, and has not waited for operation fill",
          "managed memory, and has not waited for operation fill"),
    DEATH(workspace_of_two_streams, "~do two streams share it", "~do two streams share it",
          "~RACE between operations"),
    DEATH(product_out_of_bounds, "A is not within", "A is not within", "A is not within"),
    DEATH(freed_under_a_peers_copy, nullptr, "~use-after-poison", "~FREED"),
    DEATH(pinned_loaded_early, "~wrong result", "~wrong result", "RACE between operations"),
    DEATH(pinned_overwritten_early, "~wrong result", "~wrong result", "RACE between operations"),
    DEATH(cuda_call_in_host_function, "where CUDA forbids it", "where CUDA forbids it",
          "where CUDA forbids it"),
};

static std::string output_of(const death &d, uint64_t seed, int *status)
{
    std::string out;
    char part[1024];
    int ends[2];
    ssize_t n;
    if (pipe(ends) != 0) return "no pipe";
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        close(ends[0]);
        dup2(ends[1], 2);
        if (d.run == spin) setenv("EMU_WATCHDOG", "1", 1);
        emu_configure(2, (size_t)8 << 20, 1, seed);
        int wrong = d.run();
        if (wrong) fprintf(stderr, "wrong result\n");
        _exit(wrong ? 3 : 0);
    }
    close(ends[1]);
    while ((n = read(ends[0], part, sizeof part)) > 0) out.append(part, (size_t)n);
    close(ends[0]);
    waitpid(child, status, 0);
    return out;
}

static bool holds_one_of(std::string text, std::string parts)
{
    // Takes the folder out of a message, because only some messages contain the folder.
    const std::string folder = std::string(__FILE__).substr(0, std::string(__FILE__).find_last_of('/') + 1);
    for (size_t at = folder.empty() ? std::string::npos : text.find(folder); at != std::string::npos;
         at = text.find(folder))
        text.erase(at, folder.size());
#if defined(__aarch64__) // expects no source lines, because the tool that finds lines may be missing
    for (size_t at = parts.find(" at death.cu"); at != std::string::npos; at = parts.find(" at death.cu")) {
        parts.erase(at, parts.find_first_of(" |", at + 4) == std::string::npos
                            ? std::string::npos
                            : parts.find_first_of(" |", at + 4) - at);
    }
#endif
    for (size_t begin = 0, end; begin <= parts.size(); begin = end + 1) {
        end = std::min(parts.find('|', begin), parts.size());
        if (text.find(parts.substr(begin, end - begin)) != std::string::npos) return true;
    }
    return false;
}

static const death *running; // the test to run: tests of test.h have no argument
static bool show; // -v: print the messages
TEST(dies)
{
    const bool plain = strcmp(emu_build(), "plain") == 0, asan = strcmp(emu_build(), "asan") == 0;
    const char *expected = plain ? running->plain : asan ? running->asan : running->trace;
    const uint64_t seeds = running->run == spin ? 1 : plain ? 24 : 5;
    bool some = expected && *expected == '~';
    uint64_t found = 0;
    std::string last;
    if (!expected) SKIP("this build does not promise to see it");
    for (uint64_t seed = 0; seed < seeds; seed++) {
        int status = 0;
        std::string out = output_of(*running, seed, &status);
        bool here = holds_one_of(out, expected + some);
        if (out.find("emu error") != std::string::npos) CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 86);
        found += here;
        if (!here || last.empty()) last = out;
        if (here && show && found == 1) printf("%s", out.c_str());
        if (some && found) break;
    }
    char text[1200];
    snprintf(text, sizeof text, "expected \"%s\" in %s seed, seen in %d of %d; the last one said: %.700s",
             expected + some, some ? "a" : "every", (int)found, (int)seeds, last.c_str());
    for (char *p = text; *p; p++) if (*p == '\n') *p = ' ';
    test__check(some ? found > 0 : found == seeds, __FILE__, __LINE__, text);
}

int main(int argc, char **argv) // does what test_main does; -v prints a message of each program
{
    int passed = 0, failed = 0, skipped = 0;
    if (argc > 1 && strcmp(argv[1], "-v") == 0) {
        show = true;
        argc--;
        argv++;
    }
    for (auto &d : deaths) {
        bool wanted = argc < 2;
        for (int k = 1; k < argc; k++) wanted = wanted || test__match(argv[k], d.name);
        if (!wanted) continue;
        running = &d;
        test__state.failed_checks = 0;
        test__state.skipped[0] = 0;
        dies();
        if (test__state.failed_checks) printf("FAILED %s: %s\n", d.name, test__state.failure);
        else if (test__state.skipped[0]) printf("skip %s: %s\n", d.name, test__state.skipped);
        else printf("ok %s\n", d.name);
        passed += !test__state.failed_checks && !test__state.skipped[0];
        failed += test__state.failed_checks != 0;
        skipped += !test__state.failed_checks && test__state.skipped[0];
        fflush(stdout);
    }
    printf("%ld checks, %d skipped: %d passed, %d failed\n", test__state.checks, skipped, passed, failed);
    return failed ? 1 : 0;
}
