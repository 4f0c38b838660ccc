#pragma once

/* What differs between instruction sets is undone, but for TT__LANES, by which the file sees that it is in a
   reading for one of them. */
#undef TT__ISA
#undef TT__TARGET
#undef TT__NEON
#undef TT__WIDEN_F16
#undef TT__NARROW_F16
#undef TT__DOT
#undef TT__DOT_TARGET
#undef TT__DOT_DEPTH
#undef TT__TILES
