#pragma once

/* What differs from pass to pass, but TT__LANES, of which the rest of the file sees that it is in a pass. */
#undef TT__ISA
#undef TT__TARGET
#undef TT__NEON
#undef TT__WIDEN_F16
#undef TT__NARROW_F16
#undef TT__DOT
#undef TT__DOT_TARGET
#undef TT__DOT_DEPTH
#undef TT__TILES
