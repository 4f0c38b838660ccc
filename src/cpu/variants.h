#pragma once
#include "isa.h"
#ifndef TINYTRAIN_FILENAME /* by itself (compiled alone), this file only declares the tables of kernels */
#define TINYTRAIN_FILENAME "alone.h"
#endif

/* ---- one variant for each instruction set ----

   The variants are most of a compiler's work. A build of many programs, such as the Makefile's build of the
   tests, compiles the variants once, into an object for which TT__KERNELS_ONLY is defined. The source of that
   object ends here. The programs are compiled with TT__KERNELS_ELSEWHERE and only declare the variants'
   tables. The object and each program define the public functions above. The linker is told to take the
   first definition, which is the program's own. */

#define TT__LANES 4
#define TT__ISA portable
#define TT__TARGET
#include TINYTRAIN_FILENAME
#undef TT__LANES

/* GCC for Windows aligns the stack to 16 bytes, but moves registers of AVX to and from the stack by
   instructions that need an alignment of 32 or 64 bytes (gcc.gnu.org/bugzilla, 54412). The assembler replaces
   these instructions if it gets -muse-unaligned-vector-move. TINYTRAIN_UNALIGNED_MOVES says that the command
   line has this option. */
#if defined(_WIN32) && !defined(__clang__) && !defined(TINYTRAIN_UNALIGNED_MOVES)
#define TT__UNALIGNED_STACK
#define TINYTRAIN_NO_AVX2
#endif
#if defined(__x86_64__) && !defined(TINYTRAIN_NO_AVX2)
#define TT__HAS_AVX2
#include <cpuid.h>
#include <immintrin.h>
#define TT__LANES 8
#define TT__ISA avx2
#define TT__TARGET __attribute__((target("avx2,fma,f16c")))
#define TT__WIDEN_F16(p) (tt__vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define TT__NARROW_F16(p, x) \
    _mm_storeu_si128((__m128i *)(void *)(p), _mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT))
#include TINYTRAIN_FILENAME
#undef TT__LANES

#ifndef TINYTRAIN_NO_AVX512
#define TT__HAS_AVX512
#define TT__LANES 16
#define TT__ISA avx512
#ifndef TT__AVX512_TARGET /* tests/emulate_avx512.h runs these kernels on CPUs without AVX-512 */
#define TT__AVX512_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
#define TT__WIDEN_F16(p) \
    (tt__vf)_mm512_maskz_cvtph_ps((__mmask16)-1, _mm256_loadu_si256((const __m256i *)(const void *)(p)))
#define TT__NARROW_F16(p, x) \
    _mm256_storeu_si256((__m256i *)(void *)(p), \
                        _mm512_maskz_cvtps_ph((__mmask16)-1, (__m512)(x), _MM_FROUND_TO_NEAREST_INT))
#define TT__AVX512_HERE \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && \
     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#endif
#define TT__TARGET __attribute__((target(TT__AVX512_TARGET)))
#if defined(__clang__) || __GNUC__ >= 10
#ifndef TT__AVX512_DOT
#define TT__AVX512_DOT(sum, a, b) (tt__vf)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b))
#define TT__AVX512_DOT_TARGET __attribute__((target(TT__AVX512_TARGET ",avx512bf16")))
#define TT__AVX512_DOT_HERE __builtin_cpu_supports("avx512bf16")
#endif
#define TT__DOT TT__AVX512_DOT
#define TT__DOT_TARGET TT__AVX512_DOT_TARGET
#define TT__DOT_DEPTH 2
#endif
#if defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define TT__TILES
#ifndef TT__TILES_TARGET
#define TT__TILES_TARGET __attribute__((target(TT__AVX512_TARGET ",avx512bf16,amx-tile,amx-bf16")))
#define TT__TILES_HERE tt__tiles_here()
/* gcc 12's tile intrinsics do not tell the compiler which memory they read and write. FENCE: the compiler
   moves no access to memory across it. KEEP: the compiler keeps earlier stores to the memory at p. */
#define TT__TILES_FENCE __asm__ volatile("" ::: "memory")
#define TT__TILES_KEEP(p) __asm__ volatile("" : : "r"(p) : "memory")
/* Returns whether the CPU has AMX with bf16 (CPUID leaf 7: bits 24 and 22 of EDX) and Linux grants this
   process the tile registers. The function asks Linux for them by ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA
   (Linux, Documentation/arch/x86/xstate.rst). */
static bool tt__tiles_here(void)
{
    unsigned a, b, c, d = 0;
    return __builtin_cpu_supports("avx512bf16") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) &&
           (d >> 22 & 1) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif
#endif
#include TINYTRAIN_FILENAME
#undef TT__LANES
#endif
#endif

#ifdef __aarch64__ /* every aarch64 CPU has NEON */
#define TT__HAS_NEON
#include <arm_neon.h>
#define TT__LANES 4
#define TT__NEON
#define TT__ISA neon
#define TT__TARGET
#define TT__WIDEN_F16(p) (tt__vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define TT__NARROW_F16(p, x) vst1_u16((p), vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(x))))
#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 10)
#include <sys/auxv.h>
/* Bit 14 is HWCAP2_BF16, which old headers do not define. */
#define TT__NEON_DOT_HERE ((getauxval(AT_HWCAP2) >> 14 & 1) != 0)
#ifdef __clang__
#define TT__DOT_TARGET __attribute__((target("bf16")))
#else
#define TT__DOT_TARGET __attribute__((target("+bf16")))
#endif
/* Adds to `sum` (2 x 2) the product of 2 rows and 2 columns of 4 bf16 each, by BFMMLA. BFMMLA makes 16
   multiplications, BFDOT 8, and a fused multiply-add of fp32 makes 4; Neoverse V1 and N2 issue the same
   number of each in a cycle (Arm's software optimization guides, as quoted in LLVM's
   AArch64SchedNeoverseV1.td and N2.td). BFMMLA needs panels that are regrouped after packing. BFMMLA equals
   two BFDOTs one after the other, so an element of C does not depend on its neighbours. Products and sums are
   rounded to odd, subnormals count as 0 (Arm ARM, BFMMLA with FPCR.EBF = 0). The function is inline assembly
   because gcc 12 inlines the intrinsic only into functions for armv8.2-a or later; the kernels' building
   blocks, compiled for the user's target, could then not be inlined into such functions. */
TT__DOT_TARGET static inline __attribute__((always_inline))
float32x4_t tt__bfmmla(float32x4_t sum, float32x4_t rows, float32x4_t columns)
{
    __asm__("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(rows), "w"(columns));
    return sum;
}
#define TT__DOT(sum, rows, columns) \
    (tt__vf)tt__bfmmla((float32x4_t)(sum), (float32x4_t)(rows), (float32x4_t)(columns))
#define TT__DOT_DEPTH 4
#endif
#include TINYTRAIN_FILENAME
#undef TT__LANES
#endif
