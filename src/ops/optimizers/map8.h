#pragma once
#include "../../base/base.h"

/* ------------------------------------------------------------------------------- optimizer states of 8 bits
   Block-wise dynamic quantisation: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022. A
   block of TT__STATE_BLOCK numbers has a scale, the largest magnitude in the block. Each number is stored as
   the code, of 8 bits, whose number in a map is nearest to the number / scale. A map has seven decades, from
   1e-7..1e-6 to 0.1..1. Decade i, from 0, is cut into 2^i equal intervals, whose middles are in the map. The
   numbers of the signed map are these middles, their negatives, 0 and 1. The unsigned map has intervals of
   half the width instead of negatives. The unsigned map is for Adam's v, by whose root the update is divided:
   v becomes 0 only if v is 0, since otherwise a parameter that has m but no v would move far in a step
   without gradient. */

/* Cells. Each octave of [2^-23, 1] is cut into cells of equal width. All magnitudes of the maps except 0 are
   in that range. All floats of a cell have equal upper 16 bits. A cell is narrower than the distance of two
   numbers of a map. */
#define TT__MAP8_BITS ((127 - 23) << 7) /* upper 16 bits of 2^-23, where the cells begin */
enum { TT__MAP8_CELLS = 23 * 128 + 1 };

typedef struct tt__map8 {
    float number[256];  /* number of each code, in ascending order */
    /* cell: in the lower 16 bits, the index k of the magnitude that is nearest to the cell's lower end.
       Numbers of the cell whose lower 16 bits are above the upper 16 bits are nearer to magnitude k + 1.
       divisor: the numbers of the map are quotients `(18 k - 16 c + 9) / divisor`, with k the number of the
       interval among all intervals, in a decade of c intervals. Numerators and divisors are integers that a
       float holds. Element `(7 + i) % 8` is the divisor for c = 2^i or, if the quotient must be 1, the
       numerator. */
    uint32_t cell[TT__MAP8_CELLS];
    float divisor[8];
    int zero, most;     /* zero: code of 0. most: index of the largest magnitude that has a negative */
    int floor;          /* index of the least magnitude of a number that is not 0 */
} tt__map8;

/* Returns magnitude k of a map, in ascending order from 0. The last magnitude, number 128 of the signed map
   and number 255 of the unsigned one, is 1. The result is the exact quotient, rounded once; bitsandbytes'
   create_dynamic_map rounds several times, so that some of its numbers differ by 1 or 2 units in the last
   place. */
static float tt__map8_magnitude(int k, bool is_signed)
{
    const int interval = is_signed ? k : k + 1; /* intervals are numbered through all decades */
    int count = 1, decade = is_signed ? 0 : -1;
    if (!k) return 0;
    if (k == (is_signed ? 128 : 255)) return 1;
    for (; 2 * count <= interval; count *= 2) decade++; /* count: intervals of the decade */
    double divisor = 20 * count;
    for (; decade < 6; decade++) divisor *= 10;
    return (float)((2 * count + 18 * (interval - count) + 9) / divisor);
}

static void tt__make_map8(tt__map8 *m, bool is_signed)
{
    const int last = is_signed ? 128 : 255;
    float magnitude[256];
    m->zero = is_signed ? 127 : 0;
    m->most = is_signed ? 127 : 0;
    m->floor = !is_signed;
    for (int k = 0; k <= last; k++) {
        magnitude[k] = m->number[m->zero + k] = tt__map8_magnitude(k, is_signed);
        if (k <= m->most) m->number[m->zero - k] = -magnitude[k];
    }
    for (int cell = 0, k = 0; cell < TT__MAP8_CELLS; cell++) {
        const uint32_t low = (uint32_t)(TT__MAP8_BITS + cell) << 16;
        uint32_t middle = 0; /* bits of the middle between magnitudes k and k + 1 */
        for (; k < last; k++) {
            middle = tt__bits((magnitude[k] + magnitude[k + 1]) / 2);
            if (low <= middle) break; /* positive floats have the order of their bits */
        }
        const bool inside = k < last && middle >> 16 == low >> 16;
        m->cell[cell] = (inside ? middle << 16 : 0xffff0000u) | (uint32_t)k;
    }
    double divisor = is_signed ? 2e7 : 2e8;
    for (int i = 0; i < 8; i++, divisor /= 5) m->divisor[(7 + i) % 8] = (float)divisor;
    if (is_signed) m->divisor[6] = 18 * 128 - 16 * 128 + 9;
    else m->divisor[7] = 18 * 256 - 16 * 256 + 9;
    m->number[m->zero] = 0; /* not -0 */
}

/* Returns the bytes of the two maps in the scratch memory of an update: signed, unsigned. */
static size_t tt__maps8_bytes(void) { return tt__align_up(2 * sizeof(tt__map8)); }
