/* For builds with -include of this file: the 16-lane kernels run on any x86-64 with AVX2, their intrinsics by SIMDe
   (github.com/simd-everywhere/simde; Debian: libsimde-dev). The masks are all ones wherever the kernels have them. gcc 12 at -O2
   gets a loop wrong that stores 64-byte vectors made of a running integer, where it lowers the vector to smaller ones:
   the kernels have no such loop. */
#define _GNU_SOURCE /* as tinytrain.h does */
#include <immintrin.h>
#include <simde/x86/avx512.h>

#define TT__AVX512_TARGET "avx2,fma"
#define TT__AVX512_HERE 1
#define TT__AVX512_DOT(sum, a, b) (tt__vf)simde_mm512_dpbf16_ps((simde__m512)(sum), (simde__m512bh)(a), (simde__m512bh)(b))
#define TT__AVX512_DOT_TARGET __attribute__((target(TT__AVX512_TARGET)))
#define TT__AVX512_DOT_HERE 1
#define __m512 simde__m512
#define __m512i simde__m512i
#define _mm512_fmadd_ps simde_mm512_fmadd_ps
#define _mm512_maskz_max_ps(ones, a, b) simde_mm512_max_ps(a, b)
#define _mm512_maskz_min_ps(ones, a, b) simde_mm512_min_ps(a, b)
#define _mm512_maskz_sqrt_ps(ones, a) simde_mm512_sqrt_ps(a)
#define _mm512_maskz_mul_epu32(ones, a, b) simde_mm512_mul_epu32(a, b)
#define _mm512_maskz_unpacklo_ps(ones, a, b) simde_mm512_unpacklo_ps(a, b)
#define _mm512_maskz_unpackhi_ps(ones, a, b) simde_mm512_unpackhi_ps(a, b)
#define _mm512_maskz_shuffle_ps(ones, a, b, which) simde_mm512_shuffle_ps(a, b, which)
#define _mm512_maskz_shuffle_f32x4(ones, a, b, which) simde_mm512_shuffle_f32x4(a, b, which)
#undef I /* of complex.h */
