#pragma once
#include "../base/base.h"

/* ---- BigBird's random blocks, as BigBirdBlockSparseAttention of transformers draws them with numpy */

/* State of MT19937 (Matsumoto and Nishimura, "Mersenne twister", 1998), seeded as by numpy.random.seed. */
typedef struct tt__twister { uint32_t word[624]; int at; } tt__twister;

static void tt__twister_seed(tt__twister *m, uint32_t seed)
{
    for (int k = 0; k < 624; k++) {
        m->word[k] = seed;
        seed = 1812433253u * (seed ^ seed >> 30) + (uint32_t)k + 1;
    }
    m->at = 624;
}

static uint32_t tt__twister_next(tt__twister *m)
{
    if (m->at == 624) {
        for (int k = 0; k < 624; k++) {
            const uint32_t y = (m->word[k] & 0x80000000u) | (m->word[(k + 1) % 624] & 0x7fffffffu);
            m->word[k] = m->word[(k + 397) % 624] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0);
        }
        m->at = 0;
    }
    uint32_t y = m->word[m->at++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

/* Shuffles the n numbers of x as numpy.random.permutation does when its generator has the state *m. */
static void tt__twister_shuffle(tt__twister *m, int32_t *x, int n)
{
    for (int k = n - 1; k > 0; k--) {
        uint32_t mask = (uint32_t)k, j;
        for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
        while ((j = tt__twister_next(m) & mask) > (uint32_t)k) {}
        const int32_t was = x[k];
        x[k] = x[j];
        x[j] = was;
    }
}

/* Writes the candidates for the random blocks of block i (of n blocks) to x, and returns their number.
   Candidates are the blocks of the first 1024 tokens that are not near block i. transformers has these
   candidates, which are those of the BigBird paper, for 1024, 3072 and 4096 positions. */
static int tt__big_bird_paper(int i, int n, int size, int32_t *x)
{
    int last = n - 1, count = 0, start = i - 2, end = i; /* excludes blocks start + 1 to end + 1 */
    if (1024 > 2 * size) last = 1024 / size - 1;
    if (i == 1) start = 0, end = 1;
    else if (i == 2) start = 0, end = 2;
    else if (i >= n - 3) start = last, end = n;
    else if (start > last) start = last, end = n;
    else if (end + 1 == last) end = n;
    for (int k = 0; k < n - 2; k++)
        if (k < start || (k > end && k < last)) x[count++] = k + 1;
    return count;
}

/* Returns whether block j may be a random block of block i, if the number of positions is not 1024, 3072 or
   4096. transformers then draws from the first `max` blocks. Excluded are block i, its neighbours, and blocks
   0 and max - 1; block 1 and block max - 2 also exclude each other. */
static bool tt__big_bird_may(int i, int j, int max)
{
    const bool beside = j >= i - 1 && j <= i + 1, global = j == 0 || j == max - 1;
    return !beside && !global && !(i == 1 && j == max - 2) && !(i == max - 2 && j == 1);
}

/* Fills lists (heads, n, listed) with the numbers of the `listed` random blocks of each block, for each head.
   The sequence has n blocks of `size` rows. x: scratch memory for n numbers. */
static void tt__big_bird_lists(int32_t *lists, int heads, int n, int listed, int size, uint32_t seed,
                               int32_t *x)
{
    const int64_t rows = (int64_t)n * size; /* positions, rounded up to whole blocks */
    const int max = 2 * listed + 5;        /* blocks to draw from; tt__bert_check bounds max * size */
    const bool paper = rows == 1024 || rows == 3072 || rows == 4096;
    tt__twister m;
    tt__twister_seed(&m, seed);
    memset(lists, 0, sizeof *lists * (size_t)heads * (size_t)n * (size_t)listed);
    for (int h = 0; h < heads && paper; h++)
        for (int i = 1; i < n - 1; i++) {
            const int count = tt__big_bird_paper(i, n, size, x);
            int32_t *list = lists + ((size_t)h * (size_t)n + (size_t)i) * (size_t)listed;
            tt__twister_shuffle(&m, x, count);
            for (int k = 0; k < listed; k++) list[k] = count ? x[k < count ? k : 0] : 0;
        }
    for (int i = 1; i < n && !paper && n >= max; i++)
        for (int h = 0; h < heads; h++) {
            int32_t *list = lists + ((size_t)h * (size_t)n + (size_t)i) * (size_t)listed;
            int found = 0;
            for (int k = 0; k < max; k++) x[k] = k;
            tt__twister_shuffle(&m, x, max);
            for (int k = 0; k < max && found < listed; k++)
                if (tt__big_bird_may(i, x[k], max)) list[found++] = x[k];
        }
}
