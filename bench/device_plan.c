/* What a training step costs a GPU by its plan: launches, bytes and FLOPs of each kind of work, and the time
   that these should take by rates that are stated. It needs no GPU: programs are compiled for "cuda" and
   never run. The models are ViT-L/16 on 64 images, DistilBERT-base on 12 x 512 tokens and GPT-2 of 124
   million on 16 x 1,024 tokens, with AdamW and clipping, in --precision (bf16-true), --recompute (cheap),
   --matmul (fp32; fp8).

   The rates are an H200's: 650 TFLOP/s for products of 16-bit operands of these sizes and 4.3 TB/s for what
   goes through memory; attention's products are those of all pairs of a sequence, or half if it is causal,
   at 174 TFLOP/s forward and 147 TFLOP/s backward, or 128 where one pass makes all of the backward (see
   bench/results/NOTES.md), and 14 instructions for each weight that dropout draws for, 5 for each of which
   the backward leaves a bit and reads it. Products whose operands have different dtypes take the kernel for
   any product, 10 TFLOP/s. A processor issues 128 instructions a clock, 29.6e12 a second in all: element-wise
   work takes the longer of its bytes and its instructions, so many for 8 elements as
   bench/kernels.py prints (--instructions GELU,SLOPE,ADAM for other kernels than today's). --norm is the rate
   of layer norm's backward in TB/s; --one-pass 0: attention's backward always takes two passes; --wgmma 0:
   no attention by warpgroups (TINYTRAIN_WGMMA=0), which takes 215 and 241 TFLOP/s. A launch takes 1
   microsecond besides. These are sums of parts that run one after another: no measurement.

   Inputs come from the host at 50 GB/s, beside the step before where they have arrivals; a copy within the
   device's memory is what then remains.

   Products in fp8 take 1,300 TFLOP/s: the same part of an H200's 1,979 as the 650 are of its 989. Rounding to
   fp8 reads an operand once and writes its fp8, its transpose or both, by at most 181 instructions for 8
   elements; without a history it reads it twice.

   --rounds 1 prints what products would take in whole rounds of tiles, as they are planned, and what it would
   save to make one product of all that share an operand, also of the sum that is the gradient of x. A
   processor works on one tile of 128 x 128 at a time, of 132 such, at the rate above; k whole, or split in up
   to 8 parts (of 256 or more), the number that is the fastest, whose sums in f32 another kernel adds up (4.3
   TB/s, 1 microsecond more). cuBLASLt's own tiles are not known here.

   Bytes are those of each operand and result once. Launches are what tinytrain_cuda.cu makes of an
   instruction; those of tables' gradients, which depend on the ids, are counted as 12. */
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"

enum {
    PRODUCTS, ANY_PRODUCTS, BIASES, ATTENTION, ATTENTION_BACKWARD, ACTIVATIONS, NORMS, NORMS_BACKWARD,
    UPDATES, INPUTS, ROUNDING, OTHERS, KINDS
};
static const char *const kinds[KINDS] = {
    "products", "products of unlike dtypes", "bias gradients", "attention", "attention backward",
    "GELU and its slope", "norms", "norms backward", "norm of gradients and AdamW", "inputs",
    "rounding to fp8", "the rest"};

typedef struct cost { double launches, bytes, flops, seconds; } cost;

static double gelu_instructions = 217, slope_instructions = 250, adam_instructions = 379, norm_rate = 4.3;
static const double rounding_instructions = 181; /* at most, of a tensor and its transpose */
static const double sum_instructions = 24; /* what column sums add to the slope of 8 elements */
static const double attention_sum_instructions = 33; /* ... to 8 of dq, dk and dv */
static bool one_pass_too = true, wgmma = true;

static double bytes_of(const tt_tape *t, int32_t id)
{
    const tt__shape *s = &t->values[id].shape;
    return id ? (double)s->rows * (double)s->cols * (double)tt_dtype_bytes(s->dtype) : 0;
}

static void add(cost *to, double launches, double bytes, double flops, double flops_rate, double instructions,
                double bytes_rate)
{
    double seconds = bytes / (bytes_rate * 1e12), by_flops = flops / flops_rate;
    const double by_instructions = instructions / 29.6e12;
    if (by_flops > seconds) seconds = by_flops;
    if (by_instructions > seconds) seconds = by_instructions;
    to->launches += launches;
    to->bytes += bytes;
    to->flops += flops;
    to->seconds += seconds + launches * 1e-6;
}

typedef struct attention_kernels { bool wide, one_pass; } attention_kernels;

/* As tinytrain_cuda.cu chooses, of whole sequences. */
static attention_kernels kernels_of(const tt_tape *t, const tt__instr *i)
{
    const bool backward = i->op == TT__OP_ATTENTION_BACKWARD;
    const tt__shape *q = &t->values[i->in[backward]].shape;
    const double head_size = (double)q->cols / i->attr.heads;
    const int longest = i->attr.max_length;
    const bool fits = longest && longest <= 256 && head_size <= (longest <= 128 ? 32 : 64);
    const bool plain = q->dtype != TT_F32 && !i->attr.window && !i->attr.alibi_heads && !i->attr.block;
    const bool one_pass = backward && one_pass_too && fits && plain;
    const attention_kernels a = {wgmma && plain && head_size > 32 && head_size <= 64 && !one_pass, one_pass};
    return a;
}

/* Sums of columns by the kernel that writes them: chunks of rows (rows_of_sums in tinytrain_cuda.cu, of 132
   processors) leave a part each, which another launch adds up: for norms the one that also adds up the parts
   of dw and db, for attention one for dq, dk and dv, of which each tile leaves a part. Those of a GELU by
   tanh are taken to be the same work in the product's epilogue (DGELU_BGRAD). */
static void count_sums(const tt_tape *t, const tt__instr *i, cost *costs)
{
    const bool norm = i->op == TT__OP_LAYERNORM_BACKWARD || i->op == TT__OP_RMSNORM_BACKWARD;
    const bool attention = i->op == TT__OP_ATTENTION_BACKWARD;
    double launches = norm ? 0 : 1;
    for (int o = 0; o < tt__summed(i); o++) {
        const int32_t sums = i->out[tt__column_sums(i, o)];
        const tt__shape *y = &t->values[i->out[o]].shape;
        if (!tt__column_sums(i, o)) continue;
        const double whole = floor((y->cols <= 1024 ? 1024 : 4096) / (double)y->cols);
        double parts = 132 * fmin(4, fmax(1, whole));
        if (attention) {
            const attention_kernels a = kernels_of(t, i);
            const double tiles = (double)y->rows / (a.wide && o ? 64 : 128);
            parts = (double)t->values[i->in[4]].shape.rows - 1 + (a.one_pass ? 0 : tiles);
        }
        add(&costs[BIASES], launches, 2 * parts * 4 * (double)y->cols + bytes_of(t, sums), 0, 1, 0, 4.3);
        if (attention)
            add(&costs[BIASES], 0, 0, 0, 1,
                (double)y->rows * (double)y->cols / 8 * attention_sum_instructions, 4.3);
        launches = 0;
    }
}

/* joined: one with the product before it, whose x it does not read again. */
static void count_product(const tt_tape *t, const tt__instr *i, cost *costs, double bytes, bool joined)
{
    const bool sums = i->op == TT__OP_LINEAR_DW; /* over rows: dw (out, in) = dy^T x */
    const tt__shape *a = &t->values[i->in[0]].shape, *b = &t->values[i->in[1]].shape;
    const bool fp8 = tt__reads_fp8(t, i), alike = fp8 || a->dtype == b->dtype;
    const double m = (double)a->rows, flops = 2 * m * (double)a->cols * (double)(sums ? b->cols : i->op ==
        TT__OP_LINEAR ? b->rows : b->cols);
    const int32_t to = i->out[0];
    if (joined) bytes -= bytes_of(t, i->in[tt__shared_role(i)]);
    if (to)
        add(&costs[alike ? PRODUCTS : ANY_PRODUCTS], !joined, bytes, flops,
            fp8 ? 1300e12 : alike ? 650e12 : 10e12, 0, 4.3);
    if (sums && i->out[1]) /* a pass over dy, and one over its parts */
        add(&costs[BIASES], to ? 1 : 2, bytes_of(t, i->in[0]), 0, 1, 0, 4.3);
    if (sums || i->attr.act == TT__ACT_NONE || i->attr.act == TT__ACT_GELU_TANH) return;
    const bool slope = i->op == TT__OP_LINEAR_DX;
    const double size = bytes_of(t, to), elements = size / (double)tt_dtype_bytes(t->values[to].shape.dtype);
    add(&costs[ACTIVATIONS], 1, (slope ? 3 : 2) * size, 0, 1,
        elements / 8 * (!slope ? gelu_instructions : slope_instructions + (i->out[1] ? sum_instructions : 0)),
        4.3);
}

/* The fused loss, by chunks of rows: logits in f32, their loss and gradient, dx, and dw, to which chunks add
   in f32. As of other products, bytes count where they take longer than FLOPs. */
static void count_head(const tt_tape *t, const tt__instr *i, cost *costs, int64_t chunk)
{
    const tt__shape *x = &t->values[i->in[0]].shape, *w = &t->values[i->in[3]].shape;
    const double rows = (double)x->rows, chunks = ceil(rows / (double)chunk);
    const double logits = rows * (double)w->rows, weights = (double)w->rows * (double)w->cols;
    const double half = (double)tt_dtype_bytes(x->dtype), flops = 2 * logits * (double)w->cols;
    const double operands = bytes_of(t, i->in[0]) + chunks * half * weights;
    add(&costs[PRODUCTS], chunks, operands + 4 * logits, flops, 650e12, 0, 4.3);
    if (i->out[1]) add(&costs[PRODUCTS], chunks, operands + half * logits, flops, 650e12, 0, 4.3);
    if (i->out[3])
        add(&costs[PRODUCTS], chunks, bytes_of(t, i->in[0]) + half * logits + chunks * 8 * weights, flops,
            650e12, 0, 4.3);
    add(&costs[OTHERS], chunks + 2, logits * (4 + half), 0, 1, 0, 4.3);
}

static void count_attention(const tt_tape *t, const tt__instr *i, cost *costs, double bytes, double length)
{
    const bool backward = i->op == TT__OP_ATTENTION_BACKWARD;
    const tt__shape *q = &t->values[i->in[backward]].shape;
    const double heads = i->attr.heads;
    const attention_kernels kernels = kernels_of(t, i);
    const bool wide = kernels.wide, one_pass = kernels.one_pass;
    /* Tiles in which no query sees a key are left out. */
    const double pairs = (double)q->rows * length / (i->attr.causal ? 2 : 1);
    const double flops = 4 * pairs * (double)q->cols * (one_pass ? 2.5 : backward ? 3.5 : 1);
    const tt__attention_operands at = tt__attention_of(backward);
    const tt__mat of_q = {NULL, q->dtype, q->rows, q->cols, q->cols};
    const int64_t seqs = t->values[i->in[at.starts]].shape.rows - 1;
    const bool kept =
        backward && !one_pass && !i->in[at.numbers] && tt__cuda_attention_bits(&i->attr, &of_q, seqs) > 0;
    /* Sums of dout * out have a pass of their own, or the kernel of dq makes them. */
    const bool sums = backward && (one_pass || q->dtype == TT_F32);
    const double draws = i->attr.dropout > 0 ? pairs * heads * (backward && !one_pass && !kept ? 2 : 1) : 0;
    cost *to = &costs[backward ? ATTENTION_BACKWARD : ATTENTION];
    const double rate = one_pass ? 128e12 : backward ? (wide ? 241e12 : 147e12) : wide ? 215e12 : 174e12;
    add(to, (backward && !one_pass ? 2 : 1) + sums, bytes, flops, rate, 0, 4.3);
    add(to, 0, 0, 0, 1, 14 * draws, 4.3);
    if (kept) { /* a bit for each weight, written and read */
        add(to, 0, pairs * heads / 8 * 2, 0, 1, 0, 4.3);
        add(to, 0, 0, 0, 1, 5 * pairs * heads, 4.3);
    }
    if (sums)
        add(to, 0, bytes_of(t, i->in[0]) + bytes_of(t, i->in[5]) + 4 * (double)q->rows * heads, 0, 1, 0, 4.3);
}

static void count(const tt_tape *t, cost costs[KINDS], int64_t chunk, double length)
{
    memset(costs, 0, KINDS * sizeof *costs);
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__value *x = &t->values[v];
        if (x->storage != TT__INPUT || x->base != v || x->persistent || x->place == TT__NO_PLACE) continue;
        add(&costs[INPUTS], 1, (x->arrival ? 2 : 1) * bytes_of(t, v), 0, 1, 0, x->arrival ? 4.3 : 0.05);
    }
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        double bytes = 0;
        count_sums(t, i, costs);
        for (int j = 0; j < TT__MAX_IN; j++) bytes += bytes_of(t, i->in[j]);
        for (int j = 0; j < TT__MAX_OUT; j++) bytes += bytes_of(t, i->out[j]) * (1 + (i->add >> j & 1));
        switch (i->op) {
        case TT__OP_LINEAR: case TT__OP_LINEAR_DX: case TT__OP_LINEAR_DW:
            count_product(t, i, costs, bytes, k && i[-1].with_next);
            break;
        case TT__OP_QUANTIZE: /* of the history a row, of the largest magnitudes one */
            bytes = bytes_of(t, i->in[0]) * (i->in[1] ? 1 : 2) + bytes_of(t, i->out[0]) +
                    bytes_of(t, i->out[1]);
            add(&costs[ROUNDING], i->in[1] ? 1 : 3, bytes, 0, 1,
                (double)t->values[i->in[0]].shape.rows * (double)t->values[i->in[0]].shape.cols / 8 *
                    rounding_instructions, 4.3);
            break;
        case TT__OP_LINEAR_CROSS_ENTROPY: count_head(t, i, costs, chunk); break;
        case TT__OP_ATTENTION: case TT__OP_ATTENTION_BACKWARD:
            count_attention(t, i, costs, bytes, length);
            break;
        case TT__OP_ACTIVATION: {
            const double elements = (double)t->values[i->out[0]].shape.rows *
                                    (double)t->values[i->out[0]].shape.cols;
            add(&costs[ACTIVATIONS], 1, bytes, 0, 1, elements / 8 * gelu_instructions, 4.3);
            break;
        }
        case TT__OP_LAYERNORM: case TT__OP_RMSNORM: add(&costs[NORMS], 1, bytes, 0, 1, 0, 4.3); break;
        case TT__OP_LAYERNORM_BACKWARD: case TT__OP_RMSNORM_BACKWARD:
            add(&costs[NORMS_BACKWARD], 2, bytes, 0, 1, 0, norm_rate);
            break;
        case TT__OP_ADAM: { /* p, m and v are read and written; tensors share a launch */
            const double elements = bytes_of(t, i->out[0]) /
                                    (double)tt_dtype_bytes(t->values[i->out[0]].shape.dtype);
            const double moved = 2 * (bytes_of(t, i->out[0]) + bytes_of(t, i->out[1]) +
                                      bytes_of(t, i->out[2])) + bytes_of(t, i->in[0]);
            add(&costs[UPDATES], !i->with_next, moved, 0, 1, elements / 8 * adam_instructions, 4.3);
            break;
        }
        case TT__OP_SUM_SQUARES: add(&costs[UPDATES], 2 * !i->with_next, bytes, 0, 1, 0, 4.3); break;
        case TT__OP_EMBEDDING_BACKWARD: case TT__OP_GATHER_ROWS_BACKWARD:
            add(&costs[OTHERS], 12, bytes_of(t, i->in[0]) * 2, 0, 1, 0, 4.3);
            break;
        case TT__OP_EMBEDDING: case TT__OP_GATHER_ROWS:
            add(&costs[OTHERS], 1, bytes_of(t, i->out[0]) * 2, 0, 1, 0, 4.3);
            break;
        default: add(&costs[OTHERS], 1, bytes, 0, 1, 0, 4.3); break;
        }
    }
}

/* ---- products in whole rounds of tiles */

typedef struct product { int op; int32_t shared; double m, n, k; } product; /* shared: what makes it one    */

static double in_rounds(const product *p, bool split)
{
    double best = INFINITY;
    for (int parts = 1; parts <= (split ? 8 : 1); parts++) {
        if (parts > 1 && p->k / parts < 256) break;
        const double rounds = ceil(ceil(p->m / 128) * ceil(p->n / 128) * parts / 132);
        double seconds = rounds * 2 * 128 * 128 * ceil(p->k / parts) / (650e12 / 132) + 1e-6;
        if (parts > 1) seconds += p->m * p->n * 4 * 2 * parts / 4.3e12 + 1e-6;
        if (seconds < best) best = seconds;
    }
    return best;
}

/* The product of instruction i, which shares x (or the gradient of x that it adds to). */
static product product_of(const tt_tape *t, const tt__instr *i)
{
    const tt__shape *a = &t->values[i->in[0]].shape, *b = &t->values[i->in[1]].shape;
    product p = {i->op, i->in[0], (double)a->rows, (double)b->rows, (double)a->cols};
    if (i->op == TT__OP_LINEAR_DX) {
        p.shared = i->out[0];
        p.n = (double)b->cols;
    } else if (i->op == TT__OP_LINEAR_DW) {
        p.shared = i->in[1];
        p.m = (double)a->cols;
        p.n = (double)b->cols;
        p.k = (double)a->rows;
    }
    return p;
}

static void widen(product *p, const product *more)
{
    if (p->op == TT__OP_LINEAR) p->n += more->n;
    else if (p->op == TT__OP_LINEAR_DX) p->k += more->k;
    else p->m += more->m;
}

static void print_rounds(const tt_tape *t)
{
    static const char *const rows[3] = {"as planned", "one of those that share an operand",
                                        "as planned, if no processor were idle in the last round"};
    product *all[2]; /* as planned; joined */
    int n[2] = {0, 0};
    for (int j = 0; j < 2; j++) {
        all[j] = (product *)calloc((size_t)t->n_code + 1, sizeof *all[j]);
        if (!all[j]) exit(1);
    }
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const bool product_op = i->op == TT__OP_LINEAR || i->op == TT__OP_LINEAR_DX ||
            i->op == TT__OP_LINEAR_DW;
        if (!product_op || !i->out[0]) continue;
        const product p = product_of(t, i);
        product *with = NULL;
        for (int j = 0; j < n[1] && !i->attr.act; j++)
            if (all[1][j].op == p.op && all[1][j].shared == p.shared) with = &all[1][j];
        if (k && i[-1].with_next) widen(&all[0][n[0] - 1], &p);
        else all[0][n[0]++] = p;
        if (with) widen(with, &p);
        else all[1][n[1]++] = p;
    }
    printf("\n| products in rounds of tiles of 128 x 128 | products | ms, k whole | ms, k split |\n");
    printf("| --- | ---: | ---: | ---: |\n");
    for (int row = 0; row < 3; row++) {
        double seconds[2] = {0, 0};
        for (int j = 0; j < n[row == 1]; j++) {
            const product *p = &all[row == 1][j];
            for (int split = 0; split < 2; split++)
                seconds[split] += row < 2 ? in_rounds(p, split != 0) : 2 * p->m * p->n * p->k / 650e12 + 1e-6;
        }
        printf("| %s | %d | %.2f | %.2f |\n", rows[row], n[row == 1], seconds[0] * 1e3, seconds[1] * 1e3);
    }
    for (int j = 0; j < 2; j++) free(all[j]);
}

static bool rounds_too;

static const char *precision = "bf16-true", *recompute = "cheap", *matmul = "fp32";

static void print_model(tt_context *ctx, const char *name, const tt_model *m, int seqs, int length,
                        double goal)
{
    tt_train_options o = tt_train_options_default();
    cost costs[KINDS], sum = {0, 0, 0, 0};
    o.schedule.kind = TT_CONSTANT;
    o.compile.device = "cuda";
    o.compile.precision = precision;
    o.compile.recompute = recompute;
    o.compile.matmul = matmul;
    o.max_seqs = seqs;
    o.max_tokens = seqs * length;
    tt_trainer *r = tt_trainer_new(ctx, m, &o);
    if (!r) {
        fprintf(stderr, "%s\n", tt_error(ctx));
        exit(1);
    }
#ifdef TT__CUDA_LOSS_CHUNK
    const int64_t chunk = TT__CUDA_LOSS_CHUNK;
#else
    const int64_t chunk = TT__LOSS_CHUNK;
#endif
    count(tt_trainer_program(r)->built.t, costs, chunk, length);
    int products = 0, fp8 = 0;
    const tt_tape *t = tt_trainer_program(r)->built.t;
    for (int k = 0; k < t->n_code; k++) {
        const bool product = tt__is(&t->code[k], TT__PRODUCT);
        products += product;
        fp8 += product && tt__reads_fp8(t, &t->code[k]);
    }
    printf("\n| %s, %s%s | launches | GB | TFLOP | ms |\n", name, precision,
           strcmp(matmul, "fp8") ? "" : ", fp8");
    printf("| --- | ---: | ---: | ---: | ---: |\n");
    for (int k = 0; k < KINDS; k++) {
        const cost *c = &costs[k];
        if (c->launches > 0)
            printf("| %s | %.0f | %.2f | %.2f | %.2f |\n", kinds[k], c->launches, c->bytes / 1e9,
                   c->flops / 1e12, c->seconds * 1e3);
        sum.launches += c->launches;
        sum.bytes += c->bytes;
        sum.flops += c->flops;
        sum.seconds += c->seconds;
    }
    printf("| sum | %.0f | %.2f | %.2f | %.2f, goal %.1f |\n", sum.launches, sum.bytes / 1e9,
           sum.flops / 1e12, sum.seconds * 1e3, goal);
    printf("\n%.2f GB planned; %d of %d products in fp8\n",
           (double)tt_program_plan(tt_trainer_program(r)).bytes / 1e9, fp8, products);
    if (rounds_too) print_rounds(tt_trainer_program(r)->built.t);
    tt_trainer_free(r);
}

int main(int argc, char **argv)
{
    for (int k = 1; k + 1 < argc; k += 2) {
        if (!strcmp(argv[k], "--precision")) precision = argv[k + 1];
        else if (!strcmp(argv[k], "--recompute")) recompute = argv[k + 1];
        else if (!strcmp(argv[k], "--matmul")) matmul = argv[k + 1];
        else if (!strcmp(argv[k], "--norm")) norm_rate = atof(argv[k + 1]);
        else if (!strcmp(argv[k], "--rounds")) rounds_too = atoi(argv[k + 1]) != 0;
        else if (!strcmp(argv[k], "--one-pass")) one_pass_too = atoi(argv[k + 1]) != 0;
        else if (!strcmp(argv[k], "--wgmma")) wgmma = atoi(argv[k + 1]) != 0;
        else if (strcmp(argv[k], "--instructions") ||
                 sscanf(argv[k + 1], "%lf,%lf,%lf", &gelu_instructions, &slope_instructions,
                        &adam_instructions) != 3) {
            fprintf(stderr, "%s %s? See the top of bench/device_plan.c.\n", argv[k], argv[k + 1]);
            return 2;
        }
    }
    for (int k = 0; k < 3; k++) {
        tt_context *ctx = tt_open(NULL);
        tt_vit v;
        tt_bert b;
        tt_lm l;
        if (!ctx) return 1;
        if (k == 0) {
            const tt_vit_config c = tt_vit_config_default("L/16");
            if (tt_vit_new(ctx, &v, &c) != TT_OK) return 1;
            const tt_model m = tt_vit_classifier(&v);
            print_model(ctx, "ViT-L/16, 64 images", &m, 64, 197, 47);
            tt_vit_free(&v);
        } else if (k == 1) {
            const tt_bert_config c = tt_bert_config_default(true);
            if (tt_bert_new(ctx, &b, &c) != TT_OK) return 1;
            const tt_model m = tt_bert_classifier(&b);
            print_model(ctx, "DistilBERT-base, 12 x 512 tokens", &m, 12, 512, 5.4);
            tt_bert_free(&b);
        } else {
            const tt_lm_config c = tt_lm_config_default("gpt2");
            if (tt_lm_new(ctx, &l, &c) != TT_OK) return 1;
            const tt_model m = tt_lm_model(&l);
            print_model(ctx, "GPT-2 of 124 million, 16 x 1,024 tokens", &m, 16, 1024, 30);
            tt_lm_free(&l);
        }
        tt_close(ctx);
    }
    return 0;
}
