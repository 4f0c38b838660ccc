#pragma once
#include "../base/base.h"

/* ===========================================================================================================
   CPU                                                                                                >>cpu
   The CPU backend. The kernels between "one pass per instruction set" and its end are compiled once for each
   instruction set (this file includes itself with TT__LANES set); the best one the CPU has is chosen when a
   context opens. Uses base, tape and ops.
   ======================================================================================================== */

/* C = act(A B + bias) + residual, or act'(saved) A B; `accumulate` adds what C was. A(i, k) =
   a[i * a_row + k * a_col] and B(k, j) = b[k * b_row + j * b_col], where one stride of A and one of B is 1.
   Sums are fp32, in an order that does not depend on threads. Matrices without data are absent. */
typedef struct tt__gemm_args {
    int64_t m, n, k;
    tt__mat a, b, c;
    int64_t a_row, a_col, b_row, b_col;
    tt_dtype b_narrow;   /* B is float, and rounded to this when read; TT_F32: it is not             */
    bool accumulate;
    tt__bf16 bf16;       /* how products are computed where A and B are bf16                          */
    int act;
    tt__mat bias;        /* (n)                                                                       */
    tt__mat pre;         /* (m, n): keeps A B + bias, before the act                                  */
    tt__mat residual;    /* (m, n)                                                                    */
    tt__mat saved;       /* (m, n): what act saved                                                    */
    void *workspace;     /* of gemm_workspace bytes, 64-byte aligned                                  */
} tt__gemm_args;

/* What a microkernel computes: C = scale * A B + base, a block whose sums stay in registers. k counts floats
   or, where bf16 is multiplied, units: pairs of it in the place of a float. A(i, k) =
   a[i * a_row + k * a_col], for AMX a[i * a_row + k / 16 * a_col + k % 16]; B's and C's rows lie b_row and
   c_row floats apart. `base` is NULL, C itself, or another block. */
typedef struct tt__product {
    int64_t k;
    const float *a; int64_t a_row, a_col;
    const float *b; int64_t b_row;
    float *c; int64_t c_row;
    const float *base; int64_t base_row;
    float scale;
} tt__product;

/* Attention within each sequence, per head. Shapes: k, v (rows, heads / group * head_size); q, out (queries,
   heads * head_size); lse f32 (queries, heads). The queries are of all rows or of those that query_row lists,
   in any order. Dropout of the weight of query row i (of the batch) for key j (of its sequence) and head h
   (of all ranks) takes 16 random bits, number j % 8 of Philox counter {i, j / 8, h, 0}, low half first; kept
   if >= round(65536 p). */
typedef struct tt__attention_args {
    const int32_t *seq_start; int64_t seqs;
    const int32_t *query_start;  /* (seqs + 1): number of the first query of each sequence               */
    const int32_t *query_row;    /* of a query: its row of the batch; NULL: the query's number            */
    const int32_t *query_at;     /* of a query: its row in q; NULL: the query's number                    */
    int heads, first_head, group; /* group: heads of q that a key serves                                  */
    int64_t head_size;
    bool causal; float scale; float dropout; uint64_t dropout_key;
    int64_t window;               /* 0: none                                                             */
    float alibi; int alibi_heads; /* of all ranks; 0: none                                               */
    bool alibi_rounded;           /* see tt_attention_options                                            */
    const tt__attr *attr;         /* of block-sparse attention                                           */
    const uint16_t *lists;        /* tt__launch's                                                        */
    tt__mat q, k, v, out;
    float *lse;
    tt__mat dout, dq, dk, dv;    /* for backward only                                                     */
    bool add_dq, add_dk, add_dv; /* for backward: += instead of =                                         */
    tt__bf16 bf16;               /* how products of bf16 are computed; other operands are rounded to it   */
    void *workspace;             /* of attention_workspace bytes                                          */
} tt__attention_args;

struct tt__isa_table {
    const char *name;
    /* One thread's fastest multiply-adds, of fp32 and by tt__bf16, or NULL; they return the FLOPs done. */
    double (*peak[3])(int64_t rounds, float *sink);
    tt_status (*run[TT__OP_COUNT])(const tt__launch *l);
    bool optimized; /* the compiler was asked for optimisation */
};
