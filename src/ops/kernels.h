#pragma once
#include "../base/base.h"
#include "../cpu/isa.h"
#include "attention/cpu_shared.h"
#include "../cpu/variants.h"
#include "../cpu/kernels.h"
#include "linear/cpu_computing.h"
#include "linear/cpu_products.h"
#include "elementwise/cpu.h"
#include "casts/cpu.h"
#include "linear/cpu.h"
#include "attention/cpu.h"
#include "norm/cpu.h"
#include "embedding/cpu.h"
#include "rows/cpu.h"
#include "custom/cpu.h"
#include "losses/cpu.h"
#include "optimizers/cpu.h"
#include "optimizers/cpu_prune.h"
#include "collectives/cpu.h"

/* ---------------------------------------------------------------- the kernel table of one CPU variant */

#ifndef TT__OPTIMIZED /* tests that are built without optimisation define TT__OPTIMIZED as true */
#if defined(__OPTIMIZE__) && !defined(TT__UNALIGNED_STACK)
#define TT__OPTIMIZED true
#else
#define TT__OPTIMIZED false
#endif
#endif

TT__TABLE const tt__isa_table TT__K(isa_table) = {
    TT__XSTR(TT__ISA),
    {
        TT__K(peak_loop),
#ifdef TT__DOT
        TT__K(peak_dot),
#else
        NULL,
#endif
#ifdef TT__TILES
        TT__K(peak_tiles),
#else
        NULL,
#endif
    },
    {
#define TT__RUN(OP, name, inputs, outputs, flags) TT__K(run_##OP),
        TT__OPS(TT__RUN)
#undef TT__RUN
    },
    TT__OPTIMIZED
};
