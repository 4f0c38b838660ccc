#pragma once
#include "../base/base.h"

/* ===========================================================================================================
   CPU                                                                                                src/cpu/
   What the CPU's kernels are made of: instruction sets and vectors. tinytrain.h includes itself with
   TT__LANES set, once for each instruction set, and is then its kernels alone (from src/cpu/kernels.h to
   src/cpu/undo.h); the best set that the CPU has is chosen when a context opens. Uses base.
   ======================================================================================================== */

struct tt__isa_table {
    const char *name;
    /* One thread's fastest multiply-adds, of fp32 and by tt__bf16, or NULL; they return the FLOPs done. */
    double (*peak[3])(int64_t rounds, float *sink);
    tt_status (*run[TT__OP_COUNT])(const tt__launch *l);
    bool optimized; /* the compiler was asked for optimisation */
};
