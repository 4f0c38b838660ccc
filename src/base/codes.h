#pragma once
#include "../api/params.h"
#include "../backend/launch.h"
#include "system.h"
#include "numbers.h"

/* ------------------------------------------------------------------------------------------ coded matrices
   Conversion between floats and the codes and scales that src/backend/launch.h describes. */

static const float tt__nf4_numbers[16] = TT__NF4_NUMBERS;
static const float tt__int4_numbers[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

/* A coded matrix in the host's memory. numbers: the number of each code of 4 bits; NULL: codes of 8 bits.
   block: elements that share a scale. */
typedef struct tt__codes {
    const uint8_t *codes, *scales;
    const float *numbers, *nested, *map;
    uint8_t bytes[4][16]; /* bytes[p][i]: byte p of numbers[i] */
    float offset;
    tt_dtype dtype;
    int64_t block;
    int shift;      /* log2 of block; -1: block is a row */
    double rows;    /* 1 / block */
} tt__codes;

/* Returns the number of elements that share a scale. */
static int64_t tt__coded_block(tt_dtype dtype, int64_t cols)
{
    if (dtype == TT__INT8) return cols;
    return dtype == TT__NF4 ? (int64_t)TT__NF4_BLOCK : (int64_t)TT__INT4_GROUP;
}

/* Returns a tt__codes of a matrix with `cols` columns, whose pointers and offset are not set yet. */
static tt__codes tt__codes_like(tt_dtype dtype, int64_t cols)
{
    tt__codes c;
    memset(&c, 0, sizeof c);
    c.dtype = dtype;
    c.block = tt__coded_block(dtype, cols);
    c.numbers = dtype == TT__INT8 ? NULL : dtype == TT__NF4 ? tt__nf4_numbers : tt__int4_numbers;
    c.shift = dtype == TT__INT8 ? -1 : dtype == TT__NF4 ? 6 : 5;
    c.rows = 1.0 / (double)c.block;
    for (int i = 0; i < 16 && c.numbers; i++)
        for (int p = 0; p < 4; p++) memcpy(&c.bytes[p][i], (const uint8_t *)(c.numbers + i) + p, 1);
    return c;
}

/* Returns the number of the block of element `at`, without a division, which would take longer than the
   conversion of a few elements. */
static inline int64_t tt__block_at(const tt__codes *c, int64_t at)
{
    if (c->shift >= 0) return at >> c->shift;
    int64_t block = (int64_t)((double)at * c->rows);
    block -= block * c->block > at;
    return block + ((block + 1) * c->block <= at);
}

static tt__codes tt__codes_at(const void *data, tt_dtype dtype, int64_t rows, int64_t cols)
{
    const uint8_t *at = (const uint8_t *)data;
    const tt__coded_parts p = tt__coded_parts_of(dtype, rows, cols);
    tt__codes c = tt__codes_like(dtype, cols);
    c.codes = at;
    c.scales = at + p.scales;
    if (dtype != TT__NF4) return c;
    c.nested = (const float *)(const void *)(at + p.nested);
    c.map = (const float *)(const void *)(at + p.map);
    memcpy(&c.offset, at + p.offset, sizeof c.offset);
    return c;
}

/* Returns the codes of m; all fields are 0 unless m is a coded matrix. */
static tt__codes tt__codes_of(const tt__mat *m)
{
    tt__codes none;
    memset(&none, 0, sizeof none);
    return tt__is_coded(m->dtype) ? tt__codes_at(m->data, m->dtype, m->rows, m->cols) : none;
}

/* Returns the scale of a block of NF4. The product is volatile, so that no compiler fuses it with the
   addition and all instruction sets get equal scales. */
static inline __attribute__((always_inline)) float tt__nf4_scale(const tt__codes *c, int64_t block)
{
    volatile float product = c->map[c->scales[block]] * c->nested[block / TT__NF4_NESTED];
    return product + c->offset;
}

static float tt__code_scale(const tt__codes *c, int64_t block)
{
    uint16_t half;
    float scale;
    if (c->dtype == TT__NF4) return tt__nf4_scale(c, block);
    if (c->dtype == TT__INT4) {
        memcpy(&half, c->scales + block * 2, sizeof half);
        return tt__from_f16(half);
    }
    memcpy(&scale, c->scales + block * 4, sizeof scale);
    return scale / 127;
}

/* Converts n elements, beginning with element `at`, to floats. */
static void tt__widen_codes(float *to, const tt__codes *c, int64_t at, int64_t n)
{
    float scale = 0;
    for (int64_t k = 0; k < n; k++, at++) {
        if (k == 0 || at % c->block == 0) scale = tt__code_scale(c, tt__block_at(c, at));
        const unsigned code = c->numbers ? c->codes[at / 2] >> (at % 2 ? 0 : 4) & 15u : c->codes[at];
        to[k] = (c->numbers ? c->numbers[code] : (float)(int8_t)code) * scale;
    }
}

/* Computes the map of 8 bits for scales: the numbers of bitsandbytes' create_dynamic_map(signed=True), with
   equal bits. Decade d, from 0, is cut into 2^d equal intervals, whose middles and their negatives are in the
   map, beside 0 and 1. */
static void tt__nested_map(float map[256])
{
    static const float power[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1};
    map[127] = 0;
    map[255] = 1;
    for (int d = 0, k = 128; d < 7; d++) {
        const int n = 1 << d;
        const double step = (1.0f - 0.1f) / (float)n; /* rounded to f32, as torch.linspace rounds */
        for (int i = 0; i < n; i++, k++) {
            float end[2];
            for (int e = 0; e < 2; e++)
                end[e] = i + e < (n + 1) / 2 ? (float)((double)0.1f + step * (i + e))
                                             : (float)(1 - step * (n - i - e));
            const float sum = end[0] + end[1], middle = sum / 2;
            map[k] = power[d] * middle;
            map[254 - k] = -map[k];
        }
    }
}

/* Returns the index of the number that is nearest to x among n ascending numbers, n a power of two; of two
   numbers equally near, the lower. */
static int tt__nearest_code(const float *numbers, int n, float x)
{
    int k = 0;
    for (int half = n / 2; half; half /= 2)
        if (x > (numbers[k + half - 1] + numbers[k + half]) / 2) k += half;
    return k;
}

/* A matrix that is being coded, row by row. absmax: for NF4, room for the scale of each block. */
typedef struct tt__coding {
    tt_dtype dtype;
    int64_t rows, cols;
    uint8_t *to;
    float *absmax;
} tt__coding;

/* Codes n elements of a block, beginning with element `at`, whose codes are the nearest to x * factor. */
static void tt__encode_block(const tt__coding *c, int64_t at, const float *x, int64_t n, float factor)
{
    for (int64_t k = 0; k < n; k++) {
        int code;
        if (c->dtype == TT__INT8) {
            c->to[at + k] = (uint8_t)(int8_t)rintf(x[k] * factor);
            continue;
        }
        if (c->dtype == TT__INT4) {
            code = (int)(x[k] * factor + 8.5f);
            code = code > 15 ? 15 : code;
        } else {
            const float y = x[k] * factor;
            code = tt__nearest_code(tt__nf4_numbers, 16, y < -1 ? -1 : y > 1 ? 1 : y);
        }
        uint8_t *byte = &c->to[(at + k) / 2];
        *byte = (uint8_t)(k % 2 ? *byte | code : code << 4);
    }
}

/* Codes row `row`, whose floats are at x. Returns false if a number is not finite, or too large for a scale
   of f16. */
static bool tt__encode_row(const tt__coding *c, int64_t row, const float *x)
{
    const tt__coded_parts p = tt__coded_parts_of(c->dtype, c->rows, c->cols);
    const int64_t block = tt__coded_block(c->dtype, c->cols);
    bool ok = true;
    for (int64_t from = 0; from < c->cols; from += block) {
        const int64_t number = (row * c->cols + from) / block;
        float most = 0, absmax = 0; /* most: the number of largest magnitude, with its sign */
        for (int64_t k = from; k < from + block; k++) {
            ok = ok && fabsf(x[k]) <= FLT_MAX;
            if (fabsf(x[k]) > absmax) absmax = fabsf(most = x[k]);
        }
        if (!ok) return false;
        float factor = 0;
        if (c->dtype == TT__NF4) {
            c->absmax[number] = absmax;
            factor = 1 / (absmax > 1e-38f ? absmax : 1e-38f);
        } else if (c->dtype == TT__INT8) {
            memcpy(c->to + p.scales + number * 4, &absmax, sizeof absmax);
            factor = absmax > 0 ? 1 / absmax * 127 : 0; /* rounds twice, as bitsandbytes does on a CPU */
            if (!(factor <= FLT_MAX)) factor = 0;
        } else {
            const float scale = most / -8;
            const uint16_t half = tt__to_f16(scale);
            memcpy(c->to + p.scales + number * 2, &half, sizeof half);
            ok = absmax < 8 * 65520.0f;
            factor = scale != 0 ? 1 / scale : 0;
            if (!(fabsf(factor) <= FLT_MAX)) factor = 0;
        }
        if (!ok) return false;
        tt__encode_block(c, row * c->cols + from, x + from, block, factor);
    }
    return true;
}

/* Codes the scales of NF4 after the last row. */
static void tt__encode_end(const tt__coding *c)
{
    const tt__coded_parts p = tt__coded_parts_of(c->dtype, c->rows, c->cols);
    const int64_t blocks = c->rows * c->cols / TT__NF4_BLOCK;
    float map[256];
    double sum = 0;
    if (c->dtype != TT__NF4) return;
    tt__nested_map(map);
    memcpy(c->to + p.map, map, sizeof map);
    for (int64_t k = 0; k < blocks; k++) sum += c->absmax[k];
    const float offset = (float)(sum / (double)blocks);
    memcpy(c->to + p.offset, &offset, sizeof offset);
    for (int64_t from = 0; from < blocks; from += TT__NF4_NESTED) {
        const int64_t end = from + TT__NF4_NESTED < blocks ? from + TT__NF4_NESTED : blocks;
        float most = 0;
        for (int64_t k = from; k < end; k++) {
            const float x = fabsf(c->absmax[k] - offset);
            most = x > most ? x : most;
        }
        memcpy(c->to + p.nested + from / TT__NF4_NESTED * 4, &most, sizeof most);
        const float factor = 1 / (most > 1e-38f ? most : 1e-38f);
        for (int64_t k = from; k < end; k++)
            c->to[p.scales + k] =
                (uint8_t)tt__nearest_code(map, 256, (c->absmax[k] - offset) * factor);
    }
}
