#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/optimizers/rules.h"
#include "../passes/update.h"
#include "../ranks/processes.h"
#include "../context/memory.h"
#include "../context/params.h"
#include "../compile/program.h"
#include "../compile/settings.h"
#include "../compile/compile.h"
#include "../compile/batch.h"
#include "../run/ranks.h"
#include "../run/inputs.h"
#include "../run/pipeline.h"
#include "../run/state.h"
#include "../files/utf8.h"
#include "../data/windows.h"
#include "grad_cache.h"
#include "features.h"
#include "teacher.h"

/* -------------------------------------------------------------------------------------------------- trainer
   Learning-rate schedules, and the training steps of a trainer. */

struct tt_trainer {
    tt_context *ctx;
    tt_model model;
    tt_train_options options;
    tt_program *train, *eval;
    /* The next two fields are NULL without features_once. With features_once, `train` and `head` read
       features, `head` evaluates, and `eval` computes the features and everything after them. */
    tt__features *features;
    tt_program *head;
    bool by_features; /* evaluations use `head` */
    int data;         /* number of data ranks, over which micro-batches are distributed */
    int staged;       /* number of data ranks, from 0 on, that have a micro-batch for the next round */
    tt_stats so_far;  /* statistics of the step's rounds that have run, if the caller passes stats */
    bool uses_ema;    /* the parameters hold their moving averages, and the averages hold the parameters */
    bool step_failed; /* a micro-batch failed: the later micro-batches of its step are refused */
    tt__grad_cache *cache; /* NULL: options.step_seqs is 0 */
    int64_t saved_steps; /* number of steps of the last state; -1: no state */
    uint64_t reference;  /* hash of the model that computed the reference of pairs of answers; 0: none */
    tt_value output;
    int64_t output_width;
    tt_input_info *inputs; /* the `n_inputs` inputs of the model */
    int n_inputs;
    int64_t *rows;    /* for each input: its number of rows in the current batch; 0: not set yet */
    bool *needed;     /* for each value: the output depends on it. Predictions set other inputs to 0 */
    int32_t *positions, *seq_start; /* for max_seqs sequences of max_length rows, if model.same_length */
    int32_t *last; /* for max_seqs sequences: their last rows; NULL: the model has no input "last" */
    float *class_weights; /* (2, classes). Row 0: the options' weights; row 1: ones, for evaluation. NULL: no
                             weights */
    tt__teacher_inputs taught; /* the teacher's inputs of a batch; NULL: no teacher, or no such input */
    int64_t teacher_ids; /* rows of the table of tokens of options.teacher_model; 0: none */
    void *zeros; /* zeros: the data that predictions set for inputs that only the loss reads; as large as the
                    largest of these inputs */
};

float tt_schedule_lr(const tt_schedule *s, int64_t step)
{
    if (s->lr_at) return s->lr_at(s->user, step);
    if (step < s->warmup_steps) return (float)((double)s->lr * (double)step / (double)s->warmup_steps);
    if (s->kind == TT_CONSTANT) return s->lr;
    const int64_t falls = s->kind >= TT_WSD ? s->decay_steps : s->total_steps - s->warmup_steps;
    double left = (double)(s->total_steps - step) / (double)tt__max(1, falls);
    left = left < 0 ? 0 : left > 1 ? 1 : left;
    if (s->kind == TT_COSINE) left = 0.5 * (1 - tt__cos(3.14159265358979323846 * left));
    if (s->kind == TT_WSD_SQRT) left = 1 - sqrt(1 - left);
    return (float)(s->min_lr + ((double)s->lr - s->min_lr) * left);
}

tt_train_options tt_train_options_default(void)
{
    tt_train_options o;
    memset(&o, 0, sizeof o);
    o.compile = tt_compile_options_default();
    o.compile.optimizer.clip_norm = 1;
    o.schedule.kind = TT_LINEAR;
    o.schedule.lr = 5e-5f;
    o.temperature = 0.05f;
    o.beta = 0.1f;
    o.teacher_weight = 0.5f;
    o.teacher_temperature = 2;
    return o;
}

void tt_train_options_make_room(tt_train_options *o, const tt_source *train, const tt_source *validation)
{
    for (int k = 0; k < 2; k++) {
        const tt_source *s = k ? validation : train;
        if (s && s->max_seqs > o->max_seqs) o->max_seqs = s->max_seqs;
        if (s && s->max_tokens > o->max_tokens) o->max_tokens = s->max_tokens;
        if (s && s->max_masked > o->max_masked) o->max_masked = s->max_masked;
    }
    if (train && train->accumulates) o->compile.accumulate = true;
}

/* Returns whether a name may be the heading of a column of metrics.csv. */
static bool tt__is_column(const char *name)
{
    const char *letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    const size_t n = strlen(name);
    return n > 0 && n < 32 && strspn(name, letters) == n;
}

/* Appends a sentence to *all for each error of a schedule. train: the schedule is used. */
static void tt__check_schedule(const tt_schedule *s, bool train, tt__text_buffer *all)
{
    const bool decays = s->kind != TT_CONSTANT, wsd = s->kind == TT_WSD || s->kind == TT_WSD_SQRT;
    if (s->lr_at) return;
    if (!(s->lr >= 0) || !isfinite(s->lr))
        tt__print(all, "; lr is %g, but must be a finite number of at least 0", s->lr);
    if (!(s->min_lr >= 0) || s->min_lr > s->lr)
        tt__print(all, "; min_lr is %g, but must be 0 to lr", s->min_lr);
    if (!tt_option_word("schedule", (int)s->kind))
        tt__print(all, "; the schedule's kind is %d, but must be one of tt_schedule_kind", (int)s->kind);
    if (s->warmup_steps < 0)
        tt__print(all, "; warmup_steps is %lld, but must be at least 0", (long long)s->warmup_steps);
    if (train && decays && s->total_steps < 1)
        tt__print(all, "; total_steps must be set for a schedule that decays");
    if (decays && s->total_steps >= 1 && s->warmup_steps > s->total_steps)
        tt__print(all, "; warmup_steps is %lld, but must be at most total_steps, %lld",
                  (long long)s->warmup_steps, (long long)s->total_steps);
    else if (train && wsd && (s->decay_steps < 1 || s->decay_steps > s->total_steps - s->warmup_steps))
        tt__print(all, "; decay_steps is %lld, but with schedule wsd must be 1 to total_steps - "
                  "warmup_steps, %lld", (long long)s->decay_steps,
                  (long long)(s->total_steps - s->warmup_steps));
}

/* Returns whether the output of a task has a row for each example, so that a teacher can give rows. */
static bool tt__can_teach(tt_task task)
{
    return task == TT_TASK_CLASS || task == TT_TASK_LABELS || task == TT_TASK_SCORES;
}

/* Appends a sentence to *all for each error of the options of a teacher. */
static void tt__check_teacher(const tt_model *model, const tt_train_options *o, tt__text_buffer *all)
{
    const tt_model *beside = o->teacher_model;
    if (!(o->hidden_weight >= 0 && isfinite(o->hidden_weight)) || (o->hidden_weight > 0 && !beside))
        tt__print(all, "; {hidden_weight} is %g, but must be a finite number of at least 0, and 0 without "
                  "{teacher_model}", o->hidden_weight);
    if (!o->teacher && !beside) return;
    if (o->teacher && beside)
        tt__print(all, "; teacher and {teacher_model} are both set: set one of them");
    if (beside && (!tt__can_teach(model->task) || !model->classes || o->compile.parallel.pipeline > 1))
        tt__print(all, "; {teacher_model} is for models of classes, labels or scores, and not for pipelines");
    if (beside && (beside->same_length != model->same_length ||
                   (model->same_length && beside->max_length != model->max_length)))
        tt__print(all, "; the examples of {teacher_model} have %d rows and those of the model %d: both must "
                  "read the same batches", beside->max_length, model->max_length);
    if (!(o->teacher_weight >= 0 && o->teacher_weight <= 1))
        tt__print(all, "; teacher_weight is %g, but must be 0 to 1", o->teacher_weight);
    if (!(o->teacher_temperature > 0 && isfinite(o->teacher_temperature)))
        tt__print(all, "; teacher_temperature is %g, but must be a finite number above 0",
                  o->teacher_temperature);
    const tt_task task = beside ? beside->task : o->teacher->task;
    const int64_t classes = beside ? beside->classes : o->teacher->classes;
    if (model->task != task || model->classes != classes)
        tt__print(all, "; the teacher's logits have %lld columns, for task %d of tt_task, but the model's "
                  "have %d, for task %d: both must be equal", (long long)classes, (int)task, model->classes,
                  (int)model->task);
}

static tt_status tt__check_train_options(tt_context *ctx, const tt_model *model, const tt_train_options *o)
{
    char text[1024];
    tt__text_buffer all = {text, sizeof text, 0};
    tt__settings settings;
    tt__check_schedule(&o->schedule, o->compile.train, &all);
    const tt_optimizer_options *u = &o->compile.optimizer;
    if (u->prune > 0 && o->schedule.total_steps >= 1 && u->prune_end >= o->schedule.total_steps)
        tt__print(&all, "; prune_end is step %lld, in which %g of the weights are pruned, but the training "
                  "ends after %lld steps: set prune_end well before that", (long long)u->prune_end, u->prune,
                  (long long)o->schedule.total_steps);
    if (o->max_seqs < 1)
        tt__print(&all,
                  "; max_seqs is %d, but must be at least 1: set it, for example from tt_loader_max_seqs",
                  o->max_seqs);
    if (model->max_length && !model->same_length && o->max_tokens < o->max_seqs)
        tt__print(&all, "; max_tokens is %d, but must be at least max_seqs, %d", o->max_tokens, o->max_seqs);
    if (o->max_masked < 0)
        tt__print(&all, "; max_masked is %d, but must be 0 (max_tokens) or more", o->max_masked);
    if (!model->record) tt__print(&all, "; the model has no function `record`: set it");
    for (int k = 0; k < TT_METRICS && model->metrics[k].name; k++) {
        const tt_metric *x = &model->metrics[k];
        const bool predicts = model->classes || model->task == TT_TASK_EMBED;
        const bool found = x->of || (x->of_predictions && predicts);
        bool named = tt__is_column(x->name) && strcmp(x->name, "loss") != 0;
        for (int j = 0; j < k; j++) named = named && strcmp(x->name, model->metrics[j].name) != 0;
        if (!found)
            tt__print(&all, "; the model's metric '%.32s' has no function, or has of_predictions in a model "
                      "without `classes`: set one", x->name);
        if (!named)
            tt__print(&all, "; the model's metric '%.32s' must have a name of its own of 1 to 31 letters, "
                      "digits, _ and - other than 'loss'", x->name);
    }
    if (model->unit && !tt__is_column(model->unit))
        tt__print(&all, "; the model's unit is '%.32s', but must be 1 to 31 letters, digits, _ and -",
                  model->unit);
    if (!(o->label_smoothing >= 0 && o->label_smoothing < 1))
        tt__print(&all, "; {label_smoothing} is %g, but must be in [0, 1)", o->label_smoothing);
    if (!(o->temperature > 0 && isfinite(o->temperature)))
        tt__print(&all, "; {temperature = %g}; expected a finite number above 0", o->temperature);
    if (!(o->beta > 0 && isfinite(o->beta)))
        tt__print(&all, "; {beta = %g}; expected a finite number above 0", o->beta);
    if (o->step_seqs < 0 || (o->step_seqs && (model->task != TT_TASK_EMBED || !o->compile.train)))
        tt__print(&all, "; {step_seqs} is %d, but must be 0 unless a model of TT_TASK_EMBED is trained",
                  o->step_seqs);
    if (o->step_seqs && (o->compile.parallel.pipeline > 1 || o->features_once))
        tt__print(&all, "; {step_seqs} excludes %s: leave one out",
                  o->features_once ? "{features_once}" : "pipelines");
    tt__check_teacher(model, o, &all);
    double sum = 0; /* sum of the class weights */
    for (int k = 0; k < model->classes && o->class_weights; k++) {
        const float w = o->class_weights[k];
        if (!(w >= 0 && isfinite(w)))
            tt__print(&all, "; the weight of class %d is %g, but must be a finite number of at least 0", k,
                      w);
        sum += w;
    }
    if (o->class_weights && sum == 0)
        tt__print(&all,
                  model->classes ? "; the weights of all classes are 0: give at least one class a weight" :
                  "; class_weights are set, but the model has no classes");
    if (o->features_once && (model->task == TT_TASK_EMBED || model->task == TT_TASK_MASKED_LM))
        tt__print(&all, "; {features_once} excludes %s: clear it", model->task == TT_TASK_EMBED ?
                  "the task of embeddings, in which the texts of a pair share an index" :
                  "masked words, which change in each epoch");
    if (o->features_once && ctx->net)
        tt__print(&all, "; {features_once} is for one process, but this run has %d: clear it, or train with "
                  "several ranks of one process", tt_processes(ctx));
    if (o->compile.share)
        tt__print(&all, "; compile.share is set, but a trainer needs an arena of its own: leave it NULL");
    if (tt__parse_settings(ctx, &o->compile, &settings) != TT_OK) tt__print(&all, "; %s", ctx->error);
    else if (o->step_seqs && settings.scales)
        tt__print(&all, "; {step_seqs} excludes loss scaling: use {precision 'bf16-mixed'}");
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "train options: %s", text + 2) : TT_OK;
}

/* Sets r->inputs, and r->needed from tape t, from which the programs were compiled. */
static tt_status tt__trainer_inputs(tt_trainer *r, const tt_tape *t)
{
    const tt_program *p = r->train && !r->features ? r->train : r->eval;
    const size_t n = (size_t)(r->n_inputs = tt_program_inputs(p, NULL, 0)) + 1;
    size_t max = 0;
    r->inputs = (tt_input_info *)tt__alloc(r->ctx, sizeof *r->inputs * n);
    r->rows = (int64_t *)tt__alloc(r->ctx, sizeof *r->rows * n);
    r->needed = tt__needed_for(t, r->output);
    if (!r->inputs || !r->rows || !r->needed) return TT_ERR_MEMORY;
    tt_program_inputs(p, r->inputs, r->n_inputs);
    for (int k = 0; k < r->n_inputs; k++) {
        const tt_input_info *i = &r->inputs[k];
        const size_t bytes = (size_t)i->rows * (size_t)i->width * tt_dtype_bytes(i->dtype);
        if (!r->needed[i->value.id] && bytes > max) max = bytes;
    }
    r->zeros = tt__calloc(r->ctx, max + 1);
    return r->zeros ? TT_OK : TT_ERR_MEMORY;
}

/* Compiles a program that evaluates: without label smoothing, and with the model's output. */
static tt_program *tt__compile_eval(tt_trainer *r, tt_tape *t, tt_value loss, tt__attempt *attempt)
{
    tt_compile_options o = r->options.compile;
    if (r->output.id) tt_output(t, r->output); /* training does not need the output */
    for (int k = 0; k < t->n_code && r->options.label_smoothing > 0; k++) t->code[k].attr.smoothing = 0;
    o.train = false;
    o.share = r->train;
    return tt__try_compile(t, loss, &o, attempt);
}

/* Compiles the trainer's programs from a recorded tape. root: the loss to train with; head: a copy of the
   tape that reads features; NULL: without features_once. */
static tt_status tt__trainer_programs(tt_trainer *r, tt_tape *t, tt_tape *head, tt_value root, tt_value loss,
                                      tt__attempt *attempt)
{
    const tt_compile_options *o = &r->options.compile;
    if (o->train && !(r->train = tt__try_compile(head ? head : t, root, o, attempt))) return r->ctx->status;
    for (int k = 0; head && k < r->features->count; k++) tt_output(t, r->features->value[k]);
    if (!(r->eval = tt__compile_eval(r, t, loss, attempt))) return r->ctx->status;
    if (head && !(r->head = tt__compile_eval(r, head, loss, attempt))) return r->ctx->status;
    return TT_OK;
}

static tt_status tt__trainer_compile(tt_trainer *r, tt_tape *t, tt__attempt *attempt)
{
    const tt_train_options *o = &r->options;
    const bool once = o->compile.train && o->features_once;
    const bool beside = o->compile.train && o->teacher_model;
    tt_value taught = {0, 0};
    tt__recorded teacher = {0, 0, 0, 0}, student;
    tt_tape *head = NULL;
    if (beside) teacher = tt__record_teacher(t, o, &taught);
    r->teacher_ids = tt__recorded_ids(t, &teacher);
    student.first_value = t->n_values;
    tt_value loss = r->model.record(r->model.self, t, o, &r->output), root = loss;
    student.end_value = t->n_values;
    r->output_width = tt_value_width(t, r->output);
    if (o->step_seqs) root = tt__surrogate_loss(t, r->output);
    if (o->compile.train && (o->teacher || beside))
        root = tt__taught_loss(t, r->model.task, r->output, taught, loss, o);
    if (beside && o->hidden_weight > 0)
        root = tt__add_hidden(t, root, &teacher, &student, tt_value_axis(t, r->output), o);
    if (beside && tt__freeze_teacher(t, &teacher) != TT_OK) return r->ctx->status;
    if (once && t->status == TT_OK && !(r->features = tt__features_new(t, r->output, &head)))
        return r->ctx->status;
    tt_status status = tt__trainer_programs(r, t, head, root, loss, attempt);
    tt_tape_free(head);
    if (status == TT_OK && r->options.step_seqs)
        status = tt__grad_cache_new(r->ctx, t, r->output, &r->options, r->train, attempt, &r->cache);
    if (status != TT_OK) return status;
    r->data = r->eval->arena->data;
    if (r->model.classes && r->output_width != r->model.classes)
        return tt__fail(r->ctx, TT_ERR_SHAPE,
                        "the model has %d classes, but its output has a width of %lld: make them equal",
                        r->model.classes, (long long)r->output_width);
    return tt__trainer_inputs(r, t);
}

enum { TT__STATE_NAME = 170 }; /* max bytes of a parameter's name in a state */

/* A value that a saved state contains. state: 0 for a parameter; else tt__tape_value.state. stage: the first
   pipeline stage that has the value. */
typedef struct tt__kept { int32_t value; int param, state, stage; char name[192]; } tt__kept;

/* Fails if the name of a parameter cannot be stored in a state. */
static tt_status tt__check_kept(const tt_param *param)
{
    const char *name = param->name, *taken = tt__match("tinytrain.*", name) ? "tinytrain" : NULL;
    if (tt__match("ema.*", name)) taken = "ema";
    if (tt__match("pruned.*", name)) taken = "pruned";
    if (tt__match("movement.*", name)) taken = "movement";
    for (int k = 0; k < TT__COUNT(tt__optimizers) * TT__STATES; k++) {
        const char *word = tt__optimizers[k / TT__STATES].state[k % TT__STATES].word;
        const size_t n = word ? strlen(word) : 0;
        const bool begins = n && strncmp(name, word, n) == 0;
        if (begins && (name[n] == '.' || tt__match("_scale.*", name + n))) taken = word;
    }
    if (!taken && strcmp(name, "__metadata__") != 0 && strlen(name) <= TT__STATE_NAME &&
        tt__utf8_invalid(name, strlen(name)) == strlen(name)) return TT_OK;
    return tt__fail(param->ctx, TT_ERR_ARGUMENT, "the state of a run cannot be saved with the parameter "
                    "'%.200s', whose name has %zu bytes: a name must be UTF-8 of at most %d bytes, not "
                    "'__metadata__', and not begin with '%s.'", name, strlen(name), TT__STATE_NAME,
                    taken ? taken : "tinytrain");
}

/* Returns whether value v is persistent, has the given storage, and is not a view. */
static bool tt__has_kept(const tt_tape *t, int32_t v, tt__storage storage)
{
    const tt__tape_value *x = &t->values[v];
    return v && x->storage == storage && x->base == v && x->persistent;
}

/* Returns the value of a stage that entry *x of a state describes. Returns 0 if the stage lacks the value. */
static int32_t tt__kept_in(const tt_program *p, int stage, const tt__kept *x)
{
    const tt_tape *t = p->stage[stage]->built.t;
    if (!x->state) return tt__has_kept(t, x->value, TT__PARAMETER) ? x->value : 0;
    for (int32_t v = 1; v < t->n_values; v++)
        if (tt__has_kept(t, v, TT__STATE) && t->values[v].param == x->param && t->values[v].state == x->state)
            return v;
    return 0;
}

/* Appends a program's trained or, if `frozen`, its frozen parameters to the *n entries of `kept`. */
static tt_status tt__keep_params(const tt_program *p, bool frozen, tt__kept *kept, int *n)
{
    tt_status status = TT_OK;
    for (int32_t v = 1; v < p->n_recorded && status == TT_OK; v++) {
        tt__kept x = {v, p->built.t->values[v].param, 0, 0, ""};
        if (p->built.t->values[v].needs_grad == frozen) continue;
        while (x.stage < p->stages && !tt__kept_in(p, x.stage, &x)) x.stage++;
        if (x.stage == p->stages) continue;
        status = tt__check_kept(p->ctx->params[x.param]);
        snprintf(x.name, sizeof x.name, "%.170s", p->ctx->params[x.param]->name);
        kept[(*n)++] = x;
    }
    return status;
}

/* Returns the list of the entries of a program's state. The first *count entries are the trained parameters
   and then the optimizer's states, whose names begin as in PyTorch (such as "exp_avg"). The next *frozen
   entries are frozen parameters. Returns NULL after an error. The caller frees the list. */
static tt__kept *tt__kept_of(const tt_program *p, int *count, int *frozen)
{
    const tt_optimizer_options *o = &p->settings.options.optimizer;
    const size_t max = (size_t)((1 + TT__MOVEMENT) * p->ctx->n_params + 1);
    tt__kept *kept = (tt__kept *)tt__calloc(p->ctx, sizeof *kept * max);
    int n = 0;
    tt_status status = kept ? tt__keep_params(p, false, kept, &n) : TT_ERR_MEMORY;
    for (int k = 0, params = n; k < params && status == TT_OK; k++)
        for (int state = 1; state <= TT__MOVEMENT; state++) {
            tt__kept x = kept[k];
            x.state = state;
            if (!(x.value = tt__kept_in(p, x.stage, &x))) continue;
            const tt__optimizer *how = tt__optimizer_of(p->ctx, o, x.param);
            snprintf(x.name, sizeof x.name, "%s%s.%.170s",
                     state == TT__EMA ? "ema" : state == TT__PRUNED ? "pruned"
                     : state == TT__MOVEMENT ? "movement" : how->state[(state - 1) % TT__STATES].word,
                     state > TT__STATES && state < TT__EMA ? "_scale" : "", p->ctx->params[x.param]->name);
            kept[n++] = x;
        }
    *count = n;
    if (status == TT_OK) status = tt__keep_params(p, true, kept, &n);
    *frozen = n - *count;
    if (status == TT_OK) return kept;
    tt__free(p->ctx, kept);
    return NULL;
}

/* Returns how the ranks of an arena store x, a parameter or an optimizer state. */
static tt__stored tt__kept_stored(const tt_context *ctx, const tt__tape_value *x, const tt__arena *a)
{
    tt__stored s = tt__stored_of(ctx->params[x->param], &x->part, a);
    if (!x->row_state) return s;
    /* Each tensor rank has its own row, the scales of its shard. */
    s.rows = x->part.split == TT__WHOLE ? 1 : a->tensor;
    s.cols = x->part.unit ? x->part.of : x->shape.cols;
    if (x->part.split != TT__WHOLE) s.part.split = TT__ROWS;
    return s;
}

/* Continues *hash with some values of a parameter: of its source if `initial`, else of its memory. */
static tt_status tt__param_hash(const tt_param *p, bool initial, uint64_t *hash)
{
    enum { PLACES = 16, EACH = 32 };
    float values[EACH];
    tt_status status = TT_OK;
    const int64_t n = tt__min(p->size, EACH);
    for (int64_t at = 0; at < PLACES && status == TT_OK; at++) {
        const int64_t first = (p->size - n) * at / (PLACES - 1) & ~(int64_t)3;
        status = initial ? p->read(p->source, first, n, values) : tt__param_read(p, first, n, values);
        if (status == TT_OK) *hash = tt__hash_on(*hash, values, sizeof *values * (size_t)n);
    }
    return status;
}

/* Sets *hash to a hash of some values of each parameter whose initial values come from a source such as a
   file. Processes compare the hashes to find different weights. */
static tt_status tt__values_hash(tt_context *ctx, uint64_t *hash)
{
    tt_status status = TT_OK;
    *hash = TT__HASH_BEGIN;
    for (int k = 0; k < ctx->n_params && status == TT_OK; k++)
        if (ctx->params[k]->read) status = tt__param_hash(ctx->params[k], true, hash);
    return status;
}

/* Returns whether a program, or one of its stages, reads parameter number `param`. */
static bool tt__reads_param(const tt_program *p, int param)
{
    for (int stage = 0; stage < p->stages; stage++) {
        const tt_tape *t = p->stage[stage]->built.t;
        for (int32_t v = 1; v < t->n_values; v++)
            if (t->values[v].storage == TT__PARAMETER && t->values[v].param == param) return true;
    }
    return false;
}

/* Sets *hash to a hash of the names, the sizes and some values of the parameters that a trainer's model has
   now. Allocates their memory. */
static tt_status tt__model_hash(const tt_trainer *r, uint64_t *hash)
{
    tt_context *ctx = r->ctx;
    tt_status status = tt_allocate(r->eval);
    *hash = TT__HASH_BEGIN;
    for (int k = 0; k < ctx->n_params && status == TT_OK; k++) {
        const tt_param *p = ctx->params[k];
        if (!tt__reads_param(r->eval, k)) continue;
        *hash = tt__hash_on(*hash, p->name, strlen(p->name) + 1);
        *hash = tt__hash_on(*hash, &p->size, sizeof p->size);
        status = tt__param_hash(p, false, hash);
    }
    return status;
}

/* Returns the index of the input `name`, or -1 if the model has no such input. */
static int tt__input_named(const tt_trainer *r, const char *name)
{
    for (int k = 0; k < r->n_inputs; k++) if (strcmp(r->inputs[k].name, name) == 0) return k;
    return -1;
}

/* Computes r->positions and r->seq_start for sequences of equal length. */
static tt_status tt__length_rows(tt_trainer *r)
{
    const int64_t seqs = r->options.max_seqs, length = r->model.max_length;
    r->positions = (int32_t *)tt__alloc(r->ctx, sizeof(int32_t) * (size_t)seqs * (size_t)length);
    r->seq_start = (int32_t *)tt__alloc(r->ctx, sizeof(int32_t) * ((size_t)seqs + 1));
    if (!r->positions || !r->seq_start) return TT_ERR_MEMORY;
    for (int64_t k = 0; k < seqs * length; k++) r->positions[k] = (int32_t)(k % length);
    for (int64_t k = 0; k <= seqs; k++) r->seq_start[k] = (int32_t)(k * length);
    return TT_OK;
}

static tt_status tt__keep_class_weights(tt_trainer *r)
{
    const int classes = r->model.classes;
    r->class_weights = (float *)tt__alloc(r->ctx, sizeof(float) * 2 * (size_t)classes);
    if (!r->class_weights) return TT_ERR_MEMORY;
    for (int c = 0; c < classes; c++) {
        r->class_weights[c] = r->options.class_weights[c];
        r->class_weights[classes + c] = 1;
    }
    r->options.class_weights = r->class_weights;
    for (int k = 0; k < r->n_inputs; k++)
        if (strcmp(r->inputs[k].name, "class_weights") == 0) return TT_OK;
    return tt__fail(r->ctx, TT_ERR_ARGUMENT,
                    "train options: class_weights are set, but the model has no input 'class_weights'");
}

/* Allocates the memory for a teacher's inputs. */
static tt_status tt__taught_room(tt_trainer *r)
{
    const size_t seqs = (size_t)r->options.max_seqs, tokens = r->model.same_length ?
                        seqs * (size_t)r->model.max_length : (size_t)tt__max(r->options.max_tokens, 1);
    const bool by_token = tt__input_named(r, TT__TEACHER_TOKENS) >= 0;
    float *all = (float *)tt__alloc(r->ctx, sizeof *all * (seqs * ((size_t)r->output_width + 1) + tokens));
    if (!all) return TT_ERR_MEMORY;
    r->taught.target = all;
    r->taught.weights = all + seqs * (size_t)r->output_width;
    r->taught.tokens = by_token ? r->taught.weights + seqs : NULL;
    return TT_OK;
}

static tt_trainer *tt__try_trainer(tt_context *ctx, const tt_model *model, const tt_train_options *options,
                                   tt__attempt *attempt)
{
    tt_train_options o = options ? *options : tt_train_options_default();
    if (!o.compile.precision) o.compile.precision = "32-true";
    if (o.step_seqs > 0) o.compile.accumulate = true;
    if (tt__check_train_options(ctx, model, &o) != TT_OK) return NULL;
    tt_trainer *r = (tt_trainer *)tt__calloc(ctx, sizeof *r);
    if (!r) return NULL;
    r->ctx = ctx;
    r->model = *model;
    r->options = o;
    r->saved_steps = -1;
    tt_tape *t = tt_tape_new(ctx);
    tt_status status = t ? tt__trainer_compile(r, t, attempt) : TT_ERR_MEMORY;
    tt_tape_free(t);
    int count = 0, frozen;
    tt__kept *kept = status == TT_OK && r->train ? tt__kept_of(r->train, &count, &frozen) : NULL;
    if (status == TT_OK && r->train && !kept) status = ctx->status; /* a state cannot be saved */
    tt__free(ctx, kept);
    if (status == TT_OK && model->same_length) status = tt__length_rows(r);
    const bool last = status == TT_OK && tt__input_named(r, "last") >= 0;
    if (last) r->last = (int32_t *)tt__alloc(ctx, sizeof *r->last * (size_t)o.max_seqs);
    if (last && !r->last) status = TT_ERR_MEMORY;
    if (status == TT_OK && o.class_weights) status = tt__keep_class_weights(r);
    if (status == TT_OK && r->train && (o.teacher || o.teacher_model)) status = tt__taught_room(r);
    char lines[TT__NOTE] = {0}, lr[32], min[32]; /* lines: the settings that all processes must share */
    if (o.schedule.lr_at) snprintf(lines, sizeof lines, "schedule lr_at\n");
    else
        snprintf(lines, sizeof lines,
                 "schedule %s with lr %s, min_lr %s, warmup_steps %lld, decay_steps %lld, "
                 "total_steps %lld\n", tt_option_word("schedule", (int)o.schedule.kind),
                 tt__shortest(o.schedule.lr, lr), tt__shortest(o.schedule.min_lr, min),
                 (long long)o.schedule.warmup_steps, (long long)o.schedule.decay_steps,
                 (long long)o.schedule.total_steps);
    uint64_t hash = 0;
    if (status == TT_OK && ctx->net) status = tt__values_hash(ctx, &hash);
    snprintf(lines + strlen(lines), sizeof lines - strlen(lines), "parameters whose values have the hash "
             "%016llx\n", (unsigned long long)hash);
    if (status == TT_OK && o.class_weights)
        snprintf(lines + strlen(lines), sizeof lines - strlen(lines), "class_weights with the hash %016llx\n",
                 (unsigned long long)tt__hash_on(TT__HASH_BEGIN, r->class_weights,
                                                 sizeof(float) * (size_t)model->classes));
    status = tt__agree_lines(ctx, "tt_trainer_new", status, lines);
    if (status == TT_OK) return r;
    tt_trainer_free(r);
    return NULL;
}

tt_trainer *tt_trainer_new(tt_context *ctx, const tt_model *model, const tt_train_options *options)
{
    tt__attempt attempt = {false, false, false, false, 0, 0};
    return tt__try_trainer(ctx, model, options, &attempt);
}

void tt_trainer_free(tt_trainer *r)
{
    if (!r) return;
    tt__grad_cache_free(r->cache);
    tt_program_free(r->head);
    tt_program_free(r->eval);
    tt_program_free(r->train);
    tt__features_free(r->features);
    tt__free(r->ctx, r->class_weights);
    tt__free(r->ctx, r->positions);
    tt__free(r->ctx, r->last);
    tt__free(r->ctx, r->seq_start);
    tt__free(r->ctx, r->inputs);
    tt__free(r->ctx, r->rows);
    tt__free(r->ctx, r->needed);
    tt__free(r->ctx, r->taught.target);
    tt__free(r->ctx, r->zeros);
    tt__free(r->ctx, r);
}

const tt_program *tt_trainer_program(const tt_trainer *r) { return r->train ? r->train : r->eval; }
int64_t tt_trainer_steps(const tt_trainer *r) { return r->train ? tt_program_steps(r->train) : 0; }
int64_t tt_trainer_saved_steps(const tt_trainer *r) { return r->saved_steps; }
/* The argument of tt__try_micro_batch. */
typedef struct tt__micro_batch_of {
    tt_context *ctx;
    const tt_model *model;
    tt_train_options options;
} tt__micro_batch_of;

/* Returns the max number of tokens for n sequences: `n * max_tokens / max_seqs` of the options, rounded
   up. */
static int64_t tt__tokens_of(const tt_train_options *o, int64_t n)
{
    return o->max_seqs > 0 ? (n * o->max_tokens + o->max_seqs - 1) / o->max_seqs : o->max_tokens;
}

static tt_status tt__try_micro_batch(void *arg, int64_t n, tt__attempt *attempt, size_t *bytes)
{
    const tt__micro_batch_of *b = (const tt__micro_batch_of *)arg;
    tt_train_options o = b->options;
    if (tt__tokens_of(&o, n) > INT_MAX)
        return tt__fail(b->ctx, TT_ERR_SHAPE, "%lld sequences of %d / %d tokens are 2^31 tokens or more, "
                        "which is too many: ask for fewer", (long long)n, o.max_tokens, o.max_seqs);
    o.max_masked = o.max_seqs > 0 ? (int)tt__ceil_div((int64_t)o.max_masked * n, o.max_seqs) : 0;
    o.max_tokens = (int)tt__tokens_of(&o, n);
    o.max_seqs = (int)n;
    tt_trainer *t = tt__try_trainer(b->ctx, b->model, &o, attempt);
    if (!t) return b->ctx->status;
    *bytes = tt__arena_size(tt_trainer_program(t)->arena, 0);
    tt_trainer_free(t);
    return TT_OK;
}

int tt_largest_micro_batch(tt_context *ctx, const tt_model *model, const tt_train_options *o, int max)
{
    tt__micro_batch_of b = {ctx, model, o ? *o : tt_train_options_default()};
    if (b.options.max_seqs < 1) b.options.max_seqs = 1;
    return (int)tt__largest_size(ctx, &b.options.compile, max, tt__try_micro_batch, &b);
}

float tt_trainer_lr(const tt_trainer *r) { return tt_schedule_lr(&r->options.schedule, tt_trainer_steps(r)); }

static tt_status tt__must_train(const tt_trainer *r)
{
    if (r->uses_ema)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "the trainer's parameters are their moving averages: call "
                        "tt_trainer_use_ema(trainer, false) before it trains, saves or loads");
    if (r->train) return TT_OK;
    return tt__fail(r->ctx, TT_ERR_ARGUMENT, "this trainer was made with train = false, so it only evaluates "
                    "and predicts: make one with train = true");
}

/* Fails if a batch is empty, has more sequences than max_seqs, or does not fit the model's inputs. */
static tt_status tt__check_batch(tt_trainer *r, const tt_batch *b)
{
    const int pixels = tt__input_named(r, "pixels");
    const bool same = r->model.same_length, images = pixels >= 0;
    if (!b->n_arrays && (b->seqs < 1 || (!same && r->model.max_length && b->rows < 1)))
        return tt__fail(r->ctx, TT_ERR_ARGUMENT,
                        "the batch is empty (%d sequences, %d tokens): give it at least one sequence",
                        b->seqs, b->rows);
    if (same && b->seqs > r->options.max_seqs)
        return tt__fail(r->ctx, TT_ERR_SHAPE, "the batch has %d images, but max_seqs is %d: make the trainer "
                        "for more, or the batch smaller", b->seqs, r->options.max_seqs);
    if (images != (b->pixels != NULL) && (b->pixels || b->ids))
        return tt__fail(r->ctx, TT_ERR_ARGUMENT,
                        images ? "the model reads images, but the batch has text: use a loader of images" :
                        "the model reads text, but the batch has images: use a loader of texts");
    if (images && b->pixels && b->image_bytes != r->inputs[pixels].width)
        return tt__fail(r->ctx, TT_ERR_SHAPE, "the images of the batch have %lld bytes (height * width * "
                        "channels), but the model reads images of %lld: set height and width of the loader",
                        (long long)b->image_bytes, (long long)r->inputs[pixels].width);
    const int values = tt__input_named(r, "label_values");
    if (values >= 0 && b->label_values && b->values != r->inputs[values].width)
        return tt__fail(r->ctx, TT_ERR_SHAPE, "the batch has %d label_values for each sequence, but the "
                        "model reads %lld: the dataset and the model need equally many labels or scores",
                        b->values, (long long)r->inputs[values].width);
    return TT_OK;
}

/* Sets the inputs of a data rank to the arrays of a batch. For a prediction, sets the inputs that only the
   loss reads to zeros. */
static tt_status tt__set_arrays(tt_trainer *r, tt_program *p, int rank, const tt_batch *b, bool predicting)
{
    const tt__teacher_inputs none = {NULL, NULL, NULL}, taught = p == r->train ? r->taught : none;
    const bool same = r->model.same_length;
    const int64_t rows = same ? (int64_t)b->seqs * r->model.max_length : b->rows;
    const int32_t *start = same ? r->seq_start : b->seq_start;
    const float *weights = r->class_weights;
    if (weights && p != r->train) weights += r->model.classes;
    const bool last = r->last && start && b->seqs <= r->options.max_seqs;
    for (int s = 0; s < b->seqs && last; s++) r->last[s] = start[s + 1] - 1;
    const tt_array fields[] = {
        {"pixels", b->pixels, b->seqs},
        {"ids", b->ids, rows},
        {"types", b->types, rows},
        {"positions", same ? r->positions : b->positions, rows},
        {"seq_start", start, (int64_t)b->seqs + 1},
        {"first", start, b->seqs},
        {"last", last ? r->last : NULL, b->seqs},
        {"labels", b->labels, b->seqs},
        {"label_values", b->label_values, b->seqs},
        {"tags", b->tags, rows},
        {"class_weights", weights, 1},
        {TT__TEACHER, taught.target, b->seqs},
        {TT__TEACHER_WEIGHTS, taught.weights, b->seqs},
        {TT__TEACHER_TOKENS, taught.tokens, rows}};
    const tt_array *labels = tt__array_of(b, "labels");
    const bool beside = r->options.teacher_model && !same && (p == r->train || r->features);
    tt_status status = TT_OK;
    if (beside) status = tt__teacher_reads(r->ctx, r->options.teacher_model, r->teacher_ids, b);
    if (taught.target && status == TT_OK)
        status = tt__teacher_rows(r->ctx, &r->options, r->model.task, b,
                                  labels ? (const int32_t *)labels->data : b->labels,
                                  same ? r->model.max_length : 0, &taught);
    for (int k = 0; k < r->n_inputs; k++) r->rows[k] = 0;
    for (int k = 0; k < b->n_arrays + TT__COUNT(fields) && status == TT_OK; k++) {
        const tt_array *a = k < b->n_arrays ? &b->arrays[k] : &fields[k - b->n_arrays];
        const int at = tt__input_named(r, a->input);
        if (at < 0 || r->rows[at]) continue;
        const bool zeros = predicting && !r->needed[r->inputs[at].value.id];
        if (!a->data && !zeros && tt__has_data_rank(p, rank)) continue;
        r->rows[at] = a->rows;
        if (!zeros && strcmp(a->input, TT__REFERENCE_MINUS) == 0)
            for (int64_t pair = 0; pair < a->rows; pair++)
                if (isnan(((const float *)a->data)[pair]))
                    return tt__fail(r->ctx, TT_ERR_ARGUMENT, "pair %lld of the batch has no reference: call "
                                    "tt_trainer_reference before the first step, as tt_fit does",
                                    (long long)pair);
        status = tt_set_rank(p, rank, r->inputs[at].value, zeros ? r->zeros : a->data, a->rows);
    }
    for (int k = 0; k < r->n_inputs && status == TT_OK; k++) {
        const tt_input_info *input = &r->inputs[k];
        if (r->rows[k] || !tt__reads_input(p, input->value.id)) continue;
        if (!predicting || r->needed[input->value.id])
            return tt__fail(r->ctx, TT_ERR_ARGUMENT, "the batch has no %s (NULL), which the model reads: set "
                            "it", input->name);
        int64_t as_others = 0; /* number of rows of inputs with the same axis */
        for (int j = 0; j < r->n_inputs && input->axis; j++)
            if (r->inputs[j].axis == input->axis && r->inputs[j].rows == input->rows) /* leaves out inputs of
                                                                                         sequence starts */
                as_others = tt__max(as_others, r->rows[j]);
        r->rows[k] = as_others ? as_others : input->rows;
        status = tt_set_rank(p, rank, input->value, r->zeros, r->rows[k]);
    }
    return status;
}

/* Checks a batch and sets the inputs of a data rank to its data. After an error, no rank has any inputs. */
static tt_status tt__set_batch(tt_trainer *r, tt_program *p, int rank, const tt_batch *b, bool predicting)
{
    tt_status status = tt__check_batch(r, b);
    const bool reads = r->features && p != r->eval; /* the program reads features */
    const int same = r->model.same_length ? r->model.max_length : 0;
    if (status == TT_OK) status = tt__set_arrays(r, p, rank, b, predicting);
    if (status == TT_OK && reads) status = tt__features_set(r->features, p, rank, b, same);
    if (status != TT_OK) tt__forget_inputs(p); /* the next batch may have other numbers of rows */
    return status;
}

static bool tt__trainer_within_step(const tt_trainer *r)
{
    return r->staged > 0 || tt__within_step(r->train) || (r->cache && r->cache->micros > 0);
}

/* Discards the micro-batches of the current step, also those that wait for their round to run. */
static void tt__trainer_discard_step(tt_trainer *r)
{
    tt__discard_step(r->train);
    tt__forget_inputs(r->train);
    if (r->cache) tt__grad_cache_forget(r->cache);
    r->staged = 0;
    memset(&r->so_far, 0, sizeof r->so_far);
}

/* Fails if micro-batches of training wait for their round to run, because an evaluation or prediction would
   overwrite their inputs. */
static tt_status tt__none_staged(const tt_trainer *r)
{
    if (!r->staged) return TT_OK;
    return tt__fail(r->ctx, TT_ERR_ARGUMENT, "a step is not complete, because only %d of the %d data ranks "
                    "have a micro-batch: evaluate and predict between steps", r->staged, r->data);
}

/* Runs the data ranks' micro-batches and, if they are the last of their step, updates the parameters. */
static tt_status tt__train_round(tt_trainer *r, bool last_of_step, tt_stats *stats)
{
    const float lr = tt_trainer_lr(r);
    r->staged = 0;
    if (!r->options.compile.accumulate) return tt_step(r->train, lr, stats);
    tt_status status = tt_micro_step(r->train, stats);
    if (status == TT_OK && stats) r->so_far = *stats;
    if (status == TT_OK && last_of_step) status = tt_update(r->train, lr, stats);
    if (last_of_step) memset(&r->so_far, 0, sizeof r->so_far);
    return status;
}

/* Sets the inputs of the next data rank. Runs the round if all data ranks have a micro-batch, or if this
   micro-batch is the last of its step. */
static tt_status tt__uncached_batch(tt_trainer *r, const tt_batch *b, tt_stats *stats)
{
    tt_status status = tt__set_batch(r, r->train, r->staged, b, false);
    if (status != TT_OK) return status;
    r->staged++;
    if (r->staged == r->data || b->last_of_step) return tt__train_round(r, b->last_of_step, stats);
    if (stats) *stats = r->so_far;
    return TT_OK;
}

/* Computes the embeddings of the step's micro-batches, with the dropout of the training program. */
static tt_status tt__cached_embeddings(tt_trainer *r)
{
    tt__grad_cache *g = r->cache;
    float *to = g->embeddings;
    tt_status status = TT_OK;
    for (int first = 0; first < g->micros && status == TT_OK; first += r->data) {
        const int ranks = (int)tt__min(r->data, g->micros - first);
        for (int k = 0; k < ranks && status == TT_OK; k++)
            status = tt__set_batch(r, g->embed, k, &g->batch[first + k], true);
        if (status == TT_OK) status = tt__run_round(g->embed, tt_trainer_steps(r), first / r->data);
        for (int k = 0; k < ranks && status == TT_OK; k++) {
            const size_t numbers = (size_t)g->batch[first + k].seqs * (size_t)g->width;
            status = tt_get_rank(g->embed, k, r->output, to, numbers);
            to += numbers;
        }
    }
    return status;
}

/* Runs the forward and the backward of each micro-batch of the step. The backward begins with the cached
   gradients. */
static tt_status tt__cached_backward(tt_trainer *r)
{
    tt__grad_cache *g = r->cache;
    size_t at = 0;
    int staged = 0;
    tt_status status = TT_OK;
    for (int k = 0; k < g->micros && status == TT_OK; k++) {
        const tt_array arrays[2] = {{TT__CACHED_MINUS, g->embeddings + at, g->batch[k].seqs},
                                    {TT__CACHED_TARGET, g->gradient + at, g->batch[k].seqs}};
        tt_batch b = g->batch[k];
        b.arrays = arrays;
        b.n_arrays = TT__COUNT(arrays);
        status = tt__set_batch(r, r->train, staged++, &b, false);
        if (status == TT_OK && (staged == r->data || k + 1 == g->micros)) {
            status = tt_micro_step(r->train, NULL);
            staged = 0;
        }
        at += (size_t)b.seqs * (size_t)g->width;
    }
    return status;
}

/* Keeps a copy of a micro-batch. If the micro-batch is the last of its step, runs the step. The statistics
   are those of the step's loss. */
static tt_status tt__cached_batch(tt_trainer *r, const tt_batch *b, tt_stats *stats)
{
    tt__grad_cache *g = r->cache;
    tt_stats of_loss;
    tt_status status = tt__check_batch(r, b);
    if (status == TT_OK) status = tt__grad_cache_add(g, b);
    if (stats) memset(stats, 0, sizeof *stats);
    if (status != TT_OK || !b->last_of_step) return status;
    status = tt__cached_embeddings(r);
    if (status == TT_OK) status = tt__grad_cache_differentiate(g, &of_loss);
    tt__discard_step(g->loss);
    if (status == TT_ERR_NUMERIC) r->train->outcome = TT__NOT_FINITE;
    if (status == TT_OK) status = tt__cached_backward(r);
    if (status == TT_OK) status = tt_update(r->train, tt_trainer_lr(r), &r->train->done);
    tt__grad_cache_forget(g);
    if (status != TT_OK) return status;
    r->train->done.loss = of_loss.loss;
    r->train->done.targets = of_loss.targets;
    r->train->done.correct = of_loss.correct;
    if (stats) *stats = r->train->done;
    return TT_OK;
}

tt_status tt_train_batch(tt_trainer *r, const tt_batch *b, tt_stats *stats, bool *updated)
{
    tt_status status = tt__must_train(r);
    if (updated) *updated = false;
    if (status != TT_OK) return status;
    if (r->features && !r->features->now)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "{features_once} is for tt_fit, which computes the features "
                        "of all examples before the first step: call tt_fit, or clear {features_once}");
    if (r->model.task == TT_TASK_EMBED && b->label_values && tt__input_named(r, "label_values") < 0)
        return tt__fail(r->ctx, TT_ERR_ARGUMENT, "the batch has pairs with scores, but the contrastive loss "
                        "trains on pairs that belong together: train on pairs without scores, and evaluate "
                        "on pairs with scores");
    const bool last = b->last_of_step, whole_round = r->staged + 1 == r->data;
    if (!r->options.compile.accumulate && !last && whole_round) {
        r->step_failed = r->staged > 0;
        tt__trainer_discard_step(r);
        if (r->data > 1)
            return tt__fail(r->ctx, TT_ERR_ARGUMENT, "last_of_step is not set in the batch: a step of more "
                            "micro-batches than the %d data ranks needs a trainer made with accumulate = "
                            "true", r->data);
        return tt__fail(r->ctx, TT_ERR_ARGUMENT,
                        "last_of_step is not set in the batch: a step of several micro-batches needs a "
                        "trainer made with accumulate = true");
    }
    if (r->step_failed)
        status = tt__fail(r->ctx, TT_ERR_ARGUMENT, "an earlier micro-batch of this step failed: the rest of "
                          "the step is refused, and nothing is updated: begin the next step");
    if (status == TT_OK) status = r->cache ? tt__cached_batch(r, b, stats) : tt__uncached_batch(r, b, stats);
    if (status != TT_OK) tt__trainer_discard_step(r);
    r->step_failed = status != TT_OK && !last;
    if (updated) *updated = status == TT_OK && last;
    return status;
}

tt_status tt_trainer_wait(tt_trainer *r, tt_stats *stats)
{
    tt_status status = tt__must_train(r);
    return status == TT_OK ? tt_wait(r->train, stats) : status;
}
