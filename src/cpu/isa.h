#pragma once
#include "../base/base.h"

/* ===========================================================================================================
   CPU                                                                                                src/cpu/
   The building blocks of the CPU's kernels: instruction sets and vectors. tinytrain.h includes itself once
   for each instruction set, with TT__LANES defined, and then consists of the kernels alone (from
   src/cpu/kernels.h to src/cpu/undo.h). A context chooses the CPU's best instruction set when it opens. Uses
   base.
   ======================================================================================================== */

struct tt__isa_table {
    const char *name;
    /* Functions that run the fastest multiply-adds in a loop, in one thread, and return the number of FLOPs
       done. peak[0]: in fp32; peak[TT__BF16_DOT], peak[TT__BF16_TILES]: in bf16, or NULL if the instruction
       set has none. */
    double (*peak[3])(int64_t rounds, float *sink);
    tt_status (*run[TT__OP_COUNT])(const tt__launch *l);
    bool optimized; /* the compiler optimised the kernels */
};
