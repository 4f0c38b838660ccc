#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../ops/rules.h"
#include "../passes/overlap.h"
#include "../ranks/groups.h"
#include "../context/devices.h"
#include "../context/context.h"
#include "../compile/program.h"

/* ===========================================================================================================
   REPORTS                                                                                        src/reports/
   Prints a program and its memory plan as numbers, text and picture, and measures a device's rates. Uses all
   sections above.
   ======================================================================================================== */

/* -------------------------------------------------------------------------------------------------- costs
   tt_measure_costs trains a transformer block in its own context and times each launch. The block begins with
   so few rows and columns that the overhead of launches dominates, and grows until steps are long. A block
   with one row measures the update, which dominates its steps. */

/* TT__STEP_LONG and TT__COPY_LONG: seconds from which a step or a copy is long enough to measure.
   TT__STEPS_LONG: a program runs 2 to 6 steps, until they have taken this many seconds together. ..._WIDTH:
   number of rows and of columns of a block; TT__UPDATE_WIDTH: number of columns of a block with one row.
   ..._COPY: bytes of a copy. */
#define TT__STEP_LONG 0.06
#define TT__STEPS_LONG 0.15
#define TT__COPY_LONG 0.002
enum { TT__MIN_WIDTH = 64, TT__MAX_WIDTH = 2048, TT__UPDATE_WIDTH = 576, TT__MIN_COPY = 1 << 20,
       TT__MAX_COPY = 1 << 26 };

/* A program that trains a transformer block, and its inputs. */
typedef struct tt__sample {
    tt_program *p;
    tt_value x, y, starts;
    int rows, seqs;
    int32_t *start;
    float *numbers;         /* data of both x and y */
} tt__sample;

/* Records a linear layer with `out` columns or, if `out` is 0, a norm. The parameters' names are numbers,
   because names must be unique. */
static tt_value tt__sample_layer(tt_tape *t, tt_value x, int64_t out)
{
    const int64_t in = tt_value_width(t, x), dims[] = {out ? out : in, in};
    tt_param *p[2];
    for (int k = 0; k < 2; k++) {
        char name[32];
        const tt_init init = {k ? TT_INIT_ZEROS : out ? TT_INIT_UNIFORM : TT_INIT_ONES, 0.05f};
        snprintf(name, sizeof name, "%d", t->ctx->n_params);
        p[k] = tt_param_new(t->ctx, name, out && !k ? 2 : 1, dims, init);
        if (!p[k]) tt__out_of_memory(t);
    }
    return out ? tt_linear(t, x, p[0], p[1]) : tt_layernorm(t, x, p[0], p[1], 1e-5f);
}

static tt_status tt__sample_new(tt_context *ctx, tt__sample *s, const char *device, const char *precision,
                                int rows, int width)
{
    const int64_t n = width, elements = rows * n;
    memset(s, 0, sizeof *s);
    s->rows = rows;
    s->seqs = rows > 128 ? rows / 128 : 1;
    s->start = (int32_t *)tt__alloc(ctx, sizeof *s->start * (size_t)(s->seqs + 1));
    s->numbers = (float *)tt__alloc(ctx, sizeof *s->numbers * (size_t)elements);
    tt_tape *t = s->start && s->numbers ? tt_tape_new(ctx) : NULL;
    if (!t) return TT_ERR_MEMORY;
    for (int k = 0; k <= s->seqs; k++) s->start[k] = k * rows / s->seqs;
    for (int64_t k = 0; k < elements; k++) s->numbers[k] = (float)(k % 251) / 251 - 0.5f;
    const tt_attention_options heads = tt_attention_options_default(width / 64);
    s->x = tt_input(t, "x", TT_F32, rows, n);
    s->y = tt_input(t, "y", TT_F32, rows, n);
    s->starts = tt_seq_start(t, "starts", s->seqs);
    tt_value h = tt__sample_layer(t, tt__sample_layer(t, s->x, n), 0);
    tt_value q = tt__sample_layer(t, h, n), k = tt__sample_layer(t, h, n), v = tt__sample_layer(t, h, n);
    h = tt_add(t, h, tt__sample_layer(t, tt_attention(t, q, k, v, s->starts, &heads), n));
    v = tt_gelu(t, tt__sample_layer(t, tt__sample_layer(t, h, 0), 4 * n));
    h = tt_add(t, h, tt__sample_layer(t, v, n));
    const tt_value none = {0}, loss = tt_mean_squared_error(t, h, s->y, none);
    tt_compile_options o = tt_compile_options_default();
    o.device = device;
    o.precision = precision;
    o.optimizer.clip_norm = 1;
    s->p = tt_compile(t, loss, &o);
    tt_tape_free(t);
    return s->p ? tt_allocate(s->p) : ctx->status;
}

static void tt__sample_free(tt_context *ctx, tt__sample *s)
{
    tt_program_free(s->p);
    tt__free(ctx, s->start);
    tt__free(ctx, s->numbers);
}

/* Sets the inputs and runs a step. *seconds receives the duration of tt_step alone. */
static tt_status tt__sample_step(tt__sample *s, double *seconds)
{
    tt_status status = TT_OK;
    for (int d = 0; d < s->p->arena->data && status == TT_OK; d++) {
        status = tt_set_rank(s->p, d, s->x, s->numbers, s->rows);
        if (status == TT_OK) status = tt_set_rank(s->p, d, s->y, s->numbers, s->rows);
        if (status == TT_OK) status = tt_set_rank(s->p, d, s->starts, s->start, s->seqs + 1);
    }
    *seconds = tt__seconds();
    if (status == TT_OK) status = tt_step(s->p, 0, NULL);
    *seconds = tt__seconds() - *seconds;
    return status;
}

/* The launches of a step, by kind of cost: their seconds, their work in FLOPs or bytes, their number. */
typedef struct tt__profile {
    double seconds[TT__COST_KINDS], work[TT__COST_KINDS];
    int launches[TT__COST_KINDS];
} tt__profile;

/* Runs some steps and takes the shortest time of each launch, because other work on the machine slows down
   some steps but seldom all. *seconds: the sum of the launches' shortest times or, if steps are very long,
   the duration of the last step. */
static tt_status tt__profile_steps(tt_context *ctx, tt__sample *s, tt__profile *to, double *seconds)
{
    const tt_tape *t = s->p->built.t;
    double now, all = 0;
    tt_status status = tt__sample_step(s, &now); /* not timed: the first step also touches memory and loads
                                                    kernels */
    double *each = (double *)tt__alloc(ctx, sizeof *each * (size_t)t->n_code);
    if (!each) return TT_ERR_MEMORY;
    for (int k = 0; k < t->n_code; k++) each[k] = INFINITY;
    ctx->profile = each;
    for (int k = 0; status == TT_OK && (k < 2 || (all < TT__STEPS_LONG && k < 6)); k++) {
        status = tt__sample_step(s, &now);
        all += now;
    }
    ctx->profile = NULL;
    memset(to, 0, sizeof *to);
    for (int k = 0, first = 0; k < t->n_code; k++) { /* first: number of the first instruction of a launch */
        const tt__cost cost = tt__cost_of(&t->code[k]);
        if (isfinite(each[first])) to->work[cost] += tt__work_of(t, &t->code[k]);
        if (k == first && isfinite(each[k])) {
            to->launches[cost]++;
            to->seconds[cost] += each[k];
        }
        if (!t->code[k].with_next) first = k + 1;
    }
    *seconds = 0;
    for (int c = 0; c < TT__COST_KINDS; c++) *seconds += to->seconds[c];
    if (now > 8 * TT__STEP_LONG) *seconds = now; /* so long a step needs no repetition */
    tt__free(ctx, each);
    return status;
}

/* Makes a program with a block of `rows` rows and `width` columns, and profiles its steps. */
static tt_status tt__profile_of(tt_context *ctx, const char *device, const char *precision, int rows,
                                int width, tt__profile *to, double *seconds)
{
    tt__sample s;
    ctx->profiles = true;
    tt_status status = tt__sample_new(ctx, &s, device, precision, rows, width);
    if (status == TT_OK) status = tt__profile_steps(ctx, &s, to, seconds);
    ctx->profiles = false;
    tt__sample_free(ctx, &s);
    return status;
}

/* Computes rates (work a second) from two profiles with the same launches: the difference in work divided by
   the difference in time. `small` is all 0 if there is no smaller profile. For collectives, also computes the
   seconds to start a collective. */
static void tt__rates_of(const tt__profile *x, const tt__profile *small, bool single, tt_costs *to)
{
    for (int c = 0; c < TT__COST_KINDS; c++) {
        const double more = x->work[c] - small->work[c], longer = x->seconds[c] - small->seconds[c];
        if (!(x->work[c] > 0)) continue;
        double *rate = tt__rate_of(to, (tt__cost)c, single);
        *rate = more > 0 && longer > 0 ? more / longer : x->work[c] / fmax(x->seconds[c], 1e-9);
        if (c == TT__COST_RANKS)
            to->barrier = fmax(0, small->seconds[c] - small->work[c] / *rate) / x->launches[c];
    }
}

/* Sets costs->launch, the seconds that a launch takes beside its work. Runs steps whose launches are not
   timed, subtracts the seconds that the rates predict for the work of a step from the seconds of the shortest
   step, and divides the difference by the number of launches. min: seconds of a step whose launches were
   timed one by one; the shortest step counts as at most that long. */
static tt_status tt__measure_launch(tt__sample *s, double min, tt_costs *costs)
{
    double seconds;
    int launches = 0;
    tt__replay work;
    tt_status status = TT_OK;
    for (int k = 0; k < 5 && status == TT_OK; k++) {
        status = tt__sample_step(s, &seconds);
        min = fmin(min, seconds);
    }
    const tt_tape *t = s->p->built.t;
    for (int k = 0; k < t->n_code; k++) launches += !t->code[k].with_next;
    costs->launch = 0;
    if (status == TT_OK) status = tt__replay_of(t, costs, &work);
    if (status == TT_OK) costs->launch = fmax(0, min - work.step.compute - work.step.exposed) / launches;
    return status;
}

/* Measures the bytes a second of one instruction: a copy (TT__OP_COPY) or a product with 1 (TT__OP_SCALE). */
static tt_status tt__measure_copy(tt_context *ctx, const tt__device_group *c, int op, void *from, void *to,
                                  double *rate)
{
    const tt__backend *b = c->kind->backend;
    tt__instr i = tt__new_instr(op);
    double seconds = 0;
    tt__launch l;
    tt_status status = TT_OK;
    i.attr.scale = 1;
    memset(&l, 0, sizeof l);
    l.device = c->device[0];
    l.instr = &i;
    for (int64_t n = TT__MIN_COPY; n <= TT__MAX_COPY && status == TT_OK; n *= 4) {
        if (seconds >= TT__COPY_LONG) break;
        const tt__mat m = {from, TT_F32, n / 4096, 1024, 1024};
        l.in[0] = l.out[0] = m;
        l.out[0].data = to;
        for (int k = 0; k < 4 && status == TT_OK; k++) {
            double begin = tt__seconds();
            status = b->launch(&l, 1);
            if (status == TT_OK) status = b->wait(l.device);
            begin = tt__seconds() - begin;
            seconds = k > 1 ? fmin(seconds, begin) : begin; /* leaves out the first run, which touches
                                                               memory */
        }
        *rate = (double)n / fmax(seconds, 1e-9);
    }
    return tt__device_status(ctx, c, 0, status);
}

/* Measures the bytes a second of rank 0's device memory and of its links to and from the host. */
static tt_status tt__measure_links(tt_context *ctx, const tt__device_group *c, tt_costs *costs)
{
    const tt__backend *b = c->kind->backend;
    tt__device *d = c->device[0];
    void *x = b->allocate(d, TT__MAX_COPY), *y = x ? b->allocate(d, TT__MAX_COPY) : NULL;
    void *host = y ? b->allocate_host(d, TT__MAX_COPY) : NULL;
    tt_status status = host ? TT_OK : tt__device_status(ctx, c, 0, TT_ERR_MEMORY);
    if (status == TT_OK) status = tt__device_status(ctx, c, 0, b->fill(d, x, 0, TT__MAX_COPY));
    if (status == TT_OK) status = tt__measure_copy(ctx, c, TT__OP_SCALE, x, y, &costs->memory);
    if (status == TT_OK) status = tt__measure_copy(ctx, c, TT__OP_COPY, x, host, &costs->to_host);
    if (status == TT_OK) status = tt__measure_copy(ctx, c, TT__OP_COPY, host, x, &costs->from_host);
    costs->memory *= 2; /* each byte is read and written */
    if (host) b->release_host(d, host);
    if (y) b->release(d, y);
    if (x) b->release(d, x);
    return status;
}

/* Returns the width (number of rows and of columns) with which a step should be long enough to measure, if a
   step with `width` took `seconds`. Returns `width` itself if that step was long enough. */
static int tt__next_width(int width, double seconds)
{
    const double times = fmin(4, cbrt(TT__STEP_LONG / fmax(seconds, 1e-9)));
    const int next = (int)(times * width) / 64 * 64;
    return times < 1.2 || next <= width ? width : next < TT__MAX_WIDTH ? next : TT__MAX_WIDTH;
}

/* Measures the rates of instructions in fp32 (`single`) or bf16. *min: seconds of the smallest step. */
static tt_status tt__measure_precision(tt_context *ctx, const char *device, bool single, double *min,
                                       tt_costs *costs)
{
    tt__profile now, small;
    memset(&small, 0, sizeof small);
    for (int width = TT__MIN_WIDTH, before = 0; width != before;) {
        double seconds = 0;
        const char *precision = single ? "32-true" : "bf16-true";
        const tt_status status = tt__profile_of(ctx, device, precision, width, width, &now, &seconds);
        if (status == TT_ERR_MEMORY && before) return TT_OK; /* keeps the rates measured so far */
        if (status != TT_OK) return status;
        tt__rates_of(&now, &small, single, costs);
        if (!before) small = now, *min = seconds;
        before = width;
        width = tt__next_width(width, seconds);
    }
    return TT_OK;
}

tt_status tt_measure_costs(tt_context *ctx, const char *device, tt_costs *costs)
{
    tt_context_options o = ctx->options;
    tt_costs found = tt_costs_default();
    tt_status status = tt_device_text(ctx, device, NULL, 0);
    if (status != TT_OK) return status;
    o.threads = tt_threads(ctx);
    o.isa = tt_isa(ctx);
    o.bf16 = tt__bf16_name[ctx->cpu.bf16];
    o.verify = false;
    o.logger.log = NULL; /* the caller's context has logged the warnings already */
    tt_context *own = tt_open(&o);
    if (!own)
        return tt__fail(ctx, TT_ERR_MEMORY,
                        "tt_measure_costs: cannot open a second context, for lack of memory or threads: set "
                        "`threads` lower, or free memory");
    tt__sample s; /* runs like users' programs, with streams and graphs of launches */
    tt__profile update;
    double min, ignored;
    status = tt__sample_new(own, &s, device, "32-true", TT__MIN_WIDTH, TT__MIN_WIDTH);
    if (status == TT_OK) status = tt__measure_links(own, tt__find_devices(own, device), &found);
    if (status == TT_OK)
        status = tt__profile_of(own, "cpu", "32-true", 1, TT__UPDATE_WIDTH, &update, &ignored);
    if (status == TT_OK) /* the ranks of this process share the CPU */
        found.update_host = update.work[TT__COST_UPDATE] / fmax(update.seconds[TT__COST_UPDATE], 1e-9) /
                            s.p->settings.group->local;
    if (status == TT_OK) status = tt__measure_precision(own, device, true, &min, &found);
    if (status == TT_OK) status = tt__measure_precision(own, device, false, &ignored, &found);
    if (status == TT_OK) status = tt__measure_launch(&s, min, &found);
    tt__sample_free(own, &s);
    if (status == TT_OK) status = tt__check_costs(own, &found);
    if (status == TT_OK) *costs = found;
    else tt__fail(ctx, status, "tt_measure_costs: %s", tt_error(own));
    tt_close(own);
    return status;
}
