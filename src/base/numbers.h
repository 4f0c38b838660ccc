#pragma once
#include "../api/standard.h"
#include "../api/params.h"
#include "../backend/launch.h"
#include "../backend/ops.h"
#include "system.h"

/* ------------------------------------------------------------------------------------------------- dtypes */

static const struct tt__dtype_row {
    const char *name;
    size_t bytes;
    bool is_float;
    const char *safetensors, *config;
} tt__dtypes[] = {
#define TT__ROW(dtype, name, bytes, is_float, file, config) {name, bytes, is_float, file, config},
    TT__DTYPES(TT__ROW)
#undef TT__ROW
};
typedef char tt__every_dtype_has_a_row[TT__COUNT(tt__dtypes) == (int)TT__INT4 + 1 ? 1 : -1];

size_t tt_dtype_bytes(tt_dtype dtype) { return (unsigned)dtype <= TT__INT4 ? tt__dtypes[dtype].bytes : 0; }

const char *tt_dtype_name(tt_dtype dtype)
{
    return (unsigned)dtype <= TT__INT4 ? tt__dtypes[dtype].name : "unknown dtype";
}

/* Returns the bytes of a contiguous matrix. */
static size_t tt__matrix_bytes(tt_dtype dtype, int64_t rows, int64_t cols)
{
    if (tt__is_coded(dtype)) return (size_t)tt__coded_parts_of(dtype, rows, cols).bytes;
    return (size_t)rows * (size_t)cols * tt_dtype_bytes(dtype);
}

static bool tt__is_float(tt_dtype dtype) { return tt__dtypes[dtype].is_float; }

static uint32_t tt__bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static float tt__float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

static float tt__from_bf16(uint16_t h) { return tt__float((uint32_t)h << 16); }

/* Rounds x to bf16, to nearest even; NaN stays NaN. */
static uint16_t tt__to_bf16(float x)
{
    uint32_t u = tt__bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static float tt__from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    if (exponent == 31) return tt__float(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    return tt__float(sign | (exponent + 112) << 23 | fraction << 13);
}

static uint16_t tt__to_f16(float x)
{
    uint32_t u = tt__bits(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00); /* rounds to infinity */
    if (magnitude < 0x38800000u) { /* subnormal: adding 0.5 rounds to a multiple of 2^-24 */
        float scaled = tt__float(magnitude) + 0.5f;
        return (uint16_t)(sign | (tt__bits(scaled) - tt__bits(0.5f)));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

typedef char tt__base_knows_all_floats[TT__FLOATS == 3 ? 1 : -1];

/* Converts a number of 16 bits, bf16 or f16, to float. */
static float tt__from_half(uint16_t h, tt_dtype dtype)
{
    return dtype == TT_BF16 ? tt__from_bf16(h) : tt__from_f16(h);
}

static uint16_t tt__to_half(float x, tt_dtype dtype)
{
    return dtype == TT_BF16 ? tt__to_bf16(x) : tt__to_f16(x);
}

/* Rounds x to fp8: to nearest even, at most the largest finite number; NaN if x is not finite. */
static uint8_t tt__to_fp8(float x, bool e5m2)
{
    const int bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7, drop = 23 - bits; /* bits: width of the mantissa */
    const uint32_t u = tt__bits(x), magnitude = u & 0x7fffffffu;
    const uint8_t sign = (uint8_t)(u >> 24 & 0x80);
    if (magnitude >= 0x7f800000u) return sign | 0x7f;
    if (magnitude >= tt__bits(TT__FP8_MOST(e5m2))) return sign | (e5m2 ? 0x7b : 0x7e);
    if (magnitude >> 23 < (uint32_t)(128 - bias)) { /* subnormal: adding `unit` rounds to a multiple of the
                                                       smallest subnormal */
        const float unit = tt__float((uint32_t)(128 - bias + drop) << 23);
        return (uint8_t)(sign | (tt__bits(tt__float(magnitude) + unit) - tt__bits(unit)));
    }
    const uint32_t r = magnitude - ((uint32_t)(127 - bias) << 23);
    return (uint8_t)(sign | (r + (1u << (drop - 1)) - 1 + (r >> drop & 1)) >> drop);
}

/* Returns the factor by which a tensor is multiplied before it is rounded to fp8: the largest power of two
   that keeps the tensor's largest magnitude within range. NaN if `largest` is not finite; then the whole
   tensor becomes NaN. */
static float tt__fp8_scale(float largest, bool e5m2)
{
    if (!(largest <= 3.4028235e38f)) return NAN;
    if (largest < 0x1p-100f) return 0x1p100f;
    return tt__float(tt__bits(TT__FP8_MOST(e5m2) / largest) & 0x7f800000u);
}

/* Converts n numbers between float dtypes (f32, bf16, f16). */
static void tt__convert(void *to, tt_dtype to_type, const void *from, tt_dtype from_type, size_t n)
{
    if (to_type == from_type) { memcpy(to, from, n * tt_dtype_bytes(to_type)); return; }
    const uint16_t *half = (const uint16_t *)from;
    for (size_t i = 0; i < n; i++) {
        float x = from_type == TT_F32 ? ((const float *)from)[i] : tt__from_half(half[i], from_type);
        if (to_type == TT_F32) ((float *)to)[i] = x;
        else ((uint16_t *)to)[i] = tt__to_half(x, to_type);
    }
}
