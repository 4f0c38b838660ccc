#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"

/* ===========================================================================================================
   OPS                                                                                                src/ops/
   Each op in one place. Its block has its options' defaults, its shape rule, the function that records it,
   its backward, the rules of the ops that only its backward or a pass emits, and what else is known about it;
   it ends with the tt__rules. The row in TT__OPS (src/backend/ops.h) makes its number, its name and its place
   in every table. Kernels are beside the rules: cpu.h, and cuda.cuh for tinytrain_cuda.cu. Nothing else asks
   which op an instruction is: passes, planner and runs read rows and rules. Uses tape.
   ======================================================================================================== */

/* Emits instructions onto the end of a tape. */
typedef struct tt__builder {
    tt_tape *t;
    bool accumulate;      /* gradients of parameters persist over micro-batches                             */
    bool ok;              /* false: out of memory                                                           */
    tt__segment segment;  /* of what it emits                                                               */
    bool backward;
    int stage;
} tt__builder;

/* The backward of an op. */
typedef struct tt__gradient {
    /* Emits it. f is a copy of the instruction, g the gradient of its out[0]. NULL: see reads. */
    void (*emit)(tt__builder *b, const tt__instr *f, int32_t g);
    /* Not NULL: it is one instruction of `op`, see tt__emit_gradient. */
    const char *reads, *into;
    int op;
} tt__gradient;

/* Elements that a member of a collective loads from the memory of others, and the least that any algorithm
   with the same result loads: see those of each op. */
typedef struct tt__loads { int64_t done; double least; } tt__loads;

/* What is known of an op beside its row; NULL: see each. */
typedef struct tt__rules {
    /* Checks the operands and tells the shapes of the outputs; false after tt__tape_fail. The verifier runs
       it too, so it depends on the operands only; the outputs of ops that are not recorded exist already. */
    bool (*shape)(tt_tape *t, const tt__instr *i, tt__shape *out);
    /* The layouts of the results when the operands' are `in`; false: it cannot be computed of these. A rule
       tells a result partial only where sums over the ranks of it are what it would be of whole operands.
       NULL: all are whole. */
    bool (*layout)(const tt_tape *t, const tt__instr *i, const tt__split *in, tt__split *out);
    tt__gradient backward; /* nothing in it: there is none */
    /* Bytes of scratch at capacity: on a CPU of some threads (NULL: tt__widen_bytes), on CUDA (NULL: 0). */
    size_t (*cpu_scratch)(int threads, const tt_tape *t, const tt__instr *i);
    size_t (*cuda_scratch)(const tt_tape *t, const tt__instr *i);
    /* Before a run: are the operands' integers, which are on the host, what kernels rely on? NULL: always. */
    tt_status (*check)(const tt__launch *l);
    /* Before differentiation, and after it: makes one instruction of instruction k and what it reads from,
       where it can. root: the value that the program is compiled for. NULL: never. */
    void (*fuse)(tt_tape *t, int k, int32_t root);
    void (*fuse_later)(tt_tape *t, int k, int32_t root);
    /* Floating-point operations of matrix products, for NULL those of TT__PRODUCT. in: of a run, with
       integers on the host, or without data at capacity. */
    double (*flops)(const tt__instr *i, const tt__mat *in);
    int phases;         /* of a collective: TT__REDUCE_PHASE and so on; 0: it is none */
    /* What a member loads of what others have; `elements`: of the largest operand. NULL: nothing. */
    tt__loads (*loads)(const tt__move *m, int64_t elements, int me, int members);
    int table;          /* the operand, not 0, of which as many rows are read as out[0] has; 0: none */
} tt__rules;

static const tt__rules *tt__rules_of(const tt__instr *i); /* the table stands below the rules */

/* ---------------------------------------------------------------------------------------------- recording */

/* How many outputs, from the first on, have sums of their columns among the last. */
static int tt__summed(const tt__instr *i)
{
    return !tt__is(i, TT__COLUMN_SUMS) ? 0 : i->op == TT__OP_ATTENTION_BACKWARD ? 3 : 1;
}

/* The output that has the sums of columns of out[o]; 0: i has none. */
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

/* Records i with operands of the kinds that letters tell: v a tt_value, p a tt_param; V and P may be none (id
   0, NULL). Checks it by its shape rule, creates its outputs, appends it. Returns out[0]. */
static tt_value tt__record(tt_tape *t, tt__instr i, const char *kinds, ...)
{
    tt__shape shape[TT__MAX_OUT];
    va_list args;
    va_start(args, kinds);
    for (int k = 0; kinds[k]; k++) {
        const bool value = kinds[k] == 'v' || kinds[k] == 'V', optional = kinds[k] == 'V' || kinds[k] == 'P';
        tt_value v = value ? va_arg(args, tt_value) : tt__handle(t, 0);
        tt_param *p = value ? NULL : va_arg(args, tt_param *);
        if (optional && !v.id && !p && (value || !t->ctx->unmade[0])) continue; /* else it is not by intent */
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
