// test_emu.cu - tests the emulator against CUDA's rules: layouts of fragments, conversions, order of
// operations, captures, errors, matrix products. The tests that set nothing in the emulator also build with
// nvcc, and then test the portability block on a GPU.
#define SAMPLE_WITHOUT_TESTS
#include "sample.cu"
#include <cuda_fp8.h>
#include <thread>

struct stream { // owns a stream: the destructor destroys the stream
    cudaStream_t s = nullptr;
    stream() { OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking)); }
    ~stream() { OK(cudaStreamDestroy(s)); }
    operator cudaStream_t() const { return s; }
};
struct event {
    cudaEvent_t e = nullptr;
    explicit event(unsigned flags = cudaEventDisableTiming) { OK(cudaEventCreateWithFlags(&e, flags)); }
    ~event() { OK(cudaEventDestroy(e)); }
    operator cudaEvent_t() const { return e; }
};

// ============================================================================= conversions
// FNV-1a over the results for every 16-bit pattern, and for floats at a fixed stride through all 2^32
// patterns. The expected numbers are the results of this function with NVIDIA's headers (CUDA 13.0, host
// code).
static uint64_t conversion_hash(int which)
{
    uint64_t h = 14695981039346656037ull;
    auto mix = [&](uint32_t v) { h = (h ^ v) * 1099511628211ull; };
    auto bits = [](float f) { uint32_t u; memcpy(&u, &f, 4); return u; };
    if (which < 2) {
        for (uint32_t i = 0; i < 65536; i++) {
            __half half_value;
            bf16 bf16_value;
            uint16_t u = (uint16_t)i;
            memcpy((void *)&half_value, &u, 2);
            memcpy((void *)&bf16_value, &u, 2);
            mix(bits(which ? __bfloat162float(bf16_value) : __half2float(half_value)));
        }
    } else if (which < 4) {
        for (uint32_t i = 0; i < 256; i++)
            mix(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)i, which == 2 ? __NV_E4M3 : __NV_E5M2).x);
    } else {
        for (uint64_t i = 0; i < (1ull << 32); i += 4093) { // 4093 is a prime, so that low bits vary as well
            for (uint32_t k = 0; k < 3; k++) {
                // For k 1, `u` is near the middle between two halves; for k 2, between two bf16 numbers.
                uint32_t u = (uint32_t)i + (k == 0 ? 0
                                            : k == 1 ? 0x1000 - (uint32_t)i % 0x2000
                                            : 0x8000 - (uint32_t)i % 0x10000),
                         r = 0;
                float f;
                memcpy(&f, &u, 4);
                __half half_value = which == 4 ? __float2half_rn(f) : __float2half_rz(f);
                bf16 bf16_value = which == 6 ? __float2bfloat16_rn(f) : __float2bfloat16_rz(f);
                if (which <= 5) memcpy(&r, &half_value, 2);
                else if (which <= 7) memcpy(&r, &bf16_value, 2);
                else
                    r = __nv_cvt_float_to_fp8(f, which & 1 ? __NV_SATFINITE : __NV_NOSAT,
                                              which < 10 ? __NV_E4M3 : __NV_E5M2);
                mix(r);
            }
        }
    }
    return h;
}
static const uint64_t nvidia_hashes[12] = {
    0xd7627f0627e7a325ull, 0x93eccfede36e2325ull, 0xa3c242b6a034e225ull, 0xae4d45d55e578925ull,
    0x41e31bc9a01c5566ull, 0x86cf792cea1dcb25ull, 0xbc0e649e8b9d9afaull, 0xabe094199d449814ull,
    0xd71bc991f0669f59ull, 0xe115d2e93981d3f7ull, 0x0ac0f2ffb9c17635ull, 0x11421a2d861749e8ull,
};
TEST(conversions_have_the_bits_of_nvidias)
{
    for (int which = 0; which < 12; which++) {
        if (!CHECK(conversion_hash(which) == nvidia_hashes[which])) printf("conversion %d\n", which);
    }
    CHECK(sizeof(__nv_fp8_e4m3) == 1 && sizeof(bf16) == 2 && sizeof(__half2) == 4);
    CHECK((float)__nv_fp8_e4m3(1000.0f) == 448 && (float)__nv_fp8_e5m2(1e6f) == 57344);
}

// ============================================================================= fragments
// One warp multiplies a (16, K) and b (K, 8), both row-major in device memory, with fragments loaded by the
// formulas of the PTX manual.
template <class T> __global__ void mma_by_formula(float *d, const T *a, const T *b)
{
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t fa[4], fb[2];
    float fd[4] = {1, 2, 3, 4};
    for (int i = 0; i < 4; i++) {
        T pair[2] = {a[(g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8],
                     a[(g + i % 2 * 8) * 16 + 2 * t + 1 + i / 2 * 8]};
        memcpy(&fa[i], pair, 4);
    }
    for (int i = 0; i < 2; i++) {
        T pair[2] = {b[(2 * t + i * 8) * 8 + g], b[(2 * t + 1 + i * 8) * 8 + g]};
        memcpy(&fb[i], pair, 4);
    }
    tt__mma_16816<T>(fd, fa, fb);
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = fd[i] - (float)(1 + i);
}
__global__ void mma_tf32_by_formula(float *d, const float *a, const float *b)
{
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t fa[4] = {tt__tf32(a[g * 8 + t]), tt__tf32(a[(g + 8) * 8 + t]), tt__tf32(a[g * 8 + t + 4]),
                      tt__tf32(a[(g + 8) * 8 + t + 4])};
    uint32_t fb[2] = {tt__tf32(b[t * 8 + g]), tt__tf32(b[(t + 4) * 8 + g])};
    float fd[4] = {};
    tt__mma_1688_tf32(fd, fa, fb);
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = fd[i];
}
static float to_float(bf16 v) { return __bfloat162float(v); }
static float to_float(__half v) { return __half2float(v); }
static float to_float(float v) { return v; }
template <class T>
static void check_product(const buffer<float> &d, const buffer<T> &a, const buffer<T> &b, int K)
{
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 8; j++) {
            double sum = 0;
            for (int k = 0; k < K; k++)
                sum += (double)to_float(a.host[(size_t)(i * K + k)]) * to_float(b.host[(size_t)(k * 8 + j)]);
            CHECK_NEAR(d.host[(size_t)(i * 8 + j)], sum, 1e-3);
        }
    }
}
TEST(mma_fragments_lie_as_the_manual_says)
{
    FOR_SEEDS(5, 1, 1) {
        buffer<bf16> a(256), b(128);
        buffer<__half> ha(256), hb(128);
        buffer<float> fa(128), fb(64), d(128);
        randomise(a);
        randomise(b);
        for (size_t i = 0; i < 256; i++) ha.host[i] = __float2half_rn(random_number());
        for (size_t i = 0; i < 128; i++) hb.host[i] = __float2half_rn(random_number());
        for (auto &v : fa.host) v = (float)(int)(random_number() * 500); // integers, which are exact in TF32
        for (auto &v : fb.host) v = (float)(int)(random_number() * 500);
        ha.up();
        hb.up();
        fa.up();
        fb.up();
        OK(TT__LAUNCH(mma_by_formula<bf16>, 1, 32, 0, 0, d.device, a.device, b.device));
        d.down();
        check_product(d, a, b, 16);
        OK(TT__LAUNCH(mma_by_formula<__half>, 1, 32, 0, 0, d.device, ha.device, hb.device));
        d.down();
        check_product(d, ha, hb, 16);
        OK(TT__LAUNCH(mma_tf32_by_formula, 1, 32, 0, 0, d.device, fa.device, fb.device));
        d.down();
        check_product(d, fa, fb, 8);
    }
}
TEST(tf32_rounds_to_nearest_away_from_zero)
{
#ifdef TT_EMULATE
    CHECK(tt__tf32(1.0f) == 0x3f800000);
    CHECK(tt__tf32(1.0f + 0x1p-11f) == 0x3f802000); // a tie, which rounds away from zero
    CHECK(tt__tf32(-1.0f - 0x1p-11f) == 0xbf802000);
    CHECK(tt__tf32(1.0f + 0x1p-12f) == 0x3f800000);
#else
    SKIP("tt__tf32 is device code");
#endif
}

// The kernel wgmma_by_formula has a block of two warpgroups, which compute `a b^T + a c + a^T c` of matrices
// of shape (64, 64). The operand `a` of `a c` is in registers. The product `a^T c` is issued without a wait
// for the other two products.
template <class T> __device__ void put_swizzled(T *tile, const T *from)
{
    for (int i = threadIdx.x; i < 64 * 8; i += 256) {
        const int row = i / 8, part = i % 8;
        for (int j = 0; j < 8; j++) tile[row * 64 + (part ^ row % 8) * 8 + j] = from[row * 64 + part * 8 + j];
    }
}
template <class T> __global__ void wgmma_by_formula(float *d, const T *a, const T *b, const T *c)
{
#if defined(TT_EMULATE) || !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    TT__DYN_SHARED(T, shared);
    T *as = shared + (-tt__shared_address(shared) & 1023) / sizeof(T), *bs = as + 64 * 64, *cs = bs + 64 * 64;
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
    float sum[8][4], more[8][4];
    uint32_t rows[4][4];
    put_swizzled(as, a);
    put_swizzled(bs, b);
    put_swizzled(cs, c);
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 4; i++) {
            const T *from = a + (warp * 16 + g + i % 2 * 8) * 64 + k * 16 + 2 * t + i / 2 * 8;
            memcpy(&rows[k][i], from, 4);
        }
    tt__wgmma_publish();
    __syncthreads();
    tt__wgmma_fence();
    for (int k = 0; k < 64; k += 16)
        tt__wgmma_rows<T>(sum, tt__wgmma_matrix(as + k), tt__wgmma_matrix(bs + k), k > 0);
    for (int k = 0; k < 4; k++) tt__wgmma_add<T>(sum, rows[k], tt__wgmma_matrix(cs + k * 16 * 64));
    tt__wgmma_commit();
    for (int k = 0; k < 64 * 64; k += 16 * 64)
        tt__wgmma_across<T>(more, tt__wgmma_matrix(as + k), tt__wgmma_matrix(cs + k), k > 0);
    tt__wgmma_commit();
    tt__wgmma_wait<1>();
    tt__wgmma_done(sum);
    float *to = d + group * 4096 + (warp * 16 + g) * 64 + 2 * t;
    for (int n = 0; n < 8; n++)
        for (int i = 0; i < 4; i++) to[i / 2 * 8 * 64 + 8 * n + i % 2] = sum[n][i];
    tt__wgmma_wait<0>();
    tt__wgmma_done(more);
    for (int n = 0; n < 8; n++)
        for (int i = 0; i < 4; i++) to[i / 2 * 8 * 64 + 8 * n + i % 2] += more[n][i];
#endif
}
template <class T> static void check_wgmma(const buffer<T> &a, const buffer<T> &b, const buffer<T> &c)
{
    buffer<float> d(2 * 4096);
    OK(cudaFuncSetAttribute(wgmma_by_formula<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, 25 * 1024));
    OK(TT__LAUNCH(wgmma_by_formula<T>, 1, 256, 25 * 1024, 0, d.device, a.device, b.device, c.device));
    d.down();
    for (size_t i = 0; i < 2 * 4096; i++) {
        const size_t row = i % 4096 / 64, column = i % 64;
        double sum = 0;
        for (size_t k = 0; k < 64; k++)
            sum += (double)to_float(a.host[row * 64 + k]) *
                ((double)to_float(b.host[column * 64 + k]) + to_float(c.host[k * 64 + column])) +
                (double)to_float(a.host[k * 64 + row]) * (double)to_float(c.host[k * 64 + column]);
        CHECK_NEAR(d.host[i], sum, 1e-3);
    }
}
TEST(wgmma_reads_and_leaves_what_the_manual_says)
{
    cudaDeviceProp p;
    OK(cudaGetDeviceProperties(&p, 0));
    if (p.major != 9) SKIP("the device has no wgmma");
    FOR_SEEDS(5, 1, 1) {
        buffer<bf16> a(4096), b(4096), c(4096);
        buffer<__half> ha(4096), hb(4096), hc(4096);
        randomise(a);
        randomise(b);
        randomise(c);
        for (buffer<__half> *h : {&ha, &hb, &hc}) {
            for (auto &v : h->host) v = __float2half_rn(random_number());
            h->up();
        }
        check_wgmma(a, b, c);
        check_wgmma(ha, hb, hc);
    }
}

// One warp copies tiles of 128 floats, at most two tiles ahead of the warps that read them. Three other warps
// add the tiles up, each in its own order.
__global__ void adds_tiles(float *out, const float *in, int tiles)
{
#if defined(TT_EMULATE) || !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    TT__SHARED(float, tile, [2][128]);
    TT__SHARED(float, factor, [2]);
    TT__SHARED(uint64_t, there, [2]);
    TT__SHARED(uint64_t, used, [2]);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x < 2) {
        tt__phases_init(&there[threadIdx.x], 33);
        tt__phases_init(&used[threadIdx.x], 3);
    }
    __syncthreads();
    if (warp == 0) {
        for (int k = 0; k < tiles; k++) {
            if (k >= 2) tt__phases_wait(&used[k % 2], (k / 2 & 1) ^ 1);
            tt__cp_async_16(&tile[k % 2][4 * lane], in + 128 * k + 4 * lane);
            tt__phases_arrive_with_copies(&there[k % 2]);
            if (lane > 0) continue;
            factor[k % 2] = (float)(k + 1);
            tt__phases_arrive(&there[k % 2]);
        }
        tt__cp_async_wait<0>();
        return;
    }
    float sum = 0;
    for (int k = 0; k < tiles; k++) {
        tt__phases_wait(&there[k % 2], k / 2 & 1);
        for (int i = 0; i < 4; i++) sum += factor[k % 2] * tile[k % 2][(lane + 32 * i + warp) % 128];
        __syncwarp();
        if (lane == 0) tt__phases_arrive(&used[k % 2]);
    }
    out[(warp - 1) * 32 + lane] = sum;
#endif
}
TEST(phases_end_with_the_last_arrival)
{
    enum { TILES = 7 };
    cudaDeviceProp p;
    OK(cudaGetDeviceProperties(&p, 0));
    if (p.major != 9) SKIP("the device has no such kernels");
    FOR_SEEDS(20, 1, 1) {
        buffer<float> in(128 * TILES), out(96);
        for (size_t i = 0; i < in.host.size(); i++) in.host[i] = (float)(i * 37 % 101);
        in.up();
        OK(TT__LAUNCH(adds_tiles, 1, 128, 0, 0, out.device, in.device, (int)TILES));
        out.down();
        for (size_t i = 0; i < 96; i++) {
            float sum = 0;
            for (size_t k = 0; k < TILES; k++)
                for (size_t j = 0; j < 4; j++)
                    sum += (float)(k + 1) * in.host[128 * k + (i % 32 + 32 * j + i / 32 + 1) % 128];
            CHECK(out.host[i] == sum);
        }
    }
}

// Tests each form of ldmatrix, which loads 1, 2 or 4 matrices of 8 x 8. In `out[matrix][lane]` the kernel
// stores the two numbers that ldmatrix gives to the lane. The array `in` of shape (32, 8) holds four
// matrices, one below another.
__global__ void ldmatrix_all(uint32_t *out, const uint16_t *in)
{
    TT__SHARED(uint16_t, tile, [32][8]);
    int lane = threadIdx.x;
    for (int k = 0; k < 8; k++) tile[lane][k] = in[lane * 8 + k];
    __syncthreads();
    uint32_t r1[2], r2[2][2], r4[2][4];
    tt__ldmatrix_x1(r1[0], tile[lane % 8]);
    tt__ldmatrix_x1_trans(r1[1], tile[lane % 8]);
    tt__ldmatrix_x2(r2[0], tile[lane % 16]);
    tt__ldmatrix_x2_trans(r2[1], tile[lane % 16]);
    tt__ldmatrix_x4(r4[0], tile[lane]);
    tt__ldmatrix_x4_trans(r4[1], tile[lane]);
    for (int trans = 0; trans < 2; trans++) {
        uint32_t *o = out + trans * 7 * 32;
        o[lane] = r1[trans];
        for (int i = 0; i < 2; i++) o[(1 + i) * 32 + lane] = r2[trans][i];
        for (int i = 0; i < 4; i++) o[(3 + i) * 32 + lane] = r4[trans][i];
    }
}
TEST(ldmatrix_gives_each_lane_its_part)
{
    FOR_SEEDS(5, 1, 1) {
        buffer<uint16_t> in(256);
        buffer<uint32_t> out(2 * 7 * 32);
        for (size_t i = 0; i < 256; i++) in.host[i] = (uint16_t)(i * 257 + 3);
        in.up();
        OK(TT__LAUNCH(ldmatrix_all, 1, 32, 0, 0, out.device, in.device));
        out.down();
        for (int trans = 0; trans < 2; trans++) {
            for (int load = 0; load < 7; load++) {
                int matrix = load == 0 ? 0 : load < 3 ? load - 1 : load - 3;
                for (int lane = 0; lane < 32; lane++) {
                    int row = matrix * 8 + (trans ? lane % 4 * 2 : lane / 4),
                        column = trans ? lane / 4 : lane % 4 * 2;
                    uint32_t low = in.host[(size_t)(row * 8 + column)],
                             high = in.host[(size_t)(trans ? (row + 1) * 8 + column : row * 8 + column + 1)];
                    CHECK_EQUAL(out.host[(size_t)((trans * 7 + load) * 32 + lane)], low | high << 16);
                }
            }
        }
    }
}

// Tests cp.async with 4, 8 and 16 bytes, in three groups. If a copy has fewer source bytes, zeros fill the
// rest.
__global__ void cp_async_all(uint32_t *out, const uint32_t *in)
{
    TT__SHARED(uint32_t, tile, [3][32][4]);
    int t = threadIdx.x;
    tile[0][t][1] = tile[0][t][2] = tile[0][t][3] = tile[1][t][2] = tile[1][t][3] = 7;
    tt__cp_async_4(&tile[0][t][0], in + t * 4, t % 2 ? 4 : 0);
    tt__cp_async_commit();
    tt__cp_async_8(&tile[1][t][0], in + t * 4, t % 3 * 4);
    tt__cp_async_commit();
    tt__cp_async_16(&tile[2][t][0], in + t * 4, t % 5 * 4);
    tt__cp_async_commit();
    tt__cp_async_wait<2>();
    out[t * 4] = tile[0][t][0];
    tt__cp_async_wait<1>();
    out[t * 4] += tile[1][t][1];
    tt__cp_async_wait<0>();
    __syncthreads();
    for (int k = 1; k < 4; k++)
        out[t * 4 + k] = tile[2][31 - t][k] + tile[0][t][k] + (k > 1 ? tile[1][t][k] : 0);
}
TEST(cp_async_copies_and_zero_fills)
{
    FOR_SEEDS(5, 1, 1) {
        buffer<uint32_t> in(128), out(128);
        for (uint32_t i = 0; i < 128; i++) in.host[i] = i + 1000;
        in.up();
        OK(TT__LAUNCH(cp_async_all, 1, 32, 0, 0, out.device, in.device));
        out.down();
        for (uint32_t t = 0; t < 32; t++) {
            CHECK_EQUAL(out.host[t * 4],
                        (t % 2 ? in.host[t * 4] : 0) + (t % 3 == 2 ? in.host[t * 4 + 1] : 0));
            for (uint32_t k = 1, o = 31 - t; k < 4; k++)
                CHECK_EQUAL(out.host[t * 4 + k], (o % 5 > k ? in.host[o * 4 + k] : 0) + 7 + (k > 1 ? 7 : 0));
        }
    }
}

// ============================================================================= warps, atomics, shared memory
__global__ void warp_functions(int *out)
{
    int t = threadIdx.x, lane = t % 32, *o = out + t * 17;
    const unsigned all = 0xffffffffu, mine = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    o[0] = __shfl_xor_sync(all, t, 5);
    o[1] = __shfl_up_sync(all, t, 3);
    o[2] = __shfl_down_sync(all, t, 3, 8);
    o[3] = __shfl_sync(all, t, 9, 16);
    o[4] = (int)__ballot_sync(all, lane % 3 == 0);
    o[5] = __any_sync(all, lane == 31) + 2 * __all_sync(all, lane < 31) + 4 * __all_sync(all, 1);
    o[6] = (int)__reduce_add_sync(all, (unsigned)lane);
    o[7] = __reduce_min_sync(all, lane - 5);
    o[8] = (int)__reduce_max_sync(all, (unsigned)(lane - 5));
    o[9] = (int)__reduce_xor_sync(all, (unsigned)(lane * lane));
    o[10] = __shfl_xor_sync(mine, t, 15); // each half of a warp shuffles by itself
    if (lane < 16) o[11] = (int)__reduce_or_sync(mine, 1u << lane);
    else o[11] = (int)__reduce_and_sync(mine, ~(1u << lane));
    o[12] = __syncthreads_count(t % 5 == 0);
    o[13] = __syncthreads_and(t >= 0) + 2 * __syncthreads_or(t == 63) + 4 * __syncthreads_or(t == 64);
    double wide = __shfl_xor_sync(all, (double)t + 0.5, 1);
    o[14] = (int)(wide * 2);
    o[15] = __shfl_down_sync(all, t, 1);
    o[16] = (int)__match_any_sync(all, (unsigned)lane / 8 % 2);
}
TEST(warp_functions_agree_with_loops)
{
    FOR_SEEDS(10, 1, 1) {
        buffer<int> out(64 * 17);
        OK(TT__LAUNCH(warp_functions, 1, 64, 0, 0, out.device));
        out.down();
        for (int t = 0; t < 64; t++) {
            int lane = t % 32, *o = &out.host[(size_t)t * 17], squares = 0, ballot = 0;
            for (int l = 0; l < 32; l++) squares ^= l * l;
            for (int l = 0; l < 32; l += 3) ballot |= (int)(1u << l);
            int expected[17] = {t ^ 5,
                                lane < 3 ? t : t - 3,
                                lane % 8 + 3 >= 8 ? t : t + 3,
                                t / 16 * 16 + 9, ballot, 5, 496, -5, -1, squares, t ^ 15,
                                lane < 16 ? 0xffff : 0xffff, 13, 3, 2 * (t ^ 1) + 1,
                                lane == 31 ? t : t + 1, lane / 8 % 2 ? (int)0xff00ff00 : 0x00ff00ff};
            for (int k = 0; k < 17; k++) CHECK_EQUAL(o[k], expected[k]);
        }
    }
}

// In each turn all lanes read `count`. After a __syncwarp one lane reads and writes `count`: no race.
__global__ void warp_counter(int *out)
{
    TT__SHARED(int, count, [2]);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) count[warp] = 0;
    __syncwarp();
    for (int turn = 0; turn < 24; turn++) {
        const int before = count[warp];
        __syncwarp();
        if (lane == turn) count[warp] = count[warp] + before + 1;
        __syncwarp();
    }
    out[threadIdx.x] = count[warp];
}
TEST(syncwarp_orders_reads_and_a_write)
{
    FOR_SEEDS(5, 1, 1) {
        buffer<int> out(64);
        OK(TT__LAUNCH(warp_counter, 1, 64, 0, 0, out.device));
        out.down();
        for (int t = 0; t < 64; t++) CHECK_EQUAL(out.host[t], (1 << 24) - 1);
    }
}

__global__ void atomics(float *f, int *i, unsigned *u, __nv_bfloat162 *b)
{
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(f, 1.0f);
    atomicAdd(i, t);
    atomicMax(i + 1, t);
    atomicMin(i + 2, -t);
    atomicOr(u, 1u << t % 32);
    atomicAdd(b, __floats2bfloat162_rn(1, 2));
    if (atomicCAS(u + 1, 0u, 5u) == 0) atomicExch(i + 3, 77);
}
TEST(atomics_add_up)
{
    FOR_SEEDS(5, 1, 1) {
        buffer<float> f(1);
        buffer<int> i(4);
        buffer<unsigned> u(2);
        buffer<__nv_bfloat162> b(1);
        b.host[0] = __floats2bfloat162_rn(0, 0);
        f.up();
        i.up();
        u.up();
        b.up();
        OK(TT__LAUNCH(atomics, 3, 32, 0, 0, f.device, i.device, u.device, b.device));
        f.down();
        i.down();
        u.down();
        b.down();
        CHECK(f.host[0] == 96 && i.host[0] == 96 * 95 / 2 && i.host[1] == 95 && i.host[2] == -95 &&
              i.host[3] == 77);
        CHECK(u.host[0] == 0xffffffffu && u.host[1] == 5 && __low2float(b.host[0]) == 96 &&
              __high2float(b.host[0]) == 192);
    }
}

__global__ void count_bytes(int *out) // each thread writes 5 numbers of the block's dynamic shared memory
{
    TT__DYN_SHARED(int, s);
    for (int i = 0; i < 5; i++) s[threadIdx.x * 5 + i] = (int)threadIdx.x + i;
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < 5; i++) sum += s[(threadIdx.x + 1) % blockDim.x * 5 + i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
TEST(shared_memory_beyond_48_kib_is_asked_for)
{
    FOR_SEEDS(2, 1, 1) {
        buffer<int> out(2 * 1024);
        cudaFuncAttributes attributes;
        OK(TT__LAUNCH(count_bytes, 2, 1024, 1024 * 20, 0, out.device));
        out.down();
        for (int t = 0; t < 2048; t++) CHECK_EQUAL(out.host[(size_t)t], 5 * ((t % 1024 + 1) % 1024) + 10);
        CHECK_EQUAL(TT__LAUNCH(count_bytes, 2, 1024, 60000, 0, out.device), cudaErrorInvalidValue);
        OK(cudaFuncSetAttribute(count_bytes, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000));
        OK(TT__LAUNCH(count_bytes, 2, 1024, 60000, 0, out.device));
        CHECK_EQUAL(cudaFuncSetAttribute(count_bytes, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         228 * 1024),
                    cudaErrorInvalidValue);
        OK(cudaFuncGetAttributes(&attributes, count_bytes));
        CHECK_EQUAL(attributes.maxDynamicSharedSizeBytes, 60000);
        int few = 0, many = 0, grid = 0, block = 0;
        OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&few, count_bytes, 1024, 60000));
        OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&many, count_bytes, 64, 1024));
        CHECK(few >= 1 && few <= 2 && many > few && many <= 32);
        OK(cudaOccupancyMaxPotentialBlockSize(&grid, &block, count_bytes, 0, 256));
        CHECK(grid > 0 && block > 0 && block <= 256);
        cudaGetLastError();
        OK(cudaDeviceSynchronize());
    }
}

// ============================================================================= copies
TEST(copies_in_one_and_two_dimensions)
{
    FOR_SEEDS(10, 2, seed % 2) {
        stream s;
        const size_t rows = 7, width = 5, pitch = 8;
        buffer<int> a(rows * pitch), b(rows * pitch);
        int *pinned, *registered = (int *)malloc(rows * pitch * sizeof(int)), devices = 0;
        OK(cudaMallocHost(&pinned, rows * pitch * sizeof(int)));
        OK(cudaHostRegister(registered, rows * pitch * sizeof(int), 0));
        CHECK_EQUAL(cudaHostRegister(registered + 1, 4, 0), cudaErrorHostMemoryAlreadyRegistered);
        for (size_t i = 0; i < rows * pitch; i++) {
            pinned[i] = (int)i;
            registered[i] = a.host[i] = b.host[i] = -1;
        }
        a.up();
        b.up();
        // Copies packed rows to pitched rows.
        OK(cudaMemcpy2DAsync(a.device, pitch * 4, pinned, width * 4, width * 4, rows, cudaMemcpyHostToDevice,
                             s));
        OK(cudaMemcpy2DAsync(b.device + 1, pitch * 4, a.device, pitch * 4, width * 4, rows,
                             cudaMemcpyDeviceToDevice, s));
        OK(cudaMemcpy2DAsync(registered, pitch * 4, b.device, pitch * 4, pitch * 4, rows,
                             cudaMemcpyDeviceToHost, s));
        OK(cudaStreamSynchronize(s));
        for (size_t r = 0; r < rows; r++) {
            for (size_t c = 0; c < pitch; c++)
                CHECK_EQUAL(registered[r * pitch + c], c >= 1 && c <= width ? (int)(r * width + c - 1) : -1);
        }
        CHECK_EQUAL(cudaMemcpy2D(a.device, 4, pinned, width * 4, width * 4, rows, cudaMemcpyHostToDevice),
                    cudaErrorInvalidPitchValue);
        OK(cudaGetDeviceCount(&devices));
        if (devices > 1) { // a copy between devices always works, with peer access or staged
            int *other, back[35];
            OK(cudaSetDevice(1));
            OK(cudaMalloc(&other, sizeof back));
            OK(cudaMemcpyPeerAsync(other, 1, a.device, 0, sizeof back, s));
            OK(cudaMemcpyAsync(back, other, sizeof back, cudaMemcpyDefault, s));
            OK(cudaStreamSynchronize(s));
            CHECK(back[0] == 0 && back[4] == 4 && back[5] == -1 && back[34] == 22);
            OK(cudaFree(other));
            OK(cudaSetDevice(0));
        }
        cudaPointerAttributes attributes;
        OK(cudaPointerGetAttributes(&attributes, pinned + 3));
        CHECK_EQUAL(attributes.type, cudaMemoryTypeHost);
        OK(cudaPointerGetAttributes(&attributes, a.device + 3));
        CHECK(attributes.type == cudaMemoryTypeDevice && attributes.device == 0);
        OK(cudaFreeHost(pinned));
        OK(cudaHostUnregister(registered));
        CHECK_EQUAL(cudaHostUnregister(registered), cudaErrorHostMemoryNotRegistered);
        cudaGetLastError();
        free(registered);
    }
}

// ============================================================================= order of operations
// Runs a producer on one stream and a consumer on another. If `wait`, the consumer waits for the producer's
// event.
static bool consumer_sees_producer(bool wait)
{
    const int n = 2000;
    stream s, t;
    event e;
    buffer<float> a(n), b(n);
    a.up();
    b.up();
    OK(cudaDeviceSynchronize());
    OK(TT__LAUNCH(fill, 4, 64, 0, s, a.device, n, 1, 2));
    OK(cudaEventRecord(e, s));
    if (wait) OK(cudaStreamWaitEvent(t, e, 0));
    OK(cudaMemcpyAsync(b.device, a.device, n * sizeof(float), cudaMemcpyDeviceToDevice, t));
    OK(cudaStreamSynchronize(t));
    OK(cudaStreamSynchronize(s));
    b.down();
    for (int i = 0; i < n; i++) if (b.host[(size_t)i] != (float)((i * 7 + 13 + 10) % 101)) return false;
    return true;
}
TEST(events_order_streams)
{
    FOR_SEEDS(20, 1, 1) CHECK(consumer_sees_producer(true));
}

#ifdef TT_EMULATE
TEST(every_scheduler_but_eager_shows_a_missing_event)
{
    if (strcmp(emu_build(), "trace") == 0) SKIP("the trace build reports it, see death.cu");
    for (int scheduler = 0; scheduler < EMU_SCHEDULERS; scheduler++) {
        int wrong = 0;
        for (uint64_t seed = 0; seed < 20; seed++) {
            emu_configure(1, (size_t)1 << 20, 1, seed);
            emu_set_scheduler((emu_scheduler)scheduler);
            wrong += !consumer_sees_producer(false);
        }
        if (scheduler == EMU_EAGER) CHECK_EQUAL(wrong, 0);
        else CHECK(wrong > 0);
    }
}

__global__ void note_order(int *order, int *count)
{
    int me = blockIdx.x * blockDim.x + threadIdx.x;
    order[atomicAdd(count, 1)] = me;
    __syncthreads();
    order[atomicAdd(count, 1)] = me + 1000;
}
static std::vector<int> order_of_threads(uint64_t seed)
{
    emu_configure(1, (size_t)1 << 20, 1, seed);
    buffer<int> order(2 * 4 * 96), count(1);
    count.up();
    OK(TT__LAUNCH(note_order, 4, 96, 0, 0, order.device, count.device));
    order.down();
    return order.host;
}
TEST(a_seed_decides_the_order_of_threads_and_blocks)
{
    int different = 0;
    std::vector<int> in_order = order_of_threads(EMU_EAGER);
    for (int i = 0; i < 96; i++) CHECK_EQUAL(in_order[(size_t)i], i);
    for (uint64_t seed = 0; seed < 10; seed++) {
        std::vector<int> first = order_of_threads(seed);
        CHECK(first == order_of_threads(seed));
        different += first != in_order;
    }
    CHECK(different >= 7);
}
#endif

__global__ void multiply_by(float *a, int n, float factor)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) a[i] *= factor;
}

TEST(legacy_stream_waits_for_blocking_streams)
{
    FOR_SEEDS(20, 1, 1) {
        const int n = 500;
        cudaStream_t blocking;
        buffer<float> a(n);
        OK(cudaStreamCreate(&blocking));
        OK(TT__LAUNCH(fill, 2, 64, 0, blocking, a.device, n, 0, 0));
        OK(TT__LAUNCH(multiply_by, 2, 64, 0, 0, a.device, n, 3.0f)); // waits for `blocking`
        OK(TT__LAUNCH(add, 2, 64, 0, blocking, a.device, a.device, n)); // waits for the legacy stream
        a.down();
        for (int i = 0; i < n; i++) CHECK(a.host[(size_t)i] == 6.0f * (float)(i * 7 % 101));
        OK(cudaStreamDestroy(blocking));
    }
}

static void add_one(void *p) { ++*(int *)p; }
TEST(host_functions_run_in_order)
{
    FOR_SEEDS(10, 1, 1) {
        stream s;
        int *count;
        OK(cudaMallocHost(&count, sizeof *count));
        *count = 0;
        for (int i = 0; i < 5; i++) OK(cudaLaunchHostFunc(s, add_one, count));
        OK(cudaStreamSynchronize(s));
        CHECK_EQUAL(*count, 5);
        OK(cudaFreeHost(count));
    }
}

TEST(events_tell_time)
{
    FOR_SEEDS(10, 1, 1) {
        stream s;
        event from(cudaEventDefault), to(cudaEventDefault), blind;
        buffer<float> a(1000);
        float ms = -1;
        // the events were never recorded
        CHECK_EQUAL(cudaEventElapsedTime(&ms, from, to), cudaErrorInvalidResourceHandle);
        OK(cudaEventRecord(from, s));
        for (int i = 0; i < 3; i++) OK(TT__LAUNCH(fill, 2, 64, 0, s, a.device, 1000, 0, 0));
        OK(cudaEventRecord(to, s));
        OK(cudaEventRecord(blind, s));
        OK(cudaEventSynchronize(to));
        OK(cudaEventElapsedTime(&ms, from, to));
        CHECK(ms > 0 && ms < 1000);
        OK(cudaEventSynchronize(blind));
        CHECK_EQUAL(cudaEventElapsedTime(&ms, from, blind), cudaErrorInvalidResourceHandle);
        cudaGetLastError();
        long polls = 0;
        OK(TT__LAUNCH(fill, 2, 64, 0, s, a.device, 1000, 0, 0));
        OK(cudaEventRecord(to, s));
        while (cudaEventQuery(to) == cudaErrorNotReady && polls < 100000000) polls++;
        OK(cudaEventQuery(to));
        OK(cudaStreamQuery(s));
        cudaGetLastError();
    }
}

// ============================================================================= graphs
struct captured { cudaGraph_t graph = nullptr; cudaGraphExec_t exec = nullptr; };
static cudaError_t capture_two_streams(captured *c, cudaStream_t s, cudaStream_t t, float *a, float *b, int n,
                                       int rank)
{
    event fork, join; // both events may be destroyed after the capture
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    OK(cudaEventRecord(fork, s));
    OK(cudaStreamWaitEvent(t, fork, 0));
    OK(TT__LAUNCH(fill, 4, 64, 0, t, b, n, rank, 0));
    OK(cudaEventRecord(join, t));
    OK(cudaStreamWaitEvent(s, join, 0));
    OK(TT__LAUNCH(add, 4, 64, 0, s, a, b, n));
    return cudaStreamEndCapture(s, &c->graph);
}
TEST(graphs_are_captured_replayed_and_updated)
{
    FOR_SEEDS(15, 1, 1) {
        const int n = 1000;
        stream s, t;
        buffer<float> a(n), b(n);
        captured first, second, other;
        cudaGraphExecUpdateResultInfo info;
        size_t nodes = 0;
        a.up();
        OK(cudaDeviceSynchronize());
        OK(capture_two_streams(&first, s, t, a.device, b.device, n, 1));
        OK(capture_two_streams(&second, s, t, a.device, b.device, n, 2));
        OK(cudaGraphInstantiate(&first.exec, first.graph, 0));
        OK(cudaGraphGetNodes(first.graph, nullptr, &nodes));
        CHECK(nodes >= 2);
        // Launches of a graph run one after another.
        for (int i = 0; i < 3; i++) OK(cudaGraphLaunch(first.exec, i % 2 ? s.s : t.s));
        // launches in flight keep their old arguments
        OK(cudaGraphExecUpdate(first.exec, second.graph, &info));
        CHECK_EQUAL(info.result, cudaGraphExecUpdateSuccess);
        OK(cudaGraphLaunch(first.exec, s));
        OK(cudaStreamSynchronize(s));
        a.down();
        for (int i = 0; i < n; i++)
            CHECK(a.host[(size_t)i] == 3.0f * (float)((i * 7 + 13) % 101) + (float)((i * 7 + 26) % 101));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal)); // captures a graph of other nodes
        OK(TT__LAUNCH(add, 4, 64, 0, s, a.device, b.device, n));
        OK(cudaStreamEndCapture(s, &other.graph));
        CHECK_EQUAL(cudaGraphExecUpdate(first.exec, other.graph, &info), cudaErrorGraphExecUpdateFailure);
        CHECK_EQUAL(info.result, cudaGraphExecUpdateErrorTopologyChanged);
        cudaGetLastError();
        OK(cudaGraphExecDestroy(first.exec));
        OK(cudaGraphDestroy(first.graph));
        OK(cudaGraphDestroy(second.graph));
        OK(cudaGraphDestroy(other.graph));
    }
}

TEST(graphs_read_pinned_memory_when_they_run)
{
    FOR_SEEDS(10, 1, 1) {
        stream s;
        buffer<float> a(64);
        captured c;
        float *in, *out;
        OK(cudaMallocHost(&in, 64 * sizeof(float)));
        OK(cudaMallocHost(&out, 64 * sizeof(float)));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        OK(cudaMemcpyAsync(a.device, in, 64 * sizeof(float), cudaMemcpyHostToDevice, s));
        OK(TT__LAUNCH(multiply_by, 1, 64, 0, s, a.device, 64, 2.0f));
        OK(cudaMemcpyAsync(out, a.device, 64 * sizeof(float), cudaMemcpyDeviceToHost, s));
        OK(cudaStreamEndCapture(s, &c.graph));
        OK(cudaGraphInstantiate(&c.exec, c.graph, 0));
        for (int round = 0; round < 3; round++) {
            for (int i = 0; i < 64; i++) in[i] = (float)(i + round);
            OK(cudaGraphLaunch(c.exec, s));
            OK(cudaStreamSynchronize(s));
            for (int i = 0; i < 64; i++) CHECK(out[i] == 2.0f * (float)(i + round));
        }
        OK(cudaGraphExecDestroy(c.exec));
        OK(cudaGraphDestroy(c.graph));
        OK(cudaFreeHost(in));
        OK(cudaFreeHost(out));
    }
}

TEST(captures_refuse_what_cuda_refuses)
{
    FOR_SEEDS(3, 1, 1) {
        stream s, t;
        event e, outside;
        buffer<float> a(64);
        cudaGraph_t g;
        void *p = nullptr;
        std::vector<float> pageable(64);
        cudaStreamCaptureStatus status;
        CHECK_EQUAL(cudaStreamBeginCapture(0, cudaStreamCaptureModeThreadLocal),
                    cudaErrorStreamCaptureUnsupported);
        CHECK_EQUAL(cudaStreamEndCapture(0, &g), cudaErrorIllegalState); // no stream is captured
        CHECK_EQUAL(cudaStreamEndCapture(s, &g), cudaErrorIllegalState);

        // ends the capture on a forked stream
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        OK(cudaEventRecord(e, s));
        OK(cudaStreamWaitEvent(t, e, 0));
        OK(TT__LAUNCH(fill, 1, 64, 0, t, a.device, 64, 0, 0));
        CHECK_EQUAL(cudaStreamEndCapture(t, &g), cudaErrorStreamCaptureUnmatched);
        for (cudaStream_t x : {s.s, t.s}) {
            OK(cudaStreamIsCapturing(x, &status));
            CHECK_EQUAL(status, cudaStreamCaptureStatusInvalidated);
        }
        CHECK_EQUAL(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);
        OK(cudaStreamIsCapturing(t, &status));
        CHECK_EQUAL(status, cudaStreamCaptureStatusNone);

        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal)); // a second begin changes nothing
        CHECK_EQUAL(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), cudaErrorIllegalState);
        OK(cudaStreamEndCapture(s, &g));
        OK(cudaGraphDestroy(g));

        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal)); // forks a stream that never joins
        OK(cudaEventRecord(e, s));
        OK(cudaStreamWaitEvent(t, e, 0));
        OK(TT__LAUNCH(fill, 1, 64, 0, t, a.device, 64, 0, 0));
        CHECK_EQUAL(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureUnjoined);

        // a wait of the host ends the capture
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        CHECK_EQUAL(cudaStreamSynchronize(s), cudaErrorStreamCaptureUnsupported);
        OK(cudaStreamIsCapturing(s, &status));
        CHECK_EQUAL(status, cudaStreamCaptureStatusInvalidated);
        CHECK_EQUAL(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);
        OK(cudaStreamIsCapturing(s, &status));
        CHECK_EQUAL(status, cudaStreamCaptureStatusNone);

        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        CHECK_EQUAL(cudaStreamQuery(s), cudaErrorStreamCaptureUnsupported);
        CHECK_EQUAL(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);

        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        CHECK_EQUAL(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
        CHECK_EQUAL(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);

        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal)); // an allocation ends the capture
        CHECK_EQUAL(cudaMalloc(&p, 64), cudaErrorStreamCaptureUnsupported);
        CHECK_EQUAL(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);

        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        OK(cudaMalloc(&p, 64));
        OK(cudaStreamEndCapture(s, &g));
        OK(cudaGraphDestroy(g));

        OK(cudaEventRecord(outside, t)); // an event outside the capture, which a graph cannot hold
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        CHECK_EQUAL(cudaStreamWaitEvent(s, outside, 0), cudaErrorStreamCaptureIsolation);
        CHECK_EQUAL(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);

        // The host cannot wait for an event of the capture.
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        OK(cudaEventRecord(e, s));
        CHECK_EQUAL(cudaEventSynchronize(e), cudaErrorCapturedEvent);
        CHECK_EQUAL(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        OK(cudaEventRecord(e, s));
        CHECK_EQUAL(cudaEventQuery(e), cudaErrorCapturedEvent);
        CHECK_EQUAL(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);
        cudaGetLastError();
        OK(cudaFree(p));
    }
}

// ============================================================================= errors, limits, counts
#ifdef TT_EMULATE
TEST(misuse_has_cudas_error_codes)
{
    emu_configure(2, (size_t)1 << 20, 1, 3);
    {
        stream s0;
        buffer<float> a(64);
        float *p = a.device, *b;
        cudaStream_t s1;
        cudaEvent_t e1;
        int can = 1, value = 0;
        CHECK_EQUAL(TT__LAUNCH(fill, 1, 2048, 0, s0, p, 1, 0, 0), cudaErrorInvalidConfiguration);
        CHECK_EQUAL(TT__LAUNCH(fill, 0, 32, 0, s0, p, 1, 0, 0), cudaErrorInvalidConfiguration);
        CHECK_EQUAL(TT__LAUNCH(fill, dim3(1, 70000), 32, 0, s0, p, 1, 0, 0), cudaErrorInvalidConfiguration);
        CHECK_EQUAL(TT__LAUNCH(fill, 1, 32, 60000, s0, p, 1, 0, 0), cudaErrorInvalidValue);
        CHECK_EQUAL(cudaGetLastError(), cudaErrorInvalidValue);
        CHECK_EQUAL(cudaGetLastError(), cudaSuccess);
        OK(cudaSetDevice(1));
        OK(cudaStreamCreateWithFlags(&s1, cudaStreamNonBlocking));
        OK(cudaEventCreateWithFlags(&e1, cudaEventDisableTiming));
        OK(cudaMalloc(&b, 256));
        // The stream belongs to another device.
        CHECK_EQUAL(TT__LAUNCH(fill, 1, 32, 0, s0, p, 1, 0, 0), cudaErrorInvalidResourceHandle);
        CHECK_EQUAL(cudaEventRecord(e1, s0), cudaErrorInvalidResourceHandle);
        // the devices are swapped
        CHECK_EQUAL(cudaMemcpyPeerAsync(b, 0, p, 1, 256, s1), cudaErrorInvalidValue);
        CHECK_EQUAL(cudaMemcpyAsync(b, p, 257, cudaMemcpyDeviceToDevice, s1), cudaErrorInvalidValue);
        CHECK_EQUAL(cudaMemcpyAsync(b, p, 4, cudaMemcpyHostToDevice, s1), cudaErrorInvalidValue);
        CHECK_EQUAL(cudaMemcpyAsync(b, p, 4, (cudaMemcpyKind)9, s1), cudaErrorInvalidMemcpyDirection);
        CHECK_EQUAL(cudaSetDevice(2), cudaErrorInvalidDevice);
        CHECK_EQUAL(cudaFuncSetAttribute(fill, cudaFuncAttributeMaxDynamicSharedMemorySize, 300000),
                    cudaErrorInvalidValue);
        OK(cudaDeviceEnablePeerAccess(0, 0));
        CHECK_EQUAL(cudaDeviceEnablePeerAccess(0, 0), cudaErrorPeerAccessAlreadyEnabled);
        OK(cudaDeviceDisablePeerAccess(0));
        CHECK_EQUAL(cudaDeviceDisablePeerAccess(0), cudaErrorPeerAccessNotEnabled);
        CHECK_EQUAL(cudaDeviceEnablePeerAccess(1, 0), cudaErrorInvalidDevice);
        OK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 1));
        CHECK_EQUAL(value, 9);
        CHECK_EQUAL(strcmp(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady"), 0);
        OK(cudaFree(b));
        OK(cudaStreamDestroy(s1));
        CHECK_EQUAL(cudaStreamDestroy(s1), cudaErrorInvalidResourceHandle);
        OK(cudaEventDestroy(e1));
        CHECK_EQUAL(cudaEventDestroy(e1), cudaErrorInvalidResourceHandle);
        OK(cudaSetDevice(0));
        emu_configure(0, 0, 0, 0);
        CHECK_EQUAL(cudaGetDeviceCount(&value), cudaErrorNoDevice);
        emu_configure(2, (size_t)1 << 20, 0, 0); // devices have no peer access
        OK(cudaDeviceCanAccessPeer(&can, 0, 1));
        CHECK(!can);
        CHECK_EQUAL(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessUnsupported);
        OK(cudaStreamCreate(&s0.s)); // gives the destructors something to destroy
        OK(cudaMalloc(&a.device, 4));
    }
}

TEST(kernels_reach_peers_once_enabled)
{
    FOR_SEEDS(5, 2, 1) {
        buffer<float> a(64);
        float *b, back[64];
        a.up();
        OK(cudaSetDevice(1));
        OK(cudaMalloc(&b, sizeof back));
        OK(cudaDeviceEnablePeerAccess(0, 0));
        OK(TT__LAUNCH(fill, 1, 64, 0, 0, b, 64, 0, 0));
        OK(TT__LAUNCH(add, 1, 64, 0, 0, b, a.device, 64)); // reads memory of device 0
        OK(cudaMemcpy(back, b, sizeof back, cudaMemcpyDeviceToHost));
        for (int i = 0; i < 64; i++) CHECK(back[i] == (float)(i * 7 % 101));
        OK(cudaFree(b));
        OK(cudaSetDevice(0));
    }
}

// Copies or loads from another device bring wrong bytes if emu_set_link says so. Bytes that come in the other
// direction or through the host are right.
TEST(links_that_bring_wrong_bytes)
{
    enum { N = 3000 };
    for (unsigned wrong = 0; wrong < 8; wrong++) {
        FOR_SEEDS(5, 3, 1) {
            buffer<float> a(N);
            float *b[3] = {}, back[2][N];
            int can = 0, bad[3][2] = {};
            emu_set_link(0, 1, wrong);
            for (int i = 0; i < N; i++) a.host[(size_t)i] = (float)i;
            a.up();
            for (int d = 1; d < 3; d++) {
                OK(cudaSetDevice(d));
                OK(cudaDeviceCanAccessPeer(&can, d, 0));
                CHECK_EQUAL(can, d == 2 || !(wrong & EMU_NO_ACCESS));
                CHECK_EQUAL(cudaDeviceEnablePeerAccess(0, 0), can ? 0 : cudaErrorPeerAccessUnsupported);
                OK(cudaMalloc(&b[d], sizeof back));
                OK(cudaMemset(b[d], 0, sizeof back));
                OK(cudaMemcpyPeerAsync(b[d], d, a.device, 0, sizeof back[0], 0));
                if (can) OK(TT__LAUNCH(add, 2, 64, 0, 0, b[d] + N, a.device, N));
                OK(cudaMemcpy(back, b[d], sizeof back, cudaMemcpyDeviceToHost));
                for (int i = 0; i < 2 * N; i++) bad[d][i / N] += back[i / N][i % N] != (float)(i % N);
            }
            CHECK(bad[2][0] == 0 && bad[2][1] == 0);
            CHECK_EQUAL(bad[1][0] > 0, (wrong & (EMU_NO_ACCESS | EMU_WRONG_COPIES)) == EMU_WRONG_COPIES);
            CHECK_EQUAL(bad[1][1] > 0, wrong != 0 && wrong != EMU_WRONG_COPIES);
            // Among 256 numbers, at most one is wrong.
            CHECK(bad[1][0] <= N / 256 + 1 && (wrong & EMU_NO_ACCESS || bad[1][1] <= N / 256 + 1));
            for (int d = 1; d < 3; d++) OK(cudaFree(b[d]));
            OK(cudaSetDevice(0));
            a.down(); // the source is unharmed
            for (int i = 0; i < N; i++) CHECK(a.host[(size_t)i] == (float)i);
        }
    }
    emu_configure(2, (size_t)8 << 20, 1, 0); // repairs the links
    OK(cudaDeviceEnablePeerAccess(1, 0));
}

// If an event orders the accesses, kernels load from pinned memory of any device.
TEST(kernels_load_from_pinned_memory)
{
    FOR_SEEDS(10, 2, 0) {
        float *pinned, *p[2], back[500];
        cudaStream_t s[2];
        cudaEvent_t there;
        OK(cudaHostAlloc(&pinned, sizeof back, cudaHostAllocPortable | cudaHostAllocMapped));
        for (int d = 0; d < 2; d++) {
            OK(cudaSetDevice(d));
            OK(cudaStreamCreateWithFlags(&s[d], cudaStreamNonBlocking));
            OK(cudaMalloc(&p[d], sizeof back));
            OK(TT__LAUNCH(fill, 2, 64, 0, s[d], p[d], 500, d, 0));
        }
        OK(cudaEventCreateWithFlags(&there, cudaEventDisableTiming));
        OK(cudaMemcpyAsync(pinned, p[1], sizeof back, cudaMemcpyDeviceToHost, s[1]));
        OK(cudaEventRecord(there, s[1]));
        OK(cudaSetDevice(0));
        OK(cudaStreamWaitEvent(s[0], there, 0));
        OK(TT__LAUNCH(add, 2, 64, 0, s[0], p[0], pinned, 500));
        OK(cudaMemcpyAsync(back, p[0], sizeof back, cudaMemcpyDeviceToHost, s[0]));
        OK(cudaStreamSynchronize(s[0]));
        for (int i = 0; i < 500; i++) CHECK(back[i] == (float)(i * 7 % 101 + (i * 7 + 13) % 101));
        for (int d = 0; d < 2; d++) OK(cudaFree(p[d]) | cudaStreamDestroy(s[d]));
        OK(cudaFreeHost(pinned) | cudaEventDestroy(there));
    }
}

TEST(memory_has_a_limit_and_leaks_are_counted)
{
    char what[200];
    size_t available, total;
    void *p, *q;
    emu_configure(1, (size_t)1 << 20, 1, 0);
    CHECK_EQUAL(cudaMalloc(&p, (size_t)2 << 20), cudaErrorMemoryAllocation);
    OK(cudaMalloc(&p, 1000));
    CHECK((uintptr_t)p % 256 == 0);
    OK(cudaMemGetInfo(&available, &total));
    CHECK(total == (size_t)1 << 20 && available == total - 1024);
    CHECK_EQUAL(cudaMalloc(&q, total - 1000), cudaErrorMemoryAllocation);
    OK(cudaMalloc(&q, available));
    OK(cudaFree(q));
    CHECK_EQUAL(emu_live_objects(what, sizeof what), 1);
    CHECK(strncmp(what, "1 device allocations", 20) == 0);
    OK(cudaFree(p));
    CHECK_EQUAL(emu_live_objects(nullptr, 0), 0);
    for (int i = 0; i < 50; i++) { // cudaFree returns the memory
        OK(cudaMalloc(&p, (size_t)1 << 16));
        OK(cudaFree(p));
    }
}

// Managed memory takes none of the device's memory. Host and device alternate in using it, at one address.
TEST(managed_memory_is_the_hosts_and_the_devices)
{
    enum { N = 5000 };
    const cudaMemLocation device = {cudaMemLocationTypeDevice, 0}, host = {cudaMemLocationTypeHost, 0},
                          none = {cudaMemLocationTypeDevice, 1};
    for (uint64_t seed = 0; seed < EMU_SCHEDULERS; seed++) {
        float *p = nullptr, *large = nullptr;
        size_t before, available, total;
        emu_configure(1, (size_t)1 << 16, 1, seed);
        {
            stream s;
            buffer<float> ordinary(N);
            OK(cudaMemGetInfo(&before, &total));
            OK(cudaMallocManaged(&large, (size_t)1 << 20)); // more bytes than the device has
            OK(cudaMallocManaged(&p, N * sizeof *p));
            OK(cudaMemGetInfo(&available, &total));
            CHECK(available == before && total == (size_t)1 << 16);
            for (int i = 0; i < N; i++) p[i] = 1;
            OK(cudaMemAdvise(p, N * sizeof *p, cudaMemAdviseSetPreferredLocation, device));
            OK(cudaMemPrefetchAsync(p, 4000, device, 0, s));
            OK(cudaMemPrefetchAsync(p + 1, 100, host, 0, s));
            CHECK(emu_get_counts().advised == N * 4 && emu_get_counts().prefetches == 2 &&
                  emu_get_counts().prefetched == 4100);
            OK(TT__LAUNCH(fill, 2, 64, 0, s, ordinary.device, N, 0, 0));
            OK(TT__LAUNCH(add, 2, 64, 0, s, ordinary.device, p, N));
            OK(cudaMemcpyAsync(p, ordinary.device, N * sizeof *p, cudaMemcpyDefault, s));
            OK(cudaStreamSynchronize(s));
            for (int i = 0; i < N; i++) CHECK(p[i] == (float)(i * 7 % 101 + 1));
            CHECK_EQUAL(cudaMemAdvise(ordinary.device, 4, cudaMemAdviseSetPreferredLocation, device),
                        cudaErrorInvalidValue);
            CHECK_EQUAL(cudaMemPrefetchAsync(p, N * sizeof *p + 1, device, 0, s), cudaErrorInvalidValue);
            CHECK_EQUAL(cudaMemPrefetchAsync(p, 4, none, 0, s), cudaErrorInvalidDevice);
            emu_set_managed(0, 0);
            CHECK_EQUAL(cudaMemPrefetchAsync(p, 4, device, 0, s), cudaErrorInvalidDevice);
            cudaGraph_t graph;
            emu_set_managed(0, 1);
            OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
            CHECK_EQUAL(cudaMemPrefetchAsync(p, 4, device, 0, s), cudaErrorStreamCaptureUnsupported);
            CHECK_EQUAL(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
            OK(cudaFree(p) | cudaFree(large));
        }
        CHECK_EQUAL(emu_live_objects(nullptr, 0), 0);
    }
}

TEST(stalls_of_the_host_are_counted)
{
    emu_configure(1, (size_t)1 << 20, 1, 0);
    {
        stream s;
        event e;
        buffer<float> a(64);
        float *pinned;
        std::vector<float> h(64);
        OK(cudaMallocHost(&pinned, 256));
        emu_reset_counts();
        OK(cudaMemcpyAsync(a.device, pinned, 256, cudaMemcpyHostToDevice, s));
        OK(cudaMemcpyAsync(pinned, a.device, 256, cudaMemcpyDeviceToHost, s));
        CHECK(emu_get_counts().pageable_async == 0 && emu_get_counts().host_syncs == 0 &&
              emu_get_counts().copies == 2);
        OK(cudaMemcpyAsync(a.device, h.data(), 256, cudaMemcpyHostToDevice, s)); // staged
        CHECK(emu_get_counts().pageable_async == 1 && emu_get_counts().host_syncs == 0);
        OK(cudaMemcpyAsync(h.data(), a.device, 256, cudaMemcpyDeviceToHost, s)); // pageable: the host waits
        CHECK(emu_get_counts().pageable_async == 2 && emu_get_counts().host_syncs == 1);
        OK(cudaMemcpy(h.data(), a.device, 256, cudaMemcpyDeviceToHost));
        OK(cudaStreamSynchronize(s));
        OK(cudaDeviceSynchronize());
        OK(cudaEventSynchronize(e));
        CHECK(emu_get_counts().host_syncs == 4 && emu_get_counts().event_syncs == 1);
        CHECK_EQUAL(emu_get_counts().allocations, 0);
        OK(cudaFreeHost(pinned));
        CHECK_EQUAL(emu_get_counts().allocations, 1);
    }
}

TEST(faults_are_injected_once_or_on_end)
{
    emu_configure(1, (size_t)1 << 20, 1, 0);
    void *p = nullptr, *q = nullptr;
    cudaStream_t s = nullptr;
    cublasLtHandle_t lt;
    emu_inject_fault(2, cudaErrorLaunchFailure, 1);
    OK(cudaMalloc(&p, 64));
    CHECK_EQUAL(cudaMalloc(&q, 64), cudaErrorLaunchFailure);
    OK(cudaMalloc(&q, 64));
    // all later calls fail; calls that release memory release it nevertheless
    emu_inject_fault(1, cudaErrorLaunchFailure, 1000);
    CHECK_EQUAL(cudaStreamCreate(&s), cudaErrorLaunchFailure);
    CHECK(cublasLtCreate(&lt) != CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
    CHECK_EQUAL(cudaFree(p), cudaErrorLaunchFailure);
    CHECK_EQUAL(cudaFree(q), cudaErrorLaunchFailure);
    CHECK_EQUAL(emu_live_objects(nullptr, 0), 0);
    emu_inject_fault(0, 0, 0);
    OK(cudaMalloc(&p, 64));
    OK(cudaFree(p));
}

TEST(a_host_thread_for_each_device)
{
    for (uint64_t seed = 0; seed < 3; seed++) {
        emu_configure(4, (size_t)1 << 20, 1, seed);
        std::vector<std::thread> threads;
        int bad[4] = {}, errors[4] = {};
        for (int d = 0; d < 4; d++) {
            threads.emplace_back([d, &bad, &errors] {
                int &error = errors[d];
                cudaStream_t s;
                float *x, *y, *pinned;
                error |= cudaSetDevice(d) | cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) |
                         cudaMalloc(&x, 4000) | cudaMalloc(&y, 4000);
                error |= cudaMallocHost(&pinned, 4000);
                for (int round = 0; round < 10; round++) {
                    error |= TT__LAUNCH(fill, 2, 64, 0, s, x, 1000, d, round) |
                             TT__LAUNCH(fill, 2, 64, 0, s, y, 1000, d, round + 1);
                    error |= TT__LAUNCH(add, 2, 64, 0, s, x, y, 1000) |
                             cudaMemcpyAsync(pinned, x, 4000, cudaMemcpyDeviceToHost, s);
                    error |= cudaStreamSynchronize(s);
                    for (int i = 0; i < 1000; i++) {
                        int first = i * 7 + d * 13 + round * 5;
                        bad[d] += pinned[i] != (float)(first % 101 + (first + 5) % 101);
                    }
                }
                error |= cudaFree(x) | cudaFree(y) | cudaFreeHost(pinned) | cudaStreamDestroy(s);
            });
        }
        for (auto &t : threads) t.join();
        for (int d = 0; d < 4; d++) CHECK(bad[d] == 0 && errors[d] == 0);
        CHECK_EQUAL(emu_live_objects(nullptr, 0), 0);
    }
}

// Each thread captures its device's stream while other threads allocate, launch, record and wait.
TEST(captures_of_threads_are_apart)
{
    for (uint64_t seed = 0; seed < 3; seed++) {
        enum { DEVICES = 4, N = 300 };
        emu_configure(DEVICES, (size_t)1 << 20, 1, seed);
        std::vector<std::thread> threads;
        int bad[DEVICES] = {}, errors[DEVICES] = {};
        for (int d = 0; d < DEVICES; d++) {
            threads.emplace_back([d, &bad, &errors] {
                int &error = errors[d];
                cudaStream_t s;
                cudaEvent_t e;
                float *x, *y, *back;
                error |= cudaSetDevice(d) | cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) |
                         cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
                for (int round = 0; round < 10; round++) {
                    cudaGraph_t graph;
                    cudaGraphExec_t ready;
                    error |= cudaMalloc(&x, sizeof *x * N) | cudaMalloc(&y, sizeof *y * N) |
                             cudaHostAlloc(&back, sizeof *back * N, cudaHostAllocPortable);
                    error |= TT__LAUNCH(fill, 2, 64, 0, s, y, N, d, round) | cudaEventRecord(e, s);
                    error |= cudaStreamWaitEvent(s, e, 0) |
                             cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
                    error |= TT__LAUNCH(fill, 2, 64, 0, s, x, N, d, round) |
                             TT__LAUNCH(add, 2, 64, 0, s, x, y, N);
                    error |= cudaStreamEndCapture(s, &graph) | cudaGraphInstantiate(&ready, graph, 0) |
                             cudaGraphLaunch(ready, s) |
                             cudaMemcpyAsync(back, x, sizeof *x * N, cudaMemcpyDeviceToHost, s);
                    error |= cudaStreamSynchronize(s);
                    for (int i = 0; i < N; i++)
                        bad[d] += back[i] != 2 * (float)((i * 7 + d * 13 + round * 5) % 101);
                    error |= cudaGraphDestroy(graph) | cudaGraphExecDestroy(ready) | cudaFree(x) |
                             cudaFree(y) | cudaFreeHost(back);
                }
                error |= cudaEventDestroy(e) | cudaStreamDestroy(s);
            });
        }
        for (auto &t : threads) t.join();
        for (int d = 0; d < DEVICES; d++) CHECK(bad[d] == 0 && errors[d] == 0);
        CHECK_EQUAL(emu_live_objects(nullptr, 0), 0);
    }
}
#endif

// ============================================================================= matrix products
template <class T> static T from_float(float v);
template <> float from_float<float>(float v) { return v; }
template <> bf16 from_float<bf16>(float v) { return __float2bfloat16_rn(v); }
template <> __half from_float<__half>(float v) { return __float2half_rn(v); }
template <> __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float v) { return __nv_fp8_e4m3(v); }
template <> __nv_fp8_e5m2 from_float<__nv_fp8_e5m2>(float v) { return __nv_fp8_e5m2(v); }
static float to_float(__nv_fp8_e4m3 v) { return (float)v; }
static float to_float(__nv_fp8_e5m2 v) { return (float)v; }
template <class T> struct data_type;
// rounding: largest relative change of a number by rounding
template <> struct data_type<float> {
    static const cudaDataType value = CUDA_R_32F;
    static constexpr double rounding = 0x1p-24;
};
template <> struct data_type<bf16> {
    static const cudaDataType value = CUDA_R_16BF;
    static constexpr double rounding = 0x1p-8;
};
template <> struct data_type<__half> {
    static const cudaDataType value = CUDA_R_16F;
    static constexpr double rounding = 0x1p-11;
};
template <> struct data_type<__nv_fp8_e4m3> { static const cudaDataType value = CUDA_R_8F_E4M3; };
template <> struct data_type<__nv_fp8_e5m2> { static const cudaDataType value = CUDA_R_8F_E5M2; };
template <class T> static void random_values(buffer<T> &b)
{
    for (auto &v : b.host) v = from_float<T>(random_number());
    b.up();
}
// Returns element (row, column) of op(x), for a column-major x.
template <class T>
static double at(const buffer<T> &x, bool transpose, int row, int column, int ld, int first = 0)
{
    return to_float(x.host[(size_t)(first + (transpose ? column + row * ld : row + column * ld))]);
}

template <class T, class C>
static void check_gemm(cublasHandle_t h, bool ta, bool tb, int batch, double tolerance)
{
    const int m = 5, n = 7, k = 9, lda = (ta ? k : m) + 1, ldb = (tb ? n : k) + 2, ldc = m + 3;
    const int stride_a = lda * (ta ? m : k), stride_b = ldb * (tb ? k : n), stride_c = ldc * n;
    const float alpha = 0.5f, beta = 2;
    buffer<T> a((size_t)(stride_a * batch)), b((size_t)(stride_b * batch));
    buffer<C> c((size_t)(stride_c * batch));
    random_values(a);
    random_values(b);
    random_values(c);
    std::vector<C> before = c.host;
    if (batch == 1) {
        OK(cublasGemmEx(h, ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb ? CUBLAS_OP_T : CUBLAS_OP_N, m, n, k, &alpha,
                        a.device, data_type<T>::value, lda, b.device, data_type<T>::value, ldb, &beta,
                        c.device, data_type<C>::value, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    } else {
        OK(cublasGemmStridedBatchedEx(h, ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb ? CUBLAS_OP_T : CUBLAS_OP_N, m, n,
                                      k, &alpha, a.device, data_type<T>::value, lda, stride_a, b.device,
                                      data_type<T>::value, ldb, stride_b, &beta, c.device,
                                      data_type<C>::value, ldc, stride_c, batch, CUBLAS_COMPUTE_32F,
                                      CUBLAS_GEMM_DEFAULT));
    }
    c.down();
    for (int q = 0; q < batch; q++) {
        for (int j = 0; j < n; j++) {
            for (int i = 0; i < ldc; i++) {
                size_t e = (size_t)(q * stride_c + j * ldc + i);
                // Rows between m and ldc keep their values.
                double sum = i < m ? 2 * to_float(before[e]) : to_float(before[e]);
                for (int l = 0; l < k && i < m; l++)
                    sum += 0.5 * at(a, ta, i, l, lda, q * stride_a) * at(b, tb, l, j, ldb, q * stride_b);
                CHECK_NEAR(to_float(c.host[e]), sum, tolerance);
            }
        }
    }
}
TEST(cublas_gemm_of_all_kinds)
{
    FOR_SEEDS(2, 1, 1) {
        cublasHandle_t h;
        OK(cublasCreate(&h));
        for (int kind = 0; kind < 4; kind++) {
            bool ta = kind & 1, tb = kind >> 1;
            check_gemm<float, float>(h, ta, tb, 1, 1e-5);
            check_gemm<bf16, bf16>(h, ta, tb, 3, 3e-2);
            check_gemm<bf16, float>(h, ta, tb, 1, 1e-5);
            check_gemm<__half, __half>(h, ta, tb, 2, 5e-3);
        }
        OK(cublasSetMathMode(h, CUBLAS_TF32_TENSOR_OP_MATH));
        check_gemm<float, float>(h, false, true, 1, 1e-2);
        OK(cublasDestroy(h));
    }
}

static double gelu_reference(double v)
{
    return 0.5 * v * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (v + 0.044715 * v * v * v)));
}

struct lt_call { // one call of cublasLtMatmul, with its descriptors
    cublasLtHandle_t h = nullptr;
    cublasLtMatmulDesc_t d = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, out = nullptr;
    cublasLtMatmulPreference_t p = nullptr;
    cublasLtMatmulHeuristicResult_t results[8];
    int found = 0;
    lt_call(cublasComputeType_t compute, cudaDataType ta, cudaDataType tb, cudaDataType tc, cudaDataType td,
            int m, int n, int k, bool transpose_a, bool transpose_b)
    {
        int32_t ta_ = transpose_a, tb_ = transpose_b;
        OK(cublasLtCreate(&h));
        OK(cublasLtMatmulDescCreate(&d, compute, CUDA_R_32F));
        set(CUBLASLT_MATMUL_DESC_TRANSA, ta_);
        set(CUBLASLT_MATMUL_DESC_TRANSB, tb_);
        OK(cublasLtMatrixLayoutCreate(&a, ta, (uint64_t)(transpose_a ? k : m),
                                      (uint64_t)(transpose_a ? m : k), transpose_a ? k : m));
        OK(cublasLtMatrixLayoutCreate(&b, tb, (uint64_t)(transpose_b ? n : k),
                                      (uint64_t)(transpose_b ? k : n), transpose_b ? n : k));
        OK(cublasLtMatrixLayoutCreate(&c, tc, (uint64_t)m, (uint64_t)n, m));
        OK(cublasLtMatrixLayoutCreate(&out, td, (uint64_t)m, (uint64_t)n, m));
        OK(cublasLtMatmulPreferenceCreate(&p));
    }
    ~lt_call()
    {
        OK(cublasLtMatmulPreferenceDestroy(p));
        OK(cublasLtMatrixLayoutDestroy(out));
        OK(cublasLtMatrixLayoutDestroy(c));
        OK(cublasLtMatrixLayoutDestroy(b));
        OK(cublasLtMatrixLayoutDestroy(a));
        OK(cublasLtMatmulDescDestroy(d));
        OK(cublasLtDestroy(h));
    }
    template <class T> void set(cublasLtMatmulDescAttributes_t attribute, T value)
    {
        OK(cublasLtMatmulDescSetAttribute(d, attribute, &value, sizeof value));
    }
    void workspace(size_t n)
    {
        OK(cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &n, sizeof n));
    }
    int query() { return cublasLtMatmulAlgoGetHeuristic(h, d, a, b, c, out, p, 8, results, &found); }
};

// m features, n rows, k inputs, as in a linear layer
template <class T, class D>
static void check_epilogue(cublasLtEpilogue_t epilogue, float beta_value, double tolerance)
{
    const int m = 16, n = 6, k = 24;
    const bool adds = epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_BIAS ||
                      epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    const bool writes_aux = epilogue == CUBLASLT_EPILOGUE_GELU_AUX ||
                            epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    const bool reads_aux = epilogue == CUBLASLT_EPILOGUE_DGELU || epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD;
    const bool gelu = writes_aux || epilogue == CUBLASLT_EPILOGUE_GELU ||
                      epilogue == CUBLASLT_EPILOGUE_GELU_BIAS;
    const float alpha = 1.5f, beta = beta_value;
    // BGRADA needs an A that is not transposed, and BGRADB a B that is transposed.
    const bool ta = epilogue != CUBLASLT_EPILOGUE_BGRADA, tb = epilogue == CUBLASLT_EPILOGUE_BGRADB;
    const int lda = ta ? k : m, ldb = tb ? n : k;
    lt_call call(CUBLAS_COMPUTE_32F, data_type<T>::value, data_type<T>::value, data_type<D>::value,
                 data_type<D>::value, m, n, k, ta, tb);
    buffer<T> a((size_t)(m * k)), b((size_t)(n * k));
    buffer<D> c((size_t)(m * n)), d((size_t)(m * n)), aux((size_t)(m * n)), bias((size_t)std::max(m, n));
    buffer<unsigned char> workspace(4096);
    random_values(a);
    random_values(b);
    random_values(aux);
    random_values(bias);
    if (beta != 0) random_values(c);
    else for (auto &v : c.host) v = from_float<D>(NAN); // beta 0: c must not be read
    c.up();
    call.set(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)epilogue);
    const bool has_bias = adds || epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD ||
                          epilogue == CUBLASLT_EPILOGUE_BGRADA || epilogue == CUBLASLT_EPILOGUE_BGRADB;
    if (has_bias) call.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, (void *)bias.device);
    if (writes_aux || reads_aux) {
        call.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (void *)aux.device);
        call.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)m);
    }
    call.workspace(4096);
    OK(call.query());
    CHECK(call.found >= 1);
    if (!call.found) return;
    OK(cudaMemset(workspace.device, 0, 4096));
    OK(cublasLtMatmul(call.h, call.d, &alpha, a.device, call.a, b.device, call.b, &beta, c.device, call.c,
                      d.device, call.out, &call.results[0].algo, workspace.device, 4096, 0));
    d.down();
    std::vector<D> aux_before = aux.host, bias_before = bias.host;
    aux.down();
    bias.down();
    // DGELU_BGRAD sums the rounded numbers of D, so the tolerance includes the rounding of each number.
    std::vector<double> bias_gradient((size_t)std::max(m, n)), rounding((size_t)std::max(m, n));
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < m; i++) {
            size_t e = (size_t)(i + j * m);
            double sum = 0;
            for (int l = 0; l < k; l++) sum += at(a, ta, i, l, lda) * at(b, tb, l, j, ldb);
            sum = alpha * sum + (beta != 0 ? beta * to_float(c.host[e]) : 0) +
                  (adds ? to_float(bias_before[(size_t)i]) : 0);
            if (writes_aux) CHECK_NEAR(to_float(aux.host[e]), sum, tolerance * (1 + fabs(sum)));
            if (gelu) sum = gelu_reference(sum);
            if (reads_aux) {
                double x = to_float(aux_before[e]);
                sum *= (gelu_reference(x + 1e-5) - gelu_reference(x - 1e-5)) / 2e-5;
            }
            if (epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) {
                bias_gradient[(size_t)i] += sum;
                rounding[(size_t)i] += fabs(sum) * data_type<D>::rounding;
            }
            CHECK_NEAR(to_float(d.host[e]), sum, tolerance * (1 + fabs(sum)));
        }
    }
    for (int l = 0; l < k; l++) {
        for (int i = 0; i < m && epilogue == CUBLASLT_EPILOGUE_BGRADA; i++)
            bias_gradient[(size_t)i] += at(a, ta, i, l, lda);
        for (int j = 0; j < n && epilogue == CUBLASLT_EPILOGUE_BGRADB; j++)
            bias_gradient[(size_t)j] += at(b, tb, l, j, ldb);
    }
    int count = epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD || epilogue == CUBLASLT_EPILOGUE_BGRADA ? m
                : epilogue == CUBLASLT_EPILOGUE_BGRADB ? n
                : 0;
    for (int i = 0; i < count; i++)
        CHECK_NEAR(to_float(bias.host[(size_t)i]), bias_gradient[(size_t)i],
                   tolerance * (1 + fabs(bias_gradient[(size_t)i])) + rounding[(size_t)i]);
}
TEST(cublaslt_epilogues)
{
    static const cublasLtEpilogue_t all[] = {CUBLASLT_EPILOGUE_DEFAULT,  CUBLASLT_EPILOGUE_BIAS,
                                             CUBLASLT_EPILOGUE_GELU,     CUBLASLT_EPILOGUE_GELU_BIAS,
                                             CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                                             CUBLASLT_EPILOGUE_DGELU,    CUBLASLT_EPILOGUE_DGELU_BGRAD,
                                             CUBLASLT_EPILOGUE_BGRADA,   CUBLASLT_EPILOGUE_BGRADB};
    FOR_SEEDS(3, 1, 1) {
        for (auto e : all) {
            check_epilogue<bf16, bf16>(e, 0, 1e-2);
            check_epilogue<__half, __half>(e, 1, 2e-3);
            check_epilogue<float, float>(e, 0.5f, 1e-5);
        }
        check_epilogue<bf16, float>(CUBLASLT_EPILOGUE_DEFAULT, 1, 1e-5);
        // BGRADA is refused if A is transposed. BGRADB is refused if B is not transposed. `b_wants` 0 tests
        // BGRADA, and `b_wants` 1 tests BGRADB.
        for (int b_wants = 0; b_wants < 2; b_wants++) {
            lt_call other(CUBLAS_COMPUTE_32F, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, 64, 64, 64,
                          true, false);
            buffer<bf16> bias(64);
            other.set(CUBLASLT_MATMUL_DESC_EPILOGUE,
                      (uint32_t)(b_wants ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_BGRADA));
            other.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, (void *)bias.device);
            other.workspace(1 << 20);
            CHECK_EQUAL(other.query(), CUBLAS_STATUS_NOT_SUPPORTED);
        }
        // cublasLtMatmul refuses a bias if the epilogue adds none; the heuristic accepts such a bias.
        const float one = 1, zero = 0;
        buffer<bf16> x(1024);
        lt_call call(CUBLAS_COMPUTE_32F, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, 16, 8, 24, true,
                     false);
        randomise(x);
        for (int with = 0; with < 2; with++) {
            void *bias = with ? x.device : nullptr;
            call.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
            OK(call.query());
            CHECK_EQUAL(cublasLtMatmul(call.h, call.d, &one, x.device, call.a, x.device, call.b, &zero,
                                       x.device + 512, call.c, x.device + 512, call.out,
                                       &call.results[0].algo, nullptr, 0, 0),
                        with ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS);
        }
    }
}

template <class A, class B> static void check_fp8(double tolerance)
{
    const int m = 16, n = 5, k = 32;
    const float alpha = 2, beta = 0;
    lt_call call(CUBLAS_COMPUTE_32F, data_type<A>::value, data_type<B>::value, CUDA_R_16BF, CUDA_R_16BF, m, n,
                 k, true, false);
    buffer<A> a((size_t)(m * k));
    buffer<B> b((size_t)(n * k));
    buffer<bf16> c((size_t)(m * n)), d((size_t)(m * n));
    buffer<float> scales(8);
    random_values(a);
    random_values(b);
    c.up();
    scales.host = {0.25f, 8, 8, 0, 8, 0, 0, 0};
    scales.up();
    call.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (const void *)scales.device);
    call.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)1);
    for (int at : {1, 2, 4}) { // a scale's address must be a multiple of 16; the heuristic does not check
        call.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, (const void *)(scales.device + at));
        OK(call.query());
        CHECK_EQUAL(cublasLtMatmul(call.h, call.d, &alpha, a.device, call.a, b.device, call.b, &beta,
                                   c.device, call.c, d.device, call.out, &call.results[0].algo, nullptr, 0,
                                   0), at == 4 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED);
    }
    d.down();
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < m; i++) {
            double sum = 0;
            for (int l = 0; l < k; l++) sum += 4 * at(a, true, i, l, k) * at(b, false, l, j, k);
            CHECK_NEAR(to_float(d.host[(size_t)(i + j * m)]), sum, tolerance * (1 + fabs(sum)));
        }
    }
}
TEST(cublaslt_fp8_with_scales)
{
    FOR_SEEDS(2, 1, 1) {
        check_fp8<__nv_fp8_e4m3, __nv_fp8_e4m3>(1e-2);
        check_fp8<__nv_fp8_e4m3, __nv_fp8_e5m2>(1e-2);
        check_fp8<__nv_fp8_e5m2, __nv_fp8_e4m3>(1e-2);
        lt_call both(CUBLAS_COMPUTE_32F, CUDA_R_8F_E5M2, CUDA_R_8F_E5M2, CUDA_R_16BF, CUDA_R_16BF, 16, 16, 16,
                     true, false);
        CHECK(both.query() != CUBLAS_STATUS_SUCCESS);
        lt_call wrong_layout(CUBLAS_COMPUTE_32F, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_16BF, CUDA_R_16BF, 16,
                             16, 16, false, false);
        CHECK(wrong_layout.query() != CUBLAS_STATUS_SUCCESS);
        lt_call odd(CUBLAS_COMPUTE_32F, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_16BF, CUDA_R_16BF, 16, 16, 24,
                    true, false);
        CHECK(odd.query() != CUBLAS_STATUS_SUCCESS);
        // A row of the result must be a multiple of 16 bytes.
        lt_call narrow(CUBLAS_COMPUTE_32F, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_16BF, CUDA_R_16BF, 68, 64,
                       64, true, false);
        CHECK_EQUAL(narrow.query(), CUBLAS_STATUS_NOT_SUPPORTED);
        lt_call wide(CUBLAS_COMPUTE_32F, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_16BF, CUDA_R_16BF, 72, 64, 64,
                     true, false);
        OK(wide.query());
        // The bias of an f32 result must be bf16, which is also the default. An f32 bias is refused.
        lt_call biased(CUBLAS_COMPUTE_32F, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_32F, CUDA_R_32F, 68, 64, 64,
                       true, false);
        buffer<float> bias(68);
        biased.set(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_BIAS);
        biased.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, (void *)bias.device);
        OK(biased.query());
        biased.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)CUDA_R_32F);
        CHECK_EQUAL(biased.query(), CUBLAS_STATUS_NOT_SUPPORTED);
    }
}

// Returns the exponent of x, but at least `smallest`: the exponent of subnormal numbers.
static int exponent_from(double x, int smallest) { return x == 0 ? smallest : std::max(ilogb(x), smallest); }
static double cut(double x, int last) { return ldexp(trunc(ldexp(x, -last)), last); }
// Returns a sum of products as Hopper's tensor cores compute it, 32 products at a time. The 32 products and
// the sum so far are truncated: of their bits, those below the largest exponent - 13 become zero. The new sum
// keeps 13 bits after the point of its own exponent (MMA-Sim, arXiv 2511.10909, FP8 of WGMMA).
static float hopper_sum(const std::vector<double> &a, const std::vector<double> &b, int least_a, int least_b)
{
    double sum = 0;
    for (size_t from = 0; from < a.size(); from += 32) {
        const size_t end = std::min(a.size(), from + 32);
        int exponent = exponent_from(sum, -126);
        for (size_t l = from; l < end; l++)
            if (a[l] != 0 && b[l] != 0)
                exponent = std::max(exponent, exponent_from(a[l], least_a) + exponent_from(b[l], least_b));
        sum = cut(sum, exponent - 13);
        for (size_t l = from; l < end; l++) sum += cut(a[l] * b[l], exponent - 13);
        sum = cut(sum, exponent_from(sum, -126) - 13);
    }
    return (float)sum;
}

// Checks that a matrix product with fast accumulation has the bits of hopper_sum. The operands have fp8
// numbers of very different sizes; the result is f32.
template <class A, class B> static void check_fp8_sums(int least_a, int least_b)
{
    const int m = 64, n = 33, k = 208;
    const float one = 1, zero = 0;
    const size_t workspace_bytes = 4 << 20;
    lt_call call(CUBLAS_COMPUTE_32F, data_type<A>::value, data_type<B>::value, CUDA_R_32F, CUDA_R_32F, m, n,
                 k, true, false);
    buffer<A> a((size_t)(m * k));
    buffer<B> b((size_t)(n * k));
    buffer<float> d((size_t)(m * n)), scales(1);
    buffer<unsigned char> workspace(workspace_bytes);
    for (auto &v : a.host) v = from_float<A>(ldexpf(random_number(), (int)(4 * random_number())));
    for (auto &v : b.host) v = from_float<B>(ldexpf(random_number(), (int)(4 * random_number())));
    a.up();
    b.up();
    scales.host = {1};
    scales.up();
    call.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (const void *)scales.device);
    call.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, (const void *)scales.device);
    call.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)1);
    call.workspace(workspace_bytes);
    OK(call.query());
    OK(cublasLtMatmul(call.h, call.d, &one, a.device, call.a, b.device, call.b, &zero, d.device, call.c,
                      d.device, call.out, &call.results[0].algo, workspace.device, workspace_bytes, 0));
    d.down();
    int other = 0, exact = 0;
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < m; i++) {
            std::vector<double> x((size_t)k), y((size_t)k);
            double sum = 0;
            for (int l = 0; l < k; l++) {
                x[(size_t)l] = at(a, true, i, l, k);
                y[(size_t)l] = at(b, false, l, j, k);
                sum += x[(size_t)l] * y[(size_t)l];
            }
            other += d.host[(size_t)(i + j * m)] != hopper_sum(x, y, least_a, least_b);
            exact += d.host[(size_t)(i + j * m)] == (float)sum;
        }
    }
    CHECK_EQUAL(other, 0);
    CHECK(exact < m * n / 2);
}
TEST(cublaslt_fp8_sums_as_hopper)
{
    FOR_SEEDS(1, 1, 1) {
        int major = 0;
        OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
        if (major != 9) SKIP("this GPU is not a Hopper");
        check_fp8_sums<__nv_fp8_e4m3, __nv_fp8_e4m3>(-6, -6);
        check_fp8_sums<__nv_fp8_e4m3, __nv_fp8_e5m2>(-6, -14);
        check_fp8_sums<__nv_fp8_e5m2, __nv_fp8_e4m3>(-14, -6);
    }
}

#ifdef TT_EMULATE
TEST(cublaslt_offers_and_refuses)
{
    emu_configure(2, (size_t)8 << 20, 1, 0);
    {
        const float one = 1, zero = 0;
        buffer<bf16> x(1024);
        buffer<unsigned char> workspace(1 << 20);
        randomise(x);
        lt_call call(CUBLAS_COMPUTE_32F, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, 16, 8, 24, false,
                     false);
        auto run = [&](bf16 *a, const cublasLtMatmulAlgo_t *algo, size_t workspace_bytes) {
            return cublasLtMatmul(call.h, call.d, &one, a, call.a, x.device, call.b, &zero, x.device + 512,
                                  call.c, x.device + 512, call.out, algo, workspace.device, workspace_bytes,
                                  0);
        };
        OK(call.query()); // the query allows no workspace
        CHECK_EQUAL(call.found, 2);
        CHECK_EQUAL(call.results[0].workspaceSize, 0);
        call.workspace(1 << 20);
        OK(call.query());
        CHECK_EQUAL(call.found, 4);
        CHECK(call.results[0].workspaceSize > call.results[1].workspaceSize &&
              call.results[1].workspaceSize > 0);
        // The workspace is too small for the first algorithm.
        CHECK_EQUAL(run(x.device, &call.results[0].algo, 4096), CUBLAS_STATUS_INVALID_VALUE);
        OK(run(x.device, &call.results[0].algo, 1 << 20));
        OK(run(x.device, nullptr, 0));
        // A is not aligned to 16 bytes.
        CHECK_EQUAL(run(x.device + 1, &call.results[0].algo, 1 << 20), CUBLAS_STATUS_NOT_SUPPORTED);
        OK(run(x.device + 1, &call.results[3].algo, 0));
        uint32_t alignment = 2; // the alignment of A, as the caller promises it
        OK(cublasLtMatmulPreferenceSetAttribute(call.p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                                                &alignment, sizeof alignment));
        OK(call.query());
        CHECK_EQUAL(call.found, 1);
        call.set(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_GELU_AUX);
        CHECK_EQUAL(call.query(), CUBLAS_STATUS_NOT_SUPPORTED); // the auxiliary matrix is missing
        call.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (void *)(x.device + 512));
        call.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)20);
        CHECK_EQUAL(call.query(), CUBLAS_STATUS_NOT_SUPPORTED); // 20 is no multiple of 8
        call.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)16);
        OK(call.query());
        call.set(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_BIAS);
        CHECK_EQUAL(call.query(), CUBLAS_STATUS_INVALID_VALUE); // the pointer to the bias is missing
        int64_t wide = 4;
        CHECK_EQUAL(cublasLtMatmulDescSetAttribute(call.d, CUBLASLT_MATMUL_DESC_EPILOGUE, &wide, sizeof wide),
                    CUBLAS_STATUS_INVALID_VALUE);
        call.set(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_DEFAULT);
        OK(cudaSetDevice(1));
        CHECK(run(x.device, nullptr, 0) != CUBLAS_STATUS_SUCCESS); // a handle works only on its device
        OK(cudaSetDevice(0));
        lt_call mixed(CUBLAS_COMPUTE_32F, CUDA_R_16BF, CUDA_R_16F, CUDA_R_16BF, CUDA_R_16BF, 16, 8, 24, false,
                      false);
        CHECK_EQUAL(mixed.query(), CUBLAS_STATUS_NOT_SUPPORTED);
    }
    CHECK_EQUAL(emu_live_objects(nullptr, 0), 0);
}
#endif

static const test_case tests[] = {
    TEST_CASE(conversions_have_the_bits_of_nvidias), TEST_CASE(mma_fragments_lie_as_the_manual_says),
    TEST_CASE(wgmma_reads_and_leaves_what_the_manual_says), TEST_CASE(phases_end_with_the_last_arrival),
    TEST_CASE(tf32_rounds_to_nearest_away_from_zero), TEST_CASE(ldmatrix_gives_each_lane_its_part),
    TEST_CASE(cp_async_copies_and_zero_fills), TEST_CASE(warp_functions_agree_with_loops),
    TEST_CASE(syncwarp_orders_reads_and_a_write), TEST_CASE(atomics_add_up),
    TEST_CASE(shared_memory_beyond_48_kib_is_asked_for), TEST_CASE(copies_in_one_and_two_dimensions),
    TEST_CASE(events_order_streams), TEST_CASE(legacy_stream_waits_for_blocking_streams),
    TEST_CASE(host_functions_run_in_order), TEST_CASE(events_tell_time),
    TEST_CASE(graphs_are_captured_replayed_and_updated), TEST_CASE(graphs_read_pinned_memory_when_they_run),
    TEST_CASE(captures_refuse_what_cuda_refuses), TEST_CASE(cublas_gemm_of_all_kinds),
    TEST_CASE(cublaslt_epilogues), TEST_CASE(cublaslt_fp8_with_scales),
    TEST_CASE(cublaslt_fp8_sums_as_hopper),
#ifdef TT_EMULATE
    TEST_CASE(every_scheduler_but_eager_shows_a_missing_event),
    TEST_CASE(a_seed_decides_the_order_of_threads_and_blocks), TEST_CASE(misuse_has_cudas_error_codes),
    TEST_CASE(kernels_reach_peers_once_enabled), TEST_CASE(links_that_bring_wrong_bytes),
    TEST_CASE(kernels_load_from_pinned_memory), TEST_CASE(captures_of_threads_are_apart),
    TEST_CASE(memory_has_a_limit_and_leaks_are_counted),
    TEST_CASE(managed_memory_is_the_hosts_and_the_devices), TEST_CASE(stalls_of_the_host_are_counted),
    TEST_CASE(faults_are_injected_once_or_on_end),
    TEST_CASE(a_host_thread_for_each_device), TEST_CASE(cublaslt_offers_and_refuses),
#endif
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
