#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/losses/rules.h"
#include "../context/params.h"
#include "features.h"

/* -------------------------------------------------------------------------------------- loss of a student
   The loss of distillation: training by another model's logits (Hinton et al., "Distilling the knowledge in a
   neural network", 2015) and hidden states (Jiao et al., "TinyBERT: distilling BERT for natural language
   understanding", 2020). */

/* A teacher: the logits of each example of a source, in the host's memory. */
struct tt_teacher {
    tt_context *ctx;
    tt_task task;
    int64_t classes;
    uint64_t model;     /* hash of the teacher's parameters */
    int64_t examples;   /* 1 + the largest index of an example */
    int64_t room;       /* number of examples that `logits` and `known` have room for */
    float *logits;      /* (examples, classes) by the index of the example */
    uint8_t *known;     /* (examples) the source has the example */
};

/* Names of the inputs of a training program: the teacher's predictions at the temperature, (seqs, classes);
   the weight of each example, (seqs, 1); and for each token the weight of its example, divided by the
   example's number of tokens, (tokens, 1). */
#define TT__TEACHER "teacher"
#define TT__TEACHER_WEIGHTS "teacher_weights"
#define TT__TEACHER_TOKENS "teacher_tokens"

/* The name of the parameter that projects the student's hidden states to the teacher's width. */
#define TT__PROJECTION "hidden_projection.weight"

/* A model that has been recorded on a tape: the values that are its own, and its instructions. */
typedef struct tt__recorded { int32_t first_value, end_value; int first_code, end_code; } tt__recorded;

/* Records the teacher's model as in an evaluation. Sets *logits to its output. The student's record then
   shares the teacher's inputs. */
static tt__recorded tt__record_teacher(tt_tape *t, const tt_train_options *o, tt_value *logits)
{
    const tt_model *m = o->teacher_model;
    tt__recorded x = {t->n_values, 0, t->n_code, 0};
    logits->id = 0;
    m->record(m->self, t, o, logits);
    x.end_value = t->n_values;
    x.end_code = t->n_code;
    for (int k = x.first_code; k < x.end_code; k++) {
        t->code[k].attr.dropout = 0;
        if (t->code[k].attr.lists_for_training) t->code[k].attr.lists = 0;
    }
    t->shares_inputs = true;
    return x;
}

/* Returns the rows of the smallest table in which a recorded model looks up "ids"; 0: none. */
static int64_t tt__recorded_ids(const tt_tape *t, const tt__recorded *x)
{
    int64_t least = 0;
    for (int k = x->first_code; k < x->end_code; k++) {
        const tt__instr *i = &t->code[k];
        const tt__tape_value *ids = &t->values[i->in[0]], *table = &t->values[i->in[1]];
        if (ids->storage != TT__INPUT || table->storage != TT__PARAMETER) continue;
        if (strcmp(ids->name, "ids") != 0) continue;
        least = least ? tt__min(least, table->shape.rows) : table->shape.rows;
    }
    return least;
}

/* Fails if the model of a teacher cannot read a batch of texts. ids: the rows of the teacher's table of
   tokens; 0: none. */
static tt_status tt__teacher_reads(tt_context *ctx, const tt_model *teacher, int64_t ids, const tt_batch *b)
{
    for (int s = 0; s < b->seqs && b->seq_start && teacher->max_length; s++)
        if (tt__tokens_in(b, s, 0) > teacher->max_length)
            return tt__fail(ctx, TT_ERR_ARGUMENT, "example %d of the batch has %d tokens, but "
                            "{teacher_model} reads at most %d: cut the texts to the teacher's length", s,
                            tt__tokens_in(b, s, 0), teacher->max_length);
    for (int row = 0; row < b->rows && b->ids && ids; row++)
        if (b->ids[row] >= ids)
            return tt__fail(ctx, TT_ERR_ARGUMENT, "the batch has the token %d, but {teacher_model} has only "
                            "the tokens 0 to %lld: teacher and student need the same tokenizer", b->ids[row],
                            (long long)ids - 1);
    return TT_OK;
}

/* Freezes the parameters of a teacher's model. Fails if the student, whose instructions end the tape, reads
   one of these parameters, or if the teacher's output does not fit the student's. */
static tt_status tt__freeze_teacher(tt_tape *t, const tt__recorded *x)
{
    if (t->status != TT_OK) return TT_OK; /* the compilation returns the tape's error */
    for (int k = x->end_code; k < t->n_code; k++)
        for (int j = 0; j < TT__MAX_IN; j++) {
            const int32_t base = t->values[t->code[k].in[j]].base;
            if (base >= x->first_value && base < x->end_value && t->values[base].storage == TT__PARAMETER)
                return tt__fail(t->ctx, TT_ERR_ARGUMENT, "the teacher and the student share the parameter "
                                "'%s': load one of them under names of its own (tt_param_prefix)",
                                t->values[base].name);
        }
    for (int32_t v = x->first_value; v < x->end_value; v++)
        if (t->values[v].storage == TT__PARAMETER && t->values[v].base == v)
            t->ctx->params[t->values[v].param]->frozen = true;
    return TT_OK;
}

/* Returns the output of layer k of a recorded model: the last of the model's values that is named "layer.k".
   The output's id is 0 if the model has no such value. */
static tt_value tt__hidden_of(tt_tape *t, const tt__recorded *x, int k)
{
    char name[32];
    int32_t found = 0;
    snprintf(name, sizeof name, "layer.%d", k);
    for (int32_t v = x->first_value; v < x->end_value; v++)
        if (t->values[v].named && strcmp(t->values[v].name, name) == 0) found = v;
    return tt__handle(t, found);
}

/* Returns the parameter (width of the teacher, width of the student) that projects hidden states. Makes the
   parameter unless an earlier trainer has made it. Returns NULL on error. */
static tt_param *tt__projection(tt_context *ctx, int64_t teacher, int64_t student)
{
    const int64_t dims[2] = {teacher, student};
    const tt_init init = {TT_INIT_NORMAL, 1 / sqrtf((float)student)};
    tt_param *p = tt_param_find(ctx, TT__PROJECTION);
    if (!p) return tt__param_make(ctx, TT__PROJECTION, 2, dims, init);
    if (p->ndim == 2 && p->dims[0] == teacher && p->dims[1] == student) return p;
    tt__fail(ctx, TT_ERR_SHAPE, "the parameter '%s' of an earlier trainer has another shape than (%lld, "
             "%lld), the widths of this teacher and of this student: open another context", TT__PROJECTION,
             (long long)teacher, (long long)student);
    return NULL;
}

/* Records the mean squared error between the student's hidden state x and the teacher's hidden state y, both
   with a row for each token or each example. */
static tt_value tt__hidden_error(tt_tape *t, tt_value x, tt_value y, int64_t seqs)
{
    const int64_t rows = tt_value_axis(t, x), width = tt_value_width(t, y);
    const char *weights = rows == seqs ? TT__TEACHER_WEIGHTS : TT__TEACHER_TOKENS;
    if (tt_value_width(t, x) != width) {
        tt_param *p = tt__projection(t->ctx, width, tt_value_width(t, x));
        if (!p) tt__tape_fail(t, t->ctx->status, "%s", t->ctx->error);
        if (!p) return x;
        x = tt_linear(t, x, p, NULL);
    }
    tt_value error = tt_mean_squared_error(t, x, y, tt_input(t, weights, TT_F32, rows, 1));
    tt__uncounted_loss(t, error);
    tt_name(t, error, "hidden error");
    return error;
}

/* Adds hidden_weight * the mean of the errors of the student's layers to a loss. seqs: the axis of
   examples. */
static tt_value tt__add_hidden(tt_tape *t, tt_value loss, const tt__recorded *teacher,
                               const tt__recorded *student, int64_t seqs, const tt_train_options *o)
{
    int of[2] = {0, 0}, pairs = 0; /* of: number of layers of the teacher and of the student */
    tt_value sum = loss;
    for (int k = 0; k < 2; k++) while (tt__hidden_of(t, k ? student : teacher, of[k]).id) of[k]++;
    if (!of[0] || !of[1])
        tt__tape_fail(t, TT_ERR_ARGUMENT, "{hidden_weight} needs hidden states of teacher and student, but "
                      "the %s has none: its function `record` must name the outputs of layers 'layer.0', "
                      "'layer.1' and so on (tt_name)", of[0] ? "student" : "teacher");
    for (int k = 0; k < of[1] && t->status == TT_OK; k++) {
        const int at = o->hidden_layers ? o->hidden_layers[k]
                                        : (int)((int64_t)(k + 1) * of[0] / of[1]) - 1;
        if (at >= of[0] || at < -1)
            tt__tape_fail(t, TT_ERR_ARGUMENT, "hidden_layers[%d] is %d, but the teacher has the layers 0 to "
                          "%d (-1: none)", k, at, of[0] - 1);
        if (at < 0 || t->status != TT_OK) continue;
        const tt_value e = tt__hidden_error(t, tt__hidden_of(t, student, k), tt__hidden_of(t, teacher, at),
                                            seqs);
        sum = pairs++ ? tt_add(t, sum, e) : e;
    }
    if (!pairs)
        tt__tape_fail(t, TT_ERR_ARGUMENT, "hidden_layers has no layer of the teacher: set at least one of "
                      "its numbers to 0 or more");
    return pairs ? tt_add(t, loss, tt_scale(t, sum, o->hidden_weight / (float)pairs)) : loss;
}

/* Records the predictions that the logits of a teacher's model give at a temperature. */
static tt_value tt__soft_target(tt_tape *t, tt_task task, tt_value logits, float heat)
{
    const tt_value x = heat == 1 ? logits : tt_scale(t, logits, 1 / heat);
    return task == TT_TASK_CLASS ? tt_softmax(t, x) : task == TT_TASK_LABELS ? tt_sigmoid(t, x) : x;
}

/* Records `(1 - w) * loss + w * T^2 * h`, the loss that trains with a teacher. w: the option teacher_weight;
   T: the temperature; h: the cross-entropy of `logits / T` with the teacher's predictions at temperature T. h
   does not count as a loss of its own: each example has the same weight in h and in `loss`, so both have the
   same divisor. taught: the output of the teacher's model; if its id is 0, the predictions are an input. */
static tt_value tt__taught_loss(tt_tape *t, tt_task task, tt_value logits, tt_value taught, tt_value loss,
                                const tt_train_options *o)
{
    const int64_t rows = tt_value_axis(t, logits), width = tt_value_width(t, logits);
    const float heat = task == TT_TASK_SCORES ? 1 : o->teacher_temperature, share = o->teacher_weight;
    tt_value target = taught.id ? tt__soft_target(t, task, taught, heat)
                                : tt_input(t, TT__TEACHER, TT_F32, rows, width);
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

/* Writes the teacher's prediction from the logits x (classes) at a temperature. By the task, this is the
   probabilities of the classes, a probability for each label, or scores. */
static void tt__teacher_prediction(const tt_teacher *k, const float *x, float temperature, float *to)
{
    double max = x[0], sum = 0;
    for (int64_t c = 1; c < k->classes; c++) max = x[c] > max ? x[c] : max;
    for (int64_t c = 0; c < k->classes; c++) sum += tt__exp((x[c] - max) / temperature);
    for (int64_t c = 0; c < k->classes; c++)
        to[c] = k->task == TT_TASK_CLASS    ? (float)(tt__exp((x[c] - max) / temperature) / sum)
                : k->task == TT_TASK_LABELS ? (float)(1 / (1 + tt__exp(-(double)x[c] / temperature)))
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

/* The inputs that a teacher's losses read, for a batch: (max_seqs, classes), (max_seqs), (max_tokens). The
   names of the inputs, in this order, are TT__TEACHER, TT__TEACHER_WEIGHTS and TT__TEACHER_TOKENS. */
typedef struct tt__teacher_inputs { float *target, *weights, *tokens; } tt__teacher_inputs;

/* Writes a teacher's inputs for a batch. labels: (seqs) classes of the examples, or NULL. same: the number of
   tokens of every example; 0: examples may differ. */
static tt_status tt__teacher_rows(tt_context *ctx, const tt_train_options *o, tt_task task, const tt_batch *b,
                                  const int32_t *labels, int same, const tt__teacher_inputs *to)
{
    const tt_teacher *k = o->teacher;
    const int classes = k ? (int)k->classes : o->teacher_model->classes;
    const bool by_class = task == TT_TASK_CLASS && labels;
    float *token = to->tokens;
    tt_status status = k ? tt__teacher_index(ctx, b) : TT_OK;
    if (status == TT_OK && b->seqs > o->max_seqs)
        return tt__fail(ctx, TT_ERR_SHAPE, "the batch has %d sequences, but max_seqs is %d: make the trainer "
                        "for more, or the batch smaller", b->seqs, o->max_seqs);
    if (status == TT_OK && !same && b->seq_start && b->rows > o->max_tokens)
        return tt__fail(ctx, TT_ERR_SHAPE, "the batch has %d tokens, but max_tokens is %d: make the trainer "
                        "for more, or the batch smaller", b->rows, o->max_tokens);
    for (int s = 0; s < b->seqs && status == TT_OK; s++) {
        const int64_t at = k ? b->index[s] : 0;
        const bool counts = !by_class || (labels[s] >= 0 && labels[s] < classes);
        if (k && (at >= k->examples || !k->known[at]))
            return tt__fail(ctx, TT_ERR_ARGUMENT, "the teacher has not seen the example with index %lld: "
                            "make it (tt_teacher_new) from a source of the same dataset, without drop_last",
                            (long long)at);
        if (k)
            tt__teacher_prediction(k, k->logits + at * k->classes, o->teacher_temperature,
                                   to->target + s * k->classes);
        to->weights[s] = !counts ? 0 : by_class && o->class_weights ? o->class_weights[labels[s]] : 1;
        const int32_t tokens = token ? tt__tokens_in(b, s, same) : 0;
        for (int32_t j = 0; j < tokens; j++) *token++ = to->weights[s] / (float)tokens;
    }
    return status;
}
