#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"

/* ------------------------------------------------------------------------------- classifiers of sequences */

static double tt__accuracy_of(const tt_stats *s) { return s->correct / s->targets; }
static double tt__perplexity_of(const tt_stats *s) { return exp(s->loss); }

tt_metric tt_accuracy(void)
{
    const tt_metric m = {"accuracy", tt__accuracy_of, false, NULL};
    return m;
}

tt_metric tt_perplexity(void)
{
    const tt_metric m = {"perplexity", tt__perplexity_of, true, NULL};
    return m;
}

/* Declares the inputs of a classifier on a tape. image_bytes: number of bytes of an image; 0: the inputs are
   text. */
static tt_inputs tt__sequence_inputs(tt_tape *t, int max_seqs, int64_t max_rows, int64_t image_bytes)
{
    tt_inputs in;
    memset(&in, 0, sizeof in);
    int64_t rows = tt_axis(t, "tokens", max_rows), seqs = tt_axis(t, "sequences", max_seqs);
    in.positions = tt_input(t, "positions", TT_I32, rows, 1);
    if (image_bytes) {
        in.pixels = tt_input(t, "pixels", TT_U8, seqs, image_bytes);
    } else {
        in.ids = tt_input(t, "ids", TT_I32, rows, 1);
        in.types = tt_input(t, "types", TT_I32, rows, 1);
    }
    in.seq_start = tt_seq_start(t, "seq_start", seqs);
    in.first = tt_input(t, "first", TT_I32, seqs, 1);
    in.labels = tt_input(t, "labels", TT_I32, seqs, 1);
    return in;
}

tt_inputs tt_text_inputs(tt_tape *t, const tt_train_options *o)
{
    return tt__sequence_inputs(t, o->max_seqs, o->max_tokens, 0);
}

tt_inputs tt_image_inputs(tt_tape *t, const tt_train_options *o, int length, int64_t image_bytes)
{
    return tt__sequence_inputs(t, o->max_seqs, (int64_t)o->max_seqs * length, image_bytes);
}

/* Records the cross-entropy of logits (rows, classes) with targets i32 (rows, 1), and names the result
   "loss". */
static tt_value tt__classify(tt_tape *t, tt_value logits, tt_value targets, const tt_train_options *o)
{
    tt_cross_entropy_options c = tt_cross_entropy_options_default();
    c.label_smoothing = o->label_smoothing;
    if (o->class_weights)
        c.class_weights = tt_input(t, "class_weights", TT_F32, 1, tt_value_width(t, logits));
    tt_value loss = tt_cross_entropy(t, logits, targets, &c);
    tt_name(t, loss, "loss");
    return loss;
}

/* Records the loss of a task from the logits: (seqs, n), but (rows, n) for TT_TASK_TAGS. Declares the input
   of the targets, "label_values" or "tags". For TT_TASK_CLASS the caller has declared the input "labels". */
static tt_value tt__task_loss(tt_tape *t, tt_task task, tt_value logits, const tt_inputs *in,
                              const tt_train_options *o)
{
    const int64_t rows = tt_value_axis(t, logits), n = tt_value_width(t, logits);
    tt_value none = {0, 0}, loss;
    if (task == TT_TASK_CLASS) return tt__classify(t, logits, in->labels, o);
    if (task == TT_TASK_TAGS) return tt__classify(t, logits, tt_input(t, "tags", TT_I32, rows, 1), o);
    if (o->label_smoothing > 0)
        tt__tape_fail(t, TT_ERR_ARGUMENT, "{label_smoothing} is %g, but the task has no classes to smooth: "
                      "set it to 0", o->label_smoothing);
    tt_value values = tt_input(t, "label_values", TT_F32, rows, n);
    if (task == TT_TASK_LABELS) {
        tt_sigmoid_cross_entropy_options c = tt_sigmoid_cross_entropy_options_default();
        if (o->class_weights) c.positive_weights = tt_input(t, "class_weights", TT_F32, 1, n);
        loss = tt_sigmoid_cross_entropy(t, logits, values, &c);
    } else {
        loss = tt_mean_squared_error(t, logits, values, none);
    }
    tt_name(t, loss, "loss");
    return loss;
}

/* Sets the metrics of a task. If a class's name begins with "B-", tags mark entities, and the first metric is
   the F1 score of entities. names: (classes, 64). */
static void tt__task_metrics(tt_task task, char (*names)[64], int classes, tt_metric to[TT_METRICS])
{
    bool entities = false;
    for (int c = 0; c < classes && names && !entities; c++)
        entities = strncmp(names[c], "B-", 2) == 0;
    switch (task) {
    case TT_TASK_CLASS: to[0] = tt_accuracy(), to[1] = tt_f1_macro(); break;
    case TT_TASK_LABELS: to[0] = tt_f1_micro(), to[1] = tt_f1_macro(), to[2] = tt_accuracy(); break;
    case TT_TASK_SCORES: to[0] = tt_pearson(), to[1] = tt_spearman(); break;
    case TT_TASK_TAGS:
        to[0] = entities ? tt_f1_entities() : tt_accuracy();
        to[1] = entities ? tt_accuracy() : tt_f1_macro();
        break;
    case TT_TASK_EMBED:
        to[0] = tt_accuracy(), to[1] = tt_recall_at_1(), to[2] = tt_recall_at_10();
        to[3] = tt_pearson(), to[4] = tt_spearman();
        break;
    case TT_TASK_MASKED_LM: to[0] = tt_accuracy(), to[1] = tt_perplexity(); break;
    }
}

tt_value tt_contrastive_loss(tt_tape *t, tt_value embeddings, const tt_train_options *o)
{
    const int64_t pairs = tt_axis(t, "pairs", tt__max(1, o->max_seqs / 2));
    const int64_t others = tt_axis(t, "candidates", o->max_seqs);
    tt_value anchors = tt_input(t, "anchors", TT_I32, pairs, 1);
    tt_value candidates = tt_input(t, "candidates", TT_I32, others, 1);
    tt_value positives = tt_input(t, "positives", TT_I32, pairs, 1);
    tt_matmul_options product = tt_matmul_options_default();
    if (o->label_smoothing > 0)
        tt__tape_fail(t, TT_ERR_ARGUMENT, "{label_smoothing} is %g, but embeddings have no classes to "
                      "smooth: set it to 0", o->label_smoothing);
    product.scale = 1 / o->temperature;
    tt_value unit = tt_normalize(t, embeddings, 1e-12f);
    tt_value scores = tt_matmul(t, tt_gather_rows(t, unit, anchors), tt_gather_rows(t, unit, candidates),
                                &product);
    tt_value loss = tt_cross_entropy(t, scores, positives, NULL);
    tt_name(t, loss, "loss");
    return loss;
}
