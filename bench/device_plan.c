/* Forecasts the time of a training step on a GPU from its plan: launches, bytes and FLOPs of each kind of
   work, and the time that they take at measured rates. No GPU is needed: programs are compiled for "cuda" and
   never run. The models are ViT-L/16 on 64 images, DistilBERT-base on 12 x 512 tokens and GPT-2 of 124
   million parameters on 16 x 1,024 tokens, with AdamW and clipping. Options: --precision (default
   bf16-true), --recompute (default cheap), --matmul (fp32, the default, or fp8) and --no-dropout.

   The rates are those of an H200 with 16-bit operands, read from timelines of whole steps
   (bench/results/NOTES.md). The time of a kind of work is the time of its bytes or of its FLOPs, whichever is
   longer, plus the microseconds per launch of the table: the start and end of a kernel and the gap to the
   next. Bytes count each operand and each result once. FLOPs of attention are those of whole tiles of 64
   queries and 64 keys. Launches are those that the CUDA backend makes for an instruction; a gradient of a
   table, whose launches depend on the ids, counts as 6. The gap between two steps is not counted. */
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"

enum {
    PRODUCTS, ANY_PRODUCTS, VOCABULARY, FP8_PRODUCTS, BIASES, ATTENTION, ATTENTION_BACKWARD, ACTIVATIONS,
    NORMS, NORMS_BACKWARD, UPDATES, INPUTS, ROUNDING, OTHERS, KINDS
};

/* The rates of a kind of work: TB/s, TFLOP/s (0: FLOPs do not count), and microseconds per launch. */
typedef struct rate { const char *name; double bytes, flops, launch; } rate;
static const rate rates[KINDS] = {
    {"products", 4.2, 715, 5}, {"products of unlike dtypes", 4.2, 10, 5},
    {"products with a vocabulary", 4.2, 640, 5}, {"products in fp8", 4.2, 1300, 5},
    {"bias gradients", 4.2, 0, 2.8}, {"attention", 4.2, 235, 1}, {"attention backward", 3.7, 235, 1},
    {"GELU and its slope", 3.8, 0, 1}, {"norms", 3.5, 0, 1}, {"norms backward", 3.7, 0, 1.5},
    {"norm of gradients and AdamW", 4.2, 0, 1}, {"inputs", 4.2, 0, 2}, {"rounding to fp8", 3.4, 0, 1},
    {"the rest", 3.4, 0, 1}};
/* Microseconds that a million random draws of attention's dropout take. */
static const double draws_forward = 0.35, draws_backward = 0.5;

typedef struct cost { double launches, bytes, flops, seconds; } cost;

static double bytes_of(const tt_tape *t, int32_t id)
{
    const tt__shape *s = &t->values[id].shape;
    return id ? (double)s->rows * (double)s->cols * (double)tt_dtype_bytes(s->dtype) : 0;
}

static void add(cost *costs, int kind, double launches, double bytes, double flops)
{
    const rate *r = &rates[kind];
    const double by_bytes = bytes / (r->bytes * 1e12);
    const double by_flops = r->flops > 0 ? flops / (r->flops * 1e12) : 0;
    cost *to = &costs[kind];
    to->launches += launches;
    to->bytes += bytes;
    to->flops += flops;
    to->seconds += fmax(by_bytes, by_flops) + launches * r->launch * 1e-6;
}

/* Counts the launches of column sums. The kernel that writes a gradient also writes partial sums of columns,
   one for each group of rows. One more launch adds up the partial sums. A norm needs no additional launch,
   because the launch that adds up weight gradients also adds up the partial sums. */
static void count_sums(const tt_tape *t, const tt__instr *i, cost *costs)
{
    const bool norm = i->op == TT__OP_LAYERNORM_BACKWARD || i->op == TT__OP_RMSNORM_BACKWARD;
    double launches = norm ? 0 : 1;
    for (int o = 0; o < tt__summed(i); o++) {
        if (!tt__column_sums(i, o)) continue;
        add(costs, BIASES, launches, bytes_of(t, i->out[tt__column_sums(i, o)]), 0);
        launches = 0;
    }
}

/* Counts a matrix product. joined: the product shares a launch with the product before, so that the launch
   reads x only once. */
static void count_product(const tt_tape *t, const tt__instr *i, cost *costs, double bytes, bool joined)
{
    const bool sums = i->op == TT__OP_LINEAR_DW; /* `dw = dy^T x`, of shape (out, in), is a sum over rows */
    const tt__shape *a = &t->values[i->in[0]].shape, *b = &t->values[i->in[1]].shape;
    const bool fp8 = tt__reads_fp8(t, i), alike = a->dtype == b->dtype;
    const double out = (double)(sums ? b->cols : i->op == TT__OP_LINEAR ? b->rows : b->cols);
    const int32_t to = i->out[0];
    if (joined) bytes -= bytes_of(t, i->in[tt__shared_role(i)]);
    if (to)
        add(costs, fp8 ? FP8_PRODUCTS : alike ? PRODUCTS : ANY_PRODUCTS, !joined, bytes,
            2 * (double)a->rows * (double)a->cols * out);
    if (sums && i->out[1]) add(costs, BIASES, to ? 1 : 2, bytes_of(t, i->in[0]), 0);
    if (sums || i->attr.act == TT__ACT_NONE) return;
    /* GELU by tanh in a product's epilogue needs no launch, but slows the product by the time of the bytes
       that a separate kernel would move. */
    const bool slope = i->op == TT__OP_LINEAR_DX, epilogue = !slope && i->attr.act == TT__ACT_GELU_TANH;
    add(costs, ACTIVATIONS, !epilogue, (slope ? 3 : 2) * bytes_of(t, to), 0);
}

/* Counts the fused loss. For each chunk of rows, kernels compute the logits in f32, the loss with the
   gradient of the logits, and dx. One more product adds the chunk's part to dw, in f32. */
static void count_head(const tt_tape *t, const tt__instr *i, cost *costs)
{
    const tt__shape *x = &t->values[i->in[0]].shape, *w = &t->values[i->in[3]].shape;
    const double rows = (double)x->rows, chunks = ceil(rows / TT__CUDA_LOSS_CHUNK);
    const double logits = rows * (double)w->rows, half = (double)tt_dtype_bytes(x->dtype);
    for (int k = 0; k < 3; k++)
        if (k == 0 || i->out[k == 1 ? 1 : 3]) add(costs, VOCABULARY, chunks, 0, 2 * logits * (double)w->cols);
    add(costs, OTHERS, chunks + 2, logits * (4 + half), 0);
}

static void count_attention(const tt_tape *t, const tt__instr *i, cost *costs, double bytes, double length)
{
    const bool backward = i->op == TT__OP_ATTENTION_BACKWARD;
    const tt__shape *q = &t->values[i->in[backward]].shape;
    const tt__mat of_q = {NULL, q->dtype, q->rows, q->cols, q->cols};
    const double tiles = ceil(length / 64), seqs = (double)q->rows / length;
    const double pairs = 4096 * seqs * (i->attr.causal ? tiles * (tiles + 1) / 2 : tiles * tiles);
    const double draws = i->attr.dropout > 0 ? pairs * i->attr.heads : 0;
    const double parts = backward ? (double)tt__cuda_attention_parts(&i->attr, &of_q) : 0;
    const int kind = backward ? ATTENTION_BACKWARD : ATTENTION;
    add(costs, kind, 1, bytes, 4 * pairs * (double)q->cols * (backward ? 2.5 : 1));
    costs[kind].seconds += draws * (backward ? draws_backward : draws_forward) * 1e-12;
    if (!backward) return;
    /* Two more launches: one sums `dout * out` of each row and head; one adds up the parts of dq. */
    add(costs, kind, 1, bytes_of(t, i->in[0]) + bytes_of(t, i->in[5]), 0);
    if (parts > 0) add(costs, kind, 1, parts + bytes_of(t, i->out[0]), 0);
}

static void count(const tt_program *p, cost costs[KINDS], double length)
{
    const tt_tape *t = p->built.t;
    memset(costs, 0, KINDS * sizeof *costs);
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__tape_value *x = &t->values[v];
        if (x->storage != TT__INPUT || x->base != v || x->persistent || x->place == TT__NO_PLACE) continue;
        add(costs, INPUTS, 1, 2 * bytes_of(t, v), 0);
    }
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        /* If one kernel does two instructions, the second does not read the result of the first. */
        const bool second = k > 0 && tt__leads_to_next(p, k - 1);
        double bytes = second ? -bytes_of(t, i->in[0]) : 0;
        count_sums(t, i, costs);
        for (int j = 0; j < TT__MAX_IN; j++) bytes += bytes_of(t, i->in[j]);
        for (int j = 0; j < TT__MAX_OUT; j++) bytes += bytes_of(t, i->out[j]) * (1 + (i->add >> j & 1));
        switch (i->op) {
        case TT__OP_LINEAR: case TT__OP_LINEAR_DX: case TT__OP_LINEAR_DW:
            count_product(t, i, costs, bytes, k && i[-1].with_next);
            break;
        /* without a history of magnitudes the kernels read the operand twice: for its largest magnitude, then
           to round */
        case TT__OP_QUANTIZE:
            add(costs, ROUNDING, i->in[1] ? 1 : 3, bytes_of(t, i->in[0]) * (i->in[1] ? 1 : 2) +
                bytes_of(t, i->out[0]) + bytes_of(t, i->out[1]), 0);
            break;
        case TT__OP_LINEAR_CROSS_ENTROPY: count_head(t, i, costs); break;
        case TT__OP_ATTENTION: case TT__OP_ATTENTION_BACKWARD:
            count_attention(t, i, costs, bytes, length);
            break;
        case TT__OP_ACTIVATION: add(costs, ACTIVATIONS, 1, bytes, 0); break;
        case TT__OP_LAYERNORM: case TT__OP_RMSNORM: add(costs, NORMS, !second, bytes, 0); break;
        case TT__OP_LAYERNORM_BACKWARD: case TT__OP_RMSNORM_BACKWARD:
            add(costs, NORMS_BACKWARD, 2, bytes, 0);
            break;
        case TT__OP_ADAM: /* reads and writes p, m and v; several tensors share a launch */
            add(costs, UPDATES, !i->with_next, 2 * (bytes_of(t, i->out[0]) + bytes_of(t, i->out[1]) +
                bytes_of(t, i->out[2])) + bytes_of(t, i->in[0]), 0);
            break;
        case TT__OP_SUM_SQUARES: add(costs, UPDATES, 2 * !i->with_next, bytes, 0); break;
        case TT__OP_EMBEDDING_BACKWARD: case TT__OP_GATHER_ROWS_BACKWARD:
            add(costs, OTHERS, 6, bytes_of(t, i->in[0]) * 2, 0);
            break;
        case TT__OP_EMBEDDING: case TT__OP_GATHER_ROWS:
            add(costs, OTHERS, 1, bytes_of(t, i->out[0]) * 2, 0);
            break;
        default: { /* dropout before or after a norm runs in the norm's kernel */
            const bool first = tt__leads_to_next(p, k), norm = first || second;
            const bool backward = second && i[-1].op != TT__OP_DROPOUT;
            add(costs, !norm ? OTHERS : backward ? NORMS_BACKWARD : NORMS, !second, bytes, 0);
            break;
        }
        }
    }
}

static const char *precision = "bf16-true", *recompute = "cheap", *matmul = "fp32";
static bool dropout = true;

static void print_model(tt_context *ctx, const char *name, const tt_model *m, int seqs, int length)
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
    const tt_program *p = tt_trainer_program(r);
    count(p, costs, length);
    printf("\n| %s, %s%s%s | launches | GB | TFLOP | ms |\n", name, precision,
           strcmp(matmul, "fp8") ? "" : ", fp8", dropout ? "" : ", no dropout");
    printf("| --- | ---: | ---: | ---: | ---: |\n");
    for (int k = 0; k < KINDS; k++) {
        const cost *c = &costs[k];
        if (c->launches > 0)
            printf("| %s | %.0f | %.2f | %.2f | %.2f |\n", rates[k].name, c->launches, c->bytes / 1e9,
                   c->flops / 1e12, c->seconds * 1e3);
        sum.launches += c->launches;
        sum.bytes += c->bytes;
        sum.flops += c->flops;
        sum.seconds += c->seconds;
    }
    printf("| sum | %.0f | %.2f | %.2f | %.2f |\n", sum.launches, sum.bytes / 1e9, sum.flops / 1e12,
           sum.seconds * 1e3);
    printf("\n%.2f GB planned\n", (double)tt_program_plan(p).bytes / 1e9);
    tt_trainer_free(r);
}

int main(int argc, char **argv)
{
    for (int k = 1; k < argc; k++) {
        const char **to = !strcmp(argv[k], "--precision") ? &precision
            : !strcmp(argv[k], "--recompute") ? &recompute : !strcmp(argv[k], "--matmul") ? &matmul : NULL;
        if (!strcmp(argv[k], "--no-dropout")) dropout = false;
        else if (to && k + 1 < argc) *to = argv[++k];
        else {
            fprintf(stderr, "device_plan: there is no option '%s'; the top of bench/device_plan.c lists all "
                    "options\n", argv[k]);
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
            print_model(ctx, "ViT-L/16, 64 images", &m, 64, 197);
            tt_vit_free(&v);
        } else if (k == 1) {
            tt_bert_config c = tt_bert_config_default(true);
            if (!dropout) c.dropout = c.attention_dropout = c.classifier_dropout = 0;
            if (tt_bert_new(ctx, &b, &c) != TT_OK) return 1;
            const tt_model m = tt_bert_model(&b);
            print_model(ctx, "DistilBERT-base, 12 x 512 tokens", &m, 12, 512);
            tt_bert_free(&b);
        } else {
            tt_lm_config c = tt_lm_config_default("gpt2");
            if (!dropout) c.embedding_dropout = c.dropout = c.attention_dropout = 0;
            if (tt_lm_new(ctx, &l, &c) != TT_OK) return 1;
            const tt_model m = tt_lm_model(&l);
            print_model(ctx, "GPT-2 of 124 million, 16 x 1,024 tokens", &m, 16, 1024);
            tt_lm_free(&l);
        }
        tt_close(ctx);
    }
    return 0;
}
