#pragma once
#include "../base/base.h"
#include "../tape/record.h"
#include "../ops/losses/rules.h"

/* ------------------------------------------------------------------------------------------------- teachers
   Training by another model's logits (Hinton et al., "Distilling the knowledge in a neural network", 2015).
   */

/* A teacher: the logits of each example of a source, in the host's memory. */
struct tt_teacher {
    tt_context *ctx;
    tt_task task;
    int64_t classes;
    int64_t examples;   /* 1 + the largest index of an example */
    int64_t room;       /* number of examples that `logits` and `known` have room for */
    float *logits;      /* (examples, classes) by the index of the example */
    uint8_t *known;     /* (examples) the source has the example */
};

/* Names of the inputs of a training program: the teacher's predictions at the temperature, (seqs, classes),
   and the weight of each example, (seqs, 1). */
#define TT__TEACHER "teacher"
#define TT__TEACHER_WEIGHTS "teacher_weights"

/* Records the loss that trains with a teacher: (1 - teacher_weight) * loss + teacher_weight * T^2 * the
   cross-entropy of logits / T with the teacher's predictions at temperature T. The cross-entropy does not
   count as a loss of its own: each example weighs in it as in `loss`, so both have the same divisor. */
static tt_value tt__taught_loss(tt_tape *t, tt_value logits, tt_value loss, const tt_train_options *o)
{
    const int64_t rows = tt_value_axis(t, logits), width = tt_value_width(t, logits);
    const tt_task task = o->teacher->task;
    const float heat = task == TT_TASK_SCORES ? 1 : o->teacher_temperature, share = o->teacher_weight;
    tt_value target = tt_input(t, TT__TEACHER, TT_F32, rows, width);
    tt_value weights = tt_input(t, TT__TEACHER_WEIGHTS, TT_F32, rows, 1);
    tt_value x = heat == 1 ? logits : tt_scale(t, logits, 1 / heat), soft;
    if (task == TT_TASK_CLASS) {
        soft = tt_soft_cross_entropy(t, x, target, weights);
    } else if (task == TT_TASK_LABELS) {
        tt_sigmoid_cross_entropy_options c = tt_sigmoid_cross_entropy_options_default();
        c.weights = weights;
        soft = tt_sigmoid_cross_entropy(t, x, target, &c);
    } else {
        soft = tt_mean_squared_error(t, x, target, weights);
    }
    tt__uncounted_loss(t, soft);
    tt_name(t, soft, "teacher's loss");
    soft = tt_scale(t, soft, share * heat * heat);
    return tt_add(t, tt_scale(t, loss, 1 - share), soft);
}

/* Writes the teacher's prediction from the logits x (classes) at a temperature: probabilities, a probability
   for each label, or scores. */
static void tt__teacher_prediction(const tt_teacher *k, const float *x, float temperature, float *to)
{
    double max = x[0], sum = 0;
    for (int64_t c = 1; c < k->classes; c++) max = x[c] > max ? x[c] : max;
    for (int64_t c = 0; c < k->classes; c++) sum += exp((x[c] - max) / temperature);
    for (int64_t c = 0; c < k->classes; c++)
        to[c] = k->task == TT_TASK_CLASS    ? (float)(exp((x[c] - max) / temperature) / sum)
                : k->task == TT_TASK_LABELS ? (float)(1 / (1 + exp(-(double)x[c] / temperature)))
                                            : x[c];
}

/* Fails unless a batch has the index of each example. */
static tt_status tt__teacher_index(tt_context *ctx, const tt_batch *b)
{
    for (int s = 0; s < b->seqs; s++)
        if (!b->index || b->index[s] < 0 || b->index[s] >= INT32_MAX)
            return tt__fail(ctx, TT_ERR_ARGUMENT, "a teacher needs the index of each example in the dataset, "
                            "but example %d of a batch has %s: set tt_batch.index to numbers from 0 to "
                            "2^31 - 2", s,
                            b->index ? "an index out of range" : "none");
    return TT_OK;
}

/* Writes the teacher's predictions for a batch to target (max_seqs, classes) and the weights of its examples
   in the teacher's loss to weights (max_seqs). labels: (seqs) classes of the examples, or NULL. */
static tt_status tt__teacher_rows(tt_context *ctx, const tt_train_options *o, const tt_batch *b,
                                  const int32_t *labels, float *target, float *weights)
{
    const tt_teacher *k = o->teacher;
    const bool by_class = k->task == TT_TASK_CLASS && labels;
    tt_status status = tt__teacher_index(ctx, b);
    if (status == TT_OK && b->seqs > o->max_seqs)
        return tt__fail(ctx, TT_ERR_SHAPE, "the batch has %d sequences, but max_seqs is %d: make the trainer "
                        "for more, or the batch smaller", b->seqs, o->max_seqs);
    for (int s = 0; s < b->seqs && status == TT_OK; s++) {
        const int64_t at = b->index[s];
        const bool counts = !by_class || (labels[s] >= 0 && labels[s] < k->classes);
        if (at >= k->examples || !k->known[at])
            return tt__fail(ctx, TT_ERR_ARGUMENT, "the teacher has not seen the example with index %lld: "
                            "make it (tt_teacher_new) from a source of the same dataset, without drop_last",
                            (long long)at);
        tt__teacher_prediction(k, k->logits + at * k->classes, o->teacher_temperature,
                               target + s * k->classes);
        weights[s] = !counts ? 0 : by_class && o->class_weights ? o->class_weights[labels[s]] : 1;
    }
    return status;
}
