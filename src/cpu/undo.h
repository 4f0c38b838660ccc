#pragma once

/* Undefines the macros that differ between instruction sets, except TT__LANES, which tells tinytrain.h that
   it includes itself for an instruction set. */
#undef TT__ISA
#undef TT__TARGET
#undef TT__NEON
#undef TT__WIDEN_F16
#undef TT__NARROW_F16
#undef TT__DOT
#undef TT__DOT_TARGET
#undef TT__DOT_DEPTH
#undef TT__TILES
