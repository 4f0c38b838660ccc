#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/edit.h"
#include "../ops/record.h"

/* --------------------------------------------------------------------------------------------------- fuse */

/* Fuses instructions by the rule `fuse` of each op or, after differentiation (`later`), by `fuse_later`. */
static tt_status tt__pass_fuse(tt_tape *t, int32_t root, bool later)
{
    int n = tt__index(t);
    for (int k = 0; k < n; k++) {
        const tt__rules *rules = t->code[k].op >= 0 ? tt__rules_of(&t->code[k]) : NULL;
        void (*fuse)(tt_tape *, int, int32_t) = !rules ? NULL : later ? rules->fuse_later : rules->fuse;
        if (fuse) fuse(t, k, root);
    }
    return tt__settle(t, n);
}
