#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"

/* ===========================================================================================================
   OPS                                                                                                src/ops/
   Each op has one place: a block with the defaults of its options, its shape rule, the function that records
   it, its backward, the rules of ops that only its backward or a pass emits, and all other facts about the
   op. The block ends with the op's tt__rules. The row in TT__OPS (src/backend/ops.h) makes the op's number,
   its name and its place in every table. Kernels are beside the rules: in cpu.h, and in cuda.cuh for
   tinytrain_cuda.cu. Nothing else asks which op an instruction is: passes, planner and runs read rows and
   rules. Uses tape.
   ======================================================================================================== */

/* Emits instructions onto the end of a tape. */
typedef struct tt__builder {
    tt_tape *t;
    bool accumulate;      /* gradients of parameters persist over micro-batches                             */
    bool ok;              /* false: out of memory                                                           */
    tt__segment segment;  /* segment of the emitted instructions                                            */
    bool backward;
    int stage;
} tt__builder;

/* The backward of an op. */
typedef struct tt__gradient {
    /* Emits the backward. f: a copy of the instruction; g: the gradient of its out[0]. NULL: see reads. */
    void (*emit)(tt__builder *b, const tt__instr *f, int32_t g);
    /* If reads is not NULL, the backward is one instruction of `op`, see tt__emit_gradient. */
    const char *reads, *into;
    int op;
} tt__gradient;

/* Numbers of elements that a member of a collective loads from the memory of other members (done), and that
   any algorithm with the same result must load (least). ops/collectives/rules.h has them for each op. */
typedef struct tt__loads { int64_t done; double least; } tt__loads;

/* The facts about an op that are not in its row of TT__OPS. */
typedef struct tt__rules {
    /* Checks the operands and writes the shapes of the outputs to `out`; false after tt__tape_fail. The
       verifier calls shape, too, so shapes depend on the operands only. Outputs of ops that are not recorded
       exist already. */
    bool (*shape)(tt_tape *t, const tt__instr *i, tt__shape *out);
    /* Writes the layouts of the results for operands with the layouts `in` to `out`; false if the op cannot
       be computed from these. A result is partial only if its sum over the ranks equals the result of whole
       operands. NULL: all operands and results are whole. */
    bool (*layout)(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out);
    tt__gradient backward; /* empty: the op has no backward */
    /* Bytes of scratch at capacity: on a CPU with `threads` threads (NULL: tt__widen_bytes), and on CUDA
       (NULL: 0). */
    size_t (*cpu_scratch)(int threads, const tt_tape *t, const tt__instr *i);
    size_t (*cuda_scratch)(const tt_tape *t, const tt__instr *i);
    /* Checks, before a run, the integers of operands, which are on the host, as kernels rely on them. NULL:
       there is nothing to check. */
    tt_status (*check)(const tt__launch *l);
    /* Merges instruction k with another, mostly one whose result k reads, where possible: before
       differentiation (fuse) and after it (fuse_later). root: the value for which the program is compiled.
       NULL: never. */
    void (*fuse)(tt_tape *t, int k, int32_t root);
    void (*fuse_later)(tt_tape *t, int k, int32_t root);
    /* Floating-point operations of matrix products; NULL: those of a TT__PRODUCT, else 0. in: the operands of
       a run, with integers on the host, or operands at capacity without data. */
    double (*flops)(const tt__instr *i, const tt__mat *in);
    int phases;         /* phases of a collective, TT__REDUCE_PHASE and so on; 0: the op is no collective */
    /* Elements that a member loads from others; `elements`: of the largest operand. NULL: none. */
    tt__loads (*loads)(const tt__move *m, int64_t elements, int me, int members);
    int table;          /* number of the operand of which only as many rows are read as out[0] has; 0: none */
} tt__rules;

static const tt__rules *tt__rules_of(const tt__instr *i); /* the table is in ops/rules.h, after all rules */

/* ---------------------------------------------------------------------------------------------- recording */

/* Returns how many outputs, from the first on, may have column sums among the last outputs. */
static int tt__summed(const tt__instr *i)
{
    return !tt__is(i, TT__COLUMN_SUMS) ? 0 : i->op == TT__OP_ATTENTION_BACKWARD ? 3 : 1;
}

/* Returns the number of the output that has the column sums of out[o]; 0 if i has none. */
static int tt__column_sums(const tt__instr *i, int o)
{
    const int sums = tt__ops[i->op].outputs - tt__summed(i) + o;
    return o < tt__summed(i) && i->out[sums] ? sums : 0;
}

static bool tt__shape_of(tt_tape *t, const tt__instr *i, tt__shape out[TT__MAX_OUT])
{
    memset(out, 0, sizeof *out * TT__MAX_OUT);
    if (!tt__rules_of(i)->shape(t, i, out)) return false;
    for (int o = 0; o < tt__summed(i); o++) {
        const tt__shape sums = {TT_F32, 1, out[o].cols, 0, 0};
        if (tt__column_sums(i, o)) out[tt__column_sums(i, o)] = sums;
    }
    return true;
}

/* Records i: checks it by its shape rule, creates its outputs and appends it. Each letter of `kinds` is the
   kind of an operand that follows: v a tt_value, p a tt_param; V and P may be absent (id 0, NULL). Returns
   out[0]. */
static tt_value tt__record(tt_tape *t, tt__instr i, const char *kinds, ...)
{
    tt__shape shape[TT__MAX_OUT];
    va_list args;
    va_start(args, kinds);
    for (int k = 0; kinds[k]; k++) {
        const bool value = kinds[k] == 'v' || kinds[k] == 'V', optional = kinds[k] == 'V' || kinds[k] == 'P';
        tt_value v = value ? va_arg(args, tt_value) : tt__handle(t, 0);
        tt_param *p = value ? NULL : va_arg(args, tt_param *);
        /* A NULL parameter after a failed tt_param_new is a mistake, not an absent operand. */
        if (optional && !v.id && !p && (value || !t->ctx->unmade[0])) continue;
        if (!value) i.in[k] = tt__param_id(t, tt__instr_name(&i), k, p);
        else if (tt__on_tape(t, tt__instr_name(&i), k, v)) i.in[k] = v.id;
    }
    va_end(args);
    if (t->status != TT_OK || !tt__shape_of(t, &i, shape)) return tt__handle(t, 0);
    tt__instr *to = tt__append(t, i.op);
    if (!to) return tt__handle(t, 0);
    i.random = to->random;
    *to = i;
    int at = t->n_code - 1;
    for (int k = 0; k < tt__ops[i.op].outputs; k++) {
        if (!shape[k].rows) continue; /* an optional output, absent here */
        int32_t id = tt__new_value(t, &shape[k], TT__TRANSIENT, k ? "%s.%d:%d" : "%s.%d", tt__instr_name(&i),
                                   at, k);
        if (!id) return tt__handle(t, 0);
        t->values[id].pinned_f32 = k > 0 || tt__is(&i, TT__LOSS);
        t->code[at].out[k] = id;
    }
    return tt__handle(t, t->code[at].out[0]);
}
