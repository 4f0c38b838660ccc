/* Pretrains a small BERT on the texts of a table, with masked tokens and without dropout. Writes the folder
   that the training starts from, and a line of JSON for each step: ids after masking, the first row of each
   text, the masked rows and their targets, and the loss. bench/masked_losses.py trains transformers'
   BertForMaskedLM on the same batches, from the same folder:

       build/masked_losses start/ examples/data/reviews.tsv examples/data/vocab.txt 200 > masked.jsonl
       python bench/masked_losses.py start/ masked.jsonl

   AdamW 5e-4, decay 0.01 (not on biases and norms), linear schedule with a tenth of the steps as warm-up,
   clipping 1.0. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"

static int fail(tt_context *ctx)
{
    fprintf(stderr, "masked_losses: %s\n", tt_error(ctx));
    return 1;
}

static void list(const char *name, const int32_t *x, int64_t n)
{
    printf("\"%s\": [", name);
    for (int64_t k = 0; k < n; k++) printf("%s%d", k ? ", " : "", (int)x[k]);
    printf("], ");
}

int main(int argc, char **argv)
{
    if (argc < 5) return fprintf(stderr, "usage: masked_losses START TABLE VOCAB STEPS\n"), 2;
    const int steps = atoi(argv[4]);
    tt_context *ctx = tt_open(NULL);
    if (!ctx) return 1;
    tt_table_options columns = tt_table_options_default();
    columns.task = TT_TASK_MASKED_LM;
    tt_tokenizer *k = tt_tokenizer_open(ctx, argv[3], true);
    tt_dataset *d = tt_dataset_table(ctx, argv[2], NULL, NULL, 0, &columns);
    tt_loader_options batches = tt_loader_options_default();
    batches.max_length = 128;
    batches.whole_words = true;
    tt_loader *l = tt_loader_new(ctx, d, k, &batches);
    if (!l) return fail(ctx);

    tt_bert m;
    tt_bert_config c = tt_bert_config_default(TT_BERT);
    c.task = TT_TASK_MASKED_LM;
    c.vocab_size = tt_tokenizer_size(k);
    c.layers = 2;
    c.hidden_size = 128;
    c.heads = 4;
    c.intermediate_size = 512;
    c.max_positions = 128;
    if (tt_bert_new(ctx, &m, &c) != TT_OK || tt_bert_save(&m, argv[1]) != TT_OK) return fail(ctx);
    m.config.dropout = m.config.attention_dropout = 0;
    const tt_model model = tt_bert_model(&m);
    tt_train_options o = tt_train_options_default();
    o.schedule.lr = 5e-4f;
    o.schedule.total_steps = steps;
    o.schedule.warmup_steps = steps / 10;
    tt_train_options_make_room(&o, tt_loader_source(l), NULL);
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) return fail(ctx);
    tt_batch b;
    tt_stats stats;
    for (int step = 0, epoch = 0; step < steps; step++) {
        if (!tt_loader_next(l, &b)) {
            if (tt_loader_seek(l, ++epoch, 0) != TT_OK || !tt_loader_next(l, &b)) return fail(ctx);
        }
        if (tt_train_batch(t, &b, &stats, NULL) != TT_OK) return fail(ctx);
        printf("{");
        list("ids", b.ids, b.rows);
        list("start", b.seq_start, b.seqs + 1);
        list("masked", (const int32_t *)b.arrays[0].data, b.arrays[0].rows);
        list("targets", (const int32_t *)b.arrays[1].data, b.arrays[1].rows);
        printf("\"loss\": %.9g}\n", stats.loss);
    }
    tt_trainer_free(t);
    tt_bert_free(&m);
    tt_loader_free(l);
    tt_dataset_free(d);
    tt_tokenizer_free(k);
    tt_close(ctx);
    return 0;
}
