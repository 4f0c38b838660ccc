#pragma once
#include "../base/base.h"
#include "variants.h"
#include "kernels.h"

/* -------------------------------------------------------------------------------------- functions of vectors
   Sums, exponentials, and the values and derivatives of activations. */

#ifndef TT__UNROLL
#define TT__PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TT__UNROLL(n) TT__PRAGMA(clang loop unroll(full)) /* clang 14 ignores GCC unroll */
#define TT__UNROLL_BY(n) TT__PRAGMA(clang loop unroll_count(n))
#else
#define TT__UNROLL(n) TT__PRAGMA(GCC unroll n)
#define TT__UNROLL_BY(n) TT__PRAGMA(GCC unroll n) /* gcc's pragma also takes loops of variable length */
#endif
/* A loop over i in [0, n), which the compiler unrolls completely. n is a constant of at most 24. */
#define TT__EACH(i, n) TT__UNROLL(24) for (int i = 0; i < (n); i++)
#endif

#ifndef TT__SHUFFLE /* picks four floats from two vectors of four floats, by index */
#if defined(__clang__) || __GNUC__ >= 12
#define TT__SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t tt__quad_index __attribute__((vector_size(16)));
static inline tt__quad_index tt__quad_order(int32_t i, int32_t j, int32_t k, int32_t l)
{
    tt__quad_index order = {i, j, k, l};
    return order;
}
#define TT__SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, tt__quad_order(i, j, k, l))
#endif
#endif

typedef float TT__K(vf) __attribute__((vector_size(4 * TT__LANES)));
typedef int32_t TT__K(vi) __attribute__((vector_size(4 * TT__LANES)));
typedef uint32_t TT__K(vu) __attribute__((vector_size(4 * TT__LANES)));
typedef uint16_t TT__K(vh) __attribute__((vector_size(2 * TT__LANES)));
#define tt__vf TT__K(vf)
#define tt__vi TT__K(vi)
#define tt__vu TT__K(vu)

TT__INLINE tt__vf TT__K(zero)(void) { tt__vf v; memset(&v, 0, sizeof v); return v; }
TT__INLINE tt__vf TT__K(splat)(float x) { return x - TT__K(zero)(); }
TT__INLINE tt__vu TT__K(splat_u)(uint32_t x) { tt__vu v; memset(&v, 0, sizeof v); return x - v; }
#ifdef TT__NEON /* intrinsics, because gcc compiles memcpy to moves through two integer registers */
TT__INLINE tt__vf TT__K(load)(const float *p) { return (tt__vf)vld1q_f32(p); }
TT__INLINE void TT__K(store)(float *p, tt__vf v) { vst1q_f32(p, (float32x4_t)v); }
#else
TT__INLINE tt__vf TT__K(load)(const float *p) { tt__vf v; memcpy(&v, p, sizeof v); return v; }
TT__INLINE void TT__K(store)(float *p, tt__vf v) { memcpy(p, &v, sizeof v); }
#endif

/* Loads n < TT__LANES elements; lanes beyond n are 0. load_some and store_some are not inlined, because
   load_n and store_n mostly have at least TT__LANES elements. */
TT__OUTLINE tt__vf TT__K(load_some)(const float *p, int64_t n)
{
    tt__vf v = TT__K(zero)();
    memcpy(&v, p, (size_t)n * 4);
    return v;
}
TT__OUTLINE void TT__K(store_some)(float *p, tt__vf v, int64_t n) { memcpy(p, &v, (size_t)n * 4); }

TT__INLINE tt__vf TT__K(load_n)(const float *p, int64_t n)
{
    return n >= TT__LANES ? TT__K(load)(p) : TT__K(load_some)(p, n);
}
TT__INLINE void TT__K(store_n)(float *p, tt__vf v, int64_t n)
{
    if (n >= TT__LANES) TT__K(store)(p, v);
    else TT__K(store_some)(p, v, n);
}

#define TT__OF_TWO(name, result) \
    TT__INLINE tt__vf TT__K(name)(tt__vf a, tt__vf b) { return (tt__vf)(result); }
#define TT__OF_THREE(name, result) \
    TT__INLINE tt__vf TT__K(name)(tt__vf a, tt__vf b, tt__vf c) { return (tt__vf)(result); }
#if TT__LANES == 16 /* masked intrinsics with a full mask, because g++ 12 warns about the plain intrinsics */
TT__OF_THREE(fma, _mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c))
TT__OF_TWO(max, _mm512_maskz_max_ps((__mmask16)-1, (__m512)a, (__m512)b))
TT__OF_TWO(min, _mm512_maskz_min_ps((__mmask16)-1, (__m512)a, (__m512)b))
TT__INLINE tt__vf TT__K(sqrt)(tt__vf a) { return (tt__vf)_mm512_maskz_sqrt_ps((__mmask16)-1, (__m512)a); }
#elif TT__LANES == 8
TT__OF_THREE(fma, _mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c))
TT__OF_TWO(max, _mm256_max_ps((__m256)a, (__m256)b))
TT__OF_TWO(min, _mm256_min_ps((__m256)a, (__m256)b))
TT__INLINE tt__vf TT__K(sqrt)(tt__vf a) { return (tt__vf)_mm256_sqrt_ps((__m256)a); }
#elif defined(TT__NEON) /* max and min return the second operand if one is NaN, as on x86 */
TT__OF_THREE(fma, vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b))
TT__OF_TWO(max, vbslq_f32((uint32x4_t)(a > b), (float32x4_t)a, (float32x4_t)b))
TT__OF_TWO(min, vbslq_f32((uint32x4_t)(a < b), (float32x4_t)a, (float32x4_t)b))
TT__INLINE tt__vf TT__K(sqrt)(tt__vf a) { return (tt__vf)vsqrtq_f32((float32x4_t)a); }
#else
TT__OF_THREE(fma, a * b + c)
TT__OF_TWO(max, ((tt__vi)a & (tt__vi)(a > b)) | ((tt__vi)b & ~(tt__vi)(a > b)))
TT__OF_TWO(min, ((tt__vi)a & (tt__vi)(a < b)) | ((tt__vi)b & ~(tt__vi)(a < b)))
TT__INLINE tt__vf TT__K(sqrt)(tt__vf a) { for (int i = 0; i < TT__LANES; i++) a[i] = sqrtf(a[i]); return a; }
#endif

/* Returns the sum of the lanes, added pairwise in a fixed order. */
TT__INLINE float TT__K(sum)(tt__vf v)
{
    float lane[TT__LANES];
    memcpy(lane, &v, sizeof lane);
    for (int half = TT__LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

TT__INLINE float TT__K(max_lane)(tt__vf v)
{
    float lane[TT__LANES], m;
    memcpy(lane, &v, sizeof lane);
    m = lane[0];
    for (int i = 1; i < TT__LANES; i++) m = lane[i] > m ? lane[i] : m;
    return m;
}

/* Returns `c[0] * x^(n - 1) + ... + c[n - 1]`. */
TT__INLINE tt__vf TT__K(polynomial)(const float *c, const int n, tt__vf x)
{
    tt__vf p = TT__K(splat)(c[0]);
    TT__UNROLL(8)
    for (int i = 1; i < n; i++) p = TT__K(fma)(p, x, TT__K(splat)(c[i]));
    return p;
}

/* Returns e^x with a relative error < 2e-7; 0 below -87.3 (where the result would be subnormal), e^88.7 above
   88.7, NaN for NaN. The range reduction and the polynomial follow Cephes' expf. */
TT__INLINE tt__vf TT__K(exp)(tt__vf x)
{
    static const float c[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                              4.1665795894e-2f, 1.6666665459e-1f, 0.5f};
    const tt__vf magic = TT__K(splat)(12582912.0f); /* 1.5 * 2^23: adding `magic` rounds to an integer */
    tt__vi zero_result = x < TT__K(splat)(-87.3f), nan = x != x;
    tt__vf y = TT__K(min)(TT__K(max)(x, TT__K(splat)(-87.3f)), TT__K(splat)(88.7f));
    tt__vf shifted = TT__K(fma)(y, TT__K(splat)(1.44269504088896341f), magic), n = shifted - magic;
    tt__vf r = TT__K(fma)(n, TT__K(splat)(-0.693359375f), y);
    r = TT__K(fma)(n, TT__K(splat)(2.12194440e-4f), r);
    tt__vf p = TT__K(fma)(TT__K(polynomial)(c, 6, r), r * r, r + 1.0f);
    /* 2^n in two factors, so that n = 128 does not overflow the exponent field */
    tt__vi e = (tt__vi)shifted - (tt__vi)magic, half = e >> 1;
    p = p * (tt__vf)((half + 127) << 23) * (tt__vf)((e - half + 127) << 23);
    tt__vi bits = ((tt__vi)p & ~zero_result & ~nan) | ((tt__vi)x & nan);
    return (tt__vf)bits;
}

/* Returns 2^x for x <= 127 with a relative error < 2e-7; 2^-126 for x below -126, NaN for NaN. */
TT__INLINE tt__vf TT__K(exp2)(tt__vf x)
{
    /* a minimax polynomial for the relative error, which gives 2^0 = 1 exactly */
    static const float c[] = {1.559467754e-4f, 1.340664390e-3f, 9.617692975e-3f, 5.550310551e-2f,
                              2.402265278e-1f, 6.931472150e-1f, 1.0f};
    const tt__vf magic = TT__K(splat)(12582912.0f + 127.0f); /* 1.5 * 2^23 + 127: adding `magic` rounds to an
                                                                integer and adds the exponent's bias */
    x = TT__K(max)(TT__K(splat)(-126.0f), x); /* x comes second: max() returns its second operand for NaN */
    tt__vf shifted = x + magic, r = x - (shifted - magic);
    /* the low bits of `shifted` are the biased exponent */
    return TT__K(polynomial)(c, 7, r) * (tt__vf)((tt__vi)shifted << 23);
}

/* Returns erf(x) with an absolute error < 2e-7, as x * P(x^2) / Q(x^2) on [-4, 4] like Eigen and XLA. */
TT__INLINE tt__vf TT__K(erf)(tt__vf x)
{
    static const float p[] = {-2.72614225801306e-10f, 2.77068142495902e-08f, -2.10102402082508e-06f,
                              -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f,
                              -1.60960333262415e-02f};
    static const float q[] = {-1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f,
                              -7.37332916720468e-03f, -1.42647390514189e-02f};
    tt__vf y = TT__K(max)(TT__K(min)(x, TT__K(splat)(4.0f)), TT__K(splat)(-4.0f)), z = y * y;
    tt__vf e = y * TT__K(polynomial)(p, 7, z) / TT__K(polynomial)(q, 5, z);
    tt__vi nan = x != x;
    return (tt__vf)(((tt__vi)e & ~nan) | ((tt__vi)x & nan));
}

/* Returns tanh(x) with a relative error < 5e-7, by Eigen's rational approximation. If the nearest float is
   1 or -1, the result is exactly 1 or -1, because 1 - tanh^2 times a large number must be 0 there. */
TT__INLINE tt__vf TT__K(tanh)(tt__vf x)
{
    static const float p[] = {-2.76076847742355e-16f, 2.00018790482477e-13f, -8.60467152213735e-11f,
                              5.12229709037114e-08f, 1.48572235717979e-05f, 6.37261928875436e-04f,
                              4.89352455891786e-03f};
    static const float q[] = {1.19825839466702e-06f, 1.18534705686654e-04f, 2.26843463243900e-03f,
                              4.89352518554385e-03f};
    const tt__vf limit = TT__K(splat)(7.90531110763549805f);
    tt__vf y = TT__K(max)(TT__K(min)(x, limit), -limit), z = y * y;
    tt__vf t = y * TT__K(polynomial)(p, 7, z) / TT__K(polynomial)(q, 4, z);
    tt__vi nan = x != x, large = z >= TT__K(splat)(62.4f);
    tt__vi sign = (tt__vi)TT__K(splat)(-0.0f), one = (tt__vi)TT__K(splat)(1.0f);
    return (tt__vf)(((tt__vi)t & ~nan & ~large) | ((tt__vi)x & nan)
                    | ((((tt__vi)x & sign) | one) & large & ~nan));
}

/* The value and the slope of each activation of TT__ACTS. A slope gets the saved value s: the result of the
   activation if the table says by_result, else the operand. */
TT__INLINE tt__vf TT__K(act_GELU)(tt__vf x)
{
    return x * 0.5f * (1.0f + TT__K(erf)(x * 0.70710678118654752f));
}
TT__INLINE tt__vf TT__K(slope_GELU)(tt__vf s)
{
    tt__vf cdf = 0.5f * (1.0f + TT__K(erf)(s * 0.70710678118654752f));
    return cdf + s * 0.3989422804014327f * TT__K(exp)(s * s * -0.5f);
}

TT__INLINE tt__vf TT__K(act_GELU_TANH)(tt__vf x)
{
    tt__vf t = TT__K(tanh)(0.7978845608028654f * x * (1.0f + 0.044715f * x * x));
    return x * 0.5f * (1.0f + t);
}
TT__INLINE tt__vf TT__K(slope_GELU_TANH)(tt__vf s)
{
    /* The limits avoid infinity times 0; NaN stays NaN. */
    s = TT__K(max)(TT__K(splat)(-100.0f), TT__K(min)(TT__K(splat)(100.0f), s));
    tt__vf t = TT__K(tanh)(0.7978845608028654f * s * (1.0f + 0.044715f * s * s));
    return 0.5f * (1.0f + t) + 0.5f * s * (1.0f - t * t) * 0.7978845608028654f
           * (1.0f + 0.134145f * s * s);
}

TT__INLINE tt__vf TT__K(act_RELU)(tt__vf x)
{
    tt__vi keep = ~(x < 0.0f); /* NaN stays NaN */
    return (tt__vf)((tt__vi)x & keep);
}
TT__INLINE tt__vf TT__K(slope_RELU)(tt__vf s)
{
    tt__vi positive = s > 0.0f;
    return (tt__vf)(positive & (tt__vi)TT__K(splat)(1.0f));
}

TT__INLINE tt__vf TT__K(act_TANH)(tt__vf x) { return TT__K(tanh)(x); }
TT__INLINE tt__vf TT__K(slope_TANH)(tt__vf s) { return 1.0f - s * s; }

TT__INLINE tt__vf TT__K(act_SILU)(tt__vf x) { return x / (1.0f + TT__K(exp)(-x)); }
TT__INLINE tt__vf TT__K(slope_SILU)(tt__vf s)
{
    tt__vf sig = 1.0f / (1.0f + TT__K(exp)(-s));
    return sig * (1.0f + s * (1.0f - sig));
}

TT__INLINE tt__vf TT__K(act_SIGMOID)(tt__vf x) { return 1.0f / (1.0f + TT__K(exp)(-x)); }
TT__INLINE tt__vf TT__K(slope_SIGMOID)(tt__vf y) { return y * (1.0f - y); }

/* Computes `y = act(x)` if `saved` is NULL, else `y = x * act'(saved)`, over a row of n floats. y may be x.
   kind: an activation of TT__ACTS. */
TT__OUTLINE void TT__K(act_row)(int kind, float *y, const float *x, const float *saved, int64_t n)
{
#define TT__ACT_LOOP(ACT, function, by_result) \
    case TT__ACT_##ACT: \
        for (int64_t c = 0; c < n; c += TT__LANES) { \
            tt__vf v = TT__K(load_n)(x + c, n - c); \
            if (saved) v *= TT__K(slope_##ACT)(TT__K(load_n)(saved + c, n - c)); \
            else v = TT__K(act_##ACT)(v); \
            TT__K(store_n)(y + c, v, n - c); \
        } \
        break;
    switch (kind) { TT__ACTS(TT__ACT_LOOP) }
#undef TT__ACT_LOOP
}
