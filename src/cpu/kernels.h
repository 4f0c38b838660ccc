#ifndef TT__LANES /* by itself (compiled alone), this file is the portable variant of the kernels */
#include "isa.h"
#define TT__LANES 4
#define TT__ISA portable
#define TT__TARGET
#define TT__KERNELS_ONLY /* the tables have external linkage, as alone.h declares them */
#endif

/* ------------------------------------------------------------------------------------------------- vectors
   A vector holds TT__LANES floats. Kernels use the vector extensions of gcc and clang, so that one source
   serves every instruction set. Only operations that the extensions lack or compile badly (fused
   multiply-add, max, square root, transposes, some loads) are written for each instruction set. TT__K()
   appends the name of the instruction set to a name. */

#define TT__JOIN2(name, isa) tt__##name##_##isa
#define TT__JOIN(name, isa) TT__JOIN2(name, isa)
#define TT__K(name) TT__JOIN(name, TT__ISA)
#define TT__ALWAYS __attribute__((always_inline))
#define TT__FN static TT__TARGET                                /* a kernel of this instruction set      */
#define TT__INLINE static inline TT__TARGET TT__ALWAYS          /* a building block of kernels           */
#define TT__OUTLINE static TT__TARGET __attribute__((noinline)) /* a function that several kernels share */
/* Functions and building blocks that may also use the CPU's dot products of bf16 or AMX tiles. */
#define TT__DOT_FN static TT__DOT_TARGET __attribute__((noinline))
#define TT__DOT_INLINE static inline TT__DOT_TARGET TT__ALWAYS
#define TT__TILES_FN static TT__TILES_TARGET __attribute__((noinline))

#if defined(TT__KERNELS_ONLY) || defined(TT__KERNELS_ELSEWHERE)
#define TT__TABLE
extern const tt__isa_table TT__K(isa_table);
#else
#define TT__TABLE static
#endif
