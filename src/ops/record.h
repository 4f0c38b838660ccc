#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"

/* ===========================================================================================================
   OPS                                                                                                src/ops/
   All facts about an op are in one block of a file rules.h: the defaults of its options, its shape rule, the
   function that records it, its backward, and the rules of ops that only its backward or a pass emits. The
   block ends with the op's tt__rules. The op's row in TT__OPS (src/backend/ops.h) defines its number, its
   name and its place in every table. Kernels are beside rules.h: in cpu.h, and in cuda.cuh for
   tinytrain_cuda.cu. Passes, planner and runs do not ask which op an instruction has: they read its row and
   its rules. Uses tape.
   ======================================================================================================== */

/* The state of a function that emits instructions at the end of a tape. */
typedef struct tt__builder {
    tt_tape *t;
    bool accumulate;      /* whether gradients of parameters persist over micro-batches                     */
    bool ok;              /* false: out of memory                                                           */
    tt__segment segment;  /* segment of the emitted instructions                                            */
    bool backward;
    int stage;
} tt__builder;

/* The backward of an op. */
typedef struct tt__gradient {
    /* Emits the backward of f, a copy of the instruction; g: the gradient of f's out[0]. NULL if `reads` is
       set. */
    void (*emit)(tt__builder *b, const tt__instr *f, int32_t g);
    /* The operands and results of a backward that is one instruction of `op` (see tt__emit_gradient). NULL
       if `emit` is set, or if the op has no backward. */
    const char *reads, *into;
    int op;
} tt__gradient;

/* done: the number of elements that a member of a collective loads from other members' memory. min: the
   number that any algorithm with the same result must load. ops/collectives/rules.h computes both. */
typedef struct tt__loads { int64_t done; double min; } tt__loads;

/* The facts about an op that are not in its row of TT__OPS. */
typedef struct tt__rules {
    /* Checks the operands and writes the shapes of the outputs to `out`; returns false after tt__tape_fail.
       The verifier calls `shape` again, so the shapes must depend on the operands only. If models do not
       record the op, its outputs exist already when `shape` is called. */
    bool (*shape)(tt_tape *t, const tt__instr *i, tt__shape *out);
    /* Writes the layouts of the results to `out`, given the layouts `in` of the operands; returns false if
       the op cannot be computed from such operands. A result is partial only if its sum over the ranks equals
       the result of whole operands. NULL: all operands and results are whole. */
    bool (*layout)(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out);
    tt__gradient backward; /* all fields NULL: the op has no backward */
    /* Return the bytes of scratch for the max numbers of rows. cpu_scratch: on a CPU with `threads` threads;
       NULL: tt__widen_bytes gives the number. cuda_scratch: on CUDA; NULL: 0 bytes. */
    size_t (*cpu_scratch)(int threads, const tt_tape *t, const tt__instr *i);
    size_t (*cuda_scratch)(const tt_tape *t, const tt__instr *i);
    /* Checks the integers of operands in the host's memory before a run, because kernels do not check them.
       NULL: there is nothing to check. */
    tt_status (*check)(const tt__launch *l);
    /* Merge instruction k, where possible, with another instruction, mostly with the instruction whose
       result k reads. fuse runs before differentiation, fuse_later after. root: the value for which the
       program is compiled. NULL: no merging. */
    void (*fuse)(tt_tape *t, int k, int32_t root);
    void (*fuse_later)(tt_tape *t, int k, int32_t root);
    /* Returns the number of floating-point operations in the op's matrix products. in: the operands of a run,
       with integers on the host, or operands of max size without data. NULL: 2 * m * n * k for a TT__PRODUCT,
       0 for other ops. */
    double (*flops)(const tt__instr *i, const tt__mat *in);
    int phases;         /* phases of a collective, TT__REDUCE_PHASE and so on; 0: the op is no collective */
    /* Returns how many elements member `me` loads from other members. elements: the number of elements of the
       largest operand. NULL: the op loads none. */
    tt__loads (*loads)(const tt__move *m, int64_t elements, int me, int members);
    int table;          /* k: in[k] is a table, of which the op reads as many rows as out[0] has; 0: none */
} tt__rules;

static const tt__rules *tt__rules_of(const tt__instr *i); /* the table is in ops/rules.h, after all rules */

/* ---------------------------------------------------------------------------------------------- recording */

/* Returns the number of outputs of i, beginning with out[0], whose column sums i can also compute: 0, 1 or 3.
   The last outputs of i are these column sums. */
static int tt__summed(const tt__instr *i)
{
    return !tt__is(i, TT__COLUMN_SUMS) ? 0 : i->op == TT__OP_ATTENTION_BACKWARD ? 3 : 1;
}

/* Returns k if out[k] has the column sums of out[o]; 0 if no output of i has them. */
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

/* Records i: checks it by its shape rule, creates its outputs and appends it. The arguments after `kinds`
   are the operands. Each letter of `kinds` is the type of one operand: `v` or `V` for a tt_value, `p` or `P`
   for a tt_param pointer. An operand with a capital letter may be absent (a value with id 0, or NULL).
   Returns out[0]. */
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
        if (!shape[k].rows) continue; /* i lacks this optional output */
        int32_t id = tt__new_value(t, &shape[k], TT__TRANSIENT, k ? "%s.%d:%d" : "%s.%d", tt__instr_name(&i),
                                   at, k);
        if (!id) return tt__handle(t, 0);
        t->values[id].pinned_f32 = k > 0 || tt__is(&i, TT__LOSS);
        t->code[at].out[k] = id;
    }
    return tt__handle(t, t->code[at].out[0]);
}
