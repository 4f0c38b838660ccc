#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/optimizers/rules.h"
#include "../passes/tensor.h"
#include "../passes/precision.h"
#include "../plan/place.h"
#include "../ranks/processes.h"
#include "../ranks/groups.h"
#include "../context/memory.h"
#include "../context/params.h"
#include "program.h"
#include "settings.h"
#include "build.h"
#include "choice.h"
#include "search.h"

/* ------------------------------------------------------------------------------------------------- commit */

/* Gives persistent storage v a place in the program's arena, unless v already has a place in an arena. The
   place is directly after storage `before` or, if `before` is 0, at the end of the arena. The padding at the
   end of `before` then comes after v. Returns whether v got a place. */
static bool tt__place_in_arena(tt_program *p, int32_t v, int32_t before)
{
    tt_tape *t = p->built.t;
    tt__arena *a = p->arena;
    tt__tape_value *x = &t->values[v];
    const tt__tape_value *y = &t->values[before];
    tt_param *param = x->storage == TT__PARAMETER ? p->ctx->params[x->param] : NULL;
    if (!tt__in_arena(x) || x->base != v || x->place != TT__NO_PLACE) return false;
    if (param && tt__placement_arena(a->kind, a, param, a->stage, a->stages)) return false;
    size_t *end = x->space == TT__HOST ? &a->on_host : x->part.root ? &a->of_first : &a->persistent;
    x->place = before ? y->place + tt__storage_bytes(y) : *end;
    *end += tt__arena_bytes(t, x);
    if (!param) return true;
    a->placement[x->param].offset = x->place;
    a->placement[x->param].dtype = x->shape.dtype;
    a->placement[x->param].space = x->space;
    a->placement[x->param].part = x->part;
    if (!a->kind->backend) return true;
    if (param->owner) param->second_owner = a;
    else param->owner = a;
    a->references++;
    return true;
}

static void tt__place_persistent(tt_program *p)
{
    const tt_tape *t = p->built.t;
    for (int32_t v = 1; v < t->n_values; v++)
        for (int32_t next = v, before = 0; next; next = t->values[next].after)
            before = tt__place_in_arena(p, next, before) ? next : 0;
}

/* Puts a built program into arena `shared`, or into a new arena if `shared` is NULL. After an error nothing
   has changed. */
static tt_status tt__commit(tt_program *p, tt__arena *shared)
{
    tt_context *ctx = p->ctx;
    const tt__settings *s = &p->settings;
    const size_t budget = s->options.memory_budget;
    tt__extent extent;
    tt_status status = tt__check_extent(p, shared, &extent);
    if (status != TT_OK) return status;
    tt__arena *a = shared ? shared : (tt__arena *)tt__calloc(ctx, sizeof *a);
    if (!a) return TT_ERR_MEMORY;
    if (!shared) {
        a->kind = s->kind;
        a->group = s->group;
        a->data = s->options.parallel.data;
        a->tensor = s->options.parallel.tensor;
        a->stages = s->options.parallel.pipeline;
        a->stage = s->stage;
        a->persistent = s->kind->resident;
        a->memory_kind = s->memory;
    }
    a->references++;
    if ((status = tt__placements_grow(ctx, a)) != TT_OK) {
        tt__arena_release(ctx, a);
        return status;
    }
    p->next = a->programs;
    a->programs = p;
    a->transient = extent.transient;
    if (budget && (!a->budget || budget < a->budget)) a->budget = budget;
    p->arena = a;
    tt__place_persistent(p);
    return TT_OK;
}

/* Allocates the state of a program on one rank, without the arena's memory. For a rank of another process
   (`local` is false), allocates only the rows of axes and the states of inputs. */
static tt_status tt__make_rank(tt_program *p, tt__rank *r, bool local)
{
    const size_t values = (size_t)p->built.t->n_values, axes = (size_t)p->built.t->n_axes;
    const size_t together = (size_t)p->built.together + 1, ranks = (size_t)p->settings.group->ranks;
    const size_t slots = (size_t)(p->settings.options.parallel.groups / p->settings.options.parallel.data);
    const size_t peers = 2 * together * (ranks > slots ? ranks : slots);
    r->axis_rows = (int64_t *)tt__alloc(p->ctx, sizeof *r->axis_rows * axes);
    r->input = (unsigned char *)tt__calloc(p->ctx, values);
    for (size_t k = 0; k < axes && r->axis_rows; k++) r->axis_rows[k] = -1;
    if (!local) return r->axis_rows && r->input ? TT_OK : TT_ERR_MEMORY;
    r->staged = (tt__staged *)tt__calloc(p->ctx, values * sizeof *r->staged);
    r->launches = (tt__launch *)tt__calloc(p->ctx, sizeof *r->launches * together);
    r->peers = (tt__mat *)tt__calloc(p->ctx, sizeof *r->peers * (peers > 2 * together ? peers : 1));
    r->started = (tt__started *)tt__calloc(p->ctx, sizeof *r->started * (size_t)(p->built.in_flight + 1));
    if (!r->axis_rows || !r->input || !r->staged || !r->launches || !r->peers || !r->started)
        return TT_ERR_MEMORY;
    const size_t micros = (size_t)p->settings.in_flight;
    if (micros) r->passed = (tt__passed *)tt__calloc(p->ctx, sizeof *r->passed * micros);
    if (micros && !r->passed) return TT_ERR_MEMORY;
    return TT_OK;
}

static tt_status tt__make_ranks(tt_program *p)
{
    const tt_parallel *how = &p->settings.options.parallel;
    const int of_stage = how->data * how->tensor, first = p->settings.stage * of_stage;
    tt_status status = TT_OK;
    for (int r = first; r < first + of_stage && status == TT_OK; r++)
        status = tt__make_rank(p, &p->rank[r], tt__is_local(p->settings.group, r));
    return status;
}

static tt_status tt__check_share(tt_context *ctx, const tt__settings *s)
{
    const tt_program *share = s->options.share;
    if (share && share->ctx != ctx)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_compile: `share` is a program of another context: use one "
                        "context, or leave `share` NULL");
    if (share && share->settings.group != s->group)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_compile: `share` is a program for device '%s', but this "
                        "one is for '%s': use one device, or leave `share` NULL", share->settings.group->name,
                        s->group->name);
    if (share && share->settings.memory != s->memory)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_compile: `share` is a program with memory '%s', but this "
                        "one has memory '%s': use one of them, or leave `share` NULL",
                        tt__memory_names[share->settings.memory], tt__memory_names[s->memory]);
    if (!share || tt__same_ranks(share->arena, s)) return TT_OK;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_compile: `share` is a program of data %d x tensor %d ranks, "
                    "but this one has data %d x tensor %d: use the same ranks, or leave `share` NULL",
                    share->arena->data, share->arena->tensor, s->options.parallel.data,
                    s->options.parallel.tensor);
}

/* Sets the number of the pipeline stage in *s, and its max number of micro-batches in flight. */
static void tt__set_stage(tt__settings *s, int stage)
{
    const tt_parallel *p = &s->options.parallel;
    const int micros = !s->options.train || !s->options.accumulate ? 1 : p->micros ? p->micros : INT_MAX;
    const bool gpipe = p->schedule && strcmp(p->schedule, "gpipe") == 0;
    s->stage = stage;
    s->in_flight = p->pipeline == 1 ? 0 : gpipe ? micros : (int)tt__min(micros, p->pipeline - stage);
}

/* Copies tt_compile_options.tune into the program. */
static tt_status tt__keep_tune(tt_program *p, const char *tune)
{
    p->tunes = tune && strcmp(tune, "off") != 0;
    if (!p->tunes || strcmp(tune, "on") == 0) return TT_OK;
    p->tune_file = tt__strdup(p->ctx, tune);
    return p->tune_file ? TT_OK : TT_ERR_MEMORY;
}

static tt_status tt__compile_into(tt_program *p, const tt_tape *t, int32_t root, const tt_compile_options *o,
                                  int stage, tt__attempt *attempt)
{
    const tt__job job = {p, t, root, o->share ? o->share->arena : NULL, attempt, NULL};
    tt_status status = tt__parse_settings(p->ctx, o, &p->settings);
    if (status == TT_OK) tt__set_stage(&p->settings, stage);
    p->settings.dropout |= attempt->dropout;
    if (status == TT_OK) status = tt__check_share(p->ctx, &p->settings);
    p->run.seed = p->ctx->options.seed;
    p->results.scale.scale = p->settings.scales ? o->loss_scale.init : 1;
    if (status == TT_OK && !p->rank) { /* the stages of a pipeline share this array */
        p->rank = (tt__rank *)tt__calloc(p->ctx, sizeof *p->rank * (size_t)p->settings.group->ranks);
        if (!p->rank) status = TT_ERR_MEMORY;
    }
    if (status == TT_OK) status = tt__build_chosen(&job);
    if (status == TT_OK) status = tt__make_ranks(p);
    if (status == TT_OK) status = tt__keep_tune(p, o->tune);
    tt_compile_options *kept = &p->settings.options; /* the caller may free these strings after tt_compile */
    kept->precision = kept->residual = kept->matmul = kept->recompute = kept->offload = kept->device = NULL;
    kept->update = NULL;
    kept->share = NULL;
    kept->memory = kept->tune = NULL;
    kept->costs = NULL;
    kept->optimizer.no_decay = NULL;
    kept->optimizer.lr_rules = NULL;
    return status == TT_OK ? tt__commit(p, job.shared) : status;
}

/* Counts the elements of all parameters of a program (*all), and of the parameters that the tensor ranks
   divide (*split). */
static void tt__count_params(const tt_program *p, int64_t *all, int64_t *split)
{
    *all = *split = 0;
    for (int32_t v = 1; v < p->built.t->n_values; v++) {
        const tt__tape_value *x = &p->built.t->values[v];
        if (p->stages > 1 && v >= p->n_recorded) break;
        for (int s = 0; s < p->stages && x->elsewhere; s++) x = &p->stage[s]->built.t->values[v];
        if (x->storage != TT__PARAMETER || x->base != v) continue;
        *all += p->ctx->params[x->param]->size;
        if (x->part.split != TT__WHOLE) *split += p->ctx->params[x->param]->size;
    }
}

/* Warns if all tensor ranks do the same work because no parameter is divided. */
static void tt__tell_unsplit(const tt_program *p)
{
    int64_t all, split;
    tt__count_params(p, &all, &split);
    if (p->arena->tensor == 1 || split || !all) return;
    tt__log(p->ctx, TT_LOG_WARNING, "tensor", "device '%s', tensor %d: the program has no layer of at least "
            "%d weights that can be split, so all tensor ranks do the same work: use data ranks",
            p->arena->group->name, p->arena->tensor, (int)TT__TENSOR_LEAST);
}

/* Warns of each rule of lr_rules whose pattern matches no trained parameter of the program. */
static void tt__tell_unused_rules(const tt_program *p, const tt_compile_options *o)
{
    const tt_tape *t = p->built.t;
    for (const tt_lr_rule *r = o->train ? o->optimizer.lr_rules : NULL; r && r->pattern; r++) {
        bool used = false;
        for (int32_t v = 1; v < p->n_recorded && !used; v++) {
            const tt__tape_value *x = &t->values[v];
            used = x->storage == TT__PARAMETER && x->base == v && x->needs_grad &&
                   tt__match(r->pattern, p->ctx->params[x->param]->name);
        }
        if (!used)
            tt__log(p->ctx, TT_LOG_WARNING, "lr_rules", "no trained parameter has a name that matches the "
                    "pattern '%.200s' of lr_rules: check its spelling", r->pattern);
    }
}

/* Returns whether any stage reads input v. */
static bool tt__reads_input(const tt_program *p, int32_t v)
{
    bool read = false;
    for (int s = 0; s < p->stages && !read; s++)
        read = p->stage[s]->built.t->values[v].place != TT__NO_PLACE;
    return read;
}

/* Errors of the stages of a pipeline that exceed the budget. */
typedef struct tt__short_stages {
    size_t needs, advised;  /* tt__attempt.needs and .advised of the stage that needs the most bytes */
    size_t max;             /* largest tt__attempt.advised of all stages */
    int at;                 /* number of the stage with the largest tt__attempt.advised */
    char error[TT__ERROR];  /* error of the stage that needs the most bytes; "": all stages fit */
} tt__short_stages;

static void tt__note_stage(const tt_context *ctx, const tt__attempt *a, int stage, tt__short_stages *r)
{
    if (a->advised > r->max) r->max = a->advised, r->at = stage;
    if (r->error[0] && a->needs <= r->needs) return;
    r->needs = a->needs;
    r->advised = a->advised;
    memcpy(r->error, ctx->error, sizeof r->error);
}

/* Fails with the error of the stage that needs the most bytes with the options as they are: a budget of these
   bytes is enough for all stages. If the error's advice leads to fewer bytes than another stage needs at
   least, the message also names the bytes of that stage. */
static tt_status tt__refuse_stages(tt_context *ctx, const tt__short_stages *r)
{
    if (r->max <= r->advised) return tt__fail(ctx, TT_ERR_BUDGET, "%s", r->error);
    char said[32];
    return tt__fail(ctx, TT_ERR_BUDGET, "%.*s. The smallest possible plan of stage %d is %s", TT__ERROR - 80,
                    r->error, r->at, tt__say_bytes(ctx, r->max, said));
}

/* Compiles the other stages of a pipeline. p: the first stage, whose compilation returned `status`. */
static tt_status tt__compile_stages(tt_program *p, const tt_tape *t, int32_t root,
                                    const tt_compile_options *o, tt__attempt *attempt, tt_status status)
{
    const int stages = p->settings.options.parallel.pipeline;
    const size_t values = (size_t)t->n_values;
    const bool all = !attempt->quiet; /* compile the remaining stages even after one exceeds the budget */
    tt__short_stages refused;
    if (stages == 1) return status;
    memset(&refused, 0, sizeof refused);
    p->stages = stages;
    p->queued_at = (size_t *)tt__calloc(p->ctx, sizeof *p->queued_at * (values + 1));
    if (!p->queued_at) return TT_ERR_MEMORY;
    for (int s = 0;;) {
        if (status != TT_OK && (status != TT_ERR_BUDGET || !all)) return status;
        if (status != TT_OK) tt__note_stage(p->ctx, attempt, s, &refused);
        if (++s == stages) break;
        tt_compile_options of_stage = *o;
        tt_program *q = p->stage[s] = (tt_program *)tt__calloc(p->ctx, sizeof *q);
        if (!q) return TT_ERR_MEMORY;
        q->ctx = p->ctx;
        q->head = p;
        q->rank = p->rank;
        if (o->share) of_stage.share = o->share->stage[s];
        status = tt__compile_into(q, t, root, &of_stage, s, attempt);
    }
    if (refused.error[0]) {
        attempt->needs = refused.needs;
        return tt__refuse_stages(p->ctx, &refused);
    }
    for (size_t v = 1; v <= values; v++) {
        const tt__tape_value *x = &p->built.t->values[v - 1];
        const bool is_input = x->storage == TT__INPUT && x->base == (int32_t)v - 1;
        const bool queued = is_input && tt__reads_input(p, x->base);
        p->queued_at[v] = p->queued_at[v - 1] + (queued ? tt__slot_bytes(x) : 0);
    }
    return TT_OK;
}

/* Prints, one a line, the facts on which the bits of results depend. The lines must be equal in all
   processes. */
static void tt__program_lines(const tt_program *p, char *to, size_t capacity)
{
    tt__text_buffer text = {to, capacity, 0};
    char n[6][32];
    const tt_compile_options *o = &p->settings.options;
    const tt_parallel *r = &o->parallel;
    const tt_optimizer_options *u = &o->optimizer;
    const tt_loss_scale *l = &o->loss_scale;
    if (!p->built.t) return; /* compiling has failed: there is no program to print */
    tt__print(&text, "device '%s'\n", p->settings.group->name);
    tt__print(&text, "data %d, tensor %d, groups %d\n", r->data, r->tensor, r->groups);
    if (r->pipeline > 1)
        tt__print(&text, "pipeline %d, schedule '%s', micros %d\n", r->pipeline, r->schedule, r->micros);
    tt__print(&text, "zero %d%s%s%s\n", r->zero, r->sequence ? ", sequence" : "", r->server ? ", server" : "",
              r->reduce_micros ? ", reduce_micros" : "");
    tt__print(&text, "precision '%s', matmul %d\n", tt__precision_names[p->settings.precision.kind],
              (int)p->settings.matmul);
    tt__print(&text, "train %d, accumulate %d, update '%s', tune %d\n", o->train, o->accumulate,
              tt__update_names[p->chosen.update], p->tunes);
    if (o->train)
        tt__print(&text, "optimizer %s with weight_decay %s, clip_norm %s, beta1 %s, beta2 %s, eps %s, "
                  "momentum %s, state_bits %d\n", tt__optimizers[u->kind].name,
                  tt__shortest(u->weight_decay, n[0]),
                  tt__shortest(u->clip_norm, n[1]), tt__shortest(u->beta1, n[2]),
                  tt__shortest(u->beta2, n[3]), tt__shortest(u->eps, n[4]),
                  tt__shortest(u->momentum, n[5]), u->state_bits);
    if (o->train && u->prune > 0)
        tt__print(&text, "prune %s by %s, from step %lld to %lld, every %d\n", tt__shortest(u->prune, n[0]),
                  u->prune_by_movement ? "movement" : "magnitude", (long long)u->prune_begin,
                  (long long)u->prune_end, u->prune_every);
    uint64_t hash = TT__HASH_BEGIN;
    for (int k = 0; k < p->built.t->n_code; k++)
        if (tt__is(&p->built.t->code[k], TT__WITH_RUN | TT__RMW))
            hash = tt__attr_hash(hash, &p->built.t->code[k].attr);
    if (o->train)
        tt__print(&text, "no_decay, lr_rules and layer_decay with the hash %016llx\n",
                  (unsigned long long)hash);
    if (p->settings.scales)
        tt__print(&text, "loss_scale init %s, growth %s, backoff %s, interval %d\n",
                  tt__shortest(l->init, n[0]), tt__shortest(l->growth, n[1]),
                  tt__shortest(l->backoff, n[2]), l->interval);
    for (int k = 0; k < p->built.t->n_axes; k++)
        if (p->built.t->axes[k].name[0] && !p->built.t->axes[k].parts)
            tt__print(&text, "at most %lld %s\n", (long long)p->built.t->axes[k].capacity,
                      p->built.t->axes[k].name);
    tt__print(&text, "tape %016llx\n", (unsigned long long)p->built.recorded);
    tt__print(&text, "program of %d instructions\n", p->built.t->n_code);
}

/* Waits until all processes have come to point `where`. Fails if a process has an error, or if their lines of
   text differ. own: the lines of this process. */
static tt_status tt__agree_lines(tt_context *ctx, const char *where, tt_status status, char own[TT__NOTE])
{
    tt__net *n = ctx->net;
    char name[96];
    if (!n) return status;
    status = tt__agree(ctx, where, status, own, TT__NOTE);
    const char *first = (const char *)tt__noted(ctx, 0, own);
    for (int k = 1; k < n->processes && status == TT_OK; k++) {
        const char *a = first, *b = (const char *)tt__noted(ctx, k, own);
        if (strcmp(a, b) == 0) continue;
        for (size_t m = strcspn(a, "\n"); strncmp(a, b, m + 1) == 0; m = strcspn(a, "\n")) {
            a += m + 1;
            b += m + 1;
        }
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "%s: %s has %.*s, and process 0 has %.*s: all processes must "
                          "%s with the same settings", where, tt__process_name(n, k, name),
                          (int)strcspn(b, "\n"), b, (int)strcspn(a, "\n"), a,
                          strcmp(where, "tt_compile") == 0 ? "compile" : "train");
    }
    return status;
}

/* Fails unless all processes have compiled the same program without an error. */
static tt_status tt__agree_program(tt_context *ctx, const tt_program *p, tt_status status)
{
    char own[TT__NOTE] = {0};
    if (status == TT_OK && ctx->net) tt__program_lines(p, own, sizeof own);
    return tt__agree_lines(ctx, "tt_compile", status, own);
}

/* Compiles a program with all its stages. Sets *status, and returns NULL only when out of memory. */
static tt_program *tt__compile_all(tt_tape *t, tt_value root, const tt_compile_options *o,
                                   tt__attempt *attempt, tt_status *status)
{
    tt_program *p = (tt_program *)tt__calloc(t->ctx, sizeof *p);
    *status = TT_ERR_MEMORY;
    if (!p) return NULL;
    p->ctx = t->ctx;
    p->head = p->stage[0] = p;
    p->stages = 1;
    p->n_recorded = t->n_values;
    p->n_axes = t->n_axes;
    *status = t->status;
    if (t->status != TT_OK) tt__fail(t->ctx, t->status, "%s", t->error);
    else if (!tt__has_value(t, root))
        *status = tt__fail(t->ctx, TT_ERR_ARGUMENT, "tt_compile: the root %s", tt__why_no_value(t, root));
    else *status = tt__compile_into(p, t, root.id, o, 0, attempt);
    if (*status == TT_OK || *status == TT_ERR_BUDGET)
        *status = tt__compile_stages(p, t, root.id, o, attempt, *status);
    return p;
}

/* Returns the bytes of a program that count against memory_budget: those of its largest stage. */
static size_t tt__bytes_of_largest_stage(tt_program *p)
{
    size_t max = 0;
    for (int s = 0; s < tt__stages(p); s++) {
        const tt_program *q = p->stage[s];
        const size_t moved = tt__one_memory(q) ? q->arena->on_host + tt__offloaded_bytes(&q->built) : 0;
        const size_t bytes = tt__arena_size(q->arena, tt__first_rank(q->arena)) + moved;
        if (bytes > max) max = bytes;
    }
    return max;
}

/* Adds advice to the error about a plan that exceeds memory_budget: the bytes that the plan needs in
   precision "bf16-true" or, if these exceed the budget, too, in "bf16-true" with recompute "budget". Adds
   nothing if the error already names fewer bytes, or with option `share`, because programs that share an
   arena have one precision. */
static void tt__advise_precision(tt_tape *t, tt_value root, const tt_compile_options *o,
                                 const tt__attempt *attempt)
{
    tt_context *ctx = t->ctx;
    tt_compile_options other = *o;
    char error[TT__ERROR], precision[96], with[96], said[32];
    const size_t advised = attempt->advised;
    tt__attempt trial = *attempt;
    const bool budget = o->recompute && strcmp(o->recompute, "budget") == 0;
    const bool half = o->precision && strcmp(o->precision, "bf16-true") == 0;
    if (attempt->quiet || !o->train || o->share || half) return;
    memcpy(error, ctx->error, sizeof error);
    trial.quiet = true;
    other.precision = "bf16-true";
    for (int k = 0; k < 2; k++) {
        tt_status status;
        if (k) other.recompute = "budget";
        tt_program *p = tt__compile_all(t, root, &other, &trial, &status);
        const size_t bytes = status == TT_OK ? tt__bytes_of_largest_stage(p) : trial.needs;
        if (p) tt_program_free(p);
        if (status != TT_OK && status != TT_ERR_BUDGET) break;
        const bool fits = status == TT_OK, last = fits || budget || k;
        if (!last) continue;
        if (!fits && advised && bytes >= advised) break; /* the error already names fewer bytes */
        const size_t used = strlen(error);
        snprintf(error + used, sizeof error - used, "; %s%s%s %s %s%s",
                 tt__say_option(ctx, "precision", "bf16-true", precision), k ? " with " : "",
                 k ? tt__say_option(ctx, "recompute", "budget", with) : "", fits ? "needs" : "still needs",
                 tt__say_bytes(ctx, bytes, said), fits ? ", which fits" : "");
        break;
    }
    tt__fail(ctx, TT_ERR_BUDGET, "%s", error);
}

static tt_program *tt__try_compile(tt_tape *t, tt_value root, const tt_compile_options *o,
                                   tt__attempt *attempt)
{
    const tt_compile_options defaults = tt_compile_options_default();
    tt_status status;
    if (!o) o = &defaults;
    tt_program *p = tt__compile_all(t, root, o, attempt, &status);
    if (!p) return NULL;
    if (status == TT_ERR_BUDGET) {
        tt_program_free(p); /* a stage that fits must not keep its parameters in the old precision */
        p = NULL;
        tt__advise_precision(t, root, o, attempt);
    }
    if (tt__agree_program(t->ctx, p, status) != TT_OK) {
        tt_program_free(p);
        return NULL;
    }
    if (!attempt->quiet) tt__tell_unsplit(p);
    if (!attempt->quiet) tt__tell_unused_rules(p, o);
    return p;
}

tt_program *tt_compile(tt_tape *t, tt_value root, const tt_compile_options *o)
{
    tt__attempt attempt = {false, false, false, false, 0, 0};
    return tt__try_compile(t, root, o, &attempt);
}
