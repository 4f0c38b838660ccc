#pragma once
#include "../base/base.h"
#include "variants.h"
#include "kernels.h"
#include "vectors.h"

/* ---- 16-bit floats by the vector ----
   Results have the same bits as from tt__from_bf16, tt__to_bf16, tt__from_f16 and tt__to_f16, except NaNs
   where an instruction converts f16. */

TT__INLINE tt__vu TT__K(select)(tt__vi mask, tt__vu a, tt__vu b)
{
    return (a & (tt__vu)mask) | (b & ~(tt__vu)mask);
}

#ifdef TT__NEON /* intrinsics, because gcc compiles __builtin_convertvector to a conversion of each lane */
TT__INLINE tt__vu TT__K(load_h)(const uint16_t *p) { return (tt__vu)vmovl_u16(vld1_u16(p)); }
TT__INLINE void TT__K(store_h)(uint16_t *p, tt__vu u) { vst1_u16(p, vmovn_u32((uint32x4_t)u)); }
#else
TT__INLINE tt__vu TT__K(load_h)(const uint16_t *p)
{
#if TT__LANES == 16 /* an intrinsic, because gcc 12 makes two conversions of half the width */
    return (tt__vu)_mm512_maskz_cvtepu16_epi32((__mmask16)-1,
                                               _mm256_loadu_si256((const __m256i *)(const void *)p));
#else
    TT__K(vh) h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, tt__vu);
#endif
}
TT__INLINE void TT__K(store_h)(uint16_t *p, tt__vu u)
{
    TT__K(vh) h = __builtin_convertvector(u, TT__K(vh));
    memcpy(p, &h, sizeof h);
}
#endif

typedef char TT__K(knows_all_floats)[TT__FLOATS == 3 ? 1 : -1];

/* Runs `statement`, in which D is a constant: the dtype f32, bf16 or f16 (TT__BY_HALF: bf16 or f16). Loops in
   the statement are compiled once for each dtype, without a branch on the dtype. */
#define TT__BY_HALF(dtype, D, statement) \
    do { \
        if ((dtype) == TT_BF16) { const tt_dtype D = TT_BF16; statement; } \
        else { const tt_dtype D = TT_F16; statement; } \
    } while (0)
#define TT__BY_FLOAT(dtype, D, statement) \
    do { \
        if ((dtype) == TT_F32) { const tt_dtype D = TT_F32; statement; } \
        else TT__BY_HALF(dtype, D, statement); \
    } while (0)

TT__INLINE tt__vf TT__K(load_16)(const uint16_t *p, tt_dtype dtype)
{
    if (dtype == TT_BF16) return (tt__vf)(TT__K(load_h)(p) << 16);
#ifdef TT__WIDEN_F16
    return TT__WIDEN_F16(p);
#else
    tt__vu u = TT__K(load_h)(p), magnitude = (u & 0x7fff) << 13, sign = (u & 0x8000) << 16;
    /* A subnormal's fraction first gets a leading 2^-14; the subtraction takes 2^-14 away. */
    tt__vf subnormal = (tt__vf)(magnitude + (113u << 23)) - (tt__vf)TT__K(splat_u)(113u << 23);
    tt__vu normal = magnitude + (112u << 23);
    normal += (tt__vu)(magnitude >= (0x7c00u << 13)) & (112u << 23); /* infinity and NaN: exponent 255 */
    return (tt__vf)(sign | TT__K(select)(magnitude < (0x400u << 13), (tt__vu)subnormal, normal));
#endif
}

TT__INLINE void TT__K(store_16)(uint16_t *p, tt__vf x, tt_dtype dtype)
{
    tt__vu u = (tt__vu)x, magnitude = u & 0x7fffffff;
    tt__vi nan = magnitude > 0x7f800000;
    if (dtype == TT_BF16) {
        TT__K(store_h)(p, TT__K(select)(nan, (u >> 16) | 0x40, (u + 0x7fff + ((u >> 16) & 1)) >> 16));
        return;
    }
#ifdef TT__NARROW_F16
    TT__NARROW_F16(p, x);
#else
    tt__vu subnormal = (tt__vu)((tt__vf)magnitude + 0.5f) - 0x3f000000;
    tt__vu r = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    r = TT__K(select)(magnitude < 0x38800000, subnormal, r);
    r = TT__K(select)(magnitude >= 0x477ff000, TT__K(splat_u)(0x7c00), r);
    r = TT__K(select)(nan, TT__K(splat_u)(0x7e00), r) | ((u >> 16) & 0x8000);
    TT__K(store_h)(p, r);
#endif
}

/* Rounds x to 16 bits stochastically, by 16 random bits in each lane: up with a probability equal to the
   dropped fraction. Numbers that are not finite and, in f16, numbers from 65504 on are rounded to nearest, so
   that both ways of rounding overflow from 65520 on. */
TT__INLINE void TT__K(round_16)(uint16_t *p, tt__vf x, tt__vu random, tt_dtype dtype)
{
    tt__vu u = (tt__vu)x, magnitude = u & 0x7fffffff;
    tt__vi nan = magnitude > 0x7f800000;
    if (dtype == TT_BF16) {
        TT__K(store_h)(p, TT__K(select)(magnitude >= 0x7f800000, (u >> 16) | ((tt__vu)nan & 0x40),
                                        (u + random) >> 16));
        return;
    }
    tt__vi subnormal = magnitude < 0x38800000;
    tt__vf units = (tt__vf)(magnitude & (tt__vu)subnormal) * 0x1p24f; /* multiples of f16's smallest number */
    tt__vi whole = __builtin_convertvector(units, tt__vi);
    tt__vf fraction = units - __builtin_convertvector(whole, tt__vf);
    tt__vi up = fraction * 65536.0f + __builtin_convertvector((tt__vi)random, tt__vf) >= 65536.0f;
    tt__vu r = (magnitude - 0x38000000 + (random & 0x1fff)) >> 13;
    r = TT__K(select)(subnormal, (tt__vu)(whole - up), r); /* each lane of `up` is 0 or -1 */
    /* f16 from 65504 on is rounded to nearest: to 65504 or infinity */
    r = TT__K(select)(magnitude >= 0x477fe000, TT__K(splat_u)(0x7bff), r);
    r = TT__K(select)(magnitude >= 0x477ff000, TT__K(splat_u)(0x7c00), r);
    TT__K(store_h)(p, TT__K(select)(nan, TT__K(splat_u)(0x7e00), r) | ((u >> 16) & 0x8000));
}

/* Does the rarer work of load_as: loads f16, or fewer than TT__LANES elements. load_rest and store_rest are
   not inlined, because many places call them for few elements. */
TT__OUTLINE tt__vf TT__K(load_rest)(const void *p, tt_dtype dtype, int64_t i, int64_t n)
{
    uint16_t some[TT__LANES] = {0};
    if (dtype == TT_F32) return TT__K(load_some)((const float *)p + i, n);
    if (n >= TT__LANES) return TT__K(load_16)((const uint16_t *)p + i, dtype);
    memcpy(some, (const uint16_t *)p + i, (size_t)n * 2);
    return TT__K(load_16)(some, dtype);
}

TT__OUTLINE void TT__K(store_rest)(void *p, tt_dtype dtype, int64_t i, tt__vf x, int64_t n)
{
    uint16_t some[TT__LANES];
    if (dtype == TT_F32) { TT__K(store_some)((float *)p + i, x, n); return; }
    if (n >= TT__LANES) { TT__K(store_16)((uint16_t *)p + i, x, dtype); return; }
    TT__K(store_16)(some, x, dtype);
    memcpy((uint16_t *)p + i, some, (size_t)n * 2);
}

/* Loads TT__LANES elements of an array of any float dtype, from element i on. The array has n elements from
   there on. If n < TT__LANES, the other lanes become 0. */
TT__INLINE tt__vf TT__K(load_as)(const void *p, tt_dtype dtype, int64_t i, int64_t n)
{
    if (n >= TT__LANES && dtype == TT_F32) return TT__K(load)((const float *)p + i);
    if (n >= TT__LANES && dtype == TT_BF16) return TT__K(load_16)((const uint16_t *)p + i, TT_BF16);
    return TT__K(load_rest)(p, dtype, i, n);
}

TT__INLINE void TT__K(store_as)(void *p, tt_dtype dtype, int64_t i, tt__vf x, int64_t n)
{
    if (n >= TT__LANES && dtype == TT_F32) TT__K(store)((float *)p + i, x);
    else if (n >= TT__LANES && dtype == TT_BF16) TT__K(store_16)((uint16_t *)p + i, x, TT_BF16);
    else TT__K(store_rest)(p, dtype, i, x, n);
}
