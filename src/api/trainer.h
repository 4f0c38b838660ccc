#pragma once
#include "standard.h"
#include "context.h"
#include "program.h"
#include "tokenizer.h"
#include "data.h"
#include "models.h"

/* ------------------------------------------------------------------------------------------------ trainer */

struct tt_train_options {
    /* How its programs are made. Default: tt_compile_options_default(), but optimizer.clip_norm 1. `train`
       false: no gradients and no optimizer, for tt_evaluate, tt_forward and tt_predict. `accumulate`: a step
       may have more micro-batches than there are data ranks, as tt_loader_accumulates says. `share`: NULL. */
    tt_compile_options compile;
    tt_schedule schedule;            /* default: linear, lr 5e-5, no warm-up; total_steps (0) must be set */
    /* Of the cross-entropy that classifiers and language models are trained with, as tt_cross_entropy_options
       says; evaluations have the plain one. class_weights (the model's classes; copied; default NULL: none)
       are for classifiers, and with them the loss and the accuracy of a step are weighted means. A model of
       your own gets them, and ones where it is evaluated, in an f32 input "class_weights" of (1, classes). */
    float label_smoothing;           /* default 0 */
    const float *class_weights;
    /* The most that a micro-batch has: what tt_loader_max_seqs and tt_loader_max_tokens (text only) say. */
    int max_seqs, max_tokens;
};
tt_train_options tt_train_options_default(void);
/* Raises max_seqs and max_tokens to what the micro-batches of two sources need, and sets accumulate if steps
   of the first may have more than there are data ranks. Either may be NULL. */
void tt_train_options_make_room(tt_train_options *o, const tt_source *train, const tt_source *validation);

typedef struct tt_trainer tt_trainer;

/* Records, compiles and plans a training and an evaluation program in one arena. All contradictions of the
   options are reported in one message. Nothing is allocated yet. NULL on error. */
tt_trainer *tt_trainer_new(tt_context *ctx, const tt_model *model, const tt_train_options *o);
void tt_trainer_free(tt_trainer *t);
/* tt_wait of the training program, for tt_train_batch without stats. */
tt_status tt_trainer_wait(tt_trainer *t, tt_stats *stats);
/* Returns the largest max_seqs, up to `most`, with which a trainer of these options fits their memory_budget,
   in the way of tt_largest_batch. o->max_tokens / o->max_seqs tokens come with each sequence. Whether steps
   become larger or have fewer micro-batches is the caller's choice: other micro-batches train other bits. */
int tt_largest_micro_batch(tt_context *ctx, const tt_model *model, const tt_train_options *o, int most);
const tt_program *tt_trainer_program(const tt_trainer *t); /* that trains, or the only one, for its plan */
int64_t tt_trainer_steps(const tt_trainer *t);             /* tt_program_steps of that */
/* Steps in the state last saved or loaded, here or by tt_fit, where a resumed run goes on; -1: none. */
int64_t tt_trainer_saved_steps(const tt_trainer *t);
/* Bytes of the tensors in a state of this trainer, and in *parameters (may be NULL) of the trained parameters
   among them. 0: it does not train, or there is no memory to count. */
size_t tt_trainer_state_bytes(const tt_trainer *t, size_t *parameters);
/* Returns that of the next step: the schedule at tt_trainer_steps, which a skipped step does not move. */
float tt_trainer_lr(const tt_trainer *t);

/* Forward and backward of a micro-batch, and the update when it is the last of its step: then *updated is
   true, also where loss scaling skipped the update. stats covers the micro-batches of the step so far. When
   one fails, its step updates nothing: its other micro-batches are refused, up to the last.
   With several data ranks, micro-batch m of a step is copied to data rank m % data. All run once each has
   one, or behind the last of the step; stats covers those that have run, and is 0 before the first have.
   While some wait, the trainer can neither evaluate nor predict. A pipeline runs all micro-batches of a step
   behind its last, and can evaluate before.
   stats may be NULL; then the call may return before the step is done, as tt_step does, and what it has found
   shows one step later or in tt_trainer_wait. */
tt_status tt_train_batch(tt_trainer *t, const tt_batch *batch, tt_stats *stats, bool *updated);
/* Adds a batch to an evaluation: stats covers all batches since it was zeroed (loss: over their targets). The
   batch is run at once, on data rank 0; tt_evaluate deals its batches out to all of them. */
tt_status tt_evaluate_batch(tt_trainer *t, const tt_batch *batch, tt_stats *stats);
/* Mean loss, targets and hits over epoch 0 of the source, which must have a target that counts: the same bits
   for any number of data ranks. */
tt_status tt_evaluate(tt_trainer *t, const tt_source *source, tt_stats *stats);
/* Evaluates a model that has classes as tt_evaluate does, and writes its confusion matrix, counts (classes,
   classes): counts[i * classes + j] examples of class i are taken for class j. The prediction is the largest
   logit, the first of equal ones. Batches must have "labels". stats may be NULL. TT_ERR_ARGUMENT: the model
   has no classes or a batch no labels; else the errors of tt_evaluate. */
tt_status tt_confusion(tt_trainer *t, const tt_source *source, tt_stats *stats, int64_t *counts);
/* The model's output for a batch, as tt_get gives it, computed on data rank 0. What only the loss reads, as
   labels, may be missing. */
tt_status tt_forward(tt_trainer *t, const tt_batch *batch, float *to, size_t capacity);
/* Class probabilities of a batch, of a model that has classes: (seqs, classes). Else as tt_forward. */
tt_status tt_predict(tt_trainer *t, const tt_batch *batch, float *probabilities);
/* The same for one text (cut to the model's length): `classes` probabilities. */
tt_status tt_predict_text(tt_trainer *t, const tt_tokenizer *k, const char *text, float *probabilities);

/* Where a run stands: stored with the state, for the caller to go on from. */
typedef struct tt_progress {
    int64_t epoch, step;          /* the next step of the shuffled data */
    double loss_sum, targets, correct; /* of the epoch so far */
    double best, best_loss;       /* of the best validation so far: what tells the best, and the loss */
    uint64_t best_by;             /* hash of the name of what tells the best; 0: none */
    uint64_t classes, data;       /* hashes of the class names and of the examples, see tt_fit; 0: none */
} tt_progress;

/* tt_program_save and tt_program_load of the training program, with the progress (NULL: none) and the
   schedule: the logger is warned of another schedule too. */
tt_status tt_trainer_save(tt_trainer *t, const char *path, const tt_progress *progress);
tt_status tt_trainer_load(tt_trainer *t, const char *path, tt_progress *progress);

/* Where tt_fit stands, after each step and each validation. */
typedef struct tt_fit_event {
    int64_t epoch, epochs;         /* epoch counts from 0 */
    int64_t step, steps;           /* steps done of this epoch; of an epoch */
    double loss;                   /* mean over this epoch so far */
    const char *metric_name;       /* the model's metric; NULL: it has none */
    double metric;                 /* of this epoch so far; of validation, where there is one */
    const char *unit;              /* "tokens", "images", ... */
    double per_second;             /* of these, since tt_fit began, validation left out */
    double of_peak;                /* matmuls' and attention's share of tt_measured_peak; 0: unknown */
    double seconds_left;           /* of all epochs, validation left out */
    const tt_stats *validation;    /* after the last step of an epoch; else NULL */
    bool best;                     /* it is the best so far, and `keep` has been called */
} tt_fit_event;

/* Writes an event as one line for a progress display, without a newline. Where capacity has no room for the
   whole line, its bar is shorter, then fields before the last are left out, and then it is cut. Returns as
   tt_plan_text. */
size_t tt_fit_text(const tt_fit_event *e, char *to, size_t capacity);

typedef struct tt_fit_options {
    int64_t epochs;                /* default 1 */
    const char *folder;            /* where state.safetensors, metrics.csv and loss.svg (see tt_fit) are
                                      written, made if need be. Default NULL: none of these */
    bool resume;                   /* go on from the state in folder; else one that holds one is refused */
    double save_seconds;           /* the state is saved after each epoch, and so often in one. Default 300 */
    const volatile int *stop;      /* not 0: stop after the step or the batch of validation at hand; a signal
                                      handler may set it (sig_atomic_t). Default NULL */
    const char *best_by;           /* what tells the best validation: "loss", or the model's metric by name,
                                      ties by loss. Default NULL: the metric, or else the loss */
    /* Save the model: an epoch is over whose validation is the best so far, or, without validation, any. The
       folder holds a state by then, so that a run that is killed here can be resumed. A failure ends tt_fit
       with that status, and a resumed run calls `keep` for this epoch again. Default NULL. */
    tt_status (*keep)(void *user);
    void (*report)(void *user, const tt_fit_event *event);
    void *user;
} tt_fit_options;
tt_fit_options tt_fit_options_default(void);

/* Trains over epochs of `train`, each followed by an evaluation on `validation` (NULL: none). *finished: all
   epochs are done; else it was stopped, or failed, and the state of the last whole step is saved, to be
   resumed bit for bit. Saving can fail too: tt_trainer_saved_steps says from which step a resumed run would
   go on.
   A step that has no target, or whose loss or gradient is not finite, updates nothing: it is skipped, which
   the logger is warned of once, and counted in tt_stats.skipped. After 10 in a row, or as many as an epoch
   has, tt_fit fails; so it does at the end of an epoch whose last steps were not finite, if its validation is
   not finite either, or there is none and the loss has diverged.
   Where none of them had a target, a resumed run goes on behind them. Else the weights have most likely blown
   up: their state is not kept, and a run that is resumed with a lower learning rate goes on from an earlier
   one. While the loss has diverged, as the mean of the last 4 steps is more than ten times the loss of the
   first step, and 1 more than that, states are written to state.diverged.safetensors beside the last good
   state.safetensors. A resumed run goes on from the newer of the two; remove the first to go on from the
   second.
   A run for whose states the disk has no room is refused before its first step, and so is one whose plan
   needs more memory of the machine than can be had.
   No other run can use the folder meanwhile: it holds run.lock, a file that is removed at the end, and that
   of a run that was killed locks nothing any more.
   A run is resumed on the data that it began with: other names of classes are an error, and the logger is
   warned of other labels, tokens or number of examples; pixels are not compared. It is also warned of a
   validation that is not finite.

   metrics.csv has a line for each step and for each validation, and these columns. Numbers are written with a
   decimal point in any locale; one that is not finite is "nan", "inf" or "-inf".
     step         optimizer steps done, which those that were skipped are not
     epoch        from 1
     split        "train" or "validation"
     loss         mean over the targets of the step, or of all of validation; "nan", like the accuracy, of a
                  step that tt_fit skipped
     accuracy     or what else the model's metric is called: of these targets. Left out where it has none
     lr           learning rate of the step. This and the next three are empty in a line of validation
     grad_norm    norm of all gradients together, before clipping; 0 where the step was skipped
     loss_scale   of the next step; 1 without loss scaling
     skipped      steps skipped so far, as in tt_stats
     bytes        of the arena: parameters, gradients, optimizer state, activations (tt_plan.bytes); of
                  several ranks, those of the one with most
     seconds      that the step, waiting for its data included, or the validation took; saving is not counted
     tokens_per_second, or images_per_second and so on, as the model's unit is: over these seconds
   loss.svg draws loss, metric and learning rate over the steps. Both files are written whenever the state
   is. A resumed run keeps the lines up to its state; a metrics.csv with other columns is refused. */
tt_status tt_fit(tt_trainer *t, const tt_source *train, const tt_source *validation, const tt_fit_options *o,
                 bool *finished);
