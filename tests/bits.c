/* Trains tiny models and prints a line for each case: hashes of losses, norms, parameters and optimizer state
   after some steps, and the bytes of the plan. tests/bits.sh compiles this file with two versions of
   tinytrain.h and compares the lines, so this file uses only functions that the public API of both versions
   has.
   
       bits [--kind cpu|cuda] [--every N] [--steps N] [--list] [--tensors] [PATTERN...]
   
   --every N runs only each N-th case; --tensors adds a line for each tensor. The environment variables
   TINYTRAIN_ISA and TINYTRAIN_BF16 choose the instruction set; for one that the CPU lacks the output is
   "absent". */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#define TT__FP8_FROM 0 /* small products use fp8, too */
#include "tinytrain.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define COUNT(x) ((int)(sizeof(x) / sizeof *(x)))
#define IMAGE 32
#define PATCH 8
#define VOCAB 61
#define POSITIONS 24
#define CLASSES 3
#define MAX_SEQS 5
#define MAX_ROWS (MAX_SEQS * POSITIONS)

static void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "bits: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(2);
}

/* ----------------------------------------------------------------------------------------------- versions */

/* The tt_compile_options in tt_train_options. Older versions have the fields in tt_train_options itself;
   tests/bits.sh defines HAS_COMPILE for newer versions. */
#ifdef HAS_COMPILE
#define COMPILE(o) (o).compile
#else
#define COMPILE(o) (o)
#endif

/* Saves the state of a trainer, such as parameters and optimizer state, in one safetensors file. */
static tt_status save_state(tt_trainer *t, const char *path)
{
    tt_progress progress;
    memset(&progress, 0, sizeof progress);
    return tt_trainer_save(t, path, &progress);
}

/* Returns whether a tensor of a saved state is a parameter or optimizer state. The tensors tinytrain.*
   describe the run. */
static bool is_tensor_of_state(const tt_tensor_info *info)
{
    return strncmp(info->name, "tinytrain.", 10) != 0;
}

/* -------------------------------------------------------------------------------------------------- cases */

typedef enum kind_of_model { BERT, DISTILBERT, MINILM, VIT, POOLED, OWN, MODELS } kind_of_model;
static const char *const model_names[MODELS] = {"bert", "distilbert", "minilm", "vit", "pooled", "own"};

typedef struct precision { const char *name, *precision, *matmul, *residual; bool only_cuda; } precision;
static const precision precisions[] = {
    {"32-true", "32-true", "fp32", NULL, false},          {"tf32", "32-true", "tf32", NULL, false},
    {"bf16-mixed", "bf16-mixed", "fp32", NULL, false},    {"16-mixed", "16-mixed", "fp32", NULL, false},
    {"bf16-true", "bf16-true", "fp32", NULL, false},      {"16-true", "16-true", "fp32", NULL, false},
    {"bf16-residual", "bf16-mixed", "fp32", "f32", false}, {"fp8", "bf16-mixed", "fp8", NULL, true},
};
static const char *const recomputes[] = {"none", "cheap", "attention", "blocks"};
static const int micro_batches[] = {1, 3};
static const float dropouts[] = {0, 0.1f};
static const char *const optimizer_names[] = {"sgd", "nesterov", "adam", "adamw"};

typedef struct one_case {
    kind_of_model model;
    const precision *precision;
    const char *recompute;
    int micro;
    float dropout;
    int optimizer;
    bool overflow; /* the loss scale is so large that the first steps are skipped */
    char name[128];
} one_case;

static tt_optimizer_options optimizer_of(const one_case *c)
{
    tt_optimizer_options o = tt_optimizer_options_default();
    o.kind = c->optimizer < 2 ? TT_SGD : c->optimizer == 2 ? TT_ADAM : TT_ADAMW;
    o.momentum = 0.9f;
    o.nesterov = c->optimizer == 1;
    o.weight_decay = 0.02f;
    o.clip_norm = 0.5f;
    return o;
}

static float lr_of(const one_case *c, int step)
{
    return (c->optimizer < 2 ? 0.05f : 2e-3f) / (float)(1 + step / 4);
}

/* ------------------------------------------------------------------------------------------------ batches */

typedef struct numbers {
    int seqs, rows;
    int32_t ids[MAX_ROWS], positions[MAX_ROWS], types[MAX_ROWS], starts[MAX_SEQS + 1], labels[MAX_ROWS];
    float weights[MAX_ROWS], features[MAX_ROWS * 24];
    uint8_t pixels[MAX_SEQS * IMAGE * IMAGE * 3];
} numbers;

static uint32_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* Makes micro-batch k of a run: 2 to 5 sequences of 1 to 24 tokens, so that the number of rows is often
   odd. */
static void make_batch(numbers *n, int k)
{
    uint64_t random = 1234567u + 977u * (uint64_t)k;
    memset(n, 0, sizeof *n);
    n->seqs = 2 + (int)(next_random(&random) % (MAX_SEQS - 1));
    for (int s = 0; s < n->seqs; s++) {
        int length = 1 + (int)(next_random(&random) % POSITIONS);
        for (int i = 0; i < length; i++) {
            n->ids[n->rows] = (int32_t)(next_random(&random) % VOCAB);
            n->types[n->rows] = (int32_t)(next_random(&random) % 2);
            n->weights[n->rows] = (float)(next_random(&random) % 5) / 4;
            n->positions[n->rows++] = i;
        }
        n->starts[s + 1] = n->rows;
    }
    for (int r = 0; r < n->rows; r++) n->labels[r] = (int32_t)(next_random(&random) % CLASSES);
    for (int i = 0; i < n->rows * 24; i++) n->features[i] = (float)(next_random(&random) % 1000) / 500 - 1;
    for (int i = 0; i < n->seqs * IMAGE * IMAGE * 3; i++) n->pixels[i] = (uint8_t)next_random(&random);
}

/* ------------------------------------------------------------------------------------------------ results */

static uint64_t hash_of(uint64_t hash, const void *bytes, size_t n)
{
    const unsigned char *b = (const unsigned char *)bytes;
    for (size_t i = 0; i < n; i++) hash = (hash ^ b[i]) * 1099511628211u;
    return hash;
}
#define HASH_START 1469598103934665603u

typedef struct results {
    uint64_t losses, norms, evaluation, parameters, state;
    double last_loss;
    int skipped, states;
    size_t plan, bound, init;
} results;

static bool print_tensors;

static void add_stats(results *r, const tt_stats *s)
{
    r->losses = hash_of(r->losses, &s->loss, sizeof s->loss);
    r->losses = hash_of(r->losses, &s->targets, sizeof s->targets);
    r->losses = hash_of(r->losses, &s->correct, sizeof s->correct);
    r->norms = hash_of(r->norms, &s->grad_norm, sizeof s->grad_norm);
    r->norms = hash_of(r->norms, &s->loss_scale, sizeof s->loss_scale);
    r->last_loss = s->loss;
    r->skipped = (int)s->skipped;
}

static void add_parameter(results *r, tt_context *ctx, const tt_param *p, const char *name)
{
    float *values = (float *)malloc((size_t)tt_param_size(p) * sizeof *values);
    if (!values || tt_param_get(p, values) != TT_OK) die("%s: %s: %s", name, tt_param_name(p), tt_error(ctx));
    r->parameters = hash_of(r->parameters, values, (size_t)tt_param_size(p) * sizeof *values);
    if (print_tensors)
        printf("  %s %016" PRIx64 "\n", tt_param_name(p),
               hash_of(HASH_START, values, (size_t)tt_param_size(p) * sizeof *values));
    free(values);
}

/* Adds the hashes of a saved state's tensors, whatever their order and names. */
static void add_state(results *r, tt_context *ctx, const char *path)
{
    tt_safetensors *file = tt_safetensors_open(ctx, path);
    if (!file) die("%s", tt_error(ctx));
    for (int k = 0; k < tt_safetensors_count(file); k++) {
        const tt_tensor_info *info = tt_safetensors_info(file, k);
        if (!is_tensor_of_state(info)) continue;
        char *bytes = (char *)malloc(info->bytes + 1);
        if (!bytes) die("no memory");
        if (tt_safetensors_read(file, k, 0, info->bytes, bytes) != TT_OK) die("%s", tt_error(ctx));
        uint64_t hash = hash_of(hash_of(HASH_START, info->dtype, strlen(info->dtype)), bytes, info->bytes);
        free(bytes);
        r->state += hash * (hash | 1);
        r->states++;
        if (print_tensors) printf("  state %s %s %016" PRIx64 "\n", info->name, info->dtype, hash);
    }
    tt_safetensors_close(file);
}

/* ----------------------------------------------------------------------------------------- with a trainer */

static bool no_sync(void *user, void *file) { (void)user; (void)file; return true; }
static void no_log(void *user, tt_log_level level, const char *id, const char *message)
{
    (void)user; (void)level; (void)id; (void)message;
}

static tt_context *open_context(void)
{
    tt_context_options o = tt_context_options_default();
    o.threads = 2;
    o.seed = 42;
    o.logger.log = no_log;
    o.files.sync = no_sync; /* the program reads a saved state at once, so no sync to disk is needed */
    return tt_open(&o);
}

/* Returns the config of BERT, DistilBERT or MiniLM. A head of BERT has 16 columns, a head of the other two
   models has 32. MiniLM has no pooler. */
static tt_bert_config config_of(const one_case *c)
{
    bool distil = c->model == DISTILBERT, minilm = c->model == MINILM || c->model == POOLED;
    tt_bert_config b = tt_bert_config_default(distil ? TT_DISTILBERT : TT_BERT);
    b.vocab_size = VOCAB;
    b.max_positions = POSITIONS;
    b.hidden_size = distil || minilm ? 64 : 48;
    b.heads = distil || minilm ? 2 : 3;
    b.layers = distil ? 3 : 2;
    b.intermediate_size = minilm ? 256 : distil ? 128 : 80;
    b.pooler = !minilm;
    b.classes = CLASSES;
    if (minilm) b.activation = "gelu_new";
    b.dropout = b.attention_dropout = b.classifier_dropout = c->dropout;
    return b;
}

static tt_vit_config vit_config_of(const one_case *c)
{
    tt_vit_config v = tt_vit_config_default("Ti/16");
    v.image_size = IMAGE;
    v.patch_size = PATCH;
    v.hidden_size = 48;
    v.heads = 3;
    v.layers = 3;
    v.intermediate_size = 96;
    v.classes = CLASSES;
    v.dropout = v.attention_dropout = c->dropout;
    return v;
}

static tt_param **params_of_bert(const tt_bert *m, int *n)
{
    static tt_param *all[256];
    *n = 0;
    tt_param *ends[] = {m->word, m->position, m->type, m->norm_w, m->norm_b, m->head_w, m->head_b,
                        m->classifier_w, m->classifier_b};
    for (int k = 0; k < COUNT(ends); k++) if (ends[k]) all[(*n)++] = ends[k];
    for (int l = 0; l < m->config.layers; l++) {
        tt_bert_layer *y = &m->layer[l];
        tt_param *of[] = {y->q_w, y->q_b, y->k_w, y->k_b, y->v_w, y->v_b, y->attention_w, y->attention_b,
                          y->attention_norm_w, y->attention_norm_b, y->up_w, y->up_b, y->down_w, y->down_b,
                          y->output_norm_w, y->output_norm_b};
        for (int k = 0; k < COUNT(of); k++) all[(*n)++] = of[k];
    }
    return all;
}

static tt_param **params_of_vit(const tt_vit *m, int *n)
{
    static tt_param *all[256];
    *n = 0;
    tt_param *ends[] = {m->patch_w, m->patch_b, m->token, m->position, m->norm_w, m->norm_b, m->classifier_w,
                        m->classifier_b};
    for (int k = 0; k < COUNT(ends); k++) all[(*n)++] = ends[k];
    for (int l = 0; l < m->config.layers; l++) {
        tt_vit_layer *y = &m->layer[l];
        tt_param *of[] = {y->before_w, y->before_b, y->q_w, y->q_b, y->k_w, y->k_b, y->v_w, y->v_b,
                          y->attention_w, y->attention_b, y->after_w, y->after_b, y->up_w, y->up_b,
                          y->down_w, y->down_b};
        for (int k = 0; k < COUNT(of); k++) all[(*n)++] = of[k];
    }
    return all;
}

static tt_batch batch_of(const numbers *n, bool images)
{
    tt_batch b;
    memset(&b, 0, sizeof b);
    b.seqs = n->seqs;
    b.labels = n->labels;
    if (images) {
        b.pixels = n->pixels;
        b.image_bytes = IMAGE * IMAGE * 3;
        return b;
    }
    b.rows = n->rows;
    b.ids = n->ids;
    b.positions = n->positions;
    b.types = n->types;
    b.seq_start = n->starts;
    return b;
}

static void train_model(tt_context *ctx, const one_case *c, const char *device, int steps, const char *path,
                        results *r)
{
    tt_train_options o = tt_train_options_default();
    tt_bert_config bc = config_of(c);
    tt_vit_config vc = vit_config_of(c);
    tt_bert bert;
    tt_vit vit;
    tt_stats stats;
    static numbers n;
    const bool images = c->model == VIT;
    memset(&bert, 0, sizeof bert);
    memset(&vit, 0, sizeof vit);
    tt_status status = images ? tt_vit_new(ctx, &vit, &vc) : tt_bert_new(ctx, &bert, &bc);
    if (status != TT_OK) die("%s: %s", c->name, tt_error(ctx));
    o.schedule.kind = TT_LINEAR;
    o.schedule.lr = lr_of(c, 0);
    o.schedule.warmup_steps = 2;
    o.schedule.total_steps = 2 * steps;
    o.label_smoothing = c->micro > 1 ? 0.1f : 0;
    o.max_seqs = MAX_SEQS;
    o.max_tokens = MAX_ROWS;
    COMPILE(o).optimizer = optimizer_of(c);
    COMPILE(o).precision = c->precision->precision;
    COMPILE(o).matmul = c->precision->matmul;
    COMPILE(o).residual = c->precision->residual;
    COMPILE(o).recompute = c->recompute;
    COMPILE(o).device = device;
    COMPILE(o).accumulate = c->micro > 1;
    if (c->overflow) COMPILE(o).loss_scale.init = 1099511627776.0f; /* 2^40 */
    tt_model model = images ? tt_vit_classifier(&vit) : tt_bert_model(&bert);
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) die("%s: %s", c->name, tt_error(ctx));
    for (int step = 0; step < steps; step++)
        for (int k = 0; k < c->micro; k++) {
            make_batch(&n, step * c->micro + k);
            tt_batch b = batch_of(&n, images);
            b.last_of_step = k + 1 == c->micro;
            status = tt_train_batch(t, &b, &stats, NULL);
            if (status != TT_OK) die("%s: step %d: %s", c->name, step, tt_error(ctx));
            add_stats(r, &stats);
        }
    memset(&stats, 0, sizeof stats);
    float probabilities[MAX_SEQS * CLASSES];
    for (int k = 0; k < 2; k++) {
        make_batch(&n, 1000 + k);
        tt_batch b = batch_of(&n, images);
        if (tt_evaluate_batch(t, &b, &stats) != TT_OK) die("%s: evaluation: %s", c->name, tt_error(ctx));
        if (tt_predict(t, &b, probabilities) != TT_OK) die("%s: prediction: %s", c->name, tt_error(ctx));
        size_t bytes = sizeof *probabilities * (size_t)(n.seqs * CLASSES);
        r->evaluation = hash_of(r->evaluation, probabilities, bytes);
    }
    r->evaluation = hash_of(r->evaluation, &stats.loss, sizeof stats.loss);
    r->evaluation = hash_of(r->evaluation, &stats.correct, sizeof stats.correct);
    int count;
    tt_param **all = images ? params_of_vit(&vit, &count) : params_of_bert(&bert, &count);
    for (int k = 0; k < count; k++) add_parameter(r, ctx, all[k], c->name);
    if (save_state(t, path) != TT_OK) die("%s: %s", c->name, tt_error(ctx));
    add_state(r, ctx, path);
    tt_plan plan = tt_program_plan(tt_trainer_program(t));
    r->plan = plan.bytes;
    r->bound = plan.lower_bound_bytes;
    r->init = plan.init_bytes;
    tt_trainer_free(t);
    if (images) tt_vit_free(&vit);
    else tt_bert_free(&bert);
}

/* --------------------------------------------------------------------------------------- recorded by hand */

enum { OWN_PARAMS = 9 };
static void own_params(tt_context *ctx, tt_param *p[OWN_PARAMS])
{
    static const int64_t dims[OWN_PARAMS][2] = {
        {48, 24}, {48, 0}, {48, 48}, {96, 48}, {24, 48}, {24, 0}, {24, 0}, {24, 24}, {24, 24}};
    for (int k = 0; k < OWN_PARAMS; k++) {
        char name[16];
        tt_init normal = {TT_INIT_NORMAL, 0.2f}, ones = {TT_INIT_ONES, 0}, uniform = {TT_INIT_UNIFORM, 0.1f};
        snprintf(name, sizeof name, "own.%d", k);
        tt_init init = k == 5 ? ones : dims[k][1] ? normal : uniform;
        p[k] = tt_param_new(ctx, name, dims[k][1] ? 2 : 1, dims[k], init);
        if (!p[k]) die("%s", tt_error(ctx));
    }
}

/* Records what the other models lack: causal attention whose scale is an option, queries that are also added
   to the keys, keys and values that are views of one value, and a weighted squared error. x: (rows, 24). */
static tt_value own_loss(tt_tape *t, tt_param *const p[OWN_PARAMS], tt_value x, tt_value target,
                         tt_value starts, tt_value weights, float dropout, tt_value *out)
{
    tt_attention_options a = tt_attention_options_default(2);
    a.causal = true;
    a.scale = 0.3f;
    a.dropout = dropout;
    tt_value h = tt_silu(t, tt_linear(t, x, p[0], p[1])), qk = tt_linear(t, h, p[2], NULL);
    tt_value kv = tt_linear(t, h, p[3], NULL);
    tt_value k = tt_slice(t, kv, 0, 48), v = tt_slice(t, kv, 48, 48);
    h = tt_linear(t, tt_attention(t, qk, tt_add(t, qk, k), v, starts, &a), p[4], NULL);
    tt_block_end(t, h);
    h = tt_layernorm(t, tt_add(t, x, tt_dropout(t, h, dropout)), p[5], p[6], 1e-5f);
    tt_value g = tt_gelu_tanh(t, tt_linear(t, h, p[7], NULL));
    tt_block_end(t, g);
    h = tt_add(t, tt_scale(t, g, 0.5f), tt_tanh(t, tt_linear(t, tt_relu(t, h), p[8], NULL)));
    *out = h;
    tt_output(t, h);
    return tt_mean_squared_error(t, h, target, weights);
}

static void set(tt_program *p, tt_context *ctx, tt_value v, const void *data, int rows)
{
    if (tt_set(p, v, data, rows) != TT_OK) die("%s", tt_error(ctx));
}

/* Trains a case with tt_step or micro-steps instead of a trainer. The model POOLED is MiniLM's encoder with
   the mean of each sequence and a weighted loss; the model OWN is the tape that own_loss records. */
static void train_by_hand(tt_context *ctx, const one_case *c, const char *device, int steps, results *r)
{
    const bool pooled = c->model == POOLED;
    tt_compile_options o = tt_compile_options_default();
    tt_cross_entropy_options ce = tt_cross_entropy_options_default();
    tt_bert_config bc = config_of(c);
    tt_bert m;
    tt_param *own[OWN_PARAMS], **all = own;
    tt_inputs in;
    tt_stats stats;
    static numbers n;
    int count = OWN_PARAMS;
    memset(&in, 0, sizeof in);
    memset(&m, 0, sizeof m);
    tt_tape *t = tt_tape_new(ctx);
    int64_t rows = tt_axis(t, "tokens", MAX_ROWS), seqs = tt_axis(t, "seqs", MAX_SEQS);
    tt_value x = {0}, target, weights, loss, out;
    in.seq_start = tt_seq_start(t, "starts", seqs);
    if (pooled) {
        if (tt_bert_new(ctx, &m, &bc) != TT_OK) die("%s", tt_error(ctx));
        all = params_of_bert(&m, &count);
        in.positions = tt_input(t, "positions", TT_I32, rows, 1);
        in.ids = tt_input(t, "ids", TT_I32, rows, 1);
        in.types = tt_input(t, "types", TT_I32, rows, 1);
        target = tt_input(t, "labels", TT_I32, seqs, 1);
        weights = tt_input(t, "weights", TT_F32, seqs, 1);
        tt_value mean = tt_mean_pool(t, tt_bert_encode(&m, t, &in), in.seq_start);
        ce.weights = weights;
        ce.label_smoothing = 0.05f;
        out = tt_linear(t, mean, m.classifier_w, m.classifier_b);
        tt_output(t, out);
        loss = tt_cross_entropy(t, out, target, &ce);
    } else {
        own_params(ctx, own);
        x = tt_input(t, "x", TT_F32, rows, 24);
        target = tt_input(t, "target", TT_F32, rows, 24);
        weights = tt_input(t, "weights", TT_F32, rows, 1);
        loss = own_loss(t, own, x, target, in.seq_start, weights, c->dropout, &out);
    }
    o.precision = c->precision->precision;
    o.matmul = c->precision->matmul;
    o.residual = c->precision->residual;
    o.recompute = c->recompute;
    o.accumulate = c->micro > 1;
    o.optimizer = optimizer_of(c);
    o.device = device;
    if (c->overflow) o.loss_scale.init = 1099511627776.0f; /* 2^40 */
    tt_program *p = tt_compile(t, loss, &o);
    if (!p) die("%s: %s", c->name, tt_error(ctx));
    for (int step = 0; step < steps; step++)
        for (int k = 0; k < c->micro; k++) {
            make_batch(&n, step * c->micro + k);
            set(p, ctx, in.seq_start, n.starts, n.seqs + 1);
            if (pooled) {
                set(p, ctx, in.ids, n.ids, n.rows);
                set(p, ctx, in.positions, n.positions, n.rows);
                set(p, ctx, in.types, n.types, n.rows);
                set(p, ctx, target, n.labels, n.seqs);
                n.weights[0] = 1; /* so at least one target counts */
                set(p, ctx, weights, n.weights, n.seqs);
            } else {
                set(p, ctx, x, n.features, n.rows);
                set(p, ctx, target, n.features + 5, n.rows - 1 > 0 ? n.rows : 1);
                n.weights[0] = 1;
                set(p, ctx, weights, n.weights, n.rows);
            }
            bool parts = c->micro > 1;
            tt_status status = parts ? tt_micro_step(p, &stats) : tt_step(p, lr_of(c, step), &stats);
            if (status != TT_OK) die("%s: step %d: %s", c->name, step, tt_error(ctx));
            add_stats(r, &stats);
            float values[MAX_ROWS * 24];
            int size = pooled ? n.seqs * CLASSES : n.rows * 24;
            if (tt_get(p, out, values, (size_t)size) != TT_OK) die("%s: %s", c->name, tt_error(ctx));
            r->evaluation = hash_of(r->evaluation, values, sizeof *values * (size_t)size);
            if (!parts || k + 1 < c->micro) continue;
            static float gradient[VOCAB * 64];
            tt_param *of = pooled ? m.word : own[3];
            if (tt_get_gradient(p, of, gradient) != TT_OK) die("%s: %s", c->name, tt_error(ctx));
            r->evaluation = hash_of(r->evaluation, gradient, sizeof *gradient * (size_t)tt_param_size(of));
            if (tt_update(p, lr_of(c, step), &stats) != TT_OK) die("%s: %s", c->name, tt_error(ctx));
            add_stats(r, &stats);
        }
    for (int k = 0; k < count; k++) add_parameter(r, ctx, all[k], c->name);
    tt_plan plan = tt_program_plan(p);
    r->plan = plan.bytes;
    r->bound = plan.lower_bound_bytes;
    r->init = plan.init_bytes;
    tt_program_free(p);
    tt_tape_free(t);
    if (pooled) tt_bert_free(&m);
}

/* --------------------------------------------------------------------------------------------------- main */

/* Matches a name with a pattern in which '*' stands for any characters. */
static bool matches(const char *pattern, const char *name)
{
    if (*pattern == '*') return matches(pattern + 1, name) || (*name && matches(pattern, name + 1));
    return *pattern == *name && (!*name || matches(pattern + 1, name + 1));
}

static void run(const one_case *c, const char *kind, int steps, const char *path)
{
    tt_context *ctx = open_context();
    results r;
    if (!ctx) die("no context");
    memset(&r, 0, sizeof r);
    r.losses = r.norms = r.evaluation = r.parameters = HASH_START;
    if (c->model == POOLED || c->model == OWN) train_by_hand(ctx, c, kind, steps, &r);
    else train_model(ctx, c, kind, steps, path, &r);
    printf("%s plan=%zu bound=%zu init=%zu", c->name, r.plan, r.bound, r.init);
    printf(" losses=%016" PRIx64 " norms=%016" PRIx64, r.losses, r.norms);
    printf(" outputs=%016" PRIx64 " parameters=%016" PRIx64, r.evaluation, r.parameters);
    printf(" state=%d:%016" PRIx64, r.states, r.state);
    printf(" last=%.6g skipped=%d\n", r.last_loss, r.skipped);
    fflush(stdout);
    tt_close(ctx);
}

int main(int argc, char **argv)
{
    const char *kind = "cpu", **patterns = (const char **)calloc((size_t)argc, sizeof *patterns);
    int every = 1, steps = 20, n_patterns = 0, number = 0;
    bool list = false;
    char folder[] = "/tmp/tinytrain_bits.XXXXXX", path[64];
    if (!patterns) die("no memory");
    for (int k = 1; k < argc; k++) {
        if (strcmp(argv[k], "--kind") == 0 && k + 1 < argc) kind = argv[++k];
        else if (strcmp(argv[k], "--every") == 0 && k + 1 < argc) every = atoi(argv[++k]);
        else if (strcmp(argv[k], "--steps") == 0 && k + 1 < argc) steps = atoi(argv[++k]);
        else if (strcmp(argv[k], "--list") == 0) list = true;
        else if (strcmp(argv[k], "--tensors") == 0) print_tensors = true;
        else if (argv[k][0] == '-') die("unknown option %s", argv[k]);
        else patterns[n_patterns++] = argv[k];
    }
    if (every < 1 || steps < 1) die("--every and --steps are at least 1");
    tt_context *ctx = open_context();
    const bool there = ctx && tt_device_text(ctx, kind, NULL, 0) == TT_OK;
    if (!there) {
        printf("absent\n");
        tt_close(ctx);
        return 0;
    }
    tt_close(ctx);
    if (!mkdtemp(folder)) die("cannot make a folder in /tmp");
    snprintf(path, sizeof path, "%s/state.safetensors", folder);
    const int total = MODELS * COUNT(precisions) * COUNT(recomputes) * 2 * 2 * COUNT(optimizer_names) * 2;
    for (int k = 0; k < total; k++) {
        one_case c;
        int rest = k;
        memset(&c, 0, sizeof c);
#define PICK(n) ((rest /= picked), (picked = (n)), rest % picked)
        int picked = 1;
        c.model = (kind_of_model)PICK(MODELS);
        c.precision = &precisions[PICK(COUNT(precisions))];
        c.recompute = recomputes[PICK(COUNT(recomputes))];
        c.micro = micro_batches[PICK(2)];
        c.dropout = dropouts[PICK(2)];
        c.optimizer = PICK(COUNT(optimizer_names));
        c.overflow = PICK(2) != 0;
#undef PICK
        bool scaled = strncmp(c.precision->precision, "16-", 3) == 0;
        /* Without a loss scale there is no overflow to test. */
        if (c.overflow && (!scaled || c.optimizer != 3)) continue;
        if (c.precision->only_cuda && strcmp(kind, "cuda") != 0) continue;
        snprintf(c.name, sizeof c.name, "%s/%s/%s/%d/%s/%s%s", model_names[c.model],
                 c.precision->name, c.recompute, c.micro, c.dropout > 0 ? "dropout" : "plain",
                 optimizer_names[c.optimizer], c.overflow ? "/overflow" : "");
        bool wanted = n_patterns == 0;
        for (int i = 0; i < n_patterns; i++) wanted = wanted || matches(patterns[i], c.name);
        if (!wanted || number++ % every != 0) continue;
        if (list) printf("%s\n", c.name);
        else run(&c, kind, steps, path);
    }
    unlink(path);
    rmdir(folder);
    free(patterns);
    return 0;
}
