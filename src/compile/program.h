#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/optimizers/rules.h"
#include "../passes/precision.h"
#include "../passes/recompute.h"
#include "../passes/overlap.h"
#include "../plan/place.h"
#include "../ranks/processes.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../context/params.h"

/* ===========================================================================================================
   COMPILE                                                                                        src/compile/
   Compiles a tape into a program: checks the options, runs the passes and plans the memory. Allocates
   nothing on the device. Uses all sections above.
   ======================================================================================================== */

/* A device's recording (a CUDA graph) of the launches of a stretch, that is, of consecutive instructions. A
   recording of a stretch of micro-batches can be replayed only with equal numbers of rows. */
typedef struct tt__recording {
    void *made;             /* the device's recording; NULL: the stretch ran only once so far */
    tt__segment segment;
    int first;              /* number of the stretch's first instruction */
    bool later;             /* the stretch adds to gradients of earlier micro-batches */
    int slot; /* number of the slot of gradients that is added to; in sums of slots, number of slots in use */
    int64_t *rows;          /* number of rows of each axis; NULL: this entry is free */
    /* how long the entry is kept: rises with each use of the recording, falls when another run asks for the
       entry */
    int credit;
} tt__recording;
enum { TT__RECORDINGS = 64, TT__RECORDING_USED = 8, TT__RECORDING_MAX = 64 };

/* The two host buffers from which an input is copied to a device with its own memory; runs use them in turn.
   copied: for each buffer, the event after which the host may write to it again. now: the buffer in use.
   arrived: bytes of the next run's input that were copied to tt__tape_value.arrival. */
typedef struct tt__staged { char *buffer[2]; void *copied[2]; int now; size_t arrived; } tt__staged;

/* Values of the options update, matmul and recompute, and their words. */
typedef enum tt__update_place { TT__UPDATE_END, TT__UPDATE_BACKWARD, TT__UPDATE_HOST } tt__update_place;
static const char *const tt__update_names[] = {"end", "backward", "host"};
static const char *const tt__matmul_names[] = {"fp32", "tf32", "fp8"};
static const char *const tt__recompute_names[] = {"none", "cheap", "attention", "blocks", "budget"};

/* Returns whether options other than `accumulate` ask for gradients that persist until the end of a step. */
static bool tt__keeps_gradients(const tt_compile_options *o)
{
    return o->train && (o->keep_gradients || o->before_update);
}

/* The options of a program, checked. Words have become values of enums. */
typedef struct tt__settings {
    tt_compile_options options; /* in `parallel`, defaults replace fields that are 0 */
    const tt__device_kind *kind;
    tt__device_group *group;
    int threads;            /* threads of a rank on the device "cpu" */
    int stage;              /* the program's stage of the pipeline */
    int in_flight;          /* max number of micro-batches in flight; 0: no pipeline */
    tt__precision precision;
    tt__matmul_precision matmul;
    tt__recompute_policy recompute;
    unsigned offload;       /* storages kept in the host's memory: TT__OUT_ flags */
    bool offload_fits, zero_fits; /* offload_fits: the option `offload` is "budget"; zero_fits:
                                     `parallel.zero` is TT_ZERO_BUDGET */
    bool bits_fit;          /* optimizer.state_bits is TT_STATE_BITS_BUDGET. The optimizer's options then have
                               the bits that were chosen, or that are tried now */
    double with_32;         /* with bits_fit: seconds of a step with a state of 32 bits; 0: they do not fit */
    tt__update_place update;
    tt__memory_kind memory;
    bool scales;            /* the program uses loss scaling */
    bool dropout;           /* the program has dropout: it trains, or tt__attempt.dropout is set */
    tt_costs costs;
} tt__settings;

enum { TT__AHEAD = 2 }; /* max of tt__choice.ahead on devices that have streams */

/* The decisions that the compiler may change to fit a program into a memory budget. */
typedef struct tt__choice {
    tt__recompute_policy recompute;
    unsigned offload;       /* storages kept in the host's memory: TT__OUT_ flags */
    /* with TT__OUT_ACTIVATIONS: number of blocks to offload, counted from the first; the last block is never
       offloaded */
    int activations;
    tt__update_place update;
    int ahead;              /* number of blocks that copies and collectives may run ahead; 0: no overlap */
    int blocks;             /* policy "blocks" recomputes the first `blocks` blocks, never the last */
    const bool *drop; int n_drop; /* for each of the first n_drop values: whether any policy recomputes it */
    int zero;               /* value of tt_parallel.zero */
    bool arrivals;          /* the inputs of a run are copied to the device during the previous run */
    /* how many times the limit TT__OFFLOAD_TOGETHER of a group's bytes is halved; TT__ONE_BY_ONE: no
       groups */
    int halved;
} tt__choice;

/* Arguments and results of a call of tt__try_compile beside tt_compile_options. */
typedef struct tt__attempt {
    bool quiet;             /* a trial of a search for the largest size: no warnings, errors without advice */
    bool unbudgeted;        /* the caller of a search for the largest size has no budget, and will compile
                               without one */
    bool dropout;           /* a program that does not train keeps its dropout */
    bool no_arrivals;       /* reserve no memory for the inputs of the next run, as under a tight budget */
    size_t needs;           /* bytes of the smallest possible program with the options as they are */
    size_t advised;         /* bytes of the smallest program that an error's advice leads to; 0: the program
                               that follows the advice fits the budget */
} tt__attempt;

/* A tape after all passes, with its plan. Persistent storages have no place yet: their place depends on the
   arena. */
typedef struct tt__built {
    tt_tape *t;             /* the rewritten copy of the caller's tape */
    uint64_t recorded;      /* hash of the caller's tape, of the root and of the parameters' roundings */
    int32_t root;
    tt__box *box;           /* places of transient storages and workspaces */
    int n_boxes;
    size_t transient;       /* bytes of the region that holds the boxes on the device */
    size_t bound;           /* largest number of bytes of boxes in use at one instruction */
    int peak_at;            /* number of the instruction with `bound` bytes in use, the peak */
    /* Bytes of the host's memory for this program alone, in this order: persistent bytes, transient bytes,
       and bytes that only data rank 0 has (host_of_first). */
    size_t host_persistent, host_transient, host_of_first;
    size_t of_first;        /* bytes on the device that only data rank 0 has */
    int together;           /* max number of instructions that run together */
    int in_flight;          /* max number of instructions in flight on other streams, beside computation */
    /* For a stage of a pipeline. send: 1 + the number of the SEND to the next stage ([0]) and to the previous
       stage ([1]); 0: none. sends_from: the segment that first writes the operand of that SEND. */
    int send[2];
    tt__segment sends_from[2];
    tt__replay replay;      /* estimated seconds of a step */
    /* number of values after the first passes; these values are the same for every choice */
    int forward_values;
    int blocks;             /* number of blocks whose activations can be offloaded */
} tt__built;

/* State of an input. UNSET: not set since the last run. SET: its data is in place. OVERWRITTEN: its data was
   set, and then overwritten by an update or by another program of the arena. */
typedef enum tt__input_state { TT__UNSET, TT__SET, TT__OVERWRITTEN } tt__input_state;

/* An instruction in flight on another stream. */
typedef struct tt__started {
    int at;                 /* 1 + the number of the instruction; 0: this entry is free */
    void *done;             /* event that occurs when the instruction is done */
} tt__started;

/* State of the transfers of one micro-batch from and to a stage. Index 0 is the direction towards the last
   stage, index 1 towards the first. sent: event after which the value to send is ready. taken: event after
   which this stage has copied the received value. part: messages in flight to another process; parts: their
   number. */
enum { TT__PARTS = 8 };
typedef struct tt__passed {
    void *sent[2], *taken[2];
    tt__request part[2][TT__PARTS];
    int parts[2];
} tt__passed;

/* The run that a rank works on. */
typedef struct tt__now {
    int64_t round;          /* number of the round in the step; each data rank runs one micro-batch a round */
    int present;            /* number of data ranks that have a micro-batch in this round */
    bool later;             /* gradients have contributions of earlier micro-batches: add to them */
    const int64_t *rows;    /* number of rows of each axis; NULL: those in tt__rank.axis_rows */
} tt__now;

/* The state of a program on one rank, apart from the arena's memory. */
typedef struct tt__rank {
    int64_t *axis_rows;     /* number of rows of each axis in the next run; -1: not set */
    unsigned char *input;   /* a tt__input_state for each value */
    int inputs_set;         /* number of values that are TT__SET */
    tt__results results;    /* this rank's results when they were last read */
    double flops;           /* FLOPs of the last micro-batch */
    char *staging;          /* memory of the host for inputs' buffers, `found` and messages; NULL:
                               not needed */
    tt__results *found;     /* results of a step that the host reads later */
    void *has_found;        /* the event after which `found` holds the results */
    tt__staged *staged;     /* for each value: its host buffers if it is an input */
    char *sends[2], *receives[2]; /* messages of a stage, in `staging`, by direction (see tt__passed) */
    char *host;             /* memory for the values on the host (tt__host_region) */
    tt__launch *launches;   /* launches of instructions that run together */
    tt__mat *peers;         /* operands of `launches` on other ranks */
    void *ready;            /* event by which other streams wait for computation */
    void *taken; /* the event after which new inputs may overwrite those in tt__tape_value.arrival */
    /* The transfers of a pipeline stage: an entry for each of `in_flight` micro-batches. */
    tt__passed *passed;
    tt__started *started;   /* built.in_flight entries */
    tt__recording recordings[TT__RECORDINGS];
    int next_recording;     /* index of the recording that the next new run may replace */
    tt__now now;
    bool never_records;     /* the device cannot record launches, although it can run them */
    char why[256];          /* the device's error when it failed to record; "" once it is logged */
} tt__rank;

/* A step whose results the host reads later. any: there is such a step, and tt_program.run.step counts it
   already. */
typedef struct tt__unread {
    bool any, one;          /* one: the step had one micro-batch */
    double flops;
} tt__unread;

/* Inputs of one micro-batch of a data rank, kept until a pipeline runs the micro-batch. */
typedef struct tt__queued {
    char *inputs;           /* all inputs; tt_program.queued_at has the byte offset of each */
    int64_t *rows;          /* rows of each axis */
} tt__queued;

/* The end of the last step. TT__HALF_UPDATED: a step with update "backward" failed after some parameters had
   been updated. */
typedef enum tt__outcome { TT__UPDATED, TT__NO_TARGET, TT__NOT_FINITE, TT__HALF_UPDATED } tt__outcome;

/* The step whose gradients tt_get_gradient can read after its end. rounds: number of the step's rounds; 0: no
   such step. scale, targets: the loss scale and the number of targets of that step. */
typedef struct tt__kept_gradients { int64_t rounds; double scale, targets; } tt__kept_gradients;

/* A compiled program, or one stage of a pipeline, which has its own tape, plan and arena. The caller holds
   the first stage, the head. The last fields of the head apply to all stages. */
struct tt_program {
    tt_context *ctx;
    struct tt_program *head;
    tt__settings settings;
    tt__built built;
    tt__arena *arena;
    struct tt_program *next; /* next program of the arena */
    tt__rank *rank;         /* state on each rank of the device group; the stages share this array */
    bool zeroed;            /* the optimizer state and gradients were filled with 0 before their first use */
    bool ready;             /* the arena and all parameters have memory */
    bool tunes;             /* tt_compile_options.tune is not "off" */
    char *tune_file;        /* the file that tt_compile_options.tune names, or NULL */
    int builds;             /* number of builds tried to fit the budget */
    tt__choice chosen;      /* the choice that was built, without `drop` */
    /* Fields that only the head uses. */
    struct tt_program *stage[TT__RANKS]; int stages;
    tt__queued *queued; int n_queued, cap_queued; /* entry r * data + d: micro-batch r of data rank d */
    size_t *queued_at; /* byte offset of each input in tt__queued.inputs; then the total; NULL: no pipeline */
    int n_recorded, n_axes; /* n_recorded: number of values of the tape that was compiled; n_axes: number of
                               its axes */
    int64_t last_round;     /* last round that was run */
    tt__step_settings run;            /* settings of the next run; each rank sets `micro` in its own copy */
    tt__results results;    /* results of all ranks when they were last read */
    /* Counts of the current step. round: number of rounds done. present: number of data ranks that have a
       micro-batch in the current round. in_slot: for each slot, number of data ranks that have had a
       micro-batch in it. */
    int64_t round;
    int present, in_slot[TT__RANKS];
    bool scale_set;         /* results.scale was written to the devices */
    bool poison;            /* tests: storages are overwritten with NaN after their last use */
    bool micro_failed, norm_known;
    tt__outcome outcome;
    tt__kept_gradients kept;
    bool in_hook;           /* before_update is running */
    double flops;
    tt__unread unread;
    tt_stats done;          /* statistics of the last step whose results were read without an error */
    int64_t reads;          /* number of steps whose results were read without an error */
    char refused[TT__ERROR]; /* error of the first tt_set that failed since the last run; "": none failed */
};

tt_parallel tt_parallel_default(void)
{
    const tt_parallel p = {0, 1, 1, false, false, 0, false, 1, "1f1b", 0};
    return p;
}

tt_optimizer_options tt_optimizer_options_default(void)
{
    tt_optimizer_options o;
    memset(&o, 0, sizeof o);
    o.kind = TT_ADAMW;
    o.beta1 = 0.9f;
    o.beta2 = 0.999f;
    o.eps = 1e-8f;
    o.weight_decay = 0.01f;
    o.layer_decay = 1;
    o.state_bits = 32;
    o.prune_every = 100;
    return o;
}

tt_loss_scale tt_loss_scale_default(void)
{
    tt_loss_scale s = {65536, 2, 0.5f, 2000};
    return s;
}

tt_compile_options tt_compile_options_default(void)
{
    tt_compile_options o;
    memset(&o, 0, sizeof o);
    o.train = true;
    o.precision = "32-true";
    o.matmul = "fp32";
    o.loss_scale = tt_loss_scale_default();
    o.recompute = "cheap";
    o.update = "end";
    o.optimizer = tt_optimizer_options_default();
    o.parallel = tt_parallel_default();
    return o;
}

static tt_status tt__check_optimizer(tt_context *ctx, const tt_optimizer_options *o)
{
    char text[512];
    tt__text_buffer all = {text, sizeof text, 0}; /* collects all errors for one message */
    tt__attr unread;
    if ((unsigned)o->kind < TT__COUNT(tt__optimizers)) tt__optimizers[o->kind].use(o, &unread, &all);
    else tt__print(&all, "; kind is %d, but must be one of tt_optimizer_kind", (int)o->kind);
    if (!(o->weight_decay >= 0)) tt__print(&all, "; {weight_decay %g} is negative", o->weight_decay);
    if (!(o->clip_norm >= 0))
        tt__print(&all, "; {clip_norm %g} is negative (0 means no clipping)", o->clip_norm);
    for (const tt_lr_rule *r = o->lr_rules; r && r->pattern; r++)
        if (!(r->scale >= 0 && isfinite(r->scale)))
            tt__print(&all, "; the scale %g of lr_rules pattern '%.60s' is not a finite number >= 0",
                      r->scale, r->pattern);
    if (!(o->ema_decay >= 0 && o->ema_decay < 1))
        tt__print(&all, "; {ema_decay %g} is not in [0, 1) (0 means no average)", o->ema_decay);
    const bool chosen = o->state_bits == TT_STATE_BITS_BUDGET;
    if (o->state_bits != 32 && o->state_bits != 16 && o->state_bits != 8 && !chosen)
        tt__print(&all, "; {state_bits %d} is not 32, 16, 8 or TT_STATE_BITS_BUDGET", o->state_bits);
    if (!(o->prune >= 0 && o->prune < 1))
        tt__print(&all, "; {prune %g} is not in [0, 1) (0 means none)", o->prune);
    if (o->prune > 0 && !(o->prune_begin >= 0 && o->prune_begin < o->prune_end && o->prune_every > 0))
        tt__print(&all, "; {prune %g} needs 0 <= prune_begin < prune_end and prune_every of at least 1, but "
                  "they are %lld, %lld and %d", o->prune, (long long)o->prune_begin, (long long)o->prune_end,
                  o->prune_every);
    if (o->prune_by_movement && !(o->prune > 0))
        tt__print(&all, "; {prune_by_movement} needs {prune} above 0, the share of weights to prune");
    if (!(o->layer_decay > 0 && o->layer_decay <= 1))
        tt__print(&all, "; {layer_decay %g} is not in (0, 1] (1 means none)", o->layer_decay);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "optimizer options: %s", text + 2) : TT_OK;
}

/* Returns whether x is a power of two from min to max. */
static bool tt__is_power_of_two(double x, double min, double max)
{
    int exponent;
    return x >= min && x <= max && frexp(x, &exponent) == 0.5;
}

static tt_status tt__check_loss_scale(tt_context *ctx, const tt_loss_scale *s)
{
    char text[512];
    tt__text_buffer all = {text, sizeof text, 0};
    if (!tt__is_power_of_two(s->init, 1, TT__LOSS_SCALE_MOST))
        tt__print(&all, "; init is %g, but must be a power of two from 1 to 2^40", (double)s->init);
    if (!tt__is_power_of_two(s->growth, 1, FLT_MAX))
        tt__print(&all, "; growth is %g, but must be a power of two, at least 1", (double)s->growth);
    if (!tt__is_power_of_two(s->backoff, 0, 0.5))
        tt__print(&all, "; backoff is %g, but must be a power of two below 1", (double)s->backoff);
    if (s->interval < 1) tt__print(&all, "; interval is %d, but must be at least 1", s->interval);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "loss_scale: %s", text + 2) : TT_OK;
}

static bool tt__copy_array(tt_context *ctx, void **to, const void *from, size_t bytes)
{
    *to = tt__alloc(ctx, bytes ? bytes : 1);
    if (*to && bytes) memcpy(*to, from, bytes);
    return *to != NULL;
}

/* Continues a hash with an attribute and returns it. An attribute that is 0 leaves the hash as it is, so that
   new attributes in later versions do not change the hashes of existing tapes. */
static uint64_t tt__attr_hash_on(uint64_t hash, const char *name, const void *data, size_t bytes)
{
    const char *byte = (const char *)data;
    for (size_t k = 0; k < bytes; k++)
        if (byte[k]) return tt__hash_on(tt__hash_on(hash, name, strlen(name)), data, bytes);
    return hash;
}

static uint64_t tt__attr_hash(uint64_t hash, const tt__attr *a)
{
#define TT__HASH_FIELD(type, name) hash = tt__attr_hash_on(hash, #name, &a->name, sizeof a->name);
    TT__ATTRS(TT__HASH_FIELD)
#undef TT__HASH_FIELD
    return hash;
}

/* Returns a hash of everything that was recorded on a tape, except the names of values. A tape of another
   model or with another capacity has another hash. */
static uint64_t tt__tape_hash(const tt_tape *t)
{
    const int32_t none[2] = {0}; /* for two former fields of instructions, so that old hashes stay valid */
    uint64_t hash = TT__HASH_BEGIN;
    for (int k = 1; k < t->n_axes; k++)
        hash = tt__hash_on(hash, &t->axes[k].capacity, sizeof t->axes[k].capacity);
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__tape_value *x = &t->values[v];
        const tt__shape *s = &x->shape;
        const int64_t shape[] = {(int64_t)s->dtype, s->rows, s->cols, s->axis, x->base, x->offset};
        const char *param = x->storage == TT__PARAMETER ? t->ctx->params[x->param]->name : "";
        hash = tt__hash_on(hash, shape, sizeof shape);
        hash = tt__hash_on(hash, param, strlen(param));
    }
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const char *name = tt__ops[i->op].name;
        hash = tt__hash_on(hash, name, strlen(name));
        hash = tt__hash_on(hash, i->in, sizeof i->in);
        hash = tt__hash_on(hash, none, sizeof none);
        hash = tt__hash_on(hash, i->out, sizeof i->out);
        hash = tt__attr_hash(hash, &i->attr);
    }
    return hash;
}

static tt_tape *tt__copy_tape(const tt_tape *t)
{
    tt_tape *copy = (tt_tape *)tt__calloc(t->ctx, sizeof *copy);
    if (!copy) return NULL;
    copy->ctx = t->ctx;
    copy->number = t->number;
    copy->n_random = t->n_random;
    copy->n_values = copy->cap_values = t->n_values;
    copy->n_code = copy->cap_code = t->n_code;
    copy->n_axes = copy->cap_axes = t->n_axes;
    copy->n_lists = copy->cap_lists = t->n_lists;
    copy->data = copy->slots = 1;
    const bool lists = !t->n_lists || tt__copy_array(t->ctx, (void **)&copy->lists, t->lists,
                                                     sizeof *t->lists * (size_t)t->n_lists);
    if (lists &&
        tt__copy_array(t->ctx, (void **)&copy->values, t->values, sizeof *t->values * (size_t)t->n_values) &&
        tt__copy_array(t->ctx, (void **)&copy->code, t->code, sizeof *t->code * (size_t)t->n_code) &&
        tt__copy_array(t->ctx, (void **)&copy->axes, t->axes, sizeof *t->axes * (size_t)t->n_axes))
        return copy;
    tt_tape_free(copy);
    return NULL;
}

static void tt__built_free(tt_context *ctx, tt__built *b)
{
    tt_tape_free(b->t);
    tt__free(ctx, b->box);
}

static int tt__stages(const tt_program *p) { return p->head->stages; }

/* Removes a program from its arena. If the arena was never allocated and has no other program, no parameter
   is stored in it any more. */
static void tt__leave_arena(tt_program *p)
{
    tt__arena *a = p->arena;
    if (a->results_of == p) a->results_of = NULL;
    tt_program **at = &a->programs;
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    for (int k = 0; k < a->n_placements && !a->programs && !a->allocated; k++) {
        tt_param *param = p->ctx->params[k];
        if (param->second_owner == a) param->second_owner = NULL;
        else if (param->owner != a) continue;
        else {
            param->owner = param->second_owner;
            param->second_owner = NULL;
        }
        a->references--;
    }
    tt__arena_release(p->ctx, a);
}

/* Frees a program's state on one rank. */
static void tt__rank_free(tt_program *p, int rank)
{
    tt_context *ctx = p->ctx;
    tt__rank *r = &p->rank[rank];
    const tt__backend *b = p->settings.kind->backend;
    tt__device *d = p->settings.group->device[rank];
    for (int32_t v = 0; r->staging && v < 2 * p->built.t->n_values; v++) {
        void *copied = r->staged[v / 2].copied[v % 2];
        if (copied) b->release_event(d, copied);
    }
    if (r->staging) b->release_host(d, r->staging);
    tt__host_release(ctx, p->settings.group, rank, r->host);
    for (int k = 0; k < 2 * p->settings.in_flight && r->passed; k++) {
        if (r->passed[k / 2].sent[k % 2]) b->release_event(d, r->passed[k / 2].sent[k % 2]);
        if (r->passed[k / 2].taken[k % 2]) b->release_event(d, r->passed[k / 2].taken[k % 2]);
    }
    tt__free(ctx, r->passed);
    if (r->ready) b->release_event(d, r->ready);
    if (r->taken) b->release_event(d, r->taken);
    if (r->has_found) b->release_event(d, r->has_found);
    for (int k = 0; k < p->built.in_flight && r->started; k++)
        if (r->started[k].done) b->release_event(d, r->started[k].done);
    for (int k = 0; k < TT__RECORDINGS; k++) {
        if (r->recordings[k].made) b->forget(d, r->recordings[k].made);
        tt__free(ctx, r->recordings[k].rows);
    }
    tt__free(ctx, r->axis_rows);
    tt__free(ctx, r->input);
    tt__free(ctx, r->staged);
    tt__free(ctx, r->launches);
    tt__free(ctx, r->peers);
    tt__free(ctx, r->started);
}

void tt_program_free(tt_program *p)
{
    if (!p) return;
    tt_context *ctx = p->ctx;
    for (int s = 1; s < p->stages; s++) tt_program_free(p->stage[s]);
    for (int k = 0; k < p->n_queued; k++) {
        tt__free(ctx, p->queued[k].inputs);
        tt__free(ctx, p->queued[k].rows);
    }
    tt__free(ctx, p->queued);
    tt__free(ctx, p->queued_at);
    const tt_parallel *how = &p->settings.options.parallel;
    const int ranks = how->data * how->tensor, first = p->settings.stage * ranks;
    for (int r = first; p->rank && r < first + ranks; r++) tt__rank_free(p, r);
    if (p->arena) tt__leave_arena(p);
    tt__built_free(ctx, &p->built);
    if (p->head == p) tt__free(ctx, p->rank);
    tt__free(ctx, p->tune_file);
    tt__free(ctx, p);
}
