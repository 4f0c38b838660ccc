/* Declares the tables of kernels, without the kernels, for files of src/ that are compiled by themselves. */
#define TT__KERNELS_ELSEWHERE
#include "kernels.h"
#undef TT__KERNELS_ELSEWHERE
#undef TT__TABLE
#undef TT__ISA
#undef TT__TARGET
#undef TT__NEON
#undef TT__WIDEN_F16
#undef TT__NARROW_F16
#undef TT__DOT
#undef TT__DOT_TARGET
#undef TT__DOT_DEPTH
#undef TT__TILES
