#pragma once
#include "../../base/base.h"
#include "rules.h"
#include "../cpu_launch.h"
#include "../../cpu/variants.h"
#include "../../cpu/kernels.h"
#include "../../cpu/vectors.h"
#include "../cpu_rows.h"
#include "cpu.h"

/* --------------------------------------------------------------------------------------------------- pruning
   Chooses the weights of smallest magnitude or of lowest movement, and sets them to 0. */

/* Subtracts the gradient, times the factor of the step, times the weight from the weight's movement, which
   Sanh, Wolf, Rush, "Movement Pruning", 2020, call importance score and multiply by a learning rate. Here the
   rate is 1: a constant factor would choose no other weights. The sum is f32, whatever the dtype of weights,
   because late terms are much smaller than the sum. */
TT__ROWS_FN(movement_rows)
{
    const float *g = TT__K(chunk_in)(&l->in[0], from, to - from, scratch, 0);
    const float *p = TT__K(chunk_in)(&l->in[2], from, to - from, scratch, 1);
    float *movement = (float *)l->out[0].data + from;
    const float factor = ((const tt__clipped *)l->in[1].data)->factor;
    for (int64_t c = 0, n = to - from; c < n; c += TT__LANES) {
        const tt__vf moved = TT__K(load_n)(g + c, n - c) * factor * TT__K(load_n)(p + c, n - c);
        TT__K(store_n)(movement + c, TT__K(load_n)(movement + c, n - c) - moved, n - c);
    }
}

TT__FN tt_status TT__K(run_MOVEMENT)(const tt__launch *l) { return TT__K(update)(l, TT__K(movement_rows)); }

TT__INLINE bool TT__K(is_pruned)(const uint8_t *mask, int64_t j) { return mask[j / 8] >> (j % 8) & 1; }

/* Returns a number above 0 that grows with the movement of weight j or, if `movement` is NULL, with the
   weight's magnitude. Returns 0 if the weight is pruned already. */
TT__INLINE uint32_t TT__K(prune_key)(const tt__mat *p, const float *movement, const uint8_t *mask,
                                   int64_t j)
{
    float x;
    uint32_t bits;
    if (TT__K(is_pruned)(mask, j)) return 0;
    if (movement) {
        memcpy(&bits, movement + j, sizeof bits);
        return bits >> 31 ? 0u - bits : bits | 0x80000000u;
    }
    if (p->dtype == TT_F32) x = ((const float *)p->data)[j];
    else tt__convert(&x, TT_F32, (const uint16_t *)p->data + j, p->dtype, 1);
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7fffffff) + 1;
}

/* Makes the mask of the k weights of p whose movements or, if `movement` is NULL, magnitudes are smallest; of
   equal ones, the first.
   Finds the key of the last weight by counting: the higher 11 bits of the keys, the next 11, then 10. */
TT__FN void TT__K(choose_pruned)(const tt__mat *p, const float *movement, uint8_t *mask, int64_t k,
                                 int64_t *count)
{
    const int64_t n = tt__elements(p);
    int64_t left = k;
    uint64_t last = 0; /* the key's bits so far */
    for (int from = 21, end = 32; end > 0; end = from, from = from > 11 ? from - 11 : 0) {
        const uint32_t bins = 1u << (end - from);
        uint32_t bin = 0;
        memset(count, 0, sizeof *count * bins);
        for (int64_t j = 0; j < n; j++) {
            const uint64_t key = TT__K(prune_key)(p, movement, mask, j);
            if (key >> end == last >> end) count[key >> from & (bins - 1)]++;
        }
        while (bin < bins - 1 && count[bin] < left) left -= count[bin++];
        last |= (uint64_t)bin << from;
    }
    for (int64_t j = 0; j < n; j++) {
        const uint32_t key = TT__K(prune_key)(p, movement, mask, j);
        const bool equal = key == last && left-- > 0, pruned = key < last || equal;
        const int bit = 1 << (j % 8);
        mask[j / 8] = (uint8_t)(pruned ? mask[j / 8] | bit : mask[j / 8] & ~bit);
    }
}

TT__ROWS_FN(zero_pruned)
{
    const uint8_t *mask = (const uint8_t *)l->out[0].data + TT__MASK_HEAD;
    const size_t item = tt_dtype_bytes(l->out[1].dtype);
    char *p = (char *)l->out[1].data;
    for (int64_t j = from; j < to; j++) {
        if (!TT__K(is_pruned)(mask, j)) continue;
        if (item == 4) ((float *)(void *)p)[j] = 0;
        else ((uint16_t *)(void *)p)[j] = 0;
    }
}

/* Chooses weights anew if the number of pruned weights differs from that of the schedule. */
TT__FN tt_status TT__K(run_PRUNE)(const tt__launch *l)
{
    const tt__mat *p = &l->out[1];
    uint8_t *head = (uint8_t *)l->out[0].data;
    const float *movement = (const float *)l->in[1].data;
    const int64_t k = tt__pruned_at(&l->instr->attr.pruning, TT__RUN_OF(l)->step, tt__elements(p));
    int64_t pruned;
    if (!isfinite(((const tt__clipped *)l->in[0].data)->norm)) return TT_OK;
    memcpy(&pruned, head, sizeof pruned);
    if (k != pruned) TT__K(choose_pruned)(p, movement, head + TT__MASK_HEAD, k, (int64_t *)l->workspace);
    memcpy(head, &k, sizeof k);
    return k ? tt__for_chunks(l, tt__elements(p), TT__CHUNK, TT__CHUNK, 0, TT__K(zero_pruned)) : TT_OK;
}
