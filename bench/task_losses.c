/* Trains an encoder on the rows of a table, in the order of the table, and prints the loss of each step on a
   line of its own:

       build/task_losses FOLDER TABLE [PARTS]

   FOLDER is a Hugging Face folder, whose files say the task. PARTS is the number of micro-batches of a step
   (default: 1); with PARTS, embeddings have the negatives of the whole step. No dropout, steps of 16 rows,
   one pass over the table, AdamW with the defaults of tt_train_options and lr 5e-4, a linear schedule with a
   tenth of the steps as warm-up. bench/task_losses.py writes folder and table, and does the same in
   PyTorch. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"

static int train(tt_context *ctx, tt_bert *m, tt_loader *l, bool parts)
{
    const tt_model model = tt_bert_model(m);
    tt_train_options o = tt_train_options_default();
    tt_train_options_make_room(&o, tt_loader_source(l), NULL);
    o.schedule.lr = 5e-4f;
    o.schedule.total_steps = tt_loader_steps(l);
    o.schedule.warmup_steps = o.schedule.total_steps / 10;
    if (parts && m->config.task == TT_TASK_EMBED) o.step_seqs = 2 * 16;
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    tt_batch b;
    tt_stats stats;
    bool updated;
    tt_status status = t ? TT_OK : TT_ERR_ARGUMENT;
    while (status == TT_OK && tt_loader_next(l, &b)) {
        status = tt_train_batch(t, &b, &stats, &updated);
        if (status == TT_OK && updated) printf("%.9g\n", stats.loss);
    }
    if (status == TT_OK) status = tt_loader_status(l);
    tt_trainer_free(t);
    return status != TT_OK;
}

int main(int argc, char **argv)
{
    if (argc != 3 && argc != 4) return fprintf(stderr, "usage: task_losses FOLDER TABLE [PARTS]\n"), 2;
    tt_bert m = {0};
    tt_dataset *d = NULL;
    tt_loader *l = NULL;
    tt_context *ctx = tt_open(NULL);
    if (!ctx) return 1;
    tt_tokenizer *k = tt_tokenizer_load(ctx, argv[1]);
    bool ok = k && tt_bert_load(ctx, &m, argv[1], 0) == TT_OK;
    if (ok) {
        tt_table_options table = tt_table_options_default();
        table.task = m.config.task;
        d = tt_dataset_table(ctx, argv[2], NULL, NULL, 0, &table);
        ok = d && tt_bert_name_classes(&m, d) == TT_OK;
    }
    if (ok) {
        tt_loader_options rows = tt_loader_options_default();
        rows.max_length = m.config.max_positions;
        rows.shuffle = false;
        rows.accumulate = argc > 3 ? atoi(argv[3]) : 1;
        l = tt_loader_new(ctx, d, k, &rows);
        m.config.dropout = m.config.attention_dropout = m.config.classifier_dropout = 0;
        ok = l && train(ctx, &m, l, argc > 3) == 0;
    }
    if (!ok) fprintf(stderr, "task_losses: %s\n", tt_error(ctx));
    tt_loader_free(l), tt_dataset_free(d), tt_bert_free(&m), tt_tokenizer_free(k), tt_close(ctx);
    return !ok;
}
