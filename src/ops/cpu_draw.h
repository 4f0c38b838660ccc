#pragma once
#include "../base/base.h"

/* ------------------------------------------------------------------------------ random numbers of kernels */

static uint64_t tt__dropout_key(const tt__launch *l)
{
    const tt__step_settings *run = TT__RUN_OF(l);
    return !run ? 0 : tt__stream_key(run->seed, TT__RANDOM_DROPOUT, (uint64_t)run->step,
                                     (uint64_t)run->micro << 32 | l->instr->random);
}

/* Computes the Philox key, two words, of each round of a draw. */
static void tt__philox_keys(uint64_t key, uint64_t keys[2 * TT__DRAW_ROUNDS])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < TT__DRAW_ROUNDS; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        keys[2 * round] = k0;
        keys[2 * round + 1] = k1;
    }
}
