#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/record.h"
#include "../ops/elementwise/rules.h"
#include "../ops/rows/rules.h"
#include "../ops/losses/rules.h"
#include "../data/windows.h"
#include "classifier.h"
#include "lm_tape.h"

/* -------------------------------------------------------------------------- training on pairs of answers */

static double tt__margin_of(const tt_stats *s) { return s->margin / s->targets; }

tt_metric tt_margin(void)
{
    const tt_metric m = {"margin", tt__margin_of, false, NULL};
    return m;
}

/* Keeps a value in f32 in any precision, and returns it. */
static tt_value tt__pinned(tt_tape *t, tt_value v)
{
    if (v.id) t->values[v.id].pinned_f32 = true;
    return v;
}

tt_value tt_preference_loss(tt_tape *t, tt_value logits, const tt_train_options *o, tt_value *difference)
{
    const int64_t rows = tt_value_axis(t, logits);
    const int64_t pairs = tt_axis(t, "pairs", tt__max(1, o->max_seqs / 2));
    tt_value targets = tt_input(t, "targets", TT_I32, rows, 1);
    tt_value signs = tt_input(t, "signs", TT_F32, rows, 1);
    tt_value start = tt_seq_start(t, "pair_start", pairs);
    tt_value minus = tt_input(t, TT__REFERENCE_MINUS, TT_F32, pairs, 1);
    tt_value preferred = tt_input(t, "preferred", TT_F32, pairs, 1);
    if (o->label_smoothing > 0)
        tt__tape_fail(t, TT_ERR_UNSUPPORTED, "preference loss: {label_smoothing} is %g, but pairs of answers "
                      "have none: set it to 0", o->label_smoothing);
    tt_value losses = tt__pinned(t, tt_mul(t, tt_token_losses(t, logits, targets), signs));
    *difference = tt__pinned(t, tt_sum_pool(t, losses, start));
    tt_name(t, *difference, "difference of log-probabilities");
    tt_value margin = tt__pinned(t, tt_scale(t, tt__pinned(t, tt_add(t, *difference, minus)), o->beta));
    tt_name(t, margin, "margin");
    tt_value sum = tt__pinned(t, tt__record(t, tt__new_instr(TT__OP_SUM_ROWS), "v", margin));
    tt_value loss = tt_sigmoid_cross_entropy(t, margin, preferred, NULL);
    if (loss.id) t->code[t->n_code - 1].in[TT__LOSS_TOTAL] = sum.id;
    tt_name(t, loss, "loss");
    return loss;
}

static tt_value tt__preference_record(const void *self, tt_tape *t, const tt_train_options *o,
                                      tt_value *output)
{
    const tt_lm *m = (const tt_lm *)self;
    const tt_inputs in = tt__lm_text_inputs(t, o);
    if (m->score)
        tt__tape_fail(t, TT_ERR_ARGUMENT, "tt_lm_preference_model: the model is a classifier, which has no "
                      "logits of tokens: load its folder with tt_lm_load");
    if (o->features_once)
        tt__tape_fail(t, TT_ERR_UNSUPPORTED, "{features_once} excludes pairs of answers, whose texts share "
                      "an index: clear it");
    const int64_t rows = tt_axis(t, "answers", o->max_masked ? o->max_masked : o->max_tokens);
    tt_value answers = tt_input(t, "answers", TT_I32, rows, 1);
    tt_value hidden = tt_gather_rows(t, tt_lm_hidden(m, t, &in), answers);
    return tt_preference_loss(t, tt__lm_head(m, t, hidden), o, output);
}

tt_model tt_lm_preference_model(const tt_lm *m)
{
    const tt_lm_config *c = &m->config;
    const tt_model model = {m, tt__preference_record, {tt_accuracy(), tt_margin()}, 0, "tokens",
                            c->max_positions, false, c->task};
    return model;
}
