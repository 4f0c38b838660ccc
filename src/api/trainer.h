#pragma once
#include "standard.h"
#include "context.h"
#include "program.h"
#include "tokenizer.h"
#include "data.h"
#include "models.h"

/* ------------------------------------------------------------------------------------------------ trainer */

/* A teacher for distillation: the logits of a trained model for all examples of a source. */
typedef struct tt_teacher tt_teacher;

struct tt_train_options {
    /* Set its fields if the defaults of precision, device, optimizer or memory do not fit; default:
       tt_compile_options_default() with optimizer.clip_norm 1. With `train` false there are no gradients and
       no optimizer, for tt_evaluate, tt_forward and tt_predict only. Set `accumulate` if a step may have more
       micro-batches than there are data ranks (tt_loader_accumulates). `share` must be NULL. */
    tt_compile_options compile;
    tt_schedule schedule;            /* Set its total_steps, which every kind but TT_CONSTANT needs, and its
                                        other fields if your recipe has another learning rate; default:
                                        linear, lr 5e-5, no warm-up, total_steps 0 */
    /* Set label_smoothing, for example to 0.1, if a model is too sure of wrong answers, and class_weights if
       some classes are rare but matter as much as others: both change the cross-entropy that trains
       classifiers and language models (tt_cross_entropy_options); default 0 and NULL. Evaluations use
       neither. class_weights (one for each class; copied) are for classifiers; the loss and the accuracy of a
       step are then weighted means. With TT_TASK_LABELS class_weights are the positive weights of the labels,
       and smoothing is refused. A model of your own reads them in an f32 input "class_weights" of (1,
       classes); in an evaluation they are ones. */
    float label_smoothing;
    const float *class_weights; /* Set it if some classes are rare: see label_smoothing */
    /* Set it lower if embeddings of similar texts should be farther apart, and higher if training is
       unstable: the temperature of the contrastive loss (tt_contrastive_loss), above 0; default 0.05, as in
       sentence-transformers. */
    float temperature;
    /* Set it higher if the answers drift too far from those of the start, and lower if they hardly change:
       the factor of log-probabilities in the loss of pairs of answers (tt_preference_loss), above 0; default
       0.1, as in trl. */
    float beta;
    /* Set it if the contrastive loss should have the negatives of the whole step, and not of a micro-batch
       alone: the number of sequences of the largest step (tt_loader_options.batch times the 2 or 3 texts of
       an example); default 0. The gradients are those of one large micro-batch (Gao et al., "Scaling deep
       contrastive learning batch size under memory limited setup", 2021), for one more forward of each
       micro-batch and memory for the embeddings. The trainer sets compile.accumulate. tt_evaluate, tt_fit and
       tt_predictions_new have the negatives of the whole step too; tt_evaluate_batch has those of its batch.
       Not with loss scaling and pipelines. */
    int step_seqs;
    /* Set it to compute the part of the model that depends on frozen parameters alone (tt_param_freeze) once
       for each example, without dropout; default false. tt_fit computes its results, the features, before the
       first step, keeps them in the host's memory (tt_trainer_feature_bytes), and then trains and validates
       the rest of the model from them. Each epoch must have the examples of epoch 0, unchanged, and batches
       must have an index (tt_batch.index) that no other example has. A model with features of tokens needs an
       input "positions" or "ids". Predictions, tt_evaluate and files are as without the option. Not for
       TT_TASK_EMBED and TT_TASK_MASKED_LM.
       tt_train_batch is refused, and so are several processes. */
    bool features_once;
    /* Set `teacher` to train a classifier, or a model of labels or scores, by another model's logits as well
       (Hinton et al., "Distilling the knowledge in a neural network", 2015); default NULL. The loss that
       trains is `(1 - teacher_weight) * loss + teacher_weight * T^2 * soft`, where T is teacher_temperature
       and `soft` is the mean cross-entropy of logits / T with the teacher's probabilities at T:
       softmax(teacher's logits / T), or sigmoids for labels. For scores T is 1, and `soft` is the mean
       squared error from the teacher's scores. An example weighs as much in `soft` as in `loss`, which
       statistics and evaluations show alone. Both models have the same task and classes, in the same order.
       Keep the teacher until the trainer is freed. */
    const tt_teacher *teacher;
    float teacher_weight;      /* Set it higher if the teacher is better than the labels: the share of `soft`
                                  in the loss, 0 to 1; default 0.5 */
    float teacher_temperature; /* Set it higher if the teacher is so sure that its probabilities are near 0
                                  and 1, above 0; default 2 */
    /* Set `teacher_model` instead of `teacher` if examples change in each epoch, or if the student should
       learn from hidden states as well: a model whose parameters are in this context (tt_param_prefix) and
       which reads the same batches; default NULL. The training program computes the teacher's logits in each
       step, as in an evaluation, so the plan has the teacher's memory; the trainer freezes its parameters.
       With features_once tt_fit computes and keeps the teacher's results once. Not for pipelines. */
    const tt_model *teacher_model;
    /* Set it above 0 if the student should learn from the hidden states of teacher_model (TinyBERT, Jiao et
       al. 2020); default 0. The loss that trains then has, in addition, hidden_weight * the mean over the
       student's layers of the mean squared error between the outputs of the student's layer and of a layer of
       the teacher: the mean of the errors of an example's tokens, then of the examples, weighted as in
       `loss`. The output of layer k is the value that a model names "layer.k" (tt_name), k from 0. If the
       widths differ, a trained matrix projects the student's hidden states: the parameter
       "hidden_projection.weight" (teacher's width, student's width), which the trainer makes and which
       belongs to no model's files. */
    float hidden_weight;
    /* Set it if the student should learn from other layers of the teacher than evenly chosen ones: for each
       layer of the student the number of the teacher's layer, from 0, or -1 for none. tt_trainer_new reads
       the array; default NULL: the last layers belong together, and layers 0, 1, 2 of 3 learn from layers 1,
       3, 5 of 6. */
    const int *hidden_layers;
    /* Set them to the sizes of the largest micro-batch, from tt_loader_max_seqs and tt_loader_max_tokens
       (text only), or with tt_train_options_make_room; there is no default. */
    int max_seqs, max_tokens;
    /* Set it to the largest number of masked tokens (TT_TASK_MASKED_LM) or of tokens of answers
       (tt_lm_preference_model) of a micro-batch, or call tt_train_options_make_room, so that the last layer
       and the logits need less memory; default 0: max_tokens. */
    int max_masked;
};
tt_train_options tt_train_options_default(void);
/* Raises max_seqs, max_tokens and max_masked to the sizes that the micro-batches of two sources need, and
   sets accumulate if a step of the first source may have more micro-batches than there are data ranks. Either
   source may be NULL. */
void tt_train_options_make_room(tt_train_options *o, const tt_source *train, const tt_source *validation);

typedef struct tt_trainer tt_trainer;

/* Records, compiles and plans a training and an evaluation program in one arena; allocates nothing. One
   message reports all contradictions of the options. Returns NULL on error. */
tt_trainer *tt_trainer_new(tt_context *ctx, const tt_model *model, const tt_train_options *o);
void tt_trainer_free(tt_trainer *t);
/* Computes the logits of a trained model for the examples of epoch 0 of a source, without dropout, and keeps
   them in the host's memory: 4 bytes for each logit. t: the trainer of the model, which may have been made
   with train = false. Free that trainer before the student's trainer is made, and its memory is free again.
   Batches must have an index, from which the student's batches find their rows: the source reads the dataset
   on which the student trains, perhaps with another tokenizer. Parameters of one context have different
   names: make or load the teacher under a prefix (tt_param_prefix). For one process. Returns NULL on
   error. */
tt_teacher *tt_teacher_new(tt_trainer *t, const tt_source *source);
void tt_teacher_free(tt_teacher *k);
/* Makes the model as it is now the reference of the pairs of a source, and writes their log-probabilities to
   source->reference; does nothing if all are known. folder, name: a file in an existing folder, to which the
   function writes the numbers or, if the file exists, from which it reads them; folder NULL: no file. Fails
   with TT_ERR_ARGUMENT if the file belongs to other pairs, another length or another model, and with
   TT_ERR_FORMAT if the file is damaged. tt_fit calls this function for its sources before the first step,
   with reference.safetensors and reference.validation.safetensors in its folder, so that a resumed run has
   the same reference. The states of the trainer's run then belong to this model. With several processes the
   file must exist. */
tt_status tt_trainer_reference(tt_trainer *t, const tt_source *source, const char *folder, const char *name);
/* Waits as tt_wait does for the training program's last step, after a tt_train_batch without stats. */
tt_status tt_trainer_wait(tt_trainer *t, tt_stats *stats);
/* Returns the largest max_seqs, up to `max`, with which a trainer of these options fits their memory_budget;
   the function works as tt_largest_batch does. Each sequence brings o->max_tokens / o->max_seqs tokens. The
   caller chooses whether steps become larger or have fewer micro-batches; other micro-batches give other
   bits. */
int tt_largest_micro_batch(tt_context *ctx, const tt_model *model, const tt_train_options *o, int max);
const tt_program *tt_trainer_program(const tt_trainer *t); /* returns the program that trains; if there is
                                                              none, the program that evaluates */
int64_t tt_trainer_steps(const tt_trainer *t);             /* number of optimizer steps done
                                                              (tt_program_steps) */
/* Returns the steps of the last state that was saved or loaded, from which a resumed run continues; -1: no
   state. */
int64_t tt_trainer_saved_steps(const tt_trainer *t);
/* Returns the bytes of the tensors in a state of this trainer, and in *parameters (may be NULL) the bytes of
   the trained parameters among them. Returns 0 if the trainer does not train, or when out of memory. */
size_t tt_trainer_state_bytes(const tt_trainer *t, size_t *parameters);
/* Returns the bytes of the host's memory that tt_fit needs for the features of a source's examples
   (features_once). Reads epoch 0 of the source. Returns 0 without the option, or after an error. */
size_t tt_trainer_feature_bytes(tt_trainer *t, const tt_source *source);
/* Returns the learning rate of the next step: the schedule at tt_trainer_steps, which a skipped step does not
   advance. */
float tt_trainer_lr(const tt_trainer *t);

/* Runs forward and backward of a micro-batch, and the update if it is the last of its step: then *updated is
   true, even if loss scaling skipped the update. stats covers the micro-batches of the step so far. If a
   micro-batch fails, its step updates nothing, and the step's later micro-batches are refused.
   With several data ranks, micro-batch m of a step is copied to data rank m % data. All ranks run when each
   has a micro-batch, or after the last of the step; stats covers the micro-batches that have run, and is 0
   before. While a micro-batch waits, the trainer can neither evaluate nor predict. A pipeline runs all
   micro-batches of a step after its last, and can evaluate before that.
   stats may be NULL; then the call may return before the step is done, as tt_step does, and its results
   appear one step later or in tt_trainer_wait. */
tt_status tt_train_batch(tt_trainer *t, const tt_batch *batch, tt_stats *stats, bool *updated);
/* Adds a batch to an evaluation: stats covers all batches since the caller set it to zero; the loss is the
   mean over the targets of these batches. The batch runs at once, on data rank 0; tt_evaluate distributes
   batches over all data ranks. */
tt_status tt_evaluate_batch(tt_trainer *t, const tt_batch *batch, tt_stats *stats);
/* Computes mean loss, targets and hits over epoch 0 of the source, which must have a target that counts. The
   bits are the same for any number of data ranks. */
tt_status tt_evaluate(tt_trainer *t, const tt_source *source, tt_stats *stats);
/* Evaluates as tt_evaluate does, and collects labels and predictions of a model that has `classes`, in the
   order of the source for any number of data ranks. Batches must have labels. stats may be NULL. Keep the
   source until tt_predictions_free. Returns NULL on error. */
tt_predictions *tt_predictions_new(tt_trainer *t, const tt_source *source, tt_stats *stats);
void tt_predictions_free(tt_predictions *p);
/* Returns a metric of an evaluation; NaN if it is undefined, or needs sums or predictions that are NULL. */
double tt_metric_value(const tt_metric *m, const tt_stats *s, const tt_predictions *p);
/* Evaluates a model that has classes as tt_evaluate does, and writes its confusion matrix, counts (classes,
   classes): counts[i * classes + j] examples of class i are predicted as class j. The prediction is the class
   with the largest logit, the first of several equal logits. Batches must have "labels". stats may be NULL.
   Returns TT_ERR_ARGUMENT if the model's task is not TT_TASK_CLASS or a batch has no labels; other errors are
   those of tt_evaluate. */
tt_status tt_confusion(tt_trainer *t, const tt_source *source, tt_stats *stats, int64_t *counts);
/* Computes the model's output for a batch, as tt_get gives it, on data rank 0. Data that only the loss reads,
   such as labels, may be missing. */
tt_status tt_forward(tt_trainer *t, const tt_batch *batch, float *to, size_t capacity);
/* Computes the predictions of the model's task for a batch, on data rank 0, and writes them to `predictions`:
   TT_TASK_CLASS: probabilities of the classes, (seqs, classes), which sum to 1 for each sequence.
   TT_TASK_LABELS: a probability for each label, (seqs, classes).
   TT_TASK_SCORES: scores, (seqs, classes).
   TT_TASK_TAGS: probabilities of the tags of each token, (rows, classes).
   TT_TASK_EMBED: embeddings, (seqs, hidden).
   Data that only the loss reads may be missing. */
tt_status tt_predict(tt_trainer *t, const tt_batch *batch, float *predictions);
/* Computes the predictions for one text, or for a text and its pair (NULL: none), cut to the model's length.
   The model may have any task but TT_TASK_TAGS. */
tt_status tt_predict_text(tt_trainer *t, const tt_tokenizer *k, const char *text, const char *pair,
                          float *predictions);

/* Exchanges the parameters with their moving averages (tt_optimizer_options.ema_decay) if `use`, and back if
   not. Meanwhile evaluations, predictions and a save of the model use the averages, and the trainer can
   neither train nor save or load a state. Call it between steps. It takes memory for two copies of the
   largest parameter. Before the first update the averages are the parameters. After an error load the last
   state. tt_fit uses the averages by itself for each validation and in `keep`; when tt_fit ends, the
   parameters are those of training. */
tt_status tt_trainer_use_ema(tt_trainer *t, bool use);

/* Progress of a run, stored with the state so that the caller can resume. */
typedef struct tt_progress {
    int64_t epoch, step;          /* the epoch and the step to train next */
    double loss_sum, targets, correct; /* sums of losses, targets and right predictions over the epoch so
                                          far */
    double best, best_loss;       /* the best validation so far. best: the value that tt_fit_options.best_by
                                     compares; best_loss: the loss */
    uint64_t best_by;             /* hash of the name of the value in `best`; 0: unknown */
    int64_t validated, worse;     /* validated: steps of all epochs, skipped ones included, before the last
                                     validation; worse: validations since the best validation */
    uint64_t classes, data;       /* classes: hash of the class names; data: hash of the examples; see tt_fit;
                                     0: none */
} tt_progress;

/* Save and load the state of the training program (tt_program_save, tt_program_load), with the progress
   (NULL: none) and the schedule; the logger gets a warning if the loaded schedule differs. */
tt_status tt_trainer_save(tt_trainer *t, const char *path, const tt_progress *progress);
tt_status tt_trainer_load(tt_trainer *t, const char *path, tt_progress *progress);

/* Progress of tt_fit, after each step and each validation. */
typedef struct tt_fit_event {
    int64_t epoch, epochs;         /* epoch counts from 0 */
    int64_t step, steps;           /* step: steps done in this epoch; steps: steps of an epoch */
    double loss;                   /* mean loss over the targets of this epoch so far */
    const char *metric_name;       /* the metric of best_by, or else the model's first; NULL: no metric,
                                      or only validations have it */
    double metric;                 /* metric of this epoch so far, or of `validation` if it is set */
    const char *unit;              /* "tokens", "images", ... */
    double per_second;             /* units per second since tt_fit began, without validation */
    double of_peak;                /* FLOP/s of matrix products and attention as a fraction of
                                      tt_measured_peak; 0: unknown */
    double seconds_left;           /* seconds left of all epochs, without validation */
    const tt_stats *validation;    /* result of the validation at the end of an epoch or after validate_steps;
                                      NULL after a step */
    bool best;                     /* this validation is the best so far, and `keep` has been called */
    int64_t worse, patience;       /* worse: validations since the best one; patience: from tt_fit_options */
    bool margins;                  /* the model has the metric tt_margin */
    double margin;                 /* mean margin of the pairs of this epoch so far, of a resumed epoch since
                                      tt_fit began; or of `validation` if it is set */
} tt_fit_event;

/* Writes an event as one line for a progress display, without a newline. If `capacity` is too small for the
   whole line, first the bar becomes shorter. Then fields are left out, except the remaining time. At last the
   line is cut. Returns the length of the full text, as tt_plan_text does. */
size_t tt_fit_text(const tt_fit_event *e, char *to, size_t capacity);

typedef struct tt_fit_options {
    int64_t epochs;                /* Set it if one pass over the data is not enough: the number of epochs;
                                      default 1 */
    const char *folder;            /* Set it to be able to resume a run and to see its course: the folder,
                                      created if necessary, for state.safetensors, metrics.csv and loss.svg
                                      (see tt_fit); default NULL: no files */
    bool resume;                   /* Set it to continue a run that was stopped or killed, from the state in
                                      folder; default false: a folder that holds a state is refused */
    double save_seconds;           /* Set it lower if a run that is killed must not lose five minutes of work,
                                      and higher if saving takes long: seconds between saves within an epoch;
                                      the state is also saved after each epoch; default 300 */
    int64_t validate_steps;        /* Set it if epochs are long: the number of steps after which the run
                                      validates and saves, in addition to the end of each epoch; steps of all
                                      epochs count; without validation the run only saves; default 0: at the
                                      end of an epoch only */
    int64_t keep_states;           /* Set it if you may want to go back to an earlier state: the number of
                                      validations, counted from the last, whose states stay as
                                      state-STEP.safetensors, with the number of the step; a run resumes from
                                      such a state that is copied to state.safetensors. Default 0: none */
    int64_t patience;              /* Set it to end a run that no longer improves: the number of validations
                                      in a row that are no better than the best one; needs validation; default
                                      0: never */
    const volatile int *stop;      /* Set it if a signal or another thread should be able to stop the run: a
                                      variable that stops the run when it is not 0, after the current step or
                                      batch of validation; a signal handler may set the variable
                                      (sig_atomic_t); default NULL */
    const char *best_by;           /* Set it if the best model is not the one with the best first metric:
                                      validations are compared by "loss", or by the name of a metric of the
                                      model, and then by the loss, which also decides while the metric is
                                      undefined; default NULL: the first metric, or else the loss */
    /* Set it to save the best model: a function that saves the model; default NULL. tt_fit calls it after a
       validation that is the best so far, or, without validation, after every epoch. The folder then holds a
       state, so a run that is killed inside `keep` can be resumed. tt_fit ends with `keep`'s status if it
       fails, and a resumed run calls `keep` a second time after this validation. */
    tt_status (*keep)(void *user);
    /* Set it to show the progress of a run: a function that receives an event after each step and each
       validation; default NULL. */
    void (*report)(void *user, const tt_fit_event *event);
    void *user; /* argument of `keep` and `report` */
} tt_fit_options;
tt_fit_options tt_fit_options_default(void);

/* Trains for some epochs of `train`, each followed by an evaluation on `validation` (NULL: none). *finished
   is true if all epochs are done or `patience` has ended the run. Otherwise the run was stopped or failed,
   and the state after the last whole step is saved, from which a run resumes bit for bit. Saving can fail as
   well: tt_trainer_saved_steps says from which step a resumed run would continue.
   A step that has no target, or whose loss or gradient is not finite, updates nothing: it is skipped and
   counted in tt_stats.skipped, and the logger gets one warning. tt_fit fails after 10 skipped steps in a row,
   or as many as an epoch has. tt_fit also fails at the end of an epoch whose last steps were not finite, if
   its validation is not finite either, or if there is no validation and the loss has diverged.
   If none of the skipped steps had a target, a resumed run continues after them. Otherwise the weights have
   most likely blown up: their state is not saved, and a run that is resumed with a lower learning rate
   continues from an earlier state. The loss has diverged if the mean of the last 4 steps is more than ten
   times the loss of the first step and exceeds it by more than 1. While the loss has diverged, states are
   written to state.diverged.safetensors beside the last good state.safetensors. A resumed run continues from
   the newer of the two files; remove state.diverged.safetensors to continue from state.safetensors.
   tt_fit refuses a run before its first step if the disk has no room for its states, or if its plan needs
   more memory than the machine can give.
   No other run can use the folder meanwhile: the folder holds run.lock, which is removed at the end. The
   run.lock of a run that was killed locks nothing.
   A run must be resumed on the data that it began with: other class names are an error, and the logger gets a
   warning for other labels, tokens or number of examples; pixels are not compared. The logger also gets a
   warning for a validation that is not finite.

   metrics.csv has a line for each step and for each validation, with the columns below. Numbers have a
   decimal point in any locale; a number that is not finite is "nan", "inf" or "-inf".
     step         optimizer steps done, without skipped ones
     epoch        from 1
     split        "train" or "validation"
     loss         mean over the targets of the step, or of all of validation; "nan", like the accuracy, for a
                  step that tt_fit skipped
     accuracy     a column for each metric of the model, under its name, over these targets; empty in a line
                  of training if the metric needs predictions
     lr           learning rate of the step. lr, grad_norm, loss_scale and skipped are empty in a line of
                  validation
     grad_norm    norm of all gradients together, before clipping; 0 for a skipped step
     loss_scale   loss scale of the next step; 1 without loss scaling
     skipped      steps skipped so far, as in tt_stats
     bytes        size of the arena: parameters, gradients, optimizer state, activations (tt_plan.bytes); of
                  several ranks, the largest
     seconds      duration of the step, including the wait for its data, or of the validation; without saving
     tokens_per_second, or images_per_second and so on, by the model's unit: over these seconds
   loss.svg draws loss, metric and learning rate over the steps. Both files are written whenever the state is.
   A resumed run keeps the lines up to its state. Columns that an older metrics.csv lacks are empty in these
   lines, and the logger gets a warning; a metrics.csv with a column that the run lacks is refused. */
tt_status tt_fit(tt_trainer *t, const tt_source *train, const tt_source *validation, const tt_fit_options *o,
                 bool *finished);
