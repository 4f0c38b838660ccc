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
   Makes a program of a tape: checks the options, runs the passes and plans memory; nothing is allocated
   on the device. Uses all above.
   ======================================================================================================== */

/* The launches of a segment as a device has recorded them. Those of a micro-batch are for runs with the
   same numbers of rows; the update has none. */
typedef struct tt__recording {
    void *made;             /* the device's; NULL: such a run was met once */
    tt__segment segment;
    int first;              /* the number of its first instruction */
    bool later;             /* gradients are added to */
    int slot;               /* that of these gradients; for sums, how many slots have contents */
    int64_t *rows;          /* of each axis; NULL: this entry is free */
    int credit;             /* gained when it is used, lost when another run finds no entry */
} tt__recording;
enum { TT__RECORDINGS = 64, TT__RECORDING_USED = 8, TT__RECORDING_MOST = 64 };

/* Where an input is copied from when the device's memory is not the host's: two buffers in turn, each with
   the event after which it may be written again. arrived: bytes that wait at its arrival for the next run. */
typedef struct tt__staged { char *buffer[2]; void *copied[2]; int now; size_t arrived; } tt__staged;

/* What tt_compile_options.update, matmul and recompute name. */
typedef enum tt__update { TT__UPDATE_END, TT__UPDATE_BACKWARD, TT__UPDATE_HOST } tt__update;
static const char *const tt__update_names[] = {"end", "backward", "host"};
static const char *const tt__matmul_names[] = {"fp32", "tf32", "fp8"};
static const char *const tt__recompute_names[] = {"none", "cheap", "attention", "blocks", "budget"};

/* tt_compile_options, checked, with what their names stand for. */
typedef struct tt__settings {
    tt_compile_options options; /* parallel: without zeros */
    const tt__device_kind *kind;
    tt__crew *crew;
    int threads;            /* of a rank on the device "cpu" */
    int stage;              /* of a pipeline, that the program is of */
    int in_flight;          /* most micro-batches that it has between their forward and their backward */
    tt__precision precision;
    tt__matmul matmul;
    tt__recompute recompute;
    unsigned offload;       /* what lies in the host's memory: TT__OUT_ flags */
    bool offload_fits, zero_fits; /* they say "budget" */
    tt__update update;
    tt__memory_kind memory;
    bool scales;            /* the loss scale changes */
    tt_costs costs;
} tt__settings;

enum { TT__AHEAD = 2 }; /* tt__choice's, of devices that have streams */

/* What may differ between programs of the same settings, to fit a budget. */
typedef struct tt__choice {
    tt__recompute recompute;
    unsigned offload;       /* TT__OUT_ flags */
    int activations;        /* with TT__OUT_ACTIVATIONS: of so many blocks, but not of the last */
    tt__update update;
    int ahead;              /* blocks that copies and collectives may run ahead; 0: none runs beside */
    int blocks;             /* "blocks": the first so many are computed again; INT_MAX: all but the last */
    const bool *drop; int n_drop; /* of each of the first values: computed again whatever `recompute` is */
    int zero;               /* tt_parallel's */
    bool arrivals;          /* inputs are copied to the device while the run before is under way */
    int halved;             /* how often TT__OFFLOAD_TOGETHER is, to TT__ONE_BY_ONE */
} tt__choice;

/* A tape made ready to run. Persistent storages have no place yet: these depend on the arena. */
typedef struct tt__built {
    tt_tape *t;             /* a copy of the caller's, rewritten */
    uint64_t recorded;      /* hash of the caller's and of the root */
    int32_t root;
    tt__box *box;           /* places of transient storages and workspaces */
    int n_boxes;
    size_t transient;       /* bytes that these take */
    size_t bound;           /* the largest sum of such bytes live at once ... */
    int peak_at;            /* ... and the instruction where it is */
    /* Bytes in the host's memory of a program alone; behind these, what only data rank 0 has. */
    size_t host_persistent, host_transient, host_of_first;
    size_t of_first;        /* bytes on the device of what only data rank 0 has */
    int together;           /* most instructions that run together */
    int under_way;          /* most that have been started on other streams and are not waited for yet */
    /* Of a pipeline's stage: one more than the SEND to the next stage and to the one before, and the segment
       that first writes what that sends. */
    int send[2];
    tt__segment sends_from[2];
    tt__replay replay;      /* of a step */
    int forward_values;     /* values with smaller numbers are the forward's, the same for any choice */
    int blocks;             /* whose activations can be offloaded */
} tt__built;

/* What tt_set has left of an input: nothing since the last run, its data, or data that an update, or a run or
   tt_set of another program of the arena, has written over. */
typedef enum tt__input_state { TT__UNSET, TT__SET, TT__OVERWRITTEN } tt__input_state;

/* What has been started on another stream, and is not waited for yet. */
typedef struct tt__started {
    int at;                 /* one more than the number of the instruction; 0: this entry is free */
    void *done;             /* an event, after it */
} tt__started;

/* What a stage passes on of a micro-batch: events; to a stage in another process, messages on their way. */
enum { TT__PARTS = 8 };
typedef struct tt__passed {
    void *sent[2], *taken[2];
    tt__request part[2][TT__PARTS];
    int parts[2];
} tt__passed;

/* The run at hand on a rank. */
typedef struct tt__now {
    int64_t round;          /* of the step: the micro-batch is that number of its data rank */
    int present;            /* data ranks that have a micro-batch in this round */
    bool later;             /* what adds from the second lap on does add */
    const int64_t *rows;    /* of each axis, instead of those that are set; NULL: these */
} tt__now;

/* What a program has for each rank, beside the arena's memory there. */
typedef struct tt__rank {
    int64_t *axis_rows;     /* rows of each axis in the next run; -1: not set */
    unsigned char *input;   /* of each value, a tt__input_state */
    int inputs_set;         /* values that are TT__SET */
    tt__results results;    /* as read last */
    double flops;           /* of the micro-batch that was run last */
    char *staging;          /* buffers of all inputs, and `found`; NULL on the host's device */
    tt__results *found;     /* where results of a step come that are read later ... */
    void *has_found;        /* ... and the event after which they are there */
    tt__staged *staged;     /* of each input */
    char *sends[2], *receives[2]; /* messages of a stage, in `staging`, by which way they go */
    char *host;             /* values in the host's memory (tt__host_region) */
    tt__launch *launches;   /* of instructions that run together */
    tt__mat *peers;         /* operands of these in other ranks */
    void *ready;            /* an event, with which other streams wait for that of computation */
    void *taken;            /* ... and copies to arrivals for those from there */
    /* Of a pipeline's stage, for each of `in_flight` micro-batches: what goes to the next stage (0) and to
       the one before (1) is there; what has come that way has been taken. */
    tt__passed *passed;
    tt__started *started;   /* built.under_way entries */
    tt__recording recordings[TT__RECORDINGS];
    int next_recording;     /* the entry that the next new run asks for */
    tt__now now;
    bool never_records;     /* the device has failed to record what it can run ... */
    char why[256];          /* ... which is still to be told */
} tt__rank;

/* A step that nobody has read the results of, which tt_program.run.step counts already. */
typedef struct tt__unread {
    bool any, one;          /* one: it had one micro-batch */
    double flops;
} tt__unread;

/* The inputs of a micro-batch on a data rank, until a pipeline runs it. */
typedef struct tt__fed {
    char *inputs;           /* each from tt_program.fed_at on */
    int64_t *rows;          /* of each axis */
} tt__fed;

/* How the last step ended. TT__HALF_UPDATED: a step with update "backward" failed after it had updated some
   of the parameters. */
typedef enum tt__outcome { TT__UPDATED, TT__NO_TARGET, TT__NOT_FINITE, TT__HALF_UPDATED } tt__outcome;

/* A program is an array of stages, each with a tape, a plan and an arena of its own; without a pipeline there
   is one. The caller has the first, which also has, for all of them, what is said to be the head's. */
struct tt_program {
    tt_context *ctx;
    struct tt_program *head;
    tt__settings settings;
    tt__built built;
    tt__arena *arena;
    struct tt_program *next; /* of its arena */
    tt__rank *rank;         /* of each rank of its crew, the same for all stages */
    bool zeroed;            /* tt__zero_states has run */
    bool ready;             /* its arena and all its parameters have memory */
    bool tunes;             /* tt_compile_options.tune is not "off"; */
    char *tune_file;        /* it names this file, or NULL */
    int builds;             /* tried to fit the budget */
    tt__choice chosen;      /* which of them it is, but for `drop` */
    /* The head's. */
    struct tt_program *stage[TT__RANKS]; int stages;
    tt__fed *fed; int n_fed, cap_fed; /* micro-batch r of data rank d: number r * data + d */
    size_t *fed_at;         /* of each input; of number `n_recorded`, the bytes of all; NULL: no pipeline */
    int n_recorded, n_axes; /* values of the tape that was compiled, and its axes */
    int64_t last_round;     /* that was run */
    tt__run run;            /* settings of the next run; `micro` is set for each rank */
    tt__results results;    /* of all ranks, as read last */
    /* Of the step at hand: rounds done, of a micro-batch on each data rank; how many of these have one in the
       round that is run, and have had one in a slot. */
    int64_t round;
    int present, in_slot[TT__RANKS];
    bool scale_set;         /* the devices have results.scale */
    bool poison;            /* tests: overwrite storages as soon as they are dead */
    bool micro_failed, norm_known;
    tt__outcome outcome;
    double flops;
    tt__unread unread;
    tt_stats done;          /* of the last step that was read ... */
    int64_t reads;          /* ... of so many that did not fail */
    char refused[TT__ERROR]; /* why the first tt_set since the last run failed, if one did */
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
    tt__text all = {text, sizeof text, 0}; /* everything that is wrong, in one message */
    tt__attr unread;
    if ((unsigned)o->kind < TT__COUNT(tt__optimizers)) tt__optimizers[o->kind].use(o, &unread, &all);
    else tt__print(&all, "; kind %d is unknown", (int)o->kind);
    if (!(o->weight_decay >= 0)) tt__print(&all, "; weight_decay %g is negative", o->weight_decay);
    if (!(o->clip_norm >= 0))
        tt__print(&all, "; clip_norm %g is negative (0 means no clipping)", o->clip_norm);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "optimizer options: %s", text + 2) : TT_OK;
}

/* A power of two of least..most. */
static bool tt__is_power_of_two(double x, double least, double most)
{
    int exponent;
    return x >= least && x <= most && frexp(x, &exponent) == 0.5;
}

static tt_status tt__check_loss_scale(tt_context *ctx, const tt_loss_scale *s)
{
    char text[512];
    tt__text all = {text, sizeof text, 0};
    if (!tt__is_power_of_two(s->init, 1, TT__LOSS_SCALE_MOST))
        tt__print(&all, "; init %g is not a power of two in 1..2^40", (double)s->init);
    if (!tt__is_power_of_two(s->growth, 1, FLT_MAX))
        tt__print(&all, "; growth %g is not a power of two >= 1", (double)s->growth);
    if (!tt__is_power_of_two(s->backoff, 0, 0.5))
        tt__print(&all, "; backoff %g is not a power of two below 1", (double)s->backoff);
    if (s->interval < 1) tt__print(&all, "; interval %d is less than 1", s->interval);
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "loss_scale: %s", text + 2) : TT_OK;
}

static bool tt__copy_array(tt_context *ctx, void **to, const void *from, size_t bytes)
{
    *to = tt__alloc(ctx, bytes ? bytes : 1);
    if (*to && bytes) memcpy(*to, from, bytes);
    return *to != NULL;
}

/* Nothing where the attribute is 0, so that one that is new to the library changes no hash. */
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

/* Of all that was recorded but names of values: another model or capacity has another hash. */
static uint64_t tt__tape_hash(const tt_tape *t)
{
    const int32_t none[2] = {0}; /* operands that instructions once had more: hashes stay as they were */
    uint64_t hash = TT__HASH_BEGIN;
    for (int k = 1; k < t->n_axes; k++)
        hash = tt__hash_on(hash, &t->axes[k].capacity, sizeof t->axes[k].capacity);
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__value *x = &t->values[v];
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

/* Takes a program out of its arena; the last takes the parameters out of one that was never allocated. */
static void tt__leave_arena(tt_program *p)
{
    tt__arena *a = p->arena;
    if (a->results_of == p) a->results_of = NULL;
    tt_program **at = &a->programs;
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    for (int k = 0; k < a->n_homes && !a->programs && !a->allocated; k++) {
        tt_param *param = p->ctx->params[k];
        if (param->again == a) param->again = NULL;
        else if (param->holder != a) continue;
        else {
            param->holder = param->again;
            param->again = NULL;
        }
        a->references--;
    }
    tt__arena_release(p->ctx, a);
}

/* Frees what a program has for a rank. */
static void tt__rank_free(tt_program *p, int rank)
{
    tt_context *ctx = p->ctx;
    tt__rank *r = &p->rank[rank];
    const tt__backend *b = p->settings.kind->backend;
    tt__device *d = p->settings.crew->device[rank];
    for (int32_t v = 0; r->staging && v < 2 * p->built.t->n_values; v++) {
        void *copied = r->staged[v / 2].copied[v % 2];
        if (copied) b->release_event(d, copied);
    }
    if (r->staging) b->release_host(d, r->staging);
    tt__host_release(ctx, p->settings.crew, rank, r->host);
    for (int k = 0; k < 2 * p->settings.in_flight && r->passed; k++) {
        if (r->passed[k / 2].sent[k % 2]) b->release_event(d, r->passed[k / 2].sent[k % 2]);
        if (r->passed[k / 2].taken[k % 2]) b->release_event(d, r->passed[k / 2].taken[k % 2]);
    }
    tt__free(ctx, r->passed);
    if (r->ready) b->release_event(d, r->ready);
    if (r->taken) b->release_event(d, r->taken);
    if (r->has_found) b->release_event(d, r->has_found);
    for (int k = 0; k < p->built.under_way && r->started; k++)
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
    for (int k = 0; k < p->n_fed; k++) {
        tt__free(ctx, p->fed[k].inputs);
        tt__free(ctx, p->fed[k].rows);
    }
    tt__free(ctx, p->fed);
    tt__free(ctx, p->fed_at);
    const tt_parallel *how = &p->settings.options.parallel;
    const int ranks = how->data * how->tensor, first = p->settings.stage * ranks;
    for (int r = first; p->rank && r < first + ranks; r++) tt__rank_free(p, r);
    if (p->arena) tt__leave_arena(p);
    tt__built_free(ctx, &p->built);
    if (p->head == p) tt__free(ctx, p->rank);
    tt__free(ctx, p->tune_file);
    tt__free(ctx, p);
}
