/* Trains on the batches that bench/minilm_imdb.py --losses wrote, with the same settings, and prints the
   losses as JSON on standard output:

       build/minilm_losses start/ batches.safetensors STEPS [precision [steps of the schedule]] \
           > tinytrain.json

   Dropout off, AdamW 5e-5, decay 0.01 (not on biases and norms), linear schedule with a tenth of the steps as
   warm-up, clipping 1.0. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"

static int fail(tt_context *ctx)
{
    fprintf(stderr, "minilm_losses: %s\n", tt_error(ctx));
    return 1;
}

/* Returns tensor batchB.NAME as int32, and sets *n to the number of its elements. The caller frees the
   tensor. Returns NULL after an error. */
static int32_t *read_tensor(const tt_safetensors *file, int batch, const char *name, int64_t *n)
{
    char full[64];
    snprintf(full, sizeof full, "batch%d.%s", batch, name);
    int k = tt_safetensors_find(file, full);
    if (k < 0) return NULL;
    *n = tt_safetensors_info(file, k)->dims[0];
    int32_t *x = (int32_t *)malloc(sizeof *x * (size_t)*n);
    if (x && tt_safetensors_read_i32(file, k, 0, *n, x) == TT_OK) return x;
    free(x);
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc < 4) return fprintf(stderr, "usage: minilm_losses START BATCHES STEPS [PRECISION [TOTAL]]\n"), 2;
    int steps = atoi(argv[3]);
    tt_context *ctx = tt_open(NULL);
    tt_bert m;
    if (!ctx) return 1;
    tt_safetensors *file = tt_safetensors_open(ctx, argv[2]);
    if (!file || tt_bert_load(ctx, &m, argv[1], 0) != TT_OK) return fail(ctx);
    m.config.dropout = m.config.attention_dropout = m.config.classifier_dropout = 0;
    tt_model model = tt_bert_model(&m);
    tt_train_options o = tt_train_options_default();
    o.schedule.total_steps = argc > 5 ? atoi(argv[5]) : steps;
    o.schedule.warmup_steps = o.schedule.total_steps / 10;
    o.max_seqs = 16;
    o.max_tokens = 8192;
    if (argc > 4) o.compile.precision = argv[4];
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) return fail(ctx);
    printf("{\"losses\": [");
    for (int s = 0; s < steps; s++) {
        int64_t rows, seqs, labels;
        tt_batch b;
        tt_stats stats;
        memset(&b, 0, sizeof b);
        int32_t *ids = read_tensor(file, s, "input_ids", &rows),
                *start = read_tensor(file, s, "seq_start", &seqs),
                *label = read_tensor(file, s, "labels", &labels);
        if (!ids || !start || !label)
            return fprintf(stderr, "minilm_losses: '%s' has no batch %d: ask for fewer steps\n", argv[2],
                           s), 1;
        int32_t *positions = (int32_t *)malloc(sizeof *positions * (size_t)rows),
                *types = (int32_t *)calloc((size_t)rows, sizeof *types);
        if (!positions || !types) return fprintf(stderr, "minilm_losses: out of memory\n"), 1;
        for (int64_t q = 0; q + 1 < seqs; q++)
            for (int r = start[q]; r < start[q + 1]; r++) positions[r] = r - start[q];
        b.seqs = (int)seqs - 1;
        b.rows = (int)rows;
        b.ids = ids;
        b.positions = positions;
        b.types = types;
        b.seq_start = start;
        b.labels = label;
        b.last_of_step = true;
        double began = tt__seconds();
        if (tt_train_batch(t, &b, &stats, NULL) != TT_OK) return fail(ctx);
        printf("%s%.9g", s ? ", " : "", stats.loss);
        fprintf(stderr, "step %d: loss %.6f, gradient norm %.4f, %d tokens, %.2f s\n", s, stats.loss,
                stats.grad_norm, b.rows, tt__seconds() - began);
        free(types);
        free(positions);
        free(label);
        free(start);
        free(ids);
    }
    printf("]}\n");
    tt_trainer_free(t);
    tt_bert_free(&m);
    tt_safetensors_close(file);
    tt_close(ctx);
    return 0;
}
