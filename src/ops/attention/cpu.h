#pragma once
#include "../../base/base.h"
#include "../scratch.h"
#include "cpu_shared.h"
#include "../cpu_launch.h"
#include "../cpu_draw.h"
#include "../../cpu/kernels.h"
#include "../linear/cpu_computing.h"
#include "cpu_kernels.h"

/* ------------------------------------------------------------------------------------ attention: launches */

/* Returns the arguments of attention for a launch. The operands with the numbers `q`, `q + 1` and `q + 2`
   are the queries, keys and values; operand number `starts` has the first row of each sequence. Operand
   number `numbers`, if present, lists the rows of the batch that are queries. The workspace then gets the
   listed rows in the order of the sequences. */
TT__INLINE tt__attention_args TT__K(attention_args)(const tt__launch *l, int q, int starts, int numbers)
{
    tt__attention_args a;
    memset(&a, 0, sizeof a);
    a.seq_start = a.query_start = (const int32_t *)l->in[starts].data;
    a.seqs = l->in[starts].rows - 1;
    a.heads = l->instr->attr.heads;
    a.group = a.heads / l->instr->attr.key_heads;
    a.head_size = l->in[q].cols / a.heads;
    a.first_head = (int)(l->first_col / a.head_size);
    a.causal = l->instr->attr.causal;
    a.window = l->instr->attr.window;
    a.alibi = l->instr->attr.alibi;
    a.alibi_heads = l->instr->attr.alibi_heads;
    a.alibi_rounded = l->instr->attr.alibi_rounded;
    a.attr = &l->instr->attr;
    a.lists = l->lists;
    a.scale = l->instr->attr.scale;
    a.dropout = l->instr->attr.dropout;
    a.dropout_key = tt__dropout_key(l);
    a.q = l->in[q]; a.k = l->in[q + 1]; a.v = l->in[q + 2];
#ifdef TT__ATTENTION_BF16
    if (a.q.dtype == TT_BF16 && a.k.dtype == TT_BF16 && a.v.dtype == TT_BF16) a.bf16 = tt__cpu_of(l)->bf16;
#endif
    a.workspace = l->workspace;
    if (l->in[numbers].data) {
        int64_t n = l->in[numbers].rows;
        tt__attention_queries(&a, (const int32_t *)l->in[numbers].data, n, l->workspace);
        a.workspace = (char *)l->workspace + tt__attention_queries_bytes(a.seqs, n);
    }
    return a;
}
#undef TT__ATTENTION_BF16

TT__FN tt_status TT__K(run_ATTENTION)(const tt__launch *l)
{
    tt__attention_args a = TT__K(attention_args)(l, 0, 3, 4);
    a.out = l->out[0];
    a.lse = (float *)l->out[1].data;
    TT__K(attention_forward)(tt__cpu_of(l)->pool, &a);
    return TT_OK;
}

TT__FN tt_status TT__K(run_ATTENTION_BACKWARD)(const tt__launch *l)
{
    tt__attention_args a = TT__K(attention_args)(l, 1, 4, 7);
    a.dout = l->in[0];
    a.out = l->in[5];
    a.lse = (float *)l->in[6].data;
    /* The sums of dout * out read dout unrounded, so the products must not round dout either. */
    if (a.dout.dtype != TT_BF16) a.bf16 = TT__BF16_CONVERT;
    a.dq = l->out[0]; a.dk = l->out[1]; a.dv = l->out[2];
    a.add_dq = l->add[0]; a.add_dk = l->add[1]; a.add_dv = l->add[2];
    TT__K(attention_backward)(tt__cpu_of(l)->pool, &a);
    return TT_OK;
}
