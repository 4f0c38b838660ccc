/* Emulates AVX-512 in builds with -include of this file. The 16-lane kernels then run on any x86-64 with
   AVX2, by the intrinsics of SIMDe (github.com/simd-everywhere/simde; Debian: libsimde-dev). The macros below
   ignore the operand `ones`, because the kernels' masks are all ones. gcc 12 at -O2 miscompiles a loop that
   stores 64-byte vectors computed from a loop counter, if gcc replaces the vectors by smaller vectors. The
   kernels have no such loop. The code below emulates tiles (AMX), which SIMDe lacks. */
#define _GNU_SOURCE /* defined as in tinytrain.h */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <simde/x86/avx512.h>

typedef unsigned short emulated_u16x16 __attribute__((vector_size(32)));
typedef unsigned emulated_u32x16 __attribute__((vector_size(64)));

#define TT__AVX512_TARGET "avx2,fma"
#define TT__AVX512_HERE 1
#define TT__AVX512_DOT(sum, a, b) \
    (tt__vf) simde_mm512_dpbf16_ps((simde__m512)(sum), (simde__m512bh)(a), (simde__m512bh)(b))
#define TT__AVX512_DOT_TARGET __attribute__((target(TT__AVX512_TARGET)))
#define TT__AVX512_DOT_HERE 1
#define __m512 simde__m512
#define __m512i simde__m512i
#define _mm512_fmadd_ps simde_mm512_fmadd_ps
#define _mm512_maskz_cvtepu16_epi32(ones, a) __builtin_convertvector((emulated_u16x16)(a), emulated_u32x16)
#define _mm512_maskz_max_ps(ones, a, b) simde_mm512_max_ps(a, b)
#define _mm512_maskz_min_ps(ones, a, b) simde_mm512_min_ps(a, b)
#define _mm512_maskz_permutexvar_ps(ones, at, a) simde_mm512_permutexvar_ps(at, a)
#define _mm512_maskz_sqrt_ps(ones, a) simde_mm512_sqrt_ps(a)
#define _mm512_maskz_mul_epu32(ones, a, b) simde_mm512_mul_epu32(a, b)
#define _mm512_maskz_unpacklo_ps(ones, a, b) simde_mm512_unpacklo_ps(a, b)
#define _mm512_maskz_unpackhi_ps(ones, a, b) simde_mm512_unpackhi_ps(a, b)
#define _mm512_maskz_shuffle_ps(ones, a, b, which) simde_mm512_shuffle_ps(a, b, which)
#define _mm512_maskz_shuffle_f32x4(ones, a, b, which) simde_mm512_shuffle_f32x4(a, b, which)
#undef I /* complex.h defines I */

/* ---- tiles: registers of each thread, with the shapes that the thread configured. A trap ends a program
   that uses tiles before their configuration or after their release. ---- */

#define TT__TILES_TARGET __attribute__((target(TT__AVX512_TARGET)))
#define TT__TILES_HERE 1
#define TT__TILES_FENCE ((void)0)
#define TT__TILES_KEEP(p) ((void)(p))

typedef struct emulated_tile {
    int rows, row_bytes;
    union {
        uint16_t bf16[16][32];
        float f32[16][16];
    } of;
} emulated_tile;
static __thread emulated_tile emulated_tiles[8];

static inline void emulate_tile_loadconfig(const void *config)
{
    const uint8_t *bytes = (const uint8_t *)config;
    memset(emulated_tiles, 0xff, sizeof emulated_tiles);
    for (int t = 0; t < 8; t++) {
        emulated_tile *tile = &emulated_tiles[t];
        tile->rows = bytes[48 + t];
        tile->row_bytes = bytes[16 + 2 * t] | bytes[17 + 2 * t] << 8;
        memset(&tile->of, 0, sizeof tile->of);
        if (bytes[0] != 1 || tile->rows > 16 || tile->row_bytes > 64 || tile->row_bytes % 4) __builtin_trap();
    }
}

static inline void emulate_tile_release(void) { memset(emulated_tiles, 0xff, sizeof emulated_tiles); }

static inline void emulate_tile_zero(int t)
{
    if (emulated_tiles[t].rows < 1) __builtin_trap(); /* the tile was not configured */
    memset(&emulated_tiles[t].of, 0, sizeof emulated_tiles[t].of);
}

static inline void emulate_tile_loadd(int t, const void *from, int64_t stride)
{
    emulate_tile_zero(t);
    for (int r = 0; r < emulated_tiles[t].rows; r++)
        memcpy(emulated_tiles[t].of.bf16[r], (const char *)from + r * stride,
               (size_t)emulated_tiles[t].row_bytes);
}

static inline void emulate_tile_stored(int t, void *to, int64_t stride)
{
    if (emulated_tiles[t].rows < 1) __builtin_trap();
    for (int r = 0; r < emulated_tiles[t].rows; r++)
        memcpy((char *)to + r * stride, emulated_tiles[t].of.bf16[r], (size_t)emulated_tiles[t].row_bytes);
}

/* Replaces subnormals by zeros. */
static inline float emulated_flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

static inline float emulated_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return emulated_flush(x);
}

/* Emulates TDPBF16PS as in Intel's manual: sums the even and the odd products separately by fused
   multiply-adds, adds the two sums, then adds the result to the old value. */
static inline void emulate_tile_dpbf16ps(int c, int a, int b)
{
    emulated_tile *sum = &emulated_tiles[c];
    const emulated_tile *x = &emulated_tiles[a], *y = &emulated_tiles[b];
    if (sum->rows < 1 || x->rows != sum->rows || y->row_bytes != sum->row_bytes ||
        x->row_bytes != 4 * y->rows)
        __builtin_trap();
    for (int i = 0; i < sum->rows; i++)
        for (int j = 0; j < sum->row_bytes / 4; j++) {
            float part[2] = {0, 0};
            for (int k = 0; k < x->row_bytes / 2; k++)
                part[k % 2] = emulated_flush(fmaf(emulated_bf16(x->of.bf16[i][k]),
                                                  emulated_bf16(y->of.bf16[k / 2][2 * j + k % 2]),
                                                  part[k % 2]));
            sum->of.f32[i][j] = emulated_flush(emulated_flush(sum->of.f32[i][j]) +
                                               emulated_flush(part[0] + part[1]));
        }
}

/* Emulates VCVTNE2PS2BF16: rounds to nearest even, flushes subnormals to zero, puts b into the low half. Only
   NaNs give NaNs. */
static inline simde__m512i emulate_cvtne2ps_pbh(simde__m512 a, simde__m512 b)
{
    float x[32];
    uint16_t out[32];
    simde__m512i result;
    memcpy(x, &b, 64);
    memcpy(x + 16, &a, 64);
    for (int k = 0; k < 32; k++) {
        float y = emulated_flush(x[k]);
        uint32_t bits;
        memcpy(&bits, &y, sizeof bits);
        out[k] = (uint16_t)(isnan(y) ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    memcpy(&result, out, 64);
    return result;
}

#define __m512bh simde__m512i
#define _mm512_cvtne2ps_pbh emulate_cvtne2ps_pbh
#define _mm512_permutexvar_epi16 simde_mm512_permutexvar_epi16
#define _mm512_loadu_si512 simde_mm512_loadu_si512
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulate_tile_loadconfig
#define _tile_release emulate_tile_release
#define _tile_zero emulate_tile_zero
#define _tile_loadd emulate_tile_loadd
#define _tile_stored emulate_tile_stored
#define _tile_dpbf16ps emulate_tile_dpbf16ps
