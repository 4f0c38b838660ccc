#pragma once
#include "../base/base.h"
#include "variants.h"
#include "kernels.h"
#include "vectors.h"
#include "halves.h"

/* ---- rows as floats: these functions let a kernel of floats read and write rows of any float dtype ---- */

/* Converts n numbers of bf16 or f16 to float. */
TT__OUTLINE void TT__K(row_widen)(float *to, const void *from, tt_dtype dtype, int64_t n)
{
    const uint16_t *h = (const uint16_t *)from;
    int64_t i = 0;
    for (; i + TT__LANES <= n; i += TT__LANES) TT__K(store)(to + i, TT__K(load_16)(h + i, dtype));
    if (i < n) TT__K(store_n)(to + i, TT__K(load_as)(h, dtype, i, n - i), n - i);
}

TT__OUTLINE void TT__K(row_narrow)(void *to, const float *from, tt_dtype dtype, int64_t n)
{
    uint16_t *h = (uint16_t *)to;
    int64_t i = 0;
    for (; i + TT__LANES <= n; i += TT__LANES) TT__K(store_16)(h + i, TT__K(load)(from + i), dtype);
    if (i < n) TT__K(store_as)(h, dtype, i, TT__K(load_n)(from + i, n - i), n - i);
}

/* Computes y = a * x + b * z over a row of n floats; without z (NULL), y = a * x. */
TT__INLINE void TT__K(axpby)(float *y, float a, const float *x, float b, const float *z, int64_t n)
{
    for (int64_t c = 0; c < n; c += TT__LANES) {
        tt__vf v = TT__K(load_n)(x + c, n - c) * a;
        if (z) v += TT__K(load_n)(z + c, n - c) * b;
        TT__K(store_n)(y + c, v, n - c);
    }
}
