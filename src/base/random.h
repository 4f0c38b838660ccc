#pragma once
#include "../api/standard.h"
#include "system.h"
#include "functions.h"

/* ----------------------------------------------------------------------------------------- random numbers */

/* Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a bijection of the
   128-bit counter under the 64-bit key, so any number can be drawn without the numbers before it. Keys,
   initial values and orders of data are drawn with 10 rounds, the authors' default. Dropout and stochastic
   rounding draw for each element of each step, with TT__DRAW_ROUNDS rounds: 7 rounds pass BigCrush (the
   paper's table 2). */
static void tt__philox_rounds(int rounds, const uint32_t counter[4], uint64_t key, uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < rounds; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b; c3 = (uint32_t)a; c0 = n0; c2 = n2;
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    out[0] = c0; out[1] = c1; out[2] = c2; out[3] = c3;
}

static void tt__philox(const uint32_t counter[4], uint64_t key, uint32_t out[4])
{
    tt__philox_rounds(10, counter, key, out);
}

/* Returns the key of one stream of random numbers. tag: its purpose (TT__RANDOM_...); a and b: numbers that
   tell streams of one purpose apart, such as the step and the instruction. */
static uint64_t tt__stream_key(uint64_t seed, uint32_t tag, uint64_t a, uint64_t b)
{
    uint32_t high = (uint32_t)(a >> 32) ^ (tag * 0x9E3779B9u), out[4];
    uint32_t counter[4] = {(uint32_t)a, high, (uint32_t)b, (uint32_t)(b >> 32)};
    tt__philox(counter, seed, out);
    return (uint64_t)out[1] << 32 | out[0];
}

static float tt__uniform(uint32_t u) { return ((float)(u >> 8) + 0.5f) * 0x1p-24f; } /* a number in (0, 1) */

/* Computes numbers [4 * i, 4 * i + 4) of a standard normal sequence (Box, Muller 1958). */
static void tt__normal4(uint64_t key, uint64_t i, float out[4])
{
    uint32_t counter[4] = {(uint32_t)i, (uint32_t)(i >> 32), 0, 0}, u[4];
    tt__philox(counter, key, u);
    for (int k = 0; k < 4; k += 2) {
        double radius = sqrt(-2.0 * tt__ln(tt__uniform(u[k])));
        double angle = 6.283185307179586 * tt__uniform(u[k + 1]);
        out[k] = (float)(radius * tt__cos(angle));
        out[k + 1] = (float)(radius * tt__sin(angle));
    }
}

/* Fills `order` with a permutation of 0..n-1 (Fisher, Yates) that depends only on the key. */
static void tt__shuffle(uint32_t *order, uint32_t n, uint64_t key)
{
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    for (uint32_t i = n; i > 1; i--) {
        uint32_t counter[4] = {i, 0, 0, 0}, u[4];
        tt__philox(counter, key, u);
        uint32_t j = (uint32_t)(((uint64_t)u[1] << 32 | u[0]) % i), swap = order[i - 1];
        order[i - 1] = order[j];
        order[j] = swap;
    }
}
