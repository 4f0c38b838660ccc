/* A training run of a few steps on texts in memory, for the targets that damage the files of a run. */
#ifndef TINYTRAIN_FUZZ_RUN_H
#define TINYTRAIN_FUZZ_RUN_H

#include "fuzz.h"

enum { RUN_WORDS = 8, RUN_WIDTH = 2, RUN_CLASSES = 2 };

typedef struct fuzz_run {
    tt_context *ctx;
    tt_tokenizer *k;
    tt_dataset *d;
    tt_loader *train, *validation;
    tt_param *table, *w, *b; /* shapes (RUN_WORDS, RUN_WIDTH), (RUN_CLASSES, RUN_WIDTH), (RUN_CLASSES) */
    tt_trainer *t;
    bool ready;
} fuzz_run;

/* Records the model: the mean of the words' vectors, and a linear classifier. */
static inline tt_value fuzz__record(const void *self, tt_tape *t, const tt_train_options *o, tt_value *output)
{
    const fuzz_run *r = (const fuzz_run *)self;
    tt_inputs in = tt_text_inputs(t, o);
    *output = tt_linear(t, tt_mean_pool(t, tt_embedding(t, in.ids, r->table), in.seq_start), r->w, r->b);
    return tt_cross_entropy(t, *output, in.labels, NULL);
}

/* Returns the run, which the first call makes, because making a run takes longer than training. Only the
   state and the metrics of the run change. */
static inline fuzz_run *fuzz_run_get(void)
{
    static fuzz_run r;
    static const char vocab[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\ngood\nbad\nfilm\n##s\n";
    static const char texts[] =
        "text,label\ngood films,pos\nbad film,neg\nfilm good,pos\nbad,neg\n"
        "bad bad,neg\nfilms good good,pos\n";
    const int64_t table_dims[] = {RUN_WORDS, RUN_WIDTH}, w_dims[] = {RUN_CLASSES, RUN_WIDTH},
                  b_dims[] = {RUN_CLASSES};
    const tt_init normal = {TT_INIT_NORMAL, 0.5f}, zeros = {TT_INIT_ZEROS, 0};
    if (r.ready) return &r;
    r.ctx = fuzz_open();
    fuzz_write("vocab.txt", vocab, sizeof vocab - 1);
    fuzz_write("texts.csv", texts, sizeof texts - 1);
    r.k = tt_tokenizer_open(r.ctx, "vocab.txt", true);
    r.d = tt_dataset_table(r.ctx, "texts.csv", NULL, NULL, 0, NULL);
    tt_loader_options lo = tt_loader_options_default();
    lo.batch = 2; /* an epoch has three steps */
    lo.max_length = 8;
    lo.threads = 0;
    r.train = tt_loader_new(r.ctx, r.d, r.k, &lo);
    lo.shuffle = false;
    r.validation = tt_loader_new(r.ctx, r.d, r.k, &lo);
    r.table = tt_param_new(r.ctx, "table", 2, table_dims, normal);
    r.w = tt_param_new(r.ctx, "w", 2, w_dims, normal);
    r.b = tt_param_new(r.ctx, "b", 1, b_dims, zeros);
    FUZZ_CHECK(r.train && r.validation && r.table && r.w && r.b);
    tt_model model = {&r, fuzz__record, {tt_accuracy()}, RUN_CLASSES, "tokens", 8, false, TT_TASK_CLASS};
    tt_train_options o = tt_train_options_default();
    o.schedule.total_steps = 6;
    o.max_seqs = tt_loader_max_seqs(r.train);
    o.max_tokens = tt_loader_max_tokens(r.train);
    r.t = tt_trainer_new(r.ctx, &model, &o);
    FUZZ_CHECK(r.t);
    r.ready = true;
    return &r;
}

/* Trains in folder "run" until `epochs` epochs are done; stops after the first step if *stop is not 0. */
static inline tt_status fuzz_run_fit(fuzz_run *r, int64_t epochs, bool resume, const volatile int *stop,
                                     bool *finished)
{
    tt_fit_options o = tt_fit_options_default();
    o.epochs = epochs;
    o.folder = "run";
    o.resume = resume;
    o.stop = stop;
    return tt_fit(r->t, tt_loader_source(r->train), tt_loader_source(r->validation), &o, finished);
}

#endif
